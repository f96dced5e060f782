// shared_memory.h: streams of bytes between two processes of one machine, through memory that both have mapped.
//
//   1. files    shared_make, shared_map: memory for several pairs of processes
//   2. rings    shared_send, shared_receive: like send and recv of a non-blocking socket
//   3. waiting  shared_waits, shared_wakes
//
// A pair of processes has a ring for each direction: one writes to it, the other reads from it. Neither waits here. A
// socket joins the two as well, and is what they wait for: a process that finds nothing to do says so in the ring, and
// the other one sends a byte over the socket when there is. When a process dies its socket ends, and what it has
// written before can still be read.
//
// Nothing checks the data, as memory is no less reliable here than in the rest of a process, and a checksum would cost
// as much as the copy. All memory of a file is reserved before it is mapped, so that no access to it can fail.
//
//   SharedFile file;  SharedRing* rings[2];
//   int made = shared_make(&file, 1, number);     in one process, which sends `file` to the other one
//   shared_map(rings, &file, 0, true);            rings[0] to send, rings[1] to receive; `false` in the other process
//   close(made);                                  when both have done this: nothing is left when they end

#ifndef LLMTRAIN_SHARED_MEMORY_H
#define LLMTRAIN_SHARED_MEMORY_H

#include "../base/system.h"
#include "../base/fault.h"

#include <sys/stat.h>

#define SHARED_RING ((size_t)256 << 10)  // bytes of a ring: a multiple of the pages of every system
#define SHARED_LINE ((size_t)128)        // two cache lines, which processors load together
#define SHARED_CAPACITY (SHARED_RING - 2 * SHARED_LINE)
#define SHARED_PIECE ((size_t)64 << 10)  // bytes copied at a time: the other process finds them in a cache

// ------------------------------------------------------------------------------------------------
// 1. Files

// One direction. The two counters grow without bound; each process writes only to its own line, or clears a flag.
typedef struct {
    struct { uint64_t bytes, number; uint32_t waits; char gap[SHARED_LINE - 24]; } sent;      // by the sender
    struct { uint64_t bytes, unused; uint32_t waits; char gap[SHARED_LINE - 24]; } received;  // by the receiver
    char data[SHARED_CAPACITY];
} SharedRing;

typedef struct {
    char path[56];
    uint64_t number;  // which the file contains: a path may lead to something else in another container
} SharedFile;

static inline void shared_unmap(SharedRing* rings[2]) {
    if (rings[0]) munmap(rings[0] < rings[1] ? rings[0] : rings[1], 2 * SHARED_RING);
    rings[0] = rings[1] = NULL;
}

// Makes a file for pairs of processes. Returns its descriptor; -1 without a path if there is no memory for it.
static inline int shared_make(SharedFile* file, size_t pairs, uint64_t number) {
    int made = memory_file_open();
    bool good = made >= 0 && disk_reserve(made, 2 * pairs * SHARED_RING) == 0;
    snprintf(file->path, sizeof file->path, "/proc/%d/fd/%d", (int)getpid(), made);
    file->number = number;
    for (size_t i = 0; good && i < pairs; i++)
        good = pwrite(made, &number, sizeof number, (off_t)(2 * i * SHARED_RING + offsetof(SharedRing, sent.number))) ==
               (ssize_t)sizeof number;
    if (good) return made;
    if (made >= 0) close(made);
    memset(file, 0, sizeof *file);
    return -1;
}

