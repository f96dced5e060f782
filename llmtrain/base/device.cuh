// device.cuh: device memory and copies for the runtime, on a GPU. device_cpu.h has the same functions for the CPU.
//
//   1. memory      allocated and zeroed once, before the first step
//   2. device      begin, end, limits
//   3. copies      between host and device; batches on a stream of their own
//
// Sources that include it are compiled by nvcc, or by a C++ compiler with the emulator in dev/emulator.

#ifndef LLMTRAIN_DEVICE_CUH
#define LLMTRAIN_DEVICE_CUH

#ifndef LLMTRAIN_CUDA
#error "compile the CUDA sources with -DLLMTRAIN_CUDA"
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "the CUDA build needs a GPU of compute capability 8.0 (Ampere) or newer: compile with -arch=sm_80 or higher"
#endif

#include "../ops/base.h"
#include "data_sheets.h"

// ------------------------------------------------------------------------------------------------
// 1. Memory

// Zeroed memory on the device; NULL after a failure.
static inline void* device_allocate(size_t bytes, Stream stream, Error* error) {
    void* memory = NULL;
    cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess) {
        cudaGetLastError();  // or the next check would find it again
        fail_with(error, "cannot allocate %.2f GB of GPU memory: %s; make --batch, --seq or the model smaller",
                  1e-9 * (double)bytes, cudaGetErrorString(status));
        return NULL;
    }
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->compute));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
    return memory;
}

static inline void device_free(void* memory, size_t bytes) {
    (void)bytes;
    CUDA_CHECK(cudaFree(memory));
}

// Pinned host memory, which copies at full speed; NULL if there is none.
static inline void* host_allocate(size_t bytes) {
    void* memory = NULL;
    if (cudaMallocHost(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static inline void host_free(void* memory) {
    if (memory) CUDA_CHECK(cudaFreeHost(memory));
}

static inline void fill_zero(void* memory, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->compute));
}

// ------------------------------------------------------------------------------------------------
// 2. Device

// Batches are copied on a stream of their own, during the work on the batch before; each turn has its staging memory.
struct Uploads {
    cudaStream_t stream;
    void* staging[2];       // pinned memory of the host
    cudaEvent_t copied[2];  // the batch of this turn is on the device
    cudaEvent_t used[2];    // `compute` is done with the batch of this turn
    uint64_t batches;
};

typedef struct {
    struct Device device;
    struct Uploads uploads;
} OpenDevice;

// The device and its matmul library, as text, and its peak in TFLOP/s, 0 if unknown.
static inline void device_describe(char* text, size_t bytes, double* peak_tflops, Stream stream) {
    struct cudaDeviceProp properties;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    *peak_tflops = device_peak(properties.name, stream->tf32);
    snprintf(text, bytes, "cuBLASLt%s on %s", FLOATX_IS_FLOAT && stream->tf32 ? " in tf32" : "", properties.name);
}

// Makes the device of a rank, by its number among the ranks of this machine, the current one. Two ranks on one device
// are for tests; NCCL allows them only from 2.30 on, with a variable ("Environment Variables" of its user guide).
static inline bool device_choose(size_t local_rank, Error* error) {
    int count = 0;
    const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return true;  // device_open reports it
    bool own = count == 1 && getenv("CUDA_VISIBLE_DEVICES") != NULL;  // the launcher shows each rank a GPU of its own
    if (local_rank >= (size_t)count && !own && !(shared && strcmp(shared, "1") == 0))
        return fail_with(error, "this machine has %d GPUs, and none left for local rank %zu; start one rank for each "
                         "GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer) to share them", count,
                         local_rank);
    CUDA_CHECK(cudaSetDevice((int)(local_rank % (size_t)count)));
    return true;
}

// No work: a GPU that has no machine code for it has none for any kernel of this program.
static __global__ void device_probe_kernel(void) {}

// Whether the program has machine code for the current device.
static inline bool device_runs_program(Error* error) {
    struct cudaDeviceProp properties;
    struct cudaFuncAttributes attributes;
    int device = 0;
    cudaError_t status = cudaFuncGetAttributes(&attributes, (const void*)device_probe_kernel);
    if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction) return true;
    cudaGetLastError();  // or the next check would find it again
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    return fail_with(error, "this program was built for another GPU than %s, of compute capability %d.%d; build it on "
                     "this machine, or with ARCH=sm_%d%d", properties.name, properties.major, properties.minor,
                     properties.major, properties.minor);
}

// Sets up *stream on the current device; it is NULL after a failure.
static inline bool device_open(Stream* stream, bool tf32, Error* error) {
    int count = 0, device = 0, processors = 0;
    *stream = NULL;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
        return fail_with(error, "there is no CUDA device: %s; build the CPU program with 'make train CUDA=off'",
                         status == cudaSuccess ? "none found" : cudaGetErrorString(status));
    if (!device_runs_program(error)) return false;
    OpenDevice* open = (OpenDevice*)memory_allocate(sizeof *open);
    if (open == NULL) return fail_with(error, "out of memory for the device's state");
    struct Device* d = &open->device;
    struct Uploads* u = d->uploads = &open->uploads;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&u->stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&u->copied[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&u->used[i], cudaEventDisableTiming));
    }
    d->processors = (size_t)processors;
    d->tf32 = tf32;
    *stream = d;
    return true;
}

