// record.h: what a checkpoint records about a run besides its tensors; saving and loading a model.
//
//   model_save(&model, &record, "runs/x", &error);                        runs/x/step_N, N being the record's step
//   model_load(&model, &record, "runs/x/step_00000100", false, &error);

#ifndef LLMTRAIN_RECORD_H
#define LLMTRAIN_RECORD_H

#include "../../llmtrain.h"
#include "saver.h"
#include "state.h"

// The model whose weights a run with pairs of LoRA trains beside.
typedef struct {
    char path[FILE_PATH_MAX];  // "": not known
    uint64_t hash;             // of its weights: source_hash
} RunBase;

typedef struct {
    Config config;
    OptimizerOptions optimizer;  // kind, rank (0 unless low-rank), master_weights: whether the saved weights are those
    uint64_t seed;          // of initial weights, data order, dropout
    uint64_t T;             // length of a sample: the order of the data depends on it
    uint64_t data;          // fingerprint of the training data: the order depends on it too
    uint64_t leaves;        // RankOptions.leaves, which the bits of activations depend on
    uint64_t kv_copies;     // RankOptions.kv_copies, which the bits of attention's gradients depend on
    uint64_t row_leaves;    // RankOptions.row_leaves, which the bits of gradients depend on
    uint64_t total_batch;   // tokens of a step, over all ranks; 0 in checkpoints that lack it
    RunState state;
    RunBase base;           // of a run with LoRA
    SaveKind kind;
    const Flags* flags;     // those that change what the run computes are saved as text; NULL: none are
} RunRecord;

enum { RECORD_FIELD_COUNT = 5 };  // in a function, since the optimizers' names are not a constant
static inline const Field* record_fields(void) {
    static Field fields[RECORD_FIELD_COUNT] = {
        FIELD_NAMED(RunRecord, optimizer.kind, KIND_CHOICE, "optimizer", "optimizer", NULL),
        FIELD_NAMED(RunRecord, optimizer.rank, KIND_COUNT, "optimizer_rank", "optimizer-rank", "0"),
        FIELD_NAMED(RunRecord, optimizer.master_weights, KIND_SWITCH, "master_weights", "masters", NULL),
        FIELD_NAMED(RunRecord, seed, KIND_COUNT, "seed", "seed", NULL),
        FIELD_NAMED(RunRecord, T, KIND_COUNT, "sequence", "seq", NULL),
    };
    fields[0].choices = optimizer_names();
    return fields;
}

static inline void record_write_object(JsonWriter* w, const char* key, const Field* fields, size_t count,
                                       const void* base) {
    json_member_begin(w, key, '{');
    fields_write(w, fields, count, base);
    json_write_end(w, '}');
}

// Writes the flags that have a mark, or do not, as the command line has them.
static inline void flags_write(JsonWriter* w, const Flags* flags, int mark, bool marked) {
    json_member_begin(w, "flags", '{');
    for (size_t i = 0; flags && i < flags->count; i++) {
        char text[FILE_PATH_MAX];
        const Flag* flag = &flags->rows[i];
        if (flag->name == NULL || ((flag->marks & mark) != 0) != marked) continue;
        flag_text(text, sizeof text, flag);
        json_member_string(w, flag->name, text);
    }
    json_write_end(w, '}');
}

// Begins a manifest and writes the record as its members.
static inline void record_write(JsonWriter* w, const RunRecord* r, const FlatVector* flat) {
    manifest_begin(w, flat);
    fields_write(w, record_fields(), RECORD_FIELD_COUNT, r);
    json_member_hash(w, "data", r->data);
    json_member_u64(w, "leaves", max_size(r->leaves, 1));
    json_member_u64(w, "kv_copies", max_size(r->kv_copies, 1));
    json_member_u64(w, "row_leaves", max_size(r->row_leaves, 1));
    json_member_u64(w, "total_batch", r->total_batch);
    json_member_string(w, "kind", SAVE_KIND_NAMES[r->kind]);
    if (r->base.path[0]) {
        json_member_begin(w, "base", '{');
        json_member_string(w, "path", r->base.path);
        json_member_hash(w, "hash", r->base.hash);
        json_write_end(w, '}');
    }
    record_write_object(w, "config", CONFIG_FIELDS, CONFIG_FIELD_COUNT, &r->config);
    flags_write(w, r->flags, FLAG_FREE, false);
    record_write_object(w, "state", STATE_FIELDS, STATE_FIELD_COUNT, &r->state);
}

// Reads and checks the manifest of the checkpoint at a path. The caller frees *manifest after success.
static inline bool record_open(Json* manifest, RunRecord* r, const char* path, Error* error) {
    char data[20] = "";
    unsigned long long fingerprint = 0;
    memset(r, 0, sizeof *r);
    if (!manifest_open(manifest, path, error)) return false;
    bool ok = fields_read(r, record_fields(), RECORD_FIELD_COUNT, manifest, 0) &&
              json_string(manifest, json_get(manifest, 0, "data"), data, sizeof data) &&
              sscanf(data, "%llx", &fingerprint) == 1 &&
              fields_read(&r->config, CONFIG_FIELDS, CONFIG_FIELD_COUNT, manifest, json_get(manifest, 0, "config")) &&
              fields_read(&r->state, STATE_FIELDS, STATE_FIELD_COUNT, manifest, json_get(manifest, 0, "state"));
    r->data = fingerprint;
    uint32_t base = json_get(manifest, 0, "base");
    if (ok && json_string(manifest, json_get(manifest, base, "path"), r->base.path, sizeof r->base.path))
        ok = json_string(manifest, json_get(manifest, base, "hash"), data, sizeof data) &&
             sscanf(data, "%llx", &fingerprint) == 1;
    r->base.hash = fingerprint;
    r->leaves = r->row_leaves = r->kv_copies = 1;  // of a checkpoint that lacks them
    json_u64(manifest, json_get(manifest, 0, "leaves"), &r->leaves);
    json_u64(manifest, json_get(manifest, 0, "row_leaves"), &r->row_leaves);
    json_u64(manifest, json_get(manifest, 0, "total_batch"), &r->total_batch);
    json_u64(manifest, json_get(manifest, 0, "kv_copies"), &r->kv_copies);
    if (ok) return true;
    json_free(manifest);
    return manifest_refuse(path, error);
}

// Saves a model as OUT/step_N, N being the record's step, and waits until it is on disk. All ranks call it together.
static inline bool model_save(Model* model, const RunRecord* record, const char* out, Error* error) {
    Saver saver;
    JsonWriter manifest;
    if (!saver_open(&saver, &model->flat, false, 0, error)) return false;
    record_write(&manifest, record, &model->flat);
    saver_begin(&saver, record->state.step, out, &manifest);
    bool ok = saver_end(&saver, error);
    saver_close(&saver);
    return ok;
}

// Loads the weights and optimizer state of the checkpoint at a path, or only the weights, into a model of the same
// configuration. Each rank can call it alone.
static inline bool model_load(Model* model, RunRecord* record, const char* path, bool weights_alone, Error* error) {
    Json manifest;
    if (!record_open(&manifest, record, path, error)) return false;
    bool ok =
        fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &record->config, &model->config, "checkpoint", path, error) &&
        checkpoint_load(&model->flat, &manifest, path, weights_alone, error);
    json_free(&manifest);
    return ok;
}

#endif  // LLMTRAIN_RECORD_H
