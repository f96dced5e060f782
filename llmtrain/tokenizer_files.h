// tokenizer_files.h: reads tokenizers: Hugging Face's tokenizer.json, GPT-2's encoder.json, tiktoken's rank files.
//
//   TokenizerFiles files;
//   bool ok = tokenizer_files_find(&files, "models/x", NULL, &error) && tokenizer_files_read(&files, &error);
//   files.rules, files.begin_of_text, ...        the caller takes what it keeps, and frees the rest:
//   tokenizer_files_free(&files);
//
// A tokenizer.json is read if it is byte-pair encoding with parts that are known here; each part that is not is refused
// by its name, since without it the tokens would be others. A file with contradictions (a merge of tokens that are not
// there, two tokens with one id) is refused too. Memory is in proportion to the file.

#ifndef LLMTRAIN_TOKENIZER_FILES_H
#define LLMTRAIN_TOKENIZER_FILES_H

#include "files.h"
#include "flags.h"  // choice_find
#include "json.h"
#include "tokenizer_rules.h"

#define TOKENIZER_BYTES_MAX ((size_t)256 << 20)  // of a file; the largest published ones have 35 MB
#define RANKS_BYTES_MAX ((size_t)64 << 20)

// Files that a tokenizer may consist of, by the names that they keep when it is saved. The first of each kind decides.
enum { FILE_JSON, FILE_CONFIG, FILE_TEMPLATE, FILE_SPECIAL, FILE_ENCODER, FILE_MERGES, FILE_RANKS, FILES_COUNT };
static const char* const TOKENIZER_FILES[FILES_COUNT] = {
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
    "encoder.json", "vocab.bpe", "ranks.tiktoken"};

typedef struct {
    char* paths[FILES_COUNT];  // owned; NULL: not a part of it
    const Pattern* pattern;    // of a rank file
    Rules* rules;
    char kind[32];             // "byte-level BPE", ...
    int32_t begin_of_text, end_of_text;
    char* chat_template;       // owned; NULL: none
    uint64_t hash;
} TokenizerFiles;

static inline void tokenizer_files_free(TokenizerFiles* s) {
    for (int i = 0; i < FILES_COUNT; i++) free(s->paths[i]);
    rules_free(s->rules);
    free(s->chat_template);
    memset(s, 0, sizeof *s);
}

// ------------------------------------------------------------------------------------------------
// Helpers

// A tokenizer.json that is being read.
typedef struct {
    const Json* json;
    const char* path;
    Rules* rules;
    bool byte_level;
    Error* error;
} TokenizerReader;

static inline bool refuse(const TokenizerReader* r, const char* what, const char* name) {
    return fail(r->error, "%.600s: its %s is '%.100s', which is not supported here, and without it the tokens would be "
                "others; take a tokenizer without it", r->path, what, name);
}

// The decoded bytes of a string, and a zero byte; NULL if it is none.
static inline const char* json_text(const Json* json, uint32_t node) {
    return json_is(json, node, JSON_STRING) ? json->text + json->nodes[node].start : NULL;
}

static inline bool json_absent(const Json* json, uint32_t node) {
    return node == JSON_NONE || json_is(json, node, JSON_NULL);
}

static inline const char* json_type(const TokenizerReader* r, uint32_t node) {
    const char* type = json_text(r->json, json_get(r->json, node, "type"));
    return type ? type : "(no type)";
}

// Refuses an object with members that are not in `known`, which | separates.
static inline bool known_members(const TokenizerReader* r, uint32_t node, const char* known, const char* what) {
    for (uint32_t i = json_first(r->json, node); i != JSON_NONE; i = json_next(r->json, i))
        if (choice_find(known, json_key(r->json, i)) < 0) return refuse(r, what, json_key(r->json, i));
    return true;
}

// A truth value that may be missing.
static inline bool json_flag(const Json* json, uint32_t object, const char* key, bool standard) {
    bool value = standard;
    json_bool(json, json_get(json, object, key), &value);
    return value;
}

