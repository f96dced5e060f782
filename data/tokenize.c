// tokenize: converts a text to token shards, for training and for validation.
//
//   cc -std=c11 -O2 data/tokenize.c -o build/tokenize -lm -pthread
//   build/tokenize --bytes story.txt --out data/story --val 0.1
//
// It uses the same memory for a text of any size. All shards are renamed to their names after the last byte was
// flushed to the disk; if anything fails before, no file has changed.

#include "shards.h"
#include "../llmtrain/flags.h"
#include "../llmtrain/tokenizer.h"

#include <signal.h>

typedef struct {
    const char* text;
    const char* out;
    double val;        // fraction
    bool val_given;
    uint64_t shard_tokens;
    double entropy;    // nats per byte; 0 = unknown
} Options;

enum { FLAGS = 5 };

static void options_flags(Flag flags[FLAGS], Options* o) {
    const Options standard = {NULL, NULL, 0.1, false, 100000000, 0};
    const Flag table[FLAGS] = {
        {"bytes", FLAG_TEXT, &o->text, "FILE", 0, 0,
         "text to convert, a token per byte; -: standard input (needed)", false},
        {"out", FLAG_TEXT, &o->out, "PREFIX", 0, 0,
         "prefix of the shards: PREFIX_train_000000.bin, PREFIX_val_000000.bin, ... (needed)", false},
        {"val", FLAG_REAL, &o->val, "X", 0, 1,
         "fraction of the text, at its end, for validation; 0: train shards only, 1: val shards only", false},
        {"shard-tokens", FLAG_COUNT, &o->shard_tokens, "N", 1, 1e12, "maximum tokens per shard", false},
        {"entropy", FLAG_REAL, &o->entropy, "X", 0, 100,
         "entropy floor (loss of the text's true source) in nats per byte, stored in the shards; 0: unknown", false},
    };
    *o = standard;
    memcpy(flags, table, sizeof table);
}

static bool options_read(Options* o, int argc, char** argv, Error* error) {
    Flag flags[FLAGS];
    options_flags(flags, o);
    if (!flags_parse(flags, FLAGS, argc, argv, error)) return false;
    o->val_given = flag_was_given(flags, FLAGS, "val");
    if (!o->text || !o->text[0]) return fail(error, "--bytes FILE is missing: which text?");
    if (!o->out || !o->out[0]) return fail(error, "--out PREFIX is missing: where do the shards go?");
    return strlen(o->out) <= 900 || fail(error, "--out is longer than 900 characters: give a shorter path");
}

// ------------------------------------------------------------------------------------------------
// Output
//
// Two series of shards, train and val. A series is written shard by shard under temporary names, and then all of it is
// renamed or removed.

typedef struct {
    const char* prefix;
    const char* kind;  // "train" or "val"
    size_t shards;     // begun so far; the last may still be open
    uint64_t tokens;
    ShardWriter writer;
} Series;

static void series_path(char path[1024], const Series* series, size_t number) {
    snprintf(path, 1024, "%s_%s_%06zu.bin", series->prefix, series->kind, number);
}

static bool series_add(Series* series, const int32_t* tokens, size_t count, const Options* options, int32_t vocabulary,
                       Error* error) {
    while (count > 0) {
        if (series->writer.file && series->writer.count == options->shard_tokens &&
            !shard_writer_finish(&series->writer, error))
            return false;
        if (!series->writer.file) {
            char path[1024];
            if (series->shards == 1000000) return fail(error, "over a million shards; give a larger --shard-tokens");
            series_path(path, series, series->shards);
            if (!shard_writer_open(&series->writer, path, vocabulary, options->entropy, error)) return false;
            series->shards++;
        }
        size_t some = min_size(count, options->shard_tokens - series->writer.count);
        if (!shard_writer_add(&series->writer, tokens, some, error)) return false;
        series->tokens += some;
        tokens += some;
        count -= some;
    }
    return true;
}

// Renames the finished shards, and removes those that an earlier, longer series has left: a pattern would match both.
static bool series_publish(const Series* series, Error* error) {
    char path[1024];
    if (series->shards == 0) return true;
    for (size_t i = 0; i < series->shards; i++) {
        series_path(path, series, i);
        if (!shard_publish(path, error)) return false;
    }
    for (size_t i = series->shards;; i++) {
        series_path(path, series, i);
        if (remove(path) != 0) return true;
    }
}

static void series_abandon(Series* series) {
    char path[1024], temporary[1024 + 8];
    shard_writer_abandon(&series->writer);
    for (size_t i = 0; i < series->shards; i++) {
        series_path(path, series, i);
        snprintf(temporary, sizeof temporary, "%s.tmp", path);
        remove(temporary);
    }
}

// ------------------------------------------------------------------------------------------------
// Input

typedef struct {
    FILE* file;
    const char* name;
    bool size_known;
    uint64_t size;  // bytes
} Input;

