// offload_states.h: master weights and optimizer states in a store of pieces (offload.h), not in memory.
//
// Tensors are cut into parts, only where the optimizer lets ZeRO cut them too, which changes no bit. A piece holds what
// belongs to some parts, up to 32 MiB, or more if a tensor must stay whole. An update takes the parts in order: while a
// piece is updated, the next are read and the previous ones written. In zero.h flat_create makes the table of parts,
// and flat_update passes over it.
//
// Arrays are numbered: OFFLOAD_MASTERS, then the optimizer's states in the order of its row in OPTIMIZERS.

#ifndef LLMTRAIN_OFFLOAD_STATES_H
#define LLMTRAIN_OFFLOAD_STATES_H

#include "offload.h"
#include "tensors.h"

// ------------------------------------------------------------------------------------------------
// 1. Parts

enum { OFFLOAD_MASTERS, OFFLOAD_ARRAYS = 1 + OPTIMIZER_STATES };

// Approximate bytes of a piece: 1/64 of the whole, so that the slots are small, within bounds that keep a disk fast.
#define OFFLOAD_PIECE_LEAST LLMTRAIN_PIECE((size_t)16 << 10, (size_t)1 << 10)
#define OFFLOAD_PIECE_MOST ((size_t)32 << 20)
#define OFFLOAD_PIECE_SHARE 64

typedef struct {
    size_t tensor;
    Slice elements;         // of the tensor, counted from its first
    size_t piece;
    size_t at[OFFLOAD_ARRAYS];  // where each array's elements begin in the piece, in bytes
} OffloadPart;

typedef struct {
    const Parameters* parameters;
    OptimizerKind optimizer;
    size_t rank;                // of a low-rank optimizer
    bool masters;               // there are float master weights
    OffloadPart* parts;         // (count) in the order of the tensors
    size_t count;
    size_t* first;              // (tensors + 1) the first part of each tensor
    Offload store;
    size_t held;                // the piece that is taken; OFFLOAD_NONE: none
    char* memory;               // that of the piece
    bool changed;
    bool touched;               // not all is zero
} OffloadStates;

static inline size_t offload_arrays(const OffloadStates* s) { return 1 + optimizer_states(s->optimizer); }

static inline size_t offload_element_bytes(const OffloadStates* s, size_t array) {
    return array == OFFLOAD_MASTERS ? sizeof(float) : dtype_bytes(OPTIMIZERS[s->optimizer].states[array - 1].dtype);
}

// The elements of an array that belong to these elements of a tensor.
static inline Slice offload_elements(const OffloadStates* s, size_t array, size_t tensor, Slice elements) {
    const Tensor* t = &s->parameters->tensors[tensor];
    Slice part = {0, 0};
    if (!t->trains) return part;
    if (array == OFFLOAD_MASTERS) return s->masters ? elements : part;
    part.end = optimizer_state_part(&part.first, OPTIMIZERS[s->optimizer].states[array - 1].shape, &t->shape, s->rank,
                                    elements.first, elements.end);
    part.end += part.first;
    return part;
}

// Bytes of all arrays for these elements of a tensor; adds to at[a], unless at is NULL, where array a begins in them.
static inline size_t offload_part_bytes(const OffloadStates* s, size_t* at, size_t tensor, Slice elements) {
    size_t bytes = 0;
    for (size_t a = 0; a < offload_arrays(s); a++) {
        if (at) at[a] += bytes;
        bytes += round_up(slice_length(offload_elements(s, a, tensor, elements)) * offload_element_bytes(s, a), 256);
    }
    return bytes;
}

static inline void offload_states_free(OffloadStates* s) {
    offload_close(&s->store);
    free(s->parts);
    free(s->first);
    memset(s, 0, sizeof *s);
}

