// kernels_cpu.h: every operation of the model in plain C. It is the specification that the CUDA kernels are checked
// against, and the CPU backend.
//
//    1. precision            what is stored in floatX, the storage dtype; arithmetic is always float
//    2. embedding            token + position
//    3. normalization        layernorm, rmsnorm, each fused with the residual add before it
//    4. matmul               forward, and the gradients of input, weight and bias (the GEMM is in llmtrain/ops/gemm.h)
//    5. rope                 rotary positions; norms of query and key heads are in llmtrain/ops/qk_norm.h
//    6. attention            causal, grouped-query, memory O(T), in tiles (llmtrain/ops/attention_tiles.h); backward
//    (KV
//                            cache: llmtrain/ops/decode.h)
//    7. gelu, swiglu         the two nonlinearities
//    8. dropout
//    9. classifier           softmax + cross-entropy + gradient of the logits, in place
//   10. vectors              global norm, sums, casts, optimizer updates
//
// Conventions. Arguments: outputs, inputs, parameters, sizes, stream (unused here; the CUDA versions use it).
// Arrays are row-major and dense. Activations and their gradients are floatX; gradients of parameters are float and
// are added to, so that micro-batches accumulate (matmul_backward_weight overwrites them unless `adds`); all other
// outputs are overwritten unless the comment says "adds to".
// Letters: B batch, T sequence, N = B*T rows, C channels, H heads, K key/value heads, D head size, F feed-forward,
// V vocabulary, Vp padded vocabulary.
//
// Every output element is computed by one thread, in an order that depends on the sizes alone: the bits are the same
// for any number of threads and on any processor (llmtrain/ops/arithmetic.h; 16-bit matmuls differ between instruction
// sets).
//
// In a CUDA build kernels.cuh has functions of the same names and signatures; the ones here are then cpu::gelu_forward
// and so on.
//
// Needs: llmtrain/ops/arithmetic.h, llmtrain/ops/attention_tiles.h, llmtrain/ops/base.h, llmtrain/ops/decode.h,
// llmtrain/ops/types.h, llmtrain/ops/dtypes.h, llmtrain/ops/optimizers/optimizers.h,
// llmtrain/ops/optimizers/factored.h, llmtrain/ops/optimizers/matrix.h, llmtrain/ops/optimizers/quantized.h,
// llmtrain/ops/qk_norm.h, llmtrain/ops/rope.h, llmtrain/ops/gemm.h, llmtrain/ops/gemm_portable.h,
// llmtrain/ops/gemm_x86.h, llmtrain/ops/gemm_arm.h, llmtrain/ops/gemm_apple.h.

#ifndef LLMTRAIN_KERNELS_CPU_H
#define LLMTRAIN_KERNELS_CPU_H

#include "llmtrain/ops/arithmetic.h"
#include "llmtrain/ops/attention_tiles.h"
#include "llmtrain/ops/base.h"
#include "llmtrain/ops/decode.h"
#include "llmtrain/ops/gemm.h"
#include "llmtrain/ops/optimizers/optimizers.h"
#include "llmtrain/ops/optimizers/factored.h"
#include "llmtrain/ops/optimizers/matrix.h"
#include "llmtrain/ops/optimizers/quantized.h"
#include "llmtrain/ops/qk_norm.h"
#include "llmtrain/ops/rope.h"

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

