// mesh.h: how a run is laid out over its ranks, and the groups of ranks that this needs.
//
//   mesh_open(&mesh, &comm, &layout, tied, &error)
//   RankOptions options = {..., .groups = MESH_TRANSPORTS(mesh)};
//   mesh_close(&mesh);                        before the Comm
//
// Ranks are numbered so that those of a machine are neighbors, as launchers do, and so that the heaviest traffic is
// between neighbors: first come the ranks that share a micro-batch (--cp), then the stages of a pipeline. Rank r has
// part r mod cp of the rows, and is in stage r / cp mod pp. Each part has a pipeline of its own. With --shard S the
// pipelines 0 to S - 1 share a copy of the state, each stage its part of it, and so on:
//
//   8 ranks, --pp 2 --shard 2      pipeline 0   1 | 2   3        copies: of ranks 0 and 2, of ranks 4 and 6
//               stage 0       rank          0   2 | 4   6                of ranks 1 and 3, of ranks 5 and 7
//               stage 1       rank          1   3 | 5   7
//
//   8 ranks, --cp 2 --pp 2         pipeline 0   1   2   3        pipelines 0 and 1 have the same micro-batches
//               stage 0       rank          0   1   4   5
//               stage 1       rank          2   3   6   7

#ifndef LLMTRAIN_MESH_H
#define LLMTRAIN_MESH_H

#include "schedule.h"
#include "split.h"
#include "../base/flag_table.h"
#include "../model/config.h"

typedef struct {
    uint64_t ranks, zero, shard, cp, pp, chunks;  // the flags of these names
    uint64_t row_leaves;                          // --row-leaves
    PipelineKind pipeline;
} Layout;

typedef struct {
    Comm groups[GROUPS];  // those that this rank is in
} Mesh;
#define MESH_TRANSPORT(mesh, group) &(mesh).groups[group].transport
#define MESH_TRANSPORTS(mesh) \
    {MESH_TRANSPORT(mesh, GROUP_SHARD), MESH_TRANSPORT(mesh, GROUP_COPIES), MESH_TRANSPORT(mesh, GROUP_TIED), \
     MESH_TRANSPORT(mesh, GROUP_CONTEXT), MESH_TRANSPORT(mesh, GROUP_FORWARD_IN), \
     MESH_TRANSPORT(mesh, GROUP_FORWARD_OUT), MESH_TRANSPORT(mesh, GROUP_BACKWARD_IN), \
     MESH_TRANSPORT(mesh, GROUP_BACKWARD_OUT)}

static inline void layout_flags(Flags* flags, Layout* l) {
    const Flag rows[] = {
        FLAG_HEADING("Ranks: processes that train together"),
        FLAG_COUNT("ranks", &l->ranks, 1, 1, 65536, FLAG_FREE,
                   "processes to start here, without mpirun, torchrun or srun; with --plan: ranks to plan for"),
        FLAG_COUNT("zero", &l->zero, 0, 0, 3, 0,
                   "ZeRO stage: 0 off, 1 shard optimizer state, 2 also gradients, 3 also parameters of blocks"),
        FLAG_COUNT("shard", &l->shard, 0, 0, 65536, 0,
                   "ranks that share a copy of what ZeRO shards, as those of a machine; 0: all ranks"),
        FLAG_COUNT("cp", &l->cp, 1, 1, 128, 0,
                   "context parallel: ranks that share the sequences of a micro-batch, each with 1/N of the tokens; "
                   "in attention each has 1/N of the heads"),
        FLAG_COUNT("row-leaves", &l->row_leaves, 0, 0, 1024, FLAG_FREE,
                   "with exact sums: parts of a micro-batch's rows whose gradients are summed separately; weights have "
                   "the same bits for every --cp that divides N; 0: as the run began, by default --cp"),
        FLAG_COUNT("pp", &l->pp, 1, 1, 512, 0,
                   "pipeline stages, each with a part of the blocks"),
        FLAG_CHOICE("pipeline", &l->pipeline, PIPELINE_1F1B, PIPELINE_NAMES, 0,
                    "with --pp: schedule of the micro-batches: gpipe keeps the activations of all, 1f1b those of N; "
                    "interleaved waits less and sends more; zb-h1 and zb-h2 defer gradients of weights to wait less"),
        FLAG_COUNT("chunks", &l->chunks, 0, 0, 255, 0,
                   "with --pipeline interleaved: parts of the model that each stage has; 0: 2"),
    };
    flags_append(flags, rows, sizeof rows / sizeof *rows);
}

