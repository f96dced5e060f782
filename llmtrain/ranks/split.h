// split.h: groups of the ranks of a run, each with collectives of its own.
//
//   comm_split(&group, &comm, comm.rank / 8, 1, &error)         groups of 8 neighbors
//   comm_start(&group, COMM_ALL_REDUCE, ...)                    as with any Comm, between the members only
//   comm_close(&group);                                         before the Comm that it is a part of
//
// A group is a Comm: it has a queue, a progress thread, and data connections (with MPI a tag) of its own, so that two
// groups may be in different collectives at a time. It has no control connections: ranks are watched by the Comm of all
// ranks, its parent. What fails in a group fails its parent, and with it all groups of all ranks, with the same error.
// Ranks in errors are those of the run.

#ifndef LLMTRAIN_SPLIT_H
#define LLMTRAIN_SPLIT_H

#include "comm.h"

// What a rank tells the others when they split.
typedef struct {
    uint64_t color, port;
} CommColor;

// Connects the members, each to each. They are those with the same color.
static inline bool comm_connect_group(Comm* group, size_t port, const CommColor* colors, Error* error) {
    Comm* parent = group->parent;
    const Launch launch = {.listener = -1};
    CommRendezvous rendezvous = {.launch = &launch, .port = port,
                                 .table = (CommAddress*)memory_allocate(group->world * sizeof(CommAddress)),
                                 .deadline = now_ms() + parent->timeout_ms};
    CommRendezvous* r = &rendezvous;
    Error reason = {"", ERROR_OUTSIDE, false};
    int on = 1;
    bool good = r->table || fail_with(error, "not enough memory for the addresses of %zu ranks", group->world);
    snprintf(r->name, sizeof r->name, "port %zu", port);
    snprintf(group->doing, sizeof group->doing, "in the rendezvous of a group");
    for (size_t p = 0; good && p < group->rank; p++) {
        size_t other = group->members[p];
        char address[64];
        socket_peer_address(address, parent->links[other].data);
        good = comm_connect(group, r, p, COMM_DATA, address, (size_t)colors[other].port, &reason) ||
               fail_with(error, "rank %zu cannot reach rank %zu at %.63s, port %zu: %.200s; see whether the machines' "
                         "firewalls let connections through", parent->rank, other, address,
                         (size_t)colors[other].port, reason.text);
    }
    good = good && comm_await_ranks(group, r, true, error);
    for (size_t p = 0; good && p < group->world; p++)
        setsockopt(group->links[p].data, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (size_t i = 0; i < r->pending_count; i++) close(r->pending[i]);
    free(r->table);
    return good;
}

// Adds a group to the list of its parent, whose failures it has from then on.
static inline bool comm_join_parent(Comm* group, Error* error) {
    Comm* parent = group->parent;
    pthread_mutex_lock(&parent->mutex);
    bool failed = parent->failed;
    if (failed) *error = parent->error;
    else {
        group->next = parent->groups;
        parent->groups = group;
    }
    pthread_mutex_unlock(&parent->mutex);
    return !failed;
}

// Makes the tables of a group: of the ranks of this rank's color.
static inline bool comm_make_group(Comm* group, const CommColor* colors, Error* error) {
    Comm* parent = group->parent;
    for (size_t p = 0; p < parent->world; p++) {
        if (colors[p].color != colors[parent->rank].color) continue;
        if (p == parent->rank) group->rank = group->world;
        group->members[group->world++] = p;
    }
    if (!comm_allocate(group, error) || !comm_join_parent(group, error)) return false;
    group->queue->started = group->queue->finished = 1;  // in messages 0 is an exchange of comm_open
    if (group->world == 1 || group->mpi) return true;
    group->connections = group->world - 1;
    parent->connections += group->connections;
    if (!comm_raise_file_limit(parent, error)) return false;
    return comm_open_waker(group) ||
           fail_with(error, "rank %zu cannot open a pipe: %s; raise the limit (ulimit -n)", parent->rank,
                     strerror(errno));
}

// Makes the group of this rank: the ranks that give the same color, in their order. Its timeout is timeout_factor times
// that of `comm`. Called by all ranks of `comm` together, each from the thread that uses it. After a failure there is
// nothing to close.
static inline bool comm_split(Comm* group, Comm* comm, size_t color, double timeout_factor, Error* error) {
    size_t N = comm->world, port = 0;
    const Comm begun = {.local_rank = comm->local_rank, .local_world = comm->local_world,
                        .timeout_ms = timeout_factor * comm->timeout_ms, .mpi = comm->mpi, .listener = -1, .wake = -1,
                        .waker = -1, .parent = comm, .splits = ++comm->splits};
    *group = begun;
    snprintf(group->run, sizeof group->run, "%.40s/%zu", comm->run, comm->splits);
    pthread_mutex_init(&group->mutex, NULL);
    pthread_cond_init(&group->changed, NULL);
    CommColor* colors = (CommColor*)memory_allocate(N * sizeof(CommColor));
    group->members = (size_t*)memory_allocate(N * sizeof(size_t));
    bool good = (colors && group->members) || fail_with(error, "not enough memory for a group of %zu ranks", N);
    if (good && N > 1 && !comm->mpi) good = socket_listen(&group->listener, &port, comm->address, error);
    good = comm_agree_all(comm, good, error);
    if (good) {
        const CommColor own = {color, port};
        colors[comm->rank] = own;
        good = comm_all_gather(comm, colors, 2 * N, DTYPE_I64, NULL, NULL, error) &&
               comm_agree_all(comm, comm_make_group(group, colors, error), error);
    }
    if (good && group->world > 1) {
        // From here on a failure of one rank is one of all, which wait for it.
        fault_point("split");
        good = comm->mpi || comm_connect_group(group, port, colors, error);
        socket_close(&group->listener);  // before there is a thread
        good = good && comm_start_thread(group, error) && (comm->mpi || comm_share(group, error));
        // A rank that has closed its listener because of a failure is not to blame.
        if (!good && comm_await_parent(group, now_ms() + COMM_GRACE_MS, error)) comm_fail(comm, error, false);
    }
    if (group->queue == NULL || !group->queue->running) socket_close(&group->listener);  // a thread reads it
    good = good && comm_barrier(comm, error);
    free(colors);
    return comm_finish_open(group, good);
}

#endif  // LLMTRAIN_SPLIT_H
