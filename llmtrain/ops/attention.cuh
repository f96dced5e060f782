// attention.cuh: causal, grouped-query attention, forward and backward: attention_forward and attention_backward of
// kernels_cpu.h on a GPU.
//
// In another program, with this file and types.h (its section 4 has the layout of qkv), by nvcc -std=c++20 -arch=native
// -DPRECISION_BF16 (sm_80 or newer):
//
//   struct Device device = {};  device.compute = my_stream;
//   attention_forward(out, lse, qkv, B, T, H, K, D, &device);
//   attention_backward(dqkv, delta, dout, out, lse, qkv, B, T, H, K, D, &device);       delta: (B, H, T), scratch
//
//   1. layout        what both versions share
//   2. plain         float arithmetic on tiles in shared memory: FP32 storage, and head sizes that section 5 lacks
//   3. instructions  tensor cores and asynchronous copies, one instruction per function
//   4. fragments     matmuls of tiles in shared memory and in registers
//   5. tensor cores  16-bit storage, head sizes that are multiples of 8 up to 128
//   6. operations
//
// The method is that of "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning". A block
// owns some rows (queries in the forward and for dq; keys for dk and dv) and streams the others past them in tiles.
// Scores and probabilities live in registers and shared memory only, so memory is O(T): the forward keeps one number
// per row, lse, from which the backward recomputes the probabilities.
//
// The backward goes over the pairs of tiles twice, once by query tiles for dq and once by key tiles for dk and dv: 7
// matmuls instead of 5. The alternative, one pass that adds its parts of dq to memory, needs float atomics, whose order
// changes from run to run, or locks that put the blocks in order. Here each output has one writer, which adds in a
// fixed order: the same bits in every run.
//
// Work for one head: 4 T^2 D / 2 flops forward and 14 T^2 D / 2 backward, for a few T D elements from memory:
// arithmetic is the bound once T exceeds a few hundred. Blocks with the longest rows are started first.

#ifndef LLMTRAIN_ATTENTION_CUH
#define LLMTRAIN_ATTENTION_CUH

#include "types.h"

// ------------------------------------------------------------------------------------------------
// 1. Layout

