// offload.h: arrays that do not fit in memory, kept in pieces elsewhere: in a file, or for a GPU also in host memory.
//
//   1. store     the pieces, the memory slots that hold some of them, and counts of the bytes moved
//   2. checksums of what is in the file
//   3. opening   the plan, the file, the threads
//   4. threads   two read ahead, two write behind
//   5. use       take a piece, ask for the next, give it back; read a part of one
//
// The caller works on one piece at a time while two threads read the next ones and two write the previous ones: the
// disk stays busy even while a thread computes a checksum. With six slots of the largest piece's size in memory, a pass
// over all pieces takes the time of the work or of the copies, whichever is longer; with two slots, that holds for a
// pass that only reads or only writes.
//
//   ok = offload_plan(&store, "optimizer state", 6, count, &error);       a store of `count` pieces, in six slots
//   for (p) offload_size(&store, p, bytes);                               in order
//   store.slots = arena_take(plan, "offload buffers", offload_memory(&store));
//   ok = offload_open(&store, "/disk", rank, local_rank, stream, &error);     pieces are zero
//   for (p) {
//       data = offload_take(&store, p, false, &error);
//       offload_ahead(&store, p + 1, 3);
//       ...
//       offload_give(&store, p, true);
//   }
//
// The file has no name: it is unlinked as soon as it is open, and is gone when the process ends, however it ends. Its
// space is reserved at the start, so that a full disk is found before the first step. A store that has failed stays
// failed, and offload_take says why. A store is not a checkpoint: what must outlive the process is saved elsewhere.
//
// A checksum of each 64 KiB of the file is kept in memory. A disk that returns bytes that were not written has failed.
//
// Only one thread of the caller may use a store.

#ifndef LLMTRAIN_OFFLOAD_H
#define LLMTRAIN_OFFLOAD_H

#include "../base/fault.h"
#include "../base/files.h"
#ifdef LLMTRAIN_CUDA
#include "../base/device.cuh"
#else
#include "../base/device_cpu.h"
#endif

#include <pthread.h>

// ------------------------------------------------------------------------------------------------
// 1. Store

// What a run keeps in stores, as bits, in the order of the choices of --offload.
enum { OFFLOAD_NOTHING = 0, OFFLOAD_OPTIMIZER = 1, OFFLOAD_ACTIVATIONS = 2, OFFLOAD_BOTH = 3 };
#define OFFLOAD_CHOICES "none|optimizer|activations|optimizer,activations"

enum {
    OFFLOAD_THREADS = 4,
    OFFLOAD_AHEAD = 3,  // pieces that are read before they are taken
    OFFLOAD_SLOTS = 6   // at most: a piece in use, one that was read, two being read, two being written
};

#define OFFLOAD_NONE SIZE_MAX
#define OFFLOAD_BLOCK LLMTRAIN_PIECE((size_t)64 << 10, (size_t)4 << 10)  // bytes per checksum

typedef struct {
    char* memory;    // (largest) where the caller works, on the device
    char* staging;   // (largest) on the host, between device and file; `memory` itself where the device is the host
    size_t piece;    // the one that it holds; OFFLOAD_NONE: none
    bool taken;      // the caller works on it
    bool changed;    // it is to be written
    bool busy;       // a thread reads or writes it
    uint64_t used;   // when it was last taken or read: the least recently used slot is reused
    DeviceMark given;  // the caller's work on it is done
} OffloadSlot;

// The bytes moved since the store was opened, and how long that took.
typedef struct {
    uint64_t read, written;               // bytes
    double read_ms, written_ms;           // by the threads, including checksums
    double waited_ms;                     // by the caller
} OffloadCounts;

typedef struct Offload Offload;

typedef struct {
    Offload* store;
    bool writes;     // otherwise it reads
    bool running;
    Stream copies;
    pthread_t thread;
} OffloadThread;

