// llmtrain.h: the runtime. Include it, and nothing else, to build, train and sample from a model.
//
//   parameters.h        what the model is, the table of its parameters, the plan of its memory
//   ranks.h             the flat vector of parameters, gradients and optimizer state, over the ranks of a run
//    1. model           the struct that owns all this; initial weights
//    2. forward         tokens to hidden states
//    3. head            hidden states to logits, losses, and the head's own gradients
//    4. backward        the forward, read from the end
//    5. update          gradient norm, learning rate, clipping and the spike guard, the optimizer
//    6. evaluation      validation loss
//    7. sampling        text from a trained model
//    8. monitor         the console line and metrics.jsonl
//
// Beside it: kernels_cpu.h (operations, and floatX, the type of parameters and activations), in a CUDA build kernels.cuh
// (the same operations on a GPU), gemm.h (the matrix product), data.h (shards and batches), checkpoint.h (saving and
// resuming), files.h, json.h and safetensors.h (what is on the disk), flags.h (the command line). The training loop is in
// train.cu; the smallest complete program is dev/example.c.
//
// Letters: B batch, T sequence, N = B*T rows, C channels, L layers, H heads, K key/value heads, D head size,
// F feed-forward, V vocabulary, Vp padded vocabulary.

#ifndef LLMTRAIN_H
#define LLMTRAIN_H

#include "llmtrain/base.h"
#include "llmtrain/data.h"
#include "llmtrain/files.h"
#include "llmtrain/flags.h"
#include "llmtrain/gemm.h"
#include "llmtrain/json.h"
#include "kernels_cpu.h"
#include "llmtrain/parameters.h"
#include "llmtrain/zero.h"

#include <assert.h>
#include <sys/file.h>

#define LLMTRAIN_VERSION "0.1"

// ------------------------------------------------------------------------------------------------
// 1. Model

typedef struct {
    size_t B, T;              // the largest batch that forward will see
    bool training;            // gradients, optimizer state and the backward's buffers are wanted
    OptimizerKind optimizer;
    bool master_weights;             // keep a float copy of 16-bit parameters, which the optimizer updates
    bool sampling;            // a KV cache is wanted
    bool tf32;                // a GPU's products of floats may round their operands
    RankOptions ranks;        // all 0: one rank
} ModelOptions;

// What the backward needs of the forward, for one block; N = B*T rows.
typedef struct {
    floatX* input;            // (N, C) the residual stream that enters the block
    floatX* norm1;            // (N, C)
    float *mean1, *rstd1;     // (N) mean, and 1 / deviation
    floatX* qkv;              // (N, (H + 2K) D), turned by RoPE for Llama
    floatX* attention;        // (N, H D), which is (N, C)
    float* lse;               // (B, H, T) log of the sum of the exponentials of a row's scores
    floatX* middle;           // (N, C) the residual stream after attention
    floatX* norm2;            // (N, C)
    float *mean2, *rstd2;     // (N)
    floatX* ffn_in;           // (N, F), Llama (N, 2F): before the nonlinearity
    floatX* ffn_act;          // (N, F): after it
} BlockActivations;

typedef struct {
    BlockActivations* blocks; // (L)
    floatX* branch;           // (N, C) what attention or feed-forward is about to add to the residual stream
    floatX* output;           // (N, C) the residual stream after the last block
    floatX* hidden;           // (N, C) after the final norm
    float *mean, *rstd;       // (N) of the final norm
    floatX* logits;           // (head_rows, Vp) of a part of the rows; then their gradients
    float* losses;            // (N)
    float* rope;              // (context, D/2, 2) cosines and sines; Llama only
} Activations;

// Gradients of activations: buffers that the blocks use in turn.
typedef struct {
    floatX* residual;         // (N, C) of the residual stream
    floatX* hidden;           // (N, C) of a norm's output
    floatX* branch;           // (N, C) of a branch with dropout
    floatX* attention;        // (N, H D)
    floatX* qkv;              // (N, (H + 2K) D)
    floatX* ffn_in;           // (N, F or 2F)
    floatX* ffn_act;          // (N, F), Llama only
    float* delta;             // (B, H, T) scratch of attention's backward
} ActivationGradients;

typedef struct {
    floatX *keys, *values;    // (L, context, K, D)
    float* scores;            // (H, context)
    floatX* logits;           // (Vp) on the host: those of the newest position
    size_t length;            // positions filled
} KvCache;

typedef struct {
    float p;                  // 0 switches it off: set so for evaluation
    uint64_t seed;
    uint64_t first_token;     // number of the batch's first token in the whole run
} Dropout;

typedef struct {
    Config config;
    ModelOptions options;
    Parameters parameters;
    FlatVector flat;          // parameters, gradients, master weights and optimizer state, as far as this rank holds them
    Activations activations;
    ActivationGradients gradients;
    KvCache cache;
    Dropout dropout;
    size_t head_rows;         // rows of logits that exist at a time
    void* scratch;            // (model_scratch_bytes) of the operations
    int32_t* batches[2];      // each (2, B, T) on the device, used in turn: tokens, then targets
    MemoryPlan memory;
    Stream stream;
} Model;

static inline void model_layout_block(Model* model, BlockActivations* a, size_t N) {
    const Config* c = &model->config;
    MemoryPlan* plan = &model->memory;
    size_t C = c->channels;
    const char* name = "activations of the blocks";
    a->input = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->norm1 = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->mean1 = (float*)plan_take(plan, name, N * sizeof(float));
    a->rstd1 = (float*)plan_take(plan, name, N * sizeof(float));
    a->qkv = (floatX*)plan_take(plan, name, N * config_qkv(c) * sizeof(floatX));
    a->attention = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->lse = (float*)plan_take(plan, name, N * c->heads * sizeof(float));
    a->middle = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->norm2 = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->mean2 = (float*)plan_take(plan, name, N * sizeof(float));
    a->rstd2 = (float*)plan_take(plan, name, N * sizeof(float));
    a->ffn_in = (floatX*)plan_take(plan, name, N * config_ffn_in(c) * sizeof(floatX));
    a->ffn_act = (floatX*)plan_take(plan, name, N * c->ffn * sizeof(floatX));
}

static inline void model_layout_gradients(Model* model, size_t N) {
    const Config* c = &model->config;
    ActivationGradients* g = &model->gradients;
    MemoryPlan* plan = &model->memory;
    const char* name = "gradients of activations";
    g->residual = (floatX*)plan_take(plan, name, N * c->channels * sizeof(floatX));
    g->hidden = (floatX*)plan_take(plan, name, N * c->channels * sizeof(floatX));
    g->branch = (floatX*)plan_take(plan, name, N * c->channels * sizeof(floatX));
    g->attention = (floatX*)plan_take(plan, name, N * c->channels * sizeof(floatX));
    g->qkv = (floatX*)plan_take(plan, name, N * config_qkv(c) * sizeof(floatX));
    g->ffn_in = (floatX*)plan_take(plan, name, N * config_ffn_in(c) * sizeof(floatX));
    if (c->family == FAMILY_LLAMA) g->ffn_act = (floatX*)plan_take(plan, name, N * c->ffn * sizeof(floatX));
    g->delta = (float*)plan_take(plan, name, N * c->heads * sizeof(float));
}

