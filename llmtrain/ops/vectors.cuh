// vectors.cuh: operations on whole vectors of parameters and gradients in CUDA: kernels, and launchers of the same
// names and signatures as in vectors.h.

#ifndef LLMTRAIN_VECTORS_CUH
#define LLMTRAIN_VECTORS_CUH

#include "base.h"
#include "blocks.cuh"
#include "exact_sum.h"

// ------------------------------------------------------------------------------------------------
// 1. Sums
//
// Defines: exact_sum, exact_sum_squares, sum_of_squares, vector_checksum.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh, llmtrain/ops/exact_sum.h, llmtrain/ops/base.h.
//
// exact_sum and exact_sum_squares: a thread cuts terms into the limbs of an ExactSum of its own, a block adds those of
// its threads, and adds them to the result by atomic additions of integers: their order changes nothing.

enum { SUM_THREADS = 256, SUM_BLOCKS = 4096 };

static inline size_t sum_of_squares_scratch_bytes(void) { return SUM_BLOCKS * sizeof(double); }

// block_sum of blocks.cuh for 64-bit types; only thread 0 gets the result. shared (32).
template <typename T>
static __device__ inline T block_sum_wide(T x, T* shared) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    x = warp_sum(x);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = 0;
    for (unsigned warp = 0; threadIdx.x == 0 && warp < warps; warp++) total += shared[warp];
    return total;
}

static __device__ inline void exact_window_add(ExactWindow* w, double x) {
    uint64_t* limbs = w->limbs;
    exact_add_term(&limbs[0], &limbs[1], &limbs[2], &limbs[3], &limbs[4], &w->outside, x);
}

