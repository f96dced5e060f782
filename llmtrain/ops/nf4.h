// nf4.h: weights in 4 bits, NormalFloat 4, with the codes and the numbers of bitsandbytes; in plain C.
//
//   1. format         Nf4: where codes and scales lie in memory; nf4_bytes, nf4_layout
//   2. quantizing     nf4_quantize, from floats, at load time: on the host in both backends
//   3. dequantizing   nf4_floats, on the host; nf4_dequantize, an operation: nf4.cuh has the same in CUDA
//
//     Nf4 q;                                                                  n weights, say of a matrix (out, in)
//     nf4_layout(&q, memory, n, true);                                        memory: nf4_bytes(n, true) bytes
//     if (!nf4_quantize(&q, weights, "block.0.qkv_weight", &error)) ...       weights (n)
//     nf4_dequantize(rows, &q, first * in, count * in, stream);               rows first to first + count - 1
//
// "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al., 2023), as in bitsandbytes 0.50. 64 neighbors of the
// flat weight share a scale, their largest magnitude. A code of 4 bits stands for one of 16 numbers between -1 and 1,
// which are about equally frequent where weights are normal numbers. Double quantization stores the scales less their
// mean in 8 bits, in blocks of 256, as the signed dynamic map (optimizers/quantized.h) times a float per block. A
// weight takes 4 + 8/64 + 32/(64 256) = 4.127 bits; with a float per scale 4.5.
//
// What must not be merged into one tensor before it is quantized: q, k and v, or gate and up, which have a mean and
// blocks of scales each where others write them.

#ifndef LLMTRAIN_NF4_H
#define LLMTRAIN_NF4_H

#include "base.h"
#include "optimizers/quantized.h"  // the dynamic map

// ------------------------------------------------------------------------------------------------
// 1. Format

enum {
    NF4_CODES = 16,
    NF4_BLOCK = 64,    // weights per scale
    NF4_SCALES = 256,  // scales per scale of scales
    NF4_ZERO = 7       // the code of 0
};

typedef struct {
    float values[NF4_CODES];
} Nf4Table;

// The number of each code, ascending.
static const Nf4Table NF4_TABLE = {{
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}};

// n weights. Owns nothing: all arrays lie in one piece of memory, of the host or of a device; nf4_layout sets them.
typedef struct {
    size_t n;
    uint8_t* codes;        // (n / 2, rounded up), two to a byte, the first in the high half
    float* scales;         // (blocks), that is n / 64, rounded up; with double quantization (blocks / 256, rounded up)
    float* map;            // (NF4_MAP) the numbers of scale_codes, those of dynamic_map, and their offset, which is
                           // added to each; NULL: no double quantization
    uint8_t* scale_codes;  // (blocks); NULL: no double quantization
} Nf4;

enum { NF4_OFFSET = DYNAMIC_CODES, NF4_MAP };  // the last of map

// The bytes of n weights, a multiple of 16.
static inline size_t nf4_bytes(size_t n, bool doubled) {
    size_t blocks = divide_up(n, NF4_BLOCK), floats = blocks, bytes = round_up(divide_up(n, 2), 16);
    if (doubled) floats = divide_up(blocks, NF4_SCALES) + NF4_MAP, bytes += round_up(blocks, 16);
    return bytes + round_up(floats * sizeof(float), 16);
}

// Puts the arrays of n weights into memory, nf4_bytes(n, doubled) of them, aligned to 16 bytes. Reads and writes none
// of it: after a copy of the memory to a device, a copy of the struct that is laid out there describes it.
static inline void nf4_layout(Nf4* q, void* memory, size_t n, bool doubled) {
    size_t blocks = divide_up(n, NF4_BLOCK);
    q->n = n;
    q->codes = (uint8_t*)memory;
    q->scales = (float*)(q->codes + round_up(divide_up(n, 2), 16));
    size_t floats = divide_up(blocks, NF4_SCALES) + NF4_MAP;
    q->map = doubled ? q->scales + floats - NF4_MAP : NULL;
    q->scale_codes = doubled ? (uint8_t*)q->scales + round_up(floats * sizeof(float), 16) : NULL;
}

// The scale of a block. Product and sum are rounded each, as by two operations of bitsandbytes.
HOST_DEVICE ALWAYS_INLINE float nf4_scale(const Nf4* q, size_t block) {
    if (q->scale_codes == NULL) return q->scales[block];
    float number = q->map[q->scale_codes[block]], scale = q->scales[block / NF4_SCALES];
#ifdef __CUDA_ARCH__
    return __fadd_rn(__fmul_rn(number, scale), q->map[NF4_OFFSET]);
#else
    volatile float product = number * scale;  // which a compiler that fuses would not round
    return product + q->map[NF4_OFFSET];
#endif
}

// ------------------------------------------------------------------------------------------------
// 2. Quantizing

// The smallest number by which a block is divided: one of zeros has zeros, not NaN.
#define NF4_SMALLEST 1e-38f

