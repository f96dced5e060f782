// test_runtime.cu: the runtime API, in the emulator and on a GPU. test.sh runs it in every mode.
//
//   1. types         conversions and arithmetic in 16 bits
//   2. memory        allocations of all kinds, copies, errors
//   3. streams       order within and between them
//   4. events
//   5. device        properties, attributes, limits
//   6. held work     what the emulator's delayed streams do, and when
//
// Sections 1 to 5 hold for every implementation of CUDA.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "dev/test/harness.h"

#include <thread>

#define EXPECT(condition) check(condition, "line %d: %s", __LINE__, #condition)
#define OK(call) EXPECT((call) == cudaSuccess)

#include "buffers.h"

static __global__ void count_shared(float* out, int count) {
    extern __shared__ float shared[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = (float)i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = shared[count - 1];
}

// ------------------------------------------------------------------------------------------------
// 1. Types

static void test_types(void) {
    bool bf16_same = true, f16_same = true, bf16_back = true, f16_back = true;
    const uint32_t stride = 4099;  // prime: about a million floats of every size and ending
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += stride) {
        float x = float_from_bits((uint32_t)bits);
        unsigned short bf16 = __bfloat16_as_ushort(__float2bfloat16_rn(x)), f16 = __half_as_ushort(__float2half_rn(x));
        bf16_same = bf16_same && bf16 == (x != x ? 0x7fff : bf16_from_float(x));
        f16_same = f16_same && f16 == (x != x ? 0x7fff : f16_from_float(x));
    }
    for (uint32_t bits = 0; bits < 1 << 16; bits++) {
        float x = __bfloat162float(__ushort_as_bfloat16((unsigned short)bits)), y = float_from_bf16((uint16_t)bits);
        bf16_back = bf16_back && (y != y ? x != x : bits_from_float(x) == bits_from_float(y));
        x = __half2float(__ushort_as_half((unsigned short)bits));
        y = float_from_f16((uint16_t)bits);
        f16_back = f16_back && (y != y ? x != x : bits_from_float(x) == bits_from_float(y));
    }
    EXPECT(bf16_same);
    EXPECT(f16_same);
    EXPECT(bf16_back);
    EXPECT(f16_back);

    bool sums = true, products = true, quotients = true, orders = true;
    for (uint32_t i = 1; i < 1000; i++) {
        uint16_t a = bf16_from_float((float)(i * i) / 7.0f - 900.0f), b = bf16_from_float(500.0f / (float)i - 3.0f);
        float fa = float_from_bf16(a), fb = float_from_bf16(b);
        __nv_bfloat16 x = __ushort_as_bfloat16(a), y = __ushort_as_bfloat16(b);
        sums = sums && __bfloat16_as_ushort(x + y) == bf16_from_float(fa + fb);
        products = products && __bfloat16_as_ushort(x * y) == bf16_from_float(fa * fb);
        quotients = quotients && (fb == 0 || __bfloat16_as_ushort(x / y) == bf16_from_float(fa / fb));
        orders = orders && (x < y) == (fa < fb) && (x == y) == (fa == fb) && (x >= y) == (fa >= fb);
    }
    EXPECT(sums);
    EXPECT(products);
    EXPECT(quotients);
    EXPECT(orders);

    __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
    float2 back = __bfloat1622float2(pair);
    EXPECT(back.x == 1.5f && back.y == -2.0f);
    EXPECT(__low2float(pair) == 1.5f && __high2float(pair) == -2.0f);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    EXPECT(word == 0xc0003fc0u);  // x in the low half
    __half2 halves = __floats2half2_rn(1.5f, -2.0f);
    memcpy(&word, &halves, sizeof word);
    EXPECT(word == 0xc0003e00u);
    EXPECT(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(uint2) == 8 && sizeof(float3) == 12);
    EXPECT(alignof(__nv_bfloat162) == 4 && alignof(__half2) == 4 && sizeof(__half) == 2);
    dim3 grid(5, 2);
    EXPECT(grid.x == 5 && grid.y == 2 && grid.z == 1);
}

