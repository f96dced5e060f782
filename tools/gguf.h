// gguf.h: writes files in the GGUF format, version 3, which llama.cpp reads: named values, then named tensors.
//
//   1. types     float, binary16, bfloat16, and Q8_0: blocks of 32 elements with one scale
//   2. writer    values, then tensors in the order in which they were declared
//
//   GgufWriter w;
//   bool ok = gguf_create(&w, "model.gguf", &error);
//   gguf_string(&w, "general.architecture", "llama");  gguf_u32(&w, "llama.block_count", 2);
//   gguf_declare(&w, "output_norm.weight", GGUF_F32, shape, 1);
//   ok = ok && gguf_begin(&w, &error) && gguf_write(&w, floats, count, &error) && gguf_end(&w, &error);
//   gguf_writer_free(&w);
//
// Tensors are given as floats, in pieces of any size, and converted as they are written: a few megabytes of memory
// whatever the model. A number that the type of its tensor cannot hold is refused. The file gets its name only when it
// is complete. gguf_model.h has the names of a model's values and tensors. This header reads no files.
//
// The format: "GGUF", docs/gguf.md of the ggml project.

#ifndef LLMTRAIN_GGUF_H
#define LLMTRAIN_GGUF_H

#include "../llmtrain/base/files.h"  // FileWriter
#include "../llmtrain/base/json.h"   // JsonWriter: a growing buffer

// ------------------------------------------------------------------------------------------------
// 1. Types
//
// Q8_0: 32 elements are a scale in binary16 and 32 signed bytes, element = scale * byte; the scale is the largest
// magnitude / 127.

typedef enum { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q8_0 = 8, GGUF_BF16 = 30 } GgufType;  // as in the file

#define GGUF_TYPE_NAMES "f32|f16|bf16|q8_0"
enum { Q8_BLOCK = 32 };

typedef struct {
    uint16_t scale;
    int8_t values[Q8_BLOCK];
} Q8Block;
static_assert(sizeof(Q8Block) == 34, "a block of Q8_0 has 34 bytes");

// A row per type: its number in the file, and the number of a file with matrices of it.
static const struct {
    GgufType type;
    uint32_t file_type;
    size_t block, bytes;  // elements of a block, and its bytes
} GGUF_TYPES[] = {
    {GGUF_F32, 0, 1, 4}, {GGUF_F16, 1, 1, 2}, {GGUF_BF16, 32, 1, 2}, {GGUF_Q8_0, 7, Q8_BLOCK, sizeof(Q8Block)}};
enum { GGUF_TYPE_COUNT = sizeof GGUF_TYPES / sizeof GGUF_TYPES[0] };

static inline size_t gguf_type_row(GgufType type) {
    size_t row = 0;
    while (row + 1 < GGUF_TYPE_COUNT && GGUF_TYPES[row].type != type) row++;
    return row;
}

// The bytes of a number of elements, which is a multiple of the type's block.
static inline size_t gguf_type_bytes(GgufType type, size_t elements) {
    size_t row = gguf_type_row(type);
    return elements / GGUF_TYPES[row].block * GGUF_TYPES[row].bytes;
}

// One block; the quotient is rounded to nearest, halves away from 0. False if an element is not finite.
static inline bool q8_block_of(Q8Block* block, const float values[Q8_BLOCK]) {
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < Q8_BLOCK; i++) {
        largest = fmaxf(largest, fabsf(values[i]));
        finite = finite && isfinite(values[i]);
    }
    float scale = largest / 127, inverse = scale > 0x1p-126f ? 1 / scale : 0;  // a smaller one is 0 in binary16 anyway
    block->scale = f16_from_float(scale);
    for (int i = 0; i < Q8_BLOCK; i++) block->values[i] = (int8_t)(finite ? roundf(values[i] * inverse) : 0);
    return finite && isfinite(float_from_f16(block->scale));
}

// Converts elements, a multiple of the type's block. Returns how many come before the first that the type cannot hold:
// all, if it can hold all.
static inline size_t gguf_convert(void* out, const float* values, size_t n, GgufType type) {
    uint16_t* halves = (uint16_t*)out;
    if (type == GGUF_F32) memcpy(out, values, n * sizeof(float));
    for (size_t i = 0; type == GGUF_BF16 && i < n; i++) halves[i] = bf16_from_float(values[i]);
    for (size_t i = 0; type == GGUF_F16 && i < n; i++)
        if (!isfinite(float_from_f16(halves[i] = f16_from_float(values[i])))) return i;
    for (size_t i = 0; type == GGUF_Q8_0 && i < n; i += Q8_BLOCK)
        if (!q8_block_of((Q8Block*)out + i / Q8_BLOCK, values + i)) return i;
    return n;
}