static inline void device_close(Stream stream) {
    if (stream == NULL) return;
    struct Uploads* u = stream->uploads;
    CUDA_CHECK(cudaStreamSynchronize(u->stream));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
    if (stream->matmul) stream->matmul_free(stream->matmul);
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventDestroy(u->copied[i]));
        CUDA_CHECK(cudaEventDestroy(u->used[i]));
        host_free(u->staging[i]);
    }
    CUDA_CHECK(cudaStreamDestroy(u->stream));
    CUDA_CHECK(cudaStreamDestroy(stream->compute));
    free(stream);  // an OpenDevice
}

static inline bool device_is_host(void) { return false; }

// Logits computed at a time, approximately, out of `all` of a batch: 5,000 rows of GPT-2's vocabulary or a quarter of
// the batch. Every part after the first reads and writes the gradient of the head's weight once more, and the blocks of
// a matmul over few rows leave multiprocessors idle.
static inline size_t head_elements(size_t all) { return max_size(LLMTRAIN_PIECE((size_t)1 << 28, (size_t)1), all / 4); }

// The longest sequence that attention takes: a grid has at most 65,535 tiles of queries, and the smallest tile has 16.
static inline size_t device_longest(void) { return (size_t)65535 * 16; }

static inline void device_wait(Stream stream) { CUDA_CHECK(cudaStreamSynchronize(stream->compute)); }

// A point in the work of a stream, which another thread may wait for. A mark that was never set has been passed.
typedef cudaEvent_t DeviceMark;

static inline void device_mark_open(DeviceMark* mark) {
    CUDA_CHECK(cudaEventCreateWithFlags(mark, cudaEventDisableTiming));
}
static inline void device_mark_close(DeviceMark* mark) { CUDA_CHECK(cudaEventDestroy(*mark)); }
static inline void device_mark_set(DeviceMark* mark, Stream stream) {
    CUDA_CHECK(cudaEventRecord(*mark, stream->compute));
}
static inline void device_mark_wait(const DeviceMark* mark) { CUDA_CHECK(cudaEventSynchronize(*mark)); }

// Gives the operations their scratch memory, at least scratch_bytes(...) of kernels.cuh, and prepares
// device_upload_batch for batches of batch_bytes: tokens, targets and positions together.
static inline bool device_prepare(Stream stream, void* scratch, size_t bytes, size_t batch_bytes, Error* error) {
    stream->scratch = scratch;
    stream->scratch_bytes = bytes;
    for (int i = 0; i < 2; i++) {
        stream->uploads->staging[i] = host_allocate(batch_bytes);
        if (stream->uploads->staging[i] == NULL)
            return fail_with(error, "cannot pin %zu bytes of host memory for batches; make --batch smaller",
                             batch_bytes);
    }
    return true;
}

// Free memory of the device, in bytes, less a reserve: the driver loads a kernel, ours or a library's, when it is first
// used, which may be in the middle of a run; and with several ranks NCCL allocates buffers at its first collectives,
// 0.7 GB among four A100 and 1.6 GB in a larger run, as its users have measured (NVIDIA/nccl, issues 964 and 864).
static inline size_t device_available(size_t world) {
    const size_t reserve = (size_t)(world > 1 ? 2560 : 512) << 20;
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available - min_size(available, reserve);
}

// ------------------------------------------------------------------------------------------------
// 3. Copies

// Copies that are done when the function returns, after all work that the stream was given before.
static inline void device_upload(void* device, const void* host, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream->compute));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
}

static inline void device_download(void* host, const void* device, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream->compute));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
}

// Within the device.
static inline void device_copy(void* to, const void* from, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream->compute));
}

// Copies a batch to one of two slots on the device, alternately, and returns the slot: `bytes` of tokens, as many of
// targets, undefined if those are NULL, and of positions. It runs on a stream of its own, during the work on the batch
// before; operations enqueued on `compute` from now on wait for it. The host memory may be reused at once.
static inline int32_t* device_upload_batch(int32_t* const slots[2], const int32_t* tokens, const int32_t* targets,
                                           const int32_t* positions, size_t bytes, Stream stream) {
    struct Uploads* u = stream->uploads;
    int turn = (int)(u->batches % 2);
    char* staging = (char*)u->staging[turn];
    if (u->batches > 0) CUDA_CHECK(cudaEventRecord(u->used[!turn], stream->compute));
    if (u->batches > 1) {
        CUDA_CHECK(cudaEventSynchronize(u->copied[turn]));  // the staging memory is free
        CUDA_CHECK(cudaStreamWaitEvent(u->stream, u->used[turn], 0));
    }
    memcpy(staging, tokens, bytes);
    if (targets) memcpy(staging + bytes, targets, bytes);
    memcpy(staging + 2 * bytes, positions, bytes);
    CUDA_CHECK(cudaMemcpyAsync(slots[turn], staging, 3 * bytes, cudaMemcpyHostToDevice, u->stream));
    CUDA_CHECK(cudaEventRecord(u->copied[turn], u->stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream->compute, u->copied[turn], 0));
    u->batches++;
    return slots[turn];
}

#endif  // LLMTRAIN_DEVICE_CUH
