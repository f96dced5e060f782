// open.h: opens a model for the programs of tools/, which use it and do not train it.
//
//   ModelOptions options;
//   memset(&options, 0, sizeof options);
//   options.B = 1;                                         // options.T is 0: the model's context
//   options.sampling = true;
//   if (model_open(&model, &tokenizer, "runs/x", NULL, &options, "generate", &error)) ...
//
// A run is opened at its newest checkpoint that is whole: a damaged one is reported on standard error, and the one
// before it is tried. An fp32 build loads the master weights of any run.

#ifndef LLMTRAIN_OPEN_H
#define LLMTRAIN_OPEN_H

#include "../llmtrain.h"

// The tokenizer of a model: bytes if its vocabulary is theirs; otherwise it is not known, and its vocabulary is 0.
static inline Tokenizer open_tokenizer(const Config* c) {
    Tokenizer tokenizer = tokenizer_of_bytes();
    if (c->vocab != (size_t)tokenizer.vocabulary) memset(&tokenizer, 0, sizeof tokenizer);
    return tokenizer;
}

// Creates a model of a configuration; options->T 0 stands for its context.
static inline bool open_create(Model* model, const Config* config, const ModelOptions* asked, Error* error) {
    ModelOptions options = *asked;
    if (options.T == 0) options.T = config->context;
    return model_create(model, config, options, error);
}

// Opens the checkpoint at a path. *damaged: another one may do better.
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

// Opens the model of a run in the directory `out`, or, if that is NULL, of `init_from`: a checkpoint (a step_N
// directory). The caller frees it with model_free. program: the name with which what is reported begins.
static inline bool model_open(Model* model, Tokenizer* tokenizer, const char* out, const char* init_from,
                              const ModelOptions* options, const char* program, Error* error) {
    bool damaged;
    bool ok = out ? open_newest(model, out, options, program, error)
                  : open_checkpoint(model, init_from, options, &damaged, error);
    if (ok) *tokenizer = open_tokenizer(&model->config);
    return ok;
}

#endif  // LLMTRAIN_OPEN_H
