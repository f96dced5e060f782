// emulator.h: runs CUDA kernels on a CPU, one fiber per CUDA thread, so that they can be tested without a GPU.
//
//   1. modes           from the environment; how a diagnosis is printed
//   2. switch          from one fiber to another
//   3. state           a thread, a warp, a block
//   4. scheduler       which thread runs next: forward, reverse or random
//   5. barriers        __syncthreads and bar.sync
//   6. warps           operations that the lanes of a warp do together
//   7. shared memory   static and dynamic, in an arena with guard zones
//   8. copies          cp.async, done as late or as early as the rules allow
//   9. grids           run_grid, launches and their limits
//
// Functions for device code (shuffles, atomics, intrinsics) are in device.h, PTX in ptx.h, the runtime API in
// runtime.h, the race check in race.h, the access counts of its build in count.h. translate.cpp first turns CUDA into
// C++. README.md explains how it all works and what it does not detect.
//
// A block runs on one OS thread, which switches between the fibers of the block; blocks run in parallel with OpenMP.
// Fibers never move between OS threads. There is no pre-emption: a fiber runs until it waits or returns.

#ifndef EMULATOR_H
#define EMULATOR_H

#ifdef __CUDACC__
#error "emulator.h is for a C++ compiler; nvcc needs no emulator"
#endif
#define EMULATED 1

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "numbers.h"

// ------------------------------------------------------------------------------------------------
// 1. Modes

inline __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum Order { FORWARD, REVERSE, RANDOM };

struct Modes {
    Order order;           // EMULATE_ORDER=forward|reverse|random: which thread runs next
    unsigned seed;         // EMULATE_SEED=n, of the random order
    bool early_copies;     // EMULATE_COPIES=late|early: when cp.async writes
    bool poison;           // EMULATE_POISON=0|1: new memory is filled with 0xFF, which is NaN
    bool delayed_streams;  // EMULATE_STREAMS=now|delayed: see runtime.h
    bool others_ahead;     // EMULATE_OTHERS=behind|ahead: the same
    unsigned threads;      // EMULATE_THREADS=n of the operating system; 0: as many as OpenMP has
    size_t shared_limit;   // EMULATE_SHARED=KiB of shared memory that a block may have
    int processors;        // EMULATE_PROCESSORS=n multiprocessors of the device
    bool other_gpu;        // EMULATE_GPU=own|other: the program has no machine code for the device
    const char* launches;  // EMULATE_LAUNCHES=FILE: launches are listed there, not run: launches.h
};

// A position in the source. As the default value of a parameter, EMULATOR_HERE is the position of the call. (It has a
// constructor because g++ uses the position of the declaration for an aggregate in braces.)
struct Place {
    const char* file;
    int line;
    constexpr Place() : file(nullptr), line(0) {}
    constexpr Place(const char* file_, int line_) : file(file_), line(line_) {}
};
#define EMULATOR_HERE emulator::Place(__builtin_FILE(), __builtin_LINE())

