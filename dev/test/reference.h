// reference.h: every operation of the model once more, in double and without any cleverness: the formulas of the
// operations, to compare kernels with. Each gradient written here is itself checked against finite differences.
// Attention is the textbook form of kernels_cpu.h; CPU(operation) is defined by the includer.
//
// Besides its value, an element of a Result carries what rounding errors of a float implementation scale with:
//   size     the sum of the absolute values of the terms it is made of: errors of float arithmetic, in units of 2^-24
//   rounded  the same for intermediate values that are stored as floatX, in units of its epsilon
// An operation's inputs are the arrays in[0], in[1], ... listed above it; a backward makes din[i], the gradient of
// sum(dout * out) with respect to in[i]. Results start as zeros. Names of sizes are those of kernels_cpu.h.

#ifndef LLMTRAIN_REFERENCE_H
#define LLMTRAIN_REFERENCE_H

#include "llmtrain/ops/base.h"

typedef struct {
    double *value, *size, *rounded;
    size_t n;
} Result;

typedef struct {
    size_t B, T, C, M, N, H, K, D, F, V, Vp;
    size_t first_position, parts, copies;
    double epsilon, theta;
    bool mean;               // normalization: layernorm; otherwise rmsnorm
    const int32_t* tokens;   // embedding: (N); classifier: targets (N)
    const int32_t* positions;  // embedding, RoPE: (N)
    Result* lse;             // attention: the logarithms of the sums, (B, H, T), for the backward; or NULL
    bool q8;                 // attention_decode: the cache holds 8 bits
    double smallest_normal;  // attention: of floatX, if probabilities and their gradients are rounded to it on the way
} Shape;

typedef void (*ReferenceForward)(Result* out, double* const* in, const Shape* s);
typedef void (*ReferenceBackward)(Result* const* din, const double* dout, double* const* in, const Shape* s);

static void result_add(Result* r, size_t i, double value, double size) {
    r->value[i] += value;
    r->size[i] += size;
}

static void result_term(Result* r, size_t i, double term) { result_add(r, i, term, fabs(term)); }

// Loops of so many operations run on all processors; each element is added up by one of them, in the same order.
static const size_t REFERENCE_LARGE = (size_t)1 << 20;

// ------------------------------------------------------------------------------------------------
// Embedding: in[0] token_weight (Vp, C), in[1] position_weight (context, C) or NULL; out (N, C)

static void reference_embedding(Result* out, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N * s->C; i++) {
        size_t row = i / s->C, c = i % s->C;
        result_term(out, i, in[0][(size_t)s->tokens[row] * s->C + c]);
        if (in[1]) result_term(out, i, in[1][(size_t)s->positions[row] * s->C + c]);
    }
}

