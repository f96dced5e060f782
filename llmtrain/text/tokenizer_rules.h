// tokenizer_rules.h: what happens to a text before its words are encoded: normalization, added tokens, spaces.
//
//   Spans spans = {0};
//   Text buffers[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
//   bool ok = rules_apply(&spans, &base, buffers, &rules, text, bytes, &error);
//   spans.list[i]: an added token, or bytes of `base` that splitter_begin splits
//
// The steps are those of `tokenizers`: added tokens that match the text as it is are found; each part between two of
// them is normalized; added tokens that match normalized text are found there; then spaces are replaced and prepended.
// tokenizer_files.h reads the rules. The text must be valid UTF-8.

#ifndef LLMTRAIN_TOKENIZER_RULES_H
#define LLMTRAIN_TOKENIZER_RULES_H

#include "vocabulary.h"
#include "words.h"

// ------------------------------------------------------------------------------------------------
// Rules

typedef struct {
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
} AddedToken;

// Finds the longest added token at a position: a trie of bytes, whose nodes list their children as siblings.
typedef struct {
    uint32_t child, sibling;  // 0: none
    int32_t added;            // index of the added token that ends here, or -1
    uint8_t byte;
} TrieNode;

typedef struct {
    TrieNode* nodes;          // (count) node 0 is the root
    size_t count, capacity;
    bool begins[256];         // some token begins with this byte
} Trie;

typedef enum { NORMALIZE_NFC, NORMALIZE_PREPEND, NORMALIZE_REPLACE } NormalizerKind;

enum { NORMALIZERS_MAX = 8, NORMALIZER_BYTES = 64 };

typedef struct {
    NormalizerKind kind;
    char pattern[NORMALIZER_BYTES];  // NORMALIZE_REPLACE: not empty
    char content[NORMALIZER_BYTES];
} Normalizer;

typedef enum { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS } Prefix;
typedef enum { STRIP_NONE, STRIP_FIRST, STRIP_EACH } Strip;

typedef struct {
    Vocabulary vocabulary;
    Unicode* unicode;
    Nfc* nfc;                        // NULL: not needed
    Normalizer normalizers[NORMALIZERS_MAX];
    size_t normalizer_count;
    AddedToken* added;               // (added_count)
    size_t added_count;
    Trie raw, normalized;            // of added tokens
    bool meta;                       // spaces become U+2581
    Prefix prefix;                   // where a space (or U+2581) is put in front of a text that has none
    Split split;
    bool digits;                     // each digit is a word
    Strip strip;                     // decoding drops the space that was put in front of the text, or of each part
} Rules;

static inline void rules_free(Rules* rules) {
    if (!rules) return;
    vocabulary_free(&rules->vocabulary);
    free(rules->unicode);
    free(rules->nfc);
    free(rules->added);
    free(rules->raw.nodes);
    free(rules->normalized.nodes);
    free(rules);
}

// ------------------------------------------------------------------------------------------------
// Added tokens

static inline uint32_t trie_child(const Trie* trie, uint32_t node, uint8_t byte) {
    uint32_t child = trie->nodes[node].child;
    while (child && trie->nodes[child].byte != byte) child = trie->nodes[child].sibling;
    return child;
}

static inline bool trie_node(Trie* trie, uint32_t* node, uint8_t byte, Error* error) {
    size_t count = trie->count + 1;
    if (!memory_grow(&trie->nodes, &trie->capacity, count, sizeof(TrieNode)))
        return fail_with(error, "out of memory for added tokens: %zu bytes", count * sizeof(TrieNode));
    TrieNode fresh = {0, 0, -1, byte};
    *node = (uint32_t)trie->count;
    trie->nodes[trie->count++] = fresh;
    return true;
}

// False, with *twice, if the text is there already.
static inline bool trie_add(Trie* trie, bool* twice, const char* text, size_t bytes, int32_t added, Error* error) {
    uint32_t node = 0, child;
    *twice = false;
    if (trie->count == 0 && !trie_node(trie, &node, 0, error)) return false;
    for (size_t i = 0; i < bytes; i++, node = child) {
        uint8_t byte = (uint8_t)text[i];
        child = trie_child(trie, node, byte);
        if (child) continue;
        if (!trie_node(trie, &child, byte, error)) return false;
        trie->nodes[child].sibling = trie->nodes[node].child;
        trie->nodes[node].child = child;
    }
    *twice = trie->nodes[node].added >= 0;
    if (*twice) return false;
    trie->nodes[node].added = added;
    trie->begins[(uint8_t)text[0]] = true;
    return true;
}

