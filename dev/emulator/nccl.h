// nccl.h: the part of NCCL that nccl.cuh uses, between processes on the CPU. Sources get it by #include <nccl.h>.
//
//   1. objects     communicators, and the memory that their ranks share
//   2. collectives each as passes of pieces through that memory
//   3. launches    a thread per communicator, as in the library's non-blocking ones, and one that is its device
//   4. checks      of pointers and of places
//   5. functions   of the library
//
// Each rank is a process with its own emulated device. The ranks meet in a file of shared memory named by the unique
// identifier; it is removed once all have opened it. A collective is a piece of work in its stream, like a kernel: with
// delayed streams it is held until something demands it, and then waits for the other ranks. A device would not need
// its host for that. So a rank whose host is busy elsewhere runs a collective by itself, shortly after another rank has
// begun to wait for it, if all ranks have launched it.
//
// The first collective of a communicator connects its ranks: its launch waits for theirs, as in the library from 2.22
// on.
//
// Sends and receives between ncclGroupStart and ncclGroupEnd run together: no send waits for a receive that the same
// group enqueues later. All ranks of a communicator take part in each such group, which the library does not require.
//
// Communicators must be non-blocking: calls return before their work is in the stream, and only ncclCommGetAsyncError
// tells when it is. An event recorded before that is recorded too early.
//
// Ranks that call different things get a diagnosis that names both calls, where the library would hang or corrupt
// memory; so does a send without its receive, or with one of another length or type. Also diagnosed: buffers that are
// not on the device or not within one allocation; in-place operations without the layout that the library requires;
// messages of a group whose buffers overlap; use of a communicator that was destroyed or aborted, or by two threads at
// a time; a communicator that is destroyed before it was finalized, or while collectives wait in a stream; one that is
// left at the end.
//
// Sums are computed in rank order, in float for the 16-bit types, rounded once; the library promises no order.

#ifndef EMULATOR_NCCL_H
#define EMULATOR_NCCL_H

#include "emulator.h"

#include "../../llmtrain/ops/base.h"

#if __has_include_next(<nccl.h>)
#include_next <nccl.h>
#else
#include "standins/nccl.h"
#endif

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>

#include <condition_variable>
#include <thread>

namespace emulator {

// Set by tests: what the next collective returns instead of being launched; what ncclCommGetAsyncError returns; after
// how many further meetings with the other ranks this process is killed (0: never).
inline ncclResult_t nccl_next_result = ncclSuccess;
inline std::atomic<int> nccl_async_result{ncclSuccess};
inline std::atomic<int> nccl_killed_after{0};

// ------------------------------------------------------------------------------------------------
// 1. Objects

enum NcclOperation { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, REDUCE, BROADCAST, SEND, RECEIVE };
inline const char* const nccl_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclReduce",
                                         "ncclBroadcast", "ncclSend", "ncclRecv"};
inline bool nccl_is_message(int operation) { return operation == SEND || operation == RECEIVE; }

const size_t NCCL_PIECE = 16 << 10;     // bytes that a rank exposes to the others at a time
const int NCCL_RANKS = 64;
const int NCCL_CALLS = 2 * NCCL_RANKS;  // sends and receives of a rank in one group
const double NCCL_PATIENCE_MS = 20;     // until a rank runs a collective that others wait for

// What must be equal on all ranks, or fit that of a peer, which is the root; line and file are for the report.
struct NcclCall {
    uint64_t count;
    int operation, type, root, line;
    char file[64];
};

struct NcclRank {
    std::atomic<uint32_t> joined, connecting, finalized;
    std::atomic<uint64_t> launched;     // collectives, or groups of them, in this rank's stream
    std::atomic<uint64_t> entered;      // the number of the last collective that has begun to run
    std::atomic<uint64_t> meeting;      // meetings that it has reached
    NcclCall calls[NCCL_CALLS];         // the running collective's call, or those of a group of messages
    int call_count;
    alignas(16) char piece[NCCL_PIECE];
};

struct NcclShared {
    std::atomic<int> world;
    NcclRank ranks[NCCL_RANKS];         // pages of ranks that do not exist are never touched
};

struct NcclTask {
    NcclOperation operation;
    const char* send;
    char* receive;
    size_t count;
    ncclDataType_t type;
    int root;
    Place place;
};

