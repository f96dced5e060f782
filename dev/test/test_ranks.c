// test_ranks.c: training on several ranks: for any number, ZeRO stage and launcher, it is the same run.
//
//   cc -std=c11 -O2 -I. dev/test/test_ranks.c -o build/test_ranks -lm -pthread
//   build/test_ranks [--train PATH] [--train16 PATH] [--train-mpi PATH] [--export PATH]
//                    [--only NAME] [--overlap on|off]
//
//   data        ranks read different samples, and together the samples that one rank reads
//   stages      1 to 4 ranks, each ZeRO stage, three models: final weights and optimizer state have the bits of one
//               rank, and losses are its. Gradients are accumulated and clipped, some steps are skipped, one model has
//               dropout
//   float       --reduce float without accumulation: the same bits in all stages
//   storage     --reduce storage against --reduce exact; also the stages of a 16-bit build (--train16)
//   recompute   whatever the backward recomputes, the bits are those of a run that keeps everything
//   resume      10 steps + resume + 10 steps have the bits of 20; a run moves between numbers of ranks and stages;
//               another run starts from its weights
//   pipeline    stages of a pipeline, in every schedule: the bits and the log of one rank, for several models,
//               optimizers and dtypes; a run moves between pipelines and other layouts; how a model is cut
//   pipeline-faults
//               a stage that is killed or stopped: the others report it, in time; a resume has the bits. A batch or a
//               validation that cannot be read, a stop signal, a bit that changes, a rewind
//   pipeline-memory
//               the peak of the first stage is what --plan says; it grows with micro-batches for gpipe alone
//   context     ranks that share sequences, alone and with ZeRO, copies and stages: the bits and the log of one rank
//               that adds up the same parts; a run moves between such layouts
//   context-faults
//               one of them is killed or stopped, also in an exchange: as above; a bit that changes is found
//   tensor      ranks that share layers, alone and with all of the above: the bits and the log of one rank with as many
//               --leaves; a run moves between such layouts; build/export (--export) writes the same files from them
//   tensor-faults
//               one of them is killed or stopped, also in an exchange; a bit that changes is found; what is refused
//   layouts     every layout of 8 and 16 ranks; only if it is named, as in make test-more
//   optimizers  each of them: the bits of one rank in every stage, and after moving between numbers of ranks
//   launch      ranks started by hand and by mpirun, over sockets and MPI (--train-mpi), have the bits of --ranks N
//   memory      the peak of each rank is what --plan says
//   overlap     communication that takes longer does not make the step longer while there is work to do under it
//   faults      a rank that is killed or stopped at any point of a step: the others report it, in time, and end; a
//               rank that gets a stop signal: all save and end
//   refusals    ranks that do not fit together or never connect, impossible flags
//   corruption  a bit that changes in one rank's parameters, or in what it computes with them, is detected
//   rewind      a run that diverges rewinds to the same checkpoint and continues with the same bits, for every number
//               of ranks and stage; if it cannot, it says why
//   slow        a straggler is reported
//
// The test starts the program in a directory of its own and reads its output there. If a rank is to fail, the test acts
// as the launcher, and sees how each rank ends, when, and with how much memory.

#include "llmtrain/text/data.h"
#include "llmtrain/base/files.h"
#include "llmtrain/base/flags.h"
#include "llmtrain/base/json.h"
#include "llmtrain/ops/optimizers/optimizers.h"
#include "llmtrain/ranks/pipeline.h"
#include "machine.h"
#include "pieces.h"

#define RANKS_MAX ((size_t)4)
#define BY_HAND_MAX 6       // ranks that the test itself starts
#define STEPS 20
#define TIMEOUT_MS 3e3      // --timeout where something should fail
#ifdef __SANITIZE_ADDRESS__
#define SLACK_MS 9e3        // what a busy machine may add to it, and looking for leaks at the end
#else
#define SLACK_MS 3e3
#endif
#define LIMIT_MS 60e3       // after this a program counts as hung
#define LOSS_BOUND 1e-5     // relative, between numbers of ranks: sums in another order, over 20 steps, in float

static struct {
    char train[PATH_MAX], train16[PATH_MAX], train_mpi[PATH_MAX], export[PATH_MAX];  // the latter three may be empty
    const char* only;
    bool mpirun;
} test;

// A formatted text that stays valid until the test ends.
HARNESS_FORMAT(1, 2) static const char* kept(const char* format, ...) {
    static char* texts[2048];
    static size_t count;
    va_list arguments;
    va_start(arguments, format);
    need(count < COUNT_OF(texts) && vasprintf(&texts[count], format, arguments) >= 0, "memory");
    va_end(arguments);
    return texts[count++];
}

static const char* fault_variable(size_t rank, size_t step, const char* what) {
    return kept("LLMTRAIN_TEST_FAULT=rank %zu step %zu at %s", rank, step, what);
}

// ------------------------------------------------------------------------------------------------
// Jobs: a run of the program by one or more ranks

typedef enum { FORKED, BY_HAND, MPIRUN } Starter;  // --ranks N; one process per rank, with RANK and so on; mpirun

typedef struct {
    Starter launch;
    const char* program;        // NULL: that of --train
    size_t world;
    const char* arguments[3];   // in order, see flags_add
    const char* variables;      // of all ranks, see environment_set
    const char *odd_arguments, *odd_variables;  // BY_HAND: of rank 1 alone
    const char* odd_directory;  // where it starts; NULL: where the others do
    size_t started;             // BY_HAND: number of ranks to start; 0: all
    size_t port;                // BY_HAND: 0: any free port
    size_t ballast;             // bytes that a process allocates before it becomes the program
    bool full_pipe;             // standard error is full until the test reads it
} Task;

typedef struct {
    size_t count;
    Program programs[BY_HAND_MAX];
    int port;                   // socket that reserves the port; -1: none
} Job;

// Adds flags from a text, "--steps 3 --lr 1e-3", each with a value; a flag that is already there gets the new value.
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

// What determines a process' environment variables.
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
    char* ballast = task->ballast ? (char*)malloc(task->ballast) : NULL;
    if (ballast) memset(ballast, 1, task->ballast);
    if (place->rank == 1) environment_set(task->odd_variables);
    if (place->rank == 1 && task->odd_directory && chdir(task->odd_directory) != 0) _exit(EXIT_NOT_RUN);
    fcntl(2, F_SETFL, O_NONBLOCK);
    while (task->full_pipe && write(2, text_of("%4096s", ""), 4096) > 0) {}
    fcntl(2, F_SETFL, 0);
}

static void job_start(Job* job, const Task* task) {
    Place place = {task, 0, task->port};
    memset(job, 0, sizeof *job);
    job->count = task->launch != BY_HAND ? 1 : task->started ? task->started : task->world;
    job->port = -1;
    if (task->port == 0) place.port = port_reserve(&job->port);
    for (; place.rank < job->count; place.rank++) {
        static Words w;
        const char* program = task->program ? task->program : test.train;
        memset(&w, 0, sizeof w);
        if (task->launch == MPIRUN)
            words_add(&w, text_of("mpirun --allow-run-as-root --oversubscribe --bind-to none -np %zu", task->world));
        words_put(&w, w.count, program, strlen(program));
        for (size_t i = 0; i < COUNT_OF(task->arguments); i++) flags_add(&w, task->arguments[i]);
        if (task->launch == FORKED) flags_add(&w, text_of("--ranks %zu", task->world));
        if (place.rank == 1) flags_add(&w, task->odd_arguments);
        program_start(&job->programs[place.rank], w.words, become_rank, &place);
    }
}

// Waits until all processes of the jobs have ended. Stopped ones are killed when the others of their job have ended,
// and so are all that still run after LIMIT_MS.
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

static void job_print(const Job* job) {
    for (size_t i = 0; i < job->count; i++) program_print(&job->programs[i], text_of("process %zu", i));
}

// Starts a job and waits for it; true if all processes succeeded.
static bool job_run(Job* job, const Task* task) {
    bool good = true;
    job_start(job, task);
    jobs_wait(job, 1);
    for (size_t i = 0; i < job->count; i++) good = good && program_good(&job->programs[i]);
    if (!good) job_print(job);
    return good;
}

// ------------------------------------------------------------------------------------------------
// Runs: what a job leaves in --out

typedef struct {
    const char *name, *arguments;
} Shape;

#define COMMON "--layers 2 --batch 2 --steps 20 --lr 3e-3 --warmup 3 --schedule constant --clip 0.5 --spike-sigma 0 " \
               "--spike-warmup 4 "

// A step has 24 sequences: 12, 6, 4 or 3 micro-batches for 1 to 4 ranks. The odd model's sizes are divisible by
// nothing. Steps whose norm exceeds --clip times --spike-skip are skipped; each model has some.
static const Shape SHAPES[] = {
    {"gpt2", COMMON "--family gpt2 --data train.bin --val val.bin --heads 2 --channels 32 --seq 24 --total-batch 576 "
             "--spike-skip 1.5"},
    {"llama", COMMON "--family llama --data train.bin --val val.bin --val-overlap 5 --heads 4 --kv-heads 2 "
              "--channels 32 --ffn 64 --tied off --seq 24 --total-batch 576 --spike-skip 1.74"},
    {"odd", COMMON "--family gpt2 --data odd.bin --val odd_val.bin --heads 3 --channels 39 --ffn 71 --seq 23 "
            "--total-batch 552 --spike-skip 1.47 --dropout 0.1"},
};
enum { GPT2, LLAMA, ODD, SHAPE_COUNT };

// Trains into the directory `name`, unless it exists and is not to be resumed. If the run fails, its last step is
// missing and comparisons with it fail.
static const char* run_make(const char* name, Task task, const char* shape, const char* more) {
    Job job;
    if (directory_exists(name) && !(more && strstr(more, "--resume"))) return name;
    task.arguments[0] = shape;
    task.arguments[1] = kept("--out %s", name);
    task.arguments[2] = more;
    job_run(&job, &task);
    job_free(&job);
    return name;
}

static Task forked(size_t world) {
    Task task = {.launch = FORKED, .world = world};
    return task;
}

// The run of a shape on `world` ranks at a stage, which several tests use.
static const char* run_usual(size_t shape, size_t world, size_t zero) {
    // Sums are exact by default for several ranks, but not for one.
    return run_make(kept("%s-%zu-zero%zu", SHAPES[shape].name, world, zero), forked(world), SHAPES[shape].arguments,
                    kept("%s--zero %zu", world == 1 ? "--reduce exact " : "", zero));
}

static double log_last(const char* run, const char* key) {
    double values[STEPS];
    size_t count = log_numbers(values, STEPS, run, key);
    return count > 0 ? values[count - 1] : NAN;
}

// The largest relative difference of a key between two runs of 20 steps; infinite if one is incomplete.
static double logs_apart(const char* a, const char* b, const char* key) {
    double x[STEPS], y[STEPS], worst = 0;
    if (log_numbers(x, STEPS, a, key) != STEPS || log_numbers(y, STEPS, b, key) != STEPS) return INFINITY;
    for (size_t i = 0; i < STEPS; i++) {
        double apart = fabs(x[i] / y[i] - 1.0);
        if (!(apart <= worst)) worst = apart;
        if (isnan(apart)) return INFINITY;
    }
    return worst;
}

// The relative difference of a key in the last lines of two runs.
static double last_apart(const char* a, const char* b, const char* key) {
    return fabs(log_last(a, key) / log_last(b, key) - 1);
}

static bool same_tensors(const char* a, const char* b, size_t step) {
    Error error;
    uint64_t hash = weights_hash(text_of("%s/step_%08zu", a, step), &error);
    return hash != 0 && hash == weights_hash(text_of("%s/step_%08zu", b, step), &error);
}

