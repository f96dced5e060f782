// plan.cu: how long a step of training will take, and which flags fit a memory, before anything runs.
//
//   make build/plan && build/plan --model gpt2:124M --seq 1024 --batch 4 --memory 8
//   build/plan --model llama:1B --seq 2048 --batch 1 --ranks 64 --memory 80 --rate 300000,2000,50
//   build/plan --model llama:405B --seq 8192 --total-batch 16777216 --steps 900000 --gpus 16384 --gpu H100
//
// It contains the trainer, so it takes the same flags, and prints what ./train --plan prints; then the state of each
// optimizer, the memory of each ZeRO stage, the predicted time of a step and, with --memory, the combinations of flags
// that fit, fastest first. With --gpus it plans for a cluster instead: layouts over its GPUs, fastest first, and what
// the run takes. Exit code: 0 done; 1 something failed, or nothing fits; 2 a flag is wrong.

#include "cluster_search.h"

#define main train_main
#include "../train.cu"
#undef main

// ------------------------------------------------------------------------------------------------
// The flags as given: optimizers, stages, time

// Prints the state per parameter that each optimizer would keep for this model, over all ranks.
static void show_optimizers(const Model* model) {
    const Parameters* p = &model->parameters;
    printf("  optimizer state in bytes per parameter:");
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
        double bytes = 0;
        for (size_t i = 0; i < p->count; i++)
            bytes += p->tensors[i].trains ? optimizer_state_bytes((OptimizerKind)kind, &p->tensors[i].shape,
                                                                  model->flat.holds.optimizer->rank) : 0;
        printf("%s %s %.2f", kind ? "," : "", OPTIMIZERS[kind].name, bytes / (double)p->true_size);
    }
    printf("\n");
}

// Bytes of a rank of the fullest stage; recomputes: after as much recomputation as each needs to fit, if that suffices.
static double fullest_bytes(const ModelOptions* options, const Model* planned,
                            const PlanOptions* o, bool recomputes) {
    double most = 0;
    for (size_t stage = 0; stage < planned->pipeline.pp; stage++) {
        Model model;
        Error ignored;
        ModelOptions of_stage = *options;
        of_stage.ranks.rank = stage * ranks_of_rows(&options->ranks);
        if (!model_plan(&model, &planned->config, of_stage, &ignored)) return INFINITY;
        if (recomputes) plan_recompute(&model, o);
        most = fmax(most, (double)plan_bytes(&model, o));
        model_free(&model);
    }
    return most;
}

// Prints the memory of a rank, of the fullest of the pipeline, and the bytes that rank 0 sends in a step, for
// each --zero and kind of reduction.
static bool show_stages(const Model* planned, const PlanOptions* o, Error* error) {
    char fits[96] = "";
    printf("\n  %-10s %-10s %14s %22s\n", "--zero", "--reduce", "MB per rank", "MB sent per step");
    bool stored = ranks_reduce_sums(&planned->options.ranks);  // which needs --reduce storage
    for (size_t i = 0; i < (planned->pipeline.pp > 1 ? 4 : 8); i += stored ? 2 : 1) {
        Model model;
        ModelOptions options = planned->options;
        options.ranks.stage = i / 2;
        options.ranks.reduce = stored ? REDUCE_STORAGE : i % 2 ? REDUCE_FLOAT : REDUCE_EXACT;
        if (!model_plan(&model, &planned->config, options, error)) return false;
        if (o->recompute == RECOMPUTE_AUTO) plan_recompute(&model, o);
        double bytes = fullest_bytes(&options, planned, o, o->recompute == RECOMPUTE_AUTO);
        const char* reduce = stored ? "storage" : i % 2 ? "float" : "exact";
        printf("  %-10zu %-10s %14.2f %22.2f\n", i / 2, reduce, 1e-6 * bytes,
               1e-6 * (double)model_bytes_sent(&model, o->micro_batches));
        if (fits[0] == 0 && 1e-9 * bytes <= o->memory_gb)
            snprintf(fits, sizeof fits, "--zero %zu --reduce %s is the lowest stage that", i / 2, reduce);
        model_free(&model);
    }
    if (!device_is_host()) printf("  A GPU's driver and NCCL take a few hundred MB more, which are not counted.\n");
    if (o->memory_gb > 0)
        printf("  %s fits in %g GB with these flags\n", fits[0] ? fits : "no stage", o->memory_gb);
    return true;
}

