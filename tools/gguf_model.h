// gguf_model.h: a model as a GGUF file: its sizes and tensors by llama.cpp's names, and its tokenizer.
//
//   1. architecture   llama.cpp's name for a configuration: gpt2, llama, qwen2, qwen3
//   2. tensors        the order of their rows; their names are in convert.h
//   3. tokenizer      the vocabulary, merges or scores, and special tokens
//   4. file           gguf_export
//
//   bool ok = gguf_export("model.gguf", &config, &parameters, &tokenizer, GGUF_Q8_0, read, context, &error);
//
// `read` returns a tensor of ours as floats, from any source: one at a time is in memory. Matrices have the requested
// type, but f16 instead of Q8_0 if a row is not a multiple of 32 elements; vectors and positions are f32.
// A model that llama.cpp would compute differently is refused.

#ifndef LLMTRAIN_GGUF_MODEL_H
#define LLMTRAIN_GGUF_MODEL_H

#include "../llmtrain/checkpoint/convert.h"  // Config, Parameters, the tables of tensors
#include "gguf.h"
#include "../llmtrain/text/tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Architecture

// The architecture of llama.cpp that computes this configuration; NULL if there is none. Its `llama` takes biases of
// queries, keys and values too; a model with them is called `qwen2` if that can express everything else.
static inline const char* gguf_architecture(const Config* c, Error* error) {
    bool square = c->heads * config_head_size(c) == c->channels, stretched = c->rope_scaling == ROPE_SCALING_LLAMA3;
    if (c->family == FAMILY_GPT2 && square) return "gpt2";
    if (c->family == FAMILY_GPT2)
        fail_with(error, "llama.cpp has no GPT-2 whose heads times head size, %zu, differ from its channels, %zu; "
                  "export to another format", c->heads * config_head_size(c), c->channels);
    else if (c->qk_norm && stretched)
        fail_with(error, "llama.cpp has no architecture with both QK norm and llama3 RoPE scaling; export to another "
                  "format");
    else
        return c->qk_norm ? "qwen3" : c->qkv_bias && square && !stretched ? "qwen2" : "llama";
    return NULL;
}

// A value's name, which begins with the architecture.
static inline const char* gguf_name(char name[96], const char* architecture, const char* key) {
    snprintf(name, 96, "%s.%s", architecture, key);
    return name;
}

static inline void gguf_put_config(GgufWriter* w, const Config* c, const char* a) {
    bool llama = c->family == FAMILY_LLAMA;
    char name[96];
    gguf_u32(w, gguf_name(name, a, "context_length"), c->context);
    gguf_u32(w, gguf_name(name, a, "embedding_length"), c->channels);
    gguf_u32(w, gguf_name(name, a, "block_count"), c->layers);
    gguf_u32(w, gguf_name(name, a, "feed_forward_length"), c->ffn);
    gguf_u32(w, gguf_name(name, a, "attention.head_count"), c->heads);
    gguf_u32(w, gguf_name(name, a, "attention.head_count_kv"), c->kv_heads);
    gguf_u32(w, gguf_name(name, a, "vocab_size"), c->vocab);
    gguf_float(w, gguf_name(name, a, llama ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon"),
              c->norm_epsilon);
    if (!llama) return;
    gguf_u32(w, gguf_name(name, a, "attention.key_length"), config_head_size(c));
    gguf_u32(w, gguf_name(name, a, "attention.value_length"), config_head_size(c));
    gguf_u32(w, gguf_name(name, a, "rope.dimension_count"), config_head_size(c));
    gguf_float(w, gguf_name(name, a, "rope.freq_base"), c->rope_theta);
    if (c->rope_scaling != ROPE_SCALING_LINEAR) return;
    gguf_string(w, gguf_name(name, a, "rope.scaling.type"), "linear");
    gguf_float(w, gguf_name(name, a, "rope.scaling.factor"), c->rope_factor);
}

// ------------------------------------------------------------------------------------------------
// 2. Tensors
//
// llama.cpp has the tensors of Hugging Face under its own names, with matrices as ours are, not transposed. In its
// `llama` RoPE rotates pairs (2i, 2i + 1), where we and its other architectures rotate (i, i + D/2): so for `llama` the
// rows of each head of queries and keys are interleaved.

// All elements of tensor `number` of the table, as floats, until the next call.
typedef bool (*TensorRead)(const float** values, void* context, size_t number, Error* error);

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
        for (size_t i = 0; i < D; i++)  // row i goes between rows of the other half
            memcpy(head + (i % (D / 2) * 2 + i / (D / 2)) * cols, values + (first + i) * cols, cols * sizeof(float));
        if (!gguf_write(w, head, D * cols, error)) return false;
    }
    return true;
}

