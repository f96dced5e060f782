// gemm.h: matrix products for the CPU backend.
//
//     gemm(out, GEMM_F32, N, false, x, w, bias, GEMM_F32, M, N, K);      // out = x w^T + bias
//
//   1. types       how a matrix lies in memory
//   2. elements    float, bfloat16 and half precision to float and back
//   3. portable    the kernel in plain C
//   4. AVX2        6 x 16 tile, FMA
//   5. AVX-512     12 x 32 tile, FMA; the same with bfloat16 pairs (vdpbf16ps)
//   6. AMX         32 x 32 tile of bfloat16 in the tile registers
//   7. choice      what this processor has, and workspaces
//   8. product     the blocked loops
//
// The algorithm is that of "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn, 2008) with the roles
// of the operands swapped. A processor multiplies about 16 times faster than its memory can bring operands, so each
// operand is copied once into the order in which it will be read (packing), and used many times from a cache:
//
//     for each task: a block of rows x cols of out            independent, one thread each
//         for each k block (about 384 long)
//             pack B (k block x cols)                         stays in the L2 cache: half of it
//             for each panel of 12 rows
//                 pack A (12 x k block)                       stays in the L1 cache: 18 KiB
//                 for each panel of 32 columns
//                     12 x 32 sums in registers += A panel x B panel
//                     add them to out
//
// Memory traffic, in elements per multiplication-addition: the register tile reads 1/32 of A from L1 and 1/12 of B from
// L2; out is read and written once per k block, 2/384; packing reads A once per task, 1/cols (about 1/384), and B
// 1/rows. So memory needs to deliver less than one element for 100 multiplications.
//
// An element of out is one sum in a fixed order, whatever the number of threads: k blocks depend on K alone, and tasks
// split rows and columns only. Ragged edges are packed with zeros; every tile is computed whole and stored in part.
//
// A few rows (sampling one token) take another way: dot products straight from the weights, which are read once.

#ifndef LLMTRAIN_GEMM_H
#define LLMTRAIN_GEMM_H

#include "base.h"

#include <pthread.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#define GEMM_X86 1
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define GEMM_X86_BF16 1  // the compiler knows AVX512_BF16 and AMX
#endif
#endif

// ------------------------------------------------------------------------------------------------
// 1. Types

typedef enum { GEMM_F32, GEMM_BF16, GEMM_F16 } GemmType;  // how elements are stored: float, or uint16_t bits

typedef struct {
    const void* data;
    GemmType type;
    size_t stride;    // elements between rows as stored
    bool transposed;  // the product takes the transpose of what is stored
} GemmMatrix;

// One operand as the packing sees it. Lanes are rows of A or columns of B: what k is not.
typedef struct {
    const char* data;
    GemmType type;
    size_t stride;      // elements between neighbours along the direction that is not contiguous
    bool k_contiguous;  // neighbours in k are neighbours in memory; otherwise neighbouring lanes are
} GemmOperand;

typedef struct {
    void* out;  // (M, N)
    GemmType out_type;
    size_t out_stride;
    bool accumulate;
    GemmOperand a, b;
    const void* bias;  // (N) or NULL
    GemmType bias_type;
    size_t M, N, K;
} GemmProblem;

// A kernel is a register tile of rows x cols and three functions. Packed operands consist of units of 4 bytes: a float,
// or a pair of bfloat16 that are neighbours in k. A panel holds `width` lanes: unit u of lane l at [u * width + l].
typedef struct {
    const char* name;
    bool pairs;
    size_t rows, cols;
    size_t k_block;  // units of k that are packed at a time
    size_t k_inner;  // units of k that one call of `multiply` takes: an A panel of that length fits in L1
    size_t k_round;  // units are padded with zeros to a multiple of this
    // panel = lanes [lane, lane + lanes) of the operand, padded to `width`, for elements [k, k + count).
    void (*pack)(uint32_t* panel, const GemmOperand* operand, size_t lane, size_t lanes, size_t width, size_t k,
                 size_t count);
    // As pack, for the left operand.
    void (*pack_a)(uint32_t* panel, const GemmOperand* operand, size_t lane, size_t lanes, size_t width, size_t k,
                   size_t count);
    // sums (rows, cols) = [sums +] A panel x B panel
    void (*multiply)(float* sums, const uint32_t* a, const uint32_t* b, size_t units, bool accumulate);
    // out[i.., j..] = [out +] sums [+ bias], for the part of the tile that lies inside of out
    void (*store)(const GemmProblem* p, const float* sums, size_t i, size_t j, bool add, bool bias);
    // out[0..M, j..j_end] by dot products straight from the operands
    void (*dot)(const GemmProblem* p, size_t j, size_t j_end);
    void (*begin)(void), (*end)(void);  // around the multiplications of one task; NULL for none
} GemmKernel;

enum {
    GEMM_TILE_MAX = 32 * 32,  // the largest rows x cols
    GEMM_FEW_ROWS = 8         // up to so many rows are dot products
};

#if defined(__clang__)
#define GEMM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GEMM_UNROLL _Pragma("GCC unroll 32")
#endif
// Plain C that is compiled once for each instruction set, inlined into a function that has the target attribute.
#define GEMM_INLINE static inline __attribute__((always_inline))