// Plans the parts of what a rank holds of each tensor, held (tensors), and the sizes of the pieces.
static inline bool offload_states_plan(OffloadStates* s, const Parameters* p, const Slice* held,
                                       OptimizerKind optimizer, size_t rank, bool masters, Error* error) {
    size_t total = 0, elements = 0, pieces = 0, bytes = 0;
    OffloadStates states = {.parameters = p, .optimizer = optimizer, .rank = rank, .masters = masters,
                            .held = OFFLOAD_NONE};
    *s = states;
    for (size_t i = 0; i < p->count; i++) {
        total += offload_part_bytes(s, NULL, i, held[i]);
        elements += slice_length(held[i]);
    }
    size_t piece = min_size(max_size(total / OFFLOAD_PIECE_SHARE, OFFLOAD_PIECE_LEAST), OFFLOAD_PIECE_MOST);
    size_t each = max_size(total / max_size(elements, 1), 1);  // bytes of an element
    size_t most = max_size(piece / each / OPTIMIZER_BLOCK, 1) * OPTIMIZER_BLOCK;
    for (int pass = 0; pass < 2; pass++) {  // the first pass only counts
        size_t count = 0;
        for (size_t i = 0; i < p->count; i++) {
            if (pass) s->first[i] = count;
            bool whole = optimizer_whole(optimizer, &p->tensors[i].shape);
            Slice part;
            for (part.first = held[i].first; part.first < held[i].end; part.first = part.end, count++) {
                part.end = whole ? held[i].end : min_size(held[i].end, (part.first / most + 1) * most);
                if (pass == 0) continue;
                OffloadPart* k = &s->parts[count];
                size_t size = offload_part_bytes(s, NULL, i, part);
                if (bytes > 0 && bytes + size > piece) offload_size(&s->store, pieces++, bytes), bytes = 0;
                k->tensor = i;
                k->elements = part;
                k->piece = pieces;
                for (size_t a = 0; a < OFFLOAD_ARRAYS; a++) k->at[a] = bytes;
                bytes += offload_part_bytes(s, k->at, i, part);
            }
        }
        if (pass) break;
        s->count = count;
        s->parts = (OffloadPart*)memory_allocate(max_size(count, 1) * sizeof(OffloadPart));
        s->first = (size_t*)memory_allocate((p->count + 1) * sizeof(size_t));
        if (!offload_plan(&s->store, "optimizer state", OFFLOAD_SLOTS, count + 1, error)) return false;
        if (s->parts == NULL || s->first == NULL)
            return fail_with(error, "out of memory for a table of %zu parts", count);
    }
    s->first[p->count] = s->count;
    offload_size(&s->store, pieces, bytes);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Access
//
// One piece is held at a time, across parts, so that many small changes to it cost one write.

// Gives back the piece that is held.
static inline void offload_release(OffloadStates* s) {
    if (s->held != OFFLOAD_NONE) offload_give(&s->store, s->held, s->changed);
    s->held = OFFLOAD_NONE;
}

// The memory of an array's elements in a part, on the device, until another part is held; NULL if the store has failed.
static inline char* offload_hold(OffloadStates* s, const OffloadPart* part, size_t array, bool changes, Error* error) {
    if (s->held != part->piece) {
        offload_release(s);
        s->memory = (char*)offload_take(&s->store, part->piece, false, error);
        if (s->memory == NULL) return NULL;
        s->held = part->piece;
        s->changed = false;
        offload_ahead(&s->store, part->piece + 1, OFFLOAD_AHEAD);
    }
    s->changed |= changes;
    s->touched |= changes;
    return s->memory + part->at[array];
}

// Points the slice of a part, which is about to be updated, to its master weights and states. False if the store has
// failed: offload_check says why.
static inline bool offload_update(OffloadStates* s, const OffloadPart* part, OptimizerSlice* slice) {
    Error error;
    for (size_t a = 0; a < offload_arrays(s); a++) {
        if (slice_length(offload_elements(s, a, part->tensor, part->elements)) == 0) continue;
        char* memory = offload_hold(s, part, a, true, &error);
        if (memory == NULL) return false;
        if (a == OFFLOAD_MASTERS) slice->master_weights = (float*)(void*)memory;
        else slice->states[a - 1] = memory;
    }
    return true;
}

// Those of elements [first, end) of a tensor's array that are in a part; empty: first == end.
static inline Slice offload_common(const OffloadStates* s, size_t array, const OffloadPart* part, size_t first,
                                   size_t end) {
    Slice here = offload_elements(s, array, part->tensor, part->elements);
    Slice common = {max_size(first, here.first), min_size(end, here.end)}, none = {first, first};
    return common.first < common.end ? common : none;
}

// Where an element of an array begins in a part's piece, in bytes.
static inline size_t offload_at(const OffloadStates* s, size_t array, const OffloadPart* part, size_t element) {
    Slice here = offload_elements(s, array, part->tensor, part->elements);
    return part->at[array] + (element - here.first) * offload_element_bytes(s, array);
}

// Copies elements [first, end) of a tensor's array from host memory, as far as this rank holds them.
static inline bool offload_put(OffloadStates* s, const void* from, size_t array, size_t tensor, size_t first,
                               size_t end, Stream stream, Error* error) {
    size_t size = offload_element_bytes(s, array);
    for (size_t i = s->first[tensor]; i < s->first[tensor + 1]; i++) {
        const OffloadPart* part = &s->parts[i];
        Slice common = offload_common(s, array, part, first, end);
        if (slice_length(common) == 0) continue;
        char* memory = offload_hold(s, part, array, true, error);
        if (memory == NULL) return false;
        memory += offload_at(s, array, part, common.first) - part->at[array];
        device_upload(memory, (const char*)from + (common.first - first) * size, slice_length(common) * size, stream);
    }
    return true;
}

// Copies them to host memory.
static inline bool offload_get(OffloadStates* s, void* to, size_t array, size_t tensor, size_t first, size_t end,
                               Error* error) {
    size_t size = offload_element_bytes(s, array);
    offload_release(s);
    if (!offload_flush(&s->store, error)) return false;
    for (size_t i = s->first[tensor]; i < s->first[tensor + 1]; i++) {
        const OffloadPart* part = &s->parts[i];
        Slice common = offload_common(s, array, part, first, end);
        if (slice_length(common) == 0) continue;
        if (!offload_read(&s->store, (char*)to + (common.first - first) * size, part->piece,
                          offload_at(s, array, part, common.first), slice_length(common) * size, error)) return false;
    }
    return true;
}

// Sets the states to zero, not the master weights.
static inline bool offload_reset(OffloadStates* s, Stream stream, Error* error) {
    for (const OffloadPart* part = s->parts; part < s->parts + s->count && s->touched; part++) {
        for (size_t a = OFFLOAD_MASTERS + 1; a < offload_arrays(s); a++) {
            size_t n = slice_length(offload_elements(s, a, part->tensor, part->elements));
            char* memory = n ? offload_hold(s, part, a, true, error) : NULL;
            if (n && memory == NULL) return false;
            if (n) fill_zero(memory, n * offload_element_bytes(s, a), stream);
        }
    }
    offload_release(s);
    return true;
}

#endif  // LLMTRAIN_OFFLOAD_STATES_H
