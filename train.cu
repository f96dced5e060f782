// train.cu: the program that trains. Flags, set-up in named steps, and the training loop, from top to bottom.
//
//   cc -O3 -march=native -ffp-contract=off -x c train.cu -o train -lm -pthread    (the Makefile adds OpenMP: all cores)
//   nvcc -O3 -std=c++17 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 train.cu -o train -lcublasLt        for a GPU
//
// Reads:  token shards (--data, --val), a checkpoint (--resume in --out, --init-from).
// Writes: --out/metrics.jsonl, a line per logged step; --out/step_N/, a checkpoint every --ckpt-every steps and at the
//         end; --out/events.jsonl, what happened to the run. The console shows a line per logged step.
// Exit:   0 done; 1 something failed (a file, memory, the disk, another rank), or Ctrl-C stopped the run after saving
//         it; 2 a flag is wrong; 75 SIGTERM or SIGUSR1 stopped the run after saving it: --resume continues it.
//
// Under mpirun, torchrun or srun, or with --ranks N, several processes train together; rank 0 writes the console, the
// log and the manifests.

#include "llmtrain.h"           // model; state.h (schedule_lr, guard_step), saver.h (Cadence), data.h, zero.h, log.h
#include "llmtrain/text/generate.h"  // Sampler
#include "llmtrain/run/flops.h"     // model_flops_per_token
#include "llmtrain/run/plan.h"      // plan_show
#include "llmtrain/run/presets.h"   // config_choose
#include "llmtrain/run/run.h"       // Run: joining ranks, resuming, saving, rewinding
#include "llmtrain/run/validate.h"  // model_validate

#include <signal.h>

// ------------------------------------------------------------------------------------------------
// Flags

typedef struct {
    const char *data, *val, *model, *train, *matmul_algorithms;
    bool tf32;
    Config config;                // as far as flags give it
    uint64_t batch, seq, total_batch, seed, threads;
    Schedule schedule;
    OptimizerOptions optimizer;
    double dropout, timeout, peak_tflops;
    uint64_t ranks, zero;
    int documents;                // 0: join; 1: mask
    uint64_t end_of_text;         // only used if the flag was given
    int reduce;                   // 0: auto; otherwise ReduceKind + 1, in the order of the choices
    uint64_t val_every, val_windows, val_overlap, sample_every, log_every;
    PlanOptions plan;             // their flags are in plan.h, generate.h and run.h
    Sampler sampler;
    RunOptions run;
} Options;

enum { FLAGS_MAX = 160 };

