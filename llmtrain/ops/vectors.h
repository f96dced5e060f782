// vectors.h: operations on whole vectors of parameters and gradients, in plain C: the specification of the kernels of
// the same names in vectors.cuh, and the CPU backend. Operations of the model's layers are in kernels_cpu.h, and its
// conventions hold here.

#ifndef LLMTRAIN_VECTORS_H
#define LLMTRAIN_VECTORS_H

#include "base.h"
#include "exact_sum.h"

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 1. Sums
//
// exact_sum and exact_sum_squares are for the loss and the gradient's norm, which the host reads once per step;
// sum_of_squares, of any range, for optimizers of whole matrices.

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

// *out += what terms (n), at most EXACT_TERMS, add to a window.
static inline void exact_sum_window(ExactSum* out, const double* terms, size_t n, int window) {
    uint64_t limb0 = 0, limb1 = 0, limb2 = 0, limb3 = 0, limb4 = 0, outside = 0;
    #pragma omp simd reduction(+:limb0, limb1, limb2, limb3, limb4) reduction(|:outside)
    for (size_t i = 0; i < n; i++)
        exact_add_term(&limb0, &limb1, &limb2, &limb3, &limb4, &outside, exact_term(terms[i], window));
    ExactWindow sum = {{limb0, limb1, limb2, limb3, limb4}, outside};
    exact_merge_window(&out->windows[window], &sum);
}

// *out += the sum of terms (n), at most EXACT_TERMS.
static inline void exact_sum_terms(ExactSum* out, const double* terms, size_t n) {
    uint64_t limb0 = 0, limb1 = 0, limb2 = 0, unusual = 0;
    #pragma omp simd reduction(|:unusual)
    for (size_t i = 0; i < n; i++) unusual |= !(fabs(terms[i]) < EXACT_USUAL);
    if (unusual) {
        exact_sum_window(out, terms, n, 0);
        exact_sum_window(out, terms, n, 1);
        return;
    }
    #pragma omp simd reduction(+:limb0, limb1, limb2)
    for (size_t i = 0; i < n; i++) exact_add_usual(&limb0, &limb1, &limb2, terms[i]);
    ExactWindow sum = {{limb0, limb1, limb2, 0, 0}, 0};
    exact_merge_window(&out->windows[0], &sum);
}

// *out += the sum of x (n).
static inline void exact_sum(ExactSum* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    double terms[EXACT_TERMS];
    for (size_t first = 0, count; first < n; first += count) {
        count = min_size(EXACT_TERMS, n - first);
        for (size_t i = 0; i < count; i++) terms[i] = (double)x[first + i];
        exact_sum_terms(out, terms, count);
    }
}

// *out += the sum of squares of x (n). The squares of each 8 elements are added in double: slices of the flat vector
// begin at multiples of 8.
static inline void exact_sum_squares(ExactSum* out, const float* x, size_t n, Stream stream) {
    (void)stream;
    enum { PIECE = LLMTRAIN_PIECE(65536, 1024) };
    #pragma omp parallel for
    for (size_t first = 0; first < n; first += PIECE) {
        ExactSum piece = {{{{0}, 0}}};
        double terms[EXACT_TERMS];
        size_t groups = min_size(PIECE, n - first) / 8, rest = min_size(PIECE, n - first) % 8;
        for (size_t group = 0, count; group < groups; group += count) {
            count = min_size(EXACT_TERMS, groups - group);
            for (size_t i = 0; i < count; i++) terms[i] = exact_eight_squares(x + first + (group + i) * 8);
            exact_sum_terms(&piece, terms, count);
        }
        if (rest > 0) {  // as if zeros followed
            float last[8] = {0};
            memcpy(last, x + n - rest, rest * sizeof(float));
            terms[0] = exact_eight_squares(last);
            exact_sum_terms(&piece, terms, 1);
        }
        #pragma omp critical
        exact_merge_sum(out, &piece);
    }
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