// Ranks that share each micro-batch, over the stages of all.
static inline size_t layout_cp(const Layout* l) { return max_size(l->cp, 1); }

// Micro-batches that are computed at a time, each by ranks of its own: data parallelism.
static inline uint64_t layout_replicas(const Layout* l, uint64_t world) {
    return world / (max_size(l->pp, 1) * layout_cp(l));
}

// Parts of the model that each stage has.
static inline size_t layout_chunks(const Layout* l) {
    return l->chunks ? l->chunks : l->pipeline == PIPELINE_INTERLEAVED && l->pp > 1 ? 2 : 1;
}

// Checks what concerns context parallelism. T: tokens of a sequence.
static inline bool layout_check_context(const Layout* l, uint64_t world, const Config* c, size_t T, bool samples,
                                        Error* error) {
    unsigned long long cp = l->cp, leaves = max_size(l->row_leaves, l->cp);
    if (world % (l->cp * l->pp) != 0)
        return fail_with(error, "--cp %llu%s does not divide the %llu ranks; choose a divisor", cp, l->pp > 1 ?
                         " times --pp" : "", (unsigned long long)world);
    if (c->kv_heads % l->cp != 0 || c->heads % l->cp != 0)
        return fail_with(error, "--cp %llu does not divide the model's %zu %s; choose a divisor, since each rank "
                         "computes the attention of whole heads", cp, c->kv_heads,
                         c->kv_heads < c->heads ? "key/value heads" : "heads");
    if (l->row_leaves % l->cp != 0)
        return fail_with(error, "--cp %llu does not divide --row-leaves, which is %llu (given, or from the "
                         "checkpoint); choose a divisor, or give --row-leaves %llu: the weights will have other bits",
                         cp, (unsigned long long)l->row_leaves, cp);
    if (T % leaves != 0)
        return fail_with(error, "%s %llu does not divide sequences of %zu tokens; choose a divisor, or another --seq",
                         leaves > cp ? "--row-leaves" : "--cp", leaves, T);
    return cp == 1 || !samples ||
           fail_with(error, "--sample-every needs all rows on rank 0, and with --cp %llu it has a part; sample from "
                     "checkpoints with build/generate", cp);
}

// Checks what concerns pipelines.
static inline bool layout_check_pipeline(const Layout* l, uint64_t world, bool samples, Error* error) {
    unsigned long long pp = l->pp, ranks = world;
    bool interleaved = l->pipeline == PIPELINE_INTERLEAVED;
    if (l->chunks > 1 && !interleaved)
        return fail_with(error, "--chunks %llu is for --pipeline interleaved; choose it, or leave out --chunks",
                         (unsigned long long)l->chunks);
    if (l->chunks > 1 && pp == 1)
        return fail_with(error, "--chunks %llu needs several stages; choose --pp", (unsigned long long)l->chunks);
    if (world % l->pp != 0)
        return fail_with(error, "--pp %llu does not divide the %llu ranks; choose a divisor", pp, ranks);
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
    if (!layout_check_pipeline(l, world, samples, error)) return false;
    if (!layout_check_context(l, world, c, T, samples, error)) return false;
    world /= l->pp;
    if (l->shard > 0 && l->zero == 0)
        return fail_with(error, "--shard says over how many ranks ZeRO shards; choose --zero 1, 2 or 3 with it");
    if (l->shard > 0 && world % l->shard != 0)
        return fail_with(error, "--shard %llu does not divide the %llu %s; choose a divisor",
                         (unsigned long long)l->shard, (unsigned long long)world, l->pp > 1 ? "pipelines" : "ranks");
    if (l->shard > 0 && l->shard % l->cp != 0 && l->cp % l->shard != 0)
        return fail_with(error, "--shard %llu and --cp %llu: one must divide the other, so that each copy of the state "
                         "is on neighbors", (unsigned long long)l->shard, (unsigned long long)l->cp);
    if (l->zero == 3 && samples && world > 1 && l->shard != 1)
        return fail_with(error, "--sample-every needs all parameters on rank 0, and --zero 3 shards them; choose "
                         "--zero 2, or sample from checkpoints with build/generate");
    if (l->shard == world) l->shard = 0;
    return true;
}

