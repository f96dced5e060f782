// leaves.cuh: operations of ranks that share a layer, in CUDA: the functions of leaves.h, where leaves are explained.
//
//   1. sums         columns_copy, leaves_sum
//   2. embedding    embedding_part_forward, embedding_join
//   3. softmax      of a row of logits, or a part of one, by a block: for `classifier` too
//   4. classifier   classifier_leaves, classifier_gradient

#ifndef LLMTRAIN_LEAVES_CUH
#define LLMTRAIN_LEAVES_CUH

#include "blocks.cuh"
#include "leaves.h"

enum { LEAVES_THREADS = 256 };

// ------------------------------------------------------------------------------------------------
// 1. Sums

// Thread x owns W columns of the rows y. Reads and writes each element once. Bound by memory.
template <int W>
static __global__ void __launch_bounds__(LEAVES_THREADS)
columns_copy_kernel(floatX* __restrict__ out, size_t out_stride, const floatX* __restrict__ in, size_t in_stride,
                    size_t M, size_t columns) {
    for (size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y; row < M; row += (size_t)gridDim.x * blockDim.y)
        for (size_t c = (size_t)threadIdx.x * W; c < columns; c += (size_t)blockDim.x * W)
            group_store<W>(out + row * out_stride + c, group_load<W>(in + row * in_stride + c));
}

static inline void columns_copy(floatX* out, size_t out_stride, const floatX* in, size_t in_stride, size_t M,
                                size_t columns, Stream stream) {
    bool packs = packs_fit(columns, out, in, NULL, NULL) && out_stride % PACK == 0 && in_stride % PACK == 0;
    size_t across = max_size(1, min_size(divide_up(columns, packs ? PACK : 1), LEAVES_THREADS));
    size_t down = LEAVES_THREADS / across;
    auto kernel = packs ? columns_copy_kernel<PACK> : columns_copy_kernel<1>;
    kernel<<<grid_blocks(divide_up(M, down)), dim3((unsigned)across, (unsigned)down), 0, stream->compute>>>(
        out, out_stride, in, in_stride, M, columns);
    LAUNCH_CHECK();
}

// The tree over COUNT parts, which are `stride` elements apart, without a loop: a thread loads many of them at once.
template <int W, int COUNT>
static __device__ inline Lanes<W> leaves_tree(const float* parts, size_t stride) {
    if constexpr (COUNT == 1) return group_load<W>(parts);
    else return lanes_add(leaves_tree<W, COUNT / 2>(parts, stride),
                          leaves_tree<W, COUNT / 2>(parts + COUNT / 2 * stride, stride));
}

// A block owns a row, a thread W columns of it. Reads 4 COUNT bytes for each element that it writes. Bound by memory.
template <int W, int COUNT>
static __global__ void __launch_bounds__(LEAVES_THREADS)
leaves_sum_kernel(floatX* __restrict__ out, const float* __restrict__ parts, const floatX* __restrict__ bias, size_t M,
                  size_t C) {
    for (size_t row = blockIdx.x; row < M; row += gridDim.x) {
        for (size_t c = (size_t)threadIdx.x * W; c < C; c += (size_t)blockDim.x * W) {
            Lanes<W> sum = leaves_tree<W, COUNT>(parts + row * C + c, M * C);
            if (bias) sum = lanes_add(sum, lanes_load<W>(bias + c));
            lanes_store<W>(out + row * C + c, sum);
        }
    }
}

// COUNT: 1, 2, 4 and so on, until it is `count`.
template <int COUNT>
static inline void leaves_sum_launch(floatX* out, const float* parts, const floatX* bias, size_t count, size_t M,
                                     size_t C, Stream stream) {
    if constexpr (COUNT < LEAVES_MAX)
        if (count > COUNT) return leaves_sum_launch<2 * COUNT>(out, parts, bias, count, M, C, stream);
    bool packs = packs_fit(C, out, parts, bias, NULL);
    auto kernel = packs ? leaves_sum_kernel<PACK, COUNT> : leaves_sum_kernel<1, COUNT>;
    unsigned threads = block_threads(divide_up(C, packs ? PACK : 1), LEAVES_THREADS);
    kernel<<<grid_blocks(M), threads, 0, stream->compute>>>(out, parts, bias, M, C);
    LAUNCH_CHECK();
}