struct NcclCommunicator {
    int rank, world;
    std::string file;
    NcclShared* shared;
    uint64_t meetings;                  // that this rank has reached
    std::atomic<bool> in_use;           // by a call
    std::atomic<bool> aborted;
    std::atomic<int> pending;           // collectives that are launched here and have not ended
    std::atomic<int> state;             // ncclInProgress until the thread has finished the latest call
    bool gone, finalizing;              // destroyed or aborted; ncclCommFinalize was called
    Place gone_at;

    std::thread thread, device;         // of launches; of collectives that the host does not run
    std::mutex mutex;                   // guards the members below
    std::condition_variable changed;
    bool stopping;
    std::vector<NcclTask> tasks;        // to be launched
    cudaStream_t stream;                // the stream of these tasks
    std::map<uint64_t, Position> held;  // stream positions of collectives that have not begun to run, by number
};

inline std::mutex nccl_lock;            // guards the list
inline std::vector<NcclCommunicator*> nccl_communicators;  // gone ones, too, to detect their use
inline thread_local std::string nccl_last_error;

inline ncclResult_t nccl_refuse(ncclResult_t result, const char* why) {
    nccl_last_error = why;
    return result;
}

inline size_t nccl_type_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclFloat32: return 4;
        case ncclInt64: return 8;
        default: die("NCCL: data type %d is not emulated", (int)type);
    }
}

inline std::string nccl_describe(const NcclCall& call) {
    std::string text = nccl_names[call.operation];
    text += " of " + std::to_string(call.count) + " elements of type " + std::to_string(call.type);
    if (call.operation == REDUCE || call.operation == BROADCAST) text += ", root " + std::to_string(call.root);
    if (nccl_is_message(call.operation))
        text += (call.operation == SEND ? " to rank " : " from rank ") + std::to_string(call.root);
    return text + " (" + call.file + ":" + std::to_string(call.line) + ")";
}

// ------------------------------------------------------------------------------------------------
// 2. Collectives
//
// Every rank exposes a piece of its vector, all meet, each takes what it needs, all meet again.

inline void nccl_nap(int* looks) {
    if (++*looks < 200) sched_yield();
    else let_others_run();
}

// Waits for all ranks; false if the communicator was aborted instead.
inline bool nccl_meet(NcclCommunicator* c) {
    uint64_t number = ++c->meetings;
    if (nccl_killed_after > 0 && --nccl_killed_after == 0) raise(SIGKILL);
    c->shared->ranks[c->rank].meeting = number;
    for (int p = 0, looks = 0; p < c->world; p++) {
        while (c->shared->ranks[p].meeting < number) {
            if (c->aborted) return false;
            nccl_nap(&looks);
        }
    }
    return true;
}

inline float nccl_float(const char* piece, ncclDataType_t type, size_t i) {
    if (type == ncclFloat32) return ((const float*)piece)[i];
    uint16_t half = ((const uint16_t*)piece)[i];
    return type == ncclBfloat16 ? float_from_bf16(half) : float_from_f16(half);
}

// The sum of all ranks' pieces.
inline void nccl_sum(NcclCommunicator* c, char* out, size_t count, ncclDataType_t type) {
    const NcclRank* ranks = c->shared->ranks;
    for (size_t i = 0; i < count; i++) {
        if (type == ncclInt64) {
            uint64_t sum = 0;  // an overflowing sum wraps around
            for (int p = 0; p < c->world; p++) sum += ((const uint64_t*)ranks[p].piece)[i];
            ((uint64_t*)out)[i] = sum;
            continue;
        }
        float sum = nccl_float(ranks[0].piece, type, i);
        for (int p = 1; p < c->world; p++) sum += nccl_float(ranks[p].piece, type, i);
        if (type == ncclFloat32) ((float*)out)[i] = sum;
        else ((uint16_t*)out)[i] = type == ncclBfloat16 ? bf16_from_float(sum) : f16_from_float(sum);
    }
}

const int NCCL_ALL = -1;

