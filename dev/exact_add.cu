// dev/exact_add.cu: the ladder of adding a gradient to sums in fixed point, which no order of additions can change.
//
//     sums (n) += x (n) * scale, rounded to the nearest integer, ties to even;  x float, sums int64, scale 2^50
//
// Memory moves 20 bytes per element: x in, sums in and out. An element beyond the limit, or NaN, adds nothing and sets
// a flag.
//
//     rung          idea                                                     expected
//     naive         one element per thread, all of it in double: widen,      85 to 90% of the peak; 2 units for doubles
//                   compare, multiply, round                                 on a multiprocessor are busy for up to
//                                                                            70% of the time that memory takes
//     integers      two elements per thread; the float's bits are shifted,   the same as shipped: some 20 instructions
//                   right where the scale is a power of two                  hide behind memory, as doubles do
//     shipped       two elements per thread: 16 bytes of sums at a time;     above 90%
//                   the comparison in float; right for any scale
//
// So integer arithmetic gains nothing while memory is the bound. And if the trainer's loss scale is not a power of two,
// neither is this scale: then the product is rounded to a double before it is rounded to an integer, on both backends.
//
//     build/exact_add --elements 124475904

#include "kernels.cuh"
#include "ladder.h"

enum { SCALE_PLACES = 50 };
static const double EXACT_SCALE = 0x1p50, EXACT_LIMIT = 512.0;

static __global__ void exact_naive(int64_t* sums, double* bad, const float* x, double scale, double limit, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    if (fabs((double)x[i]) <= limit) sums[i] += __double2ll_rn((double)x[i] * scale);
    else atomicExch((unsigned long long*)bad, (unsigned long long)__double_as_longlong(1.0));
}

// x * 2^places to the nearest integer, ties to even. x is fraction * 2^exponent with a 24-bit fraction, of which a
// right shift by 26 or more leaves nothing.
static __device__ inline int64_t exact_by_bits(float x, int places) {
    uint32_t bits = bits_from_float(x), stored = bits >> 23 & 255;
    uint32_t fraction = (bits & 0x7fffff) | (stored > 0 ? 0x800000 : 0);
    int exponent = (int)max(stored, 1u) - 150 + places, right = min(max(-exponent, 1), 26);
    uint32_t rounded = (fraction + (1u << (right - 1)) - 1 + (fraction >> right & 1)) >> right;
    int64_t magnitude = exponent >= 0 ? (int64_t)fraction << exponent : (int64_t)rounded;
    return bits >> 31 ? -magnitude : magnitude;
}

static __global__ void exact_integers(int64_t* sums, double* bad, const float* x, int places, float limit, size_t n) {
    size_t i = flat_index(PAIR);
    if (i >= n) return;
    Group<int64_t, PAIR> sum = group_load<PAIR>(sums + i);
    Group<float, PAIR> value = group_load<PAIR>(x + i);
    bool outside = false;
    #pragma unroll
    for (int j = 0; j < PAIR; j++) {
        bool inside = fabsf(value.x[j]) <= limit;
        sum.x[j] += exact_by_bits(inside ? value.x[j] : 0.0f, places);
        outside = outside || !inside;
    }
    group_store<PAIR>(sums + i, sum);
    if (outside) atomicExch((unsigned long long*)bad, (unsigned long long)__double_as_longlong(1.0));
}

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 20000);  // GPT-2 124M
    ladder_open(argc, argv, {{"elements", KIND_COUNT, &n, "n", 1, 1e10, "length of the vectors, made even", 0}});
    ladder_begin("exact_add: sums (n) += x (n) * 2^50, in integers");
    n = round_up(n, PAIR);
    auto x = ladder_input<float>("x", n, 1.0);
    auto bad = ladder_added<double>("bad", 1, 0.0, {});
    auto sums = ladder_added<int64_t>("sums", n, 0x1p62, {});
    for (size_t i = 0; i < n; i++) x.twin[i] = ldexpf(x.twin[i], -(int)(i % 60));  // from far above 2^-50 to far below
    for (size_t i = 3; i < n; i += 7) x.twin[i] = ((float)(i % 16) - 7.5f) * 0x1p-50f;  // ties
    if (n > 2) x.twin[n / 2] = 2.0f * (float)EXACT_LIMIT;
    if (n > 3) x.twin[n - 1] = NAN;
    ladder_update(x);
    for (size_t i = 0; i < n; i++) sums.twin[i] += (int64_t)random_bits(2, RANDOM_TEST, 0, i);  // the digits below 2^32
    ladder_update(sums);
    auto shipped = LADDER_OPERATION(exact_add, sums, bad, x, EXACT_SCALE, EXACT_LIMIT, n);
    ladder_work(LADDER_BYTES, (double)n * (sizeof(float) + 2 * sizeof(int64_t)), shipped);
    ladder_rung("naive", [&] { ladder_launch(exact_naive, n, sums, bad, x, EXACT_SCALE, EXACT_LIMIT, n); });
    ladder_rung("integers", [&] {
        ladder_launch(exact_integers, n / PAIR, sums, bad, x, SCALE_PLACES, (float)EXACT_LIMIT, n);
    });
    ladder_rung("shipped", shipped);
    return ladder_end();
}
