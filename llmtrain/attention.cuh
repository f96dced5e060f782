// attention.cuh: causal, grouped-query attention, forward and backward: attention_forward and attention_backward of
// kernels_cpu.h on a GPU.
//
// In another program, with this file and types.h (its section 4 has the layout of qkv), by nvcc -DPRECISION_BF16:
//
//   struct Device device = {};  device.compute = my_stream;
//   attention_forward(out, lse, qkv, B, T, H, K, D, &device);
//
//   1. layout        what both versions share
//   2. plain         float arithmetic on tiles in shared memory: FP32 storage, and head sizes that section 5 lacks
//   3. instructions  tensor cores and asynchronous copies, one instruction to a function
//   4. fragments     matmuls of tiles that lie in shared memory and in registers
//   5. tensor cores  16-bit storage, head sizes that are multiples of 8 up to 128
//   6. operations
//
// The method is that of "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning". A block
// owns some rows (queries in the forward and for dq; keys for dk and dv) and streams the others past them in tiles.
// Scores and probabilities live in registers and shared memory only, so memory is O(T): the forward keeps one number
// per row, lse, from which the backward makes the probabilities again.
//
// The backward visits the pairs of tiles twice, once by query tiles for dq and once by key tiles for dk and dv: 7
// matmuls instead of 5. The alternative, one visit that adds its parts of dq to memory, needs float atomics, whose
// order changes from run to run, or locks that put the blocks in order. Here each output has one writer, which adds in
// a fixed order: the same bits in every run.
//
// Work for one head: 4 T^2 D / 2 flops forward and 14 T^2 D / 2 backward against some T D elements from memory: the
// bound is arithmetic as soon as T passes a few hundred. Blocks with the longest rows are started first.
//
// Needs: llmtrain/types.h.

#ifndef LLMTRAIN_ATTENTION_CUH
#define LLMTRAIN_ATTENTION_CUH

#include "types.h"

// ------------------------------------------------------------------------------------------------
// 1. Layout

// More than 48 KB of shared memory must be asked for, once per kernel and device; asking again costs next to nothing.
static inline void attention_allow_shared(const void* kernel, size_t bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// delta (B, H, T) = the sum over D of dout (B, T, H, D) * out (B, T, H, D). Eight lanes take a row, W elements each at
// a time, four rows to a warp; bound by reading the two arrays once.
enum { DELTA_THREADS = 256, DELTA_LANES = 8, DELTA_ROWS = DELTA_THREADS / DELTA_LANES };

template <int W>
static __global__ void __launch_bounds__(DELTA_THREADS)
attention_delta(float* delta, const floatX* dout, const floatX* out, size_t rows, size_t T, size_t H, size_t D) {
    size_t row = (size_t)blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES, lane = threadIdx.x % DELTA_LANES;
    float sum = 0.0f;
    for (size_t d = lane * W; row < rows && d < D; d += DELTA_LANES * W) {
        Lanes<W> x = lanes_load<W>(dout + row * D + d), y = lanes_load<W>(out + row * D + d);
        #pragma unroll
        for (int i = 0; i < W; i++) sum += x.x[i] * y.x[i];
    }
    #pragma unroll
    for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (row < rows && lane == 0) delta[(row / (T * H) * H + row % H) * T + row / H % T] = sum;
}

static inline void attention_delta_launch(float* delta, const floatX* dout, const floatX* out, size_t B, size_t T,
                                          size_t H, size_t D, Stream stream) {
    size_t rows = B * T * H, blocks = divide_up(rows, DELTA_ROWS);
    if (packs_fit(D, dout, out, NULL, NULL))
        attention_delta<PACK><<<(unsigned)blocks, DELTA_THREADS, 0, stream->compute>>>(delta, dout, out, rows, T, H, D);
    else
        attention_delta<1><<<(unsigned)blocks, DELTA_THREADS, 0, stream->compute>>>(delta, dout, out, rows, T, H, D);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 2. Plain
//
// 16 x 16 threads. With R rows to a thread, a tile has 16 R rows, and head sizes go up to 256 / R: larger heads have
// smaller tiles, so that registers and shared memory (below 100 KB) are enough for all. Thread (y, x) owns rows
// y + 16 r of its block's tile, and of each product columns x + 16 c; so the 16 threads of a row are half a warp, and
// what they exchange needs no barrier of the block.

enum { PLAIN_SIDE = 16, PLAIN_THREADS = PLAIN_SIDE * PLAIN_SIDE, PLAIN_LARGEST = 4 };  // PLAIN_LARGEST: of R

// Tiles of rows of D: an odd number of floats apart, so that threads in a column read different banks.
static inline HOST_DEVICE size_t plain_pitch(size_t D) { return D | 1; }

// tile (16 R, D) = scale * source (available, D), rows `stride` apart; 0 outside of the source.
template <int R>
static __device__ void plain_load(float* tile, const floatX* source, size_t stride, size_t available, size_t D,
                                  float scale) {
    for (size_t i = threadIdx.x; i < PLAIN_SIDE * R * D; i += PLAIN_THREADS) {
        size_t row = i / D, d = i % D;
        tile[row * plain_pitch(D) + d] = row < available ? scale * float_of(source[row * stride + d]) : 0.0f;
    }
}

// sum (16 R, 16 R) = a (16 R, D) b (16 R, D)^T
template <int R>
static __device__ __forceinline__ void plain_rows_by_rows(float (&sum)[R][R], const float* a, const float* b,
                                                          size_t D) {
    a += threadIdx.x / PLAIN_SIDE * plain_pitch(D);
    b += threadIdx.x % PLAIN_SIDE * plain_pitch(D);
    #pragma unroll
    for (int i = 0; i < R * R; i++) sum[i / R][i % R] = 0.0f;
    for (size_t d = 0; d < D; d++) {
        float x[R], y[R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            x[r] = a[r * PLAIN_SIDE * plain_pitch(D) + d];
            y[r] = b[r * PLAIN_SIDE * plain_pitch(D) + d];
        }
        #pragma unroll
        for (int i = 0; i < R * R; i++) sum[i / R][i % R] += x[i / R] * y[i % R];
    }
}

// sum (16 R, D) += p (16 R, 16 R) b (16 R, D). p is handed from thread to thread through `weights` (16 R, 16 R + 1), in
// which a row is written and read by the same half warp.
template <int R>
static __device__ __forceinline__ void plain_rows_by_columns(float (&sum)[R][PLAIN_SIDE / R], const float (&p)[R][R],
                                                             const float* b, float* weights, size_t D) {
    const int TILE = PLAIN_SIDE * R, COLUMNS = PLAIN_SIDE / R;
    int y = threadIdx.x / PLAIN_SIDE, x = threadIdx.x % PLAIN_SIDE;
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < R * R; i++)
        weights[(y + i / R * PLAIN_SIDE) * (TILE + 1) + x + i % R * PLAIN_SIDE] = p[i / R][i % R];
    __syncwarp();
    for (int j = 0; j < TILE; j++) {
        float weight[R];
        #pragma unroll
        for (int r = 0; r < R; r++) weight[r] = weights[(y + r * PLAIN_SIDE) * (TILE + 1) + j];
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            size_t d = x + c * PLAIN_SIDE;
            float value = d < D ? b[j * plain_pitch(D) + d] : 0.0f;
            #pragma unroll
            for (int r = 0; r < R; r++) sum[r][c] += weight[r] * value;
        }
    }
}

