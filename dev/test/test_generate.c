// test_generate: tests of build/generate --prompts.
//
//   make build/test_generate build/generate-FP32 build/train-FP32 build/tokenize build/corpus
//   build/test_generate [--build build]                                started where the sources are
//
// The reference for a sample is the one of --prompt, or the answer of --chat; for many, those of one at a time. That
// log-probabilities are those of training is tested in test_model.c.

#include "harness.h"

#include "llmtrain/base/flags.h"
#include "llmtrain/base/json.h"

static char programs[PATH_MAX];  // their directory, absolute
static Program job;
static Error error;

static size_t file_limit;  // of the next program; 0: none

static void become_limited(const void* context) {
    const struct rlimit limit = {file_limit, file_limit};
    (void)context;
    environment_clear();
    environment_set("OMP_WAIT_POLICY=passive");
    if (file_limit == 0) return;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}

// Runs a program of the build; its exit code. Words are separated by blanks.
static int run(const char* line) {
    Words* words = (Words*)calloc(1, sizeof *words);
    need(words != NULL, "memory");
    words_add(words, text_of("%s/%s", programs, line));
    program_free(&job);
    program_start(&job, words->words, become_limited, NULL);
    programs_wait(&job, 1, PROGRAM_MS);
    free(words);
    return program_code(&job);
}

static void expect_run(int code, const char* says, const char* line) {
    int found = run(line);
    const char* text = job.text[code != 0] ? job.text[code != 0] : "";
    expect(found == code && strstr(text, says), "%s: exit code %d, '%s' is not in '%s' %s", line, found, says, text,
           job.text[1] ? job.text[1] : "");
}

static bool same_files(const char* a, const char* b) {
    char *x = text_read(a, NULL), *y = text_read(b, NULL);
    bool same = x && y && strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

// ------------------------------------------------------------------------------------------------
// Samples

enum { TOKENS_MAX = 64, TEXT_MAX = 1024 };

typedef struct {
    size_t prompt, sample, count;
    char text[TEXT_MAX];
    bool stopped;
    double logp, sampled_logp;
    int32_t tokens[TOKENS_MAX];
    double logps[TOKENS_MAX];
} Sample;

// The numbers of an array; how many.
static size_t numbers(double* out, const Json* json, uint32_t node) {
    size_t count = 0;
    for (uint32_t i = json_first(json, node); i != JSON_NONE && count < TOKENS_MAX; i = json_next(json, i))
        expect(json_number(json, i, &out[count++]), "it is not a number");
    return count;
}

// Reads a file of samples; how many.
static size_t samples_read(Sample* samples, size_t most, const char* path) {
    char* text = text_read(path, NULL);
    size_t count = 0;
    for (char *line = text, *end; line && *line && count < most; line = end + 1) {
        Sample* s = &samples[count++];
        Json json;
        double tokens[TOKENS_MAX];
        uint64_t prompt = 0, sample = 0;
        end = strchr(line, '\n');
        need(end != NULL, "a line break at the end of %s", path);
        memset(s, 0, sizeof *s);
        need(json_parse(&json, line, (size_t)(end - line), path, &error), "%s", error.text);
        bool ok = json_u64(&json, json_get(&json, 0, "prompt"), &prompt) &&
                  json_u64(&json, json_get(&json, 0, "sample"), &sample) &&
                  json_is(&json, json_get(&json, 0, "text"), JSON_STRING) &&
                  json_bool(&json, json_get(&json, 0, "stopped"), &s->stopped) &&
                  json_number(&json, json_get(&json, 0, "logp"), &s->logp) &&
                  json_number(&json, json_get(&json, 0, "sampled_logp"), &s->sampled_logp);
        const JsonNode* node = &json.nodes[ok ? json_get(&json, 0, "text") : 0];
        memcpy(s->text, json.text + node->start, ok ? min_size(node->bytes, TEXT_MAX - 1) : 0);  // with zero bytes
        s->prompt = (size_t)prompt;
        s->sample = (size_t)sample;
        s->count = numbers(tokens, &json, json_get(&json, 0, "tokens"));
        for (size_t i = 0; i < s->count; i++) s->tokens[i] = (int32_t)tokens[i];
        ok = ok && numbers(s->logps, &json, json_get(&json, 0, "logps")) == s->count;
        expect(ok && json_count(&json, 0) == 8, "line %zu of %s: %.200s", count, path, line);
        json_free(&json);
    }
    free(text);
    return count;
}

// The token ids that build/generate has printed, of one text in a line, without those of a prompt.
static size_t printed_ids(int32_t ids[TOKENS_MAX], const char** line, size_t prompt) {
    size_t count = 0;
    int used, id;
    for (const char* text = *line; sscanf(text, "%d%n", &id, &used) == 1 && count < TOKENS_MAX; text += used) {
        if (prompt > 0) prompt--;
        else ids[count++] = id;
        if (text[used] == '\n') {
            *line = text + used + 1;
            break;
        }
    }
    return count;
}

static const char PROMPTS[] =
    "{\"prompt\": \"ab\"}\n"
    "{\"messages\": [{\"role\": \"user\", \"content\": \"The dog\"}]}\n"
    "\n"
    "{\"prompt\": \"Once upon a time there was a little girl and she\"}\r\n"
    "{\"prompt\": \"T\"}\n"
    "{\"messages\": [{\"role\": \"system\", \"content\": \"Be\"}, {\"role\": \"user\", \"content\": \"The dog\"}]}\n"
    "{\"prompt\": \"Once upon a time there was a little girl and he\"}\n"
    "{\"prompt\": \"a\\u0000b\"}";
enum { COUNT = 7 };
#define GENERATE "generate-FP32 --out run "
#define SAMPLES GENERATE "--prompts prompts.jsonl --tokens 20 "

static Sample samples[64], others[64];

// The same file whatever the batch, the threads and the order in which rows are done; in the order of its numbers.
static void test_batches(void) {
    static const struct { const char *flags, *path; } ways[] = {
        {"--batch 1", "b1"}, {"--batch 3", "b3"}, {"--batch 8", "b8"}, {"--batch 4096", "b64"},
        {"--batch 2 --threads 3", "t3"}, {"", "plain"}};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        expect_run(0, "21 samples of 7 prompts", text_of(SAMPLES "--samples 3 --stop e %s --jsonl %s", ways[i].flags,
                                                         ways[i].path));
        expect(same_files("b1", ways[i].path), "%s: another file", ways[i].flags);
    }
    size_t count = samples_read(samples, COUNT_OF(samples), "b1"), stopped = 0, lengths = 0;
    expect(count == 3 * COUNT, "%zu samples", count);
    for (size_t i = 0; i < count; i++) {
        const Sample* s = &samples[i];
        double sum = 0;
        for (size_t t = 0; t < s->count; t++) sum += s->logps[t];
        expect(s->prompt == i / 3 && s->sample == i % 3, "sample %zu is %zu of %zu", i, s->sample, s->prompt);
        expect(s->stopped ? s->count >= 1 : s->count == 20, "sample %zu has %zu tokens", i, s->count);
        expect(strchr(s->text, 'e') == NULL, "sample %zu: %s", i, s->text);
        expect(fabs(sum / s->logp - 1) < 1e-7 && s->logp < 0 && s->sampled_logp < 0 && s->logp != s->sampled_logp,
               "sample %zu: %g, %g, %g", i, s->logp, sum, s->sampled_logp);
        stopped += s->stopped;
        lengths += i > 0 && s->count != s[-1].count;
    }
    expect(stopped > 3 && stopped < count && lengths > 5, "%zu of %zu have stopped", stopped, count);
    verdict("--prompts: a file that depends on neither --batch nor --threads");
}

