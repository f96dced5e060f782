// tensor_parallel.h: tensor parallelism: ranks that share the layers of a model, and the rows between them.
//
// "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (arXiv:1909.08053), with the
// sequence parallelism of "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198). Of the
// two linear layers of a branch the first is divided by its outputs (heads of attention, units of the feed-forward),
// the second by its inputs, so that what lies between them needs no other rank. What lies outside, the norms, dropout
// and the residual stream, is divided by rows. So the ranks gather rows before a branch, and after it add up their
// partial sums, each its own rows of them:
//
//     rank 0 of 2   rows 0 .. M    -> gather ->   rows 0 .. 2M, heads 0 .. H/2   -> sum ->   rows 0 .. M
//     rank 1        rows M .. 2M   -> gather ->   rows 0 .. 2M, heads H/2 .. H   -> sum ->   rows M .. 2M
//
// Backward the gradients go the same ways, while matmuls that do not need them run (linear_backward). The vocabulary is
// divided too: by rows of the embedding and of the head.
//
// A sum over the inputs of a layer is made in S parts, the leaves, each by one matmul into floats, which are added as a
// binary tree: ((0 + 1) + (2 + 3)) ... The leaves of a rank are a subtree, and each rank adds the tree above them for
// its rows. So the bits depend on S (RankOptions.leaves), and not on how many ranks share them: one rank can compute
// them too. With one leaf in all, everything here is left out, and layers are the usual matmuls. With --leaves 1
// several ranks reduce their sums in floatX, which in 16-bit builds sends half as much, and has the bits of no other
// layout.

#ifndef LLMTRAIN_TENSOR_PARALLEL_H
#define LLMTRAIN_TENSOR_PARALLEL_H

#include "zero.h"
#include "../model/activations.h"

enum { TENSOR_LEVELS = 8 };   // of a tree of LEAVES_MAX leaves
static_assert(1 << (TENSOR_LEVELS - 1) == LEAVES_MAX, "a tree of other depth");

typedef struct {
    size_t tp, rank;          // ranks that share layers, and which of them this is
    size_t leaves;            // of this rank, in every sum over a layer's inputs
    bool has_leaves;          // of all ranks there are several
    bool in_storage;          // sums are reduced in floatX, not added as a tree
    FlatVector* flat;         // whose GROUP_TENSOR the ranks are
    floatX* gathered;         // (N, C) rows of all ranks; N = tp M
    float* partial[TENSOR_LEVELS];  // (N, C) sums of leaves, for each level of this rank's tree
    float* arrived;           // (tp, M, C) the ranks' sums of this rank's rows
    floatX *x, *weight;       // a leaf of a layer's rows, and of its weight; only with several
    floatX* qk;               // (N, (H + K)/leaves D) of a leaf of heads; only with several, and qk norms
    float* qk_rstd;           // (N, (H + K)/leaves)
    float* statistics;        // (tp, rows, leaves, 3) of the logits of some rows
    float* losses;            // (N)
} TensorRanks;

static inline TensorRanks tensor_plan(const RankOptions* o, FlatVector* flat) {
    TensorRanks t;
    assert(ranks_all_leaves(o) <= LEAVES_MAX && (ranks_all_leaves(o) & (ranks_all_leaves(o) - 1)) == 0);
    memset(&t, 0, sizeof t);
    t.tp = ranks_tp(o);
    t.rank = o->rank % t.tp;
    t.leaves = ranks_own_leaves(o);
    t.has_leaves = ranks_all_leaves(o) > 1;
    t.in_storage = ranks_reduce_sums(o);
    t.flat = flat;
    return t;
}

// Refuses optimizers for which an element needs others, or its place in the tensor (stochastic rounding).
static inline bool tensor_check(const RankOptions* o, const OptimizerOptions* optimizer, bool training, Error* error) {
    OptimizerKind kind = optimizer->kind;
    bool independent = OPTIMIZERS[kind].rule == SHARD_ANYWHERE, rounds = false;
    for (size_t s = 0; s < optimizer_states(kind); s++) rounds |= OPTIMIZERS[kind].states[s].dtype != DTYPE_F32;
    if (ranks_tp(o) == 1 || !training) return true;
    if (!independent || rounds)
        return fail_with(error, "--optimizer %s %s, and with --tp %zu a rank has parts of them; choose adamw, sgd, "
                         "momentum or lion", OPTIMIZERS[kind].name, independent ? "rounds by an element's place in "
                         "whole tensors" : "needs whole tensors", ranks_tp(o));
    return optimizer->master_weights || FLOATX_IS_FLOAT ||
           fail_with(error, "--masters off rounds by an element's place in its tensor, and with --tp %zu a rank has a "
                     "part of it; leave out one of them", ranks_tp(o));
}

