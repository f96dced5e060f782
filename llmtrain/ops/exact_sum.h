// exact_sum.h: sums of many numbers in integers. Neither order nor grouping changes a bit, so that a loss or a norm has
// the same digits whatever the ranks, their slices and their micro-batches are.
//
// A number is cut into five parts, 40 bits each, and each part is added to an integer of its own: a superaccumulator
// ("Computer Arithmetic and Validity", U. Kulisch) of 200 bits and some spare. Adding 1.5 * 2^52 units to a double
// rounds it to a multiple of the unit, and the low bits of the result are that multiple: a part takes four instructions
// that vectorize. Each number is rounded by itself, to a multiple of 2^-100.

#ifndef LLMTRAIN_EXACT_SUM_H
#define LLMTRAIN_EXACT_SUM_H

#include "types.h"

enum { EXACT_LIMBS = 5, EXACT_LIMB_BITS = 40 };
enum { EXACT_TERMS = 64 };   // that a CPU adds at a time: they stay in its L1 cache
#define EXACT_UNIT 0x1p-100  // of limb 0; that of each next limb is 2^40 times as large

// The sum of limbs[i] * EXACT_UNIT * 2^(40 i), in two's complement. It is no number if a term, or the sum, is NaN or
// not below 2^100, rounded to a multiple of 2^60: `outside`, the union of the terms' last parts, then has bits above the
// lowest 40.
typedef struct {
    uint64_t limbs[EXACT_LIMBS];
    uint64_t outside;
} ExactSum;

HOST_DEVICE ALWAYS_INLINE uint64_t bits_from_double(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }

// The bits of a number of two's complement that are not copies of its sign.
HOST_DEVICE ALWAYS_INLINE uint64_t bits_without_sign(uint64_t x) { return x ^ (0 - (x >> 63)); }

// Rounds *x, below 2^51 units, to a multiple of the unit, which it returns; *x becomes what is left.
HOST_DEVICE ALWAYS_INLINE uint64_t exact_cut(double* x, double unit) {
    double zero = 0x1.8p52 * unit, rounded = *x + zero;
    *x -= rounded - zero;
    return bits_from_double(rounded) - bits_from_double(zero);
}

// Adds x to a sum whose members a vectorized loop has in variables: at most 2^23 times before exact_carry.
HOST_DEVICE ALWAYS_INLINE void exact_add_term(uint64_t* limb0, uint64_t* limb1, uint64_t* limb2, uint64_t* limb3,
                                              uint64_t* limb4, uint64_t* outside, double x) {
    uint64_t last = exact_cut(&x, EXACT_UNIT * 0x1p160);
    *outside |= bits_without_sign(last);
    *limb4 += last;
    *limb3 += exact_cut(&x, EXACT_UNIT * 0x1p120);
    *limb2 += exact_cut(&x, EXACT_UNIT * 0x1p80);
    *limb1 += exact_cut(&x, EXACT_UNIT * 0x1p40);
    *limb0 += exact_cut(&x, EXACT_UNIT);
}

// The sum of squares of x (8).
HOST_DEVICE ALWAYS_INLINE double exact_eight_squares(const float* x) {
    double a = x[0], b = x[1], c = x[2], d = x[3], e = x[4], f = x[5], g = x[6], h = x[7];
    return ((a * a + e * e) + (b * b + f * f)) + ((c * c + g * g) + (d * d + h * h));
}

// Leaves 40 bits in each limb but the last: equal sums then have equal limbs.
HOST_DEVICE static inline void exact_carry(ExactSum* s) {
    for (int i = 0; i + 1 < EXACT_LIMBS; i++) {
        s->limbs[i + 1] += (uint64_t)((int64_t)s->limbs[i] >> EXACT_LIMB_BITS);
        s->limbs[i] &= ((uint64_t)1 << EXACT_LIMB_BITS) - 1;
    }
    s->outside |= bits_without_sign(s->limbs[EXACT_LIMBS - 1]);
}

// sum += x.
static inline void exact_merge_sum(ExactSum* sum, const ExactSum* x) {
    for (int i = 0; i < EXACT_LIMBS; i++) sum->limbs[i] += x->limbs[i];
    sum->outside |= x->outside;
    exact_carry(sum);
}

// The sum, rounded; NaN if it is no number.
HOST_DEVICE static inline double exact_value(ExactSum s) {
    double value = 0.0, unit = EXACT_UNIT;
    exact_carry(&s);
    bool negative = s.limbs[EXACT_LIMBS - 1] >> 63;
    for (int i = 0; i < EXACT_LIMBS && negative; i++) s.limbs[i] = 0 - s.limbs[i];
    exact_carry(&s);
    for (int i = 0; i < EXACT_LIMBS; i++, unit *= 0x1p40) value += (double)s.limbs[i] * unit;
    if (s.outside >> EXACT_LIMB_BITS) return (double)NAN;
    return negative ? -value : value;
}

#endif  // LLMTRAIN_EXACT_SUM_H
