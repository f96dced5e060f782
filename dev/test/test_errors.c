// test_errors.c: what the programs do when the world or a flag is wrong.
//
//   cc -std=c11 -O2 -I. dev/test/test_errors.c -o build/test_errors -lm -pthread
//   build/test_errors [--train PATH] [--generate PATH] [--tokenize PATH] [--corpus PATH] [--show on]
//
// A table of cases. Each runs a program in a directory of its own that holds good and broken files, and holds it to:
//
//   - the exit code: 0 done, 1 something in the world was wrong, 2 a flag was wrong; never a signal, never late
//   - stderr: as many sentences as stated (usually one), each beginning with the name of the program, nothing else;
//     they say what is wrong, where, and what to do: the fragments of the case
//   - no word of a crash in the output: assert, Sanitizer, runtime error, nan
//   - the disk: whatever was there is there still, byte for byte, and nothing is new, but for the paths that the case
//     allows; no temporary name is left
//
// Cases that need what this machine does not grant (mounting, becoming another user) are skipped with the reason.

#include "llmtrain/flags.h"
#include "harness.h"
#include "pieces.h"

#include <grp.h>
#include <sched.h>
#include <sys/mount.h>

#define TIME_LIMIT_MS 20000.0

typedef enum { TRAIN, GENERATE, TOKENIZE, CORPUS, PROGRAMS } Which;
static const char* const PROGRAM_NAMES[PROGRAMS] = {"train", "generate", "tokenize", "corpus"};

// Conditions under which a program runs.
enum {
    AS_NOBODY = 1,       // as a user without rights, since files refuse nothing to root
    STDOUT_FULL = 2,     // standard output is /dev/full
    XFSZ_KILLS = 4,      // the signal of RLIMIT_FSIZE kills, as it does unless someone ignores it
    MOUNTS = 8           // the preparation mounts a small disk
};

typedef struct {
    const char* name;
    Which program;
    int exit_code;
    int sentences;            // on stderr
    const char* arguments;    // see arguments_split
    const char* fragments[5]; // all must be in the sentences; in those and stdout when exit_code is 0
    void (*prepare)(void);    // in the directory of the case; NULL: only good shards and text are there
    unsigned conditions;
    size_t file_bytes;        // RLIMIT_FSIZE; 0: none
    size_t memory_bytes;      // RLIMIT_AS; 0: the usual
    const char* may_change;   // paths separated by |; one that ends in / stands for all beneath it; NULL: nothing
} Case;

// ------------------------------------------------------------------------------------------------
// Files for the cases
//
// All paths are relative: the test is in the directory of the case. A preparation that fails ends the test, since what
// follows would mean nothing.

static bool mounting = false; // this process has mounts of its own

static void patch_i32(const char* path, size_t offset, int32_t value) { patch(path, offset, &value, sizeof value); }

// A run that was made once, before the cases; "small" has a vocabulary of 100 tokens, "wide" another model.
static void copy_run(const char* name) {
    copy_tree(text_of("%s/made/%s", root, name), "run");
}