// Writes the divisors of the pairs' frequencies in RoPE scaling llama3: a tensor (D/2) in llama.cpp's `llama`.
static inline bool gguf_write_rope(GgufWriter* w, const Config* c, Error* error) {
    float divisors[ATTENTION_MAX_D / 2];
    size_t D = config_head_size(c);
    RopeOptions scaled = config_rope(c), usual = scaled;
    usual.scaling = ROPE_SCALING_NONE;
    for (size_t i = 0; i < D / 2; i++)
        divisors[i] = (float)(rope_frequency(&usual, i, D) / rope_frequency(&scaled, i, D));
    return gguf_write(w, divisors, D / 2, error);
}

// Writes the data of all tensors; head (D * its columns) is scratch.
static inline bool gguf_write_all(GgufWriter* w, const ForeignTensor* list, size_t count, const Config* c,
                                  bool interleaves, TensorRead read, void* context, float* head, Error* error) {
    if (c->rope_scaling == ROPE_SCALING_LLAMA3 && !gguf_write_rope(w, c, error)) return false;
    for (size_t i = 0; i < count; i++) {
        const ForeignTensor* f = &list[i];
        size_t cols = max_size(f->cols, 1);
        StackPart part = TENSOR_NAMES[f->row].part;
        const float* values;
        if (!read(&values, context, f->tensor, error)) return false;
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
// Ours are of two kinds that llama.cpp has. "gpt2" is byte-level: its tokens are written with a visible character for
// each byte, with a list of merges and the name of the pattern that splits words. "llama" is SentencePiece's: it joins
// any two neighbors that make a token, the one with the highest score first; here the scores follow the merges.
// llama.cpp does not normalize: NFC is left to its caller; and it puts a space in front of every text, or of none,
// while some tokenizers omit it before a text that begins with one. It ends a text at the end-of-text token, and picks
// some other one if a file names none; so we then name byte 0, which no text has.

typedef enum {
    GGUF_TOKEN_NORMAL = 1, GGUF_TOKEN_UNKNOWN, GGUF_TOKEN_CONTROL, GGUF_TOKEN_USER, GGUF_TOKEN_UNUSED, GGUF_TOKEN_BYTE
} GgufTokenType;

// llama.cpp's names for the ways of splitting words. whole_words: a word that is a token becomes that token.
static const struct {
    Split split;
    bool digits, whole_words;
    const char* name;
} GGUF_PATTERNS[] = {
    {SPLIT_GPT2, false, false, "gpt-2"},       {SPLIT_GPT2, true, false, "smollm"},
    {SPLIT_LLAMA3, false, true, "llama-bpe"},  {SPLIT_LLAMA3, false, false, "dbrx"},
    {SPLIT_QWEN2, false, false, "qwen2"},      {SPLIT_O200K, false, false, "gpt-4o"},
};
enum { GGUF_PATTERN_COUNT = sizeof GGUF_PATTERNS / sizeof GGUF_PATTERNS[0] };

// NULL if llama.cpp has none. With a rank file merges also produce every word that is a token.
static inline const char* gguf_pattern(const Tokenizer* tokenizer) {
    const Rules* rules = tokenizer->rules;
    bool whole_words = rules->vocabulary.whole_words && tokenizer->pattern == NULL;
    for (size_t i = 0; i < GGUF_PATTERN_COUNT; i++)
        if (GGUF_PATTERNS[i].split == rules->split && GGUF_PATTERNS[i].digits == rules->digits &&
            GGUF_PATTERNS[i].whole_words == whole_words) return GGUF_PATTERNS[i].name;
    return NULL;
}

// Whether a tokenizer changes a text only as llama.cpp's SentencePiece does, which turns spaces into U+2581.
static inline bool gguf_is_sentencepiece(const Rules* rules, bool* prefix) {
    bool spaces = rules->meta, other = rules->digits;
    *prefix = rules->prefix != PREFIX_NEVER;
    for (size_t i = 0; i < rules->normalizer_count; i++) {
        const Normalizer* n = &rules->normalizers[i];
        if (n->kind == NORMALIZE_PREPEND) {
            *prefix = true;
            other |= strcmp(n->content, METASPACE) != 0;
        } else if (n->kind == NORMALIZE_REPLACE) {
            spaces |= strcmp(n->pattern, " ") == 0 && strcmp(n->content, METASPACE) == 0;
            other |= strcmp(n->pattern, " ") != 0 || strcmp(n->content, METASPACE) != 0;
        }
    }
    for (int byte = 0; byte < 256; byte++) other |= rules->vocabulary.bytes[byte] < 0;
    return spaces && !other;
}

// Refuses a tokenizer that llama.cpp would apply differently.
static inline bool gguf_check_tokenizer(const Tokenizer* tokenizer, size_t V, Error* error) {
    const Rules* rules = tokenizer->rules;
    bool prefix;
    if (!tokenizer_fits(tokenizer, V))
        return fail_with(error, "the tokenizer has %d tokens but the model %zu; give the model's own",
                         tokenizer->vocabulary, V);
    if (rules == NULL) return true;
    if (rules->vocabulary.by_characters)
        return gguf_is_sentencepiece(rules, &prefix) ||
               fail_with(error, "llama.cpp has no character-level tokenizer that treats spaces as this one does, or "
                         "that lacks byte tokens; export to another format");
    if (rules->prefix != PREFIX_NEVER)
        return fail_with(error, "llama.cpp puts no space in front of a text, as this tokenizer does "
                         "(add_prefix_space); export to another format");
    for (size_t i = 0; i < rules->normalizer_count; i++)
        if (rules->normalizers[i].kind != NORMALIZE_NFC)
            return fail_with(error, "llama.cpp has no normalizer for byte-level tokenizers, which this one needs; "
                             "export to another format");
    return gguf_pattern(tokenizer) != NULL ||
           fail_with(error, "llama.cpp does not split words as this tokenizer does; export to another format");
}

// Appends bytes to a text, each as GPT-2's visible character. Room for 2 bytes each.
static inline size_t gguf_symbols(char* out, const char* bytes, size_t count) {
    size_t length = 0;
    for (size_t i = 0; i < count; i++) length += utf8_write(out + length, symbol_of_byte((unsigned char)bytes[i]));
    return length;
}

// A token as llama.cpp has it: its text, (2 * TOKEN_BYTES_MAX), and its type. Ids without a token are [PADid].
static inline size_t gguf_token(char* out, GgufTokenType* type, const Tokenizer* tokenizer, int32_t id) {
    size_t bytes;
    const char* piece = tokenizer_piece(&bytes, tokenizer, id);
    TokenKind kind = tokenizer_kind(tokenizer, id);
    const Vocabulary* v = tokenizer->rules ? &tokenizer->rules->vocabulary : NULL;
    *type = kind == TOKEN_SPECIAL ? GGUF_TOKEN_CONTROL : kind == TOKEN_ADDED ? GGUF_TOKEN_USER : GGUF_TOKEN_NORMAL;
    if (kind == TOKEN_ABSENT) {
        *type = GGUF_TOKEN_UNUSED;
        return (size_t)snprintf(out, 32, "[PAD%d]", id);
    }
    if (v && v->by_characters) {
        for (int byte = 0; byte < 256; byte++) if (v->bytes[byte] == id) *type = GGUF_TOKEN_BYTE;
        if (id == v->unknown) *type = GGUF_TOKEN_UNKNOWN;
        if (v->tokens[id].key_bytes > 0) piece = vocabulary_key(v, id, &bytes);
    } else if (kind == TOKEN_ORDINARY) {
        return gguf_symbols(out, piece, bytes);
    }
    memcpy(out, piece, bytes);
    return bytes;
}

static inline int gguf_compare_hashes(const void* left, const void* right) {
    uint64_t a = *(const uint64_t*)left, b = *(const uint64_t*)right;
    return (a > b) - (a < b);
}

// The arrays of tokens and their types, up to the model's vocabulary V. llama.cpp cannot read two tokens with one text.
static inline bool gguf_put_tokens(GgufWriter* w, const Tokenizer* tokenizer, size_t V, Error* error) {
    char text[2 * TOKEN_BYTES_MAX];
    GgufTokenType type;
    uint64_t* hashes = (uint64_t*)memory_allocate(V * sizeof(uint64_t));
    bool same = false;
    if (hashes == NULL) return fail_with(error, "out of memory for %zu tokens", V);
    gguf_array_begin(w, "tokenizer.ggml.tokens", GGUF_STRING);
    for (size_t id = 0; id < V; id++) {
        size_t bytes = gguf_token(text, &type, tokenizer, (int32_t)id);
        gguf_element_text(w, text, bytes);
        hashes[id] = hash_bytes(text, bytes);
    }
    gguf_array_end(w);
    gguf_array_begin(w, "tokenizer.ggml.token_type", GGUF_I32);
    for (size_t id = 0; id < V; id++) {
        gguf_token(text, &type, tokenizer, (int32_t)id);
        const int32_t number = (int32_t)type;
        gguf_element(w, &number, sizeof number);
    }
    gguf_array_end(w);
    qsort(hashes, V, sizeof *hashes, gguf_compare_hashes);
    for (size_t i = 1; i < V; i++) same |= hashes[i] == hashes[i - 1];
    free(hashes);
    return !same || fail_with(error, "two tokens of this tokenizer have the same text, which llama.cpp cannot read; "
                              "export to another format");
}

static inline int gguf_compare_merges(const void* left, const void* right) {
    const Merge* a = (const Merge*)left;
    const Merge* b = (const Merge*)right;
    if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    return a->left < b->left ? -1 : a->left > b->left;  // two merges to one token differ in their left parts
}

// Writes the merges by rank: for byte-level tokenizers as a list, otherwise as scores of 0 and less.
static inline bool gguf_put_merges(GgufWriter* w, const Vocabulary* v, size_t V, Error* error) {
    char text[4 * TOKEN_BYTES_MAX + 1];
    Merge* merges = (Merge*)memory_allocate(v->merge_slots * sizeof(Merge));
    float* scores = (float*)memory_allocate(V * sizeof(float));
    size_t count = 0;
    bool ok = (merges && scores) || fail_with(error, "out of memory for the merges");
    for (size_t i = 0; ok && i < v->merge_slots; i++)
        if (v->merges[i].rank != MERGE_NONE && v->merges[i].id < V) merges[count++] = v->merges[i];
    if (ok) qsort(merges, count, sizeof *merges, gguf_compare_merges);
    if (ok && v->by_characters) {
        for (size_t id = 0; id < V; id++) scores[id] = -(float)count;
        for (size_t i = count; i-- > 0;) scores[merges[i].id] = -(float)i;  // a token's first merge counts
        gguf_array_begin(w, "tokenizer.ggml.scores", GGUF_FLOAT);
        for (size_t id = 0; id < V; id++) gguf_element(w, &scores[id], sizeof scores[id]);
        gguf_array_end(w);
    } else if (ok) {
        gguf_array_begin(w, "tokenizer.ggml.merges", GGUF_STRING);
        for (size_t i = 0; i < count; i++) {
            size_t bytes, length;
            const char* key = vocabulary_key(v, (int32_t)merges[i].left, &bytes);
            length = gguf_symbols(text, key, bytes);
            text[length++] = ' ';
            key = vocabulary_key(v, (int32_t)merges[i].right, &bytes);
            length += gguf_symbols(text + length, key, bytes);
            gguf_element_text(w, text, length);
        }
        gguf_array_end(w);
    }
    free(merges);
    free(scores);
    return ok;
}

// tokenizer NULL: unknown.
static inline bool gguf_put_tokenizer(GgufWriter* w, const Tokenizer* tokenizer, size_t V, Error* error) {
    static const Vocabulary none = {0};
    if (tokenizer == NULL) {
        gguf_string(w, "tokenizer.ggml.model", "none");
        return true;
    }
    const Rules* rules = tokenizer->rules;
    const Vocabulary* v = rules ? &rules->vocabulary : &none;
    bool prefix = false;
    if (!gguf_check_tokenizer(tokenizer, V, error)) return false;
    gguf_string(w, "tokenizer.ggml.model", v->by_characters ? "llama" : "gpt2");
    gguf_string(w, "tokenizer.ggml.pre", v->by_characters ? "default" : rules ? gguf_pattern(tokenizer) : "gpt-2");
    if (!gguf_put_tokens(w, tokenizer, V, error) || !gguf_put_merges(w, v, V, error)) return false;
    int32_t begin = tokenizer->begin_of_text, end = tokenizer->end_of_text;
    if (end < 0) end = rules && v->bytes[0] >= 0 ? v->bytes[0] : 0;
    int32_t first = begin >= 0 ? begin : tokenizer->begin_token >= 0 ? tokenizer->begin_token : end;
    gguf_u32(w, "tokenizer.ggml.bos_token_id", (size_t)first);
    gguf_u32(w, "tokenizer.ggml.eos_token_id", (size_t)end);
    gguf_bool(w, "tokenizer.ggml.add_bos_token", begin >= 0);
    if (v->by_characters) {
        if (v->unknown >= 0) gguf_u32(w, "tokenizer.ggml.unknown_token_id", (size_t)v->unknown);
        gguf_is_sentencepiece(rules, &prefix);
        gguf_bool(w, "tokenizer.ggml.add_space_prefix", prefix);
    }
    if (tokenizer->chat_template) gguf_string(w, "tokenizer.chat_template", tokenizer->chat_template);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. File

// Writes a model of a complete configuration; `p` lists its tensors, and `read` reads them. tokenizer NULL: unknown.
static inline bool gguf_export(const char* path, const Config* c, const Parameters* p, const Tokenizer* tokenizer,
                               GgufType type, TensorRead read, void* context, Error* error) {
    GgufWriter w;
    ForeignTensor* list = NULL;
    size_t count, widest = 1;
    const char* architecture = gguf_architecture(c, error);
    if (architecture == NULL || !gguf_create(&w, path, error)) return false;
    for (size_t i = 0; i < p->count; i++) widest = max_size(widest, p->tensors[i].cols);
    float* head = (float*)memory_allocate(config_head_size(c) * widest * sizeof(float));
    bool ok = head || fail_with(error, "not enough memory to write %.600s; free some memory", path);
    gguf_string(&w, "general.architecture", architecture);
    gguf_u32(&w, "general.file_type", GGUF_TYPES[gguf_type_row(type)].file_type);
    gguf_u32(&w, "general.quantization_version", 2);
    gguf_put_config(&w, c, architecture);
    ok = ok && gguf_put_tokenizer(&w, tokenizer, c->vocab, error) && convert_list(&list, &count, c, p, error);
    if (ok) gguf_declare_all(&w, list, count, c, p, type);
    ok = ok && gguf_begin(&w, error) &&
         gguf_write_all(&w, list, count, c, strcmp(architecture, "llama") == 0, read, context, head, error) &&
         gguf_end(&w, error);
    gguf_writer_free(&w);
    free(head);
    free(list);
    return ok;
}

#endif  // LLMTRAIN_GGUF_MODEL_H
