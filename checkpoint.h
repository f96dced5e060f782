// checkpoint.h: saving a run and taking it up again, to the bit.
//
// A checkpoint is a directory OUT/step_00000020 with
//   rank_00000.safetensors   weights and optimizer state: weight.NAME, m.NAME, v.NAME
//   manifest.json            everything else, written last: configuration, state of the run, the table of the flat
//                            vector, a checksum of every tensor, and in its last line one of the manifest itself
// It is made under a temporary name, flushed to the disk, and renamed: under its final name it is whole. There is no
// pointer to the newest; the newest is the one with the highest step whose checksums agree. A damaged one is named
// and passed over, and the one before it is used.
//
// Weights are the float masters where there are any: 16-bit parameters follow from them by rounding. Where several ranks
// hold them in slices, rank 0 gathers and writes; every rank reads, and takes its slices: so a checkpoint knows nothing of
// ranks, and goes on with any number of them.

#ifndef LLMTRAIN_CHECKPOINT_H
#define LLMTRAIN_CHECKPOINT_H

#include "llmtrain.h"
#include "safetensors.h"

#include <inttypes.h>

#define CHECKPOINT_FORMAT "llmtrain checkpoint 1"
#define CHECKPOINT_MANIFEST_MAX ((size_t)1 << 28)

// What a checkpoint says beside its tensors.
typedef struct {
    Config config;
    OptimizerKind optimizer;
    bool masters;           // the weights are saved as float masters
    uint64_t seed;          // of initial weights, data order, dropout
    uint64_t T;             // length of a sample: the order of the data depends on it
    uint64_t data;          // fingerprint of the training data: likewise
    RunState state;
    const Flag* flags;      // (flag_count) what else steers the run: saved as text, to tell what a resume changes
    size_t flag_count;
} RunRecord;

// Flags that do not change what a run computes.
#define CHECKPOINT_FREE_FLAGS \
    "data|val|out|prompt|resume|plan|threads|val-every|val-windows|val-overlap|sample-every|log-every|ckpt-every|" \
    "peak-tflops|tokens|temperature|top-k|top-p|ranks|timeout|check-every|slow-factor|slow-steps|memory|bandwidth|compute-ms"

// ------------------------------------------------------------------------------------------------
// The arrays of a checkpoint

typedef struct {
    const char* prefix;     // of the names of its tensors
    void* data;             // (flat_size), or what the rank has of it: the slices that flat_state tells
    SafetensorsType type;
    bool sliced;
} CheckpointArray;

static inline SafetensorsType checkpoint_floatX(void) {
    return sizeof(floatX) == 4 ? SAFETENSORS_F32 : FLOATX_GEMM == GEMM_BF16 ? SAFETENSORS_BF16 : SAFETENSORS_F16;
}

// The arrays that a model saves; returns their number, at most 3.
static inline size_t checkpoint_arrays(CheckpointArray arrays[3], const Model* model) {
    const FlatVector* flat = &model->flat;
    const char* prefixes[3] = {"weight", "m", "v"};
    void* data[3] = {flat->masters ? (void*)flat->masters : (void*)flat->params, flat->m, flat->v};
    size_t count = 0;
    for (int i = 0; i < 3; i++) {
        if (data[i] == NULL) continue;
        arrays[count].prefix = prefixes[i];
        arrays[count].data = data[i];
        arrays[count].sliced = data[i] != (void*)flat->params;
        arrays[count++].type = data[i] == (void*)flat->params ? checkpoint_floatX() : SAFETENSORS_F32;
    }
    return count;
}

// Tensors go to and from the device in pieces, through memory of the host.
enum { CHECKPOINT_PIECE = 1 << 20 };  // elements

typedef struct {
    void *piece, *whole;    // (CHECKPOINT_PIECE) floats each: this rank's part of a piece; the piece of all ranks
} CheckpointStaging;

static inline bool checkpoint_staging(CheckpointStaging* staging, Error* error) {
    staging->piece = host_allocate(CHECKPOINT_PIECE * sizeof(float));
    staging->whole = host_allocate(CHECKPOINT_PIECE * sizeof(float));
    return (staging->piece && staging->whole) || fail(error, "out of memory for pieces of tensors; free some memory");
}

