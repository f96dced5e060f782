// train.cu: the program that trains. Flags, set-up in named steps, and the training loop, from top to bottom.
//
//   cc -O3 -march=native -ffp-contract=off -x c train.cu -o train -lm -ldl -pthread    (make adds OpenMP: all cores)
//   nvcc -O3 -std=c++20 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 train.cu -o train -lcublasLt        for a GPU
//
// Reads:  token shards (--data, --val), a checkpoint (--resume in --out, --init-from).
// Writes: in --out: run.jsonl, a line per start; metrics.jsonl, a line per logged step, and ranks.jsonl, its numbers of
//         each rank; events.jsonl; step_N/, checkpoints (doc/formats.md has all). The console shows a line per step.
// Exit:   0 done, or --stop-after ended the run; 1 something failed (a file, memory, the disk, another rank), or Ctrl-C
//         stopped the run after saving it, or --plan finds that it does not fit --memory; 2 a flag is wrong, or a shard
//         of the data is damaged; 75 SIGTERM or SIGUSR1 stopped the run after saving it: --resume continues it.
//
// Under mpirun, torchrun or srun, or with --ranks N, several processes train together; rank 0 writes the console, the
// log and the manifests.

#include "llmtrain.h"                // Model: model_finish_step, model_update
#include "llmtrain/run/describe.h"   // what is printed before the first step
#include "llmtrain/run/flops.h"      // model_flops_per_token
#include "llmtrain/run/join.h"       // run_join, run_exit; with it ranks/launch.h: Launch
#include "llmtrain/run/optimizer_flags.h"
#include "llmtrain/run/plan.h"       // --plan: plan_fit, plan_show
#include "llmtrain/run/rewind.h"     // run_rewind
#include "llmtrain/run/samples.h"    // documents, packing, epochs
#include "llmtrain/run/stages.h"     // pipeline_step
#include "llmtrain/run/step.h"       // Due; with it run.h (Run), facts.h, checks.h, log.h (StepLog), state.h (guard)
#include "llmtrain/run/validation.h" // run_validate
#include "llmtrain/text/generate.h"  // Sampler

#include <signal.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // members that are not named are zero

// ------------------------------------------------------------------------------------------------
// Flags (llmtrain/base/flags.h)

// The command line. What one part of the program reads is a member of that part's type: OptimizerOptions, PlanOptions,
// RunOptions. The model's, ModelOptions, are made by model_options below.
typedef struct {
    const char *data, *val, *model, *train, *matmul_algorithms;
    bool tf32;
    Config config;                // only the fields set by flags
    uint64_t batch, seq, total_batch, seed, threads;
    Schedule schedule;
    OptimizerOptions optimizer;
    double dropout, lora_dropout, timeout, peak_tflops;
    Layout layout;
    uint64_t sample_every, log_every;
    SampleOptions samples;        // these have their flags in samples.h, objectives.h, validation.h and so on
    ObjectiveOptions objective;
    ValidationOptions validation;
    PlanOptions plan;
    Sampler sampler;
    RunOptions run;
} Options;

#define TITLE "train: trains a GPT-2 or Llama model (" FLOATX_NAME " build). ./supervise restarts it when it dies or " \
              "hangs; build/generate writes text."

