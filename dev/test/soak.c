// soak.c: a run that is killed at any point, on any disk, resumes as if nothing had happened.
//
//   cc -std=c11 -O2 -I. dev/test/soak.c -o build/soak -lm -pthread
//   build/soak [--train PATH] [--kills N] [--seed S] [--workers N] [--only NAME] [--case I]
//
//   references  the results of a run that nobody kills: weights at every step, and the log; the same bits for every
//               number of ranks and ZeRO stage
//   kills       SIGKILL, SIGSTOP or SIGSEGV of one rank or of all, at every named point of a step and of a save, and at
//               random times, also with 8-bit optimizer states and --offload of states, activations or both; then
//               --resume. The final result equals the reference, to the bit; every checkpoint under its final name is
//               always whole; a kill loses at most --ckpt-every steps, and those of the write in flight; nothing is
//               left behind
//   damage      each byte of each file of a checkpoint changed in turn, files truncated or missing: detected, reported,
//               and the previous checkpoint is used
//   disk        full, read-only, deleted, writes cut short: an error message, and earlier saves stay good
//   failing     the kernel returns 'Input/output error' (bad_disk.h): for all flushes, writes or renames of a rank
//               after a good checkpoint: each failed save is reported, and training continues; for reads of a resume:
//               the file is reported and skipped, or the run ends, but never starts over; for any single call. And all
//               reads and writes transfer half of the bytes requested
//   order       the flushes and renames of a save, as the kernel sees them: the log, the parts of all ranks, the
//               manifest, the directory, and only then the removal of an older checkpoint
//   clock       the time of day jumps back and forth, for the program (by LD_PRELOAD) and for its files
//   prune       killed while an old checkpoint is removed
//   reshard     3 ranks, 2, 1, 4, with other stages, each killed: one run
//   tiers       checkpoints of --ckpt-tier that are newer, damaged or gone, or follow one that is; of another run, of a
//               branch that the run has left on another machine, from before a rewind; that one rank cannot see
//   rewind      a run that diverges and rewinds (--rewind), killed in the middle of that and at random times
//
// Nothing depends on the time of day: base.h's now_ms is CLOCK_MONOTONIC and the only clock of the trainer and its
// checkpoints, file times are never read, and the newest checkpoint is that of the highest step. (The logs and the
// supervisor's reports record the time of day, but nothing is decided by it.)
//
// Cases are distributed over --workers processes, each with its own directory. A case of the kills depends only on its
// number and on --seed: --case I repeats one.

#include "llmtrain/checkpoint/record.h"
#include "llmtrain/run/log.h"
#include "bad_disk.h"
#include "machine.h"
#include "pieces.h"

#include <grp.h>

#define STEPS 30
#define RANKS_MAX ((size_t)4)
#define ANY_STEP SIZE_MAX
#define TIMEOUT_MS 2e3   // --timeout of every run
#define SLACK_MS 4e3     // what a busy machine may add to the timeout
#define LIMIT_MS 60e3    // after this a program counts as hung

// A step has 12 sequences for every number of ranks. Some steps are skipped, and there is dropout: a resume must
// restore their state, too. The activations of one of the four blocks can be offloaded.
#define MODEL_OF(layers)                                                                                \
    "--family gpt2 --layers " layers " --heads 2 --channels 16 --seq 16 --batch 1 --total-batch 192 "   \
    "--steps 30 --val-every 10 --val-windows 4 --lr 3e-3 --warmup 3 --clip 0.5 --spike-sigma 0 "        \
    "--spike-warmup 4 --spike-skip 1.65 --dropout 0.1 --threads 1 --reduce exact --timeout 2"
#define MODEL MODEL_OF("4")
#define SHALLOW MODEL_OF("2")  // skips fewer steps, so that its rewinds come to an end

// A checkpoint small enough to damage each of its bytes in turn.
#define SMALL                                                                                                         \
    "--family gpt2 --layers 1 --heads 1 --channels 8 --ffn 8 --seq 8 --batch 1 --total-batch 16 --steps 4 --lr 3e-3 " \
    "--warmup 1 --threads 1 --reduce exact --timeout 2"

// ------------------------------------------------------------------------------------------------
// Results of all processes

typedef unsigned long long Count;

typedef struct {
    Count kills, restarts, lost, lost_most, most_allowed;  // in steps
    Count backs, back_us, back_us_most;                    // from the death of the last rank to the first step's line
} Mode;

static const char* const MODE_NAMES[4] = {"sync", "sync, tiers", "async", "async, tiers"};

static struct {
    Count cases, kills, quiet;  // quiet: runs that ended before the signal came
    Count taken;                // cases that workers have taken from the list
    Mode modes[4];
} * shared;

static struct {
    char train[PATH_MAX];
    const char* only;
    uint64_t kills, seed, workers, one_case;
} test;

static char place[PATH_MAX];  // this process' directory within the test's

