// stream.h: tokenize --encode and --decode: standard input to standard output, text to tokens and back; and --show, the
// text of some tokens of a shard.
//
//   bool ok = stream_encode(&tokenizer, &error);    text -> ids, with a space between them and a line break at the end
//   bool ok = stream_decode(&tokenizer, &error);    ids, separated by white space -> exactly the bytes that they encode
//   bool ok = stream_show("x_train_000000.bin", NULL, NULL, 1000, 64, &error);    64 tokens from position 1,000 on
//
// A text is read whole before its first token is written, since a word may be as long as the text. Ids are decoded as
// they come, in whole characters.

#ifndef LLMTRAIN_STREAM_H
#define LLMTRAIN_STREAM_H

#include "../llmtrain/text/data.h"
#include "../llmtrain/text/tokenizer.h"

static inline bool stream_encode(const Tokenizer* tokenizer, Error* error) {
    Text text = {NULL, 0, 0};
    Tokens tokens = {NULL, 0, 0, 0};
    bool ok = true;
    for (size_t n = 1; ok && n > 0; text.count += n) {
        n = 0;
        ok = text_reserve(&text, FILE_CHUNK, error);
        if (ok) n = fread(text.bytes + text.count, 1, FILE_CHUNK, stdin);
    }
    if (ok && ferror(stdin)) ok = fail_file(error, "read", "standard input");
    ok = ok && tokenizer_encode(&tokens, tokenizer, text.bytes, text.count, error);
    for (size_t i = 0; ok && i < tokens.count; i++)
        printf("%d%c", (int)tokens.ids[i], i + 1 < tokens.count ? ' ' : '\n');
    ok = ok && output_written(error);
    if (ok && tokens.replaced > 0)
        fprintf(stderr, "tokenize: %zu byte sequences that are not UTF-8 were read as U+FFFD\n", tokens.replaced);
    tokens_free(&tokens);
    text_free(&text);
    return ok;
}

// Writes the text of a word of the input, an id.
static inline bool stream_decode_word(TokenDecoder* decoder, const char* word, size_t length, Error* error) {
    uint64_t id = 0;
    bool good = length > 0 && length <= 10;
    for (size_t i = 0; good && i < length; i++) {
        good = word[i] >= '0' && word[i] <= '9';
        id = id * 10 + (uint64_t)(word[i] - '0');
    }
    if (!good)
        return fail_with(error, "'%.*s' in standard input is not a token; give whole numbers separated by white space",
                         (int)min_size(length, 60), word);
    const Tokenizer* tokenizer = decoder->tokenizer;
    if (id >= (uint64_t)tokenizer->vocabulary || tokenizer_kind(tokenizer, (int32_t)id) == TOKEN_ABSENT)
        return fail_with(error, "%llu in standard input is not one of this tokenizer's %d tokens; is it the right one?",
                         (unsigned long long)id, (int)tokenizer->vocabulary);
    size_t bytes;
    const char* text = decoder_add(&bytes, decoder, (int32_t)id);
    fwrite(text, 1, bytes, stdout);
    return true;
}

static inline bool stream_decode(const Tokenizer* tokenizer, Error* error) {
    char word[64];
    size_t length = 0, bytes;  // of the word that is being read; a word that is too long is cut off
    TokenDecoder decoder;
    decoder_begin(&decoder, tokenizer);
    bool ok = true;
    for (int c = 0; ok && c != EOF;) {
        c = getc(stdin);
        bool space = c == EOF || c == ' ' || (c >= '\t' && c <= '\r');
        if (!space && length < sizeof word) word[length++] = (char)c;
        if (!space || length == 0) continue;
        ok = stream_decode_word(&decoder, word, length, error);
        length = 0;
        if (c == '\n') fflush(stdout);
    }
    if (ok && ferror(stdin)) ok = fail_file(error, "read", "standard input");
    if (ok) {
        const char* rest = decoder_end(&bytes, &decoder);
        fwrite(rest, 1, bytes, stdout);
    }
    return ok && output_written(error);
}

// The tokenizer of a shard: the one at `path` if given, otherwise the one next to the shard, otherwise bytes.
static inline bool stream_tokenizer(Tokenizer* tokenizer, const Shard* shard, const char* path, const char* pattern,
                                    Error* error) {
    char beside[FILE_PATH_MAX];
    if (path == NULL && shard_tokenizer_directory(beside, shard->path) && directory_exists(beside)) path = beside;
    if (path == NULL && shard->vocabulary == 256) {
        *tokenizer = tokenizer_of_bytes();
        return true;
    }
    if (path == NULL)
        return fail_with(error, "%.600s has no tokenizer next to it; give --tokenizer PATH, the one that made it",
                         shard->path);
    if (!tokenizer_open(tokenizer, path, pattern, error)) return false;
    if (shard->vocabulary == 0 || shard->vocabulary == tokenizer->vocabulary) return true;
    fail_with(error, "%.400s has a vocabulary of %d, but the tokenizer %.400s of %d; give the one that made the shard",
              shard->path, (int)shard->vocabulary, path, (int)tokenizer->vocabulary);
    tokenizer_close(tokenizer);
    return false;
}

// Prints the text of `count` tokens of a shard, or as many as follow position `at`, and a line break. A number that is
// no token of the tokenizer, as a damaged shard may have it, is printed as <|number|>.
static inline bool stream_show(const char* path, const char* tokenizer_path, const char* pattern, uint64_t at,
                               uint64_t count, Error* error) {
    Shard shard;
    Tokenizer tokenizer;
    TokenDecoder decoder;
    size_t bytes;
    if (!shard_open(&shard, path, error)) return false;
    bool ok = at < shard.count ||
        fail_with(error, "--at %llu is past the end of %.600s, which has %zu tokens; give a smaller position",
                  (unsigned long long)at, path, shard.count);
    ok = ok && stream_tokenizer(&tokenizer, &shard, tokenizer_path, pattern, error);
    if (ok) decoder_begin(&decoder, &tokenizer);
    for (uint64_t i = at; ok && i < shard.count && i - at < count; i++) {
        uint32_t id = shard_token(&shard, i);
        if (tokenizer_kind(&tokenizer, (int32_t)id) == TOKEN_ABSENT) {
            printf("<|%u|>", id);
            continue;
        }
        const char* text = decoder_add(&bytes, &decoder, (int32_t)id);
        fwrite(text, 1, bytes, stdout);
    }
    if (ok) {
        const char* rest = decoder_end(&bytes, &decoder);
        fwrite(rest, 1, bytes, stdout);
        putchar('\n');
        ok = output_written(error);
        tokenizer_close(&tokenizer);
    }
    shard_close(&shard);
    return ok;
}

#endif  // LLMTRAIN_STREAM_H