// A short text with no zero byte in it, for a step of normalization.
static inline bool read_short(const TokenizerReader* r, char out[NORMALIZER_BYTES], uint32_t node, const char* what) {
    const char* text = json_text(r->json, node);
    size_t bytes = text ? r->json->nodes[node].bytes : 0;
    if (!text || strlen(text) != bytes || bytes >= NORMALIZER_BYTES) return refuse(r, what, text ? text : "(no text)");
    memcpy(out, text, bytes + 1);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Symbols of bytes
//
// Byte-level tokenizers write each byte as a visible character: itself, if it is a visible one of Latin-1, and if not,
// the next of those from U+0100 on.

// The byte of such a character, -1: none.
static inline int byte_of_symbol(uint32_t code) {
    if ((code >= 33 && code <= 126) || (code >= 161 && code <= 172) || (code >= 174 && code <= 255)) return (int)code;
    if (code < 256 || code >= 256 + 68) return -1;
    int n = (int)code - 256;
    return n < 33 ? n : n < 67 ? n - 33 + 127 : 173;
}

// The bytes of a text of such characters, at most TOKEN_BYTES_MAX of them; false if some character is none.
static inline bool bytes_of_symbols(char out[TOKEN_BYTES_MAX], size_t* count, const char* text, size_t bytes) {
    *count = 0;
    for (size_t at = 0, length; at < bytes; at += length) {
        int byte = byte_of_symbol(utf8_read(&length, text + at));
        if (byte < 0 || *count == TOKEN_BYTES_MAX) return false;
        out[(*count)++] = (char)byte;
    }
    return true;
}

// The byte that a token like <0x0A> stands for, -1: none.
static inline int byte_of_fallback(const char* text, size_t bytes) {
    uint32_t value;
    char padded[5] = "0000";
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    memcpy(padded + 2, text + 3, 2);
    return json_hex4(&value, padded) ? (int)value : -1;
}

// ------------------------------------------------------------------------------------------------
// Vocabulary and merges

static inline bool bad_token(const TokenizerReader* r, const char* text, const char* problem) {
    return problem && fail(r->error, "%.600s: the token '%.100s' %s; the file is damaged, take another copy", r->path,
                           text, problem);
}

// The number of ids: above every one of the vocabulary and of the added tokens.
static inline bool count_ids(const TokenizerReader* r, size_t* size, uint32_t vocab, uint32_t added) {
    const Json* json = r->json;
    *size = 0;
    uint32_t lists[2] = {vocab, added};
    for (int k = 0; k < 2; k++)
        for (uint32_t i = json_first(json, lists[k]); i != JSON_NONE; i = json_next(json, i)) {
            uint64_t id;
            if (!json_u64(json, k == 0 ? i : json_get(json, i, "id"), &id) || id >= VOCABULARY_MAX)
                return fail(r->error, "%.600s: %s '%.100s' has no id below %zu; the file is damaged, take another copy",
                            r->path, k == 0 ? "the token" : "an added token", json_key(json, i), VOCABULARY_MAX);
            *size = max_size(*size, (size_t)id + 1);
        }
    return *size > 0 || fail(r->error, "%.600s: it has no tokens; the file is damaged, take another copy", r->path);
}

// Adds a token of the model by its name in the file.
static inline bool read_token(const TokenizerReader* r, size_t id, const char* name, size_t bytes) {
    Vocabulary* v = &r->rules->vocabulary;
    const char* problem = NULL;
    char raw[TOKEN_BYTES_MAX];
    size_t count = 0;
    if (r->byte_level) {
        bool good = bytes_of_symbols(raw, &count, name, bytes);
        // A name with other characters can only be an added token's.
        return (vocabulary_add(v, id, good ? raw : name, good ? count : bytes, TOKEN_ORDINARY, &problem, r->error) &&
                (!good || vocabulary_add_key(v, id, raw, count, &problem, r->error))) || bad_token(r, name, problem);
    }
    int byte = byte_of_fallback(name, bytes);
    Text piece = {NULL, 0, 0};
    bool ok = text_replace(&piece, name, bytes, META, " ", r->error);
    raw[0] = (char)byte;
    ok = ok && (vocabulary_add(v, id, byte >= 0 ? raw : piece.bytes, byte >= 0 ? 1 : piece.count, TOKEN_ORDINARY,
                               &problem, r->error) || bad_token(r, name, problem));
    ok = ok && (vocabulary_add_key(v, id, name, bytes, &problem, r->error) || bad_token(r, name, problem));
    text_free(&piece);
    return ok;
}

// The tokens that words begin as.
static inline void find_symbols(Vocabulary* v, bool byte_level, bool byte_fallback) {
    v->by_characters = !byte_level;
    for (int i = 0; i < 256; i++) {
        char byte = (char)i, name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        v->bytes[i] = byte_level ? vocabulary_find(v, &byte, 1) : byte_fallback ? vocabulary_find(v, name, 6) : -1;
        if (i < 128) v->ascii[i] = byte_level ? -1 : vocabulary_find(v, &byte, 1);
    }
}

static inline bool read_vocabulary(const TokenizerReader* r, uint32_t vocab, size_t size) {
    const Json* json = r->json;
    if (!json_is(json, vocab, JSON_OBJECT))
        return fail(r->error, "%.600s: it has no \"vocab\"; is this a tokenizer?", r->path);
    if (!vocabulary_begin(&r->rules->vocabulary, size, r->error)) return false;
    for (uint32_t i = json_first(json, vocab); i != JSON_NONE; i = json_next(json, i)) {
        uint64_t id = 0;
        json_u64(json, i, &id);
        if (!read_token(r, (size_t)id, json->text + json->nodes[i].key, json->nodes[i].key_bytes)) return false;
    }
    return true;
}

// Finds the token of a name in the file; -1: there is none.
static inline int32_t find_name(const TokenizerReader* r, const char* name, size_t bytes) {
    char raw[TOKEN_BYTES_MAX];
    if (!r->byte_level) return vocabulary_find(&r->rules->vocabulary, name, bytes);
    if (!bytes_of_symbols(raw, &bytes, name, bytes)) return -1;
    return vocabulary_find(&r->rules->vocabulary, raw, bytes);
}

// Adds the merge of two names, of the given rank.
static inline bool read_merge(const TokenizerReader* r, const char* left, size_t left_bytes, const char* right,
                              size_t right_bytes, size_t rank) {
    Vocabulary* v = &r->rules->vocabulary;
    int32_t a = find_name(r, left, left_bytes), b = find_name(r, right, right_bytes), whole = -1;
    if (a >= 0 && b >= 0) {
        char both[2 * TOKEN_BYTES_MAX];
        size_t a_bytes, b_bytes;
        const char* a_key = vocabulary_key(v, a, &a_bytes);
        memcpy(both, a_key, a_bytes);
        const char* b_key = vocabulary_key(v, b, &b_bytes);
        memcpy(both + a_bytes, b_key, b_bytes);
        whole = vocabulary_find(v, both, a_bytes + b_bytes);
    }
    const char* problem = NULL;
    if (a < 0 || b < 0) problem = "joins a token that is not in the vocabulary";
    else if (whole < 0) problem = "makes a token that is not in the vocabulary";
    else if (!merges_add(v, a, b, whole, rank)) problem = "is there twice";
    return problem == NULL || fail(r->error, "%.600s: merge %zu, of '%.*s' and '%.*s', %s; the file is damaged, take "
                                   "another copy", r->path, rank, (int)min_size(left_bytes, 60), left,
                                   (int)min_size(right_bytes, 60), right, problem);
}

// A merge as one text, with a space in its middle.
static inline bool read_merge_line(const TokenizerReader* r, const char* line, size_t bytes, size_t rank) {
    const char* space = (const char*)memchr(line, ' ', bytes);
    size_t left = space ? (size_t)(space - line) : 0;
    if (!space || memchr(space + 1, ' ', bytes - left - 1))
        return fail(r->error, "%.600s: merge %zu, '%.*s', is not two tokens with a space between them; the file is "
                    "damaged, take another copy", r->path, rank, (int)min_size(bytes, 100), line);
    return read_merge(r, line, left, space + 1, bytes - left - 1, rank);
}

static inline bool read_merges(const TokenizerReader* r, uint32_t merges) {
    const Json* json = r->json;
    if (!json_is(json, merges, JSON_ARRAY))
        return fail(r->error, "%.600s: it has no list of \"merges\"; is this byte-pair encoding?", r->path);
    if (!merges_begin(&r->rules->vocabulary, json_count(json, merges), r->error)) return false;
    size_t rank = 0;
    for (uint32_t i = json_first(json, merges); i != JSON_NONE; i = json_next(json, i)) {
        const char* line = json_text(json, i);
        if (line && strncmp(line, "#version", 8) == 0) continue;
        if (line) {
            if (!read_merge_line(r, line, json->nodes[i].bytes, rank++)) return false;
            continue;
        }
        uint32_t a = json_first(json, i), b = json_next(json, a);
        if (json_count(json, i) != 2 || !json_text(json, a) || !json_text(json, b))
            return fail(r->error, "%.600s: merge %zu is not a pair of tokens; the file is damaged, take another copy",
                        r->path, rank);
        if (!read_merge(r, json_text(json, a), json->nodes[a].bytes, json_text(json, b), json->nodes[b].bytes, rank++))
            return false;
    }
    return true;
}

static inline bool read_model(TokenizerReader* r, uint32_t model, size_t size) {
    const Json* json = r->json;
    Vocabulary* v = &r->rules->vocabulary;
    uint32_t type = json_get(json, model, "type"), node;
    if (!json_is(json, model, JSON_OBJECT))
        return fail(r->error, "%.600s: it has no \"model\"; is this a tokenizer.json of Hugging Face?", r->path);
    if (type != JSON_NONE && strcmp(json_type(r, model), "BPE") != 0) return refuse(r, "model", json_type(r, model));
    if (!known_members(r, model, "type|dropout|unk_token|continuing_subword_prefix|end_of_word_suffix|fuse_unk|"
                       "byte_fallback|ignore_merges|vocab|merges", "model's member")) return false;
    double dropout = 0;
    if (json_number(json, json_get(json, model, "dropout"), &dropout) && dropout != 0)
        return refuse(r, "model's member", "dropout");
    static const char* const affixes[2] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        node = json_get(json, model, affixes[i]);
        if (!json_absent(json, node) && (!json_text(json, node) || json_text(json, node)[0]))
            return refuse(r, "model's member", affixes[i]);
    }
    if (!read_vocabulary(r, json_get(json, model, "vocab"), size)) return false;
    if (!read_merges(r, json_get(json, model, "merges"))) return false;
    v->fuse_unknown = json_flag(json, model, "fuse_unk", false);
    v->whole_words = json_flag(json, model, "ignore_merges", false);
    bool fallback = json_flag(json, model, "byte_fallback", false);
    find_symbols(v, r->byte_level, fallback);
    for (int i = 0; r->byte_level && fallback && i < 256; i++)
        if (v->bytes[i] < 0) return refuse(r, "model's member", "byte_fallback, of bytes without a token");
    node = json_get(json, model, "unk_token");
    if (json_absent(json, node)) return true;
    const char* unknown = json_text(json, node);
    v->unknown = unknown ? find_name(r, unknown, json->nodes[node].bytes) : -1;
    return v->unknown >= 0 ||
           fail(r->error, "%.600s: its unk_token is not in its vocabulary; the file is damaged, take another copy",
                r->path);
}

