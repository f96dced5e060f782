// ladder.h: what the ladder programs, dev/gelu.cu and so on, share: one operation of the CUDA backend in several
// versions (rungs), from the naive one to the one that is shipped, each checked against the CPU operation and timed.
//
//   1. arrays     on the device, with a twin on the host for the CPU operation
//   2. check      of a rung's outputs against the twins
//   3. timing
//   4. peaks      what the GPU can do: bytes, float arithmetic, tensor cores
//   5. program    flags, ladders, rungs, end
//
//     FLAGS="-std=c++20 -O3 -arch=native -I. -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/gelu.cu -o build/gelu -lcublasLt         every ladder is built so; --help lists its flags
//
// A ladder program is its kernels, its arrays and its rungs, which are functions without arguments; global_norm.cu is a
// short one. In this order:
//
// ladder_open      the program's flags; sizes have a default for a GPU and one for the emulator: ladder_size
// ladder_begin     a ladder; a program may have several
// ladder_input     random normal numbers times a scale; call ladder_update after changing the twin
// ladder_output    NaN before each rung
// ladder_added     random numbers before each rung, for what is added to or worked on in place
// ladder_scratch   memory for the rungs that is not checked; for scratch that operations take from the stream, use
//                  ladder_give_scratch
// ladder_work      the minimum of work for any rung, and LADDER_OPERATION(operation, arguments...), which is also
//                  the rung "shipped"
// ladder_rung      a name and a function, which calls kernels: ladder_launch, or <<< >>>
// ladder_end       the exit status
//
// An output element is right if
//
//     |rung - CPU| <= 2 (epsilon |CPU| + FLOATX_EPSILON rounded + 4 sqrt(length) 2^-24 (size + |CPU| + |start|)) + tiny
//
// which is twice the bound of test_kernels.c, since both may be off the true value: epsilon is the rounding error of
// the element's type, length the terms of the longest sum behind it, size the sum of their absolute values; `rounded`
// is the same sum over intermediate values rounded to floatX; tiny allows for the type's subnormals. A LadderBound is
// {length, size, rounded}. Integers must be equal. A NaN is wrong, even where the CPU has one.
//
// Timing: the median of --rounds runs, each after a sweep through a buffer larger than the L2 cache, so that the
// operands come from memory; between two events in the stream, after warm-up. Arrays that are added to grow meanwhile,
// which does not change a rung's speed. --json prints one object per rung on a line of its own. --rounds 0 checks and
// times nothing. The last line is `N passed, N failed`.
//
// With EMULATE_COUNT=FILE build/emulated-count-BF16-ladders NAME, it counts the sectors of global memory and the
// wavefronts of shared memory that a rung takes, and the ideal for its requests (dev/emulator/count.h).

#ifndef LLMTRAIN_LADDER_H
#define LLMTRAIN_LADDER_H

#include "kernels.cuh"
#include "llmtrain/base/device.cuh"
#include "llmtrain/base/flags.h"

// What a std::vector holds has a tag (typedef struct Flag {...} Flag): nvcc 13.0 stops at unnamed structs in C++20.
#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

// What bounds the operation. Matmuls run on the tensor cores if these have the type, otherwise on the float units.
typedef enum { LADDER_BYTES, LADDER_FLOAT_FLOPS, LADDER_MATMUL_FLOPS } LadderWork;
typedef enum { LADDER_INPUT, LADDER_OUTPUT, LADDER_ADDED } LadderRole;
typedef std::function<void()> LadderRun;

typedef struct {
    double length, size, rounded;
} LadderBound;

typedef struct LadderArray {
    const char* name;
    LadderRole role;
    LadderBound bound;
    size_t n, bytes, pool;        // pool: ladder_write
    void *device, *twin, *start;  // start: what ADDED begins with
    bool (*compare)(const struct LadderArray* a, const char* rung);
} LadderArray;

static struct {
    Stream stream;
    std::vector<LadderArray> arrays;
    std::vector<void*> scratch;
    bool on_cpu;                // what LADDER_OPERATION calls
    const char* title;
    LadderWork work;
    double amount;              // bytes or flops of one run
    double peaks[3];            // per second, by LadderWork
    double peak_mma, peak_product;  // two measurements of the tensor cores; 0 without any
    uint64_t rounds;
    bool json, check;
    const char* rung;           // the only one to run; NULL: all
    cudaDeviceProp device;
    std::string flags;          // as given
    void* sweep;                // larger than the L2 cache
    size_t sweep_bytes;
    int rungs, passed, failed;
} ladder;

