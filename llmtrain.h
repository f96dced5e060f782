// llmtrain.h: the model and, by its includes, what it needs: build, train, save and load a model.
//
//    1. configuration   family and sizes: Config; presets are in llmtrain/run/presets.h
//    2. parameters      the table of the model's tensors
//    3. model           the struct that owns everything; memory; initial weights
//    4. forward         tokens to hidden states: block_forward, model_forward
//    5. head            hidden states to logits, losses, and the head's own gradients
//    6. backward        the forward, read from the end: block_backward, model_backward
//    7. update          loss and norm of a step, and the optimizer: model_finish_step, model_update
//    8. checkpoints     what a checkpoint records about a run; saving and loading a model
//
// The training loop is in train.cu; the validation loss in llmtrain/run/validate.h; text from a model in
// llmtrain/text/generate.h; the smallest complete program is examples/first.c.
//
// Letters: B batch, T sequence, N = B*T rows, C channels, L layers, H heads, K key/value heads, D head size,
// F feed-forward, V vocabulary, Vp padded vocabulary.

#ifndef LLMTRAIN_H
#define LLMTRAIN_H

#include "llmtrain/text/data.h"       // token shards, Dataset, Loader
#include "llmtrain/model/documents.h"  // DocumentSpan, documents_find
#include "llmtrain/model/kv_cache.h"   // KvCache
#include "llmtrain/run/log.h"        // StepLog, metrics and events; with it state.h: Schedule, RunState, guard_step
#include "llmtrain/model/offload_activations.h"  // OffloadBlocks; with it recompute.h: BlockActivations, RecomputeLevel
#include "llmtrain/checkpoint/saver.h"  // Saver, Cadence; with it checkpoint.h, zero.h (FlatVector), tensors.h, the operations
#include "llmtrain/model/watch.h"      // watch_at

// ------------------------------------------------------------------------------------------------
// 1. Configuration
//
// Two families, one code path. GPT-2 ("Language Models are Unsupervised Multitask Learners"): LayerNorm, GELU, learned
// positions, biases, the head tied to the token embedding. Llama ("LLaMA: Open and Efficient Foundation Language
// Models"): RMSNorm, SwiGLU, RoPE, no biases, grouped-query attention, the head tied or not. Its relatives add fields:
// Qwen2 qkv_bias, Qwen3 qk_norm and head_size, Llama 3.1 rope_scaling.

typedef enum { FAMILY_GPT2, FAMILY_LLAMA } Family;
#define FAMILY_NAMES "gpt2|llama"

typedef struct {
    Family family;
    size_t layers, heads, kv_heads, channels, ffn;  // L, H, K, C, F
    size_t context;                                 // the longest sequence
    size_t vocab;                                   // V, before padding
    bool tied;                                      // the head is the token embedding
    double norm_epsilon, rope_theta;
    size_t head_size;                               // D; 0: C / H
    bool qkv_bias;                                  // Llama: biases of queries, keys and values
    bool qk_norm;                                   // Llama: RMSNorm of each query and key head
    RopeScaling rope_scaling;
    double rope_factor, rope_low_freq, rope_high_freq;
    size_t rope_original;                           // the context before scaling
} Config;