// ------------------------------------------------------------------------------------------------
// Normalizers, pre-tokenizers, decoders

// Calls `read` for a part, or for each part of a sequence of them.
static inline bool read_parts(TokenizerReader* r, uint32_t node, const char* list, const char* what,
                              bool (*read)(TokenizerReader* r, uint32_t node)) {
    if (json_absent(r->json, node)) return true;
    if (strcmp(json_type(r, node), "Sequence") != 0) return read(r, node);
    for (uint32_t i = json_first(r->json, json_get(r->json, node, list)); i != JSON_NONE; i = json_next(r->json, i))
        if (!read_parts(r, i, list, what, read)) return false;
    return true;
}

static inline bool read_normalizer(TokenizerReader* r, uint32_t node) {
    Rules* rules = r->rules;
    const Json* json = r->json;
    const char* type = json_type(r, node);
    if (rules->normalizer_count == NORMALIZERS_MAX) return refuse(r, "normalizer", "more than eight steps");
    Normalizer* n = &rules->normalizers[rules->normalizer_count++];
    memset(n, 0, sizeof *n);
    if (strcmp(type, "NFC") == 0) {
        n->kind = NORMALIZE_NFC;
        if (!rules->nfc) rules->nfc = nfc_open(r->error);
        return rules->nfc && known_members(r, node, "type", "normalizer's member");
    }
    if (strcmp(type, "Prepend") == 0) {
        n->kind = NORMALIZE_PREPEND;
        return known_members(r, node, "type|prepend", "normalizer's member") &&
               read_short(r, n->content, json_get(json, node, "prepend"), "normalizer's prepend");
    }
    if (strcmp(type, "Replace") != 0) return refuse(r, "normalizer", type);
    n->kind = NORMALIZE_REPLACE;
    uint32_t pattern = json_get(json, node, "pattern");
    if (!known_members(r, node, "type|pattern|content", "normalizer's member") ||
        !known_members(r, pattern, "String", "normalizer's pattern") ||
        !read_short(r, n->pattern, json_get(json, pattern, "String"), "normalizer's pattern") ||
        !read_short(r, n->content, json_get(json, node, "content"), "normalizer's content"))
        return false;
    return n->pattern[0] || refuse(r, "normalizer's pattern", "empty");
}

// Whether no space is left after normalization.
static inline bool spaces_are_replaced(const Rules* rules) {
    for (size_t i = 0; i < rules->normalizer_count; i++)
        if (rules->normalizers[i].kind == NORMALIZE_REPLACE && strcmp(rules->normalizers[i].pattern, " ") == 0)
            return true;
    return false;
}

static inline bool read_split(TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    uint32_t pattern = json_get(json, node, "pattern");
    const char* regex = json_text(json, json_get(json, pattern, "Regex"));
    const char* text = json_text(json, json_get(json, pattern, "String"));
    const char* behavior = json_text(json, json_get(json, node, "behavior"));
    bool invert = json_flag(json, node, "invert", false);
    if (!known_members(r, node, "type|pattern|behavior|invert", "pre_tokenizer's member")) return false;
    if (text && strcmp(text, " ") == 0 && spaces_are_replaced(r->rules)) return true;  // it finds nothing
    const Pattern* known = regex ? pattern_of_regex(regex) : NULL;
    if (!known || r->rules->split != SPLIT_WHOLE)
        return refuse(r, "pre_tokenizer's pattern", regex ? regex : text ? text : "(none)");
    // The patterns match all of a text, so what is removed from between the words is nothing.
    bool isolated = behavior && strcmp(behavior, "Isolated") == 0 && !invert;
    bool removed = behavior && strcmp(behavior, "Removed") == 0 && invert;
    if (!isolated && !removed) return refuse(r, "pre_tokenizer's behavior", behavior ? behavior : "(none)");
    r->rules->split = known->split;
    return true;
}