static inline void ladder_give_up(const char* what) {
    fprintf(stderr, "ladder: %s\n", what);
    exit(1);
}

// A size for a GPU, and one that the emulator finishes in a second.
static inline uint64_t ladder_size(uint64_t on_gpu, uint64_t emulated) {
#ifdef EMULATED
    return (void)on_gpu, emulated;
#else
    return (void)emulated, on_gpu;
#endif
}

// ------------------------------------------------------------------------------------------------
// 1. Arrays

// An array of T: floatX, float, double or an integer. It converts to its device pointer or, for the CPU operation, to
// its twin's. Initialized with {} it is NULL.
template <typename T>
struct LadderPointer {
    T *device, *twin;
    operator T*() const { return ladder.on_cpu ? twin : device; }
};

static inline void* ladder_memory(size_t bytes) {
    Error error;
    void* memory = device_allocate(max_size(bytes, 1), ladder.stream, &error);
    if (memory == NULL) ladder_give_up("out of device memory; give smaller shapes");
    return memory;
}

// Zeros. With --check off hardly any of it is used, and no page of what calloc returns exists before it is.
static inline void* ladder_host_memory(size_t bytes) {
    return ladder.check ? memory_allocate(bytes) : calloc(max_size(bytes, 1), 1);
}

template <typename T>
static inline double ladder_number(T x) {
    if constexpr (std::is_same_v<T, floatX>) return (double)float_of(x);
    else return (double)x;
}

template <typename T>
static inline T ladder_element(double x) {
    if constexpr (std::is_same_v<T, floatX>) return floatX_of((float)x);
    else return (T)x;
}

// With --check off, large arrays of floats repeat this many random numbers, a prime, so that rows differ: the host would
// take minutes to draw as many as the largest matmuls have.
static inline size_t ladder_pool(void) { return (size_t)ladder_size(1048573, 997); }

// The array = `from`, of which it repeats the first `pool` bytes if that is not 0.
static inline void ladder_write(const LadderArray& a, const void* from) {
    size_t bytes = a.pool ? a.pool : a.bytes;
    device_upload(a.device, from, bytes, ladder.stream);
    for (size_t done = bytes; done < a.bytes; done += bytes)
        device_copy((char*)a.device + done, a.device, min_size(bytes, a.bytes - done), ladder.stream);
}

// Copies the twin's current values to the array for all later rungs; call it before ladder_work.
template <typename T>
static inline void ladder_update(LadderPointer<T> pointer) {
    for (LadderArray& a : ladder.arrays) {
        if (a.device != pointer.device) continue;
        if (a.start) memcpy(a.start, a.twin, a.bytes);
        a.pool = 0;
        ladder_write(a, a.twin);
    }
}

template <typename T>
static bool ladder_compare(const LadderArray* a, const char* rung);  // section 2

template <typename T>
static inline LadderPointer<T> ladder_array(const char* name, LadderRole role, size_t n, double scale,
                                            LadderBound bound) {
    size_t drawn = role == LADDER_OUTPUT ? 0 : n;
    if (!ladder.check && !std::is_integral_v<T>) drawn = min_size(drawn, ladder_pool());
    LadderArray a = {name, role, bound, n, n * sizeof(T), drawn < n ? drawn * sizeof(T) : 0, NULL, NULL, NULL,
                     ladder_compare<T>};
    a.device = ladder_memory(a.bytes);
    a.twin = ladder_host_memory(a.bytes);
    a.start = role == LADDER_ADDED ? ladder_host_memory(a.bytes) : NULL;
    if (a.twin == NULL || (role == LADDER_ADDED && a.start == NULL))
        ladder_give_up("out of memory for the arrays; give smaller shapes");
    ladder.arrays.push_back(a);
    const size_t number = ladder.arrays.size();
    LadderPointer<T> pointer = {(T*)a.device, (T*)a.twin};
    #pragma omp parallel for
    for (size_t i = 0; i < drawn; i++) {
        double x = std::is_integral_v<T> ? (double)random_uniform(1, RANDOM_TEST, number, i)
                                         : (double)random_normal(1, RANDOM_TEST, number, i);
        pointer.twin[i] = ladder_element<T>(scale * x);
    }
    if (a.start) memcpy(a.start, a.twin, drawn * sizeof(T));
    if (role != LADDER_OUTPUT) ladder_write(a, a.twin);
    return pointer;
}

