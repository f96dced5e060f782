// tokenizer_json.h: reads tokenizer.json of Hugging Face, and the tokenizer_config.json next to it.
//
//   TokenizerReader r = {.tokenizer = &tokenizer, .rules = tokenizer.rules, .json = &json, .path = path, ...};
//   bool ok = read_rules(&r);
//
// A tokenizer.json is read if it is byte-pair encoding with parts that are known here; an unknown part is refused by
// name, since without it the tokens would be different. A file with contradictions (a merge of tokens that are not
// there, two tokens with one id) is refused too. Memory is in proportion to the file. tokenizer_files.h finds the files
// and reads those of other kinds, with the same functions for tokens and merges.

#ifndef LLMTRAIN_TOKENIZER_JSON_H
#define LLMTRAIN_TOKENIZER_JSON_H

#include "../base/files.h"
#include "../base/flag_table.h"  // choice_find
#include "../base/json.h"
#include "tokenizer_rules.h"

// Files that a tokenizer may consist of, by the names that they have when it is saved. The first of each kind decides.
// The last one is only checked: it says nothing that the others do not say.
enum { FILE_JSON, FILE_CONFIG, FILE_SPECIAL, FILE_ENCODER, FILE_MERGES, FILE_RANKS, FILE_TEMPLATE, FILES_KEPT,
       FILE_ADDED = FILES_KEPT, FILES_COUNT };
static const char* const TOKENIZER_FILES[FILES_COUNT] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "ranks.tiktoken",
    "chat_template.jinja", "added_tokens.json"};
#define TOKENIZER_SAVE_AGAIN "save it as tokenizer.json (in Python, AutoTokenizer.from_pretrained(DIR)." \
                             "save_pretrained(DIR))"

// Ids that a model's config.json or generation_config.json names.
enum { END_TOKENS_MAX = 64 };
typedef struct {
    int32_t begin, pad;                 // -1: none
    int32_t ends[END_TOKENS_MAX];       // (count) each of them ends a text
    size_t count;
} TokenIds;

typedef struct {
    char name[64];                      // what it is, for messages; `hash` tells it from others
    int32_t vocabulary;                 // every id is below it
    int32_t begin_of_text;              // -1: the tokenizer's template does not put one before a text
    int32_t begin_token;                // what chat templates call bos_token, put there or not; -1: none
    int32_t end_of_text;                // -1: none
    TokenIds generation;                // of the model that it was opened for, whose `ends` end a generated text too
    uint64_t hash, tokens;              // XXH64 of its files; of those but the chat template
    char* chat_template;                // Jinja, owned; NULL: none
    Rules* rules;                       // owned; NULL: a token is a byte
    char* paths[FILES_COUNT];           // of its files, owned; NULL: not a part of it
    const Pattern* pattern;             // of a rank file
} Tokenizer;

static inline void tokenizer_close(Tokenizer* t) {
    free(t->chat_template);
    rules_free(t->rules);
    for (int i = 0; i < FILES_COUNT; i++) free(t->paths[i]);
    memset(t, 0, sizeof *t);
}

// ------------------------------------------------------------------------------------------------
// Helpers

// A file of a tokenizer that is being read.
typedef struct {
    Tokenizer* tokenizer;
    Rules* rules;        // the tokenizer's
    const Json* json;
    const char* path;
    const Json* config;  // tokenizer_config.json next to it; NULL: none
    bool byte_level;
    Error* error;
} TokenizerReader;

__attribute__((format(printf, 2, 3)))
static inline bool tokenizer_damaged(const TokenizerReader* r, const char* format, ...) {
    char what[800];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return fail_with(r->error, "%.600s: %s; the file is damaged, use another copy", r->path, what);
}

static inline bool tokenizer_refuse(const TokenizerReader* r, const char* what, const char* name) {
    return fail_with(r->error, "%.600s: its %s is '%.100s', which is not supported here, and ignoring it would change "
                     "the tokens; use a tokenizer without it", r->path, what, name);
}

// The decoded bytes of a string, and a zero byte; NULL if the node is not a string.
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

// Refuses an object with members that are not in `known`, a list of names separated by |.
static inline bool known_members(const TokenizerReader* r, uint32_t node, const char* known, const char* what) {
    for (uint32_t i = json_first(r->json, node); i != JSON_NONE; i = json_next(r->json, i))
        if (choice_find(known, json_key(r->json, i)) < 0) return tokenizer_refuse(r, what, json_key(r->json, i));
    return true;
}

// A boolean that may be missing: then it is `standard`.
static inline bool json_flag(const Json* json, uint32_t object, const char* key, bool standard) {
    bool value = standard;
    json_bool(json, json_get(json, object, key), &value);
    return value;
}

