// tensors.h: the table of a model's tensors, and the block of memory that holds everything.
//
//   1. tensors   a row per weight: name, shape, offset in the flat vector, initialization, weight decay, which part
//                of it is here (parts.h); which train
//   2. memory    one block, laid out before the first step and shown as a plan
//
// A model fills the table (llmtrain.h); everything that goes through parameters uses the table: initial weights,
// sharding, the optimizer, checkpoints, counting.
//
//   TensorId head = parameters_add(&table, "head_weight", V, Vp, C, bucket, INIT_NORMAL, 0.02f);
//   if (!parameters_finish(&table, NULL, &error)) ...           now every tensor has its place in the flat vector

#ifndef LLMTRAIN_TENSORS_H
#define LLMTRAIN_TENSORS_H

#include "parts.h"

#include <assert.h>
#include <fnmatch.h>

// ------------------------------------------------------------------------------------------------
// 1. Tensors
//
// All parameters are one flat vector, cut into buckets: 0 the embeddings, 1 to L the blocks, L + 1 the final norm and
// the head. The table has a row per tensor, bucket after bucket. In the vector the tensors of a bucket that train come
// first, so that gradients, optimizer state and collectives work on slices, and among them those that tensor
// parallelism does not divide; each starts at a multiple of 64 elements.
// Gradients, master weights and optimizer state of a number per element have the same layout (for other state see
// StateShape). What lies between tensors, and the rows of the padded vocabulary, is 0 and stays 0.

typedef enum { INIT_NORMAL, INIT_ZERO, INIT_ONE, INIT_UNIFORM } Init;

typedef struct {
    char name[48];
    size_t rows, cols;   // the true shape of what is here; cols is 0 for a vector of `rows` elements
    size_t offset, size; // position in the flat vector and elements there, padded rows included
    TensorPart part;     // what is here: with tensor parallelism a part of the tensor, otherwise all of it
    size_t bucket;
    size_t init_index;   // its offset if all of all tensors trains: numbers its initial random values
    Init init;
    float init_std;      // of INIT_NORMAL; the bound of INIT_UNIFORM
    bool decays;         // weight decay applies: matrices only
    bool overwritten;    // each backward writes its whole gradient in one operation, which need not add
    bool trains;         // the optimizer updates it; otherwise it has no gradient and no state
    char adapter;        // 'a' or 'b' of a pair of LoRA; 0: it is neither
    Dtype dtype;         // of its parameters; U8: they are quantized, see tensor_nf4
    size_t quantized;    // how many matrices it is that are quantized one by one; 0: it is not
    TensorShape shape;   // as the optimizer sees it
} Tensor;

// A tensor's row in the table.
typedef struct { uint32_t row; } TensorId;

static const TensorId TENSOR_NONE = {UINT32_MAX};  // the model does not have it

static inline bool tensor_exists(TensorId id) { return id.row != TENSOR_NONE.row; }

// A pair of LoRA beside a layer's weight: a (r, inputs), b (rows, r), for its outputs [first, first + rows).
enum { LORA_PAIRS = 3 };
typedef struct {
    TensorId a, b;
    size_t first, rows;
} LoraPair;

// The weight (outputs, inputs) and bias (outputs) of a linear layer; the weight and bias (C) of a norm.
typedef struct {
    TensorId weight, bias;
    LoraPair pairs[LORA_PAIRS];
    size_t pair_count;
} Linear;
typedef struct { TensorId weight, bias; } Norm;

typedef struct {
    Tensor* tensors;     // (capacity)
    size_t count, capacity;
    size_t flat_size;    // elements of the flat vector, padding included
    size_t true_size;    // the model's parameters as papers count them, over all ranks
    size_t parts;        // ranks that have a part each of what is divided; 0 or 1: this one has all
    bool failed;         // there was no memory for a row, which is in `spare` instead: parameters_finish fails
    Tensor spare;
    bool tied;           // the head is the token embedding: bucket 0 accumulates gradients from the head's backward on
} Parameters;

// Elements of what is here, without padding.
static inline size_t tensor_elements(const Tensor* t) { return shape_elements(&t->shape); }