// For integers: uniform in [0, scale).
template <typename T>
static inline LadderPointer<T> ladder_input(const char* name, size_t n, double scale) {
    return ladder_array<T>(name, LADDER_INPUT, n, scale, {0, 0, 0});
}

template <typename T>
static inline LadderPointer<T> ladder_output(const char* name, size_t n, LadderBound bound) {
    return ladder_array<T>(name, LADDER_OUTPUT, n, 0.0, bound);
}

template <typename T>
static inline LadderPointer<T> ladder_added(const char* name, size_t n, double scale, LadderBound bound) {
    return ladder_array<T>(name, LADDER_ADDED, n, scale, bound);
}

// A sum of n numbers of random sign and size about 1 stays below 5 sqrt(n) throughout.
static inline LadderBound ladder_random_sum(size_t n) { return {(double)n, 5.0 * sqrt((double)n), 0.0}; }

static inline void* ladder_scratch(size_t bytes) {
    ladder.scratch.push_back(ladder_memory(bytes));
    return ladder.scratch.back();
}

// For device_scratch: the maximum over the ladder's operations.
static inline void ladder_give_scratch(size_t bytes) {
    ladder.stream->scratch = ladder_scratch(bytes);
    ladder.stream->scratch_bytes = bytes;
}

// ------------------------------------------------------------------------------------------------
// 2. Check

