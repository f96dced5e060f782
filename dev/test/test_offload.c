// test_offload.c: the store of pieces (llmtrain/model/offload.h), against a copy of them in memory.
//
//   cc -std=c11 -O2 -I. dev/test/test_offload.c -o build/test_offload -lm -pthread && build/test_offload
//
//   passes     forward, backward and in any order, read ahead or not, in a file and in memory: every piece holds what
//              was last stored in it, even if the thread is slow
//   faults     a read or a write that fails gives one error message, and the store stays failed
//   damage     a byte that changes in the file is detected when read, anywhere in a piece, whichever call reads it
//   places     directories that are missing, read-only or full: refused before anything is stored; nothing is left
//   overlap    work, reads and writes of different pieces run at the same time
//
#include "llmtrain/model/offload.h"
#include "harness.h"
#include "machine.h"

enum { PIECES = 7 };
static const size_t SIZES[PIECES] = {5000, 1, 4096, 40000, 12288, 8191, 300};

typedef struct {
    Offload store;
    char* slots;
    uint32_t written[PIECES];  // seed of each piece's contents; 0: zeros
} Store;

static bool store_open(Store* s, const char* directory, size_t slots, Error* error) {
    memset(s, 0, sizeof *s);
    need(offload_plan(&s->store, "optimizer state", slots, PIECES, error), "%s", error->text);
    for (size_t p = 0; p < PIECES; p++) offload_size(&s->store, p, SIZES[p]);
    s->slots = (char*)memory_allocate(offload_memory(&s->store));
    need(s->slots != NULL, "memory for slots");
    s->store.slots = s->slots + 1;  // must work at any alignment
    return offload_open(&s->store, directory, 3, 0, NULL, error);
}

static void store_close(Store* s) {
    offload_close(&s->store);
    free(s->slots);
}

static unsigned char content(uint32_t seed, size_t piece, size_t i) {
    return seed ? (unsigned char)(seed * 31 + piece * 7 + i * 13 + i / 256) : 0;
}

// Takes a piece, checks its contents unless it is fresh, and writes new contents if `changes`.
static bool visit(Store* s, size_t p, bool fresh, bool changes, Error* error) {
    unsigned char* data = (unsigned char*)offload_take(&s->store, p, fresh, error);
    size_t wrong = 0;
    if (data == NULL) return false;
    for (size_t i = 0; i < SIZES[p] && !fresh; i++) wrong += data[i] != content(s->written[p], p, i);
    expect(wrong == 0, "piece %zu has %zu wrong bytes", p, wrong);
    if (fresh || changes) s->written[p] += 1 + (uint32_t)p;
    for (size_t i = 0; i < SIZES[p] && (fresh || changes); i++) data[i] = content(s->written[p], p, i);
    offload_give(&s->store, p, fresh || changes);
    return true;
}

// Passes of all kinds; false once the store has failed.
static bool passes(Store* s, Error* error) {
    for (size_t p = 0; p < PIECES; p++)
        if (!visit(s, p, false, false, error)) return false;  // zeros
    for (uint64_t pass = 0; pass < 12; pass++) {
        bool backward = pass % 2, ahead = pass % 3 != 0, fresh = pass % 4 == 2, shuffled = pass > 8;
        for (size_t i = 0; i < PIECES; i++) {
            size_t p = shuffled ? random_bits(1, RANDOM_TEST, pass, i) % PIECES : backward ? PIECES - 1 - i : i;
            if (ahead) offload_ahead(&s->store, backward ? p - 1 : p + 1, 1 + pass % 4);  // some do not exist
            if (!visit(s, p, fresh, pass % 5 != 4, error)) return false;
        }
        if (pass % 3 != 1) continue;
        unsigned char part[5000];
        size_t p = pass % PIECES, at = SIZES[p] / 3, n = min_size(SIZES[p] - at, sizeof part), wrong = 0;
        if (!offload_flush(&s->store, error) || !offload_read(&s->store, part, p, at, n, error)) return false;
        for (size_t i = 0; i < n; i++) wrong += part[i] != content(s->written[p], p, at + i);
        expect(wrong == 0, "%zu bytes of piece %zu, from %zu on: %zu are wrong", n, p, at, wrong);
    }
    return true;
}

// In a process of its own, since a process reads LLMTRAIN_TEST_FAULT once.
static void apart(void (*body)(const void*), const void* context, const char* fault) {
    int status = 1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setenv("LLMTRAIN_TEST_FAULT", fault, 1);
        fault_step(0, 1);
        body(context);
        exit(0);
    }
    need(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a process of its own");
}

