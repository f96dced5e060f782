// parameters.h: what a model is made of.
//
//   1. configuration   what the model is: family, sizes, presets
//   2. parameters      the flat vector and the table that describes it
//   3. memory          one block, laid out before the first step, shown as a plan
//
// Letters: C channels, L layers, H heads, K key/value heads, D head size, F feed-forward, V vocabulary, Vp padded
// vocabulary.

#ifndef LLMTRAIN_PARAMETERS_H
#define LLMTRAIN_PARAMETERS_H

#include "base.h"
#include "../kernels_cpu.h"
#ifdef LLMTRAIN_CUDA
#include "../kernels.cuh"
#endif

#include <assert.h>
#include <sys/resource.h>

// ------------------------------------------------------------------------------------------------
// 1. Configuration
//
// Two families, one code path. GPT-2 ("Language Models are Unsupervised Multitask Learners"): LayerNorm, GELU, learned
// positions, biases, the head tied to the token embedding. Llama ("LLaMA: Open and Efficient Foundation Language
// Models"): RMSNorm, SwiGLU, RoPE, no biases, grouped-query attention, the head tied or not.

typedef enum { FAMILY_GPT2, FAMILY_LLAMA } Family;
#define FAMILY_NAMES "gpt2|llama"

typedef struct {
    Family family;
    size_t layers, heads, kv_heads, channels, ffn;  // L, H, K, C, F
    size_t context;                                 // the longest sequence
    size_t vocab;                                   // V, as the data has it
    bool tied;                                      // the head is the token embedding
    double norm_epsilon, rope_theta;
} Config;

static inline size_t config_head_size(const Config* c) { return c->channels / c->heads; }
static inline size_t config_padded_vocab(const Config* c) { return round_up(c->vocab, 128); }
static inline size_t config_qkv(const Config* c) { return (c->heads + 2 * c->kv_heads) * config_head_size(c); }
// Width of the first feed-forward product: Llama's makes gate and up in one.
static inline size_t config_ffn_in(const Config* c) { return c->family == FAMILY_LLAMA ? 2 * c->ffn : c->ffn; }

typedef struct {
    const char* name;
    Config config;
} Preset;

