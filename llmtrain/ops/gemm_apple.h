// gemm_apple.h: matmuls of floats by Accelerate, the library of macOS: only it may use the matrix unit of Apple's
// processors.
//
// Its sums have an order of their own, which Apple does not document: bits differ from those of every other kernel, and
// may differ between machines and versions of macOS. So only `make GEMM=accelerate` selects it. The portable kernel
// multiplies what it does not support (16-bit operands, sizes beyond int).
//
// The library is found when the program starts, not linked: this header needs no framework.

#ifndef LLMTRAIN_GEMM_APPLE_H
#define LLMTRAIN_GEMM_APPLE_H

#include "gemm_portable.h"

#include <dlfcn.h>
#include <limits.h>

#define GEMM_ACCELERATE "/System/Library/Frameworks/Accelerate.framework/Accelerate"

// cblas_sgemm of the Basic Linear Algebra Subprograms: C = alpha op(A) op(B) + beta C. The first three arguments are
// CBLAS_ORDER and CBLAS_TRANSPOSE.
typedef void (*GemmCblas)(int order, int a_transposed, int b_transposed, int M, int N, int K, float alpha,
                          const float* A, int a_stride, const float* B, int b_stride, float beta, float* C,
                          int c_stride);
enum { CBLAS_ROWS = 101, CBLAS_AS_STORED = 111, CBLAS_TRANSPOSED = 112 };

// One for the process, even if several of its files include this one.
__attribute__((weak)) GemmCblas gemm_cblas;

static inline bool gemm_has_accelerate(void) {
    void* library = gemm_cblas ? NULL : dlopen(GEMM_ACCELERATE, RTLD_NOW);
    void* function = library ? dlsym(library, "cblas_sgemm") : NULL;
    if (function) memcpy(&gemm_cblas, &function, sizeof gemm_cblas);
    return gemm_cblas != NULL;
}

// Only used if it is asked for by name.
static inline bool gemm_never(void) { return false; }

// Multiplies with Accelerate; false if it does not support the operands.
static inline bool gemm_by_cblas(const GemmProblem* p) {
    size_t longest = max_size(max_size(p->M, p->N), max_size(p->K, p->out_stride));
    longest = max_size(longest, max_size(p->a.stride, p->b.stride));
    if (p->a.type != DTYPE_F32 || p->b.type != DTYPE_F32 || p->out_type != DTYPE_F32 || longest > INT_MAX) return false;
    float* out = (float*)p->out;
    for (size_t i = 0; p->bias && i < p->M; i++)
        for (size_t j = 0; j < p->N; j++) {
            float* sum = &out[i * p->out_stride + j];
            *sum = (p->accumulate ? *sum : 0) + gemm_load(p->bias, p->bias_type, j);
        }
    gemm_cblas(CBLAS_ROWS, p->a.k_contiguous ? CBLAS_AS_STORED : CBLAS_TRANSPOSED,
               p->b.k_contiguous ? CBLAS_TRANSPOSED : CBLAS_AS_STORED, (int)p->M, (int)p->N, (int)p->K, 1,
               (const float*)(const void*)p->a.data, (int)p->a.stride, (const float*)(const void*)p->b.data,
               (int)p->b.stride, p->accumulate || p->bias ? 1 : 0, out, (int)p->out_stride);
    return true;
}

// For what Accelerate does not support: the functions of gemm_portable.
static const GemmKernel gemm_accelerate = {
    "accelerate", false, false, GEMM_PORTABLE_ROWS, GEMM_PORTABLE_COLS, 384, 384, 1, gemm_pack_portable,
    gemm_multiply_portable, NULL, gemm_start_portable, gemm_store_portable, gemm_dot_portable, NULL, NULL};

#endif  // LLMTRAIN_GEMM_APPLE_H
