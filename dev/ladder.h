// ladder.h: the frame of the ladder programs, dev/gelu.cu and so on: one operation of the CUDA backend in several
// versions (rungs), from the naive one to the one that is shipped, each checked against the CPU operation and timed.
//
//   1. arrays     on the device, with a twin on the host for the CPU operation
//   2. check      of a rung's outputs against the twins
//   3. peaks      what the GPU can do: bytes, float arithmetic, tensor cores
//   4. timing
//   5. program    flags, beginning, rungs, end
//   6. for rungs  a thread for each number
//
// A ladder program is its shapes, its kernels and its rungs:
//
//     #include "kernels.cuh"
//     #include "ladder.h"
//
//     typedef struct { size_t n; const floatX* in; floatX* out; } Gelu;
//
//     static void run_naive(void* problem, Stream stream) {
//         Gelu* g = (Gelu*)problem;
//         gelu_naive<<<ladder_blocks(g->n), LADDER_THREADS, 0, stream->compute>>>(g->out, g->in, g->n);
//         LAUNCH_CHECK();
//     }
//     static void run_shipped(void* problem, Stream stream) {
//         Gelu* g = (Gelu*)problem;
//         gelu_forward(g->out, g->in, g->n, stream);
//     }
//
//     int main(int argc, char** argv) {
//         uint64_t N = ladder_size(16384, 33), F = ladder_size(3072, 40);      // on a GPU, in the emulator
//         Flag flags[] = {
//             {"rows", FLAG_COUNT, &N, "N", 1, 1e9, "rows: B times T", false},
//             {"ffn", FLAG_COUNT, &F, "F", 1, 1e6, "columns", false},
//         };
//         Ladder l = {};
//         if (!ladder_open(&l, argc, argv, "gelu: out (N, F) = gelu(in (N, F))", flags, 2)) return l.status;
//         size_t n = N * F;
//         Gelu g = {n, ladder_input<floatX>(&l, "in", n, 2.0),
//                   ladder_output<floatX>(&l, "out", n, ladder_bound(8, 4, 0))};
//         if (l.check) cpu::gelu_forward(ladder_twin(&l, g.out), ladder_twin(&l, g.in), n, NULL);
//         ladder_work(&l, LADDER_BYTES, 2.0 * (double)n * sizeof(floatX));     // the minimum that any rung must move
//         ladder_rung(&l, "naive", run_naive, &g);
//         ladder_rung(&l, "shipped", run_shipped, &g);
//         ladder_close(&l);
//         return ladder_result(&l);
//     }
//
// ladder_input     random normal numbers times a scale; the twin may be changed or computed, then: ladder_update
// ladder_output    NaN before each rung
// ladder_added     random numbers before each rung, for what is added to or worked on in place
// ladder_scratch   memory for the rungs that is not looked at
// Operations that take scratch memory from the stream: ladder_give_scratch(&l, gelu_scratch_bytes(...)).
//
// A program of several operations opens and closes one ladder after the other, with the same Ladder: it counts on.
//
// An output element is right if
//
//     |rung - CPU| <= 2 (epsilon |CPU| + FLOATX_EPSILON rounded + 4 sqrt(length) 2^-24 (size + |CPU| + |start|)) + tiny
//
// which is twice the bound of test_kernels.c, since both may be off the true value: epsilon is the rounding error of
// the element's type, length the terms of the longest sum behind it, size the sum of their absolute values; `rounded`
// is the same sum for what is rounded to floatX on the way; tiny is where the type loses places. ladder_bound(length,
// size, rounded). A NaN is wrong, unless the CPU has one too, which is an error of the program.
//
// Timed: the median of --rounds, each after a sweep through a buffer larger than the L2 cache, so that the operands
// come from memory; between two events in the stream, after warm-up. What is added to grows meanwhile; its numbers
// matter to no rung's speed. --json prints one object per rung on a line of its own. --rounds 0 checks and times
// nothing. The last line is `N passed, N failed`.

#ifndef LLMTRAIN_LADDER_H
#define LLMTRAIN_LADDER_H

#include "kernels.cuh"
#include "llmtrain/device.cuh"
#include "llmtrain/flags.h"

#ifndef EMULATED
#include <cublasLt.h>
#endif

