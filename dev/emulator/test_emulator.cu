// test_emulator.cu: tests every device function and PTX instruction that the emulator knows against its manual. The
// same file can be compiled with nvcc and run on a GPU: that tests the emulator's understanding of each instruction.
//
//   1. frame     checks, arrays on the device
//   2. launches  indices, parameters
//   3. barriers
//   4. warps     shuffles, votes, reductions
//   5. atomics
//   6. shared memory
//   7. PTX       ldmatrix, mma, cp.async, conversions
//   8. functions bits, arithmetic, loads and stores

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "dev/test/harness.h"

#include <vector>

// ------------------------------------------------------------------------------------------------
// 1. Frame

#define CUDA(call) need((call) == cudaSuccess, "line %d: %s", __LINE__, #call)

// A condition on each of n elements, i; a verdict makes one test of it.
#define EACH(n, condition) for (int i = 0; i < (int)(n); i++) expect(condition, "%s for i = %d", #condition, i)

// n elements on the host and on the device: zeros, or a function's value for each index.
template <class T>
struct Array {
    std::vector<T> host;
    T* device = NULL;
    explicit Array(size_t n) : host(n) {
        CUDA(cudaMalloc((void**)&device, n * sizeof(T)));
        put();
    }
    template <class F>
    Array(size_t n, F element) : Array(n) {
        for (size_t i = 0; i < n; i++) host[i] = element((int)i);
        put();
    }
    ~Array() { CUDA(cudaFree(device)); }
    operator T*() const { return device; }
    T& operator[](size_t i) { return host[i]; }
    void put() { CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
    // Waits for the kernels, and copies the results back.
    void take() {
        CUDA(cudaGetLastError());
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    }
};

static uint32_t random_state = 1;
static uint32_t random_word(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8 ^ random_state << 16;
}
static float random_float(void) { return (float)(random_word() >> 8) * 0x1p-23f - 1.0f; }  // in [-1, 1)

enum { LANE_COUNT = 32 };
static const uint32_t FULL = 0xffffffffu;

// ------------------------------------------------------------------------------------------------
// 2. Launches

static __global__ void indices(uint32_t* out) {
    uint32_t b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    uint32_t t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    out[b * threads + t] =
        blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 | threadIdx.y << 20 | threadIdx.z << 24;
}

typedef struct {
    float a[3];
    int32_t b;
} Bundle;

// Parameters belong to each thread: a change must not show in another.
static __global__ void parameters(float* out, Bundle bundle, int32_t n, const float* nothing) {
    int32_t i = (int32_t)threadIdx.x;
    bundle.a[1] += (float)i;
    while (n < 100) n += 50;
    out[i] = bundle.a[0] + bundle.a[1] + bundle.a[2] + (float)(bundle.b + n) + (nothing ? 1000.0f : 0.0f);
}

template <int A, typename T>
static __global__ void __launch_bounds__(128) of_template(T* out, T x) {
    out[threadIdx.x] = (T)(x + (T)(A * threadIdx.x));
}

static void test_launches(void) {
    enum { BLOCKS = 3 * 2 * 2, THREADS = 5 * 3 * 2 };
    Array<uint32_t> h(BLOCKS * THREADS);
    dim3 gridDim_of_host(3, 2, 2);
    indices<<<gridDim_of_host, dim3(5, 3, 2)>>>(h);
    h.take();
    for (uint32_t i = 0; i < BLOCKS * THREADS; i++) {
        uint32_t b = i / THREADS, t = i % THREADS;
        uint32_t want = b % 3 | b / 3 % 2 << 4 | b / 6 << 8 | t % 5 << 12 | t / 5 % 3 << 20 | t / 15 << 24;
        expect(h[i] == want, "thread %u of all: %x", i, h[i]);
    }
    verdict("block and thread indices in three dimensions");

    Array<float> out(40);
    Bundle bundle = {{1.0f, 2.0f, 3.0f}, 4};
    parameters<<<1, 40>>>(out, bundle, 60, NULL);
    bundle.b = 1000;
    out.take();
    EACH(40, out[i] == 6.0f + (float)i + 114.0f);
    verdict("parameters are copied at the launch, and for each thread");

    Array<double> t(7);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    of_template<3, double><<<(14 >> 1) / 7, 7, 0, stream>>>(t, 1);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamDestroy(stream));
    t.take();
    EACH(7, t[i] == 1.0 + 3.0 * i);
    verdict("a kernel with template arguments, on a stream; its argument is converted");
    // k<<<1, 2>>>(3) in a comment or a string is left alone.
    check(strlen("k<<<1, 2>>>(3) /* <<<1>>> */") == 28, "launches in comments and strings");
}

// ------------------------------------------------------------------------------------------------
// 3. Barriers

