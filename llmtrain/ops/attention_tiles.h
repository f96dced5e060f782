// attention_tiles.h: tiles of the matrices of attention on a CPU: loading, transposing, multiplying and adding them up.
// attention_forward and attention_backward in kernels_cpu.h are made of them.
//
// A tile holds floats, whatever the storage dtype, in memory of the thread that computes with it. Scores are stored by
// key, (keys, queries): a vector holds the scores of neighboring queries with one key, so that maxima, exponentials
// and sums over keys need no operations across the lanes of a vector.
//
// Every sum is taken in an order that depends on the sizes alone: matmuls add their terms one by one with fused
// multiply-adds, tile_sums in the order of SUM. So the bits are the same on every processor.
//
// Needs: llmtrain/ops/arithmetic.h, llmtrain/ops/base.h, llmtrain/ops/gemm.h, llmtrain/ops/types.h.

#ifndef LLMTRAIN_ATTENTION_TILES_H
#define LLMTRAIN_ATTENTION_TILES_H

#include "arithmetic.h"
#include "base.h"
#include "gemm.h"
#include "types.h"

#ifdef LLMTRAIN_CUDA
namespace cpu {
#endif

enum {
    TILE = SUM_LANES, // queries or keys in a tile; a sum over its keys adds one term to each partial sum of SUM
    TILE_GROUP = 16,  // neighboring rows or columns of a tile: a block of that size is computed unless all is masked
    TILE_ELEMENTS = (TILE + (int)GEMM_PACK_EXTRA) * ATTENTION_MAX_D,  // of rows of queries, keys or values
    TILE_TRANSPOSED = TILE * (ATTENTION_MAX_D + GEMM_PACK_EXTRA)
};

// tile (rows, width) = source (available, D), rows `stride` apart, or tile (D, TILE) its transpose; 0 outside the
// source. Uses gemm's packing, which may write GEMM_PACK_EXTRA rows more.
static inline void tile_load(float* tile, const floatX* source, size_t stride, size_t available, size_t rows, size_t D,
                             size_t width) {
    GemmOperand operand = gemm_operand(gemm_matrix(source, FLOATX_DTYPE, stride, false), false, false, false);
    gemm_kernel()->pack((uint32_t*)tile, &operand, 0, D, width, 0, available);
    if (available < rows) memset(tile + available * width, 0, (rows - available) * width * sizeof(float));
}
static inline void tile_load_transposed(float* tile, const floatX* source, size_t stride, size_t available, size_t D) {
    GemmOperand operand = gemm_operand(gemm_matrix(source, FLOATX_DTYPE, stride, false), true, false, false);
    gemm_kernel()->pack((uint32_t*)tile, &operand, 0, available, TILE, 0, D);
}

// Rows of a left operand: those of the source if they are floats and fill whole groups of a tile, otherwise a copy of
// them in `memory`; *row becomes the distance between them.
static inline const float* tile_rows(size_t* row, float* memory, const floatX* source, size_t stride, size_t available,
                                     size_t D, size_t width) {
    bool copied = !FLOATX_IS_FLOAT || available % TILE_GROUP != 0;
    if (copied) tile_load(memory, source, stride, available, round_up(available, TILE_GROUP), D, width);
    *row = copied ? width : stride;
    return copied ? memory : (const float*)(const void*)source;
}

// tile (n) *= scale
static inline void tile_scale(float* tile, float scale, size_t n) {
    for (size_t i = 0; i < n; i++) tile[i] *= scale;
}

// to (D) = factor * row (D)
static inline void tile_store_row(floatX* to, const float* row, float factor, size_t D) {
    size_t d = 0;
    for (; FLOATX_IS_FLOAT && d + VECTOR_LANES <= D; d += VECTOR_LANES)
        *(Vector*)(void*)(to + d) = vector_of(factor) * *(const Vector*)(row + d);
    for (; d < D; d++) to[d] = floatX_of(factor * row[d]);
}

// tile_product for `vectors` neighboring vectors of columns, 1 or 2: half of the registers hold sums.
ALWAYS_INLINE void tile_columns(float* out, const float* a, size_t a_row, size_t a_col, const float* b, size_t depth,
                                size_t stride, bool adds, int vectors) {
    enum { SUMS = VECTOR_REGISTERS / 2 };
    const size_t height = SUMS / (size_t)vectors;
    for (size_t i = 0; i < TILE_GROUP; i += height) {
        Vector sum[SUMS], zero = {0};
        GEMM_UNROLL
        for (int s = 0; s < SUMS; s++) {
            const float* start = out + (i + (size_t)(s / vectors)) * stride + s % vectors * VECTOR_LANES;
            sum[s] = adds ? *(const Vector*)start : zero;
        }
        for (size_t p = 0; p < depth; p++) {
            const Vector* column = (const Vector*)(b + p * stride);
            GEMM_UNROLL
            for (int s = 0; s < SUMS; s++) {
                Vector x = vector_of(a[(i + (size_t)(s / vectors)) * a_row + p * a_col]);
                sum[s] = vector_fused(x, column[s % vectors], sum[s]);
            }
        }
        GEMM_UNROLL
        for (int s = 0; s < SUMS; s++)
            *(Vector*)(out + (i + (size_t)(s / vectors)) * stride + s % vectors * VECTOR_LANES) = sum[s];
    }
}

// out (TILE_GROUP, cols) = or, if `adds`, += a (TILE_GROUP, depth) b (depth, cols), all float. cols is a multiple of
// VECTOR_LANES; rows of out and b are `stride` apart; a has any strides, so that it may be a transpose.
ALWAYS_INLINE void tile_product(float* out, const float* a, size_t a_row, size_t a_col, const float* b, size_t cols,
                                size_t depth, size_t stride, bool adds) {
    size_t j = 0;
    for (; j + 2 * VECTOR_LANES <= cols; j += 2 * VECTOR_LANES)
        tile_columns(out + j, a, a_row, a_col, b + j, depth, stride, adds, 2);
    if (j < cols) tile_columns(out + j, a, a_row, a_col, b + j, depth, stride, adds, 1);
}

// The first query, counted from number `first`, that sees a key of the group from number `key` on; no query before it
// does.
static inline size_t tile_first_query(size_t first, size_t key) { return key > first ? key - first : 0; }

// How many keys, counted from number `key`, the group of queries from number `query` on can see: the rest is masked for
// all of them, and never read. A value that only some of them see is multiplied by 0 for the others, so an infinite
// value or NaN there reaches all of them.
static inline size_t tile_visible(size_t query, size_t key) { return min_size(TILE, query + TILE_GROUP - key); }

// score (TILE, TILE) = k (TILE, D) qt (D, TILE) where a query sees the key; `masked` where only other queries of its
// group do. Rows of k are k_row apart.
static inline void tile_scores(float* score, const float* k, size_t k_row, const float* qt, float masked, size_t first,
                               size_t key, size_t queries, size_t D) {
    for (size_t j = 0; j < TILE && key + j < first + queries; j += TILE_GROUP) {
        size_t i = tile_first_query(first, key + j);
        tile_product(score + j * TILE + i, k + j * k_row, k_row, 1, qt + i, queries - i, D, TILE, false);
        for (size_t r = 0; key + j >= first && r < TILE_GROUP; r++) {
            float* s = score + (j + r) * TILE + i;
            for (size_t l = 0; l < TILE_GROUP; l++) s[l] = l < r ? masked : s[l];
        }
    }
}

// lanes[j] += lanes[j + half] for all j below half.
ALWAYS_INLINE void tile_fold(Vector* lanes, size_t half) {
    GEMM_UNROLL
    for (size_t j = 0; j < half; j++) lanes[j] += lanes[j + half];
}

// The sums (VECTOR_LANES) of neighboring columns of terms (SUM_LANES, TILE), in the order of SUM.
ALWAYS_INLINE Vector tile_column_sums(const float* terms) {
    enum { QUARTER = SUM_LANES / 4 };
    Vector lanes[QUARTER];
    GEMM_UNROLL
    for (size_t j = 0; j < QUARTER; j++) {
        const float* row = terms + j * TILE;
        lanes[j] = (*(const Vector*)row + *(const Vector*)(row + 2 * QUARTER * TILE)) +
            (*(const Vector*)(row + 1 * QUARTER * TILE) + *(const Vector*)(row + 3 * QUARTER * TILE));
    }
    tile_fold(lanes, 8);
    tile_fold(lanes, 4);
    tile_fold(lanes, 2);
    return lanes[0] + lanes[1];
}

// The maxima of neighboring columns of scores (visible, TILE) and of those before; visible is a multiple of 4.
ALWAYS_INLINE Vector tile_column_maxima(const float* score, size_t visible, Vector before) {
    Vector maximum[4];
    GEMM_UNROLL
    for (size_t r = 0; r < 4; r++) maximum[r] = before;
    for (size_t j = 0; j < visible; j += 4) {
        GEMM_UNROLL
        for (size_t r = 0; r < 4; r++) maximum[r] = vector_max(*(const Vector*)(score + (j + r) * TILE), maximum[r]);
    }
    return vector_max(vector_max(maximum[0], maximum[1]), vector_max(maximum[2], maximum[3]));
}

// sums (cols) = the sums of the columns of terms (SUM_LANES, TILE); cols is a multiple of TILE_GROUP.
static inline void tile_sums(float* sums, const float* terms, size_t cols) {
    for (size_t i = 0; i < cols; i += VECTOR_LANES) *(Vector*)(sums + i) = tile_column_sums(terms + i);
}

#ifdef LLMTRAIN_CUDA
}  // namespace cpu
#endif

#endif  // LLMTRAIN_ATTENTION_TILES_H
