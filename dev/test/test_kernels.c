// test_kernels.c: tests every operation of kernels_cpu.h, for one storage dtype.
//
//     cc -O2 -fopenmp -I. dev/test/test_kernels.c -o build/test_kernels -lm      (also -DPRECISION_BF16, ..._FP16)
//     OMP_WAIT_POLICY=passive build/test_kernels       (three threads that spin on two processors take twice as long)
//
//   1. cases        operations.h: values against the double references
//   2. exact sums   against integers of 128 bits
//   3. checksum     cuts, flips, swaps
//   4. functions    exp, random numbers, the hash, conversions of every 16-bit number
//
// Besides the values, for each operation and shape: overwritten outputs start as NaN, accumulated ones as random
// numbers; the bytes behind each output do not change; inputs are allocated to the exact byte, for the sanitizers; 1, 2
// and 3 threads give the same bits, and so does one thread instead of 3; a NaN or infinity in any input reaches an
// output.

#include "kernels_cpu.h"
#include "llmtrain/base/device_cpu.h"

#include <float.h>

enum { ON_CUDA = 0 };
#define CPU(operation) operation
#define RUN(operation, ...) operation(__VA_ARGS__, NULL)
#define SCRATCH(bytes) ((size_t)0)
#include "operations.h"

// ------------------------------------------------------------------------------------------------
// 1. Cases

// Returns a hash of all that the operation writes; *guarded becomes false if it wrote past its outputs.
static uint64_t case_run(Case* c, size_t threads, const Array* poison, double value, bool* guarded) {
    Hash h = hash_begin(0);
    threads_set(threads);
    case_cpu(c, poison, value);
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n == 0 || a->role == INPUT) continue;
        hash_add(&h, a->host, array_bytes(a));
        for (size_t b = 0; b < GUARD; b++)
            *guarded = *guarded && ((unsigned char*)a->host)[array_bytes(a) + b] == 0xA5;
    }
    return hash_end(&h);
}

static void case_prove(Case* c) {
    char swallowed[200] = "";
    bool guarded = true, same = true;
    uint64_t hash = case_run(c, 1, NULL, 0.0, &guarded);
    for (size_t threads = 2; threads <= 3; threads++) same &= case_run(c, threads, NULL, 0.0, &guarded) == hash;
    #pragma omp parallel num_threads(2)  // in here OpenMP gives an operation one thread, whatever it asks for
    #pragma omp single
    same &= case_run(c, 3, NULL, 0.0, &guarded) == hash;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (!case_can_poison(c, a)) continue;
        for (int infinity = 0; infinity < 2; infinity++) {
            case_run(c, 2, a, infinity ? INFINITY : NAN, &guarded);
            if (case_shows(c, a, infinity, true) || (infinity && c->witness >= 0)) continue;
            size_t length = strlen(swallowed);
            snprintf(swallowed + length, sizeof swallowed - length, " %s in %s", infinity ? "infinity" : "NaN",
                     a->name);
        }
    }
    same &= case_run(c, 2, NULL, 0.0, &guarded) == hash;
    case_check(c, guarded && same && swallowed[0] == 0, " 1 = 2 = 3 threads: %s, guards: %s, swallowed:%s",
               same ? "same bits" : "DIFFERENT", guarded ? "intact" : "BROKEN",
               swallowed[0] ? swallowed : " nothing");
    for (int i = 0; i < c->count; i++)
        if (is_output(&c->arrays[i]) && c->arrays[i].expected) case_compare(c, &c->arrays[i], "");
}

// Nothing is fused on the CPU, and no operand is rounded.
static void test_matmul_gelu_forward(const Case* forward, const Result* pre) { (void)forward, (void)pre; }
static void test_matmul_gelu_backward(const Case* backward, const Result* sum) { (void)backward, (void)sum; }

// ------------------------------------------------------------------------------------------------
// 2. Sums in fixed point, against integers of 128 bits
//
// The references use no floating-point arithmetic: a number is split into an integer and a power of two, and is rounded
// where the specification rounds it, by comparing the bits that are cut off with a half.

__extension__ typedef unsigned __int128 Wide;
__extension__ typedef __int128 WideSigned;

// x / 2^places to the nearest integer, ties to even; x is below 2^120.
static Wide wide_divide(Wide x, int places) {
    if (places <= 0) return x << -places;
    if (places > 120) return 0;
    Wide half = (Wide)1 << (places - 1), whole = x >> places, rest = x - (whole << places);
    return whole + (rest > half || (rest == half && whole % 2 == 1));
}

// An integer of at most `digits` binary digits near x. Adjusts *exponent so that the result times 2^*exponent is
// nearest to x times the old 2^*exponent.
static Wide wide_round(Wide x, int digits, int* exponent) {
    int extra = -digits;
    for (Wide rest = x; rest > 0; rest >>= 1) extra++;
    if (extra <= 0) return x;
    *exponent += extra;
    return wide_divide(x, extra);
}

// Splits a positive double: it equals the result times 2^*exponent.
static Wide wide_of(double x, int* exponent) {
    double fraction = frexp(x, exponent);
    *exponent -= 53;
    return (Wide)ldexp(fraction, 53);
}

// llrint((double)x * scale), which rounds twice: to 53 digits, and to an integer.
static int64_t oracle_fixed(float x, double scale) {
    int exponent, scale_exponent;
    if (x == 0.0f) return 0;
    Wide fraction = wide_of(fabs((double)x), &exponent) >> 29;  // a float has 24 digits
    Wide product = fraction * wide_of(scale, &scale_exponent);
    exponent += 29 + scale_exponent;
    product = wide_round(product, 53, &exponent);
    int64_t magnitude = (int64_t)wide_divide(product, -exponent);
    return x < 0.0f ? -magnitude : magnitude;
}

