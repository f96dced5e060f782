// generate.cu: continues a text with a model. An example of the library: a model is opened and sampled from in a page.
//
//   make build/generate && build/generate --out runs/x --prompt 'Once upon a time'
//
// It takes the newest checkpoint of --out that is whole, or the model in --init-from. An fp32 build loads the master
// weights of any run. Exit code: 0 done; 1 something failed; 2 a flag is wrong.

#include "../llmtrain/generate.h"
#include "../llmtrain/open.h"

typedef struct {
    const char *out, *init_from;
    uint64_t threads;
    int kv;  // position in KV_NAMES
    Sampler sampler;
} Options;

#define KV_NAMES "full|q8"
enum { KV_FULL, KV_Q8, PROMPT_ROWS = 128 };  // tokens of the prompt that are read at a time, about

static bool generate(Options* o, Error* error) {
    Model model;
    Tokenizer tokenizer;
    ModelOptions options;
    memset(&options, 0, sizeof options);
    options.B = options.samples = max_size(o->sampler.samples, 1);
    options.T = max_size(PROMPT_ROWS / options.B, 1);
    options.kv_q8 = o->kv == KV_Q8;
    if (!model_open(&model, &tokenizer, o->out, o->init_from, &options, "generate", error)) return false;
    bool ok = sampler_open(&o->sampler, &model, &tokenizer, error) && sampler_write(&o->sampler, stdout, error);
    sampler_close(&o->sampler);
    tokenizer_close(&tokenizer);
    model_free(&model);
    return ok && (!ferror(stdout) || fail_file(error, "write", "standard output"));
}

static bool options_check(const Options* o, Error* error) {
    bool run = o->out && o->out[0], directory = o->init_from && o->init_from[0];
    if (o->sampler.prompt_ids == NULL && o->sampler.prompt[0] == 0)
        return fail(error, "--prompt is empty; give at least one character");
    if (run == directory)
        return fail(error, "give --out, the directory of a run that has saved a checkpoint, or --init-from, that of a "
                    "model");
    return true;
}

int main(int argc, char** argv) {
    Options o;
    memset(&o, 0, sizeof o);
    Sampler* s = &o.sampler;
    Flag flags[32] = {
        TEXT_FLAG("out", &o.out, NULL, "DIR", 0, "directory of a run: its newest checkpoint is taken"),
        TEXT_FLAG("init-from", &o.init_from, NULL, "DIR", 0, "a checkpoint, or the directory of a model, instead"),
        TEXT_FLAG("prompt-ids", &s->prompt_ids, NULL, "IDS", 0,
                  "tokens instead of --prompt, as numbers: '1 2 3'; no begin-of-text token is added"),
        SWITCH_FLAG("print-ids", &s->print_ids, false, 0,
                    "print tokens as numbers, not text: a line for each sample, the prompt's first"),
        COUNT_FLAG("samples", &s->samples, 1, 1, 4096, 0, "samples that are generated at once"),
        {"stop", FLAG_TEXTS, &s->stops, "TEXT", 0, 0,
         "a sample ends before this text; may be given several times", 0},
        SWITCH_FLAG("past-end", &s->past_end, false, 0, "continue after an end-of-text token"),
        CHOICE_FLAG("kv", &o.kv, KV_FULL, KV_NAMES, 0,
                    "what the KV cache holds: full, the type that this program computes with, or q8, 8 bits"),
        COUNT_FLAG("seed", &s->options.seed, 1337, 0, 9e15, 0, "seed of the random numbers"),
        COUNT_FLAG("threads", &o.threads, 0, 0, 4096, 0, "OpenMP threads; 0: OpenMP's default"),
    };
    size_t count = 10;
    Error error;
    int code;
    files_open_standard();
    sampler_flags(flags + count, s);
    s->options.seed = 1337;
    count += SAMPLER_FLAGS;
    if (!flags_begin(&code, "generate", "generate: continues a text with a model", flags, count, argc, argv))
        return code;
    bool right = options_check(&o, &error);
    if (o.threads) threads_set(o.threads);
    if (right && generate(&o, &error)) return 0;
    fprintf(stderr, "generate: %s\n", error.text);
    return right ? 1 : 2;
}
