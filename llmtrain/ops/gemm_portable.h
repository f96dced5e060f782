// gemm_portable.h: what the kernels of gemm.h are made of, and the kernel in plain C.
//
//   1. types       how a matrix lies in memory; what a kernel is
//   2. elements    of any dtype, read and written as float
//   3. portable    the kernel in plain C, whose parts are also used by those for each instruction set

#ifndef LLMTRAIN_GEMM_PORTABLE_H
#define LLMTRAIN_GEMM_PORTABLE_H

#include "arithmetic.h"
#include "dtypes.h"

// ------------------------------------------------------------------------------------------------
// 1. Types

typedef struct {
    const void* data;
    Dtype type;       // DTYPE_F32, DTYPE_BF16 or DTYPE_F16
    size_t stride;    // elements between rows as stored
    bool transposed;  // the matmul takes the transpose of what is stored
} GemmMatrix;

static inline GemmMatrix gemm_matrix(const void* data, Dtype type, size_t stride, bool transposed) {
    GemmMatrix m = {data, type, stride, transposed};
    return m;
}

// One operand as the packing sees it. Lanes are the rows of A or the columns of B, the dimension that is not k. Packed
// operands consist of units of 4 bytes: a float, or a pair of bfloat16 that are neighbors in k. A panel holds `width`
// lanes, unit u of lane l at [u * width + l]; or by_lane, in blocks of 16 units, as [block][lane][unit].
typedef struct {
    const char* data;
    Dtype type;
    size_t stride;      // elements between neighbors along the direction that is not contiguous
    bool k_contiguous;  // neighbors in k are neighbors in memory; otherwise neighboring lanes are
    bool pairs, by_lane;
} GemmOperand;

typedef struct {
    void* out;  // (M, N)
    Dtype out_type;
    size_t out_stride;
    bool accumulate;
    GemmOperand a, b;
    const void* bias;  // (N) or NULL
    Dtype bias_type;
    size_t M, N, K;
} GemmProblem;

// sums (rows, cols) = [from +] A panel x B panel; rows of sums and from are `stride` and `from_stride` apart. sums may
// be in out itself; from may be sums, NULL, or a bias, whose stride is 0.
typedef void GemmMultiply(float* sums, size_t stride, const float* from, size_t from_stride, const uint32_t* a,
                          const uint32_t* b, size_t units);

// A kernel computes tiles of rows x cols.
typedef struct {
    const char* name;
    bool pairs, a_by_lane;  // how its operands are packed
    size_t rows, cols;
    size_t k_block;  // units of k that are packed at a time, at most
    size_t k_inner;  // units of k that one call of `multiply` takes: an A panel of that length fits in L1
    size_t k_round;  // units are padded with zeros to a multiple of this
    // panel = lanes [lane, lane + lanes) of the operand, padded to `width`, elements [k, k + count). It may write up to
    // GEMM_PACK_EXTRA more units of each lane than it was asked for.
    void (*pack)(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes, size_t width, size_t k,
                 size_t count);
    GemmMultiply* multiply;
    GemmMultiply* multiply_half;  // for the first half of the columns, if the last tile of a row needs no more, or NULL
    // start: sums = [out[i.., j..]] [+ bias], what a tile's sums start from; store: out[i.., j..] = sums; both for the
    // part of the tile that is inside of out
    void (*start)(const GemmProblem* p, float* sums, size_t i, size_t j, bool out, bool bias);
    void (*store)(const GemmProblem* p, const float* sums, size_t i, size_t j);
    // sums (rows, GEMM_DOT_COLS) += A (rows, count) x the elements [k, k + count) of lanes [j, j + lanes) of B, which
    // lie in rows and are not packed; a: unit after unit, of `rows` lanes each, 1, 4 or 8. NULL where its bits would
    // not be those of `multiply` (in a program for processors without fused multiply-add), and with a_by_lane: few
    // rows are left to the kernel for floats
    void (*dot)(float* sums, const uint32_t* a, size_t rows, const GemmOperand* b, size_t j, size_t lanes, size_t k,
                size_t count);
    void (*begin)(void), (*end)(void);  // around the multiplications of one task; NULL for none
} GemmKernel;