static void reference_embedding_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N * s->C; i++) {
        size_t row = i / s->C, c = i % s->C;
        result_term(din[0], (size_t)s->tokens[row] * s->C + c, dout[i]);
        if (in[1]) result_term(din[1], (size_t)s->positions[row] * s->C + c, dout[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// Normalization: in[0] x (N, C), in[1] weight (C), in[2] bias (C; layernorm only); out (N, C)

typedef struct {
    double mean, rstd;
    double average;  // of |x| where the mean is subtracted: what the mean's error scales with
} RowStatistics;

static RowStatistics reference_statistics(const double* x, const Shape* s) {
    RowStatistics r = {0.0, 0.0, 0.0};
    double squares = 0.0;
    if (s->mean) {
        for (size_t c = 0; c < s->C; c++) {
            r.mean += x[c] / (double)s->C;
            r.average += fabs(x[c]) / (double)s->C;
        }
    }
    for (size_t c = 0; c < s->C; c++) squares += (x[c] - r.mean) * (x[c] - r.mean);
    r.rstd = 1.0 / sqrt(squares / (double)s->C + s->epsilon);
    return r;
}

static double reference_normal(double x, RowStatistics r) { return (x - r.mean) * r.rstd; }

// The error of the mean moves x - mean, and through rstd it scales the result.
static double reference_normal_size(double x, RowStatistics r) {
    return (fabs(x) + r.average) * r.rstd * (1.0 + fabs(reference_normal(x, r)));
}

static void reference_norm(Result* out, double* const* in, const Shape* s) {
    for (size_t row = 0; row < s->N; row++) {
        const double* x = in[0] + row * s->C;
        RowStatistics r = reference_statistics(x, s);
        for (size_t c = 0; c < s->C; c++) {
            double weight = in[1][c], bias = s->mean ? in[2][c] : 0.0;
            result_add(out, row * s->C + c, reference_normal(x[c], r) * weight + bias,
                       reference_normal_size(x[c], r) * fabs(weight) + fabs(bias));
        }
    }
}

static void reference_norm_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    size_t C = s->C;
    for (size_t row = 0; row < s->N; row++) {
        const double *x = in[0] + row * C, *d = dout + row * C, *weight = in[1];
        RowStatistics r = reference_statistics(x, s);
        double g_mean = 0.0, g_size = 0.0, gn_mean = 0.0, gn_size = 0.0;
        for (size_t c = 0; c < C; c++) {
            double n = reference_normal(x[c], r), n_size = reference_normal_size(x[c], r), g = d[c] * weight[c];
            if (s->mean) g_mean += g / (double)C;
            if (s->mean) g_size += fabs(g) / (double)C;
            gn_mean += g * n / (double)C;
            gn_size += fabs(g) * n_size / (double)C;
            result_add(din[1], c, d[c] * n, fabs(d[c]) * n_size);
            if (s->mean) result_term(din[2], c, d[c]);
        }
        for (size_t c = 0; c < C; c++) {
            double n = reference_normal(x[c], r), n_size = reference_normal_size(x[c], r), g = d[c] * weight[c];
            result_add(din[0], row * C + c, r.rstd * (g - g_mean - n * gn_mean),
                       r.rstd * (fabs(g) + g_size + n_size * gn_size) * (1.0 + r.average * r.rstd));
        }
    }
}

// Norms of query and key heads: in[0] qkv (N, (H + 2K) D), in[1] and in[2] their weights (D); C is D

static void reference_qk_norm(Result* out, double* const* in, const Shape* s) {
    size_t heads = s->H + 2 * s->K;
    for (size_t i = 0; i < s->N * heads; i++) {
        RowStatistics r = reference_statistics(in[0] + i * s->D, s);
        for (size_t d = 0; d < s->D; d++) {
            double x = in[0][i * s->D + d], weight = in[i % heads < s->H ? 1 : 2][d];
            bool value_head = i % heads >= s->H + s->K;
            result_add(out, i * s->D + d, value_head ? x : reference_normal(x, r) * weight,
                       value_head ? 0.0 : reference_normal_size(x, r) * fabs(weight));
        }
    }
}

static void reference_qk_norm_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    size_t heads = s->H + 2 * s->K;
    for (size_t i = 0; i < s->N * heads; i++) {
        size_t of = i % heads < s->H ? 1 : 2, at = i * s->D;
        double average = 0.0, size = 0.0;
        RowStatistics r = reference_statistics(in[0] + at, s);
        bool value_head = i % heads >= s->H + s->K;
        for (size_t d = 0; d < s->D && !value_head; d++) {
            double n = reference_normal(in[0][at + d], r), n_size = reference_normal_size(in[0][at + d], r);
            average += dout[at + d] * in[of][d] * n / (double)s->D;
            size += fabs(dout[at + d] * in[of][d]) * n_size / (double)s->D;
            result_add(din[of], d, dout[at + d] * n, fabs(dout[at + d]) * n_size);
        }
        for (size_t d = 0; d < s->D; d++) {
            double n = reference_normal(in[0][at + d], r), n_size = reference_normal_size(in[0][at + d], r);
            double g = dout[at + d] * in[of][d];
            if (value_head) result_add(din[0], at + d, dout[at + d], 0.0);
            else result_add(din[0], at + d, r.rstd * (g - n * average), r.rstd * (fabs(g) + n_size * size));
        }
    }
}

// ------------------------------------------------------------------------------------------------
// Matmul: in[0] in (M, K), in[1] weight (N, K), in[2] bias (N) or NULL; out (M, N)

static void reference_matmul(Result* out, double* const* in, const Shape* s) {
    #pragma omp parallel for if (s->M * s->N * s->K > REFERENCE_LARGE)
    for (size_t i = 0; i < s->M * s->N; i++) {
        size_t m = i / s->N, n = i % s->N;
        if (in[2]) result_term(out, i, in[2][n]);
        for (size_t k = 0; k < s->K; k++) result_term(out, i, in[0][m * s->K + k] * in[1][n * s->K + k]);
    }
}

static void reference_matmul_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    const size_t piece = 64;
    #pragma omp parallel for if (s->M * s->N * s->K > REFERENCE_LARGE)
    for (size_t first = 0; first < s->K; first += piece)
        for (size_t i = 0; i < s->M * s->N; i++) {
            size_t m = i / s->N, n = i % s->N;
            for (size_t k = first; k < s->K && k < first + piece; k++) {
                result_term(din[0], m * s->K + k, dout[i] * in[1][n * s->K + k]);
                result_term(din[1], n * s->K + k, dout[i] * in[0][m * s->K + k]);
            }
        }
    for (size_t i = 0; i < s->M * s->N && in[2]; i++) result_term(din[2], i % s->N, dout[i]);
}

