// cuda_bf16.h, a stand-in: bfloat16 for machines without NVIDIA's headers. See cuda_runtime.h beside it.
//
// A bfloat16 is the upper half of a float. Arithmetic converts to float, computes, and rounds the result to nearest,
// ties to even; as a float has more than twice the digits, that is one exact rounding. NaN becomes 0x7fff, as on a GPU.

#ifndef STANDIN_CUDA_BF16_H
#define STANDIN_CUDA_BF16_H

#include "cuda_runtime.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct __nv_bfloat162_raw {
    unsigned short x, y;
};

static inline float standin_float_from_bf16(unsigned short bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline unsigned short standin_bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // may carry into infinity, as it has to
}

struct __nv_bfloat16 {
    unsigned short standin_bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : standin_bits(standin_bf16_from_float(value)) {}
    __nv_bfloat16(double value);
    __nv_bfloat16(int value) : __nv_bfloat16((double)value) {}
    __nv_bfloat16(__nv_bfloat16_raw raw) : standin_bits(raw.x) {}
    operator float() const { return standin_float_from_bf16(standin_bits); }
    operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{standin_bits}; }
};

struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
    __nv_bfloat162(__nv_bfloat162_raw raw) : x(__nv_bfloat16_raw{raw.x}), y(__nv_bfloat16_raw{raw.y}) {}
    operator __nv_bfloat162_raw() const { return __nv_bfloat162_raw{x.standin_bits, y.standin_bits}; }
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// By way of float, which must not round to the middle between two bfloat16: what does not fit is rounded to odd.
static inline __nv_bfloat16 __double2bfloat16(double value) {
    float near = (float)value;
    if (near == near && !isinf(near) && (double)near != value) {
        bool away = fabs((double)near) > fabs(value);
        uint32_t bits;
        memcpy(&bits, &near, sizeof bits);
        bits = (bits - away) | 1;
        memcpy(&near, &bits, sizeof near);
    }
    return __nv_bfloat16(near);
}
inline __nv_bfloat16::__nv_bfloat16(double value) : standin_bits(__double2bfloat16(value).standin_bits) {}

static inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return (float)value; }
static inline __nv_bfloat16 __float2bfloat16_rz(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return __nv_bfloat16(__nv_bfloat16_raw{value != value ? (unsigned short)0x7fff : (unsigned short)(bits >> 16)});
}

static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __nv_bfloat162(v.x, v.y); }
static inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __nv_bfloat162(value, value); }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return __nv_bfloat162(value, value); }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2(v.x, v.y); }
static inline float __low2float(__nv_bfloat162 v) { return v.x; }
static inline float __high2float(__nv_bfloat162 v) { return v.y; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.standin_bits; }
static inline short __bfloat16_as_short(__nv_bfloat16 value) { return (short)value.standin_bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16(__nv_bfloat16_raw{bits}); }
static inline __nv_bfloat16 __short_as_bfloat16(short bits) { return __ushort_as_bfloat16((unsigned short)bits); }

#define STANDIN_BF16_ARITHMETIC(symbol, name)                                                                     \
    static inline __nv_bfloat16 operator symbol(__nv_bfloat16 a, __nv_bfloat16 b) {                               \
        return (float)a symbol(float) b;                                                                          \
    }                                                                                                             \
    static inline __nv_bfloat16& operator symbol##=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a symbol b; } \
    static inline __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b) { return a symbol b; }                     \
    static inline __nv_bfloat162 operator symbol(__nv_bfloat162 a, __nv_bfloat162 b) {                            \
        return __nv_bfloat162(a.x symbol b.x, a.y symbol b.y);                                                    \
    }                                                                                                             \
    static inline __nv_bfloat162 name##2(__nv_bfloat162 a, __nv_bfloat162 b) { return a symbol b; }
STANDIN_BF16_ARITHMETIC(+, __hadd)
STANDIN_BF16_ARITHMETIC(-, __hsub)
STANDIN_BF16_ARITHMETIC(*, __hmul)
#undef STANDIN_BF16_ARITHMETIC
static inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a / (float)b; }
static inline __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) { return a / b; }
static inline __nv_bfloat16 operator-(__nv_bfloat16 a) { return -(float)a; }

#define STANDIN_BF16_COMPARISON(symbol, name)                                                                 \
    static inline bool operator symbol(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a symbol(float) b; } \
    static inline bool name(__nv_bfloat16 a, __nv_bfloat16 b) { return a symbol b; }
STANDIN_BF16_COMPARISON(==, __heq)
STANDIN_BF16_COMPARISON(!=, __hneu)
STANDIN_BF16_COMPARISON(<, __hlt)
STANDIN_BF16_COMPARISON(<=, __hle)
STANDIN_BF16_COMPARISON(>, __hgt)
STANDIN_BF16_COMPARISON(>=, __hge)
#undef STANDIN_BF16_COMPARISON
static inline bool __hisnan(__nv_bfloat16 a) { return a != a; }

#endif  // STANDIN_CUDA_BF16_H