// *out += the sum of `own` over the block. shared (32).
static __device__ inline void exact_window_sum(ExactWindow* out, ExactWindow own, uint64_t* shared) {
    exact_carry(&own);
    bool outside = __syncthreads_or(own.outside >> EXACT_LAST_BITS != 0);
    #pragma unroll
    for (int i = 0; i < EXACT_LIMBS; i++) {
        own.limbs[i] = block_sum_wide(own.limbs[i], shared);
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    exact_carry(&own);
    #pragma unroll
    for (int i = 0; i < EXACT_LIMBS; i++)
        atomicAdd((unsigned long long*)&out->limbs[i], (unsigned long long)own.limbs[i]);
    if (outside || own.outside >> EXACT_LAST_BITS != 0) atomicOr((unsigned long long*)&out->outside, 1ull << 63);
}

// *out += the sum of x (n), where a term is one element; or of its squares, where a term is that of 8 elements, loaded
// in groups of W. Moves 4 bytes per element. A square takes about four instructions on doubles: with two units for
// doubles per multiprocessor, as most desktop GPUs have, that should take longer than memory does (not measured yet).
template <int W, bool SQUARES>
static __global__ void exact_sum_kernel(ExactSum* out, const float* x, size_t n) {
    __shared__ uint64_t shared[WARP];
    size_t thread = flat_index(1), threads = (size_t)gridDim.x * blockDim.x, per_term = SQUARES ? 8 : 1;
    ExactWindow windows[EXACT_WINDOWS] = {};
    bool huge = false;
    for (size_t i = thread * per_term; i < n; i += threads * per_term) {
        double term = 0.0;
        if constexpr (SQUARES) {
            float eight[8];
            #pragma unroll
            for (int j = 0; j < 8; j += W) {
                Group<float, W> group = {};
                if (i + (size_t)j < n) group = group_load<W>(x + i + j);
                #pragma unroll
                for (int k = 0; k < W; k++) eight[j + k] = group.x[k];
            }
            term = exact_eight_squares(eight);
        } else {
            term = (double)x[i];
        }
        exact_window_add(&windows[0], exact_term(term, 0));
        if (!(fabs(term) < EXACT_HUGE)) {
            exact_window_add(&windows[1], exact_term(term, 1));
            huge = true;
        }
    }
    exact_window_sum(&out->windows[0], windows[0], shared);
    if (__syncthreads_or(huge)) exact_window_sum(&out->windows[1], windows[1], shared);
}

static __global__ void exact_carry_kernel(ExactSum* sum) {
    exact_carry(&sum->windows[0]);
    exact_carry(&sum->windows[1]);
}

static inline void exact_sum_launch(void (*kernel)(ExactSum*, const float*, size_t), ExactSum* out, const float* x,
                                    size_t n, size_t per_term, Stream stream) {
    size_t blocks = divide_up(divide_up(n, per_term), SUM_THREADS);
    kernel<<<(unsigned)max_size(1, min_size(SUM_BLOCKS, blocks)), SUM_THREADS, 0, stream->compute>>>(out, x, n);
    LAUNCH_CHECK();
    exact_carry_kernel<<<1, 1, 0, stream->compute>>>(out);  // so that there may be any number of calls
    LAUNCH_CHECK();
}

static inline void exact_sum(ExactSum* out, const float* x, size_t n, Stream stream) {
    exact_sum_launch(exact_sum_kernel<1, false>, out, x, n, 1, stream);
}

static inline void exact_sum_squares(ExactSum* out, const float* x, size_t n, Stream stream) {
    bool fours = (uintptr_t)x % (FOUR * sizeof(float)) == 0 && n % FOUR == 0;
    exact_sum_launch(fours ? exact_sum_kernel<FOUR, true> : exact_sum_kernel<1, true>, out, x, n, 8, stream);
}

// pieces (gridDim.x): sums of squares of x (n), in double. Threads take the groups of W floats in turn; the last n % W
// floats go to the first threads. Moves 4 bytes per element. Which elements a thread adds, and in which order, depends
// on the length and not on the GPU.
template <int W>
static __global__ void sum_pieces_kernel(double* pieces, const float* x, size_t n) {
    __shared__ double shared[WARP];
    size_t thread = flat_index(1), threads = (size_t)gridDim.x * blockDim.x, tail = n / W * W + thread;
    double sum = 0.0;
    #pragma unroll 4
    for (size_t i = thread; i < n / W; i += threads) {
        Group<float, W> group = group_load<W>(x + i * W);
        #pragma unroll
        for (int j = 0; j < W; j++) sum += (double)group.x[j] * (double)group.x[j];
    }
    if (tail < n) sum += (double)x[tail] * (double)x[tail];
    sum = block_sum_wide(sum, shared);
    if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

// out (1) = the sum of pieces (count).
static __global__ void sum_finish_kernel(double* out, const double* pieces, unsigned count) {
    __shared__ double shared[WARP];
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) sum += pieces[i];
    sum = block_sum_wide(sum, shared);
    if (threadIdx.x == 0) *out = sum;
}

static inline void sum_of_squares(double* out, const float* x, size_t n, Stream stream) {
    double* pieces = (double*)device_scratch(stream, sum_of_squares_scratch_bytes());
    size_t threads = divide_up(n, FOUR);
    unsigned blocks = (unsigned)max_size(1, min_size(SUM_BLOCKS, divide_up(threads, SUM_THREADS)));
    bool fours = (uintptr_t)x % (FOUR * sizeof(float)) == 0;
    auto kernel = fours ? sum_pieces_kernel<FOUR> : sum_pieces_kernel<1>;
    kernel<<<blocks, SUM_THREADS, 0, stream->compute>>>(pieces, x, n);
    LAUNCH_CHECK();
    sum_finish_kernel<<<1, SUM_THREADS, 0, stream->compute>>>(out, pieces, blocks);
    LAUNCH_CHECK();
}

// out (1) += the checksum of x (n). Threads take elements as in sum_pieces_kernel; the sum is of integers, which
// blocks may add in any order. Reads sizeof(floatX) bytes per element, but in 16 bits is bound by arithmetic: two
// 64-bit multiplications and their shifts are some 25 instructions, and memory leaves time for about 9.
template <int W>
static __global__ void checksum_kernel(unsigned long long* out, const floatX* x, size_t first, size_t n) {
    __shared__ uint64_t shared[WARP];
    size_t thread = flat_index(1), threads = (size_t)gridDim.x * blockDim.x, tail = n / W * W + thread;
    uint64_t sum = 0;
    for (size_t i = thread; i < n / W; i += threads) {
        Group<floatX, W> group = group_load<W>(x + i * W);
        #pragma unroll
        for (int j = 0; j < W; j++) sum += checksum_element(group.x[j], first + i * W + (size_t)j);
    }
    if (tail < n) sum += checksum_element(x[tail], first + tail);
    sum = block_sum_wide(sum, shared);
    if (threadIdx.x == 0) atomicAdd(out, (unsigned long long)sum);
}

static inline void vector_checksum(uint64_t* out, const floatX* x, size_t first, size_t n, Stream stream) {
    bool packs = (uintptr_t)x % (PACK * sizeof(floatX)) == 0;
    unsigned blocks = (unsigned)max_size(1, min_size(SUM_BLOCKS, divide_up(divide_up(n, PACK), SUM_THREADS)));
    auto kernel = packs ? checksum_kernel<PACK> : checksum_kernel<1>;
    CUDA_CHECK(cudaMemsetAsync(out, 0, sizeof *out, stream->compute));
    kernel<<<blocks, SUM_THREADS, 0, stream->compute>>>((unsigned long long*)out, x, first, n);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 2. Fixed point
//
// Defines: exact_add, exact_merge, exact_read.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.
//
// A thread owns W elements of every vector, W = PAIR or 1: two integers of 64 bits are 16 bytes. Integers add up to the
// same bits in any order, and every operation here rounds each element as the CPU does: both backends give the same
// bits.

enum { PAIR = 2 };

// The largest float that is not above x.
static inline float float_not_above(double x) {
    float nearest = (float)x;
    return (double)nearest <= x ? nearest : nextafterf(nearest, -INFINITY);
}

// Moves 20 bytes per element: x in, sums in and out. The multiplication is in double, since scale may be any number.
// Most desktop GPUs have only two units for doubles per multiprocessor. By their data sheets the three instructions per
// element (widen, multiply, round) take a fifth to a half of the time that memory takes. Comparing in float saves one
// more: for a float, |x| <= limit means the same as <= the largest float that is not above the limit.
template <int W>
static __global__ void exact_add_kernel(int64_t* sums, double* bad, const float* x, double scale, float limit,
                                        size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<int64_t, W> sum = group_load<W>(sums + i);
    Group<float, W> value = group_load<W>(x + i);
    bool outside = false;
    #pragma unroll
    for (int j = 0; j < W; j++) {
        bool inside = fabsf(value.x[j]) <= limit;  // not so for NaN
        sum.x[j] += __double2ll_rn((double)(inside ? value.x[j] : 0.0f) * scale);
        outside = outside || !inside;
    }
    group_store<W>(sums + i, sum);
    // Several threads may find an element outside the limit; all store the same value.
    if (outside) atomicExch((unsigned long long*)bad, (unsigned long long)__double_as_longlong(1.0));
}

// 24 bytes per element.
template <int W>
static __global__ void exact_merge_kernel(int64_t* sums, const int64_t* x, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<int64_t, W> sum = group_load<W>(sums + i), value = group_load<W>(x + i);
    #pragma unroll
    for (int j = 0; j < W; j++) sum.x[j] += value.x[j];
    group_store<W>(sums + i, sum);
}

// 12 bytes per element, and again three instructions on doubles: with two such units up to nine tenths of the time that
// memory takes.
template <int W>
static __global__ void exact_read_kernel(float* out, const int64_t* sums, double quantum, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<int64_t, W> sum = group_load<W>(sums + i);
    Group<float, W> value;
    #pragma unroll
    for (int j = 0; j < W; j++) value.x[j] = (float)((double)sum.x[j] * quantum);
    group_store<W>(out + i, value);
}

static inline void exact_add(int64_t* sums, double* bad, const float* x, double scale, double limit, size_t n,
                             Stream stream) {
    bool pairs = packs_fit(n, sums, x, NULL, NULL);
    auto kernel = pairs ? exact_add_kernel<PAIR> : exact_add_kernel<1>;
    kernel<<<flat_blocks(n, pairs ? PAIR : 1), FLAT_THREADS, 0, stream->compute>>>(
        sums, bad, x, scale, float_not_above(limit), n);
    LAUNCH_CHECK();
}

static inline void exact_merge(int64_t* sums, const int64_t* x, size_t n, Stream stream) {
    bool pairs = packs_fit(n, sums, x, NULL, NULL);
    auto kernel = pairs ? exact_merge_kernel<PAIR> : exact_merge_kernel<1>;
    kernel<<<flat_blocks(n, pairs ? PAIR : 1), FLAT_THREADS, 0, stream->compute>>>(sums, x, n);
    LAUNCH_CHECK();
}

static inline void exact_read(float* out, const int64_t* sums, double quantum, size_t n, Stream stream) {
    bool pairs = packs_fit(n, out, sums, NULL, NULL);
    auto kernel = pairs ? exact_read_kernel<PAIR> : exact_read_kernel<1>;
    kernel<<<flat_blocks(n, pairs ? PAIR : 1), FLAT_THREADS, 0, stream->compute>>>(out, sums, quantum, n);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. Casts, add
//
// Defines: cast_to_float, cast_from_float, vector_add, vector_add_stored, residual_forward.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.
//
// A thread owns W elements. Casts move 4 + sizeof(floatX) bytes per element, add moves 8 + sizeof(x).

template <int W>
static __global__ void cast_to_float_kernel(float* out, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i < n) group_store(out + i, lanes_load<W>(in + i));
}

template <int W>
static __global__ void cast_from_float_kernel(floatX* out, const float* in, size_t n) {
    size_t i = flat_index(W);
    if (i < n) lanes_store(out + i, group_load<W>(in + i));
}

// x: float, or floatX.
template <int W, typename T>
static __global__ void add_kernel(float* out, const T* x, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<float, W> sum = group_load<W>(out + i);
    Group<T, W> value = group_load<W>(x + i);
    #pragma unroll
    for (int j = 0; j < W; j++) sum.x[j] += float_widen(value.x[j]);
    group_store<W>(out + i, sum);
}

static inline void cast_to_float(float* out, const floatX* in, size_t n, Stream stream) {
    bool fours = packs_fit(n, out, in, NULL, NULL);
    auto kernel = fours ? cast_to_float_kernel<FOUR> : cast_to_float_kernel<1>;
    kernel<<<flat_blocks(n, fours ? FOUR : 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

static inline void cast_from_float(floatX* out, const float* in, size_t n, Stream stream) {
    bool fours = packs_fit(n, out, in, NULL, NULL);
    auto kernel = fours ? cast_from_float_kernel<FOUR> : cast_from_float_kernel<1>;
    kernel<<<flat_blocks(n, fours ? FOUR : 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

template <typename T>
static inline void add_launch(float* out, const T* x, size_t n, Stream stream) {
    bool fours = packs_fit(n, out, x, NULL, NULL);
    auto kernel = fours ? add_kernel<FOUR, T> : add_kernel<1, T>;
    kernel<<<flat_blocks(n, fours ? FOUR : 1), FLAT_THREADS, 0, stream->compute>>>(out, x, n);
    LAUNCH_CHECK();
}

static inline void vector_add(float* out, const float* x, size_t n, Stream stream) { add_launch(out, x, n, stream); }
static inline void vector_add_stored(float* out, const floatX* x, size_t n, Stream stream) {
    add_launch(out, x, n, stream);
}

// A thread owns W elements. Bytes: 3 x floatX per element.
template <int W>
static __global__ void residual_forward_kernel(floatX* out, const floatX* in, const floatX* branch, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> sum = lanes_load<W>(in + i), other = lanes_load<W>(branch + i);
    #pragma unroll
    for (int j = 0; j < W; j++) sum.x[j] += other.x[j];
    lanes_store<W>(out + i, sum);
}

static inline void residual_forward(floatX* out, const floatX* in, const floatX* branch, size_t n, Stream stream) {
    bool packs = packs_fit(n, out, in, branch, NULL);
    auto kernel = packs ? residual_forward_kernel<PACK> : residual_forward_kernel<1>;
    kernel<<<flat_blocks(n, packs ? PACK : 1), FLAT_THREADS, 0, stream->compute>>>(out, in, branch, n);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_VECTORS_CUH
