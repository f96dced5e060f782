// tokenize: text to token shards, for training and for validation.
//
//   cc -std=c11 -O2 -I. data/tokenize.c -o build/tokenize -lm -pthread
//   build/tokenize --bytes story.txt --out data/story --val 0.1
//
// Memory is constant whatever the size of the text. The shards get their names together, when the last byte is safe on
// the disk; when anything fails before, nothing has changed.

#include "data.h"

#include <limits.h>
#include <signal.h>

static const char help[] =
    "tokenize: turns text into token shards\n"
    "\n"
    "  tokenize --bytes FILE --out PREFIX [--val FRACTION]\n"
    "\n"
    "writes PREFIX_train_000000.bin, ... and PREFIX_val_000000.bin, ... and replaces an earlier set of these names.\n"
    "\n"
    "  --bytes FILE         the text; one token per byte, vocabulary 256; - reads standard input\n"
    "  --out PREFIX         where the shards go\n"
    "  --val FRACTION       part of the text kept for validation, taken from its end; 0 writes training shards only,\n"
    "                       1 validation shards only (default 0.1; for standard input 0)\n"
    "  --shard-tokens N     tokens per shard at most (default 100000000)\n"
    "  --entropy NATS       entropy of the text's source in nats per byte, stored in the shards as the loss that no\n"
    "                       model can beat (default: unknown)\n"
    "  --help               this text\n";

typedef struct {
    const char* input;
    const char* prefix;
    double validation;  // fraction; negative = not given
    double shard_tokens;
    double entropy;     // nats per byte; 0 = unknown
} Options;

// ------------------------------------------------------------------------------------------------
// Flags

static const char* const flag_names[] = {"--bytes", "--out", "--val", "--shard-tokens", "--entropy", "--help"};
enum { FLAG_COUNT = sizeof flag_names / sizeof *flag_names };

// Edits (insert, remove, change a character) that turn a into b; a is cut to 63 characters.
static size_t edit_distance(const char* a, const char* b) {
    size_t row[64];
    size_t columns = min_size(strlen(a), 63);
    for (size_t i = 0; i <= columns; i++) row[i] = i;
    for (size_t j = 1; j <= strlen(b); j++) {
        size_t diagonal = row[0];
        row[0] = j;
        for (size_t i = 1; i <= columns; i++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[i];
            row[i] = min_size(change, min_size(row[i - 1], row[i]) + 1);
        }
    }
    return row[columns];
}

// The flag that takes the fewest edits; what is alike at the beginning counts in its favour: --shards, --shard-tokens.
static const char* nearest_flag(const char* name) {
    size_t best = 0;
    long best_score = LONG_MAX;
    for (size_t i = 0; i < FLAG_COUNT; i++) {
        size_t alike = 0;
        while (name[alike] && name[alike] == flag_names[i][alike]) alike++;
        long score = (long)edit_distance(name, flag_names[i]) - (long)alike;
        if (score < best_score) {
            best_score = score;
            best = i;
        }
    }
    return flag_names[best];
}

static bool parse_number(double* number, const char* flag, const char* text, double low, double high, Error* error) {
    char* end;
    *number = strtod(text, &end);
    if (end != text && *end == 0 && *number >= low && *number <= high) return true;
    return fail(error, "%s %s: give a number from %g to %g", flag, text, low, high);
}

static bool parse_options(Options* options, bool* wants_help, int argc, char** argv, Error* error) {
    *wants_help = false;
    for (int i = 1; i < argc; i += 2) {
        const char* flag = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : NULL;
        size_t f = 0;
        while (f < FLAG_COUNT && strcmp(flag, flag_names[f]) != 0) f++;
        if (f == FLAG_COUNT) return fail(error, "unknown flag %s; did you mean %s?", flag, nearest_flag(flag));
        if (strcmp(flag, "--help") == 0) {
            *wants_help = true;
            return true;
        }
        if (!value) return fail(error, "%s needs a value; see --help", flag);
        if (strcmp(flag, "--bytes") == 0) options->input = value;
        if (strcmp(flag, "--out") == 0) options->prefix = value;
        if (strcmp(flag, "--val") == 0 && !parse_number(&options->validation, flag, value, 0, 1, error)) return false;
        if (strcmp(flag, "--entropy") == 0 && !parse_number(&options->entropy, flag, value, 0, 100, error))
            return false;
        if (strcmp(flag, "--shard-tokens") == 0 && !parse_number(&options->shard_tokens, flag, value, 1, 1e12, error))
            return false;
    }
    if (!options->input) return fail(error, "no text given; give --bytes FILE");
    if (!options->prefix) return fail(error, "no place for the shards given; give --out PREFIX");
    return true;
}