static inline void leaves_sum(floatX* out, const float* parts, const floatX* bias, size_t count, size_t M, size_t C,
                              Stream stream) {
    leaves_sum_launch<1>(out, parts, bias, count, M, C, stream);
}

// ------------------------------------------------------------------------------------------------
// 2. Embedding
//
// A block owns a row, a thread W channels of it. Both kernels read and write each element once. Bound by memory.

template <int W>
static __global__ void embedding_part_kernel(floatX* out, const int32_t* tokens, const floatX* token_weight,
                                             size_t first, size_t rows, size_t N, size_t C) {
    for (size_t n = blockIdx.x; n < N; n += gridDim.x) {
        size_t row = (size_t)tokens[n] - first;  // tokens before `first` wrap around, to large numbers
        for (size_t c = (size_t)threadIdx.x * W; c < C; c += (size_t)blockDim.x * W) {
            Group<floatX, W> x = {};
            if (row < rows) x = group_load<W>(token_weight + row * C + c);
            group_store<W>(out + n * C + c, x);
        }
    }
}

template <int W>
static __global__ void embedding_join_kernel(floatX* out, const floatX* parts, const int32_t* tokens,
                                             const int32_t* positions, const floatX* position_weight, size_t rows,
                                             size_t N, size_t C) {
    for (size_t n = blockIdx.x; n < N; n += gridDim.x) {
        const floatX* token = parts + ((size_t)tokens[n] / rows * N + n) * C;
        const floatX* position = position_weight ? position_weight + (size_t)positions[n] * C : NULL;
        for (size_t c = (size_t)threadIdx.x * W; c < C; c += (size_t)blockDim.x * W) {
            Lanes<W> x = lanes_load<W>(token + c);
            if (position) x = lanes_add(x, lanes_load<W>(position + c));
            lanes_store(out + n * C + c, x);
        }
    }
}

static inline void embedding_part_forward(floatX* out, const int32_t* tokens, const floatX* token_weight, size_t first,
                                          size_t rows, size_t N, size_t C, Stream stream) {
    bool packs = packs_fit(C, out, token_weight, NULL, NULL);
    auto kernel = packs ? embedding_part_kernel<PACK> : embedding_part_kernel<1>;
    unsigned threads = block_threads(divide_up(C, packs ? PACK : 1), LEAVES_THREADS);
    kernel<<<grid_blocks(N), threads, 0, stream->compute>>>(out, tokens, token_weight, first, rows, N, C);
    LAUNCH_CHECK();
}

