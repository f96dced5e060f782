// generate.h: text from a model: a prompt, and the model's continuation.
//
//   1. generator   one token after the other, for several samples at once
//   2. text        the text of a sample as its tokens come: whole characters, and where it stops
//   3. sampler     sampling by the flags of train and generate
//
//   Generator g;
//   if (!generator_open(&g, &model, &options, 1, count + 100, &error)) ...      1 sample, room for 100 tokens more
//   generator_append(&g, ids, count);                                           the prompt, at least 1 token
//   for (int i = 0; i < 100; i++) printf(" %d", *generator_step(&g));
//   generator_close(&g);
//
// The model must have been made with options.cached_sequences. A token is a function of the text before it, the seed,
// the number of its sample and its position: on a CPU neither the other samples nor how much of the prompt is read at a
// time changes a bit (except in BF16 builds with AMX or BFMMLA). With g.scores generator_step also gives the
// log-probabilities of its tokens; those of the model are to the bit minus the losses of model_losses in an FP32 build
// on a CPU, unless the cache holds 8 bits or the text has outgrown it.

#ifndef LLMTRAIN_GENERATE_H
#define LLMTRAIN_GENERATE_H

#include "../../llmtrain.h"
#include "sampling.h"
#include "tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Generator
//
// S samples, each a row of the batch with its own text and length. What a prompt has in common with one that another
// row has read is copied, not read again. A sample that is done leaves the batch (generator_drop), or another takes its
// row (generator_start).

typedef struct {
    uint64_t number;          // of the sample, for its random numbers
    size_t known;             // tokens so far
    size_t seen;              // how many of them the model has read
} GeneratorRow;

typedef struct {
    Model* model;
    SamplingOptions options;
    size_t most, size;        // samples that there is room for; the tokens that each has room for
    size_t samples;           // S
    GeneratorRow* rows;       // (S)
    int32_t* tokens;          // (S, size)
    int32_t* batch;           // (rows of the model) the tokens of a forward
    int32_t* newest;          // (S)
    bool scores;              // fill in logps and sampled_logps; off after generator_open
    float* logps;             // (S) log p of the newest tokens under the model, as in training
    float* sampled_logps;     // (S) under softmax(logits / temperature), from which top-k and others cut
    floatX* logits;           // (V) of one sample, on the host
    Candidate* candidates;    // (V)
} Generator;

static inline void generator_close(Generator* g) {
    free(g->rows);
    free(g->tokens);
    free(g->batch);
    free(g->newest);
    free(g->logps);
    free(g->logits);
    free(g->candidates);
    memset(g, 0, sizeof *g);
}

// All samples are empty, and are numbered from 0.
static inline void generator_begin(Generator* g) {
    g->samples = g->most;
    for (size_t r = 0; r < g->most; r++) {
        const GeneratorRow empty = {r, 0, 0};
        g->rows[r] = empty;
        g->model->cache.lengths[r] = 0;
    }
}

static inline bool generator_open(Generator* g, Model* model, const SamplingOptions* options, size_t samples,
                                  size_t size, Error* error) {
    size_t V = model->config.vocab, rows = model->options.B * model->options.T;
    memset(g, 0, sizeof *g);
    if (samples == 0 || samples > model->options.cached_sequences || samples > rows)
        return fail_with(error, "cannot generate %zu samples at once: the model was opened for 1 to %zu", samples,
                         min_size(model->options.cached_sequences, rows));
    g->model = model;
    g->options = *options;
    g->most = samples;
    g->size = size;
    bool fits = size <= SIZE_MAX / sizeof(int32_t) / samples;
    g->rows = (GeneratorRow*)memory_allocate(samples * sizeof(GeneratorRow));
    g->tokens = fits ? (int32_t*)memory_allocate(samples * size * sizeof(int32_t)) : NULL;
    g->batch = (int32_t*)memory_allocate(rows * sizeof(int32_t));
    g->newest = (int32_t*)memory_allocate(samples * sizeof(int32_t));
    g->logps = (float*)memory_allocate(2 * samples * sizeof(float));
    g->sampled_logps = g->logps + samples;
    g->logits = (floatX*)memory_allocate(V * sizeof(floatX));
    g->candidates = (Candidate*)memory_allocate(V * sizeof(Candidate));
    if (g->rows && g->tokens && g->batch && g->newest && g->logps && g->logits && g->candidates) {
        generator_begin(g);
        return true;
    }
    generator_close(g);
    return fail_with(error, "out of memory for %zu samples of %zu tokens; make --samples or --tokens smaller", samples,
                     size);
}

