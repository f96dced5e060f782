// quantized.cuh: AdamW with states of 8 bits or bfloat16, in CUDA; the functions in C are in
// quantized.h. Both give the same bits.
//
// Both update many tensors in one launch: multi_tensor.cuh.

#ifndef LLMTRAIN_OPTIMIZERS_QUANTIZED_CUH
#define LLMTRAIN_OPTIMIZERS_QUANTIZED_CUH

#include "multi_tensor.cuh"
#include "quantized.h"

// Stores an updated weight as the parameter, rounded stochastically where there are no master weights.
static __device__ inline floatX quantized_param(float w, const MultiTensorSlice* slice, uint32_t random) {
    return slice->master_weights || FLOATX_IS_FLOAT ? floatX_of(w) : floatX_of_stochastic(w, random);
}

// The random bits of elements index to index + W - 1; W is 1, or a multiple of 4, and then so is index.
template <int W>
static __device__ inline Group<uint32_t, W> quantized_random(const OptimizerStep* o, RandomPurpose purpose,
                                                             uint64_t index) {
    Group<uint32_t, W> random;
    #pragma unroll
    for (int j = 0; j < W; j++)
        random.x[j] = W == 1 ? random_bits(o->seed, purpose, o->step, index)
                             : random4(o->seed, purpose, o->step, index / 4 + (uint64_t)(j / 4)).bits[j % 4];
    return random;
}

// ------------------------------------------------------------------------------------------------
// 1. 8 bits
//
// A warp owns a block of 256 elements, 8 per lane: W neighbors at a time, so that a warp reads 32 W neighbors. The
// maximum of a block is a warp reduction, without shared memory. Moves 18 bytes per element in 16-bit builds with
// master weights, 16 in FP32. The maps are in shared memory: 6 look-ups per element take about as many cycles as its
// memory traffic; a binary search would take 16 more.

// Warps per thread block; elements per lane.
enum { QUANTIZED_WARPS = 8, QUANTIZED_LANE = OPTIMIZER_BLOCK / WARP };

// W codes at a time: 4 are aligned to 4 bytes.
template <int W>
static __device__ inline Group<uint8_t, W> codes_load(const uint8_t* p) {
    Group<uint8_t, W> codes;
    if constexpr (W == 4) {
        uint32_t bits = *(const uint32_t*)p;
        memcpy(&codes, &bits, 4);
    } else {
        codes = *(const Group<uint8_t, W>*)p;
    }
    return codes;
}
template <int W>
static __device__ inline void codes_store(uint8_t* p, Group<uint8_t, W> codes) {
    if constexpr (W == 4) {
        uint32_t bits;
        memcpy(&bits, &codes, 4);
        *(uint32_t*)p = bits;
    } else {
        *(Group<uint8_t, W>*)p = codes;
    }
}

// The index of the number nearest to |x| / scale, counted from 0 up; middles: those of the map, in shared memory.
static __device__ inline int quantized_nearest(float x, float inverse, const DynamicMap* map, const float* middles) {
    float size = fabsf(x) * inverse;
    return dynamic_nearest(size, dynamic_position(size, &map->parts), middles);
}

template <int W>
static __global__ void __launch_bounds__(QUANTIZED_WARPS * WARP, 3)
adamw_8bit_kernel(MultiTensorList list, ElementStep e, DynamicMaps maps) {
    __shared__ float values[2][DYNAMIC_CODES], middles[2][DYNAMIC_CODES];
    for (unsigned i = threadIdx.x; i < DYNAMIC_CODES; i += blockDim.x) {
        values[0][i] = maps.m.values[i];
        values[1][i] = maps.v.values[i];
        middles[0][i] = maps.m.middles[i];
        middles[1][i] = maps.v.middles[i];
    }
    __syncthreads();
    const size_t lane = threadIdx.x % WARP;
    for (unsigned chunk = blockIdx.x * QUANTIZED_WARPS + threadIdx.x / WARP; chunk < list.chunks;
         chunk += gridDim.x * QUANTIZED_WARPS) {
        const unsigned number = multi_tensor_find(&list, chunk);
        const MultiTensorSlice slice = list.slices[number];
        const size_t b = chunk - list.begins[number], n = slice.n;
        uint8_t *m_codes = (uint8_t*)slice.states[0], *v_codes = (uint8_t*)slice.states[1];
        float *m_scales = (float*)slice.states[2], *v_scales = (float*)slice.states[3];
        e.step.weight_decay = slice.weight_decay;
        e.step.lr = slice.lr;
        float m[QUANTIZED_LANE], v[QUANTIZED_LANE], m_scale = m_scales[b], v_scale = v_scales[b];
        uint32_t m_largest = 0, v_largest = 0;
        #pragma unroll
        for (int k = 0; k < QUANTIZED_LANE; k += W) {
            size_t i = b * OPTIMIZER_BLOCK + (size_t)k * WARP + lane * W;
            #pragma unroll
            for (int j = 0; j < W; j++) m[k + j] = v[k + j] = 0.0f;
            if (i >= n) continue;
            Group<uint8_t, W> m_code = codes_load<W>(m_codes + i), v_code = codes_load<W>(v_codes + i);
            Lanes<W> w;
            if (slice.master_weights) w = group_load<W>(slice.master_weights + i);
            else w = lanes_load<W>(slice.params + i);
            Lanes<W> g = group_load<W>(slice.grads + i);
            Group<uint32_t, W> random = {};
            if (!slice.master_weights && !FLOATX_IS_FLOAT)
                random = quantized_random<W>(&e.step, RANDOM_ROUNDING, slice.first + i);
            Group<floatX, W> p;
            #pragma unroll
            for (int j = 0; j < W; j++) {
                m[k + j] = values[0][m_code.x[j]] * m_scale;
                v[k + j] = values[1][v_code.x[j]] * v_scale;
                optimizer_element(OPTIMIZER_ADAMW, &w.x[j], &m[k + j], &v[k + j], g.x[j], &e);
                p.x[j] = quantized_param(w.x[j], &slice, random.x[j]);
                m_largest = Max()(magnitude_bits(m[k + j]), m_largest);
                v_largest = Max()(magnitude_bits(v[k + j]), v_largest);
            }
            if (slice.master_weights) group_store<W>(slice.master_weights + i, w);
            group_store<W>(slice.params + i, p);
        }
        m_scale = float_from_bits(warp_max(m_largest));
        v_scale = float_from_bits(warp_max(v_largest));
        float m_inverse = dynamic_inverse(m_scale), v_inverse = dynamic_inverse(v_scale);
        #pragma unroll
        for (int k = 0; k < QUANTIZED_LANE; k += W) {
            size_t i = b * OPTIMIZER_BLOCK + (size_t)k * WARP + lane * W;
            if (i >= n) continue;
            Group<uint8_t, W> m_code, v_code;
            #pragma unroll
            for (int j = 0; j < W; j++) {
                int nearest = quantized_nearest(m[k + j], m_inverse, &maps.m, middles[0]);
                m_code.x[j] = dynamic_signed_code(nearest, m[k + j]);
                v_code.x[j] = (uint8_t)quantized_nearest(v[k + j], v_inverse, &maps.v, middles[1]);
            }
            codes_store<W>(m_codes + i, m_code);
            codes_store<W>(v_codes + i, v_code);
        }
        __syncwarp();  // all lanes have read the scales, including those past the end
        if (lane == 0) {
            m_scales[b] = m_scale;
            v_scales[b] = v_scale;
        }
    }
}

