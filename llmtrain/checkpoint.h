// checkpoint.h: saving a run and taking it up again, to the bit.
//
// A checkpoint is a directory OUT/step_00000020 with
//   rank_00000.safetensors   what rank 0 saves of weights and optimizer state: its slice of weight.NAME, m.NAME, v.NAME,
//                            as NAME[first:end] in elements where it is not all of the tensor; and so for each rank
//   manifest.json            everything else, written last: configuration, state of the run, the table of the flat
//                            vector, a checksum of every piece, and in its last line one of the manifest itself
// It is made under a temporary name, flushed to the disk, and renamed: under its final name it is whole. There is no
// pointer to the newest; the newest is the one with the highest step whose checksums agree. A damaged one is named
// and passed over, and the one before it is used.
//
// Weights are the float master weights where there are any: 16-bit parameters follow from them by rounding. Whatever the number
// of ranks and the stage of ZeRO, the pieces of a tensor are slices that follow each other; so a run goes on with any
// number of ranks, in any stage, and each rank takes what it needs.

#ifndef LLMTRAIN_CHECKPOINT_H
#define LLMTRAIN_CHECKPOINT_H

#include "../llmtrain.h"
#include "safetensors.h"

#include <inttypes.h>

#define CHECKPOINT_FORMAT "llmtrain checkpoint 4"
#define CHECKPOINT_MANIFEST_MAX ((size_t)1 << 28)

// Why a checkpoint was saved: --ckpt-every asked for it; it is halfway between two such, and goes when a newer one is there;
// the run ended, or was told to stop.
typedef enum { SAVE_ASKED, SAVE_HALFWAY, SAVE_END } SaveKind;
#define SAVE_KIND_NAMES "asked|halfway|end"

// What a checkpoint says beside its tensors.
typedef struct {
    Config config;
    OptimizerKind optimizer;
    bool master_weights;           // the weights are saved as float master weights
    uint64_t seed;          // of initial weights, data order, dropout
    uint64_t T;             // length of a sample: the order of the data depends on it
    uint64_t data;          // fingerprint of the training data: likewise
    RunState state;
    SaveKind kind;
    const Flag* flags;      // (flag_count) what else steers the run: saved as text, to tell what a resume changes
    size_t flag_count;
} RunRecord;

// Flags that do not change what a run computes.
#define CHECKPOINT_FREE_FLAGS                                                                                          \
    "data|val|out|prompt|resume|plan|threads|val-every|val-windows|val-overlap|sample-every|log-every|ckpt-every|"     \
    "ckpt-async|ckpt-bandwidth|ckpt-keep|ckpt-keep-every|ckpt-hot|ckpt-hot-dir|mtbf|init-from|peak-tflops|tokens|"     \
    "temperature|top-k|top-p|ranks|timeout|check-every|slow-factor|slow-steps|memory|bandwidth|compute-ms"

// ------------------------------------------------------------------------------------------------
// The arrays of a checkpoint

#define CHECKPOINT_FILE "rank_%05zu.safetensors"  // of a rank

typedef struct {
    const char* prefix;     // of the names of its tensors
    void* data;             // (flat_size), or what the rank has of it: the slices that flat_state tells
    Dtype type;
    bool sliced;
} CheckpointArray;

enum { CHECKPOINT_ARRAYS = 1 + OPTIMIZER_STATES };

// The arrays that a model saves: the weights and the optimizer's states. Returns their number.
static inline size_t checkpoint_arrays(CheckpointArray arrays[CHECKPOINT_ARRAYS], const Model* model) {
    const FlatVector* flat = &model->flat;
    OptimizerKind optimizer = model->options.optimizer;
    const CheckpointArray params = {"weight", flat->params, FLOATX_DTYPE, false};
    const CheckpointArray master_weights = {"weight", flat->master_weights, DTYPE_F32, true};
    size_t count = 0;
    arrays[count++] = flat->master_weights ? master_weights : params;
    for (size_t s = 0; s < optimizer_states(optimizer) && flat->states[s]; s++) {  // sampling keeps none
        const CheckpointArray state = {OPTIMIZERS[optimizer].states[s], flat->states[s], DTYPE_F32, true};
        arrays[count++] = state;
    }
    return count;
}

// Where there is no snapshot, tensors go to and from the device in chunks, through memory of the host.
enum { CHECKPOINT_CHUNK = 1 << 20 };  // elements

// The part of elements [first, end) of the flat vector that this rank has of an array, and where it lies there.
static inline CommSlice checkpoint_part(char** place, const CheckpointArray* array, const FlatVector* flat, size_t first,
                                        size_t end) {
    CommSlice part = {first, end};
    size_t index = first;
    if (array->sliced) part = flat_state(&index, flat, first, end);
    *place = (char*)array->data + index * dtype_bytes(array->type);
    return part;
}

// What this rank saves of a tensor: its slice, without the rows of the padded vocabulary; it may be empty.
static inline CommSlice checkpoint_saved(const FlatVector* flat, const Tensor* t) {
    const Bucket* k = &flat->buckets[t->bucket];
    CommSlice part = {max_size(t->offset, k->own.first), min_size(t->offset + tensor_elements(t), k->own.end)};
    if (part.first >= part.end) part.first = part.end = t->offset;
    return part;
}

static inline void checkpoint_piece_name(char name[96], const char* prefix, const Tensor* t, CommSlice part) {
    bool whole = slice_length(part) == tensor_elements(t);
    if (whole) snprintf(name, 96, "%s.%s", prefix, t->name);
    else snprintf(name, 96, "%s.%s[%zu:%zu]", prefix, t->name, part.first - t->offset, part.end - t->offset);
}