// Values move around the block, one step per barrier.
static __global__ void ring(int32_t* out, int32_t steps) {
    __shared__ int32_t now[256];
    int32_t i = (int32_t)threadIdx.x, n = (int32_t)blockDim.x, x = i;
    for (int32_t s = 0; s < steps; s++) {
        now[i] = x;
        __syncthreads();
        x = now[(i + 1) % n];
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

// Every third thread has left before the others meet.
static __global__ void barrier_results(int32_t* out) {
    int32_t i = (int32_t)threadIdx.x;
    if (i % 3 == 2) return;
    int32_t count = __syncthreads_count(i % 2);
    int32_t all = __syncthreads_and(i < 1000), not_all = __syncthreads_and(i != 40);
    int32_t any = __syncthreads_or(i == 40), none = __syncthreads_or(i > 1000);
    out[i] = count | (all != 0) << 12 | (not_all != 0) << 13 | (any != 0) << 14 | (none != 0) << 15;
}

// Two halves of a block with a barrier each, used a different number of times.
static __global__ void named_barriers(int32_t* out) {
    __shared__ int32_t sum[2][64];
    int32_t i = (int32_t)threadIdx.x, half = i / 64, x = i;
    for (int32_t round = 0; round < 3 + 2 * half; round++) {
        sum[half][i % 64] = x;
        asm volatile("bar.sync %0, 64;" ::"r"(half + 1) : "memory");
        x = sum[half][(i + 1) % 64];
        if (half) asm volatile("bar.sync 2, 64;" ::: "memory");
        else asm volatile("bar.sync 1, %0;" ::"n"(64) : "memory");
    }
    asm volatile("bar.sync 0;" ::: "memory");
    sum[half][i % 64] = x;
    asm volatile("barrier.sync %0, 64;" ::"r"(half + 1) : "memory");
    x = sum[half][(i + 1) % 64];
    asm volatile("barrier.sync 0;" ::: "memory");
    out[i] = x;
}

static void test_barriers(void) {
    enum { BLOCKS = 3, THREADS = 200, STEPS = 17, SOME = 102, NAMED = 128 };  // SOME: so that the last one leaves
    Array<int32_t> ringed(BLOCKS * THREADS), met(SOME), named(NAMED);
    ring<<<BLOCKS, THREADS>>>(ringed, STEPS);
    ringed.take();
    EACH(BLOCKS * THREADS, ringed[i] == (i % THREADS + STEPS) % THREADS);
    verdict("__syncthreads: values go round a block");

    barrier_results<<<1, SOME>>>(met);
    met.take();
    int odd = 0;
    for (int i = 0; i < SOME; i++) odd += i % 3 != 2 && i % 2;
    EACH(SOME, met[i] == (i % 3 == 2 ? 0 : (odd | 1 << 12 | 1 << 14)));
    verdict("__syncthreads_count, _and, _or; threads that returned are not waited for");

    named_barriers<<<1, NAMED>>>(named);
    named.take();
    EACH(NAMED, named[i] == i / 64 * 64 + (i % 64 + 4 + i / 64 * 2) % 64);
    verdict("bar.sync and barrier.sync with a number and a count");
}

// ------------------------------------------------------------------------------------------------
// 4. Warps

enum { SHUFFLE_IDX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };

template <typename T>
static __global__ void shuffles(T* out, const T* in, int32_t kind, const int32_t* arguments, int32_t width) {
    T x = in[threadIdx.x], y = x;
    int32_t a = arguments[threadIdx.x];
    if (kind == SHUFFLE_IDX) y = __shfl_sync(0xffffffffu, x, a, width);
    if (kind == SHUFFLE_UP) y = __shfl_up_sync(0xffffffffu, x, (uint32_t)arguments[0], width);
    if (kind == SHUFFLE_DOWN) y = __shfl_down_sync(0xffffffffu, x, (uint32_t)arguments[0], width);
    if (kind == SHUFFLE_XOR) y = __shfl_xor_sync(0xffffffffu, x, arguments[0], width);
    out[threadIdx.x] = y;
}

template <typename T>
static void test_shuffles_of(const char* name) {
    static const char* const kinds[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
    Array<T> in(LANE_COUNT, [](int i) { return (T)(1000003.0 * (i + 1)); }), out(LANE_COUNT);
    for (int kind = 0; kind < 4; kind++) {
        for (int width = 1; width <= 32; width *= 2) {
            Array<int32_t> arguments(LANE_COUNT, [](int) { return (int32_t)(random_word() % 32); });
            shuffles<T><<<1, LANE_COUNT>>>(out, in, kind, arguments, width);
            out.take();
            for (int i = 0; i < LANE_COUNT; i++) {
                int first = i / width * width, a = kind == SHUFFLE_IDX ? arguments[i] : arguments[0], from = i;
                if (kind == SHUFFLE_IDX) from = first + a % width;
                if (kind == SHUFFLE_UP && i - a >= first) from = i - a;
                if (kind == SHUFFLE_DOWN && i + a < first + width) from = i + a;
                if (kind == SHUFFLE_XOR && (i ^ a) < first + width) from = i ^ a;
                expect(out[i] == in[from], "lane %d, width %d, argument %d", i, width, a);
            }
        }
        verdict("%s of %s, widths 1 to 32", kinds[kind], name);
    }
}

// Even and odd lanes do different things at the same time; then all together.
static __global__ void warp_halves(uint32_t* out) {
    uint32_t lane = threadIdx.x % 32, even = 0x55555555u, x = lane;
    if (lane % 2) {
        for (int32_t d = 16; d > 1; d /= 2) x += __shfl_xor_sync(~even, x, d);
    } else {
        x = __ballot_sync(even, lane < 8);
        x += __popc(__ballot_sync(even, 1));
    }
    __syncwarp();
    out[threadIdx.x] = x + __shfl_sync(0xffffffffu, x, 0);
}

// A row: what lane i computes from its number x, and the result expected in every lane.
#define VOTE_ROWS(ROW) \
    ROW(__ballot_sync(0xffffffffu, x & 1), odd) \
    ROW((__any_sync(0xffffffffu, x == 77) ? 1u : 0u) + (__any_sync(0xffffffffu, x == -1) ? 2u : 0u), 1) \
    ROW((__all_sync(0xffffffffu, x < 1000) ? 1u : 0u) + (__all_sync(0xffffffffu, x != 77) ? 2u : 0u), 1) \
    ROW(__reduce_add_sync(0xffffffffu, (uint32_t)x), sum) \
    ROW((uint32_t)__reduce_add_sync(0xffffffffu, -x), 0 - sum) \
    ROW((uint32_t)__reduce_min_sync(0xffffffffu, x - 500), (uint32_t)(smallest - 500)) \
    ROW((uint32_t)__reduce_max_sync(0xffffffffu, x - 500), (uint32_t)(largest - 500)) \
    ROW(__reduce_min_sync(0xffffffffu, (uint32_t)(x - 500)), low) \
    ROW(__reduce_max_sync(0xffffffffu, (uint32_t)(x - 500)), high) \
    ROW(__reduce_and_sync(0xffffffffu, (uint32_t)x | 0xf000u), ones) \
    ROW(__reduce_or_sync(0xffffffffu, (uint32_t)x), any) \
    ROW(__reduce_xor_sync(0xffffffffu, (uint32_t)x), parity) \
    ROW(__match_any_sync(0xffffffffu, x % 5), same[i])

// The form of all tables in this file: a list of expressions, of names with expected results, and a count.
#define COMPUTED(expression, expected) expression,
#define EXPECTED(expression, expected) {#expression, expected},
#define ONE(expression, expected) +1
enum { VOTES = VOTE_ROWS(ONE) };

static __global__ void votes(uint32_t* out, const int32_t* in) {
    int32_t x = in[threadIdx.x];
    uint32_t results[VOTES] = {VOTE_ROWS(COMPUTED)};
    for (uint32_t k = 0; k < VOTES; k++) out[k * LANE_COUNT + threadIdx.x] = results[k];
}

// Lanes exchange data through shared memory; lanes from 20 on have returned.
static __global__ void sync_warp(int32_t* out) {
    __shared__ int32_t x[2][32];
    int32_t lane = (int32_t)threadIdx.x % 32, warp = (int32_t)threadIdx.x / 32;
    if (lane >= 20) return;
    int32_t y = lane;
    for (int32_t s = 0; s < 5; s++) {
        x[warp][lane] = y;
        __syncwarp();
        y = x[warp][(lane + 1) % 20];
        __syncwarp(0x000fffffu);
    }
    out[threadIdx.x] = y;
}

static void test_warps(void) {
    test_shuffles_of<int32_t>("int");
    test_shuffles_of<uint32_t>("unsigned");
    test_shuffles_of<float>("float");
    test_shuffles_of<double>("double");
    test_shuffles_of<unsigned long long>("unsigned long long");

    Array<uint32_t> halves(LANE_COUNT), voted((int)VOTES * LANE_COUNT);
    warp_halves<<<1, LANE_COUNT>>>(halves);
    halves.take();
    EACH(LANE_COUNT, halves[i] == (i % 2 ? 256u : 0x55u + 16u) + 0x55u + 16u);
    verdict("halves of a warp with masks of their own");

    Array<int32_t> in(LANE_COUNT, [](int i) { return i == 13 ? 77 : (int32_t)(random_word() % 1000); });
    votes<<<1, LANE_COUNT>>>(voted, in);
    voted.take();
    uint32_t odd = 0, sum = 0, ones = FULL, any = 0, parity = 0, low = FULL, high = 0, same[LANE_COUNT] = {0};
    int32_t smallest = in[0], largest = in[0];
    for (int i = 0; i < LANE_COUNT; i++) {
        uint32_t u = (uint32_t)in[i], less = u - 500;
        odd |= (u & 1) << i;
        sum += u;
        ones &= u | 0xf000u;
        any |= u;
        parity ^= u;
        smallest = std::min(smallest, in[i]);
        largest = std::max(largest, in[i]);
        low = std::min(low, less);
        high = std::max(high, less);
        for (int j = 0; j < LANE_COUNT; j++) same[i] |= (uint32_t)(in[i] % 5 == in[j] % 5) << j;
    }
    for (int k = 0; k < VOTES; k++) {
        const char* name = "";
        for (int i = 0; i < LANE_COUNT; i++) {
            const struct { const char* name; uint32_t value; } want[] = {VOTE_ROWS(EXPECTED)};
            expect(voted[k * LANE_COUNT + i] == want[k].value, "lane %d: %x", i, voted[k * LANE_COUNT + i]);
            name = want[k].name;
        }
        verdict("%s", name);
    }

    Array<int32_t> synced(64);
    sync_warp<<<1, 64>>>(synced);
    synced.take();
    EACH(64, synced[i] == (i % 32 < 20 ? (i % 32 + 5) % 20 : 0));
    verdict("__syncwarp; lanes that returned are not waited for");
}

// ------------------------------------------------------------------------------------------------
// 5. Atomics

// A row: a counter's type, name and first value; what the i-th of N threads does with its address p; the last value.
enum { ATOMIC_BLOCKS = 5, ATOMIC_THREADS = 96, ATOMIC_N = ATOMIC_BLOCKS * ATOMIC_THREADS };
#define ATOMIC_ROWS(ROW) \
    ROW(int32_t, add, 0, atomicAdd(p, (int32_t)i), ATOMIC_N * (ATOMIC_N - 1) / 2) \
    ROW(int32_t, sub, 0, atomicSub(p, 2), -2 * ATOMIC_N) \
    ROW(int32_t, lowest, 7, atomicMin(p, -(int32_t)i), 1 - ATOMIC_N) \
    ROW(int32_t, highest, -100, atomicMax(p, (int32_t)i - 10), ATOMIC_N - 11) \
    ROW(uint32_t, add_u, 0, atomicAdd(p, 0x80000001u), ATOMIC_N * 0x80000001u) \
    ROW(uint32_t, low_u, FULL, atomicMin(p, i + 5), 5) \
    ROW(uint32_t, high_u, 0, atomicMax(p, i), ATOMIC_N - 1) \
    ROW(uint32_t, conjunction, FULL, atomicAnd(p, ~(1u << i % 32) | 0xffff0000u), 0xffff0000u) \
    ROW(uint32_t, disjunction, 0, atomicOr(p, 1u << i % 20), 0xfffffu) \
    ROW(uint32_t, parity, 0, atomicXor(p, i), parity_of_all) \
    ROW(uint32_t, wrapped, 0, atomicInc(p, 9), ATOMIC_N % 10) \
    ROW(uint32_t, down, 0, atomicDec(p, 6), (7 - ATOMIC_N % 7) % 7) \
    ROW(uint32_t, swapped, 0, atomicExch(p, 42u), 42) \
    ROW(unsigned long long, add_wide, 0, atomicAdd(p, 0x100000000ull), (unsigned long long)ATOMIC_N << 32) \
    ROW(unsigned long long, high_wide, 0, atomicMax(p, (unsigned long long)i << 33), (ATOMIC_N - 1ull) << 33) \
    ROW(float, add_float, 0, atomicAdd(p, 0.5f), 0.5f * (float)ATOMIC_N) \
    ROW(double, add_double, 0, atomicAdd(p, 0.25), 0.25 * (double)ATOMIC_N) \
    ROW(uint32_t, locked, 0, add_3_by_compare_and_swap(p), 3 * ATOMIC_N)

struct Counters {
#define COUNTER(T, name, first, operation, last) T name = first;
    ATOMIC_ROWS(COUNTER)
};

static __device__ void add_3_by_compare_and_swap(uint32_t* p) {
    uint32_t seen = atomicAdd(p, 0u), before;
    do {
        before = seen;
        seen = atomicCAS(p, before, before + 3);
    } while (seen != before);
}

static __global__ void atomics(Counters* c, uint32_t* tickets) {
    __shared__ uint32_t in_block;
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) in_block = 0;
    __syncthreads();
    tickets[i] = atomicAdd(&in_block, 1u);
#define COUNT(T, name, first, operation, last) \
    { \
        T* p = &c->name; \
        operation; \
    }
    ATOMIC_ROWS(COUNT)
}

static void test_atomics(void) {
    Array<Counters> c(1);
    Array<uint32_t> tickets(ATOMIC_N);
    uint32_t parity_of_all = 0;
    atomics<<<ATOMIC_BLOCKS, ATOMIC_THREADS>>>(c, tickets);
    c.take();
    tickets.take();
    for (uint32_t i = 0; i < ATOMIC_N; i++) parity_of_all ^= i;
#define CHECK_COUNTER(T, name, first, operation, last) check(c[0].name == (T)(last), "%s of %s", #operation, #T);
    ATOMIC_ROWS(CHECK_COUNTER)
    for (int b = 0; b < ATOMIC_BLOCKS; b++) {
        bool seen[ATOMIC_THREADS] = {false};
        for (int i = 0; i < ATOMIC_THREADS; i++) {
            uint32_t t = tickets[b * ATOMIC_THREADS + i];
            if (expect(t < ATOMIC_THREADS && !seen[t], "thread %d of block %d has ticket %u", i, b, t)) seen[t] = true;
        }
    }
    verdict("atomicAdd in shared memory gives each thread a ticket of its own");
}

// ------------------------------------------------------------------------------------------------
// 6. Shared memory

static __device__ int32_t* of_function(void) {
    __shared__ int32_t here[4];
    return here;
}

template <int N, typename T>
static __device__ T sum_of(const T* in) {
    __shared__ T copy[N];
    for (int32_t i = (int32_t)threadIdx.x; i < N; i += (int32_t)blockDim.x) copy[i] = in[i];
    __syncthreads();
    T sum = 0;
    for (int32_t i = 0; i < N; i++) sum += copy[i];
    return sum;
}

static __global__ void static_shared(float* out, const float* in) {
    __shared__ float tile[4][33], alone, pair[2];
    __shared__ __align__(128) unsigned char bytes[256];
    __shared__ alignas(16) uint16_t halves[8];
    uint32_t i = threadIdx.x;
    tile[i % 4][i % 33] = 1.0f;
    if (i == 0) {
        alone = 5.0f;
        pair[1] = 6.0f;
        of_function()[3] = 7;
    }
    __syncthreads();
    float float_sum = sum_of<20>(in), double_sum = (float)sum_of<4, double>((const double*)(in + 20));
    bool aligned =
        ((size_t)__cvta_generic_to_shared(bytes) & 127) == 0 && ((size_t)__cvta_generic_to_shared(halves) & 15) == 0;
    out[i] = alone + pair[1] + (float)*(of_function() + 3) + float_sum + double_sum + (aligned ? 100.0f : 0.0f) +
             (float)(sizeof tile / sizeof(float)) + tile[i % 4][i % 33];
}

template <typename T>
static __global__ void dynamic_shared(T* out, int32_t n) {
    extern __shared__ __align__(16) unsigned char memory[];
    T* x = (T*)memory;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) x[i] = (T)i;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) out[i] = x[n - 1 - i];
}