// A short text with no zero byte in it, for a step of normalization.
static inline bool read_short(const TokenizerReader* r, char out[NORMALIZER_BYTES], uint32_t node, const char* what) {
    const char* text = json_text(r->json, node);
    size_t bytes = text ? r->json->nodes[node].bytes : 0;
    if (!text || strlen(text) != bytes || bytes >= NORMALIZER_BYTES)
        return tokenizer_refuse(r, what, text ? text : "(no text)");
    memcpy(out, text, bytes + 1);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Symbols of bytes
//
// Byte-level tokenizers write each byte as a visible character: itself, if it is a visible one of Latin-1; otherwise
// the next unused one from U+0100 on.

static inline uint32_t symbol_of_byte(unsigned char byte) {
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174) return byte;
    return byte <= 32 ? 256u + byte : byte <= 160 ? 256u + 33 + (byte - 127u) : 256u + 67;
}

// The byte of such a character, -1: none.
static inline int byte_of_symbol(uint32_t code) {
    if ((code >= 33 && code <= 126) || (code >= 161 && code <= 172) || (code >= 174 && code <= 255)) return (int)code;
    if (code < 256 || code >= 256 + 68) return -1;
    int n = (int)code - 256;
    return n < 33 ? n : n < 67 ? n - 33 + 127 : 173;
}

// The bytes of a text of such characters, at most TOKEN_BYTES_MAX of them; false if it has any other character.
static inline bool bytes_of_symbols(char out[TOKEN_BYTES_MAX], size_t* count, const char* text, size_t bytes) {
    *count = 0;
    for (size_t at = 0, length; at < bytes; at += length) {
        int byte = byte_of_symbol(utf8_read(&length, text + at));
        if (byte < 0 || *count == TOKEN_BYTES_MAX) return false;
        out[(*count)++] = (char)byte;
    }
    return true;
}

// The byte that a token like <0x0A> represents, -1: none.
static inline int byte_of_fallback(const char* text, size_t bytes) {
    uint32_t value;
    char padded[5] = "0000";
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    memcpy(padded + 2, text + 3, 2);
    return json_hex4(&value, padded) ? (int)value : -1;
}

// ------------------------------------------------------------------------------------------------
// Vocabulary and merges

// The number of ids: one more than the largest of the vocabulary and of the added tokens.
static inline bool count_ids(const TokenizerReader* r, size_t* size, uint32_t vocab, uint32_t added) {
    const Json* json = r->json;
    *size = 0;
    uint32_t lists[2] = {vocab, added};
    for (int k = 0; k < 2; k++)
        for (uint32_t i = json_first(json, lists[k]); i != JSON_NONE; i = json_next(json, i)) {
            uint64_t id;
            if (!json_u64(json, k == 0 ? i : json_get(json, i, "id"), &id) || id >= VOCABULARY_MAX)
                return tokenizer_damaged(r, "%s '%.100s' has no id below %zu", k == 0 ? "the token" : "an added token",
                                         json_key(json, i), VOCABULARY_MAX);
            *size = max_size(*size, (size_t)id + 1);
        }
    return *size > 0 || tokenizer_damaged(r, "it has no tokens");
}

// Adds a token of the model by its name in the file.
static inline bool read_token(const TokenizerReader* r, size_t id, const char* name, size_t bytes) {
    Vocabulary* v = &r->rules->vocabulary;
    const char* problem = NULL;
    char raw[TOKEN_BYTES_MAX];
    size_t count = 0;
    bool ok;
    if (r->byte_level) {
        bool good = bytes_of_symbols(raw, &count, name, bytes);
        // A name with other characters can only be an added token's.
        ok = vocabulary_add(v, id, good ? raw : name, good ? count : bytes, TOKEN_ORDINARY, &problem, r->error) &&
             (!good || vocabulary_add_key(v, id, raw, count, &problem, r->error));
    } else {
        int byte = byte_of_fallback(name, bytes);
        Text piece = {NULL, 0, 0};
        raw[0] = (char)byte;
        ok = text_replace(&piece, name, bytes, METASPACE, " ", r->error) &&
             vocabulary_add(v, id, byte >= 0 ? raw : piece.bytes, byte >= 0 ? 1 : piece.count, TOKEN_ORDINARY, &problem,
                            r->error) &&
             vocabulary_add_key(v, id, name, bytes, &problem, r->error);
        text_free(&piece);
    }
    if (problem) tokenizer_damaged(r, "the token '%.100s' %s", name, problem);
    return ok;
}

// Finds the tokens of the bytes or characters that words begin as.
static inline void find_symbols(Vocabulary* v, bool byte_level, bool byte_fallback) {
    v->by_characters = !byte_level;
    for (int i = 0; i < 256; i++) {
        char byte = (char)i, name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        v->bytes[i] = byte_level ? vocabulary_find(v, &byte, 1) : byte_fallback ? vocabulary_find(v, name, 6) : -1;
    }
}