// Whether other ranks have other parts of it.
static inline bool tensor_is_divided(const Tensor* t) { return t->part.count > 1; }

// Rows of matrix m of those that are quantized one by one; 0: there is none. They are stored one after the other, each
// as in nf4.h: with double quantization, nf4_bytes long.
static inline size_t tensor_nf4_rows(const Tensor* t, size_t m) {
    return m >= t->quantized ? 0 : t->quantized == 1 ? t->rows : part_matrix(&t->part, m);
}

// What is stored of what is here, in elements of its dtype, padding included.
static inline size_t tensor_stored(const Tensor* t) {
    size_t bytes = 0;
    for (size_t m = 0, rows; (rows = tensor_nf4_rows(t, m)) > 0; m++) bytes += nf4_bytes(rows * t->cols, true);
    return t->quantized ? bytes : t->size;
}

// Elements of the flat vector that it takes.
static inline size_t tensor_place(const Tensor* t) {
    return divide_up(tensor_stored(t) * dtype_bytes(t->dtype), sizeof(floatX));
}

// The tensor added last.
static inline Tensor* parameters_last(Parameters* p) { return p->failed ? &p->spare : &p->tensors[p->count - 1]; }

// Appends a tensor of rows x cols (cols 0: a vector), stored with padded_rows. Its bucket is that of the tensor before
// it, or the next one.
static inline TensorId parameters_add(Parameters* p, const char* name, size_t rows, size_t padded_rows, size_t cols,
                                      size_t bucket, Init init, float init_std) {
    if (p->count == p->capacity) {
        size_t capacity = 2 * p->capacity + 64;
        Tensor* larger = (Tensor*)realloc(p->tensors, capacity * sizeof(Tensor));
        p->failed |= larger == NULL;
        if (larger) p->tensors = larger, p->capacity = capacity;
    }
    TensorId id = {(uint32_t)p->count};
    p->count += !p->failed;
    Tensor t = {.rows = rows, .cols = cols, .size = padded_rows * max_size(cols, 1),
                .part = {SPLIT_NONE, 0, 1, padded_rows, cols, rows, {0}}, .bucket = bucket, .init = init,
                .init_std = init_std, .decays = cols > 0, .trains = true, .dtype = FLOATX_DTYPE,
                .shape = {.rows = rows, .cols = cols}};
    snprintf(t.name, sizeof t.name, "%s", name);
    *parameters_last(p) = t;
    return id;
}

// A tensor of block l, whose bucket is l + 1; TENSOR_NONE if the model does not have it.
static inline TensorId parameters_add_block(Parameters* p, bool has, size_t l, const char* what, const char* kind,
                                            size_t rows, size_t cols, Init init, float init_std) {
    char name[48];
    if (!has) return TENSOR_NONE;
    snprintf(name, sizeof name, "block.%zu.%s_%s", l, what, kind);
    return parameters_add(p, name, rows, rows, cols, l + 1, init, init_std);
}

// A norm of block l: ones, and zeros if it has a bias.
static inline Norm parameters_add_norm(Parameters* p, bool has_bias, size_t l, const char* what, size_t C) {
    Norm norm = {parameters_add_block(p, true, l, what, "weight", C, 0, INIT_ONE, 0), TENSOR_NONE};
    norm.bias = parameters_add_block(p, has_bias, l, what, "bias", C, 0, INIT_ZERO, 0);
    return norm;
}

// A linear layer of block l. stacked: the rows of the matrices that its weight is a stack of (queries, keys and values;
// gate and up); {0}: it is one matrix. A split by rows splits its bias too.
static inline Linear parameters_add_linear(Parameters* p, bool has_bias, size_t l, const char* what, size_t outputs,
                                           size_t inputs, float init_std, TensorSplit split,
                                           const size_t stacked[SHAPE_MATRICES]) {
    TensorId weight = parameters_add_block(p, true, l, what, "weight", outputs, inputs, INIT_NORMAL, init_std);
    Tensor* t = parameters_last(p);
    t->shape.hidden = t->overwritten = true;
    t->part.by = split;
    memcpy(t->shape.stacked, stacked, sizeof t->shape.stacked);
    memcpy(t->part.stacked, stacked, sizeof t->part.stacked);
    TensorId bias = parameters_add_block(p, has_bias, l, what, "bias", outputs, 0, INIT_ZERO, 0);
    if (has_bias) parameters_last(p)->overwritten = true;
    if (has_bias && split == SPLIT_ROWS) {
        parameters_last(p)->part.by = SPLIT_ROWS;
        memcpy(parameters_last(p)->part.stacked, stacked, sizeof t->part.stacked);
    }
    Linear linear = {.weight = weight, .bias = bias};
    return linear;
}