static inline size_t model_scratch_bytes(const Model* model) {
    return scratch_bytes(model->options.B * model->options.T, model->config.channels);
}

static inline void model_layout(Model* model) {
    const Config* c = &model->config;
    const ModelOptions* o = &model->options;
    MemoryPlan* plan = &model->memory;
    Activations* a = &model->activations;
    size_t N = o->B * o->T, C = c->channels, D = config_head_size(c);
    flat_layout(&model->flat, &model->parameters, plan, o->training, o->master_weights, o->optimizer);
    if (o->training) model_layout_gradients(model, N);
    for (size_t l = 0; l < c->layers; l++) {
        // Only a backward needs each block's own; without one they all share the first block's.
        if (l == 0 || o->training) model_layout_block(model, &a->blocks[l], N);
        else a->blocks[l] = a->blocks[0];
    }
    for (int i = 0; i < 2; i++) model->batches[i] = (int32_t*)plan_take(plan, "batches", 2 * N * sizeof(int32_t));
    model->scratch = plan_take(plan, "scratch of the operations", model_scratch_bytes(model));
    const char* name = "activations outside the blocks";
    a->branch = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->output = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->hidden = (floatX*)plan_take(plan, name, N * C * sizeof(floatX));
    a->mean = (float*)plan_take(plan, name, N * sizeof(float));
    a->rstd = (float*)plan_take(plan, name, N * sizeof(float));
    a->losses = (float*)plan_take(plan, name, N * sizeof(float));
    if (c->family == FAMILY_LLAMA) a->rope = (float*)plan_take(plan, name, c->context * D * sizeof(float));
    a->logits =
        (floatX*)plan_take(plan, "logits, a part at a time", model->head_rows * config_padded_vocab(c) * sizeof(floatX));
    if (o->sampling) {
        size_t cached = c->layers * c->context * c->kv_heads * D;
        model->cache.keys = (floatX*)plan_take(plan, "KV cache", cached * sizeof(floatX));
        model->cache.values = (floatX*)plan_take(plan, "KV cache", cached * sizeof(floatX));
        model->cache.scores = (float*)plan_take(plan, "KV cache", c->heads * c->context * sizeof(float));
    }
}

// With several ranks the Comm is closed before this, so that nothing is under way any more.
static inline void model_free(Model* model) {
    flat_free(&model->flat);
    device_close(model->stream);  // waits for what the device has still to do
    if (model->memory.base) device_free(model->memory.base, plan_block_bytes(&model->memory));
    free(model->cache.logits);
    free(model->activations.blocks);
    parameters_free(&model->parameters);
    memset(model, 0, sizeof *model);
}

// Completes the configuration, and builds the table of parameters and the memory plan; allocates nothing large.
static inline bool model_plan(Model* model, const Config* asked, ModelOptions options, Error* error) {
    memset(model, 0, sizeof *model);
    model->config = *asked;
    model->options = options;
    const Config* config = &model->config;
    if (!config_complete(&model->config, error)) return false;
    if (options.B == 0 || options.T == 0 || options.B > SIZE_MAX / options.T)
        return fail(error, "a batch of %zu sequences of %zu tokens is impossible; give at least 1 of each", options.B,
                    options.T);
    if (options.T > config->context)
        return fail(error, "sequences of %zu tokens do not fit the model's context of %zu; make --seq smaller or --context "
                    "larger", options.T, config->context);
    if (options.T > LONGEST_ON_DEVICE)
        return fail(error,
                    "sequences of %zu tokens are longer than the %zu that a GPU's grid has room for; make --seq smaller",
                    options.T, LONGEST_ON_DEVICE);
    // The logits of all rows at once would be the largest array of all.
    size_t N = options.B * options.T, most = max_size(head_elements() / config_padded_vocab(config), 64);
    size_t parts = divide_up(N, most);
    model->head_rows = divide_up(N, parts);
    model->activations.blocks = (BlockActivations*)allocate(config->layers * sizeof(BlockActivations));
    bool ok = parameters_create(&model->parameters, config, error) &&
              flat_create(&model->flat, &model->parameters, &model->options.ranks, error);
    if (ok && model->activations.blocks == NULL) ok = fail(error, "out of memory for the table of activations");
    if (ok) model_layout(model);
    else model_free(model);
    return ok;
}

// Opens the device and allocates what model_plan planned. Parameters are zero until model_randomize or a checkpoint fills
// them. The ranks of a run call model_connect next, all together.
static inline bool model_allocate(Model* model, Error* error) {
    const Config* c = &model->config;
    const ModelOptions* o = &model->options;
    size_t D = config_head_size(c), batch_bytes = 2 * o->B * o->T * sizeof(int32_t);
    if (!device_choose(o->ranks.local_rank, error) || !device_open(&model->stream, o->tf32, error) ||
        !plan_allocate(&model->memory, model->stream, error)) return false;
    model_layout(model);
    if (!device_prepare(model->stream, model->scratch, model_scratch_bytes(model), batch_bytes, error)) return false;
    if (!flat_prepare(&model->flat, model->stream, error)) return false;
    if (o->sampling) model->cache.logits = (floatX*)allocate(config_padded_vocab(c) * sizeof(floatX));
    if (o->sampling && model->cache.logits == NULL) return fail(error, "out of memory for %zu logits", c->vocab);
    if (c->family == FAMILY_LLAMA) {
        float* table = (float*)allocate(c->context * D * sizeof(float));
        if (table == NULL) return fail(error, "out of memory for the table of rotary angles of %zu positions", c->context);
        rope_table(table, (float)c->rope_theta, c->context, D);
        upload(model->activations.rope, table, c->context * D * sizeof(float), model->stream);
        free(table);
    }
    return true;
}

static inline bool model_connect(Model* model, Error* error) { return flat_connect(&model->flat, error); }

static inline bool model_create(Model* model, const Config* config, ModelOptions options, Error* error) {
    if (!model_plan(model, config, options, error)) return false;
    if (model_allocate(model, error) && model_connect(model, error)) return true;
    model_free(model);
    return false;
}

enum { INIT_PIECE = 1 << 16 };  // elements that are made and uploaded at a time

