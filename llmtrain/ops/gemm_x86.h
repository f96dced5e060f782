// gemm_x86.h: the kernels of gemm.h for x86-64.
//
//   1. AVX2            6 x 16 tile, FMA
//   2. AVX-512        12 x 32 tile, FMA, and packing by 16 x 16 transposes
//   3. AVX512_BF16    12 x 32 tile of bfloat16 pairs
//   4. AMX            32 x 32 tile of bfloat16 in the tile registers
//
// Every function has its own target attribute, so that the file compiles for any x86-64; gemm.h calls only what the
// processor has (gemm_has_*). Kernels that the compiler does not know are left out.

#ifndef LLMTRAIN_GEMM_X86_H
#define LLMTRAIN_GEMM_X86_H

#include "gemm_portable.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GEMM_X86 1

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define GEMM_X86_BF16 1  // the compiler knows AVX512_BF16 and AMX
#endif

// g++ 12 warns about the undefined value inside of its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// ------------------------------------------------------------------------------------------------
// 1. AVX2
//
// 12 of the 16 registers hold the sums, two a row of B, one an element of A. Floats are packed by 8 x 8 transposes;
// everything else, and panels at the edge of an operand, by the plain loop.

#define GEMM_AVX2 __attribute__((target("avx2,fma,f16c")))

GEMM_BODIES(avx2, GEMM_AVX2, 6, 16)

