// cuda_bf16.h, a stand-in: bfloat16, the upper half of a float, for machines without NVIDIA's headers.

#ifndef STANDIN_CUDA_BF16_H
#define STANDIN_CUDA_BF16_H

#include "sixteen_bits.h"

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

STANDIN_SIXTEEN_BITS(__nv_bfloat16, __nv_bfloat162, 7, 8, standin_float_from_bf16, standin_bf16_from_float)

static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return value; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.standin_bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.standin_bits = bits;
    return value;
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2(v.x, v.y); }

#endif  // STANDIN_CUDA_BF16_H
