// tokenizer.h: text to tokens and back.
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

#ifndef LLMTRAIN_TOKENIZER_H
#define LLMTRAIN_TOKENIZER_H

#include "files.h"  // opening and reading; and from base.h Error, allocate, hashes

#define TOKEN_BYTES_MAX ((size_t)4096)  // of one token; a file with a longer one is refused

// ------------------------------------------------------------------------------------------------
// Tokens

// A list of tokens that grows. {0} is an empty one.
typedef struct {
    int32_t* ids;  // (count), owned
    size_t count, capacity;
} Tokens;

static inline void tokens_free(Tokens* tokens) {
    free(tokens->ids);
    memset(tokens, 0, sizeof *tokens);
}

// Makes room for `more` tokens after those that are there.
static inline bool tokens_reserve(Tokens* tokens, size_t more, Error* error) {
    if (more <= tokens->capacity - tokens->count) return true;
    size_t capacity = max_size(2 * tokens->capacity, tokens->count + max_size(more, 256));
    int32_t* ids = capacity < more || capacity > SIZE_MAX / sizeof(int32_t)
                       ? NULL : (int32_t*)realloc(tokens->ids, capacity * sizeof(int32_t));
    if (!ids) return fail(error, "out of memory for %zu tokens; give a shorter text", capacity);
    tokens->ids = ids;
    tokens->capacity = capacity;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Tokenizer

typedef struct {
    char name[64];
    int32_t vocabulary;                 // every id is below it
    int32_t begin_of_text;              // -1: the tokenizer's template does not put one before a text
    int32_t end_of_text;                // -1: none
    uint64_t hash;                      // XXH64 of its files: tells tokenizers apart
    char* chat_template;                // Jinja, owned; NULL: none
} Tokenizer;

// A token is a byte, the vocabulary 256. There is nothing to close.
static inline Tokenizer tokenizer_of_bytes(void) {
    Tokenizer tokenizer;
    memset(&tokenizer, 0, sizeof tokenizer);
    snprintf(tokenizer.name, sizeof tokenizer.name, "bytes");
    tokenizer.vocabulary = 256;
    tokenizer.begin_of_text = tokenizer.end_of_text = -1;
    return tokenizer;
}

static inline void tokenizer_close(Tokenizer* tokenizer) {
    free(tokenizer->chat_template);
    memset(tokenizer, 0, sizeof *tokenizer);
}

// Opens a directory of Hugging Face or GPT-2, or a file: tokenizer.json, encoder.json, or a rank file of tiktoken, of
// which `pattern` (gpt2, cl100k, o200k) says how words are split; otherwise NULL. After a failure there is nothing to
// close.
static inline bool tokenizer_open(Tokenizer* tokenizer, const char* path, const char* pattern, Error* error) {
    (void)pattern;
    memset(tokenizer, 0, sizeof *tokenizer);
    return fail(error, "%s: this version reads texts as bytes only; leave the tokenizer out", path);
}

// Appends the tokens of a text. Special tokens in the text are recognised. No begin-of-text is added: that is up to the
// caller, with tokenizer.begin_of_text.
static inline bool tokenizer_encode(Tokens* out, const Tokenizer* tokenizer, const char* text, size_t bytes,
                                    Error* error) {
    (void)tokenizer;
    if (!tokens_reserve(out, bytes, error)) return false;
    for (size_t i = 0; i < bytes; i++) out->ids[out->count++] = (unsigned char)text[i];
    return true;
}

// The bytes of one token, without a zero byte at their end; none for an id without a token.
static inline const char* tokenizer_piece(size_t* bytes, const Tokenizer* tokenizer, int32_t token) {
    static const unsigned char all[256] = {
#define BYTES_4(n) n, n + 1, n + 2, n + 3
#define BYTES_16(n) BYTES_4(n), BYTES_4(n + 4), BYTES_4(n + 8), BYTES_4(n + 12)
#define BYTES_64(n) BYTES_16(n), BYTES_16(n + 16), BYTES_16(n + 32), BYTES_16(n + 48)
        BYTES_64(0), BYTES_64(64), BYTES_64(128), BYTES_64(192)};
    *bytes = token >= 0 && token < tokenizer->vocabulary;
    return *bytes ? (const char*)&all[token] : "";
}

// Copies the tokenizer's files to a directory, so that tokenizer_open of it gives the same tokenizer.
static inline bool tokenizer_save(const Tokenizer* tokenizer, const char* directory, Error* error) {
    (void)tokenizer;
    return directory_make(directory, error);
}

// ------------------------------------------------------------------------------------------------
// Decoder
//
// A UTF-8 character may be spread over several tokens: the decoder keeps its first bytes back until its last one comes,
// so that what it returns can be shown at once. Bytes that are no UTF-8 come out as they are.

typedef struct {
    const Tokenizer* tokenizer;
    char text[4 + TOKEN_BYTES_MAX];  // kept back, then the bytes of a token
    size_t kept;
} TokenDecoder;

static inline void decoder_begin(TokenDecoder* decoder, const Tokenizer* tokenizer) {
    decoder->tokenizer = tokenizer;
    decoder->kept = 0;
}

// Bytes at the end of a text that could be the beginning of a UTF-8 character.
static inline size_t utf8_unfinished(const char* text, size_t bytes) {
    for (size_t n = 1; n <= min_size(3, bytes); n++) {
        unsigned char c = (unsigned char)text[bytes - n];
        if ((c & 0xC0) == 0x80) continue;
        return c >= 0xC2 && c <= 0xF4 && n < (size_t)(c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4) ? n : 0;
    }
    return 0;
}

// The bytes that are certain with one more token, without a zero byte at their end. They stay as they are until the
// next call.
static inline const char* decoder_add(size_t* bytes, TokenDecoder* decoder, int32_t token) {
    size_t more;
    const char* piece = tokenizer_piece(&more, decoder->tokenizer, token);
    if (decoder->kept > 0) memmove(decoder->text, decoder->text + TOKEN_BYTES_MAX, decoder->kept);
    memcpy(decoder->text + decoder->kept, piece, more);
    size_t all = decoder->kept + more;
    decoder->kept = utf8_unfinished(decoder->text, all);
    *bytes = all - decoder->kept;
    memmove(decoder->text + TOKEN_BYTES_MAX, decoder->text + *bytes, decoder->kept);
    return decoder->text;
}

// What was kept back: the beginning of a character that did not come.
static inline const char* decoder_end(size_t* bytes, TokenDecoder* decoder) {
    *bytes = decoder->kept;
    decoder->kept = 0;
    return decoder->text + TOKEN_BYTES_MAX;
}

#endif  // LLMTRAIN_TOKENIZER_H
