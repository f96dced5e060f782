// test_nccl.cu: the Collectives of nccl.cuh between processes, and the stand-in for NCCL that it runs on here.
//
//     build/test_nccl        in the emulator: everything for the mode set by EMULATE_STREAMS and EMULATE_OTHERS
//     nvcc -std=c++20 -arch=native -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL -I. -Xcompiler -fopenmp dev/emulator/test_nccl.cu
//         -lnccl -o build/test_nccl && build/test_nccl 4        with four GPUs: the collectives, through NCCL itself
//
//   1. cases        a process per rank, forked by launch_fork; what they report
//   2. collectives  each, of each type, of lengths that divide and that do not, against sums in the order of the ranks
//   3. accounts     bytes sent, time waited
//   4. bugs         planted ones, in the mode that must catch them; their correct twins in every mode
//   5. faults       a rank that is killed, stopped or aborts: the others report which one, and nothing hangs
//
// On GPUs a sum may differ by the roundings of world - 1 additions in its type, each at most epsilon/2 of the sum of
// the terms' magnitudes, and by as many in this test's own.

#include "../../llmtrain/ops/gemm.h"
#include "../../llmtrain/ranks/mesh.h"
#include "../../llmtrain/ranks/pipeline.h"
#include "../../llmtrain/ranks/zero.h"
#include "../test/harness.h"

#define PATIENT_MS 60e3   // timeout where nothing should fail
#define FAULT_MS 2000.0   // timeout where something should
#define SLACK_MS 20e3     // allowed for a busy machine; a rank that hangs takes longer
#define CASE_MS 90e3      // after this a case counts as hung

// ------------------------------------------------------------------------------------------------
// 1. Cases

enum { RANKS_MAX = 8 };

typedef struct {
    int checks, wrong;
    bool ended;               // after a fault: it returned
    double ended_ms;
    char text[1024];          // its error message
} Report;

typedef struct {
    Report reports[RANKS_MAX];
    int statuses[RANKS_MAX];  // of the processes, as waitpid gives them
    double fault_ms;          // when the victim's fault was about to happen
} Shared;

typedef struct {
    Launch launch;
    Comm comm;
    Stream stream;
    Collectives collectives;
    Report* report;
    size_t rank, world;
} Rank;

typedef struct {
    size_t world;
    double timeout_ms;
    bool opens;               // also opens the Collectives
    void (*body)(Rank* r);
} Case;

static Shared* shared;
static Program rank_0;        // of the latest case; its ranks write into its pipes
static bool case_planted;     // a bug, not its correct twin
static size_t stopped = LAUNCH_UNKNOWN;  // the rank that will be stopped, if any

// Called by a rank.
static void rank_check(Rank* r, bool good, const char* what) {
    r->report->checks++;
    r->report->wrong += !good;
    if (!good && !case_planted) printf("rank %zu of %zu: %s\n", r->rank, r->world, what);
}

// Called by rank 0: waits for the others, last for a stopped one, which it kills.
static void reap(Rank* r) {
    for (int last = 0; last < 2; last++) {
        for (size_t p = 1; p < r->world; p++) {
            if ((p == stopped) != last) continue;
            pid_t child = r->launch.children[p - 1];
            double deadline = now_ms() + (last ? 0 : FAULT_MS + SLACK_MS);
            while (waitpid(child, &shared->statuses[p], WNOHANG) == 0) {
                if (now_ms() >= deadline) kill(child, SIGKILL);
                sleep_ms(1);
            }
        }
    }
    free(r->launch.children);
}

static void case_process(const void* context) {
    const Case* c = (const Case*)context;
    Rank rank, *r = &rank;
    Error error;
    memset(r, 0, sizeof *r);
    need(launch_fork(&r->launch, c->world, &error), "launch_fork: %s", error.text);
    r->rank = r->launch.rank;
    r->world = c->world;
    r->report = &shared->reports[r->rank];
    need(comm_open(&r->comm, &r->launch, c->timeout_ms, &error), "comm_open: %s", error.text);
#ifndef EMULATED
    need(device_choose(r->rank, &error), "device_choose: %s", error.text);
#endif
    need(device_open(&r->stream, false, &error), "device_open: %s", error.text);
    need(!c->opens || collective_open(&r->collectives, &r->comm.transport, 4, NULL, &error), "collective_open: %s",
         error.text);
    need(comm_barrier(&r->comm, &error), "comm_barrier: %s", error.text);  // no fault before all are connected
    c->body(r);
    collective_close(&r->collectives);
    device_close(r->stream);
    comm_close(&r->comm);
    if (r->rank == 0) reap(r);
    exit(0);
}

// True if it ended by itself. The exit statuses of its processes are in shared->statuses.
static bool case_run(Case c) {
    memset(shared, 0, sizeof *shared);
    program_free(&rank_0);
    program_start(&rank_0, NULL, case_process, &c);
    programs_wait(&rank_0, 1, CASE_MS);
    shared->statuses[0] = rank_0.status;
    return !rank_0.late;
}

static void judge(bool good, const char* name, const char* details) {
    if (check(good, "%-62s %s", name, details)) return;
    program_print(&rank_0, "rank 0");
    print_indented(rank_0.text[0]);
}

// A case in which nothing should fail: counts its ranks' checks.
static void run_good_case(const char* name, size_t world, void (*body)(Rank* r)) {
    bool good = case_run({world, PATIENT_MS, true, body});
    int checks = 0, wrong = 0;
    for (size_t p = 0; p < world; p++) {
        good = good && shared->statuses[p] == 0;
        checks += shared->reports[p].checks;
        wrong += shared->reports[p].wrong;
    }
    count_add(&harness_counts->passed, (unsigned)(checks - wrong));
    judge(good && checks > 0 && wrong == 0, name,
          text_of("%zu rank%s, %d checks, %d failed", world, world > 1 ? "s" : "", checks, wrong));
}

// ------------------------------------------------------------------------------------------------
// 2. Collectives

typedef enum { REDUCES_ALL, SCATTERS, GATHERS, COLLECTIVES } Collective;
static const char* const collective_names[COLLECTIVES] = {"all_reduce", "reduce_scatter", "all_gather"};

// Rounds to the stored type.
static double rounded(Dtype type, float x) {
    uint32_t stored = 0;
    gemm_save(&stored, type, 0, x);
    return (double)gemm_load(&stored, type, 0);
}

// Element i of a rank's vector: in [-1, 1), or for integers anything.
static double value_of(Dtype type, size_t rank, size_t i) {
    return rounded(type, 2 * random_uniform(1, RANDOM_TEST, rank, i) - 1);
}

