// activations.h: what a block keeps of its forward for its backward, and what is computed again instead.
//
//   1. activations   a table of the arrays that a block's backward needs, and their layout; their gradients
//   2. operations    those that can run again: from which level of --recompute on, and at what cost
//   3. choice        which operations of which blocks run again, so that the activations fit a budget
//
// "Training Deep Nets with Sublinear Memory Cost": keep a part of the activations, and compute the others again, from
// what was kept, just before the backward needs them. Each operation gives the same bits again (dropout is a function
// of the position), so that the choice changes memory and time, and no bit of the weights.
//
//   level       no longer keeps                runs again
//   none        -                              -
//   norms       norm1, norm2                   the norms
//   gelu        ffn_act                        GELU or SwiGLU
//   attention   qkv, attention                 the matmul of queries, keys and values; RoPE; attention
//   block       attention_residual, ffn_in     the matmuls of attention's output and of the feed-forward's input
//
// A level includes those above it. At the last one a block keeps its input (N, C) alone, and what runs again is its
// forward without the last matmul: the backward does not need what that returns.
//
// A block writes what it does not keep to the arrays of the last block. The last block computes nothing again: its
// backward comes right after its forward, while its arrays still hold its own values.
//
// Needs only the sizes of a model, BlockShape. block_recompute in llmtrain.h runs what is chosen here.

#ifndef LLMTRAIN_ACTIVATIONS_H
#define LLMTRAIN_ACTIVATIONS_H

#include "costs.h"
#include "tensors.h"

// ------------------------------------------------------------------------------------------------
// 1. Activations

// The sizes of a block and of the batch; N = B*T rows or, with context or tensor parallelism, this rank's part of them.
// What the ranks of tensor parallelism share is of tp N rows, and 1/tp as wide.
typedef struct {
    size_t B, T, C, H, K, D, F;
    bool llama;               // RMSNorm, RoPE and SwiGLU; otherwise LayerNorm and GELU
    bool qk_norm;
    size_t cp, tp;            // ranks that share the rows and, in attention, the heads, or the layers; 0 means 1
    size_t copies;            // of each key and value head, for attention; 0 means 1
    size_t leaves;            // parts in which gradients of norms are summed; 0 means 1
} BlockShape;

static inline size_t shape_ranks(const BlockShape* s) { return max_size(s->cp, 1) * max_size(s->tp, 1); }
static inline size_t shape_kv_heads(const BlockShape* s) { return s->K * max_size(s->copies, 1); }
static inline size_t shape_rows(const BlockShape* s) { return s->B * s->T / shape_ranks(s); }

// What the backward needs of the forward, for one block.
typedef struct {
    floatX* input;            // (N, C) the residual stream that enters the block
    floatX* norm1;            // (N, C)
    float *mean1, *rstd1;     // (N) mean, and 1 / std
    floatX* qkv;              // (N, (H + 2K) D), rotated by RoPE for Llama; with cp this rank's heads of all rows, and
                              // perhaps copies of keys and values
    floatX* qk;               // (N, (H + K) D) queries and keys before their norms, and 1 / root of mean square:
    float* qk_rstd;           // (N, H + K); both only with qk_norm
    floatX* attention;        // (N, H D)
    floatX* attended;         // (cp N, H/cp D) the same of all rows and this rank's heads; only with cp, and qkv too
    float* lse;               // (B, H/cp, T) log-sum-exp of a row's scores
    floatX* attention_residual;  // (N, C) the residual stream after attention
    floatX* norm2;            // (N, C)
    float *mean2, *rstd2;     // (N)
    floatX* ffn_in;           // (N, F), Llama (N, 2F): before the nonlinearity
    floatX* ffn_act;          // (N, F): after it
    unsigned recomputed;      // bit o: the arrays of operation o are not kept, it runs again in the backward
} BlockActivations;

