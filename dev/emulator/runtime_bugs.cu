// runtime_bugs.cu: mistakes of host code, planted. The emulator has to notice each, and leave its corrected twin alone.
//
//     runtime_bugs --list        number, name, the mode that must catch it and how, one per line
//     runtime_bugs NUMBER        makes the mistake
//     runtime_bugs NUMBER good   does the same correctly
//
// Exit status: 0 nothing noticed, 1 the result is wrong, 86 a diagnosis. Modes:
//     now     EMULATE_STREAMS=now: any
//     behind  EMULATE_STREAMS=delayed EMULATE_OTHERS=behind
//     ahead   EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead
//
// test_runtime.sh runs them all.

#include <cuda_runtime.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N 1000                       // floats in a buffer: neither a multiple of 256 bytes nor a whole page
#define BYTES (N * sizeof(float))

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

#define BLOCK 256
#define GRID ((N + BLOCK - 1) / BLOCK)

static float* device_buffer(void) {
    float* buffer;
    CHECK(cudaMalloc(&buffer, BYTES));
    return buffer;
}

static float* pinned_buffer(void) {
    float* buffer;
    CHECK(cudaMallocHost(&buffer, BYTES));
    for (int i = 0; i < N; i++) buffer[i] = 0;
    return buffer;
}

static cudaStream_t streams[2];  // of the bug that runs; main destroys them
static cudaEvent_t events[2];
static int stream_count, event_count;

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

// 0 if all of a host buffer has the value, else 1.
static int all_are(const float* host, float value) {
    for (int i = 0; i < N; i++) {
        if (host[i] != value) return 1;
    }
    return 0;
}

static int device_is(const float* device, float value) {
    static float host[N];
    CHECK(cudaMemcpy(host, device, BYTES, cudaMemcpyDeviceToHost));
    return all_are(host, value);
}

// ------------------------------------------------------------------------------------------------
// Between streams

// The consumer does not wait for the producer.
static int no_event_wait(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t producer = stream_new(), consumer = stream_new();
    cudaEvent_t made = event_new();
    fill<<<GRID, BLOCK, 0, producer>>>(a, 1);
    CHECK(cudaEventRecord(made, producer));
    if (good) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    add<<<GRID, BLOCK, 0, consumer>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(consumer));
    CHECK(cudaStreamSynchronize(producer));
    int wrong = device_is(b, 2);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// The same, with a wait for everything at the end: then the order of the two streams is what matters.
static int no_event_wait_device(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t producer = stream_new(), consumer = stream_new();
    cudaEvent_t made = event_new();
    fill<<<GRID, BLOCK, 0, producer>>>(a, 1);
    CHECK(cudaEventRecord(made, producer));
    if (good) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    add<<<GRID, BLOCK, 0, consumer>>>(b, a, 1);
    CHECK(cudaDeviceSynchronize());
    int wrong = device_is(b, 2);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// The event is waited for before it is recorded: such a wait does nothing.
static int wait_before_record(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t producer = stream_new(), consumer = stream_new();
    cudaEvent_t made = event_new();
    if (!good) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    fill<<<GRID, BLOCK, 0, producer>>>(a, 1);
    CHECK(cudaEventRecord(made, producer));
    if (good) CHECK(cudaStreamWaitEvent(consumer, made, 0));
    add<<<GRID, BLOCK, 0, consumer>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(consumer));
    CHECK(cudaStreamSynchronize(producer));
    int wrong = device_is(b, 2);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// The event is recorded before the work that it is to stand for.
static int record_too_early(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t producer = stream_new(), consumer = stream_new();
    cudaEvent_t made = event_new();
    if (!good) CHECK(cudaEventRecord(made, producer));
    fill<<<GRID, BLOCK, 0, producer>>>(a, 1);
    if (good) CHECK(cudaEventRecord(made, producer));
    CHECK(cudaStreamWaitEvent(consumer, made, 0));
    add<<<GRID, BLOCK, 0, consumer>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(consumer));
    CHECK(cudaStreamSynchronize(producer));
    int wrong = device_is(b, 2);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// Two batches through one buffer: the second is copied in while the first may still be read.
static int input_overwritten(bool good) {
    float *input = device_buffer(), *output = device_buffer();
    float *first = pinned_buffer(), *second = pinned_buffer();
    for (int i = 0; i < N; i++) {
        first[i] = 1;
        second[i] = 2;
    }
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
    int wrong = device_is(output, 11);
    CHECK(cudaFree(input));
    CHECK(cudaFree(output));
    CHECK(cudaFreeHost(first));
    CHECK(cudaFreeHost(second));
    return wrong;
}

// cudaMemset does not wait, and a stream that does not synchronise with the default stream may overtake it.
static int memset_overtaken(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemset(a, 0, BYTES));
    if (good) CHECK(cudaStreamSynchronize(0));
    add<<<GRID, BLOCK, 0, stream>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(stream));
    int wrong = device_is(b, 1);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// So may it overtake the last part of a cudaMemcpy from pageable memory.
