// pairs.c: both sides of each choice that a program offers are tested, and choices that meet are tested together.
//
//   cc -std=c11 -O2 -I. dev/test/pairs.c -o build/pairs -lm -pthread
//   build/pairs [--build build] [--seed S]                             started where the sources are
//
//   table  pairs.txt has a row for every flag of every program, as --help lists them, with every choice that it has
//          there, and for each side a test, which exists: a new flag or choice without a row fails
//   cover  runs of ./train in which every value of every axis below meets every value of every other one. Most axes
//          must not change a bit: the runs are grouped by the others, and each group begins with a plain run, of one
//          rank with nothing else asked for, whose weights, optimizer state and log the rest must have. Each run then
//          loses its last checkpoint and resumes, with the flags of the next run of its group, to the same bits. The
//          last loss is that which build/evaluate computes from the checkpoint, and from an export of it
//   texts  flags of build/generate that mean the same write the same, and others do not; samples of ./train; --chat
//
// Another seed makes another cover, and takes other values where an axis has alternatives.

#include "llmtrain/base/flags.h"
#include "harness.h"
#include "pieces.h"

static struct {
    char programs[PATH_MAX];  // their directory, absolute
    uint64_t seed;
} test;

// ------------------------------------------------------------------------------------------------
// 1. Axes

enum { VALUES_MAX = 5, STEPS = 6, STEP_TOKENS = 192 };

// Values are flags, the plain ones first. Of words joined by | the seed takes one. The first word of a dtype is the
// build's.
typedef struct {
    const char* name;
    const char* values[VALUES_MAX];
} Axis;

// A step has 12 sequences.
#define COMMON                                                                                           \
    "--data train.bin --val val.bin --val-overlap 3 --layers 4 --channels 16 --seq 16 --total-batch 192 " \
    "--warmup 1 --optimizer-rank 4 --leaves 2 --row-leaves 2 --kv-copies 1 --tokens 8"
#define TRAINS "--steps 6 --lr 1e-2"

static const Axis AXES[] = {
    // These change what is computed. In both parts the axes with the most values come first, which makes few runs.
    {"optimizer", {"--optimizer adamw|sgd|momentum|lion", "--optimizer adamw-8bit|adamw-bf16",
                   "--optimizer adafactor|came|adam-mini|sm3", "--optimizer muon|galore|ldadam"}},
    {"dtype", {"FP32 --masters on", "BF16 --masters on", "BF16 --masters off"}},
    {"guard", {"--clip 0.5 --spike-sigma 0", "--clip 0 --spike-skip 0.97 --spike-warmup 1",
               "--clip 0 --spike-skip 1.02 --spike-warmup 1 --diverged-after 1 --rewind 99 --rewind-lr 0.1"}},
    {"batch", {"--batch 2", "--batch 6"}},
    {"model", {"--family gpt2 --heads 2", "--family llama --heads 4 --kv-heads 2 --head-size 6 --ffn 32 --context 24 "
               "--qkv-bias on|off --qk-norm off|on --rope-scaling linear|llama3 --rope-factor 4 --rope-original 8"}},
    {"tied", {"--tied on", "--tied off"}},
    {"dropout", {"--dropout 0", "--dropout 0.1"}},
    {"documents", {"--documents join", "--documents mask --end-of-text 0"}},
    {"train", {"--train *", "--train block.[23].*,*norm*"}},
    {"schedule", {"--schedule cosine|linear|exponential", "--schedule constant|wsd|step"}},
    // These do not, except for sums that are not exact.
    {"recompute", {"--recompute none", "--recompute norms", "--recompute gelu", "--recompute attention",
                   "--recompute block"}},
    {"offload", {"--offload none", "--offload optimizer --offload-dir .", "--offload activations --offload-dir .",
                 "--offload optimizer,activations --offload-dir ."}},
    {"reduce", {"--reduce exact", "--reduce auto", "--reduce float", "--reduce storage"}},
    {"ranks", {"--ranks 1", "--ranks 2", "--ranks 3",
               "--ranks 4 --pp 2 --pipeline interleaved|1f1b|gpipe --chunks 0 --cp 2|1", "--ranks 4 --tp 2"}},
    {"saves", {"--ckpt-every 2", "--ckpt-every 1 --ckpt-keep 2 --ckpt-keep-every 4",
               "--ckpt-every 4 --ckpt-tier TIER:1"}},
    {"zero", {"--zero 0", "--zero 1 --shard 0|1", "--zero 2 --shard 1|0", "--zero 3"}},
    {"async", {"--ckpt-async off", "--ckpt-async on", "--ckpt-async on --ckpt-bandwidth 4"}},
    {"begin", {"", "--init-from INITIAL"}},
    {"start", {"", "supervise"}},
    {"threads", {"--threads 1", "--threads 3"}},
    {"trace", {"--spike-trace 0 --spike-loss 0", "--spike-trace 1 --spike-loss 0.01"}},
    {"validation", {"--val-every 0", "--val-every 2"}},
    {"samples", {"--sample-every 0", "--sample-every 2"}},
    {"log", {"--log-every 1", "--log-every 2"}},
    {"checks", {"--check-every 0", "--check-every 1"}},
};
enum { OPTIMIZER, DTYPE, GUARD, BATCH, MODEL, TIED, DROPOUT, DOCUMENTS, TRAIN, SCHEDULE, CLASS_AXES,
       RECOMPUTE = CLASS_AXES, OFFLOAD, REDUCE, RANKS, SAVES, ZERO, ASYNC, BEGIN, START, THREADS, TRACE, VALIDATION,
       SAMPLES, AXIS_COUNT = COUNT_OF(AXES) };

