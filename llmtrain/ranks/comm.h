// comm.h: collectives between the processes of a run on CPUs: barrier, all_reduce, reduce_scatter, all_gather,
// broadcast, all_to_all. launch.h says which rank a process is; control.h connects the ranks and watches them.
//
//   1. collectives  their headers; the queue
//   2. transfers    every rank sends to every rank
//   3. sums         in the order of the ranks
//   4. algorithms   each collective as transfers and sums
//   5. progress     the thread that runs them in the background, and watches the other ranks between them
//   6. functions    comm_start, comm_wait; comm_failed, comm_on_failure, comm_abort; comm_open, comm_close;
//                   comm_gather_texts, comm_agree_all
//
// In short:
//
//   comm_open(&comm, &launch, 60e3, &error)                     launch.h finds the ranks of a launcher, or forks them
//   CommRequest sum = comm_start(&comm, COMM_ALL_REDUCE, DTYPE_F32, x, x, n, 0, NULL, NULL);
//   ... compute ...
//   comm_wait(&comm, sum, &error)
//   comm_close(&comm);
//
// All ranks call the same collectives in the same order, each from one thread at a time. An element of a sum is the sum
// over ranks 0, 1, ... in this order, in float for the 16-bit types, rounded once at the end: the same bits on every
// rank, in every run, through every transport; and all_reduce is reduce_scatter followed by all_gather, to the bit.
//
// A rank that dies, stops, aborts (comm_abort) or calls something else makes every other rank's call return false with
// an error that names it, after the timeout at the latest; the Comm can then only be closed. That holds between
// collectives too: comm_failed and on_failure report it without waiting. A rank may compute for as long as it likes
// while no other waits for it; a collective fails when the timeout has passed without a byte from a rank that it needs.
// With MPI there are no connections to watch: mpirun handles a rank that dies; ranks that wait find a stopped one.

#ifndef LLMTRAIN_COMM_H
#define LLMTRAIN_COMM_H

#include "control.h"
#include "../ops/dtypes.h"
#include "../base/fault.h"

#define COMM_IN_FLIGHT ((uint64_t)256)  // requests started and not finished; starting another one blocks
// Bytes that one rank sends to another for a sum at a time: staging memory.
#define COMM_CHUNK LLMTRAIN_PIECE((size_t)256 << 10, (size_t)504)

// ------------------------------------------------------------------------------------------------
// 1. Collectives

// Precedes the data of every collective, from each rank to each, and must be equal on all ranks.
typedef struct {
    uint64_t number;      // of the collective; 0: the one in comm_open
    uint64_t n, slices;   // elements; hash of the slices
    uint32_t operation, type, root, unused;
} CommHeader;

typedef struct {
    CommHeader header;
    char* out;       // the result, or the vector itself for operations in place
    const char* in;
    Slice* slices;   // (world) in bytes
} CommCall;

struct CommQueue {
    CommCall calls[COMM_IN_FLIGHT];  // a ring
    Slice* slices;               // (COMM_IN_FLIGHT, world)
    uint64_t started, finished;  // collectives so far
    bool running, closing;       // the progress thread; it ends when all is finished
    pthread_t thread;
    CommStatistics statistics;

    // Of the collective in progress
    CommHeader* headers;         // (world)
    const char** sources;        // (world) of the sum
    char* staging;               // (world, COMM_CHUNK)
    uint64_t sent;               // payload, in bytes
};

// "all_reduce of 1000 fp32 (operation 17)"
static inline void comm_describe(char* text, size_t size, const CommHeader* h) {
    unsigned long long number = h->number, n = h->n;
    char root[40] = "";
    if (h->operation == COMM_BROADCAST) snprintf(root, sizeof root, " from rank %u", (unsigned)h->root);
    if (h->operation >= COMM_OPERATIONS || h->type >= DTYPE_COUNT) snprintf(text, size, "something unknown");
    else if (number == 0) snprintf(text, size, "the first exchange");
    else if (h->operation == COMM_BARRIER) snprintf(text, size, "barrier (operation %llu)", number);
    else
        snprintf(text, size, "%s of %llu %s%s (operation %llu)", COMM_OPERATION_NAMES[h->operation], n,
                 DTYPES[h->type].name, root, number);
}

// ------------------------------------------------------------------------------------------------
// 2. Transfers
//
// The links hold the parts to send to each rank and to receive from it; a transfer moves all of them at once. Each pair
// of ranks agrees on the bytes between the two, so that no part is longer or shorter than expected: in the first
// transfer of a collective headers precede the parts, and a rank with another header is refused. Through sockets a
// checksum follows each part: that of TCP, 16 bits, is computed again by some network cards and switches. Ranks of one
// machine share memory instead (shared_memory.h), which needs none.

static inline void comm_set_part(CommLink* link, int direction, int part, const void* at, size_t bytes) {
    link->parts[direction][part].at = (char*)at;
    link->parts[direction][part].bytes = bytes;
}

// Whether a checksum follows the data between this rank and rank p: they pass through sockets.
static inline bool comm_is_checked(const Comm* comm, size_t p) { return !comm->mpi && !comm->links[p].rings[0]; }