static void raise_to(Count* most, Count value) {
    Count known = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (known < value &&
           !__atomic_compare_exchange_n(most, &known, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

// ------------------------------------------------------------------------------------------------
// A run's flags and results

// The configuration of a run and its saves.
typedef struct {
    size_t world, zero, every;
    size_t near, far;   // steps between two saves in a tier in memory and in one on the disk; 0: there is none
    bool async;
    double bandwidth;
    size_t keep;
    const char* often;  // --ckpt-every, if it is not a number of steps
    bool small;         // use the model SMALL
    bool shallow;       // use the model SHALLOW
    bool bits8;         // optimizer state in 8 bits
    int offload;        // optimizer state, activations or both in a file
    bool relative;      // --out, and the tier on the disk, are relative
} Way;

static const char* way_text(const Way* way) {
    return text_of("%zu rank%s, %s", way->world, way->world > 1 ? "s" : "", way->async ? "async" : "sync");
}

static const char* run_path(void) { return text_of("%s/run", place); }
static const char* step_path(size_t step) { return text_of("%s/run/step_%08zu", place, step); }

// The tiers, and the directories of a run in them. A disk that fails for /run fails for FAR too.
#define FAR "run_far"
static const char* near_path(void) {
    return text_of(SYSTEM_MEMORY_FOLDER "/llmtrain-soak-%016llx", (unsigned long long)hash_bytes(place, strlen(place)));
}
static const char* far_path(void) { return text_of("%s/" FAR, place); }

static const char* tier_path(const char* tier) {
    char id[32] = "none";
    char* text = text_read(text_of("%s/tiers", run_path()), NULL);
    const char* name = text ? strstr(text, text_of(" %s\n", tier)) : NULL;
    if (name && name - text >= 16) snprintf(id, sizeof id, "%.16s", name - 16);
    free(text);
    return text_of("%s/%s", tier, id);
}

static void run_remove(void) {
    remove_tree(run_path());
    remove_tree(near_path());
    remove_tree(far_path());
}

// Valid until the next call.
static const char* arguments_of(const Way* way, const char* more) {
    static char arguments[8192];
    char offloaded[32];
    choice_name(OFFLOAD_CHOICES, way->offload, offloaded, sizeof offloaded);
    snprintf(arguments, sizeof arguments,
             "%s --data %.600s/train.bin --out %.600srun --zero %zu --ckpt-async %s --ckpt-every %s %s %s %s %s %s %s "
             "%s",
             way->small ? SMALL : text_of("%s --val %.600s/val.bin", way->shallow ? SHALLOW : MODEL, root), root,
             way->relative ? "" : text_of("%s/", place), way->zero, way->async ? "on" : "off",
             way->often ? way->often : text_of("%zu", way->every),
             way->near ? text_of("--ckpt-tier %s:%zu", near_path(), way->near) : "",
             way->far ? text_of("--ckpt-tier %.600s:%zu:3", way->relative ? FAR : far_path(), way->far) : "",
             way->keep ? text_of("--ckpt-keep %zu", way->keep) : "",
             way->bandwidth > 0 ? text_of("--ckpt-bandwidth %g", way->bandwidth) : "",
             way->bits8 ? "--optimizer adamw-8bit" : "",
             way->offload ? text_of("--offload %s --offload-dir %.600s", offloaded, place) : "", more);
    return arguments;
}

// Returns 0 if they cannot be read.
static uint64_t weights_of(size_t step) {
    Error ignored;
    return weights_hash(step_path(step), &ignored);
}

typedef struct {
    uint64_t hash;         // without fields that differ from run to run: times, memory and what follows them
    size_t last;           // the step in the last whole line; 0: none
    double losses[STEPS];  // NAN: none
    size_t updates[STEPS], update_count;  // steps that were not skipped
} RunLog;

static RunLog log_read(void) {
    size_t bytes, skipped_before = 0;
    double loss;
    RunLog log = {0, 0, {0}, {0}, 0};
    char* text = text_read(text_of("%s/metrics.jsonl", run_path()), &bytes);
    Hash hash = hash_begin(0);
    for (size_t i = 0; i < STEPS; i++) log.losses[i] = NAN;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        const char* times = strstr(line, ",\"ms\"");
        hash_add(&hash, line, (size_t)((times && times < end ? times : end) - line));
        bool has_loss = sscanf(line, "{\"step\": %zu,\"loss\": %lf", &log.last, &loss) == 2;
        if (has_loss && log.last >= 1 && log.last <= STEPS) log.losses[log.last - 1] = loss;
        const char* member = strstr(line, "\"skipped\": ");
        size_t skipped = member ? (size_t)strtoull(member + strlen("\"skipped\": "), NULL, 10) : 0;
        if (skipped == skipped_before && log.update_count < STEPS) log.updates[log.update_count++] = log.last;
        skipped_before = skipped;
    }
    if (bytes > 0 && text[bytes - 1] != '\n') hash_add(&hash, "no end", 6);
    free(text);
    log.hash = hash_end(&hash);
    return log;
}

// ------------------------------------------------------------------------------------------------
// A job: a run of the program by one or more ranks, and the harm done to it

typedef struct {
    int signal;         // 0: none is sent
    bool all;           // to all ranks, otherwise
    size_t victim;      // only to this one
    const char* point;  // when a rank reaches this point
    size_t step;        // of this step; point NULL:
    size_t lines;       // when the log has this many lines
    const char* line;   // beginning with this (NULL: with "step "),
    double after_ms;    // plus this time
    const char* fault;  // LLMTRAIN_TEST_FAULT of ranks without a `point`; NULL: none
    BadDisk* disk;      // how file calls fail; NULL: they do not
    size_t disk_rank;   // for this rank only
    bool all_disks;     // for all ranks
    bool as_nobody;     // run as a user who may not write everywhere
    size_t file_limit;  // maximum file size; 0: none
    const char* hides;  // the victim sees an empty disk there; NULL: nowhere
} Harm;

#define SLOWLY "rank 0 step 1 at update do delay 50"  // leaves time to interfere with a run

static Harm kill_all(const char* point, size_t step) {
    return (Harm){.signal = SIGKILL, .all = true, .point = point, .step = step};
}

// The current or last job.
static struct {
    size_t world;
    Harm harm;
    Program ranks[RANKS_MAX];
    bool hit[RANKS_MAX];
    int listeners[RANKS_MAX];     // for ranks with a bad disk; -1: none
    int reserved;                 // socket that reserves the port
    bool struck;                  // some rank was hit
    double first_line_ms;         // when rank 0 printed its first step; 0: never
    unsigned long long failures;  // failed conditions before it began
} job;

static const char* preload;  // for LD_PRELOAD of the programs; NULL: none

static const char* action_of(int signal) {
    return signal == SIGKILL ? "kill" : signal == SIGSTOP ? "stop" : signal == SIGTERM ? "term" : "segv";
}

// For the start of one rank.
typedef struct { size_t rank, port; int disk_socket; } Start;

static void job_become(const void* context) {
    const Start* s = (const Start*)context;
    const Harm* harm = &job.harm;
    const struct rlimit limit = {harm->file_limit, harm->file_limit};
    if (harm->file_limit) setrlimit(RLIMIT_FSIZE, &limit);
    environment_clear();
    environment_set(text_of("OMP_NUM_THREADS=1|OMP_WAIT_POLICY=passive|RANK=%zu|LOCAL_RANK=%zu|WORLD_SIZE=%zu|"
                            "MASTER_ADDR=127.0.0.1|MASTER_PORT=%zu", s->rank, s->rank, job.world, s->port));
    // SIGSEGV must kill a program with AddressSanitizer, too.
    if (harm->signal == SIGSEGV) setenv("ASAN_OPTIONS", "handle_segv=0", 1);
    if (harm->fault) setenv("LLMTRAIN_TEST_FAULT", harm->fault, 1);
    if (preload) setenv("LD_PRELOAD", preload, 1);
    if (harm->signal && harm->point && (harm->all || harm->victim == s->rank))
        setenv("LLMTRAIN_TEST_FAULT", text_of("rank %zu step %zu at %s do %s", s->rank, harm->step, harm->point,
                                              action_of(harm->signal)), 1);
    if (harm->hides && harm->victim == s->rank &&
        !(machine_own_mounts() && machine_mount(harm->hides, "size=1m"))) _exit(EXIT_NOT_RUN);
    if (harm->as_nobody && (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0)) _exit(EXIT_NOT_RUN);
    if (s->disk_socket >= 0 && !bad_disk_enter(harm->disk->calls, s->disk_socket)) _exit(EXIT_NOT_RUN);
}

// Prints a job's output if conditions have failed since it began.
static void job_free(void) {
    for (size_t r = 0; r < job.world; r++) {
        const Program* p = &job.ranks[r];
        if (harness_now.failures > job.failures)
            expect(false, "rank %zu: exit code %d: %.400s", r, program_code(p), p->text[1]);
        program_free(&job.ranks[r]);
    }
    memset(&job, 0, sizeof job);
}

#define conclude(...) (job_free(), verdict(__VA_ARGS__))

static void job_start(size_t world, const char* arguments, Harm harm) {
    static Words words;
    job_free();
    memset(&words, 0, sizeof words);
    words_add(&words, test.train);
    words_add(&words, arguments);
    Start start = {0, port_reserve(&job.reserved), -1};
    job.world = world;
    job.harm = harm;
    job.failures = harness_now.failures;
    for (size_t r = 0; r < world; r++) {
        int sockets[2] = {-1, -1};
        bool has_bad_disk = harm.disk && (harm.all_disks || harm.disk_rank == r);
        need(!has_bad_disk || bad_disk_sockets(sockets), "a socket");
        start.rank = r;
        start.disk_socket = sockets[1];
        program_start(&job.ranks[r], words.words, job_become, &start);
        job.listeners[r] = -1;
        if (!has_bad_disk) continue;
        close(sockets[1]);
        job.listeners[r] = bad_disk_listen(sockets[0], job.ranks[r].pid);
        close(sockets[0]);
        need(job.listeners[r] >= 0, "a filter of system calls");
    }
}

// The output of rank 0: standard output (0) and error (1).
static const char* said(int stream) { return job.ranks[0].text[stream]; }

static size_t times_said(const char* words) {
    size_t times = 0;
    for (const char* at = said(0); (at = strstr(at, words)) != NULL; at++) times++;
    return times;
}

// Waits until all have ended; meanwhile answers their calls to a bad disk. Stopped ranks are killed when the others
// have ended, and so are ranks that run too long. A rank that was not hit must end by itself, with a message.
static void job_wait(void) {
    const Harm* harm = &job.harm;
    bool by_time = harm->signal && !harm->point;
    double due = INFINITY, limit_ms = LIMIT_MS;
    size_t lines = 0;
    char line[16];
    pid_t pids[RANKS_MAX];
    snprintf(line, sizeof line, "\n%s", harm->line ? harm->line : "step ");
    for (size_t r = 0; r < job.world; r++) pids[r] = job.ranks[r].pid;
    for (bool busy = true; busy;) {
        if (harm->disk) bad_disk_serve(harm->disk, job.listeners, pids, job.world, 1);
        else sleep_ms(1);
        busy = programs_run(job.ranks, job.world, limit_ms);
        if (lines == 0 || (by_time && lines < harm->lines)) lines = times_said(line);
        if (lines > 0 && job.first_line_ms == 0) job.first_line_ms = now_ms();
        if (by_time && due == INFINITY && lines >= harm->lines) due = now_ms() + harm->after_ms;
        bool now = harm->signal && (by_time ? now_ms() >= due : job.struck);
        for (size_t r = 0; r < job.world; r++) {
            const Program* p = &job.ranks[r];
            bool fell = p->stopped || (p->ended && WIFSIGNALED(p->status));
            if (fell && !job.struck) limit_ms = now_ms() + TIMEOUT_MS + SLACK_MS - job.ranks[0].began_ms;
            job.struck |= fell;
            bool strikes = now && !p->ended && !fell && !job.hit[r] && (harm->all || r == harm->victim);
            if (strikes) kill(pids[r], harm->signal);
            job.hit[r] |= fell || strikes;
        }
    }
    close(job.reserved);
    for (size_t r = 0; r < job.world; r++) {
        if (job.listeners[r] >= 0) close(job.listeners[r]);
        bool good = !job.ranks[r].late && (job.hit[r] || program_code(&job.ranks[r]) <= 1);
        expect(good, "rank %zu was not hit, and did not end by itself, in time, with a sentence", r);
    }
}

static bool job_good(void) {
    bool good = true;
    for (size_t r = 0; r < job.world; r++) good = good && program_good(&job.ranks[r]);
    return good;
}

static void run(const Way* way, const char* more, Harm harm) {
    job_start(way->world, arguments_of(way, more), harm);
    job_wait();
}

// Trains; all ranks must succeed.
static bool run_well(const Way* way, const char* more) {
    run(way, more, (Harm){0});
    return expect(job_good(), "it fails: %s", more);
}

// Trains until the signal, which must hit.
static void run_killed(const Way* way, const char* more, Harm harm) {
    run(way, more, harm);
    expect(job.struck, "it was not killed");
}

static void expect_said(const char* words) { expect(strstr(said(1), words) != NULL, "it does not say '%s'", words); }

// The step that a run resumed from; ANY_STEP if it ended before reporting it.
static size_t resumed_from(void) {
    const char* path = strstr(said(0), "resumed from ");
    const char* step = path ? strstr(path, "/step_") : NULL;
    if (step) return (size_t)strtoull(step + 6, NULL, 10);
    return strstr(said(0), "starting from the beginning") ? 0 : ANY_STEP;
}

static void expect_resumed(size_t step) {
    expect(resumed_from() == step, "it resumed from step %zu, not %zu", resumed_from(), step);
}

// The step of the last save that the run reported.
static size_t last_saved(void) {
    size_t step = 0;
    for (const char* at = said(0); (at = strstr(at, "\nsaved ")) != NULL; at++) {
        const char* name = strstr(at, "/step_");
        if (name) step = (size_t)strtoull(name + 6, NULL, 10);
    }
    return step;
}

// ------------------------------------------------------------------------------------------------
// References

static struct {
    uint64_t weights[STEPS + 1];  // for every number of ranks
    RunLog logs[RANKS_MAX + 1];      // for each number of ranks
} references[2], *reference = references;  // with 32-bit and with 8-bit optimizer state

// Every checkpoint under its final name holds the reference's tensors of that step.
static void check_whole(const char* out) {
    uint64_t step = UINT64_MAX;
    while (checkpoint_before(&step, out, step)) {
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord record;
        Error error;
        checkpoint_path(path, out, step, "");
        if (!expect(record_open(&manifest, &record, path, &error), "%s", error.text)) continue;
        json_free(&manifest);
        uint64_t hash = weights_hash(path, &error);
        expect(hash != 0, "%s", error.text);
        expect(step <= STEPS && hash == reference->weights[step], "%s has other tensors than the reference", path);
    }
}

static void check_weights(void) {
    expect(weights_of(STEPS) == reference->weights[STEPS], "other weights than the reference's after the last step");
}

static void check_log(size_t world) {
    expect(log_read().hash == reference->logs[world].hash, "another log than the reference's");
}

static size_t checkpoints_left(const char* directory) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    while (checkpoint_before(&step, directory, step)) count++;
    return count;
}

// A run leaves its logs and whole checkpoints; any other name must be hidden.
static void check_name(const char* path, void* inside) {
    const char* name = strrchr(path, '/') + 1;
    unsigned long long step = 0;
    bool is_step = sscanf(name, "step_%llu", &step) == 1 && strcmp(name, text_of("step_%08llu", step)) == 0;
    static const char* const logs[] = {"metrics.jsonl", "events.jsonl", "ranks.jsonl", "run.jsonl", "tiers"};
    bool is_log = false;
    for (size_t i = 0; i < COUNT_OF(logs); i++) is_log = is_log || strcmp(name, logs[i]) == 0;
    bool good = inside ? strstr(name, ".tmp") == NULL : name[0] == '.' || is_log || is_step;
    expect(good, "%s is left behind", path);
    if (is_step && !inside) directory_each(path, check_name, &job);
}

// The run is complete, equals the reference, and has left nothing else.
static void check_complete(size_t world) {
    check_weights();
    check_log(world);
    directory_each(run_path(), check_name, NULL);
    expect(!directory_exists(tier_path(near_path())), "%s is left behind", tier_path(near_path()));
    directory_each(tier_path(far_path()), check_name, NULL);
    expect(checkpoints_left(tier_path(far_path())) <= 3, "%zu checkpoints are left in " FAR,
           checkpoints_left(tier_path(far_path())));
    expect(directory_count(place, "offload-") == 0, "a file of --offload is left behind");
    expect(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "processes are left behind");
}

// Resumes the run, which must continue from this step and end as if nothing had happened.
static void resume_completes(const Way* way, const char* more, size_t from) {
    if (!run_well(way, text_of("--resume %s", more))) return;
    if (from != ANY_STEP) expect_resumed(from);
    check_complete(way->world);
}

static void test_references(void) {
    for (size_t i = 0; i < 2 * 4 * 3; i++) {
        size_t world = i / 3 % 4 + 1, zero = i % 3;
        bool bits8 = i >= 4 * 3;
        bool first = world == 1 && zero == 0;
        Way way = {.world = world, .zero = zero, .every = first ? 1 : 5, .bits8 = bits8};
        if (bits8 && (world % 2 == 0 || zero > 0)) continue;  // kills use 1 and 3 ranks only
        reference = &references[bits8];
        run_remove();
        if (run_well(&way, "")) {
            for (size_t step = way.every; step <= STEPS; step += way.every) {
                uint64_t hash = weights_of(step);
                if (first) reference->weights[step] = hash;
                expect(hash != 0 && hash == reference->weights[step], "step %zu: not the tensors of one rank", step);
            }
            if (zero == 0) reference->logs[world] = log_read();
            check_log(world);
        }
        conclude("reference: %zu rank%s, --zero %zu%s", world, world > 1 ? "s" : "", zero,
                 bits8 ? ", 8-bit states" : "");
    }
    reference = references;
    run_remove();
}

// ------------------------------------------------------------------------------------------------
// Kills

// Points at which a run can be killed. The kind says how many steps after a save has begun its point may be reached if
// the save is asynchronous.
typedef enum { OF_STEP, OF_UPDATE, OF_VALIDATION, OF_BEGINNING, OF_WRITING, OF_END } PointKind;

static const struct { const char* name; PointKind kind; bool leader_only; } POINTS[] = {
    {"load", OF_STEP, false}, {"forward", OF_STEP, false}, {"backward", OF_STEP, false}, {"reduce", OF_STEP, false},
    {"update", OF_STEP, false}, {"gather", OF_UPDATE, false}, {"validate", OF_VALIDATION, false},
    {"save", OF_BEGINNING, false}, {"snapshot", OF_BEGINNING, false}, {"write", OF_WRITING, false},
    {"flush", OF_WRITING, false}, {"checksums", OF_END, false}, {"manifest", OF_END, true}, {"rename", OF_END, true},
    {"clean", OF_END, false}, {"offload_read", OF_UPDATE, false}, {"offload_write", OF_UPDATE, false},
};
enum { POINT_COUNT = COUNT_OF(POINTS), GATHER = 5, SNAPSHOT = 8, CLEAN = 14, ATTEMPTS = 8, IN_A_ROW = 3 };
static const int SIGNALS[3] = {SIGKILL, SIGSTOP, SIGSEGV};

// Random numbers that depend only on the case and on --seed.
typedef struct { uint64_t number, index; } Dice;

static size_t dice_below(Dice* dice, size_t n) {
    return random4(test.seed, RANDOM_TEST, dice->number, dice->index++).bits[0] % n;
}

// At a random time, one rank or all.
static Harm harm_at_random(Dice* dice, const Way* way, int signal, bool all) {
    Harm harm = {.signal = signal, .all = all, .victim = dice_below(dice, way->world)};
    harm.lines = dice_below(dice, STEPS);
    harm.after_ms = (double)dice_below(dice, harm.lines ? 15 : 80);
    return harm;
}

static void describe(char text[256], const Way* way, const Harm* harm) {
    const char* when = harm->point ? text_of("%s of step %zu", harm->point, harm->step)
                                   : text_of("%.0f ms after line %zu", harm->after_ms, harm->lines);
    char offloaded[32];
    choice_name(OFFLOAD_CHOICES, way->offload, offloaded, sizeof offloaded);
    const char* who = harm->all ? text_of("all of %zu", way->world)
                                : text_of("rank %zu of %zu", harm->victim, way->world);
    snprintf(text, 256, "%s %.60s, %.90s, --zero %zu, %s every %zu%.20s%.20s%.20s%s%s", action_of(harm->signal), who,
             when, way->zero, way->async ? "async" : "sync", way->every,
             way->near ? text_of(", near every %zu", way->near) : "",
             way->far ? text_of(", far every %zu", way->far) : "",
             way->bandwidth > 0 ? text_of(", %g MB/s", way->bandwidth) : "", way->bits8 ? ", 8-bit states" : "",
             way->offload ? text_of(", offload %s", offloaded) : "");
}

static Mode* mode_of(const Way* way) { return &shared->modes[way->async * 2 + (way->near + way->far > 0)]; }

// The most steps that a kill may lose: --ckpt-every, plus with asynchronous saves those of the write in flight, which
// ends before the next one begins. A tier is then only saved to while nothing else is.
static size_t most_lost(const Way* way) {
    if (way->async && way->every > 1) return 2 * way->every;
    return min_size(way->every, min_size(way->near ? way->near : STEPS, way->far ? way->far : STEPS));
}

// The state when all ranks of the last start had ended.
static struct {
    size_t logged, saved;  // the last step in the log, and the last saved
    double ms;
} death;

static void death_note(void) {
    death.logged = log_read().last;
    death.saved = max_size(death.saved, last_saved());
    death.ms = 0;
    for (size_t r = 0; r < job.world; r++) death.ms = fmax(death.ms, job.ranks[r].ended_ms);
}

// Checks and counts the steps that a restart has lost.
static void check_restart(const Way* way) {
    Mode* mode = mode_of(way);
    size_t from = resumed_from(), lost = death.logged > from ? death.logged - from : 0;
    if (from == ANY_STEP) return;
    expect(lost <= most_lost(way), "%zu steps are lost, from %zu back to %zu; at most %zu may be", lost, death.logged,
           from, most_lost(way));
    expect(from >= death.saved, "it resumed from step %zu, though %zu was saved", from, death.saved);
    count_add(&mode->restarts, 1);
    count_add(&mode->lost, lost);
    raise_to(&mode->lost_most, lost);
    raise_to(&mode->most_allowed, most_lost(way));
    if (job.first_line_ms == 0) return;
    Count us = (Count)(1e3 * (job.first_line_ms - death.ms));
    count_add(&mode->backs, 1);
    count_add(&mode->back_us, us);
    raise_to(&mode->back_us_most, us);
}

// Starts the run once; the signal may come too late. True if some rank was hit.
static bool start_and_strike(const Way* way, Harm harm, bool resumes) {
    run(way, resumes ? "--resume" : "", harm);
    if (!job.struck) {
        expect(job_good(), "a run that nobody hit fails");
        count_add(&shared->quiet, 1);
        return false;
    }
    count_add(&shared->kills, 1);
    count_add(&mode_of(way)->kills, 1);
    check_whole(run_path());
    check_whole(tier_path(near_path()));
    check_whole(tier_path(far_path()));
    return true;
}

// The step at which a fault is set so that its point is reached in that step. When an asynchronous save ends differs
// from run to run: if it misses, another attempt uses another step, and the last attempt the last step, whose save is
// waited for.
static size_t step_of(const Way* way, PointKind kind, size_t attempt, Dice* dice) {
    size_t interval = way->near && !way->async && dice_below(dice, 2) ? way->near : way->every;
    size_t saves = STEPS / interval;
    size_t save = min_size(STEPS, interval * (dice_below(dice, saves + 1) + 1));
    const RunLog* log = &reference->logs[way->world];
    if (kind == OF_UPDATE && log->update_count > 0) return log->updates[dice_below(dice, log->update_count)];
    if (kind == OF_STEP || kind == OF_UPDATE) return 1 + dice_below(dice, STEPS);
    if (kind == OF_VALIDATION) return 10 * (1 + dice_below(dice, STEPS / 10));
    if (attempt == ATTEMPTS - 1) return STEPS;
    if (kind == OF_BEGINNING || !way->async) return save;
    if (kind == OF_WRITING) return min_size(STEPS, save + attempt % 2);
    return min_size(STEPS, save + 1 + dice_below(dice, way->every));
}

// Kills the first start at a named point; false if no attempt hit.
static bool strike_at_point(char what[256], Way* way, size_t combination, Dice* dice) {
    size_t point = combination % POINT_COUNT, who = combination / POINT_COUNT % 3;
    Harm harm = {.signal = SIGNALS[combination / POINT_COUNT / 3 % 3], .all = who > 0, .point = POINTS[point].name};
    way->world = who < 2 ? 3 : 1;
    way->async = combination / POINT_COUNT / 9 % 2 == 0 || point == SNAPSHOT;
    if (way->async && point == SNAPSHOT) way->offload &= ~OFFLOAD_OPTIMIZER;  // it makes no snapshot
    if (point > CLEAN && way->offload == OFFLOAD_NOTHING) way->offload = 1 + (int)dice_below(dice, OFFLOAD_BOTH);
    if (way->offload & OFFLOAD_OPTIMIZER) way->async = false;
    if (!way->async) way->bandwidth = 0;
    if (point == SNAPSHOT) way->every = max_size(way->every, 2);
    if (point == GATHER) way->zero = 1 + dice_below(dice, 2);
    if (!POINTS[point].leader_only) harm.victim = dice_below(dice, way->world);
    for (size_t attempt = 0; attempt < ATTEMPTS; attempt++) {
        run_remove();
        harm.step = step_of(way, POINTS[point].kind, attempt, dice);
        describe(what, way, &harm);
        if (start_and_strike(way, harm, false) || harness_now.failures) return true;
        check_complete(way->world);
    }
    return false;
}

// Kills the run at random times, also after it has resumed; returns how often.
static size_t strike_at_random(char what[256], const Way* way, Dice* dice) {
    size_t most = 1 + dice_below(dice, IN_A_ROW);
    run_remove();
    for (size_t i = 0; i < most; i++) {
        int signal = SIGNALS[dice_below(dice, 3)];
        bool all = dice_below(dice, 2);
        Harm harm = harm_at_random(dice, way, signal, all);
        if (i == 0) describe(what, way, &harm);
        bool struck = start_and_strike(way, harm, i > 0);
        if (i > 0) check_restart(way);
        death_note();
        if (!struck) return i + 1;
    }
    return most;
}

static void kill_case(Count number) {
    enum { COMBINATIONS = POINT_COUNT * 3 * 3 * 2, STRIDE = 101 };  // the stride is coprime to them
    Dice dice = {number, 0};
    Way way = {.world = 1 + 2 * dice_below(&dice, 2)};
    char what[256] = "", from[32] = "?";
    size_t blows = 1;
    way.zero = dice_below(&dice, 3);
    way.every = 1 + dice_below(&dice, 7);
    way.near = dice_below(&dice, 2);
    if (way.near) way.near = 1 + dice_below(&dice, 3);
    way.far = dice_below(&dice, 3);
    if (way.far) way.far = 1 + dice_below(&dice, 9);
    way.async = dice_below(&dice, 2);
    way.keep = 2 * dice_below(&dice, 2);
    way.bandwidth = way.async && dice_below(&dice, 3) == 0 ? 4 : 0;  // a save then lasts roughly until the next one
    way.bits8 = dice_below(&dice, 3) == 0;
    size_t offload = dice_below(&dice, 8);
    way.offload = offload <= OFFLOAD_BOTH ? (int)offload : OFFLOAD_NOTHING;
    if (way.offload & OFFLOAD_OPTIMIZER) way.async = false;  // its saves are synchronous
    reference = &references[way.bits8];
    memset(&death, 0, sizeof death);
    if (number % 4 < 3) {
        bool struck = strike_at_point(what, &way, (number / 4 * 3 + number % 4) * STRIDE % COMBINATIONS, &dice);
        expect(struck, "no attempt came to the point");
    } else {
        blows = strike_at_random(what, &way, &dice);
    }
    death_note();
    if (run_well(&way, "--resume")) {
        check_restart(&way);
        check_complete(way.world);
        size_t left = checkpoints_left(run_path());
        expect(!way.keep || left <= way.keep, "%zu checkpoints are left", left);
        snprintf(from, sizeof from, "%zu", resumed_from());
    }
    conclude("case %llu: %s%s: step %zu, resumed from %s", number, what, blows > 1 ? ", and again" : "", death.logged,
             from);
    reference = references;
}

static void worker_enter(const char* name) {
    snprintf(place, sizeof place, "%.1000s/%s", root, name);
    need(mkdir(place, 0755) == 0 || errno == EEXIST, "%s", place);
}

// A worker takes cases until there have been enough kills.
static void worker_run(size_t number) {
    (void)number;
    while (__atomic_load_n(&shared->kills, __ATOMIC_RELAXED) < test.kills)
        kill_case(__atomic_add_fetch(&shared->cases, 1, __ATOMIC_RELAXED));
}

// Workers take cases from a list, each in its own directory.
static void workers_share(const char* name, size_t cases, void (*enter)(void), void (*run_one)(size_t)) {
    pid_t workers[64];
    size_t count = min_size(test.workers, cases);
    job_free();
    fflush(stdout);
    shared->taken = 0;
    for (size_t w = 0; w < count; w++) {
        workers[w] = fork();
        need(workers[w] >= 0, "a process");
        if (workers[w] != 0) continue;
        process_end_with_parent(getppid(), SIGKILL);
        worker_enter(text_of("%s_%zu", name, w));
        if (enter) enter();
        for (Count i; (i = __atomic_fetch_add(&shared->taken, 1, __ATOMIC_RELAXED)) < cases;) run_one(i);
        run_remove();
        fflush(stdout);
        _exit(0);
    }
    for (size_t w = 0; w < count; w++) {
        int status;
        expect(waitpid(workers[w], &status, 0) == workers[w] && status == 0, "worker %zu ended badly", w);
    }
    verdict("%s: %zu cases, shared among %zu workers", name, cases, count);
}

static void test_kills(void) {
    if (test.one_case) {
        kill_case(test.one_case);
        run_remove();
        return;
    }
    workers_share("kills", test.workers, NULL, worker_run);
    expect(shared->kills >= test.kills, "not as many as were asked for");
    verdict("%llu kills in %llu cases; %llu more runs ended before anyone struck", shared->kills, shared->cases,
            shared->quiet);
}

static void print_modes(void) {
    printf("\n%-20s %8s %9s %24s %8s %28s\n", "saves", "kills", "restarts", "steps lost: mean, most", "allowed",
           "back after: mean, most (ms)");
    for (size_t i = 0; i < 4; i++) {
        const Mode* m = &shared->modes[i];
        printf("%-20s %8llu %9llu %14.2f, %8llu %8llu %17.0f, %9.0f\n", MODE_NAMES[i], m->kills, m->restarts,
               (double)m->lost / fmax(1, (double)m->restarts), m->lost_most, m->most_allowed,
               1e-3 * (double)m->back_us / fmax(1, (double)m->backs), 1e-3 * (double)m->back_us_most);
    }
    printf("\n");
}

// ------------------------------------------------------------------------------------------------
// Damage

// The newer of two checkpoints of a run by two ranks; tested without and with the checkpoint of step 2 before it.
static const char* const SMALL_NAMES[] = {"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"};
enum { SMALL_FILES = COUNT_OF(SMALL_NAMES) };
static const Way SMALL_WAY = {.world = 2, .zero = 1, .every = 2, .small = true};
static const Way SMALL_ALONE = {.world = 1, .zero = 1, .every = 2, .small = true};

static struct {
    char directory[PATH_MAX], path[SMALL_FILES][PATH_MAX + 32];
    char* bytes[SMALL_FILES];
    size_t size[SMALL_FILES];
    uint64_t weights;
} small;

static void small_check_weights(void) { expect(weights_of(4) == small.weights, "other weights at the end"); }

// Restores the checkpoint, but with other bytes in one file.
static void small_damage(size_t file, const void* bytes, size_t size) {
    remove_tree(small.directory);
    remove_tree(text_of("%s.old", small.directory));
    remove_tree(text_of("%s.tmp", small.directory));
    need(mkdir(small.directory, 0755) == 0, "%s", small.directory);
    for (size_t f = 0; f < SMALL_FILES; f++) put_bytes(small.path[f], small.bytes[f], small.size[f]);
    put_bytes(small.path[file], bytes, size);
}

static void small_cut(size_t file, size_t size) { small_damage(file, small.bytes[file], size); }

// Runs the trainer on the damaged checkpoint: it reports it, falls back to step 2, and ends with the same weights.
static void small_resume(const Way* way, const char* what, size_t number) {
    if (harness_now.failures > 10) return;  // enough failures
    unsigned long long failures = harness_now.failures;
    if (run_well(way, "--resume")) {
        expect_said(small.directory);
        expect_said("trying the checkpoint before it");
        expect_resumed(2);
        small_check_weights();
    }
    if (harness_now.failures > failures) expect(false, "with %s %zu, %zu ranks", what, number, way->world);
}

// The same without the program, which is faster: a model must not load from the damaged checkpoint.
static bool small_loads(Model* model, Error* error) {
    Json manifest;
    RunRecord record;
    if (!record_open(&manifest, &record, small.directory, error)) return false;
    bool ok = checkpoint_load(&model->flat, &manifest, small.directory, false, error);
    json_free(&manifest);
    return ok;
}

static void flip_loaded(Model* model, size_t f, size_t stride) {
    Error error;
    size_t found = 0, flips = 0;
    small_cut(f, small.size[f]);
    for (size_t at = f % stride; at < small.size[f]; at += stride, flips++) {
        char byte = (char)(small.bytes[f][at] ^ (1 << at % 8));
        patch(small.path[f], at, &byte, 1);
        error.text[0] = 0;
        bool loads = small_loads(model, &error), named = strstr(error.text, small.directory) != NULL;
        expect(!loads, "byte %zu: the change is not found", at);
        expect(loads || named, "byte %zu: the message names no file: %s", at, error.text);
        patch(small.path[f], at, small.bytes[f] + at, 1);
        found += !loads && named;
    }
    expect(small_loads(model, &error), "it does not load any more: %s", error.text);
    verdict("%s: %zu of %zu changed bytes are found when it is loaded", SMALL_NAMES[f], found, flips);
}

static void flip_resumed(size_t f, size_t stride) {
    size_t flips = 0;
    for (size_t at = (f * 5) % stride; at < small.size[f]; at += stride, flips++) {
        char byte = (char)(small.bytes[f][at] ^ (1 << at % 8));
        small_cut(f, small.size[f]);
        patch(small.path[f], at, &byte, 1);
        small_resume(flips % 2 ? &SMALL_WAY : &SMALL_ALONE, "byte", at);
    }
    conclude("%s: the trainer passes over it and trains again, with %zu bytes changed in turn", SMALL_NAMES[f], flips);
}

static void damage_file(size_t f, bool all) {
    const char* name = SMALL_NAMES[f];
    const size_t sizes[] = {0, 1, 7, 8, 9, small.size[f] / 2, small.size[f] - 1};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        if (!all && i % 3 != f) continue;
        small_cut(f, sizes[i]);
        small_resume(i % 2 ? &SMALL_WAY : &SMALL_ALONE, "bytes left:", sizes[i]);
    }
    conclude("%s cut short", name);
    for (size_t world = 1; world <= 2; world++) {
        small_cut(f, 0);
        need(unlink(small.path[f]) == 0, "%s", small.path[f]);
        small_resume(world == 2 ? &SMALL_WAY : &SMALL_ALONE, "missing file", f);
    }
    conclude("%s missing", name);
    small_cut(f, 0);
    need(unlink(small.path[f]) == 0 && mkdir(small.path[f], 0755) == 0, "%s", small.path[f]);
    small_resume(&SMALL_ALONE, "directory in the place of file", f);
    conclude("a directory in the place of %s", name);
}

