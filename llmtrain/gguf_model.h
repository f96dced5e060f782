// gguf_model.h: a model as a GGUF file: what llama.cpp calls its sizes and tensors, and its tokenizer.
//
//   1. architecture   which of llama.cpp's a configuration is: gpt2, llama, qwen2, qwen3
//   2. tensors        a row per tensor of theirs: which rows of which of ours it has
//   3. tokenizer      the vocabulary, merges or scores, and special tokens
//   4. file           gguf_export
//
//   bool ok = gguf_export("model.gguf", &config, &parameters, &tokenizer, GGUF_Q8_0, read, context, &error);
//
// `read` gives parts of our tensors as floats, from wherever they are: the model need not be in memory. Matrices have
// the type that is asked for; vectors and positions are f32, and so is a matrix in Q8_0 whose rows are no multiple of
// 32 elements in f16. What llama.cpp could not compute as we do is refused.

#ifndef LLMTRAIN_GGUF_MODEL_H
#define LLMTRAIN_GGUF_MODEL_H

#include "../llmtrain.h"  // Config, Parameters
#include "gguf.h"
#include "tokenizer.h"

// Elements [first, first + count) of a tensor, as floats.
typedef bool (*TensorRead)(float* out, void* context, const Tensor* tensor, size_t first, size_t count, Error* error);

// ------------------------------------------------------------------------------------------------
// 1. Architecture

// The architecture of llama.cpp that computes what a configuration says; NULL if there is none. Llama's takes biases of
// queries, keys and values too; Qwen2 is what such models are called where it can say all that they are.
static inline const char* gguf_architecture(const Config* c, Error* error) {
    bool square = c->heads * config_head_size(c) == c->channels, stretched = c->rope_scaling == ROPE_SCALING_LLAMA3;
    if (c->family == FAMILY_GPT2 && square) return "gpt2";
    if (c->family == FAMILY_GPT2)
        fail(error, "llama.cpp has no GPT-2 whose heads times their size, %zu, differ from its channels, %zu; export "
             "to another format", c->heads * config_head_size(c), c->channels);
    else if (c->qk_norm && stretched)
        fail(error, "llama.cpp has no architecture with norms of queries and keys and RoPE scaling llama3; export to "
             "another format");
    else
        return c->qk_norm ? "qwen3" : c->qkv_bias && square && !stretched ? "qwen2" : "llama";
    return NULL;
}

// A value whose name begins with the architecture's.
static inline void gguf_size(GgufWriter* w, const char* architecture, const char* key, size_t value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", architecture, key);
    gguf_u32(w, name, value);
}
static inline void gguf_real(GgufWriter* w, const char* architecture, const char* key, double value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", architecture, key);
    gguf_float(w, name, value);
}

static inline void gguf_put_config(GgufWriter* w, const Config* c, const char* architecture) {
    bool llama = c->family == FAMILY_LLAMA;
    char name[96];
    gguf_size(w, architecture, "context_length", c->context);
    gguf_size(w, architecture, "embedding_length", c->channels);
    gguf_size(w, architecture, "block_count", c->layers);
    gguf_size(w, architecture, "feed_forward_length", c->ffn);
    gguf_size(w, architecture, "attention.head_count", c->heads);
    gguf_size(w, architecture, "attention.head_count_kv", c->kv_heads);
    gguf_size(w, architecture, "vocab_size", c->vocab);
    gguf_real(w, architecture, llama ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon",
              c->norm_epsilon);
    if (!llama) return;
    gguf_size(w, architecture, "attention.key_length", config_head_size(c));
    gguf_size(w, architecture, "attention.value_length", config_head_size(c));
    gguf_size(w, architecture, "rope.dimension_count", config_head_size(c));
    gguf_real(w, architecture, "rope.freq_base", c->rope_theta);
    if (c->rope_scaling != ROPE_SCALING_LINEAR) return;
    snprintf(name, sizeof name, "%s.rope.scaling.type", architecture);
    gguf_string(w, name, "linear");
    gguf_real(w, architecture, "rope.scaling.factor", c->rope_factor);
}

