// plan.h: what --plan prints: the memory of a rank line by line, which ZeRO stages fit, and within --memory the
// combinations of flags that fit, fastest first. Also what --recompute auto chooses.
//
//   PlanOptions o = {.micro_batches = 4, .snapshots = true};
//   plan_fit(&model, &o, &error) && plan_show(&model, &o, &error);      after model_plan, before anything is allocated
//
//   1. flags    for the plan, recomputation and offloading
//   2. memory   of a rank, and what fits it
//   3. stages   memory and traffic of each
//   4. choices  combinations of recomputation, ZeRO stage, optimizer, master weights, offloading and micro-batch
//   5. plan     all of it, line by line

#ifndef LLMTRAIN_PLAN_H
#define LLMTRAIN_PLAN_H

#include "predict.h"

// ------------------------------------------------------------------------------------------------
// 1. Flags

typedef struct {
    bool show;                 // print the plan instead of training
    double memory_gb;          // of a rank; 0: not given
    RecomputeLevel recompute;
    const char* rate;          // of the machine, see rates_parse; NULL: measured where that is needed
    int offload;               // what is kept in offload_dir, not in memory: OFFLOAD_OPTIMIZER, OFFLOAD_ACTIVATIONS
    const char* offload_dir;
    size_t micro_batches;      // of a step, on each rank
    bool snapshots;            // asynchronous saves take one
    bool hot;                  // in-memory copies are kept
    size_t program;            // bytes that the program uses before it allocates anything
} PlanOptions;

// Appends the flags of these options, and sets the defaults; returns the new number of flags.
static inline size_t plan_flags(Flag* flags, size_t count, PlanOptions* o) {
    const Flag table[] = {
        FLAG_HEADING("Memory"),
        FLAG_SWITCH("plan", &o->show, false, FLAG_FREE, "print the memory plan and exit"),
        FLAG_REAL("memory", &o->memory_gb, 0, 0, 1e6, FLAG_FREE,
                  "GB of memory per rank: with --recompute auto, the limit; with --plan, list the flags that fit, "
                  "fastest first"),
        FLAG_CHOICE("recompute", &o->recompute, RECOMPUTE_NONE, RECOMPUTE_NAMES, FLAG_LOCAL,
                    "activations to recompute in the backward pass: norms: outputs of norms; gelu: also of GELU or "
                    "SwiGLU; attention: also qkv and attention; block: all of a block but its input; auto: the "
                    "cheapest choice that fits --memory"),
        FLAG_TEXT("rate", &o->rate, NULL, "F,M[,R[,O]]", FLAG_FREE,
                  "with --plan: rates of a rank: GFLOP/s of matmuls, then GB/s of memory, between ranks, and of "
                  "offloading; default: measured on this CPU, 1 GB/s for offloading"),
        FLAG_CHOICE("offload", &o->offload, 0, OFFLOAD_CHOICES, FLAG_LOCAL,
                    "keep master weights and optimizer state, or the activations of the blocks, on a disk or, in GPU "
                    "builds, in host memory: same weights, slower"),
        FLAG_TEXT("offload-dir", &o->offload_dir, NULL, "DIR", FLAG_LOCAL,
                  "directory for --offload, on a fast disk of each machine; default in GPU builds: host memory"),
    };
    return flags_append(flags, count, table, sizeof table / sizeof(Flag));
}

static inline bool plan_options_check(const PlanOptions* o, Error* error) {
    Rates ignored;
    if (o->rate && !rates_parse(&ignored, o->rate, error)) return false;
    if (o->offload_dir && !o->offload) return fail_with(error, "--offload-dir needs --offload, what to keep there");
    if (o->offload && o->offload_dir == NULL && device_is_host())
        return fail_with(error, "--offload needs --offload-dir, a directory on a fast disk");
    return o->recompute != RECOMPUTE_AUTO || o->memory_gb > 0 ||
        fail_with(error, "--recompute auto needs --memory, the GB that each rank may use");
}

// ------------------------------------------------------------------------------------------------
// 2. Memory