// More than 48 KB of shared memory must be requested, once per kernel and device; requesting it again costs little.
static inline void attention_allow_shared(const void* kernel, size_t bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// delta (B, H, T) = the sum over D of dout (B, T, H, D) * out (B, T, H, D). Eight lanes take a row, W elements each at
// a time. The four rows of a warp are neighbors in delta, so that it stores 16 bytes at once: one head at four
// positions. The next warp takes the next head, which is adjacent in dout and out. Bound by reading these once.
enum { DELTA_THREADS = 256, DELTA_LANES = 8, DELTA_ROWS = WARP / DELTA_LANES };

template <int W>
static __global__ void __launch_bounds__(DELTA_THREADS)
attention_delta(float* delta, const floatX* dout, const floatX* out, size_t B, size_t T, size_t H, size_t D) {
    unsigned warp = blockIdx.x * (DELTA_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % DELTA_LANES;
    unsigned heads = (unsigned)H, groups = (unsigned)divide_up(T, DELTA_ROWS), group = warp / heads;  // of positions
    size_t h = warp % heads, b = group / groups;
    size_t t = group % groups * DELTA_ROWS + threadIdx.x % WARP / DELTA_LANES, first = ((b * T + t) * H + h) * D;
    bool inside = b < B && t < T;
    float sum = 0.0f;
    for (size_t d = lane * W; inside && d < D; d += DELTA_LANES * W) {
        Lanes<W> x = lanes_load<W>(dout + first + d), y = lanes_load<W>(out + first + d);
        #pragma unroll
        for (int i = 0; i < W; i++) sum += x.x[i] * y.x[i];
    }
    #pragma unroll
    for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (inside && lane == 0) delta[(b * H + h) * T + t] = sum;
}

static inline void attention_delta_launch(float* delta, const floatX* dout, const floatX* out, size_t B, size_t T,
                                          size_t H, size_t D, Stream stream) {
    unsigned blocks = (unsigned)divide_up(B * divide_up(T, DELTA_ROWS) * H, DELTA_THREADS / WARP);
    auto kernel = packs_fit(D, dout, out, NULL, NULL) ? attention_delta<PACK> : attention_delta<1>;
    kernel<<<blocks, DELTA_THREADS, 0, stream->compute>>>(delta, dout, out, B, T, H, D);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 2. Plain
//
// 16 x 16 threads. With R rows per thread, a tile has 16 R rows, and head sizes go up to 256 / R: larger heads have
// smaller tiles, so that registers and shared memory (below 100 KB) are enough for all. Thread (y, x) owns rows
// y + 16 r of its block's tile, and columns x + 16 c of each matmul's result; so the 16 threads of a row are half a
// warp, and exchange data without a barrier of the block.

enum { PLAIN_SIDE = 16, PLAIN_THREADS = PLAIN_SIDE * PLAIN_SIDE };

// Rows of a tile, D long, are an odd number of floats apart, so that threads in a column read different banks.
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

// sum (16 R, D) += p (16 R, 16 R) b (16 R, D). p is passed between threads through `weights` (16 R, 16 R + 1), in which
// each row is written and read by the same half warp.
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

// Combines the numbers of the 16 threads of a row.
template <typename Combine>
static __device__ inline float half_warp(float x, Combine combine) {
    #pragma unroll
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
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
            now = half_warp(now, [](float a, float b) { return fmaxf(a, b); });
            #pragma unroll
            for (int c = 0; c < R; c++) add += score[r][c] = expf(score[r][c] - now);
            float rescale = expf(maximum[r] - now);
            maximum[r] = now;
            total[r] = total[r] * rescale + half_warp(add, [](float a, float b) { return a + b; });
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
            plain_rows_by_columns<R>(dk, ds, q, weights, D);  // q is already scaled
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
// version for Hopper (sm_90a) would keep the kernels of section 5 and replace what they are built on: the matmuls of
// section 4 by wgmma, which reads its operands from shared memory itself, and tile_copy_begin by bulk tensor copies,
// issued by a dedicated warp and awaited on an mbarrier.

#ifdef PRECISION_BF16
#define ATTENTION_TYPE "bf16"
#else
#define ATTENTION_TYPE "f16"
#endif

// sum (16, 8) += a (16, 16) b (16, 8). Lane l holds: of sum, rows l / 4 (the first two) and l / 4 + 8, columns
// 2 (l % 4) and the next; of a, the same rows, columns 2 (l % 4) and the next, then those 8 to the right; of b, rows
// 2 (l % 4) and the next, then those 8 below, column l / 4.
static __device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ATTENTION_TYPE "." ATTENTION_TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Four matrices of 8 x 8 elements; lane l passes the shared address of row l % 8 of matrix l / 8. Lane l gets, of each
// matrix, row l / 4, columns 2 (l % 4) and the next.
static __device__ __forceinline__ void matrices_load(uint32_t (&m)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// The same for the transposed matrices.
static __device__ __forceinline__ void matrices_load_transposed(uint32_t (&m)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// Begins to copy 16 bytes from global to shared memory, or zeros if not `inside`.
static __device__ __forceinline__ void copy_begin(uint32_t shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared), "l"(global), "r"(inside ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void copy_float_begin(uint32_t shared, const float* global, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared), "l"(global), "r"(inside ? 4 : 0) : "memory");
}

// Waits for the copies that this thread began; a barrier then makes all copies visible to all threads.
static __device__ __forceinline__ void copies_wait(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two floats as adjacent elements, `left` in the lower half.
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
// WIDTH is the head size rounded up to one for which the kernels are compiled; the extra columns are zeros. Rows of a
// tile in shared memory are WIDTH + 8 elements apart: 16 bytes more than a multiple of 32, so that the eight rows of a
// matrix begin in different groups of banks.
//
// A warp owns 16 M rows. A result of 16 M x 8 N numbers is an array [M][N][4] in each lane, in the order of
// multiply_add: number e of [m][n] is in row 16 m + lane / 4 + 8 (e / 2) and column 8 n + 2 (lane % 4) + e % 2.

enum { TENSOR_WARPS = 4, TENSOR_THREADS = TENSOR_WARPS * WARP, TILE_PADDING = 8 };

#define ATTENTION_LOG2E 1.4426950408889634f

// Where this lane finds its rows of the operands below, in bytes from a tile's shared address: lane_left for a left
// operand and for the right one of rows_by_columns; lane_right for the right one of rows_by_rows. The rest is constant.
template <int WIDTH>
static __device__ __forceinline__ uint32_t lane_left(void) {
    uint32_t lane = threadIdx.x % WARP;
    return (lane % 16 * (WIDTH + TILE_PADDING) + lane / 16 * 8) * sizeof(floatX);
}
template <int WIDTH>
static __device__ __forceinline__ uint32_t lane_right(void) {
    uint32_t lane = threadIdx.x % WARP;
    return ((lane % 8 + lane / 16 * 8) * (WIDTH + TILE_PADDING) + lane / 8 % 2 * 8) * sizeof(floatX);
}

// Bytes between two elements of a tile that are `rows` rows and `columns` columns apart.
template <int WIDTH>
static __device__ constexpr uint32_t tile_bytes(int rows, int columns) {
    return (uint32_t)(rows * (WIDTH + TILE_PADDING) + columns) * (uint32_t)sizeof(floatX);
}

// A row of a tile is shared by as many threads, at most 8, as can copy equal numbers of 16-byte pieces: they copy
// adjacent pieces, and a thread's pieces are equally far apart in every tile. Its first is at (copy_row, copy_column).
template <int WIDTH>
static __device__ constexpr int row_sharers(void) { return WIDTH % 64 == 0 ? 8 : WIDTH % 32 == 0 ? 4 : 2; }
template <int WIDTH>
static __device__ __forceinline__ unsigned copy_row(void) { return threadIdx.x / row_sharers<WIDTH>(); }
template <int WIDTH>
static __device__ __forceinline__ unsigned copy_column(void) { return threadIdx.x % row_sharers<WIDTH>() * 8; }
template <int WIDTH>
static __device__ __forceinline__ unsigned copy_offset(unsigned stride) {  // in elements
    return copy_row<WIDTH>() * stride + copy_column<WIDTH>();
}

// Begins to copy a tile (ROWS, WIDTH) from source (available, D), rows `stride` apart; 0 outside. Both addresses are
// those of the thread's first piece. Distances within a tile fit into 32 bits.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void tile_copy_begin(uint32_t tile, const floatX* source, unsigned stride,
                                                       unsigned available, unsigned D) {
    const int SHARERS = row_sharers<WIDTH>(), PASS = TENSOR_THREADS / SHARERS;
    int rows = (int)(available - copy_row<WIDTH>()), columns = (int)(D - copy_column<WIDTH>());
    if (PASS > ROWS && copy_row<WIDTH>() >= ROWS) return;
    #pragma unroll
    for (int r = 0; r < ROWS; r += PASS) {
        #pragma unroll
        for (int c = 0; c < WIDTH; c += 8 * SHARERS)
            copy_begin(tile + tile_bytes<WIDTH>(r, c), source + c, r < rows && c < columns);
        source += PASS * stride;
    }
}

constexpr int ROW_NUMBERS = 2 * sizeof(float);  // bytes of a row's lse and delta, side by side

// Begins to copy lse and delta of ROWS rows, of which `available` exist; 0 for the others.
template <int ROWS>
static __device__ __forceinline__ void row_numbers_copy_begin(uint32_t numbers, const float* lse, const float* delta,
                                                              unsigned available) {
    unsigned i = threadIdx.x;
    if (i >= ROWS) return;
    copy_float_begin(numbers + i * ROW_NUMBERS, lse + i, i < available);
    copy_float_begin(numbers + i * ROW_NUMBERS + (uint32_t)sizeof(float), delta + i, i < available);
}

// sum (16 M, 8 N) = a (16 M, WIDTH) b (8 N, WIDTH)^T, both in shared memory, at lane_left and lane_right. All loops are
// unrolled: the compiler then loads the next fragments while the tensor cores work on these, as registers allow.
template <int WIDTH, int M, int N>
static __device__ __forceinline__ void rows_by_rows(float (&sum)[M][N][4], uint32_t a, uint32_t b) {
    #pragma unroll
    for (int i = 0; i < M * N * 4; i++) sum[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
    #pragma unroll
    for (int d = 0; d < WIDTH; d += 16) {
        uint32_t left[M][4], right[4];
        if (d > 0) __syncwarp();  // keeps the compiler from moving later loads up here, which would take registers
        #pragma unroll
        for (int m = 0; m < M; m++) matrices_load(left[m], a + tile_bytes<WIDTH>(16 * m, d));
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            matrices_load(right, b + tile_bytes<WIDTH>(8 * n, d));
            #pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(sum[m][n], left[m], right[0], right[1]);
                multiply_add(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Sets the scores of keys after their query to -infinity, for a warp whose first row is `ahead` of the tile's first
// column; KEYS: columns are keys and rows queries, otherwise rows are keys.
template <bool KEYS, int M, int N>
static __device__ __forceinline__ void hide_future(float (&score)[M][N][4], unsigned ahead) {
    int lane = threadIdx.x % WARP, row = (int)ahead + lane / 4 - lane % 4 * 2;
    #pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        int m = i / (4 * N), n = i / 4 % N, e = i % 4, column = 8 * n + e % 2 - 16 * m - 8 * (e / 2);
        if (KEYS ? column > row : column < row) score[m][n][e] = -INFINITY;
    }
}

// Rounds a result (16 M, 8 N) to the storage dtype: its numbers are where a left operand has them.
template <int M, int N>
static __device__ __forceinline__ void left_operands(uint32_t (&left)[M][N / 2][4], const float (&p)[M][N][4]) {
    #pragma unroll
    for (int i = 0; i < M * N * 2; i++) {
        const float* pair = &p[i / (2 * N)][i / 2 % N][i % 2 * 2];
        left[i / (2 * N)][i / 4 % (N / 2)][i % 4] = pair_of(pair[0], pair[1]);
    }
}

// sum (16 M, WIDTH) += p (16 M, 16 J) b (16 J, WIDTH), p from left_operands, b in shared memory, at lane_left.
template <int WIDTH, int M, int J>
static __device__ __forceinline__ void rows_by_columns(float (&sum)[M][WIDTH / 8][4], const uint32_t (&p)[M][J][4],
                                                       uint32_t b) {
    #pragma unroll
    for (int j = 0; j < J; j++) {
        #pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            uint32_t right[4];
            matrices_load_transposed(right, b + tile_bytes<WIDTH>(16 * j, 8 * n));
            #pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(sum[m][n], p[m][j], right[0], right[1]);
                multiply_add(sum[m][n + 1], p[m][j], right[2], right[3]);
            }
        }
    }
}

// out (rows of the warp that are below `available`, D) = scale * sum (16 M, WIDTH). Four lanes hold 16 bytes of a row,
// half of a sector. So rows first go to shared memory, to rows of a tile that only this warp has read, and from there
// to `out` in whole sectors, 16 bytes per lane.
template <int WIDTH, int M>
static __device__ __forceinline__ void rows_store(floatX* out, unsigned stride, int available, unsigned D,
                                                  const float (&sum)[M][WIDTH / 8][4], float scale, char* tile) {
    const int PIECES = WIDTH / 8;  // of 16 bytes, in a row
    int lane = threadIdx.x % WARP;
    __syncwarp();  // the rows have been read
    #pragma unroll
    for (int i = 0; i < M * 2 * PIECES; i++) {
        const float* pair = &sum[i / (2 * PIECES)][i % PIECES][i / PIECES % 2 * 2];
        char* row = tile + tile_bytes<WIDTH>(8 * (i / PIECES) + lane / 4, 8 * (i % PIECES) + 2 * (lane % 4));
        *(uint32_t*)row = pair_of(scale * pair[0], scale * pair[1]);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 16 * M * PIECES; i += WARP) {
        int row = (i + lane) / PIECES, column = (i + lane) % PIECES * 8;
        uint4 piece = *(const uint4*)(tile + tile_bytes<WIDTH>(row, column));
        if (row < available && column < (int)D) *(uint4*)(out + row * stride + column) = piece;
    }
}

// ------------------------------------------------------------------------------------------------
// 5. Tensor cores
//
// Four warps, each with rows of its own: a warp uses what it computes itself, so only operands go through shared
// memory. That traffic decides how many rows a warp owns: a matrix of the streamed tile, once loaded, is multiplied
// with 16 M rows, and M = 2 halves the loads of M = 1; but all sums must fit into 255 registers.
//
// Blocks start in the order of x, y, z. All blocks of the gridDim.x heads of one z come before those of the next, and
// among them the tiles with the longest rows first: so the L2 cache keeps what these heads stream, which is read from
// memory once, not once per tile. Query heads that share keys and values are neighbors.

enum { FORWARD_KEYS = 64, BACKWARD_COLUMNS = 32 };  // rows of a streamed tile
#define FORWARD_LATE 8.0f  // log2 of the largest probability before it is divided by the total
// Bytes for what blocks stream, of an L2 cache of 40 MB or more.
enum { ATTENTION_CACHE = LLMTRAIN_PIECE(32 << 20, 1 << 10) };

// Grid for `heads` heads of `tiles` tiles: heads that run together stream `head_bytes` each, at most `cache` in all.
static inline dim3 attention_grid(size_t heads, size_t tiles, size_t head_bytes, size_t cache) {
    size_t rounds = divide_up(heads, max_size(1, cache / head_bytes)), together = divide_up(heads, rounds);
    return dim3((unsigned)together, (unsigned)tiles, (unsigned)divide_up(heads, together));
}
static __device__ __forceinline__ unsigned attention_head(void) { return blockIdx.z * gridDim.x + blockIdx.x; }

// Blocks that a multiprocessor's shared memory has room for if WIDTH <= 64 or M == 1; registers are limited to match.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)  // 100 KB
enum { FORWARD_BLOCKS = 2, QUERIES_BLOCKS = 2 };
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // 164 KB
enum { FORWARD_BLOCKS = 3, QUERIES_BLOCKS = 2 };
#else
enum { FORWARD_BLOCKS = 3, QUERIES_BLOCKS = 3 };
#endif

// A block owns 64 M queries of one head. Keys and values are copied in turn: keys of the next tile while the values of
// this one are multiplied, values while the keys are.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS, WIDTH <= 64 || M == 1 ? FORWARD_BLOCKS : 2)
attention_forward_tensor(floatX* out, float* lse, const floatX* qkv, unsigned heads, unsigned T, unsigned H, unsigned K,
                         unsigned D, float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, N = FORWARD_KEYS / 8;
    const uint32_t KEYS = tile_bytes<WIDTH>(ROWS, 0), VALUES = KEYS + tile_bytes<WIDTH>(FORWARD_KEYS, 0);
    unsigned head = attention_head(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (head >= heads) return;
    unsigned first = (gridDim.y - 1 - blockIdx.y) * ROWS, end = min(first + ROWS, T);
    unsigned own = first + 16 * M * warp, h = head % H;  // own: the first row of the warp
    size_t b = head / H;
    HeadRows at = head_rows(b, h, T, H, K, D);
    unsigned stride = (unsigned)at.stride;
    unsigned from = copy_offset<WIDTH>(stride);
    const floatX* keys = qkv + at.k + from;  // of the tile
    uint32_t shared = shared_address(attention_shared);
    uint32_t to = shared + copy_offset<WIDTH>(WIDTH + TILE_PADDING) * (uint32_t)sizeof(floatX);
    uint32_t q = shared + tile_bytes<WIDTH>(16 * M * warp, 0) + lane_left<WIDTH>();
    uint32_t k = shared + KEYS + lane_right<WIDTH>(), v = shared + VALUES + lane_left<WIDTH>();
    float factor = scale * ATTENTION_LOG2E, late = FORWARD_LATE / factor;
    float sum[M][WIDTH / 8][4] = {}, maximum[2 * M], total[2 * M];
    #pragma unroll
    for (int i = 0; i < 2 * M; i++) maximum[i] = -INFINITY, total[i] = 0.0f;

    tile_copy_begin<WIDTH, ROWS>(to, qkv + at.q + first * at.stride + from, stride, T - first, D);
    tile_copy_begin<WIDTH, FORWARD_KEYS>(to + KEYS, keys, stride, T, D);
    for (unsigned key = 0; key < end; key += FORWARD_KEYS) {
        uint32_t p[M][N / 2][4];
        bool visible = key < own + 16 * M;  // otherwise no row of the warp sees a key of the tile
        copies_wait();
        __syncthreads();  // the keys are here; the values before have been used
        tile_copy_begin<WIDTH, FORWARD_KEYS>(to + VALUES, keys + K * D, stride, T - key, D);
        if (visible) {
            float score[M][N][4];
            rows_by_rows<WIDTH>(score, q, k);
            if (key + FORWARD_KEYS - 1 > own) hide_future<true>(score, own - key);
            // Softmax in base 2 of factor * score: the four lanes of a row share its maximum, and add up their parts of
            // its total at the end. `maximum` may be up to `late` below the true one, so that the sums are seldom
            // rescaled.
            float now[2 * M];
            bool rises = false;
            #pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                now[i] = maximum[i];
                #pragma unroll
                for (int j = 0; j < 2 * N; j++) now[i] = fmaxf(now[i], score[i / 2][j / 2][i % 2 * 2 + j % 2]);
                now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffu, now[i], 1));
                now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffu, now[i], 2));
                rises |= now[i] - maximum[i] > late;
            }
            if (__any_sync(0xffffffffu, rises)) {
                #pragma unroll
                for (int i = 0; i < 2 * M; i++) {
                    float rescale = exp2_approximate((maximum[i] - now[i]) * factor);
                    maximum[i] = now[i];
                    total[i] *= rescale;
                    #pragma unroll
                    for (int j = 0; j < WIDTH / 4; j++) sum[i / 2][j / 2][i % 2 * 2 + j % 2] *= rescale;
                }
            }
            #pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                float offset = maximum[i] * factor;
                #pragma unroll
                for (int j = 0; j < 2 * N; j++) {
                    float* s = &score[i / 2][j / 2][i % 2 * 2 + j % 2];
                    *s = exp2_approximate(*s * factor - offset);
                    total[i] += *s;
                }
            }
            left_operands(p, score);
        }
        copies_wait();
        __syncthreads();  // the values are here; the keys have been used
        keys += (size_t)FORWARD_KEYS * stride;
        if (key + FORWARD_KEYS < end)
            tile_copy_begin<WIDTH, FORWARD_KEYS>(to + KEYS, keys, stride, T - key - FORWARD_KEYS, D);
        if (visible) rows_by_columns<WIDTH>(sum, p, v);
    }

    #pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        unsigned row = own + 8 * i + lane / 4;
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        float inverse = 1.0f / total[i];
        #pragma unroll
        for (int j = 0; j < WIDTH / 4; j++) sum[i / 2][j / 2][i % 2 * 2 + j % 2] *= inverse;
        if (row < T && lane % 4 == 0) lse[(size_t)head * T + row] = maximum[i] * scale + logf(total[i]);
    }
    rows_store<WIDTH>(out + ((b * T + own) * H + h) * D, H * D, (int)T - (int)own, D, sum, 1.0f,
                      (char*)attention_shared + tile_bytes<WIDTH>(16 * M * warp, 0));
}

