// plan.cu: how long a step of training will take, and which flags fit a memory, before anything runs.
//
//   make build/plan && build/plan --model gpt2:124M --seq 1024 --batch 4 --memory 8
//   build/plan --model llama:1B --seq 2048 --batch 1 --ranks 64 --memory 80 --rate 300000,2000,50
//
// It contains the trainer, so it takes the same flags, and prints what ./train --plan prints; then the state of each
// optimizer, the memory of each ZeRO stage, the predicted time of a step and, with --memory, the combinations of flags
// that fit, fastest first. Exit code: 0 done; 1 something failed; 2 a flag is wrong.

#include "predict.h"

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

// Prints the memory of a rank and the bytes that it sends in a step, for each stage and kind of reduction.
static bool show_stages(const Model* planned, const PlanOptions* o, Error* error) {
    char fits[64] = "";
    printf("\n  %-10s %-10s %14s %22s\n", "--zero", "--reduce", "MB per rank", "MB sent per step");
    for (size_t i = 0; i < 8; i++) {
        Model model;
        ModelOptions options = planned->options;
        options.ranks.stage = i / 2;
        options.ranks.reduce = i % 2 ? REDUCE_FLOAT : REDUCE_EXACT;
        if (!model_plan(&model, &planned->config, options, error)) return false;
        if (o->recompute == RECOMPUTE_AUTO) plan_recompute(&model, o);
        size_t bytes = plan_bytes(&model, o);
        const char* reduce = i % 2 ? "float" : "exact";
        printf("  %-10zu %-10s %14.2f %22.2f\n", i / 2, reduce, 1e-6 * (double)bytes,
               1e-6 * (double)flat_bytes_sent(&model.flat, o->micro_batches));
        if (fits[0] == 0 && 1e-9 * (double)bytes <= o->memory_gb)
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
    printf("\n  a step with these flags: %.3f GB, %.1f ms predicted\n", 1e-9 * (double)plan_bytes(model, o), ms);
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
    char offload[32];
    choice_name(OFFLOAD_CHOICES, o->offload, offload, sizeof offload);
    printf("--batch %zu", o->B);
    if (o->ranks.world > 1) printf(" --zero %zu", o->ranks.stage);
    if (o->ranks.shard > 0 && o->ranks.stage > 0) printf(" --shard %zu", o->ranks.shard);
    printf(" --optimizer %s", OPTIMIZERS[o->optimizer.kind].name);
    if (!FLOATX_IS_FLOAT) printf(" --masters %s", o->optimizer.master_weights ? "on" : "off");
    if (o->B < asked->options.B) printf(" --total-batch %.0f", tokens);  // the same step in more micro-batches
    if (c->recomputes) printf(" --recompute auto --memory %g", memory_gb);
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
    c->recomputes = (double)plan_bytes(&model, o) > 1e9 * o->memory_gb;
    if (c->recomputes) plan_recompute(&model, o);
    c->bytes = (double)plan_bytes(&model, o);
    c->ms = step_ms(&model, rates, sequences / c->options.B);
    model_free(&model);
    return exists;
}

// Plans the combinations for steps of as many sequences per rank as the flags ask for; returns how many there are.
// Offloading is tried only where something does not fit without it.
static size_t choices_plan(Choice* choices, const Model* asked, const PlanOptions* o, const Rates* rates,
                           size_t sequences) {
    size_t count = 0, stages = asked->flat.options.world > 1 ? 4 : 1, forms = FLOATX_IS_FLOAT ? 4 : 8;
    bool all_fits = false;
    for (size_t b = 1; b <= min_size(sequences, CHOICE_B_MAX); b++)
        for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
            if (sequences % b || !choice_of_optimizer((OptimizerKind)kind, asked->options.optimizer.kind)) continue;
            for (size_t i = 0; i < stages * forms && count < CHOICES_MAX; i++) {
                Choice* c = &choices[count];
                c->options = asked->options;
                c->options.B = b;
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
    return count;
}

// Lists the combinations that fit --memory, fastest first.
static bool show_choices(const Model* asked, const PlanOptions* o, const Rates* rates, Error* error) {
    Choice* choices = (Choice*)memory_allocate(CHOICES_MAX * sizeof(Choice));
    if (choices == NULL) return fail_with(error, "out of memory for the list of what fits");
    size_t sequences = asked->options.B * o->micro_batches, fits = 0, nearest = 0;
    size_t count = choices_plan(choices, asked, o, rates, sequences);
    double tokens = (double)(sequences * asked->options.T * asked->flat.options.world);
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
    if (fits == 0) {
        double least = choices[nearest].bytes;
        printf("  nothing fits in %g GB; the nearest needs %.3f GB: ", o->memory_gb, 1e-9 * least);
        choice_print(&choices[nearest], asked, ceil(1e-6 * least + 1) * 1e-3, tokens);
    }
    free(choices);
    return true;
}

// ------------------------------------------------------------------------------------------------

// Prints what follows the plan of ./train --plan. given: the rates, otherwise they are measured here.
static bool show_predictions(Rates* rates, bool given, const Model* model, const PlanOptions* o, Error* error) {
    show_optimizers(model);
    if (model->flat.options.world > 1 && !show_stages(model, o, error)) return false;
    if (given || device_is_host())
        return show_time(rates, given, model, o, error) && (o->memory_gb == 0 || show_choices(model, o, rates, error));
    printf("  give --rate, the rates of this GPU, for times and what fits (H100, bf16: about 500000,2500)\n");
    return true;
}

int main(int argc, char** argv) {
    Run run = {0};
    Options o;
    Rates rates;
    Launch launch;
    Error error;
    const char* rate;
    int code;
    const Flag own[] = {
        FLAG_HEADING("Prediction; all other flags are the same as for ./train"),
        FLAG_TEXT("rate", &rate, NULL, "F,M[,N[,O]]", FLAG_FREE,
                  "speed of one rank: matmul GFLOP/s, memory GB/s[, network GB/s[, offload GB/s]]; default: measured "
                  "on this CPU, 1 GB/s for offloading"),
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
    threads_choose(o.threads, 1, false, NULL);
    bool ok = ((rate == NULL || rates_parse(&rates, rate, &error)) &&
               cadence_parse(&run.cadence, o.run.ckpt_every, o.run.mtbf, o.run.ckpt_async, &error) &&
               options_check(&o, &run.cadence, &error)) || fail_as(&error, ERROR_USAGE);
    ok = ok && run_join_plan(&launch, &o.layout.ranks, &error) && run_set_up(&run, &o, &flags, &error) &&
         show_predictions(&rates, rate != NULL, &run.model, &o.plan, &error) && output_written(&error);
    if (!ok) launch_report(&launch, "plan", error.text);
    run_free(&run);
    return ok ? 0 : error.kind == ERROR_USAGE ? 2 : 1;
}
