// test_ranks.c: training by several ranks: whatever their number, the ZeRO stage and the launcher, it is one run.
//
//   cc -std=c11 -O2 -I. dev/test/test_ranks.c -o build/test_ranks -lm -pthread
//   build/test_ranks [--train PATH] [--train16 PATH] [--train-mpi PATH] [--mpirun on|off] [--only NAME]
//                    [--overlap on|off] [--show on]
//
//   data        ranks read different samples, and together what one rank reads
//   stages      1 to 4 ranks, each ZeRO stage, three models: weights and optimizer state end with the bits of one rank, and
//               losses are its. Gradients are accumulated and clipped, some steps are skipped, one model has dropout
//   float       --reduce float without accumulation: the same bits in all stages
//   storage     --reduce storage against --reduce exact; also the stages of a 16-bit build (--train16)
//   resume      10 steps + resume + 10 steps have the bits of 20; a run moves between numbers of ranks and stages;
//               another begins with its weights
//   launch      ranks started by hand and by mpirun, over sockets and MPI (--train-mpi), have the bits of --ranks N
//   memory      the peak of each rank is what --plan says
//   overlap     communication that takes longer does not make the step longer while there is work to do under it
//   faults      a rank that is killed or stopped at any point of a step: the others say which, in time, and end; a
//               rank that is asked to stop: all save and end
//   refusals    ranks that do not fit together, that do not come, flags that cannot be
//   corruption  a bit that changes in the parameters of one rank, or in what it computes with them, is found
//   rewind      a run that diverges goes back to the same checkpoint and on to the same bits, for every number of ranks
//               and stage; where it cannot, it says why
//   slow        a rank that is slower than the others is named
//
// The test starts the program in a directory of its own and reads what it leaves there. Where a rank is to fail it is
// started by hand: the test is the launcher, and sees how each rank ends, when, and with how much memory.

#include "llmtrain/data.h"
#include "llmtrain/files.h"
#include "llmtrain/flags.h"
#include "llmtrain/json.h"
#include "machine.h"
#include "pieces.h"

#define RANKS_MAX ((size_t)4)
#define STEPS 20
#define TIMEOUT_MS 3e3      // --timeout where something is to fail
#define SLACK_MS 3e3        // what a busy machine may add to it
#define LIMIT_MS 60e3       // after which a program is said to hang
#define LOSS_BOUND 1e-5     // relative, between numbers of ranks: sums in another order, over 20 steps, in float

static struct {
    char train[PATH_MAX], train16[PATH_MAX], train_mpi[PATH_MAX];  // the latter two may be empty
    const char* only;
    bool mpirun, show;
} test;

// ------------------------------------------------------------------------------------------------
// Jobs: a run of the program by one or more ranks

typedef enum { FORKED, BY_HAND, MPIRUN } Starter;  // --ranks N; one process per rank, with RANK and so on; mpirun

typedef struct {
    Starter launch;
    const char* program;
    size_t world;
    size_t started;             // BY_HAND: ranks that are started; 0: all
    size_t odd;                 // BY_HAND: the rank that has odd_arguments and odd_variables
    const char *odd_arguments, *odd_variables;
    const char* variables;      // of all ranks, see environment_set
    const char* arguments[3];   // one after the other, see flags_add
    size_t port;                // BY_HAND: 0: a free one
} Task;

// Where nothing is odd; a, b, c are arguments, or NULL.
static Task task_of(Starter launch, const char* program, size_t world, const char* a, const char* b, const char* c) {
    Task task = {launch, program, world, 0, RANKS_MAX, NULL, NULL, NULL, {a, b, c}, 0};
    return task;
}

typedef struct {
    size_t count;
    Program programs[RANKS_MAX];
    int port;                   // the socket that keeps the port from others; -1: none
} Job;

// Flags as one text, "--steps 3 --lr 1e-3", every flag with its value; one that is there already gets the new value.
static void flags_add(Words* w, const char* text) {
    while (text && *text) {
        size_t length = strcspn(text, " "), flag = 0;
        while (flag < w->count && (strlen(w->words[flag]) != length || memcmp(w->words[flag], text, length) != 0))
            flag++;
        words_put(w, flag, text, length);
        text += length + strspn(text + length, " ");
        length = strcspn(text, " ");
        if (length > 0) words_put(w, flag + 1, text, length);
        text += length + strspn(text + length, " ");
    }
}

// What a process is told by variables.
typedef struct {
    const Task* task;
    size_t rank, port;
} Place;

static void become_rank(const void* context) {
    const Place* place = (const Place*)context;
    const Task* task = place->task;
    environment_clear();
    environment_set("OMP_NUM_THREADS=1|OMP_WAIT_POLICY=passive");
    if (task->launch == BY_HAND)
        environment_set(text_of("RANK=%zu|LOCAL_RANK=%zu|WORLD_SIZE=%zu|MASTER_ADDR=127.0.0.1|MASTER_PORT=%zu",
                                place->rank, place->rank, task->world, place->port));
    environment_set(task->variables);
    if (place->rank == task->odd) environment_set(task->odd_variables);
}

static void job_start(Job* job, const Task* task) {
    Place place = {task, 0, task->port};
    memset(job, 0, sizeof *job);
    job->count = task->launch != BY_HAND ? 1 : task->started ? task->started : task->world;
    job->port = -1;
    if (task->port == 0) place.port = port_reserve(&job->port);
    for (; place.rank < job->count; place.rank++) {
        static Words w;
        memset(&w, 0, sizeof w);
        if (task->launch == MPIRUN)
            words_add(&w, text_of("mpirun --allow-run-as-root --oversubscribe --bind-to none -np %zu", task->world));
        words_put(&w, w.count, task->program, strlen(task->program));
        for (size_t i = 0; i < COUNT_OF(task->arguments); i++) flags_add(&w, task->arguments[i]);
        if (task->launch == FORKED) flags_add(&w, text_of("--ranks %zu", task->world));
        if (place.rank == task->odd) flags_add(&w, task->odd_arguments);
        program_start(&job->programs[place.rank], w.words, become_rank, &place);
    }
}

// Waits until all processes of the jobs have ended. One that is stopped is killed when the others of its job have
// ended, and so is all that still runs after LIMIT_MS.
static void jobs_wait(Job* jobs, size_t count) {
    for (bool busy = true; busy;) {
        busy = false;
        for (Job* job = jobs; job < jobs + count; job++) busy |= programs_run(job->programs, job->count, LIMIT_MS);
        sleep_ms(1);
    }
    for (Job* job = jobs; job < jobs + count; job++) {
        programs_wait(job->programs, job->count, LIMIT_MS);
        if (job->port >= 0) close(job->port);
    }
}

static void job_free(Job* job) {
    for (size_t i = 0; i < job->count; i++) program_free(&job->programs[i]);
}

static bool job_good(const Job* job) {
    bool good = true;
    for (size_t i = 0; i < job->count; i++) good = good && program_good(&job->programs[i]);
    return good;
}

static void job_print(const Job* job) {
    for (size_t i = 0; i < job->count; i++) program_print(&job->programs[i], text_of("process %zu", i));
}

// Starts a job and waits for it; true if all of it ended well.
static bool job_run(Job* job, const Task* task) {
    job_start(job, task);
    jobs_wait(job, 1);
    if (!job_good(job)) job_print(job);
    return job_good(job);
}

// ------------------------------------------------------------------------------------------------
// Runs: what a job leaves in --out

typedef struct {
    const char *name, *arguments;
} Shape;