// Operations of block_forward that can run again, in its order.
typedef enum {
    BLOCK_NORM1, BLOCK_QKV, BLOCK_ATTENTION, BLOCK_ATTENTION_OUT, BLOCK_NORM2, BLOCK_FFN_IN, BLOCK_FFN_ACT,
    BLOCK_OPERATIONS,
    BLOCK_KEPT = BLOCK_OPERATIONS  // of an array that every block keeps
} BlockOperation;

#define BLOCK_SHARES_ALL (~0u)  // `recomputed` of a block that has no backward: it keeps nothing, not even its input

enum { BLOCK_ARRAYS_MAX = 32 };

typedef struct {
    size_t offset;            // of its pointer in BlockActivations
    BlockOperation made_by;
    size_t width;             // elements of a row; 0: the model does not have it
    size_t element;           // bytes of one
} BlockArray;

static inline bool block_recomputes(const BlockActivations* a, BlockOperation operation) {
    return (a->recomputed >> operation & 1) != 0;
}

// Fills in the table of the arrays; returns their number.
static inline size_t block_arrays(BlockArray rows[BLOCK_ARRAYS_MAX], const BlockShape* s) {
    size_t x = sizeof(floatX), f = sizeof(float), heads = s->H + s->K;
    const BlockArray table[] = {
        {offsetof(BlockActivations, input), BLOCK_KEPT, s->C, x},
        {offsetof(BlockActivations, norm1), BLOCK_NORM1, s->C, x},
        {offsetof(BlockActivations, mean1), BLOCK_NORM1, 1, f},
        {offsetof(BlockActivations, rstd1), BLOCK_NORM1, 1, f},
        {offsetof(BlockActivations, qkv), BLOCK_QKV, (s->H + 2 * shape_kv_heads(s)) * s->D, x},
        {offsetof(BlockActivations, qk), BLOCK_QKV, s->qk_norm ? heads * s->D : 0, x},
        {offsetof(BlockActivations, qk_rstd), BLOCK_QKV, s->qk_norm ? heads : 0, f},
        {offsetof(BlockActivations, attention), BLOCK_ATTENTION, s->H * s->D, x},
        {offsetof(BlockActivations, attended), BLOCK_ATTENTION, s->cp > 1 ? s->H * s->D : 0, x},
        {offsetof(BlockActivations, lse), BLOCK_ATTENTION, s->H, f},
        {offsetof(BlockActivations, attention_residual), BLOCK_ATTENTION_OUT, s->C, x},
        {offsetof(BlockActivations, norm2), BLOCK_NORM2, s->C, x},
        {offsetof(BlockActivations, mean2), BLOCK_NORM2, 1, f},
        {offsetof(BlockActivations, rstd2), BLOCK_NORM2, 1, f},
        {offsetof(BlockActivations, ffn_in), BLOCK_FFN_IN, s->llama ? 2 * s->F : s->F, x},
        {offsetof(BlockActivations, ffn_act), BLOCK_FFN_ACT, s->F, x},
    };
    static_assert(sizeof table <= BLOCK_ARRAYS_MAX * sizeof *rows, "make BLOCK_ARRAYS_MAX larger");
    memcpy(rows, table, sizeof table);
    return sizeof table / sizeof *table;
}

// Sets which operations run again in the blocks before the last.
static inline void blocks_recompute(BlockActivations* blocks, size_t L, unsigned recomputed) {
    for (size_t l = 0; l + 1 < L; l++) blocks[l].recomputed = recomputed;
}

// Takes the arrays of a block from the arena; those of operations that run again, the bits of `recomputed`, are shared
// with `last`.
static inline void block_layout(BlockActivations* a, const BlockActivations* last, unsigned recomputed,
                                const BlockShape* s, Arena* arena) {
    BlockArray rows[BLOCK_ARRAYS_MAX];
    size_t count = block_arrays(rows, s);
    memset(a, 0, sizeof *a);
    a->recomputed = recomputed;
    for (size_t i = 0; i < count; i++) {
        void* array = NULL;
        if (rows[i].width == 0) continue;
        if (recomputed >> rows[i].made_by & 1) memcpy(&array, (const char*)last + rows[i].offset, sizeof array);
        else array = arena_take(arena, "activations of the blocks", shape_rows(s) * rows[i].width * rows[i].element);
        memcpy((char*)a + rows[i].offset, &array, sizeof array);
    }
}