static void test_shared_memory(void) {
    enum { N = 12000 };  // 96,000 bytes, more than a kernel has without asking
    const double doubles[4] = {1, 2, 3, 4};
    Array<float> in(28, [](int) { return 1.0f; }), out(64);
    Array<double> h(N);
    memcpy(&in[20], doubles, sizeof doubles);
    in.put();
    static_shared<<<1, 64>>>(out, in);
    out.take();
    EACH(64, out[i] == 5 + 6 + 7 + 20 + 10 + 100 + 132 + 1);
    verdict("static shared memory: arrays, several names, alignment, in functions and templates");

    CUDA(cudaFuncSetAttribute(dynamic_shared<double>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              N * (int)sizeof(double)));
    dynamic_shared<double><<<1, 128, N * sizeof(double)>>>(h, N);
    h.take();
    EACH(N, h[i] == N - 1 - i);
    verdict("dynamic shared memory beyond 48 KiB");
}

// ------------------------------------------------------------------------------------------------
// 7. PTX

static __device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Kinds 0 to 5: x1, x2, x4, and the same transposed. The rows of 8 elements are 24 apart, so that addresses matter.
static __global__ void ldmatrix_kernel(uint32_t* out, const uint16_t* in, int32_t kind) {
    __shared__ __align__(16) uint16_t rows[32][24];
    for (int32_t i = (int32_t)threadIdx.x; i < 32 * 8; i += 32) rows[i / 8][i % 8] = in[i];
    __syncwarp();
    uint32_t r[4] = {0, 0, 0, 0}, address = shared_address(rows[threadIdx.x]);
#define LDMATRIX_1(modifiers) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" modifiers ".b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory")
#define LDMATRIX_2(modifiers) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifiers ".b16 {%0, %1}, [%2];\n" \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory")
#define LDMATRIX_4(modifiers) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifiers ".b16 {%0, %1, %2, %3}, [%4];\n" \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory")
    if (kind == 0) LDMATRIX_1(".shared");
    if (kind == 1) LDMATRIX_2(".shared");
    if (kind == 2) LDMATRIX_4(".shared::cta");
    if (kind == 3) LDMATRIX_1(".trans.shared");
    if (kind == 4) LDMATRIX_2(".trans.shared");
    if (kind == 5) LDMATRIX_4(".trans.shared");
    for (int32_t m = 0; m < 4; m++) out[m * 32 + threadIdx.x] = r[m];
}