// Adds tokens to a row; there is room for them.
static inline void generator_append_row(Generator* g, size_t r, const int32_t* ids, size_t count) {
    memcpy(g->tokens + r * g->size + g->rows[r].known, ids, count * sizeof(int32_t));
    g->rows[r].known += count;
}

// Adds tokens to every sample.
static inline void generator_append(Generator* g, const int32_t* ids, size_t count) {
    for (size_t r = 0; r < g->samples; r++) generator_append_row(g, r, ids, count);
}

// The tokens of a row that have left the context.
static inline size_t generator_slid(const Generator* g, size_t r) {
    return g->rows[r].seen - g->model->cache.lengths[r];
}

// Cuts a row back to its first `count` tokens.
static inline void generator_cut(Generator* g, size_t r, size_t count) {
    GeneratorRow* row = &g->rows[r];
    size_t slid = generator_slid(g, r);
    if (row->seen >= count) row->seen = count > slid ? count - 1 : 0;  // so that there is one to read
    g->model->cache.lengths[r] = row->seen > slid ? row->seen - slid : 0;
    row->known = count;
}

// Makes row r sample `number`, with a prompt of at least 1 token; what the model has read of it in this row is kept.
static inline void generator_start(Generator* g, size_t r, uint64_t number, const int32_t* ids, size_t count) {
    GeneratorRow* row = &g->rows[r];
    const int32_t* tokens = g->tokens + r * g->size;
    size_t same = 0;
    while (same < min_size(row->known, count) && tokens[same] == ids[same]) same++;
    generator_cut(g, r, same);
    generator_append_row(g, r, ids + same, count - same);
    row->number = number;
}

// Takes row r from the batch; the last row takes its place.
static inline void generator_drop(Generator* g, size_t r) {
    KvCache* cache = &g->model->cache;
    size_t last = --g->samples;
    if (r == last) return;
    g->rows[r] = g->rows[last];
    memcpy(g->tokens + r * g->size, g->tokens + last * g->size, g->rows[r].known * sizeof(int32_t));
    kv_cache_copy(cache, r, last, cache->lengths[last], g->model->stream);
}

// One forward over `count` unread tokens of each of `samples` rows, from `first` on.
static inline void generator_forward(Generator* g, size_t first, size_t samples, size_t count) {
    for (size_t s = 0; s < samples; s++) {
        GeneratorRow* row = &g->rows[first + s];
        memcpy(g->batch + s * count, g->tokens + (first + s) * g->size + row->seen, count * sizeof(int32_t));
        row->seen += count;
    }
    g->model->cache.first = first;
    model_upload(g->model, g->batch, NULL, samples, count, true);
    model_forward(g->model);
    g->model->cache.first = 0;
}

// Copies to the cache of row r what another row has read of the same text, if that is more, except for the last token.
static inline void generator_share(Generator* g, size_t r) {
    GeneratorRow* row = &g->rows[r];
    const int32_t* tokens = g->tokens + r * g->size;
    size_t slid = generator_slid(g, r), best = row->seen, from = r;
    for (size_t other = 0; other < g->samples; other++) {
        size_t same = slid, most = min_size(g->rows[other].seen, row->known - 1);
        if (other == r || generator_slid(g, other) != slid) continue;
        while (same < most && tokens[same] == g->tokens[other * g->size + same]) same++;
        if (same > best) best = same, from = other;
    }
    if (from == r) return;
    kv_cache_copy(&g->model->cache, r, from, best - slid, g->model->stream);
    row->seen = best;
}

