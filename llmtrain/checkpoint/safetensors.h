// safetensors.h: files of named tensors in the safetensors format: a streaming writer and a checked reader.
//
//   1. header   the format
//   2. writer   tensors in the order in which they were declared
//   3. reader   tensors in any order
//   4. weights  float to and from the types of weights
//
//   SafetensorsWriter w;                                                        writing: in the order of declaration
//   ok = safetensors_create(&w, path, &error) && safetensors_declare(&w, "weight", DTYPE_F32, shape, 2, &error) &&
//        safetensors_begin(&w, &error) && safetensors_write(&w, data, bytes, &error) && safetensors_end(&w, &error);
//   safetensors_writer_free(&w);
//   SafetensorsFile f;                                                          reading: in any order
//   ok = safetensors_open(&f, path, &error) &&
//        safetensors_read_range(&f, &f.header.tensors[0], 0, bytes, data, &error);
//   safetensors_close(&f);
//
// The reader accepts arbitrary bytes: it refuses a damaged file with a message, and uses memory in proportion to the
// file. The writer parses its own header before it writes it, and leaves no unfinished file. Data are neither converted
// nor kept in memory. There is no global state; one thread at a time may use an object.

#ifndef LLMTRAIN_SAFETENSORS_H
#define LLMTRAIN_SAFETENSORS_H

#include "../ops/base.h"    // Error, hashes
#include "../ops/dtypes.h"  // the formats' names for types
#include "../base/files.h"   // FileWriter, file_read_at
#include "../base/json.h"    // the header

// ------------------------------------------------------------------------------------------------
// 1. Header
//
// The public format: the length of the header in 8 bytes, the header as JSON,
//   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}},
// spaces up to a multiple of 8 bytes, then the data of the tensors without gaps; offsets count from its start.
// The tensors of the header must cover the file from the first byte of data to the last.
// Checksums are XXH64 with seed 0: of the header with its length, and of the data of each tensor.

#define SAFETENSORS_NAME_MAX 256                    // including the zero byte
#define SAFETENSORS_DIMS_MAX 8
#define SAFETENSORS_HEADER_MAX ((size_t)100000000)  // the format's own limit
#define SAFETENSORS_TENSORS_MAX ((size_t)1 << 16)   // in one file

typedef struct {
    char name[SAFETENSORS_NAME_MAX];
    Dtype type;
    int dims;                            // 0: one element
    size_t shape[SAFETENSORS_DIMS_MAX];
    size_t offset, bytes;                // of the data, in the data section
    size_t position;                     // in the header
    uint64_t hash;                       // of the data; set by the writer with the last byte
} SafetensorsTensor;

typedef struct {
    Json json;                   // owned; the metadata are in it
    SafetensorsTensor* tensors;  // owned; in the order of their data
    size_t count;
    size_t data_bytes;
    uint64_t hash;
} SafetensorsHeader;

static inline void safetensors_header_free(SafetensorsHeader* header) {
    json_free(&header->json);
    free(header->tensors);
    memset(header, 0, sizeof *header);
}

// The bytes of a tensor of this type and shape; false if they overflow.
static inline bool safetensors_shape_bytes(size_t* bytes, Dtype type, const size_t* shape, int dims) {
    *bytes = dtype_bytes(type);
    for (int i = 0; i < dims; i++) {
        if (shape[i] != 0 && *bytes > SIZE_MAX / shape[i]) return false;
        *bytes *= shape[i];
    }
    return true;
}

// Reads the member `node` of the header. Returns NULL, or what is wrong with it.
static inline const char* safetensors_tensor_parse(SafetensorsTensor* tensor, const Json* json, uint32_t node) {
    char dtype[8];
    uint64_t n, offsets[2];
    uint32_t shape = json_get(json, node, "shape"), range = json_get(json, node, "data_offsets");
    if (json_count(json, node) != 3 || !json_is(json, shape, JSON_ARRAY) || !json_is(json, range, JSON_ARRAY))
        return "it does not consist of dtype, shape and data_offsets";

    static const char unread[] = "its dtype, like that of FP8 weights, is not read here: give F32, F16 or BF16";
    if (!json_string(json, json_get(json, node, "dtype"), dtype, sizeof dtype)) return unread;
    tensor->type = dtype_find(dtype);
    if (tensor->type == DTYPE_COUNT) return unread;

    if (json_count(json, shape) > SAFETENSORS_DIMS_MAX) return "it has too many dimensions";
    for (uint32_t i = json_first(json, shape); i != JSON_NONE; i = json_next(json, i)) {
        if (!json_u64(json, i, &n) || n > SIZE_MAX) return "its shape is not a list of sizes";
        tensor->shape[tensor->dims++] = (size_t)n;
    }
    uint32_t first = json_first(json, range), second = json_next(json, first);
    if (json_count(json, range) != 2 || !json_u64(json, first, &offsets[0]) || !json_u64(json, second, &offsets[1]))
        return "its data_offsets are not two sizes";
    if (offsets[0] > offsets[1] || offsets[1] > SIZE_MAX) return "its data_offsets are in the wrong order";
    tensor->offset = (size_t)offsets[0];
    size_t bytes = (size_t)(offsets[1] - offsets[0]);
    if (!safetensors_shape_bytes(&tensor->bytes, tensor->type, tensor->shape, tensor->dims) || bytes != tensor->bytes)
        return "its data_offsets do not agree with its shape";

    size_t length = json->nodes[node].key_bytes;
    if (length == 0 || length >= SAFETENSORS_NAME_MAX) return "its name is empty or too long";
    memcpy(tensor->name, json_key(json, node), length);
    for (size_t i = 0; i < length; i++) if ((unsigned char)tensor->name[i] < 0x20) return "its name is not printable";
    return NULL;
}

