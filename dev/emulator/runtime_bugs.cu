// runtime_bugs.cu: mistakes of host code, planted. The emulator has to notice each, and leave its corrected twin alone.
//
// bugs.h says how to run it. Behind each name stand the mode that must catch it, and whether as a diagnosis or in the
// result:
//
//     now     EMULATE_STREAMS=now: any
//     behind  EMULATE_STREAMS=delayed EMULATE_OTHERS=behind
//     ahead   EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead
//
// test.sh runs them all, each in a process of its own.

#include "bugs.h"

#define N 1000                       // floats in a buffer: neither a multiple of 256 bytes nor a whole page
#define BYTES (N * sizeof(float))
#define BLOCK 256
#define GRID ((N + BLOCK - 1) / BLOCK)

static void check(cudaError_t error, int line) {
    if (error == cudaSuccess) return;
    printf("line %d: %s\n", line, cudaGetErrorString(error));
    exit(1);
}
#define CHECK(call) check(call, __LINE__)

static __global__ void fill(float* out, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[i] = value;
}

static __global__ void add(float* out, const float* in, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[i] = in[i] + value;
}

static __global__ void fill_first(float* out, float value, int count) {
    for (int i = 0; i < count; i++) out[i] = value;
}

// What a bug has made; main frees what it has not freed.
static float *devices[2], *pinneds[2];
static cudaStream_t streams[2];
static cudaEvent_t events[2];
static int device_count, pinned_count, stream_count, event_count;

static float* device_new(void) {
    CHECK(cudaMalloc(&devices[device_count], BYTES));
    return devices[device_count++];
}

static float* pinned_new(float value) {
    float* buffer;
    CHECK(cudaMallocHost(&buffer, BYTES));
    for (int i = 0; i < N; i++) buffer[i] = value;
    return pinneds[pinned_count++] = buffer;
}

static cudaStream_t stream_new(void) {
    CHECK(cudaStreamCreateWithFlags(&streams[stream_count], cudaStreamNonBlocking));
    return streams[stream_count++];
}

static cudaEvent_t event_new(void) {
    CHECK(cudaEventCreateWithFlags(&events[event_count], cudaEventDisableTiming));
    return events[event_count++];
}

static void handles_destroy(void) {
    while (stream_count > 0) CHECK(cudaStreamDestroy(streams[--stream_count]));
    while (event_count > 0) CHECK(cudaEventDestroy(events[--event_count]));
}

// The newest buffer, in time or early.
static void device_free(void) { CHECK(cudaFree(devices[--device_count])); }
static void pinned_free(void) { CHECK(cudaFreeHost(pinneds[--pinned_count])); }

static bool all_are(const float* host, float value) {
    for (int i = 0; i < N; i++)
        if (host[i] != value) return false;
    return true;
}

static bool device_is(const float* device, float value) {
    static float host[N];
    CHECK(cudaMemcpy(host, device, BYTES, cudaMemcpyDeviceToHost));
    return all_are(host, value);
}

// ------------------------------------------------------------------------------------------------
// Between streams

// One stream fills a buffer, another reads it. `device`: at the end all streams are waited for at once, so that the
// order of the two is what matters.
static bool hand_over(bool waits_early, bool records_early, bool waits, bool device) {
    float *a = device_new(), *b = device_new();
    cudaStream_t producer = stream_new(), consumer = stream_new();
    cudaEvent_t made = event_new();
    if (waits_early) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    if (records_early) CHECK(cudaEventRecord(made, producer));
    fill<<<GRID, BLOCK, 0, producer>>>(a, 1);
    if (!records_early) CHECK(cudaEventRecord(made, producer));
    if (waits) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    add<<<GRID, BLOCK, 0, consumer>>>(b, a, 1);
    if (device) CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamSynchronize(consumer));
    CHECK(cudaStreamSynchronize(producer));
    return device_is(b, 2);
}

// The consumer does not wait for the producer.
BUG(no_event_wait, "behind result") { return hand_over(false, false, good, false); }
BUG(no_event_wait_device, "behind result") { return hand_over(false, false, good, true); }
// The event is waited for before it is recorded: such a wait does nothing.
BUG(wait_before_record, "behind result") { return hand_over(bug, false, good, false); }
// The event is recorded before the work that it is to stand for.
BUG(record_too_early, "behind result") { return hand_over(false, bug, true, false); }

// Two batches through one buffer: the second is copied in while the first may still be read.
BUG(input_overwritten, "ahead result") {
    float *input = device_new(), *output = device_new(), *first = pinned_new(1), *second = pinned_new(2);
    cudaStream_t copies = stream_new(), compute = stream_new();
    cudaEvent_t copied = event_new(), used = event_new();
    CHECK(cudaMemcpyAsync(input, first, BYTES, cudaMemcpyHostToDevice, copies));
    CHECK(cudaEventRecord(copied, copies));
    CHECK(cudaStreamWaitEvent(compute, copied, 0));
    add<<<GRID, BLOCK, 0, compute>>>(output, input, 10);
    CHECK(cudaEventRecord(used, compute));
    if (good) CHECK(cudaStreamWaitEvent(copies, used, 0));
    CHECK(cudaMemcpyAsync(input, second, BYTES, cudaMemcpyHostToDevice, copies));
    CHECK(cudaStreamSynchronize(compute));
    CHECK(cudaStreamSynchronize(copies));
    return device_is(output, 11);
}

