// stages.h: the computation of one stage of a pipeline: model_step and model_losses over the stages of a model.
//
//   if (!pipeline_step(&model, next, source, loss_scale, n, &error)) ...      as model_step, with any number of stages
//   pipeline_losses(&model, tokens, targets, B, T);                           as model_losses
//
// Every rank of a pipeline calls them with the same micro-batches: the first stage needs the tokens, the last one the
// targets, and all of them where documents end. The operations of a step, and so all bits, are those of one stage: a
// residual stream is rounded where it is sent as it is where the next norm reads it, and gradients of a block are added
// over its micro-batches in their order.

#ifndef LLMTRAIN_STAGES_H
#define LLMTRAIN_STAGES_H

#include "../../llmtrain.h"

// Whether several ranks compute a micro-batch together.
static inline bool model_is_divided(const Model* model) { return model->flat.dp_world < model->flat.options.world; }

// The forward of a piece of the model, for the slot's micro-batch.
static inline void piece_forward(Model* model, size_t piece) {
    Pipeline* p = &model->pipeline;
    Activations* a = model->activations;
    size_t first = p->begins[piece], end = p->begins[piece + 1], n = a->rows * model->config.channels;
    Channel* out = &p->channels[GROUP_FORWARD_OUT];
    slot_take(a, p->longest, first, end);
    model->first_block = first;
    if (piece == 0) model_embed(model);
    else channel_receive(&p->channels[GROUP_FORWARD_IN], a->blocks[first].input, model->stream);
    for (size_t l = first; l < end; l++) block_forward(model, l);
    if (piece + 1 == pipeline_pieces(p)) {
        flat_await(&model->flat, model_head_bucket(model));  // a tied head is in no bucket that came before
        model_final_norm(model);
        return;
    }
    block_output(model, channel_message(out, model->stream), end - 1);
    channel_send(out, n, model->stream);
}

// The backward of block l of a piece that ends at block `end`. If the gradients of weights are an operation of their
// own, it leaves what that needs in the slot.
static inline void piece_block_backward(Model* model, size_t l, size_t end) {
    DeferredGradients* d = slot_deferred(model->activations, model->pipeline.longest, l, end);
    ActivationGradients usual = model->gradients;
    if (d) {
        size_t leaves = ranks_leaves(&model->options.ranks);
        fill_zero(d->norms, leaves * BLOCK_NORMS * model_norm_size(model) * sizeof(float), model->stream);
        model->gradients.qkv = d->qkv;
        model->gradients.ffn_in = d->ffn_in;
    }
    model->deferred = d;
    model->layers.defers = d != NULL;
    block_backward(model, l);
    model->layers.defers = false;
    model->deferred = NULL;
    model->gradients = usual;
}

// The backward of a piece, from the losses or from the gradient that the next stage sends.
static inline void piece_backward(Model* model, size_t piece) {
    Pipeline* p = &model->pipeline;
    const Activations* a = model->activations;
    size_t first = p->begins[piece], end = p->begins[piece + 1], ends = model_backward_ends(model);
    size_t n = a->rows * model->config.channels;
    Channel* out = &p->channels[GROUP_BACKWARD_OUT];
    if (piece + 1 == pipeline_pieces(p)) {
        model_head_step(model, NULL);
        exact_sum(&model->flat.sums->losses, a->losses, a->rows, model->stream);
        model_final_norm_backward(model);
    } else if (pipeline_sends_back(p, piece + 1, ends)) {
        channel_receive(&p->channels[GROUP_BACKWARD_IN], model->gradients.residual, model->stream);
    }
    for (size_t l = end; l-- > max_size(first, ends);) piece_block_backward(model, l, end);
    if (piece == 0) model_embed_backward(model);
    if (!pipeline_sends_back(p, piece, ends)) return;
    device_copy(channel_message(out, model->stream), model->gradients.residual, n * sizeof(floatX), model->stream);
    channel_send(out, n, model->stream);
}

// The gradients of a block's weights, from what its backward has left.
static inline void block_weights(Model* model, size_t l, const DeferredGradients* d) {
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations->blocks[l];
    size_t N = model->activations->rows;
    TensorId norms[BLOCK_NORMS];
    flat_begin_bucket(&model->flat, l + 1);
    linear_backward_weight(&model->layers, d->branch[0], s->ffn_act, b->ffn_out, N);
    linear_backward_weight(&model->layers, d->ffn_in, s->norm2, b->ffn_in, N);
    linear_backward_weight(&model->layers, d->branch[1], s->attention, b->attention_out, N);
    linear_backward_weight(&model->layers, d->qkv, s->norm1, b->qkv, N);
    block_norms(norms, b);
    for (size_t i = 0; i < BLOCK_NORMS; i++)
        for (size_t leaf = 0; tensor_exists(norms[i]) && leaf < layer_leaves(&model->layers, norms[i]); leaf++) {
            if (model_grad(model, norms[i]) == NULL) break;
            vector_add(model_grad(model, norms[i]), d->norms + (leaf * BLOCK_NORMS + i) * model_norm_size(model),
                       model_tensor(model, norms[i])->rows, model->stream);
            leaf_end(&model->layers, leaf, norms[i]);
        }
    flat_end_bucket(&model->flat, l + 1);
}