static int upload_overtaken(bool good) {
    static float ones[N];
    for (int i = 0; i < N; i++) ones[i] = 1;
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpy(a, ones, BYTES, cudaMemcpyHostToDevice));
    if (good) CHECK(cudaDeviceSynchronize());
    add<<<GRID, BLOCK, 0, stream>>>(b, a, 1);
    CHECK(cudaStreamSynchronize(stream));
    int wrong = device_is(b, 2);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// ------------------------------------------------------------------------------------------------
// Between the device and the host

static int pinned_read_early(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    int wrong = all_are(host, 1);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

// The same where the value that was there before is right by chance.
static int pinned_read_early_unchanged(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 0);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    int wrong = all_are(host, 0);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

// One number of many in pinned memory: too little for page protection, so the old value shows.
static int pinned_part_read_early(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host + 5, a + 5, sizeof(float), cudaMemcpyDeviceToHost, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    int wrong = host[5] != 1;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

// The next batch is written into the buffer while the copy of the last one may still read it.
static int pinned_written_early(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < N; i++) host[i] = 1;
    CHECK(cudaStreamSynchronize(stream));
    int wrong = device_is(a, 0);
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

static int pageable_read_early(bool good) {
    static float host[N];
    float* a = device_buffer();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    int wrong = all_are(host, 1);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    return wrong;
}

// A query is taken for a wait.
static int query_for_wait(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    cudaEvent_t copied = event_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaEventRecord(copied, stream));
    cudaError_t state = cudaEventQuery(copied);
    while (good && state == cudaErrorNotReady) state = cudaEventQuery(copied);
    int wrong = all_are(host, 1);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

// The program ends before its work has.
static int never_waited_for(bool good) {
    float* a = device_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemsetAsync(a, 0, BYTES, stream));
    if (good) CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(a));
    return 0;
}

static void call_cuda(void* data) {
    int* device = (int*)data;
    if (*device < 0) CHECK(cudaDeviceSynchronize());
    *device = 1;
}

static int call_in_host_function(bool good) {
    int value = good ? 0 : -1;
    cudaStream_t stream = stream_new();
    CHECK(cudaLaunchHostFunc(stream, call_cuda, &value));
    CHECK(cudaStreamSynchronize(stream));
    return value != 1;
}

// ------------------------------------------------------------------------------------------------
// Memory

static int host_reads_device(bool good) {
    float *a = device_buffer(), host = 0;
    fill<<<GRID, BLOCK>>>(a, 1);
    CHECK(cudaDeviceSynchronize());
    if (good) CHECK(cudaMemcpy(&host, a + 7, sizeof host, cudaMemcpyDeviceToHost));
    else host = a[7];
    CHECK(cudaFree(a));
    return host != 1;
}

static int host_writes_device(bool good) {
    float *a = device_buffer(), one = 1;
    CHECK(cudaMemset(a, 0, BYTES));
    if (good) CHECK(cudaMemcpy(a, &one, sizeof one, cudaMemcpyHostToDevice));
    else a[0] = 1;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(a));
    return 0;
}

static void touch_device(void* data) { ((float*)data)[0] = 1; }

static int host_function_touches_device(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaLaunchHostFunc(stream, touch_device, good ? host : a));
    CHECK(cudaStreamSynchronize(stream));
    int wrong = host[0] != 1;
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return wrong;
}

static int host_pointer_to_kernel(bool good) {
    static float host[N];
    float* a = device_buffer();
    fill<<<GRID, BLOCK>>>(good ? a : host, 1);
    CHECK(cudaDeviceSynchronize());
    int wrong = good ? device_is(a, 1) : all_are(host, 1);
    CHECK(cudaFree(a));
    return wrong;
}

// Between the end of the buffer and the next multiple of 256, where no page protection reaches.
static int kernel_writes_past_end(bool good) {
    float* a = device_buffer();
    fill_first<<<1, 1>>>(a, 1, good ? N : N + 1);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(a));
    return 0;
}

