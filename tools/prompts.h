// prompts.h: samples of the prompts of a file: lines of JSON in, a line of JSON for each sample out.
//
//   Prompts prompts = {.path = "x.jsonl", .jsonl = "samples.jsonl", .batch = 8};
//   if (!prompts_read(&prompts, &tokenizer, context, V, &error)) ...            then the model can be opened
//   if (!prompts_write(&prompts, &sampler, &model, &tokenizer, &error)) ...
//   prompts_free(&prompts);
//
// A line is {"prompt": "..."}, a text that the model continues, or {"messages": [...]}, a conversation that it answers.
// Prompts of different lengths are sampled together, and a row of the batch whose sample is done takes the next one. On
// a CPU a sample is a function of the seed and of the numbers of its prompt and sample: the batch changes no bit (but
// see generate.h). The file is written in the order of prompts and samples, and is there when it is complete.

#ifndef LLMTRAIN_PROMPTS_H
#define LLMTRAIN_PROMPTS_H

#include "../data/chat.h"
#include "../llmtrain/base/progress.h"
#include "../llmtrain/text/generate.h"

enum { SAMPLES_MAX = 4096 };  // of a prompt
#define PROMPTS_BYTES_MAX ((size_t)1 << 32)

typedef struct {
    size_t first, count;      // tokens, in Prompts.ids
} Prompt;

typedef struct {
    const char *path, *jsonl; // files: of the prompts, of the samples
    uint64_t batch;           // samples at a time
    Prompt* list;             // (count)
    size_t count, places;
    size_t longest;           // tokens
    Tokens ids;               // of all prompts
} Prompts;

// ------------------------------------------------------------------------------------------------
// Reading

static inline void prompts_free(Prompts* p) {
    free(p->list);
    tokens_free(&p->ids);
    p->list = NULL;
    p->count = p->places = p->longest = 0;
}

// Appends the tokens of a conversation, up to where the model's answer begins, by the tokenizer's chat template.
static inline bool conversation_encode(Tokens* ids, const Tokenizer* tokenizer, const ChatMessage* messages,
                                       size_t count, size_t V, Error* error) {
    char begin[TOKEN_BYTES_MAX + 1], end[TOKEN_BYTES_MAX + 1], *text;
    size_t bytes, before = ids->count;
    if (!template_render(&text, &bytes, tokenizer->chat_template, messages, count,
                         chat_token_text(begin, tokenizer, tokenizer->begin_token),
                         chat_token_text(end, tokenizer, tokenizer->end_of_text), true, error)) return false;
    bool ok = sampler_encode(ids, tokenizer, text, bytes, false, V, error);
    free(text);
    return ok && (ids->count > before || fail_with(error, "the chat template produces no text for the conversation"));
}

// Appends the tokens of a line's prompt.
static inline bool prompt_encode(Tokens* ids, ChatRecord* r, const Tokenizer* tokenizer, size_t V) {
    const Json* json = &r->json;
    uint32_t prompt = json_get(json, 0, "prompt"), messages = json_get(json, 0, "messages");
    const char* text = NULL;
    size_t bytes = 0, before = ids->count;
    Error reason;
    if (!json_is(json, 0, JSON_OBJECT)) return chat_fail(r, "it is not an object in braces");
    for (uint32_t i = json_first(json, 0); i != JSON_NONE; i = json_next(json, i))
        if (i != prompt && i != messages)
            return chat_fail(r, "unknown key \"%.60s\"; a line has \"prompt\" or \"messages\", and no other key",
                             json->text + json->nodes[i].key);
    if ((prompt == JSON_NONE) == (messages == JSON_NONE))
        return chat_fail(r, "give either \"prompt\", a text, or \"messages\", a conversation");
    if (prompt != JSON_NONE) {
        if (!chat_string(r, &text, &bytes, prompt, "prompt")) return false;
        if (!sampler_encode(ids, tokenizer, text, bytes, true, V, &reason)) return chat_fail(r, "%s", reason.text);
        return ids->count > before || chat_fail(r, "the prompt is empty; give at least one character");
    }
    if (tokenizer->chat_template == NULL)
        return chat_fail(r, "\"messages\" need a chat template, and the model has none next to it; give a \"prompt\"");
    ChatSample* s = &r->samples[0];
    return chat_messages(r, s, messages, "messages", false) &&
           (conversation_encode(ids, tokenizer, s->messages, s->count, V, &reason) ||
            chat_fail(r, "%s", reason.text));
}