// Takes the buffers from the plan. largest: elements of the largest weight here; logits_rows: rows of which logits
// exist at a time.
static inline void tensor_layout(TensorRanks* t, const BlockShape* s, size_t largest, size_t logits_rows, size_t Vp,
                                 Arena* arena) {
    const char* name = "rows and sums of several ranks";
    size_t N = shape_rows(s) * t->tp, C = s->C, width = max_size((s->H + 2 * s->K) * s->D, (s->llama ? 2 : 1) * s->F);
    size_t levels = 1, all = t->leaves * t->tp, x = max_size(N * width, logits_rows * Vp) / all;
    size_t heads = N * (s->H + s->K) / all;
    while ((size_t)1 << (levels - 1) < t->leaves) levels++;
    if (!t->has_leaves) return;
    for (size_t i = 0; i < levels; i++) t->partial[i] = (float*)arena_take(arena, name, N * C * sizeof(float));
    t->statistics = (float*)arena_take(arena, name, 3 * logits_rows * all * sizeof(float));
    t->losses = (float*)arena_take(arena, name, N * sizeof(float));
    if (t->leaves > 1) {
        t->x = (floatX*)arena_take(arena, name, x * sizeof(floatX));
        t->weight = (floatX*)arena_take(arena, name, largest / t->leaves * sizeof(floatX));
    }
    if (t->leaves > 1 && s->qk_norm) {
        t->qk = (floatX*)arena_take(arena, name, heads * s->D * sizeof(floatX));
        t->qk_rstd = (float*)arena_take(arena, name, heads * sizeof(float));
    }
    if (t->tp == 1) return;
    t->gathered = (floatX*)arena_take(arena, name, N * C * sizeof(floatX));
    t->arrived = (float*)arena_take(arena, name, N * C * sizeof(float));
}

static inline void tensor_wait(const TensorRanks* t, size_t slot, Stream stream) {
    if (t->tp > 1) flat_wait(t->flat, GROUP_TENSOR, slot, stream);
}

// Starts a collective in place over the ranks' slices of `all`, of n elements each. tensor_wait waits for what is
// returned.
static inline size_t tensor_start(const TensorRanks* t, CommOperation operation, void* all, size_t n, Dtype type,
                                  Stream stream) {
    size_t cuts[RANKS_TP_MAX + 1];
    for (size_t r = 0; r <= t->tp; r++) cuts[r] = r * n;
    return flat_start_exchange(t->flat, GROUP_TENSOR, operation, all, cuts, type, stream);
}

static inline void tensor_collective(const TensorRanks* t, CommOperation operation, void* all, size_t n, Dtype type,
                                     Stream stream) {
    tensor_wait(t, tensor_start(t, operation, all, n, type, stream), stream);
}

// Part r of n elements of `in` goes to rank r; part r of `out` is from rank r.
static inline void tensor_all_to_all(const TensorRanks* t, void* out, const void* in, size_t n, Dtype type,
                                     Stream stream) {
    tensor_wait(t, flat_start_all_to_all(t->flat, GROUP_TENSOR, out, in, n, type, stream), stream);
}

// After flat_connect: one of each, see context_connect.
static inline void tensor_connect(const TensorRanks* t, Stream stream) {
    if (t->tp == 1) return;
    tensor_all_to_all(t, t->arrived, t->partial[0], t->tp, DTYPE_F32, stream);
    for (CommOperation o = COMM_ALL_REDUCE; o <= COMM_ALL_GATHER; o = (CommOperation)(o + 1))
        tensor_collective(t, o, t->partial[0], 1, DTYPE_F32, stream);
}

// Starts to gather rows (N, C) of all ranks, from this rank's M = N/tp.
static inline size_t tensor_start_gather(const TensorRanks* t, const floatX* rows, size_t N, size_t C, Stream stream) {
    size_t n = N / t->tp * C;
    if (t->tp == 1) return 0;
    device_copy(t->gathered + t->rank * n, rows, n * sizeof(floatX), stream);
    return tensor_start(t, COMM_ALL_GATHER, t->gathered, n, FLOATX_DTYPE, stream);
}