// The bytes of a snapshot: all that this rank saves. Also of a model that is only planned.
static inline size_t checkpoint_bytes(const Model* model) {
    const ModelOptions* o = &model->options;
    size_t elements = 0, states = optimizer_states(o->optimizer);
    for (size_t i = 0; i < model->parameters.count; i++)
        elements += slice_length(checkpoint_saved(&model->flat, &model->parameters.tensors[i]));
    return elements * ((o->master_weights ? sizeof(float) : sizeof(floatX)) + states * sizeof(float));
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
    json_member_bool(w, "tied", c->tied);
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
    json_member_u64(w, "skipped_row", s->skipped_consecutive);
    json_member_u64(w, "rewinds", s->rewinds);
    json_member_u64(w, "rewound_from", s->rewound_from);
    json_member_u64(w, "rewound_to", s->rewound_to);
    json_member_number(w, "lr_factor", s->lr_factor);
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

// A rank's file, with the checksums that its writer computed: an element of the manifest's "files".
static inline void manifest_write_file(JsonWriter* w, size_t rank, const SafetensorsHeader* header) {
    char name[32];
    snprintf(name, sizeof name, CHECKPOINT_FILE, rank);
    json_write_begin(w, '{');
    json_member_string(w, "file", name);
    json_member_hash(w, "header_checksum", header->hash);
    json_write_key(w, "checksums");
    json_write_begin(w, '{');
    for (size_t i = 0; i < header->count; i++) json_member_hash(w, header->tensors[i].name, header->tensors[i].hash);
    json_write_end(w, '}');
    json_write_end(w, '}');
}

// The end of a manifest whose text before it is given: the checksum of that text.
static inline void manifest_tail(char tail[64], const char* text, size_t bytes) {
    snprintf(tail, 64, ",\n  \"checksum\": \"%016llx\"\n}\n", (unsigned long long)hash_bytes(text, bytes));
}

// files: the text of each rank's element, where it begins, as comm_gather_texts gives them.
static inline bool manifest_save(const char* path, const Model* model, const RunRecord* run, const char* files,
                                 const size_t* begins, Error* error) {
    char kind[16], tail[64], products[320];
    double peak;
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
    json_member_string(&w, "optimizer", OPTIMIZERS[run->optimizer].name);
    json_member_bool(&w, "masters", run->master_weights);
    json_member_u64(&w, "seed", run->seed);
    json_member_u64(&w, "sequence", run->T);
    json_member_hash(&w, "data", run->data);
    choice_name(SAVE_KIND_NAMES, (int)run->kind, kind, sizeof kind);
    json_member_string(&w, "kind", kind);
    manifest_write_config(&w, &run->config);
    manifest_write_flags(&w, run);
    manifest_write_state(&w, &run->state);
    manifest_write_table(&w, &model->parameters);
    json_write_key(&w, "files");
    json_write_begin(&w, '[');
    for (size_t r = 0; r < model->flat.options.world; r++) json_write_raw(&w, files + begins[r]);
    json_write_end(&w, ']');
    if (!w.failed) {
        manifest_tail(tail, w.text, w.bytes);
        json_put(&w, tail, strlen(tail));
        w.depth--;  // the tail has closed the object
    }
    bool ok = json_write_done(&w, error) && file_write_atomic(path, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

// Whether a member that json_member_hash wrote is this hash.
static inline bool manifest_hash_is(const Json* json, uint32_t node, uint64_t hash) {
    char expected[24] = "", found[24];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)hash);
    return json_string(json, node, expected, sizeof expected) && strcmp(found, expected) == 0;
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
    return ok && kind >= 0 && manifest_size(&c->layers, json, node, "layers") &&
        manifest_size(&c->heads, json, node, "heads") && manifest_size(&c->kv_heads, json, node, "kv_heads") &&
        manifest_size(&c->channels, json, node, "channels") && manifest_size(&c->ffn, json, node, "ffn") &&
        manifest_size(&c->context, json, node, "context") && manifest_size(&c->vocab, json, node, "vocab") &&
        json_bool(json, json_get(json, node, "tied"), &c->tied) &&
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
           json_u64(json, json_get(json, node, "scale_good"), &s->scale_good) &&
           json_u64(json, json_get(json, node, "skipped_row"), &s->skipped_consecutive) &&
           json_u64(json, json_get(json, node, "rewinds"), &s->rewinds) &&
           json_u64(json, json_get(json, node, "rewound_from"), &s->rewound_from) &&
           json_u64(json, json_get(json, node, "rewound_to"), &s->rewound_to) &&
           json_number(json, json_get(json, node, "lr_factor"), &s->lr_factor);
}

static inline bool manifest_read_run(RunRecord* run, const Json* json) {
    char format[64] = "", optimizer[16] = "", saved[16] = "", data[20] = "";
    bool ok = json_string(json, json_get(json, 0, "format"), format, sizeof format) &&
        strcmp(format, CHECKPOINT_FORMAT) == 0 &&
        json_string(json, json_get(json, 0, "optimizer"), optimizer, sizeof optimizer) &&
        json_string(json, json_get(json, 0, "kind"), saved, sizeof saved);
    int why = choice_find(SAVE_KIND_NAMES, saved);
    OptimizerKind kind = optimizer_find(optimizer);
    run->optimizer = kind == OPTIMIZER_COUNT ? OPTIMIZER_ADAMW : kind;
    run->kind = why < 0 ? SAVE_END : (SaveKind)why;
    return ok && kind < OPTIMIZER_COUNT && why >= 0 && json_u64(json, json_get(json, 0, "seed"), &run->seed) &&
           json_u64(json, json_get(json, 0, "sequence"), &run->T) &&
           json_bool(json, json_get(json, 0, "masters"), &run->master_weights) &&
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
    manifest_tail(tail, text, 0);  // all tails are equally long
    size_t tail_bytes = strlen(tail), body = bytes > tail_bytes ? bytes - tail_bytes : 0;
    manifest_tail(tail, text, body);
    bool ok = true;
    if (body == 0 || memcmp(text + body, tail, tail_bytes) != 0)
        ok = fail(error, "%.600s does not agree with its checksum; it is damaged", path);
    ok = ok && json_parse(json, text, bytes, path, error);
    if (ok && !manifest_read_run(run, json)) {
        ok = fail(error, "%.600s is not a manifest of '" CHECKPOINT_FORMAT "'; use the version of llmtrain that wrote it",
                  path);
        json_free(json);
    }
    free(text);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// When to save, and what to keep

// What --ckpt-every asks for, and what saves have cost so far; times in milliseconds.
//
// A run that dies loses no more than --ckpt-every says. Written at once, a checkpoint is there before the next step. Written
// beside training it is only there when the next one begins, which waits for it; so one more begins halfway between two.
typedef struct {
    bool beside;               // checkpoints are written beside training, which with every step there is no time for
    uint64_t steps;            // a checkpoint at every multiple of this step; 0: none
    uint64_t halfway;          // and one so many steps after each; 0: none
    double every_ms;           // a checkpoint after so much time; 0: none
    double mtbf_ms;            // between two failures: every_ms follows from this and from what saves cost; 0: it is given
    double began_ms;           // when training began; 0: not yet
    double saved_ms;           // when the last save began, copies in memory apart
    double took_ms;            // the last one, from beginning to end; 0: every_ms takes it into account already
    double cost_ms, costs_ms;  // by how much the last save has delayed training, and all before it
    double usual_ms;           // a step beside which nothing is saved: the mean of the last hundred
    uint64_t usual_count;      // of such steps
} Cadence;

#define CADENCE_FIRST_MS 60e3  // auto: what the first save costs says when the next is due

// text: --ckpt-every; mtbf: hours; async: checkpoints are written beside training.
static inline bool cadence_parse(Cadence* c, const char* text, double mtbf, bool async, Error* error) {
    char* end;
    double number = strtod(text, &end);
    memset(c, 0, sizeof *c);
    c->beside = async;
    if (strcmp(text, "auto") == 0) {
        c->every_ms = CADENCE_FIRST_MS;
        c->mtbf_ms = 3.6e6 * mtbf;
        return true;
    }
    bool minutes = strcmp(end, "min") == 0, good = end != text && number >= 0 && number <= 1e12 && (minutes || *end == 0);
    if (!good || (!minutes && number != floor(number)))
        return fail(error, "--ckpt-every is '%s'; give a number of steps, minutes as 10min, or auto", text);
    if (minutes) c->every_ms = (async ? 3e4 : 6e4) * number;
    else c->steps = (uint64_t)number;
    if (c->steps == 1) c->beside = false;
    if (c->beside) c->halfway = c->steps / 2;
    return true;
}

// Whether there are checkpoints before the end.
static inline bool cadence_saves(const Cadence* c) { return c->steps > 0 || c->every_ms > 0; }

static inline void cadence_start(Cadence* c, double now) { c->began_ms = c->saved_ms = now; }

static inline bool cadence_asks(const Cadence* c, uint64_t step) { return c->steps > 0 && step % c->steps == 0; }

static inline bool cadence_is_halfway(const Cadence* c, uint64_t step) {
    return c->halfway > 0 && step % c->steps == c->halfway;
}

// Whether a checkpoint is due after this step, or now.
static inline bool cadence_due(const Cadence* c, uint64_t step) {
    return cadence_asks(c, step) || cadence_is_halfway(c, step);
}

static inline bool cadence_due_now(const Cadence* c, double now) {
    return c->every_ms > 0 && now - c->saved_ms > c->every_ms;
}

// A save began, on the disk or as a copy in memory.
static inline void cadence_count_save(Cadence* c, double began, bool in_memory) {
    if (!in_memory) c->saved_ms = began;
    c->costs_ms += fmax(c->cost_ms, 0);
    c->cost_ms = 0;
}

// A step took so long; a save beside it makes it longer, which is what that costs, with what comes between two steps.
static inline void cadence_count_step(Cadence* c, double ms, bool saving) {
    if (!saving) c->usual_ms += (ms - c->usual_ms) / (double)min_size(++c->usual_count, 100);
    else if (c->usual_count > 0) c->cost_ms += ms - c->usual_ms;
}

// After a checkpoint: when the next is due, if that is to follow from what it cost. "A First Order Approximation to the
// Optimum Checkpoint Interval" (Young, 1974): sqrt(2 cost mtbf). False if there is nothing to choose.
static inline bool cadence_choose(Cadence* c) {
    if (c->took_ms == 0 || c->mtbf_ms == 0) return false;
    c->cost_ms = fmax(c->cost_ms, 1);
    c->every_ms = fmax(sqrt(2 * c->cost_ms * c->mtbf_ms), c->took_ms);  // a save must have time to end
    c->took_ms = 0;
    return true;
}

// Which checkpoints stay when a newer one is there; those halfway do not.
typedef struct {
    uint64_t newest;   // so many of the newest; 0: all
    uint64_t forever;  // and the first at or after each multiple of this step; 0: no more
    bool rewinds;      // the run may have to go back, to those that --ckpt-every asked for: only these count, and all stay
                       // while the newest is of a time when steps were skipped
} KeepRule;

static inline bool keep_rule_counts(const KeepRule* rule, SaveKind kind) {
    return kind == SAVE_ASKED || (kind == SAVE_END && !rule->rewinds);
}

static inline bool keep_rule_is_full(const KeepRule* rule, uint64_t counted) {
    return rule->newest > 0 && counted >= rule->newest;
}

// older: the step of the one before it; 0: none. counted: how many newer ones count.
static inline bool keep_rule_keeps(const KeepRule* rule, SaveKind kind, uint64_t step, uint64_t older, uint64_t counted) {
    if (rule->forever > 0 && step / rule->forever > older / rule->forever) return true;
    return kind != SAVE_HALFWAY && !keep_rule_is_full(rule, counted);
}

// ------------------------------------------------------------------------------------------------
// Saving

static inline void checkpoint_path(char path[FILE_PATH_MAX], const char* out, uint64_t step, const char* suffix) {
    snprintf(path, FILE_PATH_MAX, "%.4000s/step_%08llu%s", out, (unsigned long long)step, suffix);
}

// A save has three parts. Every rank takes a snapshot of its slices and begins to write its file (saver_begin): in a
// thread of its own, if there is memory for a snapshot, otherwise at once. Training goes on: what is saved only changes
// in the next update, so that on a CPU even the snapshot is taken under the next step (saver_await_snapshot). When all
// ranks have written and flushed theirs, which they tell each other once a step, they come together (saver_end): rank 0
// gets the checksums, writes the manifest, and gives the directory its name.

typedef enum { SAVER_IDLE, SAVER_WRITING, SAVER_WRITTEN, SAVER_FAILED } SaverState;

typedef struct {
    char* snapshot;          // (checkpoint_bytes) on the host; NULL: everything is written by saver_begin
    size_t bytes;            // of it
    double bandwidth;        // bytes per second that the thread writes at most; 0: as it can
    pthread_t thread;
    bool threaded;           // there is a thread to join
    bool taken;              // the snapshot is complete
    SaverState state;        // of the save in progress; the thread changes it, last of all
    bool cancelled;          // the thread is to end soon
    bool gave_up;            // and has, with no failure of its own
    bool hurries;            // it no longer minds the bandwidth
    const Model* model;
    RunRecord run;
    char out[FILE_PATH_MAX];
    SafetensorsWriter writer;
    Error error;             // of SAVER_FAILED
    double stalled_ms;       // how long the save has kept training waiting
    double began_ms;
} Saver;

static inline SaverState saver_state(const Saver* s) {
    return (SaverState)__atomic_load_n((const int*)&s->state, __ATOMIC_ACQUIRE);
}

static inline bool saver_open(Saver* s, const Model* model, bool snapshots, double bandwidth, Error* error) {
    memset(s, 0, sizeof *s);
    s->model = model;
    s->bandwidth = bandwidth;
    s->bytes = snapshots ? checkpoint_bytes(model) : 0;
    s->snapshot = snapshots ? (char*)host_allocate(max_size(s->bytes, 1)) : NULL;
    return !snapshots || s->snapshot != NULL ||
           fail(error, "out of memory for snapshots of %.2f GB; give --ckpt-async off", 1e-9 * (double)s->bytes);
}

// Names every piece of this rank's file.
static inline bool saver_declare(Saver* s, const CheckpointArray* arrays, size_t count, Error* error) {
    const Parameters* p = &s->model->parameters;
    bool ok = true;
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; ok && i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            CommSlice part = checkpoint_saved(&s->model->flat, t);
            bool whole = slice_length(part) == tensor_elements(t);
            char name[96];
            size_t shape[2] = {whole ? t->rows : slice_length(part), t->cols};
            if (slice_length(part) == 0) continue;
            checkpoint_piece_name(name, arrays[a].prefix, t, part);
            ok = safetensors_declare(&s->writer, name, arrays[a].type, shape, whole && t->cols ? 2 : 1, error);
        }
    }
    return ok && safetensors_begin(&s->writer, error);
}