typedef enum { LADDER_BYTES, LADDER_FLOAT_FLOPS, LADDER_TENSOR_FLOPS } LadderWork;  // what bounds the operation
typedef enum { LADDER_FLOATX, LADDER_FLOAT, LADDER_DOUBLE, LADDER_INTEGER } LadderType;
typedef enum { LADDER_INPUT, LADDER_OUTPUT, LADDER_ADDED } LadderRole;
typedef void (*LadderRun)(void* problem, Stream stream);

typedef struct {
    double length, size, rounded;
} LadderBound;

typedef struct {
    const char* name;
    LadderType type;
    LadderRole role;
    LadderBound bound;
    size_t n;
    void *device, *twin, *start, *got;  // start: what ADDED begins with
} LadderArray;

enum { LADDER_ARRAYS = 32 };

typedef struct {
    int status;                 // of the program, when ladder_open returns false
    Stream stream;
    LadderArray arrays[LADDER_ARRAYS];
    size_t count;
    void* scratch[LADDER_ARRAYS];
    size_t scratch_count;
    LadderWork work;
    double amount;              // bytes or flops of one run
    double peaks[3];            // per second, by LadderWork
    double peak_mma, peak_product;  // two measurements of what tensor cores do; 0 where there is none
    uint64_t rounds;
    bool json, check;
    const char* rung;           // the only one to run; NULL: all
    char device[256], flags[256];  // flags: as they were given
    const char* title;
    void* sweep;                // larger than the L2 cache
    size_t sweep_bytes;
    cudaEvent_t began, ended;
    int rungs, passed, failed;
} Ladder;

static inline void ladder_give_up(const char* what) {
    fprintf(stderr, "ladder: %s\n", what);
    exit(1);
}

// A size on a GPU, and one that the emulator does in a second.
static inline uint64_t ladder_size(uint64_t on_gpu, uint64_t emulated) {
#ifdef EMULATED
    (void)on_gpu;
    return emulated;
#else
    (void)emulated;
    return on_gpu;
#endif
}

// ------------------------------------------------------------------------------------------------
// 1. Arrays

static inline size_t ladder_type_bytes(LadderType type) {
    return type == LADDER_FLOATX ? sizeof(floatX) : type == LADDER_DOUBLE ? sizeof(double) : 4;
}

#if !FLOATX_IS_FLOAT
static inline LadderType ladder_type_of(const floatX*) { return LADDER_FLOATX; }
#endif
static inline LadderType ladder_type_of(const float*) { return LADDER_FLOAT; }
static inline LadderType ladder_type_of(const double*) { return LADDER_DOUBLE; }
static inline LadderType ladder_type_of(const int32_t*) { return LADDER_INTEGER; }

static inline double ladder_get(LadderType type, const void* data, size_t i) {
    if (type == LADDER_FLOATX) return (double)float_of(((const floatX*)data)[i]);
    if (type == LADDER_FLOAT) return (double)((const float*)data)[i];
    if (type == LADDER_DOUBLE) return ((const double*)data)[i];
    return (double)((const int32_t*)data)[i];
}

static inline void ladder_set(LadderType type, void* data, size_t i, double x) {
    if (type == LADDER_FLOATX) ((floatX*)data)[i] = floatX_of((float)x);
    else if (type == LADDER_FLOAT) ((float*)data)[i] = (float)x;
    else if (type == LADDER_DOUBLE) ((double*)data)[i] = x;
    else ((int32_t*)data)[i] = (int32_t)x;
}

static inline void* ladder_array(Ladder* l, const char* name, LadderType type, LadderRole role, size_t n, double scale,
                                 LadderBound bound) {
    if (l->count == LADDER_ARRAYS) ladder_give_up("too many arrays: raise LADDER_ARRAYS");
    LadderArray* a = &l->arrays[l->count++];
    size_t bytes = n * ladder_type_bytes(type);
    a->name = name;
    a->type = type;
    a->role = role;
    a->bound = bound;
    a->n = n;
    Error error;
    a->device = device_allocate(bytes ? bytes : 1, l->stream, &error);
    a->twin = allocate(bytes);
    a->start = role == LADDER_ADDED ? allocate(bytes) : NULL;
    a->got = role == LADDER_INPUT ? NULL : allocate(bytes);
    if (!a->device || !a->twin || (role != LADDER_INPUT && !a->got) || (role == LADDER_ADDED && !a->start))
        ladder_give_up("out of memory for the arrays; give smaller shapes");
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        double x = 0.0;
        if (type == LADDER_INTEGER) x = floor(scale * random_uniform(1, RANDOM_TEST, l->count, i));
        else if (role != LADDER_OUTPUT) x = scale * random_normal(1, RANDOM_TEST, l->count, i);
        ladder_set(type, a->twin, i, x);
    }
    if (role == LADDER_ADDED) memcpy(a->start, a->twin, bytes);
    if (bytes > 0) upload(a->device, a->twin, bytes, l->stream);
    return a->device;
}

