// kernels.cuh: every operation of kernels_cpu.h in CUDA: kernels, and launchers of the same names and signatures.
//
//    1. embedding       token + position; the backward sorts the rows by either
//    2. normalization   layernorm, rmsnorm, each fused with the residual add before it
//    3. rope            rotary positions
//    4. gelu, swiglu
//    5. fused matmuls   a matmul with the GELU after or before it
//    6. dropout
//    7. classifier      softmax + cross-entropy + gradient of the logits, in place
//    8. scratch         how much memory all of them need besides their arguments
//
// In llmtrain/ops/: the other matmuls in matmul.cuh, attention in attention.cuh, attention to a KV cache in decode.cuh,
// norms of query and key heads in qk_norm.cuh, heads cut into parts and copied for ranks in heads.cuh, layers that
// ranks share in leaves.cuh, columns of matrices for LoRA in columns.cuh, weights in 4 bits in nf4.cuh, operations on
// whole vectors in vectors.cuh, optimizers in optimizers/.
// To copy an operation into a project of your own, take its section and what the section's first lines name.
//
// Almost all kernels here are bound by memory, so their comments count the bytes that they move. W is the number of
// elements that a thread takes at a time: PACK (or FOUR, PAIR), or 1 where those do not fit. Lanes<W> are W floats in
// registers, lanes_load and lanes_store move them as floatX, packs_fit says whether W can be PACK (types.h, section 6).
// No kernel uses float atomics: every output has one writer, which adds in a fixed order. dev/NAME.cu is the ladder
// from the naive version of an operation to the one here.

#ifndef LLMTRAIN_KERNELS_CUH
#define LLMTRAIN_KERNELS_CUH

#include "kernels_cpu.h"  // the same operations as cpu::gelu_forward and so on, which these are checked against
#include "llmtrain/ops/attention.cuh"
#include "llmtrain/ops/base.h"
#include "llmtrain/ops/blocks.cuh"
#include "llmtrain/ops/columns.cuh"
#include "llmtrain/ops/decode.cuh"
#include "llmtrain/ops/heads.cuh"
#include "llmtrain/ops/leaves.cuh"
#include "llmtrain/ops/matmul.cuh"
#include "llmtrain/ops/nf4.cuh"
#include "llmtrain/ops/optimizers/update.cuh"
#include "llmtrain/ops/qk_norm.cuh"
#include "llmtrain/ops/types.h"
#include "llmtrain/ops/vectors.cuh"

// ------------------------------------------------------------------------------------------------
// 1. Embedding
//
// Defines: embedding_forward, embedding_backward, embedding_backward_part.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.

enum { EMBEDDING_THREADS = 256 };

// A block owns a row, a thread W channels of it. Reads a row of token_weight and one of position_weight, which stays
// in the cache, and writes one.
template <int W>
static __global__ void embedding_forward_kernel(floatX* out, const int32_t* tokens, const int32_t* positions,
                                                const floatX* token_weight, const floatX* position_weight,
                                                size_t N, size_t C) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const floatX* token = token_weight + (size_t)tokens[row] * C;
        const floatX* position = position_weight ? position_weight + (size_t)positions[row] * C : NULL;
        for (size_t c = (size_t)threadIdx.x * W; c < C; c += (size_t)blockDim.x * W) {
            Lanes<W> x = lanes_load<W>(token + c);
            if (position) x = lanes_add(x, lanes_load<W>(position + c));
            lanes_store(out + row * C + c, x);
        }
    }
}

static inline void embedding_forward(floatX* out, const int32_t* tokens, const int32_t* positions,
                                     const floatX* token_weight, const floatX* position_weight, size_t N, size_t C,
                                     Stream stream) {
    bool packs = packs_fit(C, out, token_weight, position_weight, NULL);
    auto kernel = packs ? embedding_forward_kernel<PACK> : embedding_forward_kernel<1>;
    unsigned threads = block_threads(divide_up(C, packs ? PACK : 1), EMBEDDING_THREADS);
    kernel<<<grid_blocks(N), threads, 0, stream->compute>>>(
        out, tokens, positions, token_weight, position_weight, N, C);
    LAUNCH_CHECK();
}

// The backward: dtoken_weight[token] += the sum of dout over the token's rows. Two rows of one token must not race,
// and their order must not depend on timing; a token may have one row or all of them. So
//
//   - (token, row) pairs are sorted: the rows of a token then form a run, in the order of rows. The keys are integers
//     that all differ, so there is one sorted order however it is found. It is found by merging: runs of 1, 2, 4 ...
//     keys, up to SORT_TILE of them in shared memory, then in device memory. A key's index after a merge is its index
//     in its own run plus the number of smaller keys in the other, which it finds by bisection.
//   - the sorted rows are cut into pieces of equal length, whatever the tokens are, so that the work is spread evenly.
//     A thread owns W channels of a piece and adds its rows. A run inside of one piece has one owner, which adds the
//     sum to the gradient. For a run that crosses from piece to piece, each piece stores its partial sum,
//   - and a second kernel adds those partial sums (`parts`), in the order of the pieces.
//
// Only the tokens in [first, first + rows) are added up. The others are sorted and cut into pieces too, so that the
// bits of a token's gradient do not depend on the range.
//
// Positions are sorted and added up in the same way, except that their runs stay whole: one block adds up a run even
// if it is longer than a piece. A position has a row for each sequence or document of the batch, rarely more than a few
// hundred, and the bits do not depend on where pieces end.

enum {
    SORT_THREADS = LLMTRAIN_PIECE(1024, WARP),
    SORT_TILE = 2 * SORT_THREADS,   // keys that a block sorts: two arrays of 16 KiB
    EMBEDDING_PIECES = 2048,        // bounds the memory for parts of runs, and fills a GPU
    EMBEDDING_PIECE_ROWS = 8,       // rows per piece, at least; its parts take the bytes of up to 4 rows of 16 bits
    EMBEDDING_JOINERS = 8           // warps that share the parts of one run
};