// Compares an output with its twin; prints the element whose error is the largest part of its bound.
template <typename T>
static bool ladder_compare(const LadderArray* a, const char* rung) {
    const bool halves = sizeof(T) == 2;
    const double epsilon = halves ? (double)FLOATX_EPSILON : sizeof(T) == sizeof(float) ? 0x1p-24 : 0x1p-53;
    const double tiny = halves && FLOATX_DTYPE == DTYPE_F16 ? 0x1p-24 : 0x1p-124;  // the smallest number of binary16
    const T *expected = (const T*)a->twin, *start = (const T*)a->start;
    T* got = (T*)memory_allocate(a->bytes);
    size_t wrong = 0, first = a->n;
    double worst = 0.0;
    if (got == NULL) ladder_give_up("out of memory for a rung's outputs; give smaller shapes");
    device_download(got, a->device, a->bytes, ladder.stream);
    #pragma omp parallel for reduction(+ : wrong) reduction(min : first) reduction(max : worst)
    for (size_t i = 0; i < a->n; i++) {
        double wanted = ladder_number(expected[i]), size = fabs(wanted), error = fabs(ladder_number(got[i]) - wanted);
        double sums = a->bound.size + size + (start ? fabs(ladder_number(start[i])) : 0.0);
        double stored = epsilon * size + (double)FLOATX_EPSILON * a->bound.rounded;
        double bound = 2.0 * (stored + 4.0 * sqrt(a->bound.length) * 0x1p-24 * sums) + tiny;
        bool right = std::is_integral_v<T> ? memcmp(&got[i], &expected[i], sizeof(T)) == 0 : error <= bound;
        worst = fmax(worst, isnan(error) ? INFINITY : error / bound);
        wrong += !right;
        if (!right && i < first) first = i;
    }
    bool ok = wrong == 0 && a->n > 0;
    (ok ? ladder.passed : ladder.failed)++;
    if (!ladder.json || !ok)
        printf("%s  %-24s %-12s %s  largest error: %.2g of its bound\n", ok ? "ok    " : "FAILED", rung, a->name,
               FLOATX_NAME, worst);
    if (wrong > 0)
        printf("        %zu of %zu elements are wrong; the first is number %zu: %g, on the CPU %g\n", wrong, a->n,
               first, ladder_number(got[first]), ladder_number(expected[first]));
    free(got);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Timing

static inline void ladder_run(const LadderRun& run) {
    run();
    LAUNCH_CHECK();
}

// A kernel whose i-th thread computes the i-th of n elements: flat_index(1).
template <typename... Parameters, typename... Arguments>
static inline void ladder_launch(void (*kernel)(Parameters...), size_t n, Arguments... arguments) {
    kernel<<<flat_blocks(n, 1), FLAT_THREADS, 0, ladder.stream->compute>>>(arguments...);
}

// Reads n and leaves the cache full of it: clean lines, which need no write-back while the next rung is timed.
static __global__ void ladder_read(uint4* in, size_t n) {
    unsigned any = 0;
    for (size_t i = flat_index(1); i < n; i += (size_t)gridDim.x * blockDim.x) any |= in[i].x;
    if (any) in[0].y = 1;  // never: the buffer is zero, but the compiler does not know it
}

// Milliseconds of one run: the median and the minimum of the rounds; NaN without rounds.
static inline double ladder_time(const LadderRun& run, double* minimum) {
    enum { WARM_UP = 2 };
    std::vector<float> ms(ladder.rounds);
    cudaEvent_t began, ended;
    *minimum = NAN;
    if (ladder.rounds == 0) return NAN;
    CUDA_CHECK(cudaEventCreate(&began));
    CUDA_CHECK(cudaEventCreate(&ended));
    for (int i = 0; i < WARM_UP; i++) ladder_run(run);
    for (float& round : ms) {
        ladder_read<<<(unsigned)(ladder.stream->processors * 8), 512, 0, ladder.stream->compute>>>(
            (uint4*)ladder.sweep, ladder.sweep_bytes / 16);
        CUDA_CHECK(cudaEventRecord(began, ladder.stream->compute));
        ladder_run(run);
        CUDA_CHECK(cudaEventRecord(ended, ladder.stream->compute));
        CUDA_CHECK(cudaEventSynchronize(ended));
        CUDA_CHECK(cudaEventElapsedTime(&round, began, ended));
    }
    CUDA_CHECK(cudaEventDestroy(began));
    CUDA_CHECK(cudaEventDestroy(ended));
    std::sort(ms.begin(), ms.end());
    *minimum = (double)ms[0];
    return (double)ms[ms.size() / 2];
}

// ------------------------------------------------------------------------------------------------
// 4. Peaks

constexpr int PEAK_THREADS = 256, PEAK_FMA_TURNS = 4096, PEAK_FMA_SUMS = 16, PEAK_MMA_TURNS = 2048, PEAK_MMA_SUMS = 8;

// out (n) = in (n), 16 bytes per thread at a time: the peak rate of memory for reading and writing.
static __global__ void ladder_copy(uint4* out, const uint4* in, size_t n) {
    for (size_t i = flat_index(1); i < n; i += (size_t)gridDim.x * blockDim.x) out[i] = in[i];
}

// Multiplications and additions of floats in registers alone, with enough accumulators to hide their latency.
static __global__ void ladder_fma(float* out, float half) {
    float sums[PEAK_FMA_SUMS], total = 0.0f;
    #pragma unroll
    for (int i = 0; i < PEAK_FMA_SUMS; i++) sums[i] = (float)threadIdx.x;
    for (int turn = 0; turn < PEAK_FMA_TURNS; turn++) {
        #pragma unroll
        for (int i = 0; i < PEAK_FMA_SUMS; i++) sums[i] = sums[i] * half + half;
    }
    #pragma unroll
    for (int i = 0; i < PEAK_FMA_SUMS; i++) total += sums[i];
    if (total == -1.0f) out[0] = total;  // never
}

#if !FLOATX_IS_FLOAT
// Two operands of either 16-bit type, of random signs and sizes: zeros would draw less power and raise the clocks.
static __device__ inline uint32_t ladder_factors(uint64_t i) {
    return 0x3f003f00u ^ (random4(1, RANDOM_TEST, i, threadIdx.x).bits[0] & 0x80ff80ffu);
}

// The same with 16 x 8 x 16 matmuls on the tensor cores, by the mma.sync that all of them have since Ampere.
static __global__ void ladder_mma(float* out) {
    float sums[PEAK_MMA_SUMS][4], total = 0.0f;
    const uint32_t rows[4] = {ladder_factors(0), ladder_factors(1), ladder_factors(2), ladder_factors(3)};
    const uint32_t columns[2] = {ladder_factors(4), ladder_factors(5)};
    #pragma unroll
    for (int i = 0; i < 4 * PEAK_MMA_SUMS; i++) sums[i / 4][i % 4] = (float)i;  // equal sums would be computed once
    for (int turn = 0; turn < PEAK_MMA_TURNS; turn++) {
        #pragma unroll
        for (int i = 0; i < PEAK_MMA_SUMS; i++) multiply_add(sums[i], rows, columns[0], columns[1]);
    }
    #pragma unroll
    for (int i = 0; i < PEAK_MMA_SUMS; i++) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    if (total == -1.0f) out[0] = total;  // never
}

// x (n) = numbers between -1 and 1: zeros would draw less power than real operands and raise the clocks.
static __global__ void ladder_fill(floatX* x, size_t n) {
    size_t i = flat_index(1);
    if (i < n) x[i] = floatX_of((float)(int32_t)random4(1, RANDOM_TEST, 0, i).bits[0] * 0x1p-31f);
}
#endif

// Amount per second, of one run.
static inline double ladder_rate(double amount, const LadderRun& run) {
    double minimum;
    return 1e3 * amount / ladder_time(run, &minimum);
}

static inline void ladder_measure_peaks(void) {
    size_t n = ladder.sweep_bytes / 32;
    uint4* sweep = (uint4*)ladder.sweep;
    unsigned blocks = (unsigned)(ladder.stream->processors * 16);
    double threads = (double)blocks * PEAK_THREADS;
    ladder.peaks[LADDER_BYTES] = ladder_rate(32.0 * (double)n, [&] {
        ladder_copy<<<blocks, 512, 0, ladder.stream->compute>>>(sweep + n, sweep, n);
    });
    ladder.peaks[LADDER_FLOAT_FLOPS] = ladder_rate(2.0 * threads * PEAK_FMA_TURNS * PEAK_FMA_SUMS, [&] {
        ladder_fma<<<blocks, PEAK_THREADS, 0, ladder.stream->compute>>>((float*)sweep, 0.5f);
    });
    ladder.peaks[LADDER_MATMUL_FLOPS] = ladder.peaks[LADDER_FLOAT_FLOPS];
#if !FLOATX_IS_FLOAT
    double product = 2.0 * 16 * 8 * 16;
    ladder.peak_mma = ladder_rate(threads / WARP * PEAK_MMA_TURNS * PEAK_MMA_SUMS * product, [&] {
        ladder_mma<<<blocks, PEAK_THREADS, 0, ladder.stream->compute>>>((float*)sweep);
    });
    ladder.peaks[LADDER_MATMUL_FLOPS] = ladder.peak_mma;
#endif
    if (!ladder.json)
        printf("peaks: %.0f GB/s by a copy, %.1f TFLOP/s of float, %.1f TFLOP/s of %s products\n",
               1e-9 * ladder.peaks[LADDER_BYTES], 1e-12 * ladder.peaks[LADDER_FLOAT_FLOPS],
               1e-12 * ladder.peaks[LADDER_MATMUL_FLOPS], FLOATX_NAME);
}

// Also measures a large cuBLASLt matmul. On Hopper and later its instructions are faster than the loop of mma.sync; the
// larger of the two rates is the peak.
static inline void ladder_measure_matmul(void) {
#if !FLOATX_IS_FLOAT
    const size_t n = 8192, count = n * n;
    struct Device* stream = ladder.stream;
    void *memory = ladder_memory(3 * count * sizeof(floatX)), *scratch = stream->scratch;
    floatX *in = (floatX*)memory, *weight = in + count, *out = weight + count;
    size_t scratch_bytes = stream->scratch_bytes;
    stream->scratch_bytes = matmul_scratch_bytes();
    stream->scratch = ladder_memory(stream->scratch_bytes);
    ladder_launch(ladder_fill, 2 * count, in, 2 * count);
    ladder.peak_product = ladder_rate(2.0 * (double)count * (double)n, [&] {
        matmul_forward(out, in, weight, NULL, n, n, n, stream);
    });
    CUDA_CHECK(cudaFree(stream->scratch));
    CUDA_CHECK(cudaFree(memory));
    stream->scratch = scratch, stream->scratch_bytes = scratch_bytes;
    ladder.peaks[LADDER_MATMUL_FLOPS] = fmax(ladder.peak_mma, ladder.peak_product);
    if (!ladder.json)
        printf("peaks of tensor cores: %.1f TFLOP/s by mma.sync, %.1f TFLOP/s by cuBLASLt; the larger is the peak\n",
               1e-12 * ladder.peak_mma, 1e-12 * ladder.peak_product);
#endif
}

// ------------------------------------------------------------------------------------------------
// 5. Program

// A rung: an operation of the CUDA backend; while ladder_work computes the expected outputs, the CPU's.
#define LADDER_OPERATION(operation, ...) \
    [&] { \
        if (ladder.on_cpu) cpu::operation(__VA_ARGS__, NULL); \
        else ::operation(__VA_ARGS__, ladder.stream); \
    }

// Reads the program's own flags and the common ones, opens the device and measures the peaks.
static inline void ladder_open(int argc, char** argv, std::vector<Flag> flags) {
    const Flag common[] = {
        {"rounds", KIND_COUNT, &ladder.rounds, "R", 0, 1000, "times that each rung is timed", 0},
        {"rung", KIND_TEXT, &ladder.rung, "NAME", 0, 0, "this rung alone", 0},
        {"check", KIND_SWITCH, &ladder.check, "", 0, 0, "compare with the CPU, which takes long for large shapes", 0},
        {"json", KIND_SWITCH, &ladder.json, "", 0, 0, "one JSON object per rung, on a line of its own", 0},
    };
    int code, device = 0;
    Error error;
    ladder.rounds = 50;
    ladder.check = true;
    flags.insert(flags.end(), std::begin(common), std::end(common));
    Flags table = flags_of(flags.data(), flags.size());
    if (!flags_begin(&code, "ladder", NULL, &table, argc, argv)) exit(code);
    for (int i = 1; i < argc; i++) ladder.flags += std::string(i > 1 ? " " : "") + argv[i];
    if (!device_open(&ladder.stream, false, &error)) ladder_give_up(error.text);
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&ladder.device, device));
#ifdef EMULATED
    ladder.rounds = 0;
    if (!ladder.json) printf("no speeds: the kernels are emulated on the CPU, which says nothing about a GPU\n");