static void test_ldmatrix(void) {
    static const char* const names[] = {"x1", "x2", "x4", "x1.trans", "x2.trans", "x4.trans"};
    Array<uint16_t> in(32 * 8, [](int) { return (uint16_t)random_word(); });
    for (int kind = 0; kind < 6; kind++) {
        Array<uint32_t> out(128);
        ldmatrix_kernel<<<1, 32>>>(out, in, kind);
        out.take();
        for (int m = 0; m < 4; m++) {
            for (int lane = 0; lane < 32; lane++) {
                int row = lane / 4, column = lane % 4 * 2;
                uint32_t low = kind < 3 ? in[(m * 8 + row) * 8 + column] : in[(m * 8 + column) * 8 + row];
                uint32_t high = kind < 3 ? in[(m * 8 + row) * 8 + column + 1] : in[(m * 8 + column + 1) * 8 + row];
                expect(out[m * 32 + lane] == (m < 1 << kind % 3 ? low | high << 16 : 0), "matrix %d, lane %d", m, lane);
            }
        }
        verdict("ldmatrix %s", names[kind]);
    }
}

enum { KIND_BF16, KIND_F16, KIND_TF32 };

// d (16, 8) = a (16, K) b (K, 8) + c (16, 8); K is 16, or 8 for tf32. Lanes hold elements as in the PTX manual.
static __global__ void mma_kernel(float* d, const float* a, const float* b, const float* c, int32_t kind) {
    uint32_t lane = threadIdx.x, group = lane / 4, member = lane % 4, ra[4], rb[2];
    float rc[4], x[2];
    for (uint32_t i = 0; i < 4; i++) rc[i] = c[(group + 8 * (i / 2)) * 8 + member * 2 + i % 2];
    if (kind == KIND_TF32) {
        for (uint32_t i = 0; i < 4; i++) {
            x[0] = a[(group + 8 * (i % 2)) * 8 + i / 2 * 4 + member];
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(ra[i]) : "f"(x[0]));
        }
        for (uint32_t i = 0; i < 2; i++) rb[i] = __float_as_uint(b[(i * 4 + member) * 8 + group]);
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
            : "+f"(rc[0]), "+f"(rc[1]), "+f"(rc[2]), "+f"(rc[3])
            : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    } else {
        for (uint32_t i = 0; i < 6; i++) {
            for (uint32_t e = 0; e < 2; e++) {
                uint32_t k = (i < 4 ? i / 2 : i - 4) * 8 + member * 2 + e;
                x[e] = i < 4 ? a[(group + 8 * (i % 2)) * 16 + k] : b[k * 8 + group];
            }
            uint32_t* r = i < 4 ? &ra[i] : &rb[i - 4];
            if (kind == KIND_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*r) : "f"(x[1]), "f"(x[0]));
            else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*r) : "f"(x[1]), "f"(x[0]));
        }
        if (kind == KIND_BF16) {
            float rd[4];
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
                : "=f"(rd[0]), "=f"(rd[1]), "=f"(rd[2]), "=f"(rd[3])
                : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]), "f"(rc[0]), "f"(rc[1]),
                  "f"(rc[2]), "f"(rc[3]));
            for (uint32_t i = 0; i < 4; i++) rc[i] = rd[i];
        } else {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                : "+f"(rc[0]), "+f"(rc[1]), "+f"(rc[2]), "+f"(rc[3])
                : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
        }
    }
    for (uint32_t i = 0; i < 4; i++) d[(group + 8 * (i / 2)) * 8 + member * 2 + i % 2] = rc[i];
}