// The token, or position, and the row of a key.
static __device__ inline uint64_t key_of(uint32_t id, size_t row) { return (uint64_t)id << 32 | row; }
static __device__ inline uint32_t key_id(uint64_t key) { return (uint32_t)(key >> 32); }
static __device__ inline size_t key_row(uint64_t key) { return (uint32_t)key; }

// The first of the sorted keys [low, high) that is not below `key`; high if all are.
static __device__ inline size_t key_find(const uint64_t* keys, size_t low, size_t high, uint64_t key) {
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The index of key i of n after its run of `run` keys, a power of 2, is merged with the neighboring run.
static __device__ inline size_t merged_index(const uint64_t* keys, size_t i, size_t run, size_t n) {
    size_t own = i / run * run, other = own ^ run, first = min(other, n);
    return min(own, other) + (i - own) + (key_find(keys, first, min(first + run, n), keys[i]) - first);
}

// The end of the run that key i - 1 is in.
static __device__ inline size_t run_end(const uint64_t* keys, size_t i, size_t n) {
    return i == 0 ? 0 : key_find(keys, i, n, key_of(key_id(keys[i - 1]) + 1, 0));
}

// keys (N): each SORT_TILE of them sorted by one block.
static __global__ void __launch_bounds__(SORT_THREADS)
embedding_sort_tiles(uint64_t* keys, const int32_t* ids, size_t N) {
    __shared__ uint64_t tile[2][SORT_TILE];
    size_t first = (size_t)blockIdx.x * SORT_TILE;
    unsigned n = (unsigned)min(N - first, (size_t)SORT_TILE), from = 0;
    for (unsigned i = threadIdx.x; i < n; i += SORT_THREADS)
        tile[0][i] = key_of((uint32_t)ids[first + i], first + i);
    __syncthreads();
    for (unsigned run = 1; run < n; run *= 2, from = 1 - from) {
        for (unsigned i = threadIdx.x; i < n; i += SORT_THREADS)
            tile[1 - from][merged_index(tile[from], i, run, n)] = tile[from][i];
        __syncthreads();
    }
    for (unsigned i = threadIdx.x; i < n; i += SORT_THREADS) keys[first + i] = tile[from][i];
}

// out (N) = in (N) with each pair of neighboring runs merged; a thread owns a key. The searches hit the cache.
static __global__ void embedding_merge(uint64_t* out, const uint64_t* in, size_t run, size_t N) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[merged_index(in, i, run, N)] = in[i];
}

// A block owns a piece, a thread W channels of it. parts (pieces, 2, C): partial sums of the run that comes from the
// piece before, then of the run that begins here and continues in the next. Reads dout once, row by row, wherever the
// rows are; reads and writes the gradient once per token. While a row is added the next is being loaded.
// WHOLE: the piece is moved to the runs that begin in it, and there are no parts.
template <int W, bool WHOLE>
static __global__ void embedding_sum_pieces(float* gradients, float* parts, const floatX* dout, const uint64_t* keys,
                                            size_t piece, size_t N, size_t C, uint32_t first, uint32_t rows) {
    size_t begin = blockIdx.x * piece, end = min(begin + piece, N);
    if (WHOLE) begin = run_end(keys, begin, N), end = run_end(keys, end, N);
    if (WHOLE && begin == end) return;
    auto added = [=](uint32_t id) { return id - first < rows; };  // ids before `first` wrap around, to large numbers
    for (size_t c = (size_t)threadIdx.x * W; c < C; c += (size_t)blockDim.x * W) {
        uint32_t id = key_id(keys[begin]);
        bool from_before = !WHOLE && begin > 0 && key_id(keys[begin - 1]) == id;
        Lanes<W> sum = {}, next = {};
        if (added(id)) next = lanes_load<W>(dout + key_row(keys[begin]) * C + c);
        for (size_t i = begin; i < end; i++) {
            Lanes<W> row = next;
            uint64_t next_key = i + 1 < N ? keys[i + 1] : 0;
            bool ends = i + 1 == N || key_id(next_key) != id;
            if (i + 1 < end && added(key_id(next_key))) next = lanes_load<W>(dout + key_row(next_key) * C + c);
            sum = lanes_add(sum, row);
            if (!ends && i + 1 < end) continue;
            if (added(id) && (WHOLE || (ends && !from_before))) {
                float* gradient = gradients + (size_t)(id - first) * C + c;
                group_store(gradient, lanes_add(group_load<W>(gradient), sum));
            } else if (added(id)) {
                group_store(parts + (2 * blockIdx.x + (from_before ? 0 : 1)) * C + c, sum);
            }
            sum = {};
            id = key_id(next_key);
            from_before = false;
        }
    }
}

// Adds the parts of the run that begins in piece blockIdx.x and continues in the next, if there is one. Block (WARP,
// EMBEDDING_JOINERS): x owns W channels, y every EMBEDDING_JOINERS-th part; the sums of the y are added in order
// of y.
template <int W>
static __global__ void embedding_join_pieces(float* dtoken_weight, const float* parts, const uint64_t* keys,
                                             size_t piece, size_t N, size_t C, uint32_t first, uint32_t rows) {
    __shared__ Lanes<W> sums[EMBEDDING_JOINERS][WARP];
    size_t begin = blockIdx.x * piece, end = begin + piece;
    if (end >= N) return;
    uint32_t token = key_id(keys[end - 1]);
    if (token - first >= rows) return;
    if (key_id(keys[end]) != token || (begin > 0 && key_id(keys[begin - 1]) == token)) return;
    size_t c = ((size_t)blockIdx.y * WARP + threadIdx.x) * W;
    Lanes<W> sum = {};
    size_t p = blockIdx.x + 1 + threadIdx.y;
    for (; p * piece < N && key_id(keys[p * piece]) == token; p += EMBEDDING_JOINERS)
        if (c < C) sum = lanes_add(sum, group_load<W>(parts + 2 * p * C + c));
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    sum = group_load<W>(parts + (2 * blockIdx.x + 1) * C + c);
    for (int y = 0; y < EMBEDDING_JOINERS; y++) sum = lanes_add(sum, sums[y][threadIdx.x]);
    float* gradient = dtoken_weight + (size_t)(token - first) * C + c;
    group_store(gradient, lanes_add(group_load<W>(gradient), sum));
}

