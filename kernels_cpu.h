// kernels_cpu.h: every operation of the model in plain C. It is the specification that the CUDA kernels are checked
// against, and the CPU backend.
//
//    1. precision            what is stored in floatX, the storage dtype; arithmetic is always float
//    2. embedding            token + position
//    3. normalization        layernorm, rmsnorm, each fused with the residual add before it
//    4. matmul               forward, and the gradients of input, weight and bias
//    5. rope                 rotary positions
//    6. attention            causal, grouped-query: the formulas as loops
//    7. gelu, swiglu         the two nonlinearities
//    8. dropout
//    9. classifier           softmax + cross-entropy + gradient of the logits, in place
//
// What needs more than a loop nest to be fast, or is not a layer of a model, has its own header in llmtrain/ops/:
// attention_cpu.h, columns.h (for LoRA), decode.h (attention to a KV cache), gemm.h, heads.h (heads for ranks),
// leaves.h (layers that ranks share), qk_norm.h (norms of query and key heads), vectors.h (global norm, sums, casts),
// optimizers/update.h.
//
// Conventions. Arguments: outputs, inputs, parameters, sizes, stream (unused here; the CUDA versions use it).
// Arrays are row-major and dense. Activations and their gradients are floatX; gradients of parameters are float and
// are added to, so that micro-batches accumulate (matmul_backward_weight overwrites them unless `adds`); all other
// outputs are overwritten unless the comment says "adds to". LLMTRAIN_PIECE(n, small) is n; in some tests, small.
// Letters: B batch, T sequence, N = B*T rows, C channels, H heads, K key/value heads, D head size, F feed-forward,
// V vocabulary, Vp padded vocabulary.
//
// Loops. `#pragma omp parallel for` before a loop divides its iterations among threads, `simd` lets the compiler
// compute several of them at once in a vector register; without OpenMP both are ignored. VECTOR_SUM(c, C, term) is the
// sum over c from 0 to C - 1; float_of and floatX_of convert from and to the storage dtype; multiply_add(a, b, c) is
// a * b + c, rounded once; exp_fast and sigmoid_fast vectorize, unlike those of the C library. Every output element is
// computed by one thread, in an order that depends on the sizes alone: the bits are the same for any number of threads
// and on any processor (llmtrain/ops/arithmetic.h; 16-bit matmuls differ between instruction sets).
//
// In a CUDA build kernels.cuh has functions of the same names and signatures; the ones here are then cpu::gelu_forward
// and so on.

#ifndef LLMTRAIN_KERNELS_CPU_H
#define LLMTRAIN_KERNELS_CPU_H

#include "llmtrain/ops/arithmetic.h"
#include "llmtrain/ops/attention_cpu.h"
#include "llmtrain/ops/base.h"
#include "llmtrain/ops/columns.h"
#include "llmtrain/ops/decode.h"
#include "llmtrain/ops/dtypes.h"
#include "llmtrain/ops/gemm.h"
#include "llmtrain/ops/heads.h"
#include "llmtrain/ops/leaves.h"
#include "llmtrain/ops/nf4.h"
#include "llmtrain/ops/optimizers/update.h"
#include "llmtrain/ops/qk_norm.h"
#include "llmtrain/ops/rope.h"
#include "llmtrain/ops/types.h"
#include "llmtrain/ops/vectors.h"

// ------------------------------------------------------------------------------------------------
// 1. Precision
//
// Compile with -DPRECISION_BF16 or -DPRECISION_FP16 to store in 16 bits. On both backends:
//
//     what                                          stored in  computed in
//     parameters                                    floatX     -
//     master weights, optimizer state               float      float: updated, then rounded to the parameters
//     activations, gradients of activations         floatX     float, rounded once when stored
//     matmuls                                       floatX     operands are floatX, sums float (TF32: see --tf32)
//     norms: mean, rstd                             float      float
//     attention: scores, softmax, their gradients   nowhere    float (GPU: rounded to floatX as operands of matmuls)
//     residual + branch, GELU's argument            floatX     float, rounded before use (fused GELU of a GPU: after)
//     attention: log of the sums                    float      float
//     logits, their gradients                       floatX     softmax and loss in float
//     gradients of parameters                       float      float: added up over micro-batches
//     loss of a token                               float      float
//     sum of losses, norm of the gradients          double     double
//     random numbers, tokens                        -          integers

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 2. Embedding