#define CONFIG_COUNT(name, flag, low, high, missing, help) \
    {#name, flag, KIND_COUNT, offsetof(Config, name), "N", low, high, help, missing}
#define CONFIG_REAL(name, flag, low, high, missing, help) \
    {#name, flag, KIND_REAL, offsetof(Config, name), "X", low, high, help, missing}
#define CONFIG_SWITCH(name, flag, missing, help) \
    {#name, flag, KIND_SWITCH, offsetof(Config, name), "on|off", 0, 0, help, missing}
static const Field CONFIG_FIELDS[] = {
    {"family", "family", KIND_CHOICE, offsetof(Config, family), FAMILY_NAMES, 0, 0, "architecture", NULL},
    CONFIG_COUNT(layers, "layers", 1, 1000, NULL, "transformer blocks (required without --model)"),
    CONFIG_COUNT(heads, "heads", 1, 1024, NULL, "query heads (required without --model)"),
    CONFIG_COUNT(kv_heads, "kv-heads", 0, 1024, NULL, "key/value heads; 0: as many as --heads"),
    CONFIG_COUNT(channels, "channels", 1, 65536, NULL, "width of the residual stream (required without --model)"),
    CONFIG_COUNT(ffn, "ffn", 0, 1 << 20, NULL,
                 "width of the feed-forward layer; 0: 4 (gpt2) or 8/3 (llama) times --channels"),
    CONFIG_COUNT(context, "context", 0, 1 << 24, NULL,
                 "longest sequence that the model accepts; 0: the preset's, otherwise --seq"),
    CONFIG_COUNT(vocab, "vocab", 0, 1 << 24, NULL, "vocabulary size, in tokens; 0: the data's"),
    CONFIG_SWITCH(tied, "tied", NULL, "share weights between the token embedding and the head"),
    CONFIG_REAL(norm_epsilon, "norm-epsilon", 0, 1, NULL, NULL),
    CONFIG_REAL(rope_theta, "rope-theta", 1, 1e9, NULL, "base of the rotary position angles (llama)"),
    CONFIG_COUNT(head_size, "head-size", 0, 256, "0", "size of an attention head; 0: --channels / --heads"),
    CONFIG_SWITCH(qkv_bias, "qkv-bias", "off", "llama: biases of queries, keys and values, as in Qwen2"),
    CONFIG_SWITCH(qk_norm, "qk-norm", "off", "llama: RMSNorm of each query and key head, as in Qwen3"),
    {"rope_scaling", "rope-scaling", KIND_CHOICE, offsetof(Config, rope_scaling), ROPE_SCALING_NAMES, 0, 0,
     "RoPE scaling for a longer context: linear, or llama3 as in Llama 3.1", "none"},
    CONFIG_REAL(rope_factor, "rope-factor", 0, 1e6, "0", "with --rope-scaling: how many times longer the context is"),
    CONFIG_REAL(rope_low_freq, "rope-low-freq", 0, 1e6, "0", NULL),
    CONFIG_REAL(rope_high_freq, "rope-high-freq", 0, 1e6, "0", NULL),
    CONFIG_COUNT(rope_original, "rope-original", 0, 1 << 24, "0",
                 "with --rope-scaling llama3: the context before scaling; 0: 8192"),
};
enum { CONFIG_FIELD_COUNT = sizeof CONFIG_FIELDS / sizeof CONFIG_FIELDS[0] };

static inline size_t config_head_size(const Config* c) {
    return c->head_size ? c->head_size : c->channels / c->heads;
}
static inline size_t config_padded_vocab(const Config* c) { return round_up(c->vocab, 128); }
static inline size_t config_qkv(const Config* c) { return (c->heads + 2 * c->kv_heads) * config_head_size(c); }
static inline size_t config_qk(const Config* c) { return (c->heads + c->kv_heads) * config_head_size(c); }
static inline RopeOptions config_rope(const Config* c) {
    RopeOptions rope = {c->rope_theta, c->rope_scaling, c->rope_factor, c->rope_low_freq, c->rope_high_freq,
                        c->rope_original};
    return rope;
}
// Outputs of the first feed-forward matmul: Llama's computes gate and up in one.
static inline size_t config_ffn_in(const Config* c) { return c->family == FAMILY_LLAMA ? 2 * c->ffn : c->ffn; }

// Replaces 0 by the default (kv_heads, ffn, norm_epsilon, rope_theta, the factors of rope_scaling llama3), then checks
// that all sizes fit together.
static inline bool config_complete(Config* c, Error* error) {
    const char* missing = !c->layers ? "--layers" : !c->heads ? "--heads" : !c->channels ? "--channels"
                        : !c->context ? "--seq (or --context)" : !c->vocab ? "--vocab" : NULL;
    if (missing)
        return fail_with(error, "the model's configuration lacks %s; give at least 1, or a preset with --model",
                         missing);
    enum { LAYERS_MAX = 1000, CHANNELS_MAX = 1 << 16, CONTEXT_MAX = 1 << 24, VOCAB_MAX = 1 << 24, FFN_MAX = 1 << 20 };
    if (c->layers > LAYERS_MAX || c->channels > CHANNELS_MAX || c->context > CONTEXT_MAX || c->vocab > VOCAB_MAX ||
        c->ffn > FFN_MAX)
        return fail_with(error,
                         "the model's sizes (%zu layers, %zu channels, context %zu, vocabulary %zu, ffn %zu) exceed "
                         "the limits of %d, %d, %d, %d, %d",
                         c->layers, c->channels, c->context, c->vocab, c->ffn, LAYERS_MAX, CHANNELS_MAX, CONTEXT_MAX,
                         VOCAB_MAX, FFN_MAX);
    if (c->kv_heads == 0) c->kv_heads = c->heads;
    if (c->ffn == 0 && c->family == FAMILY_GPT2) c->ffn = 4 * c->channels;
    if (c->ffn == 0) c->ffn = round_up(8 * c->channels / 3, 32);
    if (c->norm_epsilon == 0) c->norm_epsilon = 1e-5;
    if (c->rope_theta == 0) c->rope_theta = 10000;
    if (c->rope_scaling == ROPE_SCALING_LLAMA3) {
        if (c->rope_low_freq == 0) c->rope_low_freq = 1;
        if (c->rope_high_freq == 0) c->rope_high_freq = 4;
        if (c->rope_original == 0) c->rope_original = 8192;
    }
    if (c->rope_scaling != ROPE_SCALING_NONE && c->rope_factor < 1)
        return fail_with(error, "--rope-scaling needs --rope-factor, at least 1: how many times longer the context is");
    if (c->rope_scaling == ROPE_SCALING_LLAMA3 && c->rope_low_freq >= c->rope_high_freq)
        return fail_with(error, "the low frequency factor of RoPE, %g, must be below the high one, %g",
                         c->rope_low_freq, c->rope_high_freq);
    if (c->family == FAMILY_GPT2 && (c->qkv_bias || c->qk_norm || c->rope_scaling != ROPE_SCALING_NONE))
        return fail_with(error, "--qkv-bias, --qk-norm and --rope-scaling are for --family llama");
    if (c->head_size == 0 && c->channels % c->heads != 0)
        return fail_with(error,
                         "%zu heads do not divide %zu channels; choose --heads so that --channels is a multiple of it",
                         c->heads, c->channels);
    if (c->heads % c->kv_heads != 0)
        return fail_with(
            error, "%zu key/value heads do not divide %zu heads; choose --kv-heads so that --heads is a multiple of it",
            c->kv_heads, c->heads);
    if (c->family == FAMILY_LLAMA && config_head_size(c) % 2 != 0)
        return fail_with(error, "the head size %zu is odd, but RoPE rotates pairs; make --channels / --heads even",
                         config_head_size(c));
    if (config_head_size(c) > ATTENTION_MAX_D)
        return fail_with(error, "the head size %zu is over %d; choose more --heads for %zu channels",
                         config_head_size(c), ATTENTION_MAX_D, c->channels);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Parameters
//
// Which tensors the model has (tensors.h has the table), and where each begins in the flat vector.

// Where the tensors of one block start in the flat vector; NO_TENSOR where the family has none.
typedef struct {
    size_t norm1_weight, norm1_bias;                    // (C)
    size_t q_norm_weight, k_norm_weight;                // (D)
    size_t qkv_weight, qkv_bias;                        // ((H + 2K) D, C)
    size_t attention_out_weight, attention_out_bias;    // (C, H D)
    size_t norm2_weight, norm2_bias;                    // (C)
    size_t ffn_in_weight, ffn_in_bias;                  // (F, C), Llama (2F, C): gate, then up
    size_t ffn_out_weight, ffn_out_bias;                // (C, F)
} Block;

typedef struct {
    Block* blocks;                                      // (L)
    size_t token_embedding, position_embedding;         // (Vp, C), (context, C)
    size_t final_norm_weight, final_norm_bias;          // (C)
    size_t head_weight;                                 // (Vp, C); the token embedding's when tied
} Weights;

// Fills the table. Initial weights are normal with std sqrt(2 / 5C), "Transformers without Tears: Improving the
// Normalization of Self-Attention": about GPT-2's 0.02 for its 768 channels, and more for narrow models, which then
// learn faster. It is divided by sqrt(2L) in the two matmuls that add to the residual stream, so that the stream does
// not grow with depth. train: names of the tensors that train (parameters_freeze); NULL: all. With names it runs twice:
// parameters_freeze gives the tensors new offsets, which the second pass (p->arranged) reads.
static inline bool weights_create(Weights* w, Parameters* p, const Config* c, const char* train, Error* error) {
    size_t C = c->channels, L = c->layers, F = c->ffn, V = c->vocab, Vp = config_padded_vocab(c);
    size_t HD = c->heads * config_head_size(c);
    float usual = sqrtf(0.4f / (float)C), residual = usual / sqrtf(2.0f * (float)L);
    bool biases = c->family == FAMILY_GPT2;
    if (!p->arranged && !parameters_allocate(p, 14 * L + 5, error))
        return false;  // 14 per block; 2 embeddings, 2 of the final norm, 1 head
    p->tied = c->tied;
    if (!p->arranged) w->blocks = (Block*)memory_allocate(L * sizeof(Block));
    if (w->blocks == NULL) return fail_with(error, "out of memory for the table of %zu blocks", L);
    w->token_embedding = parameters_add(p, "token_embedding", V, Vp, C, 0, INIT_NORMAL, usual);
    w->position_embedding = NO_TENSOR;
    if (c->family == FAMILY_GPT2)
        w->position_embedding =
            parameters_add(p, "position_embedding", c->context, c->context, C, 0, INIT_NORMAL, usual);
    for (size_t l = 0; l < L; l++) {
        Block* b = &w->blocks[l];
        b->norm1_weight = parameters_add_block(p, l, "norm1_weight", C, 0, INIT_ONE, 0);
        b->norm1_bias = parameters_add_vector(p, biases, l, "norm1_bias", C, INIT_ZERO);
        b->qkv_weight = parameters_add_block(p, l, "qkv_weight", config_qkv(c), C, INIT_NORMAL, usual);
        p->tensors[p->count - 1].shape.qk_rows = config_qk(c);
        p->tensors[p->count - 1].shape.D = config_head_size(c);
        parameters_stack(p, HD, c->kv_heads * config_head_size(c), c->kv_heads * config_head_size(c));
        b->qkv_bias = parameters_add_bias(p, biases || c->qkv_bias, l, "qkv_bias", config_qkv(c));
        b->q_norm_weight = parameters_add_vector(p, c->qk_norm, l, "q_norm_weight", config_head_size(c), INIT_ONE);
        b->k_norm_weight = parameters_add_vector(p, c->qk_norm, l, "k_norm_weight", config_head_size(c), INIT_ONE);
        b->attention_out_weight = parameters_add_block(p, l, "attention_out_weight", C, HD, INIT_NORMAL, residual);
        b->attention_out_bias = parameters_add_bias(p, biases, l, "attention_out_bias", C);
        b->norm2_weight = parameters_add_block(p, l, "norm2_weight", C, 0, INIT_ONE, 0);
        b->norm2_bias = parameters_add_vector(p, biases, l, "norm2_bias", C, INIT_ZERO);
        b->ffn_in_weight = parameters_add_block(p, l, "ffn_in_weight", config_ffn_in(c), C, INIT_NORMAL, usual);
        if (c->family == FAMILY_LLAMA) parameters_stack(p, F, F, 0);
        b->ffn_in_bias = parameters_add_bias(p, biases, l, "ffn_in_bias", config_ffn_in(c));
        b->ffn_out_weight = parameters_add_block(p, l, "ffn_out_weight", C, F, INIT_NORMAL, residual);
        b->ffn_out_bias = parameters_add_bias(p, biases, l, "ffn_out_bias", C);
    }
    w->final_norm_weight = parameters_add(p, "final_norm_weight", C, C, 0, L + 1, INIT_ONE, 0);
    w->final_norm_bias = NO_TENSOR;
    if (c->family == FAMILY_GPT2)
        w->final_norm_bias = parameters_add(p, "final_norm_bias", C, C, 0, L + 1, INIT_ZERO, 0);
    w->head_weight = w->token_embedding;
    if (!c->tied) w->head_weight = parameters_add(p, "head_weight", V, Vp, C, L + 1, INIT_NORMAL, usual);
    p->tensors[c->tied ? 0 : p->count - 1].overwritten = true;  // the head's matmul comes first
    return train == NULL || p->arranged ||
           (parameters_freeze(p, train, error) && weights_create(w, p, c, train, error));
}

// ------------------------------------------------------------------------------------------------
// 3. Model

// The programs' help for ModelOptions.matmul_algorithms.
#define MATMUL_ALGORITHMS_HELP \
    "GPU builds: use the cuBLASLt algorithms that build/tune timed and stored in FILE; CPU builds ignore it"

typedef struct {
    size_t B, T;              // the largest batch that forward will see
    bool training;            // with gradients, optimizer state and the backward's buffers
    OptimizerKind optimizer;
    size_t optimizer_rank;    // rank of low-rank optimizers
    bool master_weights;      // keep a float copy of 16-bit parameters, which the optimizer updates
    size_t cached_sequences;  // in the KV cache, for generation; 0: no cache
    size_t kv_context;        // positions of each; 0, or too many: the model's context
    bool kv_q8;               // the KV cache holds 8 bits per element
    bool mask_documents;      // attention does not cross an end_of_text
    int32_t end_of_text;
    bool tf32;                // a GPU's float matmuls may round their operands to TF32
    const char* matmul_algorithms;  // a file by build/tune, for a GPU; NULL: cuBLASLt's first proposals
    RecomputeLevel recompute; // activations that the backward computes again
    const char* train;        // the names of the tensors that train (parameters_freeze); NULL: all
    RankOptions ranks;        // all 0: one rank
    int offload;              // OFFLOAD_OPTIMIZER, OFFLOAD_ACTIVATIONS: kept in offload_dir, not on the device
    const char* offload_dir;  // NULL, GPU builds only: in host memory
} ModelOptions;

typedef struct {
    BlockActivations* blocks; // (L) what the backward needs of each block, see activations.h
    floatX* branch;           // (N, C) what attention or feed-forward is about to add to the residual stream
    floatX* output;           // (N, C) the residual stream after the last block
    floatX* hidden;           // (N, C) after the final norm
    float *mean, *rstd;       // (N) of the final norm
    floatX* logits;           // (logits_rows, Vp) of a part of the rows; then their gradients
    float* losses;            // (N)
    float* rope;              // (context, D/2, 2) cosines and sines; Llama only
} Activations;

typedef struct {
    float p;                  // probability of dropping an element; 0 for evaluation
    uint64_t seed;
    uint64_t first_token;     // index of the batch's first token in the whole run
} Dropout;

typedef struct {
    Config config;
    ModelOptions options;
    Parameters parameters;    // the table
    Weights weights;          // the offsets of its tensors
    FlatVector flat;  // parameters, gradients, master weights and optimizer state, as far as this rank holds them
    size_t B, T;              // of the batch in progress
    size_t first_trained;     // first bucket with a tensor that trains: the backward ends at it
    float* discarded[2];      // (C or D) where norms add the gradients of weights and biases that do not train
    DocumentSpan* spans;      // (span_count) of the batch uploaded last, with room for options.B * options.T:
    size_t span_count;        // attention treats each as a batch of its own
    bool decoding;            // with the KV cache: its tokens follow those in it
    Activations activations;
    OffloadBlocks offloaded;  // the blocks' activations that are not in memory
    ActivationGradients gradients;
    KvCache cache;
    Dropout dropout;
    size_t logits_rows;       // rows of logits that exist at a time
    void* scratch;            // (model_scratch_bytes) for the operations
    int32_t* batches[2];      // each (3, B, T) on the device, used in turn: tokens, targets, positions
    const int32_t* batch;     // the one of the batch in progress
    int32_t* positions;       // (B, T) on the host: of the batch that is being uploaded
    Arena memory;
    Watch watch;              // a callback that looks at what was computed (trace.h)
    Stream stream;
} Model;

static inline BlockShape model_block_shape(const Model* model) {
    const Config* c = &model->config;
    BlockShape s = {model->options.B, model->options.T, c->channels, c->heads, c->kv_heads, config_head_size(c), c->ffn,
                    c->family == FAMILY_LLAMA, c->qk_norm};
    return s;
}

// The block at which the backward ends: nothing before it trains, or it is block 0. L: no block runs a backward.
static inline size_t model_backward_ends(const Model* model) {
    return model->first_trained > 0 ? model->first_trained - 1 : 0;
}

static inline size_t model_scratch_bytes(const Model* model) {
    return scratch_bytes(model->options.B * model->options.T, model->config.channels);
}

static inline void model_layout(Model* model) {
    const Config* c = &model->config;
    const ModelOptions* o = &model->options;
    Arena* plan = &model->memory;
    Activations* a = &model->activations;
    size_t N = o->B * o->T, C = c->channels, D = config_head_size(c);
    flat_layout(&model->flat, plan);
    BlockShape shape = model_block_shape(model);
    if (o->training) gradients_layout(&model->gradients, &shape, plan);
    offload_blocks_layout(&model->offloaded, a->blocks, c->layers, model_backward_ends(model), &shape, plan);
    for (int i = 0; i < 2; i++) model->batches[i] = (int32_t*)arena_take(plan, "batches", 3 * N * sizeof(int32_t));
    model->scratch = arena_take(plan, "scratch of the operations", model_scratch_bytes(model));
    for (int i = 0; i < 2 && o->train; i++)
        model->discarded[i] = (float*)arena_take(plan, "gradients that are not used", max_size(C, D) * sizeof(float));
    const char* name = "activations outside the blocks";
    a->branch = (floatX*)arena_take(plan, name, N * C * sizeof(floatX));
    a->output = (floatX*)arena_take(plan, name, N * C * sizeof(floatX));
    a->hidden = (floatX*)arena_take(plan, name, N * C * sizeof(floatX));
    a->mean = (float*)arena_take(plan, name, N * sizeof(float));
    a->rstd = (float*)arena_take(plan, name, N * sizeof(float));
    a->losses = (float*)arena_take(plan, name, N * sizeof(float));
    if (c->family == FAMILY_LLAMA) a->rope = (float*)arena_take(plan, name, c->context * D * sizeof(float));
    a->logits = (floatX*)arena_take(plan, "logits, a part at a time",
                                    model->logits_rows * config_padded_vocab(c) * sizeof(floatX));
    size_t cached = o->kv_context ? min_size(o->kv_context, c->context) : c->context;
    if (o->cached_sequences)
        kv_cache_layout(&model->cache, plan, c->layers, o->cached_sequences, cached, c->kv_heads, D, o->kv_q8);
}

// With several ranks close the Comm first, so that no collective is in flight.
static inline void model_free(Model* model) {
    flat_free(&model->flat);
    offload_blocks_close(&model->offloaded);
    device_close(model->stream);  // waits for what is still queued on the device
    if (model->memory.base) device_free(model->memory.base, arena_bytes(&model->memory));
    free(model->activations.blocks);
    free(model->spans);
    free(model->positions);
    free(model->weights.blocks);
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
        return fail_with(error, "a batch of %zu sequences of %zu tokens is impossible; give at least 1 of each",
                         options.B, options.T);
    if (options.T > config->context)
        return fail_with(
            error,
            "sequences of %zu tokens do not fit the model's context of %zu; make --seq smaller or --context "
            "larger",
            options.T, config->context);
    if (options.T > device_longest())
        return fail_with(
            error, "sequences of %zu tokens are longer than the %zu that a GPU's grid has room for; make --seq smaller",
            options.T, device_longest());
    // Logits of all rows at once would be the largest array, so the rows are cut into equal parts of at most
    // head_elements() logits.
    size_t N = options.B * options.T, Vp = config_padded_vocab(config);
    size_t parts = divide_up(N, max_size(head_elements(N * Vp) / Vp, 64));
    model->logits_rows = divide_up(N, parts);
    model->activations.blocks = (BlockActivations*)memory_allocate(config->layers * sizeof(BlockActivations));
    // Only a backward needs separate activations for each block.
    unsigned recomputed = options.training ? recompute_operations(options.recompute) : BLOCK_SHARES_ALL;
    if (model->activations.blocks) blocks_recompute(model->activations.blocks, config->layers, recomputed);
    FlatOptions holds = {options.training, options.optimizer, options.optimizer_rank, options.master_weights,
                         (options.offload & OFFLOAD_OPTIMIZER) != 0, options.offload_dir};
    bool ok = weights_create(&model->weights, &model->parameters, config, options.train, error) &&
              flat_create(&model->flat, &model->parameters, &model->options.ranks, &holds, error) &&
              offload_blocks_plan(&model->offloaded, config->layers, options.training ? options.offload : 0, error);
    model->spans = (DocumentSpan*)memory_allocate((options.mask_documents ? N : 1) * sizeof(DocumentSpan));
    model->positions = (int32_t*)memory_allocate(N * sizeof(int32_t));
    if (ok && (model->activations.blocks == NULL || model->spans == NULL || model->positions == NULL))
        ok = fail_with(error, "out of memory for the table of activations");
    while (ok && model->flat.buckets[model->first_trained].first == model->flat.buckets[model->first_trained].end)
        model->first_trained++;
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
    if (!device_choose(o->ranks.local_rank, error) || !device_open(&model->stream, o->tf32, error) ||
        !matmul_choices_open(o->matmul_algorithms, o->ranks.rank == 0, model->stream, error) ||
        !arena_allocate(&model->memory, o->ranks.world, model->stream, error)) return false;
    model_layout(model);
    if (!device_prepare(model->stream, model->scratch, model_scratch_bytes(model), batch_bytes, error)) return false;
    if (!flat_prepare(&model->flat, model->stream, error)) return false;
    if (!offload_blocks_open(&model->offloaded, &model->flat, error)) return false;
    if (c->family == FAMILY_LLAMA) {
        float* table = (float*)memory_allocate(c->context * D * sizeof(float));
        if (table == NULL)
            return fail_with(error, "out of memory for the table of rotary angles of %zu positions", c->context);
        RopeOptions rope = config_rope(c);
        rope_table(table, &rope, c->context, D);
        device_upload(model->activations.rope, table, c->context * D * sizeof(float), model->stream);
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

enum { INIT_PIECE = 1 << 16 };  // elements that are generated and uploaded at a time

// Sets parameters [offset, offset + n) of the flat vector, all of one tensor, and their master weights, from values on
// the host. False if memory for a piece of them cannot be allocated, or an offloaded piece cannot be read or written.
static inline bool model_set_params(Model* model, size_t offset, const float* values, size_t n, Error* error) {
    floatX* rounded = (floatX*)memory_allocate(INIT_PIECE * sizeof(floatX));
    if (rounded == NULL) return fail_with(error, "out of memory for a piece of the weights");
    bool ok = true;
    for (size_t done = 0; ok && done < n; done += INIT_PIECE) {
        size_t count = min_size(INIT_PIECE, n - done), at = offset + done;
        #pragma omp parallel for simd
        for (size_t i = 0; i < count; i++) rounded[i] = floatX_of(values[done + i]);
        device_upload(model->flat.params + at, rounded, count * sizeof(floatX), model->stream);
        ok = flat_set_masters(&model->flat, at, values + done, count, error);
    }
    free(rounded);
    return ok;
}

// Initial weights: a function of the seed and of the element's index in the flat vector (as if all tensors trained)
// alone. False if memory for a piece of them cannot be allocated.
static inline bool model_randomize(Model* model, uint64_t seed, Error* error) {
    float* values = (float*)memory_allocate(INIT_PIECE * sizeof(float));
    if (values == NULL) return fail_with(error, "out of memory for a piece of the weights");
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
                    values[e] = t->init_std * random_normal(seed, RANDOM_INIT, 0, t->place + first + e);
            }
            ok = model_set_params(model, t->offset + first, values, count, error);
        }
    }
    free(values);
    return ok;
}

static inline const floatX* model_param(const Model* model, size_t offset) {
    return offset == NO_TENSOR ? NULL : model->flat.params + offset;
}

// NULL for a tensor that does not train.
static inline float* model_grad(const Model* model, size_t offset) {
    return offset == NO_TENSOR ? NULL : flat_gradient(&model->flat, offset);
}

// The same for the weight (0) or bias (1) of a norm, which needs memory for both even if one does not train.
static inline float* model_norm_grad(const Model* model, size_t offset, size_t number) {
    float* gradient = model_grad(model, offset);
    return gradient ? gradient : model->discarded[number];
}

// ------------------------------------------------------------------------------------------------
// 4. Forward
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
        layernorm_forward(out, residual, mean, rstd, in, branch, model_param(model, weight), model_param(model, bias),
                          epsilon, N, c->channels, model->stream);
    else
        rmsnorm_forward(out, residual, rstd, in, branch, model_param(model, weight), epsilon, N, c->channels,
                        model->stream);
}

// out = dropout_apply(in), both (N, C), which may be the same; `site` tells the uses apart: 0 the embedding, 2l + 1 and
// 2l + 2 the branches of block l. The backward calls it on gradients, with the same site.
static inline void model_dropout(const Model* model, floatX* out, const floatX* in, size_t site, size_t N) {
    size_t C = model->config.channels;
    dropout_apply(out, in, model->dropout.p, model->dropout.seed, site, model->dropout.first_token * C, N * C,
                  model->stream);
}

// Uploads a batch of tokens (B, T), and its targets unless they are NULL; returns the tokens on the device, followed by
// the targets and the positions. They stay valid until the batch after the next is uploaded. decoding: the positions
// follow those in the KV cache.
static inline const int32_t* model_upload(Model* model, const int32_t* tokens, const int32_t* targets, size_t B,
                                          size_t T, bool decoding) {
    DocumentSpan whole = {0, B, T};
    size_t first = decoding ? model->cache.length : 0;
    for (size_t row = 0; row < B * T; row++) model->positions[row] = (int32_t)(first + row % T);
    model->spans[0] = whole;
    model->span_count = 1;
    if (model->options.mask_documents)
        model->span_count = documents_find(model->spans, tokens, model->options.end_of_text, B, T);
    return device_upload_batch(model->batches, tokens, targets, model->positions, B * T * sizeof(int32_t),
                               model->stream);
}

// Block l of the batch in progress: x = x + attention(norm1(x)); x = x + ffn(norm2(x)). The second addition is left to
// the norm that follows: every block leaves its feed-forward output in activations.branch, for the next norm to add.
// The block fills blocks[l] for the backward; block_recompute calls the parts whose results were not kept.

static inline void block_qkv(const Model* model, size_t l) {
    const Config* c = &model->config;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations.blocks[l];
    size_t N = model->B * model->T, H = c->heads, K = c->kv_heads, D = config_head_size(c);
    matmul_forward(s->qkv, s->norm1, model_param(model, b->qkv_weight), model_param(model, b->qkv_bias), N,
                   config_qkv(c), c->channels, model->stream);
    watch_at(&model->watch, WATCH_QKV, l);
    if (c->qk_norm)
        qk_norm_forward(s->qkv, s->qk, s->qk_rstd, model_param(model, b->q_norm_weight),
                        model_param(model, b->k_norm_weight), (float)c->norm_epsilon, N, H, K, D, model->stream);
    if (c->family == FAMILY_LLAMA)
        rope_forward(s->qkv, model->activations.rope, model->batch + 2 * N, N, H, K, D, model->stream);
}

static inline void block_attention(const Model* model, size_t l) {
    const Config* c = &model->config;
    const BlockActivations* s = &model->activations.blocks[l];
    size_t H = c->heads, K = c->kv_heads, D = config_head_size(c);
    if (model->decoding) {
        KvLayer cached = kv_cache_layer(&model->cache, l);
        attention_decode(s->attention, cached.keys, cached.values, cached.scales, s->qkv, model->cache.length, model->B,
                         model->T, model->cache.context, H, K, D, model->stream);
        return;
    }
    for (size_t i = 0; i < model->span_count; i++) {
        DocumentSpan d = model->spans[i];
        attention_forward(s->attention + d.first * H * D, s->lse + d.first * H, s->qkv + d.first * config_qkv(c), d.B,
                          d.T, H, K, D, model->stream);
    }
}

// branch = attention's output matmul; middle = input + branch; norm2 = norm(middle).
static inline void block_attention_out(const Model* model, size_t l) {
    const Config* c = &model->config;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations.blocks[l];
    floatX* branch = model->activations.branch;
    size_t N = model->B * model->T;
    matmul_forward(branch, s->attention, model_param(model, b->attention_out_weight),
                   model_param(model, b->attention_out_bias), N, c->channels, c->heads * config_head_size(c),
                   model->stream);
    if (model->dropout.p > 0) model_dropout(model, branch, branch, 2 * l + 1, N);
    watch_at(&model->watch, WATCH_ATTENTION, l);
    norm_forward(model, s->norm2, s->middle, s->mean2, s->rstd2, s->input, branch, b->norm2_weight, b->norm2_bias, N);
}

static inline void block_ffn_in(const Model* model, size_t l) {
    const Config* c = &model->config;
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations.blocks[l];
    size_t N = model->B * model->T, C = c->channels, F = c->ffn;
    if (c->family == FAMILY_GPT2) {
        matmul_gelu_forward(s->ffn_act, s->ffn_in, s->norm2, model_param(model, b->ffn_in_weight),
                            model_param(model, b->ffn_in_bias), N, F, C, model->stream);
    } else {
        matmul_forward(s->ffn_in, s->norm2, model_param(model, b->ffn_in_weight), NULL, N, 2 * F, C, model->stream);
        swiglu_forward(s->ffn_act, s->ffn_in, N, F, model->stream);
    }
}

static inline void block_forward(Model* model, size_t l) {
    const Config* c = &model->config;
    const Block* b = &model->weights.blocks[l];
    Activations* a = &model->activations;
    BlockActivations* s = &a->blocks[l];
    size_t N = model->B * model->T;
    flat_await(&model->flat, l + 1);
    offload_block_forward(&model->offloaded, l);
    norm_forward(model, s->norm1, s->input, s->mean1, s->rstd1, l ? a->blocks[l - 1].middle : s->input,
                 l ? a->branch : NULL, b->norm1_weight, b->norm1_bias, N);
    block_qkv(model, l);
    block_attention(model, l);
    block_attention_out(model, l);
    block_ffn_in(model, l);
    matmul_forward(a->branch, s->ffn_act, model_param(model, b->ffn_out_weight), model_param(model, b->ffn_out_bias), N,
                   c->channels, c->ffn, model->stream);
    if (model->dropout.p > 0) model_dropout(model, a->branch, a->branch, 2 * l + 2, N);
    watch_at(&model->watch, WATCH_FFN, l);
}

// Fills activations.hidden for tokens (B, T) that model_upload has returned; waits for each bucket of parameters before it uses it.
// decoding: the tokens follow those in the KV cache, and are appended to it.
static inline void model_forward(Model* model, const int32_t* tokens, size_t B, size_t T, bool decoding) {
    const Config* c = &model->config;
    const Weights* w = &model->weights;
    Activations* a = &model->activations;
    size_t N = B * T, last = c->layers - 1;
    model->B = B;
    model->T = T;
    model->decoding = decoding;
    model->batch = tokens;
    flat_await(&model->flat, 0);
    offload_block_forward(&model->offloaded, 0);
    embedding_forward(a->blocks[0].input, tokens, tokens + 2 * N, model_param(model, w->token_embedding),
                      model_param(model, w->position_embedding), N, c->channels, model->stream);
    if (model->dropout.p > 0) model_dropout(model, a->blocks[0].input, a->blocks[0].input, 0, N);
    for (size_t l = 0; l < c->layers; l++) block_forward(model, l);
    flat_await(&model->flat, c->layers + 1);
    norm_forward(model, a->hidden, a->output, a->mean, a->rstd, a->blocks[last].middle, a->branch, w->final_norm_weight,
                 w->final_norm_bias, N);
    watch_at(&model->watch, WATCH_HIDDEN, 0);
    if (decoding) model->cache.length += T;
}

// ------------------------------------------------------------------------------------------------
// 5. Head
//
//   logits = hidden head_weight^T;   loss = cross-entropy(logits, targets)
//
// Logits are the largest activation by far, so they exist for a part of the rows at a time: computed, turned into their
// gradient in place, and used for the gradients of the hidden states and of the head's weight.

static inline void model_logits(Model* model, size_t first_row, size_t rows) {
    const Config* c = &model->config;
    matmul_forward(model->activations.logits, model->activations.hidden + first_row * c->channels,
                   model_param(model, model->weights.head_weight), NULL, rows, config_padded_vocab(c), c->channels,
                   model->stream);
}

// The gradients of a matmul's weight and bias, as far as they train. more: these rows are further ones of the same
// micro-batch, so they add to the gradients of the rows before. bias may be NO_TENSOR.
static inline void weight_backward(const Model* model, const floatX* dout, const floatX* in, size_t weight, size_t bias,
                                   bool more, size_t rows, size_t outputs, size_t inputs) {
    float *dweight = model_grad(model, weight), *dbias = model_grad(model, bias);
    bool adds = more || flat_adds(&model->flat, weight);
    if (dweight || dbias) matmul_backward_weight(dweight, dbias, dout, in, adds, rows, outputs, inputs, model->stream);
}

// Fills activations.losses for targets (N) on the device; -1 is ignored. If dloss is not 0, also does the head's
// backward for the objective dloss * (sum of losses).
static inline void model_head(Model* model, const int32_t* targets, float dloss, size_t N) {
    const Config* c = &model->config;
    Activations* a = &model->activations;
    size_t C = c->channels, Vp = config_padded_vocab(c), weight = model->weights.head_weight;
    for (size_t first = 0; first < N; first += model->logits_rows) {
        size_t rows = min_size(model->logits_rows, N - first);
        model_logits(model, first, rows);
        watch_at(&model->watch, WATCH_LOGITS, first);
        classifier(a->logits, a->losses + first, targets + first, dloss, NULL, rows, c->vocab, Vp, model->stream);
        if (dloss == 0.0f) continue;
        matmul_backward_input(model->gradients.hidden + first * C, a->logits, model_param(model, weight), rows, Vp, C,
                              model->stream);
        weight_backward(model, a->logits, a->hidden + first * C, weight, NO_TENSOR, first > 0, rows, Vp, C);
    }
    watch_at(&model->watch, WATCH_LOSS, 0);
}

// ------------------------------------------------------------------------------------------------
// 6. Backward
//
// model_forward from its last line to its first. gradients.residual holds the gradient of the residual stream, to
// which every norm's backward adds its part. Gradients of parameters are added at flat_gradient() (matmuls overwrite
// unless flat_adds()); a bucket whose gradients are complete is reduced over the ranks while the rest of the backward
// runs.

static inline void norm_backward(const Model* model, floatX* dx, const floatX* dout, const floatX* x, const float* mean,
                                 const float* rstd, size_t weight, size_t bias, size_t N) {
    size_t C = model->config.channels;
    if (model->config.family == FAMILY_GPT2)
        layernorm_backward(dx, model_norm_grad(model, weight, 0), model_norm_grad(model, bias, 1), dout, x,
                           model_param(model, weight), mean, rstd, N, C, model->stream);
    else
        rmsnorm_backward(dx, model_norm_grad(model, weight, 0), dout, x, model_param(model, weight), rstd, N, C,
                         model->stream);
}

static inline void matmul_backward(const Model* model, floatX* din, const floatX* dout, const floatX* in, size_t weight,
                                   size_t bias, size_t rows, size_t outputs, size_t inputs) {
    matmul_backward_input(din, dout, model_param(model, weight), rows, outputs, inputs, model->stream);
    weight_backward(model, dout, in, weight, bias, false, rows, outputs, inputs);
}

// The gradient of the residual stream as the branch at a dropout site receives it.
static inline const floatX* branch_gradient(const Model* model, size_t site, size_t N) {
    if (model->dropout.p == 0) return model->gradients.residual;
    model_dropout(model, model->gradients.branch, model->gradients.residual, site, N);
    return model->gradients.branch;
}

// Recomputes what block_forward did not keep of block l. Its input and middle, if kept, already include the branch that
// was added to the residual stream: their norms run without one.
static inline void block_recompute(const Model* model, size_t l) {
    const Block* b = &model->weights.blocks[l];
    const BlockActivations* s = &model->activations.blocks[l];
    size_t N = model->B * model->T, F = model->config.ffn;
    if (block_recomputes(s, BLOCK_NORM1))
        norm_forward(model, s->norm1, NULL, s->mean1, s->rstd1, s->input, NULL, b->norm1_weight, b->norm1_bias, N);
    if (block_recomputes(s, BLOCK_QKV)) block_qkv(model, l);
    if (block_recomputes(s, BLOCK_ATTENTION)) block_attention(model, l);
    if (block_recomputes(s, BLOCK_ATTENTION_OUT)) block_attention_out(model, l);
    else if (block_recomputes(s, BLOCK_NORM2))
        norm_forward(model, s->norm2, NULL, s->mean2, s->rstd2, s->middle, NULL, b->norm2_weight, b->norm2_bias, N);
    if (block_recomputes(s, BLOCK_FFN_IN)) block_ffn_in(model, l);
    else if (block_recomputes(s, BLOCK_FFN_ACT) && model->config.family == FAMILY_LLAMA)
        swiglu_forward(s->ffn_act, s->ffn_in, N, F, model->stream);
    else if (block_recomputes(s, BLOCK_FFN_ACT))
        gelu_recompute(s->ffn_act, s->ffn_in, s->norm2, model_param(model, b->ffn_in_weight),
                       model_param(model, b->ffn_in_bias), N, F, model->config.channels, model->stream);
}

// block_forward, backwards: from the gradient of the residual stream after block l to that before it. Needs the
// forward's activations of the same batch.
static inline void block_backward(Model* model, size_t l) {
    const Config* c = &model->config;
    const Block* b = &model->weights.blocks[l];
    BlockActivations* s = &model->activations.blocks[l];
    ActivationGradients* g = &model->gradients;
    Stream stream = model->stream;
    size_t B = model->B, T = model->T, N = B * T;
    size_t C = c->channels, H = c->heads, K = c->kv_heads, D = config_head_size(c), F = c->ffn;

    offload_block_backward(&model->offloaded, l);
    block_recompute(model, l);
    flat_begin_bucket(&model->flat, l + 1);
    const floatX* dbranch = branch_gradient(model, 2 * l + 2, N);
    if (c->family == FAMILY_GPT2) {
        matmul_gelu_backward_input(g->ffn_in, dbranch, model_param(model, b->ffn_out_weight), s->ffn_in, N, C, F,
                                   stream);
    } else {
        matmul_backward_input(g->ffn_act, dbranch, model_param(model, b->ffn_out_weight), N, C, F, stream);
        swiglu_backward(g->ffn_in, g->ffn_act, s->ffn_in, N, F, stream);
    }
    weight_backward(model, dbranch, s->ffn_act, b->ffn_out_weight, b->ffn_out_bias, false, N, C, F);
    matmul_backward(model, g->hidden, g->ffn_in, s->norm2, b->ffn_in_weight, b->ffn_in_bias, N, config_ffn_in(c), C);
    norm_backward(model, g->residual, g->hidden, s->middle, s->mean2, s->rstd2, b->norm2_weight, b->norm2_bias, N);
    watch_at(&model->watch, WATCH_FFN_BACKWARD, l);

    dbranch = branch_gradient(model, 2 * l + 1, N);
    matmul_backward(model, g->attention, dbranch, s->attention, b->attention_out_weight, b->attention_out_bias, N, C,
                    H * D);
    for (size_t i = 0; i < model->span_count; i++) {
        DocumentSpan d = model->spans[i];
        size_t out = d.first * H * D, row = d.first * H, qkv = d.first * config_qkv(c);
        attention_backward(g->qkv + qkv, g->delta + row, g->attention + out, s->attention + out, s->lse + row,
                           s->qkv + qkv, d.B, d.T, H, K, D, stream);
    }
    watch_at(&model->watch, WATCH_ATTENTION_BACKWARD, l);
    if (c->family == FAMILY_LLAMA)
        rope_backward(g->qkv, model->activations.rope, model->batch + 2 * N, N, H, K, D, stream);
    if (c->qk_norm)
        qk_norm_backward(g->qkv, model_norm_grad(model, b->q_norm_weight, 0),
                         model_norm_grad(model, b->k_norm_weight, 1), s->qk, s->qk_rstd,
                         model_param(model, b->q_norm_weight), model_param(model, b->k_norm_weight), N, H, K, D,
                         stream);
    matmul_backward(model, g->hidden, g->qkv, s->norm1, b->qkv_weight, b->qkv_bias, N, config_qkv(c), C);
    norm_backward(model, g->residual, g->hidden, s->input, s->mean1, s->rstd1, b->norm1_weight, b->norm1_bias, N);
    watch_at(&model->watch, WATCH_QKV_BACKWARD, l);
    flat_end_bucket(&model->flat, l + 1);
}

// Needs the forward's activations of the same tokens, and gradients.hidden from model_head. Buckets end in the order
// L + 1, L ... 1, 0. The caller has begun the bucket of the head's weight: 0, the token embedding's, if the head is
// tied, otherwise L + 1.
static inline void model_backward(Model* model, const int32_t* tokens) {
    const Config* c = &model->config;
    const Weights* w = &model->weights;
    Activations* a = &model->activations;
    ActivationGradients* g = &model->gradients;
    FlatVector* flat = &model->flat;
    size_t N = model->B * model->T, C = c->channels;
    if (c->tied) flat_begin_bucket(flat, c->layers + 1);
    fill_zero(g->residual, N * C * sizeof(floatX), model->stream);
    norm_backward(model, g->residual, g->hidden, a->output, a->mean, a->rstd, w->final_norm_weight, w->final_norm_bias,
                  N);
    watch_at(&model->watch, WATCH_HIDDEN_BACKWARD, 0);
    flat_end_bucket(flat, c->layers + 1);
    for (size_t l = c->layers; l-- > model_backward_ends(model);) block_backward(model, l);
    if (model->first_trained > 0) return;
    if (!c->tied) flat_begin_bucket(flat, 0);
    embedding_backward(model_grad(model, w->token_embedding), model_grad(model, w->position_embedding),
                       branch_gradient(model, 0, N), tokens, tokens + 2 * N, N, C, model->stream);
    watch_at(&model->watch, WATCH_EMBEDDING_BACKWARD, 0);
    flat_end_bucket(flat, 0);
}

// Begins a step of `micro_batches` on each rank. Its objective is loss_scale times the mean, over ranks and
// micro-batches, of each one's mean loss; targets of -1 do not count.
static inline void model_begin_step(Model* model, double loss_scale, size_t micro_batches) {
    flat_begin_step(&model->flat, loss_scale, micro_batches);
}

// Adds the sum of the losses of a batch, tokens and targets (B, T) on the host, to flat.scalars[SUM_LOSS], without
// gradients.
static inline void model_losses(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    const int32_t* batch = model_upload(model, tokens, targets, B, T, false);
    model_forward(model, batch, B, T, false);
    model_head(model, batch + B * T, 0.0f, B * T);
    sum_scaled(model->flat.scalars + SUM_LOSS, model->activations.losses, 1.0, B * T, model->stream);
}

// Forward, head and backward of one micro-batch, tokens and targets (B, T) on the host.
static inline void model_gradients(Model* model, const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    FlatVector* flat = &model->flat;
    size_t N = B * T, count = max_size(targets_count(targets, N), 1);
    double dloss = flat->loss_scale / (double)(flat->micro_batches * flat->options.world) / (double)count;
    flat->micro++;
    if (!flat->discards) collective_barrier(&flat->collectives);
    const int32_t* batch = model_upload(model, tokens, targets, B, T, false);
    fault_point("forward");
    model->offloaded.backward = true;
    model_forward(model, batch, B, T, false);
    fault_point("backward");
    flat_begin_bucket(flat, model->config.tied ? 0 : model->config.layers + 1);
    model_head(model, batch + N, (float)dloss, N);
    model_backward(model, batch);
    sum_scaled(flat->scalars + SUM_LOSS, model->activations.losses, 1.0 / (double)count, N, model->stream);
}

// ------------------------------------------------------------------------------------------------
// 7. Update

typedef struct {
    OptimizerKind kind;
    double beta1, beta2, epsilon, weight_decay;
    uint64_t seed;           // for stochastic rounding
    size_t rank;             // for low-rank optimizers
} OptimizerOptions;

// After the last micro-batch of a step: waits for its gradients, gathers the ranks' statistics and flags, and fills in
// the result. False if a rank is lost.
static inline bool model_finish_step(Model* model, StepResult* result, StepFlags flags, Error* error) {
    enum { LOSS, SQUARES, BUSY, STOP, SAVE, SAVED, FAILED, COUNT };
    static_assert((int)COUNT <= (int)STATS_MAX, "make STATS_MAX larger");
    FlatVector* flat = &model->flat;
    size_t world = flat->options.world, saved = 0;
    flat_finish_step(flat);
    if (!flat_check(flat, error) || !offload_check(&model->offloaded.store, error)) return false;
    double waited = flat_waited_ms(flat), busy = now_ms() - flat->step_began_ms - waited, squares = 0;
    double own[COUNT] = {flat->scalars_host[SUM_LOSS] / (double)flat->micro_batches, 0, busy, (double)flags.stop,
                         (double)flags.save, (double)flags.saved, (double)flags.failed};
    for (size_t b = 0; b < flat->count; b++) own[SQUARES] += flat->scalars_host[SUM_SQUARES + b];
    if (flat->scalars_host[SUM_BAD] != 0) own[SQUARES] = NAN;
    if (!flat_gather_stats(flat, own, COUNT, error)) return false;
    waited += flat_waited_ms(flat);
    memset(result, 0, sizeof *result);
    for (size_t r = 0; r < world; r++) {
        result->loss += flat_stat(flat, r, LOSS, COUNT) / (double)world;
        squares += flat_stat(flat, r, SQUARES, COUNT);
        result->flags.stop |= flat_stat(flat, r, STOP, COUNT) != 0;
        result->flags.failed |= flat_stat(flat, r, FAILED, COUNT) != 0;
        saved += flat_stat(flat, r, SAVED, COUNT) != 0;
    }
    if (isnan(result->loss)) result->loss = NAN;  // drops the sign that some NaNs have
    result->flags.save = flat_stat(flat, 0, SAVE, COUNT) != 0;
    result->flags.saved = saved == world;
    result->grad_norm = isnan(squares) ? NAN : sqrt(squares) / flat->loss_scale;
    flat_min_median_max(&result->loss_min, &result->loss_median, &result->loss_max, flat, LOSS, COUNT);
    result->slowest =
        flat_min_median_max(&result->busy_min, &result->busy_median, &result->busy_max, flat, BUSY, COUNT);
    result->wait_share = waited / (busy + waited);
    flat->step_began_ms = now_ms();
    return true;
}

// One optimizer step, number `update` from 1; gradients are multiplied by `factor` first, and divided by the loss scale
// that model_begin_step was given.
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
    step.rank = o->rank;
    flat_update(&model->flat, &step);
}

// ------------------------------------------------------------------------------------------------
// 8. Checkpoints

// What a checkpoint records about a run besides its tensors.
typedef struct {
    Config config;
    OptimizerKind optimizer;
    uint64_t optimizer_rank; // of a low-rank optimizer; 0 of others
    bool master_weights;    // the saved weights are float master weights
    uint64_t seed;          // of initial weights, data order, dropout
    uint64_t T;             // length of a sample: the order of the data depends on it
    uint64_t data;          // fingerprint of the training data: the order depends on it too
    RunState state;
    SaveKind kind;
    const Flag* flags;      // (flag_count) those that change what the run computes are saved as text
    size_t flag_count;
} RunRecord;

enum { RECORD_FIELD_COUNT = 5 };  // in a function, since the optimizers' names are not a constant
static inline const Field* record_fields(void) {
    static Field fields[RECORD_FIELD_COUNT] = {
        {"optimizer", "optimizer", KIND_CHOICE, offsetof(RunRecord, optimizer), NULL, 0, 0, NULL, NULL},
        {"optimizer_rank", "optimizer-rank", KIND_COUNT, offsetof(RunRecord, optimizer_rank), "N", 0, 0, NULL, "0"},
        {"masters", "masters", KIND_SWITCH, offsetof(RunRecord, master_weights), "on|off", 0, 0, NULL, NULL},
        {"seed", "seed", KIND_COUNT, offsetof(RunRecord, seed), "N", 0, 0, NULL, NULL},
        {"sequence", "seq", KIND_COUNT, offsetof(RunRecord, T), "N", 0, 0, NULL, NULL},
    };
    fields[0].choices = optimizer_names();
    return fields;
}

static inline void record_write_object(JsonWriter* w, const char* key, const Field* fields, size_t count,
                                       const void* base) {
    json_write_key(w, key);
    json_write_begin(w, '{');
    fields_write(w, fields, count, base);
    json_write_end(w, '}');
}

// Begins a manifest and writes the record as its members.
static inline void record_write(JsonWriter* w, const RunRecord* r, const FlatVector* flat) {
    manifest_begin(w, flat);
    fields_write(w, record_fields(), RECORD_FIELD_COUNT, r);
    json_member_hash(w, "data", r->data);
    json_member_string(w, "kind", r->kind == SAVE_ASKED ? "asked" : "end");
    record_write_object(w, "config", CONFIG_FIELDS, CONFIG_FIELD_COUNT, &r->config);
    json_write_key(w, "flags");
    json_write_begin(w, '{');
    for (size_t i = 0; i < r->flag_count; i++) {
        char text[FILE_PATH_MAX];
        if (r->flags[i].name == NULL || (r->flags[i].marks & FLAG_FREE)) continue;
        flag_text(text, sizeof text, &r->flags[i]);
        json_member_string(w, r->flags[i].name, text);
    }
    json_write_end(w, '}');
    record_write_object(w, "state", STATE_FIELDS, STATE_FIELD_COUNT, &r->state);
}

// Reads and checks the manifest of the checkpoint at a path. The caller frees *manifest after success.
static inline bool record_open(Json* manifest, RunRecord* r, const char* path, Error* error) {
    char data[20] = "";
    unsigned long long fingerprint = 0;
    memset(r, 0, sizeof *r);
    if (!manifest_open(manifest, path, error)) return false;
    bool ok = fields_read(r, record_fields(), RECORD_FIELD_COUNT, manifest, 0) &&
              json_string(manifest, json_get(manifest, 0, "data"), data, sizeof data) &&
              sscanf(data, "%llx", &fingerprint) == 1 &&
              fields_read(&r->config, CONFIG_FIELDS, CONFIG_FIELD_COUNT, manifest, json_get(manifest, 0, "config")) &&
              fields_read(&r->state, STATE_FIELDS, STATE_FIELD_COUNT, manifest, json_get(manifest, 0, "state"));
    r->data = fingerprint;
    if (ok) return true;
    json_free(manifest);
    return manifest_refuse(path, error);
}

// Saves a model as OUT/step_N, N being the record's step, and waits until it is on disk. All ranks call it together.
static inline bool model_save(Model* model, const RunRecord* record, const char* out, Error* error) {
    Saver saver;
    JsonWriter manifest;
    if (!saver_open(&saver, &model->flat, false, 0, error)) return false;
    record_write(&manifest, record, &model->flat);
    saver_begin(&saver, record->state.step, out, &manifest, NULL);
    bool ok = saver_end(&saver, error);
    saver_close(&saver);
    return ok;
}

// Loads the weights and optimizer state of the checkpoint at a path, or only the weights, into a model of the same
// configuration. Each rank can call it alone.
static inline bool model_load(Model* model, RunRecord* record, const char* path, bool weights_alone, Error* error) {
    Json manifest;
    if (!record_open(&manifest, record, path, error)) return false;
    bool ok =
        fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &record->config, &model->config, "checkpoint", path, error) &&
        checkpoint_load(&model->flat, &manifest, path, weights_alone, error);
    json_free(&manifest);
    return ok;
}

#endif  // LLMTRAIN_H
