// kernels_cpu.h: every operation of the model in plain C. It is the specification that the CUDA kernels are checked
// against, and the CPU backend.
//
//    1. precision            what is stored in floatX, the storage dtype; arithmetic is always float
//    2. embedding            token + position
//    3. normalisation        layernorm, rmsnorm, each fused with the residual add before it
//    4. matmul               forward, and the gradients of input, weight and bias (the GEMM is in llmtrain/gemm.h)
//    5. rope                 rotary positions; norms of query and key heads are in llmtrain/qk_norm.h
//    6. attention            causal, grouped-query, in tiles: memory O(T); backward (KV cache: llmtrain/decode.h)
//    7. gelu, swiglu         the two nonlinearities
//    8. dropout
//    9. classifier           softmax + cross-entropy + gradient of the logits, in place
//   10. vectors              global norm, sums, casts, optimizer updates
//
// Conventions. Arguments: outputs, inputs, parameters, sizes, stream (unused here; the CUDA versions have it).
// Arrays are row-major and dense. Activations and their gradients are floatX; gradients of parameters are float and
// are added to, so that micro-batches accumulate; all other outputs are overwritten unless the comment says "adds to".
// Letters: B batch, T sequence, N = B*T rows, C channels, H heads, K key/value heads, D head size, F feed-forward,
// V vocabulary, Vp padded vocabulary.
//
// Every output element is computed by one thread, in an order that depends on the sizes alone: the bits are the same
// for any number of threads and on any processor (llmtrain/arithmetic.h; 16-bit matmuls differ between instruction
// sets).
//
// In a CUDA build kernels.cuh has functions of the same names and signatures; those here are then cpu::gelu_forward and
// so on.
//
// Needs: llmtrain/arithmetic.h, llmtrain/base.h, llmtrain/decode.h, llmtrain/types.h, llmtrain/dtypes.h,
// llmtrain/optimizers.h, llmtrain/optimizers_factored.h, llmtrain/optimizers_matrix.h, llmtrain/optimizers_quantized.h,
// llmtrain/qk_norm.h, llmtrain/rope.h, llmtrain/gemm.h, llmtrain/gemm_portable.h, llmtrain/gemm_x86.h.

#ifndef LLMTRAIN_KERNELS_CPU_H
#define LLMTRAIN_KERNELS_CPU_H

#include "llmtrain/arithmetic.h"
#include "llmtrain/base.h"
#include "llmtrain/decode.h"
#include "llmtrain/gemm.h"
#include "llmtrain/optimizers.h"
#include "llmtrain/optimizers_factored.h"
#include "llmtrain/optimizers_matrix.h"
#include "llmtrain/optimizers_quantized.h"
#include "llmtrain/qk_norm.h"
#include "llmtrain/rope.h"

// ------------------------------------------------------------------------------------------------
// 1. Precision
//
// Compile with -DPRECISION_BF16 or -DPRECISION_FP16 to store in 16 bits. On both backends:
//
//     what                                          stored in  computed in
//     parameters                                    floatX     -
//     master weights, optimizer state               float      float: updated, then rounded to the parameters
//     activations, gradients of activations         floatX     float, rounded once when stored
//     matmuls                                       floatX     factors are floatX, sums float (TF32: see --tf32)
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

// out[b,t,:] = token_weight[tokens[b,t],:] + position_weight[first_position + t,:]
// out (B, T, C), tokens (B, T) in [0, V), token_weight (Vp, C), position_weight (context, C) or NULL.
static inline void embedding_forward(floatX* out, const int32_t* tokens, const floatX* token_weight,
                                     const floatX* position_weight, size_t first_position,
                                     size_t B, size_t T, size_t C, Stream stream) {
    (void)stream;
    #pragma omp parallel for if (B * T > 1)
    for (size_t row = 0; row < B * T; row++) {
        floatX* o = out + row * C;
        const floatX* token = token_weight + (size_t)tokens[row] * C;
        if (position_weight == NULL) {
            memcpy(o, token, C * sizeof(floatX));
            continue;
        }
        const floatX* position = position_weight + (first_position + row % T) * C;
        for (size_t c = 0; c < C; c++) o[c] = floatX_of(float_of(token[c]) + float_of(position[c]));
    }
}

