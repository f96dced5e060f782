// decode.h: attention of new tokens against a KV cache, in plain C: the specification of the kernels of the same name,
// and the CPU backend.
//
//   attention_decode(out, keys, values, scales, qkv, positions, B, T, context, H, K, D, stream);
//
// Each of B sequences, of any lengths, gets T tokens more: their keys and values are stored in its cache, then their
// queries see all positions up to their own. T is 1 when tokens are generated, and larger when a prompt is read.
//
// A cache holds floatX, or, if `scales` is given, 8-bit integers: a key or value vector x of one head at one position
// becomes round(x / scale) with scale = max |x| / 127, so that each element is off by at most scale / 2.
//
// The order of all sums is that of attention_forward in attention_cpu.h, tile of keys by tile of keys. So the bits are
// the same for any B and T, and for the sequence read at once without a cache (if the cache holds floatX).

#ifndef LLMTRAIN_DECODE_H
#define LLMTRAIN_DECODE_H

#include "gemm.h"

LLMTRAIN_CPU_BEGIN

enum {
    DECODE_KEYS = 64,     // keys in a tile: TILE of attention_cpu.h
    DECODE_QUERIES = 16,  // queries that share a loaded tile
    DECODE_SPARE = GEMM_PACK_EXTRA * DECODE_KEYS  // floats that packing may write past a tile
};

// Stores rows (B, T), which are `stride` apart and begin with the K heads, at their positions (B, T) in cache
// (B, context, K, D) and every second of scales (B, context, K, 2).
static inline void decode_store(void* cache, float* scales, const floatX* rows, const int32_t* positions, size_t B,
                                size_t T, size_t context, size_t stride, size_t K, size_t D) {
    #pragma omp parallel for if (B * T > 1)
    for (size_t head = 0; head < B * T * K; head++) {
        size_t row = head / K, kv = head % K, at = (row / T * context + (size_t)positions[row]) * K + kv;
        const floatX* x = rows + row * stride + kv * D;
        if (scales == NULL) {
            memcpy((floatX*)cache + at * D, x, D * sizeof(floatX));
            continue;
        }
        float maximum = 0.0f;
        for (size_t d = 0; d < D; d++) {
            float size = fabsf(float_of(x[d]));
            maximum = size > maximum || size != size ? size : maximum;  // NaN stays
        }
        float inverse = maximum > 0 ? 127.0f / maximum : 0.0f;
        for (size_t d = 0; d < D; d++) ((int8_t*)cache)[at * D + d] = (int8_t)lrintf(float_of(x[d]) * inverse);
        scales[2 * at] = maximum / 127.0f;
    }
}

// rows (keys, width) = rows of one head from a cache, beginning with number `at` of (B * context * K); 0 past D.
static inline void decode_load(float* rows, const void* cache, const float* scales, size_t at, size_t keys, size_t K,
                               size_t D, size_t width) {
    for (size_t j = 0; j < keys; j++, at += K, rows += width) {
        const floatX* x = (const floatX*)cache + at * D;
        const int8_t* x8 = (const int8_t*)cache + at * D;
        if (scales == NULL) for (size_t d = 0; d < D; d++) rows[d] = float_of(x[d]);
        else for (size_t d = 0; d < D; d++) rows[d] = scales[2 * at] * (float)x8[d];
        for (size_t d = D; d < width; d++) rows[d] = 0.0f;
    }
}

// out (vectors * lanes) += a (depth) times the first columns of b (depth, stride).
ALWAYS_INLINE void decode_columns(float* out, const float* a, const float* b, size_t depth, size_t stride,
                                  int vectors) {
    Vector sum[64 / VECTOR_LANES];
    GEMM_UNROLL
    for (int v = 0; v < vectors; v++) sum[v] = *(const Vector*)(out + v * VECTOR_LANES);
    for (size_t p = 0; p < depth; p++) {
        GEMM_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = vector_fused(vector_of(a[p]), *(const Vector*)(b + p * stride + v * VECTOR_LANES), sum[v]);
    }
    GEMM_UNROLL
    for (int v = 0; v < vectors; v++) *(Vector*)(out + v * VECTOR_LANES) = sum[v];
}

// out (width) += a (depth) b (depth, width), the terms of a sum in order; width is a multiple of 16.
static inline void decode_product(float* out, const float* a, const float* b, size_t depth, size_t width) {
    size_t c = 0;
    for (; c + 64 <= width; c += 64) decode_columns(out + c, a, b + c, depth, width, 64 / VECTOR_LANES);
    for (; c < width; c += 16) decode_columns(out + c, a, b + c, depth, width, 16 / VECTOR_LANES);
}