inline bool same_place(Place a, Place b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

enum { DIAGNOSIS = 86 };  // exit status, so that a test can tell a diagnosis from a crash

// Prints what is wrong and where, and ends the program. die_at begins with the place in the source.
[[noreturn]] inline void die(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] inline void die_at(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline void print_place();
#ifdef EMULATE_RACE
inline bool unseen = true;  // while host code or the emulator's own code runs; always during a fiber switch
struct Unseen {
    bool before;
    EMULATOR_UNSEEN Unseen() : before(unseen) { unseen = true; }
    EMULATOR_UNSEEN ~Unseen() { unseen = before; }
};
#else
struct Unseen {
    ~Unseen() {}
};
#endif

[[noreturn]] EMULATOR_UNSEEN inline void die_with(Place place, const char* format, va_list arguments) {
    static std::atomic<bool> dying{false};
    while (dying.exchange(true)) pause();  // another thread prints, and ends the process
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    if (place.file) fprintf(stderr, "%s:%d: ", place.file, place.line);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    print_place();
    fflush(stderr);
    _exit(DIAGNOSIS);
}

EMULATOR_UNSEEN inline void die(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die_with(Place(), format, arguments);
}

EMULATOR_UNSEEN inline void die_at(Place place, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die_with(place, format, arguments);
}

// The index of the environment variable's value among the choices; the first one if it is not set.
inline int mode_choice(const char* name, std::initializer_list<const char*> choices) {
    const char* value = getenv(name);
    if (value == nullptr) return 0;
    std::string all;
    for (const char* const& choice : choices) {
        if (strcmp(value, choice) == 0) return (int)(&choice - choices.begin());
        all += std::string(all.empty() ? "" : ", ") + choice;
    }
    die("%s is '%s'; give one of %s", name, value, all.c_str());
}

inline unsigned mode_number(const char* name, unsigned otherwise, unsigned least, unsigned most) {
    const char* value = getenv(name);
    if (value == nullptr) return otherwise;
    char* end;
    unsigned long n = strtoul(value, &end, 10);
    if (*value < '0' || *value > '9' || *end != 0 || n < least || n > most)
        die("%s is '%s'; give a number from %u to %u", name, value, least, most);
    return (unsigned)n;
}

// Limits of the device, for compute capability 9.0. Others have less shared memory: 99 KiB (8.6, 8.9, 12.0), 163 KiB
// (8.0).
constexpr unsigned STATIC_SHARED_KIB = 48, SHARED_KIB = 227;
constexpr size_t STATIC_SHARED_LIMIT = STATIC_SHARED_KIB << 10;  // also what a kernel may have without asking for more
constexpr unsigned BLOCK_LIMIT = 1024;
constexpr unsigned LANES = 32, WARPS = BLOCK_LIMIT / LANES;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned ANY_NUMBER = 1000000000;

inline Modes modes_read() {
    Modes modes;
    modes.order = (Order)mode_choice("EMULATE_ORDER", {"forward", "reverse", "random"});
    modes.seed = mode_number("EMULATE_SEED", 1, 0, ANY_NUMBER);
    modes.early_copies = mode_choice("EMULATE_COPIES", {"late", "early"}) == 1;
    modes.poison = mode_choice("EMULATE_POISON", {"1", "0"}) == 0;
    modes.delayed_streams = mode_choice("EMULATE_STREAMS", {"now", "delayed"}) == 1;
    modes.others_ahead = mode_choice("EMULATE_OTHERS", {"behind", "ahead"}) == 1;
    modes.threads = mode_number("EMULATE_THREADS", 0, 0, ANY_NUMBER);
    modes.shared_limit = (size_t)mode_number("EMULATE_SHARED", SHARED_KIB, STATIC_SHARED_KIB, SHARED_KIB) << 10;
    modes.processors = (int)mode_number("EMULATE_PROCESSORS", 4, 1, 4096);
    modes.other_gpu = mode_choice("EMULATE_GPU", {"own", "other"}) == 1;
    modes.launches = getenv("EMULATE_LAUNCHES");
    if (modes.launches) modes.poison = false;
#ifdef EMULATE_RACE
    modes.threads = 1;  // the check handles only one block at a time
#endif
    return modes;
}

inline const Modes modes = modes_read();

// Dynamic shared memory that cudaFuncSetAttribute has allowed a kernel. Returns false for more than there is.
inline std::map<const void*, size_t> shared_allowed;
inline bool allow_shared_memory(const void* kernel, size_t bytes) {
    if (bytes > modes.shared_limit) return false;
    shared_allowed[kernel] = bytes;
    return true;
}

}  // namespace emulator

#include "launches.h"
#include "runtime.h"

namespace emulator {

// ------------------------------------------------------------------------------------------------
// 2. Switch
//
// emulator_switch(&save, to) pushes the registers that a function must preserve, stores the stack pointer in `save`,
// loads the stack pointer `to` and pops what was pushed there. On x86-64 it jumps instead of returning, since a return
// that does not match the last call is mispredicted every time.

extern "C" void emulator_switch(void** save, void* to);

#if defined(__x86_64__)
constexpr int FRAME_WORDS = 8, FRAME_ENTRY = 6;  // words saved on a waiting stack; index of the address
__asm__(".text\n.weak emulator_switch\n.type emulator_switch,@function\nemulator_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\npop %rcx\njmp *%rcx\n"
        ".size emulator_switch,.-emulator_switch\n");
#elif defined(__aarch64__)
constexpr int FRAME_WORDS = 20, FRAME_ENTRY = 11;
__asm__(
    ".text\n.weak emulator_switch\n.type emulator_switch,%function\nemulator_switch:\n"
    "sub sp,sp,#160\n"
    "stp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\n"
    "stp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n.size emulator_switch,.-emulator_switch\n");
#else
#error "the emulator can switch fibers on x86-64 and aarch64 only: add emulator_switch for this processor"
#endif

// ------------------------------------------------------------------------------------------------
// 3. State

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 << 10;  // AddressSanitizer's frames are large
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t PAGE_BYTES = 4096;
constexpr size_t STACK_GUARD_BYTES = 256 << 10;  // inaccessible, below each stack

// A cp.async under way.
struct Copy {
    char* to;
    const char* from;
    unsigned bytes, bytes_read;            // the rest of `bytes` is filled with zeros
    unsigned group;
    const Place* place;
};

struct Thread {
    void* stack_pointer;                   // while it does not run
    char* stack;
    void* fake_stack;                      // AddressSanitizer's
    uint3 index;
    unsigned number, warp, lane;
    bool returned;
    const char* waits_for;                 // for a deadlock report
    Place waits_at;
    unsigned waits_mask;
    std::vector<Copy> copies;
    unsigned copy_group;                   // the group of the next cp.async
    uint32_t path;                         // call path, for count.h
    const void* ptx_from;                  // code address of the latest inline PTX, also for count.h
};

// An operation of a warp that only some lanes have reached.
struct Meeting {
    const char* name;
    Place place;
    unsigned mask, arrived;
    bool excuses;                          // does not wait for lanes that have returned
    void* data[LANES];
};

struct Warp {
    unsigned ready;                        // lanes that can run
    unsigned returned;                     // lanes that have returned or never existed
    unsigned speed;                        // in the random order the fastest warp that is ready runs
    uint32_t interval;                     // between two __syncwarp, for the race check
    unsigned meetings_count;
    Meeting meetings[LANES];
};

constexpr unsigned BARRIERS = 16;

struct Barrier {
    Place place;
    unsigned arrived, expected;            // expected: 0 means all threads that have not returned
    unsigned waiting[WARPS];               // lanes
    unsigned ayes;                         // predicates that were true
    unsigned result_ayes, result_arrived;  // of the previous round
};

// An object of shared memory in the block's arena.
struct SharedObject {
    uint64_t block_serial;
    char* address;
};

// What one OS thread needs to run blocks.
struct Block {
    unsigned count, running;               // threads, and those that have not returned
    void (*call)(void*);                   // runs the kernel for the current thread
    void* context;
    void* main_stack_pointer;
    void* main_fake_stack;
    const void* main_stack;
    size_t main_stack_bytes;
    std::vector<Thread> threads;
    Warp warps[WARPS];
    Barrier barriers[BARRIERS];
    uint64_t random;
    uint32_t interval;                     // between two barriers, for the race check
    uint64_t serial;                       // number of blocks that this thread has run
    char* arena;
    size_t arena_used, shared_bytes, dynamic_bytes;
    std::vector<std::pair<size_t, size_t>> guards;  // offset and length of guard zones
    std::vector<SharedObject> objects;     // by number of the declaration
    ~Block();
};

inline __thread Block* block;              // run by this OS thread
inline __thread Thread* current;           // the running CUDA thread; nullptr in host code

struct Launch {
    const char* kernel = nullptr;
    const void* function = nullptr;
    Place place;
    bool asked = false;                    // cudaFuncSetAttribute was called for dynamic shared memory
    size_t dynamic_limit = 0;              // the maximum that a launch may then have
    const char* arguments = nullptr;       // copied by every thread, since a kernel may change its parameters
    size_t argument_bytes = 0;
};
inline __thread Launch launch;             // running now; the name is nullptr in host code

EMULATOR_UNSEEN inline void print_place() {
    if (launch.kernel == nullptr) return;
    fprintf(stderr, "    in kernel %s, launched at %s:%d", launch.kernel, launch.place.file, launch.place.line);
    if (current) {
        fprintf(stderr, "\n    by block (%u,%u,%u) thread (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z,
                current->index.x, current->index.y, current->index.z);
        if (current->waits_at.file)
            fprintf(stderr, ", which last did %s at %s", current->waits_for, text_of(current->waits_at).c_str());
    }
    fprintf(stderr, "\n");
}

// race.h: thread t has accessed memory, as kind says; `place` is a Place or, for line < 0, a code address. count.h: the
// same, to count requests, and what it must know about the lanes of a warp.
enum Access { READ, WRITE, ATOMIC, COPY_START, COPY_END, LDMATRIX };  // cp.async writes from COPY_START to COPY_END
#ifdef EMULATE_RACE
EMULATOR_UNSEEN inline void race_check(const Thread* t, const void* address, size_t bytes, Access access, Place place);
EMULATOR_UNSEEN inline void race_new_interval(uint32_t* interval);
EMULATOR_UNSEEN inline void race_new_launch();
EMULATOR_UNSEEN inline void race_new_block();
inline const char* const counting = getenv("EMULATE_COUNT");  // the file to write, or NULL
EMULATOR_UNSEEN inline void count_access(const Thread* t, const void* address, size_t bytes, Access, const void* pc);
EMULATOR_UNSEEN inline void count_met(unsigned warp, unsigned lanes);
EMULATOR_UNSEEN inline void count_new_launch(uint64_t blocks, unsigned threads);
EMULATOR_UNSEEN inline void count_block_begin();
EMULATOR_UNSEEN inline void count_block_end();
#else
inline void race_check(const Thread*, const void*, size_t, Access, Place) {}
inline void race_new_interval(uint32_t*) {}
inline void race_new_launch() {}
inline void race_new_block() {}
inline void count_access(const Thread*, const void*, size_t, Access, const void*) {}
inline void count_met(unsigned, unsigned) {}
inline void count_new_launch(uint64_t, unsigned) {}
inline void count_block_begin() {}
inline void count_block_end() {}
#endif

// ------------------------------------------------------------------------------------------------
// 4. Scheduler
//
// Real warps drift apart as far as barriers allow; the orders imitate that. Forward, a warp runs until all of its lanes
// wait, then the next higher one; reverse is the mirror image; random draws a new speed for each warp at every barrier,
// and picks any lane within a warp. (Picking any thread at random would keep the warps level, and hardly ever show that
// one may overtake another.)

EMULATOR_UNSEEN inline uint64_t random_next() {
    uint64_t& x = block->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

EMULATOR_UNSEEN inline void draw_speeds() {
    if (modes.order != RANDOM) return;
    for (Warp& warp : block->warps) warp.speed = (unsigned)(random_next() >> 40);
}

inline unsigned lowest(unsigned mask) { return (unsigned)__builtin_ctz(mask); }
inline unsigned highest(unsigned mask) { return 31u - (unsigned)__builtin_clz(mask); }

// The bit of `mask` to take after position `at`: the next one in the order, cyclically.
EMULATOR_UNSEEN inline unsigned next_bit(unsigned mask, unsigned at) {
    if (modes.order == REVERSE) {
        unsigned below = mask & ((1u << at) - 1);
        return highest(below ? below : mask);
    }
    unsigned above = mask & ~((2u << at) - 1);
    return lowest(above ? above : mask);
}

// Takes the next thread that can run; nullptr if all wait.
EMULATOR_UNSEEN inline Thread* pick() {
    Block* b = block;
    unsigned at = current ? current->warp : modes.order == REVERSE ? 0 : WARPS - 1;  // so that the first one is next
    unsigned warp = at;
    if (modes.order == RANDOM) {
        unsigned best = 0;
        for (unsigned w = 0; w < WARPS; w++) {
            if (b->warps[w].ready && b->warps[w].speed + 1 > best) {
                best = b->warps[w].speed + 1;
                warp = w;
            }
        }
        if (best == 0) return nullptr;
    } else if (!b->warps[at].ready || !current) {
        unsigned ready = 0;
        for (unsigned w = 0; w < WARPS; w++) ready |= (b->warps[w].ready != 0 ? 1u : 0u) << w;
        if (ready == 0) return nullptr;
        warp = next_bit(ready, at);
    }
    unsigned ready = b->warps[warp].ready, lane;
    if (modes.order == RANDOM) {
        unsigned turn = (unsigned)(random_next() >> 40) % LANES;
        unsigned turned = turn ? ready >> turn | ready << (LANES - turn) : ready;
        lane = (lowest(turned) + turn) % LANES;
    } else {
        unsigned before_first = modes.order == REVERSE ? 0 : LANES - 1;
        lane = next_bit(ready, current && current->warp == warp ? current->lane : before_first);
    }
    b->warps[warp].ready &= ~(1u << lane);
    return &b->threads[warp * LANES + lane];
}

// Continues with thread t, or with the OS thread if t is nullptr. `forever`: the caller will not be resumed.
EMULATOR_UNSEEN inline void switch_to(Thread* t, bool forever) {
    void* unused;
    void** save = forever ? &unused : current ? &current->stack_pointer : &block->main_stack_pointer;
#ifdef __SANITIZE_ADDRESS__
    void** fake_stack = current ? &current->fake_stack : &block->main_fake_stack;
    __sanitizer_start_switch_fiber(forever ? nullptr : fake_stack, t ? t->stack : block->main_stack,
                                   t ? STACK_BYTES : block->main_stack_bytes);
#endif
    current = t;
    if (t) threadIdx = t->index;
    emulator_switch(save, t ? t->stack_pointer : block->main_stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    const void* old_stack;
    size_t old_bytes;
    __sanitizer_finish_switch_fiber(*fake_stack, &old_stack, &old_bytes);
#endif
}

[[noreturn]] EMULATOR_UNSEEN inline void deadlock() {
    std::map<std::string, std::vector<unsigned>> groups;
    for (unsigned i = 0; i < block->count; i++) {
        const Thread& t = block->threads[i];
        char mask[24] = "";
        if (t.waits_mask) snprintf(mask, sizeof mask, " with mask %08x", t.waits_mask);
        std::string where = "wait at " + text_of(t.waits_at) + " in " + (t.waits_for ? t.waits_for : "?") + mask;
        groups[t.returned ? "have returned" : where].push_back(i);
    }
    std::string report;
    for (auto& group : groups)
        report += "\n    " + std::to_string(group.second.size()) + " threads (first " +
                  std::to_string(group.second.front()) + ", last " + std::to_string(group.second.back()) + ") " +
                  group.first;
    current = nullptr;
    die("deadlock in block (%u,%u,%u): all threads wait for others%s", blockIdx.x, blockIdx.y, blockIdx.z,
        report.c_str());
}

// Lets other threads run. The caller has noted what it waits for, or made itself ready.
EMULATOR_UNSEEN inline void wait() {
    Thread* next = pick();
    if (next == nullptr) deadlock();
    if (next != current) switch_to(next, false);
}

EMULATOR_UNSEEN inline void note(const char* what, Place place, unsigned mask) {
    current->waits_for = what;
    current->waits_at = place;
    current->waits_mask = mask;
}

// ------------------------------------------------------------------------------------------------
// 5. Barriers

EMULATOR_UNSEEN inline void barrier_open(Barrier* b) {
    for (unsigned w = 0; w < WARPS; w++) {
        block->warps[w].ready |= b->waiting[w];
        count_met(w, b->waiting[w]);
        b->waiting[w] = 0;
    }
    b->result_ayes = b->ayes;
    b->result_arrived = b->arrived;
    b->arrived = b->ayes = 0;
    race_new_interval(&block->interval);
    draw_speeds();
}

// Waits until all threads of the block, or `expected` of them, have reached barrier `id`. Real hardware only counts
// arrivals; here all must be at the same line of the source, since anything else is nearly always a mistake.
EMULATOR_UNSEEN inline const Barrier& barrier(const char* name, Place place, unsigned id = 0, unsigned expected = 0,
                                              bool aye = false) {
    Unseen emulator_work;
    if (!current) die("%s outside of a kernel", name);
    if (id >= BARRIERS)
        die_at(place, "barrier %u does not exist: there are 0 to %u", id, BARRIERS - 1);
    if (expected % LANES || expected > block->count)
        die_at(place, "a barrier of %u threads in a block of %u: give a multiple of %u", expected, block->count, LANES);
    note(name, place, 0);
    Barrier* b = &block->barriers[id];
    if (b->arrived == 0) {
        b->place = place;
        b->expected = expected;
    } else if (!same_place(b->place, place)) {
        die("threads of one block wait at different barriers: %s and %s", text_of(b->place).c_str(),
            text_of(place).c_str());
    } else if (b->expected != expected) {
        die_at(place, "threads expect %u and %u others at one barrier", b->expected, expected);
    }
    b->arrived++;
    b->ayes += aye;
    b->waiting[current->warp] |= 1u << current->lane;
    if (b->arrived == (expected ? expected : block->running)) barrier_open(b);
    wait();
    return *b;
}

// ------------------------------------------------------------------------------------------------
// 6. Warps
//
// Every joint operation of lanes is a meeting: the last lane to arrive does the work for all and wakes them.
//
//     if (Meeting* m = meet("__ballot_sync", place, mask, &mine)) { ... m->data[lane] ...; part(m); }

EMULATOR_UNSEEN inline void meeting_remove(Warp* warp, Meeting* m) {
    Meeting* last = &warp->meetings[--warp->meetings_count];
    if (m != last) *m = *last;
}

EMULATOR_UNSEEN inline void part(Meeting* m) {
    Warp* warp = &block->warps[current->warp];
    warp->ready |= m->arrived & ~(1u << current->lane);
    count_met(current->warp, m->arrived);
    meeting_remove(warp, m);
    if (modes.order == RANDOM) {
        warp->ready |= 1u << current->lane;
        wait();
    }
}

// The meeting, for the last lane to arrive; nullptr for the others, once it is over.
EMULATOR_UNSEEN inline Meeting* meet(const char* name, Place place, unsigned mask, void* data, bool excuses = false) {
    if (!current) die("%s outside of a kernel", name);
    Warp* warp = &block->warps[current->warp];
    unsigned me = 1u << current->lane;
    note(name, place, mask);
    if (!(mask & me))
        die_at(place, "lane %u calls %s with a mask that does not have it: %08x", current->lane, name, mask);
    if ((mask & warp->returned) && !excuses)
        die_at(place, "the mask %08x of %s names lanes that have returned or never were: %08x", mask, name,
               mask & warp->returned);
    unsigned i = 0;
    while (i < warp->meetings_count && warp->meetings[i].mask != mask) i++;
    Meeting* m = &warp->meetings[i];
    if (i == warp->meetings_count) {
        warp->meetings_count++;
        m->name = name;
        m->place = place;
        m->mask = mask;
        m->arrived = 0;
        m->excuses = excuses;
    } else if (m->name != name || !same_place(m->place, place)) {
        die("lanes of warp %u disagree: %s at %s, and %s at %s, with the same mask %08x", current->warp, m->name,
            text_of(m->place).c_str(), name, text_of(place).c_str(), mask);
    }
    m->arrived |= me;
    m->data[current->lane] = data;
    if ((m->arrived | (excuses ? warp->returned : 0)) == (mask | (excuses ? warp->returned : 0))) return m;
    wait();
    return nullptr;
}

EMULATOR_UNSEEN inline void sync_warp(unsigned mask, Place place) {
    Unseen emulator_work;
    if (Meeting* m = meet("__syncwarp", place, mask, nullptr, true)) {
        race_new_interval(&block->warps[current->warp].interval);
        part(m);
    }
}

// The current thread has returned: threads that waited only for it continue.
EMULATOR_UNSEEN inline void release_from_returned() {
    Warp* warp = &block->warps[current->warp];
    for (unsigned i = 0; i < warp->meetings_count; i++) {
        Meeting* m = &warp->meetings[i];
        if (m->excuses && (m->mask & ~(m->arrived | warp->returned)) == 0) {
            race_new_interval(&warp->interval);
            warp->ready |= m->arrived;
            meeting_remove(warp, m);
            i--;
        }
    }
    Barrier* all = &block->barriers[0];
    if (all->arrived && !all->expected && all->arrived == block->running) barrier_open(all);
}

// ------------------------------------------------------------------------------------------------
// 7. Shared memory
//
// Each block has an arena: dynamic shared memory at its beginning, then each __shared__ variable when the first thread
// passes its declaration. An address in shared memory, as __cvta_generic_to_shared returns it, is the offset in the
// arena. Guard zones between objects are poisoned for AddressSanitizer and checked when the block has ended.

constexpr size_t GUARD_BYTES = 256, OBJECT_ALIGNMENT = 1024;
constexpr size_t ARENA_BYTES = (2 * SHARED_KIB << 10) + 256 * OBJECT_ALIGNMENT;  // room for small objects and guards

inline int fill_byte() { return modes.poison ? 0xFF : 0; }

// Marks memory as forbidden or allowed for AddressSanitizer.
EMULATOR_UNSEEN inline void set_poison([[maybe_unused]] char* from, [[maybe_unused]] size_t bytes,
                                       [[maybe_unused]] bool poisoned) {
#ifdef __SANITIZE_ADDRESS__
    poisoned ? __asan_poison_memory_region(from, bytes) : __asan_unpoison_memory_region(from, bytes);
#endif
}

// Static shared memory has its own limit. In addition there must be room for the dynamic: for what was launched within
// the limit that needs no attribute, or for all that cudaFuncSetAttribute has allowed within the device's limit.
EMULATOR_UNSEEN inline void shared_memory_check() {
    Block* b = block;
    size_t static_bytes = b->shared_bytes - b->dynamic_bytes;
    if (static_bytes > STATIC_SHARED_LIMIT)
        die("%zu bytes of static shared memory: a kernel has %zu", static_bytes, STATIC_SHARED_LIMIT);
    if (!launch.asked && b->shared_bytes > STATIC_SHARED_LIMIT)
        die("%zu bytes of static and %zu of dynamic shared memory: a kernel has %zu together, or more if it calls "
            "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)",
            static_bytes, b->dynamic_bytes, STATIC_SHARED_LIMIT);
    if (launch.asked && static_bytes + launch.dynamic_limit > modes.shared_limit)
        die("%zu bytes of static shared memory and %zu of dynamic allowed by cudaFuncSetAttribute: the device has %zu",
            static_bytes, launch.dynamic_limit, modes.shared_limit);
}

// Puts an object into the arena, aligned no better than requested, so that a missing __align__ is noticed.
EMULATOR_UNSEEN inline char* arena_take(size_t bytes, size_t alignment) {
    Block* b = block;
    b->shared_bytes += bytes;
    shared_memory_check();
    size_t guard = b->arena_used;
    size_t offset = (guard + GUARD_BYTES + OBJECT_ALIGNMENT - 1) / OBJECT_ALIGNMENT * OBJECT_ALIGNMENT;
    if (guard == 0) offset = 0;
    else if (alignment < OBJECT_ALIGNMENT) offset += alignment;
    if (offset + bytes + OBJECT_ALIGNMENT + GUARD_BYTES > ARENA_BYTES) die("too many objects in shared memory");
    b->guards.push_back({guard, offset - guard});
    b->arena_used = offset + bytes;
    set_poison(b->arena + offset, bytes, false);
    return b->arena + offset;
}

EMULATOR_UNSEEN inline void arena_open(size_t dynamic_bytes) {
    Block* b = block;
    if (b->arena == nullptr) {
        void* memory = mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) die("no memory for shared memory");
        b->arena = (char*)memory;
        b->arena_used = ARENA_BYTES - GUARD_BYTES;
    }
    set_poison(b->arena, ARENA_BYTES, false);
    memset(b->arena, fill_byte(), std::max(b->arena_used, dynamic_bytes) + GUARD_BYTES);
    set_poison(b->arena, ARENA_BYTES, true);
    b->guards.clear();
    b->arena_used = b->shared_bytes = 0;
    b->dynamic_bytes = dynamic_bytes;
    if (dynamic_bytes) arena_take(dynamic_bytes, OBJECT_ALIGNMENT);
    else b->arena_used = 1;  // address 0 stays unused
}

EMULATOR_UNSEEN inline void arena_check() {
    Block* b = block;
    b->guards.push_back({b->arena_used, GUARD_BYTES});
    set_poison(b->arena, ARENA_BYTES, false);
    for (auto& guard : b->guards) {
        for (size_t i = 0; i < guard.second; i++) {
            if ((unsigned char)b->arena[guard.first + i] != fill_byte())
                die("block (%u,%u,%u) has written shared memory %zu bytes behind the end of an object%s", blockIdx.x,
                    blockIdx.y, blockIdx.z, i,
                    guard.first == b->dynamic_bytes && i < GUARD_BYTES ? " (the dynamic shared memory)" : "");
        }
    }
}

inline char* dynamic_shared() {
    if (!current) die("extern __shared__ outside of a kernel");
    return block->arena;
}

// A __shared__ variable of type T. The object itself is static, one per declaration; its memory belongs to the block.
inline std::atomic<int> shared_declarations{0};

template <class T>
struct Shared {
    size_t alignment;
    std::atomic<int> number{0};  // 0: none yet
    constexpr explicit Shared(size_t alignment_) : alignment(alignment_) {}

    EMULATOR_UNSEEN T& here() {
        Unseen emulator_work;
        if (!current) die("a __shared__ variable outside of a kernel");
        int n = number.load(std::memory_order_acquire);
        if (n == 0) {
            int fresh = ++shared_declarations;
            if (number.compare_exchange_strong(n, fresh)) n = fresh;
        }
        std::vector<SharedObject>& objects = block->objects;
        if (objects.size() <= (size_t)n) objects.resize((size_t)n + 1);
        SharedObject& object = objects[(size_t)n];
        if (object.block_serial != block->serial) {
            object.block_serial = block->serial;
            object.address = arena_take(sizeof(T), std::max(alignment, alignof(T)));
        }
        return *(T*)object.address;
    }
};

EMULATOR_UNSEEN inline uint32_t shared_address(const void* p) {
    const char* c = (const char*)p;
    if (!current) die("__cvta_generic_to_shared outside of a kernel");
    if (c < block->arena || c > block->arena + block->arena_used) die("the address %p is not in shared memory", p);
    return (uint32_t)(c - block->arena);
}

EMULATOR_UNSEEN inline char* shared_pointer(uint32_t address, size_t bytes, Place place) {
    if (address + bytes > block->arena_used)
        die_at(place, "%08x is not an address in shared memory", address);
    return block->arena + address;
}

// ------------------------------------------------------------------------------------------------
// 8. Copies
//
// cp.async may write at any time between its issue and the wait for its group. Late copies are done at the wait, which
// exposes reads without a wait; early ones at the issue, which exposes overwriting what others still read.

EMULATOR_UNSEEN inline void copy_perform(const Copy& c) {
    memcpy(c.to, c.from, c.bytes_read);
    memset(c.to + c.bytes_read, 0, c.bytes - c.bytes_read);
}

EMULATOR_UNSEEN inline void copy_start(uint32_t to, const void* from, unsigned bytes, unsigned bytes_read,
                                       const Place* place) {
    if (bytes != 4 && bytes != 8 && bytes != 16)
        die_at(*place, "cp.async of %u bytes: only 4, 8 and 16", bytes);
    if (bytes_read > bytes)
        die_at(*place, "cp.async reads %u bytes to write %u", bytes_read, bytes);
    Copy c = {shared_pointer(to, bytes, *place), (const char*)from, bytes, bytes_read, current->copy_group, place};
    if ((uintptr_t)c.to % bytes || (uintptr_t)c.from % bytes)
        die_at(*place, "cp.async of %u bytes from %p to shared %08x: both must be aligned to them", bytes, from, to);
    race_check(current, c.from, c.bytes_read, READ, *place);
    race_check(current, c.to, c.bytes, COPY_START, *place);
    count_access(current, c.from, c.bytes_read, COPY_START, current->ptx_from);
    count_access(current, c.to, c.bytes, COPY_START, current->ptx_from);
    if (modes.early_copies) copy_perform(c);
    current->copies.push_back(c);
}

// Waits until at most `pending` of the newest groups are in flight; -1: also for copies that have no group yet.
EMULATOR_UNSEEN inline void copy_wait(Thread* t, int pending) {
    size_t done = 0;
    while (done < t->copies.size() && (pending < 0 || (int)t->copies[done].group < (int)t->copy_group - pending)) {
        const Copy& c = t->copies[done];
        race_check(t, c.from, c.bytes_read, READ, *c.place);
        race_check(t, c.to, c.bytes, COPY_END, *c.place);
        if (!modes.early_copies) copy_perform(c);
        done++;
    }
    t->copies.erase(t->copies.begin(), t->copies.begin() + (ptrdiff_t)done);
}

// ------------------------------------------------------------------------------------------------
// 9. Grids

EMULATOR_UNSEEN inline void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    const void* old_stack;
    size_t old_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &old_stack, &old_bytes);
#endif
#ifdef EMULATE_RACE
    unseen = false;
#endif
    block->call(block->context);
#ifdef EMULATE_RACE
    unseen = true;
#endif
    Thread* self = current;
    copy_wait(self, -1);
    self->returned = true;
    block->running--;
    block->warps[self->warp].returned |= 1u << self->lane;
    release_from_returned();
    Thread* next = pick();
    if (next == nullptr && block->running) deadlock();
    switch_to(next, true);
    __builtin_unreachable();
}

// Makes room for n threads and their stacks.
EMULATOR_UNSEEN inline void threads_reserve(Block* b, unsigned n) {
    size_t had = b->threads.size();
    if (had >= n) return;
    b->threads.resize(n);
    for (size_t i = had; i < n; i++) {
        size_t bytes = STACK_BYTES + STACK_GUARD_BYTES;
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, STACK_GUARD_BYTES, PROT_NONE) != 0)
            die("no memory for the stacks of %u fibers: EMULATE_THREADS=1 needs least", n);
        Thread& t = b->threads[i];
        t.stack = (char*)memory + STACK_GUARD_BYTES;
        t.number = (unsigned)i;
        t.warp = t.number / LANES;
        t.lane = t.number % LANES;
    }
}