// Gradients of activations: buffers that the blocks use in turn.
typedef struct {
    floatX* residual;         // (N, C) of the residual stream
    floatX* hidden;           // (N, C) of a norm's output
    floatX* branch;           // (N, C) of a branch with dropout
    floatX* attention;        // (N, H D)
    floatX* qkv;              // (N, (H + 2K) D)
    floatX* ffn_in;           // (N, F or 2F)
    floatX* ffn_act;          // (N, F), Llama only
    float* delta;             // (B, H, T) scratch of attention's backward
} ActivationGradients;

static inline void gradients_layout(ActivationGradients* g, const BlockShape* s, Arena* arena) {
    const char* name = "gradients of activations";
    size_t row = shape_rows(s) * sizeof(floatX), HD = s->H * s->D;
    g->residual = (floatX*)arena_take(arena, name, row * s->C);
    g->hidden = (floatX*)arena_take(arena, name, row * s->C);
    g->branch = (floatX*)arena_take(arena, name, row * s->C);
    g->attention = (floatX*)arena_take(arena, name, row * HD);
    g->qkv = (floatX*)arena_take(arena, name, row * (HD + 2 * s->K * s->D));
    g->ffn_in = (floatX*)arena_take(arena, name, row * (s->llama ? 2 * s->F : s->F));
    if (s->llama) g->ffn_act = (floatX*)arena_take(arena, name, row * s->F);
    g->delta = (float*)arena_take(arena, name, shape_rows(s) * s->H * sizeof(float));
}

// Bytes that a block saves if an operation runs again.
static inline double block_bytes_made(BlockOperation operation, const BlockShape* s) {
    BlockArray rows[BLOCK_ARRAYS_MAX];
    double bytes = 0;
    size_t count = block_arrays(rows, s);
    for (size_t i = 0; i < count; i++)
        if (rows[i].made_by == operation)
            bytes += (double)arena_piece_bytes(shape_rows(s) * rows[i].width * rows[i].element);
    return bytes;
}

// ------------------------------------------------------------------------------------------------
// 2. Operations

// On a GPU with 16-bit storage the GELU may be part of the matmul before it: running it again runs both.
#ifdef LLMTRAIN_CUDA
#define GELU_NEEDS_MATMUL (!FLOATX_IS_FLOAT)
#else
#define GELU_NEEDS_MATMUL false
#endif

typedef enum {
    RECOMPUTE_NONE, RECOMPUTE_NORMS, RECOMPUTE_GELU, RECOMPUTE_ATTENTION, RECOMPUTE_BLOCK, RECOMPUTE_AUTO
} RecomputeLevel;
#define RECOMPUTE_NAMES "none|norms|gelu|attention|block|auto"

// The level from which on each operation runs again, in the order of BlockOperation.
static const RecomputeLevel OPERATION_LEVELS[BLOCK_OPERATIONS] = {
    RECOMPUTE_NORMS, RECOMPUTE_ATTENTION, RECOMPUTE_ATTENTION, RECOMPUTE_BLOCK, RECOMPUTE_NORMS, RECOMPUTE_BLOCK,
    RECOMPUTE_GELU};

// The operations that run again at a level, as bits. RECOMPUTE_AUTO: none before recompute_choose.
static inline unsigned recompute_operations(RecomputeLevel level) {
    unsigned recomputed = 0;
    for (int o = 0; o < BLOCK_OPERATIONS; o++)
        if (level != RECOMPUTE_AUTO && OPERATION_LEVELS[o] <= level) recomputed |= 1u << o;
    return recomputed;
}

