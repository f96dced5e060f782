// offload_activations.h: the blocks' activations wait for the backward in a store of pieces (offload.h), not in memory.
//
// What a block keeps for its backward (activations.h) is a piece. After a block's forward the piece is written while
// the next block computes; in the backward the previous block's piece is read while a block computes. There are two
// slots, and what the last block keeps is in memory: three blocks' activations instead of all. The two blocks before
// the last stay in the slots from the forward to the backward, and are not offloaded. Neither is what the backward
// recomputes. No bit changes, since a piece is read back as it was written.
//
//   ok = offload_blocks_plan(&o, L, OFFLOAD_ACTIVATIONS, &error);
//   offload_blocks_layout(&o, blocks, L, first, &shape, arena);          over no memory, then over the device's
//   ok = offload_blocks_open(&o, dir, rank, local_rank, stream, &error);
//   o.backward = true;                                                   if a backward follows
//   for (l from 0) { offload_block_forward(&o, l); ... }
//   for (l from L - 1 down) { offload_block_backward(&o, l); ... }
//
// A forward without a backward writes nothing. If the store fails, the passes continue on memory with arbitrary
// contents, and offload_check reports the failure before their results are used (model_finish_step).

#ifndef LLMTRAIN_OFFLOAD_ACTIVATIONS_H
#define LLMTRAIN_OFFLOAD_ACTIVATIONS_H

#include "activations.h"
#include "offload.h"

// ------------------------------------------------------------------------------------------------
// 1. Blocks

enum { OFFLOAD_BLOCK_SLOTS = 2 };

typedef struct {
    Offload store;             // (moved) pieces
    BlockActivations* blocks;  // (L) the model's; the arrays of blocks 0 to L - 2 are in their pieces
    BlockShape shape;
    size_t L;
    size_t moved;              // blocks 0 to moved - 1 leave memory; 0: nothing is offloaded
    size_t first;              // the blocks before it have no backward, so nothing of them is kept
    size_t held;               // the block whose backward is running; OFFLOAD_NONE: none
    bool backward;             // a backward follows the forward in progress
} OffloadBlocks;

// offload: the bits of --offload.
static inline bool offload_blocks_plan(OffloadBlocks* o, size_t L, int offload, Error* error) {
    bool asked = (offload & OFFLOAD_ACTIVATIONS) != 0;
    memset(o, 0, sizeof *o);
    o->moved = asked && L > OFFLOAD_BLOCK_SLOTS + 1 ? L - 1 - OFFLOAD_BLOCK_SLOTS : 0;
    return offload_plan(&o->store, "activations", OFFLOAD_BLOCK_SLOTS, o->moved, error);
}

// Takes the arrays of all blocks from the plan or, if blocks are offloaded, those of the last one and the slots.
// first: the block at which the backward ends.
static inline void offload_blocks_layout(OffloadBlocks* o, BlockActivations* blocks, size_t L, size_t first,
                                         const BlockShape* shape, Arena* arena) {
    BlockActivations any, *last = &blocks[L - 1];
    Arena piece;
    o->blocks = blocks;
    o->shape = *shape;
    o->L = L;
    o->first = first;
    o->held = OFFLOAD_NONE;
    for (size_t l = L; l-- > (o->moved ? L - 1 : 0);)
        block_layout(&blocks[l], last, blocks[l].recomputed, shape, arena);
    if (o->moved == 0) return;
    memset(&piece, 0, sizeof piece);
    block_layout(&any, last, blocks[0].recomputed, shape, &piece);
    o->store.largest = 0;
    for (size_t l = 0; l < o->moved; l++) offload_size(&o->store, l, l < o->first ? 0 : piece.total);
    o->store.largest = max_size(o->store.largest, round_up(piece.total, DISK_ALIGN));  // all take a slot in the forward
    o->store.slots = (char*)arena_take(arena, "buffers of offloaded activations", offload_memory(&o->store));
}

// Bytes that a micro-batch writes, and reads again.
static inline size_t offload_blocks_bytes(const OffloadBlocks* o) {
    return o->moved > o->first ? (o->moved - o->first) * offload_bytes(&o->store, o->first) : 0;
}

static inline bool offload_blocks_open(OffloadBlocks* o, const char* dir, size_t rank, size_t local_rank, Stream stream,
                                       Error* error) {
    return o->moved == 0 || offload_open(&o->store, dir, rank, local_rank, stream, error);
}

static inline void offload_blocks_close(OffloadBlocks* o) { offload_close(&o->store); }

// ------------------------------------------------------------------------------------------------
// 2. Passes

// Points the arrays of a block to its piece.
static inline void offload_block_take(OffloadBlocks* o, size_t l, bool fresh) {
    Error ignored;  // offload_check reports it
    Arena piece;
    void* memory = offload_take(&o->store, l, fresh, &ignored);
    memset(&piece, 0, sizeof piece);
    piece.base = (unsigned char*)(memory ? memory : offload_aligned(o->store.slots));
    block_layout(&o->blocks[l], &o->blocks[o->L - 1], o->blocks[l].recomputed, &o->shape, &piece);
}

// Called before the forward of block l, or anything else, writes to its arrays. It gives block l - 1 back: block l and
// the writing thread still read its memory, which is not reused before the call for block l + 1.
static inline void offload_block_forward(OffloadBlocks* o, size_t l) {
    bool kept = o->backward && l > o->first;  // block l - 1, for the backward
    if (o->moved == 0) return;
    if (o->held != OFFLOAD_NONE) offload_give(&o->store, o->held, false);
    o->held = OFFLOAD_NONE;
    for (size_t p = o->moved; l == 0 && p + 1 < o->L; p++) offload_give(&o->store, p, false);  // no backward came
    if (l + 1 < o->L) offload_block_take(o, l, true);
    if (l > 0 && (!kept || l <= o->moved)) offload_give(&o->store, l - 1, kept);
}

// Called before the backward of each block l, from the last one down.
static inline void offload_block_backward(OffloadBlocks* o, size_t l) {
    o->backward = false;
    if (o->moved == 0 || l + 1 == o->L) return;
    if (o->held != OFFLOAD_NONE) offload_give(&o->store, o->held, false);
    o->held = l;
    offload_block_take(o, l, false);
    if (l > o->first) offload_ahead(&o->store, l - 1, 1);
}

#endif  // LLMTRAIN_OFFLOAD_ACTIVATIONS_H
