// config.h: the family and the sizes of a model.
//
// Two families, one code path. GPT-2 ("Language Models are Unsupervised Multitask Learners"): LayerNorm, GELU, learned
// positions, biases, the head tied to the token embedding. Llama ("LLaMA: Open and Efficient Foundation Language
// Models"): RMSNorm, SwiGLU, RoPE, no biases, grouped-query attention, the head tied or not. Variants add fields:
// Qwen2 qkv_bias, Qwen3 qk_norm and head_size, Llama 3.1 rope_scaling.
//
// LoRA is a part of the configuration: a model with pairs of adapters has more tensors (weights.h).
//
// A field is a member of Config, its row in CONFIG_FIELDS, and where it is used: the row gives the flag, the key in
// checkpoints, the limits, and the value that files from before the field imply.

#ifndef LLMTRAIN_CONFIG_H
#define LLMTRAIN_CONFIG_H

#include "../base/fields.h"
#include "../ops/rope.h"

typedef enum { FAMILY_GPT2, FAMILY_LLAMA } Family;
#define FAMILY_NAMES "gpt2|llama"

typedef enum { LORA_PLAIN, LORA_RS } LoraScale;
typedef enum { QUANTIZE_OFF, QUANTIZE_NF4 } Quantize;
#define LORA_TARGETS "q|k|v|qkv|attention_out|gate|up|ffn_in|ffn_out"
enum { LORA_Q = 1, LORA_K = 2, LORA_V = 4, LORA_QKV = 8, LORA_ATTENTION_OUT = 16, LORA_GATE = 32, LORA_UP = 64,
       LORA_FFN_IN = 128, LORA_FFN_OUT = 256, LORA_OF_LLAMA = LORA_Q | LORA_K | LORA_V | LORA_GATE | LORA_UP };

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
    size_t lora;                                    // r, the rank of LoRA's pairs; 0: there are none
    double lora_alpha;                              // their product counts alpha / r, or alpha / sqrt(r), times
    LoraScale lora_scale;
    int lora_targets;                               // which matrices have a pair: bits of LORA_TARGETS; 0: all
    Quantize quantize;                              // how the matrices of the blocks are stored; with lora
} Config;

static const Field CONFIG_FIELDS[] = {
    FIELD_CHOICE(Config, family, "family", FAMILY_NAMES, NULL, "architecture"),
    FIELD_COUNT(Config, layers, "layers", 1, 1000, NULL, "transformer blocks (required without --model)"),
    FIELD_COUNT(Config, heads, "heads", 1, 1024, NULL, "query heads (required without --model)"),
    FIELD_COUNT(Config, kv_heads, "kv-heads", 0, 1024, NULL, "key/value heads; 0: as many as --heads"),
    FIELD_COUNT(Config, channels, "channels", 1, 65536, NULL,
                "width of the residual stream (required without --model)"),
    FIELD_COUNT(Config, ffn, "ffn", 0, 1 << 20, NULL,
                "width of the feed-forward layer; 0: 4 (gpt2) or 8/3 (llama) times --channels"),
    FIELD_COUNT(Config, context, "context", 0, 1 << 24, NULL,
                "longest sequence that the model accepts; 0: the preset's, otherwise --seq"),
    FIELD_COUNT(Config, vocab, "vocab", 0, 1 << 24, NULL, "vocabulary size, in tokens; 0: the data's"),
    FIELD_SWITCH(Config, tied, "tied", NULL, "share weights between the token embedding and the head"),
    FIELD_REAL(Config, norm_epsilon, "norm-epsilon", 0, 1, NULL, NULL),
    FIELD_REAL(Config, rope_theta, "rope-theta", 1, 1e9, NULL, "base of the rotary position angles (llama)"),
    FIELD_COUNT(Config, head_size, "head-size", 0, 256, "0", "size of an attention head; 0: --channels / --heads"),
    FIELD_SWITCH(Config, qkv_bias, "qkv-bias", "off", "llama: biases of queries, keys and values, as in Qwen2"),
    FIELD_SWITCH(Config, qk_norm, "qk-norm", "off", "llama: RMSNorm of each query and key head, as in Qwen3"),
    FIELD_CHOICE(Config, rope_scaling, "rope-scaling", ROPE_SCALING_NAMES, "none",
                 "RoPE scaling for a longer context: linear, or llama3 as in Llama 3.1"),
    FIELD_REAL(Config, rope_factor, "rope-factor", 0, 1e6, "0",
               "with --rope-scaling: how many times longer the context is"),
    FIELD_REAL(Config, rope_low_freq, "rope-low-freq", 0, 1e6, "0", NULL),
    FIELD_REAL(Config, rope_high_freq, "rope-high-freq", 0, 1e6, "0", NULL),
    FIELD_COUNT(Config, rope_original, "rope-original", 0, 1 << 24, "0",
                "with --rope-scaling llama3: the context before scaling; 0: 8192"),
    FIELD_COUNT(Config, lora, "lora", 0, 65536, "0",
                "LoRA: train, in place of the model's weights, a pair of matrices of rank N beside each; 0: no"),
    FIELD_REAL(Config, lora_alpha, "lora-alpha", 0, 1e6, "0",
               "with --lora: the pairs' outputs are scaled by X / rank; 0: 2 rank"),
    FIELD_CHOICE(Config, lora_scale, "lora-scale", "plain|rs", "plain",
                 "with --lora: rs divides by the square root of the rank (rsLoRA)"),
    FIELD_SET(Config, lora_targets, "lora-targets", LORA_TARGETS, "all",
              "with --lora: the matrices with a pair; q, k, v, gate and up are llama's"),
    FIELD_CHOICE(Config, quantize, "quantize", "off|nf4", "off",
                 "with --lora: nf4 keeps the matrices of the blocks, which are frozen, in 4 bits (QLoRA)"),
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
// What the product of a pair of LoRA is multiplied by. "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al.,
// 2021; rs: "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", Kalajdzievski, 2023.
static inline float config_lora_scale(const Config* c) {
    if (c->lora == 0) return 0;
    return (float)(c->lora_alpha / (c->lora_scale == LORA_RS ? sqrt((double)c->lora) : (double)c->lora));
}

static inline void config_copy_lora(Config* to, const Config* from) {
    to->lora = from->lora;
    to->lora_alpha = from->lora_alpha;
    to->lora_scale = from->lora_scale;
    to->lora_targets = from->lora_targets;
    to->quantize = from->quantize;
}
// Outputs of the first feed-forward matmul. For Llama, gate and up are one matmul.
static inline size_t config_ffn_in(const Config* c) { return c->family == FAMILY_LLAMA ? 2 * c->ffn : c->ffn; }

// Refuses a count over its limit in the table.
static inline bool config_within_limits(const Config* c, Error* error) {
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* f = &CONFIG_FIELDS[i];
        uint64_t value;
        if (f->kind != KIND_COUNT) continue;
        memcpy(&value, (const char*)c + f->offset, sizeof value);
        if ((double)value > f->high)
            return fail_with(error, "%s is %llu in the model, and %.0f is the most that this program takes; make it "
                             "smaller", f->name, (unsigned long long)value, f->high);
    }
    return true;
}

