// llmtrain.h: the model and, by its includes, what it needs: build a model, compute with it, train it.
//
//    1. model           the struct that owns everything; memory
//    2. layers          linear layers and norms: what every matmul of the model goes through
//    3. forward         tokens to hidden states: block_forward, model_forward
//    4. head            hidden states to logits, losses, and the head's own gradients
//    5. backward        the forward, read from the end: block_backward, model_backward
//    6. step            micro-batches, loss and norm of a step, the optimizer: model_step, model_update
//
// Sizes are in llmtrain/model/config.h, the tensors in llmtrain/model/weights.h. The training loop is in train.cu;
// saving and loading in llmtrain/checkpoint/record.h; the validation loss in llmtrain/run/validate.h; text from a model
// in llmtrain/text/generate.h; calls for programs of your own in llmtrain/run/score.h; the smallest: examples/first.c.
//
// Letters: B batch, T sequence, N = B*T rows, C channels, L layers, H heads, K key/value heads, D head size,
// F feed-forward, V vocabulary, Vp padded vocabulary.
//
// A branch is what attention or the feed-forward adds to the residual stream. A bucket is the part of the parameters
// that ranks reduce and gather at a time: 0 the embeddings, l + 1 block l, L + 1 the final norm and the head. A leaf is
// a part of a sum, over rows or a layer's inputs, that is the same on any number of ranks (--leaves, --row-leaves).

#ifndef LLMTRAIN_H
#define LLMTRAIN_H

#include "llmtrain/model/documents.h"            // DocumentSpan, documents_find, targets_count
#include "llmtrain/model/kv_cache.h"             // KvCache
#include "llmtrain/model/objective.h"            // Objective
#include "llmtrain/model/offload_activations.h"  // OffloadBlocks
#include "llmtrain/model/slots.h"                // Activations; with it activations.h: BlockActivations
#include "llmtrain/model/watch.h"                // watch_at
#include "llmtrain/model/weights.h"              // Weights; with it config.h: Config
#include "llmtrain/ranks/agreement.h"            // StepClock, RankStats; with it zero.h: FlatVector
#include "llmtrain/ranks/context.h"              // ContextRanks: the rows of this rank, if it has not all
#include "llmtrain/ranks/layers.h"               // linear_forward; with it tensor_parallel.h: TensorRanks
#include "llmtrain/ranks/pipeline.h"             // Pipeline: the blocks of this rank, if it has not all

// ------------------------------------------------------------------------------------------------
// 1. Model

// The programs' help for ModelOptions.matmul_algorithms.
#define MATMUL_ALGORITHMS_HELP \
    "GPU builds: use the cuBLASLt algorithms that build/tune timed and stored in FILE; CPU builds ignore it"

typedef struct {
    size_t B, T;              // the largest batch that forward will see
    size_t slots;             // micro-batches whose activations are kept at a time; 0 means 1
    bool training;            // with gradients, optimizer state and the backward's buffers
    OptimizerOptions optimizer;
    size_t cached_sequences;  // in the KV cache, for generation; 0: no cache
    size_t kv_context;        // positions of each; 0, or too many: the model's context
    bool kv_q8;               // the KV cache holds 8 bits per element
    bool mask_documents;      // attention does not cross an end_of_text, or a target of TARGET_ENDS (documents.h)
    int32_t end_of_text;      // -1: none
    bool tf32;                // a GPU's float matmuls may round their operands to TF32
    const char* matmul_algorithms;  // a file by build/tune, for a GPU; NULL: cuBLASLt's first proposals
    RecomputeLevel recompute; // activations that the backward computes again
    const char* train;        // the names of the tensors that train (parameters_freeze); NULL: all, or LoRA's alone
    bool lora_drops;          // there will be dropout on the input of LoRA's pairs
    bool weighs;              // rows will have weights: from an Objective, or model_backward_weighted (run/score.h)
    RankOptions ranks;        // all 0: one rank
    PipelineOptions pipeline; // with ranks.pp; it chooses the slots
    int offload;              // OFFLOAD_OPTIMIZER, OFFLOAD_ACTIVATIONS: kept in offload_dir, not on the device
    const char* offload_dir;  // NULL, GPU builds only: in host memory
} ModelOptions;

typedef struct {
    Config config;
    ModelOptions options;
    Parameters parameters;    // the table of tensors: a row has a name, a shape and where the tensor is in `flat`
    Weights weights;          // the model's weights by role, each as the number of its row in that table
    FlatVector flat;          // this rank's part of parameters, gradients, master weights and optimizer state
    size_t first_trained;     // first bucket with a tensor that trains: the backward ends at it
    float* discarded[2];      // (C or D) where norms add the gradients of weights and biases that do not train
    ContextRanks context;     // with context parallelism: which rows this rank has
    TensorRanks tensor;       // with tensor parallelism: which parts of layers
    Layers layers;            // of all these: what linear_forward and linear_backward need
    Pipeline pipeline;        // with several stages: which blocks this rank has
    size_t first_block;       // 0, or where a pipeline stage begins: its input is complete, the others lack a branch
    const DeferredGradients* deferred;  // NULL; or where a block's backward leaves what its weights' gradients need
    bool decoding;            // with the KV cache: the tokens of the batch follow those in it
    Activations* slots;       // (options.slots)
    Activations* activations; // the slot in use: model_use_slot
    int32_t* positions;       // (B, T) on the host: of the batch that is being uploaded
    float* rope;              // (context, D/2, 2) cosines and sines; Llama only
    OffloadBlocks offloaded;  // the blocks' activations that are not in memory
    ActivationGradients gradients;
    KvCache cache;
    Dropout dropout;
    Objective objective;      // none: the mean loss of the targets
    HeadRule rule;            // none: the cross-entropy of the targets
    size_t logits_rows;       // rows of logits that exist at a time
    size_t workspace;         // bytes that options.matmul_algorithms need
    void* scratch;            // (model_scratch_bytes) for the operations
    int32_t* batches[2];      // each (3, B, T) on the device, used in turn: tokens, targets, positions
    Arena memory;
    Watch watch;              // a callback that looks at what was computed (run/trace.h)
    StepClock clock;
    RankStats stats;          // a few numbers of every rank, gathered in the last step
    Stream stream;
} Model;