// Rows per piece.
static inline size_t embedding_piece(size_t N) {
    return max_size(EMBEDDING_PIECE_ROWS, divide_up(N, EMBEDDING_PIECES));
}

static inline size_t embedding_keys_bytes(size_t N) { return round_up(N * sizeof(uint64_t), 16); }

// Enough for N rows or fewer.
static inline size_t embedding_backward_scratch_bytes(size_t N, size_t C) {
    size_t pieces = min_size(EMBEDDING_PIECES, divide_up(N, EMBEDDING_PIECE_ROWS));
    return 2 * embedding_keys_bytes(N) + pieces * 2 * C * sizeof(float);
}

// Sorts the (id, row) keys of ids (N), tokens or positions, N below 2^32. Returns keys or other (N), whichever has the
// result.
static inline const uint64_t* embedding_sort(uint64_t* keys, uint64_t* other, const int32_t* ids, size_t N,
                                             Stream stream) {
    embedding_sort_tiles<<<(unsigned)divide_up(N, SORT_TILE), SORT_THREADS, 0, stream->compute>>>(keys, ids, N);
    LAUNCH_CHECK();
    for (size_t run = SORT_TILE; run < N; run *= 2) {
        unsigned blocks = (unsigned)divide_up(N, EMBEDDING_THREADS);
        embedding_merge<<<blocks, EMBEDDING_THREADS, 0, stream->compute>>>(other, keys, run, N);
        LAUNCH_CHECK();
        uint64_t* sorted = other;
        other = keys;
        keys = sorted;
    }
    return keys;
}

// Adds to gradients (rows, C), for the ids (N) in [first, first + rows); `whole`: ids are positions.
static inline void embedding_backward_ids(float* gradients, const floatX* dout, const int32_t* ids, bool whole,
                                          size_t first, size_t rows, size_t N, size_t C, Stream stream) {
    size_t piece = embedding_piece(N), pieces = divide_up(N, piece);
    char* scratch = (char*)device_scratch(stream, embedding_backward_scratch_bytes(N, C));
    uint64_t *keys = (uint64_t*)scratch, *other = (uint64_t*)(scratch + embedding_keys_bytes(N));
    float* parts = (float*)(scratch + 2 * embedding_keys_bytes(N));
    bool packs = packs_fit(C, dout, gradients, parts, NULL);
    size_t W = packs ? PACK : 1;
    uint32_t from = (uint32_t)first, count = (uint32_t)min_size(rows, UINT32_MAX);
    unsigned threads = block_threads(divide_up(C, W), EMBEDDING_THREADS);
    auto sum_pieces = packs ? embedding_sum_pieces<PACK, false> : embedding_sum_pieces<1, false>;
    auto sum_runs = packs ? embedding_sum_pieces<PACK, true> : embedding_sum_pieces<1, true>;
    auto join_pieces = packs ? embedding_join_pieces<PACK> : embedding_join_pieces<1>;
    const uint64_t* sorted = embedding_sort(keys, other, ids, N, stream);
    auto sum = whole ? sum_runs : sum_pieces;
    sum<<<(unsigned)pieces, threads, 0, stream->compute>>>(gradients, parts, dout, sorted, piece, N, C, from, count);
    LAUNCH_CHECK();
    if (whole) return;
    dim3 joins((unsigned)pieces, (unsigned)divide_up(C, WARP * W)), joiners(WARP, EMBEDDING_JOINERS);
    join_pieces<<<joins, joiners, 0, stream->compute>>>(gradients, parts, sorted, piece, N, C, from, count);
    LAUNCH_CHECK();
}

static inline void embedding_backward_part(float* dtoken_weight, const floatX* dout, const int32_t* tokens,
                                           size_t first, size_t rows, size_t N, size_t C, Stream stream) {
    embedding_backward_ids(dtoken_weight, dout, tokens, false, first, rows, N, C, stream);
}

static inline void embedding_backward(float* dtoken_weight, float* dposition_weight, const floatX* dout,
                                      const int32_t* tokens, const int32_t* positions, size_t N, size_t C,
                                      Stream stream) {
    if (dtoken_weight) embedding_backward_ids(dtoken_weight, dout, tokens, false, 0, SIZE_MAX, N, C, stream);
    if (dposition_weight) embedding_backward_ids(dposition_weight, dout, positions, true, 0, SIZE_MAX, N, C, stream);
}

// ------------------------------------------------------------------------------------------------
// 2. Normalization
//
// Defines: layernorm_forward, layernorm_backward, rmsnorm_forward, rmsnorm_backward.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.
//
// Read first: types.h, section 6 (Lanes: W elements of a row as floats; packs_fit: whether W can be PACK), and
// blocks.cuh, sections 2 (row_sum, row_sums, add_partial) and 3 (Held: elements as they are stored). The naive kernels
// are in dev/layernorm.cu.
//
// "Layer Normalization" and "Root Mean Square Layer Normalization". One kernel serves both, since rmsnorm is
// layernorm without centering: mean 0, bias 0. A block owns a row and keeps it in registers, so that each byte is
// read once: a thread holds ROUNDS times W elements. In the forward a row of up to 1,024 channels (512 where packs do
// not fit) belongs to a single warp, which needs no barriers for its sums. The registers of a block hold at most a
// slab, NORM_SLAB channels. A wider row has a block for each slab, blockIdx.y, which reads the other slabs only for the
// sums over the row.