// `to`, unless NULL, receives `giver`'s data at `from`, or the sum over all ranks.
inline bool nccl_pass(NcclCommunicator* c, char* to, const char* from, size_t count, ncclDataType_t type, int giver) {
    size_t size = nccl_type_bytes(type), piece = NCCL_PIECE / size;
    for (size_t first = 0; first < count; first += piece) {
        size_t n = min_size(piece, count - first);
        if (giver == NCCL_ALL || giver == c->rank)
            memcpy(c->shared->ranks[c->rank].piece, from + first * size, n * size);
        if (!nccl_meet(c)) return false;
        if (to && giver == NCCL_ALL) nccl_sum(c, to + first * size, n, type);
        else if (to) memcpy(to + first * size, c->shared->ranks[giver].piece, n * size);
        if (!nccl_meet(c)) return false;
    }
    return true;
}

// Call i of a rank, a message, is the k-th of its kind with that peer. Index of the peer's k-th of the other kind; -1:
// there is none.
inline int nccl_partner(const NcclCommunicator* c, int rank, int i) {
    const NcclCall *calls = c->shared->ranks[rank].calls, &call = calls[i];
    const NcclRank& peer = c->shared->ranks[call.root];
    int k = 0;
    for (int j = 0; j < i; j++) k += calls[j].operation == call.operation && calls[j].root == call.root;
    for (int j = 0; j < peer.call_count; j++) {
        const NcclCall& other = peer.calls[j];
        if (other.operation == SEND + RECEIVE - call.operation && other.root == rank && k-- == 0) return j;
    }
    return -1;
}

// Ends the program if a message of this rank has no partner, or one of another length or type.
inline void nccl_match(const NcclCommunicator* c) {
    const NcclRank& own = c->shared->ranks[c->rank];
    for (int i = 0; i < own.call_count; i++) {
        const NcclCall& call = own.calls[i];
        int partner = nccl_partner(c, c->rank, i);
        const NcclCall& other = c->shared->ranks[call.root].calls[std::max(partner, 0)];
        if (partner >= 0 && other.count == call.count && other.type == call.type) continue;
        std::string theirs = nccl_describe(other);
        if (partner < 0)
            theirs = std::string("has no ") + nccl_names[SEND + RECEIVE - call.operation] + " for it, but " + theirs;
        die("NCCL: the ranks disagree: rank %d called %s, rank %d %s", c->rank, nccl_describe(call).c_str(), call.root,
            theirs.c_str());
    }
}

// Ends the program if another rank has made a different call, or messages have no partners.
inline bool nccl_agree(NcclCommunicator* c, const NcclTask* tasks, size_t count) {
    NcclRank* rank = &c->shared->ranks[c->rank];
    const NcclCall* own = rank->calls;
    for (size_t i = 0; i < count; i++) {
        const NcclTask& t = tasks[i];
        rank->calls[i] = NcclCall{t.count, (int)t.operation, (int)t.type, t.root, t.place.line, {0}};
        snprintf(rank->calls[i].file, sizeof own->file, "%s", t.place.file ? t.place.file : "?");
    }
    rank->call_count = (int)count;
    if (!nccl_meet(c)) return false;
    for (int p = 0; p < c->world; p++) {
        const NcclCall& other = c->shared->ranks[p].calls[0];
        if (nccl_is_message(own->operation) && nccl_is_message(other.operation)) continue;
        if (own->count == other.count && own->operation == other.operation && own->type == other.type &&
            own->root == other.root) continue;
        die("NCCL: the ranks disagree: rank %d called %s, rank %d %s", c->rank, nccl_describe(*own).c_str(), p,
            nccl_describe(other).c_str());
    }
    if (nccl_is_message(own->operation)) nccl_match(c);
    return nccl_meet(c);
}

