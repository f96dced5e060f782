// nccl.cuh: the functions of collectives.h on GPU memory, by NCCL, for builds with -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL.
//
//   1. Collectives  what it holds
//   2. failures     what NCCL reports, and how its kernels are ended when a rank is gone
//   3. opening      collective_open, collective_open_channel, collective_close
//   4. collectives  on a stream of their own, after what was enqueued on `compute` before
//   5. waiting      collective_wait, collective_barrier, and for how long `compute` has waited
//
// With one rank nothing is created, and every call returns at once.
//
// An NCCL kernel waits for the other ranks without a time limit. The Comm monitors the ranks. When it finds a failure,
// its thread calls collective_on_failure, and ncclCommAbort makes the kernels return; so the streams finish, and the
// host, wherever it waits, continues and gets the Comm's error. For this no NCCL call may block, or the abort would
// have to wait for it: the communicator is non-blocking, and collective_complete polls until NCCL has done what a call
// began. NCCL allows one thread at a time, so every call, including the abort, is made under the mutex.

#ifndef LLMTRAIN_NCCL_CUH
#define LLMTRAIN_NCCL_CUH

#include "comm.h"
#include "../base/device.cuh"

#include <nccl.h>
#include <sched.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "NCCL 2.19 or newer is needed: an older one cannot be aborted from another thread while it makes a connection"
#endif

// ------------------------------------------------------------------------------------------------
// 1. Collectives

#define COLLECTIVE_WAITS ((size_t)4)      // waits in one slot whose times are not read yet
#define COLLECTIVE_SPINS ((size_t)10000)  // polls before the host sleeps between them: a launch takes microseconds
#define COLLECTIVE_POLL_MS 0.5            // between polls after that: a connection takes seconds
#define COLLECTIVE_WATCHDOG_MS 50.0       // between checks for errors of NCCL's own threads
#define COLLECTIVE_CHANNEL_CTAS 4         // blocks of a kernel that moves a message

// For one collective at a time.
typedef struct {
    cudaEvent_t ready;               // recorded on `compute` before the collective: its data is there
    cudaEvent_t done;                // recorded on the collectives' stream after it
    cudaEvent_t before[COLLECTIVE_WAITS];  // recorded on `compute` around each wait for `done`, in turn
    cudaEvent_t after[COLLECTIVE_WAITS];
    uint64_t waits, read;            // waits so far, which the watchdog reads, and those already added to waited_ms
    uint64_t seen;                   // the wait in which the watchdog has found `compute`, plus 1; 0: none
    double since_ms;                 // when it first did
} CollectiveSlot;

typedef struct {
    Comm* comm;              // NULL: one rank, and nothing else here means anything
    cudaStream_t stream;     // of the collectives
    bool owns_stream;
    CollectiveSlot* slots;   // (slot_count)
    size_t slot_count;
    uint64_t bytes_sent;
    double waited_ms;        // of waits that have been read, since the last collective_waited_ms
    int device;

    pthread_mutex_t mutex;   // guards what follows; the Comm's mutex may be taken under it, not the other way round
    ncclComm_t nccl;         // NULL before it is made and after it was aborted
    bool watching, closing;  // the watchdog runs; it has been asked to end (atomic)
    pthread_t watchdog;
} Collectives;

// ------------------------------------------------------------------------------------------------
// 2. Failures

static inline bool collective_fail(Error* error, ncclResult_t status, const char* what, ncclComm_t nccl) {
    const char* more = ncclGetLastError(nccl);
    bool known = more && more[0];
    return fail_with(error, "NCCL failed in %s: %s%s%.300s%s; set NCCL_DEBUG=WARN to see more", what,
                     ncclGetErrorString(status), known ? " (" : "", known ? more : "", known ? ")" : "");
}

static size_t collectives_open;  // while there are any, cuda_check has the hook

// Called by cuda_check, which then ends the program. comm: of all ranks.
static inline void collective_on_cuda_error(void* comm, const char* sentence) { comm_abort((Comm*)comm, sentence); }