// ------------------------------------------------------------------------------------------------
// 2. Writer
//
// The file: "GGUF", version, number of tensors, number of values; the values (name, type, value); the tensors (name,
// shape with the fastest dimension first, type, offset); then their data, each at a multiple of 32 bytes.
//
// gguf_create; the values; gguf_declare for every tensor; gguf_begin; gguf_write for the data in the order of
// declaration; gguf_end; and always gguf_writer_free, which removes a file that did not reach its end. A failed
// allocation of the text is reported once, by gguf_begin.

typedef enum { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_FLOAT = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 } GgufValue;

enum { GGUF_ALIGNMENT = 32, GGUF_VERSION = 3 };
enum { GGUF_PIECE = LLMTRAIN_PIECE(1 << 18, 7 * Q8_BLOCK) };  // elements converted at a time

typedef struct {
    char name[96];
    GgufType type;
    size_t elements;
} GgufTensor;

typedef struct {
    FileWriter file;
    JsonWriter values, infos;     // of the header; they grow
    uint64_t value_count;
    size_t array_at;              // where the count of the array in progress is, in values
    uint64_t array_count;
    GgufTensor* tensors;          // (capacity)
    size_t count, capacity;       // tensors
    size_t data_bytes;            // of the declared tensors, with their padding
    size_t current, done;         // the tensor being written, and its elements so far
    void* converted;              // (GGUF_PIECE) elements as the file has them
} GgufWriter;

static inline void gguf_put(JsonWriter* t, const void* data, size_t bytes) { json_put(t, (const char*)data, bytes); }
static inline void gguf_put_u32(JsonWriter* t, uint32_t value) { gguf_put(t, &value, sizeof value); }
static inline void gguf_put_u64(JsonWriter* t, uint64_t value) { gguf_put(t, &value, sizeof value); }
static inline void gguf_put_text(JsonWriter* t, const char* text, size_t bytes) {
    gguf_put_u64(t, bytes);
    gguf_put(t, text, bytes);
}

static inline void gguf_writer_free(GgufWriter* w) {
    file_abort(&w->file);
    json_writer_free(&w->values);
    json_writer_free(&w->infos);
    free(w->tensors);
    free(w->converted);
    memset(w, 0, sizeof *w);
    w->file.file = -1;
}

static inline bool gguf_create(GgufWriter* w, const char* path, Error* error) {
    memset(w, 0, sizeof *w);
    return file_begin(&w->file, path, error);
}

static inline void gguf_key(GgufWriter* w, const char* key, GgufValue type) {
    gguf_put_text(&w->values, key, strlen(key));
    gguf_put_u32(&w->values, (uint32_t)type);
    w->value_count++;
}

static inline void gguf_string(GgufWriter* w, const char* key, const char* text) {
    gguf_key(w, key, GGUF_STRING);
    gguf_put_text(&w->values, text, strlen(text));
}
static inline void gguf_u32(GgufWriter* w, const char* key, size_t value) {
    gguf_key(w, key, GGUF_U32);
    gguf_put_u32(&w->values, (uint32_t)value);
}
static inline void gguf_float(GgufWriter* w, const char* key, double value) {
    float rounded = (float)value;
    gguf_key(w, key, GGUF_FLOAT);
    gguf_put(&w->values, &rounded, sizeof rounded);
}
static inline void gguf_bool(GgufWriter* w, const char* key, bool value) {
    gguf_key(w, key, GGUF_BOOL);
    gguf_put(&w->values, &value, 1);
}

