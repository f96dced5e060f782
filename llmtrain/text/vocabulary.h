// vocabulary.h: the tokens and merges of byte-pair encoding, and the encoding of one word.
//
//   vocabulary_begin(&v, size, &error); vocabulary_add(&v, id, ...); vocabulary_add_key(&v, id, ...);     each token
//   merges_begin(&v, count, &error); merges_add(&v, left, right, id, rank);                               each merge
//   WordEncoder encoder = word_encoder_open(&v, true);
//   bool ok = word_encode(&tokens, &encoder, word, bytes, &error);
//   word_encoder_close(&encoder); vocabulary_free(&v);
//
// "Neural Machine Translation of Rare Words with Subword Units" (Sennrich, Haddow and Birch, 2016): a word begins as
// its bytes or characters, and of all pairs of neighbors that have a merge, the one of the lowest rank is merged, the
// leftmost first, until no pair has one. tokenizer_files.h fills in a vocabulary; tokenizer.h finds the words.
//
// A vocabulary does not change once it is made, so any number of threads may use it, each with a WordEncoder.

#ifndef LLMTRAIN_VOCABULARY_H
#define LLMTRAIN_VOCABULARY_H

#include "unicode.h"

#define TOKEN_BYTES_MAX ((size_t)4096)     // of one token; a file with a longer one is refused
#define VOCABULARY_MAX ((size_t)1 << 22)   // ids are below it

// ------------------------------------------------------------------------------------------------
// Tokens

// A list of tokens that grows. {0} is an empty one.
typedef struct {
    int32_t* ids;              // (count), owned
    size_t count, capacity;
    size_t replaced;           // how often U+FFFD replaced bytes that are not UTF-8
} Tokens;

static inline void tokens_free(Tokens* tokens) {
    free(tokens->ids);
    memset(tokens, 0, sizeof *tokens);
}

// Makes room for `more` tokens after those that are there.
static inline bool tokens_reserve(Tokens* tokens, size_t more, Error* error) {
    return more <= tokens->capacity - tokens->count ||
           memory_grow(&tokens->ids, &tokens->capacity, tokens->count + max_size(more, 256), sizeof(int32_t)) ||
           fail_with(error, "out of memory for %zu tokens; give a shorter text", tokens->count + more);
}

