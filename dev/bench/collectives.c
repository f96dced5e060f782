// collectives.c: collectives between ranks of this machine, through shared memory and through sockets.
//
//   cc -std=c11 -O3 -march=native -I. dev/bench/collectives.c -o build/collectives -lm -pthread
//   build/collectives [--ranks 2] [--operation all_reduce] [--type fp32] [--max 64] [--ms 400]
//
// Two groups of all ranks, one of each kind, take turns. For vectors of 1 KB up to --max MB: median and minimum of the
// time that one collective takes on rank 0, and sockets / memory, the median of the ratios of neighboring turns. Each
// length takes --ms, at least 5 turns of each kind; before each turn there is a barrier. Also the processor time of a
// turn, of all ranks together, since what one rank does not need another one, or the computation, may use.

#include "llmtrain/ranks/split.h"
#include "llmtrain/base/flags.h"
#include "dev/test/harness.h"

enum { TURNS_MAX = 2000, MEMORY = 0, SOCKETS = 1 };
static double ms[2][TURNS_MAX], ratios[TURNS_MAX];

static int compare(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
static double median(double* values, size_t n) {
    qsort(values, n, sizeof *values, compare);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// User and system time of this process.
static double processor_ms(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return 1e3 * (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-3 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static double turn(Comm* comm, CommOperation operation, Dtype type, char* out, const char* in, size_t n, double* used) {
    Error error;
    need(comm_barrier(comm, &error), "%s", error.text);
    double used_before = processor_ms(), began = now_ms();
    CommRequest request = comm_start(comm, operation, type, out, in, n, 0, NULL, NULL);
    need(comm_wait(comm, request, &error), "%s", error.text);
    double ended = now_ms();
    *used += processor_ms() - used_before;
    return ended - began;
}

static void measure(Comm* all, Comm kinds[2], CommOperation operation, Dtype type, size_t bytes, double limit_ms) {
    size_t n = bytes / dtype_bytes(type) / all->world * all->world, turns = 0;
    char *out = (char*)memory_allocate(bytes), *in = (char*)memory_allocate(bytes);
    double used[2] = {0, 0}, began = now_ms();
    Error error;
    need(out && in, "memory");
    memset(out, 0, bytes);
    memset(in, 0, bytes);
    for (int64_t more = 1; more && turns < TURNS_MAX; turns += (size_t)more) {
        for (int k = 0; k < 2; k++) ms[k][turns] = turn(&kinds[k], operation, type, out, in, n, &used[k]);
        ratios[turns] = ms[SOCKETS][turns] / ms[MEMORY][turns];
        more = turns < 5 || now_ms() - began < limit_ms;  // as rank 0 says
        need(comm_broadcast(all, &more, 1, DTYPE_I64, 0, &error), "%s", error.text);
        if (!more) turns++;
    }
    double sums[2];
    for (int k = 0; k < 2; k++) {
        int64_t ns = (int64_t)(1e6 * used[k] / (double)turns);
        CommRequest request = comm_start(all, COMM_ALL_REDUCE, DTYPE_I64, &ns, &ns, 1, 0, NULL, NULL);
        need(comm_wait(all, request, &error), "%s", error.text);
        sums[k] = 1e-6 * (double)ns;
    }
    double medians[2] = {median(ms[0], turns), median(ms[1], turns)};
    if (all->rank == 0)
        printf("%8zu KB %5zu   %9.3f %9.3f   %9.3f %9.3f   %8.2f   %9.3f %9.3f\n", bytes >> 10, turns, medians[MEMORY],
               ms[MEMORY][0], medians[SOCKETS], ms[SOCKETS][0], median(ratios, turns), sums[MEMORY], sums[SOCKETS]);
    fflush(stdout);
    free(out);
    free(in);
}

int main(int argc, char** argv) {
    size_t ranks = 2, max_mb = 64;
    double limit_ms = 400;
    const char *operation = "all_reduce", *type = "fp32";
    const Flag rows[] = {{"ranks", KIND_COUNT, &ranks, "N", 2, 64, "ranks", false},
                         {"operation", KIND_TEXT, &operation, "NAME", 0, 0, "all_reduce, all_gather, ...", false},
                         {"type", KIND_TEXT, &type, "NAME", 0, 0, "fp32, bf16, fp16, int64", false},
                         {"max", KIND_COUNT, &max_mb, "MB", 1, 1024, "bytes of the longest vector", false},
                         {"ms", KIND_REAL, &limit_ms, "MS", 1, 1e6, "time for each length", false}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    Launch launch;
    Error error;
    Comm all, kinds[2];
    size_t op = 0, t = 0;
    need(flags_parse(&flags, argc, argv, &error), "%s", error.text);
    while (op < COMM_OPERATIONS && strcmp(COMM_OPERATION_NAMES[op], operation) != 0) op++;
    while (t < DTYPE_COUNT && strcmp(DTYPES[t].name, type) != 0) t++;
    need(op < COMM_OPERATIONS && t < DTYPE_COUNT, "no such operation, or no such type");
    need(launch_fork(&launch, ranks, &error) && comm_open(&all, &launch, 60e3, &error), "%s", error.text);
    for (int k = 0; k < 2; k++) {
        if (k == SOCKETS) setenv("LLMTRAIN_TEST_SOCKETS", "1", 1);
        need(comm_split(&kinds[k], &all, 0, 1, &error), "%s", error.text);
    }
    bool shared = kinds[MEMORY].links[all.rank == 0].rings[0] && !kinds[SOCKETS].links[all.rank == 0].rings[0];
    need(shared, "the ranks share no memory");
    if (all.rank == 0)
        printf("%zu ranks, %s %s, ms\n%11s %5s   %9s %9s   %9s %9s   %8s   %9s %9s\n", ranks, operation, type, "bytes",
               "turns", "memory", "min", "sockets", "min", "s / m", "cpu mem.", "cpu sock.");
    for (size_t bytes = 1024; bytes <= max_mb << 20; bytes *= 4)
        measure(&all, kinds, (CommOperation)op, (Dtype)t, bytes, limit_ms);
    for (int k = 0; k < 2; k++) comm_close(&kinds[k]);
    comm_close(&all);
    return launch_reap(&launch, "collectives", 0, 10e3, &error);
}