// Sets the defaults, and fills flags with the table; returns the number of rows. A row without FREE or LOCAL changes
// what the run computes (flags.h).
static size_t options_flags(Flag flags[FLAGS_MAX], Options* o) {
    enum { FREE = FLAG_FREE, LOCAL = FLAG_LOCAL };
    Schedule* s = &o->schedule;
    OptimizerOptions* a = &o->optimizer;
    memset(o, 0, sizeof *o);
    o->config.tied = true;
    o->config.rope_theta = 10000;
    const Flag before_config[] = {
        FLAG_HEADING("Data and program"),
        FLAG_TEXT("data", &o->data, NULL, "GLOB", FREE, "token shards to train on, e.g. 'data/x_train_*.bin'"),
        FLAG_TEXT("val", &o->val, NULL, "GLOB", FREE, "token shards to validate on"),
        FLAG_COUNT("seed", &o->seed, 1337, 0, 9e15, 0, "seed of initial weights, data order, dropout and sampling"),
        FLAG_COUNT("threads", &o->threads, 0, 0, 4096, LOCAL, "OpenMP threads per rank; 0: OpenMP's default"),
        FLAG_HEADING("Model: a preset, and sizes that override it"),
        FLAG_TEXT("model", &o->model, NULL, "NAME", 0,
                  "preset: gpt2:124M|350M|774M|1558M, gpt2:dN with N layers (6, 12, 24, 36, 48, 60, 72, 84), "
                  "llama:15M|42M|110M (llama2.c), llama:1B|3B|8B (Llama 3)"),
    };
    const Flag after_config[] = {
        FLAG_REAL("dropout", &o->dropout, 0, 0, 0.9, 0,
                  "dropout probability, for embeddings and for attention and feed-forward outputs"),
        FLAG_HEADING("Batches"),
        FLAG_COUNT("batch", &o->batch, 4, 1, 65536, 0, "sequences per micro-batch and rank"),
        FLAG_COUNT("seq", &o->seq, 0, 0, 1 << 24, 0, "tokens per training sequence; 0: --context"),
        FLAG_COUNT("total-batch", &o->total_batch, 0, 0, 1e12, 0,
                   "tokens per step over all ranks, by gradient accumulation; 0: one micro-batch per rank"),
        FLAG_CHOICE("documents", &o->documents, 0, "join|mask", 0,
                    "join: ignore the boundaries between documents; mask: attention and loss do not cross them"),
        FLAG_COUNT("end-of-text", &o->end_of_text, 0, 0, 1 << 24, 0,
                   "with --documents mask: id of the token between documents; default: that of the shards' tokenizer"),
        FLAG_COUNT("steps", &s->steps, 1000, 0, 1e12, 0, "optimizer steps to train for"),
        FLAG_HEADING("Optimizer"),
        FLAG_TEXT("train", &o->train, NULL, "NAMES", FLAG_FIXED,
                  "train only these tensors, e.g. 'block.*' or '*norm*,head_weight'; the others are frozen"),
        FLAG_CHOICE("optimizer", &a->kind, OPTIMIZER_ADAMW, optimizer_names(), 0, "update rule"),
        FLAG_REAL("lr", &s->lr, 6e-4, 0, 100, 0, "peak learning rate"),
        FLAG_REAL("beta1", &a->beta1, 0.9, 0, 0.99999, 0, "decay of the first moment; momentum: the coefficient"),
        FLAG_REAL("beta2", &a->beta2, 0.95, 0, 0.99999, 0, "adamw: decay of the second moment; lion: of the momentum"),
        FLAG_REAL("epsilon", &a->epsilon, 1e-8, 1e-15, 1, 0, "adamw: term added to the denominator for stability"),
        FLAG_REAL("weight-decay", &a->weight_decay, 0.1, 0, 10, 0, "decoupled weight decay, applied to matrices only"),
        FLAG_COUNT("optimizer-rank", &a->rank, 128, 1, 65536, 0,
                   "galore, ldadam: rank of the subspace that holds a matrix's optimizer state"),
        FLAG_SWITCH("masters", &a->master_weights, true, 0,
                    "16-bit builds: keep fp32 master weights; off: update 16-bit weights with stochastic rounding"),
        FLAG_SWITCH("tf32", &o->tf32, false, 0, "fp32 builds on a GPU: allow TF32 matmuls"),
        FLAG_TEXT("matmul-algorithms", &o->matmul_algorithms, NULL, "FILE", 0, MATMUL_ALGORITHMS_HELP),
        FLAG_HEADING("Schedule"),
        FLAG_CHOICE("schedule", &s->kind, SCHEDULE_COSINE, SCHEDULE_NAMES, 0,
                    "shape of the learning rate after warmup"),
        FLAG_COUNT("warmup", &s->warmup, 100, 0, 1e12, 0, "steps of linear warmup to --lr"),
        FLAG_REAL("lr-final", &s->final_fraction, 0.1, 0, 1, 0,
                  "final learning rate as a fraction of --lr (linear, cosine, wsd, exponential)"),
        FLAG_REAL("wsd-fraction", &s->decay_fraction, 0.2, 0.0001, 1, 0,
                  "with --schedule wsd: fraction of the steps after warmup, the last ones, over which the rate decays"),
        FLAG_COUNT("decay-every", &s->decay_every, 1000, 1, 1e12, 0,
                   "with --schedule step: multiply the rate by --decay-factor every N steps"),
        FLAG_REAL("decay-factor", &s->decay_factor, 0.5, 0, 1, 0,
                  "with --schedule step: multiply the rate by X every --decay-every steps"),
        FLAG_HEADING("Ranks: processes that train together"),
        FLAG_COUNT("ranks", &o->ranks, 1, 1, 65536, FREE,
                   "processes to start here, without mpirun, torchrun or srun; with --plan: ranks to plan for"),
        FLAG_COUNT("zero", &o->zero, 0, 0, 2, 0, "ZeRO stage: 0 off, 1 shard optimizer state, 2 also gradients"),
        FLAG_CHOICE(
            "reduce", &o->reduce, 0, "auto|float|storage|exact", 0,
            "dtype of gradient reduction: float is fp32, storage the build's dtype, exact int64 fixed point (same "
            "bits for every --zero and number of ranks); auto: exact with several ranks, otherwise float"),
        FLAG_REAL("timeout", &o->timeout, 600, 1, 1e6, FREE,
                  "seconds without a byte from a rank after which it counts as lost"),
        FLAG_HEADING("Logging, validation and samples"),
        FLAG_COUNT("log-every", &o->log_every, 1, 1, 1e12, FREE, "log every N steps"),
        FLAG_REAL("peak-tflops", &o->peak_tflops, 0, 0, 1e6, LOCAL,
                  "peak TFLOP/s for computing MFU; 0: the GPU's datasheet value (if unknown, MFU is n/a)"),
        FLAG_COUNT("val-every", &o->val_every, 0, 0, 1e12, FREE, "validate every N steps; 0: only after the last"),
        FLAG_COUNT("val-windows", &o->val_windows, 0, 0, 1e12, FREE,
                   "number of validation sequences, of --seq tokens each; 0: all of --val"),
        FLAG_COUNT("val-overlap", &o->val_overlap, 0, 0, 1e7, FREE,
                   "tokens shared by consecutive validation sequences, given as context and not scored again"),
        FLAG_COUNT("sample-every", &o->sample_every, 0, 0, 1e12, FREE, "print a text sample every N steps; 0: never"),
    };
    size_t count = flags_append(flags, 0, before_config, sizeof before_config / sizeof(Flag));
    count = fields_flags(flags, count, CONFIG_FIELDS, CONFIG_FIELD_COUNT, &o->config);
    count = flags_append(flags, count, after_config, sizeof after_config / sizeof(Flag));
    count = plan_flags(flags, count, &o->plan);
    count = sampler_flags(flags, count, &o->sampler);
    count = run_flags(flags, count, &o->run);
    assert(count <= FLAGS_MAX);
    return count;
}

