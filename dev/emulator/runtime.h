// runtime.h: the CUDA runtime API on the host: memory, streams, events, devices. emulator.h includes it.
//
//   1. places    the source position of a call, for the reports
//   2. memory    device and pinned allocations between guard pages; who may touch them when
//   3. streams   work that is held until something waits for it
//   4. copies    which of them wait, which are staged
//   5. interface cudaMalloc, cudaMemcpyAsync, cudaEventRecord ...
//   6. calls     macros that record the line of each call
//
// GPU programs have two kinds of mistakes that their results often hide: touching memory from the wrong side, and
// relying on an order of events that nothing guarantees. The emulator exposes both.
//
// Memory. Each allocation is its own mapping between inaccessible pages. All device memory is inaccessible while host
// code runs (device_memory_open and _close), and permanently once freed: addresses are not reused. So an access from
// the wrong side is a page fault, which a handler turns into a diagnosis, in any build. Up to 255 bytes lie between the
// last byte and those pages. They hold a pattern that is verified whenever work has run; in a build with
// AddressSanitizer they are poisoned. Not detected: a host thread that touches device memory while another waits.
//
// Order. EMULATE_STREAMS=now runs each piece of work when it is enqueued: the device is always done, the host never too
// early. (What waits for another process, and what depends on that, is held until it can run.) EMULATE_STREAMS=delayed
// holds it until a synchronization demands it: the device is as late as it may be. If there are several streams,
// EMULATE_OTHERS sets what the streams do that the synchronization does not name:
//     behind  they run only what the named one waits for. A missing wait between a producer and its consumer shows as
//             stale or poisoned data.
//     ahead   they run first, as far as their own waits allow. A missing wait before memory is reused shows as data
//             from the future.
// A GPU may behave in any of these ways. A correct program gives the same results in each mode.
//
// Whatever CUDA leaves open is decided against the program: a copy between device memory and pageable memory returns
// early if it may, cudaMemset and copies within the device never wait, a query returns "not ready" a few times, and
// cudaFree waits only for the default stream.
//
// Errors that a program can meet and handle (no memory, not ready, no such device) are returned, as by CUDA. Errors
// that only a mistake can cause end the program through emulator::die.
//
// emulator.h's part in this: device_memory_open and _close around a grid; enqueue with the kernel's name and place;
// check_kernel_arguments at a launch; the page fault handler.

#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#ifndef EMULATOR_H
#error "include emulator.h, which includes this file"
#endif

#include <deque>