#define COMMON "--layers 2 --batch 2 --steps 20 --lr 3e-3 --warmup 3 --schedule constant --clip 0.5 --spike-sigma 0 " \
               "--spike-warmup 4 "

// 24 sequences make a step: 12, 6, 4 or 3 micro-batches for 1 to 4 ranks. Nothing divides the odd one. Steps whose norm
// is over --clip times --spike-skip are skipped; each model has some.
static const Shape SHAPES[] = {
    {"gpt2", COMMON "--family gpt2 --data train.bin --val val.bin --heads 2 --channels 32 --seq 24 --total-batch 576 "
             "--spike-skip 1.5"},
    {"llama", COMMON "--family llama --data train.bin --val val.bin --val-overlap 5 --heads 4 --kv-heads 2 "
              "--channels 32 --ffn 64 --tied off --seq 24 --total-batch 576 --spike-skip 1.74"},
    {"odd", COMMON "--family gpt2 --data odd.bin --val odd_val.bin --heads 3 --channels 39 --ffn 71 --seq 23 "
            "--total-batch 552 --spike-skip 1.47 --dropout 0.1"},
};
enum { GPT2, LLAMA, ODD, SHAPE_COUNT };

// Trains into the directory `name`, unless it is there and is not to be resumed.
static bool run_make(const char* name, const char* program, Starter launch, size_t world, const char* shape,
                     const char* more) {
    Job job;
    char out[256];
    if (directory_exists(name) && !(more && strstr(more, "--resume"))) return true;
    snprintf(out, sizeof out, "--out %.200s", name);
    Task task = task_of(launch, program, world, shape, out, more);
    bool good = job_run(&job, &task);
    if (good && test.show) print_indented(job.programs[0].text[0]);
    job_free(&job);
    return good;
}

// The run of a shape on so many ranks at a stage that several tests refer to.
static bool run_usual(char name[64], size_t shape, size_t world, size_t zero) {
    snprintf(name, 64, "%s-%zu-zero%zu", SHAPES[shape].name, world, zero);
    // Among several ranks sums are exact by default, for one they are not.
    const char* more = world == 1 ? "--reduce exact --zero %zu" : "--zero %zu";
    return run_make(name, test.train, FORKED, world, SHAPES[shape].arguments, text_of(more, zero));
}

// The values of a key in metrics.jsonl, a line each: their number. NAN stands for what is not there.
static size_t log_numbers(double values[STEPS], const char* run, const char* key) {
    char path[128], *text = NULL;
    size_t bytes, count = 0;
    Error error;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    if (!file_read(path, (size_t)1 << 24, &text, &bytes, &error)) return 0;
    for (char* line = text; *line && count < STEPS;) {
        size_t length = strcspn(line, "\n");
        Json json;
        values[count] = NAN;
        if (json_parse(&json, line, length, path, &error)) {
            json_number(&json, json_get(&json, 0, key), &values[count]);
            json_free(&json);
        }
        count++;
        line += length + (line[length] == '\n');
    }
    free(text);
    return count;
}

static double log_last(const char* run, const char* key) {
    double values[STEPS];
    size_t count = log_numbers(values, run, key);
    return count > 0 ? values[count - 1] : NAN;
}

// The largest relative difference of a key between two runs of 20 steps; infinite where one is not whole.
static double logs_apart(const char* a, const char* b, const char* key) {
    double x[STEPS], y[STEPS], worst = 0;
    if (log_numbers(x, a, key) != STEPS || log_numbers(y, b, key) != STEPS) return INFINITY;
    for (size_t i = 0; i < STEPS; i++) {
        double apart = fabs(x[i] / y[i] - 1.0);
        if (!(apart <= worst)) worst = apart;
        if (isnan(apart)) return INFINITY;
    }
    return worst;
}

static bool same_tensors(const char* a, const char* b, size_t step) {
    char path[128];
    uint64_t hash[2];
    Error error;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/step_%08zu", i == 0 ? a : b, step);
        hash[i] = weights_hash(path, &error);
    }
    return hash[0] != 0 && hash[0] == hash[1];
}

// ------------------------------------------------------------------------------------------------
// Data

static void expect_loader(const Dataset* data, size_t world, uint64_t first_sample) {
    enum { B = 2, T = 23, BATCHES = 24 };
    static int32_t alone[BATCHES][2][B * T], ours[2][B * T];
    static Loader loader;
    Error error;
    size_t right = 0, read = 0, different = 0;
    need(loader_open(&loader, data, 256, 7, 0, 1, B, T, &error) && loader_start(&loader, first_sample, &error),
         "a loader");
    for (size_t i = 0; i < BATCHES; i++) need(loader_next(&loader, alone[i][0], alone[i][1], &error), "a batch");
    loader_close(&loader);
    for (size_t rank = 0; rank < world; rank++) {
        need(loader_open(&loader, data, 256, 7, rank, world, B, T, &error) &&
                 loader_start(&loader, first_sample, &error), "a loader");
        for (size_t i = rank; i < BATCHES; i += world, read++) {
            need(loader_next(&loader, ours[0], ours[1], &error), "a batch");
            right += memcmp(ours, alone[i], sizeof ours) == 0;
            for (size_t j = 0; j < i; j++) different += memcmp(ours, alone[j], sizeof ours) != 0;
        }
        loader_close(&loader);
    }
    check(right == BATCHES && read == BATCHES && different == BATCHES * (BATCHES - 1) / 2,
            "%zu ranks from sample %zu on: %zu of %d micro-batches are those of one rank, each read once", world,
            (size_t)first_sample, right, BATCHES);
}

static void test_data(void) {
    Dataset data;
    Error error;
    need(dataset_open(&data, "train.bin", &error), "train.bin");
    for (size_t world = 1; world <= RANKS_MAX; world++)
        for (uint64_t first = 0; first < 200; first += 101) expect_loader(&data, world, first);
    dataset_close(&data);
}

// ------------------------------------------------------------------------------------------------
// Stages

// Steps of a run that were skipped, and those whose gradient was cut to the norm 0.5.
static void count_guarded(size_t* skipped, size_t* clipped, const char* run) {
    double norms[STEPS], skips[STEPS];
    size_t count = log_numbers(norms, run, "grad_norm");
    log_numbers(skips, run, "skipped");
    *skipped = count ? (size_t)skips[count - 1] : 0;
    *clipped = 0;
    for (size_t i = 0; i < count; i++) *clipped += norms[i] > 0.5 && skips[i] == (i ? skips[i - 1] : 0);
}