// out (rows of the block that are below `available`, D) = scale * sum
template <int R>
static __device__ __forceinline__ void plain_store(floatX* out, size_t stride, size_t available, size_t D,
                                                   const float (&sum)[R][PLAIN_SIDE / R], float scale) {
    #pragma unroll
    for (int i = 0; i < PLAIN_SIDE; i++) {
        size_t row = threadIdx.x / PLAIN_SIDE + i % R * PLAIN_SIDE, d = threadIdx.x % PLAIN_SIDE + i / R * PLAIN_SIDE;
        if (row < available && d < D) out[row * stride + d] = floatX_of(scale * sum[i % R][i / R]);
    }
}

static __device__ inline float half_warp_max(float x) {
    #pragma unroll
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

static __device__ inline float half_warp_sum(float x) {
    #pragma unroll
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Block (b H + h, tile): 16 R queries of one head, the last ones in block row 0. Keys and values share a tile of
// memory.
template <int R>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2)
attention_forward_plain(floatX* out, float* lse, const floatX* qkv, size_t T, size_t H, size_t K, size_t D,
                        float scale) {
    extern __shared__ uint4 attention_shared[];
    const int TILE = PLAIN_SIDE * R, COLUMNS = PLAIN_SIDE / R;
    float *q = (float*)attention_shared, *kv = q + TILE * plain_pitch(D), *weights = kv + TILE * plain_pitch(D);
    size_t b = blockIdx.x / H, h = blockIdx.x % H, first = (size_t)(gridDim.y - 1 - blockIdx.y) * TILE;
    size_t y = threadIdx.x / PLAIN_SIDE, x = threadIdx.x % PLAIN_SIDE;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum[R][COLUMNS] = {}, maximum[R], total[R];
    #pragma unroll
    for (int r = 0; r < R; r++) maximum[r] = -INFINITY, total[r] = 0.0f;

    plain_load<R>(q, qkv + at.q + first * at.stride, at.stride, T - first, D, scale);
    for (size_t key = 0; key < first + TILE && key < T; key += TILE) {
        float score[R][R];
        __syncthreads();  // the values before have been used
        plain_load<R>(kv, qkv + at.k + key * at.stride, at.stride, T - key, D, 1.0f);
        __syncthreads();
        plain_rows_by_rows<R>(score, q, kv, D);
        __syncthreads();  // the keys have been used
        plain_load<R>(kv, qkv + at.v + key * at.stride, at.stride, T - key, D, 1.0f);
        #pragma unroll
        for (int r = 0; r < R; r++) {
            size_t row = first + y + r * PLAIN_SIDE;
            float now = maximum[r], add = 0.0f;
            #pragma unroll
            for (int c = 0; c < R; c++) {
                if (key + x + c * PLAIN_SIDE > row) score[r][c] = -INFINITY;
                now = fmaxf(now, score[r][c]);
            }
            now = half_warp_max(now);
            #pragma unroll
            for (int c = 0; c < R; c++) add += score[r][c] = expf(score[r][c] - now);
            float rescale = expf(maximum[r] - now);
            maximum[r] = now;
            total[r] = total[r] * rescale + half_warp_sum(add);
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++) sum[r][c] *= rescale;
        }
        __syncthreads();
        plain_rows_by_columns<R>(sum, score, kv, weights, D);
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        size_t row = first + y + r * PLAIN_SIDE;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[r][c] /= total[r];
        if (row < T && x == 0) lse[(size_t)blockIdx.x * T + row] = maximum[r] + logf(total[r]);
    }
    plain_store<R>(out + ((b * T + first) * H + h) * D, H * D, T - first, D, sum, 1.0f);
}

