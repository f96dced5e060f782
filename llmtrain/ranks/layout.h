// layout.h: how a run is laid out over its ranks: the flags, what they imply, and what they cannot be.
//
//   layout_flags(&flags, &layout);
//   if (!layout_check(&layout, world, &config, T, samples, &error)) ...
//
// mesh.h has the numbering of the ranks, and opens the groups that a layout needs.

#ifndef LLMTRAIN_LAYOUT_H
#define LLMTRAIN_LAYOUT_H

#include "schedule.h"
#include "zero.h"
#include "../base/flag_table.h"
#include "../model/config.h"

typedef struct {
    uint64_t ranks, zero, shard, tp, cp, pp, chunks, leaves;  // the flags of these names
    uint64_t row_leaves, kv_copies;               // --row-leaves, --kv-copies
    int reduce;                                   // --reduce; 0: auto; otherwise ReduceKind + 1
    PipelineKind pipeline;
} Layout;

static inline void layout_flags(Flags* flags, Layout* l) {
    const Flag rows[] = {
        FLAG_HEADING("Ranks: processes that train together"),
        FLAG_COUNT("ranks", &l->ranks, 1, 1, 65536, FLAG_FREE,
                   "processes to start here, without mpirun, torchrun or srun; with --plan: ranks to plan for"),
        FLAG_COUNT("zero", &l->zero, 0, 0, 3, 0,
                   "ZeRO stage: 0 off, 1 shard optimizer state, 2 also gradients, 3 also parameters of blocks"),
        FLAG_COUNT("shard", &l->shard, 0, 0, 65536, 0,
                   "ranks that share a copy of what ZeRO shards, such as those of a machine; 0: all ranks"),
        FLAG_COUNT("tp", &l->tp, 1, 1, RANKS_TP_MAX, 0,
                   "tensor parallel: ranks that share each layer, with 1/N of the heads, of the feed-forward and of "
                   "the vocabulary each; outside of layers each has 1/N of the tokens"),
        FLAG_COUNT("leaves", &l->leaves, 0, 0, RANKS_TP_MAX, FLAG_FREE,
                   "parts of the sums over heads, the feed-forward and the vocabulary, added as a tree; weights have "
                   "the same bits for every --tp that divides N; 0: as the run began, by default --tp; 1 with "
                   "--reduce storage: no tree, which in 16-bit builds sends half as much"),
        FLAG_COUNT("cp", &l->cp, 1, 1, 128, 0,
                   "context parallel: ranks that share the sequences of a micro-batch, each with 1/N of the tokens; "
                   "in attention each has 1/N of the heads"),
        FLAG_COUNT("row-leaves", &l->row_leaves, 0, 0, 1024, FLAG_FREE,
                   "with exact sums: parts of a micro-batch's rows whose gradients are summed separately; weights have "
                   "the same bits for every --cp that divides N; 0: as the run began, by default --cp"),
        FLAG_COUNT("kv-copies", &l->kv_copies, 0, 0, 1024, FLAG_FREE,
                   "attention computes with N copies of each key/value head, so that --cp may be larger than "
                   "their number; weights have the same bits for every --cp; 0: as the run began, by default what "
                   "every layout of these --leaves and --row-leaves needs"),
        FLAG_COUNT("pp", &l->pp, 1, 1, 512, 0,
                   "pipeline stages, each with a part of the blocks"),
        FLAG_CHOICE("pipeline", &l->pipeline, PIPELINE_1F1B, PIPELINE_NAMES, 0,
                    "with --pp: schedule of the micro-batches: gpipe keeps the activations of all, 1f1b those of N; "
                    "interleaved waits less and sends more; zb-h1 and zb-h2 defer gradients of weights to wait less"),
        FLAG_COUNT("chunks", &l->chunks, 0, 0, 255, 0,
                   "with --pipeline interleaved: parts of the model that each stage has; 0: 2"),
        FLAG_CHOICE(
            "reduce", &l->reduce, 0, "auto|float|storage|exact", 0,
            "dtype of gradient reduction: float is fp32, storage the build's dtype, exact int64 fixed point (same "
            "bits for any layout of the ranks); auto: exact with several ranks or leaves, otherwise float"),
    };
    flags_append(flags, rows, sizeof rows / sizeof *rows);
}

// How gradients are summed on so many ranks.
static inline ReduceKind layout_reduce(const Layout* l, uint64_t world) {
    bool exact = world > 1 || l->row_leaves > 1 || l->leaves > 1;
    return l->reduce ? (ReduceKind)(l->reduce - 1) : exact ? REDUCE_EXACT : REDUCE_FLOAT;
}

static inline size_t layout_tp(const Layout* l) { return max_size(l->tp, 1); }
static inline size_t layout_cp(const Layout* l) { return max_size(l->cp, 1); }

// Ranks that share each micro-batch, over the stages of all.
static inline size_t layout_of_rows(const Layout* l) { return layout_tp(l) * layout_cp(l); }

// Micro-batches that are computed at a time, each by ranks of its own: data parallelism.
static inline uint64_t layout_replicas(const Layout* l, uint64_t world) {
    return world / (max_size(l->pp, 1) * layout_of_rows(l));
}