// Sets the defaults, and appends the flags in the order of --help. A resume reports changes of unmarked flags, which
// checkpoints record, not of FREE ones; LOCAL ones may even differ between ranks; FLAG_FIXED ones must stay the same.
static void options_flags(Flags* flags, Options* o) {
    enum { FREE = FLAG_FREE, LOCAL = FLAG_LOCAL };
    memset(o, 0, sizeof *o);
    o->config.tied = true;
    o->config.rope_theta = 10000;
    const Flag before_config[] = {
        FLAG_HEADING("Data and program"),
        FLAG_TEXT("data", &o->data, NULL, "GLOB", FREE, "token shards to train on, or a mixture: 'a*.bin:7,b*.bin:3'"),
        FLAG_TEXT("val", &o->val, NULL, "GLOB", FREE, "token shards to validate on"),
        FLAG_COUNT("seed", &o->seed, 1337, 0, 9e15, 0, "seed of initial weights, data order, dropout and sampling"),
        FLAG_COUNT("threads", &o->threads, 0, 0, 4096, LOCAL, THREADS_HELP),
        FLAG_HEADING("Model: a preset, and sizes that override it"),
        FLAG_TEXT("model", &o->model, NULL, "NAME", 0,
                  "preset: gpt2:124M|350M|774M|1558M, gpt2:dN with N layers (6, 12, 24, 36, 48, 60, 72, 84), "
                  "llama:15M|42M|110M (llama2.c), llama:1B|3B|8B (Llama 3)"),
    };
    const Flag after_config[] = {
        FLAG_REAL("dropout", &o->dropout, 0, 0, 0.9, 0,
                  "dropout probability, for embeddings and for attention and feed-forward outputs"),
        FLAG_REAL("lora-dropout", &o->lora_dropout, 0, 0, 0.9, 0,
                  "with --lora: dropout probability of the pairs' input"),
        FLAG_HEADING("Batches"),
        FLAG_COUNT("batch", &o->batch, 4, 1, 65536, 0, "sequences per micro-batch"),
        FLAG_COUNT("seq", &o->seq, 0, 0, 1 << 24, 0, "tokens per training sequence; 0: --context"),
        FLAG_COUNT("total-batch", &o->total_batch, 0, 0, 1e12, FREE, "tokens per step over all ranks, by gradient "
                   "accumulation; 0: as the run had before --resume, or no accumulation"),
        FLAG_COUNT("steps", &o->schedule.steps, 1000, 0, 1e12, 0, "optimizer steps to train for"),
    };
    const Flag after_optimizer[] = {
        FLAG_SWITCH("tf32", &o->tf32, false, 0, "fp32 builds on a GPU: allow TF32 matmuls"),
        FLAG_TEXT("matmul-algorithms", &o->matmul_algorithms, NULL, "FILE", 0, MATMUL_ALGORITHMS_HELP),
    };
    const Flag after_schedule[] = {
        FLAG_REAL("timeout", &o->timeout, 600, 1, 1e6, FREE,
                  "declare a rank lost after X seconds without data from it"),
        FLAG_HEADING("Logging, validation and samples"),
        FLAG_COUNT("log-every", &o->log_every, 1, 1, 1e12, FREE, "log every N steps"),
        FLAG_REAL("peak-tflops", &o->peak_tflops, 0, 0, 1e6, LOCAL,
                  "peak TFLOP/s for computing MFU; 0: the GPU's datasheet value (if unknown, MFU is n/a)"),
        FLAG_COUNT("sample-every", &o->sample_every, 0, 0, 1e12, FREE, "print a text sample every N steps; 0: never"),
    };
    flags_append(flags, before_config, sizeof before_config / sizeof(Flag));
    fields_flags(flags, CONFIG_FIELDS, CONFIG_FIELD_COUNT, &o->config);
    flags_append(flags, after_config, sizeof after_config / sizeof(Flag));
    samples_flags(flags, &o->samples);
    objective_flags(flags, &o->objective);
    optimizer_flags(flags, &o->optimizer, &o->train, &o->schedule.lr, &o->run.guard.clip);
    flags_append(flags, after_optimizer, sizeof after_optimizer / sizeof(Flag));
    schedule_flags(flags, &o->schedule);
    layout_flags(flags, &o->layout);
    flags_append(flags, after_schedule, sizeof after_schedule / sizeof(Flag));
    validation_flags(flags, &o->validation);
    plan_flags(flags, &o->plan);
    sampler_flags(flags, &o->sampler);
    run_flags(flags, &o->run);
}