// ------------------------------------------------------------------------------------------------
// 2. Tensors
//
// llama.cpp has queries, keys and values, and Llama's gate and up, in tensors of their own. Its `llama` turns pairs
// (2i, 2i + 1) by RoPE, where we and all other architectures turn (i, i + D/2): there the rows of each query and key
// head are interleaved.

typedef enum { PART_ALL, PART_Q, PART_K, PART_V, PART_GATE, PART_UP } GgufPart;

static const struct {
    const char *ours, *theirs;  // of a block: after "block.N." and "blk.N."
    GgufPart part;              // the rows of ours that it has
    bool gpt2, llama;           // in which family
} GGUF_TENSORS[] = {
    {"token_embedding", "token_embd.weight", PART_ALL, true, true},
    {"position_embedding", "position_embd.weight", PART_ALL, true, false},
    {"norm1_weight", "attn_norm.weight", PART_ALL, true, true},
    {"norm1_bias", "attn_norm.bias", PART_ALL, true, false},
    {"qkv_weight", "attn_qkv.weight", PART_ALL, true, false},
    {"qkv_bias", "attn_qkv.bias", PART_ALL, true, false},
    {"qkv_weight", "attn_q.weight", PART_Q, false, true},
    {"qkv_weight", "attn_k.weight", PART_K, false, true},
    {"qkv_weight", "attn_v.weight", PART_V, false, true},
    {"qkv_bias", "attn_q.bias", PART_Q, false, true},
    {"qkv_bias", "attn_k.bias", PART_K, false, true},
    {"qkv_bias", "attn_v.bias", PART_V, false, true},
    {"q_norm_weight", "attn_q_norm.weight", PART_ALL, false, true},
    {"k_norm_weight", "attn_k_norm.weight", PART_ALL, false, true},
    {"attention_out_weight", "attn_output.weight", PART_ALL, true, true},
    {"attention_out_bias", "attn_output.bias", PART_ALL, true, false},
    {"norm2_weight", "ffn_norm.weight", PART_ALL, true, true},
    {"norm2_bias", "ffn_norm.bias", PART_ALL, true, false},
    {"ffn_in_weight", "ffn_up.weight", PART_ALL, true, false},
    {"ffn_in_bias", "ffn_up.bias", PART_ALL, true, false},
    {"ffn_in_weight", "ffn_gate.weight", PART_GATE, false, true},
    {"ffn_in_weight", "ffn_up.weight", PART_UP, false, true},
    {"ffn_out_weight", "ffn_down.weight", PART_ALL, true, true},
    {"ffn_out_bias", "ffn_down.bias", PART_ALL, true, false},
    {"final_norm_weight", "output_norm.weight", PART_ALL, true, true},
    {"final_norm_bias", "output_norm.bias", PART_ALL, true, false},
    {"head_weight", "output.weight", PART_ALL, true, true},
};
enum { GGUF_TENSOR_ROWS = sizeof GGUF_TENSORS / sizeof GGUF_TENSORS[0] };

// A tensor of theirs.
typedef struct {
    char name[64];
    const Tensor* from;
    size_t first, rows, cols;  // rows [first, first + rows) of ours; cols 0: a vector
    bool interleaved;
    GgufType type;
} GgufSource;

// The rows of qkv or ffn_in that a part has.
static inline void gguf_part_rows(size_t* first, size_t* rows, const Config* c, GgufPart part, size_t all) {
    size_t D = config_head_size(c), H = c->heads, K = c->kv_heads;
    *first = part == PART_K ? H * D : part == PART_V ? (H + K) * D : part == PART_UP ? c->ffn : 0;
    *rows = part == PART_Q ? H * D : part == PART_K || part == PART_V ? K * D : part == PART_ALL ? all : c->ffn;
}