typedef struct { unsigned char values[AXIS_COUNT]; } Row;

static size_t axis_size(size_t axis) {
    size_t count = 0;
    while (count < VALUES_MAX && AXES[axis].values[count]) count++;
    return count;
}

// What cannot be: sequences that ranks cannot share; rewinds to checkpoints of another cadence, or that are gone; sums
// whose last bits decide whether a step is skipped; samples without all parameters, or all rows; what pipelines and
// ranks that share layers refuse.
static bool allowed(size_t a, size_t x, size_t b, size_t y) {
    if (a > b) return allowed(b, y, a, x);
    if (a == BATCH && b == RANKS) return x == 0 || y != 2;
    if (a == OPTIMIZER && b == RANKS) return x == 0 || y != 4;
    if (a == DTYPE && b == RANKS) return x < 2 || y != 4;
    if (a == OFFLOAD && b == RANKS) return x < 2 || y != 3;
    if (a == RANKS && b == ZERO) return x != 3 || y < 2;
    if (a == RANKS && b == SAMPLES) return x < 3 || y == 0;
    if (a == GUARD && b == SAVES) return x < 2 || y == 0;
    if (a == GUARD && b == REDUCE) return x == 0 || y == 0;
    if (a == ZERO && b == SAMPLES) return x != 3 || y == 0;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. A cover of all pairs

enum { ROWS_MAX = 64, NOT_SET = 255, TRIES = 60, DRAWS = 117 };  // DRAWS: a seed with few runs

static struct {
    Row rows[ROWS_MAX];
    size_t count, classes;  // the first `classes` rows are plain
    bool met[AXIS_COUNT][VALUES_MAX][AXIS_COUNT][VALUES_MAX];
    uint64_t drawn;
} cover;

static size_t draw_below(size_t limit) {
    return random4(DRAWS + test.seed, RANDOM_TEST, 0, cover.drawn++).bits[0] % limit;
}

// The pairs that a value of an axis would add to a row; -1: it is not allowed there.
static int value_gain(const Row* row, size_t axis, size_t value) {
    int gain = 0;
    for (size_t b = 0; b < AXIS_COUNT; b++) {
        if (b == axis || row->values[b] == NOT_SET) continue;
        if (!allowed(axis, value, b, row->values[b])) return -1;
        gain += !cover.met[axis][value][b][row->values[b]];
    }
    return gain;
}

static int row_gain(const Row* row) {
    int gain = 0;
    for (size_t a = 0; a < AXIS_COUNT; a++)
        for (size_t b = 0; b < a; b++)
            if (row->values[a] != NOT_SET && row->values[b] != NOT_SET)
                gain += !cover.met[a][row->values[a]][b][row->values[b]];
    return gain;
}

// Sets the values of axes [first, end) that are not set yet, in a random order, each to the one that adds most pairs.
static void row_fill(Row* row, size_t first, size_t end) {
    size_t order[AXIS_COUNT], count = end - first;
    for (size_t i = 0; i < count; i++) {
        size_t j = draw_below(i + 1);
        order[i] = order[j];
        order[j] = first + i;
    }
    for (size_t i = 0; i < count; i++) {
        size_t axis = order[i], n = axis_size(axis), from = draw_below(n);
        int most = -1;
        if (row->values[axis] != NOT_SET) continue;
        for (size_t k = 0; k < n; k++) {
            int gain = value_gain(row, axis, (from + k) % n);
            if (gain <= most) continue;
            most = gain;
            row->values[axis] = (unsigned char)((from + k) % n);
        }
    }
}

static Row row_empty(void) {
    Row row;
    memset(&row, NOT_SET, sizeof row);
    return row;
}

static void cover_add(const Row* row) {
    need(cover.count < ROWS_MAX && row_gain(row) > 0, "a cover of at most %d runs", ROWS_MAX);
    for (size_t a = 0; a < AXIS_COUNT; a++)
        for (size_t b = 0; b < AXIS_COUNT; b++) cover.met[a][row->values[a]][b][row->values[b]] = true;
    cover.rows[cover.count++] = *row;
}

// Sets the first two values of a row, of axes below `end`, that have not met; false if all have.
static bool row_begin(Row* row, size_t end) {
    size_t i = 0, a, x, b, y;
    for (; i < AXIS_COUNT * AXIS_COUNT * VALUES_MAX * VALUES_MAX; i++) {
        y = i % VALUES_MAX;
        x = i / VALUES_MAX % VALUES_MAX;
        b = i / (VALUES_MAX * VALUES_MAX) % AXIS_COUNT;
        a = i / (VALUES_MAX * VALUES_MAX * AXIS_COUNT);
        bool is_pair = a < b && b < end && x < axis_size(a) && y < axis_size(b);
        if (!is_pair || !allowed(a, x, b, y) || cover.met[a][x][b][y]) continue;
        *row = row_empty();
        row->values[a] = (unsigned char)x;
        row->values[b] = (unsigned char)y;
        return true;
    }
    return false;
}

// Completes a row with the class that has its values and adds most pairs. False if no class allows them: few take ranks
// that share layers.
static bool row_choose_class(Row* row) {
    Row best = row_empty();
    int most = -1;
    for (size_t k = 0, from = draw_below(cover.classes); k < cover.classes; k++) {
        Row with = *row;
        bool fits = true;
        memcpy(with.values, cover.rows[(from + k) % cover.classes].values, CLASS_AXES);
        for (size_t axis = 0; axis < AXIS_COUNT; axis++) {
            bool set = row->values[axis] != NOT_SET;
            fits = fits && (!set || (with.values[axis] == row->values[axis] &&
                                     value_gain(&with, axis, with.values[axis]) >= 0));
        }
        if (!fits || row_gain(&with) <= most) continue;
        most = row_gain(&with);
        best = with;
    }
    need(most >= 0 || row->values[RANKS] == 4, "a class for two values");
    if (most >= 0) *row = best;
    return most >= 0;
}

// Gives up the two values of a row.
static void row_drop(const Row* row) {
    for (size_t a = 0; a < AXIS_COUNT; a++)
        for (size_t b = 0; b < AXIS_COUNT; b++)
            if (row->values[a] != NOT_SET && row->values[b] != NOT_SET)
                cover.met[a][row->values[a]][b][row->values[b]] = true;
}

// Greedy: of several random rows the one that adds most pairs, until all that are allowed have met. First the classes,
// whose plain runs are those that the others are compared with.
static void cover_make(void) {
    for (size_t end = CLASS_AXES; end <= AXIS_COUNT; end += AXIS_COUNT - CLASS_AXES) {
        for (Row row; row_begin(&row, end);) {
            Row best = row_empty();
            for (size_t k = 0; k < TRIES && row_begin(&row, end); k++) {
                if (end == CLASS_AXES) memset(row.values + CLASS_AXES, 0, AXIS_COUNT - CLASS_AXES);
                else if (!row_choose_class(&row)) {
                    row_drop(&row);
                    continue;
                }
                row_fill(&row, 0, AXIS_COUNT);
                if (row_gain(&row) > row_gain(&best)) best = row;
            }
            if (row_gain(&best) > 0) cover_add(&best);
        }
        if (end == CLASS_AXES) cover.classes = cover.count;
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Runs

// What a run leaves: the log by step, NAN where it has no number, and the last checkpoint.
enum { LOSS, VAL_LOSS, NORM, RATE, TOKENS, SKIPPED, KEY_COUNT };
static const char* const KEYS[KEY_COUNT] = {"loss", "val_loss", "grad_norm", "lr", "tokens", "skipped"};
typedef struct {
    uint64_t hash;  // 0: there is none
    double log[KEY_COUNT][STEPS + 1];
} Result;

static Program program;  // the last one that ran

// Runs a program of the build, which must succeed; what it wrote stays until the next call.
HARNESS_FORMAT(1, 2) static const char* output_of(const char* format, ...) {
    static Words words;
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    memset(&words, 0, sizeof words);
    words_add(&words, text_of("%s/%s", test.programs, line));
    program_free(&program);
    program_start(&program, words.words, become_alone, NULL);
    programs_wait(&program, 1, PROGRAM_MS);
    if (!expect(program_good(&program), "it fails: %s", line)) program_print(&program, words.words[0]);
    return program.text[0];
}

static size_t class_of(const Row* row) {
    size_t i = 0;
    while (memcmp(row->values, cover.rows[i].values, CLASS_AXES) != 0) i++;
    return i;
}

static const char* run_name(const Row* row) { return text_of("run_%zu", (size_t)(row - cover.rows)); }
static const char* initial_name(const Row* row) { return text_of("initial_%zu", class_of(row)); }

// Appends the flags of a row's value. TIER is a directory of the run; INITIAL one of the class, which holds the weights
// that its runs begin with.
static void value_add(char text[2048], const Row* row, size_t axis, const char* run) {
    for (const char* at = AXES[axis].values[row->values[axis]]; *(at += strspn(at, " ")); at += strcspn(at, " ")) {
        char word[128], chosen[256];
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, " "), at);
        choice_name(word, (int)(test.seed % (1 + count_in(word, "|"))), chosen, sizeof chosen);
        if (strncmp(word, "TIER:", 5) == 0) snprintf(chosen, sizeof chosen, "%.99s_tier%s", run, word + 4);
        if (strcmp(word, "INITIAL") == 0) snprintf(chosen, sizeof chosen, "%s", initial_name(row));
        size_t used = strlen(text);
        snprintf(text + used, 2048 - used, " %s", chosen);
    }
}

// Trains into a directory.
static void run_train(const Row* row, const char* run, const char* more) {
    char flags[2048] = "";
    for (size_t axis = 0; axis < AXIS_COUNT; axis++)
        if (axis != START && axis != DTYPE) value_add(flags, row, axis, run);
    output_of("%strain-%s " COMMON " --out %s%s %s",
              row->values[START] ? text_of("supervise -- %s/", test.programs) : "",
              AXES[DTYPE].values[row->values[DTYPE]], run, flags, more);
}

static Result result_read(const char* run) {
    Result result;
    Error ignored;
    double steps[STEPS + 1], values[STEPS + 1];
    size_t count = log_numbers(steps, STEPS + 1, run, "step");
    result.hash = weights_hash(text_of("%s/step_%08d", run, STEPS), &ignored);
    for (size_t key = 0; key < KEY_COUNT; key++) {
        for (size_t step = 0; step <= STEPS; step++) result.log[key][step] = NAN;
        log_numbers(values, count, run, KEYS[key]);
        for (size_t i = 0; i < count; i++)
            if (steps[i] >= 1 && steps[i] <= STEPS) result.log[key][(size_t)steps[i]] = values[i];
    }
    return result;
}

// The largest relative difference of a key in the first `count` steps where both have it; infinite if the last step is
// not one of those.
static double apart(const Result* a, const Result* b, size_t key, size_t count) {
    double worst = 0;
    for (size_t step = 1; step <= STEPS && count > 0; step++) {
        double x = a->log[key][step], y = b->log[key][step];
        if (isnan(x) || isnan(y)) continue;
        if (x != y) worst = fmax(worst, fabs(x - y) / fabs(y));
        count--;
    }
    return isnan(a->log[key][STEPS]) || isnan(b->log[key][STEPS]) ? INFINITY : worst;
}

// Whether the gradients of a row are sums of integers.
static bool is_exact(const Row* row) {
    return row->values[REDUCE] <= 1;  // auto is exact with --leaves
}

// The row whose flags a row resumes with: the next of its class with exact sums, or itself.
static const Row* row_after(const Row* row) {
    size_t at = (size_t)(row - cover.rows);
    for (size_t k = 1; is_exact(row) && k < cover.count; k++) {
        const Row* next = &cover.rows[(at + k) % cover.count];
        if (is_exact(next) && class_of(next) == class_of(row)) return next;
    }
    return row;
}

// exact: the sums are the same, and only the order in which ranks add up their losses and norms differs.
// Without master weights another last bit of a gradient rounds a weight the other way, and a few steps later the norm
// may be twice as large: then only the first one that both have is compared.
static void expect_log(const Result* result, const Result* of, bool exact, int dtype) {
    for (size_t key = 0; key < KEY_COUNT; key++) {
        size_t steps = !exact && key == NORM && dtype == 2 ? 1 : STEPS;
        double difference = apart(result, of, key, steps);
        double bound = exact || key >= RATE ? 1e-12 : dtype == 0 ? 1e-4 : key == NORM ? 0.1 : 0.03;
        expect(difference <= bound, "%s is %.1e apart, more than %.0e", KEYS[key], difference, bound);
    }
}

// The loss that build/evaluate computes for a model; NAN if it fails.
static double evaluated(const char* model) {
    double loss = NAN;
    const char* text = output_of("evaluate-FP32 --data val.bin --seq 16 --val-overlap 3 --batch 5 %s", model);
    sscanf(text, "{\"loss\": %lf", &loss);
    return loss;
}

static bool is_last_of_class(const Row* row) {
    for (const Row* next = row + 1; next < cover.rows + cover.count; next++)
        if (class_of(next) == class_of(row)) return false;
    return true;
}

static void expect_loss(double loss, double expected, bool bf16, const char* what) {
    double difference = fabs(loss / expected - 1), bound = bf16 ? 1e-3 : 1e-6;
    expect(difference <= bound, "%s: a loss %.1e apart, more than %.0e", what, difference, bound);
}

// The run of a row, its resumed run, and what other programs make of it; same: a result with the same bits, if any.
static void row_test(const Row* row, const Result* plain, const Result* same, Result* whole) {
    char run[64];  // longer than the texts of text_of last
    snprintf(run, sizeof run, "%s", run_name(row));
    bool bf16 = row->values[DTYPE] > 0;
    if (row->values[BEGIN] == 1 && !file_exists(initial_name(row)))
        run_train(&cover.rows[class_of(row)], initial_name(row), "--steps 1 --lr 0");
    run_train(row, run, row->values[START] == 1 ? TRAINS " --resume" : TRAINS);
    *whole = result_read(run);
    expect(whole->hash != 0 && (same == NULL || same->hash == whole->hash), "other bits");
    expect_log(whole, plain, is_exact(row), row->values[DTYPE]);
    int kept = row->values[SAVES] == 2 ? 2 : 3;  // of steps 4 and 6; otherwise of 2, 4, 6 or of 4, 5, 6
    expect(directory_count(run, "step_") == kept, "%d checkpoints, not %d", directory_count(run, "step_"), kept);
    remove_tree(text_of("%s/step_%08d", run, STEPS));
    run_train(row_after(row), run, TRAINS " --resume");
    const char *resumes = strstr(program.text[0], "resumed from"), *first = strstr(program.text[0], "\nstep ");
    expect(resumes && first && resumes < first, "it does not resume");
    Result resumed = result_read(run);
    expect(resumed.hash == whole->hash, "other bits when it is resumed");
    expect_log(&resumed, whole, true, row->values[DTYPE]);
    double loss = evaluated(text_of("--out %s", run));
    if (row->values[DOCUMENTS] == 0) expect_loss(loss, whole->log[VAL_LOSS][STEPS], bf16, "evaluate");
    if (!is_last_of_class(row)) return;
    output_of("export --to hf --out %s --dir %s_hf", run, run);
    expect_loss(evaluated(text_of("--init-from %s_hf", run)), loss, bf16, "export");
}

// The first of the rows before this one that adds the same numbers in the same order; NULL: none does. One rank adds
// floats to those of the micro-batches before, but from stage 2 on to zeros.
static const Result* result_with_same_bits(const Row* row, const Result* results) {
    for (const Row* other = cover.rows; other < row; other++) {
        bool alone = row->values[RANKS] == 0 && other->values[RANKS] == 0;
        bool as_stage = (row->values[ZERO] >= 2) == (other->values[ZERO] >= 2);
        bool as_kind = (row->values[REDUCE] == 3) == (other->values[REDUCE] == 3);
        bool same = is_exact(row) ? is_exact(other) : !is_exact(other) && alone && as_stage && as_kind;
        if (same && class_of(other) == class_of(row)) return &results[other - cover.rows];
    }
    return NULL;
}

static void test_cover(void) {
    static Result results[ROWS_MAX];
    size_t skips = 0, rewinds = 0;
    cover_make();
    check(test.seed > 0 || cover.count <= 44, "%zu runs, %zu of them plain: all pairs of values of %d axes",
          cover.count, cover.classes, AXIS_COUNT);
    put_shard("train.bin", 256, 4000, 1);
    put_shard("val.bin", 256, 300, 2);
    for (const Row* row = cover.rows; row < cover.rows + cover.count; row++) {
        char text[2048] = "";
        size_t at = (size_t)(row - cover.rows), class_number = class_of(row);
        for (size_t axis = at < cover.classes ? 0 : CLASS_AXES; axis < AXIS_COUNT; axis++)
            if (row->values[axis] != 0) value_add(text, row, axis, run_name(row));
        row_test(row, &results[class_number], result_with_same_bits(row, results), &results[at]);
        verdict("class %zu%s:%s", class_number, at < cover.classes ? ", plain" : "", text);
        skips += row->values[GUARD] == 1 && results[at].log[SKIPPED][STEPS] > 0;
        rewinds += row->values[GUARD] == 2 && results[at].log[TOKENS][STEPS] > STEPS * STEP_TOKENS;
    }
    check(skips > 0 && rewinds > 0, "%zu runs skipped steps, and %zu others went back", skips, rewinds);
}

// ------------------------------------------------------------------------------------------------
// 4. Texts

enum { TEXT_TOKENS = 14, TEXT_MAX = 2048 };
#define SAMPLER "--prompt ab --tokens 12"
#define ODD_SAMPLER SAMPLER " --temperature 0.7 --top-k 40 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.5"
#define GREEDY SAMPLER " --temperature 0"

// What build/generate writes for a model, in `text`.
static void generate(char text[TEXT_MAX], const char* flags) {
    snprintf(text, TEXT_MAX, "%s", output_of("generate-FP32 %s", flags));
}

static size_t ids_read(int ids[64], const char* text) {
    size_t count = 0;
    for (int used; count < 64 && sscanf(text, "%d%n", &ids[count], &used) == 1; count++) text += used;
    return count;
}

// Two command lines that write the same tokens, or not.
static const struct { bool same; const char *a, *b; } TEXTS[] = {
    {true, SAMPLER, "--prompt-ids 97,98 --tokens 12"},
    {true, SAMPLER, SAMPLER " --threads 3"},
    {true, SAMPLER, SAMPLER " --seed 1337"},
    {false, SAMPLER, SAMPLER " --seed 1338"},
    {true, SAMPLER, SAMPLER " --kv-tokens 14"},
    {false, SAMPLER, SAMPLER " --kv-tokens 5"},
    {false, SAMPLER, SAMPLER " --kv q8"},
    {false, SAMPLER, GREEDY},
    {true, GREEDY, SAMPLER " --top-k 1"},
    {true, GREEDY, SAMPLER " --top-p 0.000001"},
    {true, GREEDY, SAMPLER " --min-p 1"},
    {false, GREEDY, GREEDY " --repetition-penalty 2"},
};

// Flags of build/generate, and those of ./train for its samples.
static void test_texts(void) {
    static char a[TEXT_MAX], b[TEXT_MAX];
    char stop[3] = "";
    int ids[64];
    snprintf(a, sizeof a, "%s", output_of("train-FP32 --data train.bin --out texts --family llama --layers 2 --heads 2 "
                                          "--channels 16 --seq 16 --context 24 --batch 2 --steps 4 --warmup 1 "
                                          "--sample-every 4 " ODD_SAMPLER));
    generate(b, "--out texts " ODD_SAMPLER);
    expect(strstr(a, text_of("\n%s", b)) != NULL, "./train does not write what build/generate does");
    for (size_t i = 0; i < COUNT_OF(TEXTS); i++) {
        generate(a, text_of("--out texts --print-ids %s", TEXTS[i].a));
        generate(b, text_of("--init-from texts/step_00000004 --print-ids %s", TEXTS[i].b));
        expect(ids_read(ids, a) == TEXT_TOKENS && ids_read(ids, b) == TEXT_TOKENS, "other numbers of tokens");
        expect((strcmp(a, b) == 0) == TEXTS[i].same, "%s | %s: %s%s", TEXTS[i].a, TEXTS[i].b, a, b);
    }
    generate(b, "--out texts --print-ids --samples 3 " GREEDY);
    expect(strcmp(b, text_of("%s%s%s", a, a, a)) == 0, "greedy samples that differ: %s", b);
    generate(a, "--out texts --print-ids --repetition-penalty 100 " GREEDY);
    size_t count = ids_read(ids, a);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < i; k++) expect(ids[i] != ids[k], "a token that repeats: %s", a);
    generate(a, "--out texts --repetition-penalty 100 " GREEDY);
    bool right = strlen(a) == count + 1 && a[count] == '\n';
    for (size_t i = 0; i < count; i++) right = right && a[i] == (char)(ids[i] ? ids[i] : '?');
    expect(right, "another text than its tokens: %s", a);
    memcpy(stop, a + 6, 2);
    generate(b, text_of("--out texts --repetition-penalty 100 --stop %s " GREEDY, stop));
    expect(strcmp(b, text_of("%.6s\n", a)) == 0, "a text that does not stop before %s: %s", stop, b);
    verdict("texts: the same by flags that mean the same, others by others, and those of ./train");
}

