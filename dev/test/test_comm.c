// test_comm.c: the collectives of comm.h between processes, and what each rank reports when another fails.
//
//   cc -std=c11 -O2 -I. dev/test/test_comm.c -o build/test_comm -lm -pthread && build/test_comm
//   mpicc -DLLMTRAIN_MPI ...  && mpirun -n 3 build/test_comm        the collectives, through MPI
//   build/test_comm --timeout 4000                                  on a slow machine, or under a sanitizer
//   build/test_comm --tree 2                                        all cases with a tree of control connections
//   build/test_comm --sockets                                       all cases without shared memory
//
//   1. cases        a process per rank; what they report
//   2. collectives  each, of each type, of many lengths and slices, against a serial computation, bit for bit
//   3. in flight    hundreds at once; a slow transport under a computation; what is counted
//   4. scripts      what the ranks of a case do, word by word
//   5. memory       that two processes share: rings, flags, files that are something else
//   6. launch       the variables of launchers, right and wrong; forked ranks, their exit codes and reports
//   7. rendezvous   unrelated clients, ranks of other runs, ports in use
//   8. table        of the cases: ranks that never connect, are killed or stopped, make mismatched calls, abort; the
//                   same in groups of ranks, and where the control connections are a tree
//   9. lanes        the cases run in parallel, since most of them wait
//
// The ranks of a case report through shared memory; the parent checks the reports and kills ranks that hang. Under a
// launcher the program is one of the launcher's ranks and only tests the collectives.

#include "llmtrain/ranks/split.h"
#include "llmtrain/ranks/collectives.h"
#include "llmtrain/base/flags.h"
#include "machine.h"

#include <glob.h>
#include <ifaddrs.h>
#include <net/if.h>

#define RANKS_MAX ((size_t)9)
#ifdef __SANITIZE_THREAD__  // makes everything several times slower
#define SLOWER 5
#else
#define SLOWER 1
#endif
#define LONG_MS (SLOWER * 30e3)   // timeout where nothing should fail
#define SLACK_MS (SLOWER * 10e3)  // allowed for a busy machine
#define CASE_MS (SLOWER * 60e3)   // after this a rank counts as hung
#define LANE_MS (SLOWER * 300e3)  // limit for all cases of a lane
#ifdef SYSTEM_LINUX
#define MEMORY_IS_SHARED true
#else
#define MEMORY_IS_SHARED false  // ranks of one machine use sockets
#endif

// ------------------------------------------------------------------------------------------------
// 1. Cases

typedef struct {
    size_t lane;            // see section 8
    const char* name;       // @ is the odd rank, here and below
    const char* odd;        // a digit per rank that plays the odd rank in turn; NULL: none
    size_t world;           // number of ranks; 0: the odd rank's digit
    const char* script;     // what the ranks do: section 4
    const char* says[3];    // their errors: see case_judge; NULL: all ranks succeed
    double timeouts, ms;    // ranks fail within this after the fault, or the start; 0, 0: two timeouts
    void (*meanwhile)(void);  // what the parent does once the ranks have started
    void (*also)(void);       // more checks, or cleanup by the parent
} Case;
#define SAY(...) .says = {__VA_ARGS__}
#define SUCCEED SAY(NULL)

typedef enum { STAYS, LEAVES, VICTIM } Fate;  // LEAVES: it ends without a report, VICTIM: by a signal, or is stopped

typedef struct {
    int stage;              // how far the rank has come, for others that wait for it
    Fate fate;
    bool done, good;        // its last call has returned, and its result
    double ended_ms;
    char text[1024];        // the error, if any
} Report;

// What the processes of a lane share.
typedef struct {
    Report ranks[RANKS_MAX], parent;
    double fault_ms;          // when the fault of the case happened
    pid_t forked[RANKS_MAX];  // the ranks that launch_fork forked
} Shared;

static Shared* shared;
static Report* self;
static pid_t children[RANKS_MAX];
static size_t port;            // of the case
static int reserved = -1;      // socket that reserves it
static char case_name[120];
static double case_began_ms;
static double timeout_ms = SLOWER == 1 ? 2000.0 : 6000.0;  // where something should fail
static size_t tree;                 // fan-out of the control connections in all cases; 0: each case says it
static bool only_sockets;           // data of all cases pass through sockets

static void share(void) {
    void* memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "shared memory");
    shared = (Shared*)memory;
    self = &shared->parent;
}

static void outcome(bool good, const Error* error) {
    self->good = good;
    snprintf(self->text, sizeof self->text, "%s", good ? "" : error->text);
    self->ended_ms = now_ms();
    self->done = true;
}

static void set_stage(int stage) { __atomic_store_n(&self->stage, stage, __ATOMIC_SEQ_CST); }

// Waits until some rank has reached that stage.
static bool await_stage(const Report* report, int stage) {
    double deadline = now_ms() + CASE_MS / 2;
    while (__atomic_load_n(&report->stage, __ATOMIC_SEQ_CST) < stage && now_ms() < deadline) sleep_ms(1);
    return report->stage >= stage;
}

static bool reach_stage(size_t world, int stage) {
    bool reached = true;
    for (size_t rank = 0; rank < world; rank++) reached = reached && await_stage(&shared->ranks[rank], stage);
    return reached;
}

// Forks the ranks of a case, as a launcher does; each runs body once all exist, and ends. end_ranks waits for them.
static void start_ranks(const char* name, size_t world, void (*body)(size_t rank)) {
    snprintf(case_name, sizeof case_name, "%s", name);
    case_began_ms = now_ms();
    socket_close(&reserved);
    port = port_reserve(&reserved);
    memset(shared, 0, sizeof *shared);
    fflush(NULL);
    for (size_t rank = 0; rank < world; rank++) {
        pid_t child = children[rank] = fork();
        need(child >= 0, "a process");
        if (child > 0) continue;
        process_end_with_parent(getppid(), SIGKILL);
        self = &shared->ranks[rank];
        environment_clear();
        environment_set(text_of("RANK=%zu|WORLD_SIZE=%zu|MASTER_ADDR=127.0.0.1|MASTER_PORT=%zu|LLMTRAIN_RUN_ID=test",
                                rank, world, port));
        if (tree > 0) environment_set(text_of("LLMTRAIN_TEST_TREE=%zu", tree));
        if (only_sockets) environment_set("LLMTRAIN_TEST_SOCKETS=1");
        set_stage(1);
        need(reach_stage(world, 1), "the other ranks have started");
        body(rank);
        if (harness_now.conditions > 0) verdict("%s, rank %zu", case_name, rank);
        exit(0);
    }
}

static void end_case(void) { verdict("%s, %.1f s", case_name, (now_ms() - case_began_ms) / 1e3); }

// Waits for the ranks; a victim may be in any state and is finally killed.
static void end_ranks(size_t world) {
    double deadline = now_ms() + CASE_MS;
    for (size_t rank = 0; rank < world; rank++) {
        int status = 0;
        pid_t ended = 0;
        const Fate* fate = &shared->ranks[rank].fate;
        while (__atomic_load_n(fate, __ATOMIC_SEQ_CST) != VICTIM && ended == 0 && now_ms() < deadline) {
            ended = waitpid(children[rank], &status, WNOHANG);
            if (ended == 0) sleep_ms(1);
        }
        if (ended > 0) children[rank] = 0;
        if (*fate == VICTIM) continue;
        expect(ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %zu %s", rank,
               ended ? "ends with an error" : "hangs");
    }
    for (size_t rank = 0; rank < world; rank++)
        if (children[rank] > 0 && kill(children[rank], SIGKILL) == 0) waitpid(children[rank], NULL, 0);
}

// Whether a text contains one of several words, separated by |.
static bool has_one(const char* text, const char* words) {
    char all[256];
    snprintf(all, sizeof all, "%s", words);
    for (char* one = strtok(all, "|"); one; one = strtok(NULL, "|"))
        if (strstr(text, one)) return true;
    return false;
}

// Text of a case, with the odd rank in place of @.
static char* odd_text(const char* text, char odd) {
    char* result = strdup(text);
    need(result != NULL, "memory");
    for (char* at = result; (at = strchr(at, '@')) != NULL;) *at = odd;
    return result;
}

// Ends the case. The expected reports: "TEXT|OTHER": all ranks that stay have failed, with one of these texts;
// "R:TEXT": rank R has; "?:TEXT": some rank has; "-": anything.
static void case_judge(const Case* c, size_t world, char odd) {
    double since = shared->fault_ms > 0 ? shared->fault_ms : case_began_ms;
    double timeouts = c->timeouts + c->ms > 0 ? c->timeouts : 2, limit_ms = timeouts * timeout_ms + c->ms + SLACK_MS;
    for (size_t i = 0; i == 0 || (i < COUNT_OF(c->says) && c->says[i]); i++) {
        char* words = odd_text(c->says[0] ? c->says[i] : "", odd);
        bool one = words[0] && words[1] == ':', found = false;
        for (size_t rank = 0; rank < world && words[0] != '-'; rank++) {
            const Report* r = &shared->ranks[rank];
            if (r->fate != STAYS || (one && words[0] != '?' && words[0] != (char)('0' + rank))) continue;
            const char* said = !r->done ? "nothing" : r->good ? "all is well" : r->text;
            bool right = r->done && r->good == !words[0] && (r->good || has_one(r->text, words + 2 * one));
            found = found || right;
            if (words[0] == '?') continue;
            expect(right, "rank %zu says: %s, not: %s", rank, said, words[0] ? words + 2 * one : "all is well");
            expect(r->good || r->ended_ms - since <= limit_ms, "rank %zu is late by %.0f ms", rank,
                   r->ended_ms - since - limit_ms);
        }
        expect(found || words[0] == '-', "no rank says: %s", words);
        free(words);
    }
    if (c->also) c->also();
    end_case();
}

static bool open_rank(Comm* comm, double limit_ms, Error* error) {
    Launch launch;
    return launch_find(&launch, error) && comm_open(comm, &launch, limit_ms, error);
}

// ------------------------------------------------------------------------------------------------
// 2. Collectives

// data (n): on every rank the sum over all ranks.
static CommRequest start_sum(Comm* comm, void* data, size_t n, Dtype type) {
    return comm_start(comm, COMM_ALL_REDUCE, type, data, data, n, 0, NULL, NULL);
}
static bool all_reduce(Comm* comm, void* data, size_t n, Dtype type, Error* error) {
    return comm_wait(comm, start_sum(comm, data, n, type), error);
}

// out (own slice): the sum over all ranks of that slice of in (n).
static bool reduce_scatter(Comm* comm, void* out, const void* in, size_t n, Dtype type, CommSlices slices,
                           const void* context, Error* error) {
    CommRequest sum = comm_start(comm, COMM_REDUCE_SCATTER, type, out, in, n, 0, slices, context);
    return comm_wait(comm, sum, error);
}

// out (world, n / world): part r is part rank of rank r's in.
static CommRequest start_all_to_all(Comm* comm, void* out, const void* in, size_t n, Dtype type) {
    return comm_start(comm, COMM_ALL_TO_ALL, type, out, in, n, 0, NULL, NULL);
}

typedef union {
    uint64_t integer;
    float real;
    uint16_t half;
} Element;  // of any type

static Element element_of(float value, Dtype type) {
    Element e = {0};
    if (type == DTYPE_F32) e.real = value;
    else e.half = type == DTYPE_BF16 ? bf16_from_float(value) : f16_from_float(value);
    return e;
}

static float element_value(Element e, Dtype type) {
    return type == DTYPE_F32 ? e.real : type == DTYPE_BF16 ? float_from_bf16(e.half) : float_from_f16(e.half);
}

static bool is_integer(Dtype type) { return type == DTYPE_I64 || type == DTYPE_U8; }

// The values of a rank: of many magnitudes, so that the order of a sum matters, and with the odd cases of each type.
static void make_values(char* out, Dtype type, size_t n, size_t rank) {
    for (size_t i = 0; i < n; i++) {
        Random4 r = random4(rank + 1, RANDOM_TEST, (uint64_t)type, i);
        double value =
            ((double)r.bits[0] * 0x1p-32 + (double)r.bits[2] * 0x1p-64 - 0.5) * ldexp(1.0, (int)(r.bits[1] % 24) - 12);
        if (i % 101 == 17) value = -0.0;
        if (i % 101 == 18) value *= 0x1p-130;                                   // subnormal in float
        if (i % 101 == 19) value = rank % 2 ? -65504.0 : 65504.0;               // sums overflow in fp16
        if (i % 101 == 20) value = rank == 0 ? (double)INFINITY : value;
        Element e = {(uint64_t)r.bits[3] << 32 | r.bits[2]};
        if (!is_integer(type)) e = element_of((float)value, type);
        memcpy(out + i * dtype_bytes(type), &e, dtype_bytes(type));
    }
}

// Element i summed one rank after the other, forwards or backwards.
static Element serial_sum(char* const* inputs, Dtype type, size_t world, size_t i, bool backwards) {
    float real = 0.0f;
    Element sum = {0};
    for (size_t k = 0; k < world; k++) {
        Element e = {0};
        memcpy(&e, inputs[backwards ? world - 1 - k : k] + i * dtype_bytes(type), dtype_bytes(type));
        real = k == 0 ? element_value(e, type) : real + element_value(e, type);
        sum.integer += e.integer;
    }
    return is_integer(type) ? sum : element_of(real, type);
}

typedef struct {
    size_t n, world;
    int kind;
} Cut;
enum { CUT_EVEN, CUT_UNEVEN, CUT_GAPS, CUT_ONE_HAS_ALL, CUTS };