// Runs the model on all tokens that it has not read, the last of each sample in one batch, so that their hidden states
// are the first S rows. When the context, or what the cache holds of it, is full, its second half becomes the start of
// a new one; or what the model has not read, if that is more: of a prompt that does not fit, its end.
static inline void generator_read(Generator* g) {
    KvCache* cache = &g->model->cache;
    size_t context = cache->context, most = g->model->options.B * g->model->options.T;
    for (size_t r = 0; r < g->samples; r++) {
        GeneratorRow* row = &g->rows[r];
        size_t last = row->known - 1, unread = row->known - row->seen;
        if (unread > context - cache->lengths[r]) {
            row->seen = row->known - max_size(context / 2, min_size(unread, context));
            cache->lengths[r] = 0;
        }
        if (row->seen < last) generator_share(g, r);
        while (row->seen < last) generator_forward(g, r, 1, min_size(most, last - row->seen));
    }
    generator_forward(g, 0, g->samples, 1);
}

// Draws a token from row `row` of the logits for row r of the batch.
static inline void generator_draw(Generator* g, size_t r, size_t row) {
    size_t V = g->model->config.vocab, known = g->rows[r].known;
    device_download(g->logits, g->model->activations->logits + row * config_padded_vocab(&g->model->config),
                    V * sizeof(floatX), g->model->stream);
    float uniform = random_uniform(g->options.seed, RANDOM_SAMPLING, g->rows[r].number, known);
    g->newest[r] = sample_token(g->candidates, g->logits, g->tokens + r * g->size, known, &g->options, uniform, V);
    if (g->scores) g->sampled_logps[r] = sample_logp(g->logits, g->newest[r], g->options.temperature, V);
}

// The log-probabilities of the newest tokens of `samples` rows, from `first` on, whose logits the model has: by the
// operation that computes the losses in training.
static inline void generator_score(Generator* g, size_t first, size_t samples) {
    Model* model = g->model;
    const Activations* a = model->activations;
    float* logps = g->logps + first;
    int32_t* targets = (int32_t*)(uintptr_t)a->targets;  // those of a batch that is decoded are not used
    device_upload(targets, g->newest + first, samples * sizeof(int32_t), model->stream);
    classifier(a->logits, a->losses, targets, 0.0f, NULL, samples, model->config.vocab,
               config_padded_vocab(&model->config), model->stream);
    device_download(logps, a->losses, samples * sizeof(float), model->stream);
    for (size_t s = 0; s < samples; s++) logps[s] = 0.0f - logps[s];
    for (size_t s = 0; s < samples && g->options.temperature == 1; s++) g->sampled_logps[first + s] = logps[s];
}

// Adds a token to every sample, which must have room for it; returns the tokens (S).
static inline const int32_t* generator_step(Generator* g) {
    Model* model = g->model;
    Dropout dropout = model->dropout;
    model->dropout.p = model->dropout.adapters = 0;
    generator_read(g);
    for (size_t first = 0; first < g->samples; first += model->logits_rows) {
        size_t rows = min_size(model->logits_rows, g->samples - first);
        model_logits(model, first, rows);
        for (size_t i = 0; i < rows; i++) generator_draw(g, first + i, i);
        if (g->scores) generator_score(g, first, rows);
    }
    for (size_t r = 0; r < g->samples; r++) generator_append_row(g, r, &g->newest[r], 1);
    model->dropout = dropout;
    return g->newest;
}

// ------------------------------------------------------------------------------------------------
// 2. Text

typedef struct {
    TokenDecoder decoder;
    char* text;               // (bytes) owned
    size_t bytes, capacity;
    size_t written;           // bytes that have been shown
    Tokens ids;               // that were added, with the one that ended it
    bool ended;               // by a stop string, or the end-of-text token
} SampleText;