// ------------------------------------------------------------------------------------------------
// 2. Memory

static void test_memory(void) {
    static float numbers[N], back[N];
    for (int i = 0; i < N; i++) numbers[i] = (float)i;
    size_t free_before, free_after, total;
    OK(cudaMemGetInfo(&free_before, &total));
    EXPECT(free_before <= total);
    buffers_make();
    EXPECT((uintptr_t)a % 256 == 0 && (uintptr_t)b % 256 == 0);

    OK(cudaMemcpy(a, numbers, BYTES, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(b, a, BYTES, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(back, b, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(memcmp(numbers, back, BYTES) == 0);
    OK(cudaMemset(b, 0, BYTES));
    OK(cudaMemcpy(b + 10, a + 500, 3 * sizeof(float), cudaMemcpyDefault));
    OK(cudaMemcpy(back, b, BYTES, cudaMemcpyDefault));
    EXPECT(back[9] == 0 && back[10] == 500 && back[12] == 502 && back[13] == 0);
    OK(cudaMemcpy(host, numbers, BYTES, cudaMemcpyHostToHost));
    OK(cudaMemcpy(a, host, BYTES, cudaMemcpyHostToDevice));
    memset(host, 0, BYTES);
    OK(cudaMemcpy(host, a, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(memcmp(numbers, host, BYTES) == 0);
    OK(cudaMemset((char*)a + 3, 0x11, 2));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(((unsigned char*)back)[3] == 0x11 && ((unsigned char*)back)[4] == 0x11 && back[2] == 2);
    OK(cudaMemcpy(a, numbers, 0, cudaMemcpyHostToDevice));
    OK(cudaMemset(a, 0, 0));

    fill<<<GRID, BLOCK>>>(host, 7);  // the device reaches pinned memory
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
    EXPECT(all_are(host, 7));

    struct cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, a + 5));
    EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == a + 5);
    OK(cudaPointerGetAttributes(&attributes, host));
    EXPECT(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == host);
    OK(cudaPointerGetAttributes(&attributes, numbers));
    EXPECT(attributes.type == cudaMemoryTypeUnregistered);

    void* none = a;
    EXPECT(cudaMalloc(&none, (size_t)1 << 60) == cudaErrorMemoryAllocation);
    EXPECT(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    EXPECT(cudaGetLastError() == cudaErrorMemoryAllocation);
    EXPECT(cudaGetLastError() == cudaSuccess);
    EXPECT(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") == 0);
    EXPECT(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
    EXPECT(strcmp(cudaGetErrorString(cudaSuccess), "no error") == 0);

    OK(cudaFree(nullptr));
    OK(cudaFreeHost(nullptr));
    buffers_free();
    OK(cudaMemGetInfo(&free_after, &total));
    EXPECT(free_after == free_before);
}

// ------------------------------------------------------------------------------------------------
// 3. Streams

// Digits appended by host functions.
static int trace;
static void append_digit(void* digit) { trace = trace * 10 + (int)(intptr_t)digit; }
static void trace_in(cudaStream_t in, intptr_t digit) { OK(cudaLaunchHostFunc(in, append_digit, (void*)digit)); }

// A query finally reports completion, and never before it is true.
template <class Query>
static void expect_done_at_last(Query query) {
    cudaError_t state = query();
    while (state == cudaErrorNotReady) state = query();
    EXPECT(state == cudaSuccess && trace == 1);
    (void)cudaGetLastError();  // "not ready" may have been recorded as an error
}

// Each of two host threads drives its own stream.
static void use_stream(float* device, float value, bool* right) {
    cudaStream_t stream;
    float* pinned;
    *right = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
    *right = *right && cudaMallocHost(&pinned, BYTES) == cudaSuccess;
    for (int i = 0; *right && i < 20; i++) {
        fill<<<GRID, BLOCK, 0, stream>>>(device, value + (float)i);
        *right = cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, stream) == cudaSuccess;
        *right = *right && cudaStreamSynchronize(stream) == cudaSuccess && all_are(pinned, value + (float)i);
    }
    *right = *right && cudaFreeHost(pinned) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess;
}

static void test_streams(void) {
    static float pageable[N];
    cudaStream_t blocking;
    buffers_make();
    OK(cudaStreamCreate(&blocking));
    EXPECT(cudaStreamCreateWithFlags(&blocking, 77) == cudaErrorInvalidValue);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);

    // Within a stream.
    OK(cudaMemsetAsync(a, 0, BYTES, s));
    for (int i = 0; i < 10; i++) vector_add<<<GRID, BLOCK, 0, s>>>(a, a, 1);
    OK(cudaMemcpyAsync(b, a, BYTES, cudaMemcpyDeviceToDevice, s));
    vector_add<<<GRID, BLOCK, 0, s>>>(a, b, 5);
    OK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    EXPECT(all_are(host, 15));

    // A pageable source may change once the call has returned.
    set_all(pageable, 1);
    OK(cudaMemcpyAsync(a, pageable, BYTES, cudaMemcpyHostToDevice, s));
    set_all(pageable, 2);
    OK(cudaStreamSynchronize(s));
    EXPECT(device_is(a, 1));

    // Halves of one pinned buffer in turn: the host may fill one while the other is read.
    for (int i = 0; i < 4; i++) {
        float* half = host + (i % 2) * (N / 2);
        for (int j = 0; j < N / 2; j++) half[j] = (float)i;
        OK(cudaMemcpyAsync(a + (i % 2) * (N / 2), half, BYTES / 2, cudaMemcpyHostToDevice, s));
        if (i % 2 == 1) OK(cudaStreamSynchronize(s));
    }
    OK(cudaMemcpy(pageable, a, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(pageable[0] == 2 && pageable[N / 2 - 1] == 2 && pageable[N / 2] == 3 && pageable[N - 1] == 3);

    // The default stream and those that synchronize with it.
    fill<<<GRID, BLOCK, 0, blocking>>>(a, 3);
    vector_add<<<GRID, BLOCK>>>(b, a, 1);
    vector_add<<<GRID, BLOCK, 0, blocking>>>(a, b, 1);
    OK(cudaMemset(b, 0, BYTES));
    OK(cudaStreamSynchronize(blocking));
    EXPECT(device_is(a, 5));
    EXPECT(device_is(b, 0));
    fill<<<GRID, BLOCK, 0, blocking>>>(a, 6);
    OK(cudaMemcpy(pageable, a, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(all_are(pageable, 6));

    // Functions of the host.
    trace = 0;
    trace_in(s, 1);
    trace_in(s, 2);
    trace_in(s, 3);
    OK(cudaStreamSynchronize(s));
    EXPECT(trace == 123);

    trace = 0;
    trace_in(s, 1);
    expect_done_at_last([] { return cudaStreamQuery(s); });

    // A destroyed stream finishes its work.
    fill<<<GRID, BLOCK, 0, t>>>(a, 8);
    OK(cudaStreamDestroy(t));
    t = NULL;
    OK(cudaDeviceSynchronize());
    EXPECT(device_is(a, 8));

    bool right[2] = {false, false};
    std::thread one(use_stream, a, 100.0f, &right[0]), two(use_stream, b, 200.0f, &right[1]);
    one.join();
    two.join();
    EXPECT(right[0] && right[1]);
    OK(cudaStreamDestroy(blocking));
    buffers_free();
}

// ------------------------------------------------------------------------------------------------
// 4. Events

static void test_events(void) {
    float milliseconds = -1;
    cudaEvent_t made, used;
    buffers_make();
    OK(cudaEventCreate(&made));
    OK(cudaEventCreate(&used));

    // An event that was never recorded delays nothing, and has no time.
    OK(cudaEventQuery(made));
    OK(cudaEventSynchronize(made));
    OK(cudaStreamWaitEvent(t, made, 0));
    EXPECT(cudaEventElapsedTime(&milliseconds, made, used) == cudaErrorInvalidResourceHandle);
    EXPECT(cudaGetLastError() == cudaErrorInvalidResourceHandle);

    // Ping-pong: each stream waits for the other.
    OK(cudaMemsetAsync(a, 0, BYTES, s));
    for (int i = 0; i < 5; i++) {
        vector_add<<<GRID, BLOCK, 0, s>>>(a, a, 1);
        OK(cudaEventRecord(made, s));
        OK(cudaStreamWaitEvent(t, made, 0));
        vector_add<<<GRID, BLOCK, 0, t>>>(b, a, 0.5f);
        OK(cudaEventRecord(used, t));
        OK(cudaStreamWaitEvent(s, used, 0));
    }
    OK(cudaStreamSynchronize(t));
    EXPECT(device_is(b, 5.5f));
    OK(cudaStreamSynchronize(s));
    OK(cudaEventElapsedTime(&milliseconds, made, used));
    EXPECT(milliseconds >= 0);

    // A wait is for the latest recording at the time of the call.
    fill<<<GRID, BLOCK, 0, s>>>(a, 1);
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaEventRecord(e, t));
    vector_add<<<GRID, BLOCK, 0, t>>>(b, a, 1);
    OK(cudaStreamSynchronize(t));
    EXPECT(device_is(b, 2));
    OK(cudaEventSynchronize(e));
    EXPECT(cudaEventElapsedTime(&milliseconds, e, made) == cudaErrorInvalidResourceHandle);
    (void)cudaGetLastError();

    // An event may be destroyed while it is waited for.
    fill<<<GRID, BLOCK, 0, s>>>(a, 4);
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaEventDestroy(e));
    e = NULL;
    vector_add<<<GRID, BLOCK, 0, t>>>(b, a, 1);
    OK(cudaStreamSynchronize(t));
    EXPECT(device_is(b, 5));

    trace = 0;
    trace_in(s, 1);
    OK(cudaEventRecord(made, s));
    expect_done_at_last([made] { return cudaEventQuery(made); });

    OK(cudaDeviceSynchronize());
    OK(cudaEventDestroy(made));
    OK(cudaEventDestroy(used));
    buffers_free();
}

// ------------------------------------------------------------------------------------------------
// 5. Device

static void test_device(void) {
    int count = 0, device = -1, value = 0;
    OK(cudaGetDeviceCount(&count));
    EXPECT(count >= 1);
    OK(cudaSetDevice(0));
    OK(cudaGetDevice(&device));
    EXPECT(device == 0);
    EXPECT(cudaSetDevice(-1) == cudaErrorInvalidDevice);
    EXPECT(cudaGetLastError() == cudaErrorInvalidDevice);

    struct cudaDeviceProp properties;
    OK(cudaGetDeviceProperties(&properties, 0));
    EXPECT(properties.name[0] && properties.major >= 7 && properties.warpSize == 32);
    EXPECT(properties.totalGlobalMem > (size_t)1 << 30 && properties.maxThreadsPerBlock == 1024);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    EXPECT(value == properties.multiProcessorCount && value > 0);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    EXPECT(value == (int)properties.sharedMemPerBlockOptin && value > 48 << 10);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
    EXPECT(value == (int)properties.sharedMemPerMultiprocessor);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    EXPECT(value == properties.major);

    char bus[20] = "";
    OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    EXPECT(strlen(bus) == strlen("0000:00:1e.0") && bus[4] == ':' && bus[7] == ':' && bus[10] == '.');
    EXPECT(cudaDeviceGetPCIBusId(bus, sizeof bus, -1) != cudaSuccess);
    cudaGetLastError();

    // More shared memory than a launch has without asking.
    buffers_make();
    int limit = (int)properties.sharedMemPerBlockOptin, floats = (60 << 10) / (int)sizeof(float);
    EXPECT(cudaFuncSetAttribute(count_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1) ==
           cudaErrorInvalidValue);
    (void)cudaGetLastError();
    OK(cudaFuncSetAttribute(count_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10));
    count_shared<<<1, 128, 60 << 10>>>(a, floats);
    OK(cudaGetLastError());
    float last = 0;
    OK(cudaMemcpy(&last, a, sizeof last, cudaMemcpyDeviceToHost));
    EXPECT(last == (float)(floats - 1));
    int blocks = 0;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, count_shared, 128, 60 << 10));
    EXPECT(blocks >= 1 && blocks <= (int)properties.sharedMemPerMultiprocessor / (60 << 10));
    buffers_free();
}

// ------------------------------------------------------------------------------------------------
// 6. Held work

#ifdef EMULATED
static void test_held_work(void) {
    cudaEvent_t mark;
    buffers_make();
    OK(cudaEventCreate(&mark));
    bool delayed = emulator::modes.delayed_streams, ahead = emulator::modes.others_ahead;

    float first = 0;
    OK(cudaMemcpy(&first, a, sizeof first, cudaMemcpyDeviceToHost));
    EXPECT((first != first) == emulator::modes.poison);  // new memory is all NaN, or all zeros

    // Nothing runs before something waits; then the other stream's work runs only in its turn.
    trace = 0;
    trace_in(s, 1);
    OK(cudaEventRecord(mark, s));
    trace_in(s, 2);
    trace_in(t, 3);
    EXPECT(trace == (delayed ? 0 : 123));
    OK(cudaEventSynchronize(mark));
    EXPECT(trace == (!delayed ? 123 : ahead ? 31 : 1));
    OK(cudaStreamSynchronize(t));
    EXPECT(trace == (!delayed ? 123 : ahead ? 31 : 13));  // t had nothing left in the former case
    OK(cudaStreamSynchronize(s));
    EXPECT(trace == (!delayed ? 123 : ahead ? 312 : 132));

    // Waiting for the device: the stream with the latest work runs first.
    trace = 0;
    trace_in(s, 1);
    trace_in(t, 2);
    OK(cudaDeviceSynchronize());
    EXPECT(trace == (delayed ? 21 : 12));

    // A query fails three times.
    trace_in(s, 1);
    for (int i = 0; i < 3; i++) EXPECT(cudaStreamQuery(s) == (delayed ? cudaErrorNotReady : cudaSuccess));
    EXPECT(cudaGetLastError() == (delayed ? cudaErrorNotReady : cudaSuccess));
    OK(cudaStreamQuery(s));

    // The time of an event that has not happened yet.
    float milliseconds;
    OK(cudaEventRecord(mark, s));
    EXPECT(cudaEventElapsedTime(&milliseconds, mark, mark) == (delayed ? cudaErrorNotReady : cudaSuccess));
    (void)cudaGetLastError();
    OK(cudaEventSynchronize(mark));
    OK(cudaEventElapsedTime(&milliseconds, mark, mark));

    // cudaMemset and copies within the device do not wait.
    OK(cudaMemset(a, 0, BYTES));
    fill<<<GRID, BLOCK, 0, s>>>(b, 1);
    vector_add<<<GRID, BLOCK, 0, s>>>(b, a, 1);
    OK(cudaStreamSynchronize(s));
    OK(cudaDeviceSynchronize());
    if (emulator::modes.poison) EXPECT(device_is(b, 1) == (!delayed || ahead));

    OK(cudaEventDestroy(mark));
    buffers_free();
}
#endif

int main(void) {
    tests_begin("test_runtime");
    test_types();
    test_memory();
    test_streams();
    test_events();
    test_device();
#ifdef EMULATED
    test_held_work();
#endif
    return tests_end();
}
