// tokenizer.h: text to tokens and back, by byte-pair encoding, with the same tokens as the published tokenizers.
//
//   1. tokenizer  opening, closing, saving
//   2. encoding   one text, on one thread or on several
//   3. decoding   token by token, in whole characters
//
//   Tokenizer tokenizer;
//   Tokens tokens = {0};
//   bool ok = tokenizer_open(&tokenizer, "models/x", NULL, &error) &&          a directory, or a file
//             tokenizer_encode(&tokens, &tokenizer, text, bytes, &error);      tokens.ids, tokens.count
//   tokens_free(&tokens);
//   tokenizer_close(&tokenizer);
//
//   TokenDecoder decoder;                                                      back, token by token
//   decoder_begin(&decoder, &tokenizer);
//   for (...) { const char* text = decoder_add(&bytes, &decoder, id); fwrite(text, 1, bytes, stdout); }
//   text = decoder_end(&bytes, &decoder); fwrite(text, 1, bytes, stdout);
//
// It reads tokenizer.json of Hugging Face (byte-level, as in GPT-2, Llama 3, Qwen, SmolLM; of characters with byte
// fallback, as in Llama 2 and Mistral), GPT-2's two files, and rank files of tiktoken. The tokens are the same as those
// of `tokenizers` and `tiktoken`: dev/peers/tokenizer_ids.py compares them. What a file needs and is not supported is
// refused by name: models other than BPE, other normalizers, patterns that words.h does not have. Tokenizers are not
// trained here, and begin-of-text is not added: tokenizer.begin_of_text says whether to add it.
//
// Encoding takes time proportional to the text, up to a logarithmic factor, whatever is in it, and keeps nothing
// between calls. An open tokenizer does not change: threads may share it.

#ifndef LLMTRAIN_TOKENIZER_H
#define LLMTRAIN_TOKENIZER_H

#include "tokenizer_files.h"

// ------------------------------------------------------------------------------------------------
// 1. Tokenizer

#define BYTES_TOKENIZER_HASH 0x4c21f914bfb24708ull // of what tokenizer_save writes for bytes

// The byte tokenizer: a token is a byte, the vocabulary 256. There is nothing to close.
static inline Tokenizer tokenizer_of_bytes(void) {
    Tokenizer tokenizer = {.name = "bytes", .vocabulary = 256, .begin_of_text = -1, .begin_token = -1,
                           .end_of_text = -1, .hash = BYTES_TOKENIZER_HASH, .tokens = BYTES_TOKENIZER_HASH};
    return tokenizer;
}

// Opens a directory of Hugging Face or GPT-2, or a file: tokenizer.json, vocab.json, or a rank file of tiktoken. For a
// rank file `pattern` (gpt2, cl100k, o200k) says how words are split; otherwise it is NULL. chat_template: NULL, or a
// file with the chat template, instead of the tokenizer's own. After a failure there is nothing to close.
static inline bool tokenizer_open_with(Tokenizer* tokenizer, const char* path, const char* pattern,
                                       const char* chat_template, Error* error) {
    bool ok = tokenizer_files_find(tokenizer, path, pattern, error) &&
              (!chat_template || tokenizer_files_path(tokenizer, FILE_TEMPLATE, "", chat_template, error)) &&
              tokenizer_files_read(tokenizer, error);
    if (ok && tokenizer->hash != BYTES_TOKENIZER_HASH) return true;
    tokenizer_close(tokenizer);
    if (ok) *tokenizer = tokenizer_of_bytes();
    return ok;
}

static inline bool tokenizer_open(Tokenizer* tokenizer, const char* path, const char* pattern, Error* error) {
    return tokenizer_open_with(tokenizer, path, pattern, NULL, error);
}

// The bytes of one token, without a zero byte at their end; none for an id without a token.
static inline const char* tokenizer_piece(size_t* bytes, const Tokenizer* tokenizer, int32_t token) {
#define TOKENIZER_4(n) n, n + 1, n + 2, n + 3
#define TOKENIZER_16(n) TOKENIZER_4(n), TOKENIZER_4(n + 4), TOKENIZER_4(n + 8), TOKENIZER_4(n + 12)
#define TOKENIZER_64(n) TOKENIZER_16(n), TOKENIZER_16(n + 16), TOKENIZER_16(n + 32), TOKENIZER_16(n + 48)
    static const unsigned char all[256] = {TOKENIZER_64(0), TOKENIZER_64(64), TOKENIZER_64(128), TOKENIZER_64(192)};
    *bytes = 0;
    if (token < 0 || token >= tokenizer->vocabulary) return "";
    if (!tokenizer->rules) return *bytes = 1, (const char*)&all[token];
    const Vocabulary* v = &tokenizer->rules->vocabulary;
    *bytes = v->tokens[token].piece_bytes;
    return v->text.bytes + v->tokens[token].piece;
}