// out[n,:] = token_weight[tokens[n],:] + position_weight[positions[n],:]
// out (N, C), tokens (N) in [0, V), positions (N) in [0, context), token_weight (Vp, C), position_weight (context, C)
// or NULL. Positions may come in any order and repeat: each sequence of a batch, and each document packed into one,
// counts its own.
static inline void embedding_forward(floatX* out, const int32_t* tokens, const int32_t* positions,
                                     const floatX* token_weight, const floatX* position_weight, size_t N, size_t C,
                                     Stream stream) {
    (void)stream;
    #pragma omp parallel for if (N > 1)
    for (size_t row = 0; row < N; row++) {
        floatX* o = out + row * C;
        const floatX* token = token_weight + (size_t)tokens[row] * C;
        if (position_weight == NULL) {
            memcpy(o, token, C * sizeof(floatX));
            continue;
        }
        const floatX* position = position_weight + (size_t)positions[row] * C;
        for (size_t c = 0; c < C; c++) o[c] = floatX_of(float_of(token[c]) + float_of(position[c]));
    }
}

// Adds to dtoken_weight (rows, C), from the rows of dout (N, C) whose token is in [first, first + rows): the gradient
// of a part of the vocabulary, with the bits that it has in the gradient of the whole.
// A thread owns a strip of channels and goes through all rows in order: two rows of the same token never race.
static inline void embedding_backward_part(float* dtoken_weight, const floatX* dout, const int32_t* tokens,
                                           size_t first, size_t rows, size_t N, size_t C, Stream stream) {
    (void)stream;
    const size_t strip = 32;
    #pragma omp parallel for
    for (size_t begin = 0; begin < C; begin += strip) {
        size_t end = min_size(begin + strip, C);
        for (size_t n = 0; n < N; n++) {
            size_t row = (size_t)tokens[n] - first;  // tokens before `first` wrap around, to large numbers
            if (row >= rows) continue;
            for (size_t c = begin; c < end; c++) dtoken_weight[row * C + c] += float_of(dout[n * C + c]);
        }
    }
}

// Adds to dtoken_weight (Vp, C) and dposition_weight (context, C), from dout (N, C). Either may be NULL.
static inline void embedding_backward(float* dtoken_weight, float* dposition_weight, const floatX* dout,
                                      const int32_t* tokens, const int32_t* positions, size_t N, size_t C,
                                      Stream stream) {
    if (dtoken_weight) embedding_backward_part(dtoken_weight, dout, tokens, 0, SIZE_MAX, N, C, stream);
    if (dposition_weight) embedding_backward_part(dposition_weight, dout, positions, 0, SIZE_MAX, N, C, stream);
}

// ------------------------------------------------------------------------------------------------
// 3. Normalization
//
// layernorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + epsilon)   ("Layer Normalization")
// rmsnorm:   y = x * rstd * weight,          rstd = 1 / sqrt(mean of squares + epsilon)   ("Root Mean Square Layer
//            Normalization")
// Both are fused with the residual add before them: x = in + branch, and x is kept, since the backward needs it.

// residual[row,:] = in[row,:] + branch[row,:], returned as the row to normalize; without a branch that is the row of
// `in`.
static inline const floatX* residual_add(floatX* residual, const floatX* in, const floatX* branch, size_t row,
                                         size_t C) {
    if (branch == NULL) return in + row * C;
    floatX* x = residual + row * C;
    for (size_t c = 0; c < C; c++) x[c] = floatX_of(float_of(in[row * C + c]) + float_of(branch[row * C + c]));
    return x;
}

