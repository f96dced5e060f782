// words.h: splits text into the words that a tokenizer encodes one by one.
//
//   const Pattern* pattern = pattern_named("gpt2");             or pattern_of_regex(text)
//   WordSplitter words = splitter_begin(unicode, pattern->split, false, text, bytes);
//   for (const char* word; (word = splitter_next(&words, &length)) != NULL;) ...
//
// Tokenizers publish their way of splitting as a regular expression. Those in PATTERNS are recognized by their text,
// and each has a scanner here that finds the same words in one pass, without a regular expression engine. Any other
// expression is not recognized, and the caller refuses it. The words cover the text, which must be valid UTF-8.

#ifndef LLMTRAIN_WORDS_H
#define LLMTRAIN_WORDS_H

#include "unicode.h"

typedef enum {
    SPLIT_WHOLE,    // the text is one word
    SPLIT_META,     // a word begins at each U+2581, which represents a space
    SPLIT_SPACED,   // a word begins at each U+2581 that follows something else
    SPLIT_GPT2,
    SPLIT_CL100K,   // GPT-4's, as `tiktoken` has it: white space at the end of a text is one word
    SPLIT_LLAMA3,   // the same, without that
    SPLIT_QWEN2,    // and a word for each digit
    SPLIT_O200K
} Split;

typedef struct {
    const char* name;   // what --pattern calls it, for rank files; NULL: in tokenizer.json only
    const char* regex;  // in tokenizer.json; NULL: only by its name
    Split split;
} Pattern;

