// generate.cu: continues a text with the model of a run. An example of the library: a model is created from a
// checkpoint, loaded and sampled from in a page.
//
//   make build/generate && build/generate --out runs/x --prompt 'Once upon a time'
//
// It takes the newest checkpoint of --out that is whole. An fp32 build loads the master weights of any run. Exit
// code: 0 done; 1 something failed; 2 a flag is wrong.

#include "../llmtrain/generate.h"
#include "../llmtrain/open.h"

static bool generate(Sampler* sampler, const char* out, Error* error) {
    Model model;
    Tokenizer tokenizer;
    ModelOptions options;
    memset(&options, 0, sizeof options);
    options.B = options.T = 1;  // one token at a time
    options.sampling = true;
    if (!model_open(&model, &tokenizer, out, NULL, &options, "generate", error)) return false;
    bool ok = sampler_open(sampler, model.config.vocab, error);
    if (ok) sampler_write(sampler, &model, stdout);
    sampler_close(sampler);
    model_free(&model);
    return ok && (!ferror(stdout) || fail_file(error, "write", "standard output"));
}

int main(int argc, char** argv) {
    Sampler sampler;
    const char* out = NULL;
    uint64_t threads = 0;
    Flag flags[3 + SAMPLER_FLAGS] = {
        {"out", FLAG_TEXT, &out, "DIR", 0, 0, "directory of the run (required)", 0},
        {"seed", FLAG_COUNT, &sampler.options.seed, "N", 0, 9e15, "seed of the random numbers", 0},
        {"threads", FLAG_COUNT, &threads, "N", 0, 4096, "OpenMP threads; 0: OpenMP's default", 0},
    };
    Error error;
    int code;
    files_open_standard();
    memset(&sampler, 0, sizeof sampler);
    sampler_flags(flags + 3, &sampler);
    sampler.options.seed = 1337;
    if (!flags_begin(&code, "generate", "generate: continues a text with the model of a run", flags, 3 + SAMPLER_FLAGS,
                     argc, argv)) return code;
    bool wrong = out == NULL || out[0] == 0 || sampler.prompt[0] == 0;
    if (sampler.prompt[0] == 0) fail(&error, "--prompt is empty; give at least one character");
    else if (wrong) fail(&error, "give --out, the directory of a run that has saved a checkpoint");
    if (threads) threads_set(threads);
    if (!wrong && generate(&sampler, out, &error)) return 0;
    fprintf(stderr, "generate: %s\n", error.text);
    return wrong ? 2 : 1;
}