static int64_t integer_of(size_t rank, size_t i) {
    Random4 r = random4(1, RANDOM_TEST, rank, i);
    return (int64_t)((uint64_t)r.bits[0] << 32 | r.bits[1]);
}

#ifdef EMULATED
static const double ROUNDINGS = 0;  // by which a sum may differ
#else
static const double ROUNDINGS = 1;
#endif

static double epsilon_of(Dtype type) { return type == DTYPE_F32 ? 0x1p-23 : type == DTYPE_BF16 ? 0x1p-7 : 0x1p-10; }

// Whether element i is what it should be.
static bool element_is_right(const Rank* r, const void* data, Collective collective, Dtype type, size_t n,
                             size_t i) {
    size_t owner = 0;
    float sum = 0;
    uint64_t integer = 0;
    double magnitudes = 0;
    while (shard_slice(n, owner, r->world).end <= i) owner++;
    if (collective == SCATTERS && owner != r->rank) return true;
    if (type == DTYPE_I64) {
        for (size_t p = 0; p < r->world; p++) integer += (uint64_t)integer_of(p, i);
        return ((const uint64_t*)data)[i] == (collective == GATHERS ? (uint64_t)integer_of(owner, i) : integer);
    }
    double got = (double)gemm_load(data, type, i);
    if (collective == GATHERS) return got == value_of(type, owner, i);
    for (size_t p = 0; p < r->world; p++) {
        sum += (float)value_of(type, p, i);
        magnitudes += fabs(value_of(type, p, i));
    }
    double bound = ROUNDINGS * (double)(r->world - 1) * epsilon_of(type) * magnitudes;
    return fabs(got - rounded(type, sum)) <= bound;
}

static void fill(void* data, Dtype type, size_t rank, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (type == DTYPE_I64) ((int64_t*)data)[i] = integer_of(rank, i);
        else if (type == DTYPE_U8) ((uint8_t*)data)[i] = (uint8_t)integer_of(rank, i);
        else gemm_save(data, type, i, (float)value_of(type, rank, i));
    }
}

static void start(Rank* r, size_t slot, Collective collective, void* data, size_t n, Dtype type) {
    size_t cuts[16];
    for (size_t p = 0; p <= r->world; p++) cuts[p] = p < r->world ? shard_slice(n, p, r->world).first : n;
    static const CommOperation operations[] = {COMM_ALL_REDUCE, COMM_REDUCE_SCATTER, COMM_ALL_GATHER};
    collective_start(&r->collectives, slot, operations[collective], data, cuts, type, r->stream);
}

static void* device_memory(Rank* r, size_t bytes) {
    Error error;
    void* memory = device_allocate(bytes, r->stream, &error);
    need(memory != NULL, "memory of the device: %s", error.text);
    return memory;
}

// All three in flight at once, in the order of their start; there is no wait between the copy of the data to the
// device, the collective and the copy of the result. Bytes before and behind each vector must not change.
static void collectives_of(Rank* r, Dtype type, size_t n) {
    const size_t guard = 64;
    size_t bytes = n * dtype_bytes(type), total = bytes + 2 * guard;
    char *device[COLLECTIVES], *host[COLLECTIVES];
    for (int c = 0; c < COLLECTIVES; c++) {
        device[c] = (char*)device_memory(r, total);
        host[c] = (char*)host_allocate(total);
        need(host[c] != NULL, "memory of the host");
        memset(host[c], 0x5a, total);
        fill(host[c] + guard, type, r->rank, n);
        CUDA_CHECK(cudaMemcpyAsync(device[c], host[c], total, cudaMemcpyHostToDevice, r->stream->compute));
        start(r, (size_t)c, (Collective)c, device[c] + guard, n, type);
    }
    for (int c = 0; c < COLLECTIVES; c++) {
        collective_wait(&r->collectives, (size_t)c, r->stream);
        CUDA_CHECK(cudaMemcpyAsync(host[c], device[c], total, cudaMemcpyDeviceToHost, r->stream->compute));
    }
    device_wait(r->stream);
    for (int c = 0; c < COLLECTIVES; c++) {
        size_t wrong = 0, spoilt = 0;
        for (size_t i = 0; i < n; i++) wrong += !element_is_right(r, host[c] + guard, (Collective)c, type, n, i);
        for (size_t i = 0; i < guard; i++) spoilt += (host[c][i] != 0x5a) + (host[c][total - 1 - i] != 0x5a);
        rank_check(r, wrong == 0 && spoilt == 0,
                   text_of("%s of %zu elements of type %d: %zu wrong, %zu bytes around them spoilt",
                           collective_names[c], n, (int)type, wrong, spoilt));
        host_free(host[c]);
        device_free(device[c], total);
    }
}

static void collectives(Rank* r) {
    Error error;
    // One unit for one rank and none for the others; even; one unit too many; several pieces of the emulation's memory.
    size_t lengths[] = {8, 8 * r->world, 64 * r->world, 8 * (5 * r->world + 1), 8 * (r->world * 1500 + r->world - 1)};
    for (Dtype type : {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I64})
        for (size_t length : lengths) collectives_of(r, type, length);
    rank_check(r, collective_check(&r->collectives, &error), "all is well at the end");
}