static inline bool read_vocabulary(const TokenizerReader* r, uint32_t vocab, size_t size) {
    const Json* json = r->json;
    if (!json_is(json, vocab, JSON_OBJECT) || json_count(json, vocab) == 0)
        return fail_with(r->error, "%.600s: it has no \"vocab\", or an empty one; is this a tokenizer?", r->path);
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
    else if (!merges_add(v, a, b, whole, rank)) problem = "occurs twice";
    return !problem || tokenizer_damaged(r, "merge %zu, of '%.*s' and '%.*s', %s", rank, (int)min_size(left_bytes, 60),
                                         left, (int)min_size(right_bytes, 60), right, problem);
}

// Adds a merge that is written as one text, with a space between the two names.
static inline bool read_merge_line(const TokenizerReader* r, const char* line, size_t bytes, size_t rank) {
    const char* space = (const char*)memchr(line, ' ', bytes);
    size_t left = space ? (size_t)(space - line) : 0;
    if (!space || memchr(space + 1, ' ', bytes - left - 1))
        return tokenizer_damaged(r, "merge %zu, '%.*s', is not two tokens with a space between them", rank,
                                 (int)min_size(bytes, 100), line);
    return read_merge(r, line, left, space + 1, bytes - left - 1, rank);
}

static inline bool read_merges(const TokenizerReader* r, uint32_t merges) {
    const Json* json = r->json;
    if (!json_is(json, merges, JSON_ARRAY))
        return fail_with(r->error, "%.600s: it has no list of \"merges\"; is this byte-pair encoding?", r->path);
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
            return tokenizer_damaged(r, "merge %zu is not a pair of tokens", rank);
        if (!read_merge(r, json_text(json, a), json->nodes[a].bytes, json_text(json, b), json->nodes[b].bytes, rank++))
            return false;
    }
    return true;
}

static inline bool read_model(TokenizerReader* r, uint32_t model, size_t size) {
    const Json* json = r->json;
    Vocabulary* v = &r->rules->vocabulary;
    uint32_t node;
    if (!known_members(r, model, "type|dropout|unk_token|continuing_subword_prefix|end_of_word_suffix|fuse_unk|"
                       "byte_fallback|ignore_merges|vocab|merges", "model's member")) return false;
    double dropout = 0;
    if (json_number(json, json_get(json, model, "dropout"), &dropout) && dropout != 0)
        return tokenizer_refuse(r, "model's member", "dropout");
    static const char* const affixes[2] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        node = json_get(json, model, affixes[i]);
        if (!json_absent(json, node) && (!json_text(json, node) || json_text(json, node)[0]))
            return tokenizer_refuse(r, "model's member", affixes[i]);
    }
    if (!read_vocabulary(r, json_get(json, model, "vocab"), size)) return false;
    if (!read_merges(r, json_get(json, model, "merges"))) return false;
    v->fuse_unknown = json_flag(json, model, "fuse_unk", false);
    v->whole_words = json_flag(json, model, "ignore_merges", false);
    bool fallback = json_flag(json, model, "byte_fallback", false);
    find_symbols(v, r->byte_level, fallback);
    for (int i = 0; r->byte_level && fallback && i < 256; i++)
        if (v->bytes[i] < 0) return tokenizer_refuse(r, "model's member", "byte_fallback, of bytes without a token");
    node = json_get(json, model, "unk_token");
    if (json_absent(json, node)) return true;
    const char* unknown = json_text(json, node);
    v->unknown = unknown ? find_name(r, unknown, json->nodes[node].bytes) : -1;
    return v->unknown >= 0 || tokenizer_damaged(r, "its unk_token is not in its vocabulary");
}

// ------------------------------------------------------------------------------------------------
// Normalizers, pre-tokenizers, decoders

// Calls `read` for a part, or for each part of a sequence of them.
static inline bool read_parts(TokenizerReader* r, uint32_t node, const char* list,
                              bool (*read)(TokenizerReader* r, uint32_t node)) {
    if (json_absent(r->json, node)) return true;
    if (strcmp(json_type(r, node), "Sequence") != 0) return read(r, node);
    for (uint32_t i = json_first(r->json, json_get(r->json, node, list)); i != JSON_NONE; i = json_next(r->json, i))
        if (!read_parts(r, i, list, read)) return false;
    return true;
}

static inline bool read_normalizer(TokenizerReader* r, uint32_t node) {
    Rules* rules = r->rules;
    const Json* json = r->json;
    const char* type = json_type(r, node);
    if (rules->normalizer_count == NORMALIZERS_MAX) return tokenizer_refuse(r, "normalizer", "more than eight steps");
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
    if (strcmp(type, "Replace") != 0) return tokenizer_refuse(r, "normalizer", type);
    n->kind = NORMALIZE_REPLACE;
    uint32_t pattern = json_get(json, node, "pattern");
    if (!known_members(r, node, "type|pattern|content", "normalizer's member") ||
        !known_members(r, pattern, "String", "normalizer's pattern") ||
        !read_short(r, n->pattern, json_get(json, pattern, "String"), "normalizer's pattern") ||
        !read_short(r, n->content, json_get(json, node, "content"), "normalizer's content"))
        return false;
    return n->pattern[0] || tokenizer_refuse(r, "normalizer's pattern", "empty");
}

