// attention_cpu.h: attention on a CPU, forward and backward: the operations that the model calls. Their formulas, as
// plain loops, are in kernels_cpu.h, section 6: read those first.
//
//   1. tiles       of the matrices of attention: loading, transposing, multiplying and adding them up
//   2. forward
//   3. backward
//
// The method is that of "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning": keys are
// visited in tiles with a running maximum and sum per query, so no (T, T) array exists; the forward keeps lse = maximum
// + log(sum) of each row, from which the backward recomputes the probabilities.
//
// Work per pair of tiles: 2 matmuls of TILE x TILE x D forward and 5 backward, on operands in the L1 and L2 caches: the
// bound is arithmetic. dq is summed over the tiles of keys in order, dk and dv over the heads and tiles of queries in
// order, whichever thread computes them and however the work is divided: matmuls add their terms one by one with fused
// multiply-adds, tile_sums in the order of VECTOR_SUM. So the bits are the same on every processor, for any number of
// threads.

#ifndef LLMTRAIN_ATTENTION_CPU_H
#define LLMTRAIN_ATTENTION_CPU_H

#include "gemm.h"

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 1. Tiles
//
// A tile holds floats, whatever the storage dtype, in memory of the thread that computes with it. Scores are stored by
// key, (keys, queries): a vector holds the scores of neighboring queries with one key, so that maxima, exponentials
// and sums over keys need no operations across the lanes of a vector.