// A sample does not depend on how many there are, and the first prompt's are those of --prompt.
static void test_numbers(void) {
    expect_run(0, "35 samples", text_of(SAMPLES "--samples 5 --past-end --jsonl five"));
    expect_run(0, "14 samples", text_of(SAMPLES "--samples 2 --past-end --jsonl two"));
    need(samples_read(samples, COUNT_OF(samples), "five") == 5 * COUNT, "35 samples");
    need(samples_read(others, COUNT_OF(others), "two") == 2 * COUNT, "14 samples");
    size_t same = 0;
    for (size_t i = 0; i < 2 * COUNT; i++) {
        const Sample* s = &samples[i / 2 * 5 + i % 2];
        expect(memcmp(s, &others[i], sizeof *s) == 0, "sample %zu of prompt %zu", i % 2, i / 2);
        same += memcmp(s->tokens, s[1].tokens, sizeof s->tokens) == 0;
    }
    expect(same == 0, "%zu samples of a prompt are the same", same);
    expect_run(0, "", GENERATE "--prompt ab --tokens 20 --samples 5 --past-end --print-ids");
    const char* line = job.text[0];
    for (size_t i = 0; i < 5; i++) {
        int32_t ids[TOKENS_MAX];
        size_t count = printed_ids(ids, &line, 2);
        expect(count == 20 && memcmp(ids, samples[i].tokens, 20 * sizeof(int32_t)) == 0, "sample %zu of --prompt", i);
    }
    verdict("--prompts: a sample by its numbers, the first prompt's those of --prompt");
}