// Writes a chunk, beside training no faster than allowed.
static inline bool saver_write(Saver* s, const void* data, size_t bytes, size_t* written, Error* error) {
    fault_point("write");
    s->gave_up = __atomic_load_n(&s->cancelled, __ATOMIC_RELAXED);
    if (s->gave_up) return fail(error, "the save was given up");
    if (!safetensors_write(&s->writer, data, bytes, error)) return false;
    *written += bytes;
    double due = s->snapshot && s->bandwidth > 0 ? s->began_ms + 1e3 * (double)*written / s->bandwidth : 0;
    while (now_ms() < due && !__atomic_load_n(&s->hurries, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&s->cancelled, __ATOMIC_RELAXED))
        sleep_ms(fmin(due - now_ms(), 50));
    return true;
}

// Straight from the device.
static inline bool saver_write_device(Saver* s, const CheckpointArray* arrays, size_t count, Error* error) {
    const Parameters* p = &s->model->parameters;
    void* chunk = device_is_host() ? NULL : host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    bool ok = device_is_host() || chunk != NULL || fail(error, "out of memory for pieces of tensors; free some memory");
    size_t written = 0;
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; ok && i < p->count; i++) {
            CommSlice part = checkpoint_saved(&s->model->flat, &p->tensors[i]);
            for (size_t first = part.first; ok && first < part.end; first += CHECKPOINT_CHUNK) {
                char* place;
                size_t n = min_size(CHECKPOINT_CHUNK, part.end - first), bytes = n * dtype_bytes(arrays[a].type);
                checkpoint_part(&place, &arrays[a], &s->model->flat, first, first + n);
                if (chunk) download(chunk, place, bytes, s->model->stream);
                ok = saver_write(s, chunk ? chunk : place, bytes, &written, error);
            }
        }
    }
    host_free(chunk);
    return ok;
}