enum {
    NORM_SLAB = LLMTRAIN_PIECE(8192, 1024),
    NORM_BACKWARD_HELD = 8,     // elements of a row per thread, which has 64 registers at 32 warps
    NORM_BACKWARD_THREADS = NORM_SLAB / NORM_BACKWARD_HELD,  // of one block, and of all blocks on a multiprocessor
    NORM_BLOCK_ROWS = 8,        // rows per block, at least: it writes up to 8 bytes per channel
    NORM_PROCESSORS = 256       // multiprocessors used, at most: bounds the scratch memory
};

// Elements of a row that a thread holds in the forward. With W = 1 each needs its own address, which takes registers
// too.
static HOST_DEVICE constexpr int norm_held(int W) { return W == 1 ? 16 : 32; }

// in + branch, rounded to floatX as when stored; branch may be NULL.
template <int W>
static __device__ inline Lanes<W> residual_lanes(const floatX* in, const floatX* branch, size_t at) {
    Lanes<W> x = lanes_load<W>(in + at);
    if (branch == NULL) return x;
    Lanes<W> b = lanes_load<W>(branch + at);
    #pragma unroll
    for (int i = 0; i < W; i++) x.x[i] = float_of(floatX_of(x.x[i] + b.x[i]));
    return x;
}

// The sum of (x - m)^power, power 1 or 2.
template <int W>
static __device__ inline float lanes_moment(Lanes<W> x, float m, int power) {
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < W; i++) sum += power == 2 ? (x.x[i] - m) * (x.x[i] - m) : x.x[i] - m;
    return sum;
}

// out (N, C), residual (N, C), mean (N) if CENTERED, rstd (N); in (N, C), branch (N, C) or NULL, weight (C), bias (C)
// if CENTERED; N is below 2^31. Thread x holds W elements from (k blockDim.x + x) W of its slab, for k = 0, 1, ...
// Moves 4 elements per channel and row with a branch, otherwise 2; weight and bias stay in the cache.
template <int W, bool CENTERED>
static __global__ void __launch_bounds__(NORM_SLAB / norm_held(W), 1)
norm_forward_kernel(floatX* out, floatX* residual, float* mean, float* rstd, const floatX* in, const floatX* branch,
                    const floatX* __restrict__ weight, const floatX* __restrict__ bias, float epsilon, size_t C) {
    constexpr int ROUNDS = norm_held(W) / W;
    __shared__ float shared[WARP];
    size_t row = blockIdx.x, first = row * C, begin = (size_t)blockIdx.y * NORM_SLAB;
    size_t end = min(C, begin + NORM_SLAB), outside = gridDim.y > 1 ? C : 0;  // outside: where other slabs end
    Lanes<W> x[ROUNDS];
    float sum = 0.0f, squares = 0.0f, m = 0.0f;
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {  // no stores in between, so that all loads are under way together
        size_t c = begin + (k * blockDim.x + threadIdx.x) * W;
        if (c < end) x[k] = residual_lanes<W>(in, branch, first + c);
    }
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        size_t c = begin + (k * blockDim.x + threadIdx.x) * W;
        if (c >= end) continue;
        if (branch) lanes_store(residual + first + c, x[k]);
        sum += lanes_moment(x[k], 0.0f, 1);
    }
    if (CENTERED) {
        for (size_t c = threadIdx.x * W; c < outside; c += blockDim.x * W)
            if (c < begin || c >= end) sum += lanes_moment(residual_lanes<W>(in, branch, first + c), 0.0f, 1);
        m = row_sum(sum, shared) / (float)C;
    }
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++)
        if (begin + (k * blockDim.x + threadIdx.x) * W < end) squares += lanes_moment(x[k], m, 2);
    for (size_t c = threadIdx.x * W; c < outside; c += blockDim.x * W)
        if (c < begin || c >= end) squares += lanes_moment(residual_lanes<W>(in, branch, first + c), m, 2);
    float s = 1.0f / sqrtf(row_sum(squares, shared) / (float)C + epsilon);
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        size_t c = begin + (k * blockDim.x + threadIdx.x) * W;
        if (c >= end) continue;
        Lanes<W> w = lanes_load<W>(weight + c), b = CENTERED ? lanes_load<W>(bias + c) : Lanes<W>{};
        #pragma unroll
        for (int i = 0; i < W; i++) x[k].x[i] = (x[k].x[i] - m) * s * w.x[i] + b.x[i];
        lanes_store(out + first + c, x[k]);
    }
    if (threadIdx.x > 0 || blockIdx.y > 0) return;
    if (CENTERED) mean[row] = m;
    rstd[row] = s;
}

// Blocks along the rows, times one per slab; threads of a block, which hold `held` elements each.
static inline dim3 norm_grid(size_t blocks, size_t C) {
    return dim3((unsigned)blocks, (unsigned)divide_up(C, NORM_SLAB));
}
static inline unsigned norm_threads(size_t C, size_t held) {
    return block_threads(divide_up(C, held), NORM_SLAB / held);
}

static inline void layernorm_forward(floatX* out, floatX* residual, float* mean, float* rstd, const floatX* in,
                                     const floatX* branch, const floatX* weight, const floatX* bias, float epsilon,
                                     size_t N, size_t C, Stream stream) {
    bool packs = packs_fit(C, out, branch ? residual : NULL, in, branch) && packs_fit(C, weight, bias, NULL, NULL);
    auto kernel = packs ? norm_forward_kernel<PACK, true> : norm_forward_kernel<1, true>;
    kernel<<<norm_grid(N, C), norm_threads(C, norm_held(packs ? PACK : 1)), 0, stream->compute>>>(
        out, residual, mean, rstd, in, branch, weight, bias, epsilon, C);
    LAUNCH_CHECK();
}