// A conversation by a template that puts a dot after each message: the answer continues that text.
#define ANSWER "--tokens 6 --temperature 0 --repetition-penalty 2"
static void test_chat(void) {
    output_of("corpus --out stories --bytes 4000 --val-bytes 1");
    output_of("tokenize --train-bpe 257 --text stories_train.txt --out tokenizer");
    put_text("tokenizer/tokenizer_config.json",
             "{\"chat_template\": \"{% for m in messages %}{{ m.content }}.{% endfor %}\"}");
    output_of("tokenize --tokenizer tokenizer --text stories_train.txt --out stories --val 0");
    output_of("train-FP32 --data stories_train_000000.bin --out chat --layers 1 --heads 2 --channels 16 --seq 32 "
              "--steps 4 --warmup 1");
    for (int system_given = 0; system_given < 2; system_given++) {
        const char* command = text_of("echo ab | %s/generate-FP32 --out chat --chat %s " ANSWER " > answer",
                                      test.programs, system_given ? "--system be" : "");
        const char* prompt = system_given ? "be.ab." : "ab.";
        expect(system(command) == 0, "it fails: %s", command);
        char* answer = text_read("answer", NULL);
        const char* text = output_of("generate-FP32 --out chat --prompt %s " ANSWER, prompt);
        expect(strlen(answer) > 1 && strcmp(text, text_of("%s%s", prompt, answer)) == 0, "%s, not %s", answer, text);
        free(answer);
    }
    verdict("a conversation, with --system and without: an answer continues what the template makes of it");
    const char* p = test.programs;
    const char* command = text_of("printf 'a\\0b\\n' | %s/generate-FP32 --out chat --chat " ANSWER " > answer && "
                                  "%s/generate-FP32 --out chat " ANSWER " --prompt-ids \"$(printf 'a\\0b.' | "
                                  "%s/tokenize --tokenizer tokenizer --encode)\" > whole && "
                                  "(printf 'a\\0b.'; cat answer) | cmp - whole", p, p, p);
    expect(system(command) == 0, "%s", command);
    verdict("a message with a zero byte is read whole");
    // It has room for 4096 messages, and ends with a message that finds none, which is not answered.
    put_text("chat/tokenizer/tokenizer_config.json", "{\"chat_template\": \"{{ messages[-1].content }}\"}");
    command = text_of("yes a | head -n 2049 | %s/generate-FP32 --out chat --chat --tokens 1 > answers 2> why; "
                      "[ $? = 1 ] && [ $(grep -ac ^ answers) = 2048 ] && grep -q 'more than 4096 messages' why", p);
    expect(system(command) == 0, "%s", command);
    verdict("a conversation that is too long");
    expect(system("sed -i '/post_processor/,/^  },/c \\  \"post_processor\": "
                  "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"e\"}}, "
                  "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"e\": {\"ids\": [256]}}},' "
                  "chat/tokenizer/tokenizer.json") == 0, "a template with a token before a text");
    for (int twice = 0; twice < 2; twice++) {
        command = text_of("%s/generate-FP32 --out chat --print-ids --prompt '%sa' " ANSWER " 2> note | "
                          "grep '^256 %s64 ' > ids && %s grep -q 'begins with the begin-of-text token' note", p,
                          twice ? "<|endoftext|>" : "", twice ? "256 " : "", twice ? "" : "!");
        expect(system(command) == 0, "%s", command);
    }
    verdict("a prompt that begins with the token that is put before it: a note");
}