static inline void checkpoint_staging_free(CheckpointStaging* staging) {
    host_free(staging->piece);
    host_free(staging->whole);
}

// The part of elements [first, end) of the flat vector that this rank has of an array, and where it lies there.
static inline CommSlice checkpoint_part(char** place, const CheckpointArray* array, const FlatVector* flat, size_t first, size_t end) {
    CommSlice part = {first, end};
    size_t index = first;
    if (array->sliced) part = flat_state(&index, flat, first, end);
    *place = (char*)array->data + index * safetensors_type_bytes(array->type);
    return part;
}

// ------------------------------------------------------------------------------------------------
// The manifest

static inline void json_member_hash(JsonWriter* w, const char* key, uint64_t hash) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    json_member_string(w, key, text);
}

static inline void manifest_write_config(JsonWriter* w, const Config* c) {
    char family[16];
    choice_name(FAMILY_NAMES, (int)c->family, family, sizeof family);
    json_write_key(w, "config");
    json_write_begin(w, '{');
    json_member_string(w, "family", family);
    json_member_u64(w, "layers", c->layers);
    json_member_u64(w, "heads", c->heads);
    json_member_u64(w, "kv_heads", c->kv_heads);
    json_member_u64(w, "channels", c->channels);
    json_member_u64(w, "ffn", c->ffn);
    json_member_u64(w, "context", c->context);
    json_member_u64(w, "vocab", c->vocab);
    json_write_key(w, "tied");
    json_write_bool(w, c->tied);
    json_member_number(w, "norm_epsilon", c->norm_epsilon);
    json_member_number(w, "rope_theta", c->rope_theta);
    json_write_end(w, '}');
}

static inline void manifest_write_flags(JsonWriter* w, const RunRecord* run) {
    json_write_key(w, "flags");
    json_write_begin(w, '{');
    for (size_t i = 0; i < run->flag_count; i++) {
        char text[FILE_PATH_MAX];
        if (run->flags[i].name == NULL || choice_find(CHECKPOINT_FREE_FLAGS, run->flags[i].name) >= 0) continue;
        flag_text(text, sizeof text, &run->flags[i]);
        json_member_string(w, run->flags[i].name, text);
    }
    json_write_end(w, '}');
}

static inline void manifest_write_state(JsonWriter* w, const RunState* s) {
    json_write_key(w, "state");
    json_write_begin(w, '{');
    json_member_u64(w, "step", s->step);
    json_member_u64(w, "samples", s->samples);
    json_member_u64(w, "updates", s->updates);
    json_member_number(w, "norm_mean", s->norms.mean);
    json_member_number(w, "norm_variance", s->norms.variance);
    json_member_u64(w, "norm_count", s->norms.count);
    json_member_number(w, "loss_scale", s->loss_scale);
    json_member_u64(w, "scale_good", s->scale_good);
    json_write_end(w, '}');
}

static inline void manifest_write_table(JsonWriter* w, const Parameters* p) {
    json_write_key(w, "flat_vector");
    json_write_begin(w, '[');
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        json_write_begin(w, '{');
        json_member_string(w, "name", t->name);
        json_write_key(w, "shape");
        json_write_begin(w, '[');
        json_write_u64(w, t->rows);
        if (t->cols) json_write_u64(w, t->cols);
        json_write_end(w, ']');
        json_member_u64(w, "offset", t->offset);
        json_member_u64(w, "size", t->size);
        json_member_u64(w, "bucket", t->bucket);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
}

// Checksums of the rank's file, as its writer computed them.
static inline void manifest_write_checksums(JsonWriter* w, const SafetensorsHeader* header) {
    json_member_hash(w, "header_checksum", header->hash);
    json_write_key(w, "checksums");
    json_write_begin(w, '{');
    for (size_t i = 0; i < header->count; i++) json_member_hash(w, header->tensors[i].name, header->tensors[i].hash);
    json_write_end(w, '}');
}

// The end of a manifest whose text before it is given: the checksum of that text.
static inline void manifest_tail(char tail[64], const char* text, size_t bytes) {
    snprintf(tail, 64, ",\n  \"checksum\": \"%016llx\"\n}\n", (unsigned long long)hash_bytes(text, bytes));
}