static inline void rmsnorm_forward(floatX* out, floatX* residual, float* rstd, const floatX* in, const floatX* branch,
                                   const floatX* weight, float epsilon, size_t N, size_t C, Stream stream) {
    bool packs = packs_fit(C, out, branch ? residual : NULL, in, branch) && packs_fit(C, weight, NULL, NULL, NULL);
    auto kernel = packs ? norm_forward_kernel<PACK, false> : norm_forward_kernel<1, false>;
    kernel<<<norm_grid(N, C), norm_threads(C, norm_held(packs ? PACK : 1)), 0, stream->compute>>>(
        out, residual, (float*)NULL, rstd, in, branch, weight, (const floatX*)NULL, epsilon, C);
    LAUNCH_CHECK();
}

// For W channels: d = dout, g = dout weight and n = (x - m) s; adds g to sums->x and g n to sums->y.
template <int W>
struct NormTerms { Lanes<W> d, g, n; };
template <int W>
static __device__ inline NormTerms<W> norm_terms(float2* sums, const Held<W>& dout, const Held<W>& x,
                                                 const Held<W>& weight, float m, float s) {
    NormTerms<W> terms = {held_lanes(dout), held_lanes(weight), held_lanes(x)};
    #pragma unroll
    for (int i = 0; i < W; i++) {
        terms.n.x[i] = (terms.n.x[i] - m) * s;
        sums->x += terms.g.x[i] *= terms.d.x[i];
        sums->y += terms.g.x[i] * terms.n.x[i];
    }
    return terms;
}

// dx (N, C) += ...; partial (1 or 2, blocks, C) = each block's part of dweight and, if CENTERED, of dbias; dout, x (N,
// C). A block takes rows blockIdx.x, + gridDim.x, ...; a thread always has the same channels of them, and keeps their
// sums over the rows in registers. So one reading of dout and x is enough for the whole backward: it moves 4 elements
// per channel and row, and 4 or 8 bytes per channel and block. A row is held as stored (floatX), so that where a thread
// has only one group of it (AHEAD), registers remain for dx and the next row, loaded while the sums are computed.
template <int W, bool CENTERED>
static __global__ void __launch_bounds__(NORM_BACKWARD_THREADS)
norm_backward_kernel(floatX* dx, float* partial, const floatX* dout, const floatX* x, const floatX* __restrict__ weight,
                     const float* mean, const float* rstd, size_t N, size_t C) {
    constexpr int ROUNDS = NORM_BACKWARD_HELD / W;
    constexpr bool AHEAD = ROUNDS == 1;
    __shared__ float2 shared[2][WARP];
    unsigned begin = blockIdx.y * NORM_SLAB, end = min((unsigned)C, begin + NORM_SLAB);
    unsigned outside = gridDim.y > 1 ? (unsigned)C : 0;
    Lanes<W> dweight[ROUNDS], dbias[ROUNDS];
    Held<W> dout_held[ROUNDS], x_held[ROUNDS], dx_held[ROUNDS], next_dout = {}, next_x = {};
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        unsigned c = begin + (k * blockDim.x + threadIdx.x) * W;
        size_t at = blockIdx.x * C + c;
        dweight[k] = dbias[k] = {};
        if (AHEAD && c < end) next_dout = held_load<W>(dout + at), next_x = held_load<W>(x + at);
    }

    unsigned turn = 0;
    for (unsigned row = blockIdx.x; row < (unsigned)N; row += gridDim.x, turn++) {
        size_t first = row * C, next = first + gridDim.x * C;
        float m = CENTERED ? mean[row] : 0.0f, s = rstd[row];
        float2 sums = {}, ignored = {};
        #pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            unsigned c = begin + (k * blockDim.x + threadIdx.x) * W;
            if (c >= end) continue;
            dout_held[k] = AHEAD ? next_dout : held_load<W>(dout + first + c);
            x_held[k] = AHEAD ? next_x : held_load<W>(x + first + c);
            if (AHEAD) dx_held[k] = held_load<W>(dx + first + c);
            NormTerms<W> terms = norm_terms(&sums, dout_held[k], x_held[k], held_load<W>(weight + c), m, s);
            #pragma unroll
            for (int i = 0; i < W; i++) {
                dweight[k].x[i] += terms.d.x[i] * terms.n.x[i];
                dbias[k].x[i] += terms.d.x[i];
            }
            if (AHEAD && row + gridDim.x < (unsigned)N)
                next_dout = held_load<W>(dout + next + c), next_x = held_load<W>(x + next + c);
        }
        for (unsigned c = threadIdx.x * W; c < outside; c += blockDim.x * W)
            if (c < begin || c >= end)
                norm_terms(&sums, held_load<W>(dout + first + c), held_load<W>(x + first + c),
                           held_load<W>(weight + c), m, s);
        sums = row_sums(sums, shared, turn);
        float average_g = CENTERED ? sums.x / (float)C : 0.0f, average_gn = sums.y / (float)C;
        #pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            unsigned c = begin + (k * blockDim.x + threadIdx.x) * W;
            if (c >= end) continue;
            NormTerms<W> terms = norm_terms(&ignored, dout_held[k], x_held[k], held_load<W>(weight + c), m, s);
            Lanes<W> r = held_lanes(AHEAD ? dx_held[k] : held_load<W>(dx + first + c));
            #pragma unroll
            for (int i = 0; i < W; i++) r.x[i] += s * (terms.g.x[i] - average_g - terms.n.x[i] * average_gn);
            lanes_store(dx + first + c, r);
        }
    }

    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        unsigned c = begin + (k * blockDim.x + threadIdx.x) * W;
        if (c >= end) continue;
        group_store(partial + blockIdx.x * C + c, dweight[k]);
        if (CENTERED) group_store(partial + ((size_t)gridDim.x + blockIdx.x) * C + c, dbias[k]);
    }
}