// Bytes of the snapshot of asynchronous saves; an offloaded state has none (run_takes_snapshots).
static inline size_t plan_snapshot_bytes(const Model* model, const PlanOptions* o) {
    return o->snapshots && !flat_offloads(&model->flat) ? checkpoint_bytes(&model->flat) : 0;
}

// Bytes of the process outside the model's block of memory.
static inline size_t plan_bytes_outside(const Model* model, const PlanOptions* o) {
    size_t B = model->options.B, T = model->options.T;
    return plan_snapshot_bytes(model, o) + loader_bytes(B, T) + 3 * B * T * sizeof(int32_t) +
        (device_is_host() ? gemm_workspace_bytes((int)threads_count()) + o->program : 0);
}

// Total bytes of the process.
static inline size_t plan_bytes(const Model* model, const PlanOptions* o) {
    return model->memory.total + plan_bytes_outside(model, o) + comm_bytes(model->flat.options.world);
}

// The given rates, or defaults by which operations are compared with each other: only their ratios matter.
static inline Rates plan_rates(const PlanOptions* o) {
    Error ignored;
    Rates rates;
    rates_parse(&rates, o->rate ? o->rate : "300,25", &ignored);
    return rates;
}

// Chooses which operations run again in which block, so that the model takes `bytes` at most, with the least extra time
// at these rates; called before it is allocated. Where the blocks' activations take turns in memory (--offload), a
// single block that keeps less saves nothing: all use the same level, the first that fits. *missing: the bytes that it
// needs above that, whatever runs again.
static inline void model_recompute_within(Model* model, double* missing, double bytes, const Rates* rates) {
    BlockActivations* blocks = model->activations.blocks;
    BlockShape shape = model_block_shape(model);
    bool moves = model->offloaded.moved > 0;
    *missing = 1;
    // With every array kept, then as chosen.
    for (int pass = 0; pass < (moves ? RECOMPUTE_AUTO : 2) && (pass == 0 || !moves || *missing > 0); pass++) {
        double excess = pass ? (double)model->memory.total - bytes : 0;
        if (moves) blocks_recompute(blocks, model->config.layers, recompute_operations((RecomputeLevel)pass));
        else *missing = recompute_choose(blocks, model->config.layers, excess, &shape, rates);
        memset(&model->memory, 0, sizeof model->memory);
        model_layout(model);
        if (moves) *missing = fmax(0, (double)model->memory.total - bytes);
    }
}

// Chooses what the backward computes again, so that the process fits --memory; false if no choice fits.
static inline bool plan_recompute(Model* model, const PlanOptions* o) {
    double missing, outside = (double)(plan_bytes(model, o) - model->memory.total);
    Rates rates = plan_rates(o);
    model_recompute_within(model, &missing, 1e9 * o->memory_gb - outside, &rates);
    return missing == 0;
}

// After model_plan: with --recompute auto makes the model fit --memory.
static inline bool plan_fit(Model* model, PlanOptions* o, Error* error) {
    o->program = memory_peak();
    return o->recompute != RECOMPUTE_AUTO || plan_recompute(model, o) || o->show ||
           fail_with(
               error,
               "the run needs %.3f GB even with --recompute block, more than --memory %g; make --batch, --seq or the "
               "model smaller, or --memory larger",
               1e-9 * (double)plan_bytes(model, o), o->memory_gb);
}

// ------------------------------------------------------------------------------------------------
// 3. Stages

