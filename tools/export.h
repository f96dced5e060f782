// export.h: writes a model in another program's format: a Hugging Face directory, a file of llm.c, a GGUF file.
//
//   Export e = {&source, &tokenizer, EXPORT_BF16, "models/x.tmp", 5e9};
//   if (export_hf(&e, &error)) ...                                     into the directory, which exists
//
// A model is written a tensor at a time, as source.h reads it: no more than one is in memory. The files are flushed;
// the caller gives the directory its final name (tools/export.cu). A model that another program's format cannot express
// is refused before anything is written. Weights are rounded to nearest, or not at all if they keep their dtype.

#ifndef LLMTRAIN_EXPORT_H
#define LLMTRAIN_EXPORT_H

#include "gguf_model.h"
#include "../llmtrain/checkpoint/source.h"

typedef enum { EXPORT_F32, EXPORT_F16, EXPORT_BF16, EXPORT_Q8_0 } ExportType;
#define EXPORT_TYPES "f32|f16|bf16|q8_0"

typedef struct {
    ModelSource* source;
    const Tokenizer* tokenizer;   // NULL: not known
    ExportType type;
    const char* directory;
    size_t shard_bytes;           // of a file of weights, at most, unless one tensor has more
} Export;

// The type of elements; for Q8_0, which has none, float.
static inline Dtype export_dtype(ExportType type) {
    return type == EXPORT_F16 ? DTYPE_F16 : type == EXPORT_BF16 ? DTYPE_BF16 : DTYPE_F32;
}

// Bytes of the largest tensor, as float.
static inline size_t export_largest(const ModelSource* s) {
    return parameters_largest(&s->parameters) * sizeof(float);
}

static inline bool export_write_text(const Export* e, const char* name, const JsonWriter* w, Error* error) {
    char path[FILE_PATH_MAX];
    snprintf(path, sizeof path, "%.4000s/%s", e->directory, name);
    return file_write_atomic(path, w->text, w->bytes, error);
}

// ------------------------------------------------------------------------------------------------
// Hugging Face

// A file of the weights: tensors [first, end) of the list.
typedef struct {
    size_t first, end;
    char name[64];
} HfShard;

// Divides the list among files. The caller frees *shards.
static inline bool hf_divide(HfShard** shards, size_t* count, const ForeignTensor* list, size_t tensors,
                             const Export* e, Error* error) {
    size_t filled = 0, size = dtype_bytes(export_dtype(e->type));
    *count = 0;
    *shards = (HfShard*)memory_allocate(tensors * sizeof(HfShard));
    if (*shards == NULL) return fail_with(error, "out of memory for a list of %zu files", tensors);
    for (size_t i = 0; i < tensors; i++) {
        size_t bytes = list[i].rows * max_size(list[i].cols, 1) * size;
        if (i == 0 || bytes > e->shard_bytes - min_size(filled, e->shard_bytes)) {
            (*shards)[(*count)++].first = i;
            filled = 0;
        }
        (*shards)[*count - 1].end = i + 1;
        filled += bytes;
    }
    for (size_t i = 0; i < *count; i++) {
        char* name = (*shards)[i].name;
        if (*count == 1) snprintf(name, 64, "model.safetensors");
        else snprintf(name, 64, "model-%05zu-of-%05zu.safetensors", i + 1, *count);
    }
    return true;
}