// An array: gguf_array_begin, then its elements, all of that type, then gguf_array_end.
static inline void gguf_array_begin(GgufWriter* w, const char* key, GgufValue type) {
    gguf_key(w, key, GGUF_ARRAY);
    gguf_put_u32(&w->values, (uint32_t)type);
    w->array_at = w->values.bytes;
    w->array_count = 0;
    gguf_put_u64(&w->values, 0);
}
static inline void gguf_element_text(GgufWriter* w, const char* text, size_t bytes) {
    gguf_put_text(&w->values, text, bytes);
    w->array_count++;
}
static inline void gguf_element(GgufWriter* w, const void* value, size_t bytes) {
    gguf_put(&w->values, value, bytes);
    w->array_count++;
}
static inline void gguf_array_end(GgufWriter* w) {
    if (!w->values.failed) memcpy(w->values.text + w->array_at, &w->array_count, sizeof w->array_count);
}

// Declares a tensor of 1 or 2 dimensions, the slowest first; the fastest must be a multiple of the type's block.
static inline void gguf_declare(GgufWriter* w, const char* name, GgufType type, const size_t* shape, int dims) {
    if (w->count == w->capacity) {
        size_t capacity = 2 * w->capacity + 64;
        GgufTensor* grown = (GgufTensor*)realloc(w->tensors, capacity * sizeof *grown);
        if (grown == NULL) w->infos.failed = true;
        if (grown == NULL) return;
        w->tensors = grown;
        w->capacity = capacity;
    }
    GgufTensor* t = &w->tensors[w->count++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->type = type;
    t->elements = 1;
    gguf_put_text(&w->infos, t->name, strlen(t->name));
    gguf_put_u32(&w->infos, (uint32_t)dims);
    for (int i = dims; i-- > 0; t->elements *= shape[i]) gguf_put_u64(&w->infos, shape[i]);
    gguf_put_u32(&w->infos, (uint32_t)type);
    gguf_put_u64(&w->infos, w->data_bytes);
    w->data_bytes += round_up(gguf_type_bytes(type, t->elements), GGUF_ALIGNMENT);
}

// Zeros up to the next multiple of the alignment.
static inline bool gguf_align(GgufWriter* w, Error* error) {
    static const char zeros[GGUF_ALIGNMENT] = {0};
    return file_append(&w->file, zeros, round_up(w->file.bytes, GGUF_ALIGNMENT) - w->file.bytes, error);
}

// Writes the header.
static inline bool gguf_begin(GgufWriter* w, Error* error) {
    JsonWriter head = {.failed = w->values.failed || w->infos.failed};
    gguf_put(&head, "GGUF", 4);
    gguf_put_u32(&head, GGUF_VERSION);
    gguf_put_u64(&head, w->count);
    gguf_put_u64(&head, w->value_count);
    w->converted = memory_allocate(GGUF_PIECE * sizeof(float));
    bool good = (!head.failed && w->converted) ||
                fail_with(error, "not enough memory to write %.600s; free some memory", w->file.path);
    good = good && file_append(&w->file, head.text, head.bytes, error) &&
           file_append(&w->file, w->values.text, w->values.bytes, error) &&
           file_append(&w->file, w->infos.text, w->infos.bytes, error) && gguf_align(w, error);
    json_writer_free(&head);
    return good;
}

// Writes the next elements of the tensors, whole blocks of their type.
static inline bool gguf_write(GgufWriter* w, const float* values, size_t n, Error* error) {
    while (n > 0) {
        if (w->current == w->count)
            return fail_with(error, "cannot write %.600s: there is more data than declared", w->file.path);
        const GgufTensor* t = &w->tensors[w->current];
        size_t count = min_size(min_size(n, GGUF_PIECE), t->elements - w->done);
        size_t good = gguf_convert(w->converted, values, count, t->type);
        if (good < count)
            return fail_with(error, "cannot write %.600s: %s has numbers from element %zu on that its type cannot "
                             "hold; choose f32, or another checkpoint if the run has diverged", w->file.path, t->name,
                             w->done + good);
        if (!file_append(&w->file, w->converted, gguf_type_bytes(t->type, count), error)) return false;
        values += count;
        n -= count;
        w->done += count;
        if (w->done < t->elements) continue;
        w->current++;
        w->done = 0;
        if (!gguf_align(w, error)) return false;
    }
    return true;
}

static inline bool gguf_end(GgufWriter* w, Error* error) {
    if (w->current < w->count)
        return fail_with(error, "cannot write %.600s: there is not enough data for %s", w->file.path,
                         w->tensors[w->current].name);
    return file_end(&w->file, error);
}

#endif  // LLMTRAIN_GGUF_H
