// tensors.h: the table of a model's tensors, and the block of memory that holds everything.
//
//   1. tensors   a row per weight: name, shape, offset in the flat vector, initialization, weight decay; which train:
//                parameters_freeze
//   2. memory    one block, laid out before the first step and shown as a plan
//
// A model fills the table (llmtrain.h); everything that goes through parameters uses the table: initial weights,
// sharding, the optimizer, checkpoints, counting.
//
//   size_t offset = parameters_add(&table, "head_weight", V, Vp, C, bucket, INIT_NORMAL, 0.02f);

#ifndef LLMTRAIN_TENSORS_H
#define LLMTRAIN_TENSORS_H

#include "../base/system.h"
#include "../../kernels_cpu.h"
#ifdef LLMTRAIN_CUDA
#include "../../kernels.cuh"
#include "../base/device.cuh"
#include "../base/matmul_choice.cuh"
#else
#include "../base/device_cpu.h"
#endif

#include <assert.h>
#include <fnmatch.h>

// ------------------------------------------------------------------------------------------------
// 1. Tensors
//
// All parameters are one flat vector, cut into buckets: 0 the embeddings, 1 to L the blocks, L + 1 the final norm and
// the head. The table has a row per tensor, in the order of the vector. A tensor starts at a multiple of 64 elements.
// Gradients, master weights and optimizer state of a number per element have the same layout (for other state see
// StateShape). What lies between tensors, and the rows of the padded vocabulary, is 0 and stays 0.

typedef enum { INIT_NORMAL, INIT_ZERO, INIT_ONE } Init;

typedef struct {
    char name[48];
    size_t rows, cols;   // the true shape; cols is 0 for a vector of `rows` elements
    size_t offset, size; // position in the flat vector and elements there, padded rows included
    size_t bucket;
    size_t place;        // its offset if all tensors train: numbers its initial random values
    Init init;
    float init_std;      // of INIT_NORMAL
    bool decays;         // weight decay applies: matrices only
    bool overwritten;    // each backward writes its whole gradient in one operation, which need not add
    bool trains;         // the optimizer updates it; otherwise it has no gradient and no state
    Dtype dtype;         // of its parameters
    TensorShape shape;   // as the optimizer sees it
} Tensor;

#define NO_TENSOR SIZE_MAX

typedef struct {
    Tensor* tensors;     // (capacity)
    size_t count, capacity;
    size_t flat_size;    // elements of the flat vector, padding included
    size_t true_size;    // the model's parameters as papers count them
    bool arranged;       // parameters_freeze was called: adding the same tensors again returns their new offsets
    bool tied;           // the head is the token embedding: bucket 0 accumulates gradients from the head's backward on
} Parameters;

static inline size_t tensor_elements(const Tensor* t) { return shape_elements(&t->shape); }

// A table with room for `capacity` tensors.
static inline bool parameters_allocate(Parameters* p, size_t capacity, Error* error) {
    memset(p, 0, sizeof *p);
    p->capacity = capacity;
    p->tensors = (Tensor*)memory_allocate(capacity * sizeof(Tensor));
    return p->tensors != NULL || fail_with(error, "out of memory for the table of parameters");
}

// Appends a tensor of rows x cols (cols 0: a vector), stored with padded_rows; returns its offset in the flat vector.
static inline size_t parameters_add(Parameters* p, const char* name, size_t rows, size_t padded_rows, size_t cols,
                                    size_t bucket, Init init, float init_std) {
    assert(p->count < p->capacity);
    Tensor* t = &p->tensors[p->count++];
    if (p->arranged) return t->offset;
    snprintf(t->name, sizeof t->name, "%s", name);
    t->rows = rows;
    t->cols = cols;
    t->offset = t->place = p->flat_size;
    t->size = padded_rows * (cols ? cols : 1);
    t->bucket = bucket;
    t->init = init;
    t->init_std = init_std;
    t->decays = cols > 0;
    t->trains = true;
    t->dtype = FLOATX_DTYPE;
    t->shape.rows = rows;
    t->shape.cols = cols;
    p->flat_size = round_up(p->flat_size + t->size, 64);
    p->true_size += tensor_elements(t);
    return t->offset;
}

// A tensor of block l, whose bucket is l + 1.
static inline size_t parameters_add_block(Parameters* p, size_t l, const char* what, size_t rows, size_t cols,
                                          Init init, float init_std) {
    char name[48];
    snprintf(name, sizeof name, "block.%zu.%s", l, what);
    size_t offset = parameters_add(p, name, rows, rows, cols, l + 1, init, init_std);
    p->tensors[p->count - 1].shape.hidden = p->tensors[p->count - 1].overwritten = cols > 0;
    return offset;
}

// Declares that the tensor added last is a stack of two or three matrices with these numbers of rows.
static inline void parameters_stack(Parameters* p, size_t first, size_t second, size_t third) {
    size_t* rows = p->tensors[p->count - 1].shape.stacked;
    rows[0] = first, rows[1] = second, rows[2] = third;
}

// Adds a vector of a block, initialized to zeros or ones; NO_TENSOR if the model does not have it.
static inline size_t parameters_add_vector(Parameters* p, bool has, size_t l, const char* what, size_t n, Init init) {
    return has ? parameters_add_block(p, l, what, n, 0, init, 0) : NO_TENSOR;
}

// The same for a matmul's bias.
static inline size_t parameters_add_bias(Parameters* p, bool has, size_t l, const char* what, size_t n) {
    size_t offset = parameters_add_vector(p, has, l, what, n, INIT_ZERO);
    if (has) p->tensors[p->count - 1].overwritten = true;
    return offset;
}