// cudaMemset does not wait, and a stream that does not synchronise with the default stream may overtake it.
BUG(memset_overtaken, "behind result") {
    float *a = device_new(), *b = device_new();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemset(a, 0, BYTES));
    if (good) CHECK(cudaStreamSynchronize(0));
    add<<<GRID, BLOCK, 0, stream>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(stream));
    return device_is(b, 1);
}

// So may it overtake the last part of a cudaMemcpy from pageable memory.
BUG(upload_overtaken, "behind result") {
    static float ones[N];
    float *a = device_new(), *b = device_new();
    cudaStream_t stream = stream_new();
    for (int i = 0; i < N; i++) ones[i] = 1;
    CHECK(cudaMemcpy(a, ones, BYTES, cudaMemcpyHostToDevice));
    if (good) CHECK(cudaDeviceSynchronize());
    add<<<GRID, BLOCK, 0, stream>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(stream));
    return device_is(b, 2);
}

// ------------------------------------------------------------------------------------------------
// Between the device and the host

static bool read_back(float* host, float value, bool waits) {
    float* a = device_new();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, value);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    if (waits) CHECK(cudaStreamSynchronize(stream));
    bool right = all_are(host, value);
    CHECK(cudaStreamSynchronize(stream));
    return right;
}

static float pageable[N];
BUG(pinned_read_early, "behind diagnosis") { return read_back(pinned_new(0), 1, good); }
// The value that was there before is right by chance.
BUG(pinned_read_early_unchanged, "behind diagnosis") { return read_back(pinned_new(0), 0, good); }
BUG(pageable_read_early, "behind result") { return read_back(pageable, 1, good); }

// One number of many in pinned memory: too little for page protection, so the old value shows.
BUG(pinned_part_read_early, "behind result") {
    float *a = device_new(), *host = pinned_new(0);
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host + 5, a + 5, sizeof(float), cudaMemcpyDeviceToHost, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    bool right = host[5] == 1;
    CHECK(cudaStreamSynchronize(stream));
    return right;
}

// The next batch is written into the buffer while the copy of the last one may still read it.
BUG(pinned_written_early, "behind diagnosis") {
    float *a = device_new(), *host = pinned_new(0);
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < N; i++) host[i] = 1;
    CHECK(cudaStreamSynchronize(stream));
    return device_is(a, 0);
}

// A query is taken for a wait.
BUG(query_for_wait, "behind diagnosis") {
    float *a = device_new(), *host = pinned_new(0);
    cudaStream_t stream = stream_new();
    cudaEvent_t copied = event_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaEventRecord(copied, stream));
    cudaError_t state = cudaEventQuery(copied);
    while (good && state == cudaErrorNotReady) state = cudaEventQuery(copied);
    bool right = all_are(host, 1);
    CHECK(cudaStreamSynchronize(stream));
    return right;
}

// The program ends before its work has.
BUG(never_waited_for, "behind diagnosis") {
    cudaStream_t stream = stream_new();
    CHECK(cudaMemsetAsync(device_new(), 0, BYTES, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    return true;
}

static void call_cuda(void* data) {
    int* device = (int*)data;
    if (*device < 0) CHECK(cudaDeviceSynchronize());
    *device = 1;
}

BUG(call_in_host_function, "now diagnosis") {
    int value = good ? 0 : -1;
    cudaStream_t stream = stream_new();
    CHECK(cudaLaunchHostFunc(stream, call_cuda, &value));
    CHECK(cudaStreamSynchronize(stream));
    return value == 1;
}

// ------------------------------------------------------------------------------------------------
// Memory

BUG(host_reads_device, "now diagnosis") {
    float *a = device_new(), host = 0;
    fill<<<GRID, BLOCK>>>(a, 1);
    CHECK(cudaDeviceSynchronize());
    if (good) CHECK(cudaMemcpy(&host, a + 7, sizeof host, cudaMemcpyDeviceToHost));
    else host = a[7];
    return host == 1;
}

BUG(host_writes_device, "now diagnosis") {
    float *a = device_new(), one = 1;
    CHECK(cudaMemset(a, 0, BYTES));
    if (good) CHECK(cudaMemcpy(a, &one, sizeof one, cudaMemcpyHostToDevice));
    else a[0] = 1;
    CHECK(cudaDeviceSynchronize());
    return true;
}

static void touch_device(void* data) { ((float*)data)[0] = 1; }

BUG(host_function_touches_device, "now diagnosis") {
    float *a = device_new(), *host = pinned_new(0);
    cudaStream_t stream = stream_new();
    CHECK(cudaLaunchHostFunc(stream, touch_device, good ? host : a));
    CHECK(cudaStreamSynchronize(stream));
    return host[0] == 1;
}

BUG(host_pointer_to_kernel, "now diagnosis") {
    float* a = device_new();
    fill<<<GRID, BLOCK>>>(good ? a : pageable, 1);
    CHECK(cudaDeviceSynchronize());
    return good ? device_is(a, 1) : all_are(pageable, 1);
}

static bool write_first(int count) {
    fill_first<<<1, 1>>>(device_new(), 1, count);
    CHECK(cudaDeviceSynchronize());
    return true;
}

// Between the end of the buffer and the next multiple of 256, where no page protection reaches.
BUG(kernel_writes_past_end, "now diagnosis") { return write_first(good ? N : N + 1); }
BUG(kernel_writes_far_past_end, "now diagnosis") { return write_first(good ? N : 100 * N); }

BUG(kernel_after_free, "now diagnosis") {
    float* a = device_new();
    if (bug) device_free();
    fill<<<GRID, BLOCK>>>(a, 1);
    CHECK(cudaDeviceSynchronize());
    return true;
}

BUG(copy_after_free, "now diagnosis") {
    float *a = device_new(), *host = pinned_new(0);
    cudaStream_t stream = stream_new();
    if (bug) device_free();
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    return true;
}

// The memory goes while work that uses it is held.
BUG(free_under_copy, "behind diagnosis") {
    float *b = device_new(), *a = device_new();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(b, a, BYTES, cudaMemcpyDeviceToDevice, stream));
    if (bug) device_free();
    CHECK(cudaStreamSynchronize(stream));
    return true;
}

BUG(free_under_kernel, "behind diagnosis") {
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(device_new(), 1);
    if (bug) device_free();
    CHECK(cudaStreamSynchronize(stream));
    return true;
}

BUG(free_pinned_under_copy, "behind diagnosis") {
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(device_new(), pinned_new(0), BYTES, cudaMemcpyHostToDevice, stream));
    if (bug) pinned_free();
    CHECK(cudaStreamSynchronize(stream));
    return true;
}

