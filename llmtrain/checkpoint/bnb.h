// bnb.h: reads weights that bitsandbytes has quantized to 4 bits, from safetensors files as transformers and unsloth
// write them ("*-bnb-4bit"), to the bit.
//
//   BnbWeight weight;                                         files: opened, with their headers
//   if (bnb_is(files, count, "x.weight") && bnb_open(&weight, files, count, "x.weight", &error)) ...
//   Nf4 q;                                                    with or without the headers
//   if (bnb_read(&q, &weight, files, &error)) ...             the caller frees q.codes, its only memory
//
// A matrix (rows, cols), n = rows cols, blocks = n / 64 rounded up, in tensors that may be in different files:
//
//   x.weight                                   U8 (n / 2, 1)    codes, the first in the high half of a byte
//   x.weight.absmax                            U8 (blocks)      codes of scales; F32: scales, quantized once
//   x.weight.quant_map                         F32 (16)         the numbers of codes
//   x.weight.nested_absmax                     F32 (blocks / 256, rounded up)
//   x.weight.nested_quant_map                  F32 (256)        the numbers of codes of scales
//   x.weight.quant_state.bitsandbytes__nf4     U8               JSON: shape, dtype, block sizes, offset
//
// Also matrices of GPT-2 are (out, in) here: transformers transposes them before it quantizes them. FP4, 8 bits and
// other sizes of blocks are refused by name.

#ifndef LLMTRAIN_BNB_H
#define LLMTRAIN_BNB_H

#include "safetensors.h"
#include "../ops/nf4.h"

typedef enum { BNB_CODES, BNB_SCALES, BNB_NUMBERS, BNB_NESTED, BNB_NESTED_NUMBERS, BNB_STATE, BNB_PARTS } BnbPart;

// What follows the name of the weight.
static const char* const BNB_SUFFIXES[BNB_PARTS] = {"", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
                                                    ".quant_state.bitsandbytes__nf4"};

typedef struct {
    size_t rows, cols;
    Dtype dtype;                                    // of the weights before they were quantized
    bool doubled;                                   // double quantization
    float offset;
    size_t file[BNB_PARTS], position[BNB_PARTS];    // of the first byte
} BnbWeight;

// The tensor of a name, of which the first `length` bytes count, and a suffix, and its file; NULL if there is none.
static inline const SafetensorsTensor* bnb_find_part(size_t* file, const SafetensorsFile* files, size_t count,
                                                     const char* name, size_t length, const char* suffix) {
    for (*file = 0; *file < count; ++*file) {
        const SafetensorsHeader* header = &files[*file].header;
        for (size_t i = 0; i < header->count; i++)
            if (strncmp(header->tensors[i].name, name, length) == 0 &&
                strcmp(header->tensors[i].name + length, suffix) == 0) return &header->tensors[i];
    }
    return NULL;
}

static inline const SafetensorsTensor* bnb_find(size_t* file, const SafetensorsFile* files, size_t count,
                                                const char* name, const char* suffix) {
    return bnb_find_part(file, files, count, name, strlen(name), suffix);
}

// Whether the tensor of this name, x.weight, is one of LLM.int8: then x.SCB has the scales of its rows.
static inline bool bnb_is_int8(const SafetensorsFile* files, size_t count, const char* name) {
    size_t file, length = strlen(name);
    return length > 7 && bnb_find_part(&file, files, count, name, length - 7, ".SCB");
}

// Whether bitsandbytes has quantized the tensor of this name; bnb_open refuses it if not to NF4.
static inline bool bnb_is(const SafetensorsFile* files, size_t count, const char* name) {
    size_t file;
    return bnb_find(&file, files, count, name, BNB_SUFFIXES[BNB_SCALES]) || bnb_is_int8(files, count, name);
}

// Reads the JSON of a weight's state. Returns NULL, or what is wrong with it.
static inline const char* bnb_state(BnbWeight* w, const Json* json) {
    char type[16] = "", dtype[16] = "", nested[16] = "";
    uint64_t shape[2], block = 0, nested_block = 0;
    double offset = 0.0;
    uint32_t rows = json_first(json, json_get(json, 0, "shape")), cols = json_next(json, rows);
    json_string(json, json_get(json, 0, "quant_type"), type, sizeof type);
    json_string(json, json_get(json, 0, "dtype"), dtype, sizeof dtype);
    json_string(json, json_get(json, 0, "nested_dtype"), nested, sizeof nested);
    json_u64(json, json_get(json, 0, "blocksize"), &block);
    json_u64(json, json_get(json, 0, "nested_blocksize"), &nested_block);
    if (strcmp(type, "nf4") != 0) return "its quant_type is not nf4";
    if (block != NF4_BLOCK) return "its blocksize is not 64";
    if (w->doubled && nested_block != NF4_SCALES) return "its nested_blocksize is not 256";
    if (w->doubled && strcmp(nested, "float32") != 0) return "its nested_dtype is not float32";
    if (w->doubled && !json_number(json, json_get(json, 0, "nested_offset"), &offset)) return "it has no nested_offset";
    if (json_count(json, json_get(json, 0, "shape")) != 2 || !json_u64(json, rows, &shape[0]) ||
        !json_u64(json, cols, &shape[1]) || shape[0] == 0 || shape[1] == 0 || shape[0] > SIZE_MAX / 64 / shape[1])
        return "its shape is not that of a matrix";
    w->dtype = strcmp(dtype, "bfloat16") == 0 ? DTYPE_BF16 : strcmp(dtype, "float16") == 0 ? DTYPE_F16 : DTYPE_F32;
    if (w->dtype == DTYPE_F32 && strcmp(dtype, "float32") != 0)
        return "its dtype is none of bfloat16, float16, float32";
    w->rows = (size_t)shape[0];
    w->cols = (size_t)shape[1];
    w->offset = (float)offset;
    return isfinite(w->offset) ? NULL : "its nested_offset is not a finite float";
}