// r[j][i] = r[i][j], for 8 x 8 units
GEMM_AVX2 ALWAYS_INLINE void gemm_transpose_avx2(__m256i r[8]) {
    __m256i t[8];
    GEMM_UNROLL
    for (int i = 0; i < 4; i++) {  // units of neighboring rows side by side
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    GEMM_UNROLL
    for (int i = 0; i < 2; i++) {  // r[4i + c] holds, in its half h, column 4h + c of rows 4i .. 4i + 3
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    GEMM_UNROLL
    for (int c = 0; c < 4; c++) {  // the halves of column group c change places
        t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
    }
    GEMM_UNROLL
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

// 8 floats, or 6: nothing beyond them is touched.
GEMM_AVX2 ALWAYS_INLINE __m256i gemm_load_floats_avx2(const float* from, size_t count) {
    if (count == 8) return _mm256_loadu_si256((const __m256i*)(const void*)from);
    __m128 high = _mm_loadl_pi(_mm_setzero_ps(), (const __m64*)(const void*)(from + 4));
    return _mm256_castps_si256(_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), high, 1));
}

GEMM_AVX2 ALWAYS_INLINE void gemm_store_floats_avx2(float* to, __m256i floats, size_t count) {
    if (count == 8) {
        _mm256_storeu_si256((__m256i*)(void*)to, floats);
        return;
    }
    _mm_storeu_ps(to, _mm256_castps256_ps128(_mm256_castsi256_ps(floats)));
    _mm_storel_pi((__m64*)(void*)(to + 4), _mm256_extractf128_ps(_mm256_castsi256_ps(floats), 1));
}

// A whole panel of floats: 8 lanes x 8 units at a time, transposed in registers if k is contiguous. width: 6, or a
// multiple of 8; a constant where this is inlined.
GEMM_AVX2 ALWAYS_INLINE void gemm_pack_floats_avx2(float* panel, const GemmOperand* o, size_t lane, size_t width,
                                                   size_t k, size_t count) {
    size_t lane_step = o->k_contiguous ? o->stride : 1, k_step = o->k_contiguous ? 1 : o->stride, u = 0;
    const float* data = (const float*)(const void*)o->data + lane * lane_step + k * k_step;
    for (; u + 8 <= count; u += 8)
        for (size_t group = 0; group < width; group += 8) {
            const float* from = data + group * lane_step + u * k_step;
            size_t lanes = min_size(width - group, 8);
            __m256i r[8];
            GEMM_UNROLL
            for (size_t i = 0; i < 8; i++) {
                const float* row = from + i * o->stride;
                if (o->k_contiguous && i >= lanes) {
                    r[i] = _mm256_setzero_si256();
                } else if (o->k_contiguous) {
                    if (u % 16 == 0) __builtin_prefetch(row + width * o->stride, 0, 2);
                    r[i] = gemm_load_floats_avx2(row, 8);
                } else {
                    if (group % 16 == 0) __builtin_prefetch(row + GEMM_PIECE_UNITS * o->stride, 0, 2);
                    r[i] = gemm_load_floats_avx2(row, lanes);
                }
            }
            if (o->k_contiguous) gemm_transpose_avx2(r);
            GEMM_UNROLL
            for (size_t i = 0; i < 8; i++) gemm_store_floats_avx2(panel + (u + i) * width + group, r[i], lanes);
        }
    for (; u < count; u++)
        for (size_t l = 0; l < width; l++) panel[u * width + l] = data[l * lane_step + u * k_step];
}

GEMM_AVX2 static inline void gemm_pack_avx2(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,
                                            size_t width, size_t k, size_t count) {
    bool whole = o->type == DTYPE_F32 && lanes == width;
    if (whole && width == 6) gemm_pack_floats_avx2((float*)panel, o, lane, 6, k, count);
    else if (whole && width == 16) gemm_pack_floats_avx2((float*)panel, o, lane, 16, k, count);
    else gemm_pack_body(panel, o, lane, lanes, width, k, count);
}

GEMM_AVX2 static inline void gemm_multiply_avx2(float* sums, size_t stride, const float* from, size_t from_stride,
                                                const uint32_t* a_panel, const uint32_t* b_panel, size_t units) {
    const float* a = (const float*)a_panel;
    const float* b = (const float*)b_panel;
    __m256 c[12];
    GEMM_UNROLL
    for (size_t i = 0; i < 12; i++)
        c[i] = from ? _mm256_loadu_ps(from + i / 2 * from_stride + i % 2 * 8) : _mm256_setzero_ps();
    for (size_t u = 0; u < units; u++, a += 6, b += 16) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        GEMM_UNROLL
        for (int i = 0; i < 6; i++) {
            __m256 x = _mm256_broadcast_ss(a + i);
            c[2 * i] = _mm256_fmadd_ps(x, b0, c[2 * i]);
            c[2 * i + 1] = _mm256_fmadd_ps(x, b1, c[2 * i + 1]);
        }
    }
    GEMM_UNROLL
    for (size_t i = 0; i < 12; i++) _mm256_storeu_ps(sums + i / 2 * stride + i % 2 * 8, c[i]);
}

// 8 floats, or 8 pairs of bfloat16
GEMM_AVX2 ALWAYS_INLINE __m256i gemm_units_avx2(const char* data, Dtype type) {
    if (type == DTYPE_F16) return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)data)));
    return _mm256_loadu_si256((const __m256i*)data);
}

