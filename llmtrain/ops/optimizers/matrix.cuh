// matrix.cuh: the operations of matrix.h, section 1, on the device; the algorithms are there.
//
// Matmuls of floats run on cuBLASLt where it takes them, else on the plain kernel of matmul.cuh. Muon's round their
// operands to TF32 in 16-bit builds, and in FP32 builds with --tf32: 3 bits more than the BF16 that its authors use.
// The others are in float: with a rank far below the matrix's sides they cost little.
//
// Defines: matrix_multiply, matrix_combine, matrix_normalize, matrix_randomize, matrix_orthonormalize.

#ifndef LLMTRAIN_OPTIMIZERS_MATRIX_CUH
#define LLMTRAIN_OPTIMIZERS_MATRIX_CUH

#include "../matmul.cuh"
#include "matrix.h"

static inline void matrix_multiply(float* out, const float* a, const float* b, MatrixForm form, bool rounds, size_t M,
                                   size_t N, size_t K, Stream stream) {
    bool tf32 = rounds && (stream->tf32 || !FLOATX_IS_FLOAT);
    if (form == MATRIX_NT) matmul_floats(MATMUL_FORWARD, tf32, out, b, a, M, N, K, stream);
    else if (form == MATRIX_NN) matmul_floats(MATMUL_BACKWARD_INPUT, tf32, out, b, a, M, K, N, stream);
    else matmul_floats(MATMUL_BACKWARD_WEIGHT, tf32, out, b, a, K, M, N, stream);
}

// A thread owns an element, and moves 12 bytes.
static __global__ void matrix_combine_kernel(float* out, Combination kind, float alpha, const float* x, float beta,
                                             const float* y, size_t n) {
    size_t i = flat_index(1);
    if (i < n) out[i] = combined(kind, alpha, x[i], beta, y[i]);
}

static inline void matrix_combine(float* out, Combination kind, float alpha, const float* x, float beta, const float* y,
                                  size_t n, Stream stream) {
    matrix_combine_kernel<<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(out, kind, alpha, x, beta, y, n);
    LAUNCH_CHECK();
}

// The same, with alpha from a sum of squares that is only on the device.
static __global__ void matrix_normalize_kernel(float* out, const float* x, const double* squares, float epsilon,
                                               float rest, const float* y, size_t n) {
    size_t i = flat_index(1);
    if (i < n) out[i] = combined(COMBINE_SUM, 1.0f / ((float)sqrt(*squares) + epsilon), x[i], rest, y[i]);
}

static inline void matrix_normalize(float* out, const float* x, const double* squares, float epsilon, float rest,
                                    const float* y, size_t n, Stream stream) {
    matrix_normalize_kernel<<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(out, x, squares, epsilon, rest, y,
                                                                                    n);
    LAUNCH_CHECK();
}

static __global__ void matrix_randomize_kernel(float* x, uint64_t seed, uint64_t step, size_t first, size_t n) {
    size_t i = flat_index(1);
    if (i < n) x[i] = (float)(int32_t)random_bits(seed, RANDOM_BASIS, step, first + i) * 0x1p-31f;
}

static inline void matrix_randomize(float* x, uint64_t seed, uint64_t step, size_t first, size_t n, Stream stream) {
    matrix_randomize_kernel<<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(x, seed, step, first, n);
    LAUNCH_CHECK();
}

// One block makes a whole basis, since each row needs those before it: the block scales row j, and then its warps
// remove the part along row j from the later rows. Each of the two passes moves 8 r^2 d bytes, most of them from the L2
// cache, at the rate of one multiprocessor: 128 vectors of 4,096 elements take milliseconds. That is nothing for
// GaLore, which does it in one update out of 200; LDAdam does it once per matrix and update.
static __global__ void matrix_orthonormalize_kernel(float* x, size_t r, size_t d) {
    __shared__ float shared[WARP];
    size_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t j = 0; j < r; j++) {
            float *q = x + j * d, squares = 0.0f;
            for (size_t i = threadIdx.x; i < d; i += blockDim.x) squares += q[i] * q[i];
            squares = block_sum(squares, shared);
            float factor = squares > 0.0f ? 1.0f / sqrtf(squares) : 0.0f;
            for (size_t i = threadIdx.x; i < d; i += blockDim.x) q[i] *= factor;
            __syncthreads();
            for (size_t row = j + 1 + warp; row < r; row += warps) {
                float *later = x + row * d, along = 0.0f;
                for (size_t i = lane; i < d; i += WARP) along += q[i] * later[i];
                along = warp_sum(along);
                for (size_t i = lane; i < d; i += WARP) later[i] -= along * q[i];
            }
            __syncthreads();
        }
    }
}

static inline void matrix_orthonormalize(float* x, size_t r, size_t d, Stream stream) {
    matrix_orthonormalize_kernel<<<1, block_threads(max_size(d, r * WARP), 1024), 0, stream->compute>>>(x, r, d);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_OPTIMIZERS_MATRIX_CUH