static void expect_stages(size_t shape, size_t world) {
    char runs[3][64], alone[64];
    size_t skipped, clipped, different = 0;
    bool good = run_usual(alone, shape, 1, 0);
    for (size_t zero = 0; zero < 3; zero++) good = run_usual(runs[zero], shape, world, zero) && good;
    if (!check(good, "%s, %zu ranks: stages 0, 1 and 2 train", SHAPES[shape].name, world)) return;
    for (size_t zero = 1; zero < 3; zero++)
        check(same_tensors(runs[0], runs[zero], STEPS) && logs_apart(runs[0], runs[zero], "loss") == 0 &&
                    logs_apart(runs[0], runs[zero], "grad_norm") == 0,
                "%s, %zu ranks: stage %zu has the weights, moments, losses and norms of stage 0, to the bit",
                SHAPES[shape].name, world, zero);
    count_guarded(&skipped, &clipped, runs[0]);
    check(skipped > 0 && skipped < STEPS && clipped > 0, "%s, %zu ranks: %zu of %d steps are skipped and %zu clipped",
            SHAPES[shape].name, world, skipped, STEPS, clipped);
    if (world == 1) return;
    check(same_tensors(runs[0], alone, STEPS),
            "%s, %zu ranks: exact sums give the weights and moments of one rank, to the bit",
            SHAPES[shape].name, world);
    double apart = logs_apart(runs[0], alone, "loss");
    check(apart <= LOSS_BOUND && log_last(runs[0], "skipped") == log_last(alone, "skipped") &&
                log_last(runs[0], "tokens") == log_last(alone, "tokens"),
            "%s, %zu ranks: losses, tokens and skipped steps of one rank; losses within %.1e <= %.0e",
            SHAPES[shape].name, world, apart, LOSS_BOUND);
    apart = fabs(log_last(runs[2], "val_loss") / log_last(alone, "val_loss") - 1);
    check(apart <= LOSS_BOUND, "%s, %zu ranks: the validation's loss of one rank within %.1e <= %.0e",
            SHAPES[shape].name, world, apart, LOSS_BOUND);
    double low[STEPS], middle[STEPS], high[STEPS], mean[STEPS];
    size_t lines = log_numbers(low, runs[0], "loss_ranks_min");
    log_numbers(middle, runs[0], "loss_ranks_median");
    log_numbers(high, runs[0], "loss_ranks_max");
    log_numbers(mean, runs[0], "loss");
    for (size_t i = 0; i < lines; i++) {
        different += low[i] < high[i];
        good = good && low[i] <= middle[i] && middle[i] <= high[i] && low[i] <= mean[i] && mean[i] <= high[i];
    }
    check(good && lines == STEPS && different == STEPS,
            "%s, %zu ranks: the log has the least, the middle and the largest of the ranks' losses",
            SHAPES[shape].name, world);
}

static void test_stages(void) {
    for (size_t shape = 0; shape < SHAPE_COUNT; shape++)
        for (size_t world = 1; world <= RANKS_MAX; world++) expect_stages(shape, world);
}

// ------------------------------------------------------------------------------------------------
// Other ways to add gradients

// Three stages with the same flags end with the same bits.
static void expect_same_stages(const char* what, const char* program, size_t shape, size_t world, const char* more) {
    static size_t runs;
    char names[3][64], flags[256];
    bool good = true;
    for (size_t zero = 0; zero < 3; zero++) {
        snprintf(names[zero], sizeof names[0], "same-%zu", runs++);
        snprintf(flags, sizeof flags, "%.200s --zero %zu", more, zero);
        good = good && run_make(names[zero], program, FORKED, world, SHAPES[shape].arguments, flags);
    }
    good = good && same_tensors(names[0], names[1], STEPS) && same_tensors(names[0], names[2], STEPS);
    check(good, "%s, %s, %zu ranks, %s: stages 0, 1 and 2 end with the same bits", what, SHAPES[shape].name, world,
            more);
}

static void test_float(void) {
    expect_same_stages("float", test.train, GPT2, 3, "--reduce float --total-batch 144");
    expect_same_stages("float", test.train, ODD, 3, "--reduce float --total-batch 138");
    expect_same_stages("float", test.train, LLAMA, 4, "--reduce float --total-batch 192");
}

// The distance from one to the next number of the type of a build, which names it in its help; 0: unknown.
static double program_epsilon(const char* program, char type[8]) {
    Job job;
    Task task = task_of(BY_HAND, program, 1, "--help", NULL, NULL);
    double epsilon = 0;
    snprintf(type, 8, "?");
    if (job_run(&job, &task)) {
        const char* text = job.programs[0].text[0];
        if (strstr(text, "(fp32 build)")) epsilon = 0x1p-23, snprintf(type, 8, "fp32");
        if (strstr(text, "(bf16 build)")) epsilon = 0x1p-7, snprintf(type, 8, "bf16");
        if (strstr(text, "(fp16 build)")) epsilon = 0x1p-10, snprintf(type, 8, "fp16");
    }
    job_free(&job);
    return epsilon;
}

// Gradients that travel in the type of storage lose what it cannot hold: each of a few roundings is half an epsilon,
// and the losses move by less than the gradients.
static void expect_storage(const char* program, size_t shape) {
    char type[8], exact[64], run[64], flags[64];
    double epsilon = program_epsilon(program, type);
    if (!check(epsilon > 0, "%s: a build of known type", type)) return;
    double bound = fmax(epsilon, LOSS_BOUND);
    snprintf(exact, sizeof exact, "exact-%s-%s", type, SHAPES[shape].name);
    bool good = run_make(exact, program, FORKED, 3, SHAPES[shape].arguments, "--zero 0 --reduce exact");
    for (size_t zero = 0; zero < 3 && good; zero++) {
        snprintf(run, sizeof run, "storage-%s-%s-zero%zu", type, SHAPES[shape].name, zero);
        snprintf(flags, sizeof flags, "--zero %zu --reduce storage", zero);
        good = run_make(run, program, FORKED, 3, SHAPES[shape].arguments, flags);
        double apart = good ? logs_apart(run, exact, "loss") : INFINITY;
        check(apart <= bound, "storage, %s, %s, 3 ranks, stage %zu: losses of --reduce exact within %.1e <= %.1e",
                type, SHAPES[shape].name, zero, apart, bound);
    }
    if (!good) check(false, "storage, %s, %s: trains", type, SHAPES[shape].name);
}

static void test_storage(void) {
    expect_storage(test.train, GPT2);
    if (test.train16[0] == 0) {
        skip("a 16-bit build", "none was given with --train16");
        return;
    }
    expect_storage(test.train16, GPT2);
    expect_storage(test.train16, LLAMA);
    expect_same_stages("16 bits", test.train16, GPT2, 2, "--reduce exact");
    expect_same_stages("16 bits", test.train16, LLAMA, 3, "--reduce exact");
    expect_same_stages("16 bits, stochastic rounding", test.train16, ODD, 4, "--masters off --dropout 0.1");
}

// ------------------------------------------------------------------------------------------------
// Resume

static void test_resume(void) {
    char whole[64], name[64], flags[128];
    static const struct { size_t world, zero, until; } moves[] = {{3, 2, 5}, {2, 1, 10}, {1, 0, 15}, {4, 2, 20}};
    for (size_t zero = 0; zero < 3; zero++) {
        snprintf(name, sizeof name, "resumed-zero%zu", zero);
        bool good = run_usual(whole, ODD, 3, zero);
        snprintf(flags, sizeof flags, "--zero %zu --steps 10", zero);
        good = good && run_make(name, test.train, FORKED, 3, SHAPES[ODD].arguments, flags);
        snprintf(flags, sizeof flags, "--zero %zu --resume on", zero);
        good = good && run_make(name, test.train, FORKED, 3, SHAPES[ODD].arguments, flags);
        check(good && same_tensors(whole, name, STEPS) && logs_apart(whole, name, "loss") == 0,
                "3 ranks, stage %zu: 10 steps + resume + 10 steps have the bits of 20", zero);
    }
    for (size_t shape = LLAMA; shape <= ODD; shape++) {
        bool good = run_usual(whole, shape, 1, 0);
        snprintf(name, sizeof name, "moved-%s", SHAPES[shape].name);
        for (size_t i = 0; i < COUNT_OF(moves); i++) {
            snprintf(flags, sizeof flags, "--zero %zu --steps %zu --resume on", moves[i].zero, moves[i].until);
            good = good && run_make(name, test.train, FORKED, moves[i].world, SHAPES[shape].arguments, flags);
        }
        double apart = good ? logs_apart(name, whole, "loss") : INFINITY;
        check(apart <= LOSS_BOUND && log_last(name, "skipped") == log_last(whole, "skipped"),
                "%s: 5 steps each of 3 ranks at stage 2, 2 at stage 1, 1, and 4 at stage 2: losses of one rank within "
                "%.1e <= %.0e", SHAPES[shape].name, apart, LOSS_BOUND);
    }
    bool good =
        run_usual(whole, GPT2, 3, 2) && run_make("begun-elsewhere", test.train, FORKED, 2,
                                                 "--family gpt2 --data train.bin --val val.bin --layers 2 --heads 2 "
                                                 "--channels 32 --seq 24 --batch 2 --steps 1 --lr 0",
                                                 "--zero 1 --init-from gpt2-3-zero2/step_00000020");
    double apart = fabs(log_last("begun-elsewhere", "val_loss") / log_last(whole, "val_loss") - 1);
    check(good && apart <= LOSS_BOUND,
          "--init-from: 2 ranks begin with the weights of 3; the validation's loss is theirs within %.1e <= %.0e",
          apart, LOSS_BOUND);
}