// ------------------------------------------------------------------------------------------------
// RoPE: in[0] qkv (N, (H + 2K) D); out the same with every query and key head rotated

static void reference_rotate(Result* out, const double* in, double direction, const Shape* s) {
    for (size_t row = 0; row < s->N; row++) {
        double position = (double)s->positions[row];
        for (size_t head = 0; head < s->H + 2 * s->K; head++) {
            for (size_t d = 0; d < s->D; d++) {
                size_t at = (row * (s->H + 2 * s->K) + head) * s->D, half = s->D / 2, i = d % half;
                double angle = position * pow(s->theta, -2.0 * (double)i / (double)s->D);
                double a = in[at + i] * cos(angle), b = in[at + half + i] * sin(angle) * direction;
                if (d >= half) {
                    a = in[at + i] * sin(angle) * direction;
                    b = -in[at + half + i] * cos(angle);
                }
                bool value_head = head >= s->H + s->K;
                result_add(out, at + d, value_head ? in[at + d] : a - b, value_head ? 0.0 : fabs(a) + fabs(b));
            }
        }
    }
}

static void reference_rope(Result* out, double* const* in, const Shape* s) {
    reference_rotate(out, in[0], 1.0, s);
}

static void reference_rope_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    (void)in;
    reference_rotate(din[0], dout, -1.0, s);
}

// ------------------------------------------------------------------------------------------------
// Parts of heads: in[0] (N, (H + 2K) D); out (parts, N, (H + 2K) D / parts). One loop per coordinate of out.

static void reference_heads(Result* out, double* const* in, const Shape* s) {
    const size_t first[3] = {0, s->H, s->H + s->K}, heads[3] = {s->H, s->K, s->K};
    size_t i = 0;
    for (size_t part = 0; part < s->parts; part++)
        for (size_t row = 0; row < s->N; row++)
            for (int kind = 0; kind < 3; kind++)
                for (size_t head = 0; head < heads[kind] / s->parts; head++)
                    for (size_t d = 0; d < s->D; d++) {
                        size_t place = first[kind] + heads[kind] / s->parts * part + head;
                        result_add(out, i++, in[0][(row * (s->H + 2 * s->K) + place) * s->D + d], 0.0);
                    }
}

