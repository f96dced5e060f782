// mesh.h: the groups of ranks that a layout needs, and the numbering of the ranks.
//
//   mesh_open(&mesh, &comm, &layout, tied, &error)
//   RankOptions options = {..., .groups = MESH_TRANSPORTS(mesh)};
//   mesh_close(&mesh);                        before the Comm
//
// Ranks are numbered so that those of a machine are neighbors, as launchers do, and so that the heaviest traffic is
// between neighbors: first come the ranks that share layers (--tp), then those that share a micro-batch (--cp), then
// the stages of a pipeline. Rank r has part r mod tp of the layers and part r / tp mod cp of the rows, and is in stage
// r / (tp cp) mod pp. Each part has a pipeline of its own. With --shard S the pipelines 0 to S - 1 share a copy of the
// state, each stage its part of it, and so on; ranks with other parts of the layers share nothing of it:
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

#include "layout.h"
#include "split.h"

typedef struct {
    Comm groups[GROUPS];  // those that this rank is in
} Mesh;
#define MESH_TRANSPORT(mesh, group) &(mesh).groups[group].transport
#define MESH_TRANSPORTS(mesh) \
    {MESH_TRANSPORT(mesh, GROUP_SHARD), MESH_TRANSPORT(mesh, GROUP_COPIES), MESH_TRANSPORT(mesh, GROUP_TIED), \
     MESH_TRANSPORT(mesh, GROUP_CONTEXT), MESH_TRANSPORT(mesh, GROUP_TENSOR), \
     MESH_TRANSPORT(mesh, GROUP_FORWARD_IN), MESH_TRANSPORT(mesh, GROUP_FORWARD_OUT), \
     MESH_TRANSPORT(mesh, GROUP_BACKWARD_IN), MESH_TRANSPORT(mesh, GROUP_BACKWARD_OUT)}

// Whether this rank is in a group, and its color there: those of the same color are one. tied: the model's head.
static inline bool mesh_color(size_t* color, const Comm* comm, const Layout* l, size_t group, bool tied) {
    size_t pp = l->pp, tp = layout_tp(l), cp = layout_cp(l), pipelines = comm->world / (pp * tp);
    size_t part = comm->rank % tp, stage = comm->rank / (tp * cp) % pp;
    size_t micro = comm->rank / (tp * cp * pp), pipeline = micro * cp + comm->rank / tp % cp;  // of the ranks of a part
    size_t S = l->shard ? l->shard : pipelines, edge = RING_NONE;
    bool end = stage == 0 || stage + 1 == pp;
    switch (group) {
    case GROUP_SHARD: *color = (pipeline / S * pp + stage) * tp + part; return l->shard > 0 || tp * cp * pp > 1;
    case GROUP_COPIES: *color = (pipeline % S * pp + stage) * tp + part; return l->shard > 0;
    case GROUP_TIED: *color = pipeline / S * tp + part; return tied && pp > 1 && end;
    case GROUP_CONTEXT: *color = (micro * pp + stage) * tp + part; return cp > 1;
    case GROUP_TENSOR: *color = comm->rank / tp; return tp > 1;
    default: edge = ring_edge(group, stage, pp, layout_chunks(l) > 1);
    }
    *color = (pipeline * tp + part) * pp + edge;
    return edge != RING_NONE;
}

#define MESH_STAGE_FACTOR 10  // a stage waits this many timeouts for another, which may have much to compute first

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
    // Ranks wait for those that wait elsewhere, most often in the smallest of their groups: only these know for whom.
    double factor = first >= GROUP_FORWARD_IN ? MESH_STAGE_FACTOR : first > GROUP_SHARD || l->pp > 1 ? 1.25 : 1;
    if (layout_tp(l) > 1 && first < GROUP_FORWARD_IN) factor = first == GROUP_TENSOR ? factor : 1.5;
    if (first == GROUP_TENSOR && l->pp == 1) factor = 1;
    if (!comm_split(group, comm, color, factor, error)) return false;
    if (group == &none) comm_close(group);
    return true;
}

// Called by all ranks together. The layout is as layout_check has left it; tied: the model's head.
static inline bool mesh_open(Mesh* mesh, Comm* comm, const Layout* l, bool tied, Error* error) {
    size_t turns = l->pp == 1 ? 0 : layout_chunks(l) > 1 ? 2 + l->pp % 2 : min_size(l->pp - 1, 2);
    bool divided = l->shard > 0 || layout_of_rows(l) * l->pp > 1;
    bool opens[GROUP_FORWARD_IN] = {divided, l->shard > 0, tied && l->pp > 1, layout_cp(l) > 1, layout_tp(l) > 1};
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