// Parts of the model that each stage has.
static inline size_t layout_chunks(const Layout* l) {
    return l->chunks ? l->chunks : l->pipeline == PIPELINE_INTERLEAVED && l->pp > 1 ? 2 : 1;
}

// The fewest copies of key/value heads with which every layout of these --leaves and --row-leaves gives its ranks whole
// heads: as many ranks as divide `parts` may share a micro-batch. So all these layouts have the same bits.
static inline uint64_t layout_kv_copies(const Layout* l, const Config* c) {
    uint64_t parts = max_size(l->leaves, l->tp) * max_size(l->row_leaves, l->cp), copies = 1;
    for (uint64_t rest = c->heads; rest > 0;) {  // the greatest common divisor: ranks have whole query heads too
        uint64_t next = parts % rest;
        parts = rest;
        rest = next;
    }
    while (c->kv_heads * copies % parts != 0) copies++;
    return copies;
}

enum { LAYOUT_TEXT = 96 };

// Writes the flags that divide a micro-batch, as "--tp 2 times --cp 4", and returns their product. pp: --pp too.
static inline uint64_t layout_product(char text[LAYOUT_TEXT], const Layout* l, bool pp) {
    static const char* const flags[] = {"--tp", "--cp", "--pp"};
    const uint64_t sizes[] = {l->tp, l->cp, pp ? l->pp : 1};
    uint64_t product = 1;
    snprintf(text, LAYOUT_TEXT, "--cp 1");
    for (size_t i = 0; i < 3; i++) {
        size_t used = product > 1 ? strlen(text) : 0;
        if (sizes[i] <= 1) continue;
        snprintf(text + used, LAYOUT_TEXT - used, "%s%s %llu", used ? " times " : "", flags[i],
                 (unsigned long long)sizes[i]);
        product *= sizes[i];
    }
    return product;
}

// Checks that there are as many ranks as the layout needs, or a multiple.
static inline bool layout_check_ranks(const Layout* l, uint64_t world, Error* error) {
    char text[LAYOUT_TEXT];
    unsigned long long product = layout_product(text, l, true), ranks = world;
    if (world % product == 0) return true;
    if (world == 1)
        return fail_with(error, "%s needs %llu ranks, and there is one; give --ranks %llu, or start them with "
                         "torchrun, mpirun or srun", text, product, product);
    if (product == l->tp || product == l->cp || product == l->pp)
        return fail_with(error, "%s does not divide the %llu ranks; choose a divisor", text, ranks);
    return fail_with(error, "%s is %llu, which does not divide the %llu ranks; choose divisors, or other --ranks", text,
                     product, ranks);
}

// Checks what concerns context parallelism. T: tokens of a sequence.
static inline bool layout_check_context(const Layout* l, const Config* c, size_t T, bool samples, Error* error) {
    unsigned long long cp = l->cp, leaves = max_size(l->row_leaves, l->cp), copies = max_size(l->kv_copies, 1);
    char text[LAYOUT_TEXT];
    uint64_t product = layout_product(text, l, false);
    if (c->heads % product != 0)
        return fail_with(error, "%s does not divide the model's %zu heads; choose a divisor, since each rank computes "
                         "the attention of whole heads", text, c->heads);
    if (c->heads % (c->kv_heads * copies) != 0)
        return fail_with(error, "--kv-copies %llu does not divide %zu, the number of heads that share a key/value head "
                         "in this model; choose a divisor", copies, c->heads / c->kv_heads);
    if (c->kv_heads * copies % product != 0)
        return fail_with(error, "%s does not divide the model's %zu key/value heads times --kv-copies, which is %llu "
                         "(given, or from the checkpoint); choose a divisor, or give --kv-copies %llu: the weights "
                         "will have other bits", text, c->kv_heads, copies,
                         (unsigned long long)layout_kv_copies(l, c));
    if (l->row_leaves % l->cp != 0)
        return fail_with(error, "--cp %llu does not divide --row-leaves, which is %llu (given, or from the "
                         "checkpoint); choose a divisor, or give --row-leaves %llu: the weights will have other bits",
                         cp, (unsigned long long)l->row_leaves, cp);
    if (T % leaves != 0)
        return fail_with(error, "%s %llu does not divide sequences of %zu tokens; choose a divisor, or another --seq",
                         leaves > cp ? "--row-leaves" : "--cp", leaves, T);
    if (samples && cp > 1)
        return fail_with(error, "--sample-every needs all rows on rank 0, and with --cp %llu it has a part; sample "
                         "from checkpoints with build/generate", cp);
    return !samples || copies == 1 ||
           fail_with(error, "--sample-every reads key/value heads without copies, and with --kv-copies %llu, which "
                     "--leaves and --row-leaves may need, there are some; sample from checkpoints with build/generate, or "
                     "give --kv-copies 1", copies);
}