// dq of 64 M queries of one head; blocks as in the forward. While one pair of tiles is multiplied the next is copied.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS, WIDTH <= 64 || M == 1 ? QUERIES_BLOCKS : 2)
attention_backward_queries_tensor(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                                  const floatX* qkv, unsigned heads, unsigned T, unsigned H, unsigned K, unsigned D,
                                  float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, N = BACKWARD_COLUMNS / 8;
    // Shared memory: queries, their dout, two stages of keys and values, the queries' lse and delta.
    const uint32_t SIDE = tile_bytes<WIDTH>(ROWS, 0), TILE = tile_bytes<WIDTH>(BACKWARD_COLUMNS, 0), STAGE = 2 * TILE;
    unsigned head = attention_head(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (head >= heads) return;
    unsigned first = (gridDim.y - 1 - blockIdx.y) * ROWS, own = first + 16 * M * warp, end = min(first + ROWS, T);
    unsigned h = head % H;
    size_t b = head / H;
    HeadRows at = head_rows(b, h, T, H, K, D);
    unsigned stride = (unsigned)at.stride;
    unsigned from = copy_offset<WIDTH>(stride), dout_from = copy_offset<WIDTH>(H * D);
    const floatX* keys = qkv + at.k + from;  // of the tile to be copied next
    uint32_t shared = shared_address(attention_shared);
    uint32_t to = copy_offset<WIDTH>(WIDTH + TILE_PADDING) * (uint32_t)sizeof(floatX);
    uint32_t q = shared + tile_bytes<WIDTH>(16 * M * warp, 0) + lane_left<WIDTH>();
    float dq[M][WIDTH / 8][4] = {}, factor = scale * ATTENTION_LOG2E;
    const uint32_t NUMBERS = 2 * SIDE + 2 * STAGE;
    const float2* numbers = (const float2*)((const char*)attention_shared + NUMBERS) + 16 * M * warp + lane / 4;
    const size_t row = (size_t)head * T + first;

    tile_copy_begin<WIDTH, ROWS>(shared + to, qkv + at.q + first * at.stride + from, stride, T - first, D);
    tile_copy_begin<WIDTH, ROWS>(shared + SIDE + to, dout + ((b * T + first) * H + h) * D + dout_from, H * D, T - first,
                                 D);
    tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(shared + 2 * SIDE + to, keys, stride, T, D);
    tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(shared + 2 * SIDE + TILE + to, keys + K * D, stride, T, D);
    row_numbers_copy_begin<ROWS>(shared + NUMBERS, lse + row, delta + row, T - first);
    for (unsigned key = 0, next; key < end; key = next) {
        next = key + BACKWARD_COLUMNS;
        uint32_t k = shared + 2 * SIDE + key / BACKWARD_COLUMNS % 2 * STAGE;
        copies_wait();
        __syncthreads();  // this pair of tiles is here; the one before has been used
        keys += (size_t)BACKWARD_COLUMNS * stride;
        if (next < end) {
            uint32_t other = shared + 2 * SIDE + next / BACKWARD_COLUMNS % 2 * STAGE + to;
            tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(other, keys, stride, T - next, D);
            tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(other + TILE, keys + K * D, stride, T - next, D);
        }
        if (key >= own + 16 * M) continue;  // no row of the warp sees a key of the tile
        float p[M][N][4], ds[M][N][4];
        rows_by_rows<WIDTH>(p, q, k + lane_right<WIDTH>());
        rows_by_rows<WIDTH>(ds, q + SIDE, k + TILE + lane_right<WIDTH>());
        if (next - 1 > own) hide_future<true>(p, own - key);
        #pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            float2 lse_delta = numbers[8 * i];
            float offset = lse_delta.x * ATTENTION_LOG2E;
            #pragma unroll
            for (int j = 0; j < 2 * N; j++) {
                float *s = &p[i / 2][j / 2][i % 2 * 2 + j % 2], *slope = &ds[i / 2][j / 2][i % 2 * 2 + j % 2];
                *slope = exp2_approximate(*s * factor - offset) * (*slope - lse_delta.y);
            }
        }
        uint32_t left[M][N / 2][4];
        left_operands(left, ds);
        rows_by_columns<WIDTH>(dq, left, k + lane_left<WIDTH>());
    }
    rows_store<WIDTH>(dqkv + at.q + own * at.stride, stride, (int)T - (int)own, D, dq, scale,
                      (char*)attention_shared + tile_bytes<WIDTH>(16 * M * warp, 0));
}