// An OS thread ends: frees what it needed to run blocks.
EMULATOR_UNSEEN inline void memory_end(char* from, size_t unused, size_t bytes) {
    set_poison(from, bytes, false);
    munmap(from - unused, unused + bytes);
}

EMULATOR_UNSEEN inline Block::~Block() {
    for (Thread& t : threads) memory_end(t.stack, STACK_GUARD_BYTES, STACK_BYTES);
    if (arena) memory_end(arena, 0, ARENA_BYTES);
    block = nullptr;
}

EMULATOR_UNSEEN inline void run_block(uint64_t number, dim3 grid, size_t dynamic_bytes) {
    Block* b = block;
    blockIdx.x = (unsigned)(number % grid.x);
    blockIdx.y = (unsigned)(number / grid.x % grid.y);
    blockIdx.z = (unsigned)(number / grid.x / grid.y);
    b->serial++;
    b->running = b->count;
    b->random = 0x9E3779B97F4A7C15u * (number + 1 + 1000003u * (uint64_t)modes.seed);
    race_new_block();
    for (unsigned w = 0; w < WARPS; w++) {
        unsigned lanes = b->count > w * LANES ? std::min(LANES, b->count - w * LANES) : 0;
        unsigned mask = lanes == LANES ? ALL_LANES : (1u << lanes) - 1;
        b->warps[w].ready = mask;
        b->warps[w].returned = ~mask;
        b->warps[w].meetings_count = 0;
        race_new_interval(&b->warps[w].interval);
    }
    draw_speeds();
    arena_open(dynamic_bytes);
    for (unsigned i = 0; i < b->count; i++) {
        Thread& t = b->threads[i];
        t.returned = false;
        t.copies.clear();
        t.copy_group = 0;
        t.waits_for = nullptr;
        t.waits_at = Place();
        // Frames of the last fiber_main, which did not return.
        set_poison(t.stack + STACK_BYTES - PAGE_BYTES, PAGE_BYTES, false);
        void** frame = (void**)(t.stack + STACK_BYTES) - FRAME_WORDS;
        memset(frame, 0, FRAME_WORDS * sizeof(void*));
        frame[FRAME_ENTRY] = (void*)fiber_main;
        t.stack_pointer = frame;
    }
    count_block_begin();
    switch_to(pick(), false);
    count_block_end();
    arena_check();
}