// A damaged checkpoint is replaced by one of the same step, and the run is killed between the two renames.
static void damage_and_kill(const char* point) {
    small_cut(1, small.size[1] - 1);
    run_killed(&SMALL_WAY, "--resume", kill_all(point, 4));
    if (run_well(&SMALL_ALONE, "--resume")) small_check_weights();
    expect(!directory_exists(text_of("%s.old", small.directory)), "%s.old is left behind", small.directory);
    expect(!directory_exists(text_of("%s.tmp", small.directory)), "%s.tmp is left behind", small.directory);
    conclude("killed at %s while a damaged checkpoint is replaced", point);
}

// The newest checkpoint, of step 4, is damaged: pruning must not keep it in place of step 2, from which the run
// resumes, or of what the run saves then.
static void damage_and_prune(size_t every) {
    Way way = {.world = 1, .zero = 1, .every = every, .keep = 1, .small = true};
    size_t left = every == 1 ? 3 : 2;
    Harm harm = kill_all("load", 4);
    if (every == 2)  // not before pruning has had time to run
        harm = (Harm){.signal = SIGKILL, .all = true, .lines = 1, .after_ms = 100,
                      .fault = "rank 0 step 4 at load do delay 2000"};
    run_remove();
    run_well(&SMALL_WAY, "");
    small_cut(1, small.size[1] - 1);
    run_killed(&way, "--resume", harm);
    expect_resumed(2);
    expect(last_saved() == (every == 1 ? 3 : 0), "it saved step %zu", last_saved());
    if (run_well(&way, "--resume")) {
        expect_resumed(left);
        small_check_weights();
    }
    conclude("step 4 is damaged, and the run is killed there again, with --ckpt-keep 1: it resumes from step %zu",
             left);
}

