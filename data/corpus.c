// corpus.c: writes the default corpus, small stories from a source with a known entropy.
//
//     corpus --out data/stories --bytes 6000000 --val-bytes 600000 --seed 1
//
// writes data/stories_train.txt, data/stories_val.txt and data/stories.json. The last holds for each text its exact
// cross-entropy under the grammar that wrote it, in nats per byte: the entropy floor, which no model can beat. If
// anything fails, incomplete files do not appear under their final names. With --questions N it also writes
// data/stories_questions_train.jsonl, N conversations about other stories, and a tenth as many for validation.
//
// Build: cc -O2 -o build/corpus data/corpus.c -lm

#include "questions.h"
#include "../llmtrain/base/files.h"
#include "../llmtrain/base/flags.h"
#include "../llmtrain/base/json.h"
#include "../llmtrain/base/progress.h"

#include <signal.h>

// Train stories count from 0, and those that questions are about from 2^39 on after both: no two overlap.
static const uint64_t FIRST_VAL_STORY = 1ull << 40, FIRST_ASKED_STORY = 1ull << 39;

typedef struct {
    const char* out;
    uint64_t bytes, val_bytes, questions, seed;
} Options;

typedef struct {
    uint64_t bytes, stories;
    double nats, nats_per_byte;
    double stderr_nats_per_byte;  // standard error of nats_per_byte as an estimate of the mean over all stories
} Summary;

static Flags options_flags(Options* o) {
    const Flag table[] = {
        FLAG_TEXT("out", &o->out, NULL, "PREFIX", 0,
                  "prefix of the files: PREFIX_train.txt, PREFIX_val.txt, PREFIX.json (required)"),
        FLAG_COUNT("bytes", &o->bytes, 6000000, 1, 1e12, 0,
                   "minimum bytes of training text; its last story is complete"),
        FLAG_COUNT("val-bytes", &o->val_bytes, 600000, 1, 1e12, 0,
                   "minimum bytes of validation text, whose stories are not in the training text"),
        FLAG_COUNT("questions", &o->questions, 0, 0, 1e9, 0,
                   "also write N conversations with a question about a story, PREFIX_questions_train.jsonl, and N / 10 "
                   "in PREFIX_questions_val.jsonl"),
        FLAG_COUNT("seed", &o->seed, 1, 0, 9e15, 0, "seed of the stories; it gives the same bytes on any machine"),
    };
    return flags_of(table, sizeof table / sizeof table[0]);
}

static bool options_read(Options* o, int argc, char** argv, Error* error) {
    Flags flags = options_flags(o);
    if (!flags_parse(&flags, argc, argv, error)) return false;
    if (!o->out || !o->out[0]) return fail_with(error, "--out PREFIX is missing; give the prefix of the files");
    return strlen(o->out) <= 900 || fail_with(error, "--out is longer than 900 characters: give a shorter path");
}

// Stories from `first_story` on, to the file, until it holds at least `bytes`.
static bool stories_write(Summary* summary, FileWriter* file, const Grammar* g, uint64_t bytes, uint64_t seed,
                          uint64_t first_story, Error* error) {
    Story story;
    Progress progress = progress_begin(file->path, bytes);
    double bb = 0, bn = 0, nn = 0;
    memset(summary, 0, sizeof *summary);
    while (summary->bytes < bytes) {
        story_write(&story, g, seed, first_story + summary->stories);
        if (!file_append(file, story.text, story.length, error)) return false;
        double b = (double)story.length, n = story.nats;
        bb += b * b;
        bn += b * n;
        nn += n * n;
        summary->bytes += story.length;
        summary->stories++;
        summary->nats += n;
        if (summary->stories % 1024 == 0) progress_show(&progress, summary->bytes);
    }
    progress_end(&progress);
    double rate = summary->nats / (double)summary->bytes;
    double squares = nn - 2 * rate * bn + rate * rate * bb;  // the sum over stories of (nats - rate * bytes)^2
    summary->nats_per_byte = rate;
    summary->stderr_nats_per_byte = sqrt(squares > 0 ? squares : 0) / (double)summary->bytes;
    return true;
}

static void message_write(JsonWriter* w, const char* role, const char* content) {
    json_write_begin(w, '{');
    json_member_string(w, "role", role);
    json_member_string(w, "content", content);
    json_write_end(w, '}');
}

