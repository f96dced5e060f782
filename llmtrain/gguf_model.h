// gguf_model.h: a model as a GGUF file: what llama.cpp calls its sizes and tensors, and its tokenizer.
//
//   1. architecture   which of llama.cpp's a configuration is: gpt2, llama, qwen2, qwen3
//   2. tensors        their names are in convert.h; how their rows stand
//   3. tokenizer      the vocabulary, merges or scores, and special tokens
//   4. file           gguf_export
//
//   bool ok = gguf_export("model.gguf", &config, &parameters, &tokenizer, GGUF_Q8_0, read, context, &error);
//
// `read` gives a tensor of ours as floats, from wherever it is: one at a time is in memory. Matrices have the type that
// is asked for, but f16 in place of Q8_0 where a row is no multiple of 32 elements; vectors and positions are f32. What
// llama.cpp could not compute as we do is refused.

#ifndef LLMTRAIN_GGUF_MODEL_H
#define LLMTRAIN_GGUF_MODEL_H

#include "convert.h"  // Config, Parameters, the tables of tensors
#include "gguf.h"
#include "tokenizer.h"

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
// llama.cpp has the tensors of Hugging Face under names of its own, and matrices as we do, not transposed. Its `llama`
// turns pairs (2i, 2i + 1) by RoPE, where we and its other architectures turn (i, i + D/2): there the rows of each head
// of queries and keys are interleaved.

// All elements of tensor `number` of the table, as floats.
typedef bool (*TensorRead)(float* values, void* context, size_t number, Error* error);

static inline GgufType gguf_tensor_type(const ForeignTensor* f, const Tensor* t, GgufType type) {
    if (f->cols == 0 || strcmp(t->name, "position_embedding") == 0) return GGUF_F32;
    return type == GGUF_Q8_0 && f->cols % Q8_BLOCK != 0 ? GGUF_F16 : type;
}

static inline void gguf_declare_all(GgufWriter* w, const ForeignTensor* list, size_t count, const Config* c,
                                    const Parameters* p, GgufType type) {
    const size_t pairs = config_head_size(c) / 2;
    if (c->rope_scaling == ROPE_SCALING_LLAMA3) gguf_declare(w, "rope_freqs.weight", GGUF_F32, &pairs, 1);
    for (size_t i = 0; i < count; i++) {
        const ForeignTensor* f = &list[i];
        const Tensor* t = &p->tensors[f->tensor];
        const size_t shape[2] = {f->rows, f->cols};
        size_t block;
        char name[96];
        convert_matches(&block, t->name, TENSOR_NAMES[f->row].ours);
        convert_name(name, sizeof name, TENSOR_NAMES[f->row].gguf, block);
        gguf_declare(w, name, gguf_tensor_type(f, t, type), shape, f->cols ? 2 : 1);
    }
}

// Writes heads of D rows each, interleaved; head (D * cols) is scratch.
static inline bool gguf_write_interleaved(GgufWriter* w, const float* values, float* head, size_t rows, size_t cols,
                                          size_t D, Error* error) {
    for (size_t first = 0; first < rows; first += D) {
        for (size_t i = 0; i < D; i++)  // row i goes between those of the other half
            memcpy(head + (i % (D / 2) * 2 + i / (D / 2)) * cols, values + (first + i) * cols, cols * sizeof(float));
        if (!gguf_write(w, head, D * cols, error)) return false;
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

// Writes the data of all tensors; values (largest tensor) and head (D * its columns) are scratch.
static inline bool gguf_write_all(GgufWriter* w, const ForeignTensor* list, size_t count, const Config* c,
                                  bool interleaves, TensorRead read, void* context, float* values, float* head,
                                  Error* error) {
    size_t held = NO_TENSOR;  // the tensor of ours in values
    if (c->rope_scaling == ROPE_SCALING_LLAMA3 && !gguf_write_rope(w, c, error)) return false;
    for (size_t i = 0; i < count; i++) {
        const ForeignTensor* f = &list[i];
        size_t cols = max_size(f->cols, 1);
        TensorPart part = TENSOR_NAMES[f->row].part;
        if (held != f->tensor && !read(values, context, f->tensor, error)) return false;
        held = f->tensor;
        const float* from = values + f->first * cols;
        bool ok = interleaves && (part == PART_Q || part == PART_K)
                      ? gguf_write_interleaved(w, from, head, f->rows, cols, config_head_size(c), error)
                      : gguf_write(w, from, f->rows * cols, error);
        if (!ok) return false;
    }
    return true;
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

// tokenizer NULL: it is not known.
static inline bool gguf_put_tokenizer(GgufWriter* w, const Tokenizer* tokenizer, size_t V, Error* error) {
    if (tokenizer == NULL) gguf_string(w, "tokenizer.ggml.model", "none");
    else if (V == 256) gguf_put_bytes(w);
    else return fail(error, "tokenizer");
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. File

// Writes a model of a complete configuration, whose tensors `p` lists and `read` gives. tokenizer NULL: not known.
static inline bool gguf_export(const char* path, const Config* c, const Parameters* p, const Tokenizer* tokenizer,
                               GgufType type, TensorRead read, void* context, Error* error) {
    GgufWriter w;
    ForeignTensor* list = NULL;
    size_t count, largest = 0, widest = 1;
    const char* architecture = gguf_architecture(c, error);
    if (architecture == NULL || !gguf_create(&w, path, error)) return false;
    for (size_t i = 0; i < p->count; i++) {
        largest = max_size(largest, tensor_elements(&p->tensors[i]));
        widest = max_size(widest, p->tensors[i].cols);
    }
    float* values = (float*)allocate(largest * sizeof(float));
    float* head = (float*)allocate(config_head_size(c) * widest * sizeof(float));
    bool ok = (values && head) || fail(error, "not enough memory to write %.600s; free some memory", path);
    gguf_string(&w, "general.architecture", architecture);
    gguf_u32(&w, "general.file_type", GGUF_TYPES[gguf_type_row(type)].file_type);
    gguf_u32(&w, "general.quantization_version", 2);
    gguf_put_config(&w, c, architecture);
    ok = ok && gguf_put_tokenizer(&w, tokenizer, c->vocab, error) && convert_list(&list, &count, c, p, error);
    if (ok) gguf_declare_all(&w, list, count, c, p, type);
    ok = ok && gguf_begin(&w, error) &&
         gguf_write_all(&w, list, count, c, strcmp(architecture, "llama") == 0, read, context, values, head, error) &&
         gguf_end(&w, error);
    gguf_writer_free(&w);
    free(values);
    free(head);
    free(list);
    return ok;
}

#endif  // LLMTRAIN_GGUF_MODEL_H
