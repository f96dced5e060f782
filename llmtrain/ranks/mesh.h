// mesh.h: the groups of ranks that the layout of a run needs.
//
//   mesh_open(&mesh, &comm, 8, &error)        GROUP_SHARD: 8 neighbors; GROUP_COPIES: every 8th rank
//   options.groups[g] = &mesh.groups[g].transport
//   mesh_close(&mesh);                        before the Comm
//
// Ranks are numbered so that those of a machine are neighbors, as launchers do.

#ifndef LLMTRAIN_MESH_H
#define LLMTRAIN_MESH_H

#include "split.h"

typedef struct {
    Comm groups[GROUPS];
    size_t count;  // of groups that are open
} Mesh;

// Completes and checks --shard: the ranks that share a copy of the state that ZeRO shards; all: 0, no groups.
static inline bool mesh_check_shard(uint64_t* shard, uint64_t world, uint64_t stage, Error* error) {
    if (*shard > 0 && stage == 0)
        return fail_with(error, "--shard says over how many ranks ZeRO shards; choose --zero 1 or 2 with it");
    if (*shard > 0 && world % *shard != 0)
        return fail_with(error, "--shard %llu does not divide the %llu ranks; choose a divisor",
                         (unsigned long long)*shard, (unsigned long long)world);
    if (*shard == world) *shard = 0;
    return true;
}

// Called by all ranks together. shard: as mesh_check_shard has left it.
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
