// test_calls.c: every call of the C library that can fail is made to fail, and the order of calls keeps files whole.
//
//   make build/test_calls calls && build/test_calls [--programs DIR] [--chains N] [--seed S] [--only JOB]
//
// The programs in DIR are compiled with fail_calls.h, which knows every call in their sources, and do small jobs:
// texts, tokens, runs, checkpoints, exports. Then a job is done again while one of its calls fails, once. The program
// ends with a sentence, or reports the failure and goes on, or its results are the same bits; no file is damaged under
// its final name; and when the job is then done again without a fault, all its files are as if nothing had happened.
// Without --chains each call in the sources fails in one job, from one chain of callers, the first time; with it, in
// each job, from up to N, and also a later time.
//
// In all jobs, with and without faults, a file or directory takes its final name by a rename, after its bytes and the
// names in it were flushed; its directory is flushed before the program ends, and before its files are removed.
//
// A call in the sources that no job makes must be in NOT_MADE, with the reason; a function of the C library that the
// programs use must be in fail_calls.h, or in CANNOT_FAIL.

#include "llmtrain/run/log.h"
#include "harness.h"

static struct {
    const char *programs, *only;
    uint64_t chains, seed;
} test = {.seed = 1};

// ------------------------------------------------------------------------------------------------
// Jobs

// Commands of the shell, in a directory of their own: $P has the programs, $S is the directory of what START makes, $W
// the job's own. RUN: a run of 4 steps with saves after 2 and 4.
#define SHAPE                                                                                                        \
    " --family gpt2 --layers 2 --heads 2 --channels 16 --seq 16 --batch 1 --total-batch 32 --steps 4 --warmup 1"     \
    " --timeout 100 --reduce exact"
#define RUN "$P/train --data $S/x_train_000000.bin --val \"$S/x[0].bin\" --out $W/run --val-every 2" SHAPE
#define SAVES " --val-windows 2 --ckpt-every 2"
#define LAST_STEP "run/step_00000004/"
#define RESUMED .again = " --resume", .results = LAST_STEP

static const char START[] =
    "set -e\n"
    "$P/corpus --out $S/c --bytes 4000 --val-bytes 800\n"
    "$P/tokenize --bytes $S/c_train.txt --out $S/x\n"
    "cp $S/x_val_000000.bin $S/x[0].bin\n"
    "head -c 1500 $S/c_train.txt > $S/one.txt\n"
    "head -c 900 $S/c_val.txt > $S/two.txt\n"
    "for line in 'Tom is a dog.' 'Lily has a cat.' 'Tom is a dog.'; do echo \"{\\\"text\\\": \\\"$line\\\"}\"; done"
    " > $S/lines.jsonl\n"
    "$P/tokenize --text $S/one.txt --train-bpe 280 --out $S/bpe\n"
    "gzip -c $S/two.txt > $S/packed && $P/tokenize --text $S/packed --tokenizer $S/bpe --out $S/try --val 0 ||"
    " cp $S/two.txt $S/packed\n"  // without gzip or zlib
    "cp -r $S/bpe $S/said && echo '{\"eos_token_id\": [0, 279]}' > $S/said/generation_config.json\n"
    "printf '%s' '{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}' > $S/said/chat_template.jinja\n"
    "printf '%s\\n' '{\"instruction\": \"Go\", \"input\": \"on\", \"output\": \"He ran.\"}'"
    " '{\"prompt\": \"Tom\", \"chosen\": \" is a dog.\", \"rejected\": \" is a cat.\"}' > $S/said.jsonl\n"
    "$P/tokenize --chat $S/said.jsonl --tokenizer $S/said --out $S/said/x --val 0\n"
    "printf '%s\\n' '{\"prompt\": \"Tom\", \"completion\": \" ran.\"}' '{\"text\": \"A cat.\"}' > $S/told.jsonl\n"
    "mkdir $S/told $S/old\n"
    "$P/tokenize --chat $S/told.jsonl --tokenizer $S/said --out $S/told/x --val 0\n"
    "$P/tokenize --text $S/two.txt --tokenizer $S/bpe --out $S/old/x --val 0.5\n"
    "W=$S\n" RUN " --ckpt-every 2\n"
    "W=$S/half\n" RUN " --val-windows 2 --ckpt-every 2 --ckpt-async off --ckpt-tier $W/tier:3 --tensorboard\n"
    "rm -r $W/run/step_00000004\n"
    "touch $W/run/tiers.tmp-1-0\n"
    "$P/train --data $S/old/x_train_000000.bin --out $S/words" SHAPE "\n"
    "$P/train --data $S/told/x_train_000000.bin --out $S/answers" SHAPE "\n"
    "$P/export --out $S/words --to hf --dir $S/hf\n"
    "$P/train --data $S/old/x_train_000000.bin --out $S/pairs --init-from $S/hf --lora 2 --batch 1 --seq 16 --steps 2\n"
    "$P/export --out $S/pairs --to peft --dir $S/adapter\n"
    "cp -r $S/hf $S/chat\n"
    "echo '{{ messages[0].content }}' > $S/chat/chat_template.jinja\n"
    "printf '%s\\n' '{\"prompt\": \"Tom\"}' '{\"messages\": [{\"role\": \"user\", \"content\": \"Lily has\"}]}'"
    " > $S/prompts.jsonl\n"
    "echo '{\"ctx\": \"Tom is\", \"endings\": [\"a dog\", \"a cat\"], \"label\": 1}' > $S/choices.jsonl\n";

