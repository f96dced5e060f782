// export.h: writes a model in another program's format: a Hugging Face directory, a file of llm.c, a GGUF file; or its
// pairs of LoRA in the format of PEFT.
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
#include "../llmtrain/checkpoint/peft.h"

typedef enum { EXPORT_F32, EXPORT_F16, EXPORT_BF16, EXPORT_Q8_0 } ExportType;
#define EXPORT_TYPES "f32|f16|bf16|q8_0"

typedef struct {
    ModelSource* source;
    const Tokenizer* tokenizer;   // NULL: not known
    ExportType type;
    const char* directory;
    size_t shard_bytes;           // of a file of weights, at most, unless one tensor has more
    Config lora;                  // what source_merge has taken from the source's configuration
    Progress* progress;           // in elements; NULL: not shown
} Export;

// Reads a tensor, for the last time but for parts of it that follow.
static inline bool export_read(const float** values, const Export* e, size_t tensor, Error* error) {
    ModelSource* s = e->source;
    bool reads = s->values == NULL || s->held != tensor;
    if (reads && e->progress) progress_step(e->progress, tensor_elements(&s->parameters.tensors[tensor]));
    return source_read(values, s, tensor, error);
}

// The type of elements; for Q8_0, which has none, float.
static inline Dtype export_dtype(ExportType type) {
    return type == EXPORT_F16 ? DTYPE_F16 : type == EXPORT_BF16 ? DTYPE_BF16 : DTYPE_F32;
}

static inline bool export_write_text(const Export* e, const char* name, const JsonWriter* w, Error* error) {
    char path[FILE_PATH_MAX];
    snprintf(path, sizeof path, "%.4000s/%s", e->directory, name);
    return file_write_atomic(path, w->text, w->bytes, error);
}

// ------------------------------------------------------------------------------------------------
// Hugging Face

// Divides the list among files; returns how many there are.
static inline size_t hf_divide(ForeignTensor* list, size_t count, const Export* e) {
    size_t files = 0, filled = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = list[i].rows * max_size(list[i].cols, 1) * dtype_bytes(export_dtype(e->type));
        if (i == 0 || bytes > e->shard_bytes - min_size(filled, e->shard_bytes)) {
            files++;
            filled = 0;
        }
        list[i].file = files - 1;
        filled += bytes;
    }
    return files;
}

static inline void hf_file_of(char name[64], size_t file, size_t files) {
    if (files == 1) snprintf(name, 64, "model.safetensors");
    else snprintf(name, 64, "model-%05zu-of-%05zu.safetensors", file + 1, files);
}

// Writes one of the files.
static inline bool hf_write_file(const Export* e, size_t file, size_t files, const ForeignTensor* list, size_t tensors,
                                 Error* error) {
    char path[FILE_PATH_MAX], name[64];
    SafetensorsWriter w;
    Dtype dtype = export_dtype(e->type);
    hf_file_of(name, file, files);
    snprintf(path, sizeof path, "%.4000s/%s", e->directory, name);
    bool ok = safetensors_create(&w, path, error) && safetensors_metadata(&w, "format", "pt", error);
    for (size_t i = 0; ok && i < tensors; i++) {
        const ForeignTensor* f = &list[i];
        if (f->file != file) continue;
        size_t shape[2] = {f->transposed ? f->cols : f->rows, f->transposed ? f->rows : f->cols};
        ok = safetensors_declare(&w, f->name, dtype, shape, f->cols ? 2 : 1, error);
    }
    ok = ok && safetensors_begin(&w, error);
    for (size_t i = 0; ok && i < tensors; i++) {
        const ForeignTensor* f = &list[i];
        if (f->file != file) continue;
        size_t width = max_size(f->cols, 1), n = f->rows * width;
        const float* values;
        ok = export_read(&values, e, f->tensor, error);
        for (size_t done = 0; ok && done < n; done += CHECKPOINT_CHUNK) {
            size_t count = min_size(CHECKPOINT_CHUNK, n - done);
            float* to = e->source->widened;
            for (size_t k = 0; k < count; k++) {
                size_t at = done + k;  // in their tensor
                to[k] = values[f->first * width + (f->transposed ? at % f->rows * width + at / f->rows : at)];
                if (dtype == DTYPE_F16 && !(fabsf(to[k]) < 65520))  // smaller values are rounded to 65504 at most
                    ok = fail_with(error, "%s holds %g, which f16 cannot represent; give --dtype bf16 or f32", f->name,
                                   (double)to[k]);
            }
            if (!ok) break;
            convert_from_float(e->source->chunk, to, dtype, count);
            ok = safetensors_write(&w, e->source->chunk, count * dtype_bytes(dtype), error);
        }
    }
    ok = ok && safetensors_end(&w, error);
    safetensors_writer_free(&w);
    return ok;
}