// Writes one file. values holds tensor *held of the source, of which several of theirs may be parts; chunk is scratch.
static inline bool hf_write_shard(const Export* e, const HfShard* shard, const ForeignTensor* list, float* values,
                                  size_t* held, float* chunk, Error* error) {
    char path[FILE_PATH_MAX];
    SafetensorsWriter w;
    Dtype dtype = export_dtype(e->type);
    snprintf(path, sizeof path, "%.4000s/%s", e->directory, shard->name);
    bool ok = safetensors_create(&w, path, error) && safetensors_metadata(&w, "format", "pt", error);
    for (size_t i = shard->first; ok && i < shard->end; i++) {
        const ForeignTensor* f = &list[i];
        size_t shape[2] = {f->transposed ? f->cols : f->rows, f->transposed ? f->rows : f->cols};
        ok = safetensors_declare(&w, f->name, dtype, shape, f->cols ? 2 : 1, error);
    }
    ok = ok && safetensors_begin(&w, error);
    for (size_t i = shard->first; ok && i < shard->end; i++) {
        const ForeignTensor* f = &list[i];
        size_t width = max_size(f->cols, 1), n = f->rows * width;
        if (*held != f->tensor)
            ok = source_read(values, e->source, f->tensor,
                             tensor_elements(&e->source->parameters.tensors[f->tensor]), error);
        *held = f->tensor;
        const float* from = values + f->first * width;
        for (size_t done = 0; ok && done < n; done += CHECKPOINT_CHUNK) {
            size_t count = min_size(CHECKPOINT_CHUNK, n - done);
            float* to = e->source->widened;
            for (size_t k = 0; k < count; k++) {
                size_t at = done + k;  // in their tensor
                to[k] = from[f->transposed ? at % f->rows * width + at / f->rows : at];
                if (dtype == DTYPE_F16 && !(fabsf(to[k]) < 65520))  // smaller values are rounded to 65504 at most
                    ok = fail_with(error, "%s holds %g, which f16 cannot represent; give --dtype bf16 or f32", f->name,
                                   (double)to[k]);
            }
            if (!ok) break;
            convert_from_float(chunk, to, dtype, count);
            ok = safetensors_write(&w, chunk, count * dtype_bytes(dtype), error);
        }
    }
    ok = ok && safetensors_end(&w, error);
    safetensors_writer_free(&w);
    return ok;
}

// Writes model.safetensors.index.json: the file of each tensor.
static inline bool hf_write_index(const Export* e, const HfShard* shards, size_t count, const ForeignTensor* list,
                                  Error* error) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    w.line_depth = 2;
    json_write_begin(&w, '{');
    json_member_begin(&w, "metadata", '{');
    json_member_u64(&w, "total_size", e->source->parameters.true_size * dtype_bytes(export_dtype(e->type)));
    json_write_end(&w, '}');
    json_member_begin(&w, "weight_map", '{');
    for (size_t s = 0; s < count; s++)
        for (size_t i = shards[s].first; i < shards[s].end; i++) json_member_string(&w, list[i].name, shards[s].name);
    json_write_end(&w, '}');
    json_write_end(&w, '}');
    bool ok = json_write_done(&w, error) && export_write_text(e, "model.safetensors.index.json", &w, error);
    json_writer_free(&w);
    return ok;
}

// Writes config.json and generation_config.json.
static inline bool hf_write_configs(const Export* e, Error* error) {
    JsonWriter w;
    int32_t begin = e->tokenizer ? e->tokenizer->begin_of_text : -1;
    int32_t end = e->tokenizer ? e->tokenizer->end_of_text : -1;
    memset(&w, 0, sizeof w);
    bool ok = hf_config_write(&w, &e->source->config, export_dtype(e->type), begin, end, error) &&
              export_write_text(e, "config.json", &w, error);
    json_writer_free(&w);
    w.line_depth = 1;
    json_write_begin(&w, '{');
    json_member_bool(&w, "_from_model_config", true);
    json_member_token(&w, "bos_token_id", begin);
    json_member_token(&w, "eos_token_id", end);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    ok = ok && json_write_done(&w, error) && export_write_text(e, "generation_config.json", &w, error);
    json_writer_free(&w);
    return ok;
}

