// race.h: finds data races between the threads of a kernel, in shared and in global memory.
//
// The compiler's -fsanitize=thread inserts a call of __tsan_read4, __tsan_write8 and so on before each memory access.
// Its library is not linked: those functions are defined here. For each byte they record the last write and the last
// read.
//
// Two accesses to a byte race if
//   - they are of different threads, at least one writes, and not both are atomic,
//   - and nothing orders them: in one warp, a __syncwarp or a barrier in between; in one block, a barrier; between two
//     blocks, only the end of the kernel.
// A cp.async counts as writing from its start to the wait for its group, and races with any access in between.
// That is the memory model of CUDA without fences ("CUDA C++ Programming Guide", memory consistency). It does not
// depend on the order in which the threads happened to run.
//
// Time is counted in intervals: a counter that is incremented when a block begins and when a barrier opens. Blocks run
// sequentially here, so an interval's number tells whether an access was before this launch, before this block, before
// the last barrier, or after it.
//
// Build: g++ -O1 -g -fno-pie -DEMULATE_RACE -fsanitize=thread -c x.cu; g++ -no-pie x.o (without -fsanitize=thread)

#ifndef EMULATOR_RACE_H
#define EMULATOR_RACE_H

#include <array>
#include <unordered_map>

namespace emulator {

struct Trace {
    uint32_t interval, warp_interval;
    uint16_t thread;
    bool atomic, in_flight;    // in_flight: a cp.async that has not been waited for
    uint8_t readers;           // of a read, a set: other threads of the warp, of the block, of other blocks also read
    int line;                  // -1: `where` is a code address, else a file name
    const void* where;
};
enum { OTHER_LANES = 1, OTHER_WARPS = 2, OTHER_BLOCKS = 4 };

struct Shadow {                // of one byte
    Trace write, read;
};

struct BlockBegin {
    uint32_t interval;
    uint3 index;
};

inline uint32_t interval_now, interval_of_launch, interval_of_block;
inline std::vector<BlockBegin> block_begins;  // of this launch
inline std::unordered_map<uintptr_t, Shadow*> shadow_pages;

// Reported races: each pair of places only once.
using Places = std::array<std::pair<const void*, int>, 2>;
inline std::map<Places, size_t> races;
constexpr size_t RACES_SHOWN = 8;

EMULATOR_UNSEEN inline void race_new_interval(uint32_t* interval) { *interval = ++interval_now; }

EMULATOR_UNSEEN inline void race_new_launch() {
    block_begins.clear();
    interval_of_launch = interval_now + 1;
}

EMULATOR_UNSEEN inline void race_new_block() {
    race_new_interval(&block->interval);
    interval_of_block = block->interval;
    block_begins.push_back({block->interval, blockIdx});
}

EMULATOR_UNSEEN inline Shadow* shadow_of(uintptr_t address) {
    static uintptr_t last_page;
    static Shadow* last_shadow;
    uintptr_t page = address / PAGE_BYTES;
    if (page != last_page || !last_shadow) {
        Shadow*& shadow = shadow_pages[page];
        if (!shadow) {
            void* memory = mmap(nullptr, PAGE_BYTES * sizeof(Shadow), PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED)
                die("no memory for the race check, which takes %zu bytes for each byte", sizeof(Shadow));
            shadow = (Shadow*)memory;
        }
        last_page = page;
        last_shadow = shadow;
    }
    return last_shadow + address % PAGE_BYTES;
}

// Whether `before` and `now` are unordered.
EMULATOR_UNSEEN inline bool concurrent(const Trace& before, const Trace& now, bool shared) {
    if (before.interval < interval_of_launch || (before.atomic && now.atomic)) return false;
    bool same_block = before.interval >= interval_of_block;
    if (shared) {
        if (!same_block) return false;
        if (before.in_flight) return true;
    } else if (!same_block || (before.readers & OTHER_BLOCKS)) {
        return true;
    }
    if (before.interval != now.interval) return false;
    if ((before.readers & OTHER_WARPS) || before.thread / LANES != now.thread / LANES) return true;
    if (before.warp_interval != now.warp_interval) return false;
    return before.thread != now.thread || (before.readers & OTHER_LANES);
}

EMULATOR_UNSEEN inline void describe(const Trace& t) {
    uint3 index = {0, 0, 0};
    for (const BlockBegin& begin : block_begins) {
        if (begin.interval <= t.interval) index = begin.index;
    }
    fprintf(stderr, "    block (%u,%u,%u) thread %u at ", index.x, index.y, index.z, t.thread);
    if (t.line >= 0) {
        fprintf(stderr, "%s:%d\n", (const char*)t.where, t.line);
        return;
    }
    char command[200], line[400] = "";
    snprintf(command, sizeof command, "addr2line -e /proc/%d/exe %p 2>/dev/null", (int)getpid(),
             (const void*)((const char*)t.where - 1));
    fflush(stderr);
    FILE* pipe = popen(command, "r");
    if (!pipe || !fgets(line, sizeof line, pipe))
        snprintf(line, sizeof line, "%p (addr2line, of binutils, would name the line)\n", t.where);
    if (pipe) pclose(pipe);
    fputs(line, stderr);
}

EMULATOR_UNSEEN inline void report(const char* what, const Trace& before, const Trace& now, uintptr_t address,
                                   bool shared) {
    Places places = {{{before.where, before.line}, {now.where, now.line}}};
    if (races[places]++ > 0 || races.size() > RACES_SHOWN) return;
    fflush(stdout);
    fprintf(stderr, "emulator: race in kernel %s: %s of %s memory", launch.kernel ? launch.kernel : "?", what,
            shared ? "shared" : "global");
    if (shared) fprintf(stderr, ", offset %zu", (size_t)(address - (uintptr_t)block->arena));
    else fprintf(stderr, " at %p", (void*)address);
    fprintf(stderr, "\n");
    describe(before);
    describe(now);
}

EMULATOR_UNSEEN inline void race_record(const Thread* t, uintptr_t address, size_t bytes, Access access,
                                        const void* where, int line) {
    uintptr_t arena = (uintptr_t)block->arena;
    bool shared = address >= arena && address < arena + ARENA_BYTES;
    Trace now = {};
    now.interval = block->interval;
    now.warp_interval = block->warps[t->warp].interval;
    now.thread = (uint16_t)t->number;
    now.atomic = access == ATOMIC;
    now.in_flight = access == COPY_START;
    now.line = line;
    now.where = where;
    for (uintptr_t a = address; a < address + bytes; a++) {
        Shadow* s = shadow_of(a);
        if (access == COPY_END) {
            s->write = now;
            continue;
        }
        if (concurrent(s->write, now, shared)) {
            const char* what = access == READ ? "a read after a write" : "two writes";
            if (s->write.in_flight) what = "an access during a cp.async";
            report(what, s->write, now, a, shared);
            s->write = now;
            return;
        }
        if (access == READ) {
            Trace read = now;
            if (s->read.interval >= interval_of_launch) {  // others read it too; later writes must wait for all
                const Trace& other = s->read;
                bool same_block = other.interval >= interval_of_block;
                if (!same_block || (other.readers & OTHER_BLOCKS)) read.readers |= OTHER_BLOCKS;
                if (same_block && other.interval == now.interval) {
                    if (other.thread / LANES != now.thread / LANES) read.readers |= OTHER_WARPS;
                    else if (other.warp_interval == now.warp_interval && other.thread != now.thread)
                        read.readers |= OTHER_LANES;
                    read.readers |= other.readers & OTHER_WARPS;
                    if (other.warp_interval == now.warp_interval) read.readers |= other.readers & OTHER_LANES;
                }
            }
            s->read = read;
        } else {
            if (concurrent(s->read, now, shared)) {
                report("a write after a read", s->read, now, a, shared);
                s->read = Trace{};
                return;
            }
            s->write = now;
        }
    }
}

EMULATOR_UNSEEN inline void race_check(const Thread* t, const void* address, size_t bytes, Access access, Place place) {
    race_record(t, (uintptr_t)address, bytes, access, place.file, place.line);
}

// Called by the compiler's hooks. No other thread uses a thread's own stack, and nobody writes the launch's arguments.
EMULATOR_UNSEEN inline void race_access(const void* address, size_t bytes, Access access, const void* where) {
    if (unseen || !current) return;
    const char* a = (const char*)address;
    if (a >= current->stack && a < current->stack + STACK_BYTES) return;
    if (a >= launch.arguments && a < launch.arguments + launch.argument_bytes) return;
    unseen = true;
    race_record(current, (uintptr_t)address, bytes, access, where, -1);
    count_access(current, address, bytes, access, where);
    unseen = false;
}

inline struct RaceReport {
    EMULATOR_UNSEEN ~RaceReport() {
        if (races.empty()) return;
        fprintf(stderr, "emulator: %zu pairs of lines race\n", races.size());
        fflush(nullptr);
        _exit(DIAGNOSIS);
    }
} race_report;

}  // namespace emulator