// ------------------------------------------------------------------------------------------------
// 5. The table

enum { PAIRS_MAX = 256 };
typedef struct {
    char programs[64], name[40], sides[1024];  // programs: separated by commas; "other": no flag
    bool is_flag;                              // some program has it
} Pair;

static struct {
    Pair rows[PAIRS_MAX];
    size_t count;
} table;

// Calls `visit` with each line of a text.
static void lines_each(const char* text, void (*visit)(const char* line, void* context), void* context) {
    char line[4096];
    for (; *text; text += strcspn(text, "\n") + (strchr(text, '\n') != NULL)) {
        snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
        visit(line, context);
    }
}

static void table_line(const char* line, void* programs) {
    size_t indent = strspn(line, " ");
    Pair* row = &table.rows[table.count];
    if (line[0] == '#' || line[0] == 0) return;
    if (indent == 0) {
        snprintf((char*)programs, sizeof row->programs, "%s", line);
        return;
    }
    need(table.count < PAIRS_MAX && (indent == 2 || table.count > 0), "pairs.txt: %s", line);
    if (indent > 2) {
        size_t used = strlen((--row)->sides);
        snprintf(row->sides + used, sizeof row->sides - used, " %s", line + indent);
        return;
    }
    snprintf(row->programs, sizeof row->programs, "%s", (const char*)programs);
    need(sscanf(line, " %39s %1023[^\n]", row->name, row->sides) == 2, "pairs.txt: %s", line);
    table.count++;
}