#endif
    if (ladder.rounds == 0) return;
    ladder.sweep_bytes = max_size(4 * (size_t)ladder.device.l2CacheSize, (size_t)256 << 20);
    ladder.sweep = ladder_memory(ladder.sweep_bytes);
    ladder_measure_peaks();
}

// Frees what the previous ladder left, except for the counts.
static inline void ladder_clear(void) {
    for (LadderArray& a : ladder.arrays) {
        CUDA_CHECK(cudaFree(a.device));
        free(a.twin);
        free(a.start);
    }
    for (void* memory : ladder.scratch) CUDA_CHECK(cudaFree(memory));
    ladder.arrays.clear();
    ladder.scratch.clear();
    ladder.stream->scratch = NULL;
    ladder.stream->scratch_bytes = 0;
}

// One ladder: an operation.
static inline void ladder_begin(const char* title) {
    ladder_clear();
    ladder.title = title;
    if (!ladder.json) printf("%s   [%s, %s]\n", title, ladder.device.name, FLOATX_NAME);
}

// Call it after the arrays and before the rungs: what bounds the operation, how much of it a run needs, and the
// operation itself, whose CPU version computes the expected outputs.
static inline void ladder_work(LadderWork work, double amount, const LadderRun& operation) {
    ladder.work = work;
    ladder.amount = amount;
    ladder.on_cpu = true;
    if (ladder.check) operation();
    ladder.on_cpu = false;
    if (work == LADDER_MATMUL_FLOPS && ladder.rounds > 0 && ladder.peak_product == 0) ladder_measure_matmul();
}

