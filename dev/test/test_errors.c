// test_errors.c: what the programs do when a flag, a file or the system is wrong.
//
//   cc -std=c11 -O2 -I. dev/test/test_errors.c -o build/test_errors -lm -pthread
//   build/test_errors [--train PATH] [--generate PATH] [--tokenize PATH] [--corpus PATH]
//
// A table of cases. Each runs a program in a directory of its own that holds good and broken files, and checks:
//
//   - the exit code: 0 success, 1 a file or the system was wrong, 2 a flag was wrong; never a signal, never late
//   - stderr: as many messages as stated (usually one), each beginning with the name of the program, nothing else;
//     they say what is wrong, where, and what to do: the fragments of the case
//   - no sign of a crash in the output: assert, Sanitizer, runtime error, nan
//   - the disk: whatever existed is still there, byte for byte, and nothing is new, except at the paths that the case
//     allows; no temporary name is left
//
// Cases that this machine does not permit (mounting, changing the user) are skipped with the reason.

#include "llmtrain/base/flags.h"
#include "machine.h"
#include "pieces.h"

#include <grp.h>

#define TIME_LIMIT_MS 20000.0

typedef enum { TRAIN, GENERATE, TOKENIZE, CORPUS, PROGRAMS } Which;
static const char* const PROGRAM_NAMES[PROGRAMS] = {"train", "generate", "tokenize", "corpus"};

// What @ stands for in each program's arguments: flags of a tiny good run, without those that the case itself gives;
// !--data removes just --data from them.
static const char* const GOOD_FLAGS[PROGRAMS][8] = {
    {"--data train.bin", "--out run", "--layers 1", "--heads 2", "--channels 16", "--seq 16", "--batch 2", "--steps 2"},
    {"--out run", "--prompt a"},
    {"--bytes text.txt", "--out new"},
    {"--out new", "--bytes 1000"},
};

// Conditions under which a program runs: as an unprivileged user, since root may open any file; with /dev/full, or a
// pipe without a reader, as standard output; with the default action of SIGXFSZ, which kills.
enum { AS_NOBODY = 1, STDOUT_FULL = 2, XFSZ_KILLS = 4, STDOUT_GONE = 8 };

typedef struct {
    const char* name;
    Which program;
    int exit_code;
    int sentences;           // on stderr; 0: one if the exit code is not 0
    const char* prepare;     // steps in the directory of the case, which has good shards and a text: prepare_step
    const char* arguments;   // ~ stands for a blank in a word
    const char* says;        // fragments between ' ... ', in the messages; also in stdout if the exit code is 0
    unsigned conditions;
    size_t file_bytes;       // RLIMIT_FSIZE; 0: none
    size_t memory_bytes;     // RLIMIT_AS; 0: the default
    const char* may_change;  // paths separated by |; one that ends in / includes all below it; NULL: nothing
} Case;

// ------------------------------------------------------------------------------------------------
// The cases

// RUN: a run made once, before the cases, with two checkpoints. OLDER: the same with the first checkpoint only. DISK: a
// small disk, almost filled by the first checkpoint.
#define NEWEST "run/step_00000004"
#define BEFORE "run/step_00000002"
#define MANIFEST NEWEST "/manifest.json"
#define TENSORS NEWEST "/rank_00000.safetensors"  // a header, then 30 KB for each array
#define RUN "copy ../made/good run"
#define OLDER RUN ";remove " NEWEST
#define DISK "mkdir run;mount run size=192k,mode=0755;copy ../made/good/step_00000002 " BEFORE
#define LONG_DATA "cut train.bin 33555458;int train.bin 8 16777217"  // for the longest sequence; mostly a hole
#define TIMES_5(text) text text text text text
#define TIMES_20(text) TIMES_5(text) TIMES_5(text) TIMES_5(text) TIMES_5(text)
#define SHARDS "shard new_train_000000.bin 256 50;shard new_val_000000.bin 256 50"
#define TOKENIZER(name, tokens)                                                                                  \
    "shard " name "_train_0.bin 256 100;mkdir " name "_tokenizer;write " name "_tokenizer/tokenizer.json "       \
    "{'decoder':{'type':'ByteLevel'},'pre_tokenizer':{'type':'ByteLevel','add_prefix_space':false},"             \
    "'model':{'type':'BPE','vocab':{" tokens "},'merges':[]}}"
#define TEXTS "write new_train.txt old;write new_val.txt old;write new.json {}"

// What may change: only the log, of an existing run or of one that failed in its first step; or checkpoints, too.
#define LOG "run/metrics.jsonl"
#define NEW_LOG "run|" LOG
#define NEW_RUN "run|run/"
#define LAST_STEP LOG "|run/step_00000006|run/step_00000006/"
#define TWO_STEPS LAST_STEP "|" NEWEST "|" NEWEST "/"

#define RESUME "@ --resume --steps 6 --ckpt-every 2"

#define CASE(which, code, title, steps, words, text, ...) \
    {.program = which, .exit_code = code, .name = title, .prepare = steps, .arguments = words, .says = text, \
     __VA_ARGS__}
// A wrong flag of train, or flags that do not fit together: the exit code is 2.
#define WRONG(title, words, text) CASE(TRAIN, 2, title, "", words, text)
// A wrong value of a flag.
#define VALUE(which, flag, value, wanted) \
    CASE(which, 2, flag " " value, "", "@ " flag " " value, flag " is '" value "' ... " wanted)
// Something wrong with train's input; nothing on the disk may change. SHARD: with train.bin.
#define WORLD(title, steps, words, text, ...) CASE(TRAIN, 1, title, steps, words, text, __VA_ARGS__)
#define SHARD(title, steps, text) CASE(TRAIN, 2, title, steps, "@", "train.bin " text)
// train --resume with flags that differ from the run's.
#define OTHER(title, words, was, is) \
    CASE(TRAIN, 2, "resume: other " title, RUN, RESUME " " words, \
          "belongs to another run ... " was " ... here it is " is " ... another --out")
// train --resume over two checkpoints: the damaged newest is reported, and the run resumes from the one before it.
#define PASSED_OVER(title, verb, file, rest, text) \
    CASE(TRAIN, 0, "resume: " title, RUN ";" verb " " file " " rest, RESUME, \
         file " ... " text " ... trying the checkpoint before ... resumed from " BEFORE, \
         .sentences = 1, .may_change = TWO_STEPS)
// The same, with text replaced in the newest's manifest, whose checksum is right.
#define MANIFEST_SAYS(title, old_and_new, text) \
    CASE(TRAIN, 0, "resume: manifest has " title, RUN ";edit " MANIFEST " " old_and_new, RESUME, \
         text " ... trying the checkpoint before ... resumed from " BEFORE, \
         .sentences = 1, .may_change = TWO_STEPS)