// All to all, a sum, and all to all again, from what the first has brought, which gives each rank its own parts back.
// Bytes before and behind each vector must not change.
static void all_to_all_of(Rank* r, Dtype type, size_t part) {
    enum { OWN, ARRIVED, BACK, VECTORS };
    const size_t guard = 64, n = r->world * part;
    size_t bytes = n * dtype_bytes(type), part_bytes = part * dtype_bytes(type), total = bytes + 2 * guard;
    char *device[VECTORS], *host[VECTORS], *expected = (char*)calloc(1, bytes + 1), *other = (char*)calloc(1, bytes + 1);
    int64_t *sum = (int64_t*)device_memory(r, 64 * sizeof(int64_t)), *sums = (int64_t*)calloc(64, sizeof(int64_t));
    need(expected && other && sums, "memory of the host");
    for (int v = 0; v < VECTORS; v++) {
        device[v] = (char*)device_memory(r, total);
        host[v] = (char*)host_allocate(total);
        need(host[v] != NULL, "memory of the host");
        memset(host[v], 0x5a, total);
        if (v == OWN) fill(host[v] + guard, type, r->rank, n);
        CUDA_CHECK(cudaMemcpyAsync(device[v], host[v], total, cudaMemcpyHostToDevice, r->stream->compute));
    }
    fill(sums, DTYPE_I64, r->rank, 64);
    CUDA_CHECK(cudaMemcpyAsync(sum, sums, 64 * sizeof *sum, cudaMemcpyHostToDevice, r->stream->compute));
    Collectives* w = &r->collectives;
    uint64_t before = collective_bytes_sent(w);
    collective_all_to_all(w, 0, device[ARRIVED] + guard, device[OWN] + guard, n, type, r->stream);
    rank_check(r, collective_bytes_sent(w) - before == (r->world - 1) * part_bytes, "bytes of all_to_all");
    start(r, 1, REDUCES_ALL, sum, 64, DTYPE_I64);
    collective_wait(w, 0, r->stream);
    collective_all_to_all(w, 2, device[BACK] + guard, device[ARRIVED] + guard, n, type, r->stream);
    collective_wait(w, 2, r->stream);
    collective_wait(w, 1, r->stream);
    for (int v = 0; v < VECTORS; v++)
        CUDA_CHECK(cudaMemcpyAsync(host[v], device[v], total, cudaMemcpyDeviceToHost, r->stream->compute));
    CUDA_CHECK(cudaMemcpyAsync(sums, sum, 64 * sizeof *sum, cudaMemcpyDeviceToHost, r->stream->compute));
    device_wait(r->stream);
    for (int v = 0; v < VECTORS; v++) {
        for (size_t p = 0; p < r->world; p++) {
            fill(other, type, v == ARRIVED ? p : r->rank, n);
            memcpy(expected + p * part_bytes, other + (v == ARRIVED ? r->rank : p) * part_bytes, part_bytes);
        }
        size_t spoilt = 0;
        for (size_t i = 0; i < guard; i++) spoilt += (host[v][i] != 0x5a) + (host[v][total - 1 - i] != 0x5a);
        rank_check(r, memcmp(host[v] + guard, expected, bytes) == 0 && spoilt == 0,
                   text_of("all_to_all of parts of %zu elements of type %d: vector %d, %zu bytes around it spoilt", part,
                           (int)type, v, spoilt));
        host_free(host[v]);
        device_free(device[v], total);
    }
    size_t wrong = 0;
    for (size_t i = 0; i < 64; i++) wrong += !element_is_right(r, sums, REDUCES_ALL, DTYPE_I64, 64, i);
    rank_check(r, wrong == 0, "a sum between two all_to_all");
    device_free(sum, 64 * sizeof *sum);
    free(sums);
    free(expected);
    free(other);
}

static void all_to_all(Rank* r) {
    Error error;
    size_t parts[] = {0, 1, 7, 20001};  // the last: several pieces of the emulation's memory
    for (Dtype type : {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I64, DTYPE_U8})
        for (size_t part : parts) all_to_all_of(r, type, part);
    rank_check(r, collective_check(&r->collectives, &error), "all is well at the end");
}

// Rank 0 waits for its device before a host rendezvous, the others only after it. Devices need no host for that.
static void one_waits(Rank* r) {
    enum { COUNT = 1000 };
    float *device = (float*)device_memory(r, COUNT * sizeof(float)), host[COUNT];
    Error error;
    for (int i = 0; i < 3; i++) {
        start(r, 0, REDUCES_ALL, device, COUNT, DTYPE_F32);
        collective_wait(&r->collectives, 0, r->stream);
        if (r->rank == 0) device_download(host, device, sizeof host, r->stream);
        rank_check(r, comm_barrier(&r->comm, &error), "the meeting");
    }
    device_wait(r->stream);
    device_free(device, COUNT * sizeof(float));
}

// Two halves of the ranks: sums over a half, of which each rank has a slice; then over the ranks with the same slice,
// by a second communicator in the same stream. Several are in flight.
static void halves(Rank* r) {
    enum { COUNT = 3, LENGTH = 8 * 11 };
    size_t half = r->world / 2, cuts[RANKS_MAX + 1], parts[RANKS_MAX + 1];
    Mesh* mesh = (Mesh*)calloc(1, sizeof(Mesh));
    Collectives inside, across;
    Error error;
    if (half * 2 != r->world) {
        rank_check(r, true, "no halves");
        free(mesh);
        return;
    }
    const Layout layout = {.shard = half, .pp = 1, .chunks = 1};
    need(mesh && mesh_open(mesh, &r->comm, &layout, false, &error) &&
             collective_open(&inside, &mesh->groups[GROUP_SHARD].transport, COUNT, NULL, &error) &&
             collective_open(&across, &mesh->groups[GROUP_COPIES].transport, COUNT, &inside, &error), "%s", error.text);
    for (size_t p = 0; p <= half; p++) cuts[p] = p < half ? shard_slice(LENGTH, p, half).first : (size_t)LENGTH;
    size_t first = cuts[r->rank % half], n = cuts[r->rank % half + 1] - first;
    for (size_t p = 0; p < 3; p++) parts[p] = p < 2 ? shard_slice(n, p, 2).first : n;
    int64_t* device = (int64_t*)device_memory(r, COUNT * LENGTH * sizeof(int64_t));
    int64_t* host = (int64_t*)host_allocate(COUNT * LENGTH * sizeof(int64_t));
    need(host != NULL, "memory of the host");
    fill(host, DTYPE_I64, r->rank, COUNT * LENGTH);
    CUDA_CHECK(cudaMemcpyAsync(device, host, COUNT * LENGTH * sizeof(int64_t), cudaMemcpyHostToDevice,
                               r->stream->compute));
    for (size_t i = 0; i < COUNT; i++) {
        collective_start(&inside, i, COMM_REDUCE_SCATTER, device + i * LENGTH, cuts, DTYPE_I64, r->stream);
        collective_wait(&inside, i, r->stream);
        collective_start(&across, i, COMM_ALL_REDUCE, device + i * LENGTH + first, parts, DTYPE_I64, r->stream);
    }
    for (size_t i = 0; i < COUNT; i++) collective_wait(&across, i, r->stream);
    CUDA_CHECK(cudaMemcpyAsync(host, device, COUNT * LENGTH * sizeof(int64_t), cudaMemcpyDeviceToHost,
                               r->stream->compute));
    device_wait(r->stream);
    size_t wrong = 0;
    for (size_t i = 0; i < COUNT; i++)
        for (size_t k = 0; k < n; k++) {
            int64_t sum = 0;
            for (size_t p = 0; p < r->world; p++) sum += integer_of(p, i * LENGTH + first + k);
            wrong += host[i * LENGTH + first + k] != sum;
        }
    rank_check(r, wrong == 0 && collective_check(&inside, &error) && collective_check(&across, &error),
               "sums over halves, then over both");
    host_free(host);
    device_free(device, COUNT * LENGTH * sizeof(int64_t));
    collective_close(&across);
    collective_close(&inside);
    mesh_close(mesh);
    free(mesh);
}