// Sets the data that the next transfer sends to rank p, and receives from it.
static inline void comm_exchange(Comm* comm, size_t p, const char* out, size_t out_bytes, char* in, size_t in_bytes) {
    CommLink* link = &comm->links[p];
    comm_set_part(link, COMM_OUT, COMM_PAYLOAD, out, out_bytes);
    comm_set_part(link, COMM_IN, COMM_PAYLOAD, in, in_bytes);
    for (int d = 0; d < 2; d++) {
        bool checked = link->parts[d][COMM_PAYLOAD].bytes > 0 && comm_is_checked(comm, p);
        comm_set_part(link, d, COMM_CHECKSUM, &link->checksums[d], checked ? sizeof *link->checksums : 0);
        link->hashes[d] = hash_begin(0);
    }
    comm->queue->sent += out_bytes;
}

// The next transfer begins with this header.
static inline void comm_exchange_headers(Comm* comm, const CommHeader* header) {
    CommHeader* headers = comm->queue->headers;
    headers[comm->rank] = *header;
    comm->queue->sent = 0;
    for (size_t p = 0; p < comm->world; p++) {
        if (p == comm->rank) continue;
        comm_set_part(&comm->links[p], COMM_OUT, COMM_HEADER, &headers[comm->rank], sizeof *headers);
        comm_set_part(&comm->links[p], COMM_IN, COMM_HEADER, &headers[p], sizeof *headers);
    }
}

// Whether rank p has called the same collective as this one.
static inline bool comm_check_header(const Comm* comm, size_t p, Error* error) {
    const CommHeader *own = &comm->queue->headers[comm->rank], *other = &comm->queue->headers[p];
    char ours[160], theirs[160];
    if (memcmp(own, other, sizeof *own) == 0) return true;
    comm_describe(ours, sizeof ours, own);
    comm_describe(theirs, sizeof theirs, other);
    size_t from = comm_rank(comm, p), here = comm_rank(comm, comm->rank);
    if (other->number != own->number)
        return fail_with(error,
                         "rank %zu sent rank %zu data that is not part of %s; the network or a program is faulty",
                         from, here, ours);
    return fail_with(error, "the ranks disagree: rank %zu called %s and rank %zu %s%s; start all with the same "
                     "program, flags and data", from, theirs, here, ours,
                     strcmp(theirs, ours) == 0 ? " with other slices" : "");
}

// After a part has moved: whether what has arrived from rank p is what this rank expects.
static inline bool comm_check_part(Comm* comm, size_t p, int direction, int part, Error* error) {
    CommLink* link = &comm->links[p];
    uint64_t* checksum = &link->checksums[direction];
    if (direction == COMM_OUT && part == COMM_PAYLOAD) *checksum = hash_end(&link->hashes[direction]);
    if (direction == COMM_OUT || part == COMM_PAYLOAD) return true;
    if (part == COMM_HEADER) return comm_check_header(comm, p, error);
    return *checksum == hash_end(&link->hashes[direction]) ||
           fail_with(error, "data from rank %zu to rank %zu were altered on the way, %s: the network or the memory of "
                     "a machine is faulty; --resume from the last checkpoint, without that machine",
                     comm_rank(comm, p), comm_rank(comm, comm->rank), comm->doing);
}

// Sends bytes of a part to rank p, or receives them, without waiting; returns how many: -1 with EAGAIN if there are
// none yet, 0 if the other end is closed.
static inline ssize_t comm_move_part(Comm* comm, size_t p, int direction, CommPart* part, bool more) {
    CommLink* link = &comm->links[p];
    bool out = direction == COMM_OUT;
    if (comm->mpi) return comm_mpi_move(comm, part, p, out);
    if (link->rings[0]) {
        size_t n = out ? shared_send(link->rings[COMM_OUT], part->at, part->bytes) :
                   shared_receive(link->rings[COMM_IN], part->at, part->bytes);
        errno = EAGAIN;
        return n > 0 ? (ssize_t)n : link->closed ? 0 : -1;
    }
    return out ? send(link->data, part->at, part->bytes, SOCKET_QUIET | (more ? SOCKET_MORE : 0)) :
           recv(link->data, part->at, part->bytes, 0);
}

// Sends to and receives from rank p as many bytes as possible without waiting: the header, the data, their checksum.
static inline bool comm_move(Comm* comm, size_t p, bool* moved, Error* error) {
    CommLink* link = &comm->links[p];
    bool any = false;
    for (int i = 0; i < 2 * COMM_PARTS; i++) {
        int d = i / COMM_PARTS, k = i % COMM_PARTS;
        CommPart* part = &link->parts[d][k];
        if (part->bytes == 0) continue;
        // A header shares its packet with data, and so does a checksum.
        ssize_t n = comm_move_part(comm, p, d, part, k + 1 < COMM_PARTS && part[1].bytes > 0);
        if (n == 0 || (n < 0 && !socket_would_block())) return comm_fail_closed(comm, p, error);
        if (n > 0) {
            // Here caches still hold the bytes.
            if (k == COMM_PAYLOAD && comm_is_checked(comm, p)) hash_add(&link->hashes[d], part->at, (size_t)n);
            part->at += n;
            part->bytes -= (size_t)n;
            any = true;
            if (d == COMM_IN && link->seen_ms > 0) link->seen_ms = now_ms();
        }
        if (part->bytes > 0) i = d * COMM_PARTS + COMM_PARTS - 1;  // the next direction
        else if (!comm_check_part(comm, p, d, k, error)) return false;
    }
    if (any && link->rings[0] && shared_wakes(link->rings)) socket_wake(link->data);
    *moved |= any;
    return true;
}