#define EMULATOR_HOOK extern "C" __attribute__((weak, used, no_sanitize("thread")))
#define EMULATOR_ACCESS(name, bytes, access) \
    EMULATOR_HOOK void name(void* p) { emulator::race_access(p, bytes, access, __builtin_return_address(0)); }
#define EMULATOR_ACCESSES(n)                                  \
    EMULATOR_ACCESS(__tsan_read##n, n, emulator::READ)             \
    EMULATOR_ACCESS(__tsan_write##n, n, emulator::WRITE)           \
    EMULATOR_ACCESS(__tsan_unaligned_read##n, n, emulator::READ)   \
    EMULATOR_ACCESS(__tsan_unaligned_write##n, n, emulator::WRITE)
EMULATOR_ACCESSES(1)
EMULATOR_ACCESSES(2)
EMULATOR_ACCESSES(4)
EMULATOR_ACCESSES(8)
EMULATOR_ACCESSES(16)
EMULATOR_HOOK void __tsan_read_range(void* p, size_t n) {
    emulator::race_access(p, n, emulator::READ, __builtin_return_address(0));
}
EMULATOR_HOOK void __tsan_write_range(void* p, size_t n) {
    emulator::race_access(p, n, emulator::WRITE, __builtin_return_address(0));
}
EMULATOR_HOOK void __tsan_vptr_update(void**, void*) {}
EMULATOR_HOOK void __tsan_vptr_read(void**) {}
EMULATOR_HOOK void __tsan_func_entry(void* caller) { emulator::count_call(caller); }
EMULATOR_HOOK void __tsan_func_exit() { emulator::count_return(); }
EMULATOR_HOOK void __tsan_init() {}

// std::atomic in host code and in the emulator.
#define EMULATOR_ATOMICS(bits)                                                                                        \
    EMULATOR_HOOK uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int) {                  \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                  \
    }                                                                                                                 \
    EMULATOR_HOOK void __tsan_atomic##bits##_store(volatile uint##bits##_t* p, uint##bits##_t v, int) {               \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                     \
    }                                                                                                                 \
    EMULATOR_HOOK uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* p, uint##bits##_t v, int) {  \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                                 \
    EMULATOR_HOOK uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* p, uint##bits##_t v, int) { \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                 \
    EMULATOR_HOOK uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t* p, uint##bits##_t v, int) { \
        return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                 \
    EMULATOR_HOOK int __tsan_atomic##bits##_compare_exchange_strong(                                                  \
        volatile uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t v, int, int) {                           \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
    }                                                                                                                 \
    EMULATOR_HOOK int __tsan_atomic##bits##_compare_exchange_weak(                                                    \
        volatile uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t v, int, int) {                           \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
    }
EMULATOR_ATOMICS(8)
EMULATOR_ATOMICS(16)
EMULATOR_ATOMICS(32)
EMULATOR_ATOMICS(64)

#endif  // EMULATOR_RACE_H