// Sets parameters [offset, offset + n) of the flat vector, and their master_weights, from values on the host. False if there is no
// memory for a piece of them.
static inline bool model_set_params(Model* model, size_t offset, const float* values, size_t n, Error* error) {
    floatX* rounded = (floatX*)allocate(INIT_PIECE * sizeof(floatX));
    if (rounded == NULL) return fail(error, "out of memory for a piece of the weights");
    for (size_t done = 0; done < n; done += INIT_PIECE) {
        size_t count = min_size(INIT_PIECE, n - done), at = offset + done;
        #pragma omp parallel for simd
        for (size_t i = 0; i < count; i++) rounded[i] = floatX_of(values[done + i]);
        upload(model->flat.params + at, rounded, count * sizeof(floatX), model->stream);
        if (model->flat.master_weights == NULL) continue;
        size_t place;
        CommSlice part = flat_state(&place, &model->flat, at, at + count);
        if (slice_length(part) == 0) continue;
        upload(model->flat.master_weights + place, values + (part.first - offset), slice_length(part) * sizeof(float),
               model->stream);
    }
    free(rounded);
    return true;
}

// Initial weights: a function of the seed and of the place in the flat vector alone. False if there is no memory for a
// piece of them.
static inline bool model_randomize(Model* model, uint64_t seed, Error* error) {
    float* values = (float*)allocate(INIT_PIECE * sizeof(float));
    if (values == NULL) return fail(error, "out of memory for a piece of the weights");
    bool ok = true;
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        size_t n = tensor_elements(t);
        for (size_t first = 0; ok && first < n; first += INIT_PIECE) {
            size_t count = min_size(INIT_PIECE, n - first);
            #pragma omp parallel for
            for (size_t e = 0; e < count; e++) {
                values[e] = t->init == INIT_ONE ? 1.0f : 0.0f;
                if (t->init == INIT_NORMAL)
                    values[e] = t->init_std * random_normal(seed, RANDOM_INIT, 0, t->offset + first + e);
            }
            ok = model_set_params(model, t->offset + first, values, count, error);
        }
    }
    free(values);
    return ok;
}

static inline const floatX* param(const Model* model, size_t offset) {
    return offset == NO_TENSOR ? NULL : model->flat.params + offset;
}

static inline float* grad(const Model* model, size_t offset) {
    return offset == NO_TENSOR ? NULL : flat_gradient(&model->flat, offset);
}

// ------------------------------------------------------------------------------------------------
// 2. Forward
//
//   x = token_embedding[tokens] + position_embedding
//   for each block:   x = x + attention(norm1(x));   x = x + ffn(norm2(x))
//   hidden = final_norm(x)

// residual = in + branch, out = norm(residual): each branch is added to the stream by the norm that follows it. The
// first norm of all has no branch (NULL), and then the residual is `in` itself.
static inline void norm_forward(const Model* model, floatX* out, floatX* residual, float* mean, float* rstd,
                                const floatX* in, const floatX* branch, size_t weight, size_t bias, size_t N) {
    const Config* c = &model->config;
    float epsilon = (float)c->norm_epsilon;
    if (c->family == FAMILY_GPT2)
        layernorm_forward(out, residual, mean, rstd, in, branch, param(model, weight), param(model, bias), epsilon,
                          N, c->channels, model->stream);
    else
        rmsnorm_forward(out, residual, rstd, in, branch, param(model, weight), epsilon, N, c->channels, model->stream);
}

// out = dropout(in), both (N, C), which may be the same; `place` tells the uses apart: 0 the embedding, 2l + 1 and 2l + 2 the
// branches of block l. The backward calls it on gradients, with the same place.
static inline void model_dropout(const Model* model, floatX* out, const floatX* in, size_t place, size_t N) {
    size_t C = model->config.channels;
    dropout(out, in, model->dropout.p, model->dropout.seed, place, model->dropout.first_token * C, N * C, model->stream);
}

// Brings a batch of N tokens to the device, and its targets unless they are NULL; returns the tokens' place there, which
// the targets follow. It stays good until the batch after the next is brought.
static inline const int32_t* model_upload(Model* model, const int32_t* tokens, const int32_t* targets, size_t N) {
    return upload_batch(model->batches, tokens, targets, N * sizeof(int32_t), model->stream);
}

// Fills activations.hidden for tokens (B, T) on the device; each bucket of parameters is awaited before it is used. With a
// cache, B and T are 1, and the token follows those in the cache.
static inline void model_forward(Model* model, const int32_t* tokens, size_t B, size_t T, KvCache* cache) {
    const Config* c = &model->config;
    const Parameters* p = &model->parameters;
    Activations* a = &model->activations;
    Stream stream = model->stream;
    size_t N = B * T, C = c->channels, H = c->heads, K = c->kv_heads, D = config_head_size(c), F = c->ffn;
    size_t first = cache ? cache->length : 0;
    const floatX* x = a->blocks[0].input;
    flat_await(&model->flat, 0);
    embedding_forward(a->blocks[0].input, tokens, param(model, p->token_embedding), param(model, p->position_embedding),
                      first, B, T, C, stream);
    if (model->dropout.p > 0) model_dropout(model, a->blocks[0].input, a->blocks[0].input, 0, N);

    for (size_t l = 0; l < c->layers; l++) {
        const Block* b = &p->blocks[l];
        BlockActivations* s = &a->blocks[l];  // s: what is saved for the backward

        flat_await(&model->flat, l + 1);
        norm_forward(model, s->norm1, s->input, s->mean1, s->rstd1, x, l ? a->branch : NULL, b->norm1_weight,
                     b->norm1_bias, N);
        x = s->input;
        matmul_forward(s->qkv, s->norm1, param(model, b->qkv_weight), param(model, b->qkv_bias), N, config_qkv(c), C,
                       stream);
        if (c->family == FAMILY_LLAMA) rope_forward(s->qkv, a->rope, first, B, T, H, K, D, stream);
        if (cache) {
            size_t layer = l * c->context * K * D;
            attention_decode(s->attention, cache->keys + layer, cache->values + layer, cache->scores, s->qkv, first,
                             c->context, H, K, D, stream);
        } else {
            attention_forward(s->attention, s->lse, s->qkv, B, T, H, K, D, stream);
        }
        matmul_forward(a->branch, s->attention, param(model, b->attention_out_weight), param(model, b->attention_out_bias),
                       N, C, H * D, stream);
        if (model->dropout.p > 0) model_dropout(model, a->branch, a->branch, 2 * l + 1, N);

        norm_forward(model, s->norm2, s->middle, s->mean2, s->rstd2, x, a->branch, b->norm2_weight, b->norm2_bias, N);
        x = s->middle;
        if (c->family == FAMILY_GPT2) {
            matmul_gelu_forward(s->ffn_act, s->ffn_in, s->norm2, param(model, b->ffn_in_weight),
                                param(model, b->ffn_in_bias), N, F, C, stream);
        } else {
            matmul_forward(s->ffn_in, s->norm2, param(model, b->ffn_in_weight), NULL, N, 2 * F, C, stream);
            swiglu_forward(s->ffn_act, s->ffn_in, N, F, stream);
        }
        matmul_forward(a->branch, s->ffn_act, param(model, b->ffn_out_weight), param(model, b->ffn_out_bias), N, C, F,
                       stream);
        if (model->dropout.p > 0) model_dropout(model, a->branch, a->branch, 2 * l + 2, N);
    }
    flat_await(&model->flat, c->layers + 1);
    norm_forward(model, a->hidden, a->output, a->mean, a->rstd, x, a->branch, p->final_norm_weight, p->final_norm_bias, N);
    if (cache) cache->length++;
}