// A ring of channels, with messages in both directions. Receives are posted ahead of everything, in an order that
// differs from rank to rank, and kernels of all channels wait for each other. A bug leaves out the wait of `compute` for
// a message, or the wait before a buffer is written again.
typedef enum { RING_RIGHT, RING_READS_EARLY, RING_WRITES_EARLY } RingBug;

static void ring(Rank* r, RingBug bug) {
    enum { ROUNDS = 4, N = 4096 };  // as many messages as the buffers of both ends hold
    Mesh* mesh = (Mesh*)calloc(1, sizeof(Mesh));
    FlatVector* flat = (FlatVector*)calloc(1, sizeof(FlatVector));
    Pipeline p;
    Arena arena;
    Error error;
    memset(&p, 0, sizeof p);
    memset(&arena, 0, sizeof arena);
    const Layout layout = {.pp = r->world, .chunks = 2};
    need(mesh && flat && mesh_open(mesh, &r->comm, &layout, false, &error), "%s", error.text);
    p.pp = flat->pp = r->world;
    p.rank = flat->pp_rank = r->rank;
    p.options.chunks = 2;
    flat->stream = r->stream;
    for (size_t g = 0; g < GROUPS; g++) flat->options.groups[g] = &mesh->groups[g].transport;
    pipeline_layout(&p, N, true, &arena);
    for (size_t g = GROUP_FORWARD_IN; g < GROUPS; g++)
        p.channels[g].buffers = (floatX*)device_memory(r, p.channels[g].room * N * sizeof(floatX));
    need(pipeline_connect(&p, flat, &error), "%s", error.text);
    floatX *values = (floatX*)device_memory(r, N * sizeof(floatX)), host[N];
    for (size_t i = 0; i < 2; i++) {  // the ranks post their receives in different orders
        bool backward = (i + r->rank) % 2 == 1;
        channel_expect(&p.channels[backward ? GROUP_BACKWARD_IN : GROUP_FORWARD_IN], ROUNDS, N, r->stream);
    }
    size_t wrong = 0;
    for (size_t i = 0; i < 2 * ROUNDS; i++) {
        Channel* sends = &p.channels[i % 2 ? GROUP_BACKWARD_OUT : GROUP_FORWARD_OUT];
        for (size_t k = 0; k < N; k++) host[k] = floatX_of((float)(16 * i + 4 * r->rank + k % 4));
        if (bug == RING_WRITES_EARLY && sends->started - sends->finished == sends->room) sends->finished++;
        floatX* message = channel_message(sends, r->stream);
        CUDA_CHECK(cudaMemcpyAsync(message, host, sizeof host, cudaMemcpyHostToDevice, r->stream->compute));
        channel_send(sends, N, r->stream);
    }
    for (size_t i = 0; i < 2 * ROUNDS; i++) {
        size_t from = (r->rank + (i % 2 ? 1 : r->world - 1)) % r->world;
        Channel* receives = &p.channels[i % 2 ? GROUP_BACKWARD_IN : GROUP_FORWARD_IN];
        if (bug == RING_READS_EARLY) {
            device_copy(values, channel_buffer(receives, receives->finished++), sizeof host, r->stream);
            channel_listen(receives, r->stream);
        } else {
            channel_receive(receives, values, r->stream);
        }
        device_download(host, values, sizeof host, r->stream);
        for (size_t k = 0; k < N; k++) wrong += float_of(host[k]) != (float)(16 * i + 4 * from + k % 4);
    }
    rank_check(r, wrong == 0 && collective_check(&flat->groups[GROUP_FORWARD_IN], &error), "messages around a ring");
    uint64_t sent = 0;
    for (size_t g = 0; g < GROUPS; g++) sent += collective_bytes_sent(&flat->groups[g]);
    rank_check(r, sent == 2 * (ROUNDS * N + 1) * sizeof(floatX), "a message is counted where it is sent");
    flat_disconnect(flat);
    device_wait(r->stream);
    rank_check(r, device_failure_hook.call != NULL, "other collectives are open, and still have the hook");
    device_free(values, N * sizeof(floatX));
    for (size_t g = GROUP_FORWARD_IN; g < GROUPS; g++)
        device_free(p.channels[g].buffers, p.channels[g].room * N * sizeof(floatX));
    mesh_close(mesh);
    free(flat);
    free(mesh);
}

static void ring_of_channels(Rank* r) { ring(r, RING_RIGHT); }

// One rank: no communicator is created.
static void alone(Rank* r) {
    Collectives* w = &r->collectives;
    float x = 1, out = 2;
    Error error;
    rank_check(r, w->comm == NULL, "one rank makes nothing");
    for (int c = 0; c < COLLECTIVES; c++) {
        start(r, 0, (Collective)c, &x, 1, DTYPE_F32);
        collective_wait(w, 0, r->stream);
    }
    collective_all_to_all(w, 0, &out, &x, 1, DTYPE_F32, r->stream);
    rank_check(r, x == 1 && out == 2, "one rank leaves memory alone");
    rank_check(r, collective_check(w, &error) && collective_bytes_sent(w) == 0 && collective_waited_ms(w) == 0,
               "one rank has sent nothing and waited for nothing");
}

// ------------------------------------------------------------------------------------------------
// 3. Accounts

static const double delay_ms = 5;
static void CUDART_CB delay_stream(void* unused) { (void)unused, sleep_ms(delay_ms); }