// `count` lines, each a conversation about a story from `first_story` on that answers a question.
static bool questions_write(FileWriter* file, const Grammar* g, uint64_t count, uint64_t seed, uint64_t first_story,
                            Error* error) {
    Story story;
    Question q;
    char text[MAX_STORY + QUESTION_BYTES];
    bool ok = true;
    for (uint64_t number = first_story, written = 0; ok && written < count; number++) {
        story_write(&story, g, seed, number);
        int length = (int)story.length;
        while (length > 0 && story.text[length - 1] == '\n') length--;
        snprintf(text, sizeof text, "%.*s", length, story.text);
        if (!question_ask(&q, text, seed, number)) continue;
        snprintf(text, sizeof text, "%.*s\n%s", length, story.text, q.question);
        JsonWriter w = {0};
        json_write_begin(&w, '{');
        json_member_begin(&w, "messages", '[');
        message_write(&w, "user", text);
        message_write(&w, "assistant", q.answer);
        json_write_end(&w, ']');
        json_write_end(&w, '}');
        json_put(&w, "\n", 1);
        ok = json_write_done(&w, error) && file_append(file, w.text, w.bytes, error);
        json_writer_free(&w);
        written++;
    }
    return ok;
}

static bool json_append(FileWriter* file, uint64_t seed, const Summary parts[2], Error* error) {
    JsonWriter w = {.line_depth = 1};
    json_write_begin(&w, '{');
    json_member_u64(&w, "seed", seed);
    for (int i = 0; i < 2; i++) {
        json_member_begin(&w, i == 0 ? "train" : "val", '{');
        json_member_u64(&w, "bytes", parts[i].bytes);
        json_member_u64(&w, "stories", parts[i].stories);
        json_member_number(&w, "nats", parts[i].nats);
        json_member_number(&w, "nats_per_byte", parts[i].nats_per_byte);
        json_member_number(&w, "stderr_nats_per_byte", parts[i].stderr_nats_per_byte);
        json_write_end(&w, '}');
    }
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool ok = json_write_done(&w, error) && file_append(file, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

// All files are written before the first takes its name.
static bool corpus_write(Summary parts[2], const Grammar* g, const Options* o, Error* error) {
    const char* endings[5] = {"_train.txt", "_val.txt", ".json", "_questions_train.jsonl", "_questions_val.jsonl"};
    int count = o->questions > 0 ? 5 : 3;
    FileWriter* files = (FileWriter*)memory_allocate(5 * sizeof(FileWriter));
    bool ok = files != NULL || fail_with(error, "out of memory for the files");
    for (int i = 0; files && i < count; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s%s", o->out, endings[i]);
        files[i].file = -1;
        ok = ok && file_begin(&files[i], path, error);
    }
    ok = ok && stories_write(&parts[0], &files[0], g, o->bytes, o->seed, 0, error);
    ok = ok && stories_write(&parts[1], &files[1], g, o->val_bytes, o->seed, FIRST_VAL_STORY, error);
    ok = ok && json_append(&files[2], o->seed, parts, error);
    if (ok && count == 5)
        ok = questions_write(&files[3], g, o->questions, o->seed, FIRST_ASKED_STORY, error) &&
             questions_write(&files[4], g, o->questions / 10, o->seed, FIRST_VAL_STORY + FIRST_ASKED_STORY, error);
    for (int i = 0; i < count && ok; i++) ok = file_end(&files[i], error);
    for (int i = 0; files && i < count; i++) file_abort(&files[i]);
    free(files);
    return ok;
}

int main(int argc, char** argv) {
    Error error;
    Options options;
    if (flags_want_help(argc, argv)) {
        Flags flags = options_flags(&options);
        const char* title = "corpus: writes small English stories from a grammar, and their exact entropy\n";
        return flags_help("corpus", title, &flags);
    }
    bool ok = options_read(&options, argc, argv, &error), usage = !ok;
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    Summary parts[2];
    Grammar* g = (Grammar*)memory_allocate(sizeof(Grammar));
    ok = ok && (g || fail_with(&error, "out of memory for the grammar (%zu bytes)", sizeof(Grammar)));
    ok = ok && grammar_compile(g, corpus_lines, sizeof corpus_lines / sizeof corpus_lines[0], &error);
    ok = ok && corpus_write(parts, g, &options, &error);
    free(g);
    if (!ok) fprintf(stderr, "corpus: %s\n", error.text);
    for (int i = 0; ok && i < 2; i++)
        say(stdout, "%s_%s.txt: %llu bytes, %llu stories, %.5f +- %.5f nats per byte", options.out,
            i == 0 ? "train" : "val", (unsigned long long)parts[i].bytes, (unsigned long long)parts[i].stories,
            parts[i].nats_per_byte, parts[i].stderr_nats_per_byte);
    return ok ? 0 : usage ? 2 : 1;
}