// ------------------------------------------------------------------------------------------------
// 3. Head
//
//   logits = hidden head_weight^T;   loss = cross-entropy(logits, targets)
//
// Logits are the largest activation by far, so they exist for a part of the rows at a time: made, turned into their
// gradient in place, used for the gradients of the hidden states and of the head's weight, and forgotten.

static inline void model_logits(Model* model, size_t first_row, size_t rows) {
    const Config* c = &model->config;
    matmul_forward(model->activations.logits, model->activations.hidden + first_row * c->channels,
                   param(model, model->parameters.head_weight), NULL, rows, config_padded_vocab(c), c->channels,
                   model->stream);
}

// Fills activations.losses for targets (N) on the device; -1 is ignored. If dloss is not 0, also does the head's backward
// for the objective dloss * (sum of losses).
static inline void model_head(Model* model, const int32_t* targets, float dloss, size_t N) {
    const Config* c = &model->config;
    Activations* a = &model->activations;
    size_t C = c->channels, Vp = config_padded_vocab(c), weight = model->parameters.head_weight;
    for (size_t first = 0; first < N; first += model->head_rows) {
        size_t rows = min_size(model->head_rows, N - first);
        model_logits(model, first, rows);
        classifier(a->logits, a->losses + first, targets + first, dloss, rows, c->vocab, Vp, model->stream);
        if (dloss == 0.0f) continue;
        matmul_backward_input(model->gradients.hidden + first * C, a->logits, param(model, weight), rows, Vp, C,
                              model->stream);
        matmul_backward_weight(grad(model, weight), NULL, a->logits, a->hidden + first * C, rows, Vp, C, model->stream);
    }
}

static inline size_t targets_count(const int32_t* targets, size_t N) {
    size_t count = 0;
    for (size_t i = 0; i < N; i++) count += targets[i] >= 0;
    return count;
}

// ------------------------------------------------------------------------------------------------
// 4. Backward
//
// model_forward from its last line to its first. gradients.residual holds the gradient of the residual stream, to
// which every norm's backward adds its share. Gradients of parameters are added where flat_gradient says; a bucket whose
// gradients are complete is given to the ranks' sum, which goes on under the rest.

static inline void norm_backward(const Model* model, floatX* dx, const floatX* dout, const floatX* x, const float* mean,
                                 const float* rstd, size_t weight, size_t bias, size_t N) {
    size_t C = model->config.channels;
    if (model->config.family == FAMILY_GPT2)
        layernorm_backward(dx, grad(model, weight), grad(model, bias), dout, x, param(model, weight), mean, rstd, N, C,
                           model->stream);
    else
        rmsnorm_backward(dx, grad(model, weight), dout, x, param(model, weight), rstd, N, C, model->stream);
}

static inline void matmul_backward(const Model* model, floatX* din, const floatX* dout, const floatX* in, size_t weight,
                                   size_t bias, size_t rows, size_t outputs, size_t inputs) {
    matmul_backward_input(din, dout, param(model, weight), rows, outputs, inputs, model->stream);
    matmul_backward_weight(grad(model, weight), grad(model, bias), dout, in, rows, outputs, inputs, model->stream);
}

// The gradient of the residual stream as the branch at `place` receives it.
static inline const floatX* branch_gradient(const Model* model, size_t place, size_t N) {
    if (model->dropout.p == 0) return model->gradients.residual;
    model_dropout(model, model->gradients.branch, model->gradients.residual, place, N);
    return model->gradients.branch;
}

// Needs the forward's activations of the same tokens (B, T), and gradients.hidden from model_head, before which the bucket
// of the head was begun.
static inline void model_backward(Model* model, const int32_t* tokens, size_t B, size_t T) {
    const Config* c = &model->config;
    const Parameters* p = &model->parameters;
    Activations* a = &model->activations;
    ActivationGradients* g = &model->gradients;
    Stream stream = model->stream;
    size_t N = B * T, C = c->channels, H = c->heads, K = c->kv_heads, D = config_head_size(c), F = c->ffn;

    FlatVector* flat = &model->flat;
    if (c->tied) flat_begin_bucket(flat, c->layers + 1);
    fill_zero(g->residual, N * C * sizeof(floatX), stream);
    norm_backward(model, g->residual, g->hidden, a->output, a->mean, a->rstd, p->final_norm_weight, p->final_norm_bias, N);
    flat_end_bucket(flat, c->layers + 1);

    for (size_t l = c->layers; l-- > 0;) {
        const Block* b = &p->blocks[l];
        BlockActivations* s = &a->blocks[l];

        flat_begin_bucket(flat, l + 1);
        const floatX* dbranch = branch_gradient(model, 2 * l + 2, N);
        if (c->family == FAMILY_GPT2) {
            matmul_gelu_backward_input(g->ffn_in, dbranch, param(model, b->ffn_out_weight), s->ffn_in, N, C, F, stream);
        } else {
            matmul_backward_input(g->ffn_act, dbranch, param(model, b->ffn_out_weight), N, C, F, stream);
            swiglu_backward(g->ffn_in, g->ffn_act, s->ffn_in, N, F, stream);
        }
        matmul_backward_weight(grad(model, b->ffn_out_weight), grad(model, b->ffn_out_bias), dbranch, s->ffn_act, N, C, F,
                               stream);
        matmul_backward(model, g->hidden, g->ffn_in, s->norm2, b->ffn_in_weight, b->ffn_in_bias, N, config_ffn_in(c), C);
        norm_backward(model, g->residual, g->hidden, s->middle, s->mean2, s->rstd2, b->norm2_weight, b->norm2_bias, N);

        dbranch = branch_gradient(model, 2 * l + 1, N);
        matmul_backward(model, g->attention, dbranch, s->attention, b->attention_out_weight, b->attention_out_bias, N, C,
                        H * D);
        attention_backward(g->qkv, g->delta, g->attention, s->attention, s->lse, s->qkv, B, T, H, K, D, stream);
        if (c->family == FAMILY_LLAMA) rope_backward(g->qkv, a->rope, B, T, H, K, D, stream);
        matmul_backward(model, g->hidden, g->qkv, s->norm1, b->qkv_weight, b->qkv_bias, N, config_qkv(c), C);
        norm_backward(model, g->residual, g->hidden, s->input, s->mean1, s->rstd1, b->norm1_weight, b->norm1_bias, N);
        flat_end_bucket(flat, l + 1);
    }
    if (!c->tied) flat_begin_bucket(flat, 0);
    embedding_backward(grad(model, p->token_embedding), grad(model, p->position_embedding), branch_gradient(model, 0, N),
                       tokens, B, T, C, stream);
    flat_end_bucket(flat, 0);
}

