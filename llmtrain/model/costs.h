// costs.h: what the operations of a training step cost: their arithmetic, their minimum memory traffic, and the time
// that follows from a machine's rates.
//
//   Cost c = cost_matmul(M, N, K);
//   double ms = cost_ms(&c, &rates);             the longer of its arithmetic and its traffic at these rates
//
// An operation is counted as in a textbook: inputs read once, outputs written once, an exponential as 25 floating-point
// operations, a comparison as one. dev/bench/bench.c measures how close the operations come to that.
//
// Letters as in llmtrain.h.

#ifndef LLMTRAIN_COSTS_H
#define LLMTRAIN_COSTS_H

#include "../ops/optimizers/optimizers.h"

typedef struct {
    bool matmul;          // its arithmetic runs at the rate of matmuls
    double flops, bytes;
} Cost;

// The rates of one rank's machine, per second.
typedef struct {
    double matmul;        // flops of matmuls
    double other;         // flops of attention, nonlinearities and the classifier
    double memory;        // bytes read and written
    double comm;          // bytes sent to other ranks
    double offload;       // bytes of offloaded data read and written
    double update[OPTIMIZER_COUNT][2];  // elements updated by each optimizer, without and with master weights in 16-bit
                                        // builds; 0: not known, its memory traffic decides
} Rates;

#define COST_X ((double)sizeof(floatX))  // bytes of one stored element
#define COST_EXP 25.0
#define COST_SIGMOID (COST_EXP + 3)

static inline Cost cost_of(double flops, double bytes) {
    Cost c = {false, flops, bytes};
    return c;
}

static inline double cost_ms(const Cost* c, const Rates* r) {
    double arithmetic = c->flops / (c->matmul ? r->matmul : r->other), memory = c->bytes / r->memory;
    return 1e3 * (arithmetic > memory ? arithmetic : memory);
}

// (M, N) = (M, K) (N, K)^T, or the gradient of its input. The gradient of the weight (N, K) is added to a float array.
static inline Cost cost_matmul(size_t M, size_t N, size_t K) {
    double m = (double)M, n = (double)N, k = (double)K;
    Cost c = {true, 2 * m * n * k, COST_X * (m * k + n * k + m * n)};
    return c;
}
static inline Cost cost_matmul_weight(size_t M, size_t N, size_t K) {
    double m = (double)M, n = (double)N, k = (double)K;
    Cost c = {true, 2 * m * n * k, COST_X * (m * k + m * n) + 8 * n * k};
    return c;
}

// positions: whether position embeddings, or their gradients, are added too.
static inline Cost cost_embedding_forward(size_t B, size_t T, size_t C, bool positions) {
    double rows = (double)B * (double)T, n = rows * (double)C;
    return cost_of(positions ? n : 0, 2 * COST_X * n + 4 * rows + (positions ? COST_X * (double)(T * C) : 0));
}
static inline Cost cost_embedding_backward(size_t B, size_t T, size_t C) {
    double rows = (double)B * (double)T, n = rows * (double)C;
    return cost_of(n, (COST_X + 8) * n + 4 * rows);
}
static inline Cost cost_position_backward(size_t B, size_t T, size_t C) {
    double rows = (double)B * (double)T, n = rows * (double)C;
    return cost_of(n, COST_X * n + 4 * rows + 8 * (double)(T * C));
}

// centered: layernorm; otherwise rmsnorm. branch: with the residual add.
static inline Cost cost_norm_forward(size_t N, size_t C, bool centered, bool branch) {
    double n = (double)N * (double)C;
    return cost_of((centered ? 9 : 5) * n, COST_X * (branch ? 4 : 2) * n + (centered ? 8 : 4) * (double)N);
}
static inline Cost cost_norm_backward(size_t N, size_t C, bool centered) {
    double n = (double)N * (double)C;
    return cost_of((centered ? 19 : 13) * n, COST_X * 4 * n + (centered ? 8 : 4) * (double)N);
}

// heads: the number of query and key heads that are rotated or normalized.
static inline Cost cost_qk_norm_forward(size_t N, size_t heads, size_t D) {
    double n = (double)(N * heads) * (double)D;
    return cost_of(5 * n, 3 * COST_X * n);
}
static inline Cost cost_qk_norm_backward(size_t N, size_t heads, size_t D) {
    double n = (double)(N * heads) * (double)D;
    return cost_of(13 * n, 3 * COST_X * n);
}
static inline Cost cost_rope(size_t B, size_t T, size_t heads, size_t D) {
    double n = (double)(B * T * heads) * (double)D;
    return cost_of(3 * n, 2 * COST_X * n + 4 * (double)(T * D));
}

// A visible pair of query and key costs two dot products of length D forward, five backward, and an exponential.
static inline Cost cost_attention_forward(size_t B, size_t T, size_t H, size_t K, size_t D) {
    double rows = (double)B * (double)T, pairs = 0.5 * rows * (double)H * (double)(T + 1);
    return cost_of(pairs * (4 * (double)D + COST_EXP + 3), rows * (COST_X * 2 * (double)((H + K) * D) + 4 * (double)H));
}
static inline Cost cost_attention_backward(size_t B, size_t T, size_t H, size_t K, size_t D) {
    double rows = (double)B * (double)T, pairs = 0.5 * rows * (double)H * (double)(T + 1);
    return cost_of(pairs * (10 * (double)D + COST_EXP + 3),
                   rows * (COST_X * 4 * (double)((H + K) * D) + 8 * (double)H));
}

// For n outputs.
static inline Cost cost_gelu_forward(double n) { return cost_of((COST_SIGMOID + 7) * n, 2 * COST_X * n); }
static inline Cost cost_gelu_backward(double n) { return cost_of((COST_SIGMOID + 15) * n, 3 * COST_X * n); }
static inline Cost cost_swiglu_forward(double n) { return cost_of((COST_SIGMOID + 2) * n, 3 * COST_X * n); }
static inline Cost cost_swiglu_backward(double n) { return cost_of((COST_SIGMOID + 8) * n, 5 * COST_X * n); }

// gradient: the logits are replaced by their gradients.
static inline Cost cost_classifier(size_t N, size_t V, size_t Vp, bool gradient) {
    double n = (double)N;
    return cost_of(n * (double)V * (gradient ? 2 * COST_EXP + 5 : COST_EXP + 3),
                   COST_X * (gradient ? 2 : 1) * n * (double)Vp);
}

#endif  // LLMTRAIN_COSTS_H