static int kernel_writes_far_past_end(bool good) {
    float* a = device_buffer();
    fill_first<<<1, 1>>>(a, 1, good ? N : 100 * N);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(a));
    return 0;
}

static int kernel_after_free(bool good) {
    float* a = device_buffer();
    if (!good) CHECK(cudaFree(a));
    fill<<<GRID, BLOCK>>>(a, 1);
    CHECK(cudaDeviceSynchronize());
    if (good) CHECK(cudaFree(a));
    return 0;
}

static int copy_after_free(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    if (!good) CHECK(cudaFree(a));
    CHECK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    if (good) CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return 0;
}

// The memory goes while work that uses it is held.
static int free_under_copy(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(b, a, BYTES, cudaMemcpyDeviceToDevice, stream));
    if (!good) CHECK(cudaFree(a));
    CHECK(cudaStreamSynchronize(stream));
    if (good) CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return 0;
}

static int free_under_kernel(bool good) {
    float* a = device_buffer();
    cudaStream_t stream = stream_new();
    fill<<<GRID, BLOCK, 0, stream>>>(a, 1);
    if (!good) CHECK(cudaFree(a));
    CHECK(cudaStreamSynchronize(stream));
    if (good) CHECK(cudaFree(a));
    return 0;
}

static int free_pinned_under_copy(bool good) {
    float *a = device_buffer(), *host = pinned_buffer();
    cudaStream_t stream = stream_new();
    CHECK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, stream));
    if (!good) CHECK(cudaFreeHost(host));
    CHECK(cudaStreamSynchronize(stream));
    if (good) CHECK(cudaFreeHost(host));
    CHECK(cudaFree(a));
    return 0;
}

static int double_free(bool good) {
    float* a = device_buffer();
    CHECK(cudaFree(a));
    if (!good) CHECK(cudaFree(a));
    return 0;
}

static int wrong_free(bool good) {
    float* host = pinned_buffer();
    if (!good) CHECK(cudaFree(host));
    CHECK(cudaFreeHost(host));
    return 0;
}

static int free_inside(bool good) {
    float* a = device_buffer();
    CHECK(cudaFree(good ? a : a + 1));
    return 0;
}

static int pinned_overrun(bool good) {
    float* host = pinned_buffer();
    volatile char* bytes = (volatile char*)host;
    bytes[good ? BYTES - 1 : BYTES] = 1;
    CHECK(cudaFreeHost(host));
    return 0;
}

static int leak(bool good) {
    float* a = device_buffer();
    if (good) CHECK(cudaFree(a));
    return 0;
}

static int leak_pinned(bool good) {
    float* host = pinned_buffer();
    if (good) CHECK(cudaFreeHost(host));
    return 0;
}

static int copy_too_long(bool good) {
    static float host[N + 1];
    float* a = device_buffer();
    CHECK(cudaMemcpy(a, host, good ? BYTES : BYTES + 1, cudaMemcpyHostToDevice));
    CHECK(cudaFree(a));
    return 0;
}

static int copy_too_long_from_pinned(bool good) {
    float *a, *host = pinned_buffer();
    CHECK(cudaMalloc(&a, 2 * BYTES));
    CHECK(cudaMemcpy(a, host + N / 2, good ? BYTES / 2 : BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaFree(a));
    CHECK(cudaFreeHost(host));
    return 0;
}

static int copy_of_wrong_kind(bool good) {
    static float host[N];
    float* a = device_buffer();
    CHECK(cudaMemset(a, 0, BYTES));
    CHECK(cudaMemcpy(host, a, BYTES, good ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice));
    CHECK(cudaFree(a));
    return all_are(host, 0);
}

static int memset_too_long(bool good) {
    float* a = device_buffer();
    CHECK(cudaMemset(a + 1, 0, good ? BYTES - sizeof(float) : BYTES));
    CHECK(cudaFree(a));
    return 0;
}

static int memset_of_host(bool good) {
    static float host[N];
    float* a = device_buffer();
    CHECK(cudaMemset(good ? a : host, 0, BYTES));
    CHECK(cudaFree(a));
    return 0;
}

static int never_initialised(bool good) {
    float *a = device_buffer(), *b = device_buffer();
    if (good) CHECK(cudaMemset(a, 0, BYTES));
    add<<<GRID, BLOCK>>>(b, a, 0);
    int wrong = device_is(b, 0);
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    return wrong;
}

// ------------------------------------------------------------------------------------------------
// Handles

static int stream_after_destroy(bool good) {
    float* a = device_buffer();
    cudaStream_t stream = stream_new();
    if (!good) handles_destroy();
    CHECK(cudaMemsetAsync(a, 0, BYTES, stream));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(a));
    return 0;
}

