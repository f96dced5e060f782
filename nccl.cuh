// nccl.cuh: the Wire of ranks.h in a CUDA build: collectives over the memory of GPUs, by NCCL.
//
//   1. wire         what it holds
//   2. faults       what NCCL reports, and how its kernels are ended when a rank is gone
//   3. opening      wire_open, wire_close
//   4. collectives  on a stream of their own, after what `compute` was given before
//   5. waiting      wire_wait, and how long `compute` has stood there
//
// Built with -DLLMTRAIN_NCCL; a program without it has the same functions, and refuses more than one rank. With one
// rank nothing is created, and every call returns at once.
//
// A kernel of NCCL waits for the other ranks, for ever if need be. Who watches the ranks is the Comm. When it finds a
// fault, its thread calls wire_on_failure, and ncclCommAbort makes the kernels return; so the streams come to their
// ends, and the host, wherever it waits, goes on and hears the Comm's sentence. For that no call of NCCL may block, or
// the abort would have to wait for it: the communicator is non-blocking, and wire_settle asks until NCCL has done what
// a call began. NCCL takes one thread at a time: each call, the abort too, is made under the Wire's mutex.
//
// Included by ranks.h, whose shard_slice says which slice of a vector is whose.

#ifndef LLMTRAIN_NCCL_CUH
#define LLMTRAIN_NCCL_CUH

#include "comm.h"
#include "device.cuh"

#ifdef LLMTRAIN_NCCL

#include <nccl.h>
#include <sched.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "NCCL 2.19 or newer is needed: an older one cannot be aborted from another thread while it makes a connection"
#endif

// ------------------------------------------------------------------------------------------------
// 1. Wire

#define WIRE_WAITS ((size_t)4)      // waits in one slot whose times are not read yet
#define WIRE_SPINS ((size_t)10000)  // looks before the host sleeps between them: a launch takes microseconds
#define WIRE_PAUSE_MS 0.5           // between looks then: a connection takes seconds
#define WIRE_WATCH_MS 50.0          // between looks for what NCCL's own threads have found

// What one collective at a time needs.
typedef struct {
    cudaEvent_t ready;               // recorded on `compute` before the collective: its data is there
    cudaEvent_t done;                // recorded on the Wire's stream behind it
    cudaEvent_t before[WIRE_WAITS];  // recorded on `compute` around each wait for `done`, in turn
    cudaEvent_t after[WIRE_WAITS];
    uint64_t waits, read;            // such pairs so far, and of them those that are in waited_ms
    uint64_t begun;                  // collectives so far; the watcher reads it
    uint64_t seen;                   // by the watcher: which one it looks at,
    double since_ms;                 // and when it first saw that its data is there; 0: not yet
} WireSlot;

typedef struct {
    Comm* comm;              // NULL: one rank, and nothing else here means anything
    cudaStream_t stream;     // of the collectives
    WireSlot* slots;         // (slot_count)
    size_t slot_count;
    uint64_t bytes_sent;
    double waited_ms;        // of waits that have been read, since it was last asked for
    double delay_ms;         // for tests: every collective takes so much longer
    int device;

    pthread_mutex_t mutex;   // guards what follows; the Comm's mutex may be taken under it, not the other way round
    ncclComm_t nccl;         // NULL before it is made and after it was aborted
    bool watching, closing;  // the thread runs; it is to end
    pthread_t watcher;
} Wire;

// ------------------------------------------------------------------------------------------------
// 2. Faults

static inline bool wire_explain(Error* error, ncclResult_t status, const char* what, ncclComm_t nccl) {
    const char* more = ncclGetLastError(nccl);
    bool said = more && more[0];
    return fail(error, "NCCL failed in %s: %s%s%.300s%s; set NCCL_DEBUG=WARN to see more", what,
                ncclGetErrorString(status), said ? " (" : "", said ? more : "", said ? ")" : "");
}

// Called by cuda_check, which ends the program then.
static inline void wire_tell_cuda_error(void* context, const char* sentence) { comm_abandon((Comm*)context, sentence); }

// Called by the Comm, from its thread, when it has failed.
static inline void wire_on_failure(void* context) {
    Wire* wire = (Wire*)context;
    pthread_mutex_lock(&wire->mutex);
    if (wire->nccl) ncclCommAbort(wire->nccl);
    wire->nccl = NULL;
    pthread_mutex_unlock(&wire->mutex);
}