// Whether ranks that wait have more time: see comm_extend_timeout.
static inline bool comm_is_extended(const Comm* comm) {
    const Comm* run = comm->parent ? comm->parent : comm;
    return __atomic_load_n(&run->extended_timeout, __ATOMIC_RELAXED);
}

static inline bool comm_transfer(Comm* comm, Error* error) {
    double moved_ms = comm_clock(comm);
    for (;;) {
        bool moving = false, moved = false;
        fault_point("transfer");
        for (size_t p = 0; p < comm->world; p++) {
            if (!comm_move(comm, p, &moved, error)) return false;
            moving |= comm_events(&comm->links[p]) != 0;
        }
        if (!moving) return true;
        comm_send_heartbeat(comm);
        double now = comm_clock(comm);
        if (moved) moved_ms = now;
        double deadline = fmax(moved_ms, comm->resumed_ms) + comm->timeout_ms;
        bool over = now >= deadline;
        if (over && !comm_is_extended(comm)) return comm_fail_late(comm, error);
        if (over && !comm_check_heartbeats(comm, comm->timeout_ms, error)) return false;
        if (!moved && !comm_await_events(comm, fmax(deadline, now + COMM_RETRY_MS), error)) return false;
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Sums
//
// Over the sources, one vector per rank, in the order of the ranks, in blocks that stay in the L1 cache.

#define COMM_BLOCK LLMTRAIN_PIECE((size_t)1024, (size_t)61)

// out (n) may be one of the sources. Integer sums that overflow wrap around.
static inline void comm_sum(char* out, const char* const* sources, size_t world, Dtype type, size_t n) {
    float sums[COMM_BLOCK], values[COMM_BLOCK];
    uint64_t integers[COMM_BLOCK];
    for (size_t first = 0, size = dtype_bytes(type); first < n; first += COMM_BLOCK) {
        size_t count = min_size(COMM_BLOCK, n - first), bytes = count * size;
        for (size_t p = 0; p < world; p++) {
            const char* x = sources[p] + first * size;
            const uint64_t* wide = (const uint64_t*)x;
            const uint16_t* halves = (const uint16_t*)x;
            if (type == DTYPE_F32) memcpy(values, x, bytes);
            if (type == DTYPE_BF16) for (size_t i = 0; i < count; i++) values[i] = float_from_bf16(halves[i]);
            if (type == DTYPE_F16) for (size_t i = 0; i < count; i++) values[i] = float_from_f16(halves[i]);
            if (type == DTYPE_I64)
                for (size_t i = 0; i < count; i++) integers[i] = wide[i] + (p > 0 ? integers[i] : 0);
            else if (p == 0) memcpy(sums, values, count * sizeof *sums);
            else for (size_t i = 0; i < count; i++) sums[i] += values[i];
        }
        char* to = out + first * size;
        uint16_t* halves = (uint16_t*)to;
        if (type == DTYPE_F32) memcpy(to, sums, bytes);
        if (type == DTYPE_BF16) for (size_t i = 0; i < count; i++) halves[i] = bf16_from_float(sums[i]);
        if (type == DTYPE_F16) for (size_t i = 0; i < count; i++) halves[i] = f16_from_float(sums[i]);
        if (type == DTYPE_I64) memcpy(to, integers, bytes);
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Algorithms
//
// Each rank owns its slice of the vector: all others send it their values of it (reduce_scatter), and it sends all
// others the sum (all_gather). So a rank sends (world - 1)/world of the vector in each of the two, the minimum.

static inline bool comm_reduces(const CommCall* call) {
    return call->header.operation == COMM_ALL_REDUCE || call->header.operation == COMM_REDUCE_SCATTER;
}

// Sums this rank's slice into `out`, chunk by chunk.
static inline bool comm_run_reduce_scatter(Comm* comm, const CommCall* call, char* out, Error* error) {
    CommQueue* queue = comm->queue;
    Dtype type = (Dtype)call->header.type;
    size_t own = slice_length(call->slices[comm->rank]), longest = 0;
    for (size_t p = 0; p < comm->world; p++) longest = max_size(longest, slice_length(call->slices[p]));
    for (size_t start = 0; start == 0 || start < longest; start += COMM_CHUNK) {
        size_t count = start < own ? min_size(COMM_CHUNK, own - start) : 0;
        for (size_t p = 0; p < comm->world; p++) {
            const char* mine = call->in + call->slices[p].first + start;
            char* theirs = queue->staging + p * COMM_CHUNK;
            size_t left = slice_length(call->slices[p]) - min_size(slice_length(call->slices[p]), start);
            queue->sources[p] = p == comm->rank ? mine : theirs;
            if (p != comm->rank) comm_exchange(comm, p, mine, min_size(COMM_CHUNK, left), theirs, count);
        }
        if (!comm_transfer(comm, error)) return false;
        comm_sum(out + start, queue->sources, comm->world, type, count / dtype_bytes(type));
    }
    return true;
}

// Every rank sends its slice of call->out to all. A broadcast has only one slice, the root's.
static inline bool comm_run_all_gather(Comm* comm, const CommCall* call, Error* error) {
    Slice own = call->slices[comm->rank];
    for (size_t p = 0; p < comm->world; p++) {
        char *mine = call->out + own.first, *theirs = call->out + call->slices[p].first;
        if (p != comm->rank) comm_exchange(comm, p, mine, slice_length(own), theirs, slice_length(call->slices[p]));
    }
    return comm_transfer(comm, error);
}

// Rank p receives part p of call->in, and sends part p of call->out.
static inline bool comm_run_all_to_all(Comm* comm, const CommCall* call, Error* error) {
    size_t bytes = (size_t)call->header.n / comm->world * dtype_bytes((Dtype)call->header.type);
    for (size_t p = 0; p < comm->world; p++) {
        const char* mine = call->in + p * bytes;
        char* theirs = call->out + p * bytes;
        if (p != comm->rank) comm_exchange(comm, p, mine, bytes, theirs, bytes);
        else if (bytes > 0) memcpy(theirs, mine, bytes);
    }
    return comm_transfer(comm, error);
}

// Checks the arguments that can be wrong on one rank alone, whatever the other ranks call.
static inline bool comm_check_call(const Comm* comm, const CommCall* call, const char* what, Error* error) {
    Dtype type = (Dtype)call->header.type;
    size_t size = dtype_bytes(type), bytes = (size_t)call->header.n * size, rank = comm_rank(comm, comm->rank);
    bool sums = type == DTYPE_F32 || type == DTYPE_BF16 || type == DTYPE_F16 || type == DTYPE_I64;
    if (comm_reduces(call) && !sums)
        return fail_with(error, "rank %zu called %s; that type cannot be summed", rank, what);
    if (call->header.root >= comm->world)
        return fail_with(error, "rank %zu called %s; there is no such rank", rank, what);
    if (call->header.operation == COMM_ALL_TO_ALL && bytes > 0 &&
        (call->header.n % comm->world != 0 || call->out == call->in))
        return fail_with(error, "rank %zu called %s; its length must be a multiple of %zu, the number of ranks, and "
                         "its result another vector", rank, what, comm->world);
    for (size_t p = 0, end = 0; p < comm->world; end = call->slices[p++].end) {
        Slice s = call->slices[p];
        if (s.first < end || s.end < s.first || s.end > bytes)
            return fail_with(error, "rank %zu called %s with the slice [%zu, %zu) for rank %zu; slices must lie in the "
                             "vector and follow each other", rank, what, s.first / size, s.end / size,
                             comm_rank(comm, p));
    }
    return true;
}

static inline bool comm_run(Comm* comm, const CommCall* call, Error* error) {
    char what[160];
    bool all = call->header.operation == COMM_ALL_REDUCE;
    comm_describe(what, sizeof what, &call->header);
    snprintf(comm->doing, sizeof comm->doing, "in %s", what);
    if (!comm_check_call(comm, call, what, error)) return false;
    if (call->header.type != DTYPE_U8) fault_point("collective");  // bytes are statistics and texts
    comm_exchange_headers(comm, &call->header);
    if (call->header.operation == COMM_ALL_TO_ALL) return comm_run_all_to_all(comm, call, error);
    char* sum = call->out + (all ? call->slices[comm->rank].first : 0);
    if (comm_reduces(call) && !comm_run_reduce_scatter(comm, call, sum, error)) return false;
    return call->header.operation == COMM_REDUCE_SCATTER || comm_run_all_gather(comm, call, error);
}

// ------------------------------------------------------------------------------------------------
// 5. Progress
//
// One thread per Comm takes the requests in the order in which they were started, and monitors the other ranks between
// them. After a failure it notifies the others and ends; all requests that are not finished have failed. A group hands
// its failure to its parent, which fails, with all its groups.

static inline bool comm_idle(Comm* comm, Error* error) {
    snprintf(comm->doing, sizeof comm->doing, "between two collectives");
    if (!comm_monitor(comm, INFINITY, error)) return false;
    comm_clock(comm);
    return comm_check_heartbeats(comm, comm->timeout_ms, error);
}

static inline void comm_begin_failure(Comm* comm, const Error* error);

// Makes the failure known on this rank, when no request is in progress. The mutex is held on entry and on return, not
// while on_failure is called.
static inline void comm_record_failure(Comm* comm, const Error* error) {
    void (*on_failure)(void*) = comm->on_failure;
    comm->failed = comm->calling = true;
    comm->error = *error;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
    if (on_failure) on_failure(comm->on_failure_context);
    for (Comm* group = comm->groups; group; group = group->next) {  // it stays in the list while `calling`
        pthread_mutex_lock(&group->mutex);
        comm_begin_failure(group, error);
        pthread_mutex_unlock(&group->mutex);
    }
    pthread_mutex_lock(&comm->mutex);
    comm->calling = false;
    pthread_cond_broadcast(&comm->changed);
}

// Makes the Comm fail, unless it has failed: at once, or its thread does as soon as it can. The mutex is held.
static inline void comm_begin_failure(Comm* comm, const Error* error) {
    if (comm->failed || comm->aborting) return;
    if (!comm->queue->running) comm_record_failure(comm, error);
    comm->aborting = true;
    comm->error = *error;
    if (comm->waker >= 0) pipe_wake(comm->waker);
}

// Makes the Comm fail with this error unless it has failed, whatever is in flight; returns when it has.
static inline void comm_fail(Comm* comm, const Error* error, bool late) {
    pthread_mutex_lock(&comm->mutex);
    if (!comm->aborting) comm->late = late;
    comm_begin_failure(comm, error);
    while (!comm->failed) pthread_cond_wait(&comm->changed, &comm->mutex);
    pthread_mutex_unlock(&comm->mutex);
}

// True, with the error, if a failure is known; does not wait.
static inline bool comm_failed(Comm* comm, Error* error) {
    pthread_mutex_lock(&comm->mutex);
    bool failed = comm->failed;
    if (failed) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    return failed;
}

// Runs the oldest request; the mutex is held on entry and on return.
static inline void comm_step(Comm* comm) {
    CommQueue* queue = comm->queue;
    Error error;
    bool work = queue->finished < queue->started;
    const CommCall* call = &queue->calls[queue->finished % COMM_IN_FLIGHT];
    pthread_mutex_unlock(&comm->mutex);
    bool good = work ? comm_run(comm, call, &error) : comm_idle(comm, &error);
    if (!good && comm->parent) {
        comm_fail(comm->parent, &error, comm->late);
        comm_failed(comm->parent, &error);
    } else if (!good) {
        comm_notify(comm, COMM_FAILED, error.text);
    }
    pthread_mutex_lock(&comm->mutex);
    if (!good) {
        if (!comm->failed) comm_record_failure(comm, &error);
    } else if (work) {
        queue->finished++;
        queue->statistics.bytes_sent += queue->sent;
        pthread_cond_broadcast(&comm->changed);
    }
}

// In a tree of control connections: this rank's run has ended, but messages to its children and from them pass through
// it until they have left too. Its data connections end now, so that others find that it has left. The mutex is held.
static inline void comm_relay(Comm* comm) {
    bool children = comm->fan_out > 0;
    if (!children || comm->failed) return;
    comm_notify(comm, COMM_LEFT, "");
    comm->links[comm->rank].left = true;
    for (size_t p = 0; p < comm->world; p++) socket_close(&comm->links[p].data);
    while (!comm->failed && children) {
        children = false;
        for (size_t p = 0; p < comm->world; p++) children |= comm_is_child(comm, p) && comm->links[p].control >= 0;
        if (children) comm_step(comm);
    }
}

static inline void* comm_progress(void* argument) {
    Comm* comm = (Comm*)argument;
    CommQueue* queue = comm->queue;
    pthread_mutex_lock(&comm->mutex);
    while (!comm->failed && !(queue->closing && queue->finished == queue->started)) comm_step(comm);
    comm_relay(comm);
    pthread_mutex_unlock(&comm->mutex);
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 6. Functions

// Starts a collective; does not wait, unless COMM_IN_FLIGHT of them are in progress. Its memory must not change until
// comm_wait has returned. `slices` is called here, not later.
static inline CommRequest comm_start(Comm* comm, CommOperation operation, Dtype type, void* out, const void* in,
                                     size_t n, size_t root, CommSlices slices, const void* context) {
    CommQueue* queue = comm->queue;
    size_t size = dtype_bytes(type);
    pthread_mutex_lock(&comm->mutex);
    double began = now_ms();
    while (!comm->failed && queue->started - queue->finished == COMM_IN_FLIGHT)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    queue->statistics.waited_ms += now_ms() - began;
    uint64_t number = queue->started;
    CommCall* call = &queue->calls[number % COMM_IN_FLIGHT];
    if (!comm->failed) {
        CommHeader header = {number, n, 0, (uint32_t)operation, (uint32_t)type, (uint32_t)root, 0};
        call->slices = queue->slices + number % COMM_IN_FLIGHT * comm->world;
        for (size_t p = 0; p < comm->world; p++) {
            Slice slice = {p > root ? n : 0, p >= root ? n : 0};  // of a broadcast: the root has all
            if (operation != COMM_BROADCAST) slice = slices ? slices(p, context) : comm_even_slice(p, comm->world, n);
            call->slices[p].first = slice.first * size;
            call->slices[p].end = slice.end * size;
        }
        header.slices = hash_bytes(call->slices, comm->world * sizeof(Slice));
        call->header = header;
        call->out = (char*)out;
        call->in = (const char*)in;
        queue->started++;
        if (!queue->running) comm_step(comm);  // one rank has no thread
    }
    pthread_mutex_unlock(&comm->mutex);
    if (queue->running) pipe_wake(comm->waker);
    return number;
}

// Waits until a collective is finished; false if it failed.
static inline bool comm_wait(Comm* comm, CommRequest request, Error* error) {
    double began = now_ms();
    pthread_mutex_lock(&comm->mutex);
    while (!comm->failed && comm->queue->finished <= request) pthread_cond_wait(&comm->changed, &comm->mutex);
    bool good = comm->queue->finished > request;
    if (!good) *error = comm->error;
    comm->queue->statistics.waited_ms += now_ms() - began;
    pthread_mutex_unlock(&comm->mutex);
    return good;
}

// Blocking versions of some collectives.
static inline bool comm_barrier(Comm* comm, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_BARRIER, DTYPE_U8, NULL, NULL, 0, 0, NULL, NULL), error);
}
static inline bool comm_broadcast(Comm* comm, void* data, size_t n, Dtype type, size_t root, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_BROADCAST, type, data, data, n, root, NULL, NULL), error);
}
static inline bool comm_all_gather(Comm* comm, void* data, size_t n, Dtype type, CommSlices slices,
                                   const void* context, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_ALL_GATHER, type, data, data, n, 0, slices, context), error);
}