static inline BlockShape model_block_shape(const Model* model) {
    const Config* c = &model->config;
    BlockShape s = {model->options.B, model->options.T, c->channels, c->heads, c->kv_heads, config_head_size(c), c->ffn,
                    c->family == FAMILY_LLAMA, c->qk_norm, ranks_cp(&model->options.ranks),
                    ranks_tp(&model->options.ranks), model->context.copies, ranks_leaves(&model->options.ranks)};
    return s;
}

// The most rows that this rank has of a micro-batch.
static inline size_t model_rows(const Model* model) {
    return model->options.B * model->options.T / ranks_of_rows(&model->options.ranks);
}

// This rank's rows of a micro-batch of N.
static inline Slice model_own_rows(const Model* model, size_t N) {
    Slice group = context_rows(&model->context, N);
    size_t n = slice_length(group) / model->tensor.tp, first = group.first + model->tensor.rank * n;
    Slice own = {first, first + n};
    return own;
}

// What the loss of a batch of N targets is a mean over: those that count in this rank's rows, or an objective's.
static inline size_t model_targets(const Model* model, const int32_t* targets, size_t N) {
    Slice rows = model_own_rows(model, N);
    if (model->objective.weigh) return model->objective.count(model->objective.context, N / model->options.T);
    return targets_count(targets + rows.first, slice_length(rows));
}

// What a rank computes of a block between its norms: N rows, H query and K key/value heads, F units of the
// feed-forward. With tensor parallelism N are the rows of all ranks that share layers, and the others its part.
typedef struct { size_t N, H, K, D, F; } BlockPart;

static inline BlockPart model_block_part(const Model* model) {
    const Config* c = &model->config;
    size_t tp = model->tensor.tp;
    BlockPart p = {model->activations->rows * tp, c->heads / tp, c->kv_heads / tp, config_head_size(c), c->ffn / tp};
    return p;
}

// The block at which the backward ends: nothing before it trains, or it is block 0. L: no block runs a backward.
static inline size_t model_backward_ends(const Model* model) {
    return model->first_trained > 0 ? model->first_trained - 1 : 0;
}

static inline size_t model_scratch_bytes(const Model* model) {
    return max_size(scratch_bytes(model_rows(model), model->config.channels), model->workspace);
}

// Forward, head and backward work on this slot from now on.
static inline void model_use_slot(Model* model, size_t slot) { model->activations = &model->slots[slot]; }

// The blocks that a slot has: those of this rank's longest piece.
static inline size_t model_blocks(const Model* model) {
    return model->pipeline.pp > 1 ? model->pipeline.longest : model->config.layers;
}

// Whether this rank has the head.
static inline bool model_has_head(const Model* model) { return pipeline_is_last(&model->pipeline); }

// Takes every array from the arena. Called twice: in model_plan, which has no memory yet, to add up the sizes; and in
// model_allocate, to set the pointers.
static inline void model_layout(Model* model) {
    const Config* c = &model->config;
    const ModelOptions* o = &model->options;
    Arena* arena = &model->memory;
    size_t N = o->B * o->T, C = c->channels, D = config_head_size(c), blocks = model_blocks(model);
    size_t Vp = config_padded_vocab(c), logits = model_has_head(model) ? model->logits_rows * Vp / model->tensor.tp : 0;
    BlockShape shape = model_block_shape(model);
    flat_layout(&model->flat, arena);
    if (o->training) gradients_layout(&model->gradients, &shape, arena);
    offload_blocks_layout(&model->offloaded, model->slots->kept, blocks, model_backward_ends(model), &shape, arena);
    slots_layout(model->slots, o->slots, blocks, &shape, logits, arena);
    context_layout(&model->context, model_rows(model) * (c->heads + 2 * shape_kv_heads(&shape)) * D, arena);
    tensor_layout(&model->tensor, &shape, parameters_longest(&model->parameters), model->logits_rows, Vp, arena);
    pipeline_layout(&model->pipeline, model_rows(model) * C, o->training, arena);
    for (int i = 0; i < 2; i++) model->batches[i] = (int32_t*)arena_take(arena, "batches", 3 * N * sizeof(int32_t));
    model->scratch = arena_take(arena, "scratch of the operations", model_scratch_bytes(model));
    adapters_layout(&model->layers.adapters, c, o->training, o->lora_drops, model_rows(model), arena);
    if (o->weighs) objective_layout(&model->objective, N, arena);
    for (int i = 0; i < 2 && (o->train || c->lora); i++)
        model->discarded[i] = (float*)arena_take(arena, "gradients that are not used", max_size(C, D) * sizeof(float));
    if (c->family == FAMILY_LLAMA)
        model->rope = (float*)arena_take(arena, "rotary angles", c->context * D * sizeof(float));
    size_t cached = o->kv_context ? min_size(o->kv_context, c->context) : c->context;
    if (o->cached_sequences)
        kv_cache_layout(&model->cache, arena, c->layers, o->cached_sequences, cached, c->kv_heads, D, o->kv_q8);
}

// With several ranks close the Comm first, so that no collective is in flight.
static inline void model_free(Model* model) {
    flat_free(&model->flat);
    stats_close(&model->stats);
    offload_blocks_close(&model->offloaded);
    device_close(model->stream);  // waits for what is still queued on the device
    if (model->memory.base) device_free(model->memory.base, arena_bytes(&model->memory));
    slots_free(model->slots, model->options.slots);
    pipeline_free(&model->pipeline);
    free(model->positions), kv_cache_close(&model->cache);
    free(model->weights.blocks);
    parameters_free(&model->parameters);
    memset(model, 0, sizeof *model);
}

