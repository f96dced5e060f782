// test_comm.c: the collectives of comm.h between processes, and what each rank reports when another fails.
//
//   cc -std=c11 -O2 -I. dev/test/test_comm.c -o build/test_comm -lm -pthread && build/test_comm
//   mpicc -DLLMTRAIN_MPI ...  && mpirun -n 3 build/test_comm        the collectives, through MPI
//   build/test_comm --timeout 4000                                  on a slow machine, or under a sanitizer
//
//   1. cases        a process per rank; what they report
//   2. collectives  each, of each type, of many lengths and slices, against a serial computation, bit for bit
//   3. in flight    hundreds at once; a slow transport under a computation; what is counted
//   4. launch       the variables of launchers, right and wrong; forked ranks, their exit codes and reports
//   5. rendezvous   strangers, ranks of other runs, ranks that never connect, ports in use, few open files
//   6. failures     a rank that is killed or stopped, before, in and between collectives; calls that do not match
//   7. monitoring   what is noticed between collectives, and what is no failure; ranks that abort
//   8. lanes        the cases run in parallel, since most of them wait
//
// The ranks of a case report through shared memory; the parent judges, and ends those that hang. Under a launcher the
// program is one of the launcher's ranks and tests the collectives alone.

#include "llmtrain/comm.h"
#include "llmtrain/flags.h"
#include "harness.h"

#include <ifaddrs.h>
#include <net/if.h>

#define RANKS_MAX ((size_t)5)
#ifdef __SANITIZE_THREAD__  // under which everything takes many times as long
#define SLOWER 5
#else
#define SLOWER 1
#endif
#define LONG_MS (SLOWER * 30e3)   // timeout where nothing is to fail
#define SLACK_MS (SLOWER * 10e3)  // what a busy machine may add
#define CASE_MS (SLOWER * 60e3)   // after which a rank is said to hang
#define LANE_MS (SLOWER * 300e3)  // and all cases of a lane together
#define NOBODY SIZE_MAX

// ------------------------------------------------------------------------------------------------
// 1. Cases

typedef struct {
    int stage;                 // how far the rank is, for others that wait for it
    bool done, good;           // its last call returned, and what
    double ended_ms;
    char text[1024];           // the error, if any
} Report;

static Report* reports;        // (RANKS_MAX + 2) shared by the processes of a lane; the last two are the parent's
static Report* self;
static double* fault_ms;       // shared: when the fault of the case happened
static pid_t children[RANKS_MAX];
static pid_t* forked;          // shared: the ranks that launch_fork forked
static size_t port;            // of the case
static int reserved = -1;      // the socket that keeps it from others
static char case_name[120];
static double case_began_ms;
static double timeout_ms = 2000.0;  // where something is to fail

static void outcome(bool good, const Error* error) {
    self->good = good;
    snprintf(self->text, sizeof self->text, "%s", good ? "" : error->text);
    self->ended_ms = now_ms();
    self->done = true;
}

static void set_stage(int stage) { __atomic_store_n(&self->stage, stage, __ATOMIC_SEQ_CST); }

// Waits until all ranks of a case have reached that stage.
static bool reach_stage(size_t world, int stage) {
    double deadline = now_ms() + CASE_MS / 2;
    for (size_t rank = 0; rank < world; rank++)
        while (__atomic_load_n(&reports[rank].stage, __ATOMIC_SEQ_CST) < stage) {
            if (now_ms() > deadline) return false;
            sleep_ms(1);
        }
    return true;
}

