// numbers.h: conversions of number types that both the emulator and the stand-ins for NVIDIA's headers need.

#ifndef EMULATOR_NUMBERS_H
#define EMULATOR_NUMBERS_H

#include <stdint.h>
#include <string.h>

// The race check (race.h) sees all code compiled with -fsanitize=thread, except functions marked with this.
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))

namespace emulator {

// binary16: 1 sign, 5 exponent, 10 fraction bits. Moved to a float's bits, they represent a number too small by 2^112,
// since the exponent biases are 15 and 127, even for subnormals. Infinities and NaN stay so.
EMULATOR_UNSEEN inline float float_from_half(uint32_t half) {
    uint32_t magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
    bool special = magnitude >= 31u << 23;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    memcpy(&magnitude, &value, sizeof value);
    magnitude |= sign | (special ? 0x7f800000u : 0);
    memcpy(&value, &magnitude, sizeof value);
    return value;
}

// Rounds a float's bits to TF32, which has 10 bits of fraction; ties go away from zero.
EMULATOR_UNSEEN inline uint32_t bits_of_tf32(uint32_t bits) {
    bool special = (bits & 0x7f800000u) == 0x7f800000u;
    return special ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace emulator

#endif  // EMULATOR_NUMBERS_H