// Whether a list, separated by commas, has a word.
static bool list_has(const char* list, const char* word) {
    for (; *(list += strspn(list, ", ")); list += strcspn(list, ", "))
        if (strcspn(list, ", ") == strlen(word) && strncmp(list, word, strlen(word)) == 0) return true;
    return false;
}

// Whether a text has a function: a line that begins with its type, and has its name and no semicolon.
static void function_line(const char* line, void* context) {
    char const** name = (char const**)context;
    const char* at = *name && isalpha((unsigned char)line[0]) ? strstr(line, text_of("%s(", *name)) : NULL;
    if (at && (at == line || at[-1] == ' ' || at[-1] == '*') && strchr(line, ';') == NULL) *name = NULL;
}

// Whether the sources have a test, FILE:NAME.
static bool test_exists(const char* file_and_name) {
    static const char* const places[][2] = {{"dev/test/test_", ".c"}, {"test_", ".cu"}, {"dev/test/", ".c"},
                                            {"dev/test/", ""}, {"dev/", ""}, {"dev/emulator/", ""}};
    const char *name = strchr(file_and_name, ':') + 1, *path = "";
    for (size_t i = 0; i < COUNT_OF(places) && !file_exists(path); i++)
        path = text_of("%s%.*s%s", places[i][0], (int)(name - 1 - file_and_name), file_and_name, places[i][1]);
    char* text = text_read(path, NULL);
    bool in_script = strstr(path, ".sh") && strstr(text, name);
    lines_each(text, function_line, &name);
    free(text);
    return in_script || name == NULL;
}