// Runs a group of messages. In step k every rank exposes its k-th send, piece by piece, to the rank that receives it.
inline bool nccl_exchange(NcclCommunicator* c, const std::vector<NcclTask>& tasks) {
    const NcclRank* ranks = c->shared->ranks;
    if (!nccl_agree(c, tasks.data(), tasks.size())) return false;
    int sends[NCCL_RANKS][NCCL_CALLS], counts[NCCL_RANKS] = {0}, steps = 0;  // the calls that send
    for (int p = 0; p < c->world; p++) {
        for (int i = 0; i < ranks[p].call_count; i++)
            if (ranks[p].calls[i].operation == SEND) sends[p][counts[p]++] = i;
        steps = std::max(steps, counts[p]);
    }
    for (int k = 0; k < steps; k++) {
        size_t sizes[NCCL_RANKS] = {0}, longest = 0;
        char* to[NCCL_RANKS] = {nullptr};  // where this rank receives
        for (int p = 0; p < c->world; p++) {
            if (k >= counts[p]) continue;
            const NcclCall& call = ranks[p].calls[sends[p][k]];
            sizes[p] = call.count * nccl_type_bytes((ncclDataType_t)call.type);
            longest = std::max(longest, sizes[p]);
            if (call.root == c->rank) to[p] = tasks[(size_t)nccl_partner(c, p, sends[p][k])].receive;
        }
        for (size_t first = 0; first < longest; first += NCCL_PIECE) {
            if (first < sizes[c->rank])
                memcpy(c->shared->ranks[c->rank].piece, tasks[(size_t)sends[c->rank][k]].send + first,
                       min_size(NCCL_PIECE, sizes[c->rank] - first));
            if (!nccl_meet(c)) return false;
            for (int p = 0; p < c->world; p++)
                if (to[p] && first < sizes[p])
                    memcpy(to[p] + first, ranks[p].piece, min_size(NCCL_PIECE, sizes[p] - first));
            if (!nccl_meet(c)) return false;
        }
    }
    return true;
}

inline bool nccl_run_task(NcclCommunicator* c, const NcclTask& t) {
    size_t bytes = t.count * nccl_type_bytes(t.type);
    if (!nccl_agree(c, &t, 1)) return false;
    if (t.operation == ALL_REDUCE) return nccl_pass(c, t.receive, t.send, t.count, t.type, NCCL_ALL);
    if (t.operation == REDUCE)
        return nccl_pass(c, c->rank == t.root ? t.receive : nullptr, t.send, t.count, t.type, NCCL_ALL);
    if (t.operation == BROADCAST) return nccl_pass(c, t.receive, t.send, t.count, t.type, t.root);
    for (int p = 0; p < c->world; p++) {
        size_t offset = (size_t)p * bytes;
        char* scattered = p == c->rank ? t.receive : nullptr;
        bool good = t.operation == ALL_GATHER ? nccl_pass(c, t.receive + offset, t.send, t.count, t.type, p)
                                              : nccl_pass(c, scattered, t.send + offset, t.count, t.type, NCCL_ALL);
        if (!good) return false;
    }
    return true;
}

// A piece of work of the stream.
inline void nccl_run(NcclCommunicator* c, const std::vector<NcclTask>& tasks, uint64_t number) {
    {
        std::lock_guard<std::mutex> guard(c->mutex);
        c->held.erase(number);
    }
    c->shared->ranks[c->rank].entered = number;
    if (nccl_is_message(tasks[0].operation)) nccl_exchange(c, tasks);
    else for (size_t i = 0; i < tasks.size() && !c->aborted; i++) nccl_run_task(c, tasks[i]);
    c->pending--;
}

// ------------------------------------------------------------------------------------------------
// 3. Launches

inline void nccl_check(const NcclCommunicator* c, const NcclTask& t);
inline void nccl_check_group(const std::vector<NcclTask>& tasks);

inline void nccl_launch(NcclCommunicator* c, const std::vector<NcclTask>& tasks, cudaStream_t stream) {
    const char* name = nccl_names[tasks[0].operation];
    uint64_t number = c->shared->ranks[c->rank].launched + 1;
    Entry entry(name);
    for (const NcclTask& task : tasks) {
        call_place = task.place;
        nccl_check(c, task);
    }
    nccl_check_group(tasks);
    Stream* queue = stream_of(stream);
    {
        std::lock_guard<std::mutex> guard(c->mutex);
        c->held[number] = Position{queue, queue->enqueued + 1};
    }
    c->pending++;
    enqueue(stream, [c, tasks, number] { nccl_run(c, tasks, number); }, name, tasks[0].place, true);
    c->shared->ranks[c->rank].launched = number;
}

// The next collective that all ranks have launched and that this one has not begun to run; 0: there is none.
inline uint64_t nccl_next(const NcclCommunicator* c) {
    uint64_t next = c->shared->ranks[c->rank].entered + 1;
    for (int p = 0; p < c->world; p++)
        if (c->shared->ranks[p].launched < next) return 0;
    return next;
}

