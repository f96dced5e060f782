// plan.h: the memory that a rank will take, before anything is allocated: what --plan prints, and what --recompute auto
// chooses. tools/plan.cu adds the time of a step, and finds the flags that fit.
//
//   PlanOptions o = {.micro_batches = 4, .snapshots = true};
//   if (plan_fit(&model, &o, &error)) plan_show(&model, &o, &error);      after model_plan, before it is allocated

#ifndef LLMTRAIN_PLAN_H
#define LLMTRAIN_PLAN_H

#include "../checkpoint/checkpoint.h"
#include "../ranks/mesh.h"
#include "../text/data.h"
#include "stages.h"

typedef struct {
    bool show;                 // print the plan instead of training
    double memory_gb;          // of a rank; 0: not given
    RecomputeLevel recompute;
    int offload;               // what is kept in offload_dir, not in memory: OFFLOAD_OPTIMIZER, OFFLOAD_ACTIVATIONS
    const char* offload_dir;
    size_t micro_batches;      // of a step, on each rank
    bool snapshots;            // asynchronous saves take one
    size_t tiers;              // directories of --ckpt-tier
    size_t program;            // bytes that the program uses before it allocates anything
    double needs_gb;           // what plan_show has found: of the fullest rank
} PlanOptions;

static inline void plan_flags(Flags* flags, PlanOptions* o) {
    const Flag table[] = {
        FLAG_HEADING("Memory"),
        FLAG_SWITCH("plan", &o->show, false, FLAG_FREE, "print the memory plan and exit"),
        FLAG_REAL("memory", &o->memory_gb, 0, 0, 1e6, FLAG_FREE,
                  "GB of memory per rank: the limit of --recompute auto; --plan fails if the run does not fit in it"),
        FLAG_CHOICE("recompute", &o->recompute, RECOMPUTE_NONE, RECOMPUTE_NAMES, FLAG_LOCAL, "activations to recompute "
                    "in the backward pass: norms: outputs of norms; gelu: also of GELU or SwiGLU; attention: also qkv "
                    "and attention; block: all of a block but its input; auto: the cheapest choice that fits --memory"),
        FLAG_CHOICE("offload", &o->offload, 0, OFFLOAD_CHOICES, FLAG_LOCAL,
                    "keep master weights and optimizer state, or the activations of the blocks, on a disk or, in GPU "
                    "builds, in host memory: same weights, slower"),
        FLAG_TEXT("offload-dir", &o->offload_dir, NULL, "DIR", FLAG_LOCAL,
                  "directory for --offload, on a fast disk of each machine; default in GPU builds: host memory"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

static inline bool plan_options_check(const PlanOptions* o, Error* error) {
    if (o->offload_dir && !o->offload) return fail_with(error, "--offload-dir needs --offload, what to keep there");
    if (o->offload && o->offload_dir == NULL && device_is_host())
        return fail_with(error, "--offload needs --offload-dir, a directory on a fast disk");
    return o->recompute != RECOMPUTE_AUTO || o->memory_gb > 0 ||
        fail_with(error, "--recompute auto needs --memory, the GB that each rank may use");
}

// The memory of the process outside the model's block. An offloaded state has no snapshot (run_takes_snapshots).
static inline Arena plan_outside(const Model* model, const PlanOptions* o) {
    size_t B = model->options.B, T = model->options.T, world = model->flat.options.world;
    Arena outside;
    memset(&outside, 0, sizeof outside);
    arena_take(&outside, "outside: batches", loader_bytes(B, T) + 3 * B * T * sizeof(int32_t));
    if (o->snapshots && !flat_offloads(&model->flat))
        arena_take(&outside, "outside: snapshot", checkpoint_bytes(&model->flat));
    if (device_is_host()) {
        arena_take(&outside, "outside: matmul workspace", gemm_workspace_bytes((int)threads_count()));
        arena_take(&outside, "outside: the program", o->program);
    }
    const FlatVector* flat = &model->flat;
    size_t of_groups = flat->copies > 1 ? comm_bytes(flat->copies) : 0;
    if (flat->copies > 1 || flat->dp_world < world) of_groups += comm_bytes(flat->shard_world);
    if (flat->cp > 1) of_groups += comm_bytes(flat->cp);
    if (flat->tp > 1) of_groups += comm_bytes(flat->tp);
    if (flat->buckets[0].split && flat->buckets[0].here) of_groups += comm_bytes(2 * flat->shard_world);
    for (size_t g = GROUP_FORWARD_IN; g < GROUPS; g++)
        of_groups += model->pipeline.channels[g].room ? comm_bytes(2) : 0;
    if (world > 1) arena_take(&outside, "outside: comm buffers", comm_bytes(world) + of_groups);
    return outside;
}

static inline size_t plan_bytes(const Model* model, const PlanOptions* o) {
    return model->memory.total + plan_outside(model, o).total;
}

// Before model_allocate: chooses which operations run again in which block, with the least extra time, so that the
// model takes at most `bytes`; returns by how much it takes more. Of the rates only the ratios matter. Where blocks'
// activations take turns in memory (--offload), all blocks use the same level, the first that fits.
static inline double model_recompute_within(Model* model, double bytes) {
    const Rates rates = {.matmul = 300e9, .other = 90e9, .memory = 25e9, .comm = 0, .offload = 0, .update = {{0}}};
    BlockActivations* blocks = model->activations->kept;
    size_t K = model_blocks(model);
    BlockShape shape = model_block_shape(model);
    bool moves = model->offloaded.moved > 0;
    double excess = 0;  // the first pass keeps every array
    for (int pass = 0; pass == 0 || (excess > 0 && pass < (moves ? RECOMPUTE_AUTO : 2)); pass++) {
        if (moves) blocks_recompute(blocks, K, recompute_operations((RecomputeLevel)pass));
        else recompute_choose(blocks, K, excess / (double)model->options.slots, &shape, &rates);
        memset(&model->memory, 0, sizeof model->memory);
        model_layout(model);
        excess = fmax(0, (double)model->memory.total - bytes);
    }
    return excess;
}

// Chooses what the backward computes again, so that the process fits --memory; false if no choice fits.
static inline bool plan_recompute(Model* model, const PlanOptions* o) {
    return model_recompute_within(model, 1e9 * o->memory_gb - (double)plan_outside(model, o).total) == 0;
}

// After model_plan: with --recompute auto makes the model fit --memory.
static inline bool plan_fit(Model* model, PlanOptions* o, Error* error) {
    o->program = memory_peak();
    if (o->recompute == RECOMPUTE_AUTO && ranks_of_rows(&model->flat.options) > 1)
        return fail_with(error, "--recompute auto may choose differently on ranks that share a micro-batch, %s; "
                         "choose a level", model->tensor.tp > 1 ? "--tp" : "--cp");
    return o->recompute != RECOMPUTE_AUTO || plan_recompute(model, o) || o->show ||
        fail_with(error, "the run needs %.3f GB even with --recompute block, more than --memory %g; make --batch, "
                  "--seq or the model smaller, or --memory larger", 1e-9 * (double)plan_bytes(model, o), o->memory_gb);
}

static inline void plan_print(const char* name, size_t size) { printf("  %-34s %12.2f\n", name, 1e-6 * (double)size); }

// Prints how much is offloaded, to disk or to host memory, and how much of it moves in a step.
static inline void plan_show_offload(const Model* model, const PlanOptions* o) {
    size_t state = offload_total(&model->flat.offloaded.store), blocks = offload_blocks_bytes(&model->offloaded);
    plan_print(o->offload_dir ? "in --offload-dir" : "in host memory", state + offload_total(&model->offloaded.store));
    plan_print("offloaded: read per step", state + blocks * o->micro_batches);
    plan_print("offloaded: written per step", state + blocks * o->micro_batches);
    if ((o->offload & OFFLOAD_ACTIVATIONS) && blocks == 0)
        printf("  No activations are offloaded: all activations fit in the three blocks kept in memory.\n");
}

// Says whether the run fits --memory; false if it does not.
static inline bool plan_print_fit(double gb, PlanOptions* o, Error* error) {
    o->needs_gb = gb;
    if (o->memory_gb == 0) return true;
    printf("  %.3f GB in all, %s --memory %g\n", gb, gb > o->memory_gb ? "more than" : "within", o->memory_gb);
    return gb <= o->memory_gb || fail_with(error, "the run does not fit --memory %g; make --batch, --seq or the model "
                                           "smaller, or --memory larger", o->memory_gb);
}

// Prints which operations run again in the backward, and in how many blocks.
static inline void plan_show_recompute(const Model* model) {
    static const char* const names[] = {"norm1", "qkv", "attention", "attention_out", "norm2", "ffn_in", "ffn_act"};
    size_t shown = 0;
    for (int o = 0; o < BLOCK_OPERATIONS; o++) {
        size_t blocks = 0;
        for (size_t l = model_first_kept(model); l < model_blocks(model); l++)
            blocks += block_recomputes(&model->activations->kept[l], (BlockOperation)o);
        if (blocks > 0) printf("%s %s in %zu", shown++ ? "," : "  recomputed:", names[o], blocks);
    }
    if (shown > 0) printf(" of %zu blocks\n", model_blocks(model));
}

// Prints what each stage of a pipeline has and takes; and whether all fit.
static inline bool plan_show_stages(const Model* planned, PlanOptions* o, Error* error) {
    const Pipeline* p = &planned->pipeline;
    double most = 0;
    printf("\n  %-8s %16s %12s %8s  %s\n", "stage", "micro-batches", "MB", "idle", "blocks");
    for (size_t stage = 0; stage < p->pp; stage++) {
        Model model;
        ModelOptions options = planned->options;
        char blocks[4096] = "";
        options.ranks.rank = stage * ranks_of_rows(&options.ranks);
        if (!model_plan(&model, &planned->config, options, error)) return false;
        if (o->recompute == RECOMPUTE_AUTO) plan_recompute(&model, o);
        for (size_t chunk = 0; chunk < p->options.chunks; chunk++) {
            size_t piece = chunk * p->pp + stage, used = strlen(blocks);
            snprintf(blocks + used, sizeof blocks - used, "%s%zu-%zu", chunk ? ", " : "", p->begins[piece],
                     p->begins[piece + 1] - 1);
        }
        double bytes = (double)plan_bytes(&model, o);
        most = fmax(most, bytes);
        printf("  %-8zu %16zu %12.2f %7.1f%%  %s\n", stage, pipeline_slots(&model.pipeline), 1e-6 * bytes,
               100 * pipeline_idle(&model.pipeline), blocks);
        model_free(&model);
    }
    printf("  micro-batches: whose activations, of one part of its blocks, a stage holds at most; idle: while it waits "
           "for\n  others, as the schedule has it; the first stage has the embeddings, the last the head\n");
    return plan_print_fit(1e-9 * most, o, error);
}

// Prints the plan of rank 0, and of the stages; false if it does not fit --memory.
static inline bool plan_show(const Model* model, PlanOptions* o, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    const char* const sums[] = {"fp32", FLOATX_NAME, "64-bit fixed point"};  // by ReduceKind
    Arena outside = plan_outside(model, o);
    if (ranks->world > 1)
        printf("rank 0 of %zu, --zero %zu over %zu, gradients reduced in %s\n", ranks->world, ranks->stage,
               model->flat.shard_world, sums[ranks->reduce]);
    arena_print(stdout, &model->memory);
    for (size_t i = 0; i < outside.count; i++) plan_print(outside.lines[i].name, outside.lines[i].bytes);
    if (o->tiers) plan_print("in --ckpt-tier: each checkpoint", checkpoint_bytes(&model->flat));
    if (ranks->world > 1) plan_print("sent per step", model_bytes_sent(model, o->micro_batches));
    if (o->offload) plan_show_offload(model, o);
    plan_show_recompute(model);
    if (model->pipeline.pp > 1) return plan_show_stages(model, o, error);
    return plan_print_fit(1e-9 * (double)plan_bytes(model, o), o, error);
}

#endif  // LLMTRAIN_PLAN_H