static inline LadderBound ladder_bound(double length, double size, double rounded) {
    LadderBound b = {length, size, rounded};
    return b;
}

static inline LadderArray* ladder_find(Ladder* l, const void* device) {
    for (size_t i = 0; i < l->count; i++)
        if (l->arrays[i].device == device) return &l->arrays[i];
    ladder_give_up("a pointer is not that of one of the arrays");
    return NULL;
}

// n elements of T on the device: floatX, float, double; for int32_t uniform in [0, scale).
template <typename T>
static inline T* ladder_input(Ladder* l, const char* name, size_t n, double scale) {
    return (T*)ladder_array(l, name, ladder_type_of((const T*)NULL), LADDER_INPUT, n, scale, ladder_bound(0, 0, 0));
}

template <typename T>
static inline T* ladder_output(Ladder* l, const char* name, size_t n, LadderBound bound) {
    return (T*)ladder_array(l, name, ladder_type_of((const T*)NULL), LADDER_OUTPUT, n, 0.0, bound);
}

template <typename T>
static inline T* ladder_added(Ladder* l, const char* name, size_t n, double scale, LadderBound bound) {
    return (T*)ladder_array(l, name, ladder_type_of((const T*)NULL), LADDER_ADDED, n, scale, bound);
}

// The host's array with the same values, for the CPU operation to read or to write.
template <typename T>
static inline T* ladder_twin(Ladder* l, T* device) {
    return (T*)ladder_find(l, device)->twin;
}

// Makes the twin's present values those of the array, for every rung from now on; before the CPU operation has run.
static inline void ladder_update(Ladder* l, const void* device) {
    LadderArray* a = ladder_find(l, device);
    size_t bytes = a->n * ladder_type_bytes(a->type);
    if (a->role == LADDER_ADDED) memcpy(a->start, a->twin, bytes);
    upload(a->device, a->twin, bytes, l->stream);
}

static inline void* ladder_scratch(Ladder* l, size_t bytes) {
    if (l->scratch_count == LADDER_ARRAYS) ladder_give_up("too many scratch arrays: raise LADDER_ARRAYS");
    Error error;
    void* memory = device_allocate(bytes ? bytes : 1, l->stream, &error);
    if (memory == NULL) ladder_give_up("out of memory for a rung's scratch; give smaller shapes");
    return l->scratch[l->scratch_count++] = memory;
}

// For device_scratch: the most that any operation of the program needs.
static inline void ladder_give_scratch(Ladder* l, size_t bytes) {
    l->stream->scratch = ladder_scratch(l, bytes);
    l->stream->scratch_bytes = bytes;
}

// ------------------------------------------------------------------------------------------------
// 2. Check

static inline double ladder_epsilon(LadderType type) {
    if (type == LADDER_FLOATX) return (double)FLOATX_EPSILON;
    return type == LADDER_FLOAT ? 0x1p-24 : type == LADDER_DOUBLE ? 0x1p-53 : 0.0;
}

static inline double ladder_tiny(LadderType type) {
#ifdef PRECISION_FP16
    if (type == LADDER_FLOATX) return 0x1p-24;  // the smallest number of binary16
#endif
    return type == LADDER_INTEGER ? 0.0 : 0x1p-124;
}

// Puts every array into the state before a run: outputs NaN, sums at their start.
static inline void ladder_reset(Ladder* l) {
    for (size_t i = 0; i < l->count; i++) {
        LadderArray* a = &l->arrays[i];
        size_t bytes = a->n * ladder_type_bytes(a->type);
        if (bytes == 0) continue;
        if (a->role == LADDER_OUTPUT) CUDA_CHECK(cudaMemsetAsync(a->device, 0xFF, bytes, l->stream->compute));  // NaN
        if (a->role == LADDER_ADDED) upload(a->device, a->start, bytes, l->stream);
    }
}

