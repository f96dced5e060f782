// adapters.h: LoRA: what the pairs of low-rank matrices beside a layer's weight add to its output, and their gradients.
//
//   adapters_forward(&layers, out, in, linear, N);
//   adapters_backward(&layers, din, dout, in, linear, N);
//
// "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021. For a pair a (r, inputs), b (rows, r), which
// belongs to the outputs [first, first + rows) of a layer, s its scale, x the input, or with dropout what is left of it:
//
//   t = x a^T                   out[first ...] += s t b^T
//   du = s dout[first ...]      db += du^T t      dt = du b      da += dt^T x      dx += dt a
//
// t is computed again in the backward, which costs little: so what a block keeps for it does not change. The weight
// itself is frozen and has no gradient, which saves a third of a layer's work.

#ifndef LLMTRAIN_ADAPTERS_H
#define LLMTRAIN_ADAPTERS_H

#include "layer_tensors.h"

// Memory for N rows.
static inline void adapters_layout(Adapters* a, const Config* c, bool training, bool drops, size_t N, Arena* arena) {
    size_t inputs = max_size(max_size(c->channels, c->ffn), c->heads * config_head_size(c));
    size_t outputs = max_size(max_size(c->channels, c->ffn), config_qkv(c));
    size_t weight = max_size(max_size(config_qkv(c), config_ffn_in(c)) * c->channels, c->channels * inputs);
    if (c->lora == 0) return;
    if (c->quantize) a->dequantized = (floatX*)arena_take(arena, "a layer's weight", weight * sizeof(floatX));
    a->t = (floatX*)arena_take(arena, "adapters", N * c->lora * sizeof(floatX));
    if (training) a->dt = (floatX*)arena_take(arena, "adapters", N * c->lora * sizeof(floatX));
    a->wide = (floatX*)arena_take(arena, "adapters", N * max_size(inputs, outputs) * sizeof(floatX));
    if (drops) a->dropped = (floatX*)arena_take(arena, "adapters", N * inputs * sizeof(floatX));
}

// Whether a layer has pairs that count.
static inline bool adapters_active(const Layers* l, Linear linear) {
    return linear.pair_count > 0 && l->adapters.scale != 0;
}

// out = dropout(in), both (N, inputs), which may be the same: the input of a layer's pairs, and its gradient.
static inline const floatX* adapters_drop(const Layers* l, floatX* out, const floatX* in, Linear linear, size_t N) {
    enum { SITE_ADAPTERS = 1 << 20 };  // the model's own sites are below
    size_t inputs = linear_inputs(l, linear);
    if (l->dropout->adapters == 0) return in;
    dropout_apply(out, in, l->dropout->adapters, l->dropout->seed, SITE_ADAPTERS + (size_t)linear.weight.row,
                  (*l->activations)->first_token * inputs, N * inputs, l->stream);
    return out;
}

// Adds to out (N, outputs) what the pairs make of in (N, inputs).
static inline void adapters_forward(const Layers* l, floatX* out, const floatX* in, Linear linear, size_t N) {
    const Adapters* a = &l->adapters;
    if (!adapters_active(l, linear)) return;
    const floatX* x = adapters_drop(l, a->dropped, in, linear, N);
    for (size_t i = 0; i < linear.pair_count; i++) {
        LoraPair p = linear.pairs[i];
        size_t r = layer_tensor(l, p.a)->rows;
        matmul_forward(a->t, x, layer_param(l, p.a), NULL, N, r, linear_inputs(l, linear), l->stream);
        matmul_forward(a->wide, a->t, layer_param(l, p.b), NULL, N, p.rows, r, l->stream);
        columns_add(out, a->wide, a->scale, p.first, p.rows, N, linear_outputs(l, linear), l->stream);
    }
}

// da and db of a pair, leaf by leaf, from t, dt, du = wide, and x (N, inputs).
static inline void adapters_backward_pair(const Layers* l, LoraPair p, const floatX* x, size_t inputs, size_t N) {
    const Adapters* a = &l->adapters;
    float *da = layer_grad(l, p.a), *db = layer_grad(l, p.b);
    size_t r = layer_tensor(l, p.a)->rows;
    for (size_t leaf = 0; leaf < layer_leaves(l, p.a); leaf++) {
        Slice rows = leaf_rows(l, p.a, leaf, N);
        size_t first = rows.first, M = slice_length(rows);
        const floatX *du = a->wide + first * p.rows, *t = a->t + first * r, *dt = a->dt + first * r;
        if (db) matmul_backward_weight(db, NULL, du, t, true, M, p.rows, r, l->stream);
        if (da) matmul_backward_weight(da, NULL, dt, x + first * inputs, true, M, r, inputs, l->stream);
        if (db) leaf_end(l, leaf, p.b);
        if (da) leaf_end(l, leaf, p.a);
    }
}

// Adds to din (N, inputs), unless it is NULL, and if `weights` to the gradients of the pairs.
static inline void adapters_backward(const Layers* l, floatX* din, const floatX* dout, const floatX* in, Linear linear,
                                     bool weights, size_t N) {
    const Adapters* a = &l->adapters;
    size_t inputs = linear_inputs(l, linear), outputs = linear_outputs(l, linear);
    if (!adapters_active(l, linear)) return;
    const floatX* x = weights ? adapters_drop(l, a->dropped, in, linear, N) : NULL;
    for (size_t i = 0; i < linear.pair_count; i++) {
        LoraPair p = linear.pairs[i];
        size_t r = layer_tensor(l, p.a)->rows;
        columns_scale(a->wide, dout, a->scale, p.first, p.rows, N, outputs, l->stream);
        matmul_backward_input(a->dt, a->wide, layer_param(l, p.b), N, p.rows, r, l->stream);
        if (weights) matmul_forward(a->t, x, layer_param(l, p.a), NULL, N, r, inputs, l->stream);
        if (weights) adapters_backward_pair(l, p, x, inputs, N);
        if (din == NULL) continue;
        matmul_backward_input(a->wide, a->dt, layer_param(l, p.a), N, r, inputs, l->stream);
        adapters_drop(l, a->wide, a->wide, linear, N);
        columns_add(din, a->wide, 1, 0, inputs, N, inputs, l->stream);
    }
}

#endif  // LLMTRAIN_ADAPTERS_H
