// bpe.h: trains a byte-level byte-pair encoding, and writes it as a tokenizer.json that Hugging Face opens.
//
//   WordTable words = {0};
//   Bpe bpe;
//   bool ok = word_table_add_text(&words, unicode, text, bytes, &error) && bpe_train(&bpe, &words, 4096, &error) &&
//             bpe_save(&bpe, "data/tokenizer", &error);
//   bpe_free(&bpe);
//   word_table_close(&words);
//
//   1. words     the different words of texts, and how often each occurs
//   2. pairs     the pairs of neighboring tokens in these words, and a heap of them
//   3. training  merges the most frequent pair, again and again
//   4. files     tokenizer.json, tokenizer_config.json
//
// "Neural Machine Translation of Rare Words with Subword Units" (Sennrich, Haddow and Birch, 2016), on bytes as GPT-2
// does it: a text is split into words by GPT-2's pattern, a word is at first the tokens of its bytes, and then the pair
// of neighboring tokens that occurs most often becomes a token, until the vocabulary is full. Among equally frequent
// pairs the one of earlier tokens is first. So the result is a function of the text alone: it depends neither on the
// order in which texts are added nor on threads, and equals the result of Hugging Face's trainer.
//
// The vocabulary is 256 bytes, the merges, and <|endoftext|>, which is last. When every word is a token nothing is left
// to merge, so a small text may give fewer tokens than asked for. Memory: the different words, and for each pair the
// words that it occurs in.

#ifndef LLMTRAIN_BPE_H
#define LLMTRAIN_BPE_H

#include "../llmtrain/base/json.h"
#include "../llmtrain/base/progress.h"
#include "../llmtrain/text/tokenizer.h"  // TOKEN_BYTES_MAX
#include "../llmtrain/text/words.h"

// ------------------------------------------------------------------------------------------------
// 1. Words

#define WORD_BYTES_MAX ((size_t)1024)  // a longer word is cut into several: each merge in it would cost its length

typedef struct {
    uint64_t count;  // occurrences
    uint64_t hash;
    size_t start;    // in the table's bytes
    size_t bytes;
} Word;

typedef struct {
    char* bytes;       // of all words, owned
    size_t used, room;
    Word* words;       // (count), owned
    size_t count, places;
    uint32_t* slots;   // owned: word + 1, or 0 in an empty slot
    size_t slot_count; // a power of two, at least twice the words
} WordTable;

static inline void word_table_close(WordTable* table) {
    free(table->bytes);
    free(table->words);
    free(table->slots);
    memset(table, 0, sizeof *table);
}