namespace emulator {

// ------------------------------------------------------------------------------------------------
// 1. Places

inline thread_local Place call_place;       // of the latest call by this host thread
inline thread_local const char* call_name;  // and its name

inline void called_at(const char* file, int line) { call_place = Place{file, line}; }

inline std::string text_of(Place place) {
    return place.file ? std::string(place.file) + ":" + std::to_string(place.line) : std::string("an unknown line");
}

inline std::string call_text() { return std::string(call_name) + " at " + text_of(call_place); }

// One lock for everything here. It is held while work runs: host threads use the device in turn. Only work that waits
// for another process lets others in: let_others_run.
class DeviceLock {
public:
    void lock() { mutex.lock(), levels++; }
    void unlock() { levels--, mutex.unlock(); }
    int release() {  // by its owner, however often it has locked
        int all = levels;
        for (int i = 0; i < all; i++) unlock();
        return all;
    }
    void acquire(int all) {
        for (int i = 0; i < all; i++) lock();
    }

private:
    std::recursive_mutex mutex;
    int levels = 0;
};
inline DeviceLock runtime_lock;

// ------------------------------------------------------------------------------------------------
// 2. Memory
//
// An allocation of n bytes, aligned to 256 as CUDA promises, ends as close to the guard pages as that allows:
//
//     | guard pages | slack, PATTERN | n bytes | slack, at most 255 bytes | guard pages |
//
// Pinned memory has the same layout. The host may use it, except where a held copy will read it (then the host must not
// write) or write it (then the host must not touch it). Only pages can be protected, so this is enforced on pages where
// the allocation has only bytes of the copy: no legal access is refused.

// The emulated device's memory; pages are allocated when touched.
const size_t DEVICE_BYTES = modes.launches ? (size_t)1 << 42 : (size_t)8 << 30;
const size_t DEVICE_ALIGNMENT = 256;
inline const size_t page_size = (size_t)sysconf(_SC_PAGESIZE);
const size_t HUGE_PAGE_BYTES = 2 << 20;       // for large allocations, to open them quickly
const size_t DEVICE_GUARD_BYTES = 1 << 20;    // on either side of an allocation: address space, no memory
const unsigned char PATTERN = 0xff;           // a NaN in every floating-point type

enum Memory { PAGEABLE, PINNED, DEVICE };

struct PendingCopy {  // of pinned memory
    uint64_t serial;
    char *begin, *end;
    bool writes;
    Place place;
};

struct Allocation {
    Memory memory;
    char* data;
    size_t bytes;
    char* pages;  // what lies between the guards
    size_t page_bytes;
    bool freed;
    Place allocated_at, freed_at;
    std::vector<PendingCopy> pending;
};

struct Work;
inline std::map<char*, Allocation> allocations;  // by the address of the front guard; freed ones stay
inline std::vector<Allocation*> live;            // those not freed: few, and scanned for each piece of work
inline size_t device_bytes_used;
inline int open_depth;       // > 0 while device memory is open
inline const Work* running;  // the work that runs now, or nullptr

inline Allocation* allocation_at(const void* address) {
    std::map<char*, Allocation>::iterator next = allocations.upper_bound((char*)address);
    if (next == allocations.begin()) return nullptr;
    Allocation* a = &std::prev(next)->second;
    return (char*)address < a->pages + a->page_bytes + DEVICE_GUARD_BYTES ? a : nullptr;
}

inline void protect_pages(char* begin, size_t bytes, int protection) {
    if (bytes && mprotect(begin, bytes, protection) != 0) {
        die("mprotect failed: too many allocations for this system (vm.max_map_count)?");
    }
}

// Protects an allocation against host code as far as necessary.
inline void close_allocation(const Allocation* a) {
    if (a->memory == DEVICE) protect_pages(a->pages, a->page_bytes, PROT_NONE);
    for (const PendingCopy& copy : a->pending) {
        size_t page = page_size, first = (size_t)(copy.begin - a->pages), end = (size_t)(copy.end - a->pages);
        first = copy.begin == a->data ? 0 : (first + page - 1) / page * page;
        end = copy.end == a->data + a->bytes ? a->page_bytes : end / page * page;
        if (first < end) protect_pages(a->pages + first, end - first, copy.writes ? PROT_NONE : PROT_READ);
    }
}

inline void open_allocation(const Allocation* a) {
    protect_pages(a->pages, a->page_bytes, PROT_READ | PROT_WRITE);
}

// Opens all device memory, and what copies of pinned memory need.
inline void protect_memory(bool opens, bool pinned_too) {
    for (const Allocation* a : live) {
        if (a->memory == PINNED && (!pinned_too || a->pending.empty())) continue;
        opens ? open_allocation(a) : close_allocation(a);
    }
}

// Called around all work of the device. Calls nest.
inline void device_memory_open() {
    std::lock_guard<DeviceLock> guard(runtime_lock);
    if (open_depth++ == 0) protect_memory(true, true);
}

inline void device_memory_close() {
    std::lock_guard<DeviceLock> guard(runtime_lock);
    if (--open_depth == 0) protect_memory(false, true);
}

inline std::string bytes_and_place(const Allocation* a) {
    std::string text = std::to_string(a->bytes) + " bytes of " + (a->memory == DEVICE ? "device" : "pinned");
    text += " memory allocated at " + text_of(a->allocated_at);
    return a->freed ? text + " and freed at " + text_of(a->freed_at) : text;
}

// Describes an address in words.
inline std::string describe_address(const void* address) {
    if (!address) return "a null pointer";
    const Allocation* a = allocation_at(address);
    if (!a) return "pageable host memory";
    std::ptrdiff_t offset = (char*)address - a->data;
    const char* where = offset < 0 ? " (before the beginning)" : (size_t)offset >= a->bytes ? " (past the end)" : "";
    return "byte " + std::to_string(offset) + where + " of the " + bytes_and_place(a);
}

// Describes what a held copy will do, as the end of a sentence.
inline std::string pending_text(const PendingCopy& copy) {
    return "which the copy enqueued at " + text_of(copy.place) + " has yet to " + (copy.writes ? "write" : "read") +
           ": wait for it first";
}

inline std::string running_text();

// Checks the slack after work of the device, or when an allocation is freed. Its pages must be open.
inline void check_slack([[maybe_unused]] const Allocation* a) {
#ifndef __SANITIZE_ADDRESS__  // otherwise these bytes are poisoned, and the access itself has been reported
    if (a->memory == PINNED && running) return;  // the writer is not known
    std::string who = running ? running_text() : "somebody";
    const char* first = a->data - a->pages > (std::ptrdiff_t)DEVICE_ALIGNMENT ? a->data - DEVICE_ALIGNMENT : a->pages;
    const char* ranges[2][2] = {{first, a->data}, {a->data + a->bytes, a->pages + a->page_bytes}};
    for (auto& range : ranges) {
        for (const char* p = range[0]; p < range[1]; p++) {
            if ((unsigned char)*p == PATTERN) continue;
            die("out of bounds: %s wrote %s", who.c_str(), describe_address(p).c_str());
        }
    }
#endif
}

// Ends the program if the address of a page fault is in our memory; otherwise returns.
inline void explain_bad_address(const void* address) {
    const Allocation* a = allocation_at(address);
    if (!a) return;
    std::string who = running_text();
    std::string what = describe_address(address);
    bool inside = (char*)address >= a->data && (char*)address < a->data + a->bytes;
    if (a->freed) die("use after free: %s touches %s", who.c_str(), what.c_str());
    if (!inside) die("out of bounds: %s touches %s", who.c_str(), what.c_str());
    for (const PendingCopy& copy : a->pending) {
        if ((char*)address < copy.begin || (char*)address >= copy.end) continue;
        die("host code %s %s, %s", copy.writes ? "touches" : "writes", what.c_str(), pending_text(copy).c_str());
    }
    die("%s touches %s: copy it with cudaMemcpy", who.c_str(), what.c_str());
}

// Our page fault handler, and the previous one, of the system or of a sanitizer.
inline void on_bad_address(int, siginfo_t* information, void*);
inline struct sigaction action_before;

inline void report_at_exit(int status, void*);

inline void runtime_start() {
    static bool started = false;
    if (started) return;
    started = true;
    struct sigaction action = {};
    action.sa_sigaction = on_bad_address;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &action_before);
    on_exit(report_at_exit, nullptr);
}