typedef struct {
    double part, error, bound;  // of the element whose error is the largest part of its bound
    size_t wrong, first_wrong;
} LadderErrors;

// Elements [first, end) of an output.
static inline LadderErrors ladder_errors(const LadderArray* a, size_t first, size_t end) {
    LadderErrors e = {-1.0, 0.0, 0.0, 0, 0};
    for (size_t i = first; i < end; i++) {
        double expected = ladder_get(a->type, a->twin, i), got = ladder_get(a->type, a->got, i);
        double start = a->role == LADDER_ADDED ? ladder_get(a->type, a->start, i) : 0.0;
        double sums = 4.0 * sqrt(a->bound.length) * 0x1p-24 * (a->bound.size + fabs(expected) + fabs(start));
        double stored = ladder_epsilon(a->type) * fabs(expected) + (double)FLOATX_EPSILON * a->bound.rounded;
        double error = fabs(got - expected), bound = 2.0 * (stored + sums) + ladder_tiny(a->type);
        if (a->type == LADDER_INTEGER) bound = 0.0;
        if (!(error <= bound) && e.wrong++ == 0) e.first_wrong = i;
        if (!(error <= e.part * bound)) {
            e.part = error == 0.0 ? 0.0 : isnan(error) || bound == 0.0 ? INFINITY : error / bound;
            e.error = error;
            e.bound = bound;
        }
    }
    return e;
}

// Compares one output with its twin; prints the element whose error is the largest part of its bound.
static inline bool ladder_compare(Ladder* l, LadderArray* a, const char* rung) {
    enum { PIECES = 256 };
    LadderErrors pieces[PIECES], e;
    download(a->got, a->device, a->n * ladder_type_bytes(a->type), l->stream);
    size_t piece = divide_up(a->n, PIECES);
    #pragma omp parallel for
    for (size_t i = 0; i < PIECES; i++)
        pieces[i] = ladder_errors(a, min_size(i * piece, a->n), min_size((i + 1) * piece, a->n));
    e = pieces[0];
    for (size_t i = 1; i < PIECES; i++) {
        size_t wrong = e.wrong + pieces[i].wrong, first_wrong = e.wrong ? e.first_wrong : pieces[i].first_wrong;
        if (pieces[i].part > e.part) e = pieces[i];
        e.wrong = wrong;
        e.first_wrong = first_wrong;
    }
    bool ok = e.wrong == 0 && a->n > 0;
    if (ok) l->passed++; else l->failed++;
    if (!l->json || !ok)
        printf("%s  %-24s %-12s %s  err %.1e <= %.1e\n", ok ? "ok    " : "FAILED", rung, a->name, FLOATX_NAME,
               e.error, e.bound);
    if (e.wrong > 0)
        printf("        %zu of %zu elements are wrong; the first is number %zu: %g, on the CPU %g\n", e.wrong, a->n,
               e.first_wrong, ladder_get(a->type, a->got, e.first_wrong), ladder_get(a->type, a->twin, e.first_wrong));
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Peaks

#ifndef EMULATED

// out (n) = in (n), 16 bytes a thread at a time: the best that memory does for reading and writing.
static __global__ void ladder_copy(uint4* out, const uint4* in, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) out[i] = in[i];
}

// Reads n and leaves the cache full of it; clean lines, which need not be written back during what is timed next.
static __global__ void ladder_read(uint4* in, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned any = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) any |= in[i].x;
    if (any) in[0].y = 1;  // never: the buffer is zero, which the compiler does not know
}

enum { LADDER_FMA_TURNS = 4096, LADDER_FMA_SUMS = 16, LADDER_MMA_TURNS = 2048, LADDER_MMA_SUMS = 8 };

// Multiplications and additions of floats on registers alone, in as many sums as hide their latency.
static __global__ void ladder_fma(float* out, float half) {
    float sums[LADDER_FMA_SUMS];
    #pragma unroll
    for (int i = 0; i < LADDER_FMA_SUMS; i++) sums[i] = (float)threadIdx.x;
    for (int turn = 0; turn < LADDER_FMA_TURNS; turn++) {
        #pragma unroll
        for (int i = 0; i < LADDER_FMA_SUMS; i++) sums[i] = sums[i] * half + half;
    }
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < LADDER_FMA_SUMS; i++) total += sums[i];
    if (total == -1.0f) out[0] = total;  // never
}

