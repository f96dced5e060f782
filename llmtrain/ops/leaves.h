// leaves.h: operations of ranks that share a layer, in plain C: the specification of leaves.cuh, and the CPU backend.
//
//   1. sums         of partial results, as a binary tree
//   2. embedding    of a range of the vocabulary, and of all ranges
//   3. classifier   statistics of ranges of columns, and the loss and gradients from those of all ranges
//
// "Megatron-LM": a rank has some columns of a weight and computes a part of each sum, or some rows of the vocabulary.
// So that the bits do not depend on the number of ranks, a sum over what they share is always cut into the same number
// of parts, the leaves, a power of two, and leaves are added in the same order on however many ranks they are computed.

#ifndef LLMTRAIN_LEAVES_H
#define LLMTRAIN_LEAVES_H

#include "arithmetic.h"
#include "base.h"

enum { LEAVES_MAX = 128 };

// The statistics of a row of a leaf of logits, and their number.
enum { LEAF_MAXIMUM, LEAF_SUM, LEAF_TARGET, LEAF_STATS };
#define LEAF_NO_MAXIMUM (-0x1p127f)  // of a leaf without logits: finite, so that no difference is infinity - infinity

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 1. Sums

// Copies `columns` elements of each of M rows; the rows of out begin out_stride elements apart, those of in in_stride.
static inline void columns_copy(floatX* out, size_t out_stride, const floatX* in, size_t in_stride, size_t M,
                                size_t columns, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (M > 1)
    for (size_t row = 0; row < M; row++)
        memcpy(out + row * out_stride, in + row * in_stride, columns * sizeof(floatX));
}