// Replaces 0 by the default (kv_heads, ffn, norm_epsilon, rope_theta, the factors of rope_scaling llama3), then checks
// that all sizes fit together.
static inline bool config_complete(Config* c, Error* error) {
    const char* missing = !c->layers ? "--layers" : !c->heads ? "--heads" : !c->channels ? "--channels"
                        : !c->context ? "--seq (or --context)" : !c->vocab ? "--vocab" : NULL;
    if (missing)
        return fail_with(error, "the model's configuration lacks %s; give at least 1, or a preset with --model",
                         missing);
    if (!config_within_limits(c, error)) return false;
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
    if (c->lora == 0 && (c->lora_alpha != 0 || c->lora_targets != 0 || c->lora_scale != LORA_PLAIN))
        return fail_with(error, "--lora-alpha, --lora-scale and --lora-targets are for --lora; give it, or leave them "
                         "out");
    if (c->lora == 0 && c->quantize != QUANTIZE_OFF)
        return fail_with(error, "--quantize is for --lora, which trains the pairs and not the matrices themselves; give "
                         "it, or leave --quantize out");
    if (c->lora_alpha == 0) c->lora_alpha = 2 * (double)c->lora;
    if (c->family == FAMILY_GPT2 && (c->lora_targets & LORA_OF_LLAMA))
        return fail_with(error, "--lora-targets q, k, v, gate and up are for --family llama; gpt2 has qkv, "
                         "attention_out, ffn_in and ffn_out");
    if (c->head_size == 0 && c->channels % c->heads != 0)
        return fail_with(error, "%zu heads do not divide %zu channels; choose --heads so that --channels is a multiple "
                         "of it", c->heads, c->channels);
    if (c->heads % c->kv_heads != 0)
        return fail_with(error, "%zu key/value heads do not divide %zu heads; choose --kv-heads so that --heads is a "
                         "multiple of it", c->kv_heads, c->heads);
    if (c->family == FAMILY_LLAMA && config_head_size(c) % 2 != 0)
        return fail_with(error, "the head size %zu is odd, but RoPE rotates pairs; make --channels / --heads even",
                         config_head_size(c));
    if (config_head_size(c) > ATTENTION_MAX_D)
        return fail_with(error, "the head size %zu is over %d; choose more --heads for %zu channels",
                         config_head_size(c), ATTENTION_MAX_D, c->channels);
    return true;
}

#endif  // LLMTRAIN_CONFIG_H