// Refuses flags that do not work together. cadence: when to save, from --ckpt-every.
static bool options_check(const Options* o, const Cadence* cadence, Error* error) {
    if (o->sampler.prompt[0] == 0) return fail_with(error, "--prompt is empty; give at least one character");
    if (!objective_check(&o->objective, o->dropout > 0 || o->lora_dropout > 0, o->val != NULL, o->samples.too_long,
                         &o->layout, error)) return false;
    if (!validation_options_check(&o->validation, o->run.keep_best, o->val != NULL, error)) return false;
    if (!run_options_check(&o->run, cadence, error) || !plan_options_check(&o->plan, error)) return false;
    return o->data || o->plan.show ||
           fail_with(error, "no training data: give --data (build/generate --out DIR --prompt TEXT samples text)");
}

// ------------------------------------------------------------------------------------------------
// Set-up

static ModelOptions model_options(Run* run, const Options* o, size_t world) {
    RankOptions ranks = {.transport = o->plan.show ? NULL : &run->comm.transport, .rank = run->comm.rank,
                         .world = world, .local_rank = run->comm.local_rank, .stage = o->layout.zero,
                         .reduce = layout_reduce(&o->layout, world),
                         .shard = o->layout.shard, .tp = o->layout.tp, .cp = o->layout.cp, .pp = o->layout.pp,
                         .leaves = run->record.leaves, .row_leaves = run->record.row_leaves,
                         .kv_copies = run->record.kv_copies,
                         .groups = MESH_TRANSPORTS(run->mesh)};
    PipelineOptions pipeline = {o->layout.pipeline, layout_chunks(&o->layout), o->plan.micro_batches};
    ModelOptions m = {.B = o->batch, .T = o->seq, .training = true, .optimizer = o->optimizer,
                      .cached_sequences = o->sample_every > 0, .mask_documents = run->train.mask_documents,
                      .end_of_text = run->train.end_of_text, .tf32 = o->tf32,
                      .matmul_algorithms = o->matmul_algorithms, .recompute = o->plan.recompute, .train = o->train,
                      .lora_drops = o->lora_dropout > 0, .weighs = o->objective.kind != OBJECTIVE_SFT,
                      .ranks = ranks, .pipeline = pipeline, .offload = o->plan.offload,
                      .offload_dir = o->plan.offload_dir};
    return m;
}

// Completes the sizes and plans the memory; any failure here is a mistake in the flags.
static bool plan_model(Run* run, Options* o, Error* error) {
    Config* c = &run->record.config;
    size_t world = o->plan.show ? o->layout.ranks : run->comm.world;
    if (c->context == 0) c->context = o->seq;
    if (c->vocab == 0) c->vocab = (size_t)run->train.vocabulary;
    if (!config_complete(c, error)) return false;
    if (c->lora == 0 && (o->lora_dropout > 0 || o->optimizer.lora_plus != 1))
        return fail_with(error, "--lora-dropout and --lora-plus are for --lora; give it, or leave them out");
    if (!objective_check_pairs(&o->objective, c, run_continues_pairs(run), o->train, error)) return false;
    if (o->seq == 0) o->seq = c->context;
    if (!samples_pack(run, &o->samples, o->seq, error)) return false;
    if (!run_choose_layout(run, &o->layout, world, o->seq, o->sample_every > 0, error)) return false;
    uint64_t replicas = layout_replicas(&o->layout, world), tokens = o->batch * o->seq * replicas;
    if (!run_choose_batch(run, o->total_batch, tokens, error)) return false;
    if (!validation_overlap_check(&o->validation, o->seq, run->val.spans != NULL, error)) return false;
    o->plan.micro_batches = run->record.total_batch / tokens;
    if (!samples_count_steps(&o->schedule.steps, run, &o->samples, o->seq,
                             o->plan.micro_batches * o->batch * replicas, error)) return false;
    o->plan.snapshots = run_takes_snapshots(run);
    o->plan.tiers = o->run.ckpt_tiers.count;
    return model_plan(&run->model, c, model_options(run, o, world), error) && plan_fit(&run->model, &o->plan, error);
}