#define PATTERN_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define PATTERN_SPACES_LAST "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define O200K_PREFIX "[^\\r\\n\\p{L}\\p{N}]?"
#define O200K_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
static const Pattern PATTERNS[] = {
    {"gpt2", "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2},
    {NULL, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s", SPLIT_GPT2},
    {NULL, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2},
    // Its expression in `tiktoken` means something else in the regular expressions of `tokenizers`: not in the table.
    {"cl100k", NULL, SPLIT_CL100K},
    {NULL, PATTERN_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
           PATTERN_SPACES_LAST, SPLIT_LLAMA3},
    {NULL, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*"
           "|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+", SPLIT_LLAMA3},
    {NULL, PATTERN_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
           PATTERN_SPACES_LAST, SPLIT_QWEN2},
    {"o200k", O200K_PREFIX O200K_UPPER "*" O200K_LOWER "+" PATTERN_CONTRACTIONS "?|"
              O200K_PREFIX O200K_UPPER "+" O200K_LOWER "*" PATTERN_CONTRACTIONS "?|"
              "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" PATTERN_SPACES_LAST, SPLIT_O200K},
};
#define PATTERN_NAMES "gpt2, cl100k, o200k"
enum { PATTERNS_COUNT = sizeof PATTERNS / sizeof PATTERNS[0] };

// NULL: there is none.
static inline const Pattern* pattern_named(const char* name) {
    for (size_t i = 0; i < PATTERNS_COUNT; i++)
        if (PATTERNS[i].name && strcmp(PATTERNS[i].name, name) == 0) return &PATTERNS[i];
    return NULL;
}
static inline const Pattern* pattern_of_regex(const char* regex) {
    for (size_t i = 0; i < PATTERNS_COUNT; i++)
        if (PATTERNS[i].regex && strcmp(PATTERNS[i].regex, regex) == 0) return &PATTERNS[i];
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// Scanners
//
// Each returns where the word that begins at p ends; p is before end. A regular expression tries its alternatives from
// left to right, and so do these.

static inline bool is_newline(uint32_t code) { return code == '\r' || code == '\n'; }

// Where a contraction ('s, 't, 're, ...) that begins at p ends, or p if there is none. With any_case U+017F is an s.
static inline const char* scan_contraction(const char* p, const char* end, bool any_case) {
    if (end - p < 2 || p[0] != '\'') return p;
    if (any_case && end - p >= 3 && memcmp(p + 1, "\xC5\xBF", 2) == 0) return p + 3;
    char bit = any_case ? 0x20 : 0;  // letters in lower case have it
    char a = (char)(p[1] | bit), b = end - p > 2 ? (char)(p[2] | bit) : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return p + 3;
    return p;
}

// " ?[^\s\p{L}\p{N}]+": p itself where that does not match.
static inline const char* scan_other(const Unicode* unicode, const char* p, const char* end) {
    const char* begin = p + (*p == ' ');
    const char* after = characters_skip(unicode, UNICODE_OTHERS, begin, end);
    return after > begin ? after : p;
}

// White space, which p points to: "\s*[\r\n]+|\s+(?!\S)|\s+", with the first alternative only if `lines`.
static inline const char* scan_space(const Unicode* unicode, const char* p, const char* end, bool lines, bool ends) {
    const char *after = p, *last = p, *line = NULL;  // last: where the last space begins; line: after the last newline
    for (;;) {
        Character c = character_at(unicode, after, end);
        if (!UNICODE_IN(c.kind, UNICODE_SPACES)) break;
        last = after;
        after += c.bytes;
        if (is_newline(c.code)) line = after;
    }
    if (ends && after == end) return after;
    if (lines && line) return line;
    return after == end || last == p ? after : last;  // the last one goes with what follows
}

static inline const char* scan_gpt2(const Unicode* unicode, const char* p, const char* end) {
    const char* after = scan_contraction(p, end, false);
    if (after > p) return after;
    Character c = character_at(unicode, p + (*p == ' '), end);
    const char* begin = p + (*p == ' ');
    if (UNICODE_IN(c.kind, UNICODE_LETTERS)) return characters_skip(unicode, UNICODE_LETTERS, begin + c.bytes, end);
    if (UNICODE_IN(c.kind, UNICODE_NUMBERS)) return characters_skip(unicode, UNICODE_NUMBERS, begin + c.bytes, end);
    if (UNICODE_IN(c.kind, UNICODE_OTHERS)) return characters_skip(unicode, UNICODE_OTHERS, begin + c.bytes, end);
    return scan_space(unicode, p, end, false, false);
}

// "\p{N}{1,most}"; p points to a number.
static inline const char* scan_number(const Unicode* unicode, const char* p, const char* end, int most) {
    for (; most > 0; most--) {
        Character c = character_at(unicode, p, end);
        if (!UNICODE_IN(c.kind, UNICODE_NUMBERS)) break;
        p += c.bytes;
    }
    return p;
}

static inline const char* scan_gpt4(const Unicode* unicode, const char* p, const char* end, int digits, bool ends) {
    const char* after = scan_contraction(p, end, true);
    if (after > p) return after;
    Character c = character_at(unicode, p, end);
    if (UNICODE_IN(c.kind, UNICODE_LETTERS)) return characters_skip(unicode, UNICODE_LETTERS, p + c.bytes, end);
    if (UNICODE_IN(c.kind, UNICODE_NUMBERS)) return scan_number(unicode, p, end, digits);
    Character next = character_at(unicode, p + c.bytes, end);
    if (!is_newline(c.code) && UNICODE_IN(next.kind, UNICODE_LETTERS))
        return characters_skip(unicode, UNICODE_LETTERS, p + c.bytes + next.bytes, end);
    after = scan_other(unicode, p, end);
    if (after == p) return scan_space(unicode, p, end, true, ends);
    while (after < end && is_newline((unsigned char)*after)) after++;
    return after;
}

#define O200K_UPPERS \
    (UNICODE_SET(UPPER) | UNICODE_SET(TITLE) | UNICODE_SET(MODIFIER) | UNICODE_SET(LETTER) | UNICODE_SET(MARK))
#define O200K_LOWERS (UNICODE_SET(LOWER) | UNICODE_SET(MODIFIER) | UNICODE_SET(LETTER) | UNICODE_SET(MARK))

// "UPPER*LOWER+" at p, or NULL. Some kinds are in both sets: the first part takes all that it can, and then gives
// characters back until the second part has one.
static inline const char* scan_o200k_lower(const Unicode* unicode, const char* p, const char* end) {
    const char* both = NULL;  // after the last character of the first part that can be in the second
    for (;;) {
        Character c = character_at(unicode, p, end);
        if (!UNICODE_IN(c.kind, O200K_UPPERS)) {
            return UNICODE_IN(c.kind, O200K_LOWERS) ? characters_skip(unicode, O200K_LOWERS, p + c.bytes, end) : both;
        }
        p += c.bytes;
        if (UNICODE_IN(c.kind, O200K_LOWERS)) both = p;
    }
}

// "UPPER+LOWER*" at p, or NULL.
static inline const char* scan_o200k_upper(const Unicode* unicode, const char* p, const char* end) {
    const char* after = characters_skip(unicode, O200K_UPPERS, p, end);
    return after > p ? characters_skip(unicode, O200K_LOWERS, after, end) : NULL;
}

static inline const char* scan_o200k(const Unicode* unicode, const char* p, const char* end) {
    Character c = character_at(unicode, p, end);
    bool prefix = !is_newline(c.code) && !UNICODE_IN(c.kind, UNICODE_LETTERS | UNICODE_NUMBERS);
    const char* after = prefix ? scan_o200k_lower(unicode, p + c.bytes, end) : NULL;
    if (!after) after = scan_o200k_lower(unicode, p, end);
    if (!after && prefix) after = scan_o200k_upper(unicode, p + c.bytes, end);
    if (!after) after = scan_o200k_upper(unicode, p, end);
    if (after) return scan_contraction(after, end, true);
    if (UNICODE_IN(c.kind, UNICODE_NUMBERS)) return scan_number(unicode, p, end, 3);
    after = scan_other(unicode, p, end);
    if (after == p) return scan_space(unicode, p, end, true, false);
    while (after < end && (is_newline((unsigned char)*after) || *after == '/')) after++;
    return after;
}

#define METASPACE "\xE2\x96\x81"  // U+2581

// To the next U+2581, or past several of them.
static inline const char* scan_meta(const char* p, const char* end, bool each) {
    bool before = end - p >= 3 && memcmp(p, METASPACE, 3) == 0;
    for (p += before ? 3 : 1; p < end; p += before ? 3 : 1) {
        bool here = *p == METASPACE[0] && end - p >= 3 && memcmp(p, METASPACE, 3) == 0;
        if (here && (each || !before)) return p;
        before = here;
    }
    return end;
}

// ------------------------------------------------------------------------------------------------
// Words

typedef struct {
    const Unicode* unicode;
    Split split;
    bool digits;       // each digit is a word, and what lies between two is split separately
    const char* at;
    const char* part;  // with digits: where the part between two of them ends
    const char* end;
} WordSplitter;

static inline WordSplitter splitter_begin(const Unicode* unicode, Split split, bool digits, const char* text,
                                          size_t bytes) {
    WordSplitter w = {unicode, split, digits, text, digits ? text : text + bytes, text + bytes};
    return w;
}

// The next word, not empty; NULL at the end of the text.
static inline const char* splitter_next(WordSplitter* w, size_t* length) {
    const char *p = w->at, *after = w->end;
    if (p == w->end) return NULL;
    if (p == w->part) {
        Character c = character_at(w->unicode, p, w->end);
        w->part = p + c.bytes;
        while (!UNICODE_IN(c.kind, UNICODE_DIGITS) && w->part < w->end) {
            Character next = character_at(w->unicode, w->part, w->end);
            if (UNICODE_IN(next.kind, UNICODE_DIGITS)) break;
            w->part += next.bytes;
        }
    }
    switch (w->split) {
        case SPLIT_WHOLE: after = w->part; break;
        case SPLIT_META: after = scan_meta(p, w->part, true); break;
        case SPLIT_SPACED: after = scan_meta(p, w->part, false); break;
        case SPLIT_GPT2: after = scan_gpt2(w->unicode, p, w->part); break;
        case SPLIT_CL100K: after = scan_gpt4(w->unicode, p, w->part, 3, true); break;
        case SPLIT_LLAMA3: after = scan_gpt4(w->unicode, p, w->part, 3, false); break;
        case SPLIT_QWEN2: after = scan_gpt4(w->unicode, p, w->part, 1, false); break;
        case SPLIT_O200K: after = scan_o200k(w->unicode, p, w->part); break;
    }
    w->at = after;
    *length = (size_t)(after - p);
    return p;
}

// Whether a text may be cut at `cut` without changing its words: after a letter and before a space, which no pattern
// puts into one word; or, where words begin at U+2581, before one that follows something else.
static inline bool split_may_cut(const Unicode* unicode, Split split, const char* begin, const char* cut,
                                 const char* end) {
    if (split == SPLIT_WHOLE || cut <= begin || cut >= end) return false;
    if (split == SPLIT_META || split == SPLIT_SPACED)
        return end - cut >= 3 && memcmp(cut, METASPACE, 3) == 0 &&
               (cut - begin < 3 || memcmp(cut - 3, METASPACE, 3) != 0);
    return *cut == ' ' && UNICODE_IN(character_before(unicode, cut, begin).kind, UNICODE_LETTERS);
}

#endif  // LLMTRAIN_WORDS_H
