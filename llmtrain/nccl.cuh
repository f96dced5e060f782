// nccl.cuh: collectives over the memory of GPUs, by NCCL: the functions of collectives.h for a build with
// -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL.
//
//   1. collectives  what it holds
//   2. faults       what NCCL reports, and how its kernels are ended when a rank is gone
//   3. opening      collective_open, collective_close
//   4. collectives  on a stream of their own, after what `compute` was given before
//   5. waiting      collective_wait, and how long `compute` has stood there
//
// With one rank nothing is created, and every call returns at once.
//
// A kernel of NCCL waits for the other ranks, for ever if need be. Who watches the ranks is the Comm. When it finds a
// fault, its thread calls collective_on_failure, and ncclCommAbort makes the kernels return; so the streams come to their
// ends, and the host, wherever it waits, goes on and hears the Comm's sentence. For that no call of NCCL may block, or
// the abort would have to wait for it: the communicator is non-blocking, and collective_settle asks until NCCL has done what
// a call began. NCCL takes one thread at a time: each call, the abort too, is made under the Collectives's mutex.
//
// Rank r's slice of a vector of n elements is shard_slice(n, r, world). zero.h includes this file or collectives.h.

#ifndef LLMTRAIN_NCCL_CUH
#define LLMTRAIN_NCCL_CUH

#include "comm.h"
#include "device.cuh"

#include <nccl.h>
#include <sched.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "NCCL 2.19 or newer is needed: an older one cannot be aborted from another thread while it makes a connection"
#endif

// ------------------------------------------------------------------------------------------------
// 1. Collectives

#define COLLECTIVE_WAITS ((size_t)4)      // waits in one slot whose times are not read yet
#define COLLECTIVE_SPINS ((size_t)10000)  // looks before the host sleeps between them: a launch takes microseconds
#define COLLECTIVE_PAUSE_MS 0.5           // between looks then: a connection takes seconds
#define COLLECTIVE_WATCH_MS 50.0          // between looks for what NCCL's own threads have found

// What one collective at a time needs.
typedef struct {
    cudaEvent_t ready;               // recorded on `compute` before the collective: its data is there
    cudaEvent_t done;                // recorded on the Collectives's stream behind it
    cudaEvent_t before[COLLECTIVE_WAITS];  // recorded on `compute` around each wait for `done`, in turn
    cudaEvent_t after[COLLECTIVE_WAITS];
    uint64_t waits, read;            // such pairs so far, and of them those that are in waited_ms
    uint64_t begun;                  // collectives so far; the watcher reads it
    uint64_t seen;                   // by the watcher: which one it looks at,
    double since_ms;                 // and when it first saw that its data is there; 0: not yet
} CollectiveSlot;

typedef struct {
    Comm* comm;              // NULL: one rank, and nothing else here means anything
    cudaStream_t stream;     // of the collectives
    CollectiveSlot* slots;         // (slot_count)
    size_t slot_count;
    uint64_t bytes_sent;
    double waited_ms;        // of waits that have been read, since it was last asked for
    int device;

    pthread_mutex_t mutex;   // guards what follows; the Comm's mutex may be taken under it, not the other way round
    ncclComm_t nccl;         // NULL before it is made and after it was aborted
    bool watching, closing;  // the thread runs; it is to end
    pthread_t watcher;
} Collectives;

// ------------------------------------------------------------------------------------------------
// 2. Faults

static inline bool collective_explain(Error* error, ncclResult_t status, const char* what, ncclComm_t nccl) {
    const char* more = ncclGetLastError(nccl);
    bool said = more && more[0];
    return fail(error, "NCCL failed in %s: %s%s%.300s%s; set NCCL_DEBUG=WARN to see more", what,
                ncclGetErrorString(status), said ? " (" : "", said ? more : "", said ? ")" : "");
}

// Called by cuda_check, which ends the program then.
static inline void collective_tell_cuda_error(void* context, const char* sentence) { comm_abort((Comm*)context, sentence); }

