// run.h: a run: what it owns, what its ranks agree on, and where it begins.
//
//   1. run        its flags; what it owns; events; agreement between ranks: run_agree
//   2. identity   what ranks must have in common, and a resumed run with its checkpoint: run_compare_ranks,
//                 resume_agrees
//   3. beginning  data, tokenizer, configuration, the weights and the state of step 0: run_open_data, run_start
//
// A failure on one rank passes through run_agree, in the function or its caller, before the next collective, so that
// all ranks fail together or none does. Above it stand save.h (checkpoints), rewind.h, validation.h, checks.h (what
// watches over its steps), step.h (a step) and join.h (becoming a rank, and leaving).

#ifndef LLMTRAIN_RUN_H
#define LLMTRAIN_RUN_H

#include "../base/fault.h"
#include "../checkpoint/peft.h"
#include "log.h"
#include "objectives.h"
#include "heartbeat.h"
#include "presets.h"
#include "run_tokenizer.h"
#include "../text/shard_check.h"
#include "../ranks/mesh.h"

#include <signal.h>

// ------------------------------------------------------------------------------------------------
// 1. Run

typedef struct {
    const char *out, *init_from;          // the directory of the run; the model whose weights it begins with
    const char* adapter;                  // directories of adapters, which are merged into it, or trained further
    bool resume, tensorboard;
    uint64_t tensorboard_every;
    GuardOptions guard;
    double loss_scale;                    // of the first step (FP16)
    const char* ckpt_every;
    bool ckpt_async;
    uint64_t ckpt_keep, ckpt_keep_every;
    bool keep_best;
    TextList ckpt_tiers;                  // see tier_parse
    double ckpt_bandwidth, mtbf;          // MB/s; hours
    const char* prometheus;               // a file
    uint64_t diverged_after, rewind;      // skipped steps; rewinds at most
    double rewind_lr;
    uint64_t check_every;
    double slow_factor;                   // of the median: a rank whose step takes longer is slow,
    uint64_t slow_steps;                  // and after this many consecutive steps a straggler
} RunOptions;