// Whether no space is left after normalization: a step replaces them all, and no later one adds any.
static inline bool spaces_are_replaced(const Rules* rules) {
    bool replaced = false;
    for (size_t i = 0; i < rules->normalizer_count; i++) {
        const Normalizer* n = &rules->normalizers[i];
        replaced |= n->kind == NORMALIZE_REPLACE && strcmp(n->pattern, " ") == 0;
        if (strchr(n->content, ' ')) replaced = false;
    }
    return replaced;
}

static inline bool read_split(TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    uint32_t pattern = json_get(json, node, "pattern");
    const char* regex = json_text(json, json_get(json, pattern, "Regex"));
    const char* text = json_text(json, json_get(json, pattern, "String"));
    const char* behavior = json_text(json, json_get(json, node, "behavior"));
    bool invert = json_flag(json, node, "invert", false);
    if (!known_members(r, node, "type|pattern|behavior|invert", "pre_tokenizer's member")) return false;
    if (text && strcmp(text, " ") == 0 && spaces_are_replaced(r->rules)) return true;  // the split finds nothing
    const Pattern* known = regex ? pattern_of_regex(regex) : NULL;
    if (!known || r->rules->split != SPLIT_WHOLE)
        return tokenizer_refuse(r, "pre_tokenizer's pattern", regex ? regex : text ? text : "(none)");
    // The patterns match all of a text, so there is nothing between the words to remove.
    bool isolated = behavior && strcmp(behavior, "Isolated") == 0 && !invert;
    bool removed = behavior && strcmp(behavior, "Removed") == 0 && invert;
    if (!isolated && !removed) return tokenizer_refuse(r, "pre_tokenizer's behavior", behavior ? behavior : "(none)");
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
    if (!replacement || strcmp(replacement, METASPACE) != 0)
        return tokenizer_refuse(r, "pre_tokenizer's replacement", replacement ? replacement : "(none)");
    int position = scheme ? choice_find("never|first|always", scheme) : PREFIX_ALWAYS;
    if (position < 0) return tokenizer_refuse(r, "pre_tokenizer's prepend_scheme", scheme);
    if (!json_flag(json, node, "add_prefix_space", true)) position = PREFIX_NEVER;
    if (rules->meta || rules->split != SPLIT_WHOLE || rules->digits || r->byte_level)
        return tokenizer_refuse(r, "pre_tokenizer", "Metaspace with others");
    rules->meta = true;
    rules->prefix = (Prefix)position;
    if (json_flag(json, node, "split", true)) rules->split = SPLIT_META;
    return true;
}

static inline bool read_pre_tokenizer(TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    Rules* rules = r->rules;
    const char* type = json_type(r, node);
    if (r->byte_level) return tokenizer_refuse(r, "pre_tokenizer", "a step after ByteLevel");
    if (strcmp(type, "Split") == 0) return read_split(r, node);
    if (strcmp(type, "Metaspace") == 0) return read_metaspace(r, node);
    if (strcmp(type, "Digits") == 0) {
        if (!json_flag(json, node, "individual_digits", false))
            return tokenizer_refuse(r, "pre_tokenizer", "Digits in groups");
        if (rules->split != SPLIT_WHOLE) return tokenizer_refuse(r, "pre_tokenizer", "Digits after a Split");
        rules->digits = true;
        return known_members(r, node, "type|individual_digits", "pre_tokenizer's member");
    }
    if (strcmp(type, "ByteLevel") != 0) return tokenizer_refuse(r, "pre_tokenizer", type);
    if (!known_members(r, node, "type|add_prefix_space|trim_offsets|use_regex", "pre_tokenizer's member")) return false;
    bool prefix = json_flag(json, node, "add_prefix_space", true), regex = json_flag(json, node, "use_regex", true);
    bool already = rules->split != SPLIT_WHOLE;
    if (rules->meta) return tokenizer_refuse(r, "pre_tokenizer", "ByteLevel after Metaspace");
    if (prefix && (already || rules->digits))
        return tokenizer_refuse(r, "pre_tokenizer", "add_prefix_space after a Split");
    if (regex && already) return tokenizer_refuse(r, "pre_tokenizer", "use_regex after a Split");
    r->byte_level = true;
    if (regex) rules->split = SPLIT_GPT2;
    if (prefix) rules->prefix = PREFIX_ALWAYS;
    return true;
}