// Rounds x to the type as the kernel does: tf32 operands of b are truncated by the tensor core, those of a rounded.
static float rounded(float x, int kind, bool cut) {
    if (kind == KIND_BF16) return __bfloat162float(__float2bfloat16_rn(x));
    if (kind == KIND_F16) return __half2float(__float2half_rn(x));
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + (cut ? 0 : 0x1000u)) & 0xffffe000u;
    memcpy(&x, &bits, 4);
    return x;
}

static void test_mma(void) {
    static const char* const names[] = {"mma m16n8k16 bf16", "mma m16n8k16 f16", "mma m16n8k8 tf32"};
    for (int kind = 0; kind < 3; kind++) {
        int K = kind == KIND_TF32 ? 8 : 16;
        auto any = [](int) { return random_float(); };
        Array<float> a(16 * K, any), b(K * 8, any), c(16 * 8, any), d(16 * 8);
        a[3] = 0x1p-20f;  // subnormal as f16
        if (kind != KIND_TF32) a[15 * K] = INFINITY;
        a.put();
        mma_kernel<<<1, 32>>>(d, a, b, c, kind);
        d.take();
        // Tensor cores round each addition, at worst towards zero: an epsilon of 2^-23 for each of K + 1 terms.
        double worst = 0;
        for (int i = 0; i < 16; i++) {
            for (int j = 0; j < 8; j++) {
                double sum = c[i * 8 + j], size = fabs(sum);
                for (int k = 0; k < K; k++) {
                    double product =
                        (double)rounded(a[i * K + k], kind, false) * (double)rounded(b[k * 8 + j], kind, true);
                    sum += product;
                    size += fabs(product);
                }
                if (isinf(sum)) continue;
                double error = fabs((double)d[i * 8 + j] - sum) / (size * (K + 1) * 0x1p-23);
                if (!(error <= worst)) worst = error;
            }
        }
        check_bound(worst, 1, "%s", names[kind]);
        if (kind != KIND_TF32) check(isinf(d[15 * 8]) != 0, "mma: infinity stays");
    }
}