// A few rows: 8 columns of B x 8 units are transposed in registers, where a unit is a float or a pair of bfloat16. One
// row of A alternates between both groups of 8 columns, so that two sums add at a time; more rows have enough sums, and
// take one group after the other. The plain loop handles the rest at the end of a row, or of B.
GEMM_AVX2 ALWAYS_INLINE void gemm_dot_typed_avx2(float* sums, const float* a, size_t rows, const GemmOperand* b,
                                               Dtype type, size_t j, size_t lanes, size_t k, size_t count) {
    bool pairs = type == DTYPE_BF16;
    size_t bytes = dtype_bytes(type), groups = rows == 1 ? 2 : 1, step = pairs ? 16 : 8;
    size_t whole = lanes == GEMM_DOT_COLS ? count / step * step : 0;
    for (size_t first = 0; first < 2 && whole > 0; first += groups) {
        __m256 c[GEMM_FEW_ROWS];
        GEMM_UNROLL
        for (size_t i = 0; i < groups * rows; i++)
            c[i] = _mm256_loadu_ps(sums + i / groups * 16 + (first + i % groups) * 8);
        for (size_t done = 0; done < whole; done += step) {
            if (done * bytes % 64 == 0) gemm_dot_prefetch(b, type, 8 * groups, j + 8 * first, k + done);
            GEMM_UNROLL
            for (size_t g = 0; g < groups; g++) {
                const char* data = b->data + ((j + 8 * (first + g)) * b->stride + k + done) * bytes;
                __m256i r[8];
                GEMM_UNROLL
                for (size_t l = 0; l < 8; l++) r[l] = gemm_units_avx2(data + l * b->stride * bytes, type);
                gemm_transpose_avx2(r);
                GEMM_UNROLL
                for (size_t u = 0; u < step; u++) {
                    __m256i unit = !pairs ? r[u % 8] : u % 2 ? _mm256_and_si256(r[u / 2], _mm256_set1_epi32(-65536))
                                                             : _mm256_slli_epi32(r[u / 2], 16);
                    GEMM_UNROLL
                    for (size_t i = 0; i < rows; i++)
                        c[i * groups + g] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + (done + u) * rows + i),
                                                            _mm256_castsi256_ps(unit), c[i * groups + g]);
                }
            }
        }
        GEMM_UNROLL
        for (size_t i = 0; i < groups * rows; i++)
            _mm256_storeu_ps(sums + i / groups * 16 + (first + i % groups) * 8, c[i]);
    }
    if (whole < count) gemm_dot_typed(sums, a + whole * rows, rows, b, type, j, lanes, k + whole, count - whole);
}

GEMM_DOT(avx2, GEMM_AVX2, gemm_dot_typed_avx2)

static inline bool gemm_has_avx2(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C);
}

static const GemmKernel gemm_avx2 = {"avx2", false, false, 6, 16, 384, 384, 1, gemm_pack_avx2, gemm_multiply_avx2,
                                     NULL, gemm_start_avx2, gemm_store_avx2, ARITHMETIC_FUSED ? gemm_dot_avx2 : NULL,
                                     NULL, NULL};

// ------------------------------------------------------------------------------------------------
// 2. AVX-512
//
// 24 of the 32 registers hold the sums, two a row of B, one an element of A. Packing works in blocks of 16 lanes x 16
// units: sixteen rows as they are in memory, converted, transposed if the panel wants the other order, and stored.

#define GEMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))

GEMM_BODIES(avx512, GEMM_AVX512, 12, 32)

// r[j][i] = r[i][j], for 16 x 16 units. If it were not inlined, it would load its 16 registers from memory and store
// them there: a matmul with one row would then be a sixth slower.
GEMM_AVX512 ALWAYS_INLINE void gemm_transpose_avx512(__m512i r[16]) {
    __m512i t[16];
    GEMM_UNROLL
    for (int i = 0; i < 8; i++) {  // units of neighboring rows side by side
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    GEMM_UNROLL
    for (int i = 0; i < 4; i++) {  // r[4i + c] holds, in its quarter q, column 4q + c of rows 4i .. 4i + 3
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    GEMM_UNROLL
    for (int c = 0; c < 4; c++) {  // the 4 x 4 quarters of column group c change places
        __m512i low02 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), low13 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i high02 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        __m512i high13 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(low02, high02, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(low13, high13, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
        t[12 + c] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
    }
    GEMM_UNROLL
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

GEMM_AVX512 static inline __mmask16 gemm_mask16(size_t count) {
    return (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);
}

// 16 floats from `count` contiguous elements
GEMM_AVX512 static inline __m512i gemm_floats_avx512(const char* data, Dtype type, size_t count) {
    __mmask16 mask = gemm_mask16(count);
    if (type == DTYPE_F32) return _mm512_maskz_loadu_epi32(mask, data);
    __m256i bits = _mm256_maskz_loadu_epi16(mask, data);
    if (type == DTYPE_BF16) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    return _mm512_castps_si512(_mm512_cvtph_ps(bits));
}

// 16 pairs: of neighbors (from `count` contiguous elements), or of two rows
GEMM_AVX512 static inline __m512i gemm_pairs_avx512(const char* data, size_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)(count >= 32 ? 0xffffffffu : (1u << count) - 1), data);
}
GEMM_AVX512 static inline __m512i gemm_pair_rows_avx512(const char* even, const char* odd, size_t count) {
    __mmask16 mask = gemm_mask16(count);
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
    if (odd == NULL) return low;
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd)), 16));
}