// ------------------------------------------------------------------------------------------------
// Output
//
// Two series of shards, train and val. A series is written shard by shard under temporary names, and published or
// removed as a whole.

typedef struct {
    const char* prefix;
    const char* kind;  // "train" or "val"
    size_t shards;     // begun so far; the last may still be open
    uint64_t tokens;
    ShardWriter writer;
} Series;

static bool series_path(char path[4096], const Series* series, size_t number, Error* error) {
    int length = snprintf(path, 4096, "%s_%s_%06zu.bin", series->prefix, series->kind, number);
    if (length >= 4096) return fail(error, "--out %.100s... is too long", series->prefix);
    if (number >= 1000000) return fail(error, "more than a million shards; give a larger --shard-tokens");
    return true;
}

static bool series_add(Series* series, const int32_t* tokens, size_t count, const Options* options, int32_t vocabulary,
                       Error* error) {
    uint64_t shard_tokens = (uint64_t)options->shard_tokens;
    while (count > 0) {
        if (series->writer.file && series->writer.count == shard_tokens &&
            !shard_writer_finish(&series->writer, error))
            return false;
        if (!series->writer.file) {
            char path[4096];
            if (!series_path(path, series, series->shards, error)) return false;
            if (!shard_writer_open(&series->writer, path, vocabulary, options->entropy, error)) return false;
            series->shards++;
        }
        size_t some = min_size(count, shard_tokens - series->writer.count);
        if (!shard_writer_add(&series->writer, tokens, some, error)) return false;
        series->tokens += some;
        tokens += some;
        count -= some;
    }
    return true;
}

// Renames the finished shards, and removes those of an earlier, longer series, which would otherwise mix with these.
static bool series_publish(const Series* series, Error* error) {
    char path[4096];
    if (series->shards == 0) return true;
    for (size_t i = 0; i < series->shards; i++)
        if (!series_path(path, series, i, error) || !shard_publish(path, error)) return false;
    for (size_t i = series->shards; series_path(path, series, i, error) && remove(path) == 0;) i++;
    return true;
}