// Refuses flags that do not work together.
static bool options_check(const Options* o, const Cadence* cadence, Error* error) {
    if (o->sampler.prompt[0] == 0) return fail_with(error, "--prompt is empty; give at least one character");
    if (o->val_every && o->val == NULL) return fail_with(error, "--val-every needs --val, the shards to validate on");
    if (!run_options_check(&o->run, cadence, error) || !plan_options_check(&o->plan, error)) return false;
    return o->data || o->plan.show ||
           fail_with(error,
                     "there is nothing to train on; give --data (build/generate --out DIR --prompt TEXT samples text)");
}

// ------------------------------------------------------------------------------------------------
// Set-up

// Micro-batches per rank and step.
static uint64_t options_micro_batches(const Options* o, size_t world) {
    return o->total_batch ? o->total_batch / (o->batch * o->seq * world) : 1;
}

static ModelOptions model_options(Run* run, const Options* o, size_t world) {
    ModelOptions m;
    memset(&m, 0, sizeof m);
    m.B = o->batch;
    m.T = o->seq;
    m.training = true;
    m.train = o->train;
    m.optimizer = o->optimizer;
    m.cached_sequences = o->sample_every > 0;
    m.mask_documents = run->train.mask_documents;
    m.end_of_text = run->train.end_of_text;
    m.tf32 = o->tf32;
    m.matmul_algorithms = o->matmul_algorithms;
    m.recompute = o->plan.recompute;
    m.offload = o->plan.offload;
    m.offload_dir = o->plan.offload_dir;
    m.ranks.transport = o->plan.show ? NULL : &run->comm.transport;
    m.ranks.rank = run->comm.rank;
    m.ranks.local_rank = run->comm.local_rank;
    m.ranks.world = world;
    m.ranks.stage = o->zero;
    m.ranks.reduce = world > 1 ? REDUCE_EXACT : REDUCE_FLOAT;
    if (o->reduce != 0) m.ranks.reduce = (ReduceKind)(o->reduce - 1);  // 0 is auto
    return m;
}