// Those of the Comm and of its groups.
static inline CommStatistics comm_statistics(Comm* comm) {
    pthread_mutex_lock(&comm->mutex);
    CommStatistics statistics = comm->queue->statistics;
    for (Comm* group = comm->groups; group; group = group->next) {
        CommStatistics more = comm_statistics(group);
        statistics.waited_ms += more.waited_ms;
        statistics.bytes_sent += more.bytes_sent;
    }
    pthread_mutex_unlock(&comm->mutex);
    return statistics;
}

// While some ranks do long work alone (save, load), those that wait for them in a collective wait as long as heartbeats
// arrive. MPI has no heartbeats, and mpirun ends all ranks when one dies.
static inline void comm_extend_timeout(Comm* comm, bool extended) {
    __atomic_store_n(&comm->extended_timeout, extended, __ATOMIC_RELAXED);
}

// Registers a function to be called once, when the Comm fails: by the progress thread, as soon as the failure is known
// here, or by this call itself if it is known already. NULL unregisters it: when this returns, the function is not
// running and will not be called. The function must not call this one.
static inline void comm_on_failure(Comm* comm, void (*on_failure)(void* context), void* context) {
    pthread_mutex_lock(&comm->mutex);
    while (comm->calling) pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->on_failure = on_failure;
    comm->on_failure_context = context;
    bool late = comm->failed && on_failure;
    pthread_mutex_unlock(&comm->mutex);
    if (late) on_failure(context);
}

