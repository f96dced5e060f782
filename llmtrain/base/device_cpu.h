// device_cpu.h: device memory and copies for the runtime, where the device is the machine itself. device.cuh has the
// same functions for a GPU.

#ifndef LLMTRAIN_DEVICE_CPU_H
#define LLMTRAIN_DEVICE_CPU_H

#include "../ops/gemm.h"
#include "container.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 1. Device

// The device of a rank, by its number among the ranks of this machine.
static inline bool device_choose(size_t local_rank, Error* error) {
    (void)local_rank; (void)error;
    return true;
}

static inline bool device_open(Stream* stream, bool tf32, Error* error) {
    (void)tf32; (void)error;
    *stream = NULL;
    return true;
}

static inline void device_close(Stream stream) { (void)stream; }

// Describes, as text, what computes the matmuls and its numerics; sets the device's peak in TFLOP/s, 0 if unknown.
static inline void device_describe(char* text, size_t bytes, double* peak_tflops, Stream stream) {
    (void)stream;
    *peak_tflops = 0;
    const char* note = "the same bits on every CPU";
    if (!ARITHMETIC_FUSED) note = "no fused multiply-add: bits differ from those of other CPUs";
    if (strcmp(gemm_kernel()->name, "accelerate") == 0) note = "whose bits differ from those of other CPUs";
    if (FLOATX_DTYPE == DTYPE_BF16 && gemm_multiplies_bf16()) note = "which multiply bf16";
    else if (!FLOATX_IS_FLOAT) note = "which convert " FLOATX_NAME " to float: PRECISION=FP32 is as fast";
    snprintf(text, bytes, "%s, %s", gemm_backend(), note);
}

// The algorithms of a GPU's matmuls (matmul_choice.cuh): there are none to choose here, and the file is not read.
static inline bool matmul_choices_open(const char* path, bool tells, Stream stream, Error* error) {
    (void)path; (void)tells; (void)stream; (void)error;
    return true;
}
static inline bool matmul_choices_workspace(const char* path, size_t* bytes, Error* error) {
    (void)path; (void)error;
    *bytes = 0;
    return true;
}
static inline uint64_t matmul_choices_hash(Stream stream) { (void)stream; return 0; }

// Whether the host may touch device memory.
static inline bool device_is_host(void) { return true; }

// Logits computed at a time, approximately, out of `all` of a batch: enough that matmuls over a part of the rows lose
// no speed.
static inline size_t head_elements(size_t all) { (void)all; return LLMTRAIN_PIECE((size_t)1 << 25, (size_t)1); }

// Bytes of scratch memory that are enough for every operation on N rows of C channels.
static inline size_t scratch_bytes(size_t N, size_t C) { (void)N; (void)C; return 0; }

static inline void device_wait(Stream stream) { (void)stream; }

// A point in the work of a stream, which another thread may wait for: here it is past as soon as it is set.
typedef char DeviceMark;

static inline void device_mark_open(DeviceMark* mark) { *mark = 0; }
static inline void device_mark_close(DeviceMark* mark) { (void)mark; }
static inline void device_mark_set(DeviceMark* mark, Stream stream) { (void)mark; (void)stream; }
static inline void device_mark_wait(const DeviceMark* mark) { (void)mark; }

// Gives the operations their scratch memory, and prepares device_upload_batch for batches of batch_bytes.
static inline bool device_prepare(Stream stream, void* scratch, size_t bytes, size_t batch_bytes, Error* error) {
    (void)stream; (void)scratch; (void)bytes; (void)batch_bytes; (void)error;
    return true;
}

// The longest sequence that attention takes.
static inline size_t device_longest(void) { return SIZE_MAX; }

// Memory that this process can have, in bytes: of the machine, or of its container; SIZE_MAX if the system does not
// report it. `world` matters only on a GPU.
static inline size_t device_available(size_t world) {
    (void)world;
    return min_size(memory_available(), container_limits("").memory);
}

// ------------------------------------------------------------------------------------------------
// 2. Memory

static inline void fill_zero(void* memory, size_t bytes, Stream stream) {
    (void)stream;
    const size_t piece = LLMTRAIN_PIECE(1 << 18, 509);
    #pragma omp parallel for if (bytes > piece)
    for (size_t first = 0; first < bytes; first += piece)
        memset((char*)memory + first, 0, min_size(piece, bytes - first));
}

// Zeroed memory, all of it touched; NULL after a failure.
static inline void* device_allocate(size_t bytes, Stream stream, Error* error) {
    void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fail_with(error, "cannot map %.2f GB of memory: %s; make --batch, --seq or the model smaller, or raise the "
                  "limit (ulimit -v)", 1e-9 * (double)bytes, strerror(errno));
        return NULL;
    }
    memory_use_large_pages(memory, bytes);
    fill_zero(memory, bytes, stream);
    return memory;
}

static inline void device_free(void* memory, size_t bytes) { munmap(memory, bytes); }

// Host memory for copies to and from the device; NULL if there is none.
static inline void* host_allocate(size_t bytes) { return memory_allocate(bytes); }
static inline void host_free(void* memory) { free(memory); }

// ------------------------------------------------------------------------------------------------
// 3. Copies

// Copies that run after all earlier work in the stream, and are complete when the function returns.
static inline void device_upload(void* device, const void* host, size_t bytes, Stream stream) {
    (void)stream;
    memcpy(device, host, bytes);
}

// memcpy for arrays larger than the caches: its stores bypass them, so the old contents of `to` are not read first.
static inline void copy_past_caches(char* to, const char* from, size_t bytes) {
    size_t done = 0;
#ifdef __SSE2__
    done = min_size((16 - (uintptr_t)to % 16) % 16, bytes);
    memcpy(to, from, done);
    for (; done + 16 <= bytes; done += 16)
        _mm_stream_si128((__m128i*)(void*)(to + done), _mm_loadu_si128((const __m128i*)(const void*)(from + done)));
    _mm_sfence();
#endif
    memcpy(to + done, from + done, bytes - done);
}

static inline void device_download(void* host, const void* device, size_t bytes, Stream stream) {
    (void)stream;
    const size_t piece = LLMTRAIN_PIECE(1 << 18, 509);
    if (bytes < piece) {
        memcpy(host, device, bytes);
        return;
    }
    #pragma omp parallel for
    for (size_t first = 0; first < bytes; first += piece)
        copy_past_caches((char*)host + first, (const char*)device + first, min_size(piece, bytes - first));
}

static inline void device_copy(void* to, const void* from, size_t bytes, Stream stream) {
    (void)stream;
    memcpy(to, from, bytes);
}

// Copies a batch to the device and returns its slot: `bytes` of tokens, as many of targets, undefined if those are
// NULL, and of positions. The host memory may be reused at once. A GPU alternates between the two slots; here one is
// enough.
static inline int32_t* device_upload_batch(int32_t* const slots[2], const int32_t* tokens, const int32_t* targets,
                                           const int32_t* positions, size_t bytes, Stream stream) {
    (void)stream;
    memcpy(slots[0], tokens, bytes);
    if (targets) memcpy((char*)slots[0] + bytes, targets, bytes);
    memcpy((char*)slots[0] + 2 * bytes, positions, bytes);
    return slots[0];
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_DEVICE_CPU_H