// This rank's file, whole and on the disk.
static inline bool saver_write_file(Saver* s, Error* error) {
    char directory[FILE_PATH_MAX], path[FILE_PATH_MAX + 64];
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = checkpoint_arrays(arrays, s->model), written = 0;
    checkpoint_path(directory, s->out, s->run.state.step, ".tmp");
    snprintf(path, sizeof path, "%s/" CHECKPOINT_FILE, directory, s->model->flat.options.rank);
    if (!directory_make(directory, error) || !safetensors_create(&s->writer, path, error)) return false;
    bool ok = saver_declare(s, arrays, count, error);
    if (ok && s->snapshot == NULL) ok = saver_write_device(s, arrays, count, error);
    const size_t chunk = CHECKPOINT_CHUNK * sizeof(float);
    for (size_t at = 0; ok && s->snapshot && at < s->bytes; at += chunk)
        ok = saver_write(s, s->snapshot + at, min_size(chunk, s->bytes - at), &written, error);
    fault_point("flush");
    return ok && safetensors_end(&s->writer, error);
}

// Copies this rank's slices to the host.
static inline void saver_take_snapshot(Saver* s) {
    const Model* model = s->model;
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = checkpoint_arrays(arrays, model), at = 0;
    fault_point("copy");
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; i < model->parameters.count; i++) {
            char* place;
            CommSlice part = checkpoint_saved(&model->flat, &model->parameters.tensors[i]);
            size_t bytes = slice_length(part) * dtype_bytes(arrays[a].type);
            if (bytes == 0) continue;
            checkpoint_part(&place, &arrays[a], &model->flat, part.first, part.end);
            download(s->snapshot + at, place, bytes, model->stream);
            at += bytes;
        }
    }
    fault_point("snapshot");
    __atomic_store_n(&s->taken, true, __ATOMIC_RELEASE);
}

