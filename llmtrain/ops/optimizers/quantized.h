// quantized.h: AdamW with narrow states, in plain C: the specification of the kernels of the same name, and
// the CPU backend.
//
//   optimizer     states, bytes per parameter                       AdamW with 32-bit states: 8
//   adamw-8bit    m, v: 1 each; their scales: 4 for 256 elements    2.03
//   adamw-bf16    m, v: 2 each                                      4
//
// Both compute as AdamW does (optimizer_element), in float, and round the states when they store them; the step is
// taken with the states before they are rounded. Functions of section 1 run on both backends, with the same bits.

#ifndef LLMTRAIN_OPTIMIZERS_QUANTIZED_H
#define LLMTRAIN_OPTIMIZERS_QUANTIZED_H

#include "optimizers.h"

// ------------------------------------------------------------------------------------------------
// 1. Dynamic maps
//
// "8-bit Optimizers via Block-wise Quantization": 8-bit codes represent numbers from -1 to 1 (m) or 0 to 1 (v) whose
// spacing grows with their size. Each of seven decades, from 10^-7 to 1, is cut into twice as many equal intervals as
// the one below it, whose midpoints are the numbers; 0 and 1 are added:
//
//     decade        10^-7 to 10^-6    ...    0.01 to 0.1    0.1 to 1
//     v             2 numbers                64             128
//     m             1, and its negative      32             64
//
// Codes are in the order of the numbers, as in bitsandbytes, whose create_dynamic_map has the same bits
// (dev/peers/optimizers.py).
//
// The nearest number is found without a search. In a decade the position of x among the numbers is linear in x, and its
// integer part is the index of the number, counted from 0 up; eight comparisons find the decade. Where the position is
// so near an integer that its rounding errors matter, a comparison with the midpoint between two numbers decides. At
// the exact midpoint the number nearer to 0 is taken.

enum {
    DYNAMIC_DECADES = 7,
    DYNAMIC_PARTS = DYNAMIC_DECADES + 2,  // 0 and 1 are parts of their own
    DYNAMIC_CODES = 256,
    DYNAMIC_ZERO = 127                    // the code of 0 in m's map
};
#define DYNAMIC_NEAR 0x1p-13f  // positions, up to 255, are accurate to 5e-5: they come from four rounded numbers

// A part is what lies above its edge; the position there is slope x + offset, at most `tops`.
typedef struct {
    float edges[DYNAMIC_PARTS], slopes[DYNAMIC_PARTS], offsets[DYNAMIC_PARTS], tops[DYNAMIC_PARTS];
} DynamicParts;

typedef struct {
    float values[DYNAMIC_CODES];   // by code
    float middles[DYNAMIC_CODES];  // between the numbers i and i + 1 of those from 0 up; beyond the last: 2
    DynamicParts parts;
} DynamicMap;

// Number k of n in the decade that ends at `top`: the middle of its interval, each operation rounded to float.
static inline float dynamic_number(float top, size_t k, size_t n) {
    float ends[2], step = (1.0f - 0.1f) / (float)n;
    for (size_t i = 0; i < 2; i++) {  // from the nearer end of the decade, as torch.linspace does
        double from_low = (double)0.1f + (double)step * (double)(k + i), from_top = (double)step * (double)(n - k - i);
        ends[i] = (float)(k + i < (n + 1) / 2 ? from_low : 1.0 - from_top);
    }
    return top * ((ends[0] + ends[1]) / 2.0f);
}

static inline void dynamic_map(DynamicMap* map, bool is_signed) {
    DynamicParts* p = &map->parts;
    static const float TOPS[DYNAMIC_DECADES] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    float* numbers = map->values + (is_signed ? DYNAMIC_ZERO : 0);  // from 0 up
    size_t count = 0, first[DYNAMIC_PARTS];
    for (size_t part = 0; part < DYNAMIC_PARTS; part++) {
        bool decade = part > 0 && part <= DYNAMIC_DECADES;
        size_t n = decade ? (size_t)(is_signed ? 1 : 2) << (part - 1) : 1;
        double top = decade ? (double)TOPS[part - 1] : 0, slope = decade ? (double)n / (0.9 * top) : 0;
        first[part] = count;
        p->slopes[part] = (float)slope;
        p->offsets[part] = (float)((double)count + (decade ? -0.1 * top * slope : 0.5));
        p->tops[part] = (float)(count + n) - 0.5f;
        for (size_t k = 0; k < n; k++)
            numbers[count++] = decade ? dynamic_number(TOPS[part - 1], k, n) : part > 0 ? 1.0f : 0.0f;
    }
    for (size_t i = 0; i < DYNAMIC_CODES; i++)
        map->middles[i] = i + 1 < count ? (numbers[i] + numbers[i + 1]) * 0.5f : 2.0f;
    for (size_t part = 0; part < DYNAMIC_PARTS; part++)
        p->edges[part] = part > 0 ? map->middles[first[part] - 1] : 0.0f;
    for (size_t i = 1; is_signed && i <= DYNAMIC_ZERO; i++) map->values[DYNAMIC_ZERO - i] = -numbers[i];
}

