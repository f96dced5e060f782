// types.h: the types that every operation uses, on both backends. An operation can be copied into another project with
// the headers that its header includes; sections of kernels.cuh, vectors.cuh and update.cuh list what they need.
//
//   1. sizes        min_size, divide_up
//   2. conversions  float to and from bfloat16 and IEEE binary16
//   3. floatX       the storage dtype of parameters and activations; -DPRECISION_BF16 or -DPRECISION_FP16, else float
//   4. heads        where queries, keys and values lie
//   5. stream       what an operation runs on; CUDA_CHECK, LAUNCH_CHECK
//   6. elements     loads and stores of 16 bytes at a time (CUDA C++ alone)

#ifndef LLMTRAIN_TYPES_H
#define LLMTRAIN_TYPES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#ifdef _FEATURES_H
#define LLMTRAIN_INCLUDED_LATE 1  // after a header of the C library, which hides POSIX if -std=c11: posix.h
#endif
#endif
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__
#define LLMTRAIN_CUDA 1  // also by a C++ compiler, for the emulator
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#ifndef LLMTRAIN_PIECE  // how much is done at a time; results depend on it at most by rounding (small_pieces.h)
#define LLMTRAIN_PIECE(size, small) (size)
#endif
#ifdef LLMTRAIN_CUDA
#include <cuda_runtime.h>
#endif

// ------------------------------------------------------------------------------------------------
// 1. Sizes

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
HOST_DEVICE static inline size_t divide_up(size_t n, size_t by) { return (n + by - 1) / by; }
static inline size_t round_up(size_t n, size_t multiple) { return divide_up(n, multiple) * multiple; }

// ------------------------------------------------------------------------------------------------
// 2. Conversions
//
// bfloat16 is the upper half of a float, binary16 has 5 bits of exponent and 10 of fraction. Rounds to nearest, ties to
// even; NaN stays NaN. Without branches loops over them vectorize; inlined, they use their caller's instruction set.

HOST_DEVICE ALWAYS_INLINE uint32_t bits_from_float(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
HOST_DEVICE ALWAYS_INLINE float float_from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
HOST_DEVICE ALWAYS_INLINE float float_from_bf16(uint16_t half) { return float_from_bits((uint32_t)half << 16); }

HOST_DEVICE ALWAYS_INLINE uint16_t bf16_from_float(float x) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    uint32_t bits = bits_from_float(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
#endif
}

HOST_DEVICE ALWAYS_INLINE float float_from_f16(uint16_t half) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(half));
#else
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t scaled = bits_from_float(float_from_bits(magnitude) * 0x1p112f);  // exponent bias 15 to 127
    uint32_t special = magnitude | 0x7f800000;                                 // infinity and NaN
    return float_from_bits((magnitude >= 0x0f800000 ? special : scaled) | (uint32_t)(half & 0x8000) << 16);
#endif
}

HOST_DEVICE ALWAYS_INLINE uint16_t f16_from_float(float x) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(x));
#else
    uint32_t bits = bits_from_float(x), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000;  // in units of 2^-24
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 0x38800000 ? subnormal : magnitude >= 0x47800000 ? special : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
#endif
}

// ------------------------------------------------------------------------------------------------
// 3. floatX

#if defined(PRECISION_BF16)
typedef struct floatX { uint16_t bits; } floatX;
#define FLOATX_NAME "bf16"
#define FLOATX_DTYPE DTYPE_BF16  // its row of dtypes.h
#define FLOATX_IS_FLOAT 0
#define FLOATX_EPSILON 0x1p-8f  // largest relative rounding error: half of the distance from 1 to the next number
HOST_DEVICE ALWAYS_INLINE float float_of(floatX x) { return float_from_bf16(x.bits); }
HOST_DEVICE ALWAYS_INLINE floatX floatX_of(float x) { floatX r = {bf16_from_float(x)}; return r; }
#elif defined(PRECISION_FP16)
typedef struct floatX { uint16_t bits; } floatX;
#define FLOATX_NAME "fp16"
#define FLOATX_DTYPE DTYPE_F16
#define FLOATX_IS_FLOAT 0
#define FLOATX_EPSILON 0x1p-11f
HOST_DEVICE ALWAYS_INLINE float float_of(floatX x) { return float_from_f16(x.bits); }
HOST_DEVICE ALWAYS_INLINE floatX floatX_of(float x) { floatX r = {f16_from_float(x)}; return r; }
#else
typedef float floatX;
#define FLOATX_NAME "fp32"
#define FLOATX_DTYPE DTYPE_F32
#define FLOATX_IS_FLOAT 1
#define FLOATX_EPSILON 0x1p-24f
HOST_DEVICE ALWAYS_INLINE float float_of(floatX x) { return x; }
HOST_DEVICE ALWAYS_INLINE floatX floatX_of(float x) { return x; }
#endif

// ------------------------------------------------------------------------------------------------
// 4. Heads
//
// qkv (B, T, (H + 2K) D) holds all query heads, then key heads, then value heads of each token. Query head h reads key
// and value head h / (H / K).

#define ATTENTION_MAX_D 256  // the largest head size

// Queries, keys and values of one (batch, head): the offsets in qkv of their first rows, which are `stride` apart.
typedef struct { size_t q, k, v, stride; } HeadRows;

