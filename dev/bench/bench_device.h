// bench_device.h: what dev/bench/bench.c needs from the device that it runs on: how long each operation takes, and the
// device's peak rates.
//
//   span_begin(&spans), the operation, span_end(&spans), span_add(&spans, &ms)     ms grows by the operation's time
//   spans_settle(&spans)                                                           ms is now complete
//   meter_open(&meter, stream, &error), meter_rates(&meter, rates)                 of arithmetic, matmuls and memory
//
//   1. spans    on a CPU between two readings of the clock; on a GPU, where operations are enqueued and run later,
//               between two events of the stream, which are read when the step has ended
//   2. rates    on a CPU measured: peak.h, and an array that is scaled in place. On a GPU the arithmetic rates are the
//               data sheet's (DEVICE_PEAKS, as for MFU; NAN for a device that is not listed), and the memory rate is
//               that of measured copies within the device
//
// The time between one operation's events and the next one's is idle time of the stream: bench.c prints it as the rest.
// An event costs the stream about a microsecond, so a profiled step is slower by two microseconds per operation.

#ifndef LLMTRAIN_BENCH_DEVICE_H
#define LLMTRAIN_BENCH_DEVICE_H

#include "llmtrain/model/tensors.h"
#ifndef LLMTRAIN_CUDA
#include "peak.h"
#endif

// Indices of rates, per second.
enum { RATE_FP32, RATE_MATMUL, RATE_MEMORY, RATE_COUNT };

// The array that the memory rate is measured on: far larger than the caches.
#define METER_BYTES ((size_t)1 << 28)

#ifndef LLMTRAIN_CUDA

typedef struct {
    double began, ended;
} Spans;

static inline bool spans_open(Spans* s, Stream stream, Error* error) {
    (void)s; (void)stream; (void)error;
    return true;
}
static inline void spans_close(Spans* s) { (void)s; }
static inline void span_begin(Spans* s) { s->began = now_ms(); }
static inline void span_end(Spans* s) { s->ended = now_ms(); }
static inline void span_add(Spans* s, double* ms) { *ms += s->ended - s->began; }
static inline void spans_settle(Spans* s) { (void)s; }

typedef struct {
    PeakLoop fp32, matmul;
    float* array;
} Meter;

static inline bool meter_open(Meter* m, Stream stream, Error* error) {
    (void)stream;
    m->fp32 = peak_loop(false);
    m->matmul = FLOATX_DTYPE == DTYPE_BF16 ? peak_loop(true) : m->fp32;
    m->array = (float*)memory_allocate(METER_BYTES);
    return m->array != NULL || fail_with(error, "out of memory for measuring that of the machine");
}
static inline void meter_close(Meter* m) { free(m->array); }

static inline void meter_rates(const Meter* m, double rates[RATE_COUNT]) {
    const size_t n = METER_BYTES / sizeof(float);
    bool same = m->matmul.loop == m->fp32.loop;
    rates[RATE_FP32] = peak_measure(m->fp32, threads_count(), CLOCK_MONOTONIC, 10.0);
    rates[RATE_MATMUL] = same ? rates[RATE_FP32] : peak_measure(m->matmul, threads_count(), CLOCK_MONOTONIC, 10.0);
    double began = now_ms();
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) m->array[i] *= -1.0f;
    rates[RATE_MEMORY] = 2e3 * (double)METER_BYTES / (now_ms() - began);
}

static inline void bench_describe(char* text, size_t bytes) { snprintf(text, bytes, "%s", gemm_backend()); }

#else

typedef struct {
    cudaEvent_t began, ended;  // NULL: not made yet
    double* ms;                // what the time is added to
} Span;

typedef struct {
    Stream stream;
    Span* spans;
    size_t count;              // spans not settled yet
} Spans;

enum { SPANS_MAX = 1 << 15 };  // of one step; those over it show as time outside the operations

static inline bool spans_open(Spans* s, Stream stream, Error* error) {
    s->stream = stream;
    s->count = 0;
    s->spans = (Span*)memory_allocate(SPANS_MAX * sizeof(Span));
    if (s->spans == NULL) return fail_with(error, "out of memory for the events between operations");
    memset(s->spans, 0, SPANS_MAX * sizeof(Span));
    return true;
}

