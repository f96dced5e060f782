// score.h: for programs of your own that use a model as a library: the losses of every token, gradients of any function
// of them or of the hidden states, the gradient norm of each sequence, and weights and gradients by name.
//
//   1. losses      model_score, model_backward_weighted: policy gradients, preferences, distillation of sequences
//   2. hidden      model_hidden, model_backward_hidden: a head of your own, as of a reward model (examples/reward.c)
//   3. sequences   sequence_norms: the gradient norm of each, as for clipping per sample
//   4. tensors     model_weight_read and _write, model_gradient_read and _write, model_copy_weights
//
//   ModelOptions options = {.B = B, .T = T, .training = true, .weighs = true, ...};
//   model_begin_step(&model, 1, n);
//   for (size_t i = 0; i < n; i++) {                            each micro-batch, tokens and targets (B, T)
//       model_score(&model, tokens, targets, B, T, losses);     -log p of each target; 0 where it is -1
//       ...                                                     weights (B T) from them
//       model_backward_weighted(&model, weights, B);            B: what the step's mean is over
//   }
//   model_finish_step(&model, &result, flags, &error);          result.loss: sum of the losses / sum of the counts
//   model_update(&model, update, lr, 1);
//
// The step's gradient is the sum of weight * d(-log p) over all micro-batches and ranks, divided by the sum of the
// counts. With weights of 1 and the number of targets as the count it has the bits of model_gradients. The head's
// matmul runs twice, since logits are not kept. Ranks may share the batches (--ranks, --zero), not a sequence or the
// layers (tp, cp, pp): score_check says so. Weights and losses are on the host, (B, T).
//
// What a step minimizes may also be changed inside of model_gradients: an Objective weighs the tokens of each batch,
// and a HeadRule (both in model/objective.h) computes losses and gradients from the logits themselves.

#ifndef LLMTRAIN_SCORE_H
#define LLMTRAIN_SCORE_H

#include "stages.h"
#include "trace.h"

// Whether this model can be used with what follows.
static inline bool score_check(const Model* model, Error* error) {
    if (model_is_divided(model))
        return fail_with(error, "model_score needs whole sequences and layers on each rank; leave out tp, cp and pp");
    return (model->options.training && model->options.weighs) ||
           fail_with(error, "model_score needs a model with options.training and options.weighs; set them");
}

// ------------------------------------------------------------------------------------------------
// 1. Losses

// The loss of each target: losses (B, T), unless it is NULL. The activations are kept for a backward of this batch.
static inline void model_score(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T,
                               float* losses) {
    if (!model->flat.discards) flat_barrier(&model->flat);  // a rank that is early does not run ahead
    model_upload(model, tokens, targets, B, T, false);
    model->offloaded.backward = model->options.training;
    model_forward(model);
    model_head(model, NULL, 0.0f);
    if (losses) device_download(losses, model->activations->losses, B * T * sizeof(float), model->stream);
}

// The backward of the batch that was scored last, which counts `count` in the step's mean. weights (B, T).
static inline void model_backward_weighted(Model* model, const float* weights, size_t count) {
    const Activations* a = model->activations;
    device_upload(model->objective.weights, weights, a->rows * sizeof(float), model->stream);
    flat_begin_micro_batch(&model->flat, a->rows, count);
    model_head_step(model, model->objective.weights);
    model_backward(model);
    exact_sum(&model->flat.sums->losses, a->losses, a->rows, model->stream);
}

// ------------------------------------------------------------------------------------------------
// 2. Hidden

// The hidden states, after the final norm, of the batch that was scored last: hidden (B, T, C).
static inline bool model_hidden(Model* model, float* hidden, Error* error) {
    size_t n = model->activations->rows * model->config.channels;
    floatX* stored = (floatX*)memory_allocate(n * sizeof(floatX));
    if (stored == NULL) return fail_with(error, "out of memory for the hidden states of a batch");
    device_download(stored, model->activations->hidden, n * sizeof(floatX), model->stream);
    for (size_t i = 0; i < n; i++) hidden[i] = float_of(stored[i]);
    free(stored);
    return true;
}