// Sixteen rows as they are in memory: 16 units of one lane each if k is contiguous, else 16 lanes of one unit. Elements
// outside of the operand are zero. ahead: 0, or to prefetch what is packed next: the elements `ahead` lanes later if k
// is contiguous, else the next piece.
GEMM_AVX512 ALWAYS_INLINE void gemm_rows_avx512(__m512i r[16], const GemmOperand* o, Dtype type, bool pairs,
                                              size_t lane, size_t lanes, size_t k, size_t count, size_t ahead) {
    size_t bytes = dtype_bytes(type), per_unit = pairs ? 2 : 1;
    size_t step = o->stride * bytes;
    GEMM_UNROLL
    for (size_t i = 0; i < 16; i++) {
        r[i] = _mm512_setzero_si512();
        if (o->k_contiguous) {
            const char* row = o->data + (lane + i) * step + k * bytes;
            if (ahead) __builtin_prefetch(row + ahead * step, 0, 2);
            if (i < lanes) r[i] = pairs ? gemm_pairs_avx512(row, count) : gemm_floats_avx512(row, type, count);
        } else if (i * per_unit < count) {
            const char* row = o->data + (k + i * per_unit) * step + lane * bytes;
            if (ahead) __builtin_prefetch(row + GEMM_PIECE_UNITS * per_unit * step, 0, 2);
            r[i] = pairs ? gemm_pair_rows_avx512(row, 2 * i + 1 < count ? row + step : NULL, lanes)
                         : gemm_floats_avx512(row, type, lanes);
        }
    }
}

// A store of 16 units may pass the end of a row of the panel: into the next row, which is stored later. (A mask would
// prevent that, but on AMD's Zen 4 stores with a mask are slow: a step of the demo's model took 3% longer.)
GEMM_AVX512 ALWAYS_INLINE void gemm_pack_blocks_avx512(uint32_t* panel, const GemmOperand* o, Dtype type, bool pairs,
                                                     bool by_lane, size_t lane, size_t lanes, size_t width, size_t k,
                                                     size_t count) {
    size_t step = pairs ? 32 : 16, row = by_lane ? 16 : width;
    for (size_t done = 0; done < count; done += step, panel += 16 * width)
        for (size_t group = round_up(width, 16); group > 0;) {
            group -= 16;
            __m512i r[16];
            size_t left = lanes > group ? lanes - group : 0;
            gemm_rows_avx512(r, o, type, pairs, lane + group, left, k + done, count - done, width);
            if (o->k_contiguous != by_lane) gemm_transpose_avx512(r);
            GEMM_UNROLL
            for (size_t i = 0; i < 16; i++)
                _mm512_storeu_si512(panel + (by_lane ? 16 : 1) * group + i * row, r[i]);
        }
}

GEMM_AVX512 static inline void gemm_pack_avx512(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,
                                                size_t width, size_t k, size_t count) {
    if (o->by_lane) gemm_pack_blocks_avx512(panel, o, DTYPE_BF16, true, true, lane, lanes, width, k, count);
    else if (o->pairs) gemm_pack_blocks_avx512(panel, o, DTYPE_BF16, true, false, lane, lanes, width, k, count);
    else if (o->type == DTYPE_F32)
        gemm_pack_blocks_avx512(panel, o, DTYPE_F32, false, false, lane, lanes, width, k, count);
    else if (o->type == DTYPE_BF16)
        gemm_pack_blocks_avx512(panel, o, DTYPE_BF16, false, false, lane, lanes, width, k, count);
    else gemm_pack_blocks_avx512(panel, o, DTYPE_F16, false, false, lane, lanes, width, k, count);
}