// ------------------------------------------------------------------------------------------------
// Launchers

static void expect_launch(const char* what, const char* program, Starter launch, size_t world) {
    char forked[64], name[64];
    bool good = run_usual(forked, GPT2, world, 2);
    snprintf(name, sizeof name, "launch-%d-%d-%zu", (int)launch, program == test.train_mpi, world);
    good = good && run_make(name, program, launch, world, SHAPES[GPT2].arguments, "--zero 2 --reduce exact");
    check(good && same_tensors(forked, name, STEPS) && logs_apart(forked, name, "loss") == 0,
            "%zu ranks %s have the bits of --ranks %zu", world, what, world);
}

static void test_launch(void) {
    Job job;
    size_t talkers = 0;
    for (size_t world = 1; world <= RANKS_MAX; world++) expect_launch("started by hand", test.train, BY_HAND, world);
    Task task = task_of(BY_HAND, test.train, 3, SHAPES[GPT2].arguments, "--steps 2 --zero 1", NULL);
    bool good = job_run(&job, &task);
    for (size_t i = 0; i < job.count; i++)
        talkers += (i > 0 && job.programs[i].text[0][0] != 0) || job.programs[i].text[1][0] != 0;
    check(good && talkers == 0 && strstr(job.programs[0].text[0], "step ") != NULL,
            "rank 0 alone prints the progress, and nobody prints to stderr");
    if (talkers) job_print(&job);
    job_free(&job);
    for (size_t world = 1; world <= RANKS_MAX && test.mpirun; world++) {
        expect_launch("of mpirun, over sockets,", test.train, MPIRUN, world);
        // MPI itself does not free all it takes: where the program is built with the address sanitizer it is not to say
        // so.
        setenv("ASAN_OPTIONS", "detect_leaks=0", true);
        if (test.train_mpi[0]) expect_launch("of mpirun, over MPI,", test.train_mpi, MPIRUN, world);
        unsetenv("ASAN_OPTIONS");
    }
    if (!test.mpirun) skip("ranks of mpirun", "there is none, or it is switched off");
    else if (test.train_mpi[0] == 0) skip("ranks that speak MPI", "no build with MPI was given with --train-mpi");
}

// ------------------------------------------------------------------------------------------------
// Memory

#define LARGE "--data train.bin --family gpt2 --layers 10 --heads 4 --channels 288 --seq 16 --batch 1 --steps 2"

// What --plan says that each rank takes: the total, and what stands beside it.
static double plan_bytes(size_t world, size_t zero) {
    Job job;
    Task task = task_of(FORKED, test.train, world, LARGE, "--plan on", text_of("--zero %zu", zero));
    double bytes = 0;
    if (job_run(&job, &task)) {
        for (const char* line = job.programs[0].text[0]; line; line = strchr(line, '\n')) {
            line += *line == '\n';
            size_t length = strcspn(line, "\n"), digits = length;
            bool counts = strncmp(line, "  total ", 8) == 0 || strncmp(line, "  outside:", 10) == 0;
            while (digits > 0 && line[digits - 1] != ' ') digits--;
            if (counts) bytes += 1e6 * strtod(line + digits, NULL);
        }
    }
    job_free(&job);
    return bytes;
}

// Ranks are started by hand, since the peak of a process is known to who started it.
static void test_memory(void) {
    static const size_t worlds[] = {1, 2, 4};
    double planned[5][3];
#ifdef __SANITIZE_ADDRESS__
    skip("peaks of memory", "the address sanitizer, which this is built with, takes some too");
    return;
#endif
    for (size_t w = 0; w < 3; w++) {
        for (size_t zero = 0; zero < 3; zero++) {
            Job job;
            size_t world = worlds[w];
            Task task = task_of(BY_HAND, test.train, world, LARGE, text_of("--total-batch %zu", 16 * world),
                                text_of("--zero %zu", zero));
            double least = INFINITY, most = 0, plan = planned[world][zero] = plan_bytes(world, zero);
            bool good = job_run(&job, &task);
            for (size_t i = 0; i < job.count; i++) {
                least = fmin(least, (double)job.programs[i].peak);
                most = fmax(most, (double)job.programs[i].peak);
            }
            check(good && plan > 0 && least >= 0.95 * plan && most <= 1.05 * plan,
                    "%zu ranks, stage %zu: planned %.1f MB, peaks of the ranks %.1f to %.1f MB (%+.1f%% to %+.1f%%)",
                    world, zero, 1e-6 * plan, 1e-6 * least, 1e-6 * most, 100 * (least / plan - 1),
                    100 * (most / plan - 1));
            job_free(&job);
        }
    }
    check(planned[4][2] < planned[4][1] && planned[4][1] < planned[4][0] && planned[4][1] < planned[2][1] &&
                planned[4][2] < planned[2][2],
            "each stage takes less memory than the one before it, and with more ranks each of them less");
}

// ------------------------------------------------------------------------------------------------
// Overlap

enum { BUCKETS = 26 };  // 24 blocks, the embeddings, the head
#define DEEP "--data train.bin --family gpt2 --layers 24 --heads 2 --channels 64 --seq 64 --batch 8 --total-batch 1024"

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Of a step of 2 ranks, in ms: the least time, and the middle of what rank 0 waited for others.
typedef struct {
    double step, wait;
} Steps;

// Improves on `best`: a run in which rank 0 begins every collective over the flat vector delay_ms later, and waits for
// it at once if `blocking`. The least time, since other work on the machine makes steps longer, and what is not hidden
// of a delay is in every step.
static void time_steps(Steps* best, size_t zero, double delay_ms, bool blocking) {
    static size_t runs;
    const char* name = text_of("overlap-%zu", runs++);
    char out[64], variables[160];
    double ms[STEPS], waited[STEPS];
    Job job;
    snprintf(out, sizeof out, "--out %s --steps 10", name);
    snprintf(variables, sizeof variables, "LLMTRAIN_TEST_FAULT=rank 0 step 1 at collective do delay %.3f%s", delay_ms,
             blocking ? "; rank 0 step 1 at start do wait" : "");
    Task task = task_of(FORKED, test.train, 2, DEEP, out, text_of("--zero %zu", zero));
    task.variables = variables;
    bool good = job_run(&job, &task);
    job_free(&job);
    size_t count = good ? log_numbers(ms, name, "ms") : 0, first = 2;  // memory and caches are warm then
    if (count <= first || log_numbers(waited, name, "wait_share") != count) return;
    for (size_t i = 0; i < count; i++) waited[i] *= ms[i];
    qsort(ms + first, count - first, sizeof(double), compare_doubles);
    qsort(waited + first, count - first, sizeof(double), compare_doubles);
    best->step = fmin(best->step, ms[first]);
    best->wait = fmin(best->wait, waited[first + (count - first) / 2]);
}