// Called by the Comm, from its thread, when it has failed.
static inline void collective_on_failure(void* context) {
    Collectives* collectives = (Collectives*)context;
    pthread_mutex_lock(&collectives->mutex);
    if (collectives->nccl) ncclCommAbort(collectives->nccl);
    collectives->nccl = NULL;
    pthread_mutex_unlock(&collectives->mutex);
}

// Waits until NCCL has done what a call began: made connections, launched a kernel. The mutex is held on entry and on
// return, not in between. False if that failed, if the Comm did, or after twice the Comm's time-out: it is the one to
// find a rank that is silent.
static inline bool collective_settle(Collectives* collectives, ncclResult_t status, const char* what, Error* error) {
    double patience_ms = 2 * collectives->comm->timeout_ms, deadline = now_ms() + patience_ms;
    for (size_t looks = 0; status == ncclInProgress; looks++) {
        pthread_mutex_unlock(&collectives->mutex);
        if (looks < COLLECTIVE_SPINS) sched_yield();
        else sleep_ms(COLLECTIVE_PAUSE_MS);
        pthread_mutex_lock(&collectives->mutex);
        if (comm_failed(collectives->comm, error)) return false;  // and collectives->nccl may be gone
        ncclResult_t asked = ncclCommGetAsyncError(collectives->nccl, &status);
        if (asked != ncclSuccess) status = asked;
        if (status == ncclInProgress && now_ms() > deadline)
            return fail(error,
                        "NCCL has not come to an end of %s within %.1f s; set NCCL_DEBUG=INFO to see what it tries, "
                        "and NCCL_SOCKET_IFNAME if it takes the wrong network",
                        what, patience_ms / 1e3);
    }
    return status == ncclSuccess || collective_explain(error, status, what, collectives->nccl);
}

// After a fault that NCCL found. Often it is that a rank is gone, and then the Comm knows which, or will in a moment;
// otherwise the others hear of it as this rank's. The mutex is not held.
static inline void collective_give_up(Collectives* collectives, Error* error) {
    Error known;
    double deadline = now_ms() + COMM_GRACE_MS;
    bool failed = comm_failed(collectives->comm, &known);
    while (!failed && now_ms() < deadline) {
        sleep_ms(1);
        failed = comm_failed(collectives->comm, &known);
    }
    if (failed) *error = known;
    else comm_abort(collectives->comm, error->text);
}

// False, with a sentence, if the Comm or NCCL has found a fault; does not wait. What NCCL found, the Comm knows
// afterwards.
static inline bool collective_check(Collectives* collectives, Error* error) {
    if (collectives->comm == NULL) return true;
    ncclResult_t status = ncclSuccess;
    pthread_mutex_lock(&collectives->mutex);
    bool failed = comm_failed(collectives->comm, error);
    ncclResult_t asked = !failed && collectives->nccl ? ncclCommGetAsyncError(collectives->nccl, &status) : ncclSuccess;
    if (asked != ncclSuccess) status = asked;
    bool found = status != ncclSuccess && status != ncclInProgress;
    if (found) collective_explain(error, status, "the background", collectives->nccl);
    pthread_mutex_unlock(&collectives->mutex);
    if (found) collective_give_up(collectives, error);
    return !failed && !found;
}

// Whether a collective has had its data for so long that a rank must be stuck, or a GPU, or what joins them. The Comm names a
// rank whose program is stuck before that, in collective_barrier. Without the mutex: who asks CUDA may have to wait, and the abort may
// not.
static inline bool collective_is_stuck(Collectives* collectives, Error* error) {
    double now = now_ms(), patience_ms = 2 * collectives->comm->timeout_ms;
    bool stuck = false;
    for (size_t i = 0; i < collectives->slot_count; i++) {
        CollectiveSlot* s = &collectives->slots[i];
        uint64_t begun = __atomic_load_n(&s->begun, __ATOMIC_ACQUIRE);
        if (begun != s->seen) s->since_ms = 0;
        s->seen = begun;
        if (begun == 0 || cudaEventQuery(s->done) == cudaSuccess || cudaEventQuery(s->ready) != cudaSuccess) continue;
        if (s->since_ms == 0) s->since_ms = now;
        stuck |= now - s->since_ms > patience_ms;
    }
    if (stuck) fail(error, "a collective between GPUs has not ended for %.1f s though all programs go on: a GPU, or what joins them, is stuck; "
                    "see nvidia-smi and dmesg on every machine", patience_ms / 1e3);
    return stuck;
}