// A wrong address also gives a diagnosis. In host code, faults that the runtime cannot explain are left to the system.
EMULATOR_UNSEEN inline void on_bad_address(int, siginfo_t* info, void*) {
    const char* address = (const char*)info->si_addr;
    if (current && address >= current->stack - STACK_GUARD_BYTES && address < current->stack)
        die("a thread's stack of %zu bytes overflows: arrays in registers or local memory are too large", STACK_BYTES);
    explain_bad_address(address);
#ifndef __SANITIZE_ADDRESS__
    if (current) die("access to the address %p, where there is no memory", (const void*)address);
#endif
    sigaction(SIGSEGV, &action_before, nullptr);
}

// The handler needs its own stack, in case the fiber's is full.
EMULATOR_UNSEEN inline void prepare_for_bad_addresses() {
#ifndef __SANITIZE_ADDRESS__
    static thread_local char* handler_stack;
    if (handler_stack) return;
    constexpr size_t bytes = 64 << 10;
    handler_stack = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = bytes;
    sigaltstack(&stack, nullptr);
#endif
}

// Prepares this OS thread to run blocks.
EMULATOR_UNSEEN inline void block_prepare(dim3 grid, dim3 size, void (*call)(void*), void* context) {
    static thread_local std::unique_ptr<Block> own;
    if (block == nullptr) own.reset(new Block());
    Block* b = block = own.get();
    prepare_for_bad_addresses();
    b->count = size.x * size.y * size.z;
    b->call = call;
    b->context = context;
    blockDim = uint3{size.x, size.y, size.z};
    gridDim = uint3{grid.x, grid.y, grid.z};
    threads_reserve(b, b->count);
    for (unsigned i = 0; i < b->count; i++)
        b->threads[i].index = uint3{i % size.x, i / size.x % size.y, i / size.x / size.y};
#ifdef __SANITIZE_ADDRESS__
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &b->main_stack_bytes);
    pthread_attr_destroy(&attributes);
    b->main_stack = stack;