HOST_DEVICE static inline HeadRows head_rows(size_t b, size_t h, size_t T, size_t H, size_t K, size_t D) {
    size_t kv = h / (H / K), stride = (H + 2 * K) * D, row = b * T * stride;
    HeadRows r = {row + h * D, row + (H + kv) * D, row + (H + K + kv) * D, stride};
    return r;
}

// ------------------------------------------------------------------------------------------------
// 5. Stream
//
// Every operation's last argument is a stream: NULL on the CPU. On a GPU all run on `compute`, in order, and share one
// scratch memory. device_open (device.cuh) makes it; a program with a copied kernel can: `static struct Device device;
// cudaStreamCreate(&device.compute);`, and `scratch`, `scratch_bytes` and `processors` where the launcher uses them.

#ifndef LLMTRAIN_CUDA
typedef void* Stream;
#else
struct Device {
    cudaStream_t compute;
    void* scratch;            // of operations that say how much they need (thing_scratch_bytes)
    size_t scratch_bytes;
    size_t processors;        // streaming multiprocessors: grids of a fixed size are multiples of it
    bool tf32;                // matmuls of floats may round their operands to 10 bits of fraction
    struct Matmul* matmul;    // the state of matmul.cuh, made at its first use, and what frees it
    void (*matmul_free)(struct Matmul* matmul);
    struct Uploads* uploads;  // the state of device_upload_batch in device.cuh
};
typedef struct Device* Stream;

// Called with a sentence before a failure on the device ends the process, unless it is NULL.
static struct { void (*call)(void* context, const char* sentence); void* context; } device_failure_hook;

// After a failure on the device nothing there can be trusted, so the process ends.
static inline void device_fail(const char* what, const char* why, const char* file, int line) {
    char sentence[1024];
    snprintf(sentence, sizeof sentence, "%s failed at %s:%d: %s; a fault of the device, its driver or this program",
             what, file, line, why);
    fprintf(stderr, "%s\n", sentence);
    if (device_failure_hook.call) device_failure_hook.call(device_failure_hook.context, sentence);
    fflush(NULL);
    _Exit(1);  // exit would wait for the device
}

static inline void cuda_check(cudaError_t status, const char* what, const char* file, int line) {
    if (status != cudaSuccess) device_fail(what, cudaGetErrorString(status), file, line);
}
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
#define LAUNCH_CHECK() cuda_check(cudaGetLastError(), __func__, __FILE__, __LINE__)  // names the operation

static inline void* device_scratch(Stream stream, size_t bytes) {
    if (bytes > stream->scratch_bytes) device_fail("an operation", "too little scratch memory", __FILE__, __LINE__);
    return stream->scratch;
}

// ------------------------------------------------------------------------------------------------
// 6. Elements
//
// Memory access is fastest with 16 bytes per thread: PACK elements of floatX. Where rows do not fit, kernels take
// elements one by one: their template parameter W is the number taken at a time, PACK or 1.

constexpr int PACK = 16 / sizeof(floatX), WARP = 32;

// W neighboring elements, aligned to and moved in units of 16 bytes, or 8, if they fill those, otherwise one by one. A
// Group has the type in memory; Lanes are the floats of a Group of floatX, which a thread computes with.
template <typename T, int W>
struct alignas(W * sizeof(T) % 16 == 0 ? 16 : W * sizeof(T) == 8 ? 8 : alignof(T)) Group {
    T x[W];
};
template <int W>
using Lanes = Group<float, W>;

template <int W, typename T>
static __device__ inline Group<T, W> group_load(const T* p) { return *(const Group<T, W>*)p; }

// The compiler may split an assignment into stores of 4 bytes; this keeps it whole.
template <int W, typename T>
static __device__ inline void group_store(T* p, Group<T, W> group) {
    if constexpr (sizeof group % 16 == 0) {
        uint4 bits[sizeof group / 16];
        memcpy(bits, &group, sizeof group);
        #pragma unroll
        for (size_t i = 0; i < sizeof group / 16; i++) __stwb((uint4*)p + i, bits[i]);
    } else if constexpr (sizeof group == 8) {
        uint2 bits;
        memcpy(&bits, &group, sizeof bits);
        __stwb((uint2*)p, bits);
    } else {
        *(Group<T, W>*)p = group;
    }
}

template <int W>
static __device__ inline Lanes<W> lanes_load(const floatX* p) {
    Group<floatX, W> elements = group_load<W>(p);
    Lanes<W> lanes;
    #pragma unroll
    for (int i = 0; i < W; i++) lanes.x[i] = float_of(elements.x[i]);
    return lanes;
}

template <int W>
static __device__ inline void lanes_store(floatX* p, Lanes<W> lanes) {
    Group<floatX, W> elements;
    #pragma unroll
    for (int i = 0; i < W; i++) elements.x[i] = floatX_of(lanes.x[i]);
    group_store<W>(p, elements);
}

// Whether rows of n elements that begin at these addresses can be taken PACK at a time. NULL is aligned.
static inline bool packs_fit(size_t n, const void* a, const void* b, const void* c, const void* d) {
    return n % PACK == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}
#endif  // LLMTRAIN_CUDA

#endif  // LLMTRAIN_TYPES_H