#if !FLOATX_IS_FLOAT
#ifdef PRECISION_BF16
#define LADDER_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define LADDER_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif

// The same with products of 16 x 8 x 16 on the tensor cores, by the instruction that all of them have since Ampere.
static __global__ void ladder_mma(float* out, unsigned operand) {
    float sums[LADDER_MMA_SUMS][4];
    #pragma unroll
    for (int i = 0; i < LADDER_MMA_SUMS; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
    for (int turn = 0; turn < LADDER_MMA_TURNS; turn++) {
        #pragma unroll
        for (int i = 0; i < LADDER_MMA_SUMS; i++)
            asm volatile(LADDER_MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
                         : "r"(operand), "r"(operand), "r"(operand), "r"(operand), "r"(operand), "r"(operand));
    }
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < LADDER_MMA_SUMS; i++) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    if (total == -1.0f) out[0] = total;  // never
}
#endif

static inline void ladder_empty_cache(Ladder* l) {
    unsigned blocks = (unsigned)(l->stream->processors * 8);
    ladder_read<<<blocks, 512, 0, l->stream->compute>>>((uint4*)l->sweep, l->sweep_bytes / 16);
    LAUNCH_CHECK();
}

static void ladder_run_copy(void* problem, Stream stream) {
    Ladder* l = (Ladder*)problem;
    size_t n = l->sweep_bytes / 32;
    uint4* sweep = (uint4*)l->sweep;
    ladder_copy<<<(unsigned)(stream->processors * 16), 512, 0, stream->compute>>>(sweep + n, sweep, n);
    LAUNCH_CHECK();
}

static void ladder_run_fma(void* problem, Stream stream) {
    float* out = (float*)((Ladder*)problem)->sweep;
    ladder_fma<<<(unsigned)(stream->processors * 16), 256, 0, stream->compute>>>(out, 0.5f);
    LAUNCH_CHECK();
}

#if !FLOATX_IS_FLOAT
static void ladder_run_mma(void* problem, Stream stream) {
    float* out = (float*)((Ladder*)problem)->sweep;
    ladder_mma<<<(unsigned)(stream->processors * 16), 256, 0, stream->compute>>>(out, 0u);
    LAUNCH_CHECK();
}
#endif

#endif  // EMULATED

// ------------------------------------------------------------------------------------------------
// 4. Timing

static inline int ladder_order(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

// Milliseconds of one run: the median and the minimum of the rounds. Not in the emulator, nor without rounds.
static inline double ladder_time(Ladder* l, LadderRun run, void* problem, double* minimum) {
#ifdef EMULATED
    (void)l, (void)run, (void)problem;
    *minimum = NAN;
    return NAN;
#else
    enum { WARM_UP = 2, MOST = 1000 };
    float ms[MOST];
    size_t rounds = min_size(l->rounds, MOST);
    *minimum = NAN;
    if (rounds == 0) return NAN;
    for (int i = 0; i < WARM_UP; i++) run(problem, l->stream);
    for (size_t i = 0; i < rounds; i++) {
        ladder_empty_cache(l);
        CUDA_CHECK(cudaEventRecord(l->began, l->stream->compute));
        run(problem, l->stream);
        CUDA_CHECK(cudaEventRecord(l->ended, l->stream->compute));
        CUDA_CHECK(cudaEventSynchronize(l->ended));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], l->began, l->ended));
    }
    qsort(ms, rounds, sizeof ms[0], ladder_order);
    *minimum = (double)ms[0];
    return (double)ms[rounds / 2];
#endif
}