// Whether weights and optimizer state, and the losses and norms of all steps, have the same bits.
static bool same_runs(const char* a, const char* b) {
    return same_tensors(a, b, STEPS) && logs_apart(a, b, "loss") == 0 && logs_apart(a, b, "grad_norm") == 0;
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

// Counts a run's skipped steps, and those whose gradient was clipped to the norm 0.5.
static void count_guarded(size_t* skipped, size_t* clipped, const char* run) {
    double norms[STEPS], skips[STEPS];
    size_t count = log_numbers(norms, STEPS, run, "grad_norm");
    log_numbers(skips, STEPS, run, "skipped");
    *skipped = count ? (size_t)skips[count - 1] : 0;
    *clipped = 0;
    for (size_t i = 0; i < count; i++) *clipped += norms[i] > 0.5 && skips[i] == (i ? skips[i - 1] : 0);
}

static void expect_stages(size_t shape, size_t world) {
    const char *runs[4], *alone = run_usual(shape, 1, 0), *what = kept("%s, %zu ranks", SHAPES[shape].name, world);
    size_t skipped, clipped, different = 0;
    bool good = true;
    for (size_t zero = 0; zero < 4; zero++) {
        runs[zero] = run_usual(shape, world, zero);
        good = good && log_last(runs[zero], "step") == STEPS;
    }
    if (!check(good, "%s: stages 0 to 3 train", what)) return;
    for (size_t zero = 1; zero < 4; zero++)
        check(same_runs(runs[0], runs[zero]),
              "%s: stage %zu has the weights, moments, losses and norms of stage 0, to the bit", what, zero);
    count_guarded(&skipped, &clipped, runs[0]);
    check(skipped > 0 && skipped < STEPS && clipped > 0, "%s: %zu of %d steps are skipped and %zu clipped", what,
          skipped, STEPS, clipped);
    if (world == 1) return;
    for (size_t zero = 1; zero < 4 && world == 4; zero++) {
        size_t shard = 2;
        const char* copies = run_make(kept("%s-%zu-zero%zu-shard%zu", SHAPES[shape].name, world, zero, shard),
                                      forked(world), SHAPES[shape].arguments,
                                      kept("--zero %zu --shard %zu", zero, shard));
        check(same_runs(runs[0], copies), "%s: stage %zu over %zu ranks, %zu copies: the same to the bit", what, zero,
              shard, world / shard);
    }
    if (world == 4) {  // three ranks have nothing to validate, but parameters
        const char* few = run_make(kept("%s-few", SHAPES[shape].name), forked(world), SHAPES[shape].arguments,
                                   "--zero 3 --val-windows 1 --timeout 20");
        const char* one = run_make(kept("%s-few-alone", SHAPES[shape].name), forked(1), SHAPES[shape].arguments,
                                   "--reduce exact --val-windows 1");
        check(same_runs(few, one) && last_apart(few, one, "val_loss") == 0,
              "%s: stage 3 validates one window, as one rank does", what);
    }
    check(same_runs(runs[0], alone) && last_apart(runs[3], alone, "val_loss") == 0,
          "%s: exact sums give the weights, moments, losses, norms and validation of one rank, to the bit", what);
    check(log_last(runs[0], "skipped") == log_last(alone, "skipped") &&
              log_last(runs[0], "tokens") == log_last(alone, "tokens"),
          "%s: tokens and skipped steps of one rank", what);
    double low[STEPS], middle[STEPS], high[STEPS], mean[STEPS];
    size_t lines = log_numbers(low, STEPS, runs[0], "loss_ranks_min");
    log_numbers(middle, STEPS, runs[0], "loss_ranks_median");
    log_numbers(high, STEPS, runs[0], "loss_ranks_max");
    log_numbers(mean, STEPS, runs[0], "loss");
    for (size_t i = 0; i < lines; i++) {
        different += low[i] < high[i];
        good = good && low[i] <= middle[i] && middle[i] <= high[i] && low[i] <= mean[i] && mean[i] <= high[i];
    }
    check(good && lines == STEPS && different == STEPS,
          "%s: the log has the least, the middle and the largest of the ranks' losses", what);
}

// Where runs take ten times as long, each number of ranks with one of the models.
static void test_stages(void) {
#ifdef __SANITIZE_ADDRESS__
    for (size_t world = 1; world <= RANKS_MAX; world++) expect_stages(world % SHAPE_COUNT, world);
#else
    for (size_t shape = 0; shape < SHAPE_COUNT; shape++)
        for (size_t world = 1; world <= RANKS_MAX; world++) expect_stages(shape, world);
#endif
}

// ------------------------------------------------------------------------------------------------
// Other ways to add gradients

// Three stages with the same flags end with the same bits.
static void expect_same_stages(const char* what, const char* program, size_t shape, size_t world, const char* more) {
    static size_t runs;
    const char* names[3];
    Task task = {.launch = FORKED, .program = program, .world = world};
    for (size_t zero = 0; zero < 3; zero++)
        names[zero] = run_make(kept("same-%zu", runs++), task, SHAPES[shape].arguments,
                               kept("%s --zero %zu", more, zero));
    check(same_tensors(names[0], names[1], STEPS) && same_tensors(names[0], names[2], STEPS),
          "%s, %s, %zu ranks, %s: stages 0, 1 and 2 end with the same bits", what, SHAPES[shape].name, world, more);
}

static void test_float(void) {
    expect_same_stages("float", test.train, GPT2, 3, "--reduce float --total-batch 144");
    expect_same_stages("float", test.train, ODD, 3, "--reduce float --total-batch 138");
    expect_same_stages("float", test.train, LLAMA, 4, "--reduce float --total-batch 192");
    expect_same_stages("frozen", test.train, ODD, 3, "--train block.*_weight,final_norm_bias --total-batch 138");
    expect_same_stages("frozen", test.train, LLAMA, 4, "--train block.0.*,block.1.qkv_weight --total-batch 192");
}

static const struct {
    const char* name;
    double epsilon;  // distance from 1 to the next number
} TYPES[] = {{"fp32", 0x1p-23}, {"bf16", 0x1p-7}, {"fp16", 0x1p-10}};

// Gradients reduced in the storage dtype are rounded: each of a few roundings is half an epsilon, and the losses change
// by less than the gradients. The program's help shows its dtype.
static void expect_storage(const char* program, size_t shape) {
    Job job;
    Task task = {.launch = BY_HAND, .program = program, .world = 1, .arguments = {"--help"}};
    const char *arguments = SHAPES[shape].arguments, *type = "?";
    double bound = 0;
    for (size_t i = job_run(&job, &task) ? 0 : COUNT_OF(TYPES); i < COUNT_OF(TYPES); i++) {
        if (!strstr(job.programs[0].text[0], text_of("(%s build)", TYPES[i].name))) continue;
        type = TYPES[i].name;
        bound = fmax(TYPES[i].epsilon, LOSS_BOUND);
    }
    job_free(&job);
    if (!check(bound > 0, "%s: a build of known type", type)) return;
    task.launch = FORKED;
    task.world = 3;
    const char* exact = run_make(kept("exact-%s-%zu", type, shape), task, arguments, "--zero 0 --reduce exact");
    for (size_t zero = 0; zero < 3; zero++) {
        const char* run = run_make(kept("storage-%s-%zu-zero%zu", type, shape, zero), task, arguments,
                                   kept("--zero %zu --reduce storage", zero));
        check_bound(logs_apart(run, exact, "loss"), bound,
                    "storage, %s, %s, 3 ranks, stage %zu: losses of --reduce exact", type, SHAPES[shape].name, zero);
    }
}

static void test_storage(void) {
    expect_storage(test.train, GPT2);
    if (test.train16[0] == 0) {
        skip("a 16-bit build", "none was given with --train16");
        return;
    }
    expect_storage(test.train16, LLAMA);
#ifndef __SANITIZE_ADDRESS__  // the same calls once more
    expect_storage(test.train16, GPT2);
    expect_same_stages("16 bits", test.train16, GPT2, 2, "--reduce exact");
    expect_same_stages("16 bits", test.train16, LLAMA, 3, "--reduce exact");
#endif
    expect_same_stages("16 bits, stochastic rounding", test.train16, ODD, 4, "--masters off --dropout 0.1");
}

// ------------------------------------------------------------------------------------------------
// Recomputation

// Levels and models in turn, with each number of ranks and stage; test_model has every level with every dtype.
static void test_recompute(void) {
#ifdef __SANITIZE_ADDRESS__  // uses more memory than the model
    static const char* const levels[] = {"norms", "gelu", "attention", "block", "auto --memory 1"};
#else
    static const char* const levels[] = {"norms", "gelu", "attention", "block", "auto --memory 0.02"};
#endif
    size_t turn = 0;
    for (size_t world = 1; world <= 3; world++)
        for (size_t zero = 0; zero < 4; zero++, turn++) {
            const char* level = levels[turn % COUNT_OF(levels)];
#ifdef __SANITIZE_ADDRESS__  // each level once, with 2 or 3 ranks
            if (turn < 5 || turn >= 10) continue;
#endif
            size_t shape = GPT2 + (world + zero) % 3;
            const char* run = run_make(kept("recompute-%zu", turn), forked(world), SHAPES[shape].arguments,
                                       kept("%s--zero %zu --recompute %s", world == 1 ? "--reduce exact " : "", zero,
                                            level));
            check(same_runs(run, run_usual(shape, world, zero)),
                  "%s, %zu ranks, stage %zu, --recompute %s: the same bits as without", SHAPES[shape].name, world, zero,
                  level);
        }
}

// ------------------------------------------------------------------------------------------------
// Resume

static void test_resume(void) {
    static const struct { size_t world, zero, shard, until; } moves[] = {
        {3, 3, 0, 4}, {4, 1, 2, 8}, {2, 1, 1, 12}, {1, 0, 0, 16}, {4, 3, 2, 18}, {4, 2, 2, 20}};
    for (size_t zero = 0; zero < 4; zero++) {
        const char *flags = SHAPES[ODD].arguments, *name = kept("resumed-zero%zu", zero);
        run_make(name, forked(3), flags, kept("--zero %zu --steps 10", zero));
        run_make(name, forked(3), flags, kept("--zero %zu --resume on", zero));
        check(same_runs(run_usual(ODD, 3, zero), name),
              "3 ranks, stage %zu: 10 steps + resume + 10 steps have the bits of 20", zero);
    }
    for (size_t shape = LLAMA; shape <= ODD; shape++) {
        const char *whole = run_usual(shape, 1, 0), *name = kept("moved-%s", SHAPES[shape].name);
        for (size_t i = 0; i < COUNT_OF(moves); i++)
            run_make(name, forked(moves[i].world), SHAPES[shape].arguments,
                     kept("--reduce exact --zero %zu --shard %zu --steps %zu --resume on --ckpt-keep 1", moves[i].zero,
                          moves[i].shard, moves[i].until));  // there is none to fall back to
        check(same_runs(name, whole) && log_last(name, "skipped") == log_last(whole, "skipped"),
              "%s: a few steps each of 3 ranks at stage 3, 2 copies over 2 at stage 1, 2 over 1, one rank, 2 over 2 at "
              "stage 3 and 2: the bits of one rank",
              SHAPES[shape].name);
    }
    // 144 tokens: of 3 ranks at a time, or of 3 micro-batches.
    static const struct { size_t world, until; } shared[] = {{3, 4}, {1, 8}, {3, 12}};
    const char* shape = "--family gpt2 --data train.bin --layers 2 --heads 2 --channels 32 --seq 24 --batch 2 "
                        "--lr 3e-3 --warmup 3 --schedule constant --reduce exact";
    run_make("three", forked(3), shape, "--steps 12");
    for (size_t i = 0; i < COUNT_OF(shared); i++)
        run_make("three-one-three", forked(shared[i].world), shape,
                 kept("--steps %zu --resume on --ckpt-keep 1", shared[i].until));
    check(same_tensors("three-one-three", "three", 12),
          "without --total-batch a step keeps its tokens on fewer ranks: 3, 1, 3 of them have the bits of 3");
    const char* whole = run_usual(GPT2, 3, 2);
    run_make("begun-elsewhere", forked(2),
             "--family gpt2 --data train.bin --val val.bin --layers 2 --heads 2 --channels 32 --seq 24 --batch 2 "
             "--steps 1 --lr 0", kept("--zero 1 --init-from %s/step_%08d", whole, STEPS));
    check(last_apart("begun-elsewhere", whole, "val_loss") == 0,
          "--init-from: 2 ranks begin with the weights of 3; the validation's loss is theirs");
}

// ------------------------------------------------------------------------------------------------
// Optimizers

// Each optimizer of OPTIMIZERS: every stage, and its states saved by some ranks and loaded by others.
static void test_optimizers(void) {
#ifdef __SANITIZE_ADDRESS__  // the same in fewer steps
    enum { FIRST = 2, SECOND = 4, LAST = 6 };
#else
    enum { FIRST = 7, SECOND = 13, LAST = STEPS };
#endif
    static const struct { size_t world, zero, until; } moves[] = {{3, 2, FIRST}, {2, 1, SECOND}, {3, 0, LAST}};
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++) {
        const char *optimizer = OPTIMIZERS[kind].name, *shape = SHAPES[kind % 2 ? LLAMA : ODD].arguments;
        const char *whole = kept("%s-alone", optimizer), *moved = kept("%s-moved", optimizer);
        run_make(whole, forked(1), shape, kept("--reduce exact --steps %d --optimizer %s", LAST, optimizer));
        for (size_t i = 0; i < COUNT_OF(moves); i++)
            run_make(moved, forked(moves[i].world), shape,
                     kept("--zero %zu --steps %zu --resume on --optimizer %s", moves[i].zero, moves[i].until,
                          optimizer));
        check(same_tensors(whole, moved, LAST),
              "%s: 3 ranks at stage 2, then 2 at stage 1, then 3 at stage 0 end with the bits of one", optimizer);
    }
}

// ------------------------------------------------------------------------------------------------
// Launchers

static void expect_launch(const char* what, const char* program, Starter launch, size_t world) {
    Task task = {.launch = launch, .program = program, .world = world};
    const char* name = run_make(kept("launch-%d-%d-%zu", (int)launch, program == test.train_mpi, world), task,
                                SHAPES[GPT2].arguments, "--zero 2 --reduce exact");
    check(same_runs(run_usual(GPT2, world, 2), name), "%zu ranks %s have the bits of --ranks %zu", world, what, world);
}

static void test_launch(void) {
    Job job;
    size_t talkers = 0;
    for (size_t world = 1; world <= RANKS_MAX; world++) expect_launch("started by hand", test.train, BY_HAND, world);
    Task task = {.launch = BY_HAND, .world = 3, .arguments = {SHAPES[GPT2].arguments, "--steps 2 --zero 1"}};
    bool good = job_run(&job, &task);
    for (size_t i = 0; i < job.count; i++)
        talkers += (i > 0 && job.programs[i].text[0][0] != 0) || job.programs[i].text[1][0] != 0;
    check(good && talkers == 0 && strstr(job.programs[0].text[0], "step ") != NULL,
            "rank 0 alone prints the progress, and nobody prints to stderr");
    if (talkers) job_print(&job);
    job_free(&job);
    for (size_t world = 1; world <= RANKS_MAX && test.mpirun; world++) {
        expect_launch("of mpirun, over sockets,", test.train, MPIRUN, world);
        // MPI itself leaks memory: where the program is built with AddressSanitizer, leaks are not reported.
        setenv("ASAN_OPTIONS", "detect_leaks=0", true);
        if (test.train_mpi[0]) expect_launch("of mpirun, over MPI,", test.train_mpi, MPIRUN, world);
        unsetenv("ASAN_OPTIONS");
    }
    if (!test.mpirun) skip("ranks of mpirun", "there is none");
    else if (test.train_mpi[0] == 0) skip("ranks that speak MPI", "no build with MPI was given with --train-mpi");
}

// ------------------------------------------------------------------------------------------------
// Memory

#define LARGE "--data train.bin --family gpt2 --layers 10 --heads 4 --channels 288 --seq 16 --batch 1 --steps 2"

#define LONG "--data train.bin --family gpt2 --layers 8 --heads 4 --channels 128 --seq 128 --batch 8 --steps 2"

// The memory that --plan predicts for each rank: the total, and the part outside it.
static double plan_bytes(const char* text) {
    double bytes = 0;
    for (const char* line = text; (line = strstr(line, "\n  ")) != NULL; line++)
        if (strncmp(line, "\n  total ", 9) == 0 || strncmp(line, "\n  outside:", 11) == 0)
            bytes += 1e6 * strtod(line + strcspn(line, "0123456789"), NULL);
    return bytes;
}

