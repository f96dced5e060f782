// update.cuh: one step of any optimizer over slices of the parameters in CUDA, with the names and signatures of
// update.h.

#ifndef LLMTRAIN_OPTIMIZERS_UPDATE_CUH
#define LLMTRAIN_OPTIMIZERS_UPDATE_CUH

#include "../vectors.cuh"
#include "factored.cuh"
#include "matrix.cuh"
#include "multi_tensor.cuh"
#include "quantized.cuh"

// ------------------------------------------------------------------------------------------------
// 1. Elementwise optimizers
//
// Defines: optimizer_update_elements.
// Needs: llmtrain/ops/optimizers/multi_tensor.cuh.
//
// One launch updates many tensors: multi_tensor.cuh. A thread owns W elements of every vector. In 16-bit builds AdamW
// with master weights moves 30 bytes per parameter: weight, m, v, gradient in, weight, m, v, stored parameter out.

template <int W>
static __global__ void optimizer_kernel(MultiTensorList list, ElementStep e) {
    const unsigned number = multi_tensor_find(&list, blockIdx.x);
    const MultiTensorSlice slice = list.slices[number];
    const size_t i = ((size_t)(blockIdx.x - list.begins[number]) * blockDim.x + threadIdx.x) * W;
    if (i >= slice.n) return;
    float *m = (float*)slice.states[0], *v = (float*)slice.states[1];
    Lanes<W> w = slice.master_weights ? group_load<W>(slice.master_weights + i) : lanes_load<W>(slice.params + i);
    Lanes<W> gm = {}, gv = {}, g = group_load<W>(slice.grads + i);
    Group<floatX, W> p;
    e.step.weight_decay = slice.weight_decay;
    e.step.lr = slice.lr;
    if (m) gm = group_load<W>(m + i);
    if (v) gv = group_load<W>(v + i);
    #pragma unroll
    for (int j = 0; j < W; j++) optimizer_element(e.step.kind, &w.x[j], &gm.x[j], &gv.x[j], g.x[j], &e);
    if (m) group_store<W>(m + i, gm);
    if (v) group_store<W>(v + i, gv);
    if (slice.master_weights) group_store<W>(slice.master_weights + i, w);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        if (slice.master_weights || FLOATX_IS_FLOAT) {
            p.x[j] = floatX_of(w.x[j]);
        } else {
            uint32_t random = group_random<W>(e.step.seed, RANDOM_ROUNDING, e.step.step, slice.first + i, j);
            p.x[j] = floatX_of_stochastic(w.x[j], random);
        }
    }
    group_store<W>(slice.params + i, p);
}

static inline void elements_update(const OptimizerSlice* slices, size_t count, const OptimizerStep* o, Stream stream) {
    multi_tensor_launch(optimizer_kernel<FOUR>, optimizer_kernel<1>, slices, count, o, stream);
}

static inline void optimizer_update_elements(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    elements_update(slice, 1, o, stream);
}

// ------------------------------------------------------------------------------------------------
// 2. Any optimizer
//
// Defines: optimizer_update, optimizer_update_list.
// Needs: llmtrain/ops/vectors.cuh, llmtrain/ops/optimizers/factored.cuh, llmtrain/ops/optimizers/matrix.cuh,
// llmtrain/ops/optimizers/quantized.cuh, section 1.

static const MatrixOperations MATRIX_OPERATIONS = {matrix_multiply, matrix_combine, sum_of_squares, matrix_normalize,
                                                   matrix_randomize, matrix_orthonormalize, optimizer_update_elements};

// One launch for all slices, except with factored and matrix optimizers, which take a slice at a time.
static inline void optimizer_update_list(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                         Stream stream) {
    ShardRule rule = OPTIMIZERS[o->kind].rule;
    if (o->kind == OPTIMIZER_ADAMW_8BIT) adamw_8bit_update(slices, count, o, stream);
    else if (o->kind == OPTIMIZER_ADAMW_BF16) adamw_bf16_update(slices, count, o, stream);
    else if (rule == SHARD_ANYWHERE) elements_update(slices, count, o, stream);
    for (size_t i = 0; i < count && (rule == SHARD_TENSORS || rule == SHARD_MATRICES); i++) {
        OptimizerStep own = optimizer_step_of(&slices[i], o);
        if (rule == SHARD_TENSORS) factored_update(&slices[i], &own, stream);
        else matrix_update(&MATRIX_OPERATIONS, &slices[i], &own, stream);
    }
}

static inline void optimizer_update(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    optimizer_update_list(slice, 1, o, stream);
}

#endif  // LLMTRAIN_OPTIMIZERS_UPDATE_CUH