// Fails this rank for a reason of its own: calls on all ranks fail with "rank 2 gave up: " and the reason. May be
// called from any thread, whatever is in flight; afterwards only comm_close may be called.
static inline void comm_abort(Comm* comm, const char* reason) {
    Error error;
    fail_with(&error, "rank %zu gave up: %.900s", comm_rank(comm, comm->rank), reason);
    comm_fail(comm->parent ? comm->parent : comm, &error, false);
}

// The bytes that comm_open allocates and maps, approximately: of more ranks not all are on this machine.
static inline size_t comm_bytes(size_t world) {
    return world > 1 ? world * (COMM_CHUNK + sizeof(CommLink)) + 2 * SHARED_RING * min_size(world - 1, COMM_PAIRS_MAX) +
                       COMM_IN_FLIGHT * (sizeof(CommCall) + world * sizeof(Slice)) : 0;
}

// Takes a group from the list of its parent.
static inline void comm_leave_parent(Comm* group) {
    Comm* parent = group->parent;
    pthread_mutex_lock(&parent->mutex);
    while (parent->calling) pthread_cond_wait(&parent->changed, &parent->mutex);
    Comm** at = &parent->groups;
    while (*at && *at != group) at = &(*at)->next;
    if (*at) *at = group->next;
    parent->connections -= group->connections;
    pthread_mutex_unlock(&parent->mutex);
}