// Copies of heads: in[0] (N, (H + 2K) D); out (N, (H + 2K copies) D). The place in `in` of element i of out.
static size_t reference_head_copied(size_t i, const Shape* s) {
    size_t heads = s->H + 2 * s->K * s->copies, head = i / s->D % heads, row = i / s->D / heads;
    if (head >= s->H) head = s->H + (head - s->H) / s->copies;
    return (row * (s->H + 2 * s->K) + head) * s->D + i % s->D;
}

static void reference_heads_repeat(Result* out, double* const* in, const Shape* s) {
    for (size_t i = 0; i < out->n; i++) result_add(out, i, in[0][reference_head_copied(i, s)], 0.0);
}

static void reference_heads_sum(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    (void)in;
    for (size_t i = 0; i < s->N * (s->H + 2 * s->K * s->copies) * s->D; i++)
        result_term(din[0], reference_head_copied(i, s), dout[i]);
}

// ------------------------------------------------------------------------------------------------
// Attention: in[0] qkv (B, T, (H + 2K) D); out (B, T, H, D). Values are those of the textbook form in kernels_cpu.h,
// which is itself checked against finite differences; what errors scale with is added here.

// How much larger than 2^-24 the relative error of a probability of a query is: the largest sum |q k| / sqrt(D) enters
// twice, in p and in the sum that it is divided by, and the stored logarithm once.
static double reference_probability_size(const double* qkv, double lse, const Shape* s, size_t b, size_t h, size_t t) {
    HeadRows at = head_rows(b, h, s->T, s->H, s->K, s->D);
    double largest = 0.0;
    for (size_t j = 0; j <= t; j++) {
        double absolute = 0.0;
        for (size_t d = 0; d < s->D; d++)
            absolute += fabs(qkv[at.q + t * at.stride + d] * qkv[at.k + j * at.stride + d]) / sqrt((double)s->D);
        largest = fmax(largest, absolute);
    }
    return 1.0 + 2.0 * largest + fabs(lse);
}

static double reference_probability(const double* q, const double* k, double lse, size_t D) {
    return exp(CPU(dot_textbook)(q, k, D) / sqrt((double)D) - lse);
}

// Tensor cores take their operands as floatX: the probabilities before they meet the values, and the gradients of the
// scores before they meet keys and queries. What is stored below the smallest normal number has an absolute error.
static double reference_operand(double x, const Shape* s) {
    return s->smallest_normal > 0.0 ? fabs(x) + s->smallest_normal : 0.0;
}

// The exponentials of the kernels are 0 below 2^-126; in units of 4 x 2^-24, which sizes are multiplied by:
#define FLUSHED 0x1p-104

static void reference_attention(Result* out, double* const* in, const Shape* s) {
    double* lse = (double*)malloc(s->B * s->H * s->T * sizeof(double));
    CPU(attention_forward_textbook)(out->value, lse, in[0], s->B, s->T, s->H, s->K, s->D);
    for (size_t row = 0; row < s->B * s->H * s->T; row++) {
        size_t b = row / (s->H * s->T), h = row / s->T % s->H, t = row % s->T, o = ((b * s->T + t) * s->H + h) * s->D;
        HeadRows at = head_rows(b, h, s->T, s->H, s->K, s->D);
        const double *q = in[0] + at.q + t * at.stride, *k = in[0] + at.k, *v = in[0] + at.v;
        double size = reference_probability_size(in[0], lse[row], s, b, h, t);
        if (s->lse) result_add(s->lse, row, lse[row], size);
        for (size_t j = 0; j <= t; j++, k += at.stride, v += at.stride) {
            double p = reference_probability(q, k, lse[row], s->D);
            for (size_t d = 0; d < s->D; d++) {
                out->size[o + d] += (p + FLUSHED) * fabs(v[d]) * size;
                out->rounded[o + d] += reference_operand(p, s) * fabs(v[d]);
            }
        }
    }
    free(lse);
}

