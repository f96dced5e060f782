// vectors.h: operations on whole vectors of parameters and gradients, in plain C: the specification of the kernels of
// the same names in vectors.cuh, and the CPU backend. Operations of the model's layers are in kernels_cpu.h, and its
// conventions hold here.

#ifndef LLMTRAIN_VECTORS_H
#define LLMTRAIN_VECTORS_H

#include "base.h"

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 1. Sums
//
// They are doubles in device memory, from which the host reads them once per step.

// out (1) = the sum of squares of x (n). The vector is cut into a fixed number of pieces, each summed by one thread.
static inline void sum_of_squares(double* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    enum { PIECES = 256 };
    double partial[PIECES], total = 0.0;
    #pragma omp parallel for
    for (size_t piece = 0; piece < PIECES; piece++) {
        size_t first = n / PIECES * piece + min_size(piece, n % PIECES);
        size_t end = first + n / PIECES + (piece < n % PIECES);
        partial[piece] = VECTOR_SUM_DOUBLE(i, end - first, (double)x[first + i] * (double)x[first + i]);
    }
    for (size_t piece = 0; piece < PIECES; piece++) total += partial[piece];
    *out = total;
}

// Adds factor * (the sum of x (n)) to out (1).
static inline void sum_scaled(double* out, const float* x, double factor, size_t n, Stream stream) {
    (void)stream;
    *out += factor * VECTOR_SUM_DOUBLE(i, n, (double)x[i]);
}

// out (1) = the checksum of x (n), elements `first` to first + n - 1 of the flat vector: the checksums of parts add up
// to that of the whole, modulo 2^64.
static inline void vector_checksum(uint64_t* out, const floatX* x, size_t first, size_t n, Stream stream) {
    (void)stream;
    uint64_t sum = 0;
    #pragma omp parallel for simd reduction(+:sum)
    for (size_t i = 0; i < n; i++) sum += checksum_element(x[i], first + i);
    *out = sum;
}

// ------------------------------------------------------------------------------------------------
// 2. Fixed point
//
// Sums of integers: neither order nor grouping changes a bit.

// sums (n) += x (n) * scale, rounded to the nearest. An element outside of +-limit, or NaN, adds nothing and sets *bad
// to 1.
static inline void exact_add(int64_t* sums, double* bad, const float* x, double scale, double limit, size_t n,
                             Stream stream) {
    (void)stream;
    size_t outside = 0;
    #pragma omp parallel for simd reduction(+:outside)
    for (size_t i = 0; i < n; i++) {
        bool inside = fabs((double)x[i]) <= limit;
        sums[i] += llrint(inside ? (double)x[i] * scale : 0.0);
        outside += !inside;
    }
    if (outside > 0) *bad = 1.0;
}

// sums += x, both (n) in fixed point.
static inline void exact_merge(int64_t* sums, const int64_t* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) sums[i] += x[i];
}

// out (n) = sums (n) * quantum.
static inline void exact_read(float* out, const int64_t* sums, double quantum, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = (float)((double)sums[i] * quantum);
}

// ------------------------------------------------------------------------------------------------
// 3. Casts, add

static inline void cast_to_float(float* out, const floatX* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = float_of(in[i]);
}

static inline void cast_from_float(floatX* out, const float* in, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = floatX_of(in[i]);
}

// out += x, both (n).
static inline void vector_add(float* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += x[i];
}

// The same for x in floatX.
static inline void vector_add_stored(float* out, const floatX* x, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] += float_of(x[i]);
}

// out = in + branch, all (n): what a norm stores as the residual, without the norm.
static inline void residual_forward(floatX* out, const floatX* in, const floatX* branch, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = floatX_of(float_of(in[i]) + float_of(branch[i]));
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_VECTORS_H