// Ends everything: finishes the requests in flight, notifies the others, closes connections and frees memory.
static inline void comm_close(Comm* comm) {
    CommQueue* queue = comm->queue;
    Error unused;
    if (queue && queue->running) {
        pthread_mutex_lock(&comm->mutex);
        queue->closing = true;
        pthread_mutex_unlock(&comm->mutex);
        pipe_wake(comm->waker);
        pthread_join(queue->thread, NULL);
    }
    if (comm->parent) comm_leave_parent(comm);
    if (comm->links && !comm->failed && comm->fan_out == 0) comm_notify(comm, COMM_LEFT, "");
    for (size_t p = 0; comm->links && p < comm->world; p++) {
        comm_receive(comm, p, &unused);  // closing with unread data would lose what was sent last
        socket_close(&comm->links[p].control);
        socket_close(&comm->links[p].data);
        shared_unmap(comm->links[p].rings);
    }
    comm_mpi_close(comm);
    socket_close(&comm->wake);
    socket_close(&comm->waker);
    free(comm->links);
    free(comm->polls);
    free(comm->members);
    if (queue) {
        free(queue->slices);
        free(queue->headers);
        free(queue->sources);
        free(queue->staging);
        free(queue);
    }
    pthread_mutex_destroy(&comm->mutex);
    pthread_cond_destroy(&comm->changed);
    memset(comm, 0, sizeof *comm);
    comm->wake = comm->waker = -1;
}

