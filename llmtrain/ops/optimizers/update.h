// update.h: one step of any optimizer over slices of the parameters, in plain C: the specification of the functions of
// the same names in update.cuh, and the CPU backend.
//
//   optimizer_update_list(slices, count, &step, stream);

#ifndef LLMTRAIN_OPTIMIZERS_UPDATE_H
#define LLMTRAIN_OPTIMIZERS_UPDATE_H

#include "../vectors.h"
#include "factored.h"
#include "matrix.h"
#include "quantized.h"

LLMTRAIN_CPU_BEGIN

// One step over w (n); m and v (n each) are the optimizer's state, NULL where its kind has none. Each kind has its own
// loop, which the compiler vectorizes.
static inline void optimizer_apply(float* w, float* m, float* v, const float* grad, const ElementStep* e, size_t n) {
    if (e->step.kind == OPTIMIZER_ADAMW) {
        #pragma omp simd
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_ADAMW, &w[i], &m[i], &v[i], grad[i], e);
    } else if (e->step.kind == OPTIMIZER_SGD) {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_SGD, &w[i], NULL, NULL, grad[i], e);
    } else if (e->step.kind == OPTIMIZER_MOMENTUM) {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_MOMENTUM, &w[i], &m[i], NULL, grad[i], e);
    } else {
        for (size_t i = 0; i < n; i++) optimizer_element(OPTIMIZER_LION, &w[i], &m[i], NULL, grad[i], e);
    }
}

// One step of an elementwise optimizer over a slice.
static inline void optimizer_update_elements(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    (void)stream;
    enum { PIECE = LLMTRAIN_PIECE(2048, 29) };
    const ElementStep e = element_step(o);
    float *m = (float*)slice->states[0], *v = (float*)slice->states[1];
    #pragma omp parallel for
    for (size_t begin = 0; begin < slice->n; begin += PIECE) {
        size_t count = min_size(PIECE, slice->n - begin);
        float memory[PIECE], *w = optimizer_weights(memory, slice, begin, count);
        optimizer_apply(w, m ? m + begin : NULL, v ? v + begin : NULL, slice->grads + begin, &e, count);
        optimizer_store(slice, o, w, begin, count);
    }
}

static const MatrixOperations MATRIX_OPERATIONS = {matrix_multiply, matrix_combine, sum_of_squares, matrix_normalize,
                                                   matrix_randomize, matrix_orthonormalize, optimizer_update_elements};

// One step of the optimizer over a slice.
static inline void optimizer_update(const OptimizerSlice* slice, const OptimizerStep* step, Stream stream) {
    const OptimizerStep own = optimizer_step_of(slice, step), *o = &own;
    if (o->kind == OPTIMIZER_ADAMW_8BIT) adamw_8bit_update(slice, o);
    else if (o->kind == OPTIMIZER_ADAMW_BF16) adamw_bf16_update(slice, o);
    else if (OPTIMIZERS[o->kind].rule == SHARD_TENSORS) factored_update(slice, o);
    else if (OPTIMIZERS[o->kind].rule == SHARD_MATRICES) matrix_update(&MATRIX_OPERATIONS, slice, o, stream);
    else optimizer_update_elements(slice, o, stream);
}

// The same for each of `count` slices.
static inline void optimizer_update_list(const OptimizerSlice* slices, size_t count, const OptimizerStep* o,
                                         Stream stream) {
    for (size_t i = 0; i < count; i++) optimizer_update(&slices[i], o, stream);
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_OPTIMIZERS_UPDATE_H