// Blocks of the backward along the rows: as many as the multiprocessors hold at a time, unless there are few rows.
static inline size_t norm_backward_blocks(size_t processors, size_t N, size_t C) {
    size_t blocks = NORM_BACKWARD_THREADS / norm_threads(C, NORM_BACKWARD_HELD);
    return min_size(divide_up(N, NORM_BLOCK_ROWS), min_size(processors, NORM_PROCESSORS) * blocks);
}

static inline size_t layernorm_backward_scratch_bytes(size_t N, size_t C) {
    return 2 * norm_backward_blocks(NORM_PROCESSORS, N, C) * C * sizeof(float);
}

static inline void layernorm_backward(floatX* dx, float* dweight, float* dbias, const floatX* dout, const floatX* x,
                                      const floatX* weight, const float* mean, const float* rstd,
                                      size_t N, size_t C, Stream stream) {
    size_t blocks = norm_backward_blocks(stream->processors, N, C);
    float* partial = (float*)device_scratch(stream, 2 * blocks * C * sizeof(float));
    bool packs = packs_fit(C, dx, dout, x, weight) && packs_fit(C, partial, NULL, NULL, NULL);
    auto kernel = packs ? norm_backward_kernel<PACK, true> : norm_backward_kernel<1, true>;
    kernel<<<norm_grid(blocks, C), norm_threads(C, NORM_BACKWARD_HELD), 0, stream->compute>>>(
        dx, partial, dout, x, weight, mean, rstd, N, C);
    LAUNCH_CHECK();
    add_partial<float><<<dim3((unsigned)divide_up(C, WARP), 2), dim3(WARP, WARP), 0, stream->compute>>>(
        dweight, dbias, partial, blocks, C);
    LAUNCH_CHECK();
}

static inline void rmsnorm_backward(floatX* dx, float* dweight, const floatX* dout, const floatX* x,
                                    const floatX* weight, const float* rstd, size_t N, size_t C, Stream stream) {
    size_t blocks = norm_backward_blocks(stream->processors, N, C);
    float* partial = (float*)device_scratch(stream, blocks * C * sizeof(float));
    bool packs = packs_fit(C, dx, dout, x, weight) && packs_fit(C, partial, NULL, NULL, NULL);
    auto kernel = packs ? norm_backward_kernel<PACK, false> : norm_backward_kernel<1, false>;
    kernel<<<norm_grid(blocks, C), norm_threads(C, NORM_BACKWARD_HELD), 0, stream->compute>>>(
        dx, partial, dout, x, weight, (const float*)NULL, rstd, N, C);
    LAUNCH_CHECK();
    add_partial<float><<<dim3((unsigned)divide_up(C, WARP)), dim3(WARP, WARP), 0, stream->compute>>>(
        dweight, (float*)NULL, partial, blocks, C);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. RoPE
//
// Defines: rope_forward, rope_backward.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.
//
// "RoFormer: Enhanced Transformer with Rotary Position Embedding": the pair (x[i], x[i + D/2]) of every query and key
// head is rotated by an angle that depends on the position and on i.

enum { ROPE_THREADS = 256, ROPE_HEADS = 2 };  // ROPE_HEADS: about how many heads a thread rotates by the same angles

// qkv (N, (H + 2K) D) in place; table (context, D/2, 2); direction 1 forward, -1 back; heads = H + K. A block owns
// a row: thread x owns W pairs i of a head, and goes through the heads y, y + blockDim.y, ... with the angles of
// its i in registers. Reads and writes D elements per head; reads 4 D bytes of the table, which stays in the cache,
// per ROPE_HEADS heads.
template <int W>
static __global__ void __launch_bounds__(ROPE_THREADS)
rope_kernel(floatX* qkv, const float* __restrict__ table, const int32_t* positions, float direction, size_t N,
            size_t heads, size_t row_elements, size_t D) {
    size_t half = D / 2;
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const float* angles = table + (size_t)positions[row] * D;
        for (size_t i = (size_t)threadIdx.x * W; i < half; i += (size_t)blockDim.x * W) {
            Lanes<2 * W> angle;
            if constexpr (W > 1) angle = group_load<2 * W>(angles + 2 * i);
            else angle = {{angles[2 * i], angles[2 * i + 1]}};  // angles may be unaligned
            for (size_t head = threadIdx.y; head < heads; head += blockDim.y) {
                floatX* x = qkv + row * row_elements + head * D + i;
                Lanes<W> a = lanes_load<W>(x), b = lanes_load<W>(x + half);
                #pragma unroll
                for (int j = 0; j < W; j++) {
                    float cosine = angle.x[2 * j], sine = direction * angle.x[2 * j + 1];
                    float first = a.x[j], second = b.x[j];
                    a.x[j] = first * cosine - second * sine;
                    b.x[j] = first * sine + second * cosine;
                }
                lanes_store(x, a);
                lanes_store(x + half, b);
            }
        }
    }
}

static inline void rope_rotate(floatX* qkv, const float* table, const int32_t* positions, float direction,
                               size_t N, size_t H, size_t K, size_t D, Stream stream) {
    bool packs = packs_fit(D / 2, qkv, table, NULL, NULL);
    size_t across = min_size(divide_up(D / 2, packs ? PACK : 1), ROPE_THREADS);
    size_t down = max_size(1, min_size(divide_up(H + K, ROPE_HEADS), ROPE_THREADS / across));
    auto kernel = packs ? rope_kernel<PACK> : rope_kernel<1>;
    kernel<<<grid_blocks(N), dim3((unsigned)across, (unsigned)down), 0, stream->compute>>>(
        qkv, table, positions, direction, N, H + K, (H + 2 * K) * D, D);
    LAUNCH_CHECK();
}

static inline void rope_forward(floatX* qkv, const float* table, const int32_t* positions,
                                size_t N, size_t H, size_t K, size_t D, Stream stream) {
    rope_rotate(qkv, table, positions, 1.0f, N, H, K, D, stream);
}

