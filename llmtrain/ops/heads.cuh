// heads.cuh: cuts rows of heads into parts, in CUDA: the functions of heads.h, where the order of the parts is.
//
// Defines: heads_split, heads_join.

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

static inline void heads_move(floatX* out, const floatX* in, bool join, size_t parts, size_t N, size_t H, size_t K,
                              size_t D, Stream stream) {
    bool packs = packs_fit(D, out, in, NULL, NULL);
    size_t across = min_size(divide_up(D, packs ? PACK : 1), HEADS_THREADS);
    size_t down = max_size(1, min_size(divide_up(H + 2 * K, HEADS_EACH), HEADS_THREADS / across));
    auto kernel = packs ? heads_kernel<PACK> : heads_kernel<1>;
    kernel<<<grid_blocks(N), dim3((unsigned)across, (unsigned)down), 0, stream->compute>>>(
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

#endif  // LLMTRAIN_HEADS_CUH