static inline int safetensors_compare(const void* left, const void* right) {
    const SafetensorsTensor* a = (const SafetensorsTensor*)left;
    const SafetensorsTensor* b = (const SafetensorsTensor*)right;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return a->position < b->position ? -1 : a->position > b->position;
}

// Parses and checks a header that is followed by data_bytes bytes of data.
static inline bool safetensors_header_parse(SafetensorsHeader* header, const char* text, size_t bytes,
                                            size_t data_bytes, const char* path, Error* error) {
    memset(header, 0, sizeof *header);
    if (bytes == 0 || text[0] != '{') return fail_with(error, "%.600s is not a safetensors file; check the path", path);
    if (!json_parse(&header->json, text, bytes, path, error)) return false;
    const Json* json = &header->json;
    uint64_t length = bytes;
    Hash hash = hash_begin(0);
    hash_add(&hash, &length, sizeof length);
    hash_add(&hash, text, bytes);
    header->hash = hash_end(&hash);
    header->data_bytes = data_bytes;
    size_t members = json_count(json, 0);
    bool many = members > SAFETENSORS_TENSORS_MAX;
    if (!many) header->tensors = (SafetensorsTensor*)memory_allocate(members * sizeof *header->tensors);
    if (header->tensors == NULL) {
        safetensors_header_free(header);
        if (!many) return fail_memory(error, path, members * sizeof(SafetensorsTensor));
        return fail_with(error, "%.600s: too many tensors (%zu); is this the right file?", path, members);
    }

    const char *problem = NULL, *name = "the header";
    for (uint32_t i = json_first(json, 0); i != JSON_NONE && !problem; i = json_next(json, i)) {
        name = json_key(json, i);
        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is(json, i, JSON_OBJECT)) problem = "it is not an object";
            for (uint32_t m = json_first(json, i); m != JSON_NONE; m = json_next(json, m))
                if (!json_is(json, m, JSON_STRING)) problem = "its values are not strings";
            continue;
        }
        SafetensorsTensor* tensor = &header->tensors[header->count];
        tensor->position = header->count++;
        problem = safetensors_tensor_parse(tensor, json, i);
    }
    if (!problem) qsort(header->tensors, header->count, sizeof *header->tensors, safetensors_compare);
    size_t end = 0;
    for (size_t i = 0; i < header->count && !problem; i++) {
        name = header->tensors[i].name;
        if (header->tensors[i].offset != end) problem = "its data overlaps with others or leaves a gap before it";
        end = header->tensors[i].offset + header->tensors[i].bytes;
    }
    if (!problem && end != data_bytes) {
        name = "the header";
        problem = "its tensors do not end where the file ends";
    }
    if (!problem) return true;
    fail_with(error, "%.600s cannot be read as a safetensors file: %.100s: %s; use another copy", path, name, problem);
    safetensors_header_free(header);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 2. Writer
//
// safetensors_create; safetensors_metadata where wanted, then safetensors_declare for every tensor; safetensors_begin;
// safetensors_write for the data in the order of declaration, in pieces of any size; safetensors_end; and always
// safetensors_writer_free, which removes an unfinished file. A call that fails has removed it already.

typedef struct {
    FileWriter file;
    JsonWriter text;           // the header so far
    SafetensorsHeader header;  // from safetensors_begin on: the header as a reader will see it, and the checksums
    size_t declared;           // tensors declared
    size_t data_bytes;         // of the declared tensors
    size_t current, done;      // the tensor being written, and its bytes written so far
    Hash hash;                 // of these bytes
} SafetensorsWriter;

static inline void safetensors_writer_free(SafetensorsWriter* w) {
    file_abort(&w->file);
    json_writer_free(&w->text);
    safetensors_header_free(&w->header);
}

