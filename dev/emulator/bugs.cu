// bugs.cu: kernels with one planted bug each, which the emulator must catch, and the same kernels without it, which
// must cause no false alarm. (Bugs of host code and streams: runtime_bugs.cu.)
//
// bugs.h says how to run it. After each name are the modes that must catch it, as test.sh sets them: forward, reverse,
// random (4 seeds), early (reverse, with early copies), asan (built with the address and undefined-behavior
// sanitizers) and race (built with the race check). `all` is all of them. A seed may miss a bug of order: at least one
// of the four must catch a bug listed as random.

#include <cuda_bf16.h>

#include "bugs.h"

enum { N = 128 };                // floats of the result
static float* result;            // on the device, (N): 0, 1, 2 ... when all is well
static float* numbers;           // on the device, (N): 0, 1, 2 ...

#define KERNEL_BUG(name, modes) \
    static void name##_launch(bool bug, bool good); \
    BUG(name, modes) { \
        name##_launch(bug, good); \
        return true; \
    } \
    static void name##_launch([[maybe_unused]] bool bug, [[maybe_unused]] bool good)

// ------------------------------------------------------------------------------------------------
// Memory

static __global__ void write_global(float* out, int32_t n, bool bug) {
    int32_t i = (int32_t)threadIdx.x;
    if (bug ? i <= n : i < n) out[i] = (float)i;
}
KERNEL_BUG(write_past_global_array, "all") { write_global<<<1, 2 * N>>>(result, N, bug); }

static __global__ void store_to_local(float* out, bool bug) {
    float local[2] = {0.0f, 0.0f};
    float* to = bug && threadIdx.x == 0 ? local : out + threadIdx.x;
    __stwb(to, (float)threadIdx.x);
    out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(global_store_to_a_local_variable, "all") { store_to_local<<<1, N>>>(result, bug); }

static __global__ void read_global(float* out, const float* in, int32_t n, bool bug) {
    int32_t i = (int32_t)threadIdx.x;
    float x = in[i], y = i + 1 < n || bug ? in[i + 1] : 0.0f;
    out[i] = y > 1e6f ? y : x;
}
KERNEL_BUG(read_past_global_array, "asan") { read_global<<<1, N>>>(result, numbers, N, bug); }

static __global__ void copy(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }

KERNEL_BUG(memory_used_after_free, "all") {
    float *temporary = NULL, **slot = &temporary;
    if (cudaMalloc((void**)slot, N * sizeof(float)) != cudaSuccess) return;
    cudaMemcpy(temporary, numbers, N * sizeof(float), cudaMemcpyDeviceToDevice);
    if (bug) cudaFree(temporary);
    copy<<<1, N>>>(result, temporary);
    if (!bug) cudaFree(temporary);
}

KERNEL_BUG(null_pointer, "all") { copy<<<1, N>>>(result, bug ? NULL : numbers); }

static __global__ void misaligned(float* out, const float* in, int32_t offset) {
    float4 four = *(const float4*)(in + 4 * (threadIdx.x / 4) + (threadIdx.x < 4 ? offset : 0));
    float x[4] = {four.x, four.y, four.z, four.w};
    out[threadIdx.x] = x[threadIdx.x % 4];
}
KERNEL_BUG(misaligned_float4, "asan") { misaligned<<<1, N>>>(result, numbers, bug ? 1 : 0); }

static __global__ void dynamic_write(float* out, int32_t past) {
    extern __shared__ float s[];
    s[threadIdx.x + past] = (float)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x + past];
}
KERNEL_BUG(write_past_dynamic_shared, "all") { dynamic_write<<<1, N, N * sizeof(float)>>>(result, bug ? 1 : 0); }

template <int SIZE>
static __global__ void static_write(float* out, int32_t past) {
    __shared__ float s[SIZE];
    s[threadIdx.x + past] = (float)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x + past];
}
KERNEL_BUG(write_past_static_shared, "all") { static_write<N><<<1, N>>>(result, bug ? 1 : 0); }