// ------------------------------------------------------------------------------------------------
// 2. Elements
//
// Without branches, so that loops over them vectorise. Rounding is to nearest, ties to even.

GEMM_INLINE float gemm_float_from_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
GEMM_INLINE uint32_t gemm_bits_from_float(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

GEMM_INLINE float gemm_float_from_f16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t scaled = gemm_bits_from_float(gemm_float_from_bits(magnitude) * 0x1p112f);  // from exponent bias 15 to 127
    uint32_t special = magnitude | 0x7f800000;                                           // infinity and NaN
    return gemm_float_from_bits((magnitude >= 0x0f800000 ? special : scaled) | (uint32_t)(half & 0x8000) << 16);
}

GEMM_INLINE uint16_t gemm_f16_from_float(float f) {
    uint32_t bits = gemm_bits_from_float(f), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t subnormal = gemm_bits_from_float(gemm_float_from_bits(magnitude) + 0.5f) - 0x3f000000;  // 0.5 has ulp 2^-24
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 0x38800000 ? subnormal : magnitude >= 0x47800000 ? special : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

GEMM_INLINE uint16_t gemm_bf16_from_float(float f) {
    uint32_t bits = gemm_bits_from_float(f);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

GEMM_INLINE size_t gemm_type_bytes(GemmType type) { return type == GEMM_F32 ? 4 : 2; }

GEMM_INLINE float gemm_load(const void* data, GemmType type, size_t index) {
    if (type == GEMM_F32) return ((const float*)data)[index];
    uint16_t bits = ((const uint16_t*)data)[index];
    return type == GEMM_BF16 ? gemm_float_from_bits((uint32_t)bits << 16) : gemm_float_from_f16(bits);
}

GEMM_INLINE void gemm_save(void* data, GemmType type, size_t index, float value) {
    if (type == GEMM_F32) ((float*)data)[index] = value;
    else if (type == GEMM_BF16) ((uint16_t*)data)[index] = gemm_bf16_from_float(value);
    else ((uint16_t*)data)[index] = gemm_f16_from_float(value);
}

// ------------------------------------------------------------------------------------------------
// 3. Portable
//
// Bodies named *_body serve every instruction set; `rows` and `cols` are constants where they are inlined.

GEMM_INLINE void gemm_pack_typed(float* panel, const GemmOperand* o, GemmType type, size_t lane, size_t lanes,
                                 size_t width, size_t k, size_t count) {
    size_t first = o->k_contiguous ? lane * o->stride + k : k * o->stride + lane;
    const void* data = o->data + first * gemm_type_bytes(type);
    if (lanes < width) memset(panel, 0, count * width * sizeof(float));
    if (o->k_contiguous) {
        for (size_t l = 0; l < lanes; l++)
            for (size_t u = 0; u < count; u++) panel[u * width + l] = gemm_load(data, type, l * o->stride + u);
    } else {
        for (size_t u = 0; u < count; u++)
            for (size_t l = 0; l < lanes; l++) panel[u * width + l] = gemm_load(data, type, u * o->stride + l);
    }
}

GEMM_INLINE void gemm_pack_body(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes, size_t width,
                                size_t k, size_t count) {
    float* floats = (float*)panel;
    if (o->type == GEMM_F32) gemm_pack_typed(floats, o, GEMM_F32, lane, lanes, width, k, count);
    else if (o->type == GEMM_BF16) gemm_pack_typed(floats, o, GEMM_BF16, lane, lanes, width, k, count);
    else gemm_pack_typed(floats, o, GEMM_F16, lane, lanes, width, k, count);
}

GEMM_INLINE void gemm_store_typed(const GemmProblem* p, GemmType type, const float* sums, size_t cols, size_t i,
                                  size_t height, size_t j, size_t width, bool add, bool bias) {
    float start[32];
    for (size_t c = 0; c < width; c++) start[c] = bias ? gemm_load(p->bias, p->bias_type, j + c) : 0.0f;
    for (size_t r = 0; r < height; r++) {
        char* out = (char*)p->out + ((i + r) * p->out_stride + j) * gemm_type_bytes(type);
        const float* sum = sums + r * cols;
        if (add)
            for (size_t c = 0; c < width; c++) gemm_save(out, type, c, gemm_load(out, type, c) + (sum[c] + start[c]));
        else
            for (size_t c = 0; c < width; c++) gemm_save(out, type, c, sum[c] + start[c]);
    }
}

GEMM_INLINE void gemm_store_body(const GemmProblem* p, const float* sums, size_t rows, size_t cols, size_t i, size_t j,
                                 bool add, bool bias) {
    size_t height = min_size(rows, p->M - i), width = min_size(cols, p->N - j);
    bias = bias && p->bias != NULL;
    if (p->out_type == GEMM_F32 && width == cols)
        gemm_store_typed(p, GEMM_F32, sums, cols, i, height, j, cols, add, bias);
    else if (p->out_type == GEMM_F32) gemm_store_typed(p, GEMM_F32, sums, cols, i, height, j, width, add, bias);
    else if (p->out_type == GEMM_BF16) gemm_store_typed(p, GEMM_BF16, sums, cols, i, height, j, width, add, bias);
    else gemm_store_typed(p, GEMM_F16, sums, cols, i, height, j, width, add, bias);
}

// Dot products of `rows` rows of A with one row of the stored B, in 16 partial sums each.
GEMM_INLINE void gemm_dot_typed(const GemmProblem* p, GemmType type, size_t rows, size_t i, size_t j) {
    size_t bytes = gemm_type_bytes(type), k = 0;
    const char* a = p->a.data + i * p->a.stride * bytes;
    const char* b = p->b.data + j * p->b.stride * bytes;
    float sums[4][16], left[16], right[16];
    for (size_t r = 0; r < rows; r++)
        for (size_t l = 0; l < 16; l++) sums[r][l] = 0.0f;
    for (; k + 16 <= p->K; k += 16) {
        for (size_t l = 0; l < 16; l++) right[l] = gemm_load(b, type, k + l);
        for (size_t r = 0; r < rows; r++) {
            for (size_t l = 0; l < 16; l++) left[l] = gemm_load(a, type, r * p->a.stride + k + l);
            for (size_t l = 0; l < 16; l++) sums[r][l] += left[l] * right[l];
        }
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t l = 0; k + l < p->K; l++)
            sums[r][l] += gemm_load(a, type, r * p->a.stride + k + l) * gemm_load(b, type, k + l);
        for (size_t half = 8; half > 0; half /= 2)
            for (size_t l = 0; l < half; l++) sums[r][l] += sums[r][l + half];
        size_t at = (i + r) * p->out_stride + j;
        float value = sums[r][0];
        if (p->bias) value += gemm_load(p->bias, p->bias_type, j);
        if (p->accumulate) value += gemm_load(p->out, p->out_type, at);
        gemm_save(p->out, p->out_type, at, value);
    }
}

GEMM_INLINE void gemm_dot_rows(const GemmProblem* p, GemmType type, size_t j, size_t j_end) {
    for (; j < j_end; j++) {
        size_t i = 0;
        for (; i + 4 <= p->M; i += 4) gemm_dot_typed(p, type, 4, i, j);
        for (; i < p->M; i++) gemm_dot_typed(p, type, 1, i, j);
    }
}

GEMM_INLINE void gemm_dot_body(const GemmProblem* p, size_t j, size_t j_end) {
    if (p->a.type == GEMM_F32) gemm_dot_rows(p, GEMM_F32, j, j_end);
    else if (p->a.type == GEMM_BF16) gemm_dot_rows(p, GEMM_BF16, j, j_end);
    else gemm_dot_rows(p, GEMM_F16, j, j_end);
}

enum { GEMM_PORTABLE_ROWS = 4, GEMM_PORTABLE_COLS = 8 };

static inline void gemm_multiply_portable(float* sums, const uint32_t* a_panel, const uint32_t* b_panel, size_t units,
                                          bool accumulate) {
    const float* a = (const float*)a_panel;
    const float* b = (const float*)b_panel;
    float c[GEMM_PORTABLE_ROWS][GEMM_PORTABLE_COLS];
    for (int i = 0; i < GEMM_PORTABLE_ROWS; i++)
        for (int j = 0; j < GEMM_PORTABLE_COLS; j++) c[i][j] = accumulate ? sums[i * GEMM_PORTABLE_COLS + j] : 0.0f;
    for (size_t u = 0; u < units; u++, a += GEMM_PORTABLE_ROWS, b += GEMM_PORTABLE_COLS)
        for (int i = 0; i < GEMM_PORTABLE_ROWS; i++)
            for (int j = 0; j < GEMM_PORTABLE_COLS; j++) c[i][j] += a[i] * b[j];
    for (int i = 0; i < GEMM_PORTABLE_ROWS; i++)
        for (int j = 0; j < GEMM_PORTABLE_COLS; j++) sums[i * GEMM_PORTABLE_COLS + j] = c[i][j];
}

// The functions of a kernel that are bodies compiled for one instruction set.
#define GEMM_PACK(name, target)                                                                                       \
    target static inline void gemm_pack_##name(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,      \
                                               size_t width, size_t k, size_t count) {                                \
        gemm_pack_body(panel, o, lane, lanes, width, k, count);                                                       \
    }
