// convert.h: the names and layouts of other programs for our models: tables of tensors and of configurations, which
// both import and export use.
//
//   1. architectures   the models of Hugging Face's transformers that our two families compute
//   2. tensors         a row per tensor: its names, which rows of ours it is, whether it is transposed
//   3. configuration   a row per key of config.json: hf_config_read, hf_config_write
//
//   if (hf_config_read(&config, "models/x/config.json", &error)) ...                 complete, and checked
//   if (convert_list(&list, &count, &config, &parameters, &error)) ...               their tensors, as parts of ours
//   if (hf_config_write(&json_writer, &config, DTYPE_BF16, &ids, &error)) ...
//
// Anything that our model would compute differently is refused by name: an architecture, a key, a value. Keys that
// change no result (dropout, initial values, the dtype of the weights) are accepted unread; a key that is in no table
// is refused, since its effect is unknown. Nothing here opens files of weights: source.h does.

#ifndef LLMTRAIN_CONVERT_H
#define LLMTRAIN_CONVERT_H

#include "../../llmtrain.h"
#include "../base/json_fields.h"
#include "../text/tokenizer_json.h"  // TokenIds

// ------------------------------------------------------------------------------------------------
// 1. Architectures

typedef struct {
    const char *type, *class_name;  // "model_type" and "architectures" of config.json
    Family family;
    bool qkv_bias, qk_norm;
    bool heads_divide;              // hidden_size must be a multiple of num_attention_heads
    const char* needs;              // keys that have no default there, separated by |
    const char* context;            // of a file that does not give it
} Architecture;

// An export uses the first that computes the same: most Mistral models become a Llama.
static const Architecture ARCHITECTURES[] = {
    {"gpt2", "GPT2LMHeadModel", FAMILY_GPT2, false, false, true, "", "1024"},
    {"llama", "LlamaForCausalLM", FAMILY_LLAMA, false, false, true, "", "2048"},
    {"mistral", "MistralForCausalLM", FAMILY_LLAMA, false, false, false, "num_key_value_heads", "131072"},
    {"qwen2", "Qwen2ForCausalLM", FAMILY_LLAMA, true, false, false, "num_key_value_heads", "32768"},
    {"qwen3", "Qwen3ForCausalLM", FAMILY_LLAMA, false, true, false, "num_key_value_heads|head_dim", "32768"},
};
enum { ARCHITECTURE_COUNT = sizeof ARCHITECTURES / sizeof ARCHITECTURES[0] };