// Collectives are made longer by d ms each: on rank 0, for which the other waits. What that adds to a step, or to what
// a rank waits for others in it, may be at most 15% of what it adds where every collective is waited for at once. Stage
// 0 communicates under the backward, which takes at least half of a step; stages 1 and 2 gather parameters besides,
// under the forward, which takes at least 0.3 of it; the delays of each are 0.6 of that together. A machine with other
// work can be slow at the wrong time: up to four runs of each kind, the best counts.
static void test_overlap(void) {
    for (size_t zero = 0; zero < 3; zero++) {
        size_t collectives = zero == 0 ? BUCKETS : 2 * BUCKETS;
        Steps plain = {NAN, NAN}, late = plain, blocking = plain, blocking_late = plain;
        double delay = 0, step = NAN, wait = NAN;
        bool good = false;
        for (int attempt = 0; attempt < 4 && !good; attempt++) {
            time_steps(&plain, zero, 0, false);
            if (attempt == 0) delay = 0.6 * plain.step * (zero == 0 ? 0.5 : 0.3) / BUCKETS;
            time_steps(&late, zero, delay, false);
            time_steps(&blocking, zero, 0, true);
            time_steps(&blocking_late, zero, delay, true);
            step = fmax(late.step - plain.step, 0) / (blocking_late.step - blocking.step);
            wait = fmax(late.wait - plain.wait, 0) / (blocking_late.wait - blocking.wait);
            good = fmin(step, wait) <= 0.15 &&
                   blocking_late.wait - blocking.wait > 0.5 * (double)collectives * delay;  // there were delays
        }
        check(good,
              "stage %zu: %zu collectives that take %.1f ms longer make a step of %.0f ms take %.0f ms; waited for at "
              "once, one of "
              "%.0f ms takes %.0f ms: %.0f%% of communication is hidden, by what the ranks wait %.0f%%",
              zero, collectives, delay, plain.step, late.step, blocking.step, blocking_late.step, 100 * (1 - step),
              100 * (1 - wait));
    }
}

// ------------------------------------------------------------------------------------------------
// Faults

// All that a step can have: a validation, a checkpoint, the gathering of parameters.
#define WATCHED "--steps 3 --val-every 1 --val-windows 8 --ckpt-every 1 --timeout 3"

// Lines of stderr; bad are those that are no sentence of the program.
static size_t count_sentences(const char* text, size_t* bad) {
    size_t count = 0;
    *bad = 0;
    while (*text) {
        size_t length = strcspn(text, "\n");
        *(strncmp(text, "train: ", 7) == 0 && length > 20 ? &count : bad) += 1;
        text += length + (text[length] == '\n');
    }
    return count;
}

// Whether the first rank that a sentence speaks of is the one, not counting its beginning "train: rank R: ".
static bool blames(const char* text, size_t rank) {
    size_t named;
    int used = 0;
    if (sscanf(text, "train: rank %zu: %n", &named, &used) == 1 && used > 0) text += used;
    for (const char* place = text; (place = strstr(place, "rank")) != NULL; place++)
        if (sscanf(place, "ranks %zu", &named) == 1 || sscanf(place, "rank %zu", &named) == 1) return named == rank;
    return false;
}

// All ranks but the victim have said which it was, and ended in time.
static void judge_fault(Job* job, const char* what, size_t victim, bool stops) {
    Program* v = &job->programs[victim];
    bool happened = stops ? v->stopped : v->ended && WIFSIGNALED(v->status) && !v->late;
    double at = stops ? v->stopped_ms : v->ended_ms, latest = 0;
    bool good = happened;
    for (size_t i = 0; i < job->count; i++) {
        const Program* p = &job->programs[i];
        size_t bad;
        if (i == victim) continue;
        size_t sentences = count_sentences(p->text[1], &bad);
        good = good && !p->late && WIFEXITED(p->status) && WEXITSTATUS(p->status) != 0 && sentences == 1 && bad == 0 &&
               blames(p->text[1], victim);
        latest = fmax(latest, p->ended_ms - at);
    }
    good = good && latest <= (stops ? TIMEOUT_MS : 0) + SLACK_MS;
    check(good, "%s%s: the others name it and end, the last after %.1f s", what,
            happened ? "" : ", which does not happen", latest / 1e3);
    if (!good) job_print(job);
}

typedef struct {
    Job job;
    char what[128];
    size_t victim;
    bool stops;
} FaultCase;

static void faults_judge(FaultCase* cases, size_t count) {
    static Job jobs[16];
    for (size_t i = 0; i < count; i++) jobs[i] = cases[i].job;
    jobs_wait(jobs, count);
    for (size_t i = 0; i < count; i++) {
        judge_fault(&jobs[i], cases[i].what, cases[i].victim, cases[i].stops);
        job_free(&jobs[i]);
    }
}

// In the child: standard error is a pipe that is full.
static void become_unread(const void* pipe_end) {
    environment_clear();
    environment_set("OMP_NUM_THREADS=1|LLMTRAIN_TEST_FAULT=rank 1 step 2 at backward do kill");
    dup2(*(const int*)pipe_end, 2);
}

// What comes until the other end is closed, but for blanks: so many bytes.
static size_t read_late(int end) {
    char text[4096];
    size_t bytes = 0;
    for (double until = now_ms() + SLACK_MS; now_ms() < until;) {
        ssize_t n = read(end, text, sizeof text);
        if (n == 0) break;
        if (n < 0) sleep_ms(5);
        for (ssize_t i = 0; i < n; i++) bytes += text[i] != ' ';
    }
    close(end);
    return bytes;
}

// Rank 0 prints the first report, and does not end before somebody has read it. Which rank's it is is chance; so there
// are some runs.
static void expect_slow_reader(void) {
    enum { RUNS = 4, SENTENCE = 40 };
    Program programs[RUNS];
    static Words w;
    char blanks[4096];
    int ends[RUNS][2];
    bool good = true;
    memset(blanks, ' ', sizeof blanks);
    words_put(&w, 0, test.train, strlen(test.train));
    flags_add(&w, SHAPES[GPT2].arguments);
    flags_add(&w, text_of("--ranks %zu --timeout 3", RANKS_MAX));
    for (int i = 0; i < RUNS; i++) {
        need(pipe_open(ends[i]), "a pipe");
        while (write(ends[i][1], blanks, sizeof blanks) > 0) {}
        fcntl(ends[i][1], F_SETFL, 0);
        program_start(&programs[i], w.words, become_unread, &ends[i][1]);
        close(ends[i][1]);
    }
    sleep_ms(5000);
    for (int i = 0; i < RUNS; i++) good = read_late(ends[i][0]) > SENTENCE && good;
    for (int i = 0; i < RUNS; i++) {
        programs_wait(&programs[i], 1, LIMIT_MS);
        good = good && !programs[i].late && WIFEXITED(programs[i].status) && WEXITSTATUS(programs[i].status) != 0;
        program_free(&programs[i]);
    }
    check(good, "--ranks %zu, rank 1 killed, and nobody reads standard error for a while: it is said all the same",
          RANKS_MAX);
}

