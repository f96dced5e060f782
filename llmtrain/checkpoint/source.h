// source.h: reads a model from a checkpoint of ours, a directory of Hugging Face, or a file of llm.c. The import of
// other programs' models and the export to them (export.h) both read through this.
//
//   1. source         configuration, table of tensors, and where the pieces of each are: source_read
//   2. checkpoint     of any number of ranks, any ZeRO stage and any parts of tensors
//   3. Hugging Face   config.json, and model.safetensors or model.safetensors.index.json with its shards
//   4. llm.c          files of magic 20240326, version 3 (fp32) and 5 (bf16)
//   5. opening        source_open finds out which of them a path is; source_open_tokenizer; source_load fills a model
//   6. merging        pairs of LoRA become a part of the weights: source_merge
//
//   ModelSource source;
//   if (source_open(&source, "models/x", &error)) ...                     source.config, source.parameters
//   if (source_read(&values, &source, i, &error)) ...                     tensor i of the table, as float
//   source_close(&source);
//
// Weights may be F32, F16 or BF16; those of Hugging Face also NF4 (bnb.h), which is dequantized. Only the headers are
// kept in memory: a tensor is read when it is asked for. A tensor that is missing, superfluous, or of the wrong shape
// or type is refused by name, before any is read.

#ifndef LLMTRAIN_SOURCE_H
#define LLMTRAIN_SOURCE_H

#include "bnb.h"
#include "record.h"
#include "convert.h"
#include "../text/tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Source

#define PEFT_CONFIG "adapter_config.json"  // of a directory that holds an adapter: peft.h

// A piece of one of our tensors, contiguous in a file.
typedef struct {
    size_t tensor;               // of the table
    size_t first, count;         // elements [first, first + count) of it, part after part
    size_t number, parts;        // which part of it they are of, of how many; 0 of 0: of the whole tensor
    size_t before;               // elements of the parts before this one
    size_t file, position;       // of its first byte
    Dtype dtype;
    bool transposed;             // a whole matrix that is stored as (cols, rows)
    bool checked;                // it has a checksum, XXH64
    uint64_t hash;
    const BnbWeight* quantized;  // a whole matrix of 4 bits, which has no position; NULL: it is not
    size_t packed;               // a whole tensor of 4 bits, as a run with --quantize saves it: Tensor.quantized there
} SourcePiece;

// What an adapter changes of one of our tensors: its rows [first, first + rows) += scale * b a; DoRA then gives each
// row the length in `magnitude`. r 0: the rows become those of a.
typedef struct {
    size_t tensor, first, rows, r;
    float scale;
    float *a, *b;                // (r, cols), (rows, r); owned
    float* magnitude;            // (rows); NULL: it is not DoRA; owned
} SourcePair;

typedef struct {
    SourcePair* pairs;           // (capacity) owned
    size_t count, capacity;
} SourcePairs;

typedef struct {
    char path[FILE_PATH_MAX];    // of the model: a checkpoint, a directory, a file
    char tokenizer[FILE_PATH_MAX];  // directory of the tokenizer, if there is one, and of MODEL_FILES
    Config config;               // complete
    TokenIds ids;                // of the config.json there
    Parameters parameters;       // its table
    Weights weights;             // which row of it each weight is; owned
    SourcePairs merged;          // what source_read adds to the weights
    Dtype pairs_dtype;           // of the pairs that source_merge has taken from it
    RunBase base;                // of a checkpoint with pairs: the model that it began with
    bool trains_more;            // of such a checkpoint: not only its pairs were trained (--train)
    SafetensorsFile* files;      // (file_count), owned, without their headers; or a file of llm.c
    size_t file_count;
    SourcePiece* pieces;         // (piece_count), owned; in the order of the table once the source is open
    size_t piece_count, piece_capacity;
    BnbWeight* quantized;        // (quantized_count), owned
    size_t quantized_count;
    Dtype dtype;                 // of all weights; F32 where they differ; of quantized ones, that before
    float *chunk, *widened;      // (CHECKPOINT_CHUNK) scratch: elements as in the file, and as float; owned
    float* values;               // (largest tensor) tensor `held`; NULL: none; owned
    size_t held;
} ModelSource;

static inline void source_pairs_free(SourcePairs* p) {
    for (size_t i = 0; i < p->count; i++) {
        free(p->pairs[i].a);
        free(p->pairs[i].b);
        free(p->pairs[i].magnitude);
    }
    free(p->pairs);
    memset(p, 0, sizeof *p);
}

// Appends a pair with memory for a and, unless r is 0, b; NULL: there is none.
static inline SourcePair* source_pairs_add(SourcePairs* p, SourcePair pair, size_t cols) {
    if (p->count == p->capacity) {
        size_t capacity = 2 * p->capacity + 64;
        SourcePair* larger = (SourcePair*)realloc(p->pairs, capacity * sizeof(SourcePair));
        if (larger == NULL) return NULL;
        p->pairs = larger;
        p->capacity = capacity;
    }
    SourcePair* added = &p->pairs[p->count++];
    *added = pair;
    added->a = (float*)memory_allocate((pair.r ? pair.r : pair.rows) * cols * sizeof(float));
    added->b = (float*)memory_allocate(max_size(pair.rows * pair.r, 1) * sizeof(float));
    return added->a && added->b ? added : NULL;
}

static inline void source_close(ModelSource* s) {
    for (size_t i = 0; i < s->file_count; i++) safetensors_close(&s->files[i]);
    parameters_free(&s->parameters);
    source_pairs_free(&s->merged);
    free(s->weights.blocks);
    free(s->files);
    free(s->pieces);
    free(s->quantized);
    free(s->chunk);
    free(s->widened);
    free(s->values);
    memset(s, 0, sizeof *s);
}

static inline bool source_allocate_files(ModelSource* s, size_t files, Error* error) {
    s->files = (SafetensorsFile*)memory_allocate(files * sizeof(SafetensorsFile));
    return s->files != NULL || fail_memory(error, s->path, files * sizeof(SafetensorsFile));
}

// Begins a source whose configuration is known, with room for pieces.
static inline bool source_begin(ModelSource* s, size_t pieces, Error* error) {
    if (!convert_complete(&s->config, s->path, false, error)) return false;
    bool ok = weights_create(&s->weights, &s->parameters, &s->config, NULL, 0, 1, error);
    s->pieces = (SourcePiece*)memory_allocate(pieces * sizeof(SourcePiece));
    s->chunk = (float*)memory_allocate(CHECKPOINT_CHUNK * sizeof(float));
    s->widened = (float*)memory_allocate(CHECKPOINT_CHUNK * sizeof(float));
    s->piece_capacity = pieces;
    return ok && ((s->pieces && s->chunk && s->widened) ||
                  fail_memory(error, s->path, pieces * sizeof(SourcePiece)));
}