// Adds to dtoken_weight (Vp, C) and dposition_weight (context, C), from dout (B, T, C); not to one that is NULL.
// A thread owns a strip of channels and walks all rows in order: two rows of the same token never race.
static inline void embedding_backward(float* dtoken_weight, float* dposition_weight, const floatX* dout,
                                      const int32_t* tokens, size_t B, size_t T, size_t C, Stream stream) {
    (void)stream;
    const size_t strip = 32;
    #pragma omp parallel for
    for (size_t first = 0; first < C; first += strip) {
        size_t end = min_size(first + strip, C);
        for (size_t row = 0; row < B * T; row++) {
            const floatX* d = dout + row * C;
            float* token = dtoken_weight ? dtoken_weight + (size_t)tokens[row] * C : NULL;
            for (size_t c = first; token && c < end; c++) token[c] += float_of(d[c]);
            if (dposition_weight == NULL) continue;
            float* position = dposition_weight + row % T * C;
            for (size_t c = first; c < end; c++) position[c] += float_of(d[c]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Normalisation
//
// layernorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + epsilon)   ("Layer Normalization")
// rmsnorm:   y = x * rstd * weight,          rstd = 1 / sqrt(mean of squares + epsilon)   ("Root Mean Square Layer
//            Normalization")
// Both are fused with the residual add before them: x = in + branch, and x is kept, since the backward needs it.

// residual[row,:] = in[row,:] + branch[row,:], returned as the row to normalise; without a branch that is in itself.
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
        float m = SUM(c, C, float_of(x[c])) / (float)C;
        float squares = SUM(c, C, (float_of(x[c]) - m) * (float_of(x[c]) - m));
        float s = 1.0f / sqrtf(squares / (float)C + epsilon);
        floatX* o = out + row * C;
        for (size_t c = 0; c < C; c++)
            o[c] = floatX_of(fused((float_of(x[c]) - m) * s, float_of(weight[c]), float_of(bias[c])));
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
        float squares = SUM(c, C, float_of(x[c]) * float_of(x[c]));
        float s = 1.0f / sqrtf(squares / (float)C + epsilon);
        floatX* o = out + row * C;
        for (size_t c = 0; c < C; c++) o[c] = floatX_of(float_of(x[c]) * s * float_of(weight[c]));
        rstd[row] = s;
    }
}

// Adds to dx (N, C), the gradient that flows down the residual stream, and to dweight (C), dbias (C).
// x (N, C) is what was normalised. With y = n * weight + bias, n = (x - mean) * rstd and g = dout * weight:
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
            float average_g = SUM(c, C, float_of(d[c]) * float_of(weight[c])) / (float)C;
            float average_gn = SUM(c, C, float_of(d[c]) * float_of(weight[c]) * ((float_of(xr[c]) - m) * s)) / (float)C;
            floatX* dxr = dx + row * C;
            for (size_t c = 0; c < C; c++) {
                float n = (float_of(xr[c]) - m) * s;
                float g = float_of(d[c]) * float_of(weight[c]);
                dxr[c] = floatX_of(fused(s, fused(-n, average_gn, g - average_g), float_of(dxr[c])));
            }
        }
        #pragma omp for
        for (size_t first = 0; first < C; first += 32) {  // a thread owns a strip of channels, rows in order
            size_t end = min_size(first + 32, C);
            for (size_t row = 0; row < N; row++) {
                const floatX *d = dout + row * C, *xr = x + row * C;
                float m = mean[row], s = rstd[row];
                for (size_t c = first; c < end; c++) {
                    dweight[c] = fused(float_of(d[c]), (float_of(xr[c]) - m) * s, dweight[c]);
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
            float average_gn = SUM(c, C, float_of(d[c]) * float_of(weight[c]) * (float_of(xr[c]) * s)) / (float)C;
            floatX* dxr = dx + row * C;
            for (size_t c = 0; c < C; c++) {
                float g = float_of(d[c]) * float_of(weight[c]);
                dxr[c] = floatX_of(fused(s, fused(-(float_of(xr[c]) * s), average_gn, g), float_of(dxr[c])));
            }
        }
        #pragma omp for
        for (size_t first = 0; first < C; first += 32) {
            size_t end = min_size(first + 32, C);
            for (size_t row = 0; row < N; row++) {
                const floatX *d = dout + row * C, *xr = x + row * C;
                float s = rstd[row];
                for (size_t c = first; c < end; c++)
                    dweight[c] = fused(float_of(d[c]), float_of(xr[c]) * s, dweight[c]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Matmul
//
// M rows, N outputs, K inputs; weights are (N, K), as everywhere in this project: each row makes one output.

// What makes the matmuls, as text, what follows from it, and the device's peak in TFLOP/s, 0 if unknown.
static inline void device_describe(char* text, size_t bytes, double* peak_tflops, Stream stream) {
    (void)stream;
    *peak_tflops = 0;
    const char* note = "the same bits on every CPU";
    if (!ARITHMETIC_FUSED) note = "no fused multiply-add: bits of its own";
    if (strcmp(gemm_kernel()->name, "accelerate") == 0) note = "whose sums have bits of their own";
    if (FLOATX_DTYPE == DTYPE_BF16 && gemm_multiplies_bf16()) note = "which multiply bf16";
    else if (!FLOATX_IS_FLOAT) note = "which convert " FLOATX_NAME " to float: PRECISION=FP32 is as fast";
    snprintf(text, bytes, "%s, %s", gemm_backend(), note);
}

// out (M, N) = in (M, K) weight (N, K)^T + bias (N) or NULL
static inline void matmul_forward(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                  size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    gemm(out, FLOATX_DTYPE, N, false, gemm_matrix(in, FLOATX_DTYPE, K, false),
         gemm_matrix(weight, FLOATX_DTYPE, K, true), bias, FLOATX_DTYPE, M, N, K);
}

// din (M, K) = dout (M, N) weight (N, K)
static inline void matmul_backward_input(floatX* din, const floatX* dout, const floatX* weight,
                                         size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    gemm(din, FLOATX_DTYPE, K, false, gemm_matrix(dout, FLOATX_DTYPE, N, false),
         gemm_matrix(weight, FLOATX_DTYPE, K, false), NULL, FLOATX_DTYPE, M, K, N);
}

// dweight (N, K) = or, if `adds`, += dout (M, N)^T in (M, K), and dbias (N) likewise the sum of dout's rows; not one
// that is NULL.
static inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* in, bool adds,
                                          size_t M, size_t N, size_t K, Stream stream) {
    (void)stream;
    if (dweight)
        gemm(dweight, DTYPE_F32, K, adds, gemm_matrix(dout, FLOATX_DTYPE, N, true),
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
// head turns by the angle position * theta^(-2i/D), or a scaled one (llmtrain/rope.h); the pairing is that of the
// published Llama weights.

// Turns the query and key heads of qkv (B, T, (H + 2K) D) in place; direction 1 forward, -1 back.
static inline void rope_turn(floatX* qkv, const float* table, float direction, size_t first_position,
                             size_t B, size_t T, size_t H, size_t K, size_t D) {
    #pragma omp parallel for if (B * T > 1)
    for (size_t row = 0; row < B * T; row++) {
        const float* angles = table + (first_position + row % T) * D;
        for (size_t head = 0; head < H + K; head++) {
            floatX* x = qkv + (row * (H + 2 * K) + head) * D;
            for (size_t i = 0; i < D / 2; i++) {
                float cosine = angles[2 * i], sine = direction * angles[2 * i + 1];
                float a = float_of(x[i]), b = float_of(x[i + D / 2]);
                x[i] = floatX_of(fused(a, cosine, -(b * sine)));
                x[i + D / 2] = floatX_of(fused(a, sine, b * cosine));
            }
        }
    }
}

static inline void rope_forward(floatX* qkv, const float* table, size_t first_position,
                                size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    rope_turn(qkv, table, 1.0f, first_position, B, T, H, K, D);
}

// The gradient of a rotation is the rotation back.
static inline void rope_backward(floatX* dqkv, const float* table, size_t B, size_t T, size_t H, size_t K, size_t D,
                                 Stream stream) {
    (void)stream;
    rope_turn(dqkv, table, -1.0f, 0, B, T, H, K, D);
}

// ------------------------------------------------------------------------------------------------
// 6. Attention
//
// out_i = sum over j <= i of softmax_j(q_i k_j / sqrt(D)) v_j, for every head; query head h reads key/value head
// h / (H / K). The method is that of "FlashAttention-2: Faster Attention with Better Parallelism and Work
// Partitioning": keys are visited in tiles with a running maximum and sum per query, so no (T, T) array exists; the
// forward keeps lse = maximum + log(sum) of each row, from which the backward makes the probabilities again.
//
// Work per query tile: 4 T D multiply-adds for each of its rows against bytes of K and V that stay in cache: the bound
// is arithmetic. The backward runs twice over the tiles, once by query tiles for dq and once by key tiles for dk and
// dv: 7 matmuls instead of 5, but every output has one writer, in a fixed order.

#define TILE_Q 64     // queries in a tile
#define TILE_K 64     // keys in a tile: a multiple of TILE_Q, so that no visited pair of tiles is all masked
#define TILE_ROWS 16  // rows of a tile between which the diagonal moves: what lies beyond it is not computed

enum { TILE_TRANSPOSED = (ATTENTION_MAX_D + GEMM_PACK_EXTRA) * TILE_K };  // elements of a transposed tile

// tile (rows, width) = scale * source (available, D), rows `stride` apart; what lies outside the source is 0.
static inline void tile_load(float* tile, const floatX* source, size_t stride, float scale,
                             size_t available, size_t rows, size_t D, size_t width) {
    for (size_t i = 0; i < rows; i++) {
        float* t = tile + i * width;
        size_t filled = i < available ? D : 0;
        for (size_t d = 0; d < filled; d++) t[d] = scale * float_of(source[i * stride + d]);
        for (size_t d = filled; d < width; d++) t[d] = 0.0f;
    }
}

// tile (D, TILE_K) = source (available, D) transposed; columns outside the source are 0. It is how gemm packs, which
// may write GEMM_PACK_EXTRA rows more.
static inline void tile_load_transposed(float* tile, const floatX* source, size_t stride, size_t available, size_t D) {
    GemmOperand rows = gemm_operand(gemm_matrix(source, FLOATX_DTYPE, stride, false), true, false, false);
    gemm_kernel()->pack((uint32_t*)tile, &rows, 0, available, TILE_K, 0, D);
}

// tile_product for `vectors` neighbouring vectors of columns, 1 or 2: half of the registers hold sums.
ALWAYS_INLINE void tile_columns(float* out, const float* a, size_t a_row, size_t a_col, const float* b,
                                size_t rows, size_t depth, size_t stride, int vectors) {
    enum { SUMS = VECTOR_REGISTERS / 2 };
    const int height = SUMS / vectors;
    for (size_t i = 0; i < rows; i += (size_t)height) {
        Vector sum[SUMS];
        GEMM_UNROLL
        for (int s = 0; s < SUMS; s++)
            sum[s] = *(const Vector*)(out + (i + (size_t)(s / vectors)) * stride + s % vectors * VECTOR_LANES);
        for (size_t p = 0; p < depth; p++) {
            const Vector* column = (const Vector*)(b + p * stride);
            GEMM_UNROLL
            for (int s = 0; s < SUMS; s++) {
                Vector x = vector_of(a[(i + (size_t)(s / vectors)) * a_row + p * a_col]);
                sum[s] = vector_fused(x, column[s % vectors], sum[s]);
            }
        }
        GEMM_UNROLL
        for (int s = 0; s < SUMS; s++)
            *(Vector*)(out + (i + (size_t)(s / vectors)) * stride + s % vectors * VECTOR_LANES) = sum[s];
    }
}

// out (rows, cols) += a (rows, depth) b (depth, cols), all float. rows and cols are multiples of 16; rows of out and b
// are `stride` apart; a has any strides, so that it may be a transpose.
static inline void tile_product(float* out, const float* a, size_t a_row, size_t a_col, const float* b,
                                size_t rows, size_t cols, size_t depth, size_t stride) {
    size_t j = 0;
    for (; j + 2 * VECTOR_LANES <= cols; j += 2 * VECTOR_LANES)
        tile_columns(out + j, a, a_row, a_col, b + j, rows, depth, stride, 2);
    if (j < cols) tile_columns(out + j, a, a_row, a_col, b + j, rows, depth, stride, 1);
}

// How many keys of a tile the TILE_ROWS queries to which number `query` belongs can see: the rest is masked for all of
// them, and never read. What some of them see and others do not is multiplied by 0, so that an infinite value or NaN
// there shows in all of them. first and key are the numbers of the first query and key of the two tiles.
static inline size_t tile_visible(size_t first, size_t query, size_t key) {
    return min_size(TILE_K, first + query / TILE_ROWS * TILE_ROWS + TILE_ROWS - key);
}

// score (TILE_Q, TILE_K) = q (TILE_Q, width) kt (D, TILE_K), where a query sees the key; `masked` where others of its
// TILE_ROWS do.
static inline void tile_scores(float* score, const float* q, const float* kt, float masked, size_t first, size_t key,
                               size_t D, size_t width) {
    for (size_t i = 0; i < TILE_Q; i += TILE_ROWS) {
        size_t visible = tile_visible(first, i, key);
        for (size_t r = i; r < i + TILE_ROWS; r++) memset(score + r * TILE_K, 0, visible * sizeof(float));
        tile_product(score + i * TILE_K, q + i * width, width, 1, kt, TILE_ROWS, visible, D, TILE_K);
        for (size_t r = i; r < i + TILE_ROWS; r++)
            for (size_t j = first + r - key + 1; j < visible; j++) score[r * TILE_K + j] = masked;
    }
}

// One tile of queries against all keys before them: the loop of the forward.
static inline void attention_forward_tile(floatX* out, float* lse, const floatX* qkv, HeadRows at, size_t first,
                                          size_t T, size_t D, size_t out_stride) {
    float q[TILE_Q * ATTENTION_MAX_D], k[TILE_TRANSPOSED], v[TILE_K * ATTENTION_MAX_D];
    float sum[TILE_Q * ATTENTION_MAX_D], score[TILE_Q * TILE_K], maximum[TILE_Q], total[TILE_Q];
    size_t width = round_up(D, 16), rows = min_size(TILE_Q, T - first);
    tile_load(q, qkv + at.q + first * at.stride, at.stride, 1.0f / sqrtf((float)D), rows, TILE_Q, D, width);
    memset(sum, 0, TILE_Q * width * sizeof(float));
    for (size_t i = 0; i < TILE_Q; i++) {
        maximum[i] = -INFINITY;
        total[i] = 0.0f;
    }
    for (size_t key = 0; key < first + rows; key += TILE_K) {
        size_t keys = min_size(TILE_K, T - key);
        tile_load_transposed(k, qkv + at.k + key * at.stride, at.stride, keys, D);
        tile_load(v, qkv + at.v + key * at.stride, at.stride, 1.0f, keys, TILE_K, D, width);
        tile_scores(score, q, k, -INFINITY, first, key, D, width);
        for (size_t i = 0; i < TILE_Q; i++) {
            float *s = score + i * TILE_K, before = maximum[i], now = before;
            size_t visible = tile_visible(first, i, key);
            #pragma omp simd reduction(max:now)
            for (size_t j = 0; j < visible; j++) now = s[j] > now ? s[j] : now;
            for (size_t j = 0; j < visible; j++) s[j] = exp_fast(s[j] - now);
            float rescale = exp_fast(before - now);
            maximum[i] = now;
            total[i] = fused(total[i], rescale, SUM(j, visible, s[j]));
            if (key > 0) for (size_t d = 0; d < width; d++) sum[i * width + d] *= rescale;
        }
        for (size_t i = 0; i < TILE_Q; i += TILE_ROWS)
            tile_product(sum + i * width, score + i * TILE_K, TILE_K, 1, v, TILE_ROWS, width,
                         tile_visible(first, i, key), width);
    }
    for (size_t i = 0; i < rows; i++) {
        float inverse = 1.0f / total[i];
        floatX* o = out + i * out_stride;
        for (size_t d = 0; d < D; d++) o[d] = floatX_of(sum[i * width + d] * inverse);
        lse[i] = maximum[i] + (float)log_double((double)total[i]);
    }
}

// out (B, T, H, D), lse (B, H, T); qkv (B, T, (H + 2K) D): all query heads, then key heads, then value heads.
static inline void attention_forward(floatX* out, float* lse, const floatX* qkv,
                                     size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    size_t tiles = divide_up(T, TILE_Q);
    #pragma omp parallel for schedule(dynamic)
    for (size_t task = 0; task < B * H * tiles; task++) {
        size_t b = task / (H * tiles), h = task / tiles % H, first = task % tiles * TILE_Q;
        attention_forward_tile(out + ((b * T + first) * H + h) * D, lse + (b * H + h) * T + first, qkv,
                               head_rows(b, h, T, H, K, D), first, T, D, H * D);
    }
}

// Probabilities p and score gradients ds (both TILE_Q x TILE_K) of one pair of tiles, from the scaled queries q and
// the output gradients dout (TILE_Q, width) and the transposed keys and values kt, vt (D, TILE_K):
// p = exp(q k - lse), ds = p * (dout v - delta), where delta_i = dout_i out_i; both are 0 above the diagonal.
static inline void attention_tile_gradient(float* p, float* ds, const float* q, const float* dout, const float* kt,
                                           const float* vt, const float* lse, const float* delta, size_t first,
                                           size_t key, size_t rows, size_t D, size_t width) {
    tile_scores(p, q, kt, -INFINITY, first, key, D, width);
    tile_scores(ds, dout, vt, 0.0f, first, key, D, width);
    for (size_t i = 0; i < TILE_Q; i++) {
        float *pi = p + i * TILE_K, *dsi = ds + i * TILE_K;
        if (i >= rows) {
            memset(pi, 0, TILE_K * sizeof(float));
            memset(dsi, 0, TILE_K * sizeof(float));
            continue;
        }
        size_t visible = tile_visible(first, i, key);
        for (size_t j = 0; j < visible; j++) {
            pi[j] = exp_fast(pi[j] - lse[i]);
            dsi[j] = pi[j] * (dsi[j] - delta[i]);
        }
    }
}

// dq of one tile of queries: dq = scale * ds k.
static inline void attention_backward_queries(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                                              const floatX* qkv, HeadRows at, size_t first, size_t T, size_t D,
                                              size_t out_stride) {
    float q[TILE_Q * ATTENTION_MAX_D], g[TILE_Q * ATTENTION_MAX_D], kt[TILE_TRANSPOSED];
    float vt[TILE_TRANSPOSED], k[TILE_K * ATTENTION_MAX_D], dq[TILE_Q * ATTENTION_MAX_D];
    float p[TILE_Q * TILE_K], ds[TILE_Q * TILE_K];
    size_t width = round_up(D, 16), rows = min_size(TILE_Q, T - first);
    float scale = 1.0f / sqrtf((float)D);
    tile_load(q, qkv + at.q + first * at.stride, at.stride, scale, rows, TILE_Q, D, width);
    tile_load(g, dout, out_stride, 1.0f, rows, TILE_Q, D, width);
    memset(dq, 0, TILE_Q * width * sizeof(float));
    for (size_t key = 0; key < first + rows; key += TILE_K) {
        size_t keys = min_size(TILE_K, T - key);
        tile_load_transposed(kt, qkv + at.k + key * at.stride, at.stride, keys, D);
        tile_load_transposed(vt, qkv + at.v + key * at.stride, at.stride, keys, D);
        tile_load(k, qkv + at.k + key * at.stride, at.stride, 1.0f, keys, TILE_K, D, width);
        attention_tile_gradient(p, ds, q, g, kt, vt, lse, delta, first, key, rows, D, width);
        for (size_t i = 0; i < TILE_Q; i += TILE_ROWS)
            tile_product(dq + i * width, ds + i * TILE_K, TILE_K, 1, k, TILE_ROWS, width, tile_visible(first, i, key),
                         width);
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t d = 0; d < D; d++) dqkv[at.q + (first + i) * at.stride + d] = floatX_of(scale * dq[i * width + d]);
}

// dk and dv of one tile of keys, summed over the group of query heads that read them: dv = p^T dout, dk = ds^T q.
static inline void attention_backward_keys(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                                           const floatX* qkv, size_t b, size_t kv, size_t key,
                                           size_t T, size_t H, size_t K, size_t D) {
    float q[TILE_Q * ATTENTION_MAX_D], g[TILE_Q * ATTENTION_MAX_D], kt[TILE_TRANSPOSED];
    float vt[TILE_TRANSPOSED], dk[TILE_K * ATTENTION_MAX_D], dv[TILE_K * ATTENTION_MAX_D];
    float p[TILE_Q * TILE_K], ds[TILE_Q * TILE_K];
    size_t width = round_up(D, 16), keys = min_size(TILE_K, T - key), group = H / K;
    HeadRows at = head_rows(b, kv * group, T, H, K, D);
    tile_load_transposed(kt, qkv + at.k + key * at.stride, at.stride, keys, D);
    tile_load_transposed(vt, qkv + at.v + key * at.stride, at.stride, keys, D);
    memset(dk, 0, TILE_K * width * sizeof(float));
    memset(dv, 0, TILE_K * width * sizeof(float));
    for (size_t h = kv * group; h < (kv + 1) * group; h++) {
        at = head_rows(b, h, T, H, K, D);
        for (size_t first = key / TILE_Q * TILE_Q; first < T; first += TILE_Q) {
            size_t rows = min_size(TILE_Q, T - first), row = (b * H + h) * T + first;
            tile_load(q, qkv + at.q + first * at.stride, at.stride, 1.0f / sqrtf((float)D), rows, TILE_Q, D, width);
            tile_load(g, dout + ((b * T + first) * H + h) * D, H * D, 1.0f, rows, TILE_Q, D, width);
            attention_tile_gradient(p, ds, q, g, kt, vt, lse + row, delta + row, first, key, rows, D, width);
            for (size_t j = 0; j < TILE_K; j += TILE_ROWS) {
                size_t i = key + j > first ? key + j - first : 0;  // the first query that sees these keys
                if (i >= TILE_Q) break;
                size_t from = i * TILE_K + j, queries = TILE_Q - i;
                tile_product(dv + j * width, p + from, 1, TILE_K, g + i * width, TILE_ROWS, width, queries, width);
                tile_product(dk + j * width, ds + from, 1, TILE_K, q + i * width, TILE_ROWS, width, queries, width);
            }
        }
    }
    for (size_t j = 0; j < keys; j++) {
        for (size_t d = 0; d < D; d++) {
            dqkv[at.k + (key + j) * at.stride + d] = floatX_of(dk[j * width + d]);
            dqkv[at.v + (key + j) * at.stride + d] = floatX_of(dv[j * width + d]);
        }
    }
}

// dqkv (B, T, (H + 2K) D) from dout (B, T, H, D) and the forward's out, lse and qkv; delta (B, H, T) is scratch.
static inline void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv,
                                      size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    size_t q_tiles = divide_up(T, TILE_Q), k_tiles = divide_up(T, TILE_K);
    #pragma omp parallel
    {
        #pragma omp for
        for (size_t row = 0; row < B * H * T; row++) {
            size_t b = row / (H * T), h = row / T % H, t = row % T, at = ((b * T + t) * H + h) * D;
            delta[row] = SUM(d, D, float_of(dout[at + d]) * float_of(out[at + d]));
        }
        #pragma omp for schedule(dynamic) nowait
        for (size_t task = 0; task < B * H * q_tiles; task++) {
            size_t b = task / (H * q_tiles), h = task / q_tiles % H, first = task % q_tiles * TILE_Q;
            size_t row = (b * H + h) * T + first;
            attention_backward_queries(dqkv, dout + ((b * T + first) * H + h) * D, lse + row, delta + row, qkv,
                                       head_rows(b, h, T, H, K, D), first, T, D, H * D);
        }
        #pragma omp for schedule(dynamic)
        for (size_t task = 0; task < B * K * k_tiles; task++) {
            size_t b = task / (K * k_tiles), kv = task / k_tiles % K, key = task % k_tiles * TILE_K;
            attention_backward_keys(dqkv, dout, lse, delta, qkv, b, kv, key, T, H, K, D);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 7. GELU and SwiGLU

// "Gaussian Error Linear Units", in the form with tanh: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3),
// which is x * sigmoid(2u). out (n), in (n).
static inline void gelu_forward(floatX* out, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        float x = float_of(in[i]), u = 0.7978845608f * fused(0.044715f * x * x, x, x);
        out[i] = floatX_of(x * sigmoid_fast(2.0f * u));
    }
}

// din (n) = dout (n) * dGELU/dx at in (n); din and dout may be the same array.
static inline void gelu_backward(floatX* din, const floatX* dout, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        float x = float_of(in[i]), u = 0.7978845608f * fused(0.044715f * x * x, x, x), s = sigmoid_fast(2.0f * u);
        float du = 0.7978845608f * fused(3.0f * 0.044715f * x, x, 1.0f);
        din[i] = floatX_of(float_of(dout[i]) * fused(2.0f * x * s * (1.0f - s), du, s));
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
            dgate[f] = floatX_of(dd * u * s * fused(g, 1.0f - s, 1.0f));
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

// out of matmul_gelu_forward again, to the bit; where that is one operation pre is written again too.
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
// then divided by it. Which ones is a function of (seed, site, first + index) alone, so the backward is the same
// function on the gradient, nothing is stored, and the choice does not depend on how samples are dealt to ranks.

// out (n) = in (n) with dropout, 0 <= p < 1; they may be the same array. first: number of element 0 in the whole run.
static inline void dropout(floatX* out, const floatX* in, float p, uint64_t seed, uint64_t site, uint64_t first,
                           size_t n, Stream stream) {
    (void)stream;
    uint32_t threshold = (uint32_t)(p * 4294967296.0);  // dropped if the random bits lie below
    float scale = 1.0f / (1.0f - p);
    #pragma omp parallel for
    for (uint64_t quad = first / 4; quad < (first + n + 3) / 4; quad++) {
        Random4 r = random4(seed, RANDOM_DROPOUT, site, quad);
        for (uint64_t lane = 0; lane < 4; lane++) {
            uint64_t i = quad * 4 + lane - first;
            if (i < n) out[i] = r.bits[lane] < threshold ? floatX_of(0.0f) : floatX_of(float_of(in[i]) * scale);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 9. Classifier

// losses (N) = -log softmax(logits)[target] per row, 0 where the target is -1; logits (N, Vp), targets (N).
// If dloss is not 0, each row of logits is replaced by its gradient dloss * (softmax - onehot(target)), 0 where the
// target is -1 and in the padded columns V to Vp - 1, which have no probability.
static inline void classifier(floatX* logits, float* losses, const int32_t* targets, float dloss,
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
        float sum = SUM(v, V, exp_fast(float_of(x[v]) - maximum));
        losses[row] = (float)log_double((double)sum) + (maximum - target_logit);
        if (dloss == 0.0f) continue;
        float scale = dloss / sum;
        #pragma omp simd
        for (size_t v = 0; v < V; v++) x[v] = floatX_of(exp_fast(float_of(x[v]) - maximum) * scale);
        for (size_t v = V; v < Vp; v++) x[v] = floatX_of(0.0f);
        float target_probability = exp_fast(target_logit - maximum) / sum;
        x[targets[row]] = floatX_of((target_probability - 1.0f) * dloss);
    }
}

// ------------------------------------------------------------------------------------------------
// 10. Vectors

// Sums are doubles and go to device memory, where the host reads them once per step.

// out (1) = the sum of squares of x (n). The vector is cut into a fixed number of pieces, each summed by one thread.
static inline void sum_of_squares(double* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    enum { PIECES = 256 };
    double partial[PIECES], total = 0.0;
    #pragma omp parallel for
    for (size_t piece = 0; piece < PIECES; piece++) {
        size_t first = n / PIECES * piece + min_size(piece, n % PIECES);
        size_t end = first + n / PIECES + (piece < n % PIECES);
        partial[piece] = SUM_DOUBLE(i, end - first, (double)x[first + i] * (double)x[first + i]);
    }
    for (size_t piece = 0; piece < PIECES; piece++) total += partial[piece];
    *out = total;
}

// Adds factor * (the sum of x (n)) to out (1).
static inline void sum_scaled(double* out, const float* x, double factor, size_t n, Stream stream) {
    (void)stream;
    *out += factor * SUM_DOUBLE(i, n, (double)x[i]);
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
static inline void add(float* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += x[i];
}

// The same for x in floatX.
static inline void add_stored(float* out, const floatX* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += float_of(x[i]);
}

// Sums in fixed point: integers, whose order and grouping cannot change a bit. sums (n) += x (n) * scale, rounded to
// the nearest. An element that is not within +-limit, or not a number, adds nothing, and sets *bad to 1.
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

// out (1) = the checksum of x (n), elements `first` to first + n - 1 of the flat vector: sums of parts are the sum of
// the whole, modulo 2^64.
static inline void checksum(uint64_t* out, const floatX* x, size_t first, size_t n, Stream stream) {
    (void)stream;
    uint64_t sum = 0;
    #pragma omp parallel for simd reduction(+:sum)
    for (size_t i = 0; i < n; i++) sum += checksum_element(x[i], first + i);
    *out = sum;
}

// One step over w (n), with what the kind keeps in m and v (n each; NULL where it keeps nothing):
// AdamW     "Decoupled Weight Decay Regularization":  m, v: running means of g and g^2, both corrected for their start;
//           w -= lr (m' / (sqrt(v') + epsilon) + weight_decay w); adamw_element in optimizers.h
// SGD       w -= lr (g + weight_decay w)
// momentum  m = beta1 m + g;  w -= lr (m + weight_decay w)
// Lion      "Symbolic Discovery of Optimization Algorithms":  w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w);
//           m = beta2 m + (1 - beta2) g
static inline void optimizer_apply(float* w, float* m, float* v, const float* grad, const OptimizerStep* o, size_t n) {
    float lr = o->lr, beta1 = o->beta1, beta2 = o->beta2, scale = o->grad_scale, decay = o->weight_decay;
    if (o->kind == OPTIMIZER_ADAMW) {
        const AdamW a = adamw_begin(o);
        #pragma omp simd
        for (size_t i = 0; i < n; i++) adamw_element(&w[i], &m[i], &v[i], grad[i], &a);
    } else if (o->kind == OPTIMIZER_SGD) {
        for (size_t i = 0; i < n; i++) w[i] = fused(-lr, fused(grad[i], scale, decay * w[i]), w[i]);
    } else if (o->kind == OPTIMIZER_MOMENTUM) {
        for (size_t i = 0; i < n; i++) {
            m[i] = fused(beta1, m[i], grad[i] * scale);
            w[i] = fused(-lr, fused(decay, w[i], m[i]), w[i]);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            float g = grad[i] * scale, mixed = fused(beta1, m[i], (1.0f - beta1) * g);
            float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // 0 and NaN stay what they are
            w[i] = fused(-lr, fused(decay, w[i], sign), w[i]);
            m[i] = fused(beta2, m[i], (1.0f - beta2) * g);
        }
    }
}

// One step of a formula of an element over a slice.
static inline void optimizer_update_elements(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    (void)stream;
    const size_t piece = 2048;
    float *m = (float*)slice->states[0], *v = (float*)slice->states[1];
    #pragma omp parallel for
    for (size_t begin = 0; begin < slice->n; begin += piece) {
        size_t count = min_size(piece, slice->n - begin);
        float memory[2048], *w = optimizer_weights(memory, slice, begin, count);
        optimizer_apply(w, m ? m + begin : NULL, v ? v + begin : NULL, slice->grads + begin, o, count);
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
    else if (OPTIMIZERS[o->kind].cut == CUT_NOWHERE) factored_update(slice, o);
    else if (OPTIMIZERS[o->kind].cut == CUT_OTHERS) matrix_update(&MATRIX_OPERATIONS, slice, o, stream);
    else optimizer_update_elements(slice, o, stream);
}

// The same over slices (count).
static inline void optimizer_update_list(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                         Stream stream) {
    for (size_t i = 0; i < count; i++) optimizer_update(&slices[i], o, stream);
}

#ifdef LLMTRAIN_CUDA
}  // namespace cpu
#endif

#endif  // LLMTRAIN_KERNELS_CPU_H