static inline bool read_metaspace(TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    Rules* rules = r->rules;
    const char* replacement = json_text(json, json_get(json, node, "replacement"));
    const char* scheme = json_text(json, json_get(json, node, "prepend_scheme"));
    if (!known_members(r, node, "type|replacement|add_prefix_space|prepend_scheme|split|str_rep",
                       "pre_tokenizer's member")) return false;
    if (!replacement || strcmp(replacement, META) != 0)
        return refuse(r, "pre_tokenizer's replacement", replacement ? replacement : "(none)");
    int position = scheme ? choice_find("never|first|always", scheme) : PREFIX_ALWAYS;
    if (position < 0) return refuse(r, "pre_tokenizer's prepend_scheme", scheme);
    if (!json_flag(json, node, "add_prefix_space", true)) position = PREFIX_NEVER;
    if (rules->meta || rules->split != SPLIT_WHOLE || rules->digits || r->byte_level)
        return refuse(r, "pre_tokenizer", "Metaspace with others");
    rules->meta = true;
    rules->prefix = (Prefix)position;
    if (json_flag(json, node, "split", true)) rules->split = SPLIT_META;
    return true;
}

static inline bool read_pre_tokenizer(TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    Rules* rules = r->rules;
    const char* type = json_type(r, node);
    if (r->byte_level) return refuse(r, "pre_tokenizer", "a step after ByteLevel");
    if (strcmp(type, "Split") == 0) return read_split(r, node);
    if (strcmp(type, "Metaspace") == 0) return read_metaspace(r, node);
    if (strcmp(type, "Digits") == 0) {
        if (!json_flag(json, node, "individual_digits", false)) return refuse(r, "pre_tokenizer", "Digits in groups");
        if (rules->split != SPLIT_WHOLE) return refuse(r, "pre_tokenizer", "Digits after a Split");
        rules->digits = true;
        return known_members(r, node, "type|individual_digits", "pre_tokenizer's member");
    }
    if (strcmp(type, "ByteLevel") != 0) return refuse(r, "pre_tokenizer", type);
    if (!known_members(r, node, "type|add_prefix_space|trim_offsets|use_regex", "pre_tokenizer's member")) return false;
    bool prefix = json_flag(json, node, "add_prefix_space", true), regex = json_flag(json, node, "use_regex", true);
    bool already = rules->split != SPLIT_WHOLE;
    if (rules->meta) return refuse(r, "pre_tokenizer", "ByteLevel after Metaspace");
    if (prefix && (already || rules->digits)) return refuse(r, "pre_tokenizer", "add_prefix_space after a Split");
    if (regex && already) return refuse(r, "pre_tokenizer", "use_regex after a Split");
    r->byte_level = true;
    if (regex) rules->split = SPLIT_GPT2;
    if (prefix) rules->prefix = PREFIX_ALWAYS;
    return true;
}

// Decoders say how tokens become text. Here that follows from the rest, so they are only checked. A space is left out
// where Strip or Metaspace ask for it.
static inline bool read_decoder(TokenizerReader* r, uint32_t node) {
    const char* type = json_type(r, node);
    const Json* json = r->json;
    if (strcmp(type, "ByteLevel") == 0 && r->byte_level) return true;
    if (choice_find("Replace|ByteFallback|Fuse|Strip|Metaspace", type) < 0 || r->byte_level)
        return refuse(r, "decoder", type);
    if (strcmp(type, "Replace") == 0) {
        const char* pattern = json_text(json, json_get(json, json_get(json, node, "pattern"), "String"));
        const char* content = json_text(json, json_get(json, node, "content"));
        if (!pattern || !content || strcmp(pattern, META) != 0 || strcmp(content, " ") != 0)
            return refuse(r, "decoder's pattern", pattern ? pattern : "(none)");
    }
    if (strcmp(type, "Strip") == 0) {
        const char* content = json_text(json, json_get(json, node, "content"));
        uint64_t start = 0, stop = 0;
        json_u64(json, json_get(json, node, "start"), &start);
        json_u64(json, json_get(json, node, "stop"), &stop);
        if (!content || strcmp(content, " ") != 0 || start > 1 || stop > 0) return refuse(r, "decoder", type);
        if (start == 1) r->rules->strip = STRIP_FIRST;
    }
    if (strcmp(type, "Metaspace") == 0 && r->rules->prefix != PREFIX_NEVER) r->rules->strip = STRIP_FIRST;
    return true;
}

// The template says which token comes before a text.
static inline bool read_template(const TokenizerReader* r, uint32_t node, int32_t* begin_of_text) {
    const Json* json = r->json;
    const char* before = NULL;
    bool text_seen = false;
    uint32_t single = json_get(json, node, "single"), specials = json_get(json, node, "special_tokens");
    for (uint32_t i = json_first(json, single); i != JSON_NONE; i = json_next(json, i)) {
        uint32_t special = json_get(json, i, "SpecialToken");
        const char* id = json_text(json, json_get(json, special, "id"));
        if (special == JSON_NONE) text_seen = true;
        else if (text_seen || before || !id) return refuse(r, "post_processor", "a template with more than one token");
        else before = id;
    }
    if (!before) return true;
    uint32_t ids = json_get(json, json_get(json, specials, before), "ids");
    uint64_t id;
    if (json_count(json, ids) != 1 || !json_u64(json, json_first(json, ids), &id) ||
        id >= r->rules->vocabulary.size || r->rules->vocabulary.tokens[id].kind == TOKEN_ABSENT)
        return fail(r->error, "%.600s: its template begins with '%.100s', which is no token; the file is damaged, take "
                    "another copy", r->path, before);
    *begin_of_text = (int32_t)id;
    return true;
}