// Rows (N, C) of all ranks; they stay until the next call.
static inline const floatX* tensor_gather(const TensorRanks* t, const floatX* rows, size_t N, size_t C,
                                          Stream stream) {
    tensor_wait(t, tensor_start_gather(t, rows, N, C, stream), stream);
    return t->tp == 1 ? rows : t->gathered;
}

// A matmul whose terms the ranks share: x (N, inputs) weight^T + bias, or backward x (N, outputs) weight.
typedef struct {
    const Tensor* weight;
    const floatX *values, *bias, *x;  // bias (outputs) or NULL
    bool backward;
    size_t first_row, N;      // rows first_row to first_row + N of the sums
} TensorSum;

// Elements of a row of the sums.
static inline size_t tensor_sum_width(const TensorSum* s) {
    return s->backward ? s->weight->cols : s->weight->size / s->weight->cols;
}

static inline void tensor_leaf(const TensorRanks* t, float* out, const TensorSum* s, size_t leaf, Stream stream) {
    size_t inputs = s->weight->cols, outputs = s->weight->size / inputs, terms = s->backward ? outputs : inputs;
    size_t own = terms / t->leaves, begin = 0, at = 0;
    const floatX *x = t->leaves > 1 ? t->x : s->x, *weight = t->leaves > 1 ? t->weight : s->values;
    if (t->leaves > 1 && !s->backward) {
        columns_copy(t->x, own, s->x + leaf * own, inputs, s->N, own, stream);
        columns_copy(t->weight, own, s->values + leaf * own, inputs, outputs, own, stream);
    }
    for (size_t m = 0, rows; t->leaves > 1 && s->backward && (rows = part_matrix(&s->weight->part, m)) > 0; m++) {
        size_t here = rows / s->weight->part.count, n = here / t->leaves, first = begin + leaf * n;
        columns_copy(t->x + at, own, s->x + first, outputs, s->N, n, stream);
        device_copy(t->weight + at * inputs, s->values + first * inputs, n * inputs * sizeof(floatX), stream);
        begin += here;
        at += n;
    }
    if (s->backward) matmul_backward_input_sums(out, x, weight, s->N, own, inputs, stream);
    else matmul_forward_sums(out, x, weight, s->N, outputs, own, stream);
}

// Computes and adds up leaves [first, first + count) of this rank, into partial[level].
static inline void tensor_tree(const TensorRanks* t, const TensorSum* s, size_t first, size_t count, size_t level,
                               Stream stream) {
    size_t C = tensor_sum_width(s), at = s->first_row * C;
    float* out = t->partial[level] + at;
    if (count == 1) {
        tensor_leaf(t, out, s, first, stream);
        return;
    }
    tensor_tree(t, s, first, count / 2, level, stream);
    tensor_tree(t, s, first + count / 2, count / 2, level + 1, stream);
    vector_add(out, t->partial[level + 1] + at, s->N * C, stream);
}

// This rank's terms of some rows. tensor_scatter follows when all rows are there.
static inline void tensor_sum(const TensorRanks* t, const TensorSum* s, Stream stream) {
    size_t C = tensor_sum_width(s), inputs = s->weight->cols;
    floatX* out = (floatX*)t->partial[0] + s->first_row * C;
    if (!t->in_storage) tensor_tree(t, s, 0, t->leaves, 0, stream);
    else if (s->backward) matmul_backward_input(out, s->x, s->values, s->N, s->weight->size / inputs, C, stream);
    else matmul_forward(out, s->x, s->values, t->rank == 0 ? s->bias : NULL, s->N, C, inputs, stream);
}

// Starts to send what tensor_sum has computed (N, C): each rank its rows.
static inline size_t tensor_start_scatter(const TensorRanks* t, size_t N, size_t C, Stream stream) {
    if (t->tp == 1) return 0;
    if (t->in_storage)
        return tensor_start(t, COMM_REDUCE_SCATTER, t->partial[0], N / t->tp * C, FLOATX_DTYPE, stream);
    return flat_start_all_to_all(t->flat, GROUP_TENSOR, t->arrived, t->partial[0], N * C, DTYPE_F32, stream);
}

// Then out (N/tp, C) = this rank's rows, added up over all ranks. bias: that of the sums.
static inline void tensor_end_scatter(const TensorRanks* t, size_t slot, floatX* out, const floatX* bias, size_t N,
                                      size_t C, Stream stream) {
    size_t n = N / t->tp * C;
    tensor_wait(t, slot, stream);
    if (t->in_storage) device_copy(out, (floatX*)t->partial[0] + t->rank * n, n * sizeof(floatX), stream);
    else leaves_sum(out, t->tp > 1 ? t->arrived : t->partial[0], bias, t->tp, N / t->tp, C, stream);
}

