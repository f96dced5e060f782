// device.cuh: what every CUDA file stands on.
//
//   1. errors     a failed CUDA call ends the program with a sentence
//   2. device     streams, scratch memory, copies between host and device
//   3. elements   16 bytes of floatX at a time
//   4. sums       over a warp and over a block, in a fixed order
//
// Sources that include it are compiled by nvcc, or by a C++ compiler with the emulator in dev/emulator. Types of storage
// (floatX), conversions and random numbers are those of the CPU backend: float_of, floatX_of, random4 and so on are for
// both sides.

#ifndef LLMTRAIN_DEVICE_CUH
#define LLMTRAIN_DEVICE_CUH

#ifndef LLMTRAIN_CUDA
#error "compile the CUDA sources with -DLLMTRAIN_CUDA"
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "the CUDA build needs a GPU of compute capability 8.0 (Ampere) or newer: compile with -arch=sm_80 or higher"
#endif

#include "base.h"
#include "../kernels_cpu.h"

#include <cuda_runtime.h>

// ------------------------------------------------------------------------------------------------
// 1. Errors
//
// Operations return nothing: after a kernel has failed, nothing on the device can be trusted, and the last checkpoint is
// on the disk. What can fail on account of the world, taking memory, returns false like everything else.

// Who wants to hear of such a failure before the program ends: nccl.cuh, to tell the other ranks.
typedef struct {
    void (*tell)(void* context, const char* sentence);
    void* context;
} CudaListener;

static inline CudaListener* cuda_listener(void) {
    static CudaListener listener;
    return &listener;
}

static inline void cuda_check(cudaError_t status, const char* what, const char* file, int line) {
    if (status == cudaSuccess) return;
    Error error;
    fail(&error, "%s failed at %s:%d: %s; the device or its driver is in trouble, or this is a bug of llmtrain. What was saved is "
         "good: --resume continues from it", what, file, line, cudaGetErrorString(status));
    fprintf(stderr, "train: %s\n", error.text);
    if (cuda_listener()->tell) cuda_listener()->tell(cuda_listener()->context, error.text);
    fflush(NULL);
    _exit(1);  // exit would wait for the device
}

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
#define LAUNCH_CHECK() cuda_check(cudaGetLastError(), "a kernel's launch", __FILE__, __LINE__)

// ------------------------------------------------------------------------------------------------
// 2. Device
//
// All operations run on `compute`, in order; so one piece of scratch memory serves all of them: an operation may write
// anything there, and finds nothing there of use. Batches come on `copy`, under the work of the batch before.

struct Device {
    cudaStream_t compute, copy;
    void* scratch;
    size_t scratch_bytes;
    void* staging[2];           // pinned memory of the host, for batches in turn
    cudaEvent_t copied[2];      // the batch of this turn has been copied
    cudaEvent_t used[2];        // `compute` is done with the batch in this place
    uint64_t batches;
    struct Matmul* matmul;      // the state of matmul.cuh, made at its first use
    void (*matmul_free)(struct Matmul* matmul);
    bool tf32;                  // products of floats may round their operands to 10 bits of fraction
    size_t processors;          // streaming multiprocessors: grids of a fixed size are multiples of it
};

// Peak rates of dense products, in TFLOP/s, from NVIDIA's data sheets and architecture white papers: of 16-bit types with
// float sums, and of floats without tensor cores; of TF32 it is half of the former. A name that ends in * stands for all
// that begin so; a device that is not here (a laptop's, say, has other clocks) has no peak, and mfu is n/a.
typedef struct {
    const char* name;
    double bf16, fp32;
} DevicePeak;

