// offload.h: memory that does not fit, kept in pieces elsewhere: in a file, or beside a GPU in memory of the host.
//
//   1. store     the pieces, the slots of memory that hold some of them, and what moved
//   2. opening   the plan, the file, the thread
//   3. thread    reads ahead and writes behind
//   4. use       take a piece, ask for the next, give it back; read a part of one
//
// The caller works on one piece at a time while a thread reads the next one and writes the one before. With three slots
// of the largest piece's size in memory, a pass over all pieces takes the time of the work or of the copies, whichever
// is longer; with two, a pass that only reads, or only writes.
//
//   ok = offload_plan(&store, "optimizer state", 3, count, &error);       a store of `count` pieces, in three slots
//   for (p) offload_size(&store, p, bytes);                               in order
//   store.slots = plan_take(plan, "offload buffers", offload_memory(&store));
//   ok = offload_open(&store, "/disk", rank, local_rank, stream, &error);     pieces are zero
//   for (p) {
//       data = offload_take(&store, p, false, &error);
//       offload_ahead(&store, p + 1);
//       ...
//       offload_give(&store, p, true);
//   }
//
// The file has no name: it is unlinked as soon as it is open, and gone when the process ends in whatever way. Its room
// is reserved at the start, so that a full disk is found before the first step. A store that has failed stays failed,
// and offload_take says why. It is no checkpoint: what must outlive the process is saved elsewhere. Nobody checks that
// the disk returns the bytes that it was given.
//
// One thread of the caller uses a store.

#ifndef LLMTRAIN_OFFLOAD_H
#define LLMTRAIN_OFFLOAD_H

#include "fault.h"
#include "files.h"
#ifdef LLMTRAIN_CUDA
#include "device.cuh"
#else
#include "device_cpu.h"
#endif

#include <pthread.h>

// ------------------------------------------------------------------------------------------------
// 1. Store

// What a run keeps in stores, as bits: the order of the choices of --offload.
enum { OFFLOAD_NOTHING = 0, OFFLOAD_OPTIMIZER = 1, OFFLOAD_ACTIVATIONS = 2, OFFLOAD_BOTH = 3 };
#define OFFLOAD_CHOICES "none|optimizer|activations|optimizer,activations"

enum { OFFLOAD_SLOTS = 3 };  // at most: a piece in work, the next one being read, the one before being written

#define OFFLOAD_NONE SIZE_MAX

typedef struct {
    char* memory;    // (slot_bytes) where the caller works, on the device
    char* staging;   // (slot_bytes) of the host, between device and file; `memory` itself where the device is the host
    size_t piece;    // that it holds; OFFLOAD_NONE: none
    bool taken;      // the caller works on it
    bool changed;    // it is to be written
    bool busy;       // the thread reads or writes it
    uint64_t used;   // when it was taken or read last: the least recent one is used again
    DeviceMark given;  // the caller's work on it is done
} OffloadSlot;

// What moved since the store was opened, and how long that took.
typedef struct {
    uint64_t read, written;               // bytes
    double read_ms, written_ms;           // of the thread
    double waited_ms;                     // of the caller
} OffloadCounts;

typedef struct {
    const char* what;        // "optimizer state"
    size_t* offsets;         // (count + 1) where each piece begins in the file or in `host`: multiples of DISK_ALIGN
    size_t count, planned;   // pieces, and of these those that have a size
    size_t largest;          // bytes of the largest piece
    size_t slot_count;
    char* slots;             // (offload_memory) of them, set before offload_open
    char directory[FILE_PATH_MAX];  // empty: pieces are in memory of the host
    int file;                // -1: there is none
    bool bypasses_cache;
    char *host, *staging;    // memory of the host: all pieces; a slot each
    size_t local_rank;       // chooses the device of the thread
    Stream compute, copies;  // the caller's stream; the thread's
    OffloadSlot slot[OFFLOAD_SLOTS];
    size_t wanted;           // the piece to be read next
    uint64_t clock;
    bool open, ending, failed;
    Error error;             // if it has failed
    OffloadCounts counts;
    pthread_t thread;
    pthread_mutex_t lock;    // of all members above that change
    pthread_cond_t work, done;
} Offload;

static inline size_t offload_bytes(const Offload* o, size_t piece) {
    return o->offsets[piece + 1] - o->offsets[piece];
}

static inline size_t offload_total(const Offload* o) { return o->planned ? o->offsets[o->planned] : 0; }

// ------------------------------------------------------------------------------------------------
// 2. Opening