// codes (n / 2, rounded up) of x (n), at most a block; returns the scale, which is not finite if one of x is not. The
// code is that of the nearest number, of two equally near ones the lower.
static inline float nf4_quantize_block(uint8_t* codes, const float* x, size_t n) {
    float middles[NF4_CODES - 1];
    uint8_t numbers[NF4_BLOCK];
    uint32_t largest = 0;
    for (int k = 0; k < NF4_CODES - 1; k++) middles[k] = (NF4_TABLE.values[k] + NF4_TABLE.values[k + 1]) * 0.5f;
    #pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < n; i++) largest = magnitude_bits(x[i]) > largest ? magnitude_bits(x[i]) : largest;
    float scale = float_from_bits(largest), inverse = 1.0f / (scale > NF4_SMALLEST ? scale : NF4_SMALLEST);
    memset(numbers, NF4_ZERO, sizeof numbers);  // of what fills the last byte
    #pragma omp simd
    for (size_t i = 0; i < n; i++) {
        int below = 0;
        for (int k = 0; k < NF4_CODES - 1; k++) below += x[i] * inverse > middles[k];
        numbers[i] = (uint8_t)below;
    }
    for (size_t j = 0; j < divide_up(n, 2); j++) codes[j] = (uint8_t)(numbers[2 * j] << 4 | numbers[2 * j + 1]);
    return scale;
}

// Quantizes scales (blocks), less the offset.
static inline void nf4_quantize_scales(Nf4* q, const float* scales, float offset) {
    size_t blocks = divide_up(q->n, NF4_BLOCK);
    DynamicMap map;
    dynamic_map(&map, true);
    memcpy(q->map, map.values, sizeof map.values);
    q->map[NF4_OFFSET] = offset;
    #pragma omp parallel for
    for (size_t first = 0; first < blocks; first += NF4_SCALES) {
        size_t count = min_size(NF4_SCALES, blocks - first);
        float from_mean[NF4_SCALES];
        for (size_t i = 0; i < count; i++) from_mean[i] = scales[first + i] - offset;
        q->scales[first / NF4_SCALES] = quantize_block(q->scale_codes + first, from_mean, &map, true, count);
    }
}

// Quantizes x (n) into q, which nf4_layout has laid out. Fails if one of x is not finite; name: of the tensor, for the
// sentence. The offset is the mean of the scales, from a sum in double, which bitsandbytes adds up in float.
static inline bool nf4_quantize(Nf4* q, const float* x, const char* name, Error* error) {
    size_t blocks = divide_up(q->n, NF4_BLOCK), bad = q->n;
    float* scales = q->scale_codes ? (float*)memory_allocate(blocks * sizeof(float)) : q->scales;
    double sum = 0.0;
    if (scales == NULL) return fail_with(error, "out of memory for %zu scales of %.160s", blocks, name);
    #pragma omp parallel for
    for (size_t block = 0; block < blocks; block++) {
        size_t first = block * NF4_BLOCK;
        scales[block] = nf4_quantize_block(q->codes + first / 2, x + first, min_size(NF4_BLOCK, q->n - first));
    }
    for (size_t block = blocks; block-- > 0;) {
        sum += (double)scales[block];
        if (isfinite(scales[block])) continue;
        for (bad = block * NF4_BLOCK; isfinite(x[bad]);) bad++;
    }
    if (q->scale_codes && bad == q->n) nf4_quantize_scales(q, scales, (float)(sum / (double)blocks));
    if (scales != q->scales) free(scales);
    return bad == q->n || fail_with(error, "%.160s cannot be quantized: element %zu of it is not finite; use another "
                                    "copy of the model", name, bad);
}

// ------------------------------------------------------------------------------------------------
// 3. Dequantizing

// The numbers that the codes of a block stand for.
static inline Nf4Table nf4_numbers(const Nf4* q, size_t block) {
    Nf4Table numbers;
    float scale = nf4_scale(q, block);
    for (int k = 0; k < NF4_CODES; k++) numbers.values[k] = NF4_TABLE.values[k] * scale;
    return numbers;
}

HOST_DEVICE ALWAYS_INLINE size_t nf4_code(const uint8_t* codes, size_t i) {
    return codes[i / 2] >> (i % 2 ? 0 : 4) & 15;
}

// out (n) = weights first to first + n - 1, unrounded. On the host, in both backends.
static inline void nf4_floats(float* out, const Nf4* q, size_t first, size_t n) {
    #pragma omp parallel for if (n > 65536)
    for (size_t block = first / NF4_BLOCK; block < divide_up(first + n, NF4_BLOCK); block++) {
        size_t begin = max_size(first, block * NF4_BLOCK), end = min_size(first + n, (block + 1) * NF4_BLOCK);
        const Nf4Table numbers = nf4_numbers(q, block);
        for (size_t i = begin; i < end; i++) out[i - first] = numbers.values[nf4_code(q->codes, i)];
    }
}

LLMTRAIN_CPU_BEGIN

// out (n) = weights first to first + n - 1, each the number of its code times the scale of its block, rounded. Rows of
// a matrix (out, in) are such a range.
static inline void nf4_dequantize(floatX* out, const Nf4* q, size_t first, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t block = first / NF4_BLOCK; block < divide_up(first + n, NF4_BLOCK); block++) {
        size_t begin = max_size(first, block * NF4_BLOCK), end = min_size(first + n, (block + 1) * NF4_BLOCK);
        const Nf4Table numbers = nf4_numbers(q, block);
        floatX rounded[NF4_CODES];
        for (int k = 0; k < NF4_CODES; k++) rounded[k] = floatX_of(numbers.values[k]);
        for (size_t i = begin; i < end; i++) out[i - first] = rounded[nf4_code(q->codes, i)];
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_NF4_H