inline cudaError_t allocate_memory(void** out, size_t bytes, Memory memory) {
    runtime_start();
    *out = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > DEVICE_BYTES - (memory == DEVICE ? device_bytes_used : 0)) return cudaErrorMemoryAllocation;
    size_t aligned = (bytes + DEVICE_ALIGNMENT - 1) / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT;
    Allocation a;
    a.memory = memory;
    a.bytes = bytes;
    a.page_bytes = (aligned + page_size - 1) / page_size * page_size;
    bool huge = a.page_bytes >= HUGE_PAGE_BYTES;
    size_t mapping_bytes = a.page_bytes + 2 * DEVICE_GUARD_BYTES + (huge ? HUGE_PAGE_BYTES : 0);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(nullptr, mapping_bytes, PROT_NONE, flags, -1, 0);
    if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
    a.pages = (char*)mapping + DEVICE_GUARD_BYTES;
    if (huge) {
        a.pages += HUGE_PAGE_BYTES - (uintptr_t)a.pages % HUGE_PAGE_BYTES;
        madvise(a.pages, a.page_bytes, MADV_HUGEPAGE);
    }
    a.data = a.pages + a.page_bytes - aligned;
    a.freed = false;
    a.allocated_at = a.freed_at = call_place;
    open_allocation(&a);
    if (modes.poison) memset(a.data, PATTERN, bytes);
    memset(a.pages, PATTERN, (size_t)(a.data - a.pages));
    memset(a.data + bytes, PATTERN, aligned - bytes);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(a.pages, (size_t)(a.data - a.pages));
    __asan_poison_memory_region(a.data + bytes, aligned - bytes);
#endif
    if (memory == DEVICE) device_bytes_used += bytes;
    if (open_depth == 0) close_allocation(&a);
    live.push_back(&(allocations[(char*)mapping] = a));
    *out = a.data;
    return cudaSuccess;
}

