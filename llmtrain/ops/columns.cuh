// columns.cuh: some columns of a matrix, in CUDA: the functions of columns.h.
//
// Defines: columns_add, columns_scale.

#ifndef LLMTRAIN_COLUMNS_CUH
#define LLMTRAIN_COLUMNS_CUH

#include "blocks.cuh"

enum { COLUMNS_THREADS = 256 };

// narrow (N, cols), wide (N, width) from its column `first` on. With ADD wide += scale * narrow, otherwise narrow =
// scale * wide. A block owns a row, a thread W columns at a time. Moves 3 elements per column, or 2. Bound by memory.
template <int W, bool ADD>
static __global__ void __launch_bounds__(COLUMNS_THREADS)
columns_kernel(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N, size_t width) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x)
        for (size_t c = (size_t)threadIdx.x * W; c < cols; c += (size_t)blockDim.x * W) {
            size_t narrow = row * cols + c, wide = row * width + first + c;
            Lanes<W> x = lanes_load<W>(in + (ADD ? narrow : wide)), sum = {};
            if (ADD) sum = lanes_load<W>(out + wide);
            #pragma unroll
            for (int j = 0; j < W; j++) x.x[j] = ADD ? fmaf(scale, x.x[j], sum.x[j]) : scale * x.x[j];
            lanes_store(out + (ADD ? wide : narrow), x);
        }
}

template <bool ADD>
static inline void columns_move(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N,
                                size_t width, Stream stream) {
    bool packs = packs_fit(cols, out, in, NULL, NULL) && first % PACK == 0 && width % PACK == 0;
    unsigned threads = block_threads(divide_up(cols, packs ? PACK : 1), COLUMNS_THREADS);
    auto kernel = packs ? columns_kernel<PACK, ADD> : columns_kernel<1, ADD>;
    kernel<<<grid_blocks(N), threads, 0, stream->compute>>>(out, in, scale, first, cols, N, width);
    LAUNCH_CHECK();
}

static inline void columns_add(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N,
                               size_t width, Stream stream) {
    columns_move<true>(out, in, scale, first, cols, N, width, stream);
}

static inline void columns_scale(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N,
                                 size_t width, Stream stream) {
    columns_move<false>(out, in, scale, first, cols, N, width, stream);
}

#endif  // LLMTRAIN_COLUMNS_CUH
