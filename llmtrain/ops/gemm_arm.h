// gemm_arm.h: the kernel of gemm.h for 64-bit Arm processors that multiply bfloat16: BFMMLA, of Armv8.6 and, optional,
// Armv8.2 (Neoverse V1 and N2, Apple M2). Floats go through gemm_portable.h, whose vectors the compiler makes of NEON.
//
// An instruction adds to 2 x 2 floats the products of 2 rows of A and 2 columns of B, four elements each: four times
// the arithmetic of an FMA of floats. Operands are packed as it reads them: for every two units (four elements in k)
// all lanes, each with its two units side by side, so that two neighboring lanes fill a register. Products are added
// two at a time and rounded to odd ("Arm Architecture Reference Manual", BFMMLA): the bits are this instruction's own.
//
// Compiles for any 64-bit Arm, and to nothing elsewhere; gemm.h calls it only where the processor has the instruction
// (gemm_has_bfmmla).

#ifndef LLMTRAIN_GEMM_ARM_H
#define LLMTRAIN_GEMM_ARM_H

#include "gemm_portable.h"

#if defined(__aarch64__) && !defined(__CUDACC__)
#define GEMM_ARM 1

#include <arm_neon.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#ifdef __clang__
#define GEMM_BFMMLA __attribute__((target("bf16")))
#else
#define GEMM_BFMMLA __attribute__((target("arch=armv8.2-a+bf16")))
#endif

enum { BFMMLA_ROWS = 8, BFMMLA_COLS = 12 };  // 24 of the 32 registers hold the sums, four the rows, one two columns

GEMM_BODIES(bfmmla, , BFMMLA_ROWS, BFMMLA_COLS)

// panel[u / 2][lane][u % 2], with zeros outside of the operand.
static inline void gemm_pack_bfmmla(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes, size_t width,
                                    size_t k, size_t count) {
    const uint16_t* data = (const uint16_t*)(const void*)o->data;
    size_t lane_step = o->k_contiguous ? o->stride : 1, k_step = o->k_contiguous ? 1 : o->stride;
    for (size_t done = 0; done < count; done += 4, panel += 2 * width) {
        size_t whole = min_size(4, count - done);
        if (lanes < width || whole < 4) memset(panel, 0, 2 * width * sizeof *panel);
        uint16_t* to = (uint16_t*)panel;
        const uint16_t* from = data + lane * lane_step + (k + done) * k_step;
        if (o->k_contiguous && whole == 4) {
            for (size_t l = 0; l < lanes; l++) memcpy(to + 4 * l, from + l * lane_step, 8);
        } else {
            for (size_t i = 0; i < whole; i++)
                for (size_t l = 0; l < lanes; l++) to[4 * l + i] = from[l * lane_step + i * k_step];
        }
    }
}

GEMM_BFMMLA static inline void gemm_multiply_bfmmla(float* sums, size_t stride, const float* from, size_t from_stride,
                                                    const uint32_t* a, const uint32_t* b, size_t units) {
    enum { PAIRS = BFMMLA_COLS / 2, TILES = BFMMLA_ROWS / 2 * PAIRS };  // of columns; of 2 x 2 sums
    float32x4_t c[TILES];
    GEMM_UNROLL
    for (size_t t = 0; t < TILES; t++) {
        size_t row = t / PAIRS * 2, column = t % PAIRS * 2;
        c[t] = from ? vcombine_f32(vld1_f32(from + row * from_stride + column),
                                   vld1_f32(from + (row + 1) * from_stride + column)) : vdupq_n_f32(0.0f);
    }
    for (size_t u = 0; u < units; u += 2, a += 2 * BFMMLA_ROWS, b += 2 * BFMMLA_COLS) {
        bfloat16x8_t rows[BFMMLA_ROWS / 2];
        GEMM_UNROLL
        for (size_t r = 0; r < BFMMLA_ROWS / 2; r++) rows[r] = vreinterpretq_bf16_u32(vld1q_u32(a + 4 * r));
        GEMM_UNROLL
        for (size_t p = 0; p < PAIRS; p++) {
            bfloat16x8_t columns = vreinterpretq_bf16_u32(vld1q_u32(b + 4 * p));
            GEMM_UNROLL
            for (size_t r = 0; r < BFMMLA_ROWS / 2; r++)
                c[r * PAIRS + p] = vbfmmlaq_f32(c[r * PAIRS + p], rows[r], columns);
        }
    }
    GEMM_UNROLL
    for (size_t t = 0; t < TILES; t++) {
        float* to = sums + t / PAIRS * 2 * stride + t % PAIRS * 2;
        vst1_f32(to, vget_low_f32(c[t]));
        vst1_f32(to + stride, vget_high_f32(c[t]));
    }
}

static inline bool gemm_has_bfmmla(void) {
#ifdef __APPLE__
    int has = 0;
    size_t bytes = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &bytes, NULL, 0) == 0 && has;
#else
    enum { HAS_BF16 = 1 << 14 };  // HWCAP2_BF16 of Linux
    return getauxval(AT_HWCAP2) & HAS_BF16;
#endif
}

// A few rows are left to the kernel for floats, as with AMX.
static const GemmKernel gemm_bfmmla = {
    "bfmmla", true, true, BFMMLA_ROWS, BFMMLA_COLS, 384, 384, 2, gemm_pack_bfmmla, gemm_multiply_bfmmla,
    NULL, gemm_start_bfmmla, gemm_store_bfmmla, NULL, NULL, NULL};

#endif  // __aarch64__

#endif  // LLMTRAIN_GEMM_ARM_H