// Sums of 12 rows, each of n vectors: 2, or 1 for half a tile.
GEMM_AVX512 ALWAYS_INLINE void gemm_sums_load_avx512(__m512 c[24], const float* from, size_t from_stride, size_t n) {
    GEMM_UNROLL
    for (size_t i = 0; i < 12 * n; i++)
        c[i] = from ? _mm512_loadu_ps(from + i / n * from_stride + i % n * 16) : _mm512_setzero_ps();
}

GEMM_AVX512 ALWAYS_INLINE void gemm_sums_store_avx512(float* sums, size_t stride, const __m512 c[24], size_t n) {
    GEMM_UNROLL
    for (size_t i = 0; i < 12 * n; i++) _mm512_storeu_ps(sums + i / n * stride + i % n * 16, c[i]);
}

// Defines `multiply` and `multiply_half` of a kernel by its function for n vectors a row.
#define GEMM_TILES(name, target)                                                                                       \
    target static inline void gemm_multiply_##name(float* sums, size_t stride, const float* from, size_t from_stride,  \
                                                   const uint32_t* a, const uint32_t* b, size_t units) {               \
        gemm_tile_##name(sums, stride, from, from_stride, a, b, units, 2);                                             \
    }                                                                                                                  \
    target static inline void gemm_multiply_half_##name(float* sums, size_t stride, const float* from,                 \
                                                        size_t from_stride, const uint32_t* a, const uint32_t* b,      \
                                                        size_t units) {                                                \
        gemm_tile_##name(sums, stride, from, from_stride, a, b, units, 1);                                             \
    }

GEMM_AVX512 ALWAYS_INLINE void gemm_tile_avx512(float* sums, size_t stride, const float* from, size_t from_stride,
                                                const uint32_t* a, const uint32_t* b, size_t units, size_t n) {
    __m512 c[24];
    gemm_sums_load_avx512(c, from, from_stride, n);
    for (size_t u = 0; u < units; u++, a += 12, b += 32) {
        __m512 row[2];
        GEMM_UNROLL
        for (size_t v = 0; v < n; v++) row[v] = _mm512_loadu_ps((const float*)b + 16 * v);
        GEMM_UNROLL
        for (size_t i = 0; i < 12 * n; i++)
            c[i] = _mm512_fmadd_ps(_mm512_set1_ps(((const float*)a)[i / n]), row[i % n], c[i]);
    }
    gemm_sums_store_avx512(sums, stride, c, n);
}

GEMM_TILES(avx512, GEMM_AVX512)

// A few rows: 16 columns of B x 16 units are transposed in registers, where a unit is a float or a pair of bfloat16:
// each row is read by whole cache lines. Each term of a sum waits 4 cycles for the one before it; memory takes as long
// to deliver the 1,024 bytes of a block to a core or two. (32 columns at a time would not wait, but that many rows at
// distances of a power of two do not fit into the L1 cache together: measured, two thirds as fast.)
GEMM_AVX512 ALWAYS_INLINE void gemm_dot_typed_avx512(float* sums, const float* a, size_t rows, const GemmOperand* b,
                                                   Dtype type, size_t j, size_t lanes, size_t k, size_t count) {
    bool pairs = type == DTYPE_BF16;
    size_t step = pairs ? 32 : 16;
    __m512 c[GEMM_FEW_ROWS];
    GEMM_UNROLL
    for (size_t i = 0; i < rows; i++) c[i] = _mm512_loadu_ps(sums + 16 * i);
    for (size_t done = 0; done < count; done += step) {
        __m512i r[16];
        gemm_dot_prefetch(b, type, 16, j, k + done);
        gemm_rows_avx512(r, b, type, pairs, j, lanes, k + done, count - done, 0);
        gemm_transpose_avx512(r);
        GEMM_UNROLL
        for (size_t u = 0; u < step; u++) {
            __m512i unit = !pairs ? r[u % 16] : u % 2 ? _mm512_and_si512(r[u / 2], _mm512_set1_epi32(-65536))
                                                      : _mm512_slli_epi32(r[u / 2], 16);
            GEMM_UNROLL
            for (size_t i = 0; i < rows; i++)
                c[i] = _mm512_fmadd_ps(_mm512_set1_ps(a[(done + u) * rows + i]), _mm512_castsi512_ps(unit), c[i]);
        }
    }
    GEMM_UNROLL
    for (size_t i = 0; i < rows; i++) _mm512_storeu_ps(sums + 16 * i, c[i]);
}