// dq of 16 R queries of one head: p = exp(q k - lse), ds = p (dout v - delta), dq = scale ds k.
template <int R>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2)
attention_backward_queries_plain(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                                 const floatX* qkv, size_t T, size_t H, size_t K, size_t D, float scale) {
    extern __shared__ uint4 attention_shared[];
    const int TILE = PLAIN_SIDE * R, COLUMNS = PLAIN_SIDE / R;
    size_t size = TILE * plain_pitch(D);
    float *q = (float*)attention_shared, *g = q + size, *k = g + size, *v = k + size, *weights = v + size;
    size_t b = blockIdx.x / H, h = blockIdx.x % H, first = (size_t)(gridDim.y - 1 - blockIdx.y) * TILE;
    size_t y = threadIdx.x / PLAIN_SIDE, x = threadIdx.x % PLAIN_SIDE;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float dq[R][COLUMNS] = {}, row_lse[R], row_delta[R];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        size_t row = first + y + r * PLAIN_SIDE;
        row_lse[r] = row < T ? lse[(size_t)blockIdx.x * T + row] : 0.0f;
        row_delta[r] = row < T ? delta[(size_t)blockIdx.x * T + row] : 0.0f;
    }

    plain_load<R>(q, qkv + at.q + first * at.stride, at.stride, T - first, D, scale);
    plain_load<R>(g, dout + ((b * T + first) * H + h) * D, H * D, T - first, D, 1.0f);
    for (size_t key = 0; key < first + TILE && key < T; key += TILE) {
        float p[R][R], ds[R][R];
        __syncthreads();
        plain_load<R>(k, qkv + at.k + key * at.stride, at.stride, T - key, D, 1.0f);
        plain_load<R>(v, qkv + at.v + key * at.stride, at.stride, T - key, D, 1.0f);
        __syncthreads();
        plain_rows_by_rows<R>(p, q, k, D);
        plain_rows_by_rows<R>(ds, g, v, D);
        #pragma unroll
        for (int i = 0; i < R * R; i++) {
            int r = i / R, c = i % R;
            bool visible = key + x + c * PLAIN_SIDE <= first + y + r * PLAIN_SIDE;
            ds[r][c] = visible ? expf(p[r][c] - row_lse[r]) * (ds[r][c] - row_delta[r]) : 0.0f;
        }
        plain_rows_by_columns<R>(dq, ds, k, weights, D);
    }
    plain_store<R>(dqkv + at.q + first * at.stride, at.stride, T - first, D, dq, scale);
}

// dk and dv of 16 R keys, summed over the query heads that read them: dv = p^T dout, dk = ds^T q. Here rows are keys
// and columns are queries. Block (b K + kv, tile): the first keys, which the most queries see, in block row 0.
template <int R>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2)
attention_backward_keys_plain(floatX* dqkv, const floatX* dout, const float* lse, const float* delta, const floatX* qkv,
                              size_t T, size_t H, size_t K, size_t D, float scale) {
    extern __shared__ uint4 attention_shared[];
    const int TILE = PLAIN_SIDE * R, COLUMNS = PLAIN_SIDE / R;
    size_t size = TILE * plain_pitch(D);
    float *k = (float*)attention_shared, *v = k + size, *q = v + size, *g = q + size, *weights = g + size;
    size_t b = blockIdx.x / K, kv = blockIdx.x % K, group = H / K, first = (size_t)blockIdx.y * TILE;
    size_t y = threadIdx.x / PLAIN_SIDE, x = threadIdx.x % PLAIN_SIDE;
    HeadRows at = head_rows(b, kv * group, T, H, K, D);
    float dk[R][COLUMNS] = {}, dv[R][COLUMNS] = {};

    plain_load<R>(k, qkv + at.k + first * at.stride, at.stride, T - first, D, 1.0f);
    plain_load<R>(v, qkv + at.v + first * at.stride, at.stride, T - first, D, 1.0f);
    for (size_t h = kv * group; h < (kv + 1) * group; h++) {
        at = head_rows(b, h, T, H, K, D);
        for (size_t query = first; query < T; query += TILE) {
            float p[R][R], ds[R][R];
            __syncthreads();
            plain_load<R>(q, qkv + at.q + query * at.stride, at.stride, T - query, D, scale);
            plain_load<R>(g, dout + ((b * T + query) * H + h) * D, H * D, T - query, D, 1.0f);
            __syncthreads();
            plain_rows_by_rows<R>(p, k, q, D);
            plain_rows_by_rows<R>(ds, v, g, D);
            #pragma unroll
            for (int i = 0; i < R * R; i++) {
                int r = i / R, c = i % R;
                size_t column = query + x + c * PLAIN_SIDE, at_row = (b * H + h) * T + column;
                bool visible = first + y + r * PLAIN_SIDE <= column && column < T;
                p[r][c] = visible ? expf(p[r][c] - lse[at_row]) : 0.0f;
                ds[r][c] = visible ? p[r][c] * (ds[r][c] - delta[at_row]) : 0.0f;
            }
            plain_rows_by_columns<R>(dv, p, g, weights, D);
            plain_rows_by_columns<R>(dk, ds, q, weights, D);  // q has the scale in it
        }
    }
    plain_store<R>(dqkv + at.k + first * at.stride, at.stride, T - first, D, dk, 1.0f);
    plain_store<R>(dqkv + at.v + first * at.stride, at.stride, T - first, D, dv, 1.0f);
}