static inline void spans_close(Spans* s) {
    for (size_t i = 0; s->spans && i < SPANS_MAX && s->spans[i].began; i++) {
        CUDA_CHECK(cudaEventDestroy(s->spans[i].began));
        CUDA_CHECK(cudaEventDestroy(s->spans[i].ended));
    }
    free(s->spans);
    s->spans = NULL;
}

static inline void span_begin(Spans* s) {
    if (s->count == SPANS_MAX) return;
    Span* span = &s->spans[s->count];
    if (span->began == NULL) {
        CUDA_CHECK(cudaEventCreate(&span->began));
        CUDA_CHECK(cudaEventCreate(&span->ended));
    }
    CUDA_CHECK(cudaEventRecord(span->began, s->stream->compute));
}

static inline void span_end(Spans* s) {
    if (s->count < SPANS_MAX) CUDA_CHECK(cudaEventRecord(s->spans[s->count].ended, s->stream->compute));
}

static inline void span_add(Spans* s, double* ms) {
    if (s->count < SPANS_MAX) s->spans[s->count++].ms = ms;
}

static inline void spans_settle(Spans* s) {
    device_wait(s->stream);
    for (size_t i = 0; i < s->count; i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, s->spans[i].began, s->spans[i].ended));
        *s->spans[i].ms += (double)ms;
    }
    s->count = 0;
}

typedef struct {
    Stream stream;
    double rates[2];           // RATE_FP32, RATE_MATMUL
    char* array;
    cudaEvent_t began, ended;
} Meter;

// Without a device its name is "no GPU"; device_open then explains why.
static inline void bench_device_name(cudaDeviceProp* properties) {
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(properties, device) == cudaSuccess) return;
    snprintf(properties->name, sizeof properties->name, "no GPU");
}

static inline void meter_close(Meter* m) {
    CUDA_CHECK(cudaEventDestroy(m->began));
    CUDA_CHECK(cudaEventDestroy(m->ended));
    if (m->array) device_free(m->array, 2 * METER_BYTES);
}

static inline bool meter_open(Meter* m, Stream stream, Error* error) {
    cudaDeviceProp properties;
    bench_device_name(&properties);
    const DevicePeak* peak = device_find(properties.name);
    double matmul = device_peak(properties.name, stream->tf32);
    m->stream = stream;
    m->rates[RATE_FP32] = peak ? 1e12 * peak->fp32 : NAN;
    m->rates[RATE_MATMUL] = matmul > 0 ? 1e12 * matmul : NAN;
    CUDA_CHECK(cudaEventCreate(&m->began));
    CUDA_CHECK(cudaEventCreate(&m->ended));
    m->array = (char*)device_allocate(2 * METER_BYTES, stream, error);
    if (m->array == NULL) meter_close(m);
    return m->array != NULL;
}

static inline void meter_rates(const Meter* m, double rates[RATE_COUNT]) {
    const int COPIES = 4;
    float ms;
    CUDA_CHECK(cudaEventRecord(m->began, m->stream->compute));
    for (int i = 0; i < COPIES; i++) device_copy(m->array, m->array + METER_BYTES, METER_BYTES, m->stream);
    CUDA_CHECK(cudaEventRecord(m->ended, m->stream->compute));
    CUDA_CHECK(cudaEventSynchronize(m->ended));
    CUDA_CHECK(cudaEventElapsedTime(&ms, m->began, m->ended));
    rates[RATE_FP32] = m->rates[RATE_FP32];
    rates[RATE_MATMUL] = m->rates[RATE_MATMUL];
    rates[RATE_MEMORY] = 2e3 * COPIES * (double)METER_BYTES / (double)ms;
}

static inline void bench_describe(char* text, size_t bytes) {
    cudaDeviceProp properties;
    bench_device_name(&properties);
    snprintf(text, bytes, "cuBLASLt on %s", properties.name);
}
#endif

#endif  // LLMTRAIN_BENCH_DEVICE_H