struct Offload {
    const char* what;        // "optimizer state"
    size_t* offsets;         // (count + 1) where each piece begins in the file or in `host`: multiples of DISK_ALIGN
    size_t count, planned;   // pieces; how many of them have a size so far
    size_t largest;          // bytes of the largest piece
    size_t slot_count;
    char* slots;             // (offload_memory) their memory, set before offload_open
    char directory[FILE_PATH_MAX];  // empty: pieces are in host memory
    int file;                // -1: there is none
    bool bypasses_cache;
    uint64_t* sums;          // of each block of each piece (offload_sum); NULL: there is no file
    char *host, *staging;    // host memory: all pieces; staging of all slots
    size_t local_rank;       // chooses the device of the threads
    Stream compute;          // the caller's
    OffloadSlot slot[OFFLOAD_SLOTS];
    size_t wanted[OFFLOAD_AHEAD];  // the pieces to be read next, the first one first
    uint64_t clock;
    bool open, ending, failed;
    Error error;             // if it has failed
    OffloadCounts counts;
    OffloadThread threads[OFFLOAD_THREADS];
    pthread_mutex_t lock;    // guards all members above that change
    pthread_cond_t work, done;
};

static inline size_t offload_bytes(const Offload* o, size_t piece) {
    return o->offsets[piece + 1] - o->offsets[piece];
}

static inline size_t offload_total(const Offload* o) { return o->planned ? o->offsets[o->planned] : 0; }

// ------------------------------------------------------------------------------------------------
// 2. Checksums
//
// The thread that writes a piece computes its blocks' checksums first; the thread that reads it checks them afterwards.

// The checksum of the block at a multiple of OFFLOAD_BLOCK in a piece. The last block of a piece may be shorter.
static inline uint64_t* offload_sum(const Offload* o, size_t piece, size_t at) {
    return o->sums + o->offsets[piece] / OFFLOAD_BLOCK + piece + at / OFFLOAD_BLOCK;
}

// Sets the checksums to those of a file of zeros.
static inline bool offload_open_sums(Offload* o, Error* error) {
    static const char zeros[OFFLOAD_BLOCK] = {0};
    const uint64_t full = hash_bytes(zeros, OFFLOAD_BLOCK);
    o->sums = (uint64_t*)memory_allocate((offload_total(o) / OFFLOAD_BLOCK + o->planned + 1) * sizeof(uint64_t));
    if (o->sums == NULL) return fail_with(error, "out of memory for the checksums of the %s", o->what);
    for (size_t p = 0; p < o->planned; p++) {
        for (size_t at = 0, left; at < offload_bytes(o, p); at += OFFLOAD_BLOCK) {
            left = offload_bytes(o, p) - at;
            *offload_sum(o, p, at) = left < OFFLOAD_BLOCK ? hash_bytes(zeros, left) : full;
        }
    }
    return true;
}