static inline void* saver_run(void* argument) {
    Saver* s = (Saver*)argument;
    if (s->snapshot && !s->taken) saver_take_snapshot(s);
    bool ok = saver_write_file(s, &s->error);
    __atomic_store_n((int*)&s->state, ok ? SAVER_WRITTEN : SAVER_FAILED, __ATOMIC_RELEASE);
    return NULL;
}

// The thread leaves the cores to training.
static inline void* saver_run_beside(void* argument) {
    threads_set(1);
    return saver_run(argument);
}

// Begins a save; no other is in progress. What fails is told by saver_state; `reason` is not NULL if something has failed
// on this rank already.
static inline void saver_begin(Saver* s, Model* model, const RunRecord* run, const char* out, const Error* reason) {
    s->began_ms = now_ms();
    s->stalled_ms = 0;
    s->run = *run;
    s->cancelled = s->gave_up = false;
    s->state = SAVER_WRITING;
    snprintf(s->out, sizeof s->out, "%.4000s", out);
    bool whole = flat_await_all(&model->flat, &s->error);  // parameters that have not come are not to be saved
    if (reason) s->error = *reason;
    if (!whole || reason) {
        s->state = SAVER_FAILED;
        return;
    }
    s->taken = false;
    if (s->snapshot && !device_is_host()) saver_take_snapshot(s);
    s->threaded = s->snapshot && pthread_create(&s->thread, NULL, saver_run_beside, s) == 0;
    if (!s->threaded) saver_run(s);
    s->stalled_ms = now_ms() - s->began_ms;
}

// Before parameters and optimizer state change.
static inline void saver_await_snapshot(Saver* s) {
    double began = now_ms();
    while (s->threaded && !__atomic_load_n(&s->taken, __ATOMIC_ACQUIRE)) sleep_ms(0.1);
    s->stalled_ms += now_ms() - began;
}

// While a save is waited for, it takes all of the disk.
static inline void saver_hurry(Saver* s, bool hurries) { __atomic_store_n(&s->hurries, hurries, __ATOMIC_RELAXED); }

// The save in progress has failed on some rank: the thread need not go on.
static inline void saver_give_up(Saver* s) { __atomic_store_n(&s->cancelled, true, __ATOMIC_RELAXED); }

static inline void saver_join(Saver* s) {
    if (s->threaded) pthread_join(s->thread, NULL);
    s->threaded = false;
}

// Forgets the save in progress, and what it has written; all ranks together.
static inline void saver_cancel(Saver* s) {
    char directory[FILE_PATH_MAX];
    Error ignored;
    if (s->state == SAVER_IDLE) return;
    saver_give_up(s);
    saver_join(s);
    safetensors_writer_free(&s->writer);
    checkpoint_path(directory, s->out, s->run.state.step, ".tmp");
    if (s->model->flat.options.rank == 0) directory_remove(directory, &ignored);
    s->state = SAVER_IDLE;
}

#define CHECKPOINT_ASIDE ".aside"  // a checkpoint that a run has gone back before, or that it has saved once more

// Gives a checkpoint a name that has a suffix, so that it is taken for one no longer.
static inline bool checkpoint_rename(const char* out, uint64_t step, const char* suffix) {
    char path[FILE_PATH_MAX], renamed[FILE_PATH_MAX];
    Error ignored;
    checkpoint_path(path, out, step, "");
    checkpoint_path(renamed, out, step, suffix);
    directory_remove(renamed, &ignored);  // left from earlier
    return rename(path, renamed) == 0;
}