enum {
    GEMM_PACK_EXTRA = 15,       // units that packing may write past the end of each lane
    GEMM_FEW_ROWS = 8,          // at most this many rows of A are multiplied with an unpacked B
    GEMM_DOT_COLS = 16,         // columns of out that are then computed at a time
    GEMM_DOT_AHEAD = 2048,      // how far ahead their rows are then prefetched, in bytes
    GEMM_DOT_K = LLMTRAIN_PIECE(4096, 56),  // elements of k that are then multiplied at a time
    GEMM_DOT_EXTRA = 31,        // units of zeros that follow them
    GEMM_GROUP_ROWS = 48,       // rows of A that are packed together: in a transposed A they share cache lines
    GEMM_GROUP_UNITS = 1025,    // the most units of each of them: 1024, and the gap of gemm_panel_units
    GEMM_PIECE_UNITS = 16,      // units packed at a time where k is not contiguous: a multiple of every k_round
    GEMM_PANEL_MAX = 32 * 512,  // spare units behind packed panels, for their gaps and for packing past the end
    GEMM_TILE_MAX = 32 * 32     // the largest rows x cols
};

#if defined(__CUDACC__)
#define GEMM_UNROLL  // nvcc does not know the pragma
#elif defined(__clang__)
#define GEMM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GEMM_UNROLL _Pragma("GCC unroll 32")
#endif

// Elements of two Quads: 0 to 3 of the first, 4 to 7 of the second.
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define GEMM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t GemmIndices __attribute__((vector_size(16)));
#define GEMM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (GemmIndices){__VA_ARGS__})
#endif

// ------------------------------------------------------------------------------------------------
// 2. Elements

ALWAYS_INLINE float gemm_load(const void* data, Dtype type, size_t index) {
    if (type == DTYPE_F32) return ((const float*)data)[index];
    uint16_t bits = ((const uint16_t*)data)[index];
    return type == DTYPE_BF16 ? float_from_bf16(bits) : float_from_f16(bits);
}

ALWAYS_INLINE void gemm_save(void* data, Dtype type, size_t index, float value) {
    if (type == DTYPE_F32) ((float*)data)[index] = value;
    else if (type == DTYPE_BF16) ((uint16_t*)data)[index] = bf16_from_float(value);
    else ((uint16_t*)data)[index] = f16_from_float(value);
}

// ------------------------------------------------------------------------------------------------
// 3. Portable
//
// Bodies named *_body serve every instruction set; `rows` and `cols` are constants where they are inlined.

// Four neighboring elements as floats.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
ALWAYS_INLINE Quad gemm_load_quad(const char* data, Dtype type, size_t index) {
    if (type == DTYPE_F32) return *(const Quad*)((const float*)data + index);
    Quad quad = {0};
    for (size_t i = 0; i < 4; i++) quad[i] = gemm_load(data, type, index + i);
    return quad;
}

// panel[u * width + l] = o[l, u], for 4 lanes l and 4 neighbors in k, which lie in the rows of the operand.
ALWAYS_INLINE void gemm_pack_transposed(float* panel, const char* data, Dtype type, size_t stride, size_t width) {
    Quad r[4];
    GEMM_UNROLL
    for (size_t l = 0; l < 4; l++) r[l] = gemm_load_quad(data, type, l * stride);
    Quad low01 = GEMM_SHUFFLE(r[0], r[1], 0, 4, 1, 5), high01 = GEMM_SHUFFLE(r[0], r[1], 2, 6, 3, 7);
    Quad low23 = GEMM_SHUFFLE(r[2], r[3], 0, 4, 1, 5), high23 = GEMM_SHUFFLE(r[2], r[3], 2, 6, 3, 7);
    *(Quad*)panel = GEMM_SHUFFLE(low01, low23, 0, 1, 4, 5);
    *(Quad*)(panel + width) = GEMM_SHUFFLE(low01, low23, 2, 3, 6, 7);
    *(Quad*)(panel + 2 * width) = GEMM_SHUFFLE(high01, high23, 0, 1, 4, 5);
    *(Quad*)(panel + 3 * width) = GEMM_SHUFFLE(high01, high23, 2, 3, 6, 7);
}