// Called by the Comm, from its thread, when it has failed.
static inline void collective_on_failure(void* context) {
    Collectives* c = (Collectives*)context;
    pthread_mutex_lock(&c->mutex);
    if (c->nccl) ncclCommAbort(c->nccl);
    c->nccl = NULL;
    pthread_mutex_unlock(&c->mutex);
}

// Waits until NCCL has done what a call began: made connections, launched a kernel. The mutex is held on entry and on
// return, not in between. False if NCCL or the Comm failed, or after twice the Comm's timeout, so that the Comm is the
// first to find a rank that does not answer.
static inline bool collective_complete(Collectives* c, ncclResult_t status, const char* what, Error* error) {
    double limit_ms = 2 * c->comm->timeout_ms, deadline = now_ms() + limit_ms;
    for (size_t looks = 0; status == ncclInProgress; looks++) {
        pthread_mutex_unlock(&c->mutex);
        if (looks < COLLECTIVE_SPINS) sched_yield();
        else sleep_ms(COLLECTIVE_POLL_MS);
        pthread_mutex_lock(&c->mutex);
        if (comm_failed(c->comm, error)) return false;  // and c->nccl may be gone
        ncclResult_t asked = ncclCommGetAsyncError(c->nccl, &status);
        if (asked != ncclSuccess) status = asked;
        if (status == ncclInProgress && now_ms() > deadline)
            return fail_with(error, "NCCL has not finished %s within %.1f s; set NCCL_DEBUG=INFO to see what it tries, "
                             "and NCCL_SOCKET_IFNAME if it uses the wrong network interface", what, limit_ms / 1e3);
    }
    return status == ncclSuccess || collective_fail(error, status, what, c->nccl);
}

// Handles a failure that NCCL found. Often a rank is gone, and the Comm knows which, or will in a moment; otherwise
// the failure is this rank's, which notifies the others. The mutex is not held.
static inline void collective_abort(Collectives* c, Error* error) {
    Error known;
    double deadline = now_ms() + COMM_GRACE_MS;
    bool failed = false;
    while (!(failed = comm_failed(c->comm, &known)) && now_ms() < deadline) sleep_ms(1);
    if (failed) *error = known;
    else comm_abort(c->comm, error->text);
}

// False, with an error, if the Comm or NCCL has found a failure, which the Comm then knows; otherwise returns at once.
static inline bool collective_check(Collectives* c, Error* error) {
    if (c->comm == NULL) return true;
    ncclResult_t status = ncclSuccess;
    pthread_mutex_lock(&c->mutex);
    bool failed = comm_failed(c->comm, error);
    ncclResult_t asked = !failed && c->nccl ? ncclCommGetAsyncError(c->nccl, &status) : ncclSuccess;
    if (asked != ncclSuccess) status = asked;
    bool found = status != ncclSuccess && status != ncclInProgress;
    if (found) collective_fail(error, status, "the background", c->nccl);
    pthread_mutex_unlock(&c->mutex);
    if (found) collective_abort(c, error);
    return !failed && !found;
}

// Whether `compute` has waited for a collective for so long that a GPU, or the link between GPUs, must be stuck. (A
// rank whose program is stuck is found earlier by the Comm, in collective_barrier, and in a pipeline here.) How long a
// collective itself has waited says nothing: a stage posts a receive ahead, and another one may compute for most of a
// step before it sends. The host may be several waits ahead. Called without the mutex: CUDA may block this thread, and
// that must not block the abort.
static inline bool collective_is_stuck(Collectives* c, Error* error) {
    double now = now_ms(), limit_ms = 2 * c->comm->timeout_ms;
    bool stuck = false;
    if (comm_is_extended(c->comm)) limit_ms *= 10;  // a rank may wait for its data, as in a validation
    for (size_t i = 0; i < c->slot_count; i++) {
        CollectiveSlot* s = &c->slots[i];
        uint64_t waits = __atomic_load_n(&s->waits, __ATOMIC_ACQUIRE), found = 0;
        for (uint64_t w = waits - (waits < COLLECTIVE_WAITS ? waits : COLLECTIVE_WAITS); w < waits && !found; w++) {
            size_t at = w % COLLECTIVE_WAITS;
            if (cudaEventQuery(s->before[at]) == cudaSuccess && cudaEventQuery(s->after[at]) != cudaSuccess)
                found = w + 1;
        }
        if (found != s->seen) s->since_ms = now;
        s->seen = found;
        stuck |= found && now - s->since_ms > limit_ms;
    }
    if (stuck)
        fail_with(error, "a collective between GPUs has not finished for %.1f s although the processes of all ranks "
                  "are running: a GPU, the link between GPUs, or a stage of a pipeline is stuck; see nvidia-smi and "
                  "dmesg on every machine, or allow slow stages more with --timeout", limit_ms / 1e3);
    return stuck;
}