// Whether a value of an axis sets a flag to a side: N, X and DIR are anything but 0, none is to leave out a flag that
// other values of the axis set.
static bool cover_has(const char* flag, const char* side) {
    bool any = strcmp(side, "N") == 0 || strcmp(side, "X") == 0 || strcmp(side, "DIR") == 0;
    for (size_t axis = 0; axis < AXIS_COUNT; axis++) {
        size_t set = 0;
        for (size_t value = 0; value < axis_size(axis); value++) {
            const char *name = text_of("--%s ", flag), *at = strstr(AXES[axis].values[value], name);
            if (at == NULL) continue;
            char word[64];
            snprintf(word, sizeof word, "%.*s", (int)strcspn(at + strlen(name), " "), at + strlen(name));
            if (any ? strcmp(word, "0") != 0 : choice_find(word, side) >= 0) return true;
            set++;
        }
        if (strcmp(side, "none") == 0 && set > 0 && set < axis_size(axis)) return true;
    }
    return false;
}

// Every test that a row names is there, and an axis for what is covered.
static void row_check(const Pair* row) {
    size_t sides = 0;
    char* words = strdup(row->sides);
    bool has_sides = row->sides[0] != '-';
    char* rest = words;
    for (char* word; (word = strsep(&rest, " ")) != NULL;) {
        char* tests = strchr(word, '=');
        if (tests) *tests++ = 0;
        sides += tests != NULL;
        expect(!has_sides || tests || *word == 0, "%s: '%s' has no test", row->name, word);
        char* list = tests ? tests : word;
        for (char* one; (one = strsep(&list, ",")) != NULL;) {
            bool covered = strcmp(one, "cover") == 0;
            if (strchr(one, ':')) expect(test_exists(one), "%s: there is no test %s", row->name, one);
            else if (covered && strcmp(row->programs, "other") != 0)
                expect(cover_has(row->name, word), "%s: no axis has %s", row->name, word);
            else expect(!has_sides || covered, "%s: '%s' is no test", row->name, one);
        }
    }
    expect(sides >= 2 || !has_sides, "%s: it has a side only", row->name);
    free(words);
}