// A store of `count` pieces, whose sizes offload_size sets, in order. Allocates only the table of them.
static inline bool offload_plan(Offload* o, const char* what, size_t slots, size_t count, Error* error) {
    memset(o, 0, sizeof *o);
    o->what = what;
    o->slot_count = slots;
    o->count = count;
    o->file = -1;
    o->offsets = (size_t*)allocate((count + 1) * sizeof(size_t));
    return o->offsets != NULL || fail(error, "out of memory for the table of %zu pieces of the %s", count, what);
}

static inline void offload_size(Offload* o, size_t piece, size_t bytes) {
    size_t rounded = round_up(max_size(bytes, 1), DISK_ALIGN);
    o->offsets[piece + 1] = o->offsets[piece] + rounded;
    o->planned = piece + 1;
    o->largest = max_size(o->largest, rounded);
}

// Memory that the caller provides in `slots`: on the device, on any boundary.
static inline size_t offload_memory(const Offload* o) {
    return o->largest ? o->slot_count * o->largest + DISK_ALIGN : 0;
}

static inline char* offload_aligned(char* memory) {
    return memory + (DISK_ALIGN - (uintptr_t)memory % DISK_ALIGN) % DISK_ALIGN;
}

// fail_file for the store.
static inline bool offload_fail(const Offload* o, const char* action, Error* error) {
    char text[160];
    snprintf(text, sizeof text, "%s the %s (--offload) in", action, o->what);
    return fail_file(error, text, o->directory);
}

// A file without a name in the store's directory, with room for all pieces.
static inline bool offload_open_file(Offload* o, size_t rank, Error* error) {
    char path[FILE_PATH_MAX + 64], action[64];
    size_t total = offload_total(o);
    for (int attempt = 0; o->file < 0; attempt++) {  // the name may be left over from a process that was killed here
        snprintf(path, sizeof path, "%s/offload-%zu-%ld-%d.tmp", o->directory, rank, (long)getpid(), attempt);
        o->file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (o->file < 0 && (errno != EEXIST || attempt == 1000)) return offload_fail(o, "make a file for", error);
    }
    if (unlink(path) != 0) return offload_fail(o, "unlink the file for", error);
    fault_point("reserve");
    errno = disk_reserve(o->file, total);
    snprintf(action, sizeof action, "reserve %.3f GB for", 1e-9 * (double)total);
    if (errno != 0) return offload_fail(o, action, error);
    o->bypasses_cache = disk_bypass_cache(o->file);
    return true;
}

static inline void* offload_run(void* argument);

// Makes room for what was planned, in a directory (NULL: in memory of the host); all pieces are zero. offload_close is
// due in any case.
static inline bool offload_open(Offload* o, const char* directory, size_t rank, size_t local_rank, Stream compute,
                                Error* error) {
    size_t total = offload_total(o);
    o->compute = compute;
    o->local_rank = local_rank;
    o->wanted = OFFLOAD_NONE;
    if (directory && !path_copy(o->directory, directory, error)) return false;
    if (directory && !offload_open_file(o, rank, error)) return false;
    if (directory == NULL) {
        o->host = (char*)host_allocate(max_size(total, 1));
        if (o->host == NULL)
            return fail(error, "cannot take %.3f GB of the host's memory for the %s; give --offload-dir, or a smaller "
                        "model", 1e-9 * (double)total, o->what);
        memset(o->host, 0, total);
    }
    if (directory && !device_is_host()) {
        o->staging = (char*)host_allocate(offload_memory(o));
        if (o->staging == NULL)
            return fail(error, "cannot take %.3f GB of the host's memory between the GPU and the disk",
                        1e-9 * (double)offload_memory(o));
    }
    for (size_t i = 0; i < o->slot_count; i++) {
        o->slot[i].memory = offload_aligned(o->slots) + i * o->largest;
        o->slot[i].staging = o->staging ? offload_aligned(o->staging) + i * o->largest : o->slot[i].memory;
        o->slot[i].piece = OFFLOAD_NONE;
        device_mark_open(&o->slot[i].given);
    }
    if (!device_is_host() && !device_open(&o->copies, false, error)) return false;
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->work, NULL);
    pthread_cond_init(&o->done, NULL);
    o->open = pthread_create(&o->thread, NULL, offload_run, o) == 0;
    return o->open ||
           fail(error, "cannot start a thread for the %s; raise the limit on processes (ulimit -u)", o->what);
}

