#ifndef LLMTRAIN_KERNELS_CUH
#define LLMTRAIN_KERNELS_CUH
#include "device.cuh"
#include "matmul.cuh"
#include "attention.cuh"
#include "kernels_a.cuh"
#include "kernels_b.cuh"
static inline size_t scratch_bytes(size_t N, size_t C, size_t Q, size_t F, size_t Vp, size_t parameters) {
    (void)N; (void)C; (void)Q; (void)F; (void)Vp; (void)parameters;
    return 64 << 20;
}
#endif
