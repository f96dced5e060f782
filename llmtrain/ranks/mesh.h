// mesh.h: how a run is laid out over its ranks, and the groups of ranks that this needs.
//
//   mesh_open(&mesh, &comm, 8, &error)        GROUP_SHARD: 8 neighbors; GROUP_COPIES: every 8th rank
//   RankOptions options = {..., .groups = MESH_TRANSPORTS(mesh)};
//   mesh_close(&mesh);                        before the Comm
//
// Ranks are numbered so that those of a machine are neighbors, as launchers do.

#ifndef LLMTRAIN_MESH_H
#define LLMTRAIN_MESH_H

#include "split.h"
#include "../base/flags.h"

typedef struct {
    uint64_t ranks, zero, shard;  // --ranks, --zero, --shard
} Layout;

typedef struct {
    Comm groups[GROUPS];
    size_t count;  // of groups that are open
} Mesh;
#define MESH_TRANSPORTS(mesh) {&(mesh).groups[GROUP_SHARD].transport, &(mesh).groups[GROUP_COPIES].transport}

static inline void layout_flags(Flags* flags, Layout* l) {
    const Flag rows[] = {
        FLAG_HEADING("Ranks: processes that train together"),
        FLAG_COUNT("ranks", &l->ranks, 1, 1, 65536, FLAG_FREE,
                   "processes to start here, without mpirun, torchrun or srun; with --plan: ranks to plan for"),
        FLAG_COUNT("zero", &l->zero, 0, 0, 3, 0,
                   "ZeRO stage: 0 off, 1 shard optimizer state, 2 also gradients, 3 also parameters of blocks"),
        FLAG_COUNT("shard", &l->shard, 0, 0, 65536, 0,
                   "ranks that share a copy of what ZeRO shards, as those of a machine; 0: all ranks"),
    };
    flags_append(flags, rows, sizeof rows / sizeof *rows);
}

// Completes and checks it; world: the number of ranks; samples: rank 0 samples text, which the others do not compute.
static inline bool layout_check(Layout* l, uint64_t world, bool samples, Error* error) {
    if (l->shard > 0 && l->zero == 0)
        return fail_with(error, "--shard says over how many ranks ZeRO shards; choose --zero 1, 2 or 3 with it");
    if (l->shard > 0 && world % l->shard != 0)
        return fail_with(error, "--shard %llu does not divide the %llu ranks; choose a divisor",
                         (unsigned long long)l->shard, (unsigned long long)world);
    if (l->zero == 3 && samples && world > 1 && l->shard != 1)
        return fail_with(error, "--sample-every needs all parameters on rank 0, and --zero 3 shards them; choose --zero "
                         "2, or sample from checkpoints with build/generate");
    if (l->shard == world) l->shard = 0;
    return true;
}

// Called by all ranks together. shard: as layout_check has left it.
static inline bool mesh_open(Mesh* mesh, Comm* comm, size_t shard, Error* error) {
    while (shard > 0 && mesh->count < GROUPS) {
        size_t color = mesh->count == GROUP_SHARD ? comm->rank / shard : comm->rank % shard;
        if (!comm_split(&mesh->groups[mesh->count], comm, color, error)) return false;
        // Ranks wait for the copies of those that wait inside theirs: only these know for whom.
        if (mesh->count == GROUP_COPIES) mesh->groups[GROUP_COPIES].timeout_ms *= 1.25;
        mesh->count++;
    }
    return true;
}

static inline void mesh_close(Mesh* mesh) {
    while (mesh->count > 0) comm_close(&mesh->groups[--mesh->count]);
}

#endif  // LLMTRAIN_MESH_H
