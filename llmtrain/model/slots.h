// slots.h: a micro-batch in flight, with the activations that its backward needs.
//
// A slot holds one. Several can be in flight, each in its own slot: a pipeline's stage computes the forward of some
// before it gets to the backward of the first. Other runs have one slot.

#ifndef LLMTRAIN_SLOTS_H
#define LLMTRAIN_SLOTS_H

#include "activations.h"
#include "documents.h"

// What is marked * is used only from one operation to the next: all slots share it.
typedef struct {
    size_t B, T;              // of the micro-batch
    DocumentSpan* spans;      // (span_count) attention treats each as a batch of its own
    size_t span_count;
    int32_t* batch;           // (3, B, T) a copy of the micro-batch on the device; NULL: there is one slot
    const int32_t *tokens, *targets, *positions;  // (B, T) on the device
    BlockActivations* blocks; // (L) what the backward needs of each block, see activations.h
    floatX* branch;           // * (N, C) what attention or feed-forward is about to add to the residual stream
    floatX* output;           // (N, C) the residual stream after the last block
    floatX* hidden;           // (N, C) after the final norm
    float *mean, *rstd;       // (N) of the final norm
    floatX* logits;           // * (logits_rows, Vp) of a part of the rows; then their gradients
    float* losses;            // (N)
} Activations;

static inline void slots_free(Activations* slots, size_t count) {
    for (size_t i = 0; slots && i < count; i++) {
        free(slots[i].blocks);
        free(slots[i].spans);
    }
    free(slots);
}

// The host's tables of `count` slots, for L blocks that do not keep the operations `recomputed` and `spans` documents;
// NULL if there is no memory.
static inline Activations* slots_create(size_t count, size_t L, unsigned recomputed, size_t spans) {
    Activations* slots = (Activations*)memory_allocate(count * sizeof(Activations));
    bool ok = slots != NULL;
    for (size_t i = 0; ok && i < count; i++) {
        slots[i].blocks = (BlockActivations*)memory_allocate(L * sizeof(BlockActivations));
        slots[i].spans = (DocumentSpan*)memory_allocate(spans * sizeof(DocumentSpan));
        ok = slots[i].blocks && slots[i].spans;
        if (ok) blocks_recompute(slots[i].blocks, L, recomputed);
    }
    if (ok) return slots;
    slots_free(slots, count);
    return NULL;
}

// Takes the slots' arrays from the arena; those of the first slot's blocks are there already, since they may be
// offloaded. logits: how many exist at a time.
static inline void slots_layout(Activations* slots, size_t count, size_t L, const BlockShape* shape, size_t logits,
                                Arena* arena) {
    size_t N = shape->B * shape->T, C = shape->C;
    const char* name = "activations outside the blocks";
    floatX* branch = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
    for (Activations* a = slots; a < slots + count; a++) {
        for (size_t l = a == slots ? 0 : L; l-- > 0;)
            block_layout(&a->blocks[l], &a->blocks[L - 1], slots->blocks[l].recomputed, shape, arena);
        a->branch = branch;
        a->output = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
        a->hidden = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
        a->mean = (float*)arena_take(arena, name, N * sizeof(float));
        a->rstd = (float*)arena_take(arena, name, N * sizeof(float));
        a->losses = (float*)arena_take(arena, name, N * sizeof(float));
        if (count > 1) a->batch = (int32_t*)arena_take(arena, "batches", 3 * N * sizeof(int32_t));
    }
    floatX* shared = (floatX*)arena_take(arena, "logits, a part at a time", logits * sizeof(floatX));
    for (Activations* a = slots; a < slots + count; a++) a->logits = shared;
}

#endif  // LLMTRAIN_SLOTS_H