// Begins a step of this rank's micro_batches, of which every rank has as many: the gradients are those of loss_scale times
// the mean of all ranks' micro-batches' mean losses over the targets that are not -1.
static inline void model_begin_step(Model* model, double loss_scale, size_t micro_batches) {
    flat_begin_step(&model->flat, loss_scale, micro_batches);
}

// Adds the sum of the losses of a batch, tokens and targets (B, T) on the host, to flat.scalars[SUM_LOSS], without gradients.
static inline void model_losses(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    const int32_t* batch = model_upload(model, tokens, targets, B * T);
    model_forward(model, batch, B, T, NULL);
    model_head(model, batch + B * T, 0.0f, B * T);
    sum_scaled(model->flat.scalars + SUM_LOSS, model->activations.losses, 1.0, B * T, model->stream);
}

// Forward, head and backward of one micro-batch, tokens and targets (B, T) on the host.
static inline void model_gradients(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    FlatVector* flat = &model->flat;
    size_t N = B * T, count = max_size(targets_count(targets, N), 1);
    double dloss = flat->loss_scale / (double)(flat->micro_batches * flat->options.world) / (double)count;
    flat->micro++;
    collective_barrier(&flat->collectives);
    const int32_t* batch = model_upload(model, tokens, targets, N);
    fault_point("forward");
    model_forward(model, batch, B, T, NULL);
    fault_point("backward");
    flat_begin_bucket(flat, model->config.tied ? 0 : model->config.layers + 1);
    model_head(model, batch + N, (float)dloss, N);
    model_backward(model, batch, B, T);
    sum_scaled(flat->scalars + SUM_LOSS, model->activations.losses, 1.0 / (double)count, N, model->stream);
}

// ------------------------------------------------------------------------------------------------
// 5. Update
//
// The learning rate is a function of the step. The spike guard watches the norm of the gradient; with FP16 the loss is
// scaled up before the backward so that small gradients do not vanish. What both must remember is in RunState, which
// together with parameters and optimizer state is the whole state of a run.

typedef enum {
    SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_STEP, SCHEDULE_EXPONENTIAL
} ScheduleKind;
#define SCHEDULE_NAMES "constant|linear|cosine|wsd|step|exponential"

typedef struct {
    ScheduleKind kind;
    double lr;              // the highest rate, reached at the end of the warm-up
    double final_fraction;  // of lr, at the last step: linear, cosine, wsd, exponential
    uint64_t warmup, steps; // steps of warm-up, steps of the run
    double decay_fraction;  // wsd: the part of the run at its end in which the rate falls
    uint64_t decay_every;   // step: the rate is multiplied by decay_factor every so many steps
    double decay_factor;
} Schedule;

// The learning rate of a step, counted from 0. Warm-up rises linearly from lr / warmup to lr. After it, with x going
// from 0 to 1 over the rest of the run: "SGDR: Stochastic Gradient Descent with Warm Restarts" (cosine, one period),
// "MiniCPM: Unveiling the Potential of Small Language Models" (warm-up, stable, decay).
static inline double schedule_lr(const Schedule* s, uint64_t step) {
    if (step < s->warmup) return s->lr * (double)(step + 1) / (double)s->warmup;
    uint64_t after = step - s->warmup;
    double length = s->steps > s->warmup + 1 ? (double)(s->steps - s->warmup - 1) : 1.0;
    double x = (double)after / length < 1.0 ? (double)after / length : 1.0;
    double fall = s->lr * (1.0 - s->final_fraction);
    double stable = 1.0 - s->decay_fraction;
    switch (s->kind) {
        case SCHEDULE_CONSTANT: return s->lr;
        case SCHEDULE_LINEAR: return s->lr - fall * x;
        case SCHEDULE_COSINE: return s->lr - fall * 0.5 * (1.0 - cos(3.14159265358979323846 * x));
        case SCHEDULE_WSD: return x <= stable ? s->lr : s->lr - fall * (x - stable) / s->decay_fraction;
        case SCHEDULE_STEP: return s->lr * pow(s->decay_factor, (double)(after / s->decay_every));
        case SCHEDULE_EXPONENTIAL: return s->lr * pow(s->final_fraction, x);
    }
    return s->lr;
}

// Running mean and variance of the gradient's norm over about the last hundred steps.
typedef struct {
    double mean, variance;
    uint64_t count;
} NormStatistics;

typedef struct {
    uint64_t step;           // optimizer steps done, skipped ones included
    uint64_t samples;        // sequences consumed
    uint64_t updates;        // steps that were not skipped: what the optimizer counts
    NormStatistics norms;
    double loss_scale;       // 1 unless FP16
    uint64_t scale_good;     // finite steps since the last overflow or doubling
    uint64_t skipped_consecutive;    // steps in a row that were skipped, up to the last
    uint64_t rewinds;        // how often the run has gone back after it had diverged;
    uint64_t rewound_from, rewound_to;  // the last time: the first bad step, and the step of the checkpoint
    double lr_factor;        // what is left of the learning rate after that
} RunState;

typedef struct {
    double clip;             // the norm is clipped to it; 0: never
    double spike_sigma;      // a norm within mean + spike_sigma * deviation is not clipped; 0: the rule is off
    double spike_skip;       // a step whose norm is over spike_skip * mean is skipped; 0: the rule is off
    uint64_t spike_warmup;   // norms seen before the two rules hold
    bool dynamic_scale;      // adapt the loss scale (FP16)
    uint64_t scale_growth;   // double it after so many good steps
} GuardOptions;

static inline RunState run_state_begin(bool dynamic_scale, double loss_scale) {
    RunState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = dynamic_scale ? loss_scale : 1.0;
    state.lr_factor = 1.0;
    return state;
}

