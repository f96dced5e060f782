// train.cu: the program. Flags, set-up, and the training loop from top to bottom.
//
//   cc -O3 -march=native -x c train.cu -o train -lm -pthread        (the Makefile adds OpenMP: all cores)
//   nvcc -O3 -std=c++17 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 train.cu -o train -lcublasLt        for a GPU
//
// Reads:  token shards (--data, --val), a checkpoint in --out (--resume, --prompt).
// Writes: --out/metrics.jsonl, a line per logged step; --out/step_N/, a checkpoint every --ckpt-every steps and at the
//         end. The console shows the same lines.
// Exit:   0 done; 1 something in the world was wrong (a file, memory, the disk, another rank), or Ctrl-C stopped the run,
//         which is saved then; 2 a flag was wrong; 75 SIGTERM or SIGUSR1 stopped the run, which is saved: start it again.
//
// Started by mpirun, torchrun or srun, or with --ranks N, there are N processes that train together; rank 0 speaks and
// writes, the others only say what went wrong.

#include "llmtrain/checkpoint.h"
#include "llmtrain.h"
#include "llmtrain/heartbeat.h"

#include <signal.h>

// ------------------------------------------------------------------------------------------------
// Flags

typedef struct {
    const char *model, *data, *val, *out, *prompt;
    bool resume, plan;
    Family family;
    uint64_t layers, heads, kv_heads, channels, ffn, context, vocab;
    bool tied;
    double rope_theta, dropout;
    uint64_t batch, seq, total_batch, seed, threads;
    Schedule schedule;
    OptimizerOptions optimizer;
    GuardOptions guard;
    double loss_scale;
    uint64_t diverged_after, rewind;
    double rewind_lr;
    bool master_weights, tf32;
    uint64_t val_every, val_windows, val_overlap, sample_every, log_every, tokens;
    const char *ckpt_every, *ckpt_hot_dir, *init_from;
    bool ckpt_async;
    uint64_t ckpt_keep, ckpt_keep_every, ckpt_hot;
    double ckpt_bandwidth, mtbf;
    SamplingOptions sampling;
    double peak_tflops;
    uint64_t ranks, zero, check_every, slow_steps;
    int reduce;
    double timeout, slow_factor, memory, bandwidth, compute_ms;
} Options;

enum { REDUCE_AUTO };  // the first of the choices; the others are ReduceKind + 1
#define REDUCE_CHOICES "auto|float|storage|exact"

static Options options_default(void) {
    Options o;
    memset(&o, 0, sizeof o);
    o.prompt = "\n";
    o.tied = o.master_weights = true;
    o.batch = 4;
    o.schedule.steps = 1000;
    o.seed = 1337;
    o.schedule.lr = 6e-4;
    o.schedule.warmup = 100;
    o.schedule.kind = SCHEDULE_COSINE;
    o.schedule.final_fraction = 0.1;
    o.schedule.decay_fraction = 0.2;
    o.schedule.decay_every = 1000;
    o.schedule.decay_factor = 0.5;
    o.optimizer.beta1 = 0.9;
    o.optimizer.beta2 = 0.95;
    o.optimizer.epsilon = 1e-8;
    o.optimizer.weight_decay = 0.1;
    o.guard.clip = 1;
    o.guard.spike_sigma = 4;
    o.guard.spike_skip = 20;
    o.guard.spike_warmup = 20;
    o.loss_scale = 65536;
    o.guard.scale_growth = 2000;
    o.diverged_after = 100;
    o.rewind_lr = 0.5;
    o.log_every = 1;
    o.ckpt_every = "0";
    o.ckpt_async = true;
    o.ckpt_hot_dir = "/dev/shm";
    o.mtbf = 24;
    o.tokens = 256;
    o.guard.dynamic_scale = FLOATX_DTYPE == DTYPE_F16;
    o.sampling.temperature = 0.8;
    o.sampling.top_p = 1;
    o.rope_theta = 10000;
    o.ranks = 1;
    o.timeout = 600;
    o.check_every = 100;
    o.slow_factor = 1.5;
    o.slow_steps = 10;
    return o;
}

#define HEADING(text) {NULL, FLAG_TEXT, NULL, NULL, 0, 0, text, false}
#define TEXT(name, member, what, help) {name, FLAG_TEXT, &o->member, what, 0, 0, help, false}
#define COUNT(name, member, low, high, help) {name, FLAG_COUNT, &o->member, "N", low, high, help, false}
#define REAL(name, member, low, high, help) {name, FLAG_REAL, &o->member, "X", low, high, help, false}
#define SWITCH(name, member, help) {name, FLAG_SWITCH, &o->member, "on|off", 0, 0, help, false}
#define CHOICE(name, member, choices, help) {name, FLAG_CHOICE, &o->member, choices, 0, 0, help, false}

static_assert(sizeof(Family) == sizeof(int) && sizeof(ScheduleKind) == sizeof(int) && sizeof(OptimizerKind) == sizeof(int),
              "flags.h writes choices as int");

enum { FLAGS_MAX = 100 };