static inline bool prompts_read_line(Prompts* p, const Tokenizer* tokenizer, const char* line, size_t bytes,
                                     size_t number, size_t context, size_t V, Error* error) {
    char what[FILE_PATH_MAX + 40];
    snprintf(what, sizeof what, "%.600s, line %zu", p->path, number);
    ChatRecord r;
    memset(&r, 0, sizeof r);
    r.what = what;
    r.error = error;
    if (!json_parse(&r.json, line, bytes, what, error)) return false;
    Prompt prompt = {p->ids.count, 0};
    bool ok = prompt_encode(&p->ids, &r, tokenizer, V);
    prompt.count = p->ids.count - prompt.first;
    if (ok && prompt.count > context)
        ok = chat_fail(&r, "the prompt has %zu tokens, and there is room for %zu; make it shorter", prompt.count,
                       context);
    if (ok && !memory_grow(&p->list, &p->places, p->count + 1, sizeof *p->list)) ok = chat_memory(&r);
    chat_record_close(&r);
    if (!ok) return false;
    p->list[p->count++] = prompt;
    p->longest = max_size(p->longest, prompt.count);
    return true;
}

// Reads all prompts, for a model of V tokens and a KV cache of `context` positions. The caller frees them in any case.
static inline bool prompts_read(Prompts* p, const Tokenizer* tokenizer, size_t context, size_t V, Error* error) {
    char* text = NULL;
    size_t bytes = 0, number = 0;
    prompts_free(p);  // of a checkpoint that turned out to be damaged
    if (tokenizer == NULL || tokenizer->vocabulary == 0)
        return fail_with(error, "--prompts needs a tokenizer next to the model, which has none; put its files there");
    if (!file_read(p->path, PROMPTS_BYTES_MAX, &text, &bytes, error)) return false;
    bool ok = true;
    const char* end = text + bytes;
    for (const char *line = text, *next; ok && line < end; line = next) {
        const char* newline = (const char*)memchr(line, '\n', (size_t)(end - line));
        next = newline ? newline + 1 : end;
        number++;
        while (line < next && memchr(" \t\r\n", *line, 4)) line++;  // a blank line is no prompt
        if (line < next)
            ok = prompts_read_line(p, tokenizer, line, (size_t)(next - line), number, context, V, error);
    }
    free(text);
    if (ok && p->count == 0) ok = fail_with(error, "%.600s has no prompts; give a line of JSON for each", p->path);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Sampling

// A row of the batch.
typedef struct {
    SampleText text;
    float* logps;             // (places) of its tokens under the model
    size_t places;
    double sampled_logp;      // sum under the sampling temperature
} PromptRow;

typedef struct {
    const Prompts* prompts;
    const Sampler* sampler;
    const Tokenizer* tokenizer;
    Generator generator;
    PromptRow* rows;          // (the generator's samples)
    size_t samples, next;     // of all prompts; the one that the next free row takes
    char** lines;             // (samples) that are done and wait for one before them
    size_t written;           // samples
    size_t tokens, stopped;   // generated; samples that have ended by themselves
    FileWriter out;
    Error* error;
} PromptRun;

// Gives row r the next sample.
static inline void prompt_row_begin(PromptRun* run, size_t r) {
    const Prompts* p = run->prompts;
    size_t number = run->next / run->sampler->samples, sample = run->next % run->sampler->samples;
    int32_t* ids = p->ids.ids + p->list[number].first;
    size_t count = p->list[number].count;
    const Tokens before = {.ids = ids, .count = count, .capacity = count};
    generator_start(&run->generator, r, (uint64_t)number * SAMPLES_MAX + sample, ids, count);
    sample_text_begin(&run->rows[r].text, run->tokenizer, &before);
    run->rows[r].sampled_logp = 0;
    run->next++;
}

// Writes a float with the digits that tell it from others.
static inline void prompt_write_float(JsonWriter* w, float x) {
    char text[40];
    snprintf(text, sizeof text, "%.9g", (double)x);
    json_write_number(w, strtod(text, NULL));
}

// Keeps the line of the sample in row r, and writes those whose turn it is.
static inline bool prompt_row_write(PromptRun* run, size_t r, bool stopped) {
    PromptRow* row = &run->rows[r];
    SampleText* t = &row->text;
    JsonWriter w = {0};
    size_t prompt = (size_t)(run->generator.rows[r].number / SAMPLES_MAX);
    size_t sample = (size_t)(run->generator.rows[r].number % SAMPLES_MAX);
    double logp = 0;
    if (!memory_grow(&t->text, &t->capacity, t->bytes + 1, 1))
        return fail_with(run->error, "out of memory for %zu bytes of text; make --tokens smaller", t->bytes);
    t->text[t->bytes] = 0;
    for (size_t i = 0; i < t->ids.count; i++) logp += (double)row->logps[i];
    json_write_begin(&w, '{');
    json_member_u64(&w, "prompt", prompt);
    json_member_u64(&w, "sample", sample);
    json_write_key(&w, "text");
    json_write_text(&w, t->text, t->bytes);
    json_member_bool(&w, "stopped", stopped);
    json_member_number(&w, "logp", logp);
    json_member_number(&w, "sampled_logp", row->sampled_logp);
    json_member_begin(&w, "tokens", '[');
    for (size_t i = 0; i < t->ids.count; i++) json_write_u64(&w, (uint64_t)t->ids.ids[i]);
    json_write_end(&w, ']');
    json_member_begin(&w, "logps", '[');
    for (size_t i = 0; i < t->ids.count; i++) prompt_write_float(&w, row->logps[i]);
    json_write_end(&w, ']');
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    run->lines[prompt * run->sampler->samples + sample] = w.text;
    run->tokens += t->ids.count;
    run->stopped += stopped;
    bool ok = json_write_done(&w, run->error);
    for (char** line; ok && run->written < run->samples && *(line = &run->lines[run->written]); run->written++) {
        ok = file_append(&run->out, *line, strlen(*line), run->error);
        free(*line);
        *line = NULL;
    }
    return ok;
}

// Adds the newest token of row r; a sample that is done is written, and the next one takes its row.
static inline bool prompt_row_add(PromptRun* run, size_t r) {
    Generator* g = &run->generator;
    PromptRow *row = &run->rows[r], *last = &run->rows[g->samples - 1], done;
    const Sampler* s = run->sampler;
    size_t count = row->text.ids.count;
    if (!memory_grow(&row->logps, &row->places, count + 1, sizeof(float)))
        return fail_with(run->error, "out of memory for %zu tokens; make --tokens smaller", count);
    row->logps[count] = g->logps[r];
    row->sampled_logp += (double)g->sampled_logps[r];
    if (!sample_text_add(&row->text, g->newest[r], s->past_end ? NULL : run->tokenizer, &s->stops, run->error))
        return false;
    bool stopped = row->text.ended, full = g->rows[r].known > g->model->cache.context;
    if (!stopped && !full && count + 1 < s->tokens) return true;
    if (!sample_text_end(&row->text, &s->stops, run->error) || !prompt_row_write(run, r, stopped)) return false;
    if (run->next < run->samples) {
        prompt_row_begin(run, r);
        return true;
    }
    generator_drop(g, r);
    done = *row;
    *row = *last;
    *last = done;
    return true;
}

static inline bool prompt_run_open(PromptRun* run, Model* model, Error* error) {
    const Prompts* p = run->prompts;
    const Sampler* s = run->sampler;
    size_t batch = min_size(model->options.cached_sequences, run->samples);
    size_t size = min_size(p->longest + s->tokens, model->cache.context + 1);  // the last token is not read
    if (!generator_open(&run->generator, model, &s->options, batch, size, error)) return false;
    run->generator.scores = true;
    run->rows = (PromptRow*)memory_allocate(batch * sizeof(PromptRow));
    run->lines = (char**)memory_allocate(run->samples * sizeof(char*));
    return (run->rows && run->lines) ||
           fail_with(error, "out of memory for %zu samples; make --samples smaller", run->samples);
}

static inline void prompt_run_close(PromptRun* run) {
    for (size_t r = 0; run->rows && r < run->generator.most; r++) {
        sample_text_free(&run->rows[r].text);
        free(run->rows[r].logps);
    }
    for (size_t i = run->written; run->lines && i < run->samples; i++) free(run->lines[i]);
    free(run->rows);
    free(run->lines);
    if (run->generator.model) generator_close(&run->generator);
}

// Samples every prompt as the sampler says, and writes the file; then says how many, and how fast.
static inline bool prompts_write(const Prompts* p, const Sampler* s, Model* model, const Tokenizer* tokenizer,
                                 Error* error) {
    PromptRun run;
    memset(&run, 0, sizeof run);
    run.prompts = p;
    run.sampler = s;
    run.tokenizer = tokenizer;
    run.samples = p->count * s->samples;
    run.error = error;
    Generator* g = &run.generator;
    double began = now_ms();
    file_clean(p->jsonl);  // what a killed run has left
    bool ok = file_begin(&run.out, p->jsonl, error) && prompt_run_open(&run, model, error);
    Progress progress = progress_begin("sampling", run.samples);
    for (size_t r = 0; ok && r < g->samples; r++) prompt_row_begin(&run, r);
    while (ok && g->samples > 0) {
        generator_step(g);
        for (size_t r = g->samples; ok && r-- > 0;) ok = prompt_row_add(&run, r);  // backwards: see sampler_write
        progress_show(&progress, run.written);
    }
    progress_end(&progress);
    ok = ok && file_end(&run.out, error);
    file_abort(&run.out);  // does nothing after file_end
    double seconds = (now_ms() - began) / 1000;
    if (ok)
        printf("%zu sample%s of %zu prompt%s, %zu of which have ended by themselves: %zu tokens in %.2f s, %.1f a "
               "second\n", run.samples, run.samples == 1 ? "" : "s", p->count, p->count == 1 ? "" : "s", run.stopped,
               run.tokens, seconds, (double)run.tokens / seconds);
    prompt_run_close(&run);
    return ok;
}

#endif  // LLMTRAIN_PROMPTS_H