// Decides on one step from its gradient's norm: returns false if it must be skipped, else true and the factor for the
// gradients, so that their norm is at most max(clip, mean + sigma * init_std). The statistics see the norm cut to these
// bounds: one spike moves them little, while norms that stay high move them a little every step, until they are
// accepted. They are the plain mean and variance of the first hundred norms, and after that weigh each new norm by
// 1/100. Also adapts the loss scale.
static inline bool guard_step(RunState* state, double* factor, const GuardOptions* o, double norm) {
    NormStatistics* n = &state->norms;
    bool finite = isfinite(norm), settled = n->count >= o->spike_warmup;
    if (o->dynamic_scale) {
        // "Mixed Precision Training": halve on overflow, double after a long time without one.
        state->scale_good = finite ? state->scale_good + 1 : 0;
        if (!finite && state->loss_scale > 1.0) state->loss_scale /= 2;
        if (state->scale_good >= o->scale_growth && state->loss_scale < 0x1p24) {
            state->loss_scale *= 2;
            state->scale_good = 0;
        }
    }
    *factor = 0.0;
    if (!finite) return false;
    double bound = o->clip > 0 ? o->clip : INFINITY, bar = INFINITY;
    if (settled && o->spike_sigma > 0 && o->clip > 0) bound = fmax(bound, n->mean + o->spike_sigma * sqrt(n->variance));
    if (settled && o->spike_skip > 0) bar = o->spike_skip * n->mean;
    double seen = fmin(norm, fmin(bound, bar)), distance = seen - n->mean;
    double weight = fmax(1.0 / (double)(n->count + 1), 0.01);
    n->mean += weight * distance;
    n->variance = (1.0 - weight) * (n->variance + weight * distance * distance);
    n->count++;
    if (norm > bar) return false;
    *factor = norm > bound ? bound / norm : 1.0;
    return true;
}

typedef struct {
    OptimizerKind kind;
    double beta1, beta2, epsilon, weight_decay;
    uint64_t seed;           // of stochastic rounding
} OptimizerOptions;

// What a rank tells the others beside its numbers, and what comes of it for all.
typedef struct {
    bool stop;               // it wants to end the run; any does
    bool save;               // a checkpoint is due; rank 0 says so
    bool saved;              // its part of the save in progress is on the disk; that of all is
    bool failed;             // it could not be written; that of any
} StepNews;

// What a step has come to, for all ranks.
typedef struct {
    double loss;             // mean of all ranks' micro-batches' mean losses
    double grad_norm;        // of the gradients of that, without the loss scale
    StepNews news;
    double loss_min, loss_median, loss_max;  // of the ranks' own losses
    double busy_min, busy_median, busy_max;  // ms since the reading before, without what a rank waited for others
    size_t slowest;          // the rank of busy_max
    double wait_share;       // what part of the time since then this rank has waited
} StepReading;

// After the last micro-batch of a step: waits for its sums, tells the other ranks, and reads what all have told. False if a
// rank is gone.
static inline bool model_read(Model* model, StepReading* reading, StepNews news, Error* error) {
    enum { LOSS, SQUARES, BUSY, STOP, SAVE, SAVED, FAILED, NUMBERS };
    static_assert((int)NUMBERS <= (int)STATS_MAX, "make TOLD larger");
    FlatVector* flat = &model->flat;
    size_t world = flat->options.world, saved = 0;
    flat_finish_step(flat);
    double waited = flat_waited_ms(flat), busy = now_ms() - flat->step_began_ms - waited, squares = 0;
    double own[NUMBERS] = {flat->scalars_host[SUM_LOSS] / (double)flat->micro_batches, 0, busy, (double)news.stop,
                           (double)news.save, (double)news.saved, (double)news.failed};
    for (size_t b = 0; b < flat->count; b++) own[SQUARES] += flat->scalars_host[SUM_SQUARES + b];
    if (flat->scalars_host[SUM_BAD] != 0) own[SQUARES] = NAN;
    if (!flat_gather_stats(flat, own, NUMBERS, error)) return false;
    waited += flat_waited_ms(flat);
    memset(reading, 0, sizeof *reading);
    for (size_t r = 0; r < world; r++) {
        reading->loss += flat_stat(flat, r, LOSS, NUMBERS) / (double)world;
        squares += flat_stat(flat, r, SQUARES, NUMBERS);
        reading->news.stop |= flat_stat(flat, r, STOP, NUMBERS) != 0;
        reading->news.failed |= flat_stat(flat, r, FAILED, NUMBERS) != 0;
        saved += flat_stat(flat, r, SAVED, NUMBERS) != 0;
    }
    if (isnan(reading->loss)) reading->loss = NAN;  // without the sign that some NaN have
    reading->news.save = flat_stat(flat, 0, SAVE, NUMBERS) != 0;
    reading->news.saved = saved == world;
    reading->grad_norm = isnan(squares) ? NAN : sqrt(squares) / flat->loss_scale;
    flat_extremes(&reading->loss_min, &reading->loss_median, &reading->loss_max, flat, LOSS, NUMBERS);
    reading->slowest = flat_extremes(&reading->busy_min, &reading->busy_median, &reading->busy_max, flat, BUSY, NUMBERS);
    reading->wait_share = waited / (busy + waited);
    flat->step_began_ms = now_ms();
    return true;
}

// One optimizer step, number `update` from 1; gradients are multiplied by `factor` first, and divided by the loss scale that
// model_begin_step was given.
static inline void model_update(Model* model, const OptimizerOptions* o, uint64_t update, double lr, double factor) {
    OptimizerStep step;
    step.kind = o->kind;
    step.lr = (float)lr;
    step.beta1 = (float)o->beta1;
    step.beta2 = (float)o->beta2;
    step.epsilon = (float)o->epsilon;
    step.weight_decay = (float)o->weight_decay;
    step.grad_scale = (float)(factor / model->flat.loss_scale);
    step.seed = o->seed;
    step.step = update;
    flat_update(&model->flat, &model->parameters, &step);
}

// ------------------------------------------------------------------------------------------------
// 6. Evaluation