// The gradients of a piece's weights, where these are an operation of their own.
static inline void piece_weights(Model* model, size_t piece) {
    const Pipeline* p = &model->pipeline;
    size_t first = p->begins[piece], end = p->begins[piece + 1];
    for (size_t l = end; l-- > max_size(first, model_backward_ends(model));)
        block_weights(model, l, slot_deferred(model->activations, p->longest, l, end));
}

// Says how many messages of n elements will come: for `count` micro-batches, forward and perhaps backward.
static inline void pipeline_expect(Model* model, size_t count, size_t n, bool backward) {
    Pipeline* p = &model->pipeline;
    size_t from_previous = 0, from_next = 0, ends = model_backward_ends(model);
    for (size_t chunk = 0; chunk < p->options.chunks; chunk++) {
        size_t piece = pipeline_piece_of(p, chunk);
        from_previous += piece > 0;
        from_next += piece + 1 < pipeline_pieces(p) && pipeline_sends_back(p, piece + 1, ends);
    }
    channel_expect(&p->channels[GROUP_FORWARD_IN], count * from_previous, n, model->stream);
    if (backward) channel_expect(&p->channels[GROUP_BACKWARD_IN], count * from_next, n, model->stream);
}

// Makes a micro-batch that of the slot: the next one of the step or, for a later chunk, one that was read before.
static inline bool pipeline_load(Model* model, NextBatch next, void* source, const PipelineOp* op, Error* error) {
    Pipeline* p = &model->pipeline;
    size_t B = model->options.B, T = model->options.T, N = B * T;
    PipelineBatch* kept = p->batches ? &p->batches[op->micro % p->pp] : NULL;
    const int32_t *tokens, *targets;
    if (op->chunk > 0) {
        tokens = kept->tokens;
        targets = kept->targets;
        model->dropout.first_token = kept->first_token;
    } else {
        if (!next(source, &tokens, &targets, error)) return false;
        flat_begin_micro_batch(&model->flat, model_rows(model), model_targets(model, targets, N));
        if (kept) {
            memcpy(kept->tokens, tokens, N * sizeof(int32_t));
            memcpy(kept->targets, targets, N * sizeof(int32_t));
            kept->first_token = model->dropout.first_token;
        }
    }
    model_upload(model, tokens, targets, B, T, false);
    return true;
}

// The gradients of a step, of n micro-batches on each rank.
static inline bool pipeline_step(Model* model, NextBatch next, void* source, double loss_scale, size_t n,
                                 Error* error) {
    Pipeline* p = &model->pipeline;
    const PipelineTable* table = &p->table;
    FlatVector* flat = &model->flat;
    if (p->pp == 1) return model_step(model, next, source, loss_scale, n, error);
    model_begin_step(model, loss_scale, n);
    flat_barrier(flat);
    pipeline_expect(model, n, model_rows(model) * model->config.channels, true);
    for (size_t i = table->begins[p->rank]; i < table->begins[p->rank + 1]; i++) {
        const PipelineOp* op = &table->ops[i];
        size_t piece = pipeline_piece_of(p, op->chunk);
        model_use_slot(model, op->slot);
        if (op->work != PIPELINE_FORWARD) flat->micro = op->micro + 1;  // whose gradients are added
        if (op->work == PIPELINE_FORWARD) {
            if (!pipeline_load(model, next, source, op, error)) return false;
            fault_point("forward");
            piece_forward(model, piece);
        } else if (op->work == PIPELINE_BACKWARD) {
            fault_point("backward");
            piece_backward(model, piece);
        } else {
            fault_point("weights");
            piece_weights(model, piece);
        }
    }
    return true;
}

// Adds the losses of a batch, tokens and targets (B, T) on the host, to flat.sums->losses of the last stage, without
// gradients. All ranks of a pipeline call it with the same batch.
static inline void pipeline_losses(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    Pipeline* p = &model->pipeline;
    if (p->pp == 1) {
        model_losses(model, tokens, targets, B, T);
        return;
    }
    pipeline_expect(model, 1, slice_length(model_own_rows(model, B * T)) * model->config.channels, false);
    model_use_slot(model, 0);
    model_upload(model, tokens, targets, B, T, false);
    for (size_t chunk = 0; chunk < p->options.chunks; chunk++) piece_forward(model, pipeline_piece_of(p, chunk));
    if (!model_has_head(model)) return;
    model_head_losses(model);
    exact_sum(&model->flat.sums->losses, model->activations->losses, model->activations->rows, model->stream);
}

// The first block whose activations are kept, in a slot's own numbering.
static inline size_t model_first_kept(const Model* model) {
    return model->pipeline.pp > 1 ? 0 : model_backward_ends(model);
}