// The memory of a rank and the bytes that it sends in a step, for each stage and kind of reduction.
static inline bool plan_show_stages(const Model* planned, const PlanOptions* o, Error* error) {
    char fits[64] = "";
    printf("\n  %-10s %-10s %14s %22s\n", "--zero", "--reduce", "MB per rank", "MB sent per step");
    for (size_t i = 0; i < 6; i++) {
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
            snprintf(fits, sizeof fits, "--zero %zu --reduce %s", i / 2, reduce);
        model_free(&model);
    }
    if (!device_is_host()) printf("  A GPU's driver and NCCL take a few hundred MB more, which are not counted.\n");
    if (o->memory_gb > 0 && fits[0]) printf("  %s is the lowest stage that fits in %g GB\n", fits, o->memory_gb);
    if (o->memory_gb > 0 && fits[0] == 0)
        printf("  no stage fits in %g GB with these flags\n", o->memory_gb);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Choices

typedef struct {
    double bytes, ms;
    OptimizerKind optimizer;
    bool master_weights, recomputes;
    int offload;
    size_t stage, B;
} Choice;

enum { CHOICES_MAX = 4096, CHOICES_SHOWN = 12, CHOICE_B_MAX = 1024 };

static inline int choice_compare(const void* a, const void* b) {
    const Choice *x = (const Choice*)a, *y = (const Choice*)b;
    if (x->ms != y->ms) return x->ms < y->ms ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// Whether an optimizer is an alternative to that of the flags: the same method with other states.
static inline bool choice_of_optimizer(OptimizerKind kind, OptimizerKind asked) {
    const char *name = OPTIMIZERS[kind].name, *wanted = OPTIMIZERS[asked].name;
    return kind == asked || (strncmp(wanted, "adamw", 5) == 0 && strncmp(name, "adamw", 5) == 0);
}

static inline void choice_flags(char* text, size_t bytes, const Choice* c, const Model* asked, double memory_gb,
                                double tokens) {
    size_t n = (size_t)snprintf(text, bytes, "--batch %zu", c->B);
    if (asked->flat.options.world > 1) n += (size_t)snprintf(text + n, bytes - n, " --zero %zu", c->stage);
    n += (size_t)snprintf(text + n, bytes - n, " --optimizer %s", OPTIMIZERS[c->optimizer].name);
    if (!FLOATX_IS_FLOAT)
        n += (size_t)snprintf(text + n, bytes - n, " --masters %s", c->master_weights ? "on" : "off");
    if (c->B < asked->options.B)  // more micro-batches than were asked for, for the same step
        n += (size_t)snprintf(text + n, bytes - n, " --total-batch %.0f", tokens);
    if (c->recomputes) n += (size_t)snprintf(text + n, bytes - n, " --recompute auto --memory %g", memory_gb);
    char offloaded[32];
    choice_name(OFFLOAD_CHOICES, c->offload, offloaded, sizeof offloaded);
    if (c->offload) n += (size_t)snprintf(text + n, bytes - n, " --offload %s", offloaded);
    if (c->offload && device_is_host()) snprintf(text + n, bytes - n, " --offload-dir DIR");
}

// Plans one combination; false if it does not exist, as when there is nothing to offload.
static inline bool choice_plan(Choice* c, const Model* asked, const PlanOptions* o, const Rates* rates,
                               size_t sequences) {
    Model model;
    Error ignored;
    ModelOptions options = asked->options;
    options.B = c->B;
    options.optimizer = c->optimizer;
    options.master_weights = c->master_weights;
    options.ranks.stage = c->stage;
    options.recompute = RECOMPUTE_NONE;
    options.offload = c->offload;
    if (!model_plan(&model, &asked->config, options, &ignored)) return false;
    if (((c->offload & OFFLOAD_OPTIMIZER) && offload_total(&model.flat.offloaded.store) == 0) ||
        ((c->offload & OFFLOAD_ACTIVATIONS) && offload_blocks_bytes(&model.offloaded) == 0)) {
        model_free(&model);
        return false;
    }
    c->recomputes = (double)plan_bytes(&model, o) > 1e9 * o->memory_gb;
    if (c->recomputes) plan_recompute(&model, o);
    c->bytes = (double)plan_bytes(&model, o);
    c->ms = step_ms(&model, rates, sequences / c->B);
    model_free(&model);
    return true;
}

// Finds the rates of a rank, given or measured; prints them, and the time of a step that they predict.
static inline bool plan_show_time(Rates* rates, const Model* model, const PlanOptions* o, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    BlockShape shape = model_block_shape(model);
    *rates = plan_rates(o);
    if (o->rate == NULL) {
        if (!rates_measure(rates, &shape, error)) return false;
        rates_divide(rates, ranks->world);  // the ranks that are started here
    }
    printf("\n  rates of a rank, %s: matmuls %.1f GFLOP/s, the rest %.1f, memory %.1f GB/s",
           o->rate ? "given" : "measured", 1e-9 * rates->matmul, 1e-9 * rates->other, 1e-9 * rates->memory);
    if (ranks->world > 1) printf(", between ranks %.2f GB/s", 1e-9 * rates->comm);
    printf(", offloading %.2f GB/s", 1e-9 * rates->offload);
    printf("\n  a step with these flags: %.3f GB, %.1f ms predicted\n", 1e-9 * (double)plan_bytes(model, o),
           step_ms(model, rates, o->micro_batches));
    if (offload_blocks_bytes(&model->offloaded) > 0)
        printf("  %.1f ms of that is spent waiting for offloaded activations; at %.3g GB/s none would be\n",
               offload_wait_ms(model, rates) * (double)o->micro_batches, 1e-9 * offload_rate_hidden(model, rates));
    return true;
}

// Lists the combinations that fit --memory, for steps of as many tokens as the flags ask for, fastest first. Offloading
// is tried only where something does not fit without it.
static inline bool plan_show_choices(const Model* asked, const PlanOptions* o, const Rates* rates, Error* error) {
    Choice* choices = (Choice*)memory_allocate(CHOICES_MAX * sizeof(Choice));
    if (choices == NULL) return fail_with(error, "out of memory for the list of what fits");
    const RankOptions* ranks = &asked->flat.options;
    size_t sequences = asked->options.B * o->micro_batches, count = 0, fits = 0, nearest = 0;
    double tokens = (double)(sequences * asked->options.T * ranks->world);
    bool all_fits = false;
    char flags[256];
    for (size_t b = 1; b <= min_size(sequences, CHOICE_B_MAX); b++) {
        for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
            if (sequences % b || !choice_of_optimizer((OptimizerKind)kind, asked->options.optimizer)) continue;
            for (size_t stage = 0; stage < (ranks->world > 1 ? 3 : 1); stage++)
                for (int form = 0; form < (FLOATX_IS_FLOAT ? 4 : 8) && count < CHOICES_MAX; form++) {
                    Choice c = {0, 0, (OptimizerKind)kind, form < 4, false, form % 4, stage, b};
                    if (c.offload && all_fits) continue;
                    if (!choice_plan(&c, asked, o, rates, sequences)) continue;
                    if (c.offload == 0) all_fits = !c.recomputes;
                    choices[count++] = c;
                }
        }
    }
    qsort(choices, count, sizeof(Choice), choice_compare);
    for (size_t i = 0; i < count; i++) {
        if (choices[i].bytes < choices[nearest].bytes) nearest = i;
        if (choices[i].bytes > 1e9 * o->memory_gb) continue;
        if (fits++ == 0)
            printf("\n  steps of %.0f tokens within %g GB\n  %10s %12s %10s  %s\n", tokens, o->memory_gb, "GB",
                   "ms per step", "tokens/s", "flags");
        if (fits > CHOICES_SHOWN) continue;
        choice_flags(flags, sizeof flags, &choices[i], asked, o->memory_gb, tokens);
        printf("  %10.3f %12.1f %10.0f  %s\n", 1e-9 * choices[i].bytes, choices[i].ms, 1e3 * tokens / choices[i].ms,
               flags);
    }
    if (fits > CHOICES_SHOWN) printf("  and %zu slower ones\n", fits - CHOICES_SHOWN);
    double least = choices[nearest].bytes;
    choice_flags(flags, sizeof flags, &choices[nearest], asked, ceil(1e-6 * least + 1) * 1e-3, tokens);
    if (fits == 0)
        printf("  nothing fits in %g GB; the nearest needs %.3f GB: %s\n", o->memory_gb, 1e-9 * least, flags);
    free(choices);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 5. Plan

// Prints how much is offloaded, to disk or to host memory, and how much of it moves in a step.
static inline void plan_show_offload(const Model* model, const PlanOptions* o) {
    double state = (double)offload_total(&model->flat.offloaded.store);
    double blocks = (double)(offload_blocks_bytes(&model->offloaded) * o->micro_batches);
    printf("  %-34s %12.2f\n", o->offload_dir ? "in --offload-dir" : "in host memory",
           1e-6 * (state + (double)offload_total(&model->offloaded.store)));
    printf("  %-34s %12.2f\n", "offloaded: read per step", 1e-6 * (state + blocks));
    printf("  %-34s %12.2f\n", "offloaded: written per step", 1e-6 * (state + blocks));
    if (state > 0)
        printf("  Each step waits for %s, %.2f s at 1 GB/s; a larger --total-batch makes that a smaller part of the "
               "run.\n",
               blocks > 0 ? "the optimizer state" : "them", 2e-9 * state);
    if (blocks > 0)
        printf("  Transfers of activations overlap with computation; --rate or --memory shows how long steps wait for "
               "them.\n");
    else if (o->offload & OFFLOAD_ACTIVATIONS)
        printf("  No activations are offloaded: memory holds those of three blocks, and no others have to wait.\n");
}

// Prints the state per parameter that each optimizer would keep for this model, over all ranks.
static inline void plan_show_optimizers(const Model* model) {
    const Parameters* p = &model->parameters;
    printf("  optimizer state in bytes per parameter:");
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
        double bytes = 0;
        for (size_t i = 0; i < p->count; i++)
            bytes += p->tensors[i].trains ? optimizer_state_bytes((OptimizerKind)kind, &p->tensors[i].shape,
                                                                  model->flat.holds.optimizer_rank) : 0;
        printf("%s %s %.2f", kind ? "," : "", OPTIMIZERS[kind].name, bytes / (double)p->true_size);
    }
    printf("\n");
}

// Prints the plan of a model that model_plan has laid out.
static inline bool plan_show(const Model* model, const PlanOptions* o, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    size_t B = model->options.B, T = model->options.T;
    const char* const reductions[] = {"fp32", FLOATX_NAME, "64-bit fixed point"};  // by ReduceKind
    if (ranks->world > 1)
        printf("rank 0 of %zu, --zero %zu, gradients reduced in %s\n", ranks->world, ranks->stage,
               reductions[ranks->reduce]);
    arena_print(stdout, &model->memory);
    plan_show_optimizers(model);
    printf("  %-34s %12.2f\n", "outside: batches", 1e-6 * (double)(loader_bytes(B, T) + 3 * B * T * sizeof(int32_t)));
    size_t snapshot = plan_snapshot_bytes(model, o);
    if (snapshot) printf("  %-34s %12.2f\n", "outside: snapshot", 1e-6 * (double)snapshot);
    if (o->hot)  // two that are kept, and one that is being written
        printf("  %-34s %12.2f\n", "in --ckpt-hot-dir: three copies", 3e-6 * (double)checkpoint_bytes(&model->flat));
    if (device_is_host()) {
        printf("  %-34s %12.2f\n", "outside: matmul workspace",
               1e-6 * (double)gemm_workspace_bytes((int)threads_count()));
        printf("  %-34s %12.2f\n", "outside: the program", 1e-6 * (double)o->program);
    }
    if (o->offload) plan_show_offload(model, o);
    Rates rates = plan_rates(o);
    double again = model_recompute_ms(model, &rates) * (double)o->micro_batches;
    if (again > 0)
        printf("  recomputation: %+.1f%% of the time of a step, predicted\n",
               100 * again / (step_ms(model, &rates, o->micro_batches) - again));
    if (ranks->world > 1) {
        printf("  %-34s %12.2f\n", "outside: comm buffers", 1e-6 * (double)comm_bytes(ranks->world));
        if (!plan_show_stages(model, o, error)) return false;
    }
    if (o->memory_gb == 0 && o->rate == NULL) return true;
    if (o->rate == NULL && !device_is_host()) {
        printf("  give --rate, the rates of this GPU, to list what fits (H100, bf16: about 500000,2500)\n");
        return true;
    }
    if (!plan_show_time(&rates, model, o, error)) return false;
    return o->memory_gb == 0 || plan_show_choices(model, o, &rates, error);
}

#endif  // LLMTRAIN_PLAN_H