// dk and dv of 64 M keys, summed over the query heads that read them. Rows are keys and columns queries, so that k q^T
// gives the transposed probabilities where the matmul p^T dout needs them. A block owns a tile of a key head; the first
// keys, which the most queries see, come first. Queries past the end are zeros, as are their dout, lse and delta: they
// add nothing.
template <int WIDTH, int M>
static __global__ void __launch_bounds__(TENSOR_THREADS)
attention_backward_keys_tensor(floatX* dqkv, const floatX* dout, const float* lse, const float* delta,
                               const floatX* qkv, unsigned heads, unsigned T, unsigned H, unsigned K, unsigned D,
                               float scale) {
    extern __shared__ uint4 attention_shared[];
    const int ROWS = 16 * M * TENSOR_WARPS, N = BACKWARD_COLUMNS / 8;
    // Shared memory: keys, values, two stages of queries and their dout, lse and delta.
    const uint32_t SIDE = tile_bytes<WIDTH>(ROWS, 0), TILE = tile_bytes<WIDTH>(BACKWARD_COLUMNS, 0);
    const uint32_t STAGE = 2 * TILE + BACKWARD_COLUMNS * ROW_NUMBERS;
    unsigned head = attention_head(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (head >= heads) return;
    unsigned first = blockIdx.y * ROWS, own = first + 16 * M * warp, group = H / K, kv = head % K;
    size_t b = head / K;
    HeadRows at = head_rows(b, kv * group, T, H, K, D);
    unsigned stride = (unsigned)at.stride;
    unsigned from = copy_offset<WIDTH>(stride), dout_from = copy_offset<WIDTH>(H * D);
    uint32_t shared = shared_address(attention_shared);
    uint32_t to = copy_offset<WIDTH>(WIDTH + TILE_PADDING) * (uint32_t)sizeof(floatX);
    uint32_t k = shared + tile_bytes<WIDTH>(16 * M * warp, 0) + lane_left<WIDTH>();
    float dk[M][WIDTH / 8][4] = {}, dv[M][WIDTH / 8][4] = {}, factor = scale * ATTENTION_LOG2E;

    auto copy_queries = [&](unsigned h, unsigned query, uint32_t stage) {
        size_t row = (b * H + h) * T + query;
        const floatX *q = qkv + (b * T + query) * stride + h * D, *g = dout + ((b * T + query) * H + h) * D;
        tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(stage + to, q + from, stride, T - query, D);
        tile_copy_begin<WIDTH, BACKWARD_COLUMNS>(stage + TILE + to, g + dout_from, H * D, T - query, D);
        row_numbers_copy_begin<BACKWARD_COLUMNS>(stage + 2 * TILE, lse + row, delta + row, T - query);
    };

    tile_copy_begin<WIDTH, ROWS>(shared + to, qkv + at.k + first * at.stride + from, stride, T - first, D);
    tile_copy_begin<WIDTH, ROWS>(shared + SIDE + to, qkv + at.v + first * at.stride + from, stride, T - first, D);
    unsigned h = kv * group, end = h + group, next = first;  // of the tile to be copied next
    uint32_t stage = 2 * SIDE, other = STAGE;                // offsets in shared memory
    copy_queries(h, next, shared + stage);
    for (; h < end; stage += other, other = 0 - other) {
        unsigned query = next;
        uint32_t q = shared + stage;
        const float4* numbers = (const float4*)((const char*)attention_shared + stage + 2 * TILE) + lane % 4;
        next += BACKWARD_COLUMNS;
        if (next >= T) next = first, h++;
        copies_wait();
        __syncthreads();  // these tiles are here; those before have been used
        if (h < end) copy_queries(h, next, q + other);
        if (query + BACKWARD_COLUMNS <= own) continue;  // no query of the tile sees a key of the warp
        float p[M][N][4], ds[M][N][4];
        rows_by_rows<WIDTH>(p, k, q + lane_right<WIDTH>());
        rows_by_rows<WIDTH>(ds, k + SIDE, q + TILE + lane_right<WIDTH>());
        if (query < own + 16 * M - 1) hide_future<false>(p, own - query);
        #pragma unroll
        for (int n = 0; n < N; n++) {
            float4 pair = numbers[4 * n];  // lse and delta of two columns
            float offset[2] = {pair.x * ATTENTION_LOG2E, pair.z * ATTENTION_LOG2E}, column_delta[2] = {pair.y, pair.w};
            #pragma unroll
            for (int i = 0; i < 4 * M; i++) {
                float *probability = &p[i / 4][n][i % 4], *slope = &ds[i / 4][n][i % 4];
                *probability = exp2_approximate(*probability * factor - offset[i % 2]);
                *slope = *probability * (*slope - column_delta[i % 2]);
            }
        }
        uint32_t left_p[M][N / 2][4], left_ds[M][N / 2][4];
        left_operands(left_p, p);
        left_operands(left_ds, ds);
        rows_by_columns<WIDTH>(dv, left_p, q + TILE + lane_left<WIDTH>());
        rows_by_columns<WIDTH>(dk, left_ds, q + lane_left<WIDTH>());
    }
    int available = (int)T - (int)own;
    char* rows = (char*)attention_shared + tile_bytes<WIDTH>(16 * M * warp, 0);
    rows_store<WIDTH>(dqkv + at.k + own * at.stride, stride, available, D, dk, scale, rows);
    rows_store<WIDTH>(dqkv + at.v + own * at.stride, stride, available, D, dv, 1.0f, rows + SIDE);
}

template <int WIDTH, int M>
static inline void attention_forward_tensor_launch(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T,
                                                   size_t H, size_t K, size_t D, size_t cache, Stream stream) {
    const size_t ROWS = 16 * M * TENSOR_WARPS, heads = B * H, group = H / K;
    const size_t bytes = (ROWS + 2 * FORWARD_KEYS) * (WIDTH + TILE_PADDING) * sizeof(floatX);
    attention_allow_shared((const void*)attention_forward_tensor<WIDTH, M>, bytes);
    dim3 grid = attention_grid(heads, divide_up(T, ROWS), divide_up(2 * T * D * sizeof(floatX), group), cache);
    attention_forward_tensor<WIDTH, M><<<grid, TENSOR_THREADS, bytes, stream->compute>>>(
        out, lse, qkv, (unsigned)heads, (unsigned)T, (unsigned)H, (unsigned)K, (unsigned)D, 1.0f / sqrtf((float)D));
    LAUNCH_CHECK();
}

// D <= 128
template <int M>
static inline void attention_forward_tensor_any(floatX* out, float* lse, const floatX* qkv, size_t B, size_t T,
                                                size_t H, size_t K, size_t D, size_t cache, Stream stream) {
    if (D <= 64) attention_forward_tensor_launch<64, M>(out, lse, qkv, B, T, H, K, D, cache, stream);
    else if (D <= 80) attention_forward_tensor_launch<80, M>(out, lse, qkv, B, T, H, K, D, cache, stream);
    else if (D <= 96) attention_forward_tensor_launch<96, M>(out, lse, qkv, B, T, H, K, D, cache, stream);
    else attention_forward_tensor_launch<128, M>(out, lse, qkv, B, T, H, K, D, cache, stream);
}

// Whether a multiprocessor has shared memory for only one block of the backward with M = 2: sm_86, sm_89 and sm_120
// have 100 KB. With M = 1 two blocks fit, one of which computes while the other waits.
static inline bool attention_small_shared(void) {
    int device = 0, bytes = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    return bytes < 160 << 10;
}

// Rows of a warp in units of 16: as many as registers and shared memory (below 100 KB) have room for, or half of that.
template <int WIDTH, bool HALF>
static inline void attention_backward_tensor_launch(floatX* dqkv, const float* delta, const floatX* dout,
                                                    const float* lse, const floatX* qkv, size_t B, size_t T, size_t H,
                                                    size_t K, size_t D, size_t cache, Stream stream) {
    const int QUERY_M = WIDTH <= 96 && !HALF ? 2 : 1, KEY_M = WIDTH <= 64 && !HALF ? 2 : 1;
    const size_t QUERIES = 16 * QUERY_M * TENSOR_WARPS, KEYS = 16 * KEY_M * TENSOR_WARPS, group = H / K;
    const size_t row_bytes = (WIDTH + TILE_PADDING) * sizeof(floatX), streamed_bytes = 4 * BACKWARD_COLUMNS * row_bytes;
    const size_t query_bytes = 2 * QUERIES * row_bytes + streamed_bytes + QUERIES * ROW_NUMBERS;
    const size_t key_bytes = 2 * KEYS * row_bytes + streamed_bytes + 2 * BACKWARD_COLUMNS * ROW_NUMBERS;
    const size_t pair = 2 * T * D * sizeof(floatX);  // bytes of keys and values of a head, or of queries and their dout
    attention_allow_shared((const void*)attention_backward_queries_tensor<WIDTH, QUERY_M>, query_bytes);
    attention_allow_shared((const void*)attention_backward_keys_tensor<WIDTH, KEY_M>, key_bytes);
    dim3 query_grid = attention_grid(B * H, divide_up(T, QUERIES), divide_up(pair, group), cache);
    dim3 key_grid = attention_grid(B * K, divide_up(T, KEYS), pair * group, cache);
    unsigned n = (unsigned)T, h = (unsigned)H, k = (unsigned)K, d = (unsigned)D;
    float scale = 1.0f / sqrtf((float)D);
    attention_backward_queries_tensor<WIDTH, QUERY_M><<<query_grid, TENSOR_THREADS, query_bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, (unsigned)(B * H), n, h, k, d, scale);
    LAUNCH_CHECK();
    attention_backward_keys_tensor<WIDTH, KEY_M><<<key_grid, TENSOR_THREADS, key_bytes, stream->compute>>>(
        dqkv, dout, lse, delta, qkv, (unsigned)(B * K), n, h, k, d, scale);
    LAUNCH_CHECK();
}