static const Case CASES[] = {
    // The command line itself.
    WRONG("unknown flag, near --layers", "@ --layer 2", "unknown flag --layer ... did you mean --layers?"),
    WRONG("unknown flag, near --weight-decay", "@ --weigth-decay 0.1",
          "--weigth-decay ... did you mean --weight-decay?"),
    WRONG("unknown flag, two letters exchanged", "@ --setps 5", "unknown flag --setps ... did you mean --steps?"),
    WRONG("unknown flag, near --kv-heads", "@ --kv_heads 1", "did you mean --kv-heads?"),
    WRONG("unknown flag, near nothing", "@ --quetzalcoatl 1", "unknown flag --quetzalcoatl ... --help"),
    WRONG("unknown flag of 100 letters",
          "@ --aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1",
          "unknown flag --aaaa ... --help"),
    WRONG("unknown flag with =", "@ --layer=2", "unknown flag --layer; ... did you mean --layers?"),
    WRONG("two dashes alone", "@ --", "unknown flag -- ... --help"),
    WRONG("a word that is no flag", "@ train.bin", "'train.bin' is not a flag ... --name value"),
    WRONG("one dash", "@ -steps 5", "'-steps' is not a flag ... --name value"),
    WRONG("an empty word", "@ ''", "'' is not a flag ... --name value"),
    WRONG("count without value, at the end", "@ !--steps --steps", "--steps needs a value ... optimizer steps"),
    WRONG("count without value, before a flag", "@ --warmup --lr 1", "--warmup needs a value"),
    WRONG("text without value", "@ !--out --out", "--out needs a value ... directory"),
    WRONG("choice without value", "@ --family", "--family needs a value ... gpt2|llama"),
    WRONG("flag twice", "@ --lr 1 --lr 2", "--lr is given twice"),
    WRONG("flag twice, the second with =", "@ --seed 1 --seed=2", "--seed is given twice"),
    WRONG("switch twice", "@ --plan --plan off", "--plan is given twice"),

    // Values of each kind.
    VALUE(TRAIN, "--layers", "two", "whole number from 1 to 1000"),
    VALUE(TRAIN, "--layers", "-1", "whole number from 1 to 1000"),
    VALUE(TRAIN, "--layers", "0", "from 1 to"),
    VALUE(TRAIN, "--heads", "0", "from 1 to"),
    VALUE(TRAIN, "--channels", "0", "from 1 to"),
    VALUE(TRAIN, "--batch", "0", "from 1 to"),
    VALUE(TRAIN, "--layers", "1001", "to 1000"),
    VALUE(TRAIN, "--steps", "99999999999999999999", "whole number"),
    WRONG("count: 2^64", "@ --seed 18446744073709551616", "--seed is ... whole number"),
    WRONG("count: 2^64 - 1", "@ --seed 18446744073709551615", "--seed is ... whole number"),
    VALUE(TRAIN, "--steps", "2.5", "whole number"),
    VALUE(TRAIN, "--steps", "1e3", "whole number"),
    VALUE(TRAIN, "--batch", "0x10", "whole number"),
    VALUE(TRAIN, "--batch", "+2", "whole number"),
    WRONG("count: empty", "@ --batch ''", "--batch is '' ... whole number"),
    WRONG("count: empty after =", "@ --batch=", "--batch is '' ... whole number"),
    VALUE(TRAIN, "--top-k", "nan", "whole number"),
    VALUE(TRAIN, "--steps", "10x", "whole number"),
    VALUE(TRAIN, "--lr", "fast", "number from 0 to 100"),
    VALUE(TRAIN, "--lr", "-0.1", "number from 0 to 100"),
    VALUE(TRAIN, "--lr", "1e999", "number from 0 to 100"),
    VALUE(TRAIN, "--lr", "nan", "number from 0 to 100"),
    VALUE(TRAIN, "--clip", "inf", "number from 0 to"),
    VALUE(TRAIN, "--clip", "-inf", "number from 0 to"),
    WRONG("real: empty", "@ --lr ''", "--lr is '' ... number from"),
    VALUE(TRAIN, "--lr", "1e-3,", "number from"),
    VALUE(TRAIN, "--beta2", "1", "number from 0 to 0.99999"),
    VALUE(TRAIN, "--dropout", "1", "number from 0 to 0.9"),
    VALUE(TRAIN, "--top-p", "1.1", "number from 0 to 1"),
    VALUE(TRAIN, "--rope-theta", "0", "number from 1 to"),
    WRONG("choice: not in the list", "@ --optimizer adam", "--optimizer is 'adam' ... give one of ... adamw"),
    WRONG("choice: empty", "@ --family ''", "--family is '' ... gpt2|llama"),
    VALUE(TRAIN, "--family", "gpt2|llama", "give one of"),
    VALUE(TRAIN, "--schedule", "Cosine", "cosine"),
    VALUE(TRAIN, "--tied", "maybe", "on or off"),
    WRONG("switch: a number", "@ --masters=1", "--masters is '1' ... on or off"),
    WRONG("recompute without a budget", "@ --recompute auto", "--recompute auto needs --memory"),
    WRONG("train: no such tensor", "@ --train block.*,heads", "--train heads matches no tensor"),
    WRONG("train: nothing", "@ --train=", "--train is empty"),
    WRONG("recompute unknown", "@ --recompute all", "--recompute is 'all'; give one of none|norms"),
    WRONG("recompute within nothing", "@ --recompute auto --memory 0.000001",
          "needs 0. ... even with --recompute block ... --memory 1e-06 ... smaller"),
    CASE(TRAIN, 1, "plan within nothing", "", "@ --plan --memory 0.00001",
         "the run does not fit --memory 1e-05 ... --memory larger"),
    CASE(TRAIN, 0, "plan: activations of a single block", "", "@ --plan --offload activations --offload-dir .",
         "No activations are offloaded: all activations fit in the three blocks kept in memory."),
    VALUE(TRAIN, "--memory", "nan", "from 0 to"),
    VALUE(TRAIN, "--memory", "-1", "from 0 to"),
    VALUE(TRAIN, "--optimizer-rank", "0", "from 1 to 65536"),
    VALUE(TRAIN, "--spike-trace", "-1", "from 0 to"),
    VALUE(TRAIN, "--spike-loss", "nan", "from 0 to"),
    WRONG("offload of what there is not", "@ --offload all", "--offload is 'all'; give one of none|optimizer"),
    WRONG("offload to nowhere", "@ --offload optimizer", "--offload needs --offload-dir"),
    WRONG("offload of activations to nowhere", "@ --offload activations", "--offload needs --offload-dir"),
    WORLD("offload of activations: directory missing", "",
          "@ !--layers --layers 4 --offload activations --offload-dir none",
          "activations (--offload) in none ... No such file ... check the path"),
    WRONG("a directory for nothing", "@ --offload-dir new", "--offload-dir needs --offload"),
    WORLD("offload: directory missing", "", "@ --offload optimizer --offload-dir none",
          "optimizer state (--offload) in none ... No such file ... check the path"),
    WORLD("offload: directory is a file", "", "@ --offload optimizer --offload-dir train.bin",
          "in train.bin ... Not a directory ... check the path"),
    WORLD("offload: directory of another user", "mkdir off", "@ !--out --offload optimizer --offload-dir off",
          "in off ... Permission denied", .conditions = AS_NOBODY),
    WORLD("offload: disk full", "mkdir run;mount run size=8k,mode=0777",
          "@ !--out --offload optimizer --offload-dir run", "run ... No space left"),
    WRONG("switch: empty", "@ --plan=", "--plan is '' ... on or off"),

    // Flags that do not fit together.
    WRONG("prompt empty", "@ --prompt ''", "--prompt is empty ... at least one character"),
    WRONG("resume without out", "@ !--out --resume", "--resume needs --out"),
    WRONG("total batch no multiple", "@ --total-batch 33", "--total-batch 33 ... multiple ... 32 ... choose"),
    WRONG("total batch below one micro-batch", "@ --total-batch 16", "--total-batch 16 ... multiple ... 32"),
    WRONG("total batch no multiple, sequence from the preset",
          "@ !--seq --model llama:15M --ffn 64 --vocab 256 --total-batch 100",
          "--total-batch 100 ... multiple ... 512"),
    WRONG("overlap as long as a sequence", "@ --val val.bin --val-overlap 16",
          "--val-overlap 16 ... smaller than --seq"),
    WRONG("nothing to do", "", "no training data ... --data ... build/generate"),
    WRONG("no data, no checkpoint directory", "@ !--data !--out", "no training data ... --data"),
    WRONG("out empty", "@ --out ''", "--out ... empty"),
    WRONG("out too long", "@ --out " TIMES_20(TIMES_20("0123456789")),
          "--out is longer than 3900 characters; give a shorter path"),
    WRONG("more tiers than there may be", "@ --ckpt-tier a:1 " TIMES_5("--ckpt-tier a:1 ") TIMES_5("--ckpt-tier b:1 ")
          TIMES_5("--ckpt-tier c:1 ") "--ckpt-tier d:1", "--ckpt-tier is given more than 16 times; give fewer"),
    WRONG("tier without steps", "@ --ckpt-tier tier", "--ckpt-tier is 'tier' ... a directory, steps ... :20:2"),
    WRONG("tier without a directory", "@ --ckpt-tier :5", "--ckpt-tier is ':5' ... a directory"),
    WRONG("tier every 0 steps", "@ --ckpt-tier tier:0", "--ckpt-tier is 'tier:0' ... steps"),
    WRONG("tier with an empty number", "@ --ckpt-tier tier:5:", "--ckpt-tier is 'tier:5:' ... how many to keep"),
    WRONG("tier with a sign", "@ --ckpt-tier tier:-5", "--ckpt-tier is 'tier:-5' ... steps"),
    WRONG("tier without out", "@ !--out --ckpt-tier tier:5", "--ckpt-tier needs --out"),
    WRONG("model unknown", "@ --model gpt3", "no model 'gpt3' ... gpt2:124M ... llama:8B"),
    WRONG("model empty", "@ --model ''", "no model '' ... gpt2:124M"),
    WRONG("model of other case", "@ --model GPT2:124M", "no model 'GPT2:124M' ... gpt2:124M"),
    WRONG("no sizes at all", "--data train.bin", "lacks --layers ... --model"),
    WRONG("no sequence length", "@ !--seq", "lacks --seq ... --context"),
    WRONG("sequence longer than context", "@ --context 8",
          "16 ... context of 8 ... --seq smaller ... --context larger"),
    WRONG("sequence longer than the preset's", "@ --model llama:15M --ffn 64 --seq 512 --vocab 256",
          "512 ... context of 256 ... --seq smaller"),
    WRONG("heads do not divide channels", "@ --heads 3", "3 heads do not divide 16 channels ... choose --heads"),
    WRONG("more heads than channels", "@ --heads 32", "32 heads do not divide 16 channels ... choose --heads"),
    WRONG("kv-heads do not divide heads", "@ --heads 4 --kv-heads 3",
          "3 key/value heads do not divide 4 heads ... --kv-heads"),
    WRONG("more kv-heads than heads", "@ --kv-heads 4", "4 key/value heads do not divide 2 heads ... --kv-heads"),
    WRONG("odd head size of llama", "@ --family llama --channels 6",
          "head size 3 is odd ... --channels / --heads even"),
    WRONG("a relative's field in gpt2", "@ --qkv-bias on", "--qkv-bias, --qk-norm and --rope-scaling ... llama"),
    WRONG("rotary scaling without its factor", "@ --family llama --rope-scaling linear", "needs --rope-factor"),
    WRONG("end of text outside the vocabulary", "@ --documents mask --end-of-text 256",
          "--end-of-text 256 is outside the data's vocabulary of 256"),
    WRONG("end of text without --documents", "@ --end-of-text 10", "--end-of-text is for --documents mask"),
    WRONG("documents of a tokenizer without an end", "@ --documents mask",
          "--documents mask needs the token between documents ... has none; give --end-of-text N"),
    WRONG("stages that do not divide the ranks", "@ --ranks 3 --pp 2",
          "--pp 2 does not divide the 3 ranks ... choose a divisor"),
    WRONG("more stages than blocks", "@ --ranks 2 --pp 2",
          "2 stages ... at least 2 blocks, and the model has 1 ... --pp or --chunks smaller"),
    WRONG("more chunks than blocks", "@ !--layers --layers 5 --ranks 2 --pp 2 --pipeline interleaved --chunks 3",
          "2 stages with --chunks 3 needs at least 6 blocks ... has 5 ... --chunks smaller"),
    WRONG("a pipeline of sharded gradients", "@ !--layers --layers 2 --ranks 2 --pp 2 --zero 2",
          "--zero 2 with --pp 2 ... choose --zero 1"),
    WRONG("chunks of no interleaved pipeline", "@ !--layers --layers 4 --ranks 2 --pp 2 --chunks 2",
          "--chunks 2 is for --pipeline interleaved ... leave out --chunks"),
    WRONG("chunks without stages", "@ --pipeline interleaved --chunks 2", "--chunks 2 needs several stages ... --pp"),
    WRONG("samples of a pipeline", "@ !--layers --layers 2 --ranks 2 --pp 2 --sample-every 1",
          "--sample-every needs all blocks on rank 0 ... build/generate"),
    WRONG("split backwards of what is recomputed",
          "@ !--layers --layers 2 --ranks 2 --pp 2 --pipeline zb-h1 --recompute block",
          "zb-h1 and zb-h2 need what --recompute would drop ... 1f1b"),
    WRONG("offloaded activations of a pipeline",
          "@ !--layers --layers 2 --ranks 2 --pp 2 --offload activations --offload-dir .",
          "activations cannot be offloaded ... --pp"),
    WRONG("total batch that pipelines do not divide", "@ !--layers --layers 2 --ranks 4 --pp 2 --total-batch 96",
          "--total-batch 96 ... multiple of the 64 tokens that all ranks compute at a time"),
    WRONG("a shard of pipelines that does not divide them",
          "@ !--layers --layers 2 --ranks 4 --pp 2 --zero 1 --shard 4",
          "--shard 4 does not divide the 2 pipelines"),
    WRONG("ranks that share rows and do not divide the ranks", "@ --ranks 3 --cp 2",
          "--cp 2 does not divide the 3 ranks ... choose a divisor"),
    WRONG("ranks that share rows, times stages", "@ !--layers --layers 2 --ranks 6 --cp 2 --pp 2",
          "--cp 2 times --pp 2 is 4, which does not divide the 6 ranks ... choose divisors"),
    WRONG("heads that ranks cannot share", "@ --ranks 4 --cp 4",
          "--cp 4 does not divide the model's 2 heads ... choose a divisor"),
    WRONG("key/value heads that ranks cannot share", "@ --family llama --kv-heads 1 --ranks 2 --cp 2 --kv-copies 1",
          "--cp 2 does not divide the model's 1 key/value heads times --kv-copies, which is 1 ... give --kv-copies 2"),
    WRONG("more copies of key/value heads than heads", "@ --family llama --kv-heads 1 --kv-copies 4",
          "--kv-copies 4 does not divide 2, the number of heads that share a key/value head ... choose a divisor"),
    WRONG("samples with copies of key/value heads", "@ --family llama --kv-heads 1 --kv-copies 2 --sample-every 1",
          "--sample-every reads key/value heads without copies ... --kv-copies 2 ... build/generate"),
    WRONG("sequences that ranks cannot share", "@ !--seq --seq 31 --ranks 2 --cp 2",
          "--cp 2 does not divide sequences of 31 tokens ... another --seq"),
    WRONG("parts of rows that do not divide sequences", "@ --row-leaves 5",
          "--row-leaves 5 does not divide sequences of 16 tokens ... another --seq"),
    WRONG("parts of rows that ranks cannot share", "@ --ranks 2 --cp 2 --row-leaves 1",
          "--cp 2 does not divide --row-leaves, which is 1 ... give --row-leaves 2"),
    WRONG("copies that ranks with the same rows share in part",
          "@ --batch 1 --ranks 6 --cp 2 --zero 1 --shard 3", "--shard 3 and --cp 2: one must divide the other"),
    WRONG("samples of ranks that share rows", "@ --ranks 2 --cp 2 --sample-every 1",
          "--sample-every needs all rows on rank 0 ... build/generate"),
    WRONG("choices of what is recomputed that may differ", "@ --ranks 2 --cp 2 --recompute auto --memory 1",
          "--recompute auto may choose differently ... choose a level"),
    WRONG("ranks that share layers, and only one rank", "@ --tp 2",
          "--tp 2 needs 2 ranks, and there is one; give --ranks 2, or start them with torchrun"),
    WRONG("ranks that share layers and do not divide the ranks", "@ --ranks 3 --tp 2",
          "--tp 2 does not divide the 3 ranks ... choose a divisor"),
    WRONG("ranks that share layers, times those that share rows", "@ --ranks 6 --cp 2 --tp 2",
          "--tp 2 times --cp 2 is 4, which does not divide the 6 ranks ... choose divisors"),
    WRONG("ranks that share layers, rows and blocks", "@ !--layers --layers 2 --ranks 4 --cp 2 --tp 2 --pp 2",
          "--tp 2 times --cp 2 times --pp 2 is 8, which does not divide the 4 ranks"),
    WRONG("ranks of no tree", "@ --heads 3 --channels 24 --ffn 96 --seq 48 --ranks 3 --tp 3",
          "--tp 3 is not a power of two ... choose one, such as 4"),
    WRONG("leaves of no tree", "@ --leaves 6", "--leaves 6 is not a power of two ... choose one, such as 4"),
    WRONG("leaves that ranks cannot share", "@ --ranks 2 --tp 2 --leaves 1",
          "--tp 2 does not divide --leaves, which is 1 ... give --leaves 2, or --reduce storage ... other bits"),
    WRONG("leaves that ranks cannot share, reduced in float", "@ --ranks 2 --tp 2 --leaves 1 --reduce float",
          "--tp 2 does not divide --leaves, which is 1"),
    WRONG("heads that leaves do not divide", "@ --leaves 4",
          "--leaves 4 does not divide the model's 2 heads ... choose a power of two that does"),
    WRONG("key/value heads that ranks with parts of layers cannot share",
          "@ --family llama --kv-heads 1 --ranks 2 --tp 2",
          "--tp 2 does not divide the model's 1 key/value heads ... choose a power of two that does"),
    WRONG("heads that ranks with parts of layers and of rows cannot share", "@ --ranks 4 --tp 2 --cp 2",
          "--tp 2 times --cp 2 does not divide the model's 2 heads ... choose a divisor"),
    WRONG("a feed-forward that ranks cannot share", "@ --ffn 72 --ranks 2 --tp 2",
          "--tp 2 needs a feed-forward that is a multiple of 8 x 2 wide, and --ffn is 72 ... choose another"),
    WRONG("a feed-forward of no groups", "@ --ffn 20 --leaves 2",
          "--leaves 2 needs a feed-forward that is a multiple of 8 x 2 wide, and --ffn is 20"),
    WRONG("sequences that ranks with parts of layers cannot share", "@ !--seq --seq 31 --ranks 2 --tp 2",
          "--tp 2 does not divide sequences of 31 tokens ... another --seq"),
    WRONG("sequences that leaves do not divide", "@ !--seq --seq 18 --leaves 2 --row-leaves 2",
          "--leaves 2 times --row-leaves 2 does not divide sequences of 18 tokens ... another --seq"),
    WRONG("samples of ranks that share layers", "@ --ranks 2 --tp 2 --sample-every 1",
          "--sample-every needs whole layers on rank 0 ... --tp 2 ... build/generate"),
    WRONG("choices of what is recomputed that ranks with the same rows make",
          "@ --ranks 2 --tp 2 --recompute auto --memory 1", "--recompute auto may choose differently ... --tp; choose"),
    WRONG("an optimizer of whole matrices for parts of them", "@ --ranks 2 --tp 2 --optimizer muon",
          "--optimizer muon needs whole tensors ... --tp 2 ... choose adamw, sgd, momentum or lion"),
    WRONG("an optimizer of blocks for parts of tensors", "@ --ranks 2 --tp 2 --optimizer adamw-8bit",
          "--optimizer adamw-8bit needs whole tensors"),
    WRONG("an optimizer whose rounding goes by an element's place", "@ --ranks 2 --tp 2 --optimizer adamw-bf16",
          "--optimizer adamw-bf16 rounds by an element's place ... choose adamw"),
    WRONG("a shard of ranks with the same part that does not divide them", "@ --ranks 4 --tp 2 --zero 1 --shard 4",
          "--shard 4 does not divide the 2 ranks with the same part of layers"),
    WRONG("total batch that ranks with parts of layers do not divide", "@ --ranks 4 --tp 2 --total-batch 96",
          "--total-batch 96 ... multiple of the 64 tokens that all ranks compute at a time"),
    CASE(TRAIN, 2, "resume: ranks that share layers, more than the leaves", RUN, RESUME " --ranks 2 --tp 2",
         "--tp 2 does not divide --leaves, which is 1 (given, or from the checkpoint) ... give --leaves 2"),
    CASE(TRAIN, 2, "resume: ranks that share rows, more than the parts", RUN, RESUME " --ranks 2 --cp 2",
         "--cp 2 does not divide --row-leaves, which is 1 (given, or from the checkpoint) ... give --row-leaves 2"),
    VALUE(TRAIN, "--tp", "0", "from 1 to 128"),
    VALUE(TRAIN, "--leaves", "129", "from 0 to 128"),
    VALUE(TRAIN, "--kv-copies", "1025", "from 0 to 1024"),
    VALUE(TRAIN, "--cp", "0", "from 1 to 128"),
    VALUE(TRAIN, "--row-leaves", "1025", "from 0 to 1024"),
    VALUE(TRAIN, "--pp", "0", "from 1 to 512"),
    VALUE(TRAIN, "--pipeline", "dual", "give one of gpipe|1f1b|interleaved|zb-h1|zb-h2"),
    VALUE(TRAIN, "--chunks", "256", "from 0 to 255"),
    WRONG("head size above 256", "@ --channels 1024", "head size 512 is over 256 ... more --heads"),

    // Memory.
    WORLD("parameters of petabytes", "", "@ --layers 1000 --heads 1024 --channels 65536 --ffn 1048576",
          "GB ... are free ... smaller"),
    WORLD("activations of petabytes", LONG_DATA, "@ --batch 65536 --seq 16777216",
          "GB ... are free ... --batch ... --seq"),
    WORLD("activations beyond 2^64 bytes", LONG_DATA,
          "@ --batch 65536 --seq 16777216 --channels 65536 --heads 1024 --layers 1000", "GB ... --batch ... --seq"),
    WORLD("activations of exactly 2^64 bytes, gone when the sum wraps", LONG_DATA,
          "@ --family llama --layers 2 --heads 1 --channels 16 --ffn 465986 --seq 16777216 --batch 65536",
          "GB ... --batch ... --seq"),
    WORLD("the same, planned only", LONG_DATA,
          "@ --plan --family llama --layers 2 --heads 1 --channels 16 --ffn 465986 --seq 16777216 --batch 65536",
          "GB ... --batch"),
    WORLD("less memory than is free", "", "@ --channels 1024 --heads 16 --layers 8", "GB of memory ... smaller",
          .memory_bytes = (size_t)1 << 30),
    CASE(GENERATE, 1, "no memory for the text", RUN, "@ --tokens 1000000000", "out of memory ... --tokens smaller",
         .memory_bytes = (size_t)1 << 30),

    // Training data.
    WORLD("no file matches", "remove train.bin", "@", "no file matches 'train.bin' ... check the name ... tokenize"),
    WORLD("no file matches a pattern", "", "@ --data none_*.bin", "no file matches 'none_*.bin' ... tokenize"),
    WORLD("data empty", "", "@ --data ''", "no file matches '' ... check the name"),
    WORLD("data is a directory", "remove train.bin;mkdir train.bin", "@", "train.bin is not a file ... check the path"),
    WORLD("data is a pipe", "remove train.bin;pipe train.bin", "@", "train.bin is not a file ... check the path"),
    WORLD("data is unreadable", "chmod train.bin 0", "@ !--out", "train.bin ... Permission denied",
          .conditions = AS_NOBODY),
    SHARD("shard empty", "cut train.bin 0", "is not a token shard ... 0 bytes ... tokenize"),
    SHARD("shard is text", "copy text.txt train.bin", "is not a token shard ... tokenize"),
    SHARD("shard shorter than its header", "cut train.bin 1000", "is not a token shard ... 1000 bytes ... tokenize"),
    SHARD("shard cut", "cut train.bin 5000", "is damaged or half copied ... 4096 tokens ... make it again"),
    SHARD("shard with half a token", "cut train.bin 5001", "is damaged or half copied ... make it again"),
    SHARD("magic wrong", "int train.bin 0 12345678", "is not a token shard ... 12345678 ... 20240520 ... tokenize"),
    SHARD("version wrong", "int train.bin 4 3", "... version 3 ... 1 ... tokenize the text again"),
    SHARD("count larger than the file", "int train.bin 8 5000", "... promises 5000 tokens ... 8192 bytes ... again"),
    SHARD("count smaller than the file", "int train.bin 8 4000", "... promises 4000 tokens ... 8192 bytes ... again"),
    SHARD("count negative", "int train.bin 8 -1", "is damaged ... promises 4294967295 tokens ... again"),
    SHARD("count huge", "int train.bin 16 0x7fffffff", "is damaged ... promises 9223372032559812608 tokens ... again"),
    SHARD("count whose bytes overflow", "int train.bin 16 0x80000000",
          "is damaged ... promises 9223372036854779904 ... again"),
    SHARD("vocabulary negative", "int train.bin 12 -256", "is damaged ... vocabulary of -256 ... again"),
    SHARD("vocabulary beyond the width", "int train.bin 12 65537", "is damaged ... vocabulary of 65537 ... again"),
    SHARD("entropy impossible", "int train.bin 28 0x7e37e43c", "is damaged ... entropy ... again"),
    WRONG("vocabulary unknown and not given", "@ --data unknown.bin", "lacks --vocab"),
    SHARD("shard without tokens", "shard train.bin 256 0", "has 0 tokens ... needs 17 ... give more text"),
    SHARD("shard too short for a sequence", "shard train.bin 256 16",
          "has 16 tokens ... needs 17 ... shorter sequence"),
    CASE(TRAIN, 2, "sequence longer than the shard", "", "@ --seq 5000",
          "train.bin has 4096 tokens ... needs 5001 ... shorter sequence"),
    CASE(TRAIN, 2, "token out of range in the first step", "tokens train.bin 60000 0 4096", "@",
          "token 60000 ... of train.bin ... vocabulary of 256 ... make the shards again", .may_change = NEW_LOG),
    CASE(TRAIN, 2, "token out of range late", "shard train.bin 256 320;tokens train.bin 256 200 1", "@ --steps 20",
          "token 256 at position 200 of train.bin ... vocabulary of 256 ... make the shards again",
          .may_change = NEW_RUN),
    CASE(TRAIN, 2, "token out of range, vocabulary unknown", "", "@ --data unknown.bin --vocab 10",
          "of unknown.bin ... vocabulary of 10 ... give the model the tokenizer's", .may_change = NEW_LOG),
    CASE(TRAIN, 2, "shards of two widths", "shard mixed_0.bin 256 100;shard mixed_1.bin 70000 100",
          "@ --data mixed_*.bin",
          "mixed_0.bin ... 2 bytes ... mixed_1.bin of 4 ... one tokenizer"),
    CASE(TRAIN, 2, "shards of two vocabularies", "shard mixed_0.bin 256 100;shard mixed_1.bin 100 100",
          "@ --data mixed_*.bin",
          "mixed_0.bin ... 256 ... mixed_1.bin of 100 ... one tokenizer"),
    WORLD("shards of two tokenizers", TOKENIZER("one", "'a':0,'b':1") ";" TOKENIZER("two", "'a':1,'b':0"),
          "@ --data ???_train_0.bin", "two_tokenizer is ... but ... one_tokenizer is ... one tokenizer"),
    CASE(TRAIN, 2, "second shard damaged", "shard mixed_0.bin 256 100;shard mixed_1.bin 256 100;cut mixed_1.bin 1100",
          "@ --data mixed_*.bin", "mixed_1.bin is damaged ... again"),
    CASE(TRAIN, 2, "a weight for some of the data", "", "@ --data train.bin:1,val.bin",
          "'val.bin' has no weight; give one to each"),
    CASE(TRAIN, 2, "a weight of the data below zero", "", "@ --data train.bin:-1,val.bin:1",
          "weight of 'train.bin' is -1; give a number above 0"),
    CASE(TRAIN, 2, "a mixture with a shard twice", "", "@ --data train.bin:1,*.bin:1",
          "train.bin is in two parts ... one weight"),
    CASE(TRAIN, 2, "vocabulary of the data is another", "", "@ --vocab 300",
         "--data ... 256 ... 300 ... give --vocab 256"),
    CASE(TRAIN, 2, "vocabulary of the data is not the preset's", "", "@ --model llama:15M --seq 16",
         "--data ... 256 ... 32000 ... give --vocab 256"),

    // Validation data.
    WORLD("no validation file matches", "", "@ --val none_*.bin", "no file matches 'none_*.bin' ... tokenize"),
    CASE(TRAIN, 2, "vocabulary of the validation data is another", "shard val.bin 100 200", "@ --val val.bin",
         "--val ... 100 ... 256 ... tokenizer"),
    CASE(TRAIN, 2, "weights of validation data", "", "@ --val val.bin:2,train.bin:1",
          "'val.bin' has the weight 2; weights are for training ... leave it out"),
    CASE(TRAIN, 2, "validation data too short", "shard val.bin 256 10", "@ --val val.bin",
          "val.bin has 10 tokens ... needs 17 ... give more text"),
    CASE(TRAIN, 2, "validation token out of range", "tokens val.bin 999 30 1", "@ --val val.bin --val-every 1",
          "token 999 at position 30 of val.bin ... vocabulary of 256 ... make the shards again", .may_change = NEW_RUN),

    // Where the output goes.
    WORLD("out is a file", "", "@ --out text.txt", "text.txt ... File exists ... give another path, or move it away"),
    WORLD("out's parent is a file", "", "@ --out text.txt/run", "text.txt ... File exists ... move it away"),
    WORLD("out in /proc", "", "@ --out /proc/llmtrain", "cannot make the directory /proc/llmtrain ... check the path"),
    WORLD("out in /sys", "", "@ --out /sys/llmtrain", "cannot make the directory /sys/llmtrain ... choose a path"),
    WORLD("out is a device", "", "@ --out /dev/full", "/dev/full ... File exists ... move it away"),
    WORLD("out where this user may not write", "", "@",
          "cannot make the directory run ... Permission denied ... choose a path that this user may access",
          .conditions = AS_NOBODY),
    WORLD("tier is a file", "", "@ --ckpt-tier text.txt:5", "text.txt ... File exists ... move it away",
          .may_change = NEW_LOG),
    WORLD("tier where this user may not write", "mkdir run;mkdir tier;chmod run 0777;chmod tier 0555",
          "@ --ckpt-tier tier:5", "cannot make the directory tier/ ... Permission denied ... choose a path",
          .conditions = AS_NOBODY, .may_change = NEW_LOG),
    WORLD("offload to a directory that is missing", "", "@ --offload optimizer --offload-dir d",
          "the optimizer state (--offload) in d ... No such file ... check the path"),
    WORLD("offload to a file", "", "@ --offload optimizer --offload-dir text.txt",
          "the optimizer state (--offload) in text.txt ... Not a directory ... check the path"),
    WORLD("offload where this user may not write", "mkdir d;chmod d 0555",
          "@ !--out --offload optimizer --offload-dir d",
          "the optimizer state (--offload) in d ... Permission denied ... choose a path", .conditions = AS_NOBODY),
    WORLD("offload to a read-only disk", DISK ";freeze run", "@ !--out --offload optimizer --offload-dir run",
          "the optimizer state (--offload) in run ... Read-only file system ... choose a path"),
    WORLD("offload to a full disk", "mkdir run;mount run size=32k,mode=0755",
          "@ !--out --offload optimizer "
          "--offload-dir run",
          "cannot reserve 0.0 ... GB ... in run ... No space left ... free some space"),
    WORLD("run of another user", RUN, RESUME,
          "run/metrics.jsonl ... Permission denied ... choose a path that this user may access",
          .conditions = AS_NOBODY),
    WORLD("out on a read-only disk", DISK ";freeze run", RESUME,
          "run/metrics.jsonl ... Read-only file system ... choose a path"),
    WORLD("log is a directory", RUN ";remove run/metrics.jsonl;mkdir run/metrics.jsonl", RESUME,
          "run/metrics.jsonl ... Is a directory"),
    WORLD("log is a full device", "mkdir run;link run/metrics.jsonl /dev/full", "@",
          "run/metrics.jsonl is not a file ... move it away"),
    WORLD("log is a pipe", "mkdir run;pipe run/metrics.jsonl", "@", "run/metrics.jsonl is not a file ... move it away"),
    WORLD("disk full for the log", "mkdir run;mount run size=64k,mode=0755;fill run/filler", "@",
          "cannot write run/metrics.jsonl ... No space left ... free some space", .sentences = 4, .may_change = LOG),
    WORLD("disk full for the checkpoint", DISK, RESUME,
          "run/step_00000004 ... No space left ... free some space ... Training continues ... run/step_00000006",
          .sentences = 3, .may_change = LOG),
    WORLD("file limit reached by the log", "", "@", "cannot write run/metrics.jsonl ... File too large ... ulimit -f",
          .sentences = 4, .file_bytes = 100, .may_change = NEW_LOG),
    WORLD("file limit reached by the first checkpoint", "", "@", "run/step_00000002 ... File too large ... ulimit -f",
          .file_bytes = 50000, .may_change = NEW_LOG, .sentences = 2),
    WORLD("file limit reached by a later checkpoint", RUN, RESUME, "run/step_00000006 ... File too large ... ulimit -f",
          .file_bytes = 50000, .may_change = LOG, .sentences = 2),
    WORLD("file limit, its signal not ignored", RUN, RESUME, "run/step_00000006 ... File too large ... ulimit -f",
          .conditions = XFSZ_KILLS, .file_bytes = 50000, .may_change = LOG, .sentences = 2),
    WORLD("a file has the checkpoint's temporary name", "mkdir run;write run/step_00000002.tmp a~file", "@",
          "run/step_00000002.tmp ... File exists ... move it away", .may_change = NEW_LOG, .sentences = 2),
    CASE(TRAIN, 0, "standard output is a pipe that nobody reads", "", "@ --ckpt-every 1", "", .conditions = STDOUT_GONE,
         .may_change = NEW_RUN),
    CASE(TRAIN, 0, "standard output full", "", "@ --sample-every 1", "", .conditions = STDOUT_FULL,
         .may_change = NEW_RUN),
    CASE(TRAIN, 0, "foreign and left-over names in out",
         "mkdir run;mkdir run/step_-1;mkdir run/step_00000002.tmp;"
         "write run/step_00000002.tmp/rank_00000.safetensors old",
         "@", "saved run/step_00000002", .may_change = NEW_RUN),
    WORLD("sample's prompt outside the vocabulary", "shard train.bin 100 4096", "@ --sample-every 1 --prompt \xc3\xa9",
          "vocabulary is 100 ... there are 256 ... bytes", .may_change = NEW_LOG),

    // Resuming a run.
    CASE(TRAIN, 0, "resume: no directory yet", "", "@ --resume",
         "no checkpoint in run yet ... from the beginning ... saved run/step_00000002", .may_change = NEW_RUN),
    CASE(TRAIN, 0, "resume: no checkpoint yet", "mkdir run", "@ --resume",
         "no checkpoint in run yet ... from the beginning", .may_change = NEW_RUN),
    CASE(TRAIN, 0, "resume: goes on", RUN, RESUME, "resumed from run/step_00000004 ... saved run/step_00000006",
         .may_change = LAST_STEP),
    CASE(TRAIN, 0, "resume: without the sizes of the model", RUN,
         "--data train.bin --batch 2 --out run --resume --steps 6 --ckpt-every 2",
         "resumed from run/step_00000004 ... saved run/step_00000006", .may_change = LAST_STEP),
    CASE(TRAIN, 0, "resume: more tokens at a time than a step had", RUN, RESUME " !--batch --batch 3",
         "--total-batch was '32' in that run and is '48' now", .may_change = LAST_STEP),
    WORLD("run there, no --resume", RUN, "@", "run holds a run that reached step 4 ... --resume ... another --out"),
    OTHER("family", "--family llama --ffn 64", "--family is gpt2", "llama"),
    OTHER("layers", "--layers 2", "--layers is 1", "2"),
    OTHER("heads", "--heads 4", "--heads is 2", "4"),
    OTHER("kv-heads", "--kv-heads 1", "--kv-heads is 2", "1"),
    OTHER("channels", "--channels 32 --ffn 64", "--channels is 16", "32"),
    OTHER("ffn", "--ffn 128", "--ffn is 64", "128"),
    OTHER("context", "--context 32", "--context is 16", "32"),
    OTHER("vocabulary", "--data unknown.bin --vocab 300", "--vocab is 256", "300"),
    CASE(TRAIN, 2, "resume: head not tied", RUN, RESUME " --tied off",
          "belongs to another run ... --tied is on ... here it is off ... another --out"),
    OTHER("rotary base", "--rope-theta 500", "--rope-theta is 10000", "500"),
    OTHER("optimizer", "--optimizer lion", "--optimizer is adamw", "lion"),
    OTHER("seed", "--seed 7", "--seed is 1337", "7"),
    OTHER("tensors that train", "--train block.*", "--train is ''", "'block.*'"),
    CASE(TRAIN, 0, "resume: --optimizer-rank of an optimizer that has none", RUN, RESUME " --optimizer-rank 8", "",
         .may_change = LAST_STEP),
    OTHER("sequence", "--seq 8 --context 16", "--seq is 16", "8"),
    CASE(TRAIN, 2, "resume: data of another length", RUN ";shard train.bin 256 4095", RESUME,
          "belongs to a run on other data ... same shards"),
    CASE(TRAIN, 2, "resume: other data of the same length", RUN ";flip train.bin 1124", RESUME,
          "belongs to a run on other data ... same shards"),
    CASE(TRAIN, 0, "resume: a run of another precision",
         RUN ";edit " MANIFEST " 'precision':~'fp32' 'precision':~'bf16'", RESUME,
         "resumed from " NEWEST " ... the saved run used bf16, this program uses fp32: the bits will differ",
         .may_change = LAST_STEP),
    WORLD("a log without a checkpoint", "mkdir run;write run/metrics.jsonl {\"step\":1}", "@",
          "run/metrics.jsonl exists ... --resume"),
    WRONG("--resume without --data", "--out run --resume", "no training data ... --data"),
    WRONG("--ckpt-every a word", "@ !--ckpt-every --ckpt-every often",
          "--ckpt-every is 'often' ... minutes as in 10min, or auto"),
    VALUE(TRAIN, "--ckpt-every", "1.5", "a number of steps"),
    VALUE(TRAIN, "--ckpt-every", "-5", "a number of steps"),
    VALUE(TRAIN, "--ckpt-every", "2e12", "a number of steps"),
    VALUE(TRAIN, "--ckpt-every", "-1min", "a number of steps"),
    VALUE(TRAIN, "--ckpt-every", "5x", "a number of steps"),
    WRONG("--ckpt-every without --out", "--data train.bin --ckpt-every 1", "--ckpt-every needs --out"),
    WRONG("--val-every without --val", "--data train.bin --val-every 1", "--val-every needs --val"),
    WRONG("--stop-after without --val-every", "@ --val val.bin --stop-after 2", "--stop-after needs --val-every"),
    WRONG("--epsilon 0", "@ !--epsilon --epsilon 0", "--epsilon is '0' ... 1e-15"),
    PASSED_OVER("manifest missing", "remove", MANIFEST, "", "No such file"),
    PASSED_OVER("manifest cut", "cut", MANIFEST, "700", "damaged"),
    PASSED_OVER("manifest empty", "cut", MANIFEST, "0", "damaged"),
    PASSED_OVER("manifest changed", "flip", MANIFEST, "300", "checksum"),
    PASSED_OVER("manifest is garbage", "write", MANIFEST, "{\"format\":[[[[", "checksum"),
    CASE(TRAIN, 0, "resume: manifest is a directory", RUN ";remove " MANIFEST ";mkdir " MANIFEST,
         "@ --resume --steps 6", MANIFEST " is not a file ... resumed from " BEFORE, .sentences = 1,
         .may_change = TWO_STEPS),
    PASSED_OVER("manifest of another version", "edit", MANIFEST, "checkpoint~4' checkpoint~9'",
                "llmtrain checkpoint 4 ... use the version of llmtrain that wrote it"),
    PASSED_OVER("manifest without a part", "edit", MANIFEST, "'samples' 'simples'", "is not a manifest"),
    MANIFEST_SAYS("no name of a file", "'file': 'fill':",
                  "the manifest of " NEWEST " has an entry without a file name; it is damaged"),
    MANIFEST_SAYS("a file of another directory", "'file':~' 'file':~'../step_00000002/",
                  "the manifest of " NEWEST " has an entry without a file name; it is damaged"),
    MANIFEST_SAYS("no files", "'files':~[ 'files':~[],~'others':~[",
                  NEWEST " has 0 of 4096 elements of weight.token_embedding; it is another model's, or a file is "
                  "missing"),
    MANIFEST_SAYS("nothing of a tensor", "'v.final_norm_bias' 'v.final_norm_bios'",
                  TENSORS ": the manifest does not list v.final_norm_bias; the checkpoint is damaged"),
    PASSED_OVER("tensors missing", "remove", TENSORS, "", "No such file"),
    PASSED_OVER("tensors cut", "cut", TENSORS, "20000", ""),
    PASSED_OVER("tensors empty", "cut", TENSORS, "0", "too short"),
    PASSED_OVER("weights changed", "flip", TENSORS, "20000", "checksum"),
    PASSED_OVER("moments changed", "flip", TENSORS, "80000", "checksum"),
    PASSED_OVER("tensors' header changed", "flip", TENSORS, "500", ""),
    PASSED_OVER("tensors' header too long", "int", TENSORS, "4 0x10000000", ""),
    PASSED_OVER("tensors of another model", "copy ../made/wide/step_00000004/rank_00000.safetensors", TENSORS, "",
                "does not match"),
    WORLD("resume: state of another type than the manifest says",
          RUN ";edit " MANIFEST " 'optimizer':~'adamw' 'optimizer':~'adamw-bf16'", RESUME " --optimizer adamw-bf16",
          TENSORS " holds m.token_embedding as F32, but this program uses BF16; build it", .may_change = LOG),
    CASE(TRAIN, 0, "resume: all of another model, under this one's sizes",
         RUN ";remove " NEWEST ";copy ../made/wide/step_00000004 " NEWEST ";"
             "edit " MANIFEST " 'channels':~32 'channels':~16 'ffn':~128 'ffn':~64",
         RESUME, TENSORS ": weight.token_embedding has 32768 bytes and follows element 0; it is another model's, or a "
         "file is missing ... resumed from " BEFORE, .sentences = 1, .may_change = TWO_STEPS),
    CASE(TRAIN, 0, "resume: a file has a checkpoint's name", RUN ";write run/step_00000009 a~file", RESUME,
         "run/step_00000009 ... resumed from run/step_00000004", .sentences = 1, .may_change = LAST_STEP),
    WORLD("resume: all damaged", RUN ";flip " TENSORS " 20000;cut " BEFORE "/manifest.json 700", RESUME,
          NEWEST " ... " BEFORE " ... no checkpoint in run can be used ... another --out", .sentences = 3,
          .may_change = LOG),
    WORLD("init-from: nothing there", RUN, "@ !--out --init-from run/step_00000007",
          "run/step_00000007 ... No such file"),
    CASE(TRAIN, 2, "init-from: other heads", RUN, "@ !--out --init-from " NEWEST " --heads 4",
          NEWEST " holds another model ... --heads is 2, here it is 4 ... another --init-from"),
    CASE(TRAIN, 2, "init-from: other heads, a new --out stays away", RUN,
          "@ !--out --init-from " NEWEST " --heads 4 --out new",
          "--heads is 2 ... another --init-from"),
    CASE(TRAIN, 2, "init-from: other layers alone", RUN,
          "--data train.bin --batch 1 --seq 16 --steps 1 --init-from " NEWEST " --layers 5",
          NEWEST " holds another model ... --layers is 1, here it is 5 ... another --init-from"),
    WORLD("init-from: damaged", RUN ";flip " TENSORS " 20000", "@ !--out --init-from " NEWEST, NEWEST " ... checksum"),
    WORLD("init-from: damaged, a new --out stays away", RUN ";flip " TENSORS " 20000", "@ !--out --init-from " NEWEST
          " --out new", NEWEST " ... checksum"),
    WORLD("init-from: damaged, a new --out stays away from a resume too", RUN ";flip " TENSORS " 20000",
          "@ !--out --init-from " NEWEST " --out new --ckpt-tier .:1 --resume", NEWEST " ... checksum"),

    // Generating.
    CASE(GENERATE, 1, "out missing", "", "@", "run ... no checkpoint ... --out"),
    CASE(GENERATE, 2, "no --out", "", "--prompt a", "give --out"),
    CASE(GENERATE, 2, "prompt empty", "", "--out run --prompt ''", "--prompt is empty ... at least one character, or a "
         "token with --prompt-ids"),
    CASE(GENERATE, 2, "prompt like a flag", "", "--out run --prompt --Once", "--prompt needs a value: ... "
         "; give one that begins with -- after a ="),
    CASE(GENERATE, 2, "a flag of training", "", "--out run --lr 1", "unknown flag --lr"),
    CASE(GENERATE, 2, "--prompt and --prompt-ids", "", "@ --prompt-ids 1,2", "cannot be combined with --prompt-ids"),
    CASE(GENERATE, 2, "--prompt and --chat", "", "@ --chat", "cannot be combined with --chat"),
    CASE(GENERATE, 2, "--chat and --samples", "", "--out run --chat --samples 2", "--chat writes one text"),
    CASE(GENERATE, 2, "--system without --chat", "", "@ --system x", "--system ... give --chat too"),
    CASE(GENERATE, 2, "--out and --init-from", "", "@ --init-from run", "give --out ... or --init-from"),
    CASE(GENERATE, 2, "--stop empty", RUN, "@ --stop ''", "--stop is empty ... at least one character"),
    VALUE(GENERATE, "--samples", "0", "a whole number from 1 to 4096"),
    VALUE(GENERATE, "--kv", "q4", "one of full|q8"),
    VALUE(GENERATE, "--min-p", "2", "a number from 0 to 1"),
    VALUE(GENERATE, "--repetition-penalty", "0", "a number from 0.01 to 100"),
    VALUE(GENERATE, "--kv-tokens", "-1", "a whole number from 0"),
    CASE(GENERATE, 1, "ids above the vocabulary", RUN, "--out run --prompt-ids 1,999", "has '999' ... 256"),
    CASE(GENERATE, 1, "ids that are no numbers", RUN, "--out run --prompt-ids 1,x", "--prompt-ids has 'x'"),
    CASE(GENERATE, 1, "--chat without a template", RUN, "--out run --chat",
         "no chat template ... chat_template.jinja ... leave --chat out"),
    CASE(GENERATE, 0, "a prompt above the context", RUN, "--out run --prompt abcdefghijklmnopqrst --tokens 2",
         "the prompt has 20 tokens, and there is room for 16: the first 4 are not read", .sentences = 1),
    CASE(GENERATE, 1, "no checkpoint", "mkdir run", "@", "run holds no checkpoint ... --out"),
    CASE(GENERATE, 1, "out is no path", "link run run", "@", "cannot look for checkpoints in run: Too many ... check"),
    CASE(GENERATE, 1, "out is a file", "", "--out text.txt --prompt a", "text.txt holds no checkpoint ... --out"),
    CASE(GENERATE, 0, "newest damaged", RUN ";flip " TENSORS " 20000", "@ --tokens 4",
         NEWEST " ... checksum ... trying the checkpoint before", .sentences = 1),
    CASE(GENERATE, 1, "all damaged", RUN ";flip " TENSORS " 20000;cut " BEFORE "/manifest.json 700", "@",
         NEWEST " ... " BEFORE " ... no checkpoint in run can be used", .sentences = 3),
    CASE(GENERATE, 1, "newest damaged, another gone",
         RUN ";flip " TENSORS " 20000;remove " BEFORE ";link " BEFORE " none", "@",
         NEWEST " ... " BEFORE " ... no checkpoint in run can be used", .sentences = 3),
    CASE(GENERATE, 1, "init-from: manifest without files", RUN ";edit " MANIFEST " 'files':~[ 'files':~[],~'others':~[",
         "--init-from run --prompt a", "run/step_00000004 has 0 of 4096 elements of token_embedding, or some twice; it "
         "is damaged, or a file is missing"),
    CASE(GENERATE, 1, "init-from: manifest without a tensor",
         RUN ";edit " MANIFEST " 'weight.final_norm_bias' 'weight.final_norm_bios'", "--init-from run --prompt a",
         TENSORS ": weight.final_norm_bias is not what the manifest says; it is damaged"),
    CASE(GENERATE, 1, "the only one damaged", OLDER ";flip " BEFORE "/rank_00000.safetensors 20000", "@",
         BEFORE " ... no checkpoint in run can be used", .sentences = 2),
    CASE(GENERATE, 1, "manifest of a huge model",
         OLDER ";edit " BEFORE "/manifest.json 'channels':~16 'channels':~65536 'layers':~1 'layers':~900"
               " 'heads':~2 'heads':~1024",
         "@", "GB ... of memory are free"),
    CASE(GENERATE, 1, "manifest of an impossible model", OLDER ";edit " BEFORE "/manifest.json 'heads':~2 'heads':~0",
         "@", "lacks --heads ... at least 1"),
    CASE(GENERATE, 1, "a model not of bytes", "copy ../made/small run", "@",
         "vocabulary is 100 ... there are 256 ... bytes"),
    CASE(GENERATE, 1, "standard output full", RUN, "@ --tokens 4", "standard output ... No space left",
         .conditions = STDOUT_FULL),
    CASE(GENERATE, 1, "help, standard output full", "", "--help", "generate: cannot write standard output ... No space",
         .conditions = STDOUT_FULL),
    CASE(TRAIN, 1, "help, standard output full", "", "--help", "train: cannot write standard output ... No space",
         .conditions = STDOUT_FULL),
    CASE(TRAIN, 1, "plan, standard output full", "", "@ --plan", "train: cannot write standard output ... No space",
         .conditions = STDOUT_FULL),
    CASE(TOKENIZE, 1, "help, standard output full", "", "--help", "tokenize: cannot write standard output ... No space",
         .conditions = STDOUT_FULL),
    CASE(CORPUS, 1, "help, standard output full", "", "--help", "corpus: cannot write standard output ... No space",
         .conditions = STDOUT_FULL),
    CASE(GENERATE, 0, "works", RUN, "@ --tokens 4", "a"),
    CASE(GENERATE, 0, "a prompt longer than the cache", RUN, "--out run --prompt abcdef --tokens 4 --kv-tokens 4",
         "has 6 tokens ... room for 4: the first 2 are not read", .sentences = 1),
    CASE(GENERATE, 0, "help", "", "--help", "--out DIR ... --prompt TEXT ... [256]"),
    CASE(TRAIN, 0, "help", "", "--help", "--data GLOB ... --optimizer ... [adamw]"),

    // tokenize.
    CASE(TOKENIZE, 2, "unknown flag", "", "--byte text.txt --out new", "unknown flag --byte ... did you mean --bytes?"),
    CASE(TOKENIZE, 2, "word that is no flag", "", "text.txt --out new", "text.txt ... --"),
    CASE(TOKENIZE, 2, "flag without value", "", "--bytes text.txt --out", "--out needs a value ... PREFIX"),
    CASE(TOKENIZE, 2, "flag twice", "", "--bytes text.txt --out new --out old", "--out is given twice"),
    CASE(TOKENIZE, 2, "show: no shard", "", "--show", "--show needs a value"),
    CASE(TOKENIZE, 1, "show: standard output full", "", "--show train.bin --tokens 9", "standard output",
         .conditions = STDOUT_FULL),
    CASE(TOKENIZE, 2, "show: empty", "", "--show ''", "--show is empty ... path of a shard"),
    CASE(TOKENIZE, 2, "show: and shards", "", "--show train.bin --out new", "--show prints ... leave ... --out"),
    CASE(TOKENIZE, 2, "show: no tokens", "", "--show train.bin --tokens 0", "--tokens is '0' ... from 1"),
    CASE(TOKENIZE, 2, "position of nothing", "", "@ --at 5", "--at and --tokens are for --show"),
    CASE(TOKENIZE, 1, "show: missing", "", "--show none.bin", "none.bin ... No such file ... check the path"),
    CASE(TOKENIZE, 1, "show: no shard at all", "", "--show text.txt", "text.txt is not a token shard"),
    CASE(TOKENIZE, 1, "show: cut", "cut train.bin 2000", "--show train.bin", "train.bin is damaged or half copied"),
    CASE(TOKENIZE, 1, "show: past the end", "", "--show train.bin --at 999999999", "--at 999999999 is past the end"),
    CASE(TOKENIZE, 1, "show: tokenizer missing", "", "--show train.bin --tokenizer none", "none ... No such file"),
    CASE(TOKENIZE, 1, "show: tokenizer not known", "shard train.bin 100 50", "--show train.bin",
         "train.bin has no tokenizer next to it; give --tokenizer PATH"),
    CASE(TOKENIZE, 0, "show: a number that is no token", "tokens train.bin 60000 0 1", "--show train.bin --tokens 1",
         "<|60000|>"),
    CASE(TOKENIZE, 2, "no text", "", "--out new", "there is no text to convert ... --bytes FILE"),
    CASE(TOKENIZE, 2, "no out", "", "--bytes text.txt", "--out PREFIX ... missing"),
    CASE(TOKENIZE, 2, "out empty", "", "--bytes text.txt --out ''", "--out"),
    VALUE(TOKENIZE, "--val", "1.5", "from 0 to 1"),
    VALUE(TOKENIZE, "--val", "-0.1", "from 0 to 1"),
    VALUE(TOKENIZE, "--val", "nan", "from 0 to 1"),
    VALUE(TOKENIZE, "--val", "half", "from 0 to 1"),
    CASE(TOKENIZE, 2, "fraction empty", "", "@ --val ''", "--val is '' ... from 0 to 1"),
    CASE(TOKENIZE, 2, "fraction too small", "", "@ --val 1e-300", "--val 1e-300 ... give 0 ... 1e-09"),
    CASE(TOKENIZE, 1, "tokenizer of nobody", "mkdir new_tokenizer", "@", "exists without shards ... another --out"),
    VALUE(TOKENIZE, "--shard-tokens", "0", "from 1"),
    VALUE(TOKENIZE, "--shard-tokens", "1e999", "from 1"),
    VALUE(TOKENIZE, "--entropy", "-1", "from 0 to 100"),
    CASE(TOKENIZE, 1, "text missing", "remove text.txt", "@", "text.txt ... No such file ... check the path"),
    CASE(TOKENIZE, 1, "text empty", "cut text.txt 0", "@", "text.txt is empty ... give a text"),
    CASE(TOKENIZE, 1, "standard input empty", "", "--bytes - --out new", "standard input is empty ... give a text"),
    CASE(TOKENIZE, 1, "text longer than its file says", "", "@ --bytes /proc/version --val 0",
         "/proc/version changed while it was read: 0 bytes became ... start again"),
    CASE(TOKENIZE, 1, "text is a directory", "remove text.txt;mkdir text.txt", "@",
         "text.txt is a directory ... give one file"),
    CASE(TOKENIZE, 1, "text is unreadable", "chmod text.txt 0", "@", "text.txt ... Permission denied",
         .conditions = AS_NOBODY),
    CASE(TOKENIZE, 1, "fraction of one byte", "cut text.txt 1", "@ --val 0.1", "1 bytes ... --val 0"),
    CASE(TOKENIZE, 1, "fraction of standard input", "", "--bytes - --out new --val 0.1", "standard input ... --val 0"),
    CASE(TOKENIZE, 1, "folder missing", "", "@ --out none/new", "none/new ... No such file ... check the path"),
    CASE(TOKENIZE, 1, "folder is a file", "", "@ --out train.bin/new",
         "train.bin/new ... Not a directory ... check the path"),
    CASE(TOKENIZE, 1, "folder of another user", "", "@", "new_ ... Permission denied ... choose a path",
         .conditions = AS_NOBODY),
    CASE(TOKENIZE, 1, "file limit", SHARDS, "@", "new_ ... File too large ... ulimit -f", .file_bytes = 2000),
    CASE(TOKENIZE, 1, "file limit for a new tokenizer", "", "--train-bpe 300 --text text.txt --out newtok",
         "newtok/tokenizer.json ... File too large ... ulimit -f", .file_bytes = 100),
    CASE(TOKENIZE, 1, "file limit, its signal not ignored", SHARDS, "@", "new_ ... File too large ... ulimit -f",
         .conditions = XFSZ_KILLS, .file_bytes = 2000),
    CASE(TOKENIZE, 1, "disk full", "link new_train_000000.bin.tmp /dev/full", "@ --val 0",
         "new_ ... No space left ... free some space", .may_change = "new_train_000000.bin.tmp"),
    CASE(TOKENIZE, 1, "name of a shard taken by a directory", "mkdir new_val_000000.bin", "@",
         "new_val_000000.bin ... directory"),

    // corpus.
    CASE(CORPUS, 2, "unknown flag", "", "@ --byte 5", "unknown flag --byte ... did you mean --bytes?"),
    CASE(CORPUS, 2, "flag without value", "", "@ --bytes", "--bytes needs a value ... training text"),
    CASE(CORPUS, 2, "flag twice", "", "@ --seed 1 --seed 2", "--seed is given twice"),
    CASE(CORPUS, 2, "out missing", "", "--bytes 1000", "--out ... missing"),
    CASE(CORPUS, 2, "out empty", "", "--out ''", "--out ... missing"),
    VALUE(CORPUS, "--bytes", "0", "from 1"),
    VALUE(CORPUS, "--bytes", "-5", "whole number"),
    VALUE(CORPUS, "--bytes", "99999999999999999999", "whole number"),
    VALUE(CORPUS, "--val-bytes", "many", "whole number"),
    CASE(CORPUS, 2, "bytes empty", "", "@ --bytes ''", "--bytes is '' ... whole number"),
    VALUE(CORPUS, "--seed", "1.5", "whole number"),
    VALUE(CORPUS, "--bytes", "12x", "whole number"),
    VALUE(CORPUS, "--bytes", "-1", "whole number"),
    VALUE(CORPUS, "--seed", "18446744073709551616", "whole number"),
    CASE(CORPUS, 2, "seed with a blank before it", "", "@ --seed ~1", "--seed is ' 1' ... whole number"),
    CASE(CORPUS, 2, "a flag of another name", "", "@ --bites", "unknown flag --bites"),
    CASE(CORPUS, 2, "out missing, bytes given", "", "--bytes 12", "--out"),
    CASE(CORPUS, 2, "bytes of validation empty", "", "@ --val-bytes ''", "--val-bytes is ''"),
    CASE(CORPUS, 1, "folder missing", "", "--out none/new --bytes 1000",
         "none/new_train.txt ... No such file ... check the path"),
    CASE(CORPUS, 1, "folder is a file", "", "--out text.txt/new --bytes 1000",
         "text.txt/new_train.txt ... Not a directory"),
    CASE(CORPUS, 1, "folder of another user", "", "@", "new_train.txt ... Permission denied", .conditions = AS_NOBODY),
    CASE(CORPUS, 1, "file limit", TEXTS, "@ --bytes 50000", "new_train.txt ... File too large ... ulimit -f",
         .file_bytes = 20000),
    CASE(CORPUS, 1, "file limit reached at the end", TEXTS, "@ --bytes 20500 --val-bytes 1000",
         "new_train.txt ... File too large ... ulimit -f", .file_bytes = 20000),
    CASE(CORPUS, 1, "file limit, its signal not ignored", TEXTS, "@ --bytes 50000", "new_train.txt ... File too large",
         .conditions = XFSZ_KILLS, .file_bytes = 20000),
    CASE(CORPUS, 1, "name taken by a directory", "mkdir new_val.txt", "@ --val-bytes 1000",
         "new_val.txt ... directory"),
};

