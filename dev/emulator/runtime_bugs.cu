// runtime_bugs.cu: planted bugs of host code. The emulator must detect each, and accept its corrected twin.
//
// bugs.h says how to run it, buffers.h what each bug finds ready. After each name are the mode that must catch it, and
// whether by a diagnosis or in the result:
//
//     now     EMULATE_STREAMS=now: any
//     behind  EMULATE_STREAMS=delayed EMULATE_OTHERS=behind
//     ahead   EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead
//
// test.sh runs them all, each in a process of its own.

#include "bugs.h"

static void check(cudaError_t error, int line) {
    if (error == cudaSuccess) return;
    printf("line %d: %s\n", line, cudaGetErrorString(error));
    exit(1);
}
#define OK(call) check(call, __LINE__)

#include "buffers.h"

static float pageable[N];

static __global__ void fill_first(float* out, float value, int count) {
    for (int i = 0; i < count; i++) out[i] = value;
}

static void device_free(float** buffer) {
    OK(cudaFree(*buffer));
    *buffer = NULL;
}

// ------------------------------------------------------------------------------------------------
// Between streams

// One stream fills a buffer, another reads it. `device`: at the end all streams are waited for at once, so that only
// the order of the two matters.
static bool hand_over(bool waits_early, bool records_early, bool waits, bool device) {
    if (waits_early) OK(cudaStreamWaitEvent(t, e, 0));
    if (records_early) OK(cudaEventRecord(e, s));
    fill<<<GRID, BLOCK, 0, s>>>(a, 1);
    if (!records_early) OK(cudaEventRecord(e, s));
    if (waits) OK(cudaStreamWaitEvent(t, e, 0));
    vector_add<<<GRID, BLOCK, 0, t>>>(b, a, 1);
    if (device) OK(cudaDeviceSynchronize());
    OK(cudaStreamSynchronize(t));
    OK(cudaStreamSynchronize(s));
    return device_is(b, 2);
}

// The consumer does not wait for the producer.
BUG(no_event_wait, "behind result") { return hand_over(false, false, good, false); }
BUG(no_event_wait_device, "behind result") { return hand_over(false, false, good, true); }
// The event is waited for before it is recorded: that wait does nothing.
BUG(wait_before_record, "behind result") { return hand_over(bug, false, good, false); }
// The event is recorded before the work that it should mark.
BUG(record_too_early, "behind result") { return hand_over(false, bug, true, false); }

// Two batches through one buffer: the second is copied in while the first may still be read.
BUG(input_overwritten, "ahead result") {
    set_all(host, 1);
    set_all(other, 2);
    OK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, s));
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    vector_add<<<GRID, BLOCK, 0, t>>>(b, a, 10);
    OK(cudaEventRecord(f, t));
    if (good) OK(cudaStreamWaitEvent(s, f, 0));
    OK(cudaMemcpyAsync(a, other, BYTES, cudaMemcpyHostToDevice, s));
    OK(cudaStreamSynchronize(t));
    OK(cudaStreamSynchronize(s));
    return device_is(b, 11);
}

static bool add_one(float wanted) {
    vector_add<<<GRID, BLOCK, 0, s>>>(b, a, 1);
    OK(cudaStreamSynchronize(s));
    return device_is(b, wanted);
}

// cudaMemset does not wait, and a stream that does not synchronize with the default stream may overtake it.
BUG(memset_overtaken, "behind result") {
    OK(cudaMemset(a, 0, BYTES));
    if (good) OK(cudaStreamSynchronize(0));
    return add_one(1);
}

// It may also overtake the last part of a cudaMemcpy from pageable memory.
BUG(upload_overtaken, "behind result") {
    set_all(pageable, 1);
    OK(cudaMemcpy(a, pageable, BYTES, cudaMemcpyHostToDevice));
    if (good) OK(cudaDeviceSynchronize());
    return add_one(2);
}

// ------------------------------------------------------------------------------------------------
// Between the device and the host

// Copies a part of a buffer full of `value`, which is then read, after the wait or too early.
static bool read_back(float* to, float value, size_t first, size_t count, bool waits) {
    bool right = true;
    fill<<<GRID, BLOCK, 0, s>>>(a, value);
    OK(cudaMemcpyAsync(to + first, a + first, count * sizeof(float), cudaMemcpyDeviceToHost, s));
    if (waits) OK(cudaStreamSynchronize(s));
    for (size_t i = first; i < first + count; i++) right = right && to[i] == value;
    OK(cudaStreamSynchronize(s));
    return right;
}

