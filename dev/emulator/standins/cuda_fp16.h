// cuda_fp16.h, a stand-in: IEEE binary16 for machines without NVIDIA's headers. See cuda_runtime.h beside it.
//
// 1 sign, 5 exponent, 10 fraction bits. Arithmetic converts to float, computes, and rounds the result to the nearest,
// ties to even; as a float has more than twice the digits, that is one exact rounding. NaN becomes 0x7fff, as on a GPU.

#ifndef STANDIN_CUDA_FP16_H
#define STANDIN_CUDA_FP16_H

#include "../../../dev/emulator/numbers.h"
#include "cuda_runtime.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

struct __half_raw {
    unsigned short x;
};

struct __half2_raw {
    unsigned short x, y;
};

// In double, which holds every float, so that there is one rounding: rint, in units of the last digit.
static inline unsigned short standin_half_from_double(double value) {
    if (value != value) return 0x7fff;
    unsigned short sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (size >= 65520.0) return sign | 0x7c00;  // half way between the largest number and the next
    int exponent = size > 0 ? ilogb(size) : -14;
    if (exponent < -14) exponent = -14;         // subnormal numbers have the spacing of the smallest normal ones
    double steps = rint(ldexp(size, 10 - exponent));
    int bits = (exponent + 15) * 1024 + (int)steps - 1024;  // a fraction that rounds up to 2 carries into the exponent
    return (unsigned short)(sign | bits);
}

struct __half {
    unsigned short standin_bits;
    __half() = default;
    __half(float value) : standin_bits(standin_half_from_double(value)) {}
    __half(double value) : standin_bits(standin_half_from_double(value)) {}
    __half(int value) : standin_bits(standin_half_from_double(value)) {}
    __half(__half_raw raw) : standin_bits(raw.x) {}
    operator float() const { return emulator::float_from_half(standin_bits); }
    operator __half_raw() const { return __half_raw{standin_bits}; }
};

struct __attribute__((aligned(4))) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x_, __half y_) : x(x_), y(y_) {}
    __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
    operator __half2_raw() const { return __half2_raw{x.standin_bits, y.standin_bits}; }
};

typedef __half half;
typedef __half2 half2;

static inline __half __float2half(float value) { return __half(value); }
static inline __half __float2half_rn(float value) { return __half(value); }
static inline __half __double2half(double value) { return __half(value); }
static inline float __half2float(__half value) { return (float)value; }
static inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
static inline __half2 __float22half2_rn(float2 v) { return __half2(v.x, v.y); }
static inline __half2 __float2half2_rn(float value) { return __half2(value, value); }
static inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
static inline __half2 __half2half2(__half value) { return __half2(value, value); }
static inline __half2 make_half2(__half x, __half y) { return __half2(x, y); }
static inline float2 __half22float2(__half2 v) { return make_float2(v.x, v.y); }
static inline float __low2float(__half2 v) { return v.x; }
static inline float __high2float(__half2 v) { return v.y; }
static inline __half __low2half(__half2 v) { return v.x; }
static inline __half __high2half(__half2 v) { return v.y; }
static inline unsigned short __half_as_ushort(__half value) { return value.standin_bits; }
static inline short __half_as_short(__half value) { return (short)value.standin_bits; }
static inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
static inline __half __short_as_half(short bits) { return __ushort_as_half((unsigned short)bits); }

#define STANDIN_HALF_ARITHMETIC(symbol, name)                                                     \
    static inline __half operator symbol(__half a, __half b) { return (float)a symbol(float) b; } \
    static inline __half& operator symbol##=(__half& a, __half b) { return a = a symbol b; }      \
    static inline __half name(__half a, __half b) { return a symbol b; }                          \
    static inline __half2 operator symbol(__half2 a, __half2 b) {                                 \
        return __half2(a.x symbol b.x, a.y symbol b.y);                                           \
    }                                                                                             \
    static inline __half2 name##2(__half2 a, __half2 b) { return a symbol b; }
STANDIN_HALF_ARITHMETIC(+, __hadd)
STANDIN_HALF_ARITHMETIC(-, __hsub)
STANDIN_HALF_ARITHMETIC(*, __hmul)
#undef STANDIN_HALF_ARITHMETIC
static inline __half operator/(__half a, __half b) { return (float)a / (float)b; }
static inline __half __hdiv(__half a, __half b) { return a / b; }
static inline __half operator-(__half a) { return -(float)a; }

#define STANDIN_HALF_COMPARISON(symbol, name)                                                   \
    static inline bool operator symbol(__half a, __half b) { return (float)a symbol(float) b; } \
    static inline bool name(__half a, __half b) { return a symbol b; }
STANDIN_HALF_COMPARISON(==, __heq)
STANDIN_HALF_COMPARISON(!=, __hneu)
STANDIN_HALF_COMPARISON(<, __hlt)
STANDIN_HALF_COMPARISON(<=, __hle)
STANDIN_HALF_COMPARISON(>, __hgt)
STANDIN_HALF_COMPARISON(>=, __hge)
#undef STANDIN_HALF_COMPARISON
static inline bool __hisnan(__half a) { return a != a; }

#endif  // STANDIN_CUDA_FP16_H