#endif
}

// The i-th block to run. Random: offset + i stride, with a stride coprime to the number of blocks, so that each block
// is run once.
EMULATOR_UNSEEN inline uint64_t nth_block(uint64_t i, uint64_t blocks) {
    if (modes.order == REVERSE) return blocks - 1 - i;
    if (modes.order == FORWARD) return i;
    uint64_t random = 0x9E3779B97F4A7C15u * (modes.seed + 1), stride = (random >> 40) % blocks + 1, a, b;
    do {
        stride++;
        for (a = blocks, b = stride; b; std::swap(a, b)) a %= b;
    } while (a != 1);
    return ((random >> 33) % blocks + i * stride) % blocks;
}

EMULATOR_UNSEEN inline void run_grid(dim3 grid, dim3 size, size_t dynamic_bytes, void (*call)(void*), void* context) {
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    Launch here = launch;
    race_new_launch();
    count_new_launch(blocks, size.x * size.y * size.z);
    device_memory_open();
#ifdef _OPENMP
    uint64_t workers = modes.threads ? modes.threads : (unsigned)omp_get_max_threads();
    if (workers > blocks) workers = blocks;
    #pragma omp parallel num_threads((int)workers)
#endif
    {
        launch = here;
        block_prepare(grid, size, call, context);
#ifdef _OPENMP
        #pragma omp for schedule(dynamic, 1)
#endif
        for (uint64_t i = 0; i < blocks; i++) run_block(nth_block(i, blocks), grid, dynamic_bytes);
        launch = Launch{};
    }
    device_memory_close();
}