static inline void embedding_join(floatX* out, const floatX* parts, const int32_t* tokens, const int32_t* positions,
                                  const floatX* position_weight, size_t rows, size_t N, size_t C, Stream stream) {
    bool packs = packs_fit(C, out, parts, position_weight, NULL);
    auto kernel = packs ? embedding_join_kernel<PACK> : embedding_join_kernel<1>;
    unsigned threads = block_threads(divide_up(C, packs ? PACK : 1), LEAVES_THREADS);
    kernel<<<grid_blocks(N), threads, 0, stream->compute>>>(
        out, parts, tokens, positions, position_weight, rows, N, C);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. Softmax
//
// A block reads a row once for maximum and sum together, by "Online normalizer calculation for softmax": a thread whose
// maximum rises scales its sum down to the new one.
//
// exp(x - maximum) is exp2f(LOG2E x - offset), a multiply-add and 2 units in the last place; offset = LOG2E maximum,
// rounded, is the same in all terms and cancels in the probabilities; the loss corrects its rounding. So errors grow
// only with the distance below the maximum, 3 ln2 2^-24 LOG2E of it. Logits must be between -2^127 and 2^127.

enum { SOFTMAX_THREADS = 1024 };
#define SOFTMAX_LOG2E 1.4426950408889634f

struct Softmax {
    float maximum, sum;
};

// Never contracted with a subtraction after it, which would be one more way to round.
static __device__ inline float softmax_offset(float maximum) { return __fmul_rn(maximum, SOFTMAX_LOG2E); }

// Replaces by `value` those of the W columns from v on that are padding, which may hold anything.
template <int W>
static __device__ inline void padding_set(Lanes<W>* x, int v, int V, float value) {
    if (v + W <= V) return;
    #pragma unroll
    for (int j = 0; j < W; j++) x->x[j] = v + j < V ? x->x[j] : value;
}

// Of x (columns), whose padding begins at V, for every thread of the block. Sums are in an order that depends on W,
// `columns` and the number of threads; ALIGNED only says how elements are loaded.
template <int W, bool ALIGNED>
static __device__ inline Softmax softmax_of(const floatX* x, int V, int columns, float* shared) {
    // A maximum begins at a finite number, not at -infinity: no difference is infinity minus infinity.
    float maximum = LEAF_NO_MAXIMUM, offset = softmax_offset(maximum), sum = 0.0f;
    for (int v = (int)threadIdx.x * W; v < columns; v += (int)blockDim.x * W) {
        Lanes<W> logit;
        float old = offset;
        if constexpr (ALIGNED) {
            logit = lanes_load<W>(x + v);
        } else {
            #pragma unroll
            for (int j = 0; j < W; j++) logit.x[j] = float_of(x[v + j]);
        }
        padding_set(&logit, v, V, -INFINITY);
        #pragma unroll
        for (int j = 0; j < W; j++) maximum = fmaxf(maximum, logit.x[j]);
        offset = softmax_offset(maximum);
        sum *= exp2f(old - offset);
        #pragma unroll
        for (int j = 0; j < W; j++) sum += exp2f(fmaf(logit.x[j], SOFTMAX_LOG2E, -offset));
    }
    float row_maximum = block_max(maximum, shared);
    return {row_maximum, block_sum(sum * exp2f(offset - softmax_offset(row_maximum)), shared)};
}

static __device__ inline float softmax_loss(Softmax s, float target_logit) {
    float rounding = fmaf(s.maximum, SOFTMAX_LOG2E, -softmax_offset(s.maximum)) / SOFTMAX_LOG2E;
    return logf(s.sum) - rounding + (s.maximum - target_logit);
}

// Replaces x (columns) by gradient * (softmax - onehot(target)), and padding, from V on, by zeros. The target is
// outside if it is in another part of the row. Goes from the end to the beginning, so that it starts with what the
// cache still holds of softmax_of's reading.
template <int W>
static __device__ inline void softmax_gradient(floatX* x, Softmax s, int target, float target_logit, float gradient,
                                               int V, int columns) {
    float offset = softmax_offset(s.maximum), scale = gradient / s.sum;
    float target_probability = exp2f(fmaf(target_logit, SOFTMAX_LOG2E, -offset)) / s.sum;
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    int last = first < columns ? first + (columns - 1 - first) / step * step : -1;
    for (int v = last; v >= 0; v -= step) {
        Lanes<W> logit = lanes_load<W>(x + v);
        #pragma unroll
        for (int j = 0; j < W; j++) logit.x[j] = exp2f(fmaf(logit.x[j], SOFTMAX_LOG2E, -offset)) * scale;
        padding_set(&logit, v, V, 0.0f);
        lanes_store(x + v, logit);
        if (v <= target && target < v + W) x[target] = floatX_of((target_probability - 1.0f) * gradient);
    }
}

// Zeros in x (columns).
template <int W>
static __device__ inline void softmax_zero(floatX* x, int columns) {
    Lanes<W> zero = {};
    for (int v = (int)threadIdx.x * W; v < columns; v += (int)blockDim.x * W) lanes_store(x + v, zero);
}

// ------------------------------------------------------------------------------------------------
// 4. Classifier

// A block owns a row of a leaf; its number of threads and W depend on the leaf's width alone. Moves 1 element per
// logit. Bound by memory.
template <int W, bool ALIGNED>
static __global__ void __launch_bounds__(SOFTMAX_THREADS) classifier_leaves_kernel(
        float* stats, const floatX* logits, const int32_t* targets, size_t first, size_t leaves, size_t N, size_t V,
        int width) {
    __shared__ float shared[WARP];
    for (size_t i = blockIdx.x; i < N * leaves; i += gridDim.x) {
        size_t begin = first + i % leaves * (size_t)width, n = begin < V ? min(V - begin, (size_t)width) : 0;
        float* s = stats + i * LEAF_STATS;
        int32_t target = targets[i / leaves];
        if (target < 0) {
            if (threadIdx.x < LEAF_STATS) s[threadIdx.x] = 0.0f;
            continue;
        }
        const floatX* x = logits + i * (size_t)width;
        Softmax leaf = softmax_of<W, ALIGNED>(x, (int)n, width, shared);
        if (threadIdx.x > 0) continue;
        size_t at = (size_t)target - begin;  // if the target is in a leaf before, a large number
        s[LEAF_MAXIMUM] = leaf.maximum;
        s[LEAF_SUM] = leaf.sum;
        s[LEAF_TARGET] = at < n ? float_of(x[at]) : 0.0f;
    }
}

// A block owns a row. Each of its warps joins the row's statistics, lane i those of the leaves i, i + 32, ...: few,
// and in the cache. Moves 2 elements per logit, none if only the loss is wanted. Bound by memory.
template <int W>
static __global__ void __launch_bounds__(SOFTMAX_THREADS) classifier_gradient_kernel(
        floatX* logits, float* losses, const float* stats, const int32_t* targets, float dloss, const float* weights,
        int first, unsigned parts, unsigned leaves, size_t N, int V, int columns) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        floatX* x = logits + row * (size_t)columns;
        int target = targets[row];
        if (target < 0) {
            if (threadIdx.x == 0) losses[row] = 0.0f;
            if (dloss != 0.0f) softmax_zero<W>(x, columns);
            continue;
        }
        Softmax all = {LEAF_NO_MAXIMUM, 0.0f};
        float target_logit = 0.0f;
        for (unsigned i = threadIdx.x % WARP; i < parts * leaves; i += WARP) {
            const float* s = stats + ((i / leaves * N + row) * leaves + i % leaves) * LEAF_STATS;
            all.maximum = fmaxf(all.maximum, s[LEAF_MAXIMUM]);
            target_logit += s[LEAF_TARGET];  // zeros, but for one leaf
        }
        all.maximum = warp_max(all.maximum);
        target_logit = warp_sum(target_logit);
        for (unsigned i = threadIdx.x % WARP; i < parts * leaves; i += WARP) {
            const float* s = stats + ((i / leaves * N + row) * leaves + i % leaves) * LEAF_STATS;
            float smaller = exp2f(softmax_offset(s[LEAF_MAXIMUM]) - softmax_offset(all.maximum));
            all.sum = fmaf(s[LEAF_SUM], smaller, all.sum);
        }
        all.sum = warp_sum(all.sum);
        if (threadIdx.x == 0) losses[row] = softmax_loss(all, target_logit);
        if (dloss == 0.0f) continue;
        float gradient = weights ? dloss * weights[row] : dloss;
        softmax_gradient<W>(x, all, target - first, target_logit, gradient, V, columns);
    }
}