static void test_damage(void) {
    static const char* const points[] = {"write", "manifest", "rename", "clean"};
    bool all = test.kills >= 500, good = true;
    Json manifest;
    RunRecord record;
    Model model;
    ModelOptions options = {.B = 1, .T = 8, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    Error error = {"", false, false};
    run_remove();
    run_well(&SMALL_WAY, "");
    snprintf(small.directory, sizeof small.directory, "%s", step_path(4));
    for (size_t f = 0; f < SMALL_FILES; f++) {
        snprintf(small.path[f], sizeof small.path[f], "%s/%s", small.directory, SMALL_NAMES[f]);
        small.bytes[f] = text_read(small.path[f], &small.size[f]);
        good = good && small.size[f] > 0;
    }
    small.weights = good ? weights_of(4) : 0;
    good = good && record_open(&manifest, &record, small.directory, &error);
    if (good) json_free(&manifest);
    good = good && model_create(&model, &record.config, options, &error) && small_loads(&model, &error);
    expect(good, "a checkpoint that is whole does not load: %s", error.text);
    if (!conclude("a checkpoint by two ranks")) return;
    for (size_t f = 0; f < SMALL_FILES; f++) flip_loaded(&model, f, all ? 1 : 37);
    for (size_t f = 0; f < SMALL_FILES; f++) flip_resumed(f, all ? 37 : 997);
    for (size_t f = 0; f < SMALL_FILES; f++) damage_file(f, all);
    for (size_t i = 0; i < COUNT_OF(points); i++) damage_and_kill(points[i]);
    damage_and_prune(1);
    damage_and_prune(2);

    run_remove();
    run_well(&SMALL_WAY, "");
    small_cut(0, small.size[0] / 2);
    put_text(text_of("%s/manifest.json", step_path(2)), "{}");
    run(&SMALL_ALONE, "--resume", (Harm){0});
    expect(program_code(&job.ranks[0]) == 1, "it does not end with an error");
    expect_said("no checkpoint in");
    conclude("all checkpoints damaged: the trainer says so, and ends");
    model_free(&model);
    for (size_t f = 0; f < SMALL_FILES; f++) free(small.bytes[f]);
    run_remove();
}

// ------------------------------------------------------------------------------------------------
// Disk

typedef enum { FULL, SHORT_WRITES, READ_ONLY, DELETED, TIER_FULL } Trouble;

static const struct {
    const char* name;
    Trouble trouble;
    size_t size;          // of the disk (KB), or of the longest file (bytes)
    const char* message;  // in rank 0's error; "": any
} DISK_CASES[] = {
    {"a disk on which no checkpoint fits", FULL, 80, "No space left"},
    {"a disk on which two checkpoints fit", FULL, 280, "No space left"},
    {"writes that are cut short", SHORT_WRITES, 32768, "File too large"},
    {"a directory that becomes read-only", READ_ONLY, 0, "Permission denied"},
    {"a directory that is deleted", DELETED, 0, ""},
    {"a tier on a disk on which no checkpoint fits", TIER_FULL, 64, "No space left"},
};

static bool mounts;  // this process may mount disks

// Each case with one rank, synchronous, and with three, asynchronous.
static void disk_case(size_t index) {
    const char* name = DISK_CASES[index / 2].name;
    Trouble trouble = DISK_CASES[index / 2].trouble;
    Way way = {.world = index % 2 ? 3 : 1, .zero = index % 2 ? 2 : 0, .every = trouble == TIER_FULL ? 12 : 4,
               .async = index % 2};
    bool has_disk = trouble == FULL || trouble == TIER_FULL, acts = trouble == READ_ONLY || trouble == DELETED;
    char out[PATH_MAX], disk[PATH_MAX], tier[PATH_MAX + 64] = "";
    if (has_disk && !mounts) {
        skip(name, "this machine does not let the test mount a disk");
        return;
    }
    run_remove();
    snprintf(out, sizeof out, "%s", run_path());
    snprintf(disk, sizeof disk, "%.1000s/%s", place, trouble == TIER_FULL ? FAR : "run");
    if (has_disk) {
        const char* size = text_of("size=%zuk,mode=0755", DISK_CASES[index / 2].size);
        need(mkdir(disk, 0755) == 0 || errno == EEXIST, "%s", disk);
        need(machine_mount(disk, size), "%s", disk);
    }
    if (trouble == TIER_FULL) snprintf(tier, sizeof tier, "--ckpt-tier %s:3", disk);
    // Asynchronous saves keep the disk full for a while, and the log cannot grow during that time.
    bool slow_flush = trouble == FULL && way.async;
    Harm harm = {.fault = acts ? SLOWLY : slow_flush ? "rank 0 step 1 at flush do delay 50" : NULL,
                 .as_nobody = trouble == READ_ONLY && geteuid() == 0,
                 .file_limit = trouble == SHORT_WRITES ? DISK_CASES[index / 2].size : 0};
    if (harm.as_nobody) need(mkdir(out, 0755) == 0 && chown(out, 65534, 65534) == 0, "%s", out);
    job_start(way.world, arguments_of(&way, tier), harm);
    while (acts && !directory_exists(step_path(4)) && now_ms() < job.ranks[0].began_ms + LIMIT_MS) sleep_ms(1);
    if (trouble == READ_ONLY) chmod(out, 0555);
    if (trouble == DELETED) remove_tree(out);
    job_wait();
    bool good = job_good();
    expect_said(DISK_CASES[index / 2].message);
    expect(good || strncmp(said(1), "train: ", 7) == 0, "it fails without a sentence");
    expect(!good || trouble == DELETED || trouble == TIER_FULL,
           "it says that all is well, though its last step cannot be saved");
    if (good) check_weights();
    size_t last = log_read().last;
    expect(trouble == DELETED || last == STEPS, "training did not go on: it ended after step %zu", last);
    expect(!good || said(1)[0] != 0, "it says nothing of the trouble");
    check_whole(out);
    expect(trouble != READ_ONLY || directory_exists(step_path(4)), "the first checkpoint is gone");

    // The disk works again: the run resumes.
    if (trouble == FULL) need(machine_remount(disk, "size=64m"), "%s", disk);
    if (trouble == READ_ONLY) chmod(out, 0755);
    run(&way, text_of("%s --resume", tier), (Harm){.as_nobody = harm.as_nobody});
    if (expect(job_good(), "it does not resume")) {
        if (trouble == DELETED) check_weights();  // the log is gone
        else check_complete(way.world);
    }
    if (has_disk) machine_unmount(disk);
    run_remove();
    conclude("%s: %s, %s", name, way_text(&way), good ? "runs to its end" : "ends with a sentence, and resumes");
}

// In a process of its own, with private mounts.
static void disk_enter(void) {
    mounts = machine_own_mounts();
    need(chmod(place, 0777) == 0, "%s", place);
}

static void test_disk(void) { workers_share("disk", 2 * COUNT_OF(DISK_CASES), disk_enter, disk_case); }

// ------------------------------------------------------------------------------------------------
// A disk that fails: the kernel returns 'Input/output error' for calls of the trainer

#define SAVES_FAIL "/step_00000008"  // paths with this are the first that the disk fails for
#define FAIL_STEP ((size_t)8)        // its step

enum { DISK_CHANGES = DISK_WRITE | DISK_FLUSH | DISK_RENAME | DISK_OPEN | DISK_MAKE | DISK_REMOVE | DISK_CUT };

static const struct { const char* name; unsigned calls; const char* inside; } FAILING_SAVES[] = {
    {"flushes", DISK_FLUSH, ".safetensors"},
    {"writes", DISK_WRITE, "/step_"},
    {"renames", DISK_RENAME, "/step_"},
    {"all that changes --out", DISK_CHANGES, "/run"},
};

// A run that ended with an error ended with a message that gives the reason.
static void check_sentence(void) {
    const char *last = said(1), *reason = strerror(EIO);
    for (const char* at = last; (at = strchr(at, '\n')) != NULL && at[1]; last = ++at) continue;
    expect(strncmp(last, "train: ", 7) == 0 && strstr(last, reason), "it ends without a sentence that says %s", reason);
}

// Every save after the first fails: one message for each, until the end. 1 rank or 3, sync or async.
static void failing_save(size_t kind, size_t index) {
    Way way = {.world = index < 2 ? 1 : 3, .zero = index < 2 ? 0 : 2, .every = 4, .async = index % 2};
    size_t rank = index < 2 ? 0 : index - 1, told = 0, last_good = FAIL_STEP - way.every;
    BadDisk disk = {.calls = FAILING_SAVES[kind].calls, .error = EIO, .inside = FAILING_SAVES[kind].inside,
                    .after = SAVES_FAIL, .length = UINT64_MAX};
    bool log_fails = rank == 0 && strcmp(disk.inside, "/step_") != 0;
    char* end;
    run_remove();
    // Another rank, still writing, learns of the failure first: the reason must not get lost.
    const char* slow = text_of("rank 1 step 1 at write do delay %d", LLMTRAIN_PIECE(50, 1));  // each chunk
    run(&way, "", (Harm){.disk = &disk, .disk_rank = rank, .fault = way.async ? slow : NULL});
    expect(program_code(&job.ranks[0]) == 1, "it should end with exit code 1");
    check_sentence();
    for (char* line = job.ranks[0].text[1]; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        size_t step = strstr(line, "train: step ") == line ? (size_t)strtoull(line + 12, NULL, 10) : 0;
        bool of_log = log_fails && strstr(line, ".jsonl"), last = end[1] == 0;
        told += step > 0;
        bool due = step == last_good + told * way.every || step == STEPS;  // the last one is tried again at the end
        expect(step > 0 ? due : of_log || last, "unexpected: %s", line);
        expect(strstr(line, run_path()) && strstr(line, strerror(EIO)), "no path, or no reason: %s", line);
    }
    expect(told == (STEPS - 1 - last_good) / way.every + 1, "%zu failed saves are told", told);
    if (!log_fails) check_log(way.world);
    check_whole(run_path());
    resume_completes(&way, "", last_good);
    conclude("%s fail: rank %zu of %zu, %s: trains to the end, and resumes from step %zu", FAILING_SAVES[kind].name,
             rank, way.world, way.async ? "async" : "sync", last_good);
}

// The disk fails for the log for a while.
static void failing_log(size_t index) {
    Way way = {.world = 1, .every = 4, .async = index};
    BadDisk disk = {.calls = DISK_WRITE, .error = EIO, .inside = "metrics.jsonl", .after = SAVES_FAIL, .length = 10};
    run_remove();
    run(&way, "", (Harm){.disk = &disk});
    expect(job_good() && disk.failed == disk.length, "%zu writes failed", (size_t)disk.failed);
    expect_said(strerror(EIO));
    expect_said("metrics.jsonl");
    check_complete(way.world);
    conclude("the log cannot be written for a while, %s: no line is lost", way.async ? "async" : "sync");
}

// Network file systems: Lustre has no locks unless it is mounted with them, and NFS no longer knows a file that another
// machine has deleted.
static void failing_network(size_t index) {
    static const struct { BadDisk disk; const char* said; } cases[] = {
        {{.calls = DISK_LOCK, .error = ENOSYS, .inside = "metrics.jsonl", .length = UINT64_MAX},
         "does not support locks"},
        {{.calls = DISK_LOOK, .error = ESTALE, .inside = "metrics.jsonl", .after = "step_00000008", .length = 1},
         "was deleted"}};
    Way way = {.world = 1, .every = 4};
    BadDisk disk = cases[index].disk;
    run_remove();
    run(&way, "", (Harm){.disk = &disk});
    expect(job_good() && disk.failed > 0, "%zu calls failed", (size_t)disk.failed);
    expect_said(cases[index].said);
    check_complete(way.world);
    conclude("a log that %s: the run is complete", cases[index].said);
}

static char half[PATH_MAX];  // a killed run, with checkpoints of steps 10 and 20
static const Way HALF_WAY = {.world = 1, .every = 10};
static const Way HALF_KEEP_1 = {.world = 1, .every = 10, .far = 7, .keep = 1};

static void half_restore(void) {
    run_remove();
    copy_tree(half, run_path());
}

// What cannot be read is reported, or ends the run; a run never starts over in place of an existing one.
static const struct {
    const char* name;
    unsigned calls;
    const char* inside;
    size_t world, rank, from;  // from: the step; ANY_STEP: the run ends
    int error;
} FAILING_LOADS[] = {
    {"the newest checkpoint", DISK_READ, "/step_00000020", 1, 0, 10, EIO},
    {"the newest checkpoint, by one of three ranks", DISK_READ, "/step_00000020/rank_", 3, 1, 10, EIO},
    {"the files of the newest checkpoint cannot be opened", DISK_OPEN, "/step_00000020/", 1, 0, 10, EIO},
    {"the manifest of the newest, for want of descriptors", DISK_OPEN, "/step_00000020/manifest", 1, 0, ANY_STEP,
     EMFILE},
    {"its files, for want of descriptors of one of three ranks", DISK_OPEN, "/step_00000020/rank_", 3, 1, ANY_STEP,
     EMFILE},
    {"its files, for want of memory", DISK_READ, "/step_00000020/rank_", 1, 0, ANY_STEP, ENOMEM},
    {"any checkpoint", DISK_READ, "/step_", 1, 0, ANY_STEP, EIO},
    {"the list of checkpoints", DISK_LIST, "/run", 1, 0, ANY_STEP, EIO},
    {"the directory of the run", DISK_OPEN, "/run", 3, 0, ANY_STEP, EIO},
    {"the log", DISK_READ, "metrics.jsonl", 1, 0, ANY_STEP, EIO},
};

static void failing_load(size_t i) {
    Way way = {.world = FAILING_LOADS[i].world, .every = 10};
    BadDisk disk = {.calls = FAILING_LOADS[i].calls, .error = FAILING_LOADS[i].error,
                    .inside = FAILING_LOADS[i].inside, .length = UINT64_MAX};
    half_restore();
    uint64_t log = log_read().hash;
    run(&way, "--resume", (Harm){.disk = &disk, .disk_rank = FAILING_LOADS[i].rank});
    bool good = job_good();
    expect(good == (FAILING_LOADS[i].from != ANY_STEP), good ? "it trains" : "it does not train");
    if (good) expect_resumed(FAILING_LOADS[i].from);
    expect_said(strerror(disk.error));
    expect_said(disk.inside);
    if (good) check_weights();
    else expect(log_read().hash == log, "it has changed the log");
    check_whole(run_path());
    if (!good) resume_completes(&HALF_WAY, "", 20);
    conclude("cannot be read: %s: %s", FAILING_LOADS[i].name,
             good ? "the one before it is used" : "it ends with a sentence");
}

// Every call of a run on --out fails in turn, once.
static uint64_t calls_made[2];  // by a new run, and by a resumed one

static void run_on(BadDisk* disk, bool resumes) {
    run_remove();
    if (resumes) half_restore();
    run(&HALF_KEEP_1, resumes ? "--resume" : "", (Harm){.disk = disk});
}

static void count_calls(bool resumes) {
    BadDisk disk = {.calls = DISK_ALL, .error = EIO, .inside = "/run"};
    run_on(&disk, resumes);
    expect(job_good(), "a run that only counts its calls fails");
    check_complete(1);
    calls_made[resumes] = disk.met;
    conclude("a run that %s touches its directory %zu times", resumes ? "resumes" : "begins", (size_t)disk.met);
}

static void one_call_fails(bool resumes, uint64_t number) {
    BadDisk disk = {.calls = DISK_ALL, .error = EIO, .inside = "/run", .first = number, .length = 1};
    run_on(&disk, resumes);
    // Failed writes must be reported; pruning may fail until the next save.
    bool good = job_good(), needed = (disk.kind & DISK_CHANGES) && disk.kind != DISK_REMOVE &&
                                     (strstr(disk.path, ".tmp") || strstr(disk.path, "metrics.jsonl"));
    size_t saved = max_size(last_saved(), resumes ? 20 : 0);
    expect(disk.failed == 1, "no call failed");
    if (good) check_weights();
    if (good) check_log(1);
    if (good && needed) expect_said(strerror(EIO));
    if (!good) check_sentence();
    if (resumes && good && resumed_from() != 20) expect_said("trying the checkpoint before it");
    check_whole(run_path());
    if (run_well(&HALF_KEEP_1, "--resume")) {
        size_t from = resumed_from();
        expect(from >= saved && from <= STEPS, "then it resumed from step %zu, though %zu was saved", from, saved);
        check_complete(1);
    }
    const char* path = strstr(disk.path, "/run");
    conclude("call %zu of a run that %s, a %s of %s: %s", (size_t)number, resumes ? "resumes" : "begins",
             disk_kind_name(disk.kind), path ? path + 1 : "?",
             good ? "it runs to its end" : "it ends with a sentence");
}

// All reads and writes transfer half of the bytes requested.
static void halved(size_t index) {
    Way way = {.world = index ? 3 : 1, .zero = index, .every = 5, .near = 3, .far = 4, .async = index};
    BadDisk disk = {.calls = DISK_READ | DISK_WRITE, .inside = "/run", .length = UINT64_MAX};
    Harm harm = kill_all("load", 18);
    harm.disk = &disk;
    harm.all_disks = true;
    run_remove();
    run_killed(&way, "", harm);
    uint64_t cut = disk.failed;
    check_whole(run_path());
    run(&way, "--resume", (Harm){.disk = &disk, .all_disks = true});
    size_t from = resumed_from();
    expect(job_good() && from >= 10 && from != ANY_STEP, "it resumed from step %zu", from);
    expect(cut >= 100 && disk.failed >= cut + 100, "only %zu, %zu calls were cut", (size_t)cut, (size_t)disk.failed);
    check_complete(way.world);
    conclude("%zu reads and writes did half of what they were asked: %s", (size_t)disk.failed, way_text(&way));
}

enum { PARTS = 7, SAMPLED_CALLS = 8 };

// With 500 kills or more all cases; otherwise each kind of save in two of its four variants, and some calls.
static bool all_fail(void) { return test.kills >= 500; }

static size_t calls_of(bool resumes) {
    return min_size(all_fail() ? SIZE_MAX : SAMPLED_CALLS, (size_t)calls_made[resumes]);
}

static size_t failing_count(size_t part) {
    const size_t saves = COUNT_OF(FAILING_SAVES) * (all_fail() ? 4 : 2);
    const size_t counts[PARTS] = {saves, COUNT_OF(FAILING_LOADS), 2, 2, 2, calls_of(false), calls_of(true)};
    return counts[part];
}

static void failing_case(size_t i) {
    size_t part = 0;
    while (i >= failing_count(part)) i -= failing_count(part++);
    bool resumes = part == 6;
    if (part == 0) failing_save(i / (all_fail() ? 4 : 2), all_fail() ? i % 4 : 2 * (i % 2) + i / 2 % 2);
    else if (part == 1) failing_load(i);
    else if (part == 2) failing_log(i);
    else if (part == 3) halved(i);
    else if (part == 4) failing_network(i);
    else one_call_fails(resumes, (i * calls_made[resumes] / calls_of(resumes) + test.seed) % calls_made[resumes]);
}

static void test_failing(void) {
    if (!bad_disk_possible()) {
        skip("a disk that fails", "this machine does not let the test answer system calls (seccomp)");
        return;
    }
    run_remove();
    snprintf(half, sizeof half, "%.1000s/half", root);
    run_killed(&HALF_WAY, "", kill_all("load", 23));
    need(rename(run_path(), half) == 0, "%s", half);
    for (int resumes = 0; resumes < 2; resumes++) count_calls(resumes);
    size_t cases = 0;
    for (size_t part = 0; part < PARTS; part++) cases += failing_count(part);
    workers_share("failing", cases, NULL, failing_case);
    remove_tree(half);
}

// ------------------------------------------------------------------------------------------------
// The order of a save

// What a run asked of the disk, in order, a line for each call: its kind, and the path within the test's directory,
// without the random end of temporary names; for a flush of the log, how many lines are in it.
static char disk_order[1 << 14];

static void note_call(unsigned kind, const char* path) {
    size_t used = strlen(disk_order), lines = 0;
    const char* end = strstr(path, ".tmp-");
    if (strstr(path, "metrics.jsonl")) {
        char* text = text_read(path, NULL);
        lines = count_in(text, "\n");
        free(text);
    }
    path = strstr(path, place) + strlen(place);
    path = *path ? path + 1 : ".";
    snprintf(disk_order + used, sizeof disk_order - used, "%s %.*s%s\n", disk_kind_name(kind),
             end ? (int)(end - path) + 5 : (int)strlen(path), path, lines ? text_of(" %zu", lines) : "");
}

static void run_noted(const Way* way, const char* more) {
    BadDisk disk = {.calls = DISK_FLUSH | DISK_RENAME | DISK_MAKE, .error = EIO, .inside = place, .first = UINT64_MAX,
                    .seen = note_call};
    run_remove();
    disk_order[0] = 0;
    run(way, more, (Harm){.disk = &disk, .all_disks = true});
    expect(job_good(), "it fails");
}

// A file within a directory is flushed under a temporary name, gets its own, and then the directory is flushed.
#define FILE_ORDER(directory, file) \
    "flush " directory "/" file ".tmp-\nrename " directory "/" file "\nflush " directory "\n"

// First the log, up to this step; then the files, the manifest last; then the directory gets its name.
#define SAVE_ORDER(step, frozen)                                                                                      \
    "flush run/metrics.jsonl " step "\nmkdir run/step_0000000" step ".tmp\nflush run\n" frozen                        \
    FILE_ORDER("run/step_0000000" step ".tmp", "rank_00000.safetensors")                                              \
    FILE_ORDER("run/step_0000000" step ".tmp", "manifest.json")                                                       \
    "flush run/step_0000000" step ".tmp\nrename run/step_0000000" step "\nflush run\n"

#define LAST_FLUSH "flush run/metrics.jsonl 4\n"  // with what the last validation has added

// An older checkpoint is renamed, and removed, after the new one has its name for certain.
static const struct { const char *what, *flags; bool async; size_t keep; const char* order; } ORDERS[] = {
    {"sync", "", false, 0, "mkdir run\nflush .\n" SAVE_ORDER("2", "") SAVE_ORDER("4", "") LAST_FLUSH},
    {"async", "", true, 0, "mkdir run\nflush .\n" SAVE_ORDER("2", "") SAVE_ORDER("4", "") LAST_FLUSH},
    {"the weights but one norm are frozen, and written twice", "--train final_norm*", true, 0,
     "mkdir run\nflush .\n" SAVE_ORDER("2", FILE_ORDER("run/step_00000002.tmp", "frozen.safetensors"))
         SAVE_ORDER("4", FILE_ORDER("run/step_00000004.tmp", "frozen.safetensors")) LAST_FLUSH},
    {"one is kept", "", false, 1,
     "mkdir run\nflush .\n" SAVE_ORDER("2", "") SAVE_ORDER("4", "") "rename run/step_00000002.old\nflush run\n"
     "flush run\n" LAST_FLUSH},
};

// Where the words are in the order, from `from` on; its end if they are not.
static const char* order_find(const char* from, const char* words) {
    const char* at = strstr(from, words);
    return expect(at != NULL, "there is no '%s'", words) ? at : from + strlen(from);
}

// Two ranks write at the same time: the manifest follows what both have flushed.
static void order_of_ranks(bool async) {
    run_noted(&(Way){.world = 2, .zero = 1, .every = 2, .async = async, .small = true}, "");
    for (int step = 2; step <= 4; step += 2) {
        const char *directory = text_of("run/step_%08d.tmp", step), *flushed = text_of("flush %s\n", directory);
        const char* manifest = order_find(disk_order, text_of("flush %s/manifest.json.tmp-\n", directory));
        const char* log = order_find(disk_order, text_of("flush run/metrics.jsonl %d\n", step));
        expect(log < manifest, "step %d: the log is not flushed before the manifest", step);
        for (int rank = 0; rank < 2; rank++) {
            const char* part = text_of("%s/rank_%05d.safetensors", directory, rank);
            const char* named = order_find(disk_order, text_of("rename %s\n", part));
            expect(order_find(disk_order, text_of("flush %s.tmp-\n", part)) < named &&
                       order_find(named, flushed) < manifest,
                   "step %d: the manifest comes before the file of rank %d", step, rank);
        }
        const char* named = order_find(manifest, text_of("rename run/step_%08d\n", step));
        expect(order_find(order_find(manifest, text_of("rename %s/manifest.json\n", directory)), flushed) < named &&
                   order_find(named, "flush run\n") > named,
               "step %d: the directory has its name before it is complete", step);
    }
    conclude("the order of a save, 2 ranks, %s: log, parts, manifest, directory", async ? "async" : "sync");
}

static void test_order(void) {
    if (!bad_disk_possible()) {
        skip("the order of a save", "this machine does not let the test see system calls (seccomp)");
        return;
    }
    for (size_t i = 0; i < COUNT_OF(ORDERS); i++) {
        run_noted(&(Way){.world = 1, .every = 2, .async = ORDERS[i].async, .keep = ORDERS[i].keep, .small = true},
                  ORDERS[i].flags);
        // In memory frozen weights have one file.
        bool once = strstr(ORDERS[i].order, "frozen") && strncmp(run_path(), SYSTEM_MEMORY_FOLDER "/", 9) == 0;
        const char* wanted = !once ? ORDERS[i].order : "mkdir run\nflush .\n"
            SAVE_ORDER("2", FILE_ORDER("run/step_00000002.tmp", "frozen.safetensors")) SAVE_ORDER("4", "") LAST_FLUSH;
        expect(strcmp(disk_order, wanted) == 0, "the order is\n%s", disk_order);
        conclude("the order of a save, %s: log, parts, manifest, directory", ORDERS[i].what);
    }
    for (int async = 0; async < 2; async++) order_of_ranks(async);
    run_remove();
}

// ------------------------------------------------------------------------------------------------
// A clock that is set back

// Sets the clock back an hour at every rename, and once far forward; renamed files get these times, too.
static const char CLOCK_SOURCE[] =
    "#define _GNU_SOURCE\n"
    "#include <fcntl.h>\n"
    "#include <sys/stat.h>\n"
    "#include <sys/syscall.h>\n"
    "#include <sys/time.h>\n"
    "#include <time.h>\n"
    "#include <unistd.h>\n"
    "static int renames;\n"
    "int clock_gettime(clockid_t clock, struct timespec* t) {\n"
    "    long result = syscall(SYS_clock_gettime, clock, t);\n"
    "    int n = __atomic_load_n(&renames, __ATOMIC_RELAXED);\n"
    "    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) t->tv_sec += (n < 24 ? -n : 1000 - n) * 3600;\n"
    "    return (int)result;\n"
    "}\n"
    "int gettimeofday(struct timeval* t, void* zone) {\n"
    "    struct timespec now;\n"
    "    (void)zone;\n"
    "    clock_gettime(CLOCK_REALTIME, &now);\n"
    "    t->tv_sec = now.tv_sec;\n"
    "    t->tv_usec = now.tv_nsec / 1000;\n"
    "    return 0;\n"
    "}\n"
    "time_t time(time_t* t) {\n"
    "    struct timespec now;\n"
    "    clock_gettime(CLOCK_REALTIME, &now);\n"
    "    if (t) *t = now.tv_sec;\n"
    "    return now.tv_sec;\n"
    "}\n"
    "int rename(const char* from, const char* to) {\n"
    "    struct timespec times[2];\n"
    "    int result = renameat(AT_FDCWD, from, AT_FDCWD, to);\n"
    "    __atomic_fetch_add(&renames, 1, __ATOMIC_RELAXED);\n"
    "    clock_gettime(CLOCK_REALTIME, &times[0]);\n"
    "    times[1] = times[0];\n"
    "    if (result == 0) utimensat(AT_FDCWD, to, times, 0);\n"
    "    return result;\n"
    "}\n";

// The checkpoints with the highest step and the latest time in a directory, and how many there are.
static size_t newest_of(const char* out, size_t* by_step, size_t* by_time) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    time_t latest = 0;
    *by_step = *by_time = 0;
    while (checkpoint_before(&step, out, step)) {
        struct stat status;
        if (stat(text_of("%s/step_%08llu", out, (unsigned long long)step), &status) != 0) continue;
        if (count++ == 0) *by_step = (size_t)step;
        if (count > 1 && status.st_mtime <= latest) continue;
        *by_time = (size_t)step;
        latest = status.st_mtime;
    }
    return count;
}