static int event_after_destroy(bool good) {
    cudaEvent_t event = event_new();
    if (!good) handles_destroy();
    CHECK(cudaEventRecord(event, 0));
    CHECK(cudaDeviceSynchronize());
    return 0;
}

// ------------------------------------------------------------------------------------------------

typedef struct {
    const char *name, *mode;
    const char* shows;  // as a diagnosis, or in the result
    int (*run)(bool good);
} Bug;

static const Bug bugs[] = {
    {"no_event_wait", "behind", "result", no_event_wait},
    {"no_event_wait_device", "behind", "result", no_event_wait_device},
    {"wait_before_record", "behind", "result", wait_before_record},
    {"record_too_early", "behind", "result", record_too_early},
    {"input_overwritten", "ahead", "result", input_overwritten},
    {"memset_overtaken", "behind", "result", memset_overtaken},
    {"upload_overtaken", "behind", "result", upload_overtaken},
    {"pinned_read_early", "behind", "diagnosis", pinned_read_early},
    {"pinned_read_early_unchanged", "behind", "diagnosis", pinned_read_early_unchanged},
    {"pinned_part_read_early", "behind", "result", pinned_part_read_early},
    {"pinned_written_early", "behind", "diagnosis", pinned_written_early},
    {"pageable_read_early", "behind", "result", pageable_read_early},
    {"query_for_wait", "behind", "diagnosis", query_for_wait},
    {"never_waited_for", "behind", "diagnosis", never_waited_for},
    {"call_in_host_function", "now", "diagnosis", call_in_host_function},
    {"host_reads_device", "now", "diagnosis", host_reads_device},
    {"host_writes_device", "now", "diagnosis", host_writes_device},
    {"host_function_touches_device", "now", "diagnosis", host_function_touches_device},
    {"host_pointer_to_kernel", "now", "diagnosis", host_pointer_to_kernel},
    {"kernel_writes_past_end", "now", "diagnosis", kernel_writes_past_end},
    {"kernel_writes_far_past_end", "now", "diagnosis", kernel_writes_far_past_end},
    {"kernel_after_free", "now", "diagnosis", kernel_after_free},
    {"copy_after_free", "now", "diagnosis", copy_after_free},
    {"free_under_copy", "behind", "diagnosis", free_under_copy},
    {"free_under_kernel", "behind", "diagnosis", free_under_kernel},
    {"free_pinned_under_copy", "behind", "diagnosis", free_pinned_under_copy},
    {"double_free", "now", "diagnosis", double_free},
    {"wrong_free", "now", "diagnosis", wrong_free},
    {"free_inside", "now", "diagnosis", free_inside},
    {"pinned_overrun", "now", "diagnosis", pinned_overrun},
    {"leak", "now", "diagnosis", leak},
    {"leak_pinned", "now", "diagnosis", leak_pinned},
    {"copy_too_long", "now", "diagnosis", copy_too_long},
    {"copy_too_long_from_pinned", "now", "diagnosis", copy_too_long_from_pinned},
    {"copy_of_wrong_kind", "now", "diagnosis", copy_of_wrong_kind},
    {"memset_too_long", "now", "diagnosis", memset_too_long},
    {"memset_of_host", "now", "diagnosis", memset_of_host},
    {"never_initialised", "now", "result", never_initialised},
    {"stream_after_destroy", "now", "diagnosis", stream_after_destroy},
    {"event_after_destroy", "now", "diagnosis", event_after_destroy},
};
static const int bug_count = (int)(sizeof bugs / sizeof bugs[0]);

int main(int argc, char** argv) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (int i = 0; i < bug_count; i++) printf("%d %s %s %s\n", i + 1, bugs[i].name, bugs[i].mode, bugs[i].shows);
        return 0;
    }
    int number = argc > 1 ? atoi(argv[1]) : 0;
    bool good = argc == 3 && strcmp(argv[2], "good") == 0;
    if (number < 1 || number > bug_count || argc > 3 || (argc == 3 && !good)) {
        fprintf(stderr, "usage: runtime_bugs --list | NUMBER [good]   with a number from 1 to %d\n", bug_count);
        return 2;
    }
    int wrong = bugs[number - 1].run(good);
    handles_destroy();
    if (wrong) {
        printf("%s: wrong result\n", bugs[number - 1].name);
        return 1;
    }
    return 0;
}
