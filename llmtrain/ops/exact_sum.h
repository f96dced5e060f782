// exact_sum.h: sums of many numbers in integers. Neither order nor grouping changes a bit, so that a loss or a norm has
// the same digits whatever the ranks, their slices and their micro-batches are.
//
// A number is cut into five parts, 40 bits each, and each part is added to an integer of its own: a superaccumulator
// ("Computer Arithmetic and Validity", U. Kulisch) of 200 bits and some spare. Adding 1.5 * 2^52 units to a double
// rounds it to a multiple of the unit, and the low bits of the result are that multiple: a part takes four instructions
// that vectorize. Each number is rounded by itself, to a multiple of 2^-100. Numbers of 2^80 and more, as runs that
// diverge have, are added to five more integers, in the same way after a multiplication by 2^-150.

#ifndef LLMTRAIN_EXACT_SUM_H
#define LLMTRAIN_EXACT_SUM_H

#include "types.h"

enum { EXACT_WINDOWS = 2, EXACT_LIMBS = 5, EXACT_LIMB_BITS = 40, EXACT_LAST_BITS = 52 };  // the last limb has more
enum { EXACT_TERMS = 64 };   // that a CPU adds at a time: they stay in its L1 cache
#define EXACT_UNIT 0x1p-100  // of limb 0; that of each next limb is 2^40 times as large
#define EXACT_USUAL 0x1p30   // numbers below it fit the first three limbs
#define EXACT_HUGE 0x1p80    // numbers from here on are in the second window
#define EXACT_SHIFT 0x1p150  // what that divides by: squares of floats then fit

// A part of a sum: that of limbs[i] * EXACT_UNIT * 2^(40 i), in two's complement. It is no number if a term is none, or
// if the sum is 2^112 or more: `outside`, the union of all last limbs, then has bits above EXACT_LAST_BITS.
typedef struct ExactWindow {
    uint64_t limbs[EXACT_LIMBS];
    uint64_t outside;
} ExactWindow;

typedef struct ExactSum {  // nvcc cannot have a std::vector of structs without names
    ExactWindow windows[EXACT_WINDOWS];
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

// Adds x, below EXACT_USUAL, to the limbs of a window, which a vectorized loop has in variables: at most 2^12 times
// before exact_carry.
HOST_DEVICE ALWAYS_INLINE void exact_add_usual(uint64_t* limb0, uint64_t* limb1, uint64_t* limb2, double x) {
    *limb2 += exact_cut(&x, EXACT_UNIT * 0x1p80);
    *limb1 += exact_cut(&x, EXACT_UNIT * 0x1p40);
    *limb0 += exact_cut(&x, EXACT_UNIT);
}

// The same for any x that exact_term gives, at most 2^23 times.
HOST_DEVICE ALWAYS_INLINE void exact_add_term(uint64_t* limb0, uint64_t* limb1, uint64_t* limb2, uint64_t* limb3,
                                              uint64_t* limb4, uint64_t* outside, double x) {
    uint64_t last = exact_cut(&x, EXACT_UNIT * 0x1p160);
    *outside |= bits_without_sign(last);
    *limb4 += last;
    *limb3 += exact_cut(&x, EXACT_UNIT * 0x1p120);
    exact_add_usual(limb0, limb1, limb2, x);
}

// What a term adds to a window: itself, shifted, or 0.
HOST_DEVICE ALWAYS_INLINE double exact_term(double x, int window) {
    double low = fabs(x) < EXACT_HUGE ? x : 0.0;
    return window == 0 ? low : low == x ? 0.0 : x * (1.0 / EXACT_SHIFT);
}

// The sum of squares of x (8).
HOST_DEVICE ALWAYS_INLINE double exact_eight_squares(const float* x) {
    double a = x[0], b = x[1], c = x[2], d = x[3], e = x[4], f = x[5], g = x[6], h = x[7];
    return ((a * a + e * e) + (b * b + f * f)) + ((c * c + g * g) + (d * d + h * h));
}

// Leaves 40 bits in each limb but the last: equal sums then have equal limbs.
HOST_DEVICE ALWAYS_INLINE void exact_carry(ExactWindow* w) {
    for (int i = 0; i + 1 < EXACT_LIMBS; i++) {
        w->limbs[i + 1] += (uint64_t)((int64_t)w->limbs[i] >> EXACT_LIMB_BITS);
        w->limbs[i] &= ((uint64_t)1 << EXACT_LIMB_BITS) - 1;
    }
    w->outside |= bits_without_sign(w->limbs[EXACT_LIMBS - 1]);
}

// sum += x, as often as one likes.
static inline void exact_merge_window(ExactWindow* sum, const ExactWindow* x) {
    for (int i = 0; i < EXACT_LIMBS; i++) sum->limbs[i] += x->limbs[i];
    sum->outside |= x->outside;
    exact_carry(sum);
}

static inline void exact_merge_sum(ExactSum* sum, const ExactSum* x) {
    for (int window = 0; window < EXACT_WINDOWS; window++)
        exact_merge_window(&sum->windows[window], &x->windows[window]);
}

HOST_DEVICE static inline double exact_window_value(ExactWindow w) {
    double value = 0.0, unit = EXACT_UNIT;
    exact_carry(&w);
    bool negative = w.limbs[EXACT_LIMBS - 1] >> 63;
    for (int i = 0; i < EXACT_LIMBS && negative; i++) w.limbs[i] = 0 - w.limbs[i];
    exact_carry(&w);
    for (int i = 0; i < EXACT_LIMBS; i++, unit *= 0x1p40) value += (double)w.limbs[i] * unit;
    if (w.outside >> EXACT_LAST_BITS) return (double)NAN;
    return negative ? -value : value;
}

// The sum, rounded; NaN if it is no number.
HOST_DEVICE static inline double exact_value(ExactSum s) {
    return exact_window_value(s.windows[0]) + exact_window_value(s.windows[1]) * EXACT_SHIFT;
}

#endif  // LLMTRAIN_EXACT_SUM_H