static void reference_attention_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    const double *qkv = in[0], scale = 1.0 / sqrt((double)s->D);
    size_t rows = s->B * s->H * s->T;
    double *lse = (double*)malloc(rows * sizeof(double)), *out = (double*)malloc(rows * s->D * sizeof(double));
    CPU(attention_forward_textbook)(out, lse, qkv, s->B, s->T, s->H, s->K, s->D);
    CPU(attention_backward_textbook)(din[0]->value, dout, out, lse, qkv, s->B, s->T, s->H, s->K, s->D);
    for (size_t row = 0; row < rows; row++) {
        size_t b = row / (s->H * s->T), h = row / s->T % s->H, t = row % s->T, o = ((b * s->T + t) * s->H + h) * s->D;
        HeadRows at = head_rows(b, h, s->T, s->H, s->K, s->D);
        size_t q = at.q + t * at.stride;
        const double* g = dout + o;
        double size = reference_probability_size(qkv, lse[row], s, b, h, t), delta = 0.0, delta_size = 0.0;
        for (size_t d = 0; d < s->D; d++) {
            delta += g[d] * out[o + d];
            delta_size += fabs(g[d] * out[o + d]);
        }
        for (size_t j = 0; j <= t; j++) {
            size_t k = at.k + j * at.stride, v = at.v + j * at.stride;
            double p = reference_probability(qkv + q, qkv + k, lse[row], s->D), dp = 0.0, dp_size = 0.0;
            for (size_t d = 0; d < s->D; d++) {
                dp += g[d] * qkv[v + d];
                dp_size += fabs(g[d] * qkv[v + d]);
                din[0]->size[v + d] += (p + FLUSHED) * fabs(g[d]) * size;
                din[0]->rounded[v + d] += reference_operand(p, s) * fabs(g[d]);
            }
            double ds_size = scale * (p + FLUSHED) * (dp_size + delta_size) * size;
            double ds_rounded = scale * (p * delta_size + reference_operand(p * (dp - delta), s));
            for (size_t d = 0; d < s->D; d++) {
                din[0]->size[q + d] += ds_size * fabs(qkv[k + d]);
                din[0]->size[k + d] += ds_size * fabs(qkv[q + d]);
                din[0]->rounded[q + d] += ds_rounded * fabs(qkv[k + d]);
                din[0]->rounded[k + d] += ds_rounded * fabs(qkv[q + d]);
            }
        }
    }
    free(out);
    free(lse);
}

// ------------------------------------------------------------------------------------------------
// GELU: in[0], out (N). SwiGLU: in[0] (N, 2F), out (N, F).
//
// The relative error of sigmoid(z) is that of its exponential, (2 + |z|) (1 - sigmoid(z)), plus a few roundings; that
// of 1 - sigmoid(z) is a rounding of 1, unless the difference is far below the rounding and comes out as 0. Below
// e^-87.3 the exponential of the kernels is 0, which the terms with 2^-100 allow for.

static double reference_sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }
static double reference_sigmoid_size(double z) { return 2.0 + (2.0 + 2.0 * fabs(z)) * reference_sigmoid(-z); }
static double reference_complement_size(double z) {
    double complement = reference_sigmoid(-z);
    return complement * (4.0 + fabs(z)) + (complement > 0x1p-27 ? 1.0 : 0.0);
}

static void reference_gelu(Result* out, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N; i++) {
        double x = in[0][i], z = 2.0 * sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x), value = x * reference_sigmoid(z);
        result_add(out, i, value, fabs(value) * reference_sigmoid_size(z) + fabs(x) * 0x1p-100);
    }
}

static void reference_gelu_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N; i++) {
        double x = in[0][i], z = 2.0 * sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
        double dz = 2.0 * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x), sigma = reference_sigmoid(z);
        double size = sigma * reference_sigmoid_size(z) * (1.0 + fabs(x) * dz * (1.0 - sigma))
                    + fabs(x) * sigma * reference_complement_size(z) * dz + (1.0 + fabs(x) * dz) * 0x1p-100;
        result_add(din[0], i, dout[i] * sigma * (1.0 + x * reference_sigmoid(-z) * dz), fabs(dout[i]) * size);
    }
}

