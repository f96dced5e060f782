// arithmetic.h: floating-point arithmetic that gives the same bits on every processor.
//
//   1. fused       multiply_add: a * b + c with one rounding
//   2. vectors     as wide as the registers
//   3. sums        of many terms, in an order that does not depend on the width of the registers
//   4. elementary  exp, log, sin, cos, pow, sigmoid: our own, since those of libm differ in the last bit
//
// IEEE 754 fixes the result of +, -, *, /, square root and fused multiply-add to the bit. Builds differ in which
// operations the compiler fuses (none: the Makefile passes -ffp-contract=off, as a project that copies this must; ours
// are written as `multiply_add`), in the order in which a vectorized loop adds (ours add in SUM_LANES partial sums),
// and in the library's functions (not used where weights depend on them). So a run gives the same weights with AVX2,
// AVX-512 and NEON, with gcc and clang, at -O1 to -O3: dev/test/golden.c shows it. A processor without fused
// multiply-add gives other weights.
//
//     float dot = VECTOR_SUM(c, C, a[c] * b[c]);             // the sum over c from 0 to C - 1
//     float y = multiply_add(x, slope, intercept);

#ifndef LLMTRAIN_ARITHMETIC_H
#define LLMTRAIN_ARITHMETIC_H

#include "types.h"

#if !defined(__CUDACC__) && defined(__FMA__)  // nvcc does not know all of the intrinsics
#include <immintrin.h>
#elif !defined(__CUDACC__) && defined(__SSE2__)
#include <emmintrin.h>
#elif !defined(__CUDACC__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// ------------------------------------------------------------------------------------------------
// 1. Fused

// Whether the target processor multiplies and adds with one rounding.
#if defined(__FMA__) || defined(__aarch64__) || defined(__CUDA_ARCH__)
enum { ARITHMETIC_FUSED = 1 };
#else
enum { ARITHMETIC_FUSED = 0 };
#endif

// a * b + c, rounded once; twice where ARITHMETIC_FUSED is 0, since doing it in software takes a hundred times as long.
HOST_DEVICE ALWAYS_INLINE float multiply_add(float a, float b, float c) {
    return ARITHMETIC_FUSED ? fmaf(a, b, c) : a * b + c;
}

// ------------------------------------------------------------------------------------------------
// 2. Vectors

// A vector register of the target instruction set. gcc keeps a wider type in memory.
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, VECTOR_REGISTERS = 32 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, VECTOR_REGISTERS = 16 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, VECTOR_REGISTERS = 32 };
#else
enum { VECTOR_BYTES = 16, VECTOR_REGISTERS = 16 };
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
enum { VECTOR_LANES = VECTOR_BYTES / sizeof(float) };

// x in each element.
ALWAYS_INLINE Vector vector_of(float x) {
    Vector zero = {0};
    return x - zero;
}