// Writes model.safetensors.index.json: the file of each tensor.
static inline bool hf_write_index(const Export* e, size_t files, const ForeignTensor* list, size_t count,
                                  Error* error) {
    JsonWriter w = {.line_depth = 2};
    json_write_begin(&w, '{');
    json_member_begin(&w, "metadata", '{');
    json_member_u64(&w, "total_size", e->source->parameters.true_size * dtype_bytes(export_dtype(e->type)));
    json_write_end(&w, '}');
    json_member_begin(&w, "weight_map", '{');
    for (size_t i = 0; i < count; i++) {
        char name[64];
        hf_file_of(name, list[i].file, files);
        json_member_string(&w, list[i].name, name);
    }
    json_write_end(&w, '}');
    json_write_end(&w, '}');
    bool ok = json_write_done(&w, error) && export_write_text(e, "model.safetensors.index.json", &w, error);
    json_writer_free(&w);
    return ok;
}

// Writes config.json and generation_config.json: with what the model that was imported said of them, or else with the
// tokens of the tokenizer.
static inline bool hf_write_configs(const Export* e, Error* error) {
    JsonWriter w = {0};
    TokenIds ids = e->source->ids;
    bool there;
    if (ids.begin < 0 && e->tokenizer) ids.begin = e->tokenizer->begin_token;
    if (ids.count == 0 && e->tokenizer && e->tokenizer->end_of_text >= 0)
        ids.ends[ids.count++] = e->tokenizer->end_of_text;
    bool ok = hf_config_write(&w, &e->source->config, export_dtype(e->type), &ids, error) &&
              export_write_text(e, MODEL_FILES[0], &w, error) &&
              source_copy(&there, e->source->tokenizer, e->directory, 1, error);
    json_writer_free(&w);
    if (!ok || there) return ok;
    w.line_depth = 1;
    json_write_begin(&w, '{');
    json_member_bool(&w, "_from_model_config", true);
    hf_write_ids(&w, &ids);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    ok = ok && json_write_done(&w, error) && export_write_text(e, MODEL_FILES[1], &w, error);
    json_writer_free(&w);
    return ok;
}