// Measures the rates of a rank, unless they are given; prints them, and the time of a step that they predict.
static bool show_time(Rates* rates, bool given, const Model* model, const PlanOptions* o, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    BlockShape shape = model_block_shape(model);
    if (!given && !rates_measure(rates, &shape, ranks->world, error)) return false;  // all ranks are on this machine
    double n = (double)o->micro_batches, ms = step_ms(model, rates, o->micro_batches);
    double again = n * model_recompute_ms(model, rates), state = (double)offload_total(&model->flat.offloaded.store);
    printf("\n  rates of a rank, %s: matmuls %.1f GFLOP/s, the rest %.1f, memory %.1f GB/s",
           given ? "given" : "measured", 1e-9 * rates->matmul, 1e-9 * rates->other, 1e-9 * rates->memory);
    if (ranks->world > 1) printf(", between ranks %.2f GB/s", 1e-9 * rates->comm);
    printf(", offloading %.2f GB/s", 1e-9 * rates->offload);
    printf("\n  a step with these flags: %.3f GB, %.1f ms predicted\n",
           1e-9 * fullest_bytes(&model->options, model, o, o->recompute == RECOMPUTE_AUTO), ms);
    if (state > 0)
        printf("  %.1f ms of that is spent waiting for the offloaded optimizer state; with a larger --total-batch this "
               "happens less often\n", 2e3 * state / rates->offload);
    if (offload_blocks_bytes(&model->offloaded) > 0)
        printf("  %.1f ms of that is spent waiting for offloaded activations; at %.3g GB/s none would be\n",
               n * offload_wait_ms(model, rates), 1e-9 * offload_rate_hidden(model, rates));
    if (again > 0) printf("  recomputation: %+.1f%% of the time of a step, predicted\n", 100 * again / (ms - again));
    return true;
}

// ------------------------------------------------------------------------------------------------
// Other flags that fit

typedef struct {
    double bytes, ms;
    ModelOptions options;
    bool recomputes;
} Choice;

enum { CHOICES_MAX = 4096, CHOICES_SHOWN = 12, CHOICE_B_MAX = 1024 };