// From here on the text of special tokens is text, as with split_special_tokens in transformers.
static inline void rules_split_special(Rules* rules) {
    Trie* tries[2] = {&rules->raw, &rules->normalized};
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; i < tries[t]->count; i++) {
            TrieNode* node = &tries[t]->nodes[i];
            if (node->added >= 0 && rules->added[node->added].special) node->added = -1;
        }
}

// The longest added token at p: its index and end, or -1.
static inline int32_t trie_longest(const Trie* trie, const char** after, const char* p, const char* end) {
    int32_t found = -1;
    uint32_t node = 0;
    while (p < end && (node = trie_child(trie, node, (uint8_t)*p)) != 0) {
        p++;
        if (trie->nodes[node].added >= 0) found = trie->nodes[node].added, *after = p;
    }
    return found;
}

// ------------------------------------------------------------------------------------------------
// Spans

typedef struct {
    size_t start, bytes;
    int32_t id;    // of an added token; -1: text
    bool first;    // text at the very beginning
} Span;

typedef struct {
    Span* list;    // (count), owned
    size_t count, capacity;
} Spans;

static inline bool spans_append(Spans* spans, size_t start, size_t end, int32_t id, bool first, Error* error) {
    if (id < 0 && start >= end) return true;
    if (!memory_grow(&spans->list, &spans->capacity, spans->count + 1, sizeof(Span)))
        return fail_with(error, "out of memory for %zu parts of a text; give a shorter text", spans->count + 1);
    Span span = {start, end - start, id, first};
    spans->list[spans->count++] = span;
    return true;
}

static inline const char* spaces_before(const Unicode* unicode, const char* p, const char* begin) {
    for (;;) {
        Character c = character_before(unicode, p, begin);
        if (!UNICODE_IN(c.kind, UNICODE_SPACES)) return p;
        p -= c.bytes;
    }
}

// Whether no word character touches an added token, as single_word requires.
static inline bool added_stands_alone(const Unicode* unicode, const char* p, const char* after, const char* begin,
                                      const char* end) {
    return !UNICODE_IN(character_before(unicode, p, begin).kind, UNICODE_WORDS) &&
           !UNICODE_IN(character_at(unicode, after, end).kind, UNICODE_WORDS);
}

// Appends a part of a text as spans: the added tokens, and what lies between them.
static inline bool added_split(Spans* out, const Rules* rules, const Trie* trie, const char* text, size_t start,
                               size_t bytes, bool first, Error* error) {
    const char *begin = text + start, *end = begin + bytes, *p = begin, *rest = begin;
    while (trie->count > 0 && p < end) {
        const char* after = p + 1;
        int32_t found = trie->begins[(uint8_t)*p] ? trie_longest(trie, &after, p, end) : -1;
        const char *from = p, *to = after;
        p = after;
        if (found < 0) continue;
        const AddedToken* added = &rules->added[found];
        if (added->single_word && !added_stands_alone(rules->unicode, from, to, begin, end)) continue;
        if (added->lstrip) {
            from = spaces_before(rules->unicode, from, begin);
            from = from < rest ? rest : from;
        }
        if (added->rstrip) to = characters_skip(rules->unicode, UNICODE_SPACES, to, end);
        if (from > rest && !spans_append(out, (size_t)(rest - text), (size_t)(from - text), -1,
                                         first && rest == begin, error))
            return false;
        // A token whose whole text was taken by the one before it, as spaces that follow that, does not count.
        if (from < to && !spans_append(out, (size_t)(from - text), (size_t)(to - text), added->id, false, error))
            return false;
        rest = to;
    }
    return rest >= end ||
           spans_append(out, (size_t)(rest - text), (size_t)(end - text), -1, first && rest == begin, error);
}

// ------------------------------------------------------------------------------------------------
// Normalization

