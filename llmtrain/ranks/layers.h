// layers.h: linear layers: what every matmul of a model goes through.
//
//   linear_forward(&layers, out, in, block->attention_out, N);
//   linear_backward(&layers, din, dout, in, block->attention_out, N);
//
// They alone know where a weight is stored, in which type, and on which ranks. Tensor parallelism and adapters (LoRA)
// live behind them, and FP8 and 4-bit weights would, and nothing else has to know. Sizes, freezing and accumulation
// follow from the table of tensors.
//
// With tensor parallelism N counts this rank's rows. A layer that is divided by outputs gathers its input from the
// ranks that share it, and returns their rows, tp N; one that is divided by inputs takes tp N rows, and returns its own
// N of the ranks' sums. Backward it is the other way round.

#ifndef LLMTRAIN_LAYERS_H
#define LLMTRAIN_LAYERS_H

#include "adapters.h"
#include "tensor_parallel.h"

// Whether a layer is divided over ranks so: by outputs (SPLIT_ROWS, of its weight), or by inputs.
static inline bool linear_is_split(const Layers* l, Linear linear, TensorSplit by) {
    return layer_tensor(l, linear.weight)->part.by == by;
}

// Rows x (N, width) of this rank or, if the layer is divided so, of all ranks that share it.
static inline const floatX* linear_gather(const Layers* l, const floatX* x, Linear linear, TensorSplit by, size_t N,
                                          size_t width) {
    if (!linear_is_split(l, linear, by)) return x;
    return tensor_gather(l->ranks, x, N * l->ranks->tp, width, l->stream);
}

// out (N, C) = this rank's rows of x weight^T + bias, or of x weight if `backward`, where all ranks' leaves are summed.
static inline void linear_sum(const Layers* l, floatX* out, const floatX* x, Linear linear, bool backward,
                              size_t N) {
    const Tensor* weight = layer_tensor(l, linear.weight);
    size_t all = N * l->ranks->tp, C = backward ? linear_inputs(l, linear) : linear_outputs(l, linear);
    const floatX* bias = backward ? NULL : layer_param(l, linear.bias);
    TensorSum sum = {weight, layer_param(l, linear.weight), bias, x, backward, 0, all};
    tensor_sum(l->ranks, &sum, l->stream);
    tensor_scatter(l->ranks, out, bias, all, C, l->stream);
}

// out (N, outputs) = in (N, inputs) weight^T + bias
static inline void linear_forward(const Layers* l, floatX* out, const floatX* in, Linear linear, size_t N) {
    size_t inputs = linear_inputs(l, linear);
    if (l->ranks->has_leaves && linear_is_split(l, linear, SPLIT_COLUMNS)) {
        linear_sum(l, out, in, linear, false, N);
    } else {
        matmul_forward(out, linear_gather(l, in, linear, SPLIT_ROWS, N, inputs), layer_param(l, linear.weight),
                       layer_param(l, linear.bias), N * l->ranks->tp, linear_outputs(l, linear), inputs, l->stream);
    }
    adapters_forward(l, out, in, linear, N);
}

// The same followed by GELU: out (N, outputs), before = what GELU is computed of.
static inline void linear_forward_gelu(const Layers* l, floatX* out, floatX* before, const floatX* in, Linear linear,
                                       size_t N) {
    size_t inputs = linear_inputs(l, linear);
    if (adapters_active(l, linear)) {
        linear_forward(l, before, in, linear, N);
        gelu_forward(out, before, N * linear_outputs(l, linear), l->stream);
        return;
    }
    matmul_gelu_forward(out, before, linear_gather(l, in, linear, SPLIT_ROWS, N, inputs),
                        layer_param(l, linear.weight), layer_param(l, linear.bias), N * l->ranks->tp,
                        linear_outputs(l, linear), inputs, l->stream);
}

// Computes `out` again, from `before` if that is enough.
static inline void linear_recompute_gelu(const Layers* l, floatX* out, floatX* before, const floatX* in,
                                         Linear linear, size_t N) {
    size_t inputs = linear_inputs(l, linear);
    if (adapters_active(l, linear)) {
        gelu_forward(out, before, N * linear_outputs(l, linear), l->stream);
        return;
    }
    const floatX* x = GELU_NEEDS_MATMUL ? linear_gather(l, in, linear, SPLIT_ROWS, N, inputs) : in;
    gelu_recompute(out, before, x, layer_param(l, linear.weight), layer_param(l, linear.bias),
                   N * l->ranks->tp, linear_outputs(l, linear), inputs, l->stream);
}