#define GEMM_STORE(name, target, rows, cols)                                                                          \
    target static inline void gemm_store_##name(const GemmProblem* p, const float* sums, size_t i, size_t j,          \
                                                bool add, bool bias) {                                                \
        gemm_store_body(p, sums, rows, cols, i, j, add, bias);                                                        \
    }
#define GEMM_DOT(name, target)                                                                                        \
    target static inline void gemm_dot_##name(const GemmProblem* p, size_t j, size_t j_end) {                         \
        gemm_dot_body(p, j, j_end);                                                                                   \
    }

GEMM_PACK(portable, )
GEMM_STORE(portable, , GEMM_PORTABLE_ROWS, GEMM_PORTABLE_COLS)
GEMM_DOT(portable, )

static const GemmKernel gemm_portable = {
    "portable", false, GEMM_PORTABLE_ROWS, GEMM_PORTABLE_COLS, 384, 384, 1, gemm_pack_portable, gemm_pack_portable,
    gemm_multiply_portable, gemm_store_portable, gemm_dot_portable, NULL, NULL};

#ifdef GEMM_X86

// ------------------------------------------------------------------------------------------------
// 4. AVX2: 12 of the 16 registers hold the sums, two a row of B, one an element of A.

#define GEMM_AVX2 __attribute__((target("avx2,fma")))