// Opens the data and plans the model: everything that a rank can do alone, before it allocates memory.
static bool run_prepare(Run* run, Options* o, Flags* flags, Error* error) {
    if (!run_open_data(run, o->data, o->val, error)) return false;
    if (!samples_choose(run, &o->samples, flags, error) ||
        !objective_check_data(&o->objective, &run->train, "--data", error) ||
        !objective_check_data(&o->objective, &run->val, "--val", error)) return fail_as(error, ERROR_USAGE);
    if (!run_choose_config(run, o->model, &o->config, flags, error)) return false;
    if (!plan_model(run, o, error)) return fail_as(error, ERROR_USAGE);
    if (o->data && !run_check_data(run, &run->train, "--data", o->seq, error)) return false;
    if (o->val && !run_check_data(run, &run->val, "--val", o->seq, error)) return false;
    if (run->model.memory.total >= ARENA_MAX)
        return fail_with(error, "the model needs more than %.0f GB; make --batch, --seq or the model smaller",
                         1e-9 * (double)ARENA_MAX);
    return o->plan.show || o->run.out == NULL || run->comm.rank > 0 || run_check_out(&o->run, error);
}

// Fills in what checkpoints record about the run.
static void record_fill(Run* run, const Options* o, const Flags* flags) {
    RunRecord* r = &run->record;
    r->optimizer = o->optimizer;
    if (!optimizer_has_rank(r->optimizer.kind)) r->optimizer.rank = 0;
    r->seed = o->seed;
    r->T = o->seq;
    r->data = dataset_fingerprint(&run->train);
    r->flags = flags;
}