// Waits until NCCL has done what a call began: made connections, launched a kernel. The mutex is held on entry and on
// return, not in between. False if that failed, if the Comm did, or after twice the Comm's time-out: it is the one to
// find a rank that is silent.
static inline bool wire_settle(Wire* wire, ncclResult_t status, const char* what, Error* error) {
    double patience_ms = 2 * wire->comm->timeout_ms, deadline = now_ms() + patience_ms;
    for (size_t looks = 0; status == ncclInProgress; looks++) {
        pthread_mutex_unlock(&wire->mutex);
        if (looks < WIRE_SPINS) sched_yield();
        else comm_sleep(WIRE_PAUSE_MS);
        pthread_mutex_lock(&wire->mutex);
        if (comm_failed(wire->comm, error)) return false;  // and wire->nccl may be gone
        ncclResult_t asked = ncclCommGetAsyncError(wire->nccl, &status);
        if (asked != ncclSuccess) status = asked;
        if (status == ncclInProgress && now_ms() > deadline)
            return fail(error,
                        "NCCL has not come to an end of %s within %.1f s; set NCCL_DEBUG=INFO to see what it tries, "
                        "and NCCL_SOCKET_IFNAME if it takes the wrong network",
                        what, patience_ms / 1e3);
    }
    return status == ncclSuccess || wire_explain(error, status, what, wire->nccl);
}

// After a fault that NCCL found. Often it is that a rank is gone, and then the Comm knows which, or will in a moment;
// otherwise the others hear of it as this rank's. The mutex is not held.
static inline void wire_give_up(Wire* wire, Error* error) {
    Error known;
    double deadline = now_ms() + COMM_GRACE_MS;
    bool failed = comm_failed(wire->comm, &known);
    while (!failed && now_ms() < deadline) {
        comm_sleep(1);
        failed = comm_failed(wire->comm, &known);
    }
    if (failed) *error = known;
    else comm_abandon(wire->comm, error->text);
}

// False, with a sentence, if the Comm or NCCL has found a fault; does not wait. What NCCL found, the Comm knows
// afterwards.
static inline bool wire_check(Wire* wire, Error* error) {
    if (wire->comm == NULL) return true;
    ncclResult_t status = ncclSuccess;
    pthread_mutex_lock(&wire->mutex);
    bool failed = comm_failed(wire->comm, error);
    ncclResult_t asked = !failed && wire->nccl ? ncclCommGetAsyncError(wire->nccl, &status) : ncclSuccess;
    if (asked != ncclSuccess) status = asked;
    bool found = status != ncclSuccess && status != ncclInProgress;
    if (found) wire_explain(error, status, "the background", wire->nccl);
    pthread_mutex_unlock(&wire->mutex);
    if (found) wire_give_up(wire, error);
    return !failed && !found;
}