// Forked ranks: who started the program sees one process, and one sentence, and no process may be left.
static void expect_forked_fault(size_t victim) {
    Job job;
    char fault[128];
    snprintf(fault, sizeof fault, "LLMTRAIN_TEST_FAULT=rank %zu step 2 at backward do kill", victim);
    Task task = task_of(FORKED, test.train, RANKS_MAX, SHAPES[GPT2].arguments, "--steps 3 --timeout 3", NULL);
    task.variables = fault;
    job_start(&job, &task);
    jobs_wait(&job, 1);
    Program* p = &job.programs[0];
    size_t bad, sentences = count_sentences(p->text[1], &bad);
    sleep_ms(200);  // what is left has been told to end
    while (waitpid(-p->pid, NULL, WNOHANG) > 0) {}
    bool good = kill(-p->pid, 0) != 0 && errno == ESRCH && !p->late && p->ended_ms - p->began_ms < SLACK_MS + 2e3;
    if (victim == 0) good = good && WIFSIGNALED(p->status) && WTERMSIG(p->status) == SIGKILL;
    else
        good = good && WIFEXITED(p->status) && WEXITSTATUS(p->status) != 0 && sentences == 1 && bad == 0 &&
               blames(p->text[1], victim);
    check(good, "--ranks %zu, rank %zu killed: %s, and no process is left", RANKS_MAX, victim,
            victim == 0 ? "the others end with it" : "the exit code and one sentence say so");
    if (!good) job_print(&job);
    job_free(&job);
}

// One rank is asked to stop: all do after the same step, and it is saved.
static void expect_interrupt(void) {
    Job job;
    unsigned long long step = 0;
    bool good = true;
    Task task = task_of(BY_HAND, test.train, 3, SHAPES[ODD].arguments, "--steps 5000 --timeout 3 --out asked --zero 1",
                        NULL);
    job_start(&job, &task);
    double deadline = now_ms() + LIMIT_MS;
    while (isnan(log_last("asked", "step")) && now_ms() < deadline) sleep_ms(20);
    sleep_ms(100);
    kill(job.programs[1].pid, SIGTERM);
    jobs_wait(&job, 1);
    for (size_t i = 0; i < job.count; i++) {
        const Program* p = &job.programs[i];
        size_t bad, sentences = count_sentences(p->text[1], &bad);
        good = good && WIFEXITED(p->status) && WEXITSTATUS(p->status) == 75 && bad == 0 && sentences == 1;
    }
    const char* said = strstr(job.programs[0].text[1], "after step ");
    good = good && said && sscanf(said, "after step %llu;", &step) == 1 && step > 0 && step < 5000;
    good = good && run_make("straight", test.train, FORKED, 3, SHAPES[ODD].arguments,
                            text_of("--zero 1 --steps %llu", step));
    check(
        good && same_tensors("asked", "straight", step),
        "rank 1 of 3 is asked to stop: all do, each says so, and it is saved after step %llu what a run to there saves",
        step);
    if (!good) job_print(&job);
    job_free(&job);
}

static void test_faults(void) {
    static const char* const points[] = {"load", "forward", "backward", "reduce", "update", "gather", "validate",
                                         "save"};
    static const char* const acts[] = {"kill", "stop", "segv"};
    enum { POINTS = 8, GATHER = 5, AT_ONCE = 12, CASES = 2 * 3 * POINTS };
    static FaultCase cases[AT_ONCE];
    size_t filled = 0;
    for (size_t i = 0; i < CASES; i++) {
        size_t victim = i % 2, point = i / 2 % POINTS, act = i / 2 / POINTS;
        size_t zero = point == GATHER ? 1 + victim : i % 3;  // stage 0 gathers nothing
        char fault[128], out[64];
        FaultCase* c = &cases[filled++];
        snprintf(fault, sizeof fault, "LLMTRAIN_TEST_FAULT=rank %zu step 2 at %s do %s", victim, points[point],
                 acts[act]);
        snprintf(out, sizeof out, "--out fault-%zu --zero %zu", i, zero);
        snprintf(c->what, sizeof c->what, "rank %zu of 3, stage %zu, %s at %s", victim, zero, acts[act], points[point]);
        c->victim = victim;
        c->stops = act == 1;
        Task task = task_of(BY_HAND, test.train, 3, SHAPES[GPT2].arguments, WATCHED, out);
        task.variables = fault;
        job_start(&c->job, &task);
        if (filled < AT_ONCE && i + 1 < CASES) continue;
        faults_judge(cases, filled);
        filled = 0;
    }
    for (size_t victim = 0; victim < 2; victim++) expect_forked_fault(victim);
    expect_slow_reader();
    expect_interrupt();
}

// ------------------------------------------------------------------------------------------------
// Refusals

typedef struct {
    const char* name;
    Starter launch;
    size_t world, started;
    int exit_code;                // of every rank; 0: 1 or 2
    const char *arguments, *odd_arguments, *odd_variables, *variables;
    const char* fragments[2];     // of the sentence of rank 0 (of the first process)
} Refusal;

#define REFUSED_BASE "--steps 4 --zero 2 --timeout 3 --total-batch 96 --out refused"
// Rank 1 of 2 has another value of a flag.
#define DISAGREE(flag, value) \
    {"another --" flag " on rank 1", BY_HAND, 2, 0, 0, NULL, "--" flag " " value, NULL, NULL, {"--" flag, "rank 1"}}
#define FLAG(name, world, arguments, ...) {name, FORKED, world, 0, 2, arguments, NULL, NULL, NULL, {__VA_ARGS__}}

static const Refusal REFUSALS[] = {
    DISAGREE("lr", "1e-3"), DISAGREE("batch", "1"), DISAGREE("seed", "5"), DISAGREE("zero", "1"),
    DISAGREE("total-batch", "192"), DISAGREE("layers", "3"), DISAGREE("channels", "64"), DISAGREE("reduce", "float"),
    DISAGREE("clip", "2"), DISAGREE("steps", "3"), DISAGREE("optimizer", "lion"), DISAGREE("spike-skip", "9"),
    DISAGREE("val-every", "1"), DISAGREE("val", "other.bin"), DISAGREE("out", "elsewhere"),
    DISAGREE("ckpt-every", "1"), DISAGREE("check-every", "1"),
    DISAGREE("dropout", "0.1"), DISAGREE("weight-decay", "0.2"), DISAGREE("warmup", "1"),
    DISAGREE("resume", "on"),
    {"another data file on rank 1", BY_HAND, 2, 0, 0, NULL, "--data other.bin", NULL, NULL, {"data", "rank 1"}},
    {"rank 1 says WORLD_SIZE=3", BY_HAND, 2, 0, 0, NULL, NULL, "WORLD_SIZE=3", NULL, {"rank", "3"}},
    {"rank 1 never comes", BY_HAND, 2, 1, 1, NULL, NULL, NULL, NULL, {"rank 1", "has not connected"}},
    {"rank 0 never comes", BY_HAND, 2, 1, 1, NULL, NULL, NULL, "RANK=1", {"rank 0", "MASTER_PORT"}},
    {"RANK without WORLD_SIZE", BY_HAND, 2, 1, 0, NULL, NULL, NULL, "WORLD_SIZE=", {"RANK", "WORLD_SIZE"}},
    {"WORLD_SIZE without RANK", BY_HAND, 2, 1, 0, NULL, NULL, NULL, "RANK=", {"RANK", "WORLD_SIZE"}},
    {"--ranks under a launcher", BY_HAND, 2, 0, 0, "--ranks 2", NULL, NULL, NULL, {"started 2 ranks already", NULL}},
    FLAG("--zero 3", 2, "--zero 3", "--zero", "3"),
    FLAG("--ranks 0", 0, "", "--ranks", "0"),
    FLAG("--total-batch that the ranks do not divide", 3, "--total-batch 96", "--total-batch", "144"),
    FLAG("--reduce of no kind", 2, "--reduce best", "--reduce", "storage"),
    FLAG("--timeout 0", 2, "--timeout 0", "--timeout", "0"),
};
enum { REFUSAL_COUNT = COUNT_OF(REFUSALS) };