static int choice_compare(const void* a, const void* b) {
    const Choice *x = (const Choice*)a, *y = (const Choice*)b;
    if (x->ms != y->ms) return x->ms < y->ms ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// Whether an optimizer is an alternative to the one of the flags: the same method with other states.
static bool choice_of_optimizer(OptimizerKind kind, OptimizerKind asked) {
    const char *name = OPTIMIZERS[kind].name, *wanted = OPTIMIZERS[asked].name;
    return kind == asked || (strncmp(wanted, "adamw", 5) == 0 && strncmp(name, "adamw", 5) == 0);
}

static void choice_print(const Choice* c, const Model* asked, double memory_gb, double tokens) {
    const ModelOptions* o = &c->options;
    char offload[32], schedule[32], recompute[32];
    choice_name(OFFLOAD_CHOICES, o->offload, offload, sizeof offload);
    printf("--batch %zu", o->B);
    if (o->ranks.world > 1) printf(" --zero %zu", o->ranks.stage);
    if (o->ranks.shard > 0 && o->ranks.stage > 0) printf(" --shard %zu", o->ranks.shard);
    if (asked->tensor.tp > 1) printf(" --tp %zu", asked->tensor.tp);
    if (o->ranks.leaves > 0 && o->ranks.leaves != asked->tensor.tp) printf(" --leaves %zu", o->ranks.leaves);
    if (asked->context.cp > 1) printf(" --cp %zu", asked->context.cp);
    if (max_size(o->ranks.row_leaves, 1) != asked->context.cp) printf(" --row-leaves %zu", o->ranks.row_leaves);
    if (o->ranks.kv_copies > 1) printf(" --kv-copies %zu", o->ranks.kv_copies);
    if (asked->pipeline.pp > 1) {
        choice_name(PIPELINE_NAMES, o->pipeline.kind, schedule, sizeof schedule);
        printf(" --pp %zu --pipeline %s", o->ranks.pp, schedule);
        if (o->pipeline.chunks > 1) printf(" --chunks %zu", o->pipeline.chunks);
    }
    printf(" --optimizer %s", OPTIMIZERS[o->optimizer.kind].name);
    if (!FLOATX_IS_FLOAT) printf(" --masters %s", o->optimizer.master_weights ? "on" : "off");
    if (o->B < asked->options.B) printf(" --total-batch %.0f", tokens);  // the same step in more micro-batches
    choice_name(RECOMPUTE_NAMES, o->recompute, recompute, sizeof recompute);
    if (o->recompute) printf(" --recompute %s", recompute);
    else if (c->recomputes) printf(" --recompute auto --memory %g", memory_gb);
    if (o->offload) printf(" --offload %s%s", offload, device_is_host() ? " --offload-dir DIR" : "");
    printf("\n");
}

// Plans one combination; false if it does not exist, as when there is nothing to offload.
static bool choice_plan(Choice* c, const Model* asked, const PlanOptions* o, const Rates* rates, size_t sequences) {
    Model model;
    Error ignored;
    if (!model_plan(&model, &asked->config, c->options, &ignored)) return false;
    int offload = c->options.offload;
    bool exists = (!(offload & OFFLOAD_OPTIMIZER) || offload_total(&model.flat.offloaded.store) > 0) &&
                  (!(offload & OFFLOAD_ACTIVATIONS) || offload_blocks_bytes(&model.offloaded) > 0);
    c->bytes = fullest_bytes(&c->options, asked, o, false);
    c->recomputes = c->bytes > 1e9 * o->memory_gb;
    if (c->recomputes && model.pipeline.table.splits) exists = false;
    bool together = ranks_of_rows(&c->options.ranks) > 1;
    if (exists && c->recomputes && !together) {
        plan_recompute(&model, o);
        c->bytes = fullest_bytes(&c->options, asked, o, true);
    }
    // Ranks that share a micro-batch recompute the same: the first level that fits, or the last.
    for (int level = RECOMPUTE_NORMS; level <= RECOMPUTE_BLOCK && exists && c->recomputes && together; level++) {
        model_free(&model);
        c->options.recompute = (RecomputeLevel)level;
        if (!model_plan(&model, &asked->config, c->options, &ignored)) return false;
        c->bytes = fullest_bytes(&c->options, asked, o, false);
        if (c->bytes <= 1e9 * o->memory_gb) break;
    }
    c->ms = step_ms(&model, rates, sequences / c->options.B);
    model_free(&model);
    return exists;
}

// Plans the combinations for steps of as many sequences per rank as the flags ask for; returns how many there are.
// Offloading is tried only where something does not fit without it.
static size_t choices_plan(Choice* choices, const Model* asked, const PlanOptions* o, const Rates* rates,
                           size_t sequences) {
    size_t count = 0, forms = FLOATX_IS_FLOAT ? 4 : 8;
    bool shards = asked->flat.stage_world > 1 || asked->pipeline.pp > 1;
    size_t stages = !shards ? 1 : asked->pipeline.pp > 1 ? 2 : 4;  // of ZeRO
    bool all_fits = false;
    Progress progress = progress_begin("planning", min_size(sequences, CHOICE_B_MAX));
    for (size_t b = 1; b <= min_size(sequences, CHOICE_B_MAX); b++) {
        progress_show(&progress, b);
        for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
            if (sequences % b || !choice_of_optimizer((OptimizerKind)kind, asked->options.optimizer.kind)) continue;
            for (size_t i = 0; i < stages * forms && count < CHOICES_MAX; i++) {
                Choice* c = &choices[count];
                c->options = asked->options;
                c->options.B = b;
                c->options.pipeline.micro_batches = sequences / b;
                c->options.optimizer.kind = (OptimizerKind)kind;
                c->options.optimizer.master_weights = i % forms < 4;
                c->options.ranks.stage = i / forms;
                if (asked->options.ranks.shard > 0 && c->options.ranks.stage == 0) continue;
                c->options.recompute = RECOMPUTE_NONE;
                c->options.offload = (int)(i % 4);
                if ((i % 4 > 0 && all_fits) || !choice_plan(c, asked, o, rates, sequences)) continue;
                if (i % 4 == 0) all_fits = !c->recomputes;
                count++;
            }
        }
    }
    progress_end(&progress);
    return count;
}