// out (N, C), residual (N, C), mean (N), rstd (N); in (N, C), branch (N, C) or NULL (then residual is not written).
static inline void layernorm_forward(floatX* out, floatX* residual, float* mean, float* rstd, const floatX* in,
                                     const floatX* branch, const floatX* weight, const floatX* bias, float epsilon,
                                     size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (N > 1)
    for (size_t row = 0; row < N; row++) {
        const floatX* x = residual_add(residual, in, branch, row, C);
        float m = VECTOR_SUM(c, C, float_of(x[c])) / (float)C;
        float squares = VECTOR_SUM(c, C, (float_of(x[c]) - m) * (float_of(x[c]) - m));
        float s = 1.0f / sqrtf(squares / (float)C + epsilon);
        floatX* o = out + row * C;
        for (size_t c = 0; c < C; c++)
            o[c] = floatX_of(multiply_add((float_of(x[c]) - m) * s, float_of(weight[c]), float_of(bias[c])));
        mean[row] = m;
        rstd[row] = s;
    }
}

// layernorm_forward without mean and bias.
static inline void rmsnorm_forward(floatX* out, floatX* residual, float* rstd, const floatX* in, const floatX* branch,
                                   const floatX* weight, float epsilon, size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (N > 1)
    for (size_t row = 0; row < N; row++) {
        const floatX* x = residual_add(residual, in, branch, row, C);
        float squares = VECTOR_SUM(c, C, float_of(x[c]) * float_of(x[c]));
        float s = 1.0f / sqrtf(squares / (float)C + epsilon);
        floatX* o = out + row * C;
        for (size_t c = 0; c < C; c++) o[c] = floatX_of(float_of(x[c]) * s * float_of(weight[c]));
        rstd[row] = s;
    }
}

// Adds to dx (N, C), the gradient that flows down the residual stream, and to dweight (C), dbias (C).
// x (N, C) is what was normalized. With y = n * weight + bias, n = (x - mean) * rstd and g = dout * weight:
// dx = rstd * (g - average(g) - n * average(g * n)).
static inline void layernorm_backward(floatX* dx, float* dweight, float* dbias, const floatX* dout, const floatX* x,
                                      const floatX* weight, const float* mean, const float* rstd,
                                      size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel
    {
        #pragma omp for nowait
        for (size_t row = 0; row < N; row++) {
            const floatX *d = dout + row * C, *xr = x + row * C;
            float m = mean[row], s = rstd[row];
            float average_g = VECTOR_SUM(c, C, float_of(d[c]) * float_of(weight[c])) / (float)C;
            float average_gn =
                VECTOR_SUM(c, C, float_of(d[c]) * float_of(weight[c]) * ((float_of(xr[c]) - m) * s)) / (float)C;
            floatX* dxr = dx + row * C;
            for (size_t c = 0; c < C; c++) {
                float n = (float_of(xr[c]) - m) * s;
                float g = float_of(d[c]) * float_of(weight[c]);
                dxr[c] = floatX_of(multiply_add(s, multiply_add(-n, average_gn, g - average_g), float_of(dxr[c])));
            }
        }
        #pragma omp for
        for (size_t first = 0; first < C; first += 32) {  // a thread owns a strip of channels, rows in order
            size_t end = min_size(first + 32, C);
            for (size_t row = 0; row < N; row++) {
                const floatX *d = dout + row * C, *xr = x + row * C;
                float m = mean[row], s = rstd[row];
                for (size_t c = first; c < end; c++) {
                    dweight[c] = multiply_add(float_of(d[c]), (float_of(xr[c]) - m) * s, dweight[c]);
                    dbias[c] += float_of(d[c]);
                }
            }
        }
    }
}

