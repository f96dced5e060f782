// qk_norm.cuh: RMSNorm of every query and key head, in CUDA: the functions of qk_norm.h, where the formulas are.
//
// Defines: qk_norm_forward, qk_norm_backward, qk_norm_backward_scratch_bytes.

#ifndef LLMTRAIN_QK_NORM_CUH
#define LLMTRAIN_QK_NORM_CUH

#include "blocks.cuh"

enum {
    QK_NORM_WARPS = 8,           // of a block; a warp owns a head, of up to ATTENTION_MAX_D elements, in registers
    QK_NORM_BLOCK_ROWS = 8,      // rows of a block of the backward, at least: it writes up to 8 bytes per element of a
                                 // head for them
    QK_NORM_BLOCKS = 1024        // of the backward, at most: bounds the scratch memory
};

// The most rounds that a warp with W elements per lane needs to cover a whole head.
static HOST_DEVICE constexpr int qk_norm_rounds(int W) { return ATTENTION_MAX_D / (WARP * W); }

// qkv (N, (H + 2K) D) in place, saved (N, (H + K) D), rstd (N, H + K). Reads D elements and writes 2 D per head; the
// weights stay in the cache. Bound by memory.
template <int W>
static __global__ void __launch_bounds__(QK_NORM_WARPS * WARP)
qk_norm_forward_kernel(floatX* qkv, floatX* saved, float* rstd, const floatX* __restrict__ q_weight,
                       const floatX* __restrict__ k_weight, float epsilon, size_t N, size_t H, size_t K, size_t D) {
    constexpr int ROUNDS = qk_norm_rounds(W);
    size_t lane = threadIdx.x % WARP, heads = H + K, step = (size_t)gridDim.x * QK_NORM_WARPS;
    for (size_t at = (size_t)blockIdx.x * QK_NORM_WARPS + threadIdx.x / WARP; at < N * heads; at += step) {
        size_t row = at / heads, head = at % heads;
        floatX* x = qkv + (row * (heads + K) + head) * D;
        const floatX* weight = head < H ? q_weight : k_weight;
        Lanes<W> v[ROUNDS];
        float squares = 0.0f;
        #pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            size_t i = (k * WARP + lane) * W;
            if (i >= D) continue;
            v[k] = lanes_load<W>(x + i);
            #pragma unroll
            for (int j = 0; j < W; j++) squares += v[k].x[j] * v[k].x[j];
        }
        float s = 1.0f / sqrtf(warp_sum(squares) / (float)D + epsilon);
        #pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            size_t i = (k * WARP + lane) * W;
            if (i >= D) continue;
            Lanes<W> w = lanes_load<W>(weight + i);
            lanes_store(saved + at * D + i, v[k]);
            #pragma unroll
            for (int j = 0; j < W; j++) v[k].x[j] *= s * w.x[j];
            lanes_store(x + i, v[k]);
        }
        if (lane == 0) rstd[at] = s;
    }
}