// Whether a collective has had its data for so long that a rank must be stuck, or a GPU, or what joins them. The Comm names a
// rank whose program is stuck before that, in wire_meet. Without the mutex: who asks CUDA may have to wait, and the abort may
// not.
static inline bool wire_is_stuck(Wire* wire, Error* error) {
    double now = now_ms(), patience_ms = 2 * wire->comm->timeout_ms;
    bool stuck = false;
    for (size_t i = 0; i < wire->slot_count; i++) {
        WireSlot* s = &wire->slots[i];
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
static inline void* wire_watch(void* context) {
    Wire* wire = (Wire*)context;
    Error error;
    bool closing = false;
    CUDA_CHECK(cudaSetDevice(wire->device));
    while (!closing && wire_check(wire, &error)) {
        if (wire_is_stuck(wire, &error)) {
            comm_abandon(wire->comm, error.text);
            break;
        }
        comm_sleep(WIRE_WATCH_MS);
        pthread_mutex_lock(&wire->mutex);
        closing = wire->closing;
        pthread_mutex_unlock(&wire->mutex);
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 3. Opening

// All ranks together. To be closed before the Comm and the stream are.
static inline void wire_close(Wire* wire) {
    Error ignored;  // who asks the Comm hears of it
    if (wire->comm == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(wire->stream));
    pthread_mutex_lock(&wire->mutex);
    wire->closing = true;
    pthread_mutex_unlock(&wire->mutex);
    if (wire->watching) pthread_join(wire->watcher, NULL);
    pthread_mutex_lock(&wire->mutex);
    bool ended = wire->nccl && wire_settle(wire, ncclCommFinalize(wire->nccl), "the end of the run", &ignored);
    if (wire->nccl && ended) ncclCommDestroy(wire->nccl);
    else if (wire->nccl) ncclCommAbort(wire->nccl);
    wire->nccl = NULL;
    pthread_mutex_unlock(&wire->mutex);
    comm_on_failure(wire->comm, NULL, NULL);
    cuda_listener()->tell = NULL;
    for (size_t i = 0; i < wire->slot_count; i++) {
        WireSlot* s = &wire->slots[i];
        CUDA_CHECK(cudaEventDestroy(s->ready));
        CUDA_CHECK(cudaEventDestroy(s->done));
        for (size_t w = 0; w < WIRE_WAITS; w++) {
            CUDA_CHECK(cudaEventDestroy(s->before[w]));
            CUDA_CHECK(cudaEventDestroy(s->after[w]));
        }
    }
    CUDA_CHECK(cudaStreamDestroy(wire->stream));
    pthread_mutex_destroy(&wire->mutex);
    free(wire->slots);
    memset(wire, 0, sizeof *wire);
}

// The ranks meet by an identifier that rank 0 makes up.
static inline bool wire_join(Wire* wire, Error* error) {
    Comm* comm = wire->comm;
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    memset(&id, 0, sizeof id);
    if (wire->slots == NULL) return fail(error, "out of memory for the events of collectives");
    ncclResult_t status = comm->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (status != ncclSuccess) return wire_explain(error, status, "ncclGetUniqueId", NULL);
    if (!comm_broadcast(comm, &id, sizeof id, COMM_BYTES, 0, error)) return false;
    pthread_mutex_lock(&wire->mutex);
    status = ncclCommInitRankConfig(&wire->nccl, (int)comm->world, id, (int)comm->rank, &config);
    bool good = wire_settle(wire, status, "connecting the ranks", error);
    pthread_mutex_unlock(&wire->mutex);
    if (!good) return false;
    wire->watching = pthread_create(&wire->watcher, NULL, wire_watch, wire) == 0;
    return wire->watching || fail(error, "cannot start the thread that watches NCCL: %s; raise the limits (ulimit -u)",
                                  strerror(errno));
}

// All ranks together, each with its own GPU as the current device; `slots` collectives may be under way at a time. NULL
// for comm, or one rank: all other calls return at once. After a failure there is nothing to close.
static inline bool wire_open(Wire* wire, Comm* comm, size_t slots, Stream stream, Error* error) {
    (void)stream;
    const char* delay = getenv("LLMTRAIN_TEST_DELAY_MS");
    memset(wire, 0, sizeof *wire);
    bool alone = comm == NULL || (comm->world == 1 && getenv("LLMTRAIN_TEST_NCCL") == NULL);  // NCCL can do with one rank, for tests
    if (alone) return true;
    wire->comm = comm;
    wire->delay_ms = delay ? atof(delay) : 0;
    wire->slots = (WireSlot*)allocate(slots * sizeof(WireSlot));
    wire->slot_count = wire->slots ? slots : 0;
    pthread_mutex_init(&wire->mutex, NULL);
    CUDA_CHECK(cudaGetDevice(&wire->device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&wire->stream, cudaStreamNonBlocking));
    for (size_t i = 0; i < wire->slot_count; i++) {
        WireSlot* s = &wire->slots[i];
        CUDA_CHECK(cudaEventCreateWithFlags(&s->ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming));
        for (size_t w = 0; w < WIRE_WAITS; w++) {
            CUDA_CHECK(cudaEventCreate(&s->before[w]));
            CUDA_CHECK(cudaEventCreate(&s->after[w]));
        }
    }
    comm_on_failure(comm, wire_on_failure, wire);
    cuda_listener()->tell = wire_tell_cuda_error;
    cuda_listener()->context = comm;
    if (wire_join(wire, error)) return true;
    wire_give_up(wire, error);
    wire_close(wire);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 4. Collectives
//
// In place. What a rank sends is counted as for a ring, which is the least possible: of a vector of b bytes b (N-1)/N
// in reduce_scatter and in all_gather, twice that in all_reduce. NCCL may choose other ways.

static inline ncclDataType_t wire_type(CommType type) {
    if (type == COMM_INT64) return ncclInt64;
    return type == COMM_BF16 ? ncclBfloat16 : type == COMM_F16 ? ncclFloat16 : ncclFloat32;
}

static inline void CUDART_CB wire_delay(void* context) { comm_sleep(((const Wire*)context)->delay_ms); }

// Makes the Wire's stream wait for `compute`. True with the mutex held if there is something to launch on: wire_end
// follows.
static inline bool wire_begin(Wire* wire, size_t slot, Stream stream) {
    if (wire->comm == NULL) return false;
    CUDA_CHECK(cudaEventRecord(wire->slots[slot].ready, stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(wire->stream, wire->slots[slot].ready, 0));
    if (wire->delay_ms > 0) CUDA_CHECK(cudaLaunchHostFunc(wire->stream, wire_delay, wire));
    pthread_mutex_lock(&wire->mutex);
    if (wire->nccl) return true;
    pthread_mutex_unlock(&wire->mutex);
    return false;
}

// The end may be marked only once the kernel is in the stream.
static inline void wire_end(Wire* wire, size_t slot, ncclResult_t status, const char* what) {
    Error error;
    WireSlot* s = &wire->slots[slot];
    bool good = wire_settle(wire, status, what, &error);
    pthread_mutex_unlock(&wire->mutex);
    if (!good) {
        wire_give_up(wire, &error);
        return;
    }
    CUDA_CHECK(cudaEventRecord(s->done, wire->stream));
    __atomic_add_fetch(&s->begun, 1, __ATOMIC_RELEASE);
}

static inline void wire_count(Wire* wire, size_t n, CommType type, uint64_t times) {
    if (wire->comm) wire->bytes_sent += times * n * comm_type_size(type) * (wire->comm->world - 1) / wire->comm->world;
}

// data (n) = the sum over all ranks.
static inline void wire_all_reduce(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    wire_count(wire, n, type, 2);
    if (!wire_begin(wire, slot, stream)) return;
    ncclResult_t status = ncclAllReduce(data, data, n, wire_type(type), ncclSum, wire->nccl, wire->stream);
    wire_end(wire, slot, status, "all_reduce");
}

// The own slice of data (n) = the sum over all ranks; the rest is worthless afterwards. NCCL's own operation knows only
// slices of equal length; for others there is one reduction per rank, all of them in one launch.
static inline void wire_reduce_scatter(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    wire_count(wire, n, type, 1);
    if (!wire_begin(wire, slot, stream)) return;
    size_t size = comm_type_size(type), world = wire->comm->world, length = shard_slice(n, 0, world).end;
    ncclResult_t status, launched;
    if (length * world == n) {
        char* own = (char*)data + wire->comm->rank * length * size;
        status = ncclReduceScatter(data, own, length, wire_type(type), ncclSum, wire->nccl, wire->stream);
    } else {
        status = ncclGroupStart();
        for (size_t r = 0; r < world && (status == ncclSuccess || status == ncclInProgress); r++) {
            CommSlice slice = shard_slice(n, r, world);
            char* part = (char*)data + slice.first * size;
            status = ncclReduce(part, part, slice.end - slice.first, wire_type(type), ncclSum, (int)r, wire->nccl,
                                wire->stream);
        }
        launched = ncclGroupEnd();
        if (status == ncclSuccess || status == ncclInProgress) status = launched;
    }
    wire_end(wire, slot, status, "reduce_scatter");
}

// data (n): every rank gives its slice, and gets all others.
static inline void wire_all_gather(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    wire_count(wire, n, type, 1);
    if (!wire_begin(wire, slot, stream)) return;
    size_t size = comm_type_size(type), world = wire->comm->world, length = shard_slice(n, 0, world).end;
    ncclResult_t status, launched;
    if (length * world == n) {
        const char* own = (const char*)data + wire->comm->rank * length * size;
        status = ncclAllGather(own, data, length, wire_type(type), wire->nccl, wire->stream);
    } else {
        status = ncclGroupStart();
        for (size_t r = 0; r < world && (status == ncclSuccess || status == ncclInProgress); r++) {
            CommSlice slice = shard_slice(n, r, world);
            char* part = (char*)data + slice.first * size;
            status = ncclBroadcast(part, part, slice.end - slice.first, wire_type(type), (int)r, wire->nccl,
                                   wire->stream);
        }
        launched = ncclGroupEnd();
        if (status == ncclSuccess || status == ncclInProgress) status = launched;
    }
    wire_end(wire, slot, status, "all_gather");
}

// ------------------------------------------------------------------------------------------------
// 5. Waiting

// Adds the oldest wait of a slot that has not been read.
static inline void wire_read_wait(Wire* wire, WireSlot* s) {
    size_t oldest = s->read++ % WIRE_WAITS;
    float ms = 0;
    CUDA_CHECK(cudaEventSynchronize(s->after[oldest]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, s->before[oldest], s->after[oldest]));
    wire->waited_ms += (double)ms;
}

// What the stream is given from now on sees the result of the slot's collective.
static inline void wire_wait(Wire* wire, size_t slot, Stream stream) {
    if (wire->comm == NULL) return;
    WireSlot* s = &wire->slots[slot];
    if (s->waits - s->read == WIRE_WAITS) wire_read_wait(wire, s);
    size_t next = s->waits++ % WIRE_WAITS;
    CUDA_CHECK(cudaEventRecord(s->before[next], stream->compute));
    CUDA_CHECK(cudaStreamWaitEvent(stream->compute, s->done, 0));
    CUDA_CHECK(cudaEventRecord(s->after[next], stream->compute));
}

// The programs of all ranks have come here, with all that they have given their GPUs before; once per micro-batch, before the
// host may have to wait for a GPU that waits for another rank. A rank whose program is stuck is named by the Comm.
static inline void wire_meet(Wire* wire) {
    Error ignored;  // who asks the Comm hears of it
    if (wire->comm) comm_barrier(wire->comm, &ignored);
}

// Payload that this rank has sent so far, in bytes.
static inline uint64_t wire_bytes_sent(const Wire* wire) { return wire->bytes_sent; }

// How long the stream has stood waiting for collectives since the last call, which comes after the host has waited for
// it.
static inline double wire_waited_ms(Wire* wire) {
    for (size_t i = 0; i < wire->slot_count; i++)
        while (wire->slots[i].read < wire->slots[i].waits) wire_read_wait(wire, &wire->slots[i]);
    double waited = wire->waited_ms;
    wire->waited_ms = 0;
    return waited;
}

#else  // without NCCL

typedef struct {
    Comm* comm;  // always NULL: there is one rank
} Wire;

static inline bool wire_open(Wire* wire, Comm* comm, size_t slots, Stream stream, Error* error) {
    (void)slots;
    (void)stream;
    wire->comm = NULL;
    if (comm == NULL || comm->world == 1) return true;
    return fail(error,
                "this program was built without NCCL, which %zu ranks with GPUs need; install libnccl-dev and make "
                "again, or use one rank",
                comm->world);
}

static inline void wire_close(Wire* wire) { (void)wire; }

static inline bool wire_check(Wire* wire, Error* error) {
    (void)wire;
    (void)error;
    return true;
}

static inline void wire_all_reduce(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    (void)wire; (void)slot; (void)data; (void)n; (void)type; (void)stream;
}

static inline void wire_reduce_scatter(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    (void)wire; (void)slot; (void)data; (void)n; (void)type; (void)stream;
}

static inline void wire_all_gather(Wire* wire, size_t slot, void* data, size_t n, CommType type, Stream stream) {
    (void)wire; (void)slot; (void)data; (void)n; (void)type; (void)stream;
}

static inline void wire_wait(Wire* wire, size_t slot, Stream stream) { (void)wire; (void)slot; (void)stream; }

static inline void wire_meet(Wire* wire) { (void)wire; }

static inline uint64_t wire_bytes_sent(const Wire* wire) { (void)wire; return 0; }

static inline double wire_waited_ms(Wire* wire) { (void)wire; return 0; }

#endif

#endif  // LLMTRAIN_NCCL_CUH