static void refusal_start(Job* job, const Refusal* r, const char* program, size_t port) {
    bool odd = r->odd_arguments || r->odd_variables;
    Task task = {r->launch, program, r->world, r->started, odd ? 1 : RANKS_MAX, r->odd_arguments, r->odd_variables,
                 r->variables, {SHAPES[GPT2].arguments, REFUSED_BASE, r->arguments}, port};
    job_start(job, &task);
}

// Each process says why in one sentence; of forked ranks there is one.
static void judge_refusal(const Job* job, const Refusal* r) {
    bool good = true;
    double latest = 0;
    for (size_t i = 0; i < job->count; i++) {
        const Program* p = &job->programs[i];
        size_t bad, sentences = count_sentences(p->text[1], &bad);
        int code = WIFEXITED(p->status) ? WEXITSTATUS(p->status) : -1;
        good = good && !p->late && (r->exit_code ? code == r->exit_code : code == 1 || code == 2);
        good = good && bad == 0 && sentences == 1;
        latest = fmax(latest, p->ended_ms - p->began_ms);
    }
    for (int f = 0; f < 2; f++)
        good = good && (r->fragments[f] == NULL || strstr(job->programs[0].text[1], r->fragments[f]));
    good = good && latest <= TIMEOUT_MS + SLACK_MS;
    check(good, "%s: said in one sentence; all ranks end within %.1f s", r->name, latest / 1e3);
    if (!good || test.show) job_print(job);
}

static void test_refusals(void) {
    enum { AT_ONCE = 10 };
    static Job jobs[AT_ONCE];
    for (size_t first = 0; first < REFUSAL_COUNT; first += AT_ONCE) {
        size_t count = min_size(AT_ONCE, REFUSAL_COUNT - first);
        for (size_t i = 0; i < count; i++) refusal_start(&jobs[i], &REFUSALS[first + i], test.train, 0);
        jobs_wait(jobs, count);
        for (size_t i = 0; i < count; i++) {
            judge_refusal(&jobs[i], &REFUSALS[first + i]);
            job_free(&jobs[i]);
        }
    }
    static const Refusal busy = {"the port is in use", BY_HAND, 2, 0, 1, NULL, NULL, NULL, NULL, {"port", "in use"}};
    int listener;
    size_t port = port_reserve(&listener);
    need(listen(listener, 8) == 0, "listening");
    refusal_start(&jobs[0], &busy, test.train, port);
    jobs_wait(jobs, 1);
    close(listener);
    judge_refusal(&jobs[0], &busy);
    job_free(&jobs[0]);

    if (!test.mpirun) return;
    Task task = task_of(MPIRUN, test.train, 2, SHAPES[GPT2].arguments, REFUSED_BASE, "--ranks 2");
    job_start(&jobs[0], &task);
    jobs_wait(jobs, 1);
    const Program* p = &jobs[0].programs[0];
    bool good = !p->late && !program_good(p) && strstr(p->text[1], "has started 2 ranks already") != NULL;
    check(good, "--ranks under mpirun: refused");
    if (!good) job_print(&jobs[0]);
    job_free(&jobs[0]);
}

// ------------------------------------------------------------------------------------------------
// What goes wrong without an end

// computes: the bit is wrong while the ranks' forwards are compared, and only then, as that of a faulty unit would be;
// otherwise it stays, in a parameter.
static void expect_corruption(size_t zero, size_t victim, bool computes) {
    Job job;
    char fault[128];
    snprintf(fault, sizeof fault, "LLMTRAIN_TEST_FAULT=rank %zu step 3 at %s do flip", victim,
             computes ? "compare" : "load");
    Task task = task_of(BY_HAND, test.train, 3, SHAPES[ODD].arguments, "--steps 6 --check-every 1 --timeout 3",
                        text_of("--zero %zu", zero));
    task.variables = fault;
    job_start(&job, &task);
    jobs_wait(&job, 1);
    const char* text = job.programs[0].text[1];
    bool good = strstr(job.programs[0].text[0], "step     2/6") &&
                strstr(text, computes ? "hidden states that it computes" : "bucket");
    for (size_t i = 0; i < job.count; i++) {
        const Program* p = &job.programs[i];
        size_t bad, sentences = count_sentences(p->text[1], &bad);
        good = good && !p->late && WIFEXITED(p->status) && WEXITSTATUS(p->status) == 1 && bad == 0 &&
               sentences == 1 && blames(p->text[1], victim);
    }
    check(good, "stage %zu, in step 3 a bit of %s of rank %zu is wrong: named, and all end", zero,
            computes ? "a forward" : "the parameters", victim);
    if (!good || test.show) job_print(&job);
    job_free(&job);
}

static void test_corruption(void) {
    char usual[64];
    for (size_t zero = 0; zero < 3; zero++)
        for (size_t victim = 0; victim < 3; victim++)
            for (int computes = 0; computes < 2; computes++) expect_corruption(zero, victim, computes);
    bool good = run_usual(usual, ODD, 3, 1) &&
                run_make("checked", test.train, FORKED, 3, SHAPES[ODD].arguments, "--zero 1 --check-every 1");
    check(good && same_tensors(usual, "checked", STEPS),
            "where nothing is wrong, --check-every 1 finds nothing and changes nothing");
}

// How often a run has rewound, as its events tell.
static size_t count_rewinds(const char* run) {
    char path[128], *text = NULL;
    size_t bytes, count = 0;
    Error error;
    snprintf(path, sizeof path, "%s/events.jsonl", run);
    if (!file_read(path, (size_t)1 << 24, &text, &bytes, &error)) return 0;
    for (const char* place = text; (place = strstr(place, "\"event\": \"rewound\"")) != NULL; place++) count++;
    free(text);
    return count;
}

// Every step stands in the log once, in order.
static bool log_is_whole(const char* run) {
    double steps[STEPS];
    bool good = log_numbers(steps, run, "step") == STEPS && log_last(run, "step") == STEPS;
    for (size_t i = 0; i < STEPS; i++) good = good && steps[i] == (double)(i + 1);
    return good;
}

static void expect_rewinds(const char* what, const char* arguments) {
    char alone[64], name[64];
    snprintf(alone, sizeof alone, "rewind-%s", what);
    bool good = run_make(alone, test.train, FORKED, 1, arguments, "--reduce exact");
    size_t rewinds = count_rewinds(alone);
    check(good && rewinds > 0 && log_is_whole(alone),
          "%s: the run goes back %zu times and on to the end; each step is in its log once", what, rewinds);
    for (size_t world = 2; world <= RANKS_MAX; world++) {
        snprintf(name, sizeof name, "rewind-%s-%zu", what, world);
        good = run_make(name, test.train, FORKED, world, arguments, text_of("--zero %zu", world - 2));
        check(good && same_tensors(alone, name, STEPS) && count_rewinds(name) == rewinds &&
                  logs_apart(alone, name, "loss") <= LOSS_BOUND,
              "%s: %zu ranks at stage %zu go back as often, to the same bits", what, world, world - 2);
    }
}

static void expect_no_rewind(const char* what, const char* arguments, int code, const char* words) {
    static size_t cases;
    Job job;
    Task task =
        task_of(FORKED, test.train, 2, arguments, text_of("--reduce float --out rewind-refused-%zu", cases++), NULL);
    job_start(&job, &task);
    jobs_wait(&job, 1);
    const Program* p = &job.programs[0];
    bool good = WIFEXITED(p->status) && WEXITSTATUS(p->status) == code && strstr(p->text[1], words);
    check(good, "%s: exit %d, '%s'", what, code, words);
    if (!good) job_print(&job);
    job_free(&job);
}