// Plans the model; any failure here is a mistake in the flags.
static bool plan_model(Run* run, Options* o, Error* error) {
    Config* c = &run->record.config;
    size_t world = o->plan.show ? o->ranks : run->comm.world;
    if (c->context == 0) c->context = o->seq;
    if (c->vocab == 0) c->vocab = (size_t)run->train.vocabulary;
    if (!config_complete(c, error)) return false;
    if (o->seq == 0) o->seq = c->context;
    if (o->total_batch % (o->batch * o->seq * world) != 0)
        return fail_with(error,
                         "--total-batch %llu is not a multiple of --batch times --seq%s, %llu; choose one that is",
                         (unsigned long long)o->total_batch, world > 1 ? " times the ranks" : "",
                         (unsigned long long)(o->batch * o->seq * world));
    if (o->val_overlap >= o->seq)
        return fail_with(error,
                         "--val-overlap %llu leaves no new tokens in sequences of %llu; make it smaller than --seq",
                         (unsigned long long)o->val_overlap, (unsigned long long)o->seq);
    o->plan.micro_batches = options_micro_batches(o, world);
    o->plan.snapshots = run_takes_snapshots(run);
    o->plan.hot = o->run.ckpt_hot > 0;
    return model_plan(&run->model, c, model_options(run, o, world), error) && plan_fit(&run->model, &o->plan, error);
}

// Opens the data and plans the model: everything that a rank can do alone, before it allocates memory.
static bool run_prepare(Run* run, Options* o, Flag* flags, size_t flag_count, Error* error) {
    if (!run_open_data(run, o->data, o->val, error)) return false;
    bool ends_given = flag_was_given(flags, flag_count, "end-of-text");
    if ((ends_given || o->documents) &&
        !run_mask_documents(run, o->documents != 0, ends_given ? &o->end_of_text : NULL, error))
        return fail_as(error, ERROR_USAGE);
    if (!run_choose_config(run, o->model, &o->config, flags, flag_count, error)) return false;
    if (!plan_model(run, o, error)) return fail_as(error, ERROR_USAGE);
    if (o->data && !run_check_data(run, &run->train, "--data", o->seq, error)) return false;
    if (o->val && !run_check_data(run, &run->val, "--val", o->seq, error)) return false;
    if (run->model.memory.total >= ARENA_MAX)
        return fail_with(error, "the model needs more than %.0f GB; make --batch, --seq or the model smaller",
                         1e-9 * (double)ARENA_MAX);
    return o->plan.show || o->run.out == NULL || run->comm.rank > 0 || run_check_out(&o->run, error);
}

static void print_model(const Run* run) {
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        char value[32];
        const Field* field = &CONFIG_FIELDS[i];
        field_text(value, sizeof value, field, &run->record.config);
        if (field->missing && strcmp(value, field->missing) == 0) continue;  // a feature that most models lack
        printf("%s%s %s", i ? ", " : "model: ", field->name, value);
    }
    const Parameters* p = &run->model.parameters;
    size_t trained = parameters_trained(p);
    printf(": %zu parameters", p->true_size);
    if (trained < p->true_size) printf(", of which %zu are trained", trained);
    printf("\n");
}

// Prints the device, and the peak against which MFU is computed: --peak-tflops, or else the device's if it is known.
static void print_device(const Run* run, Options* o) {
    char text[320];
    double peak;
    device_describe(text, sizeof text, &peak, run->model.stream);
    const char* source = o->peak_tflops > 0 ? " (--peak-tflops)" : "";
    if (o->peak_tflops == 0) o->peak_tflops = peak;
    printf("precision %s, matmuls by %s", FLOATX_NAME, text);
    if (o->peak_tflops > 0) printf(", MFU against %g TFLOP/s%s", o->peak_tflops, source);
    printf("\n");
}

static void print_notes(const Run* run, const Options* o) {
    unsigned long long step = run->record.state.step, steps = o->schedule.steps, warmup = o->schedule.warmup;
    if (warmup > steps && step < steps)
        printf("note: --warmup %llu is longer than the run, %llu steps: the rate never reaches --lr\n", warmup, steps);
    if (o->run.out == NULL) printf("no --out: nothing will be saved\n");
    if (step >= steps) printf("nothing to do: the run is already at step %llu of %llu\n", step, steps);
    fflush(stdout);
}