// (float)((double)sum * quantum), which rounds three times: to 53 digits, again in the product, and to 24.
static float oracle_read(int64_t sum, double quantum) {
    int exponent = 0, quantum_exponent;
    Wide magnitude = wide_round(sum < 0 ? (Wide)0 - (Wide)sum : (Wide)sum, 53, &exponent);
    Wide product = magnitude * wide_of(quantum, &quantum_exponent);
    exponent += quantum_exponent;
    product = wide_round(wide_round(product, 53, &exponent), 24, &exponent);
    float value = ldexpf((float)product, exponent);
    return sum < 0 ? -value : value;
}

// Any float of magnitude up to 2^8, with all exponents and signs, and ties and their neighbors at this scale.
static float fixed_sample(uint64_t test, size_t i, double scale) {
    Random4 r = random4(41, RANDOM_TEST, test, i);
    float any = float_from_bits((r.bits[0] & 0x807fffffu) | (r.bits[1] % 135) << 23);
    float tie = (float)(((double)(r.bits[1] % 4096) - 2047.5) / scale);
    return r.bits[2] % 4 > 0 ? any : r.bits[2] % 8 > 0 ? tie : nextafterf(tie, r.bits[0] % 2 ? 1.0f : -1.0f);
}

// n elements in memory, misaligned by `moved`; the SIDE elements before and behind them must not change.
enum { SIDE = 8 };
static void* hold_guarded(size_t n, size_t bytes) {
    return memset(hold((n + 2 * SIDE) * bytes), 0xA5, (n + 2 * SIDE) * bytes);
}

// The effect of one call on n sums.
static void test_exact_add(size_t n, size_t moved, double scale, double limit) {
    const size_t bytes = (n + 2 * SIDE) * sizeof(int64_t), first = SIDE + moved;
    int64_t *start = (int64_t*)hold_guarded(n, sizeof(int64_t)), *sums = (int64_t*)hold(bytes);
    int64_t* expected = (int64_t*)hold(bytes);
    float *in = (float*)hold((n + SIDE) * sizeof(float)) + moved, inside = (float)limit;
    if ((double)inside > limit) inside = nextafterf(inside, 0.0f);
    const float outside[] = {nextafterf(inside, INFINITY), nextafterf(-inside, -INFINITY), FLT_MAX, INFINITY,
                             -INFINITY, NAN};
    for (size_t i = 0; i < n; i++) {
        Random4 r = random4(42, RANDOM_TEST, n, first + i);
        start[first + i] = (int64_t)((uint64_t)r.bits[0] << 32 | r.bits[1]) / 4;  // far from overflow
    }
    bool right = true, marks = true;
    for (size_t j = 0; j < 3 * (COUNT_OF(outside) + 1); j++) {  // in the last three all are inside
        size_t threads = 1 + j % 3, kind = j / 3;
        bool one_outside = n > 0 && kind < COUNT_OF(outside);
        double bad[3] = {2.5, 0.0, 2.5};
        for (size_t i = 0; i < n; i++) in[i] = fixed_sample(n, i, scale);
        if (n > 0) in[0] = inside;
        if (n > 1) in[n - 1] = -inside;
        if (one_outside) in[(kind * 7919 + n / 2) % n] = outside[kind];
        memcpy(sums, start, bytes);
        memcpy(expected, start, bytes);
        for (size_t i = 0; i < n; i++)
            if (fabsf(in[i]) <= inside) expected[first + i] += oracle_fixed(in[i], scale);
        threads_set(threads);
        exact_add(sums + first, &bad[1], in, scale, limit, n, NULL);
        right = right && memcmp(sums, expected, bytes) == 0;
        marks = marks && bad[0] == 2.5 && bad[2] == 2.5 && bad[1] == (one_outside ? 1.0 : 0.0);
        bad[1] = 1.0;  // which must not change
        in[0] = 0.0f;
        exact_add(sums + first, &bad[1], in, scale, limit, min_size(n, 1), NULL);
        marks = marks && bad[1] == 1.0;
    }
    check(right && marks, "%-28s N=%-5zu moved by %zu, x%-9.3g  int64  sums: %s, bad: %s", "exact_add", n, moved, scale,
          right ? "those of 128 bits" : "WRONG", marks ? "right" : "WRONG");
    release();
}