static void series_abandon(Series* series) {
    char path[4096], temporary[4096 + 8];
    Error ignored;
    shard_writer_abandon(&series->writer);
    for (size_t i = 0; i < series->shards && series_path(path, series, i, &ignored); i++) {
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
    if (!input->file)
        return fail(error, "cannot open %s: %s; give --bytes the name of a text file", name, strerror(errno));
    if (fstat(fileno(input->file), &status) != 0)
        return fail(error, "cannot look at %s: %s", input->name, strerror(errno));
    if (S_ISDIR(status.st_mode))
        return fail(error, "%s is a directory; give one file, or join many: cat FILES | tokenize --bytes -", name);
    input->size_known = S_ISREG(status.st_mode) && !standard;
    input->size = input->size_known ? (uint64_t)status.st_size : 0;
    return true;
}

// Bytes of the text that go to training; the rest, at its end, go to validation.
static bool split(uint64_t* train_bytes, const Input* input, double validation, Error* error) {
    if (validation < 0) validation = input->size_known ? 0.1 : 0;
    *train_bytes = validation == 0 ? UINT64_MAX : 0;
    if (validation == 0 || validation == 1) return true;
    if (!input->size_known)
        return fail(error, "the size of %s is not known ahead, so its end cannot be kept for validation; give --val 0 "
                    "or 1, or save the text as a file first", input->name);
    uint64_t kept = (uint64_t)((double)input->size * validation + 0.5);
    if (input->size > 0 && (kept == 0 || kept >= input->size))
        return fail(error, "%s has %llu bytes, which --val %g cannot divide; give more text, or --val 0", input->name,
                    (unsigned long long)input->size, validation);
    *train_bytes = input->size - kept;
    return true;
}

static volatile sig_atomic_t interrupted = 0;
static void interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

static void show_progress(const Input* input, uint64_t done, double elapsed_ms) {
    double speed = (double)done / (elapsed_ms + 1e-9) * 1e3;
    fprintf(stderr, "\r%.1f MB at %.0f MB/s", 1e-6 * (double)done, 1e-6 * speed);
    if (input->size_known && input->size > 0)
        fprintf(stderr, ", %.0f%%, %.0f s left   ", 100.0 * (double)done / (double)input->size,
                (double)(input->size - min_size(done, input->size)) / speed);
}

#define CHUNK ((size_t)1 << 16)  // bytes of text at a time

static bool convert(Series* train, Series* validation, const Input* input, const Options* options, Error* error) {
    static char text[CHUNK];
    static int32_t tokens[CHUNK];
    Tokenizer tokenizer = tokenizer_of_bytes();
    uint64_t done = 0, train_bytes;
    bool terminal = isatty(STDERR_FILENO);
    double start = now_ms(), shown = start;
    if (!split(&train_bytes, input, options->validation, error)) return false;
    for (;;) {
        bool to_train = done < train_bytes;
        size_t wanted = to_train ? min_size(CHUNK, train_bytes - done) : CHUNK;
        size_t bytes = fread(text, 1, wanted, input->file);
        if (interrupted) return fail(error, "interrupted; nothing was written");
        if (bytes == 0) break;
        size_t count = tokenizer_encode(tokens, &tokenizer, text, bytes);
        if (!series_add(to_train ? train : validation, tokens, count, options, tokenizer.vocabulary, error))
            return false;
        done += bytes;
        if (terminal && now_ms() - shown > 200) {
            shown = now_ms();
            show_progress(input, done, shown - start);
        }
    }
    if (terminal && shown > start) fprintf(stderr, "\r%70s\r", "");
    if (ferror(input->file)) return fail(error, "cannot read %s: %s", input->name, strerror(errno));
    if (done == 0) return fail(error, "%s is empty; give a text", input->name);
    if (input->size_known && done != input->size)
        return fail(error, "%s changed while it was read: %llu bytes became %llu; start again", input->name,
                    (unsigned long long)input->size, (unsigned long long)done);
    return true;
}

// ------------------------------------------------------------------------------------------------

static bool tokenize(const Options* options, Error* error) {
    static Series series[2];
    Input input;
    series[0].prefix = series[1].prefix = options->prefix;
    series[0].kind = "train";
    series[1].kind = "val";
    memset(&input, 0, sizeof input);
    bool ok = input_open(&input, options->input, error) && convert(&series[0], &series[1], &input, options, error);
    for (int i = 0; i < 2; i++)
        if (ok && series[i].writer.file) ok = shard_writer_finish(&series[i].writer, error);
    for (int i = 0; i < 2; i++)
        if (ok) ok = series_publish(&series[i], error);
    for (int i = 0; i < 2; i++) {
        if (!ok) series_abandon(&series[i]);
        if (ok && series[i].shards > 0)
            printf("%s_%s_*.bin: %llu tokens in %zu shard%s\n", options->prefix, series[i].kind,
                   (unsigned long long)series[i].tokens, series[i].shards, series[i].shards == 1 ? "" : "s");
    }
    if (input.file) fclose(input.file);
    return ok;
}

int main(int argc, char** argv) {
    Options options = {NULL, NULL, -1, 100000000, 0};
    Error error;
    bool wants_help;
    struct sigaction action;
    if (!parse_options(&options, &wants_help, argc, argv, &error)) {
        fprintf(stderr, "tokenize: %s\n", error.text);
        return 2;
    }
    if (wants_help) {
        fputs(help, stdout);
        return 0;
    }
    memset(&action, 0, sizeof action);
    action.sa_handler = interrupt;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is then an error of the write, with a sentence
    if (tokenize(&options, &error)) return 0;
    fprintf(stderr, "tokenize: %s\n", error.text);
    return 1;
}