GEMM_DOT(avx512, GEMM_AVX512, gemm_dot_typed_avx512)

static inline bool gemm_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && gemm_has_avx2();
}

static const GemmKernel gemm_avx512 = {
    "avx512", false, false, 12, 32, 384, 384, 1, gemm_pack_avx512, gemm_multiply_avx512,
    gemm_multiply_half_avx512, gemm_start_avx512, gemm_store_avx512, gemm_dot_avx512, NULL, NULL};

#ifdef GEMM_X86_BF16

// ------------------------------------------------------------------------------------------------
// 3. AVX512_BF16
//
// vdpbf16ps adds two products of bfloat16 to each float. On AMD's Zen 4 it runs at the rate of the FMA, hence twice the
// arithmetic; on Intel's Sapphire Rapids at a quarter of that rate, hence half of it: so only AMD uses it by default.

#define GEMM_AVX512BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")))

GEMM_AVX512BF16 ALWAYS_INLINE void gemm_tile_avx512bf16(float* sums, size_t stride, const float* from,
                                                        size_t from_stride, const uint32_t* a, const uint32_t* b,
                                                        size_t units, size_t n) {
    __m512 c[24];
    gemm_sums_load_avx512(c, from, from_stride, n);
    for (size_t u = 0; u < units; u++, a += 12, b += 32) {
        __m512bh row[2];
        GEMM_UNROLL
        for (size_t v = 0; v < n; v++) row[v] = (__m512bh)_mm512_loadu_si512(b + 16 * v);
        GEMM_UNROLL
        for (size_t i = 0; i < 12 * n; i++)
            c[i] = _mm512_dpbf16_ps(c[i], (__m512bh)_mm512_set1_epi32((int)a[i / n]), row[i % n]);
    }
    gemm_sums_store_avx512(sums, stride, c, n);
}

GEMM_TILES(avx512bf16, GEMM_AVX512BF16)

// As above, for pairs only.
GEMM_AVX512BF16 ALWAYS_INLINE void gemm_dot_pairs_avx512bf16(float* sums, const float* a, size_t rows,
                                                           const GemmOperand* b, Dtype type, size_t j, size_t lanes,
                                                           size_t k, size_t count) {
    __m512 c[GEMM_FEW_ROWS];
    GEMM_UNROLL
    for (size_t i = 0; i < rows; i++) c[i] = _mm512_loadu_ps(sums + 16 * i);
    for (size_t done = 0; done < count; done += 32) {
        __m512i r[16];
        gemm_dot_prefetch(b, type, 16, j, k + done);
        gemm_rows_avx512(r, b, type, true, j, lanes, k + done, count - done, false);
        gemm_transpose_avx512(r);
        GEMM_UNROLL
        for (size_t u = 0; u < 16; u++)
            GEMM_UNROLL
            for (size_t i = 0; i < rows; i++) {
                __m512bh x = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(a[(done / 2 + u) * rows + i]));
                c[i] = _mm512_dpbf16_ps(c[i], x, (__m512bh)r[u]);
            }
    }
    GEMM_UNROLL
    for (size_t i = 0; i < rows; i++) _mm512_storeu_ps(sums + 16 * i, c[i]);
}

