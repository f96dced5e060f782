// run_tokenizer.h: which tokenizer a run is of: that of its shards, of the model that it begins with, and of its own
// directory when it is resumed. They must be the same one, since tokens mean nothing without it.
//
//   Tokenizer tokenizer;
//   bool ok = run_tokenizer_open(&tokenizer, &train, &val, resumed ? out : NULL, init_from, &error) &&
//             run_tokenizer_keep(&tokenizer, out, &error);
//   tokenizer_close(&tokenizer);
//
// Shards PREFIX_train_N.bin and PREFIX_val_N.bin have theirs in PREFIX_tokenizer/, a run in OUT/tokenizer/. Shards
// without one are accepted, as those of llm.c are: only their vocabulary is compared.

#ifndef LLMTRAIN_RUN_TOKENIZER_H
#define LLMTRAIN_RUN_TOKENIZER_H

#include "data.h"
#include "source.h"

// The tokenizer of a place; its vocabulary is 0 where there is none.
typedef struct {
    Tokenizer tokenizer;
    char where[FILE_PATH_MAX];  // its directory
} PlacedTokenizer;

static inline bool tokenizer_is_known(const Tokenizer* tokenizer) { return tokenizer->vocabulary > 0; }

// Known, and not the one of bytes.
static inline bool tokenizer_has_files(const Tokenizer* tokenizer) {
    return tokenizer_is_known(tokenizer) && tokenizer->hash != tokenizer_of_bytes().hash;
}

// Opens the tokenizer in a directory; there need be none.
static inline bool placed_tokenizer_open(PlacedTokenizer* placed, const char* directory, Error* error) {
    memset(&placed->tokenizer, 0, sizeof placed->tokenizer);
    snprintf(placed->where, sizeof placed->where, "%s", directory);
    return !directory_exists(directory) || tokenizer_open(&placed->tokenizer, directory, NULL, error);
}

// Refuses two known tokenizers that differ.
static inline bool placed_tokenizers_agree(const PlacedTokenizer* a, const PlacedTokenizer* b, Error* error) {
    const Tokenizer *ours = &a->tokenizer, *other = &b->tokenizer;
    if (!tokenizer_is_known(ours) || !tokenizer_is_known(other) || ours->hash == other->hash) return true;
    return fail(error, "%.300s is the tokenizer %s (%016llx), but %.300s is %s (%016llx), and tokens of one mean "
                "nothing to the other; give shards, a run and a model of one tokenizer", a->where, ours->name,
                (unsigned long long)ours->hash, b->where, other->name, (unsigned long long)other->hash);
}

// The directory of the tokenizer of a shard: PREFIX_tokenizer for PREFIX_train_000000.bin; false for other names.
static inline bool shard_tokenizer_directory(char directory[FILE_PATH_MAX], const char* path) {
    static const char* const kinds[2] = {"_train_", "_val_"};
    size_t end = strlen(path);
    if (end < 4 || strcmp(path + end - 4, ".bin") != 0) return false;
    for (end -= 4; end > 0 && path[end - 1] >= '0' && path[end - 1] <= '9';) end--;
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(kinds[i]);
        if (end < length || strncmp(path + end - length, kinds[i], length) != 0) continue;
        int written = snprintf(directory, FILE_PATH_MAX, "%.*s_tokenizer", (int)(end - length), path);
        return written > 0 && (size_t)written < FILE_PATH_MAX;
    }
    return false;
}

// The tokenizer of a dataset's shards, which must agree.
static inline bool dataset_tokenizer_open(PlacedTokenizer* placed, const Dataset* dataset, Error* error) {
    memset(placed, 0, sizeof *placed);
    char last[FILE_PATH_MAX] = "", directory[FILE_PATH_MAX];
    for (size_t i = 0; i < dataset->shard_count; i++) {
        PlacedTokenizer next;
        if (!shard_tokenizer_directory(directory, dataset->shards[i].path) || strcmp(directory, last) == 0) continue;
        memcpy(last, directory, sizeof last);
        bool ok = placed_tokenizer_open(&next, directory, error) && placed_tokenizers_agree(placed, &next, error);
        if (ok && !tokenizer_is_known(&placed->tokenizer)) *placed = next;
        else tokenizer_close(&next.tokenizer);
        if (ok) continue;
        tokenizer_close(&placed->tokenizer);
        return false;
    }
    return true;
}

static inline bool model_tokenizer_open(PlacedTokenizer* placed, const char* init_from, Error* error) {
    ModelSource source;
    memset(placed, 0, sizeof *placed);
    if (!source_open(&source, init_from, error)) return false;
    snprintf(placed->where, sizeof placed->where, "%s", source.tokenizer);
    bool ok = source_open_tokenizer(&placed->tokenizer, source.tokenizer, source.config.vocab, error);
    source_close(&source);
    return ok;
}

// The tokenizer of a run: that of the training shards, or else of the others. out: of a run that is resumed, otherwise
// NULL; init_from: NULL, or the model that a new run begins with. Its vocabulary is 0 if none of them has one; then it
// is that of bytes if their tokens are bytes. The caller closes it.
static inline bool run_tokenizer_open(Tokenizer* tokenizer, const Dataset* train, const Dataset* val, const char* out,
                                      const char* init_from, Error* error) {
    enum { PLACES = 4 };
    PlacedTokenizer* places = (PlacedTokenizer*)allocate(PLACES * sizeof(PlacedTokenizer));
    char directory[FILE_PATH_MAX];
    memset(tokenizer, 0, sizeof *tokenizer);
    if (!places) return fail(error, "out of memory for the tokenizers of the run");
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", out ? out : "");
    bool ok = dataset_tokenizer_open(&places[0], train, error) && dataset_tokenizer_open(&places[1], val, error) &&
              (!out || placed_tokenizer_open(&places[2], directory, error)) &&
              (!init_from || model_tokenizer_open(&places[3], init_from, error));
    for (int i = 0; i < PLACES; i++)
        for (int j = 0; ok && j < i; j++) ok = placed_tokenizers_agree(&places[j], &places[i], error);
    for (int i = 0; i < PLACES; i++) {
        if (ok && !tokenizer_is_known(tokenizer)) *tokenizer = places[i].tokenizer;
        else tokenizer_close(&places[i].tokenizer);
    }
    free(places);
    if (ok && !tokenizer_is_known(tokenizer) && train->vocabulary == 256) *tokenizer = tokenizer_of_bytes();
    return ok;
}

// Whether a model of V tokens can read a dataset: it has the same vocabulary, or a smaller one where that of the model
// may be padded, as it is in models of other programs.
static inline bool dataset_fits_model(const Dataset* dataset, size_t V, const Tokenizer* tokenizer,
                                      const char* init_from) {
    size_t of_data = (size_t)dataset->vocabulary;
    return of_data == 0 || of_data == V || (of_data < V && (tokenizer_has_files(tokenizer) || init_from));
}

// Keeps the tokenizer in OUT/tokenizer/, in place of one that is there; that of bytes has nothing to keep.
static inline bool run_tokenizer_keep(const Tokenizer* tokenizer, const char* out, Error* error) {
    char directory[FILE_PATH_MAX];
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", out);
    if (!directory_remove(directory, error)) return false;
    return !tokenizer_has_files(tokenizer) || tokenizer_save(tokenizer, directory, error);
}

#endif  // LLMTRAIN_RUN_TOKENIZER_H