static inline bool safetensors_create(SafetensorsWriter* w, const char* path, Error* error) {
    memset(w, 0, sizeof *w);
    json_write_begin(&w->text, '{');
    return file_begin(&w->file, path, error);
}

static inline bool safetensors_fail(SafetensorsWriter* w, Error* error, const char* problem, const char* name) {
    file_abort(&w->file);
    return fail_with(error, "cannot write %.600s: %s %.100s", w->file.path, problem, name);
}

// Adds a string about the whole file. Call it before the first tensor is declared.
static inline bool safetensors_metadata(SafetensorsWriter* w, const char* key, const char* value, Error* error) {
    if (w->declared > 0) return safetensors_fail(w, error, "metadata must come before the first tensor:", key);
    if (w->text.depth == 1) {
        json_member_begin(&w->text, "__metadata__", '{');
    }
    json_member_string(&w->text, key, value);
    return true;
}

static inline bool safetensors_declare(SafetensorsWriter* w, const char* name, Dtype type,
                                       const size_t* shape, int dims, Error* error) {
    size_t bytes;
    if (dims < 0 || dims > SAFETENSORS_DIMS_MAX) return safetensors_fail(w, error, "too many dimensions in", name);
    if (!safetensors_shape_bytes(&bytes, type, shape, dims) || bytes > INT64_MAX - w->data_bytes)
        return safetensors_fail(w, error, "too many elements in", name);
    if (w->text.depth == 2) json_write_end(&w->text, '}');
    json_member_begin(&w->text, name, '{');
    json_member_string(&w->text, "dtype", DTYPES[type].safetensors);
    json_member_begin(&w->text, "shape", '[');
    for (int i = 0; i < dims; i++) json_write_u64(&w->text, shape[i]);
    json_write_end(&w->text, ']');
    json_member_begin(&w->text, "data_offsets", '[');
    json_write_u64(&w->text, w->data_bytes);
    json_write_u64(&w->text, w->data_bytes + bytes);
    json_write_end(&w->text, ']');
    json_write_end(&w->text, '}');
    w->data_bytes += bytes;
    w->declared++;
    return true;
}

// Ends the current tensor if all its bytes are written, and any empty tensors after it.
static inline void safetensors_advance(SafetensorsWriter* w) {
    while (w->current < w->header.count && w->done == w->header.tensors[w->current].bytes) {
        w->header.tensors[w->current++].hash = hash_end(&w->hash);
        w->hash = hash_begin(0);
        w->done = 0;
    }
}

// Parses the header as any reader will, then writes it: a wrong name or shape is found here.
static inline bool safetensors_begin(SafetensorsWriter* w, Error* error) {
    while (w->text.depth > 0) json_write_end(&w->text, '}');
    while (!w->text.failed && w->text.bytes % 8 != 0) json_put(&w->text, " ", 1);
    uint64_t length = w->text.bytes;
    bool good = json_write_done(&w->text, error);
    if (good && length > SAFETENSORS_HEADER_MAX)
        good = fail_with(error, "cannot write %.600s: too many tensors for one file", w->file.path);
    good = good && safetensors_header_parse(&w->header, w->text.text, length, w->data_bytes, w->file.path, error);
    good = good && file_append(&w->file, &length, sizeof length, error);
    good = good && file_append(&w->file, w->text.text, length, error);
    if (!good) file_abort(&w->file);
    w->hash = hash_begin(0);
    safetensors_advance(w);
    return good;
}

// Writes the next bytes of the data, without a copy.
static inline bool safetensors_write(SafetensorsWriter* w, const void* data, size_t bytes, Error* error) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        if (w->current >= w->header.count) return safetensors_fail(w, error, "there is more data than declared", "");
        size_t n = min_size(min_size(bytes, FILE_CHUNK), w->header.tensors[w->current].bytes - w->done);
        if (!file_append(&w->file, p, n, error)) return false;
        hash_add(&w->hash, p, n);
        p += n;
        bytes -= n;
        w->done += n;
        safetensors_advance(w);
    }
    return true;
}

static inline bool safetensors_end(SafetensorsWriter* w, Error* error) {
    if (w->header.tensors == NULL) return safetensors_fail(w, error, "the header was not written", "");
    if (w->current < w->header.count)
        return safetensors_fail(w, error, "there is not enough data for", w->header.tensors[w->current].name);
    return file_end(&w->file, error);
}

// ------------------------------------------------------------------------------------------------
// 3. Reader
//
// Uses read calls, not mmap: a file that is truncated while it is read causes an error, not a signal.

typedef struct {
    int file;                  // open descriptor
    size_t data_start;         // in the file
    SafetensorsHeader header;
    char path[FILE_PATH_MAX];
} SafetensorsFile;