// Checks what concerns tensor parallelism.
static inline bool layout_check_tensor(const Layout* l, const Config* c, size_t T, bool samples, Error* error) {
    unsigned long long tp = l->tp, leaves = l->leaves;
    if ((tp & (tp - 1)) != 0 || (leaves & (leaves - 1)) != 0)
        return fail_with(error, "%s %llu is not a power of two, which the tree of sums needs; choose one, such as 4",
                         (tp & (tp - 1)) != 0 ? "--tp" : "--leaves", (tp & (tp - 1)) != 0 ? tp : leaves);
    if (tp > 1 && c->lora > 0)
        return fail_with(error, "--tp divides matrices, and pairs of --lora are not divided; leave one of them out "
                         "(--zero 3 and --pp divide a model with pairs)");
    bool reduces = leaves == 1 && l->reduce == REDUCE_STORAGE + 1;  // ranks_reduce_sums
    if (leaves % l->tp != 0 && !reduces)
        return fail_with(error, "--tp %llu does not divide --leaves, which is %llu (given, or from the checkpoint); "
                         "choose a divisor, or give --leaves %llu%s: the weights will have other bits", tp, leaves, tp,
                         leaves == 1 ? ", or --reduce storage" : "");
    leaves = max_size(leaves, l->tp);
    const char* flag = leaves > l->tp ? "--leaves" : "--tp";
    if (c->kv_heads % leaves != 0 || c->heads % leaves != 0)
        return fail_with(error, "%s %llu does not divide the model's %zu %sheads; choose a power of two that does",
                         flag, leaves, c->kv_heads, c->kv_heads < c->heads ? "key/value " : "");
    if (leaves > 1 && c->ffn % (8 * leaves) != 0)
        return fail_with(error, "%s %llu needs a feed-forward that is a multiple of 8 x %llu wide, and --ffn is %zu; "
                         "choose another of the two", flag, leaves, leaves, c->ffn);
    unsigned long long rows = max_size(l->row_leaves, 1);
    if (leaves > 1 && T % (leaves * rows) != 0)
        return rows > 1 ? fail_with(error, "%s %llu times --row-leaves %llu does not divide sequences of %zu tokens; "
                                    "choose divisors, or another --seq", flag, leaves, rows, T)
                        : fail_with(error, "%s %llu does not divide sequences of %zu tokens; choose a divisor, or "
                                    "another --seq", flag, leaves, T);
    return tp == 1 || !samples ||
           fail_with(error, "--sample-every needs whole layers on rank 0, and with --tp %llu it has parts; sample from "
                     "checkpoints with build/generate", tp);
}

// Checks what concerns pipelines.
static inline bool layout_check_pipeline(const Layout* l, bool samples, Error* error) {
    unsigned long long pp = l->pp;
    bool interleaved = l->pipeline == PIPELINE_INTERLEAVED;
    if (l->chunks > 1 && !interleaved)
        return fail_with(error, "--chunks %llu is for --pipeline interleaved; choose it, or leave out --chunks",
                         (unsigned long long)l->chunks);
    if (l->chunks > 1 && pp == 1)
        return fail_with(error, "--chunks %llu needs several stages; choose --pp", (unsigned long long)l->chunks);
    if (pp > 1 && l->zero > 1)
        return fail_with(error, "--zero %llu with --pp %llu would move gradients or parameters in every "
                         "micro-batch; choose --zero 1", (unsigned long long)l->zero, pp);
    return pp == 1 || !samples ||
           fail_with(error, "--sample-every needs all blocks on rank 0, and with --pp %llu it has a part; sample from "
                     "checkpoints with build/generate", pp);
}

// Completes and checks it; world: the number of ranks; c: the model; T: tokens of a sequence; samples: rank 0 samples
// text, which the others do not compute.
static inline bool layout_check(Layout* l, uint64_t world, const Config* c, size_t T, bool samples, Error* error) {
    if (!layout_check_ranks(l, world, error) || !layout_check_pipeline(l, samples, error) ||
        !layout_check_tensor(l, c, T, samples, error) || !layout_check_context(l, c, T, samples, error)) return false;
    world /= l->pp * l->tp;
    if (l->shard > 0 && l->zero == 0)
        return fail_with(error, "--shard says over how many ranks ZeRO shards; choose --zero 1, 2 or 3 with it");
    if (l->shard > 0 && world % l->shard != 0)
        return fail_with(error, "--shard %llu does not divide the %llu %s; choose a divisor",
                         (unsigned long long)l->shard, (unsigned long long)world,
                         l->pp > 1 ? "pipelines" : l->tp > 1 ? "ranks with the same part of layers" : "ranks");
    if (l->shard > 0 && l->shard % l->cp != 0 && l->cp % l->shard != 0)
        return fail_with(error, "--shard %llu and --cp %llu: one must divide the other, so that each copy of the state "
                         "is on neighbors", (unsigned long long)l->shard, (unsigned long long)l->cp);
    if (l->zero == 3 && samples && world > 1 && l->shard != 1)
        return fail_with(error, "--sample-every needs all parameters on rank 0, and --zero 3 shards them; choose "
                         "--zero 2, or sample from checkpoints with build/generate");
    if (l->shard == world) l->shard = 0;
    return true;
}

#endif  // LLMTRAIN_LAYOUT_H