// The architecture that computes the same as a model of this configuration; NULL if there is none.
static inline const Architecture* architecture_of(const Config* c) {
    bool plain = c->kv_heads == c->heads && config_head_size(c) * c->heads == c->channels;
    for (size_t i = 0; i < ARCHITECTURE_COUNT; i++) {
        const Architecture* a = &ARCHITECTURES[i];
        bool same = a->family == c->family && a->qk_norm == c->qk_norm;
        if (a->heads_divide) same = same && c->channels % c->heads == 0;
        if (a->family == FAMILY_LLAMA) same = same && a->qkv_bias == c->qkv_bias;
        else same = same && plain;
        if (same) return a;
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 2. Tensors
//
// The rows are in the order of llm.c's files, which hold GPT-2's tensors, each for all blocks. Hugging Face's GPT-2
// stores the matrices of its blocks as (in, out), ours are (out, in). Ours have the rows of q, k and v in one matrix,
// and the rows of gate and up in another.

typedef enum { PART_WHOLE, PART_Q, PART_K, PART_V, PART_GATE, PART_UP } StackPart;

typedef struct {
    const char* ours;           // in our table (tensors.h); * is the number of a block
    StackPart part;            // which of its rows the other names are for
    const char *gpt2, *llama;   // in Hugging Face's files of these families; NULL: there is none
    const char* gguf;           // in GGUF files
} TensorNames;

#define HF_GPT2 "transformer.h.*."
#define HF_LLAMA "model.layers.*."
static const TensorNames TENSOR_NAMES[] = {
    {"token_embedding", PART_WHOLE, "transformer.wte.weight", "model.embed_tokens.weight", "token_embd.weight"},
    {"position_embedding", PART_WHOLE, "transformer.wpe.weight", NULL, "position_embd.weight"},
    {"block.*.norm1_weight", PART_WHOLE, HF_GPT2 "ln_1.weight", HF_LLAMA "input_layernorm.weight",
     "blk.*.attn_norm.weight"},
    {"block.*.norm1_bias", PART_WHOLE, HF_GPT2 "ln_1.bias", NULL, "blk.*.attn_norm.bias"},
    {"block.*.qkv_weight", PART_WHOLE, HF_GPT2 "attn.c_attn.weight", NULL, "blk.*.attn_qkv.weight"},
    {"block.*.qkv_weight", PART_Q, NULL, HF_LLAMA "self_attn.q_proj.weight", "blk.*.attn_q.weight"},
    {"block.*.qkv_weight", PART_K, NULL, HF_LLAMA "self_attn.k_proj.weight", "blk.*.attn_k.weight"},
    {"block.*.qkv_weight", PART_V, NULL, HF_LLAMA "self_attn.v_proj.weight", "blk.*.attn_v.weight"},
    {"block.*.qkv_bias", PART_WHOLE, HF_GPT2 "attn.c_attn.bias", NULL, "blk.*.attn_qkv.bias"},
    {"block.*.qkv_bias", PART_Q, NULL, HF_LLAMA "self_attn.q_proj.bias", "blk.*.attn_q.bias"},
    {"block.*.qkv_bias", PART_K, NULL, HF_LLAMA "self_attn.k_proj.bias", "blk.*.attn_k.bias"},
    {"block.*.qkv_bias", PART_V, NULL, HF_LLAMA "self_attn.v_proj.bias", "blk.*.attn_v.bias"},
    {"block.*.q_norm_weight", PART_WHOLE, NULL, HF_LLAMA "self_attn.q_norm.weight", "blk.*.attn_q_norm.weight"},
    {"block.*.k_norm_weight", PART_WHOLE, NULL, HF_LLAMA "self_attn.k_norm.weight", "blk.*.attn_k_norm.weight"},
    {"block.*.attention_out_weight", PART_WHOLE, HF_GPT2 "attn.c_proj.weight", HF_LLAMA "self_attn.o_proj.weight",
     "blk.*.attn_output.weight"},
    {"block.*.attention_out_bias", PART_WHOLE, HF_GPT2 "attn.c_proj.bias", NULL, "blk.*.attn_output.bias"},
    {"block.*.norm2_weight", PART_WHOLE, HF_GPT2 "ln_2.weight", HF_LLAMA "post_attention_layernorm.weight",
     "blk.*.ffn_norm.weight"},
    {"block.*.norm2_bias", PART_WHOLE, HF_GPT2 "ln_2.bias", NULL, "blk.*.ffn_norm.bias"},
    {"block.*.ffn_in_weight", PART_WHOLE, HF_GPT2 "mlp.c_fc.weight", NULL, "blk.*.ffn_up.weight"},
    {"block.*.ffn_in_weight", PART_GATE, NULL, HF_LLAMA "mlp.gate_proj.weight", "blk.*.ffn_gate.weight"},
    {"block.*.ffn_in_weight", PART_UP, NULL, HF_LLAMA "mlp.up_proj.weight", "blk.*.ffn_up.weight"},
    {"block.*.ffn_in_bias", PART_WHOLE, HF_GPT2 "mlp.c_fc.bias", NULL, "blk.*.ffn_up.bias"},
    {"block.*.ffn_out_weight", PART_WHOLE, HF_GPT2 "mlp.c_proj.weight", HF_LLAMA "mlp.down_proj.weight",
     "blk.*.ffn_down.weight"},
    {"block.*.ffn_out_bias", PART_WHOLE, HF_GPT2 "mlp.c_proj.bias", NULL, "blk.*.ffn_down.bias"},
    {"final_norm_weight", PART_WHOLE, "transformer.ln_f.weight", "model.norm.weight", "output_norm.weight"},
    {"final_norm_bias", PART_WHOLE, "transformer.ln_f.bias", NULL, "output_norm.bias"},
    {"head_weight", PART_WHOLE, "lm_head.weight", "lm_head.weight", "output.weight"},
};
enum { TENSOR_NAME_COUNT = sizeof TENSOR_NAMES / sizeof TENSOR_NAMES[0] };

// One of their tensors: rows [first, first + rows) of one of ours.
typedef struct {
    char name[96];
    size_t row;            // of TENSOR_NAMES
    size_t tensor;         // of our table
    size_t first, rows, cols;  // cols 0: a vector
    bool transposed;       // it is stored as (cols, rows)
    size_t file;           // of an export, which it is written to
} ForeignTensor;

// A name with the number of a block in place of its *.
static inline void convert_name(char* name, size_t size, const char* pattern, size_t block) {
    size_t before = strcspn(pattern, "*");
    if (pattern[before] == 0) snprintf(name, size, "%s", pattern);
    else snprintf(name, size, "%.*s%zu%s", (int)before, pattern, block, pattern + before + 1);
}

// Whether a name of our table matches a pattern, and for which block.
static inline bool convert_matches(size_t* block, const char* name, const char* pattern) {
    size_t before = strcspn(pattern, "*");
    char* end = NULL;
    *block = 0;
    if (strncmp(name, pattern, before) != 0) return false;
    if (pattern[before] == 0) return name[before] == 0;
    *block = (size_t)strtoull(name + before, &end, 10);
    return end > name + before && strcmp(end, pattern + before + 1) == 0;
}

// The rows of a part, and where they begin.
static inline void convert_part(size_t* first, size_t* rows, StackPart part, const Config* c, const Tensor* t) {
    size_t q = c->heads * config_head_size(c), k = c->kv_heads * config_head_size(c);
    *first = part == PART_K ? q : part == PART_V ? q + k : part == PART_UP ? c->ffn : 0;
    *rows = part == PART_WHOLE ? t->rows : part == PART_Q ? q : part == PART_K || part == PART_V ? k : c->ffn;
}

// Lists the tensors of a model's Hugging Face file, in the order of our table. The caller frees *list.
static inline bool convert_list(ForeignTensor** list, size_t* count, const Config* c, const Parameters* p,
                                Error* error) {
    size_t capacity = 3 * p->count, block;  // at most 3 parts: q, k, v
    *count = 0;
    *list = (ForeignTensor*)memory_allocate(capacity * sizeof(ForeignTensor));
    if (*list == NULL) return fail_with(error, "out of memory for a list of %zu tensors", capacity);
    for (size_t i = 0; i < p->count; i++) {
        for (size_t r = 0; r < TENSOR_NAME_COUNT; r++) {
            const TensorNames* names = &TENSOR_NAMES[r];
            const char* theirs = c->family == FAMILY_GPT2 ? names->gpt2 : names->llama;
            if (theirs == NULL || !convert_matches(&block, p->tensors[i].name, names->ours)) continue;
            ForeignTensor* f = &(*list)[(*count)++];
            convert_name(f->name, sizeof f->name, theirs, block);
            convert_part(&f->first, &f->rows, names->part, c, &p->tensors[i]);
            f->row = r;
            f->tensor = i;
            f->cols = p->tensors[i].cols;
            f->transposed = c->family == FAMILY_GPT2 && p->tensors[i].shape.hidden;
        }
    }
    return true;
}

// Whether a file may hold a tensor of this name that is not a weight of the model: masks and RoPE frequencies that old
// versions saved, and a tied head, which is a copy of the embedding.
static inline bool convert_ignores(const char* name, const Config* c) {
    static const char* const ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (length >= strlen(ends[i]) && strcmp(name + length - strlen(ends[i]), ends[i]) == 0) return true;
    return c->tied && strcmp(name, "lm_head.weight") == 0;
}

// ------------------------------------------------------------------------------------------------
// 3. Configuration

// Keys that are members of Config. The last column is transformers' own value for a file without the key; NULL: the key
// is required. 0 is filled in by config_complete.
static const Field GPT2_KEYS[] = {
    FIELD_SAVED(Config, channels, KIND_COUNT, "n_embd", NULL),
    FIELD_SAVED(Config, layers, KIND_COUNT, "n_layer", NULL),
    FIELD_SAVED(Config, heads, KIND_COUNT, "n_head", NULL),
    FIELD_SAVED(Config, ffn, KIND_COUNT, "n_inner", "0"),
    FIELD_SAVED(Config, context, KIND_COUNT, "n_positions", NULL),
    FIELD_SAVED(Config, vocab, KIND_COUNT, "vocab_size", NULL),
    FIELD_SAVED(Config, norm_epsilon, KIND_REAL, "layer_norm_epsilon", "1e-5"),
    FIELD_SAVED(Config, tied, KIND_SWITCH, "tie_word_embeddings", "on"),
};
static const Field LLAMA_KEYS[] = {
    FIELD_SAVED(Config, channels, KIND_COUNT, "hidden_size", NULL),
    FIELD_SAVED(Config, layers, KIND_COUNT, "num_hidden_layers", NULL),
    FIELD_SAVED(Config, heads, KIND_COUNT, "num_attention_heads", NULL),
    FIELD_SAVED(Config, kv_heads, KIND_COUNT, "num_key_value_heads", "0"),
    FIELD_SAVED(Config, head_size, KIND_COUNT, "head_dim", "0"),
    FIELD_SAVED(Config, ffn, KIND_COUNT, "intermediate_size", NULL),
    FIELD_SAVED(Config, context, KIND_COUNT, "max_position_embeddings", NULL),
    FIELD_SAVED(Config, vocab, KIND_COUNT, "vocab_size", NULL),
    FIELD_SAVED(Config, norm_epsilon, KIND_REAL, "rms_norm_eps", "1e-6"),
    FIELD_SAVED(Config, rope_theta, KIND_REAL, "rope_theta", "10000"),
    FIELD_SAVED(Config, tied, KIND_SWITCH, "tie_word_embeddings", "off"),
};
// Members of "rope_scaling", or of "rope_parameters" since transformers 5, other than the kind.
static const Field ROPE_KEYS[] = {
    FIELD_SAVED(Config, rope_theta, KIND_REAL, "rope_theta", NULL),
    FIELD_SAVED(Config, rope_factor, KIND_REAL, "factor", NULL),
    FIELD_SAVED(Config, rope_low_freq, KIND_REAL, "low_freq_factor", NULL),
    FIELD_SAVED(Config, rope_high_freq, KIND_REAL, "high_freq_factor", NULL),
    FIELD_SAVED(Config, rope_original, KIND_COUNT, "original_max_position_embeddings", NULL),
};
enum {
    GPT2_KEY_COUNT = sizeof GPT2_KEYS / sizeof GPT2_KEYS[0],
    LLAMA_KEY_COUNT = sizeof LLAMA_KEYS / sizeof LLAMA_KEYS[0],
    ROPE_KEY_COUNT = sizeof ROPE_KEYS / sizeof ROPE_KEYS[0]
};
#define HF_ROPE_TYPES "default|linear|llama3"  // in the order of ROPE_SCALING_NONE, _LINEAR, _LLAMA3

// Keys that are not one member of Config: none, or several.
typedef enum {
    RULE_UNREAD,   // changes no result of the model
    RULE_VALUES,   // must have one of the values, the only ones that our model computes; an export writes `written`
    RULE_ROPE,     // an object with ROPE_KEYS, or null
    RULE_QUANTIZED,  // null, or an object that describes 4 bits of bitsandbytes: NF4
    RULE_WINDOW,   // null, or at least the context: such a window hides nothing
    RULE_LAYERS    // an array whose elements all have one of the values
} RuleKind;

typedef struct {
    const char* types;        // the architectures, separated by |; "": all
    const char* keys;         // separated by |
    RuleKind kind;
    const char* values;       // of RULE_VALUES, RULE_LAYERS: as JSON writes them, without quotation marks
    const char* written;      // JSON of what an export writes as the value of the only key; NULL: nothing
} ConfigRule;

#define RULE_LLAMAS "llama|mistral|qwen2|qwen3"
static const ConfigRule CONFIG_RULES[] = {
    {"gpt2", "activation_function", RULE_VALUES, "gelu_new|gelu_pytorch_tanh", "\"gelu_new\""},
    {"gpt2", "scale_attn_weights", RULE_VALUES, "true", "true"},
    {"gpt2", "scale_attn_by_inverse_layer_idx", RULE_VALUES, "false", "false"},
    {RULE_LLAMAS, "hidden_act", RULE_VALUES, "silu|swish", "\"silu\""},
    {RULE_LLAMAS, "attention_bias", RULE_VALUES, "false", "false"},
    {RULE_LLAMAS, "mlp_bias|rope_interleaved|use_mrope", RULE_VALUES, "false", NULL},
    {RULE_LLAMAS, "partial_rotary_factor", RULE_VALUES, "1|1.0|null", NULL},
    {RULE_LLAMAS, "rope_scaling|rope_parameters", RULE_ROPE, NULL, NULL},
    {"qwen2|qwen3", "use_sliding_window", RULE_VALUES, "false", "false"},
    {"qwen2|qwen3", "sliding_window", RULE_UNREAD, NULL, NULL},
    {"llama", "sliding_window", RULE_WINDOW, NULL, NULL},
    {"mistral", "sliding_window", RULE_WINDOW, NULL, "null"},
    {RULE_LLAMAS, "layer_types", RULE_LAYERS, "full_attention", NULL},
    {"", "is_encoder_decoder|add_cross_attention", RULE_VALUES, "false", NULL},
    {"", "pruned_heads", RULE_LAYERS, "", NULL},
    {"", "quantization_config", RULE_QUANTIZED, NULL, NULL},  // what the bytes of the weights mean
    {"gpt2", "n_ctx|n_special|predict_special_tokens|attn_pdrop|embd_pdrop|resid_pdrop|reorder_and_upcast_attn|"
     "summary_activation|summary_first_dropout|summary_proj_to_labels|summary_type|summary_use_proj",
     RULE_UNREAD, NULL, NULL},
    {RULE_LLAMAS, "attention_dropout|is_llama_config|max_window_layers|pretraining_tp", RULE_UNREAD, NULL, NULL},
    {"", "_attn_implementation|_attn_implementation_autoset|_flash_attn_2_enabled|_name_or_path|_num_labels|"
     "architectures|auto_map|bos_token_id|chunk_size_feed_forward|decoder_start_token_id|do_sample|dtype|eos_token_id|"
     "finetuning_task|gradient_checkpointing|id2label|initializer_range|is_decoder|label2id|max_length|"
     "max_sequence_length|model_type|neftune_noise_alpha|num_labels|output_attentions|output_hidden_states|output_past|"
     "pad_token_id|problem_type|repetition_penalty|return_dict|sep_token_id|task_specific_params|temperature|"
     "tokenizer_class|top_k|top_p|torch_dtype|torchscript|transformers.js_config|transformers_version|unk_token_id|"
     "unsloth_fixed|unsloth_version|use_bfloat16|use_cache", RULE_UNREAD, NULL, NULL},
};
enum { CONFIG_RULE_COUNT = sizeof CONFIG_RULES / sizeof CONFIG_RULES[0] };
#define CONFIG_JSON_MAX ((size_t)1 << 24)  // bytes of a config.json

// A scalar as JSON writes it, without quotation marks; for anything else, its type.
static inline void json_scalar_text(char text[64], const Json* json, uint32_t node) {
    static const char* const words[] = {"null", "false", "true", "", "", "a list", "an object"};
    const JsonNode* n = &json->nodes[node];
    if (n->type != JSON_NUMBER && n->type != JSON_STRING) snprintf(text, 64, "%s", words[n->type]);
    else snprintf(text, 64, "%.*s", (int)min_size(n->bytes, 63), json->text + n->start);
}

// Fails for a value that our model does not compute.
static inline bool hf_refuse(const char* path, const char* key, const char* value, const char* can, Error* error) {
    return fail_with(error, "%.600s: \"%.80s\" is %.60s, which this program does not support%s%.100s; use another "
                     "model", path, key, value, can[0] ? ": it supports " : "", can);
}

// Reads a key; null is the same as no key.
static inline bool hf_read_key(Config* c, const Field* field, const Json* json, uint32_t object, const char* path,
                               Error* error) {
    uint32_t node = json_get(json, object, field->name);
    double number = 1;
    char value[64];
    if (json_is(json, node, JSON_NULL)) node = JSON_NONE;
    bool zero = json_number(json, node, &number) && number == 0;  // which config_complete would take for no value
    if (!zero && fields_read(c, field, 1, json, node == JSON_NONE ? JSON_NONE : object)) return true;
    if (node == JSON_NONE) return fail_with(error, "%.600s lacks \"%s\"; use a complete copy of it", path, field->name);
    json_scalar_text(value, json, node);
    return fail_with(error, "%.600s: \"%s\" is %s, which is not a valid value; use another copy", path, field->name,
                     value);
}

// Reads "rope_scaling" or "rope_parameters".
static inline bool hf_read_rope(Config* c, const Json* json, uint32_t object, const char* path, Error* error) {
    char kind[64] = "default", value[64];
    if (!json_is(json, object, JSON_OBJECT))
        return fail_with(error, "%.600s: \"%s\" is not an object; use another copy", path, json_key(json, object));
    uint32_t type = json_get(json, object, "rope_type");
    if (type == JSON_NONE) type = json_get(json, object, "type");  // its name before transformers 4.43
    if (type != JSON_NONE) json_scalar_text(kind, json, type);
    int scaling = choice_find(HF_ROPE_TYPES, kind);
    if (scaling < 0) return hf_refuse(path, "rope_type", kind, "default, linear and llama3", error);
    memcpy(&c->rope_scaling, &scaling, sizeof scaling);
    size_t needed = scaling == ROPE_SCALING_NONE ? 0 : scaling == ROPE_SCALING_LINEAR ? 2 : (size_t)ROPE_KEY_COUNT;
    for (size_t i = 0; i < ROPE_KEY_COUNT; i++) {
        bool there = json_get(json, object, ROPE_KEYS[i].name) != JSON_NONE;
        if (i > 0 ? i < needed : there)
            if (!hf_read_key(c, &ROPE_KEYS[i], json, object, path, error)) return false;
    }
    for (uint32_t i = json_first(json, object); i != JSON_NONE; i = json_next(json, i)) {
        const char* key = json_key(json, i);
        bool known = strcmp(key, "rope_type") == 0 || strcmp(key, "type") == 0;
        for (size_t k = 0; k < ROPE_KEY_COUNT; k++) known |= strcmp(key, ROPE_KEYS[k].name) == 0;
        json_scalar_text(value, json, i);
        if (strcmp(key, "partial_rotary_factor") == 0) known = choice_find("1|1.0|null", value) >= 0;
        if (!known) return hf_refuse(path, key, value, "", error);
    }
    return true;
}

// Checks "quantization_config". Which matrices are quantized, and how, their own tensors say.
static inline bool hf_check_quantized(const Json* json, uint32_t object, const char* path, Error* error) {
    static const struct { const char *key, *value; } keys[] = {
        {"quant_method", "bitsandbytes"}, {"load_in_8bit", "false"}, {"load_in_4bit", "true"},
        {"bnb_4bit_quant_type", "nf4"}, {"bnb_4bit_quant_storage", "uint8"}};
    char value[64];
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        uint32_t node = json_get(json, object, keys[i].key);
        if (node != JSON_NONE) json_scalar_text(value, json, node);
        if (node != JSON_NONE && strcmp(value, keys[i].value) != 0)
            return hf_refuse(path, keys[i].key, value, keys[i].value, error);
    }
    bool four = json_get(json, object, "load_in_4bit") != JSON_NONE;  // older files have no quant_method
    if (!four) json_scalar_text(value, json, object);
    return four || hf_refuse(path, "quantization_config", value, "null, and 4 bits of bitsandbytes (NF4)", error);
}

// Checks a key against its rule.
static inline bool hf_check_key(Config* c, const ConfigRule* rule, const Json* json, uint32_t node, const char* path,
                                Error* error) {
    char value[64];
    double window = 0;
    const char* key = json_key(json, node);
    bool null = json_is(json, node, JSON_NULL), empty = json_is(json, node, JSON_OBJECT) && json_count(json, node) == 0;
    json_scalar_text(value, json, node);
    switch (rule->kind) {
        case RULE_UNREAD: return true;
        case RULE_VALUES:
            if (json_is(json, node, JSON_STRING) && choice_find("true|false|null|1|1.0", value) >= 0)
                snprintf(value, sizeof value, "a string");
            return choice_find(rule->values, value) >= 0 || hf_refuse(path, key, value, rule->values, error);
        case RULE_ROPE:
            // Where a file has both, transformers reads "rope_scaling" alone.
            if (json_count(json, json_get(json, 0, "rope_scaling")) > 0 && strcmp(key, "rope_scaling") != 0)
                return true;
            return null || empty || hf_read_rope(c, json, node, path, error);
        case RULE_QUANTIZED: return null || hf_check_quantized(json, node, path, error);
        case RULE_WINDOW:
            if (null || (json_number(json, node, &window) && window >= (double)c->context)) return true;
            return hf_refuse(path, key, value, "no window, or one of at least max_position_embeddings", error);
        case RULE_LAYERS:
            if (null) return true;
            for (uint32_t i = json_first(json, node); i != JSON_NONE; i = json_next(json, i)) {
                json_scalar_text(value, json, i);
                if (choice_find(rule->values, value) < 0) return hf_refuse(path, key, value, rule->values, error);
            }
            return json_is(json, node, JSON_ARRAY) || empty || hf_refuse(path, key, value, rule->values, error);
    }
    return true;
}

static inline const Field* hf_keys(size_t* count, Family family) {
    *count = family == FAMILY_GPT2 ? (size_t)GPT2_KEY_COUNT : (size_t)LLAMA_KEY_COUNT;
    return family == FAMILY_GPT2 ? GPT2_KEYS : LLAMA_KEYS;
}

// The rule of a key for an architecture; NULL if there is none.
static inline const ConfigRule* hf_rule(const Architecture* a, const char* key) {
    for (size_t i = 0; i < CONFIG_RULE_COUNT; i++) {
        const ConfigRule* rule = &CONFIG_RULES[i];
        if (rule->types[0] && choice_find(rule->types, a->type) < 0) continue;
        if (choice_find(rule->keys, key) >= 0) return rule;
    }
    return NULL;
}

// Reads a configuration from the text of a config.json, parsed.
static inline bool hf_config_parse(Config* c, const Json* json, const char* path, Error* error) {
    char type[64] = "none";
    size_t count, which = 0;
    memset(c, 0, sizeof *c);
    if (!json_is(json, 0, JSON_OBJECT)) return fail_with(error, "%.600s is not an object; use another copy", path);
    if (json_get(json, 0, "model_type") != JSON_NONE) json_scalar_text(type, json, json_get(json, 0, "model_type"));
    while (which < ARCHITECTURE_COUNT && strcmp(ARCHITECTURES[which].type, type) != 0) which++;
    if (which == ARCHITECTURE_COUNT)
        return hf_refuse(path, "model_type", type, "gpt2, llama, mistral, qwen2 and qwen3", error);
    const Architecture* a = &ARCHITECTURES[which];
    c->family = a->family;
    c->qkv_bias = a->qkv_bias;
    c->qk_norm = a->qk_norm;
    const Field* keys = hf_keys(&count, a->family);
    // A model with another head may have the tensors of one without any.
    uint32_t classes = json_get(json, 0, "architectures");
    for (uint32_t i = json_first(json, classes); i != JSON_NONE; i = json_next(json, i)) {
        json_scalar_text(type, json, i);
        if (strstr(type, "Classification") || strstr(type, "QuestionAnswering"))
            return hf_refuse(path, "architectures", type, a->class_name, error);
    }
    for (size_t i = 0; i < count; i++) {
        Field key = keys[i];
        if (choice_find(a->needs, key.name) >= 0) key.missing = NULL;
        if (key.offset == offsetof(Config, context)) key.missing = a->context;
        if (!hf_read_key(c, &key, json, 0, path, error)) return false;
    }
    // A Mistral configuration that does not mention its window has one of 4096 tokens.
    if (strcmp(a->type, "mistral") == 0 && json_get(json, 0, "sliding_window") == JSON_NONE && c->context > 4096)
        return fail_with(error, "%.600s lacks \"sliding_window\", whose default is 4096 tokens, fewer than its context "
                         "of %zu; use a model without a window", path, c->context);
    char unknown[400] = "";
    size_t length = 0, more = 0;
    for (uint32_t i = json_first(json, 0); i != JSON_NONE; i = json_next(json, i)) {
        const char* name = json_key(json, i);
        const ConfigRule* rule = hf_rule(a, name);
        bool member = false;
        for (size_t k = 0; k < count; k++) member |= strcmp(keys[k].name, name) == 0;
        if (member) continue;
        if (rule && !hf_check_key(c, rule, json, i, path, error)) return false;
        if (rule == NULL && length + strlen(name) + 8 < sizeof unknown)
            length += (size_t)snprintf(unknown + length, sizeof unknown - length, "%s\"%s\"", length ? ", " : "", name);
        else if (rule == NULL) more++;
    }
    if (length + more == 0) return true;
    return fail_with(error, "%.600s has keys that this program does not know for %s: %s%s; remove those that do not "
                     "change what the model computes", path, a->type, unknown, more ? " and more" : "");
}

// Fails with a sentence about the flags of a configuration, which came from a file: about its keys. hf: of config.json.
static inline bool convert_fail(const char* path, const Config* c, bool hf, const char* sentence, Error* error) {
    char text[400];
    size_t length = 0, count;
    const Field* keys = hf_keys(&count, c->family);
    while (*sentence && length + 64 < sizeof text) {
        size_t n = strncmp(sentence, "--", 2) == 0 ? strspn(sentence + 2, "abcdefghijklmnopqrstuvwxyz-") : 0;
        const char* key = NULL;
        for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
            const Field* field = &CONFIG_FIELDS[i];
            if (n == 0 || strlen(field->flag) != n || strncmp(field->flag, sentence + 2, n) != 0) continue;
            key = field->name;
            for (size_t k = 0; hf && k < count; k++) if (keys[k].offset == field->offset) key = keys[k].name;
            for (size_t k = 1; hf && k < ROPE_KEY_COUNT; k++)
                if (ROPE_KEYS[k].offset == field->offset) key = ROPE_KEYS[k].name;
        }
        if (key) length += (size_t)snprintf(text + length, sizeof text - length, "\"%s\"", key);
        else text[length++] = *sentence;
        sentence += key ? n + 2 : 1;
    }
    text[length] = 0;
    return fail_with(error, "%.500s: %s", path, text);
}