// One query head at positions [first, first + queries), at most DECODE_QUERIES, whose keys and values begin in row
// number `row` of (B * context * K); q and out are `q_stride` and H D apart.
static inline void decode_queries(floatX* out, const void* keys, const void* values, const float* scales,
                                  const floatX* q, size_t q_stride, size_t first, size_t queries, size_t row,
                                  size_t H, size_t K, size_t D) {
    float query[DECODE_QUERIES * ATTENTION_MAX_D], sum[DECODE_QUERIES * ATTENTION_MAX_D];
    float rows[DECODE_KEYS * ATTENTION_MAX_D], k[DECODE_KEYS * ATTENTION_MAX_D + DECODE_SPARE];
    float score[DECODE_KEYS], maximum[DECODE_QUERIES], total[DECODE_QUERIES];
    size_t width = round_up(D, 16), end = first + queries;
    for (size_t i = 0; i < queries; i++) {
        for (size_t d = 0; d < D; d++) query[i * D + d] = 1.0f / sqrtf((float)D) * float_of(q[i * q_stride + d]);
        memset(sum + i * width, 0, width * sizeof(float));
        maximum[i] = -INFINITY;
        total[i] = 0.0f;
    }
    for (size_t key = 0; key < end; key += DECODE_KEYS) {
        size_t tile = min_size(DECODE_KEYS, end - key);
        decode_load(rows, keys, scales, row + key * K, tile, K, D, width);
        GemmOperand transposed = gemm_operand(gemm_matrix(rows, DTYPE_F32, width, false), true, false, false);
        gemm_kernel()->pack((uint32_t*)k, &transposed, 0, tile, DECODE_KEYS, 0, D);
        decode_load(rows, values, scales ? scales + 1 : NULL, row + key * K, tile, K, D, width);
        for (size_t i = 0; i < queries; i++) {
            if (first + i < key) continue;
            size_t seen = min_size(tile, first + i + 1 - key);
            memset(score, 0, sizeof score);
            decode_product(score, query + i * D, k, D, DECODE_KEYS);
            float before = maximum[i], now = before;
            #pragma omp simd reduction(max:now)
            for (size_t j = 0; j < seen; j++) now = score[j] > now ? score[j] : now;
            for (size_t j = 0; j < seen; j++) score[j] = exp_fast(score[j] - now);
            float rescale = exp_fast(before - now);
            maximum[i] = now;
            total[i] = multiply_add(total[i], rescale, VECTOR_SUM(j, seen, score[j]));
            if (key > 0) for (size_t d = 0; d < width; d++) sum[i * width + d] *= rescale;
            decode_product(sum + i * width, score, rows, seen, width);
        }
    }
    for (size_t i = 0; i < queries; i++) {
        float inverse = 1.0f / total[i];
        for (size_t d = 0; d < D; d++) out[i * H * D + d] = floatX_of(sum[i * width + d] * inverse);
    }
}

// out (B, T, H, D); keys, values (B, context, K, D) of floatX with scales NULL, or of int8_t with scales
// (B, context, K, 2) of key and value; qkv (B, T, (H + 2K) D), at positions (B, T), consecutive and below context.
static inline void attention_decode(floatX* out, void* keys, void* values, float* scales, const floatX* qkv,
                                    const int32_t* positions, size_t B, size_t T, size_t context, size_t H, size_t K,
                                    size_t D, Stream stream) {
    (void)stream;
    size_t stride = (H + 2 * K) * D, blocks = divide_up(T, DECODE_QUERIES);
    decode_store(keys, scales, qkv + H * D, positions, B, T, context, stride, K, D);
    decode_store(values, scales ? scales + 1 : NULL, qkv + (H + K) * D, positions, B, T, context, stride, K, D);
    Tasks tasks;
    tasks_share(&tasks, B * H * blocks, threads_count());
    #pragma omp parallel
    for (size_t task; tasks_take(&tasks, &task);) {
        size_t b = task / (H * blocks), h = task / blocks % H, t = task % blocks * DECODE_QUERIES;
        decode_queries(out + ((b * T + t) * H + h) * D, keys, values, scales,
                       qkv + (b * T + t) * stride + h * D, stride, (size_t)positions[b * T + t],
                       min_size(DECODE_QUERIES, T - t), b * context * K + h / (H / K), H, K, D);
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_DECODE_H
