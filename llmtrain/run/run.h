// run.h: a run and its life: where it begins, how it saves, resumes and rewinds, and what its ranks agree on.
//
//   1. run         what it owns; events; agreement between ranks
//   2. identity    what ranks must have in common, and a resumed run with its checkpoint
//   3. loading     the newest good checkpoint: run_load
//   4. beginning   --out, the weights and the state of the first step: run_open_out
//   5. saving      run_save_async, run_save_wait, run_save_last
//   6. rewinding   back to a checkpoint after divergence: run_rewind
//   7. checking    whether ranks hold and compute the same, stragglers: run_compare, run_report_straggler
//   8. tracing     which sequences are behind a step that is skipped, clipped hard or has a high loss: run_trace
//   9. joining     becoming a rank, and leaving with an exit code: run_join, run_exit
//
// A failure on one rank passes through run_agree, in the function or its caller, before the next collective, so that
// all ranks fail together or none does. A run that is killed at any point, and resumed, gives the same bits as one that
// was not.

#ifndef LLMTRAIN_RUN_H
#define LLMTRAIN_RUN_H

#include "../checkpoint/record.h"
#include "log.h"
#include "trace.h"
#include "heartbeat.h"
#include "presets.h"
#include "run_tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Run

typedef struct {
    const char *out, *init_from;          // the directory of the run; the model whose weights it begins with
    bool resume;
    GuardOptions guard;
    double loss_scale;                    // of the first step (FP16)
    const char* ckpt_every;
    bool ckpt_async;
    uint64_t ckpt_keep, ckpt_keep_every;
    TextList ckpt_tiers;                  // see tier_parse
    double ckpt_bandwidth, mtbf;          // MB/s; hours
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
        FLAG_REAL(
            "spike-sigma", &g->spike_sigma, 4, 0, 1e9, 0,
            "raise the clipping bound to the running mean of the clipped norms + X standard deviations; 0: clip to "
            "--clip exactly"),
        FLAG_REAL("spike-skip", &g->spike_skip, 20, 0, 1e9, 0,
                  "skip steps whose gradient norm exceeds X times its running mean; 0: never"),
        FLAG_COUNT("spike-warmup", &g->spike_warmup, 20, 1, 1e9, 0,
                   "gradient norms seen before --spike-sigma and --spike-skip apply"),
        FLAG_REAL("spike-trace", &g->spike_trace, 4, 0, 1e9, FREE,
                  "by a second pass over the batch, report the worst sequences of steps that are skipped or whose "
                  "norm exceeds X times its clipping bound; 0: never"),
        FLAG_REAL("spike-loss", &g->spike_loss, 5, 0, 1e9, FREE,
                  "by a second pass over the batch, report the worst sequences of steps whose loss exceeds its "
                  "running mean by X standard deviations; 0: never"),
        FLAG_REAL("loss-scale", &o->loss_scale, 65536, 1, 1 << 24, 0, "fp16 builds: initial loss scale"),
        FLAG_COUNT("scale-growth", &g->scale_growth, 2000, 1, 1e9, 0,
                   "fp16 builds: double the loss scale after N finite steps"),
        FLAG_HEADING("The run and its checkpoints"),
        FLAG_TEXT("out", &o->out, NULL, "DIR", FREE, "directory of the run, for metrics.jsonl and checkpoints"),
        FLAG_SWITCH("resume", &o->resume, false, FREE, "continue the run in --out from its newest good checkpoint"),
        FLAG_TEXT("init-from", &o->init_from, NULL, "DIR", FREE,
                  "model from which a new run takes its weights and, without --model or sizes, its configuration: a "
                  "checkpoint or run (optimizer state, step and schedule are not used), a Hugging Face directory, or "
                  "an llm.c file"),
        FLAG_TEXT("ckpt-every", &o->ckpt_every, "0", "N|Nmin|auto", FREE,
                  "save every N steps, every N minutes, or at the interval optimal for --mtbf; 0: only at the end"),
        FLAG_SWITCH("ckpt-async", &o->ckpt_async, true, FREE,
                    "write checkpoints in the background, from a snapshot in memory"),
        FLAG_REAL("ckpt-bandwidth", &o->ckpt_bandwidth, 0, 0, 1e6, FREE,
                  "limit background writing to X MB/s per rank; 0: no limit"),
        FLAG_COUNT("ckpt-keep", &o->ckpt_keep, 0, 0, 1e9, FREE, "keep the newest N checkpoints; 0: all"),
        FLAG_COUNT("ckpt-keep-every", &o->ckpt_keep_every, 0, 0, 1e12, FREE,
                   "also keep the first checkpoint at or after every multiple of N steps; 0: none"),
        {"ckpt-tier", KIND_TEXTS, &o->ckpt_tiers, "DIR:N[:KEEP]", 0, 0,
         "also save in DIR every N steps, and keep the newest KEEP there, by default 2; may be given several times: in "
         "/dev/shm to survive a crash of the process, on another machine's disk to survive the loss of this one", FREE},
        FLAG_REAL("mtbf", &o->mtbf, 24, 0.001, 1e6, FREE, "mean time between failures in hours, for --ckpt-every auto"),
        FLAG_HEADING("Divergence and faults"),
        FLAG_COUNT("diverged-after", &o->diverged_after, 100, 1, 1e9, 0,
                   "consecutive skipped steps after which the run counts as diverged, and ends"),
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

// Refuses incompatible flags.
static inline bool run_options_check(const RunOptions* o, const Cadence* cadence, Error* error) {
    if (o->resume && o->out == NULL)
        return fail_with(error, "--resume needs --out, the directory of the run to continue");
    if ((cadence_saves(cadence) || o->ckpt_tiers.count) && o->out == NULL)
        return fail_with(error, "--ckpt-%s needs --out, the directory for the checkpoints",
                         o->ckpt_tiers.count ? "tier" : "every");
    if (o->rewind && !cadence_saves(cadence))
        return fail_with(error, "--rewind needs --ckpt-every, for checkpoints to go back to");
    if (o->out && o->out[0] == 0) return fail_with(error, "--out is empty; give the directory of the run");
    Tier tier;
    for (size_t i = 0; i < o->ckpt_tiers.count; i++)
        if (!tier_parse(&tier, o->ckpt_tiers.texts[i], error)) return false;
    return o->out == NULL || strlen(o->out) <= 3900 ||
        fail_with(error, "--out is longer than 3900 characters; give a shorter path");
}

typedef struct {
    const RunOptions* options;
    RunRecord record;             // configuration and state: what a checkpoint records
    Model model;
    Comm comm;
    Dataset train, val;
    Tokenizer tokenizer;          // of the run; its vocabulary is 0 if it is not known
    ModelSource source;           // the model of --init-from, until its weights are loaded
    Loader loader;
    int32_t *tokens, *targets;    // (B, T): a micro-batch
    Log log;
    bool events_refused;          // events.jsonl cannot be written, and the user has been told
    Saver saver;
    Pruner pruner;
    Tier tiers[1 + TEXT_LIST_MAX];
    size_t tier_count;            // 0 without --out
    size_t saving;                // the tier of the save in progress
    uint64_t saved;               // step of the checkpoint in --out saved or loaded last; 0: none, or loaded elsewhere
    Cadence cadence;
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
    return all || fail_as(error, kind);
}

// Writes a line of events.jsonl in --out, on the rank that has the log open; key: of an extra member, whose value is
// JSON, or NULL. If the disk refuses it, the run continues.
static inline void run_write_event(Run* run, const char* event, uint64_t step, const char* detail, const char* key,
                                   const char* value) {
    Error error;
    if (run->log.file == NULL) return;
    bool good = event_write_with(run->options->out, event, step, detail, key, value, &error);
    if (!good && !run->events_refused) fprintf(stderr, "train: %s. Training continues\n", error.text);
    run->events_refused = !good;
}

__attribute__((format(printf, 4, 5))) static inline void run_event(Run* run, const char* event, uint64_t step,
                                                                   const char* format, ...) {
    char detail[sizeof(Error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    run_write_event(run, event, step, detail, NULL, NULL);
}

// The same, also printed to the console.
__attribute__((format(printf, 4, 5))) static inline void run_announce(Run* run, const char* event, uint64_t step,
                                                                      const char* format, ...) {
    char sentence[sizeof(Error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    printf("%s\n", sentence);
    fflush(stdout);
    run_event(run, event, step, "%s", sentence);
}

// Only a run that saves before its end has something to save asynchronously.
static inline bool run_takes_snapshots(const Run* run) {
    // A snapshot would take the memory that offloading saves.
    if (flat_offloads(&run->model.flat)) return false;
    return run->options->out && run->cadence.async && (cadence_saves(&run->cadence) || run->options->ckpt_tiers.count);
}

// Allocates the host's batch.
static inline bool run_allocate(Run* run, Error* error) {
    size_t bytes = run->model.options.B * run->model.options.T * sizeof(int32_t);
    run->tokens = (int32_t*)memory_allocate(bytes);
    run->targets = (int32_t*)memory_allocate(bytes);
    return (run->tokens && run->targets) || fail_with(error, "out of memory for a batch; make --batch smaller");
}

static inline void run_free(Run* run) {
    collective_close(&run->model.flat.collectives);
    if (run->comm.world > 0) comm_close(&run->comm);
    saver_close(&run->saver);
    pruner_await(&run->pruner);
    log_close(&run->log);  // and with it the lock of --out, in which nothing is written or removed any more
    loader_close(&run->loader);
    dataset_close(&run->train);
    dataset_close(&run->val);
    tokenizer_close(&run->tokenizer);
    source_close(&run->source);
    model_free(&run->model);
    free(run->tokens);
    free(run->targets);
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
            return fail_with(error,
                             "%s belongs to another run: there --%s is '%.200s', here it is '%.200s'; give the same "
                             "flags, or another --out",
                             path, flag->name, there, here);
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
            printf("note: --%s was '%s' in that run and is '%s' now\n", asked->flags->rows[i].name, saved, now);
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
        if (flag->name == NULL || (flag->marks & FLAG_LOCAL) == FLAG_LOCAL) continue;
        flag_text(value, sizeof value, flag);
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

// Finds out whether all ranks compute with the same code on the same kind of device, and so get the same bits.
static inline bool run_compare_devices(Run* run, Error* error) {
    char own[512], device[320], *texts = NULL;
    double peak;
    size_t* begins = NULL;
    if (run->comm.world <= 1) return true;
    device_describe(device, sizeof device, &peak, run->model.stream);
    snprintf(own, sizeof own, "%s, compiled by %.150s, algorithms %016llx", device, __VERSION__,
             (unsigned long long)matmul_choices_hash(run->model.stream));
    if (!comm_gather_texts(&run->comm, &texts, &begins, own, error)) return false;
    run->same_devices = true;
    for (size_t r = 1; r < run->comm.world; r++) run->same_devices &= strcmp(texts, texts + begins[r]) == 0;
    free(texts);
    free(begins);
    if (run->options->check_every && !run->same_devices)
        printf("note: ranks have different devices, compilers or --matmul-algorithms files; --check-every compares "
               "only their parameters\n");
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Loading

// Finds the next checkpoint in the order in which they are tried, as rank 0 sees it: that with the highest step below
// *step, or of *step in a tier after *tier; of equal ones that of the first tier. asked: see run_load.
static inline bool run_checkpoint_before(Run* run, uint64_t* step, size_t* tier, bool asked, bool* found,
                                         Error* error) {
    int64_t next[3] = {0, 0, 0};  // found, step, tier
    bool good = true;
    for (size_t i = 0; run->comm.rank == 0 && good && i < (asked ? 1 : run->tier_count); i++) {
        const char* directory = run->tiers[i].directory;
        uint64_t at = *step + (i > *tier), skipped;
        SaveKind kind;
        bool there;
        do good = checkpoint_find_before(&at, &there, directory, at, error);
        while (good && there && asked && checkpoint_describe(&kind, &skipped, directory, at) && kind != SAVE_REQUESTED);
        if (!good || !there || (next[0] && (int64_t)at <= next[1])) continue;
        next[0] = 1;
        next[1] = (int64_t)at;
        next[2] = (int64_t)i;
    }
    if (!run_agree(run, good, error)) return false;
    if (run->comm.world > 1 && !comm_broadcast(&run->comm, next, 3, DTYPE_I64, 0, error)) return false;
    *found = next[0] != 0;
    *step = (uint64_t)next[1];
    *tier = (size_t)next[2];
    return true;
}

// Loads the newest checkpoint of a step below `before` that is good on all ranks; *found says whether there was any,
// good or not. asked: considers only checkpoints that --ckpt-every asked for, and none of --ckpt-tier.
static inline bool run_load(Run* run, uint64_t before, bool asked, bool* found, Error* error) {
    bool more;
    uint64_t step = before;
    size_t tier = TEXT_LIST_MAX;
    *found = false;
    for (;;) {
        double began = now_ms();
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord saved;
        Error fault;
        if (!run_checkpoint_before(run, &step, &tier, asked, &more, error)) return false;
        if (!more) break;
        *found = true;
        checkpoint_path(path, run->tiers[tier].directory, step, "");
        bool good = record_open(&manifest, &saved, path, error);
        bool fits = !good || resume_agrees(&saved, &run->record, &manifest, path, error);
        if (good && fits) good = checkpoint_load(&run->model.flat, &manifest, path, false, error);
        if (!good && error->kind == ERROR_PROCESS) fits = false;  // no reason to use an older one
        bool all = run_agree(run, fits, error), usable = all && run_agree(run, good, error);
        if (usable) {
            printf("resumed from %s in %.0f ms\n", path, now_ms() - began);
            if (!asked) resume_compare_flags(&run->record, &manifest);
            char precision[16];
            run->record.state = saved.state;
            if (!resume_same_precision(precision, &manifest))  // a loss scale belongs to FP16
                run->record.state.loss_scale = FLOATX_DTYPE == DTYPE_F16 ? run->options->loss_scale : 1;
            run->saved = tier ? 0 : step;
        }
        json_free(&manifest);
        if (!all || usable) return usable;
        if (run->comm.world > 1 && comm_failed(&run->comm, &fault)) return false;
        if (run->comm.rank == 0) fprintf(stderr, "train: %s; trying the checkpoint before it\n", error->text);
        run_event(run, "damaged", step, "%s", error->text);
    }
    if (!*found) return true;
    return fail_with(error, "no checkpoint in %s can be used, for the reasons above; start again with another --out",
                     run->options->out) || fail_on_all_ranks(error);
}

// ------------------------------------------------------------------------------------------------
// 4. Beginning

// The model of --init-from, which is opened when it is first asked for; NULL after a failure.
static inline ModelSource* run_source(Run* run, Error* error) {
    ModelSource* s = &run->source;
    return s->files || source_open(s, run->options->init_from, error) ? s : NULL;
}

// The configuration in the newest checkpoint of --out whose manifest is good; false if there is none to resume from.
static inline bool run_saved_config(Config* config, const RunOptions* o) {
    uint64_t step = UINT64_MAX;
    while (o->resume && checkpoint_before(&step, o->out, step)) {
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord saved;
        Error ignored;
        checkpoint_path(path, o->out, step, "");
        if (!record_open(&manifest, &saved, path, &ignored)) continue;
        json_free(&manifest);
        *config = saved.config;
        return true;
    }
    return false;
}

// Opens the shards of --data and --val, if given, and the tokenizer that made them. The model of --init-from must have
// the same; a run that has a checkpoint to resume from compared it when it began, and needs that model no longer.
static inline bool run_open_data(Run* run, const char* data, const char* val, Error* error) {
    const RunOptions* o = run->options;
    Config saved;
    char kept[FILE_PATH_MAX];
    if (data && !dataset_open(&run->train, data, error)) return false;
    if (val && !dataset_open(&run->val, val, error)) return false;
    snprintf(kept, sizeof kept, "%.4000s/tokenizer", o->out ? o->out : "");
    bool compares = o->init_from && !(o->resume && (directory_exists(kept) || run_saved_config(&saved, o)));
    ModelSource* from = compares ? run_source(run, error) : NULL;
    if (compares && from == NULL) return false;
    return run_tokenizer_open(&run->tokenizer, &run->train, &run->val, o->resume ? o->out : NULL, from, error);
}

// Makes attention and loss stop at the ends of documents: after the token `given`, or else the tokenizer's end-of-text.
static inline bool run_mask_documents(Run* run, bool asked, const uint64_t* given, Error* error) {
    if (!asked) return fail_with(error, "--end-of-text is for --documents mask; give both, or neither");
    bool known = tokenizer_is_known(&run->tokenizer);
    int32_t end = given ? (int32_t)*given : known ? run->tokenizer.end_of_text : -1;
    if (given && run->train.vocabulary > 0 && end >= run->train.vocabulary)
        return fail_with(error,
                         "--end-of-text %d is outside the data's vocabulary of %d; give the id of its end-of-text "
                         "token",
                         (int)end, (int)run->train.vocabulary);
    if (end < 0)
        return fail_with(error,
                         "--documents mask needs the token between documents, but %s; give --end-of-text N (50256 "
                         "for GPT-2 tokens), or shards made by tokenize --text",
                         known ? "the data's tokenizer has none" : "the data has no tokenizer");
    run->train.mask_documents = run->val.mask_documents = true;
    run->train.end_of_text = run->val.end_of_text = end;
    return true;
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
        return fail_with(error,
                         "%s holds a run that reached step %llu; add --resume to continue it, or give another --out",
                         o->out, (unsigned long long)newest);
    log_path(log, sizeof log, o->out);
    if (stat(log, &status) == 0 && status.st_size > 0)
        return fail_with(error, "%s exists; add --resume to start that run again, or give another --out", log);
    return true;
}

// Sets the configuration of the run: a preset's, or that of the sizes that flags give; with neither, that of
// --init-from, overridden by the flags that were given for other members. A run that resumes takes it from its own
// checkpoint, since the model it began with may be gone.
static inline bool run_choose_config(Run* run, const char* preset, Config* asked, Flags* flags, Error* error) {
    Config* c = &run->record.config;
    if (run->options->init_from == NULL || preset || asked->layers || asked->heads || asked->channels)
        return config_choose(c, preset, asked, flags, error) || fail_as(error, ERROR_USAGE);
    if (!run_saved_config(c, run->options)) {
        const ModelSource* from = run_source(run, error);
        if (from == NULL) return false;
        *c = from->config;
    }
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* field = &CONFIG_FIELDS[i];
        if (field->help == NULL || !flag_was_given(flags, field->flag)) continue;
        memcpy((char*)c + field->offset, (const char*)asked + field->offset, field_bytes(field->kind));
    }
    return true;
}

// Loads the weights of --init-from: of a checkpoint, or of a model of another program.
static inline bool run_init_from(Run* run, Error* error) {
    ModelSource* from = run_source(run, error);
    bool ok = from && source_load(&run->model, from, "init-from", error);
    if (ok) printf("starting from the weights of %s\n", from->path);
    source_close(&run->source);
    return ok;
}

// Sets the weights and the state of a new run.
static inline bool run_start(Run* run, Error* error) {
    run->record.state = run_state_begin(FLOATX_DTYPE == DTYPE_F16, run->options->loss_scale);
    run->saved = 0;
    if (!flat_reset_optimizer(&run->model.flat, error)) return false;
    bool keeps = run->comm.rank == 0 && run->options->out;
    if (keeps && !run_tokenizer_keep(&run->tokenizer, run->options->out, error)) return false;
    return run->options->init_from ? run_init_from(run, error) : model_randomize(&run->model, run->record.seed, error);
}

// A run has a directory in each tier, DIR/ID, with a random id, so that it never finds another run's checkpoints.
// OUT/tiers lists them: each start keeps those that the start before it has listed, if it sees them, and makes the
// others. What is not seen, on another machine or left out, is then no longer the run's: it goes on without it, and
// would not know its own checkpoints there from those of a branch that it has left, or from before a rewind. A copy of
// --out is another run: the list says where it belongs.

// Rank 0: chooses the ids, and writes the list.
static inline bool run_list_tiers(const Run* run, uint64_t ids[TEXT_LIST_MAX], Error* error) {
    const RunOptions* o = run->options;
    char path[FILE_PATH_MAX], line[FILE_PATH_MAX + 32], name[FILE_PATH_MAX], here[FILE_PATH_MAX] = "";
    unsigned long long id;
    unsigned found = 0;  // a bit for each
    struct stat out;
    FileWriter w;
    snprintf(path, sizeof path, "%.4000s/tiers", o->out);
    if (run->tier_count == 1) return unlink(path) == 0 || errno == ENOENT || fail_file(error, "remove", path);
    if (stat(o->out, &out) != 0 || realpath(o->out, here) == NULL) return fail_file(error, "look at", o->out);
    FILE* random = fopen("/dev/urandom", "rb");
    bool good = random && fread(ids, sizeof *ids, TEXT_LIST_MAX, random) == TEXT_LIST_MAX;
    if (!good) fail_file(error, "read", "/dev/urandom");
    if (random) fclose(random);
    FILE* list = o->resume ? fopen(path, "r") : NULL;
    if (good && o->resume && list == NULL && errno != ENOENT) good = fail_file(error, "open", path);
    bool ours = list && fscanf(list, "%llx %4000[^\n]", &id, name) == 2 && id == out.st_ino && strcmp(name, here) == 0;
    while (ours && fscanf(list, "%llx %4000[^\n]", &id, name) == 2)
        for (size_t i = 1; i < run->tier_count; i++) {
            snprintf(line, sizeof line, "%s/%016llx", name, id);
            if (strcmp(name, run->tiers[i].directory) != 0 || (found >> i & 1) || !directory_exists(line)) continue;
            found |= 1u << i;
            ids[i - 1] = id;
            break;
        }
    if (list && ferror(list)) good = fail_file(error, "read", path);
    if (list) fclose(list);
    good = good && file_begin(&w, path, error);
    for (size_t i = 0; good && i < run->tier_count; i++) {
        snprintf(line, sizeof line, "%016llx %s\n", (unsigned long long)(i ? ids[i - 1] : out.st_ino),
                 i ? run->tiers[i].directory : here);
        good = file_append(&w, line, strlen(line), error);
    }
    return good && file_end(&w, error);
}

// All ranks must see the directories that rank 0 makes: each writes a part of a checkpoint, and reads the others'.
static inline bool run_open_tiers(Run* run, Error* error) {
    const TextList* texts = &run->options->ckpt_tiers;
    bool leads = run->comm.rank == 0, good = true;
    uint64_t ids[TEXT_LIST_MAX] = {0};
    snprintf(run->tiers[0].directory, FILE_PATH_MAX, "%.4000s", run->options->out);
    run->tier_count = 1 + texts->count;
    for (size_t i = 1; i < run->tier_count; i++) good = good && tier_parse(&run->tiers[i], texts->texts[i - 1], error);
    if (leads) good = good && run_list_tiers(run, ids, error);
    if (!run_agree(run, good, error)) return false;
    if (run->comm.world > 1 && !comm_broadcast(&run->comm, ids, TEXT_LIST_MAX, DTYPE_I64, 0, error)) return false;
    for (size_t i = 1; i < run->tier_count; i++) {
        Tier* tier = &run->tiers[i];
        size_t length = strlen(tier->directory);
        snprintf(tier->directory + length, 32, "/%016llx", (unsigned long long)ids[i - 1]);
        if (leads) good = good && directory_make(tier->directory, error);
        printf("also saving every %llu steps in %s\n", (unsigned long long)tier->every, tier->directory);
    }
    if (!run_agree(run, good, error)) return false;
    for (size_t i = 1; i < run->tier_count; i++)
        if (!directory_exists(run->tiers[i].directory))
            good = fail_with(error, "rank %zu does not see %.600s, which rank 0 has made; give --ckpt-tier a directory "
                             "that all machines share", run->comm.rank, run->tiers[i].directory);
    return run_agree(run, good, error);
}

// Sets aside what is later than the state: after a rewind in all tiers, so that no resume uses it. When a run begins,
// only in those of --ckpt-tier, where it is damaged or of another branch. Cuts the log back to the state.
static inline bool run_set_aside(Run* run, bool rewinds, Error* error) {
    uint64_t step = run->record.state.step;
    bool good = true;
    for (size_t i = 0; i < run->tier_count; i++) {
        run->tiers[i].saved = step;
        if (run->comm.rank > 0) continue;
        checkpoint_clean(run->tiers[i].directory);
        if (i > 0 || rewinds) good = good && checkpoint_set_aside(run->tiers[i].directory, step + 1, true, error);
    }
    return good && (run->log.file == NULL || log_cut_back(&run->log, step, error));
}

// Removes the checkpoints of a tier that are superfluous now that the newest one has been saved or loaded.
// (A newest one that was only found may be damaged, and the older ones may be all that is left.)
static inline void run_prune(Run* run, size_t tier, uint64_t newest) {
    const RunOptions* o = run->options;
    const KeepRule of_out = {o->ckpt_keep, o->ckpt_keep_every, o->rewind > 0}, rule = {run->tiers[tier].keep, 0, false};
    if (run->comm.rank == 0) pruner_begin(&run->pruner, run->tiers[tier].directory, newest, tier ? &rule : &of_out);
}

// Opens --out, and sets weights, state and log to where the run begins; *found says whether that is a checkpoint.
static inline bool run_open_out(Run* run, bool* found, Error* error) {
    const RunOptions* o = run->options;
    bool writes = run->comm.rank == 0 && o->out;
    *found = false;
    if (!run_agree(run, !writes || directory_make(o->out, error), error)) return false;
    if (!run_agree(run, !writes || log_open(&run->log, o->out, error), error)) return false;
    if (o->out && !run_open_tiers(run, error)) return false;
    if (o->resume && !run_load(run, UINT64_MAX, false, found, error)) return false;
    if (o->resume && !*found) printf("no checkpoint in %s yet: starting from the beginning\n", o->out);
    bool ok = (*found || run_start(run, error)) && run_set_aside(run, false, error);
    source_close(&run->source);  // a run that resumes has used only its configuration
    if (!run_agree(run, ok, error)) return false;
    if (writes && run->saved > 0) run_prune(run, 0, run->saved);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 5. Saving
//
// A save begins (run_save_begin), and steps continue during it. When all ranks have written their parts, it is
// completed (run_save_complete); run_save_wait waits for that first.

// The tiers in which a step is to be saved, a bit for each. stop: the run ends; asked: --ckpt-every in minutes. When
// saves are synchronous, or one has to wait for another anyway, these are all that are due; otherwise one at a time:
// --out, and then, when no save is in progress, the tier whose last save is oldest.
static inline unsigned run_save_due(const Run* run, uint64_t step, bool stop, bool asked) {
    bool out = run->options->out && (stop || asked || cadence_due(&run->cadence, step));
    bool busy = saver_state(&run->saver) != SAVER_IDLE;
    unsigned due = 0;
    size_t oldest = 0;
    for (size_t i = 1; i < run->tier_count && !stop; i++) {
        const Tier* tier = &run->tiers[i];
        if (step / tier->every == tier->saved / tier->every) continue;
        due |= 1u << i;
        if (oldest == 0 || tier->saved < run->tiers[oldest].saved) oldest = i;
    }
    if (run->saver.snapshot == NULL || (out && busy)) return due | out;
    return out || busy || oldest == 0 ? out : 1u << oldest;
}

// Completes the save in progress; *good says whether the checkpoint is there, and if not, *error why. False if a rank
// is lost.
static inline bool run_save_complete(Run* run, bool* good, Error* error) {
    Cadence* c = &run->cadence;
    uint64_t step = run->saver.step;
    double began = run->saver.began_ms;
    Error why;
    fault_point("checksums");
    heartbeat_send(HEARTBEAT_PAUSE, run->record.state.step);
    comm_extend_timeout(&run->comm, true);
    *good = saver_end(&run->saver, &why);
    comm_extend_timeout(&run->comm, false);
    if (!*good && run->comm.world > 1 && comm_failed(&run->comm, error)) return false;
    if (!*good) *error = why;
    if (!*good) return true;
    if (run->saving == 0) {
        run->saved = step;
        c->took_ms = now_ms() - began;
        run_announce(run, "saved", step, "saved %s/step_%08llu in %.0f ms, of which training was stalled for %.0f ms",
                     run->options->out, (unsigned long long)step, c->took_ms, run->saver.stalled_ms);
    }
    fault_point("clean");
    run_prune(run, run->saving, step);
    return true;
}

// The same, but reports a failed save: training continues without that checkpoint.
static inline bool run_save_complete_or_report(Run* run, Error* error) {
    bool good;
    uint64_t step = run->saver.step;
    if (!run_save_complete(run, &good, error)) return false;
    if (!good && run->comm.rank == 0)
        fprintf(stderr, "train: step %llu was not saved: %s. Training continues; earlier checkpoints are unchanged\n",
                (unsigned long long)step, error->text);
    if (!good) run_event(run, "not_saved", step, "%s", error->text);
    return true;
}

// After a checkpoint: with --ckpt-every auto, chooses when the next is due.
static inline void run_schedule_save(Run* run) {
    Cadence* c = &run->cadence;
    if (!cadence_choose(c)) return;
    printf(
        "next checkpoint in %.1f min: a save costs %.0f ms, mean time between failures %g h; expected cost %.2f%% of "
        "the "
        "time, measured so far %.2f%%\n",
        c->every_ms / 6e4, c->cost_ms, c->mtbf_ms / 3.6e6, 100 * c->cost_ms / c->every_ms,
        100 * (c->costs_ms + c->cost_ms) / (now_ms() - c->began_ms));
}

// Between two steps: waits for the save in progress, if there is one.
static inline bool run_save_wait(Run* run, Error* error) {
    if (saver_state(&run->saver) == SAVER_IDLE) return true;
    double began = now_ms();
    saver_unthrottle(&run->saver, true);
    bool ok = run_save_complete_or_report(run, error);
    saver_unthrottle(&run->saver, false);
    run->cadence.cost_ms += now_ms() - began;
    run_schedule_save(run);
    return ok;
}

// Begins a save in a tier, after completing the previous one. Flushes the log first, so that the log never ends before
// the checkpoint.
static inline bool run_save_begin(Run* run, size_t tier, SaveKind kind, Error* error) {
    if (!run_save_wait(run, error)) return false;
    Error reason;
    JsonWriter manifest;
    uint64_t step = run->record.state.step;
    double began = now_ms();
    bool flushed = run->log.file == NULL || (log_flush(&run->log, &reason) &&
                   (file_sync(fileno(run->log.file)) || fail_file(&reason, "flush", run->log.path)));
    fault_point("save");
    cadence_count_save(&run->cadence, began, tier > 0);
    run->saving = tier;
    run->tiers[tier].saved = step;
    run->record.kind = kind;
    record_write(&manifest, &run->record, &run->model.flat);
    saver_begin(&run->saver, step, run->tiers[tier].directory, &manifest, flushed ? NULL : &reason);
    run->cadence.cost_ms = now_ms() - began;
    return true;
}

// Saves in --out before the run ends, and waits until the checkpoint is there.
static inline bool run_save_last(Run* run, Error* error) {
    bool good = false;
    if (!run_save_wait(run, error)) return false;  // when it returns, the bandwidth limit is set again
    saver_unthrottle(&run->saver, true);
    SaveKind kind = cadence_due(&run->cadence, run->record.state.step) ? SAVE_REQUESTED : SAVE_END;
    return run_save_begin(run, 0, kind, error) && run_save_complete(run, &good, error) && good;
}

// Saves in the tiers that are due, while training continues; without a snapshot, or before the run ends, waits until
// the checkpoint is there.
static inline bool run_save(Run* run, unsigned due, bool last, Error* error) {
    if (last) return run_save_last(run, error);
    for (size_t i = 0; i < run->tier_count; i++) {
        if ((due >> i & 1) == 0) continue;
        if (!run_save_begin(run, i, SAVE_REQUESTED, error)) return false;
        if (run->saver.snapshot == NULL && !run_save_wait(run, error)) return false;
    }
    return true;
}

// Training begins here, or continues here after a rewind.
static inline void run_begin_clock(Run* run) {
    run->first_step = run->record.state.step;
    run->began_ms = now_ms();
}

// ------------------------------------------------------------------------------------------------
// 6. Rewinding

static inline void describe_divergence(char* text, size_t size, const RunState* state, const StepResult* result) {
    if (!isfinite(result->loss))
        snprintf(text, size, "the loss of step %llu is %g", (unsigned long long)state->step, result->loss);
    else
        snprintf(text, size, "the last %llu steps were skipped: the gradient's norm is %g, its running mean %g",
                 (unsigned long long)state->skipped_consecutive, result->grad_norm, state->norms.mean);
}

// The step of the oldest checkpoint before step `first` that --ckpt-keep has certainly left; 0: the beginning.
static inline uint64_t run_oldest_kept(const Run* run, uint64_t first) {
    uint64_t interval = run->cadence.steps, keep = run->options->ckpt_keep;
    uint64_t newest = interval ? (first - 1) / interval * interval : 0, span = keep ? (keep - 1) * interval : newest;
    return newest > span ? newest - span : 0;
}

// Where a run that has diverged goes back to: the newest checkpoint before step *before, or, if there is none and
// *begins, the beginning: then --ckpt-keep cannot have removed one. *first is the first of the steps that were skipped
// last. If the run got no further than the last time, that checkpoint was already bad, and it goes to the one before.
// False if the run may not go back.
static inline bool run_choose_rewind(Run* run, const char* why, uint64_t* first, uint64_t* before, bool* begins,
                                     Error* error) {
    const RunOptions* o = run->options;
    const RunState* state = &run->record.state;
    *first = state->step - state->skipped_consecutive + 1;
    bool again = state->rewinds > 0 && *first <= state->rewound_from;
    if (again) *first = state->rewound_from;
    *before = again ? state->rewound_to : *first;
    uint64_t oldest = run_oldest_kept(run, *first);
    // With a cadence in minutes, --ckpt-keep may have removed what came before the checkpoint of the last rewind.
    *begins = oldest == 0 && !(again && run->cadence.steps == 0 && o->ckpt_keep > 0);
    if (o->rewind == 0)
        return fail_with(error, "%s; lower --lr or raise --spike-skip, and --resume, or use --rewind", why) ||
            fail_on_all_ranks(error);
    if (state->rewinds >= o->rewind)
        return fail_with(error, "%s, after %llu rewinds; lower --lr, and --resume", why,
                         (unsigned long long)state->rewinds) ||
               fail_on_all_ranks(error);
    if (again && *before <= oldest && oldest > 0)
        return fail_with(
                   error,
                   "%s, also after the rewind to step %llu, and --ckpt-keep %llu has left no checkpoint before that; "
                   "lower --lr, and --resume",
                   why, (unsigned long long)*before, (unsigned long long)o->ckpt_keep) ||
               fail_on_all_ranks(error);
    return true;
}

// Called when the run has diverged: goes back to a checkpoint, and continues with the samples that come next and a
// smaller learning rate, as "PaLM: Scaling Language Modeling with Pathways" (5.1) does by hand. A run that is killed
// and resumed must go back to the same checkpoint, so only checkpoints that --ckpt-every asked for count: none made at
// a signal, and none of --ckpt-tier.
static inline bool run_rewind(Run* run, const StepResult* result, Error* error) {
    RunState *state = &run->record.state, diverged = *state;
    uint64_t first, before;
    bool begins, found;
    char why[256];
    describe_divergence(why, sizeof why, &diverged, result);
    if (!run_choose_rewind(run, why, &first, &before, &begins, error)) return false;
    heartbeat_send(HEARTBEAT_PAUSE, diverged.step);
    if (!run_save_wait(run, error)) return false;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    pruner_await(&run->pruner);
    fault_point("rewind");
    if (!run_load(run, before, true, &found, error)) return false;
    if (!found && !begins)
        return fail_with(error, "%s, and the checkpoints before step %llu are gone; lower --lr, and --resume", why,
                         (unsigned long long)before) || fail_on_all_ranks(error);
    if (!found && !run_agree(run, run_start(run, error), error)) return false;
    state->samples = diverged.samples;
    state->rewinds = diverged.rewinds + 1;
    state->rewound_from = first;
    state->rewound_to = state->step;
    state->lr_factor = diverged.lr_factor * run->options->rewind_lr;
    fault_point("forget");
    if (!run_agree(run, run_set_aside(run, true, error), error)) return false;
    run_announce(run, "rewound", diverged.step,
                 "went back from step %llu to %llu: %s; the learning rate is now multiplied by %g",
                 (unsigned long long)diverged.step, (unsigned long long)state->step, why, state->lr_factor);
    run->cadence.saved_ms = now_ms();
    clock_start(&run->model.clock, &run->model.flat);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 7. Checking

// For tests: flips a bit in a parameter of the first block, as faulty memory would.
static inline void fault_flip(Model* model) {
    unsigned char byte;
    Error ignored;
    void* first = model->flat.params + model->flat.buckets[1].first;
    flat_await_all(&model->flat, &ignored);
    device_download(&byte, first, 1, model->stream);
    byte ^= 1;
    device_upload(first, &byte, 1, model->stream);
}

static inline void describe_forward(char* text, size_t size, size_t buckets, size_t number) {
    (void)buckets;
    snprintf(text, size, "the %s that it computes from the same parameters and tokens",
             number == 0 ? "hidden states" : "losses");
}

// Whether all ranks, which have the same parameters, compute the same values with them: compares the checksum of the
// hidden states, and the sum of the losses, of a fixed batch (B, T). Finds wrong arithmetic on one machine, which
// gradients would spread to the parameters of all. Overwrites the activations; tokens, targets (B, T) are scratch.
static inline bool model_compare_forward(Model* model, int32_t* tokens, int32_t* targets, size_t B, size_t T,
                                         Error* error) {
    FlatVector* flat = &model->flat;
    Dropout dropout = model->dropout;
    size_t N = B * T;
    uint64_t* own = model->stats.checksums + 2 * model->stats.rank;
    if (flat->options.world == 1) return true;
    for (size_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)(i * 7919 % model->config.vocab);
        targets[i] = (int32_t)((i + 1) * 7919 % model->config.vocab);
    }
    fill_zero(flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    model->dropout.p = 0;
    model_losses(model, tokens, targets, B, T);
    model->dropout = dropout;
    vector_checksum(flat->checksums, model->activations->hidden, 0, N * model->config.channels, model->stream);
    device_download(own, flat->checksums, sizeof(uint64_t), model->stream);
    device_download(own + 1, flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    return ranks_same(&model->stats, 2, flat->count, describe_forward, error);
}

// Whether all ranks hold the same parameters, and compute the same values with them.
static inline bool run_compare(Run* run, Error* error) {
    if (!ranks_compare(&run->model.stats, &run->model.flat, error)) return false;
    if (!run->same_devices) return true;
    const ModelOptions* o = &run->model.options;
    bool flipped = fault_point("compare");
    if (flipped) fault_flip(&run->model);
    bool same = model_compare_forward(&run->model, run->tokens, run->targets, o->B, o->T, error);
    if (flipped) fault_flip(&run->model);
    return same;
}

// Reports a straggler after --slow-steps consecutive slow steps.
static inline void run_report_straggler(Run* run, const StepResult* result) {
    const RunOptions* o = run->options;
    bool slow = run->comm.world > 1 && result->busy_max > o->slow_factor * result->busy_median;
    if (!slow || result->slowest != run->slow_rank) run->slow_count = 0;
    run->slow_rank = result->slowest;
    run->slow_count += slow;
    if (!slow || run->slow_count != o->slow_steps) return;
    run_announce(run, "slow", run->record.state.step,
                 "note: rank %zu is a straggler: its steps took %.0f ms without waiting, against a median of %.0f ms, "
                 "in %llu consecutive steps", result->slowest, result->busy_max, result->busy_median,
                 (unsigned long long)o->slow_steps);
}

// Reports once what offloading costs, after a few steps, when the disk has shown its speed.
static inline void run_report_offload(Run* run, double step_ms) {
    enum { REPORTED = 3 };  // the update that is reported: the first ones write unused space
    Model* model = &run->model;
    Offload* stores[2] = {&model->flat.offloaded.store, &model->offloaded.store};
    size_t bytes[2] = {offload_total(stores[0]), offload_blocks_bytes(&model->offloaded) * model->flat.micro_batches};
    if (bytes[0] + bytes[1] == 0 || run->offload_steps == REPORTED) return;
    run->offload_steps++;
    for (int i = 0; i < 2; i++) {
        OffloadCounts c = offload_counts(stores[i]);
        double waited = c.waited_ms - run->offload_waited_ms[i];
        run->offload_waited_ms[i] = c.waited_ms;
        if (bytes[i] == 0 || run->offload_steps < REPORTED) continue;
        run_announce(run, "offload", run->record.state.step,
                     "note: each step reads and writes %.3f GB of %s, reading at %.2f GB/s and writing at %.2f GB/s, "
                     "and spends %.0f of its %.0f ms waiting for that", 1e-9 * (double)bytes[i], stores[i]->what,
                     1e-6 * (double)c.read / c.read_ms, 1e-6 * (double)c.written / c.written_ms, waited, step_ms);
    }
}

// ------------------------------------------------------------------------------------------------
// 8. Tracing

// One sequence of a report, as JSON and as a line with the command that shows its text.
static inline void run_report_sequence(const Run* run, JsonWriter* w, const SequenceTrace* s, double step_norm) {
    const char* shard = run->train.shards[(size_t)s->shard].path;
    char quoted[FILE_PATH_MAX + 64];
    shell_quote(quoted, sizeof quoted, shard);
    json_write_begin(w, '{');
    json_member_string(w, "shard", shard);
    json_member_number(w, "at", s->start);
    json_member_u64(w, "tokens", run->loader.T + 1);
    json_member_number(w, "sample", s->sample);
    json_member_number(w, "rank", s->rank);
    json_member_number(w, "loss", s->loss);
    json_member_number(w, "grad_norm", s->norm);
    json_write_end(w, '}');
    printf("  sample %.0f: loss %.4g, gradient %.3g of %.3g; build/tokenize --show %s --at %.0f --tokens %zu\n",
           s->sample, s->loss, s->norm, step_norm, quoted, s->start, run->loader.T + 1);
}

// Rank 0 reports the worst sequences by one measure, and then those by the other that are not among them.
static inline void run_report_trace(Run* run, const StepTrace* trace, TraceMeasure by, const char* why,
                                    const StepResult* result) {
    const SequenceTrace *worst = trace->worst[by], *others = trace->worst[by == TRACE_LOSS ? TRACE_NORM : TRACE_LOSS];
    JsonWriter w;
    Error ignored;
    char detail[sizeof(Error)];
    snprintf(detail, sizeof detail, "%s%s%s", why,
             trace->not_finite[0] ? "; the first output that is not finite: " : "", trace->not_finite);
    printf("%s\n", detail);
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (size_t i = 0; i < trace->count; i++) run_report_sequence(run, &w, &worst[i], result->grad_norm);
    for (size_t i = 0; i < trace->count; i++) {
        bool there = false;
        for (size_t k = 0; k < trace->count; k++) there |= worst[k].sample == others[i].sample;
        if (!there) run_report_sequence(run, &w, &others[i], result->grad_norm);
    }
    json_write_end(&w, ']');
    fflush(stdout);
    if (json_write_done(&w, &ignored))
        run_write_event(run, "bad_batch", run->record.state.step + 1, detail, "sequences", w.text);
    json_writer_free(&w);
}

// After the guard's decision on a step, and before its update: if it is to be traced, finds its worst sequences and
// reports them; fills in what the log says of them. False if a rank is lost, or the data has changed.
static inline bool run_trace(Run* run, StepLog* s, double factor, Error* error) {
    RunState* state = &run->record.state;
    Model* model = &run->model;
    const Loader* loader = &run->loader;
    const StepResult* result = &s->result;
    StepTrace trace;
    Error why;
    char sentence[200];
    double began = now_ms();
    Spike spike = guard_traces(state, &run->options->guard, result->loss, result->grad_norm, s->updated, factor);
    s->traced = spike != SPIKE_NONE;
    s->trace_ms = 0;
    if (!s->traced) return true;
    unsigned long long step = state->step + 1;
    uint64_t first = state->samples - model->flat.micro_batches * loader->B * loader->world;
    heartbeat_send(HEARTBEAT_PAUSE, state->step);
    bool ok = trace_begin(&trace, model, &why), all = run_agree(run, ok, &why);
    if (!all) {  // no memory for it, which is no reason to end the run
        if (ok) trace_end(&trace);
        s->traced = false;
        printf("note: step %llu is not traced to its sequences: %s\n", step, why.text);
        return run->comm.world == 1 || !comm_failed(&run->comm, error);
    }
    ok = trace_sequences(&trace, loader, first, run->tokens, run->targets, error) &&
         offload_check(&model->offloaded.store, error);
    trace_end(&trace);
    comm_extend_timeout(&run->comm, true);
    if (!run_agree(run, ok, error) || !trace_gather(&trace, error)) return false;
    comm_extend_timeout(&run->comm, false);
    snprintf(sentence, sizeof sentence,
             "step %llu: %s, loss %.4g (mean %.4g), grad norm %.4g (mean %.4g)", step, SPIKE_NAMES[spike], result->loss,
             state->losses.mean, result->grad_norm, state->norms.mean);
    TraceMeasure first_measure = spike == SPIKE_LOSS ? TRACE_LOSS : TRACE_NORM;
    if (run->comm.rank == 0) run_report_trace(run, &trace, first_measure, sentence, result);
    const SequenceTrace *loss = &trace.worst[TRACE_LOSS][0], *norm = &trace.worst[TRACE_NORM][0];
    StepWorst worst = {loss->loss, loss->shard, loss->start, norm->norm, norm->shard, norm->start};
    s->worst = worst;
    clock_start(&model->clock, &model->flat);
    s->trace_ms = now_ms() - began;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 9. Joining and leaving

// With --plan, plans for as many ranks as a launcher has started, and prints on one.
static inline bool run_join_plan(Launch* launch, uint64_t* ranks, Error* error) {
    if (!launch_find(launch, error)) return false;
    if (launch->world > 1) *ranks = launch->world;
    return launch->rank == 0 || freopen("/dev/null", "w", stdout) != NULL || fail_file(error, "open", "/dev/null");
}

// Becomes one rank of the run: as the launcher's environment says, or by forking `ranks` ranks here if that is not 0.
// shares_cores: ranks of one machine divide its cores, unless OpenMP's own variables say otherwise.
static inline bool run_join(Run* run, Launch* launch, uint64_t ranks, double timeout, bool shares_cores,
                            Error* error) {
    if (!(ranks ? launch_fork(launch, ranks, error) : launch_find(launch, error)))
        return fail_as(error,
                       ranks && getenv("RANK") ? ERROR_USAGE : error->kind);  // a launcher has started ranks already
    if (launch->rank > 0 && freopen("/dev/null", "w", stdout) == NULL) return fail_file(error, "open", "/dev/null");
    size_t here =
        launch->local_world == launch->world ? launch->world : 0;  // ranks that a supervisor of this machine sees
    if (!heartbeat_open(getenv(HEARTBEAT_VARIABLE), launch->rank, here, error)) return false;
    if (!comm_open(&run->comm, launch, 1e3 * timeout, error)) return false;
    if (shares_cores && run->comm.local_world > 1 && threads_undecided())
        threads_set(max_size(threads_count() / run->comm.local_world, 1));
    if (run->comm.world > 1) printf("%zu ranks (%s)\n", run->comm.world, launch->launcher);
    return true;
}

// Called when the flags are wrong: connects to the other ranks, if there are any, so that run_exit can notify them.
static inline void run_refuse(Run* run, Launch* launch, double timeout) {
    Error ignored;
    if (!launch_find(launch, &ignored) || launch->world == 1) return;
    if (!comm_open(&run->comm, launch, 1e3 * timeout, &ignored)) run->comm.world = 0;
}

// After the last step, or at a signal.
static inline bool run_finish(Run* run, uint64_t steps, Error* error) {
    const char* out = run->options->out;
    uint64_t step = run->record.state.step;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    // A run that resumed from a tier's checkpoint of its last step, or a later one, has none in --out yet.
    bool saved = out == NULL || step == 0 || run->saved == step;
    if (step >= steps && !saved && !run_save_last(run, error)) return false;
    pruner_await(&run->pruner);
    if (step >= steps) {
        for (size_t i = 1; i < run->tier_count && run->comm.rank == 0; i++)
            if (strncmp(run->tiers[i].directory, SYSTEM_MEMORY_FOLDER "/", strlen(SYSTEM_MEMORY_FOLDER "/")) == 0)
                checkpoint_discard(run->tiers[i].directory);
        return true;
    }
    fail_with(error, "stopped by a signal after step %llu; %s", (unsigned long long)step,
              out ? "the same command with --resume continues" : "nothing was saved, since there is no --out");
    error->kind = out ? ERROR_STOPPED : ERROR_OUTSIDE;
    return fail_on_all_ranks(error);
}

#define REAP_MS 2e3  // the time that forked ranks have to end after rank 0 has failed

// Reports how the run ended, notifies the other ranks, and frees everything. Returns the exit code of the program.
static inline int run_exit(Run* run, Launch* launch, bool ok, const Error* error, double timeout,
                           bool interrupted) {
    bool stopped = !ok && error->kind == ERROR_STOPPED;
    Error of_others;
    if (!ok) launch_report(launch, "train", error->text);
    if (!ok && run->comm.world > 1 && !error->on_all_ranks) comm_abort(&run->comm, error->text);
    if (ok) heartbeat_send(HEARTBEAT_DONE, run->record.state.step);
    if (run->cadence.began_ms > 0)
        run_event(run, ok ? "done" : stopped ? "stopped" : "failed", run->record.state.step, "%s",
                  ok ? "all steps" : error->text);
    run_free(run);
    int code = ok ? 0 : error->kind == ERROR_USAGE ? 2 : stopped && !interrupted ? EXIT_SAVED : 1;
    return launch_reap(launch, "train", code, ok ? 1e3 * timeout : REAP_MS, &of_others);
}

#endif  // LLMTRAIN_RUN_H