// A flag of a program: it has a row, with a side for each of its choices.
static void flag_check(const char* program_name, const char* flag, const char* choices) {
    Pair* row = NULL;
    for (Pair* other = table.rows; other < table.rows + table.count; other++)
        if (list_has(other->programs, program_name) && strcmp(other->name, flag) == 0) row = other;
    if (!expect(row != NULL, "pairs.txt has no row for --%s of %s", flag, program_name)) return;
    row->is_flag = true;
    for (const char* at = choices; strchr(choices, '|') && *at; at += strcspn(at, "|") + (strchr(at, '|') != NULL)) {
        const char* side = text_of(" %.*s=", (int)strcspn(at, "|"), at);
        bool found = strstr(text_of(" %s", row->sides), side) != NULL;
        expect(found, "pairs.txt has no side%s of --%s of %s", side, flag, program_name);
    }
}

static void help_line(const char* line, void* program_name) {
    char name[64], choices[256];
    if (sscanf(line, "  --%63[a-z0-9-] %255s", name, choices) == 2)
        flag_check((const char*)program_name, name, choices);
}

// For a program that only a GPU runs: a line of the table in its source.
static void source_line(const char* line, void* program_name) {
    char name[64];
    if (sscanf(line, " FLAG_%*[A-Z](\"%63[a-z0-9-]\"", name) == 1) flag_check((const char*)program_name, name, "");
}