// Whether table row `row` is made of a tensor of ours, and what it then is.
static inline bool gguf_source(GgufSource* s, const Config* c, const Tensor* t, size_t row, bool interleaves,
                               GgufType type) {
    size_t block = 0;
    int prefix = 0;
    if (!(c->family == FAMILY_GPT2 ? GGUF_TENSORS[row].gpt2 : GGUF_TENSORS[row].llama)) return false;
    if (sscanf(t->name, "block.%zu.%n", &block, &prefix) != 1) prefix = 0;
    if (strcmp(t->name + prefix, GGUF_TENSORS[row].ours) != 0) return false;
    GgufPart part = GGUF_TENSORS[row].part;
    if (prefix) snprintf(s->name, sizeof s->name, "blk.%zu.%s", block, GGUF_TENSORS[row].theirs);
    else snprintf(s->name, sizeof s->name, "%s", GGUF_TENSORS[row].theirs);
    s->from = t;
    s->cols = t->cols;
    gguf_part_rows(&s->first, &s->rows, c, part, t->rows);
    s->interleaved = interleaves && (part == PART_Q || part == PART_K);
    s->type = type;
    if (type == GGUF_Q8_0 && t->cols % Q8_BLOCK != 0) s->type = GGUF_F16;
    if (t->cols == 0 || strcmp(t->name, "position_embedding") == 0) s->type = GGUF_F32;
    return true;
}

// Calls `visit` for each tensor of theirs, in the order of the flat vector.
static inline bool gguf_for_each(GgufWriter* w, const Config* c, const Parameters* p, bool interleaves, GgufType type,
                                 bool (*visit)(GgufWriter* w, const GgufSource* s, void* context, Error* error),
                                 void* context, Error* error) {
    for (size_t i = 0; i < p->count; i++) {
        size_t found = 0;
        for (size_t row = 0; row < GGUF_TENSOR_ROWS; row++) {
            GgufSource s;
            if (!gguf_source(&s, c, &p->tensors[i], row, interleaves, type)) continue;
            found++;
            if (!visit(w, &s, context, error)) return false;
        }
        if (found == 0)
            return fail(error, "llama.cpp has no name for %s; export to another format", p->tensors[i].name);
    }
    return true;
}

static inline bool gguf_declare_source(GgufWriter* w, const GgufSource* s, void* context, Error* error) {
    const size_t shape[2] = {s->rows, s->cols};
    (void)context;
    (void)error;
    gguf_declare(w, s->name, s->type, shape, s->cols ? 2 : 1);
    return true;
}

// Where the elements come from, and memory for some of them.
typedef struct {
    TensorRead read;
    void* context;
    size_t D;
    float *values, *interleaved;  // (size)
    size_t size;
} GgufPieces;

static inline bool gguf_write_source(GgufWriter* w, const GgufSource* s, void* context, Error* error) {
    GgufPieces* pieces = (GgufPieces*)context;
    size_t D = pieces->D, cols = max_size(s->cols, 1), unit = s->interleaved ? D : pieces->size / cols;
    for (size_t row = 0; row < s->rows; row += unit) {
        size_t rows = min_size(unit, s->rows - row);
        const float* out = pieces->values;
        if (!pieces->read(pieces->values, pieces->context, s->from, (s->first + row) * cols, rows * cols, error))
            return false;
        for (size_t i = 0; s->interleaved && i < D; i++)  // row i of the head goes between those of the other half
            memcpy(pieces->interleaved + (i % (D / 2) * 2 + i / (D / 2)) * cols, pieces->values + i * cols,
                   cols * sizeof(float));
        if (s->interleaved) out = pieces->interleaved;
        if (!gguf_write(w, out, rows * cols, error)) return false;
    }
    return true;
}

// By what RoPE scaling llama3 divides the frequency of each pair: a tensor (D/2) in llama.cpp's architecture llama.
static inline bool gguf_write_rope(GgufWriter* w, const Config* c, Error* error) {
    float divisors[ATTENTION_MAX_D / 2];
    size_t D = config_head_size(c);
    RopeOptions scaled = config_rope(c), usual = scaled;
    usual.scaling = ROPE_SCALING_NONE;
    for (size_t i = 0; i < D / 2; i++)
        divisors[i] = (float)(rope_frequency(&usual, i, D) / rope_frequency(&scaled, i, D));
    return gguf_write(w, divisors, D / 2, error);
}

// ------------------------------------------------------------------------------------------------
// 3. Tokenizer
//
// Tokens are written as llama.cpp has them: those of byte-level tokenizers with GPT-2's character for each byte.

typedef enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN = 2, TOKEN_CONTROL = 3, TOKEN_USER = 4, TOKEN_UNUSED = 5,
               TOKEN_BYTE = 6 } GgufTokenType;