// The sums of 1000 gradients in several orders and groupings: the same bits, equal to those of a sum that cannot
// overflow, and as near to the real sum as the quantum promises.
static void test_exact_order(size_t n) {
    enum { GRADIENTS = 1000, GROUPS = 7 };
    static const size_t strides[] = {1, GRADIENTS - 1, 7, 389, 611, 853};  // forward, backward, and shuffled
    const double scale = 0x1p50, quantum = 0x1p-50;
    float *gradients = (float*)hold(GRADIENTS * n * sizeof(float)), *out = (float*)hold(n * sizeof(float));
    int64_t *sums = (int64_t*)hold(n * sizeof(int64_t)), *first = (int64_t*)hold(n * sizeof(int64_t));
    int64_t* groups = (int64_t*)hold(GROUPS * n * sizeof(int64_t));
    size_t differing = 0, wrong = 0, far = 0;
    double bad = 0.0;
    for (size_t i = 0; i < GRADIENTS * n; i++) gradients[i] = fixed_sample(43, i, scale);
    for (size_t trial = 0; trial < COUNT_OF(strides); trial++) {
        bool in_groups = trial >= 3;  // as with ranks: partial sums, then the sum over ranks
        threads_set(1 + trial % 3);
        memset(sums, 0, n * sizeof(int64_t));
        memset(groups, 0, GROUPS * n * sizeof(int64_t));
        for (size_t i = 0; i < GRADIENTS; i++) {
            const float* gradient = gradients + strides[trial] * (i + 1) % GRADIENTS * n;
            exact_add(in_groups ? groups + i * trial % GROUPS * n : sums, &bad, gradient, scale, 512.0, n, NULL);
        }
        for (size_t g = 0; in_groups && g < GROUPS; g++)
            exact_merge(sums, groups + (g + trial) % GROUPS * n, n, NULL);
        if (trial == 0) memcpy(first, sums, n * sizeof(int64_t));
        differing += memcmp(first, sums, n * sizeof(int64_t)) != 0;
    }
    exact_read(out, first, quantum, n, NULL);
    for (size_t i = 0; i < n; i++) {
        WideSigned sum = 0;
        long double real = 0.0L, size = 0.0L;
        for (size_t g = 0; g < GRADIENTS; g++) {
            sum += oracle_fixed(gradients[g * n + i], scale);
            real += (long double)gradients[g * n + i];
            size += fabsl((long double)gradients[g * n + i]);
        }
        wrong += sum != first[i];
        long double read = 0x1.00001p-24L * fabsl(real), ours = GRADIENTS * 0x1p-63L * size;  // roundings of both sides
        far += !(fabsl((long double)out[i] - real) <= 0.5L * GRADIENTS * (long double)quantum + read + ours);
    }
    check(differing == 0 && wrong == 0 && bad == 0.0, "%-28s N=%-5zu 1000 gradients in 6 orders  int64  "
          "%zu orders differ, %zu sums are not those of 128 bits", "exact_add, exact_merge", n, differing, wrong);
    check(far == 0, "%-28s N=%-5zu 1000 gradients  float  half a quantum each from the real sum; farther: %zu",
          "exact_read", n, far);
    release();
}

// Integers of every length, including ties in rounding to 53 or to 24 digits.
static int64_t fixed_sum(size_t i) {
    Random4 r = random4(45, RANDOM_TEST, 0, i);
    const int64_t corners[] = {0, 1, -1, INT64_MAX, INT64_MIN, INT64_MAX - 1};
    if (i < COUNT_OF(corners)) return corners[i];
    int64_t any = (int64_t)(((uint64_t)r.bits[0] << 32 | r.bits[1]) >> (1 + r.bits[2] % 63));
    int cut = (int)(r.bits[3] % 39);  // this many digits behind the first 24: all zero but the first
    int64_t tie = (int64_t)((2 * (uint64_t)(r.bits[0] % (1 << 24)) + 1) << cut);
    int64_t sum = r.bits[3] / 64 % 4 > 0 ? any : tie + (int64_t)(r.bits[1] % 3) - 1;
    return r.bits[2] / 64 % 2 ? sum : -sum;
}

static void test_exact_read(size_t n, size_t moved, double quantum) {
    const size_t first = SIDE + moved, float_bytes = (n + 2 * SIDE) * sizeof(float), bytes = 2 * float_bytes;
    int64_t* sums = (int64_t*)hold((n + SIDE) * sizeof(int64_t)) + moved;
    int64_t *other = (int64_t*)hold_guarded(n, sizeof(int64_t)), *start = (int64_t*)hold(bytes);
    int64_t* merged = (int64_t*)hold_guarded(n, sizeof(int64_t));
    float *out = (float*)hold(float_bytes), *read = (float*)hold_guarded(n, sizeof(float));
    bool right_read = true, right_merged = true;
    for (size_t i = 0; i < n; i++) {
        sums[i] = fixed_sum(i);
        other[first + i] = -(sums[i] / 2) + (int64_t)i;
        merged[first + i] = (int64_t)((WideSigned)sums[i] - sums[i] / 2 + (WideSigned)i);
        read[first + i] = oracle_read(sums[i], quantum);
    }
    memcpy(start, other, bytes);
    for (size_t threads = 1; threads <= 3; threads++) {
        threads_set(threads);
        memset(out, 0xA5, float_bytes);
        memcpy(other, start, bytes);
        exact_read(out + first, sums, quantum, n, NULL);
        exact_merge(other + first, sums, n, NULL);
        right_read = right_read && memcmp(out, read, float_bytes) == 0;
        right_merged = right_merged && memcmp(other, merged, bytes) == 0;
    }
    check(right_read, "%-28s N=%-5zu moved by %zu, x%-9.3g  float  those of 128 bits", "exact_read", n, moved, quantum);
    check(right_merged, "%-28s N=%-5zu moved by %zu  int64  those of 128 bits", "exact_merge", n, moved);
    release();
}