// out (M, C) = the sum of parts (count, M, C) over count, + bias (C) or NULL; count is a power of 2, up to LEAVES_MAX.
// Neighbors are added first: ((p0 + p1) + (p2 + p3)) + ..., in float; the bias last; then rounded, once.
static inline void leaves_sum(floatX* out, const float* parts, const floatX* bias, size_t count, size_t M, size_t C,
                              Stream stream) {
    (void)stream;
    enum { STRIP = 64, LEVELS = 8 };  // LEAVES_MAX is 2^(LEVELS - 1)
    size_t strips = divide_up(C, STRIP);
    #pragma omp parallel for
    for (size_t i = 0; i < M * strips; i++) {
        size_t first = i % strips * STRIP, n = min_size(STRIP, C - first), at = i / strips * C + first;
        float sums[LEVELS][STRIP];  // sums[k]: of 2^k parts, until their neighbors are there
        for (size_t part = 0; part < count; part++) {
            const float* p = parts + part * M * C + at;
            size_t level = 0;
            float sum[STRIP];
            for (size_t c = 0; c < n; c++) sum[c] = p[c];
            for (; part >> level & 1; level++)
                for (size_t c = 0; c < n; c++) sum[c] = sums[level][c] + sum[c];
            for (size_t c = 0; c < n; c++) sums[level][c] = sum[c];
            if (part + 1 < count) continue;
            for (size_t c = 0; c < n; c++) out[at + c] = floatX_of(bias ? sum[c] + float_of(bias[first + c]) : sum[c]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Embedding
//
// embedding_forward by ranks that each have `rows` rows of the vocabulary. The backward is embedding_backward_part.

// out (N, C): token_weight[tokens[n] - first,:], or zeros if that is no row of token_weight (rows, C).
static inline void embedding_part_forward(floatX* out, const int32_t* tokens, const floatX* token_weight, size_t first,
                                          size_t rows, size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (N > 1)
    for (size_t n = 0; n < N; n++) {
        size_t row = (size_t)tokens[n] - first;  // tokens before `first` wrap around, to large numbers
        if (row < rows) memcpy(out + n * C, token_weight + row * C, C * sizeof(floatX));
        else memset(out + n * C, 0, C * sizeof(floatX));
    }
}

// out (N, C): the bits of embedding_forward, from parts (count, N, C) of the ranges 0 to rows - 1, rows to 2 rows - 1
// and so on: out[n,:] = parts[tokens[n] / rows, n,:] + position_weight[positions[n],:]; position_weight may be NULL.
static inline void embedding_join(floatX* out, const floatX* parts, const int32_t* tokens, const int32_t* positions,
                                  const floatX* position_weight, size_t rows, size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (N > 1)
    for (size_t n = 0; n < N; n++) {
        floatX* o = out + n * C;
        const floatX* token = parts + ((size_t)tokens[n] / rows * N + n) * C;
        if (position_weight == NULL) {
            memcpy(o, token, C * sizeof(floatX));
            continue;
        }
        const floatX* position = position_weight + (size_t)positions[n] * C;
        for (size_t c = 0; c < C; c++) o[c] = floatX_of(float_of(token[c]) + float_of(position[c]));
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Classifier
//
// `classifier` by ranks that each have `columns` columns of the logits, in equal leaves. The log of the sum of all
// exp(x_v) is m + log(sum over leaves of s_i exp(m_i - m)), where m_i is the maximum of leaf i, m that of all leaves,
// and s_i the sum of exp(x_v - m_i) over the leaf.

// stats (N, leaves, LEAF_STATS) of logits (N, columns), which are columns `first` to first + columns - 1 of all, those
// from V on being padding, which may hold anything: the maximum of the leaf's logits, the sum of exp(x - maximum), and
// the target's logit, 0 if it is in another leaf. Zeros where the target is -1. A leaf's statistics depend on its
// logits and its width, columns / leaves, alone.
static inline void classifier_leaves(float* stats, const floatX* logits, const int32_t* targets, size_t first,
                                     size_t leaves, size_t N, size_t V, size_t columns, Stream stream) {
    (void)stream;
    size_t width = columns / leaves;
    #pragma omp parallel for
    for (size_t i = 0; i < N * leaves; i++) {
        const floatX* x = logits + i * width;
        float* s = stats + i * LEAF_STATS;
        int32_t target = targets[i / leaves];
        if (target < 0) {
            memset(s, 0, LEAF_STATS * sizeof *s);
            continue;
        }
        size_t begin = first + i % leaves * width, n = begin < V ? min_size(width, V - begin) : 0;
        size_t at = (size_t)target - begin;  // if the target is in a leaf before, a large number
        float maximum = LEAF_NO_MAXIMUM;
        #pragma omp simd reduction(max:maximum)
        for (size_t v = 0; v < n; v++) maximum = float_of(x[v]) > maximum ? float_of(x[v]) : maximum;
        s[LEAF_MAXIMUM] = maximum;
        s[LEAF_SUM] = VECTOR_SUM(v, n, exp_fast(float_of(x[v]) - maximum));
        s[LEAF_TARGET] = at < n ? float_of(x[at]) : 0.0f;
    }
}

// losses (N) and, if dloss is not 0, the gradients in place of logits (N, columns), as `classifier` says, from stats
// (parts, N, leaves, LEAF_STATS) of all ranks, in the order of their columns, which are equally many on each. The bits
// depend on the number of all leaves, parts * leaves, not on how many are on one rank. (With one leaf they are those of
// `classifier`; on a GPU if logits are aligned to 16 bytes.)
static inline void classifier_gradient(floatX* logits, float* losses, const float* stats, const int32_t* targets,
                                       float dloss, const float* weights, size_t first, size_t parts, size_t leaves,
                                       size_t N, size_t V, size_t columns, Stream stream) {
    (void)stream;
    size_t end = first < V ? min_size(columns, V - first) : 0;  // padding begins there
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        floatX* x = logits + row * columns;
        if (targets[row] < 0) {
            losses[row] = 0.0f;
            if (dloss != 0.0f) for (size_t v = 0; v < columns; v++) x[v] = floatX_of(0.0f);
            continue;
        }
        float maximum = LEAF_NO_MAXIMUM, sum = 0.0f, target_logit = 0.0f;
        for (size_t i = 0; i < parts * leaves; i++) {
            const float* s = stats + ((i / leaves * N + row) * leaves + i % leaves) * LEAF_STATS;
            maximum = s[LEAF_MAXIMUM] > maximum ? s[LEAF_MAXIMUM] : maximum;
            target_logit += s[LEAF_TARGET];  // zeros, but for one leaf
        }
        for (size_t i = 0; i < parts * leaves; i++) {
            const float* s = stats + ((i / leaves * N + row) * leaves + i % leaves) * LEAF_STATS;
            sum += s[LEAF_SUM] * exp_fast(s[LEAF_MAXIMUM] - maximum);
        }
        losses[row] = (float)log_double((double)sum) + (maximum - target_logit);
        if (dloss == 0.0f) continue;
        float gradient = weights ? dloss * weights[row] : dloss, scale = gradient / sum;
        #pragma omp simd
        for (size_t v = 0; v < end; v++) x[v] = floatX_of(exp_fast(float_of(x[v]) - maximum) * scale);
        for (size_t v = end; v < columns; v++) x[v] = floatX_of(0.0f);
        size_t at = (size_t)targets[row] - first;
        float target_probability = exp_fast(target_logit - maximum) / sum;
        if (at < end) x[at] = floatX_of((target_probability - 1.0f) * gradient);
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_LEAVES_H
