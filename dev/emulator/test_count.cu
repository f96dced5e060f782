// test_count.cu: kernels whose use of memory is known, for count.h. Behind each line that touches memory stands what
// must be counted there, after a colon: space, kind, requests, sectors or wavefronts, ideal. test.sh compares the file
// that EMULATE_COUNT names with these comments, in both directions.
//
// Each kernel runs once, by one warp, unless its launch says otherwise; out and in have N floats.

#include <cuda_runtime.h>

#include <stdint.h>
#include <stdio.h>

enum { N = 4096, LANES = 32 };

// ------------------------------------------------------------------------------------------------
// Global memory

static __global__ void four_bytes(float* out, const float* in) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];  //: global load 4 16 16, global store 4 16 16
}

static __global__ void eight_bytes(float2* out, const float2* in) {
    out[threadIdx.x] = in[threadIdx.x];  //: global load 1 8 8, global store 1 8 8
}

static __global__ void sixteen_bytes(float4* out, const float4* in) {
    float4 x = in[threadIdx.x];  //: global load 1 16 16
    x.x += x.y * x.z + x.w;
    out[threadIdx.x] = x;  //: global store 1 16 16
}

// As two loads of 16 bytes, which take half of each sector that they touch.
struct alignas(16) Eight {
    float x[8];
};
static __global__ void thirty_two_bytes(float* out, const float* in) {
    Eight eight = ((const Eight*)in)[threadIdx.x];  //: global load 2 64 32
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += eight.x[i];
    out[threadIdx.x] = sum;  //: global store 1 4 4
}

static __global__ void one_for_all(float* out, const float* in) {
    out[threadIdx.x] = in[7];  //: global load 1 1 1, global store 1 4 4
}

static __global__ void uncoalesced_load(float* out, const float* in) {
    out[threadIdx.x] = in[64 * threadIdx.x];  //: global load 1 32 4, global store 1 4 4
}

static __global__ void strided_store(float* out, const float* in) {
    out[2 * threadIdx.x] = in[threadIdx.x];  //: global load 1 4 4, global store 1 8 4
}

static __global__ void misaligned(float* out, const float* in) {
    out[threadIdx.x] = in[threadIdx.x + 1];  //: global load 1 5 4, global store 1 4 4
}

// 16 bytes of a lane in four stores of 4: each touches all 16 sectors.
static __global__ void split_store(float* out, const float4* in) {
    float4 x = in[threadIdx.x];  //: global load 1 16 16
    const float parts[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = parts[i];  //: global store 4 64 16
}

static __global__ void some_lanes(float* out, const float* in) {
    if (threadIdx.x < 20) out[threadIdx.x] = in[threadIdx.x];  //: global load 1 3 3, global store 1 3 3
}

// Lane i sums i + 1 numbers, of columns; the last row is whole in no lane's n-th access but the first.
static __global__ void lanes_leave(float* out, const float* in) {
    float sum = 0.0f;
    for (unsigned i = 0; i <= threadIdx.x / 8; i++) sum += in[LANES * i + threadIdx.x];  //: global load 4 10 10
    out[threadIdx.x] = sum;  //: global store 1 4 4
}

// A lane that is left out of one turn is not taken for one of the turn before: the shuffle brings them together.
static __global__ void lanes_skip(float* out, const float* in) {
    float sum = 0.0f;
    for (unsigned i = 0; i < 4; i++) {
        if (i != threadIdx.x % 4) sum += in[LANES * i + threadIdx.x];  //: global load 4 16 12
        sum = __shfl_xor_sync(0xffffffffu, sum, 1);
    }
    out[threadIdx.x] = sum;  //: global store 1 4 4
}

// More turns than a lane may be ahead of the others.
static __global__ void many_turns(float* out, const float* in) {
    float sum = 0.0f;
    for (unsigned i = 0; i < 10000; i++) sum += in[i % 64 * LANES + threadIdx.x];  //: global load 10000 40000 40000
    out[threadIdx.x] = sum;  //: global store 1 4 4
}

static __global__ void atomics(float* out) {
    atomicAdd(out + threadIdx.x, 1.0f);  //: global atomic 1 4 4
}

// ------------------------------------------------------------------------------------------------
// Shared memory

static __global__ void two_way(float* out) {
    __shared__ float s[2 * LANES];
    s[threadIdx.x] = s[threadIdx.x + LANES] = 1.0f;  //: shared store 2 2 2
    __syncthreads();
    out[threadIdx.x] = s[2 * threadIdx.x];  //: shared load 1 2 1, global store 1 4 4
}

static __global__ void eight_way(float* out) {
    __shared__ float s[8 * LANES];
    s[8 * threadIdx.x] = 1.0f;  //: shared store 1 8 1
    __syncthreads();
    out[threadIdx.x] = s[8 * (threadIdx.x ^ 1)];  //: shared load 1 8 1, global store 1 4 4
}

static __global__ void broadcast(float* out) {
    __shared__ float s[LANES];
    s[threadIdx.x] = 1.0f;  //: shared store 1 1 1
    __syncthreads();
    out[threadIdx.x] = s[3] + s[threadIdx.x / 4];  //: shared load 2 2 2, global store 1 4 4
}

enum Padding { DENSE = 32, PADDED = 33 };
template <Padding PITCH>
static __global__ void transpose(float* out, const float* in) {
    __shared__ float tile[LANES][PITCH];
    for (int i = 0; i < LANES; i++)
        tile[i][threadIdx.x] = in[i * LANES + threadIdx.x];  //: shared store 64 64 64, global load 64 256 256
    __syncthreads();
    for (int i = 0; i < LANES; i++) out[i * LANES + threadIdx.x] =  //: global store 64 256 256
        tile[threadIdx.x][i];  //: shared load 64 1056 64
}

static __global__ void vectors(float* out) {
    __shared__ float2 two[LANES];
    __shared__ float4 four[2 * LANES];
    two[threadIdx.x] = make_float2(1.0f, 2.0f);  //: shared store 1 2 2
    four[threadIdx.x] = make_float4(1.0f, 2.0f, 3.0f, 4.0f);  //: shared store 1 4 4
    four[threadIdx.x + LANES] = make_float4(1.0f, 2.0f, 3.0f, 4.0f);  //: shared store 1 4 4
    __syncthreads();
    float2 a = two[threadIdx.x ^ 1];  //: shared load 1 2 2
    float4 b = four[2 * threadIdx.x];  //: shared load 1 8 4
    out[threadIdx.x] = a.x + a.y + b.x + b.y + b.z + b.w;  //: global store 1 4 4
}

// 8 rows of 16 bytes: PITCH bytes apart, or in place r ^ c of each row of 128.
template <int PITCH, bool SWIZZLED>
static __device__ __forceinline__ uint32_t row_address(const void* tile) {
    unsigned row = threadIdx.x % 8, column = threadIdx.x / 8, place = SWIZZLED ? column ^ row : column;
    return (uint32_t)__cvta_generic_to_shared((const char*)tile + row * PITCH + place * 16);
}

template <int PITCH, bool SWIZZLED>
static __device__ __forceinline__ void load_matrices(uint32_t* out, const void* tile) {
    uint32_t a, b, c, d;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row_address<PITCH, SWIZZLED>(tile)));
    *out = a ^ b ^ c ^ d;
}