#ifdef LLMTRAIN_CUDA
namespace cpu {
#endif

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

// Adds to dtoken_weight (Vp, C) and dposition_weight (context, C), from dout (N, C). Either may be NULL.
// A thread owns a strip of channels and walks all rows in order: two rows of the same token never race.
static inline void embedding_backward(float* dtoken_weight, float* dposition_weight, const floatX* dout,
                                      const int32_t* tokens, const int32_t* positions, size_t N, size_t C,
                                      Stream stream) {
    (void)stream;
    const size_t strip = 32;
    #pragma omp parallel for
    for (size_t first = 0; first < C; first += strip) {
        size_t end = min_size(first + strip, C);
        for (size_t row = 0; row < N; row++) {
            const floatX* d = dout + row * C;
            float* token = dtoken_weight ? dtoken_weight + (size_t)tokens[row] * C : NULL;
            for (size_t c = first; token && c < end; c++) token[c] += float_of(d[c]);
            if (dposition_weight == NULL) continue;
            float* position = dposition_weight + (size_t)positions[row] * C;
            for (size_t c = first; c < end; c++) position[c] += float_of(d[c]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Normalization
//
// layernorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + epsilon)   ("Layer Normalization")
// rmsnorm:   y = x * rstd * weight,          rstd = 1 / sqrt(mean of squares + epsilon)   ("Root Mean Square Layer
//            Normalization")
// Both are fused with the residual add before them: x = in + branch, and x is kept, since the backward needs it.

// residual[row,:] = in[row,:] + branch[row,:], returned as the row to normalize; without a branch that is in itself.
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

// Describes, as text, what computes the matmuls and its numerics; sets the device's peak in TFLOP/s, 0 if unknown.
static inline void device_describe(char* text, size_t bytes, double* peak_tflops, Stream stream) {
    (void)stream;
    *peak_tflops = 0;
    const char* note = "the same bits on every CPU";
    if (!ARITHMETIC_FUSED) note = "no fused multiply-add: bits differ from those of other CPUs";
    if (strcmp(gemm_kernel()->name, "accelerate") == 0) note = "whose bits differ from those of other CPUs";
    if (FLOATX_DTYPE == DTYPE_BF16 && gemm_multiplies_bf16()) note = "which multiply bf16";
    else if (!FLOATX_IS_FLOAT) note = "which convert " FLOATX_NAME " to float: PRECISION=FP32 is as fast";
    snprintf(text, bytes, "%s, %s", gemm_backend(), note);
}

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
// out_i = sum over j <= i of softmax_j(q_i k_j / sqrt(D)) v_j, for every head; query head h reads key/value head
// h / (H / K). The method is that of "FlashAttention-2: Faster Attention with Better Parallelism and Work
// Partitioning": keys are visited in tiles with a running maximum and sum per query, so no (T, T) array exists; the
// forward keeps lse = maximum + log(sum) of each row, from which the backward recomputes the probabilities.
//
// Work per pair of tiles: 2 matmuls of TILE x TILE x D forward and 5 backward, on operands in the L1 and L2 caches: the
// bound is arithmetic. dq is summed over the tiles of keys in order, dk and dv over the heads and tiles of queries in
// order, whichever thread computes them and however the work is divided.
//
// Needs: llmtrain/ops/types.h, llmtrain/ops/arithmetic.h, llmtrain/ops/dtypes.h, llmtrain/ops/base.h,
// llmtrain/ops/gemm.h, llmtrain/ops/attention_tiles.h, and what these include.

// Tiles of scores are transposed, (key, query), so that the lanes of a vector are queries.

// One tile of scores becomes p = exp(score - maximum), 0 where it was not computed. For each query maximum and total
// (the sum of p) continue from the tiles before, whose sums of values the caller multiplies by rescale.
static inline void tile_softmax(float* score, float* maximum, float* total, float* rescale, size_t first, size_t key,
                                size_t queries) {
    for (size_t i = 0; i < queries; i += TILE_GROUP) {
        float now[TILE_GROUP], *s = score + i;
        size_t visible = tile_visible(first + i, key);
        for (size_t l = 0; l < TILE_GROUP; l += VECTOR_LANES)
            *(Vector*)(now + l) = tile_column_maxima(s + l, visible, *(const Vector*)(maximum + i + l));
        for (size_t j = 0; j < visible; j++)
            for (size_t l = 0; l < TILE_GROUP; l++) s[j * TILE + l] = exp_fast(s[j * TILE + l] - now[l]);
        for (size_t j = visible; j < TILE; j++) memset(s + j * TILE, 0, TILE_GROUP * sizeof(float));
        for (size_t l = 0; l < TILE_GROUP; l++) rescale[i + l] = exp_fast(maximum[i + l] - now[l]);
        memcpy(maximum + i, now, sizeof now);
    }
    float sums[TILE];
    tile_sums(sums, score, queries);
    for (size_t i = 0; i < queries; i++) total[i] = multiply_add(total[i], rescale[i], sums[i]);
}

// One tile of queries, those of a head from `first` on, against all keys up to their own: the loop of the forward.
// out: rows of D, out_stride apart; lse: one per query.
static inline void attention_forward_tile(floatX* out, float* lse, const floatX* qkv, HeadRows at, size_t first,
                                          size_t T, size_t D, size_t out_stride) {
    float qt[TILE_TRANSPOSED], k[TILE_ELEMENTS], v[TILE_ELEMENTS], sum[TILE_ELEMENTS];
    float score[TILE * TILE], maximum[TILE], total[TILE], rescale[TILE];
    size_t width = round_up(D, TILE_GROUP), cols = round_up(D, VECTOR_LANES);
    size_t rows = min_size(TILE, T - first), queries = round_up(rows, TILE_GROUP);
    tile_load_transposed(qt, qkv + at.q + first * at.stride, at.stride, rows, D);
    tile_scale(qt, 1.0f / sqrtf((float)D), D * TILE);
    for (size_t i = 0; i < TILE; i++) {
        maximum[i] = -INFINITY;
        total[i] = 0.0f;
    }
    for (size_t key = 0; key < first + rows; key += TILE) {
        size_t keys = min_size(TILE, T - key), k_row;
        const float* keys_at = tile_rows(&k_row, k, qkv + at.k + key * at.stride, at.stride, keys, D, width);
        tile_load(v, qkv + at.v + key * at.stride, at.stride, keys, round_up(keys, TILE_GROUP), D, width);
        tile_scores(score, keys_at, k_row, qt, -INFINITY, first, key, queries, D);
        tile_softmax(score, maximum, total, rescale, first, key, queries);
        for (size_t i = 0; i < queries && key > 0; i++)
            for (size_t d = 0; d < width; d++) sum[i * width + d] *= rescale[i];
        for (size_t i = 0; i < queries; i += TILE_GROUP)
            tile_product(sum + i * width, score + i, 1, TILE, v, cols, tile_visible(first + i, key), width, key > 0);
    }
    for (size_t i = 0; i < rows; i++) tile_store_row(out + i * out_stride, sum + i * width, 1.0f / total[i], D);
    for (size_t i = 0; i < rows; i++) lse[i] = maximum[i] + (float)log_double((double)total[i]);
}

// out (B, T, H, D), lse (B, H, T); qkv (B, T, (H + 2K) D): all query heads, then key heads, then value heads.
static inline void attention_forward(floatX* out, float* lse, const floatX* qkv,
                                     size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    size_t tiles = divide_up(T, TILE);
    Tasks tasks;
    tasks_share(&tasks, B * H * tiles, threads_count());
    #pragma omp parallel
    for (size_t task; tasks_take(&tasks, &task);) {
        size_t b = task / (H * tiles), h = task / tiles % H, first = task % tiles * TILE;
        attention_forward_tile(out + ((b * T + first) * H + h) * D, lse + (b * H + h) * T + first, qkv,
                               head_rows(b, h, T, H, K, D), first, T, D, H * D);
    }
}

// delta (TILE) = the dot products of the columns of gt (D, TILE) and the rows of out (rows, D), which are `stride`
// apart; 0 from column `rows` on.
static inline void tile_delta(float* delta, const float* gt, const floatX* out, size_t stride, size_t rows, size_t D) {
    float terms[TILE_TRANSPOSED];
    tile_load_transposed(terms, out, stride, rows, D);
    for (size_t i = 0; i < D * TILE; i++) terms[i] *= gt[i];
    if (D < SUM_LANES) memset(terms + D * TILE, 0, (SUM_LANES - D) * TILE * sizeof(float));
    for (size_t d = SUM_LANES; d < D; d++)
        for (size_t i = 0; i < TILE; i++) terms[d % SUM_LANES * TILE + i] += terms[d * TILE + i];
    tile_sums(delta, terms, TILE);
}

// Probabilities p and score gradients ds of one pair of tiles (TILE, TILE). On entry p holds scores, ds dot products of
// values and output gradients; p = exp(p - lse), ds = p * (ds - delta), where delta_i = dout_i out_i.
static inline void tile_gradients(float* p, float* ds, const float* lse, const float* delta, size_t first, size_t key,
                                  size_t queries) {
    for (size_t i = 0; i < queries; i += TILE_GROUP)
        for (size_t at = i; at < tile_visible(first + i, key) * TILE; at += TILE)
            for (size_t l = 0; l < TILE_GROUP; l++) {
                p[at + l] = exp_fast(p[at + l] - lse[i + l]);
                ds[at + l] = p[at + l] * (ds[at + l] - delta[i + l]);
            }
}

// The work of one call of attention_backward_part: from the queries [query, query_end) of heads [h, h_end) and the keys
// and values [key, key_end) of the head that these read, the gradients of the queries, of keys and values, or both.
typedef struct {
    size_t b, h, h_end, query, query_end, key, key_end;
    bool queries, keys;
} AttentionPart;

// dq = scale * ds k; dk and dv, summed over the heads: dv = p^T dout, dk = scale * ds^T q. Arrays are those of
// attention_backward; sums: memory for dk and dv, (2, key_end - key rounded up to a multiple of TILE, width) floats.
static inline void attention_backward_part(floatX* dqkv, float* sums, const floatX* dout, const floatX* out,
                                           const float* lse, const floatX* qkv, AttentionPart part,
                                           size_t T, size_t H, size_t K, size_t D) {
    float q[TILE_ELEMENTS], qt[TILE_TRANSPOSED], g[TILE_ELEMENTS], gt[TILE_TRANSPOSED], dq[TILE_ELEMENTS];
    float k[TILE_ELEMENTS], v[TILE_ELEMENTS], p[TILE * TILE], ds[TILE * TILE], row_lse[TILE], delta[TILE];
    size_t width = round_up(D, TILE_GROUP), cols = round_up(D, VECTOR_LANES);
    size_t sum_rows = round_up(part.key_end - part.key, TILE);
    float scale = 1.0f / sqrtf((float)D), *dk = sums, *dv = sums + sum_rows * width;
    HeadRows at = head_rows(part.b, part.h, T, H, K, D);
    for (size_t h = part.h; h < part.h_end; h++) {
        at = head_rows(part.b, h, T, H, K, D);
        for (size_t first = part.query; first < part.query_end; first += TILE) {
            size_t rows = min_size(TILE, T - first), queries = round_up(rows, TILE_GROUP);
            size_t row = ((part.b * T + first) * H + h) * D;
            tile_load(q, qkv + at.q + first * at.stride, at.stride, rows, queries, D, width);
            tile_load_transposed(qt, qkv + at.q + first * at.stride, at.stride, rows, D);
            tile_scale(q, scale, rows * width);
            tile_scale(qt, scale, D * TILE);
            tile_load(g, dout + row, H * D, rows, queries, D, width);
            tile_load_transposed(gt, dout + row, H * D, rows, D);
            tile_delta(delta, gt, out + row, H * D, rows, D);
            for (size_t i = 0; i < queries; i++)  // rows past the last query get no probability
                row_lse[i] = i < rows ? lse[(part.b * H + h) * T + first + i] : INFINITY;
            for (size_t key = part.key; key < min_size(part.key_end, first + rows); key += TILE) {
                size_t keys = min_size(TILE, T - key), v_row;
                const float* values = tile_rows(&v_row, v, qkv + at.v + key * at.stride, at.stride, keys, D, width);
                tile_load(k, qkv + at.k + key * at.stride, at.stride, keys, round_up(keys, TILE_GROUP), D, width);
                tile_scores(p, k, width, qt, -INFINITY, first, key, queries, D);
                tile_scores(ds, values, v_row, gt, 0.0f, first, key, queries, D);
                tile_gradients(p, ds, row_lse, delta, first, key, queries);
                for (size_t j = 0; part.keys && j < TILE && key + j < first + queries; j += TILE_GROUP) {
                    size_t i = tile_first_query(first, key + j), to = (key - part.key + j) * width;
                    bool adds = h > part.h || first > key;
                    tile_product(dv + to, p + j * TILE + i, TILE, 1, g + i * width, cols, queries - i, width, adds);
                    tile_product(dk + to, ds + j * TILE + i, TILE, 1, q + i * width, cols, queries - i, width, adds);
                }
                for (size_t i = 0; part.queries && i < queries; i += TILE_GROUP)
                    tile_product(dq + i * width, ds + i, 1, TILE, k, cols, tile_visible(first + i, key), width,
                                 key > part.key);
            }
            for (size_t i = 0; part.queries && i < rows; i++)
                tile_store_row(dqkv + at.q + (first + i) * at.stride, dq + i * width, scale, D);
        }
    }
    for (size_t j = 0; part.keys && part.key + j < min_size(part.key_end, T); j++) {
        tile_store_row(dqkv + at.k + (part.key + j) * at.stride, dk + j * width, 1.0f, D);
        tile_store_row(dqkv + at.v + (part.key + j) * at.stride, dv + j * width, 1.0f, D);
    }
}

// All heads that read one key/value head. dk and dv are summed in the thread's GEMM workspace: if they fit there all at
// once, a pair of tiles takes 5 matmuls; otherwise 7: first dq, then dk and dv for as many keys as fit at a time. few
// (2, TILE_ELEMENTS) is for a thread without a workspace.
static inline void attention_backward_head(floatX* dqkv, float* few, const floatX* dout, const floatX* out,
                                           const float* lse, const floatX* qkv, size_t b, size_t kv, size_t T,
                                           size_t H, size_t K, size_t D) {
    GemmWorkspace* memory = gemm_workspace();
    float* sums = memory ? memory->sums : few;
    size_t fit = memory ? GEMM_SUMS / 2 / round_up(D, TILE_GROUP) / TILE * TILE : (size_t)TILE;
    AttentionPart part = {b, kv * (H / K), (kv + 1) * (H / K), 0, T, 0, T, true, round_up(T, TILE) <= fit};
    attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
    for (size_t key = 0; key < T && !part.keys; key += fit) {
        AttentionPart keys = {b, part.h, part.h_end, key, T, key, min_size(key + fit, T), false, true};
        attention_backward_part(dqkv, sums, dout, out, lse, qkv, keys, T, H, K, D);
    }
}

// dqkv (B, T, (H + 2K) D) from dout (B, T, H, D) and the forward's out, lse and qkv; delta (B, H, T) is scratch that
// a GPU uses. A task is all heads that read one key/value head or, where those are too few for the threads, a tile:
// then a pair of tiles takes 7 matmuls instead of 5, which pays where otherwise more than 2 of 7 threads would idle.
static inline void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv,
                                      size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream, (void)delta;
    size_t tiles = divide_up(T, TILE), heads = B * K, group = H / K, query_tasks = B * H * tiles;
    bool whole = 5 * round_up(heads, threads_count()) <= 7 * heads;
    Tasks tasks;
    tasks_share(&tasks, whole ? heads : query_tasks + heads * tiles, threads_count());
    #pragma omp parallel
    for (size_t task; tasks_take(&tasks, &task);) {
        float sums[2 * TILE_ELEMENTS];
        size_t head = task / tiles, first = task % tiles * TILE;
        if (whole) {
            attention_backward_head(dqkv, sums, dout, out, lse, qkv, task / K, task % K, T, H, K, D);
        } else if (task < query_tasks) {
            AttentionPart part = {head / H, head % H, head % H + 1, first, first + TILE, 0, T, true, false};
            attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
        } else {
            size_t kv = (head - B * H) % K * group;
            AttentionPart part = {(head - B * H) / K, kv, kv + group, first, T, first, first + TILE, false, true};
            attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 7. GELU and SwiGLU

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
    enum { PIECE = 512 };
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

// ------------------------------------------------------------------------------------------------
// 10. Vectors

// Sums are doubles in device memory, from which the host reads them once per step.

// out (1) = the sum of squares of x (n). The vector is cut into a fixed number of pieces, each summed by one thread.
static inline void sum_of_squares(double* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    enum { PIECES = 256 };
    double partial[PIECES], total = 0.0;
    #pragma omp parallel for
    for (size_t piece = 0; piece < PIECES; piece++) {
        size_t first = n / PIECES * piece + min_size(piece, n % PIECES);
        size_t end = first + n / PIECES + (piece < n % PIECES);
        partial[piece] = VECTOR_SUM_DOUBLE(i, end - first, (double)x[first + i] * (double)x[first + i]);
    }
    for (size_t piece = 0; piece < PIECES; piece++) total += partial[piece];
    *out = total;
}

// Adds factor * (the sum of x (n)) to out (1).
static inline void sum_scaled(double* out, const float* x, double factor, size_t n, Stream stream) {
    (void)stream;
    *out += factor * VECTOR_SUM_DOUBLE(i, n, (double)x[i]);
}

static inline void cast_to_float(float* out, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = float_of(in[i]);
}

static inline void cast_from_float(floatX* out, const float* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = floatX_of(in[i]);
}

// out += x, both (n).
static inline void vector_add(float* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += x[i];
}

// The same for x in floatX.
static inline void vector_add_stored(float* out, const floatX* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += float_of(x[i]);
}

// out = in + branch, all (n): what a norm stores as the residual, without the norm.
static inline void residual_forward(floatX* out, const floatX* in, const floatX* branch, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = floatX_of(float_of(in[i]) + float_of(branch[i]));
}

// Sums in fixed point: integers, whose order and grouping cannot change a bit. sums (n) += x (n) * scale, rounded to
// the nearest. An element outside of +-limit, or NaN, adds nothing and sets *bad to 1.
static inline void exact_add(int64_t* sums, double* bad, const float* x, double scale, double limit, size_t n,
                             Stream stream) {
    (void)stream;
    size_t outside = 0;
    #pragma omp parallel for simd reduction(+:outside)
    for (size_t i = 0; i < n; i++) {
        bool inside = fabs((double)x[i]) <= limit;
        sums[i] += llrint(inside ? (double)x[i] * scale : 0.0);
        outside += !inside;
    }
    if (outside > 0) *bad = 1.0;
}

// sums += x, both (n) in fixed point.
static inline void exact_merge(int64_t* sums, const int64_t* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) sums[i] += x[i];
}

// out (n) = sums (n) * quantum.
static inline void exact_read(float* out, const int64_t* sums, double quantum, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = (float)((double)sums[i] * quantum);
}

// out (1) = the checksum of x (n), elements `first` to first + n - 1 of the flat vector: the checksums of parts add up
// to that of the whole, modulo 2^64.
static inline void vector_checksum(uint64_t* out, const floatX* x, size_t first, size_t n, Stream stream) {
    (void)stream;
    uint64_t sum = 0;
    #pragma omp parallel for simd reduction(+:sum)
    for (size_t i = 0; i < n; i++) sum += checksum_element(x[i], first + i);
    *out = sum;
}

// One step over w (n); m and v (n each) are the optimizer's state, NULL where its kind has none. Each kind has its own
// loop, which the compiler vectorizes.
static inline void optimizer_apply(float* w, float* m, float* v, const float* grad, const ElementStep* e, size_t n) {
    if (e->step.kind == OPTIMIZER_ADAMW) {
        #pragma omp simd
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_ADAMW, &w[i], &m[i], &v[i], grad[i], e);
    } else if (e->step.kind == OPTIMIZER_SGD) {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_SGD, &w[i], NULL, NULL, grad[i], e);
    } else if (e->step.kind == OPTIMIZER_MOMENTUM) {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_MOMENTUM, &w[i], &m[i], NULL, grad[i], e);
    } else {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_LION, &w[i], &m[i], NULL, grad[i], e);
    }
}

// One step of an elementwise optimizer over a slice.
static inline void optimizer_update_elements(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    (void)stream;
    const size_t piece = 2048;
    const ElementStep e = element_step(o);
    float *m = (float*)slice->states[0], *v = (float*)slice->states[1];
    #pragma omp parallel for
    for (size_t begin = 0; begin < slice->n; begin += piece) {
        size_t count = min_size(piece, slice->n - begin);
        float memory[2048], *w = optimizer_weights(memory, slice, begin, count);
        optimizer_apply(w, m ? m + begin : NULL, v ? v + begin : NULL, slice->grads + begin, &e, count);
        optimizer_store(slice, o, w, begin, count);
    }
}

static const MatrixOperations MATRIX_OPERATIONS = {matrix_multiply, matrix_combine, sum_of_squares, matrix_normalize,
                                                   matrix_randomize, matrix_orthonormalize, optimizer_update_elements};

// One step of the optimizer over a slice.
static inline void optimizer_update(const OptimizerSlice* slice, const OptimizerStep* step, Stream stream) {
    const OptimizerStep own = optimizer_step_of(slice, step), *o = &own;
    if (o->kind == OPTIMIZER_ADAMW_8BIT) adamw_8bit_update(slice, o);
    else if (o->kind == OPTIMIZER_ADAMW_BF16) adamw_bf16_update(slice, o);
    else if (OPTIMIZERS[o->kind].rule == SHARD_TENSORS) factored_update(slice, o);
    else if (OPTIMIZERS[o->kind].rule == SHARD_MATRICES) matrix_update(&MATRIX_OPERATIONS, slice, o, stream);
    else optimizer_update_elements(slice, o, stream);
}

// The same for each of `count` slices.
static inline void optimizer_update_list(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                         Stream stream) {
    for (size_t i = 0; i < count; i++) optimizer_update(&slices[i], o, stream);
}

#ifdef LLMTRAIN_CUDA
}  // namespace cpu
#endif

#endif  // LLMTRAIN_KERNELS_CPU_H