// Fills flags with the table; returns the number of rows.
static size_t options_flags(Flag flags[FLAGS_MAX], Options* o) {
    const Flag table[] = {
        HEADING("What to do (with --data: train; without: continue --prompt with the model in --out)"),
        TEXT("data", data, "GLOB", "token shards to train on, e.g. 'data/x_train_*.bin'"),
        TEXT("val", val, "GLOB", "token shards to validate on"),
        TEXT("out", out, "DIR", "directory of the run: metrics.jsonl and checkpoints"),
        SWITCH("resume", resume, "continue the run in --out from its newest good checkpoint"),
        SWITCH("plan", plan, "print the memory plan and exit"),
        COUNT("seed", seed, 0, 9e15, "of initial weights, data order, dropout, sampling (below 2^53)"),
        COUNT("threads", threads, 0, 4096, "OpenMP threads; 0: as OpenMP decides"),
        HEADING("Model: a preset, and sizes that override it"),
        TEXT("model", model, "NAME", "gpt2:124M|350M|774M|1558M, gpt2:dN, llama:15M|42M|110M|1B|3B|8B"),
        CHOICE("family", family, FAMILY_NAMES, ""),
        COUNT("layers", layers, 1, 1000, "transformer blocks"),
        COUNT("heads", heads, 1, 1024, "query heads"),
        COUNT("kv-heads", kv_heads, 0, 1024, "key/value heads; 0: as many as --heads"),
        COUNT("channels", channels, 1, 65536, "width of the residual stream"),
        COUNT("ffn", ffn, 0, 1048576, "width of the feed-forward; 0: 4 (gpt2) or 8/3 (llama) times --channels"),
        COUNT("context", context, 0, 16777216, "longest sequence; 0: the preset's, or --seq"),
        COUNT("vocab", vocab, 0, 16777216, "vocabulary; 0: as the data says"),
        SWITCH("tied", tied, "the head is the token embedding"),
        REAL("rope-theta", rope_theta, 1, 1e9, "base of the rotary angles (llama)"),
        REAL("dropout", dropout, 0, 0.9, "of the embedding and of both branches of each block"),
        HEADING("Batches"),
        COUNT("batch", batch, 1, 65536, "sequences of a micro-batch"),
        COUNT("seq", seq, 0, 16777216, "tokens of a sequence; 0: the model's context"),
        COUNT("total-batch", total_batch, 0, 1e12,
              "tokens of a step of all ranks, by accumulation; 0: one micro-batch each"),
        COUNT("steps", schedule.steps, 0, 1e12, "steps of the run"),
        HEADING("Optimizer"),
        CHOICE("optimizer", optimizer.kind, optimizer_names(), ""),
        REAL("lr", schedule.lr, 0, 100, "highest learning rate"),
        REAL("beta1", optimizer.beta1, 0, 0.99999, "decay of the running mean; momentum of sgd with momentum"),
        REAL("beta2", optimizer.beta2, 0, 0.99999, "decay of the running mean of squares (adamw), of the momentum (lion)"),
        REAL("epsilon", optimizer.epsilon, 1e-15, 1, "adamw"),
        REAL("weight-decay", optimizer.weight_decay, 0, 10, "decoupled, on matrices only"),
        SWITCH("masters", master_weights, "16-bit builds: float copies of the weights; off: stochastic rounding"),
        SWITCH("tf32", tf32, "fp32 builds on a GPU: products may round their operands to 10 bits of fraction"),
        HEADING("Schedule"),
        CHOICE("schedule", schedule.kind, SCHEDULE_NAMES, ""),
        COUNT("warmup", schedule.warmup, 0, 1e12, "steps in which the rate rises to --lr"),
        REAL("lr-final", schedule.final_fraction, 0, 1, "the last rate, as a fraction of --lr (linear, cosine, wsd, exponential)"),
        REAL("wsd-fraction", schedule.decay_fraction, 0.0001, 1, "part of the run at its end in which wsd falls"),
        COUNT("decay-every", schedule.decay_every, 1, 1e12, "steps between two falls (step)"),
        REAL("decay-factor", schedule.decay_factor, 0, 1, "factor of a fall (step)"),
        HEADING("Guards"),
        REAL("clip", guard.clip, 0, 1e9, "largest norm of the gradient; 0: no clipping at all"),
        REAL("spike-sigma", guard.spike_sigma, 0, 1e9,
             "norms up to mean + X deviations are not clipped; 0: --clip alone decides"),
        REAL("spike-skip", guard.spike_skip, 0, 1e9, "a step whose norm is over X means is skipped; 0: never"),
        COUNT("spike-warmup", guard.spike_warmup, 1, 1e9, "steps seen before the two rules above hold"),
        REAL("loss-scale", loss_scale, 1, 16777216, "first loss scale (fp16 builds)"),
        COUNT("scale-growth", guard.scale_growth, 1, 1e9, "good steps after which the loss scale doubles (fp16 builds)"),
        COUNT("diverged-after", diverged_after, 1, 1e9,
              "skipped steps in a row after which the run has diverged, and ends"),
        COUNT("rewind", rewind, 0, 1e9,
              "when it has diverged, or a loss is not finite: back to a checkpoint, and on with other data; N times at most"),
        REAL("rewind-lr", rewind_lr, 0.0001, 1, "factor of the learning rate at each rewind"),
        HEADING("Ranks: processes that train together"),
        COUNT("ranks", ranks, 1, 65536,
              "start so many here, where no launcher (mpirun, torchrun, srun) does; with --plan: plan for so many"),
        COUNT("zero", zero, 0, 2, "what they share out: 0 nothing, 1 masters and moments, 2 gradients too"),
        CHOICE("reduce", reduce, REDUCE_CHOICES,
               "gradients are summed as float, storage type, or exact (same bits for every --zero); auto: exact among ranks"),
        REAL("timeout", timeout, 1, 1e6, "seconds without an answer after which a rank is given up"),
        COUNT("check-every", check_every, 0, 1e12,
              "steps between two comparisons of the ranks' parameters, and of what they compute with them; 0: never"),
        REAL("slow-factor", slow_factor, 1, 1e6, "a rank that needs X times the median is slow"),
        COUNT("slow-steps", slow_steps, 1, 1e9, "a rank is named after so many slow steps in a row"),
        REAL("memory", memory, 0, 1e6, "with --plan: GB of a rank; says which --zero fits"),
        REAL("bandwidth", bandwidth, 0, 1e6,
             "with --plan: GB/s that a rank sends; says what that makes of the step's time"),
        REAL("compute-ms", compute_ms, 0, 1e9, "with --bandwidth: time of a micro-batch without others, as measured"),
        HEADING("Watching and saving"),
        COUNT("log-every", log_every, 1, 1e12, "steps between two lines"),
        COUNT("val-every", val_every, 0, 1e12, "steps between two validations; 0: at the end only"),
        COUNT("val-windows", val_windows, 0, 1e12, "sequences to validate on; 0: all"),
        COUNT("val-overlap", val_overlap, 0, 1e7, "tokens that a sequence shares with the one before, as context alone"),
        COUNT("sample-every", sample_every, 0, 1e12, "steps between two samples; 0: none"),
        HEADING("Checkpoints"),
        TEXT("ckpt-every", ckpt_every, "N|Nmin|auto",
             "save so often that no more steps or minutes are lost; auto: as --mtbf says; 0: at the end only"),
        SWITCH("ckpt-async", ckpt_async, "write while training goes on, from a copy in memory; then saves begin twice as often"),
        REAL("ckpt-bandwidth", ckpt_bandwidth, 0, 1e6,
             "MB/s that writing beside training takes of the disk at most; 0: all"),
        COUNT("ckpt-keep", ckpt_keep, 0, 1e9, "keep so many of the newest; 0: all"),
        COUNT("ckpt-keep-every", ckpt_keep_every, 0, 1e12, "keep for ever the first from each multiple of N steps on; 0: none"),
        COUNT("ckpt-hot", ckpt_hot, 0, 1e12,
              "steps between two copies in memory, which outlive the process and not the machine; 0: none"),
        TEXT("ckpt-hot-dir", ckpt_hot_dir, "DIR",
             "where the copies in memory go, in a directory llmtrain-HASH, of the path of --out"),
        REAL("mtbf", mtbf, 0.001, 1e6, "hours between two failures; auto saves every sqrt(2 x cost of a save x these)"),
        TEXT("init-from", init_from, "DIR",
             "begin with the weights of this checkpoint (a step_N), unless --resume finds one in --out"),
        REAL("peak-tflops", peak_tflops, 0, 1e6,
             "peak of this machine, against which mfu is given; 0: as known of the GPU, or n/a"),
        HEADING("Sampling"),
        TEXT("prompt", prompt, "TEXT", "what to continue; default: a line break"),
        COUNT("tokens", tokens, 1, 1e9, "tokens to write"),
        REAL("temperature", sampling.temperature, 0, 100, "0: always the likeliest token"),
        COUNT("top-k", sampling.top_k, 0, 1e9, "choose among the N likeliest; 0: all"),
        REAL("top-p", sampling.top_p, 0, 1, "choose among the likeliest that reach probability X"),
    };
    static_assert(sizeof table <= FLAGS_MAX * sizeof(Flag), "make FLAGS_MAX larger");
    memcpy(flags, table, sizeof table);
    return sizeof table / sizeof table[0];
}

// ------------------------------------------------------------------------------------------------
// Set-up

// Of a step, on each of `world` ranks.
static uint64_t options_micro_batches(const Options* o, size_t world) {
    return o->total_batch ? o->total_batch / (o->batch * o->seq * world) : 1;
}

// Everything a run holds.
typedef struct {
    Options options;
    RunRecord record;         // configuration and state: what a checkpoint says
    Model model;
    Dataset train, val;
    Loader loader;
    Tokenizer tokenizer;
    Log log;
    int32_t *tokens, *targets;    // (batch, seq): a micro-batch
    int32_t* text;                // (text_size): prompt and what follows
    size_t text_size;
    Candidate* candidates;        // (V)
    double peak_tflops;           // against which mfu is given; 0: unknown
    bool stopped;                 // by a signal, and saved
    bool wrong_flags;             // the failure is of the flags, not of the world: exit with 2
    Saver saver;
    Pruner pruner;
    Cadence cadence;
    bool same_devices;            // of all ranks: their forwards can be compared
    bool events_refused;          // events.jsonl cannot be written, and it was said
    char hot[FILE_PATH_MAX];      // where copies in memory go; empty: nowhere
    Comm comm;
    uint64_t slow_rank, slow_count;  // the slowest rank, and for how many steps it was slow
} Run;

// Whether all went well on all ranks; otherwise all have the same error. A failure must come through here before the
// next collective, or else end the rank, which then tells the others (main).
static bool run_agree(Run* run, bool good, Error* error) {
    if (run->comm.world <= 1) return good;
    comm_extend_timeout(&run->comm, true);
    bool all = comm_agree_all(&run->comm, good, error);
    comm_extend_timeout(&run->comm, false);
    return all;
}

// A line of events.jsonl in --out, from rank 0 once it has that for itself. A disk that refuses it does not end the run.
__attribute__((format(printf, 4, 5))) static void run_event(Run* run, const char* event, uint64_t step, const char* format,
                                                            ...) {
    char detail[sizeof(Error)];
    Error error;
    va_list arguments;
    if (run->log.file == NULL) return;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    bool good = event_write(run->options.out, event, step, detail, &error);
    if (!good && !run->events_refused) fprintf(stderr, "train: %s. Training goes on\n", error.text);
    run->events_refused = !good;
}