static void accounts(Rank* r) {
    const size_t n = 24 * 8, rounds = 3 * COLLECTIVE_WAITS + 1;  // more than a slot remembers
    Collectives* w = &r->collectives;
    float* device = (float*)device_memory(r, n * sizeof(float));
    uint64_t part = n * sizeof(float) * (r->world - 1) / r->world, sent = 0;
    const struct { Collective collective; uint64_t parts; } rows[] = {{SCATTERS, 1}, {GATHERS, 1}, {REDUCES_ALL, 2}};
    for (size_t slot = 0; slot < 3; slot++) {
        start(r, slot, rows[slot].collective, device, n, DTYPE_F32);
        sent += rows[slot].parts * part;
        rank_check(r, collective_bytes_sent(w) == sent,
                   text_of("bytes of %s", collective_names[rows[slot].collective]));
    }
    for (size_t slot = 0; slot < 3; slot++) collective_wait(w, slot, r->stream);
    device_wait(r->stream);
    collective_waited_ms(w);
    rank_check(r, collective_waited_ms(w) == 0, "what was asked for is told once");

    // Each collective takes this long, and there is no other work meanwhile.
    double began = now_ms();
    for (size_t i = 0; i < rounds; i++) {
        CUDA_CHECK(cudaLaunchHostFunc(w->stream, delay_stream, NULL));
        start(r, 0, REDUCES_ALL, device, n, DTYPE_F32);
        collective_wait(w, 0, r->stream);
    }
    device_wait(r->stream);
    double took = now_ms() - began, waited = collective_waited_ms(w);
    bool stands = true;  // whether `compute` comes to the wait before the collective is done
#ifdef EMULATED
    stands = emulator::modes.delayed_streams && !emulator::modes.others_ahead;
#endif
    rank_check(r, took >= delay_ms * (double)rounds, "the delay for tests");
    rank_check(r, waited <= took, "no more was waited than time went by");
    rank_check(r, !stands || waited >= 0.9 * delay_ms * (double)rounds, "all waits are counted");
    device_free(device, n * sizeof(float));
}

#ifdef EMULATED

static size_t case_number;  // of a bug or a fault: its index in the table

// ------------------------------------------------------------------------------------------------
// 4. Bugs
//
// Each of 2 ranks sums 1 over all, with a planted bug. `now` may be any mode.

enum { LENGTH = 64 };
static const size_t LENGTH_BYTES = LENGTH * sizeof(float);

static void give(Rank* r, float* device, float value) {
    float host[LENGTH];
    for (int i = 0; i < LENGTH; i++) host[i] = value;
    CUDA_CHECK(cudaMemcpyAsync(device, host, LENGTH_BYTES, cudaMemcpyHostToDevice, r->stream->compute));
}

static void sum_begin(Rank* r, float* device) { start(r, 0, REDUCES_ALL, device, LENGTH, DTYPE_F32); }

static void sum_check(Rank* r, const float* device) {
    float host[LENGTH];
    int wrong = 0;
    device_download(host, device, LENGTH_BYTES, r->stream);
    for (int i = 0; i < LENGTH; i++) wrong += !(host[i] == (float)r->world);
    rank_check(r, wrong == 0, "the sum");
}

static void drain(Rank* r) { CUDA_CHECK(cudaStreamSynchronize(r->collectives.stream)); }

// An all_to_all of 2 ranks, by nccl.cuh or by hand with a bug, of all messages or only of those between rank 1 and rank 0.
typedef enum {
    RIGHT, READ_EARLY, OVERWRITTEN, OTHER_PART, OTHER_PEER, NO_SEND, NO_RECEIVE, OTHER_LENGTH, OTHER_TYPE, IN_PLACE
} AllToAllBug;

static ncclResult_t messages(const Rank* r, Collectives* w, float* out, const float* in, AllToAllBug bug) {
    size_t part = LENGTH / r->world;
    ncclGroupStart();
    for (size_t p = 0; p < r->world; p++) {
        bool odd = r->rank == 1 && p == 0;
        const float* from = in + (bug == OTHER_PART ? r->world - 1 - p : p) * part;
        ncclDataType_t type = odd && bug == OTHER_TYPE ? ncclFloat16 : ncclFloat32;
        if (!odd || bug != NO_SEND)
            ncclSend(from, part, ncclFloat32, odd && bug == OTHER_PEER ? 1 : (int)p, w->nccl, w->stream);
        if (!odd || bug != NO_RECEIVE)
            ncclRecv(out + p * part, part - (odd && bug == OTHER_LENGTH), type, (int)p, w->nccl, w->stream);
    }
    return ncclGroupEnd();
}

static void all_to_all_check(Rank* r, float* in, AllToAllBug bug) {
    float *out = (float*)device_memory(r, LENGTH_BYTES), host[LENGTH];
    size_t part = LENGTH / r->world, wrong = 0;
    Collectives* w = &r->collectives;
    for (size_t i = 0; i < LENGTH; i++) host[i] = (float)(LENGTH * r->rank + i);
    CUDA_CHECK(cudaMemcpyAsync(in, host, LENGTH_BYTES, cudaMemcpyHostToDevice, r->stream->compute));
    if (bug <= OVERWRITTEN) {
        collective_all_to_all(w, 0, out, in, LENGTH, DTYPE_F32, r->stream);
    } else {
        device_wait(r->stream);
        pthread_mutex_lock(&w->mutex);
        collective_end(w, 0, messages(r, w, bug == IN_PLACE ? in : out, in, bug), "all_to_all");
    }
    if (bug == OVERWRITTEN) give(r, in, -1);
    if (bug != READ_EARLY) collective_wait(w, 0, r->stream);
    device_download(host, out, LENGTH_BYTES, r->stream);
    for (size_t i = 0; i < LENGTH; i++) wrong += !(host[i] == (float)(LENGTH * (i / part) + r->rank * part + i % part));
    rank_check(r, wrong == 0, "the parts of all ranks");
    drain(r);
    device_free(out, LENGTH_BYTES);
}

// A call of NCCL as the functions of nccl.cuh make it after the event, then its end.
template <class Call>
static void launch(Rank* r, Call call) {
    Collectives* w = &r->collectives;
    pthread_mutex_lock(&w->mutex);
    collective_end(w, 0, call(w), "the launch");
}

static void launch_all_reduce(Rank* r, float* data, size_t count) {
    launch(r, [=](Collectives* w) {
        return ncclAllReduce(data, data, count, ncclFloat32, ncclSum, w->nccl, w->stream);
    });
}

static void finalize(Rank* r) {
    Error error;
    Collectives* w = &r->collectives;
    rank_check(r, collective_complete(w, ncclCommFinalize(w->nccl), "the end", &error), "the end");
}

// Without the Collectives's mutex.
static void* asks_for_ever(void* collectives) {
    ncclResult_t state;
    double began = now_ms();
    while (now_ms() < began + PATIENT_MS / 4) ncclCommGetAsyncError(((Collectives*)collectives)->nccl, &state);
    return NULL;
}