static Slice cut_slice(size_t rank, const void* context) {
    const Cut* c = (const Cut*)context;
    Slice s = comm_even_slice(rank, c->world, c->n);
    if (c->kind == CUT_UNEVEN || c->kind == CUT_GAPS) {
        s.first = c->n * rank * rank / (c->world * c->world);
        s.end = c->n * (rank + 1) * (rank + 1) / (c->world * c->world);
        if (c->kind == CUT_GAPS && s.end > s.first) s.first++;
    }
    if (c->kind == CUT_ONE_HAS_ALL) {
        s.first = rank <= c->world / 2 ? 0 : c->n;
        s.end = rank < c->world / 2 ? 0 : c->n;
    }
    return s;
}

typedef struct {
    Comm* comm;
    Dtype type;
    size_t n, size;
    char *inputs[RANKS_MAX], *sums;  // (n) of each rank, and their sums
    char *work, *expected;           // (n + GUARD elements)
} Bench;
#define GUARD ((size_t)8)     // elements behind the vector that must not change
#define UNTOUCHED 0x5A

// The vector starts with the rank's values, or with none.
static void bench_begin(Bench* b, bool with_own) {
    memset(b->work, UNTOUCHED, (b->n + GUARD) * b->size);
    if (with_own) memcpy(b->work, b->inputs[b->comm->rank], b->n * b->size);
    memcpy(b->expected, b->work, (b->n + GUARD) * b->size);
}

// Sets the expected values of a part of a vector, from element `at` on.
static void bench_expect(Bench* b, size_t at, const char* vector, Slice part) {
    memcpy(b->expected + at * b->size, vector + part.first * b->size, slice_length(part) * b->size);
}

static void bench_end(const Bench* b, bool good, const Error* error, const char* what) {
    expect(good && memcmp(b->work, b->expected, (b->n + GUARD) * b->size) == 0, "rank %zu, %s of %zu %s: %.80s",
           b->comm->rank, what, b->n, DTYPES[b->type].name, good ? "other bits" : error->text);
}

static void test_slices(Bench* b, int kind) {
    Comm* comm = b->comm;
    Error error;
    Cut cut = {b->n, comm->world, kind};
    Slice own = cut_slice(comm->rank, &cut);
    CommSlices slices = kind == CUT_EVEN ? NULL : cut_slice;
    char *at = b->work + own.first * b->size, *mine = b->inputs[comm->rank];
    if (b->type != DTYPE_U8) {
        bench_begin(b, false);
        bench_expect(b, 0, b->sums, own);
        bool good = reduce_scatter(comm, b->work, mine, b->n, b->type, slices, &cut, &error);
        bench_end(b, good, &error, "reduce_scatter");

        bench_begin(b, true);
        bench_expect(b, own.first, b->sums, own);
        good = reduce_scatter(comm, at, b->work, b->n, b->type, slices, &cut, &error);
        bench_end(b, good, &error, "reduce_scatter in place");

        good = good && comm_all_gather(comm, b->work, b->n, b->type, slices, &cut, &error);
        for (size_t p = 0; p < comm->world; p++) bench_expect(b, cut_slice(p, &cut).first, b->sums, cut_slice(p, &cut));
        bench_end(b, good, &error, "reduce_scatter and all_gather");
    }
    bench_begin(b, false);
    memcpy(at, mine + own.first * b->size, slice_length(own) * b->size);
    for (size_t p = 0; p < comm->world; p++)
        bench_expect(b, cut_slice(p, &cut).first, b->inputs[p], cut_slice(p, &cut));
    bool good = comm_all_gather(comm, b->work, b->n, b->type, slices, &cut, &error);
    bench_end(b, good, &error, "all_gather");
}

static Bench bench_open(Comm* comm, Dtype type, size_t n) {
    Bench b = {comm, type, n, dtype_bytes(type), {NULL}, NULL, NULL, NULL};
    size_t bytes = (n + GUARD) * b.size;
    char** const vectors[] = {&b.sums, &b.work, &b.expected};
    for (size_t v = 0; v < COUNT_OF(vectors); v++) *vectors[v] = (char*)memory_allocate(bytes);
    for (size_t p = 0; p < comm->world; p++) make_values(b.inputs[p] = (char*)memory_allocate(bytes), type, n, p);
    return b;
}

static void bench_close(Bench* b) {
    for (size_t p = 0; p < b->comm->world; p++) free(b->inputs[p]);
    free(b->sums);
    free(b->work);
    free(b->expected);
}

static void test_all_to_all(Comm* comm, Dtype type, size_t part) {
    Bench b = bench_open(comm, type, comm->world * part);
    Error error;
    Slice mine = {comm->rank * part, (comm->rank + 1) * part}, all = {0, b.n};
    bench_begin(&b, false);
    for (size_t p = 0; p < comm->world; p++) bench_expect(&b, p * part, b.inputs[p], mine);
    bool good = comm_wait(comm, start_all_to_all(comm, b.work, b.inputs[comm->rank], b.n, type), &error);
    bench_end(&b, good, &error, "all_to_all");

    // From what the first has brought, through the Collectives: its own vector again. One rank's do nothing.
    Collectives c;
    bool alone = comm->world == 1;
    memcpy(b.sums, b.work, b.n * b.size);
    bench_begin(&b, false);
    if (!alone) bench_expect(&b, 0, b.inputs[comm->rank], all);
    good = good && collective_open(&c, &comm->transport, 2, NULL, &error);
    collective_all_to_all(&c, 1, b.work, b.sums, b.n, type, NULL);
    collective_wait(&c, 1, NULL);
    bench_end(&b, good && collective_check(&c, &error), &error, "all_to_all back");
    collective_close(&c);
    bench_close(&b);
}

static void test_length(Comm* comm, Dtype type, size_t n) {
    Bench b = bench_open(comm, type, n);
    size_t differ = 0;
    Slice all = {0, n};
    Error error;
    for (size_t i = 0; i < n && type != DTYPE_U8; i++) {
        Element sum = serial_sum(b.inputs, type, comm->world, i, false);
        Element other = serial_sum(b.inputs, type, comm->world, i, true);
        memcpy(b.sums + i * b.size, &sum, b.size);
        differ += memcmp(&sum, &other, b.size) != 0;
    }
    if (n >= 1000 && comm->world > 2 && type == DTYPE_F32)
        expect(differ > n / 100, "values whose sum depends on the order");
    if (type != DTYPE_U8) {
        bench_begin(&b, true);
        bench_expect(&b, 0, b.sums, all);
        bool good = all_reduce(comm, b.work, n, type, &error);
        bench_end(&b, good, &error, "all_reduce");
    }
    for (int kind = 0; kind < CUTS; kind++) test_slices(&b, kind);
    for (size_t from = 0; from < comm->world; from++) {
        bench_begin(&b, true);
        bench_expect(&b, 0, b.inputs[from], all);
        bool good = comm_broadcast(comm, b.work, n, type, from, &error);
        bench_end(&b, good, &error, "broadcast");
    }
    bench_close(&b);
}