// If `prefetches`, then into the L2 cache, what is packed next: the same elements of the next panel if k is contiguous,
// else the next elements. The processor itself finds no pattern in short pieces of so many rows.
ALWAYS_INLINE void gemm_pack_typed(float* panel, const GemmOperand* o, Dtype type, size_t lane, size_t lanes,
                                   size_t width, size_t k, size_t count, bool prefetches) {
    size_t lane_step = o->k_contiguous ? o->stride : 1, k_step = o->k_contiguous ? 1 : o->stride;
    size_t bytes = dtype_bytes(type);
    const char* data = o->data + (lane * lane_step + k * k_step) * bytes;
    if (lanes < width) memset(panel, 0, count * width * sizeof(float));
    if (o->k_contiguous) {
        size_t u = 0, l;
        for (; u + 4 <= count; u += 4) {
            for (l = 0; l + 4 <= lanes; l += 4) {
                const char* from = data + (u + l * lane_step) * bytes;
                if (prefetches && u % 16 == 0)
                    for (size_t r = 0; r < 4; r++) __builtin_prefetch(from + (width + r) * lane_step * bytes, 0, 2);
                gemm_pack_transposed(panel + u * width + l, from, type, lane_step, width);
            }
            for (; l < lanes; l++)
                for (size_t i = u; i < u + 4; i++) panel[i * width + l] = gemm_load(data, type, i + l * lane_step);
        }
        for (; u < count; u++)
            for (l = 0; l < lanes; l++) panel[u * width + l] = gemm_load(data, type, u + l * lane_step);
        return;
    }
    for (size_t u = 0; u < count; u++) {
        const char* from = data + u * k_step * bytes;
        size_t l = 0;
        for (size_t line = 0; prefetches && line < lanes * bytes; line += 64)
            __builtin_prefetch(from + GEMM_PIECE_UNITS * k_step * bytes + line, 0, 2);
        for (; l + 4 <= lanes; l += 4) *(Quad*)(panel + u * width + l) = gemm_load_quad(from, type, l);
        for (; l < lanes; l++) panel[u * width + l] = gemm_load(from, type, l);
    }
}

ALWAYS_INLINE void gemm_pack_body(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes, size_t width,
                                size_t k, size_t count) {
    float* floats = (float*)panel;
    if (o->type == DTYPE_F32) gemm_pack_typed(floats, o, DTYPE_F32, lane, lanes, width, k, count, true);
    else if (o->type == DTYPE_BF16) gemm_pack_typed(floats, o, DTYPE_BF16, lane, lanes, width, k, count, true);
    else gemm_pack_typed(floats, o, DTYPE_F16, lane, lanes, width, k, count, true);
}

// sums (rows, cols) and the tile of out at i, j: `height` rows of `width` columns lie inside of out.
ALWAYS_INLINE void gemm_start_typed(const GemmProblem* p, Dtype type, float* sums, size_t cols, size_t i,
                                    size_t height, size_t j, size_t width, bool out, bool bias) {
    for (size_t r = 0; r < height; r++) {
        const char* from = (const char*)p->out + ((i + r) * p->out_stride + j) * dtype_bytes(type);
        for (size_t c = 0; c < width; c++) {
            float start = bias ? gemm_load(p->bias, p->bias_type, j + c) : 0.0f;
            sums[r * cols + c] = !out ? start : bias ? gemm_load(from, type, c) + start : gemm_load(from, type, c);
        }
    }
}

ALWAYS_INLINE void gemm_store_typed(const GemmProblem* p, Dtype type, const float* sums, size_t cols, size_t i,
                                    size_t height, size_t j, size_t width) {
    for (size_t r = 0; r < height; r++) {
        char* out = (char*)p->out + ((i + r) * p->out_stride + j) * dtype_bytes(type);
        for (size_t c = 0; c < width; c++) gemm_save(out, type, c, sums[r * cols + c]);
    }
}

ALWAYS_INLINE void gemm_start_body(const GemmProblem* p, float* sums, size_t rows, size_t cols, size_t i, size_t j,
                                   bool out, bool bias) {
    size_t height = min_size(rows, p->M - i), width = min_size(cols, p->N - j);
    if (height < rows || width < cols) memset(sums, 0, rows * cols * sizeof(float));
    if (p->out_type == DTYPE_F32 && width == cols)
        gemm_start_typed(p, DTYPE_F32, sums, cols, i, height, j, cols, out, bias);
    else gemm_start_typed(p, p->out_type, sums, cols, i, height, j, width, out, bias);
}