// Decoders say how tokens become text. Here that follows from the rest, so they are only checked. A space is dropped
// where Strip or Metaspace ask for it.
static inline bool read_decoder(TokenizerReader* r, uint32_t node) {
    const char* type = json_type(r, node);
    const Json* json = r->json;
    if (strcmp(type, "ByteLevel") == 0 && r->byte_level) return true;
    if (choice_find("Replace|ByteFallback|Fuse|Strip|Metaspace", type) < 0 || r->byte_level)
        return tokenizer_refuse(r, "decoder", type);
    if (strcmp(type, "Replace") == 0) {
        const char* pattern = json_text(json, json_get(json, json_get(json, node, "pattern"), "String"));
        const char* content = json_text(json, json_get(json, node, "content"));
        if (!pattern || !content || strcmp(pattern, METASPACE) != 0 || strcmp(content, " ") != 0)
            return tokenizer_refuse(r, "decoder's pattern", pattern ? pattern : "(none)");
    }
    if (strcmp(type, "Strip") == 0) {
        const char* content = json_text(json, json_get(json, node, "content"));
        uint64_t start = 0, stop = 0;
        json_u64(json, json_get(json, node, "start"), &start);
        json_u64(json, json_get(json, node, "stop"), &stop);
        if (!content || strcmp(content, " ") != 0 || start > 1 || stop > 0) return tokenizer_refuse(r, "decoder", type);
        if (start == 1) r->rules->strip = STRIP_FIRST;
    }
    if (strcmp(type, "Metaspace") == 0 && r->rules->prefix != PREFIX_NEVER) r->rules->strip = STRIP_FIRST;
    return true;
}

// Finds the token that the template puts before a text.
static inline bool read_template(const TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    const char* before = NULL;
    bool text_seen = false;
    uint32_t single = json_get(json, node, "single"), specials = json_get(json, node, "special_tokens");
    for (uint32_t i = json_first(json, single); i != JSON_NONE; i = json_next(json, i)) {
        uint32_t special = json_get(json, i, "SpecialToken");
        const char* id = json_text(json, json_get(json, special, "id"));
        if (special == JSON_NONE) text_seen = true;
        else if (text_seen || before || !id)
            return tokenizer_refuse(r, "post_processor", text_seen ? "a template with a token after the text"
                                                                   : "a template with more than one token");
        else before = id;
    }
    if (!before) return true;
    uint32_t ids = json_get(json, json_get(json, specials, before), "ids");
    uint64_t id;
    if (json_count(json, ids) != 1 || !json_u64(json, json_first(json, ids), &id) ||
        id >= r->rules->vocabulary.size || r->rules->vocabulary.tokens[id].kind == TOKEN_ABSENT)
        return tokenizer_damaged(r, "its template begins with '%.100s', which is not a token", before);
    r->tokenizer->begin_of_text = (int32_t)id;
    return true;
}