// ------------------------------------------------------------------------------------------------
// Preparing

static bool mounting = false; // this process has mounts of its own

// Replaces the first `from` in a manifest and updates its checksum.
static void edit_manifest(const char* path, const char* from, const char* to) {
    static const char end[] = ",\n  \"checksum\": \"%016llx\"\n}\n";
    size_t bytes, end_bytes = strlen(text_of(end, 0ull));
    char *text = text_read(path, &bytes), *at = strstr(text, from), edited[16384];
    need(at != NULL && bytes > end_bytes, "%s: there is no %s", path, from);
    text[bytes - end_bytes] = 0;
    size_t length = (size_t)snprintf(edited, sizeof edited, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    unsigned long long checksum = hash_bytes(edited, length);
    snprintf(edited + length, sizeof edited - length, end, checksum);
    put_text(path, edited);
    free(text);
}

// Writes to a file until its disk is full.
static bool fill(const char* path) {
    static const char block[4096] = "x";
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    while (file >= 0 && write(file, block, sizeof block) > 0) continue;
    return file >= 0 && close(file) == 0;
}

static void words_replace(Words* w, char from, char to) {
    for (char* c = w->text; c < w->text + w->used; c++) *c = *c == from ? to : *c;
}

// One step: a verb, a path, and the verb's arguments. In its words ~ stands for a blank and ' for a quotation mark.
static void prepare_step(const char* step) {
    static Words w;
    memset(&w, 0, sizeof w);
    words_add(&w, step);
    words_replace(&w, '~', ' ');
    words_replace(&w, '\'', '"');
    const char *verb = w.words[0], *path = w.words[1], *text = w.count > 2 ? w.words[2] : "";
    long long numbers[3] = {0};
    for (size_t i = 0; i < 3 && i + 2 < w.count; i++) numbers[i] = strtoll(w.words[i + 2], NULL, 0);
    int32_t word = (int32_t)numbers[1];
    uint16_t token = (uint16_t)numbers[0];
    bool good = true;
#define VERB(name) else if (strcmp(verb, name) == 0)
    if (strcmp(verb, "remove") == 0) remove_tree(path);
    VERB("mkdir") good = mkdir(path, 0777) == 0;
    VERB("pipe") good = mkfifo(path, 0644) == 0;
    VERB("link") good = symlink(text, path) == 0;  // target
    VERB("chmod") good = chmod(path, (mode_t)numbers[0]) == 0;
    VERB("cut") good = truncate(path, numbers[0]) == 0;  // to how many bytes
    VERB("flip") flip_byte(path, (size_t)numbers[0]);    // which byte
    VERB("int") patch(path, (size_t)numbers[0], &word, sizeof word);  // offset, value
    VERB("shard") put_shard(path, (int32_t)numbers[0], (size_t)numbers[1], 1);  // vocabulary, number of tokens
    VERB("write") put_text(path, text);
    VERB("copy") copy_tree(path, text);  // to where
    VERB("fill") good = fill(path);
    VERB("mount") good = machine_mount(path, text);
    VERB("freeze") good = machine_remount(path, NULL);
    VERB("tokens") {  // token, first position, count
        for (long long i = 0; i < numbers[2]; i++)
            patch(path, 1024 + sizeof token * (size_t)(numbers[1] + i), &token, sizeof token);
    }
    VERB("edit") {  // pairs: old text, new text
        for (size_t i = 2; i + 1 < w.count; i += 2) edit_manifest(path, w.words[i], w.words[i + 1]);
    }
    else good = false;
#undef VERB
    need(good, "%s", step);
}

// The piece of a text before the next separator; moves the text past it. NULL at its end.
static const char* piece_next(const char** text, const char* separator) {
    if (*text == NULL || **text == 0) return NULL;
    const char* end = strstr(*text, separator);
    const char* piece = text_of("%.*s", end ? (int)(end - *text) : INT_MAX, *text);
    *text = end ? end + strlen(separator) : "";
    return piece;
}

// ------------------------------------------------------------------------------------------------
// Running a program

static bool word_names(const char* word, const char* flag) {
    size_t length = strcspn(flag, " ");
    if (word[0] == '!') word++;
    return strncmp(word, flag, length) == 0 && (word[length] == 0 || word[length] == '=');
}

static void arguments_add(Words* words, Which program, const char* text) {
    static Words parts;
    memset(&parts, 0, sizeof parts);
    words_add(&parts, text);
    words_replace(&parts, '~', ' ');
    for (size_t p = 0; p < parts.count; p++) {
        const char* part = parts.words[p];
        bool good_flags = strcmp(part, "@") == 0;
        if (!good_flags && part[0] != '!') words_put(words, words->count, part, strlen(part));
        for (size_t i = 0; good_flags && i < COUNT_OF(GOOD_FLAGS[0]) && GOOD_FLAGS[program][i]; i++) {
            bool named = false;
            for (size_t q = 0; q < parts.count; q++) named |= word_names(parts.words[q], GOOD_FLAGS[program][i]);
            if (!named) words_add(words, GOOD_FLAGS[program][i]);
        }
    }
}

static char program_paths[PROGRAMS][PATH_MAX];
static size_t usual_memory[PROGRAMS];  // RLIMIT_AS; 0: the program cannot run with a limit (AddressSanitizer)

// In the child: sets the conditions. Memory is limited so that a wrong size cannot exhaust the machine.
static void case_become(const void* context) {
    const Case* c = (const Case*)context;
    size_t bytes = c->memory_bytes ? c->memory_bytes : usual_memory[c->program];
    const struct rlimit file = {c->file_bytes, c->file_bytes}, memory = {bytes, bytes};
    int unread[2], full = c->conditions & STDOUT_FULL ? open("/dev/full", O_WRONLY) : -1;
    if (full >= 0) dup2(full, 1);
    if (c->conditions & STDOUT_GONE && pipe_open(unread)) {
        dup2(unread[1], 1);
        close(unread[1]);
        close(unread[0]);
    }
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
    words_add(&words, program_paths[c->program]);
    arguments_add(&words, c->program, c->arguments);
    program_start(&p, words.words, case_become, c);
    programs_wait(&p, 1, TIME_LIMIT_MS);
    return p;
}

// ------------------------------------------------------------------------------------------------
// The disk before and after

typedef struct {
    struct { char path[512]; uint64_t hash; } entries[256];  // of the contents, and of the kind if not a file
    size_t count;
} Snapshot;

static void snapshot_add(const char* path, void* context) {
    Snapshot* s = (Snapshot*)context;
    struct stat status;
    if (lstat(path, &status) != 0) return;
    need(s->count < COUNT_OF(s->entries), "room for a snapshot");
    snprintf(s->entries[s->count].path, sizeof s->entries[0].path, "%.511s", path + 2);  // without ./
    uint64_t* hash = &s->entries[s->count++].hash;
    *hash = (uint64_t)(status.st_mode & S_IFMT);
    if (S_ISREG(status.st_mode)) {
        size_t bytes;
        char* data = text_read(path, &bytes);
        *hash = hash_bytes(data, bytes);
        free(data);
    }
    if (S_ISDIR(status.st_mode)) directory_each(path, snapshot_add, s);
}

// NULL if there is no such path.
static const uint64_t* snapshot_find(const Snapshot* s, const char* path) {
    for (size_t i = 0; i < s->count; i++)
        if (strcmp(s->entries[i].path, path) == 0) return &s->entries[i].hash;
    return NULL;
}

static bool path_may_change(const char* path, const char* allowed) {
    if (strcmp(path, "run/events.jsonl") == 0 || strcmp(path, "run/run.jsonl") == 0) path = LOG;  // a run has all three
    for (const char* piece; (piece = piece_next(&allowed, "|")) != NULL;) {
        size_t length = strlen(piece);
        if (strncmp(path, piece, length) == 0 && (path[length] == 0 || piece[length - 1] == '/')) return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// Checking

// Whether the text contains the word, not as a part of a longer one.
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
    int expected = c->sentences ? c->sentences : c->exit_code != 0;
    expect(sentences == expected, "%d sentences on stderr, not %d", sentences, expected);
    const char* says = c->says;
    for (const char* piece; (piece = piece_next(&says, " ... ")) != NULL;) {
        bool found = strstr(p->text[1], piece) || (c->exit_code == 0 && strstr(p->text[0], piece));
        expect(found, "it does not say '%s'", piece);
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
        const char* path = before->entries[i].path;
        const uint64_t* now = snapshot_find(after, path);
        bool same = now && *now == before->entries[i].hash;
        expect(same || path_may_change(path, c->may_change), "%s was %s", path, now ? "changed" : "removed");
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
    prepare_step("int unknown.bin 12 0");
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + random_bits(2, RANDOM_TEST, 0, i) % 26);
    put_bytes("text.txt", text, sizeof text);
}

static const char* case_skip_reason(const Case* c) {
    if (strstr(c->prepare, "mount ") && !mounting) return "this machine does not let the test mount a disk";
    if (c->conditions & AS_NOBODY && geteuid() != 0) return "only root can run the program as another user";
    if (c->memory_bytes && !usual_memory[c->program]) return "the program does not run under a limit of memory";
    return NULL;
}

static void case_run(const Case* c, size_t number) {
    static Snapshot before, after;
    const char *reason = case_skip_reason(c), *steps = c->prepare;
    char title[256], directory[32];
    snprintf(title, sizeof title, "%-8s exit %d  %s", PROGRAM_NAMES[c->program], c->exit_code, c->name);
    snprintf(directory, sizeof directory, "case_%03zu", number);
    if (reason) {
        skip(title, reason);
        return;
    }
    directory_begin(directory);
    for (const char* step; (step = piece_next(&steps, ";")) != NULL;) prepare_step(step);
    before.count = after.count = 0;
    directory_each(".", snapshot_add, &before);
    Program p = program_run(c);
    directory_each(".", snapshot_add, &after);
    if (program_code(&p) == EXIT_NOT_RUN) {
        skip(title, "cannot run the program as another user");
    } else {
        expect_output(&p, c);
        expect_disk(&before, &after, c);
        if (!verdict("%s", title)) {
            printf("        $ %s %s\n", PROGRAM_NAMES[c->program], c->arguments);
            for (int i = 0; i < 2; i++) print_indented(p.text[i]);
        }
    }
    program_free(&p);
    need(chdir(root) == 0, "%s", root);
    machine_unmount(text_of("%s/run", directory));
    remove_tree(directory);
}

// Makes the runs that cases copy. Without them there is nothing to test.
static void runs_make(void) {
    static const char* const arguments[] = {"@ --out good --steps 4 --ckpt-every 2",
                                            "@ --out small --data small.bin --steps 4 --ckpt-every 2",
                                            "@ --out wide --channels 32 --steps 4 --ckpt-every 2"};
    directory_begin("made");
    put_shard("small.bin", 100, 4096, 1);
    for (size_t i = 0; i < COUNT_OF(arguments); i++) {
        Case c = {.program = TRAIN, .arguments = arguments[i]};
        Program p = program_run(&c);
        if (!program_good(&p)) program_print(&p, arguments[i]);
        need(program_good(&p), "a good run fails");
        program_free(&p);
    }
    need(chdir(root) == 0, "%s", root);
}

// Whether each program starts under the default memory limit; one with AddressSanitizer does not.
static void memory_limit_try(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        Case help = {.program = (Which)i, .arguments = "--help", .memory_bytes = (size_t)8 << 30};
        Program p = program_run(&help);
        usual_memory[i] = program_good(&p) ? help.memory_bytes : 0;
        program_free(&p);
    }
}

int main(int argc, char** argv) {
    int code;
    const char* programs[PROGRAMS] = {"./train", "build/generate", "build/tokenize", "build/corpus"};
    const Flag rows[] = {
        {"train", KIND_TEXT, &programs[TRAIN], "PATH", 0, 0, "the program", false},
        {"generate", KIND_TEXT, &programs[GENERATE], "PATH", 0, 0, "the program", false},
        {"tokenize", KIND_TEXT, &programs[TOKENIZE], "PATH", 0, 0, "the program", false},
        {"corpus", KIND_TEXT, &programs[CORPUS], "PATH", 0, 0, "the program", false},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    if (!flags_begin(&code, "test_errors", NULL, &flags, argc, argv)) return code;
    for (int p = 0; p < PROGRAMS; p++) {
        if (realpath(programs[p], program_paths[p]) != NULL && access(program_paths[p], X_OK) == 0) continue;
        fprintf(stderr, "test_errors: cannot run %s: %s; build it, or give --%s PATH\n", programs[p], strerror(errno),
                PROGRAM_NAMES[p]);
        return 1;
    }
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("ASAN_OPTIONS", "allocator_may_return_null=1:hard_rss_limit_mb=4000", 0);
    tests_begin("test_errors");
    root_enter();
    // Mounts in a private namespace end with this process, however it ends.
    bool alone = machine_own_mounts();
    need(mkdir("probe", 0755) == 0, "probe");
    mounting = alone && machine_mount("probe", "size=64k") && machine_unmount("probe");
    memory_limit_try();
    runs_make();
    for (size_t i = 0; i < COUNT_OF(CASES); i++) case_run(&CASES[i], i);
    return tests_end();
}