// Completes the configuration, and builds the table of parameters and the memory plan; allocates nothing large.
static inline bool model_plan(Model* model, const Config* asked, ModelOptions options, Error* error) {
    memset(model, 0, sizeof *model);
    model->config = *asked;
    options.slots = max_size(options.slots, 1);
    model->options = options;
    const Config* config = &model->config;
    if (!config_complete(&model->config, error)) return false;
    if (options.B == 0 || options.T == 0 || options.B > SIZE_MAX / options.T)
        return fail_with(error, "a batch of %zu sequences of %zu tokens is impossible; give at least 1 of each",
                         options.B, options.T);
    if (options.T > config->context)
        return fail_with(error, "sequences of %zu tokens do not fit the model's context of %zu; make --seq smaller or "
                         "--context larger", options.T, config->context);
    if (options.T > device_longest())
        return fail_with(error, "sequences of %zu tokens are longer than the %zu that a GPU's grid has room for; make "
                         "--seq smaller", options.T, device_longest());
    bool stages = ranks_pp(&options.ranks) > 1;
    if ((options.slots > 1 || stages) && (options.offload & OFFLOAD_ACTIVATIONS))
        return fail_with(error, "activations cannot be offloaded with several slots, or --pp; leave out one of them");
    if (stages && pipeline_splits(options.pipeline.kind) && options.recompute != RECOMPUTE_NONE)
        return fail_with(error, "--pipeline zb-h1 and zb-h2 need what --recompute would drop; choose 1f1b, or leave "
                         "out --recompute");
    // Logits of all rows at once would be the largest array, so the rows are cut into equal parts of at most
    // head_elements() logits.
    size_t Vp = config_padded_vocab(config);
    size_t N = model_rows(model) * ranks_tp(&options.ranks) / ranks_row_leaves(&options.ranks);
    size_t parts = divide_up(N, max_size(head_elements(N * Vp) / Vp, LLMTRAIN_PIECE(64, 7)));
    model->logits_rows = divide_up(N, parts);
    FlatOptions holds = {options.training, &model->options.optimizer, (options.offload & OFFLOAD_OPTIMIZER) != 0,
                         options.offload_dir};
    // Only a backward needs separate activations for each block.
    unsigned recomputed = options.training ? recompute_operations(options.recompute) : BLOCK_SHARES_ALL;
    Pipeline* p = &model->pipeline;
    model->context = context_plan(&options.ranks, &model->flat);
    model->tensor = tensor_plan(&options.ranks, &model->flat);
    bool ok = tensor_check(&options.ranks, &options.optimizer, options.training, error) &&
              pipeline_plan(p, &options.pipeline, &options.ranks, config, options.T, error);
    if (ok && p->pp > 1) model->options.slots = pipeline_slots(p);
    ok = ok && ((model->slots = slots_create(model->options.slots, config->layers, model_blocks(model), recomputed,
                                             p->table.splits, options.mask_documents ? options.B * options.T : 1)) ||
                fail_with(error, "out of memory for the table of activations"));
    model->activations = model->slots;
    ok = ok && matmul_choices_workspace(options.matmul_algorithms, &model->workspace, error) &&
         weights_create(&model->weights, &model->parameters, config, options.train, model->tensor.rank,
                        model->tensor.tp, error) &&
         flat_create(&model->flat, &model->parameters, &model->options.ranks, &holds, p->stages, error) &&
         offload_blocks_plan(&model->offloaded, model_blocks(model), options.training ? options.offload : 0, error);
    while (ok && model->flat.buckets[model->first_trained].first == model->flat.buckets[model->first_trained].end)
        model->first_trained++;
    const Layers layers = {&model->parameters, &model->flat, &model->tensor, {.scale = config_lora_scale(config)},
                           &model->activations, &model->dropout, false, model->stream};
    model->layers = layers;
    if (ok) model_layout(model);
    else model_free(model);
    return ok;
}

// Opens the device and allocates what model_plan planned. Parameters are zero until model_randomize or a checkpoint
// fills them. The ranks of a run call model_connect next, all together.
static inline bool model_allocate(Model* model, Error* error) {
    const Config* c = &model->config;
    const ModelOptions* o = &model->options;
    size_t D = config_head_size(c), batch_bytes = 3 * o->B * o->T * sizeof(int32_t);
    // Loading a kernel or connecting ranks may wait for kernels that run, as a receive does until another stage sends.
    if (ranks_pp(&o->ranks) > 1) setenv("CUDA_MODULE_LOADING", "EAGER", 0), setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    if (!device_choose(o->ranks.local_rank, error) || !device_open(&model->stream, o->tf32, error) ||
        !matmul_choices_open(o->matmul_algorithms, o->ranks.rank == 0, model->stream, error) ||
        !arena_allocate(&model->memory, o->ranks.world, model->stream, error)) return false;
    model->layers.stream = model->stream;
    model_layout(model);
    model->positions = (int32_t*)memory_allocate(o->B * o->T * sizeof(int32_t));
    if (!model->positions || !kv_cache_open(&model->cache))
        return fail_with(error, "out of memory for a batch; make --batch smaller");
    if (!device_prepare(model->stream, model->scratch, model_scratch_bytes(model), batch_bytes, error) ||
        !flat_prepare(&model->flat, model->stream, error) ||
        !pipeline_allocate_batches(&model->pipeline, o->B * o->T, error) ||
        !stats_open(&model->stats, &o->ranks, model->flat.count, error)) return false;
    if (!offload_blocks_open(&model->offloaded, o->offload_dir, o->ranks.rank, o->ranks.local_rank, model->stream,
                             error)) return false;
    if (c->family == FAMILY_LLAMA) {
        float* table = (float*)memory_allocate(c->context * D * sizeof(float));
        if (table == NULL)
            return fail_with(error, "out of memory for the table of rotary angles of %zu positions", c->context);
        RopeOptions rope = config_rope(c);
        rope_table(table, &rope, c->context, D);
        device_upload(model->rope, table, c->context * D * sizeof(float), model->stream);
        free(table);
    }
    return true;
}

// Opens the collectives: all ranks together.
static inline bool model_connect(Model* model, Error* error) {
    if (!flat_connect(&model->flat, error)) return false;
    context_connect(&model->context, model->stream);
    tensor_connect(&model->tensor, model->stream);
    return pipeline_connect(&model->pipeline, &model->flat, error);
}

static inline bool model_create(Model* model, const Config* config, ModelOptions options, Error* error) {
    if (!model_plan(model, config, options, error)) return false;
    if (model_allocate(model, error) && model_connect(model, error)) return true;
    model_free(model);
    return false;
}

// Sets the initial weights, which depend only on the seed.
static inline bool model_randomize(Model* model, uint64_t seed, Error* error) {
    return flat_randomize(&model->flat, seed, false, error);
}

static inline const Tensor* model_tensor(const Model* model, TensorId id) { return layer_tensor(&model->layers, id); }

// ------------------------------------------------------------------------------------------------
// 2. Layers
//
// Every matmul of the model is a linear layer, and goes through llmtrain/ranks/layers.h. Here are the norms.

// A tensor's parameters, and where the backward adds its gradient; NULL: the model does not have it, it does not train.
static inline const floatX* model_param(const Model* model, TensorId id) { return layer_param(&model->layers, id); }
static inline float* model_grad(const Model* model, TensorId id) { return layer_grad(&model->layers, id); }