enum {
    TILE = SUM_LANES, // queries or keys in a tile; a sum over its keys adds one term to each partial sum of it
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

// The sums (VECTOR_LANES) of neighboring columns of terms (SUM_LANES, TILE), in the order of VECTOR_SUM.
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

// ------------------------------------------------------------------------------------------------
// 2. Forward

// One tile of scores becomes p = exp(score - maximum), 0 where it was not computed. For each query maximum and total
// (the sum of p) continue from the tiles before, whose sums of values the caller multiplies by rescale.
static inline void tile_softmax(float* score, float* maximum, float* total, float* rescale, size_t first, size_t key,
                                size_t queries) {
    for (size_t i = 0; i < queries; i += TILE_GROUP) {
        float now[TILE_GROUP], *s = score + i;
        size_t visible = tile_visible(first + i, key);
        for (size_t l = 0; l < TILE_GROUP; l += VECTOR_LANES)
            *(Vector*)(now + l) = tile_column_maxima(s + l, visible, *(const Vector*)(maximum + i + l));
        for (size_t j = 0; j < visible; j++)
            for (size_t l = 0; l < TILE_GROUP; l++) s[j * TILE + l] = exp_fast(s[j * TILE + l] - now[l]);
        for (size_t j = visible; j < TILE; j++) memset(s + j * TILE, 0, TILE_GROUP * sizeof(float));
        for (size_t l = 0; l < TILE_GROUP; l++) rescale[i + l] = exp_fast(maximum[i + l] - now[l]);
        memcpy(maximum + i, now, sizeof now);
    }
    float sums[TILE];
    tile_sums(sums, score, queries);
    for (size_t i = 0; i < queries; i++) total[i] = multiply_add(total[i], rescale[i], sums[i]);
}

// One tile of queries, those of a head from `first` on, against all keys up to their own: the loop of the forward.
// out: rows of D, out_stride apart; lse: one per query.
static inline void attention_forward_tile(floatX* out, float* lse, const floatX* qkv, HeadRows at, size_t first,
                                          size_t T, size_t D, size_t out_stride) {
    float qt[TILE_TRANSPOSED], k[TILE_ELEMENTS], v[TILE_ELEMENTS], sum[TILE_ELEMENTS];
    float score[TILE * TILE], maximum[TILE], total[TILE], rescale[TILE];
    size_t width = round_up(D, TILE_GROUP), cols = round_up(D, VECTOR_LANES);
    size_t rows = min_size(TILE, T - first), queries = round_up(rows, TILE_GROUP);
    tile_load_transposed(qt, qkv + at.q + first * at.stride, at.stride, rows, D);
    tile_scale(qt, 1.0f / sqrtf((float)D), D * TILE);
    for (size_t i = 0; i < TILE; i++) {
        maximum[i] = -INFINITY;
        total[i] = 0.0f;
    }
    for (size_t key = 0; key < first + rows; key += TILE) {
        size_t keys = min_size(TILE, T - key), k_row;
        const float* keys_at = tile_rows(&k_row, k, qkv + at.k + key * at.stride, at.stride, keys, D, width);
        tile_load(v, qkv + at.v + key * at.stride, at.stride, keys, round_up(keys, TILE_GROUP), D, width);
        tile_scores(score, keys_at, k_row, qt, -INFINITY, first, key, queries, D);
        tile_softmax(score, maximum, total, rescale, first, key, queries);
        for (size_t i = 0; i < queries && key > 0; i++)
            for (size_t d = 0; d < width; d++) sum[i * width + d] *= rescale[i];
        for (size_t i = 0; i < queries; i += TILE_GROUP)
            tile_product(sum + i * width, score + i, 1, TILE, v, cols, tile_visible(first + i, key), width, key > 0);
    }
    for (size_t i = 0; i < rows; i++) tile_store_row(out + i * out_stride, sum + i * width, 1.0f / total[i], D);
    for (size_t i = 0; i < rows; i++) lse[i] = maximum[i] + (float)log_double((double)total[i]);
}

// out (B, T, H, D), lse (B, H, T); qkv (B, T, (H + 2K) D): all query heads, then key heads, then value heads.
static inline void attention_forward(floatX* out, float* lse, const floatX* qkv,
                                     size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    size_t tiles = divide_up(T, TILE);
    Tasks tasks;
    tasks_share(&tasks, B * H * tiles, threads_count());
    #pragma omp parallel
    for (size_t task; tasks_take(&tasks, &task);) {
        size_t b = task / (H * tiles), h = task / tiles % H, first = task % tiles * TILE;
        attention_forward_tile(out + ((b * T + first) * H + h) * D, lse + (b * H + h) * T + first, qkv,
                               head_rows(b, h, T, H, K, D), first, T, D, H * D);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Backward

// delta (TILE) = the dot products of the columns of gt (D, TILE) and the rows of out (rows, D), which are `stride`
// apart; 0 from column `rows` on.
static inline void tile_delta(float* delta, const float* gt, const floatX* out, size_t stride, size_t rows, size_t D) {
    float terms[TILE_TRANSPOSED];
    tile_load_transposed(terms, out, stride, rows, D);
    for (size_t i = 0; i < D * TILE; i++) terms[i] *= gt[i];
    if (D < SUM_LANES) memset(terms + D * TILE, 0, (SUM_LANES - D) * TILE * sizeof(float));
    for (size_t d = SUM_LANES; d < D; d++)
        for (size_t i = 0; i < TILE; i++) terms[d % SUM_LANES * TILE + i] += terms[d * TILE + i];
    tile_sums(delta, terms, TILE);
}

// Probabilities p and score gradients ds of one pair of tiles (TILE, TILE). On entry p holds scores, ds dot products of
// values and output gradients; p = exp(p - lse), ds = p * (ds - delta), where delta_i = dout_i out_i.
static inline void tile_gradients(float* p, float* ds, const float* lse, const float* delta, size_t first, size_t key,
                                  size_t queries) {
    for (size_t i = 0; i < queries; i += TILE_GROUP)
        for (size_t at = i; at < tile_visible(first + i, key) * TILE; at += TILE)
            for (size_t l = 0; l < TILE_GROUP; l++) {
                p[at + l] = exp_fast(p[at + l] - lse[i + l]);
                ds[at + l] = p[at + l] * (ds[at + l] - delta[i + l]);
            }
}

// The work of one call of attention_backward_part: from the queries [query, query_end) of heads [h, h_end) and the keys
// and values [key, key_end) of the head that these read, the gradients of the queries, of keys and values, or both.
typedef struct {
    size_t b, h, h_end, query, query_end, key, key_end;
    bool queries, keys;
} AttentionPart;

// dq = scale * ds k; dk and dv, summed over the heads: dv = p^T dout, dk = scale * ds^T q. Arrays are those of
// attention_backward; sums: memory for dk and dv, (2, key_end - key rounded up to a multiple of TILE, width) floats.
static inline void attention_backward_part(floatX* dqkv, float* sums, const floatX* dout, const floatX* out,
                                           const float* lse, const floatX* qkv, AttentionPart part,
                                           size_t T, size_t H, size_t K, size_t D) {
    float q[TILE_ELEMENTS], qt[TILE_TRANSPOSED], g[TILE_ELEMENTS], gt[TILE_TRANSPOSED], dq[TILE_ELEMENTS];
    float k[TILE_ELEMENTS], v[TILE_ELEMENTS], p[TILE * TILE], ds[TILE * TILE], row_lse[TILE], delta[TILE];
    size_t width = round_up(D, TILE_GROUP), cols = round_up(D, VECTOR_LANES);
    size_t sum_rows = round_up(part.key_end - part.key, TILE);
    float scale = 1.0f / sqrtf((float)D), *dk = sums, *dv = sums + sum_rows * width;
    HeadRows at = head_rows(part.b, part.h, T, H, K, D);
    for (size_t h = part.h; h < part.h_end; h++) {
        at = head_rows(part.b, h, T, H, K, D);
        for (size_t first = part.query; first < part.query_end; first += TILE) {
            size_t rows = min_size(TILE, T - first), queries = round_up(rows, TILE_GROUP);
            size_t row = ((part.b * T + first) * H + h) * D;
            tile_load(q, qkv + at.q + first * at.stride, at.stride, rows, queries, D, width);
            tile_load_transposed(qt, qkv + at.q + first * at.stride, at.stride, rows, D);
            tile_scale(q, scale, rows * width);
            tile_scale(qt, scale, D * TILE);
            tile_load(g, dout + row, H * D, rows, queries, D, width);
            tile_load_transposed(gt, dout + row, H * D, rows, D);
            tile_delta(delta, gt, out + row, H * D, rows, D);
            for (size_t i = 0; i < queries; i++)  // rows past the last query get no probability
                row_lse[i] = i < rows ? lse[(part.b * H + h) * T + first + i] : INFINITY;
            for (size_t key = part.key; key < min_size(part.key_end, first + rows); key += TILE) {
                size_t keys = min_size(TILE, T - key), v_row;
                const float* values = tile_rows(&v_row, v, qkv + at.v + key * at.stride, at.stride, keys, D, width);
                tile_load(k, qkv + at.k + key * at.stride, at.stride, keys, round_up(keys, TILE_GROUP), D, width);
                tile_scores(p, k, width, qt, -INFINITY, first, key, queries, D);
                tile_scores(ds, values, v_row, gt, 0.0f, first, key, queries, D);
                tile_gradients(p, ds, row_lse, delta, first, key, queries);
                for (size_t j = 0; part.keys && j < TILE && key + j < first + queries; j += TILE_GROUP) {
                    size_t i = tile_first_query(first, key + j), to = (key - part.key + j) * width;
                    bool adds = h > part.h || first > key;
                    tile_product(dv + to, p + j * TILE + i, TILE, 1, g + i * width, cols, queries - i, width, adds);
                    tile_product(dk + to, ds + j * TILE + i, TILE, 1, q + i * width, cols, queries - i, width, adds);
                }
                for (size_t i = 0; part.queries && i < queries; i += TILE_GROUP)
                    tile_product(dq + i * width, ds + i, 1, TILE, k, cols, tile_visible(first + i, key), width,
                                 key > part.key);
            }
            for (size_t i = 0; part.queries && i < rows; i++)
                tile_store_row(dqkv + at.q + (first + i) * at.stride, dq + i * width, scale, D);
        }
    }
    for (size_t j = 0; part.keys && part.key + j < min_size(part.key_end, T); j++) {
        tile_store_row(dqkv + at.k + (part.key + j) * at.stride, dk + j * width, 1.0f, D);
        tile_store_row(dqkv + at.v + (part.key + j) * at.stride, dv + j * width, 1.0f, D);
    }
}

// All heads that read one key/value head. dk and dv are summed in the thread's GEMM workspace: if they fit there all at
// once, a pair of tiles takes 5 matmuls; otherwise 7: first dq, then dk and dv for as many keys as fit at a time. few
// (2, TILE_ELEMENTS) is for a thread without a workspace.
static inline void attention_backward_head(floatX* dqkv, float* few, const floatX* dout, const floatX* out,
                                           const float* lse, const floatX* qkv, size_t b, size_t kv, size_t T,
                                           size_t H, size_t K, size_t D) {
    GemmWorkspace* memory = gemm_workspace();
    float* sums = memory ? memory->sums : few;
    size_t fit = memory ? GEMM_SUMS / 2 / round_up(D, TILE_GROUP) / TILE * TILE : (size_t)TILE;
    AttentionPart part = {.b = b, .h = kv * (H / K), .h_end = (kv + 1) * (H / K), .query_end = T, .key_end = T,
                          .queries = true, .keys = round_up(T, TILE) <= fit};
    attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
    for (size_t key = 0; key < T && !part.keys; key += fit) {
        AttentionPart keys = {.b = b, .h = part.h, .h_end = part.h_end, .query = key, .query_end = T, .key = key,
                              .key_end = min_size(key + fit, T), .keys = true};
        attention_backward_part(dqkv, sums, dout, out, lse, qkv, keys, T, H, K, D);
    }
}

// dqkv (B, T, (H + 2K) D) from dout (B, T, H, D) and the forward's out, lse and qkv; delta (B, H, T) is scratch that
// a GPU uses. A task is all heads that read one key/value head or, where those are too few for the threads, a tile:
// then a pair of tiles takes 7 matmuls instead of 5, which pays where otherwise more than 2 of 7 threads would idle.
static inline void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv,
                                      size_t B, size_t T, size_t H, size_t K, size_t D, Stream stream) {
    (void)stream, (void)delta;
    size_t tiles = divide_up(T, TILE), heads = B * K, group = H / K, query_tasks = B * H * tiles;
    bool whole = 5 * round_up(heads, threads_count()) <= 7 * heads;
    Tasks tasks;
    tasks_share(&tasks, whole ? heads : query_tasks + heads * tiles, threads_count());
    #pragma omp parallel
    for (size_t task; tasks_take(&tasks, &task);) {
        float sums[2 * TILE_ELEMENTS];
        size_t head = task / tiles, first = task % tiles * TILE;
        if (whole) {
            attention_backward_head(dqkv, sums, dout, out, lse, qkv, task / K, task % K, T, H, K, D);
        } else if (task < query_tasks) {
            AttentionPart part = {.b = head / H, .h = head % H, .h_end = head % H + 1, .query = first,
                                  .query_end = first + TILE, .key_end = T, .queries = true};
            attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
        } else {
            size_t kv = (head - B * H) % K * group;
            AttentionPart part = {.b = (head - B * H) / K, .h = kv, .h_end = kv + group, .query = first, .query_end = T,
                                  .key = first, .key_end = first + TILE, .keys = true};
            attention_backward_part(dqkv, sums, dout, out, lse, qkv, part, T, H, K, D);
        }
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_ATTENTION_CPU_H