static inline bool comm_allocate(Comm* comm, Error* error) {
    size_t N = comm->world;
    CommQueue* queue = comm->queue = (CommQueue*)memory_allocate(sizeof(CommQueue));
    comm->links = (CommLink*)memory_allocate(N * sizeof(CommLink));
    comm->polls = (struct pollfd*)memory_allocate((2 * N + 2) * sizeof(struct pollfd));
    for (size_t p = 0; comm->links && p < N; p++) comm->links[p].data = comm->links[p].control = -1;
    if (queue) {
        queue->slices = (Slice*)memory_allocate(COMM_IN_FLIGHT * N * sizeof(Slice));
        queue->headers = (CommHeader*)memory_allocate(N * sizeof(CommHeader));
        queue->sources = (const char**)memory_allocate(N * sizeof(const char*));
        queue->staging = (char*)memory_allocate(N > 1 ? N * COMM_CHUNK : 0);
    }
    bool good = queue && queue->slices && queue->headers && queue->sources && queue->staging;
    if (good && comm->links && comm->polls) return comm_mpi_prepare(comm), true;
    return fail_with(error, "not enough memory for the connections of %zu ranks", N);
}

// The first collective: each rank reports its machine. Counts the ranks on this machine if the launcher has not.
static inline bool comm_find_local(Comm* comm, Error* error) {
    char name[256];
    machine_identity(name);
    uint64_t here = hash_bytes(name, sizeof name);
    uint64_t* machines = (uint64_t*)comm->queue->staging;  // (world) no sum needs it yet
    size_t before = 0, same = 0;
    machines[comm->rank] = here;
    if (!comm_all_gather(comm, machines, comm->world, DTYPE_I64, NULL, NULL, error)) return false;
    for (size_t p = 0; p < comm->world; p++) {
        same += machines[p] == here;
        before += machines[p] == here && p < comm->rank;
        comm->links[p].near = machines[p] == here;
    }
    if (comm->local_rank == LAUNCH_UNKNOWN) comm->local_rank = before;
    if (comm->local_world == LAUNCH_UNKNOWN) comm->local_world = same;
    return true;
}

// Lets data between ranks of one machine pass through memory that they share, where that is possible; it is not in
// containers that cannot see each other, or without memory. The lower rank of a pair makes it. Two collectives, which
// nobody else counts: an exchange of paths, and one of what could be mapped.
static inline bool comm_share(Comm* comm, Error* error) {
    CommQueue* queue = comm->queue;
    size_t N = comm->world, above = 0, index = 0;
    SharedFile* files = (SharedFile*)queue->staging;  // (N) no sum needs it yet
    SharedRing* (*rings)[2] = (SharedRing* (*)[2])(files + N);               // (N)
    uint64_t *own = (uint64_t*)(rings + N), *others = own + N;               // (N) what was mapped
    bool off = getenv("LLMTRAIN_TEST_SOCKETS") != NULL;
    memset(queue->staging, 0, N * (sizeof *files + sizeof *rings + 2 * sizeof *own));
    for (size_t p = 0; p < N; p++) *(p < comm->rank ? &index : &above) += comm_is_near(comm, p);
    uint64_t number[3] = {(uint64_t)getpid(), comm->rank, (uint64_t)(now_ms() * 1e6)};
    int file = above > 0 && !off ? shared_make(&files[comm->rank], above, hash_bytes(number, sizeof number)) : -1;
    bool good = comm_all_gather(comm, files, N * sizeof *files, DTYPE_U8, NULL, NULL, error);
    // Pair k of a file is that with the k-th rank of the machine behind the one that has made it.
    for (size_t p = 0, i = 0; good && p < N; p++) {
        if (!comm_is_near(comm, p)) continue;
        bool first = p > comm->rank;
        own[p] = !off && shared_map(rings[p], &files[first ? comm->rank : p], first ? i - index : index - i - 1, first);
        i++;
    }
    good = good && comm_wait(comm, comm_start(comm, COMM_ALL_TO_ALL, DTYPE_I64, others, own, N, 0, NULL, NULL), error);
    if (file >= 0) close(file);
    pthread_mutex_lock(&comm->mutex);
    for (size_t p = 0; p < N; p++) {
        if (!good || !others[p]) shared_unmap(rings[p]);
        memcpy(comm->links[p].rings, rings[p], sizeof rings[p]);
    }
    if (good) queue->started = queue->finished = 1;
    pthread_mutex_unlock(&comm->mutex);
    return good;
}