inline void free_memory(void* address, Memory memory) {
    const char* call = call_name;
    Allocation* a = allocation_at(address);
    if (!a || a->memory != memory) {
        die("%s of %s: it frees only what %s returned", call, describe_address(address).c_str(),
            memory == DEVICE ? "cudaMalloc" : "cudaMallocHost or cudaHostAlloc");
    }
    if (a->freed) die("%s: double free of the %s", call, bytes_and_place(a).c_str());
    if (address != a->data) die("%s of %s, which is not its beginning", call, describe_address(address).c_str());
    if (!a->pending.empty())
        die("%s of the %s, %s", call, bytes_and_place(a).c_str(), pending_text(a->pending[0]).c_str());
    open_allocation(a);
    check_slack(a);
    if (memory == DEVICE) device_bytes_used -= a->bytes;
    a->freed = true;
    a->freed_at = call_place;
    live.erase(std::find(live.begin(), live.end(), a));
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(a->pages, a->page_bytes);  // the page fault to come gives a better report
#endif
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;  // gives the pages back, keeps the addresses
    if (mmap(a->pages, a->page_bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) die("mmap failed in %s", call);
}

inline void check_pointer(const char* kernel, Place place, int number, const void* pointer) {
    if (!pointer) return;
    const Allocation* a = allocation_at(pointer);
    bool inside = a && (char*)pointer >= a->data && (char*)pointer <= a->data + a->bytes;  // or one past its end
    if (inside && !a->freed) return;
    die("argument %d of the kernel %s, launched at %s, is %s: it has to be device memory", number, kernel,
        text_of(place).c_str(), describe_address(pointer).c_str());
}

// Refuses a launch's pointer arguments unless they point to device or pinned memory.
template <class... Arguments>
inline void check_kernel_arguments(const char* kernel, Place place, const Arguments&... arguments) {
    std::lock_guard<DeviceLock> guard(runtime_lock);
    int number = 0;
    auto check = [&](const auto& argument) {
        using Argument = std::decay_t<decltype(argument)>;
        number++;
        if constexpr (std::is_pointer_v<Argument> && !std::is_function_v<std::remove_pointer_t<Argument>>) {
            check_pointer(kernel, place, number, (const void*)argument);
        }
    };
    (check(arguments), ...);
}

// ------------------------------------------------------------------------------------------------
// 3. Streams
//
// A stream is a queue. Its pieces of work are numbered 1, 2 ...; `done` of them have run. A piece may depend on others
// (`after`): a wait for an event is an empty piece that comes after the recording, and the default stream and those
// that synchronize with it (all but cudaStreamNonBlocking ones) come after each other. Dependencies are always enqueued
// earlier, so there are no cycles.

struct Stream;

struct Position {
    Stream* stream;
    uint64_t number;
};

struct Work {
    std::string what;
    std::function<void()> run;
    Place place = {};
    uint64_t serial = 0;         // among the work of all streams
    bool host_function = false;
    bool waits = false;          // for another process: a collective
    bool settled = false;        // the host may treat the call that enqueued it as finished
    std::vector<Position> after = {};
};

struct Stream {
    bool with_default;  // synchronizes with the default stream
    bool destroyed;
    std::deque<Work> held;
    bool busy;                   // a host thread runs its first piece
    uint64_t enqueued, done;
    uint64_t last_serial;
    int queries;
};

struct Event {
    bool timed;
    bool destroyed;
    Position recorded;  // number 0: never
    double time;        // of the latest recording that has run, in milliseconds
    int queries;
};

const int QUERIES_UNTIL_READY = 4;  // unsuccessful queries before work proceeds on its own

inline Stream default_stream;
inline std::vector<Stream*> streams = {&default_stream};  // destroyed ones stay, to detect their use
inline std::vector<Event*> events;
inline uint64_t last_serial;

// At exit destroyed streams are freed, with what their queues hold. Live ones are left for a leak checker.
struct FreesDestroyed {
    ~FreesDestroyed() {
        for (Stream* stream : streams) {
            if (stream->destroyed) delete stream;
        }
        for (Event* event : events) {
            if (event->destroyed) delete event;
        }
    }
};
inline FreesDestroyed frees_destroyed;

inline std::string running_text() {
    if (!running) return "host code";
    return "the " + running->what + " enqueued at " + text_of(running->place);
}

template <class Object>
inline Object* object_of(void* handle, const std::vector<Object*>& objects, const char* kind) {
    auto found = std::find(objects.begin(), objects.end(), (Object*)handle);
    if (found == objects.end()) die("%s: %p is not a%s", call_text().c_str(), handle, kind);
    if ((*found)->destroyed) die("%s: the%s was destroyed", call_text().c_str(), strchr(kind, ' '));
    return *found;
}

inline Stream* stream_of(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return &default_stream;
    return object_of((void*)handle, streams, " stream");
}

inline Event* event_of(cudaEvent_t handle) { return object_of((void*)handle, events, "n event"); }

inline void run_until(Position position);

// Of several streams the one whose work was enqueued last runs first: the order that a program expects least.
inline void run_latest_first(std::vector<Position> positions) {
    while (!positions.empty()) {
        size_t latest = 0;
        for (size_t i = 1; i < positions.size(); i++) {
            if (positions[i].stream->last_serial > positions[latest].stream->last_serial) latest = i;
        }
        run_until(positions[latest]);
        positions.erase(positions.begin() + (std::ptrdiff_t)latest);
    }
}

inline void forget_pending(uint64_t serial) {
    for (Allocation* a : live) {
        std::vector<PendingCopy>& pending = a->pending;
        auto done = [serial](const PendingCopy& copy) { return copy.serial == serial; };
        pending.erase(std::remove_if(pending.begin(), pending.end(), done), pending.end());
    }
}

// Memory is open. A host function is host code, but runs in its stream's order: pinned memory stays open to it.
inline void run_work(const Work* work) {
    const Work* outer = running;
    running = work;
    forget_pending(work->serial);
    if (work->host_function) {
        protect_memory(false, false);
        work->run();
        protect_memory(true, false);
    } else {
        work->run();
        for (const Allocation* a : live) check_slack(a);
    }
    running = outer;
}

// Called by work that waits for another process, and for a stream that is busy: kernels of several streams run at a
// time.
inline void let_others_run() {
    const Work* work = running;
    int depth = open_depth;
    running = nullptr;
    open_depth = 0;
    if (depth > 0) protect_memory(false, true);
    int levels = runtime_lock.release();
    usleep(200);
    runtime_lock.acquire(levels);
    if (depth > 0) protect_memory(true, true);
    open_depth = depth;
    running = work;
}

// Memory is open.
inline void run_until(Position position) {
    Stream* stream = position.stream;
    while (stream->done < position.number) {
        if (stream->busy) {
            let_others_run();
            continue;
        }
        stream->busy = true;
        run_latest_first(stream->held.front().after);
        Work work = std::move(stream->held.front());
        stream->held.pop_front();
        run_work(&work);
        stream->done++;
        stream->busy = false;
    }
}

// Whether a position can be reached without waiting for another process. known: how far that is known of each stream.
inline bool can_run(Position position, std::map<Stream*, uint64_t>* known) {
    Stream* stream = position.stream;
    uint64_t* reached = &(*known)[stream];
    *reached = std::max(*reached, stream->done);
    while (*reached < position.number) {
        if (stream->busy) return false;
        const Work& next = stream->held[(size_t)(*reached - stream->done)];
        if (next.waits) return false;
        for (Position before : next.after)
            if (!can_run(before, known)) return false;
        ++*reached;
    }
    return true;
}

inline bool can_run(Position position) {
    std::map<Stream*, uint64_t> known;
    return can_run(position, &known);
}

inline std::vector<Position> ends_of_streams(const Stream* but) {
    std::vector<Position> ends;
    for (Stream* stream : streams) {
        if (stream != but && stream->done < stream->enqueued) ends.push_back(Position{stream, stream->enqueued});
    }
    return ends;
}

// Waits for some positions, as a host thread does. Memory is opened once for all that runs.
inline void demand(const std::vector<Position>& positions) {
    device_memory_open();
    run_latest_first(positions);
    device_memory_close();
}

// Runs what streams hold as far as it waits for no other process.
inline void run_what_can(const Stream* but) {
    std::vector<Position> ends = ends_of_streams(but);
    auto later = [](Position a, Position b) { return a.stream->last_serial > b.stream->last_serial; };
    std::sort(ends.begin(), ends.end(), later);
    device_memory_open();
    for (Position end : ends) {
        Position next = {end.stream, end.stream->done + 1};
        for (; next.number <= end.number && can_run(next); next.number++) run_until(next);
    }
    device_memory_close();
}

// Gives collectives the time to run; set by nccl.h.
inline void (*run_collectives_ahead)() = nullptr;

inline void demand(Position position) {
    if (position.number <= position.stream->done) return;
    if (modes.others_ahead) {
        if (run_collectives_ahead) run_collectives_ahead();
        run_what_can(position.stream);
    }
    demand(std::vector<Position>{position});
}

// Holds a piece of work, or runs it at once. The caller sets `work` except for the queue's own members.
inline Position enqueue_work(Stream* stream, Work work) {
    runtime_start();
    work.place = call_place;
    work.serial = ++last_serial;
    for (Stream* other : streams) {
        bool ordered = (stream == &default_stream && other->with_default) ||
                       (other == &default_stream && stream->with_default);
        if (other != stream && ordered && other->done < other->enqueued) {
            work.after.push_back(Position{other, other->enqueued});
        }
    }
    stream->last_serial = work.serial;
    stream->held.push_back(std::move(work));
    stream->enqueued++;
    Position position = {stream, stream->enqueued};
    if (!modes.delayed_streams && can_run(position)) demand(position);
    return position;
}

// Every call enters here: it takes the lock, and is refused inside a host function, where CUDA forbids API calls.
struct Entry {
    std::lock_guard<DeviceLock> guard;
    explicit Entry(const char* call) : guard(runtime_lock) {
        call_name = call;
        if (running) die("%s called from inside %s: CUDA forbids it", call, running_text().c_str());
    }
};

// For kernels and library calls. They run with device memory open.
inline void enqueue(cudaStream_t stream, std::function<void()> run, const char* name = "of a library",
                    Place place = Place{nullptr, 0}, bool waits = false) {
    Entry entry(name);
    call_place = place;
    Work work = {std::string("kernel ") + name, std::move(run)};
    work.waits = waits;
    enqueue_work(stream_of(stream), std::move(work));
}

inline cudaError_t query(Position position, int* queries) {
    if (position.number <= position.stream->done) return cudaSuccess;
    if (++*queries < QUERIES_UNTIL_READY || !can_run(position)) return cudaErrorNotReady;
    *queries = 0;
    demand(position);
    return cudaSuccess;
}

// At the end of a successful program: reports work that nothing waited for, and memory that was not freed.
inline void report_at_exit(int status, void*) {
    if (status != 0 || running) return;
    for (const Stream* stream : streams) {
        for (const Work& work : stream->held) {
            if (work.settled) continue;
            die("the program ended without waiting for the %s enqueued at %s", work.what.c_str(),
                text_of(work.place).c_str());
        }
    }
    if (!live.empty()) {
        die("leak: %zu allocation%s not freed at the end of the program, among them %s", live.size(),
            live.size() > 1 ? "s" : "", bytes_and_place(live.front()).c_str());
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Copies
//
//     from      to        cudaMemcpy                                   cudaMemcpyAsync
//     pageable  device    waits for earlier work, reads the source     reads the source at once,
//                         at once, writes the device when it likes     writes the device in turn
//     pinned    device    waits                                        reads the source in turn
//     device    host      waits                                        writes in turn
//     device    device    does not wait                                in turn
//     host      host      waits                                        waits

// One end of a copy. Ends the program unless all bytes lie in one live allocation of the side given by `on_device`.
// (Memory that is freed before a copy runs causes a page fault.)
inline Memory check_end(const char* end, const void* address, size_t bytes, bool on_device) {
    const Allocation* a = allocation_at(address);
    std::string where = call_text();
    std::string what = describe_address(address);
    if (!a && on_device) die("%s: its %s, on the device, is %s", where.c_str(), end, what.c_str());
    if (!a) {
        if (!address) die("%s: its %s is a null pointer", where.c_str(), end);
        return PAGEABLE;
    }
    if (a->freed) die("use after free: %s: its %s is %s", where.c_str(), end, what.c_str());
    if ((a->memory == DEVICE) != on_device) {
        die("%s: its %s, %s, is %s", where.c_str(), end, on_device ? "on the device" : "on the host", what.c_str());
    }
    if ((char*)address < a->data || (char*)address > a->data + a->bytes ||
        bytes > (size_t)(a->data + a->bytes - (char*)address)) {
        die("out of bounds: %s: %zu bytes at %s", where.c_str(), bytes, what.c_str());
    }
    return a->memory;
}

inline bool is_device_memory(const void* address) {
    const Allocation* a = allocation_at(address);
    return a && a->memory == DEVICE;
}

inline void note_pending(void* address, size_t bytes, bool writes, uint64_t serial) {
    Allocation* a = allocation_at(address);
    PendingCopy copy = {serial, (char*)address, (char*)address + bytes, writes, call_place};
    a->pending.push_back(copy);
    close_allocation(a);
}

inline cudaError_t copy_memory(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream* stream,
                               bool waits) {
    if (bytes == 0) return cudaSuccess;
    if ((unsigned)kind > cudaMemcpyDefault) die("%s: %d is not a kind of copy", call_text().c_str(), (int)kind);
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to_device = is_device_memory(to);
        from_device = is_device_memory(from);
    }
    Memory to_memory = check_end("destination", to, bytes, to_device);
    Memory from_memory = check_end("source", from, bytes, from_device);
    if ((char*)to < (char*)from + bytes && (char*)from < (char*)to + bytes) {
        die("%s: source and destination overlap", call_text().c_str());
    }
    Work work = {"copy", nullptr};
    if (from_memory == PAGEABLE && to_device) {
        if (waits) demand(enqueue_work(stream, Work{"wait", [] {}}));
        std::vector<char> staged((const char*)from, (const char*)from + bytes);
        work.run = [to, bytes, staged = std::move(staged)] { memcpy(to, staged.data(), bytes); };
        work.settled = waits;
        enqueue_work(stream, std::move(work));
        return cudaSuccess;
    }
    work.run = [to, from, bytes] { memcpy(to, from, bytes); };
    bool within_device = to_device && from_device;
    work.settled = waits && within_device;
    Position position = enqueue_work(stream, std::move(work));
    if ((waits && !within_device) || (!to_device && !from_device)) {
        demand(position);
    } else if (position.number > stream->done) {
        if (to_memory == PINNED) note_pending(to, bytes, true, stream->last_serial);
        if (from_memory == PINNED) note_pending((void*)from, bytes, false, stream->last_serial);
    }
    return cudaSuccess;
}

inline cudaError_t set_memory(void* to, int value, size_t bytes, Stream* stream, bool settled) {
    if (bytes == 0) return cudaSuccess;
    check_end("destination", to, bytes, true);
    if (modes.launches) return fprintf(launches_file(), "{\"memset\": %zu}\n", bytes), cudaSuccess;
    Work work = {"memset", [to, value, bytes] { memset(to, value, bytes); }};
    work.settled = settled;
    enqueue_work(stream, std::move(work));
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------
// 5. Interface

inline thread_local cudaError_t last_error = cudaSuccess;

// Returns an API function's status. An error stays until cudaGetLastError takes it; emulator.h reports launches here.
inline cudaError_t noted(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

inline double milliseconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// Pretended duration of work, which delays the event after it (cublaslt.h).
inline double events_later_ms = 0;

// The device: a small GPU of compute capability 9.0. emulator.h has the limits of a launch.
const int THREADS_PER_MULTIPROCESSOR = 2048, BLOCKS_PER_MULTIPROCESSOR = 32;
const int L2_BYTES = 4 << 20;
const int SHARED_BYTES_RESERVED = 1 << 10;  // that each block takes in addition
inline const int shared_bytes_per_multiprocessor = (int)modes.shared_limit + SHARED_BYTES_RESERVED;

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};

inline const ErrorText* error_text(cudaError_t error) {
    static const ErrorText texts[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
        {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
        {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
         "no kernel image is available for execution on the device"},
        {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
    };
    const ErrorText* text = texts;
    while (text->error != error && text->error != cudaErrorUnknown) text++;
    return text;
}

}  // namespace emulator

extern "C" {

inline cudaError_t cudaMalloc(void** out, size_t bytes) {
    emulator::Entry entry(__func__);
    return emulator::noted(emulator::allocate_memory(out, bytes, emulator::DEVICE));
}

inline cudaError_t cudaFree(void* memory) {
    emulator::Entry entry(__func__);
    if (!memory) return cudaSuccess;
    emulator::demand(emulator::Position{&emulator::default_stream, emulator::default_stream.enqueued});
    emulator::free_memory(memory, emulator::DEVICE);
    return cudaSuccess;
}

inline cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) {
    emulator::Entry entry(__func__);
    (void)flags;  // portable, mapped and write-combined memory all behave the same here
    return emulator::noted(emulator::allocate_memory(out, bytes, emulator::PINNED));
}

inline cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

inline cudaError_t cudaFreeHost(void* memory) {
    emulator::Entry entry(__func__);
    if (memory) emulator::free_memory(memory, emulator::PINNED);
    return cudaSuccess;
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    emulator::Entry entry(__func__);
    *free_bytes = emulator::DEVICE_BYTES - emulator::device_bytes_used;
    *total_bytes = emulator::DEVICE_BYTES;
    return cudaSuccess;
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
    emulator::Entry entry(__func__);
    const emulator::Allocation* a = emulator::allocation_at(pointer);
    bool known = a && !a->freed, device = known && a->memory == emulator::DEVICE;
    memset((void*)out, 0, sizeof *out);
    out->type = device ? cudaMemoryTypeDevice : known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = known ? 0 : -2;  // -2: cudaInvalidDeviceId
    out->devicePointer = known ? (void*)pointer : nullptr;
    out->hostPointer = device ? nullptr : (void*)pointer;
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    emulator::Entry entry(__func__);
    return emulator::copy_memory(to, from, bytes, kind, &emulator::default_stream, true);
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    emulator::Entry entry(__func__);
    return emulator::copy_memory(to, from, bytes, kind, emulator::stream_of(stream), false);
}

inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    emulator::Entry entry(__func__);
    return emulator::set_memory(to, value, bytes, &emulator::default_stream, true);
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    emulator::Entry entry(__func__);
    return emulator::set_memory(to, value, bytes, emulator::stream_of(stream), false);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    emulator::Entry entry(__func__);
    if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return emulator::noted(cudaErrorInvalidValue);
    emulator::Stream* stream = new emulator::Stream();
    stream->with_default = flags == cudaStreamDefault;
    emulator::streams.push_back(stream);
    *out = (cudaStream_t)stream;
    return cudaSuccess;
}

// Priorities order work that waits for a multiprocessor, which never happens here.
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    emulator::Entry entry(__func__);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(out, flags);
}

inline cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithFlags(out, cudaStreamDefault); }

// Held work stays, as on a GPU; only cudaDeviceSynchronize and events can still demand it.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emulator::Entry entry(__func__);
    emulator::Stream* queue = emulator::stream_of(stream);
    if (queue == &emulator::default_stream) return emulator::noted(cudaErrorInvalidResourceHandle);
    queue->destroyed = true;
    return cudaSuccess;
}

