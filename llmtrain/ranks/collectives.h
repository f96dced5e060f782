// collectives.h: collectives on device memory, here host memory, through a Transport. nccl.cuh is the same for GPUs.
//
// Defines: Collectives; collective_open, collective_open_channel, collective_close; collective_start, collective_wait,
// collective_all_to_all, collective_barrier; collective_check, collective_bytes_sent, collective_waited_ms.
//
//   collective_open(&collectives, &comm.transport, 2, NULL, &error)      two slots: two in flight at a time
//   collective_start(&collectives, 0, COMM_REDUCE_SCATTER, grads, cuts, DTYPE_F32, stream)
//   ... compute ...
//   collective_wait(&collectives, 0, stream)
//
// Collectives work in place, except all_to_all, and in the order of the stream: a collective sees what was enqueued
// before it, and what is enqueued after collective_wait sees the result. A slot identifies the collective in flight.
// Rank r's slice of a vector is [cuts[r], cuts[r + 1]), in elements; its length is cuts[world]. Collectives return
// nothing: after a failure their results are undefined, and collective_check, or the next call to the transport,
// reports it.

#ifndef LLMTRAIN_COLLECTIVES_H
#define LLMTRAIN_COLLECTIVES_H

#include "../base/fault.h"
#include "transport.h"

typedef struct {
    const Transport* ranks;  // NULL: one rank, and every call returns at once
    CommRequest* requests;   // (slots)
} Collectives;

// If ranks is NULL or has one rank, all other calls return at once. A CUDA build without NCCL supports nothing else.
// with: see nccl.cuh; here it means nothing.
static inline bool collective_open(Collectives* c, const Transport* ranks, size_t slots, const Collectives* with,
                                   Error* error) {
    (void)with;
    memset(c, 0, sizeof *c);
    if (ranks == NULL || ranks->world <= 1) return true;
#ifdef LLMTRAIN_CUDA
    (void)slots;
    return fail_with(error, "this program was built without NCCL, which %zu ranks with GPUs need; install libnccl-dev "
                     "and run make again, or use one rank", ranks->world);
#else
    c->ranks = ranks;
    c->requests = (CommRequest*)memory_allocate(slots * sizeof(CommRequest));
    return c->requests != NULL || fail_with(error, "out of memory for %zu collectives", slots);
#endif
}

// The same for messages between two ranks. See nccl.cuh.
static inline bool collective_open_channel(Collectives* c, const Transport* ranks, size_t slots, Error* error) {
    return collective_open(c, ranks, slots, NULL, error);
}

static inline void collective_close(Collectives* c) {
    free(c->requests);
    memset(c, 0, sizeof *c);
}

// COMM_ALL_REDUCE: data (cuts[world]) = the sum over all ranks. COMM_REDUCE_SCATTER: this rank's slice of data = that
// sum; the rest is undefined afterwards. COMM_ALL_GATHER: every rank contributes its slice, and receives all others.
static inline void collective_start(Collectives* c, size_t slot, CommOperation operation, void* data,
                                    const size_t* cuts, Dtype type, Stream stream) {
    (void)stream;
    const Transport* t = c->ranks;
    if (t == NULL) return;
    Error ignored;  // collective_check reports it
    char* out = (char*)data + (operation == COMM_REDUCE_SCATTER ? cuts[t->rank] * dtype_bytes(type) : 0);
    c->requests[slot] = t->start(t->comm, operation, type, out, data, cuts[t->world], 0, comm_slice_of_table, cuts);
    if (fault_point("start")) t->wait(t->comm, c->requests[slot], &ignored);
}

static inline void collective_wait(Collectives* c, size_t slot, Stream stream) {
    (void)stream;
    Error ignored;  // collective_check reports it
    if (c->ranks) c->ranks->wait(c->ranks->comm, c->requests[slot], &ignored);
}

// Starts COMM_ALL_TO_ALL: n elements, a multiple of the number of ranks. With one rank it does nothing.
static inline void collective_all_to_all(Collectives* c, size_t slot, void* out, const void* in, size_t n, Dtype type,
                                         Stream stream) {
    const Transport* t = c->ranks;
    if (t == NULL) return;
    c->requests[slot] = t->start(t->comm, COMM_ALL_TO_ALL, type, out, in, n, 0, NULL, NULL);
    if (fault_point("all_to_all")) collective_wait(c, slot, stream);
}

// On GPUs the hosts run ahead, and wait for each other once per micro-batch. Here each collective does that already.
static inline bool collective_barrier(Collectives* c) { return (void)c, true; }

// False, with the error, if a failure is known; does not wait.
static inline bool collective_check(Collectives* c, Error* error) {
    return c->ranks == NULL || !c->ranks->failed(c->ranks->comm, error);
}

// Payload that this rank has sent so far, in bytes.
static inline uint64_t collective_bytes_sent(const Collectives* c) {
    return c->ranks ? c->ranks->statistics(c->ranks->comm).bytes_sent : 0;
}

// Milliseconds that the stream has waited since the last call: here never; the transport measures the host's waits.
static inline double collective_waited_ms(Collectives* c) { return (void)c, 0; }

#endif  // LLMTRAIN_COLLECTIVES_H
