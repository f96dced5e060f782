// tokenizer_files.h: finds and reads tokenizers: tokenizer.json, GPT-2's two files, rank files of tiktoken.
//
//   Tokenizer tokenizer;
//   bool ok = tokenizer_files_find(&tokenizer, "models/x", NULL, &error) && tokenizer_files_read(&tokenizer, &error);
//
// tokenizer_json.h says what is read of a tokenizer.json. A damaged file is refused with a message that says what is
// wrong with it. Memory is in proportion to the file.

#ifndef LLMTRAIN_TOKENIZER_FILES_H
#define LLMTRAIN_TOKENIZER_FILES_H

#include "tokenizer_json.h"

#define TOKENIZER_BYTES_MAX ((size_t)256 << 20)  // of a file; the largest published ones have 35 MB
#define RANKS_BYTES_MAX ((size_t)64 << 20)

// ------------------------------------------------------------------------------------------------
// GPT-2's files, and rank files

static inline bool add_special(const TokenizerReader* r, const char* text, int32_t id) {
    AddedToken added = {.id = id, .special = true};
    uint32_t configured = configured_token(r->config, (uint64_t)id);
    if (configured != JSON_NONE) read_options(&added, r->config, configured);
    return rules_add(r, added, text, strlen(text));
}

// Reads the vocabulary, vocab.json or encoder.json, and the merges, the lines of merges.txt or vocab.bpe.
static inline bool read_gpt2(TokenizerReader* r, const char* merges, size_t bytes) {
    Tokenizer* t = r->tokenizer;
    const char* end = merges + bytes;
    size_t size, lines = 0, rank = 0;
    r->byte_level = true;
    r->rules->split = SPLIT_GPT2;
    for (const char* p = merges; p < end; p++) lines += *p == '\n';
    if (!count_ids(r, &size, 0, JSON_NONE) || !read_vocabulary(r, 0, size) ||
        !merges_begin(&r->rules->vocabulary, lines + 1, r->error) || !rules_add_begin(r->rules, 1, r->error))
        return false;
    r->path = t->paths[FILE_MERGES];
    for (const char *p = merges, *line; p < end; p = line + 1) {
        line = (const char*)memchr(p, '\n', (size_t)(end - p));
        if (!line) line = end;
        size_t length = (size_t)(line - p);
        if (length > 0 && p[length - 1] == '\r') length--;
        if (length == 0 || (length >= 8 && memcmp(p, "#version", 8) == 0)) continue;
        if (utf8_valid(p, length) != length) return tokenizer_damaged(r, "merge %zu is not UTF-8", rank);
        if (!read_merge_line(r, p, length, rank++)) return false;
    }
    find_symbols(&r->rules->vocabulary, true, false);
    t->end_of_text = find_name(r, "<|endoftext|>", 13);
    snprintf(t->name, sizeof t->name, "GPT-2 BPE of %zu tokens", size);
    return t->end_of_text < 0 || add_special(r, "<|endoftext|>", t->end_of_text);
}

// Decodes four characters of base 64; returns the number of bytes, 0 if they are not base 64.
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

// Reads a line of a rank file: a token in base 64, a space, its rank. Returns the token's bytes; 0: it is no such line.
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

// Reads every line: in a first call to find the largest rank, in a second (`add`) to add the tokens.
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
            return fail_with(r->error, "%.600s: line %zu %s; is this a rank file of tiktoken?", r->path, number,
                             problem);
        if (!ok) return false;
    }
    return true;
}

// In tiktoken two tokens are merged if their concatenation is a token, whose id is the rank of the merge: every split
// of a token into two tokens is a merge.
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

// The special tokens of the published files, which do not list them; another file has end-of-text, after its ranks.
typedef struct {
    const char* pattern;
    size_t ranks;
    struct { const char* text; int32_t id; } tokens[5];  // the first is end-of-text
} RankSpecials;
static const RankSpecials RANK_SPECIALS[] = {
    {"gpt2", 50281, {{"<|endoftext|>", 50256}}},  // p50k_base, which leaves that rank free
    {"cl100k", 100256, {{"<|endoftext|>", 100257}, {"<|fim_prefix|>", 100258}, {"<|fim_middle|>", 100259},
                        {"<|fim_suffix|>", 100260}, {"<|endofprompt|>", 100276}}},
    {"o200k", 199998, {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}},
};