// Finds the parts of a weight, and checks their sizes and what is fixed in NF4. Returns NULL, or what is wrong; "" if a
// file could not be read, about which *error has a sentence.
static inline const char* bnb_check(BnbWeight* w, const SafetensorsFile* files, size_t count, const char* name,
                                    Error* error) {
    const SafetensorsTensor* parts[BNB_PARTS];
    size_t file;
    Json json;
    char text[1024];
    float numbers[NF4_CODES];
    if (bnb_is_int8(files, count, name)) return "it is quantized to 8 bits (LLM.int8)";
    if (bnb_find(&file, files, count, name, ".quant_state.bitsandbytes__fp4")) return "it is quantized to FP4";
    for (int k = 0; k < BNB_PARTS; k++) {
        parts[k] = bnb_find(&w->file[k], files, count, name, BNB_SUFFIXES[k]);
        if (k == BNB_SCALES && parts[k]) w->doubled = parts[k]->type == DTYPE_U8;
        bool needed = w->doubled || (k != BNB_NESTED && k != BNB_NESTED_NUMBERS);
        if (needed != (parts[k] != NULL)) return needed ? "a tensor of it is missing" : "its scales have two forms";
        if (parts[k]) w->position[k] = files[w->file[k]].data_start + parts[k]->offset;
    }
    const SafetensorsTensor *state = parts[BNB_STATE], *table = parts[BNB_NUMBERS];
    if (state->type != DTYPE_U8 || state->bytes > sizeof text) return "its state is not JSON";
    if (table->type != DTYPE_F32 || table->bytes != sizeof numbers) return "its quant_map is not 16 floats";
    if (!safetensors_read_range(&files[w->file[BNB_STATE]], state, 0, state->bytes, text, error) ||
        !safetensors_read_range(&files[w->file[BNB_NUMBERS]], table, 0, table->bytes, numbers, error)) return "";
    if (!json_parse(&json, text, state->bytes, name, error)) return "its state is not JSON";
    const char* problem = bnb_state(w, &json);
    json_free(&json);
    if (problem) return problem;
    if (memcmp(numbers, NF4_TABLE.values, sizeof numbers) != 0) return "its quant_map is not that of NF4";

    size_t n = w->rows * w->cols, blocks = divide_up(n, NF4_BLOCK), groups = divide_up(blocks, NF4_SCALES);
    const size_t sizes[BNB_PARTS] = {divide_up(n, 2), blocks, NF4_CODES, groups, DYNAMIC_CODES, state->bytes};
    for (int k = 0; k < BNB_PARTS; k++) {
        if (parts[k] == NULL) continue;
        bool bytes = k == BNB_CODES || k == BNB_STATE || (k == BNB_SCALES && w->doubled);
        if (parts[k]->type != (bytes ? DTYPE_U8 : DTYPE_F32) || parts[k]->bytes != sizes[k] * (bytes ? 1 : 4))
            return "the sizes of its tensors do not agree";
    }
    return NULL;
}

// Opens the weight of a name for which bnb_is is true.
static inline bool bnb_open(BnbWeight* w, const SafetensorsFile* files, size_t count, const char* name, Error* error) {
    size_t file;
    memset(w, 0, sizeof *w);
    const char* problem = bnb_check(w, files, count, name, error);
    if (problem == NULL) return true;
    if (problem[0] == 0) return false;
    bnb_find(&file, files, count, name, "");
    return fail_with(error, "%.600s: %.160s is quantized, but not as bitsandbytes writes NF4, which can be read: %s; "
                     "use another copy, or the model before it was quantized", files[file].path, name, problem);
}

// Reads a weight. The caller frees q->codes.
static inline bool bnb_read(Nf4* q, const BnbWeight* w, const SafetensorsFile* files, Error* error) {
    size_t n = w->rows * w->cols, blocks = divide_up(n, NF4_BLOCK), bytes = nf4_bytes(n, w->doubled);
    void* memory = memory_allocate(bytes);
    if (memory == NULL) return fail_memory(error, files[w->file[BNB_CODES]].path, bytes);
    nf4_layout(q, memory, n, w->doubled);
    if (w->doubled) q->map[NF4_OFFSET] = w->offset;
    const struct { BnbPart part; void* to; size_t bytes; } reads[] = {
        {BNB_CODES, q->codes, divide_up(n, 2)},
        {BNB_SCALES, w->doubled ? (void*)q->scale_codes : (void*)q->scales, blocks * (w->doubled ? 1 : sizeof(float))},
        {BNB_NESTED, q->scales, divide_up(blocks, NF4_SCALES) * sizeof(float)},
        {BNB_NESTED_NUMBERS, q->map, DYNAMIC_CODES * sizeof(float)},
    };
    bool ok = true;
    for (size_t i = 0; ok && i < (w->doubled ? 4 : 2); i++) {
        const SafetensorsFile* f = &files[w->file[reads[i].part]];
        ok = file_read_at(f->file, reads[i].to, reads[i].bytes, w->position[reads[i].part], f->path, error);
    }
    if (!ok) free(memory);
    return ok;
}

#endif  // LLMTRAIN_BNB_H