// For the default stream an empty piece of work represents the wait, since it comes after what other streams hold.
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emulator::Entry entry(__func__);
    emulator::Stream* queue = emulator::stream_of(stream);
    if (queue == &emulator::default_stream) emulator::enqueue_work(queue, emulator::Work{"wait", [] {}});
    emulator::demand(emulator::Position{queue, queue->enqueued});
    return cudaSuccess;
}

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    emulator::Entry entry(__func__);
    emulator::Stream* queue = emulator::stream_of(stream);
    return emulator::noted(emulator::query(emulator::Position{queue, queue->enqueued}, &queue->queries));
}

inline cudaError_t cudaDeviceSynchronize() {
    emulator::Entry entry(__func__);
    emulator::demand(emulator::ends_of_streams(nullptr));
    return cudaSuccess;
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    emulator::Entry entry(__func__);
    emulator::Work work = {"host function", [function, data] { function(data); }};
    work.host_function = true;
    emulator::enqueue_work(emulator::stream_of(stream), std::move(work));
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    emulator::Entry entry(__func__);
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming;
    if (flags & ~known) return emulator::noted(cudaErrorInvalidValue);
    emulator::Event* event = new emulator::Event();
    event->timed = !(flags & cudaEventDisableTiming);
    event->recorded = emulator::Position{&emulator::default_stream, 0};
    emulator::events.push_back(event);
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    emulator::Entry entry(__func__);
    emulator::event_of(event)->destroyed = true;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    emulator::Entry entry(__func__);
    emulator::Event* mark = emulator::event_of(event);
    emulator::Work work = {"event", [mark] { mark->time = emulator::milliseconds() + emulator::events_later_ms; }};
    work.settled = true;  // an event that nothing waits for is not a loss
    mark->recorded = emulator::enqueue_work(emulator::stream_of(stream), std::move(work));
    mark->queries = 0;
    return cudaSuccess;
}