static __global__ void static_read(float* out, int32_t past) {
    __shared__ float s[N], after[N];
    s[threadIdx.x] = after[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    float next = s[threadIdx.x + past];
    out[threadIdx.x] = next < 0.0f ? next : after[threadIdx.x];
}
KERNEL_BUG(read_past_static_shared, "asan") { static_read<<<1, N>>>(result, bug ? 1 : 0); }

static __global__ void uninitialized_shared(float* out, int32_t written) {
    __shared__ float s[N];
    if ((int32_t)threadIdx.x < written) s[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
KERNEL_BUG(uninitialized_shared, "all") { uninitialized_shared<<<1, N>>>(result, bug ? N - 1 : N); }

static __global__ void add_to(float* out, const float* in) { out[threadIdx.x] += in[threadIdx.x]; }
KERNEL_BUG(uninitialized_global, "all") {
    if (!bug) cudaMemset(result, 0, N * sizeof(float));
    add_to<<<1, N>>>(result, numbers);
}

static __global__ void small_grid(float* out, const float* in, int32_t n) {
    int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = in[i];
}
KERNEL_BUG(grid_too_small, "all") { small_grid<<<bug ? N / 48 : (N + 47) / 48, 48>>>(result, numbers, N); }

// ------------------------------------------------------------------------------------------------
// Order

static __global__ void reversed(float* out, bool bug) {
    __shared__ float s[N];
    s[threadIdx.x] = (float)(N - 1 - threadIdx.x);
    if (!bug) __syncthreads();
    out[threadIdx.x] = s[N - 1 - threadIdx.x];
}
KERNEL_BUG(missing_syncthreads, "forward reverse random race") { reversed<<<1, N>>>(result, bug); }

// Two rounds through one buffer: the second must not begin before all have read.
static __global__ void reused(float* out, bool bug) {
    __shared__ float s[N];
    uint32_t i = threadIdx.x, other = (i + N / 2) % N;
    s[i] = (float)other;
    __syncthreads();
    float x = s[other];
    if (!bug) __syncthreads();
    s[i] = -1000.0f;
    __syncthreads();
    out[i] = x + s[i] + 1000.0f;
}
KERNEL_BUG(missing_syncthreads_before_reuse, "random race") { reused<<<1, N>>>(result, bug); }

static __global__ void in_warp(float* out, bool bug) {
    __shared__ float s[N];
    uint32_t i = threadIdx.x, partner = i ^ 31;
    s[i] = (float)partner;
    if (!bug) __syncwarp();
    out[i] = s[partner];
}
KERNEL_BUG(missing_syncwarp, "forward reverse random race") { in_warp<<<1, N>>>(result, bug); }

static __global__ void block_writes(float* out, bool bug) {
    if (!bug && blockIdx.x > 0) return;
    out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(two_blocks_write_one_place, "race") { block_writes<<<2, N>>>(result, bug); }

static __global__ void first_half(float* out) { out[threadIdx.x] = (float)threadIdx.x; }
static __global__ void second_half(float* out) { out[N / 2 + threadIdx.x] = out[threadIdx.x] + (float)(N / 2); }
static __global__ void both_halves(float* out) {
    if (blockIdx.x == 0) out[threadIdx.x] = (float)threadIdx.x;
    else out[N / 2 + threadIdx.x] = out[threadIdx.x] + (float)(N / 2);
}
KERNEL_BUG(one_block_reads_what_another_writes, "reverse random race") {
    if (bug) {
        both_halves<<<2, N / 2>>>(result);
    } else {
        first_half<<<1, N / 2>>>(result);
        second_half<<<1, N / 2>>>(result);
    }
}

static __global__ void counted(float* out, bool bug) {
    __shared__ int32_t count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (bug) count = count + 1;
    else atomicAdd(&count, 1);
    __syncthreads();
    out[threadIdx.x] = (float)threadIdx.x + (float)(count - (int32_t)blockDim.x);
}
KERNEL_BUG(missing_atomic_in_shared, "race") { counted<<<1, N>>>(result, bug); }

// Each block adds its part of the sum; the additions may come in any order, but none may be lost.
static __global__ void global_sum(float* out, const float* in, bool bug) {
    float x = in[threadIdx.x];
    if (bug) out[threadIdx.x] += x / 4;
    else atomicAdd(&out[threadIdx.x], x / 4);
}
KERNEL_BUG(missing_atomic_in_global, "race") {
    cudaMemset(result, 0, N * sizeof(float));
    global_sum<<<4, N>>>(result, numbers, bug);
}

// ------------------------------------------------------------------------------------------------
// Barriers and warps

static __global__ void divergent_barrier(float* out, bool bug) {
    out[threadIdx.x] = (float)threadIdx.x;
    if (!bug || threadIdx.x < 40) __syncthreads();
    else if (__shfl_sync(0xffffffffu, 1, 0) != 1) out[threadIdx.x] = 0.0f;
}
KERNEL_BUG(divergent_syncthreads, "all") { divergent_barrier<<<1, N>>>(result, bug); }

static __global__ void two_barriers(float* out, bool bug) {
    if (bug && threadIdx.x >= 64) __syncthreads();
    else __syncthreads();
    out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(two_different_syncthreads, "all") { two_barriers<<<1, N>>>(result, bug); }

static __global__ void barrier_in_loop(float* out, bool bug) {
    int32_t rounds = bug ? (int32_t)threadIdx.x / 32 + 1 : 3;
    for (int32_t i = 0; i < rounds; i++) {
        __syncthreads();
        out[threadIdx.x] = (float)threadIdx.x;
    }
    if (__syncthreads_or(0)) out[0] = 1.0f;
}
KERNEL_BUG(syncthreads_in_uneven_loop, "all") { barrier_in_loop<<<1, N>>>(result, bug); }

static __global__ void named_barrier(float* out, int32_t expected) {
    if (threadIdx.x < 64) asm volatile("bar.sync 1, %0;" ::"r"(expected) : "memory");
    out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(named_barrier_waits_for_too_many, "all") { named_barrier<<<1, N>>>(result, bug ? 96 : 64); }

static __global__ void shuffle_in_branch(float* out, bool bug) {
    float x = 0.0f;
    if (threadIdx.x % 32 < 16) x = __shfl_xor_sync(bug ? 0xffffffffu : 0x0000ffffu, 1.0f, 1) - 1.0f;
    out[threadIdx.x] = x + (float)threadIdx.x;
}
KERNEL_BUG(full_mask_in_a_branch, "all") { shuffle_in_branch<<<1, N>>>(result, bug); }

static __global__ void shuffle_after_return(float* out, int32_t n) {
    int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    out[i] = (float)i + __shfl_sync(0xffffffffu, 0.0f, 0);
    if (i + 32 >= n && i + 32 < N) out[i + 32] = (float)(i + 32);
}
KERNEL_BUG(full_mask_after_return, "all") {
    cudaMemcpy(result, numbers, N * sizeof(float), cudaMemcpyDeviceToDevice);
    shuffle_after_return<<<1, N>>>(result, bug ? N - 10 : N - 32);
}

static __global__ void shuffle_outside(float* out, int32_t distance) {
    float x = 0.0f;
    if (threadIdx.x % 32 < 16) x = __shfl_xor_sync(0x0000ffffu, 1.0f, distance) - 1.0f;
    out[threadIdx.x] = x + (float)threadIdx.x;
}
KERNEL_BUG(shuffle_from_outside_the_mask, "all") { shuffle_outside<<<1, N>>>(result, bug ? 16 : 8); }

static __global__ void not_in_mask(float* out, uint32_t mask) {
    if (threadIdx.x % 32 < 17) mask = __ballot_sync(mask, 1);
    out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(lane_not_in_its_mask, "all") { not_in_mask<<<1, N>>>(result, bug ? 0xffffu : 0x1ffffu); }

// Lanes of one warp shuffle at two lines of the source, as if they were one operation.
static __global__ void two_shuffles(float* out, bool bug) {
    float x;
    if (bug && threadIdx.x % 2) x = __shfl_xor_sync(0xffffffffu, 0.0f, 2);
    else x = __shfl_xor_sync(0xffffffffu, 0.0f, 2);
    out[threadIdx.x] = x + (float)threadIdx.x;
}
KERNEL_BUG(two_different_shuffles, "all") { two_shuffles<<<1, N>>>(result, bug); }

// ------------------------------------------------------------------------------------------------
// Asynchronous copies

static __device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
static __device__ inline void copy_4(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(to)), "l"(from) : "memory");
}
static __device__ inline void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int PENDING>
static __device__ inline void copy_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory"); }

static __global__ void copy_no_wait(float* out, const float* in, bool bug) {
    __shared__ float s[N];
    uint32_t i = threadIdx.x;
    copy_4(&s[i], in + i);
    copy_commit();
    if (!bug) copy_wait<0>();
    __syncthreads();
    out[i] = s[i];
    copy_wait<0>();
}
KERNEL_BUG(cp_async_never_waited_for, "forward reverse random race") { copy_no_wait<<<1, N>>>(result, numbers, bug); }

// A pipeline of two stages. bug 1: waits for one group too few. bug 2: refills a stage that others still read.
static __global__ void pipeline(float* out, const float* in, int32_t bug) {
    __shared__ float s[2][64];
    uint32_t i = threadIdx.x;
    float sum = 0.0f;
    copy_4(&s[0][i], in + i);
    copy_commit();
    for (int32_t t = 0; t < 4; t++) {
        if (t < 3) copy_4(&s[(t + 1) % 2][i], in + (t + 1) * 16 + i);
        copy_commit();
        if (bug == 1) copy_wait<2>();
        else copy_wait<1>();
        __syncthreads();
        sum += s[t % 2][63 - i];
        if (bug != 2) __syncthreads();
    }
    // Round t adds 16 t + 63 - i.
    out[i] = (float)i + sum - (348.0f - 4.0f * (float)i);
    out[64 + i] = (float)(64 + i);
}
KERNEL_BUG(cp_async_one_group_too_few, "forward reverse random race") {
    pipeline<<<1, 64>>>(result, numbers, bug ? 1 : 0);
}
KERNEL_BUG(cp_async_into_stage_in_use, "early race") { pipeline<<<1, 64>>>(result, numbers, bug ? 2 : 0); }

static __global__ void copy_16(float* out, const float* in, uint32_t offset, uint32_t size) {
    __shared__ __align__(16) float s[N + 4];
    uint32_t i = 4 * threadIdx.x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(&s[i + offset])), "l"(in + i),
                 "r"(size)
                 : "memory");
    copy_commit();
    copy_wait<0>();
    for (uint32_t k = 0; k < 4; k++) out[i + k] = s[i + offset + k];
}
KERNEL_BUG(cp_async_misaligned, "all") { copy_16<<<1, N / 4>>>(result, numbers, bug ? 2 : 0, 16); }

// The array ends 1 float after a multiple of 4; what follows must be filled with zeros, not read.
static __global__ void copy_tail(float* out, const float* in, int32_t n, bool bug) {
    __shared__ __align__(16) float s[N];
    int32_t i = 4 * (int32_t)threadIdx.x, left = (n - i) * 4, size = left <= 0 ? 0 : left < 16 ? left : 16;
    if (bug && size > 0) size = 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(&s[i])),
                 "l"(size > 0 ? in + i : in), "r"(size)
                 : "memory");
    copy_commit();
    copy_wait<0>();
    for (int32_t k = 0; k < 4; k++) out[i + k] = i + k < n ? s[i + k] : (float)(i + k);
}
KERNEL_BUG(cp_async_reads_past_the_end, "asan") {
    enum { SHORT = 97 };
    float* part = NULL;
    if (cudaMalloc((void**)&part, SHORT * sizeof(float)) != cudaSuccess) return;
    cudaMemcpy(part, numbers, SHORT * sizeof(float), cudaMemcpyDeviceToDevice);
    copy_tail<<<1, N / 4>>>(result, part, SHORT, bug);
    cudaFree(part);
}

static __global__ void not_shared(float* out, const float* in, bool bug) {
    __shared__ float s[N];
    uint32_t i = threadIdx.x, address = shared_address(bug ? (const float*)out + i : s + i);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(address), "l"(in + i) : "memory");
    copy_commit();
    copy_wait<0>();
    out[i] = s[i];
}
KERNEL_BUG(global_address_as_shared, "all") { not_shared<<<1, N>>>(result, numbers, bug); }