static __global__ void matrices(uint32_t* out) {
    __shared__ __align__(128) uint32_t s[8 * 36];
    for (unsigned i = threadIdx.x; i < 8 * 36; i += LANES) s[i] = i;  //: shared store 9 9 9
    __syncthreads();
    uint32_t dense, padded, swizzled;
    load_matrices<128, false>(&dense, s);  //: shared ldmatrix 1 32 4
    load_matrices<144, false>(&padded, s);  //: shared ldmatrix 1 4 4
    load_matrices<128, true>(&swizzled, s);  //: shared ldmatrix 1 4 4
    out[threadIdx.x] = dense ^ padded ^ swizzled;  //: global store 1 4 4
}

// The last lanes ask for nothing: their 16 bytes are filled with zeros.
static __device__ void copy_16(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}
static __global__ void async_copies(float* out, const float* in) {
    __shared__ float4 s[2 * LANES];
    copy_16(s + threadIdx.x, in + 4 * threadIdx.x, 16);  //: global cp.async 1 16 16, shared cp.async 1 4 4
    copy_16(s + LANES + threadIdx.x, in + 4 * threadIdx.x,  //: global cp.async 1 8 8, shared cp.async 1 4 4
            threadIdx.x < 16 ? 16 : 0);
    asm volatile("cp.async.wait_all;" ::: "memory");
    out[threadIdx.x] = s[threadIdx.x].x + s[LANES + threadIdx.x].x;  //: shared load 2 8 2, global store 1 4 4
}

static __global__ void shared_atomics(int* out) {
    __shared__ int s[LANES];
    s[threadIdx.x] = 0;  //: shared store 1 1 1
    __syncthreads();
    atomicAdd(s + threadIdx.x / 16, 1);  //: shared atomic 1 16 1
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];  //: shared load 1 1 1, global store 1 4 4
}

int main() {
    float *in = NULL, *out = NULL;
    if (cudaMalloc((void**)&in, N * sizeof(float)) != cudaSuccess ||
        cudaMalloc((void**)&out, N * sizeof(float)) != cudaSuccess)
        return 1;
    cudaMemset(in, 0, N * sizeof(float));
    cudaMemset(out, 0, N * sizeof(float));
    four_bytes<<<2, 2 * LANES>>>(out, in);
    eight_bytes<<<1, LANES>>>((float2*)out, (const float2*)in);
    sixteen_bytes<<<1, LANES>>>((float4*)out, (const float4*)in);
    thirty_two_bytes<<<1, LANES>>>(out, in);
    one_for_all<<<1, LANES>>>(out, in);
    uncoalesced_load<<<1, LANES>>>(out, in);
    strided_store<<<1, LANES>>>(out, in);
    misaligned<<<1, LANES>>>(out, in);
    split_store<<<1, LANES>>>(out, (const float4*)in);
    some_lanes<<<1, LANES>>>(out, in);
    lanes_leave<<<1, LANES>>>(out, in);
    lanes_skip<<<1, LANES>>>(out, in);
    many_turns<<<1, LANES>>>(out, in);
    atomics<<<1, LANES>>>(out);
    two_way<<<1, LANES>>>(out);
    eight_way<<<1, LANES>>>(out);
    broadcast<<<1, LANES>>>(out);
    transpose<DENSE><<<1, LANES>>>(out, in);
    transpose<PADDED><<<1, LANES>>>(out, in);
    vectors<<<1, LANES>>>(out);
    matrices<<<1, LANES>>>((uint32_t*)out);
    async_copies<<<1, LANES>>>(out, in);
    shared_atomics<<<1, LANES>>>((int*)out);
    bool ok = cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
    cudaFree(in);
    cudaFree(out);
    return ok ? 0 : 1;
}