static inline void offload_close(Offload* o) {
    if (o->open) {
        pthread_mutex_lock(&o->lock);
        o->ending = true;
        pthread_cond_signal(&o->work);
        pthread_mutex_unlock(&o->lock);
        pthread_join(o->thread, NULL);
        pthread_mutex_destroy(&o->lock);
        pthread_cond_destroy(&o->work);
        pthread_cond_destroy(&o->done);
    }
    for (size_t i = 0; i < o->slot_count && o->slot[i].memory; i++) device_mark_close(&o->slot[i].given);
    if (o->offsets && o->file >= 0) close(o->file);
    if (o->copies) device_close(o->copies);
    host_free(o->host);
    host_free(o->staging);
    free(o->offsets);
    memset(o, 0, sizeof *o);
}

// ------------------------------------------------------------------------------------------------
// 3. Thread
//
// What changed is written first, since that makes room for what is wanted. The lock is not held during a copy.

// Moves bytes between the file, from `at` on, and memory of the host; both on multiples of DISK_ALIGN.
static inline bool offload_transfer(Offload* o, char* memory, size_t at, size_t bytes, bool writes, Error* error) {
    for (size_t done = 0; done < bytes;) {
        bool faulty = fault_point(writes ? "offload_write" : "offload_read");
        char* data = memory + done;
        ssize_t n = writes ? pwrite(o->file, data, bytes - done, (off_t)(at + done))
                           : pread(o->file, data, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0 || faulty) errno = EIO;
        if (n <= 0 || faulty) return offload_fail(o, writes ? "write" : "read", error);
        done += (size_t)n;
    }
    return o->bypasses_cache || disk_forget(o->file, at, bytes, writes) || offload_fail(o, "flush", error);
}

static inline bool offload_copy(Offload* o, OffloadSlot* slot, bool writes, Error* error) {
    size_t bytes = offload_bytes(o, slot->piece);
    char* host = o->host ? o->host + o->offsets[slot->piece] : slot->staging;
    bool moves = host != slot->memory;
    device_mark_wait(&slot->given);
    if (writes && moves) download(host, slot->memory, bytes, o->copies);
    if (o->host) fault_point(writes ? "offload_write" : "offload_read");
    else if (!offload_transfer(o, host, o->offsets[slot->piece], bytes, writes, error)) return false;
    if (!writes && moves) upload(slot->memory, host, bytes, o->copies);
    return true;
}

static inline OffloadSlot* offload_find(Offload* o, size_t piece) {
    for (size_t i = 0; i < o->slot_count; i++)
        if (o->slot[i].piece == piece) return &o->slot[i];
    return NULL;
}

// A slot that may be used for another piece; NULL if there is none now.
static inline OffloadSlot* offload_free_slot(Offload* o) {
    OffloadSlot* best = NULL;
    for (size_t i = 0; i < o->slot_count; i++) {
        OffloadSlot* s = &o->slot[i];
        if (!s->taken && !s->changed && !s->busy && (best == NULL || s->used < best->used)) best = s;
    }
    return best;
}

// The next thing to do, with the lock held; NULL if there is nothing.
static inline OffloadSlot* offload_next(Offload* o) {
    for (size_t i = 0; i < o->slot_count; i++)
        if (o->slot[i].changed && !o->slot[i].taken) return &o->slot[i];
    if (o->wanted != OFFLOAD_NONE && offload_find(o, o->wanted)) o->wanted = OFFLOAD_NONE;
    OffloadSlot* slot = o->wanted == OFFLOAD_NONE ? NULL : offload_free_slot(o);
    if (slot == NULL) return NULL;
    slot->piece = o->wanted;
    o->wanted = OFFLOAD_NONE;
    return slot;
}