static const DevicePeak DEVICE_PEAKS[] = {
    {"A100*", 312, 19.5},
    {"H100 PCIe", 756, 51.2},
    {"H100 NVL", 835.5, 60},
    {"H100*", 989.4, 66.9},
    {"H200 NVL", 835.5, 60},
    {"H200*", 989.4, 66.9},
    {"B200*", 2250, 75},
    {"L4", 121, 30.3},
    {"L40S", 362, 91.6},
    {"GeForce RTX 3060", 25.5, 12.7},
    {"GeForce RTX 3060 Ti", 32.4, 16.2},
    {"GeForce RTX 3070", 40.6, 20.3},
    {"GeForce RTX 3070 Ti", 43.5, 21.7},
    {"GeForce RTX 3080", 59.5, 29.8},
    {"GeForce RTX 3080 Ti", 68.2, 34.1},
    {"GeForce RTX 3090", 71.2, 35.6},
    {"GeForce RTX 3090 Ti", 80, 40},
    {"GeForce RTX 4060", 30.2, 15.1},
    {"GeForce RTX 4060 Ti", 44.1, 22.1},
    {"GeForce RTX 4070", 58.3, 29.1},
    {"GeForce RTX 4070 SUPER", 70.9, 35.5},
    {"GeForce RTX 4070 Ti", 80.2, 40.1},
    {"GeForce RTX 4070 Ti SUPER", 88.2, 44.1},
    {"GeForce RTX 4080", 97.5, 48.7},
    {"GeForce RTX 4080 SUPER", 104.4, 52.2},
    {"GeForce RTX 4090", 165.2, 82.6},
    {"GeForce RTX 5060", 38.4, 19.2},
    {"GeForce RTX 5060 Ti", 47.4, 23.7},
    {"GeForce RTX 5070", 61.7, 30.9},
    {"GeForce RTX 5070 Ti", 87.9, 43.9},
    {"GeForce RTX 5080", 112.6, 56.3},
    {"GeForce RTX 5090", 209.5, 104.8},
};

// The peak in TFLOP/s of a device by its name, for products as this build makes them; 0 if it is not known.
static inline double device_peak(const char* name, bool tf32) {
    if (strncmp(name, "NVIDIA ", 7) == 0) name += 7;
    if (strstr(name, " MIG ")) return 0;  // a part of a device
    for (size_t i = 0; i < sizeof DEVICE_PEAKS / sizeof DEVICE_PEAKS[0]; i++) {
        const DevicePeak* peak = &DEVICE_PEAKS[i];
        size_t length = strlen(peak->name);
        bool prefix = peak->name[length - 1] == '*';
        if (prefix ? strncmp(name, peak->name, length - 1) != 0 : strcmp(name, peak->name) != 0) continue;
        return !FLOATX_IS_FLOAT ? peak->bf16 : tf32 ? peak->bf16 / 2 : peak->fp32;
    }
    return 0;
}

// The device and what its products are made by, as text, and its peak in TFLOP/s, 0 if unknown.
static inline void device_describe(char* text, size_t bytes, double* peak_tflops, Stream stream) {
    struct cudaDeviceProp properties;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    *peak_tflops = device_peak(properties.name, stream->tf32);
    snprintf(text, bytes, "cuBLASLt%s on %s", FLOATX_IS_FLOAT && stream->tf32 ? " in tf32" : "", properties.name);
}

// Makes the device of a rank, by its number among the ranks of this machine, the current one. Two ranks on one device are
// for tests, and NCCL wants to be told.
static inline bool device_choose(size_t local_rank, Error* error) {
    int count = 0;
    const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return true;  // device_open says so
    bool own = count == 1 && getenv("CUDA_VISIBLE_DEVICES") != NULL;  // the launcher shows each rank a GPU of its own
    if (local_rank >= (size_t)count && !own && !(shared && strcmp(shared, "1") == 0))
        return fail(error, "this machine has %d GPUs, and no other for local rank %zu; start one rank for each GPU, or set "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 to share them", count, local_rank);
    CUDA_CHECK(cudaSetDevice((int)(local_rank % (size_t)count)));
    return true;
}

// Sets *stream up on the current device; it is NULL after a failure.
static inline bool device_open(Stream* stream, bool tf32, Error* error) {
    int count = 0, device = 0, processors = 0;
    *stream = NULL;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
        return fail(error, "there is no CUDA device: %s; build the CPU program with 'make train CUDA=off'",
                    status == cudaSuccess ? "none found" : cudaGetErrorString(status));
    struct Device* d = (struct Device*)allocate(sizeof *d);
    if (d == NULL) return fail(error, "out of memory for the device's state");
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->copy, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&d->copied[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&d->used[i], cudaEventDisableTiming));
    }
    d->processors = (size_t)processors;
    d->tf32 = tf32;
    *stream = d;
    return true;
}

