// generate.cu: continues a text with a model. An example of the library: opens a model and samples from it in a page.
//
//   make build/generate && build/generate --out runs/x --prompt 'Once upon a time'
//
// It takes the newest undamaged checkpoint of --out, or the model in --init-from. An fp32 build loads the master
// weights of any run. With --chat the lines of standard input are a conversation; with --prompts a file has many
// prompts (prompts.h). Exit code: 0 done; 1 something failed; 2 a flag is wrong.

#include "../llmtrain/base/container.h"
#include "../llmtrain/text/generate.h"
#include "open.h"
#include "prompts.h"

typedef struct {
    const char *out, *init_from, *adapter, *matmul_algorithms;
    uint64_t threads;
    int kv;  // index in KV_NAMES
    uint64_t kv_tokens;
    bool chat, prompt_given, batch_given;
    const char* system;
    Prompts prompts;
    Sampler sampler;
} Options;

#define KV_NAMES "full|q8"
enum { KV_FULL, KV_Q8 };
enum { PROMPT_ROWS = 128,      // approximate tokens of the prompt per forward pass
       CHAT_KV_TOKENS = 8192 };  // capacity of a conversation's KV cache

// ------------------------------------------------------------------------------------------------
// The error of 8 bits: the logits after the beginning of the prompt, computed with and without the cache.