// The GPT-2 sizes of the paper, the same and more under llm.c's names by depth, and Llama's: the small ones of llama2.c,
// then version 3.
static const Preset PRESETS[] = {
    {"gpt2:124M",  {FAMILY_GPT2,  12, 12, 12,  768,  3072, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:350M",  {FAMILY_GPT2,  24, 16, 16, 1024,  4096, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:774M",  {FAMILY_GPT2,  36, 20, 20, 1280,  5120, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:1558M", {FAMILY_GPT2,  48, 25, 25, 1600,  6400, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d6",    {FAMILY_GPT2,   6,  6,  6,  384,  1536, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d12",   {FAMILY_GPT2,  12, 12, 12,  768,  3072, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d24",   {FAMILY_GPT2,  24, 16, 16, 1024,  4096, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d36",   {FAMILY_GPT2,  36, 20, 20, 1280,  5120, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d48",   {FAMILY_GPT2,  48, 25, 25, 1600,  6400, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d60",   {FAMILY_GPT2,  60, 30, 30, 1920,  7680, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d72",   {FAMILY_GPT2,  72, 30, 30, 2880, 11520, 1024,  50257, true,  1e-5, 0}},
    {"gpt2:d84",   {FAMILY_GPT2,  84, 36, 36, 3456, 13824, 1024,  50257, true,  1e-5, 0}},
    {"llama:15M",  {FAMILY_LLAMA,  6,  6,  6,  288,   768,  256,  32000, true,  1e-5, 10000}},
    {"llama:42M",  {FAMILY_LLAMA,  8,  8,  8,  512,  1376, 1024,  32000, true,  1e-5, 10000}},
    {"llama:110M", {FAMILY_LLAMA, 12, 12, 12,  768,  2048, 1024,  32000, true,  1e-5, 10000}},
    {"llama:1B",   {FAMILY_LLAMA, 16, 32,  8, 2048,  8192, 8192, 128256, true,  1e-5, 500000}},
    {"llama:3B",   {FAMILY_LLAMA, 28, 24,  8, 3072,  8192, 8192, 128256, true,  1e-5, 500000}},
    {"llama:8B",   {FAMILY_LLAMA, 32, 32,  8, 4096, 14336, 8192, 128256, false, 1e-5, 500000}},
};
enum { PRESET_COUNT = sizeof PRESETS / sizeof PRESETS[0] };

static inline bool config_preset(Config* c, const char* name, Error* error) {
    char known[512] = "";
    for (size_t i = 0; i < PRESET_COUNT; i++) {
        const Preset* p = &PRESETS[i];
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? " " : "", p->name);
        if (strcmp(p->name, name) != 0) continue;
        *c = p->config;
        return true;
    }
    return fail(error, "there is no model '%s'; give one of %s, or the sizes one by one", name, known);
}

// Fills in what follows from the rest when it is 0 (kv_heads, ffn, norm_epsilon, rope_theta), then checks that all
// sizes fit together.
static inline bool config_complete(Config* c, Error* error) {
    const char* missing = !c->layers ? "--layers" : !c->heads ? "--heads" : !c->channels ? "--channels"
                        : !c->context ? "--seq (or --context)" : !c->vocab ? "--vocab" : NULL;
    if (missing) return fail(error, "the model's size lacks %s; give it, at least 1, or a preset with --model", missing);
    if (c->layers > 1000 || c->channels > 65536 || c->context > (1u << 24) || c->vocab > (1u << 24) || c->ffn > (1u << 20))
        return fail(error, "the model's sizes (%zu layers, %zu channels, context %zu, vocabulary %zu, ffn %zu) are past the "
                    "limits of 1000, 65536, 16777216, 16777216, 1048576", c->layers, c->channels, c->context, c->vocab, c->ffn);
    if (c->kv_heads == 0) c->kv_heads = c->heads;
    if (c->ffn == 0 && c->family == FAMILY_GPT2) c->ffn = 4 * c->channels;
    if (c->ffn == 0) c->ffn = round_up(8 * c->channels / 3, 32);
    if (c->norm_epsilon == 0) c->norm_epsilon = 1e-5;
    if (c->rope_theta == 0) c->rope_theta = 10000;
    if (c->channels % c->heads != 0)
        return fail(error, "%zu heads do not divide %zu channels; choose --heads so that --channels is a multiple of it",
                    c->heads, c->channels);
    if (c->heads % c->kv_heads != 0)
        return fail(error, "%zu key/value heads do not divide %zu heads; choose --kv-heads so that --heads is a multiple of it",
                    c->kv_heads, c->heads);
    if (c->family == FAMILY_LLAMA && config_head_size(c) % 2 != 0)
        return fail(error, "the head size %zu is odd, but rotary positions turn pairs; choose --channels / --heads even",
                    config_head_size(c));
    if (config_head_size(c) > ATTENTION_MAX_D)
        return fail(error, "the head size %zu is over %d; choose more --heads for %zu channels",
                    config_head_size(c), ATTENTION_MAX_D, c->channels);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Parameters
//
// All parameters are one flat vector, cut into buckets: 0 the embeddings, 1 to L the blocks, L + 1 the final norm and
// the head. The table has a row per tensor, in the order of the vector; whatever walks parameters walks the table.
// A tensor starts at a multiple of 64 elements. Gradients, master weights and optimizer state have the same layout. What lies
// between tensors, and the rows of the padded vocabulary, is 0 and stays 0.

typedef enum { INIT_NORMAL, INIT_ZERO, INIT_ONE } Init;

typedef struct {
    char name[48];
    size_t rows, cols;   // the true shape; cols is 0 for a vector of `rows` elements
    size_t offset, size; // place in the flat vector and elements there, padded rows included
    size_t bucket;
    Init init;
    float init_std;     // of INIT_NORMAL
    bool decays;         // weight decay applies: matrices only
} Tensor;

#define NO_TENSOR SIZE_MAX

// Where the tensors of one block start in the flat vector; NO_TENSOR where the family has none.
typedef struct {
    size_t norm1_weight, norm1_bias;                    // (C)
    size_t qkv_weight, qkv_bias;                        // ((H + 2K) D, C)
    size_t attention_out_weight, attention_out_bias;    // (C, H D)
    size_t norm2_weight, norm2_bias;                    // (C)
    size_t ffn_in_weight, ffn_in_bias;                  // (F, C), Llama (2F, C): gate, then up
    size_t ffn_out_weight, ffn_out_bias;                // (C, F)
} Block;

typedef struct {
    Tensor* tensors;
    size_t count;
    Block* blocks;                                      // (L)
    size_t token_embedding, position_embedding;         // (Vp, C), (context, C)
    size_t final_norm_weight, final_norm_bias;          // (C)
    size_t head_weight;                                 // (Vp, C); the token embedding's when tied
    size_t flat_size;                                   // elements of the flat vector, padding included
    size_t true_size;                                   // the model's parameters as papers count them
} Parameters;

static inline size_t tensor_elements(const Tensor* t) { return t->rows * (t->cols ? t->cols : 1); }

static inline size_t parameters_add(Parameters* p, const char* name, size_t rows, size_t padded_rows, size_t cols,
                                    size_t bucket, Init init, float init_std) {
    Tensor* t = &p->tensors[p->count++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->rows = rows;
    t->cols = cols;
    t->offset = p->flat_size;
    t->size = padded_rows * (cols ? cols : 1);
    t->bucket = bucket;
    t->init = init;
    t->init_std = init_std;
    t->decays = cols > 0;
    p->flat_size = round_up(p->flat_size + t->size, 64);
    p->true_size += tensor_elements(t);
    return t->offset;
}

static inline size_t parameters_add_block(Parameters* p, size_t l, const char* what, size_t rows, size_t cols,
                                          Init init, float init_std) {
    char name[48];
    snprintf(name, sizeof name, "block.%zu.%s", l, what);
    return parameters_add(p, name, rows, rows, cols, l + 1, init, init_std);
}

// Initial weights are normal with deviation sqrt(2 / 5C), "Transformers without Tears: Improving the Normalization of
// Self-Attention": about GPT-2's 0.02 for its 768 channels, and more for narrow models, which learn faster so. It is
// less by sqrt(2L) for the two products that add to the residual stream, so that its size does not grow with depth.
static inline bool parameters_create(Parameters* p, const Config* c, Error* error) {
    memset(p, 0, sizeof *p);
    size_t C = c->channels, L = c->layers, F = c->ffn, V = c->vocab, Vp = config_padded_vocab(c);
    size_t HD = c->heads * config_head_size(c);
    float usual = sqrtf(0.4f / (float)C), residual = usual / sqrtf(2.0f * (float)L);
    bool biases = c->family == FAMILY_GPT2;
    p->tensors = (Tensor*)allocate((12 * L + 5) * sizeof(Tensor));  // of blocks; 2 embeddings, 2 of the norm, the head
    p->blocks = (Block*)allocate(L * sizeof(Block));
    if (p->tensors == NULL || p->blocks == NULL) return fail(error, "out of memory for the table of parameters");
    p->token_embedding = parameters_add(p, "token_embedding", V, Vp, C, 0, INIT_NORMAL, usual);
    p->position_embedding = NO_TENSOR;
    if (c->family == FAMILY_GPT2)
        p->position_embedding = parameters_add(p, "position_embedding", c->context, c->context, C, 0, INIT_NORMAL, usual);
    for (size_t l = 0; l < L; l++) {
        Block* b = &p->blocks[l];
        b->norm1_weight = parameters_add_block(p, l, "norm1_weight", C, 0, INIT_ONE, 0);
        b->norm1_bias = biases ? parameters_add_block(p, l, "norm1_bias", C, 0, INIT_ZERO, 0) : NO_TENSOR;
        b->qkv_weight = parameters_add_block(p, l, "qkv_weight", config_qkv(c), C, INIT_NORMAL, usual);
        b->qkv_bias = biases ? parameters_add_block(p, l, "qkv_bias", config_qkv(c), 0, INIT_ZERO, 0) : NO_TENSOR;
        b->attention_out_weight = parameters_add_block(p, l, "attention_out_weight", C, HD, INIT_NORMAL, residual);
        b->attention_out_bias = biases ? parameters_add_block(p, l, "attention_out_bias", C, 0, INIT_ZERO, 0) : NO_TENSOR;
        b->norm2_weight = parameters_add_block(p, l, "norm2_weight", C, 0, INIT_ONE, 0);
        b->norm2_bias = biases ? parameters_add_block(p, l, "norm2_bias", C, 0, INIT_ZERO, 0) : NO_TENSOR;
        b->ffn_in_weight = parameters_add_block(p, l, "ffn_in_weight", config_ffn_in(c), C, INIT_NORMAL, usual);
        b->ffn_in_bias = biases ? parameters_add_block(p, l, "ffn_in_bias", config_ffn_in(c), 0, INIT_ZERO, 0) : NO_TENSOR;
        b->ffn_out_weight = parameters_add_block(p, l, "ffn_out_weight", C, F, INIT_NORMAL, residual);
        b->ffn_out_bias = biases ? parameters_add_block(p, l, "ffn_out_bias", C, 0, INIT_ZERO, 0) : NO_TENSOR;
    }
    p->final_norm_weight = parameters_add(p, "final_norm_weight", C, C, 0, L + 1, INIT_ONE, 0);
    p->final_norm_bias = biases ? parameters_add(p, "final_norm_bias", C, C, 0, L + 1, INIT_ZERO, 0) : NO_TENSOR;
    p->head_weight = p->token_embedding;
    if (!c->tied) p->head_weight = parameters_add(p, "head_weight", V, Vp, C, L + 1, INIT_NORMAL, usual);
    return true;
}

static inline void parameters_free(Parameters* p) {
    free(p->tensors);
    free(p->blocks);
    memset(p, 0, sizeof *p);
}

// ------------------------------------------------------------------------------------------------
// 3. Memory
//
// One block on the device (a GPU, or the machine itself) holds everything that a model needs. The same function lays it
// out twice: first over no memory, which gives the plan (a line per purpose) and the size of the block, then over the
// block, which gives the pointers. The block is touched before training, so a run that starts does not run out of memory
// later.

#define PLAN_MAX ((size_t)1 << 62)  // what sums of a plan stop at, lest they wrap: no machine has as much

typedef struct {
    const char* name;
    size_t bytes;
} PlanLine;

enum { PLAN_LINES = 48 };

typedef struct {
    PlanLine lines[PLAN_LINES];
    size_t count, total;
    unsigned char* base;  // NULL while only planning
} MemoryPlan;

// The next `bytes` of the block, on a multiple of 256 bytes, which is what cuBLASLt asks of its workspace; pieces of one
// name share a line of the plan.
static inline void* plan_take(MemoryPlan* plan, const char* name, size_t bytes) {
    size_t i = 0, place = plan->total, taken = round_up(bytes, 256);
    while (i < plan->count && strcmp(plan->lines[i].name, name) != 0) i++;
    assert(i < PLAN_LINES);
    if (i == plan->count) plan->lines[plan->count++].name = name;
    plan->lines[i].bytes = taken < PLAN_MAX - plan->lines[i].bytes ? plan->lines[i].bytes + taken : PLAN_MAX;
    plan->total = taken < PLAN_MAX - plan->total ? plan->total + taken : PLAN_MAX;
    return plan->base ? plan->base + place : NULL;
}

// The largest resident size that the process has had, in bytes.
static inline size_t memory_peak(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

// Bytes of the block: at least one, in whole large pages.
static inline size_t plan_block_bytes(const MemoryPlan* plan) { return round_up(max_size(plan->total, 1), 2 << 20); }

// Takes the block of a finished plan on the device, zeroed, and starts the plan anew over it. device_free frees it.
static inline bool plan_allocate(MemoryPlan* plan, Stream stream, Error* error) {
    size_t bytes = plan_block_bytes(plan), available = device_available();
    if (bytes > available)
        return fail(error, "the model needs %.2f GB but only %.2f GB of memory are free; make --batch, --seq or the model "
                    "smaller, or close other programs", 1e-9 * (double)bytes, 1e-9 * (double)available);
    void* block = device_allocate(bytes, stream, error);
    if (block == NULL) return false;
    memset(plan, 0, sizeof *plan);
    plan->base = (unsigned char*)block;
    return true;
}

static inline void plan_print(FILE* file, const MemoryPlan* plan) {
    fprintf(file, "  %-34s %12s\n", "memory", "MB");
    for (size_t i = 0; i < plan->count; i++)
        fprintf(file, "  %-34s %12.2f\n", plan->lines[i].name, 1e-6 * (double)plan->lines[i].bytes);
    fprintf(file, "  %-34s %12.2f\n", "total", 1e-6 * (double)plan->total);
}

#endif  // LLMTRAIN_PARAMETERS_H