static inline void tensor_scatter(const TensorRanks* t, floatX* out, const floatX* bias, size_t N, size_t C,
                                  Stream stream) {
    tensor_end_scatter(t, tensor_start_scatter(t, N, C, stream), out, bias, N, C, stream);
}

// Copies a group of the query and key heads, of rows (N, (H + K + rest) unit), to a dense array, or back.
static inline void tensor_heads(floatX* part, floatX* rows, bool back, size_t group, size_t groups, size_t N, size_t H,
                                size_t K, size_t rest, size_t unit, Stream stream) {
    size_t stride = (H + K + rest) * unit, dense = stride / groups;
    for (int i = 0; i < 2; i++) {
        size_t n = (i == 0 ? H : K) / groups * unit;
        floatX *to = part + (i == 0 ? 0 : H / groups * unit), *from = rows + (i == 0 ? 0 : H * unit) + group * n;
        if (back) columns_copy(from, stride, to, dense, N, n, stream);
        else columns_copy(to, dense, from, stride, N, n, stream);
    }
}

// qk_norm_backward of one of `groups` of heads: the gradients of these norms are sums over heads, of which each rank
// has some.
static inline void tensor_qk_norm_backward(const TensorRanks* t, size_t group, size_t groups, floatX* dqkv,
                                           float* dq_weight, float* dk_weight, floatX* qk, float* rstd,
                                           const floatX* q_weight, const floatX* k_weight, size_t N, size_t H,
                                           size_t K, size_t D, Stream stream) {
    size_t pairs = sizeof(float) / sizeof(floatX);  // in 16-bit builds a float is copied as two floatX
    if (groups == 1) {
        qk_norm_backward(dqkv, dq_weight, dk_weight, qk, rstd, q_weight, k_weight, N, H, K, D, stream);
        return;
    }
    tensor_heads(t->x, dqkv, false, group, groups, N, H, K, K, D, stream);
    tensor_heads(t->qk, qk, false, group, groups, N, H, K, 0, D, stream);
    tensor_heads((floatX*)t->qk_rstd, (floatX*)rstd, false, group, groups, N, H, K, 0, pairs, stream);
    qk_norm_backward(t->x, dq_weight, dk_weight, t->qk, t->qk_rstd, q_weight, k_weight, N, H / groups, K / groups, D,
                     stream);
    tensor_heads(t->x, dqkv, true, group, groups, N, H, K, K, D, stream);
}

// out (N/tp, C) = the embedding of this rank's rows. tokens, positions (N); token_weight: this rank's part.
static inline void tensor_embed(const TensorRanks* t, floatX* out, const int32_t* tokens, const int32_t* positions,
                                const floatX* token_weight, const floatX* position_weight, size_t V, size_t N,
                                size_t C, Stream stream) {
    size_t M = N / t->tp, own = t->rank * M;
    if (t->tp == 1) {
        embedding_forward(out, tokens, positions, token_weight, position_weight, N, C, stream);
        return;
    }
    embedding_part_forward(t->gathered, tokens, token_weight, t->rank * V, V, N, C, stream);
    tensor_all_to_all(t, t->arrived, t->gathered, N * C, FLOATX_DTYPE, stream);
    embedding_join(out, (const floatX*)t->arrived, tokens + own, positions + own, position_weight, V, M, C, stream);
}

// classifier where this rank has columns Vp/tp of the logits: rows (rows, Vp/tp).
static inline void tensor_classifier(const TensorRanks* t, floatX* logits, float* losses, const int32_t* targets,
                                     float dloss, const float* weights, size_t rows, size_t V, size_t Vp,
                                     Stream stream) {
    size_t columns = Vp / t->tp, first = t->rank * columns, n = 3 * rows * t->leaves;
    if (!t->has_leaves) {
        classifier(logits, losses, targets, dloss, weights, rows, V, Vp, stream);
        return;
    }
    classifier_leaves(t->statistics + t->rank * n, logits, targets, first, t->leaves, rows, V, columns, stream);
    if (t->tp > 1) tensor_collective(t, COMM_ALL_GATHER, t->statistics, n, DTYPE_F32, stream);
    classifier_gradient(logits, losses, t->statistics, targets, dloss, weights, first, t->tp, t->leaves, rows, V,
                        columns, stream);
}

#endif  // LLMTRAIN_TENSOR_PARALLEL_H