GEMM_PACK(avx2, GEMM_AVX2)
GEMM_STORE(avx2, GEMM_AVX2, 6, 16)
GEMM_DOT(avx2, GEMM_AVX2)

GEMM_AVX2 static inline void gemm_multiply_avx2(float* sums, const uint32_t* a_panel, const uint32_t* b_panel,
                                                size_t units, bool accumulate) {
    const float* a = (const float*)a_panel;
    const float* b = (const float*)b_panel;
    __m256 c[6][2];
    GEMM_UNROLL
    for (int i = 0; i < 6; i++) {
        c[i][0] = accumulate ? _mm256_loadu_ps(sums + 16 * i) : _mm256_setzero_ps();
        c[i][1] = accumulate ? _mm256_loadu_ps(sums + 16 * i + 8) : _mm256_setzero_ps();
    }
    for (size_t u = 0; u < units; u++, a += 6, b += 16) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        GEMM_UNROLL
        for (int i = 0; i < 6; i++) {
            __m256 x = _mm256_broadcast_ss(a + i);
            c[i][0] = _mm256_fmadd_ps(x, b0, c[i][0]);
            c[i][1] = _mm256_fmadd_ps(x, b1, c[i][1]);
        }
    }
    GEMM_UNROLL
    for (int i = 0; i < 6; i++) {
        _mm256_storeu_ps(sums + 16 * i, c[i][0]);
        _mm256_storeu_ps(sums + 16 * i + 8, c[i][1]);
    }
}

static const GemmKernel gemm_avx2 = {"avx2", false, 6, 16, 384, 384, 1, gemm_pack_avx2, gemm_pack_avx2,
                                     gemm_multiply_avx2, gemm_store_avx2, gemm_dot_avx2, NULL, NULL};

// ------------------------------------------------------------------------------------------------
// 5. AVX-512: 24 of the 32 registers hold the sums.

#define GEMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))

GEMM_STORE(avx512, GEMM_AVX512, 12, 32)
GEMM_DOT(avx512, GEMM_AVX512)

// r[j][i] = r[i][j], for 16 x 16 units
GEMM_AVX512 static inline void gemm_transpose_avx512(__m512i r[16]) {
    __m512i t[16];
    GEMM_UNROLL
    for (int i = 0; i < 8; i++) {  // units of neighbouring rows side by side
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
GEMM_AVX512 static inline __m512i gemm_floats_avx512(const char* data, GemmType type, size_t count) {
    __mmask16 mask = gemm_mask16(count);
    if (type == GEMM_F32) return _mm512_maskz_loadu_epi32(mask, data);
    __m256i bits = _mm256_maskz_loadu_epi16(mask, data);
    if (type == GEMM_BF16) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    return _mm512_castps_si512(_mm512_cvtph_ps(bits));
}

// 16 pairs: of neighbours (from `count` contiguous elements), or of two rows
GEMM_AVX512 static inline __m512i gemm_pairs_avx512(const char* data, size_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)(count >= 32 ? 0xffffffffu : (1u << count) - 1), data);
}
GEMM_AVX512 static inline __m512i gemm_pair_rows_avx512(const char* even, const char* odd, size_t count) {
    __mmask16 mask = gemm_mask16(count);
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
    if (odd == NULL) return low;
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd)), 16));
}

// Rows of 16 units as they lie in memory: lanes if k is contiguous, else units. Rows past `rows` are zero.
GEMM_AVX512 GEMM_INLINE void gemm_rows_avx512(__m512i r[16], const GemmOperand* o, GemmType type, bool pairs,
                                              size_t lane, size_t lanes, size_t k, size_t count) {
    size_t bytes = gemm_type_bytes(type), per_unit = pairs ? 2 : 1;
    size_t step = o->stride * bytes;
    GEMM_UNROLL
    for (size_t i = 0; i < 16; i++) {
        r[i] = _mm512_setzero_si512();
        if (o->k_contiguous) {
            const char* row = o->data + (lane + i) * step + k * bytes;
            if (i < lanes) r[i] = pairs ? gemm_pairs_avx512(row, count) : gemm_floats_avx512(row, type, count);
        } else if (i * per_unit < count) {
            const char* row = o->data + (k + i * per_unit) * step + lane * bytes;
            r[i] = pairs ? gemm_pair_rows_avx512(row, 2 * i + 1 < count ? row + step : NULL, lanes)
                         : gemm_floats_avx512(row, type, lanes);
        }
    }
}