// The gradient of a rotation is the rotation back.
static inline void rope_backward(floatX* dqkv, const float* table, const int32_t* positions,
                                 size_t N, size_t H, size_t K, size_t D, Stream stream) {
    rope_rotate(dqkv, table, positions, -1.0f, N, H, K, D, stream);
}

// ------------------------------------------------------------------------------------------------
// 4. GELU and SwiGLU
//
// Defines: gelu_forward, gelu_backward, swiglu_forward, swiglu_backward.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh.
//
// A thread takes W outputs at a time. At 2 bytes per element Hopper's memory leaves time for about 35 instructions
// per element, so the division is approximate: within 2 units in the last place, and 0 where the result is below
// 2^-126.

static __device__ inline float sigmoid_fast(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// GELU of x is x times this: sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
static __device__ inline float gelu_sigmoid(float x) {
    return sigmoid_fast(2.0f * 0.7978845608f * (x + 0.044715f * x * x * x));
}

// Moves 2 elements per output.
template <int W>
static __global__ void gelu_forward_kernel(floatX* out, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> x = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) x.x[j] *= gelu_sigmoid(x.x[j]);
    lanes_store<W>(out + i, x);
}

// Moves 3 elements per output. din and dout may be the same array: a thread reads what it owns before it writes it.
template <int W>
static __global__ void gelu_backward_kernel(floatX* din, const floatX* dout, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> d = lanes_load<W>(dout + i), in_lanes = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        float x = in_lanes.x[j], s = gelu_sigmoid(x), du = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
        d.x[j] *= s + 2.0f * x * s * (1.0f - s) * du;
    }
    lanes_store<W>(din + i, d);
}

// A block owns a row. Moves 3 elements per output.
template <int W>
static __global__ void swiglu_forward_kernel(floatX* out, const floatX* in, size_t N, size_t F) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const floatX *gate = in + row * 2 * F, *up = gate + F;
        for (size_t f = (size_t)threadIdx.x * W; f < F; f += (size_t)blockDim.x * W) {
            Lanes<W> g = lanes_load<W>(gate + f), u = lanes_load<W>(up + f);
            #pragma unroll
            for (int j = 0; j < W; j++) u.x[j] *= g.x[j] * sigmoid_fast(g.x[j]);
            lanes_store<W>(out + row * F + f, u);
        }
    }
}

// A block owns a row. Moves 5 elements per element of dout.
template <int W>
static __global__ void swiglu_backward_kernel(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const floatX *gate = in + row * 2 * F, *up = gate + F;
        floatX *dgate = din + row * 2 * F, *dup = dgate + F;
        for (size_t f = (size_t)threadIdx.x * W; f < F; f += (size_t)blockDim.x * W) {
            Lanes<W> g = lanes_load<W>(gate + f), u = lanes_load<W>(up + f), d = lanes_load<W>(dout + row * F + f);
            #pragma unroll
            for (int j = 0; j < W; j++) {
                float s = sigmoid_fast(g.x[j]), dd = d.x[j];
                d.x[j] = dd * u.x[j] * s * (1.0f + g.x[j] * (1.0f - s));
                u.x[j] = dd * g.x[j] * s;
            }
            lanes_store<W>(dgate + f, d);
            lanes_store<W>(dup + f, u);
        }
    }
}