// The position of x, which is from 0 to 1. The parts are unrolled by hand, so that a loop over x vectorizes.
HOST_DEVICE ALWAYS_INLINE float dynamic_position(float x, const DynamicParts* p) {
    float slope = p->slopes[0], offset = p->offsets[0], top = p->tops[0];
    x = x <= 1.0f ? x : 1.0f;  // NaN too
#define DYNAMIC_PART(part) \
    slope = x > p->edges[part] ? p->slopes[part] : slope; \
    offset = x > p->edges[part] ? p->offsets[part] : offset; \
    top = x > p->edges[part] ? p->tops[part] : top
    DYNAMIC_PART(1); DYNAMIC_PART(2); DYNAMIC_PART(3); DYNAMIC_PART(4);
    DYNAMIC_PART(5); DYNAMIC_PART(6); DYNAMIC_PART(7); DYNAMIC_PART(8);
#undef DYNAMIC_PART
    float position = multiply_add(x, slope, offset);
    return position < top ? position : top;
}

// Whether the position is too near to an integer to trust its integer part.
HOST_DEVICE ALWAYS_INLINE bool dynamic_near(float position) {
    return fabsf(position - (float)(int)(position + 0.5f)) < DYNAMIC_NEAR;
}

// The index of the number nearest to x >= 0, even where the position is near an integer: half a position below, rounded
// down, or the next. Compared as integers, so that there is no branch.
HOST_DEVICE ALWAYS_INLINE int dynamic_nearest(float x, float position, const float* middles) {
    int below = (int)(position - 0.5f);
    return below + (bits_from_float(x) > bits_from_float(middles[below]));
}

// The code of number `nearest`, counted from 0 up, with the sign of x; -1 has no code, so the next towards 0 is taken.
HOST_DEVICE ALWAYS_INLINE uint8_t dynamic_signed_code(int nearest, float x) {
    int negative = (int)(bits_from_float(x) >> 31);
    nearest -= negative & (nearest > DYNAMIC_ZERO);
    return (uint8_t)(DYNAMIC_ZERO + ((nearest ^ -negative) + negative));
}

typedef struct {
    DynamicMap m, v;
} DynamicMaps;

static inline void dynamic_maps(DynamicMaps* maps) {
    dynamic_map(&maps->m, true);
    dynamic_map(&maps->v, false);
}

// The bits of |x|, which compare as the numbers do, with NaN above all.
HOST_DEVICE ALWAYS_INLINE uint32_t magnitude_bits(float x) { return bits_from_float(x) & 0x7fffffffu; }

// The factor for the elements of a block; a block whose scale has no inverse is stored as zeros.
HOST_DEVICE ALWAYS_INLINE float dynamic_inverse(float scale) { return scale < FLT_MIN ? 0.0f : 1.0f / scale; }

// ------------------------------------------------------------------------------------------------
// 2. 8 bits
//
// A block is 256 elements of a tensor, counted from its first. Its scale is the largest magnitude of its state, so the
// codes represent numbers from -1 to 1.