// Where a norm's gradient waits for block_weights.
static inline size_t model_norm_size(const Model* model) {
    return max_size(model->config.channels, config_head_size(&model->config));
}
static inline float* deferred_norm(const Model* model, TensorId id, size_t leaf) {
    TensorId norms[BLOCK_NORMS];
    size_t i = 0;
    block_norms(norms, &model->weights.blocks[model_tensor(model, id)->bucket - 1]);
    while (norms[i].row != id.row) i++;
    return model->deferred->norms + (leaf * BLOCK_NORMS + i) * model_norm_size(model);
}

// residual = in + branch, out = norm(residual), all (N, C): each branch is added to the stream by the norm that follows
// it. Without a branch (NULL) the residual is `in` itself.
static inline void norm_forward(const Model* model, floatX* out, floatX* residual, float* mean, float* rstd,
                                const floatX* in, const floatX* branch, Norm norm, size_t N) {
    const Config* c = &model->config;
    float epsilon = (float)c->norm_epsilon;
    if (c->family == FAMILY_GPT2)
        layernorm_forward(out, residual, mean, rstd, in, branch, model_param(model, norm.weight),
                          model_param(model, norm.bias), epsilon, N, c->channels, model->stream);
    else
        rmsnorm_forward(out, residual, rstd, in, branch, model_param(model, norm.weight), epsilon, N, c->channels,
                        model->stream);
}

// The gradient of the weight (0) or bias (1) of a norm, which needs memory for both even if one does not train.
static inline float* model_norm_grad(const Model* model, TensorId id, size_t number, size_t leaf) {
    bool defers = model->deferred && tensor_exists(id);
    float* gradient = defers ? deferred_norm(model, id, leaf) : model_grad(model, id);
    return gradient ? gradient : model->discarded[number];
}