// Computes the checksums of `bytes` bytes of a piece, from the block at `at` on, before they are written; or compares
// them after they were read.
static inline bool offload_checksums(Offload* o, char* data, size_t piece, size_t at, size_t bytes, bool writes,
                                     Error* error) {
    if (!writes && fault_point("offload_damage")) data[bytes / 2] ^= 1;
    for (size_t done = 0, n; done < bytes; done += n) {
        n = min_size(bytes - done, OFFLOAD_BLOCK);
        uint64_t sum = hash_bytes(data + done, n), *known = offload_sum(o, piece, at + done);
        if (writes) *known = sum;
        else if (sum != *known)
            return fail_with(error, "the %s (--offload) in %.600s does not match its checksum: some of the %zu bytes "
                             "at %zu are not what was written there; check that disk, and start again with --resume "
                             "and another --offload-dir", o->what, o->directory, n, o->offsets[piece] + at + done);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Opening

// A store of `count` pieces, whose sizes offload_size sets, in order. Allocates only the table of them.
static inline bool offload_plan(Offload* o, const char* what, size_t slots, size_t count, Error* error) {
    memset(o, 0, sizeof *o);
    o->what = what;
    o->slot_count = slots;
    o->count = count;
    o->file = -1;
    o->offsets = (size_t*)memory_allocate((count + 1) * sizeof(size_t));
    return o->offsets != NULL || fail_with(error, "out of memory for the table of %zu pieces of the %s", count, what);
}

static inline void offload_size(Offload* o, size_t piece, size_t bytes) {
    size_t rounded = round_up(max_size(bytes, 1), DISK_ALIGN);
    o->offsets[piece + 1] = o->offsets[piece] + rounded;
    o->planned = piece + 1;
    o->largest = max_size(o->largest, rounded);
}

// Bytes of device memory that the caller provides in `slots`, with any alignment.
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

// Makes the unnamed file in the store's directory, with space for all pieces.
static inline bool offload_open_file(Offload* o, size_t rank, Error* error) {
    char path[FILE_PATH_MAX + 64], action[64];
    for (int attempt = 0; o->file < 0; attempt++) {  // the name may be left over from a process that was killed here
        snprintf(path, sizeof path, "%s/offload-%zu-%ld-%d.tmp", o->directory, rank, (long)getpid(), attempt);
        o->file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (o->file < 0 && (errno != EEXIST || attempt == 1000)) return offload_fail(o, "make a file for", error);
    }
    if (unlink(path) != 0) return offload_fail(o, "unlink the file for", error);
    fault_point("reserve");
    errno = disk_reserve(o->file, offload_total(o));
    snprintf(action, sizeof action, "reserve %.3f GB for", 1e-9 * (double)offload_total(o));
    if (errno != 0) return offload_fail(o, action, error);
    o->bypasses_cache = disk_bypass_cache(o->file);
    return true;
}

static inline void* offload_run(void* argument);

// Reserves space for all pieces, in a directory (NULL: in host memory); they start as zeros. Call offload_close even
// after a failure.
static inline bool offload_open(Offload* o, const char* directory, size_t rank, size_t local_rank, Stream compute,
                                Error* error) {
    size_t total = offload_total(o);
    o->compute = compute;
    o->local_rank = local_rank;
    for (size_t i = 0; i < OFFLOAD_AHEAD; i++) o->wanted[i] = OFFLOAD_NONE;
    if (directory && !path_copy(o->directory, directory, error)) return false;
    if (directory && (!offload_open_file(o, rank, error) || !offload_open_sums(o, error))) return false;
    if (directory == NULL) {
        o->host = (char*)host_allocate(max_size(total, 1));
        if (o->host == NULL)
            return fail_with(error, "cannot allocate %.3f GB of host memory for the %s; give --offload-dir, or a "
                             "smaller model", 1e-9 * (double)total, o->what);
        memset(o->host, 0, total);
    }
    if (directory && !device_is_host()) {
        o->staging = (char*)host_allocate(offload_memory(o));
        if (o->staging == NULL)
            return fail_with(error, "cannot allocate %.3f GB of host memory for transfers between the GPU and the disk",
                             1e-9 * (double)offload_memory(o));
    }
    for (size_t i = 0; i < o->slot_count; i++) {
        o->slot[i].memory = offload_aligned(o->slots) + i * o->largest;
        o->slot[i].staging = o->staging ? offload_aligned(o->staging) + i * o->largest : o->slot[i].memory;
        o->slot[i].piece = OFFLOAD_NONE;
        device_mark_open(&o->slot[i].given);
    }
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->work, NULL);
    pthread_cond_init(&o->done, NULL);
    o->open = true;
    for (size_t i = 0; i < OFFLOAD_THREADS; i++) {
        OffloadThread* t = &o->threads[i];
        t->store = o;
        t->writes = i % 2 == 1;
        if (!device_is_host() && !device_open(&t->copies, false, error)) return false;
        t->running = pthread_create(&t->thread, NULL, offload_run, t) == 0;
        if (!t->running)
            return fail_with(error, "cannot start a thread for the %s; raise the limit on processes (ulimit -u)",
                             o->what);
    }
    return true;
}

static inline void offload_close(Offload* o) {
    if (o->open) {
        pthread_mutex_lock(&o->lock);
        o->ending = true;
        pthread_cond_broadcast(&o->work);
        pthread_mutex_unlock(&o->lock);
        for (size_t i = 0; i < OFFLOAD_THREADS; i++) {
            if (o->threads[i].running) pthread_join(o->threads[i].thread, NULL);
            if (o->threads[i].copies) device_close(o->threads[i].copies);
        }
        pthread_mutex_destroy(&o->lock);
        pthread_cond_destroy(&o->work);
        pthread_cond_destroy(&o->done);
    }
    for (size_t i = 0; i < o->slot_count && o->slot[i].memory; i++) device_mark_close(&o->slot[i].given);
    if (o->offsets && o->file >= 0) close(o->file);
    host_free(o->host);
    host_free(o->staging);
    free(o->sums);
    free(o->offsets);
    memset(o, 0, sizeof *o);
}

// ------------------------------------------------------------------------------------------------
// 4. Threads
//
// A thread either reads or writes, so that the disk does both at the same time. The lock is not held during a copy.

// Moves bytes between the file, from `at` on, and host memory; both are aligned to DISK_ALIGN.
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

// Reads or writes `bytes` bytes of a piece, from the block at `at` on, with their checksums.
static inline bool offload_move(Offload* o, char* memory, size_t piece, size_t at, size_t bytes, bool writes,
                                Error* error) {
    return (!writes || offload_checksums(o, memory, piece, at, bytes, true, error)) &&
           offload_transfer(o, memory, o->offsets[piece] + at, bytes, writes, error) &&
           (writes || offload_checksums(o, memory, piece, at, bytes, false, error));
}

static inline bool offload_copy(Offload* o, OffloadSlot* slot, bool writes, Stream copies, Error* error) {
    size_t bytes = offload_bytes(o, slot->piece);
    char* host = o->host ? o->host + o->offsets[slot->piece] : slot->staging;
    bool moves = host != slot->memory;
    device_mark_wait(&slot->given);
    if (writes && moves) device_download(host, slot->memory, bytes, copies);
    if (o->host) fault_point(writes ? "offload_write" : "offload_read");
    else if (!offload_move(o, host, slot->piece, 0, bytes, writes, error)) return false;
    if (!writes && moves) device_upload(slot->memory, host, bytes, copies);
    return true;
}

static inline OffloadSlot* offload_find(Offload* o, size_t piece) {
    for (size_t i = 0; i < o->slot_count; i++)
        if (o->slot[i].piece == piece) return &o->slot[i];
    return NULL;
}

// A slot that may be reused: idle, written, and without one of the first `kept` wanted pieces; NULL if there is none.
static inline OffloadSlot* offload_free_slot(Offload* o, size_t kept) {
    OffloadSlot* best = NULL;
    for (size_t i = 0; i < o->slot_count; i++) {
        OffloadSlot* s = &o->slot[i];
        bool usable = !s->taken && !s->changed && !s->busy;
        for (size_t w = 0; w < kept; w++) usable &= s->piece == OFFLOAD_NONE || s->piece != o->wanted[w];
        if (usable && (best == NULL || s->used < best->used)) best = s;
    }
    return best;
}

// The slot of the next piece to write, or to read, with the lock held; NULL if there is nothing to do.
static inline OffloadSlot* offload_next(Offload* o, bool writes) {
    for (size_t i = 0; writes && i < o->slot_count; i++)
        if (o->slot[i].changed && !o->slot[i].taken) return &o->slot[i];
    for (size_t w = 0; !writes && w < OFFLOAD_AHEAD; w++) {
        if (o->wanted[w] == OFFLOAD_NONE || offload_find(o, o->wanted[w])) continue;
        OffloadSlot* slot = offload_free_slot(o, w);
        if (slot) slot->piece = o->wanted[w];
        return slot;
    }
    return NULL;
}

static inline void offload_end(Offload* o, const Error* error) {
    if (!o->failed) o->error = *error;
    o->failed = true;
    pthread_cond_broadcast(&o->work);
    pthread_cond_broadcast(&o->done);
}

static inline void* offload_run(void* argument) {
    const OffloadThread* t = (const OffloadThread*)argument;
    Offload* o = t->store;
    Error error;
    threads_set(1);
    bool ok = device_choose(o->local_rank, &error);
    pthread_mutex_lock(&o->lock);
    while (ok && !o->ending && !o->failed) {
        OffloadSlot* slot = offload_next(o, t->writes);
        if (slot == NULL) {
            pthread_cond_wait(&o->work, &o->lock);
            continue;
        }
        slot->busy = true;
        slot->changed = false;
        pthread_mutex_unlock(&o->lock);
        double began = now_ms();
        ok = offload_copy(o, slot, t->writes, t->copies, &error);
        double ms = now_ms() - began;
        pthread_mutex_lock(&o->lock);
        *(t->writes ? &o->counts.written : &o->counts.read) += offload_bytes(o, slot->piece);
        *(t->writes ? &o->counts.written_ms : &o->counts.read_ms) += ms;
        slot->busy = false;
        if (!t->writes) slot->used = ++o->clock;
        pthread_cond_broadcast(&o->done);
        pthread_cond_broadcast(&o->work);  // a thread may have waited for the slot
    }
    if (!ok) offload_end(o, &error);
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 5. Use

// offload_ahead with the lock held.
static inline void offload_want(Offload* o, size_t piece, size_t count) {
    for (size_t w = 0; w < OFFLOAD_AHEAD; w++)
        o->wanted[w] = w < count && piece < o->planned - min_size(w, o->planned) ? piece + w : OFFLOAD_NONE;
    pthread_cond_broadcast(&o->work);
}

// Begins to read the `count` pieces from `piece` on, at most OFFLOAD_AHEAD, which are taken next; stops at the last.
static inline void offload_ahead(Offload* o, size_t piece, size_t count) {
    pthread_mutex_lock(&o->lock);
    offload_want(o, piece, count);
    pthread_mutex_unlock(&o->lock);
}

// Waits, with the lock held, and counts the time.
static inline void offload_wait(Offload* o) {
    double began = now_ms();
    pthread_cond_wait(&o->done, &o->lock);
    o->counts.waited_ms += now_ms() - began;
}

// The memory of a piece, on the device; NULL if the store has failed. `fresh`: its contents do not matter, so it is
// not read; it may then be a piece without a size, which must be given back unchanged. At most slot_count pieces may
// be taken at a time, one fewer while others are read or written.
static inline void* offload_take(Offload* o, size_t piece, bool fresh, Error* error) {
    OffloadSlot* slot = NULL;
    pthread_mutex_lock(&o->lock);
    while (!o->failed && slot == NULL) {
        slot = offload_find(o, piece);
        if (slot == NULL && fresh) slot = offload_free_slot(o, 0);
        if (slot == NULL && !fresh && o->wanted[0] != piece) offload_want(o, piece, 1);
        if (slot && slot->busy) slot = NULL;
        if (slot == NULL) offload_wait(o);
    }
    if (o->failed) {
        *error = o->error;
        slot = NULL;
    } else {
        for (size_t w = 0; w < OFFLOAD_AHEAD; w++)
            if (o->wanted[w] == piece) o->wanted[w] = OFFLOAD_NONE;
        slot->piece = piece;
        slot->taken = true;
        slot->used = ++o->clock;
    }
    pthread_mutex_unlock(&o->lock);
    return slot ? slot->memory : NULL;
}

// The caller is done with a piece that it has taken, once its stream reaches this point. changed: the piece must be
// written. Does nothing if offload_take returned NULL.
static inline void offload_give(Offload* o, size_t piece, bool changed) {
    pthread_mutex_lock(&o->lock);
    OffloadSlot* slot = offload_find(o, piece);
    if (slot && slot->taken) {
        device_mark_set(&slot->given, o->compute);
        slot->taken = false;
        slot->changed |= changed;
        pthread_cond_broadcast(&o->work);
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

// Copies `bytes` bytes of a piece, from `at` on, to host memory, through a slot. No piece may be taken, and
// offload_flush must have been called since the last one was given back. If this fails, the store has failed.
static inline bool offload_read(Offload* o, void* to, size_t piece, size_t at, size_t bytes, Error* error) {
    size_t most = max_size(o->largest / OFFLOAD_BLOCK, 1) * OFFLOAD_BLOCK;  // read at a time; a shorter piece at once
    if (o->host) {
        memcpy(to, o->host + o->offsets[piece] + at, bytes);
        return true;
    }
    pthread_mutex_lock(&o->lock);
    OffloadSlot* slot;  // one is free or will be: none is being written, and not all are being read
    while ((slot = offload_free_slot(o, 0)) == NULL) offload_wait(o);
    slot->piece = OFFLOAD_NONE;
    slot->taken = true;
    pthread_mutex_unlock(&o->lock);
    bool ok = true;
    for (size_t done = 0; ok && done < bytes;) {
        size_t first = (at + done) / OFFLOAD_BLOCK * OFFLOAD_BLOCK, before = at + done - first;
        size_t blocks = round_up(before + bytes - done, OFFLOAD_BLOCK), left = offload_bytes(o, piece) - first;
        blocks = min_size(blocks, min_size(left, most));
        size_t n = min_size(bytes - done, blocks - before);
        ok = offload_move(o, slot->staging, piece, first, blocks, false, error);
        if (ok) memcpy((char*)to + done, slot->staging + before, n);
        done += n;
    }
    pthread_mutex_lock(&o->lock);
    slot->taken = false;
    if (!ok) offload_end(o, error);
    pthread_cond_broadcast(&o->work);
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