ALWAYS_INLINE void gemm_store_body(const GemmProblem* p, const float* sums, size_t rows, size_t cols, size_t i,
                                   size_t j) {
    size_t height = min_size(rows, p->M - i), width = min_size(cols, p->N - j);
    if (p->out_type == DTYPE_F32 && width == cols) gemm_store_typed(p, DTYPE_F32, sums, cols, i, height, j, cols);
    else if (p->out_type == DTYPE_F32) gemm_store_typed(p, DTYPE_F32, sums, cols, i, height, j, width);
    else if (p->out_type == DTYPE_BF16) gemm_store_typed(p, DTYPE_BF16, sums, cols, i, height, j, width);
    else gemm_store_typed(p, DTYPE_F16, sums, cols, i, height, j, width);
}

// Prefetches what is read after element k of `columns` rows of B from row j on: after the end of these rows comes the
// beginning of the next ones. Into the L2 cache: rows at distances of a power of two have few places in the L1 cache.
ALWAYS_INLINE void gemm_dot_prefetch(const GemmOperand* b, Dtype type, size_t columns, size_t j, size_t k) {
    size_t row = b->stride * dtype_bytes(type), at = k * dtype_bytes(type) + GEMM_DOT_AHEAD;
    const char* from = b->data + j * row + (at < row ? at : at + (columns - 1) * row);
    GEMM_UNROLL
    for (size_t l = 0; l < columns; l++) __builtin_prefetch(from + l * row, 0, 2);
}

// A few rows. The 16 columns of B are transposed a piece at a time, small enough to stay in the L1 cache: a sum is then
// a lane of a vector, and adds its terms in the order of k as all others do. Rows of 16-bit types are converted first.
ALWAYS_INLINE void gemm_dot_typed(float* sums, const float* a, size_t rows, const GemmOperand* b, Dtype type, size_t j,
                                  size_t lanes, size_t k, size_t count) {
    enum { PIECE = LLMTRAIN_PIECE(64, 7), VECTORS = GEMM_DOT_COLS / (int)VECTOR_LANES };
    float panel[((int)PIECE + GEMM_PACK_EXTRA) * GEMM_DOT_COLS], converted[GEMM_DOT_COLS * (int)PIECE];
    GemmOperand floats = *b;
    if (type != DTYPE_F32) floats.data = (const char*)converted, floats.stride = PIECE;
    Vector c[GEMM_FEW_ROWS * (int)VECTORS];
    GEMM_UNROLL
    for (size_t i = 0; i < rows * VECTORS; i++) c[i] = *(const Vector*)(sums + i * VECTOR_LANES);
    for (size_t done = 0; done < count; done += PIECE) {
        size_t units = min_size(PIECE, count - done), line = 64 / dtype_bytes(type);
        for (size_t u = 0; u < units; u += line) gemm_dot_prefetch(b, type, GEMM_DOT_COLS, j, k + done + u);
        for (size_t l = 0; l < lanes && type != DTYPE_F32; l++) {
            const uint16_t* from = (const uint16_t*)b->data + (j + l) * b->stride + k + done;
            for (size_t u = 0; u < units; u++) converted[l * PIECE + u] = gemm_load(from, type, u);
        }
        if (type == DTYPE_F32) gemm_pack_typed(panel, b, DTYPE_F32, j, lanes, GEMM_DOT_COLS, k + done, units, false);
        else gemm_pack_typed(panel, &floats, DTYPE_F32, 0, lanes, GEMM_DOT_COLS, 0, units, false);
        for (size_t u = 0; u < units; u++) {
            const Vector* column = (const Vector*)(panel + u * GEMM_DOT_COLS);
            GEMM_UNROLL
            for (size_t i = 0; i < rows * VECTORS; i++)
                c[i] = vector_fused(vector_of(a[(done + u) * rows + i / VECTORS]), column[i % VECTORS], c[i]);
        }
    }
    GEMM_UNROLL
    for (size_t i = 0; i < rows * VECTORS; i++) *(Vector*)(sums + i * VECTOR_LANES) = c[i];
}