static inline void gelu_forward(floatX* out, const floatX* in, size_t n, Stream stream) {
    bool packs = packs_fit(n, out, in, NULL, NULL);
    auto kernel = packs ? gelu_forward_kernel<PACK> : gelu_forward_kernel<1>;
    kernel<<<flat_blocks(n, packs ? PACK : 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

static inline void gelu_backward(floatX* din, const floatX* dout, const floatX* in, size_t n, Stream stream) {
    bool packs = packs_fit(n, din, dout, in, NULL);
    auto kernel = packs ? gelu_backward_kernel<PACK> : gelu_backward_kernel<1>;
    kernel<<<flat_blocks(n, packs ? PACK : 1), FLAT_THREADS, 0, stream->compute>>>(din, dout, in, n);
    LAUNCH_CHECK();
}

static inline void swiglu_forward(floatX* out, const floatX* in, size_t N, size_t F, Stream stream) {
    bool packs = packs_fit(F, out, in, NULL, NULL);
    unsigned blocks = grid_blocks(N), threads = block_threads(divide_up(F, packs ? PACK : 1), FLAT_THREADS);
    auto kernel = packs ? swiglu_forward_kernel<PACK> : swiglu_forward_kernel<1>;
    kernel<<<blocks, threads, 0, stream->compute>>>(out, in, N, F);
    LAUNCH_CHECK();
}

static inline void swiglu_backward(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F,
                                   Stream stream) {
    bool packs = packs_fit(F, din, dout, in, NULL);
    unsigned blocks = grid_blocks(N), threads = block_threads(divide_up(F, packs ? PACK : 1), FLAT_THREADS);
    auto kernel = packs ? swiglu_backward_kernel<PACK> : swiglu_backward_kernel<1>;
    kernel<<<blocks, threads, 0, stream->compute>>>(din, dout, in, N, F);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 5. Fused matmuls
//
// Defines: matmul_gelu_forward, gelu_recompute, matmul_gelu_backward_input.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh, llmtrain/ops/base.h, llmtrain/ops/dtypes.h,
// llmtrain/ops/matmul.cuh, section 4.
//
// Two kernels unless the library has one for both, which saves one read or write of (M, N).

// pre (M, N) = in (M, K) weight (N, K)^T + bias (N) or NULL; out (M, N) = gelu(pre). If fused, out is the GELU of the
// float sums, and pre is those sums rounded to floatX.
static inline void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* in, const floatX* weight,
                                       const floatX* bias, size_t M, size_t N, size_t K, Stream stream) {
    if (matmul_state(stream)->fuse_gelu &&
        matmul_library(MATMUL_GELU_FORWARD, out, weight, in, bias, pre, false, M, N, K, stream)) return;
    matmul_forward(pre, in, weight, bias, M, N, K, stream);
    gelu_forward(out, pre, M * N, stream);
}

// Recomputes `out` of matmul_gelu_forward, bit for bit: if that was fused, from the float sums, since pre is rounded.
static inline void gelu_recompute(floatX* out, floatX* pre, const floatX* in, const floatX* weight, const floatX* bias,
                                  size_t M, size_t N, size_t K, Stream stream) {
    if (matmul_state(stream)->fuse_gelu) matmul_gelu_forward(out, pre, in, weight, bias, M, N, K, stream);
    else gelu_forward(out, pre, M * N, stream);
}

// The gradient through a matmul and the GELU before it: din (M, K) = (dout (M, N) weight (N, K)) * dGELU/dx at
// pre (M, K).
static inline void matmul_gelu_backward_input(floatX* din, const floatX* dout, const floatX* weight, const floatX* pre,
                                              size_t M, size_t N, size_t K, Stream stream) {
    if (matmul_state(stream)->fuse_gelu &&
        matmul_library(MATMUL_GELU_BACKWARD_INPUT, din, weight, dout, NULL, pre, false, M, N, K, stream)) return;
    matmul_backward_input(din, dout, weight, M, N, K, stream);
    gelu_backward(din, din, pre, M * K, stream);
}

// ------------------------------------------------------------------------------------------------
// 6. Dropout
//
// Defines: dropout_apply.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh, llmtrain/ops/base.h.

// A thread owns W elements; moves 2 per output. random4's ten rounds, shared by 4 elements, are some 30 instructions
// per element, about what memory leaves time for; only with W = 1 does every element make a call of its own.
template <int W>
static __global__ void dropout_kernel(floatX* out, const floatX* in, uint32_t threshold, float scale, uint64_t seed,
                                      uint64_t site, uint64_t first, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> x = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        uint32_t random = group_random<W>(seed, RANDOM_DROPOUT, site, first + i, j);
        x.x[j] = random < threshold ? 0.0f : x.x[j] * scale;
    }
    lanes_store<W>(out + i, x);
}

static inline void dropout_apply(floatX* out, const floatX* in, float p, uint64_t seed, uint64_t site, uint64_t first,
                                 size_t n, Stream stream) {
    uint32_t threshold = (uint32_t)(p * 4294967296.0);  // dropped if the random bits lie below
    float scale = 1.0f / (1.0f - p);
    bool packs = packs_fit(n, out, in, NULL, NULL) && first % 4 == 0;
    auto kernel = packs ? dropout_kernel<PACK> : dropout_kernel<1>;
    kernel<<<flat_blocks(n, packs ? PACK : 1), FLAT_THREADS, 0, stream->compute>>>(
        out, in, threshold, scale, seed, site, first, n);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 7. Classifier
//
// Defines: classifier.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh, llmtrain/ops/leaves.cuh.
//
// A block owns a row of logits. It reads the row once for maximum and sum together (leaves.cuh, section 3). The second
// reading, for the gradient, goes from the end to the beginning, so that it starts with what the cache still holds: the
// rows being worked on are some 30 MB, which is what the L2 cache keeps. So memory moves 2 elements per logit, and 1 if
// only the loss is wanted.

enum { CLASSIFIER_THREADS = SOFTMAX_THREADS };

template <int W>
static __global__ void __launch_bounds__(CLASSIFIER_THREADS) classifier_kernel(
        floatX* logits, float* losses, const int32_t* targets, float dloss, const float* weights, size_t N, int V,
        int Vp) {
    __shared__ float shared[WARP];
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        floatX* x = logits + row * (size_t)Vp;
        int target = targets[row];
        if (target < 0) {
            if (threadIdx.x == 0) losses[row] = 0.0f;
            if (dloss != 0.0f) softmax_zero<W>(x, Vp);
            continue;
        }
        float target_logit = float_of(x[target]);
        Softmax softmax = softmax_of<W, true>(x, V, Vp, shared);
        if (threadIdx.x == 0) losses[row] = softmax_loss(softmax, target_logit);
        if (dloss == 0.0f) continue;
        float gradient = weights ? dloss * weights[row] : dloss;
        softmax_gradient<W>(x, softmax, target, target_logit, gradient, V, Vp);
    }
}

static inline void classifier(floatX* logits, float* losses, const int32_t* targets, float dloss, const float* weights,
                              size_t N, size_t V, size_t Vp, Stream stream) {
    bool packs = packs_fit(Vp, logits, NULL, NULL, NULL);
    unsigned blocks = grid_blocks(N), threads = block_threads(divide_up(Vp, packs ? PACK : 1), CLASSIFIER_THREADS);
    auto kernel = packs ? classifier_kernel<PACK> : classifier_kernel<1>;
    kernel<<<blocks, threads, 0, stream->compute>>>(logits, losses, targets, dloss, weights, N, (int)V, (int)Vp);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 8. Scratch
//
// Defines: scratch_bytes.
// Needs: llmtrain/ops/types.h, llmtrain/ops/blocks.cuh, llmtrain/ops/base.h, llmtrain/ops/dtypes.h,
// llmtrain/ops/matmul.cuh, llmtrain/ops/qk_norm.cuh, llmtrain/ops/vectors.cuh, sections 1 and 2.

// Scratch bytes that are enough for every operation on N rows of C channels.
static inline size_t scratch_bytes(size_t N, size_t C) {
    size_t most = max_size(matmul_scratch_bytes(), sum_of_squares_scratch_bytes());
    most = max_size(most, embedding_backward_scratch_bytes(N, C));
    most = max_size(most, qk_norm_backward_scratch_bytes(N));
    return max_size(most, layernorm_backward_scratch_bytes(N, C));
}

#endif  // LLMTRAIN_KERNELS_CUH