// The watchdog's thread: the program's main thread may be waiting for a kernel that will not return.
static inline void* collective_watch(void* context) {
    Collectives* c = (Collectives*)context;
    Error error;
    CUDA_CHECK(cudaSetDevice(c->device));
    while (!__atomic_load_n(&c->closing, __ATOMIC_RELAXED) && collective_check(c, &error)) {
        if (collective_is_stuck(c, &error)) {
            comm_abort(c->comm, error.text);
            break;
        }
        sleep_ms(COLLECTIVE_WATCHDOG_MS);
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 3. Opening

// Called by all ranks together, before the Comm and the stream are closed.
static inline void collective_close(Collectives* c) {
    Error ignored;  // the Comm reports it
    if (c->comm == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    __atomic_store_n(&c->closing, true, __ATOMIC_RELAXED);
    if (c->watching) pthread_join(c->watchdog, NULL);
    pthread_mutex_lock(&c->mutex);
    bool ended = c->nccl && collective_complete(c, ncclCommFinalize(c->nccl), "ncclCommFinalize", &ignored);
    if (c->nccl && ended) ncclCommDestroy(c->nccl);
    else if (c->nccl) ncclCommAbort(c->nccl);
    c->nccl = NULL;
    pthread_mutex_unlock(&c->mutex);
    comm_on_failure(c->comm, NULL, NULL);
    if (--collectives_open == 0) device_failure_hook.call = NULL;
    for (size_t i = 0; i < c->slot_count; i++) {
        CollectiveSlot* s = &c->slots[i];
        CUDA_CHECK(cudaEventDestroy(s->ready));
        CUDA_CHECK(cudaEventDestroy(s->done));
        for (size_t w = 0; w < COLLECTIVE_WAITS; w++) {
            CUDA_CHECK(cudaEventDestroy(s->before[w]));
            CUDA_CHECK(cudaEventDestroy(s->after[w]));
        }
    }
    if (c->owns_stream) CUDA_CHECK(cudaStreamDestroy(c->stream));
    pthread_mutex_destroy(&c->mutex);
    free(c->slots);
    memset(c, 0, sizeof *c);
}

// Makes the communicator, with the unique id of rank 0, and starts the watchdog. ctas: the most blocks of a kernel; 0:
// as many as NCCL likes.
static inline bool collective_init_nccl(Collectives* c, int ctas, Error* error) {
    Comm* comm = c->comm;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (ctas > 0) config.maxCTAs = ctas;
    memset(&id, 0, sizeof id);
    if (c->slots == NULL) return fail_with(error, "out of memory for the events of collectives");
    ncclResult_t status = comm->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (status != ncclSuccess) return collective_fail(error, status, "ncclGetUniqueId", NULL);
    if (!comm_broadcast(comm, &id, sizeof id, DTYPE_U8, 0, error)) return false;
    pthread_mutex_lock(&c->mutex);
    status = ncclCommInitRankConfig(&c->nccl, (int)comm->world, id, (int)comm->rank, &config);
    bool good = collective_complete(c, status, "connecting the ranks", error);
    pthread_mutex_unlock(&c->mutex);
    if (!good) return false;
    c->watching = pthread_create(&c->watchdog, NULL, collective_watch, c) == 0;
    return c->watching ||
           fail_with(error, "cannot start the watchdog of NCCL: %s; raise the limits (ulimit -u)", strerror(errno));
}

// See collective_open and collective_init_nccl.
static inline bool collective_open_limited(Collectives* c, const Transport* ranks, size_t slots,
                                           const Collectives* with, int ctas, Error* error) {
    memset(c, 0, sizeof *c);
    Comm* comm = ranks ? ranks->comm : NULL;
    if (comm) fault_step(comm_rank(comm, comm->rank), 0);
    if (comm == NULL || (comm->world == 1 && !fault_point("nccl"))) return true;  // for tests one rank uses NCCL too
    c->comm = comm;
    c->slots = (CollectiveSlot*)memory_allocate(slots * sizeof(CollectiveSlot));
    c->slot_count = c->slots ? slots : 0;
    pthread_mutex_init(&c->mutex, NULL);
    CUDA_CHECK(cudaGetDevice(&c->device));
    int lowest = 0, highest = 0;  // so that a collective does not queue behind a matmul's blocks
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    c->owns_stream = with == NULL || with->comm == NULL;
    if (c->owns_stream) CUDA_CHECK(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, highest));
    else c->stream = with->stream;
    for (size_t i = 0; i < c->slot_count; i++) {
        CollectiveSlot* s = &c->slots[i];
        CUDA_CHECK(cudaEventCreateWithFlags(&s->ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming));
        for (size_t w = 0; w < COLLECTIVE_WAITS; w++) {
            CUDA_CHECK(cudaEventCreate(&s->before[w]));
            CUDA_CHECK(cudaEventCreate(&s->after[w]));
        }
    }
    comm_on_failure(comm, collective_on_failure, c);
    collectives_open++;
    device_failure_hook.call = collective_on_cuda_error;
    device_failure_hook.context = comm->parent ? comm->parent : comm;  // which is closed last
    if (collective_init_nccl(c, ctas, error)) return true;
    collective_abort(c, error);
    collective_close(c);
    return false;
}

// Called by all ranks together, each with its own GPU as the current device; `slots` collectives may be in flight at a
// time. If ranks is NULL or has one rank, all other calls return at once. After a failure there is nothing to close.
//
// with: NULL, or collectives of another group, closed later, whose stream these use too. Kernels of two communicators
// that a GPU runs at a time may wait for each other across GPUs. In one stream, in the same order on all ranks, they
// cannot.
static inline bool collective_open(Collectives* c, const Transport* ranks, size_t slots, const Collectives* with,
                                   Error* error) {
    return collective_open_limited(c, ranks, slots, with, 0, error);
}

// The same for messages from one of two ranks to the other, COMM_ALL_GATHER of a slice that only one of them has. They
// have a stream of their own: a receive that is posted ahead keeps its stream, and the multiprocessors of its kernel,
// busy until the other stage sends. What this needs of NCCL and of the GPU:
//
//   - Kernels of all channels and of the reductions fit on the GPU together, in any order: one with only a part of its
//     blocks there, while others wait for messages that depend on it, would be a deadlock. Without a limit NCCL takes
//     up to 32 multiprocessors for each; four channels and a reduction would fill an A100. A block moves 20 GB/s or so.
//   - Kernels are launched in any order. NCCL_LAUNCH_ORDER_IMPLICIT makes each wait until the one before has started,
//     and a second receive of a channel starts only after the first message.
//   - A stream whose hardware queue it shares with others (CUDA_DEVICE_MAX_CONNECTIONS) waits for what was enqueued
//     before, which is never anything that depends on what is enqueued later. That costs overlap only.
//
// ncclSend and ncclRecv would move the same bytes over the same links by one hop, as ncclBroadcast does between two.
// They would be limited to fewer protocols, and be another path to connect and to test.
static inline bool collective_open_channel(Collectives* c, const Transport* ranks, size_t slots, Error* error) {
    const char* ordered = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (ordered && atoi(ordered) != 0 && ranks && ranks->world > 1)
        return fail_with(error, "with NCCL_LAUNCH_ORDER_IMPLICIT=%s the stages of a pipeline would wait for each other "
                         "forever; unset it, or leave out --pp", ordered);
    return collective_open_limited(c, ranks, slots, NULL, COLLECTIVE_CHANNEL_CTAS, error);
}

// ------------------------------------------------------------------------------------------------
// 4. Collectives
//
// In place, except all_to_all. The bytes that a rank sends are counted as comm.h sends them, which is the minimum: in
// reduce_scatter the slices of the others, in all_gather its own slice to each of them, in all_reduce both, in
// all_to_all the parts of the others. NCCL may choose other algorithms.

static inline ncclDataType_t collective_type(Dtype type) {
    if (type == DTYPE_I64 || type == DTYPE_U8) return type == DTYPE_I64 ? ncclInt64 : ncclUint8;
    return type == DTYPE_BF16 ? ncclBfloat16 : type == DTYPE_F16 ? ncclFloat16 : ncclFloat32;
}

// Makes the collectives' stream wait for `compute`. True, with the mutex held, if there is a communicator to launch on:
// then collective_end follows.
static inline bool collective_begin(Collectives* c, size_t slot, Stream stream) {
    if (c->comm == NULL) return false;
    CUDA_CHECK(cudaEventRecord(c->slots[slot].ready, stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(c->stream, c->slots[slot].ready, 0));
    pthread_mutex_lock(&c->mutex);
    if (c->nccl) return true;
    pthread_mutex_unlock(&c->mutex);
    return false;
}

// The event `done` may be recorded only once the kernel is in the stream.
static inline void collective_end(Collectives* c, size_t slot, ncclResult_t status, const char* what) {
    Error error;
    bool good = collective_complete(c, status, what, &error);
    pthread_mutex_unlock(&c->mutex);
    if (!good) {
        collective_abort(c, &error);
        return;
    }
    CUDA_CHECK(cudaEventRecord(c->slots[slot].done, c->stream));
}

// Whether NCCL has accepted a call. ncclInProgress: it has not done yet what the call asks for.
static inline bool collective_taken(ncclResult_t status) { return status == ncclSuccess || status == ncclInProgress; }

// For slices of different lengths, which ncclReduceScatter and ncclAllGather do not take: one operation per rank, all
// of them in one launch.
static inline ncclResult_t collective_group(Collectives* c, CommOperation operation, void* data, const size_t* cuts,
                                            Dtype type) {
    ncclDataType_t kind = collective_type(type);
    ncclResult_t status = ncclGroupStart();
    for (size_t r = 0; r < c->comm->world && collective_taken(status); r++) {
        size_t length = cuts[r + 1] - cuts[r];
        char* part = (char*)data + cuts[r] * dtype_bytes(type);
        if (length == 0) continue;
        status = operation == COMM_ALL_GATHER ?
            ncclBroadcast(part, part, length, kind, (int)r, c->nccl, c->stream) :
            ncclReduce(part, part, length, kind, ncclSum, (int)r, c->nccl, c->stream);
    }
    ncclResult_t launched = ncclGroupEnd();
    return collective_taken(status) ? launched : status;
}

// Whether all slices have the same length.
static inline bool collective_is_even(const size_t* cuts, size_t world) {
    for (size_t r = 0; r < world; r++)
        if (cuts[r + 1] - cuts[r] != cuts[1]) return false;
    return true;
}

// COMM_ALL_REDUCE: data (cuts[world]) = the sum over all ranks. COMM_REDUCE_SCATTER: this rank's slice of data = that
// sum; the rest is undefined afterwards. COMM_ALL_GATHER: every rank contributes its slice, and receives all others.
static inline void collective_start(Collectives* c, size_t slot, CommOperation operation, void* data,
                                    const size_t* cuts, Dtype type, Stream stream) {
    if (c->comm == NULL) return;
    size_t world = c->comm->world, rank = c->comm->rank, n = cuts[world], bytes = dtype_bytes(type);
    size_t length = cuts[rank + 1] - cuts[rank];
    if (operation != COMM_ALL_GATHER) c->bytes_sent += (n - length) * bytes;
    if (operation != COMM_REDUCE_SCATTER) c->bytes_sent += length * (world - 1) * bytes;
    if (!collective_begin(c, slot, stream)) return;
    char* own = (char*)data + cuts[rank] * bytes;
    ncclDataType_t kind = collective_type(type);
    ncclResult_t status;
    if (operation == COMM_ALL_REDUCE) status = ncclAllReduce(data, data, n, kind, ncclSum, c->nccl, c->stream);
    else if (!collective_is_even(cuts, world)) status = collective_group(c, operation, data, cuts, type);
    else if (operation == COMM_ALL_GATHER) status = ncclAllGather(own, data, cuts[1], kind, c->nccl, c->stream);
    else status = ncclReduceScatter(data, own, cuts[1], kind, ncclSum, c->nccl, c->stream);
    collective_end(c, slot, status, COMM_OPERATION_NAMES[operation]);
}

// Starts COMM_ALL_TO_ALL: n elements, a multiple of the number of ranks. With one rank it does nothing. Within a group
// NCCL lets a rank send to itself, which is a copy.
static inline void collective_all_to_all(Collectives* c, size_t slot, void* out, const void* in, size_t n, Dtype type,
                                         Stream stream) {
    if (c->comm == NULL) return;
    size_t world = c->comm->world, part = n / world, bytes = part * dtype_bytes(type);
    c->bytes_sent += (world - 1) * bytes;
    if (!collective_begin(c, slot, stream)) return;
    ncclDataType_t kind = collective_type(type);
    ncclResult_t status = ncclGroupStart();
    for (size_t r = 0; r < world && part > 0 && collective_taken(status); r++) {
        status = ncclSend((const char*)in + r * bytes, part, kind, (int)r, c->nccl, c->stream);
        if (!collective_taken(status)) break;
        status = ncclRecv((char*)out + r * bytes, part, kind, (int)r, c->nccl, c->stream);
    }
    ncclResult_t launched = ncclGroupEnd();
    collective_end(c, slot, collective_taken(status) ? launched : status, COMM_OPERATION_NAMES[COMM_ALL_TO_ALL]);
}

// ------------------------------------------------------------------------------------------------
// 5. Waiting

// Adds the time of a slot's oldest unread wait to waited_ms.
static inline void collective_read_wait(Collectives* c, CollectiveSlot* s) {
    size_t oldest = s->read++ % COLLECTIVE_WAITS;
    float ms = 0;
    CUDA_CHECK(cudaEventSynchronize(s->after[oldest]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, s->before[oldest], s->after[oldest]));
    c->waited_ms += (double)ms;
}

// Makes `compute` wait for the slot's collective: what is enqueued from now on sees its result.
static inline void collective_wait(Collectives* c, size_t slot, Stream stream) {
    if (c->comm == NULL) return;
    CollectiveSlot* s = &c->slots[slot];
    if (s->waits - s->read == COLLECTIVE_WAITS) collective_read_wait(c, s);
    size_t next = s->waits % COLLECTIVE_WAITS;
    CUDA_CHECK(cudaEventRecord(s->before[next], stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(stream->compute, s->done, 0));
    CUDA_CHECK(cudaEventRecord(s->after[next], stream->compute));
    __atomic_add_fetch(&s->waits, 1, __ATOMIC_RELEASE);
}

// Waits until the hosts of all ranks have got here and enqueued their work so far. Called once per micro-batch, before
// a host may have to wait for a GPU that waits for another rank, so that the Comm finds a rank whose program is stuck;
// in a pipeline once per step. False, at once, if there is one rank.
static inline bool collective_barrier(Collectives* c) {
    Error ignored;  // the Comm reports it
    if (c->comm) comm_barrier(c->comm->parent ? c->comm->parent : c->comm, &ignored);
    return c->comm != NULL;
}

// Payload that this rank has sent so far, in bytes.
static inline uint64_t collective_bytes_sent(const Collectives* c) { return c->bytes_sent; }

// Milliseconds that the stream has waited since the last call. To be called after the host has waited for the stream.
static inline double collective_waited_ms(Collectives* c) {
    for (size_t i = 0; i < c->slot_count; i++)
        while (c->slots[i].read < c->slots[i].waits) collective_read_wait(c, &c->slots[i]);
    double waited = c->waited_ms;
    c->waited_ms = 0;
    return waited;
}

#endif  // LLMTRAIN_NCCL_CUH