static bool show_kv_error(Model* model, const Tokens* prompt, Error* error) {
    size_t V = model->config.vocab, n = min_size(prompt->count, model->options.B * model->options.T);
    floatX* logits = (floatX*)memory_allocate(2 * V * sizeof(floatX));
    double mean = 0, squares = 0, worst = 0, off = 0;
    if (!logits) return fail_with(error, "out of memory for %zu logits; close other programs", 2 * V);
    n = min_size(n, model->cache.context);
    model->cache.lengths[0] = 0;
    for (int cached = 0; cached < 2; cached++) {
        model_upload(model, prompt->ids, NULL, 1, n, cached);
        model_forward(model);
        model_logits(model, n - 1, 1);
        device_download(logits + (cached ? V : 0), model->activations->logits, V * sizeof(floatX), model->stream);
    }
    for (size_t v = 0; v < V; v++) mean += (double)float_of(logits[v]) / (double)V;
    for (size_t v = 0; v < V; v++) {
        double x = (double)float_of(logits[v]), difference = fabs((double)float_of(logits[V + v]) - x);
        squares += (x - mean) * (x - mean);
        off += difference * difference;
        worst = difference > worst ? difference : worst;
    }
    fprintf(stderr,
            "generate: after %zu tokens 8 bits in the KV cache change the logits by %.2g on average (rms), %.2g at "
            "most; their standard deviation is %.2g\n",
            n, sqrt(off / (double)V), worst, sqrt(squares / (double)V));
    free(logits);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Chat: a line of standard input is a message; the answer follows until the model ends it.

enum { CHAT_TOKENS = 1 << 20, CHAT_MESSAGES = 4096 };

typedef struct {
    ChatMessage messages[CHAT_MESSAGES];  // their contents are owned
    size_t count;
    Tokens ids;                           // of the whole conversation
    Generator generator;
    SampleText answer;
} Chat;

static bool chat_add(Chat* chat, const char* role, const char* text, size_t bytes, Error* error) {
    char* copy = chat->count < CHAT_MESSAGES ? (char*)memory_allocate(bytes + 1) : NULL;
    if (!copy) return fail_with(error, "the conversation has more than %d messages, or memory is full; start another",
                                CHAT_MESSAGES);
    memcpy(copy, text, bytes);
    ChatMessage message = {role, copy, bytes};
    chat->messages[chat->count++] = message;
    return true;
}

// Gives the conversation to the generator, which keeps the part that it has read already.
static bool chat_read(Chat* chat, const Model* model, const Tokenizer* tokenizer, Error* error) {
    chat->ids.count = 0;
    if (!conversation_encode(&chat->ids, tokenizer, chat->messages, chat->count, model->config.vocab, error))
        return false;
    if (chat->ids.count >= CHAT_TOKENS) return fail_with(error, "the conversation is too long; start another");
    generator_start(&chat->generator, 0, 0, chat->ids.ids, chat->ids.count);
    return true;
}

static bool chat_answer(Chat* chat, const Options* o, const Tokenizer* tokenizer, Error* error) {
    const TextList* stops = &o->sampler.stops;
    SampleText* answer = &chat->answer;
    Generator* g = &chat->generator;
    bool ok = true;
    sample_text_begin(answer, tokenizer, NULL);
    for (uint64_t n = 0; ok && n < o->sampler.tokens && !answer->ended && g->rows[0].known < CHAT_TOKENS; n++) {
        ok = sample_text_add(answer, *generator_step(g), tokenizer, stops, error);
        if (ok) sample_text_show(answer, stops, stdout);
    }
    if (!ok || !sample_text_end(answer, stops, error)) return false;
    sample_text_show(answer, stops, stdout);
    printf("\n");
    fflush(stdout);
    return chat_add(chat, "assistant", answer->text ? answer->text : "", answer->bytes, error);
}

static bool chat(const Options* o, Model* model, const Tokenizer* tokenizer, Error* error) {
    if (tokenizer->chat_template == NULL)
        return fail_with(error, "the model has no chat template; put chat_template.jinja next to its tokenizer, or "
                         "leave --chat out");
    Chat* c = (Chat*)memory_allocate(sizeof(Chat));
    if (!c) return fail_with(error, "out of memory for a conversation; close other programs");
    memset(c, 0, sizeof *c);
    char* line = NULL;
    size_t capacity = 0;
    bool ok = generator_open(&c->generator, model, &o->sampler.options, 1, CHAT_TOKENS, error) &&
              (o->system == NULL || chat_add(c, "system", o->system, strlen(o->system), error));
    while (ok) {
        if (isatty(STDIN_FILENO)) printf("> ");
        fflush(stdout);
        ssize_t bytes = getline(&line, &capacity, stdin);
        if (bytes < 0) ok = feof(stdin) || fail_file(error, "read", "standard input");
        if (bytes < 0) break;
        while (bytes > 0 && (line[bytes - 1] == '\n' || line[bytes - 1] == '\r')) bytes--;
        ok = chat_add(c, "user", line, (size_t)bytes, error) && chat_read(c, model, tokenizer, error) &&
             chat_answer(c, o, tokenizer, error);
    }
    free(line);
    for (size_t i = 0; i < c->count; i++) free((char*)c->messages[i].content);
    sample_text_free(&c->answer);
    tokens_free(&c->ids);
    if (c->generator.model) generator_close(&c->generator);
    free(c);
    return ok;
}

// ------------------------------------------------------------------------------------------------

// The KV cache holds no more than the text will have: a model's whole context may take more memory than its weights.
static bool plan_cache(ModelOptions* options, const Config* config, const Tokenizer* tokenizer, void* context,
                       Error* error) {
    Options* o = (Options*)context;
    Sampler* s = &o->sampler;
    if (o->prompts.path) {
        size_t room = o->kv_tokens ? min_size(o->kv_tokens, config->context) : config->context;
        if (!prompts_read(&o->prompts, tokenizer, room, config->vocab, error)) return false;
        options->B = options->cached_sequences = min_size(o->prompts.batch, o->prompts.count * s->samples);
        options->T = min_size(max_size(PROMPT_ROWS / options->B, 1), config->context);
        options->kv_context = min_size(o->prompts.longest + s->tokens, room);
        return true;
    }
    if (!o->chat && !sampler_read_prompt(s, tokenizer, config->vocab, error)) return false;
    options->kv_context = o->kv_tokens ? o->kv_tokens : o->chat ? (size_t)CHAT_KV_TOKENS : s->ids.count + s->tokens;
    return true;
}

static bool generate(Options* o, Error* error) {
    Model model;
    Tokenizer tokenizer;
    size_t samples = max_size(o->sampler.samples, 1);
    const ModelOpening opening = {
        .out = o->out, .init_from = o->init_from, .adapter = o->adapter, .program = "generate",
        .options = {.B = samples, .T = max_size(PROMPT_ROWS / samples, 1), .cached_sequences = samples,
                    .kv_q8 = o->kv == KV_Q8, .matmul_algorithms = o->matmul_algorithms},
        .plan = plan_cache, .context = o};
    bool ok = model_open_planned(&model, &tokenizer, &opening, error);
    if (!ok) tokens_free(&o->sampler.ids), prompts_free(&o->prompts);
    if (!ok) return false;
    if (o->prompts.path) {
        ok = prompts_write(&o->prompts, &o->sampler, &model, &tokenizer, error);
        prompts_free(&o->prompts);
    } else if (o->chat) {
        ok = chat(o, &model, &tokenizer, error);
    } else {
        ok = sampler_open(&o->sampler, &model, &tokenizer, error);
        size_t tokens = o->sampler.ids.count, room = model.cache.context;
        const int32_t* ids = o->sampler.ids.ids;
        if (ok && !o->sampler.prompt_ids && tokens > 1 && ids[0] == ids[1] && ids[0] == tokenizer.begin_of_text)
            fprintf(stderr, "generate: the prompt begins with the begin-of-text token, which is put before it anyway, "
                    "so it has two; leave it out of --prompt\n");
        if (ok && tokens > room)
            fprintf(stderr, "generate: the prompt has %zu tokens, and there is room for %zu: the first %zu are not "
                    "read\n", tokens, room, tokens - room);
        ok = ok && (o->kv != KV_Q8 || show_kv_error(&model, &o->sampler.ids, error)) &&
             sampler_write(&o->sampler, stdout, error);
        sampler_close(&o->sampler);
    }
    tokenizer_close(&tokenizer);
    model_free(&model);
    return ok && output_written(error);
}

static bool options_check(const Options* o, Error* error) {
    bool run = o->out && o->out[0], directory = o->init_from && o->init_from[0];
    if (o->sampler.prompt_ids == NULL && o->sampler.prompt[0] == 0)
        return fail_with(error, "--prompt is empty; give at least one character, or a token with --prompt-ids");
    if (o->prompt_given && (o->chat || o->sampler.prompt_ids))
        return fail_with(error, "--prompt cannot be combined with %s; leave one of them out",
                         o->chat ? "--chat" : "--prompt-ids");
    if (o->chat && (o->sampler.prompt_ids || o->sampler.print_ids || o->sampler.samples > 1))
        return fail_with(error, "--chat writes one text; leave out --prompt-ids, --print-ids and --samples");
    for (size_t i = 0; i < o->sampler.stops.count; i++)
        if (o->sampler.stops.texts[i][0] == 0) return fail_with(error, "--stop is empty; give at least one character");
    bool file = o->prompts.path != NULL;
    if (file && (o->chat || o->prompt_given || o->sampler.prompt_ids || o->sampler.print_ids))
        return fail_with(error, "--prompts has the prompts, and --jsonl gets ids and texts; leave out --%s",
                         o->chat ? "chat" : o->prompt_given ? "prompt" : o->sampler.prompt_ids ? "prompt-ids"
                                                                                               : "print-ids");
    if (file != (o->prompts.jsonl != NULL))
        return fail_with(error, "give --prompts, the file to read, and --jsonl, the file to write, together");
    if (file && strcmp(o->prompts.path, o->prompts.jsonl) == 0)
        return fail_with(error, "--jsonl %.600s would replace the prompts; name another file", o->prompts.jsonl);
    if (o->batch_given && !file) return fail_with(error, "--batch is for --prompts; use --samples to sample a prompt");
    if (o->system && !o->chat)
        return fail_with(error, "--system is the first message of a conversation; give --chat too");
    if (run == directory)
        return fail_with(error, "give --out, the directory of a run that has saved a checkpoint, or --init-from, "
                         "another model");
    return true;
}

int main(int argc, char** argv) {
    Options o = {0};
    Sampler* s = &o.sampler;
    const Flag table[] = {
        FLAG_TEXT("out", &o.out, NULL, "DIR", 0, "directory of a run, for its newest checkpoint"),
        FLAG_TEXT("init-from", &o.init_from, NULL, "DIR", 0,
                  "instead of --out: a checkpoint or run, a Hugging Face directory, or an llm.c file"),
        FLAG_TEXT("adapter", &o.adapter, NULL, "DIR", 0, ADAPTER_HELP),
        FLAG_TEXT("prompt-ids", &s->prompt_ids, NULL, "IDS", 0,
                  "instead of --prompt: token ids, such as '1 2 3'; no begin-of-text token is added"),
        FLAG_SWITCH("print-ids", &s->print_ids, false, 0,
                    "print token ids instead of text: one line per sample, beginning with the ids of the prompt"),
        FLAG_COUNT("samples", &s->samples, 1, 1, SAMPLES_MAX, 0, "samples of a prompt"),
        {"stop", KIND_TEXTS, &s->stops, "TEXT", 0, 0,
         "end a sample before this text; may be given several times", 0},
        FLAG_SWITCH("past-end", &s->past_end, false, 0, "continue after a token that ends a text"),
        FLAG_CHOICE("kv", &o.kv, KV_FULL, KV_NAMES, 0,
                    "dtype of the KV cache: full, the dtype that this program computes with, or q8, 8 bits"),
        FLAG_SWITCH("chat", &o.chat, false, 0,
                    "answer each line of standard input, using the model's chat template, with up to --tokens tokens"),
        FLAG_TEXT("prompts", &o.prompts.path, NULL, "FILE", 0,
                  "sample each prompt of a file: a line of JSON each, {\"prompt\": TEXT} or {\"messages\": [...]}"),
        FLAG_TEXT("jsonl", &o.prompts.jsonl, NULL, "FILE", 0,
                  "with --prompts: the file to write, with a line of JSON for each sample"),
        FLAG_COUNT("batch", &o.prompts.batch, 8, 1, SAMPLES_MAX, 0,
                   "with --prompts: samples to generate at a time, of any prompts"),
        FLAG_TEXT("system", &o.system, NULL, "TEXT", 0, "with --chat: the system message"),
        FLAG_COUNT("kv-tokens", &o.kv_tokens, 0, 0, 1e9, 0,
                   "size of the KV cache in tokens; when it is full, only the later half of the text is kept; 0: the "
                   "prompt plus --tokens, or 8192 with --chat; never more than the model's context"),
        FLAG_TEXT("matmul-algorithms", &o.matmul_algorithms, NULL, "FILE", 0, MATMUL_ALGORITHMS_HELP),
        FLAG_COUNT("seed", &s->options.seed, 1337, 0, 9e15, 0, "seed of the random numbers"),
        FLAG_COUNT("threads", &o.threads, 0, 0, 4096, 0, THREADS_HELP),
    };
    Error error;
    int code;
    threads_spin_briefly(argv);
    files_open_standard();
    Flags flags = flags_of(table, sizeof table / sizeof table[0]);
    sampler_flags(&flags, s);
    if (!flags_begin(&code, "generate", "generate: continues a text with a model", &flags, argc, argv)) return code;
    o.prompt_given = flag_was_given(&flags, "prompt");
    o.batch_given = flag_was_given(&flags, "batch");
    bool right = options_check(&o, &error);
    threads_choose(o.threads, 1, false, stderr);
    if (right && generate(&o, &error)) return 0;
    fprintf(stderr, "generate: %s\n", error.text);
    return right ? 1 : 2;
}