// before: the tokens that the text continues, so that a space at its beginning belongs to it; NULL: none.
static inline void sample_text_begin(SampleText* t, const Tokenizer* tokenizer, const Tokens* before) {
    size_t bytes;
    if (tokenizer) decoder_begin(&t->decoder, tokenizer);  // it was zeroed
    for (size_t i = 0; tokenizer && before && i < before->count; i++) decoder_add(&bytes, &t->decoder, before->ids[i]);
    if (tokenizer) decoder_end(&bytes, &t->decoder);  // all bytes of these tokens were written elsewhere
    t->bytes = t->written = t->ids.count = 0;
    t->ended = false;
}

// Adds decoded text, and ends the text before the first stop string in it.
static inline bool sample_text_grow(SampleText* t, const char* text, size_t bytes, const TextList* stops,
                                    Error* error) {
    size_t before = t->bytes, end = SIZE_MAX;
    t->bytes += bytes;
    if (!memory_grow(&t->text, &t->capacity, max_size(t->bytes, 1), 1))
        return fail_with(error, "out of memory for %zu bytes of text; make --tokens smaller", t->bytes);
    memcpy(t->text + before, text, bytes);
    for (size_t i = 0; i < stops->count; i++) {
        size_t length = strlen(stops->texts[i]);
        for (size_t at = before >= length ? before - length + 1 : 0; at < end && at + length <= t->bytes; at++)
            if (memcmp(t->text + at, stops->texts[i], length) == 0) end = at;
    }
    if (end == SIZE_MAX) return true;
    t->bytes = end;
    t->ended = true;
    return true;
}

// Adds a token, which may end the text, unless `ends` is NULL. Without a tokenizer there is no text.
static inline bool sample_text_add(SampleText* t, int32_t token, const Tokenizer* ends, const TextList* stops,
                                   Error* error) {
    if (!tokens_append(&t->ids, &token, 1, error)) return false;
    t->ended = ends && tokenizer_ends(ends, token);
    if (t->ended || t->decoder.tokenizer == NULL) return true;
    size_t bytes;
    const char* text = decoder_add(&bytes, &t->decoder, token);
    return sample_text_grow(t, text, bytes, stops, error);
}

static inline void sample_text_free(SampleText* t) {
    free(t->text);
    tokens_free(&t->ids);
    memset(t, 0, sizeof *t);
}

// Ends the text: adds the bytes that the decoder has held back.
static inline bool sample_text_end(SampleText* t, const TextList* stops, Error* error) {
    size_t bytes;
    const char* text = decoder_end(&bytes, &t->decoder);
    if (t->ended) return true;
    if (!sample_text_grow(t, text, bytes, stops, error)) return false;
    t->ended = true;
    return true;
}

// Writes what is certain: unless the text has ended, its last bytes may be the beginning of a stop string.
static inline void sample_text_show(SampleText* t, const TextList* stops, FILE* out) {
    size_t kept = 0;
    for (size_t i = 0; i < stops->count && !t->ended; i++) {
        size_t most = min_size(strlen(stops->texts[i]) - 1, t->bytes - t->written);
        for (size_t n = kept + 1; n <= most; n++)
            if (memcmp(t->text + t->bytes - n, stops->texts[i], n) == 0) kept = n;
    }
    fwrite(t->text + t->written, 1, t->bytes - kept - t->written, out);
    t->written = t->bytes - kept;
    fflush(out);
}

// ------------------------------------------------------------------------------------------------
// 3. Sampler

typedef struct {
    const char* prompt;
    uint64_t tokens;          // to generate
    SamplingOptions options;
    size_t samples;           // written one after the other; 0: one
    const char* prompt_ids;   // instead of the prompt: "1 2 3"; NULL: none
    bool print_ids;           // writes ids, not text
    bool past_end;            // an end-of-text token does not end a sample
    TextList stops;           // strings that end a sample, none empty
    const volatile sig_atomic_t* stop;  // not 0: a signal has asked to stop, which ends the samples; NULL: none will
    // Set by sampler_read_prompt and sampler_open:
    const Tokenizer* tokenizer;
    const Tokenizer* ends;    // whose ends of texts end a sample; NULL: none do
    Tokenizer bytes;          // the byte tokenizer, used if none was given
    Tokens ids;               // of the prompt
    Generator generator;
    SampleText* texts;        // (samples)
} Sampler;