static inline bool tokens_append(Tokens* tokens, const int32_t* ids, size_t count, Error* error) {
    if (!tokens_reserve(tokens, count, error)) return false;
    if (count > 0) memcpy(tokens->ids + tokens->count, ids, count * sizeof *ids);
    tokens->count += count;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Vocabulary

typedef enum {
    TOKEN_ABSENT,    // no token has this id
    TOKEN_ORDINARY,
    TOKEN_ADDED,     // found in the text before it is split into words
    TOKEN_SPECIAL    // the same, and not text: <|endoftext|>
} TokenKind;

typedef struct {
    uint32_t key, piece;              // where its bytes begin in `text`: what is merged, what it decodes to
    uint16_t key_bytes, piece_bytes;  // key_bytes 0: no merge makes it
    uint8_t kind;                     // TokenKind
} Token;

typedef struct {
    uint32_t left, right;  // tokens
    uint32_t id;           // what they make
    uint32_t rank;         // MERGE_NONE: an empty slot
} Merge;
#define MERGE_NONE UINT32_MAX

typedef struct {
    Token* tokens;            // (size), owned
    size_t size;              // every id is below it
    Text text;                // keys and pieces
    uint32_t* slots;          // (slot_count) id + 1, or 0: open addressing by key
    size_t slot_count;        // a power of two
    Merge* merges;            // (merge_slots): open addressing by the pair
    size_t merge_slots;       // a power of two
    bool by_characters;       // words begin as characters, not bytes
    int32_t bytes[256];       // the token of each byte, -1: none. by_characters: for characters without a token
    int32_t unknown;          // for what has no token; -1: that is left out
    bool fuse_unknown;        // one for several consecutive unknown characters
    bool whole_words;         // a word that is a token is that token, whatever merges say
} Vocabulary;

static inline void vocabulary_free(Vocabulary* v) {
    free(v->tokens);
    free(v->slots);
    free(v->merges);
    text_free(&v->text);
    memset(v, 0, sizeof *v);
}

static inline bool vocabulary_begin(Vocabulary* v, size_t size, Error* error) {
    memset(v, 0, sizeof *v);
    v->size = size;
    v->unknown = -1;
    for (v->slot_count = 256; v->slot_count < 2 * size;) v->slot_count *= 2;
    v->tokens = (Token*)memory_allocate(size * sizeof(Token));
    v->slots = (uint32_t*)memory_allocate(v->slot_count * sizeof(uint32_t));
    memset(v->bytes, 0xFF, sizeof v->bytes);
    return (v->tokens && v->slots) || fail_with(error, "out of memory for a vocabulary of %zu tokens", size);
}

// A hash for short words, though any length works; not resistant to deliberate collisions.
static inline uint64_t word_hash(const char* word, size_t bytes) {
    const unsigned char* p = (const unsigned char*)word;
    uint64_t hash = bytes * XXH_PRIME1, last = 0;
    for (; bytes > 8; p += 8, bytes -= 8) hash = hash_rotate((hash ^ hash_read64(p)) * XXH_PRIME2, 29);
    if (bytes >= 4) last = (uint64_t)hash_read32(p) << 32 | hash_read32(p + bytes - 4);
    else if (bytes > 0) last = (uint64_t)p[0] << 16 | (uint64_t)p[bytes / 2] << 8 | p[bytes - 1];
    hash = (hash ^ last) * XXH_PRIME2;
    return (hash ^ (hash >> 32)) * XXH_PRIME3;
}

// The slot of a key: holds the id of its token + 1, or is empty.
static inline uint32_t* vocabulary_slot(const Vocabulary* v, const char* key, size_t bytes) {
    for (size_t i = word_hash(key, bytes) >> 20;; i++) {
        uint32_t* slot = &v->slots[i & (v->slot_count - 1)];
        if (*slot == 0) return slot;
        const Token* token = &v->tokens[*slot - 1];
        if (token->key_bytes == bytes && memcmp(v->text.bytes + token->key, key, bytes) == 0) return slot;
    }
}

// The token of a key, -1: none.
static inline int32_t vocabulary_find(const Vocabulary* v, const char* key, size_t bytes) {
    return (int32_t)*vocabulary_slot(v, key, bytes) - 1;
}

// Adds a token, whose id must be below `size`, by what it decodes to. False with the reason in *problem, NULL if out
// of memory.
static inline bool vocabulary_add(Vocabulary* v, size_t id, const char* piece, size_t bytes, TokenKind kind,
                                  const char** problem, Error* error) {
    *problem = bytes == 0 ? "is empty" : bytes > TOKEN_BYTES_MAX ? "has over 4096 bytes"
             : v->tokens[id].kind != TOKEN_ABSENT ? "has the id of another token" : NULL;
    if (*problem) return false;
    Token* token = &v->tokens[id];
    token->piece = (uint32_t)v->text.count;
    token->piece_bytes = (uint16_t)bytes;
    token->kind = (uint8_t)kind;
    return text_append(&v->text, piece, bytes, error);
}

// Gives a token the key by which words and merges find it.
static inline bool vocabulary_add_key(Vocabulary* v, size_t id, const char* key, size_t bytes, const char** problem,
                                      Error* error) {
    uint32_t* slot = bytes > TOKEN_BYTES_MAX ? NULL : vocabulary_slot(v, key, bytes);
    *problem = !slot ? "is longer than 4096 bytes" : *slot ? "occurs twice" : NULL;
    if (*problem) return false;
    Token* token = &v->tokens[id];
    bool same = bytes == token->piece_bytes && memcmp(v->text.bytes + token->piece, key, bytes) == 0;
    token->key = same ? token->piece : (uint32_t)v->text.count;
    token->key_bytes = (uint16_t)bytes;
    *slot = (uint32_t)id + 1;
    return same || text_append(&v->text, key, bytes, error);
}

static inline const char* vocabulary_key(const Vocabulary* v, int32_t id, size_t* bytes) {
    *bytes = v->tokens[id].key_bytes;
    return v->text.bytes + v->tokens[id].key;
}

static inline bool merges_begin(Vocabulary* v, size_t count, Error* error) {
    for (v->merge_slots = 64; v->merge_slots < 2 * count;) v->merge_slots *= 2;
    v->merges = (Merge*)memory_allocate(v->merge_slots * sizeof(Merge));
    if (!v->merges) return fail_with(error, "out of memory for %zu merges", count);
    for (size_t i = 0; i < v->merge_slots; i++) v->merges[i].rank = MERGE_NONE;
    return true;
}

// The slot of a pair: its merge, or an empty one, whose rank is MERGE_NONE.
static inline Merge* merge_slot(const Vocabulary* v, uint32_t left, uint32_t right) {
    uint64_t hash = ((uint64_t)left << 32 | right) * XXH_PRIME1;
    for (size_t i = (size_t)(hash >> 32);; i++) {
        Merge* merge = &v->merges[i & (v->merge_slots - 1)];
        if (merge->rank == MERGE_NONE || (merge->left == left && merge->right == right)) return merge;
    }
}

// False if the pair has a merge already.
static inline bool merges_add(Vocabulary* v, int32_t left, int32_t right, int32_t id, size_t rank) {
    Merge merge = {(uint32_t)left, (uint32_t)right, (uint32_t)id, (uint32_t)rank};
    Merge* slot = merge_slot(v, merge.left, merge.right);
    if (slot->rank != MERGE_NONE) return false;
    *slot = merge;
    return true;
}

// ------------------------------------------------------------------------------------------------
// A word
//
// A word is taken from the cache of words seen before, or its pairs are merged by a tree of minima over the ranks, so
// that a word of n symbols takes n log n, not n^2.

enum { CACHED_BYTES = 31, CACHED_IDS = 7, CACHE_SLOTS = 1 << 15, TREE_FAN = 16, TREE_LEVELS = 8 };

// A word and its tokens: one cache line.
typedef struct {
    char word[CACHED_BYTES];
    uint8_t bytes;           // 0: empty
    int32_t ids[CACHED_IDS];
    uint32_t count;
} CachedWord;

// What one thread needs.
typedef struct {
    const Vocabulary* vocabulary;
    CachedWord* cache;       // (CACHE_SLOTS), or NULL: not worth it
    uint32_t* ids;           // (room) a symbol's id is at its first position
    uint32_t* spans;         // (room) how many positions a symbol spans, at its first and its last one
    uint32_t* ranks;         // rank of a symbol's merge with the next one; after these the levels of a tree
    size_t room;
} WordEncoder;

static inline void word_encoder_close(WordEncoder* e) {
    free(e->cache);
    free(e->ids);
    free(e->spans);
    free(e->ranks);
    memset(e, 0, sizeof *e);
}

// The cache takes 2 MB: worth it for more than a page of text. Without memory for it, there is none.
static inline WordEncoder word_encoder_open(const Vocabulary* vocabulary, bool cache) {
    WordEncoder e = {.vocabulary = vocabulary};
    if (cache) e.cache = (CachedWord*)memory_allocate(CACHE_SLOTS * sizeof(CachedWord));
    return e;
}

// Writes the symbols that a word begins as, at most one more than it has bytes; returns how many.
static inline size_t word_symbols(uint32_t* symbols, const Vocabulary* v, const char* word, size_t bytes) {
    size_t count = 0, length = 1;
    bool unknown = false;  // one that is not written yet: it may fuse with the next
    for (size_t at = 0; at < bytes; at += length) {
        if (v->by_characters) utf8_read(&length, word + at);
        int32_t id = v->by_characters ? vocabulary_find(v, word + at, length) : v->bytes[(unsigned char)word[at]];
        if (id >= 0) {
            if (unknown) symbols[count++] = (uint32_t)v->unknown;
            unknown = false;
            symbols[count++] = (uint32_t)id;
            continue;
        }
        bool all = v->by_characters;  // its bytes have tokens
        for (size_t i = 0; i < length; i++) all = all && v->bytes[(unsigned char)word[at + i]] >= 0;
        for (size_t i = 0; all && i < length; i++) symbols[count++] = (uint32_t)v->bytes[(unsigned char)word[at + i]];
        if (all || v->unknown < 0) continue;
        if (unknown && !v->fuse_unknown) symbols[count++] = (uint32_t)v->unknown;
        unknown = true;
    }
    if (unknown) symbols[count++] = (uint32_t)v->unknown;
    return count;
}

// Lays out the tree over n ranks: level 0 is the ranks, and each number of a level is the minimum of TREE_FAN of the
// level below. starts[k]: where level k begins. Returns the number of levels; *size is the size of all of them.
static inline size_t tree_layout(size_t starts[TREE_LEVELS + 1], size_t* size, size_t n) {
    size_t levels = 0, at = 0;
    for (;; n /= TREE_FAN) {
        starts[levels++] = at;
        n = (n + TREE_FAN - 1) / TREE_FAN * TREE_FAN;
        at += n;
        if (n <= TREE_FAN) break;
    }
    *size = at;
    return levels;
}

static inline uint32_t tree_minimum(const uint32_t* block) {
    uint32_t low = block[0];
    for (size_t i = 1; i < TREE_FAN; i++) low = block[i] < low ? block[i] : low;
    return low;
}

// Sets a rank, and the minima above it that change.
static inline void tree_set(uint32_t* ranks, const size_t* starts, size_t levels, size_t position, uint32_t rank) {
    ranks[position] = rank;
    for (size_t k = 1; k < levels; k++) {
        uint32_t low = tree_minimum(ranks + starts[k - 1] + position / TREE_FAN * TREE_FAN);
        position /= TREE_FAN;
        if (ranks[starts[k] + position] == low) return;
        ranks[starts[k] + position] = low;
    }
}

// The first position with the lowest rank.
static inline size_t tree_first(const uint32_t* ranks, const size_t* starts, size_t levels, uint32_t low) {
    size_t position = 0;
    for (size_t k = levels; k-- > 0;) {
        const uint32_t* block = ranks + starts[k] + position * TREE_FAN;
        size_t i = 0;
        while (block[i] != low) i++;
        position = position * TREE_FAN + i;
    }
    return position;
}

static inline uint32_t word_rank(const WordEncoder* e, size_t at, size_t count) {
    size_t next = at + e->spans[at];
    return next < count ? merge_slot(e->vocabulary, e->ids[at], e->ids[next])->rank : MERGE_NONE;
}

// Merges the pairs among symbols, which are in e->ids; returns how many symbols remain.
static inline size_t word_merge(WordEncoder* e, size_t count) {
    size_t starts[TREE_LEVELS + 1], size, levels = tree_layout(starts, &size, count);
    uint32_t *ids = e->ids, *spans = e->spans, *ranks = e->ranks;
    for (size_t i = 0; i < count; i++) spans[i] = 1;
    memset(ranks, 0xFF, size * sizeof *ranks);
    for (size_t i = 0; i < count; i++) ranks[i] = word_rank(e, i, count);
    for (size_t k = 1; k < levels; k++)
        for (size_t i = 0; i < (starts[k] - starts[k - 1]) / TREE_FAN; i++)
            ranks[starts[k] + i] = tree_minimum(ranks + starts[k - 1] + i * TREE_FAN);
    for (;;) {
        uint32_t low = tree_minimum(ranks + starts[levels - 1]);
        if (low == MERGE_NONE) break;
        size_t at = tree_first(ranks, starts, levels, low), next = at + spans[at];
        ids[at] = merge_slot(e->vocabulary, ids[at], ids[next])->id;
        tree_set(ranks, starts, levels, next, MERGE_NONE);
        spans[at] += spans[next];
        spans[at + spans[at] - 1] = spans[at];
        tree_set(ranks, starts, levels, at, word_rank(e, at, count));
        if (at == 0) continue;
        size_t before = at - spans[at - 1];
        tree_set(ranks, starts, levels, before, word_rank(e, before, count));
    }
    size_t kept = 0;
    for (size_t i = 0; i < count; kept++) {
        size_t span = spans[i];
        ids[kept] = ids[i];
        i += span;
    }
    return kept;
}

static inline bool word_reserve(WordEncoder* e, size_t symbols, Error* error) {
    if (symbols <= e->room) return true;
    if (symbols > (size_t)1 << 31)
        return fail_with(error, "the text has a word of over 2^31 bytes; put spaces or line breaks into it");
    size_t starts[TREE_LEVELS + 1], tree;
    tree_layout(starts, &tree, symbols);
    free(e->ids);
    free(e->spans);
    free(e->ranks);
    e->ids = (uint32_t*)malloc(symbols * sizeof(uint32_t));
    e->spans = (uint32_t*)malloc(symbols * sizeof(uint32_t));
    e->ranks = (uint32_t*)malloc(tree * sizeof(uint32_t));
    e->room = e->ids && e->spans && e->ranks ? symbols : 0;
    return e->room > 0 ||
           fail_with(error, "out of memory for a word of %zu bytes; put spaces or line breaks into the text", symbols);
}

static inline bool word_encode_new(Tokens* out, WordEncoder* e, const char* word, size_t bytes, Error* error) {
    const Vocabulary* v = e->vocabulary;
    int32_t whole = v->whole_words ? vocabulary_find(v, word, bytes) : -1;
    if (whole >= 0) return tokens_append(out, &whole, 1, error);
    if (!word_reserve(e, bytes + 1, error)) return false;
    size_t count = word_merge(e, word_symbols(e->ids, v, word, bytes));
    return tokens_append(out, (const int32_t*)e->ids, count, error);
}

static inline bool word_encode(Tokens* out, WordEncoder* e, const char* word, size_t bytes, Error* error) {
    if (!e->cache || bytes > CACHED_BYTES) return word_encode_new(out, e, word, bytes, error);
    CachedWord* cached = &e->cache[word_hash(word, bytes) >> 40 & (CACHE_SLOTS - 1)];
    if (cached->bytes == bytes && memcmp(cached->word, word, bytes) == 0)
        return tokens_append(out, cached->ids, cached->count, error);
    size_t before = out->count;
    if (!word_encode_new(out, e, word, bytes, error)) return false;
    size_t count = out->count - before;
    if (count > CACHED_IDS) return true;
    memcpy(cached->word, word, bytes);
    cached->bytes = (uint8_t)bytes;
    cached->count = (uint32_t)count;
    if (count > 0) memcpy(cached->ids, out->ids + before, count * sizeof(int32_t));
    return true;
}

#endif  // LLMTRAIN_VOCABULARY_H