// Lets only those tensors train whose names match one of the shell patterns in a list, separated by commas, and moves
// them to the front of their buckets, so that gradients, optimizer state and collectives still work on slices. The
// table must then be filled again, by the same calls, which return the new offsets.
static inline bool parameters_freeze(Parameters* p, const char* list, Error* error) {
    if (list[0] == 0) return fail_with(error, "--train is empty; name the tensors that train, such as 'block.*'");
    for (size_t i = 0; i < p->count; i++) p->tensors[i].trains = false;
    for (const char* item = list; *item; item += *item == ',') {
        char pattern[256];
        size_t length = strcspn(item, ","), matched = 0;
        snprintf(pattern, sizeof pattern, "%.*s", (int)length, item);
        item += length;
        if (length == 0)
            return fail_with(error, "--train has an empty name; name the tensors that train, such as 'block.*'");
        for (size_t i = 0; i < p->count; i++) {
            bool matches = fnmatch(pattern, p->tensors[i].name, 0) == 0;
            p->tensors[i].trains |= matches;
            matched += matches;
        }
        if (matched == 0)
            return fail_with(error,
                             "--train %.200s matches no tensor of the model; their names are %s, %s and so on (the "
                             "list flat_vector of a checkpoint's manifest.json)",
                             pattern, p->tensors[0].name, p->tensors[p->count / 2].name);
    }
    p->flat_size = 0;
    for (size_t b = 0, i = 0, end = 0; i < p->count; i = end, b++) {
        while (end < p->count && p->tensors[end].bucket == b) end++;
        for (int frozen = 0; frozen < 2; frozen++)
            for (size_t j = i; j < end; j++) {
                Tensor* t = &p->tensors[j];
                if (t->trains == (frozen == 1)) continue;
                t->offset = p->flat_size;
                p->flat_size = round_up(p->flat_size + t->size, 64);
            }
    }
    p->count = 0;
    p->arranged = true;
    return true;
}

// How many parameters train, of the model's true_size.
static inline size_t parameters_trained(const Parameters* p) {
    size_t trained = 0;
    for (size_t i = 0; i < p->count; i++) trained += p->tensors[i].trains ? tensor_elements(&p->tensors[i]) : 0;
    return trained;
}

static inline void parameters_free(Parameters* p) {
    free(p->tensors);
    memset(p, 0, sizeof *p);
}

// ------------------------------------------------------------------------------------------------
// 2. Memory
//
// One block on the device (a GPU, or the machine itself) holds everything that a model needs. The same function lays it
// out twice: first over no memory, which gives the plan (a line per purpose) and the size of the block, then over the
// block, which gives the pointers. The block is touched before training, so a run that has started does not run out of
// memory later.

#define ARENA_MAX ((size_t)1 << 62)  // sums of a plan saturate here, so as not to overflow; no machine has as much

typedef struct {
    const char* name;
    size_t bytes;
} ArenaLine;

enum { ARENA_LINES = 48 };

typedef struct {
    ArenaLine lines[ARENA_LINES];
    size_t count, total;
    unsigned char* base;  // NULL while only planning
} Arena;

// Bytes of the block that a piece takes: each begins at a multiple of 256, as cuBLASLt requires of its workspace.
static inline size_t arena_piece_bytes(size_t bytes) { return round_up(bytes, 256); }

// Takes the next `bytes` bytes of the block; pieces of one name share a line of the plan.
static inline void* arena_take(Arena* plan, const char* name, size_t bytes) {
    size_t i = 0, offset = plan->total, taken = arena_piece_bytes(bytes);
    while (i < plan->count && strcmp(plan->lines[i].name, name) != 0) i++;
    assert(i < ARENA_LINES);
    if (i == plan->count) plan->lines[plan->count++].name = name;
    plan->lines[i].bytes = taken < ARENA_MAX - plan->lines[i].bytes ? plan->lines[i].bytes + taken : ARENA_MAX;
    plan->total = taken < ARENA_MAX - plan->total ? plan->total + taken : ARENA_MAX;
    return plan->base ? plan->base + offset : NULL;
}

// Bytes of the block: at least one, in whole large pages.
static inline size_t arena_bytes(const Arena* plan) { return round_up(max_size(plan->total, 1), 2 << 20); }

// Allocates the block of a finished plan on the device of one of `world` ranks, zeroed, and restarts the plan over it.
// device_free frees it.
static inline bool arena_allocate(Arena* plan, size_t world, Stream stream, Error* error) {
    size_t bytes = arena_bytes(plan), available = device_available(world);
    if (bytes > available)
        return fail_with(
            error,
            "the model needs %.2f GB but only %.2f GB of memory are free; make --batch, --seq or the model "
            "smaller, or close other programs",
            1e-9 * (double)bytes, 1e-9 * (double)available);
    void* block = device_allocate(bytes, stream, error);
    if (block == NULL) return false;
    memset(plan, 0, sizeof *plan);
    plan->base = (unsigned char*)block;
    return true;
}

static inline void arena_print(FILE* file, const Arena* plan) {
    fprintf(file, "  %-34s %12s\n", "memory", "MB");
    for (size_t i = 0; i < plan->count; i++)
        fprintf(file, "  %-34s %12.2f\n", plan->lines[i].name, 1e-6 * (double)plan->lines[i].bytes);
    fprintf(file, "  %-34s %12.2f\n", "total", 1e-6 * (double)plan->total);
}

#endif  // LLMTRAIN_TENSORS_H