static inline bool word_table_grow(WordTable* table, Error* error) {
    size_t count = max_size(2 * table->slot_count, 1024);
    uint32_t* slots = (uint32_t*)memory_allocate(count * sizeof *slots);
    if (!slots || count > UINT32_MAX) {
        free(slots);
        return fail_with(error, "out of memory for %zu different words; train on a part of the text", table->count);
    }
    for (size_t i = 0; i < table->count; i++) {
        size_t at = table->words[i].hash & (count - 1);
        while (slots[at]) at = (at + 1) & (count - 1);
        slots[at] = (uint32_t)(i + 1);
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    return true;
}

// Adds `count` to the occurrences of a word, which is put into the table if it is new. NULL after a failure.
static inline Word* word_table_add(WordTable* table, const char* word, size_t bytes, uint64_t count, Error* error) {
    if (2 * table->count >= table->slot_count && !word_table_grow(table, error)) return NULL;
    uint64_t hash = hash_bytes(word, bytes);
    size_t at = hash & (table->slot_count - 1), used = table->used + bytes;
    for (; table->slots[at]; at = (at + 1) & (table->slot_count - 1)) {
        Word* entry = &table->words[table->slots[at] - 1];
        if (entry->hash != hash || entry->bytes != bytes || memcmp(table->bytes + entry->start, word, bytes) != 0)
            continue;
        entry->count += count;
        return entry;
    }
    bool ok = memory_grow(&table->words, &table->places, table->count + 1, sizeof *table->words) ||
              fail_with(error, "out of memory for %zu different words; train on a part of the text", table->count + 1);
    ok = ok && (memory_grow(&table->bytes, &table->room, used, 1) ||
                fail_with(error, "out of memory for %zu bytes of words; train on a part of the text", used));
    if (!ok) return NULL;
    Word fresh = {count, hash, table->used, bytes};
    memcpy(table->bytes + table->used, word, bytes);
    table->used = used;
    table->words[table->count++] = fresh;
    table->slots[at] = (uint32_t)table->count;
    return &table->words[table->count - 1];
}

static inline bool word_table_add_valid(WordTable* table, const Unicode* unicode, const char* text, size_t bytes,
                                        Error* error) {
    size_t length;
    WordSplitter words = splitter_begin(unicode, SPLIT_GPT2, false, text, bytes);
    for (const char* word; (word = splitter_next(&words, &length)) != NULL;)
        for (size_t at = 0; at < length; at += WORD_BYTES_MAX)
            if (!word_table_add(table, word + at, min_size(length - at, WORD_BYTES_MAX), 1, error)) return false;
    return true;
}

// Counts the words of a text, in which U+FFFD replaces invalid UTF-8.
static inline bool word_table_add_text(WordTable* table, const Unicode* unicode, const char* text, size_t bytes,
                                       Error* error) {
    Text repaired = {0};
    size_t replaced = 0;
    if (utf8_valid(text, bytes) == bytes) return word_table_add_valid(table, unicode, text, bytes, error);
    bool ok = utf8_repair(&repaired, &replaced, text, bytes, error) &&
              word_table_add_valid(table, unicode, repaired.bytes, repaired.count, error);
    text_free(&repaired);
    return ok;
}

static inline bool word_table_merge(WordTable* table, const WordTable* other, Error* error) {
    for (size_t i = 0; i < other->count; i++) {
        const Word* word = &other->words[i];
        if (!word_table_add(table, other->bytes + word->start, word->bytes, word->count, error)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Pairs
//
// For each pair that has occurred: its count, and the words that it may be in (a merge may have removed it from one
// again). The heap has the most frequent pair at its top; a count that has fallen since the pair was put into the heap
// is corrected when the pair comes to the top.

typedef struct {
    uint64_t key;         // left token << 32 | right token
    int64_t count;
    uint32_t* words;      // (word_count), owned
    size_t word_count, places;
    bool changed;         // the current merge has created it somewhere
} Pair;

typedef struct {
    int64_t count;
    uint64_t key;
    size_t pair;
} HeapEntry;

typedef struct {
    Pair* pairs;          // (count), owned
    size_t count, places;
    size_t* slots;        // owned: pair + 1, or 0
    size_t slot_count;    // a power of two, at least twice the pairs
    HeapEntry* heap;      // (heap_count), owned
    size_t heap_count, heap_places;
} PairTable;

static inline void pair_table_free(PairTable* table) {
    for (size_t i = 0; i < table->count; i++) free(table->pairs[i].words);
    free(table->pairs);
    free(table->slots);
    free(table->heap);
    memset(table, 0, sizeof *table);
}

static inline bool bpe_out_of_memory(Error* error) {
    return fail_with(error, "out of memory for the pairs of tokens in the text; train on a part of it");
}

static inline size_t pair_slot(const PairTable* table, uint64_t key) {
    uint64_t mixed = key * XXH_PRIME1;
    size_t at = (size_t)(mixed ^ mixed >> 32) & (table->slot_count - 1);
    while (table->slots[at] && table->pairs[table->slots[at] - 1].key != key) at = (at + 1) & (table->slot_count - 1);
    return at;
}

static inline bool pair_table_grow(PairTable* table, Error* error) {
    size_t slot_count = max_size(2 * table->slot_count, 4096);
    size_t* slots = (size_t*)memory_allocate(slot_count * sizeof *slots);
    if (!slots || !memory_grow(&table->pairs, &table->places, slot_count / 2, sizeof *table->pairs)) {
        free(slots);
        return bpe_out_of_memory(error);
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = slot_count;
    for (size_t i = 0; i < table->count; i++) slots[pair_slot(table, table->pairs[i].key)] = i + 1;
    return true;
}

// Finds the pair's number; adds the pair if it has not occurred.
static inline bool pair_find(size_t* number, PairTable* table, int32_t left, int32_t right, Error* error) {
    uint64_t key = (uint64_t)left << 32 | (uint64_t)right;
    if (table->count == table->places && !pair_table_grow(table, error)) return false;
    size_t* slot = &table->slots[pair_slot(table, key)];
    if (*slot == 0) {
        Pair* pair = &table->pairs[table->count++];
        memset(pair, 0, sizeof *pair);
        pair->key = key;
        *slot = table->count;
    }
    *number = *slot - 1;
    return true;
}

static inline bool pair_add_word(Pair* pair, uint32_t word, Error* error) {
    if (pair->word_count > 0 && pair->words[pair->word_count - 1] == word) return true;
    if (!memory_grow(&pair->words, &pair->places, pair->word_count + 1, sizeof *pair->words))
        return bpe_out_of_memory(error);
    pair->words[pair->word_count++] = word;
    return true;
}

static inline bool heap_before(const HeapEntry* a, const HeapEntry* b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}

static inline bool heap_push(PairTable* table, size_t pair, Error* error) {
    if (!memory_grow(&table->heap, &table->heap_places, table->heap_count + 1, sizeof *table->heap))
        return bpe_out_of_memory(error);
    HeapEntry entry = {table->pairs[pair].count, table->pairs[pair].key, pair};
    size_t at = table->heap_count++;
    for (; at > 0 && heap_before(&entry, &table->heap[(at - 1) / 2]); at = (at - 1) / 2)
        table->heap[at] = table->heap[(at - 1) / 2];
    table->heap[at] = entry;
    return true;
}

static inline HeapEntry heap_pop(PairTable* table) {
    HeapEntry top = table->heap[0], last = table->heap[--table->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < table->heap_count; at = child) {
        if (child + 1 < table->heap_count && heap_before(&table->heap[child + 1], &table->heap[child])) child++;
        if (!heap_before(&table->heap[child], &last)) break;
        table->heap[at] = table->heap[child];
    }
    table->heap[at] = last;
    return top;
}

// ------------------------------------------------------------------------------------------------
// 3. Training

#define BPE_VOCABULARY_MIN 257    // the bytes and <|endoftext|>
#define BPE_VOCABULARY_MAX 1000000
#define BPE_END_OF_TEXT "<|endoftext|>"

typedef struct {
    int32_t left, right, token;
} BpeMerge;

typedef struct {
    WordTable pieces;      // the bytes of each token: its number is the token
    BpeMerge* merges;      // (merge_count), owned; in their order
    size_t merge_count;
} Bpe;

typedef struct {
    int32_t* tokens;       // of all words, owned
    size_t* starts;        // (words), owned: where the tokens of a word begin
    uint32_t* lengths;     // (words), owned: tokens in each, fewer after merges
    PairTable pairs;
    size_t* changed;       // pairs that the current merge has created, owned
    size_t changed_count, changed_places;
} BpeTrainer;

static inline void bpe_free(Bpe* bpe) {
    word_table_close(&bpe->pieces);
    free(bpe->merges);
    memset(bpe, 0, sizeof *bpe);
}

static inline void bpe_trainer_free(BpeTrainer* trainer) {
    free(trainer->tokens);
    free(trainer->starts);
    free(trainer->lengths);
    free(trainer->changed);
    pair_table_free(&trainer->pairs);
}

// The bytes are tokens 0 to 255 in the order of the characters that GPT-2 writes them as.
static inline int32_t byte_token(int byte) {
    int32_t before = 0;
    for (int i = 0; i < 256; i++) before += symbol_of_byte((unsigned char)i) < symbol_of_byte((unsigned char)byte);
    return before;
}

// Counts a pair `by` more or fewer times in a word.
static inline bool bpe_count(BpeTrainer* t, int32_t left, int32_t right, int64_t by, uint32_t word, Error* error) {
    size_t number;
    if (!pair_find(&number, &t->pairs, left, right, error)) return false;
    Pair* pair = &t->pairs.pairs[number];
    pair->count += by;
    if (by < 0) return true;
    if (!pair_add_word(pair, word, error)) return false;
    if (pair->changed) return true;
    if (!memory_grow(&t->changed, &t->changed_places, t->changed_count + 1, sizeof *t->changed))
        return bpe_out_of_memory(error);
    pair->changed = true;
    t->changed[t->changed_count++] = number;
    return true;
}

// Puts the pairs that the current merge has created into the heap.
static inline bool bpe_push_changed(BpeTrainer* t, Error* error) {
    for (size_t i = 0; i < t->changed_count; i++) {
        Pair* pair = &t->pairs.pairs[t->changed[i]];
        pair->changed = false;
        if (pair->count > 0 && !heap_push(&t->pairs, t->changed[i], error)) return false;
    }
    t->changed_count = 0;
    return true;
}

// Merges a pair in a word, from the left, and counts the pairs that its neighbors lose and form.
static inline bool bpe_merge_word(BpeTrainer* t, const WordTable* words, uint32_t word, BpeMerge merge, Error* error) {
    int32_t* tokens = t->tokens + t->starts[word];
    int64_t count = (int64_t)words->words[word].count;
    size_t length = t->lengths[word], kept = 0;
    for (size_t i = 0; i < length; i++) {
        if (tokens[i] != merge.left || i + 1 == length || tokens[i + 1] != merge.right) {
            tokens[kept++] = tokens[i];
            continue;
        }
        if (kept > 0 && (!bpe_count(t, tokens[kept - 1], merge.left, -count, word, error) ||
                         !bpe_count(t, tokens[kept - 1], merge.token, count, word, error)))
            return false;
        if (i + 2 < length && (!bpe_count(t, merge.right, tokens[i + 2], -count, word, error) ||
                               !bpe_count(t, merge.token, tokens[i + 2], count, word, error)))
            return false;
        tokens[kept++] = merge.token;
        i++;
    }
    t->lengths[word] = (uint32_t)kept;
    return true;
}

static inline bool bpe_merge(BpeTrainer* t, const WordTable* words, size_t number, BpeMerge merge, Error* error) {
    Pair taken = t->pairs.pairs[number];  // the table may move, and this pair may be created again
    Pair* pair = &t->pairs.pairs[number];
    pair->words = NULL;
    pair->word_count = pair->places = 0;
    bool ok = true;
    for (size_t i = 0; ok && i < taken.word_count; i++)
        ok = bpe_merge_word(t, words, taken.words[i], merge, error);
    free(taken.words);
    t->pairs.pairs[number].count = 0;
    return ok && bpe_push_changed(t, error);
}

// Makes the words sequences of byte tokens, and counts their pairs.
static inline bool bpe_begin(BpeTrainer* t, const WordTable* words, Error* error) {
    int32_t tokens[256];
    for (int i = 0; i < 256; i++) tokens[i] = byte_token(i);
    t->tokens = (int32_t*)malloc(max_size(words->used, 1) * sizeof(int32_t));
    t->starts = (size_t*)malloc(max_size(words->count, 1) * sizeof(size_t));
    t->lengths = (uint32_t*)malloc(max_size(words->count, 1) * sizeof(uint32_t));
    if (!t->tokens || !t->starts || !t->lengths) return bpe_out_of_memory(error);
    for (size_t i = 0; i < words->used; i++) t->tokens[i] = tokens[(unsigned char)words->bytes[i]];
    for (size_t i = 0; i < words->count; i++) {
        const Word* word = &words->words[i];
        t->starts[i] = word->start;
        t->lengths[i] = (uint32_t)word->bytes;
        for (size_t k = word->start; k + 1 < word->start + word->bytes; k++)
            if (!bpe_count(t, t->tokens[k], t->tokens[k + 1], (int64_t)word->count, (uint32_t)i, error)) return false;
    }
    return bpe_push_changed(t, error);
}

// The token of two joined tokens: a new one, or the one that has these bytes already.
static inline bool bpe_join(Bpe* bpe, BpeMerge* merge, Error* error) {
    WordTable* pieces = &bpe->pieces;
    char text[TOKEN_BYTES_MAX];
    size_t bytes = 0;
    for (int side = 0; side < 2; side++) {
        const Word* part = &pieces->words[side == 0 ? merge->left : merge->right];
        memcpy(text + bytes, pieces->bytes + part->start, part->bytes);
        bytes += part->bytes;
    }
    const Word* joined = word_table_add(pieces, text, bytes, 1, error);
    if (joined) merge->token = (int32_t)(joined - pieces->words);
    return joined != NULL;
}

static inline bool bpe_learn(Bpe* bpe, BpeTrainer* t, const WordTable* words, size_t vocabulary, Error* error) {
    Progress progress = progress_begin("merging", vocabulary - BPE_VOCABULARY_MIN);
    size_t places = 0;
    while (bpe->pieces.count + 1 < vocabulary && t->pairs.heap_count > 0) {
        HeapEntry top = heap_pop(&t->pairs);
        const Pair* pair = &t->pairs.pairs[top.pair];
        if (pair->count != top.count) {
            if (pair->count > 0 && !heap_push(&t->pairs, top.pair, error)) return false;
            continue;
        }
        if (!memory_grow(&bpe->merges, &places, bpe->merge_count + 1, sizeof *bpe->merges))
            return bpe_out_of_memory(error);
        BpeMerge merge = {(int32_t)(top.key >> 32), (int32_t)(uint32_t)top.key, 0};
        if (!bpe_join(bpe, &merge, error) || !bpe_merge(t, words, top.pair, merge, error)) return false;
        bpe->merges[bpe->merge_count++] = merge;
        progress_show(&progress, bpe->merge_count);
    }
    progress_end(&progress);
    return true;
}

// Trains on the words. vocabulary: the number of tokens, BPE_VOCABULARY_MIN to _MAX. The caller frees with bpe_free, also after a failure.
static inline bool bpe_train(Bpe* bpe, const WordTable* words, size_t vocabulary, Error* error) {
    BpeTrainer trainer = {0};
    memset(bpe, 0, sizeof *bpe);
    bool ok = true;
    char bytes[256];
    for (int i = 0; i < 256; i++) bytes[byte_token(i)] = (char)i;
    for (int i = 0; ok && i < 256; i++) ok = word_table_add(&bpe->pieces, &bytes[i], 1, 1, error) != NULL;
    ok = ok && bpe_begin(&trainer, words, error) && bpe_learn(bpe, &trainer, words, vocabulary, error);
    bpe_trainer_free(&trainer);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 4. Files

// A token in visible characters, and a zero byte.
static inline void bpe_write_piece(char text[2 * TOKEN_BYTES_MAX + 1], const Bpe* bpe, int32_t token) {
    const Word* piece = &bpe->pieces.words[token];
    for (size_t i = 0; i < piece->bytes; i++)
        text += utf8_write(text, symbol_of_byte((unsigned char)bpe->pieces.bytes[piece->start + i]));
    *text = 0;
}

// {"type": type, ...} of the parts that look at bytes: pre-tokenizer, post-processor, decoder.
static inline void bpe_write_byte_level(JsonWriter* w, const char* part) {
    json_member_begin(w, part, '{');
    json_member_string(w, "type", "ByteLevel");
    json_member_bool(w, "add_prefix_space", false);
    json_member_bool(w, "trim_offsets", true);
    json_member_bool(w, "use_regex", true);
    json_write_end(w, '}');
}

static inline void json_member_null(JsonWriter* w, const char* key) {
    json_write_key(w, key);
    json_write_raw(w, "null");
}

static inline void bpe_write_model(JsonWriter* w, const Bpe* bpe) {
    char left[2 * TOKEN_BYTES_MAX + 1], right[2 * TOKEN_BYTES_MAX + 1], both[4 * TOKEN_BYTES_MAX + 2];
    json_member_begin(w, "model", '{');
    json_member_string(w, "type", "BPE");
    json_member_null(w, "dropout");
    json_member_null(w, "unk_token");
    json_member_null(w, "continuing_subword_prefix");
    json_member_null(w, "end_of_word_suffix");
    json_member_bool(w, "fuse_unk", false);
    json_member_bool(w, "byte_fallback", false);
    json_member_bool(w, "ignore_merges", false);
    json_member_begin(w, "vocab", '{');
    for (size_t i = 0; i < bpe->pieces.count; i++) {
        bpe_write_piece(left, bpe, (int32_t)i);
        json_member_u64(w, left, i);
    }
    json_member_u64(w, BPE_END_OF_TEXT, bpe->pieces.count);
    json_write_end(w, '}');
    json_member_begin(w, "merges", '[');
    for (size_t i = 0; i < bpe->merge_count; i++) {
        bpe_write_piece(left, bpe, bpe->merges[i].left);
        bpe_write_piece(right, bpe, bpe->merges[i].right);
        snprintf(both, sizeof both, "%s %s", left, right);
        json_write_string(w, both);
    }
    json_write_end(w, ']');
    json_write_end(w, '}');
}

static inline void bpe_write(JsonWriter* w, const Bpe* bpe) {
    w->line_depth = 3;
    json_write_begin(w, '{');
    json_member_string(w, "version", "1.0");
    json_member_null(w, "truncation");
    json_member_null(w, "padding");
    json_member_begin(w, "added_tokens", '[');
    json_write_begin(w, '{');
    json_member_u64(w, "id", bpe->pieces.count);
    json_member_string(w, "content", BPE_END_OF_TEXT);
    json_member_bool(w, "single_word", false);
    json_member_bool(w, "lstrip", false);
    json_member_bool(w, "rstrip", false);
    json_member_bool(w, "normalized", false);
    json_member_bool(w, "special", true);
    json_write_end(w, '}');
    json_write_end(w, ']');
    json_member_null(w, "normalizer");
    bpe_write_byte_level(w, "pre_tokenizer");
    bpe_write_byte_level(w, "post_processor");
    bpe_write_byte_level(w, "decoder");
    bpe_write_model(w, bpe);
    json_write_end(w, '}');
}

static inline void bpe_write_config(JsonWriter* w) {
    w->line_depth = 1;
    json_write_begin(w, '{');
    json_member_string(w, "tokenizer_class", "PreTrainedTokenizerFast");
    json_member_string(w, "bos_token", BPE_END_OF_TEXT);
    json_member_string(w, "eos_token", BPE_END_OF_TEXT);
    json_member_string(w, "unk_token", BPE_END_OF_TEXT);
    json_member_bool(w, "clean_up_tokenization_spaces", false);
    json_write_end(w, '}');
}

static inline bool bpe_write_file(const char* directory, const char* name, JsonWriter* w, Error* error) {
    char path[FILE_PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    json_put(w, "\n", 1);
    bool ok = json_write_done(w, error) && file_write_atomic(path, w->text, w->bytes, error);
    json_writer_free(w);
    return ok;
}

// Writes tokenizer.json and tokenizer_config.json in a directory, which is made where there is none.
static inline bool bpe_save(const Bpe* bpe, const char* directory, Error* error) {
    JsonWriter tokenizer = {0}, config = {0};
    bpe_write(&tokenizer, bpe);
    bpe_write_config(&config);
    bool there = directory_exists(directory);
    bool ok = directory_make(directory, error) && bpe_write_file(directory, "tokenizer.json", &tokenizer, error) &&
              bpe_write_file(directory, "tokenizer_config.json", &config, error);
    if (!ok && !there) rmdir(directory);  // if it is empty
    json_writer_free(&tokenizer);
    json_writer_free(&config);
    return ok;
}

#endif  // LLMTRAIN_BPE_H
