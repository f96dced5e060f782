// heartbeat.h: what a rank reports about itself to the supervisor (launch/supervise.c).
//
//     heartbeat_open(getenv(HEARTBEAT_VARIABLE), rank, world, &error);     once; nothing happens without a supervisor
//     heartbeat_send(HEARTBEAT_STEP, step);                                     at the beginning of each phase
//     heartbeat_collective("all_gather");                                  at the beginning of each collective
//
// A heartbeat is a few stores to shared memory: no system call, no lock. One thread of a rank sends them. The
// supervisor sets time limits, and decides what happens when one is over.

#ifndef LLMTRAIN_HEARTBEAT_H
#define LLMTRAIN_HEARTBEAT_H

#include "../base/files.h"

#include <glob.h>
#include <sys/file.h>

#define EXIT_SAVED 75  // exit code: stopped by a signal, saved, to be resumed (EX_TEMPFAIL of sysexits.h)

// Each rank maps the file that the supervisor names in LLMTRAIN_HEARTBEATS, takes a slot in it, and writes there the
// phase that it begins. The file is in SYSTEM_MEMORY_FOLDER (/dev/shm), where no disk can make a rank wait, and where
// ranks of other machines do not find it; in /tmp if that has no room.

#define HEARTBEAT_VARIABLE "LLMTRAIN_HEARTBEATS"

// CHECKPOINT: also validation and samples. DONE: only memory is left to be freed.
typedef enum {
    HEARTBEAT_SETUP, HEARTBEAT_STEP, HEARTBEAT_COLLECTIVE, HEARTBEAT_PAUSE, HEARTBEAT_DONE, HEARTBEAT_PHASES
} HeartbeatPhase;
static const char* const HEARTBEAT_PHASE_NAMES[] = {"setup", "step", "collective", "checkpoint", "done"};

typedef struct {
    uint64_t counter;     // changes with every heartbeat; odd while the rest is being written
    uint64_t ms;          // time of the heartbeat, by now_ms
    uint64_t pid, rank;
    uint64_t world;       // number of ranks in this file, 0 if unknown
    uint64_t phase, step;
    uint64_t xid;         // of an error after which a GPU of this machine is lost, which this rank has seen; 0: none
    char gpu[24];         // that GPU: its PCI bus id
    uint64_t closed;      // 1: the process called exit, with whatever code; 0: it runs, or was killed
    uint64_t status;      // how it ended, as from waitpid, by heartbeat_ended; 0: nobody has said, or all is well
    char collective[32];  // name of the last one
} Heartbeat;

#define HEARTBEAT_RANKS 1024  // of one machine; further ones are not watched

typedef struct {
    int32_t start_errno;  // why the command could not be started; 0: it was
    int32_t locked;       // by the supervisor, which ends with its lock; 0: the file system has no locks
    uint64_t count;       // of the slots that are taken
    Heartbeat ranks[HEARTBEAT_RANKS];
} Heartbeats;

static Heartbeat *heartbeat_slots, *heartbeat_slot;  // of all, and of this process; NULL without a supervisor