GEMM_AVX512BF16 static inline void gemm_dot_avx512bf16(float* sums, const uint32_t* a, size_t rows,
                                                       const GemmOperand* b, size_t j, size_t lanes, size_t k,
                                                       size_t count) {
    GEMM_DOT_ROWS(gemm_dot_pairs_avx512bf16, DTYPE_BF16);
}

static inline bool gemm_has_avx512bf16(void) {
    unsigned a, b, c, d;
    return gemm_has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
static inline bool gemm_vendor_is_amd(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

static const GemmKernel gemm_avx512bf16 = {
    "avx512bf16", true, false, 12, 32, 384, 384, 1, gemm_pack_avx512, gemm_multiply_avx512bf16,
    gemm_multiply_half_avx512bf16, gemm_start_avx512, gemm_store_avx512, gemm_dot_avx512bf16, NULL, NULL};

// ------------------------------------------------------------------------------------------------
// 4. AMX
//
// Of the eight tile registers (16 rows x 64 bytes) four hold 32 x 32 sums, two take 32 rows of A x 16 pairs, two take
// 16 pairs x 32 columns of B. A loaded tile serves two products of 16 cycles, so that 64 cycles need 4 KiB: A comes
// from L1 (k_inner keeps 24 KiB of it there), B from L2. A is packed by lane: a row of its tile is 16 pairs of a lane.
//
// The compiler may not know what the tile instructions read and write; the barriers tell it.

#define GEMM_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define GEMM_BARRIER() __asm__ volatile("" ::: "memory")

GEMM_BODIES(amx, GEMM_AVX512, 32, 32)

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} GemmTileConfig;

GEMM_AMX static inline void gemm_begin_amx(void) {
    GemmTileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    GEMM_BARRIER();
    _tile_loadconfig(&config);
    GEMM_BARRIER();
}

GEMM_AMX static inline void gemm_end_amx(void) {
    GEMM_BARRIER();
    _tile_release();
}

GEMM_AMX static inline void gemm_multiply_amx(float* sums, size_t stride, const float* from, size_t from_stride,
                                              const uint32_t* a, const uint32_t* b, size_t units) {
    GEMM_BARRIER();
    if (from) {
        _tile_loadd(0, from, 4 * from_stride);
        _tile_loadd(1, from + 16, 4 * from_stride);
        _tile_loadd(2, from + 16 * from_stride, 4 * from_stride);
        _tile_loadd(3, from + 16 * from_stride + 16, 4 * from_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t u = 0; u < units; u += 16, a += 16 * 32, b += 16 * 32) {
        _tile_loadd(6, b, 128);
        _tile_loadd(4, a, 64);
        _tile_loadd(7, b + 16, 128);
        _tile_loadd(5, a + 16 * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * stride);
    _tile_stored(1, sums + 16, 4 * stride);
    _tile_stored(2, sums + 16 * stride, 4 * stride);
    _tile_stored(3, sums + 16 * stride + 16, 4 * stride);
    GEMM_BARRIER();
}

// Tile registers must be requested: they enlarge the state that the system saves at every context switch.
static inline bool gemm_has_amx(void) {
#ifdef GEMM_EMULATE_AMX
    return gemm_has_avx512();
#else
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!gemm_has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    bool tiles = d >> 24 & 1, bf16 = d >> 22 & 1;
    return tiles && bf16 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}

static const GemmKernel gemm_amx = {"amx", true, true, 32, 32, 512, 192, 16, gemm_pack_avx512, gemm_multiply_amx, NULL,
                                    gemm_start_amx, gemm_store_amx, NULL, gemm_begin_amx, gemm_end_amx};

#endif  // GEMM_X86_BF16

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif  // LLMTRAIN_GEMM_X86_H