// A thread looks, since the program's own may be waiting for a kernel that will not return.
static inline void* collective_watch(void* context) {
    Collectives* collectives = (Collectives*)context;
    Error error;
    bool closing = false;
    CUDA_CHECK(cudaSetDevice(collectives->device));
    while (!closing && collective_check(collectives, &error)) {
        if (collective_is_stuck(collectives, &error)) {
            comm_abort(collectives->comm, error.text);
            break;
        }
        sleep_ms(COLLECTIVE_WATCH_MS);
        pthread_mutex_lock(&collectives->mutex);
        closing = collectives->closing;
        pthread_mutex_unlock(&collectives->mutex);
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 3. Opening

// All ranks together. To be closed before the Comm and the stream are.
static inline void collective_close(Collectives* collectives) {
    Error ignored;  // who asks the Comm hears of it
    if (collectives->comm == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(collectives->stream));
    pthread_mutex_lock(&collectives->mutex);
    collectives->closing = true;
    pthread_mutex_unlock(&collectives->mutex);
    if (collectives->watching) pthread_join(collectives->watcher, NULL);
    pthread_mutex_lock(&collectives->mutex);
    bool ended = collectives->nccl && collective_settle(collectives, ncclCommFinalize(collectives->nccl), "the end of the run", &ignored);
    if (collectives->nccl && ended) ncclCommDestroy(collectives->nccl);
    else if (collectives->nccl) ncclCommAbort(collectives->nccl);
    collectives->nccl = NULL;
    pthread_mutex_unlock(&collectives->mutex);
    comm_on_failure(collectives->comm, NULL, NULL);
    cuda_listener()->tell = NULL;
    for (size_t i = 0; i < collectives->slot_count; i++) {
        CollectiveSlot* s = &collectives->slots[i];
        CUDA_CHECK(cudaEventDestroy(s->ready));
        CUDA_CHECK(cudaEventDestroy(s->done));
        for (size_t w = 0; w < COLLECTIVE_WAITS; w++) {
            CUDA_CHECK(cudaEventDestroy(s->before[w]));
            CUDA_CHECK(cudaEventDestroy(s->after[w]));
        }
    }
    CUDA_CHECK(cudaStreamDestroy(collectives->stream));
    pthread_mutex_destroy(&collectives->mutex);
    free(collectives->slots);
    memset(collectives, 0, sizeof *collectives);
}

// The ranks meet by an identifier that rank 0 makes up.
static inline bool collective_join(Collectives* collectives, Error* error) {
    Comm* comm = collectives->comm;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    memset(&id, 0, sizeof id);
    if (collectives->slots == NULL) return fail(error, "out of memory for the events of collectives");
    ncclResult_t status = comm->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (status != ncclSuccess) return collective_explain(error, status, "ncclGetUniqueId", NULL);
    if (!comm_broadcast(comm, &id, sizeof id, COMM_BYTES, 0, error)) return false;
    pthread_mutex_lock(&collectives->mutex);
    status = ncclCommInitRankConfig(&collectives->nccl, (int)comm->world, id, (int)comm->rank, &config);
    bool good = collective_settle(collectives, status, "connecting the ranks", error);
    pthread_mutex_unlock(&collectives->mutex);
    if (!good) return false;
    collectives->watching = pthread_create(&collectives->watcher, NULL, collective_watch, collectives) == 0;
    return collectives->watching || fail(error, "cannot start the thread that watches NCCL: %s; raise the limits (ulimit -u)",
                                  strerror(errno));
}

// All ranks together, each with its own GPU as the current device; `slots` collectives may be under way at a time. NULL
// for comm, or one rank: all other calls return at once. After a failure there is nothing to close.
static inline bool collective_open(Collectives* collectives, Comm* comm, size_t slots, Stream stream, Error* error) {
    (void)stream;
    memset(collectives, 0, sizeof *collectives);
    if (comm) fault_step(comm->rank, 0);
    if (comm == NULL || (comm->world == 1 && !fault_point("nccl"))) return true;  // for tests one rank uses NCCL too
    collectives->comm = comm;
    collectives->slots = (CollectiveSlot*)allocate(slots * sizeof(CollectiveSlot));
    collectives->slot_count = collectives->slots ? slots : 0;
    pthread_mutex_init(&collectives->mutex, NULL);
    CUDA_CHECK(cudaGetDevice(&collectives->device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&collectives->stream, cudaStreamNonBlocking));
    for (size_t i = 0; i < collectives->slot_count; i++) {
        CollectiveSlot* s = &collectives->slots[i];
        CUDA_CHECK(cudaEventCreateWithFlags(&s->ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming));
        for (size_t w = 0; w < COLLECTIVE_WAITS; w++) {
            CUDA_CHECK(cudaEventCreate(&s->before[w]));
            CUDA_CHECK(cudaEventCreate(&s->after[w]));
        }
    }
    comm_on_failure(comm, collective_on_failure, collectives);
    cuda_listener()->tell = collective_tell_cuda_error;
    cuda_listener()->context = comm;
    if (collective_join(collectives, error)) return true;
    collective_give_up(collectives, error);
    collective_close(collectives);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 4. Collectives
//
// In place. What a rank sends is counted as for a ring, which is the least possible: of a vector of b bytes b (N-1)/N
// in reduce_scatter and in all_gather, twice that in all_reduce. NCCL may choose other ways.

static inline ncclDataType_t collective_type(CommType type) {
    if (type == COMM_INT64) return ncclInt64;
    return type == COMM_BF16 ? ncclBfloat16 : type == COMM_F16 ? ncclFloat16 : ncclFloat32;
}

// Makes the Collectives's stream wait for `compute`. True with the mutex held if there is something to launch on: collective_end
// follows.
static inline bool collective_begin(Collectives* collectives, size_t slot, Stream stream) {
    if (collectives->comm == NULL) return false;
    CUDA_CHECK(cudaEventRecord(collectives->slots[slot].ready, stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(collectives->stream, collectives->slots[slot].ready, 0));
    pthread_mutex_lock(&collectives->mutex);
    if (collectives->nccl) return true;
    pthread_mutex_unlock(&collectives->mutex);
    return false;
}

// The end may be marked only once the kernel is in the stream.
static inline void collective_end(Collectives* collectives, size_t slot, ncclResult_t status, const char* what) {
    Error error;
    CollectiveSlot* s = &collectives->slots[slot];
    bool good = collective_settle(collectives, status, what, &error);
    pthread_mutex_unlock(&collectives->mutex);
    if (!good) {
        collective_give_up(collectives, &error);
        return;
    }
    CUDA_CHECK(cudaEventRecord(s->done, collectives->stream));
    __atomic_add_fetch(&s->begun, 1, __ATOMIC_RELEASE);
}

static inline void collective_count(Collectives* collectives, size_t n, CommType type, uint64_t times) {
    if (collectives->comm) collectives->bytes_sent += times * n * comm_type_size(type) * (collectives->comm->world - 1) / collectives->comm->world;
}

// data (n) = the sum over all ranks.
static inline void collective_all_reduce(Collectives* collectives, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    collective_count(collectives, n, type, 2);
    if (!collective_begin(collectives, slot, stream)) return;
    ncclResult_t status = ncclAllReduce(data, data, n, collective_type(type), ncclSum, collectives->nccl, collectives->stream);
    collective_end(collectives, slot, status, "all_reduce");
}

// The own slice of data (n) = the sum over all ranks; the rest is worthless afterwards. NCCL's own operation knows only
// slices of equal length; for others there is one reduction per rank, all of them in one launch.
static inline void collective_reduce_scatter(Collectives* collectives, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    collective_count(collectives, n, type, 1);
    if (!collective_begin(collectives, slot, stream)) return;
    size_t size = comm_type_size(type), world = collectives->comm->world, length = shard_slice(n, 0, world).end;
    ncclResult_t status, launched;
    if (length * world == n) {
        char* own = (char*)data + collectives->comm->rank * length * size;
        status = ncclReduceScatter(data, own, length, collective_type(type), ncclSum, collectives->nccl, collectives->stream);
    } else {
        status = ncclGroupStart();
        for (size_t r = 0; r < world && (status == ncclSuccess || status == ncclInProgress); r++) {
            CommSlice slice = shard_slice(n, r, world);
            char* part = (char*)data + slice.first * size;
            status = ncclReduce(part, part, slice.end - slice.first, collective_type(type), ncclSum, (int)r, collectives->nccl,
                                collectives->stream);
        }
        launched = ncclGroupEnd();
        if (status == ncclSuccess || status == ncclInProgress) status = launched;
    }
    collective_end(collectives, slot, status, "reduce_scatter");
}

// data (n): every rank gives its slice, and gets all others.
static inline void collective_all_gather(Collectives* collectives, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    collective_count(collectives, n, type, 1);
    if (!collective_begin(collectives, slot, stream)) return;
    size_t size = comm_type_size(type), world = collectives->comm->world, length = shard_slice(n, 0, world).end;
    ncclResult_t status, launched;
    if (length * world == n) {
        const char* own = (const char*)data + collectives->comm->rank * length * size;
        status = ncclAllGather(own, data, length, collective_type(type), collectives->nccl, collectives->stream);
    } else {
        status = ncclGroupStart();
        for (size_t r = 0; r < world && (status == ncclSuccess || status == ncclInProgress); r++) {
            CommSlice slice = shard_slice(n, r, world);
            char* part = (char*)data + slice.first * size;
            status = ncclBroadcast(part, part, slice.end - slice.first, collective_type(type), (int)r, collectives->nccl,
                                   collectives->stream);
        }
        launched = ncclGroupEnd();
        if (status == ncclSuccess || status == ncclInProgress) status = launched;
    }
    collective_end(collectives, slot, status, "all_gather");
}

// ------------------------------------------------------------------------------------------------
// 5. Waiting

// Adds the oldest wait of a slot that has not been read.
static inline void collective_read_wait(Collectives* collectives, CollectiveSlot* s) {
    size_t oldest = s->read++ % COLLECTIVE_WAITS;
    float ms = 0;
    CUDA_CHECK(cudaEventSynchronize(s->after[oldest]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, s->before[oldest], s->after[oldest]));
    collectives->waited_ms += (double)ms;
}

// What the stream is given from now on sees the result of the slot's collective.
static inline void collective_wait(Collectives* collectives, size_t slot, Stream stream) {
    if (collectives->comm == NULL) return;
    CollectiveSlot* s = &collectives->slots[slot];
    if (s->waits - s->read == COLLECTIVE_WAITS) collective_read_wait(collectives, s);
    size_t next = s->waits++ % COLLECTIVE_WAITS;
    CUDA_CHECK(cudaEventRecord(s->before[next], stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(stream->compute, s->done, 0));
    CUDA_CHECK(cudaEventRecord(s->after[next], stream->compute));
}

// The programs of all ranks have come here, with all that they have given their GPUs before; once per micro-batch, before the
// host may have to wait for a GPU that waits for another rank. A rank whose program is stuck is named by the Comm.
static inline void collective_barrier(Collectives* collectives) {
    Error ignored;  // who asks the Comm hears of it
    if (collectives->comm) comm_barrier(collectives->comm, &ignored);
}

// Payload that this rank has sent so far, in bytes.
static inline uint64_t collective_bytes_sent(const Collectives* collectives) { return collectives->bytes_sent; }

// How long the stream has stood waiting for collectives since the last call, which comes after the host has waited for
// it.
static inline double collective_waited_ms(Collectives* collectives) {
    for (size_t i = 0; i < collectives->slot_count; i++)
        while (collectives->slots[i].read < collectives->slots[i].waits) collective_read_wait(collectives, &collectives->slots[i]);
    double waited = collectives->waited_ms;
    collectives->waited_ms = 0;
    return waited;
}

#endif  // LLMTRAIN_NCCL_CUH
