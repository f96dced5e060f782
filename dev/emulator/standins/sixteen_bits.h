// sixteen_bits.h: what __nv_bfloat16 and __half have in common. cuda_bf16.h and cuda_fp16.h define one type each with
// STANDIN_SIXTEEN_BITS(its name, its pair's name, bits of a fraction, bits of an exponent, float from bits, bits from
// float).
//
// Arithmetic and comparison convert to float; as a float has more than twice the digits, rounding its result is one
// exact rounding. NaN becomes 0x7fff, as on a GPU.

#ifndef STANDIN_SIXTEEN_BITS_H
#define STANDIN_SIXTEEN_BITS_H

#include "../numbers.h"
#include "cuda_runtime.h"

#include <math.h>

// Rounded to nearest, ties to even: rint, in units of the last digit of the fraction.
static inline unsigned short standin_round(double value, int fraction, int exponent_bits) {
    if (value != value) return 0x7fff;
    int bias = (1 << (exponent_bits - 1)) - 1, infinity = ((1 << exponent_bits) - 1) << fraction;
    int sign = signbit(value) ? 0x8000 : 0, exponent = 1 - bias;  // subnormal numbers share the smallest exponent
    double size = fabs(value);
    if (size >= ldexp(1.0, bias + 1)) return (unsigned short)(sign | infinity);
    if (size > 0 && ilogb(size) > exponent) exponent = ilogb(size);
    int steps = (int)rint(ldexp(size, fraction - exponent));
    return (unsigned short)(sign | (((exponent + bias - 1) << fraction) + steps));  // with a carry
}

#define STANDIN_SIXTEEN_BITS(T, T2, fraction, exponent_bits, float_from_bits, bits_from_float)                  \
    struct T {                                                                                                  \
        unsigned short standin_bits;                                                                            \
        T() = default;                                                                                          \
        T(float value) : standin_bits(bits_from_float(value)) {}                                                \
        T(double value) : standin_bits(standin_round(value, fraction, exponent_bits)) {}                        \
        T(int value) : T((double)value) {}                                                                      \
        operator float() const { return float_from_bits(standin_bits); }                                        \
    };                                                                                                          \
    struct __attribute__((aligned(4))) T2 {                                                                     \
        T x, y;                                                                                                 \
        T2() = default;                                                                                         \
        T2(T x_, T y_) : x(x_), y(y_) {}                                                                        \
    };                                                                                                          \
    static inline T operator+(T a, T b) { return (float)a + (float)b; }                                         \
    static inline T operator-(T a, T b) { return (float)a - (float)b; }                                         \
    static inline T operator*(T a, T b) { return (float)a * (float)b; }                                         \
    static inline T operator/(T a, T b) { return (float)a / (float)b; }                                         \
    static inline bool operator==(T a, T b) { return (float)a == (float)b; }                                    \
    static inline bool operator!=(T a, T b) { return (float)a != (float)b; }                                    \
    static inline bool operator<(T a, T b) { return (float)a < (float)b; }                                      \
    static inline bool operator<=(T a, T b) { return (float)a <= (float)b; }                                    \
    static inline bool operator>(T a, T b) { return (float)a > (float)b; }                                      \
    static inline bool operator>=(T a, T b) { return (float)a >= (float)b; }                                    \
    static inline float __low2float(T2 v) { return v.x; }                                                       \
    static inline float __high2float(T2 v) { return v.y; }

#endif  // STANDIN_SIXTEEN_BITS_H