static void passes_body(const void* directory) {
    Store s;
    Error error = {"", ERROR_OUTSIDE, false};
    int before = open_descriptors();
    for (size_t slots = 2; slots <= OFFLOAD_SLOTS; slots++) {
        bool ok = store_open(&s, (const char*)directory, slots, &error) && passes(&s, &error);
        expect(ok, "%zu slots: %s", slots, error.text);
        OffloadCounts counts = offload_counts(&s.store);
        expect(counts.read > 0 && counts.written > 0, "bytes are counted");
        expect(directory_count(".", "offload") == 0, "a file has a name");
        store_close(&s);
        expect(open_descriptors() == before, "descriptors are left open");
    }
    verdict("passes %s, %s", directory ? "in a file" : "in memory", getenv("LLMTRAIN_TEST_FAULT"));
}

// ------------------------------------------------------------------------------------------------
// Faults and places

typedef struct {
    const char* name;
    const char* fault;    // LLMTRAIN_TEST_FAULT
    const char* prepare;  // what "place" is, or its mount options
    const char* says;
} Case;

#define STORE "the optimizer state (--offload) in place: "
static const Case CASES[] = {
    {"a write fails", "rank 0 step 1 at offload_write do flip", "directory",
     "cannot write " STORE "Input/output error; the disk may be failing"},
    {"a read fails", "rank 0 step 1 at offload_read do flip", "directory",
     "cannot read " STORE "Input/output error; the disk may be failing"},
    {"a missing directory", "", "nothing", "cannot make a file for " STORE "No such file or directory; check the path"},
    {"a file in its place", "", "file", "cannot make a file for " STORE "Not a directory; check the path"},
    {"a read-only directory", "", "read-only", "cannot make a file for " STORE "Permission denied; choose a path"},
    {"a disk that is read-only", "", "size=64k,ro",
     "cannot make a file for " STORE "Read-only file system; choose a path"},
    {"a disk that is full", "", "size=64k",
     "cannot reserve 0.000 GB for " STORE "No space left on device; free some space"},
};

static bool mounts;  // this process may mount disks

static void case_body(const void* context) {
    const Case* c = (const Case*)context;
    Store s;
    Error error = {"", ERROR_OUTSIDE, false}, again = {"", ERROR_OUTSIDE, false};
    bool mounted = strncmp(c->prepare, "size=", 5) == 0;
    if (strcmp(c->prepare, "file") == 0) put_text("place", "");
    else if (strcmp(c->prepare, "nothing") != 0) need(mkdir("place", 0755) == 0, "a directory");
    if (mounted) need(machine_mount("place", "size=64k"), "a disk");
    if (strstr(c->prepare, ",ro")) need(machine_remount("place", NULL), "a disk");
    if (strcmp(c->prepare, "read-only") == 0) need(seteuid(65534) == 0, "another user");
    bool opened = store_open(&s, "place", OFFLOAD_SLOTS, &error), good = opened && passes(&s, &error);
    expect_refusal(good, &error, c->says, c->name);
    if (opened)
        expect(offload_take(&s.store, 0, true, &again) == NULL && strcmp(again.text, error.text) == 0 &&
               !offload_flush(&s.store, &again), "a store that has failed does not stay so");
    expect(directory_count("place", "offload") <= 0, "a file is left");
    store_close(&s);
    if (geteuid() != 0) need(seteuid(0) == 0, "the user of before");
    if (mounted) machine_unmount("place");
    remove_tree("place");
    verdict("%s", c->name);
}

static void test_case(const Case* c) {
    if (strncmp(c->prepare, "size=", 5) == 0 && !mounts)
        skip(c->name, "this machine does not let the test mount a disk");
    else if (strcmp(c->prepare, "read-only") == 0 && geteuid() != 0)
        skip(c->name, "only root can become another user");
    else
        apart(case_body, c, c->fault);
}

// ------------------------------------------------------------------------------------------------
// Damage

// Changes a byte of the file.
static void file_flip(const Offload* o, size_t at) {
    static _Alignas(4096) unsigned char page[DISK_ALIGN];
    off_t first = (off_t)(at / DISK_ALIGN * DISK_ALIGN);
    need(pread(o->file, page, DISK_ALIGN, first) == (ssize_t)DISK_ALIGN, "a page of the file");
    page[at % DISK_ALIGN] ^= 16;
    need(pwrite(o->file, page, DISK_ALIGN, first) == (ssize_t)DISK_ALIGN, "a page of the file");
}