// Fills in what checkpoints record about the run.
static void record_fill(Run* run, const Options* o, const Flag* flags, size_t flag_count) {
    RunRecord* r = &run->record;
    r->optimizer = o->optimizer;
    if (!optimizer_has_rank(r->optimizer.kind)) r->optimizer.rank = 0;
    r->seed = o->seed;
    r->T = o->seq;
    r->data = dataset_fingerprint(&run->train);
    r->flags = flags;
    r->flag_count = flag_count;
}

// Everything before the first step. After run_agree all ranks continue, or all fail with an error.
static bool run_set_up(Run* run, Options* o, Flag* flags, size_t flag_count, Error* error) {
    bool found, ok;
    Model* model = &run->model;
    if (!run_agree(run, run_prepare(run, o, flags, flag_count, error), error)) return false;
    print_model(run);
    if (o->plan.show) return plan_show(&run->model, &o->plan), true;
    if (!run_compare_ranks(run, flags, flag_count, error)) return false;
    record_fill(run, o, flags, flag_count);
    ok = model_allocate(model, error) && run_allocate(run, error);
    if (ok && o->sample_every) ok = sampler_open(&o->sampler, model, &run->tokenizer, error);
    if (!run_agree(run, ok, error) || !model_connect(model, error)) return false;
    print_device(run, o);
    if (!run_compare_devices(run, error)) return false;
    model->dropout.p = (float)o->dropout;
    model->dropout.seed = o->seed;
    ok = saver_open(&run->saver, &model->flat, run_takes_snapshots(run), 1e6 * o->run.ckpt_bandwidth, error);
    if (!run_agree(run, ok, error) || !run_open_out(run, &found, error)) return false;
    print_notes(run, o);
    ok = loader_open(&run->loader, &run->train, (int32_t)model->config.vocab, o->seed, run->comm.rank, run->comm.world,
                     o->batch, o->seq, error) &&
         loader_start(&run->loader, run->record.state.samples, error);
    if (!run_agree(run, ok, error)) return false;
    cadence_start(&run->cadence, now_ms());
    run_event(run, found ? "resumed" : "begun", run->record.state.step, "%zu ranks, --zero %llu, %s", run->comm.world,
              (unsigned long long)o->zero, FLOATX_NAME);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Training

// The first SIGINT, SIGTERM or SIGUSR1 received, 0 if none: the program finishes the step and saves before it exits. A
// second SIGINT ends it at once.
static volatile sig_atomic_t interrupted;

static void interrupt(int signal_number) {
    static const char message[] = "train: stopping after this step; Ctrl-C twice stops at once, without saving it\n";
    bool first = interrupted == 0;
    if (first) interrupted = signal_number;
    if (signal_number == SIGINT)
        signal(signal_number, SIG_DFL);  // the others may arrive twice, from scheduler and launcher
    if (first && write(STDOUT_FILENO, message, sizeof message - 1) < 0) return;  // only rank 0's goes to the console
}

// Computes gradients of the mean loss over the step's micro-batches; each rank has its own. heartbeat_send() informs a
// supervisor (heartbeat.h); fault_*() do nothing outside of tests (fault.h).
static bool accumulate_gradients(Run* run, uint64_t micro_batches, Error* error) {
    Model* model = &run->model;
    RunState* state = &run->record.state;
    size_t B = model->options.B, T = model->options.T;
    model_begin_step(model, state->loss_scale, micro_batches);
    for (uint64_t i = 0; i < micro_batches; i++) {
        heartbeat_send(HEARTBEAT_STEP, state->step + 1);
        if (fault_point("load")) fault_flip(model);
        if (!loader_next(&run->loader, run->tokens, run->targets, error)) return false;
        model->dropout.first_token =
            (state->samples + run->comm.rank * B) * T;  // makes its masks the same for any number of ranks
        model_gradients(model, run->tokens, run->targets, B, T);
        state->samples += B * run->comm.world;
    }
    return true;
}

// Reads the step's loss and gradient norm over all ranks, and the flags that they exchange; completes a save that all
// ranks have written.
static bool read_step(Run* run, StepResult* result, Error* error) {
    Saver* saver = &run->saver;
    SaverState state = saver_state(saver);
    StepFlags flags = {interrupted != 0, cadence_due_now(&run->cadence, now_ms()), state == SAVER_WRITTEN,
                       state == SAVER_FAILED};
    heartbeat_collective("the reduction of gradients");
    if (!model_finish_step(&run->model, result, flags, error)) return false;
    heartbeat_send(HEARTBEAT_STEP, run->record.state.step + 1);
    if (state != SAVER_IDLE && result->flags.failed) saver_stop(saver);
    bool ends = state != SAVER_IDLE && (result->flags.saved || result->flags.failed);
    return !ends || run_save_complete_or_report(run, error);
}

static bool validate(Run* run, const Options* o, double* val_loss, Error* error) {
    fault_point("validate");
    comm_extend_timeout(&run->comm, true);
    bool ok = model_validate(&run->model, val_loss, &run->val, o->val_windows, o->val_overlap, run->tokens,
                             run->targets, o->batch, o->seq, error);
    if (ok) comm_extend_timeout(&run->comm, false);
    return ok;
}

// Reports a step on the console and in the log, after adding to `s` what follows from the state. tokens: per step and
// rank.
static bool report(Run* run, const Options* o, StepLog* s, double tokens, Error* error) {
    const RunState* state = &run->record.state;
    const Model* model = &run->model;
    s->step = state->step;
    s->steps = o->schedule.steps;
    s->tokens = state->samples * o->seq;
    s->skipped = state->step - state->updates;
    s->entropy_floor = run->val.entropy_floor;
    s->tokens_per_second = 1e3 * tokens * (double)run->comm.world / s->ms;
    s->mfu = NAN;
    if (o->peak_tflops > 0) s->mfu = 1e-9 * tokens * model_flops_per_token(model, o->seq) / (s->ms * o->peak_tflops);
    s->memory = device_is_host() ? memory_peak() : arena_bytes(&model->memory);
    s->ranks = run->comm.world;
    step_print(stdout, s);
    return run->log.file == NULL || log_write(&run->log, s, error);
}

// The training loop, from state.step to --steps. With FP16 the loss is multiplied by state.loss_scale, and so are the
// gradients until model_update divides by it.
static bool run_train(Run* run, Options* o, Error* error) {
    Model* model = &run->model;
    RunState* state = &run->record.state;
    uint64_t micro_batches = options_micro_batches(o, run->comm.world), first_step = state->step;
    double began = now_ms(), tokens = (double)(micro_batches * o->batch * o->seq);

    bool stop = state->step >= o->schedule.steps;
    while (!stop) {
        StepLog s;
        double started = now_ms();
        uint64_t sent = collective_bytes_sent(&model->flat.collectives);
        fault_step(run->comm.rank, state->step + 1);
        if (!accumulate_gradients(run, micro_batches, error)) return false;
        bool was_saving = saver_state(&run->saver) != SAVER_IDLE;
        if (!read_step(run, &s.result, error)) return false;

        // Checks the parameters that made these gradients: the update would overwrite a wrong bit, or spread it.
        uint64_t check = o->run.check_every;
        if (check && (state->step + 1) % check == 0 && !run_compare(run, error)) return false;

        // The guard decides whether the optimizer steps, and by what factor it multiplies the gradients (clipping); the
        // schedule how far (after rewinds less far: lr_factor). run_trace finds the cause of a step that stands out.
        double factor = 0.0;
        s.lr = state->lr_factor * schedule_lr(&o->schedule, state->step);
        bool finite = isfinite(s.result.loss);
        bool update = guard_step(state, &factor, &o->run.guard, finite ? s.result.grad_norm : NAN);
        if (!run_trace(run, &s, update, factor, error)) return false;
        fault_point("update");
        if (update) saver_await_snapshot(&run->saver);
        if (update) model_update(model, ++state->updates, s.lr, factor);
        state->skipped_consecutive = update ? 0 : state->skipped_consecutive + 1;
        state->step++;
        run_report_straggler(run, &s.result);
        // Diverged: this step is not logged; the run returns to a checkpoint, or ends.
        if (state->skipped_consecutive >= o->run.diverged_after || (!finite && o->run.rewind)) {
            if (!run_rewind(run, &s.result, error)) return false;
            first_step = state->step;
            began = now_ms();
            continue;
        }

        // The step's time excludes tracing, validation, sampling and saving. The host runs ahead of a GPU: it waits
        // before a pause, so that the update is counted, and after the first step, which is not counted.
        bool last = state->step == o->schedule.steps;
        stop = last || s.result.flags.stop;
        bool signaled = stop && !last;  // a signal: there may be no time for anything but the save
        bool validates = o->val && !signaled && (last || (o->val_every && state->step % o->val_every == 0));
        bool samples = !signaled && o->sample_every && state->step % o->sample_every == 0;
        bool saves = o->run.out && (stop || s.result.flags.save || cadence_due(&run->cadence, state->step));
        bool saves_hot = !saves && o->run.ckpt_hot && state->step % o->run.ckpt_hot == 0 &&
            saver_state(&run->saver) == SAVER_IDLE;
        bool pauses = validates || samples || saves || saves_hot;
        if (pauses || state->step == first_step + 1) device_wait(model->stream);
        s.ms = now_ms() - started - s.trace_ms;
        if (state->step > first_step + 1) cadence_count_step(&run->cadence, s.ms, was_saving);
        run_schedule_save(run);
        if (update) run_report_offload(run, s.ms);
        if (pauses) heartbeat_send(HEARTBEAT_PAUSE, state->step);
        s.val_loss = NAN;
        if (validates && !validate(run, o, &s.val_loss, error)) return false;

        s.sent = collective_bytes_sent(&model->flat.collectives) - sent;
        s.minutes_left =
            (now_ms() - began) / 6e4 / (double)(state->step - first_step) * (double)(o->schedule.steps - state->step);
        bool reports = last || state->step % o->log_every == 0 || !isnan(s.val_loss);
        if (reports && !report(run, o, &s, tokens, error)) return false;
        bool sampled = !samples || run->comm.rank > 0 || sampler_write(&o->sampler, stdout, error);
        if (samples && !run_agree(run, sampled, error)) return false;
        if (stop && saves && !run_save_last(run, error)) return false;
        if (!stop && (saves || saves_hot) && !run_save_async(run, saves ? o->run.out : run->hot, error)) return false;
        if (pauses) clock_start(&model->clock, &model->flat);
    }
    return run_finish(run, o->schedule.steps, error);
}

// ------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    Run run;
    Options options;
    Flag flags[FLAGS_MAX];
    Error error;
    Launch launch;
    files_open_standard();
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    if (argc > 1 && strcmp(argv[1], "supervise") == 0)
        return fputs("train: the supervisor is a separate program: ./supervise [FLAGS] -- ./train ...\n", stderr), 2;
    memset(&run, 0, sizeof run);
    launch_alone(&launch);
    size_t flag_count = options_flags(flags, &options);
    run.options = &options.run;
    if (flags_want_help(argc, argv)) {
        printf("train: trains a GPT-2 or Llama model (%s build). ./supervise restarts it when it dies or hangs; "
               "build/generate writes text.\n", FLOATX_NAME);
        flags_help(flags, flag_count);
        return 0;
    }
    bool ok = (flags_parse(flags, flag_count, argc, argv, &error) &&
               cadence_parse(&run.cadence, options.run.ckpt_every, options.run.mtbf, options.run.ckpt_async, &error) &&
               options_check(&options, &run.cadence, &error)) || fail_as(&error, ERROR_USAGE);
    if (ok) {
        options.optimizer.seed = options.sampler.options.seed = options.seed;
        if (options.threads) threads_set(options.threads);
        if (!options.plan.show) {
            signal(SIGINT, interrupt);
            signal(SIGTERM, interrupt);
            signal(SIGUSR1, interrupt);
            if (options.run.out) signal(SIGPIPE, SIG_IGN);  // if the console goes away, the log has it all
        }
        bool forks = flag_was_given(flags, flag_count, "ranks");
        ok = options.plan.show
                 ? run_join_plan(&launch, &options.ranks, &error)
                 : run_join(&run, &launch, forks ? options.ranks : 0, options.timeout, options.threads == 0, &error);
        ok = ok && run_set_up(&run, &options, flags, flag_count, &error) &&
             (options.plan.show || run_train(&run, &options, &error));
    } else {
        run_refuse(&run, &launch, options.timeout);
    }
    sampler_close(&options.sampler);
    return run_exit(&run, &launch, ok, &error, options.timeout, interrupted == SIGINT);
}