// Lists the combinations that fit --memory, fastest first.
static bool show_choices(const Model* asked, const PlanOptions* o, const Rates* rates, Error* error) {
    Choice* choices = (Choice*)memory_allocate(CHOICES_MAX * sizeof(Choice));
    if (choices == NULL) return fail_with(error, "out of memory for the list of what fits");
    size_t sequences = asked->options.B * o->micro_batches, fits = 0, nearest = 0;
    size_t count = choices_plan(choices, asked, o, rates, sequences);
    double tokens = (double)(sequences * asked->options.T * asked->flat.dp_world);
    qsort(choices, count, sizeof(Choice), choice_compare);
    for (size_t i = 0; i < count; i++) {
        const Choice* c = &choices[i];
        if (c->bytes < choices[nearest].bytes) nearest = i;
        if (c->bytes > 1e9 * o->memory_gb) continue;
        if (fits++ == 0)
            printf("\n  steps of %.0f tokens within %g GB\n  %10s %12s %10s  %s\n", tokens, o->memory_gb, "GB",
                   "ms per step", "tokens/s", "flags");
        if (fits > CHOICES_SHOWN) continue;
        printf("  %10.3f %12.1f %10.0f  ", 1e-9 * c->bytes, c->ms, 1e3 * tokens / c->ms);
        choice_print(c, asked, o->memory_gb, tokens);
    }
    if (fits > CHOICES_SHOWN) printf("  and %zu slower ones\n", fits - CHOICES_SHOWN);
    if (count == 0) printf("  nothing fits in %g GB with this --pipeline; choose 1f1b\n", o->memory_gb);
    else if (fits == 0) {
        double least = choices[nearest].bytes;
        printf("  nothing fits in %g GB; the nearest needs %.3f GB: ", o->memory_gb, 1e-9 * least);
        choice_print(&choices[nearest], asked, ceil(1e-6 * least + 1) * 1e-3, tokens);
    }
    free(choices);
    return fits > 0 || fail_with(error, "no flags fit --memory %g; make --total-batch, --seq or the model smaller, or "
                                 "--memory larger", o->memory_gb);
}

// ------------------------------------------------------------------------------------------------
// A cluster of GPUs

typedef struct {
    uint64_t gpus, islands;
    const char *gpu, *network;
    double watts, mtbf, price, internet;  // of a GPU: limit, hours between failures, price of an hour; Gbit/s
} ClusterOptions;

#define CLUSTER_FLAGS(o) \
    FLAG_HEADING("A cluster of GPUs: layouts, failures, cost"), \
    FLAG_COUNT("gpus", &(o)->gpus, 0, 0, 1048576, FLAG_FREE, \
               "GPUs to plan for, in machines of 8; 0: plan for --ranks with the measured or given rates"), \
    FLAG_TEXT("gpu", &(o)->gpu, "H100", "NAME", FLAG_FREE, "their name: A100, H100, H200, B200 ..."), \
    FLAG_REAL("gpu-watts", &(o)->watts, 0, 0, 10000, FLAG_FREE, "power limit of a GPU; 0: that of its data sheet"), \
    FLAG_TEXT("network", &(o)->network, "400", "G[,N,X]", FLAG_FREE, \
              "network of a GPU in Gbit/s[, GPUs of a pod, by what the rate between pods is divided]"), \
    FLAG_REAL("gpu-mtbf", &(o)->mtbf, 50700, 1, 1e9, FLAG_FREE, \
              "mean time between failures of one GPU in hours; default: as in Llama 3's training"), \
    FLAG_REAL("gpu-price", &(o)->price, 2, 0, 1e6, FLAG_FREE, "price of an hour of a GPU"), \
    FLAG_COUNT("islands", &(o)->islands, 1, 1, 4096, FLAG_FREE, \
               "clusters of --gpus that train together over the internet by DiLoCo"), \
    FLAG_REAL("internet", &(o)->internet, 1, 0.001, 1e5, FLAG_FREE, "Gbit/s between them, for each cluster")

static bool cluster_of_flags(Cluster* c, const ClusterOptions* o, Error* error) {
    unsigned long long pod = 0;
    double rate, between = 1;
    char rest;
    int count = sscanf(o->network, "%lf,%llu,%lf%c", &rate, &pod, &between, &rest);
    if ((count != 1 && count != 3) || !(rate > 0 && rate < 1e6) || !(between >= 1 && between < 1e6))
        return fail_with(error, "--network is '%s'; give Gbit/s of a GPU, then optionally the GPUs of a pod and by "
                         "what the rate between pods is divided, as in 400 or 400,3072,7", o->network);
    if (!cluster_open(c, o->gpu, error)) return false;
    c->network = rate / 8;
    if (count == 3) c->pod = (size_t)pod, c->oversubscription = between;
    if (o->watts > 0) c->watts = o->watts;
    if (o->gpus < c->machine) c->machine = o->gpus;
    return true;
}