// Completes and checks a configuration from a file; refuses a value outside the limits of its flag. config_complete
// fills in zeros. hf: it is config.json.
static inline bool convert_complete(Config* c, const char* path, bool hf, Error* error) {
    Error why;
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* field = &CONFIG_FIELDS[i];
        Config copy = *c;
        Flag flag = field_flag(field, &copy);
        char text[64];
        field_text(text, sizeof text, field, c);
        bool zero = strcmp(text, "0") == 0 || (field->kind != KIND_COUNT && field->kind != KIND_REAL);
        if (!zero && !flag_set(&flag, text, &why)) return convert_fail(path, c, hf, why.text, error);
    }
    if (c->heads > 0 && c->head_size * c->heads == c->channels) c->head_size = 0;  // 0 means the same
    return config_complete(c, &why) || convert_fail(path, c, hf, why.text, error);
}

static inline bool hf_json_open(Json* json, const char* path, Error* error) {
    char* text;
    size_t bytes;
    if (!file_read(path, CONFIG_JSON_MAX, &text, &bytes, error)) return false;
    bool ok = json_parse(json, text, bytes, path, error);
    free(text);
    return ok;
}

// Reads config.json at a path.
static inline bool hf_config_read(Config* c, const char* path, Error* error) {
    Json json;
    if (!hf_json_open(&json, path, error)) return false;
    bool ok = hf_config_parse(c, &json, path, error) && convert_complete(c, path, true, error);
    json_free(&json);
    return ok;
}