static inline void source_add_piece(ModelSource* s, const SourcePiece* piece) {
    assert(s->piece_count < s->piece_capacity);
    s->pieces[s->piece_count++] = *piece;
}

static inline int source_compare(const void* left, const void* right) {
    const SourcePiece* a = (const SourcePiece*)left;
    const SourcePiece* b = (const SourcePiece*)right;
    if (a->tensor != b->tensor) return a->tensor < b->tensor ? -1 : 1;
    return a->first < b->first ? -1 : a->first > b->first;
}

// Sorts the pieces, and checks that they cover the whole model exactly once.
static inline bool source_finish(ModelSource* s, Error* error) {
    qsort(s->pieces, s->piece_count, sizeof(SourcePiece), source_compare);
    const SourcePiece* piece = s->pieces;
    const SourcePiece* end = s->pieces + s->piece_count;
    s->dtype = s->piece_count ? piece->dtype : DTYPE_F32;
    for (size_t i = 0; i < s->parameters.count; i++) {
        const Tensor* t = &s->parameters.tensors[i];
        size_t reached = 0, parts = piece < end ? piece->parts : 0;
        for (; piece < end && piece->tensor == i && piece->first == reached && piece->parts == parts; piece++) {
            reached += piece->count;
            if (piece->dtype != s->dtype) s->dtype = DTYPE_F32;
        }
        if (reached != tensor_elements(t) || (piece < end && piece->tensor == i))
            return fail_with(error, "%.600s has %zu of %zu elements of %s, or some twice; it is damaged, or a file is "
                             "missing", s->path, reached, tensor_elements(t), t->name);
    }
    return true;
}

// Where element e of a piece, and what follows it, is in the whole tensor.
static inline PartRun source_run(const Tensor* t, const SourcePiece* piece, size_t e) {
    const TensorPart part = checkpoint_part_of(t, piece->number, max_size(piece->parts, 1));
    return part_run(&part, piece->first - piece->before + e);
}

// The tensor of a piece as the run has saved it.
static inline Tensor source_tensor(const ModelSource* s, const SourcePiece* piece) {
    Tensor t = s->parameters.tensors[piece->tensor];
    t.quantized = piece->packed;
    return t;
}

// Reads the 4 bits of a tensor that a run with --quantize has saved. The caller frees *stored.
static inline bool source_read_packed(uint8_t** stored, const ModelSource* s, const SourcePiece* piece, Error* error) {
    const Tensor t = source_tensor(s, piece);
    const SafetensorsFile* f = &s->files[piece->file];
    size_t bytes = tensor_stored(&t);
    *stored = (uint8_t*)memory_allocate(bytes);
    bool ok = (*stored || fail_memory(error, f->path, bytes)) &&
              file_read_at(f->file, *stored, bytes, piece->position, f->path, error);
    if (ok && hash_bytes(*stored, bytes) != piece->hash)
        ok = fail_with(error, "%.600s: %s does not match its checksum; the file is damaged", f->path, t.name);
    if (!ok) free(*stored);
    return ok;
}

// Reads a piece of 4 bits as floats, to (count), each rounded to the type that it had, as bitsandbytes does, or that
// it has in training.
static inline bool source_read_quantized(float* to, ModelSource* s, const SourcePiece* piece, Error* error) {
    Nf4 q;
    const Tensor t = source_tensor(s, piece);
    const char* path = s->files[piece->packed ? piece->file : piece->quantized->file[BNB_CODES]].path;
    uint8_t* stored = NULL;
    if (piece->packed && !source_read_packed(&stored, s, piece, error)) return false;
    for (size_t m = 0, at = 0, done = 0, rows; piece->packed && (rows = tensor_nf4_rows(&t, m)) > 0; m++) {
        nf4_layout(&q, stored + at, rows * t.cols, true);
        nf4_floats(to + done, &q, 0, q.n);
        at += nf4_bytes(q.n, true);
        done += q.n;
    }
    if (!piece->packed) {
        if (!bnb_read(&q, piece->quantized, s->files, error)) return false;
        nf4_floats(to, &q, 0, piece->count);
        stored = q.codes;
    }
    free(stored);
    for (size_t done = 0, n; done < piece->count; done += n) {
        n = min_size(CHECKPOINT_CHUNK, piece->count - done);
        convert_from_float(s->chunk, to + done, piece->dtype, n);
        convert_to_float(to + done, s->chunk, piece->dtype, n);
    }
    size_t bad = convert_find_bad(to, DTYPE_F32, piece->count);
    return bad == piece->count ||
           fail_with(error, "%.600s: element %zu of %s is not finite; use another copy", path, piece->first + bad,
                     t.name);
}

// Changes a tensor's rows by what an adapter says, in float. Each element is computed by one thread, in one order.
static inline void source_apply(float* values, const SourcePair* p, size_t cols) {
    enum { COLUMNS = 256 };
    if (p->r == 0) memcpy(values + p->first * cols, p->a, p->rows * cols * sizeof(float));
    #pragma omp parallel for
    for (size_t row = 0; row < (p->r ? p->rows : 0); row++) {
        float* w = values + (p->first + row) * cols;
        double squares = 0;
        for (size_t done = 0, n; done < cols; done += n) {
            float sums[COLUMNS] = {0};
            n = min_size(COLUMNS, cols - done);
            for (size_t k = 0; k < p->r; k++)
                for (size_t c = 0; c < n; c++)
                    sums[c] = multiply_add(p->b[row * p->r + k], p->a[k * cols + done + c], sums[c]);
            for (size_t c = 0; c < n; c++) {
                w[done + c] = multiply_add(p->scale, sums[c], w[done + c]);
                squares += (double)w[done + c] * (double)w[done + c];
            }
        }
        for (size_t c = 0; p->magnitude && c < cols; c++)
            w[c] = (float)((double)w[c] * (double)p->magnitude[row] / sqrt(squares));
    }
}