// Rank 0, when all files are on the disk: the manifest, and then the name.
static inline bool saver_publish(Saver* s, const char* files, const size_t* begins, Error* error) {
    char path[FILE_PATH_MAX], temporary[FILE_PATH_MAX], file[FILE_PATH_MAX + 64];
    uint64_t step = s->run.state.step;
    checkpoint_path(path, s->out, step, "");
    checkpoint_path(temporary, s->out, step, ".tmp");
    snprintf(file, sizeof file, "%s/manifest.json", temporary);
    // Where ranks do not see each other's files, a checkpoint would be of no use.
    for (size_t r = 0; r < s->model->flat.options.world; r++) {
        char part[FILE_PATH_MAX + 64];
        snprintf(part, sizeof part, "%s/" CHECKPOINT_FILE, temporary, r);
        if (access(part, R_OK) == 0) continue;
        if (errno != ENOENT) return fail_file(error, "look at", part);
        return fail(error,
                    "rank %zu has written %.600s, but rank 0 does not see it; give an --out that all machines share", r,
                    part);
    }
    fault_point("manifest");
    if (!manifest_save(file, s->model, &s->run, files, begins, error)) return false;

    // A checkpoint of the same step is there if a run resumed before it, because it was damaged.
    if (directory_exists(path) && !checkpoint_rename(s->out, step, CHECKPOINT_ASIDE))
        return fail_file(error, "set aside", path);
    fault_point("rename");
    return directory_rename_sync(temporary, path, error);
}

// Completes a save that all ranks have written; all together. False if it could not be: then it is forgotten, earlier
// checkpoints are as they were, and the error, on every rank, says why. A rank that is gone shows in the Comm.
static inline bool saver_end(Saver* s, Error* error) {
    Comm* comm = s->model->flat.options.comm;
    double began = now_ms();
    char* files = NULL;
    size_t alone = 0, *begins = NULL;
    JsonWriter w;
    memset(&w, 0, sizeof w);
    saver_join(s);
    bool ok = s->state == SAVER_WRITTEN;
    if (!ok) *error = s->error;
    // Who gave up did so because of others: theirs is the reason to tell.
    if (comm) ok = comm_agree_all(comm, ok || s->gave_up, error) && comm_agree_all(comm, ok, error);
    if (ok) {
        manifest_write_file(&w, s->model->flat.options.rank, &s->writer.header);
        ok = json_write_done(&w, error);
        if (!ok && comm) comm_abort(comm, error->text);
    }
    if (ok && comm) ok = comm_gather_texts(comm, &files, &begins, w.text, error);
    if (ok && s->model->flat.options.rank == 0) ok = saver_publish(s, comm ? files : w.text, comm ? begins : &alone, error);
    Error lost;
    if (comm && !comm_failed(comm, &lost)) ok = comm_agree_all(comm, ok, error);
    free(files);
    free(begins);
    json_writer_free(&w);
    if (ok) {
        safetensors_writer_free(&s->writer);
        s->state = SAVER_IDLE;
    } else {
        saver_cancel(s);
    }
    s->stalled_ms += now_ms() - began;
    return ok;
}

static inline void saver_close(Saver* s) {
    if (s->model) saver_cancel(s);
    host_free(s->snapshot);
    memset(s, 0, sizeof *s);
}

// Removes the directories of OUT that have a suffix to the name of a checkpoint, of steps up to `last`.
static inline void checkpoint_remove_suffixed(const char* out, const char* suffix, uint64_t last) {
    DIR* directory = opendir(out);
    Error ignored;
    if (directory == NULL) return;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        unsigned long long step;
        char path[FILE_PATH_MAX + 300];
        const char* end = strrchr(entry->d_name, '.');
        if (end == NULL || strcmp(end, suffix) != 0) continue;
        if (sscanf(entry->d_name, "step_%llu", &step) != 1 || step > last) continue;
        snprintf(path, sizeof path, "%.4000s/%.255s", out, entry->d_name);
        directory_remove(path, &ignored);
    }
    closedir(directory);
}

// Removes what saves that were killed have left in OUT. Only one process may work on OUT at a time.
static inline void checkpoint_clean(const char* out) {
    checkpoint_remove_suffixed(out, ".tmp", UINT64_MAX);
    checkpoint_remove_suffixed(out, ".old", UINT64_MAX);
}

// ------------------------------------------------------------------------------------------------
// Loading

// What of the flat vector has been found so far.
typedef struct {
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count;
    size_t* found;           // (count, tensors) elements of each, from its first
    void *chunk, *rounded;   // (CHECKPOINT_CHUNK) floats on the host
} CheckpointLoad;

// The array and the tensor that a piece is of, and its elements; false if it is of no interest.
static inline bool checkpoint_piece(size_t* array, size_t* tensor, CommSlice* part, const CheckpointLoad* load,
                                    const Parameters* p, const SafetensorsTensor* saved) {
    const char *dot = strchr(saved->name, '.'), *bracket = strchr(saved->name, '[');
    for (size_t a = 0; dot && a < load->count; a++) {
        if (strncmp(saved->name, load->arrays[a].prefix, (size_t)(dot - saved->name)) != 0) continue;
        if (load->arrays[a].prefix[dot - saved->name] != 0) continue;
        size_t length = bracket ? (size_t)(bracket - dot - 1) : strlen(dot + 1);
        for (size_t i = 0; i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            if (strncmp(t->name, dot + 1, length) != 0 || t->name[length] != 0) continue;
            *array = a;
            *tensor = i;
            part->first = 0;
            part->end = tensor_elements(t);
            return bracket == NULL || sscanf(bracket, "[%zu:%zu]", &part->first, &part->end) == 2;
        }
    }
    return false;
}

