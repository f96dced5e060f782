// cuda_runtime.h, a stand-in: the part of the CUDA runtime that llmtrain uses, for machines without NVIDIA's headers.
//
//   1. words        __global__ and its like mean nothing to a C++ compiler
//   2. vectors      float4, dim3 ...
//   3. types        errors, handles, attributes, with NVIDIA's names and values
//   4. functions    defined in runtime.h
//   5. overloads    those that take typed pointers
//
// Only for the emulator: what is compiled against this does not run on a GPU.

#ifndef STANDIN_CUDA_RUNTIME_H
#define STANDIN_CUDA_RUNTIME_H

#include <stddef.h>

// ------------------------------------------------------------------------------------------------
// 1. Words

#define __global__
#define __device__
#define __host__
#define __constant__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define CUDART_VERSION 13000
#define CUDART_CB

// ------------------------------------------------------------------------------------------------
// 2. Vectors
//
// Aligned to their size where that is a power of two, as a GPU wants them for one load.

#define STANDIN_VECTORS(T, name, align2, align4)                                     \
    struct __attribute__((aligned(align2))) name##2 {                                \
        T x, y;                                                                      \
    };                                                                               \
    struct name##3 {                                                                 \
        T x, y, z;                                                                   \
    };                                                                               \
    struct __attribute__((aligned(align4))) name##4 {                                \
        T x, y, z, w;                                                                \
    };                                                                               \
    static inline name##2 make_##name##2(T x, T y) { return name##2{x, y}; }         \
    static inline name##3 make_##name##3(T x, T y, T z) { return name##3{x, y, z}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return name##4{x, y, z, w}; }

STANDIN_VECTORS(signed char, char, 2, 4)
STANDIN_VECTORS(unsigned char, uchar, 2, 4)
STANDIN_VECTORS(short, short, 4, 8)
STANDIN_VECTORS(unsigned short, ushort, 4, 8)
STANDIN_VECTORS(int, int, 8, 16)
STANDIN_VECTORS(unsigned, uint, 8, 16)
STANDIN_VECTORS(float, float, 8, 16)
STANDIN_VECTORS(long long, longlong, 16, 16)
STANDIN_VECTORS(unsigned long long, ulonglong, 16, 16)
STANDIN_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

// ------------------------------------------------------------------------------------------------
// 3. Types

enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999
};
typedef enum cudaError cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef void (*cudaHostFn_t)(void* data);

#define cudaStreamLegacy ((cudaStream_t)1)
#define cudaStreamDefault 0
#define cudaStreamNonBlocking 1
#define cudaEventDefault 0
#define cudaEventBlockingSync 1
#define cudaEventDisableTiming 2
#define cudaEventWaitDefault 0
#define cudaHostAllocDefault 0
#define cudaHostAllocPortable 1
#define cudaHostAllocMapped 2
#define cudaHostAllocWriteCombined 4
#define cudaOccupancyDefault 0

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMaxRegistersPerBlock = 12,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106,
    cudaDevAttrReservedSharedMemoryPerBlock = 111
};

struct cudaDeviceProp {
    char name[256];
    int major, minor;
    size_t totalGlobalMem;
    int multiProcessorCount, warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int regsPerBlock, regsPerMultiprocessor;
    size_t sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, reservedSharedMemPerBlock;
    int l2CacheSize, memoryBusWidth;
    int concurrentKernels, unifiedAddressing, canMapHostMemory, asyncEngineCount;
};

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_8I = 3,
    CUDA_R_32I = 10,
    CUDA_R_16BF = 14,
    CUDA_R_8F_E4M3 = 28,
    CUDA_R_8F_E5M2 = 29
} cudaDataType;

// ------------------------------------------------------------------------------------------------
// 4. Functions

extern "C" {
cudaError_t cudaMalloc(void** out, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocHost(void** out, size_t bytes);
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* pointer);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream = 0);
cudaError_t cudaMemset(void* to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = 0);

cudaError_t cudaStreamCreate(cudaStream_t* out);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaDeviceSynchronize(void);

cudaError_t cudaEventCreate(cudaEvent_t* out);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaGetDeviceCount(int* out);
cudaError_t cudaGetDevice(int* out);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* out, int device);
cudaError_t cudaDeviceGetAttribute(int* out, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncSetAttribute(const void* kernel, enum cudaFuncAttribute attribute, int value);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void* kernel, int block_threads,
                                                          size_t shared_bytes);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void* kernel, int block_threads,
                                                                   size_t shared_bytes, unsigned flags);

cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
}

// ------------------------------------------------------------------------------------------------
// 5. Overloads

template <class T>
static inline cudaError_t cudaMalloc(T** out, size_t bytes) {
    return cudaMalloc((void**)out, bytes);
}

template <class T>
static inline cudaError_t cudaMallocHost(T** out, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc((void**)out, bytes, flags);
}

template <class T>
static inline cudaError_t cudaHostAlloc(T** out, size_t bytes, unsigned flags) {
    return cudaHostAlloc((void**)out, bytes, flags);
}

#endif  // STANDIN_CUDA_RUNTIME_H