// The backward of the batch that was scored last, from gradients of its hidden states: dhidden (B, T, C), of a sum that
// the step divides by the sum of the counts. The model's own head gets no gradient, and the step no loss.
static inline bool model_backward_hidden(Model* model, const float* dhidden, size_t count, Error* error) {
    FlatVector* flat = &model->flat;
    const Tensor* head = model_tensor(model, model->weights.head.weight);
    size_t N = model->activations->rows, n = N * model->config.channels;
    double scale = flat->loss_scale / (double)(flat->micro_batches * flat->dp_world * N);
    floatX* stored = (floatX*)memory_allocate(n * sizeof(floatX));
    if (stored == NULL) return fail_with(error, "out of memory for the gradients of a batch's hidden states");
    for (size_t i = 0; i < n; i++) stored[i] = floatX_of((float)(scale * (double)dhidden[i]));
    flat_begin_micro_batch(flat, N, count);
    flat_begin_bucket(flat, model_head_bucket(model));
    if (head->trains && !flat_adds(flat, head))  // its matmul would have overwritten it
        fill_zero(flat_gradient(flat, head), head->size * sizeof(float), model->stream);
    if (model->config.tied) flat_end_head(flat);
    device_upload(model->gradients.hidden, stored, n * sizeof(floatX), model->stream);
    model_backward(model);
    free(stored);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Sequences

// Between model_finish_step and model_update: of each of B sequences, tokens and targets (B, T), that were a
// micro-batch of the step, the mean loss of its targets and the norm of its part of the step's gradient; the parts add
// up to the gradient. Times what the step's mean is over, it is the norm of the gradient of the sum over the sequence.
// Costs as much as the forward and backward of the batch, and memory as tracing does (trace.h); the step's sums stay as
// they are.
static inline bool sequence_norms(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T,
                                  double* losses, double* norms, Error* error) {
    StepTrace trace;
    if (!trace_begin(&trace, model, error)) return false;
    for (size_t b = 0; b < B; b++) {
        SequenceTrace s;
        memset(&s, 0, sizeof s);
        sequence_measure_gradient(&s, model, tokens + b * T, targets + b * T, B, T);
        losses[b] = s.loss;
        norms[b] = s.norm;
    }
    trace_end(&trace);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Tensors
//
// By the names that parameters.tensors has, as "block.0.qkv_weight"; values (rows, cols), in float. For one rank, which
// has all of each.

static inline bool tensor_find(TensorId* id, const Model* model, const char* name, Error* error) {
    const Parameters* p = &model->parameters;
    for (id->row = 0; id->row < p->count; id->row++)
        if (strcmp(p->tensors[id->row].name, name) == 0) break;
    if (id->row == p->count) return fail_with(error, "the model has no tensor called %.100s", name);
    if (p->tensors[id->row].quantized)
        return fail_with(error, "%s is stored in 4 bits, and neither read nor written by name", name);
    return model->flat.options.world == 1 ||
           fail_with(error, "tensors are read and written by name with one rank, and there are %zu",
                     model->flat.options.world);
}

// Reads a tensor: the master weights if there are any in memory, otherwise what is stored.
static inline bool model_weight_read(Model* model, const char* name, float* values, Error* error) {
    FlatVector* flat = &model->flat;
    TensorId id;
    size_t index;
    if (!tensor_find(&id, model, name, error)) return false;
    const Tensor* t = model_tensor(model, id);
    size_t n = tensor_elements(t);
    if (flat->master_weights && t->trains) {
        flat_master_part(&index, flat, t, t->offset, t->offset + n);
        device_download(values, flat->master_weights + index, n * sizeof(float), model->stream);
        return true;
    }
    floatX* stored = (floatX*)memory_allocate(n * sizeof(floatX));
    if (stored == NULL) return fail_with(error, "out of memory for %s", name);
    device_download(stored, flat_kept(flat, &flat->buckets[t->bucket], t->offset), n * sizeof(floatX), model->stream);
    for (size_t i = 0; i < n; i++) values[i] = float_of(stored[i]);
    free(stored);
    return true;
}

static inline bool model_weight_write(Model* model, const char* name, const float* values, Error* error) {
    TensorId id;
    return tensor_find(&id, model, name, error) &&
           flat_set_params(&model->flat, id, 0, values, tensor_elements(model_tensor(model, id)), error);
}

// Where the sums of a tensor's gradients are, between model_finish_step and model_update.
static inline bool tensor_find_gradient(float** at, size_t* n, const Model* model, const char* name, Error* error) {
    const FlatVector* flat = &model->flat;
    TensorId id;
    if (!tensor_find(&id, model, name, error)) return false;
    const Tensor* t = model_tensor(model, id);
    const Bucket* k = &flat->buckets[t->bucket];
    if (!t->trains) return fail_with(error, "%s does not train: it has no gradient", name);
    if (flat->grads == NULL)
        return fail_with(error, "gradients are read and written as floats, and here they are summed in fixed point; "
                         "leave out REDUCE_EXACT");
    *at = flat->grads + k->sums_offset + (t->offset - k->sums.first);
    *n = tensor_elements(t);
    return true;
}

// The step's gradient of a tensor: of the mean, without the loss scale.
static inline bool model_gradient_read(Model* model, const char* name, float* values, Error* error) {
    float* at = NULL;
    size_t n = 0;
    if (!tensor_find_gradient(&at, &n, model, name, error)) return false;
    device_download(values, at, n * sizeof(float), model->stream);
    for (size_t i = 0; i < n; i++) values[i] *= (float)flat_scale(&model->flat);
    return true;
}

// Puts another in its place. The norm in the StepResult remains that of what was there.
static inline bool model_gradient_write(Model* model, const char* name, const float* values, Error* error) {
    float* at = NULL;
    size_t n = 0;
    if (!tensor_find_gradient(&at, &n, model, name, error)) return false;
    float* scaled = (float*)memory_allocate(n * sizeof(float));
    if (scaled == NULL) return fail_with(error, "out of memory for the gradient of %s", name);
    for (size_t i = 0; i < n; i++) scaled[i] = (float)((double)values[i] / flat_scale(&model->flat));
    device_upload(at, scaled, n * sizeof(float), model->stream);
    free(scaled);
    return true;
}

// Gives a model the weights of another, with tensors of the same names and shapes; `from` need not have the pairs of
// LoRA that `to` has, which stay as they are.
static inline bool model_copy_weights(Model* to, Model* from, Error* error) {
    bool ok = true;
    float* values = (float*)memory_allocate(parameters_longest(&from->parameters) * sizeof(float));
    if (values == NULL) return fail_with(error, "out of memory for a tensor");
    for (size_t i = 0; ok && i < to->parameters.count; i++) {
        const Tensor* t = &to->parameters.tensors[i];
        TensorId id;
        ok = tensor_find(&id, from, t->name, error);
        if (!ok && t->adapter) {
            ok = true;
            continue;
        }
        const Tensor* f = ok ? model_tensor(from, id) : NULL;
        if (ok && (f->rows != t->rows || f->cols != t->cols))
            ok = fail_with(error, "%s is %zu x %zu in one model, %zu x %zu in the other", t->name, f->rows, f->cols,
                           t->rows, t->cols);
        ok = ok && model_weight_read(from, t->name, values, error) &&
             model_weight_write(to, t->name, values, error);
    }
    free(values);
    return ok;
}

#endif  // LLMTRAIN_SCORE_H