static const struct {
    const char *name, *command;
    const char* given;    // a directory of $S that the job's begins as; NULL: it begins empty
    const char* again;    // added to the command, it completes the job after a failure; NULL: nothing
    const char* results;  // what must be there: all files whose path begins with this; NULL: all
    const char* says;     // words in the output of a run that reports nothing; NULL: any
    bool prints;          // standard output is a result
    bool more;            // its calls fail only with --chains
} JOBS[] = {
    {.name = "corpus", .command = "$P/corpus --out $W/c --bytes 3000 --val-bytes 600"},
    {.name = "bytes", .command = "$P/tokenize --bytes $S/one.txt --out $W/x --shard-tokens 500"},
    {.name = "bpe", .command = "$P/tokenize --text $S/one.txt --train-bpe 280 --out $W/bpe"},
    {.name = "texts", .command = "$P/tokenize --text $S/one.txt,$S/packed --tokenizer $S/bpe --out $W/x --val 0.5"},
    {.name = "lines", .command = "$P/tokenize --jsonl \"$S/l*.jsonl\" --tokenizer $S/bpe/tokenizer.json --dedup near"
     " --out $W/x --val 0.4"},
    {.name = "chats", .command = "$P/tokenize --chat $S/said.jsonl --tokenizer $S/said --template"
     " $S/said/chat_template.jinja --out $W/x --val 0 --shard-tokens 60"},
    {.name = "more", .given = "old", .command = "$P/tokenize --text $S/one.txt --tokenizer $S/bpe --out $W/x --val 0"},
    // When the old shards are gone but their tokenizer is not, it is refused until somebody removes that.
    {.name = "replace", .given = "old", .command = "$P/tokenize --bytes $S/one.txt --out $W/x",
     .again = " || { rm -r $W/x_tokenizer && $P/tokenize --bytes $S/one.txt --out $W/x; }"},
    {.name = "show", .prints = true, .command = "$P/tokenize --show $S/old/x_train_000000.bin"},
    {.name = "marks", .prints = true, .command = "$P/tokenize --show $S/said/x_train_000000.bin"},
    {.name = "encode", .prints = true, .command = "$P/tokenize --encode --tokenizer $S/bpe < $S/two.txt"},
    {.name = "decode", .prints = true, .command = "echo '65 66 67' | $P/tokenize --decode --tokenizer $S/bpe"},
    {.name = "sync", .command = RUN SAVES " --ckpt-async off --ckpt-tier $W/tier:3", RESUMED},
    {.name = "async", .command = RUN SAVES " --train 'final_norm*'", RESUMED},
    {.name = "resume", .given = "half", .results = LAST_STEP, .says = "resumed from",
     .command = RUN SAVES " --resume --ckpt-keep 1 --ckpt-async off --ckpt-tier $W/tier:3 --tensorboard"},
    {.name = "words", .command = "$P/train --data \"$S/old/x_train_0*.bin\" --out $W/run" SHAPE
     " --offload optimizer,activations --offload-dir $W --sample-every 2 --tokens 4 --prometheus $W/prom", RESUMED},
    {.name = "packed", .command = "$P/train --data $S/told/x_train_000000.bin --out $W/run" SHAPE, RESUMED},
    {.name = "import", .command = "$P/train --data $S/old/x_train_000000.bin --out $W/run --init-from $S/hf --batch 1"
     " --seq 16 --steps 4", RESUMED},
    {.name = "pairs", .command = "$P/train --data $S/old/x_train_000000.bin --out $W/run --init-from $S/hf --adapter"
     " $S/adapter --lora 2 --batch 1 --seq 16 --steps 4", RESUMED},
    {.name = "ranks", .more = true, .command = RUN SAVES " --ranks 2 --zero 1", RESUMED},
    {.name = "plan", .prints = true, .more = true, .command = RUN " --plan --ranks 2"},
    {.name = "restart", .more = true, .results = LAST_STEP,
     .command = "$P/supervise --out $W/run -- sh -c '[ -e $W/once ] || { mkdir -p $W/run; touch $W/once; exit 3; };"
     " exec \"$0\" \"$@\"' " RUN SAVES " --resume"},
    {.name = "hf", .command = "$P/export --out $S/words --to hf --dir $W/hf"},
    {.name = "llm.c", .command = "$P/export --init-from $S/hf --to llm.c --dir $W/llm.c"},
    {.name = "gguf", .command = "$P/export --out $S/words --to gguf --dtype q8_0 --dir $W/gguf"},
    {.name = "adapter", .command = "$P/export --out $S/pairs --to peft --dir $W/adapter"},
    {.name = "events", .prints = true, .command = "{ $P/tensorboard $S/run --dir $W/views && cat"
     " $W/views/run/* | tail -c +74 | cksum; }"},  // without the first two records, which have the time
    {.name = "merged", .command = "$P/export --init-from $S/hf --adapter $S/adapter --to hf --dir $W/hf"},
    {.name = "generate", .prints = true, .more = true,
     .command = "$P/generate --out $S/run --prompt Tom --tokens 8 --samples 2"},
    {.name = "ids", .prints = true, .more = true,
     .command = "$P/generate --init-from $S/hf --prompt-ids '1 2' --print-ids --tokens 8"},
    {.name = "prompt", .prints = true, .more = true,
     .command = "$P/generate --init-from $S/hf --prompt-ids '1 2' --tokens 8"},
    {.name = "chat", .prints = true, .more = true,
     .command = "echo Tom | $P/generate --init-from $S/chat --chat --tokens 8"},
    {.name = "prompts", .command = "$P/generate --init-from $S/chat --prompts $S/prompts.jsonl --samples 3 --batch 2"
     " --tokens 8 --jsonl $W/samples.jsonl"},
    {.name = "score", .prints = true, .more = true,
     .command = "$P/evaluate --init-from $S/run/step_00000004 --text $S/two.txt --scores $W/scores"},
    {.name = "part", .prints = true, .more = true,
     .command = "$P/evaluate --out $S/run --data $S/x_val_000000.bin --ranks 2"},
    {.name = "answers", .prints = true, .more = true,
     .command = "$P/evaluate --out $S/answers --data $S/told/x_train_000000.bin"},
    {.name = "choices", .prints = true, .more = true,
     .command = "$P/evaluate --init-from $S/hf --choices $S/choices.jsonl"},
};
enum { JOB_COUNT = COUNT_OF(JOBS) };