// Maps the rings of a pair: [0] to send, [1] to receive. False if that is impossible, as between two containers.
static inline bool shared_map(SharedRing* rings[2], const SharedFile* file, size_t pair, bool first) {
    struct stat status;
    size_t begin = 2 * pair * SHARED_RING;
    rings[0] = rings[1] = NULL;
    int opened = file->path[0] == 0 ? -1 : open(file->path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    bool good = opened >= 0 && fstat(opened, &status) == 0 && S_ISREG(status.st_mode) &&
                status.st_size >= (off_t)(begin + 2 * SHARED_RING) && !fault_point("share");
    void* memory = good ? mmap(NULL, 2 * SHARED_RING, PROT_READ | PROT_WRITE, MAP_SHARED, opened, (off_t)begin) :
                          MAP_FAILED;
    if (opened >= 0) close(opened);
    if (memory == MAP_FAILED) return false;
    SharedRing* both = (SharedRing*)memory;
    rings[0] = &both[!first];
    rings[1] = &both[first];
    if (both->sent.number == file->number) return true;
    shared_unmap(rings);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 2. Rings
//
// A counter is stored after the data, and the flags of waiting processes are read after that, in one order for all.

static inline uint64_t shared_load(const uint64_t* counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }
static inline void shared_store(uint64_t* counter, uint64_t n) { __atomic_store_n(counter, n, __ATOMIC_SEQ_CST); }

// The bytes in a ring. Whatever its counters are, no access is outside.
static inline size_t shared_used(const SharedRing* ring) {
    return min_size((size_t)(shared_load(&ring->sent.bytes) - shared_load(&ring->received.bytes)), SHARED_CAPACITY);
}

// Copies up to n bytes into the ring; returns how many.
static inline size_t shared_send(SharedRing* ring, const char* data, size_t n) {
    uint64_t sent = shared_load(&ring->sent.bytes);
    size_t at = (size_t)(sent % SHARED_CAPACITY);
    n = min_size(min_size(n, SHARED_PIECE), SHARED_CAPACITY - shared_used(ring));
    size_t before_end = min_size(n, SHARED_CAPACITY - at);
    if (n == 0) return 0;
    memcpy(ring->data + at, data, before_end);
    memcpy(ring->data, data + before_end, n - before_end);
    shared_store(&ring->sent.bytes, sent + n);
    return n;
}

// Copies up to n bytes out of the ring; returns how many.
static inline size_t shared_receive(SharedRing* ring, char* data, size_t n) {
    uint64_t received = shared_load(&ring->received.bytes);
    size_t at = (size_t)(received % SHARED_CAPACITY);
    n = min_size(min_size(n, SHARED_PIECE), shared_used(ring));
    size_t before_end = min_size(n, SHARED_CAPACITY - at);
    if (n == 0) return 0;
    memcpy(data, ring->data + at, before_end);
    memcpy(data + before_end, ring->data, n - before_end);
    shared_store(&ring->received.bytes, received + n);
    return n;
}

// ------------------------------------------------------------------------------------------------
// 3. Waiting

// To be called before this process waits, to send or to receive (POLLOUT, POLLIN): whether it may. If it may, the other
// one wakes it. events 0: it no longer waits.
static inline bool shared_waits(SharedRing* const rings[2], int events) {
    bool sends = events & POLLOUT, receives = events & POLLIN;
    __atomic_store_n(&rings[0]->sent.waits, sends, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rings[1]->received.waits, receives, __ATOMIC_SEQ_CST);
    return !(sends && shared_used(rings[0]) < SHARED_CAPACITY) && !(receives && shared_used(rings[1]) > 0);
}

static inline bool shared_take_flag(uint32_t* waits) {
    return __atomic_load_n(waits, __ATOMIC_SEQ_CST) && __atomic_exchange_n(waits, 0, __ATOMIC_SEQ_CST);
}

// To be called after sending or receiving: whether the other process waits for it. It is not woken to send before half
// of the ring is free, since each time costs more than a copy.
static inline bool shared_wakes(SharedRing* const rings[2]) {
    bool receiver = shared_take_flag(&rings[0]->received.waits);
    return (shared_used(rings[1]) <= SHARED_CAPACITY / 2 && shared_take_flag(&rings[1]->sent.waits)) || receiver;
}

#endif  // LLMTRAIN_SHARED_MEMORY_H
