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

// After the gradient of a leaf of a tensor, which may not exist.
static inline void leaf_end(const Layers* l, size_t leaf, TensorId id) {
    if (tensor_exists(id) && leaf + 1 < layer_leaves(l, id)) flat_end_leaf(l->flat, layer_tensor(l, id));
}

#endif  // LLMTRAIN_LAYER_TENSORS_H