static inline bool read_ranks(TokenizerReader* r, const char* text, size_t bytes) {
    Tokenizer* t = r->tokenizer;
    Vocabulary* v = &r->rules->vocabulary;
    size_t ranks = 0, size = 0;
    if (!read_rank_lines(r, text, bytes, false, &ranks)) return false;
    if (ranks == 0) return tokenizer_damaged(r, "it has no tokens");
    RankSpecials end = {NULL, ranks, {{"<|endoftext|>", (int32_t)ranks}}};
    const RankSpecials* special = &end;
    for (size_t i = 0; i < sizeof RANK_SPECIALS / sizeof RANK_SPECIALS[0]; i++)
        if (strcmp(RANK_SPECIALS[i].pattern, t->pattern->name) == 0 && RANK_SPECIALS[i].ranks == ranks)
            special = &RANK_SPECIALS[i];
    size = ranks;
    for (int i = 0; i < 5 && special->tokens[i].text; i++) size = max_size(size, (size_t)special->tokens[i].id + 1);
    r->byte_level = true;
    r->rules->split = t->pattern->split;
    if (!vocabulary_begin(v, size, r->error) || !read_rank_lines(r, text, bytes, true, &ranks) ||
        !merges_of_ranks(v, r->error) || !rules_add_begin(r->rules, 5, r->error))
        return false;
    find_symbols(v, true, false);
    v->whole_words = true;
    for (int i = 0; i < 256; i++)
        if (v->bytes[i] < 0)
            return fail_with(r->error, "%.600s: it has no token for the byte %d; use another copy", r->path, i);
    t->end_of_text = special->tokens[0].id;
    for (int i = 0; i < 5 && special->tokens[i].text; i++)
        if (!add_special(r, special->tokens[i].text, special->tokens[i].id)) return false;
    snprintf(t->name, sizeof t->name, "tiktoken %s of %zu tokens", t->pattern->name, size);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Finding and reading

static inline bool tokenizer_files_path(Tokenizer* t, int file, const char* directory, const char* name, Error* error) {
    size_t bytes = strlen(directory) + strlen(name) + 2;
    free(t->paths[file]);
    t->paths[file] = (char*)malloc(bytes);
    if (!t->paths[file]) return fail_with(error, "out of memory for a path");
    snprintf(t->paths[file], bytes, "%s%s%s", directory, directory[0] && name[0] ? "/" : "", name);
    return true;
}

// The name of a rank file in a directory that keeps it: cl100k.tiktoken, ...
static inline void ranks_name(char name[32], const Pattern* pattern) {
    snprintf(name, 32, "%s.tiktoken", pattern->name);
}

// Takes a file of a directory if it is there.
static inline bool tokenizer_files_take(Tokenizer* t, int file, const char* directory, const char* name, Error* error) {
    bool there;
    if (!tokenizer_files_path(t, file, directory, name, error)) return false;
    bool good = path_look(&there, t->paths[file], error);
    if (there) return true;
    free(t->paths[file]);
    t->paths[file] = NULL;
    return good;
}

// GPT-2's two files, by the names of Hugging Face and by those of OpenAI.
static const char* const GPT2_FILES[2][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};

// What other tokenizers are published as, without a tokenizer.json.
static const char* const FOREIGN_TOKENIZERS[] = {"tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model"};
enum { FOREIGN_TOKENIZER_COUNT = sizeof FOREIGN_TOKENIZERS / sizeof FOREIGN_TOKENIZERS[0] };

// Takes the files of a directory that add to those with the tokens.
static inline bool tokenizer_files_beside(Tokenizer* t, const char* directory, Error* error) {
    static const int files[] = {FILE_CONFIG, FILE_TEMPLATE, FILE_SPECIAL, FILE_ADDED};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        if (!tokenizer_files_take(t, files[i], directory, TOKENIZER_FILES[files[i]], error)) return false;
    return true;
}

static inline bool tokenizer_files_find_in(Tokenizer* t, const char* directory, Error* error) {
    if (!tokenizer_files_take(t, FILE_JSON, directory, TOKENIZER_FILES[FILE_JSON], error)) return false;
    if (!tokenizer_files_beside(t, directory, error)) return false;
    for (int i = 0; i < FOREIGN_TOKENIZER_COUNT && !t->paths[FILE_JSON]; i++) {
        if (!tokenizer_files_take(t, FILE_JSON, directory, FOREIGN_TOKENIZERS[i], error)) return false;
        if (t->paths[FILE_JSON])
            return fail_with(error, "%.600s has %s, but no %s; " TOKENIZER_SAVE_AGAIN, directory,
                             FOREIGN_TOKENIZERS[i], TOKENIZER_FILES[FILE_JSON]);
    }
    for (int i = 0; i < 2 && !t->paths[FILE_JSON] && !t->paths[FILE_ENCODER]; i++)
        if (!tokenizer_files_take(t, FILE_ENCODER, directory, GPT2_FILES[i][0], error) ||
            (t->paths[FILE_ENCODER] && !tokenizer_files_take(t, FILE_MERGES, directory, GPT2_FILES[i][1], error)))
            return false;
    for (size_t i = 0; i < PATTERNS_COUNT && !t->paths[FILE_RANKS] && !t->paths[FILE_JSON]; i++) {
        char name[32];
        if (!PATTERNS[i].name) continue;
        ranks_name(name, &PATTERNS[i]);
        if (!tokenizer_files_take(t, FILE_RANKS, directory, name, error)) return false;
        if (t->paths[FILE_RANKS]) t->pattern = &PATTERNS[i];
    }
    bool gpt2 = t->paths[FILE_ENCODER] && t->paths[FILE_MERGES];
    return t->paths[FILE_JSON] || t->paths[FILE_RANKS] || gpt2 ||
           fail_with(error, "%.600s has no tokenizer.json, nor vocab.json with merges.txt, nor encoder.json with "
                     "vocab.bpe; give a directory with a tokenizer", directory);
}

// Finds the files of a tokenizer: in a directory, or next to a file.
static inline bool tokenizer_files_find(Tokenizer* t, const char* path, const char* pattern, Error* error) {
    memset(t, 0, sizeof *t);
    t->begin_of_text = t->begin_token = t->end_of_text = -1;
    if (pattern && !pattern_named(pattern))
        return fail_with(error, "there is no pattern '%.100s'; give one of " PATTERN_NAMES, pattern);
    if (directory_exists(path)) {
        if (pattern)
            return fail_with(error, "%.600s is a directory, but --pattern is for a rank file; leave it out", path);
        return tokenizer_files_find_in(t, path, error);
    }
    if (access(path, F_OK) != 0) return fail_file(error, "open", path);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t length = strlen(name);
    bool ranks = length > 9 && strcmp(name + length - 9, ".tiktoken") == 0;
    if (ranks && !pattern)
        return fail_with(error, "%.600s is a rank file, which does not say how words are split; give --pattern, one of "
                         PATTERN_NAMES, path);
    if (pattern) {
        t->pattern = pattern_named(pattern);
        return tokenizer_files_path(t, FILE_RANKS, "", path, error);
    }
    char directory[FILE_PATH_MAX];
    if (!path_copy(directory, slash ? path : ".", error)) return false;
    if (slash) directory[slash == path ? 1 : slash - path] = 0;
    if (!tokenizer_files_beside(t, directory, error)) return false;
    for (int i = 0; i < 2; i++)
        if (strcmp(name, GPT2_FILES[i][0]) == 0)
            return tokenizer_files_path(t, FILE_ENCODER, directory, name, error) &&
                   tokenizer_files_path(t, FILE_MERGES, directory, GPT2_FILES[i][1], error);
    return tokenizer_files_path(t, FILE_JSON, "", path, error);
}

// Reads a file of the tokenizer, and adds it to the hash. A file that the tokenizer does not have is empty.
static inline bool tokenizer_files_load(const Tokenizer* t, int file, char** text, size_t* bytes, Hash* hash,
                               Error* error) {
    *text = NULL;
    *bytes = 0;
    if (!t->paths[file]) return true;
    if (!file_read(t->paths[file], file == FILE_RANKS ? RANKS_BYTES_MAX : TOKENIZER_BYTES_MAX, text, bytes, error))
        return false;
    if (file >= FILES_KEPT) return true;
    uint64_t length = *bytes;
    hash_add(hash, &length, sizeof length);
    hash_add(hash, *text, *bytes);
    return true;
}

// GPT-2's two files do not say which tokenizer they belong to. Refuses by name, from tokenizer_config.json, another
// tokenizer.
static inline bool check_gpt2_config(const TokenizerReader* r) {
    const Json* json = r->json;
    const char* kind = json_text(json, json_get(json, 0, "tokenizer_class"));
    if (kind && strcmp(kind, "GPT2Tokenizer") != 0 && strcmp(kind, "GPT2TokenizerFast") != 0)
        return fail_with(r->error, "%.600s: a %.80s cannot be read from %s and %s; " TOKENIZER_SAVE_AGAIN, r->path,
                         kind, GPT2_FILES[0][0], GPT2_FILES[0][1]);
    if (json_flag(json, 0, "add_prefix_space", false))
        return fail_with(r->error, "%.600s: \"add_prefix_space\" is supported in a tokenizer.json only; "
                         TOKENIZER_SAVE_AGAIN, r->path);
    if (json_flag(json, 0, "add_eos_token", false)) return tokenizer_refuse(r, "member", "add_eos_token");
    return r->tokenizer->end_of_text >= 0 ||
           fail_with(r->error, "%.600s has no <|endoftext|>, which transformers would add; " TOKENIZER_SAVE_AGAIN,
                     r->tokenizer->paths[FILE_ENCODER]);
}

// Reads the files that tokenizer_files_find has found.
static inline bool tokenizer_files_read(Tokenizer* t, Error* error) {
    char* texts[FILES_COUNT] = {NULL};
    size_t bytes[FILES_COUNT] = {0};
    Json json[FILES_COUNT];
    Hash hash = hash_begin(0);
    int file = t->paths[FILE_JSON] ? FILE_JSON : t->paths[FILE_RANKS] ? FILE_RANKS : FILE_ENCODER;
    const Json* config = t->paths[FILE_CONFIG] ? &json[FILE_CONFIG] : NULL;
    memset(json, 0, sizeof json);
    t->rules = (Rules*)memory_allocate(sizeof(Rules));
    bool ok = t->rules || fail_with(error, "out of memory for a tokenizer");
    ok = ok && (t->rules->unicode = unicode_open(error)) != NULL;
    if (t->pattern) hash_add(&hash, t->pattern->name, strlen(t->pattern->name));
    for (int i = 0; ok && i < FILES_COUNT; i++) {
        if (i == FILE_TEMPLATE) t->tokens = hash_end(&hash);
        ok = tokenizer_files_load(t, i, &texts[i], &bytes[i], &hash, error);
    }
    t->hash = hash_end(&hash);
    if (ok && texts[FILE_TEMPLATE]) {
        t->chat_template = strdup(texts[FILE_TEMPLATE]);
        ok = t->chat_template || fail_with(error, "out of memory for a chat template");
    }
    for (int i = 0; ok && i < FILES_COUNT; i++)
        if (texts[i] && (i == FILE_CONFIG || i == FILE_SPECIAL || i == FILE_ADDED || (i == file && file != FILE_RANKS)))
            ok = json_parse(&json[i], texts[i], bytes[i], t->paths[i], error);
    TokenizerReader r = {t, t->rules, &json[file], t->paths[file], config, false, error};
    ok = ok && (file == FILE_RANKS ? read_ranks(&r, texts[file], bytes[file]) : file == FILE_JSON ? read_rules(&r)
                                   : read_gpt2(&r, texts[FILE_MERGES], bytes[FILE_MERGES]));
    if (config) {
        r.json = config;
        r.path = t->paths[FILE_CONFIG];
        ok = ok && (!t->paths[FILE_ENCODER] || check_gpt2_config(&r)) && read_config(&r);
    }
    // transformers does not read the two older files where the newer one lists the added tokens.
    static const int older[2] = {FILE_SPECIAL, FILE_ADDED};
    for (int i = 0; ok && i < 2 && !(config && json_get(config, 0, "added_tokens_decoder") != JSON_NONE); i++) {
        if (!texts[older[i]]) continue;
        r.json = &json[older[i]];
        r.path = t->paths[older[i]];
        ok = older[i] == FILE_SPECIAL ? read_named(&r) : check_ids(&r, 0);
    }
    if (ok) guess_end_of_text(t);
    if (ok) read_begin(t, config);
    if (ok) t->vocabulary = (int32_t)t->rules->vocabulary.size;
    for (int i = 0; i < FILES_COUNT; i++) {
        free(texts[i]);
        json_free(&json[i]);
    }
    return ok;
}

#endif  // LLMTRAIN_TOKENIZER_FILES_H
