// run_tokenizer.h: the tokenizer of a run: that of its shards, of the model that it starts from and, when it is
// resumed, of its own directory. They must all be the same, since tokens mean nothing without it.
//
//   Tokenizer tokenizer;
//   bool ok = run_tokenizer_open(&tokenizer, &train, &val, resumed ? out : NULL, from, &error) &&
//             run_tokenizer_keep(&tokenizer, from, out, &error);
//   tokenizer_close(&tokenizer);
//
// Shards PREFIX_train_N.bin and PREFIX_val_N.bin have theirs in PREFIX_tokenizer/, a run in OUT/tokenizer/. Shards
// without one are accepted, such as those of llm.c: only their vocabulary is compared, and 256 means bytes.

#ifndef LLMTRAIN_RUN_TOKENIZER_H
#define LLMTRAIN_RUN_TOKENIZER_H

#include "../text/data.h"
#include "../checkpoint/source.h"

// A tokenizer and where it was found; its vocabulary is 0 where there is none.
typedef struct {
    Tokenizer tokenizer;
    char where[FILE_PATH_MAX];  // its directory
} FoundTokenizer;

static inline bool tokenizer_is_known(const Tokenizer* tokenizer) { return tokenizer->vocabulary > 0; }

// Known, and not the byte tokenizer.
static inline bool tokenizer_has_files(const Tokenizer* tokenizer) {
    return tokenizer_is_known(tokenizer) && tokenizer->hash != tokenizer_of_bytes().hash;
}

// Opens the tokenizer in a directory, if there is one. A run's may have only MODEL_FILES.
static inline bool found_tokenizer_open(FoundTokenizer* found, const char* directory, Error* error) {
    memset(&found->tokenizer, 0, sizeof found->tokenizer);
    snprintf(found->where, sizeof found->where, "%s", directory);
    bool there, known = true;
    if (!path_look(&there, directory, error)) return false;
    if (there && source_has(&known, directory, MODEL_FILES[0], error))
        there = source_has_tokenizer(&known, directory, error);
    return known && (!there || tokenizer_open(&found->tokenizer, directory, NULL, error));
}

// Refuses two known tokenizers that differ in more than the chat template.
static inline bool found_tokenizers_agree(const FoundTokenizer* a, const FoundTokenizer* b, Error* error) {
    const Tokenizer *ours = &a->tokenizer, *other = &b->tokenizer;
    if (!tokenizer_is_known(ours) || !tokenizer_is_known(other) || ours->tokens == other->tokens) return true;
    return fail_with(error, "%.300s is the tokenizer %s (%016llx), but %.300s is %s (%016llx), and tokens of one mean "
                     "nothing to the other; give shards, a run and a model of one tokenizer", a->where, ours->name,
                     (unsigned long long)ours->tokens, b->where, other->name, (unsigned long long)other->tokens);
}

// Refuses tokenizers of shards with different files of chat templates.
static inline bool found_templates_agree(const FoundTokenizer* a, const FoundTokenizer* b, Error* error) {
    const Tokenizer *ours = &a->tokenizer, *other = &b->tokenizer;
    return !ours->paths[FILE_TEMPLATE] || !other->paths[FILE_TEMPLATE] || ours->hash == other->hash ||
           fail_with(error, "%.300s and %.300s have different chat templates; run tokenize --chat with one --template "
                     "for both", a->where, b->where);
}

// Takes a tokenizer in place of one that is not known, or has no chat_template.jinja, or closes it.
static inline void tokenizer_take(Tokenizer* to, Tokenizer* from) {
    bool better = !tokenizer_is_known(to) || (!to->paths[FILE_TEMPLATE] && from->paths[FILE_TEMPLATE]);
    tokenizer_close(better ? to : from);
    if (better) *to = *from;
}

// Opens the tokenizer of a dataset's shards, which must agree. Without one, a vocabulary of 256 means bytes.
static inline bool dataset_tokenizer_open(FoundTokenizer* found, const Dataset* dataset, Error* error) {
    memset(found, 0, sizeof *found);
    char last[FILE_PATH_MAX] = "", directory[FILE_PATH_MAX];
    for (size_t i = 0; i < dataset->shard_count; i++) {
        FoundTokenizer next;
        if (!shard_tokenizer_directory(directory, dataset->shards[i].path) || strcmp(directory, last) == 0) continue;
        memcpy(last, directory, sizeof last);
        bool ok = found_tokenizer_open(&next, directory, error) && found_tokenizers_agree(found, &next, error) &&
                  found_templates_agree(found, &next, error);
        if (tokenizer_is_known(&next.tokenizer)) memcpy(found->where, directory, sizeof directory);
        tokenizer_take(&found->tokenizer, &next.tokenizer);
        if (ok) continue;
        tokenizer_close(&found->tokenizer);
        return false;
    }
    if (tokenizer_is_known(&found->tokenizer) || dataset->vocabulary != 256) return true;
    found->tokenizer = tokenizer_of_bytes();
    snprintf(found->where, sizeof found->where, "%.4000s", dataset->shards[0].path);
    return true;
}

