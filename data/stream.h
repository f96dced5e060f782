// stream.h: tokenize --encode and --decode: standard input to standard output, text to tokens and back; and --show, the
// text of some tokens of a shard; of conversations with those marked that are trained.
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
#include "../llmtrain/text/spans.h"
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

// Where --show is in the documents of a shard of conversations.
typedef struct {
    SpanFile file;
    size_t document, span;   // the next that begins
    bool inside;             // a trained span
    const char *on, *off;    // what is printed around trained text
} ShowSpans;

// Trained text is bold and green on a terminal, and the rest dim; elsewhere brackets are around it.
static inline bool show_begin(ShowSpans* show, const Shard* shard, uint64_t at, Error* error) {
    bool terminal = isatty(STDOUT_FILENO);
    memset(show, 0, sizeof *show);
    show->on = terminal ? "\x1B[0;1;32m" : "\xE2\x9F\xA6";
    show->off = terminal ? "\x1B[0;2m" : "\xE2\x9F\xA7";
    if (shard->spans == 0) return true;
    if (!span_file_open(&show->file, shard->path, shard->count, shard->checksum, shard->spans, error)) return false;
    const SpanFile* f = &show->file;
    while (show->document < f->document_count &&
           f->documents[show->document].first + f->documents[show->document].tokens <= at) show->document++;
    show->span = span_file_find(f, at);
    return true;
}

// Prints what comes before the token at a position: the end or the beginning of trained text, a line for a document.
static inline void show_border(ShowSpans* show, TokenDecoder* decoder, uint64_t at, bool first) {
    const SpanFile* f = &show->file;
    const TrainedSpan* span = show->span < f->span_count ? &f->spans[show->span] : NULL;
    const SpanDocument* d = show->document < f->document_count ? &f->documents[show->document] : NULL;
    bool ends = show->inside && span && at == span->first + span->tokens;
    if (ends) span = ++show->span < f->span_count ? span + 1 : NULL;
    bool begins = (!show->inside || ends) && span && at >= span->first, entered = d && (first || at == d->first);
    if (!ends && !begins && !entered) return;
    size_t bytes;
    const char* rest = decoder_end(&bytes, decoder);
    fwrite(rest, 1, bytes, stdout);
    if (ends) fputs(show->off, stdout);
    if (entered) {
        printf("%s--- document %zu, %s, group %u: tokens %llu to %llu\n", first ? "" : "\n", show->document,
               SPAN_KIND_NAMES[d->kind], d->group, (unsigned long long)d->first,
               (unsigned long long)(d->first + d->tokens - 1));
        if (!begins && show->on[0] == '\x1B') fputs(show->off, stdout);
        decoder_begin(decoder, decoder->tokenizer);
        show->document++;
    }
    if (begins) fputs(show->on, stdout);
    show->inside = (show->inside && !ends) || begins;
}

static inline void show_end(ShowSpans* show) {
    bool terminal = show->on[0] == '\x1B';
    if (show->file.data && (terminal || show->inside)) fputs(terminal ? "\x1B[0m" : show->off, stdout);
    span_file_close(&show->file);
}

// Prints the text of `count` tokens of a shard, or as many as follow position `at`, and a line break. A number that is
// no token of the tokenizer, as a damaged shard may have it, is printed as <|number|>. Each document of conversations
// has a line with its kind before it.
static inline bool stream_show(const char* path, const char* tokenizer_path, const char* pattern, uint64_t at,
                               uint64_t count, Error* error) {
    Shard shard;
    Tokenizer tokenizer;
    TokenDecoder decoder;
    ShowSpans show;
    size_t bytes;
    if (!shard_open(&shard, path, error)) return false;
    bool ok = at < shard.count ||
        fail_with(error, "--at %llu is past the end of %.600s, which has %zu tokens; give a smaller position",
                  (unsigned long long)at, path, shard.count);
    bool opened = ok && show_begin(&show, &shard, at, error);
    ok = opened && stream_tokenizer(&tokenizer, &shard, tokenizer_path, pattern, error);
    if (ok) decoder_begin(&decoder, &tokenizer);
    for (uint64_t i = at; ok && i < shard.count && i - at < count; i++) {
        uint32_t id = shard_token(&shard, i);
        if (shard.spans != 0) show_border(&show, &decoder, i, i == at);
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
        show_end(&show);
        putchar('\n');
        ok = output_written(error);
        tokenizer_close(&tokenizer);
    } else if (opened) {
        span_file_close(&show.file);
    }
    shard_close(&shard);
    return ok;
}

#endif  // LLMTRAIN_STREAM_H