// The plan against the peaks of the ranks, which are started by hand, since only a parent process can read the peak of
// its children.
static double expect_memory(const char* model, size_t world, size_t zero, const char* recompute) {
    Job job;
    Task task = {.world = world,
                 .arguments = {model, "--plan on", kept("--zero %zu --recompute %s", zero, recompute)}};
    bool good = job_run(&job, &task);
    double plan = plan_bytes(job.programs[0].text[0]), least = INFINITY, most = 0;
    job_free(&job);
    task.launch = BY_HAND;
    task.arguments[1] = world > 1 ? kept("--total-batch %zu", 16 * world) : NULL;
    good = job_run(&job, &task) && good;
    for (size_t i = 0; i < job.count; i++) {
        least = fmin(least, (double)job.programs[i].peak);
        most = fmax(most, (double)job.programs[i].peak);
    }
    // And a megabyte, for the code and the stacks of threads that begin after the plan.
    check(good && plan > 0 && least >= 0.95 * plan && most <= 1.05 * plan + 1e6,
          "%zu ranks, stage %zu, --recompute %s: planned %.1f MB, peaks of the ranks %.1f to %.1f MB (%+.1f%% to "
          "%+.1f%%)", world, zero, recompute, 1e-6 * plan, 1e-6 * least, 1e-6 * most, 100 * (least / plan - 1),
          100 * (most / plan - 1));
    job_free(&job);
    return plan;
}

static void test_memory(void) {
    double planned[5][4];
#ifdef __SANITIZE_ADDRESS__
    skip("peaks of memory", "the address sanitizer, which this is built with, takes some too");
    return;
#endif
    for (size_t world = 1; world <= 4; world *= 2)
        for (size_t zero = 0; zero < 4; zero++) planned[world][zero] = expect_memory(LARGE, world, zero, "none");
    check(planned[4][3] < planned[4][2] && planned[4][2] < planned[4][1] && planned[4][1] < planned[4][0] &&
              planned[4][1] < planned[2][1] && planned[4][2] < planned[2][2] && planned[4][3] < planned[2][3],
          "each stage takes less memory than the one before it, and with more ranks each of them less");
#ifdef SYSTEM_LINUX
    Task task = {.world = 1, .arguments = {LARGE, "--plan on"}, .ballast = (size_t)512 << 20};
    Job job;
    bool good = job_run(&job, &task);
    double launched = plan_bytes(job.programs[0].text[0]);
    check_bound(good ? fabs(launched / planned[1][0] - 1) : NAN, 0.05,
                "the plan of a rank that a process of 512 MB has started: %.1f MB, alone %.1f", 1e-6 * launched,
                1e-6 * planned[1][0]);
    job_free(&job);
#endif
    double kept_all = expect_memory(LONG, 1, 0, "none"), least = expect_memory(LONG, 1, 0, "block");
    double moved = expect_memory(LONG, 1, 0, "none --offload activations --offload-dir .");
    check(moved < 0.65 * kept_all, "--offload activations takes %.1f MB of %.1f", 1e-6 * moved, 1e-6 * kept_all);
    double shared = expect_memory(LONG, 4, 1, "none --cp 4 --total-batch 1024");
    check(shared < 0.55 * kept_all, "--cp 4 takes %.1f MB of %.1f", 1e-6 * shared, 1e-6 * kept_all);
    double parts = expect_memory(LONG, 4, 0, "none --tp 4 --total-batch 1024 --layers 16");
    check(parts < 0.65 * kept_all, "with --tp 4 twice the blocks take %.1f MB, where those of one rank take %.1f",
          1e-6 * parts, 1e-6 * kept_all);
    expect_memory(LONG, 4, 0, "block --tp 2 --leaves 4 --cp 2 --total-batch 1024 --layers 16");
    expect_memory(LONG, 4, 3, "none --tp 2 --total-batch 2048");
    double budget = expect_memory(LONG, 1, 0, "auto --memory 0.09");
    check(least < budget && budget < kept_all && budget <= 0.09e9 && budget > 0.085e9,
          "--recompute auto --memory 0.09 takes %.1f MB, between %.1f of block and %.1f of none", 1e-6 * budget,
          1e-6 * least, 1e-6 * kept_all);
}

// ------------------------------------------------------------------------------------------------
// Overlap

enum { BUCKETS = 26 };  // 24 blocks, the embeddings, the head
#define DEEP "--data train.bin --family gpt2 --layers 24 --heads 2 --channels 64 --seq 64 --batch 8 --total-batch 1024"

// For a step of 2 ranks, in ms: the minimum time, and the median of rank 0's wait for others.
typedef struct {
    double step, wait;
} Steps;

// Improves `best` by a run in which rank 0 starts every collective over the flat vector delay_ms later, and waits for
// it at once if `blocking`. Takes the minimum time, since other work on the machine makes steps longer, while the part
// of a delay that is not hidden is in every step.
static void time_steps(Steps* best, size_t zero, double delay_ms, bool blocking) {
    static size_t runs;
    const char* name = kept("overlap-%zu", runs++);
    double ms[STEPS], waited[STEPS];
    const char* waits = blocking ? "; rank 0 step 1 at start do wait" : "";
    Task task = forked(2);
    task.variables = fault_variable(0, 1, kept("collective do delay %.3f%s", delay_ms, waits));
    run_make(name, task, DEEP, kept("--steps 10 --zero %zu", zero));
    size_t count = log_numbers(ms, STEPS, name, "ms"), first = 2;  // by then memory and caches are warm
    if (count <= first || log_numbers(waited, STEPS, name, "wait_share") != count) return;
    for (size_t i = 0; i < count; i++) waited[i] *= ms[i];
    qsort(ms + first, count - first, sizeof(double), compare_doubles);
    qsort(waited + first, count - first, sizeof(double), compare_doubles);
    best->step = fmin(best->step, ms[first]);
    best->wait = fmin(best->wait, waited[first + (count - first) / 2]);
}