// Pinned memory of the host, to and from which copies go at full speed; NULL if there is none.
static inline void* host_allocate(size_t bytes) {
    void* memory = NULL;
    if (cudaMallocHost(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static inline void host_free(void* memory) {
    if (memory) CUDA_CHECK(cudaFreeHost(memory));
}

static inline void device_close(Stream stream) {
    if (stream == NULL) return;
    CUDA_CHECK(cudaStreamSynchronize(stream->copy));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
    if (stream->matmul) stream->matmul_free(stream->matmul);
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventDestroy(stream->copied[i]));
        CUDA_CHECK(cudaEventDestroy(stream->used[i]));
        host_free(stream->staging[i]);
    }
    CUDA_CHECK(cudaStreamDestroy(stream->copy));
    CUDA_CHECK(cudaStreamDestroy(stream->compute));
    free(stream);
}

// Whether the host may touch device memory.
static inline bool device_is_host(void) { return false; }

// Logits that are made at a time, about: 5,000 rows of GPT-2's vocabulary. For every part the gradient of the head's weight
// is read and written once, and the blocks of a product over few rows leave multiprocessors idle.
static inline size_t head_elements(void) { return (size_t)1 << 28; }

// Waits for all work that the stream was given.
static inline void device_wait(Stream stream) { CUDA_CHECK(cudaStreamSynchronize(stream->compute)); }

// Gives the operations their scratch memory, at least scratch_bytes(...) of kernels.cuh, and makes ready for upload_batch
// with so many bytes, tokens and targets together.
static inline bool device_prepare(Stream stream, void* scratch, size_t bytes, size_t batch_bytes, Error* error) {
    stream->scratch = scratch;
    stream->scratch_bytes = bytes;
    for (int i = 0; i < 2; i++) {
        stream->staging[i] = host_allocate(batch_bytes);
        if (stream->staging[i] == NULL)
            return fail(error, "cannot pin %zu bytes of the host's memory for batches; make --batch smaller", batch_bytes);
    }
    return true;
}

// The scratch memory, of which the caller uses the first `bytes`.
static inline void* device_scratch(Stream stream, size_t bytes) {
    if (bytes <= stream->scratch_bytes) return stream->scratch;
    fprintf(stderr, "train: an operation needs %zu bytes of scratch memory but was given %zu; this is a bug of llmtrain\n",
            bytes, stream->scratch_bytes);
    exit(1);
}

// Free memory of the device, in bytes, without a reserve: the driver loads a kernel, ours or the library's, when it is first
// used, which may be in the middle of a run.
static inline size_t device_available(void) {
    const size_t reserve = (size_t)512 << 20;
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available - min_size(available, reserve);
}

// Zeroed memory on the device; NULL after a failure.
static inline void* device_allocate(size_t bytes, Stream stream, Error* error) {
    void* memory = NULL;
    cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess) {
        cudaGetLastError();  // or the next check would find it again
        fail(error, "cannot take %.2f GB of the GPU's memory: %s; make --batch, --seq or the model smaller",
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

// Copies that are done when the function returns, after all work that the stream was given before.
static inline void upload(void* device, const void* host, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream->compute));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
}

static inline void download(void* host, const void* device, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream->compute));
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
}

// Copies a batch to one of two places on the device, in turn, and returns which: `bytes` of tokens, then as many of targets
// unless those are NULL. It goes on a stream of its own, under the work of the batch before; operations given to `compute`
// from now on wait for it. The host's memory may be filled anew at once.
static inline int32_t* upload_batch(int32_t* const places[2], const int32_t* tokens, const int32_t* targets, size_t bytes,
                                    Stream stream) {
    int turn = (int)(stream->batches % 2);
    char* staging = (char*)stream->staging[turn];
    if (stream->batches > 0) CUDA_CHECK(cudaEventRecord(stream->used[!turn], stream->compute));
    if (stream->batches > 1) {
        CUDA_CHECK(cudaEventSynchronize(stream->copied[turn]));  // the staging memory is free
        CUDA_CHECK(cudaStreamWaitEvent(stream->copy, stream->used[turn], 0));
    }
    memcpy(staging, tokens, bytes);
    if (targets) memcpy(staging + bytes, targets, bytes);
    CUDA_CHECK(cudaMemcpyAsync(places[turn], staging, targets ? 2 * bytes : bytes, cudaMemcpyHostToDevice, stream->copy));
    CUDA_CHECK(cudaEventRecord(stream->copied[turn], stream->copy));
    CUDA_CHECK(cudaStreamWaitEvent(stream->compute, stream->copied[turn], 0));
    stream->batches++;
    return places[turn];
}