// Defines a `dot` that calls a body with constant rows and types.
#define GEMM_DOT_ROWS(body, type) \
    do { \
        const float* floats_ = (const float*)a; \
        if (rows == 1) body(sums, floats_, 1, b, type, j, lanes, k, count); \
        else if (rows == 4) body(sums, floats_, 4, b, type, j, lanes, k, count); \
        else body(sums, floats_, 8, b, type, j, lanes, k, count); \
    } while (0)
#define GEMM_DOT(name, target, body) \
    target static inline void gemm_dot_##name(float* sums, const uint32_t* a, size_t rows, const GemmOperand* b, \
                                              size_t j, size_t lanes, size_t k, size_t count) { \
        if (b->type == DTYPE_F32) GEMM_DOT_ROWS(body, DTYPE_F32); \
        else if (b->type == DTYPE_BF16) GEMM_DOT_ROWS(body, DTYPE_BF16); \
        else GEMM_DOT_ROWS(body, DTYPE_F16); \
    }

// Two vectors per row, and three quarters of the registers hold the sums.
enum { GEMM_PORTABLE_ROWS = VECTOR_REGISTERS * 3 / 8, GEMM_PORTABLE_COLS = 2 * VECTOR_LANES };

static inline void gemm_multiply_portable(float* sums, size_t stride, const float* from, size_t from_stride,
                                          const uint32_t* a_panel, const uint32_t* b_panel, size_t units) {
    const float* a = (const float*)a_panel;
    const float* b = (const float*)b_panel;
    Vector c[GEMM_PORTABLE_ROWS][2];
    GEMM_UNROLL
    for (size_t i = 0; i < GEMM_PORTABLE_ROWS; i++) {
        c[i][0] = from ? *(const Vector*)(from + i * from_stride) : vector_of(0.0f);
        c[i][1] = from ? *(const Vector*)(from + i * from_stride + VECTOR_LANES) : vector_of(0.0f);
    }
    for (size_t u = 0; u < units; u++, a += GEMM_PORTABLE_ROWS, b += GEMM_PORTABLE_COLS) {
        Vector b0 = *(const Vector*)b, b1 = *(const Vector*)(b + VECTOR_LANES);
        GEMM_UNROLL
        for (int i = 0; i < GEMM_PORTABLE_ROWS; i++) {
            c[i][0] = vector_fused(vector_of(a[i]), b0, c[i][0]);
            c[i][1] = vector_fused(vector_of(a[i]), b1, c[i][1]);
        }
    }
    GEMM_UNROLL
    for (size_t i = 0; i < GEMM_PORTABLE_ROWS; i++) {
        *(Vector*)(sums + i * stride) = c[i][0];
        *(Vector*)(sums + i * stride + VECTOR_LANES) = c[i][1];
    }
}

// Functions of a kernel that are bodies compiled for its instruction set.
#define GEMM_BODIES(name, target, rows, cols)                                                                 \
    target static inline void gemm_start_##name(const GemmProblem* p, float* sums, size_t i, size_t j,        \
                                                bool out, bool bias) {                                        \
        gemm_start_body(p, sums, rows, cols, i, j, out, bias);                                                \
    }                                                                                                         \
    target static inline void gemm_store_##name(const GemmProblem* p, const float* sums, size_t i, size_t j) { \
        gemm_store_body(p, sums, rows, cols, i, j);                                                           \
    }

GEMM_BODIES(portable, , GEMM_PORTABLE_ROWS, GEMM_PORTABLE_COLS)
GEMM_DOT(portable, , gemm_dot_typed)

static inline void gemm_pack_portable(uint32_t* panel, const GemmOperand* o, size_t lane, size_t lanes, size_t width,
                                      size_t k, size_t count) {
    gemm_pack_body(panel, o, lane, lanes, width, k, count);
}

static const GemmKernel gemm_portable = {
    "portable", false, false, GEMM_PORTABLE_ROWS, GEMM_PORTABLE_COLS, 384, 384, 1, gemm_pack_portable,
    gemm_multiply_portable, NULL, gemm_start_portable, gemm_store_portable, gemm_dot_portable, NULL, NULL};

#endif  // LLMTRAIN_GEMM_PORTABLE_H