// dqkv (N, (H + 2K) D) in place; partial (2, blocks, D) = each block's part of dq_weight and of dk_weight. A block
// takes rows blockIdx.x, + gridDim.x, ..., a warp every 8th head of them; a lane always has the same elements, whose
// sums it keeps in registers. Reads 2 D elements and writes D per head.
template <int W>
static __global__ void __launch_bounds__(QK_NORM_WARPS * WARP, 3)
qk_norm_backward_kernel(floatX* dqkv, float* partial, const floatX* saved, const float* rstd,
                        const floatX* __restrict__ q_weight, const floatX* __restrict__ k_weight, size_t N, size_t H,
                        size_t K, size_t D) {
    constexpr int ROUNDS = qk_norm_rounds(W);
    __shared__ float sums[QK_NORM_WARPS][ATTENTION_MAX_D];
    size_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, heads = H + K;
    Lanes<W> dweight[2][ROUNDS];  // of queries, of keys
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) dweight[0][k] = dweight[1][k] = {};

    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        #pragma unroll
        for (int keys = 0; keys < 2; keys++) {
            const floatX* weight = keys ? k_weight : q_weight;
            for (size_t head = (keys ? H : 0) + warp; head < (keys ? heads : H); head += QK_NORM_WARPS) {
                floatX* d = dqkv + (row * (heads + K) + head) * D;
                const floatX* x = saved + (row * heads + head) * D;
                Lanes<W> g[ROUNDS], n[ROUNDS];
                float s = rstd[row * heads + head], sum_gn = 0.0f;
                #pragma unroll
                for (int k = 0; k < ROUNDS; k++) {
                    size_t i = (k * WARP + lane) * W;
                    if (i >= D) continue;
                    Lanes<W> w = lanes_load<W>(weight + i);
                    g[k] = lanes_load<W>(d + i);
                    n[k] = lanes_load<W>(x + i);
                    #pragma unroll
                    for (int j = 0; j < W; j++) {
                        n[k].x[j] *= s;
                        dweight[keys][k].x[j] += g[k].x[j] * n[k].x[j];
                        g[k].x[j] *= w.x[j];
                        sum_gn += g[k].x[j] * n[k].x[j];
                    }
                }
                float average_gn = warp_sum(sum_gn) / (float)D;
                #pragma unroll
                for (int k = 0; k < ROUNDS; k++) {
                    size_t i = (k * WARP + lane) * W;
                    if (i >= D) continue;
                    #pragma unroll
                    for (int j = 0; j < W; j++) g[k].x[j] = s * (g[k].x[j] - n[k].x[j] * average_gn);
                    lanes_store(d + i, g[k]);
                }
            }
        }
    }

    #pragma unroll
    for (int keys = 0; keys < 2; keys++) {
        #pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            size_t i = (k * WARP + lane) * W;
            #pragma unroll
            for (int j = 0; j < W; j++)
                if (i + j < D) sums[warp][i + j] = dweight[keys][k].x[j];
        }
        __syncthreads();
        for (size_t i = threadIdx.x; i < D; i += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < QK_NORM_WARPS; w++) sum += sums[w][i];
            partial[((size_t)keys * gridDim.x + blockIdx.x) * D + i] = sum;
        }
        __syncthreads();
    }
}

static inline void qk_norm_forward(floatX* qkv, floatX* saved, float* rstd, const floatX* q_weight,
                                   const floatX* k_weight, float epsilon, size_t N, size_t H, size_t K, size_t D,
                                   Stream stream) {
    auto kernel = packs_fit(D, qkv, saved, q_weight, k_weight) ? qk_norm_forward_kernel<PACK>
                                                               : qk_norm_forward_kernel<1>;
    kernel<<<grid_blocks(divide_up(N * (H + K), QK_NORM_WARPS)), QK_NORM_WARPS * WARP, 0, stream->compute>>>(
        qkv, saved, rstd, q_weight, k_weight, epsilon, N, H, K, D);
    LAUNCH_CHECK();
}

static inline size_t qk_norm_backward_blocks(size_t N) {
    return min_size(divide_up(N, QK_NORM_BLOCK_ROWS), QK_NORM_BLOCKS);
}

static inline size_t qk_norm_backward_scratch_bytes(size_t N) {
    return 2 * qk_norm_backward_blocks(N) * ATTENTION_MAX_D * sizeof(float);
}

static inline void qk_norm_backward(floatX* dqkv, float* dq_weight, float* dk_weight, const floatX* saved,
                                    const float* rstd, const floatX* q_weight, const floatX* k_weight, size_t N,
                                    size_t H, size_t K, size_t D, Stream stream) {
    size_t blocks = qk_norm_backward_blocks(N);
    float* partial = (float*)device_scratch(stream, qk_norm_backward_scratch_bytes(N));
    auto kernel = packs_fit(D, dqkv, saved, q_weight, k_weight) ? qk_norm_backward_kernel<PACK>
                                                                : qk_norm_backward_kernel<1>;
    kernel<<<(unsigned)blocks, QK_NORM_WARPS * WARP, 0, stream->compute>>>(
        dqkv, partial, saved, rstd, q_weight, k_weight, N, H, K, D);
    LAUNCH_CHECK();
    add_partial<float><<<dim3((unsigned)divide_up(D, WARP), 2), dim3(WARP, WARP), 0, stream->compute>>>(
        dq_weight, dk_weight, partial, blocks, D);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_QK_NORM_CUH