// by_lane: the panel is a sequence of blocks of 16 units, and in each of them a lane's units are contiguous (AMX).
GEMM_AVX512 GEMM_INLINE void gemm_pack_blocks_avx512(uint32_t* panel, const GemmOperand* o, GemmType type, bool pairs,
                                                     bool by_lane, size_t lane, size_t lanes, size_t width, size_t k,
                                                     size_t count) {
    size_t per_block = pairs ? 32 : 16;
    for (size_t done = 0; done < count; done += per_block) {
        size_t left = count - done;
        for (size_t group = 0; group < width; group += 16) {
            __m512i r[16];
            size_t here = lanes > group ? lanes - group : 0, wide = min_size(16, width - group);
            if (here > 0) gemm_rows_avx512(r, o, type, pairs, lane + group, here, k + done, left);
            else for (int i = 0; i < 16; i++) r[i] = _mm512_setzero_si512();
            if (o->k_contiguous != by_lane) gemm_transpose_avx512(r);
            uint32_t* to = panel + (by_lane ? 16 * group : group);
            size_t step = by_lane ? 16 : width;
            __mmask16 mask = by_lane ? 0xffff : gemm_mask16(wide);
            GEMM_UNROLL
            for (size_t i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + i * step, mask, r[i]);
        }
        panel += 16 * width;
    }
}

GEMM_AVX512 static inline void gemm_pack_avx512(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,
                                                size_t width, size_t k, size_t count) {
    if (o->type == GEMM_F32)
        gemm_pack_blocks_avx512(panel, o, GEMM_F32, false, false, lane, lanes, width, k, count);
    else if (o->type == GEMM_BF16)
        gemm_pack_blocks_avx512(panel, o, GEMM_BF16, false, false, lane, lanes, width, k, count);
    else gemm_pack_blocks_avx512(panel, o, GEMM_F16, false, false, lane, lanes, width, k, count);
}

GEMM_AVX512 static inline void gemm_multiply_avx512(float* sums, const uint32_t* a_panel, const uint32_t* b_panel,
                                                    size_t units, bool accumulate) {
    const float* a = (const float*)a_panel;
    const float* b = (const float*)b_panel;
    __m512 c[12][2];
    GEMM_UNROLL
    for (int i = 0; i < 12; i++) {
        c[i][0] = accumulate ? _mm512_loadu_ps(sums + 32 * i) : _mm512_setzero_ps();
        c[i][1] = accumulate ? _mm512_loadu_ps(sums + 32 * i + 16) : _mm512_setzero_ps();
    }
    for (size_t u = 0; u < units; u++, a += 12, b += 32) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        GEMM_UNROLL
        for (int i = 0; i < 12; i++) {
            __m512 x = _mm512_set1_ps(a[i]);
            c[i][0] = _mm512_fmadd_ps(x, b0, c[i][0]);
            c[i][1] = _mm512_fmadd_ps(x, b1, c[i][1]);
        }
    }
    GEMM_UNROLL
    for (int i = 0; i < 12; i++) {
        _mm512_storeu_ps(sums + 32 * i, c[i][0]);
        _mm512_storeu_ps(sums + 32 * i + 16, c[i][1]);
    }
}

static const GemmKernel gemm_avx512 = {"avx512", false, 12, 32, 384, 384, 1, gemm_pack_avx512, gemm_pack_avx512,
                                       gemm_multiply_avx512, gemm_store_avx512, gemm_dot_avx512, NULL, NULL};

#ifdef GEMM_X86_BF16

// vdpbf16ps adds two products of bfloat16 to each float. It runs as fast as an FMA on AMD's Zen 4, hence twice the
// arithmetic; on Intel's Sapphire Rapids at a quarter of the FMA rate, hence half of it.
#define GEMM_AVX512BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")))

GEMM_AVX512 static inline void gemm_pack_pairs_avx512(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,
                                                      size_t width, size_t k, size_t count) {
    gemm_pack_blocks_avx512(panel, o, GEMM_BF16, true, false, lane, lanes, width, k, count);
}

GEMM_AVX512BF16 static inline void gemm_multiply_avx512bf16(float* sums, const uint32_t* a, const uint32_t* b,
                                                            size_t units, bool accumulate) {
    __m512 c[12][2];
    GEMM_UNROLL
    for (int i = 0; i < 12; i++) {
        c[i][0] = accumulate ? _mm512_loadu_ps(sums + 32 * i) : _mm512_setzero_ps();
        c[i][1] = accumulate ? _mm512_loadu_ps(sums + 32 * i + 16) : _mm512_setzero_ps();
    }
    for (size_t u = 0; u < units; u++, a += 12, b += 32) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 16);
        GEMM_UNROLL
        for (int i = 0; i < 12; i++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[i]);
            c[i][0] = _mm512_dpbf16_ps(c[i][0], x, b0);
            c[i][1] = _mm512_dpbf16_ps(c[i][1], x, b1);
        }
    }
    GEMM_UNROLL
    for (int i = 0; i < 12; i++) {
        _mm512_storeu_ps(sums + 32 * i, c[i][0]);
        _mm512_storeu_ps(sums + 32 * i + 16, c[i][1]);
    }
}

static const GemmKernel gemm_avx512bf16 = {
    "avx512bf16", true, 12, 32, 384, 384, 1, gemm_pack_pairs_avx512, gemm_pack_pairs_avx512, gemm_multiply_avx512bf16,
    gemm_store_avx512, gemm_dot_avx512, NULL, NULL};