// TOKEN_SPECIAL: not text but a control token, such as <|endoftext|>.
static inline TokenKind tokenizer_kind(const Tokenizer* tokenizer, int32_t token) {
    if (token < 0 || token >= tokenizer->vocabulary) return TOKEN_ABSENT;
    return tokenizer->rules ? (TokenKind)tokenizer->rules->vocabulary.tokens[token].kind : TOKEN_ORDINARY;
}

// Whether a token ends a generated text.
static inline bool tokenizer_ends(const Tokenizer* t, int32_t token) {
    for (size_t i = 0; i < t->generation.count; i++) if (t->generation.ends[i] == token) return true;
    return t->vocabulary > 0 && token == t->end_of_text;
}

// Whether a model of V tokens can use the tokenizer: tokens that the model lacks are added ones, as a fine-tune's
// padding, which a text need not contain.
static inline bool tokenizer_fits(const Tokenizer* t, size_t V) {
    bool fits = t->end_of_text < (int64_t)V && t->begin_of_text < (int64_t)V && t->begin_token < (int64_t)V;
    for (size_t id = V; fits && id < (size_t)t->vocabulary; id++)
        fits = tokenizer_kind(t, (int32_t)id) != TOKEN_ORDINARY;
    return fits;
}

// A tokenizer.json of bytes: 256 tokens, no merges.
static inline bool tokenizer_write_bytes(const char* path, Error* error) {
    static const char* const parts[2] = {"pre_tokenizer", "decoder"};
    JsonWriter w = {0};
    json_write_begin(&w, '{');
    json_member_string(&w, "version", "1.0");
    json_member_begin(&w, "added_tokens", '[');
    json_write_end(&w, ']');
    for (int i = 0; i < 2; i++) {
        json_member_begin(&w, parts[i], '{');
        json_member_string(&w, "type", "ByteLevel");
        json_member_bool(&w, "add_prefix_space", false);
        json_member_bool(&w, "trim_offsets", false);
        json_member_bool(&w, "use_regex", false);
        json_write_end(&w, '}');
    }
    json_member_begin(&w, "model", '{');
    json_member_string(&w, "type", "BPE");
    json_member_begin(&w, "vocab", '{');
    for (uint32_t byte = 0; byte < 256; byte++) {
        char name[5] = {0};
        utf8_write(name, symbol_of_byte((unsigned char)byte));
        json_member_u64(&w, name, byte);
    }
    json_write_end(&w, '}');
    json_member_begin(&w, "merges", '[');
    json_write_end(&w, ']');
    json_write_end(&w, '}');
    json_write_end(&w, '}');
    bool ok = json_write_done(&w, error) && file_write_atomic(path, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

// Copies the tokenizer's files to a directory, which it makes, so that tokenizer_open of it gives the same tokenizer.
static inline bool tokenizer_save(const Tokenizer* tokenizer, const char* directory, Error* error) {
    char path[FILE_PATH_MAX + 64], ranks[32] = "";
    Hash hash = hash_begin(0);
    if (strlen(directory) >= FILE_PATH_MAX) return fail_with(error, "the path %.200s... is too long", directory);
    if (!directory_make(directory, error)) return false;
    snprintf(path, sizeof path, "%s/%s", directory, TOKENIZER_FILES[FILE_JSON]);
    if (!tokenizer->rules) return tokenizer_write_bytes(path, error);
    if (tokenizer->pattern) {
        ranks_name(ranks, tokenizer->pattern);
        hash_add(&hash, tokenizer->pattern->name, strlen(tokenizer->pattern->name));
    }
    for (int i = 0; i < FILES_KEPT; i++) {
        char* data = NULL;
        size_t bytes = 0;
        if (!tokenizer->paths[i]) continue;
        snprintf(path, sizeof path, "%s/%s", directory, i == FILE_RANKS ? ranks : TOKENIZER_FILES[i]);
        bool ok = file_read(tokenizer->paths[i], TOKENIZER_BYTES_MAX, &data, &bytes, error);
        uint64_t length = bytes;
        hash_add(&hash, &length, sizeof length);
        if (ok) hash_add(&hash, data, bytes);
        ok = ok && file_write_atomic(path, data, bytes, error);
        free(data);
        if (!ok) return false;
    }
    return hash_end(&hash) == tokenizer->hash ||
           fail_with(error, "the files of the tokenizer changed while it was in use; start again");
}

// ------------------------------------------------------------------------------------------------
// 2. Encoding
//
// A long text is cut where no word can cross, and each thread encodes pieces; the tokens do not depend on the cuts.

enum { ENCODE_PIECE = LLMTRAIN_PIECE(1 << 18, 29), ENCODE_CACHE_FROM = LLMTRAIN_PIECE(1 << 13, 29) };

// Appends the tokens of a part of a text that holds no added token.
static inline bool tokenizer_encode_words(Tokens* out, const Rules* rules, WordEncoder* encoder, const char* text,
                                          size_t bytes, Error* error) {
    size_t length;
    WordSplitter words = splitter_begin(rules->unicode, rules->split, rules->digits, text, bytes);
    for (const char* word; (word = splitter_next(&words, &length)) != NULL;)
        if (!word_encode(out, encoder, word, length, error)) return false;
    return true;
}

static inline bool tokenizer_encode_spans(Tokens* out, const Rules* rules, WordEncoder* encoder, const char* base,
                                          const Span* spans, size_t count, Error* error) {
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        if (spans[i].id >= 0) ok = tokens_append(out, &spans[i].id, 1, error);
        else ok = tokenizer_encode_words(out, rules, encoder, base + spans[i].start, spans[i].bytes, error);
    }
    return ok;
}

// Cuts spans into pieces of about ENCODE_PIECE.
static inline bool spans_cut(Spans* spans, const Rules* rules, const char* base, Error* error) {
    Spans pieces = {NULL, 0, 0};
    bool ok = true;
    for (size_t i = 0; ok && i < spans->count; i++) {
        Span span = spans->list[i];
        const char *begin = base + span.start, *end = begin + span.bytes, *from = begin;
        for (const char* at = begin + min_size(ENCODE_PIECE, span.bytes); span.id < 0 && ok && at < end; at++) {
            if (!split_may_cut(rules->unicode, rules->split, begin, at, end)) continue;
            ok = spans_append(&pieces, (size_t)(from - base), (size_t)(at - base), -1, false, error);
            from = at;
            at += min_size(ENCODE_PIECE, (size_t)(end - at)) - 1;
        }
        ok = ok && spans_append(&pieces, span.id < 0 ? (size_t)(from - base) : span.start, span.start + span.bytes,
                                span.id, false, error);
    }
    free(spans->list);
    *spans = pieces;
    return ok;
}

// Encodes groups of consecutive spans on all threads, and joins the results.
static inline bool tokenizer_encode_parallel(Tokens* out, const Rules* rules, const char* base, const Spans* spans,
                                             size_t bytes, Error* error) {
    size_t count = spans->count, groups = min_size(count, bytes / ENCODE_PIECE + 1);
    Tokens* found = (Tokens*)memory_allocate(groups * sizeof(Tokens));
    if (!found) return fail_with(error, "out of memory for %zu parts of a text; give a shorter text", groups);
    bool ok = true;
#pragma omp parallel
    {
        WordEncoder encoder = word_encoder_open(&rules->vocabulary, true);
        Error own;
#pragma omp for schedule(dynamic)
        for (size_t g = 0; g < groups; g++) {
            size_t first = g * count / groups, end = (g + 1) * count / groups;
            const Span* group = spans->list + first;
            if (tokenizer_encode_spans(&found[g], rules, &encoder, base, group, end - first, &own)) continue;
#pragma omp critical(tokenizer_error)
            {
                *error = own;
                ok = false;
            }
        }
        word_encoder_close(&encoder);
    }
    for (size_t g = 0; g < groups; g++) {
        ok = ok && tokens_append(out, found[g].ids, found[g].count, error);
        tokens_free(&found[g]);
    }
    free(found);
    return ok;
}

static inline WordEncoder tokenizer_encoder(const Tokenizer* tokenizer) {
    return word_encoder_open(tokenizer->rules ? &tokenizer->rules->vocabulary : NULL, tokenizer->rules != NULL);
}

// Appends the tokens of a text. Special tokens in the text are recognized. No begin-of-text is added: that is up to the
// caller, with tokenizer.begin_of_text. Bytes that are not UTF-8 are read as U+FFFD, and out->replaced counts these;
// only the byte tokenizer takes them as they are. A caller with many short texts gives each of its threads an encoder
// of its own (tokenizer_encoder, word_encoder_close), which remembers the words seen; otherwise `encoder` is NULL.
static inline bool tokenizer_encode_by(Tokens* out, const Tokenizer* tokenizer, WordEncoder* encoder, const char* text,
                                       size_t bytes, Error* error) {
    const Rules* rules = tokenizer->rules;
    if (!rules) {
        if (!tokens_reserve(out, bytes, error)) return false;
        for (size_t i = 0; i < bytes; i++) out->ids[out->count++] = (unsigned char)text[i];
        return true;
    }
    Text repaired = {NULL, 0, 0}, buffers[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    Spans spans = {NULL, 0, 0};
    const char* base;
    bool ok = true;
    if (utf8_valid(text, bytes) < bytes) {
        ok = utf8_repair(&repaired, &out->replaced, text, bytes, error);
        text = repaired.bytes;
        bytes = repaired.count;
    }
    ok = ok && rules_apply(&spans, &base, buffers, rules, text, bytes, error);
    if (ok && !encoder && bytes > 2 * ENCODE_PIECE) {
        ok = spans_cut(&spans, rules, base, error) && tokenizer_encode_parallel(out, rules, base, &spans, bytes, error);
    } else if (ok) {
        WordEncoder own = word_encoder_open(&rules->vocabulary, !encoder && bytes >= ENCODE_CACHE_FROM);
        ok = tokenizer_encode_spans(out, rules, encoder ? encoder : &own, base, spans.list, spans.count, error);
        word_encoder_close(&own);
    }
    free(spans.list);
    text_free(&repaired);
    text_free(&buffers[0]);
    text_free(&buffers[1]);
    return ok;
}

static inline bool tokenizer_encode(Tokens* out, const Tokenizer* tokenizer, const char* text, size_t bytes,
                                    Error* error) {
    return tokenizer_encode_by(out, tokenizer, NULL, text, bytes, error);
}

// ------------------------------------------------------------------------------------------------
// 3. Decoding
//
// A UTF-8 character may be spread over several tokens: the decoder keeps its first bytes back until its last one comes,
// so that what it returns can be shown at once. Bytes that are not UTF-8 come out as they are. Some tokenizers put a
// space before a text, which the decoder drops again: so to continue a text, first give it the text's own tokens.

typedef struct {
    const Tokenizer* tokenizer;
    char text[4 + TOKEN_BYTES_MAX];  // what was kept back, and the bytes of the last token
    size_t bytes, kept;              // complete ones, and after them those kept back
    bool strip;                      // a space that comes next was put there by the tokenizer
} TokenDecoder;

static inline void decoder_begin(TokenDecoder* decoder, const Tokenizer* tokenizer) {
    decoder->tokenizer = tokenizer;
    decoder->bytes = decoder->kept = 0;
    decoder->strip = tokenizer->rules && tokenizer->rules->strip != STRIP_NONE;
}

// Bytes at the end of a text that could be the beginning of a UTF-8 character.
static inline size_t utf8_unfinished(const char* text, size_t bytes) {
    for (size_t n = 1; n <= min_size(3, bytes); n++) {
        bool good;
        unsigned char first = (unsigned char)text[bytes - n];
        if ((first & 0xC0) == 0x80) continue;
        return utf8_check(&good, text + bytes - n, n) == n && !good && first >= 0xC2 && first <= 0xF4 ? n : 0;
    }
    return 0;
}

// Adds a token; returns the bytes that are complete with it, without a zero byte at their end, which are valid until
// the next call.
static inline const char* decoder_add(size_t* bytes, TokenDecoder* decoder, int32_t token) {
    const Tokenizer* tokenizer = decoder->tokenizer;
    size_t more;
    const char* piece = tokenizer_piece(&more, tokenizer, token);
    TokenKind kind = tokenizer_kind(tokenizer, token);
    bool added = kind == TOKEN_ADDED || kind == TOKEN_SPECIAL;
    bool strips = decoder->strip && !added && more > 0 && piece[0] == ' ';
    // After an unknown character no space was put.
    if (more > 0)
        decoder->strip = added && tokenizer->rules->strip == STRIP_EACH &&
                         token != tokenizer->rules->vocabulary.unknown;
    memmove(decoder->text, decoder->text + decoder->bytes, decoder->kept);
    memcpy(decoder->text + decoder->kept, piece + strips, more - strips);
    size_t all = decoder->kept + more - strips;
    decoder->kept = utf8_unfinished(decoder->text, all);
    *bytes = decoder->bytes = all - decoder->kept;
    return decoder->text;
}

// The bytes that were kept back: the beginning of a character that was not completed.
static inline const char* decoder_end(size_t* bytes, TokenDecoder* decoder) {
    *bytes = decoder->kept;
    decoder->kept = 0;
    return decoder->text + decoder->bytes;
}

#endif  // LLMTRAIN_TOKENIZER_H