// Runs a whole grid now; each thread calls call_one_thread() once, with threadIdx and the others set.
template <class F>
inline void run_grid(dim3 grid, dim3 size, size_t dynamic_bytes, F&& call_one_thread) {
    using Call = std::remove_reference_t<F>;
    run_grid(grid, size, dynamic_bytes, [](void* f) { (*(Call*)f)(); }, (void*)&call_one_thread);
}

// Checks for what the driver would refuse.
EMULATOR_UNSEEN inline void launch_check(dim3 grid, dim3 size, size_t dynamic_bytes) {
    uint64_t threads = (uint64_t)size.x * size.y * size.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        die("a grid of (%u,%u,%u) blocks: from 1 to 2147483647, 65535 and 65535 are possible", grid.x, grid.y, grid.z);
    if (threads == 0 || threads > BLOCK_LIMIT || size.z > 64)
        die("a block of (%u,%u,%u) threads: from 1 to %u together are possible, and 64 in z", size.x, size.y, size.z,
            BLOCK_LIMIT);
    if (dynamic_bytes > launch.dynamic_limit)
        die("a launch with %zu bytes of dynamic shared memory, of which %zu are allowed: before it, call "
            "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)",
            dynamic_bytes, launch.dynamic_limit);
}

// The first statement of a kernel with __launch_bounds__; bounds after the first one concern only the compiler.
template <class... More>
EMULATOR_UNSEEN inline void launch_bounds(long threads, More...) {
    if (current && (long)block->count > threads)
        die("a block of %u threads: the kernel's __launch_bounds__ allow %ld", block->count, threads);
}