// The model and the batch of the flags; no memory is planned on this machine.
static bool cluster_model(ClusterModel* m, Options* o, Flags* flags, Error* error) {
    memset(m, 0, sizeof *m);
    if (!config_choose(&m->config, o->model, &o->config, flags, error)) return false;
    m->T = o->seq ? o->seq : m->config.context;
    if (m->config.context < m->T) m->config.context = m->T;
    if (m->config.vocab == 0) return fail_with(error, "--gpus needs --vocab, or --model");
    if (!config_complete(&m->config, error)) return false;
    m->sequences = o->total_batch / m->T;
    return (m->sequences > 0 && m->sequences * m->T == o->total_batch) ||
        fail_with(error, "--gpus needs --total-batch, the tokens of a step, as a multiple of --seq, %zu", m->T);
}

static void cluster_choice_print(const ClusterChoice* c) {
    char kind[32], level[32];
    const ClusterLayout* l = &c->layout;
    const ClusterStep* s = &c->step;
    printf("  %10.1f %6.1f %6.1f %7.1f %5.1f %5.1f %5.1f  --tp %zu --cp %zu --pp %zu --dp %zu", s->ms, 100 * s->mfu,
           1e-9 * s->bytes, 100 * s->bubble_ms / s->ms, 100 * s->tp_ms / s->ms, 100 * s->cp_ms / s->ms,
           100 * s->dp_ms / s->ms, l->tp, l->cp, l->pp, l->dp);
    choice_name(PIPELINE_NAMES, l->kind, kind, sizeof kind);
    choice_name(RECOMPUTE_NAMES, l->recompute, level, sizeof level);
    if (l->pp > 1) printf(" --pipeline %s", kind);
    if (l->chunks > 1) printf(" --chunks %zu", l->chunks);
    printf(" --batch %zu --zero %zu", l->B, l->zero);
    if (l->shard) printf(" --shard %zu", l->shard);
    printf(" --recompute %s\n", level);
}

// Prints what a run of `steps` steps takes on the fastest layout.
static void show_months(const ClusterChoice* c, const Cluster* cluster, const ClusterModel* m, const ClusterOptions* o,
                        double steps) {
    double gpus = (double)o->gpus, P = cluster_parameters(&m->config), bytes = (12 + COST_X) * P;
    // A checkpoint is copied to host memory over PCIe, at 25 GB/s, with a second for all ranks to meet, then written
    // at 0.12 GB/s for each GPU: Llama 3's storage took 2 TB/s of 16,384. A restart takes ten minutes.
    Goodput g = goodput_of(gpus, o->mtbf, 1 + bytes / gpus / 25e9, bytes / gpus / 0.12e9, 600);
    double hours = g.share > 0 ? steps * c->step.ms / 3.6e6 / g.share : INFINITY;
    printf("\n  a GPU fails every %.1f hours: with a checkpoint of %.2f TB every %.1f minutes, %.1f%% of the time is "
           "training\n", g.mtbf_s / 3600, 1e-12 * bytes, g.every_s / 60, 100 * g.share);
    printf("  %.0f steps, %.3g tokens: %.1f days, %.3g GPU hours, %.4g at %g an hour, %.4g MWh\n", steps,
           steps * (double)(m->sequences * m->T), hours / 24, hours * gpus, hours * gpus * o->price, o->price,
           1e-6 * hours * gpus * cluster->watts);
    for (double H = 50; o->islands > 1 && H <= 500; H *= H < 100 ? 2 : 5)
        printf("  %llu clusters that average every %.0f steps at %g Gbit/s: %.1f%% of the time is training\n",
               (unsigned long long)o->islands, H, o->internet,
               100 * islands_share(P, (double)o->islands, o->internet / 8, H, c->step.ms));
}