static inline void* offload_run(void* argument) {
    Offload* o = (Offload*)argument;
    Error error;
    threads_set(1);
    bool ok = device_choose(o->local_rank, &error);
    pthread_mutex_lock(&o->lock);
    while (ok && !o->ending) {
        OffloadSlot* slot = offload_next(o);
        if (slot == NULL) {
            pthread_cond_wait(&o->work, &o->lock);
            continue;
        }
        bool writes = slot->changed;
        slot->busy = true;
        slot->changed = false;
        pthread_mutex_unlock(&o->lock);
        double began = now_ms();
        ok = offload_copy(o, slot, writes, &error);
        double ms = now_ms() - began;
        pthread_mutex_lock(&o->lock);
        *(writes ? &o->counts.written : &o->counts.read) += offload_bytes(o, slot->piece);
        *(writes ? &o->counts.written_ms : &o->counts.read_ms) += ms;
        slot->busy = false;
        if (!writes) slot->used = ++o->clock;
        pthread_cond_broadcast(&o->done);
    }
    if (!ok) {
        o->failed = true;
        o->error = error;
        pthread_cond_broadcast(&o->done);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 4. Use

// Begins to read a piece, which is taken soon; one beyond the last is none.
static inline void offload_ahead(Offload* o, size_t piece) {
    pthread_mutex_lock(&o->lock);
    o->wanted = piece < o->planned ? piece : OFFLOAD_NONE;
    pthread_cond_signal(&o->work);
    pthread_mutex_unlock(&o->lock);
}

// Waits with the lock held; how long counts.
static inline void offload_wait(Offload* o) {
    double began = now_ms();
    pthread_cond_wait(&o->done, &o->lock);
    o->counts.waited_ms += now_ms() - began;
}

// The memory of a piece, on the device; NULL if the store has failed. `fresh`: whatever it held does not matter, so it
// is not read, and it may be one without a size, which is given back unchanged. At most slot_count pieces are taken at
// a time, and one less while others are read or written.
static inline void* offload_take(Offload* o, size_t piece, bool fresh, Error* error) {
    OffloadSlot* slot = NULL;
    pthread_mutex_lock(&o->lock);
    while (!o->failed && slot == NULL) {
        slot = offload_find(o, piece);
        if (slot && slot->busy) slot = NULL;
        else if (slot == NULL && fresh) slot = offload_free_slot(o);
        if (slot == NULL && !fresh) {
            o->wanted = piece;
            pthread_cond_signal(&o->work);
        }
        if (slot == NULL) offload_wait(o);
    }
    if (o->failed) *error = o->error;
    else {
        slot->piece = piece;
        slot->taken = true;
        slot->used = ++o->clock;
    }
    bool failed = o->failed;
    pthread_mutex_unlock(&o->lock);
    return failed ? NULL : slot->memory;
}

// The caller is done with a piece that it has taken, once its stream has come here. changed: it is to be written. Does
// nothing if offload_take has returned NULL.
static inline void offload_give(Offload* o, size_t piece, bool changed) {
    pthread_mutex_lock(&o->lock);
    OffloadSlot* slot = offload_find(o, piece);
    if (slot && slot->taken) {
        device_mark_set(&slot->given, o->compute);
        slot->taken = false;
        slot->changed |= changed;
        pthread_cond_signal(&o->work);
    }
    pthread_mutex_unlock(&o->lock);
}

// Whether the store has not failed so far.
static inline bool offload_check(Offload* o, Error* error) {
    if (!o->open) return true;
    pthread_mutex_lock(&o->lock);
    bool good = !o->failed;
    if (!good) *error = o->error;
    pthread_mutex_unlock(&o->lock);
    return good;
}

// Waits until everything is written; false if the store has failed.
static inline bool offload_flush(Offload* o, Error* error) {
    bool busy = true;
    pthread_mutex_lock(&o->lock);
    while (!o->failed && busy) {
        busy = false;
        for (size_t i = 0; i < o->slot_count; i++) busy |= o->slot[i].changed || o->slot[i].busy;
        if (busy) offload_wait(o);
    }
    pthread_mutex_unlock(&o->lock);
    return offload_check(o, error);
}

// Copies `bytes` of a piece from `at` on to memory of the host, by way of a slot. Nothing is taken, and offload_flush
// has been called since the last piece was given back.
static inline bool offload_read(Offload* o, void* to, size_t piece, size_t at, size_t bytes, Error* error) {
    size_t from = o->offsets[piece] + at;
    if (o->host) {
        memcpy(to, o->host + from, bytes);
        return true;
    }
    pthread_mutex_lock(&o->lock);
    OffloadSlot* slot = offload_free_slot(o);  // there is one: the thread may be reading into another
    slot->piece = OFFLOAD_NONE;
    slot->taken = true;
    pthread_mutex_unlock(&o->lock);
    bool ok = true;
    for (size_t done = 0; ok && done < bytes;) {
        size_t before = (from + done) % DISK_ALIGN, n = min_size(bytes - done, o->largest - before);
        ok = offload_transfer(o, slot->staging, from + done - before, round_up(before + n, DISK_ALIGN), false, error);
        if (ok) memcpy((char*)to + done, slot->staging + before, n);
        done += n;
    }
    pthread_mutex_lock(&o->lock);
    slot->taken = false;
    pthread_cond_signal(&o->work);
    pthread_mutex_unlock(&o->lock);
    return ok;
}

static inline OffloadCounts offload_counts(Offload* o) {
    if (!o->open) return o->counts;
    pthread_mutex_lock(&o->lock);
    OffloadCounts counts = o->counts;
    pthread_mutex_unlock(&o->lock);
    return counts;
}

#endif  // LLMTRAIN_OFFLOAD_H