// Adds a pair of LoRA of rank r to a linear layer of block l, for its outputs [first, first + rows): a uniform within
// 1/sqrt(inputs), b zeros. They are the last in the order of initial values, so that the model's own are the same.
static inline void parameters_add_pair(Parameters* p, Linear* linear, size_t l, const char* what, size_t first,
                                       size_t rows, size_t r, size_t inputs) {
    LoraPair* pair = &linear->pairs[linear->pair_count++];
    char name[48];
    snprintf(name, sizeof name, "block.%zu.%s.lora_a", l, what);
    pair->a = parameters_add(p, name, r, r, inputs, l + 1, INIT_UNIFORM, 1 / sqrtf((float)inputs));
    parameters_last(p)->adapter = 'a';
    snprintf(name, sizeof name, "block.%zu.%s.lora_b", l, what);
    pair->b = parameters_add(p, name, rows, rows, r, l + 1, INIT_ZERO, 0);
    parameters_last(p)->adapter = 'b';
    pair->first = first;
    pair->rows = rows;
}

// Says of a linear layer that its first qk_rows outputs are queries and keys, with D for each head.
static inline void parameters_set_heads(Parameters* p, Linear linear, size_t qk_rows, size_t D) {
    if (p->failed) return;
    p->tensors[linear.weight.row].shape.qk_rows = qk_rows;
    p->tensors[linear.weight.row].shape.D = D;
}

// Lets only those tensors train whose names match one of the shell patterns in a list, separated by commas, and LoRA's.
static inline bool parameters_freeze(Parameters* p, const char* list, Error* error) {
    if (list[0] == 0) return fail_with(error, "--train is empty; name the tensors that train, such as 'block.*'");
    for (size_t i = 0; i < p->count; i++) p->tensors[i].trains = p->tensors[i].adapter != 0;
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
            return fail_with(error, "--train %.200s matches no tensor of the model; their names are %s, %s and so on "
                             "(the list flat_vector of a checkpoint's manifest.json)", pattern, p->tensors[0].name,
                             p->tensors[p->count / 2].name);
    }
    return true;
}

// Leaves of every tensor that is divided over `count` ranks what rank `number` has; before parameters_finish.
static inline void parameters_divide(Parameters* p, size_t number, size_t count) {
    p->parts = count;
    for (Tensor* t = p->tensors; count > 1 && t < p->tensors + p->count; t++) {
        if (t->part.by == SPLIT_NONE) continue;
        t->part.number = number;
        t->part.count = count;
        t->size /= count;
        if (t->part.by == SPLIT_COLUMNS) t->cols /= count;
        else t->rows = part_elements(&t->part) / part_width(&t->part);
        t->shape.rows = t->rows;
        t->shape.cols = t->cols;
        t->shape.qk_rows /= count;
        for (size_t m = 0; m < SHAPE_MATRICES && t->part.by == SPLIT_ROWS; m++) t->shape.stacked[m] /= count;
    }
}

// The place of a tensor among those of its bucket: first what trains, and of that what is the same on all ranks.
static inline int parameters_order(const Tensor* t) { return (t->trains ? 0 : 2) + tensor_is_divided(t); }

