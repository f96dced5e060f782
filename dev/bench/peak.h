// peak.h: measures this machine's peak rate of arithmetic, for programs that compare with it.
//
// Multiplications and additions in registers alone, with enough accumulators to hide their latency: of floats in the
// widest vectors that the GEMMs may choose, and of bfloat16 pairs where the processor has instructions for them.

#ifndef LLMTRAIN_PEAK_H
#define LLMTRAIN_PEAK_H

#include "llmtrain/ops/gemm.h"

#define PEAK_FP32(name, attribute, type, multiply_add, sums_count) \
    attribute static inline float name(size_t turns) { \
        type sums[sums_count], half; \
        for (size_t i = 0; i < sizeof half / sizeof(float); i++) half[i] = 0.5f; \
        for (size_t i = 0; i < sums_count; i++) sums[i] = half; \
        for (size_t t = 0; t < turns; t++) { \
            GEMM_UNROLL \
            for (int i = 0; i < sums_count; i++) sums[i] = multiply_add(sums[i], half, half); \
        } \
        for (int i = 1; i < sums_count; i++) sums[0] += sums[i]; \
        return sums[0][0]; \
    }

PEAK_FP32(peak_portable, , Vector, vector_fused, 12)
#ifdef GEMM_X86
PEAK_FP32(peak_avx2, GEMM_AVX2, __m256, _mm256_fmadd_ps, 12)
PEAK_FP32(peak_avx512, GEMM_AVX512, __m512, _mm512_fmadd_ps, 16)
#endif

#ifdef GEMM_X86_BF16
GEMM_AVX512BF16 static inline float peak_avx512bf16(size_t turns) {
    __m512 sums[16];
    __m512bh half = (__m512bh)_mm512_set1_epi16(0x3f00);
    for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
    for (size_t t = 0; t < turns; t++) {
        GEMM_UNROLL
        for (int i = 0; i < 16; i++) sums[i] = _mm512_dpbf16_ps(sums[i], half, half);
    }
    for (int i = 1; i < 16; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return _mm512_cvtss_f32(sums[0]);
}

GEMM_AMX static inline float peak_amx(size_t turns) {
    float sums[16 * 16];
    gemm_begin_amx();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(6);
    for (size_t t = 0; t < turns; t++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, 64);
    gemm_end_amx();
    return sums[0];
}
#endif

typedef struct {
    float (*loop)(size_t turns);
    double flops;  // per turn
} PeakLoop;

// The loop for the kernels that gemm has chosen.
static inline PeakLoop peak_loop(bool bf16) {
    PeakLoop peak = {peak_portable, 12 * 2 * VECTOR_LANES};
    gemm_backend();  // makes the choice if nothing has yet
    const GemmKernel* kernel = bf16 ? gemm_state.for_bf16 : gemm_state.for_any;
#ifdef GEMM_X86
    if (kernel == &gemm_avx2) peak.loop = peak_avx2, peak.flops = 12 * 16;
    if (kernel == &gemm_avx512) peak.loop = peak_avx512, peak.flops = 16 * 32;
#endif
#ifdef GEMM_X86_BF16
    if (kernel == &gemm_avx512bf16) peak.loop = peak_avx512bf16, peak.flops = 16 * 64;
    if (kernel == &gemm_amx) peak.loop = peak_amx, peak.flops = 4 * 16384;
#endif
    (void)kernel;
    return peak;
}

// Milliseconds: CLOCK_MONOTONIC, or processor time, which other programs on the machine do not change.
static inline double clock_ms(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// Total flops per second of `threads` threads, measured for about `ms` milliseconds of each thread's clock.
static inline double peak_measure(PeakLoop peak, size_t threads, clockid_t clock, double ms) {
    double rate = 0.0;
    (void)threads;
#ifdef _OPENMP
    #pragma omp parallel num_threads((int)threads) reduction(+:rate)
#endif
    {
        volatile float keep = peak.loop(100);
        double began = clock_ms(clock), ended = began;
        size_t turns = 0, some = (size_t)(2e6 / peak.flops) + 1;
        for (; ended - began < ms; ended = clock_ms(clock), turns += some) keep = peak.loop(some);
        (void)keep;
        rate += 1e3 * peak.flops * (double)turns / (ended - began);
    }
    return rate;
}

#endif  // LLMTRAIN_PEAK_H