// Appends the flags of these options, and sets the defaults.
static inline void run_flags(Flags* flags, RunOptions* o) {
    enum { FREE = FLAG_FREE };
    GuardOptions* g = &o->guard;
    g->dynamic_scale = FLOATX_DTYPE == DTYPE_F16;
    o->ckpt_tiers.count = 0;
    const Flag table[] = {
        FLAG_HEADING("Guards against spikes"),
        FLAG_REAL("spike-sigma", &g->spike_sigma, 4, 0, 1e9, 0, "raise the clipping bound to the running mean of the "
                  "clipped norms + X standard deviations; 0: clip to --clip exactly"),
        FLAG_REAL("spike-skip", &g->spike_skip, 20, 0, 1e9, 0,
                  "skip steps whose gradient norm exceeds X times its running mean; 0: never"),
        FLAG_COUNT("spike-warmup", &g->spike_warmup, 20, 1, 1e9, 0,
                   "gradient norms seen before --spike-sigma and --spike-skip apply"),
        FLAG_REAL("spike-trace", &g->spike_trace, 4, 0, 1e9, FREE, "report the worst sequences of a step that is "
                  "skipped or clipped more than X-fold (costs a second pass over its batch); 0: never"),
        FLAG_REAL("spike-loss", &g->spike_loss, 5, 0, 1e9, FREE, "report the worst sequences of a step whose loss "
                  "exceeds its running mean by X standard deviations (costs a second pass over its batch); 0: never"),
        FLAG_REAL("loss-scale", &o->loss_scale, 65536, 1, 1 << 24, 0, "fp16 builds: initial loss scale"),
        FLAG_COUNT("scale-growth", &g->scale_growth, 2000, 1, 1e9, 0,
                   "fp16 builds: double the loss scale after N finite steps"),
        FLAG_HEADING("The run and its checkpoints"),
        FLAG_TEXT("out", &o->out, NULL, "DIR", FREE, "directory of the run, for metrics.jsonl and checkpoints"),
        FLAG_SWITCH("resume", &o->resume, false, FREE, "continue the run in --out from its newest good checkpoint"),
        FLAG_SWITCH("tensorboard", &o->tensorboard, false, FREE, "with --out: also write the log as an event file for "
                    "TensorBoard, in DIR/tensorboard"),
        FLAG_COUNT("tensorboard-every", &o->tensorboard_every, 0, 0, 1e12, FREE,
                   "steps between two points of its curves; 0: as many as leave 20,000 points"),
        FLAG_TEXT("init-from", &o->init_from, NULL, "DIR", FREE, "model from which a new run takes its weights and, "
                  "without --model or sizes, its configuration: a checkpoint or run (optimizer state, step and "
                  "schedule are not used), a Hugging Face directory, or an llm.c file"),
        FLAG_TEXT("adapter", &o->adapter, NULL, "DIR", FREE, "with --init-from: directory of a LoRA adapter of PEFT, "
                  "merged into its weights (DIR:0.7,DIR:0.3: the weighted sum), or with --lora where its training "
                  "continues"),
        FLAG_TEXT("ckpt-every", &o->ckpt_every, "0", "N|Nmin|auto", FREE,
                  "save every N steps, every N minutes, or at the interval optimal for --mtbf; 0: only at the end"),
        FLAG_SWITCH("ckpt-async", &o->ckpt_async, true, FREE,
                    "write checkpoints in the background, from a snapshot in memory"),
        FLAG_REAL("ckpt-bandwidth", &o->ckpt_bandwidth, 0, 0, 1e6, FREE,
                  "limit background writing to X MB/s per rank; 0: no limit"),
        FLAG_COUNT("ckpt-keep", &o->ckpt_keep, 0, 0, 1e9, FREE, "keep the newest N checkpoints; 0: all"),
        FLAG_COUNT("ckpt-keep-every", &o->ckpt_keep_every, 0, 0, 1e12, FREE,
                   "also keep the first checkpoint at or after every multiple of N steps; 0: none"),
        FLAG_SWITCH("keep-best", &o->keep_best, false, FREE, "also keep the checkpoint with the lowest validation "
                    "loss, and save one after each validation that lowers it"),
        {"ckpt-tier", KIND_TEXTS, &o->ckpt_tiers, "DIR:N[:KEEP]", 0, 0,
         "also save in DIR every N steps, and keep the newest KEEP there, by default 2, 0: all; may be given several "
         "times: in /dev/shm to survive a crash of the process, on another machine's disk to survive the loss of this "
         "one", FREE},
        FLAG_REAL("mtbf", &o->mtbf, 24, 0.001, 1e6, FREE, "mean time between failures in hours, for --ckpt-every auto"),
        FLAG_TEXT("prometheus", &o->prometheus, NULL, "FILE", FREE, "with --out: write the numbers of each logged step "
                  "to FILE, in the text format of Prometheus"),
        FLAG_HEADING("Divergence and faults"),
        FLAG_COUNT("diverged-after", &o->diverged_after, 100, 1, 1e9, 0,
                   "stop as diverged after N consecutive skipped steps"),
        FLAG_COUNT("rewind", &o->rewind, 0, 0, 1e9, 0,
                   "on divergence, and immediately if a loss is not finite, return to an earlier checkpoint and skip "
                   "the data since then, at most N times; needs --ckpt-every; 0: end a run that has diverged"),
        FLAG_REAL("rewind-lr", &o->rewind_lr, 0.5, 0.0001, 1, 0, "multiply the learning rate by X at each rewind"),
        FLAG_COUNT("check-every", &o->check_every, 100, 0, 1e12, FREE,
                   "check every N steps that ranks hold the same parameters and compute the same values; 0: never"),
        FLAG_REAL("slow-factor", &o->slow_factor, 1.5, 1, 1e6, FREE,
                  "count a rank's step as slow when it takes more than X times the ranks' median"),
        FLAG_COUNT("slow-steps", &o->slow_steps, 10, 1, 1e9, FREE, "report a straggler after N consecutive slow steps"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

// A directory in which a run keeps checkpoints. Tier 0 is --out, the others are those of --ckpt-tier.
typedef struct {
    char directory[FILE_PATH_MAX];
    uint64_t every, keep;  // not of tier 0: steps between two saves; the newest checkpoints that stay, 0: all
    uint64_t saved;        // the step of the last save, or at which the run began
    bool made;             // by this process
} Tier;

// text: DIR:EVERY or DIR:EVERY:KEEP.
static inline bool tier_parse(Tier* tier, const char* text, Error* error) {
    unsigned long long every = 0, keep = 2, most = 1000000000000;
    int end = 0, found = sscanf(text, "%3900[^:]:%llu%n:%llu%n", tier->directory, &every, &end, &keep, &end);
    tier->every = every;
    tier->keep = keep;
    return (found >= 2 && text[end] == 0 && every > 0 && every <= most && keep <= most) ||
           fail_with(error, "--ckpt-tier is '%.300s'; give a directory, steps and how many to keep, as in "
                     "/dev/shm/run:20:2", text);
}

static inline bool run_options_check(const RunOptions* o, const Cadence* cadence, Error* error) {
    if (o->resume && o->out == NULL)
        return fail_with(error, "--resume needs --out, the directory of the run to continue");
    if (o->tensorboard && o->out == NULL)
        return fail_with(error, "--tensorboard needs --out, the directory of the run");
    if (o->keep_best && o->out == NULL) return fail_with(error, "--keep-best needs --out, the directory of the run");
    if ((cadence_saves(cadence) || o->ckpt_tiers.count) && o->out == NULL)
        return fail_with(error, "--ckpt-%s needs --out, the directory for the checkpoints",
                         o->ckpt_tiers.count ? "tier" : "every");
    if (o->rewind && !cadence_saves(cadence))
        return fail_with(error, "--rewind needs --ckpt-every, for checkpoints to go back to");
    if (o->prometheus && (o->out == NULL || o->prometheus[0] == 0))
        return fail_with(error, o->out ? "--prometheus is empty; give a file" :
                         "--prometheus needs --out, the directory of the run that it reports");
    if (o->out && o->out[0] == 0) return fail_with(error, "--out is empty; give the directory of the run");
    Tier tier;
    for (size_t i = 0; i < o->ckpt_tiers.count; i++)
        if (!tier_parse(&tier, o->ckpt_tiers.texts[i], error)) return false;
    return o->out == NULL || strlen(o->out) <= 3900 ||
        fail_with(error, "--out is longer than 3900 characters; give a shorter path");
}

// The results of the validations so far (run/validation.h).
typedef struct {
    double best, kept_loss;       // the lowest loss, and that of `kept`
    uint64_t step, since;         // of the lowest loss; validations after it
    uint64_t kept;                // of those whose checkpoint is in --out, the step of the lowest loss; 0: none
    uint64_t saving;              // the step of the last validation whose checkpoint was being written, and its loss
    double saving_loss;
} Validations;

// What a run knows of itself for its files: metrics.jsonl and those of facts.h.
typedef struct {
    double started, started_ms;   // when this process began to be a rank: Unix time; now_ms()
    uint64_t steps;               // begun since the last line of the log,
    double load_ms;               // and how long they have waited for data
    double save_ms;               // how long training has waited for saves since the last event that says so
    double* of_ranks;             // (world, RANK_FACTS) of the step; NULL: one rank
    StepLog last;                 // the last step that was logged,
    double val_loss;              // and validation; NAN: none
    double saved_time;            // Unix time of the last save in --out; 0: none
    uint64_t restarts;
    bool samples_refused, export_refused;  // samples.jsonl, --prometheus: cannot be written, and the user was told
} RunFacts;

// `record` is what a checkpoint records: the configuration and, in record.state, what changes from step to step.
// `model` is what computes, as model.options say. `options` are the flags of this header: guards, checkpoints, checks.
typedef struct {
    const RunOptions* options;
    RunRecord record;
    Model model;
    Comm comm;
    Mesh mesh;
    Dataset train, val;
    MixtureCounts mixture;        // of the samples consumed
    Tokenizer tokenizer;          // of the run; its vocabulary is 0 if it is not known
    ModelSource source;           // the model of --init-from, until its weights are loaded
    Loader loader;
    ObjectiveRun objective;       // what is minimized, if it is not the loss of the targets
    ShardCheck check;             // of all shards
    int32_t *tokens, *targets;    // (B, T): a micro-batch
    Log log;
    struct { void (*call)(void* context, const char* sentence); void* context; } failure_hook;  // of before ours (CUDA)
    bool events_refused;          // events.jsonl or run.jsonl cannot be written, and the user has been told
    RunFacts facts;
    Saver saver;
    Pruner pruner;
    Tier tiers[1 + TEXT_LIST_MAX];
    size_t tier_count;            // 0 without --out
    size_t saving;                // the tier of the save in progress
    uint64_t saved;               // step of the checkpoint in --out saved or loaded last; 0: none, or loaded elsewhere
    int stopped_by;               // the signal, of any rank, after which all stop; 0: none
    Cadence cadence;
    Validations validations;
    const volatile sig_atomic_t* interrupted;  // the signal that has asked this process to stop; 0: none
    int broken;                   // this rank cannot read its next batch (1), or a shard is not right (2), since:
    Error broken_why;
    uint64_t first_step;          // where this process began to train, or rewound to the last time,
    double began_ms;              // and when: for the time left
    bool same_devices;            // all ranks compute with the same code on the same kind of device
    uint64_t offload_steps;       // updates seen by run_report_offload,
    double offload_waited_ms[2];  // and how long the host had waited for states and activations by the last one
    uint64_t slow_rank, slow_count;  // the slowest rank, and for how many consecutive steps it was slow
} Run;

// Whether all ranks are good; otherwise all of them have an error. A failure that only one rank knows of must either
// pass through here or end that rank before the next collective.
static inline bool run_agree(Run* run, bool good, Error* error) {
    if (run->comm.world <= 1) return good;
    ErrorKind kind = good ? ERROR_OUTSIDE : error->kind;
    comm_extend_timeout(&run->comm, true);
    bool all = comm_agree_all(&run->comm, good, error);
    comm_extend_timeout(&run->comm, false);
    if (all) return true;
    // All ranks have the kind of the one that has failed, if a restart would not help.
    Error any = {"this rank", ERROR_OUTSIDE, false};
    bool usage = !comm_agree_all(&run->comm, good || kind != ERROR_USAGE, &any) && any.on_all_ranks;
    return fail_as(error, usage ? ERROR_USAGE : kind);
}

// After a file was written, or not, which the run does not need: says so once. *refused: the user has been told.
static inline void run_wrote(bool* refused, bool good, const Error* error) {
    if (!good && !*refused) fprintf(stderr, "train: %s. Training continues\n", error->text);
    *refused = !good;
}

// Writes a line of events.jsonl in --out, on the rank that has the log open; key: of an extra member, whose value is
// JSON, or NULL.
static inline void run_write_event(Run* run, const char* event, uint64_t step, const char* detail, const char* key,
                                   const char* value) {
    Error error;
    if (run->log.file == NULL) return;
    bool good = event_write(run->options->out, &run->log.tensorboard, event, step, detail, key, value, &error);
    run_wrote(&run->events_refused, good, &error);
}

// The same with a sentence, which is printed too if `aloud`; run_tell: without an extra member.
#define run_tell(run, aloud, ...) run_tell_with(run, aloud, NULL, NULL, __VA_ARGS__)
__attribute__((format(printf, 7, 8))) static inline void run_tell_with(Run* run, bool aloud, const char* key,
                                                                       const char* value, const char* event,
                                                                       uint64_t step, const char* format, ...) {
    char sentence[sizeof(Error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (aloud) say(stdout, "%s", sentence);
    if (aloud) fflush(stdout);
    run_write_event(run, event, step, sentence, key, value);
}

// What the telemetry of a machine has found, in its thread: an event. If the disk refuses it, it is printed.
static inline void run_hear_telemetry(void* context, const char* event, const char* detail, const char* gpu,
                                      unsigned xid) {
    const Run* run = (const Run*)context;
    uint64_t step = __atomic_load_n(&fault_state()->now, __ATOMIC_RELAXED);  // which any thread may read
    Error error;
    bool written = event_write(run->options->out, NULL, event, step, detail, NULL, NULL, &error);
    if (!written || xid > 0 || strcmp(event, "ecc") == 0) say(stderr, "train: %s", detail);
    if (gpu && telemetry_xid(xid).lost) heartbeat_gpu_lost(gpu, xid);
}

#ifdef LLMTRAIN_CUDA
// A failure on the device ends the process: before that, the telemetry has a last look for what is wrong with it.
static inline void run_on_device_failure(void* context, const char* sentence) {
    Run* run = (Run*)context;
    if (run->failure_hook.call) run->failure_hook.call(run->failure_hook.context, sentence);
    telemetry_await(run->log.telemetry);
}

static inline void run_hook_failures(Run* run, bool on) {
    if (on) run->failure_hook.call = device_failure_hook.call, run->failure_hook.context = device_failure_hook.context;
    device_failure_hook.call = on ? run_on_device_failure : run->failure_hook.call;
    device_failure_hook.context = on ? run : run->failure_hook.context;
}
#else
static inline void run_hook_failures(Run* run, bool on) { (void)run; (void)on; }
#endif

// Starts the telemetry of this rank's machine, or of its GPU, if this rank is the one that watches.
static inline void run_begin_telemetry(Run* run) {
    const Comm* c = &run->comm;
    size_t here = max_size(c->local_world, 1), world = max_size(c->world, 1);
    TelemetryOptions o;
    memset(&o, 0, sizeof o);
    o.tell = run_hear_telemetry;
    o.context = run;
    if (run->options->out == NULL || !telemetry_choose(&o, c->local_rank, here, world)) return;
    run->log.telemetry = telemetry_begin(&o);
    if (run->log.telemetry) run_hook_failures(run, true);
}

// Only a run that saves at intervals saves asynchronously.
static inline bool run_takes_snapshots(const Run* run) {
    // A snapshot would take the memory that offloading saves.
    if (flat_offloads(&run->model.flat)) return false;
    return run->options->out && run->cadence.async && (cadence_saves(&run->cadence) || run->options->ckpt_tiers.count);
}

static inline bool run_allocate(Run* run, Error* error) {
    size_t bytes = run->model.options.B * run->model.options.T * sizeof(int32_t);
    run->tokens = (int32_t*)memory_allocate(bytes);
    run->targets = (int32_t*)memory_allocate(bytes);
    bool logs = run->options->out && run->comm.rank == 0 && run->comm.world > 1;
    if (logs) run->facts.of_ranks = (double*)memory_allocate(run->comm.world * RANK_FACTS * sizeof(double));
    return (run->tokens && run->targets && (run->facts.of_ranks || !logs)) ||
           fail_with(error, "out of memory for a batch; make --batch smaller");
}

static inline void run_free(Run* run) {
    if (run->log.telemetry) run_hook_failures(run, false);
    telemetry_end(run->log.telemetry);
    flat_disconnect(&run->model.flat);
    mesh_close(&run->mesh);
    if (run->comm.world > 0) comm_close(&run->comm);
    saver_close(&run->saver);
    pruner_await(&run->pruner);
    log_close(&run->log);  // and with it the lock of --out, in which nothing is written or removed any more
    loader_close(&run->loader);
    objective_close(&run->objective);
    shard_check_end(&run->check);
    dataset_close(&run->train);
    dataset_close(&run->val);
    tokenizer_close(&run->tokenizer);
    source_close(&run->source);
    model_free(&run->model);
    free(run->tokens);
    free(run->targets);
    free(run->facts.of_ranks);
}

// ------------------------------------------------------------------------------------------------
// 2. Identity

// Whether a saved run had another value of a flag; fills in both as text. A checkpoint older than the flag has none and
// does not differ, except in a text that must not change, whose value then counts as empty.
static inline bool resume_differs(char saved[FILE_PATH_MAX], char now[FILE_PATH_MAX], const Flag* flag,
                                  const Json* manifest) {
    uint32_t node = flag->name ? json_get(manifest, json_get(manifest, 0, "flags"), flag->name) : JSON_NONE;
    bool missing = !json_string(manifest, node, saved, FILE_PATH_MAX);
    if (missing && !((flag->marks & FLAG_FIXED) && flag->kind == KIND_TEXT)) return false;
    if (missing) saved[0] = 0;
    flag_text(now, FILE_PATH_MAX, flag);
    return strcmp(saved, now) != 0;
}

// Refuses a checkpoint of a run other than the one that flags and data describe.
static inline bool resume_agrees(const RunRecord* saved, const RunRecord* asked, const Json* manifest, const char* path,
                                 Error* error) {
    char there[FILE_PATH_MAX], here[FILE_PATH_MAX];
    for (size_t i = 0; i < asked->flags->count; i++) {
        const Flag* flag = &asked->flags->rows[i];
        if ((flag->marks & FLAG_FIXED) && resume_differs(there, here, flag, manifest))
            return fail_with(error, "%s belongs to another run: there --%s is '%.200s', here it is '%.200s'; give the "
                             "same flags, or another --out", path, flag->name, there, here);
    }
    if (saved->data != asked->data)
        return fail_with(error, "%s belongs to a run on other data than --data; give the same shards, or another --out",
                         path);
    return fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &saved->config, &asked->config, "out", path, error) &&
           fields_agree(record_fields(), RECORD_FIELD_COUNT, saved, asked, "out", path, error);
}

// Whether a checkpoint is from a build of this precision; if not, *saved is the name of the other precision.
static inline bool resume_same_precision(char saved[16], const Json* manifest) {
    return !json_string(manifest, json_get(manifest, 0, "precision"), saved, 16) || strcmp(saved, FLOATX_NAME) == 0;
}

// Reports the flags whose values differ from those of the saved run.
static inline void resume_compare_flags(const RunRecord* asked, const Json* manifest) {
    char precision[16], saved[FILE_PATH_MAX], now[FILE_PATH_MAX];
    if (!resume_same_precision(precision, manifest))
        printf("note: the saved run used %s, this program uses %s: the bits will differ\n", precision, FLOATX_NAME);
    for (size_t i = 0; i < asked->flags->count; i++)
        if (resume_differs(saved, now, &asked->flags->rows[i], manifest))
            say(stdout, "note: --%s was '%s' in that run and is '%s' now", asked->flags->rows[i].name, saved, now);
}

// The same for what a run keeps unless a flag says otherwise.
static inline void resume_compare_parts(const char* flag, uint64_t saved, uint64_t now) {
    if (saved != now)
        printf("note: --%s was '%llu' in that run and is '%llu' now: the bits will differ\n", flag,
               (unsigned long long)saved, (unsigned long long)now);
}

// What all ranks must have in common: a name and a value per line. The caller frees it; NULL if out of memory.
static inline char* run_identity(const Run* run, const Flags* flags) {
    char value[FILE_PATH_MAX], *text = NULL;
    size_t bytes = 0;
    FILE* memory = open_memstream(&text, &bytes);
    if (memory == NULL) return NULL;
    fprintf(memory, "the program\tllmtrain " LLMTRAIN_VERSION " " FLOATX_NAME "\n");
    for (size_t i = 0; i < flags->count; i++) {
        const Flag* flag = &flags->rows[i];
        if (flag->name == NULL) continue;
        // Ranks that share rows recompute together. A line more or less would shift the others.
        bool shares = strcmp(flag->name, "recompute") == 0;
        if ((flag->marks & FLAG_LOCAL) == FLAG_LOCAL && !shares) continue;
        flag_text(value, sizeof value, flag);
        if (shares && ranks_of_rows(&run->model.flat.options) == 1) snprintf(value, sizeof value, "each rank's own");
        fprintf(memory, "--%s\t%.1000s\n", flag->name, value);
    }
    fprintf(memory, "the shards of --data\t%016llx\n", (unsigned long long)dataset_fingerprint(&run->train));
    fprintf(memory, "the shards of --val\t%016llx\n", (unsigned long long)dataset_fingerprint(&run->val));
    if (fclose(memory) == 0) return text;
    free(text);
    return NULL;
}

// Copies the next line of a text, without its newline; returns the rest of the text, or NULL after the last line.
static inline const char* next_line(char line[FILE_PATH_MAX], const char* text) {
    size_t length = strcspn(text, "\n");
    if (*text == 0) return NULL;
    snprintf(line, FILE_PATH_MAX, "%.*s", (int)length, text);
    return text + length + (text[length] == '\n');
}

// Lists everything in which another rank differs from rank 0; false if they do not differ.
static inline bool identities_differ(Error* error, const char* zero, const char* other, size_t rank) {
    char lines[2][FILE_PATH_MAX];
    size_t used = 0;
    while ((zero = next_line(lines[0], zero)) && (other = next_line(lines[1], other))) {
        if (strcmp(lines[0], lines[1]) == 0) continue;
        size_t name = strcspn(lines[0], "\t"), value = min_size(name + 1, strlen(lines[1]));
        if (used == 0) {
            fail_with(error, "start all ranks with the same flags and data; rank %zu differs from rank 0 in", rank);
            used = strlen(error->text);
        } else {
            used += (size_t)snprintf(error->text + used, sizeof error->text - used, ",");
        }
        if (used < sizeof error->text)
            used += (size_t)snprintf(error->text + used, sizeof error->text - used, " %.*s ('%.200s', not '%.200s')",
                                     (int)name, lines[0], lines[1] + value, lines[0] + name + 1);
        if (used >= sizeof error->text) break;
    }
    return used > 0;
}

// Whether all ranks were started with the same program, flags and data.
static inline bool run_compare_ranks(Run* run, const Flags* flags, Error* error) {
    if (run->comm.world <= 1) return true;
    char *own = run_identity(run, flags), *texts = NULL;
    size_t* begins = NULL;
    if (own == NULL) return fail_with(error, "out of memory for the flags of %zu ranks", run->comm.world);
    bool gathered = comm_gather_texts(&run->comm, &texts, &begins, own, error), same = gathered;
    for (size_t r = 1; same && r < run->comm.world; r++) same = !identities_differ(error, texts, texts + begins[r], r);
    free(own);
    free(texts);
    free(begins);
    if (gathered && !same) fail_on_all_ranks(error);
    return same;
}

// ------------------------------------------------------------------------------------------------
// 3. Beginning

// The model of --init-from, which is opened when it is first asked for; NULL after a failure.
static inline ModelSource* run_source(Run* run, Error* error) {
    ModelSource* s = &run->source;
    return s->files || source_open(s, run->options->init_from, error) ? s : NULL;
}

// The record in the newest checkpoint of --out whose manifest is good; false if there is none to resume from.
static inline bool run_saved_record(RunRecord* saved, const RunOptions* o) {
    uint64_t step = UINT64_MAX;
    while (o->resume && checkpoint_before(&step, o->out, step)) {
        char path[FILE_PATH_MAX];
        Json manifest;
        Error ignored;
        checkpoint_path(path, o->out, step, "");
        if (!record_open(&manifest, saved, path, &ignored)) continue;
        json_free(&manifest);
        return true;
    }
    return false;
}

// Completes what --lora-alpha, --lora-scale and --lora-targets leave open from the adapter whose training continues, or
// from the run's own checkpoint.
static inline bool run_choose_lora(Run* run, Flags* flags, Error* error) {
    static const char* const names[3] = {"lora-alpha", "lora-scale", "lora-targets"};
    const RunOptions* o = run->options;
    Config* c = &run->record.config;
    RunRecord saved;
    Adapter adapter;
    bool given[3];
    if (o->adapter && !o->init_from)
        return fail_with(error, "--adapter is for a model of --init-from; give the one that it was trained on") ||
               fail_as(error, ERROR_USAGE);
    if (!o->adapter || c->lora == 0) return true;
    for (int i = 0; i < 3; i++) given[i] = flag_was_given(flags, names[i]);
    if (run_saved_record(&saved, o)) {
        if (!given[0]) c->lora_alpha = saved.config.lora_alpha;
        if (!given[1]) c->lora_scale = saved.config.lora_scale;
        if (!given[2]) c->lora_targets = saved.config.lora_targets;
        return true;
    }
    const ModelSource* from = run_source(run, error);
    if (from == NULL || !adapter_open(&adapter, o->adapter, from, error)) return false;
    bool ok = adapter_configure(c, &adapter, from, given, error);
    adapter_close(&adapter);
    return ok || fail_as(error, ERROR_USAGE);
}

// Opens the shards of --data and --val, if given, and the tokenizer that made them. The model of --init-from must have
// the same; a run that has a checkpoint to resume from compared it when it began, and needs that model no longer.
static inline bool run_open_data(Run* run, const char* data, const char* val, Error* error) {
    const RunOptions* o = run->options;
    RunRecord saved;
    char kept[FILE_PATH_MAX];
    if (data && !dataset_open(&run->train, data, error)) return false;
    if (val && !dataset_open_unweighted(&run->val, val, error)) return false;
    snprintf(kept, sizeof kept, "%.4000s/tokenizer", o->out ? o->out : "");
    bool compares = o->init_from && !(o->resume && (directory_exists(kept) || run_saved_record(&saved, o)));
    ModelSource* from = compares ? run_source(run, error) : NULL;
    if (compares && from == NULL) return false;
    return run_tokenizer_open(&run->tokenizer, &run->train, &run->val, o->resume ? o->out : NULL, from, error);
}

// Refuses shards that the model cannot read. A model may have more tokens than its tokenizer, as published ones do.
static inline bool run_check_data(const Run* run, const Dataset* data, const char* flag, size_t T, Error* error) {
    size_t V = run->record.config.vocab, of_data = (size_t)data->vocabulary;
    if (!dataset_fits_model(data, V, &run->tokenizer, run->options->init_from))
        return fail_with(error, "%s has a vocabulary of %zu but the model has %zu; give --vocab %zu, or shards of the "
                         "model's tokenizer", flag, of_data, V, of_data) || fail_as(error, ERROR_USAGE);
    return dataset_suffices(data, T, error);
}

// Refuses a directory that holds a run, unless it is to be resumed.
static inline bool run_check_out(const RunOptions* o, Error* error) {
    char log[FILE_PATH_MAX + 32];
    struct stat status;
    uint64_t newest = 0;
    bool found;
    if (o->resume) return true;
    if (!checkpoint_find_before(&newest, &found, o->out, UINT64_MAX, error)) return false;
    if (found)
        return fail_with(error, "%s holds a run that reached step %llu; add --resume to continue it, or give another "
                         "--out", o->out, (unsigned long long)newest);
    log_path(log, sizeof log, o->out);
    if (stat(log, &status) == 0 && status.st_size > 0)
        return fail_with(error, "%s exists; add --resume to start that run again, or give another --out", log);
    return true;
}

// Sets the configuration of the run: a preset's, or that of the sizes that flags give; with neither, that of the
// checkpoint to resume from, or of --init-from, overridden by the flags that were given for other members.
static inline bool run_choose_config(Run* run, const char* preset, Config* asked, Flags* flags, Error* error) {
    Config* c = &run->record.config;
    RunRecord saved;
    bool sized = preset || (asked->layers && asked->heads && asked->channels);
    bool resumes = !sized && run_saved_record(&saved, run->options);
    if (sized || (!resumes && run->options->init_from == NULL))
        return (config_choose(c, preset, asked, flags, error) || fail_as(error, ERROR_USAGE)) &&
               run_choose_lora(run, flags, error);
    const ModelSource* from = resumes ? NULL : run_source(run, error);
    if (!resumes && from == NULL) return false;
    *c = resumes ? saved.config : from->config;
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* field = &CONFIG_FIELDS[i];
        if (field->help == NULL || !flag_was_given(flags, field->flag)) continue;
        memcpy((char*)c + field->offset, (const char*)asked + field->offset, field_bytes(field->kind));
    }
    return run_choose_lora(run, flags, error);
}

// Completes the layout over `world` ranks. Without --leaves, --row-leaves and --kv-copies these are as in the
// checkpoint to resume from, or as many as --tp and --cp need, and the copies as many as any layout of these parts
// needs; only exact sums over rows have leaves. The other arguments are those of layout_check.
static inline bool run_choose_layout(Run* run, Layout* layout, uint64_t world, size_t T, bool samples, Error* error) {
    bool exact = layout->reduce == 0 || layout->reduce == REDUCE_EXACT + 1;
    RunRecord saved = {.row_leaves = 0};
    if (layout->leaves == 0 || layout->row_leaves == 0 || layout->kv_copies == 0)
        run_saved_record(&saved, run->options);
    if (layout->leaves == 0) layout->leaves = saved.leaves ? saved.leaves : layout->tp;
    if (!exact) layout->row_leaves = layout->cp;
    if (layout->row_leaves == 0) layout->row_leaves = saved.row_leaves ? saved.row_leaves : layout->cp;
    if (layout->kv_copies == 0 && saved.kv_copies > 0) layout->kv_copies = saved.kv_copies;
    if (layout->kv_copies == 0) layout->kv_copies = layout_kv_copies(layout, &run->record.config);
    run->record.leaves = layout->leaves;
    run->record.kv_copies = layout->kv_copies;
    run->record.row_leaves = layout->row_leaves;
    return layout_check(layout, world, &run->record.config, T, samples, error);
}

// Sets the tokens of a step: --total-batch, which is `asked`; if that is 0 those of the checkpoint to resume from, in
// more or fewer micro-batches, unless its ranks are too many for them; otherwise `tokens`, what all ranks compute at a
// time.
static inline bool run_choose_batch(Run* run, uint64_t asked, uint64_t tokens, Error* error) {
    RunRecord saved;
    if (asked % tokens != 0)
        return fail_with(error, "--total-batch %llu is not a multiple of the %llu tokens that all ranks compute at a "
                         "time; choose one that is", (unsigned long long)asked, (unsigned long long)tokens);
    if (asked == 0 && run_saved_record(&saved, run->options)) asked = saved.total_batch;
    run->record.total_batch = asked > 0 && asked % tokens == 0 ? asked : tokens;
    return true;
}

// Whether a new run's pairs of LoRA begin as those of an adapter, or of another run. Known once its data is open.
static inline bool run_continues_pairs(const Run* run) {
    return run->options->adapter || (run->source.files && run->source.config.lora > 0);
}

// Loads the pairs of --adapter.
static inline bool run_init_adapter(Run* run, ModelSource* from, Error* error) {
    Adapter adapter;
    if (!adapter_open(&adapter, run->options->adapter, from, error)) return false;
    bool ok = adapter_check_base(&adapter, from, error) && adapter_set(&run->model, &adapter, from, error);
    if (ok) adapter_describe(stdout, &adapter);
    adapter_close(&adapter);
    return ok;
}

// Loads the weights of --init-from: of a checkpoint, or of a model of another program; with --adapter.
static inline bool run_init_from(Run* run, Error* error) {
    ModelSource* from = run_source(run, error);
    const char* adapter = run->options->adapter;
    bool pairs = run->record.config.lora > 0;
    bool ok = from && (!adapter || pairs || source_add_adapters(from, adapter, stdout, error)) &&
              source_load(&run->model, from, "init-from", error) &&
              (!adapter || !pairs || run_init_adapter(run, from, error));
    if (ok && pairs) run->record.base = from->base;
    if (ok) say(stdout, "starting from the weights of %s", from->path);
    if (ok) source_say_quantized(from, run->record.config.quantize != QUANTIZE_OFF, stdout);
    source_close(&run->source);
    return ok;
}

// Keeps the tokenizer of a new run in --out, and what the model of --init-from says of its tokens and of generation.
static inline bool run_keep_tokenizer(Run* run, Error* error) {
    const RunOptions* o = run->options;
    if (run->comm.rank > 0 || o->out == NULL) return true;
    const ModelSource* from = o->init_from ? run_source(run, error) : NULL;
    return (from || !o->init_from) && run_tokenizer_keep(&run->tokenizer, from ? from->tokenizer : "", o->out, error);
}

// Sets the weights and the state of a new run.
static inline bool run_start(Run* run, Error* error) {
    run->record.state = run_state_begin(FLOATX_DTYPE == DTYPE_F16, run->options->loss_scale);
    run->saved = 0;
    if (!flat_reset_optimizer(&run->model.flat, error)) return false;
    // Most models have no pairs of LoRA: these begin as those of a new model, unless --init-from has them.
    if (run->options->init_from)
        return flat_randomize(&run->model.flat, run->record.seed, true, error) && run_init_from(run, error);
    if (run->record.config.quantize != QUANTIZE_OFF)
        return fail_with(error, "--quantize stores the matrices of a trained model; give it with --init-from");
    return model_randomize(&run->model, run->record.seed, error);
}

#endif  // LLMTRAIN_RUN_H
