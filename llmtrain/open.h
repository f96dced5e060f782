// open.h: opens a model for the programs of tools/, which use it and do not train it.
//
//   ModelOptions options;
//   memset(&options, 0, sizeof options);
//   options.B = 1;                                         // options.T is 0: the model's context
//   options.samples = 1;
//   if (model_open(&model, &tokenizer, "runs/x", NULL, &options, "generate", &error)) ...
//
// A run is opened at its newest checkpoint that is whole: a damaged one is reported on standard error, and the one
// before it is tried. An fp32 build loads the master weights of any run. A model of another program is opened as
// source.h reads it.

#ifndef LLMTRAIN_OPEN_H
#define LLMTRAIN_OPEN_H

#include "source.h"

// Creates a model of a configuration; options->T 0, or above its context, stands for its context.
static inline bool open_create(Model* model, const Config* config, const ModelOptions* asked, Error* error) {
    ModelOptions options = *asked;
    if (options.T == 0 || options.T > config->context) options.T = config->context;
    return model_create(model, config, options, error);
}

// Opens a checkpoint of a run. *damaged: another one may do better.
static inline bool open_checkpoint(Model* model, const char* path, const ModelOptions* options, bool* damaged,
                                   Error* error) {
    Json manifest;
    RunRecord record;
    *damaged = true;
    if (record_open(&manifest, &record, path, error)) {
        bool created = open_create(model, &record.config, options, error);
        bool loaded = created && checkpoint_load(&model->flat, &manifest, path, true, error);
        json_free(&manifest);
        if (loaded) return true;
        *damaged = created;
        if (created) model_free(model);
    }
    if (error->kind == ERROR_PROCESS) *damaged = false;  // an older one would do no better
    return false;
}

// Opens the newest whole checkpoint of the run in `out`.
static inline bool open_newest(Model* model, const char* out, const ModelOptions* options, const char* program,
                               Error* error) {
    bool found, any = false;
    uint64_t step = UINT64_MAX;
    while (checkpoint_find_before(&step, &found, out, step, error) && found) {
        char path[FILE_PATH_MAX];
        bool damaged;
        any = true;
        checkpoint_path(path, out, step, "");
        if (open_checkpoint(model, path, options, &damaged, error)) return true;
        if (!damaged) return false;
        fprintf(stderr, "%s: %s; trying the checkpoint before it\n", program, error->text);
    }
    if (any) return fail(error, "no checkpoint in %s can be used, for the reasons above", out);
    return fail(error, "%s holds no checkpoint; give the --out of a run that has saved one", out);
}

// Opens another model: of Hugging Face, of llm.c, or a checkpoint.
static inline bool open_source(Model* model, Tokenizer* tokenizer, const char* path, const ModelOptions* options,
                               Error* error) {
    ModelSource source;
    if (!source_open(&source, path, error)) return false;
    bool ok = open_create(model, &source.config, options, error);
    if (ok && !(source_load(model, &source, "init-from", error) &&
                source_open_tokenizer(tokenizer, source.tokenizer, source.config.vocab, error))) {
        model_free(model);
        ok = false;
    }
    source_close(&source);
    return ok;
}

// Opens the model of a run in the directory `out`, or, if it is not NULL, that of `init_from`: a directory of Hugging
// Face, a file of llm.c, or a checkpoint (a step_N directory). The caller frees it with model_free, and the tokenizer
// with tokenizer_close; one that is not known has a vocabulary of 0. program: the name with which what is reported
// begins.
static inline bool model_open(Model* model, Tokenizer* tokenizer, const char* out, const char* init_from,
                              const ModelOptions* options, const char* program, Error* error) {
    char directory[FILE_PATH_MAX];
    if (init_from) return open_source(model, tokenizer, init_from, options, error);
    if (out == NULL) return fail(error, "no model is named; give a run, or another model");
    if (!open_newest(model, out, options, program, error)) return false;
    snprintf(directory, sizeof directory, "%.4000s/tokenizer", out);
    if (source_open_tokenizer(tokenizer, directory, model->config.vocab, error)) return true;
    model_free(model);
    return false;
}

#endif  // LLMTRAIN_OPEN_H