// kernel<<<grid, block, shared, stream>>>(arguments) is Kernel(...)(grid, block, shared, stream)(arguments): arguments
// are converted to the kernel's parameters and copied at the launch, as in CUDA, whenever it runs.
template <class... Parameters>
struct Kernel {
    const char* name;
    Place place;
    void (*function)(Parameters...);

    auto operator()(dim3 grid, dim3 size, size_t dynamic_bytes = 0, cudaStream_t stream = nullptr) const {
        Launch called;
        called.kernel = name;
        called.function = (const void*)function;
        called.place = place;
        auto allowed = shared_allowed.find((const void*)function);
        called.asked = allowed != shared_allowed.end();
        called.dynamic_limit = called.asked ? allowed->second : STATIC_SHARED_LIMIT;
        auto kernel = function;
        return [=](Parameters... arguments) {
            launch = called;
            launch_check(grid, size, dynamic_bytes);
            launch = Launch{};
            if (modes.launches)
                return launches_note((const void*)kernel, grid, size, dynamic_bytes, (const Parameters&)arguments...);
            check_kernel_arguments(called.kernel, called.place, arguments...);
            std::tuple<Parameters...> copies(arguments...);
            auto run = [=] {
                launch = called;
                launch.arguments = (const char*)&copies;
                launch.argument_bytes = sizeof copies;
                run_grid(grid, size, dynamic_bytes, [&] { std::apply(kernel, copies); });
            };
            enqueue(stream, run, called.kernel, called.place);
        };
    }
};

template <class... Parameters>
inline Kernel<Parameters...> kernel_named(const char* name, void (*function)(Parameters...),
                                          Place place = EMULATOR_HERE) {
    return {name, place, function};
}
#define EMULATOR_KERNEL(...) emulator::kernel_named(#__VA_ARGS__, __VA_ARGS__)

}  // namespace emulator

// Calls that take a kernel by its name, as CUDA's C++ headers do.
template <class... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Parameters...), int size,
                                                                 size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void*)kernel, size, shared);
}

#include "device.h"
#include "ptx.h"
#ifdef EMULATE_RACE
#include "count.h"
#include "race.h"
#endif

#endif  // EMULATOR_H