// Reads the ids of tokens that a config.json or generation_config.json names: each a number, the ends also a list;
// null, or below 0: none.
static inline bool hf_read_ids(TokenIds* ids, const char* path, Error* error) {
    static const char* const keys[3] = {"bos_token_id", "pad_token_id", "eos_token_id"};
    Json json;
    bool ok = hf_json_open(&json, path, error);
    if (!ok) return false;
    for (int k = 0; k < 3; k++) {
        uint32_t node = json_get(&json, 0, keys[k]);
        bool list = k == 2 && json_is(&json, node, JSON_ARRAY);
        for (uint32_t i = list ? json_first(&json, node) : node; ok && !json_absent(&json, i);
             i = list ? json_next(&json, i) : JSON_NONE) {
            double id = 0;
            ok = (json_number(&json, i, &id) && id < (double)VOCABULARY_MAX && ids->count < END_TOKENS_MAX) ||
                 fail_with(error, "%.600s: \"%s\" is not the id of a token, or a list of them; use another copy", path,
                           keys[k]);
            if (ok && id >= 0) *(k == 0 ? &ids->begin : k == 1 ? &ids->pad : &ids->ends[ids->count++]) = (int32_t)id;
        }
    }
    json_free(&json);
    return ok;
}

// Writes the members. A real number gets a decimal point, since transformers checks its type.
static inline void hf_write_keys(JsonWriter* w, const Field* keys, size_t count, const Config* c) {
    for (size_t i = 0; i < count; i++) {
        double value = 0;
        char text[48];
        if (keys[i].kind == KIND_REAL) memcpy(&value, (const char*)c + keys[i].offset, sizeof value);
        snprintf(text, sizeof text, "%.1f", value);
        if (keys[i].kind != KIND_REAL || strtod(text, NULL) != value) {
            fields_write(w, &keys[i], 1, c);
            continue;
        }
        json_write_key(w, keys[i].name);
        json_write_raw(w, text);
    }
}

