// unicode.h: what tokenizers need of Unicode: UTF-8, classes of characters, and NFC.
//
//   Unicode* unicode = unicode_open(&error);                               1.1 MB, shared by all threads
//   Character c = character_at(unicode, p, end);                           c.code, c.kind, c.bytes
//   if (UNICODE_IN(c.kind, UNICODE_LETTERS)) ...                           \p{L}
//   Nfc* nfc = nfc_open(&error);
//   bool ok = nfc_append(&out, nfc, text, bytes, &error);                  out.bytes, out.count
//
// The kinds are those of Unicode 16, with which the regular expressions of `tokenizers` and `tiktoken` agree; NFC is
// that of `tokenizers`. unicode_tables.h has the data, and says where they are from. Texts must be valid UTF-8;
// utf8_repair makes them so. There is no case conversion, and there are no grapheme clusters, no NFD and no NFKC here.

#ifndef LLMTRAIN_UNICODE_H
#define LLMTRAIN_UNICODE_H

#include "../ops/base.h"
#include "unicode_tables.h"

#define UNICODE_END 0x110000u  // all code points are below it

// ------------------------------------------------------------------------------------------------
// Text: bytes that grow. {0} is an empty one.

typedef struct {
    char* bytes;  // (count), owned, without a zero byte at their end
    size_t count, capacity;
} Text;

static inline void text_free(Text* text) {
    free(text->bytes);
    memset(text, 0, sizeof *text);
}

// Makes room for `more` bytes after those that are there.
static inline bool text_reserve(Text* text, size_t more, Error* error) {
    return more <= text->capacity - text->count ||
           memory_grow(&text->bytes, &text->capacity, text->count + max_size(more, 256), 1) ||
           fail_with(error, "out of memory for %zu bytes of text; give a shorter text", text->count + more);
}

static inline bool text_append(Text* text, const char* bytes, size_t count, Error* error) {
    if (!text_reserve(text, count, error)) return false;
    if (count > 0) memcpy(text->bytes + text->count, bytes, count);
    text->count += count;
    return true;
}

// ------------------------------------------------------------------------------------------------
// UTF-8