static const struct {
    const char *name, *mode;
    bool diagnosis;           // by a diagnosis; otherwise in the result
    void (*run)(Rank* r, float* device, bool good);
    const char* words;        // that the diagnosis contains
} bugs[] = {
    {"no wait before the result is used", "behind", false, [](Rank* r, float* device, bool good) {
         give(r, device, 1);
         sum_begin(r, device);
         if (good) collective_wait(&r->collectives, 0, r->stream);
         sum_check(r, device);
     }},
    {"no wait for the data", "ahead", false, [](Rank* r, float* device, bool good) {
         give(r, device, 1);
         if (good) sum_begin(r, device);
         else launch_all_reduce(r, device, LENGTH);
         collective_wait(&r->collectives, 0, r->stream);
         sum_check(r, device);
     }},
    // The next gradients are written where the sum is still being computed.
    {"data overwritten under way", "behind", false, [](Rank* r, float* device, bool good) {
         float* copy = (float*)device_memory(r, LENGTH_BYTES);
         give(r, device, 1);
         sum_begin(r, device);
         if (good) collective_wait(&r->collectives, 0, r->stream);
         CUDA_CHECK(cudaMemcpyAsync(copy, device, LENGTH_BYTES, cudaMemcpyDeviceToDevice, r->stream->compute));
         give(r, device, 7);
         collective_wait(&r->collectives, 0, r->stream);
         sum_check(r, copy);
         device_free(copy, LENGTH_BYTES);
     }},
    // The end event is recorded before the kernel is in the stream.
    {"end recorded before the launch", "behind", false, [](Rank* r, float* device, bool good) {
         Collectives* w = &r->collectives;
         Error error;
         give(r, device, 1);
         CUDA_CHECK(cudaEventRecord(w->slots[0].ready, r->stream->compute));
         CUDA_CHECK(cudaStreamWaitEvent(w->stream, w->slots[0].ready, 0));
         pthread_mutex_lock(&w->mutex);
         if (!good) CUDA_CHECK(cudaEventRecord(w->slots[0].done, w->stream));
         ncclResult_t status = ncclAllReduce(device, device, LENGTH, ncclFloat32, ncclSum, w->nccl, w->stream);
         rank_check(r, collective_complete(w, status, "all_reduce", &error), "the launch");
         if (good) CUDA_CHECK(cudaEventRecord(w->slots[0].done, w->stream));
         pthread_mutex_unlock(&w->mutex);
         collective_wait(w, 0, r->stream);
         sum_check(r, device);
         drain(r);
     }},
    {"other counts", "now", true, [](Rank* r, float* device, bool good) {
         give(r, device, 1);
         launch_all_reduce(r, device, good || r->rank == 0 ? LENGTH : LENGTH / 2);
         drain(r);
     }},
    {"other types", "now", true, [](Rank* r, float* device, bool good) {
         start(r, 0, REDUCES_ALL, device, LENGTH, good || r->rank == 0 ? DTYPE_BF16 : DTYPE_F16);
         collective_wait(&r->collectives, 0, r->stream);
         device_wait(r->stream);
     }},
    {"another order", "now", true, [](Rank* r, float* device, bool good) {
         for (int i = 0; i < 2; i++) {
             bool first = good || r->rank == 0 ? i == 0 : i == 1;
             start(r, first ? 0 : 1, first ? GATHERS : SCATTERS, device, LENGTH, DTYPE_F32);
         }
         collective_wait(&r->collectives, 0, r->stream);
         collective_wait(&r->collectives, 1, r->stream);
         device_wait(r->stream);
     }},
    // Uneven slices are a group of reductions, in the order of their roots.
    {"other roots within a group", "now", true, [](Rank* r, float* device, bool good) {
         launch(r, [=](Collectives* w) {
             ncclGroupStart();
             for (int i = 0; i < 2; i++)
                 ncclReduce(device, device, LENGTH, ncclFloat32, ncclSum, good || r->rank == 0 ? i : 1 - i, w->nccl,
                            w->stream);
             return ncclGroupEnd();
         });
         drain(r);
     }},
    {"memory of the host", "now", true, [](Rank* r, float* device, bool good) {
         static float host[LENGTH];
         launch_all_reduce(r, good ? device : host, LENGTH);
         drain(r);
     }},
    {"past the end of the memory", "now", true, [](Rank* r, float* device, bool good) {
         launch_all_reduce(r, device, good ? LENGTH : LENGTH + 1);
         drain(r);
     }},
    {"memory freed before it ran", "behind", true, [](Rank* r, float*, bool good) {
         float* other = (float*)device_memory(r, LENGTH_BYTES);
         launch_all_reduce(r, other, LENGTH);
         if (good) drain(r);
         device_free(other, LENGTH_BYTES);
         drain(r);
     }},
    {"in place, scattered to the wrong place", "now", true, [](Rank* r, float* device, bool good) {
         size_t length = LENGTH / r->world;
         float* to = good ? device + r->rank * length : device + 8;
         launch(r, [=](Collectives* w) {
             return ncclReduceScatter(device, to, length, ncclFloat32, ncclSum, w->nccl, w->stream);
         });
         drain(r);
     }},
    {"in place, gathered from the wrong place", "now", true, [](Rank* r, float* device, bool good) {
         size_t length = LENGTH / r->world;
         const float* own = good ? device + r->rank * length : device + 8;
         launch(r, [=](Collectives* w) {
             return ncclAllGather(own, device, length, ncclFloat32, w->nccl, w->stream);
         });
         drain(r);
     }},
    {"communicator used after the abort", "now", true, [](Rank* r, float*, bool good) {
         Collectives* w = &r->collectives;
         pthread_mutex_lock(&w->mutex);
         ncclComm_t comm = w->nccl;
         w->nccl = NULL;
         ncclResult_t state;
         if (good) ncclCommGetAsyncError(comm, &state);
         ncclCommAbort(comm);
         if (!good) ncclCommGetAsyncError(comm, &state);
         pthread_mutex_unlock(&w->mutex);
     }},
    {"communicator never destroyed", "now", true, [](Rank* r, float*, bool good) {
         pthread_mutex_lock(&r->collectives.mutex);
         if (good) finalize(r);
         if (good) ncclCommDestroy(r->collectives.nccl);
         r->collectives.nccl = NULL;
         pthread_mutex_unlock(&r->collectives.mutex);
     }},
    {"communicator destroyed too early", "behind", true, [](Rank* r, float* device, bool good) {
         give(r, device, 1);
         sum_begin(r, device);
         if (good) drain(r);
         pthread_mutex_lock(&r->collectives.mutex);
         finalize(r);
         pthread_mutex_unlock(&r->collectives.mutex);
     }},
    {"a message read before it has come", "behind", false, [](Rank* r, float*, bool good) {
         ring(r, good ? RING_RIGHT : RING_READS_EARLY);
     }},
    {"a message overwritten before it was sent", "behind", false, [](Rank* r, float*, bool good) {
         ring(r, good ? RING_RIGHT : RING_WRITES_EARLY);
     }},
#define ALL_TO_ALL(bug) [](Rank* r, float* in, bool good) { all_to_all_check(r, in, good ? RIGHT : bug); }
    {"parts read before they have come", "behind", false, ALL_TO_ALL(READ_EARLY)},
    {"parts overwritten before they were sent", "behind", false, ALL_TO_ALL(OVERWRITTEN)},
    {"parts of other ranks", "now", false, ALL_TO_ALL(OTHER_PART)},
    {"a part for another rank", "now", true, ALL_TO_ALL(OTHER_PEER), "has no nccl"},
    {"a receive without its send", "now", true, ALL_TO_ALL(NO_SEND),
     "rank 1 has no ncclSend for it, but ncclRecv of 32 elements of type 7 from rank 0 ("},
    {"a send without its receive", "now", true, ALL_TO_ALL(NO_RECEIVE),
     "rank 1 has no ncclRecv for it, but ncclSend of 32 elements of type 7 to rank 0 ("},
    {"a receive of another length", "now", true, ALL_TO_ALL(OTHER_LENGTH),
     "ncclRecv of 31 elements of type 7 from rank 0 ("},
    {"a receive of another type", "now", true, ALL_TO_ALL(OTHER_TYPE),
     "ncclRecv of 32 elements of type 6 from rank 0 ("},
    {"parts received where others are sent from", "now", true, ALL_TO_ALL(IN_PLACE), "the buffer overlaps that of ncclSend at"},
#undef ALL_TO_ALL
    {"messages where the other rank sums", "now", true, [](Rank* r, float* device, bool good) {
         if (good || r->rank == 0) all_to_all_check(r, device, RIGHT);
         else launch_all_reduce(r, device, LENGTH);
         drain(r);
     }},
    {"two threads at a time", "now", true, [](Rank* r, float* device, bool good) {
         pthread_t threads[2];
         for (int i = 0; i < 2 && !good; i++)
             need(pthread_create(&threads[i], NULL, asks_for_ever, &r->collectives) == 0, "a thread");
         for (int i = 0; i < 2 && !good; i++) pthread_join(threads[i], NULL);
         sum_begin(r, device);
         collective_wait(&r->collectives, 0, r->stream);
         device_wait(r->stream);
     }},
};