// Lists the fastest layouts, and what a run takes.
static bool show_cluster(const ClusterOptions* c, Options* o, Flags* flags, Error* error) {
    Cluster cluster;
    ClusterModel model;
    size_t count;
    if (!cluster_of_flags(&cluster, c, error) || !cluster_model(&model, o, flags, error)) return false;
    ClusterChoice* choices = (ClusterChoice*)memory_allocate(CLUSTER_CHOICES * sizeof(ClusterChoice));
    if (choices == NULL) {
        fail_with(error, "out of memory for the list of layouts");
        return fail_as(error, ERROR_PROCESS);
    }
    double limit = o->plan.memory_gb > 0 ? o->plan.memory_gb : 0.95 * cluster.gpu.memory_gb;
    bool found = cluster_search(choices, &count, &cluster, &model, &o->layout, c->gpus, limit, error);
    if (found) {
        printf("%.4g parameters, steps of %zu sequences of %zu tokens on %llu GPUs (%s, %.4g TFLOP/s, %.4g GB, %.4g "
               "W)\n\n", cluster_parameters(&model.config), model.sequences, model.T, (unsigned long long)c->gpus,
               c->gpu, cluster.gpu.bf16, limit, cluster.watts);
        printf("  %10s %6s %6s %7s %5s %5s %5s  layout\n", "ms", "MFU %", "GB", "bubble%", "tp%", "cp%", "dp%");
        for (size_t i = 0; i < min_size(count, CHOICES_SHOWN); i++) cluster_choice_print(&choices[i]);
        show_months(&choices[0], &cluster, &model, c, (double)o->schedule.steps);
    }
    free(choices);
    return found;
}

// ------------------------------------------------------------------------------------------------

// Prints what follows the plan of ./train --plan. given: the rates, otherwise they are measured here.
static bool show_predictions(Rates* rates, bool given, const Model* model, const PlanOptions* o, Error* error) {
    show_optimizers(model);
    if (model->flat.options.world > 1 && !show_stages(model, o, error)) return false;
    if (given || device_is_host())
        return show_time(rates, given, model, o, error) && (o->memory_gb == 0 || show_choices(model, o, rates, error));
    printf("  give --rate, the rates of this GPU, for times and what fits (H100, bf16: about 500000,2500)\n");
    return o->needs_gb <= o->memory_gb || o->memory_gb == 0;  // the error is that of plan_show
}

int main(int argc, char** argv) {
    Run run = {0};
    Options o;
    Rates rates;
    Launch launch;
    Error error;
    const char* rate;
    ClusterOptions cluster;
    int code;
    const Flag own[] = {
        FLAG_HEADING("Prediction; all other flags are the same as for ./train"),
        FLAG_TEXT("rate", &rate, NULL, "F,M[,N[,O]]", FLAG_FREE,
                  "speed of one rank: matmul GFLOP/s, memory GB/s[, network GB/s[, offload GB/s]]; default: measured "
                  "on this CPU, 1 GB/s for offloading"),
        CLUSTER_FLAGS(&cluster),
    };
    threads_spin_briefly(argv);
    files_open_standard();
    launch_alone(&launch);
    Flags flags = flags_of(own, sizeof own / sizeof own[0]);
    options_flags(&flags, &o);
    run.options = &o.run;
    const char* title = "plan: predicts the memory and the time of a step of ./train (" FLOATX_NAME " build); with "
                        "--memory, lists the flags that fit, fastest first.";
    if (!flags_begin(&code, "plan", title, &flags, argc, argv)) return code;
    o.plan.show = true;
    if (cluster.gpus > 0) {
        bool shown = show_cluster(&cluster, &o, &flags, &error);
        if (!shown && error.kind != ERROR_PROCESS) fail_as(&error, ERROR_USAGE);
        if (shown && output_written(&error)) return 0;
        launch_report(&launch, "plan", error.text);
        return error.kind == ERROR_USAGE ? 2 : 1;
    }
    threads_choose(o.threads, 1, false, NULL);
    bool ok = ((rate == NULL || rates_parse(&rates, rate, &error)) &&
               cadence_parse(&run.cadence, o.run.ckpt_every, o.run.mtbf, o.run.ckpt_async, &error) &&
               options_check(&o, &run.cadence, &error)) || fail_as(&error, ERROR_USAGE);
    ok = ok && run_join_plan(&launch, &o.layout.ranks, &error) &&
         (run_set_up(&run, &o, &flags, &error) || o.plan.needs_gb > o.plan.memory_gb) &&  // others may fit
         show_predictions(&rates, rate != NULL, &run.model, &o.plan, &error) && output_written(&error);
    if (!ok) launch_report(&launch, "plan", error.text);
    run_free(&run);
    return ok ? 0 : error.kind == ERROR_USAGE ? 2 : 1;
}