static inline bool model_tokenizer_open(FoundTokenizer* found, const ModelSource* from, Error* error) {
    memset(found, 0, sizeof *found);
    snprintf(found->where, sizeof found->where, "%s", from->tokenizer);
    return source_open_tokenizer(&found->tokenizer, from->tokenizer, from->config.vocab, error);
}

// Opens the tokenizer of a run: that of the training shards, or else of the other sources. out: --out of a resumed run,
// otherwise NULL; from: the model that a new run starts from, or NULL. The vocabulary is 0 if no source has a
// tokenizer. The caller closes it.
static inline bool run_tokenizer_open(Tokenizer* tokenizer, const Dataset* train, const Dataset* val, const char* out,
                                      const ModelSource* from, Error* error) {
    enum { SOURCES = 4 };
    FoundTokenizer* found = (FoundTokenizer*)memory_allocate(SOURCES * sizeof(FoundTokenizer));
    char directory[FILE_PATH_MAX];
    memset(tokenizer, 0, sizeof *tokenizer);
    if (!found) return fail_with(error, "out of memory for the tokenizers of the run");
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", out ? out : "");
    bool ok = dataset_tokenizer_open(&found[0], train, error) && dataset_tokenizer_open(&found[1], val, error) &&
              (!out || found_tokenizer_open(&found[2], directory, error)) &&
              (!from || model_tokenizer_open(&found[3], from, error));
    TokenIds generation = {0};
    if (ok && (from || out)) ok = source_read_ids(&generation, from ? from->tokenizer : directory, true, error);
    for (int i = 0; i < SOURCES; i++)
        for (int j = 0; ok && j < i; j++) ok = found_tokenizers_agree(&found[j], &found[i], error);
    for (int i = 0; i < SOURCES; i++) tokenizer_take(tokenizer, &found[i].tokenizer);
    if (!ok) tokenizer_close(tokenizer);
    free(found);
    tokenizer->generation = generation;
    return ok;
}

// Whether a model of V tokens can read a dataset: of the same vocabulary, of a smaller one if V may be padded, or of a
// larger one, whose further tokens may not occur.
static inline bool dataset_fits_model(const Dataset* dataset, size_t V, const Tokenizer* tokenizer,
                                      const char* init_from) {
    size_t of_data = (size_t)dataset->vocabulary;
    bool has_files = tokenizer_has_files(tokenizer);
    return of_data == 0 || of_data == V || (of_data < V ? has_files || init_from
                                                        : has_files && tokenizer_fits(tokenizer, V));
}

// Saves the tokenizer in OUT/tokenizer/, in place of one that is there, which may be the one it was opened from: so the
// copy is complete before it takes that place. The byte tokenizer has no files to save. With it MODEL_FILES of the
// directory `from`, if there are any.
static inline bool run_tokenizer_keep(const Tokenizer* tokenizer, const char* from, const char* out, Error* error) {
    char directory[FILE_PATH_MAX], complete[FILE_PATH_MAX], replaced[FILE_PATH_MAX];
    bool saves = tokenizer_has_files(tokenizer);
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", out);
    snprintf(complete, sizeof complete, "%.4000s/tokenizer.tmp", out);
    snprintf(replaced, sizeof replaced, "%.4000s/tokenizer.old", out);
    if (!directory_remove(complete, error) || !directory_remove(replaced, error)) return false;
    if (saves && !tokenizer_save(tokenizer, complete, error)) return false;
    for (int i = 0; i < 2; i++) {
        bool known = true, there = source_has(&known, from, MODEL_FILES[i], error);
        if (!known || (there && (!directory_make(complete, error) || !source_copy(&there, from, complete, i, error))))
            return false;
        saves |= there;
    }
    if (directory_exists(directory) && !directory_rename_sync(directory, replaced, error)) return false;
    return (!saves || directory_rename_sync(complete, directory, error)) && directory_remove(replaced, error);
}

#endif  // LLMTRAIN_RUN_TOKENIZER_H