// Bytes of shared memory for `tiles` tiles of 16 R rows and one of weights.
template <int R>
static inline size_t plain_shared_bytes(size_t tiles, size_t D) {
    const size_t TILE = PLAIN_SIDE * R;
    return (tiles * TILE * plain_pitch(D) + TILE * (TILE + 1)) * sizeof(float);
}

template <int R>
static inline void attention_forward_plain_launch(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T,
                                                  size_t H, size_t K, size_t D, Stream stream) {
    const size_t TILE = PLAIN_SIDE * R, bytes = plain_shared_bytes<R>(2, D);
    attention_allow_shared((const void*)attention_forward_plain<R>, plain_shared_bytes<R>(2, ATTENTION_MAX_D / R));
    dim3 grid((unsigned)(B * H), (unsigned)divide_up(T, TILE));
    attention_forward_plain<R><<<grid, PLAIN_THREADS, bytes, stream->compute>>>(
        out, lse, qkv, T, H, K, D, 1.0f / sqrtf((float)D));
    LAUNCH_CHECK();
}

template <int R>
static inline void attention_backward_plain_launch(floatX* dqkv, const float* delta, const floatX* dout,
                                                   const float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                                   size_t K, size_t D, Stream stream) {
    const size_t TILE = PLAIN_SIDE * R;
    const size_t bytes = plain_shared_bytes<R>(4, D), most = plain_shared_bytes<R>(4, ATTENTION_MAX_D / R);
    attention_allow_shared((const void*)attention_backward_queries_plain<R>, most);
    attention_allow_shared((const void*)attention_backward_keys_plain<R>, most);
    unsigned tiles = (unsigned)divide_up(T, TILE);
    dim3 query_grid((unsigned)(B * H), tiles), key_grid((unsigned)(B * K), tiles);
    float scale = 1.0f / sqrtf((float)D);
    attention_backward_queries_plain<R><<<query_grid, PLAIN_THREADS, bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, T, H, K, D, scale);
    LAUNCH_CHECK();
    attention_backward_keys_plain<R><<<key_grid, PLAIN_THREADS, bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, T, H, K, D, scale);
    LAUNCH_CHECK();
}

static inline void attention_forward_plain_any(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                               size_t K, size_t D, Stream stream) {
    if (D <= 64) attention_forward_plain_launch<4>(out, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 128) attention_forward_plain_launch<2>(out, lse, qkv, B, T, H, K, D, stream);
    else attention_forward_plain_launch<1>(out, lse, qkv, B, T, H, K, D, stream);
}

static inline void attention_backward_plain_any(floatX* dqkv, const float* delta, const floatX* dout,
                                                const float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                                size_t K, size_t D, Stream stream) {
    if (D <= 64) attention_backward_plain_launch<4>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 128) attention_backward_plain_launch<2>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
    else attention_backward_plain_launch<1>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
}

#if !FLOATX_IS_FLOAT

// ------------------------------------------------------------------------------------------------
// 3. Instructions
//
// As in the "Parallel Thread Execution ISA" (sections mma, ldmatrix, cp.async); all exist since Ampere (sm_80). A
// version for Hopper (sm_90a) would keep the kernels of section 5 and replace what lies under them: the products of
// section 4 by wgmma, which reads its operands from shared memory itself, and tile_copy_begin by bulk tensor copies,
// issued by a warp of their own and awaited on an mbarrier.

#ifdef PRECISION_BF16
#define ATTENTION_TYPE "bf16"
#else
#define ATTENTION_TYPE "f16"
#endif