// Forks the ranks of a case, as a launcher does; each runs body when all are there, and ends. end_ranks waits for them.
static void start_ranks(const char* name, size_t world, void (*body)(size_t rank)) {
    snprintf(case_name, sizeof case_name, "%s", name);
    case_began_ms = now_ms();
    socket_close(&reserved);
    port = port_reserve(&reserved);
    memset(reports, 0, RANKS_MAX * sizeof *reports);
    *fault_ms = 0;
    fflush(NULL);
    for (size_t rank = 0; rank < world; rank++) {
        pid_t child = fork();
        need(child >= 0, "a process");
        if (child > 0) {
            children[rank] = child;
            continue;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        self = &reports[rank];
        environment_clear();
        environment_set(text_of("RANK=%zu|WORLD_SIZE=%zu|MASTER_ADDR=127.0.0.1|MASTER_PORT=%zu|LLMTRAIN_RUN_ID=test",
                                rank, world, port));
        set_stage(1);
        need(reach_stage(world, 1), "the other ranks have started");
        body(rank);
        if (harness_now.conditions > 0) verdict("%s, rank %zu", case_name, rank);
        exit(0);
    }
}

static void end_case(void) { verdict("%s, %.1f s", case_name, (now_ms() - case_began_ms) / 1e3); }

// Waits for the ranks; a victim may be in any state and is killed at last.
static void end_ranks(size_t world, size_t victim) {
    double deadline = now_ms() + CASE_MS;
    for (size_t rank = 0; rank < world; rank++) {
        int status = 0;
        if (rank == victim) continue;
        while (waitpid(children[rank], &status, WNOHANG) == 0 && now_ms() < deadline) sleep_ms(1);
        bool hangs = now_ms() >= deadline && waitpid(children[rank], &status, WNOHANG) == 0;
        if (hangs) {
            kill(children[rank], SIGKILL);
            waitpid(children[rank], &status, 0);
        }
        expect(!hangs && WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %zu %s", rank,
               hangs ? "hangs" : "ends with an error");
    }
    if (victim < world) {
        kill(children[victim], SIGKILL);
        waitpid(children[victim], NULL, 0);
    }
}

static const char* said(size_t rank) {
    if (!reports[rank].done) return "nothing";
    return reports[rank].good ? "all is well" : reports[rank].text;
}

// What a rank has failed with.
static void expect_text(size_t rank, const char* words) {
    const Report* r = &reports[rank];
    expect(r->done && !r->good && strstr(r->text, words), "rank %zu says: %s, not: %s", rank, said(rank), words);
}

// The ranks that are not the victim have failed, with these words, at most limit_ms after since_ms. Ends the case.
static void end_failure(size_t world, size_t victim, double since_ms, double limit_ms, const char* words,
                        const char* or_words) {
    for (size_t rank = 0; rank < world; rank++) {
        const Report* r = &reports[rank];
        if (rank == victim) continue;
        expect_text(rank, or_words && strstr(r->text, or_words) ? or_words : words);
        expect(r->ended_ms - since_ms <= limit_ms, "rank %zu is late by %.0f ms", rank,
               r->ended_ms - since_ms - limit_ms);
    }
    end_case();
}

// All ranks have succeeded. Ends the case.
static void end_success(size_t world) {
    for (size_t rank = 0; rank < world; rank++)
        expect(reports[rank].done && reports[rank].good, "rank %zu says: %s", rank, said(rank));
    end_case();
}

// A case in which all ranks end well.
static void run_good(const char* name, size_t world, void (*body)(size_t rank)) {
    start_ranks(name, world, body);
    end_ranks(world, NOBODY);
    end_success(world);
}

// A case in which all ranks fail.
static void run_failing(const char* name, size_t world, void (*body)(size_t rank), double limit_ms, const char* words) {
    double began = now_ms();
    start_ranks(name, world, body);
    end_ranks(world, NOBODY);
    end_failure(world, NOBODY, began, limit_ms, words, NULL);
}

static bool open_rank(Comm* comm, double limit_ms, Error* error) {
    Launch launch;
    return launch_find(&launch, error) && comm_open(comm, &launch, limit_ms, error);
}

// For bodies in which the rendezvous is to succeed.
static void open_or_end(Comm* comm, double limit_ms) {
    Error error;
    if (open_rank(comm, limit_ms, &error)) return;
    outcome(false, &error);
    printf("%s: %s\n", case_name, error.text);
    exit(1);
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

// The values of a rank: of many magnitudes, so that the order of a sum shows, and with the odd cases of each type.
static void make_values(void* out, Dtype type, size_t n, size_t rank) {
    for (size_t i = 0; i < n; i++) {
        Random4 r = random4(rank + 1, RANDOM_TEST, (uint64_t)type, i);
        double value =
            ((double)r.bits[0] * 0x1p-32 + (double)r.bits[2] * 0x1p-64 - 0.5) * ldexp(1.0, (int)(r.bits[1] % 24) - 12);
        if (i % 101 == 17) value = -0.0;
        if (i % 101 == 18) value *= 0x1p-130;                                   // subnormal in float
        if (i % 101 == 19) value = rank % 2 ? -65504.0 : 65504.0;               // sums overflow in fp16
        if (i % 101 == 20) value = rank == 0 ? (double)INFINITY : value;
        if (type == DTYPE_U8) ((uint8_t*)out)[i] = (uint8_t)r.bits[2];
        else if (type == DTYPE_I64) ((uint64_t*)out)[i] = (uint64_t)r.bits[2] << 32 | r.bits[3];
        else if (type == DTYPE_F32) ((float*)out)[i] = (float)value;
        else if (type == DTYPE_BF16) ((uint16_t*)out)[i] = bf16_from_float((float)value);
        else ((uint16_t*)out)[i] = f16_from_float((float)value);
    }
}

// Element i summed one rank after the other, forwards or backwards.
static void serial_sum(void* out, char* const* inputs, Dtype type, size_t world, size_t i, bool backwards) {
    float f = 0.0f;
    uint64_t u = 0;
    for (size_t k = 0; k < world; k++) {
        const char* x = inputs[backwards ? world - 1 - k : k] + i * dtype_bytes(type);
        float value = 0.0f;
        uint16_t half;
        uint64_t integer = 0;
        if (type == DTYPE_F32) memcpy(&value, x, 4);
        if (type == DTYPE_BF16 || type == DTYPE_F16) {
            memcpy(&half, x, 2);
            value = type == DTYPE_BF16 ? float_from_bf16(half) : float_from_f16(half);
        }
        if (type == DTYPE_I64) memcpy(&integer, x, 8);
        f = k == 0 ? value : f + value;
        u += integer;
    }
    uint16_t half = type == DTYPE_BF16 ? bf16_from_float(f) : f16_from_float(f);
    if (type == DTYPE_F32) memcpy(out, &f, 4);
    if (type == DTYPE_BF16 || type == DTYPE_F16) memcpy(out, &half, 2);
    if (type == DTYPE_I64) memcpy(out, &u, 8);
}

typedef struct {
    size_t n, world;
    int kind;
} Cut;
enum { CUT_EVEN, CUT_UNEVEN, CUT_GAPS, CUT_ONE_HAS_ALL, CUTS };

static CommSlice cut_slice(size_t rank, const void* context) {
    const Cut* c = (const Cut*)context;
    CommSlice s = comm_even_slice(rank, c->world, c->n);
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
    char* inputs[RANKS_MAX];  // (n) of each rank
    char *work, *expected;    // (n + GUARD elements)
} Bench;
#define GUARD ((size_t)8)     // elements behind the vector that nobody may touch
#define UNTOUCHED 0x5A

static void bench_begin(Bench* b, bool with_own) {
    memset(b->work, UNTOUCHED, (b->n + GUARD) * b->size);
    memset(b->expected, UNTOUCHED, (b->n + GUARD) * b->size);
    if (with_own) memcpy(b->work, b->inputs[b->comm->rank], b->n * b->size);
}

static void bench_end(const Bench* b, bool good, const Error* error, const char* what) {
    char text[200];
    snprintf(text, sizeof text, "rank %zu, %s of %zu %s: %.80s", b->comm->rank, what, b->n, DTYPES[b->type].name,
             good ? "other bits" : error->text);
    expect(good && memcmp(b->work, b->expected, (b->n + GUARD) * b->size) == 0, "%s", text);
}

static void test_sums(Bench* b) {
    Comm* comm = b->comm;
    Error error;
    size_t size = b->size;
    char* sums = (char*)allocate((b->n + GUARD) * size);
    for (size_t i = 0; i < b->n; i++) serial_sum(sums + i * size, b->inputs, b->type, comm->world, i, false);

    bench_begin(b, true);
    memcpy(b->expected, sums, b->n * size);
    bool good = all_reduce(comm, b->work, b->n, b->type, &error);
    bench_end(b, good, &error, "all_reduce");

    for (int kind = 0; kind < CUTS; kind++) {
        Cut cut = {b->n, comm->world, kind};
        CommSlice own = cut_slice(comm->rank, &cut);
        CommSlices slices = kind == CUT_EVEN ? NULL : cut_slice;
        size_t place = own.first * size, bytes = (own.end - own.first) * size;
        bench_begin(b, false);
        memcpy(b->expected, sums + place, bytes);
        good = reduce_scatter(comm, b->work, b->inputs[comm->rank], b->n, b->type, slices, &cut, &error);
        bench_end(b, good, &error, "reduce_scatter");

        bench_begin(b, true);
        memcpy(b->expected, b->work, b->n * size);
        memcpy(b->expected + place, sums + place, bytes);
        good = reduce_scatter(comm, b->work + place, b->work, b->n, b->type, slices, &cut, &error);
        bench_end(b, good, &error, "reduce_scatter in place");

        good = good && comm_all_gather(comm, b->work, b->n, b->type, slices, &cut, &error);
        for (size_t p = 0; p < comm->world; p++) {
            CommSlice s = cut_slice(p, &cut);
            memcpy(b->expected + s.first * size, sums + s.first * size, (s.end - s.first) * size);
        }
        bench_end(b, good, &error, "reduce_scatter and all_gather");
    }
    free(sums);
}

static void test_copies(Bench* b) {
    Comm* comm = b->comm;
    Error error;
    size_t size = b->size;
    for (int kind = 0; kind < CUTS; kind++) {
        Cut cut = {b->n, comm->world, kind};
        CommSlice own = cut_slice(comm->rank, &cut);
        CommSlices slices = kind == CUT_EVEN ? NULL : cut_slice;
        const char* mine = b->inputs[comm->rank] + own.first * size;
        bench_begin(b, false);
        memcpy(b->work + own.first * size, mine, (own.end - own.first) * size);
        for (size_t p = 0; p < comm->world; p++) {
            CommSlice s = cut_slice(p, &cut);
            memcpy(b->expected + s.first * size, b->inputs[p] + s.first * size, (s.end - s.first) * size);
        }
        bool good = comm_all_gather(comm, b->work, b->n, b->type, slices, &cut, &error);
        bench_end(b, good, &error, "all_gather");
    }
    for (size_t from = 0; from < comm->world; from++) {
        bench_begin(b, true);
        memcpy(b->expected, b->inputs[from], b->n * size);
        bool good = comm_broadcast(comm, b->work, b->n, b->type, from, &error);
        bench_end(b, good, &error, "broadcast");
    }
}

static void test_length(Comm* comm, Dtype type, size_t n) {
    Bench b = {comm, type, n, dtype_bytes(type), {NULL}, NULL, NULL};
    size_t bytes = (n + GUARD) * b.size, differ = 0;
    for (size_t p = 0; p < comm->world; p++) {
        b.inputs[p] = (char*)allocate(bytes);
        make_values(b.inputs[p], type, n, p);
    }
    b.work = (char*)allocate(bytes);
    b.expected = (char*)allocate(bytes);
    if (type != DTYPE_U8) test_sums(&b);
    test_copies(&b);
    // Would another order have been noticed?
    for (size_t k = 0; k < n && type != DTYPE_U8; k++) {
        char forwards[8], backwards[8];
        serial_sum(forwards, b.inputs, type, comm->world, k, false);
        serial_sum(backwards, b.inputs, type, comm->world, k, true);
        differ += memcmp(forwards, backwards, b.size) != 0;
    }
    if (n >= 1000 && comm->world > 2 && type == DTYPE_F32)
        expect(differ > n / 100, "values whose sum depends on the order");
    for (size_t p = 0; p < comm->world; p++) free(b.inputs[p]);
    free(b.work);
    free(b.expected);
}

static void test_collectives(Comm* comm) {
    static const size_t lengths[] = {0, 1, 2, 7, 1000, 100003};
    static const Dtype types[] = {DTYPE_U8, DTYPE_I64, DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) test_length(comm, types[t], lengths[i]);
    // Several chunks in a sum: of all types, and not a whole number of them.
    test_length(comm, DTYPE_BF16, 300001);
    test_length(comm, DTYPE_I64, 300001);
    Error error;
    expect(comm_barrier(comm, &error), "barrier");
    float nan = comm->rank == 0 ? NAN : 1.0f;
    expect(all_reduce(comm, &nan, 1, DTYPE_F32, &error) && isnan(nan), "NaN in a sum");
}

// Each rank's part is `good` or fails with its own `text`; expected: the sentence that all have then, or NULL.
static void test_agreement(Comm* comm, bool good, const char* text, const char* expected, const char* what) {
    Error error, after;
    fail(&error, "%s", text);
    bool all = comm_agree_all(comm, good, &error);
    expect(all == (expected == NULL) && strcmp(error.text, expected ? expected : text) == 0, "%s, and not: %s", what,
           error.text);
    expect(error.on_all_ranks == !all, "%s: all ranks know of it", what);
    expect(comm_barrier(comm, &after) && !comm_failed(comm, &after), "an agreement leaves the Comm usable");
}

// "rank 2: words", or the words alone where there is but one rank.
static const char* sentence(char text[1024], size_t world, size_t rank, const char* words) {
    if (world == 1) snprintf(text, 1024, "%s", words);
    else snprintf(text, 1024, "rank %zu: %s", rank, words);
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
    test_agreement(comm, rank + 1 < N, words, sentence(expected, N, N - 1, words), "the last rank failed");
    test_agreement(comm, false, words, words, "all failed for one reason");
    test_agreement(comm, false, own, sentence(expected, N, 0, "part 0 failed"), "all failed, each for its own reason");
    test_agreement(comm, rank % 2 == 1, words, sentence(expected, N, 0, words), "every other failed, for one reason");
    test_agreement(comm, N > 1 && rank == 0, own, sentence(expected, N, 1, one), "all but rank 0 failed");
    test_agreement(comm, false, letters, sentence(expected, N, 0, letters_of_0), "long reasons");
    Error error = {"", ERROR_WORLD, false};
    expect(!comm_agree_all(comm, false, &error) && error.text[0] != 0, "a failure without a reason");
}

static void test_doubles(Comm* comm) {
    static const size_t counts[] = {0, 1, 7, 1000};
    Error error;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        size_t count = counts[i], wrong = 0;
        double* all = (double*)allocate((comm->world * count + 1) * sizeof(double));
        for (size_t k = 0; k < count; k++) all[comm->rank * count + k] = 1.0 / (double)(comm->rank * 5000 + k + 1);
        all[comm->world * count] = -1.0;
        bool good = comm_gather_doubles(comm, all, count, &error);
        for (size_t p = 0; p < comm->world; p++)
            for (size_t k = 0; k < count; k++) wrong += all[p * count + k] != 1.0 / (double)(p * 5000 + k + 1);
        expect(good && wrong == 0 && all[comm->world * count] == -1.0, "doubles of all ranks");
        free(all);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. In flight

// More requests than there is room for, of all kinds, waited for in some other order.
static void test_many(Comm* comm) {
    enum { MANY = 600, LENGTH = 53 };
    static int64_t integers[MANY][LENGTH];
    static float reals[MANY][LENGTH];
    static CommRequest requests[MANY];
    Error error;
    size_t wrong = 0, bad = 0;
    int64_t total = (int64_t)(comm->world * (comm->world + 1) / 2);
    for (int i = 0; i < MANY; i++) {
        for (int k = 0; k < LENGTH; k++) {
            integers[i][k] = (int64_t)(comm->rank + 1) * (i + k);
            reals[i][k] = (float)(comm->rank * 1000 + (size_t)(i + k));
        }
        size_t from = (size_t)i % comm->world;
        float* x = reals[i];
        if (i % 3 == 0) requests[i] = start_sum(comm, integers[i], LENGTH, DTYPE_I64);
        else if (i % 3 == 1)
            requests[i] = comm_start(comm, COMM_BROADCAST, DTYPE_F32, x, x, LENGTH, from, NULL, NULL);
        else requests[i] = comm_start(comm, COMM_BARRIER, DTYPE_U8, NULL, NULL, 0, 0, NULL, NULL);
    }
    for (int i = 0; i < MANY; i++) {
        int j = i * 7 % MANY;  // 7 and MANY share no factor: each once
        bad += !comm_wait(comm, requests[j], &error);
        for (int k = 0; k < LENGTH; k++) {
            wrong += j % 3 == 0 && integers[j][k] != total * (j + k);
            wrong += j % 3 == 1 && reals[j][k] != (float)((size_t)j % comm->world * 1000 + (size_t)(j + k));
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
        CommSlice own = comm_even_slice(comm->rank, N, n);
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
        expect(comm_statistics(comm).bytes_sent - later.bytes_sent == sent, "bytes sent of a broadcast");
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

// Requests that take a while each are finished under a computation: before anyone waits for them.
static void test_overlap(Comm* comm) {
    enum { REQUESTS = 5, DELAY_MS = 40 };
    float data[REQUESTS][1000] = {{0.0f}};
    CommRequest requests[REQUESTS];
    Error error;
    double deadline = now_ms() + LONG_MS;
    uint64_t finished = count_finished(comm);
    char fault[80];
    snprintf(fault, sizeof fault, "rank %zu step 0 at collective do delay %d", comm->rank, DELAY_MS);
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
    // All of it, but for what passes between a call's start and its wait on a busy machine.
    double waited = comm_statistics(comm).waited_ms - before;
    bool at_once = comm->world == 1;  // there a start has done all, and there is nothing to wait for
    expect(at_once || waited > 0.25 * DELAY_MS * REQUESTS, "without a computation it is waited for");
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

static void body_collectives(size_t rank) {
    Comm comm;
    (void)rank;
    open_or_end(&comm, LONG_MS);
    expect(comm.local_rank == comm.rank && comm.local_world == comm.world, "local ranks are counted");
    test_all(&comm);
    comm_close(&comm);
}

static void body_overlap(size_t rank) {
    Comm comm;
    (void)rank;
    open_or_end(&comm, LONG_MS);
    test_overlap(&comm);
    comm_close(&comm);
}

// ------------------------------------------------------------------------------------------------
// 4. Launch

typedef struct {
    const char* variables;  // "NAME=value NAME=value"
    size_t rank, world;
    const char* found;      // launcher, address:port, run identifier and local rank, as below; NULL: it must fail
    const char *words, *more_words;
} LaunchCase;

static const LaunchCase launch_cases[] = {
    {"", 0, 1, "none", NULL, NULL},
    {"RANK=1 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node7 MASTER_PORT=29400 TORCHELASTIC_RUN_ID=abc",
     1, 3, "torchrun node7:29400 abc 1", NULL, NULL},
    {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=::1 MASTER_PORT=5 TORCHELASTIC_RUN_ID=abc "
     "TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True",
     1, 2, "torchrun ::1:6 abc.2 1", NULL, NULL},
    {"RANK=0 WORLD_SIZE=1", 0, 1, "torchrun", NULL, NULL},
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
     "MASTER_ADDR=a MASTER_PORT=7 OMPI_MCA_ess_base_jobid=99",
     2, 4, "Open MPI a:7 99 0", NULL, NULL},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
     "PMIX_NAMESPACE=job",
     1, 2, "Open MPI 127.0.0.1:* job 1", NULL, NULL},
    {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 LLMTRAIN_RUN_ID=mine", 1, 2, "MPICH 127.0.0.1:* mine 1",
     NULL, NULL},
    {"SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=12 SLURM_STEP_ID=3 "
     "SLURM_STEP_NODELIST=gpu[07-08,11],cpu1",
     5, 8, "Slurm gpu07:* 12.3 1", NULL, NULL},
    {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_JOB_ID=12 SLURM_STEP_ID=0 "
     "SLURM_STEP_NODELIST=head,cpu1 SLURM_STEP_NUM_NODES=1",
     1, 2, "Slurm 127.0.0.1:* 12.0 1", NULL, NULL},
    // A batch script is no step.
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=12", 0, 1, "none", NULL, NULL},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", 1, 2,
     "torchrun a:7 unnamed", NULL, NULL},
    {"RANK=1024 WORLD_SIZE=1025 MASTER_ADDR=a MASTER_PORT=7", 1024, 1025, "torchrun a:7 unnamed", NULL, NULL},
    {"RANK=0 WORLD_SIZE=65537 MASTER_ADDR=a MASTER_PORT=7", 0, 0, NULL, "WORLD_SIZE is '65537'", "from 0 to 65536"},
    {"RANK=1", 0, 0, NULL, "RANK is set and WORLD_SIZE is not", "torchrun"},
    {"WORLD_SIZE=2", 0, 0, NULL, "WORLD_SIZE is set and RANK is not", NULL},
    {"SLURM_PROCID=1 SLURM_STEP_ID=0", 0, 0, NULL, "SLURM_PROCID is set and SLURM_STEP_NUM_TASKS is not", "Slurm"},
    {"RANK=two WORLD_SIZE=2", 0, 0, NULL, "RANK is 'two'", "whole number"},
    {"RANK=-1 WORLD_SIZE=2", 0, 0, NULL, "RANK is '-1'", "whole number"},
    {"RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7", 0, 0, NULL, "RANK is 2 and WORLD_SIZE is 2", "contradict"},
    {"RANK=0 WORLD_SIZE=0", 0, 0, NULL, "WORLD_SIZE is 0", "contradict"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 MASTER_ADDR=a MASTER_PORT=7", 0, 0, NULL, "LOCAL_RANK is 2 and RANK is 1",
     "contradict"},
    {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7", 0, 0, NULL,
     "LOCAL_WORLD_SIZE is 2", "contradict"},
    {"RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=5 MASTER_ADDR=a MASTER_PORT=7", 0, 0, NULL, "LOCAL_WORLD_SIZE is 5",
     "contradict"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=7 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", 0, 0, NULL,
     "RANK says rank 1 of 2", "OMPI_COMM_WORLD_RANK says rank 0 of 2"},
    {"RANK=1 WORLD_SIZE=2", 0, 0, NULL, "set MASTER_ADDR", "MASTER_PORT"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a", 0, 0, NULL, "MASTER_ADDR is set and MASTER_PORT is not", NULL},
    {"RANK=1 WORLD_SIZE=2 MASTER_PORT=9", 0, 0, NULL, "MASTER_PORT is set and MASTER_ADDR is not", NULL},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", 0, 0, NULL, "MASTER_PORT is '0'", "1 to 65535"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", 0, 0, NULL, "MASTER_PORT is '65536'", "1 to 65535"},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", 0, 0, NULL, "MASTER_PORT is 'http'", NULL},
};

// `found` with * standing for any port of the range that is derived from a job's name.
static bool launch_matches(const Launch* l, const char* found) {
    char text[512], port_text[32], local[32] = "";
    if (l->world == 1) return l->rank == 0 && l->listener < 0 && strcmp(l->launcher, found) == 0;
    if (l->mpi && l->address[0] == 0) {  // MPI knows where the ranks meet
        snprintf(text, sizeof text, "%s ", l->launcher);
        return strncmp(text, found, strlen(text)) == 0 && strstr(found, l->run);
    }
    bool derived = strstr(found, ":*") && l->port >= 20000 && l->port < 32000;
    snprintf(port_text, sizeof port_text, "%zu", l->port);
    if (l->local_rank != LAUNCH_UNKNOWN) snprintf(local, sizeof local, " %zu", l->local_rank);
    snprintf(text, sizeof text, "%s %s:%s %s%s", l->launcher, l->address, derived ? "*" : port_text, l->run, local);
    return strcmp(text, found) == 0;
}

static void test_launch(void) {
    for (size_t i = 0; i < COUNT_OF(launch_cases); i++) {
        const LaunchCase* c = &launch_cases[i];
        char variables[512];
        Launch launch;
        Error error = {"", ERROR_WORLD, false};
        environment_clear();
        snprintf(variables, sizeof variables, "%s", c->variables);
        for (char* at = variables; (at = strchr(at, ' ')) != NULL;) *at = '|';
        environment_set(variables);
        bool good = launch_find(&launch, &error), ok;
        if (c->found == NULL)
            ok = !good && strstr(error.text, c->words) && (!c->more_words || strstr(error.text, c->more_words));
        else ok = good && launch.rank == c->rank && launch.world == c->world && launch_matches(&launch, c->found);
        expect(ok, "%s: %s", c->variables[0] ? c->variables : "no variables", good ? launch.launcher : error.text);
    }
    Launch launch;
    Error error;
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

// No process may be forked: what was begun is released.
static void expect_no_spawn(void) {
    Launch launch;
    Error error;
    struct rlimit before, none;
    need(getrlimit(RLIMIT_NPROC, &before) == 0, "the limit on processes");
    none = before;
    none.rlim_cur = 0;
    need(setrlimit(RLIMIT_NPROC, &none) == 0 && (geteuid() != 0 || setuid(65534) == 0), "a limit on processes");
    expect(!launch_fork(&launch, 3, &error) && strstr(error.text, "cannot start rank 1 of 3"), "cannot fork");
    expect(launch_reap(&launch, "test_comm", 3, 0, &error) == 3 && launch.listener == -1, "nothing is left of it");
    need(setrlimit(RLIMIT_NPROC, &before) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0, "what the leak sanitizer needs");
}

// Ranks forked by launch_fork, from a process of its own: what its rank 2 does, and what launch_reap makes of it.
enum {
    SPAWN_WELL,
    SPAWN_CODE,
    SPAWN_KILLED,
    SPAWN_STOPPED,
    SPAWN_REPORTS,
    SPAWN_PARENT_DIES,
    SPAWN_ABSENT,
    SPAWN_REFUSED,
    SPAWNS
};
static const struct {
    const char* name;
    int code;               // of launch_reap
    const char* words;      // its error, which is also reported where no rank has reported anything
} spawn_cases[SPAWNS] = {
    {"forked ranks", 0, ""},
    {"forked ranks, one exits with 7", 7, "rank 2 ended with exit code 7"},
    {"forked ranks, one is killed", 128 + SIGKILL, "rank 2 was ended by signal 9"},
    {"forked ranks, one is stopped", 128 + SIGKILL, "rank 2 did not end within 2.0 s"},
    {"forked ranks, all report at once", 7, "rank 2 ended with exit code 7"},
    {"forked ranks, rank 0 is killed", 0, ""},
    {"forked ranks, one is killed before it connects", 1, "rank 2 was ended by signal 9"},
    {"no rank can be forked", 0, ""},
};
static int spawn_kind;

// A long sentence of a rank, of several lines; they are reported as one.
static void spawn_sentence(char text[1024], size_t rank, char line_end) {
    memset(text, 'a' + (int)rank, 1023);
    text[500] = line_end;
    text[1023] = 0;
}

// The standard error of a case's ranks: one line where something has failed, and that in full.
static void expect_report(FILE* file) {
    static char text[1 << 16];
    char expected[2048], sentence[1024];
    bool several = spawn_kind == SPAWN_REPORTS, right;
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    snprintf(expected, sizeof expected, "%s%s", spawn_cases[spawn_kind].words[0] ? "test_comm: rank 0: " : "",
             spawn_cases[spawn_kind].words);
    right = !several && strncmp(text, expected, strlen(expected)) == 0;
    for (size_t rank = 1; rank < 3 && several; rank++) {
        spawn_sentence(sentence, rank, ' ');
        snprintf(expected, sizeof expected, "test_comm: rank %zu: %s\n", rank, sentence);
        right = right || strcmp(text, expected) == 0;
    }
    size_t lines = 0;
    for (const char* at = text; (at = strchr(at, '\n')) != NULL; at++) lines++;
    expect(right && lines == (expected[0] != 0), "standard error has %zu lines: %.200s", lines, text);
}

static void body_spawn(size_t unused) {
    Launch launch;
    Comm comm;
    Error error;
    char sentence[1024];
    (void)unused;
    environment_clear();
    if (spawn_kind == SPAWN_REFUSED) {
        expect_no_spawn();
        return;
    }
    FILE* printed = tmpfile();
    need(printed && dup2(fileno(printed), STDERR_FILENO) >= 0, "a file for standard error");
    need(launch_fork(&launch, 3, &error), "forked ranks: %s", error.text);
    forked[launch.rank] = getpid();
    if (launch.rank == 2 && spawn_kind == SPAWN_ABSENT) raise(SIGKILL);
    double began = now_ms();
    bool good = comm_open(&comm, &launch, LONG_MS, &error);
    int64_t sum = (int64_t)launch.rank + 1;
    if (spawn_kind != SPAWN_ABSENT) {
        good = good && all_reduce(&comm, &sum, 1, DTYPE_I64, &error) && sum == 6 && comm.local_rank == comm.rank &&
               comm.local_world == 3;
        if (good) comm_close(&comm);
        if (launch.rank == 0) expect(good, "forked ranks connect");
    } else if (launch.rank == 0) {
        expect(!good && strstr(error.text, "rank 2 is gone: it ended before"), "says: %s", error.text);
        expect(now_ms() - began < SLACK_MS, "in time");
    }
    spawn_sentence(sentence, launch.rank, '\n');
    for (int i = 0; i < 200 && launch.rank > 0 && spawn_kind == SPAWN_REPORTS; i++)  // more than a pipe has room for
        launch_report(&launch, "test_comm", sentence);
    if (launch.rank == 2 && (spawn_kind == SPAWN_CODE || spawn_kind == SPAWN_REPORTS)) exit(7);
    if (launch.rank == 2 && spawn_kind == SPAWN_KILLED) raise(SIGKILL);
    if (launch.rank == 2 && spawn_kind == SPAWN_STOPPED) raise(SIGSTOP);
    if (launch.rank > 0 && spawn_kind == SPAWN_PARENT_DIES) for (;;) sleep_ms(1000);
    if (launch.rank == 0 && spawn_kind == SPAWN_PARENT_DIES) raise(SIGKILL);
    if (launch.rank > 0) exit(0);
    began = now_ms();
    double grace_ms = spawn_kind == SPAWN_STOPPED ? 2000 : LONG_MS;
    int code = launch_reap(&launch, "test_comm", spawn_kind == SPAWN_ABSENT, grace_ms, &error);
    expect(code == spawn_cases[spawn_kind].code && strstr(error.text, spawn_cases[spawn_kind].words) &&
               (code != 0) == (error.text[0] != 0), "exit code %d, and: %s", code, error.text);
    expect(now_ms() - began < grace_ms + SLACK_MS, "in time");
    expect_report(printed);
}

static void test_spawn(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans become children of this process, which can see them end
    for (spawn_kind = 0; spawn_kind < SPAWNS; spawn_kind++) {
        int status = 0;
        bool dies = spawn_kind == SPAWN_PARENT_DIES;
        start_ranks(spawn_cases[spawn_kind].name, 1, body_spawn);
        if (dies) waitpid(children[0], &status, 0);
        else end_ranks(1, NOBODY);
        if (dies) expect(WIFSIGNALED(status), "rank 0 is killed");
        for (size_t rank = 1; rank < 3 && dies; rank++) {
            double deadline = now_ms() + SLACK_MS;
            pid_t gone = 0;
            while ((gone = waitpid(forked[rank], &status, WNOHANG)) == 0 && now_ms() < deadline) sleep_ms(1);
            expect(gone > 0 && WIFSIGNALED(status), "rank %zu dies with rank 0", rank);
            if (gone == 0) kill(forked[rank], SIGKILL);
        }
        end_case();
    }
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}

// ------------------------------------------------------------------------------------------------
// 5. Rendezvous

static size_t odd_rank;         // the rank that does what the case is about
static const char* odd_variable;  // NAME=VALUE that it has otherwise; NULL: none
static double connect_ms;       // the timeout

static void body_connect(size_t rank) {
    Comm comm;
    Error error;
    if (rank == odd_rank) environment_set(odd_variable);
    bool good = open_rank(&comm, connect_ms, &error);
    outcome(good, &error);
    if (good) comm_close(&comm);
}

static void set_case(size_t odd, const char* variable, double limit_ms) {
    odd_rank = odd;
    odd_variable = variable;
    connect_ms = limit_ms;
}

// Rank 0 of two.
static void body_first_of_two(size_t rank) {
    environment_set("WORLD_SIZE=2");
    body_connect(rank);
}

static void body_never_connects(size_t rank) {
    if (rank == odd_rank) exit(0);
    body_connect(rank);
}

static void body_all_odd(size_t rank) {
    odd_rank = rank;
    body_connect(rank);
}

static int connect_to_rank_0(double deadline) {
    Error error;
    int connection;
    while ((connection = socket_connect("127.0.0.1", port, deadline, &error)) < 0 && now_ms() < deadline) sleep_ms(1);
    need(connection >= 0, "connecting to rank 0");
    return connection;
}

// Noise, few letters, and much silence: all of them at rank 0 before the ranks connect.
#define STRANGERS (COMM_PENDING_MAX + 6)
static void disturb(int* sockets) {
    char noise[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", few[] = "llm";
    double deadline = now_ms() + LONG_MS;
    for (size_t i = 0; i < STRANGERS; i++) sockets[i] = connect_to_rank_0(deadline);
    need(socket_move_all(sockets[0], noise, strlen(noise), POLLOUT, deadline), "sending noise");
    need(socket_move_all(sockets[1], few, strlen(few), POLLOUT, deadline), "sending little");
}

// Rank 1, whose data connection comes before the control connection, and which then closes both.
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

// Answers one connection as a mail server would, and at more length than rank 0: at once, since rank 1 closes the
// connection when it has read enough.
static void answer_first(int listener) {
    char answer[2 * sizeof(CommMessage)];
    double deadline = now_ms() + LONG_MS;
    int connection = -1;
    for (size_t i = 0; i < sizeof answer; i++) answer[i] = "220 welcome\r\n"[i % 13];
    while (connection < 0 && now_ms() < deadline) {
        connection = accept(listener, NULL, NULL);
        sleep_ms(1);
    }
    need(connection >= 0, "a connection of rank 1");
    need(socket_move_all(connection, answer, sizeof answer, POLLOUT, deadline), "an answer to rank 1");
    sleep_ms(100);
    close(connection);
}

static bool has_ipv6(void) {
    struct sockaddr_in6 address;
    int s = socket(AF_INET6, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    bool good = s >= 0 && bind(s, (struct sockaddr*)&address, sizeof address) == 0;
    if (s >= 0) close(s);
    return good;
}

// An address of this machine on a network, if it has one.
static bool outside_address(char text[64]) {
    struct ifaddrs* list = NULL;
    text[0] = 0;
    if (getifaddrs(&list) != 0) return false;
    for (const struct ifaddrs* i = list; i && text[0] == 0; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && !(i->ifa_flags & IFF_LOOPBACK) &&
            (i->ifa_flags & IFF_UP))
            getnameinfo(i->ifa_addr, sizeof(struct sockaddr_in), text, 64, NULL, 0, NI_NUMERICHOST);
    freeifaddrs(list);
    return text[0] != 0;
}

// Rank 0 alone until the strangers have connected.
static void body_disturbed(size_t rank) {
    double deadline = now_ms() + LONG_MS;
    int* stage = &reports[RANKS_MAX].stage;
    while (rank > 0 && __atomic_load_n(stage, __ATOMIC_SEQ_CST) == 0 && now_ms() < deadline) sleep_ms(1);
    body_connect(rank);
}

static void body_delayed(size_t rank) {
    if (rank == odd_rank) sleep_ms(400);
    body_connect(rank);
}

// Fewer files than there are connections may be open; more, if the process asks for it, or not.
static rlim_t files_max;
static void body_few_files(size_t rank) {
    struct rlimit limit = {2 * RANKS_MAX, files_max};
    need(setrlimit(RLIMIT_NOFILE, &limit) == 0, "a limit of open files");
    body_connect(rank);
}

static void test_few_files(void) {
    set_case(NOBODY, NULL, timeout_ms);
    files_max = 64;  // less than a rank would like to have, and enough
    run_good("few open files, and more for a process that asks", RANKS_MAX, body_few_files);
    files_max = 2 * RANKS_MAX;
    run_failing("few open files", RANKS_MAX, body_few_files, timeout_ms + SLACK_MS, "and may have 10; raise the limit");
}

// One rank never connects: rank 0 misses it and tells the rest; without rank 0 no rank can.
static void test_absent(void) {
    for (size_t odd = 0; odd < 3; odd++) {
        double began = now_ms();
        set_case(odd, NULL, timeout_ms);
        start_ranks(text_of("rank %zu never connects", odd), 3, body_never_connects);
        end_ranks(3, NOBODY);
        end_failure(3, odd, began, timeout_ms + SLACK_MS,
                    odd == 0 ? "not reached rank 0 at 127.0.0.1" : text_of("rank %zu has not connected to rank 0", odd),
                    NULL);
    }
}

static void test_strangers(void) {
    set_case(1, "LLMTRAIN_RUN_ID=another", timeout_ms);
    start_ranks("a rank of another run", 2, body_connect);
    end_ranks(2, NOBODY);
    expect_text(1, "is of run 'another', rank 0 here of run 'test'");
    expect(reports[1].ended_ms < reports[0].ended_ms, "rank 1 is told at once");  // rank 0 waits on, for the right one
    expect_text(0, "rank 1 has not connected");
    expect_text(0, "Rejected: rank 1");
    end_case();

    set_case(1, "WORLD_SIZE=5", timeout_ms);
    start_ranks("a rank with another world size", 2, body_connect);
    end_ranks(2, NOBODY);
    expect_text(1, "has world size 5, rank 0 has 2");
    expect_text(0, "Rejected: rank 1");
    end_case();

    set_case(2, "RANK=1", timeout_ms);
    start_ranks("two ranks with one number", 3, body_connect);
    end_ranks(3, NOBODY);
    expect_text(0, "rank 2 has not connected");
    expect_text(0, "a second rank 1");
    expect_text(strstr(reports[1].text, "second rank 1") ? 1 : 2, "second rank 1");
    end_case();
}

// The port is taken: by something silent, whose connections wait in vain, and by something that answers first.
static void test_busy_port(void) {
    for (int answers = 0; answers < 2; answers++) {
        char variable[32], number[32];
        int listener;
        size_t taken = 0;
        Error error;
        need(socket_listen(&listener, &taken, "127.0.0.1", &error), "taking a port");
        snprintf(number, sizeof number, "%zu", taken);
        snprintf(variable, sizeof variable, "MASTER_PORT=%zu", taken);
        set_case(NOBODY, variable, timeout_ms);
        start_ranks(answers ? "a port in use by a program that answers" : "a port in use", 2, body_all_odd);
        if (answers) answer_first(listener);
        end_ranks(2, NOBODY);
        expect_text(0, number);
        expect_text(0, "the port is in use");
        expect_text(1, number);
        expect_text(1, answers ? "is not rank 0 of this program" : "has not answered rank 1");
        end_case();
        close(listener);
    }
}

// Addresses of other kinds than 127.0.0.1.
static void test_addresses(void) {
    char outside[64];
    if (outside_address(outside)) {
        set_case(NOBODY, text_of("MASTER_ADDR=%s", outside), LONG_MS);
        run_good("a rendezvous at an address that others can reach", 3, body_all_odd);
    } else skip("a rendezvous at an address that others can reach", "there is none");
    if (has_ipv6()) {
        set_case(NOBODY, "MASTER_ADDR=::1", LONG_MS);
        run_good("a rendezvous at ::1", 3, body_all_odd);
    } else skip("a rendezvous at ::1", "there is no IPv6");
    set_case(NOBODY, "MASTER_ADDR=localhost", LONG_MS);
    run_good("a rendezvous at localhost", 3, body_all_odd);
}

static void test_rendezvous(void) {
    test_busy_port();
    test_addresses();

    set_case(NOBODY, NULL, timeout_ms);
    start_ranks("a rank whose connections come in disorder", 1, body_first_of_two);
    connect_in_disorder();
    end_ranks(1, NOBODY);
    end_case();

    // They do not hold it up: there are more of them than the timeout has time for.
    int sockets[STRANGERS];
    set_stage(0);
    start_ranks("strangers at the rendezvous", 3, body_disturbed);
    disturb(sockets);
    set_stage(1);
    end_ranks(3, NOBODY);
    end_success(3);
    for (size_t i = 0; i < STRANGERS; i++) close(sockets[i]);

    for (size_t odd = 0; odd < 3; odd++) {
        set_case(odd, NULL, LONG_MS);
        run_good(text_of("rank %zu connects later", odd), 3, body_delayed);
    }
}

// ------------------------------------------------------------------------------------------------
// 6. Failures

static int fault_signal;
static double fault_after_ms;

static void* raise_later(void* unused) {
    (void)unused;
    sleep_ms(fault_after_ms);
    *fault_ms = now_ms();
    kill(getpid(), fault_signal);
    return NULL;
}

static void arm(void) {
    pthread_t thread;
    need(pthread_create(&thread, NULL, raise_later, NULL) == 0, "starting a thread");
    pthread_detach(thread);
}

// The victim fails in the rendezvous. If it is killed, the last rank never connects, and no rank waits for that; if it
// is stopped, the last rank connects then, and all wait for the victim.
static void body_fault_in_rendezvous(size_t rank) {
    double deadline = now_ms() + timeout_ms;
    if (rank == odd_rank) arm();
    if (rank == 3 && fault_signal == SIGKILL) exit(0);
    while (rank == 3 && *fault_ms == 0 && now_ms() < deadline) sleep_ms(1);
    body_connect(rank);
}

static void body_fault_between(size_t rank) {
    Comm comm;
    Error error;
    int64_t x = 1;
    open_or_end(&comm, timeout_ms);
    bool good = comm_barrier(&comm, &error);  // fails where the failure of a faster rank is known here already
    if (rank == odd_rank) {
        *fault_ms = now_ms();
        raise(fault_signal);
    }
    // The last one computes first: the rest ends before it asks, and must not be blamed.
    if (rank == 3) busy(300);
    good = good && all_reduce(&comm, &x, 1, DTYPE_I64, &error);
    outcome(good, &error);
    comm_close(&comm);
}

// Large sums are in progress, one after the other, when the victim fails.
static void body_fault_inside(size_t rank) {
    enum { REQUESTS = 4, LENGTH = 1 << 20 };
    Comm comm;
    Error error;
    CommRequest requests[REQUESTS];
    float* data = (float*)allocate((size_t)REQUESTS * LENGTH * sizeof(float));
    need(data != NULL, "memory");
    open_or_end(&comm, timeout_ms);
    bool good = comm_barrier(&comm, &error);
    if (rank == odd_rank) arm();
    for (double end = now_ms() + 4 * timeout_ms; good && now_ms() < end;) {
        for (size_t i = 0; i < REQUESTS; i++) requests[i] = start_sum(&comm, data + i * LENGTH, LENGTH, DTYPE_F32);
        for (size_t i = 0; i < REQUESTS; i++) good = comm_wait(&comm, requests[i], &error);
    }
    outcome(good, &error);
    comm_close(&comm);
    free(data);
}

// The victim dies in the rendezvous, and the last rank connects after that, but not so late that no rank is left.
static void body_late_for_fault(size_t rank) {
    double deadline = now_ms() + CASE_MS / 2;
    if (rank == odd_rank) arm();
    while (rank == 3 && *fault_ms == 0 && now_ms() < deadline) sleep_ms(1);
    if (rank == 3) sleep_ms(300);
    body_connect(rank);
}

// Rank 1 dies when all have received the table; rank 2 connects to it so late that rank 0 has gone too.
static void body_gone_after_table(size_t rank) {
    Launch launch;
    Comm comm;
    CommRendezvous r;
    Error error;
    if (rank == 0) {
        body_connect(rank);
        return;
    }
    memset(&comm, 0, sizeof comm);
    memset(&r, 0, sizeof r);
    need(launch_find(&launch, &error), "%s", error.text);
    comm.rank = launch.rank;
    comm.world = launch.world;
    comm.timeout_ms = timeout_ms;
    comm.wake = comm.listener = -1;
    memcpy(comm.run, launch.run, sizeof comm.run);
    snprintf(comm.doing, sizeof comm.doing, "in the rendezvous");
    r.launch = &launch;
    r.deadline = now_ms() + CASE_MS / 2;
    r.table = (CommAddress*)allocate(comm.world * sizeof *r.table);
    need(r.table && comm_allocate(&comm, &error) && socket_listen(&comm.listener, &r.port, launch.address, &error) &&
         comm_receive_table(&comm, &r, &error), "connecting to rank 0");
    if (rank == 1) {
        *fault_ms = now_ms();
        raise(SIGKILL);
    }
    sleep_ms(2 * COMM_GRACE_MS);
    outcome(comm_connect_lower(&comm, &r, &error), &error);
    comm.failed = true;
    socket_close(&comm.listener);
    comm_close(&comm);
    free(r.table);
}

static void test_late_in_rendezvous(void) {
    fault_signal = SIGKILL;
    fault_after_ms = 500;  // on a slow machine that may be before its handshake; then it has not connected
    for (size_t odd = 1; odd < 3; odd++) {
        set_case(odd, NULL, LONG_MS);
        start_ranks(text_of("rank %zu is killed in the rendezvous before the last has connected", odd), 4,
                    body_late_for_fault);
        end_ranks(4, odd);
        end_failure(4, odd, *fault_ms, COMM_GRACE_MS + SLACK_MS, text_of("rank %zu is gone", odd),
                    text_of("rank %zu has not connected", odd));
    }
    odd_rank = NOBODY;
    start_ranks("rank 1 is killed in the rendezvous when all have the table", 3, body_gone_after_table);
    end_ranks(3, 1);
    end_failure(3, 1, *fault_ms, 3 * COMM_GRACE_MS + SLACK_MS, "rank 1 is gone", NULL);
}

static void test_signal_in_rendezvous(int signal) {
    bool killed = signal == SIGKILL;
    fault_signal = signal;
    fault_after_ms = killed ? 500 : 200;  // on a slow machine that may be before its handshake
    for (size_t odd = 0; odd < 3; odd++) {
        const char* words = text_of(killed ? "rank %zu is gone" : "rank %zu has not answered", odd);
        const char* other = text_of(killed ? "ranks %zu, 3 have not connected" : "rank %zu has not connected", odd);
        if (odd == 0) other = killed ? "not reached rank 0" : "rank 0 at 127.0.0.1";
        set_case(odd, NULL, killed && odd > 0 ? LONG_MS : timeout_ms);  // only a dead rank 0 is waited for
        start_ranks(text_of("rank %zu is %s in the rendezvous", odd, killed ? "killed" : "stopped"), 4,
                    body_fault_in_rendezvous);
        end_ranks(4, odd);
        end_failure(killed ? 3 : 4, odd, *fault_ms, 2 * connect_ms + COMM_GRACE_MS + SLACK_MS, words, other);
    }
}

static void test_kill_in_rendezvous(void) { test_signal_in_rendezvous(SIGKILL); }
static void test_stop_in_rendezvous(void) { test_signal_in_rendezvous(SIGSTOP); }

static void test_signal(int signal, bool inside) {
    bool killed = signal == SIGKILL;
    size_t world = inside ? 3 : 4;
    fault_signal = signal;
    for (odd_rank = 0; odd_rank < 3; odd_rank++) {
        fault_after_ms = 3.0 + 5.0 * (double)odd_rank;
        start_ranks(text_of("rank %zu is %s %s", odd_rank, killed ? "killed" : "stopped",
                            inside ? "in a collective" : "between collectives"),
                    world, inside ? body_fault_inside : body_fault_between);
        end_ranks(world, odd_rank);
        end_failure(world, odd_rank, *fault_ms, 1.25 * timeout_ms + SLACK_MS,
                    text_of(killed ? "rank %zu is gone" : "rank %zu has not answered", odd_rank), NULL);
    }
}

static void test_stop_between(void) { test_signal(SIGSTOP, false); }
static void test_stop_inside(void) { test_signal(SIGSTOP, true); }
static void test_kills(void) {
    test_signal(SIGKILL, false);
    test_signal(SIGKILL, true);
}

// Calls that do not match: what rank 1 does otherwise, and what all then say. The rank that receives from rank 1 first
// blames it; rank 1 blames rank 0.
enum {
    CALL_LATE, CALL_LEAVES, CALL_LENGTH, CALL_LARGE, CALL_TYPE, CALL_OPERATION, CALL_ROOT, CALL_SLICES, CALL_MORE,
    CALL_SUM_OF_BYTES, CALL_BAD_SLICES, CALL_BAD_ROOT, CALLS
};
static const struct {
    const char *name, *words;
} call_cases[CALLS] = {
    {"rank 1 is late", "rank 1 is late"},
    {"rank 1 leaves", "rank 1 ended its run while"},
    {"rank 1 has another length", "all_reduce of 41 int64 (operation 1)"},
    {"rank 1 has far more", "all_reduce of 1000 int64 (operation 1)"},
    {"rank 1 has another type", "all_reduce of 40 fp32 (operation 1)"},
    {"rank 1 calls another operation", "broadcast of 40 int64 from rank 0 (operation 1)"},
    {"rank 1 names another root", "broadcast of 40 int64 from rank 1 (operation 1)"},
    {"rank 1 has other slices", "with other slices"},
    {"rank 1 calls one more", "rank 1 called barrier (operation 1)"},
    {"a sum of bytes", "that type is not summed"},
    {"slices that overlap", "with the slice [1, 41) for rank 1"},
    {"a root that is no rank", "there is no such rank"},
};
static int call_kind;

static CommSlice bad_slice(size_t rank, const void* context) {
    CommSlice s = {rank, *(const size_t*)context + rank};
    return s;
}

static void body_call(size_t rank) {
    Comm comm;
    Error error;
    int64_t data[1000] = {0};
    size_t n = 40;
    Cut cut = {n, 3, CUT_UNEVEN};
    bool odd = rank == 1, good = open_rank(&comm, timeout_ms, &error);
    if (!good) {  // another rank was so fast that its mistake was known in the rendezvous
        outcome(false, &error);
        return;
    }
    if (odd && call_kind == CALL_LEAVES) {
        comm_close(&comm);
        return;
    }
    if (odd && call_kind == CALL_LATE) sleep_ms(2 * timeout_ms);
    if (odd && call_kind == CALL_LENGTH) n = 41;
    if (odd && call_kind == CALL_LARGE) n = 1000;
    Dtype type = DTYPE_I64;
    if (odd && call_kind == CALL_TYPE) type = DTYPE_F32;
    if (call_kind == CALL_SUM_OF_BYTES) type = DTYPE_U8;
    if (odd && call_kind == CALL_MORE) comm_start(&comm, COMM_BARRIER, DTYPE_U8, NULL, NULL, 0, 0, NULL, NULL);
    if (call_kind == CALL_ROOT || call_kind == CALL_BAD_ROOT)
        good = comm_broadcast(&comm, data, n, DTYPE_I64, call_kind == CALL_BAD_ROOT ? 3 : odd, &error);
    else if (call_kind == CALL_SLICES)
        good = comm_all_gather(&comm, data, n, DTYPE_I64, odd ? cut_slice : NULL, &cut, &error);
    else if (call_kind == CALL_BAD_SLICES)
        good = comm_all_gather(&comm, data, n, DTYPE_I64, odd ? bad_slice : NULL, &n, &error);
    else if (odd && call_kind == CALL_OPERATION) good = comm_broadcast(&comm, data, n, DTYPE_I64, 0, &error);
    else good = all_reduce(&comm, data, n, type, &error);
    outcome(good, &error);
    Error again;
    expect(!comm_barrier(&comm, &again) && strcmp(again.text, error.text) == 0,
           "after a failure all calls fail, with the same words");
    comm_close(&comm);
}

static void test_calls(void) {
    for (call_kind = 0; call_kind < CALLS; call_kind++) {
        double began = now_ms();
        start_ranks(call_cases[call_kind].name, 3, body_call);
        end_ranks(3, NOBODY);
        end_failure(3, call_kind == CALL_LEAVES ? 1 : NOBODY, began, 2 * timeout_ms + SLACK_MS,
                    call_cases[call_kind].words, call_kind == CALL_MORE ? "and rank 1 barrier (operation 1)" : NULL);
    }
}

// ------------------------------------------------------------------------------------------------
// 7. Monitoring

static void count_call(void* context) { __atomic_add_fetch((int*)context, 1, __ATOMIC_SEQ_CST); }
static int calls_counted(const int* calls) { return __atomic_load_n(calls, __ATOMIC_SEQ_CST); }

// What ends the victim while all ranks compute.
enum { IDLE_KILLED, IDLE_STOPPED, IDLE_ABORTS, IDLES };
static int idle_kind;
static const char* const reason = "cannot read data/x.bin: no such file";

// No rank calls a collective after the rendezvous; all learn of the failure.
static void body_fault_idle(size_t rank) {
    Comm comm;
    Error error, again;
    int calls = 0, late_calls = 0;
    open_or_end(&comm, timeout_ms);
    comm_on_failure(&comm, count_call, &calls);
    expect(!comm_failed(&comm, &error), "no failure yet");
    set_stage(2);
    need(reach_stage(3, 2), "the other ranks have connected");
    if (rank == odd_rank) {
        *fault_ms = now_ms();
        if (idle_kind == IDLE_ABORTS) comm_abort(&comm, reason);
        else raise(idle_kind == IDLE_KILLED ? SIGKILL : SIGSTOP);
    }
    double deadline = now_ms() + CASE_MS / 2;
    while ((!comm_failed(&comm, &error) || calls_counted(&calls) == 0) && now_ms() < deadline) sleep_ms(1);
    outcome(!comm_failed(&comm, &error), &error);
    expect(!comm_barrier(&comm, &again) && strcmp(again.text, error.text) == 0, "calls fail with the same words");
    comm_on_failure(&comm, NULL, NULL);
    comm_on_failure(&comm, count_call, &late_calls);
    expect(calls_counted(&late_calls) == 1, "on_failure is called at once where it comes after the failure");
    comm_close(&comm);
    expect(calls_counted(&calls) == 1, "on_failure is called once");
}

static void test_idle(void) {
    static const char* const verbs[] = {"is killed", "is stopped", "aborts"};
    static const char* const says[] = {"is gone", "has not answered", "gave up: cannot read data/x.bin: no such file"};
    for (idle_kind = 0; idle_kind < IDLES; idle_kind++)
        for (odd_rank = 0; odd_rank < 3; odd_rank++) {
            bool aborts = idle_kind == IDLE_ABORTS;
            size_t victim = aborts ? NOBODY : odd_rank;
            start_ranks(text_of("rank %zu %s while all compute", odd_rank, verbs[idle_kind]), 3, body_fault_idle);
            end_ranks(3, victim);
            for (size_t rank = 0; rank < 3; rank++)
                if (rank != victim && !aborts) expect_text(rank, "between two collectives");
            end_failure(3, victim, *fault_ms, 1.25 * timeout_ms + SLACK_MS,
                        text_of("rank %zu %s", odd_rank, says[idle_kind]), NULL);
        }
}

// What is no failure: a rank that leaves when it has nothing more to do, one that computes for longer than the timeout,
// a transfer that takes longer but never stands still, and all ranks stopped together.
static void body_leaves(size_t rank) {
    Comm comm;
    Error error;
    int calls = 0;
    open_or_end(&comm, timeout_ms);
    comm_on_failure(&comm, count_call, &calls);
    set_stage(2);
    need(reach_stage(3, 2), "the other ranks have connected");
    if (rank != 1) sleep_ms(1.6 * timeout_ms);
    bool failed = comm_failed(&comm, &error);
    outcome(!failed && calls_counted(&calls) == 0, &error);
    set_stage(3);
    if (rank != 1) need(reach_stage(3, 3), "the other ranks have looked");
    comm_close(&comm);
}

static void body_computes(size_t rank) {
    Comm comm;
    Error error;
    int64_t sum = 1;
    open_or_end(&comm, timeout_ms);
    if (rank == 1) busy(2.5 * timeout_ms);
    set_stage(2);
    need(reach_stage(3, 2), "the other ranks have computed");
    bool good = all_reduce(&comm, &sum, 1, DTYPE_I64, &error) && sum == 3;
    outcome(good, &error);
    comm_close(&comm);
}

// The timeout is extended: rank 1 may be late, but not stopped.
static bool extended_stops;
static void body_extended(size_t rank) {
    Comm comm;
    Error error;
    open_or_end(&comm, timeout_ms);
    comm_extend_timeout(&comm, true);
    *fault_ms = now_ms();
    if (rank == 1 && extended_stops) raise(SIGSTOP);
    if (rank == 1) sleep_ms(2.5 * timeout_ms);
    outcome(comm_barrier(&comm, &error), &error);
    comm_close(&comm);
}

static void test_extended_timeout(void) {
    extended_stops = false;
    run_good("a rank is late where the timeout is extended", 3, body_extended);
    extended_stops = true;
    start_ranks("a rank is stopped where the timeout is extended", 3, body_extended);
    end_ranks(3, 1);
    end_failure(3, 1, *fault_ms, 1.5 * timeout_ms + SLACK_MS, "rank 1 has not answered", NULL);
}

// Rank 1 receives a little at a time, until three timeouts have passed.
static void* end_throttling(void* unused) {
    (void)unused;
    sleep_ms(3.2 * timeout_ms);
    __atomic_store_n(&fault_state()->count, 0, __ATOMIC_RELEASE);
    return NULL;
}

static void body_throttled(size_t rank) {
    Comm comm;
    Error error;
    pthread_t thread;
    int buffer = 1 << 16;
    size_t n = (size_t)32 << 20;
    char* data = (char*)allocate(n);
    need(data != NULL, "memory");
    open_or_end(&comm, timeout_ms);
    setsockopt(comm.links[1 - rank].data, SOL_SOCKET, rank == 0 ? SO_SNDBUF : SO_RCVBUF, &buffer, sizeof buffer);
    environment_set(text_of("LLMTRAIN_TEST_FAULT=rank 1 step 0 at transfer do delay %g", timeout_ms / 20));
    fault_step(rank, 0);
    need(pthread_create(&thread, NULL, end_throttling, NULL) == 0, "a thread");
    double began = now_ms();
    outcome(comm_broadcast(&comm, data, n, DTYPE_U8, 0, &error), &error);
    expect(now_ms() - began > 3 * timeout_ms, "a transfer of %.0f ms", now_ms() - began);
    pthread_join(thread, NULL);
    comm_close(&comm);
    free(data);
}

// Ranks 0 and 1 wait in a collective, rank 2 computes.
static void body_suspended(size_t rank) {
    Comm comm;
    Error error;
    int64_t sum = 1;
    open_or_end(&comm, timeout_ms);
    set_stage(2);
    while (rank == 2 && __atomic_load_n(&reports[RANKS_MAX].stage, __ATOMIC_SEQ_CST) == 0) sleep_ms(1);
    bool good = all_reduce(&comm, &sum, 1, DTYPE_I64, &error) && sum == 3;
    outcome(good, &error);
    comm_close(&comm);
}

static void test_no_failure(void) {
    run_good("a rank leaves while the others compute", 3, body_leaves);
    run_good("a rank computes for longer than the timeout", 3, body_computes);
    run_good("a transfer of three timeouts", 2, body_throttled);

    set_stage(0);
    start_ranks("all ranks are stopped, and continue", 3, body_suspended);
    expect(reach_stage(3, 2), "all ranks have connected");
    for (size_t rank = 0; rank < 3; rank++) kill(children[rank], SIGSTOP);
    sleep_ms(2 * timeout_ms);
    for (size_t rank = 0; rank < 3; rank++) kill(children[rank], SIGCONT);
    sleep_ms(100);
    set_stage(1);
    end_ranks(3, NOBODY);
    end_success(3);
}

enum { ABORT_AT_ONCE, ABORT_IN_FLIGHT, ABORT_FROM_THREAD, ABORTS };
static int abort_kind;

static void* abort_later(void* context) {
    Comm* comm = (Comm*)context;
    char text[2000];
    memset(text, 'x', sizeof text);
    memcpy(text, reason, strlen(reason));
    text[sizeof text - 1] = 0;
    sleep_ms(5);
    comm_abort(comm, text);
    return NULL;
}

// Sums of many sizes are in progress when rank odd_rank aborts; or it has not begun.
static void body_abort(size_t rank) {
    enum { REQUESTS = 4, LENGTH = 1 << 19 };
    Comm comm;
    Error error;
    CommRequest requests[REQUESTS];
    pthread_t thread;
    bool odd = rank == odd_rank, good = open_rank(&comm, timeout_ms, &error);
    if (!good) {  // another rank has aborted before this one knew that all are there
        outcome(false, &error);
        return;
    }
    float* data = (float*)allocate((size_t)REQUESTS * LENGTH * sizeof(float));
    need(data != NULL, "memory");
    if (odd && abort_kind == ABORT_AT_ONCE) comm_abort(&comm, reason);
    bool with_thread = odd && abort_kind == ABORT_FROM_THREAD;
    if (with_thread) need(pthread_create(&thread, NULL, abort_later, &comm) == 0, "starting a thread");
    for (int round = 0; good; round++) {
        for (size_t i = 0; i < REQUESTS; i++)
            requests[i] = start_sum(&comm, data + i * LENGTH, LENGTH >> 5 * i, DTYPE_F32);
        if (odd && abort_kind == ABORT_IN_FLIGHT && round == 1) comm_abort(&comm, reason);
        for (size_t i = 0; i < REQUESTS; i++) good = comm_wait(&comm, requests[i], &error);
    }
    outcome(good, &error);
    if (with_thread) pthread_join(thread, NULL);
    comm_close(&comm);
    free(data);
}

static void body_abort_alone(size_t rank) {
    Comm comm;
    Error error;
    int calls = 0;
    open_or_end(&comm, timeout_ms);
    comm_on_failure(&comm, count_call, &calls);
    expect(comm_barrier(&comm, &error) && calls_counted(&calls) == 0, "a barrier of one rank");
    comm_abort(&comm, reason);
    expect(comm_failed(&comm, &error) && strstr(error.text, reason) && calls_counted(&calls) == 1, "it has aborted");
    outcome(comm_barrier(&comm, &error), &error);
    comm_close(&comm);
    (void)rank;
}

static void test_abort(void) {
    static const char* const whens[] = {"before any collective", "with sums in flight", "from another thread"};
    for (abort_kind = 0; abort_kind < ABORTS; abort_kind++)
        for (odd_rank = 0; odd_rank < 3; odd_rank++)
            run_failing(text_of("rank %zu aborts %s", odd_rank, whens[abort_kind]), 3, body_abort,
                        timeout_ms + SLACK_MS, text_of("rank %zu gave up: %s", odd_rank, reason));
    run_failing("the only rank aborts", 1, body_abort_alone, SLACK_MS, text_of("rank 0 gave up: %s", reason));
}

// ------------------------------------------------------------------------------------------------
// 8. Lanes

static void test_worlds(void) {
    for (size_t world = 1; world <= RANKS_MAX; world++) {
        start_ranks(text_of("collectives between %zu rank%s", world, world > 1 ? "s" : ""), world, body_collectives);
        end_ranks(world, NOBODY);
        end_case();
    }
    start_ranks("communication under a computation", 2, body_overlap);
    end_ranks(2, NOBODY);
    end_case();
}

static void (*const lanes[][3])(void) = {
    {test_launch, test_worlds},
    {test_absent, test_few_files, test_late_in_rendezvous},
    {test_strangers, test_spawn},
    {test_rendezvous, test_kills},
    {test_kill_in_rendezvous},
    {test_stop_in_rendezvous},
    {test_stop_between},
    {test_stop_inside, test_calls},
    {test_idle, test_extended_timeout},
    {test_no_failure, test_abort},
};

// What the processes of a lane have in common.
static void share_reports(void) {
    size_t bytes = (RANKS_MAX + 2) * sizeof(Report) + RANKS_MAX * sizeof(pid_t);
    void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "shared memory");
    reports = (Report*)memory;
    self = &reports[RANKS_MAX];
    fault_ms = &reports[RANKS_MAX + 1].ended_ms;
    forked = (pid_t*)&reports[RANKS_MAX + 2];
}

static void run_lanes(void) {
    pid_t processes[COUNT_OF(lanes)];
    for (size_t i = 0; i < COUNT_OF(lanes); i++) {
        processes[i] = fork();
        need(processes[i] >= 0, "a process");
        if (processes[i] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        share_reports();
        for (size_t k = 0; k < COUNT_OF(lanes[i]) && lanes[i][k]; k++) lanes[i][k]();
        exit(0);
    }
    double deadline = now_ms() + LANE_MS;
    for (size_t i = 0; i < COUNT_OF(lanes); i++) {
        int status = 0;
        while (waitpid(processes[i], &status, WNOHANG) == 0) {
            if (now_ms() > deadline) kill(processes[i], SIGKILL);  // its ranks end with it
            sleep_ms(1);
        }
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "lane %zu", i);
    }
    verdict("all lanes of the tests come to their ends");
}

// As one of the ranks of a launcher: the collectives; rank 0 prints what all ranks found.
static int run_launched(const Launch* launch) {
    Comm comm;
    Error error;
    snprintf(case_name, sizeof case_name, "%s", launch->launcher);
    need(launch->world <= RANKS_MAX, "%zu ranks; start it with at most %zu", launch->world, RANKS_MAX);
    need(comm_open(&comm, launch, LONG_MS, &error), "%s", error.text);
    test_all(&comm);
    test_overlap(&comm);
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
    Flag flags[] = {{"timeout", FLAG_REAL, &timeout_ms, "MS", 100, 60000,
                     "timeout of the cases in which something is to fail", false}};
    tests_begin("test_comm");
    if (!flags_parse(flags, 1, argc, argv, &error)) {
        printf("test_comm: %s\n0 passed, 1 failed\n", error.text);
        return 2;
    }
    share_reports();
    if (launch_find(&launch, &error) && strcmp(launch.launcher, "none") != 0) return run_launched(&launch);
    environment_clear();
    run_lanes();
    return tests_end();
}