// Mean loss per token over the first `windows` windows of the data (all of them if 0 or more than there are), which
// overlap by `overlap` tokens, B at a time, shared out to the ranks; tokens, targets (B, T) are scratch.
static inline bool model_validate(Model* model, double* loss, const Dataset* data, size_t windows, size_t overlap,
                                  int32_t* tokens, int32_t* targets, size_t B, size_t T, Error* error) {
    enum { LOSS, COUNT, NUMBERS };
    FlatVector* flat = &model->flat;
    size_t available = dataset_windows(data, T, overlap), rank = flat->options.rank, world = flat->options.world;
    if (windows == 0 || windows > available) windows = available;
    Dropout dropout = model->dropout;
    double own[NUMBERS] = {0, 0}, sum[NUMBERS] = {0, 0};
    fill_zero(flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    Progress progress = progress_begin("validation", windows);
    bool ok = true;
    model->dropout.p = 0;
    for (size_t first = rank * B; first < windows; first += world * B) {
        size_t batch = min_size(B, windows - first);
        ok = dataset_batch(tokens, targets, data, first, (int32_t)model->config.vocab, batch, T, overlap, error);
        if (!ok) break;
        model_losses(model, tokens, targets, batch, T);
        own[COUNT] += (double)targets_count(targets, batch * T);
        if (rank == 0) progress_show(&progress, first + batch);
    }
    progress_end(&progress);
    download(&own[LOSS], flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    model->dropout = dropout;
    if (!ok || !flat_gather_stats(flat, own, NUMBERS, error)) return false;
    for (size_t r = 0; r < world; r++)
        for (size_t i = 0; i < NUMBERS; i++) sum[i] += flat_stat(flat, r, i, NUMBERS);
    *loss = sum[LOSS] / sum[COUNT];
    return true;
}

static inline void describe_forward(char* text, size_t size, const FlatVector* flat, size_t number) {
    (void)flat;
    snprintf(text, size, "the %s that it computes from the same parameters and tokens",
             number == 0 ? "hidden states" : "losses");
}

// Whether all ranks, which have the same parameters, compute the same with them: the checksum of the hidden states, and the
// sum of the losses, of a fixed batch (B, T). Finds arithmetic that is wrong on one machine, which gradients carry to the
// parameters of all. Overwrites the activations; tokens, targets (B, T) are scratch.
static inline bool model_compare_forward(Model* model, int32_t* tokens, int32_t* targets, size_t B, size_t T,
                                         Error* error) {
    FlatVector* flat = &model->flat;
    Dropout dropout = model->dropout;
    size_t N = B * T;
    uint64_t* own = flat->compared + 2 * flat->options.rank;
    if (flat->options.world == 1) return true;
    for (size_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)(i * 7919 % model->config.vocab);
        targets[i] = (int32_t)((i + 1) * 7919 % model->config.vocab);
    }
    fill_zero(flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    model->dropout.p = 0;
    model_losses(model, tokens, targets, B, T);
    model->dropout = dropout;
    checksum(flat->checksums, model->activations.hidden, 0, N * model->config.channels, model->stream);
    download(own, flat->checksums, sizeof(uint64_t), model->stream);
    download(own + 1, flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    return flat_same(flat, 2, describe_forward, error);
}

// ------------------------------------------------------------------------------------------------
// 7. Sampling

typedef struct {
    double temperature;   // 0: always the likeliest token
    uint64_t top_k;       // choose among the k likeliest; 0: among all
    double top_p;         // choose among the likeliest whose probabilities reach p; 1: among all
    uint64_t seed;
} SamplingOptions;

typedef struct {
    float probability;    // times an unknown constant
    int32_t token;
} Candidate;

// The likeliest first; among equals the smaller token.
static inline int candidate_compare(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    if (x->probability != y->probability) return x->probability < y->probability ? 1 : -1;
    return x->token < y->token ? -1 : x->token > y->token;
}

// Draws from softmax(logits / temperature) cut to the top k and to the top p ("The Curious Case of Neural Text
// Degeneration"). logits (V); candidates (V) is scratch; `uniform` in [0, 1) is the random number.
static inline int32_t sample_token(Candidate* candidates, const floatX* logits, const SamplingOptions* o, float uniform,
                                   size_t V) {
    float maximum = -INFINITY, sum = 0.0f;
    for (size_t v = 0; v < V; v++) maximum = fmaxf(maximum, float_of(logits[v]));
    for (size_t v = 0; v < V; v++) {
        float logit = float_of(logits[v]) - maximum;
        float p = o->temperature > 0 ? expf((float)((double)logit / o->temperature)) : (float)(logit == 0.0f);
        candidates[v].token = (int32_t)v;
        candidates[v].probability = p >= 0 ? p : 0;  // NaN of a model that has diverged
        sum += candidates[v].probability;
    }
    qsort(candidates, V, sizeof *candidates, candidate_compare);
    size_t kept = o->top_k > 0 ? min_size(o->top_k, V) : V;
    if (o->temperature == 0) kept = 1;
    float reached = 0.0f;
    for (size_t i = 0; i < kept; i++) {
        reached += candidates[i].probability;
        if (o->top_p < 1 && reached >= (float)o->top_p * sum) kept = i + 1;
    }
    float target = uniform * reached, passed = 0.0f;
    for (size_t i = 0; i + 1 < kept; i++) {
        passed += candidates[i].probability;
        if (target < passed) return candidates[i].token;
    }
    return candidates[kept - 1].token;
}

// Continues tokens, of which the first `known` (at least 1) are given, up to `total`. Each new token is written to
// `out` as text at once, unless out is NULL. candidates (V) is scratch. When the context is full, its later half
// becomes the start of a new one. The model must have been made with options.sampling.
static inline void model_generate(Model* model, int32_t* tokens, Candidate* candidates, FILE* out,
                                  const Tokenizer* tokenizer, const SamplingOptions* o, size_t known, size_t total) {
    size_t context = model->config.context, seen = 0;
    Dropout dropout = model->dropout;
    model->dropout.p = 0;
    model->cache.length = 0;
    for (; known < total; known++) {
        if (known - seen > context - model->cache.length) {  // what is still to be read does not fit
            seen = known - max_size(context / 2, 1);
            model->cache.length = 0;
        }
        for (; seen < known; seen++) model_forward(model, model_upload(model, tokens + seen, NULL, 1), 1, 1, &model->cache);
        model_logits(model, 0, 1);
        download(model->cache.logits, model->activations.logits, model->config.vocab * sizeof(floatX), model->stream);
        float uniform = random_uniform(o->seed, RANDOM_SAMPLING, 0, known);
        tokens[known] = sample_token(candidates, model->cache.logits, o, uniform, model->config.vocab);
        if (out == NULL) continue;
        char text[64];
        fwrite(text, 1, tokenizer_decode(text, tokenizer, tokens + known, 1), out);
        fflush(out);
    }
    model->dropout = dropout;
}

// ------------------------------------------------------------------------------------------------
// 8. Monitor
//
// One line per logged step for the console, and one of JSON, with more numbers, for metrics.jsonl. What was not measured is
// null there.

typedef struct {
    uint64_t step, steps, tokens, skipped; // steps done and to do, tokens consumed, steps skipped so far
    StepReading reading;                   // loss and norm, and how the ranks differ
    double val_loss;                       // NAN in steps that do not validate
    double floor;                          // entropy of the validation text; 0: unknown
    double lr;
    double ms, tokens_per_second;
    double mfu;                            // of the peak that was given; NAN without one
    double minutes_left;
    uint64_t memory;                       // bytes taken on the device
    uint64_t sent;                         // bytes that this rank sent in the step
    size_t ranks;
} StepRecord;

// Floating-point operations of training on one token: 6 per weight that multiplies it (2 forward, 4 backward), and
// attention's two products over T/2 positions on average, forward and twice backward.
static inline double model_flops_per_token(const Model* model, size_t T) {
    const Config* c = &model->config;
    size_t looked_up = c->tied ? 0 : c->vocab * c->channels;
    if (c->family == FAMILY_GPT2) looked_up += c->context * c->channels;
    return 6.0 * (double)(model->parameters.true_size - looked_up) + 6.0 * (double)(c->layers * T * c->channels);
}

static inline void record_print(FILE* out, const StepRecord* r) {
    char val[64] = "", mfu[32] = "n/a", waits[32] = "", skipped[32] = "";
    if (r->skipped > 0) snprintf(skipped, sizeof skipped, " | skipped %llu", (unsigned long long)r->skipped);
    if (!isnan(r->val_loss)) snprintf(val, sizeof val, " | val %.4f", r->val_loss);
    if (!isnan(r->val_loss) && r->floor > 0)
        snprintf(val, sizeof val, " | val %.4f (floor %.4f %+.1f%%)", r->val_loss, r->floor,
                 100 * (r->val_loss / r->floor - 1));
    if (!isnan(r->mfu)) snprintf(mfu, sizeof mfu, "%.1f%%", 100 * r->mfu);
    if (r->ranks > 1) snprintf(waits, sizeof waits, " | waits %.0f%%", 100 * r->reading.wait_share);
    fprintf(out,
            "step %5llu/%llu | loss %.4f%s | norm %.3f | lr %.2e | %.0f ms | %.0f tok/s | mfu %s%s%s | %.1f min left\n",
            (unsigned long long)r->step, (unsigned long long)r->steps, r->reading.loss, val, r->reading.grad_norm, r->lr,
            r->ms, r->tokens_per_second, mfu, waits, skipped, r->minutes_left);
    fflush(out);
}

typedef struct {
    FILE* file;
    char path[FILE_PATH_MAX];
    JsonWriter waiting;      // lines that a full disk has refused so far
    bool refused;            // and it was said
} Log;

enum { LOG_WAITING_MAX = 1 << 24 };  // bytes; what comes then is lost

static inline void log_path(char* path, size_t size, const char* directory) {
    snprintf(path, size, "%.4000s/metrics.jsonl", directory);
}

// The length of the part of a log (bytes of JSON lines) before the first line whose step is over `step`; the rest of a
// line without its end is cut off too.
static inline size_t log_length_until(const char* text, size_t bytes, uint64_t step) {
    size_t kept = 0;
    while (kept < bytes) {
        const char* end = (const char*)memchr(text + kept, '\n', bytes - kept);
        Json json;
        Error ignored;
        uint64_t line_step = 0;
        if (end == NULL) break;
        if (json_parse(&json, text + kept, (size_t)(end - text) - kept, "log", &ignored)) {
            json_u64(&json, json_get(&json, 0, "step"), &line_step);
            json_free(&json);
        }
        if (line_step > step) break;
        kept = (size_t)(end - text) + 1;
    }
    return kept;
}

// Cuts the log back to the lines up to `step`: what a run wrote after the checkpoint that it goes back to is written again.
static inline bool log_cut_back(Log* log, uint64_t step, Error* error) {
    char* text = NULL;
    size_t bytes = 0;
    log->waiting.bytes = 0;  // of later steps: a save flushes the log first
    if (!file_read(log->path, (size_t)1 << 34, &text, &bytes, error)) return false;
    size_t kept = log_length_until(text, bytes, step);
    free(text);
    return kept == bytes || ftruncate(fileno(log->file), (off_t)kept) == 0 || fail_file(error, "cut back", log->path);
}

// Opens directory/metrics.jsonl to append. Only one process may train there.
static inline bool log_open(Log* log, const char* directory, Error* error) {
    memset(log, 0, sizeof *log);
    log_path(log->path, sizeof log->path, directory);
    log->file = fopen(log->path, "ab");
    if (log->file == NULL) return fail_file(error, "open", log->path);
    bool locked = flock(fileno(log->file), LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno != EWOULDBLOCK) return fail_file(error, "lock", log->path);
    if (!locked)
        return fail(error, "another process is training in %s; wait for it, or give another --out", directory);
    return true;
}

// A log that someone has deleted is begun anew, lest the rest is lost too.
static inline bool log_reopen(Log* log, Error* error) {
    struct stat status;
    char directory[FILE_PATH_MAX];
    if (fstat(fileno(log->file), &status) != 0 || status.st_nlink > 0) return true;
    fprintf(stderr, "train: %s was deleted while the run writes to it; a new one is begun\n", log->path);
    snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(log->path, '/') - log->path), log->path);
    fclose(log->file);
    log->file = directory_make(directory, error) ? fopen(log->path, "ab") : NULL;
    if (log->file == NULL) return fail_file(error, "create", log->path);
    return flock(fileno(log->file), LOCK_EX | LOCK_NB) == 0 ||
        fail(error, "another process has begun to train in %s", directory);
}

// Writes what waits; of a disk that fills, the part that it took need not wait on.
static inline bool log_flush(Log* log, Error* error) {
    JsonWriter* w = &log->waiting;
    while (w->bytes > 0) {
        errno = 0;
        ssize_t n = write(fileno(log->file), w->text, w->bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail_file(error, "write", log->path);
        w->bytes -= (size_t)n;
        memmove(w->text, w->text + n, w->bytes);
    }
    log->refused = false;
    return true;
}

// One line. A disk that is full does not end the run: the line waits.
static inline bool log_write(Log* log, const StepRecord* r, Error* error) {
    if (!log_reopen(log, error)) return false;
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '{');
    json_member_u64(&w, "step", r->step);
    json_member_number(&w, "loss", r->reading.loss);
    json_member_number(&w, "val_loss", r->val_loss);
    json_member_number(&w, "grad_norm", r->reading.grad_norm);
    json_member_number(&w, "lr", r->lr);
    json_member_u64(&w, "tokens", r->tokens);
    json_member_u64(&w, "skipped", r->skipped);
    json_member_number(&w, "loss_ranks_min", r->reading.loss_min);
    json_member_number(&w, "loss_ranks_median", r->reading.loss_median);
    json_member_number(&w, "loss_ranks_max", r->reading.loss_max);
    json_member_number(&w, "ms", r->ms);
    json_member_number(&w, "ms_ranks_min", r->reading.busy_min);
    json_member_number(&w, "ms_ranks_median", r->reading.busy_median);
    json_member_number(&w, "ms_ranks_max", r->reading.busy_max);
    json_member_u64(&w, "slowest_rank", r->reading.slowest);
    json_member_number(&w, "wait_share", r->reading.wait_share);
    json_member_u64(&w, "comm_bytes", r->sent);
    json_member_number(&w, "tok_per_s", r->tokens_per_second);
    json_member_number(&w, "mfu", r->mfu);
    json_member_u64(&w, "mem_bytes", r->memory);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool ok = json_write_done(&w, error);
    if (ok && log->waiting.bytes < LOG_WAITING_MAX) json_put(&log->waiting, w.text, w.bytes);
    json_writer_free(&w);
    Error why;
    if (!ok || log_flush(log, &why)) return ok;
    if (!log->refused) fprintf(stderr, "train: %s. Training goes on; the lines wait for room\n", why.text);
    log->refused = true;
    return true;
}

static inline void log_close(Log* log) {
    if (log->file) fclose(log->file);
    json_writer_free(&log->waiting);
    log->file = NULL;
}

#endif  // LLMTRAIN_H
