// decode.cuh: attention of new tokens against a KV cache, in CUDA: the function of decode.h, which has the formulas and
// layouts.
//
// Defines: attention_decode.
//
// First the new keys and values are stored, a warp for each head. Then a block owns a query head of a token, and its
// warps take the positions in turn, each with a running maximum and sums of its own, which are combined at the end. A
// lane owns every 32nd element of a head. Only generation uses it: a block per head of one token leaves most of a GPU
// idle, but is simple.

#ifndef LLMTRAIN_DECODE_CUH
#define LLMTRAIN_DECODE_CUH

#include "blocks.cuh"

enum { DECODE_WARPS = 8 };

// Stores the K heads of keys and the K of values of each of N = B T tokens.
static __global__ void __launch_bounds__(DECODE_WARPS * WARP) decode_store_kernel(
        void* keys, void* values, float* scales, const floatX* qkv, const int32_t* positions, size_t N, size_t T,
        size_t context, size_t H, size_t K, size_t D) {
    size_t lane = threadIdx.x % WARP, step = (size_t)gridDim.x * DECODE_WARPS;
    for (size_t i = (size_t)blockIdx.x * DECODE_WARPS + threadIdx.x / WARP; i < N * 2 * K; i += step) {
        size_t row = i / (2 * K), head = i % (2 * K);
        size_t at = (row / T * context + (size_t)positions[row]) * K + head % K;
        const floatX* x = qkv + (row * (H + 2 * K) + H + head) * D;
        void* cache = head < K ? keys : values;
        float maximum = 0.0f;
        bool nan = false;
        for (size_t d = lane; d < D; d += WARP) {
            float element = float_of(x[d]);
            if (scales == NULL) ((floatX*)cache)[at * D + d] = x[d];
            maximum = fmaxf(maximum, fabsf(element));
            nan = nan || element != element;
        }
        if (scales == NULL) continue;
        maximum = __any_sync(0xffffffffu, nan) ? NAN : warp_max(maximum);
        float inverse = maximum > 0 ? 127.0f / maximum : 0.0f;
        for (size_t d = lane; d < D; d += WARP)
            ((int8_t*)cache)[at * D + d] = (int8_t)lrintf(float_of(x[d]) * inverse);
        if (lane == 0) scales[2 * at + head / K] = maximum / 127.0f;
    }
}

static __device__ inline float decode_element(const void* cache, const float* scales, size_t at, size_t d, size_t D) {
    if (scales == NULL) return float_of(((const floatX*)cache)[at * D + d]);
    return scales[2 * at] * (float)((const int8_t*)cache)[at * D + d];
}

static __global__ void __launch_bounds__(DECODE_WARPS * WARP, 4) attention_decode_kernel(
        floatX* out, const void* keys, const void* values, const float* scales, const floatX* qkv, float root,
        const int32_t* positions, size_t T, size_t context, size_t H, size_t K, size_t D) {
    __shared__ float shared[WARP], sums[DECODE_WARPS][ATTENTION_MAX_D];
    const int STRIPS = ATTENTION_MAX_D / WARP;
    size_t row = blockIdx.x / H, h = blockIdx.x % H, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    size_t cached = row / T * context * K + h / (H / K);  // position 0 of this head
    const floatX* q = qkv + (row * (H + 2 * K) + h) * D;
    size_t own = (size_t)positions[row];
    float maximum = -FLT_MAX, total = 0.0f, sum[STRIPS] = {};
    for (size_t t = warp; t <= own; t += DECODE_WARPS) {
        size_t at = cached + t * K;
        float dot = 0.0f;
        for (size_t d = lane; d < D; d += WARP) dot += float_of(q[d]) * decode_element(keys, scales, at, d, D);
        dot = warp_sum(dot) / root;
        float before = maximum;
        maximum = fmaxf(maximum, dot);
        float rescale = expf(before - maximum), p = expf(dot - maximum);
        total = total * rescale + p;
        #pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            size_t d = lane + (size_t)strip * WARP;
            if (d < D)
                sum[strip] = sum[strip] * rescale + p * decode_element(values, scales ? scales + 1 : NULL, at, d, D);
        }
    }
    float rescale = expf(maximum - block_max(maximum, shared));
    #pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) sums[warp][lane + (size_t)strip * WARP] = sum[strip] * rescale;
    total = block_sum(lane == 0 ? total * rescale : 0.0f, shared);  // its barriers also make all threads see the sums
    for (size_t d = threadIdx.x; d < D; d += blockDim.x) {
        float weighted = 0.0f;
        for (int w = 0; w < DECODE_WARPS; w++) weighted += sums[w][d];
        out[(row * H + h) * D + d] = floatX_of(weighted / total);
    }
}

static inline void attention_decode(floatX* out, void* keys, void* values, float* scales, const floatX* qkv,
                                    const int32_t* positions, size_t B, size_t T, size_t context, size_t H, size_t K,
                                    size_t D, Stream stream) {
    unsigned stores = grid_blocks(divide_up(B * T * 2 * K, DECODE_WARPS));
    decode_store_kernel<<<stores, DECODE_WARPS * WARP, 0, stream->compute>>>(
        keys, values, scales, qkv, positions, B * T, T, context, H, K, D);
    LAUNCH_CHECK();
    attention_decode_kernel<<<(unsigned)(B * T * H), DECODE_WARPS * WARP, 0, stream->compute>>>(
        out, keys, values, scales, qkv, sqrtf((float)D), positions, T, context, H, K, D);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_DECODE_CUH