// Runs a collective here that only the host keeps from running: with streams that are late if other ranks wait for it;
// they have waited since *since_ms as far as this rank knows.
inline void nccl_help(NcclCommunicator* c, double* since_ms) {
    bool late = modes.delayed_streams && !modes.others_ahead;
    uint64_t wanted = nccl_next(c), entered = 0;
    for (int p = 0; p < c->world; p++) entered = std::max(entered, c->shared->ranks[p].entered.load());
    if (wanted == 0 || (late && entered < wanted)) {
        *since_ms = 0;
    } else if (late && *since_ms == 0) {
        *since_ms = milliseconds();
    } else if (!late || milliseconds() - *since_ms > NCCL_PATIENCE_MS) {
        Entry entry("NCCL's own thread");
        std::unique_lock<std::mutex> guard(c->mutex);
        std::map<uint64_t, Position>::iterator next = c->held.find(wanted);
        if (next == c->held.end()) return;  // it has begun meanwhile
        std::vector<Position> positions = {next->second};
        guard.unlock();
        demand(positions);
        if (!modes.delayed_streams) run_what_can(nullptr);
    }
}

// Waits a while for collectives to end.
inline void nccl_wait_for_threads() {
    double until = milliseconds() + NCCL_PATIENCE_MS;
    for (bool more = true; more && milliseconds() < until;) {
        more = false;
        {
            std::lock_guard<std::mutex> guard(nccl_lock);
            for (const NcclCommunicator* c : nccl_communicators) more |= !c->gone && c->pending > 0;
        }
        if (more) let_others_run();
    }
}

inline bool nccl_all(const NcclCommunicator* c, std::atomic<uint32_t> NcclRank::* mark) {
    for (int p = 0; p < c->world; p++)
        if (c->shared->ranks[p].*mark == 0) return false;
    return true;
}

inline void nccl_settled(NcclCommunicator* c) {
    int expected = ncclInProgress;
    c->state.compare_exchange_strong(expected, ncclSuccess);
}

inline void nccl_run_device(NcclCommunicator* c) {
    double since_ms = 0;
    std::unique_lock<std::mutex> guard(c->mutex);
    while (!c->stopping) {
        guard.unlock();
        nccl_help(c, &since_ms);
        guard.lock();
        if (!c->stopping) c->changed.wait_for(guard, std::chrono::milliseconds(1));
    }
}

inline void nccl_work(NcclCommunicator* c) {
    bool connected = false, linked = false;
    std::unique_lock<std::mutex> guard(c->mutex);
    while (!c->stopping) {
        if (!connected) {
            connected = nccl_all(c, &NcclRank::joined);
            if (connected) {
                unlink(c->file.c_str());
                nccl_settled(c);
            }
        } else if (!c->tasks.empty() && !linked) {
            c->shared->ranks[c->rank].connecting = 1;
            linked = nccl_all(c, &NcclRank::connecting);
        } else if (!c->tasks.empty()) {
            std::vector<NcclTask> tasks = std::move(c->tasks);
            c->tasks.clear();
            cudaStream_t stream = c->stream;
            guard.unlock();
            nccl_launch(c, tasks, stream);
            nccl_settled(c);
            guard.lock();
        } else if (c->shared->ranks[c->rank].finalized) {
            if (nccl_all(c, &NcclRank::finalized)) nccl_settled(c);
        }
        if (!c->stopping && (c->tasks.empty() || !linked)) c->changed.wait_for(guard, std::chrono::milliseconds(1));
    }
}

// Makes the threads end. Only if the communicator was aborted may one be in a collective.
inline void nccl_stop(NcclCommunicator* c) {
    std::lock_guard<std::mutex> guard(c->mutex);
    c->stopping = true;
    c->changed.notify_all();
    unlink(c->file.c_str());  // if it is still there
}

inline void nccl_at_exit(int status, void*) {
    for (NcclCommunicator* c : nccl_communicators) {
        if (!c->gone && status == 0)
            die("leak: a communicator of %d ranks was neither destroyed nor aborted", c->world);
        c->aborted = true;
        nccl_stop(c);
    }
    for (NcclCommunicator* c : nccl_communicators) {
        c->thread.join();
        c->device.join();
    }
}

// Work in streams may still refer to communicators that are gone, so they stay until the end. A thread of one that was
// aborted may wait for one that will be.
struct NcclFreesAll {
    ~NcclFreesAll() {
        for (NcclCommunicator* c : nccl_communicators) delete c;
    }
};
inline NcclFreesAll nccl_frees_all;

// ------------------------------------------------------------------------------------------------
// 4. Checks

