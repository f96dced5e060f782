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

// This rank's terms of x weight^T, or of x weight if `backward`, of all rows that share them.
static inline void linear_sum(const Layers* l, const floatX* x, Linear linear, bool backward, size_t N) {
    TensorSum sum = {layer_tensor(l, linear.weight), linear_weight(l, linear),
                     backward ? NULL : layer_param(l, linear.bias), x, backward, 0, N * l->ranks->tp};
    tensor_sum(l->ranks, &sum, l->stream);
}

// out (N, outputs) = in (N, inputs) weight^T + bias
static inline void linear_forward(const Layers* l, floatX* out, const floatX* in, Linear linear, size_t N) {
    size_t inputs = linear_inputs(l, linear);
    if (l->ranks->has_leaves && linear_is_split(l, linear, SPLIT_COLUMNS)) {
        linear_sum(l, in, linear, false, N);
        tensor_scatter(l->ranks, out, layer_param(l, linear.bias), N * l->ranks->tp, linear_outputs(l, linear),
                       l->stream);
    } else {
        matmul_forward(out, linear_gather(l, in, linear, SPLIT_ROWS, N, inputs), linear_weight(l, linear),
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
                        linear_weight(l, linear), layer_param(l, linear.bias), N * l->ranks->tp,
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
    const floatX* weight = GELU_NEEDS_MATMUL ? linear_weight(l, linear) : NULL;
    gelu_recompute(out, before, x, weight, layer_param(l, linear.bias),
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

// Whether there are gradients of the weight or of the bias to compute now.
static inline bool linear_has_gradient(const Layers* l, Linear linear) {
    return layer_grad(l, linear.weight) || layer_grad(l, linear.bias);
}

// The same of all rows, leaf by leaf; frozen tensors are skipped. dout: as linear_backward has it; gathered, in: of all
// ranks if the layer is divided by inputs, or by outputs.
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
    const floatX* rows = linear_has_gradient(l, linear) ?
        linear_gather(l, in, linear, SPLIT_ROWS, N, linear_inputs(l, linear)) : in;
    linear_backward_leaves(l, dout, gathered, rows, linear, N);
    adapters_backward(l, NULL, dout, in, linear, true, N);
}

// linear_backward where din is a sum over the ranks: the rows that the weight's gradient needs arrive during the matmul
// of din, and the sums travel during that of the weight.
static inline void linear_backward_sums(const Layers* l, floatX* din, const floatX* dout, const floatX* in,
                                        Linear linear, size_t N) {
    const TensorRanks* t = l->ranks;
    size_t inputs = linear_inputs(l, linear), all = N * t->tp;
    bool trains = !l->defers && linear_has_gradient(l, linear);
    size_t rows = trains ? tensor_start_gather(t, in, all, inputs, l->stream) : 0;
    linear_sum(l, dout, linear, true, N);
    if (trains) tensor_wait(t, rows, l->stream);
    size_t sums = tensor_start_scatter(t, all, inputs, l->stream);
    if (trains) linear_backward_leaves(l, dout, dout, t->tp > 1 ? t->gathered : in, linear, N);
    tensor_end_scatter(t, sums, din, NULL, all, inputs, l->stream);
}

// din (N, inputs) = dout (N, outputs) weight; dweight, dbias.
static inline void linear_backward(const Layers* l, floatX* din, const floatX* dout, const floatX* in, Linear linear,
                                   size_t N) {
    size_t outputs = linear_outputs(l, linear), inputs = linear_inputs(l, linear);
    if (l->ranks->has_leaves && linear_is_split(l, linear, SPLIT_ROWS)) {
        linear_backward_sums(l, din, dout, in, linear, N);
    } else {
        const floatX* gathered = linear_gather(l, dout, linear, SPLIT_COLUMNS, N, outputs);
        matmul_backward_input(din, gathered, linear_weight(l, linear), N * l->ranks->tp, outputs, inputs,
                              l->stream);
        if (!l->defers) linear_backward_leaves(l, dout, gathered, in, linear, N);  // or block_weights does it
    }
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
    matmul_gelu_backward_input(din, gathered, linear_weight(l, linear), before, N * l->ranks->tp, outputs,
                               inputs, l->stream);
    if (!l->defers) linear_backward_leaves(l, dout, gathered, in, linear, N);
}

#endif  // LLMTRAIN_LAYERS_H
