// context.h: context parallelism: ranks that share the sequences of a micro-batch.
//
// "DeepSpeed Ulysses" (arXiv:2309.14509). A micro-batch of N rows is cut over cp ranks: rank r has rows r N/cp to
// (r+1) N/cp. All operations work on rows, each by itself, except attention, which needs all rows of a sequence, but
// only one head at a time. So the ranks exchange: before attention each sends the others' heads of its rows, after it
// their rows of its heads. Attention itself is that of one rank, for documents too.
//
//     rank 0 of 2      rows 0 .. N/2, heads 0 .. H      ->      rows 0 .. N, heads 0 .. H/2      -> and back
//     rank 1           rows N/2 .. N, heads 0 .. H      ->      rows 0 .. N, heads H/2 .. H
//
// If there are fewer key and value heads than ranks, each is copied for the ranks that need it, and the gradients of
// its copies are added up. One rank does the same with RankOptions.kv_copies, and so gets the same bits.
//
// Backward the gradients go the same ways. In each of the four exchanges of a block a rank sends (cp-1)/cp of what it
// has: 2 (cp-1)/cp N/cp (2H + 2K) D elements in all, and half as much again if the backward recomputes attention.
//
// With REDUCE_EXACT gradients of weights are added up over the ranks' rows in fixed point, as over micro-batches. One
// rank adds them in the same parts with RankOptions.row_leaves, and so gets the same bits.

#ifndef LLMTRAIN_CONTEXT_H
#define LLMTRAIN_CONTEXT_H

#include "zero.h"

typedef struct {
    size_t cp, rank;       // ranks that share a micro-batch, and which of them this is
    FlatVector* flat;      // whose GROUP_CONTEXT they are
    size_t copies;         // of each key and value head
    floatX* buffers[2];    // (N/cp, (H + 2K copies) D) each; only with several ranks or copies
} ContextRanks;

static inline ContextRanks context_plan(const RankOptions* o, FlatVector* flat) {
    ContextRanks c = {ranks_cp(o), ranks_cp_rank(o, o->rank), flat, max_size(o->kv_copies, 1), {NULL, NULL}};
    return c;
}

// Whether attention has other rows or heads than the matmuls before and after it.
static inline bool context_moves(const ContextRanks* c) { return c->cp > 1 || c->copies > 1; }

static inline void context_layout(ContextRanks* c, size_t elements, Arena* arena) {
    for (int i = 0; i < 2 && context_moves(c); i++)
        c->buffers[i] = (floatX*)arena_take(arena, "exchanged rows and heads", elements * sizeof(floatX));
}

// This rank's rows of a micro-batch of N.
static inline Slice context_rows(const ContextRanks* c, size_t N) { return comm_even_slice(c->rank, c->cp, N); }

// Where this rank's queries, keys and values are before the exchange; `array` itself if there is none.
static inline floatX* context_own(const ContextRanks* c, floatX* array) {
    return context_moves(c) ? c->buffers[0] : array;
}

static inline void context_exchange(const ContextRanks* c, floatX* out, const floatX* in, size_t n, Stream stream) {
    size_t slot = flat_start_all_to_all(c->flat, GROUP_CONTEXT, out, in, n, FLOATX_DTYPE, stream);
    flat_wait(c->flat, GROUP_CONTEXT, slot, stream);
}

// After flat_connect: an exchange without meaning. NCCL connects ranks at their first collective, for which no other
// may be waiting on this device.
static inline void context_connect(const ContextRanks* c, Stream stream) {
    if (c->cp > 1) context_exchange(c, c->buffers[0], c->buffers[1], c->cp, stream);
}

// out (cp N, (H + 2K copies)/cp D) = in (N, (H + 2K) D) of all ranks: from this rank's N rows to its heads. `in` may be
// the first buffer, and so may `out` if K is 0.
static inline void context_gather_rows(const ContextRanks* c, floatX* out, const floatX* in, size_t N, size_t H,
                                       size_t K, size_t D, Stream stream) {
    size_t copied = K * c->copies;
    if (copied > K) {
        heads_repeat(out, in, c->copies, N, H, K, D, stream);
        in = out;
    }
    if (c->cp == 1) return;
    heads_split(c->buffers[1], in, c->cp, N, H, copied, D, stream);
    context_exchange(c, out, c->buffers[1], N * (H + 2 * copied) * D, stream);
}

// The way back: out (N, (H + 2K) D) = in (cp N, (H + 2K copies)/cp D) of all ranks. `in` may be a buffer.
static inline void context_gather_heads(const ContextRanks* c, floatX* out, const floatX* in, size_t N, size_t H,
                                        size_t K, size_t D, Stream stream) {
    size_t copied = K * c->copies, other = in == c->buffers[1] ? 0 : 1;
    if (c->cp > 1) {
        floatX *parts = c->buffers[other], *joined = copied > K ? c->buffers[1 - other] : out;
        context_exchange(c, parts, in, N * (H + 2 * copied) * D, stream);
        heads_join(joined, parts, c->cp, N, H, copied, D, stream);
        in = joined;
    }
    if (copied > K) heads_sum(out, in, c->copies, N, H, K, D, stream);
}

#endif  // LLMTRAIN_CONTEXT_H