// The same, and on the console.
__attribute__((format(printf, 4, 5))) static void run_tell(Run* run, const char* event, uint64_t step, const char* format,
                                                           ...) {
    char sentence[sizeof(Error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    printf("%s\n", sentence);
    fflush(stdout);
    run_event(run, event, step, "%s", sentence);
}

static void run_free(Run* run) {
    log_close(&run->log);
    collective_close(&run->model.flat.collectives);
    if (run->comm.world > 0) comm_close(&run->comm);
    saver_close(&run->saver);
    pruner_await(&run->pruner);
    loader_close(&run->loader);
    dataset_close(&run->train);
    dataset_close(&run->val);
    model_free(&run->model);
    free(run->tokens);
    free(run->targets);
    free(run->text);
    free(run->candidates);
}

// The configuration that flags and data ask for.
static bool run_configure(Config* c, const Options* o, const Dataset* data, Flag* flags, size_t flag_count, Error* error) {
    memset(c, 0, sizeof *c);
    c->tied = o->tied;
    if (o->model && !config_preset(c, o->model, error)) return false;
    if (flag_was_given(flags, flag_count, "family")) c->family = o->family;
    if (flag_was_given(flags, flag_count, "tied")) c->tied = o->tied;
    if (flag_was_given(flags, flag_count, "rope-theta")) c->rope_theta = o->rope_theta;
    bool resized = o->heads != 0 || o->channels != 0;  // a preset's kv_heads and ffn go with its heads and channels
    if (o->layers) c->layers = o->layers;
    if (o->heads) c->heads = o->heads;
    if (o->channels) c->channels = o->channels;
    if (o->kv_heads || resized) c->kv_heads = o->kv_heads;
    if (o->ffn || resized) c->ffn = o->ffn;
    if (o->context) c->context = o->context;
    if (c->context == 0) c->context = o->seq;
    if (o->vocab) c->vocab = o->vocab;
    if (c->vocab == 0) c->vocab = (size_t)data->vocabulary;
    return config_complete(c, error);
}

static bool run_check_vocabulary(const Config* c, const Dataset* data, const char* flag, Error* error) {
    if (data->vocabulary == 0 || (size_t)data->vocabulary == c->vocab) return true;
    return fail(error,
                "%s has a vocabulary of %d but the model has %zu; give --vocab %d, or shards of the model's tokenizer",
                flag, data->vocabulary, c->vocab, data->vocabulary);
}

static ModelOptions run_model_options(Run* run, bool training) {
    const Options* o = &run->options;
    ModelOptions m;
    memset(&m, 0, sizeof m);
    m.B = training ? o->batch : 1;
    m.T = training ? o->seq : 1;
    m.training = training;
    m.optimizer = o->optimizer.kind;
    m.master_weights = o->master_weights;
    m.sampling = !training || o->sample_every > 0;
    m.tf32 = o->tf32;
    if (!training) return m;
    m.ranks.comm = o->plan ? NULL : &run->comm;
    m.ranks.rank = run->comm.rank;
    m.ranks.local_rank = run->comm.local_rank;
    m.ranks.world = o->plan ? o->ranks : run->comm.world;
    m.ranks.stage = o->zero;
    m.ranks.reduce = m.ranks.world > 1 ? REDUCE_EXACT : REDUCE_FLOAT;
    if (o->reduce != REDUCE_AUTO) m.ranks.reduce = (ReduceKind)(o->reduce - 1);
    return m;
}

// Text is read and written as bytes.
static bool run_check_prompt(const Config* c, Error* error) {
    size_t bytes = (size_t)tokenizer_of_bytes().vocabulary;
    if (bytes == c->vocab) return true;
    return fail(error,
                "the model's vocabulary is %zu, but text is read and written as bytes, of which there are %zu; sample "
                "from a model of bytes",
                c->vocab, bytes);
}

// Whether the run takes snapshots: only one that saves before its end has something to save beside training.
static bool run_takes_snapshots(const Run* run) {
    const Options* o = &run->options;
    return o->out && run->cadence.beside && (cadence_saves(&run->cadence) || o->ckpt_hot);
}

// Bytes of the process beside the model's block, if the model is this one.
static size_t run_bytes_beside(const Run* run, const Model* model) {
    size_t B = model->options.B, T = model->options.T;
    return (run_takes_snapshots(run) ? checkpoint_bytes(model) : 0) + loader_bytes(B, T) + 2 * B * T * sizeof(int32_t) +
        (device_is_host() ? gemm_workspace_bytes((int)threads_count()) : 0);
}

// Which stages fit the memory of a rank, and what each sends; also with gradients that are summed in other ways.
static bool run_print_stages(const Run* run, size_t micro_batches, Error* error) {
    const Options* o = &run->options;
    char fits[64] = "";
    printf("\n  %-10s %-10s %14s %22s\n", "--zero", "--reduce", "MB of a rank", "MB sent by it, a step");
    for (size_t i = 0; i < 6; i++) {
        Model model;
        ModelOptions options = run->model.options;
        options.ranks.stage = i / 2;
        options.ranks.reduce = i % 2 ? REDUCE_FLOAT : REDUCE_EXACT;
        if (!model_plan(&model, &run->model.config, options, error)) return false;
        size_t bytes = model.memory.total + run_bytes_beside(run, &model) + comm_bytes(options.ranks.world);
        const char* reduce = i % 2 ? "float" : "exact";
        printf("  %-10zu %-10s %14.2f %22.2f\n", i / 2, reduce, 1e-6 * (double)bytes,
               1e-6 * (double)flat_bytes_sent(&model.flat, micro_batches));
        if (fits[0] == 0 && 1e-9 * (double)bytes <= o->memory)
            snprintf(fits, sizeof fits, "--zero %zu --reduce %s", i / 2, reduce);
        model_free(&model);
    }
    if (!device_is_host()) printf("  A GPU's driver and NCCL take some hundred MB beside that, which are not counted.\n");
    if (o->memory > 0 && fits[0]) printf("  %s is the smallest stage that fits %g GB\n", fits, o->memory);
    if (o->memory > 0 && fits[0] == 0)
        printf("  no stage fits %g GB; more --ranks, or a smaller --batch or --seq\n", o->memory);
    return true;
}

// The time of a step against the number of ranks, if every rank keeps its micro-batches. Assumed: a rank sends and receives
// --bandwidth at once, whatever the others do, and messages take no time of their own; a forward is a third of
// --compute-ms, a backward two thirds, and every bucket's share of them that of its bytes; the update takes no time. A
// bucket's sum leaves when its backward is done, that of the embeddings at the very end; parameters come back under the
// next forward.
static bool run_print_scaling(const Run* run, size_t micro_batches, Error* error) {
    const Options* o = &run->options;
    double M = (double)micro_batches, compute = M * o->compute_ms, forward = o->compute_ms / 3;
    if (o->bandwidth == 0 || o->compute_ms == 0) return true;
    printf("\n  %-10s %10s %12s %12s %12s   (%zu micro-batches of %g ms, %g GB/s)\n", "ranks", "ms a step", "hidden",
           "tokens/s", "efficiency", micro_batches, o->compute_ms, o->bandwidth);
    for (size_t last = max_size(o->ranks, 1), world = 1; world <= last;
         world = world < last ? min_size(2 * world, last) : last + 1) {
        Model model;
        ModelOptions options = run->model.options;
        options.ranks.world = world;
        if (!model_plan(&model, &run->model.config, options, error)) return false;
        // Milliseconds: gathering parameters, summing gradients once, and of those the embeddings, which nothing follows.
        double per_byte = 1e-6 / o->bandwidth, gather = per_byte * (double)flat_bytes_gathered(&model.flat);
        double ends = per_byte * (double)flat_bytes_summed(&model.flat, 0, 1);
        double all = per_byte * (double)flat_bytes_summed(&model.flat, 0, model.flat.count);
        double sums = options.ranks.stage == 2 ? M * all - ends : all - ends;
        double under = options.ranks.stage == 2 ? compute - forward : 2 * forward;
        double exposed = fmax(0, sums - under) + ends + fmax(0, gather - forward), total = sums + ends + gather;
        double step = compute + exposed, tokens = M * (double)(o->batch * o->seq * world);
        printf("  %-10zu %10.1f %11.0f%% %12.0f %11.0f%%\n", world, step, total > 0 ? 100 * (1 - exposed / total) : 100,
               1e3 * tokens / step, 100 * compute / step);
        model_free(&model);
    }
    return true;
}

static bool run_print_plan(const Run* run, Error* error) {
    const Options* o = &run->options;
    const RankOptions* ranks = &run->model.flat.options;
    size_t B = o->batch, T = o->seq, micro_batches = options_micro_batches(o, ranks->world);
    const char* const sums[] = {"fp32", FLOATX_NAME, "64-bit fixed point"};  // by ReduceKind
    if (ranks->world > 1)
        printf("rank 0 of %zu, --zero %zu, gradients summed as %s\n", ranks->world, ranks->stage, sums[ranks->reduce]);
    plan_print(stdout, &run->model.memory);
    printf("  %-34s %12.2f\n", "beside it: batches", 1e-6 * (double)(loader_bytes(B, T) + 2 * B * T * sizeof(int32_t)));
    if (run_takes_snapshots(run))
        printf("  %-34s %12.2f\n", "beside it: snapshot", 1e-6 * (double)checkpoint_bytes(&run->model));
    if (o->ckpt_hot)  // two that are kept, and one that is being written
        printf("  %-34s %12.2f\n", "in --ckpt-hot-dir: three copies", 3e-6 * (double)checkpoint_bytes(&run->model));
    if (device_is_host())
        printf("  %-34s %12.2f\n", "beside it: matrix products", 1e-6 * (double)gemm_workspace_bytes((int)threads_count()));
    if (ranks->world == 1) return true;
    printf("  %-34s %12.2f\n", "beside it: messages", 1e-6 * (double)comm_bytes(ranks->world));
    return run_print_stages(run, micro_batches, error) && run_print_scaling(run, micro_batches, error);
}

// What is about to be trained. The device is described once it is open.
static void run_print(const Run* run) {
    const Config* c = &run->model.config;
    char family[16];
    choice_name(FAMILY_NAMES, (int)c->family, family, sizeof family);
    printf("%s: %zu layers, %zu heads, %zu key/value heads, %zu channels, ffn %zu, context %zu, ", family, c->layers,
           c->heads, c->kv_heads, c->channels, c->ffn, c->context);
    printf("vocabulary %zu, %s: %zu parameters\n", c->vocab, c->tied ? "tied head" : "untied head",
           run->model.parameters.true_size);
    fflush(stdout);
}

// Names the device, and the peak against which mfu is given: what --peak-tflops says, or what is known of the device.
static void run_print_device(Run* run) {
    char text[320];
    device_describe(text, sizeof text, &run->peak_tflops, run->model.stream);
    const char* known = run->options.peak_tflops > 0 ? " (--peak-tflops)" : "";
    if (run->options.peak_tflops > 0) run->peak_tflops = run->options.peak_tflops;
    printf("precision %s, matrix products by %s", FLOATX_NAME, text);
    if (run->peak_tflops > 0) printf(", mfu against %g TFLOP/s%s", run->peak_tflops, known);
    printf("\n");
    fflush(stdout);
}

// Buffers of the program itself.
static bool run_allocate(Run* run, Error* error) {
    size_t N = run->model.options.B * run->model.options.T;
    run->tokenizer = tokenizer_of_bytes();
    run->text_size = strlen(run->options.prompt) + run->options.tokens;
    run->tokens = (int32_t*)allocate(N * sizeof(int32_t));
    run->targets = (int32_t*)allocate(N * sizeof(int32_t));
    run->text = (int32_t*)allocate(run->text_size * sizeof(int32_t));
    run->candidates = (Candidate*)allocate(run->model.config.vocab * sizeof(Candidate));
    if (run->tokens && run->targets && run->text && run->candidates) return true;
    return fail(error, "out of memory for %zu tokens of text; make --tokens smaller", run->text_size);
}

// What a checkpoint says of a flag, and what is asked for.
typedef struct {
    const char* name;
    double saved, asked;
    const char* words;  // for them; NULL: numbers
} Fact;

// Refuses a checkpoint, which a flag has named, that differs in one of the facts.
static bool facts_agree(const Fact* facts, size_t count, const char* flag, const char* path, Error* error) {
    for (size_t i = 0; i < count; i++) {
        double values[2] = {facts[i].saved, facts[i].asked};
        char texts[2][32];
        if (values[0] == values[1]) continue;
        for (int k = 0; k < 2; k++) {
            if (facts[i].words) choice_name(facts[i].words, (int)values[k], texts[k], sizeof texts[k]);
            else snprintf(texts[k], sizeof texts[k], "%.16g", values[k]);
        }
        return fail(error, "%s is of another run: there %s is %s, here it is %s; give the same flags, or another %s", path,
                    facts[i].name, texts[0], texts[1], flag);
    }
    return true;
}

// Refuses the weights of another model. A llama of another --context is the same.
static bool config_agrees(const Config* s, const Config* a, const char* flag, const char* path, Error* error) {
    const Fact facts[] = {
        {"--family", (double)s->family, (double)a->family, FAMILY_NAMES},
        {"--layers", (double)s->layers, (double)a->layers, NULL},
        {"--heads", (double)s->heads, (double)a->heads, NULL},
        {"--kv-heads", (double)s->kv_heads, (double)a->kv_heads, NULL},
        {"--channels", (double)s->channels, (double)a->channels, NULL},
        {"--ffn", (double)s->ffn, (double)a->ffn, NULL},
        {"--vocab", (double)s->vocab, (double)a->vocab, NULL},
        {"--tied", (double)s->tied, (double)a->tied, "off|on"},
        {"--rope-theta", s->rope_theta, a->rope_theta, NULL},
    };
    return facts_agree(facts, sizeof facts / sizeof facts[0], flag, path, error);
}

// Refuses a checkpoint that is of another run than the flags and the data describe.
static bool resume_agrees(const RunRecord* saved, const RunRecord* asked, const char* path, Error* error) {
    const Fact facts[] = {
        {"--context", (double)saved->config.context, (double)asked->config.context, NULL},
        {"--optimizer", (double)saved->optimizer, (double)asked->optimizer, optimizer_names()},
        {"--seed", (double)saved->seed, (double)asked->seed, NULL},
        {"--masters", (double)saved->master_weights, (double)asked->master_weights, "off|on"},
        {"--seq", (double)saved->T, (double)asked->T, NULL},
    };
    if (saved->data != asked->data)
        return fail(error, "%s is of a run on other data than --data names; give the same shards, or another --out", path);
    return config_agrees(&saved->config, &asked->config, "--out", path, error) &&
           facts_agree(facts, sizeof facts / sizeof facts[0], "--out", path, error);
}

// Says which flags of the saved run have another value now.
static void resume_compare_flags(const RunRecord* asked, const Json* manifest) {
    uint32_t flags = json_get(manifest, 0, "flags");
    char precision[16];
    if (json_string(manifest, json_get(manifest, 0, "precision"), precision, sizeof precision) &&
        strcmp(precision, FLOATX_NAME) != 0)
        printf("note: that run was in %s, this program is in %s: the bits will differ\n", precision, FLOATX_NAME);
    for (size_t i = 0; i < asked->flag_count; i++) {
        const Flag* flag = &asked->flags[i];
        char saved[FILE_PATH_MAX], now[FILE_PATH_MAX];
        if (flag->name == NULL || !json_string(manifest, json_get(manifest, flags, flag->name), saved, sizeof saved))
            continue;
        flag_text(now, sizeof now, flag);
        if (strcmp(saved, now) != 0) printf("note: --%s was '%s' in that run and is '%s' now\n", flag->name, saved, now);
    }
}

#define STEP_MAX ((uint64_t)1 << 61)  // no run has so many; twice as many still fit 64 bits

// Checkpoints are tried in the falling order of their keys: 2N for step N in --out, 2N + 1 for its copy in memory. The next
// below *key, as rank 0 sees it. asked: see run_load.
static bool run_checkpoint_before(Run* run, uint64_t* key, bool asked, bool* found, Error* error) {
    uint64_t step = 0, hot = 0;
    int64_t numbers[2] = {0, 0};
    bool hot_found = false, good = true;
    RunRecord saved;
    *found = false;
    if (run->comm.rank == 0) {
        step = *key / 2 + *key % 2;  // 2N < *key just if N is below this
        do good = checkpoint_find_before(&step, found, run->options.out, step, error);
        while (good && *found && asked && checkpoint_describe(&saved, run->options.out, step) && saved.kind != SAVE_ASKED);
        if (good && !asked && run->hot[0]) good = checkpoint_find_before(&hot, &hot_found, run->hot, *key / 2, error);
    }
    if (!run_agree(run, good, error)) return false;
    *key = hot_found && (!*found || hot >= step) ? 2 * hot + 1 : 2 * step;
    *found |= hot_found;
    if (run->comm.world <= 1) return true;
    numbers[0] = *found;
    numbers[1] = (int64_t)*key;
    if (!comm_broadcast(&run->comm, numbers, 2, COMM_INT64, 0, error)) return false;
    *found = numbers[0] != 0;
    *key = (uint64_t)numbers[1];
    return true;
}

// Loads the newest checkpoint of --out of a step below `before` that is good for all ranks; *found tells whether there was
// any. asked: only of those that --ckpt-every asked for, and no copies in memory. A model that was not planned yet, for
// sampling, takes its configuration from there.
static bool run_load(Run* run, uint64_t before, bool asked, bool* found, Error* error) {
    bool training = run->model.options.training, more;
    uint64_t key = 2 * before;
    *found = false;
    for (;;) {
        double began = now_ms();
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord saved;
        if (!run_checkpoint_before(run, &key, asked, &more, error)) return false;
        if (!more) break;
        *found = true;
        checkpoint_path(path, key % 2 ? run->hot : run->options.out, key / 2, "");
        bool good = manifest_open(&manifest, &saved, path, error), fits = true;
        if (good && training) fits = resume_agrees(&saved, &run->record, path, error);
        else if (good && run->model.memory.base == NULL)
            fits = model_create(&run->model, &saved.config, run_model_options(run, false), error);
        if (good && fits) good = checkpoint_load(&run->model, &manifest, path, false, error);
        if (!good && error->elsewhere) fits = false;  // no reason to go back to an older one
        Error fault;
        bool all = run_agree(run, fits, error), usable = all && run_agree(run, good, error);
        if (usable && training) {
            printf("resumed from %s in %.0f ms\n", path, now_ms() - began);
            if (!asked) resume_compare_flags(&run->record, &manifest);
            run->record.state = saved.state;
            // A loss scale belongs to FP16: the checkpoint may come from another build.
            if (FLOATX_DTYPE != DTYPE_F16) run->record.state.loss_scale = 1;
            else if (saved.state.loss_scale == 1) run->record.state.loss_scale = run->options.loss_scale;
        }
        json_free(&manifest);
        if (!all || usable) return usable;
        if (run->comm.world > 1 && comm_failed(&run->comm, &fault)) return false;
        if (run->comm.rank == 0) fprintf(stderr, "train: %s; trying the checkpoint before it\n", error->text);
        run_event(run, "damaged", key / 2, "%s", error->text);
    }
    if (!*found) return true;
    return run_agree(run, fail(error,
                               "no checkpoint in %s can be used; what is wrong with each stands above. Start anew with "
                               "another --out",
                               run->options.out), error);
}

// A directory that holds a run is only touched with --resume.
static bool run_check_out(const Options* o, Error* error) {
    char log[FILE_PATH_MAX + 32];
    struct stat status;
    uint64_t newest = 0;
    bool found;
    if (o->resume) return true;
    if (!checkpoint_find_before(&newest, &found, o->out, UINT64_MAX, error)) return false;
    if (found)
        return fail(error, "%s holds a run that reached step %llu; add --resume to continue it, or give another --out",
                    o->out, (unsigned long long)newest);
    log_path(log, sizeof log, o->out);
    if (stat(log, &status) == 0 && status.st_size > 0)
        return fail(error, "%s exists; add --resume to begin that run again, or give another --out", log);
    return true;
}

// Flags in which ranks may differ.
#define OWN_FLAGS "threads|prompt|peak-tflops"

// The next line of a text, without its end; NULL after the last.
static const char* next_line(char line[FILE_PATH_MAX], const char* text) {
    size_t length = strcspn(text, "\n");
    if (*text == 0) return NULL;
    snprintf(line, FILE_PATH_MAX, "%.*s", (int)length, text);
    return text + length + (text[length] == '\n');
}

// What all ranks must agree in: a name and a value a line. To be freed; NULL where there is no memory.
static char* run_identity(const Run* run, const Flag* flags, size_t flag_count) {
    char value[FILE_PATH_MAX], *text = NULL;
    size_t bytes = 0;
    FILE* memory = open_memstream(&text, &bytes);
    if (memory == NULL) return NULL;
    fprintf(memory, "the program\tllmtrain " LLMTRAIN_VERSION " " FLOATX_NAME "\n");
    for (size_t i = 0; i < flag_count; i++) {
        if (flags[i].name == NULL || choice_find(OWN_FLAGS, flags[i].name) >= 0) continue;
        flag_text(value, sizeof value, &flags[i]);
        fprintf(memory, "--%s\t%.1000s\n", flags[i].name, value);
    }
    fprintf(memory, "the shards of --data\t%016llx\n", (unsigned long long)dataset_fingerprint(&run->train));
    fprintf(memory, "the shards of --val\t%016llx\n", (unsigned long long)dataset_fingerprint(&run->val));
    if (fclose(memory) == 0) return text;
    free(text);
    return NULL;
}

// Names everything in which another rank differs from rank 0; false if nothing does.
static bool identities_differ(Error* error, const char* zero, const char* other, size_t rank) {
    char lines[2][FILE_PATH_MAX];
    size_t used = 0;
    while ((zero = next_line(lines[0], zero)) && (other = next_line(lines[1], other))) {
        if (strcmp(lines[0], lines[1]) == 0) continue;
        size_t name = strcspn(lines[0], "\t"), value = min_size(name + 1, strlen(lines[1]));
        if (used == 0)
            used = (size_t)snprintf(error->text, sizeof error->text,
                                    "start all ranks with the same flags and data; rank %zu differs from rank 0 in", rank);
        else used += (size_t)snprintf(error->text + used, sizeof error->text - used, ",");
        if (used < sizeof error->text)
            used += (size_t)snprintf(error->text + used, sizeof error->text - used, " %.*s ('%.200s', not '%.200s')",
                                     (int)name, lines[0], lines[1] + value, lines[0] + name + 1);
        if (used >= sizeof error->text) break;
    }
    return used > 0;
}

// Whether all ranks were started with the same program, flags and data.
static bool run_compare_ranks(Run* run, const Flag* flags, size_t flag_count, Error* error) {
    if (run->comm.world <= 1) return true;
    char *mine = run_identity(run, flags, flag_count), *texts = NULL;
    size_t* begins = NULL;
    if (mine == NULL) return fail(error, "out of memory for the flags of %zu ranks", run->comm.world);
    bool good = comm_gather_texts(&run->comm, &texts, &begins, mine, error), same = good;
    for (size_t r = 1; same && r < run->comm.world; r++) same = !identities_differ(error, texts, texts + begins[r], r);
    free(mine);
    free(texts);
    free(begins);
    return good && run_agree(run, same, error);
}

// Whether all ranks compute with the same code on the same kind of device, and so to the same bits.
static bool run_compare_devices(Run* run, Error* error) {
    char own[512], device[320], *texts = NULL;
    double peak;
    size_t* begins = NULL;
    if (run->comm.world <= 1) return true;
    device_describe(device, sizeof device, &peak, run->model.stream);
    snprintf(own, sizeof own, "%s, compiled by %.150s", device, __VERSION__);
    if (!comm_gather_texts(&run->comm, &texts, &begins, own, error)) return false;
    run->same_devices = true;
    for (size_t r = 1; r < run->comm.world; r++) run->same_devices &= strcmp(texts, texts + begins[r]) == 0;
    free(texts);
    free(begins);
    if (run->options.check_every && !run->same_devices)
        printf("note: ranks compute with different devices or compilers; what they compute is not compared\n");
    return true;
}

// Opens the data and plans the model: all that a rank can do alone, and without memory.
static bool run_prepare(Run* run, Flag* flags, size_t flag_count, Error* error) {
    Options* o = &run->options;
    Config config;
    size_t world = o->plan ? o->ranks : run->comm.world;
    if (o->data && !dataset_open(&run->train, o->data, error)) return false;
    if (o->val && !dataset_open(&run->val, o->val, error)) return false;
    run->wrong_flags = true;  // whatever fails from here until the flags are known to fit together
    if (!run_configure(&config, o, &run->train, flags, flag_count, error)) return false;
    if (o->seq == 0) o->seq = config.context;
    if (o->total_batch % (o->batch * o->seq * world) != 0)
        return fail(error, "--total-batch %llu is not a multiple of --batch times --seq%s, %llu; choose one that is",
                    (unsigned long long)o->total_batch, world > 1 ? " times the ranks" : "",
                    (unsigned long long)(o->batch * o->seq * world));
    if (o->val_overlap >= o->seq)
        return fail(error, "--val-overlap %llu leaves nothing new in sequences of %llu; make it smaller than --seq",
                    (unsigned long long)o->val_overlap, (unsigned long long)o->seq);
    if (!model_plan(&run->model, &config, run_model_options(run, true), error)) return false;
    run->wrong_flags = false;
    if (o->data && !run_check_vocabulary(&config, &run->train, "--data", error)) return false;
    if (o->val && !run_check_vocabulary(&config, &run->val, "--val", error)) return false;
    if (o->data && !dataset_suffices(&run->train, o->seq, error)) return false;
    if (o->val && !dataset_suffices(&run->val, o->seq, error)) return false;
    if (o->sample_every && !run_check_prompt(&config, error)) return false;
    if (run->model.memory.total >= PLAN_MAX)
        return fail(error, "the model needs more than %.0f GB; make --batch, --seq or the model smaller",
                    1e-9 * (double)PLAN_MAX);
    run->record.config = config;
    return o->plan || o->out == NULL || run->comm.rank > 0 || run_check_out(o, error);
}

// Whether --out has the log of a run, or that cannot be told.
static bool run_has_log(const Run* run) {
    char log[FILE_PATH_MAX + 32];
    log_path(log, sizeof log, run->options.out);
    return access(log, F_OK) == 0 || errno != ENOENT;
}

// Where copies in memory go. Those of a run that was there before are removed, unless this one goes on with it.
static bool run_find_hot(Run* run, bool goes_on, Error* error) {
    const Options* o = &run->options;
    char* real = realpath(o->out, NULL);
    const char* out = real ? real : o->out;
    // A directory of its own, whatever else lies beside it: it is emptied at the end.
    snprintf(run->hot, sizeof run->hot, "%.4000s/llmtrain-%016llx", o->ckpt_hot_dir,
             (unsigned long long)hash_bytes(out, strlen(out)));
    free(real);
    if (run->comm.local_world != run->comm.world)
        return run_agree(run, fail(error,
                                   "--ckpt-hot keeps copies in the memory of one machine, but the ranks are on several; "
                                   "leave it out"), error);
    if (run->comm.rank == 0 && !goes_on) checkpoint_discard(run->hot);
    return run_agree(run, run->comm.rank > 0 || directory_make(run->hot, error), error);
}

// The weights of the checkpoint that --init-from names.
static bool run_init_from(Run* run, Error* error) {
    Json manifest;
    RunRecord saved;
    const char* path = run->options.init_from;
    if (!manifest_open(&manifest, &saved, path, error)) return false;
    bool ok = config_agrees(&saved.config, &run->record.config, "--init-from", path, error) &&
        checkpoint_load(&run->model, &manifest, path, true, error);
    json_free(&manifest);
    if (ok) printf("begins with the weights of %s\n", path);
    return ok;
}

// The weights and the state that a run begins with.
static bool run_start(Run* run, Error* error) {
    const Options* o = &run->options;
    run->record.state = run_state_begin(FLOATX_DTYPE == DTYPE_F16, o->loss_scale);
    flat_forget(&run->model.flat);
    return o->init_from ? run_init_from(run, error) : model_randomize(&run->model, o->seed, error);
}

// What checkpoints will say of the run.
static void run_describe(Run* run, const Flag* flags, size_t flag_count) {
    const Options* o = &run->options;
    RunRecord* r = &run->record;
    r->optimizer = o->optimizer.kind;
    r->seed = o->seed;
    r->T = o->seq;
    r->data = dataset_fingerprint(&run->train);
    r->master_weights = o->master_weights;
    r->flags = flags;
    r->flag_count = flag_count;
}

// Removes what is not to be kept beside a new checkpoint, or a new copy in memory.
static void run_prune(Run* run, bool hot, uint64_t newest) {
    const Options* o = &run->options;
    const KeepRule two = {2, 0, false}, asked = {o->ckpt_keep, o->ckpt_keep_every, o->rewind > 0};
    if (run->comm.rank == 0) pruner_begin(&run->pruner, hot ? run->hot : o->out, newest, hot ? &two : &asked);
}

// Opens --out, and brings weights, state and log to where the run begins; *found tells whether at a checkpoint.
static bool run_open_out(Run* run, bool* found, Error* error) {
    const Options* o = &run->options;
    bool leads = run->comm.rank == 0, writes = leads && o->out;
    *found = false;
    if (!run_agree(run, !writes || directory_make(o->out, error), error)) return false;
    bool goes_on = o->resume && run_has_log(run);  // before there is one in any case
    if (!run_agree(run, !writes || log_open(&run->log, o->out, error), error)) return false;
    if (o->ckpt_hot && !run_find_hot(run, goes_on, error)) return false;
    if (o->resume && !run_load(run, STEP_MAX, false, found, error)) return false;
    if (o->resume && !*found) printf("no checkpoint in %s yet: starting from the beginning\n", o->out);
    bool ok = (*found || run_start(run, error)) && (!writes || log_cut_back(&run->log, run->record.state.step, error));
    if (!run_agree(run, ok, error)) return false;
    if (writes) checkpoint_clean(o->out);
    if (leads && run->hot[0]) checkpoint_clean(run->hot);
    uint64_t newest = 0;
    if (writes && checkpoint_before(&newest, o->out, STEP_MAX)) run_prune(run, false, newest);
    return true;
}

static void run_print_notes(const Run* run) {
    const Options* o = &run->options;
    uint64_t step = run->record.state.step, steps = o->schedule.steps;
    if (o->schedule.warmup >= steps)
        printf("note: --warmup %llu is not shorter than the run of %llu steps: the rate never reaches --lr\n",
               (unsigned long long)o->schedule.warmup, (unsigned long long)steps);
    if (o->out == NULL) printf("no --out: nothing will be saved\n");
    if (step >= steps)
        printf("nothing to do: step %llu of %llu is reached\n", (unsigned long long)step, (unsigned long long)steps);
}

// All that comes before the first step.
static bool run_begin(Run* run, Flag* flags, size_t flag_count, Error* error) {
    Options* o = &run->options;
    bool found, ok;
    if (!run_agree(run, run_prepare(run, flags, flag_count, error), error)) return false;
    run_print(run);
    if (o->plan) return run_print_plan(run, error);
    if (!run_compare_ranks(run, flags, flag_count, error)) return false;
    run_describe(run, flags, flag_count);
    if (!run_agree(run, model_allocate(&run->model, error) && run_allocate(run, error), error)) return false;
    if (!model_connect(&run->model, error)) return false;
    run_print_device(run);
    if (!run_compare_devices(run, error)) return false;
    run->model.dropout.p = (float)o->dropout;
    run->model.dropout.seed = o->seed;
    ok = saver_open(&run->saver, &run->model, run_takes_snapshots(run), 1e6 * o->ckpt_bandwidth, error);
    if (!run_agree(run, ok, error)) return false;
    if (!run_open_out(run, &found, error)) return false;
    run_print_notes(run);
    const RunState* state = &run->record.state;
    ok = loader_open(&run->loader, &run->train, (int32_t)run->record.config.vocab, o->seed, run->comm.rank, run->comm.world,
                     o->batch, o->seq, error) &&
         loader_start(&run->loader, state->samples, error);
    if (!run_agree(run, ok, error)) return false;
    cadence_start(&run->cadence, now_ms());
    run_event(run, found ? "resumed" : "begun", state->step, "%zu ranks, --zero %llu, %s", run->comm.world,
              (unsigned long long)o->zero, FLOATX_NAME);
    return true;
}

// ------------------------------------------------------------------------------------------------
// The work

// Every sample uses the same random numbers, so that those of one run show how the model changes.
static void run_sample(Run* run, FILE* out) {
    const Options* o = &run->options;
    size_t known = tokenizer_encode(run->text, &run->tokenizer, o->prompt, strlen(o->prompt));
    fputs(o->prompt, out);
    model_generate(&run->model, run->text, run->candidates, out, &run->tokenizer, &o->sampling, known, known + o->tokens);
    fputc('\n', out);
    fflush(out);
}

// A save begins (run_save_begin); steps go on under it; when all ranks have written their parts it is completed
// (run_save_complete), or waited for and then completed (run_save_wait).

// Completes the save in progress; *good tells whether it is there, and if not, *error why. False if a rank is gone.
static bool run_save_complete(Run* run, bool* good, Error* error) {
    const Options* o = &run->options;
    Cadence* c = &run->cadence;
    bool hot = strcmp(run->saver.out, o->out) != 0;
    uint64_t step = run->saver.run.state.step;
    double began = run->saver.began_ms;
    Error why;
    fault_point("checksums");
    heartbeat(HEARTBEAT_CHECKPOINT, run->record.state.step);
    comm_extend_timeout(&run->comm, true);
    *good = saver_end(&run->saver, &why);
    comm_extend_timeout(&run->comm, false);
    if (!*good && run->comm.world > 1 && comm_failed(&run->comm, error)) return false;
    if (!*good) *error = why;
    if (!*good) return true;
    if (!hot) {
        c->took_ms = now_ms() - began;
        run_tell(run, "saved", step, "saved %s/step_%08llu in %.0f ms, for which training stood %.0f ms", o->out,
                 (unsigned long long)step, c->took_ms, run->saver.stalled_ms);
    }
    fault_point("clean");
    run_prune(run, hot, step);
    return true;
}

// The same while training goes on, also without that checkpoint.
static bool run_save_complete_or_tell(Run* run, Error* error) {
    bool good;
    uint64_t step = run->saver.run.state.step;
    if (!run_save_complete(run, &good, error)) return false;
    if (!good && run->comm.rank == 0)
        fprintf(stderr, "train: step %llu is not saved: %s. Training goes on; the checkpoints before it are as they were\n",
                (unsigned long long)step, error->text);
    if (!good) run_event(run, "not_saved", step, "%s", error->text);
    return true;
}

// After a checkpoint, --ckpt-every auto says when the next is due.
static void run_pace(Run* run) {
    Cadence* c = &run->cadence;
    if (!cadence_choose(c)) return;
    printf("next checkpoint in %.1f min: a save costs %.0f ms, failures come every %g h; expected to cost %.2f%% of the "
           "time, seen so far: %.2f%%\n", c->every_ms / 6e4, c->cost_ms, c->mtbf_ms / 3.6e6, 100 * c->cost_ms / c->every_ms,
           100 * (c->costs_ms + c->cost_ms) / (now_ms() - c->began_ms));
}

// Between two steps: waits for the save in progress, if there is one.
static bool run_save_wait(Run* run, Error* error) {
    if (saver_state(&run->saver) == SAVER_IDLE) return true;
    double began = now_ms();
    saver_hurry(&run->saver, true);
    bool ok = run_save_complete_or_tell(run, error);
    saver_hurry(&run->saver, false);
    run->cadence.cost_ms += now_ms() - began;
    run_pace(run);
    return ok;
}

// Begins a save in a directory, after the one before it is complete. Flushes the log first, so that it never ends before
// the checkpoint does.
static bool run_save_begin(Run* run, const char* directory, Error* error) {
    if (!run_save_wait(run, error)) return false;
    Error reason;
    double began = now_ms();
    bool flushed = run->log.file == NULL || (log_flush(&run->log, &reason) &&
                   (file_sync(fileno(run->log.file)) || fail_file(&reason, "flush", run->log.path)));
    fault_point("save");
    cadence_count_save(&run->cadence, began, strcmp(directory, run->options.out) != 0);
    saver_begin(&run->saver, &run->model, &run->record, directory, flushed ? NULL : &reason);
    run->cadence.cost_ms = now_ms() - began;
    return true;
}

// Saves while training goes on; without memory for a snapshot the whole save comes first.
static bool run_save_beside(Run* run, const char* directory, Error* error) {
    run->record.kind = cadence_is_halfway(&run->cadence, run->record.state.step) ? SAVE_HALFWAY : SAVE_ASKED;
    return run_save_begin(run, directory, error) && (run->saver.snapshot || run_save_wait(run, error));
}

// Saves in --out, and waits until it is there.
static bool run_save_and_wait(Run* run, Error* error) {
    bool good = false;
    if (!run_save_wait(run, error)) return false;  // before the hurry, which it ends
    saver_hurry(&run->saver, true);
    run->record.kind = cadence_asks(&run->cadence, run->record.state.step) ? SAVE_ASKED : SAVE_END;
    return run_save_begin(run, run->options.out, error) && run_save_complete(run, &good, error) && good;
}

// Set by SIGINT, SIGTERM and SIGUSR1 to its number: the step is finished and saved before the program ends. A second SIGINT
// ends it at once.
static volatile sig_atomic_t interrupted;

static volatile sig_atomic_t interrupt_speaks = 1;

static void interrupt(int signal_number) {
    static const char message[] = "train: stopping after this step; Ctrl-C twice stops at once, without saving it\n";
    bool first = interrupted == 0;
    if (first) interrupted = signal_number;
    if (signal_number == SIGINT) signal(signal_number, SIG_DFL);  // others may come twice, from a scheduler and a launcher
    if (first && interrupt_speaks && write(STDERR_FILENO, message, sizeof message - 1) < 0) return;  // nobody to tell
}

// For tests: one wrong bit in a parameter of the first block, as faulty memory would make it.
static void fault_flip(Model* model) {
    unsigned char byte;
    Error ignored;
    void* place = model->flat.params + model->flat.buckets[1].first;
    flat_await_all(&model->flat, &ignored);
    download(&byte, place, 1, model->stream);
    byte ^= 1;
    upload(place, &byte, 1, model->stream);
}

// Whether all ranks have the same parameters, and compute the same with them.
static bool run_compare(Run* run, Error* error) {
    bool same = flat_compare(&run->model.flat, error);
    if (same && run->same_devices) {
        bool flipped = fault_point("compare");
        if (flipped) fault_flip(&run->model);
        same = model_compare_forward(&run->model, run->tokens, run->targets, run->options.batch, run->options.seq, error);
        if (flipped) fault_flip(&run->model);
    }
    return same || run_agree(run, false, error);
}

static void describe_divergence(char* text, size_t size, const RunState* state, const StepReading* reading) {
    if (!isfinite(reading->loss))
        snprintf(text, size, "the loss of step %llu is %g", (unsigned long long)state->step, reading->loss);
    else
        snprintf(text, size, "the last %llu steps were skipped: the gradient's norm is %g, its running mean %g",
                 (unsigned long long)state->skipped_consecutive, reading->grad_norm, state->norms.mean);
}

// The oldest step that --ckpt-keep has certainly left of the checkpoints before step `first`; 0: the beginning.
static uint64_t run_oldest_kept(const Run* run, uint64_t first) {
    uint64_t interval = run->cadence.steps, keep = run->options.ckpt_keep;
    uint64_t newest = interval ? (first - 1) / interval * interval : 0, span = keep ? (keep - 1) * interval : newest;
    return newest > span ? newest - span : 0;
}

// Where a run goes back to that has diverged: to the newest checkpoint before step *before, of those since step *oldest (0:
// of all, or to the beginning). *first is the first of the steps that were skipped last. If it has come no further than the
// last time, the checkpoint of then was bad already, and it goes to the one before that. False if it may not go back.
static bool run_plan_rewind(Run* run, const char* why, uint64_t* first, uint64_t* before, uint64_t* oldest, Error* error) {
    const Options* o = &run->options;
    const RunState* state = &run->record.state;
    *first = state->step - state->skipped_consecutive + 1;
    bool again = state->rewinds > 0 && *first <= state->rewound_from;
    if (again) *first = state->rewound_from;
    *before = again ? state->rewound_to : *first;
    *oldest = run_oldest_kept(run, *first);
    if (o->rewind == 0)
        return fail(error, "%s; lower --lr or raise --spike-skip, and --resume, or let --rewind do it", why);
    if (state->rewinds >= o->rewind)
        return fail(error, "%s, after %llu rewinds; lower --lr, and --resume", why, (unsigned long long)state->rewinds);
    if (again && *before <= *oldest && *oldest > 0)
        return fail(error,
                    "%s, also from step %llu on, and --ckpt-keep %llu has left no checkpoint before that; lower --lr, and "
                    "--resume",
                    why, (unsigned long long)*before, (unsigned long long)o->ckpt_keep);
    return true;
}

// What was saved and logged after the step that the run has gone back to is set aside: a restart must not take it up.
static bool run_set_aside(Run* run, Error* error) {
    uint64_t step = run->record.state.step;
    if (run->comm.rank > 0) return true;
    return checkpoint_take_away(run->options.out, step + 1, true, error) &&
           (!run->hot[0] || checkpoint_take_away(run->hot, step + 1, false, error)) &&
           log_cut_back(&run->log, step, error);
}

// The run has diverged: back to a checkpoint, and on with the samples that come now and a smaller learning rate, as "PaLM:
// Scaling Language Modeling with Pathways" (5.1) does by hand. A run that is killed and resumed must go back to the same;
// so only checkpoints count that --ckpt-every asked for: none halfway, which go, or of a signal, and no copies in memory,
// which come when there is time for them.
static bool run_rewind(Run* run, const StepReading* reading, Error* error) {
    RunState *state = &run->record.state, diverged = *state;
    uint64_t first, before, oldest;
    bool found;
    char why[256];
    describe_divergence(why, sizeof why, &diverged, reading);
    if (!run_plan_rewind(run, why, &first, &before, &oldest, error)) return run_agree(run, false, error);
    heartbeat(HEARTBEAT_CHECKPOINT, diverged.step);
    if (!run_save_wait(run, error)) return false;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    pruner_await(&run->pruner);
    fault_point("rewind");
    if (!run_load(run, before, true, &found, error)) return false;
    if (!found && oldest > 0)
        return run_agree(run, fail(error, "%s, and the checkpoints before step %llu are gone; lower --lr, and --resume",
                                   why, (unsigned long long)before), error);
    if (!found && !run_agree(run, run_start(run, error), error)) return false;
    state->samples = diverged.samples;
    state->rewinds = diverged.rewinds + 1;
    state->rewound_from = first;
    state->rewound_to = state->step;
    state->lr_factor = diverged.lr_factor * run->options.rewind_lr;
    fault_point("forget");
    if (!run_agree(run, run_set_aside(run, error), error)) return false;
    run_tell(run, "rewound", diverged.step, "went back from step %llu to %llu: %s; the learning rate is now multiplied by %g",
             (unsigned long long)diverged.step, (unsigned long long)state->step, why, state->lr_factor);
    run->cadence.saved_ms = now_ms();
    flat_start_clock(&run->model.flat);
    return true;
}

// Says which rank makes the others wait, once it has done so for --slow-steps.
static void run_name_slow(Run* run, const StepReading* reading) {
    const Options* o = &run->options;
    bool slow = run->comm.world > 1 && reading->busy_max > o->slow_factor * reading->busy_median;
    if (!slow || reading->slowest != run->slow_rank) run->slow_count = 0;
    run->slow_rank = reading->slowest;
    run->slow_count += slow;
    if (!slow || run->slow_count != o->slow_steps) return;
    run_tell(run, "slow", run->record.state.step, "note: rank %zu is slow: it needs %.0f ms a step without waiting, half of "
             "the ranks at most %.0f; for %llu steps now", reading->slowest, reading->busy_max, reading->busy_median,
             (unsigned long long)o->slow_steps);
}

// The line of a step, on the console and in the log: what is in it already, and what follows from the state. tokens: of a
// step, of each rank.
static bool run_report(Run* run, StepRecord* r, double tokens, Error* error) {
    const RunState* state = &run->record.state;
    r->step = state->step;
    r->steps = run->options.schedule.steps;
    r->tokens = state->samples * run->options.seq;
    r->skipped = state->step - state->updates;
    r->floor = run->val.entropy_floor;
    r->tokens_per_second = 1e3 * tokens * (double)run->comm.world / r->ms;
    r->mfu = NAN;
    if (run->peak_tflops > 0)
        r->mfu = 1e-9 * tokens * model_flops_per_token(&run->model, run->options.seq) / (r->ms * run->peak_tflops);
    r->memory = device_is_host() ? memory_peak() : plan_block_bytes(&run->model.memory);
    r->ranks = run->comm.world;
    record_print(stdout, r);
    return run->log.file == NULL || log_write(&run->log, r, error);
}

// Gradients of the mean loss over the step's micro-batches, of which each rank has its own.
static bool run_gradients(Run* run, uint64_t micro_batches, Error* error) {
    Model* model = &run->model;
    RunState* state = &run->record.state;
    size_t B = run->options.batch, T = run->options.seq;
    model_begin_step(model, state->loss_scale, micro_batches);
    for (uint64_t i = 0; i < micro_batches; i++) {
        heartbeat(HEARTBEAT_STEP, state->step + 1);
        if (fault_point("load")) fault_flip(model);
        if (!loader_next(&run->loader, run->tokens, run->targets, error)) return false;
        model->dropout.first_token = (state->samples + run->comm.rank * B) * T;
        model_gradients(model, run->tokens, run->targets, B, T);
        state->samples += B * run->comm.world;
    }
    return true;
}

// What the step has come to, for all ranks, and what they tell each other with it; completes a save that all have written.
static bool run_read(Run* run, StepReading* reading, Error* error) {
    Saver* saver = &run->saver;
    SaverState state = saver_state(saver);
    StepNews news = {interrupted != 0, cadence_due_now(&run->cadence, now_ms()), state == SAVER_WRITTEN, state == SAVER_FAILED};
    heartbeat_collective("the sum of gradients");
    if (!model_read(&run->model, reading, news, error)) return false;
    heartbeat(HEARTBEAT_STEP, run->record.state.step + 1);
    if (state != SAVER_IDLE && reading->news.failed) saver_give_up(saver);
    bool ends = state != SAVER_IDLE && (reading->news.saved || reading->news.failed);
    return !ends || run_save_complete_or_tell(run, error);
}

static bool run_validate(Run* run, double* val_loss, Error* error) {
    const Options* o = &run->options;
    fault_point("validate");
    comm_extend_timeout(&run->comm, true);
    bool ok = model_validate(&run->model, val_loss, &run->val, o->val_windows, o->val_overlap, run->tokens, run->targets,
                             o->batch, o->seq, error);
    if (ok) comm_extend_timeout(&run->comm, false);
    return ok;
}

// After the last step, or at a signal.
static bool run_end(Run* run, Error* error) {
    const Options* o = &run->options;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    pruner_await(&run->pruner);
    if (run->record.state.step >= o->schedule.steps) {
        if (run->hot[0] && run->comm.rank == 0) checkpoint_discard(run->hot);
        return true;
    }
    run->stopped = o->out != NULL;
    fail(error, "stopped by a signal after step %llu; %s", (unsigned long long)run->record.state.step,
         o->out ? "the same command with --resume continues" : "nothing was saved, since there is no --out");
    return run_agree(run, false, error);
}

// The training loop: steps state.step to --steps. heartbeat() tells the supervisor what this rank is at (heartbeat.h); fault_*()
// do nothing unless a test asks for it (faults.h). With FP16 the loss is multiplied by state.loss_scale, and so are the
// gradients until model_update divides by it.
static bool run_train(Run* run, Error* error) {
    const Options* o = &run->options;
    Model* model = &run->model;
    RunState* state = &run->record.state;
    size_t B = o->batch, T = o->seq, rank = run->comm.rank;
    uint64_t micro_batches = options_micro_batches(o, run->comm.world), first_step = state->step;
    double began = now_ms();

    bool stop = state->step >= o->schedule.steps;
    while (!stop) {
        StepRecord r;
        double started = now_ms();
        uint64_t sent = collective_bytes_sent(&model->flat.collectives);
        fault_step(rank, state->step + 1);
        if (!run_gradients(run, micro_batches, error)) return false;
        bool saving = saver_state(&run->saver) != SAVER_IDLE;
        if (!run_read(run, &r.reading, error)) return false;

        // Of the parameters that these gradients are made with; the update would overwrite a wrong bit, or spread it.
        if (o->check_every && (state->step + 1) % o->check_every == 0 && !run_compare(run, error)) return false;

        // The guard decides whether, and the schedule how far, the optimizer steps.
        double factor = 0.0;
        r.lr = state->lr_factor * schedule_lr(&o->schedule, state->step);
        bool finite = isfinite(r.reading.loss);
        bool update = guard_step(state, &factor, &o->guard, finite ? r.reading.grad_norm : NAN);
        fault_point("update");
        if (update) saver_await_snapshot(&run->saver);
        if (update) model_update(model, &o->optimizer, ++state->updates, r.lr, factor);
        state->skipped_consecutive = update ? 0 : state->skipped_consecutive + 1;
        state->step++;
        run_name_slow(run, &r.reading);
        if (state->skipped_consecutive >= o->diverged_after || (!finite && o->rewind)) {
            if (!run_rewind(run, &r.reading, error)) return false;
            first_step = state->step;
            began = now_ms();
            continue;
        }

        // What the step cost is measured before validating, sampling and saving. A GPU is still at the update then, which the
        // next step waits for; where something else comes first it must be waited for here.
        bool last = state->step == o->schedule.steps;
        stop = last || r.reading.news.stop;
        bool hastens = stop && !last;  // a signal: there may be no time for anything but the save
        bool validates = o->val && !hastens && (last || (o->val_every && state->step % o->val_every == 0));
        bool samples = !hastens && o->sample_every && state->step % o->sample_every == 0;
        bool saves = o->out && (stop || r.reading.news.save || cadence_due(&run->cadence, state->step));
        bool copies = !saves && o->ckpt_hot && state->step % o->ckpt_hot == 0 &&
            saver_state(&run->saver) == SAVER_IDLE;
        bool pauses = validates || samples || saves || copies;
        if (pauses || state->step == first_step + 1) device_wait(model->stream);
        r.ms = now_ms() - started;
        if (state->step > first_step + 1) cadence_count_step(&run->cadence, r.ms, saving);
        run_pace(run);
        if (pauses) heartbeat(HEARTBEAT_CHECKPOINT, state->step);
        r.val_loss = NAN;
        if (validates && !run_validate(run, &r.val_loss, error)) return false;

        r.sent = collective_bytes_sent(&model->flat.collectives) - sent;
        r.minutes_left =
            (now_ms() - began) / 6e4 / (double)(state->step - first_step) * (double)(o->schedule.steps - state->step);
        bool reports = last || state->step % o->log_every == 0 || !isnan(r.val_loss);
        if (reports && !run_report(run, &r, (double)(micro_batches * B * T), error)) return false;
        if (samples && rank == 0) run_sample(run, stdout);
        if (stop && saves && !run_save_and_wait(run, error)) return false;
        if (!stop && (saves || copies) && !run_save_beside(run, saves ? o->out : run->hot, error)) return false;
        if (pauses) flat_start_clock(&model->flat);
    }
    return run_end(run, error);
}

// Continues --prompt with the newest good checkpoint of --out.
static bool run_generate(Run* run, Error* error) {
    bool found = false;
    if (!run_load(run, STEP_MAX, false, &found, error)) return false;
    if (!found) return fail(error, "%s holds no checkpoint; give the --out of a run that has saved one", run->options.out);
    if (!run_check_prompt(&run->model.config, error) || !run_allocate(run, error)) return false;
    run_sample(run, stdout);
    return !ferror(stdout) || fail_file(error, "write", "standard output");
}

// ------------------------------------------------------------------------------------------------

#define REAP_MS 2e3  // that forked ranks have to end after rank 0 has failed

#define SAMPLING_FLAGS "out|prompt|tokens|temperature|top-k|top-p|seed|threads"

// Flags that do not fit together.
static bool options_check(const Options* o, const Cadence* cadence, const Flag* flags, size_t flag_count, Error* error) {
    if (o->prompt[0] == 0) return fail(error, "--prompt is empty; give at least one character");
    if (o->resume && o->out == NULL) return fail(error, "--resume needs --out, the directory of the run to continue");
    if ((cadence_saves(cadence) || o->ckpt_hot) && o->out == NULL)
        return fail(error, "--ckpt-%s needs --out, the directory for the checkpoints", o->ckpt_hot ? "hot" : "every");
    if (o->rewind && !cadence_saves(cadence))
        return fail(error, "--rewind needs --ckpt-every, for checkpoints to go back to");
    if (o->val_every && o->val == NULL) return fail(error, "--val-every needs --val, the shards to validate on");
    if (o->out && o->out[0] == 0) return fail(error, "--out is empty; give the directory of the run");
    if (o->out && strlen(o->out) > 3900) return fail(error, "--out is longer than 3900 characters; give a shorter path");
    if (o->data == NULL && o->out == NULL && !o->plan)
        return fail(error, "there is nothing to do; give --data to train, or --out and --prompt to sample");
    for (size_t i = 0; i < flag_count && o->data == NULL && !o->plan; i++)
        if (flags[i].given && choice_find(SAMPLING_FLAGS, flags[i].name) < 0)
            return fail(error, "--%s is for training; give --data too, or leave it out to sample", flags[i].name);
    return true;
}

// Becomes one rank of the run: found by what the launcher says, or forked here.
static bool run_join(Run* run, CommLaunch* launch, Flag* flags, size_t flag_count, Error* error) {
    const Options* o = &run->options;
    if (o->plan) {  // for as many ranks as a launcher has started, and printed once
        if (!comm_find(launch, error)) return false;
        if (launch->world > 1) run->options.ranks = launch->world;
        return launch->rank == 0 || freopen("/dev/null", "w", stdout) != NULL || fail_file(error, "open", "/dev/null");
    }
    bool forks = flag_was_given(flags, flag_count, "ranks");
    run->wrong_flags = forks && getenv("RANK") != NULL;  // a launcher has started ranks already
    if (!(forks ? comm_spawn(launch, o->ranks, error) : comm_find(launch, error))) return false;
    run->wrong_flags = false;
    if (launch->world > 1 && o->data == NULL)
        return fail(error, "one rank is enough to sample, but %s has started %zu; start one", launch->launcher,
                    launch->world);
    if (launch->rank > 0) {
        interrupt_speaks = 0;
        if (freopen("/dev/null", "w", stdout) == NULL) return fail_file(error, "open", "/dev/null");
    }
    // Ranks whose heartbeats the supervisor can see.
    size_t here = launch->local_world == launch->world ? launch->world : 0;
    if (!heartbeat_open(getenv(HEARTBEAT_VARIABLE), launch->rank, here, error)) return false;
    if (!comm_open(&run->comm, launch, 1e3 * o->timeout, error)) return false;
    if (o->threads == 0 && run->comm.local_world > 1 && threads_undecided())
        threads_set(max_size(threads_count() / run->comm.local_world, 1));
    if (run->comm.world > 1) printf("%zu ranks (%s)\n", run->comm.world, launch->launcher);
    return true;
}

// Says why the flags are wrong; where a launcher has started several ranks, to the others too, lest they wait.
static void run_refuse(Run* run, const Error* error) {
    CommLaunch launch;
    Error ignored;
    bool several = comm_find(&launch, &ignored) && launch.world > 1;
    launch_report(&launch, "train", error->text);
    if (!several || !comm_open(&run->comm, &launch, 1e3 * run->options.timeout, &ignored)) return;
    comm_abort(&run->comm, error->text);
    comm_close(&run->comm);
}

int main(int argc, char** argv) {
    Run run;
    Flag flags[FLAGS_MAX];
    Error error;
    CommLaunch launch;
    files_open_standard();
    signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is then an error of the write, with a sentence
    if (argc > 1 && strcmp(argv[1], "supervise") == 0)
        return fputs("train: the supervisor is a program of its own: ./supervise [FLAGS] -- ./train ...\n", stderr), 2;
    memset(&run, 0, sizeof run);
    comm_launch_alone(&launch);
    run.options = options_default();
    size_t flag_count = options_flags(flags, &run.options);
    if (flags_want_help(argc, argv)) {
        printf("train: trains a GPT-2 or Llama model (%s build). ./supervise starts it again when it dies or hangs.\n",
               FLOATX_NAME);
        flags_help(flags, flag_count);
        return 0;
    }
    Options* o = &run.options;
    if (!flags_parse(flags, flag_count, argc, argv, &error) ||
        !cadence_parse(&run.cadence, o->ckpt_every, o->mtbf, o->ckpt_async, &error) ||
        !options_check(o, &run.cadence, flags, flag_count, &error)) {
        run_refuse(&run, &error);
        return 2;
    }
    o->optimizer.seed = o->sampling.seed = o->seed;
    if (o->data) {
        signal(SIGINT, interrupt);
        signal(SIGTERM, interrupt);
        signal(SIGUSR1, interrupt);
    }
    if (o->threads) threads_set(o->threads);
    bool ok = run_join(&run, &launch, flags, flag_count, &error);
    if (ok && o->data == NULL && !o->plan) ok = run_generate(&run, &error);
    else ok = ok && run_begin(&run, flags, flag_count, &error) && (o->plan || run_train(&run, &error));
    if (!ok) launch_report(&launch, "train", error.text);
    if (!ok && run.comm.world > 1 && !error.on_all_ranks) comm_abort(&run.comm, error.text);
    if (ok) heartbeat(HEARTBEAT_DONE, run.record.state.step);
    if (run.cadence.began_ms > 0)
        run_event(&run, ok ? "done" : run.stopped ? "stopped" : "failed", run.record.state.step, "%s",
                  ok ? "all steps" : error.text);
    run_free(&run);
    int code = ok ? 0 : run.wrong_flags ? 2 : run.stopped && interrupted != SIGINT ? EXIT_SAVED : 1;
    Error of_others;
    return comm_reap(&launch, "train", code, ok ? 1e3 * o->timeout : REAP_MS, &of_others);
}