// Whether this rank is in a group, and its color there: those of the same color are one. tied: the model's head.
static inline bool mesh_color(size_t* color, const Comm* comm, const Layout* l, size_t group, bool tied) {
    size_t pp = l->pp, cp = layout_cp(l), pipelines = comm->world / pp, stage = comm->rank / cp % pp;
    size_t micro = comm->rank / (cp * pp), pipeline = micro * cp + comm->rank % cp;  // micro: whose micro-batches
    size_t S = l->shard ? l->shard : pipelines, edge = RING_NONE;
    bool end = stage == 0 || stage + 1 == pp;
    switch (group) {
    case GROUP_SHARD: *color = pipeline / S * pp + stage; return l->shard > 0 || cp > 1 || pp > 1;
    case GROUP_COPIES: *color = pipeline % S * pp + stage; return l->shard > 0;
    case GROUP_TIED: *color = pipeline / S; return tied && pp > 1 && end;
    case GROUP_CONTEXT: *color = micro * pp + stage; return cp > 1;
    default: edge = ring_edge(group, stage, pp, layout_chunks(l) > 1);
    }
    *color = pipeline * pp + edge;
    return edge != RING_NONE;
}

#define MESH_PATIENCE 10  // timeouts for which a stage waits for another: it may have much to compute before it sends

// Opens the groups [first, end), of which this rank is in one at most; turn: of channels.
static inline bool mesh_open_groups(Mesh* mesh, Comm* comm, const Layout* l, size_t first, size_t end, size_t turn,
                                    bool tied, Error* error) {
    Comm none, *group = &none;
    size_t color = comm->world + comm->rank, own;  // that of no other
    for (size_t g = first; g < end; g++) {
        bool in = mesh_color(&own, comm, l, g, tied);
        if (!in || (g >= GROUP_FORWARD_IN && ring_turn(own % l->pp, l->pp) != turn)) continue;
        group = &mesh->groups[g];
        color = own;
    }
    // Ranks wait for those that wait elsewhere: only these know for whom.
    double patience = first >= GROUP_FORWARD_IN ? MESH_PATIENCE : first > GROUP_SHARD || l->pp > 1 ? 1.25 : 1;
    if (!comm_split(group, comm, color, patience, error)) return false;
    if (group == &none) comm_close(group);
    return true;
}

// Called by all ranks together. The layout is as layout_check has left it; tied: the model's head.
static inline bool mesh_open(Mesh* mesh, Comm* comm, const Layout* l, bool tied, Error* error) {
    size_t turns = l->pp == 1 ? 0 : layout_chunks(l) > 1 ? 2 + l->pp % 2 : min_size(l->pp - 1, 2);
    bool divided = l->shard > 0 || layout_cp(l) > 1 || l->pp > 1;
    bool opens[GROUP_FORWARD_IN] = {divided, l->shard > 0, tied && l->pp > 1, layout_cp(l) > 1};
    for (size_t g = 0; g < GROUP_FORWARD_IN; g++)
        if (opens[g] && !mesh_open_groups(mesh, comm, l, g, g + 1, 0, tied, error)) return false;
    for (size_t turn = 0; turn < turns; turn++)
        for (size_t g = GROUP_FORWARD_IN; g < GROUPS; g += 2)  // activations, then gradients
            if (!mesh_open_groups(mesh, comm, l, g, g + 2, turn, tied, error)) return false;
    return true;
}

static inline void mesh_close(Mesh* mesh) {
    for (size_t g = GROUPS; g-- > 0;)
        if (mesh->groups[g].world > 0) comm_close(&mesh->groups[g]);
}

#endif  // LLMTRAIN_MESH_H