// Saves by the minute and in a tier, prunes, and is killed, while the clock jumps back and forth.
static void clock_case(size_t index) {
    enum { KEEP = 3, SAVES = 5 };
    Way way = {.world = index ? 3 : 1, .zero = index, .often = "0.001min", .near = 4, .async = index, .keep = KEEP};
    // Slow steps leave time for the earlier saves before the last one, even on a slow machine.
    Harm harm = {.signal = SIGKILL, .all = true, .lines = SAVES, .line = "saved ",
                 .fault = "rank 0 step 1 at update do delay 300"};
    size_t by_step, near_step, ignored;
    struct stat newest;
    run_remove();
    run_killed(&way, "", harm);
    size_t saves = times_said("\nsaved "), saved = last_saved();
    expect(saves >= SAVES, "it saved only %zu times", saves);
    size_t left = newest_of(run_path(), &by_step, &ignored);
    newest_of(tier_path(near_path()), &near_step, &ignored);
    expect(by_step >= saved && left >= KEEP && left <= KEEP + 1,
           "of %zu saves, the last of step %zu, %zu are left, up to step %zu", saves, saved, left, by_step);
    bool there = stat(step_path(by_step), &newest) == 0;
    expect(there && fabs(difftime(newest.st_mtime, time(NULL))) >= 1800, "the clock was not set");
    check_whole(run_path());
    resume_completes(&way, "", max_size(by_step, near_step));
    conclude("the clock goes back and forth: %s: %zu saves, resumed from the newest", way_text(&way), saves);
}