// Messages are answered as by --chat, up to any of the tokens that end a text.
static void test_messages(void) {
    put_text("chat.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"The\"}]}");
#define GREEDY "--temperature 0 --repetition-penalty 2 --tokens 12 "
#define ANSWERS GENERATE GREEDY "--prompts chat.jsonl --jsonl answers"
    put_text("run/tokenizer/generation_config.json", "{\"eos_token_id\": 256}");
    expect_run(0, "1 sample of 1 prompt, 0 of which", ANSWERS);
    need(samples_read(samples, 1, "answers") == 1 && samples[0].count == 12, "an answer of 12 tokens");
    for (int end = 0; end < 3; end++) {  // none of its tokens, the fifth, the fifth of two in another order
        int32_t other = 256, fifth = samples[0].tokens[4];
        if (end > 0)
            put_text("run/tokenizer/generation_config.json",
                     text_of("{\"eos_token_id\": [%d, %d]}", end == 1 ? fifth : other, end == 1 ? other : fifth));
        expect_run(0, "1 sample of 1 prompt, ", ANSWERS);
        need(samples_read(others, 1, "answers") == 1, "an answer");
        expect(others[0].count == (end ? 5 : 12) && others[0].stopped == (end > 0) &&
               memcmp(others[0].tokens, samples[0].tokens, others[0].count * sizeof(int32_t)) == 0,
               "it stops after %zu tokens", others[0].count);
        const char* command = text_of("echo The | %s/" GENERATE "--chat " GREEDY " > answer", programs);
        expect(system(command) == 0, "it fails: %s", command);
        char* answer = text_read("answer", NULL);
        expect(strcmp(answer, text_of("%s\n", others[0].text)) == 0, "'%s', not '%s'", answer, others[0].text);
        free(answer);
    }
    remove("run/tokenizer/generation_config.json");
    verdict("--prompts: messages are answered as by --chat, up to each of several ends");
}

// A text that fills the cache is cut, and its last token is one that was not read.
static void test_room(void) {
    put_text("short.jsonl", "{\"prompt\": \"ab\"}\n{\"prompt\": \"abcd\"}\n{\"prompt\": \"abcde\"}\n");
    expect_run(0, "3 samples of 3 prompts, 0 of which", GENERATE "--past-end --kv-tokens 5 --tokens 20 --prompts "
               "short.jsonl --batch 2 --jsonl short");
    expect_run(0, "3 samples", GENERATE "--past-end --tokens 20 --prompts short.jsonl --jsonl long");
    need(samples_read(samples, 3, "short") == 3 && samples_read(others, 3, "long") == 3, "three samples");
    static const size_t counts[3] = {4, 2, 1};
    for (size_t i = 0; i < 3; i++)
        expect(samples[i].count == counts[i] && !samples[i].stopped && others[i].count == 20 &&
               memcmp(samples[i].tokens, others[i].tokens, counts[i] * sizeof(int32_t)) == 0 &&
               memcmp(samples[i].logps, others[i].logps, counts[i] * sizeof(double)) == 0,
               "sample %zu has %zu tokens", i, samples[i].count);
    verdict("--prompts: a text that fills the cache is cut");
}

// ------------------------------------------------------------------------------------------------
// Refusals

static const struct { const char *text, *says; } REFUSED[] = {
    {"", "bad.jsonl has no prompts; give a line of JSON for each"},
    {" \n\r\n", "bad.jsonl has no prompts"},
    {"{\"prompt\": \"a\"}\n\n{\"prompt\": \"a\", \"id\": 3}\n", "bad.jsonl, line 3: unknown key \"id\""},
    {"{\"prompt\": \"a\"}\n[1]\n", "bad.jsonl, line 2: it is not an object"},
    {"{}", "bad.jsonl, line 1: give either \"prompt\", a text, or \"messages\", a conversation"},
    {"{\"prompt\": \"a\", \"messages\": []}", "bad.jsonl, line 1: give either"},
    {"{\"prompt\": 3}", "bad.jsonl, line 1: \"prompt\" is not a string"},
    {"{\"prompt\": \"a\"}\n{\"prompt\": \"\"}", "bad.jsonl, line 2: the prompt is empty"},
    {"{\"prompt\": \"a\"\n", "bad.jsonl, line 1 is not valid JSON: byte 16"},
    {"{\"messages\": []}", "bad.jsonl, line 1: \"messages\" is an empty conversation"},
    {"{\"messages\": [{\"role\": \"users\", \"content\": \"a\"}]}",
     "bad.jsonl, line 1: message 1 has the unknown role"},
    {"{\"messages\": [{\"role\": \"user\"}]}", "bad.jsonl, line 1: message 1 has no \"content\""},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}, {\"role\": \"user\", \"content\": \"@\"}]}",
     "bad.jsonl, line 1: the chat template refuses the conversation: no at"},
    {"{\"prompt\": \"a\"}\n{\"prompt\": \"zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz\"}",
     "bad.jsonl, line 2: the prompt has 65 tokens, and there is room for 64; make it shorter"},
};