static void run_bug(Rank* r) {
    float* device = (float*)device_memory(r, LENGTH_BYTES);
    bugs[case_number].run(r, device, !case_planted);
    device_wait(r->stream);
    collective_close(&r->collectives);
    device_free(device, LENGTH_BYTES);
}

static void test_bugs(void) {
    const char* mode = !emulator::modes.delayed_streams ? "now" : emulator::modes.others_ahead ? "ahead" : "behind";
    for (case_number = 0; case_number < COUNT_OF(bugs); case_number++) {
        const auto& bug = bugs[case_number];
        for (int planted = 0; planted < 2; planted++) {
            case_planted = planted;
            if (planted && strcmp(bug.mode, "now") != 0 && strcmp(bug.mode, mode) != 0) continue;
            bool ended = case_run({2, PATIENT_MS, true, run_bug});
            int diagnoses = 0, zeros = 0, wrong = 0;
            for (size_t p = 0; p < 2; p++) {
                int status = shared->statuses[p];
                diagnoses += WIFEXITED(status) && WEXITSTATUS(status) == emulator::DIAGNOSIS;
                zeros += status == 0;
                wrong += shared->reports[p].wrong > 0;
            }
            bool caught = bug.diagnosis ? diagnoses > 0 : wrong > 0 && diagnoses == 0;
            if (bug.words && planted) caught = caught && strstr(rank_0.text[1], bug.words);
            judge(ended && (planted ? caught : zeros == 2 && wrong == 0),
                  text_of("%s: %s", planted ? "planted bug" : "correct twin", bug.name),
                  text_of("%s, %d diagnoses, %d wrong results", ended ? "ended" : "hangs", diagnoses, wrong));
        }
    }
    case_planted = false;
}

// ------------------------------------------------------------------------------------------------
// 5. Faults
//
// 3 ranks: where the victim fails, and how; what the others must report.

enum { FAULT_RANKS = 3, VICTIM = 1 };
typedef enum { IN_OPEN, AT_FIRST, BEFORE_COLLECTIVE, IN_COLLECTIVE, BEFORE_CLOSE, NOWHERE } Place;
typedef enum { IS_KILLED, STOPS, GIVES_UP, CANNOT_LAUNCH, MEETS_AN_ERROR, IS_LATE } Deed;

static const struct FaultCase {
    const char* name;
    Place place;
    Deed deed;
    const char *heard, *own;  // by the others, and by the victim itself if it survives
    bool all_to_all;          // in place of sums
} faults[] = {
    {"killed while the ranks connect", IN_OPEN, IS_KILLED, "rank 1 is gone", NULL},
    {"stopped while the ranks connect", IN_OPEN, STOPS, "rank 1 has not answered", NULL},
    {"gives up while the ranks connect", IN_OPEN, GIVES_UP, "rank 1 gave up: of itself", NULL},
    {"killed before a collective", BEFORE_COLLECTIVE, IS_KILLED, "rank 1 is gone", NULL},
    {"stopped before a collective", BEFORE_COLLECTIVE, STOPS, "rank 1 has not answered", NULL},
    {"gives up before a collective", BEFORE_COLLECTIVE, GIVES_UP, "rank 1 gave up: of itself", "gave up: of itself"},
    {"killed in the middle of a collective", IN_COLLECTIVE, IS_KILLED, "rank 1 is gone", NULL},
    {"killed in the middle of an all_to_all", IN_COLLECTIVE, IS_KILLED, "rank 1 is gone", NULL, true},
    {"killed before the end of the run", BEFORE_CLOSE, IS_KILLED, "rank 1 is gone", NULL},
    {"stopped before the end of the run", BEFORE_CLOSE, STOPS, "rank 1 has not answered", NULL},
    {"NCCL refuses a collective", NOWHERE, CANNOT_LAUNCH, "rank 1 gave up: NCCL failed in ",
     "unhandled system error"},
    {"NCCL refuses an all_to_all", NOWHERE, CANNOT_LAUNCH, "rank 1 gave up: NCCL failed in all_to_all",
     "unhandled system error", true},
    {"NCCL finds an error by itself", NOWHERE, MEETS_AN_ERROR,
     "rank 1 gave up: NCCL failed in ", "remote process exited or there was a network error; set NCCL_DEBUG=WARN"},
    {"launches its first collective late", AT_FIRST, IS_LATE, "NCCL has not finished all_reduce within 4.0 s",
     "NCCL has not finished all_reduce within 4.0 s"},  // the launch connects the ranks
    {"launches a collective late", NOWHERE, IS_LATE, "a collective between GPUs has not finished for 4.0 s",
     "a collective between GPUs has not finished for 4.0 s"},
};