// The limbs of exact_sum or exact_sum_squares, carried, and its value: those of an integer of 128 bits, whatever the
// threads, and for every cut into two calls: at multiples of 8 for squares.
static void test_exact_sum(bool squares, size_t n, size_t moved) {
    const char* name = squares ? "exact_sum_squares" : "exact_sum";
    float* x = (float*)hold((n + SIDE) * sizeof(float)) + moved;
    WideSigned sum = 0;
    size_t differing = 0, cuts = 0;
    for (size_t i = 0; i < n; i++) {  // squares from 2^-120, of which nothing is left, to 2^18
        Random4 r = random4(48, RANDOM_TEST, squares, i);
        float size = float_from_bits((r.bits[0] & 0x7fffffu) | (127 - 60 + r.bits[1] % (n > 10000 ? 61 : 69)) << 23);
        x[i] = r.bits[2] % 2 ? size : -size;
    }
    for (size_t i = 0; i < n; i += squares ? 8 : 1) {
        double of[8] = {0};
        for (size_t j = 0; j < 8 && i + j < n; j++) of[j] = squares ? (double)x[i + j] * (double)x[i + j] : 0;
        double term = (of[0] + of[4]) + (of[1] + of[5]) + ((of[2] + of[6]) + (of[3] + of[7]));
        sum += (WideSigned)rint(ldexp(squares ? term : (double)x[i], 100));
    }
    for (size_t cut = 0; cut <= n; cut += squares ? 8 * (1 + cut / 1000 + n / 1000) : 1 + cut / 100, cuts++) {
        ExactSum got = {{{{0}, 0}}};
        ExactWindow* w = &got.windows[0];
        threads_set(1 + cuts % 3);
        for (int call = 0; call < 2; call++)
            (squares ? exact_sum_squares : exact_sum)(&got, call ? x : x + cut, call ? cut : n - cut, NULL);
        double value = exact_value(got), real = (double)sum * 0x1p-100;
        exact_carry(w);
        for (int i = 0; i < EXACT_LIMBS; i++)
            differing += w->limbs[i] != (uint64_t)(i < 4 ? (sum >> 40 * i) & ((1ll << 40) - 1) : sum >> 127);
        differing += w->outside >> EXACT_LAST_BITS != 0 || exact_window_value(got.windows[1]) != 0 ||
                     !(fabs(value - real) <= 2 * DBL_EPSILON * fabs(real));
    }
    check(differing == 0, "%-28s N=%-5zu moved by %zu, cut at %zu places  those of 128 bits; others: %zu", name, n,
          moved, cuts, differing);
    release();
}

// Sums across the windows and up to their limits, with the same value in any order; and what has no sum.
static void test_exact_sum_limit(void) {
    enum { N = 96 };
    static const size_t steps[] = {1, 5, 7};  // in 12 groups of 8, whose squares are added first
    // As many sums as fill a limb's spare bits would be.
    const uint64_t full = (1ull << 40) - 1;
    ExactSum one = {{{{full, full, full, full, 0}, 0}}}, many = {{{{0}, 0}}};
    for (size_t i = 0; i < (size_t)1 << 24; i++) exact_merge_sum(&many, &one);
    check(exact_value(many) == 0x1p84, "%-28s of 2^24 sums: %a", "exact_merge_sum", exact_value(many));
    const struct { float x, y; size_t times; bool squared, number; } rows[] = {
        {0x1p80f, 0, 1, false, true}, {0x1.fffffep79f, 0, 96, false, true}, {-0x1p80f, 0, 9, false, true},
        {0x1p80f, 0x1p79f, 50, false, true}, {0x1p90f, -0x1p70f, 50, false, true}, {0x1p120f, 0, 1, false, true},
        {FLT_MAX, 1, 96, false, true}, {-0x1p-20f, 0, 2, false, true}, {INFINITY, 0, 1, false, false},
        {-INFINITY, 0, 1, false, false}, {NAN, 0, 1, false, false}, {-NAN, 1, 3, false, false},
        {0x1p40f, 0, 1, true, true}, {0x1.fffffep39f, 0x1p41f, 40, true, true}, {-0x1p50f, 1, 96, true, true},
        {0x1p70f, 0, 96, true, true}, {FLT_MAX, 0, 10, true, true}, {FLT_MAX, 0, 96, true, false},
        {-INFINITY, 0, 1, true, false}, {NAN, 0, 1, true, false},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        double values[3], wanted = 0, size = 0;
        for (size_t order = 0; order < 3; order++) {
            float x[N] = {0};
            ExactSum sum = {{{{0}, 0}}};
            for (size_t k = 0; k < N; k++) {
                float value = k < rows[i].times ? rows[i].x : rows[i].y;
                x[8 * (k / 8 * steps[order] % (N / 8)) + k % 8] = value;
            }
            for (size_t k = 0; k < N; k++) {
                double term = rows[i].squared ? (double)x[k] * (double)x[k] : (double)x[k];
                wanted += term / 3;
                size += fabs(term);
            }
            (rows[i].squared ? exact_sum_squares : exact_sum)(&sum, x, N, NULL);
            values[order] = exact_value(sum);
        }
        bool right = fabs(values[0] - wanted) <= 0x1p-30 * size && values[0] == values[1];
        check(rows[i].number ? right && values[0] == values[2] : isnan(values[0]), "%-28s %zu times %a, then %a: %.17g",
              rows[i].squared ? "exact_sum_squares" : "exact_sum", rows[i].times, (double)rows[i].x, (double)rows[i].y,
              values[0]);
    }
}

static void test_exact(void) {
    const double scales[] = {0x1p50, 0x1p50 / 3, 0x1.fffffffffffffp49, 4.0};
    const size_t lengths[] = {0, 1, 2, 3, 33, 257, 5001};
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        for (size_t j = 0; j < COUNT_OF(scales); j++) {
            double limit = j % 2 ? 1000.9 : 512.0;  // 1000.9 is not a float; the nearest is above it
            test_exact_add(lengths[i], (i + j) % 4, scales[j], limit);
            test_exact_read(lengths[i], (i + j) % 4, 1.0 / scales[j]);
        }
    }
    test_exact_order(1);
    test_exact_order(33);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        test_exact_sum(false, lengths[i], i % 4);
        test_exact_sum(true, lengths[i], i % 4);
    }
    test_exact_sum(true, 200003, 1);  // of several threads
    test_exact_sum_limit();
}