static inline void sampler_flags(Flags* flags, Sampler* s) {
    enum { FREE = FLAG_FREE };
    SamplingOptions* o = &s->options;
    const Flag table[] = {
        FLAG_HEADING("Sampling"),
        FLAG_TEXT("prompt", &s->prompt, "\n", "TEXT", FLAG_LOCAL,
                  "text that the sample continues; default: a line break"),
        FLAG_COUNT("tokens", &s->tokens, 256, 1, 1e9, FREE, "tokens to generate per sample"),
        FLAG_REAL("temperature", &o->temperature, 0.8, 0, 100, FREE,
                  "softmax temperature; 0: always the most likely token"),
        FLAG_COUNT("top-k", &o->top_k, 0, 0, 1e9, FREE, "sample from the N most likely tokens; 0: all"),
        FLAG_REAL("top-p", &o->top_p, 1, 0, 1, FREE, "sample from the smallest set of tokens with total probability X"),
        FLAG_REAL("min-p", &o->min_p, 0, 0, 1, FREE,
                  "leave out tokens with less than X times the largest probability; 0: none"),
        FLAG_REAL("repetition-penalty", &o->repetition_penalty, 1, 0.01, 100, FREE,
                  "divide the logits of tokens already in the text by X (multiply negative ones); 1: off"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

static inline bool sampler_read_ids(Sampler* s, size_t V, Error* error) {
    for (const char* text = s->prompt_ids; *(text += strspn(text, " ,\t\n")) != 0;) {
        char* end;
        unsigned long id = strtoul(text, &end, 10);
        if (text[0] < '0' || text[0] > '9' || id >= V)
            return fail_with(error, "--prompt-ids has '%.*s'; give numbers below the vocabulary, %zu, separated by "
                             "spaces", (int)min_size(strcspn(text, " ,\t\n"), 40), text, V);
        int32_t token = (int32_t)id;
        if (!tokens_append(&s->ids, &token, 1, error)) return false;
        text = end;
    }
    return true;
}

// Appends the tokens of a text to ids, and fails if one of them is not below V. The begin-of-text token comes first if
// the tokenizer's own template puts it there and `begin` is set.
static inline bool sampler_encode(Tokens* ids, const Tokenizer* tokenizer, const char* text, size_t bytes, bool begin,
                                  size_t V, Error* error) {
    size_t first = ids->count;
    if (begin && tokenizer->begin_of_text >= 0 && !tokens_append(ids, &tokenizer->begin_of_text, 1, error))
        return false;
    if (!tokenizer_encode(ids, tokenizer, text, bytes, error)) return false;
    for (size_t i = first; i < ids->count; i++)
        if ((size_t)ids->ids[i] >= V)
            return fail_with(error, "the tokenizer %s has produced the id %d, but the model's vocabulary is %zu; they "
                             "do not belong together", tokenizer->name, (int)ids->ids[i], V);
    return true;
}

// Reads the prompt, for a model of V tokens. The tokenizer must outlive the sampler. If it is not known (NULL, or its
// vocabulary 0), the tokens are bytes, or, if V is not their number, there are only ids.
static inline bool sampler_read_prompt(Sampler* s, const Tokenizer* tokenizer, size_t V, Error* error) {
    s->bytes = tokenizer_of_bytes();
    bool known = tokenizer && tokenizer->vocabulary > 0;
    if (!known && V == (size_t)s->bytes.vocabulary) tokenizer = &s->bytes, known = true;
    s->tokenizer = known ? tokenizer : NULL;
    s->ends = s->past_end ? NULL : tokenizer;
    if (!known && !(s->prompt_ids && s->print_ids))
        return fail_with(error, "the model's vocabulary is %zu, but without a tokenizer next to it, text is read and "
                         "written as bytes, of which there are %d; build/generate takes ids instead, with --prompt-ids "
                         "and --print-ids", V, s->bytes.vocabulary);
    bool ok = s->prompt_ids ? sampler_read_ids(s, V, error)
                            : sampler_encode(&s->ids, tokenizer, s->prompt, strlen(s->prompt), true, V, error);
    if (ok && s->ids.count == 0) ok = fail_with(error, "the prompt is empty; give at least one token");
    return ok;
}

// Also reads the prompt, if that has not been done.
static inline bool sampler_open(Sampler* s, Model* model, const Tokenizer* tokenizer, Error* error) {
    if (s->ids.count == 0 && !sampler_read_prompt(s, tokenizer, model->config.vocab, error)) return false;
    if (s->samples == 0) s->samples = 1;
    s->texts = (SampleText*)memory_allocate(s->samples * sizeof(SampleText));
    if (!s->texts) return fail_with(error, "out of memory for %zu samples; make --samples smaller", s->samples);
    return generator_open(&s->generator, model, &s->options, s->samples, s->ids.count + s->tokens, error);
}

static inline void sampler_write_ids(const Sampler* s, FILE* out) {
    for (size_t i = 0; i < s->samples; i++) {
        const Tokens* drawn = &s->texts[i].ids;
        for (size_t t = 0; t < s->ids.count; t++) fprintf(out, "%s%d", t ? " " : "", (int)s->ids.ids[t]);
        for (size_t t = 0; t < drawn->count; t++) fprintf(out, " %d", (int)drawn->ids[t]);
        fputc('\n', out);
    }
}

// The text of the prompt as it was given, or of its ids.
static inline void sampler_write_prompt(const Sampler* s, FILE* out) {
    if (s->prompt_ids == NULL) fputs(s->prompt, out);
    for (size_t i = 0; s->prompt_ids && i < s->ids.count; i++) {
        size_t bytes;
        const char* piece = tokenizer_piece(&bytes, s->tokenizer, s->ids.ids[i]);
        fwrite(piece, 1, bytes, out);
    }
}

// Writes the prompt and its continuation: one sample as it is generated, several when all are done. Every call uses the
// same random numbers, so that the samples of a run show how the model changes.
static inline bool sampler_write(Sampler* s, FILE* out, Error* error) {
    Generator* g = &s->generator;
    bool ok = true, streams = s->samples == 1 && !s->print_ids;
    generator_begin(g);
    generator_append(g, s->ids.ids, s->ids.count);
    for (size_t i = 0; i < s->samples; i++) sample_text_begin(&s->texts[i], s->tokenizer, &s->ids);
    if (streams) sampler_write_prompt(s, out);
    for (uint64_t n = 0; ok && n < s->tokens && g->samples > 0 && !(s->stop && *s->stop); n++) {
        const int32_t* newest = generator_step(g);
        for (size_t r = g->samples; ok && r-- > 0;) {  // backwards: the row that takes the place of r was seen
            SampleText* t = &s->texts[g->rows[r].number];
            ok = sample_text_add(t, newest[r], s->ends, &s->stops, error);
            if (t->ended) generator_drop(g, r);
        }
        if (ok && streams) sample_text_show(s->texts, &s->stops, out);
    }
    for (size_t i = 0; ok && i < s->samples; i++) {
        ok = sample_text_end(&s->texts[i], &s->stops, error);
        if (!ok || s->print_ids) continue;
        if (!streams) {
            fprintf(out, "%s== sample %zu\n", i ? "\n" : "", i + 1);
            sampler_write_prompt(s, out);
        }
        sample_text_show(&s->texts[i], &s->stops, out);
        fputc('\n', out);
    }
    if (ok && s->print_ids) sampler_write_ids(s, out);
    fflush(out);
    return ok;
}

static inline void sampler_close(Sampler* s) {
    for (size_t i = 0; s->texts && i < s->samples; i++) sample_text_free(&s->texts[i]);
    free(s->texts);
    if (s->generator.model) generator_close(&s->generator);
    tokens_free(&s->ids);
    memset(s, 0, sizeof *s);
}

#endif  // LLMTRAIN_GENERATE_H