static void test_table(void) {
    static const char* const programs[][2] = {
        {"train", "train-FP32"}, {"plan", "plan-BF16"}, {"generate", "generate-FP32"}, {"evaluate", "evaluate-FP32"},
        {"export", "export"}, {"tokenize", "tokenize"}, {"corpus", "corpus"}, {"supervise", "supervise"},
        {"tensorboard", "tensorboard"}, {"watch", "watch"}, {"report", "report"}};
    char heading[64] = "", tune[] = "tune";
    char *text = text_read("dev/test/pairs.txt", NULL), *source = text_read("tools/tune.cu", NULL);
    lines_each(text, table_line, heading);
    for (size_t i = 0; i < COUNT_OF(programs); i++)
        lines_each(output_of("%s --help", programs[i][1]), help_line, (void*)programs[i][0]);
    lines_each(source, source_line, tune);
    for (const Pair* row = table.rows; row < table.rows + table.count; row++) {
        row_check(row);
        bool is_other = strcmp(row->programs, "other") == 0;
        expect(row->is_flag || is_other, "no program has the flag --%s", row->name);
    }
    free(text);
    free(source);
    verdict("%zu pairs: every flag has a row, with all its choices, and every side a test that is there", table.count);
}

int main(int argc, char** argv) {
    const char* build = "build";
    int code;
    const Flag rows[] = {
        FLAG_TEXT("build", &build, build, "DIR", 0, "where the programs are"),
        FLAG_COUNT("seed", &test.seed, 0, 0, 1e9, 0, "of the cover, and of what it takes where there are alternatives"),
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    if (!flags_begin(&code, "pairs", NULL, &flags, argc, argv)) return code;
    need(realpath(build, test.programs) != NULL, "%s", build);
    tests_begin("pairs");
    test_table();
    root_enter();
    test_cover();
    test_texts();
    test_chat();
    return tests_end();
}