BUG(pinned_read_early, "behind diagnosis") { return read_back(host, 1, 0, N, good); }
// The old value is right by chance.
BUG(pinned_read_early_unchanged, "behind diagnosis") { return read_back(host, 0, 0, N, good); }
BUG(pageable_read_early, "behind result") { return read_back(pageable, 1, 0, N, good); }
// One of many numbers in pinned memory: too little for page protection, so the old value shows.
BUG(pinned_part_read_early, "behind result") { return read_back(host, 1, 5, 1, good); }

// The next batch is written into the buffer while the copy of the previous one may still read it.
BUG(pinned_written_early, "behind diagnosis") {
    OK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, s));
    if (good) OK(cudaStreamSynchronize(s));
    set_all(host, 1);
    OK(cudaStreamSynchronize(s));
    return device_is(a, 0);
}

// A query is mistaken for a wait.
BUG(query_for_wait, "behind diagnosis") {
    fill<<<GRID, BLOCK, 0, s>>>(a, 1);
    OK(cudaMemcpyAsync(host, a, BYTES, cudaMemcpyDeviceToHost, s));
    OK(cudaEventRecord(e, s));
    cudaError_t state = cudaEventQuery(e);
    while (good && state == cudaErrorNotReady) state = cudaEventQuery(e);
    bool right = all_are(host, 1);
    OK(cudaStreamSynchronize(s));
    return right;
}

// The program ends before its work does.
BUG(never_waited_for, "behind diagnosis") {
    OK(cudaMemsetAsync(a, 0, BYTES, s));
    if (good) OK(cudaStreamSynchronize(s));
    return true;
}

static void call_cuda(void* data) {
    int* device = (int*)data;
    if (*device < 0) OK(cudaDeviceSynchronize());
    *device = 1;
}

BUG(call_in_host_function, "now diagnosis") {
    int value = good ? 0 : -1;
    OK(cudaLaunchHostFunc(s, call_cuda, &value));
    OK(cudaStreamSynchronize(s));
    return value == 1;
}

// ------------------------------------------------------------------------------------------------
// Memory

BUG(host_reads_device, "now diagnosis") {
    float seven = 0;
    fill<<<GRID, BLOCK>>>(a, 1);
    OK(cudaDeviceSynchronize());
    if (good) OK(cudaMemcpy(&seven, a + 7, sizeof seven, cudaMemcpyDeviceToHost));
    else seven = a[7];
    return seven == 1;
}

BUG(host_writes_device, "now diagnosis") {
    float one = 1;
    OK(cudaMemset(a, 0, BYTES));
    if (good) OK(cudaMemcpy(a, &one, sizeof one, cudaMemcpyHostToDevice));
    else a[0] = 1;
    OK(cudaDeviceSynchronize());
    return true;
}

static void touch_device(void* data) { ((float*)data)[0] = 1; }

BUG(host_function_touches_device, "now diagnosis") {
    OK(cudaLaunchHostFunc(s, touch_device, good ? host : a));
    OK(cudaStreamSynchronize(s));
    return host[0] == 1;
}

BUG(host_pointer_to_kernel, "now diagnosis") {
    fill<<<GRID, BLOCK>>>(good ? a : pageable, 1);
    OK(cudaDeviceSynchronize());
    return good ? device_is(a, 1) : all_are(pageable, 1);
}

static bool write_first(int count) {
    fill_first<<<1, 1>>>(a, 1, count);
    OK(cudaDeviceSynchronize());
    return true;
}

// Between the end of the buffer and the next multiple of 256, which page protection does not cover.
BUG(kernel_writes_past_end, "now diagnosis") { return write_first(good ? N : N + 1); }
BUG(kernel_writes_far_past_end, "now diagnosis") { return write_first(good ? N : 100 * N); }

// The memory is freed before work that uses it is launched, or while that work is held.
enum Use { KERNEL, DOWNLOAD, COPY, UPLOAD };