// Writes the members that hf_read_ids reads.
static inline void hf_write_ids(JsonWriter* w, const TokenIds* ids) {
    json_write_key(w, "bos_token_id");
    if (ids->begin < 0) json_write_raw(w, "null");
    else json_write_u64(w, (uint64_t)ids->begin);
    json_write_key(w, "eos_token_id");
    if (ids->count == 0) json_write_raw(w, "null");
    if (ids->count > 1) json_write_begin(w, '[');
    for (size_t i = 0; i < ids->count; i++) json_write_u64(w, (uint64_t)ids->ends[i]);
    if (ids->count > 1) json_write_end(w, ']');
    if (ids->pad >= 0) json_member_u64(w, "pad_token_id", (uint64_t)ids->pad);
}

// Writes config.json.
static inline bool hf_config_write(JsonWriter* w, const Config* config, Dtype dtype, const TokenIds* ids,
                                   Error* error) {
    const Architecture* a = architecture_of(config);
    Config c = *config;
    size_t count;
    if (a == NULL)
        return fail_with(error, "no Hugging Face architecture has this model's combination of --family, --qkv-bias, "
                         "--qk-norm, --kv-heads and --head-size; export it as another format");
    c.head_size = config_head_size(config);
    const Field* keys = hf_keys(&count, a->family);
    memset(w, 0, sizeof *w);
    w->line_depth = 1;
    json_write_begin(w, '{');
    json_member_begin(w, "architectures", '[');
    json_write_string(w, a->class_name);
    json_write_end(w, ']');
    json_member_string(w, "model_type", a->type);
    hf_write_keys(w, keys, count, &c);
    for (size_t i = 0; i < CONFIG_RULE_COUNT; i++) {
        const ConfigRule* rule = &CONFIG_RULES[i];
        if (rule->written == NULL || hf_rule(a, rule->keys) != rule) continue;
        json_write_key(w, rule->keys);
        json_write_raw(w, rule->written);
    }
    if (c.rope_scaling != ROPE_SCALING_NONE && a->family == FAMILY_LLAMA) {
        char kind[32];
        choice_name(HF_ROPE_TYPES, (int)c.rope_scaling, kind, sizeof kind);
        json_member_begin(w, "rope_scaling", '{');
        json_member_string(w, "rope_type", kind);
        hf_write_keys(w, ROPE_KEYS + 1, c.rope_scaling == ROPE_SCALING_LINEAR ? 1 : ROPE_KEY_COUNT - 1, &c);
        json_write_end(w, '}');
    }
    hf_write_ids(w, ids);
    json_member_string(w, "torch_dtype", dtype == DTYPE_F32 ? "float32" : dtype == DTYPE_F16 ? "float16" : "bfloat16");
    json_write_end(w, '}');
    json_put(w, "\n", 1);
    return json_write_done(w, error);
}

#endif  // LLMTRAIN_CONVERT_H