// Appends a text with `pattern` replaced by `content`.
static inline bool text_replace(Text* out, const char* text, size_t bytes, const char* pattern, const char* content,
                                Error* error) {
    size_t length = strlen(pattern), put = strlen(content);
    const char *p = text, *end = text + bytes;
    while (p < end) {
        const char* found = p;
        for (;; found++) {
            found = (const char*)memchr(found, pattern[0], (size_t)(end - found));
            if (!found || (size_t)(end - found) < length || memcmp(found, pattern, length) == 0) break;
        }
        bool here = found && (size_t)(end - found) >= length;
        if (!here) found = end;
        if (!text_append(out, p, (size_t)(found - p), error)) return false;
        if (here && !text_append(out, content, put, error)) return false;
        p = found + (here ? length : 0);
    }
    return true;
}

// Appends the normal form of a text. Nothing is prepended to a text that is empty, or has become so.
static inline bool rules_normalize(Text* out, const Rules* rules, const char* text, size_t bytes, Error* error) {
    Text steps[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    bool ok = true;
    for (size_t i = 0; ok && i < rules->normalizer_count; i++) {
        const Normalizer* n = &rules->normalizers[i];
        Text* to = i + 1 == rules->normalizer_count ? out : &steps[i % 2];
        if (to != out) to->count = 0;
        if (n->kind == NORMALIZE_NFC) ok = nfc_append(to, rules->nfc, text, bytes, error);
        else if (n->kind == NORMALIZE_REPLACE) ok = text_replace(to, text, bytes, n->pattern, n->content, error);
        else ok = text_append(to, n->content, bytes > 0 ? strlen(n->content) : 0, error) &&
                  text_append(to, text, bytes, error);
        text = to->bytes;
        bytes = to->count;
    }
    if (ok && rules->normalizer_count == 0) ok = text_append(out, text, bytes, error);
    text_free(&steps[0]);
    text_free(&steps[1]);
    return ok;
}

// Normalizes the spans of `text` into `out`, and finds the added tokens that match normalized text.
static inline bool rules_normalize_spans(Spans* spans, Text* out, const Rules* rules, const char* text, Error* error) {
    Spans parts = {NULL, 0, 0};
    bool ok = true;
    for (size_t i = 0; ok && i < spans->count; i++) {
        Span span = spans->list[i];
        size_t start = out->count;
        if (span.id >= 0) {
            ok = spans_append(&parts, start, start, span.id, false, error);
            continue;
        }
        ok = rules_normalize(out, rules, text + span.start, span.bytes, error) &&
             added_split(&parts, rules, &rules->normalized, out->bytes, start, out->count - start, span.first, error);
    }
    free(spans->list);
    *spans = parts;
    return ok;
}

// Replaces and prepends spaces, into `out`.
static inline bool rules_space_spans(Spans* spans, Text* out, const Rules* rules, const char* text, Error* error) {
    const char* space = rules->meta ? METASPACE : " ";
    size_t length = strlen(space);
    bool ok = true;
    for (size_t i = 0; ok && i < spans->count; i++) {
        Span* span = &spans->list[i];
        const char* p = text + span->start;
        size_t start = out->count;
        if (span->id >= 0) continue;
        bool has = *p == ' ' || (span->bytes >= length && memcmp(p, space, length) == 0);
        bool wants = rules->prefix == PREFIX_ALWAYS || (rules->prefix == PREFIX_FIRST && span->first);
        if (!has && wants) ok = text_append(out, space, length, error);
        ok = ok && (rules->meta ? text_replace(out, p, span->bytes, " ", METASPACE, error)
                                : text_append(out, p, span->bytes, error));
        span->start = start;
        span->bytes = out->count - start;
    }
    return ok;
}

// The spans of a text. They lie in *base, which is the text or one of the buffers; the caller frees spans and buffers.
static inline bool rules_apply(Spans* spans, const char** base, Text buffers[2], const Rules* rules, const char* text,
                               size_t bytes, Error* error) {
    *base = text;
    if (!added_split(spans, rules, &rules->raw, text, 0, bytes, true, error)) return false;
    if (rules->normalizer_count > 0 || rules->normalized.count > 0) {
        if (!rules_normalize_spans(spans, &buffers[0], rules, *base, error)) return false;
        *base = buffers[0].bytes;
    }
    if (rules->meta || rules->prefix != PREFIX_NEVER) {
        if (!rules_space_spans(spans, &buffers[1], rules, *base, error)) return false;
        *base = buffers[1].bytes;
    }
    return true;
}

#endif  // LLMTRAIN_TOKENIZER_RULES_H