static inline void classifier_leaves(float* stats, const floatX* logits, const int32_t* targets, size_t first,
                                     size_t leaves, size_t N, size_t V, size_t columns, Stream stream) {
    size_t width = columns / leaves;
    bool packs = width % PACK == 0;
    auto kernel = !packs ? classifier_leaves_kernel<1, true>
                : packs_fit(0, logits, NULL, NULL, NULL) ? classifier_leaves_kernel<PACK, true>
                : classifier_leaves_kernel<PACK, false>;
    unsigned threads = block_threads(divide_up(width, packs ? PACK : 1), SOFTMAX_THREADS);
    kernel<<<grid_blocks(N * leaves), threads, 0, stream->compute>>>(
        stats, logits, targets, first, leaves, N, V, (int)width);
    LAUNCH_CHECK();
}

static inline void classifier_gradient(floatX* logits, float* losses, const float* stats, const int32_t* targets,
                                       float dloss, const float* weights, size_t first, size_t parts, size_t leaves,
                                       size_t N, size_t V, size_t columns, Stream stream) {
    bool packs = packs_fit(columns, logits, NULL, NULL, NULL);
    auto kernel = packs ? classifier_gradient_kernel<PACK> : classifier_gradient_kernel<1>;
    unsigned threads = block_threads(divide_up(columns, packs ? PACK : 1), SOFTMAX_THREADS);
    size_t end = first < V ? min_size(columns, V - first) : 0;  // padding begins there
    kernel<<<grid_blocks(N), threads, 0, stream->compute>>>(
        logits, losses, stats, targets, dloss, weights, (int)first, (unsigned)parts, (unsigned)leaves, N, (int)end,
        (int)columns);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_LEAVES_CUH