// Waits for the latest recording at this moment; an event that was never recorded is not waited for.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    emulator::Entry entry(__func__);
    if (flags != cudaEventWaitDefault) return emulator::noted(cudaErrorInvalidValue);
    emulator::Work work = {"wait", [] {}};
    work.settled = true;
    work.after.push_back(emulator::event_of(event)->recorded);
    emulator::enqueue_work(emulator::stream_of(stream), std::move(work));
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    emulator::Entry entry(__func__);
    emulator::demand(emulator::event_of(event)->recorded);
    return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    emulator::Entry entry(__func__);
    emulator::Event* mark = emulator::event_of(event);
    return emulator::noted(emulator::query(mark->recorded, &mark->queries));
}

inline cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end) {
    emulator::Entry entry(__func__);
    const emulator::Event *first = emulator::event_of(start), *last = emulator::event_of(end);
    for (const emulator::Event* mark : {first, last}) {
        if (!mark->timed || mark->recorded.number == 0) return emulator::noted(cudaErrorInvalidResourceHandle);
        if (mark->recorded.number > mark->recorded.stream->done) return emulator::noted(cudaErrorNotReady);
    }
    *out = (float)(last->time - first->time);
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* out) {
    *out = 1;
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* out) {
    *out = 0;
    return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
    return emulator::noted(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    if (device != 0) return emulator::noted(cudaErrorInvalidDevice);
    memset((void*)out, 0, sizeof *out);
    strcpy(out->name, "emulated CPU");
    out->major = 9;
    out->totalGlobalMem = emulator::DEVICE_BYTES;
    out->multiProcessorCount = emulator::modes.processors;
    out->warpSize = (int)emulator::LANES;
    out->maxThreadsPerBlock = (int)emulator::BLOCK_LIMIT;
    out->l2CacheSize = emulator::L2_BYTES;
    out->sharedMemPerBlockOptin = (int)emulator::modes.shared_limit;
    out->sharedMemPerMultiprocessor = emulator::shared_bytes_per_multiprocessor;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int device) {
    if (device != 0) return emulator::noted(cudaErrorInvalidDevice);
    if (attribute == cudaDevAttrMultiProcessorCount) *out = emulator::modes.processors;
    else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *out = (int)emulator::modes.shared_limit;
    else if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor)
        *out = emulator::shared_bytes_per_multiprocessor;
    else if (attribute == cudaDevAttrComputeCapabilityMajor) *out = 9;
    else return emulator::noted(cudaErrorInvalidValue);
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetPCIBusId(char* out, int bytes, int device) {
    if (device != 0) return emulator::noted(cudaErrorInvalidDevice);
    bool fits = snprintf(out, (size_t)bytes, "0000:00:1e.0") < bytes;
    return emulator::noted(fits ? cudaSuccess : cudaErrorInvalidValue);
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    emulator::Entry entry(__func__);
    bool known = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
    bool allowed = known && value >= 0 && emulator::allow_shared_memory(kernel, (size_t)value);
    return emulator::noted(allowed ? cudaSuccess : cudaErrorInvalidValue);
}

// Of the attributes only those that are known here.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    memset((void*)out, 0, sizeof *out);
    out->maxThreadsPerBlock = (int)emulator::BLOCK_LIMIT;
    return emulator::noted(emulator::modes.other_gpu ? cudaErrorNoKernelImageForDevice : cudaSuccess);
}