// ------------------------------------------------------------------------------------------------
// Tensor cores

static __global__ void ldmatrix_misaligned(float* out, uint32_t stride) {
    __shared__ __align__(16) uint16_t s[32 * 12];
    uint32_t i = threadIdx.x, r;
    for (uint32_t k = i; k < 32 * 12; k += 32) s[k] = 7;
    __syncwarp();
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(r)
                 : "r"(shared_address(s + i % 8 * stride))
                 : "memory");
    for (uint32_t k = i; k < N; k += 32) out[k] = (float)k + (float)(r & 0xffff) - 7.0f;
}
KERNEL_BUG(ldmatrix_misaligned, "all") { ldmatrix_misaligned<<<1, 32>>>(result, bug ? 12 : 8); }

// c = 0 + a b with a = b = 1 in bf16: 16 in each place.
static __device__ inline void mma(float (&c)[4], bool forgets) {
    uint32_t ones = 0x3f803f80u;
    if (forgets)  // adds to what happens to be in the registers
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};\n"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(ones));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(ones));
}

static __global__ void mma_operands(float* out, bool bug) {
    float c[4] = {0, 0, 0, 0};
    mma(c, bug);
    out[threadIdx.x] = (float)threadIdx.x + c[0] - 16.0f + c[3] - 16.0f;
}
KERNEL_BUG(mma_adds_to_an_output, "all") { mma_operands<<<1, N>>>(result, bug); }