inline void nccl_check(const NcclCommunicator* c, const NcclTask& t) {
    const char* name = nccl_names[t.operation];
    size_t bytes = t.count * nccl_type_bytes(t.type), rank = (size_t)c->rank, world = (size_t)c->world;
    size_t send_bytes = t.operation == REDUCE_SCATTER ? world * bytes : bytes;
    size_t receive_bytes = t.operation == ALL_GATHER ? world * bytes : bytes;
    bool sends = t.operation == BROADCAST ? c->rank == t.root : t.operation != RECEIVE;
    bool receives = t.operation == REDUCE ? c->rank == t.root : t.operation != SEND;
    if (sends) check_end("send buffer", t.send, send_bytes, true);
    if (receives) check_end("receive buffer", t.receive, receive_bytes, true);
    if (((uintptr_t)t.send | (uintptr_t)t.receive) % nccl_type_bytes(t.type) != 0)
        die("%s at %s: a buffer is not aligned to its elements", name, text_of(t.place).c_str());
    if (!sends || !receives || t.send >= t.receive + receive_bytes || t.receive >= t.send + send_bytes) return;
    const char* in_place = t.operation == REDUCE_SCATTER ? t.send + rank * bytes : t.send;
    const char* receive = t.operation == ALL_GATHER ? t.receive + rank * bytes : t.receive;
    if (receive == in_place) return;
    die("%s at %s: the buffers overlap, but not as an operation in place has them: %s", name, text_of(t.place).c_str(),
        t.operation == REDUCE_SCATTER ? "receive == send + rank * count"
        : t.operation == ALL_GATHER   ? "send == receive + rank * count"
                                      : "send == receive");
}

// Messages of a group run together, so none may write what another reads or writes.
inline void nccl_check_group(const std::vector<NcclTask>& tasks) {
    if (!nccl_is_message(tasks[0].operation)) return;
    if (tasks.size() > NCCL_CALLS) die("NCCL: a group of %zu messages is not emulated", tasks.size());
    for (const NcclTask& t : tasks) {
        for (const NcclTask& other : tasks) {
            const char* at = other.operation == SEND ? other.send : other.receive;
            if (t.operation != RECEIVE || &t == &other ||
                t.receive >= at + other.count * nccl_type_bytes(other.type) ||
                at >= t.receive + t.count * nccl_type_bytes(t.type)) continue;
            die("ncclRecv at %s: the buffer overlaps that of %s at %s, in one group", text_of(t.place).c_str(),
                nccl_names[other.operation], text_of(other.place).c_str());
        }
    }
}

// The communicator behind a handle, for one call.
struct NcclUse {
    NcclCommunicator* c;
    NcclUse(ncclComm_t handle, const char* call) : c(nullptr) {
        std::lock_guard<std::mutex> guard(nccl_lock);
        for (NcclCommunicator* known : nccl_communicators)
            if ((ncclComm_t)known == handle) c = known;
        if (c == nullptr) die("%s at %s: %p is not a communicator", call, text_of(call_place).c_str(), (void*)handle);
        if (c->gone)
            die("%s at %s: the communicator was destroyed or aborted at %s", call, text_of(call_place).c_str(),
                text_of(c->gone_at).c_str());
        if (c->in_use.exchange(true))
            die("%s at %s: another thread is in a call with the same communicator", call, text_of(call_place).c_str());
    }
    ~NcclUse() { c->in_use = false; }
};

// Tasks between ncclGroupStart and ncclGroupEnd.
struct NcclGroup {
    int depth;
    ncclComm_t comm;
    cudaStream_t stream;
    std::vector<NcclTask> tasks;
};
inline thread_local NcclGroup nccl_group;

// Hands the collected tasks over to the thread.
inline ncclResult_t nccl_submit() {
    NcclGroup group = std::move(nccl_group);
    nccl_group = NcclGroup();
    if (group.tasks.empty()) return ncclSuccess;
    NcclUse use(group.comm, nccl_names[group.tasks[0].operation]);
    use.c->state = ncclInProgress;
    std::lock_guard<std::mutex> guard(use.c->mutex);
    use.c->tasks = std::move(group.tasks);
    use.c->stream = group.stream;
    use.c->changed.notify_all();
    return ncclInProgress;
}