// The code point at p, of valid UTF-8, and its bytes.
static inline uint32_t utf8_read(size_t* bytes, const char* text) {
    const unsigned char* p = (const unsigned char*)text;
    if (p[0] < 0x80) return *bytes = 1, p[0];
    if (p[0] < 0xE0) return *bytes = 2, (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    if (p[0] < 0xF0) return *bytes = 3, (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    return *bytes = 4, (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

// The length of the character that a text begins with. If it is not valid, *good is false, and this is the length that
// one U+FFFD replaces: the longest beginning of a character, or 1 ("Substitution of Maximal Subparts" in the standard).
static inline size_t utf8_check(bool* good, const char* text, size_t bytes) {
    const unsigned char* p = (const unsigned char*)text;
    *good = p[0] < 0x80;
    if (p[0] < 0xC2 || p[0] > 0xF4) return 1;
    size_t length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    unsigned low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;  // of the second byte: no overlong forms,
    unsigned high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;  // no surrogates, nothing too large
    for (size_t i = 1; i < length; i++, low = 0x80, high = 0xBF)
        if (i == bytes || p[i] < low || p[i] > high) return i;
    *good = true;
    return length;
}

// The length of the white-space character (by Python) that a text of `bytes` bytes begins with; 0 if there is none.
static inline size_t utf8_space(const char* text, size_t bytes) {
    const unsigned char* p = (const unsigned char*)text;
    if (bytes >= 1 && (p[0] == ' ' || (p[0] >= 9 && p[0] <= 13) || (p[0] >= 28 && p[0] <= 31))) return 1;
    if (bytes >= 2 && p[0] == 0xC2 && (p[1] == 0x85 || p[1] == 0xA0)) return 2;
    if (bytes < 3 || p[0] < 0xE1 || p[0] > 0xE3) return 0;
    uint32_t code = (p[0] & 0xFu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    bool space = code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
                 code == 0x202F || code == 0x205F || code == 0x3000;
    return space ? 3 : 0;
}

// The same for the white-space character that the `bytes` bytes before `end` end with.
static inline size_t utf8_space_before(const char* end, size_t bytes) {
    for (size_t n = 1; n <= min_size(3, bytes); n++)
        if (utf8_space(end - n, n) == n) return n;
    return 0;
}

// The number of bytes at the beginning of a text that are valid UTF-8.
static inline size_t utf8_valid(const char* text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint64_t eight;
        if (at + 8 <= bytes && (memcpy(&eight, text + at, 8), (eight & 0x8080808080808080u) == 0)) {
            at += 8;
            continue;
        }
        bool good;
        size_t length = utf8_check(&good, text + at, bytes - at);
        if (!good) return at;
        at += length;
    }
    return at;
}

// Appends a text with invalid UTF-8 replaced by U+FFFD, as in Python and Rust; adds the replacements to *replaced.
static inline bool utf8_repair(Text* out, size_t* replaced, const char* text, size_t bytes, Error* error) {
    for (size_t at = 0; at < bytes;) {
        bool good;
        size_t valid = utf8_valid(text + at, bytes - at);
        if (!text_append(out, text + at, valid, error)) return false;
        at += valid;
        if (at == bytes) break;
        if (!text_append(out, "\xEF\xBF\xBD", 3, error)) return false;
        at += utf8_check(&good, text + at, bytes - at);
        ++*replaced;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Kinds of characters

typedef struct {
    uint8_t kinds[UNICODE_END];  // UNICODE_LETTER, ... of every code point
} Unicode;

#define UNICODE_NO_KIND 31  // of the end of a text: in no set
#define UNICODE_SET(kind) (1u << UNICODE_##kind)
#define UNICODE_SPACES UNICODE_SET(SPACE)
#define UNICODE_LETTERS \
    (UNICODE_SET(UPPER) | UNICODE_SET(LOWER) | UNICODE_SET(TITLE) | UNICODE_SET(MODIFIER) | UNICODE_SET(LETTER))
#define UNICODE_NUMBERS (UNICODE_SET(NUMBER) | UNICODE_SET(FRACTION))
#define UNICODE_DIGITS (UNICODE_NUMBERS | UNICODE_SET(NEW_NUMBER))
#define UNICODE_WORDS (UNICODE_LETTERS | UNICODE_SET(MARK) | UNICODE_SET(NUMBER) | UNICODE_SET(WORD))
// Neither space nor letter nor number.
#define UNICODE_OTHERS (UNICODE_SET(OTHER) | UNICODE_SET(MARK) | UNICODE_SET(WORD) | UNICODE_SET(NEW_NUMBER))
#define UNICODE_IN(kind, set) ((((uint32_t)(set)) >> (kind)) & 1u)

// The caller frees it with free(); NULL after a failure.
static inline Unicode* unicode_open(Error* error) {
    Unicode* unicode = (Unicode*)memory_allocate(sizeof *unicode);
    if (!unicode) {
        fail_with(error, "out of memory for the table of characters: %zu bytes", sizeof *unicode);
        return NULL;
    }
    for (size_t i = 0, at = 0; i < sizeof UNICODE_CLASS_RUNS / sizeof UNICODE_CLASS_RUNS[0]; i++) {
        uint32_t length = UNICODE_CLASS_RUNS[i] / 16, kind = UNICODE_CLASS_RUNS[i] % 16;
        for (size_t k = 0; k < length; k++)
            unicode->kinds[at++] = (uint8_t)(kind == UNICODE_CLASSES ? UNICODE_UPPER + k % 2 : kind);
    }
    return unicode;
}

typedef struct {
    uint32_t code;
    uint8_t kind;   // UNICODE_NO_KIND at the end of the text
    uint8_t bytes;  // 0 there
} Character;

static inline Character character_at(const Unicode* unicode, const char* p, const char* end) {
    Character c = {0, UNICODE_NO_KIND, 0};
    if (p == end) return c;
    size_t bytes;
    c.code = utf8_read(&bytes, p);
    c.kind = unicode->kinds[c.code];
    c.bytes = (uint8_t)bytes;
    return c;
}

// The character before p; UNICODE_NO_KIND at the beginning of the text.
static inline Character character_before(const Unicode* unicode, const char* p, const char* begin) {
    const char* start = p;
    while (start > begin && (*--start & 0xC0) == 0x80) {}
    return character_at(unicode, start, p);
}

// Where a run of characters of a set ends.
static inline const char* characters_skip(const Unicode* unicode, uint32_t set, const char* p, const char* end) {
    for (;;) {
        Character c = character_at(unicode, p, end);
        if (!UNICODE_IN(c.kind, set)) return p;
        p += c.bytes;
    }
}

// ------------------------------------------------------------------------------------------------
// NFC (Unicode Standard Annex 15)
//
// A text is cut before each character that always begins a new composition: it and the first character of its
// decomposition have combining class 0, and it is not the second part of any composition. What lies between two cuts is
// decomposed, sorted by combining class, and composed. Most pieces are one character that does not change, and are only
// skipped. The time is linear in the text, whatever it is.

#define HANGUL_FIRST 0xAC00u   // syllables: 19 x 21 x 28, of a leading consonant, a vowel and perhaps a trailing one
#define HANGUL_LEADING 0x1100u
#define HANGUL_VOWEL 0x1161u
#define HANGUL_TRAILING 0x11A7u  // the number of "none"
#define HANGUL_COUNT 11172u

enum { NFC_SECOND = 1, NFC_CHANGES = 2, NFC_JOINS = 4 };

enum { NFC_SLOTS = 4096 };  // a power of two, over twice the compositions

typedef struct {
    uint32_t character, first, second;  // second: 0 where there is none
} NfcRow;

typedef struct {
    uint8_t combining[UNICODE_END];     // canonical combining class
    uint8_t marks[UNICODE_END];         // NFC_CHANGES: it has a decomposition, which is not composed again; NFC_SECOND:
                                        // it is the second part of a composition; NFC_JOINS: its decomposition begins
                                        // with a combining character (three Tibetan vowels)
    NfcRow rows[UNICODE_PARTED];
    size_t row_count;
    uint16_t by_character[UNICODE_END]; // row of a decomposition + 1, or 0
    uint16_t by_pair[NFC_SLOTS];        // row of a composition + 1, or 0: open addressing
} Nfc;

static inline size_t nfc_hash(uint32_t a, uint32_t b) {
    return (size_t)(((uint64_t)a << 32 | b) * 0x9E3779B97F4A7C15u >> 40) % NFC_SLOTS;
}

// Reads UNICODE_COMPOSITIONS or UNICODE_DECOMPOSITIONS.
static inline void nfc_read(Nfc* nfc, const uint32_t* table, size_t count, bool composes) {
    for (const uint32_t *p = table, *end = table + count; p < end;) {
        NfcRow row = {0, 0, *p++};
        for (uint32_t left = *p++; left > 0; left--) {
            row.character += *p++;
            row.first = *p++;
            nfc->rows[nfc->row_count++] = row;
            nfc->by_character[row.character] = (uint16_t)nfc->row_count;
            if (composes) {
                size_t slot = nfc_hash(row.first, row.second);
                while (nfc->by_pair[slot]) slot = (slot + 1) % NFC_SLOTS;
                nfc->by_pair[slot] = (uint16_t)nfc->row_count;
            }
            nfc->marks[composes ? row.second : row.character] |= composes ? NFC_SECOND : NFC_CHANGES;
            if (nfc->combining[row.first]) nfc->marks[row.character] |= NFC_JOINS;
        }
    }
}

// The caller frees it with free(); NULL after a failure.
static inline Nfc* nfc_open(Error* error) {
    Nfc* nfc = (Nfc*)memory_allocate(sizeof *nfc);
    if (!nfc) {
        fail_with(error, "out of memory for the tables of NFC: %zu bytes", sizeof *nfc);
        return NULL;
    }
    for (size_t i = 0, at = 0; i < sizeof UNICODE_COMBINING_RUNS / sizeof UNICODE_COMBINING_RUNS[0]; i++)
        for (uint32_t left = UNICODE_COMBINING_RUNS[i] / 256; left > 0; left--)
            nfc->combining[at++] = (uint8_t)(UNICODE_COMBINING_RUNS[i] % 256);
    nfc_read(nfc, UNICODE_COMPOSITIONS, sizeof UNICODE_COMPOSITIONS / sizeof UNICODE_COMPOSITIONS[0], true);
    nfc_read(nfc, UNICODE_DECOMPOSITIONS, sizeof UNICODE_DECOMPOSITIONS / sizeof UNICODE_DECOMPOSITIONS[0], false);
    for (uint32_t c = HANGUL_VOWEL; c < HANGUL_VOWEL + 21; c++) nfc->marks[c] |= NFC_SECOND;
    for (uint32_t c = HANGUL_TRAILING + 1; c < HANGUL_TRAILING + 28; c++) nfc->marks[c] |= NFC_SECOND;
    return nfc;
}

// Whether a composition begins at a character whatever comes before it.
static inline bool nfc_begins(const Nfc* nfc, uint32_t code) {
    return nfc->combining[code] == 0 && !(nfc->marks[code] & (NFC_SECOND | NFC_JOINS));
}

// Writes the full decomposition, at most 4 characters; returns how many. The recursion ends: only the first part can
// have a decomposition of its own.
static inline size_t nfc_decompose(uint32_t out[8], const Nfc* nfc, uint32_t code) {
    if (code >= HANGUL_FIRST && code < HANGUL_FIRST + HANGUL_COUNT) {
        uint32_t syllable = code - HANGUL_FIRST, trailing = syllable % 28;
        out[0] = HANGUL_LEADING + syllable / 588;
        out[1] = HANGUL_VOWEL + syllable % 588 / 28;
        out[2] = HANGUL_TRAILING + trailing;
        return trailing ? 3 : 2;
    }
    if (!nfc->by_character[code]) return out[0] = code, 1;
    const NfcRow* row = &nfc->rows[nfc->by_character[code] - 1];
    size_t count = nfc_decompose(out, nfc, row->first);
    return row->second ? count + nfc_decompose(out + count, nfc, row->second) : count;
}

// The composition of two characters, 0 if there is none.
static inline uint32_t nfc_compose(const Nfc* nfc, uint32_t a, uint32_t b) {
    if (a - HANGUL_LEADING < 19 && b - HANGUL_VOWEL < 21)
        return HANGUL_FIRST + (a - HANGUL_LEADING) * 588 + (b - HANGUL_VOWEL) * 28;
    if (a - HANGUL_FIRST < HANGUL_COUNT && (a - HANGUL_FIRST) % 28 == 0 && b - (HANGUL_TRAILING + 1) < 27)
        return a + (b - HANGUL_TRAILING);
    if (!(nfc->marks[b] & NFC_SECOND)) return 0;
    for (size_t slot = nfc_hash(a, b); nfc->by_pair[slot]; slot = (slot + 1) % NFC_SLOTS) {
        const NfcRow* row = &nfc->rows[nfc->by_pair[slot] - 1];
        if (row->first == a && row->second == b) return row->character;
    }
    return 0;
}

// Sorts characters of combining classes above 0 by their class; equal ones keep their order. A counting sort, so that
// a million of them take no longer than a million pairs.
static inline void nfc_sort(uint32_t* codes, uint32_t* scratch, const Nfc* nfc, size_t count) {
    size_t start[257] = {0};
    for (size_t i = 0; i < count; i++) start[nfc->combining[codes[i]] + 1]++;
    for (size_t i = 1; i < 257; i++) start[i] += start[i - 1];
    for (size_t i = 0; i < count; i++) scratch[start[nfc->combining[codes[i]]]++] = codes[i];
    memcpy(codes, scratch, count * sizeof *codes);
}

// Composes characters that are decomposed and in order; returns how many remain.
static inline size_t nfc_join(uint32_t* codes, const Nfc* nfc, size_t count) {
    size_t kept = 0, starter = SIZE_MAX;
    int last = -1;  // combining class of the last character kept after the starter; -1: there is none
    for (size_t i = 0; i < count; i++) {
        int class_of = nfc->combining[codes[i]];
        bool adjacent = last == -1 || last < class_of;  // nothing between blocks it
        uint32_t whole = starter != SIZE_MAX && adjacent ? nfc_compose(nfc, codes[starter], codes[i]) : 0;
        if (whole) {
            codes[starter] = whole;
            continue;
        }
        last = class_of;
        if (class_of == 0) {
            starter = kept;
            last = -1;
        }
        codes[kept++] = codes[i];
    }
    return kept;
}

// Appends the normal form of a piece between two cuts.
static inline bool nfc_append_piece(Text* out, const Nfc* nfc, const char* text, size_t bytes, Error* error) {
    uint32_t few[256], *codes = few, one[8];
    size_t count = 0, length;
    for (size_t at = 0; at < bytes; at += length) count += nfc_decompose(one, nfc, utf8_read(&length, text + at));
    if (2 * count > 256) codes = (uint32_t*)malloc(2 * count * sizeof *codes);
    if (!codes) return fail_with(error, "out of memory for %zu characters that combine; give a shorter text", count);
    count = 0;
    for (size_t at = 0; at < bytes; at += length) {
        size_t more = nfc_decompose(one, nfc, utf8_read(&length, text + at));
        memcpy(codes + count, one, more * sizeof *codes);
        count += more;
    }
    for (size_t i = 0, end; i < count; i = end + 1) {
        for (end = i; end < count && nfc->combining[codes[end]] > 0;) end++;
        if (end - i > 1) nfc_sort(codes + i, codes + count, nfc, end - i);
    }
    count = nfc_join(codes, nfc, count);
    bool ok = text_reserve(out, 4 * count, error);
    for (size_t i = 0; ok && i < count; i++) out->count += utf8_write(out->bytes + out->count, codes[i]);
    if (codes != few) free(codes);
    return ok;
}

// Appends the normal form of a text.
static inline bool nfc_append(Text* out, const Nfc* nfc, const char* text, size_t bytes, Error* error) {
    size_t plain = 0, at = 0;  // from `plain` on, nothing has been appended yet
    if (!text_reserve(out, bytes, error)) return false;
    while (at < bytes) {
        size_t length, after, next;
        uint32_t code = utf8_read(&length, text + at);
        bool stays = !(nfc->marks[code] & NFC_CHANGES) && nfc_begins(nfc, code);
        for (after = at + length; after < bytes; after += next, stays = false)  // to the next beginning
            if (nfc_begins(nfc, utf8_read(&next, text + after))) break;
        if (!stays) {
            if (!text_append(out, text + plain, at - plain, error) ||
                !nfc_append_piece(out, nfc, text + at, after - at, error))
                return false;
            plain = after;
        }
        at = after;
    }
    return text_append(out, text + plain, bytes - plain, error);
}

#endif  // LLMTRAIN_UNICODE_H