// Registers and static shared memory are not known here: an upper bound.
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int block_threads,
                                                                 size_t shared_bytes) {
    const int lanes = (int)emulator::LANES, limit = (int)emulator::BLOCK_LIMIT;
    if (block_threads < 1 || block_threads > limit || shared_bytes > emulator::modes.shared_limit)
        return emulator::noted(cudaErrorInvalidValue);
    int by_threads = emulator::THREADS_PER_MULTIPROCESSOR / ((block_threads + lanes - 1) / lanes * lanes);
    int by_shared = emulator::shared_bytes_per_multiprocessor / ((int)shared_bytes + emulator::SHARED_BYTES_RESERVED);
    *out = std::min({by_threads, by_shared, emulator::BLOCKS_PER_MULTIPROCESSOR});
    return cudaSuccess;
}

inline cudaError_t cudaPeekAtLastError() { return emulator::last_error; }

inline cudaError_t cudaGetLastError() {
    cudaError_t error = emulator::last_error;
    emulator::last_error = cudaSuccess;
    return error;
}

inline const char* cudaGetErrorName(cudaError_t error) { return emulator::error_text(error)->name; }
inline const char* cudaGetErrorString(cudaError_t error) { return emulator::error_text(error)->text; }

}  // extern "C"

// ------------------------------------------------------------------------------------------------
// 6. Calls
//
// From here on, cudaMalloc(...) records its file and line first. A macro is not expanded inside itself, so the name
// after the comma is the function.