static inline void fill_zero(void* memory, size_t bytes, Stream stream) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->compute));
}

// ------------------------------------------------------------------------------------------------
// 3. Elements
//
// Memory is read and written fastest 16 bytes a thread: PACK elements. Where rows are not a multiple of that long, or do
// not begin on 16 bytes, kernels take elements one by one: their template parameter is the number taken at a time.

enum { PACK = 16 / sizeof(floatX), WARP = 32 };

// W neighbouring elements, W = PACK or 1, as floats.
template <int W>
struct Lanes {
    float x[W];
};

template <int W>
static __device__ inline Lanes<W> lanes_load(const floatX* p) {
    Lanes<W> lanes;
    floatX elements[W];
    if constexpr (W == PACK) {
        uint4 bits = *(const uint4*)p;
        memcpy(elements, &bits, 16);
    } else {
        elements[0] = p[0];
    }
    #pragma unroll
    for (int i = 0; i < W; i++) lanes.x[i] = float_of(elements[i]);
    return lanes;
}

template <int W>
static __device__ inline void lanes_store(floatX* p, Lanes<W> lanes) {
    floatX elements[W];
    #pragma unroll
    for (int i = 0; i < W; i++) elements[i] = floatX_of(lanes.x[i]);
    if constexpr (W == PACK) {
        uint4 bits;
        memcpy(&bits, elements, 16);
        *(uint4*)p = bits;
    } else {
        p[0] = elements[0];
    }
}

// W neighbouring floats, 16 bytes at a time where W allows it.
template <int W>
static __device__ inline Lanes<W> floats_load(const float* p) {
    Lanes<W> lanes;
    if constexpr (W % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 four = *(const float4*)(p + i);
            memcpy(&lanes.x[i], &four, 16);
        }
    } else {
        #pragma unroll
        for (int i = 0; i < W; i++) lanes.x[i] = p[i];
    }
    return lanes;
}

template <int W>
static __device__ inline void floats_store(float* p, Lanes<W> lanes) {
    if constexpr (W % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 four;
            memcpy(&four, &lanes.x[i], 16);
            *(float4*)(p + i) = four;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < W; i++) p[i] = lanes.x[i];
    }
}

template <int W>
static __device__ inline Lanes<W> lanes_zero(void) {
    Lanes<W> lanes;
    #pragma unroll
    for (int i = 0; i < W; i++) lanes.x[i] = 0.0f;
    return lanes;
}

template <int W>
static __device__ inline Lanes<W> lanes_add(Lanes<W> a, Lanes<W> b) {
    #pragma unroll
    for (int i = 0; i < W; i++) a.x[i] += b.x[i];
    return a;
}

// Whether rows of n elements that begin at these addresses can be taken PACK at a time. NULL counts as aligned.
static inline bool packs_fit(size_t n, const void* a, const void* b, const void* c, const void* d) {
    return n % PACK == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

// ------------------------------------------------------------------------------------------------
// 4. Sums

template <typename T>
static __device__ inline T warp_sum(T x) {
    #pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

static __device__ inline float warp_max(float x) {
    #pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// The sum over the block, for every thread of it. blockDim.x is a multiple of 32, up to 1024; shared (32) may be used
// again at once.
static __device__ inline float block_sum(float x, float* shared) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    x = warp_sum(x);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : 0.0f);
    __syncthreads();
    return x;
}

static __device__ inline float block_max(float x, float* shared) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    x = warp_max(x);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_max(lane < warps ? shared[lane] : -INFINITY);
    __syncthreads();
    return x;
}

#endif  // LLMTRAIN_DEVICE_CUH