// Makes the pipe that wakes the thread, unless there is one.
static inline bool comm_open_waker(Comm* comm) {
    int ends[2] = {comm->wake, comm->waker};
    bool good = comm->waker >= 0 || pipe_open(ends);
    comm->wake = ends[0];
    comm->waker = ends[1];
    return good;
}

static inline bool comm_start_thread(Comm* comm, Error* error) {
    CommQueue* queue = comm->queue;
    pthread_mutex_lock(&comm->mutex);
    queue->running = comm_open_waker(comm) && pthread_create(&queue->thread, NULL, comm_progress, comm) == 0;
    pthread_mutex_unlock(&comm->mutex);
    return queue->running || fail_with(error, "rank %zu cannot start its thread: %s; raise the limits (ulimit -u, -n)",
                                       comm_rank(comm, comm->rank), strerror(errno));
}

// The end of opening a Comm or a group, good or not; returns that. After a failure nothing of it is left.
static inline bool comm_finish_open(Comm* comm, bool good) {
    const Transport transport = {comm, comm->rank, comm->world, comm->local_world, comm_start, comm_wait, comm_failed,
                                 comm_statistics};
    comm->transport = transport;
    if (good) return true;
    if (comm->queue == NULL || !comm->queue->running) comm->failed = true;
    comm_close(comm);
    return false;
}

// Connects to the other ranks; returns when all are connected. After a failure there is nothing to close.
static inline bool comm_open(Comm* comm, const Launch* launch, double timeout_ms, Error* error) {
    bool several = launch->world > 1;
    const Comm begun = {.rank = launch->rank, .world = launch->world, .local_rank = launch->local_rank,
                        .local_world = launch->local_world, .timeout_ms = timeout_ms,
                        .mpi = launch->mpi && several, .listener = -1, .wake = -1, .waker = -1};
    *comm = begun;
    comm->fan_out = comm->mpi ? 0 : comm_fan_out(comm->world);
    memcpy(comm->run, launch->run, sizeof comm->run);
    snprintf(comm->address, sizeof comm->address, "%s", launch->address);
    pthread_mutex_init(&comm->mutex, NULL);
    pthread_cond_init(&comm->changed, NULL);
    bool good = comm_allocate(comm, error);
    if (good && several) good = comm->mpi ? comm_mpi_open(comm, error) : comm_rendezvous(comm, launch, error);
    if (good && several) good = comm_start_thread(comm, error);
    good = good && comm_find_local(comm, error);
    return comm_finish_open(comm, good && (!several || comm->mpi || comm_share(comm, error)));
}

// The texts of all ranks, one after the other; rank p's is *texts + begins[p]. begins: (world + 1). The caller frees
// both, also after a failure. A rank without memory for them aborts, since the others would wait for it.
static inline bool comm_gather_texts(Comm* comm, char** texts, size_t** begins, const char* text, Error* error) {
    size_t N = comm->world, length = strlen(text) + 1, *offsets = (size_t*)memory_allocate((N + 1) * sizeof(size_t));
    bool memory = offsets != NULL, good = memory;
    *texts = NULL;
    *begins = offsets;
    if (good) offsets[comm->rank + 1] = length;
    good = good && comm_all_gather(comm, offsets + 1, N, DTYPE_I64, NULL, NULL, error);
    for (size_t p = 0; good && p < N; p++) offsets[p + 1] += offsets[p];
    if (good) memory = good = (*texts = (char*)memory_allocate(offsets[N])) != NULL;
    if (!memory) {
        fail_with(error, "not enough memory for the texts of %zu ranks", N);
        comm_abort(comm, error->text);
    }
    if (good) memcpy(*texts + offsets[comm->rank], text, length);
    // Where all texts are empty there is nothing to send.
    return good && (offsets[N] == N ||
                    comm_all_gather(comm, *texts, offsets[N], DTYPE_U8, comm_slice_of_table, offsets, error));
}

// Every rank reports whether its part of something succeeded, and if not, why, in error->text. True on all ranks if all
// parts did; otherwise false on all, with the error of the lowest rank that failed: "rank 2: cannot read ...", without
// the rank if all failed with the same text; error->on_all_ranks: no rank has to be notified. The Comm stays usable.
static inline bool comm_agree_all(Comm* comm, bool good, Error* error) {
    size_t N = comm->world, same = 0, first = LAUNCH_UNKNOWN, *begins;
    char* texts;
    const char* own = good ? "" : error->text[0] ? error->text : "failed without a message";
    good = comm_gather_texts(comm, &texts, &begins, own, error);
    for (size_t p = N; good && p-- > 0;)
        if (texts[begins[p]] != 0) first = p;
    for (size_t p = 0; first < N && p < N; p++) same += strcmp(texts + begins[p], texts + begins[first]) == 0;
    if (same == N) good = fail_with(error, "%s", texts + begins[first]);
    else if (first < N) good = fail_with(error, "rank %zu: %s", comm_rank(comm, first), texts + begins[first]);
    if (first < N) error->on_all_ranks = true;
    free(begins);
    free(texts);
    return good;
}

#endif  // LLMTRAIN_COMM_H