// A model of bytes: a token per byte, and no merges. llama.cpp ends a text at the end-of-text token, and takes token 11
// where a file names none; so it is byte 0, which a text does not have.
static inline void gguf_put_bytes(GgufWriter* w) {
    gguf_string(w, "tokenizer.ggml.model", "gpt2");
    gguf_string(w, "tokenizer.ggml.pre", "gpt-2");
    gguf_array_begin(w, "tokenizer.ggml.tokens", GGUF_STRING);
    for (unsigned byte = 0, others = 0; byte < 256; byte++) {
        bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        unsigned character = visible ? byte : 256 + others++;
        char text[2] = {(char)(0xC0 | character >> 6), (char)(0x80 | (character & 0x3F))};
        if (character < 128) text[0] = (char)character;
        gguf_element_text(w, text, character < 128 ? 1 : 2);
    }
    gguf_array_end(w);
    gguf_array_begin(w, "tokenizer.ggml.token_type", GGUF_I32);
    for (int i = 0; i < 256; i++) gguf_element_i32(w, TOKEN_NORMAL);
    gguf_array_end(w);
    gguf_array_begin(w, "tokenizer.ggml.merges", GGUF_STRING);
    gguf_array_end(w);
    gguf_u32(w, "tokenizer.ggml.bos_token_id", 0);
    gguf_u32(w, "tokenizer.ggml.eos_token_id", 0);
    gguf_bool(w, "tokenizer.ggml.add_bos_token", false);
}

// A tokenizer without a vocabulary is not known.
static inline bool gguf_put_tokenizer(GgufWriter* w, const Tokenizer* tokenizer, size_t V, Error* error) {
    if (tokenizer->vocabulary == 0) gguf_string(w, "tokenizer.ggml.model", "none");
    else if (V == 256) gguf_put_bytes(w);
    else return fail(error, "tokenizer");
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. File

static inline bool gguf_write_header(GgufWriter* w, const Config* c, const Parameters* p, const Tokenizer* tokenizer,
                                     const char* architecture, GgufType type, Error* error) {
    const size_t pairs = config_head_size(c) / 2;
    gguf_string(w, "general.architecture", architecture);
    gguf_u32(w, "general.file_type", GGUF_TYPES[gguf_type_row(type)].file_type);
    gguf_u32(w, "general.quantization_version", 2);
    gguf_put_config(w, c, architecture);
    if (!gguf_put_tokenizer(w, tokenizer, c->vocab, error)) return false;
    if (c->rope_scaling == ROPE_SCALING_LLAMA3) gguf_declare(w, "rope_freqs.weight", GGUF_F32, &pairs, 1);
    return gguf_for_each(w, c, p, false, type, gguf_declare_source, NULL, error) && gguf_begin(w, error);
}

// Writes a model of a complete configuration, whose tensors `p` lists and `read` gives.
static inline bool gguf_export(const char* path, const Config* c, const Parameters* p, const Tokenizer* tokenizer,
                               GgufType type, TensorRead read, void* context, Error* error) {
    GgufWriter w;
    GgufPieces pieces = {read, context, config_head_size(c), NULL, NULL, GGUF_PIECE};
    const char* architecture = gguf_architecture(c, error);
    if (architecture == NULL || !gguf_create(&w, path, error)) return false;
    for (size_t i = 0; i < p->count; i++)
        pieces.size = max_size(pieces.size, max_size(p->tensors[i].cols, 1) * pieces.D);
    pieces.values = (float*)allocate(pieces.size * sizeof(float));
    pieces.interleaved = (float*)allocate(pieces.size * sizeof(float));
    bool ok = (pieces.values && pieces.interleaved) ||
              fail(error, "not enough memory to write %.600s; free some memory", path);
    ok = ok && gguf_write_header(&w, c, p, tokenizer, architecture, type, error);
    if (ok && c->rope_scaling == ROPE_SCALING_LLAMA3) ok = gguf_write_rope(&w, c, error);
    ok = ok && gguf_for_each(&w, c, p, strcmp(architecture, "llama") == 0, type, gguf_write_source, &pieces, error) &&
         gguf_end(&w, error);
    gguf_writer_free(&w);
    free(pieces.values);
    free(pieces.interleaved);
    return ok;
}

#endif  // LLMTRAIN_GGUF_MODEL_H
