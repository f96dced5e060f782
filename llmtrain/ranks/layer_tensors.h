// layer_tensors.h: what a linear layer has: its parameters, where its gradients go, and the rows that these are of.

#ifndef LLMTRAIN_LAYER_TENSORS_H
#define LLMTRAIN_LAYER_TENSORS_H

#include "tensor_parallel.h"
#include "../model/slots.h"
#include "../model/weights.h"

// LoRA's memory (adapters.h), and how its pairs count.
typedef struct {
    float scale;          // s; 0 switches all pairs off
    floatX *t, *dt;       // (N, r)
    floatX* wide;         // (N, the most outputs of a pair, or inputs)
    floatX* dropped;      // (N, the most inputs); NULL without dropout
    floatX* dequantized;  // (outputs, inputs) of the largest layer; NULL: they are not quantized
} Adapters;

typedef struct {
    const Parameters* parameters;
    FlatVector* flat;         // that has them
    const TensorRanks* ranks; // that share the layers
    Adapters adapters;        // of LoRA, if the model has them
    Activations* const* activations;  // of the micro-batch in progress: which rows of the run it has
    const Dropout* dropout;   // of the model
    bool defers;              // a backward leaves out the gradients of weights: linear_backward_weight follows later
    Stream stream;
} Layers;

static inline const Tensor* layer_tensor(const Layers* l, TensorId id) { return &l->parameters->tensors[id.row]; }

// A tensor's parameters; NULL if the model does not have it.
static inline const floatX* layer_param(const Layers* l, TensorId id) {
    return tensor_exists(id) ? flat_param(l->flat, layer_tensor(l, id)) : NULL;
}

// A linear layer's weight (outputs, inputs); one that is quantized is good until the next call.
static inline const floatX* linear_weight(const Layers* l, Linear linear) {
    const Tensor* t = layer_tensor(l, linear.weight);
    uint8_t* stored = (uint8_t*)flat_param(l->flat, t);
    floatX* out = l->adapters.dequantized;
    for (size_t m = 0, rows; (rows = tensor_nf4_rows(t, m)) > 0; m++) {
        Nf4 q;
        nf4_layout(&q, stored, rows * t->cols, true);
        nf4_dequantize(out, &q, 0, q.n, l->stream);
        stored += nf4_bytes(q.n, true);
        out += q.n;
    }
    return t->quantized ? l->adapters.dequantized : (const floatX*)stored;
}

// Where the backward adds its gradient; NULL if it does not train.
static inline float* layer_grad(const Layers* l, TensorId id) {
    return tensor_exists(id) ? flat_gradient(l->flat, layer_tensor(l, id)) : NULL;
}

// Outputs of a linear layer: the rows of its weight, padding included.
static inline size_t linear_outputs(const Layers* l, Linear linear) {
    const Tensor* t = layer_tensor(l, linear.weight);
    return t->size / t->cols;
}

static inline size_t linear_inputs(const Layers* l, Linear linear) {
    return layer_tensor(l, linear.weight)->cols;
}

// Gradients of weights are computed for one part of the rows, a leaf, after the other, see FlatVector: there is one,
// unless one rank is to add as several do. leaf_rows: of N rows those of a leaf of a tensor.
static inline size_t layer_leaves(const Layers* l, TensorId id) {
    return flat_leaves(l->flat, layer_tensor(l, id));
}
static inline Slice leaf_rows(const Layers* l, TensorId id, size_t leaf, size_t N) {
    return comm_even_slice(leaf, layer_leaves(l, id), N);
}

// After the gradient of a leaf of a tensor, which may not exist, or wait for block_weights.
static inline void leaf_end(const Layers* l, size_t leaf, TensorId id) {
    if (!l->defers && tensor_exists(id) && leaf + 1 < layer_leaves(l, id)) flat_end_leaf(l->flat, layer_tensor(l, id));
}

#endif  // LLMTRAIN_LAYER_TENSORS_H