// $S, $W, and the file of the calls that the last job has made.
static char start[PATH_MAX], work[PATH_MAX], calls_path[PATH_MAX];

static bool begins_with(const char* text, const char* words) { return strncmp(text, words, strlen(words)) == 0; }

// ------------------------------------------------------------------------------------------------
// The files of a job

typedef struct {
    char path[512];  // within the job's directory
    uint64_t hash;   // of its contents, without what differs from run to run
    uint64_t until[32];  // of a log: up to each whole line
    size_t lines;
} TreeFile;

typedef struct {
    TreeFile files[256];
    size_t count;
    size_t root;  // the length of the directory's path
} Tree;

// Logs: their lines up to the times. The hash of one whose last line is not whole is 0.
static void log_read(TreeFile* file, const char* text) {
    Hash hash = hash_begin(0);
    const char* end;
    for (file->lines = 0; (end = strchr(text, '\n')) != NULL; text = end + 1) {
        const char* times = strstr(text, ",\"ms\"");
        hash_add(&hash, text, (size_t)((times && times < end ? times : end) - text));
        Hash until = hash;
        need(file->lines < COUNT_OF(file->until), "more room for lines");
        file->until[file->lines++] = hash_end(&until);
    }
    file->hash = *text ? 0 : hash_end(&hash);
}

// Whether the whole lines of a log are the first of another.
static bool log_begins(const TreeFile* log, const TreeFile* whole) {
    size_t n = log->lines;
    return n == 0 || (n <= whole->lines && log->until[n - 1] == whole->until[n - 1]);
}

// A manifest, without the names of the kernels, whose bits are the same, and without its own checksum.
static uint64_t manifest_hash(const char* text) {
    Hash hash = hash_begin(0);
    for (const char* end; (end = strchr(text, '\n')) != NULL; text = end + 1)
        if (!begins_with(text, "  \"matmuls\"") && !begins_with(text, "  \"checksum\""))
            hash_add(&hash, text, (size_t)(end - text));
    return hash_end(&hash);
}

// What differs from run to run, or lacks the lines that the disk has refused, and a power cut may shorten.
static bool is_record(const char* path) {
    static const char* const records[] = {"/events.jsonl", "/run.jsonl", "/ranks.jsonl", "/run/samples.jsonl",
                                          "/scores", "/prom", "/prom.tmp"};
    for (size_t i = 0; i < COUNT_OF(records); i++) {
        size_t length = strlen(path), end = strlen(records[i]);
        if (length > end && strcmp(path + length - end, records[i]) == 0) return true;
    }
    return strstr(path, ".tfevents.") != NULL;
}

// A tier's directory has a random name, which is written as "id".
static void tree_visit(const char* path, void* context) {
    Tree* tree = (Tree*)context;
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        directory_each(path, tree_visit, tree);
        return;
    }
    const char *inner = path + tree->root + 1, *tier = strstr(inner, "tier/"), *name = strrchr(path, '/') + 1;
    if (is_record(path) || strcmp(name, "tiers") == 0 || strstr(inner, "failures/")) return;
    need(tree->count < COUNT_OF(tree->files), "more room for files");
    TreeFile* file = &tree->files[tree->count++];
    if (tier) snprintf(file->path, sizeof file->path, "tier/id%.400s", tier + 5 + strcspn(tier + 5, "/"));
    else snprintf(file->path, sizeof file->path, "%.500s", inner);
    size_t bytes;
    char* text = text_read(path, &bytes);
    file->lines = 0;
    if (strcmp(name, "metrics.jsonl") == 0) log_read(file, text);
    else file->hash = strcmp(name, "manifest.json") == 0 ? manifest_hash(text) : hash_bytes(text, bytes);
    free(text);
}