// Bytes that this rank sends for a micro-batch of which it has N rows, for what goes one way: H heads, or H + 2K with
// the copies.
static inline size_t context_bytes(const ContextRanks* c, size_t N, size_t heads, size_t D) {
    return N * heads * D / c->cp * (c->cp - 1) * sizeof(floatX);
}

// Bytes that this rank sends with tensor parallelism for (N, C) of a micro-batch, N its rows: to gather rows, or to add
// up sums.
static inline size_t tensor_bytes(const Model* model, size_t element) {
    return model_rows(model) * model->config.channels * (model->tensor.tp - 1) * element;
}
static inline size_t sums_bytes(const Model* model) {
    return tensor_bytes(model, model->tensor.in_storage ? sizeof(floatX) : sizeof(float));
}

// Whether the gradients of a layer's weight or bias are wanted.
static inline bool linear_trains(const Model* model, Linear linear) {
    return model_tensor(model, linear.weight)->trains ||
           (tensor_exists(linear.bias) && model_tensor(model, linear.bias)->trains);
}

// Bytes that this rank sends in the backward of block l, of which it keeps s, and to compute again what it does not.
static inline size_t block_bytes_sent_back(const Model* model, size_t l, const BlockActivations* s, size_t qkv,
                                           size_t attention) {
    const Block* b = &model->weights.blocks[l];
    size_t rows = tensor_bytes(model, sizeof(floatX)), sums = sums_bytes(model), bytes;
    bool gelu = GELU_NEEDS_MATMUL && model->config.family == FAMILY_GPT2 && block_recomputes(s, BLOCK_FFN_ACT);
    bytes = qkv + attention + 2 * (rows + sums);
    bytes += rows * (linear_trains(model, b->qkv) + linear_trains(model, b->ffn_in) + 2 * model->pipeline.table.splits);
    if (block_recomputes(s, BLOCK_QKV)) bytes += rows + qkv;
    if (block_recomputes(s, BLOCK_ATTENTION)) bytes += attention;
    if (block_recomputes(s, BLOCK_ATTENTION_OUT)) bytes += sums;
    return bytes + (block_recomputes(s, BLOCK_FFN_IN) || gelu ? rows : 0);
}

// Bytes that this rank sends for blocks [first, end), of a micro-batch.
static inline size_t blocks_bytes_sent(const Model* model, size_t first, size_t end) {
    const Config* c = &model->config;
    const Activations* a = model->activations;
    size_t N = model_rows(model), D = config_head_size(c);
    size_t qkv = context_bytes(&model->context, N, c->heads + 2 * c->kv_heads * model->context.copies, D);
    size_t attention = context_bytes(&model->context, N, c->heads, D), bytes = (end - first) * (qkv + attention);
    bytes += 2 * (end - first) * (tensor_bytes(model, sizeof(floatX)) + sums_bytes(model));
    for (size_t l = max_size(first, model_backward_ends(model)); l < end; l++) {
        const BlockActivations* s = &a->kept[model->pipeline.pp > 1 ? model->pipeline.longest - (end - l) : l];
        bytes += block_bytes_sent_back(model, l, s, qkv, attention);
    }
    return bytes;
}

// Bytes that this rank sends for the embedding and the head, of a micro-batch.
static inline size_t ends_bytes_sent(const Model* model) {
    const TensorRanks* t = &model->tensor;
    size_t rows = tensor_bytes(model, sizeof(floatX)), bytes = 0;
    bool trains = model->first_trained == 0 && model_tensor(model, model->weights.token_embedding)->trains;
    if (model->pipeline.rank == 0) bytes += rows * (1 + trains);
    if (!model_has_head(model)) return bytes;
    size_t statistics = 3 * model_rows(model) * t->tp * t->leaves * (t->tp - 1);
    return bytes + rows + sums_bytes(model) + statistics * sizeof(float);
}

// The same of all that this rank has.
static inline size_t model_bytes_exchanged(const Model* model) {
    const Pipeline* p = &model->pipeline;
    size_t bytes = ends_bytes_sent(model) + (p->pp == 1 ? blocks_bytes_sent(model, 0, model->config.layers) : 0);
    for (size_t chunk = 0; p->pp > 1 && chunk < p->options.chunks; chunk++) {
        size_t piece = pipeline_piece_of(p, chunk);
        bytes += blocks_bytes_sent(model, p->begins[piece], p->begins[piece + 1]);
    }
    return bytes;
}

// Bytes that this rank sends in a step.
static inline size_t model_bytes_sent(const Model* model, size_t micro_batches) {
    size_t n = model_rows(model) * model->config.channels;
    size_t messages = pipeline_messages(&model->pipeline, model_backward_ends(model)) * n * sizeof(floatX);
    return flat_bytes_sent(&model->flat, micro_batches) + micro_batches * (messages + model_bytes_exchanged(model));
}

#endif  // LLMTRAIN_STAGES_H