// multiply_add, element by element.
ALWAYS_INLINE Vector vector_fused(Vector a, Vector b, Vector c) {
#if defined(__CUDACC__)
    for (int i = 0; i < VECTOR_LANES; i++) c[i] = multiply_add(a[i], b[i], c[i]);
    return c;
#elif defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// A register of 64-bit integers, and the products of their lower halves.
typedef uint64_t VectorU64 __attribute__((vector_size(VECTOR_BYTES)));
enum { VECTOR_U64_LANES = VECTOR_BYTES / sizeof(uint64_t) };

ALWAYS_INLINE VectorU64 vector_multiply_lower(VectorU64 a, VectorU64 b) {
#if !defined(__CUDACC__) && defined(__AVX512F__)
    return (VectorU64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif !defined(__CUDACC__) && defined(__AVX2__)
    return (VectorU64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif !defined(__CUDACC__) && defined(__SSE2__) && !defined(__AVX__)
    return (VectorU64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif !defined(__CUDACC__) && defined(__aarch64__)
    return (VectorU64)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    for (int i = 0; i < VECTOR_U64_LANES; i++) a[i] = (uint64_t)(uint32_t)a[i] * (uint32_t)b[i];
    return a;
#endif
}

// The larger of each pair of elements; that of b if either is NaN.
ALWAYS_INLINE Vector vector_max(Vector a, Vector b) {
#if !defined(__CUDACC__) && defined(__AVX512F__)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif !defined(__CUDACC__) && defined(__FMA__)
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#elif !defined(__CUDACC__) && defined(__aarch64__)
    return (Vector)vbslq_f32(vcgtq_f32((float32x4_t)a, (float32x4_t)b), (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < VECTOR_LANES; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
#endif
}

// ------------------------------------------------------------------------------------------------
// 3. Sums
//
// Term i belongs to partial sum i % SUM_LANES, and each partial sum adds its terms in order; at the end the upper half
// of the partial sums is added to the lower, until one is left. So a loop over the lanes vectorizes at any width.

enum { SUM_LANES = 64 };

#define VECTOR_SUM_OF(type, i, n, term) \
    __extension__({ \
        type lanes_[SUM_LANES] = {0}; \
        for (size_t first_ = 0, n_ = (n); first_ < n_; first_ += SUM_LANES) { \
            size_t count_ = min_size(SUM_LANES, n_ - first_); \
            for (size_t lane_ = 0; lane_ < count_; lane_++) { \
                size_t i = first_ + lane_; \
                lanes_[lane_] += (term); \
            } \
        } \
        for (size_t half_ = SUM_LANES / 2; half_ > 0; half_ /= 2) \
            for (size_t lane_ = 0; lane_ < half_; lane_++) lanes_[lane_] += lanes_[lane_ + half_]; \
        lanes_[0]; \
    })
#define VECTOR_SUM(i, n, term) VECTOR_SUM_OF(float, i, n, term)  // of floats
#define VECTOR_SUM_DOUBLE(i, n, term) VECTOR_SUM_OF(double, i, n, term)

// ------------------------------------------------------------------------------------------------
// 4. Elementary functions
//
// The functions for float, and log_double, have no branches or calls and are always inlined, so that loops over them
// vectorize. Those for double are each within 4 units in the last place for the arguments that a run has (below); the
// tests compare them with long double.

// e^x to about 2 units in the last place of a float; 0 below -87.3, infinity above 88.3, NaN for NaN.
// x = n ln 2 + r with |r| <= ln(2)/2; e^r by its Taylor series. Below -87.3 the computed value is not used.
ALWAYS_INLINE float exp_fast(float x) {
    float clamped = x > 89.0f ? 89.0f : x;
    float shifted = multiply_add(clamped, 1.44269504f, 12582912.0f);  // 1.5 * 2^23 puts the integer into the low bits
    float n = shifted - 12582912.0f;
    float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, clamped));  // ln 2 in two parts
    float p = multiply_add(1.0f / 5040, r, 1.0f / 720);
    p = multiply_add(p, r, 1.0f / 120);
    p = multiply_add(p, r, 1.0f / 24);
    p = multiply_add(p, r, 1.0f / 6);
    p = multiply_add(p, r, 0.5f);
    p = multiply_add(p * r, r, r) + 1.0f;
    float scale = float_from_bits((bits_from_float(shifted) - 0x4B400000u + 127u) << 23);
    return x < -87.3f ? 0.0f : p * scale;
}

// x * 2^n, for normal x and results.
ALWAYS_INLINE double scale_double(double x, int n) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    bits += (uint64_t)(int64_t)n << 52;
    memcpy(&x, &bits, 8);
    return x;
}

// 1 / i!
static const double inverse_factorial[20] = {
    1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
    1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800, 1.0 / 87178291200, 1.0 / 1307674368000, 1.0 / 20922789888000,
    1.0 / 355687428096000, 1.0 / 6402373705728000, 1.0 / 121645100408832000};

// e^x for |x| <= 700; 0 below that, infinity above.
static inline double exp_double(double x) {
    if (!(x >= -700.0)) return x < 0 ? 0.0 : x;  // NaN
    if (x > 700.0) return (double)INFINITY;
    int n = (int)(x * 1.4426950408889634 + (x < 0 ? -0.5 : 0.5));
    double r = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10;  // ln 2: its upper bits, then the rest
    double p = inverse_factorial[14];
    for (int i = 13; i >= 0; i--) p = p * r + inverse_factorial[i];
    return scale_double(p, n);
}

// The natural logarithm of a normal number; -infinity for 0, NaN below. x = m 2^e with m from sqrt(1/2) to sqrt(2), and
// log(m) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...), s = (m - 1) / (m + 1).
ALWAYS_INLINE double log_double(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int e = (int)(bits >> 52) - 1023;
    double m = scale_double(x, -e);
    bool large = m > 1.4142135623730951;
    m = large ? 0.5 * m : m;
    e += large;
    double s = (m - 1.0) / (m + 1.0), square = s * s, sum = 1.0 / 23;
    sum = sum * square + 1.0 / 21;
    sum = sum * square + 1.0 / 19;
    sum = sum * square + 1.0 / 17;
    sum = sum * square + 1.0 / 15;
    sum = sum * square + 1.0 / 13;
    sum = sum * square + 1.0 / 11;
    sum = sum * square + 1.0 / 9;
    sum = sum * square + 1.0 / 7;
    sum = sum * square + 1.0 / 5;
    sum = sum * square + 1.0 / 3;
    double log_m = 2.0 * s + 2.0 * s * (square * sum);
    double result = e * 0.693147180369123816490 + (log_m + e * 1.90821492927058770002e-10);
    result = x == (double)INFINITY ? x : result;
    return x > 0 ? result : x == 0 ? -(double)INFINITY : (double)NAN;
}

// x^y for x >= 0.
// The relative error is that of log_double times |y log x|.
static inline double pow_double(double x, double y) { return y == 0 ? 1.0 : exp_double(y * log_double(x)); }

// sin(x + quarter * pi/2) for |x| <= 10^6. x = n pi/2 + r with |r| <= pi/4; pi/2 is split into three parts, the first
// two with few bits, so that their products with n are exact; then the Taylor series of sine or cosine of r.
static inline double sin_quarter(double x, int quarter) {
    double n = floor(x * 0.63661977236758134 + 0.5);
    double r = x - n * 1.57079632673412561417 - n * 6.07710050630396597660e-11 - n * 2.02226624879595063154e-21;
    int turn = (int)((int64_t)n + quarter) & 3;
    double square = r * r, sine = 0.0, cosine = 0.0;
    for (int i = 18; i >= 2; i -= 2) {
        sine = (inverse_factorial[i + 1] - sine) * square;
        cosine = (inverse_factorial[i] - cosine) * square;
    }
    double result = turn & 1 ? 1.0 - cosine : r - r * sine;
    return turn & 2 ? -result : result;
}
static inline double sin_double(double x) { return sin_quarter(x, 0); }
static inline double cos_double(double x) { return sin_quarter(x, 1); }

#endif  // LLMTRAIN_ARITHMETIC_H