static void test_collectives(Comm* comm) {
    static const size_t lengths[] = {0, 1, 2, 7, 1000, 100003};
    static const Dtype types[] = {DTYPE_U8, DTYPE_I64, DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (size_t i = 0; i < COUNT_OF(lengths); i++)
        for (size_t t = 0; t < COUNT_OF(types); t++) {
            test_length(comm, types[t], lengths[i]);
            test_all_to_all(comm, types[t], min_size(lengths[i], 20001));
        }
    // Sums of several chunks, of all types, with a partial last chunk.
    test_length(comm, DTYPE_BF16, 300001);
    test_length(comm, DTYPE_I64, 300001);
    test_all_to_all(comm, DTYPE_I64, 100003);  // more than sockets hold
    Error error;
    expect(comm_barrier(comm, &error), "barrier");
    float nan = comm->rank == 0 ? NAN : 1.0f;
    expect(all_reduce(comm, &nan, 1, DTYPE_F32, &error) && isnan(nan), "NaN in a sum");
}

// Each rank is `good` or fails with its own `text`; expected: the error that all then have, or NULL.
static void test_agreement(Comm* comm, bool good, const char* text, const char* expected, const char* what) {
    Error error, after;
    fail_with(&error, "%s", text);
    bool all = comm_agree_all(comm, good, &error);
    expect(all == (expected == NULL) && strcmp(error.text, expected ? expected : text) == 0, "%s, and not: %s", what,
           error.text);
    expect(error.on_all_ranks == !all, "%s: all ranks know of it", what);
    expect(comm_barrier(comm, &after) && !comm_failed(comm, &after), "an agreement leaves the Comm usable");
}

// "rank 2: words", or just the words if there is one rank.
static const char* sentence(char text[1024], const Comm* comm, size_t p, const char* words) {
    if (comm->world == 1) snprintf(text, 1024, "%s", words);
    else snprintf(text, 1024, "rank %zu: %s", comm_rank(comm, p), words);
    return text;
}

static void test_agree(Comm* comm) {
    size_t N = comm->world, rank = comm->rank;
    char own[40], one[40], expected[1024], letters[1000], letters_of_0[1000];
    const char* words = "cannot write x.bin: no space";
    snprintf(own, sizeof own, "part %zu failed", rank);
    snprintf(one, sizeof one, "part %zu failed", N > 1 ? (size_t)1 : 0);
    memset(letters, 'a' + (int)rank, sizeof letters - 1);
    memset(letters_of_0, 'a', sizeof letters - 1);
    letters[sizeof letters - 1] = letters_of_0[sizeof letters - 1] = 0;
    test_agreement(comm, true, "as it was", NULL, "all went well");
    test_agreement(comm, rank + 1 < N, words, sentence(expected, comm, N - 1, words), "the last rank failed");
    test_agreement(comm, false, words, words, "all failed for one reason");
    test_agreement(comm, false, own, sentence(expected, comm, 0, "part 0 failed"), "all failed, each otherwise");
    test_agreement(comm, rank % 2 == 1, words, sentence(expected, comm, 0, words), "every other failed, all alike");
    test_agreement(comm, N > 1 && rank == 0, own, sentence(expected, comm, 1, one), "all but rank 0 failed");
    test_agreement(comm, false, letters, sentence(expected, comm, 0, letters_of_0), "long reasons");
    Error error = {"", ERROR_OUTSIDE, false};
    expect(!comm_agree_all(comm, false, &error) && error.text[0] != 0, "a failure without a reason");
}

static void test_doubles(Comm* comm) {
    static const size_t counts[] = {0, 1, 7, 1000};
    Error error;
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        size_t count = counts[i], wrong = 0;
        double* all = (double*)memory_allocate((comm->world * count + 1) * sizeof(double));
        for (size_t k = 0; k < count; k++) all[comm->rank * count + k] = 1.0 / (double)(comm->rank * 5000 + k + 1);
        all[comm->world * count] = -1.0;
        bool good = comm_all_gather(comm, all, comm->world * count * sizeof(double), DTYPE_U8, NULL, NULL, &error);
        for (size_t p = 0; p < comm->world; p++)
            for (size_t k = 0; k < count; k++) wrong += all[p * count + k] != 1.0 / (double)(p * 5000 + k + 1);
        expect(good && wrong == 0 && all[comm->world * count] == -1.0, "doubles of all ranks");
        free(all);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. In flight

// More requests than fit, of all kinds, waited for in another order.
static void test_many(Comm* comm) {
    enum { MANY = 600, LENGTH = 53 };
    static int64_t integers[MANY][LENGTH];
    static float reals[MANY][LENGTH];
    static int64_t arrived[MANY][LENGTH];
    static CommRequest requests[MANY];
    Error error;
    size_t wrong = 0, bad = 0;
    int64_t total = (int64_t)(comm->world * (comm->world + 1) / 2);
    size_t part = LENGTH / comm->world;
    for (int i = 0; i < MANY; i++) {
        for (int k = 0; k < LENGTH; k++) {
            integers[i][k] = (int64_t)(comm->rank + 1) * (i + k);
            reals[i][k] = (float)(comm->rank * 1000 + (size_t)(i + k));
        }
        size_t from = (size_t)i % comm->world;
        float* x = reals[i];
        if (i % 4 == 0) requests[i] = start_sum(comm, integers[i], LENGTH, DTYPE_I64);
        else if (i % 4 == 1)
            requests[i] = comm_start(comm, COMM_BROADCAST, DTYPE_F32, x, x, LENGTH, from, NULL, NULL);
        else if (i % 4 == 2)
            requests[i] = start_all_to_all(comm, arrived[i], integers[i], comm->world * part, DTYPE_I64);
        else requests[i] = comm_start(comm, COMM_BARRIER, DTYPE_U8, NULL, NULL, 0, 0, NULL, NULL);
    }
    for (int i = 0; i < MANY; i++) {
        int j = i * 7 % MANY;  // 7 and MANY share no factor: each once
        bad += !comm_wait(comm, requests[j], &error);
        for (int k = 0; k < LENGTH; k++) {
            size_t from = (size_t)k / part, at = comm->rank * part + (size_t)k % part;
            wrong += j % 4 == 0 && integers[j][k] != total * (j + k);
            wrong += j % 4 == 2 && from < comm->world && arrived[j][k] != (int64_t)((from + 1) * ((size_t)j + at));
            wrong += j % 4 == 1 && reals[j][k] != (float)((size_t)j % comm->world * 1000 + (size_t)(j + k));
        }
    }
    expect(bad == 0 && wrong == 0, "600 requests in flight");
}

static void test_statistics(Comm* comm) {
    static const size_t lengths[] = {1001, 11};
    float data[1001] = {0.0f};
    Error error;
    size_t N = comm->world;
    for (int i = 0; i < 2; i++) {
        size_t n = lengths[i];
        Slice own = comm_even_slice(comm->rank, N, n);
        size_t length = own.end - own.first;
        CommStatistics before = comm_statistics(comm);
        expect(all_reduce(comm, data, n, DTYPE_F32, &error), "all_reduce");
        CommStatistics after = comm_statistics(comm);
        expect(after.bytes_sent - before.bytes_sent == sizeof(float) * ((n - length) + (N - 1) * length),
              "bytes sent of an all_reduce");
        comm_all_gather(comm, data, n, DTYPE_F32, NULL, NULL, &error);
        CommStatistics later = comm_statistics(comm);
        expect(later.bytes_sent - after.bytes_sent == sizeof(float) * (N - 1) * length, "bytes sent of an all_gather");
        comm_broadcast(comm, data, n, DTYPE_F32, 0, &error);
        size_t sent = comm->rank == 0 ? sizeof(float) * n * (N - 1) : 0;
        CommStatistics last = comm_statistics(comm);
        expect(last.bytes_sent - later.bytes_sent == sent, "bytes sent of a broadcast");
        float arrived[1001];
        size_t part = n / N;
        comm_wait(comm, start_all_to_all(comm, arrived, data, N * part, DTYPE_F32), &error);
        expect(comm_statistics(comm).bytes_sent - last.bytes_sent == sizeof(float) * (N - 1) * part,
               "bytes sent of an all_to_all");
    }
}

static uint64_t count_finished(Comm* comm) {
    pthread_mutex_lock(&comm->mutex);
    uint64_t finished = comm->queue->finished;
    pthread_mutex_unlock(&comm->mutex);
    return finished;
}

static void busy(double ms) {
    for (double end = now_ms() + ms; now_ms() < end;) {}
}

// Requests that take a while must finish under a computation, before any wait.
static void test_overlap(Comm* comm) {
    enum { REQUESTS = 5, DELAY_MS = 40 };
    float data[REQUESTS][1000] = {{0.0f}};
    CommRequest requests[REQUESTS];
    Error error;
    double deadline = now_ms() + LONG_MS;
    uint64_t finished = count_finished(comm);
    char fault[160];
    snprintf(fault, sizeof fault, "rank %zu step 0 at collective do delay %d; rank %zu step 0 at all_to_all do wait",
             comm->rank, DELAY_MS, comm->rank);
    setenv("LLMTRAIN_TEST_FAULT", fault, 1);
    fault_step(comm->rank, 0);
    for (int i = 0; i < REQUESTS; i++)
        requests[i] = start_sum(comm, data[i], 1000, DTYPE_F32);
    while (count_finished(comm) < finished + REQUESTS && now_ms() < deadline) busy(1);
    expect(count_finished(comm) == finished + REQUESTS, "communication goes on under a computation");
    for (int i = 0; i < REQUESTS; i++) expect(comm_wait(comm, requests[i], &error), "a delayed request");
    double before = comm_statistics(comm).waited_ms;
    for (int i = 0; i < REQUESTS; i++)
        expect(all_reduce(comm, data[i], 1000, DTYPE_F32, &error), "a delayed request");
    // All of it, except what a busy machine spends between a call's start and its wait.
    double waited = comm_statistics(comm).waited_ms - before;
    bool at_once = comm->world == 1;  // the start has done all, and there is nothing to wait for
    expect(at_once || waited > 0.25 * DELAY_MS * REQUESTS, "without a computation it is waited for");
    Collectives c;
    float arrived[1000];
    finished = count_finished(comm);
    need(collective_open(&c, &comm->transport, 1, NULL, &error), "%s", error.text);
    collective_all_to_all(&c, 0, arrived, data[0], comm->world * 100, DTYPE_F32, NULL);
    expect(count_finished(comm) == finished + !at_once, "an all_to_all that a fault makes wait");
    collective_wait(&c, 0, NULL);
    collective_close(&c);
}

static void test_all(Comm* comm) {
    Error error;
    test_collectives(comm);
    test_agree(comm);
    test_doubles(comm);
    test_many(comm);
    test_statistics(comm);
    expect(!comm_failed(comm, &error), "no fault");
}

// ------------------------------------------------------------------------------------------------
// 4. Scripts
//
// A script is a list of words, NAME or NAME=VALUE, that each rank executes in order; R:NAME is for rank R alone. Times
// are in ms, or in timeouts with the suffix t. After a failure the rank calls no further collective.

typedef struct {
    Launch launch;                 // of forked ranks
    Comm comm;
    Comm groups[2], *at;           // groups of ranks that were made; the Comm that the next words use
    size_t group_count;
    Error error;
    bool is_open, good;            // good: no failure so far
    size_t rank, world;
    int calls, late_calls;         // of on_failure
    bool counts, aborts_in_flight, in_place;
    pthread_t thread;              // it aborts, if aborts_later
    bool aborts_later;
    CommHeader next;               // arguments of the word `call`
    CommSlices slices;
} Actor;

#define REASON "cannot read data/x.bin: no such file"  // of a rank that aborts

// This process is killed or stopped by a signal, now or later.
static void perish(int signal) {
    self->fate = VICTIM;
    shared->fault_ms = now_ms();
    kill(getpid(), signal);
}

static int fault_signal;
static double fault_after_ms;
static void* perish_later(void* unused) {
    (void)unused;
    sleep_ms(fault_after_ms);
    perish(fault_signal);
    return NULL;
}

static void* abort_later(void* context) {
    char text[2000];
    memset(text, 'x', sizeof text);
    memcpy(text, REASON, strlen(REASON));
    text[sizeof text - 1] = 0;
    sleep_ms(5);
    comm_abort((Comm*)context, text);
    return NULL;
}

// The TCP connections of this process.
static size_t count_connections(void) {
    size_t count = 0;
    char address[64];
    for (int file = 0; file < 256; file++) {
        socket_peer_address(address, file);
        count += address[0] != '?' && address[0] != 0;
    }
    return count;
}

static void count_call(void* context) { __atomic_add_fetch((int*)context, 1, __ATOMIC_SEQ_CST); }
static int calls_counted(const int* calls) { return __atomic_load_n(calls, __ATOMIC_SEQ_CST); }

static Slice bad_slice(size_t rank, const void* context) {
    Slice s = {rank, ((const Cut*)context)->n + rank};
    return s;
}

// Calls the collective that `next` describes, on ones.
static void actor_call(Actor* a) {
    const CommHeader* h = &a->next;
    Cut cut = {h->n, a->at->world, CUT_UNEVEN};
    int64_t data[1000], arrived[1000], *out = h->operation == COMM_ALL_TO_ALL && !a->in_place ? arrived : data;
    for (size_t i = 0; i < COUNT_OF(data); i++) data[i] = 1;
    CommRequest request = comm_start(a->at, (CommOperation)h->operation, (Dtype)h->type, out, data, h->n, h->root,
                                     a->slices, &cut);
    a->good = comm_wait(a->at, request, &a->error);
    int64_t sum = h->operation == COMM_ALL_TO_ALL ? 1 : (int64_t)a->at->world;
    expect(!a->good || out[0] == sum, "a sum of ones is %lld", (long long)out[0]);
}

// Keeps sums, or all_to_all, in progress, each shorter than the previous one by a power of 2, until one fails.
static void actor_sums(Actor* a, size_t shift, bool all_to_all) {
    enum { REQUESTS = 4, LENGTH = 1 << 20 };
    CommRequest requests[REQUESTS];
    float* data = (float*)memory_allocate((size_t)(REQUESTS + 1) * LENGTH * sizeof(float));
    need(data != NULL, "memory");
    float* in = data + (size_t)REQUESTS * LENGTH;
    double end = now_ms() + 4 * timeout_ms;
    for (int round = 0; a->good && (now_ms() < end || round < 2); round++) {  // one may abort in the second
        for (size_t i = 0; i < REQUESTS; i++) {
            size_t n = LENGTH >> shift * i, parts = n / a->at->world * a->at->world;
            requests[i] = all_to_all ? start_all_to_all(a->at, data + i * LENGTH, in, parts, DTYPE_F32) :
                          start_sum(a->at, data + i * LENGTH, n, DTYPE_F32);
        }
        if (a->aborts_in_flight && round == 1) comm_abort(a->at, REASON);
        for (size_t i = 0; i < REQUESTS; i++) a->good = comm_wait(a->at, requests[i], &a->error);
    }
    free(data);
}

// Sums over all ranks in two steps: over a block of ranks, each of which has a slice of the sum then; and over those
// that have the same slice. Many are in flight; then every second rank starts those of the two groups in the other order.
static void actor_hybrid(Actor* a) {
    enum { REQUESTS = 40, LENGTH = 1003 };
    static int64_t data[REQUESTS][LENGTH];
    Comm *block = &a->groups[0], *copies = &a->groups[1];
    CommRequest sums[REQUESTS];
    Slice own = comm_even_slice(block->rank, block->world, LENGTH);
    size_t before = comm_statistics(&a->comm).bytes_sent;
    for (int i = 0; i < REQUESTS; i++) {
        for (int k = 0; k < LENGTH; k++) data[i][k] = (int64_t)(i * LENGTH + k) << 8 * a->rank;
        CommRequest first = comm_start(block, COMM_REDUCE_SCATTER, DTYPE_I64, data[i] + own.first, data[i], LENGTH, 0,
                                       NULL, NULL);
        a->good = a->good && comm_wait(block, first, &a->error);
        sums[i] = start_sum(copies, data[i] + own.first, slice_length(own), DTYPE_I64);
    }
    bool right = true;
    for (int i = 0; i < REQUESTS && a->good; i++) {
        a->good = comm_wait(copies, sums[i], &a->error);
        for (size_t k = own.first; k < own.end; k++) {
            int64_t expected = 0;
            for (size_t rank = 0; rank < a->world; rank++) expected += (int64_t)((size_t)i * LENGTH + k) << 8 * rank;
            right = right && data[i][k] == expected;
        }
    }
    expect(!a->good || right, "sums over blocks, then over copies");
    size_t length = slice_length(own), part = slice_length(comm_even_slice(copies->rank, copies->world, length));
    size_t sent = LENGTH - length + length - part + part * (copies->world - 1);
    expect(comm_statistics(&a->comm).bytes_sent - before == REQUESTS * sizeof(int64_t) * sent,
           "what groups send is counted by the Comm of all ranks");
    // Two groups at a time, in opposite orders: neither waits for the other.
    for (int round = 0; a->good && round < 20; round++) {
        Comm* pair[2] = {a->rank % 2 ? block : copies, a->rank % 2 ? copies : block};
        for (int k = 0; k < 2 && a->good; k++) sums[k] = start_sum(pair[k], data[k], LENGTH, DTYPE_F32);
        for (int k = 2; k-- > 0 && a->good;) a->good = comm_wait(pair[k], sums[k], &a->error);
    }
}

// Calls no collective; the rank must still learn of the failure.
static void actor_watch(Actor* a) {
    double deadline = now_ms() + CASE_MS / 2;
    while ((!comm_failed(a->at, &a->error) || calls_counted(&a->calls) == 0) && now_ms() < deadline) sleep_ms(1);
    a->good = !comm_failed(a->at, &a->error);
    outcome(a->good, &a->error);
    comm_on_failure(a->at, NULL, NULL);
    comm_on_failure(a->at, count_call, &a->late_calls);
    expect(calls_counted(&a->late_calls) == 1, "on_failure is called at once where it comes after the failure");
}

// A faulty switch in front of rank 1: it changes a bit of what rank 1 sends rank 0, in byte number altered_byte. It is a
// thread of rank 1, which must not end before all has passed.
typedef struct { int from, to; size_t altered_byte; } Relay;
static void* relay(void* context) {
    Relay* r = (Relay*)context;
    char data[1000];
    size_t passed = 0;
    for (ssize_t n; socket_await(r->from, POLLIN, now_ms() + CASE_MS) && (n = recv(r->from, data, sizeof data, 0)) > 0;
         passed += (size_t)n) {
        if (r->altered_byte >= passed && r->altered_byte < passed + (size_t)n) data[r->altered_byte - passed] ^= 4;
        if (!socket_move_all(r->to, data, (size_t)n, POLLOUT, now_ms() + CASE_MS)) break;
    }
    shutdown(r->to, SHUT_WR);
    return NULL;
}

static void actor_alter(Actor* a, size_t byte) {
    static Relay relays[2];
    int ends[2], *data = &a->at->links[0].data;
    need(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && descriptor_prepare(ends[0]) >= 0 &&
         descriptor_prepare(ends[1]) >= 0, "two sockets");
    const Relay out = {ends[1], *data, byte}, in = {*data, ends[1], SIZE_MAX};
    relays[0] = out;
    relays[1] = in;
    *data = ends[0];
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        need(pthread_create(&thread, NULL, relay, &relays[i]) == 0 && pthread_detach(thread) == 0, "a thread");
    }
}

// A broadcast that rank 1 receives slowly, until three timeouts have passed.
static void* end_throttling(void* unused) {
    (void)unused;
    sleep_ms(3.2 * timeout_ms);
    __atomic_store_n(&fault_state()->count, 0, __ATOMIC_RELEASE);
    return NULL;
}

static void actor_transfer(Actor* a) {
    pthread_t thread;
    int buffer = 1 << 16;
    size_t n = (size_t)32 << 20;
    char* data = (char*)memory_allocate(n);
    need(data != NULL, "memory");
    setsockopt(a->comm.links[1 - a->rank].data, SOL_SOCKET, a->rank == 0 ? SO_SNDBUF : SO_RCVBUF, &buffer,
               sizeof buffer);
    environment_set(text_of("LLMTRAIN_TEST_FAULT=rank 1 step 0 at transfer do delay %g", timeout_ms / 20));
    fault_step(a->rank, 0);
    need(pthread_create(&thread, NULL, end_throttling, NULL) == 0, "a thread");
    double began = now_ms();
    a->good = comm_broadcast(&a->comm, data, n, DTYPE_U8, 0, &a->error);
    expect(now_ms() - began > 3 * timeout_ms, "a transfer of %.0f ms", now_ms() - began);
    pthread_join(thread, NULL);
    free(data);
}

// Rank 1 dies when all have received the table; rank 2 connects to it only after rank 0 has ended too.
static void actor_connect_by_table(Actor* a) {
    Launch launch;
    CommRendezvous r;
    Comm* comm = &a->comm;
    memset(&r, 0, sizeof r);
    need(launch_find(&launch, &a->error), "%s", a->error.text);
    comm->rank = launch.rank;
    comm->world = launch.world;
    comm->timeout_ms = timeout_ms;
    comm->fan_out = comm_fan_out(comm->world);
    comm->wake = comm->waker = comm->listener = -1;
    memcpy(comm->run, launch.run, sizeof comm->run);
    snprintf(comm->doing, sizeof comm->doing, "in the rendezvous");
    r.launch = &launch;
    r.deadline = now_ms() + CASE_MS / 2;
    r.table = (CommAddress*)memory_allocate(comm->world * sizeof *r.table);
    need(r.table && comm_allocate(comm, &a->error) &&
             socket_listen(&comm->listener, &r.port, launch.address, &a->error) &&
             comm_receive_table(comm, &r, &a->error), "connecting to rank 0");
    if (a->rank == 1) perish(SIGKILL);
    sleep_ms(2 * COMM_GRACE_MS);
    a->good = comm_connect_lower(comm, &r, &a->error);
    outcome(a->good, &a->error);
    comm->failed = true;
    socket_close(&comm->listener);
    comm_close(comm);
    free(r.table);
}

// A rank's long error of several lines, which must be reported as one line.
static void report_sentence(char text[1024], size_t rank, char line_end) {
    memset(text, 'a' + (int)rank, 1023);
    text[500] = line_end;
    text[1023] = 0;
}

static void actor_report(const Actor* a) {
    char sentence[1024];
    report_sentence(sentence, a->rank, '\n');
    for (int i = 0; i < 200; i++) launch_report(&a->launch, "test_comm", sentence);  // more than a pipe holds
}

// The ranks of a Comm, without this one, whose data pass through memory that both share.
static size_t count_shared(const Comm* comm) {
    size_t count = 0;
    for (size_t p = 0; p < comm->world; p++) count += comm->links[p].rings[0] != NULL;
    return count;
}

static void actor_do(Actor* a, const char* name, const char* value) {
    char* unit;
    double ms = strtod(value, &unit) * (*unit == 't' ? timeout_ms : 1);
    int number = (int)ms;
    Error error;
#define IS(text) (strcmp(name, text) == 0)
    if (IS("env")) environment_set(value);
    else if (IS("files")) {  // fewer open files than the connections need, unless the process raises its limit
        struct rlimit limit = {10, (rlim_t)number};
        need(setrlimit(RLIMIT_NOFILE, &limit) == 0, "a limit of open files");
    } else if (IS("file_bytes")) {  // a longer file cannot be made
        struct rlimit limit = {(rlim_t)number, (rlim_t)number};
        signal(SIGXFSZ, SIG_IGN);
        need(setrlimit(RLIMIT_FSIZE, &limit) == 0, "a limit of a file's bytes");
    } else if (IS("shares")) {  // data with that many ranks, or with all, pass through shared memory
        bool any = MEMORY_IS_SHARED && !only_sockets;
        size_t expected = !any ? 0 : value[0] ? (size_t)number : a->at->world - 1;
        expect(count_shared(a->at) == expected, "memory shared with %zu ranks, not %zu", count_shared(a->at), expected);
    } else if (IS("connect") || IS("open")) {  // a failed `open` is not a result
        a->good = a->is_open = open_rank(&a->comm, strcmp(value, "long") == 0 ? LONG_MS : timeout_ms, &a->error);
        need(a->good || IS("connect"), "%s: %s", case_name, a->error.text);
        a->at = &a->comm;
    } else if (IS("mixed") || IS("blocks")) {  // groups of ranks: 0 2 4 and 1 3, or 0 1, 2 3 and 4
        a->at = &a->groups[a->group_count];
        a->good = comm_split(a->at, &a->comm, IS("mixed") ? a->rank % (size_t)number : a->rank / (size_t)number, 1,
                             &a->error);
        a->group_count += a->good;
        if (!a->good) a->at = &a->comm;
    } else if (IS("all")) a->at = &a->comm;
    else if (a->good && IS("hybrid")) actor_hybrid(a);
    else if (IS("table")) actor_connect_by_table(a);
    else if (IS("reached")) set_stage(number);
    else if (IS("stage")) {  // waits for the others
        set_stage(number);
        need(reach_stage(a->world, number), "the other ranks come to stage %d", number);
    } else if (IS("go")) await_stage(&shared->parent, 1);
    else if (IS("after_fault")) for (double end = now_ms() + CASE_MS / 2; shared->fault_ms == 0 && now_ms() < end;)
        sleep_ms(1);
    else if (IS("sleep")) sleep_ms(ms);
    else if (IS("report")) actor_report(a);
    else if (IS("hang")) sleep_ms(CASE_MS);
    else if (IS("busy")) busy(ms);
    else if (IS("exit")) {
        self->fate = LEAVES;
        for (size_t g = 0; g < a->group_count; g++) comm_close(&a->groups[g]);
        if (a->is_open) comm_close(&a->comm);
        exit(number);
    } else if (IS("kill")) perish(SIGKILL);
    else if (IS("stop")) perish(SIGSTOP);
    else if (IS("kill_after") || IS("stop_after")) {
        fault_signal = IS("kill_after") ? SIGKILL : SIGSTOP;
        fault_after_ms = ms + 5.0 * (double)a->rank;
        need(pthread_create(&a->thread, NULL, perish_later, NULL) == 0 && pthread_detach(a->thread) == 0, "a thread");
    } else if (IS("abort")) {
        shared->fault_ms = now_ms();
        comm_abort(a->at, REASON);
    } else if (IS("abort_in_flight")) a->aborts_in_flight = true;
    else if (IS("abort_later") && a->good) {
        a->aborts_later = true;
        need(pthread_create(&a->thread, NULL, abort_later, a->at) == 0, "starting a thread");
    } else if (IS("alter")) actor_alter(a, (size_t)number);
    else if (IS("dies_in_split") || IS("cannot_map")) {
        const char* fault = IS("cannot_map") ? "share do flip" : "split do kill";
        environment_set(text_of("LLMTRAIN_TEST_FAULT=rank %zu step 0 at %s", a->rank, fault));
        fault_step(a->rank, 0);
        if (IS("dies_in_split")) self->fate = VICTIM;
    }
    else if (IS("extend")) comm_extend_timeout(&a->comm, true);
    else if (IS("n")) a->next.n = (uint64_t)number;
    else if (IS("root")) a->next.root = (uint32_t)number;
    else if (IS("type")) a->next.type = strcmp(value, "uint8") == 0 ? DTYPE_U8 : DTYPE_F32;
    else if (IS("broadcast")) a->next.operation = COMM_BROADCAST;
    else if (IS("all_gather")) a->next.operation = COMM_ALL_GATHER;
    else if (IS("all_to_all")) a->next.operation = COMM_ALL_TO_ALL;
    else if (IS("in_place")) a->in_place = true;
    else if (IS("slices")) a->slices = strcmp(value, "bad") == 0 ? bad_slice : cut_slice;
    else if (IS("count_calls")) a->counts = true, comm_on_failure(a->at, count_call, &a->calls);
    else if (IS("no_failure"))
        expect(!comm_failed(a->at, &error) && calls_counted(&a->calls) == 0, "no failure yet");
    else if (IS("failed"))
        expect(comm_failed(&a->comm, &error) && strstr(error.text, REASON) && calls_counted(&a->calls) == 1,
               "it has aborted");
    else if (IS("edges")) {  // of the tree, once all have connected: the others' control connections are closed
        size_t expected = a->world - 1;
        for (size_t p = 0; p < a->world; p++) expected += comm_is_joined(&a->comm, p);
        for (double end = now_ms() + SLACK_MS; count_connections() != expected && now_ms() < end;) sleep_ms(1);
        expect(count_connections() == expected, "%zu connections, not %zu", count_connections(), expected);
    } else if (IS("local"))
        expect(a->comm.local_rank == a->rank && a->comm.local_world == a->world &&
               a->comm.transport.local_world == a->world, "local ranks are counted");
    else if (IS("collectives")) test_all(a->at);
    else if (IS("overlap")) test_overlap(a->at);
    else if (a->good && IS("barrier")) a->good = comm_barrier(a->at, &a->error);
    else if (a->good && IS("start_barrier")) comm_start(a->at, COMM_BARRIER, DTYPE_U8, NULL, NULL, 0, 0, NULL, NULL);
    else if (a->good && IS("call")) actor_call(a);
    else if (a->good && IS("sums")) actor_sums(a, (size_t)number, a->next.operation == COMM_ALL_TO_ALL);
    else if (a->good && IS("watch")) actor_watch(a);
    else if (a->good && IS("transfer")) actor_transfer(a);
    else need(!a->good, "%s is a word", name);
#undef IS
}

static void actor_run(Actor* a, const char* script) {
    char *text = strdup(script), *word = strtok(text, " ");
    for (; word && (a->good || a->is_open); word = strtok(NULL, " ")) {
        bool one = word[1] == ':';
        char* value = strchr(word, '=');
        if (one && word[0] != (char)('0' + a->rank)) continue;
        if (value) *value++ = 0;
        actor_do(a, word + 2 * one, value ? value : "");
    }
    free(text);
}

static const char* case_script;

static void body_script(size_t rank) {
    static Actor a;
    Error again;
    a.good = true;
    a.rank = rank;
    a.world = strtoul(getenv("WORLD_SIZE"), NULL, 10);
    a.next.n = 40;
    a.next.operation = COMM_ALL_REDUCE;
    a.next.type = DTYPE_I64;
    actor_run(&a, case_script);
    if (!self->done) outcome(a.good, &a.error);
    if (!a.is_open) return;
    if (!a.good)
        expect(!comm_barrier(&a.comm, &again) && strcmp(again.text, a.error.text) == 0,
               "after a failure all calls fail, with the same words");
    for (size_t g = 0; !a.good && g < a.group_count; g++) {  // each of them learns of it a moment later
        for (double end = now_ms() + SLACK_MS; !comm_failed(&a.groups[g], &again) && now_ms() < end;) sleep_ms(1);
        expect(!comm_barrier(&a.groups[g], &again) && strcmp(again.text, a.error.text) == 0,
               "after a failure all calls of group %zu fail, with the same words", g);
    }
    if (a.aborts_later) pthread_join(a.thread, NULL);
    for (size_t g = 0; g < a.group_count; g++) comm_close(&a.groups[g]);
    comm_close(&a.comm);
    if (a.counts) expect(calls_counted(&a.calls) == !a.good, "on_failure is called once");
}

// Runs a case once for each odd rank.
static void case_run(const Case* c) {
    for (const char* odd = c->odd ? c->odd : " "; *odd; odd++) {
        char *name = odd_text(c->name, *odd), *words = odd_text(c->script, *odd);
        size_t world = c->world ? c->world : (size_t)(*odd - '0');
        case_script = words;
        start_ranks(name, world, body_script);
        if (c->meanwhile) c->meanwhile();
        end_ranks(world);
        case_judge(c, world, *odd);
        free(name);
        free(words);
    }
}

// ------------------------------------------------------------------------------------------------
// 5. Memory

// What ranks share has no name, so none can be left: not even when all are killed.
static void nothing_left(void) {
    glob_t found;
    bool any = glob(SYSTEM_MEMORY_FOLDER "/*llmtrain*", GLOB_NOSORT, NULL, &found) == 0;
    for (size_t i = 0; any && i < found.gl_pathc; i++) {
        bool of_supervisor = strstr(found.gl_pathv[i], "/llmtrain-locked-") != NULL;
        expect(of_supervisor, "%s is left", found.gl_pathv[i]);
    }
    if (any) globfree(&found);
    expect(true, "names in " SYSTEM_MEMORY_FOLDER);
}

static char stream_byte(uint64_t at) { return (char)(at * 7 + at / 251); }

// A stream through a ring, in messages of many lengths, the reader behind by nothing up to all that fits.
static void test_stream(SharedRing* to, SharedRing* from) {
    static char data[SHARED_CAPACITY], arrived[SHARED_CAPACITY];
    uint64_t sent = 0, received = 0;
    size_t wrong = 0, full = 0, empty = 0;
    for (size_t step = 0; step < 400; step++) {
        Random4 r = random4(1, RANDOM_TEST, 0, step);
        size_t longest = step / 20 % 2 ? SHARED_CAPACITY : 300, n = r.bits[0] % longest + 1, done = 0, got = 1;
        for (size_t i = 0; i < n; i++) data[i] = stream_byte(sent + i);
        for (; done < n && got > 0; done += got) got = shared_send(to, data + done, n - done);
        sent += done;
        full += got == 0;
        wrong += sent - received > SHARED_CAPACITY || (got == 0 && sent - received < SHARED_CAPACITY);
        n = r.bits[1] % longest;
        for (done = 0, got = 1; done < n && got > 0; done += got) got = shared_receive(from, arrived + done, n - done);
        for (size_t i = 0; i < done; i++) wrong += arrived[i] != stream_byte(received + i);
        received += done;
        empty += got == 0;
        wrong += got == 0 && received < sent;
    }
    expect(wrong == 0 && full > 10 && empty > 10 && sent > 50 * SHARED_CAPACITY, "a stream: %zu wrong, %zu full, %zu "
           "empty", wrong, full, empty);
    while (shared_receive(from, arrived, sizeof arrived) > 0) {}
}

// Flags: who waits is woken once, by what it waits for.
static void test_flags(SharedRing* a[2], SharedRing* b[2]) {
    static char data[SHARED_CAPACITY];
    expect(!shared_wakes(a) && !shared_wakes(b), "nobody waits");
    expect(shared_waits(a, POLLIN), "an empty ring: it may wait");
    expect(!shared_wakes(a), "it does not wake itself");
    expect(shared_send(b[0], data, 1) == 1 && shared_wakes(b) && !shared_wakes(b), "woken once, to receive");
    expect(!shared_waits(a, POLLIN), "a byte is there: it may not wait");
    expect(shared_receive(a[1], data, 9) == 1 && shared_waits(a, POLLIN) && shared_waits(a, 0), "it no longer waits");
    expect(shared_send(b[0], data, 1) == 1 && !shared_wakes(b) && shared_receive(a[1], data, 1) == 1, "nobody waits");

    expect(!shared_waits(a, POLLOUT), "there is room: it may not wait");
    while (shared_send(a[0], data, sizeof data) > 0) {}
    expect(shared_waits(a, POLLOUT), "a full ring: it may wait");
    size_t room = 0;
    while (!shared_wakes(b)) {
        size_t got = shared_receive(b[1], data, SHARED_CAPACITY / 10);
        room += got;
        if (!expect(got > 0, "it is never woken")) break;
    }
    expect(room >= SHARED_CAPACITY / 2 && room < SHARED_CAPACITY * 7 / 10 && !shared_wakes(b),
           "woken once, to send, when half is free");
    shared_waits(a, POLLOUT | POLLIN);
    expect(shared_send(b[0], data, 1) == 1 && shared_receive(b[1], data, 1) == 1 && shared_wakes(b) && !shared_wakes(b),
           "woken once, for both");
}

static void test_memory(void) {
    SharedFile file, other;
    SharedRing *a[2], *b[2], *none[2];
    memset(&file, 0, sizeof file);
    int made = shared_make(&file, 3, 77);
    if (!MEMORY_IS_SHARED) {
        expect(made < 0 && file.path[0] == 0 && !shared_map(none, &file, 0, true), "no memory is shared");
        skip("memory that two processes share", "this system has no files without names");
        return;
    }
    need(made >= 0, "a file in memory");
    struct stat status;
    expect(fstat(made, &status) == 0 && status.st_size == 6 * (off_t)SHARED_RING &&
           status.st_blocks * 512 >= status.st_size, "all its memory is reserved");
    expect(status.st_nlink == 0, "it has no name");
    need(shared_map(a, &file, 2, true) && shared_map(b, &file, 2, false), "its last pair is mapped twice");
    expect(!shared_map(none, &file, 3, true) && none[0] == NULL, "a pair behind the end");
    other = file;
    other.number = 78;
    expect(!shared_map(none, &other, 0, false) && none[0] == NULL, "another file at this path");
    static const char* const paths[] = {"", "/dev/zero", "/", "/dev/null", "/proc/0/fd/0"};
    for (size_t i = 0; i < COUNT_OF(paths); i++) {
        snprintf(other.path, sizeof other.path, "%s", paths[i]);
        other.number = 0;
        expect(!shared_map(none, &other, 0, false) && none[0] == NULL, "something else at '%s'", paths[i]);
    }
    test_stream(a[0], b[1]);
    test_stream(b[0], a[1]);
    test_flags(a, b);
    close(made);
    expect(!shared_map(none, &file, 2, false), "it has no path any more");
    a[0]->data[5] = 9;
    expect(b[1]->data[5] == 9, "it lasts as long as it is mapped");
    shared_unmap(a);
    shared_unmap(b);
    nothing_left();
    verdict("memory that two processes share");
}

// ------------------------------------------------------------------------------------------------
// 6. Launch

#define RENDEZVOUS "|MASTER_ADDR=a|MASTER_PORT=7"

// The variables and the expected result: rank/world, launcher, address:port (*: anywhere in the range derived from a
// job's name), run identifier and local rank.
static const struct {
    const char *variables, *found;
} launches[] = {
    {"", "0/1 none"},
    {"RANK=1|WORLD_SIZE=3|LOCAL_RANK=1|LOCAL_WORLD_SIZE=2|MASTER_ADDR=node7|MASTER_PORT=29400|TORCHELASTIC_RUN_ID=abc",
     "1/3 torchrun node7:29400 abc 1"},
    {"RANK=1|WORLD_SIZE=2|LOCAL_RANK=1|MASTER_ADDR=::1|MASTER_PORT=5|TORCHELASTIC_RUN_ID=abc|"
     "TORCHELASTIC_RESTART_COUNT=2|TORCHELASTIC_USE_AGENT_STORE=True", "1/2 torchrun ::1:6 abc.2 1"},
    {"RANK=0|WORLD_SIZE=1", "0/1 torchrun"},
    {"OMPI_COMM_WORLD_RANK=2|OMPI_COMM_WORLD_SIZE=4|OMPI_COMM_WORLD_LOCAL_RANK=0|OMPI_COMM_WORLD_LOCAL_SIZE=2|"
     "OMPI_MCA_ess_base_jobid=99" RENDEZVOUS, "2/4 Open MPI a:7 99 0"},
    {"OMPI_COMM_WORLD_RANK=1|OMPI_COMM_WORLD_SIZE=2|OMPI_COMM_WORLD_LOCAL_RANK=1|OMPI_COMM_WORLD_LOCAL_SIZE=2|"
     "PMIX_NAMESPACE=job", "1/2 Open MPI 127.0.0.1:* job 1"},
    {"PMI_RANK=1|PMI_SIZE=2|MPI_LOCALRANKID=1|MPI_LOCALNRANKS=2|LLMTRAIN_RUN_ID=mine", "1/2 MPICH 127.0.0.1:* mine 1"},
    {"SLURM_PROCID=5|SLURM_STEP_NUM_TASKS=8|SLURM_LOCALID=1|SLURM_JOB_ID=12|SLURM_STEP_ID=3|"
     "SLURM_STEP_NODELIST=gpu[07-08,11],cpu1", "5/8 Slurm gpu07:* 12.3 1"},
    {"SLURM_PROCID=1|SLURM_STEP_NUM_TASKS=2|SLURM_LOCALID=1|SLURM_JOB_ID=12|SLURM_STEP_ID=0|"
     "SLURM_STEP_NODELIST=head,cpu1|SLURM_STEP_NUM_NODES=1", "1/2 Slurm 127.0.0.1:* 12.0 1"},
    {"SLURM_PROCID=0|SLURM_STEP_NUM_TASKS=2|SLURM_JOB_ID=12", "0/1 none"},  // a batch script is no step
    {"RANK=1|WORLD_SIZE=2|OMPI_COMM_WORLD_RANK=1|OMPI_COMM_WORLD_SIZE=2" RENDEZVOUS, "1/2 torchrun a:7 unnamed"},
    {"RANK=1024|WORLD_SIZE=1025" RENDEZVOUS, "1024/1025 torchrun a:7 unnamed"},
};
static const struct {
    const char *variables, *words, *more_words;
} launch_refusals[] = {
    {"RANK=0|WORLD_SIZE=65537" RENDEZVOUS, "WORLD_SIZE is '65537'", "from 0 to 65536"},
    {"RANK=1", "RANK is set and WORLD_SIZE is not", "torchrun"},
    {"WORLD_SIZE=2", "WORLD_SIZE is set and RANK is not", ""},
    {"SLURM_PROCID=1|SLURM_STEP_ID=0", "SLURM_PROCID is set and SLURM_STEP_NUM_TASKS is not", "Slurm"},
    {"RANK=two|WORLD_SIZE=2", "RANK is 'two'", "whole number"},
    {"RANK=-1|WORLD_SIZE=2", "RANK is '-1'", "whole number"},
    {"RANK=2|WORLD_SIZE=2" RENDEZVOUS, "RANK is 2 and WORLD_SIZE is 2", "contradict"},
    {"RANK=0|WORLD_SIZE=0", "WORLD_SIZE is 0", "contradict"},
    {"RANK=1|WORLD_SIZE=4|LOCAL_RANK=2" RENDEZVOUS, "LOCAL_RANK is 2 and RANK is 1", "contradict"},
    {"RANK=3|WORLD_SIZE=4|LOCAL_RANK=2|LOCAL_WORLD_SIZE=2" RENDEZVOUS, "LOCAL_WORLD_SIZE is 2", "contradict"},
    {"RANK=3|WORLD_SIZE=4|LOCAL_WORLD_SIZE=5" RENDEZVOUS, "LOCAL_WORLD_SIZE is 5", "contradict"},
    {"RANK=1|WORLD_SIZE=2|OMPI_COMM_WORLD_RANK=0|OMPI_COMM_WORLD_SIZE=2" RENDEZVOUS, "RANK says rank 1 of 2",
     "OMPI_COMM_WORLD_RANK says rank 0 of 2"},
    {"RANK=1|WORLD_SIZE=2", "set MASTER_ADDR", "MASTER_PORT"},
    {"RANK=1|WORLD_SIZE=2|MASTER_ADDR=a", "MASTER_ADDR is set and MASTER_PORT is not", ""},
    {"RANK=1|WORLD_SIZE=2|MASTER_PORT=9", "MASTER_PORT is set and MASTER_ADDR is not", ""},
    {"RANK=1|WORLD_SIZE=2|MASTER_ADDR=a|MASTER_PORT=0", "MASTER_PORT is '0'", "1 to 65535"},
    {"RANK=1|WORLD_SIZE=2|MASTER_ADDR=a|MASTER_PORT=65536", "MASTER_PORT is '65536'", "1 to 65535"},
    {"RANK=1|WORLD_SIZE=2|MASTER_ADDR=a|MASTER_PORT=http", "MASTER_PORT is 'http'", ""},
};

static bool launch_matches(const Launch* l, const char* found) {
    char text[512];
    int used = snprintf(text, sizeof text, "%zu/%zu %s", l->rank, l->world, l->launcher);
    if (l->world == 1) return l->listener < 0 && strcmp(text, found) == 0;
    bool through_mpi = l->mpi && l->address[0] == 0;  // it knows where the ranks meet
    if (through_mpi) return strncmp(found, text, (size_t)used) == 0 && strstr(found, l->run);
    bool derived = strstr(found, ":*") && l->port >= 20000 && l->port < 32000;
    const char* at = derived ? "*" : text_of("%zu", l->port);
    used += snprintf(text + used, sizeof text - (size_t)used, " %s:%s %s", l->address, at, l->run);
    if (l->local_rank != LAUNCH_UNKNOWN) snprintf(text + used, sizeof text - (size_t)used, " %zu", l->local_rank);
    return strcmp(text, found) == 0;
}

// Reads the launch from these variables.
static bool launch_with(Launch* launch, const char* variables, Error* error) {
    memset(error, 0, sizeof *error);
    environment_clear();
    environment_set(variables);
    return launch_find(launch, error);
}

static void test_launch(void) {
    Launch launch;
    Error error;
    for (size_t i = 0; i < COUNT_OF(launches); i++) {
        bool good = launch_with(&launch, launches[i].variables, &error);
        expect(good && launch_matches(&launch, launches[i].found), "'%s': %s", launches[i].variables,
               good ? launch.launcher : error.text);
    }
    for (size_t i = 0; i < COUNT_OF(launch_refusals); i++) {
        bool good = launch_with(&launch, launch_refusals[i].variables, &error);
        expect_refusal(good, &error, launch_refusals[i].words, launch_refusals[i].variables);
        expect_refusal(good, &error, launch_refusals[i].more_words, launch_refusals[i].variables);
    }
    environment_clear();
    environment_set("RANK=0|WORLD_SIZE=2|MASTER_ADDR=127.0.0.1|MASTER_PORT=7");
    expect(!launch_fork(&launch, 3, &error) && strstr(error.text, "torchrun has started 2 ranks already"),
           "forked ranks under a launcher");
    environment_clear();
    expect(!launch_fork(&launch, 0, &error) && strstr(error.text, "0 ranks were asked for"), "0 forked ranks");
    expect(!launch_fork(&launch, 65537, &error) && strstr(error.text, "65537 ranks were asked for; give 1 to 65536"),
           "too many forked ranks");
    expect(launch_fork(&launch, 1, &error) && launch.world == 1 && launch_reap(&launch, "test_comm", 3, 0, &error) == 3,
           "1 forked rank");
    verdict("variables of launchers");
}

// Ranks forked by launch_fork, in a process of its own, and launch_reap's verdict on their exits.
typedef struct {
    const char* name;
    int code;                     // returned by launch_reap
    const char* words;            // its error, also printed if no rank has reported anything
    const char *before, *script;  // what the ranks do before they connect (rank 2 may fail), and after
} Spawn;
static const Spawn SPAWNS[] = {
    {"forked ranks", 0, "", "", ""},
    {"forked ranks, one exits with 7", 7, "rank 2 ended with exit code 7", "", "2:exit=7"},
    {"forked ranks, one is killed", 128 + SIGKILL, "rank 2 was terminated by signal 9", "", "2:kill"},
    {"forked ranks, one is stopped", 128 + SIGKILL, "rank 2 did not end within 2.0 s", "", "2:stop"},
    {"forked ranks, all report at once", 7, "rank 2 ended with exit code 7", "", "1:report 2:report 2:exit=7"},
    {"forked ranks, rank 0 is killed", 0, "", "", "0:kill hang"},
    {"forked ranks, one is killed before it connects", 1, "rank 2 was terminated by signal 9", "2:kill", ""},
};
static const Spawn* spawn;

// The ranks' standard error: one complete line if something has failed.
static void expect_report(FILE* file) {
    static char text[1 << 16];
    char expected[2048], sentence[1024];
    bool several = strstr(spawn->script, "report") != NULL, right;
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    snprintf(expected, sizeof expected, "%s%s%s", spawn->words[0] ? "test_comm: " : "",
             spawn->words[0] && !spawn->before[0] ? "rank 0: " : "", spawn->words);
    right = !several && strncmp(text, expected, strlen(expected)) == 0;
    for (size_t rank = 1; rank < 3 && several; rank++) {
        report_sentence(sentence, rank, ' ');
        snprintf(expected, sizeof expected, "test_comm: rank %zu: %s\n", rank, sentence);
        right = right || strcmp(text, expected) == 0;
    }
    size_t lines = count_in(text, "\n");
    expect(right && lines == (expected[0] != 0), "standard error has %zu lines: %.200s", lines, text);
}

static void body_spawn(size_t unused) {
    static Actor a;
    Comm comm;
    Error error;
    (void)unused;
    environment_clear();
    FILE* printed = tmpfile();
    need(printed && dup2(fileno(printed), STDERR_FILENO) >= 0, "a file for standard error");
    need(launch_fork(&a.launch, 3, &error), "forked ranks: %s", error.text);
    a.good = true;
    a.rank = a.launch.rank;
    self = &shared->ranks[a.rank];
    shared->forked[a.rank] = getpid();
    actor_run(&a, spawn->before);
    double began = now_ms();
    bool absent = spawn->before[0], good = comm_open(&comm, &a.launch, LONG_MS, &error);
    int64_t sum = (int64_t)a.rank + 1;
    if (!absent) {
        good = good && all_reduce(&comm, &sum, 1, DTYPE_I64, &error) && sum == 6 && comm.local_rank == comm.rank &&
               comm.local_world == 3;
        if (good) comm_close(&comm);
        if (a.rank == 0) expect(good, "forked ranks connect");
    } else if (a.rank == 0) {
        expect(!good && strstr(error.text, "rank 2 is gone: it ended before"), "says: %s", error.text);
        expect(now_ms() - began < SLACK_MS, "in time");
    }
    actor_run(&a, spawn->script);
    if (a.rank > 0) exit(0);
    began = now_ms();
    double grace_ms = strstr(spawn->script, "stop") ? 2000 : LONG_MS;
    int code = launch_reap(&a.launch, "test_comm", absent, grace_ms, &error);
    expect(code == spawn->code && strstr(error.text, spawn->words) && (code != 0) == (error.text[0] != 0),
           "exit code %d, and: %s", code, error.text);
    expect(now_ms() - began < grace_ms + SLACK_MS, "in time");
    expect_report(printed);
}

// No process can be forked: everything begun is released.
static void body_no_spawn(size_t unused) {
    Launch launch;
    Error error;
    struct rlimit before, none;
    (void)unused;
    environment_clear();
    need(getrlimit(RLIMIT_NPROC, &before) == 0, "the limit on processes");
    none = before;
    none.rlim_cur = 0;
    need(setrlimit(RLIMIT_NPROC, &none) == 0 && (geteuid() != 0 || setuid(65534) == 0), "a limit on processes");
    expect(!launch_fork(&launch, 3, &error) && strstr(error.text, "cannot start rank 1 of 3"), "cannot fork");
    expect(launch_reap(&launch, "test_comm", 3, 0, &error) == 3 && launch.listener == -1, "nothing is left of it");
    need(setrlimit(RLIMIT_NPROC, &before) == 0 && machine_allow_tracing(), "what the leak sanitizer needs");
}

static void test_spawn(void) {
    machine_adopt_orphans(true);
    for (spawn = SPAWNS; spawn < SPAWNS + COUNT_OF(SPAWNS); spawn++) {
        start_ranks(spawn->name, 1, body_spawn);
        end_ranks(1);
        bool dies = strstr(spawn->script, "0:kill") != NULL;
        expect((shared->ranks[0].fate == VICTIM) == dies, "rank 0 is killed");
        for (size_t rank = 1; rank < 3 && dies; rank++) {
            int status = 0;
            pid_t gone = 0;
            for (double end = now_ms() + SLACK_MS; gone == 0 && now_ms() < end; sleep_ms(1))
                gone = waitpid(shared->forked[rank], &status, WNOHANG);
            expect(gone > 0 && WIFSIGNALED(status), "rank %zu dies with rank 0", rank);
            if (gone == 0) kill(shared->forked[rank], SIGKILL);
        }
        end_case();
    }
    machine_adopt_orphans(false);
    start_ranks("no rank can be forked", 1, body_no_spawn);
    end_ranks(1);
    end_case();
}

// ------------------------------------------------------------------------------------------------
// 7. Rendezvous

static int connect_to_rank_0(double deadline) {
    Error error;
    int connection;
    while ((connection = socket_connect("127.0.0.1", port, deadline, &error)) < 0 && now_ms() < deadline) sleep_ms(1);
    need(connection >= 0, "connecting to rank 0");
    return connection;
}

// Noise, a few bytes, and many silent connections, all to rank 0 before the ranks connect. They must not delay the
// rendezvous: there are too many to wait for each within the timeout.
static int strangers[4 * COMM_PENDING_MAX];
static void strangers_come(void) {
    char noise[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", few[] = "llm";
    double deadline = now_ms() + LONG_MS;
    for (size_t i = 0; i < COUNT_OF(strangers); i++) strangers[i] = connect_to_rank_0(deadline);
    need(socket_move_all(strangers[0], noise, strlen(noise), POLLOUT, deadline), "sending noise");
    need(socket_move_all(strangers[1], few, strlen(few), POLLOUT, deadline), "sending little");
    set_stage(1);
}

// Acts as rank 1, with a connection of an unknown kind.
static void connect_of_no_kind(void) {
    CommHandshake handshake = {COMM_MAGIC, 77, 2, 1, 1, "test"};
    CommMessage message;
    double deadline = now_ms() + LONG_MS;
    int connection = connect_to_rank_0(deadline);
    need(socket_move_all(connection, &handshake, sizeof handshake, POLLOUT, deadline), "a handshake");
    bool received = socket_move_all(connection, &message, sizeof message, POLLIN, deadline);
    expect(received && message.kind == COMM_FAILED && strstr(message.text, "not this version"), "it is refused");
    close(connection);
    set_stage(1);
}

static void strangers_leave(void) {
    for (size_t i = 0; i < COUNT_OF(strangers); i++) close(strangers[i]);
}

// Acts as rank 1, but opens the data connection before the control connection, and then closes both.
static void connect_in_disorder(void) {
    CommHandshake handshake = {COMM_MAGIC, COMM_DATA, 2, 1, 1, "test"};
    int sockets[2];
    double deadline = now_ms() + LONG_MS;
    for (int i = 0; i < 2; i++) {
        sockets[i] = connect_to_rank_0(deadline);
        handshake.kind = i == 0 ? COMM_DATA : COMM_CONTROL;
        need(socket_move_all(sockets[i], &handshake, sizeof handshake, POLLOUT, deadline), "a handshake");
        sleep_ms(300);
    }
    CommMessage message;
    bool received = socket_move_all(sockets[1], &message, sizeof message, POLLIN, now_ms());
    expect(received && message.kind == COMM_WELCOME, "rank 0 welcomes rank 1");
    for (int i = 0; i < 2; i++) close(sockets[i]);
}

// Answers one connection as a mail server would, with more bytes than rank 0 sends: all at once, since rank 1 closes
// the connection when it has read enough.
static int busy_listener;
static void answer_first(void) {
    char answer[2 * sizeof(CommMessage)];
    double deadline = now_ms() + LONG_MS;
    int connection = -1;
    for (size_t i = 0; i < sizeof answer; i++) answer[i] = "220 welcome\r\n"[i % 13];
    while (connection < 0 && now_ms() < deadline) {
        connection = accept(busy_listener, NULL, NULL);
        sleep_ms(1);
    }
    need(connection >= 0, "a connection of rank 1");
    need(socket_move_all(connection, answer, sizeof answer, POLLOUT, deadline), "an answer to rank 1");
    sleep_ms(100);
    close(connection);
}

// The port is taken: by something silent that never accepts, and by something that answers first.
static void test_busy_port(void) {
    for (int answers = 0; answers < 2; answers++) {
        size_t taken = 0;
        Error error;
        need(socket_listen(&busy_listener, &taken, "127.0.0.1", &error), "taking a port");
        Case c = {.name = answers ? "a port in use by a program that answers" : "a port in use", .world = 2,
                  .script = text_of("env=MASTER_PORT=%zu connect", taken),
                  .says = {text_of("%zu", taken), "0:the port is in use",
                           answers ? "1:is not rank 0 of this program" : "1:has not answered rank 1"},
                  .meanwhile = answers ? answer_first : NULL};
        case_run(&c);
        close(busy_listener);
    }
}

// An address of this machine, IPv4 or IPv6, on a network or loopback; NULL if it has none.
static const char* find_address(char text[64], sa_family_t family, bool loopback) {
    struct ifaddrs* list = NULL;
    socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    text[0] = 0;
    if (getifaddrs(&list) != 0) return NULL;
    for (const struct ifaddrs* i = list; i && text[0] == 0; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == family && (i->ifa_flags & IFF_UP) &&
            !(i->ifa_flags & IFF_LOOPBACK) == !loopback)
            getnameinfo(i->ifa_addr, bytes, text, 64, NULL, 0, NI_NUMERICHOST);
    freeifaddrs(list);
    return text[0] ? text : NULL;
}

static void test_addresses(void) {
    char outside[64], inside[64];
    const char* const addresses[] = {find_address(outside, AF_INET, false), find_address(inside, AF_INET6, true),
                                     "localhost"};
    const char* const names[] = {"an address that others can reach", "::1", "localhost"};
    for (size_t i = 0; i < COUNT_OF(addresses); i++) {
        Case c = {.name = text_of("a rendezvous at %s", names[i]), .world = 3};
        c.script = text_of("env=MASTER_ADDR=%s open=long blocks=2 call all barrier", addresses[i] ? addresses[i] : "");
        if (addresses[i]) case_run(&c);
        else skip(c.name, "this machine has none");
    }
}

// Rank 0 keeps waiting for the right rank.
static void told_at_once(void) {
    expect(shared->ranks[1].ended_ms < shared->ranks[0].ended_ms, "rank 1 is told at once");
}

static void suspend_all(void) {
    expect(reach_stage(3, 2), "all ranks have connected");
    for (size_t rank = 0; rank < 3; rank++) kill(children[rank], SIGSTOP);
    sleep_ms(2 * timeout_ms);
    for (size_t rank = 0; rank < 3; rank++) kill(children[rank], SIGCONT);
    sleep_ms(100);
    set_stage(1);
}

// ------------------------------------------------------------------------------------------------
// 8. Table
//
// The lanes of cases run at once, the cases of a lane one after the other.

#define TREE "env=LLMTRAIN_TEST_TREE=2 "
#define SOCKETS "env=LLMTRAIN_TEST_SOCKETS=1 "

static const Case CASES[] = {
    {0, "collectives between @ ranks", "12345", 0, "open=long local shares collectives", SUCCEED},
    {0, "communication under a computation", NULL, 2, "open=long overlap", SUCCEED},

    // Ranks that never come. On a slow machine a fault may precede the handshake: the rank then has not connected.
    {1, "rank @ never connects", "0", 3, "@:exit connect", SAY("not reached rank 0 at 127.0.0.1"), .timeouts = 1},
    {1, "rank @ never connects", "12", 3, "@:exit connect", SAY("rank @ has not connected to rank 0"), .timeouts = 1},
    {1, "few open files, and more for a process that asks", NULL, 5, "files=64 connect", SUCCEED},
    {1, "few open files", NULL, 5, "files=10 connect", SAY("may have only 10; raise the limit"),
     .timeouts = 1},
    {1, "rank @ is killed in the rendezvous before the last has connected", "12", 4,
     "@:kill_after=500 3:after_fault 3:sleep=300 connect=long", SAY("rank @ is gone|rank @ has not connected"),
     .ms = COMM_GRACE_MS},
    {1, "rank 1 is killed in the rendezvous when all have the table", NULL, 3, "0:connect=long 1:table 2:table",
     SAY("rank 1 is gone"), .ms = 3 * COMM_GRACE_MS},

    // Ranks that do not belong to the run, and other clients.
    {2, "a rank of another run", NULL, 2, "1:env=LLMTRAIN_RUN_ID=another connect",
     SAY("1:belongs to run 'another', but rank 0 here belongs to run 'test'", "0:rank 1 has not connected",
         "0:Rejected: rank 1"),
     .also = told_at_once},
    {2, "a rank with another world size", NULL, 2, "1:env=WORLD_SIZE=5 connect=long",
     SAY("0:rank 1 at 127.0.0.1 has world size 5, rank 0 has 2", "1:has world size 5, rank 0 has 2"), .timeouts = 0.5},
    {2, "a rank with another world size, of a run without a name", NULL, 2,
     "env=LLMTRAIN_RUN_ID=unnamed 1:env=WORLD_SIZE=5 connect", SAY("1:has world size 5, rank 0 has 2",
     "0:rank 1 has not connected", "0:Rejected: rank 1")},
    {2, "two ranks with one number", NULL, 3, "2:env=RANK=1 connect=long",
     SAY("a second rank 1"), .timeouts = 0.5},
    {3, "a rank whose connections come in disorder", NULL, 1, "env=WORLD_SIZE=2 connect", SAY("-"),
     .meanwhile = connect_in_disorder},
    {3, "a connection of an unknown kind", NULL, 2, "1:go connect=long", SUCCEED, .meanwhile = connect_of_no_kind},
    {3, "strangers at the rendezvous", NULL, 3, "1:go 2:go connect", SUCCEED, .meanwhile = strangers_come,
     .also = strangers_leave},
    {3, "rank @ connects later", "012", 3, "@:sleep=400 connect=long", SUCCEED},

    // One rank is killed during the rendezvous and the last rank never connects: the others wait for them, unless rank
    // 0 died. If one is stopped, the last rank connects after that, and all wait.
    {4, "rank @ is killed in the rendezvous", "0", 4, "@:kill_after=500 3:exit connect",
     SAY("rank @ is gone|not reached rank 0"), .timeouts = 2, .ms = COMM_GRACE_MS},
    {4, "rank @ is killed in the rendezvous", "12", 4, "@:kill_after=500 3:exit connect=long",
     SAY("rank @ is gone|ranks @, 3 have not connected"), .ms = 2 * LONG_MS + COMM_GRACE_MS},
    {5, "rank @ is stopped in the rendezvous", "0", 4, "@:stop_after=200 3:after_fault connect",
     SAY("rank @ has not answered|rank 0 at 127.0.0.1"), .timeouts = 2, .ms = COMM_GRACE_MS},
    {5, "rank @ is stopped in the rendezvous", "12", 4, "@:stop_after=200 3:after_fault connect",
     SAY("rank @ has not answered|rank @ has not connected"), .timeouts = 2, .ms = COMM_GRACE_MS},

    // The last rank computes first: the others end before it calls, and it must not be blamed.
    {3, "rank @ is killed between collectives", "012", 4, "open barrier @:kill 3:busy=300 call", SAY("rank @ is gone"),
     .timeouts = 1.25},
    {6, "rank @ is stopped between collectives", "012", 4, "open barrier @:stop 3:busy=300 call",
     SAY("rank @ has not answered"), .timeouts = 1.25},
    {3, "rank @ is killed in a collective", "012", 3, "open barrier @:kill_after=3 sums", SAY("rank @ is gone"),
     .timeouts = 1.25},
    {7, "rank @ is stopped in a collective", "012", 3, "open barrier @:stop_after=3 sums",
     SAY("rank @ has not answered"), .timeouts = 1.25},
    {3, "rank @ is killed in an all_to_all", "012", 3, "open barrier all_to_all @:kill_after=3 sums",
     SAY("rank @ is gone"), .timeouts = 1.25},
    {7, "rank @ is stopped in an all_to_all", "1", 3, "open barrier all_to_all @:stop_after=3 sums",
     SAY("rank @ has not answered"), .timeouts = 1.25},
    {8, "rank @ is killed while all compute", "012", 3, "open count_calls no_failure stage=2 @:kill watch",
     SAY("between two collectives", "rank @ is gone"), .timeouts = 1.25},
    {8, "rank @ is stopped while all compute", "012", 3, "open count_calls no_failure stage=2 @:stop watch",
     SAY("between two collectives", "rank @ has not answered"), .timeouts = 1.25},

    // Mismatched calls: what rank 1 does differently, and what all then report. The rank that receives from rank 1
    // first blames it; rank 1 blames rank 0.
    {7, "rank 1 is late", NULL, 3, "connect 1:sleep=2t call", SAY("rank 1 is late")},
    // Half of COMM_GRACE_MS after the timeout.
    {7, "rank 1 is late, and knows why", NULL, 3, "open 1:sleep=1t 1:sleep=500 1:abort call",
     SAY("rank 1 gave up: " REASON), .timeouts = 1},
    {7, "rank 1 leaves", NULL, 3, "connect 1:exit call", SAY("rank 1 ended its run while")},
    {7, "rank 1 has another length", NULL, 3, "connect 1:n=41 call", SAY("all_reduce of 41 int64 (operation 1)")},
    {7, "rank 1 has far more", NULL, 3, "connect 1:n=1000 call", SAY("all_reduce of 1000 int64 (operation 1)")},
    {7, "rank 1 has another type", NULL, 3, "connect 1:type=fp32 call", SAY("all_reduce of 40 fp32 (operation 1)")},
    {7, "rank 1 calls another operation", NULL, 3, "connect 1:broadcast call",
     SAY("broadcast of 40 int64 from rank 0 (operation 1)")},
    {7, "rank 1 names another root", NULL, 3, "connect broadcast 1:root=1 call",
     SAY("broadcast of 40 int64 from rank 1 (operation 1)")},
    {7, "rank 1 has other slices", NULL, 3, "connect all_gather 1:slices=uneven call", SAY("with other slices")},
    {7, "rank 1 calls all_to_all", NULL, 3, "connect n=42 1:all_to_all call",
     SAY("all_to_all of 42 int64 (operation 1)")},
    {7, "rank 1 has another length in an all_to_all", NULL, 3, "connect all_to_all n=42 1:n=999 call",
     SAY("all_to_all of 999 int64 (operation 1)")},
    {7, "rank 1 has no elements in an all_to_all", NULL, 3, "connect all_to_all n=42 1:n=0 call",
     SAY("all_to_all of 0 int64 (operation 1)")},
    {7, "an all_to_all of parts of several lengths", NULL, 3, "connect all_to_all n=42 1:n=40 call",
     SAY("rank 1 called all_to_all of 40 int64 (operation 1); its length must be a multiple of 3")},
    {7, "an all_to_all in place", NULL, 3, "connect all_to_all n=42 1:in_place call",
     SAY("the number of ranks, and its result another vector")},
    {7, "rank 1 calls one more", NULL, 3, "connect 1:start_barrier call",
     SAY("rank 1 called barrier (operation 1)|and rank 1 barrier (operation 1)")},
    {7, "a sum of bytes", NULL, 3, "connect type=uint8 call", SAY("that type cannot be summed")},
    {7, "slices that overlap", NULL, 3, "connect all_gather 1:slices=bad call",
     SAY("with the slice [1, 41) for rank 1")},
    {7, "a root that is no rank", NULL, 3, "connect broadcast root=3 call", SAY("there is no such rank")},

    // A bit is altered on the way: in what is summed, in a sum, in either's checksum. Nobody else would notice.
    {7, "no bit is altered", NULL, 3, SOCKETS "open 1:alter=100000 stage=2 call 1:sleep=300", SUCCEED},
    {7, "a bit of what is summed is altered", NULL, 3, SOCKETS "open 1:alter=50 stage=2 call",
     SAY("data from rank 1 to rank 0 were altered on the way, in all_reduce of 40 int64"), .timeouts = 1},
    {7, "a bit of its checksum is altered", NULL, 3, SOCKETS "open 1:alter=155 stage=2 call",
     SAY("data from rank 1 to rank 0 were altered on the way"), .timeouts = 1},
    {7, "a bit of a sum is altered", NULL, 3, SOCKETS "open 1:alter=170 stage=2 call call",
     SAY("data from rank 1 to rank 0 were altered on the way"), .timeouts = 1},
    {7, "a bit of an all_to_all is altered", NULL, 3, SOCKETS "open all_to_all n=42 1:alter=50 stage=2 call call",
     SAY("data from rank 1 to rank 0 were altered on the way, in all_to_all of 42 int64"), .timeouts = 1},
    {7, "a bit of a long part is altered", NULL, 3, SOCKETS "open 1:alter=400000 stage=2 sums",
     SAY("data from rank 1 to rank 0 were altered on the way"), .timeouts = 1},

    // Data between ranks of one machine pass through memory, except where there is none, or it cannot be mapped.
    {4, "rank 1 uses sockets", NULL, 3,
     "1:env=LLMTRAIN_TEST_SOCKETS=1 open=long 0:shares=1 1:shares=0 2:shares=1 collectives", SUCCEED},
    {4, "rank 0 has no room for memory", NULL, 4,
     "0:file_bytes=4096 open=long 0:shares=0 1:shares=2 2:shares=2 3:shares=2 collectives blocks=2 0:shares=0 "
     "1:shares=0 2:shares 3:shares call", SUCCEED},
    {4, "rank 1 cannot map what it should share with rank 0", NULL, 4,
     "1:cannot_map open=long 0:shares=2 1:shares=2 2:shares 3:shares collectives mixed=2 shares call all barrier",
     SUCCEED},
    {5, "all ranks are killed", NULL, 3, "open shares stage=2 kill_after=3 sums", SAY("-"), .also = nothing_left},

    // The same through sockets as through memory.
    {4, "collectives between @ ranks through sockets", "25", 0, SOCKETS "open=long shares=0 collectives overlap",
     SUCCEED},
    {5, "rank @ is killed in a collective through sockets", "02", 3, SOCKETS "open barrier @:kill_after=3 sums",
     SAY("rank @ is gone"), .timeouts = 1.25},
    {5, "rank @ is stopped in a collective through sockets", "1", 3, SOCKETS "open barrier @:stop_after=3 sums",
     SAY("rank @ has not answered"), .timeouts = 1.25},
    {5, "rank 1 is late, through sockets", NULL, 3, SOCKETS "connect 1:sleep=2t call", SAY("rank 1 is late")},
    {5, "rank 1 leaves, through sockets", NULL, 3, SOCKETS "connect 1:exit call", SAY("rank 1 ended its run while")},
    {5, "rank 1 has far more, through sockets", NULL, 3, SOCKETS "connect 1:n=1000 call",
     SAY("all_reduce of 1000 int64 (operation 1)")},
    {5, "rank 2 is killed in a collective of a group through sockets", NULL, 4,
     SOCKETS "open blocks=2 2:kill_after=3 sums", SAY("rank 2 is gone"), .timeouts = 1.25, .ms = 2 * COMM_GRACE_MS},
    {5, "a transfer of three timeouts through sockets", NULL, 2, SOCKETS "open transfer", SUCCEED},

    // Not failures: a rank that leaves after its last call, one that computes for longer than the timeout, a transfer
    // that takes longer but always makes progress, all ranks stopped together, an extended timeout.
    {9, "a rank leaves while the others compute", NULL, 3,
     "open count_calls stage=2 0:sleep=1.6t 2:sleep=1.6t no_failure reached=3 0:stage=3 2:stage=3", SUCCEED},
    {9, "a rank computes for longer than the timeout", NULL, 3, "open 1:busy=2.5t stage=2 call", SUCCEED},
    {9, "a transfer of three timeouts", NULL, 2, "open transfer", SUCCEED},
    {9, "all ranks are stopped, and continue", NULL, 3, "open reached=2 2:go call", SUCCEED, .meanwhile = suspend_all},
    {8, "a rank is late where the timeout is extended", NULL, 3, "open extend 1:sleep=2.5t barrier", SUCCEED},
    {8, "a rank is stopped where the timeout is extended", NULL, 3, "open extend 1:stop barrier",
     SAY("rank 1 has not answered"), .timeouts = 1.5},

    {8, "rank @ aborts while all compute", "012", 3, "open count_calls no_failure stage=2 @:abort watch",
     SAY("rank @ gave up: " REASON), .timeouts = 1.25},
    {9, "rank @ aborts before any collective", "012", 3, "connect @:abort sums=5", SAY("rank @ gave up: " REASON),
     .timeouts = 1},
    {9, "rank @ aborts with sums in flight", "012", 3, "connect @:abort_in_flight sums=5",
     SAY("rank @ gave up: " REASON), .timeouts = 1},
    {9, "rank @ aborts from another thread", "012", 3, "connect @:abort_later sums=5", SAY("rank @ gave up: " REASON),
     .timeouts = 1},
    // Groups of ranks. What fails in one is the failure of all.
    {10, "collectives in groups of 5 ranks, @ by @", "123", 5, "open=long blocks=@ collectives all barrier", SUCCEED},
    {10, "collectives in groups of 5 ranks, each @th", "25", 5, "open=long mixed=@ collectives overlap all barrier",
     SUCCEED},
    {10, "collectives in groups and among all by turns", NULL, 4, "open=long mixed=2 call barrier all call collectives",
     SUCCEED},
    {10, "sums over blocks, then over copies", NULL, 4, "open=long blocks=2 mixed=2 hybrid hybrid", SUCCEED},
    {10, "sums over blocks, then over copies", NULL, 5, "open=long blocks=5 mixed=5 hybrid", SUCCEED},
    {11, "rank @ is killed in a collective of a group", "0123", 4, "open blocks=2 @:kill_after=3 sums",
     SAY("rank @ is gone"), .timeouts = 1.25, .ms = 2 * COMM_GRACE_MS},
    {11, "rank @ is killed in an all_to_all of a group", "03", 4, "open blocks=2 all_to_all @:kill_after=3 sums",
     SAY("rank @ is gone"), .timeouts = 1.25, .ms = 2 * COMM_GRACE_MS},
    {11, "rank @ is stopped in a collective of a group", "013", 4, "open blocks=2 mixed=2 @:stop_after=3 sums",
     SAY("rank @ has not answered"), .timeouts = 1.5, .ms = 2 * COMM_GRACE_MS},
    {11, "rank @ is killed while groups are idle", "03", 4,
     "open blocks=2 count_calls mixed=2 all stage=2 @:kill barrier", SAY("rank @ is gone"), .timeouts = 1.25},
    {11, "rank @ is killed before groups are made", "03", 4, "open stage=2 @:kill blocks=2 call",
     SAY("rank @ is gone"), .timeouts = 1.25},
    {11, "rank @ aborts in a group", "12", 4, "open mixed=2 blocks=2 count_calls no_failure stage=2 @:abort watch",
     SAY("rank @ gave up: " REASON), .timeouts = 1.25},
    {10, "rank @ aborts with sums of a group in flight", "03", 4, "open blocks=2 @:abort_in_flight sums=5",
     SAY("rank @ gave up: " REASON), .timeouts = 1},
    {10, "rank @ aborts from another thread in a group", "03", 4, "open mixed=2 @:abort_later sums=5",
     SAY("rank @ gave up: " REASON), .timeouts = 1},
    {10, "rank @ is stopped after its group has waited for a while", "1", 4,
     "open blocks=2 stage=2 1:sleep=0.4t @:stop call all barrier", SAY("rank @ has not answered"), .timeouts = 1.5,
     .ms = 2 * COMM_GRACE_MS},
    {10, "rank @ is killed while its group connects", "13", 4, "open=long stage=2 @:dies_in_split blocks=2 call",
     SAY("rank @ is gone"), .ms = 1},
    {11, "rank 3 is late in its group", NULL, 4, "open blocks=2 count_calls stage=2 3:sleep=2t 0:watch 1:watch call",
     SAY("rank 3 is late: rank 2 has waited"), .timeouts = 1.5, .ms = 2 * COMM_GRACE_MS},
    {11, "rank 3 is late in its group where the timeout is extended", NULL, 4,
     "open extend blocks=2 stage=2 3:sleep=2.5t call all barrier", SUCCEED},
    {11, "rank 3 calls something else in its group", NULL, 4, "open blocks=2 3:n=41 call all barrier",
     SAY("all_reduce of 41 int64 (operation 1)"), .timeouts = 1},
    {11, "rank 2 leaves while its group computes", NULL, 4, "open blocks=2 stage=2 2:exit call all barrier",
     SAY("rank 2 ended its run"), .timeouts = 1.25, .ms = 2 * COMM_GRACE_MS},
    {11, "a bit is altered in a group", NULL, 4, SOCKETS "open blocks=2 3:alter=50 stage=2 call all barrier",
     SAY("data from rank 3 to rank 2 were altered on the way, in all_reduce of 40 int64"), .timeouts = 1},
    {11, "a group of one rank aborts", NULL, 3, "open blocks=2 2:abort call all barrier",
     SAY("rank 2 gave up: " REASON), .timeouts = 1},

    // A tree of control connections, of fan-out 2: 0 has the children 1 and 2, 1 has 3 and 4, 2 has 5 and 6, 3 has 7
    // and 8. A rank hears of a failure through others, and one that has left still passes messages on.
    {12, "collectives in a tree", NULL, 7, TREE "open=long edges local collectives blocks=2 mixed=3 call", SUCCEED},
    {12, "rank @ of a tree never connects", "08", 9, TREE "@:exit connect",
     SAY("rank @ has not connected to rank 0|not reached rank 0"), .timeouts = 1, .ms = COMM_GRACE_MS},
    {12, "rank @ of a tree is killed in the rendezvous", "15", 9,
     TREE "@:kill_after=500 7:after_fault 7:sleep=300 connect=long", SAY("rank @ is gone|rank @ has not connected"),
     .ms = LONG_MS + COMM_GRACE_MS},
    {12, "rank @ of a tree is killed while all compute", "0138", 9,
     TREE "open count_calls no_failure stage=2 @:kill watch", SAY("rank @ is gone"), .timeouts = 1.25},
    {13, "rank @ of a tree is stopped while all compute", "0138", 9,
     TREE "open count_calls no_failure stage=2 @:stop watch", SAY("rank @ has not answered"), .timeouts = 1.5},
    {13, "rank @ of a tree is killed in a collective", "027", 9, TREE "open barrier @:kill_after=3 sums=2",
     SAY("rank @ is gone"), .timeouts = 1.25},
    {13, "rank @ of a tree is stopped in a collective", "027", 9, TREE "open barrier @:stop_after=3 sums=2",
     SAY("rank @ has not answered"), .timeouts = 1.5, .ms = COMM_GRACE_MS},
    {14, "rank @ of a tree is stopped where few wait", "18", 9,
     TREE "open count_calls blocks=7 all stage=2 @:stop 7:call 8:call watch", SAY("rank @ has not answered"),
     .timeouts = 1.5, .ms = 2 * COMM_GRACE_MS},
    {14, "rank @ of a tree aborts while all compute", "0138", 9,
     TREE "open count_calls no_failure stage=2 @:abort watch", SAY("rank @ gave up: " REASON), .timeouts = 0.5},
    {14, "rank @ of a tree aborts with sums in flight", "27", 9, TREE "connect @:abort_in_flight sums=5",
     SAY("rank @ gave up: " REASON), .timeouts = 1},
    {14, "rank @ of a tree aborts in a group", "18", 9, TREE "open blocks=3 count_calls stage=2 @:abort watch",
     SAY("rank @ gave up: " REASON), .timeouts = 0.5},
    {14, "rank 8 of a tree aborts after ranks on its way have left", NULL, 9,
     TREE "open count_calls stage=2 0:exit 3:exit 5:exit 8:sleep=1.6t 8:abort watch", SAY("rank 8 gave up: " REASON)},
    {15, "rank 8 of a tree is late", NULL, 9, TREE "connect 8:sleep=2t call", SAY("rank 8 is late")},
    {15, "rank @ of a tree leaves", "138", 9, TREE "connect @:exit call", SAY("rank @ ended its run while")},
    {15, "rank @ of a tree leaves, and one far away notices", "38", 9,
     TREE "open count_calls stage=2 @:exit 6:sleep=0.2t 6:call 0:watch 1:watch 2:watch 3:watch 4:watch 5:watch 7:watch "
     "8:watch", SAY("rank @ ended its run while rank 6 was"), .timeouts = 1},
    {15, "ranks of a tree leave while others compute", NULL, 9,
     TREE "open count_calls stage=2 0:sleep=1.6t 2:sleep=1.6t 8:sleep=1.6t no_failure", SUCCEED},
    {15, "rank 1 of a tree is stopped, which cuts off rank 3", NULL, 4,
     TREE "open blocks=2 stage=2 1:sleep=0.2t 1:stop call all barrier", SAY("rank 1 has not answered"), .timeouts = 1.5,
     .ms = 3 * COMM_GRACE_MS},
    {15, "a rank of a tree computes for longer than the timeout", NULL, 9, TREE "open 1:busy=2.5t stage=2 call",
     SUCCEED},
    {15, "rank 3 of a tree is killed in a collective of a group", NULL, 9, TREE "open blocks=2 3:kill_after=3 sums=5",
     SAY("rank 3 is gone"), .timeouts = 1.25, .ms = 2 * COMM_GRACE_MS},
    {15, "rank 8 of a tree is stopped in a collective of a group", NULL, 9,
     TREE "open mixed=2 8:stop_after=3 sums=5", SAY("rank 8 has not answered"), .timeouts = 1.5,
     .ms = 2 * COMM_GRACE_MS},

    {9, "the only rank aborts", NULL, 1, "open count_calls barrier no_failure abort failed barrier",
     SAY("rank 0 gave up: " REASON), .ms = 1},
};

// ------------------------------------------------------------------------------------------------
// 9. Lanes

// Five ranks on two machines, by the names of their hosts, in any order: each finds its place among those of its own
// machine, and how many these are; what the launcher has said is kept.
static bool launcher_says;

static void body_machines(size_t rank) {
    static const struct { size_t machine, local_rank, local_world; } found[] = {
        {0, 0, 2}, {1, 0, 3}, {1, 1, 3}, {0, 1, 2}, {1, 2, 3}};
    Comm comm;
    Error error;
    bool named = found[rank].machine == 0 || machine_own_name("another-machine");
    size_t local_rank = launcher_says ? rank % 2 : found[rank].local_rank;
    size_t local_world = launcher_says ? 4 : found[rank].local_world;
    if (launcher_says) environment_set(text_of("LOCAL_RANK=%zu|LOCAL_WORLD_SIZE=4", local_rank));
    need(named, "rank %zu: another name of its host", rank);
    if (!expect(open_rank(&comm, LONG_MS, &error), "%s", error.text)) return;
    size_t others = only_sockets || !MEMORY_IS_SHARED ? 0 : found[rank].local_world - 1;
    expect(count_shared(&comm) == others, "memory shared with %zu ranks, not %zu", count_shared(&comm), others);
    expect(comm_barrier(&comm, &error), "%s", error.text);
    expect(comm.local_rank == local_rank && comm.local_world == local_world &&
               comm.transport.local_world == local_world,
           "%zu of %zu on its machine, not %zu of %zu", comm.local_rank, comm.local_world, local_rank, local_world);
    comm_close(&comm);
}

static void test_two_machines(void) {
    pid_t child = fork();
    int status = 1;
    need(child >= 0, "a process");
    if (child == 0) _exit(machine_own_name("another-machine") ? 0 : 1);
    waitpid(child, &status, 0);
    for (int says = 0; says < 2; says++) {
        const char* name = says ? "ranks of two machines, as the launcher says" : "ranks of two machines";
        launcher_says = says;
        if (status != 0) {
            skip(name, "a process may not have a host name of its own");
            continue;
        }
        start_ranks(name, 5, body_machines);
        end_ranks(5);
        end_case();
    }
}

static void test_rendezvous(void) {
    test_busy_port();
    test_addresses();
}

// Initial state of the lanes.
enum { LANES = 16 };
static void (*const lane_begins[LANES])(void) = {test_launch, test_two_machines, test_spawn, test_rendezvous,
                                                test_memory};

static void run_lanes(void) {
    pid_t processes[LANES];
    for (size_t i = 0; i < LANES; i++) {
        processes[i] = fork();
        need(processes[i] >= 0, "a process");
        if (processes[i] > 0) continue;
        process_end_with_parent(getppid(), SIGKILL);
        share();
        if (lane_begins[i]) lane_begins[i]();
        for (size_t k = 0; k < COUNT_OF(CASES); k++)
            if (CASES[k].lane == i) case_run(&CASES[k]);
        exit(0);
    }
    double deadline = now_ms() + LANE_MS;
    for (size_t i = 0; i < LANES; i++) {
        int status = 0;
        while (waitpid(processes[i], &status, WNOHANG) == 0) {
            if (now_ms() > deadline) kill(processes[i], SIGKILL);  // its ranks die with it
            sleep_ms(1);
        }
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "lane %zu", i);
    }
    verdict("all lanes of the tests come to their ends");
    nothing_left();
    verdict("nothing is left in memory");
}

// As one of a launcher's ranks: the collectives; rank 0 prints the results of all ranks.
static int run_launched(const Launch* launch) {
    Comm comm;
    Error error;
    snprintf(case_name, sizeof case_name, "%s", launch->launcher);
    need(launch->world <= RANKS_MAX, "%zu ranks; start it with at most %zu", launch->world, RANKS_MAX);
    need(comm_open(&comm, launch, LONG_MS, &error), "%s", error.text);
    test_all(&comm);
    test_overlap(&comm);
    for (size_t blocks = 0; blocks < 2; blocks++) {
        Comm group;
        if (!expect(comm_split(&group, &comm, blocks ? comm.rank / 2 : comm.rank % 2, 1, &error), "%s", error.text)) break;
        test_all(&group);
        comm_close(&group);
    }
    bool good = harness_now.failures == 0;
    if (!good) verdict("rank %zu", comm.rank);
    snprintf(error.text, sizeof error.text, "a condition does not hold");
    bool all = comm_agree_all(&comm, good, &error);
    if (good)
        verdict("%zu ranks of %s, through %s: rank %zu", comm.world, launch->launcher, comm.mpi ? "MPI" : "sockets",
                comm.rank);
    comm_close(&comm);
    if (launch->rank > 0) return !good;
    check(all, "all ranks: %s", all ? "no failures" : error.text);
    return tests_end();
}

int main(int argc, char** argv) {
    Launch launch;
    Error error;
    const Flag rows[] = {{"timeout", KIND_REAL, &timeout_ms, "MS", 100, 60000,
                          "timeout of the cases in which something is to fail", false},
                         {"sockets", KIND_SWITCH, &only_sockets, "on|off", 0, 0,
                          "data pass through sockets, not through shared memory", false},
                         {"tree", KIND_COUNT, &tree, "N", 0, 64,
                          "fan-out of the control connections in all cases; 0: as the cases say", false}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    tests_begin("test_comm");
    if (!flags_parse(&flags, argc, argv, &error)) {
        printf("test_comm: %s\n0 passed, 1 failed\n", error.text);
        return 2;
    }
    share();
    if (launch_find(&launch, &error) && strcmp(launch.launcher, "none") != 0) return run_launched(&launch);
    environment_clear();
    run_lanes();
    return tests_end();
}