// Milliseconds of an operation of the forward of one block.
static inline double operation_ms(BlockOperation operation, const BlockShape* s, const Rates* r) {
    Cost parts[3];
    size_t N = shape_rows(s), ranks = shape_ranks(s), heads = s->H + s->K, count = 1;
    double act = (double)N * (double)s->F, ms = 0;
    switch (operation) {
    case BLOCK_NORM1:
    case BLOCK_NORM2: parts[0] = cost_norm_forward(N, s->C, !s->llama, false); break;
    case BLOCK_QKV:
        parts[0] = cost_matmul(N, (heads + s->K) * s->D, s->C);
        if (s->llama) parts[count++] = cost_rope(s->B, s->T, heads / ranks, s->D);
        if (s->qk_norm) parts[count++] = cost_qk_norm_forward(N, heads, s->D);
        break;
    case BLOCK_ATTENTION:
        parts[0] = cost_attention_forward(s->B, s->T, s->H / ranks, shape_kv_heads(s) / ranks, s->D);
        break;
    case BLOCK_ATTENTION_OUT:
        parts[0] = cost_matmul(N, s->C, s->H * s->D);
        parts[count++] = cost_norm_forward(N, s->C, !s->llama, true);
        break;
    case BLOCK_FFN_IN: parts[0] = cost_matmul(N, s->llama ? 2 * s->F : s->F, s->C); break;
    case BLOCK_FFN_ACT: parts[0] = s->llama ? cost_swiglu_forward(act) : cost_gelu_forward(act); break;
    default: count = 0;
    }
    for (size_t i = 0; i < count; i++) ms += cost_ms(&parts[i], r);
    return ms;
}

// Milliseconds that running operations again adds to the backward of a block, as block_recompute does it:
// recomputing the matmul before a norm or a nonlinearity recomputes that too.
static inline double recompute_ms(unsigned recomputed, const BlockShape* s, const Rates* r) {
    double ms = 0;
    if (recomputed >> BLOCK_ATTENTION_OUT & 1) recomputed &= ~(1u << BLOCK_NORM2);
    if (recomputed >> BLOCK_FFN_IN & 1) recomputed |= 1u << BLOCK_FFN_ACT;
    if (GELU_NEEDS_MATMUL && !s->llama && recomputed >> BLOCK_FFN_ACT & 1) recomputed |= 1u << BLOCK_FFN_IN;
    for (int o = 0; o < BLOCK_OPERATIONS; o++)
        if (recomputed >> o & 1) ms += operation_ms((BlockOperation)o, s, r);
    return ms;
}

// ------------------------------------------------------------------------------------------------
// 3. Choice

// Sets `recomputed` of blocks 0 to L - 2, so that they save at least `excess` bytes compared with keeping every array:
// the operation with the least time per byte first, in one block after the other. Then undoes what turned out not to be
// needed, the most expensive first. Returns the bytes that are still missing; 0: it fits.
static inline double recompute_choose(BlockActivations* blocks, size_t L, double excess, const BlockShape* s,
                                      const Rates* r) {
    BlockOperation order[BLOCK_OPERATIONS];
    unsigned taken = 0;
    for (size_t l = 0; l < L; l++) blocks[l].recomputed = 0;
    for (int i = 0; i < BLOCK_OPERATIONS; i++) {
        double least = INFINITY, before = recompute_ms(taken, s, r);
        for (int o = 0; o < BLOCK_OPERATIONS; o++) {
            double price = (recompute_ms(taken | 1u << o, s, r) - before) / block_bytes_made((BlockOperation)o, s);
            if (taken >> o & 1 || price >= least) continue;
            least = price;
            order[i] = (BlockOperation)o;
        }
        taken |= 1u << order[i];
        for (size_t l = 0; l + 1 < L && excess > 0; l++) {
            blocks[l].recomputed |= 1u << order[i];
            excess -= block_bytes_made(order[i], s);
        }
    }
    for (int i = BLOCK_OPERATIONS; i-- > 0;) {
        double bytes = block_bytes_made(order[i], s);
        for (size_t l = 0; l + 1 < L; l++) {
            if (!(blocks[l].recomputed >> order[i] & 1) || excess + bytes > 0) continue;
            blocks[l].recomputed &= ~(1u << order[i]);
            excess += bytes;
        }
    }
    return excess > 0 ? excess : 0;
}

#endif  // LLMTRAIN_ACTIVATIONS_H