static inline bool read_post_processor(const TokenizerReader* r, uint32_t node, int32_t* begin_of_text) {
    const Json* json = r->json;
    if (json_absent(json, node)) return true;
    const char* type = json_type(r, node);
    if (strcmp(type, "ByteLevel") == 0) return true;  // it concerns where tokens lie in the text
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(r, node, begin_of_text);
    if (strcmp(type, "Sequence") != 0) return refuse(r, "post_processor", type);
    for (uint32_t i = json_first(json, json_get(json, node, "processors")); i != JSON_NONE; i = json_next(json, i)) {
        if (strcmp(json_type(r, i), "Sequence") == 0) return refuse(r, "post_processor", "a sequence in a sequence");
        if (!read_post_processor(r, i, begin_of_text)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Added tokens

static inline bool bad_added(const TokenizerReader* r, const char* text, const char* problem) {
    return fail(r->error, "%.600s: the added token '%.100s' %s; the file is damaged, take another copy", r->path, text,
                problem);
}

// Adds a token that is found in the text before it is split. If the model has it already, it has the same id.
static inline bool rules_add(const TokenizerReader* r, AddedToken added, const char* text, size_t bytes) {
    Rules* rules = r->rules;
    Vocabulary* v = &rules->vocabulary;
    Token* token = &v->tokens[added.id];
    const char* problem = NULL;
    TokenKind kind = added.special ? TOKEN_SPECIAL : TOKEN_ADDED;
    bool known = find_name(r, text, bytes) == added.id, twice = false;
    if (!known && token->kind == TOKEN_ORDINARY && token->key_bytes == 0)  // a name that is no text of symbols
        known = token->piece_bytes == bytes && memcmp(v->text.bytes + token->piece, text, bytes) == 0;
    if (!known && find_name(r, text, bytes) >= 0) return bad_added(r, text, "has another id in the vocabulary");
    if (known) token->kind = TOKEN_ABSENT;  // its bytes become those of the text in which it was found
    if (!vocabulary_add(v, (size_t)added.id, text, bytes, kind, &problem, r->error))
        return problem ? bad_added(r, text, problem) : false;
    added.start = (uint32_t)rules->added_text.count;
    added.bytes = (uint32_t)bytes;
    if (!text_append(&rules->added_text, text, bytes, r->error)) return false;
    int32_t index = (int32_t)rules->added_count;
    rules->added[rules->added_count++] = added;
    Text form = {NULL, 0, 0};
    bool ok = !added.normalized || rules_normalize(&form, rules, text, bytes, r->error);
    const char* found = added.normalized ? form.bytes : text;
    size_t length = added.normalized ? form.count : bytes;
    if (ok && length == 0) ok = bad_added(r, text, "is normalized to nothing");
    if (ok) ok = trie_add(added.normalized ? &rules->normalized : &rules->raw, &twice, found, length, index, r->error);
    if (twice) bad_added(r, text, "is there twice");
    text_free(&form);
    return ok;
}

static inline bool rules_add_begin(Rules* rules, size_t count, Error* error) {
    rules->added = (AddedToken*)allocate(count * sizeof(AddedToken));
    return rules->added || fail(error, "out of memory for %zu added tokens", count);
}

static inline bool read_added(const TokenizerReader* r, uint32_t list) {
    const Json* json = r->json;
    size_t next = 0;  // the id that `tokenizers` gives to the next one that is not in the vocabulary
    for (size_t i = 0; i < r->rules->vocabulary.size; i++) next += r->rules->vocabulary.tokens[i].kind != TOKEN_ABSENT;
    if (!rules_add_begin(r->rules, json_count(json, list), r->error)) return false;
    for (uint32_t i = json_first(json, list); i != JSON_NONE; i = json_next(json, i)) {
        AddedToken added;
        uint64_t id = 0;
        uint32_t content = json_get(json, i, "content");
        const char* text = json_text(json, content);
        memset(&added, 0, sizeof added);
        if (!known_members(r, i, "id|content|single_word|lstrip|rstrip|normalized|special", "added token's member"))
            return false;
        if (!text || json->nodes[content].bytes == 0) return bad_added(r, "", "has no content");
        json_u64(json, json_get(json, i, "id"), &id);
        added.id = (int32_t)id;
        added.single_word = json_flag(json, i, "single_word", false);
        added.lstrip = json_flag(json, i, "lstrip", false);
        added.rstrip = json_flag(json, i, "rstrip", false);
        added.special = json_flag(json, i, "special", false);
        added.normalized = json_flag(json, i, "normalized", !added.special);
        if (r->rules->vocabulary.tokens[id].kind == TOKEN_ABSENT && id != next++)
            return bad_added(r, text, "does not have the next id, which `tokenizers` would give it");
        if (!rules_add(r, added, text, json->nodes[content].bytes)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// tokenizer.json

// Whether a text without pre-tokenizer can be split before each U+2581 that follows something else: no merge crosses
// such a place.
static inline bool merges_stay_in_words(const Vocabulary* v) {
    if (v->whole_words || vocabulary_find(v, META, 3) < 0) return false;
    for (size_t i = 0; i < v->merge_slots; i++) {
        if (v->merges[i].rank == MERGE_NONE) continue;
        size_t bytes;
        const char* key = vocabulary_key(v, (int32_t)v->merges[i].id, &bytes);
        for (size_t at = 1; at + 3 <= bytes; at++)
            if (memcmp(key + at, META, 3) == 0 && (at < 3 || memcmp(key + at - 3, META, 3) != 0)) return false;
    }
    return true;
}

static inline bool read_rules(TokenizerReader* r, TokenizerFiles* s) {
    const Json* json = r->json;
    Rules* rules = r->rules;
    uint32_t model = json_get(json, 0, "model"), added = json_get(json, 0, "added_tokens");
    size_t size;
    const char* version = json_text(json, json_get(json, 0, "version"));
    if (!known_members(r, 0, "version|truncation|padding|added_tokens|normalizer|pre_tokenizer|post_processor|decoder|"
                       "model", "member")) return false;
    if (version && strcmp(version, "1.0") != 0) return refuse(r, "version", version);
    if (!json_absent(json, json_get(json, 0, "truncation"))) return refuse(r, "member", "truncation");
    if (!json_absent(json, json_get(json, 0, "padding"))) return refuse(r, "member", "padding");
    if (!read_parts(r, json_get(json, 0, "normalizer"), "normalizers", "normalizer", read_normalizer) ||
        !read_parts(r, json_get(json, 0, "pre_tokenizer"), "pretokenizers", "pre_tokenizer", read_pre_tokenizer))
        return false;
    if (rules->digits && !r->byte_level) return refuse(r, "pre_tokenizer", "Digits without ByteLevel");
    if (!r->byte_level && rules->split != SPLIT_WHOLE && rules->split != SPLIT_META)
        return refuse(r, "pre_tokenizer", "a Split without ByteLevel");
    if (!read_parts(r, json_get(json, 0, "decoder"), "decoders", "decoder", read_decoder)) return false;
    if (!count_ids(r, &size, json_get(json, model, "vocab"), added) || !read_model(r, model, size) ||
        !read_added(r, added) ||
        !read_post_processor(r, json_get(json, 0, "post_processor"), &s->begin_of_text))
        return false;
    for (size_t i = 0; i < rules->normalizer_count; i++)  // put in front of each part, so left out of each again
        if (rules->normalizers[i].kind == NORMALIZE_PREPEND && rules->strip == STRIP_FIRST) rules->strip = STRIP_EACH;
    if (rules->prefix == PREFIX_ALWAYS && rules->strip == STRIP_FIRST) rules->strip = STRIP_EACH;
    if (!r->byte_level && rules->split == SPLIT_WHOLE && merges_stay_in_words(&rules->vocabulary))
        rules->split = SPLIT_SPACED;
    snprintf(s->kind, sizeof s->kind, r->byte_level ? "byte-level BPE" : "BPE of characters");
    return true;
}

// The id of a token that a configuration names, -1: none.
static inline int32_t named_token(const Rules* rules, const Json* json, uint32_t node) {
    uint32_t content = json_is(json, node, JSON_OBJECT) ? json_get(json, node, "content") : node;
    const char* text = json_text(json, content);
    for (size_t i = 0; text && i < rules->added_count; i++) {
        const AddedToken* added = &rules->added[i];
        if (added->bytes == json->nodes[content].bytes &&
            memcmp(rules->added_text.bytes + added->start, text, added->bytes) == 0) return added->id;
    }
    return text ? vocabulary_find(&rules->vocabulary, text, json->nodes[content].bytes) : -1;
}

// tokenizer_config.json: the tokens that begin and end a text, and the template of a chat.
static inline bool read_config(TokenizerFiles* s, const Json* json, Error* error) {
    int32_t begin = named_token(s->rules, json, json_get(json, 0, "bos_token"));
    int32_t end = named_token(s->rules, json, json_get(json, 0, "eos_token"));
    bool add;
    if (end >= 0) s->end_of_text = end;
    if (json_bool(json, json_get(json, 0, "add_bos_token"), &add)) s->begin_of_text = add ? begin : -1;
    uint32_t chat = json_get(json, 0, "chat_template");
    if (json_is(json, chat, JSON_ARRAY)) {  // several, each with a name
        uint32_t list = chat;
        chat = JSON_NONE;
        for (uint32_t i = json_first(json, list); i != JSON_NONE; i = json_next(json, i)) {
            const char* name = json_text(json, json_get(json, i, "name"));
            if (name && strcmp(name, "default") == 0) chat = json_get(json, i, "template");
        }
    }
    const char* text = json_text(json, chat);
    if (!text || s->chat_template) return true;
    s->chat_template = strdup(text);
    return s->chat_template || fail(error, "out of memory for a chat template");
}

// Without a configuration the end of a text is the token that usually is.
static inline void guess_end_of_text(TokenizerFiles* s) {
    static const char* const usual[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};
    for (size_t k = 0; k < sizeof usual / sizeof usual[0]; k++)
        for (size_t i = 0; i < s->rules->added_count && s->end_of_text < 0; i++) {
            const AddedToken* added = &s->rules->added[i];
            if (added->bytes == strlen(usual[k]) &&
                memcmp(s->rules->added_text.bytes + added->start, usual[k], added->bytes) == 0)
                s->end_of_text = added->id;
        }
}

// ------------------------------------------------------------------------------------------------
// GPT-2's files, and rank files

// An added token that is special, by its text.
static inline bool add_special(const TokenizerReader* r, const char* text, int32_t id) {
    AddedToken added;
    memset(&added, 0, sizeof added);
    added.id = id;
    added.special = true;
    return rules_add(r, added, text, strlen(text));
}

// encoder.json, the vocabulary, and the lines of vocab.bpe, the merges.
static inline bool read_gpt2(TokenizerReader* r, TokenizerFiles* s, const char* merges, size_t bytes) {
    const char* end = merges + bytes;
    size_t size, lines = 0, rank = 0;
    r->byte_level = true;
    r->rules->split = SPLIT_GPT2;
    for (const char* p = merges; p < end; p++) lines += *p == '\n';
    if (!count_ids(r, &size, 0, JSON_NONE) || !read_vocabulary(r, 0, size) ||
        !merges_begin(&r->rules->vocabulary, lines + 1, r->error) || !rules_add_begin(r->rules, 1, r->error))
        return false;
    r->path = s->paths[FILE_MERGES];
    for (const char *p = merges, *line; p < end; p = line + 1) {
        line = (const char*)memchr(p, '\n', (size_t)(end - p));
        if (!line) line = end;
        size_t length = (size_t)(line - p);
        if (length > 0 && p[length - 1] == '\r') length--;
        if (length == 0 || (length >= 8 && memcmp(p, "#version", 8) == 0)) continue;
        if (utf8_valid(p, length) != length)
            return fail(r->error, "%.600s: merge %zu is not UTF-8; the file is damaged, take another copy", r->path,
                        rank);
        if (!read_merge_line(r, p, length, rank++)) return false;
    }
    find_symbols(&r->rules->vocabulary, true, false);
    s->end_of_text = find_name(r, "<|endoftext|>", 13);
    snprintf(s->kind, sizeof s->kind, "GPT-2 BPE");
    return s->end_of_text < 0 || add_special(r, "<|endoftext|>", s->end_of_text);
}

// Decodes four characters of base 64; returns the bytes, 0 if they are none.
static inline size_t base64_read(unsigned char out[3], const char* p) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t value = 0;
    size_t count = p[3] != '=' ? 3 : p[2] != '=' ? 2 : 1;
    for (size_t i = 0; i < 4; i++) {
        const char* found = p[i] ? strchr(digits, p[i]) : NULL;
        if (i <= count && !found) return 0;
        value = value << 6 | (i <= count ? (uint32_t)(found - digits) : 0);
    }
    for (size_t i = 0; i < count; i++) out[i] = (unsigned char)(value >> (16 - 8 * i));
    return count;
}

// A line of a rank file: a token in base 64, a space, its rank. Returns the bytes of the token; 0: it is no such line.
static inline size_t rank_line(char token[TOKEN_BYTES_MAX], uint64_t* rank, const char* line, size_t bytes) {
    const char* space = (const char*)memchr(line, ' ', bytes);
    size_t length = space ? (size_t)(space - line) : 0, count = 0, digits = bytes - length;
    if (length == 0 || length % 4 != 0 || length / 4 * 3 > TOKEN_BYTES_MAX || digits < 2 || digits > 11) return 0;
    for (size_t i = 0; i < length; i += 4) {
        size_t more = base64_read((unsigned char*)token + count, line + i);
        if (more == 0 || (more < 3 && i + 4 < length)) return 0;
        count += more;
    }
    *rank = 0;
    for (const char* p = space + 1; p < line + bytes; p++) {
        if (*p < '0' || *p > '9') return 0;
        *rank = *rank * 10 + (uint64_t)(*p - '0');
    }
    return count;
}

// Calls for every line: first to find the largest rank, then to add the tokens.
static inline bool read_rank_lines(TokenizerReader* r, const char* text, size_t bytes, bool add, size_t* size) {
    Vocabulary* v = &r->rules->vocabulary;
    size_t number = 1;
    for (const char *p = text, *end = text + bytes, *line; p < end; p = line + 1, number++) {
        char token[TOKEN_BYTES_MAX];
        const char* problem = NULL;
        uint64_t rank = 0;
        line = (const char*)memchr(p, '\n', (size_t)(end - p));
        if (!line) line = end;
        size_t length = (size_t)(line - p);
        if (length > 0 && p[length - 1] == '\r') length--;
        if (length == 0) continue;
        size_t count = rank_line(token, &rank, p, length);
        if (count == 0) problem = "is not a token in base 64 and its rank";
        else if (count > 1024) problem = "has a token of over 1024 bytes";
        else if (rank >= VOCABULARY_MAX) problem = "has a rank that is too large";
        *size = max_size(*size, (size_t)rank + 1);
        bool ok = !problem;
        if (ok && add)
            ok = vocabulary_add(v, (size_t)rank, token, count, TOKEN_ORDINARY, &problem, r->error) &&
                 vocabulary_add_key(v, (size_t)rank, token, count, &problem, r->error);
        if (problem)
            return fail(r->error, "%.600s: line %zu %s; is this a rank file of tiktoken?", r->path, number, problem);
        if (!ok) return false;
    }
    return true;
}

// In tiktoken two tokens are joined if what they make is a token, and its rank is its id: every division of a token
// into two tokens is a merge.
static inline bool merges_of_ranks(Vocabulary* v, Error* error) {
    for (int add = 0; add < 2; add++) {
        size_t count = 0;
        for (size_t id = 0; id < v->size; id++) {
            size_t bytes;
            const char* key = vocabulary_key(v, (int32_t)id, &bytes);
            for (size_t i = 1; i < bytes; i++) {
                int32_t left = vocabulary_find(v, key, i);
                int32_t right = left < 0 ? -1 : vocabulary_find(v, key + i, bytes - i);
                if (right < 0) continue;
                count++;
                if (add) merges_add(v, left, right, (int32_t)id, id);
            }
        }
        if (!add && !merges_begin(v, count, error)) return false;
    }
    return true;
}

// The special tokens of the published files, which do not name them; of another file, the end of a text alone.
typedef struct { const char* pattern; size_t ranks; const char* text; int32_t id; } RankSpecial;
static const RankSpecial RANK_SPECIALS[] = {
    {"cl100k", 100256, "<|endoftext|>", 100257}, {"cl100k", 100256, "<|fim_prefix|>", 100258},
    {"cl100k", 100256, "<|fim_middle|>", 100259}, {"cl100k", 100256, "<|fim_suffix|>", 100260},
    {"cl100k", 100256, "<|endofprompt|>", 100276},
    {"o200k", 199998, "<|endoftext|>", 199999}, {"o200k", 199998, "<|endofprompt|>", 200018},
};
enum { RANK_SPECIALS_COUNT = sizeof RANK_SPECIALS / sizeof RANK_SPECIALS[0] };

static inline bool read_ranks(TokenizerReader* r, TokenizerFiles* s, const char* text, size_t bytes) {
    Vocabulary* v = &r->rules->vocabulary;
    size_t ranks = 0, size;
    if (!read_rank_lines(r, text, bytes, false, &ranks)) return false;
    size = ranks + 1;
    bool published = false;
    for (size_t i = 0; i < RANK_SPECIALS_COUNT; i++) {
        const RankSpecial* special = &RANK_SPECIALS[i];
        if (strcmp(special->pattern, s->pattern->name) != 0 || special->ranks != ranks) continue;
        published = true;
        size = max_size(size, (size_t)special->id + 1);
    }
    r->byte_level = true;
    r->rules->split = s->pattern->split;
    if (!vocabulary_begin(v, size, r->error) || !read_rank_lines(r, text, bytes, true, &ranks) ||
        !merges_of_ranks(v, r->error) || !rules_add_begin(r->rules, RANK_SPECIALS_COUNT, r->error))
        return false;
    find_symbols(v, true, false);
    v->whole_words = true;
    for (int i = 0; i < 256; i++)
        if (v->bytes[i] < 0)
            return fail(r->error, "%.600s: it has no token for the byte %d; take another copy", r->path, i);
    s->end_of_text = (int32_t)ranks;
    for (size_t i = 0; i < RANK_SPECIALS_COUNT; i++) {
        const RankSpecial* special = &RANK_SPECIALS[i];
        if (strcmp(special->pattern, s->pattern->name) != 0 || special->ranks != ranks) continue;
        if (strcmp(special->text, "<|endoftext|>") == 0) s->end_of_text = special->id;
        if (!add_special(r, special->text, special->id)) return false;
    }
    snprintf(s->kind, sizeof s->kind, "tiktoken %s", s->pattern->name);
    return published || add_special(r, "<|endoftext|>", s->end_of_text);
}

// ------------------------------------------------------------------------------------------------
// Finding and reading

static inline bool tokenizer_files_path(TokenizerFiles* s, int file, const char* directory, const char* name,
                                        Error* error) {
    size_t bytes = strlen(directory) + strlen(name) + 2;
    s->paths[file] = (char*)malloc(bytes);
    if (!s->paths[file]) return fail(error, "out of memory for a path");
    snprintf(s->paths[file], bytes, "%s%s%s", directory, directory[0] && name[0] ? "/" : "", name);
    return true;
}

// The name of a rank file in a directory that keeps it: cl100k.tiktoken, ...
static inline void ranks_name(char name[32], const Pattern* pattern) {
    snprintf(name, 32, "%s.tiktoken", pattern->name);
}

// Takes a file of a directory if it is there.
static inline bool tokenizer_files_take(TokenizerFiles* s, int file, const char* directory, const char* name,
                                        Error* error) {
    if (!tokenizer_files_path(s, file, directory, name, error)) return false;
    if (access(s->paths[file], F_OK) == 0) return true;
    free(s->paths[file]);
    s->paths[file] = NULL;
    return true;
}

static inline bool tokenizer_files_find_in(TokenizerFiles* s, const char* directory, Error* error) {
    for (int i = 0; i < FILE_RANKS; i++)
        if (!tokenizer_files_take(s, i, directory, TOKENIZER_FILES[i], error)) return false;
    for (size_t i = 0; i < PATTERNS_COUNT && !s->paths[FILE_RANKS] && !s->paths[FILE_JSON]; i++) {
        char name[32];
        if (!PATTERNS[i].name) continue;
        ranks_name(name, &PATTERNS[i]);
        if (!tokenizer_files_take(s, FILE_RANKS, directory, name, error)) return false;
        if (s->paths[FILE_RANKS]) s->pattern = &PATTERNS[i];
    }
    bool gpt2 = s->paths[FILE_ENCODER] && s->paths[FILE_MERGES];
    return s->paths[FILE_JSON] || s->paths[FILE_RANKS] || gpt2 ||
           fail(error, "%.600s has no tokenizer.json, nor encoder.json with vocab.bpe; give a directory with a "
                "tokenizer", directory);
}

// Finds the files of a tokenizer: in a directory, or beside a file.
static inline bool tokenizer_files_find(TokenizerFiles* s, const char* path, const char* pattern, Error* error) {
    memset(s, 0, sizeof *s);
    s->begin_of_text = s->end_of_text = -1;
    if (pattern && !pattern_named(pattern))
        return fail(error, "there is no pattern '%.100s'; give one of " PATTERN_NAMES, pattern);
    if (directory_exists(path)) {
        if (pattern)
            return fail(error, "%.600s is a directory, and a pattern belongs to a rank file; leave it out", path);
        return tokenizer_files_find_in(s, path, error);
    }
    if (access(path, F_OK) != 0) return fail_file(error, "open", path);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t length = strlen(name);
    bool ranks = length > 9 && strcmp(name + length - 9, ".tiktoken") == 0;
    if (ranks && !pattern)
        return fail(error, "%.600s is a rank file, which does not say how words are split; give --pattern, one of "
                    PATTERN_NAMES, path);
    if (pattern) {
        s->pattern = pattern_named(pattern);
        return tokenizer_files_path(s, FILE_RANKS, "", path, error);
    }
    char directory[FILE_PATH_MAX];
    if (!path_copy(directory, slash ? path : ".", error)) return false;
    if (slash) directory[slash == path ? 1 : slash - path] = 0;
    if (strcmp(name, "encoder.json") == 0)
        return tokenizer_files_path(s, FILE_ENCODER, directory, name, error) &&
               tokenizer_files_path(s, FILE_MERGES, directory, "vocab.bpe", error);
    return tokenizer_files_path(s, FILE_JSON, "", path, error) &&
           tokenizer_files_take(s, FILE_CONFIG, directory, TOKENIZER_FILES[FILE_CONFIG], error) &&
           tokenizer_files_take(s, FILE_TEMPLATE, directory, TOKENIZER_FILES[FILE_TEMPLATE], error);
}

// Reads a file of the tokenizer, and adds it to the hash. A file that it does not have is empty.
static inline bool tokenizer_files_load(const TokenizerFiles* s, int file, char** text, size_t* bytes, Hash* hash,
                               Error* error) {
    *text = NULL;
    *bytes = 0;
    if (!s->paths[file]) return true;
    if (!file_read(s->paths[file], file == FILE_RANKS ? RANKS_BYTES_MAX : TOKENIZER_BYTES_MAX, text, bytes, error))
        return false;
    uint64_t length = *bytes;
    hash_add(hash, &length, sizeof length);
    hash_add(hash, *text, *bytes);
    return true;
}

static inline bool tokenizer_files_read_main(TokenizerFiles* s, char* const texts[FILES_COUNT], const size_t* bytes,
                                    Error* error) {
    Json json;
    memset(&json, 0, sizeof json);
    int file = s->paths[FILE_JSON] ? FILE_JSON : s->paths[FILE_RANKS] ? FILE_RANKS : FILE_ENCODER;
    TokenizerReader r = {&json, s->paths[file], s->rules, false, error};
    if (file == FILE_RANKS) return read_ranks(&r, s, texts[file], bytes[file]);
    if (!json_parse(&json, texts[file], bytes[file], s->paths[file], error)) return false;
    bool ok = file == FILE_JSON ? read_rules(&r, s) : read_gpt2(&r, s, texts[FILE_MERGES], bytes[FILE_MERGES]);
    json_free(&json);
    return ok;
}

// Reads the files that tokenizer_files_find has found.
static inline bool tokenizer_files_read(TokenizerFiles* s, Error* error) {
    char* texts[FILES_COUNT] = {NULL};
    size_t bytes[FILES_COUNT] = {0};
    Hash hash = hash_begin(0);
    bool ok = true;
    s->rules = (Rules*)allocate(sizeof(Rules));
    if (!s->rules) ok = fail(error, "out of memory for a tokenizer");
    if (ok) ok = (s->rules->unicode = unicode_open(error)) != NULL;
    for (int i = 0; ok && i < FILES_COUNT; i++) ok = tokenizer_files_load(s, i, &texts[i], &bytes[i], &hash, error);
    if (s->pattern) hash_add(&hash, s->pattern->name, strlen(s->pattern->name));
    s->hash = hash_end(&hash);
    if (ok && texts[FILE_TEMPLATE]) {
        s->chat_template = strdup(texts[FILE_TEMPLATE]);
        ok = s->chat_template || fail(error, "out of memory for a chat template");
    }
    ok = ok && tokenizer_files_read_main(s, texts, bytes, error);
    if (ok && texts[FILE_CONFIG]) {
        Json json;
        ok = json_parse(&json, texts[FILE_CONFIG], bytes[FILE_CONFIG], s->paths[FILE_CONFIG], error);
        ok = ok && read_config(s, &json, error);
        if (ok) json_free(&json);
    }
    if (ok) guess_end_of_text(s);
    for (int i = 0; i < FILES_COUNT; i++) free(texts[i]);
    return ok;
}

#endif  // LLMTRAIN_TOKENIZER_FILES_H
