// open.h: opens a model for the programs of tools/, which use models and do not train them.
//
//   ModelOptions options;
//   memset(&options, 0, sizeof options);
//   options.B = 1;                                         // options.T is 0: the model's context
//   options.cached_sequences = 1;
//   if (model_open(&model, &tokenizer, "runs/x", NULL, &options, "generate", &error)) ...
//
// Where options depend on the model, model_open_planned asks for them when it is known; it also merges adapters.
//
// A run is opened at its newest undamaged checkpoint: a damaged one is reported on standard error, and the previous one
// is tried. An fp32 build loads the master weights of any run. source.h reads the models of other programs.

#ifndef LLMTRAIN_OPEN_H
#define LLMTRAIN_OPEN_H

#include "../llmtrain/checkpoint/peft.h"

#define ADAPTER_HELP \
    "LoRA adapter of PEFT to merge into the model's weights; DIR:0.7,DIR:0.3: the weighted sum of several"

// Where a model is, and how to create it.
typedef struct {
    const char *out, *init_from;  // the directory of a run; or, unless NULL, another model
    const char* adapter;          // directories of adapters whose sum is merged into its weights; NULL: none
    const char* program;          // the name that reports begin with
    ModelOptions options;
    // Called when the model and its tokenizer are known, before memory is allocated for them, to check or change the
    // options. NULL: not needed.
    bool (*plan)(ModelOptions* options, const Config* config, const Tokenizer* tokenizer, void* context, Error* error);
    void* context;
} ModelOpening;

// Creates a model of a configuration, and opens its tokenizer in the directory, if there is one; an options.T of 0, or
// above the model's context, means its context.
static inline bool open_create(Model* model, Tokenizer* tokenizer, const ModelOpening* opening, const Config* config,
                               const char* directory, Error* error) {
    ModelOptions options = opening->options;
    if (options.T == 0 || options.T > config->context) options.T = config->context;
    if (!source_open_tokenizer(tokenizer, directory, config->vocab, error)) return false;
    bool ok = (!opening->plan || opening->plan(&options, config, tokenizer, opening->context, error)) &&
              model_create(model, config, options, error);
    if (!ok) tokenizer_close(tokenizer);
    return ok;
}

// Opens a checkpoint of the run. *damaged: after a failure, whether an older one may work.
static inline bool open_checkpoint(Model* model, Tokenizer* tokenizer, const ModelOpening* opening, const char* path,
                                   bool* damaged, Error* error) {
    char directory[FILE_PATH_MAX];
    Json manifest;
    RunRecord record;
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", opening->out);
    *damaged = true;
    if (record_open(&manifest, &record, path, error)) {
        bool created = open_create(model, tokenizer, opening, &record.config, directory, error);
        bool loaded = created && checkpoint_load(&model->flat, &manifest, path, true, error);
        json_free(&manifest);
        if (loaded) return true;
        *damaged = created;
        if (created) model_free(model), tokenizer_close(tokenizer);
    }
    if (error->kind == ERROR_PROCESS) *damaged = false;  // an older one would fail too
    return false;
}

// Opens the newest undamaged checkpoint of the run.
static inline bool open_newest(Model* model, Tokenizer* tokenizer, const ModelOpening* opening, Error* error) {
    bool looked, found, any = false;
    uint64_t step = UINT64_MAX, told = 0, last = 0, first = UINT64_MAX;  // reported: first to last, then up to told
    int tries = 10;
    while ((looked = checkpoint_find_before(&step, &found, opening->out, step, error)) && found) {
        char path[FILE_PATH_MAX];
        bool damaged;
        any = true;
        checkpoint_path(path, opening->out, step, "");
        if (open_checkpoint(model, tokenizer, opening, path, &damaged, error)) return true;
        if (!damaged) return false;
        bool removed = access(path, F_OK) != 0 && tries-- > 0;  // by a run that trains, after a newer one
        if (!removed && (step > last || step < first))
            fprintf(stderr, "%s: %s; trying the checkpoint before it\n", opening->program, error->text);
        if (!removed) told = max_size(told, step), first = min_size(first, step);
        else step = UINT64_MAX, last = told;
    }
    if (!looked) return false;
    if (any) return fail_with(error, first == UINT64_MAX ? "the checkpoints in %s were removed meanwhile; try again"
                                     : "no checkpoint in %s can be used, for the reasons above", opening->out);
    return fail_with(error, "%s holds no checkpoint; give the --out of a run that has saved one", opening->out);
}

// Opens another model: of Hugging Face, of llm.c, or a checkpoint; or one to which adapters are added.
static inline bool open_source(Model* model, Tokenizer* tokenizer, const ModelOpening* opening, Error* error) {
    ModelSource source;
    FILE* notes = opening->options.ranks.rank == 0 ? stderr : NULL;
    if (!source_open(&source, opening->init_from ? opening->init_from : opening->out, error)) return false;
    bool ok = (!opening->adapter || source_add_adapters(&source, opening->adapter, notes, error)) &&
              open_create(model, tokenizer, opening, &source.config, source.tokenizer, error);
    if (ok) source_say_quantized(&source, false, stderr);
    if (ok && !source_load(model, &source, "init-from", error)) {
        model_free(model);
        tokenizer_close(tokenizer);
        ok = false;
    }
    source_close(&source);
    return ok;
}

// Opens the model of a run, or another: a directory of Hugging Face, a file of llm.c, or a checkpoint (a step_N
// directory). The caller frees it with model_free, and the tokenizer with tokenizer_close; an unknown tokenizer has a
// vocabulary of 0.
static inline bool model_open_planned(Model* model, Tokenizer* tokenizer, const ModelOpening* opening, Error* error) {
    if (!opening->init_from && !opening->out)
        return fail_with(error, "no model is named; give a run, or another model");
    if (opening->init_from || opening->adapter) return open_source(model, tokenizer, opening, error);
    return open_newest(model, tokenizer, opening, error);
}

// The same, with options that are known beforehand, and without adapters.
static inline bool model_open(Model* model, Tokenizer* tokenizer, const char* out, const char* init_from,
                              const ModelOptions* options, const char* program, Error* error) {
    ModelOpening opening = {out, init_from, NULL, program, *options, NULL, NULL};
    return model_open_planned(model, tokenizer, &opening, error);
}

#endif  // LLMTRAIN_OPEN_H