static __global__ void conversions(uint32_t* out, float x, float y) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out[0]) : "f"(x), "f"(y));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out[1]) : "f"(x), "f"(y));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out[2]) : "f"(x));
}

static void test_conversions(void) {
    static const float numbers[] = {0.0f, 1.0f, -3.14159274f, 0x1.00fp0f, 0x1.001p0f, 0x1.003p-3f, 65519.0f, 1e-7f,
                                    INFINITY};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        float x = numbers[i], y = numbers[(i + 1) % COUNT_OF(numbers)];
        Array<uint32_t> out(3);
        conversions<<<1, 1>>>(out, x, y);
        out.take();
        __nv_bfloat16 b[2] = {__float2bfloat16_rn(y), __float2bfloat16_rn(x)};  // the first operand is the upper half
        __half h[2] = {__float2half_rn(y), __float2half_rn(x)};
        float t = rounded(x, KIND_TF32, false);
        expect(memcmp(&out[0], b, 4) == 0, "cvt.rn.bf16x2.f32 of %g and %g", x, y);
        expect(memcmp(&out[1], h, 4) == 0, "cvt.rn.f16x2.f32 of %g and %g", x, y);
        expect(memcmp(&out[2], &t, 4) == 0, "cvt.rna.tf32.f32 of %g", x);
    }
    verdict("cvt.rn.bf16x2.f32, cvt.rn.f16x2.f32, cvt.rna.tf32.f32");
}

// Copies of 4, 8 and 16 bytes, of which `given` are read and the rest is zero.
static __global__ void copy_sizes(uint32_t* out, const uint32_t* in, int32_t given) {
    __shared__ __align__(16) uint32_t s[4][32 * 4];
    uint32_t i = threadIdx.x;
    for (uint32_t k = 0; k < 16; k++) s[k / 4][i * 4 + k % 4] = 7;
    __syncthreads();
#define COPY(level, to, bytes) \
    asm volatile("cp.async." level ".shared.global [%0], [%1], " #bytes ", %2;\n" \
                 ::"r"(shared_address(&s[to][i * 4])), "l"(in + i * 4), "r"(given < bytes ? given : bytes) : "memory")
    COPY("ca", 0, 4);
    COPY("ca", 1, 8);
    COPY("ca", 2, 16);
    COPY("cg", 3, 16);
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    __syncthreads();
    for (uint32_t k = 0; k < 16; k++) out[k * 32 + i] = s[k / 4][(31 - i) * 4 + k % 4];
}