// The oldest checkpoint has the latest time.
static void old_looks_new(void) {
    static const char* const names[] = {"", "/manifest.json", "/rank_00000.safetensors"};
    Way way = {.world = 1, .every = 4};
    size_t by_step, by_time;
    run_remove();
    run_killed(&way, "", kill_all("load", 18));
    for (size_t step = 4; step <= 16; step += 4) {
        const struct timespec time = {(time_t)(2000000000 - 100000000 * step), 0}, times[2] = {time, time};
        for (size_t f = 0; f < COUNT_OF(names); f++)
            need(utimensat(AT_FDCWD, text_of("%s%s", step_path(step), names[f]), times, 0) == 0, "a time");
    }
    newest_of(run_path(), &by_step, &by_time);
    expect(by_step == 16 && by_time == 4, "steps %zu and %zu are the newest", by_step, by_time);
    resume_completes(&way, "--ckpt-keep 2", 16);
    expect(newest_of(run_path(), &by_step, &by_time) == 2 && by_step == STEPS, "it kept others than the newest");
    conclude("the oldest checkpoint has the newest time: resumed from the highest step, and kept the highest two");
}

static void clock_run(size_t i) {
    if (i == 2) old_looks_new();
    else clock_case(i);
}

static void test_clock(void) {
    static char library[PATH_MAX + 16];
    const char* compiler = getenv("CC");
    snprintf(library, sizeof library, "%s/clock.so", root);
    put_text(text_of("%s/clock.c", root), CLOCK_SOURCE);
    bool compiles = system(text_of("%s -shared -fPIC -O1 -o '%s' '%s/clock.c' > /dev/null 2>&1",
                                   compiler && compiler[0] ? compiler : "cc", library, root)) == 0;
    bool works = compiles && system(text_of("LD_PRELOAD='%s' '%s' --help > /dev/null 2>&1", library, test.train)) == 0;
    if (!works) {
        skip("a clock that is set back",
             compiles ? "the program wants its own libraries first, as with the address sanitizer"
                      : "there is no C compiler; set CC");
        old_looks_new();
        return;
    }
    preload = library;
    workers_share("clock", 3, NULL, clock_run);
    preload = NULL;
}