// Whether a rung will run: otherwise whatever only that rung needs can be left out.
static inline bool ladder_wants(const char* rung) { return !ladder.rung || strcmp(ladder.rung, rung) == 0; }

// Memory traffic of the kernels since then; zeros where it is not counted.
typedef struct {
    size_t sectors, sectors_ideal, wavefronts, wavefronts_ideal;
} LadderCounts;

static inline LadderCounts ladder_counts([[maybe_unused]] LadderCounts since) {
    LadderCounts counts = {};
#ifdef EMULATE_RACE
    const emulator::CountTally *global = &emulator::count_totals[0], *shared = &emulator::count_totals[1];
    counts.sectors = (size_t)global->units - since.sectors;
    counts.sectors_ideal = (size_t)global->ideal - since.sectors_ideal;
    counts.wavefronts = (size_t)shared->units - since.wavefronts;
    counts.wavefronts_ideal = (size_t)shared->ideal - since.wavefronts_ideal;
#endif
    return counts;
}

// Runs, checks and times one rung.
static inline void ladder_rung(const char* name, const LadderRun& run) {
    bool ok = true, bytes = ladder.work == LADDER_BYTES;
    size_t outputs = 0;
    if (!ladder_wants(name)) return;
    ladder.rungs++;
    for (const LadderArray& a : ladder.arrays) {
        // NaN in every floating-point type.
        if (a.role == LADDER_OUTPUT) CUDA_CHECK(cudaMemsetAsync(a.device, 0xFF, a.bytes, ladder.stream->compute));
        if (a.role == LADDER_ADDED) ladder_write(a, a.start);
    }
    LadderCounts counts = ladder_counts({});
    ladder_run(run);
    CUDA_CHECK(cudaStreamSynchronize(ladder.stream->compute));
    counts = ladder_counts(counts);
    for (const LadderArray& a : ladder.arrays) {
        if (a.role == LADDER_INPUT) continue;
        outputs++;
        if (ladder.check) ok = a.compare(&a, name) && ok;
    }
    if (outputs == 0) ladder_give_up("the program has no outputs to check");
    double minimum, ms = ladder_time(run, &minimum), rate = 1e3 * ladder.amount / ms, peak = ladder.peaks[ladder.work];
    if (ladder.json) {
        printf("{\"title\": \"%s\", \"flags\": \"%s\", \"device\": \"%s\", \"type\": \"%s\"", ladder.title,
               ladder.flags.c_str(), ladder.device.name, FLOATX_NAME);
        printf(", \"rung\": \"%s\", \"ok\": %s", name, !ladder.check ? "null" : ok ? "true" : "false");
        if (isfinite(ms))
            printf(", \"ms_median\": %.6g, \"ms_min\": %.6g, \"%s\": %.6g, \"peak\": %.6g", ms, minimum,
                   bytes ? "bytes_per_s" : "flops", rate, peak);
        if (isfinite(ms) && ladder.peak_product > 0)
            printf(", \"peak_mma\": %.6g, \"peak_product\": %.6g", ladder.peak_mma, ladder.peak_product);
        if (counts.sectors > 0)
            printf(", \"sectors\": %zu, \"sectors_ideal\": %zu, \"wavefronts\": %zu, \"wavefronts_ideal\": %zu",
                   counts.sectors, counts.sectors_ideal, counts.wavefronts, counts.wavefronts_ideal);
        printf("}\n");
    } else if (counts.sectors > 0) {
        printf("        %-24s %zu sectors, ideal %zu", name, counts.sectors, counts.sectors_ideal);
        if (bytes) printf(" (%.3f MB; the minimum is %.3f)", 32e-6 * (double)counts.sectors, 1e-6 * ladder.amount);
        printf("; %zu wavefronts, ideal %zu\n", counts.wavefronts, counts.wavefronts_ideal);
    } else if (isfinite(ms)) {
        printf("        %-24s %9.4f ms (minimum %.4f)  %8.1f %s  %5.1f%% of peak\n", name, ms, minimum,
               rate * (bytes ? 1e-9 : 1e-12), bytes ? "GB/s" : "TFLOP/s", 100.0 * rate / peak);
    }
    fflush(stdout);
}

// Prints the totals of the program's ladders, and returns its exit status.
static inline int ladder_end(void) {
    ladder_clear();
    CUDA_CHECK(cudaFree(ladder.sweep));
    device_close(ladder.stream);
    if (ladder.rungs == 0) {
        fprintf(stderr, "ladder: there is no rung '%s'; without --rung all are run\n", ladder.rung ? ladder.rung : "");
        return 1;
    }
    printf("%d passed, %d failed\n", ladder.passed, ladder.failed);
    return ladder.failed > 0 || (ladder.check && ladder.passed == 0);
}

#endif  // LLMTRAIN_LADDER_H