static inline void adamw_8bit_update(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                     Stream stream) {
    MultiTensorList list;
    DynamicMaps maps;
    dynamic_maps(&maps);
    for (int fours = 0; fours < 2; fours++) {
        auto kernel = fours ? adamw_8bit_kernel<FOUR> : adamw_8bit_kernel<1>;
        for (size_t next = 0; multi_tensor_next(&list, &next, slices, count, o, fours, OPTIMIZER_BLOCK);) {
            // Eight blocks fill a multiprocessor; each loads the maps once.
            size_t blocks = min_size(divide_up(list.chunks, QUANTIZED_WARPS), 8 * max_size(stream->processors, 1));
            kernel<<<grid_blocks(blocks), QUANTIZED_WARPS * WARP, 0, stream->compute>>>(list, element_step(o), maps);
            LAUNCH_CHECK();
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 2. bfloat16
//
// A thread owns W elements. Moves 22 bytes per element in 16-bit builds with master weights, 20 in FP32; a quarter of a
// random4 per element is about 30 instructions, about what fits into the time of the memory traffic.

template <int W>
static __global__ void adamw_bf16_kernel(MultiTensorList list, ElementStep e) {
    const unsigned number = multi_tensor_find(&list, blockIdx.x);
    const MultiTensorSlice slice = list.slices[number];
    const size_t i = ((size_t)(blockIdx.x - list.begins[number]) * blockDim.x + threadIdx.x) * W;
    if (i >= slice.n) return;
    e.step.weight_decay = slice.weight_decay;
    e.step.lr = slice.lr;
    uint16_t *m_halves = (uint16_t*)slice.states[0] + i, *v_halves = (uint16_t*)slice.states[1] + i;
    Lanes<W> w = slice.master_weights ? group_load<W>(slice.master_weights + i) : lanes_load<W>(slice.params + i);
    Lanes<W> g = group_load<W>(slice.grads + i);
    Group<uint16_t, W> m = group_load<W>(m_halves), v = group_load<W>(v_halves);
    Group<uint32_t, W> random = {}, states = quantized_random<W>(&e.step, RANDOM_STATES, slice.first + i);
    if (!slice.master_weights && !FLOATX_IS_FLOAT)
        random = quantized_random<W>(&e.step, RANDOM_ROUNDING, slice.first + i);
    Group<floatX, W> p;
    #pragma unroll
    for (int j = 0; j < W; j++) {
        float wide_m = float_from_bf16(m.x[j]), wide_v = float_from_bf16(v.x[j]);
        optimizer_element(OPTIMIZER_ADAMW, &w.x[j], &wide_m, &wide_v, g.x[j], &e);
        p.x[j] = quantized_param(w.x[j], &slice, random.x[j]);
        m.x[j] = bf16_of_stochastic(wide_m, states.x[j]);
        v.x[j] = bf16_of_stochastic(wide_v, states.x[j] >> 16);
    }
    group_store<W>(m_halves, m);
    group_store<W>(v_halves, v);
    if (slice.master_weights) group_store<W>(slice.master_weights + i, w);
    group_store<W>(slice.params + i, p);
}

static inline void adamw_bf16_update(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                     Stream stream) {
    multi_tensor_launch(adamw_bf16_kernel<FOUR>, adamw_bf16_kernel<1>, slices, count, o, stream);
}

#endif  // LLMTRAIN_OPTIMIZERS_QUANTIZED_CUH