BUG(double_free, "now diagnosis") {
    float* a = device_new();
    if (bug) device_free();
    if (bug) CHECK(cudaFree(a));
    return true;
}

BUG(wrong_free, "now diagnosis") {
    float* host = pinned_new(0);
    if (bug) CHECK(cudaFree(host));
    return true;
}

BUG(free_inside, "now diagnosis") {
    float* a = device_new();
    if (bug) CHECK(cudaFree(a + 1));
    return true;
}

BUG(pinned_overrun, "now diagnosis") {
    volatile char* bytes = (volatile char*)pinned_new(0);
    bytes[good ? BYTES - 1 : BYTES] = 1;
    return true;
}

BUG(leak, "now diagnosis") {
    device_new();
    if (bug) device_count = 0;
    return true;
}

BUG(leak_pinned, "now diagnosis") {
    pinned_new(0);
    if (bug) pinned_count = 0;
    return true;
}

BUG(copy_too_long, "now diagnosis") {
    static float host[N + 1];
    CHECK(cudaMemcpy(device_new(), host, good ? BYTES : BYTES + 1, cudaMemcpyHostToDevice));
    return true;
}

BUG(copy_too_long_from_pinned, "now diagnosis") {
    float* host = pinned_new(0);
    CHECK(cudaMalloc(&devices[device_count++], 2 * BYTES));
    CHECK(cudaMemcpy(devices[0], host + N / 2, good ? BYTES / 2 : BYTES, cudaMemcpyHostToDevice));
    return true;
}

BUG(copy_of_wrong_kind, "now diagnosis") {
    float* a = device_new();
    CHECK(cudaMemset(a, 0, BYTES));
    CHECK(cudaMemcpy(pageable, a, BYTES, good ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice));
    return all_are(pageable, 0);
}

BUG(memset_too_long, "now diagnosis") {
    CHECK(cudaMemset(device_new() + 1, 0, good ? BYTES - sizeof(float) : BYTES));
    return true;
}

BUG(memset_of_host, "now diagnosis") {
    float* a = device_new();
    CHECK(cudaMemset(good ? a : pageable, 0, BYTES));
    return true;
}

BUG(never_initialised, "now result") {
    float *a = device_new(), *b = device_new();
    if (good) CHECK(cudaMemset(a, 0, BYTES));
    add<<<GRID, BLOCK>>>(b, a, 0);
    return device_is(b, 0);
}

// ------------------------------------------------------------------------------------------------
// Handles

BUG(stream_after_destroy, "now diagnosis") {
    cudaStream_t stream = stream_new();
    if (bug) handles_destroy();
    CHECK(cudaMemsetAsync(device_new(), 0, BYTES, stream));
    CHECK(cudaDeviceSynchronize());
    return true;
}

BUG(event_after_destroy, "now diagnosis") {
    cudaEvent_t event = event_new();
    if (bug) handles_destroy();
    CHECK(cudaEventRecord(event, 0));
    CHECK(cudaDeviceSynchronize());
    return true;
}

// ------------------------------------------------------------------------------------------------

static bool run(const Bug& b, bool bug) {
    bool right = b.run(bug, !bug);
    while (device_count > 0) device_free();
    while (pinned_count > 0) pinned_free();
    handles_destroy();
    return right;
}

int main(int argc, char** argv) { return bugs_main(argc, argv, run); }