// Each collective takes d ms longer on rank 0, for which the other rank waits. This may add to a step, or to a rank's
// waiting in it, at most 15% of what it adds if every collective is waited for at once. Stage 0 communicates during the
// backward, which takes at least half of a step; stages 1 and 2 also gather parameters during the forward, which takes
// at least 0.3 of it; the delays of each are 0.6 of that in total. Other work may slow the machine down at the wrong
// time: up to four runs of each kind, the best counts.
static void test_overlap(void) {
    for (size_t zero = 0; zero < 3; zero++) {
        size_t collectives = zero == 0 ? BUCKETS : 2 * BUCKETS;
        Steps plain = {NAN, NAN}, late = plain, blocking = plain, blocking_late = plain;
        double delay = 0, step = NAN, wait = NAN;
        bool good = false;
        for (int attempt = 0; attempt < 8 && !good; attempt++) {
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
// Failures

// Counts the program's messages on stderr; bad counts all other lines.
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

// Whether a process ended by itself with this exit code (0: 1 or 2), and said why in one message; in another the parent
// of a rank says which signal killed it.
static bool says_why(const Program* p, int code) {
    size_t bad, sentences = count_sentences(p->text[1], &bad);
    if (strstr(p->text[1], " was terminated by signal ")) sentences--;
    int found = WIFEXITED(p->status) ? WEXITSTATUS(p->status) : -1;
    return !p->late && sentences == 1 && bad == 0 && (code ? found == code : found == 1 || found == 2);
}

// Whether the first rank mentioned in a message is this one, not counting the prefix "train: rank R: ".
static bool blames(const char* text, size_t rank) {
    size_t named;
    int used = 0;
    if (sscanf(text, "train: rank %zu: %n", &named, &used) == 1 && used > 0) text += used;
    for (const char* place = text; (place = strstr(place, "rank")) != NULL; place++)
        if (sscanf(place, "ranks %zu", &named) == 1 || sscanf(place, "rank %zu", &named) == 1) return named == rank;
    return false;
}

// Whether all processes of a program's group end; orphans become children of the test, which reaps them.
static bool group_ends(pid_t group) {
    for (double until = now_ms() + SLACK_MS; kill(-group, 0) == 0 && now_ms() < until; sleep_ms(5))
        while (waitpid(-group, NULL, WNOHANG) > 0) {}
    return kill(-group, 0) != 0 && errno == ESRCH;
}

// A job in which each rank ends with a message; with forked ranks, there is one process, and one message.
typedef struct {
    const char* name;
    Task task;
    int code;                       // of each process; 0: 1 or 2
    const char *fragments[2];       // in the first process' message; NULL: any
    const char* prints;             // in its standard output
    enum { NOBODY, ENDS, KILLED, STOPPED } fate;  // of a victim, which all others must report
    size_t victim;
    double limit_ms;                // for all to end, after the victim or the start; 0: by --timeout
} Failure;

static void failure_judge(Job* job, const Failure* f) {
    Program *v = &job->programs[f->victim], *first = &job->programs[0];
    bool killed = v->ended && WIFSIGNALED(v->status) && !v->late;
    bool happened = f->fate == STOPPED ? v->stopped : f->fate == KILLED ? killed : true;
    double since = f->fate == STOPPED ? v->stopped_ms : f->fate == KILLED ? v->ended_ms : first->began_ms, latest = 0;
    double limit_ms = f->limit_ms > 0 ? f->limit_ms : (f->fate == KILLED ? 0 : TIMEOUT_MS) + SLACK_MS;
    bool good = happened && (f->task.launch != FORKED || group_ends(first->pid));
    for (Program* p = first; p < first + job->count; p++) {
        if (p == v && f->fate >= KILLED) continue;
        good = good && says_why(p, f->code) && (f->fate == NOBODY || blames(p->text[1], f->victim));
        latest = fmax(latest, p->ended_ms - since);
    }
    for (size_t i = 0; i < COUNT_OF(f->fragments); i++)
        good = good && (f->fragments[i] == NULL || strstr(first->text[1], f->fragments[i]));
    good = good && (f->prints == NULL || strstr(first->text[0], f->prints)) && latest <= limit_ms;
    check(good, "%s%s: said in one sentence; all ranks end within %.1f s", f->name,
          happened ? "" : ", which does not happen", latest / 1e3);
    if (!good) job_print(job);
    job_free(job);
}

// Runs several at once, since they mostly wait.
static void failures_run(const Failure* failures, size_t count) {
    enum { AT_ONCE = 12 };
    static Job jobs[AT_ONCE];
    for (size_t first = 0; first < count; first += AT_ONCE) {
        size_t n = min_size(AT_ONCE, count - first);
        for (size_t i = 0; i < n; i++) job_start(&jobs[i], &failures[first + i].task);
        jobs_wait(jobs, n);
        for (size_t i = 0; i < n; i++) failure_judge(&jobs[i], &failures[first + i]);
    }
}

// Nobody reads standard error for a while, to which rank 0 prints the first rank's report: it must still arrive, so
// rank 0 must not end before that. Which rank is first is chance; hence several runs.
static void expect_slow_reader(void) {
    enum { RUNS = 4, SENTENCE = 40 };
    static Job jobs[RUNS];
    Task task = {.world = RANKS_MAX, .arguments = {SHAPES[GPT2].arguments, "--timeout 3"},
                 .variables = fault_variable(1, 2, "backward do kill"), .full_pipe = true};
    bool good = true;
    for (size_t i = 0; i < RUNS; i++) job_start(&jobs[i], &task);
    sleep_ms(5000);
    jobs_wait(jobs, RUNS);
    for (size_t i = 0; i < RUNS; i++) {
        const Program* p = &jobs[i].programs[0];
        const char* said = p->text[1] + strspn(p->text[1], " ");
        good = good && strlen(said) > SENTENCE && !p->late && WIFEXITED(p->status) && WEXITSTATUS(p->status) != 0;
        job_free(&jobs[i]);
    }
    check(good, "--ranks %zu, rank 1 killed, and nobody reads standard error for a while: it is said all the same",
          RANKS_MAX);
}

// One rank gets a stop signal: all stop after the same step, which is saved, with the code of that signal.
static void expect_interrupt(int signal_number, int code, size_t world, const char* shape, const char* more) {
    Job job;
    unsigned long long step = 0;
    bool good = true;
    Task task = {.launch = BY_HAND, .world = world,
                 .arguments = {shape, "--steps 5000 --timeout 3 --out asked", more}};
    remove_tree("asked");
    remove_tree("straight");
    job_start(&job, &task);
    double deadline = now_ms() + LIMIT_MS;
    while (isnan(log_last("asked", "step")) && now_ms() < deadline) sleep_ms(20);
    sleep_ms(100);
    kill(job.programs[1].pid, signal_number);
    jobs_wait(&job, 1);
    for (size_t i = 0; i < job.count; i++) good = good && says_why(&job.programs[i], code);
    const char* said = strstr(job.programs[0].text[1], "after step ");
    good = good && said && sscanf(said, "after step %llu;", &step) == 1 && step > 0 && step < 5000;
    run_make("straight", forked(world), shape, kept("%s --steps %llu", more, step));
    check(good && same_tensors("asked", "straight", step),
          "rank 1 of %zu, %s, gets %s: all stop with code %d, each says so, and it is saved after step %llu what a run "
          "to there saves", world, more, signal_number == SIGINT ? "SIGINT" : "SIGTERM", code, step);
    if (!good) job_print(&job);
    job_free(&job);
}

// Everything that a step can include: a validation, a checkpoint, the gathering of parameters.
#define WATCHED "--steps 3 --val-every 1 --val-windows 8 --ckpt-every 1 --timeout 3"

static void test_faults(void) {
    static const char* const points[] = {"load", "forward", "backward", "reduce", "update", "gather", "validate",
                                         "save"};
    static const char* const acts[] = {"kill", "stop", "segv"};
    enum { POINTS = 8, REDUCE = 3, GATHER = 5, CASES = 2 * 3 * POINTS, COPIES = 8 };
    static Failure failures[CASES + 2 + COPIES];
    for (size_t i = 0; i < CASES; i++) {
        size_t victim = i % 2, point = i / 2 % POINTS, act = i / 2 / POINTS;
        size_t zero = point == GATHER ? 1 + 2 * victim : i % 4;  // stage 0 gathers nothing
        Failure f = {.name = kept("rank %zu of 3, stage %zu, %s at %s", victim, zero, acts[act], points[point]),
                     .task = {.launch = BY_HAND, .world = 3,
                              .arguments = {SHAPES[GPT2].arguments, WATCHED,
                                            kept("--out fault-%zu --zero %zu", i, zero)},
                              .variables = fault_variable(victim, 2, kept("%s do %s", points[point], acts[act]))},
                     .fate = act == 1 ? STOPPED : KILLED, .victim = victim};
        failures[i] = f;
    }
    // If forked rank 0, the program that was started, is killed, the others end too, but nobody reports it.
    for (size_t victim = 0; victim < 2; victim++) {
        Failure f = {.name = kept("--ranks %zu, rank %zu killed", RANKS_MAX, victim), .task = forked(RANKS_MAX),
                     .fate = victim == 0 ? KILLED : ENDS, .victim = victim};
        f.task.arguments[0] = SHAPES[GPT2].arguments;
        f.task.arguments[1] = "--steps 3 --timeout 3";
        f.task.variables = fault_variable(victim, 2, "backward do kill");
        failures[CASES + victim] = f;
    }
    for (size_t i = 0; i < COPIES; i++) {
        size_t victim = i % 2 ? 3 : 0, act = i / 2 % 2, point = i < COPIES / 2 ? REDUCE : GATHER;
        Failure f = {.name = kept("rank %zu of 4, copies of 2, %s at %s", victim, acts[act], points[point]),
                     .task = {.launch = BY_HAND, .world = 4,
                              .arguments = {SHAPES[GPT2].arguments, WATCHED,
                                            kept("--out fault-%zu --zero %zu --shard 2", CASES + i, 1 + i % 3)},
                              .variables = fault_variable(victim, 2, kept("%s do %s", points[point], acts[act]))},
                     .fate = act == 1 ? STOPPED : KILLED, .victim = victim};
        failures[CASES + 2 + i] = f;
    }
    failures_run(failures, COUNT_OF(failures));
    expect_slow_reader();
    expect_interrupt(SIGTERM, 75, 3, SHAPES[ODD].arguments, "--zero 1");
    expect_interrupt(SIGINT, 1, 3, SHAPES[ODD].arguments, "--zero 1");
}

// ------------------------------------------------------------------------------------------------
// Refusals

#define REFUSED_BASE "--steps 4 --zero 2 --timeout 3 --total-batch 96 --out refused"
#define REFUSED(what, exit_code, first, second, ...) \
    {.name = what, .code = exit_code, .fragments = {first, second}, .task = {__VA_ARGS__}}
#define TWO .launch = BY_HAND, .world = 2
// Rank 1 of 2 has a different value for a flag.
#define DISAGREE(flag, value) \
    REFUSED("another --" flag " on rank 1", 0, "--" flag, "rank 1", TWO, .odd_arguments = "--" flag " " value)
#define FLAG(what, ranks, flags, first, second) \
    REFUSED(what, 2, first, second, .world = ranks, .arguments = {[2] = flags})

static const Failure REFUSALS[] = {
    DISAGREE("lr", "1e-3"), DISAGREE("lr", "3.00000001e-3"), DISAGREE("batch", "1"), DISAGREE("seed", "5"),
    DISAGREE("zero", "1"), DISAGREE("total-batch", "192"), DISAGREE("layers", "3"), DISAGREE("channels", "64"),
    DISAGREE("reduce", "float"), DISAGREE("shard", "1"),
    REFUSED("another --cp on rank 1", 0, "--cp ('1', not '2'), --row-leaves ('1', not '2'), --recompute (", "rank 1", TWO,
            .arguments = {[2] = "--cp 2"}, .odd_arguments = "--cp 1"),
    DISAGREE("clip", "2"), DISAGREE("steps", "3"), DISAGREE("optimizer", "lion"), DISAGREE("spike-skip", "9"),
    DISAGREE("val-every", "1"), DISAGREE("val", "other.bin"), DISAGREE("out", "elsewhere"),
    DISAGREE("ckpt-every", "1"), DISAGREE("check-every", "1"), DISAGREE("dropout", "0.1"),
    DISAGREE("weight-decay", "0.2"), DISAGREE("warmup", "1"), DISAGREE("resume", "on"), DISAGREE("ckpt-tier", "a:5"),
    REFUSED("another data file on rank 1", 0, "data", "rank 1", TWO, .odd_arguments = "--data other.bin"),
    REFUSED("rank 1 says WORLD_SIZE=3", 0, "rank", "3", TWO, .odd_variables = "WORLD_SIZE=3"),
    REFUSED("rank 1 never comes", 1, "rank 1", "has not connected", TWO, .started = 1),
    REFUSED("rank 0 never comes", 1, "rank 0", "MASTER_PORT", TWO, .started = 1, .variables = "RANK=1"),
    REFUSED("RANK without WORLD_SIZE", 0, "RANK", "WORLD_SIZE", TWO, .started = 1, .variables = "WORLD_SIZE="),
    REFUSED("WORLD_SIZE without RANK", 0, "RANK", "WORLD_SIZE", TWO, .started = 1, .variables = "RANK="),
    REFUSED("--ranks under a launcher", 0, "started 2 ranks already", NULL, TWO, .arguments = {[2] = "--ranks 2"}),
    FLAG("--zero 4", 2, "--zero 4", "--zero", "4"),
    FLAG("--shard that does not divide the ranks", 2, "--shard 3", "--shard 3", "2 ranks"),
    FLAG("samples without all parameters", 2, "--zero 3 --sample-every 1", "--sample-every", "--zero 2"),
    FLAG("--shard where nothing is sharded", 2, "--shard 1 --zero 0", "--shard", "--zero 1"),
    FLAG("--ranks 0", 0, "", "--ranks", "0"),
    FLAG("--total-batch that the ranks do not divide", 3, "--total-batch 96", "--total-batch", "144"),
    FLAG("--reduce of no kind", 2, "--reduce best", "--reduce", "storage"),
    FLAG("--timeout 0", 2, "--timeout 0", "--timeout", "0"),
    REFUSED("the port is in use", 1, "port", "in use", TWO),
};

static void test_refusals(void) {
    static Failure failures[COUNT_OF(REFUSALS)];
    int listener;
    memcpy(failures, REFUSALS, sizeof failures);
    for (size_t i = 0; i < COUNT_OF(failures); i++) {
        failures[i].task.arguments[0] = SHAPES[GPT2].arguments;
        failures[i].task.arguments[1] = REFUSED_BASE;
    }
    failures[COUNT_OF(failures) - 1].task.port = port_reserve(&listener);
    need(listen(listener, 8) == 0, "listening");
    failures_run(failures, COUNT_OF(failures));
    close(listener);
    if (!test.mpirun) return;
    Job job;
    Task task = {.launch = MPIRUN, .world = 2, .arguments = {SHAPES[GPT2].arguments, REFUSED_BASE, "--ranks 2"}};
    job_start(&job, &task);
    jobs_wait(&job, 1);
    const Program* p = &job.programs[0];
    bool good = !p->late && !program_good(p) && strstr(p->text[1], "has started 2 ranks already") != NULL;
    if (!check(good, "--ranks under mpirun: refused")) job_print(&job);
    job_free(&job);
}

// ------------------------------------------------------------------------------------------------
// Corruption and divergence

// A bit flips in a parameter, where it stays; or in a forward, only while the ranks' forwards are compared, as in a
// faulty arithmetic unit.
static void test_corruption(void) {
    static Failure failures[3 * 3 * 2 + 2];
    for (size_t i = 0; i < COUNT_OF(failures); i++) {
        size_t zero = i / 6 % 3, victim = i / 2 % 3, computes = i % 2;
        bool frozen = i >= 3 * 3 * 2;  // the parameter with the wrong bit does not train
        Failure f = {.name = kept("stage %zu, in step 4 a bit of %s of rank %zu is wrong: named", zero,
                                  computes ? "a forward" : frozen ? "the frozen parameters" : "the parameters", victim),
                     .task = {.launch = BY_HAND, .world = 3,
                              .arguments = {SHAPES[ODD].arguments, "--steps 6 --check-every 2 --timeout 3",
                                            kept("--zero %zu%s", zero, frozen ? " --train final_norm*" : "")},
                              .variables = computes ? kept("LLMTRAIN_TEST_FAULT=rank %zu step 4 at compare do corrupt; "
                                                  "rank %zu step 4 at compared do corrupt", victim, victim)
                                           : fault_variable(victim, 4, "load do corrupt")},
                     .code = 1, .fragments = {computes ? "hidden states that it computes" : "bucket"},
                     .prints = "step     3/6", .fate = ENDS, .victim = victim, .limit_ms = LIMIT_MS};
        failures[i] = f;
    }
    failures_run(failures, COUNT_OF(failures));
    run_make("checked", forked(3), SHAPES[ODD].arguments, "--zero 1 --check-every 1");
    check(same_tensors(run_usual(ODD, 3, 1), "checked", STEPS),
          "where nothing is wrong, --check-every 1 finds nothing and changes nothing");
}

// How often a run has rewound, according to its events.
static size_t count_rewinds(const char* run) {
    char* text = text_read(text_of("%s/events.jsonl", run), NULL);
    size_t count = count_in(text, "\"event\": \"rewound\"");
    free(text);
    return count;
}

// Every step is in the log once, in order.
static bool log_is_whole(const char* run) {
    double steps[STEPS];
    bool good = log_numbers(steps, STEPS, run, "step") == STEPS && log_last(run, "step") == STEPS;
    for (size_t i = 0; i < STEPS; i++) good = good && steps[i] == (double)(i + 1);
    return good;
}

// Weights grow a thousandfold in each step, until they overflow, whatever the rounding. A thousandth of the learning
// rate is harmless.
#define DIVERGING \
    "--family gpt2 --data train.bin --layers 2 --heads 2 --channels 32 --seq 24 --batch 4 --steps 20 " \
    "--warmup 0 --schedule constant --clip 0 --spike-skip 0 --threads 1 --optimizer sgd --lr 100 --weight-decay 10 "

static const Failure NO_REWINDS[] = {
    {.name = "no rewind is left", .code = 1, .fragments = {"is nan, after 3 rewinds"}, .limit_ms = LIMIT_MS,
     .task = {.world = 2,
              .arguments = {DIVERGING "--reduce float --out stuck-0 --ckpt-every 1 --rewind 3 --rewind-lr 0.5"}}},
    {.name = "with a cadence in minutes --ckpt-keep has left no checkpoint", .code = 1,
     .fragments = {"and the checkpoints before step", "are gone"}, .limit_ms = LIMIT_MS,
     .task = {.world = 2, .arguments = {DIVERGING "--reduce float --out stuck-3 --ckpt-every 0.0000001min",
                                        "--ckpt-keep 2 --rewind 9 --rewind-lr 0.5"}}},
    {.name = "no checkpoint will be", .code = 2, .fragments = {"--rewind needs --ckpt-every"},
     .task = {.world = 2, .arguments = {DIVERGING "--reduce float --out stuck-1 --rewind 1"}}},
    {.name = "--rewind is not asked for", .code = 1, .fragments = {"or use --rewind"}, .limit_ms = LIMIT_MS,
     .task = {.world = 2, .arguments = {DIVERGING "--reduce float --out stuck-2 --diverged-after 3"}}},
};

// If a run diverges again at the same step, its checkpoint was too late: each of its three rewinds goes further back
// than the previous one, and halves the learning rate.
static void test_repeated_rewinds(const char* run) {
    char* text = text_read(text_of("%s/events.jsonl", run), NULL);
    unsigned long long from, to, last = STEPS + 1;
    double factor;
    size_t rewinds = 0;
    for (const char* at = text; (at = strstr(at, "went back from step ")) != NULL; at++) {
        expect(sscanf(at, "went back from step %llu to %llu:", &from, &to) == 2 && to < from && to < last,
               "rewind %zu is to step %llu, the one before was to %llu", ++rewinds, to, last);
        const char* told = strstr(at, "multiplied by ");
        expect(told && sscanf(told, "multiplied by %lg", &factor) == 1 && factor == ldexp(1.0, -(int)rewinds),
               "the learning rate of rewind %zu is multiplied by %g", rewinds, factor);
        last = to;
    }
    expect(rewinds == 3, "%zu rewinds", rewinds);
    verdict("a run that diverges again goes further back each time, and halves its learning rate each time");
    free(text);
}

#define SKIPPING COMMON "--family gpt2 --data train.bin --heads 2 --channels 32 --seq 24 --total-batch 576 " \
                        "--spike-skip 1.4 --diverged-after 1 --ckpt-every 4 --rewind 50 --rewind-lr 0.9"

// Back at the beginning, the optimizer must have forgotten the steps that diverged, wherever its states are: then one
// rewind is enough, and the bits are the same.
static void test_rewound_states(void) {
    static const char* const optimizers[] = {"momentum", "adamw"};
    for (size_t i = 0; i < 4; i++) {
        const char *optimizer = optimizers[i / 2], *runs[2];
        size_t world = 1 + i % 2;
        bool once = true;
        for (size_t k = 0; k < 2; k++) {
            const char* more = kept("--reduce float --ckpt-every 19 --rewind 50 --rewind-lr 0.001 --zero %zu "
                                    "--optimizer %s %s", world - 1, optimizer,
                                    k ? "--offload optimizer --offload-dir ." : "");
            runs[k] = run_make(kept("rewind-%s-%zu-%zu", optimizer, world, k), forked(world), DIVERGING, more);
            once = once && count_rewinds(runs[k]) == 1 && log_is_whole(runs[k]) && log_last(runs[k], "loss") < 6;
        }
        check(once && same_runs(runs[0], runs[1]), "%s, %zu rank%s: one rewind to the beginning, also with --offload, "
              "to the same bits", optimizer, world, world > 1 ? "s" : "");
    }
}

static void test_rewind(void) {
    bool good = true;
    const char* rewinds = "--rewind 50 --rewind-lr 0.001 --reduce float";
    for (size_t zero = 0; zero < 3; zero++) {
        const char* name = run_make(kept("rewind-infinite-%zu", zero), forked(3), DIVERGING,
                                    kept("--ckpt-every 1 --zero %zu %s", zero, rewinds));
        good = good && count_rewinds(name) > 0 && log_is_whole(name) && same_tensors(name, "rewind-infinite-0", STEPS);
    }
    check(good, "a loss that is not finite: the run goes back and on to the end, in each stage to the same bits");
    run_make("rewind-begin", forked(3), DIVERGING, kept("--ckpt-every 19 --zero 1 %s", rewinds));
    check(count_rewinds("rewind-begin") > 0 && log_is_whole("rewind-begin"),
          "without a checkpoint it goes back to the beginning");
    test_rewound_states();
    const char* alone = run_make("rewind-skipping", forked(1), SKIPPING, "--reduce exact");
    size_t times = count_rewinds(alone);
    check(times > 0 && log_is_whole(alone),
          "skipping: the run goes back %zu times and on to the end; each step is in its log once", times);
    for (size_t world = 2; world <= RANKS_MAX; world++) {
        const char* name = run_make(kept("rewind-skipping-%zu", world), forked(world), SKIPPING,
                                    kept("--zero %zu", world - 2));
        check(same_tensors(alone, name, STEPS) && count_rewinds(name) == times &&
                  logs_apart(alone, name, "loss") == 0,
              "skipping: %zu ranks at stage %zu go back as often, to the same bits", world, world - 2);
    }
    failures_run(NO_REWINDS, COUNT_OF(NO_REWINDS));
    test_repeated_rewinds("stuck-0");
}

// ------------------------------------------------------------------------------------------------
// Pipelines

enum { PIPE_STEPS = 6 };
#define PIPED "--batch 2 --seq 24 --total-batch 960 --steps 6 --lr 3e-3 --warmup 2 --schedule constant --clip 0.5 " \
              "--data train.bin --val val.bin --val-overlap 5 --val-every 2 --spike-sigma 0 "

// A step has 20 sequences: 10 micro-batches of one pipeline, 5 of each of two, which neither 2 nor 3 stages divide.
// Validations have 53 windows. No number of stages divides the blocks that one piece less than all of them shares.
static const struct {
    const char* name;
    bool is_16;  // for --train16
    const char* arguments;
} PIPED_MODELS[] = {
    {"gpt2", false, PIPED "--family gpt2 --layers 7 --heads 2 --channels 32 --dropout 0.1 --documents mask "
                    "--end-of-text 3 --spike-skip 1.3 --spike-warmup 1"},
    {"llama", false, PIPED "--family llama --layers 8 --heads 4 --kv-heads 2 --channels 32 --ffn 64 --tied off "
                     "--qk-norm on --qkv-bias on --optimizer muon --dropout 0.1"},
    {"first-blocks-frozen", false, PIPED "--family gpt2 --layers 7 --heads 2 --channels 32 --tied off "
                                   "--train block.[3456].*,final_norm*"},
    {"embedding-frozen", false, PIPED "--family gpt2 --layers 7 --heads 2 --channels 32 --total-batch 576 "
                                "--train block.*,final_norm* --optimizer adamw-8bit --documents mask --end-of-text 3"},
    {"bf16", true, PIPED "--family llama --layers 7 --heads 4 --kv-heads 1 --channels 32 --ffn 71 --tied on "
                   "--masters off --optimizer adamw-8bit --dropout 0.1 --total-batch 576"},
};
enum { PIPED_GPT2, PIPED_LLAMA, PIPED_FROZEN, PIPED_EMBEDDING, PIPED_16 };

// Nearly every pair of schedule, stages, pipelines, ZeRO, recomputation and model is in one of these.
static const struct {
    size_t model, world;
    const char* flags;
} PIPED_RUNS[] = {
    {PIPED_GPT2, 4, "--pp 2 --pipeline zb-h2 --zero 1 --shard 1"},
    {PIPED_LLAMA, 4, "--pp 4 --pipeline interleaved --recompute attention"},
    {PIPED_16, 6, "--pp 3 --pipeline zb-h1 --zero 1"},
    {PIPED_GPT2, 2, "--pp 2"},
    {PIPED_GPT2, 3, "--pp 3 --pipeline interleaved --recompute norms"},
    {PIPED_GPT2, 8, "--pp 4 --pipeline gpipe --zero 1 --recompute block"},
    {PIPED_LLAMA, 4, "--pp 2 --pipeline zb-h1"},
    {PIPED_LLAMA, 6, "--pp 3 --zero 1 --shard 1 --recompute gelu"},
    {PIPED_LLAMA, 2, "--pp 2 --pipeline gpipe"},
    {PIPED_FROZEN, 4, "--pp 4 --pipeline 1f1b --zero 1"},
    {PIPED_FROZEN, 4, "--pp 2 --pipeline interleaved --chunks 3 --zero 1"},
    {PIPED_FROZEN, 3, "--pp 3 --pipeline zb-h2"},
    {PIPED_EMBEDDING, 4, "--pp 2 --pipeline interleaved --zero 1 --shard 1 --recompute block"},
    {PIPED_EMBEDDING, 4, "--pp 4 --pipeline zb-h1"},
    {PIPED_EMBEDDING, 6, "--pp 3 --pipeline gpipe"},
    {PIPED_16, 4, "--pp 2 --pipeline 1f1b --recompute norms"},
    {PIPED_16, 4, "--pp 4 --pipeline zb-h2"},
    {PIPED_16, 3, "--pp 3 --pipeline interleaved --chunks 2 --zero 1"},
};

static bool same_digits(const char* a, const char* b, const char* key, size_t steps) {
    double x[STEPS], y[STEPS];
    if (log_numbers(x, STEPS, a, key) != steps || log_numbers(y, STEPS, b, key) != steps) return false;
    for (size_t i = 0; i < steps; i++)
        if (x[i] != y[i] && !(isnan(x[i]) && isnan(y[i]))) return false;
    return true;
}

// Weights, optimizer state and the numbers of the log.
static void expect_same(const char* run, const char* alone, size_t steps, const char* what) {
    static const char* const keys[] = {"loss", "grad_norm", "val_loss", "tokens", "skipped"};
    expect(same_tensors(run, alone, steps), "other weights or optimizer state");
    for (size_t i = 0; i < COUNT_OF(keys); i++)
        expect(same_digits(run, alone, keys[i], steps), "another %s in the log", keys[i]);
    double low = log_last(run, "loss_ranks_min"), middle = log_last(run, "loss_ranks_median");
    double high = log_last(run, "loss_ranks_max"), mean = log_last(run, "loss");
    expect(isnan(low) || (low <= middle && middle <= high && low <= mean && mean <= high), "%g is not the mean of the "
           "pipelines' losses, %g to %g", mean, low, high);
    verdict("%s", what);
}

// The run of one rank.
static const char* piped_alone(size_t model) {
    Task task = forked(1);
    if (PIPED_MODELS[model].is_16) task.program = test.train16;
    return run_make(kept("piped-%s", PIPED_MODELS[model].name), task, PIPED_MODELS[model].arguments, "--reduce exact");
}

#ifdef __SANITIZE_ADDRESS__
enum { PIPED_EVERY = 5 };  // where runs take ten times as long
#else
enum { PIPED_EVERY = 1 };
#endif

static void test_pipeline_runs(void) {
    size_t clipped = 0, skipped = 0;
    for (size_t i = 0; i < COUNT_OF(PIPED_RUNS); i += PIPED_EVERY) {
        size_t model = PIPED_RUNS[i].model, world = PIPED_RUNS[i].world, clips, skips;
        const char *flags = PIPED_RUNS[i].flags, *name = PIPED_MODELS[model].name;
        if (PIPED_MODELS[model].is_16 && test.train16[0] == 0) continue;
        Task task = forked(world);
        if (PIPED_MODELS[model].is_16) task.program = test.train16;
        const char *alone = piped_alone(model), *run = kept("piped-%zu", i);
        run_make(run, task, PIPED_MODELS[model].arguments, flags);
        expect_same(run, alone, PIPE_STEPS, kept("%s, %zu ranks, %s: all bits of one rank", name, world, flags));
        count_guarded(&skips, &clips, alone);
        skipped += skips > 0;
        clipped += clips > 0;
    }
    check(skipped > 0 && clipped > skipped, "some of these skip steps, and more clip gradients");
    run_make("piped-float", forked(4), PIPED_MODELS[PIPED_GPT2].arguments, "--pp 2 --reduce float");
    run_make("piped-float-1", forked(4), PIPED_MODELS[PIPED_GPT2].arguments, "--pp 2 --reduce float --zero 1");
    check_bound(fabs(log_last("piped-float", "loss") / log_last(piped_alone(PIPED_GPT2), "loss") - 1), LOSS_BOUND,
                "--reduce float: the loss of one rank");
    check(same_tensors("piped-float", "piped-float-1", PIPE_STEPS),
          "--reduce float: the bits of --zero 0 with --zero 1");
}

// A run that continues in one layout after the other.
static void test_pipeline_resume(void) {
    static const struct { size_t world, until; const char* flags; } moves[] = {
        {4, 1, "--pp 2 --zero 0 --shard 0"}, {1, 2, "--pp 1"}, {4, 3, "--pp 4 --pipeline interleaved"},
        {2, 4, "--pp 1 --pipeline 1f1b --zero 2"}, {8, 5, "--pp 2 --pipeline zb-h1 --zero 1 --shard 2"},
        {3, 6, "--pp 3 --pipeline 1f1b --shard 0"}};
    for (size_t model = PIPED_GPT2; model <= PIPED_LLAMA; model += PIPED_EVERY) {
        const char* shape = kept("%s --layers 8 --total-batch 768 --val-every 0", PIPED_MODELS[model].arguments);
        const char *whole = kept("unmoved-%zu", model), *name = kept("moved-pipe-%zu", model);
        run_make(whole, forked(1), shape, "--reduce exact");
        for (size_t i = 0; i < COUNT_OF(moves); i++)
            run_make(name, forked(moves[i].world), shape,
                     kept("--reduce exact %s --steps %zu --resume on --ckpt-keep 1", moves[i].flags, moves[i].until));
        check(same_tensors(name, whole, PIPE_STEPS) && same_digits(name, whole, "loss", PIPE_STEPS) &&
                  same_digits(name, whole, "grad_norm", PIPE_STEPS) && same_digits(name, whole, "skipped", PIPE_STEPS),
              "%s: a step each of 2 pipelines of 2 stages, one rank, 4 stages with 2 chunks, 2 ranks at stage 2, 4 "
              "pipelines that share 2 copies, 3 stages: the bits of one rank", PIPED_MODELS[model].name);
    }
}

// The most expensive piece against that of every other cut; of the cheapest cuts, that with most blocks at the end.
static void test_pipeline_cut(void) {
    static const double heads[] = {0, 0.4, 1, 3.5};
    size_t wrong = 0, cuts = 0;
    for (size_t blocks = 2; blocks <= 24; blocks++)
        for (size_t pieces = 2; pieces <= blocks; pieces++)
            for (size_t h = 0; h < COUNT_OF(heads); h++, cuts++) {
                size_t last = pipeline_last_piece(blocks, pieces, heads[h]);
                double cost[25] = {0};
                wrong += last < 1 || last + pieces - 1 > blocks;
                for (size_t n = 1; n + pieces - 1 <= blocks; n++)
                    cost[n] = fmax((double)n + heads[h], ceil((double)(blocks - n) / (double)(pieces - 1)));
                for (size_t n = 1; n + pieces - 1 <= blocks; n++) wrong += cost[n] < cost[last];
                for (size_t n = last + 1; n + pieces - 1 <= blocks; n++) wrong += cost[n] == cost[last];
            }
    check(wrong == 0, "%zu cuts of models: none has a cheaper most expensive piece", cuts);
}

static void test_pipeline(void) {
    test_pipeline_cut();
    test_pipeline_runs();
    test_pipeline_resume();
}

#define PIPED_FAULTY "--steps 3 --val-every 1 --val-windows 8 --ckpt-every 1 --timeout 3"

// A rank is killed or stopped at each point of a step; afterwards some of the runs resume.
static void test_pipeline_kills(void) {
    static const char* const points[] = {"send", "receive", "forward", "backward", "weights", "reduce", "update",
                                         "validate", "save"};
    static const char* const kinds[] = {"1f1b", "interleaved", "gpipe", "zb-h2"};
    enum { POINTS = 9, WEIGHTS = 4, TWICE_TWO = 2 * POINTS, THREE = POINTS, CASES = TWICE_TWO + THREE };
    static Failure failures[CASES];
    size_t count = 0;
    for (size_t i = 0; i < CASES; i += PIPED_EVERY) {
        bool three = i >= TWICE_TWO;
        size_t point = i % POINTS, stops = three ? point % 2 : i / POINTS % 2;
        size_t victim = three ? i % 3 : (i * 5 + i / POINTS) % 4;
        const char* kind = point == WEIGHTS ? "zb-h1" : kinds[i % COUNT_OF(kinds)];
        const char* flags = kept("--out pipe-fault-%zu --pp %d --pipeline %s --zero %zu", i, three ? 3 : 2, kind,
                                 i % 2);
        Failure f = {.name = kept("rank %zu of %d, %s, %s at %s", victim, three ? 3 : 4, flags,
                                  stops ? "stop" : "kill", points[point]),
                     .task = {.launch = BY_HAND, .world = three ? 3 : 4,
                              .arguments = {PIPED_MODELS[PIPED_GPT2].arguments, PIPED_FAULTY, flags},
                              .variables = fault_variable(victim, 2, kept("%s do %s", points[point],
                                                                          stops ? "stop" : "kill"))},
                     .fate = stops ? STOPPED : KILLED, .victim = victim};
        failures[count++] = f;
    }
    failures_run(failures, count);
    const char* whole = run_make("pipe-faultless", forked(1), PIPED_MODELS[PIPED_GPT2].arguments,
                                 PIPED_FAULTY " --reduce exact");
    for (size_t i = 0; i < count; i += 5) {
        Task task = forked(failures[i].task.world);
        const char* flags = failures[i].task.arguments[2];
        const char* name = kept("%.*s", (int)strcspn(flags + 6, " "), flags + 6);
        run_make(name, task, PIPED_MODELS[PIPED_GPT2].arguments,
                 kept(PIPED_FAULTY " --resume on%s", flags + 6 + strlen(name)));
        check(same_tensors(name, whole, 3), "%s: a resume has the bits of an undisturbed run", failures[i].name);
    }
}

// A micro-batch that no stage can read, a validation that one cannot.
static void test_pipeline_data(void) {
    char* bytes;
    size_t size;
    static Failure failures[2];
    need(mkdir("elsewhere", 0777) == 0, "a directory");
    copy_tree("train.bin", "elsewhere/train.bin");
    copy_tree("val.bin", "elsewhere/val.bin");
    bytes = text_read("train.bin", &size);
    memset(bytes + size / 2, 255, 2);  // a token that is none
    put_bytes("bad.bin", bytes, size);
    free(bytes);
    for (size_t i = 0; i < COUNT_OF(failures); i++) {
        Failure f = {.name = kept("%s: a token that is none", i ? "3 stages, zb-h2" : "2 pipelines of 2 stages"),
                     .task = {.launch = BY_HAND, .world = i ? 3 : 4,
                              .arguments = {PIPED_MODELS[PIPED_GPT2].arguments,
                                            "--data bad.bin --steps 300 --val-every 0",
                                            i ? "--pp 3 --pipeline zb-h2" : "--pp 2 --pipeline interleaved"}},
                     .code = 2, .limit_ms = LIMIT_MS};
        failures[i] = f;
    }
    failures_run(failures, COUNT_OF(failures));
    // Rank 1 has files of its own, of which one is cut short while it trains.
    Job job;
    Task task = {.launch = BY_HAND, .world = 4, .odd_directory = "elsewhere",
                 .arguments = {PIPED_MODELS[PIPED_GPT2].arguments, "--steps 5000 --val-every 1 --timeout 20",
                               "--pp 2"}};
    bool good = true;
    job_start(&job, &task);
    while (programs_run(job.programs, job.count, LIMIT_MS) && !strstr(job.programs[0].text[0], "step     2/"))
        sleep_ms(1);
    double began = now_ms();
    need(truncate("elsewhere/val.bin", 1200) == 0, "a short file");
    jobs_wait(&job, 1);
    for (size_t i = 0; i < job.count; i++) {
        good = good && says_why(&job.programs[i], 1) && strstr(job.programs[i].text[1], "rank 1") &&
            strstr(job.programs[i].text[1], "val.bin");
        good = good && job.programs[i].ended_ms - began < 15e3;
    }
    check(good, "rank 1 of 2 pipelines of 2 stages cannot read validation data: all say so and end");
    if (!good) job_print(&job);
    job_free(&job);
}

// In step 4 of a run of 6 ranks a bit is wrong in what the victim computes, or in its parameters: the victim is named.
static Failure corruption(const char* layout, const char* shape, const char* flags, size_t victim, bool computes) {
    Failure f = {.name = kept("%s: in step 4 a bit of %s of rank %zu is wrong: named", layout,
                              computes ? "a forward" : "the parameters", victim),
                 .task = {.launch = BY_HAND, .world = 6,
                          .arguments = {shape, "--total-batch 288 --check-every 2 --timeout 5 --val-every 0", flags},
                          .variables = computes ? kept("LLMTRAIN_TEST_FAULT=rank %zu step 4 at compare do corrupt; "
                                              "rank %zu step 4 at compared do corrupt", victim, victim)
                                       : fault_variable(victim, 4, "load do corrupt")},
                 .code = 1, .fragments = {computes ? "hidden states that it computes" : "bucket", "from most ranks"},
                 .prints = "step     3/6", .fate = ENDS, .victim = victim, .limit_ms = LIMIT_MS};
    return f;
}

static void test_pipeline_corruption(void) {
    static Failure failures[6];
    for (size_t i = 0; i < COUNT_OF(failures); i++)  // only the last stage has the hidden states of the end
        failures[i] = corruption("3 pipelines of 2 stages", PIPED_MODELS[PIPED_LLAMA].arguments,
                                 kept("--pp 2 --pipeline %s", i % 2 ? "zb-h1" : "1f1b"), i >= 4 ? 2 * i - 7 : i,
                                 i >= 4);
    failures_run(failures, COUNT_OF(failures));
}

static void test_pipeline_rewind(void) {
    const char* alone = run_make("rewind-skipping", forked(1), SKIPPING, "--reduce exact");
    size_t times = count_rewinds(alone);
    const char* name = run_make("pipe-rewind", forked(4), SKIPPING, "--pp 2 --zero 1");
    check(times > 0 && count_rewinds(name) == times && log_is_whole(name) && same_tensors(name, alone, STEPS),
          "2 pipelines of 2 stages go back %zu times, as one rank does, to its bits", times);
}

static void test_pipeline_faults(void) {
    test_pipeline_kills();
    test_pipeline_data();
    test_pipeline_corruption();
    test_pipeline_rewind();
    expect_interrupt(SIGTERM, 75, 4, PIPED_MODELS[PIPED_GPT2].arguments, "--pp 2 --pipeline interleaved");
}

// ------------------------------------------------------------------------------------------------
// Context parallelism

// Each is run by one rank that adds up gradients in 4 or 2 parts of the rows, and by ranks that share the rows. A part
// of 12 rows is half a sequence, where there are 4.
enum { CONTEXT_GPT2, CONTEXT_LLAMA, CONTEXT_FROZEN, CONTEXT_LONG, CONTEXT_16, CONTEXT_COPIED, CONTEXT_MODELS };
static const struct {
    size_t piped, leaves;
    const char* arguments;
} CONTEXT_RUNS_OF[CONTEXT_MODELS] = {
    {PIPED_GPT2, 4, "--heads 4"}, {PIPED_LLAMA, 2, ""}, {PIPED_FROZEN, 2, "--train block.[3456].*,*norm*"},
    {PIPED_LLAMA, 4, "--batch 1 --seq 48 --kv-heads 4 --optimizer adamw --clip 0.2"},
    {PIPED_16, 4, "--heads 8 --kv-heads 4 --masters on --optimizer adamw"},
    {PIPED_LLAMA, 4, "--kv-heads 2"}};  // of 4 heads: cp 4 needs two copies of each, and so has one rank

static const struct {
    size_t model, world;
    const char* flags;
} CONTEXT_RUNS[] = {
    {CONTEXT_GPT2, 4, "--cp 4"},
    {CONTEXT_LLAMA, 2, "--cp 2 --recompute block"},
    {CONTEXT_16, 4, "--cp 4 --zero 3"},
    {CONTEXT_LONG, 4, "--cp 4 --zero 1 --recompute attention"},
    {CONTEXT_FROZEN, 4, "--cp 2 --zero 2"},
    {CONTEXT_GPT2, 8, "--cp 2 --row-leaves 4 --pp 2 --pipeline interleaved --zero 1 --shard 2"},
    {CONTEXT_GPT2, 4, "--cp 2 --row-leaves 4 --zero 2"},
    {CONTEXT_GPT2, 4, "--cp 4 --offload optimizer,activations --offload-dir ."},
    {CONTEXT_FROZEN, 4, "--cp 2 --zero 1 --shard 1 --recompute block"},
    {CONTEXT_GPT2, 2, "--row-leaves 4 --zero 3"},
    {CONTEXT_GPT2, 8, "--cp 4 --zero 1 --shard 4 --recompute norms"},
    {CONTEXT_GPT2, 8, "--cp 4 --pp 2 --pipeline zb-h2"},
    {CONTEXT_LLAMA, 6, "--cp 2 --pp 3 --pipeline gpipe"},
    {CONTEXT_LLAMA, 8, "--cp 2 --zero 3 --shard 2"},
    {CONTEXT_LLAMA, 4, "--cp 2 --pp 2 --pipeline zb-h1 --zero 1"},
    {CONTEXT_16, 8, "--cp 4 --pp 2 --pipeline zb-h1 --zero 1"},
    {CONTEXT_16, 8, "--cp 4 --pp 2 --zero 1 --shard 2"},
    {CONTEXT_FROZEN, 6, "--cp 2 --pp 3 --recompute gelu"},
    {CONTEXT_FROZEN, 2, "--cp 2"},
    {CONTEXT_LONG, 8, "--cp 4 --pp 2 --zero 1"},
    {CONTEXT_LONG, 4, "--cp 2 --row-leaves 4 --zero 3"},
    {CONTEXT_LONG, 2, "--row-leaves 4 --pp 2"},
    {CONTEXT_16, 4, "--cp 2 --row-leaves 4 --pp 2 --pipeline 1f1b --recompute block"},
    {CONTEXT_16, 8, "--cp 4 --zero 2"},
    {CONTEXT_COPIED, 4, "--cp 4 --zero 1"},
    {CONTEXT_COPIED, 2, "--cp 2 --row-leaves 4 --recompute attention"},
};

static const char* context_shape(size_t i) {
    return kept("%s %s", PIPED_MODELS[CONTEXT_RUNS_OF[i].piped].arguments, CONTEXT_RUNS_OF[i].arguments);
}

static const char* context_alone(size_t i) {
    Task task = forked(1);
    if (PIPED_MODELS[CONTEXT_RUNS_OF[i].piped].is_16) task.program = test.train16;
    return run_make(kept("context-alone-%zu", i), task, context_shape(i),
                    kept("--row-leaves %zu", CONTEXT_RUNS_OF[i].leaves));
}

static void test_context_runs(void) {
    for (size_t i = 0; i < COUNT_OF(CONTEXT_RUNS); i += PIPED_EVERY) {
        size_t model = CONTEXT_RUNS[i].model, world = CONTEXT_RUNS[i].world, piped = CONTEXT_RUNS_OF[model].piped;
        bool is_16 = PIPED_MODELS[piped].is_16;
        const char *flags = CONTEXT_RUNS[i].flags, *run = kept("context-%zu", i);
        if (is_16 && test.train16[0] == 0) continue;
        Task task = forked(world);
        if (is_16) task.program = test.train16;
        const char* alone = context_alone(model);
        run_make(run, task, context_shape(model), flags);
        expect_same(run, alone, PIPE_STEPS, kept("%s %s, %zu ranks, %s: all bits of one rank",
                                                 PIPED_MODELS[piped].name, CONTEXT_RUNS_OF[model].arguments, world,
                                                 flags));
    }
    const char *apart = context_alone(CONTEXT_GPT2);
    const char* together = run_make("context-together", forked(1), context_shape(CONTEXT_GPT2), "--reduce exact");
    check(!same_tensors(apart, together, PIPE_STEPS), "--row-leaves 4 has other bits than 1");
    check_bound(fabs(log_last(apart, "loss") / log_last(together, "loss") - 1), LOSS_BOUND,
                "--row-leaves 4: the loss of 1");
    run_make("context-float", forked(4), context_shape(CONTEXT_GPT2), "--cp 4 --reduce float");
    check_bound(fabs(log_last("context-float", "loss") / log_last(together, "loss") - 1), LOSS_BOUND,
                "--cp 4 --reduce float: the loss of one rank");
}

// A run that continues in one layout after the other, and keeps the parts in which it began to add up gradients.
static void test_context_resume(void) {
    static const struct { size_t world, until; const char* flags; } moves[] = {
        {8, 1, "--cp 4 --zero 0 --shard 0"}, {1, 2, "--cp 1"}, {4, 3, "--cp 2 --pp 2 --pipeline interleaved"},
        {2, 4, "--zero 2 --pipeline 1f1b"}, {8, 5, "--cp 2 --pp 2 --zero 1 --shard 2"}, {4, 6, "--cp 4 --zero 3"}};
    const char* shape = kept("%s --layers 8 --total-batch 768 --val-every 0", context_shape(CONTEXT_GPT2));
    run_make("context-unmoved", forked(1), shape, "--row-leaves 4");
    for (size_t i = 0; i < COUNT_OF(moves); i++)
        run_make("context-moved", forked(moves[i].world), shape,
                 kept("%s --steps %zu --resume on --ckpt-keep 1", moves[i].flags, moves[i].until));
    check(same_tensors("context-moved", "context-unmoved", PIPE_STEPS) &&
              same_digits("context-moved", "context-unmoved", "loss", PIPE_STEPS) &&
              same_digits("context-moved", "context-unmoved", "grad_norm", PIPE_STEPS),
          "a step each of 4 ranks that share rows, one rank, 2 stages of 2, 2 ranks at stage 2, 2 stages of 2 that "
          "share 2 copies, 4 ranks at stage 3: the bits of one rank");
}

static void test_context_kills(void) {
    static const char* const points[] = {"all_to_all", "forward", "backward", "reduce", "update", "validate", "save"};
    enum { POINTS = 7, CASES = 2 * POINTS };
    static Failure failures[CASES];
    size_t count = 0;
    for (size_t i = 0; i < CASES; i += PIPED_EVERY) {
        size_t stops = i / POINTS, victim = (3 * i + stops) % 4;
        const char* flags = kept("--out context-fault-%zu %s --zero %zu", i,
                                 i % 2 ? "--cp 2" : "--cp 2 --pp 2", i % 2 ? i % 4 : 0);
        Failure f = {.name = kept("rank %zu of 4, %s, %s at %s", victim, flags, stops ? "stop" : "kill",
                                  points[i % POINTS]),
                     .task = {.launch = BY_HAND, .world = 4,
                              .arguments = {context_shape(CONTEXT_GPT2), PIPED_FAULTY, flags},
                              .variables = fault_variable(victim, 2, kept("%s do %s", points[i % POINTS],
                                                                          stops ? "stop" : "kill"))},
                     .fate = stops ? STOPPED : KILLED, .victim = victim};
        failures[count++] = f;
    }
    failures_run(failures, count);
    const char* whole = run_make("context-faultless", forked(1), context_shape(CONTEXT_GPT2),
                                 PIPED_FAULTY " --row-leaves 2");
    for (size_t i = 0; i < count; i += 3) {
        Task task = forked(4);
        const char* flags = failures[i].task.arguments[2];
        const char* name = kept("%.*s", (int)strcspn(flags + 6, " "), flags + 6);
        run_make(name, task, context_shape(CONTEXT_GPT2),
                 kept(PIPED_FAULTY " --resume on%s", flags + 6 + strlen(name)));
        check(same_tensors(name, whole, 3), "%s: a resume has the bits of an undisturbed run", failures[i].name);
    }
}

// The ranks that have the same rows are compared.
static void test_context_corruption(void) {
    static Failure failures[3];
    for (size_t i = 0; i < COUNT_OF(failures); i++)
        failures[i] = corruption("2 ranks share rows, 3 times", context_shape(CONTEXT_GPT2), "--cp 2", i + 1, i > 0);
    failures_run(failures, COUNT_OF(failures));
}

// A step sends what --plan says.
static void expect_sent(const char* run, const char* shape, size_t world, const char* flags) {
    double sent[STEPS] = {0};
    Job job;
    Task task = {.world = world, .arguments = {shape, "--tied off --plan on", flags}};
    run_make(run, forked(world), shape, kept("%s --tied off --val-every 0", flags));
    size_t steps = log_numbers(sent, STEPS, run, "comm_bytes");
    bool good = job_run(&job, &task) && steps > 1;
    const char* line = strstr(job.programs[0].text[0], "\n  sent per step ");
    double planned = line ? strtod(line + strcspn(line, "0123456789"), NULL) : NAN;
    job_free(&job);
    check_bound(good ? fabs(planned - 1e-6 * sent[steps / 2]) : NAN, 0.0051, "%zu ranks, %s: MB that a step sends",
                world, flags);
}

static void test_context_sent(void) {
    static const struct { size_t world; const char* flags; } cases[] = {
        {4, "--cp 4"}, {4, "--cp 2 --recompute block"}, {4, "--cp 2 --pp 2 --recompute attention"},
        {6, "--cp 2 --pp 3 --train block.[3456].*,*norm*"}};
    for (size_t i = 0; i < COUNT_OF(cases); i += PIPED_EVERY)
        expect_sent(kept("context-sent-%zu", i), context_shape(CONTEXT_GPT2), cases[i].world, cases[i].flags);
}

// Every layout of 8 and of 16 ranks, each with another schedule, ZeRO stage and level of recomputation, has the bits of
// one rank that sums in as many parts. Takes minutes.
static void test_layouts(void) {
    static const char* const kinds[] = {"1f1b", "interleaved", "zb-h2", "gpipe", "zb-h1"};
    const char* shape = "--family gpt2 --layers 8 --heads 16 --channels 64 --dropout 0.1 --documents mask "
                        "--end-of-text 3 --batch 1 --seq 32 --total-batch 1024 --steps 3 --lr 3e-3 --warmup 2 "
                        "--schedule constant "
                        "--clip 0.5 --spike-sigma 0 --data train.bin --val val.bin --val-every 3 --val-windows 20";
    size_t number = 0, recomputed = 0;
    for (size_t tp = 1; tp <= 16; tp *= 2)
        for (size_t cp = 1; tp * cp <= 16; cp *= 2)
            for (size_t world = 8; world <= 16; world *= 2)
                for (size_t pp = 1; pp * cp * tp <= world && pp <= 8; pp *= 2, number++) {
                    const char* alone = kept("layouts-alone-%zu-%zu", tp, cp);
                    const char* run = kept("layouts-%zu", number);
                    const char* level = pp > 1 && number % 5 >= 2 ? "none" : recomputed++ % 2 ? "block" : "attention";
                    const char* kind = pp == 8 && number % 5 == 1 ? "1f1b" : kinds[number % 5];  // 8 blocks
                    const char* flags = kept("--tp %zu --cp %zu --pp %zu --pipeline %s --zero %zu --recompute %s", tp,
                                             cp, pp, kind, number % (pp > 1 ? 2 : 4), level);
                    run_make(alone, forked(1), shape, kept("--reduce exact --leaves %zu --row-leaves %zu", tp, cp));
                    run_make(run, forked(world), shape, flags);
                    expect_same(run, alone, 3, kept("%zu ranks, %s: all bits of one rank", world, flags));
                }
}

static void test_context(void) {
    test_context_runs();
    if (PIPED_EVERY == 1) test_context_resume();
    test_context_sent();
}

static void test_context_faults(void) {
    test_context_kills();
    test_context_corruption();
}

// ------------------------------------------------------------------------------------------------
// Tensor parallelism

// A step has 16 sequences, 8 micro-batches. Of the padded vocabulary of 256 the last part has rows that are none.
// Validations have 9 windows, which no number of ranks divides.
enum { TENSOR_STEPS = 4 };
#define TENSOR "--layers 5 --batch 2 --seq 24 --total-batch 384 --steps 4 --lr 3e-3 --warmup 2 --schedule constant " \
               "--clip 0.5 --data train.bin --val val.bin --val-overlap 5 --val-every 2 --val-windows 9 " \
               "--spike-sigma 0 --channels 32 "
static const struct {
    const char* name;
    bool is_16;  // for --train16
    const char* arguments;
} TENSOR_MODELS[] = {
    {"gpt2", false, TENSOR "--family gpt2 --heads 8 --dropout 0.1 --documents mask --end-of-text 3 --data odd.bin "
                    "--val odd_val.bin --spike-skip 2.6 --spike-warmup 1 --leaves 4 --row-leaves 2"},
    {"llama", false, TENSOR "--family llama --heads 8 --kv-heads 2 --ffn 64 --tied off --qkv-bias on --dropout 0.1 "
                     "--clip 0.2 --leaves 2 --row-leaves 2"},
    {"frozen", false, TENSOR "--family gpt2 --heads 4 --tied off --train block.[234].*_weight,*norm* "
                      "--optimizer lion --lr 3e-4 --leaves 4"},
    {"qk-norm", false, TENSOR "--family llama --heads 8 --kv-heads 4 --ffn 64 --qk-norm on --optimizer momentum "
                       "--leaves 4"},
    {"bf16", true, TENSOR "--family llama --heads 8 --kv-heads 4 --ffn 96 --tied on --dropout 0.1 --data odd.bin "
                   "--val odd_val.bin --leaves 2 --row-leaves 2"},
    {"threes", false, TENSOR "--family llama --heads 12 --kv-heads 4 --channels 48 --ffn 64 --total-batch 576 "
                      "--leaves 2 --row-leaves 3"},
};
enum { TENSOR_GPT2, TENSOR_LLAMA, TENSOR_FROZEN, TENSOR_QK, TENSOR_16, TENSOR_THREES, TENSOR_COUNT };

// Nearly every pair of tp, cp, stages, schedule, ZeRO, copies, recomputation and model is in one of these.
static const struct {
    size_t model, world;
    const char* flags;
} TENSOR_RUNS[] = {
    {TENSOR_GPT2, 4, "--tp 4 --zero 3"},
    {TENSOR_LLAMA, 8, "--tp 2 --cp 2 --pp 2 --pipeline zb-h1"},
    {TENSOR_16, 8, "--tp 2 --cp 2 --pp 2 --pipeline zb-h2 --zero 1"},
    {TENSOR_FROZEN, 4, "--tp 2 --pp 2 --pipeline interleaved --zero 1"},
    {TENSOR_QK, 4, "--tp 2 --zero 2 --recompute norms"},
    {TENSOR_GPT2, 8, "--tp 4 --cp 2 --recompute block"},
    {TENSOR_GPT2, 8, "--tp 2 --cp 2 --pp 2 --pipeline interleaved --zero 1"},
    {TENSOR_GPT2, 8, "--tp 4 --pp 2 --recompute attention"},
    {TENSOR_GPT2, 4, "--tp 2 --zero 2 --shard 1 --offload optimizer,activations --offload-dir ."},
    {TENSOR_GPT2, 2, "--zero 3"},
    {TENSOR_GPT2, 4, "--tp 2 --pp 2 --pipeline gpipe --recompute gelu"},
    {TENSOR_LLAMA, 8, "--tp 2 --zero 3 --shard 2"},
    {TENSOR_LLAMA, 6, "--tp 2 --pp 3 --recompute block"},
    {TENSOR_LLAMA, 4, "--tp 2 --cp 2 --zero 2 --recompute attention --offload optimizer --offload-dir ."},
    {TENSOR_LLAMA, 8, "--tp 2 --pp 2 --pipeline gpipe --zero 1 --shard 1"},
    {TENSOR_LLAMA, 4, "--cp 2 --pp 2 --pipeline interleaved"},
    {TENSOR_FROZEN, 8, "--tp 4 --pp 2 --pipeline zb-h2"},
    {TENSOR_FROZEN, 8, "--tp 4 --zero 2 --recompute gelu"},
    {TENSOR_FROZEN, 4, "--tp 2 --zero 3 --shard 1 --recompute block"},
    {TENSOR_QK, 8, "--tp 4 --pp 2 --pipeline zb-h1 --zero 1"},
    {TENSOR_QK, 4, "--tp 4 --recompute block"},
    {TENSOR_QK, 4, "--tp 2 --pp 2 --pipeline gpipe"},
    {TENSOR_16, 4, "--tp 2 --zero 3 --recompute block"},
    {TENSOR_16, 8, "--tp 2 --pp 4 --recompute norms"},
    {TENSOR_16, 8, "--tp 2 --zero 1 --shard 2"},
    {TENSOR_16, 2, "--tp 2 --recompute attention"},
    {TENSOR_GPT2, 4, "--tp 2 --pp 2 --pipeline zb-h2 --zero 1"},
    {TENSOR_QK, 2, "--pp 2 --pipeline zb-h1"},
    {TENSOR_16, 4, "--cp 2 --pp 2 --pipeline zb-h1"},
    {TENSOR_FROZEN, 4, "--pp 4 --pipeline zb-h2"},
    {TENSOR_THREES, 12, "--tp 2 --cp 3"},
    {TENSOR_THREES, 12, "--tp 2 --pp 2 --pipeline 1f1b --zero 1"},
    {TENSOR_THREES, 9, "--cp 3 --zero 3"},
};

static Task tensor_task(size_t model, size_t world) {
    Task task = forked(world);
    if (TENSOR_MODELS[model].is_16) task.program = test.train16;
    return task;
}

static bool tensor_built(size_t model) { return !TENSOR_MODELS[model].is_16 || test.train16[0] != 0; }

static const char* tensor_alone(size_t model) {
    return run_make(kept("tensor-alone-%zu", model), tensor_task(model, 1), TENSOR_MODELS[model].arguments,
                    "--reduce exact");
}

static void test_tensor_runs(void) {
    size_t clipped = 0, skipped = 0;
    for (size_t i = 0; i < COUNT_OF(TENSOR_RUNS); i += PIPED_EVERY) {
        size_t model = TENSOR_RUNS[i].model, world = TENSOR_RUNS[i].world, clips, skips;
        const char *flags = TENSOR_RUNS[i].flags, *run = kept("tensor-%zu", i);
        if (!tensor_built(model)) continue;
        const char* alone = tensor_alone(model);
        run_make(run, tensor_task(model, world), TENSOR_MODELS[model].arguments, flags);
        expect_same(run, alone, TENSOR_STEPS,
                    kept("%s, %zu ranks, %s: all bits of one rank", TENSOR_MODELS[model].name, world, flags));
        count_guarded(&skips, &clips, alone);
        skipped += skips > 0;
        clipped += clips > 0;
    }
    check(skipped > 0 && clipped > skipped, "some of these skip steps, and more clip gradients");
}

// The largest relative difference of the losses of two runs; NAN if one is incomplete.
static double tensor_apart(const char* a, const char* b) {
    double x[STEPS], y[STEPS], worst = 0;
    bool whole = log_numbers(x, STEPS, a, "loss") == TENSOR_STEPS && log_numbers(y, STEPS, b, "loss") == TENSOR_STEPS;
    if (!whole) return NAN;
    for (size_t i = 0; i < TENSOR_STEPS; i++) worst = fmax(worst, isnan(x[i]) ? INFINITY : fabs(x[i] / y[i] - 1));
    return worst;
}

// Sums in another order: in 32 bits they differ by some roundings. Gradients that are added in 16 bits differ by half
// an epsilon each, and losses by less. Leaves are floats, but what a layer computes of their sum is rounded to 16 bits,
// as without leaves, so it differs where the sum is near the middle of two numbers.
static void test_tensor_others(void) {
    static const struct { size_t model, world; const char* flags; double bound; } cases[] = {
        {TENSOR_GPT2, 1, "--reduce exact --leaves 1", LOSS_BOUND},
        {TENSOR_GPT2, 4, "--tp 2 --reduce float", LOSS_BOUND},
        {TENSOR_LLAMA, 4, "--tp 2 --pp 2 --reduce float", LOSS_BOUND},
        {TENSOR_GPT2, 4, "--tp 2 --reduce storage", LOSS_BOUND},
        {TENSOR_16, 1, "--reduce exact --leaves 1", 0x1p-7},
        {TENSOR_16, 4, "--tp 2 --reduce storage", 0x1p-7}};
    for (size_t i = 0; i < COUNT_OF(cases); i += PIPED_EVERY) {
        size_t model = cases[i].model;
        if (!tensor_built(model)) continue;
        const char *alone = tensor_alone(model), *flags = cases[i].flags;
        const char* run = run_make(kept("tensor-other-%zu", i), tensor_task(model, cases[i].world),
                                   TENSOR_MODELS[model].arguments, flags);
        check_bound(tensor_apart(run, alone), cases[i].bound, "%s, %zu ranks, %s: losses", TENSOR_MODELS[model].name,
                    cases[i].world, flags);
        check(!same_tensors(run, alone, TENSOR_STEPS), "%s, %zu ranks, %s: other bits", TENSOR_MODELS[model].name,
              cases[i].world, flags);
    }
}

// Whether build/export writes the same model from two runs.
static bool same_exports(const char* a, const char* b) {
    const char* const runs[] = {a, b};
    char* texts[2] = {NULL, NULL};
    size_t bytes[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        const char* to = kept("%s.exported", runs[i]);
        remove_tree(to);
        if (system(text_of("%s --out %s --to hf --dir %s > export.txt 2>&1", test.export, runs[i], to)) != 0)
            print_indented(text_read("export.txt", NULL));
        texts[i] = text_read(text_of("%s/model.safetensors", to), &bytes[i]);
    }
    bool same = bytes[0] > 1000 && bytes[0] == bytes[1] && memcmp(texts[0], texts[1], bytes[0]) == 0;
    free(texts[0]);
    free(texts[1]);
    return same;
}

// A run that continues in one layout after the other, and keeps the parts in which it began to add up sums.
static void test_tensor_resume(void) {
    static const struct { size_t world, until; const char* flags; } moves[] = {
        {4, 1, "--leaves 4 --row-leaves 2 --tp 4 --zero 0 --shard 0"}, {1, 2, "--tp 1 --leaves 0 --row-leaves 0"},
        {4, 3, "--leaves 0 --row-leaves 0 --tp 2 --pp 2 --pipeline interleaved"},
        {2, 4, "--leaves 0 --row-leaves 0 --zero 2"},
        {4, 5, "--leaves 0 --row-leaves 0 --tp 2 --cp 2 --zero 3"},
        {8, 6, "--leaves 0 --row-leaves 0 --tp 4 --zero 1 --shard 1"}};
    static const size_t models[] = {TENSOR_GPT2, TENSOR_FROZEN, TENSOR_16};
    for (size_t m = 0; m < COUNT_OF(models); m += PIPED_EVERY) {
        size_t model = models[m];
        if (!tensor_built(model)) continue;
        const char* shape = kept("%s --total-batch 768 --val-every 0 --steps 6", TENSOR_MODELS[model].arguments);
        const char *whole = kept("tensor-unmoved-%zu", m), *run = kept("tensor-moved-%zu", m);
        run_make(whole, tensor_task(model, 1), shape, "--leaves 4 --row-leaves 2");
        for (size_t i = 0; i < COUNT_OF(moves); i++)
            run_make(run, tensor_task(model, moves[i].world), shape,
                     kept("%s --steps %zu --resume on --ckpt-keep 1", moves[i].flags, moves[i].until));
        check(same_tensors(run, whole, 6) && same_digits(run, whole, "loss", 6) &&
                  same_digits(run, whole, "grad_norm", 6) && same_digits(run, whole, "skipped", 6),
              "%s: a step each of 4 ranks that share layers, one rank, 2 stages of 2, 2 ranks at stage 2, 2 that share "
              "rows by 2 that share layers at stage 3, 2 copies over 4 that share layers: the bits of one rank",
              TENSOR_MODELS[model].name);
        if (test.export[0]) check(same_exports(run, whole), "%s: build/export writes the same files from both",
                                  TENSOR_MODELS[model].name);
    }
    if (test.export[0] == 0) skip("exports of these", "no build/export was given with --export");
}

// A resume in more parts than the run has leaves is refused; other --leaves are said.
static void test_tensor_leaves(void) {
    const char* shape = kept("%s --val-every 0 --row-leaves 0", TENSOR_MODELS[TENSOR_GPT2].arguments);
    static Failure refused[1];
    Failure f = {.name = "--resume with --tp 4 of a run with --leaves 2", .code = 2,
                 .fragments = {"--tp 4 does not divide --leaves, which is 2", "or give --leaves 4"},
                 .task = {.world = 4, .arguments = {shape, "--out tensor-leaves --resume on", "--leaves 0 --tp 4"}}};
    refused[0] = f;
    run_make("tensor-leaves", forked(2), shape, "--tp 2 --leaves 0 --steps 1");
    failures_run(refused, 1);
    Job job;
    Task task = {.world = 4, .arguments = {shape, "--out tensor-leaves --resume on", "--leaves 4 --tp 4"}};
    bool good = job_run(&job, &task);
    check(good && strstr(job.programs[0].text[0], "--leaves was '2' in that run and is '4' now: the bits will differ") &&
              log_last("tensor-leaves", "step") == TENSOR_STEPS,
          "with --leaves 4 it continues, and says that the bits will differ");
    job_free(&job);
}

// Without ZeRO, whose gathers may count in the next step.
static void test_tensor_sent(void) {
    static const struct { size_t model, world; const char* flags; } cases[] = {
        {TENSOR_GPT2, 4, "--tp 4"}, {TENSOR_GPT2, 4, "--tp 2 --cp 2 --recompute block"},
        {TENSOR_LLAMA, 4, "--tp 2 --pp 2 --recompute attention"}, {TENSOR_LLAMA, 4, "--tp 2 --recompute gelu"},
        {TENSOR_FROZEN, 8, "--tp 2 --pp 2"}, {TENSOR_QK, 8, "--tp 4 --pp 2 --pipeline interleaved --reduce float"},
        {TENSOR_LLAMA, 8, "--tp 2 --cp 2 --pp 2 --pipeline zb-h1"}};
    for (size_t i = 0; i < COUNT_OF(cases); i += PIPED_EVERY)
        expect_sent(kept("tensor-sent-%zu", i), TENSOR_MODELS[cases[i].model].arguments, cases[i].world,
                    cases[i].flags);
}

static void test_tensor(void) {
    test_tensor_runs();
    test_tensor_others();
    test_tensor_leaves();
    if (PIPED_EVERY == 1) test_tensor_resume();
    test_tensor_sent();
}

static void test_tensor_kills(void) {
    static const char* const points[] = {"all_to_all", "forward", "backward", "reduce", "update", "validate", "save"};
    static const char* const layouts[] = {"--tp 2 --pp 2", "--tp 4", "--tp 2 --cp 2", "--tp 2"};
    enum { POINTS = 7, CASES = 2 * POINTS };
    static Failure failures[CASES];
    size_t count = 0;
    const char* shape = TENSOR_MODELS[TENSOR_GPT2].arguments;
    for (size_t i = 0; i < CASES; i += PIPED_EVERY) {
        size_t stops = i / POINTS, victim = (3 * i + stops) % 4, layout = i % COUNT_OF(layouts);
        const char* flags = kept("--out tensor-fault-%zu %s --zero %zu", i, layouts[layout],
                                 layout == 0 ? i / 4 % 2 : i % 4);
        Failure f = {.name = kept("rank %zu of 4, %s, %s at %s", victim, flags, stops ? "stop" : "kill",
                                  points[i % POINTS]),
                     .task = {.launch = BY_HAND, .world = 4, .arguments = {shape, PIPED_FAULTY, flags},
                              .variables = fault_variable(victim, 2, kept("%s do %s", points[i % POINTS],
                                                                          stops ? "stop" : "kill"))},
                     .fate = stops ? STOPPED : KILLED, .victim = victim};
        failures[count++] = f;
    }
    failures_run(failures, count);
    const char* whole = run_make("tensor-faultless", forked(1), shape, PIPED_FAULTY " --reduce exact");
    for (size_t i = 0; i < count; i += 3) {
        const char* flags = failures[i].task.arguments[2];
        const char* name = kept("%.*s", (int)strcspn(flags + 6, " "), flags + 6);
        run_make(name, forked(4), shape, kept(PIPED_FAULTY " --resume on%s", flags + 6 + strlen(name)));
        check(same_tensors(name, whole, 3), "%s: a resume has the bits of an undisturbed run", failures[i].name);
    }
}

// The ranks that have the same part are compared.
static void test_tensor_corruption(void) {
    static Failure failures[6];
    const char* shape = kept("%s --steps 6", TENSOR_MODELS[TENSOR_GPT2].arguments);
    for (size_t i = 0; i < 4; i++)
        failures[i] = corruption("2 ranks share layers, 3 times", shape, kept("--tp 2 --zero %zu", i / 2), i + 1,
                                 i % 2);
    for (size_t i = 4; i < COUNT_OF(failures); i++) {  // each has other parts: what is not divided is compared
        failures[i] = corruption("4 ranks share layers", shape, kept("--tp 4 --zero %zu", i - 4), i - 2, false);
        failures[i].task.world = 4;
    }
    failures_run(failures, COUNT_OF(failures));
}

#define TENSOR_REFUSED(what, ranks, flags, first, second) \
    {.name = what, .code = 2, .fragments = {first, second}, .task = {.world = ranks, .arguments = {[1] = flags}}}

static void test_tensor_refusals(void) {
    static Failure failures[] = {
        TENSOR_REFUSED("--tp that does not divide the ranks", 3, "--tp 2 --leaves 2", "--tp 2", "3 ranks"),
        TENSOR_REFUSED("--tp above --leaves", 4, "--tp 4 --leaves 2", "--leaves, which is 2", "--leaves 4"),
        TENSOR_REFUSED("--tp that is no power of two", 3, "--tp 3 --leaves 3", "--tp 3", "power of two"),
        TENSOR_REFUSED("heads that leaves do not divide", 2, "--tp 2 --heads 4 --leaves 8", "--leaves 8", "heads"),
        TENSOR_REFUSED("a feed-forward that leaves do not divide", 2, "--tp 2 --leaves 4 --ffn 72", "--leaves 4", "72"),
        TENSOR_REFUSED("heads that --tp times --cp does not divide", 8, "--tp 4 --cp 2 --heads 4", "--tp", "heads"),
        TENSOR_REFUSED("sequences that leaves do not divide", 2, "--tp 2 --seq 20", "--leaves 4", "20 tokens"),
        TENSOR_REFUSED("samples of a part", 2, "--tp 2 --sample-every 1", "--sample-every", "build/generate"),
        TENSOR_REFUSED("muon", 2, "--tp 2 --optimizer muon", "--optimizer muon needs whole tensors", "adamw"),
        TENSOR_REFUSED("adamw-8bit", 2, "--tp 2 --optimizer adamw-8bit", "--optimizer adamw-8bit", "adamw"),
    };
    for (size_t i = 0; i < COUNT_OF(failures); i++)
        failures[i].task.arguments[0] = TENSOR_MODELS[TENSOR_GPT2].arguments;
    failures_run(failures, COUNT_OF(failures));
}

static void test_tensor_faults(void) {
    test_tensor_kills();
    test_tensor_corruption();
    test_tensor_refusals();
}

// The first stage holds the activations of as many micro-batches as there are stages, however many a step has; gpipe's
// holds all.
static void test_pipeline_memory(void) {
#ifdef __SANITIZE_ADDRESS__
    skip("peaks of memory", "the address sanitizer, which this is built with, takes some too");
    return;
#endif
    double peaks[2][2];
    for (size_t kind = 0; kind < 2; kind++)
        for (size_t many = 0; many < 2; many++) {
            Job job;
            Task task = {.world = 2, .arguments = {LONG, kept("--batch 1 --seq 64 --channels 256 --steps 1 "
                                                              "--total-batch %d", many ? 32 * 64 : 4 * 64),
                                                   kept("--pp 2 --pipeline %s --plan on", kind ? "gpipe" : "1f1b")}};
            bool good = job_run(&job, &task);
            char* text = job.programs[0].text[0];
            char* second = strstr(text, "\n  total ");  // there may be one of each stage
            second = second ? strstr(second + 1, "\n  total ") : NULL;
            if (second) *second = 0;
            double plan = plan_bytes(text);
            job_free(&job);
            task.launch = BY_HAND;
            task.arguments[2] = kept("--pp 2 --pipeline %s", kind ? "gpipe" : "1f1b");
            good = job_run(&job, &task) && good;
            double peak = peaks[kind][many] = (double)job.programs[0].peak;
            job_free(&job);
            check(good && plan > 0 && peak >= 0.95 * plan && peak <= 1.05 * plan + 1e6,
                  "2 stages, %s, %d micro-batches: planned %.1f MB, peak of the first stage %.1f MB (%+.1f%%)",
                  kind ? "gpipe" : "1f1b", many ? 32 : 4, 1e-6 * plan, 1e-6 * peak, 100 * (peak / plan - 1));
        }
    check_bound(fabs(peaks[0][1] / peaks[0][0] - 1), 0.02, "1f1b: 32 micro-batches take the memory of 4");
    check(peaks[1][1] > 1.5 * peaks[1][0], "gpipe: they take more, %.1f MB instead of %.1f", 1e-6 * peaks[1][1],
          1e-6 * peaks[1][0]);
}

static void test_slow(void) {
    double slowest[STEPS], low[STEPS], high[STEPS];
    Job job;
    for (size_t victim = 0; victim < 3; victim++) {
        const char* run = kept("slow-%zu", victim);
        Task task = {.world = 3, .variables = fault_variable(victim, 4, "forward do delay 50"),
                     .arguments = {SHAPES[GPT2].arguments, kept("--out %s --steps 16", run),
                                   "--slow-factor 1.5 --slow-steps 5 --total-batch 144"}};
        bool good = false;
        size_t right = 0;
        for (int attempt = 0; attempt < 4 && !good; attempt++) {  // on a busy machine others may be slow too
            if (attempt > 0) job_free(&job);
            remove_tree(run);
            good = job_run(&job, &task);
            size_t named = count_in(job.programs[0].text[0], text_of("rank %zu is a straggler", victim));
            size_t count = log_numbers(slowest, STEPS, run, "slowest_rank");
            log_numbers(low, STEPS, run, "ms_ranks_min");
            log_numbers(high, STEPS, run, "ms_ranks_max");
            right = 0;
            for (size_t i = 4; i < count; i++) right += slowest[i] == (double)victim && high[i] - low[i] > 25;
            good = good && named >= 1 && named <= 13 / 5 && count == 16 && right >= 11;
        }
        check(good, "rank %zu sleeps 50 ms a step from step 4 on: the console names it, not in each step, and the log "
              "in %zu of the last 12 steps", victim, right);
        if (!good) print_indented(job.programs[0].text[0]);
        job_free(&job);
    }
    Task task = {.world = 3,
                 .variables = fault_variable(0, 3, "forward do delay 50; rank 1 step 7 at forward do delay 150"),
                 .arguments = {SHAPES[GPT2].arguments, "--out slow-two --steps 16 --slow-factor 1.5 --slow-steps 11"}};
    bool good = job_run(&job, &task) && strstr(job.programs[0].text[0], "straggler") == NULL;
    check(good, "rank 0 is the slowest in steps 3 to 6, and rank 1 in 10 more: neither is a straggler of 11 steps");
    job_free(&job);
}

// ------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    static const struct { const char* name; void (*run)(void);
    } tests[] = {
        {"data", test_data},         {"stages", test_stages},         {"float", test_float},
        {"storage", test_storage},   {"recompute", test_recompute},   {"resume", test_resume},
        {"optimizers", test_optimizers}, {"launch", test_launch},
        {"memory", test_memory},     {"overlap", test_overlap},       {"faults", test_faults},
        {"refusals", test_refusals}, {"corruption", test_corruption}, {"rewind", test_rewind},
        {"slow", test_slow},         {"pipeline", test_pipeline},     {"pipeline-faults", test_pipeline_faults},
        {"pipeline-memory", test_pipeline_memory}, {"context", test_context},
        {"context-faults", test_context_faults}, {"tensor", test_tensor}, {"tensor-faults", test_tensor_faults},
        {"layouts", test_layouts},
    };
    const char *train = "./train", *train16 = NULL, *train_mpi = NULL, *export = NULL;
    bool overlap = true;
    int code;
    test.mpirun = system("command -v mpirun > /dev/null 2>&1") == 0;
    const Flag rows[] = {
        {"train", KIND_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"train16", KIND_TEXT, &train16, "PATH", 0, 0, "the program, built for bf16 or fp16", false},
        {"train-mpi", KIND_TEXT, &train_mpi, "PATH", 0, 0, "the program, built for fp32 and MPI", false},
        {"export", KIND_TEXT, &export, "PATH", 0, 0, "build/export", false},
        {"only", KIND_TEXT, &test.only, "NAME", 0, 0, "one of the tests", false},
        {"overlap", KIND_SWITCH, &overlap, "on|off", 0, 0, "the test that wants the machine for itself", false},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    if (!flags_begin(&code, "test_ranks", NULL, &flags, argc, argv)) return code;
    machine_adopt_orphans(true);  // ranks whose parent was killed
    tests_begin("test_ranks");
    const char* given[] = {train, train16, train_mpi, export};
    char* paths[] = {test.train, test.train16, test.train_mpi, test.export};
    for (size_t i = 0; i < COUNT_OF(given); i++)
        need(given[i] == NULL || (realpath(given[i], paths[i]) && access(paths[i], X_OK) == 0), "build %s", given[i]);
    root_enter();
    put_shard("train.bin", 256, 20000, 1);
    put_shard("odd.bin", 251, 20000, 2);
    put_shard("other.bin", 256, 20000, 3);
    put_shard("val.bin", 256, 1000, 4);
    put_shard("odd_val.bin", 251, 1000, 5);
    bool found = test.only == NULL;
    for (size_t i = 0; i < COUNT_OF(tests); i++) {
        bool left_out = tests[i].run == test_layouts || (!overlap && tests[i].run == test_overlap);
        if (test.only ? strcmp(test.only, tests[i].name) != 0 : left_out) continue;
        double began = now_ms();
        found = true;
        tests[i].run();
        printf("%s: %.1f s\n", tests[i].name, (now_ms() - began) / 1e3);
    }
    need(found, "--only is '%s', which is no test; see the head of dev/test/test_ranks.c", test.only);
    return tests_end();
}