// dweight, dbias (either may be NULL; both are of one bucket) from dout (N, outputs) and in (N, inputs). accumulate:
// earlier rows of this micro-batch, and of this leaf, were already added.
static inline void linear_backward_rows(const Layers* l, float* dweight, float* dbias, const floatX* dout,
                                        const floatX* in, Linear linear, bool accumulate, size_t N) {
    bool adds = accumulate || flat_adds(l->flat, layer_tensor(l, linear.weight));
    if (dweight || dbias)
        matmul_backward_weight(dweight, dbias, dout, in, adds, N, linear_outputs(l, linear),
                               linear_inputs(l, linear), l->stream);
}

// The same of all rows, leaf by leaf; frozen tensors are skipped. dout, in: as linear_backward has them; gathered:
// dout or, if the layer is divided by inputs, that of all ranks.
static inline void linear_backward_leaves(const Layers* l, const floatX* dout, const floatX* gathered, const floatX* in,
                                          Linear linear, size_t N) {
    size_t outputs = linear_outputs(l, linear), inputs = linear_inputs(l, linear), all = N * l->ranks->tp;
    float *dweight = layer_grad(l, linear.weight), *dbias = layer_grad(l, linear.bias);
    bool whole = tensor_exists(linear.bias) && layer_tensor(l, linear.bias)->part.by == SPLIT_NONE &&
                 l->ranks->has_leaves;  // the bias is not divided: its gradient is of this rank's rows
    for (size_t leaf = 0; whole && dbias && leaf < layer_leaves(l, linear.bias); leaf++) {
        Slice rows = leaf_rows(l, linear.bias, leaf, N);
        linear_backward_rows(l, NULL, dbias, dout + rows.first * outputs, NULL, linear, false, slice_length(rows));
        leaf_end(l, leaf, linear.bias);
    }
    if (whole) dbias = NULL;
    if (dweight || dbias) in = linear_gather(l, in, linear, SPLIT_ROWS, N, inputs);
    for (size_t leaf = 0; leaf < layer_leaves(l, linear.weight); leaf++) {
        Slice rows = leaf_rows(l, linear.weight, leaf, all);
        linear_backward_rows(l, dweight, dbias, gathered + rows.first * outputs, in + rows.first * inputs, linear,
                             false, slice_length(rows));
        if (dweight) leaf_end(l, leaf, linear.weight);
        if (dbias) leaf_end(l, leaf, linear.bias);
    }
}

// dweight, dbias alone.
static inline void linear_backward_weight(const Layers* l, const floatX* dout, const floatX* in, Linear linear,
                                          size_t N) {
    const floatX* gathered = linear_gather(l, dout, linear, SPLIT_COLUMNS, N, linear_outputs(l, linear));
    linear_backward_leaves(l, dout, gathered, in, linear, N);
    adapters_backward(l, NULL, dout, in, linear, true, N);
}

// din (N, inputs) = dout (N, outputs) weight; dweight, dbias.
static inline void linear_backward(const Layers* l, floatX* din, const floatX* dout, const floatX* in, Linear linear,
                                   size_t N) {
    size_t outputs = linear_outputs(l, linear), inputs = linear_inputs(l, linear);
    const floatX* gathered = linear_gather(l, dout, linear, SPLIT_COLUMNS, N, outputs);
    if (l->ranks->has_leaves && linear_is_split(l, linear, SPLIT_ROWS))
        linear_sum(l, din, dout, linear, true, N);
    else
        matmul_backward_input(din, gathered, layer_param(l, linear.weight), N * l->ranks->tp, outputs, inputs,
                              l->stream);
    if (!l->defers) linear_backward_leaves(l, dout, gathered, in, linear, N);  // or block_weights does it
    adapters_backward(l, din, dout, in, linear, !l->defers, N);
}

// The same where in = gelu(before): din is the gradient of `before`.
static inline void linear_backward_gelu(const Layers* l, floatX* din, const floatX* dout, const floatX* in,
                                        const floatX* before, Linear linear, size_t N) {
    size_t outputs = linear_outputs(l, linear), inputs = linear_inputs(l, linear);
    if (adapters_active(l, linear)) {
        linear_backward(l, din, dout, in, linear, N);
        gelu_backward(din, din, before, N * inputs, l->stream);
        return;
    }
    const floatX* gathered = linear_gather(l, dout, linear, SPLIT_COLUMNS, N, outputs);
    matmul_gelu_backward_input(din, gathered, layer_param(l, linear.weight), before, N * l->ranks->tp, outputs,
                               inputs, l->stream);
    if (!l->defers) linear_backward_leaves(l, dout, gathered, in, linear, N);
}

#endif  // LLMTRAIN_LAYERS_H