static void reference_swiglu(Result* out, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N * s->F; i++) {
        size_t at = i / s->F * 2 * s->F + i % s->F;
        double gate = in[0][at], up = in[0][at + s->F], value = gate * reference_sigmoid(gate) * up;
        result_add(out, i, value, fabs(value) * (1.0 + reference_sigmoid_size(gate)) + fabs(gate * up) * 0x1p-100);
    }
}

static void reference_swiglu_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    for (size_t i = 0; i < s->N * s->F; i++) {
        size_t at = i / s->F * 2 * s->F + i % s->F;
        double g = in[0][at], up = in[0][at + s->F], d = dout[i], sigma = reference_sigmoid(g);
        double slope = sigma * (1.0 + g * reference_sigmoid(-g));
        double slope_size = sigma * (1.0 + reference_sigmoid_size(g)) * (1.0 + fabs(g) * (1.0 - sigma))
                          + sigma * fabs(g) * reference_complement_size(g) + (1.0 + fabs(g)) * 0x1p-100;
        result_add(din[0], at, d * up * slope, fabs(d * up) * slope_size);
        result_add(din[0], at + s->F, d * g * sigma,
                   fabs(d * g) * (sigma * (1.0 + reference_sigmoid_size(g)) + 0x1p-100));
    }
}

// ------------------------------------------------------------------------------------------------
// Classifier: in[0] logits (N, Vp), targets in s->tokens; out losses (N)

// The largest logit, the log of the sum of the exponentials relative to it, and the mean distance to it: the relative
// error of a probability is 2^-24 times its own distance, plus the mean's from the sum.
static void reference_softmax(double* maximum, double* log_sum, double* distance, const double* x, size_t V) {
    double sum = 0.0, distances = 0.0;
    *maximum = -INFINITY;
    for (size_t v = 0; v < V; v++) *maximum = fmax(*maximum, x[v]);
    for (size_t v = 0; v < V; v++) sum += exp(x[v] - *maximum);
    for (size_t v = 0; v < V; v++) distances += exp(x[v] - *maximum) * (*maximum - x[v]);
    *log_sum = log(sum);
    *distance = distances / sum;
}

static void reference_classifier(Result* losses, double* const* in, const Shape* s) {
    #pragma omp parallel for if (s->N * s->V > REFERENCE_LARGE)
    for (size_t row = 0; row < s->N; row++) {
        double maximum, log_sum, distance;
        if (s->tokens[row] < 0) continue;
        reference_softmax(&maximum, &log_sum, &distance, in[0] + row * s->Vp, s->V);
        double below = maximum - in[0][row * s->Vp + (size_t)s->tokens[row]];
        result_add(losses, row, log_sum + below, 1.0 + distance + log_sum + below);
    }
}

static void reference_classifier_backward(Result* const* din, const double* dout, double* const* in, const Shape* s) {
    #pragma omp parallel for if (s->N * s->V > REFERENCE_LARGE)
    for (size_t row = 0; row < s->N; row++) {
        double maximum, log_sum, distance;
        if (s->tokens[row] < 0) continue;
        const double* x = in[0] + row * s->Vp;
        reference_softmax(&maximum, &log_sum, &distance, x, s->V);
        for (size_t v = 0; v < s->V; v++) {
            double p = exp(x[v] - maximum - log_sum), onehot = v == (size_t)s->tokens[row] ? 1.0 : 0.0;
            result_add(din[0], row * s->Vp + v, dout[row] * (p - onehot),
                       fabs(dout[row]) * (p * (2.0 + maximum - x[v] + distance) + onehot + 0x1p-100));
        }
    }
}

#endif  // LLMTRAIN_REFERENCE_H