// Everything before the first step. What one rank alone may find wrong is followed by run_agree: all ranks continue, or
// all fail with an error, since the next collective waits for every rank.
static bool run_set_up(Run* run, Options* o, Flags* flags, Error* error) {
    bool found, ok;  // found: a checkpoint to continue from
    Model* model = &run->model;
    // Before the first collective: a rank whose files or flags are wrong must not leave the others waiting in it.
    if (!run_agree(run, run_prepare(run, o, flags, error), error)) return false;
    run_print_model(run);
    if (o->plan.show) return plan_show(&run->model, &o->plan, error) && output_written(error);
    if (!run_compare_ranks(run, flags, error)) return false;
    record_fill(run, o, flags);
    // Memory may be short on one machine; model_connect is the first collective of the model.
    ok = model_allocate(model, error) && run_allocate(run, error) &&
         objective_open(&run->objective, &o->objective, model, &run->train, &run->val, o->seed, error);
    if (ok && o->sample_every) ok = sampler_open(&o->sampler, model, &run->tokenizer, error);
    if (!run_agree(run, ok, error) || !mesh_open(&run->mesh, &run->comm, &o->layout, model->config.tied, error) ||
        !model_connect(model, error)) return false;
    run_print_device(run, &o->peak_tflops);
    if (!run_compare_devices(run, error)) return false;
    model->dropout.p = (float)o->dropout;
    model->dropout.adapters = (float)o->lora_dropout;
    model->dropout.seed = o->seed;
    // The snapshot may not fit either; run_open_out loads a checkpoint, all ranks together.
    ok = saver_open(&run->saver, &model->flat, run_takes_snapshots(run), 1e6 * o->run.ckpt_bandwidth, error);
    if (!run_agree(run, ok, error) || !run_open_out(run, &found, error)) return false;
    run_print_notes(run, &o->schedule);
    // One rank may be unable to read its shards; the first step reduces gradients.
    ok = loader_open(&run->loader, &run->train, (int32_t)model->config.vocab, o->seed, model->flat.dp_rank,
                     model->flat.dp_world, o->batch, o->seq, error) &&
         loader_start(&run->loader, run->record.state.samples, error);
    if (!run_agree(run, ok, error)) return false;
    shard_check_begin(&run->check, &run->train, &run->val, model->config.vocab, run->comm.local_rank,
                      run->comm.local_world);
    cadence_start(&run->cadence, now_ms());
    return run_record_start(run, found, error);
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

// The next micro-batch of this rank: pipeline_step calls it. heartbeat_send() informs a supervisor (run/heartbeat.h);
// fault_*() do nothing outside of tests (base/fault.h).
static bool next_batch(void* source, const int32_t** tokens, const int32_t** targets, Error* error) {
    Run* run = (Run*)source;
    Model* model = &run->model;
    RunState* state = &run->record.state;
    size_t B = model->options.B, T = model->options.T;
    heartbeat_send(HEARTBEAT_STEP, state->step + 1);
    (void)error;  // step_read reports a batch that cannot be read
    run_read_batch(run);
    *tokens = run->tokens;
    *targets = run->targets;
    model->dropout.first_token = (state->samples + model->flat.dp_rank * B) * T;  // the same masks for any layout
    if (model->objective.refer) model->objective.refer(model->objective.context, run->tokens, run->targets, B);
    state->samples += B * model->flat.dp_world;
    return true;
}

static Due run_due(const Run* run, const Options* o, const StepFlags* flags) {
    uint64_t step = run->record.state.step;
    bool last = step == o->schedule.steps;
    Due due = {.stop = last || flags->stop, .signaled = flags->stop && !last};  // there may be time for the save alone
    due.validate = o->val && validation_due(&o->validation, step, o->schedule.steps);
    due.log = last || due.validate || step_every(step, o->log_every);
    due.sample = step_every(step, o->sample_every);
    due.save = run_save_due(run, step, due.stop, flags->save);
    return due;
}

// Logs a step, after adding to `s` what follows from the state.
static void write_log(Run* run, const Options* o, StepLog* s) {
    const RunState* state = &run->record.state;
    const Model* model = &run->model;
    double tokens = (double)(model->flat.micro_batches * o->batch * o->seq);  // of this rank
    double done = (double)(state->step - run->first_step), left = (double)(o->schedule.steps - state->step);
    s->step = state->step;
    s->steps = o->schedule.steps;
    s->tokens = state->samples * o->seq;
    s->epoch = samples_epochs(run, o->seq);
    s->skipped = state->step - state->updates;
    s->sent = flat_bytes_so_far(&model->flat) - s->sent_before;
    s->entropy_floor = run->val.entropy_floor;
    s->prefers = o->objective.kind != OBJECTIVE_SFT;
    s->objective = objective_log(o->objective.kind, s->result.flags.counted);
    s->mixture = mixture_count(&run->mixture, &run->train, o->seed, state->samples);
    s->tokens_per_second = 1e3 * tokens * (double)model->flat.dp_world / s->ms;
    s->mfu = NAN;
    double flops = model_flops_per_token(model, o->seq) * (double)model->flat.dp_world / (double)run->comm.world;
    if (o->peak_tflops > 0) s->mfu = 1e-9 * tokens * flops / (s->ms * o->peak_tflops);
    s->minutes_left = (now_ms() - run->began_ms) / 6e4 / done * left;
    s->memory = device_is_host() ? memory_peak() : arena_bytes(&model->memory);
    s->ranks = run->comm.world;
    run_log_step(run, s);
}

static bool sample(Run* run, Options* o, Error* error) {
    return run_agree(run, run->comm.rank > 0 || run_sample(run, &o->sampler, error), error);
}

// What is due after a step, in the order in which a kill or an error loses least: the log's line and the checkpoint
// come before a validation, which may take minutes.
static bool finish_step(Run* run, Options* o, StepLog* s, Due* due, Error* error) {
    if (due->log) write_log(run, o, s);
    if (due->save && !run_save(run, due->save, due->stop, due->signaled, error)) return false;
    bool good = !due->validate || due->signaled || run_validate(run, &o->validation, &s->val_loss, due, error);
    if (due->log) step_print(stdout, s);
    good = good && (!due->sample || due->signaled || sample(run, o, error));
    return good || run_save_whole(run, &run->record.state);
}

// The training loop, from state.step to --steps.
static bool run_train(Run* run, Options* o, Error* error) {
    Model* model = &run->model;
    RunState* state = &run->record.state;
    uint64_t steps = o->schedule.steps;
    Due due = {0};
    if (!run_catch_up(run, &o->validation, steps, &due, error)) return run_save_whole(run, state);
    run_begin_clock(run);
    while (!due.stop && state->step < steps) {
        StepLog s = step_begin(run);
        RunState before = *state;
        if (!pipeline_step(model, next_batch, run, state->loss_scale, o->plan.micro_batches, error)) return false;
        if (!step_read(run, &s, error)) return false;       // loss, norm and flags of all ranks
        if (s.result.flags.broken) return run_end_broken(run, s.result.flags.broken, &before, error);

        // --check-every: are the ranks still equal? The update would overwrite a wrong bit, or spread it.
        if (step_every(state->step + 1, o->run.check_every) && !run_compare(run, error)) return false;

        double factor;                                      // of the gradients: clipping
        s.lr = state->lr_factor * schedule_lr(&o->schedule, state->step);  // reduced after each rewind
        s.updated = guard_step(state, &factor, &o->run.guard, guarded_norm(&s.result));  // false: skip this step
        if (!run_trace(run, &s, factor, error)) return run_save_whole(run, &before);  // what is behind a spike?
        run_update(run, &s, factor);
        state_advance(state, s.updated);
        run_report_straggler(run, &s.result);
        if (run_diverged(run, &s.result)) {                 // not logged: back to a checkpoint, or the end
            if (!run_rewind(run, &s.result, error)) return false;
            if (!run_catch_up(run, &o->validation, steps, &due, error)) return run_save_whole(run, state);
            run_begin_clock(run);
            clock_start(&model->clock, &model->flat);
            continue;
        }

        due = run_due(run, o, &s.result.flags);
        step_end(run, &s, &due);
        if (!finish_step(run, o, &s, &due, error)) return false;
        if (due_pauses(&due)) clock_start(&model->clock, &model->flat);
    }
    return run_finish(run, due.signaled, error);
}

// ------------------------------------------------------------------------------------------------

// Reads the command line.
static bool options_parse(Options* o, Run* run, Flags* flags, int argc, char** argv, Error* error) {
    if (argc > 1 && strcmp(argv[1], "supervise") == 0)
        fail_with(error, "the supervisor is a separate program: ./supervise [FLAGS] -- ./train ...");
    else if (flags_parse(flags, argc, argv, error) &&
             cadence_parse(&run->cadence, o->run.ckpt_every, o->run.mtbf, o->run.ckpt_async, error) &&
             options_check(o, &run->cadence, error)) {
        o->optimizer.seed = o->sampler.options.seed = o->seed;
        return true;
    }
    return fail_as(error, ERROR_USAGE);
}

// Makes this process one rank of the run.
static bool join(Run* run, Options* o, Launch* launch, Flags* flags, Error* error) {
    bool forks = flag_was_given(flags, "ranks");
    if (o->plan.show) threads_choose(o->threads, 1, false, NULL);
    if (o->plan.show) return run_join_plan(launch, &o->layout.ranks, error);
    signal(SIGINT, interrupt);
    signal(SIGTERM, interrupt);
    signal(SIGUSR1, interrupt);
    if (o->run.out) signal(SIGPIPE, SIG_IGN);  // if the console goes away, the log has it all
    return run_join(run, launch, forks ? o->layout.ranks : 0, o->timeout, o->threads, error);
}

int main(int argc, char** argv) {
    Options options;
    Run run = {.options = &options.run, .interrupted = &interrupted};
    Flags flags = {.count = 0};
    Launch launch;
    Error error;
    threads_spin_briefly(argv);
    files_open_standard();
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    launch_alone(&launch);
    options_flags(&flags, &options);
    if (flags_want_help(argc, argv)) return flags_help("train", TITLE, &flags);
    bool ok = options_parse(&options, &run, &flags, argc, argv, &error);
    if (!ok) run_refuse(&run, &launch, options.timeout);  // joins only so that run_exit can tell the other ranks
    ok = ok && join(&run, &options, &launch, &flags, &error) && run_set_up(&run, &options, &flags, &error) &&
         (options.plan.show || run_train(&run, &options, &error));
    sampler_close(&options.sampler);
    return run_exit(&run, &launch, ok, &error, options.timeout);
}