#define EMULATOR_CALL(call) (emulator::called_at(__FILE__, __LINE__), call)
#define cudaMalloc(...) EMULATOR_CALL(cudaMalloc(__VA_ARGS__))
#define cudaFree(...) EMULATOR_CALL(cudaFree(__VA_ARGS__))
#define cudaMallocHost(...) EMULATOR_CALL(cudaMallocHost(__VA_ARGS__))
#define cudaHostAlloc(...) EMULATOR_CALL(cudaHostAlloc(__VA_ARGS__))
#define cudaFreeHost(...) EMULATOR_CALL(cudaFreeHost(__VA_ARGS__))
#define cudaMemcpy(...) EMULATOR_CALL(cudaMemcpy(__VA_ARGS__))
#define cudaMemcpyAsync(...) EMULATOR_CALL(cudaMemcpyAsync(__VA_ARGS__))
#define cudaMemset(...) EMULATOR_CALL(cudaMemset(__VA_ARGS__))
#define cudaMemsetAsync(...) EMULATOR_CALL(cudaMemsetAsync(__VA_ARGS__))
#define cudaStreamDestroy(...) EMULATOR_CALL(cudaStreamDestroy(__VA_ARGS__))
#define cudaStreamSynchronize(...) EMULATOR_CALL(cudaStreamSynchronize(__VA_ARGS__))
#define cudaStreamQuery(...) EMULATOR_CALL(cudaStreamQuery(__VA_ARGS__))
#define cudaStreamWaitEvent(...) EMULATOR_CALL(cudaStreamWaitEvent(__VA_ARGS__))
#define cudaDeviceSynchronize(...) EMULATOR_CALL(cudaDeviceSynchronize(__VA_ARGS__))
#define cudaLaunchHostFunc(...) EMULATOR_CALL(cudaLaunchHostFunc(__VA_ARGS__))
#define cudaEventDestroy(...) EMULATOR_CALL(cudaEventDestroy(__VA_ARGS__))
#define cudaEventRecord(...) EMULATOR_CALL(cudaEventRecord(__VA_ARGS__))
#define cudaEventSynchronize(...) EMULATOR_CALL(cudaEventSynchronize(__VA_ARGS__))
#define cudaEventQuery(...) EMULATOR_CALL(cudaEventQuery(__VA_ARGS__))
#define cudaEventElapsedTime(...) EMULATOR_CALL(cudaEventElapsedTime(__VA_ARGS__))

#endif  // EMULATOR_RUNTIME_H
