// blocks.cuh: how rows and elements are divided among the blocks and threads of a GPU, and sums over them.

#ifndef LLMTRAIN_BLOCKS_CUH
#define LLMTRAIN_BLOCKS_CUH

#include "types.h"

// ------------------------------------------------------------------------------------------------
// 1. Grids
//
// Kernels on rows give each block a row, or several if there are more rows than a grid may have blocks.
// Kernels on flat arrays give each thread W neighboring elements; their grid is one-dimensional and as large as
// needed, since 2^31 blocks of 256 threads are more elements than any memory holds.

enum { FLAT_THREADS = 256, FOUR = 4 };

// Blocks of a grid for `wanted` blocks; never 0, which a launch refuses.
static inline unsigned grid_blocks(size_t wanted) { return (unsigned)max_size(1, min_size(wanted, 0x7fffffff)); }

// Threads for `wanted` pieces of work: whole warps, at most `most`.
static inline unsigned block_threads(size_t wanted, size_t most) {
    return (unsigned)max_size(WARP, min_size(round_up(wanted, WARP), most));
}

// Blocks for n elements, W to a thread.
static inline unsigned flat_blocks(size_t n, size_t W) { return grid_blocks(divide_up(divide_up(n, W), FLAT_THREADS)); }

static __device__ inline size_t flat_index(size_t W) { return ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; }

// ------------------------------------------------------------------------------------------------
// 2. Sums
//
// In a fixed order: the same bits in every run. Sums and maxima, by a function that combines two numbers.

template <typename T, typename Combine>
static __device__ inline T warp_combine(T x, Combine combine) {
    #pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Over the block, returned to every thread of it. blockDim.x is a multiple of 32, up to 1024; shared (32) may be reused
// at once; least: what changes no number that it is combined with.
template <typename Combine>
static __device__ inline float block_combine(float x, float least, float* shared, Combine combine) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    x = warp_combine(x, combine);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_combine(lane < warps ? shared[lane] : least, combine);
    __syncthreads();
    return x;
}

struct Add { template <typename T> __device__ T operator()(T a, T b) const { return a + b; } };
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};
template <typename T>
static __device__ inline T warp_sum(T x) { return warp_combine(x, Add()); }
template <typename T>
static __device__ inline T warp_max(T x) { return warp_combine(x, Max()); }
static __device__ inline float block_sum(float x, float* shared) { return block_combine(x, 0.0f, shared, Add()); }
static __device__ inline float block_max(float x, float* shared) { return block_combine(x, -INFINITY, shared, Max()); }

// The sum over a block that may be a single warp.
static __device__ inline float row_sum(float x, float* shared) {
    return blockDim.x == WARP ? warp_sum(x) : block_sum(x, shared);
}

// Two sums over a row. shared (2, 32): `turn` counts the calls, so that one barrier is enough for each.
static __device__ inline float2 row_sums(float2 x, float2 (*shared)[WARP], unsigned turn) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    float2 sum = make_float2(warp_sum(x.x), warp_sum(x.y));
    if (warps == 1) return sum;
    if (lane == 0) shared[turn % 2][threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = lane < warps ? shared[turn % 2][lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(sum.x), warp_sum(sum.y));
}

template <int W>
static __device__ inline Lanes<W> lanes_add(Lanes<W> a, Lanes<W> b) {
    #pragma unroll
    for (int i = 0; i < W; i++) a.x[i] += b.x[i];
    return a;
}

// first (C) += the sum of the rows of partial (0, rows, C), and second that of (1, rows, C), by blockIdx.y: the partial
// sums of a gradient that blocks have stored. Block (WARP, WARP): x is the column, y takes every 32nd row; then the
// sums of all y are added in order.
template <typename T>
static __global__ void add_partial(T* first, T* second, const T* partial, size_t rows, size_t C) {
    __shared__ T sums[WARP][WARP];
    size_t c = (size_t)blockIdx.x * WARP + threadIdx.x;
    T sum = 0;
    if (c < C) {
        #pragma unroll 4
        for (size_t row = threadIdx.y; row < rows; row += WARP) sum += partial[(blockIdx.y * rows + row) * C + c];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    for (int y = 1; y < WARP; y++) sum += sums[y][threadIdx.x];
    T* gradient = blockIdx.y == 0 ? first : second;
    gradient[c] += sum;
}

// ------------------------------------------------------------------------------------------------
// 3. Types

// To float, and from it.
HOST_DEVICE static inline float float_widen(float x) { return x; }
#if !FLOATX_IS_FLOAT
HOST_DEVICE static inline float float_widen(floatX x) { return float_of(x); }
#endif
template <typename T>
static __device__ inline T float_narrow(float x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    else return floatX_of(x);
}

// W elements kept for later in their storage format: a Group of 16-bit elements would take a register for each.
template <int W> struct Held { Group<floatX, W> bits; };
template <> struct Held<PACK> { uint4 bits; };

template <int W>
static __device__ inline Held<W> held_load(const floatX* p) { return {*(const decltype(Held<W>::bits)*)p}; }

template <int W>
static __device__ inline Lanes<W> held_lanes(const Held<W>& held) {
    floatX elements[W];
    Lanes<W> lanes;
    memcpy(elements, &held, sizeof elements);
    #pragma unroll
    for (int i = 0; i < W; i++) lanes.x[i] = float_of(elements[i]);
    return lanes;
}

#endif  // LLMTRAIN_BLOCKS_CUH
