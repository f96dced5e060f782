// slots.h: a micro-batch in flight, with the activations that its backward needs.
//
// A slot holds one. Several can be in flight, each in its own slot: a pipeline's stage computes the forward of some
// before it gets to the backward of the first. Other runs have one slot.
//
// A stage may have several pieces of the model. A slot has room for the longest, and its table of blocks points to the
// piece that is in it: slot_take.

#ifndef LLMTRAIN_SLOTS_H
#define LLMTRAIN_SLOTS_H

#include "activations.h"
#include "documents.h"

// What the backward of a block leaves for the gradients of its weights, where these are computed later.
typedef struct {
    floatX* branch[2];        // (N, C) gradients of the feed-forward's branch, and of attention's
    floatX* qkv;              // (N, (H + 2K) D)
    floatX* ffn_in;           // (N, F), Llama (N, 2F)
    float* norms;             // (leaves, BLOCK_NORMS, max(C, D)) gradients of what block_norms lists
} DeferredGradients;

// What is marked * is used only from one operation to the next: all slots share it.
typedef struct {
    size_t B, T;              // of the micro-batch
    size_t rows;              // N of this rank: B*T, or with context or tensor parallelism its part of them
    DocumentSpan* spans;      // (span_count) attention treats each as a batch of its own
    size_t span_count;
    uint64_t first_token;     // index of this rank's first token in the run, of the N
    int32_t* batch;           // (3, B, T) a copy of the micro-batch on the device; NULL: there is one slot
    const int32_t *tokens, *targets, *positions;  // (tp N) on the device: of the rows of a tensor-parallel group
    BlockActivations* blocks; // (L) what the backward needs of each block, see activations.h
    BlockActivations* kept;   // (K) the arrays of the K blocks of a piece; `blocks` itself if the model is one piece
    DeferredGradients* deferred;  // (K); NULL: the backward computes the gradients of weights itself
    floatX* branch;           // * (N, C) what attention or feed-forward is about to add to the residual stream
    floatX* output;           // (N, C) the residual stream after the last block
    floatX* hidden;           // (N, C) after the final norm
    float *mean, *rstd;       // (N) of the final norm
    floatX* logits;           // * (logits_rows, Vp/tp) of a part of the rows; then their gradients
    float* losses;            // (N)
} Activations;

// Of a step: which elements are dropped is a function of the seed and of an element's place in the run.
typedef struct {
    float p;                  // probability of dropping an element; 0 for evaluation
    uint64_t seed;
    uint64_t first_token;     // index of the batch's first token in the whole run
    float adapters;           // probability of dropping an element of the input of LoRA's pairs
} Dropout;

static inline void slots_free(Activations* slots, size_t count) {
    for (size_t i = 0; slots && i < count; i++) {
        if (slots[i].kept != slots[i].blocks) free(slots[i].kept);
        free(slots[i].deferred);
        free(slots[i].blocks);
        free(slots[i].spans);
    }
    free(slots);
}

// The host's tables of `count` slots, for K of L blocks at a time, that do not keep the operations `recomputed`, and
// `spans` documents. defers: gradients of weights are computed later. NULL if there is no memory.
static inline Activations* slots_create(size_t count, size_t L, size_t K, unsigned recomputed, bool defers,
                                        size_t spans) {
    Activations* slots = (Activations*)memory_allocate(count * sizeof(Activations));
    bool ok = slots != NULL;
    for (size_t i = 0; ok && i < count; i++) {
        Activations* a = &slots[i];
        a->blocks = (BlockActivations*)memory_allocate(L * sizeof(BlockActivations));
        a->kept = K == L ? a->blocks : (BlockActivations*)memory_allocate(K * sizeof(BlockActivations));
        if (defers) a->deferred = (DeferredGradients*)memory_allocate(K * sizeof(DeferredGradients));
        a->spans = (DocumentSpan*)memory_allocate(spans * sizeof(DocumentSpan));
        ok = a->blocks && a->kept && (a->deferred || !defers) && a->spans;
        if (ok) blocks_recompute(a->kept, K, recomputed);
    }
    if (ok) return slots;
    slots_free(slots, count);
    return NULL;
}

// Puts the piece with the blocks [first, end) into a slot of K blocks, in place of another.
static inline void slot_take(Activations* a, size_t K, size_t first, size_t end) {
    if (a->kept != a->blocks)
        memcpy(a->blocks + first, a->kept + K - (end - first), (end - first) * sizeof(BlockActivations));
}

// What the slot's backward of block l defers, of a piece that ends at block `end`; NULL: nothing.
static inline DeferredGradients* slot_deferred(const Activations* a, size_t K, size_t l, size_t end) {
    return a->deferred ? &a->deferred[K - (end - l)] : NULL;
}

enum { BLOCK_NORMS = 6 };

static inline void deferred_layout(DeferredGradients* d, const BlockShape* s, Arena* arena) {
    const char* name = "gradients that wait for those of weights";
    size_t row = shape_rows(s) * sizeof(floatX);
    for (int i = 0; i < 2; i++) d->branch[i] = (floatX*)arena_take(arena, name, row * s->C);
    d->qkv = (floatX*)arena_take(arena, name, row * (s->H + 2 * s->K) * s->D);
    d->ffn_in = (floatX*)arena_take(arena, name, row * (s->llama ? 2 * s->F : s->F));
    size_t norms = max_size(s->leaves, 1) * BLOCK_NORMS;
    d->norms = (float*)arena_take(arena, name, norms * max_size(s->C, s->D) * sizeof(float));
}

// Takes the slots' arrays from the arena, for K blocks; those of the first slot's blocks are there already, since they
// may be offloaded. logits: how many exist at a time; 0: the head is on another rank.
static inline void slots_layout(Activations* slots, size_t count, size_t K, const BlockShape* shape, size_t logits,
                                Arena* arena) {
    size_t N = shape_rows(shape), C = shape->C;
    const char* name = "activations outside the blocks";
    floatX* branch = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
    for (Activations* a = slots; a < slots + count; a++) {
        for (size_t l = a == slots ? 0 : K; l-- > 0;)
            block_layout(&a->kept[l], &a->kept[K - 1], slots->kept[l].recomputed, shape, arena);
        for (size_t l = 0; a->deferred && l < K; l++) deferred_layout(&a->deferred[l], shape, arena);
        a->branch = branch;
        if (count > 1) a->batch = (int32_t*)arena_take(arena, "batches", 3 * shape->B * shape->T * sizeof(int32_t));
        if (logits == 0) continue;
        a->output = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
        a->hidden = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
        a->mean = (float*)arena_take(arena, name, N * sizeof(float));
        a->rstd = (float*)arena_take(arena, name, N * sizeof(float));
        a->losses = (float*)arena_take(arena, name, N * sizeof(float));
    }
    floatX* shared = (floatX*)arena_take(arena, "logits, a part at a time", logits * sizeof(floatX));
    for (Activations* a = slots; a < slots + count; a++) a->logits = shared;
}

#endif  // LLMTRAIN_SLOTS_H