// ------------------------------------------------------------------------------------------------
// 3. Checksum

static floatX floatX_from_bits(uint32_t bits) {
    floatX element;
    memcpy(&element, &bits, sizeof element);  // little-endian
    return element;
}

static uint64_t checksum_of(const floatX* elements, size_t first, size_t n) {
    uint64_t out = ~0ull;
    vector_checksum(&out, elements, first, n, NULL);
    return out;
}

static int checksum_order(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return (x > y) - (x < y);
}

static void test_checksum(void) {
    enum { N = 67, PATTERNS = 65536, FLOATX_BITS = 8 * sizeof(floatX) };
    const size_t first = ((size_t)1 << 40) + 7;
    floatX elements[N];

    // By the formula, computed elsewhere.
    const float four[4] = {1.0f, -2.5f, 0.0f, 3072.0f};
    const uint64_t known = FLOATX_IS_FLOAT ? 0x4cd597bb516a77da : FP16 ? 0x13ad38a47442ba63 : 0xa96b93c4909dc940;
    for (int i = 0; i < 4; i++) elements[i] = floatX_of(four[i]);
    check(checksum_of(elements, first, 4) == known && checksum_of(elements, first, 0) == 0, "%-28s %s  a known answer",
          "checksum", FLOATX_NAME);

    // Cut into three parts at every pair of positions, with 1, 2 and 3 threads.
    bool cut = true, place = true;
    for (size_t i = 0; i < N; i++) elements[i] = floatX_from_bits(random_bits(46, RANDOM_TEST, 0, i));
    threads_set(1);
    uint64_t whole = checksum_of(elements, first, N);
    for (size_t a = 0; a <= N; a++) {
        for (size_t b = a; b <= N; b++) {
            threads_set(1 + (a + b) % 3);
            uint64_t sum = checksum_of(elements, first, a) + checksum_of(elements + a, first + a, b - a);
            cut = cut && sum + checksum_of(elements + b, first + b, N - b) == whole;
        }
        place = place && checksum_of(elements, first + 1 + a, N) != whole;
    }
    check(cut, "%-28s N=%d %s  the sum of any three parts is the whole", "checksum", N, FLOATX_NAME);
    check(place, "%-28s N=%d %s  elsewhere in the vector it is another", "checksum", N, FLOATX_NAME);

    // Every flipped bit, and every swap of two different elements; many are nearly equal here, as parameters are.
    size_t flips = 0, swaps = 0, unseen = 0;
    threads_set(1);
    for (int content = 0; content < 3; content++) {
        for (size_t i = 0; i < N; i++) {
            uint32_t random = random_bits(47, RANDOM_TEST, 0, i);
            elements[i] = floatX_from_bits(content == 0 ? random : content == 1 ? (uint32_t)i % 3 : (uint32_t)i);
        }
        whole = checksum_of(elements, 0, N);
        for (size_t i = 0; i < N; i++) {
            for (int bit = 0; bit < FLOATX_BITS; bit++, flips++) {
                unsigned char* byte = (unsigned char*)&elements[i] + bit / 8;
                *byte ^= (unsigned char)(1 << bit % 8);
                unseen += checksum_of(elements, 0, N) == whole;
                *byte ^= (unsigned char)(1 << bit % 8);
            }
            for (size_t j = 0; j < i; j++) {
                const floatX first_held = elements[j], second_held = elements[i];
                if (memcmp(&first_held, &second_held, sizeof(floatX)) == 0) continue;
                elements[i] = first_held, elements[j] = second_held;
                swaps++;
                unseen += checksum_of(elements, 0, N) == whole;
                elements[i] = second_held, elements[j] = first_held;
            }
        }
    }
    check(unseen == 0, "%-28s N=%d %s  unseen of %zu flipped bits and %zu swaps: %zu", "checksum", N, FLOATX_NAME,
          flips, swaps, unseen);

    // No two values of an element have the same checksum: all values in 16 bits.
    uint64_t* sums = (uint64_t*)hold(PATTERNS * sizeof(uint64_t));
    size_t equal = 0;
    for (size_t at = 0; at < 4; at++) {
        for (uint32_t i = 0; i < PATTERNS; i++) {
            floatX element = floatX_from_bits(FLOATX_IS_FLOAT ? i * 65537u : i);
            sums[i] = checksum_of(&element, at * 12345679, 1);
        }
        qsort(sums, PATTERNS, sizeof sums[0], checksum_order);
        for (size_t i = 1; i < PATTERNS; i++) equal += sums[i] == sums[i - 1];
    }
    check(equal == 0, "%-28s %s  %d contents of an element at 4 places, with equal checksums: %zu", "checksum",
          FLOATX_NAME, PATTERNS, equal);
    release();
}

// ------------------------------------------------------------------------------------------------
// 4. Elementary functions, random numbers and the hash