static inline void ladder_measure_peaks(Ladder* l) {
#ifndef EMULATED
    double minimum = 0.0, warps = (double)l->stream->processors * 16 * 256 / WARP;
    l->peaks[LADDER_BYTES] = 1e3 * (double)(l->sweep_bytes / 32 * 32) / ladder_time(l, ladder_run_copy, l, &minimum);
    double fmas = warps * WARP * LADDER_FMA_TURNS * LADDER_FMA_SUMS;
    l->peaks[LADDER_FLOAT_FLOPS] = 1e3 * 2.0 * fmas / ladder_time(l, ladder_run_fma, l, &minimum);
    l->peaks[LADDER_TENSOR_FLOPS] = l->peaks[LADDER_FLOAT_FLOPS];
#if !FLOATX_IS_FLOAT
    double products = warps * LADDER_MMA_TURNS * LADDER_MMA_SUMS * (16 * 8 * 16);
    l->peak_mma = 1e3 * 2.0 * products / ladder_time(l, ladder_run_mma, l, &minimum);
    l->peaks[LADDER_TENSOR_FLOPS] = l->peak_mma;
#endif
#else
    (void)l;
#endif
}

#if !defined(EMULATED) && !FLOATX_IS_FLOAT

// A product of three matrices (n, n) by cuBLASLt, with the algorithm that it proposes when asked for nothing special.
typedef struct {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t matrix;
    cublasLtMatmulAlgo_t algorithm;
    floatX *a, *b, *out;
    void* workspace;
    size_t workspace_bytes;
} LadderProduct;

static inline void ladder_cublas(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS) ladder_give_up(cublasLtGetStatusString(status));
}

// x (n) = numbers between -1 and 1: zeros would cost less power than what is multiplied in earnest, and clocks follow.
static __global__ void ladder_fill(floatX* x, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        x[i] = floatX_of((float)(int32_t)random4(1, RANDOM_TEST, 0, i).bits[0] * 0x1p-31f);
}

static inline void ladder_run_product(void* problem, Stream stream) {
    LadderProduct* p = (LadderProduct*)problem;
    float one = 1.0f, zero = 0.0f;
    ladder_cublas(cublasLtMatmul(p->handle, p->operation, &one, p->a, p->matrix, p->b, p->matrix, &zero, p->out,
                                 p->matrix, p->out, p->matrix, &p->algorithm, p->workspace, p->workspace_bytes,
                                 stream->compute));
}

static inline void ladder_measure_product(Ladder* l) {
    const size_t n = 8192, count = n * n;
    const cudaDataType type = matmul_type(FLOATX_DTYPE);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    LadderProduct p;
    Error error;
    p.workspace_bytes = (size_t)32 << 20;  // what NVIDIA recommends for Hopper
    floatX* memory = (floatX*)device_allocate(3 * count * sizeof(floatX) + p.workspace_bytes, l->stream, &error);
    if (memory == NULL) ladder_give_up("out of device memory for the large matmul that measures the peak");
    p.a = memory, p.b = memory + count, p.out = memory + 2 * count, p.workspace = memory + 3 * count;
    ladder_fill<<<(unsigned)(l->stream->processors * 16), 256, 0, l->stream->compute>>>(p.a, 2 * count);
    LAUNCH_CHECK();
    ladder_cublas(cublasLtCreate(&p.handle));
    ladder_cublas(cublasLtMatmulDescCreate(&p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    ladder_cublas(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                 sizeof transposed));
    ladder_cublas(cublasLtMatrixLayoutCreate(&p.matrix, type, n, n, (int64_t)n));
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int results = 0;
    ladder_cublas(cublasLtMatmulPreferenceCreate(&preference));
    ladder_cublas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                       &p.workspace_bytes, sizeof p.workspace_bytes));
    ladder_cublas(cublasLtMatmulAlgoGetHeuristic(p.handle, p.operation, p.matrix, p.matrix, p.matrix, p.matrix,
                                                 preference, 1,
                                                 &result, &results));
    if (results == 0) ladder_give_up("cuBLASLt has no algorithm for the large matmul that measures the peak");
    p.algorithm = result.algo;
    double minimum = 0.0;
    l->peak_product = 1e3 * 2.0 * (double)count * (double)n / ladder_time(l, ladder_run_product, &p, &minimum);
    CUDA_CHECK(cudaStreamSynchronize(l->stream->compute));
    ladder_cublas(cublasLtMatmulPreferenceDestroy(preference));
    ladder_cublas(cublasLtMatrixLayoutDestroy(p.matrix));
    ladder_cublas(cublasLtMatmulDescDestroy(p.operation));
    ladder_cublas(cublasLtDestroy(p.handle));
    CUDA_CHECK(cudaFree(memory));
}

#endif