// Two pieces: one of several checksums, one that was never written. Each time another byte of one piece changes while
// neither is in memory, and the next read must detect it, by either call.
static void damage_body(const void* context) {
    enum { LARGE = 3 * (64 << 10) + 5000, SMALL = 5000 };
    static const size_t flips[][2] = {{0, 0}, {0, 65535}, {0, 65536}, {0, 3 * 65536 + 4000}, {1, 0}, {1, 4999}};
    static const char SAYS[] = "the optimizer state (--offload) in . does not match its checksum: some of the ";
    static unsigned char part[LARGE];
    (void)context;
    for (size_t i = 0; i < 2 * COUNT_OF(flips); i++) {
        size_t p = flips[i / 2][0], at = flips[i / 2][1], other = 1 - p;
        Offload o;
        Error error = {"", ERROR_OUTSIDE, false};
        need(offload_plan(&o, "optimizer state", 2, 4, &error), "%s", error.text);
        const size_t sizes[4] = {LARGE, SMALL, SMALL, SMALL};
        for (size_t k = 0; k < 4; k++) offload_size(&o, k, sizes[k]);
        o.slots = (char*)memory_allocate(offload_memory(&o));
        need(o.slots && offload_open(&o, ".", 0, 0, NULL, &error), "%s", error.text);
        unsigned char* data = (unsigned char*)offload_take(&o, 0, true, &error);
        for (size_t k = 0; k < LARGE; k++) data[k] = content(1, 0, k);
        offload_give(&o, 0, true);
        for (size_t k = 2; k < 4; k++) {  // they take the two slots
            need(offload_flush(&o, &error) && offload_take(&o, k, false, &error) != NULL, "%s", error.text);
            offload_give(&o, k, false);
        }
        file_flip(&o, o.offsets[p] + at);
        bool good = offload_read(&o, part, other, 0, sizes[other], &error);
        expect(good, "the other piece: %s", error.text);
        good = i % 2 ? offload_read(&o, part, p, at, 1, &error) : offload_take(&o, p, false, &error) != NULL;
        expect_refusal(good, &error, SAYS, "a byte that has changed");
        Error again = {"", ERROR_OUTSIDE, false};
        expect(offload_take(&o, other, true, &again) == NULL && strcmp(again.text, error.text) == 0,
               "a store that is damaged does not stay failed");
        char* slots = o.slots;
        offload_close(&o);
        free(slots);
    }
    verdict("a byte of the file changes: %zu cases, found by the thread and by offload_read", 2 * COUNT_OF(flips));
}

// ------------------------------------------------------------------------------------------------
// Overlap of work and copies

// Passes over pieces that each take work, a read and a write of 4 ms, all three at the same time. The overlap is the
// sum of their times over the total time: 3 at most, and 1.5 if reads and writes take turns.
static void overlap_body(const void* context) {
    enum { PASSES = 3 };
    Store s;
    Error error;
    (void)context;
    if (!store_open(&s, NULL, OFFLOAD_SLOTS, &error)) need(false, "%s", error.text);
    double began = now_ms(), worked = 0;
    for (size_t i = 0; i < PASSES * PIECES; i++) {
        need(offload_take(&s.store, i % PIECES, false, &error) != NULL, "%s", error.text);
        offload_ahead(&s.store, (i + 1) % PIECES, OFFLOAD_AHEAD);
        double work = now_ms();
        sleep_ms(4);
        worked += now_ms() - work;
        offload_give(&s.store, i % PIECES, true);
    }
    need(offload_flush(&s.store, &error), "%s", error.text);
    double took = now_ms() - began;
    OffloadCounts counts = offload_counts(&s.store);
    double at_once = (worked + counts.read_ms + counts.written_ms) / took;
    check(at_once > 1.65, "%.0f ms of work, %.0f of reads and %.0f of writes in %.0f ms: %.2f at once", worked,
          counts.read_ms, counts.written_ms, took, at_once);
    store_close(&s);
}

int main(void) {
    tests_begin("test_offload");
    root_enter();
    mounts = machine_own_mounts();
    static const char* const faults[] = {"", "rank 0 step 1 at offload_write do delay 1",
                                         "rank 0 step 1 at offload_read do delay 1"};
    for (size_t f = 0; f < COUNT_OF(faults); f++) {
        apart(passes_body, ".", faults[f]);
        apart(passes_body, NULL, faults[f]);
    }
    for (size_t i = 0; i < COUNT_OF(CASES); i++) test_case(&CASES[i]);
    apart(damage_body, NULL, "");
    apart(overlap_body, NULL, "rank 0 step 1 at offload_read do delay 4; rank 0 step 1 at offload_write do delay 4");
    return tests_end();
}