// Replaces the first `from` in the manifest of a step, which then again agrees with its checksum.
static void edit_manifest(const char* path, const char* from, const char* to) {
    size_t bytes, tail_bytes = strlen(",\n  \"checksum\": \"0123456789abcdef\"\n}\n");
    char *text = text_read(path, &bytes), *at = strstr(text, from), edited[16384];
    need(at != NULL && bytes > tail_bytes, "%s: there is no %s", path, from);
    text[bytes - tail_bytes] = 0;
    size_t length = (size_t)snprintf(edited, sizeof edited, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    snprintf(edited + length, sizeof edited - length, ",\n  \"checksum\": \"%016llx\"\n}\n",
             (unsigned long long)hash_bytes(edited, length));
    put_text(path, edited);
    free(text);
}

// ------------------------------------------------------------------------------------------------
// Preparations

#define NEWEST "run/step_00000004"
#define BEFORE "run/step_00000002"
enum { WEIGHTS_PLACE = 20000, MOMENTS_PLACE = 80000 };  // bytes of a tensors file: a header, then 30 KB for each array

static void no_data(void) { need(unlink("train.bin") == 0, "no data"); }
static void data_unreadable(void) { need(chmod("train.bin", 0) == 0, "an unreadable file"); }
static void data_directory(void) { no_data(); need(mkdir("train.bin", 0755) == 0, "a directory"); }
static void data_pipe(void) { no_data(); need(mkfifo("train.bin", 0644) == 0, "a pipe"); }
static void data_empty(void) { put_text("train.bin", ""); }
static void data_text(void) { copy_tree("text.txt", "train.bin"); }
static void data_short_header(void) { need(truncate("train.bin", 1000) == 0, "a cut header"); }
static void data_cut(void) { need(truncate("train.bin", 5000) == 0, "a cut shard"); }
static void data_odd(void) { need(truncate("train.bin", 5001) == 0, "a shard with half a token"); }
static void data_bad_magic(void) { patch_i32("train.bin", 0, 12345678); }
static void data_bad_version(void) { patch_i32("train.bin", 4, 3); }
static void data_count_larger(void) { patch_i32("train.bin", 8, 5000); }
static void data_count_smaller(void) { patch_i32("train.bin", 8, 4000); }
static void data_count_negative(void) { patch_i32("train.bin", 8, -1); }
static void data_count_huge(void) { patch_i32("train.bin", 16, 0x7fffffff); }
static void data_count_overflow(void) { patch_i32("train.bin", 16, INT32_MIN); }
static void data_no_tokens(void) { put_shard("train.bin", 256, 0, 1); }
static void data_few_tokens(void) { put_shard("train.bin", 256, 16, 1); }
static void data_bad_vocabulary(void) { patch_i32("train.bin", 12, -256); }
static void data_wide_vocabulary(void) { patch_i32("train.bin", 12, 65537); }
static void data_bad_entropy(void) { double bad = 1e300; patch("train.bin", 24, &bad, sizeof bad); }
static void data_other_length(void) { put_shard("train.bin", 256, 4095, 1); }

// Enough for the longest sequence that the flags allow; a hole in the file, so it takes no room.
static void data_long(void) {
    int32_t tokens = 16777216 + 1;
    need(truncate("train.bin", 1024 + 2 * (off_t)tokens) == 0, "a long shard");
    patch_i32("train.bin", 8, tokens);
}

static void data_bad_tokens(void) {
    uint16_t bad = 60000;
    for (size_t i = 0; i < 4096; i++) patch("train.bin", 1024 + 2 * i, &bad, sizeof bad);
}

// 19 sequences of 16, one bad token in the middle: every epoch comes across it, the first step most likely not.
static void data_bad_token_late(void) {
    uint16_t bad = 256;
    put_shard("train.bin", 256, 320, 1);
    patch("train.bin", 1024 + 2 * 200, &bad, sizeof bad);
}

static void data_mixed_widths(void) { put_shard("mixed_0.bin", 256, 100, 1); put_shard("mixed_1.bin", 70000, 100, 1); }
static void data_mixed_vocabularies(void) {
    put_shard("mixed_0.bin", 256, 100, 1);
    put_shard("mixed_1.bin", 100, 100, 1);
}
static void data_second_damaged(void) {
    put_shard("mixed_0.bin", 256, 100, 1);
    put_shard("mixed_1.bin", 256, 100, 1);
    need(truncate("mixed_1.bin", 1100) == 0, "a cut shard");
}
static void data_small_vocabulary(void) { put_shard("train.bin", 100, 4096, 1); }
static void val_small_vocabulary(void) { put_shard("val.bin", 100, 200, 1); }
static void val_short(void) { put_shard("val.bin", 256, 10, 1); }
static void val_bad_token(void) { uint16_t bad = 999; patch("val.bin", 1024 + 2 * 30, &bad, sizeof bad); }

static void have_run(void) { copy_run("good"); }
static void have_run_before(void) { have_run(); remove_tree(NEWEST); }
static void have_run_small(void) { copy_run("small"); }
static void have_empty_out(void) { need(mkdir("run", 0777) == 0, "run"); }
static void have_run_other_data(void) { have_run(); data_other_length(); }
static void have_run_same_length(void) {
    have_run();
    flip_byte("train.bin", 1024 + 100);  // the low byte of token 50
}
static void have_log(void) {
    have_empty_out();
    put_text("run/metrics.jsonl", "{\"step\": 1}\n");
}
static void manifest_missing(void) { have_run(); need(unlink(NEWEST "/manifest.json") == 0, "manifest"); }
static void manifest_cut(void) { have_run(); need(truncate(NEWEST "/manifest.json", 700) == 0, "manifest"); }
static void manifest_empty(void) { have_run(); put_text(NEWEST "/manifest.json", ""); }
static void manifest_changed(void) { have_run(); flip_byte(NEWEST "/manifest.json", 300); }
static void manifest_garbage(void) { have_run(); put_text(NEWEST "/manifest.json", "{\"format\": [[[[\n"); }
static void manifest_directory(void) {
    manifest_missing();
    need(mkdir(NEWEST "/manifest.json", 0777) == 0, "manifest");
}
static void manifest_other_version(void) {
    have_run();
    edit_manifest(NEWEST "/manifest.json", "checkpoint 4\"", "checkpoint 9\"");
}
static void manifest_no_state(void) {
    have_run();
    edit_manifest(NEWEST "/manifest.json", "\"samples\"", "\"simples\"");
}
static void manifest_huge_model(void) {
    have_run_before();
    edit_manifest(BEFORE "/manifest.json", "\"channels\": 16", "\"channels\": 65536");
    edit_manifest(BEFORE "/manifest.json", "\"layers\": 1", "\"layers\": 900");
    edit_manifest(BEFORE "/manifest.json", "\"heads\": 2", "\"heads\": 1024");
}
static void manifest_impossible_model(void) {
    have_run_before();
    edit_manifest(BEFORE "/manifest.json", "\"heads\": 2", "\"heads\": 0");
}
static void tensors_missing(void) { have_run(); need(unlink(NEWEST "/rank_00000.safetensors") == 0, "tensors"); }
static void tensors_cut(void) { have_run(); need(truncate(NEWEST "/rank_00000.safetensors", 20000) == 0, "tensors"); }
static void tensors_empty(void) { have_run(); put_text(NEWEST "/rank_00000.safetensors", ""); }
static void weights_changed(void) { have_run(); flip_byte(NEWEST "/rank_00000.safetensors", WEIGHTS_PLACE); }
static void moments_changed(void) { have_run(); flip_byte(NEWEST "/rank_00000.safetensors", MOMENTS_PLACE); }
static void header_changed(void) { have_run(); flip_byte(NEWEST "/rank_00000.safetensors", 500); }
static void header_too_long(void) {
    uint64_t huge = (uint64_t)1 << 60;
    have_run();
    patch(NEWEST "/rank_00000.safetensors", 0, &huge, sizeof huge);
}
static void tensors_of_other_model(void) {
    char from[PATH_MAX];
    have_run();
    snprintf(from, sizeof from, "%.2000s/made/wide/step_00000004/rank_00000.safetensors", root);
    copy_tree(from, NEWEST "/rank_00000.safetensors");
}
static void newest_is_file(void) { have_run(); put_text("run/step_00000009", "not a checkpoint"); }
static void all_damaged(void) {
    weights_changed();
    need(truncate(BEFORE "/manifest.json", 700) == 0, "manifest");
}
static void only_damaged(void) { have_run_before(); flip_byte(BEFORE "/rank_00000.safetensors", WEIGHTS_PLACE); }
static void foreign_names(void) {
    have_empty_out();
    need(mkdir("run/step_-1", 0777) == 0 && mkdir("run/step_00000002.tmp", 0777) == 0, "foreign names");
    put_text("run/step_00000002.tmp/rank_00000.safetensors", "left over from a run that was killed");
}
static void temporary_is_file(void) { have_empty_out(); put_text("run/step_00000002.tmp", "a file of someone else"); }
static void log_is_directory(void) {
    have_run();
    need(unlink("run/metrics.jsonl") == 0 && mkdir("run/metrics.jsonl", 0777) == 0, "log");
}
static void log_is_full(void) { have_empty_out(); need(symlink("/dev/full", "run/metrics.jsonl") == 0, "log"); }

static void mount_small(const char* options) {
    have_empty_out();
    need(mount("tmpfs", "run", "tmpfs", 0, options) == 0, "a small disk");
}
static void disk_full_for_log(void) {
    char block[4096];
    mount_small("size=64k,mode=0755");
    memset(block, 'x', sizeof block);
    FILE* file = fopen("run/filler", "wb");
    while (file && fwrite(block, 1, sizeof block, file) == sizeof block && fflush(file) == 0) {}
    if (file) fclose(file);
}
static void disk_full_for_checkpoint(void) {
    char from[PATH_MAX];
    mount_small("size=192k,mode=0755");
    snprintf(from, sizeof from, "%.2000s/made/good/step_00000002", root);
    copy_tree(from, BEFORE);
}
static void disk_read_only(void) {
    disk_full_for_checkpoint();
    need(mount("tmpfs", "run", "tmpfs", MS_REMOUNT | MS_RDONLY, NULL) == 0, "a read-only disk");
}

static void text_missing(void) { need(unlink("text.txt") == 0, "text"); }
static void text_empty(void) { put_text("text.txt", ""); }
static void text_one_byte(void) { put_text("text.txt", "x"); }
static void text_directory(void) { text_missing(); need(mkdir("text.txt", 0755) == 0, "text"); }
static void text_unreadable(void) { need(chmod("text.txt", 0) == 0, "text"); }
static void shards_there(void) {
    put_shard("new_train_000000.bin", 256, 50, 1);
    put_shard("new_val_000000.bin", 256, 50, 1);
}
static void shard_to_full(void) { need(symlink("/dev/full", "new_train_000000.bin.tmp") == 0, "a full disk"); }
static void shard_name_taken(void) { need(mkdir("new_val_000000.bin", 0777) == 0, "a taken name"); }
static void corpus_there(void) {
    put_text("new_train.txt", "old");
    put_text("new_val.txt", "old");
    put_text("new.json", "{}");
}
static void corpus_name_taken(void) { need(mkdir("new_val.txt", 0777) == 0, "a taken name"); }

// ------------------------------------------------------------------------------------------------
// The cases

// A wrong flag of train, or flags that do not fit together: what is wrong is the command, not the world.
#define WRONG(name, arguments, ...) {name, TRAIN, 2, 1, arguments, {__VA_ARGS__}, NULL, 0, 0, 0, NULL}
// Something wrong with what train reads; nothing on the disk may change.
#define WORLD(name, prepare, arguments, ...) {name, TRAIN, 1, 1, arguments, {__VA_ARGS__}, prepare, 0, 0, 0, NULL}
// All that can be said of a case of train.
#define SPECIAL(name, exit_code, sentences, prepare, conditions, file_bytes, memory_bytes, may_change, arguments, ...) \
    {name, TRAIN, exit_code, sentences, arguments, {__VA_ARGS__}, prepare, conditions, file_bytes, memory_bytes, \
     may_change}
// train --resume over two checkpoints: the damaged newest is named, and the run goes on from the one before it.
#define PASSED_OVER(name, prepare, ...) \
    {name, TRAIN, 0, 1, RESUME, {"resumed from run/step_00000002", __VA_ARGS__}, prepare, 0, 0, 0, \
     "run/metrics.jsonl|run/step_00000004|run/step_00000004/|run/step_00000006|run/step_00000006/"}
// The same for generate.
#define GENERATED(name, exit_code, sentences, prepare, conditions, arguments, ...) \
    {name, GENERATE, exit_code, sentences, arguments, {__VA_ARGS__}, prepare, conditions, 0, 0, NULL}
#define TOOL(name, program, exit_code, prepare, conditions, file_bytes, arguments, ...) \
    {name, program, exit_code, 1, arguments, {__VA_ARGS__}, prepare, conditions, file_bytes, 0, NULL}

#define RESUME "@ --resume --steps 6 --ckpt-every 2"
#define NEW_RUN "run|run/"
#define LOG_ONLY "run|run/metrics.jsonl"  // a run that failed in its first step

static const Case CASES[] = {
    // The command line itself.
    WRONG("unknown flag, near --layers", "@ --layer 2", "unknown flag --layer", "did you mean --layers?"),
    WRONG("unknown flag, near --weight-decay", "@ --weigth-decay 0.1", "--weigth-decay",
          "did you mean --weight-decay?"),
    WRONG("unknown flag, near --kv-heads", "@ --kv_heads 1", "did you mean --kv-heads?"),
    WRONG("unknown flag, near nothing", "@ --quetzalcoatl 1", "unknown flag --quetzalcoatl", "--help"),
    WRONG("unknown flag of 100 letters",
          "@ --aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1",
          "unknown flag --aaaa", "--help"),
    WRONG("unknown flag with =", "@ --layer=2", "unknown flag --layer;", "did you mean --layers?"),
    WRONG("two dashes alone", "@ --", "unknown flag --", "--help"),
    WRONG("a word that is no flag", "@ train.bin", "'train.bin' is not a flag", "--name value"),
    WRONG("one dash", "@ -steps 5", "'-steps' is not a flag", "--name value"),
    WRONG("an empty word", "@ ''", "'' is not a flag", "--name value"),
    WRONG("count without value, at the end", "@ !--steps --steps", "--steps needs a value", "optimizer steps"),
    WRONG("count without value, before a flag", "@ --warmup --lr 1", "--warmup needs a value"),
    WRONG("text without value", "@ !--out --out", "--out needs a value", "directory"),
    WRONG("choice without value", "@ --family", "--family needs a value", "gpt2|llama"),
    WRONG("flag twice", "@ --lr 1 --lr 2", "--lr is given twice"),
    WRONG("flag twice, the second with =", "@ --seed 1 --seed=2", "--seed is given twice"),
    WRONG("switch twice", "@ --plan --plan off", "--plan is given twice"),

    // Values of each kind.
    WRONG("count: a word", "@ --layers two", "--layers is 'two'", "whole number from 1 to 1000"),
    WRONG("count: negative", "@ --layers -1", "--layers is '-1'", "whole number from 1 to 1000"),
    WRONG("count: zero below the bound", "@ --layers 0", "--layers is '0'", "from 1 to"),
    WRONG("count: zero heads", "@ --heads 0", "--heads is '0'", "from 1 to"),
    WRONG("count: zero channels", "@ --channels 0", "--channels is '0'", "from 1 to"),
    WRONG("count: zero sequences", "@ --batch 0", "--batch is '0'", "from 1 to"),
    WRONG("count: above the bound", "@ --layers 1001", "--layers is '1001'", "to 1000"),
    WRONG("count: beyond 64 bits", "@ --steps 99999999999999999999", "--steps is '99999999999999999999'",
          "whole number"),
    WRONG("count: 2^64", "@ --seed 18446744073709551616", "--seed is", "whole number"),
    WRONG("count: 2^64 - 1", "@ --seed 18446744073709551615", "--seed is", "whole number"),
    WRONG("count: a fraction", "@ --steps 2.5", "--steps is '2.5'", "whole number"),
    WRONG("count: an exponent", "@ --steps 1e3", "--steps is '1e3'", "whole number"),
    WRONG("count: hexadecimal", "@ --batch 0x10", "--batch is '0x10'", "whole number"),
    WRONG("count: plus sign", "@ --batch +2", "--batch is '+2'", "whole number"),
    WRONG("count: empty", "@ --batch ''", "--batch is ''", "whole number"),
    WRONG("count: empty after =", "@ --batch=", "--batch is ''", "whole number"),
    WRONG("count: nan", "@ --top-k nan", "--top-k is 'nan'", "whole number"),
    WRONG("count: garbage after it", "@ --steps 10x", "--steps is '10x'", "whole number"),
    WRONG("real: a word", "@ --lr fast", "--lr is 'fast'", "number from 0 to 100"),
    WRONG("real: negative", "@ --lr -0.1", "--lr is '-0.1'", "number from 0 to 100"),
    WRONG("real: overflow", "@ --lr 1e999", "--lr is '1e999'", "number from 0 to 100"),
    WRONG("real: nan", "@ --lr nan", "--lr is 'nan'", "number from 0 to 100"),
    WRONG("real: inf", "@ --clip inf", "--clip is 'inf'", "number from 0 to"),
    WRONG("real: -inf", "@ --clip -inf", "--clip is '-inf'", "number from 0 to"),
    WRONG("real: empty", "@ --lr ''", "--lr is ''", "number from"),
    WRONG("real: garbage after it", "@ --lr 1e-3,", "--lr is '1e-3,'", "number from"),
    WRONG("real: just above the bound", "@ --beta2 1", "--beta2 is '1'", "number from 0 to 0.99999"),
    WRONG("real: dropout of 1", "@ --dropout 1", "--dropout is '1'", "number from 0 to 0.9"),
    WRONG("real: top-p above 1", "@ --top-p 1.1", "--top-p is '1.1'", "number from 0 to 1"),
    WRONG("real: rotary base 0", "@ --rope-theta 0", "--rope-theta is '0'", "number from 1 to"),
    WRONG("choice: not in the list", "@ --optimizer adam", "--optimizer is 'adam'", "give one of", "adamw"),
    WRONG("choice: empty", "@ --family ''", "--family is ''", "gpt2|llama"),
    WRONG("choice: two of the list", "@ --family gpt2|llama", "--family is 'gpt2|llama'", "give one of"),
    WRONG("choice: other case", "@ --schedule Cosine", "--schedule is 'Cosine'", "cosine"),
    WRONG("switch: neither on nor off", "@ --tied maybe", "--tied is 'maybe'", "on or off"),
    WRONG("switch: a number", "@ --masters=1", "--masters is '1'", "on or off"),
    WRONG("switch: empty", "@ --plan=", "--plan is ''", "on or off"),

    // Flags that do not fit together.
    WRONG("prompt empty", "@ --prompt ''", "--prompt is empty", "at least one character"),
    WRONG("resume without out", "@ !--out --resume", "--resume needs --out"),
    WRONG("total batch no multiple", "@ --total-batch 33", "--total-batch 33", "multiple", "32", "choose"),
    WRONG("total batch below one micro-batch", "@ --total-batch 16", "--total-batch 16", "multiple", "32"),
    WRONG("total batch no multiple, sequence from the preset",
          "@ !--seq --model llama:15M --ffn 64 --vocab 256 --total-batch 100", "--total-batch 100", "multiple", "512"),
    WRONG("overlap as long as a sequence", "@ --val val.bin --val-overlap 16", "--val-overlap 16",
          "smaller than --seq"),
    WRONG("nothing to do", "", "nothing to train on", "--data", "build/generate"),
    WRONG("no data, no checkpoint directory", "@ !--data !--out", "nothing to train on", "--data"),
    WRONG("out empty", "@ --out ''", "--out", "empty"),
    WRONG("model unknown", "@ --model gpt3", "no model 'gpt3'", "gpt2:124M", "llama:8B"),
    WRONG("model empty", "@ --model ''", "no model ''", "gpt2:124M"),
    WRONG("model of other case", "@ --model GPT2:124M", "no model 'GPT2:124M'", "gpt2:124M"),
    WRONG("no sizes at all", "--data train.bin", "lacks --layers", "--model"),
    WRONG("no sequence length", "@ !--seq", "lacks --seq", "--context"),
    WRONG("sequence longer than context", "@ --context 8", "16", "context of 8", "--seq smaller", "--context larger"),
    WRONG("sequence longer than the preset's", "@ --model llama:15M --ffn 64 --seq 512 --vocab 256", "512",
          "context of 256", "--seq smaller"),
    WRONG("heads do not divide channels", "@ --heads 3", "3 heads do not divide 16 channels", "choose --heads"),
    WRONG("more heads than channels", "@ --heads 32", "32 heads do not divide 16 channels", "choose --heads"),
    WRONG("kv-heads do not divide heads", "@ --heads 4 --kv-heads 3", "3 key/value heads do not divide 4 heads",
          "--kv-heads"),
    WRONG("more kv-heads than heads", "@ --kv-heads 4", "4 key/value heads do not divide 2 heads", "--kv-heads"),
    WRONG("odd head size of llama", "@ --family llama --channels 6", "head size 3 is odd", "--channels / --heads even"),
    WRONG("head size above 256", "@ --channels 1024", "head size 512 is over 256", "more --heads"),

    // Memory.
    WORLD("parameters of petabytes", NULL, "@ --layers 1000 --heads 1024 --channels 65536 --ffn 1048576", "GB",
          "are free", "smaller"),
    WORLD("activations of petabytes", data_long, "@ --batch 65536 --seq 16777216", "GB", "are free", "--batch",
          "--seq"),
    WORLD("activations beyond 2^64 bytes", data_long,
          "@ --batch 65536 --seq 16777216 --channels 65536 --heads 1024 --layers 1000", "GB", "--batch", "--seq"),
    WORLD("activations of exactly 2^64 bytes, gone when the sum wraps", data_long,
          "@ --family llama --layers 2 --heads 1 --channels 16 --ffn 465986 --seq 16777216 --batch 65536", "GB",
          "--batch", "--seq"),
    WORLD("the same, planned only", data_long,
          "@ --plan --family llama --layers 2 --heads 1 --channels 16 --ffn 465986 --seq 16777216 --batch 65536", "GB",
          "--batch"),
    SPECIAL("less memory than is free", 1, 1, NULL, 0, 0, (size_t)1 << 30, NULL,
            "@ --channels 1024 --heads 16 --layers 8", "GB of memory", "smaller"),
    {"no memory for the text",
     GENERATE,
     1,
     1,
     "--out run --prompt a --tokens 1000000000",
     {"out of memory", "--tokens smaller"},
     have_run,
     0,
     0,
     (size_t)1 << 30,
     NULL},

    // Training data.
    WORLD("no file matches", no_data, "@", "no file matches 'train.bin'", "check the name", "tokenize"),
    WORLD("no file matches a pattern", NULL, "@ --data none_*.bin", "no file matches 'none_*.bin'", "tokenize"),
    WORLD("data empty", NULL, "@ --data ''", "no file matches ''", "check the name"),
    WORLD("data is a directory", data_directory, "@", "train.bin is not a file", "check the path"),
    WORLD("data is a pipe", data_pipe, "@", "train.bin is not a file", "check the path"),
    SPECIAL("data is unreadable", 1, 1, data_unreadable, AS_NOBODY, 0, 0, NULL, "@ !--out", "train.bin",
            "Permission denied"),
    WORLD("shard empty", data_empty, "@", "train.bin is not a token shard", "0 bytes", "tokenize"),
    WORLD("shard is text", data_text, "@", "train.bin is not a token shard", "tokenize"),
    WORLD("shard shorter than its header", data_short_header, "@", "train.bin is not a token shard", "1000 bytes",
          "tokenize"),
    WORLD("shard cut", data_cut, "@", "train.bin is damaged or half copied", "4096 tokens", "make it again"),
    WORLD("shard with half a token", data_odd, "@", "train.bin is damaged or half copied", "make it again"),
    WORLD("magic wrong", data_bad_magic, "@", "train.bin is not a token shard", "12345678", "20240520", "tokenize"),
    WORLD("version wrong", data_bad_version, "@", "train.bin", "version 3", "1", "tokenize the text again"),
    WORLD("count larger than the file", data_count_larger, "@", "train.bin", "promises 5000 tokens", "8192 bytes",
          "again"),
    WORLD("count smaller than the file", data_count_smaller, "@", "train.bin", "promises 4000 tokens", "8192 bytes",
          "again"),
    WORLD("count negative", data_count_negative, "@", "train.bin is damaged", "promises 4294967295 tokens", "again"),
    WORLD("count huge", data_count_huge, "@", "train.bin is damaged", "promises 9223372032559812608 tokens", "again"),
    WORLD("count whose bytes overflow", data_count_overflow, "@", "train.bin is damaged",
          "promises 9223372036854779904", "again"),
    WORLD("vocabulary negative", data_bad_vocabulary, "@", "train.bin is damaged", "vocabulary of -256", "again"),
    WORLD("vocabulary beyond the width", data_wide_vocabulary, "@", "train.bin is damaged", "vocabulary of 65537",
          "again"),
    WORLD("entropy impossible", data_bad_entropy, "@", "train.bin is damaged", "entropy", "again"),
    WRONG("vocabulary unknown and not given", "@ --data unknown.bin", "lacks --vocab"),
    WORLD("shard without tokens", data_no_tokens, "@", "train.bin is the longest shard, with 0 tokens", "needs 17",
          "give more text"),
    WORLD("shard too short for a sequence", data_few_tokens, "@", "train.bin is the longest shard, with 16 tokens",
          "needs 17", "shorter sequence"),
    WORLD("sequence longer than the shard", NULL, "@ --seq 5000", "train.bin is the longest shard, with 4096 tokens",
          "needs 5001", "shorter sequence"),
    SPECIAL("token out of range in the first step", 1, 1, data_bad_tokens, 0, 0, 0, LOG_ONLY, "@", "token 60000",
            "of train.bin", "vocabulary of 256", "make the shards again"),
    SPECIAL("token out of range late", 1, 1, data_bad_token_late, 0, 0, 0, LOG_ONLY, "@ --steps 20",
            "token 256 at position 200 of train.bin", "vocabulary of 256", "make the shards again"),
    SPECIAL("token out of range, vocabulary unknown", 1, 1, NULL, 0, 0, 0, LOG_ONLY, "@ --data unknown.bin --vocab 10",
            "of unknown.bin", "vocabulary of 10", "give the model the tokenizer's"),
    WORLD("shards of two widths", data_mixed_widths, "@ --data mixed_*.bin", "mixed_0.bin", "2 bytes",
          "mixed_1.bin of 4", "one tokenizer"),
    WORLD("shards of two vocabularies", data_mixed_vocabularies, "@ --data mixed_*.bin", "mixed_0.bin", "256",
          "mixed_1.bin of 100", "one tokenizer"),
    WORLD("second shard damaged", data_second_damaged, "@ --data mixed_*.bin", "mixed_1.bin is damaged", "again"),
    WORLD("vocabulary of the data is another", NULL, "@ --vocab 300", "--data", "256", "300", "give --vocab 256"),
    WORLD("vocabulary of the data is not the preset's", NULL, "@ --model llama:15M --seq 16", "--data", "256", "32000",
          "give --vocab 256"),

    // Validation data.
    WORLD("no validation file matches", NULL, "@ --val none_*.bin", "no file matches 'none_*.bin'", "tokenize"),
    WORLD("vocabulary of the validation data is another", val_small_vocabulary, "@ --val val.bin", "--val", "100",
          "256", "tokenizer"),
    WORLD("validation data too short", val_short, "@ --val val.bin", "val.bin is the longest shard, with 10 tokens",
          "needs 17", "give more text"),
    SPECIAL("validation token out of range", 1, 1, val_bad_token, 0, 0, 0, LOG_ONLY, "@ --val val.bin --val-every 1",
            "token 999 at position 30 of val.bin", "vocabulary of 256", "make the shards again"),

    // Where the output goes.
    WORLD("out is a file", NULL, "@ --out text.txt", "text.txt", "File exists", "move it away"),
    WORLD("out's parent is a file", NULL, "@ --out text.txt/run", "text.txt", "File exists", "move it away"),
    WORLD("out in /proc", NULL, "@ --out /proc/llmtrain", "cannot make the directory /proc/llmtrain", "check the path"),
    WORLD("out in /sys", NULL, "@ --out /sys/llmtrain", "cannot make the directory /sys/llmtrain", "choose a place"),
    WORLD("out is a device", NULL, "@ --out /dev/full", "/dev/full", "File exists", "move it away"),
    SPECIAL("out where this user may not write", 1, 1, NULL, AS_NOBODY, 0, 0, NULL, "@",
            "cannot make the directory run", "Permission denied", "choose a place that this user may use"),
    SPECIAL("run of another user", 1, 1, have_run, AS_NOBODY, 0, 0, NULL, RESUME, "run/metrics.jsonl",
            "Permission denied", "choose a place that this user may use"),
    SPECIAL("out on a read-only disk", 1, 1, disk_read_only, MOUNTS, 0, 0, NULL, RESUME, "run/metrics.jsonl",
            "Read-only file system", "choose a place"),
    WORLD("log is a directory", log_is_directory, RESUME, "run/metrics.jsonl", "Is a directory"),
    WORLD("log is a full device", log_is_full, "@", "run/metrics.jsonl is not a file", "check the path"),
    SPECIAL("disk full for the log", 1, 3, disk_full_for_log, MOUNTS, 0, 0, "run/metrics.jsonl", "@",
            "cannot write run/metrics.jsonl", "No space left", "free some space"),
    SPECIAL("disk full for the checkpoint", 1, 2, disk_full_for_checkpoint, MOUNTS, 0, 0, "run/metrics.jsonl", RESUME,
            "run/step_00000004", "No space left", "free some space", "Training continues", "run/step_00000006"),
    SPECIAL("file limit reached by the log", 1, 3, NULL, 0, 100, 0, LOG_ONLY, "@", "cannot write run/metrics.jsonl",
            "File too large", "ulimit -f"),
    SPECIAL("file limit reached by the first checkpoint", 1, 1, NULL, 0, 50000, 0, LOG_ONLY, "@", "run/step_00000002",
            "File too large", "ulimit -f"),
    SPECIAL("file limit reached by a later checkpoint", 1, 1, have_run, 0, 50000, 0, "run/metrics.jsonl", RESUME,
            "run/step_00000006", "File too large", "ulimit -f"),
    SPECIAL("file limit, its signal not ignored", 1, 1, have_run, XFSZ_KILLS, 50000, 0, "run/metrics.jsonl", RESUME,
            "run/step_00000006", "File too large", "ulimit -f"),
    SPECIAL("a file has the checkpoint's temporary name", 1, 1, temporary_is_file, 0, 0, 0, LOG_ONLY, "@",
            "run/step_00000002.tmp", "File exists", "move it away"),
    SPECIAL("foreign and left-over names in out", 0, 0, foreign_names, 0, 0, 0, NEW_RUN, "@",
            "saved run/step_00000002"),
    SPECIAL("sample's prompt outside the vocabulary", 1, 1, data_small_vocabulary, 0, 0, 0, LOG_ONLY,
            "@ --sample-every 1 --prompt \xc3\xa9", "vocabulary is 100", "there are 256", "bytes"),

    // Taking a run up again.
    SPECIAL("resume: no directory yet", 0, 0, NULL, 0, 0, 0, NEW_RUN, "@ --resume", "no checkpoint in run yet",
            "from the beginning", "saved run/step_00000002"),
    SPECIAL("resume: no checkpoint yet", 0, 0, have_empty_out, 0, 0, 0, NEW_RUN, "@ --resume",
            "no checkpoint in run yet", "from the beginning"),
    SPECIAL("resume: goes on", 0, 0, have_run, 0, 0, 0, "run/metrics.jsonl|run/step_00000006|run/step_00000006/",
            RESUME, "resumed from run/step_00000004", "saved run/step_00000006"),
    WORLD("run there, no --resume", have_run, "@", "run holds a run that reached step 4", "--resume", "another --out"),
    WORLD("resume: other family", have_run, RESUME " --family llama --ffn 64", "run/step_00000004 is of another run",
          "--family is gpt2", "here it is llama", "another --out"),
    WORLD("resume: other layers", have_run, RESUME " --layers 2", "is of another run", "--layers is 1", "here it is 2",
          "another --out"),
    WORLD("resume: other heads", have_run, RESUME " --heads 4", "is of another run", "--heads is 2", "here it is 4",
          "another --out"),
    WORLD("resume: other kv-heads", have_run, RESUME " --kv-heads 1", "is of another run", "--kv-heads is 2",
          "here it is 1", "another --out"),
    WORLD("resume: other channels", have_run, RESUME " --channels 32 --ffn 64", "is of another run", "--channels is 16",
          "here it is 32"),
    WORLD("resume: other ffn", have_run, RESUME " --ffn 128", "is of another run", "--ffn is 64", "here it is 128",
          "another --out"),
    WORLD("resume: other context", have_run, RESUME " --context 32", "is of another run", "--context is 16",
          "here it is 32", "another --out"),
    WORLD("resume: other vocabulary", have_run, RESUME " --data unknown.bin --vocab 300", "is of another run",
          "--vocab is 256", "here it is 300", "another --out"),
    WORLD("resume: head not tied", have_run, RESUME " --tied off", "is of another run", "--tied is on",
          "here it is off", "another --out"),
    WORLD("resume: other rotary base", have_run, RESUME " --rope-theta 500", "is of another run",
          "--rope-theta is 10000", "here it is 500"),
    WORLD("resume: other optimizer", have_run, RESUME " --optimizer lion", "is of another run", "--optimizer is adamw",
          "here it is lion", "another --out"),
    WORLD("resume: other seed", have_run, RESUME " --seed 7", "is of another run", "--seed is 1337", "here it is 7",
          "another --out"),
    WORLD("resume: other sequence", have_run, RESUME " --seq 8 --context 16", "is of another run", "--seq is 16",
          "here it is 8"),
    WORLD("resume: data of another length", have_run_other_data, RESUME, "is of a run on other data", "same shards"),
    WORLD("resume: other data of the same length", have_run_same_length, RESUME, "is of a run on other data",
          "same shards"),
    WORLD("a log without a checkpoint", have_log, "@", "run/metrics.jsonl exists", "--resume"),
    WRONG("--resume without --data", "--out run --resume", "nothing to train on", "--data"),
    WRONG("--ckpt-every a word", "@ !--ckpt-every --ckpt-every often", "--ckpt-every is 'often'",
          "minutes as 10min, or auto"),
    WRONG("--ckpt-every half a step", "@ --ckpt-every 1.5", "--ckpt-every is '1.5'", "a number of steps"),
    WRONG("--ckpt-every without --out", "--data train.bin --ckpt-every 1", "--ckpt-every needs --out"),
    WRONG("--val-every without --val", "--data train.bin --val-every 1", "--val-every needs --val"),
    WRONG("--epsilon 0", "@ !--epsilon --epsilon 0", "--epsilon is '0'", "1e-15"),
    PASSED_OVER("resume: manifest missing", manifest_missing, NEWEST "/manifest.json", "No such file",
                "trying the checkpoint before"),
    PASSED_OVER("resume: manifest cut", manifest_cut, NEWEST "/manifest.json", "damaged",
                "trying the checkpoint before"),
    PASSED_OVER("resume: manifest empty", manifest_empty, NEWEST "/manifest.json", "damaged",
                "trying the checkpoint before"),
    PASSED_OVER("resume: manifest changed", manifest_changed, NEWEST "/manifest.json", "checksum",
                "trying the checkpoint before"),
    PASSED_OVER("resume: manifest is garbage", manifest_garbage, NEWEST "/manifest.json", "checksum",
                "trying the checkpoint before"),
    SPECIAL("resume: manifest is a directory", 0, 1, manifest_directory, 0, 0, 0,
            "run/metrics.jsonl|run/step_00000004|run/step_00000004/|run/step_00000006|run/step_00000006/",
            "@ --resume --steps 6", NEWEST "/manifest.json is not a file", "resumed from run/step_00000002"),
    PASSED_OVER("resume: manifest of another version", manifest_other_version, NEWEST "/manifest.json",
                "llmtrain checkpoint 4", "use the version of llmtrain that wrote it"),
    PASSED_OVER("resume: manifest without a part", manifest_no_state, NEWEST "/manifest.json", "is not a manifest"),
    PASSED_OVER("resume: tensors missing", tensors_missing, NEWEST "/rank_00000.safetensors", "No such file",
                "trying the checkpoint"),
    PASSED_OVER("resume: tensors cut", tensors_cut, NEWEST "/rank_00000.safetensors", "trying the checkpoint before"),
    PASSED_OVER("resume: tensors empty", tensors_empty, NEWEST "/rank_00000.safetensors", "too short",
                "trying the checkpoint before"),
    PASSED_OVER("resume: weights changed", weights_changed, NEWEST "/rank_00000.safetensors", "checksum",
                "trying the checkpoint"),
    PASSED_OVER("resume: moments changed", moments_changed, NEWEST "/rank_00000.safetensors", "checksum",
                "trying the checkpoint"),
    PASSED_OVER("resume: tensors' header changed", header_changed, NEWEST "/rank_00000.safetensors",
                "trying the checkpoint"),
    PASSED_OVER("resume: tensors' header too long", header_too_long, NEWEST "/rank_00000.safetensors",
                "trying the checkpoint"),
    PASSED_OVER("resume: tensors of another model", tensors_of_other_model, NEWEST "/rank_00000.safetensors",
                "does not match"),
    SPECIAL("resume: a file has a checkpoint's name", 0, 1, newest_is_file, 0, 0, 0,
            "run/metrics.jsonl|run/step_00000006|run/step_00000006/", RESUME, "run/step_00000009",
            "resumed from run/step_00000004"),
    SPECIAL("resume: all damaged", 1, 3, all_damaged, 0, 0, 0, "run/metrics.jsonl", RESUME, NEWEST, BEFORE,
            "no checkpoint in run can be used", "another --out"),

    WORLD("init-from: nothing there", have_run, "@ !--out --init-from run/step_00000007",
          "run/step_00000007/manifest.json", "No such file"),
    WORLD("init-from: other heads", have_run, "@ !--out --init-from " NEWEST " --heads 4", NEWEST " is of another run",
          "--heads is 2", "another --init-from"),
    WORLD("init-from: damaged", weights_changed, "@ !--out --init-from " NEWEST, NEWEST, "checksum"),

    // Generating.
    GENERATED("out missing", 1, 1, NULL, 0, "--out run --prompt a", "run", "no checkpoint", "--out"),
    GENERATED("no --out", 2, 1, NULL, 0, "--prompt a", "give --out"),
    GENERATED("prompt empty", 2, 1, NULL, 0, "--out run --prompt ''", "--prompt is empty", "at least one character"),
    GENERATED("a flag of training", 2, 1, NULL, 0, "--out run --lr 1", "unknown flag --lr"),
    GENERATED("no checkpoint", 1, 1, have_empty_out, 0, "--out run --prompt a", "run holds no checkpoint", "--out"),
    GENERATED("out is a file", 1, 1, NULL, 0, "--out text.txt --prompt a", "text.txt holds no checkpoint", "--out"),
    GENERATED("newest damaged", 0, 1, weights_changed, 0, "--out run --prompt a --tokens 4", NEWEST, "checksum",
              "trying the checkpoint before"),
    GENERATED("all damaged", 1, 3, all_damaged, 0, "--out run --prompt a", NEWEST, BEFORE,
              "no checkpoint in run can be used"),
    GENERATED("the only one damaged", 1, 2, only_damaged, 0, "--out run --prompt a", BEFORE,
              "no checkpoint in run can be used"),
    GENERATED("manifest of a huge model", 1, 1, manifest_huge_model, 0, "--out run --prompt a", "GB",
              "of memory are free"),
    GENERATED("manifest of an impossible model", 1, 1, manifest_impossible_model, 0, "--out run --prompt a",
              "lacks --heads", "at least 1"),
    GENERATED("a model not of bytes", 1, 1, have_run_small, 0, "--out run --prompt a", "vocabulary is 100",
              "there are 256", "bytes"),
    GENERATED("standard output full", 1, 1, have_run, STDOUT_FULL, "--out run --prompt a --tokens 4", "standard output",
              "No space left"),
    GENERATED("works", 0, 0, have_run, 0, "--out run --prompt a --tokens 4", "a"),
    GENERATED("help", 0, 0, NULL, 0, "--help", "--out DIR", "--prompt TEXT", "[256]"),
    SPECIAL("help", 0, 0, NULL, 0, 0, 0, NULL, "--help", "--data GLOB", "--optimizer", "[adamw]"),

    // tokenize.
    TOOL("unknown flag", TOKENIZE, 2, NULL, 0, 0, "--byte text.txt --out new", "unknown flag --byte",
         "did you mean --bytes?"),
    TOOL("word that is no flag", TOKENIZE, 2, NULL, 0, 0, "text.txt --out new", "text.txt", "--"),
    TOOL("flag without value", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out", "--out needs a value", "PREFIX"),
    TOOL("flag twice", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --out old", "--out is given twice"),
    TOOL("no text", TOKENIZE, 2, NULL, 0, 0, "--out new", "--bytes FILE", "missing"),
    TOOL("no out", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt", "--out PREFIX", "missing"),
    TOOL("out empty", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out ''", "--out"),
    TOOL("fraction above 1", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --val 1.5", "--val is '1.5'",
         "from 0 to 1"),
    TOOL("fraction negative", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --val -0.1", "--val is '-0.1'",
         "from 0 to 1"),
    TOOL("fraction nan", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --val nan", "--val is 'nan'",
         "from 0 to 1"),
    TOOL("fraction a word", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --val half", "--val is 'half'",
         "from 0 to 1"),
    TOOL("fraction empty", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --val ''", "--val is ''",
         "from 0 to 1"),
    TOOL("shard of no tokens", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --shard-tokens 0",
         "--shard-tokens is '0'", "from 1"),
    TOOL("shard of 1e999 tokens", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --shard-tokens 1e999",
         "--shard-tokens is '1e999'", "from 1"),
    TOOL("entropy negative", TOKENIZE, 2, NULL, 0, 0, "--bytes text.txt --out new --entropy -1", "--entropy is '-1'",
         "from 0 to 100"),
    TOOL("text missing", TOKENIZE, 1, text_missing, 0, 0, "--bytes text.txt --out new", "text.txt", "No such file",
         "check the path"),
    TOOL("text empty", TOKENIZE, 1, text_empty, 0, 0, "--bytes text.txt --out new", "text.txt is empty", "give a text"),
    TOOL("standard input empty", TOKENIZE, 1, NULL, 0, 0, "--bytes - --out new", "standard input is empty",
         "give a text"),
    TOOL("text is a directory", TOKENIZE, 1, text_directory, 0, 0, "--bytes text.txt --out new",
         "text.txt is a directory", "give one file"),
    TOOL("text is unreadable", TOKENIZE, 1, text_unreadable, AS_NOBODY, 0, "--bytes text.txt --out new", "text.txt",
         "Permission denied"),
    TOOL("fraction of one byte", TOKENIZE, 1, text_one_byte, 0, 0, "--bytes text.txt --out new --val 0.1", "1 bytes",
         "--val 0"),
    TOOL("fraction of standard input", TOKENIZE, 1, NULL, 0, 0, "--bytes - --out new --val 0.1", "standard input",
         "--val 0"),
    TOOL("folder missing", TOKENIZE, 1, NULL, 0, 0, "--bytes text.txt --out none/new", "none/new", "No such file",
         "check the path"),
    TOOL("folder is a file", TOKENIZE, 1, NULL, 0, 0, "--bytes text.txt --out train.bin/new", "train.bin/new",
         "Not a directory", "check the path"),
    TOOL("folder of another user", TOKENIZE, 1, NULL, AS_NOBODY, 0, "--bytes text.txt --out new", "new_",
         "Permission denied", "choose a place"),
    TOOL("file limit", TOKENIZE, 1, shards_there, 0, 2000, "--bytes text.txt --out new", "new_", "File too large",
         "ulimit -f"),
    TOOL("file limit, its signal not ignored", TOKENIZE, 1, shards_there, XFSZ_KILLS, 2000,
         "--bytes text.txt --out new", "new_", "File too large", "ulimit -f"),
    {"disk full",
     TOKENIZE,
     1,
     1,
     "--bytes text.txt --out new --val 0",
     {"new_", "No space left", "free some space"},
     shard_to_full,
     0,
     0,
     0,
     "new_train_000000.bin.tmp"},
    TOOL("name of a shard taken by a directory", TOKENIZE, 1, shard_name_taken, 0, 0, "--bytes text.txt --out new",
         "new_val_000000.bin", "directory"),

    // corpus.
    TOOL("unknown flag", CORPUS, 2, NULL, 0, 0, "--out new --byte 5", "unknown flag --byte", "did you mean --bytes?"),
    TOOL("flag without value", CORPUS, 2, NULL, 0, 0, "--out new --bytes", "--bytes needs a value", "training text"),
    TOOL("flag twice", CORPUS, 2, NULL, 0, 0, "--out new --seed 1 --seed 2", "--seed is given twice"),
    TOOL("out missing", CORPUS, 2, NULL, 0, 0, "--bytes 1000", "--out", "missing"),
    TOOL("out empty", CORPUS, 2, NULL, 0, 0, "--out ''", "--out", "missing"),
    TOOL("no bytes", CORPUS, 2, NULL, 0, 0, "--out new --bytes 0", "--bytes is '0'", "from 1"),
    TOOL("bytes negative", CORPUS, 2, NULL, 0, 0, "--out new --bytes -5", "--bytes is '-5'", "whole number"),
    TOOL("bytes beyond 64 bits", CORPUS, 2, NULL, 0, 0, "--out new --bytes 99999999999999999999",
         "--bytes is '99999999999999999999'", "whole number"),
    TOOL("bytes a word", CORPUS, 2, NULL, 0, 0, "--out new --val-bytes many", "--val-bytes is 'many'", "whole number"),
    TOOL("bytes empty", CORPUS, 2, NULL, 0, 0, "--out new --bytes ''", "--bytes is ''", "whole number"),
    TOOL("seed with a fraction", CORPUS, 2, NULL, 0, 0, "--out new --seed 1.5", "--seed is '1.5'", "whole number"),
    TOOL("folder missing", CORPUS, 1, NULL, 0, 0, "--out none/new --bytes 1000", "none/new_train.txt", "No such file",
         "check the path"),
    TOOL("folder is a file", CORPUS, 1, NULL, 0, 0, "--out text.txt/new --bytes 1000", "text.txt/new_train.txt",
         "Not a directory"),
    TOOL("folder of another user", CORPUS, 1, NULL, AS_NOBODY, 0, "--out new --bytes 1000", "new_train.txt",
         "Permission denied"),
    TOOL("file limit", CORPUS, 1, corpus_there, 0, 20000, "--out new --bytes 50000", "new_train.txt", "File too large",
         "ulimit -f"),
    TOOL("file limit reached at the end", CORPUS, 1, corpus_there, 0, 20000, "--out new --bytes 20500 --val-bytes 1000",
         "new_train.txt", "File too large", "ulimit -f"),
    TOOL("file limit, its signal not ignored", CORPUS, 1, corpus_there, XFSZ_KILLS, 20000, "--out new --bytes 50000",
         "new_train.txt", "File too large"),
    TOOL("name taken by a directory", CORPUS, 1, corpus_name_taken, 0, 0, "--out new --bytes 1000 --val-bytes 1000",
         "new_val.txt", "directory"),
};

// ------------------------------------------------------------------------------------------------
// Arguments
//
// As words_add reads them. @ stands for the flags of a tiny good run, without those that the case names itself; !--data
// only takes --data from them.

static const char* const TINY[][2] = {
    {"--data", "train.bin"}, {"--out", "run"}, {"--layers", "1"}, {"--heads", "2"}, {"--channels", "16"},
    {"--seq", "16"}, {"--batch", "2"}, {"--steps", "2"},
};

static bool word_names(const char* word, const char* flag) {
    size_t length = strlen(flag);
    if (word[0] == '!') word++;
    return strncmp(word, flag, length) == 0 && (word[length] == 0 || word[length] == '=');
}

static void arguments_add(Words* words, const char* text) {
    static Words parts;
    memset(&parts, 0, sizeof parts);
    words_add(&parts, text);
    for (size_t p = 0; p < parts.count; p++) {
        const char* part = parts.words[p];
        bool tiny = strcmp(part, "@") == 0;
        if (!tiny && part[0] != '!') words_put(words, words->count, part, strlen(part));
        for (size_t t = 0; t < COUNT_OF(TINY) && tiny; t++) {
            bool named = false;
            for (size_t q = 0; q < parts.count; q++) named = named || word_names(parts.words[q], TINY[t][0]);
            for (int i = 0; i < 2 && !named; i++) words_add(words, TINY[t][i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// Running a program

static struct {
    char paths[PROGRAMS][PATH_MAX];
    size_t usual_memory[PROGRAMS];  // RLIMIT_AS; 0: the program does not run under one (AddressSanitizer)
    bool show;
} test;

// In the child: the conditions. Memory is limited so that a wrong size cannot take the machine down.
static void case_become(const void* context) {
    const Case* c = (const Case*)context;
    size_t bytes = c->memory_bytes ? c->memory_bytes : test.usual_memory[c->program];
    const struct rlimit file = {c->file_bytes, c->file_bytes}, memory = {bytes, bytes};
    int full = c->conditions & STDOUT_FULL ? open("/dev/full", O_WRONLY) : -1;
    if (full >= 0) dup2(full, 1);
    signal(SIGXFSZ, c->conditions & XFSZ_KILLS ? SIG_DFL : SIG_IGN);
    if (c->file_bytes) setrlimit(RLIMIT_FSIZE, &file);
    if (bytes) setrlimit(RLIMIT_AS, &memory);
    if (c->conditions & AS_NOBODY)
        if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0) _exit(EXIT_NOT_RUN);
}

static Program program_run(const Case* c) {
    static Words words;
    Program p;
    memset(&words, 0, sizeof words);
    words_add(&words, test.paths[c->program]);
    arguments_add(&words, c->arguments);
    program_start(&p, words.words, case_become, c);
    programs_wait(&p, 1, TIME_LIMIT_MS);
    return p;
}

// ------------------------------------------------------------------------------------------------
// The disk before and after

typedef struct {
    char path[512];
    uint64_t hash;  // of the contents; of a directory, a pipe, a link: of its kind
} Entry;

typedef struct {
    Entry* entries;  // owned
    size_t count, room;
} Snapshot;

static void snapshot_add(const char* path, void* context) {
    Snapshot* s = (Snapshot*)context;
    struct stat status;
    if (lstat(path, &status) != 0) return;
    if (s->count == s->room) {
        s->room = 2 * s->room + 64;
        s->entries = (Entry*)realloc(s->entries, s->room * sizeof(Entry));
        need(s->entries != NULL, "memory for a snapshot");
    }
    Entry* e = &s->entries[s->count++];
    snprintf(e->path, sizeof e->path, "%.511s", strncmp(path, "./", 2) == 0 ? path + 2 : path);
    e->hash = (uint64_t)(status.st_mode & S_IFMT);
    if (S_ISREG(status.st_mode)) {
        size_t bytes;
        char* data = text_read(path, &bytes);
        e->hash = hash_bytes(data, bytes);
        free(data);
    }
    if (S_ISDIR(status.st_mode)) directory_each(path, snapshot_add, s);
}

static const Entry* snapshot_find(const Snapshot* s, const char* path) {
    for (size_t i = 0; i < s->count; i++)
        if (strcmp(s->entries[i].path, path) == 0) return &s->entries[i];
    return NULL;
}

static bool path_may_change(const char* path, const char* allowed) {
    if (strcmp(path, "run/events.jsonl") == 0) path = "run/metrics.jsonl";  // a run that has the one has the other
    while (allowed && *allowed) {
        size_t length = strcspn(allowed, "|");
        bool beneath = length > 0 && allowed[length - 1] == '/';
        if (strncmp(path, allowed, length) == 0 && (beneath || path[length] == 0)) return true;
        allowed += length + (allowed[length] == '|');
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// Checking

// Whether the word is in the text, not as a part of a longer one.
static bool has_word(const char* text, const char* word) {
    size_t length = strlen(word);
    for (const char* p = text; (p = strstr(p, word)) != NULL; p++) {
        bool begins = p == text || !isalnum((unsigned char)p[-1]), ends = !isalnum((unsigned char)p[length]);
        if (begins && ends) return true;
    }
    return false;
}

static void expect_output(const Program* p, const Case* c) {
    static const char* const crashes[] = {"assert", "Assert", "Sanitizer", "runtime error"};
    const char* prefix = text_of("%s: ", PROGRAM_NAMES[c->program]);
    int sentences = 0;
    expect(!p->late, "it still ran after %.0f s", 1e-3 * TIME_LIMIT_MS);
    expect(p->late || program_code(p) == c->exit_code, "exit code %d, not %d", program_code(p), c->exit_code);
    for (const char* line = p->text[1]; *line;) {
        size_t length = strcspn(line, "\n");
        bool sentence = strncmp(line, prefix, strlen(prefix)) == 0;
        expect(sentence, "on stderr, not a sentence of the program: %.*s", (int)min_size(length, 200), line);
        sentences += sentence;
        line += length + (line[length] == '\n');
    }
    expect(sentences == c->sentences, "%d sentences on stderr, not %d", sentences, c->sentences);
    for (int i = 0; i < 5 && c->fragments[i]; i++) {
        bool found = strstr(p->text[1], c->fragments[i]) || (c->exit_code == 0 && strstr(p->text[0], c->fragments[i]));
        expect(found, "it does not say '%s'", c->fragments[i]);
    }
    for (int i = 0; i < 2; i++) {
        for (size_t w = 0; w < COUNT_OF(crashes); w++)
            expect(!strstr(p->text[i], crashes[w]), "the output has '%s'", crashes[w]);
        bool nan = has_word(p->text[i], "nan") || has_word(p->text[i], "NaN");
        expect(!nan || strstr(c->arguments, "nan"), "the output has 'nan'");
    }
}

static void expect_disk(const Snapshot* before, const Snapshot* after, const Case* c) {
    for (size_t i = 0; i < before->count; i++) {
        const Entry* now = snapshot_find(after, before->entries[i].path);
        bool same = now && now->hash == before->entries[i].hash;
        expect(same || path_may_change(before->entries[i].path, c->may_change), "%s was %s", before->entries[i].path,
               now ? "changed" : "removed");
    }
    for (size_t i = 0; i < after->count; i++) {
        const char* path = after->entries[i].path;
        if (snapshot_find(before, path)) continue;
        expect(path_may_change(path, c->may_change), "%s is new", path);
        expect(!strstr(path, ".tmp") && !strstr(path, ".old"), "%s is left over", path);
    }
}

// ------------------------------------------------------------------------------------------------
// One case, and all

// Makes and enters a directory with good shards and a text: train.bin, val.bin, unknown.bin (no vocabulary), text.txt.
static void directory_begin(const char* name) {
    char text[4000];
    need(mkdir(name, 0755) == 0 && chdir(name) == 0, "%s", name);
    put_shard("train.bin", 256, 4096, 1);
    put_shard("val.bin", 256, 200, 1);
    put_shard("unknown.bin", 256, 4096, 1);
    patch_i32("unknown.bin", 12, 0);
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + random_bits(2, RANDOM_TEST, 0, i) % 26);
    put_bytes("text.txt", text, sizeof text);
}

static const char* case_skip_reason(const Case* c) {
    if (c->conditions & MOUNTS && !mounting) return "this machine does not let the test mount a disk";
    if (c->conditions & AS_NOBODY && geteuid() != 0) return "only root can run the program as another user";
    if (c->memory_bytes && !test.usual_memory[c->program]) return "the program does not run under a limit of memory";
    return NULL;
}

static void case_run(const Case* c, size_t number) {
    const char* reason = case_skip_reason(c);
    char title[256], directory[32];
    snprintf(title, sizeof title, "%-8s exit %d  %s", PROGRAM_NAMES[c->program], c->exit_code, c->name);
    snprintf(directory, sizeof directory, "case_%03zu", number);
    Snapshot before = {NULL, 0, 0}, after = {NULL, 0, 0};
    if (reason) {
        skip(title, reason);
        return;
    }
    directory_begin(directory);
    if (c->prepare) c->prepare();
    directory_each(".", snapshot_add, &before);
    Program p = program_run(c);
    directory_each(".", snapshot_add, &after);
    if (program_code(&p) == EXIT_NOT_RUN) {
        skip(title, "cannot run the program as another user");
    } else {
        expect_output(&p, c);
        expect_disk(&before, &after, c);
        bool good = verdict("%s", title);
        if (!good) printf("        $ %s %s\n", PROGRAM_NAMES[c->program], c->arguments);
        if (!good) print_indented(p.text[0]);
        if (!good || test.show) print_indented(p.text[1]);
        fflush(stdout);
    }
    program_free(&p);
    free(before.entries);
    free(after.entries);
    need(chdir(root) == 0, "%s", root);
    if (c->conditions & MOUNTS) umount2(text_of("%s/run", directory), MNT_DETACH);
    remove_tree(directory);
}

// Runs that cases copy. Without them there is nothing to test.
static void runs_make(void) {
    static const char* const arguments[] = {"@ --out good --steps 4 --ckpt-every 2",
                                            "@ --out small --data small.bin --steps 4 --ckpt-every 2",
                                            "@ --out wide --channels 32 --steps 4 --ckpt-every 2"};
    directory_begin("made");
    put_shard("small.bin", 100, 4096, 1);
    for (size_t i = 0; i < COUNT_OF(arguments); i++) {
        Case c = {"a good run", TRAIN, 0, 0, arguments[i], {NULL}, NULL, 0, 0, 0, NULL};
        Program p = program_run(&c);
        if (!program_good(&p)) program_print(&p, arguments[i]);
        need(program_good(&p), "a good run fails");
        program_free(&p);
    }
    need(chdir(root) == 0, "%s", root);
}

// Whether each program starts under the usual limit of memory; one with AddressSanitizer does not.
static void memory_limit_try(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        Case help = {"help", (Which)i, 0, 0, "--help", {NULL}, NULL, 0, 0, (size_t)8 << 30, NULL};
        Program p = program_run(&help);
        test.usual_memory[i] = program_good(&p) ? help.memory_bytes : 0;
        program_free(&p);
    }
}

int main(int argc, char** argv) {
    int code;
    const char* programs[PROGRAMS] = {"./train", "build/generate", "build/tokenize", "build/corpus"};
    Flag flags[] = {
        {"train", FLAG_TEXT, &programs[TRAIN], "PATH", 0, 0, "the program", false},
        {"generate", FLAG_TEXT, &programs[GENERATE], "PATH", 0, 0, "the program", false},
        {"tokenize", FLAG_TEXT, &programs[TOKENIZE], "PATH", 0, 0, "the program", false},
        {"corpus", FLAG_TEXT, &programs[CORPUS], "PATH", 0, 0, "the program", false},
        {"show", FLAG_SWITCH, &test.show, "on|off", 0, 0, "print the sentences of cases that pass, too", false},
    };
    if (!flags_begin(&code, "test_errors", NULL, flags, COUNT_OF(flags), argc, argv)) return code;
    for (int p = 0; p < PROGRAMS; p++) {
        if (realpath(programs[p], test.paths[p]) != NULL && access(test.paths[p], X_OK) == 0) continue;
        fprintf(stderr, "test_errors: cannot run %s: %s; build it, or give --%s PATH\n", programs[p], strerror(errno),
                PROGRAM_NAMES[p]);
        return 1;
    }
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("ASAN_OPTIONS", "allocator_may_return_null=1:hard_rss_limit_mb=4000", 0);
    tests_begin("test_errors");
    root_enter();
    // Mounts in a name space of this process alone end with it, however it ends.
    bool alone = unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
    need(mkdir("probe", 0755) == 0, "probe");
    mounting = alone && mount("tmpfs", "probe", "tmpfs", 0, "size=64k") == 0 && umount("probe") == 0;
    memory_limit_try();
    runs_make();
    for (size_t i = 0; i < COUNT_OF(CASES); i++) case_run(&CASES[i], i);
    return tests_end();
}