// Adds to dx (N, C) and dweight (C). dx = rstd * (g - n * average(g * n)), with n = x * rstd.
static inline void rmsnorm_backward(floatX* dx, float* dweight, const floatX* dout, const floatX* x,
                                    const floatX* weight, const float* rstd, size_t N, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel
    {
        #pragma omp for nowait
        for (size_t row = 0; row < N; row++) {
            const floatX *d = dout + row * C, *xr = x + row * C;
            float s = rstd[row];
            float average_gn =
                VECTOR_SUM(c, C, float_of(d[c]) * float_of(weight[c]) * (float_of(xr[c]) * s)) / (float)C;
            floatX* dxr = dx + row * C;
            for (size_t c = 0; c < C; c++) {
                float g = float_of(d[c]) * float_of(weight[c]);
                dxr[c] =
                    floatX_of(multiply_add(s, multiply_add(-(float_of(xr[c]) * s), average_gn, g), float_of(dxr[c])));
            }
        }
        #pragma omp for
        for (size_t first = 0; first < C; first += 32) {
            size_t end = min_size(first + 32, C);
            for (size_t row = 0; row < N; row++) {
                const floatX *d = dout + row * C, *xr = x + row * C;
                float s = rstd[row];
                for (size_t c = first; c < end; c++)
                    dweight[c] = multiply_add(float_of(d[c]), float_of(xr[c]) * s, dweight[c]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Matmul
//
// M rows, N outputs, K inputs; weights are (N, K), as everywhere in this project: each row makes one output.
//
// gemm_compute (llmtrain/ops/gemm.h) is a loop nest with blocking: out, its type and row stride, whether to add to it;
// two operands, each with its type, its row stride and whether it is transposed; bias and its type; rows, columns and
// terms of each sum.

// out (M, N) = in (M, K) weight (N, K)^T + bias (N) or NULL
static inline void matmul_forward(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                  size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    gemm_compute(out, FLOATX_DTYPE, N, false, gemm_matrix(in, FLOATX_DTYPE, K, false),
                 gemm_matrix(weight, FLOATX_DTYPE, K, true), bias, FLOATX_DTYPE, M, N, K);
}

// din (M, K) = dout (M, N) weight (N, K)
static inline void matmul_backward_input(floatX* din, const floatX* dout, const floatX* weight,
                                         size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    gemm_compute(din, FLOATX_DTYPE, K, false, gemm_matrix(dout, FLOATX_DTYPE, N, false),
                 gemm_matrix(weight, FLOATX_DTYPE, K, false), NULL, FLOATX_DTYPE, M, K, N);
}

// The same two without bias, whose results are parts of larger sums (leaves.h): in float, not rounded.
// out (M, N) = in (M, K) weight (N, K)^T
static inline void matmul_forward_sums(float* out, const floatX* in, const floatX* weight, size_t M, size_t N, size_t K,
                                       Stream stream) {
    (void)stream;
    gemm_compute(out, DTYPE_F32, N, false, gemm_matrix(in, FLOATX_DTYPE, K, false),
                 gemm_matrix(weight, FLOATX_DTYPE, K, true), NULL, FLOATX_DTYPE, M, N, K);
}

// out (M, K) = dout (M, N) weight (N, K)
static inline void matmul_backward_input_sums(float* out, const floatX* dout, const floatX* weight,
                                              size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    gemm_compute(out, DTYPE_F32, K, false, gemm_matrix(dout, FLOATX_DTYPE, N, false),
                 gemm_matrix(weight, FLOATX_DTYPE, K, false), NULL, FLOATX_DTYPE, M, K, N);
}

// dweight (N, K) = dout (M, N)^T in (M, K) and dbias (N) = the sum of dout's rows; if `adds`, += for both. Either may
// be NULL.
static inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* in, bool adds,
                                          size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    if (dweight)
        gemm_compute(dweight, DTYPE_F32, K, adds, gemm_matrix(dout, FLOATX_DTYPE, N, true),
                     gemm_matrix(in, FLOATX_DTYPE, K, false), NULL, DTYPE_F32, N, K, M);
    if (dbias == NULL) return;
    #pragma omp parallel for
    for (size_t first = 0; first < N; first += 64) {
        size_t end = min_size(first + 64, N);
        for (size_t n = first; n < end && !adds; n++) dbias[n] = 0.0f;
        for (size_t m = 0; m < M; m++)
            for (size_t n = first; n < end; n++) dbias[n] += float_of(dout[m * N + n]);
    }
}

// ------------------------------------------------------------------------------------------------
// 5. RoPE
//
// "RoFormer: Enhanced Transformer with Rotary Position Embedding". The pair (x[i], x[i + D/2]) of every query and key
// head is rotated by the angle position * theta^(-2i/D), or a scaled one (llmtrain/ops/rope.h); the pairing is that of
// the Llama weights on Hugging Face.

// Rotates the query and key heads of qkv (N, (H + 2K) D) in place; direction 1 forward, -1 back. positions (N) are rows
// of table (context, D/2, 2).
static inline void rope_rotate(floatX* qkv, const float* table, const int32_t* positions, float direction,
                               size_t N, size_t H, size_t K, size_t D) {
    #pragma omp parallel for if (N > 1)
    for (size_t row = 0; row < N; row++) {
        const float* angles = table + (size_t)positions[row] * D;
        for (size_t head = 0; head < H + K; head++) {
            floatX* x = qkv + (row * (H + 2 * K) + head) * D;
            for (size_t i = 0; i < D / 2; i++) {
                float cosine = angles[2 * i], sine = direction * angles[2 * i + 1];
                float a = float_of(x[i]), b = float_of(x[i + D / 2]);
                x[i] = floatX_of(multiply_add(a, cosine, -(b * sine)));
                x[i + D / 2] = floatX_of(multiply_add(a, sine, b * cosine));
            }
        }
    }
}

static inline void rope_forward(floatX* qkv, const float* table, const int32_t* positions,
                                size_t N, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    rope_rotate(qkv, table, positions, 1.0f, N, H, K, D);
}

// The gradient of a rotation is the rotation back.
static inline void rope_backward(floatX* dqkv, const float* table, const int32_t* positions,
                                 size_t N, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    rope_rotate(dqkv, table, positions, -1.0f, N, H, K, D);
}

// ------------------------------------------------------------------------------------------------
// 6. Attention
//
// out_i = sum over j <= i of p_ij v_j, with p_ij = exp(s_ij) / (the sum over j <= i of exp(s_ij)), s_ij = q_i k_j /
// sqrt(D), for every head; query head h reads key/value head h / (H / K). "Attention Is All You Need".
//
// Here it is as plain loops, in double: what the tests compare every implementation with. The operations that the model
// calls, attention_forward and attention_backward, have the same arguments in floatX and float, and compute tiles of
// the same sums, about 20 times as fast on a core: llmtrain/ops/attention_cpu.h. Layouts:
//
//     qkv, dqkv (B, T, (H + 2K) D)   all query heads of a token, then its key heads, then its value heads (head_rows)
//     out, dout (B, T, H, D)
//     lse (B, H, T)                  the logarithm of the sum of exponentials: p_ij = exp(s_ij - lse_i)

static inline double dot_textbook(const double* a, const double* b, size_t D) {
    double sum = 0.0;
    for (size_t d = 0; d < D; d++) sum += a[d] * b[d];
    return sum;
}

// The largest score is subtracted before exp, which then cannot overflow; it cancels.
static inline void attention_forward_textbook(double* out, double* lse, const double* qkv,
                                              size_t B, size_t T, size_t H, size_t K, size_t D) {
    double scale = 1.0 / sqrt((double)D);
    for (size_t row = 0; row < B * H * T; row++) {
        size_t b = row / (H * T), h = row / T % H, i = row % T;
        HeadRows at = head_rows(b, h, T, H, K, D);
        const double *q = qkv + at.q + i * at.stride, *k = qkv + at.k, *v = qkv + at.v;
        double maximum = -INFINITY, sum = 0.0, *o = out + ((b * T + i) * H + h) * D;
        for (size_t j = 0; j <= i; j++) maximum = fmax(maximum, scale * dot_textbook(q, k + j * at.stride, D));
        for (size_t j = 0; j <= i; j++) sum += exp(scale * dot_textbook(q, k + j * at.stride, D) - maximum);
        lse[row] = maximum + log(sum);
        for (size_t d = 0; d < D; d++) o[d] = 0.0;
        for (size_t j = 0; j <= i; j++) {
            double p = exp(scale * dot_textbook(q, k + j * at.stride, D) - lse[row]);
            for (size_t d = 0; d < D; d++) o[d] += p * v[j * at.stride + d];
        }
    }
}

// dv_j = the sum over i >= j of p_ij dout_i, and dp_ij = dout_i v_j. Through the softmax: ds_ij = p_ij (dp_ij -
// delta_i), where delta_i = the sum over j of p_ij dp_ij = dout_i out_i. Then dq_i = the sum over j of ds_ij k_j /
// sqrt(D), and dk_j = the sum over i of ds_ij q_i / sqrt(D).
static inline void attention_backward_textbook(double* dqkv, const double* dout, const double* out, const double* lse,
                                               const double* qkv, size_t B, size_t T, size_t H, size_t K, size_t D) {
    double scale = 1.0 / sqrt((double)D);
    for (size_t i = 0; i < B * T * (H + 2 * K) * D; i++) dqkv[i] = 0.0;
    for (size_t row = 0; row < B * H * T; row++) {
        size_t b = row / (H * T), h = row / T % H, i = row % T;
        HeadRows at = head_rows(b, h, T, H, K, D);
        const double *g = dout + ((b * T + i) * H + h) * D, *o = out + ((b * T + i) * H + h) * D;
        double delta = dot_textbook(g, o, D);
        for (size_t j = 0; j <= i; j++) {
            size_t q = at.q + i * at.stride, k = at.k + j * at.stride, v = at.v + j * at.stride;
            double p = exp(scale * dot_textbook(qkv + q, qkv + k, D) - lse[row]);
            double ds = scale * p * (dot_textbook(g, qkv + v, D) - delta);
            for (size_t d = 0; d < D; d++) {
                dqkv[q + d] += ds * qkv[k + d];
                dqkv[k + d] += ds * qkv[q + d];
                dqkv[v + d] += p * g[d];
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 7. GELU and SwiGLU

ALWAYS_INLINE float sigmoid_fast(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// "Gaussian Error Linear Units", in the form with tanh: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3),
// which is x * sigmoid(2u).
ALWAYS_INLINE float gelu_sigmoid(float x) {
    return sigmoid_fast(2.0f * (0.7978845608f * multiply_add(0.044715f * x * x, x, x)));
}

// out (n), in (n).
static inline void gelu_forward(floatX* out, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        float x = float_of(in[i]);
        out[i] = floatX_of(x * gelu_sigmoid(x));
    }
}

// din (n) = dout (n) * dGELU/dx at in (n); din and dout may be the same array.
static inline void gelu_backward(floatX* din, const floatX* dout, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        float x = float_of(in[i]), s = gelu_sigmoid(x);
        float du = 0.7978845608f * multiply_add(3.0f * 0.044715f * x, x, 1.0f);
        din[i] = floatX_of(float_of(dout[i]) * multiply_add(2.0f * x * s * (1.0f - s), du, s));
    }
}

// "GLU Variants Improve Transformer": out (N, F) = silu(gate) * up, with in (N, 2F) = gate (F), then up (F), per row;
// silu(x) = x * sigmoid(x).
static inline void swiglu_forward(floatX* out, const floatX* in, size_t N, size_t F, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        const floatX *gate = in + row * 2 * F, *up = gate + F;
        floatX* o = out + row * F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++)
            o[f] = floatX_of(float_of(gate[f]) * sigmoid_fast(float_of(gate[f])) * float_of(up[f]));
    }
}

// din (N, 2F) from dout (N, F) and in (N, 2F).
static inline void swiglu_backward(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F,
                                   Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        const floatX *gate = in + row * 2 * F, *up = gate + F, *d = dout + row * F;
        floatX *dgate = din + row * 2 * F, *dup = dgate + F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++) {
            float g = float_of(gate[f]), u = float_of(up[f]), s = sigmoid_fast(g), dd = float_of(d[f]);
            dgate[f] = floatX_of(dd * u * s * multiply_add(g, 1.0f - s, 1.0f));
            dup[f] = floatX_of(dd * g * s);
        }
    }
}

// A matmul and the GELU after it, which on a GPU are one operation:
// pre (M, N) = in (M, K) weight (N, K)^T + bias (N); out (M, N) = gelu(pre).
static inline void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* in, const floatX* weight,
                                       const floatX* bias, size_t M, size_t N, size_t K, Stream stream) {
    matmul_forward(pre, in, weight, bias, M, N, K, stream);
    gelu_forward(out, pre, M * N, stream);
}

// Recomputes `out` of matmul_gelu_forward, bit for bit; where that is one fused operation, pre is rewritten too.
static inline void gelu_recompute(floatX* out, floatX* pre, const floatX* in, const floatX* weight, const floatX* bias,
                                  size_t M, size_t N, size_t K, Stream stream) {
    (void)in, (void)weight, (void)bias, (void)K;
    gelu_forward(out, pre, M * N, stream);
}

// The gradient through a matmul and the GELU before it: din (M, K) = (dout (M, N) weight (N, K)) * dGELU/dx at pre (M,
// K).
static inline void matmul_gelu_backward_input(floatX* din, const floatX* dout, const floatX* weight, const floatX* pre,
                                              size_t M, size_t N, size_t K, Stream stream) {
    matmul_backward_input(din, dout, weight, M, N, K, stream);
    gelu_backward(din, din, pre, M * K, stream);
}

// ------------------------------------------------------------------------------------------------
// 8. Dropout
//
// "Dropout: A Simple Way to Prevent Neural Networks from Overfitting". An element is kept with probability 1 - p and
// then divided by it. Which ones are kept depends on (seed, site, first + index) alone, so the backward is the same
// function on the gradient, no mask is stored, and the mask does not depend on how samples are distributed over ranks.

// out (n) = in (n) with dropout, 0 <= p < 1; they may be the same array. first: index of element 0 in the whole run.
static inline void dropout_apply(floatX* out, const floatX* in, float p, uint64_t seed, uint64_t site, uint64_t first,
                                 size_t n, Stream stream) {
    (void)stream;
    uint32_t threshold = (uint32_t)(p * 4294967296.0);  // dropped if the random bits lie below
    float scale = 1.0f / (1.0f - p);
    enum { PIECE = LLMTRAIN_PIECE(512, 29) };
    #pragma omp parallel for
    for (size_t begin = 0; begin < n; begin += PIECE) {
        size_t count = min_size(PIECE, n - begin);
        uint32_t random[PIECE];
        random_fill(random, seed, RANDOM_DROPOUT, site, first + begin, count);
        #pragma omp simd
        for (size_t i = 0; i < count; i++)
            out[begin + i] = floatX_of(random[i] < threshold ? 0.0f : float_of(in[begin + i]) * scale);
    }
}

// ------------------------------------------------------------------------------------------------
// 9. Classifier

// losses (N) = -log softmax(logits)[target] per row, 0 where the target is -1; logits (N, Vp), targets (N).
// If dloss is not 0, each row of logits is replaced by its gradient, dloss * weights[row] * (softmax - onehot(target)),
// 0 where the target is -1 and in the padded columns V to Vp - 1, which have no probability. weights (N), of either
// sign, are those of an objective that counts tokens differently; NULL: 1. They do not change the losses.
static inline void classifier(floatX* logits, float* losses, const int32_t* targets, float dloss, const float* weights,
                              size_t N, size_t V, size_t Vp, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        floatX* x = logits + row * Vp;
        if (targets[row] < 0) {
            losses[row] = 0.0f;
            if (dloss != 0.0f) for (size_t v = 0; v < Vp; v++) x[v] = floatX_of(0.0f);
            continue;
        }
        float maximum = -INFINITY, target_logit = float_of(x[targets[row]]);
        #pragma omp simd reduction(max:maximum)
        for (size_t v = 0; v < V; v++) maximum = float_of(x[v]) > maximum ? float_of(x[v]) : maximum;
        float sum = VECTOR_SUM(v, V, exp_fast(float_of(x[v]) - maximum));
        losses[row] = (float)log_double((double)sum) + (maximum - target_logit);
        if (dloss == 0.0f) continue;
        float gradient = weights ? dloss * weights[row] : dloss, scale = gradient / sum;
        #pragma omp simd
        for (size_t v = 0; v < V; v++) x[v] = floatX_of(exp_fast(float_of(x[v]) - maximum) * scale);
        for (size_t v = V; v < Vp; v++) x[v] = floatX_of(0.0f);
        float target_probability = exp_fast(target_logit - maximum) / sum;
        x[targets[row]] = floatX_of((target_probability - 1.0f) * gradient);
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_KERNELS_CPU_H