static bool input_open(Input* input, const char* name, Error* error) {
    bool standard = strcmp(name, "-") == 0;
    struct stat status;
    input->name = standard ? "standard input" : name;
    input->file = standard ? stdin : fopen(name, "rb");
    if (!input->file || fstat(fileno(input->file), &status) != 0) return fail_file(error, "open", input->name);
    if (S_ISDIR(status.st_mode))
        return fail(error, "%s is a directory; give one file, or join many: cat FILES | tokenize --bytes -", name);
    input->size_known = S_ISREG(status.st_mode) && !standard;
    input->size = input->size_known ? (uint64_t)status.st_size : 0;
    return true;
}

// Bytes of the text that go to training; the rest, at its end, go to validation.
static bool split(uint64_t* train_bytes, const Input* input, const Options* options, Error* error) {
    double val = options->val_given || input->size_known ? options->val : 0;
    *train_bytes = val == 0 ? UINT64_MAX : 0;
    if (val == 0 || val == 1) return true;
    if (!input->size_known)
        return fail(error, "the size of %s is not known ahead, so its end cannot be kept for validation; give --val 0 "
                    "or 1, or save the text as a file first", input->name);
    uint64_t kept = (uint64_t)((double)input->size * val + 0.5);
    if (input->size > 0 && (kept == 0 || kept >= input->size))
        return fail(error, "%s has %llu bytes, which --val %g cannot divide; give more text, or --val 0", input->name,
                    (unsigned long long)input->size, val);
    *train_bytes = input->size - kept;
    return true;
}

static volatile sig_atomic_t interrupted = 0;
static void interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

#define CHUNK ((size_t)1 << 16)  // bytes of text at a time

static bool convert(Series* train, Series* validation, const Input* input, const Options* options, Error* error) {
    static char text[CHUNK];
    Tokens tokens = {0};
    Tokenizer tokenizer = tokenizer_of_bytes();
    uint64_t done = 0, train_bytes;
    Progress progress = progress_begin(input->name, input->size);
    if (!split(&train_bytes, input, options, error)) return false;
    bool ok = true;
    while (ok && !interrupted) {
        bool to_train = done < train_bytes;
        size_t wanted = to_train ? min_size(CHUNK, train_bytes - done) : CHUNK;
        size_t bytes = fread(text, 1, wanted, input->file);
        if (bytes == 0) break;
        tokens.count = 0;
        ok = tokenizer_encode(&tokens, &tokenizer, text, bytes, error) &&
             series_add(to_train ? train : validation, tokens.ids, tokens.count, options, tokenizer.vocabulary, error);
        done += bytes;
        progress_show(&progress, done);
    }
    progress_end(&progress);
    tokens_free(&tokens);
    if (!ok) return false;
    if (interrupted) return fail(error, "interrupted; nothing was written");
    if (ferror(input->file)) return fail_file(error, "read", input->name);
    if (done == 0) return fail(error, "%s is empty; give a text", input->name);
    if (input->size_known && done != input->size)
        return fail(error, "%s changed while it was read: %llu bytes became %llu; start again", input->name,
                    (unsigned long long)input->size, (unsigned long long)done);
    return true;
}

// ------------------------------------------------------------------------------------------------
// The program

static bool tokenize(const Options* options, Error* error) {
    static Series series[2];
    Input input;
    series[0].prefix = series[1].prefix = options->out;
    series[0].kind = "train";
    series[1].kind = "val";
    memset(&input, 0, sizeof input);
    bool ok = input_open(&input, options->text, error) && convert(&series[0], &series[1], &input, options, error);
    for (int i = 0; i < 2; i++)
        if (ok && series[i].writer.file) ok = shard_writer_finish(&series[i].writer, error);
    for (int i = 0; i < 2; i++)
        if (ok) ok = series_publish(&series[i], error);
    for (int i = 0; i < 2; i++) {
        if (!ok) series_abandon(&series[i]);
        if (ok && series[i].shards > 0)
            printf("%s_%s_*.bin: %llu tokens in %zu shard%s\n", options->out, series[i].kind,
                   (unsigned long long)series[i].tokens, series[i].shards, series[i].shards == 1 ? "" : "s");
    }
    if (input.file) fclose(input.file);
    return ok;
}

int main(int argc, char** argv) {
    Options options;
    Error error;
    struct sigaction action;
    if (flags_want_help(argc, argv)) {
        Flag flags[FLAGS];
        options_flags(flags, &options);
        printf("tokenize: converts a text to token shards; replaces existing shards of the same prefix\n\n");
        flags_help(flags, FLAGS);
        return 0;
    }
    if (!options_read(&options, argc, argv, &error)) {
        fprintf(stderr, "tokenize: %s\n", error.text);
        return 2;
    }
    memset(&action, 0, sizeof action);
    action.sa_handler = interrupt;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    if (tokenize(&options, &error)) return 0;
    fprintf(stderr, "tokenize: %s\n", error.text);
    return 1;
}