// Three groups; after waiting until at most n are pending, the older ones can be read.
static __global__ void copy_groups(uint32_t* out, const uint32_t* in) {
    __shared__ __align__(16) uint32_t s[3][32 * 4];
    uint32_t i = threadIdx.x;
    for (uint32_t g = 0; g < 3; g++) {
        uint32_t to = shared_address(&s[g][i * 4]);
        const uint32_t* from = in + (g * 32 + i) * 4;
        if (g == 1) asm volatile("cp.async.ca.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
        else asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    }
    asm volatile("cp.async.wait_group %0;\n" ::"n"(2) : "memory");
    __syncthreads();
    out[i] = s[0][(31 - i) * 4];
    asm volatile("cp.async.wait_group 1;\n" ::: "memory");
    __syncthreads();
    out[32 + i] = s[1][(31 - i) * 4 + 1];
    asm volatile("cp.async.wait_group 0;\n" ::: "memory");
    __syncthreads();
    out[64 + i] = s[2][(31 - i) * 4 + 2];
}

static void test_copies(void) {
    Array<uint32_t> in(3 * 128, [](int i) { return (uint32_t)i + 1000; }), out(16 * 32), groups(96);
    for (int32_t given = 0; given <= 16; given += 4) {
        copy_sizes<<<1, 32>>>(out, in, given);
        out.take();
        for (uint32_t k = 0; k < 16; k++) {
            for (uint32_t i = 0; i < 32; i++) {
                uint32_t words = k / 4 == 0 ? 1 : k / 4 == 1 ? 2 : 4, word = k % 4;
                uint32_t want = word >= words ? 7 : (int32_t)(word * 4) < given ? in[(31 - i) * 4 + word] : 0;
                expect(out[k * 32 + i] == want, "word %u of copy %u, thread %u", word, k / 4, i);
            }
        }
        verdict("cp.async of 4, 8 and 16 bytes, %d of them read", given);
    }
    copy_groups<<<1, 32>>>(groups, in);
    groups.take();
    EACH(96, groups[i] == in[(i / 32 * 32 + 31 - i % 32) * 4 + i / 32]);
    verdict("cp.async.commit_group, cp.async.wait_group");
}

static __global__ void exponentials(float* out, const float* in, int32_t n) {
    int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    float y, z;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(in[i]));
    asm volatile("ex2.approx.f32 %0, %1;" : "=f"(z) : "f"(in[i]));
    out[i] = y;
    out[n + i] = z;
}

static void test_exponentials(void) {
    enum { N = 300 };
    Array<float> in(N, [](int i) { return i < 2 ? (i == 0 ? -INFINITY : INFINITY) : (float)(i - 150) * 0.9f; });
    Array<float> out(2 * N);
    exponentials<<<3, 128>>>(out, in, N);
    out.take();
    double worst = 0;
    for (int i = 2; i < N; i++) {
        double want = exp2((double)in[i]);
        if (want > 3e38) continue;
        double subnormal = want < 0x1p-126 ? 1 : 0;  // ftz: zero; else off by a few of the smallest numbers
        double error = subnormal ? fabs((double)out[i]) + fabs((double)out[N + i] - want) / 0x1p-145 * 0x1p-22
                                 : fmax(fabs(out[i] / want - 1), fabs(out[N + i] / want - 1));
        if (!(error <= worst)) worst = error;
    }
    check_bound(worst, 0x1p-22, "ex2.approx, with and without ftz");
    check(out[0] == 0 && out[N] == 0 && isinf(out[1]) && isinf(out[N + 1]), "ex2.approx of infinities");
}

// ------------------------------------------------------------------------------------------------
// 8. Functions
//
// A row of a table: what device code computes, and the host's expected value.

#define BIT_ROWS(ROW) \
    ROW(__popc(a), 20) \
    ROW(__popcll(wide), 32) \
    ROW(__clz((int32_t)b), 8) \
    ROW(__clz(0), 32) \
    ROW(__clzll((long long)wide), 3) \
    ROW(__ffs((int32_t)b), 3) \
    ROW(__ffs(0), 0) \
    ROW(__brev(a), reversed) \
    ROW(__umulhi(a, b), (unsigned long long)a * b >> 32) \
    ROW((uint32_t)__mulhi((int32_t)a, (int32_t)b), (uint32_t)((int64_t)(int32_t)a * (int32_t)b >> 32)) \
    ROW(__umul64hi(wide, wide), square) \
    ROW(__funnelshift_l(a, b, 9), b << 9 | a >> 23) \
    ROW(__funnelshift_r(a, b, 9), a >> 9 | b << 23) \
    ROW(__byte_perm(a, b, 0x5140), (b >> 8 & 0xff) << 24 | (a >> 8 & 0xff) << 16 | (b & 0xff) << 8 | (a & 0xff)) \
    ROW(__byte_perm(a, b, 0x0ec8), (a & 0xff) << 24 | 0xff << 16 | 0x00 << 8 | 0xff) \
    ROW((uint32_t)__float_as_int(x), x_bits) \
    ROW(__float_as_uint(x), x_bits) \
    ROW(__float_as_uint(__int_as_float((int32_t)b)), b) \
    ROW(__float_as_uint(__uint_as_float(b)), b) \
    ROW(__double_as_longlong(__longlong_as_double((long long)wide)), wide) \
    ROW(__float2int_rn(2.5f), 2) \
    ROW(__float2int_rn(3.5f), 4) \
    ROW(__float2int_rd(2.7f), 2) \
    ROW(__float2int_ru(2.2f), 3) \
    ROW(min(3u, 4u) + (uint32_t)max(-3, 2) + (uint32_t)min(7.0f, 2.0f), 3 + 2 + 2)