// ------------------------------------------------------------------------------------------------
// Other numbers of ranks; pruning

static void test_reshard(void) {
    static const struct { size_t world, zero, end; } legs[] = {{3, 2, 8}, {2, 1, 16}, {1, 0, 24}, {4, 2, STEPS}};
    run_remove();
    for (size_t i = 0; i < COUNT_OF(legs); i++) {
        Way way = {.world = legs[i].world, .zero = legs[i].zero, .every = 8};
        if (legs[i].end < STEPS) run_killed(&way, i ? "--resume" : "", kill_all("load", legs[i].end + 1));
        else run_well(&way, "--resume");
        if (i > 0) expect_resumed(legs[i - 1].end);
        expect(weights_of(legs[i].end) == reference->weights[legs[i].end], "other tensors than one rank's");
        conclude("%zu ranks, --zero %zu, until step %zu: the tensors of one rank that nobody killed", way.world,
                 way.zero, legs[i].end);
    }
    RunLog log = log_read();
    for (size_t i = 0; i < STEPS; i++) {
        double expected = reference->logs[1].losses[i];
        expect(log.losses[i] == expected, "loss of step %zu: %.9g, of one rank %.9g", i + 1,
               log.losses[i], expected);
    }
    verdict("the losses of 3, 2, 1 and 4 ranks in turn are those of one");
    run_remove();
}

// A resumed run that saves half as often keeps the existing checkpoints.
static void prune_less_often(void) {
    static const size_t steps[] = {4, 8, 12, 16, 24, STEPS};
    Way way = {.world = 1, .every = 4};
    run_remove();
    run_killed(&way, "", kill_all("load", 14));
    way.every = 8;
    way.async = true;
    resume_completes(&way, "", ANY_STEP);
    for (size_t i = 0; i < COUNT_OF(steps); i++)
        expect(weights_of(steps[i]) == reference->weights[steps[i]], "step %zu is not there", steps[i]);
    size_t left = checkpoints_left(run_path());
    expect(left == COUNT_OF(steps), "%zu checkpoints are left", left);
    conclude("saves every 4 steps, then every 8: all whole ones stay");
}

// Killed while an old checkpoint is removed, which takes a while because of the many other files in it.
static void test_prune(void) {
    enum { FILES = 3000 };
    Way way = {.world = 1, .every = 4, .keep = 1};
    char old[PATH_MAX];
    prune_less_often();
    run_remove();
    snprintf(old, sizeof old, "%s", step_path(4));
    job_start(1, arguments_of(&way, ""), (Harm){.fault = SLOWLY});
    double until = now_ms() + LIMIT_MS;
    while (!directory_exists(old) && now_ms() < until) sleep_ms(1);
    for (size_t i = 0; i < FILES; i++) {
        int file = open(text_of("%s/%zu", old, i), O_WRONLY | O_CREAT, 0666);
        if (file >= 0) close(file);
    }
    for (bool there = true, whole = true; there && whole && now_ms() < until;) {
        whole = file_exists(text_of("%s/manifest.json", old)) && file_exists(text_of("%s/rank_00000.safetensors", old));
        there = directory_exists(old);
    }
    kill(job.ranks[0].pid, SIGKILL);
    job_wait();
    check_whole(run_path());
    resume_completes(&way, "", ANY_STEP);
    run_remove();
    conclude("killed while an old checkpoint is removed: there is none that is not whole");
}

// ------------------------------------------------------------------------------------------------
// Rewinds
//
// Every skipped step counts as a divergence; each run has several.

#define REWINDS "--diverged-after 1 --rewind 99 --rewind-lr 0.99"
enum { REWOUND_MAX = 32, REWIND_POINTS = 4, REWIND_KILLS = 8, REWIND_STOPS = 14 };  // of each way, at most

static const Way REWIND_WAYS[] = {
    {.world = 1, .every = 2, .keep = 6, .shallow = true},
    {.world = 3, .zero = 2, .every = 2, .near = 1, .async = true, .keep = 6, .shallow = true}};
enum { REWIND_WAYS_COUNT = COUNT_OF(REWIND_WAYS) };

static struct {
    uint64_t weights, log;
    size_t steps[REWOUND_MAX], count;  // in which the run diverged
} rewound[REWIND_WAYS_COUNT];          // results of a run of each way that nobody kills

static void rewind_reference(size_t way) {
    const char mark[] = "\"event\": \"rewound\",\"step\": ";
    run_remove();
    rewound[way].count = 0;
    if (run_well(&REWIND_WAYS[way], REWINDS)) {
        char* events = text_read(text_of("%s/events.jsonl", run_path()), NULL);
        for (const char* at = events; (at = strstr(at, mark)) != NULL && rewound[way].count < REWOUND_MAX; at++)
            rewound[way].steps[rewound[way].count++] = (size_t)strtoull(at + sizeof mark - 1, NULL, 10);
        free(events);
        rewound[way].weights = weights_of(STEPS);
        rewound[way].log = log_read().hash;
        expect(rewound[way].count >= 2 && rewound[way].weights != 0, "it rewound %zu times", rewound[way].count);
    }
    conclude("%zu ranks: a run that diverges goes back %zu times, and ends", REWIND_WAYS[way].world,
             rewound[way].count);
}

static void rewind_case(size_t i) {
    size_t number = i / REWIND_WAYS_COUNT, way_number = i % REWIND_WAYS_COUNT;
    const Way* way = &REWIND_WAYS[way_number];
    Dice dice = {i, 0};
    // On SIGTERM it saves a checkpoint, which a rewind must not use.
    bool stops = number >= REWIND_KILLS;
    Harm harm = harm_at_random(&dice, way, stops ? SIGTERM : SIGKILL, stops || number % 2 == 0);
    char what[256];
    if (number < REWIND_POINTS) {  // the later points of a run are passed after another rewind
        harm.point = number / 2 % 2 ? "rewind" : "forget";
        harm.step = rewound[way_number].steps[dice_below(&dice, rewound[way_number].count)];
    }
    describe(what, way, &harm);
    run_remove();
    run(way, REWINDS, harm);
    expect(!harm.point || job.struck, "it did not come to the point");
    if (job.struck) count_add(&shared->kills, 1);
    if (run_well(way, REWINDS " --resume")) {
        expect(weights_of(STEPS) == rewound[way_number].weights, "other weights than the run's that nobody killed");
        expect(log_read().hash == rewound[way_number].log, "another log than the run's that nobody killed");
    }
    conclude("rewinding: %s", what);
}

// After a resume that saves less often, a rewind uses a checkpoint from before the kill.
static void rewind_other_cadence(void) {
    Way way = REWIND_WAYS[0];
    run_remove();
    run_killed(&way, REWINDS, kill_all("load", rewound[0].steps[0]));
    way.every = STEPS - 1;
    if (run_well(&way, REWINDS " --resume")) {
        const char* went = strstr(said(0), text_of("went back from step %zu to ", rewound[0].steps[0]));
        bool to_checkpoint = went && strstr(went, " to 0: ") != strstr(went, " to ");
        expect(to_checkpoint, "it did not go back to a checkpoint");
    }
    conclude("rewinding with another --ckpt-every");
}

static void test_rewind(void) {
    for (size_t way = 0; way < REWIND_WAYS_COUNT; way++) rewind_reference(way);
    workers_share("rewind", REWIND_STOPS * REWIND_WAYS_COUNT, NULL, rewind_case);
    rewind_other_cadence();
}

// ------------------------------------------------------------------------------------------------
// Tiers

// Killed in step 8, when the tier in memory has the checkpoints of steps 4 and 6, and that of step 2 if the thread that
// removes it was killed first; what then happens to them decides which step the run resumes from.
static void tier_then(const char* what, Way way, const char* damaged, bool lost, size_t expected) {
    run_remove();
    run_killed(&way, "", kill_all("load", 8));
    size_t left = checkpoints_left(tier_path(near_path()));
    expect(left == 2 || left == 3, "%zu checkpoints are in memory", left);
    for (int step = 4; step <= 6; step += 2) {
        const char* manifest = text_of("%s/step_%08d/manifest.json", tier_path(near_path()), step);
        expect(file_exists(manifest), "there is no %s", manifest);
    }
    if (damaged)
        expect(truncate(text_of("%s/%s", tier_path(near_path()), damaged), 100) == 0, "there is no %s", damaged);
    if (lost) remove_tree(near_path());
    resume_completes(&way, "", expected);
    if (damaged) expect_said(damaged);
    run_remove();
    conclude("a tier's checkpoints %s", what);
}

// What is damaged in --out, or was pruned there, proves nothing against a tier, which has the newest that is left.
static void tier_left(const char* what, size_t keep, size_t near, size_t killed, const char* damaged, size_t expected) {
    Way way = {.world = 1, .every = 5, .near = near, .keep = keep};
    run_remove();
    run_killed(&way, "", kill_all("load", killed));
    expect(truncate(text_of("%s/%s", run_path(), damaged), 100) == 0, "there is no %s", damaged);
    resume_completes(&way, "", expected);
    run_remove();
    conclude("a tier's checkpoints %s: used", what);
}