static void tree_read(Tree* tree, const char* path) {
    tree->count = 0;
    tree->root = strlen(path);
    directory_each(path, tree_visit, tree);
}

static const TreeFile* tree_find(const Tree* tree, const char* path) {
    for (size_t i = 0; i < tree->count; i++)
        if (strcmp(tree->files[i].path, path) == 0) return &tree->files[i];
    return NULL;
}

// The first file of `a`, of those whose path begins with `which`, that `b` does not have with the same contents; NULL:
// there is none.
static const char* tree_lacks(const Tree* a, const char* which, const Tree* b) {
    for (size_t i = 0; i < a->count; i++) {
        const TreeFile* file = tree_find(b, a->files[i].path);
        if (!begins_with(a->files[i].path, which)) continue;
        if (file == NULL || file->hash != a->files[i].hash) return a->files[i].path;
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// The order of calls

typedef struct {
    char path[PATH_MAX];
    bool buffered, dirty;  // of a file: bytes that the program or the kernel holds; of a directory: names
} Touched;

static struct {
    Touched list[256];
    size_t count;
    size_t renames;
    char broken[PATH_MAX + 256];  // the first broken rule; "": none
} order;

static Touched* touched(const char* path) {
    for (size_t i = 0; i < order.count; i++)
        if (strcmp(order.list[i].path, path) == 0) return &order.list[i];
    need(order.count < COUNT_OF(order.list), "more room for files");
    Touched* t = &order.list[order.count++];
    memset(t, 0, sizeof *t);
    snprintf(t->path, sizeof t->path, "%s", path);
    return t;
}

static Touched* touched_parent(const char* path) {
    return touched(text_of("%.*s", (int)(strrchr(path, '/') - path), path));
}

static bool is_temporary(const char* path) { return strstr(path, ".tmp") != NULL; }

static bool is_within(const char* path, const char* directory) {
    size_t length = strlen(directory);
    return strncmp(path, directory, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void order_broken(const char* rule, const char* path) {
    if (!order.broken[0]) snprintf(order.broken, sizeof order.broken, "%s: %s", rule, path);
}

static void order_rename(const char* from, const char* to) {
    for (size_t i = 0; i < order.count; i++) {
        Touched* t = &order.list[i];
        if (is_within(t->path, to)) t->buffered = t->dirty = false;  // it is gone
        if (!is_within(t->path, from)) continue;
        if (t->buffered || t->dirty) order_broken(text_of("%s has its name before a flush", to), t->path);
        char moved[PATH_MAX];
        snprintf(moved, sizeof moved, "%s%s", to, t->path + strlen(from));
        snprintf(t->path, sizeof t->path, "%s", moved);
    }
    order.renames++;
    touched_parent(to)->dirty = true;
}

// Looks at what a job in `work` did to files. good: it succeeded, so that nothing may still be to flush.
static void order_read(bool good) {
    char* log = text_read(calls_path, NULL);
    order.count = order.renames = 0;
    order.broken[0] = 0;
    for (const char *line = log, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char what[16], path[PATH_MAX], to[PATH_MAX], text[2 * PATH_MAX + 32];
        snprintf(text, sizeof text, "%.*s", (int)(end - line), line);
        if (sscanf(text, "%15s %1000s %1000s", what, path, to) < 2 || !is_within(path, work)) continue;
        const char* name = strrchr(path, '/') + 1;
        if (is_record(path)) continue;
        Touched *file = touched(path), *parent = touched_parent(path);
        if (strcmp(what, "rename") == 0) order_rename(path, to);
        else if (strcmp(what, "link") == 0) touched_parent(to)->dirty = true;
        else if (strcmp(what, "make") == 0) parent->dirty |= !is_temporary(name);
        else if (strcmp(what, "buffer") == 0) file->buffered = true;
        else if (strcmp(what, "write") == 0) file->buffered = false, file->dirty = true;
        else if (strcmp(what, "flush") == 0) file->dirty = file->buffered;
        else if (strcmp(what, "remove") == 0) file->buffered = file->dirty = false;
        else if (parent->dirty && !is_temporary(name)) order_broken("it is emptied before a flush of its name", path);
    }
    for (size_t i = 0; i < order.count && good; i++)
        if (order.list[i].dirty) order_broken("it ends before a flush", order.list[i].path);
    free(log);
}

// ------------------------------------------------------------------------------------------------
// Running a job

static Program job;

typedef struct { const char* command; const char* fault; } Command;

static void job_become(const void* context) {
    const Command* c = (const Command*)context;
    environment_clear();
    setenv("P", test.programs, 1);
    setenv("S", start, 1);
    setenv("W", work, 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    if (c->command == START) return;
    setenv("FAIL_CALLS_LOG", calls_path, 1);
    if (c->fault) setenv("FAIL_CALLS_AT", c->fault, 1);
}

static void run(const char* command, const char* fault) {
    char shell[] = "sh", option[] = "-c", text[4096];
    char* words[] = {shell, option, text, NULL};
    const Command c = {command, fault};
    snprintf(text, sizeof text, "%s", command);
    program_free(&job);
    unlink(calls_path);
    unlink(text_of("%s.failed", calls_path));
    program_start(&job, words, job_become, &c);
    programs_wait(&job, 1, 240e3);
}

static void begin(size_t j) {
    remove_tree(work);
    if (JOBS[j].given) copy_tree(text_of("%s/%s", start, JOBS[j].given), work);
    else need(mkdir(work, 0777) == 0, "%s", work);
}

// ------------------------------------------------------------------------------------------------
// Faults

typedef struct {
    unsigned long long hash;
    unsigned ordinal;
    int way;
    size_t site;
} CallFault;

static const char* const WAYS[] = {"error", "interrupted", "part"};

static CallFault faults[16384];
static size_t fault_count;

// made: by any job; tried: chains of callers, for each way, and in the end when a chain makes the call again
static struct { char text[256]; bool made; size_t tried[COUNT_OF(WAYS) + 1]; } sites[1024];
static size_t site_count;

// A site as it is listed: "name llmtrain/run/../base/files.h function" without the detour.
static void site_name(char site[256], const char* line) {
    snprintf(site, 256, "%.250s", line);
    for (char *dots, *at; (dots = strstr(site, "/../")) != NULL;) {
        for (at = dots; at > site && at[-1] != '/' && at[-1] != ' ';) at--;
        memmove(at, dots + 4, strlen(dots + 4) + 1);
    }
}

static size_t site_find(const char* site) {
    size_t i = 0;
    while (i < site_count && strcmp(sites[i].text, site) != 0) i++;
    return i;
}

// All sites of all programs, once.
static void sites_read(void) {
    run("for p in $P/*; do FAIL_CALLS_LIST=1 $p; done", NULL);
    for (char *line = job.text[0], *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char site[256];
        *end = 0;
        site_name(site, line);
        if (site_find(site) < site_count) continue;
        need(site_count < COUNT_OF(sites), "more room for sites");
        strcpy(sites[site_count++].text, site);
    }
}

// Every call that the last job has made, and every way in which it can fail.
static void faults_read(void) {
    static const char* const partial[] = {"read ", "pread ", "write ", "pwrite ", "send ", "recv "};
    char* log = text_read(calls_path, NULL);
    fault_count = 0;
    for (const char *line = log, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char text[512], site[256];
        unsigned long long hash;
        unsigned ordinal;
        int length = 0;
        bool parts = false;
        snprintf(text, sizeof text, "%.*s", (int)(end - line), line);
        if (sscanf(text, "call %llx %u %n", &hash, &ordinal, &length) != 2 || length == 0) continue;
        site_name(site, text + length);
        size_t s = site_find(site);
        need(s < site_count && fault_count + 3 < COUNT_OF(faults), "%s", site);
        sites[s].made = true;
        for (size_t i = 0; i < COUNT_OF(partial); i++) parts = parts || begins_with(site, partial[i]);
        for (int way = 0; way < (parts && ordinal == 1 ? 3 : 1); way++)
            faults[fault_count++] = (CallFault){hash, ordinal, way, s};
    }
    free(log);
}

// ------------------------------------------------------------------------------------------------
// A job with a fault

static Tree given, expected, found;
static char *expected_output, *expected_errors;
static struct { size_t tried, missed, ended, reported, silent; } sums;

static bool is_left_over(const char* path) { return is_temporary(path) || strstr(path, ".old"); }

// A failure here is reported with the step, whose line or validation loss the log then lacks for ever.
static bool lacks_line(const char* name) { return strstr(name, "log_add_val_loss") || strstr(name, "json_put"); }

// A file of the job is as it was given, or as it should be; a log may end early.
static void expect_whole(const char* name, const TreeFile* file) {
    const TreeFile *before = tree_find(&given, file->path), *after = tree_find(&expected, file->path);
    bool whole = (before && before->hash == file->hash) || (after && after->hash == file->hash);
    bool log = after && strstr(file->path, "metrics.jsonl");
    bool early = log && (log_begins(file, after) || lacks_line(name));
    expect(whole || early || is_left_over(file->path), "%s: %s is damaged", name, file->path);
}

// Does the job again after a failure, without a fault. reported: other results than the last may be missing; kept: a
// temporary file could not be removed.
static void complete(size_t j, const char* name, bool reported, bool kept) {
    char again[4096];
    snprintf(again, sizeof again, "%s%s", JOBS[j].command, JOBS[j].again ? JOBS[j].again : "");
    run(again, NULL);
    tree_read(&found, work);
    const char *lacks = tree_lacks(&expected, reported && JOBS[j].results ? JOBS[j].results : "", &found);
    const char *more = tree_lacks(&found, "", &expected);
    expect(program_good(&job), "%s: done again, it fails: %.300s", name, job.text[1]);
    expect(lacks == NULL, "%s: done again, %s is missing or wrong", name, lacks);
    bool log = more && strstr(more, "metrics.jsonl") && lacks_line(name);
    expect(more == NULL || (kept && is_left_over(more)) || log, "%s: done again, it leaves %s", name, more);
    expect(!JOBS[j].prints || strcmp(job.text[0], expected_output) == 0, "%s: done again, it prints %.300s", name,
           job.text[0]);
}

// Returns whether the call was made.
static bool fault_try(size_t j, const CallFault* f) {
    char name[512];
    snprintf(name, sizeof name, "%s, %s, call %u (%s)", JOBS[j].name, sites[f->site].text, f->ordinal, WAYS[f->way]);
    begin(j);
    run(JOBS[j].command, text_of("%llx %u %s", f->hash, f->ordinal, WAYS[f->way]));
    if (!file_exists(text_of("%s.failed", calls_path))) {
        sums.missed++;
        return false;
    }
    bool good = program_good(&job), silent = strcmp(job.text[1], expected_errors) == 0;
    sums.tried++;
    sums.ended += !good;
    sums.reported += good && !silent;
    sums.silent += good && silent;
    order_read(good);
    tree_read(&found, work);
    const char* lacks = tree_lacks(&expected, "", &found);
    bool same = lacks == NULL && (!JOBS[j].prints || strcmp(job.text[0], expected_output) == 0) &&
                (!JOBS[j].says || strstr(job.text[0], JOBS[j].says));
    expect(!job.late && program_code(&job) < 128, "%s: it ends with %d%s", name, program_code(&job),
           job.late ? " when it is killed" : "");
    expect(good || (!silent && count_in(job.text[1], ": ") > 0), "%s: it ends with %d, without a sentence", name,
           program_code(&job));
    expect(!good || same || !silent, "%s: it reports nothing, but %s is missing or wrong", name,
           lacks ? lacks : "its output");
    expect(!order.broken[0], "%s: %s", name, order.broken);
    for (size_t i = 0; i < found.count; i++) expect_whole(name, &found.files[i]);
    bool kept = begins_with(sites[f->site].text, "unlink");
    if (!same || tree_lacks(&found, "", &expected)) complete(j, name, !silent, kept);
    return true;
}

static void test_job(size_t j) {
    begin(j);
    tree_read(&given, work);
    run(JOBS[j].command, NULL);
    if (!expect(program_good(&job), "it fails")) program_print(&job, JOBS[j].name);
    tree_read(&expected, work);
    free(expected_output);
    free(expected_errors);
    expected_output = strdup(job.text[0]);
    expected_errors = strdup(job.text[1]);
    order_read(true);
    expect(!order.broken[0], "%s", order.broken);
    faults_read();
    if (JOBS[j].prints) {
        run(text_of("%s > /dev/full", JOBS[j].command), NULL);
        expect(!program_good(&job) && strstr(job.text[1], "standard output"),
               "it prints to a full disk: exit code %d, %s", program_code(&job), job.text[1]);
    }
    verdict("%s: %zu files, %zu of them renamed after a flush", JOBS[j].name, expected.count, order.renames);
    memset(&sums, 0, sizeof sums);
    for (size_t s = 0; s < site_count && test.chains; s++) memset(sites[s].tried, 0, sizeof sites[s].tried);
    for (size_t i = 0; i < fault_count && (test.chains || !JOBS[j].more); i++) {
        const CallFault* f = &faults[(i + (size_t)test.seed * 7919) % fault_count];
        size_t* tried = &sites[f->site].tried[f->ordinal > 1 ? COUNT_OF(WAYS) : (size_t)f->way];
        if (*tried < (test.chains ? test.chains : f->ordinal == 1)) *tried += fault_try(j, f);
    }
    if (sums.tried + sums.missed == 0) return;
    expect(sums.tried > 0, "%s: no call was made again to fail", JOBS[j].name);
    verdict("%s: of %zu calls that fail, %zu end it, %zu are reported, %zu change nothing; %zu were not made again",
            JOBS[j].name, sums.tried, sums.ended, sums.reported, sums.silent, sums.missed);
}

// ------------------------------------------------------------------------------------------------
// Calls that are not made, or cannot fail

// A site ends with these words.
static const struct { const char *site, *reason; } NOT_MADE[] = {
    {"sync_file_range llmtrain/base/system.h disk_flush_begin", "for files of 4 MB; its failure changes nothing"},
    {"llmtrain/base/system.h disk_forget", "where the page cache cannot be bypassed"},
    {"llmtrain/base/container.h threads_spin_briefly", "with OMP_WAIT_POLICY"},
    {"fscanf llmtrain/base/container.h container_look", "without a group of version 2"},
    {"fclose llmtrain/base/container.h container_look", "without a group of version 2"},
    {"fflush llmtrain/base/flags.h flags_help", "in test_errors"},
    {"kill tools/export.cu temporary_path", "in test_convert"},
    {"syscall llmtrain/ops/gemm_x86.h gemm_has_amx", "when the processor has AMX"},
    {"rmdir data/bpe.h bpe_save", "after another failure"},
    {"remove data/shards.h series_clean", "in test_text"},
    {"access llmtrain/checkpoint/source.h source_open_newest", "after another failure"},
    {"access tools/open.h open_newest", "after another failure"},
    {"link llmtrain/checkpoint/saver.h saver_link", "from the third checkpoint on"},
    {"llmtrain/run/save.h run_open_out", "after another failure"},
    {"ftruncate llmtrain/run/log.h log_add_val_loss", "after another failure"},
    {"fclose llmtrain/run/log.h log_open", "after another failure"},
    {"write llmtrain/run/log.h lines_open", "after a line that is cut: test_runs"},
    {"close llmtrain/run/log.h lines_open", "after another failure"},
    {"close llmtrain/run/log.h log_write_ranks", "after another failure"},
    {"close llmtrain/run/log.h log_cut_back", "in a rewind: test_facts"},
    {"unlink llmtrain/run/facts.h run_export", "after another failure"},
    {"unlink llmtrain/run/tfevents.h tfevents_look", "an hour later: test_tfevents"},
    {"unlink llmtrain/run/tfevents.h tfevents_begin", "after another failure"},
    {"getrusage llmtrain/base/system.h memory_peak", "after another failure"},
    {"close llmtrain/base/system.h descriptor_prepare", "after another failure"},
    {"close llmtrain/base/system.h pipe_open", "after another failure"},
    {"llmtrain/base/system.h guard_end", "not on Linux"},
    {"kill llmtrain/base/system.h processes_signal", "when a command is killed: test_supervise"},
    {"llmtrain/base/files.h file_abort", "after another failure"},
    {"close llmtrain/base/files.h file_open", "after another failure"},
    {"close llmtrain/base/files.h file_clean", "after another failure"},
    {"close llmtrain/base/files.h directory_remove", "after another failure"},
    {"llmtrain/ranks/launch.h launch_report", "after another failure"},
    {"setenv llmtrain.h model_allocate", "for stages of a pipeline, on GPUs"},
    {"llmtrain/ranks/split.h comm_connect_group", "between groups of ranks: test_comm"},
    {"close llmtrain/ranks/shared_memory.h shared_make", "after another failure"},
    {"ftruncate tools/evaluate.h score_log_open", "after a first line that is cut: test_evaluate"},
    {"kill llmtrain/ranks/launch.h launch_fork", "after another failure"},
    {"waitpid llmtrain/ranks/launch.h launch_fork", "after another failure"},
    {"kill llmtrain/ranks/launch.h launch_reap", "when a rank hangs: test_ranks"},
    {"close llmtrain/ranks/control.h comm_accept_handshake", "when a stranger connects: test_comm"},
    {"close llmtrain/ranks/control.h comm_rendezvous", "when a stranger connects: test_comm"},
    {"setrlimit llmtrain/ranks/control.h comm_raise_file_limit", "for many ranks: test_comm"},
    {"malloc llmtrain/text/unicode.h nfc_append_piece", "for long pieces of a tokenizer that normalizes"},
    {"strdup llmtrain/text/tokenizer_json.h read_config", "for a template in tokenizer_config.json"},
    {"unlink llmtrain/run/heartbeat.h heartbeats_make", "after another failure"},
    {"close llmtrain/run/heartbeat.h heartbeats_make", "after another failure"},
    {"llmtrain/run/heartbeat.h heartbeats_clean", "when a supervisor was killed: test_supervise"},
    {"llmtrain/run/log.h log_open_again", "when the log is deleted: soak"},
    {"freopen llmtrain/run/join.h run_join_plan", "under a launcher"},
    {"fflush llmtrain/run/checks.h run_report_trace", "for a spike: test_trace"},
    {"rmdir llmtrain/run/save.h run_open_tiers", "after another failure"},
    {"rmdir llmtrain/checkpoint/checkpoint.h checkpoint_discard", "for a tier in /dev/shm: soak"},
    {"close launch/supervise.c rank_has_ended", "when a rank ends before the command: test_supervise"},
    {"write train.cu interrupt", "for a signal: test_ranks"},
    {"open launch/supervise.c relay_open", "for a terminal: test_supervise"},
    {"poll launch/supervise.c relay_drain", "when a reader is late: test_supervise"},
    {"kill launch/supervise.c supervise_signal_ranks", "for a signal: test_supervise"},
    {"kill launch/supervise.c supervise_pass_signal", "for a signal: test_supervise"},
    {"llmtrain/base/nvml.h nvml_open", "on a machine with GPUs: test_telemetry"},
    {"close llmtrain/base/telemetry.h telemetry_begin", "after another failure"},
    {"data/shards.h shard_writer_abandon", "after another failure"},
    {"remove data/shards.h series_abandon", "after another failure"},
};

// Functions of the C library that do not fail; fail only for arguments that these programs do not have; report the
// failure of others; print messages; or end the program.
static const char CANNOT_FAIL[] =
    " atoi bsearch ldexp memchr memcmp memcpy memmove memset qsort strchr strcmp strcspn strerror strftime strlen"
    " strncmp strrchr strsignal strspn strstr strtod strtol strtoul strtoull snprintf sscanf vsnprintf fnmatch ntohs"
    " ceil exp expf expm1 fabs fabsf floor fmaf fmax fmaxf fmin fminf fmod llrint log log1p logf lrint lrintf pow powf"
    " rint round roundf sqrt sqrtf toupper clock_gettime gmtime_r localtime_r nanosleep time"
    " getenv getpid getppid getsid geteuid ioctl isatty sysconf"
    " sigaction sigaddset sigemptyset sigfillset signal sigprocmask pthread_sigmask"
    " pthread_detach pthread_cond_broadcast pthread_cond_destroy pthread_cond_init pthread_cond_signal pthread_cond_wait"
    " pthread_getspecific pthread_join pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock"
    " pthread_mutex_unlock pthread_once pthread_setspecific"
    " closedir feof ferror fileno free freeaddrinfo gai_strerror globfree"
    " fprintf printf putc putchar puts abort exit pause raise"
    " inflate inflateEnd inflateInit2_ inflateReset ZSTD_createDStream ZSTD_decompressStream ZSTD_freeDStream"
    " ZSTD_getErrorName ZSTD_isError"
    " fgetc readlink ";  // fail_calls.h itself

static void test_made(void) {
    for (size_t k = 0; k < COUNT_OF(NOT_MADE); k++) {
        size_t found_sites = 0;
        for (size_t s = 0; s < site_count; s++) {
            const char* at = strstr(sites[s].text, NOT_MADE[k].site);
            if (at == NULL || at[strlen(NOT_MADE[k].site)] != 0) continue;
            found_sites++;
            bool may = begins_with(NOT_MADE[k].reason, "when ");  // it depends on time
            expect(may || !sites[s].made, "%s is in NOT_MADE, but a job makes it", sites[s].text);
            sites[s].made = true;
        }
        expect(found_sites > 0 || test.chains == 0, "%s is in NOT_MADE, but not in the sources", NOT_MADE[k].site);
    }
    for (size_t s = 0; s < site_count; s++)
        expect(sites[s].made, "%s: no job makes this call, and NOT_MADE does not say why", sites[s].text);
    verdict("%zu calls in the sources: each is made by a job, or listed with a reason", site_count);
}

// The functions that the programs take from other libraries.
static void test_functions(void) {
    size_t count = 0;
    run("nm -D --undefined-only $P/* | sed -n 's/^ *U //p' | sed 's/@.*//; s/^__isoc[0-9]*_//' | grep -v"
        " '^_\\|^GOMP_\\|^omp_\\|^__kmpc_' | sort -u", NULL);
    for (char *line = job.text[0], *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        bool known = strstr(CANNOT_FAIL, text_of(" %s ", line)) != NULL;
        for (size_t s = 0; s < site_count && !known; s++) known = begins_with(sites[s].text, text_of("%s ", line));
        expect(known, "%s is in neither fail_calls.h nor CANNOT_FAIL", line);
        count++;
    }
    expect(count > 50, "there is no nm");
    verdict("%zu functions of the C library: each can be made to fail, or cannot", count);
}

int main(int argc, char** argv) {
    const char* programs = "build/calls";
    const Flag rows[] = {
        {"programs", KIND_TEXT, &programs, "DIR", 0, 0, "the programs", 0},
        {"only", KIND_TEXT, &test.only, "JOB", 0, 0, "this job alone", 0},
        {"chains", KIND_COUNT, &test.chains, "N", 0, 1e6,
         "chains of callers of each call, in each job; 0: one, in one job", 0},
        {"seed", KIND_COUNT, &test.seed, "S", 0, 1e6, "which chains of more than that", 0},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_calls", NULL, &flags, argc, argv)) return code;
    tests_begin("test_calls");
    test.programs = realpath(programs, NULL);
    need(test.programs != NULL, "there is no %s", programs);
    const char* parent = getenv("TMPDIR");  // at its end a run removes a tier in memory, which here is a result
    if (parent && begins_with(parent, SYSTEM_MEMORY_FOLDER)) unsetenv("TMPDIR");
    root_enter();
    snprintf(start, sizeof start, "%.1000s/start", root);
    snprintf(work, sizeof work, "%.1000s/work", root);
    snprintf(calls_path, sizeof calls_path, "%.1000s/log", root);
    need(mkdir(start, 0777) == 0, "%s", start);
    run(START, NULL);
    if (!program_good(&job)) program_print(&job, "start");
    need(program_good(&job), "what the jobs start with");
    sites_read();
    for (size_t j = 0; j < JOB_COUNT; j++) {
        char program[64] = "";
        sscanf(strstr(JOBS[j].command, "$P/"), "$P/%60s", program);
        if (!file_exists(text_of("%s/%s", test.programs, program))) continue;
        if (test.only && strcmp(test.only, JOBS[j].name) != 0) continue;
        test_job(j);
    }
    if (test.only == NULL) test_made();
    test_functions();
    return tests_end();
}