static const struct { int code; const char *flags, *says; } FLAGS[] = {
    {2, "--prompts prompts.jsonl", "give --prompts, the file to read, and --jsonl, the file to write, together"},
    {2, "--jsonl x", "give --prompts"},
    {2, "--prompts prompts.jsonl --jsonl prompts.jsonl", "--jsonl prompts.jsonl would replace the prompts"},
    {2, "--batch 3", "--batch is for --prompts"},
    {2, "--prompts prompts.jsonl --jsonl x --chat", "leave out --chat"},
    {2, "--prompts prompts.jsonl --jsonl x --prompt a", "leave out --prompt"},
    {2, "--prompts prompts.jsonl --jsonl x --prompt-ids 1", "leave out --prompt-ids"},
    {2, "--prompts prompts.jsonl --jsonl x --print-ids", "leave out --print-ids"},
    {2, "--prompts prompts.jsonl --jsonl x --system a", "give --chat too"},
    {1, "--prompts none.jsonl --jsonl x", "cannot open none.jsonl: No such file"},
    {1, "--prompts prompts.jsonl --jsonl none/x", "cannot create none/x: No such file"},
    {1, "--prompts prompts.jsonl --jsonl run", "cannot create run: Is a directory"},
    {1, "--prompts prompts.jsonl --jsonl x --kv-tokens 3", "prompts.jsonl, line 2: the prompt has"},
};

static void test_refusals(const char* sources) {
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++) {
        put_text("bad.jsonl", REFUSED[i].text);
        expect_run(1, REFUSED[i].says, GENERATE "--prompts bad.jsonl --jsonl refused");
    }
    for (size_t i = 0; i < COUNT_OF(FLAGS); i++) expect_run(FLAGS[i].code, FLAGS[i].says, text_of(GENERATE "%s",
                                                                                                 FLAGS[i].flags));
    expect_run(1, "--prompts needs a tokenizer next to the model",
               text_of("generate-FP32 --init-from %s/dev/test/fixtures/models/llama --prompts prompts.jsonl --jsonl "
                       "refused", sources));
    expect(!file_exists("refused") && directory_count(".", ".tmp") == 0, "a file is left");
    put_text("run/tokenizer/tokenizer_config.json", "{}");
    expect_run(1, "prompts.jsonl, line 2: \"messages\" need a chat template", SAMPLES "--jsonl refused");
    verdict("--prompts: refusals, with file and line");
}

// A full disk leaves the old file, and no part of the new one; what a killed run has left is removed.
static void test_full_disk(void) {
    put_text("full", "old");
    put_text("full.tmp-1-0", "left");
    file_limit = 3000;
    expect_run(1, "cannot write full: File too large; raise the limit on file sizes (ulimit -f)",
               SAMPLES "--samples 5 --jsonl full");
    file_limit = 0;
    char* text = text_read("full", NULL);
    expect(strcmp(text, "old") == 0 && directory_count(".", "full.tmp") == 0, "it is '%s'", text);
    free(text);
    verdict("--prompts: a full disk leaves what was there");
}

int main(int argc, char** argv) {
    const char* build = "build";
    const Flag rows[] = {{"build", KIND_TEXT, &build, "DIR", 0, 0, "the directory of the programs", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_generate", NULL, &flags, argc, argv)) return code;
    tests_begin("test_generate");
    char* sources = realpath(".", NULL);
    need(sources && realpath(build, programs), "run it in the root of the checkout");
    root_enter();
    put_text("prompts.jsonl", PROMPTS);
    expect_run(0, "", "corpus --out stories --bytes 20000 --val-bytes 1");
    expect_run(0, "", "tokenize --train-bpe 300 --text stories_train.txt --out tokenizer");
    put_text("tokenizer/tokenizer_config.json", "{\"chat_template\": \"{% for m in messages %}{% if m.content == '@' %}"
             "{{ raise_exception('no at') }}{% endif %}{{ m.content }}.{% endfor %}\"}");
    expect_run(0, "", "tokenize --tokenizer tokenizer --text stories_train.txt --out stories --val 0");
    expect_run(0, "", "train-FP32 --data stories_train_000000.bin --out run --layers 2 --heads 2 --channels 32 "
               "--seq 64 --batch 4 --steps 20 --warmup 1 --lr 3e-3");
    verdict("a model and its tokenizer");
    test_batches();
    test_numbers();
    test_messages();
    test_room();
    test_full_disk();
    test_refusals(sources);
    program_free(&job);
    free(sources);
    return tests_end();
}