// ------------------------------------------------------------------------------------------------
// 6. AMX: eight tile registers of 16 rows x 64 bytes. Four hold 32 x 32 sums, two take 32 rows of A x 16 pairs, two take
// 16 pairs x 32 columns of B. Each of the four loaded tiles serves two products of 16 cycles, so that 64 cycles bring
// 4 KiB; A comes from L1 (k_inner), B from L2. A is packed by lane: a row of its tile is 16 pairs of one lane.
//
// The compiler does not know what the tile instructions read and write; the barriers tell it.

#define GEMM_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define GEMM_BARRIER() __asm__ volatile("" ::: "memory")

GEMM_STORE(amx, GEMM_AVX512, 32, 32)

GEMM_AVX512 static inline void gemm_pack_tiles_avx512(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes,
                                                      size_t width, size_t k, size_t count) {
    gemm_pack_blocks_avx512(panel, o, GEMM_BF16, true, true, lane, lanes, width, k, count);
}

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

GEMM_AMX static inline void gemm_multiply_amx(float* sums, const uint32_t* a, const uint32_t* b, size_t units,
                                              bool accumulate) {
    GEMM_BARRIER();
    if (accumulate) {
        _tile_loadd(0, sums, 128);
        _tile_loadd(1, sums + 16, 128);
        _tile_loadd(2, sums + 16 * 32, 128);
        _tile_loadd(3, sums + 16 * 32 + 16, 128);
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
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
    GEMM_BARRIER();
}

static const GemmKernel gemm_amx = {
    "amx", true, 32, 32, 512, 192, 16, gemm_pack_pairs_avx512, gemm_pack_tiles_avx512, gemm_multiply_amx,
    gemm_store_amx, gemm_dot_avx512, gemm_begin_amx, gemm_end_amx};

#endif  // GEMM_X86_BF16
#endif  // GEMM_X86

// ------------------------------------------------------------------------------------------------
// 7. Choice
//
// Made once per process, by what the processor and the system can do, never by a measurement: two runs on one machine
// must give the same bits. Each thread that computes owns a workspace, which is made at its first product and freed
// when it ends.

typedef struct {
    uint32_t* b;   // the packed block of B
    uint32_t* a;   // one packed panel of A
    float* sums;   // tiles of sums that are not in out yet
} GemmWorkspace;

typedef struct {
    const GemmKernel* floats;  // for any pair of types
    const GemmKernel* pairs;   // for two operands of bfloat16
    size_t b_bytes;            // of a packed block of B: half of the L2 cache
    pthread_key_t workspace;
} GemmState;

static GemmState gemm_state;
static pthread_once_t gemm_once = PTHREAD_ONCE_INIT;

enum {
    GEMM_A_BYTES = 32 * 512 * 4 + 4096,   // the longest panel of A (AMX)
    GEMM_SUMS = 256 * GEMM_TILE_MAX       // floats
};

#ifdef GEMM_X86
static inline bool gemm_has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static inline bool gemm_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && gemm_has_avx2();
}
#endif
#ifdef GEMM_X86_BF16
static inline bool gemm_has_avx512bf16(void) {
    unsigned a, b, c, d;
    return gemm_has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
static inline bool gemm_vendor_is_amd(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}
// Tile registers must be asked for: they enlarge what the system saves at every switch of a process.
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
#endif

// The kernels for a name; false if this program or this machine lacks them.
static inline bool gemm_choose(const GemmKernel** floats, const GemmKernel** pairs, const char* name) {
    bool best = strcmp(name, "auto") == 0;
    *floats = *pairs = &gemm_portable;
    bool found = best || strcmp(name, "portable") == 0;
#ifdef GEMM_X86
    if ((best || strcmp(name, "avx2") == 0) && gemm_has_avx2()) {
        *floats = *pairs = &gemm_avx2;
        found = true;
    }
    bool bf16 = strcmp(name, "avx512bf16") == 0, amx = strcmp(name, "amx") == 0;
    if ((best || bf16 || amx || strcmp(name, "avx512") == 0) && gemm_has_avx512()) {
        *floats = *pairs = &gemm_avx512;
        found = !bf16 && !amx;
    }
#ifdef GEMM_X86_BF16
    if ((bf16 || (best && gemm_vendor_is_amd())) && gemm_has_avx512bf16()) {
        *pairs = &gemm_avx512bf16;
        found = true;
    }
    if ((amx || best) && gemm_has_amx()) {
        *pairs = &gemm_amx;
        found = true;
    }
#endif
#endif
    return found;
}

static inline void gemm_init(void) {
    long l2 = -1;
#ifdef _SC_LEVEL2_CACHE_SIZE
    l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    gemm_state.b_bytes = min_size(max_size(l2 > 0 ? (size_t)l2 : 0, 256 << 10), 4096 << 10) * 9 / 16;
    gemm_choose(&gemm_state.floats, &gemm_state.pairs, "auto");
    pthread_key_create(&gemm_state.workspace, free);
}

// Uses the kernels of that name from now on: portable, avx2, avx512, avx512bf16, amx, or auto for the best. Not while a
// product is running.
static inline bool gemm_force(Error* error, const char* name) {
    pthread_once(&gemm_once, gemm_init);
    const GemmKernel *floats, *pairs;
    if (!gemm_choose(&floats, &pairs, name))
        return fail(error, "gemm: no kernel '%s': this processor, system or compiler lacks it; use auto or portable", name);
    gemm_state.floats = floats;
    gemm_state.pairs = pairs;
    return true;
}

static inline const char* gemm_backend(void) {
    static const char* const names[4][4] = {
        {"portable / portable", "avx512 / avx512bf16", "avx512 / amx", ""}, {"avx2 / avx2"}, {"avx512 / avx512"}};
    pthread_once(&gemm_once, gemm_init);
    if (gemm_state.pairs->pairs) return names[0][gemm_state.pairs->k_round == 1 ? 1 : 2];
    if (gemm_state.floats == &gemm_portable) return names[0][0];
    return names[gemm_state.floats->rows == 6 ? 1 : 2][0];
}

// A block of B with a panel and a half to spare: packing rounds up.
static inline size_t gemm_b_allocation(void) { return round_up(gemm_state.b_bytes + 32 * 512 * 4 * 3 / 2, 4096); }

static inline size_t gemm_workspace_bytes(int threads) {
    pthread_once(&gemm_once, gemm_init);
    return (size_t)threads * (gemm_b_allocation() + GEMM_A_BYTES + GEMM_SUMS * sizeof(float) + 64);
}

static inline GemmWorkspace* gemm_workspace(void) {
    char* memory = (char*)pthread_getspecific(gemm_state.workspace);
    if (memory) return (GemmWorkspace*)memory;
    memory = (char*)allocate(gemm_workspace_bytes(1));
    if (!memory) return NULL;
    GemmWorkspace* workspace = (GemmWorkspace*)memory;
    workspace->b = (uint32_t*)(memory + 64);
    workspace->a = (uint32_t*)(memory + 64 + gemm_b_allocation());
    workspace->sums = (float*)(memory + 64 + gemm_b_allocation() + GEMM_A_BYTES);
    if (pthread_setspecific(gemm_state.workspace, memory) != 0) return free(memory), (GemmWorkspace*)NULL;
    return workspace;
}

// ------------------------------------------------------------------------------------------------
// 8. Product

static inline size_t gemm_blocks(size_t n, size_t block) { return (n + block - 1) / block; }

typedef struct {
    size_t rows, cols;  // of a task
    size_t k_block;     // elements
} GemmPlan;

// The k blocks are equal as far as possible, and multiples of 32.
static inline GemmPlan gemm_plan(const GemmKernel* kernel, const GemmProblem* p, size_t threads) {
    GemmPlan plan;
    size_t k_max = kernel->k_block * (kernel->pairs ? 2 : 1);
    plan.k_block = round_up(gemm_blocks(p->K, gemm_blocks(p->K, k_max)), 32);
    size_t unit_bytes = kernel->pairs ? 2 : 4;
    size_t cols = gemm_state.b_bytes / (plan.k_block * unit_bytes) / kernel->cols * kernel->cols;
    cols = max_size(cols, kernel->cols);
    plan.cols = round_up(gemm_blocks(p->N, gemm_blocks(p->N, cols)), kernel->cols);
    plan.rows = round_up(p->M, kernel->rows);
    if (p->out_type != GEMM_F32 && plan.k_block < p->K)  // sums of the whole task wait in the workspace
        plan.rows = min_size(plan.rows, GEMM_SUMS / plan.cols / kernel->rows * kernel->rows);
    size_t wanted = threads > 1 ? 4 * threads : 1;
    while (gemm_blocks(p->M, plan.rows) * gemm_blocks(p->N, plan.cols) < wanted) {
        if (plan.rows >= plan.cols && plan.rows >= 8 * kernel->rows) plan.rows = round_up(plan.rows / 2, kernel->rows);
        else if (plan.cols >= 4 * kernel->cols) plan.cols = round_up(plan.cols / 2, kernel->cols);
        else if (plan.rows >= 8 * kernel->rows) plan.rows = round_up(plan.rows / 2, kernel->rows);
        else break;
    }
    return plan;
}

static inline GemmPlan gemm_dot_plan(const GemmProblem* p, size_t threads) {
    GemmPlan plan;
    plan.rows = p->M;
    plan.cols = max_size(16, gemm_blocks(p->N, 8 * threads));
    plan.k_block = p->K;
    return plan;
}

// Every element by its own loop: slow, but needs no memory.
static inline void gemm_unpacked(const GemmProblem* p, size_t i_end, size_t j_end, size_t i_begin, size_t j_begin) {
    for (size_t i = i_begin; i < i_end; i++)
        for (size_t j = j_begin; j < j_end; j++) {
            float sum = 0.0f;
            for (size_t k = 0; k < p->K; k++)
                sum += gemm_load(p->a.data, p->a.type, p->a.k_contiguous ? i * p->a.stride + k : k * p->a.stride + i) *
                       gemm_load(p->b.data, p->b.type, p->b.k_contiguous ? j * p->b.stride + k : k * p->b.stride + j);
            if (p->bias) sum += gemm_load(p->bias, p->bias_type, j);
            if (p->accumulate) sum += gemm_load(p->out, p->out_type, i * p->out_stride + j);
            gemm_save(p->out, p->out_type, i * p->out_stride + j, sum);
        }
}

// Task number t computes out[i_begin..i_end, j_begin..j_end].
static inline void gemm_block_task(const GemmProblem* p, const GemmKernel* kernel, const GemmPlan* plan, size_t t) {
    size_t tall = gemm_blocks(p->M, plan->rows);
    size_t i_begin = t % tall * plan->rows, j_begin = t / tall * plan->cols;
    size_t i_end = min_size(i_begin + plan->rows, p->M), j_end = min_size(j_begin + plan->cols, p->N);
    GemmWorkspace* w = gemm_workspace();
    if (!w) {
        gemm_unpacked(p, i_end, j_end, i_begin, j_begin);
        return;
    }
    size_t tile = kernel->rows * kernel->cols, panels = gemm_blocks(j_end - j_begin, kernel->cols);
    bool keep = p->out_type != GEMM_F32 && plan->k_block < p->K;  // sums stay in the workspace until the last k block
    if (kernel->begin) kernel->begin();
    for (size_t k = 0; k < p->K; k += plan->k_block) {
        size_t count = min_size(plan->k_block, p->K - k);
        size_t units = round_up(kernel->pairs ? (count + 1) / 2 : count, kernel->k_round);
        bool last = k + count == p->K;
        for (size_t j = j_begin; j < j_end; j += kernel->cols)
            kernel->pack(w->b + (j - j_begin) * units, &p->b, j, min_size(kernel->cols, j_end - j), kernel->cols, k,
                         count);
        for (size_t i = i_begin; i < i_end; i += kernel->rows) {
            kernel->pack_a(w->a, &p->a, i, min_size(kernel->rows, i_end - i), kernel->rows, k, count);
            float* row_sums = w->sums + (keep ? (i - i_begin) / kernel->rows * panels * tile : 0);
            for (size_t u = 0; u < units; u += kernel->k_inner) {
                size_t inner = min_size(kernel->k_inner, units - u);
                bool whole = inner == units, done = u + inner == units;
                for (size_t j = j_begin; j < j_end; j += kernel->cols) {
                    float* sums = row_sums + (keep || !whole ? (j - j_begin) * kernel->rows : 0);
                    kernel->multiply(sums, w->a + u * kernel->rows, w->b + (j - j_begin) * units + u * kernel->cols,
                                     inner, u > 0 || (keep && k > 0));
                    if (done && (last || !keep))
                        kernel->store(p, sums, i, j, p->accumulate || (k > 0 && !keep), k == 0 || keep);
                }
            }
        }
    }
    if (kernel->end) kernel->end();
}

// A few rows: task number t computes the columns j..j_end.
static inline void gemm_dot_task(const GemmProblem* p, const GemmKernel* kernel, const GemmPlan* plan, size_t t) {
    kernel->dot(p, t * plan->cols, min_size((t + 1) * plan->cols, p->N));
}

static inline GemmOperand gemm_operand(GemmMatrix m, bool k_contiguous) {
    GemmOperand o;
    o.data = (const char*)m.data;
    o.type = m.type;
    o.stride = m.stride;
    o.k_contiguous = k_contiguous;
    return o;
}

// Threads that pay: each should have some microseconds of work.
static inline size_t gemm_threads(size_t multiplications) {
#ifdef _OPENMP
    if (omp_in_parallel()) return 1;
    return min_size((size_t)omp_get_max_threads(), 1 + multiplications / 400000);
#else
    (void)multiplications;
    return 1;
#endif
}

// out (M, N) = [out +] op(A) (M, K) * op(B) (K, N) [+ bias (N)]. Sums are floats whatever the types.
static inline void gemm(void* out, GemmType out_type, size_t out_stride, bool accumulate, GemmMatrix a, GemmMatrix b,
                        const void* bias, GemmType bias_type, size_t M, size_t N, size_t K) {
    if (M == 0 || N == 0) return;
    pthread_once(&gemm_once, gemm_init);
    GemmProblem p;
    p.out = out;
    p.out_type = out_type;
    p.out_stride = out_stride;
    p.accumulate = accumulate;
    p.a = gemm_operand(a, !a.transposed);
    p.b = gemm_operand(b, b.transposed);
    p.bias = bias;
    p.bias_type = bias_type;
    p.M = M;
    p.N = N;
    p.K = K;
    size_t threads = gemm_threads(M * N * K);
    bool both_bf16 = a.type == GEMM_BF16 && b.type == GEMM_BF16;
    const GemmKernel* kernel = both_bf16 ? gemm_state.pairs : gemm_state.floats;

    bool few_rows = M <= GEMM_FEW_ROWS && !a.transposed && b.transposed && a.type == b.type;
    GemmPlan plan = few_rows ? gemm_dot_plan(&p, threads) : gemm_plan(kernel, &p, threads);
    void (*task)(const GemmProblem*, const GemmKernel*, const GemmPlan*, size_t) = few_rows ? gemm_dot_task : gemm_block_task;
    size_t tasks = gemm_blocks(M, plan.rows) * gemm_blocks(N, plan.cols);
    if (threads == 1) {
        for (size_t t = 0; t < tasks; t++) task(&p, kernel, &plan, t);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
    for (size_t t = 0; t < tasks; t++) task(&p, kernel, &plan, t);
#endif
}

#endif  // LLMTRAIN_GEMM_H