static inline void heartbeat_write(Heartbeat* h, uint64_t phase, uint64_t step, const char* collective, bool closed) {
    uint64_t counter = h->counter;
    __atomic_store_n(&h->counter, counter + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    h->ms = (uint64_t)now_ms();
    h->phase = phase;
    h->step = step;
    h->closed = closed;
    if (collective) {
        size_t bytes = min_size(strlen(collective), sizeof h->collective - 1);
        memcpy(h->collective, collective, bytes);
        memset(h->collective + bytes, 0, sizeof h->collective - bytes);
    }
    __atomic_store_n(&h->counter, counter + 2, __ATOMIC_RELEASE);
}

// A phase begins. Steps count from 1.
static inline void heartbeat_send(HeartbeatPhase phase, uint64_t step) {
    if (heartbeat_slot) heartbeat_write(heartbeat_slot, (uint64_t)phase, step, NULL, false);
}

// A collective begins, in the step of the last heartbeat.
static inline void heartbeat_collective(const char* name) {
    Heartbeat* h = heartbeat_slot;
    if (h) heartbeat_write(h, HEARTBEAT_COLLECTIVE, h->step, name, false);
}

// A GPU of this machine is lost. Another thread calls this, once.
static inline void heartbeat_gpu_lost(const char* gpu, unsigned xid) {
    Heartbeat* h = heartbeat_slot;
    if (h == NULL || h->xid != 0) return;
    snprintf(h->gpu, sizeof h->gpu, "%s", gpu);
    __atomic_store_n(&h->xid, xid, __ATOMIC_RELEASE);
}

// The process ends by itself. exit(), and so a return from main, calls this.
static inline void heartbeat_close(void) {
    Heartbeat* h = heartbeat_slot;
    if (h == NULL || h->pid != (uint64_t)getpid()) return;  // a forked child ends, not the rank
    heartbeat_write(h, h->phase, h->step, NULL, true);
    heartbeat_slot = NULL;
}

// A rank that this process forked has ended, as waitpid says, which nobody else can ask again.
static inline void heartbeat_ended(pid_t pid, int status) {
    for (Heartbeat* h = heartbeat_slots; h && h < heartbeat_slots + HEARTBEAT_RANKS; h++)
        if (h->pid == (uint64_t)pid) __atomic_store_n(&h->status, (uint64_t)status, __ATOMIC_RELEASE);
}

// path: getenv(HEARTBEAT_VARIABLE); without such a file on this machine no heartbeat is ever written. world: the number
// of ranks, if all are on this machine; otherwise 0.
static inline bool heartbeat_open(const char* path, size_t rank, size_t world, Error* error) {
    if (path == NULL || heartbeat_slot) return true;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return true;
    void* memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(Heartbeats), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return fail_file(error, "map the heartbeats in", path);
    close(file);
    Heartbeats* heartbeats = (Heartbeats*)memory;
    uint64_t slot = __atomic_fetch_add(&heartbeats->count, 1, __ATOMIC_RELAXED);
    if (slot >= HEARTBEAT_RANKS) return true;
    Heartbeat* h = &heartbeats->ranks[slot];
    h->pid = (uint64_t)getpid();
    h->rank = rank;
    h->world = world;
    heartbeat_write(h, HEARTBEAT_SETUP, 0, NULL, false);
    heartbeat_slots = heartbeats->ranks;
    heartbeat_slot = h;
    atexit(heartbeat_close);
    return true;
}

#define HEARTBEAT_PATH_BYTES 64

// Removes what killed supervisors of this user have left: a lock ends with its process, in whatever container.
static inline void heartbeats_clean(const char* directory) {
    char pattern[HEARTBEAT_PATH_BYTES];
    struct stat status;
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/llmtrain-locked-??????", directory);
    int result = glob(pattern, GLOB_NOSORT, NULL, &found);
    for (size_t i = 0; result == 0 && i < found.gl_pathc; i++) {
        int file = open(found.gl_pathv[i], O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), locked = 0;
        if (file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
            pread(file, &locked, sizeof locked, offsetof(Heartbeats, locked)) > 0 && locked == 1 &&
            flock(file, LOCK_EX | LOCK_NB) == 0) unlink(found.gl_pathv[i]);
        if (file >= 0) close(file);
    }
    if (result == 0) globfree(&found);
}

// For the supervisor: maps a new file, all zero but `locked`, and stores its path; NULL after a failure. *lock: a
// descriptor that stays open as long as the file is in use.
static inline Heartbeats* heartbeats_make(int* lock, char path[HEARTBEAT_PATH_BYTES], Error* error) {
    static const char* const directories[] = {SYSTEM_MEMORY_FOLDER, "/tmp"};
    static Heartbeats none;  // written, so that the file has all its memory and no store to it can fail
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        void* memory = MAP_FAILED;
        heartbeats_clean(directories[i]);
        snprintf(path, HEARTBEAT_PATH_BYTES, "%s/llmtrain-locked-XXXXXX", directories[i]);
        int file = mkostemp(path, O_CLOEXEC);
        if (file < 0) continue;
        none.locked = flock(file, LOCK_EX | LOCK_NB) == 0;  // before a byte is in it
        ssize_t written = write(file, &none, sizeof none);
        if (written >= 0 && written < (ssize_t)sizeof none) errno = ENOSPC;
        if (written == (ssize_t)sizeof none)
            memory = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        *lock = file;
        if (memory != MAP_FAILED) return (Heartbeats*)memory;
        close(file);
        unlink(path);
    }
    fail_file(error, "make a file for heartbeats in", SYSTEM_MEMORY_FOLDER " or /tmp");
    return NULL;
}

// A copy. Its counter is odd if it is not consistent: the rank was stopped or killed while it wrote.
static inline Heartbeat heartbeat_read(const Heartbeat* h) {
    Heartbeat copy;
    bool whole = false;
    for (int attempt = 0; attempt < 100 && !whole; attempt++) {
        uint64_t before = __atomic_load_n(&h->counter, __ATOMIC_ACQUIRE);
        uint64_t xid = __atomic_load_n(&h->xid, __ATOMIC_ACQUIRE);
        memcpy(&copy, h, sizeof copy);
        copy.xid = xid;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        whole = before % 2 == 0 && __atomic_load_n(&h->counter, __ATOMIC_RELAXED) == before;
    }
    copy.counter |= !whole;
    copy.collective[sizeof copy.collective - 1] = copy.gpu[sizeof copy.gpu - 1] = 0;
    if (copy.phase >= HEARTBEAT_PHASES) copy.phase = HEARTBEAT_DONE;
    return copy;
}

#endif  // LLMTRAIN_HEARTBEAT_H