// Adds the gradient of x (N, C), the residual that norm_forward normalized, to dx.
static inline void norm_backward(Model* model, floatX* dx, const floatX* dout, const floatX* x, const float* mean,
                                 const float* rstd, Norm norm, size_t N) {
    size_t C = model->config.channels;
    for (size_t leaf = 0; leaf < layer_leaves(&model->layers, norm.weight); leaf++) {
        Slice rows = leaf_rows(&model->layers, norm.weight, leaf, N);
        float* dweight = model_norm_grad(model, norm.weight, 0, leaf);
        size_t r = rows.first, M = slice_length(rows);
        if (model->config.family == FAMILY_GPT2)
            layernorm_backward(dx + r * C, dweight, model_norm_grad(model, norm.bias, 1, leaf), dout + r * C, x + r * C,
                               model_param(model, norm.weight), mean + r, rstd + r, M, C, model->stream);
        else
            rmsnorm_backward(dx + r * C, dweight, dout + r * C, x + r * C, model_param(model, norm.weight), rstd + r,
                             M, C, model->stream);
        leaf_end(&model->layers, leaf, norm.weight);
        leaf_end(&model->layers, leaf, norm.bias);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Forward
//
//   x = token_embedding[tokens] + position_embedding
//   for each block:   x = x + attention(norm1(x));   x = x + ffn(norm2(x))
//   hidden = final_norm(x)
//
// From here on `a` is the slot in use (Activations); of block l, `b` are the weights (Block) and `s` what the backward
// needs (BlockActivations); `g` are the gradients of activations.

// out = dropout(in), both (N, C), which may be the same. `site` tells its uses apart. The backward calls it on
// gradients, with the same site.
static inline void model_dropout(const Model* model, floatX* out, const floatX* in, size_t site, size_t N) {
    size_t C = model->config.channels;
    dropout_apply(out, in, model->dropout.p, model->dropout.seed, site, model->activations->first_token * C, N * C,
                  model->stream);
}

// Dropout's sites: after the embedding, and on the two branches of each block.
enum { SITE_EMBEDDING = 0 };
static inline size_t site_attention(size_t l) { return 2 * l + 1; }
static inline size_t site_ffn(size_t l) { return 2 * l + 2; }

// Makes tokens (B, T) on the host the batch of the slot in use, with targets unless they are NULL. They stay on the
// device until the batch after the next is uploaded or, with several slots, until the slot's next batch. decoding: they
// follow those in the KV cache, and the forward appends them to it.
static inline void model_upload(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T,
                                bool decoding) {
    Activations* a = model->activations;
    DocumentSpan whole = {0, B, T};
    size_t N = B * T;
    Slice own = model_own_rows(model, N), group = context_rows(&model->context, N);
    model->decoding = decoding;
    a->B = B;
    a->T = T;
    a->rows = slice_length(own);
    a->first_token = model->dropout.first_token + own.first;
    a->spans[0] = whole;
    a->span_count = 1;
    kv_cache_positions(model->positions, decoding ? &model->cache : NULL, B, T);
    if (model->options.mask_documents && !decoding)
        a->span_count = documents_find(a->spans, model->positions, tokens, targets, model->options.end_of_text, B, T);
    const int32_t* batch = device_upload_batch(model->batches, tokens, targets, model->positions, N * sizeof(int32_t),
                                               model->stream);
    if (a->batch) device_copy(a->batch, batch, 3 * N * sizeof(int32_t), model->stream);
    a->tokens = (a->batch ? a->batch : batch) + group.first;
    a->targets = a->tokens + N;
    a->positions = a->tokens + 2 * N;
}

// Block l: x = x + attention(norm1(x)); x = x + ffn(norm2(x)). Each addition is left to the norm that follows it, which
// does both in one pass: a block ends with its stream in blocks[l].attention_residual and its feed-forward output in
// `branch`, and the next norm adds the two. The block fills blocks[l] for the backward; block_recompute calls the parts
// whose results were not kept.

// qkv = norm1 qkv_weight^T, with norms and positions of queries and keys; with context parallelism of all rows.
static inline void block_qkv(const Model* model, size_t l) {
    const Config* c = &model->config;
    const Activations* a = model->activations;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &a->blocks[l];
    BlockPart p = model_block_part(model);
    floatX* qkv = context_own(&model->context, s->qkv);
    linear_forward(&model->layers, qkv, s->norm1, b->qkv, a->rows);
    watch_at(&model->watch, WATCH_QKV, l);
    if (c->qk_norm)
        qk_norm_forward(qkv, s->qk, s->qk_rstd, model_param(model, b->q_norm_weight),
                        model_param(model, b->k_norm_weight), (float)c->norm_epsilon, p.N, p.H, p.K, p.D,
                        model->stream);
    if (c->family == FAMILY_LLAMA) rope_forward(qkv, model->rope, a->positions, p.N, p.H, p.K, p.D, model->stream);
    context_gather_rows(&model->context, s->qkv, qkv, p.N, p.H, p.K, p.D, model->stream);
}

static inline void block_attention(const Model* model, size_t l) {
    const Activations* a = model->activations;
    const BlockActivations* s = &a->blocks[l];
    BlockPart p = model_block_part(model);
    size_t D = p.D, cp = model->context.cp, h = p.H / cp, k = p.K * model->context.copies / cp;  // this rank's heads
    if (model->decoding) {
        KvLayer cached = kv_cache_layer(&model->cache, l);
        attention_decode(s->attention, cached.keys, cached.values, cached.scales, s->qkv, a->positions, a->B, a->T,
                         model->cache.context, p.H, p.K, D, model->stream);
        return;
    }
    floatX* attended = cp > 1 ? s->attended : s->attention;
    for (size_t i = 0; i < a->span_count; i++) {
        DocumentSpan d = a->spans[i];
        attention_forward(attended + d.first * h * D, s->lse + d.first * h, s->qkv + d.first * (h + 2 * k) * D, d.B,
                          d.T, h, k, D, model->stream);
    }
    context_gather_heads(&model->context, s->attention, attended, p.N, p.H, 0, D, model->stream);
}

// branch = attention's output matmul; attention_residual = input + branch; norm2 = norm(attention_residual).
static inline void block_attention_out(const Model* model, size_t l) {
    const Activations* a = model->activations;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &a->blocks[l];
    size_t N = a->rows;
    linear_forward(&model->layers, a->branch, s->attention, b->attention_out, N);
    if (model->dropout.p > 0) model_dropout(model, a->branch, a->branch, site_attention(l), N);
    watch_at(&model->watch, WATCH_ATTENTION, l);
    norm_forward(model, s->norm2, s->attention_residual, s->mean2, s->rstd2, s->input, a->branch, b->norm2, N);
}

// ffn_act = the nonlinearity of ffn_in = norm2 ffn_in_weight^T.
static inline void block_ffn_in(const Model* model, size_t l) {
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations->blocks[l];
    size_t N = model->activations->rows;
    BlockPart p = model_block_part(model);
    if (model->config.family == FAMILY_GPT2) {
        linear_forward_gelu(&model->layers, s->ffn_act, s->ffn_in, s->norm2, b->ffn_in, N);
    } else {
        linear_forward(&model->layers, s->ffn_in, s->norm2, b->ffn_in, N);
        swiglu_forward(s->ffn_act, s->ffn_in, p.N, p.F, model->stream);
    }
}

// branch (N, C) = ffn(norm2). A layer of experts would be another branch here and in block_ffn_backward.
static inline void block_ffn_forward(const Model* model, size_t l) {
    const Activations* a = model->activations;
    block_ffn_in(model, l);
    linear_forward(&model->layers, a->branch, a->blocks[l].ffn_act, model->weights.blocks[l].ffn_out, a->rows);
}

static inline void block_forward(Model* model, size_t l) {
    Activations* a = model->activations;
    BlockActivations* s = &a->blocks[l];
    size_t N = a->rows;
    bool joins = l > model->first_block;      // the block before it has left a branch

    flat_await(&model->flat, l + 1);          // the ranks' updated parameters have arrived
    offload_block_forward(&model->offloaded, l);
    // 1. input = x + the previous block's branch (the first block's input is complete); norm1 = norm(input)
    norm_forward(model, s->norm1, s->input, s->mean1, s->rstd1, joins ? a->blocks[l - 1].attention_residual : s->input,
                 joins ? a->branch : NULL, model->weights.blocks[l].norm1, N);
    // 2. queries, keys and values of every head (fewer keys and values than queries if K < H), rotated by position
    block_qkv(model, l);
    // 3. attention = softmax(q k^T / sqrt(D)) v, causal
    block_attention(model, l);
    // 4. attention_residual = input + attention_out(attention); norm2 = norm(attention_residual)
    block_attention_out(model, l);
    // 5. branch = ffn_out(gelu or swiglu(ffn_in(norm2))), which the next norm adds to attention_residual
    block_ffn_forward(model, l);
    if (model->dropout.p > 0) model_dropout(model, a->branch, a->branch, site_ffn(l), N);
    watch_at(&model->watch, WATCH_FFN, l);
}

// out (N, C) = the residual stream after block l, the last that ran: what the next stage of a pipeline receives, as the
// input of its first_block.
static inline void block_output(const Model* model, floatX* out, size_t l) {
    const Activations* a = model->activations;
    residual_forward(out, a->blocks[l].attention_residual, a->branch, a->rows * model->config.channels, model->stream);
}

// The input of block 0 = the embedding of the slot's tokens.
static inline void model_embed(Model* model) {
    const Weights* w = &model->weights;
    Activations* a = model->activations;
    size_t N = a->rows, all = N * model->tensor.tp, C = model->config.channels;
    flat_await(&model->flat, 0);
    offload_block_forward(&model->offloaded, 0);  // if offloaded, sets where block 0's arrays are
    floatX* x = a->blocks[0].input;
    tensor_embed(&model->tensor, x, a->tokens, a->positions, model_param(model, w->token_embedding),
                 model_param(model, w->position_embedding), model_tensor(model, w->token_embedding)->size / C, all, C,
                 model->stream);
    if (model->dropout.p > 0) model_dropout(model, x, x, SITE_EMBEDDING, N);
}

// hidden = norm(the residual stream after the last block).
static inline void model_final_norm(Model* model) {
    Activations* a = model->activations;
    size_t L = model->config.layers;
    flat_await(&model->flat, L + 1);
    norm_forward(model, a->hidden, a->output, a->mean, a->rstd, a->blocks[L - 1].attention_residual, a->branch,
                 model->weights.final_norm, a->rows);
    watch_at(&model->watch, WATCH_HIDDEN, 0);
}

// Fills hidden for the batch of the slot; waits for each bucket of parameters before it uses it.
static inline void model_forward(Model* model) {
    model_embed(model);
    for (size_t l = 0; l < model->config.layers; l++) block_forward(model, l);
    model_final_norm(model);
    if (model->decoding) kv_cache_advance(&model->cache, model->activations->B, model->activations->T);
}

// ------------------------------------------------------------------------------------------------
// 4. Head
//
//   logits = hidden head_weight^T;   loss = cross-entropy(logits, targets)
//
// Logits are the largest activation by far, so they exist for a part of the rows at a time: computed, turned into their
// gradient in place, and used for the gradients of the hidden states and of the head's weight.

// logits (rows, Vp) of rows of hidden states (rows, C); with tensor parallelism this rank's columns of them.
static inline void head_forward(Model* model, const floatX* hidden, size_t rows) {
    Linear head = model->weights.head;
    matmul_forward(model->activations->logits, hidden, model_param(model, head.weight), NULL, rows,
                   linear_outputs(&model->layers, head), model->config.channels, model->stream);
}

static inline void model_logits(Model* model, size_t first_row, size_t rows) {
    head_forward(model, model->activations->hidden + first_row * model->config.channels, rows);
}

// Fills losses for the targets of the slot; -1 is ignored. If dloss is not 0, also does the head's backward for the
// objective dloss * (sum over rows of weight * loss). weights (N) on the device; NULL: all are 1. With tensor
// parallelism a rank has all rows and a part of the vocabulary.
static inline void model_head(Model* model, const float* weights, float dloss) {
    const Config* c = &model->config;
    Activations* a = model->activations;
    TensorRanks* t = &model->tensor;
    Linear head = model->weights.head;
    const floatX* W = model_param(model, head.weight);
    size_t N = a->rows * t->tp, C = c->channels, M = N / layer_leaves(&model->layers, head.weight), rows;
    const floatX* all = tensor_gather(t, a->hidden, N, C, model->stream);
    float* losses = t->tp > 1 ? t->losses : a->losses;
    for (size_t first = 0; first < N; first += rows) {
        rows = min_size(model->logits_rows, M - first % M);
        head_forward(model, all + first * C, rows);
        watch_at(&model->watch, WATCH_LOGITS, first);
        // logits become dlogits = dloss * weight * (softmax(logits) - one-hot(target)), or what a rule says
        const float* of_rows = weights ? weights + first : NULL;
        if (model->rule.apply) model->rule.apply(model->rule.context, a->logits, losses + first, dloss, first, rows);
        else tensor_classifier(t, a->logits, losses + first, a->targets + first, dloss, of_rows, rows, c->vocab,
                               config_padded_vocab(c), model->stream);
        if (dloss == 0.0f) continue;
        // dhidden = dlogits head_weight
        TensorSum sum = {model_tensor(model, head.weight), W, NULL, a->logits, true, first, rows};
        if (t->has_leaves) tensor_sum(t, &sum, model->stream);
        else matmul_backward_input(model->gradients.hidden + first * C, a->logits, W, rows,
                                   linear_outputs(&model->layers, head), C, model->stream);
        // dhead_weight += dlogits^T hidden; after a leaf it is zero again
        linear_backward_rows(&model->layers, model_grad(model, head.weight), NULL, a->logits, all + first * C, head,
                             first > 0, rows);
        if ((first + rows) % M == 0) leaf_end(&model->layers, first / M, head.weight);
    }
    if (t->has_leaves && dloss != 0.0f) tensor_scatter(t, model->gradients.hidden, NULL, N, C, model->stream);
    if (t->tp > 1) device_copy(a->losses, losses + t->rank * a->rows, a->rows * sizeof(float), model->stream);
    watch_at(&model->watch, WATCH_LOSS, 0);
}

// ------------------------------------------------------------------------------------------------
// 5. Backward
//
// model_forward from its last line to its first. gradients.residual holds the gradient of the residual stream, to
// which every norm's backward adds its part. Gradients of parameters are added at flat_gradient() (matmuls overwrite
// unless flat_adds()); a bucket whose gradients are complete is reduced over the ranks while the rest of the backward
// runs.

// The gradient of the residual stream as the branch at a dropout site receives it.
static inline const floatX* branch_gradient(const Model* model, size_t site, size_t N) {
    const ActivationGradients* g = &model->gradients;
    floatX* branch = model->deferred && site > 0 ? model->deferred->branch[site % 2] : g->branch;
    if (model->dropout.p > 0) model_dropout(model, branch, g->residual, site, N);
    else if (branch == g->branch) return g->residual;
    else device_copy(branch, g->residual, N * model->config.channels * sizeof(floatX), model->stream);
    return branch;
}

// Recomputes what block_forward did not keep of block l. Its input and attention_residual, if kept, already include the
// branch that was added to the residual stream: their norms run without one.
static inline void block_recompute(const Model* model, size_t l) {
    const Activations* a = model->activations;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &a->blocks[l];
    size_t N = a->rows;
    BlockPart p = model_block_part(model);
    if (block_recomputes(s, BLOCK_NORM1))
        norm_forward(model, s->norm1, NULL, s->mean1, s->rstd1, s->input, NULL, b->norm1, N);
    if (block_recomputes(s, BLOCK_QKV)) block_qkv(model, l);
    if (block_recomputes(s, BLOCK_ATTENTION)) block_attention(model, l);
    if (block_recomputes(s, BLOCK_ATTENTION_OUT)) block_attention_out(model, l);
    else if (block_recomputes(s, BLOCK_NORM2))
        norm_forward(model, s->norm2, NULL, s->mean2, s->rstd2, s->attention_residual, NULL, b->norm2, N);
    if (block_recomputes(s, BLOCK_FFN_IN)) block_ffn_in(model, l);
    else if (block_recomputes(s, BLOCK_FFN_ACT) && model->config.family == FAMILY_LLAMA)
        swiglu_forward(s->ffn_act, s->ffn_in, p.N, p.F, model->stream);
    else if (block_recomputes(s, BLOCK_FFN_ACT))
        linear_recompute_gelu(&model->layers, s->ffn_act, s->ffn_in, s->norm2, b->ffn_in, N);
}

// gradients.hidden (N, C) = the gradient of norm2, from that of the branch.
static inline void block_ffn_backward(Model* model, size_t l, const floatX* dbranch) {
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations->blocks[l];
    const ActivationGradients* g = &model->gradients;
    size_t N = model->activations->rows;
    BlockPart p = model_block_part(model);
    if (model->config.family == FAMILY_GPT2) {
        linear_backward_gelu(&model->layers, g->ffn_in, dbranch, s->ffn_act, s->ffn_in, b->ffn_out, N);
    } else {
        linear_backward(&model->layers, g->ffn_act, dbranch, s->ffn_act, b->ffn_out, N);
        swiglu_backward(g->ffn_in, g->ffn_act, s->ffn_in, p.N, p.F, model->stream);
    }
    linear_backward(&model->layers, g->hidden, g->ffn_in, s->norm2, b->ffn_in, N);
}

// gradients.qkv ((H + 2K) D per row) = the gradient of what attention read, from gradients.attention.
static inline void block_attention_backward(const Model* model, size_t l) {
    const Activations* a = model->activations;
    const BlockActivations* s = &a->blocks[l];
    const ActivationGradients* g = &model->gradients;
    const ContextRanks* ranks = &model->context;
    BlockPart p = model_block_part(model);
    size_t D = p.D, h = p.H / ranks->cp, k = p.K * ranks->copies / ranks->cp;
    const floatX* attended = ranks->cp > 1 ? s->attended : s->attention;
    floatX* dattended = ranks->cp > 1 ? ranks->buffers[0] : g->attention;
    floatX* dqkv = context_moves(ranks) ? ranks->buffers[1] : g->qkv;
    context_gather_rows(ranks, dattended, g->attention, p.N, p.H, 0, D, model->stream);
    for (size_t i = 0; i < a->span_count; i++) {
        DocumentSpan d = a->spans[i];
        size_t out = d.first * h * D, row = d.first * h, qkv = d.first * (h + 2 * k) * D;
        attention_backward(dqkv + qkv, g->delta + row, dattended + out, attended + out, s->lse + row, s->qkv + qkv,
                           d.B, d.T, h, k, D, model->stream);
    }
    context_gather_heads(ranks, g->qkv, dqkv, p.N, p.H, p.K, D, model->stream);
}

// Through the norms of queries and keys, in place in gradients.qkv; leaf by leaf, of rows and heads.
static inline void block_qk_norm_backward(Model* model, size_t l) {
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations->blocks[l];
    BlockPart p = model_block_part(model);
    size_t heads = p.H + p.K, D = p.D, leaves = layer_leaves(&model->layers, b->q_norm_weight);
    size_t groups = leaves / layer_leaves(&model->layers, b->qkv.weight);
    for (size_t leaf = 0; leaf < leaves; leaf++) {
        Slice rows = leaf_rows(&model->layers, b->qkv.weight, leaf / groups, p.N);
        size_t first = rows.first * heads;
        tensor_qk_norm_backward(&model->tensor, leaf % groups, groups,
                                model->gradients.qkv + rows.first * (heads + p.K) * D,
                                model_norm_grad(model, b->q_norm_weight, 0, leaf),
                                model_norm_grad(model, b->k_norm_weight, 1, leaf), s->qk + first * D,
                                s->qk_rstd + first, model_param(model, b->q_norm_weight),
                                model_param(model, b->k_norm_weight), slice_length(rows), p.H, p.K, D, model->stream);
        leaf_end(&model->layers, leaf, b->q_norm_weight);
        leaf_end(&model->layers, leaf, b->k_norm_weight);
    }
}

// block_forward, backwards: from the gradient of the residual stream after block l to that before it. Needs the
// forward's activations of the same batch.
static inline void block_backward(Model* model, size_t l) {
    const Config* c = &model->config;
    const Activations* a = model->activations;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &a->blocks[l];
    const ActivationGradients* g = &model->gradients;
    size_t N = a->rows;
    BlockPart p = model_block_part(model);

    flat_await(&model->flat, l + 1);          // its parameters, if they are sharded
    offload_block_backward(&model->offloaded, l);
    block_recompute(model, l);
    if (!model->deferred) flat_begin_bucket(&model->flat, l + 1);  // its gradients get their memory
    // 5. through the feed-forward to norm2's output, then through norm2: residual += d(attention_residual)
    block_ffn_backward(model, l, branch_gradient(model, site_ffn(l), N));
    norm_backward(model, g->residual, g->hidden, s->attention_residual, s->mean2, s->rstd2, b->norm2, N);
    watch_at(&model->watch, WATCH_FFN_BACKWARD, l);
    // 4. through attention's output matmul
    linear_backward(&model->layers, g->attention, branch_gradient(model, site_attention(l), N), s->attention,
                    b->attention_out, N);
    // 3. through attention, which computes the scores again
    block_attention_backward(model, l);
    watch_at(&model->watch, WATCH_ATTENTION_BACKWARD, l);
    // 2. back by the rotations, through the norms of queries and keys, and through the matmul to norm1's output
    if (c->family == FAMILY_LLAMA) rope_backward(g->qkv, model->rope, a->positions, p.N, p.H, p.K, p.D, model->stream);
    if (c->qk_norm) block_qk_norm_backward(model, l);
    linear_backward(&model->layers, g->hidden, g->qkv, s->norm1, b->qkv, N);
    // 1. through norm1: residual += d(input)
    norm_backward(model, g->residual, g->hidden, s->input, s->mean1, s->rstd1, b->norm1, N);
    watch_at(&model->watch, WATCH_QKV_BACKWARD, l);
    if (!model->deferred) flat_end_bucket(&model->flat, l + 1);    // they are complete: their reduction starts
}

// The bucket of the head's weight: that of the token embedding if the head is tied.
static inline size_t model_head_bucket(const Model* model) {
    return model->config.tied ? 0 : model->config.layers + 1;
}

// The gradient of the residual stream after the last block, from gradients.hidden.
static inline void model_final_norm_backward(Model* model) {
    const Activations* a = model->activations;
    const ActivationGradients* g = &model->gradients;
    size_t N = a->rows, L = model->config.layers;
    if (model->config.tied) flat_begin_bucket(&model->flat, L + 1);
    fill_zero(g->residual, N * model->config.channels * sizeof(floatX), model->stream);
    norm_backward(model, g->residual, g->hidden, a->output, a->mean, a->rstd, model->weights.final_norm, N);
    watch_at(&model->watch, WATCH_HIDDEN_BACKWARD, 0);
    flat_end_bucket(&model->flat, L + 1);
}

// The gradients of the embeddings, from that of the residual stream.
static inline void model_embed_backward(Model* model) {
    const Weights* w = &model->weights;
    const Activations* a = model->activations;
    TensorId token = w->token_embedding, position = w->position_embedding;
    size_t N = a->rows, C = model->config.channels, all = N * model->tensor.tp, own = model->tensor.rank * N;
    if (model->first_trained > 0) return;
    if (!model->config.tied || model->pipeline.pp > 1) flat_begin_bucket(&model->flat, 0);
    const floatX* gradient = branch_gradient(model, SITE_EMBEDDING, N);
    for (size_t leaf = 0; model_grad(model, position) && leaf < layer_leaves(&model->layers, position); leaf++) {
        Slice rows = leaf_rows(&model->layers, position, leaf, N);
        embedding_backward(NULL, model_grad(model, position), gradient + rows.first * C, NULL,
                           a->positions + own + rows.first, slice_length(rows), C, model->stream);
        leaf_end(&model->layers, leaf, position);
    }
    if (model_grad(model, token)) gradient = tensor_gather(&model->tensor, gradient, all, C, model->stream);
    size_t V = model_tensor(model, token)->size / C;
    for (size_t leaf = 0; model_grad(model, token) && leaf < layer_leaves(&model->layers, token); leaf++) {
        Slice rows = leaf_rows(&model->layers, token, leaf, all);
        embedding_backward_part(model_grad(model, token), gradient + rows.first * C, a->tokens + rows.first,
                                model->tensor.rank * V, V, slice_length(rows), C, model->stream);
        leaf_end(&model->layers, leaf, token);
    }
    watch_at(&model->watch, WATCH_EMBEDDING_BACKWARD, 0);
    flat_end_bucket(&model->flat, 0);
}

// Needs the forward's activations of the slot's batch, and gradients.hidden from model_head. Buckets end in the order
// L + 1, L ... 1, 0. The caller must have called flat_begin_bucket for model_head_bucket.
static inline void model_backward(Model* model) {
    model_final_norm_backward(model);
    for (size_t l = model->config.layers; l-- > model_backward_ends(model);) block_backward(model, l);
    model_embed_backward(model);
}

// ------------------------------------------------------------------------------------------------
// 6. Step
//
// model_step computes the gradients of a step's micro-batches, model_finish_step its loss and norm over all ranks,
// model_update changes the parameters. With FP16 the objective, and so every gradient, is loss_scale times what it
// would be; fixed-point sums (REDUCE_EXACT), the norm and the update divide by it.

// Begins a step of `micro_batches` on each rank. Its objective is loss_scale times the mean loss of its targets, over
// all ranks and micro-batches; targets of -1 do not count. How many do is known at the end: until then gradients are
// of a mean over all tokens, and the norm and the update multiply them by flat.mean_factor.
static inline void model_begin_step(Model* model, double loss_scale, size_t micro_batches) {
    if (model->clock.began_ms == 0) clock_start(&model->clock, &model->flat);
    flat_begin_step(&model->flat, loss_scale, micro_batches);
}

// The losses of the slot's rows, without gradients; returns the weights of the rows (NULL: all are 1). An objective's
// values take the place of the losses.
static inline const float* model_head_losses(Model* model) {
    const Objective* o = &model->objective;
    model_head(model, NULL, 0.0f);
    if (o->weigh == NULL) return NULL;
    o->weigh(o->context);
    device_copy(model->activations->losses, o->values, model->activations->rows * sizeof(float), model->stream);
    return o->weights;
}

// Adds the losses of a batch, tokens and targets (B, T) on the host, to flat.sums->losses, without gradients.
static inline void model_losses(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    model_upload(model, tokens, targets, B, T, false);
    model_forward(model);
    model_head_losses(model);
    exact_sum(&model->flat.sums->losses, model->activations->losses, model->activations->rows, model->stream);
}

// The head of a micro-batch of a step, forward and backward, with an objective's weights or those given.
static inline void model_head_step(Model* model, const float* weights) {
    FlatVector* flat = &model->flat;
    const Activations* a = model->activations;  // its B and T are those of all ranks that share the micro-batch
    double dloss = flat->loss_scale / (double)(flat->micro_batches * flat->dp_world) / (double)(a->B * a->T);
    bool weighs = model->objective.weigh != NULL;
    if (weighs) weights = model_head_losses(model);  // the head twice
    flat_begin_bucket(flat, model_head_bucket(model));
    model_head(model, weights, (float)dloss);
    if (weighs) device_copy(a->losses, model->objective.values, a->rows * sizeof(float), model->stream);
    if (model->config.tied && model->pipeline.pp > 1) flat_end_bucket(flat, 0);
    else if (model->config.tied) flat_end_head(flat);
}

// Forward, head and backward of one micro-batch, tokens and targets (B, T) on the host.
static inline void model_gradients(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    FlatVector* flat = &model->flat;
    flat_begin_micro_batch(flat, slice_length(model_own_rows(model, B * T)), model_targets(model, targets, B * T));
    if (!flat->discards) flat_barrier(flat);  // discards: for a trace, which each rank does alone
    model_upload(model, tokens, targets, B, T, false);
    fault_point("forward");
    model->offloaded.backward = true;         // will follow: what is offloaded is kept for it
    model_forward(model);
    fault_point("backward");
    model_head_step(model, NULL);
    model_backward(model);
    exact_sum(&flat->sums->losses, model->activations->losses, model->activations->rows, model->stream);
}

// Reads the next micro-batch, tokens and targets (B, T); false on an error.
typedef bool (*NextBatch)(void* source, const int32_t** tokens, const int32_t** targets, Error* error);

// The gradients of a step: of n micro-batches on each rank, each from next(source). A pipeline has another loop
// (run/stages.h).
static inline bool model_step(Model* model, NextBatch next, void* source, double loss_scale, size_t n, Error* error) {
    const int32_t *tokens, *targets;
    model_begin_step(model, loss_scale, n);
    for (size_t i = 0; i < n; i++) {
        if (!next(source, &tokens, &targets, error)) return false;
        model_gradients(model, tokens, targets, model->options.B, model->options.T);
    }
    return true;
}

// After the last micro-batch of a step: waits for its gradients, exchanges statistics and flags with the other ranks,
// and fills in the result. False if a rank is lost.
static inline bool model_finish_step(Model* model, StepResult* result, StepFlags flags, Error* error) {
    flat_finish_step(&model->flat);
    return flat_check(&model->flat, error) && offload_check(&model->offloaded.store, error) &&
           ranks_finish_step(result, &model->stats, &model->clock, &model->flat, flags, error);
}

// One optimizer step, number `update` from 1; gradients are multiplied by `factor` first.
static inline void model_update(Model* model, uint64_t update, double lr, double factor) {
    OptimizerStep step = optimizer_step(&model->options.optimizer, update, lr, factor * flat_scale(&model->flat));
    flat_update(&model->flat, &step);
}

#endif  // LLMTRAIN_H