// codes (n) of x (n), at most 256; returns the scale.
static inline float quantize_block(uint8_t* codes, const float* x, const DynamicMap* map, bool is_signed, size_t n) {
    enum { CHUNK = LLMTRAIN_PIECE(64, 13) };
    const DynamicParts parts = map->parts;  // a copy, which the compiler knows is not written
    uint32_t largest = 0;
    #pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < n; i++) largest = magnitude_bits(x[i]) > largest ? magnitude_bits(x[i]) : largest;
    float scale = float_from_bits(largest), inverse = dynamic_inverse(scale);
    for (size_t first = 0; first < n; first += CHUNK) {
        size_t count = min_size(CHUNK, n - first);
        float sizes[CHUNK], positions[CHUNK];
        int numbers[CHUNK], near = 0;
        #pragma omp simd reduction(| : near)
        for (size_t i = 0; i < count; i++) {
            sizes[i] = fabsf(x[first + i]) * inverse;
            positions[i] = dynamic_position(sizes[i], &parts);
            numbers[i] = (int)positions[i];
            near |= dynamic_near(positions[i]);
        }
        if (near)  // in one chunk of sixty
            for (size_t i = 0; i < count; i++) numbers[i] = dynamic_nearest(sizes[i], positions[i], map->middles);
        #pragma omp simd
        for (size_t i = 0; i < count; i++)
            codes[first + i] = is_signed ? dynamic_signed_code(numbers[i], x[first + i]) : (uint8_t)numbers[i];
    }
    return scale;
}

LLMTRAIN_CPU_BEGIN

static inline void adamw_8bit_update(const OptimizerSlice* slice, const OptimizerStep* o) {
    uint8_t *m_codes = (uint8_t*)slice->states[0], *v_codes = (uint8_t*)slice->states[1];
    float *m_scales = (float*)slice->states[2], *v_scales = (float*)slice->states[3];
    const ElementStep e = element_step(o);
    DynamicMaps maps;
    dynamic_maps(&maps);
    #pragma omp parallel for schedule(static)
    for (size_t block = 0; block < divide_up(slice->n, OPTIMIZER_BLOCK); block++) {
        size_t begin = block * OPTIMIZER_BLOCK, n = min_size(OPTIMIZER_BLOCK, slice->n - begin);
        float memory[OPTIMIZER_BLOCK], m[OPTIMIZER_BLOCK], v[OPTIMIZER_BLOCK];
        float* w = optimizer_weights(memory, slice, begin, n);
        const float* grads = slice->grads + begin;
        for (size_t i = 0; i < n; i++) {
            m[i] = maps.m.values[m_codes[begin + i]] * m_scales[block];
            v[i] = maps.v.values[v_codes[begin + i]] * v_scales[block];
        }
        #pragma omp simd
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_ADAMW, &w[i], &m[i], &v[i], grads[i], &e);
        optimizer_store(slice, o, w, begin, n);
        m_scales[block] = quantize_block(m_codes + begin, m, &maps.m, true, n);
        v_scales[block] = quantize_block(v_codes + begin, v, &maps.v, false, n);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. bfloat16
//
// bfloat16 has 8 bits of precision, so a mean that changes by less than 1/256 of itself would stay as it is, and v
// changes by 1 - beta2 of itself. Stochastic rounding (as in "Revisiting BFloat16 Training") is correct on average.
// An element's random number serves both states: its lower half m, its upper half v.

static inline void adamw_bf16_update(const OptimizerSlice* slice, const OptimizerStep* o) {
    enum { PIECE = LLMTRAIN_PIECE(512, 29) };
    uint16_t *m_halves = (uint16_t*)slice->states[0], *v_halves = (uint16_t*)slice->states[1];
    const ElementStep e = element_step(o);
    #pragma omp parallel for schedule(static)
    for (size_t begin = 0; begin < slice->n; begin += PIECE) {
        size_t n = min_size(PIECE, slice->n - begin);
        float memory[PIECE], m[PIECE], v[PIECE], *w = optimizer_weights(memory, slice, begin, n);
        uint32_t random[PIECE];
        const float* grads = slice->grads + begin;
        #pragma omp simd
        for (size_t i = 0; i < n; i++) {
            m[i] = float_from_bf16(m_halves[begin + i]);
            v[i] = float_from_bf16(v_halves[begin + i]);
            optimizer_element(OPTIMIZER_ADAMW, &w[i], &m[i], &v[i], grads[i], &e);
        }
        optimizer_store(slice, o, w, begin, n);
        random_fill(random, o->seed, RANDOM_STATES, o->step, slice->first + begin, n);
        #pragma omp simd
        for (size_t i = 0; i < n; i++) {
            m_halves[begin + i] = bf16_of_stochastic(m[i], random[i]);
            v_halves[begin + i] = bf16_of_stochastic(v[i], random[i] >> 16);
        }
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_OPTIMIZERS_QUANTIZED_H