inline ncclResult_t nccl_collective(NcclOperation operation, const void* send, void* receive, size_t count,
                                    ncclDataType_t type, ncclRedOp_t reduction, int root, ncclComm_t comm,
                                    cudaStream_t stream) {
    const char* name = nccl_names[operation];
    {
        NcclUse use(comm, name);
        int state = use.c->state;
        if (nccl_next_result != ncclSuccess) {
            use.c->state = nccl_next_result;
            return nccl_refuse(nccl_next_result, "a test wants it so");
        }
        if (reduction != ncclSum) die("NCCL: reduction %d is not emulated", (int)reduction);
        nccl_type_bytes(type);
        if (state == ncclInProgress)
            return nccl_refuse(ncclInvalidArgument, "the communicator's latest call has not come to an end yet");
        if (state != ncclSuccess) return (ncclResult_t)state;
        if (use.c->finalizing) return nccl_refuse(ncclInvalidUsage, "the communicator was finalized");
        if (root < 0 || root >= use.c->world) return nccl_refuse(ncclInvalidArgument, "there is no such root or peer");
    }
    if (!nccl_group.tasks.empty() && (nccl_group.comm != comm || nccl_group.stream != stream))
        die("NCCL: a group with several communicators or streams is not emulated");
    if (!nccl_group.tasks.empty() && nccl_is_message(nccl_group.tasks[0].operation) != nccl_is_message(operation))
        die("NCCL: a group of messages and collectives is not emulated");
    nccl_group.comm = comm;
    nccl_group.stream = stream;
    if (count > 0)
        nccl_group.tasks.push_back({operation, (const char*)send, (char*)receive, count, type, root, call_place});
    return nccl_group.depth > 0 ? ncclSuccess : nccl_submit();
}

// The common part of ncclCommDestroy and ncclCommAbort. Held work then does nothing.
inline void nccl_end(ncclComm_t comm, const char* call) {
    NcclUse use(comm, call);
    use.c->aborted = true;
    nccl_stop(use.c);
    std::lock_guard<std::mutex> guard(nccl_lock);
    use.c->gone = true;
    use.c->gone_at = call_place;
}

}  // namespace emulator

// ------------------------------------------------------------------------------------------------
// 5. Functions

extern "C" {

inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclSystemError: return "unhandled system error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

inline const char* ncclGetLastError(ncclComm_t) { return emulator::nccl_last_error.c_str(); }

// Makes the file.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count{0};
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/llmtrain-nccl-%ld-%d-%.0f", (long)getpid(), count++,
             1e6 * emulator::milliseconds());
    int file = open(id->internal, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return emulator::nccl_refuse(ncclSystemError, "no file in /dev/shm");
    close(file);
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int world, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
    using namespace emulator;
    static const int registered = on_exit(nccl_at_exit, nullptr);
    (void)registered;
    *out = nullptr;
    if (config == nullptr || config->blocking != 0) die("NCCL: a communicator that blocks is not emulated");
    if (world < 1 || world > NCCL_RANKS || rank < 0 || rank >= world)
        return nccl_refuse(ncclInvalidArgument, "there is no such rank");
    int file = open(id.internal, O_RDWR | O_CLOEXEC);
    if (file < 0) return nccl_refuse(ncclInvalidArgument, "the unique identifier is not one, or was used before");
    bool sized = ftruncate(file, sizeof(NcclShared)) == 0;
    void* memory = sized ? mmap(nullptr, sizeof(NcclShared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (memory == MAP_FAILED) return nccl_refuse(ncclSystemError, "no shared memory");
    NcclCommunicator* c = new NcclCommunicator();
    c->rank = rank;
    c->world = world;
    c->file = id.internal;
    c->shared = (NcclShared*)memory;
    c->state = ncclInProgress;
    run_collectives_ahead = nccl_wait_for_threads;
    int expected = 0;
    if (!c->shared->world.compare_exchange_strong(expected, world) && expected != world)
        die("NCCL: rank %d says that there are %d ranks, another says %d", rank, world, expected);
    if (c->shared->ranks[rank].joined.exchange(1)) die("NCCL: there are two ranks %d", rank);
    std::lock_guard<std::mutex> guard(nccl_lock);
    nccl_communicators.push_back(c);
    c->thread = std::thread(nccl_work, c);
    c->device = std::thread(nccl_run_device, c);
    *out = (ncclComm_t)c;
    return ncclInProgress;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    emulator::NcclUse use(comm, "ncclCommGetAsyncError");
    int found = emulator::nccl_async_result;
    *state = (ncclResult_t)(found != ncclSuccess ? found : use.c->state.load());
    return ncclSuccess;
}

// Finishes when all ranks have called it.
inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    emulator::NcclUse use(comm, "ncclCommFinalize");
    if (use.c->state != ncclSuccess)
        return emulator::nccl_refuse(ncclInvalidArgument, "the communicator is not ready, or has failed");
    std::lock_guard<std::mutex> guard(use.c->mutex);
    if (use.c->finalizing) return emulator::nccl_refuse(ncclInvalidArgument, "the communicator was finalized before");
    if (!use.c->held.empty())
        emulator::die("ncclCommFinalize at %s: a collective waits in its stream; wait for it first",
                      emulator::text_of(emulator::call_place).c_str());
    use.c->finalizing = true;
    use.c->state = ncclInProgress;
    use.c->shared->ranks[use.c->rank].finalized = 1;
    return ncclInProgress;
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    {
        emulator::NcclUse use(comm, "ncclCommDestroy");
        if (!use.c->finalizing || use.c->state != ncclSuccess)
            emulator::die("ncclCommDestroy at %s: first call ncclCommFinalize and wait for its end",
                          emulator::text_of(emulator::call_place).c_str());
    }
    emulator::nccl_end(comm, "ncclCommDestroy");
    return ncclSuccess;
}

// A collective that waits for others gives up, wherever it runs.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    emulator::nccl_end(comm, "ncclCommAbort");
    return ncclSuccess;
}