// A GPU's fast functions are off by 2^-20. Sine and cosine may each be off by 2^-20.5 ("PTX ISA", sin.approx), and the sum
// of their squares, the last row, by 2 (s + c) times that, at most 2^-19.
#define FLOAT_ROWS(ROW) \
    ROW(__expf(x), exp((double)x)) \
    ROW(__logf(y), log((double)y)) \
    ROW(__fdividef(x, y), (double)x / y) \
    ROW(rsqrtf(y), 1 / sqrt((double)y)) \
    ROW(__frcp_rn(y), 1 / (double)y) \
    ROW(__fsqrt_rn(y), sqrt((double)y)) \
    ROW(__frsqrt_rn(y), 1 / sqrt((double)y)) \
    ROW(__powf(y, x), pow((double)y, (double)x)) \
    ROW(__log2f(y), log2((double)y)) \
    ROW(exp2f(x), exp2((double)x)) \
    ROW(__fmaf_rn(x, y, 1.0f), (double)x * y + 1) \
    ROW(__saturatef(y), 1) \
    ROW(__ldg(in), 11) \
    ROW(__ldcs(in + 1), 12) \
    ROW(__ldcg(in + 2), 13) \
    ROW(s * s + c * c, 1)

// With epsilons of bf16 and fp16; y is exact in 16 bits.
#define HALF_ROWS(ROW) \
    ROW(__bfloat162float(__hfma(bx, by, bx)), b * y + b) \
    ROW(__half2float(__hfma(hx, hy, hx)), h * y + h) \
    ROW(__bfloat162float(pair.x), b * y + 1) \
    ROW(__bfloat162float(pair.y), b * y + 2)

#define COMPUTED_BITS(expression, expected) (unsigned long long)(expression),
enum { BIT_RESULTS = BIT_ROWS(ONE), FLOAT_RESULTS = FLOAT_ROWS(ONE), HALF_RESULTS = HALF_ROWS(ONE) };
enum { RESULTS = FLOAT_RESULTS + HALF_RESULTS };

static __global__ void bit_functions(unsigned long long* out, uint32_t a, uint32_t b, float x,
                                     unsigned long long wide) {
    unsigned long long r[BIT_RESULTS] = {BIT_ROWS(COMPUTED_BITS)};
    for (int32_t i = 0; i < BIT_RESULTS; i++) out[i] = r[i];
}

static __global__ void float_functions(float* out, float x, float y, const float* in) {
    __nv_bfloat16 bx = __float2bfloat16_rn(x), by = __float2bfloat16_rn(y);
    __half hx = __float2half_rn(x), hy = __float2half_rn(y);
    __nv_bfloat162 pair =
        __hfma2(__floats2bfloat162_rn(x, y), __floats2bfloat162_rn(y, x), __floats2bfloat162_rn(1.0f, 2.0f));
    float s, c;
    __sincosf(x, &s, &c);
    float r[RESULTS] = {FLOAT_ROWS(COMPUTED) HALF_ROWS(COMPUTED)};
    for (int32_t i = 0; i < RESULTS; i++) __stcs(&out[i], r[i]);
    float4 four = __ldg((const float4*)in);
    __stcg((float4*)&out[RESULTS], make_float4(four.w, four.z, four.y, four.x));
}

static void test_functions(void) {
    uint32_t a = 0x89abcdefu, b = 0x00f01234u, x_bits, reversed = 0;
    float x = 0.7f, y = 3.25f;
    unsigned long long wide = 0x123456789abcdef0ull;
    Array<unsigned long long> results(BIT_RESULTS);
    Array<float> in(4, [](int i) { return 11.0f + (float)i; }), out(RESULTS + 4);
    memcpy(&x_bits, &x, 4);
    for (int i = 0; i < 32; i++) reversed |= (a >> i & 1) << (31 - i);
    // The 64 high bits of wide * wide, from products of halves.
    unsigned long long top = wide >> 32, low = wide & FULL, middle = top * low;
    unsigned long long carry = ((low * low >> 32) + 2 * (middle & FULL)) >> 32;
    unsigned long long square = top * top + 2 * (middle >> 32) + carry;
    bit_functions<<<1, 1>>>(results, a, b, x, wide);
    results.take();
    const struct { const char* name; unsigned long long value; } bits[] = {BIT_ROWS(EXPECTED)};
    for (int i = 0; i < BIT_RESULTS; i++)
        check(results[i] == bits[i].value, "%s: %llx, should be %llx", bits[i].name, results[i], bits[i].value);

    float_functions<<<1, 1>>>(out, x, y, in);
    out.take();
    {
        double b = (double)__bfloat162float(__float2bfloat16_rn(x)), h = (double)__half2float(__float2half_rn(x));
        const struct { const char* name; double value; } floats[] = {FLOAT_ROWS(EXPECTED) HALF_ROWS(EXPECTED)};
        for (int i = 0; i < RESULTS; i++)
            check_bound(fabs(out[i] / floats[i].value - 1),
                        i < FLOAT_RESULTS - 1 ? 0x1p-20 : i < FLOAT_RESULTS ? 0x1p-19 : 0x1p-8, "%s", floats[i].name);
    }
    EACH(4, out[RESULTS + i] == in[3 - i]);
    verdict("__ldg, __stcg of float4");
}

int main(void) {
    tests_begin("test_emulator");
    test_launches();
    test_barriers();
    test_warps();
    test_atomics();
    test_shared_memory();
    test_ldmatrix();
    test_mma();
    test_conversions();
    test_copies();
    test_exponentials();
    test_functions();
    return tests_end();
}