// Reads one piece: what this rank needs of it goes to the device, and all of it into the checksum. Moments that are other
// ranks' are left to them.
static inline bool checkpoint_read_piece(Model* model, CheckpointLoad* load, const SafetensorsFile* file,
                                         const SafetensorsTensor* saved, const Json* manifest, uint32_t checksums,
                                         Error* error) {
    size_t a, i;
    CommSlice part;
    if (!checkpoint_piece(&a, &i, &part, load, &model->parameters, saved)) return true;
    const CheckpointArray* array = &load->arrays[a];
    const Tensor* t = &model->parameters.tensors[i];
    bool is_weight = strcmp(array->prefix, "weight") == 0;
    // For a 16-bit model that keeps no master_weights.
    bool rounds = saved->type == DTYPE_F32 && array->type != DTYPE_F32;
    if (saved->type != array->type && !rounds) {
        fail(error, "%.600s holds %s as %s, but this program wants %s; build it with the checkpoint's precision", file->path,
             saved->name, DTYPES[saved->type].safetensors, DTYPES[array->type].safetensors);
        error->elsewhere = true;
        return false;
    }
    size_t size = dtype_bytes(saved->type), to_size = dtype_bytes(array->type);
    size_t n = slice_length(part);
    size_t* reached = &load->found[a * model->parameters.count + i];
    if (part.first > part.end || part.end > tensor_elements(t) || part.first != *reached || saved->bytes != n * size)
        return fail(error,
                    "%.600s: %.100s has %zu bytes and follows element %zu; it is of another model, or a file is missing",
                    file->path, saved->name, saved->bytes, *reached);
    *reached = part.end;
    char* place;
    if (!is_weight &&
        slice_length(checkpoint_part(&place, array, &model->flat, t->offset + part.first, t->offset + part.end)) == 0)
        return true;
    uint32_t expected = json_get(manifest, checksums, saved->name);
    if (expected == JSON_NONE)
        return fail(error, "%.600s: the manifest does not know %.100s; the checkpoint is damaged", file->path, saved->name);
    Hash hash = hash_begin(0);
    for (size_t done = 0; done < n; done += CHECKPOINT_CHUNK) {
        size_t count = min_size(CHECKPOINT_CHUNK, n - done), first = t->offset + part.first + done;
        if (!safetensors_read_range(file, saved, done * size, count * size, load->chunk, error)) return false;
        hash_add(&hash, load->chunk, count * size);
        if (rounds || (is_weight && array->sliced)) {
            const float* from = (const float*)load->chunk;
            floatX* to = (floatX*)load->rounded;
            #pragma omp parallel for simd
            for (size_t e = 0; e < count; e++) to[e] = floatX_of(from[e]);
        }
        const char* values = (const char*)(rounds ? load->rounded : load->chunk);
        CommSlice mine = checkpoint_part(&place, array, &model->flat, first, first + count);
        if (slice_length(mine) > 0)
            upload(place, values + (mine.first - first) * to_size, slice_length(mine) * to_size, model->stream);
        // Parameters, which every rank has all of, follow from the master_weights.
        if (is_weight && array->sliced)
            upload(model->flat.params + first, load->rounded, count * sizeof(floatX), model->stream);
    }
    if (!manifest_hash_is(manifest, expected, hash_end(&hash)))
        return fail(error, "%.600s: %s does not agree with its checksum; the file is damaged", file->path, saved->name);
    return true;
}

static inline bool checkpoint_read_file(Model* model, CheckpointLoad* load, const Json* manifest, uint32_t entry,
                                        const char* directory, Error* error) {
    char path[FILE_PATH_MAX + 64], name[64] = "";
    SafetensorsFile file;
    if (!json_string(manifest, json_get(manifest, entry, "file"), name, sizeof name) || strchr(name, '/'))
        return fail(error, "the manifest of %.600s has an entry that names no file; it is damaged", directory);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (!safetensors_open(&file, path, error)) return false;
    bool ok = manifest_hash_is(manifest, json_get(manifest, entry, "header_checksum"), file.header.hash) ||
              fail(error, "%.600s: its header does not agree with its checksum; the file is damaged", path);
    for (size_t i = 0; ok && i < file.header.count; i++)
        ok = checkpoint_read_piece(model, load, &file, &file.header.tensors[i], manifest,
                                   json_get(manifest, entry, "checksums"), error);
    safetensors_close(&file);
    return ok;
}

// Loads the tensors of the checkpoint whose manifest is open, each rank for itself; all, or the weights alone, which are
// all that a model takes that does not train. After a failure the model holds a mixture, and must be loaded again from
// another checkpoint.
static inline bool checkpoint_load(Model* model, const Json* manifest, const char* directory, bool weights_alone,
                                   Error* error) {
    CheckpointLoad load;
    const Parameters* p = &model->parameters;
    memset(&load, 0, sizeof load);
    load.count = checkpoint_arrays(load.arrays, model);
    if (weights_alone) load.count = 1;  // they come first
    load.found = (size_t*)allocate(load.count * p->count * sizeof(size_t));
    load.chunk = host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    load.rounded = host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    bool ok = (load.found && load.chunk && load.rounded) ||
              fail_memory(error, directory, CHECKPOINT_CHUNK * sizeof(float));
    uint32_t files = json_get(manifest, 0, "files");
    for (uint32_t entry = json_first(manifest, files); ok && entry != JSON_NONE; entry = json_next(manifest, entry))
        ok = checkpoint_read_file(model, &load, manifest, entry, directory, error);
    for (size_t i = 0; ok && i < load.count * p->count; i++) {
        const Tensor* t = &p->tensors[i % p->count];
        if (load.found[i] < tensor_elements(t))
            ok = fail(error, "%.600s has %zu of %zu elements of %s.%s; it is of another model, or a file is missing",
                      directory, load.found[i], tensor_elements(t), load.arrays[i / p->count].prefix, t->name);
    }
    free(load.found);
    host_free(load.chunk);
    host_free(load.rounded);
    return ok;
}