// --out and the tier are relative, and do not exist at the first start.
static void tier_relative(void) {
    Way way = {.world = 1, .every = 20, .far = 2, .relative = true};
    need(chdir(place) == 0, "%s", place);
    run_remove();
    run_killed(&way, "--resume", kill_all("load", 8));
    resume_completes(&way, "", 6);
    run_remove();
    conclude("a tier of a run whose --out is relative and new");
}

// Saves in --out and in the tier coincide: the tier gets its own all the same. If --out is lost, the run's directory in
// the tier takes its place.
static void tier_coincides(bool async, size_t every) {
    Way way = {.world = 1, .every = every, .far = 10, .async = async};
    size_t newest, ignored;
    char tier[PATH_MAX];
    run_remove();
    run_killed(&way, "", kill_all("load", 29));
    snprintf(tier, sizeof tier, "%s", tier_path(far_path()));
    newest_of(tier, &newest, &ignored);
    expect(async ? newest >= 10 : newest == 20, "the newest in the tier is of step %zu", newest);
    check_whole(tier);
    remove_tree(run_path());
    need(rename(tier, run_path()) == 0, "%s", tier);
    if (run_well(&way, "--resume")) expect_resumed(newest);
    check_weights();
    run_remove();
    conclude("saves every %zu steps, %s, and in a tier every 10: it has step %zu", every, async ? "async" : "sync",
             newest);
}

// Two runs with one tier, or a run that is deleted and begun again: each resumes from its own checkpoints.
static void tier_of_two_runs(bool deleted) {
    Way way = {.world = 1, .every = 20, .near = 2};
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%.1000s/other", place);
    run_remove();
    run_killed(&way, "", kill_all("load", 8));
    need(rename(run_path(), other) == 0, "%s", other);
    run_killed(&way, deleted ? "--resume" : "", kill_all("load", 4));
    resume_completes(&way, "", 2);
    remove_tree(run_path());
    need(rename(other, run_path()) == 0, "%s", other);
    if (!deleted) resume_completes(&way, "", 6);
    run_remove();
    conclude("a tier of a run that %s: each resumes from its own", deleted ? "begins again" : "another uses too");
}

// A copy of --out that is trained in its place is another run: the tier stays with the original.
static void tier_of_a_copy(void) {
    Way way = {.world = 1, .every = 5, .near = 2};
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%.1000s/other", place);
    run_remove();
    run_killed(&way, "", kill_all("load", 8));
    need(rename(run_path(), other) == 0, "%s", other);
    copy_tree(other, run_path());
    resume_completes(&way, "", 5);
    remove_tree(run_path());
    need(rename(other, run_path()) == 0, "%s", other);
    resume_completes(&way, "", 6);
    run_remove();
    conclude("a tier of a run whose --out is copied: the copy does not use it");
}

// The run goes on where it cannot see the tier, and saves step 6 or 7 in --out; the tier has step 6 or 8.
static void tier_of_another_machine(size_t every, size_t killed) {
    Way here = {.world = 1, .every = 5, .near = 2}, there = {.world = 1, .every = every, .near = 3};
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%s-other", near_path());
    run_remove();
    run_killed(&here, "", kill_all("load", killed));
    need(rename(near_path(), other) == 0, "%s", other);
    run_killed(&there, "--resume", kill_all("load", 8));
    expect_resumed(5);
    remove_tree(near_path());
    need(rename(other, near_path()) == 0, "%s", other);
    resume_completes(&here, "", every == 3 ? 6 : 7);
    expect(strstr(said(0), text_of("resumed from %s", run_path())) != NULL, "the tier's checkpoint is used");
    run_remove();
    conclude("a tier's step %d, which the run has left behind on this machine: not used", killed == 8 ? 6 : 8);
}

// On another machine the run diverges again, rewinds, and is killed before it has saved anything.
static void tier_before_rewind(void) {
    Way way = {.world = 1, .every = 3, .near = 1, .shallow = true};
    char other[PATH_MAX];
    size_t diverged = rewound[0].steps[0], back = (diverged - 1) / 3 * 3;
    snprintf(other, sizeof other, "%s-other", near_path());
    run_remove();
    run_well(&way, REWINDS);
    uint64_t weights = weights_of(STEPS), log = log_read().hash;
    run_remove();
    run_killed(&way, REWINDS, kill_all("rewind", diverged));
    need(rename(near_path(), other) == 0, "%s", other);
    run_killed(&way, REWINDS " --resume", (Harm){.signal = SIGKILL, .all = true, .lines = 1, .line = "went back",
                                                 .fault = "rank 0 step 1 at update do delay 300"});
    remove_tree(near_path());
    need(rename(other, near_path()) == 0, "%s", other);
    if (run_well(&way, REWINDS " --resume")) {
        expect_resumed(back);
        expect(weights_of(STEPS) == weights, "other weights than the run's that nobody killed");
        expect(log_read().hash == log, "another log than the run's that nobody killed");
    }
    run_remove();
    conclude("a tier's checkpoints from before a rewind from step %zu to %zu: not used", diverged, back);
}

// A run that gets a tier when it is resumed.
static void tier_added(void) {
    Way way = {.world = 1, .every = 5};
    run_remove();
    run_killed(&way, "", kill_all("load", 8));
    put_text(text_of("%s/tiers.tmp-1-0", run_path()), "what a start that was killed has left");
    way.near = 2;
    run_killed(&way, "--resume", kill_all("load", 9));
    expect_resumed(5);
    resume_completes(&way, "", 8);
    run_remove();
    conclude("a tier of a run that began without it: used");
}

// A resume that asks for fewer steps than the tier has finds nothing to do, but must not lose that state.
static void tier_beyond_steps(void) {
    Way way = {.world = 1, .every = 5, .near = 2};
    run_remove();
    run_killed(&way, "", kill_all("load", 8));
    const char* arguments = arguments_of(&way, "--resume");
    char* steps = strstr(arguments, "--steps 30");
    need(steps != NULL, "the flag");
    memcpy(steps, "--steps 03", strlen("--steps 03"));
    job_start(1, arguments, (Harm){0});
    job_wait();
    expect(job_good(), "it fails");
    expect_resumed(6);
    resume_completes(&way, "", 6);
    run_remove();
    conclude("a tier's checkpoint of a step after --steps is saved in --out");
}

// A rank on another machine has another disk there.
static void tier_out_of_sight(size_t index) {
    Way way = {.world = 3, .zero = 2, .every = 5, .far = 2};
    (void)index;
    if (!mounts) {
        skip("a tier that not all ranks see", "this machine does not let the test mount a disk");
        return;
    }
    run_remove();
    char hidden[PATH_MAX];
    snprintf(hidden, sizeof hidden, "%s", far_path());
    need(mkdir(hidden, 0755) == 0, "%s", hidden);
    run(&way, "", (Harm){.hides = hidden, .victim = 1});
    for (size_t r = 0; r < way.world; r++)
        expect(program_code(&job.ranks[r]) == 1, "rank %zu does not end with an error", r);
    expect_said("rank 1 does not see");
    expect_said(hidden);
    expect(directory_count(hidden, "") == 0, "the start that was refused has left a directory");
    resume_completes(&way, "", 0);
    run_remove();
    conclude("a tier that not all ranks see: refused");
}

static void test_tiers(void) {
    const Way one = {.world = 3, .zero = 2, .every = 5, .near = 2}, first = {.world = 3, .every = 20, .near = 2},
              two = {.world = 3, .zero = 1, .every = 20, .near = 2, .far = 3};
    tier_then("are newer: used", one, NULL, false, 6);
    tier_then("are damaged: the one before in --out is used", one, "step_00000006/rank_00002.safetensors", false, 5);
    tier_then("have no good manifest: the one before in --out is used", one, "step_00000006/manifest.json", false, 5);
    tier_then("are gone with the machine: the newest in --out is used", one, NULL, true, 5);
    tier_then("are damaged, and none is in --out: the tier's one before is used", first, "step_00000006/manifest.json",
              false, 4);
    tier_then("are damaged: the same step's in another tier is used", two, "step_00000006/manifest.json", false, 6);
    tier_then("are gone with the machine: another tier's are used", two, NULL, true, 6);
    tier_left("that follow a damaged checkpoint", 0, 2, 8, "step_00000005/manifest.json", 6);
    tier_left("that follow a pruned checkpoint", 1, 8, 12, "step_00000010/rank_00000.safetensors", 8);
    tier_relative();
    tier_coincides(false, 1);
    tier_coincides(true, 5);
    tier_of_two_runs(true);
    tier_of_two_runs(false);
    tier_of_a_copy();
    tier_of_another_machine(3, 8);
    tier_of_another_machine(7, 9);
    tier_added();
    tier_beyond_steps();
    rewind_reference(0);
    tier_before_rewind();
    workers_share("tiers", 1, disk_enter, tier_out_of_sight);
}

// ------------------------------------------------------------------------------------------------

// The directory, with the program in it, since another user must be able to start it.
static void root_make(const char* train) {
    root_enter();
    snprintf(test.train, sizeof test.train, "%.1000s/train", root);
    copy_tree(train, test.train);
    need(chmod(test.train, 0755) == 0, "%s", test.train);
    put_shard("train.bin", 64, 8000, 1);
    put_shard("val.bin", 64, 400, 2);
    worker_enter("alone");
}

int main(int argc, char** argv) {
    static const struct { const char* name; void (*run)(void); } tests[] = {
        {"references", test_references}, {"kills", test_kills}, {"damage", test_damage}, {"disk", test_disk},
        {"failing", test_failing}, {"order", test_order}, {"clock", test_clock},
        {"prune", test_prune}, {"reshard", test_reshard}, {"rewind", test_rewind},
        {"tiers", test_tiers},
    };
    enum { TESTS = sizeof tests / sizeof tests[0] };
    const char* train = "./train";
    char train_path[PATH_MAX];
    int code;
#ifdef __SANITIZE_ADDRESS__  // runs take several times as long
    test.kills = 20;
#else
    test.kills = 60;
#endif
    test.seed = 1;
    test.workers = 4;
    const Flag rows[] = {
        {"train", KIND_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"kills", KIND_COUNT, &test.kills, "N", 1, 1e9,
         "kills at least; from 500 on every byte of a checkpoint is damaged and every call fails, too", false},
        {"seed", KIND_COUNT, &test.seed, "N", 0, 9e15, "of what the cases leave to chance", false},
        {"workers", KIND_COUNT, &test.workers, "N", 1, 64, "cases at a time", false},
        {"only", KIND_TEXT, &test.only, "NAME", 0, 0, "one of the tests (and the references)", false},
        {"case", KIND_COUNT, &test.one_case, "I", 1, 1e9, "one case of the kills", false},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    if (!flags_begin(&code, "soak", NULL, &flags, argc, argv)) return code;
    bool known = test.only == NULL;
    for (size_t i = 0; i < TESTS; i++) known = known || strcmp(test.only, tests[i].name) == 0;
    if (!known) {
        fprintf(stderr, "soak: --only is '%s', which is no test; see the head of dev/test/soak.c\n", test.only);
        return 2;
    }
    if (realpath(train, train_path) == NULL || access(train_path, X_OK) != 0) {
        fprintf(stderr, "soak: cannot run %s: %s; build it\n", train, strerror(errno));
        return 1;
    }
    tests_begin("soak");
    void* memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "memory");
    memcpy(&shared, &memory, sizeof shared);
    threads_set(1);
    root_make(train_path);
    for (size_t i = 0; i < TESTS; i++) {
        bool wanted = test.only ? strcmp(test.only, tests[i].name) == 0 : test.one_case == 0 || i == 1;
        double began = now_ms();
        if (!wanted && i > 0) continue;  // the other tests need the references
        tests[i].run();
        printf("%s: %.1f s\n", tests[i].name, (now_ms() - began) / 1e3);
    }
    if (shared->kills > 0) print_modes();
    return tests_end();
}
