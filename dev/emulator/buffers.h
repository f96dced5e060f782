// buffers.h: the fixture of test_runtime.cu and runtime_bugs.cu. They define OK(call) first: the reaction to a call of
// the runtime API that does not return cudaSuccess.

#ifndef EMULATOR_BUFFERS_H
#define EMULATOR_BUFFERS_H

#include <cuda_runtime.h>

#define N 1000                       // floats in a buffer: neither a multiple of 256 bytes nor a whole page
#define BYTES (N * sizeof(float))
#define BLOCK 256
#define GRID ((N + BLOCK - 1) / BLOCK)

static float *a, *b, *host, *other;  // two on the device, two in pinned memory, zeroed
static cudaStream_t s, t;            // do not synchronize with the default stream
static cudaEvent_t e, f;             // without times

static __global__ void fill(float* out, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[i] = value;
}

static __global__ void vector_add(float* out, const float* in, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[i] = in[i] + value;
}

static void set_all(float* buffer, float value) {
    for (int i = 0; i < N; i++) buffer[i] = value;
}

static bool all_are(const float* buffer, float value) {
    for (int i = 0; i < N; i++)
        if (buffer[i] != value) return false;
    return true;
}

static bool device_is(const float* device, float value) {
    static float copy[N];
    OK(cudaMemcpy(copy, device, BYTES, cudaMemcpyDeviceToHost));
    return all_are(copy, value);
}

static void buffers_make(void) {
    for (float** device : {&a, &b}) OK(cudaMalloc(device, BYTES));
    for (float** pinned : {&host, &other}) {
        OK(cudaMallocHost(pinned, BYTES));
        set_all(*pinned, 0);
    }
    for (cudaStream_t* stream : {&s, &t}) OK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&e, &f}) OK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

// Pointers and handles freed or destroyed before are NULL.
static void buffers_free(void) {
    for (float* device : {a, b}) OK(cudaFree(device));
    for (float* pinned : {host, other}) OK(cudaFreeHost(pinned));
    for (cudaStream_t stream : {s, t})
        if (stream) OK(cudaStreamDestroy(stream));
    for (cudaEvent_t event : {e, f})
        if (event) OK(cudaEventDestroy(event));
}

#endif  // EMULATOR_BUFFERS_H