// D <= 128
static inline void attention_backward_tensor_any(floatX* dqkv, const float* delta, const floatX* dout, const float* lse,
                                                 const floatX* qkv, size_t B, size_t T, size_t H, size_t K, size_t D,
                                                 size_t cache, Stream stream) {
    bool half = D <= 80 && attention_small_shared();
    auto wide = D > 96 ? attention_backward_tensor_launch<128, false> : attention_backward_tensor_launch<96, false>;
    auto of_80 = half ? attention_backward_tensor_launch<80, true> : attention_backward_tensor_launch<80, false>;
    auto of_64 = half ? attention_backward_tensor_launch<64, true> : attention_backward_tensor_launch<64, false>;
    auto launch = D > 80 ? wide : D > 64 ? of_80 : of_64;
    launch(dqkv, delta, dout, lse, qkv, B, T, H, K, D, cache, stream);
}

#endif  // !FLOATX_IS_FLOAT

// ------------------------------------------------------------------------------------------------
// 6. Operations
//
// out, dout (B, T, H, D); lse, delta (B, H, T); qkv, dqkv (B, T, (H + 2K) D): as in kernels_cpu.h, section 6.

static inline void attention_forward(floatX* out, float* lse, const floatX* qkv,
                                     size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
#if !FLOATX_IS_FLOAT
    if (D <= 128 && packs_fit(D, out, qkv, NULL, NULL)) {
        attention_forward_tensor_any<2>(out, lse, qkv, B, T, H, K, D, ATTENTION_CACHE, stream);
        return;
    }
#endif
    attention_forward_plain_any(out, lse, qkv, B, T, H, K, D, stream);
}

static inline void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv, size_t B, size_t T, size_t H, size_t K,
                                      size_t D, Stream stream) {
    attention_delta_launch(delta, dout, out, B, T, H, D, stream);
#if !FLOATX_IS_FLOAT
    if (D <= 128 && packs_fit(D, dqkv, dout, qkv, NULL)) {
        attention_backward_tensor_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, ATTENTION_CACHE, stream);
        return;
    }
#endif
    attention_backward_plain_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, stream);
}

#endif  // LLMTRAIN_ATTENTION_CUH