// Writes a directory that from_pretrained of transformers opens.
static inline bool export_hf(const Export* e, Error* error) {
    ForeignTensor* list = NULL;
    size_t count = 0, files = 0;
    if (!hf_write_configs(e, error)) return false;
    bool ok = convert_list(&list, &count, &e->source->config, &e->source->parameters, error);
    if (ok) files = hf_divide(list, count, e);
    for (size_t i = 0; ok && i < files; i++) ok = hf_write_file(e, i, files, list, count, error);
    if (ok && files > 1) ok = hf_write_index(e, files, list, count, error);
    if (ok && e->tokenizer) ok = tokenizer_save(e->tokenizer, e->directory, error);
    free(list);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// llm.c

// Appends a tensor, and zeros up to `elements`.
static inline bool llmc_write_tensor(FileWriter* w, const Export* e, size_t tensor, size_t elements, Error* error) {
    float* chunk = e->source->chunk;
    Dtype dtype = export_dtype(e->type);
    size_t n = tensor_elements(&e->source->parameters.tensors[tensor]);
    const float* values;
    if (!export_read(&values, e, tensor, error)) return false;
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
    bool ok = order || fail_memory(error, e->source->path, p->count * sizeof(size_t));
    ok = ok && file_begin(&w, path, error);
    if (ok) {
        ok = file_append(&w, header, sizeof header, error);
        size_t count = llmc_order(order, p);
        for (size_t i = 0; ok && i < count; i++) {
            const Tensor* t = &p->tensors[order[i]];
            ok = llmc_write_tensor(&w, e, order[i], t->size, error);  // with the rows of padding
        }
        ok = ok && file_end(&w, error);
        file_abort(&w);  // does nothing after file_end
    }
    free(order);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// GGUF

static inline bool gguf_read(const float** values, void* e, size_t tensor, Error* error) {
    return export_read(values, (const Export*)e, tensor, error);
}

// Writes DIR/model.gguf, which llama.cpp opens.
static inline bool export_gguf(const Export* e, Error* error) {
    char path[FILE_PATH_MAX];
    const ModelSource* s = e->source;
    snprintf(path, sizeof path, "%.4000s/model.gguf", e->directory);
    return gguf_export(path, &s->config, &s->parameters, e->tokenizer, GGUF_TYPES[e->type].type, gguf_read,
                       (void*)(uintptr_t)e, error);  // the types are in the same order
}

// ------------------------------------------------------------------------------------------------
// LoRA

// Prints how much adapters change the weights, and how much the rounding of the sums does. A model may have many.
static inline bool export_describe_merge(const Export* e, Error* error) {
    ModelSource* s = e->source;
    const SourcePairs merged = s->merged, none = {0};
    double change = 0, rounding = 0;
    float* sums = merged.count ? (float*)memory_allocate(parameters_largest(&s->parameters) * sizeof(float)) : NULL;
    bool ok = sums != NULL || merged.count == 0 || fail_memory(error, s->path, parameters_largest(&s->parameters));
    Progress progress = progress_begin("merging", s->parameters.count);
    for (size_t i = 0; ok && i < s->parameters.count; i++) {
        progress_show(&progress, i);
        size_t n = tensor_elements(&s->parameters.tensors[i]), k = 0;
        const float* values;
        while (k < merged.count && merged.pairs[k].tensor != i) k++;
        if (k == merged.count) continue;
        ok = source_read(&values, s, i, error);
        if (ok) memcpy(sums, values, n * sizeof(float));
        s->merged = none;
        s->held = SIZE_MAX;
        ok = ok && source_read(&values, s, i, error);
        s->merged = merged;
        s->held = SIZE_MAX;
        for (size_t j = 0; ok && j < n; j++) {
            float stored, rounded;  // room for any dtype
            convert_from_float(&stored, &sums[j], export_dtype(e->type), 1);
            convert_to_float(&rounded, &stored, export_dtype(e->type), 1);
            change = fmax(change, fabs((double)sums[j] - (double)values[j]));
            rounding = fmax(rounding, fabs((double)sums[j] - (double)rounded));
        }
    }
    progress_end(&progress);
    if (ok && merged.count)
        say(stdout, "merged %zu pairs: the largest change of a weight is %.3g, of its rounding afterwards %.3g",
            merged.count, change, rounding);
    free(sums);
    return ok;
}

// The module of a pair at Hugging Face.
static inline const ForeignTensor* peft_module(char module[96], const ForeignTensor* list, const SourcePair* pair) {
    while (list->tensor != pair->tensor || list->first != pair->first || list->rows != pair->rows) list++;
    snprintf(module, 96, "%.*s", (int)(strrchr(list->name, '.') - list->name), list->name);
    return list;
}

// Writes adapter_config.json.
static inline bool peft_write_config(const Export* e, const ForeignTensor* list, Error* error) {
    JsonWriter w = {.line_depth = 1};
    const SourcePairs* pairs = &e->source->merged;
    char module[96], other[96];
    json_write_begin(&w, '{');
    json_member_string(&w, "peft_type", "LORA");
    json_member_string(&w, "task_type", "CAUSAL_LM");
    json_member_string(&w, "base_model_name_or_path", e->source->base.path);
    json_member_bool(&w, "inference_mode", true);
    json_member_u64(&w, "r", e->lora.lora);
    json_member_number(&w, "lora_alpha", e->lora.lora_alpha);
    json_member_bool(&w, "use_rslora", e->lora.lora_scale == LORA_RS);
    json_member_bool(&w, "use_dora", false);
    json_member_number(&w, "lora_dropout", 0);
    json_member_bool(&w, "fan_in_fan_out", e->source->config.family == FAMILY_GPT2);
    json_member_string(&w, "bias", "none");
    json_member_begin(&w, "target_modules", '[');
    for (size_t i = 0; i < pairs->count; i++) {  // the last part of each name, once; GPT-2 has c_proj twice
        peft_module(module, list, &pairs->pairs[i]);
        const char* last = module + (e->source->config.family == FAMILY_GPT2 ? strcspn(module, "0123456789") : 0);
        last = e->source->config.family == FAMILY_GPT2 ? strchr(last, '.') + 1 : strrchr(module, '.') + 1;
        bool before = false;
        for (size_t k = 0; k < i && !before; k++) {
            peft_module(other, list, &pairs->pairs[k]);
            before = peft_matches(last, other);
        }
        if (!before) json_write_string(&w, last);
    }
    json_write_end(&w, ']');
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool ok = json_write_done(&w, error) && export_write_text(e, PEFT_CONFIG, &w, error);
    json_writer_free(&w);
    return ok;
}

// Writes adapter_model.safetensors.
static inline bool peft_write_tensors(const Export* e, const ForeignTensor* list, Error* error) {
    char path[FILE_PATH_MAX], module[96], name[160], hash[24];
    const SourcePairs* pairs = &e->source->merged;
    SafetensorsWriter w;
    Dtype dtype = export_dtype(e->type);
    snprintf(path, sizeof path, "%.4000s/" PEFT_TENSORS, e->directory);
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)e->source->base.hash);
    bool ok = safetensors_create(&w, path, error) && safetensors_metadata(&w, "format", "pt", error) &&
              safetensors_metadata(&w, PEFT_BASE, hash, error);
    for (size_t i = 0; ok && i < 2 * pairs->count; i++) {
        const SourcePair* pair = &pairs->pairs[i / 2];
        size_t cols = peft_module(module, list, pair)->cols, a[2] = {pair->r, cols}, b[2] = {pair->rows, pair->r};
        snprintf(name, sizeof name, PEFT_PREFIX "%s.lora_%c.weight", module, i % 2 ? 'B' : 'A');
        ok = safetensors_declare(&w, name, dtype, i % 2 ? b : a, 2, error);
    }
    ok = ok && safetensors_begin(&w, error);
    for (size_t i = 0; ok && i < 2 * pairs->count; i++) {
        const SourcePair* pair = &pairs->pairs[i / 2];
        size_t cols = peft_module(module, list, pair)->cols, n = pair->r * (i % 2 ? pair->rows : cols);
        const float* values = i % 2 ? pair->b : pair->a;
        for (size_t done = 0, count; ok && done < n; done += count) {
            count = min_size(CHECKPOINT_CHUNK, n - done);
            convert_from_float(e->source->chunk, values + done, dtype, count);
            ok = safetensors_write(&w, e->source->chunk, count * dtype_bytes(dtype), error);
        }
    }
    ok = ok && safetensors_end(&w, error);
    safetensors_writer_free(&w);
    return ok;
}

// Writes a directory that PeftModel.from_pretrained opens: the pairs that source_merge has found.
static inline bool export_peft(const Export* e, Error* error) {
    ForeignTensor* list = NULL;
    size_t count = 0;
    bool ok = convert_list(&list, &count, &e->source->config, &e->source->parameters, error) &&
              peft_write_config(e, list, error) && peft_write_tensors(e, list, error);
    free(list);
    return ok;
}

#endif  // LLMTRAIN_EXPORT_H