static inline bool manifest_save(const char* path, const Model* model, const RunRecord* run, const SafetensorsHeader* header,
                                 Error* error) {
    char optimizer[16], tail[64], products[320];
    double peak;
    choice_name(OPTIMIZER_NAMES, (int)run->optimizer, optimizer, sizeof optimizer);
    device_describe(products, sizeof products, &peak, model->stream);
    JsonWriter w;
    memset(&w, 0, sizeof w);
    w.line_depth = 2;
    json_write_begin(&w, '{');
    json_member_string(&w, "format", CHECKPOINT_FORMAT);
    json_member_string(&w, "llmtrain", LLMTRAIN_VERSION);
    json_member_string(&w, "compiler", __VERSION__);
    json_member_string(&w, "precision", FLOATX_NAME);
    json_member_string(&w, "products", products);
    json_member_u64(&w, "world", model->flat.options.world);
    json_member_u64(&w, "zero", model->flat.options.stage);
    json_member_string(&w, "optimizer", optimizer);
    json_write_key(&w, "masters");
    json_write_bool(&w, run->masters);
    json_member_u64(&w, "seed", run->seed);
    json_member_u64(&w, "sequence", run->T);
    json_member_hash(&w, "data", run->data);
    manifest_write_config(&w, &run->config);
    manifest_write_flags(&w, run);
    manifest_write_state(&w, &run->state);
    manifest_write_table(&w, &model->parameters);
    manifest_write_checksums(&w, header);
    if (!w.failed) {
        manifest_tail(tail, w.text, w.bytes);
        json_put(&w, tail, strlen(tail));
        w.depth--;
    }
    bool ok = json_write_done(&w, error) && file_write_atomic(path, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

static inline bool manifest_size(size_t* value, const Json* json, uint32_t object, const char* key) {
    uint64_t number = 0;
    bool ok = json_u64(json, json_get(json, object, key), &number);
    *value = (size_t)number;
    return ok;
}

static inline bool manifest_read_config(Config* c, const Json* json, uint32_t node) {
    char family[16] = "";
    bool ok = json_string(json, json_get(json, node, "family"), family, sizeof family);
    int kind = choice_find(FAMILY_NAMES, family);
    c->family = kind < 0 ? FAMILY_GPT2 : (Family)kind;
    return ok && kind >= 0 && manifest_size(&c->layers, json, node, "layers") && manifest_size(&c->heads, json, node, "heads") &&
           manifest_size(&c->kv_heads, json, node, "kv_heads") && manifest_size(&c->channels, json, node, "channels") &&
           manifest_size(&c->ffn, json, node, "ffn") && manifest_size(&c->context, json, node, "context") &&
           manifest_size(&c->vocab, json, node, "vocab") && json_bool(json, json_get(json, node, "tied"), &c->tied) &&
           json_number(json, json_get(json, node, "norm_epsilon"), &c->norm_epsilon) &&
           json_number(json, json_get(json, node, "rope_theta"), &c->rope_theta);
}

static inline bool manifest_read_state(RunState* s, const Json* json, uint32_t node) {
    return json_u64(json, json_get(json, node, "step"), &s->step) &&
           json_u64(json, json_get(json, node, "samples"), &s->samples) &&
           json_u64(json, json_get(json, node, "updates"), &s->updates) &&
           json_number(json, json_get(json, node, "norm_mean"), &s->norms.mean) &&
           json_number(json, json_get(json, node, "norm_variance"), &s->norms.variance) &&
           json_u64(json, json_get(json, node, "norm_count"), &s->norms.count) &&
           json_number(json, json_get(json, node, "loss_scale"), &s->loss_scale) &&
           json_u64(json, json_get(json, node, "scale_good"), &s->scale_good);
}

static inline bool manifest_read_run(RunRecord* run, const Json* json) {
    char format[64] = "", optimizer[16] = "", data[20] = "";
    bool ok = json_string(json, json_get(json, 0, "format"), format, sizeof format) && strcmp(format, CHECKPOINT_FORMAT) == 0 &&
              json_string(json, json_get(json, 0, "optimizer"), optimizer, sizeof optimizer);
    int kind = choice_find(OPTIMIZER_NAMES, optimizer);
    run->optimizer = kind < 0 ? OPTIMIZER_ADAMW : (OptimizerKind)kind;
    return ok && kind >= 0 && json_u64(json, json_get(json, 0, "seed"), &run->seed) &&
           json_u64(json, json_get(json, 0, "sequence"), &run->T) &&
           json_bool(json, json_get(json, 0, "masters"), &run->masters) &&
           json_string(json, json_get(json, 0, "data"), data, sizeof data) && sscanf(data, "%" SCNx64, &run->data) == 1 &&
           manifest_read_config(&run->config, json, json_get(json, 0, "config")) &&
           manifest_read_state(&run->state, json, json_get(json, 0, "state"));
}

// Opens the manifest of a checkpoint and checks it against its own checksum. The caller frees *json after success.
static inline bool manifest_open(Json* json, RunRecord* run, const char* directory, Error* error) {
    char path[FILE_PATH_MAX], tail[64];
    char* text = NULL;
    size_t bytes = 0;
    memset(run, 0, sizeof *run);
    memset(json, 0, sizeof *json);
    snprintf(path, sizeof path, "%.4000s/manifest.json", directory);
    if (!file_read(path, CHECKPOINT_MANIFEST_MAX, &text, &bytes, error)) return false;
    manifest_tail(tail, text, 0);
    size_t tail_bytes = strlen(tail), body = bytes > tail_bytes ? bytes - tail_bytes : 0;
    manifest_tail(tail, text, body);
    bool ok = true;
    if (body == 0 || memcmp(text + body, tail, tail_bytes) != 0)
        ok = fail(error, "%.600s does not agree with its checksum; it is damaged", path);
    ok = ok && json_parse(json, text, bytes, path, error);
    if (ok && !manifest_read_run(run, json)) {
        ok = fail(error, "%.600s is not a manifest of '" CHECKPOINT_FORMAT "'; use the version of llmtrain that wrote it", path);
        json_free(json);
    }
    free(text);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Saving

static inline void checkpoint_path(char path[FILE_PATH_MAX], const char* out, uint64_t step, const char* suffix) {
    snprintf(path, FILE_PATH_MAX, "%.4000s/step_%08llu%s", out, (unsigned long long)step, suffix);
}

// A piece of the flat vector, [first, end), whose slices the ranks of stages 1 and 2 hold.
typedef struct {
    const FlatVector* flat;
    size_t first, end;
} CheckpointPiece;

// What a rank has of the piece, counted from its beginning.
static inline CommSlice checkpoint_slice(size_t rank, const void* context) {
    const CheckpointPiece* piece = (const CheckpointPiece*)context;
    const Bucket* k = flat_bucket(piece->flat, piece->first);
    CommSlice own = shard_slice(k->end - k->first, rank, piece->flat->options.world);
    own.first = max_size(min_size(k->first + own.first, piece->end), piece->first) - piece->first;
    own.end = max_size(min_size(k->first + own.end, piece->end), piece->first) - piece->first;
    return own;
}

// One tensor, to the file of rank 0; on the other ranks `w` is NULL.
static inline bool checkpoint_write_tensor(SafetensorsWriter* w, const CheckpointArray* array, const Tensor* t, const Model* model,
                                           CheckpointStaging* staging, Error* error) {
    const FlatVector* flat = &model->flat;
    size_t size = safetensors_type_bytes(array->type), last = t->offset + tensor_elements(t);
    bool gathers = array->sliced && flat->options.stage > 0 && flat->options.world > 1;
    if (!gathers && w == NULL) return true;
    for (size_t first = t->offset; first < last; first += CHECKPOINT_PIECE) {
        CheckpointPiece piece = {flat, first, min_size(first + CHECKPOINT_PIECE, last)};
        char* place;
        CommSlice part = checkpoint_part(&place, array, flat, piece.first, piece.end);
        download(staging->piece, place, slice_length(part) * size, model->stream);
        if (gathers && !comm_gather(flat->options.comm, staging->whole, staging->piece, piece.end - piece.first, COMM_FLOAT,
                                    checkpoint_slice, &piece, error)) return false;
        if (w && !safetensors_write(w, gathers ? staging->whole : staging->piece, (piece.end - piece.first) * size, error)) return false;
    }
    return true;
}

static inline bool checkpoint_write_tensors(SafetensorsWriter* w, const char* path, Model* model, Error* error) {
    CheckpointArray arrays[3];
    CheckpointStaging staging = {NULL, NULL};
    size_t count = checkpoint_arrays(arrays, model);
    const Parameters* p = &model->parameters;
    bool ok = w == NULL || safetensors_create(w, path, error);
    for (size_t a = 0; w && a < count; a++) {
        for (size_t i = 0; ok && i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            char name[64];
            size_t shape[2] = {t->rows, t->cols};
            snprintf(name, sizeof name, "%s.%s", arrays[a].prefix, t->name);
            ok = safetensors_declare(w, name, arrays[a].type, shape, t->cols ? 2 : 1, error);
        }
    }
    ok = ok && (w == NULL || safetensors_begin(w, error)) && checkpoint_staging(&staging, error);
    flat_await_all(&model->flat);
    for (size_t a = 0; a < count; a++)
        for (size_t i = 0; ok && i < p->count; i++) ok = checkpoint_write_tensor(w, &arrays[a], &p->tensors[i], model, &staging, error);
    checkpoint_staging_free(&staging);
    return ok && (w == NULL || safetensors_end(w, error));
}

// Saves model and run to OUT/step_N; all ranks together. After a failure the directories of earlier checkpoints are as they
// were.
static inline bool checkpoint_save(Model* model, const RunRecord* run, const char* out, Error* error) {
    if (model->flat.options.rank > 0) return checkpoint_write_tensors(NULL, NULL, model, error);
    char path[FILE_PATH_MAX], temporary[FILE_PATH_MAX], replaced[FILE_PATH_MAX], file[FILE_PATH_MAX + 64];
    checkpoint_path(path, out, run->state.step, "");
    checkpoint_path(temporary, out, run->state.step, ".tmp");
    checkpoint_path(replaced, out, run->state.step, ".old");
    if (!directory_remove(temporary, error) || !directory_make(temporary, error)) return false;

    SafetensorsWriter w;
    snprintf(file, sizeof file, "%s/rank_00000.safetensors", temporary);
    bool ok = checkpoint_write_tensors(&w, file, model, error);
    snprintf(file, sizeof file, "%s/manifest.json", temporary);
    ok = ok && manifest_save(file, model, run, &w.header, error);
    safetensors_writer_free(&w);

    // A checkpoint of the same step is there if a run resumed before it, because it was damaged.
    Error ignored;
    bool exists = ok && directory_exists(path);
    if (exists) ok = directory_remove(replaced, error) && directory_rename_sync(path, replaced, error);
    if (ok && !directory_rename_sync(temporary, path, error)) {
        ok = false;
        if (exists) directory_rename_sync(replaced, path, &ignored);
    }
    if (!ok) directory_remove(temporary, &ignored);
    return ok && directory_remove(replaced, error);
}

// Removes what saves that were killed have left in OUT. Only one process may work on OUT at a time.
static inline void checkpoint_clean(const char* out) {
    DIR* directory = opendir(out);
    Error ignored;
    if (directory == NULL) return;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        char path[FILE_PATH_MAX + 300];
        const char* end = strrchr(entry->d_name, '.');
        if (strncmp(entry->d_name, "step_", 5) != 0 || end == NULL) continue;
        if (strcmp(end, ".tmp") != 0 && strcmp(end, ".old") != 0) continue;
        snprintf(path, sizeof path, "%.4000s/%.255s", out, entry->d_name);
        directory_remove(path, &ignored);
    }
    closedir(directory);
}

// ------------------------------------------------------------------------------------------------
// Loading

// Reads one tensor into what this rank has of the array, and compares its checksum with the manifest's.
static inline bool checkpoint_read_tensor(const CheckpointArray* array, const Tensor* t, const Model* model, const SafetensorsFile* file,
                                          const Json* manifest, uint32_t checksums, CheckpointStaging* staging, Error* error) {
    char name[64], expected[24] = "", found[24];
    snprintf(name, sizeof name, "%s.%s", array->prefix, t->name);
    const SafetensorsTensor* saved = safetensors_find(file, name);
    if (saved == NULL || !json_string(manifest, json_get(manifest, checksums, name), expected, sizeof expected))
        return fail(error, "%.600s has no tensor %s; it is of another model", file->path, name);
    bool rounds = saved->type == SAFETENSORS_F32 && array->type != SAFETENSORS_F32;  // for a 16-bit model that keeps no masters
    if (saved->type != array->type && !rounds)
        return fail(error, "%.600s holds %s as %s, but this program wants %s; build it with the checkpoint's precision",
                    file->path, name, safetensors_type_name(saved->type), safetensors_type_name(array->type));
    size_t size = safetensors_type_bytes(saved->type), to_size = safetensors_type_bytes(array->type), n = tensor_elements(t);
    if (saved->bytes != n * size)
        return fail(error, "%.600s: %.100s has %zu bytes where %zu are expected; the shapes differ", file->path, name, saved->bytes,
                    n * size);
    Hash hash = hash_begin(0);
    for (size_t done = 0; done < n; done += CHECKPOINT_PIECE) {
        size_t count = min_size(CHECKPOINT_PIECE, n - done), first = t->offset + done;
        if (!safetensors_read_range(file, saved, done * size, count * size, staging->piece, error)) return false;
        hash_add(&hash, staging->piece, count * size);
        const char* from = (const char*)staging->piece;
        if (rounds) {
            for (size_t i = 0; i < count; i++) ((floatX*)staging->whole)[i] = floatX_of(((const float*)staging->piece)[i]);
            from = (const char*)staging->whole;
        }
        char* place;
        CommSlice part = checkpoint_part(&place, array, &model->flat, first, first + count);
        upload(place, from + (part.first - first) * to_size, slice_length(part) * to_size, model->stream);
        if (array->sliced && strcmp(array->prefix, "weight") == 0) {
            // Whole on every rank: the parameters that follow from the masters.
            for (size_t i = 0; i < count; i++) ((floatX*)staging->whole)[i] = floatX_of(((const float*)from)[i]);
            upload(model->flat.params + first, staging->whole, count * sizeof(floatX), model->stream);
        }
    }
    snprintf(found, sizeof found, "%016llx", (unsigned long long)hash_end(&hash));
    if (strcmp(found, expected) != 0)
        return fail(error, "%.600s: %s does not agree with its checksum; the file is damaged", file->path, name);
    return true;
}

// Loads the tensors of the checkpoint whose manifest is open, each rank for itself. A model that does not train takes the
// weights alone. After a failure the model holds a mixture, and must be loaded again from another checkpoint.
static inline bool checkpoint_load(Model* model, const Json* manifest, const char* directory, Error* error) {
    char path[FILE_PATH_MAX + 64], expected[24] = "", found[24];
    SafetensorsFile file;
    snprintf(path, sizeof path, "%s/rank_00000.safetensors", directory);
    if (!safetensors_open(&file, path, error)) return false;
    snprintf(found, sizeof found, "%016llx", (unsigned long long)file.header.hash);
    bool ok = json_string(manifest, json_get(manifest, 0, "header_checksum"), expected, sizeof expected);
    if (!ok || strcmp(found, expected) != 0)
        ok = fail(error, "%.600s: its header does not agree with its checksum; the file is damaged", path);

    CheckpointArray arrays[3];
    CheckpointStaging staging = {NULL, NULL};
    size_t count = checkpoint_arrays(arrays, model);
    uint32_t checksums = json_get(manifest, 0, "checksums");
    ok = ok && checkpoint_staging(&staging, error);
    for (size_t a = 0; a < count; a++)
        for (size_t i = 0; ok && i < model->parameters.count; i++)
            ok = checkpoint_read_tensor(&arrays[a], &model->parameters.tensors[i], model, &file, manifest, checksums, &staging, error);
    checkpoint_staging_free(&staging);
    safetensors_close(&file);
    return ok;
}

// The highest step below `before` of which OUT has a checkpoint directory; false if there is none.
static inline bool checkpoint_before(uint64_t* step, const char* out, uint64_t before) {
    DIR* directory = opendir(out);
    bool found = false;
    if (directory == NULL) return false;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        unsigned long long number = 0;
        char expected[64];
        if (sscanf(entry->d_name, "step_%llu", &number) != 1) continue;
        snprintf(expected, sizeof expected, "step_%08llu", number);  // exactly the name that checkpoint_path makes
        if (strcmp(entry->d_name, expected) != 0 || number >= before || (found && number <= *step)) continue;
        *step = number;
        found = true;
    }
    closedir(directory);
    return found;
}

#endif  // LLMTRAIN_CHECKPOINT_H
