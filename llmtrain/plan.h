// plan.h: what --plan prints: the memory of a rank line by line, and which ZeRO stages fit.
//
//   PlanOptions o = {.micro_batches = 4, .snapshots = true};
//   plan_show(&model, &o, &error);                               after model_plan, before anything is allocated

#ifndef LLMTRAIN_PLAN_H
#define LLMTRAIN_PLAN_H

#include "../llmtrain.h"

typedef struct {
    bool show;                 // print the plan instead of training
    double memory_gb;          // of a rank; 0: not given
    RecomputeLevel recompute;
    size_t micro_batches;      // of a step, on each rank
    bool snapshots;            // asynchronous saves take one
    bool hot;                  // copies in memory are kept
} PlanOptions;

// Appends the flags of these, and sets the defaults; returns the new number of flags.
static inline size_t plan_flags(Flag* flags, size_t count, PlanOptions* o) {
    const Flag table[] = {
        FLAG_HEADING("Memory"),
        SWITCH_FLAG("plan", &o->show, false, FLAG_FREE, "print the memory plan and exit"),
        REAL_FLAG("memory", &o->memory_gb, 0, 0, 1e6, FLAG_FREE,
                  "GB per rank: with --recompute auto what the run may take; with --plan also names the lowest ZeRO "
                  "stage that fits"),
        CHOICE_FLAG("recompute", &o->recompute, RECOMPUTE_NONE, RECOMPUTE_NAMES, FLAG_LOCAL,
                    "activations that the backward computes again instead of keeping them, each with those before it: "
                    "outputs of norms, of GELU or SwiGLU, attention, all of a block but its input; auto: what is "
                    "cheapest for --memory"),
    };
    return flags_append(flags, count, table, sizeof table / sizeof(Flag));
}

static inline bool plan_options_check(const PlanOptions* o, Error* error) {
    return o->recompute != RECOMPUTE_AUTO || o->memory_gb > 0 ||
        fail(error, "--recompute auto needs --memory, the GB that each rank may take");
}

// Bytes of the process outside the model's block, if the model is this one: what the program takes before it allocates
// anything, and what it allocates besides.
static inline size_t plan_bytes_outside(const Model* model, const PlanOptions* o) {
    size_t B = model->options.B, T = model->options.T;
    return (o->snapshots ? checkpoint_bytes(&model->flat) : 0) + loader_bytes(B, T) + 2 * B * T * sizeof(int32_t) +
        (device_is_host() ? gemm_workspace_bytes((int)threads_count()) + memory_peak() : 0);
}

// Bytes of the process in all.
static inline size_t plan_bytes(const Model* model, const PlanOptions* o) {
    return model->memory.total + plan_bytes_outside(model, o) + comm_bytes(model->flat.options.world);
}

// With --recompute auto chooses what the backward computes again, so that the process takes --memory; false if it takes
// more whatever is chosen.
static inline bool plan_fit(Model* model, const PlanOptions* o, Error* error) {
    static const Rates nominal = {300e9, 100e9, 25e9, 1e9};  // only their ratios count here
    double missing;
    if (o->recompute != RECOMPUTE_AUTO) return true;
    double outside = (double)(plan_bytes(model, o) - model->memory.total);
    model_recompute_within(model, &missing, 1e9 * o->memory_gb - outside, &nominal);
    return missing == 0 || o->show ||
        fail(error,
             "the run needs %.3f GB even with --recompute block, more than --memory %g; make --batch, --seq or the "
             "model smaller, or --memory larger",
             1e-9 * (double)plan_bytes(model, o), o->memory_gb);
}

// The memory of a rank and the bytes that it sends in a step, for each stage and kind of reduction.
static inline bool plan_show_stages(const Model* planned, const PlanOptions* o, Error* error) {
    char fits[64] = "";
    printf("\n  %-10s %-10s %14s %22s\n", "--zero", "--reduce", "MB per rank", "MB sent per step");
    for (size_t i = 0; i < 6; i++) {
        Model model;
        ModelOptions options = planned->options;
        options.ranks.stage = i / 2;
        options.ranks.reduce = i % 2 ? REDUCE_FLOAT : REDUCE_EXACT;
        if (!model_plan(&model, &planned->config, options, error) || !plan_fit(&model, o, error)) return false;
        size_t bytes = plan_bytes(&model, o);
        const char* reduce = i % 2 ? "float" : "exact";
        printf("  %-10zu %-10s %14.2f %22.2f\n", i / 2, reduce, 1e-6 * (double)bytes,
               1e-6 * (double)flat_bytes_sent(&model.flat, o->micro_batches));
        if (fits[0] == 0 && 1e-9 * (double)bytes <= o->memory_gb)
            snprintf(fits, sizeof fits, "--zero %zu --reduce %s", i / 2, reduce);
        model_free(&model);
    }
    if (!device_is_host()) printf("  A GPU's driver and NCCL take some hundred MB more, which are not counted.\n");
    if (o->memory_gb > 0 && fits[0]) printf("  %s is the lowest stage that fits in %g GB\n", fits, o->memory_gb);
    if (o->memory_gb > 0 && fits[0] == 0)
        printf("  no stage fits in %g GB; use more --ranks, or a smaller --batch or --seq\n", o->memory_gb);
    return true;
}

// Prints the plan of a model that model_plan has laid out.
static inline bool plan_show(const Model* model, const PlanOptions* o, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    size_t B = model->options.B, T = model->options.T;
    const char* const reductions[] = {"fp32", FLOATX_NAME, "64-bit fixed point"};  // by ReduceKind
    if (ranks->world > 1)
        printf("rank 0 of %zu, --zero %zu, gradients reduced in %s\n", ranks->world, ranks->stage,
               reductions[ranks->reduce]);
    plan_print(stdout, &model->memory);
    printf("  %-34s %12.2f\n", "outside: batches", 1e-6 * (double)(loader_bytes(B, T) + 2 * B * T * sizeof(int32_t)));
    if (o->snapshots) printf("  %-34s %12.2f\n", "outside: snapshot", 1e-6 * (double)checkpoint_bytes(&model->flat));
    if (o->hot)  // two that are kept, and one that is being written
        printf("  %-34s %12.2f\n", "in --ckpt-hot-dir: three copies", 3e-6 * (double)checkpoint_bytes(&model->flat));
    if (device_is_host()) {
        printf("  %-34s %12.2f\n", "outside: matmul workspace",
               1e-6 * (double)gemm_workspace_bytes((int)threads_count()));
        printf("  %-34s %12.2f\n", "outside: the program", 1e-6 * (double)memory_peak());
    }
    if (ranks->world == 1) return true;
    printf("  %-34s %12.2f\n", "outside: comm buffers", 1e-6 * (double)comm_bytes(ranks->world));
    return plan_show_stages(model, o, error);
}

#endif  // LLMTRAIN_PLAN_H