inline ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                                  ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return emulator::nccl_collective(emulator::ALL_REDUCE, send, receive, count, type, reduction, 0, comm, stream);
}

inline ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                                      ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return emulator::nccl_collective(emulator::REDUCE_SCATTER, send, receive, count, type, reduction, 0, comm, stream);
}

inline ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return emulator::nccl_collective(emulator::ALL_GATHER, send, receive, count, type, ncclSum, 0, comm, stream);
}

inline ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
    return emulator::nccl_collective(emulator::REDUCE, send, receive, count, type, reduction, root, comm, stream);
}

inline ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return emulator::nccl_collective(emulator::BROADCAST, send, receive, count, type, ncclSum, root, comm, stream);
}

inline ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return emulator::nccl_collective(emulator::SEND, send, nullptr, count, type, ncclSum, peer, comm, stream);
}

inline ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return emulator::nccl_collective(emulator::RECEIVE, nullptr, receive, count, type, ncclSum, peer, comm, stream);
}

inline ncclResult_t ncclGroupStart() {
    emulator::nccl_group.depth++;
    return ncclSuccess;
}

inline ncclResult_t ncclGroupEnd() {
    if (emulator::nccl_group.depth == 0) return emulator::nccl_refuse(ncclInvalidUsage, "there is no group to end");
    return --emulator::nccl_group.depth > 0 ? ncclSuccess : emulator::nccl_submit();
}

}  // extern "C"

// Calls record their source position, for reports.
#define ncclAllReduce(...) EMULATOR_CALL(ncclAllReduce(__VA_ARGS__))
#define ncclReduceScatter(...) EMULATOR_CALL(ncclReduceScatter(__VA_ARGS__))
#define ncclAllGather(...) EMULATOR_CALL(ncclAllGather(__VA_ARGS__))
#define ncclReduce(...) EMULATOR_CALL(ncclReduce(__VA_ARGS__))
#define ncclBroadcast(...) EMULATOR_CALL(ncclBroadcast(__VA_ARGS__))
#define ncclSend(...) EMULATOR_CALL(ncclSend(__VA_ARGS__))
#define ncclRecv(...) EMULATOR_CALL(ncclRecv(__VA_ARGS__))
#define ncclCommFinalize(...) EMULATOR_CALL(ncclCommFinalize(__VA_ARGS__))
#define ncclCommDestroy(...) EMULATOR_CALL(ncclCommDestroy(__VA_ARGS__))
#define ncclCommAbort(...) EMULATOR_CALL(ncclCommAbort(__VA_ARGS__))
#define ncclCommGetAsyncError(...) EMULATOR_CALL(ncclCommGetAsyncError(__VA_ARGS__))

#endif  // EMULATOR_NCCL_H