// For ladders of tensor cores, before the first rung: measures a large product of cuBLASLt too. On Hopper and later it
// is faster than the loop of mma.sync, as it has other instructions; the larger of the two is the peak.
static inline void ladder_tensor_peak(Ladder* l) {
#if !defined(EMULATED) && !FLOATX_IS_FLOAT
    if (l->rounds == 0) return;
    ladder_measure_product(l);
    l->peaks[LADDER_TENSOR_FLOPS] = fmax(l->peak_mma, l->peak_product);
    if (!l->json)
        printf("peaks of tensor cores: %.1f TFLOP/s by mma.sync, %.1f TFLOP/s by cuBLASLt; the larger is the peak\n",
               1e-12 * l->peak_mma, 1e-12 * l->peak_product);
#else
    (void)l;
#endif
}

// ------------------------------------------------------------------------------------------------
// 5. Program

// Reads the flags, opens the device and measures the peaks. False: the program ends with l->status. What l holds from a
// ladder before that was closed are its counts; before the first it is all zero.
static inline bool ladder_open(Ladder* l, int argc, char** argv, const char* title, const Flag* own, size_t own_count) {
    enum { MOST_FLAGS = 24, COMMON_FLAGS = 4 };
    int rungs = l->rungs, passed = l->passed, failed = l->failed;
    memset(l, 0, sizeof *l);
    l->rungs = rungs, l->passed = passed, l->failed = failed;
    l->title = title;
    l->rounds = 50;
    l->check = true;
    l->status = 1;
    Flag flags[MOST_FLAGS], common[COMMON_FLAGS] = {
        {"rounds", FLAG_COUNT, &l->rounds, "R", 0, 1000, "times that each rung is timed", false},
        {"rung", FLAG_TEXT, &l->rung, "NAME", 0, 0, "this rung alone", false},
        {"check", FLAG_SWITCH, &l->check, "", 0, 0, "compare with the CPU, which takes long for large shapes", false},
        {"json", FLAG_SWITCH, &l->json, "", 0, 0, "one JSON object per rung, on a line of its own", false},
    };
    if (own_count > MOST_FLAGS - COMMON_FLAGS) ladder_give_up("too many flags: raise MOST_FLAGS");
    for (size_t i = 0; i < own_count; i++) flags[i] = own[i];
    for (size_t i = 0; i < COMMON_FLAGS; i++) flags[own_count + i] = common[i];
    if (flags_want_help(argc, argv)) {
        printf("%s\n\n", title);
        flags_help(flags, own_count + COMMON_FLAGS);
        l->status = 0;
        return false;
    }
    for (int i = 1; i < argc; i++) {
        size_t length = strlen(l->flags);
        snprintf(l->flags + length, sizeof l->flags - length, "%s%s", i > 1 ? " " : "", argv[i]);
    }
    Error error;
    if (!flags_parse(flags, own_count + COMMON_FLAGS, argc, argv, &error) || !device_open(&l->stream, false, &error)) {
        fprintf(stderr, "ladder: %s\n", error.text);
        return false;
    }
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(l->device, sizeof l->device, "%s", properties.name);
    if (!l->json) printf("%s   [%s, %s]\n", title, l->device, FLOATX_NAME);
#ifndef EMULATED
    l->sweep_bytes = max_size(4 * (size_t)properties.l2CacheSize, (size_t)256 << 20);
    CUDA_CHECK(cudaEventCreate(&l->began));
    CUDA_CHECK(cudaEventCreate(&l->ended));
    if (l->rounds > 0) {
        l->sweep = device_allocate(l->sweep_bytes, l->stream, &error);
        if (l->sweep == NULL) ladder_give_up("out of device memory for the buffer that empties the cache");
        ladder_measure_peaks(l);
    }
    if (!l->json && l->rounds > 0)
        printf("peaks: %.0f GB/s by a copy, %.1f TFLOP/s of float, %.1f TFLOP/s of %s products\n",
               1e-9 * l->peaks[LADDER_BYTES], 1e-12 * l->peaks[LADDER_FLOAT_FLOPS],
               1e-12 * l->peaks[LADDER_TENSOR_FLOPS], FLOATX_NAME);
#else
    if (!l->json) printf("no speeds: the kernels are emulated on the CPU, which says nothing about a GPU\n");
#endif
    return true;
}

// What bounds the operation, and how much of it one run needs: for the rungs that follow.
static inline void ladder_work(Ladder* l, LadderWork work, double amount) {
    l->work = work;
    l->amount = amount;
}