static inline bool read_post_processor(const TokenizerReader* r, uint32_t node) {
    const Json* json = r->json;
    if (json_absent(json, node)) return true;
    const char* type = json_type(r, node);
    if (strcmp(type, "ByteLevel") == 0) return true;  // it only affects the tokens' offsets in the text
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(r, node);
    if (strcmp(type, "Sequence") != 0) return tokenizer_refuse(r, "post_processor", type);
    for (uint32_t i = json_first(json, json_get(json, node, "processors")); i != JSON_NONE; i = json_next(json, i)) {
        if (strcmp(json_type(r, i), "Sequence") == 0)
            return tokenizer_refuse(r, "post_processor", "a sequence in a sequence");
        if (!read_post_processor(r, i)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Added tokens

// Adds a token that is found in the text before it is split. If the model has it already, the ids must be the same.
static inline bool rules_add(const TokenizerReader* r, AddedToken added, const char* text, size_t bytes) {
    Rules* rules = r->rules;
    Vocabulary* v = &rules->vocabulary;
    Token* token = &v->tokens[added.id];
    const char* problem = NULL;
    TokenKind kind = added.special ? TOKEN_SPECIAL : TOKEN_ADDED;
    Text form = {NULL, 0, 0};
    int32_t there = find_name(r, text, bytes);
    bool known = there == added.id, twice = false;
    if (!known && token->kind == TOKEN_ORDINARY && token->key_bytes == 0)  // a name that is not made of byte symbols
        known = token->piece_bytes == bytes && memcmp(v->text.bytes + token->piece, text, bytes) == 0;
    if (!known && there >= 0) problem = "has another id in the vocabulary";
    if (known) token->kind = TOKEN_ABSENT;  // added again, with the bytes of its text
    bool ok = !problem && vocabulary_add(v, (size_t)added.id, text, bytes, kind, &problem, r->error) &&
              (!added.normalized || rules_normalize(&form, rules, text, bytes, r->error));
    const char* found = added.normalized ? form.bytes : text;
    size_t length = added.normalized ? form.count : bytes;
    if (ok && length == 0) problem = "is normalized to nothing";
    ok = ok && !problem && trie_add(added.normalized ? &rules->normalized : &rules->raw, &twice, found, length,
                                    (int32_t)rules->added_count, r->error);
    if (twice) problem = "occurs twice";
    if (problem) tokenizer_damaged(r, "the added token '%.100s' %s", text, problem);
    if (ok) rules->added[rules->added_count++] = added;
    text_free(&form);
    return ok;
}

static inline bool rules_add_begin(Rules* rules, size_t count, Error* error) {
    rules->added = (AddedToken*)memory_allocate(count * sizeof(AddedToken));
    return rules->added || fail_with(error, "out of memory for %zu added tokens", count);
}

static inline void read_options(AddedToken* added, const Json* json, uint32_t node) {
    added->single_word = json_flag(json, node, "single_word", false);
    added->lstrip = json_flag(json, node, "lstrip", false);
    added->rstrip = json_flag(json, node, "rstrip", false);
    added->special = json_flag(json, node, "special", false);
    added->normalized = json_flag(json, node, "normalized", !added->special);
}

// What tokenizer_config.json says of an added token takes precedence over tokenizer.json, as in transformers.
static inline uint32_t configured_token(const Json* config, uint64_t id) {
    char key[24];
    snprintf(key, sizeof key, "%llu", (unsigned long long)id);
    return config ? json_get(config, json_get(config, 0, "added_tokens_decoder"), key) : JSON_NONE;
}

static inline bool read_added(const TokenizerReader* r, uint32_t list) {
    const Json* json = r->json;
    size_t next = 0;  // the id that `tokenizers` gives to the next one that is not in the vocabulary
    for (size_t i = 0; i < r->rules->vocabulary.size; i++) next += r->rules->vocabulary.tokens[i].kind != TOKEN_ABSENT;
    if (!rules_add_begin(r->rules, json_count(json, list), r->error)) return false;
    for (uint32_t i = json_first(json, list); i != JSON_NONE; i = json_next(json, i)) {
        AddedToken added = {0};
        uint64_t id = 0;
        uint32_t content = json_get(json, i, "content");
        const char* text = json_text(json, content);
        if (!known_members(r, i, "id|content|single_word|lstrip|rstrip|normalized|special", "added token's member"))
            return false;
        if (!text || json->nodes[content].bytes == 0) return tokenizer_damaged(r, "the added token '' has no content");
        json_u64(json, json_get(json, i, "id"), &id);
        added.id = (int32_t)id;
        uint32_t configured = configured_token(r->config, id);
        if (configured != JSON_NONE) read_options(&added, r->config, configured);
        else read_options(&added, json, i);
        if (r->rules->vocabulary.tokens[id].kind == TOKEN_ABSENT && id != next++)
            return tokenizer_damaged(r, "the added token '%.100s' does not have the next id, which `tokenizers` would "
                                     "give it", text);
        if (!rules_add(r, added, text, json->nodes[content].bytes)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// tokenizer.json

// Whether a text without pre-tokenizer can be split before each U+2581 that follows something else: no merge crosses
// such a position, and no character is left out there, which would make neighbors of two U+2581.
static inline bool merges_stay_in_words(const Vocabulary* v) {
    for (int i = 0; i < 256; i++) if (v->unknown < 0 && v->bytes[i] < 0) return false;
    if (v->whole_words || vocabulary_find(v, METASPACE, 3) < 0) return false;
    for (size_t i = 0; i < v->merge_slots; i++) {
        if (v->merges[i].rank == MERGE_NONE) continue;
        size_t bytes;
        const char* key = vocabulary_key(v, (int32_t)v->merges[i].id, &bytes);
        for (size_t at = 1; at + 3 <= bytes; at++)
            if (memcmp(key + at, METASPACE, 3) == 0 && (at < 3 || memcmp(key + at - 3, METASPACE, 3) != 0))
                return false;
    }
    return true;
}

// "truncation" or "padding", which the program that saved the file asked for last: they change no tokens.
static inline bool check_request(const TokenizerReader* r, const char* name, const char* members) {
    uint32_t node = json_get(r->json, 0, name);
    if (json_absent(r->json, node)) return true;
    if (!json_is(r->json, node, JSON_OBJECT) || json_count(r->json, node) == 0)
        return tokenizer_refuse(r, "member", name);
    return known_members(r, node, members, name);
}

static inline bool read_rules(TokenizerReader* r) {
    const Json* json = r->json;
    Rules* rules = r->rules;
    uint32_t model = json_get(json, 0, "model"), added = json_get(json, 0, "added_tokens");
    size_t size;
    const char* version = json_text(json, json_get(json, 0, "version"));
    if (!known_members(r, 0, "version|truncation|padding|added_tokens|normalizer|pre_tokenizer|post_processor|decoder|"
                       "model", "member")) return false;
    if (version && strcmp(version, "1.0") != 0) return tokenizer_refuse(r, "version", version);
    if (!check_request(r, "truncation", "direction|max_length|strategy|stride") ||
        !check_request(r, "padding", "direction|pad_id|pad_to_multiple_of|pad_token|pad_type_id|strategy"))
        return false;
    if (!json_is(json, model, JSON_OBJECT))
        return fail_with(r->error, "%.600s: it has no \"model\"; is this a tokenizer.json of Hugging Face?", r->path);
    if (json_get(json, model, "type") != JSON_NONE && strcmp(json_type(r, model), "BPE") != 0)
        return tokenizer_refuse(r, "model", json_type(r, model));
    if (!read_parts(r, json_get(json, 0, "normalizer"), "normalizers", read_normalizer) ||
        !read_parts(r, json_get(json, 0, "pre_tokenizer"), "pretokenizers", read_pre_tokenizer))
        return false;
    if (rules->digits && !r->byte_level) return tokenizer_refuse(r, "pre_tokenizer", "Digits without ByteLevel");
    if (!r->byte_level && rules->split != SPLIT_WHOLE && rules->split != SPLIT_META)
        return tokenizer_refuse(r, "pre_tokenizer", "a Split without ByteLevel");
    if (!read_parts(r, json_get(json, 0, "decoder"), "decoders", read_decoder)) return false;
    if (!count_ids(r, &size, json_get(json, model, "vocab"), added) || !read_model(r, model, size) ||
        !read_added(r, added) ||
        !read_post_processor(r, json_get(json, 0, "post_processor")))
        return false;
    for (size_t i = 0; i < rules->normalizer_count; i++)  // put in front of each part, so dropped from each again
        if (rules->normalizers[i].kind == NORMALIZE_PREPEND && rules->strip == STRIP_FIRST) rules->strip = STRIP_EACH;
    if (rules->prefix == PREFIX_ALWAYS && rules->strip == STRIP_FIRST) rules->strip = STRIP_EACH;
    if (!r->byte_level && rules->split == SPLIT_WHOLE && merges_stay_in_words(&rules->vocabulary))
        rules->split = SPLIT_SPACED;
    Tokenizer* t = r->tokenizer;
    snprintf(t->name, sizeof t->name, "%s of %zu tokens", r->byte_level ? "byte-level BPE" : "BPE of characters", size);
    return true;
}

// The id of the added token with a text, -1: none.
static inline int32_t added_find(const Rules* rules, const char* text, size_t bytes) {
    const Vocabulary* v = &rules->vocabulary;
    for (size_t i = 0; i < rules->added_count; i++) {
        const Token* token = &v->tokens[rules->added[i].id];
        if (token->piece_bytes == bytes && memcmp(v->text.bytes + token->piece, text, bytes) == 0)
            return rules->added[i].id;
    }
    return -1;
}

// The text of a token that a configuration names, or NULL.
static inline const char* named_text(size_t* bytes, const Json* json, uint32_t node) {
    uint32_t content = json_is(json, node, JSON_OBJECT) ? json_get(json, node, "content") : node;
    *bytes = json_is(json, content, JSON_STRING) ? json->nodes[content].bytes : 0;
    return json_text(json, content);
}

// The id of a token that a configuration names, -1: none.
static inline int32_t named_token(const Rules* rules, const Json* json, uint32_t node) {
    size_t bytes;
    const char* text = named_text(&bytes, json, node);
    int32_t added = text ? added_find(rules, text, bytes) : -1;
    return text && added < 0 ? vocabulary_find(&rules->vocabulary, text, bytes) : added;
}

// If a configuration names a token that the tokenizer does not have, transformers adds it, which changes how texts are
// tokenized. Here such a file is refused.
static inline bool check_added(const TokenizerReader* r, const char* text, size_t bytes, const char* what) {
    const Tokenizer* t = r->tokenizer;
    const char* of = t->paths[FILE_RANKS] ? t->paths[FILE_RANKS] :
                     TOKENIZER_FILES[t->paths[FILE_JSON] ? FILE_JSON : FILE_ENCODER];
    return added_find(r->rules, text, bytes) >= 0 ||
           fail_with(r->error, "%.600s: its %.40s '%.80s' is not among the added tokens of %.600s; "
                     TOKENIZER_SAVE_AGAIN, r->path, what, text, of);
}

static inline bool check_named(const TokenizerReader* r, uint32_t node, const char* what) {
    size_t bytes;
    const char* text = named_text(&bytes, r->json, node);
    return !text || check_added(r, text, bytes, what);
}

// Checks a list of added tokens: from text to id, or from id to an object with the text.
static inline bool check_ids(const TokenizerReader* r, uint32_t list) {
    const Json* json = r->json;
    for (uint32_t i = json_first(json, list); i != JSON_NONE; i = json_next(json, i)) {
        bool by_text = !json_is(json, i, JSON_OBJECT);
        size_t bytes = json->nodes[i].key_bytes;
        const char* text = by_text ? json_key(json, i) : named_text(&bytes, json, i);
        uint64_t id = by_text ? UINT64_MAX : strtoull(json_key(json, i), NULL, 10);
        if (by_text) json_u64(json, i, &id);
        if (text && !check_added(r, text, bytes, "added token")) return false;
        if (text && (uint64_t)added_find(r->rules, text, bytes) != id)
            return fail_with(r->error, "%.600s: the added token %.40s has another id in the tokenizer; use another "
                             "copy", r->path, json_key(json, i));
    }
    return true;
}

// The special tokens of tokenizer_config.json or special_tokens_map.json.
static inline bool read_named(const TokenizerReader* r) {
    const Json* json = r->json;
    for (uint32_t i = json_first(json, 0); i != JSON_NONE; i = json_next(json, i)) {
        const char* key = json_key(json, i);
        size_t length = strlen(key);
        if (length > 6 && strcmp(key + length - 6, "_token") == 0 && !check_named(r, i, key)) return false;
        if (choice_find("additional_special_tokens|extra_special_tokens", key) < 0) continue;
        for (uint32_t k = json_first(json, i); k != JSON_NONE; k = json_next(json, k))
            if (!check_named(r, k, key)) return false;
    }
    int32_t begin = named_token(r->rules, json, json_get(json, 0, "bos_token"));
    int32_t end = named_token(r->rules, json, json_get(json, 0, "eos_token"));
    if (begin >= 0) r->tokenizer->begin_token = begin;
    if (end >= 0) r->tokenizer->end_of_text = end;
    return true;
}

// Refuses a space before a text where tokenizer_config.json contradicts tokenizer.json. In transformers the classes
// that only read tokenizer.json ignore this key; without it GPT-2's put no space.
static inline bool check_prefix(const TokenizerReader* r) {
    const Json* json = r->json;
    const char* kind = json_text(json, json_get(json, 0, "tokenizer_class"));
    bool there = r->rules->prefix != PREFIX_NEVER, gpt2 = kind && strncmp(kind, "GPT2Tokenizer", 13) == 0;
    for (size_t i = 0; i < r->rules->normalizer_count; i++)
        there |= r->rules->normalizers[i].kind == NORMALIZE_PREPEND;
    bool wanted = json_flag(json, 0, "add_prefix_space", gpt2 ? false : there);
    bool ignored = !kind || strcmp(kind, "PreTrainedTokenizerFast") == 0 || strcmp(kind, "TokenizersBackend") == 0 ||
                   (!r->rules->vocabulary.by_characters && strncmp(kind, "LlamaTokenizer", 14) == 0);
    return ignored || wanted == there ||
           fail_with(r->error, "%.600s: with its tokenizer_class, %.80s, %s space is put before a text, unlike in %s; "
                     "if that file is right, set \"add_prefix_space\" to %s", r->path, kind, wanted ? "a" : "no",
                     TOKENIZER_FILES[FILE_JSON], there ? "true" : "false");
}

// tokenizer_config.json: the tokens that begin and end a text, and the template of a chat.
static inline bool read_config(const TokenizerReader* r) {
    Tokenizer* t = r->tokenizer;
    const Json* json = r->json;
    if (!check_ids(r, json_get(json, 0, "added_tokens_decoder")) || !read_named(r)) return false;
    if (json_flag(json, 0, "split_special_tokens", false)) return tokenizer_refuse(r, "member", "split_special_tokens");
    if (t->paths[FILE_JSON] && !check_prefix(r)) return false;
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
    if (!text || t->chat_template) return true;
    t->chat_template = strdup(text);
    return t->chat_template || fail_with(r->error, "out of memory for a chat template");
}

// The token before a text: the template's, whatever "add_bos_token" says, as in transformers 5. Without a
// tokenizer.json, which has the template, that key decides.
static inline void read_begin(Tokenizer* t, const Json* config) {
    if (!t->paths[FILE_JSON] && config && json_flag(config, 0, "add_bos_token", false))
        t->begin_of_text = t->begin_token;
    if (t->begin_token < 0) t->begin_token = t->begin_of_text;
}

// Without a configuration, end-of-text is the added token with one of the usual names.
static inline void guess_end_of_text(Tokenizer* t) {
    static const char* const usual[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};
    for (size_t k = 0; k < sizeof usual / sizeof usual[0] && t->end_of_text < 0; k++)
        t->end_of_text = added_find(t->rules, usual[k], strlen(usual[k]));
}

#endif  // LLMTRAIN_TOKENIZER_JSON_H
