// generate.h: text from a model: a prompt, and what the model continues it with.
//
//   Sampler sampler = {.prompt = "Once", .tokens = 256, .options = {.temperature = 0.8, .top_p = 1, .seed = 1}};
//   if (sampler_open(&sampler, model.config.vocab, &error)) sampler_write(&sampler, &model, stdout);
//   sampler_close(&sampler);
//
// Its flags are those of train and generate: sampler_flags.

#ifndef LLMTRAIN_GENERATE_H
#define LLMTRAIN_GENERATE_H

#include "../llmtrain.h"
#include "sampling.h"
#include "tokenizer.h"

// Continues tokens, of which the first `known` (at least 1) are given, up to `total`. Each new token is written to
// `out` as text at once, unless out is NULL. candidates (V) is scratch. When the context is full, its later half
// becomes the start of a new one. The model must have been made with options.sampling.
static inline void model_generate(Model* model, int32_t* tokens, Candidate* candidates, FILE* out,
                                  const Tokenizer* tokenizer, const SamplingOptions* o, size_t known, size_t total) {
    size_t context = model->config.context, seen = 0;
    Dropout dropout = model->dropout;
    TokenDecoder decoder;
    decoder_begin(&decoder, tokenizer);
    model->dropout.p = 0;
    model->cache.length = 0;
    for (; known < total; known++) {
        if (known - seen > context - model->cache.length) {  // what is still to be read does not fit
            seen = known - max_size(context / 2, 1);
            model->cache.length = 0;
        }
        for (; seen < known; seen++) model_forward(model, model_upload(model, tokens + seen, NULL, 1, 1), 1, 1, true);
        model_logits(model, 0, 1);
        download(model->cache.logits, model->activations.logits, model->config.vocab * sizeof(floatX), model->stream);
        float uniform = random_uniform(o->seed, RANDOM_SAMPLING, 0, known);
        tokens[known] = sample_token(candidates, model->cache.logits, o, uniform, model->config.vocab);
        if (out == NULL) continue;
        size_t bytes;
        const char* text = decoder_add(&bytes, &decoder, tokens[known]);
        fwrite(text, 1, bytes, out);
        fflush(out);
    }
    if (out) {
        size_t bytes;
        const char* text = decoder_end(&bytes, &decoder);
        fwrite(text, 1, bytes, out);
    }
    model->dropout = dropout;
}

typedef struct {
    const char* prompt;
    uint64_t tokens;          // to generate
    SamplingOptions options;
    Tokenizer tokenizer;
    Tokens text;              // the prompt, and room for what follows
    Candidate* candidates;    // (V)
} Sampler;

enum { SAMPLER_FLAGS = 5 };

// Sets the defaults, and fills in the flags.
static inline void sampler_flags(Flag flags[SAMPLER_FLAGS], Sampler* s) {
    const SamplingOptions usual = {0.8, 0, 1, 0};
    SamplingOptions* o = &s->options;
    s->prompt = "\n";
    s->tokens = 256;
    *o = usual;
    const Flag table[SAMPLER_FLAGS] = {
        {"prompt", FLAG_TEXT, &s->prompt, "TEXT", 0, 0, "text that the sample continues; default: a line break",
         FLAG_LOCAL},
        {"tokens", FLAG_COUNT, &s->tokens, "N", 1, 1e9, "tokens of the sample", FLAG_FREE},
        {"temperature", FLAG_REAL, &o->temperature, "X", 0, 100, "softmax temperature; 0: always the most likely token",
         FLAG_FREE},
        {"top-k", FLAG_COUNT, &o->top_k, "N", 0, 1e9, "sample from the N most likely tokens; 0: all", FLAG_FREE},
        {"top-p", FLAG_REAL, &o->top_p, "X", 0, 1, "sample from the smallest set of tokens with total probability X",
         FLAG_FREE},
    };
    memcpy(flags, table, sizeof table);
}

// Text is read and written as bytes, so the model's vocabulary V must be theirs.
static inline bool sampler_open(Sampler* s, size_t V, Error* error) {
    if (s->prompt[0] == 0) return fail(error, "--prompt is empty; give at least one character");
    s->tokenizer = tokenizer_of_bytes();
    if ((size_t)s->tokenizer.vocabulary != V)
        return fail(error,
                    "the model's vocabulary is %zu, but text is read and written as bytes, of which there are %d; "
                    "sample from a model of bytes",
                    V, s->tokenizer.vocabulary);
    s->candidates = (Candidate*)allocate(V * sizeof(Candidate));
    if (!s->candidates) return fail(error, "out of memory to sample from %zu tokens; free some memory", V);
    return tokenizer_encode(&s->text, &s->tokenizer, s->prompt, strlen(s->prompt), error) &&
           tokens_reserve(&s->text, s->tokens, error);
}

// Writes the prompt and its continuation. Every sample uses the same random numbers, so that the samples of a run show
// how the model changes.
static inline void sampler_write(Sampler* s, Model* model, FILE* out) {
    size_t known = s->text.count;
    fputs(s->prompt, out);
    model_generate(model, s->text.ids, s->candidates, out, &s->tokenizer, &s->options, known, known + s->tokens);
    fputc('\n', out);
    fflush(out);
}

static inline void sampler_close(Sampler* s) {
    tokens_free(&s->text);
    tokenizer_close(&s->tokenizer);
    free(s->candidates);
    memset(s, 0, sizeof *s);
}

#endif  // LLMTRAIN_GENERATE_H
