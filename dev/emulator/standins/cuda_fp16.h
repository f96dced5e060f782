// cuda_fp16.h, a stand-in: IEEE binary16, with 5 bits of exponent and 10 of fraction, for machines without NVIDIA's
// headers.

#ifndef STANDIN_CUDA_FP16_H
#define STANDIN_CUDA_FP16_H

#include "sixteen_bits.h"

static inline unsigned short standin_half_from_float(float value) { return standin_round((double)value, 10, 5); }

STANDIN_SIXTEEN_BITS(__half, __half2, 10, 5, emulator::float_from_half, standin_half_from_float)

static inline __half __float2half_rn(float value) { return __half(value); }
static inline float __half2float(__half value) { return value; }
static inline unsigned short __half_as_ushort(__half value) { return value.standin_bits; }
static inline __half __ushort_as_half(unsigned short bits) {
    __half value;
    value.standin_bits = bits;
    return value;
}
static inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }

#endif  // STANDIN_CUDA_FP16_H