// Writes a directory that from_pretrained of transformers opens.
static inline bool export_hf(const Export* e, Error* error) {
    ForeignTensor* list = NULL;
    HfShard* shards = NULL;
    size_t count = 0, files = 0, held = SIZE_MAX;
    if (!hf_write_configs(e, error)) return false;
    float* values = (float*)memory_allocate(export_largest(e->source));
    float* chunk = (float*)memory_allocate(CHECKPOINT_CHUNK * sizeof(float));
    bool ok = (values && chunk) || fail_memory(error, e->source->path, export_largest(e->source));
    ok = ok && convert_list(&list, &count, &e->source->config, &e->source->parameters, error) &&
         hf_divide(&shards, &files, list, count, e, error);
    for (size_t i = 0; ok && i < files; i++) ok = hf_write_shard(e, &shards[i], list, values, &held, chunk, error);
    if (ok && files > 1) ok = hf_write_index(e, shards, files, list, error);
    if (ok && e->tokenizer) ok = tokenizer_save(e->tokenizer, e->directory, error);
    free(values);
    free(chunk);
    free(list);
    free(shards);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// llm.c

// Appends a tensor, and zeros up to `elements`.
static inline bool llmc_write_tensor(FileWriter* w, const Export* e, size_t tensor, size_t elements, float* values,
                                     float* chunk, Error* error) {
    Dtype dtype = export_dtype(e->type);
    size_t n = tensor_elements(&e->source->parameters.tensors[tensor]);
    if (!source_read(values, e->source, tensor, n, error)) return false;
    for (size_t done = 0; done < elements; done += CHECKPOINT_CHUNK) {
        size_t count = min_size(CHECKPOINT_CHUNK, elements - done), there = min_size(count, n - min_size(n, done));
        memset(chunk, 0, count * sizeof(float));
        convert_from_float(chunk, values + done, dtype, there);
        if (!file_append(w, chunk, count * dtype_bytes(dtype), error)) return false;
    }
    return true;
}

// Writes DIR/model.bin, which train_gpt2 of llm.c loads.
static inline bool export_llmc(const Export* e, Error* error) {
    const Config* c = &e->source->config;
    const Parameters* p = &e->source->parameters;
    char path[FILE_PATH_MAX];
    int32_t header[LLMC_HEADER] = {LLMC_MAGIC, e->type == EXPORT_BF16 ? LLMC_BF16 : LLMC_FP32, (int32_t)c->context,
        (int32_t)c->vocab, (int32_t)c->layers, (int32_t)c->heads, (int32_t)c->channels,
        (int32_t)config_padded_vocab(c)};
    FileWriter w;
    const Architecture* a = architecture_of(c);
    if (a == NULL || c->family != FAMILY_GPT2 || !c->tied || c->ffn != 4 * c->channels || c->norm_epsilon != 1e-5)
        return fail_with(error, "llm.c files hold only GPT-2 models that are tied, with --ffn 4 times --channels and "
                         "an epsilon of 1e-5; export this one with --to hf");
    snprintf(path, sizeof path, "%.4000s/model.bin", e->directory);
    size_t* order = (size_t*)memory_allocate(p->count * sizeof(size_t));
    float* values = (float*)memory_allocate(export_largest(e->source));
    float* chunk = (float*)memory_allocate(CHECKPOINT_CHUNK * sizeof(float));
    bool ok = (order && values && chunk) || fail_memory(error, e->source->path, export_largest(e->source));
    ok = ok && file_begin(&w, path, error);
    if (ok) {
        ok = file_append(&w, header, sizeof header, error);
        size_t count = llmc_order(order, p);
        for (size_t i = 0; ok && i < count; i++) {
            const Tensor* t = &p->tensors[order[i]];
            ok = llmc_write_tensor(&w, e, order[i], t->size, values, chunk, error);  // with the rows of padding
        }
        ok = ok && file_end(&w, error);
        file_abort(&w);  // does nothing after file_end
    }
    free(order);
    free(values);
    free(chunk);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// GGUF

static inline bool export_read(float* values, void* context, size_t tensor, Error* error) {
    ModelSource* s = (ModelSource*)context;
    return source_read(values, s, tensor, tensor_elements(&s->parameters.tensors[tensor]), error);
}

// Writes DIR/model.gguf, which llama.cpp opens.
static inline bool export_gguf(const Export* e, Error* error) {
    char path[FILE_PATH_MAX];
    const ModelSource* s = e->source;
    snprintf(path, sizeof path, "%.4000s/model.gguf", e->directory);
    return gguf_export(path, &s->config, &s->parameters, e->tokenizer, GGUF_TYPES[e->type].type, export_read,
                       e->source, error);  // the types are in the same order
}

#endif  // LLMTRAIN_EXPORT_H
