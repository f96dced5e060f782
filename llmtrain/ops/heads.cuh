// heads.cuh: cuts rows of heads into parts, and repeats heads, in CUDA: the functions of heads.h, where the orders are.
//
// Defines: heads_split, heads_join, heads_repeat, heads_sum.

#ifndef LLMTRAIN_HEADS_CUH
#define LLMTRAIN_HEADS_CUH

#include "blocks.cuh"

enum { HEADS_THREADS = 256, HEADS_EACH = 2 };  // heads per thread, about

// Copies whole (N, parts (queries + 2 keys), D) to cut (parts, N, queries + 2 keys, D), with `join` cut to whole;
// queries, keys: heads of a part. A block owns a row: thread x owns W elements of a head, and goes through the heads
// y, y + blockDim.y, ... of all parts. Reads and writes each element once. Bound by memory.
template <int W>
static __global__ void __launch_bounds__(HEADS_THREADS)
heads_kernel(floatX* __restrict__ out, const floatX* __restrict__ in, bool join, unsigned parts, size_t N,
             unsigned queries, unsigned keys, size_t D) {
    unsigned heads = queries + 2 * keys;  // of a part
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        for (unsigned i = threadIdx.y; i < parts * heads; i += blockDim.y) {
            unsigned part = i / heads, head = i % heads;
            // Those of its kind: their number in a part, and that of the heads before them.
            unsigned count = head < queries ? queries : keys;
            unsigned before = head < queries ? 0 : head < queries + keys ? queries : queries + keys;
            size_t whole = (row * parts * heads + parts * before + part * count + head - before) * D;
            size_t cut = ((part * N + row) * heads + head) * D;
            floatX* to = out + (join ? whole : cut);
            const floatX* from = in + (join ? cut : whole);
            for (size_t d = (size_t)threadIdx.x * W; d < D; d += (size_t)blockDim.x * W)
                group_store<W>(to + d, group_load<W>(from + d));
        }
    }
}

// A block for a row of heads.
static inline dim3 heads_threads(size_t heads, size_t D, bool packs) {
    size_t across = min_size(divide_up(D, packs ? PACK : 1), HEADS_THREADS);
    size_t down = max_size(1, min_size(divide_up(heads, HEADS_EACH), HEADS_THREADS / across));
    return dim3((unsigned)across, (unsigned)down);
}

static inline void heads_move(floatX* out, const floatX* in, bool join, size_t parts, size_t N, size_t H, size_t K,
                              size_t D, Stream stream) {
    bool packs = packs_fit(D, out, in, NULL, NULL);
    auto kernel = packs ? heads_kernel<PACK> : heads_kernel<1>;
    kernel<<<grid_blocks(N), heads_threads(H + 2 * K, D, packs), 0, stream->compute>>>(
        out, in, join, (unsigned)parts, N, (unsigned)(H / parts), (unsigned)(K / parts), D);
    LAUNCH_CHECK();
}

static inline void heads_split(floatX* out, const floatX* in, size_t parts, size_t N, size_t H, size_t K, size_t D,
                               Stream stream) {
    heads_move(out, in, false, parts, N, H, K, D, stream);
}

static inline void heads_join(floatX* out, const floatX* in, size_t parts, size_t N, size_t H, size_t K, size_t D,
                              Stream stream) {
    heads_move(out, in, true, parts, N, H, K, D, stream);
}

// Rows few (N, queries + keys, D) and many (N, queries + keys copies, D), where each head after the queries is there
// `copies` times; keys: heads of keys and of values. With SUM few has the sums of the copies in many, added in order;
// otherwise many has the copies of few. A block owns a row: thread x owns W elements of a head, and goes through the
// heads y, y + blockDim.y, ... of few. Reads and writes each element once. Bound by memory.
template <int W, bool SUM>
static __global__ void __launch_bounds__(HEADS_THREADS)
heads_copies_kernel(floatX* __restrict__ out, const floatX* __restrict__ in, unsigned copies, size_t N,
                    unsigned queries, unsigned keys, size_t D) {
    unsigned heads = queries + keys;  // of few
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        for (unsigned head = threadIdx.y; head < heads; head += blockDim.y) {
            bool query = head < queries;
            unsigned count = query ? 1 : copies, first = query ? head : queries + (head - queries) * copies;
            size_t few = (row * heads + head) * D, many = (row * (queries + (size_t)keys * copies) + first) * D;
            floatX* to = out + (SUM ? few : many);
            const floatX* from = in + (SUM ? many : few);
            for (size_t d = (size_t)threadIdx.x * W; d < D; d += (size_t)blockDim.x * W) {
                if (SUM && !query) {
                    Lanes<W> sum = {};
                    #pragma unroll 1  // more would spill
                    for (unsigned copy = 0; copy < count; copy++)
                        sum = lanes_add(sum, lanes_load<W>(from + copy * D + d));
                    lanes_store(to + d, sum);
                } else {
                    Group<floatX, W> x = group_load<W>(from + d);
                    for (unsigned copy = 0; copy < count; copy++) group_store<W>(to + copy * D + d, x);
                }
            }
        }
    }
}

template <bool SUM>
static inline void heads_copies(floatX* out, const floatX* in, size_t copies, size_t N, size_t H, size_t K, size_t D,
                                Stream stream) {
    bool packs = packs_fit(D, out, in, NULL, NULL);
    auto kernel = packs ? heads_copies_kernel<PACK, SUM> : heads_copies_kernel<1, SUM>;
    kernel<<<grid_blocks(N), heads_threads(H + 2 * K, D, packs), 0, stream->compute>>>(
        out, in, (unsigned)copies, N, (unsigned)H, (unsigned)(2 * K), D);
    LAUNCH_CHECK();
}

static inline void heads_repeat(floatX* out, const floatX* in, size_t copies, size_t N, size_t H, size_t K, size_t D,
                                Stream stream) {
    heads_copies<false>(out, in, copies, N, H, K, D, stream);
}

static inline void heads_sum(floatX* out, const floatX* in, size_t copies, size_t N, size_t H, size_t K, size_t D,
                             Stream stream) {
    heads_copies<true>(out, in, copies, N, H, K, D, stream);
}

#endif  // LLMTRAIN_HEADS_CUH
