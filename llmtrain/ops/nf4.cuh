// nf4.cuh: weights in 4 bits, dequantized in CUDA: the function of nf4.h, where the format is. Both give the same bits.
//
// Defines: nf4_dequantize.

#ifndef LLMTRAIN_NF4_CUH
#define LLMTRAIN_NF4_CUH

#include "blocks.cuh"
#include "nf4.h"

// A thread owns W weights, which share a scale and lie in W / 2 bytes. The table is in shared memory: each of its 16
// numbers is in a bank of its own, so whatever codes a warp looks up, there is no conflict. Reads half a byte per
// weight, and scales, which the threads of a block of weights and the blocks around it find in a cache; writes an
// element. Bound by memory.
template <int W>
static __global__ void __launch_bounds__(FLAT_THREADS)
nf4_dequantize_kernel(floatX* __restrict__ out, Nf4 q, Nf4Table table, size_t first, size_t n) {
    __shared__ float numbers[NF4_CODES];
    if (threadIdx.x < NF4_CODES) numbers[threadIdx.x] = table.values[threadIdx.x];
    __syncthreads();
    size_t i = flat_index(W);
    if (i >= n) return;
    const float scale = nf4_scale(&q, (first + i) / NF4_BLOCK);
    Lanes<W> x;
    if constexpr (W == 1) {
        x.x[0] = numbers[nf4_code(q.codes, first + i)] * scale;
    } else {
        static_assert(W == 4 || W == 8, "the codes of a thread fill a type");
        const uint8_t* at = q.codes + (first + i) / 2;
        const uint32_t codes = W == 8 ? *(const uint32_t*)at : *(const uint16_t*)at;
        #pragma unroll
        for (int j = 0; j < W; j++) x.x[j] = numbers[codes >> (8 * (j / 2) + (j % 2 ? 0 : 4)) & 15] * scale;
    }
    lanes_store<W>(out + i, x);
}

static inline void nf4_dequantize(floatX* out, const Nf4* q, size_t first, size_t n, Stream stream) {
    bool packs = packs_fit(n, out, NULL, NULL, NULL) && first % PACK == 0 && (uintptr_t)q->codes % (PACK / 2) == 0;
    auto kernel = packs ? nf4_dequantize_kernel<PACK> : nf4_dequantize_kernel<1>;
    if (n == 0) return;
    kernel<<<flat_blocks(n, packs ? PACK : 1), FLAT_THREADS, 0, stream->compute>>>(out, *q, NF4_TABLE, first, n);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_NF4_CUH