// Whether a rung will run: what it alone needs can be left out otherwise.
static inline bool ladder_wants(const Ladder* l, const char* rung) { return !l->rung || strcmp(l->rung, rung) == 0; }

// Runs, checks and times one rung.
static inline void ladder_rung(Ladder* l, const char* name, LadderRun run, void* problem) {
    bool ok = true;
    size_t outputs = 0;
    if (!ladder_wants(l, name)) return;
    l->rungs++;
    ladder_reset(l);
    run(problem, l->stream);
    CUDA_CHECK(cudaStreamSynchronize(l->stream->compute));
    for (size_t i = 0; i < l->count; i++) {
        if (l->arrays[i].role == LADDER_INPUT) continue;
        outputs++;
        if (l->check) ok = ladder_compare(l, &l->arrays[i], name) && ok;
    }
    if (outputs == 0) ladder_give_up("the program has no outputs to check");
    double minimum = NAN, ms = ladder_time(l, run, problem, &minimum);
    double rate = 1e3 * l->amount / ms, part = 100.0 * rate / l->peaks[l->work];
    bool bytes = l->work == LADDER_BYTES;
    if (l->json) {
        printf("{\"title\": \"%s\", \"flags\": \"%s\", \"device\": \"%s\", \"type\": \"%s\"", l->title, l->flags,
               l->device, FLOATX_NAME);
        printf(", \"rung\": \"%s\", \"ok\": %s", name, !l->check ? "null" : ok ? "true" : "false");
        if (isfinite(ms))
            printf(", \"ms_median\": %.6g, \"ms_min\": %.6g, \"%s\": %.6g, \"peak\": %.6g", ms, minimum,
                   bytes ? "bytes_per_s" : "flops", rate, l->peaks[l->work]);
        if (isfinite(ms) && l->work == LADDER_TENSOR_FLOPS)
            printf(", \"peak_mma\": %.6g, \"peak_product\": %.6g", l->peak_mma, l->peak_product);
        printf("}\n");
    } else if (isfinite(ms)) {
        printf("        %-24s %9.4f ms (minimum %.4f)  %8.1f %s  %5.1f%% of peak\n", name, ms, minimum,
               rate * (bytes ? 1e-9 : 1e-12), bytes ? "GB/s" : "TFLOP/s", part);
    }
    fflush(stdout);
}

// Frees everything but the counts.
static inline void ladder_close(Ladder* l) {
    for (size_t i = 0; i < l->count; i++) {
        LadderArray* a = &l->arrays[i];
        CUDA_CHECK(cudaFree(a->device));
        free(a->twin);
        free(a->start);
        free(a->got);
    }
    for (size_t i = 0; i < l->scratch_count; i++) CUDA_CHECK(cudaFree(l->scratch[i]));
#ifndef EMULATED
    CUDA_CHECK(cudaFree(l->sweep));
    CUDA_CHECK(cudaEventDestroy(l->began));
    CUDA_CHECK(cudaEventDestroy(l->ended));
#endif
    device_close(l->stream);
}

// Prints the sum of all ladders of the program, and returns its exit status.
static inline int ladder_result(const Ladder* l) {
    if (l->rungs == 0) {
        fprintf(stderr, "ladder: there is no rung '%s'; without --rung all are run\n", l->rung ? l->rung : "");
        return 1;
    }
    printf("%d passed, %d failed\n", l->passed, l->failed);
    return l->failed > 0 || (l->check && l->passed == 0);
}

// ------------------------------------------------------------------------------------------------
// 6. For rungs
//
// Thread number i of a launch with ladder_blocks(n) blocks of LADDER_THREADS makes number i of n.

enum { LADDER_THREADS = 256 };

static inline unsigned ladder_blocks(size_t n) { return (unsigned)divide_up(n, LADDER_THREADS); }
static __device__ inline size_t ladder_index(void) { return (size_t)blockIdx.x * LADDER_THREADS + threadIdx.x; }

// A sum of n numbers of random sign and size about 1 does not leave 5 sqrt(n) on its way.
static inline LadderBound ladder_random_sum(size_t n) { return ladder_bound((double)n, 5.0 * sqrt((double)n), 0.0); }

#endif  // LLMTRAIN_LADDER_H