// Weights grow a thousandfold in each step, until they overflow, whatever the rounding. A thousandth of the rate is
// harmless.
#define DIVERGING \
    "--family gpt2 --data train.bin --layers 2 --heads 2 --channels 32 --seq 24 --batch 4 --steps 20 " \
    "--warmup 0 --schedule constant --clip 0 --spike-skip 0 --threads 1 --optimizer sgd --lr 100 --weight-decay 10 "

static void test_rewind(void) {
    char name[64];
    bool good = true;
    for (size_t zero = 0; zero < 3; zero++) {
        snprintf(name, sizeof name, "rewind-infinite-%zu", zero);
        good = good && run_make(name, test.train, FORKED, 3,
                                DIVERGING "--ckpt-every 1 --rewind 50 --rewind-lr 0.001 --reduce float",
                                text_of("--zero %zu", zero));
        good = good && count_rewinds(name) > 0 && log_is_whole(name) && same_tensors(name, "rewind-infinite-0", STEPS);
    }
    check(good, "a loss that is not finite: the run goes back and on to the end, in each stage to the same bits");
    good = run_make("rewind-begin", test.train, FORKED, 3,
                    DIVERGING "--ckpt-every 19 --rewind 50 --rewind-lr 0.001 --reduce float", "--zero 1");
    check(good && count_rewinds("rewind-begin") > 0 && log_is_whole("rewind-begin"),
          "without a checkpoint it goes back to the beginning");
    expect_rewinds("skipping", COMMON
                   "--family gpt2 --data train.bin --heads 2 --channels 32 --seq 24 --total-batch 576 --spike-skip 1.4 "
                   "--diverged-after 1 --ckpt-every 4 --rewind 50 --rewind-lr 0.9");
    expect_no_rewind("no rewind is left", DIVERGING "--ckpt-every 1 --rewind 1 --rewind-lr 1", 1,
                     "is nan, after 1 rewinds");
    expect_no_rewind("no checkpoint will be", DIVERGING "--rewind 1", 2, "--rewind needs --ckpt-every");
    expect_no_rewind("--rewind is not asked for", DIVERGING "--diverged-after 3", 1, "let --rewind do it");
}

static bool has_line_with(const char* text, const char* a, const char* b) {
    while (*text) {
        char line[512];
        size_t length = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)min_size(length, 500), text);
        if (strstr(line, a) && strstr(line, b)) return true;
        text += length + (text[length] == '\n');
    }
    return false;
}

static void expect_slow(size_t victim) {
    Job job;
    char fault[128], run[64], out[128], name[32];
    double slowest[STEPS], low[STEPS], high[STEPS];
    snprintf(fault, sizeof fault, "LLMTRAIN_TEST_FAULT=rank %zu step 4 at forward do delay 50", victim);
    snprintf(run, sizeof run, "slow-%zu", victim);
    snprintf(name, sizeof name, "rank %zu", victim);
    snprintf(out, sizeof out, "--out %s --steps 16", run);
    Task task = task_of(FORKED, test.train, 3, SHAPES[GPT2].arguments, out,
                        "--slow-factor 1.5 --slow-steps 5 --total-batch 144");
    task.variables = fault;
    bool good = job_run(&job, &task), named = has_line_with(job.programs[0].text[0], name, "straggler");
    size_t count = log_numbers(slowest, run, "slowest_rank"), right = 0;
    log_numbers(low, run, "ms_ranks_min");
    log_numbers(high, run, "ms_ranks_max");
    for (size_t i = 4; i < count; i++) right += slowest[i] == (double)victim && high[i] - low[i] > 25;
    good = good && named && count == 16 && right >= 11;
    check(good, "rank %zu sleeps 50 ms a step from step 4 on: the console names it, and the log in %zu of the last "
            "12 steps", victim, right);
    if (!good) print_indented(job.programs[0].text[0]);
    job_free(&job);
}

static void test_slow(void) {
    for (size_t victim = 0; victim < 3; victim++) expect_slow(victim);
}

// ------------------------------------------------------------------------------------------------

static void root_make(void) {
    root_enter();
    put_shard("train.bin", 256, 20000, 1);
    put_shard("odd.bin", 251, 20000, 2);
    put_shard("other.bin", 256, 20000, 3);
    put_shard("val.bin", 256, 1000, 4);
    put_shard("odd_val.bin", 251, 1000, 5);
}

static bool command_exists(const char* name) {
    char path[PATH_MAX];
    for (const char* place = getenv("PATH"); place && *place;) {
        size_t length = strcspn(place, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)min_size(length, 3000), place, name);
        if (access(path, X_OK) == 0) return true;
        place += length + (place[length] == ':');
    }
    return false;
}

int main(int argc, char** argv) {
    static const struct { const char* name; void (*run)(void);
    } tests[] = {
        {"data", test_data},         {"stages", test_stages},         {"float", test_float},
        {"storage", test_storage},   {"resume", test_resume},         {"launch", test_launch},
        {"memory", test_memory},     {"overlap", test_overlap},       {"faults", test_faults},
        {"refusals", test_refusals}, {"corruption", test_corruption}, {"rewind", test_rewind},
        {"slow", test_slow},
    };
    const char *train = "./train", *train16 = NULL, *train_mpi = NULL;
    bool overlap = true;
    int code;
    test.mpirun = command_exists("mpirun");
    Flag flags[] = {
        {"train", FLAG_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"train16", FLAG_TEXT, &train16, "PATH", 0, 0, "the program, built for bf16 or fp16", false},
        {"train-mpi", FLAG_TEXT, &train_mpi, "PATH", 0, 0, "the program, built for fp32 and MPI", false},
        {"mpirun", FLAG_SWITCH, &test.mpirun, "on|off", 0, 0, "start ranks with it, too", false},
        {"only", FLAG_TEXT, &test.only, "NAME", 0, 0, "one of the tests", false},
        {"overlap", FLAG_SWITCH, &overlap, "on|off", 0, 0, "the test that wants the machine for itself", false},
        {"show", FLAG_SWITCH, &test.show, "on|off", 0, 0, "print what programs say in cases that pass, too", false},
    };
    size_t flag_count = COUNT_OF(flags);
    if (!flags_begin(&code, "test_ranks", NULL, flags, flag_count, argc, argv)) return code;
    const char* given[] = {train, train16, train_mpi};
    char* paths[] = {test.train, test.train16, test.train_mpi};
    for (int i = 0; i < 3; i++) {
        if (given[i] == NULL || (realpath(given[i], paths[i]) != NULL && access(paths[i], X_OK) == 0)) continue;
        fprintf(stderr, "test_ranks: cannot run %s: %s; build it\n", given[i], strerror(errno));
        return 1;
    }
    machine_adopt_orphans(true);  // ranks whose parent was killed
    tests_begin("test_ranks");
    root_make();
    bool found = test.only == NULL;
    for (size_t i = 0; i < COUNT_OF(tests); i++) {
        if (test.only ? strcmp(test.only, tests[i].name) != 0 : !overlap && tests[i].run == test_overlap) continue;
        double began = now_ms();
        found = true;
        tests[i].run();
        printf("%s: %.1f s\n", tests[i].name, (now_ms() - began) / 1e3);
    }
    if (!found) {
        fprintf(stderr, "test_ranks: --only is '%s', which is no test; see the head of dev/test/test_ranks.c\n",
                test.only);
        return 2;
    }
    return tests_end();
}