static __global__ void mma_divergent(float* out, int32_t lanes) {
    float c[4] = {16, 0, 0, 16};
    if ((int32_t)threadIdx.x % 32 < lanes) {
        c[0] = c[3] = 0.0f;
        mma(c, false);
    }
    out[threadIdx.x] = (float)threadIdx.x + c[0] - 16.0f + c[3] - 16.0f;
}
KERNEL_BUG(mma_without_one_lane, "all") { mma_divergent<<<1, N>>>(result, bug ? 31 : 32); }

// ------------------------------------------------------------------------------------------------
// Launches

template <int WHICH>
static __global__ void with_dynamic(float* out) {
    extern __shared__ float s[];
    s[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = s[threadIdx.x];
}
// The permission is each kernel's own.
KERNEL_BUG(shared_memory_not_asked_for, "all") {
    enum { BYTES = 96 << 10 };
    cudaFuncSetAttribute(with_dynamic<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (bug) with_dynamic<1><<<1, N, BYTES>>>(result);
    else with_dynamic<0><<<1, N, BYTES>>>(result);
}

static __global__ void numbered(float* out) {
    if (threadIdx.x < N) out[threadIdx.x] = (float)threadIdx.x;
}
KERNEL_BUG(too_many_threads, "all") { numbered<<<1, bug ? 1056 : 1024>>>(result); }

template <int THREADS>
static __global__ void __launch_bounds__(THREADS / 2 * 2, 1) bounded(float* out, int32_t n) {
    int32_t i = (int32_t)threadIdx.x;
    if (i < n) out[i] = (float)i;
}
KERNEL_BUG(more_threads_than_launch_bounds, "all") { bounded<N><<<1, bug ? N + 32 : N>>>(result, N); }

// An allowance is for dynamic shared memory; static memory comes on top, as long as the device has room for both.
template <int WHICH>
static __global__ void static_and_dynamic(float* out) {
    extern __shared__ float s[];
    __shared__ float more[N];
    more[threadIdx.x] = (float)threadIdx.x;
    s[threadIdx.x] = more[threadIdx.x];
    out[threadIdx.x] = s[threadIdx.x];
}
KERNEL_BUG(static_shared_memory_beside_dynamic, "all") {
    enum { BYTES = 48 << 10 };
    if (good) cudaFuncSetAttribute(static_and_dynamic<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    static_and_dynamic<0><<<1, N, BYTES>>>(result);  // within 48 KiB, but for the static part
}

KERNEL_BUG(no_room_for_static_shared_memory, "all") {
    int all = 0;
    cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    int bytes = bug ? all : all - N * (int)sizeof(float);
    cudaFuncSetAttribute(static_and_dynamic<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    static_and_dynamic<1><<<1, N, (size_t)bytes>>>(result);
}
KERNEL_BUG(empty_grid, "all") { numbered<<<bug ? 0 : 1, N>>>(result); }

// ------------------------------------------------------------------------------------------------

// Whether the result is 0, 1, 2 ...
static bool run(const Bug& b, bool bug) {
    float host[N];
    for (int i = 0; i < N; i++) host[i] = (float)i;
    if (cudaMalloc((void**)&result, sizeof host) != cudaSuccess ||
        cudaMalloc((void**)&numbers, sizeof host) != cudaSuccess)
        return false;
    cudaMemcpy(numbers, host, sizeof host, cudaMemcpyHostToDevice);
    b.run(bug, !bug);
    bool right = cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
    right = cudaMemcpy(host, result, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess && right;
    for (int i = 0; i < N; i++) right = right && host[i] == (float)i;
    cudaFree(result);
    cudaFree(numbers);
    return right;
}

int main(int argc, char** argv) { return bugs_main(argc, argv, run); }
