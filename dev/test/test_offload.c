// test_offload.c: the store of pieces (llmtrain/offload.h), against a copy of them in memory.
//
//   cc -std=c11 -O2 -I. dev/test/test_offload.c -o build/test_offload -lm -pthread && build/test_offload
//
//   passes     forward, backward and in any order, read ahead or not, in a file and in memory: every piece holds what
//              was put there last, also where the thread is slow
//   faults     a read or a write that fails is one sentence, and the store stays failed
//   places     directories that are missing, read-only or full: refused before anything is kept there; nothing is left
//   overlap    a pass with work in it takes less than work and copies one after the other
//
#include "llmtrain/offload.h"
#include "harness.h"
#include "machine.h"

enum { PIECES = 7 };
static const size_t SIZES[PIECES] = {5000, 1, 4096, 40000, 12288, 8191, 300};

typedef struct {
    Offload store;
    char* slots;
    uint32_t written[PIECES];  // the seed of what each piece holds; 0: zeros
} Store;

static bool store_open(Store* s, const char* directory, size_t slots, Error* error) {
    memset(s, 0, sizeof *s);
    need(offload_plan(&s->store, "optimizer state", slots, PIECES, error), "%s", error->text);
    for (size_t p = 0; p < PIECES; p++) offload_size(&s->store, p, SIZES[p]);
    s->slots = (char*)allocate(offload_memory(&s->store));
    need(s->slots != NULL, "memory for slots");
    s->store.slots = s->slots + 1;  // any boundary will do
    return offload_open(&s->store, directory, 3, 0, NULL, error);
}

static void store_close(Store* s) {
    offload_close(&s->store);
    free(s->slots);
}

static unsigned char content(uint32_t seed, size_t piece, size_t i) {
    return seed ? (unsigned char)(seed * 31 + piece * 7 + i * 13 + i / 256) : 0;
}

// Takes a piece, looks whether it holds what it should unless it is fresh, and writes something new if `changes`.
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

// Passes of all kinds; false as soon as the store has failed.
static bool passes(Store* s, Error* error) {
    for (size_t p = 0; p < PIECES; p++)
        if (!visit(s, p, false, false, error)) return false;  // zeros
    for (uint64_t pass = 0; pass < 12; pass++) {
        bool backward = pass % 2, ahead = pass % 3 != 0, fresh = pass % 4 == 2, shuffled = pass > 8;
        for (size_t i = 0; i < PIECES; i++) {
            size_t p = shuffled ? random_bits(1, RANDOM_TEST, pass, i) % PIECES : backward ? PIECES - 1 - i : i;
            if (ahead) offload_ahead(&s->store, backward ? p - 1 : p + 1);  // also one that does not exist
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
    Error error = {"", ERROR_WORLD, false};
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
    const char* prepare;  // what is at "place"; options of mounting it
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
    {"a read-only directory", "", "read-only", "cannot make a file for " STORE "Permission denied; choose a place"},
    {"a disk that is read-only", "", "size=64k,ro",
     "cannot make a file for " STORE "Read-only file system; choose a place"},
    {"a disk that is full", "", "size=64k",
     "cannot reserve 0.000 GB for " STORE "No space left on device; free some space"},
};

static bool mounts;  // this process may mount disks

static void case_body(const void* context) {
    const Case* c = (const Case*)context;
    Store s;
    Error error = {"", ERROR_WORLD, false}, again = {"", ERROR_WORLD, false};
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
// Work under copies

// A pass over pieces, of which each takes work, a read and a write of 4 ms: three slots hide two of these, one of which
// waits for the other in the thread.
static void overlap_body(const void* context) {
    Store s;
    Error error;
    (void)context;
    if (!store_open(&s, NULL, OFFLOAD_SLOTS, &error)) need(false, "%s", error.text);
    double began = now_ms(), least = 0;
    for (size_t p = 0; p < PIECES; p++) {
        need(offload_take(&s.store, p, false, &error) != NULL, "%s", error.text);
        offload_ahead(&s.store, p + 1);
        double work = now_ms();
        sleep_ms(8);
        least += now_ms() - work;
        offload_give(&s.store, p, true);
    }
    double took = now_ms() - began;
    // One after the other would be twice the work, and on a busy machine more.
    check(took < 1.7 * least + 16, "a pass with %.0f ms of work and as much copying takes %.0f ms", least, took);
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
    apart(overlap_body, NULL, "rank 0 step 1 at offload_read do delay 4; rank 0 step 1 at offload_write do delay 4");
    return tests_end();
}