// Gives every tensor its place in the flat vector, after the last one was added. train: names of the tensors that train
// (parameters_freeze); NULL: all or, if there are pairs of LoRA, these.
static inline bool parameters_finish(Parameters* p, const char* train, Error* error) {
    size_t index = 0;
    bool pairs = false;
    if (p->failed) return fail_with(error, "out of memory for the table of parameters");
    for (size_t i = 0; i < p->count; i++) pairs |= p->tensors[i].adapter != 0;
    for (Tensor* t = p->tensors; pairs && !train && t < p->tensors + p->count; t++) t->trains = t->adapter != 0;
    if (train && !parameters_freeze(p, train, error)) return false;
    for (Tensor* t = p->tensors; t < p->tensors + p->count; t++)
        if (t->quantized && t->trains)
            return fail_with(error, "--train names %s, which --quantize stores in 4 bits and so cannot train; leave out "
                             "one of them", t->name);
    p->flat_size = p->true_size = 0;
    for (size_t b = 0, i = 0, end = 0; i < p->count; i = end, b++) {
        while (end < p->count && p->tensors[end].bucket == b) end++;
        for (int order = 0; order < 4; order++)
            for (Tensor* t = &p->tensors[i]; t < &p->tensors[end]; t++) {
                if (parameters_order(t) != order) continue;
                t->offset = p->flat_size;
                p->flat_size = round_up(p->flat_size + tensor_place(t), 64);
            }
    }
    for (int adapters = 0; adapters < 2; adapters++)
        for (Tensor* t = p->tensors; t < p->tensors + p->count; t++) {
            if ((t->adapter != 0) != (adapters == 1)) continue;
            t->init_index = index;
            index = round_up(index + t->part.rows * part_width(&t->part), 64);
            p->true_size += part_whole_elements(&t->part);
        }
    return true;
}

// How many parameters train, of the model's true_size.
static inline size_t parameters_trained(const Parameters* p) {
    size_t trained = 0;
    for (size_t i = 0; i < p->count; i++)
        trained += p->tensors[i].trains ? part_whole_elements(&p->tensors[i].part) : 0;
    return trained;
}

// Elements of the longest tensor here, padding included.
static inline size_t parameters_longest(const Parameters* p) {
    size_t most = 0;
    for (size_t i = 0; i < p->count; i++) most = max_size(most, p->tensors[i].size);
    return most;
}

// Elements of the largest tensor, without padding.
static inline size_t parameters_largest(const Parameters* p) {
    size_t most = 0;
    for (size_t i = 0; i < p->count; i++) most = max_size(most, tensor_elements(&p->tensors[i]));
    return most;
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
static inline void* arena_take(Arena* arena, const char* name, size_t bytes) {
    size_t i = 0, offset = arena->total, taken = arena_piece_bytes(bytes);
    while (i < arena->count && strcmp(arena->lines[i].name, name) != 0) i++;
    assert(i < ARENA_LINES);
    if (i == arena->count) arena->lines[arena->count++].name = name;
    arena->lines[i].bytes = taken < ARENA_MAX - arena->lines[i].bytes ? arena->lines[i].bytes + taken : ARENA_MAX;
    arena->total = taken < ARENA_MAX - arena->total ? arena->total + taken : ARENA_MAX;
    return arena->base ? arena->base + offset : NULL;
}

// Bytes of the block: at least one, in whole large pages.
static inline size_t arena_bytes(const Arena* arena) { return round_up(max_size(arena->total, 1), 2 << 20); }

// Allocates the block of a finished plan on the device of one of `world` ranks, zeroed, and restarts the plan over it.
// device_free frees it.
static inline bool arena_allocate(Arena* arena, size_t world, Stream stream, Error* error) {
    size_t bytes = arena_bytes(arena), available = device_available(world);
    if (bytes > available)
        return fail_with(error, "the model needs %.2f GB but only %.2f GB of memory are free; make --batch, --seq or "
                         "the model smaller, or close other programs", 1e-9 * (double)bytes, 1e-9 * (double)available);
    void* block = device_allocate(bytes, stream, error);
    if (block == NULL) return false;
    memset(arena, 0, sizeof *arena);
    arena->base = (unsigned char*)block;
    return true;
}

static inline void arena_print(FILE* file, const Arena* arena) {
    fprintf(file, "  %-34s %12s\n", "memory", "MB");
    for (size_t i = 0; i < arena->count; i++)
        fprintf(file, "  %-34s %12.2f\n", arena->lines[i].name, 1e-6 * (double)arena->lines[i].bytes);
    fprintf(file, "  %-34s %12.2f\n", "total", 1e-6 * (double)arena->total);
}

#endif  // LLMTRAIN_TENSORS_H
