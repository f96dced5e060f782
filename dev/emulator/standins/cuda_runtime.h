// cuda_runtime.h, a stand-in: the part of the CUDA runtime that llmtrain uses, for machines without NVIDIA's headers.
//
//   1. words        __global__ and its like mean nothing to a C++ compiler
//   2. vectors      float4, dim3 ...
//   3. types        errors, handles, attributes, with NVIDIA's names and values
//   4. functions    those with default arguments and those that take typed pointers; runtime.h has the others
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
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
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

STANDIN_VECTORS(int, int, 8, 16)
STANDIN_VECTORS(unsigned, uint, 8, 16)
STANDIN_VECTORS(float, float, 8, 16)
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
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
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
    cudaMemoryTypeDevice = 2
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

struct cudaFuncAttributes {
    int maxThreadsPerBlock;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, l2CacheSize;
    size_t totalGlobalMem, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
};

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_16F = 2,
    CUDA_R_8I = 3,
    CUDA_R_16BF = 14
} cudaDataType;

// ------------------------------------------------------------------------------------------------
// 4. Functions

extern "C" {
cudaError_t cudaMallocHost(void** out, size_t bytes);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream = 0);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = 0);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaMalloc(void** out, size_t bytes);
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags);
}

template <class T>
static inline cudaError_t cudaMalloc(T** out, size_t bytes) {
    return cudaMalloc((void**)out, bytes);
}

template <class T>
static inline cudaError_t cudaMallocHost(T** out, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc((void**)out, bytes, flags);
}

#endif  // STANDIN_CUDA_RUNTIME_H