static inline void safetensors_close(SafetensorsFile* f) {
    if (f->file >= 0) close(f->file);
    f->file = -1;
    safetensors_header_free(&f->header);
}

// Opens a file and checks its header against its size. After a failure there is nothing to close.
static inline bool safetensors_open(SafetensorsFile* f, const char* path, Error* error) {
    memset(f, 0, sizeof *f);
    f->file = -1;
    size_t bytes;
    uint64_t length = 0;
    if (!path_copy(f->path, path, error) || (f->file = file_open(&bytes, path, error)) < 0) return false;
    bool good = true;
    if (bytes < sizeof length)
        good = fail_with(error, "%.600s is too short for a safetensors file; it was truncated", path);
    good = good && file_read_at(f->file, &length, sizeof length, 0, path, error);
    if (good && (length > bytes - sizeof length || length > SAFETENSORS_HEADER_MAX)) {
        char start[64];
        const char* instead = NULL;
        size_t n = min_size(bytes, sizeof start);
        if (file_read_at(f->file, start, n, 0, path, error)) instead = json_substitute(start, n);
        if (instead) good = fail_with(error, "%.600s %s", path, instead);
        else good = fail_with(error, "%.600s is truncated, or is not a safetensors file: it announces a header of "
                              "%llu bytes", path, (unsigned long long)length);
    }
    char* text = good ? (char*)memory_allocate(length) : NULL;
    if (good && !text) good = fail_memory(error, path, length);
    good = good && file_read_at(f->file, text, length, sizeof length, path, error);
    f->data_start = sizeof length + length;
    good = good && safetensors_header_parse(&f->header, text, length, bytes - f->data_start, path, error);
    free(text);
    if (!good) safetensors_close(f);
    return good;
}

// Reads a part of a tensor: `bytes` bytes from first_byte on, and asks the system to read ahead what follows.
static inline bool safetensors_read_range(const SafetensorsFile* f, const SafetensorsTensor* tensor, size_t first_byte,
                                          size_t bytes, void* buffer, Error* error) {
    if (first_byte > tensor->bytes || bytes > tensor->bytes - first_byte)
        return fail_with(error, "%.600s: bytes %zu to %zu were requested from %.100s, which has %zu; the shapes differ",
                         f->path, first_byte, first_byte + bytes, tensor->name, tensor->bytes);
    size_t first = f->data_start + tensor->offset + first_byte;
    if (!file_read_at(f->file, buffer, bytes, first, f->path, error)) return false;
    disk_read_ahead(f->file, first + bytes, 2 * FILE_CHUNK);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Weights

// Whether weights of this type are read and written.
static inline bool convert_knows(Dtype type) { return type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16; }

// out (n) = in (n), exactly.
static inline void convert_to_float(float* out, const void* in, Dtype type, size_t n) {
    const uint16_t* half = (const uint16_t*)in;
    bool is_bf16 = type == DTYPE_BF16;
    if (type == DTYPE_F32) memcpy(out, in, n * sizeof(float));
    #pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < (type == DTYPE_F32 ? 0 : n); i++)
        out[i] = is_bf16 ? float_from_bf16(half[i]) : float_from_f16(half[i]);
}

// The first weight that is not finite; n: there is none. Its bits without the sign are at least those of infinity.
static inline size_t convert_find_bad(const void* data, Dtype type, size_t n) {
    const uint32_t* wide = (const uint32_t*)data;
    const uint16_t* half = (const uint16_t*)data;
    uint32_t infinity = type == DTYPE_F32 ? 0x7f800000 : type == DTYPE_BF16 ? 0x7f80 : 0x7c00, most = 0;
    size_t i = 0;
    for (size_t e = 0; e < (type == DTYPE_F32 ? n : 0); e++)
        most = (wide[e] & 0x7fffffff) > most ? wide[e] & 0x7fffffff : most;
    for (size_t e = 0; e < (type == DTYPE_F32 ? 0 : n); e++)
        most = (half[e] & 0x7fffu) > most ? half[e] & 0x7fffu : most;
    if (most < infinity) return n;
    while (type == DTYPE_F32 ? (wide[i] & 0x7fffffff) < infinity : (half[i] & 0x7fffu) < infinity) i++;
    return i;
}

// out (n) = in (n), rounded to the nearest.
static inline void convert_from_float(void* out, const float* in, Dtype type, size_t n) {
    uint16_t* half = (uint16_t*)out;
    bool is_bf16 = type == DTYPE_BF16;
    if (type == DTYPE_F32) memcpy(out, in, n * sizeof(float));
    #pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < (type == DTYPE_F32 ? 0 : n); i++)
        half[i] = is_bf16 ? bf16_from_float(in[i]) : f16_from_float(in[i]);
}

#endif  // LLMTRAIN_SAFETENSORS_H
