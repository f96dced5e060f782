// columns.h: some columns of a matrix, in plain C: the specification of columns.cuh, and the CPU backend.
//
// A pair of LoRA (ranks/adapters.h) belongs to some of a layer's outputs: the queries, say, of queries, keys and values.

#ifndef LLMTRAIN_COLUMNS_H
#define LLMTRAIN_COLUMNS_H

#include "base.h"

LLMTRAIN_CPU_BEGIN

// out (N, width), in its columns from `first` on, += scale * in (N, cols).
static inline void columns_add(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N,
                               size_t width, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        floatX* to = out + row * width + first;
        const floatX* from = in + row * cols;
        for (size_t c = 0; c < cols; c++) to[c] = floatX_of(float_of(to[c]) + scale * float_of(from[c]));
    }
}

// out (N, cols) = scale * the columns of in (N, width) from `first` on.
static inline void columns_scale(floatX* out, const floatX* in, float scale, size_t first, size_t cols, size_t N,
                                 size_t width, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++)
        for (size_t c = 0; c < cols; c++)
            out[row * cols + c] = floatX_of(scale * float_of(in[row * width + first + c]));
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_COLUMNS_H