// The highest step below `before` of which OUT has a checkpoint directory. False if OUT cannot be read, which is not the
// same as an OUT that has none, or does not exist.
static inline bool checkpoint_find_before(uint64_t* step, bool* found, const char* out, uint64_t before, Error* error) {
    DIR* directory = opendir(out);
    *found = false;
    if (directory == NULL) return errno == ENOENT || errno == ENOTDIR || fail_file(error, "look for checkpoints in", out);
    for (struct dirent* entry; (errno = 0, entry = readdir(directory)) != NULL;) {
        unsigned long long number = 0;
        char expected[64];
        if (sscanf(entry->d_name, "step_%llu", &number) != 1) continue;
        snprintf(expected, sizeof expected, "step_%08llu", number);  // exactly the name that checkpoint_path makes
        if (strcmp(entry->d_name, expected) != 0 || number >= before || (*found && number <= *step)) continue;
        *step = number;
        *found = true;
    }
    bool good = errno == 0 || fail_file(error, "look for checkpoints in", out);
    closedir(directory);
    return good;
}

// The same for those to whom an OUT that cannot be read is one that has none.
static inline bool checkpoint_before(uint64_t* step, const char* out, uint64_t before) {
    bool found;
    Error ignored;
    return checkpoint_find_before(step, &found, out, before, &ignored) && found;
}

// Removes a checkpoint. It loses its name first, so that half of it is never taken for one.
static inline bool checkpoint_remove(const char* out, uint64_t step) {
    char removed[FILE_PATH_MAX];
    Error ignored;
    if (!checkpoint_rename(out, step, ".old")) return false;
    checkpoint_path(removed, out, step, ".old");
    directory_remove(removed, &ignored);  // or the next start does
    return true;
}

// What the checkpoint of a step says of itself; false if it has no good manifest.
static inline bool checkpoint_describe(RunRecord* run, const char* out, uint64_t step) {
    char path[FILE_PATH_MAX];
    Json manifest;
    Error ignored;
    checkpoint_path(path, out, step, "");
    if (!manifest_open(&manifest, run, path, &ignored)) return false;
    json_free(&manifest);
    return true;
}

// Removes checkpoints of OUT that are older than the newest, which has just been saved, and that the rule does not keep; and
// what was set aside up to there. Nothing is removed while the newest has no good manifest. Of others the manifest is only
// looked at until enough of them count.
static inline void checkpoint_prune(const char* out, uint64_t newest, const KeepRule* rule) {
    RunRecord run;
    if (!checkpoint_describe(&run, out, newest)) return;
    if (rule->rewinds && run.state.skipped_consecutive > 0) return;
    uint64_t counted = keep_rule_counts(rule, run.kind), step = newest, older;
    for (bool more = checkpoint_before(&step, out, newest); more; step = older) {
        bool known = !keep_rule_is_full(rule, counted) && checkpoint_describe(&run, out, step);
        SaveKind kind = known ? run.kind : SAVE_END;
        older = 0;
        more = checkpoint_before(&older, out, step);
        if (!keep_rule_keeps(rule, kind, step, older, counted)) checkpoint_remove(out, step);
        else counted += known && keep_rule_counts(rule, kind);
    }
    checkpoint_remove_suffixed(out, CHECKPOINT_ASIDE, newest);
}

// Removes old checkpoints, which takes a while, under the training.
typedef struct {
    pthread_t thread;
    bool running;            // there is a thread to join
    char out[FILE_PATH_MAX];
    uint64_t newest;
    KeepRule rule;
} Pruner;

static inline void* pruner_run(void* argument) {
    Pruner* p = (Pruner*)argument;
    checkpoint_prune(p->out, p->newest, &p->rule);
    return NULL;
}

static inline void pruner_await(Pruner* p) {
    if (p->running) pthread_join(p->thread, NULL);
    p->running = false;
}

// checkpoint_prune, after what was begun before it.
static inline void pruner_begin(Pruner* p, const char* out, uint64_t newest, const KeepRule* rule) {
    pruner_await(p);
    p->newest = newest;
    p->rule = *rule;
    snprintf(p->out, sizeof p->out, "%.4000s", out);
    p->running = pthread_create(&p->thread, NULL, pruner_run, p) == 0;
    if (!p->running) pruner_run(p);
}

// Takes the checkpoints from step `first` on away, the newest first: sets them aside, or removes them.
static inline bool checkpoint_take_away(const char* out, uint64_t first, bool sets_aside, Error* error) {
    uint64_t step = UINT64_MAX;
    bool found;
    for (;;) {
        if (!checkpoint_find_before(&step, &found, out, step, error)) return false;
        if (!found || step < first) return true;
        if (!(sets_aside ? checkpoint_rename(out, step, CHECKPOINT_ASIDE) : checkpoint_remove(out, step)))
            return fail_file(error, "take the later checkpoints away in", out);
    }
}

// Removes a directory with the checkpoints in it.
static inline void checkpoint_discard(const char* out) {
    Error ignored;
    checkpoint_clean(out);
    if (checkpoint_take_away(out, 0, false, &ignored)) rmdir(out);
}

#endif  // LLMTRAIN_CHECKPOINT_H