// sum (16, 8) += a (16, 16) b (16, 8). Lane l holds of sum rows l / 4 (the first two) and l / 4 + 8, columns 2 (l % 4)
// and the next; of a the same rows, columns 2 (l % 4) and the next, then those 8 to the right; of b rows 2 (l % 4) and
// the next, then those 8 below, column l / 4.
static __device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ATTENTION_TYPE "." ATTENTION_TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Four matrices of 8 x 8 elements; lane l names row l % 8 of matrix l / 8. Lane l gets of each row l / 4, columns
// 2 (l % 4) and the next.
static __device__ __forceinline__ void matrices_load(uint32_t (&m)[4], const floatX* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// The same of the transposed matrices.
static __device__ __forceinline__ void matrices_load_transposed(uint32_t (&m)[4], const floatX* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// Begins to copy 16 bytes from global to shared memory, or zeros where the source is outside.
static __device__ __forceinline__ void copy_begin(void* shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(inside ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void copy_float_begin(float* shared, const float* global, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(inside ? 4 : 0) : "memory");
}

// Waits for the copies that this thread began; a barrier then makes everybody's visible to all.
static __device__ __forceinline__ void copies_wait(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two floats as elements side by side, `left` in the lower half.
static __device__ __forceinline__ uint32_t pair_of(float left, float right) {
    uint32_t pair;
    asm("cvt.rn." ATTENTION_TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(right), "f"(left));
    return pair;
}

// 2^x within 2 units in the last place of a float; 0 below 2^-126.
static __device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ------------------------------------------------------------------------------------------------
// 4. Fragments
//
// WIDTH is the head size rounded up to one for which the kernels are compiled; the columns between are zeros. Rows of a
// tile in shared memory lie WIDTH + 8 elements apart: 16 bytes more than a multiple of 32, so that the eight rows of a
// matrix begin in different groups of banks.
//
// A warp owns 16 M rows. A product of 16 M x 8 N numbers is an array [M][N][4] of each lane, in the order of
// multiply_add: number e of [m][n] lies in row 16 m + lane / 4 + 8 (e / 2) and column 8 n + 2 (lane % 4) + e % 2.

enum { TENSOR_WARPS = 4, TENSOR_THREADS = TENSOR_WARPS * WARP, TILE_PADDING = 8 };

#define ATTENTION_LOG2E 1.4426950408889634f
#define ATTENTION_LN2 0.6931471805599453f

// Begins to copy a tile (ROWS, WIDTH) from source (available, D), rows `stride` apart; 0 outside. Row 0 must be
// available. Distances within a tile fit into 32 bits; that, and few copies unrolled, saves registers for the sums.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void tile_copy_begin(floatX* tile, const floatX* source, size_t stride,
                                                       size_t available, size_t D) {
    const int CHUNKS = WIDTH / 8;
    #pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += TENSOR_THREADS) {
        unsigned row = (unsigned)i / CHUNKS, column = (unsigned)i % CHUNKS * 8;
        bool inside = row < available && column < (unsigned)D;
        unsigned from = inside ? row * (unsigned)stride + column : 0;
        copy_begin(tile + row * (WIDTH + TILE_PADDING) + column, source + from, inside);
    }
}

// sum (16 M, 8 N) = a (16 M, WIDTH) b (8 N, WIDTH)^T, both in shared memory.
template <int WIDTH, int M, int N>
static __device__ __forceinline__ void rows_by_rows(float (&sum)[M][N][4], const floatX* a, const floatX* b) {
    const int PITCH = WIDTH + TILE_PADDING;
    int lane = threadIdx.x % WARP;
    // Matrices of a: upper left, lower left, upper right, lower right; of b: upper left, upper right, then below.
    a += lane % 16 * PITCH + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
    #pragma unroll
    for (int i = 0; i < M * N * 4; i++) sum[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
    #pragma unroll 2
    for (int d = 0; d < WIDTH; d += 16) {
        uint32_t left[M][4], right[4];
        #pragma unroll
        for (int m = 0; m < M; m++) matrices_load(left[m], a + 16 * m * PITCH + d);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            matrices_load(right, b + 8 * n * PITCH + d);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(sum[m][n], left[m], right[0], right[1]);
                multiply_add(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// sum (16 M, WIDTH) += p (16 M, 8 N) b (8 N, WIDTH), p in registers, where a product left it, b in shared memory. The
// positions of p's numbers are those of a left operand as they are; they only have to be rounded to the storage dtype.
template <int WIDTH, int M, int N>
static __device__ __forceinline__ void rows_by_columns(float (&sum)[M][WIDTH / 8][4], const float (&p)[M][N][4],
                                                       const floatX* b) {
    const int PITCH = WIDTH + TILE_PADDING;
    int lane = threadIdx.x % WARP;
    b += lane % 16 * PITCH + lane / 16 * 8;
    #pragma unroll
    for (int j = 0; j < N; j += 2) {
        uint32_t left[M][4], right[4];
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &p[m][j + i / 2][i % 2 * 2];
                left[m][i] = pair_of(pair[0], pair[1]);
            }
        }
        #pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            matrices_load_transposed(right, b + 8 * j * PITCH + 8 * n);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(sum[m][n], left[m], right[0], right[1]);
                multiply_add(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// out (rows of the warp that are below `available`, D) = scale * sum (16 M, WIDTH)
template <int WIDTH, int M>
static __device__ __forceinline__ void rows_store(floatX* out, size_t stride, ptrdiff_t available, size_t D,
                                                  const float (&sum)[M][WIDTH / 8][4], float scale) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int i = 0; i < M * 2; i++) {
        int row = 8 * i + lane / 4;
        #pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
            const float* pair = &sum[i / 2][n][i % 2 * 2];
            if (row < available && 8 * n < (int)D)
                *(uint32_t*)(out + row * stride + 8 * n + 2 * (lane % 4)) = pair_of(scale * pair[0], scale * pair[1]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 5. Tensor cores
//
// Four warps, each with rows of its own: what a warp computes it also uses, so that nothing but operands goes through
// shared memory. There the traffic decides how many rows a warp owns: a matrix of the streamed tile, once loaded, is
// multiplied with 16 M rows, and M = 2 halves the loads of M = 1; but all sums must fit into 255 registers.

enum { FORWARD_KEYS = 64, BACKWARD_COLUMNS = 32 };  // rows of a streamed tile

// Block (b H + h, tile): 64 M queries of one head, the last ones in block row 0. Keys and values are copied in turn:
// keys of the next tile while the values of this one are multiplied, values while the keys are.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS)
attention_forward_tensor(floatX* out, float* lse, const floatX* qkv, size_t T, size_t H, size_t K, size_t D,
                         float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, PITCH = WIDTH + TILE_PADDING, N = FORWARD_KEYS / 8;
    floatX *q = (floatX*)attention_shared, *k = q + ROWS * PITCH, *v = k + FORWARD_KEYS * PITCH;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    size_t b = blockIdx.x / H, h = blockIdx.x % H, first = (size_t)(gridDim.y - 1 - blockIdx.y) * ROWS;
    size_t own = first + 16 * M * warp, end = first + ROWS < T ? first + ROWS : T;  // own: the first row of the warp
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum[M][WIDTH / 8][4] = {}, maximum[2 * M], total[2 * M], factor = scale * ATTENTION_LOG2E;
    #pragma unroll
    for (int i = 0; i < 2 * M; i++) maximum[i] = -INFINITY, total[i] = 0.0f;

    tile_copy_begin<WIDTH, ROWS>(q, qkv + at.q + first * at.stride, at.stride, T - first, D);
    tile_copy_begin<WIDTH, FORWARD_KEYS>(k, qkv + at.k, at.stride, T, D);
    for (size_t key = 0; key < end; key += FORWARD_KEYS) {
        float score[M][N][4];
        bool visible = key < own + 16 * M;  // otherwise no row of the warp sees a key of the tile
        copies_wait();
        __syncthreads();  // the keys are here; the values before have been used
        tile_copy_begin<WIDTH, FORWARD_KEYS>(v, qkv + at.v + key * at.stride, at.stride, T - key, D);
        if (visible) {
            rows_by_rows<WIDTH>(score, q + 16 * M * warp * PITCH, k);
            if (key + FORWARD_KEYS - 1 > own) {  // the tile crosses the diagonal
                int below = (int)(own - key) + lane / 4 - lane % 4 * 2;
                #pragma unroll
                for (int i = 0; i < M * N * 4; i++) {
                    int m = i / (4 * N), n = i / 4 % N, e = i % 4;
                    if (8 * n + e % 2 > below + 16 * m + 8 * (e / 2)) score[m][n][e] = -INFINITY;
                }
            }
            // Softmax in base 2 of factor * score: the four lanes of a row share its maximum, and add up their parts of
            // its total at the end.
            #pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                float now = maximum[i], add = 0.0f;
                #pragma unroll
                for (int j = 0; j < 2 * N; j++) now = fmaxf(now, score[i / 2][j / 2][i % 2 * 2 + j % 2]);
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
                float rescale = exp2_approximate((maximum[i] - now) * factor), offset = now * factor;
                maximum[i] = now;
                #pragma unroll
                for (int j = 0; j < 2 * N; j++) {
                    float* s = &score[i / 2][j / 2][i % 2 * 2 + j % 2];
                    *s = exp2_approximate(*s * factor - offset);
                    add += *s;
                }
                total[i] = total[i] * rescale + add;
                #pragma unroll
                for (int j = 0; j < WIDTH / 4; j++) sum[i / 2][j / 2][i % 2 * 2 + j % 2] *= rescale;
            }
        }
        copies_wait();
        __syncthreads();  // the values are here; the keys have been used
        if (key + FORWARD_KEYS < end)
            tile_copy_begin<WIDTH, FORWARD_KEYS>(k, qkv + at.k + (key + FORWARD_KEYS) * at.stride, at.stride,
                                                 T - key - FORWARD_KEYS, D);
        if (visible) rows_by_columns<WIDTH>(sum, score, v);
    }

    #pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        size_t row = own + 8 * i + lane / 4;
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        float inverse = 1.0f / total[i];
        #pragma unroll
        for (int j = 0; j < WIDTH / 4; j++) sum[i / 2][j / 2][i % 2 * 2 + j % 2] *= inverse;
        if (row < T && lane % 4 == 0) lse[(size_t)blockIdx.x * T + row] = maximum[i] * scale + logf(total[i]);
    }
    rows_store<WIDTH>(out + ((b * T + own) * H + h) * D, H * D, (ptrdiff_t)T - (ptrdiff_t)own, D, sum, 1.0f);
}

// dq of 64 M queries of one head; blocks as in the forward. While one pair of tiles is multiplied the next is copied.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS)
attention_backward_queries_tensor(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                                  const floatX* qkv, size_t T, size_t H, size_t K, size_t D, float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, PITCH = WIDTH + TILE_PADDING, N = BACKWARD_COLUMNS / 8;
    const int TILE = BACKWARD_COLUMNS * PITCH;
    floatX *q = (floatX*)attention_shared, *g = q + ROWS * PITCH, *keys = g + ROWS * PITCH, *values = keys + 2 * TILE;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    size_t b = blockIdx.x / H, h = blockIdx.x % H, first = (size_t)(gridDim.y - 1 - blockIdx.y) * ROWS;
    size_t own = first + 16 * M * warp, end = first + ROWS < T ? first + ROWS : T;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float dq[M][WIDTH / 8][4] = {}, row_lse[2 * M], row_delta[2 * M], factor = scale * ATTENTION_LOG2E;
    #pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        size_t row = own + 8 * i + lane / 4;
        row_lse[i] = row < T ? lse[(size_t)blockIdx.x * T + row] * ATTENTION_LOG2E : 0.0f;
        row_delta[i] = row < T ? delta[(size_t)blockIdx.x * T + row] : 0.0f;
    }

    tile_copy_begin<WIDTH, ROWS>(q, qkv + at.q + first * at.stride, at.stride, T - first, D);
    tile_copy_begin<WIDTH, ROWS>(g, dout + ((b * T + first) * H + h) * D, H * D, T - first, D);
    tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(keys, qkv + at.k, at.stride, T, D);
    tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(values, qkv + at.v, at.stride, T, D);
    for (size_t key = 0; key < end; key += BACKWARD_COLUMNS) {
        size_t next = key + BACKWARD_COLUMNS;
        const floatX *k = keys + key / BACKWARD_COLUMNS % 2 * TILE, *v = values + key / BACKWARD_COLUMNS % 2 * TILE;
        copies_wait();
        __syncthreads();  // this pair of tiles is here; the one before has been used
        if (next < end) {
            size_t stage = next / BACKWARD_COLUMNS % 2 * TILE;
            const floatX* row = qkv + next * at.stride;
            tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(keys + stage, row + at.k, at.stride, T - next, D);
            tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(values + stage, row + at.v, at.stride, T - next, D);
        }
        if (key >= own + 16 * M) continue;  // no row of the warp sees a key of the tile
        float p[M][N][4], ds[M][N][4];
        rows_by_rows<WIDTH>(p, q + 16 * M * warp * PITCH, k);
        rows_by_rows<WIDTH>(ds, g + 16 * M * warp * PITCH, v);
        int below = (int)(own - key) + lane / 4 - lane % 4 * 2;
        #pragma unroll
        for (int i = 0; i < M * N * 4; i++) {
            int m = i / (4 * N), n = i / 4 % N, e = i % 4, row = 2 * m + e / 2;
            bool visible = 8 * n + e % 2 <= below + 8 * row;
            float probability = exp2_approximate(p[m][n][e] * factor - row_lse[row]);
            ds[m][n][e] = visible ? probability * (ds[m][n][e] - row_delta[row]) : 0.0f;
        }
        rows_by_columns<WIDTH>(dq, ds, k);
    }
    rows_store<WIDTH>(dqkv + at.q + own * at.stride, at.stride, (ptrdiff_t)T - (ptrdiff_t)own, D, dq, scale);
}

// dk and dv of 64 M keys, summed over the query heads that read them. Rows are keys and columns queries, so that the
// transposed probabilities come out of k q^T where the product p^T dout needs them. Block (b K + kv, tile): the first
// keys, which the most queries see, in block row 0. Queries behind the end are zeros, as are their dout, lse and delta:
// they add nothing.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS)
attention_backward_keys_tensor(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                               const floatX* qkv, size_t T, size_t H, size_t K, size_t D, float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, PITCH = WIDTH + TILE_PADDING, N = BACKWARD_COLUMNS / 8;
    const int TILE = BACKWARD_COLUMNS * PITCH;
    floatX *k = (floatX*)attention_shared, *v = k + ROWS * PITCH;
    floatX *queries = v + ROWS * PITCH, *gradients = queries + 2 * TILE;
    float *lses = (float*)(gradients + 2 * TILE), *deltas = lses + 2 * BACKWARD_COLUMNS;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    size_t b = blockIdx.x / K, kv = blockIdx.x % K, group = H / K;
    unsigned first = blockIdx.y * ROWS, own = first + 16 * M * warp;  // a grid has no more rows than that
    HeadRows at = head_rows(b, kv * group, T, H, K, D);
    float dk[M][WIDTH / 8][4] = {}, dv[M][WIDTH / 8][4] = {}, factor = scale * ATTENTION_LOG2E;

    auto copy_queries = [&](unsigned h, unsigned query, int stage) {
        size_t row = (b * H + h) * T + query, i = threadIdx.x;
        const floatX* q = qkv + head_rows(b, h, T, H, K, D).q + query * at.stride;
        const floatX* g = dout + ((b * T + query) * H + h) * D;
        tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(queries + stage * TILE, q, at.stride, T - query, D);
        tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(gradients + stage * TILE, g, H * D, T - query, D);
        if (i >= BACKWARD_COLUMNS) return;
        bool inside = query + i < T;
        copy_float_begin(lses + stage * BACKWARD_COLUMNS + i, lse + row + (inside ? i : 0), inside);
        copy_float_begin(deltas + stage * BACKWARD_COLUMNS + i, delta + row + (inside ? i : 0), inside);
    };

    tile_copy_begin<WIDTH, ROWS>(k, qkv + at.k + first * at.stride, at.stride, T - first, D);
    tile_copy_begin<WIDTH, ROWS>(v, qkv + at.v + first * at.stride, at.stride, T - first, D);
    unsigned h = (unsigned)(kv * group), end = h + (unsigned)group, next = first;  // of the tile to be copied next
    copy_queries(h, next, 0);
    for (int stage = 0; h < end; stage = 1 - stage) {
        unsigned query = next;
        const floatX *q = queries + stage * TILE, *g = gradients + stage * TILE;
        const float* tile_lse = lses + stage * BACKWARD_COLUMNS + lane % 4 * 2;
        const float* tile_delta = deltas + stage * BACKWARD_COLUMNS + lane % 4 * 2;
        next += BACKWARD_COLUMNS;
        if (next >= T) next = first, h++;
        copies_wait();
        __syncthreads();  // these tiles are here; those before have been used
        if (h < end) copy_queries(h, next, 1 - stage);
        if (query + BACKWARD_COLUMNS <= own) continue;  // no query of the tile sees a key of the warp
        float p[M][N][4], ds[M][N][4];
        rows_by_rows<WIDTH>(p, k + 16 * M * warp * PITCH, q);
        rows_by_rows<WIDTH>(ds, v + 16 * M * warp * PITCH, g);
        int below = (int)(own - query) + lane / 4 - lane % 4 * 2;
        #pragma unroll
        for (int i = 0; i < M * N * 4; i++) {
            int m = i / (4 * N), n = i / 4 % N, e = i % 4;
            bool visible = 8 * n + e % 2 >= below + 16 * m + 8 * (e / 2);
            float probability = exp2_approximate(p[m][n][e] * factor - tile_lse[8 * n + e % 2] * ATTENTION_LOG2E);
            p[m][n][e] = visible ? probability : 0.0f;
            ds[m][n][e] = visible ? probability * (ds[m][n][e] - tile_delta[8 * n + e % 2]) : 0.0f;
        }
        rows_by_columns<WIDTH>(dv, p, g);
        rows_by_columns<WIDTH>(dk, ds, q);
    }
    ptrdiff_t available = (ptrdiff_t)T - (ptrdiff_t)own;
    rows_store<WIDTH>(dqkv + at.k + own * at.stride, at.stride, available, D, dk, scale);
    rows_store<WIDTH>(dqkv + at.v + own * at.stride, at.stride, available, D, dv, 1.0f);
}

template <int WIDTH, int M>
static inline void attention_forward_tensor_launch(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T,
                                                   size_t H, size_t K, size_t D, Stream stream) {
    const size_t ROWS = 16 * M * TENSOR_WARPS;
    const size_t bytes = (ROWS + 2 * FORWARD_KEYS) * (WIDTH + TILE_PADDING) * sizeof(floatX);
    attention_allow_shared((const void*)attention_forward_tensor<WIDTH, M>, bytes);
    dim3 grid((unsigned)(B * H), (unsigned)divide_up(T, ROWS));
    attention_forward_tensor<WIDTH, M><<<grid, TENSOR_THREADS, bytes, stream->compute>>>(
        out, lse, qkv, T, H, K, D, 1.0f / sqrtf((float)D));
    LAUNCH_CHECK();
}

// D <= 128
template <int M>
static inline void attention_forward_tensor_any(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T,
                                                size_t H, size_t K, size_t D, Stream stream) {
    if (D <= 64) attention_forward_tensor_launch<64, M>(out, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 80) attention_forward_tensor_launch<80, M>(out, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 96) attention_forward_tensor_launch<96, M>(out, lse, qkv, B, T, H, K, D, stream);
    else attention_forward_tensor_launch<128, M>(out, lse, qkv, B, T, H, K, D, stream);
}

// Rows of a warp in units of 16: as many as registers and shared memory (below 100 KB) have room for.
template <int WIDTH>
static inline void attention_backward_tensor_launch(floatX* dqkv, const float* delta, const floatX* dout,
                                                    const float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                                    size_t K, size_t D, Stream stream) {
    const int QUERY_M = WIDTH <= 96 ? 2 : 1, KEY_M = WIDTH <= 64 ? 2 : 1;
    const size_t QUERIES = 16 * QUERY_M * TENSOR_WARPS, KEYS = 16 * KEY_M * TENSOR_WARPS;
    const size_t row_bytes = (WIDTH + TILE_PADDING) * sizeof(floatX), streamed_bytes = 4 * BACKWARD_COLUMNS * row_bytes;
    const size_t query_bytes = 2 * QUERIES * row_bytes + streamed_bytes;
    const size_t key_bytes = 2 * KEYS * row_bytes + streamed_bytes + 4 * BACKWARD_COLUMNS * sizeof(float);
    attention_allow_shared((const void*)attention_backward_queries_tensor<WIDTH, QUERY_M>, query_bytes);
    attention_allow_shared((const void*)attention_backward_keys_tensor<WIDTH, KEY_M>, key_bytes);
    dim3 query_grid((unsigned)(B * H), (unsigned)divide_up(T, QUERIES));
    dim3 key_grid((unsigned)(B * K), (unsigned)divide_up(T, KEYS));
    float scale = 1.0f / sqrtf((float)D);
    attention_backward_queries_tensor<WIDTH, QUERY_M><<<query_grid, TENSOR_THREADS, query_bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, T, H, K, D, scale);
    LAUNCH_CHECK();
    attention_backward_keys_tensor<WIDTH, KEY_M><<<key_grid, TENSOR_THREADS, key_bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, T, H, K, D, scale);
    LAUNCH_CHECK();
}

// D <= 128
static inline void attention_backward_tensor_any(floatX* dqkv, const float* delta, const floatX* dout,
                                                 const float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                                 size_t K, size_t D, Stream stream) {
    if (D <= 64) attention_backward_tensor_launch<64>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 80) attention_backward_tensor_launch<80>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
    else if (D <= 96) attention_backward_tensor_launch<96>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
    else attention_backward_tensor_launch<128>(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
}

#endif  // !FLOATX_IS_FLOAT

// ------------------------------------------------------------------------------------------------
// 6. Operations

// out (B, T, H, D), lse (B, H, T); qkv (B, T, (H + 2K) D): all query heads, then key heads, then value heads.
static inline void attention_forward(floatX* out, float* lse, const floatX* qkv,
                                     size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
#if !FLOATX_IS_FLOAT
    if (D <= 128 && packs_fit(D, out, qkv, NULL, NULL)) {
        attention_forward_tensor_any<2>(out, lse, qkv, B, T, H, K, D, stream);
        return;
    }
#endif
    attention_forward_plain_any(out, lse, qkv, B, T, H, K, D, stream);
}

// dqkv (B, T, (H + 2K) D) from dout (B, T, H, D) and the forward's out, lse and qkv; delta (B, H, T) is scratch.
static inline void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv, size_t B, size_t T, size_t H, size_t K,
                                      size_t D, Stream stream) {
    attention_delta_launch(delta, dout, out, B, T, H, D, stream);
#if !FLOATX_IS_FLOAT
    if (D <= 128 && packs_fit(D, dqkv, dout, qkv, NULL)) {
        attention_backward_tensor_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
        return;
    }
#endif
    attention_backward_plain_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
}

#endif  // LLMTRAIN_ATTENTION_CUH