// Reads a tensor as floats: *values (elements), until the next call for another one.
static inline bool source_read(const float** values, ModelSource* s, size_t tensor, Error* error) {
    const Tensor* t = &s->parameters.tensors[tensor];
    size_t p = 0, bytes = parameters_largest(&s->parameters) * sizeof(float);
    bool held = s->values && s->held == tensor;
    if (s->values == NULL) s->values = (float*)memory_allocate(bytes);
    *values = s->values;
    if (s->values == NULL) return fail_memory(error, s->path, bytes);
    if (held) return true;
    s->held = SIZE_MAX;
    while (p < s->piece_count && s->pieces[p].tensor < tensor) p++;
    for (; p < s->piece_count && s->pieces[p].tensor == tensor; p++) {
        const SourcePiece* piece = &s->pieces[p];
        if (piece->quantized || piece->packed) {
            if (!source_read_quantized(s->values + piece->first, s, piece, error)) return false;
            continue;
        }
        const SafetensorsFile* f = &s->files[piece->file];
        size_t at = piece->position, size = dtype_bytes(piece->dtype);
        size_t bad = piece->count;
        bool moves = piece->transposed || piece->parts > 1;
        float* to = s->values + piece->first;
        Hash hash = hash_begin(0);
        for (size_t done = 0, n; done < piece->count; done += n) {
            n = min_size(CHECKPOINT_CHUNK, piece->count - done);
            if (!file_read_at(f->file, s->chunk, n * size, at, f->path, error)) return false;
            at += n * size;
            disk_read_ahead(f->file, at, 2 * FILE_CHUNK);
            hash_add(&hash, s->chunk, n * size);
            size_t first = convert_find_bad(s->chunk, piece->dtype, n);
            if (first < n && bad == piece->count) bad = done + first;
            convert_to_float(moves ? s->widened : to + done, s->chunk, piece->dtype, n);
            for (size_t e = 0; e < (piece->transposed ? n : 0); e++)
                to[(done + e) % t->rows * t->cols + (done + e) / t->rows] = s->widened[e];
            for (size_t e = 0, here; e < (piece->parts > 1 ? n : 0); e += here) {
                PartRun run = source_run(t, piece, done + e);
                here = min_size(run.count, n - e);
                memcpy(s->values + run.whole, s->widened + e, here * sizeof(float));
            }
        }
        if (piece->checked && hash_end(&hash) != piece->hash)
            return fail_with(error, "%.600s: %s does not match its checksum; the file is damaged", f->path, t->name);
        if (bad < piece->count)
            return fail_with(error, "%.600s: element %zu of %s is not finite; use another copy, or an earlier "
                             "checkpoint", f->path, source_run(t, piece, bad).whole, t->name);
    }
    for (size_t i = 0; i < s->merged.count; i++)
        if (s->merged.pairs[i].tensor == tensor) source_apply(s->values, &s->merged.pairs[i], max_size(t->cols, 1));
    s->held = tensor;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Checkpoint

// Adds the pieces of the weights in one rank's file, an entry of the manifest.
static inline bool source_add_rank(ModelSource* s, const Json* manifest, uint32_t entry, Error* error) {
    char sum[24] = "", precision[8] = "";
    SafetensorsFile* file = &s->files[s->file_count];
    CheckpointLoad load = {0};
    const OptimizerOptions none = {.kind = OPTIMIZER_ADAMW};
    FlatVector flat = {.holds = {.optimizer = &none}, .parameters = &s->parameters};  // of no rank
    load.count = checkpoint_arrays(load.arrays, &flat);
    if (!checkpoint_open_file(file, manifest, entry, s->path, error)) return false;
    size_t number = s->file_count++;
    uint32_t sums = json_get(manifest, entry, "checksums");
    bool ok = true;
    json_string(manifest, json_get(manifest, 0, "precision"), precision, sizeof precision);
    Dtype trained = strcmp(precision, "bf16") == 0 ? DTYPE_BF16 : strcmp(precision, "fp16") == 0 ? DTYPE_F16 : DTYPE_F32;
    for (size_t i = 0; ok && i < file->header.count; i++) {
        const SafetensorsTensor* saved = &file->header.tensors[i];
        CheckpointPiece found;
        unsigned long long hash = 0;
        bool known;
        if (!checkpoint_piece(&found, &known, &load, &flat, file->path, saved->name, error)) ok = false;
        if (!ok || !known) continue;
        size_t count = slice_length(found.elements);
        const Tensor* t = &s->parameters.tensors[found.tensor];
        ok = (t->quantized ? saved->type == DTYPE_U8 && count == tensor_stored(t) : convert_knows(saved->type)) &&
             saved->bytes == count * dtype_bytes(saved->type) &&
             json_string(manifest, json_get(manifest, sums, saved->name), sum, sizeof sum) &&
             sscanf(sum, "%llx", &hash) == 1 && s->piece_count < s->piece_capacity;
        if (!ok)
            fail_with(error, "%.600s: %.160s is not what the manifest says; it is damaged", file->path, saved->name);
        if (!ok || count == 0) continue;
        const SourcePiece piece = {.tensor = found.tensor, .first = found.before + found.elements.first,
                                   .count = t->quantized ? tensor_elements(t) : count,
                                   .number = found.part.number, .parts = found.part.count,
                                   .before = found.before, .file = number,
                                   .position = file->data_start + saved->offset,
                                   .dtype = t->quantized ? trained : saved->type, .transposed = false, .checked = true,
                                   .hash = hash, .packed = t->quantized};
        source_add_piece(s, &piece);
    }
    safetensors_header_free(&file->header);
    return ok;
}

// Opens the checkpoint at s->path, a step_N directory.
static inline bool source_open_checkpoint(ModelSource* s, Error* error) {
    Json manifest;
    RunRecord record;
    char trained[FILE_PATH_MAX];
    if (!record_open(&manifest, &record, s->path, error)) return false;
    snprintf(s->tokenizer, sizeof s->tokenizer, "%.4000s/../tokenizer", s->path);
    s->config = record.config;
    s->base = record.base;
    s->trains_more = json_string(&manifest, json_get(&manifest, json_get(&manifest, 0, "flags"), "train"), trained,
                                 sizeof trained) && trained[0];
    uint32_t files = json_get(&manifest, 0, "files");
    size_t pieces = 0;
    for (uint32_t e = json_first(&manifest, files); e != JSON_NONE; e = json_next(&manifest, e))
        pieces += json_count(&manifest, json_get(&manifest, e, "checksums"));
    bool ok = source_allocate_files(s, json_count(&manifest, files), error) && source_begin(s, pieces, error);
    for (uint32_t e = json_first(&manifest, files); ok && e != JSON_NONE; e = json_next(&manifest, e))
        ok = source_add_rank(s, &manifest, e, error);
    json_free(&manifest);
    return ok && source_finish(s, error);
}

// Opens the newest checkpoint of a run, if one is found. A run that trains may remove it meanwhile, after a newer one.
static inline bool source_open_newest(ModelSource* s, const char* out, bool* found, Error* error) {
    for (int tries = 10;; tries--) {
        uint64_t step = 0;
        if (!checkpoint_find_before(&step, found, out, UINT64_MAX, error)) return false;
        if (!*found) return true;
        checkpoint_path(s->path, out, step, "");
        bool ok = source_open_checkpoint(s, error);
        snprintf(s->tokenizer, sizeof s->tokenizer, "%.4000s/tokenizer", out);  // not by way of a step that may go
        if (ok) return true;
        if (tries == 0 || access(s->path, F_OK) == 0) return false;
        source_close(s);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Hugging Face

#define HF_FILES_MAX ((size_t)10000)

// A tensor of the files.
typedef struct {
    const SafetensorsTensor* tensor;
    size_t file;
    bool used;
} HfTensor;

// The tensors of all files.
typedef struct {
    HfTensor* tensors;           // (count) sorted by name
    size_t count;
} HfTensors;

static inline int hf_compare(const void* left, const void* right) {
    return strcmp(((const HfTensor*)left)->tensor->name, ((const HfTensor*)right)->tensor->name);
}

static inline int hf_compare_name(const void* name, const void* tensor) {
    return strcmp((const char*)name, ((const HfTensor*)tensor)->tensor->name);
}

// The tensor with a name; NULL if there is none.
static inline HfTensor* hf_find(const HfTensors* h, const char* name) {
    return (HfTensor*)bsearch(name, h->tensors, h->count, sizeof(HfTensor), hf_compare_name);
}

static inline bool hf_open_file(ModelSource* s, const char* name, Error* error) {
    char path[FILE_PATH_MAX];
    snprintf(path, sizeof path, "%.3800s/%.250s", s->path, name);
    if (!safetensors_open(&s->files[s->file_count], path, error)) return false;
    s->file_count++;
    return true;
}

// The name of a file in its directory.
static inline const char* hf_file_name(const SafetensorsFile* file) { return strrchr(file->path, '/') + 1; }

// Opens the shards that the index names, each once.
static inline bool hf_open_shards(ModelSource* s, const Json* index, const char* path, Error* error) {
    uint32_t map = json_get(index, 0, "weight_map");
    char name[256];
    if (!json_is(index, map, JSON_OBJECT))
        return fail_with(error, "%.600s has no object \"weight_map\"; use another copy", path);
    bool ok = source_allocate_files(s, min_size(json_count(index, map), HF_FILES_MAX), error);
    for (uint32_t i = json_first(index, map); ok && i != JSON_NONE; i = json_next(index, i)) {
        size_t f = 0;
        ok = (json_string(index, i, name, sizeof name) && name[0] && !strchr(name, '/')) ||
             fail_with(error, "%.600s: \"%.80s\" is in no file of the directory; use another copy", path,
                       json_key(index, i));
        while (ok && f < s->file_count && strcmp(hf_file_name(&s->files[f]), name) != 0) f++;
        if (!ok || f < s->file_count) continue;
        ok = f < HF_FILES_MAX ||
             fail_with(error, "%.600s names more than %zu files; use another copy", path, HF_FILES_MAX);
        ok = ok && hf_open_file(s, name, error);
    }
    return ok;
}

// Checks that the index and its shards agree: each tensor is in the file that the index names.
static inline bool hf_check_index(const ModelSource* s, const HfTensors* h, const Json* index, const char* path,
                                  Error* error) {
    uint32_t map = json_get(index, 0, "weight_map");
    for (uint32_t i = json_first(index, map); i != JSON_NONE; i = json_next(index, i)) {
        char name[256] = "";
        const HfTensor* found = hf_find(h, json_key(index, i));
        const char* in = found ? hf_file_name(&s->files[found->file]) : "";
        if (!json_string(index, i, name, sizeof name) || strcmp(in, name) != 0)
            return fail_with(error, "%.600s: \"%.80s\" is not in %.80s; the files are of different models", path,
                             json_key(index, i), name);
    }
    return json_count(index, map) == h->count ||
           fail_with(error, "%.600s names %u tensors, but the files have %zu; they are of different models", path,
                     (unsigned)json_count(index, map), h->count);
}

// Opens all files of weights in the directory at s->path, and sorts their tensors. The caller frees h->tensors.
static inline bool hf_open(HfTensors* h, ModelSource* s, Error* error) {
    char path[FILE_PATH_MAX];
    char* text = NULL;
    size_t bytes;
    Json index = {0};
    memset(h, 0, sizeof *h);
    snprintf(path, sizeof path, "%.4000s/model.safetensors", s->path);
    bool one = access(path, F_OK) == 0, ok;
    if (one) {
        ok = source_allocate_files(s, 1, error) && hf_open_file(s, "model.safetensors", error);
    } else {
        snprintf(path, sizeof path, "%.4000s/model.safetensors.index.json", s->path);
        if (access(path, F_OK) != 0)
            return fail_with(error, "%.600s has neither model.safetensors nor model.safetensors.index.json; save the "
                             "model as safetensors", s->path);
        ok = file_read(path, JSON_BYTES_MAX, &text, &bytes, error) && json_parse(&index, text, bytes, path, error);
        free(text);
        ok = ok && hf_open_shards(s, &index, path, error);
    }
    size_t count = 0;
    for (size_t f = 0; f < s->file_count; f++) count += s->files[f].header.count;
    h->tensors = ok ? (HfTensor*)memory_allocate(count * sizeof(HfTensor)) : NULL;
    if (ok && h->tensors == NULL) ok = fail_memory(error, path, count * sizeof(HfTensor));
    for (size_t f = 0; ok && f < s->file_count; f++) {
        for (size_t i = 0; i < s->files[f].header.count; i++) {
            h->tensors[h->count].tensor = &s->files[f].header.tensors[i];
            h->tensors[h->count++].file = f;
        }
    }
    if (ok) qsort(h->tensors, h->count, sizeof(HfTensor), hf_compare);
    for (size_t i = 1; ok && i < h->count; i++)
        if (hf_compare(&h->tensors[i - 1], &h->tensors[i]) == 0)
            ok = fail_with(error, "%.600s: two tensors are called %.100s; use another copy", path,
                           h->tensors[i].tensor->name);
    ok = ok && (one || hf_check_index(s, h, &index, path, error));
    json_free(&index);
    return ok;
}

// The weight with a name, NULL if there is none. In a file of a model without its head the names lack their prefix
// ("transformer.", "model.").
static inline HfTensor* hf_find_weight(const HfTensors* h, const char* name) {
    const char* dot = strchr(name, '.');
    HfTensor* found = hf_find(h, name);
    return found == NULL && dot && strncmp(name, "lm_head", 7) != 0 ? hf_find(h, dot + 1) : found;
}

// Adds a matrix that bitsandbytes has quantized.
static inline bool source_add_quantized(ModelSource* s, HfTensors* h, const ForeignTensor* f, const char* name,
                                        Error* error) {
    BnbWeight* w;
    if (s->quantized == NULL) s->quantized = (BnbWeight*)memory_allocate(s->piece_capacity * sizeof *w);
    if (s->quantized == NULL) return fail_memory(error, s->path, s->piece_capacity * sizeof *w);
    w = &s->quantized[s->quantized_count++];
    if (!bnb_open(w, s->files, s->file_count, name, error)) return false;
    if (f->cols == 0 || w->rows != f->rows || w->cols != f->cols)
        return fail_with(error, "%.600s: %.100s is a matrix of %zu x %zu, which is not the shape that config.json asks "
                         "for; they are of different models", s->files[w->file[BNB_CODES]].path, name, w->rows,
                         w->cols);
    for (int k = 0; k < BNB_PARTS; k++) {
        char part[SAFETENSORS_NAME_MAX + 64];
        snprintf(part, sizeof part, "%s%s", name, BNB_SUFFIXES[k]);
        HfTensor* found = hf_find(h, part);
        if (found) found->used = true;
    }
    const SourcePiece piece = {.tensor = f->tensor, .first = f->first * f->cols, .count = f->rows * f->cols,
                               .file = w->file[BNB_CODES], .dtype = w->dtype, .quantized = w};
    source_add_piece(s, &piece);
    return true;
}

// Adds one of their tensors as a piece, if its shape and type are right.
static inline bool source_add_foreign(ModelSource* s, HfTensors* h, const ForeignTensor* f, Error* error) {
    HfTensor* found = hf_find_weight(h, f->name);
    if (found == NULL)
        return fail_with(error, "%.600s has no tensor %s, but %.100s and others; it is of another model than its "
                         "config.json says, or was saved with a wrapper's prefix", s->path, f->name,
                         h->count ? h->tensors[0].tensor->name : "none");
    const SafetensorsTensor* saved = found->tensor;
    if (bnb_is(s->files, s->file_count, saved->name)) return source_add_quantized(s, h, f, saved->name, error);
    size_t shape[2] = {f->transposed ? f->cols : f->rows, f->transposed ? f->rows : f->cols};
    char expected[64];
    int dims = f->cols ? 2 : 1;
    snprintf(expected, sizeof expected, dims == 2 ? "%zu x %zu" : "%zu", shape[0], shape[1]);
    if (saved->dims != dims || saved->shape[0] != shape[0] || (dims == 2 && saved->shape[1] != shape[1]))
        return fail_with(error, "%.600s: %.100s is not %s, the shape that config.json asks for; they are of different "
                         "models", s->files[found->file].path, saved->name, expected);
    if (!convert_knows(saved->type))
        return fail_with(error, "%.600s: %.100s is of type %s; weights must be F32, F16 or BF16: save the model in one "
                         "of those types", s->files[found->file].path, saved->name, DTYPES[saved->type].safetensors);
    size_t width = f->cols ? f->cols : 1;
    const SourcePiece piece = {.tensor = f->tensor, .first = f->first * width, .count = f->rows * width,
                               .file = found->file, .position = s->files[found->file].data_start + saved->offset,
                               .dtype = saved->type, .transposed = f->transposed};
    source_add_piece(s, &piece);
    found->used = true;
    return true;
}

// If a head was saved although config.json ties it to the embedding, checks that the two are equal: from version 5 on,
// transformers treats a different one as a separate head.
static inline bool source_check_head(ModelSource* s, const HfTensors* h, const char* embedding, Error* error) {
    const HfTensor *head = hf_find(h, "lm_head.weight"), *wte = hf_find_weight(h, embedding);
    if (!s->config.tied || head == NULL || wte == NULL) return true;
    const HfTensor* both[2] = {head, wte};
    void* parts[2] = {s->chunk, s->widened};
    size_t bytes = wte->tensor->bytes, n;
    bool same = head->tensor->type == wte->tensor->type && head->tensor->bytes == bytes;
    for (size_t done = 0; same && done < bytes; done += n) {
        n = min_size(CHECKPOINT_CHUNK * sizeof(float), bytes - done);
        for (int i = 0; i < 2; i++)
            if (!safetensors_read_range(&s->files[both[i]->file], both[i]->tensor, done, n, parts[i], error))
                return false;
        same = memcmp(parts[0], parts[1], n) == 0;
    }
    return same || fail_with(error, "%.600s has a lm_head.weight that is not %s, though config.json ties them; set "
                             "\"tie_word_embeddings\" to false, or remove it", s->path, embedding);
}

// Opens the directory at s->path.
static inline bool source_open_hf(ModelSource* s, Error* error) {
    char path[FILE_PATH_MAX];
    HfTensors h;
    ForeignTensor* list = NULL;
    size_t count = 0;
    snprintf(path, sizeof path, "%.4000s/config.json", s->path);
    snprintf(s->tokenizer, sizeof s->tokenizer, "%.4000s", s->path);
    if (!hf_config_read(&s->config, path, error)) return false;
    bool ok = hf_open(&h, s, error) && source_begin(s, h.count, error) &&
              convert_list(&list, &count, &s->config, &s->parameters, error);
    for (size_t i = 0; ok && i < count; i++) ok = source_add_foreign(s, &h, &list[i], error);
    for (size_t i = 0; ok && i < h.count; i++)
        if (!h.tensors[i].used && !convert_ignores(h.tensors[i].tensor->name, &s->config))
            ok = fail_with(error, "%.600s: %.100s belongs to no tensor of a model as config.json describes it; they "
                           "are of different models", s->files[h.tensors[i].file].path, h.tensors[i].tensor->name);
    ok = ok && source_check_head(s, &h, list[0].name, error);  // the first of the list is the embedding
    for (size_t i = 0; i < s->file_count; i++) safetensors_header_free(&s->files[i].header);
    free(list);
    free(h.tensors);
    return ok && source_finish(s, error);
}

// ------------------------------------------------------------------------------------------------
// 4. llm.c
//
// A header of 256 int32: magic, version, context, V, L, H, C, Vp; then the tensors in the order of TENSOR_NAMES, each
// for all blocks. The vocabulary is padded to Vp rows.

enum { LLMC_HEADER = 256, LLMC_MAGIC = 20240326, LLMC_FP32 = 3, LLMC_BF16 = 5 };

// tensors: the number in our table of each tensor of a file of llm.c, in the file's order. Returns how many there are.
static inline size_t llmc_order(size_t* tensors, const Parameters* p) {
    size_t count = 0, block;
    for (size_t r = 0; r < TENSOR_NAME_COUNT; r++)
        for (size_t i = 0; i < p->count && TENSOR_NAMES[r].gpt2; i++)
            if (convert_matches(&block, p->tensors[i].name, TENSOR_NAMES[r].ours)) tensors[count++] = i;
    return count;
}

// Opens the file at s->path.
static inline bool source_open_llmc(ModelSource* s, Error* error) {
    int32_t header[LLMC_HEADER];
    size_t bytes;
    if (!source_allocate_files(s, 1, error)) return false;
    int file = s->files[0].file = file_open(&bytes, s->path, error);
    if (file < 0) return false;
    memcpy(s->files[0].path, s->path, sizeof s->path);
    s->file_count = 1;
    if (bytes < sizeof header) return fail_with(error, "%.600s is not a model file: it is too short", s->path);
    if (!file_read_at(file, header, sizeof header, 0, s->path, error)) return false;
    if (header[0] != LLMC_MAGIC)
        return fail_with(error, "%.600s is not an llm.c model file; give a run, a checkpoint, a Hugging Face "
                         "directory, or an llm.c file", s->path);
    if (header[1] != LLMC_FP32 && header[1] != LLMC_BF16)
        return fail_with(error, "%.600s has version %d; versions 3 (fp32) and 5 (bf16) are supported: write it again "
                         "with train_gpt2.py", s->path, header[1]);
    for (int i = 2; i < 8; i++)
        if (header[i] < 1)
            return fail_with(error, "%.600s has a size of %d in its header; it is damaged", s->path, header[i]);
    const Config config = {.family = FAMILY_GPT2, .layers = (size_t)header[4], .heads = (size_t)header[5],
                           .channels = (size_t)header[6], .context = (size_t)header[2], .vocab = (size_t)header[3],
                           .tied = true};
    s->config = config;
    size_t padded = (size_t)header[7], position = sizeof header;
    Dtype dtype = header[1] == LLMC_FP32 ? DTYPE_F32 : DTYPE_BF16;
    if (padded < config.vocab || padded > ((size_t)1 << 25))
        return fail_with(error, "%.600s has %zu rows for a vocabulary of %zu; it is damaged", s->path, padded,
                         config.vocab);
    if (!source_begin(s, 16 * config.layers + 16, error)) return false;
    size_t* order = (size_t*)memory_allocate(s->parameters.count * sizeof(size_t));
    if (order == NULL) return fail_memory(error, s->path, s->parameters.count * sizeof(size_t));
    size_t count = llmc_order(order, &s->parameters);
    for (size_t i = 0; i < count; i++) {
        const Tensor* t = &s->parameters.tensors[order[i]];
        size_t n = tensor_elements(t), rows = i == 0 ? padded : t->rows;  // the first is the token embedding
        const SourcePiece piece = {.tensor = order[i], .count = n, .position = position, .dtype = dtype};
        source_add_piece(s, &piece);
        position += n / t->rows * rows * dtype_bytes(dtype);
    }
    free(order);
    if (position != bytes)
        return fail_with(error, "%.600s has %zu bytes where its header asks for %zu; it is truncated, or another "
                         "model's", s->path, bytes, position);
    return source_finish(s, error);
}

// ------------------------------------------------------------------------------------------------
// 5. Opening

// Whether a directory has a file of this name. If the system does not say, *known becomes false, with an error.
static inline bool source_has(bool* known, const char* directory, const char* name, Error* error) {
    char path[FILE_PATH_MAX];
    bool there;
    snprintf(path, sizeof path, "%.3900s/%s", directory, name);
    if (directory[0] == 0) return false;  // of a file of llm.c
    if (!path_look(&there, path, error)) *known = false;
    return there;
}

// Whether a directory has the files of a tokenizer; *known as above.
static inline bool source_has_tokenizer(bool* known, const char* directory, Error* error) {
    bool there = source_has(known, directory, TOKENIZER_FILES[FILE_JSON], error);
    for (int i = 0; i < 2 && !there; i++)
        there = source_has(known, directory, GPT2_FILES[i][0], error) &&
                source_has(known, directory, GPT2_FILES[i][1], error);
    for (int i = 0; i < FOREIGN_TOKENIZER_COUNT && !there; i++)  // these are refused when they are opened
        there = source_has(known, directory, FOREIGN_TOKENIZERS[i], error);
    for (size_t i = 0; i < PATTERNS_COUNT && !there; i++) {
        char name[32];
        if (!PATTERNS[i].name) continue;
        ranks_name(name, &PATTERNS[i]);
        there = source_has(known, directory, name, error);
    }
    return there;
}

// What a model of Hugging Face says of its tokens, and of generation. A run that begins from one keeps them next to its
// tokenizer, and an export has the same: so Hugging Face's programs generate as with the model it began from.
static const char* const MODEL_FILES[2] = {"config.json", "generation_config.json"};

// Copies a file of MODEL_FILES, if the directory has it.
static inline bool source_copy(bool* there, const char* from, const char* to, int file, Error* error) {
    char path[FILE_PATH_MAX], *text;
    size_t bytes;
    bool known = true;
    *there = source_has(&known, from, MODEL_FILES[file], error);
    if (!*there) return known;
    snprintf(path, sizeof path, "%.3900s/%s", from, MODEL_FILES[file]);
    if (!file_read(path, CONFIG_JSON_MAX, &text, &bytes, error)) return false;
    snprintf(path, sizeof path, "%.3900s/%s", to, MODEL_FILES[file]);
    bool ok = file_write_atomic(path, text, bytes, error);
    free(text);
    return ok;
}

// Reads the ids of tokens in the directory, from the first of MODEL_FILES, or, `generating`, from the second if that
// names an end.
static inline bool source_read_ids(TokenIds* ids, const char* directory, bool generating, Error* error) {
    for (int file = generating ? 1 : 0; file >= 0; file--) {
        char path[FILE_PATH_MAX];
        bool known = true;
        TokenIds none = {.begin = -1, .pad = -1};
        *ids = none;
        snprintf(path, sizeof path, "%.3900s/%s", directory, MODEL_FILES[file]);
        bool there = source_has(&known, directory, MODEL_FILES[file], error);
        if (!known || (there && !hf_read_ids(ids, path, error))) return false;
        if (ids->count > 0) break;
    }
    return true;
}

// Opens the tokenizer of a model of V tokens, if the directory has one. Without one it is the byte tokenizer if V is
// 256; otherwise it is not known, and its vocabulary is 0. The caller closes it in any case.
static inline bool source_open_tokenizer(Tokenizer* tokenizer, const char* directory, size_t V, Error* error) {
    bool known = true, there = source_has_tokenizer(&known, directory, error);
    *tokenizer = tokenizer_of_bytes();
    if (!known) return false;
    if (!there && V != (size_t)tokenizer->vocabulary) memset(tokenizer, 0, sizeof *tokenizer);
    if (there && !tokenizer_open(tokenizer, directory, NULL, error)) return false;
    bool fits = tokenizer_fits(tokenizer, V);
    if (fits && source_read_ids(&tokenizer->generation, directory, true, error)) return true;
    if (!fits)
        fail_with(error, "the tokenizer in %.600s has %d tokens, but the model %zu; they do not belong together, so "
                  "put the model's own tokenizer there", directory, tokenizer->vocabulary, V);
    tokenizer_close(tokenizer);
    return false;
}

// Opens the model at a path: a checkpoint (a step_N directory), a run (then its newest checkpoint), a directory of
// Hugging Face, or a file of llm.c. After a failure there is nothing to close.
static inline bool source_open(ModelSource* s, const char* path, Error* error) {
    bool found = false, known = true, ok = false;
    memset(s, 0, sizeof *s);
    if (!path_copy(s->path, path, error)) return false;
    if (access(path, F_OK) != 0) return fail_file(error, "open", path);
    if (!directory_exists(path)) {
        ok = source_open_llmc(s, error);
    } else if (source_has(&known, path, "manifest.json", error)) {
        ok = source_open_checkpoint(s, error);
    } else if (known && source_has(&known, path, "config.json", error)) {
        ok = source_open_hf(s, error);
    } else if (known) {
        bool adapter = source_has(&known, path, PEFT_CONFIG, error);
        ok = source_open_newest(s, path, &found, error);
        if (ok && !found && adapter)
            ok = fail_with(error, "%.600s holds a LoRA adapter, not a model; give the model that it was trained on, "
                           "and the adapter with --adapter", path);
        if (ok && !found)
            ok = fail_with(error, "%.600s holds no model: neither checkpoints nor config.json; give a run, a "
                           "checkpoint, a Hugging Face directory, or an llm.c file", path);
    }
    ok = ok && source_read_ids(&s->ids, s->tokenizer, false, error);
    if (!ok) source_close(s);
    return ok;
}

// Says on a stream if weights of a source are stored in 4 bits; kept: and are used so.
static inline void source_say_quantized(const ModelSource* s, bool kept, FILE* out) {
    if (s->quantized_count > 0)
        say(out, "note: %zu matrices of %s are stored in 4 bits (NF4)%s", s->quantized_count, s->path,
            kept ? "" : " and are dequantized");
}

// Copies the 4 bits that the source has of elements [first, first + count) of a tensor, if they are a whole matrix and
// no adapter is merged with them: *found. to: nf4_bytes of them.
static inline bool source_copy_nf4(uint8_t* to, bool* found, const ModelSource* s, size_t tensor, size_t first,
                                   size_t count, Error* error) {
    *found = false;
    for (size_t i = 0; i < s->merged.count; i++)
        if (s->merged.pairs[i].tensor == tensor) return true;
    for (size_t i = 0; i < s->piece_count && !*found; i++) {
        const SourcePiece* piece = &s->pieces[i];
        Nf4 q;
        if (piece->tensor != tensor || piece->first != first || piece->count != count || !piece->quantized ||
            !piece->quantized->doubled) continue;
        if (!bnb_read(&q, piece->quantized, s->files, error)) return false;
        memcpy(to, q.codes, nf4_bytes(count, true));
        free(q.codes);
        *found = true;
    }
    return true;
}

// Sets a tensor of a model that is quantized, from its values, or from the 4 bits that the source has: quantizing what
// was dequantized would give other scales. theirs: its number in the source's table.
static inline bool source_quantize(Model* model, TensorId id, const ModelSource* s, size_t theirs, const float* values,
                                   Error* error) {
    const Tensor* t = model_tensor(model, id);
    const SourcePiece* packed = NULL;
    size_t bytes = tensor_stored(t), first = 0;
    uint8_t* stored = NULL;
    bool ok = true, found;
    for (size_t i = 0; i < s->piece_count; i++)
        if (s->pieces[i].tensor == theirs && s->pieces[i].packed) packed = &s->pieces[i];
    if (packed && !source_read_packed(&stored, s, packed, error)) return false;
    if (!packed) stored = (uint8_t*)memory_allocate(bytes);
    if (stored == NULL) return fail_memory(error, s->path, bytes);
    if (!packed) memset(stored, 0, bytes);
    for (size_t m = 0, at = 0, rows; !packed && ok && (rows = tensor_nf4_rows(t, m)) > 0; m++) {
        Nf4 q;
        nf4_layout(&q, stored + at, rows * t->cols, true);
        ok = source_copy_nf4(stored + at, &found, s, theirs, first, q.n, error) &&
             (found || nf4_quantize(&q, values + first, t->name, error));
        at += nf4_bytes(q.n, true);
        first += q.n;
    }
    if (ok) device_upload(flat_param(&model->flat, t), stored, bytes, model->stream);
    free(stored);
    return ok;
}

// Sets a tensor of a model, or this rank's part of it, from the values of the whole tensor.
static inline bool source_set(Model* model, TensorId id, const float* values, Error* error) {
    const Tensor* t = model_tensor(model, id);
    size_t elements = tensor_elements(t), size = min_size(elements, INIT_PIECE);
    if (!tensor_is_divided(t)) return flat_set_params(&model->flat, id, 0, values, elements, error);
    float* own = (float*)memory_allocate(max_size(size, 1) * sizeof(float));
    bool ok = own != NULL || fail_with(error, "out of memory for a piece of the weights");
    for (size_t first = 0; ok && first < elements; first += size) {
        size_t count = min_size(size, elements - first);
        for (size_t e = 0, n; e < count; e += n) {
            PartRun run = part_run(&t->part, first + e);
            n = min_size(run.count, count - e);
            memcpy(own + e, values + run.whole, n * sizeof(float));
        }
        ok = flat_set_params(&model->flat, id, first, own, count, error);
    }
    free(own);
    return ok;
}

// Adds the values of a tensor to a hash, each rounded to bfloat16: so copies of a model in other dtypes have its hash.
static inline void source_hash_add(Hash* hash, const float* values, size_t n) {
    uint16_t rounded[4096];
    for (size_t done = 0, count; done < n; done += count) {
        count = min_size(sizeof rounded / sizeof rounded[0], n - done);
        convert_from_float(rounded, values + done, DTYPE_BF16, count);
        hash_add(hash, rounded, count * sizeof rounded[0]);
    }
}

// The hash of a model's weights, without pairs, its own or others: *hash, by which an adapter knows its base.
static inline bool source_hash(uint64_t* value, ModelSource* s, Error* error) {
    const SourcePairs merged = s->merged, none = {0};
    Hash hash = hash_begin(0);
    bool ok = true;
    s->merged = none;
    s->held = SIZE_MAX;
    for (size_t i = 0; ok && i < s->parameters.count; i++) {
        const float* values;
        if (s->parameters.tensors[i].adapter) continue;
        ok = source_read(&values, s, i, error);
        if (ok) source_hash_add(&hash, values, tensor_elements(&s->parameters.tensors[i]));
    }
    s->merged = merged;
    s->held = SIZE_MAX;
    *value = hash_end(&hash);
    return ok;
}

// Fills in the weights of a model of the same configuration, except that its context may be shorter, and a llama's also
// longer, and that it may have pairs of LoRA that the source does not have: these stay as they are. With pairs, s->base
// is then what they were trained beside. flag: the one that named the source.
static inline bool source_load(Model* model, ModelSource* s, const char* flag, Error* error) {
    const Config* here = &model->config;
    Config* there = &s->config;
    bool added = there->lora == 0 && here->lora > 0;
    if (added) config_copy_lora(there, here);
    if (model->config.family == FAMILY_LLAMA || model->config.context < there->context)
        there->context = model->config.context;
    if (!fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, there, &model->config, flag, s->path, error))
        return fail_as(error, ERROR_USAGE);
    bool ok = true;
    Hash hash = hash_begin(0);
    Progress progress = progress_begin("loading", model->parameters.true_size);
    for (uint32_t i = 0, theirs = 0; ok && i < model->parameters.count; i++) {
        const TensorId id = {i};
        const Tensor* t = &model->parameters.tensors[i];
        const float* values;
        if (added && t->adapter) continue;
        ok = source_read(&values, s, theirs, error) &&
             (t->quantized ? source_quantize(model, id, s, theirs, values, error) :
              source_set(model, id, values, error));
        theirs++;
        if (ok && here->lora > 0 && !t->adapter) source_hash_add(&hash, values, part_whole_elements(&t->part));
        if (model->flat.options.rank == 0) progress_step(&progress, part_whole_elements(&t->part));
    }
    progress_end(&progress);
    if (s->base.path[0] && !s->trains_more) return ok;
    memcpy(s->base.path, s->path, sizeof s->path);
    s->base.hash = hash_end(&hash);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 6. Merging

// The layers of a block that may have pairs.
enum { BLOCK_LINEARS = 4 };
static inline void block_linears(const Linear* linears[BLOCK_LINEARS], const Block* b) {
    const Linear* all[BLOCK_LINEARS] = {&b->qkv, &b->attention_out, &b->ffn_in, &b->ffn_out};
    memcpy(linears, all, sizeof all);
}

// Reads the pairs of LoRA that the model has. renumber: the rows of its table in that of the same model without pairs.
static inline bool source_read_pairs(ModelSource* s, const size_t* renumber, Error* error) {
    for (size_t i = 0; i < s->config.layers * BLOCK_LINEARS; i++) {
        const Linear* linears[BLOCK_LINEARS];
        block_linears(linears, &s->weights.blocks[i / BLOCK_LINEARS]);
        const Linear* linear = linears[i % BLOCK_LINEARS];
        size_t cols = s->parameters.tensors[linear->weight.row].cols, r = s->config.lora;
        for (size_t k = 0; k < linear->pair_count; k++) {
            const LoraPair* from = &linear->pairs[k];
            const float* values;
            SourcePair pair = {.tensor = renumber[linear->weight.row], .first = from->first, .rows = from->rows, .r = r,
                               .scale = config_lora_scale(&s->config)};
            SourcePair* to = source_pairs_add(&s->merged, pair, cols);
            if (to == NULL) return fail_memory(error, s->path, (cols + from->rows) * r * sizeof(float));
            if (!source_read(&values, s, from->a.row, error)) return false;
            memcpy(to->a, values, r * cols * sizeof(float));
            if (!source_read(&values, s, from->b.row, error)) return false;
            memcpy(to->b, values, from->rows * r * sizeof(float));
        }
    }
    return true;
}

// Makes a model that has pairs of LoRA one that has none, and whose weights are merged with them as they are read.
static inline bool source_merge(ModelSource* s, Error* error) {
    Parameters with = s->parameters;
    const Config none = {.lora = 0};
    size_t kept = 0, *renumber;
    s->pairs_dtype = s->dtype;
    if (s->config.lora == 0) return true;
    renumber = (size_t*)memory_allocate(with.count * sizeof(size_t));
    if (renumber == NULL) return fail_memory(error, s->path, with.count * sizeof(size_t));
    for (size_t i = 0, next = 0; i < with.count; i++) renumber[i] = with.tensors[i].adapter ? SIZE_MAX : next++;
    bool ok = source_read_pairs(s, renumber, error);
    for (size_t i = 0; ok && i < s->piece_count; i++) {
        SourcePiece piece = s->pieces[i];
        if (with.tensors[piece.tensor].adapter) s->pairs_dtype = piece.dtype;
        piece.tensor = renumber[piece.tensor];
        if (piece.tensor != SIZE_MAX) s->pieces[kept++] = piece;
    }
    free(renumber);
    if (!ok) return false;
    s->piece_count = kept;
    s->held = SIZE_MAX;
    memset(&s->parameters, 0, sizeof s->parameters);
    parameters_free(&with);
    free(s->weights.blocks);
    memset(&s->weights, 0, sizeof s->weights);
    config_copy_lora(&s->config, &none);
    return weights_create(&s->weights, &s->parameters, &s->config, NULL, 0, 1, error) && source_finish(s, error);
}

#endif  // LLMTRAIN_SOURCE_H