static void fall(Rank* r, Place place) {
    const FaultCase* f = &faults[case_number];
    if (r->rank != VICTIM || f->place != place) return;
    shared->fault_ms = now_ms();
    if (f->deed == IS_KILLED) raise(SIGKILL);
    if (f->deed == STOPS) raise(SIGSTOP);
    if (f->deed == GIVES_UP) comm_abort(&r->comm, "of itself");
}

static void note_fault(Rank* r, const Error* error) {
    snprintf(r->report->text, sizeof r->report->text, "%s", error->text);
    r->report->ended_ms = now_ms();
    r->report->ended = true;
}

// Several collectives, as in a program; then a check for errors.
static void run_fault(Rank* r) {
    const FaultCase* f = &faults[case_number];
    const size_t n = FAULT_RANKS * 13334;
    bool victim = r->rank == VICTIM;
    Error error;
    error.text[0] = 0;
    if (f->place == IN_OPEN && victim) {
        ncclUniqueId id = {{0}};  // the others already wait for it in NCCL
        comm_broadcast(&r->comm, &id, sizeof id, DTYPE_U8, 0, &error);
        fall(r, IN_OPEN);
        return;
    }
    if (!collective_open(&r->collectives, &r->comm.transport, 2, NULL, &error)) {
        note_fault(r, &error);
        rank_check(r, r->collectives.comm == NULL, "nothing is left to close");
        return;
    }
    float* device = (float*)device_memory(r, 2 * n * sizeof(float));
    for (int i = 0; i < 4; i++) {
        if (i == (f->place == AT_FIRST ? 0 : 2)) {
            fall(r, BEFORE_COLLECTIVE);
            if (victim && f->place == IN_COLLECTIVE) {
                shared->fault_ms = now_ms();
                emulator::nccl_killed_after = 12;
            }
            if (victim && f->deed == CANNOT_LAUNCH) emulator::nccl_next_result = ncclSystemError;
            if (victim && f->deed == MEETS_AN_ERROR) emulator::nccl_async_result = ncclRemoteError;
            if (victim && (f->place == NOWHERE || f->place == AT_FIRST)) shared->fault_ms = now_ms();
            if (victim && f->deed == IS_LATE) sleep_ms(2.5 * FAULT_MS);
        }
        if (f->all_to_all)
            collective_all_to_all(&r->collectives, (size_t)i % 2, device + n, device, n, DTYPE_F32, r->stream);
        else start(r, (size_t)i % 2, REDUCES_ALL, device, n, DTYPE_F32);
        collective_wait(&r->collectives, (size_t)i % 2, r->stream);
        if (i == 1) device_wait(r->stream);
    }
    device_wait(r->stream);
    collective_waited_ms(&r->collectives);
    if (f->place == BEFORE_CLOSE) {
        fall(r, BEFORE_CLOSE);
        collective_close(&r->collectives);
        // It waited for all ranks, so the fault is known.
        if (comm_failed(&r->comm, &error)) note_fault(r, &error);
    } else {
        double deadline = now_ms() + FAULT_MS + SLACK_MS;  // NCCL may find its error after the last collective
        while (collective_check(&r->collectives, &error) && now_ms() < deadline) sleep_ms(1);
        note_fault(r, &error);
        collective_close(&r->collectives);
    }
    device_free(device, 2 * n * sizeof(float));
}

static void test_faults(void) {
    for (case_number = 0; case_number < COUNT_OF(faults); case_number++) {
        const FaultCase* f = &faults[case_number];
        stopped = f->deed == STOPS ? (size_t)VICTIM : LAUNCH_UNKNOWN;
        bool ended = case_run({FAULT_RANKS, FAULT_MS, false, run_fault}), right = ended;
        double latest = 0;
        const char* heard = "";
        for (size_t p = 0; p < FAULT_RANKS; p++) {
            const Report* report = &shared->reports[p];
            const char* wanted = p == VICTIM ? f->own : f->heard;
            if (wanted == NULL) continue;
            int status = shared->statuses[p];
            if (right) heard = text_of("rank %zu (status %d) heard: %s", p, status, report->text);
            right = right && report->ended && report->wrong == 0 && strstr(report->text, wanted) && status == 0;
            latest = fmax(latest, report->ended_ms - shared->fault_ms);
        }
        judge(right && latest <= FAULT_MS + SLACK_MS, text_of("rank 1 %s", f->name),
              text_of("%s after %.1f s: %s", ended ? "ended" : "hangs", latest / 1e3, heard));
    }
}

#endif

int main(int argc, char** argv) {
    size_t least = 2, most = 4;
    char* end = NULL;
    if (argc > 1) least = most = strtoul(argv[1], &end, 10);
    if (argc > 2 || (end && *end != 0) || least < 1 || most > RANKS_MAX) {
        fprintf(stderr, "usage: test_nccl [RANKS]   with 1 to %d ranks, each on a GPU; without it 2, 3 and 4\n",
                RANKS_MAX);
        return 2;
    }
    tests_begin("test_nccl");
    shared = (Shared*)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(shared != MAP_FAILED, "shared memory");
    run_good_case("one rank", 1, alone);
    for (size_t world = max_size(least, 2); world <= most; world++) {
        run_good_case("collectives", world, collectives);
        run_good_case("all_to_all", world, all_to_all);
        run_good_case("two groups of communicators", world, halves);
        run_good_case("a ring of channels", world, ring_of_channels);
        run_good_case("one rank waits for its device, the others for that rank", world, one_waits);
        run_good_case("bytes and times", world, accounts);
    }
#ifdef EMULATED
    if (argc == 1) {
        test_bugs();
        test_faults();
    }
#endif
    program_free(&rank_0);
    return tests_end();
}