// e^x over all floats, in units of the last place; steps of 509 bit patterns visit every exponent 16,000 times.
static void test_exp(void) {
    double worst = 0.0;
    bool limits = exp_fast(INFINITY) == INFINITY && exp_fast(-INFINITY) == 0.0f && exp_fast(0.0f) == 1.0f
               && exp_fast(-0.0f) == 1.0f && isnan(exp_fast(NAN)) && isnan(sigmoid_fast(NAN))
               && sigmoid_fast(INFINITY) == 1.0f && sigmoid_fast(-INFINITY) == 0.0f;
    for (uint64_t pattern = 0; pattern <= 0xffffffffull; pattern += 509) {
        float in = float_from_bits((uint32_t)pattern), got = exp_fast(in);
        if (in != in) limits = limits && got != got;
        else if (in < -87.3f) limits = limits && got == 0.0f;
        else if (in > 88.3f) limits = limits && got > (in > 88.73f ? FLT_MAX : 2e38f);
        else {
            double want = exp((double)in), error = fabs((double)got - want) / ldexp(1.0, (int)floor(log2(want)) - 23);
            if (!(error <= worst)) worst = error;
        }
    }
    check(worst <= 2.0, "%-28s %-30s err %.2f <= 2 units in the last place", "exp_fast", "-87.3 to 88.3", worst);
    check(limits, "%-28s %-30s", "exp_fast, sigmoid", "0, infinity and NaN beyond");
}