static bool use_and_free(Use use, float** freed, bool early, bool late) {
    float *device = a, *pinned = host;
    if (early) device_free(freed);
    if (use == KERNEL) fill<<<GRID, BLOCK, 0, s>>>(device, 1);
    if (use == DOWNLOAD) OK(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, s));
    if (use == COPY) OK(cudaMemcpyAsync(b, device, BYTES, cudaMemcpyDeviceToDevice, s));
    if (use == UPLOAD) OK(cudaMemcpyAsync(device, pinned, BYTES, cudaMemcpyHostToDevice, s));
    if (late) freed == &host ? OK(cudaFreeHost(host)) : device_free(freed);
    OK(cudaStreamSynchronize(s));
    return true;
}

BUG(kernel_after_free, "now diagnosis") { return use_and_free(KERNEL, &a, bug, false); }
BUG(copy_after_free, "now diagnosis") { return use_and_free(DOWNLOAD, &a, bug, false); }
BUG(free_under_copy, "behind diagnosis") { return use_and_free(COPY, &a, false, bug); }
BUG(free_under_kernel, "behind diagnosis") { return use_and_free(KERNEL, &a, false, bug); }
BUG(free_pinned_under_copy, "behind diagnosis") { return use_and_free(UPLOAD, &host, false, bug); }

// Frees memory that it must not free.
static bool also_free(float* memory, bool frees) {
    if (frees) OK(cudaFree(memory));
    return true;
}

BUG(double_free, "now diagnosis") {
    float* memory = a;
    if (bug) device_free(&a);
    return also_free(memory, bug);
}
BUG(wrong_free, "now diagnosis") { return also_free(host, bug); }
BUG(free_inside, "now diagnosis") { return also_free(a + 1, bug); }

BUG(pinned_overrun, "now diagnosis") {
    volatile char* bytes = (volatile char*)host;
    bytes[good ? BYTES - 1 : BYTES] = 1;
    return true;
}

static bool forget(float** buffer, bool forgets) {
    if (forgets) *buffer = NULL;
    return true;
}

BUG(leak, "now diagnosis") { return forget(&a, bug); }
BUG(leak_pinned, "now diagnosis") { return forget(&host, bug); }

BUG(copy_too_long, "now diagnosis") {
    static float longer[N + 1];
    OK(cudaMemcpy(a, longer, good ? BYTES : BYTES + 1, cudaMemcpyHostToDevice));
    return true;
}

BUG(copy_too_long_from_pinned, "now diagnosis") {
    OK(cudaMemcpy(a, host + N / 2, good ? BYTES / 2 : BYTES, cudaMemcpyHostToDevice));
    return true;
}

BUG(copy_of_wrong_kind, "now diagnosis") {
    OK(cudaMemset(a, 0, BYTES));
    OK(cudaMemcpy(pageable, a, BYTES, good ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice));
    return all_are(pageable, 0);
}

static bool set_zero(float* memory, size_t bytes) {
    OK(cudaMemset(memory, 0, bytes));
    return true;
}

BUG(memset_too_long, "now diagnosis") { return set_zero(a + 1, good ? BYTES - sizeof(float) : BYTES); }
BUG(memset_of_host, "now diagnosis") { return set_zero(good ? a : pageable, BYTES); }

BUG(never_initialized, "now result") {
    if (good) OK(cudaMemset(a, 0, BYTES));
    vector_add<<<GRID, BLOCK>>>(b, a, 0);
    return device_is(b, 0);
}

// ------------------------------------------------------------------------------------------------
// Handles

BUG(stream_after_destroy, "now diagnosis") {
    if (bug) OK(cudaStreamDestroy(s));
    OK(cudaMemsetAsync(a, 0, BYTES, s));
    OK(cudaDeviceSynchronize());
    return true;
}

BUG(event_after_destroy, "now diagnosis") {
    if (bug) OK(cudaEventDestroy(e));
    OK(cudaEventRecord(e, 0));
    OK(cudaDeviceSynchronize());
    return true;
}

// ------------------------------------------------------------------------------------------------

static bool run(const Bug& bug, bool planted) {
    buffers_make();
    bool right = bug.run(planted, !planted);
    buffers_free();
    return right;
}

int main(int argc, char** argv) { return bugs_main(argc, argv, run); }