static void test_random(void) {
    // The known answers published by the authors: counter and key all zeros, all ones, and the digits of pi.
    static const uint32_t answers[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                           {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                           {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    const Random4 got[3] = {
        random4(0, (RandomPurpose)0, 0, 0), random4(~0ull, (RandomPurpose)0xffffffffu, 0xffffffffu, ~0ull),
        random4(0x299f31d0a4093822ull, (RandomPurpose)0x03707344, 0x13198a2e, 0x85a308d3243f6a88ull)};
    check(memcmp(answers, got, sizeof answers) == 0, "%-28s three known answers", "random4");
    bool lanes = true;
    for (uint64_t i = 0; i < 64; i++)
        lanes = lanes && random_bits(3, RANDOM_TEST, 4, i) == random4(3, RANDOM_TEST, 4, i / 4).bits[i % 4];
    check(lanes, "%-28s is lane index %% 4 of random4", "random_bits");
    static const uint64_t starts[] = {0, 1, 2, 3, 4, 70, (1ull << 34) - 37, ~0ull - 300};  // near a carry, and the end
    bool fills = true;
    for (size_t s = 0; s < COUNT_OF(starts); s++) {
        for (size_t n = 0; n <= 150; n++) {
            uint32_t filled[151] = {0};
            random_fill(filled, ~0ull - s, RANDOM_TEST, (1ull << 32) + 5, starts[s], n);
            for (size_t i = 0; i < n; i++)
                fills = fills && filled[i] == random_bits(~0ull - s, RANDOM_TEST, (1ull << 32) + 5, starts[s] + i);
            fills = fills && filled[n] == 0;
        }
    }
    check(fills, "%-28s is random_bits, whatever the first number and the count", "random_fill");

    const uint64_t n = 1000000;
    double uniform_mean = 0.0, uniform_lag = 0.0, last = 0.0, sums[4] = {0.0, 0.0, 0.0, 0.0}, lag = 0.0, before = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        double u = (double)random_uniform(21, RANDOM_TEST, 0, i) - 0.5;
        double z = (double)random_normal(22, RANDOM_TEST, 0, i), power = 1.0;
        uniform_mean += u;
        uniform_lag += u * last;
        lag += z * before;
        last = u;
        before = z;
        for (int k = 0; k < 4; k++) sums[k] += power *= z;
    }
    double N = (double)n, bound = 4.0 / sqrt(N);
    check_bound(fabs(uniform_mean / N), bound / sqrt(12.0), "%-28s mean - 1/2", "random_uniform");
    check_bound(fabs(12.0 * uniform_lag / N), bound, "%-28s correlation of neighbors", "random_uniform");
    const double expected[4] = {0.0, 1.0, 0.0, 3.0}, variance[4] = {1.0, 2.0, 15.0, 96.0};  // of its estimate
    for (int k = 0; k < 4; k++)
        check_bound(fabs(sums[k] / N - expected[k]), bound * sqrt(variance[k]), "%-28s moment %d", "random_normal",
                    k + 1);
    check_bound(fabs(lag / N), bound, "%-28s correlation of neighbors", "random_normal");
}

static void test_hash(void) {
    const char* text = "Nobody inspects the spammish repetition";
    check(hash_bytes("", 0) == 0xEF46DB3751D8E999ull && hash_bytes("abc", 3) == 0x44BC2CF5AD770999ull
          && hash_bytes(text, strlen(text)) == 0xFBCEA83C8A378BF1ull, "%-28s three known answers", "hash_bytes");
    unsigned char bytes[257];
    bool same = true;
    for (int i = 0; i < 257; i++) bytes[i] = (unsigned char)(i * 151 + 7);
    for (size_t first = 0; first <= 257; first++) {
        for (size_t second = first; second <= 257; second += 13) {
            Hash h = hash_begin(0);
            hash_add(&h, bytes, first);
            hash_add(&h, bytes + first, second - first);
            hash_add(&h, bytes + second, 257 - second);
            same = same && hash_end(&h) == hash_bytes(bytes, 257);
        }
    }
    check(same, "%-28s in three parts: the same", "hash_add");
}

// ------------------------------------------------------------------------------------------------
// Conversions of the 16-bit types, against their definition

// Each number of FP16, which exports write in any build, by its definition. What lies between two goes to the nearer
// one, the middle to the even one; what is too large becomes infinite.
static void test_fp16(void) {
    static double value[0x7c01];
    for (int h = 0; h <= 0x7c00; h++)
        value[h] = h < 0x400 ? ldexp(h, -24) : ldexp(0x400 + (h & 0x3ff), (h >> 10) - 25);
    for (int h = 0; h < 0x7c00; h++)
        for (int sign = 1, bit = 0; sign >= -1; sign -= 2, bit = 0x8000) {
            float middle = (float)(sign * (value[h] + value[h + 1]) / 2);
            expect((double)float_from_f16((uint16_t)(h | bit)) == sign * value[h], "%#x is %g", h | bit, value[h]);
            expect(f16_from_float((float)(sign * value[h])) == (h | bit), "%g", sign * value[h]);
            expect(f16_from_float(middle) == ((h + (h & 1)) | bit), "the middle, %g", (double)middle);
            expect(f16_from_float(nextafterf(middle, 0)) == (h | bit), "below the middle, %g", (double)middle);
            expect(f16_from_float(nextafterf(middle, 2 * middle)) == ((h + 1) | bit), "above %g", (double)middle);
        }
    for (int bit = 0; bit <= 0x8000; bit += 0x8000) {
        float sign = bit ? -1 : 1;
        expect(f16_from_float(sign * INFINITY) == (0x7c00 | bit), "infinity");
        expect(f16_from_float(sign * 1e30f) == (0x7c00 | bit), "1e30");
        expect(float_from_f16((uint16_t)(0x7c00 | bit)) == sign * INFINITY, "infinity of FP16");
        for (int h = 0x7c01; h < 0x8000; h++)
            expect((f16_from_float(float_from_f16((uint16_t)(h | bit))) & 0x7fff) > 0x7c00, "the NaN %#x", h | bit);
    }
    verdict("%-28s FP16, as exports write it: every number, rounding, infinity, NaN", "conversions");
}

#if FLOATX_IS_FLOAT
static void test_conversions(void) {
    bool same = true;
    for (uint64_t pattern = 0; pattern <= 0xffffffffull; pattern += 65521) {
        float in = float_from_bits((uint32_t)pattern), out = float_of(floatX_of(in));
        float drawn = floatX_of_stochastic(in, ~0u);
        same = same && (in != in ? out != out && drawn != drawn
                                 : bits_from_float(in) == bits_from_float(out) && in == drawn);
    }
    check(same, "%-28s %s are the identity", "conversions", FLOATX_NAME);
}
#else

#ifdef PRECISION_BF16
enum { MANTISSA = 7, BIAS = 127, INFINITE = 0x7f80 };
#else
enum { MANTISSA = 10, BIAS = 15, INFINITE = 0x7c00 };
#endif

// The value of the bits 0, exponent, mantissa; at INFINITE, 2^(maximum + 1).
static double number_of(int bits) {
    int exponent = bits >> MANTISSA, mantissa = bits & ((1 << MANTISSA) - 1);
    return exponent == 0 ? ldexp(mantissa, 1 - BIAS - MANTISSA)
                         : ldexp(mantissa + (1 << MANTISSA), exponent - BIAS - MANTISSA);
}

// The spacing of numbers at x, or above it.
static double unit_at(double x) {
    int exponent = 0;
    frexp(x, &exponent);
    return ldexp(1.0, (exponent - 1 > 1 - BIAS ? exponent - 1 : 1 - BIAS) - MANTISSA);
}

static bool nearest_agrees(float in) {
    double got = (double)float_of(floatX_of(in)), unit = unit_at((double)in);
    double want = nearbyint((double)in / unit) * unit;  // ties to even
    if (fabs(want) >= number_of(INFINITE)) want = copysign(INFINITY, want);
    return (in != in ? isnan(got) : got == want) && !signbit(got) == !signbit(in);
}

// All draws are neighbors of x, with mean x within 4 sigma.
// Independent: the correlation of an element's rounding with that of the element one to four positions before has
// standard deviation 1 / sqrt(n) if there is none.
static void test_stochastic(float in) {
    enum { LAGS = 4 };
    const uint64_t n = 1000000;
    double sum = 0.0, magnitude = fabs((double)in), together[LAGS] = {0};
    double unit = unit_at(magnitude), low = floor(magnitude / unit) * unit, before[LAGS] = {0};
    double fraction = (magnitude - low) / unit;
    bool neighbors = true;
    for (uint64_t i = 0; i < n; i++) {
        double drawn = (double)float_of(floatX_of_stochastic(in, random_bits(31, RANDOM_TEST, bits_from_float(in), i)));
        bool up = fabs(drawn) == low + unit && magnitude > low;
        neighbors = neighbors && (up || fabs(drawn) == low);
        neighbors = neighbors && (drawn == 0.0 || (drawn < 0.0) == (in < 0.0f));
        sum += drawn - (double)in;
        double deviation = (up ? 1.0 : 0.0) - fraction;
        for (int lag = LAGS - 1; lag >= 0; lag--) {
            together[lag] += deviation * before[lag];
            before[lag] = lag > 0 ? before[lag - 1] : deviation;
        }
    }
    double variance = fraction * (1.0 - fraction), correlation = 0.0;
    double bound = 4.0 * unit * sqrt(variance / (double)n), error = fabs(sum / (double)n);
    for (int lag = 0; lag < LAGS && variance > 0.0; lag++)
        correlation = fmax(correlation, fabs(together[lag]) / variance / sqrt((double)n));
    check(correlation <= 4.0, "%-28s x = %-26.9g %s  neighbors' roundings correlate by %.1f deviations <= 4",
          "floatX_of_stochastic", (double)in, FLOATX_NAME, correlation);
    check(neighbors && error <= bound, "%-28s x = %-26.9g %s  bias %.1e <= %.1e, draws are %s", "floatX_of_stochastic",
          (double)in, FLOATX_NAME, error, bound, neighbors ? "neighbors" : "NOT NEIGHBORS");
}

static void test_conversions(void) {
    size_t wrong_value = 0, wrong_trip = 0, moved = 0, wrong_nearest = 0;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        floatX in, out;
        in.bits = (uint16_t)bits;
        float value = float_of(in);
        out = floatX_of(value);
        int rest = bits & 0x7fff;
        if (rest > INFINITE) {
            wrong_value += !isnan(value);
            wrong_trip += (out.bits & 0x7fff) <= INFINITE;
        } else {
            double want = rest == INFINITE ? (double)INFINITY : number_of(rest);
            wrong_value += (double)value != (bits & 0x8000 ? -want : want);
            wrong_value += (bits_from_float(value) >> 31) != bits >> 15;
            wrong_trip += out.bits != in.bits;
        }
        for (uint32_t i = 0; i < 8; i++) {
            float drawn = float_of(floatX_of_stochastic(value, i < 2 ? 0u - i : random_bits(32, RANDOM_TEST, bits, i)));
            moved += rest > INFINITE ? !isnan(drawn) : bits_from_float(drawn) != bits_from_float(value);
        }
    }
    check(wrong_value == 0, "%-28s 65536 patterns %s, wrong: %zu", "float_of", FLOATX_NAME, wrong_value);
    check(wrong_trip == 0, "%-28s 65536 patterns %s there and back, wrong: %zu", "floatX_of", FLOATX_NAME, wrong_trip);
    check(moved == 0, "%-28s 65536 patterns %s must not move, moved: %zu", "floatX_of_stochastic", FLOATX_NAME, moved);

    size_t tried = 0;
    for (uint64_t i = 0; i < 1000000; i++, tried += 2) {
        uint32_t random = random_bits(33, RANDOM_TEST, 0, i);
        wrong_nearest += !nearest_agrees(float_from_bits(random));  // any float
        int exponent = (int)(random % (2 * BIAS + 30)) - BIAS - MANTISSA - 5;
        float near = (float)ldexp(1.0 + (double)(random >> 9) * 0x1p-23, exponent);
        wrong_nearest += !nearest_agrees(random & 256 ? -near : near);  // the type's own range
    }
    for (int bits = 0; bits < INFINITE; bits++) {  // each number, each midpoint, and the floats next to it
        float middle = (float)(0.5 * (number_of(bits) + number_of(bits + 1)));
        uint32_t b = bits_from_float(middle);
        wrong_nearest += !nearest_agrees(middle) + !nearest_agrees(-middle) + !nearest_agrees(float_from_bits(b + 1));
        wrong_nearest += !nearest_agrees(float_from_bits(b - (b > 0))) + !nearest_agrees((float)number_of(bits));
        tried += 5;
    }
    const uint32_t edges[] = {0, 1, 2, 0x007fffff, 0x00800000, 0x7f7fffff, 0x7f800000,
                              0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff};
    for (size_t i = 0; i < COUNT_OF(edges); i++, tried += 2)
        wrong_nearest += !nearest_agrees(float_from_bits(edges[i]))
                       + !nearest_agrees(float_from_bits(edges[i] | 0x80000000u));
    check(wrong_nearest == 0, "%-28s %zu floats to the nearest %s, ties to even, wrong: %zu", "floatX_of", tried,
          FLOATX_NAME, wrong_nearest);

    const float values[] = {1.001f, -1.001f, 3.14159265f, -1234.56f, 0.3e-6f, -0.7e-7f, 5.1e-5f, 0.99999f, 2.0000002f,
                            65503.0f, 0.1f, -1.5f, 0.0f};
    for (size_t i = 0; i < COUNT_OF(values); i++) test_stochastic(values[i]);
}
#endif

// Copies of any length, from and to any address: all bytes, and none next to them. Copies of 256 KiB or more are made
// in pieces that bypass the caches.
static void test_copies(void) {
    enum { PIECE = 1 << 18, ROOM = 4 * PIECE };
    const size_t lengths[] = {0, 1, 15, 17, 4095, PIECE - 1, PIECE, PIECE + 1, PIECE + 31, 2 * PIECE - 7,
                              3 * PIECE + 999};
    unsigned char *from = (unsigned char*)hold(ROOM), *to = (unsigned char*)hold(ROOM);
    unsigned char* expected = (unsigned char*)hold(ROOM);
    size_t wrong = 0, copies = 0;
    for (size_t i = 0; i < ROOM; i++) from[i] = (unsigned char)(random_bits(5, RANDOM_TEST, 1, i) >> 8);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        for (size_t shift = 0; shift < 8; shift++, copies += 2) {
            size_t source = 64 + 5 * shift, target = 64 + 3 * shift, bytes = lengths[i];
            for (int direction = 0; direction < 2; direction++) {
                memset(to, 0xa5, ROOM);
                memset(expected, 0xa5, ROOM);
                memcpy(expected + target, from + source, bytes);
                if (direction) device_upload(to + target, from + source, bytes, NULL);
                else device_download(to + target, from + source, bytes, NULL);
                wrong += memcmp(to, expected, ROOM) != 0;
            }
        }
    }
    check(wrong == 0, "%-28s %zu copies of 0 to %zu bytes, odd addresses, wrong: %zu", "upload, download", copies,
          lengths[COUNT_OF(lengths) - 1], wrong);
    release();
}

int main(void) {
    tests_begin("test_kernels");
    test_exp();
    test_random();
    test_hash();
    test_conversions();
    test_fp16();
    test_odd_shapes();
    test_exact();
    test_checksum();
    test_copies();
    return tests_end();
}
