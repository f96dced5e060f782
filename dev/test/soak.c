// soak.c: a run that is killed anywhere, on any disk, goes on as if nothing had happened.
//
//   cc -std=c11 -O2 -I. dev/test/soak.c -o build/soak -lm -pthread
//   build/soak [--train PATH] [--kills N] [--seed S] [--workers N] [--only NAME] [--case I]
//
//   references  what a run that nobody kills leaves: weights at every step, and the log; the weights are the same bits
//               for every number of ranks and ZeRO stage, the log for every stage
//   kills       SIGKILL, SIGSTOP or SIGSEGV of one rank or of all, at every named point of a step and of a save, and at
//               random times; then --resume. What the run leaves is the reference's, to the bit; every checkpoint that
//               has its final name is whole at any time; a kill loses --ckpt-every steps at most, and those of the
//               write in flight; nothing is left behind
//   damage      each byte of each file of a checkpoint changed in turn, files cut short or missing: found, named, and
//               the checkpoint before it is used
//   disk        full, read-only, deleted, writes cut short: a sentence, and what was saved stays good
//   failing     the kernel answers 'Input/output error' (bad_disk.h): to all flushes, writes or renames of a rank after
//               a good checkpoint: each save that fails is told, and training goes on; to what a resume reads: that
//               is passed over by name, or ends it, and no run is begun anew; to any single call. And reads and writes
//               do half of what they are asked, always
//   clock       the time of day goes back and forth, for the program (a library that it loads first) and for its files
//   prune       killed while an old checkpoint is removed
//   reshard     3 ranks, 2, 1, 4, with other stages, each killed: one run
//   hot         copies in memory that are newer, damaged, gone; or of an --out that is relative and did not exist
//   rewind      a run that diverges and goes back (--rewind), killed in the middle of that and at random times
//
// Nothing asks for the time of day: base.h's now_ms is CLOCK_MONOTONIC and the only clock of the trainer and its
// checkpoints, no file's time is read, the newest checkpoint is the one of the highest step. (Reports tell the time of
// day, events.jsonl and those of the supervisor; nothing is decided by it.)
//
// Cases are shared among --workers processes, each with a directory of its own. A case of the kills depends on its
// number and on --seed alone: --case I repeats one.

#include "llmtrain.h"
#include "harness.h"
#include "bad_disk.h"
#include "pieces.h"

#include <grp.h>
#include <sched.h>
#include <sys/mount.h>

#define STEPS 30
#define RANKS_MAX ((size_t)4)
#define TIMEOUT_MS 2e3   // --timeout of every run
#define SLACK_MS 4e3     // what a busy machine may add to it
#define LIMIT_MS 60e3    // after which a program is said to hang
#define LOSS_BOUND 1e-5  // relative, between numbers of ranks: they add losses in another order

// 12 sequences make a step, whatever the number of ranks. Some steps are skipped, and there is dropout: their state,
// too, must come back.
#define MODEL                                                                                           \
    "--family gpt2 --layers 2 --heads 2 --channels 16 --seq 16 --batch 1 --total-batch 192 --steps 30 " \
    "--val-every 10 --val-windows 4 --lr 3e-3 --warmup 3 --clip 0.5 --spike-sigma 0 --spike-warmup 4 "  \
    "--spike-skip 1.65 --dropout 0.1 --threads 1 --reduce exact --timeout 2"

// ------------------------------------------------------------------------------------------------
// Results, of all processes

typedef unsigned long long Count;

typedef struct {
    Count kills, restarts, lost, lost_most, most_allowed;  // in steps
    Count backs, back_us, back_us_most;                    // from the death of the last rank to the first line
} Mode;

static const char* const MODE_NAMES[4] = {"sync", "sync, hot copies", "async", "async, hot copies"};

static struct {
    Count cases, kills, quiet;  // quiet: runs that ended before anyone could strike
    Count taken;                // cases of the list that workers share
    Mode modes[4];
} * shared;

static struct {
    char train[PATH_MAX];
    const char* only;
    uint64_t kills, seed, workers, one_case;
} test;

static char place[PATH_MAX];  // the directory of this process in that of the test

#define blame(...) expect(false, __VA_ARGS__)

static void raise_to(Count* most, Count value) {
    Count known = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (known < value &&
           !__atomic_compare_exchange_n(most, &known, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

// ------------------------------------------------------------------------------------------------
// Files

// Where the trainer keeps copies in memory for an --out.
static const char* hot_path(const char* out) {
    return text_of("/dev/shm/llmtrain-%016llx", (unsigned long long)hash_bytes(out, strlen(out)));
}

// The step in the last whole line of a log; 0: none.
static size_t log_last(const char* run) {
    size_t bytes, last = 0;
    char* text = text_read(text_of("%s/metrics.jsonl", run), &bytes);
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1)
        sscanf(line, "{\"step\": %zu", &last);
    free(text);
    return last;
}

// The log without what differs from run to run: times, memory and what follows them. The losses go to losses (STEPS).
static uint64_t log_hash(const char* run, double* losses) {
    size_t bytes, step;
    double loss;
    char* text = text_read(text_of("%s/metrics.jsonl", run), &bytes);
    Hash hash = hash_begin(0);
    for (size_t i = 0; losses && i < STEPS; i++) losses[i] = NAN;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        const char* times = strstr(line, ",\"ms\"");
        hash_add(&hash, line, (size_t)((times && times < end ? times : end) - line));
        if (losses && sscanf(line, "{\"step\": %zu,\"loss\": %lf", &step, &loss) == 2 && step >= 1 && step <= STEPS)
            losses[step - 1] = loss;
    }
    if (bytes > 0 && text[bytes - 1] != '\n') hash_add(&hash, "no end", 6);
    free(text);
    return hash_end(&hash);
}

// ------------------------------------------------------------------------------------------------
// Blows and jobs: a run of the program by one or more ranks, and what is done to it

typedef struct {
    int signal;         // 0: nothing is done
    bool all;           // to all ranks, or else to
    size_t victim;      // this one
    const char* point;  // when it comes to this point
    size_t step;        // of this step; NULL:
    size_t lines;       // when the log has so many lines,
    double after_ms;    // and so long after
} Blow;

typedef struct {
    size_t world;
    Program ranks[RANKS_MAX];
    bool hit[RANKS_MAX];
    int listeners[RANKS_MAX];  // of those with a bad disk; -1: none
    int reserved;              // the socket that keeps the port from others
    bool struck, late;         // somebody was hit; somebody did not end by himself
    double began_ms, struck_ms, ended_ms, first_line_ms;
    const char* text[2];       // what rank 0 wrote
} Job;

// Of the programs to be started:
static bool drops_rights;           // they run as a user who may not write everywhere
static const char* preload;         // a library that they load first; NULL: none
static BadDisk* bad_disk;           // what files do to them; NULL: nothing
static size_t bad_rank = SIZE_MAX;  // to this one alone; SIZE_MAX: to all
static size_t file_limit;           // bytes of the longest file; 0: any

static const char* action_of(int signal) {
    return signal == SIGKILL ? "kill" : signal == SIGSTOP ? "stop" : signal == SIGTERM ? "term" : "segv";
}

// Of a rank that is about to start.
typedef struct {
    size_t rank, world, port;
    const Blow* blow;
    const char* fault;
    int disk_socket;
} Start;

static void job_become(const void* context) {
    const Start* s = (const Start*)context;
    const struct rlimit limit = {file_limit, file_limit};
    if (file_limit) setrlimit(RLIMIT_FSIZE, &limit);
    clearenv();
    environment_set(text_of("OMP_NUM_THREADS=1|OMP_WAIT_POLICY=passive|RANK=%zu|LOCAL_RANK=%zu|WORLD_SIZE=%zu|"
                            "MASTER_ADDR=127.0.0.1|MASTER_PORT=%zu", s->rank, s->rank, s->world, s->port));
    // A program with the address sanitizer, too, is to die of it.
    if (s->blow->signal == SIGSEGV) setenv("ASAN_OPTIONS", "handle_segv=0", 1);
    if (s->fault) setenv("LLMTRAIN_TEST_FAULT", s->fault, 1);
    if (preload) setenv("LD_PRELOAD", preload, 1);
    if (s->blow->signal && s->blow->point && (s->blow->all || s->blow->victim == s->rank))
        setenv("LLMTRAIN_TEST_FAULT", text_of("rank %zu step %zu at %s do %s", s->rank, s->blow->step, s->blow->point,
                                              action_of(s->blow->signal)), 1);
    if (drops_rights && (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0)) _exit(EXIT_NOT_RUN);
    if (s->disk_socket >= 0 && !bad_disk_enter(bad_disk->calls, s->disk_socket)) _exit(EXIT_NOT_RUN);
}

static const Blow NO_BLOW;

#define SLOWLY "rank 0 step 1 at update do delay 50"  // so that there is time to do something to a run

// `fault`: what LLMTRAIN_TEST_FAULT says where the blow does not; NULL: nothing.
static void job_start(Job* job, size_t world, const char* arguments, const Blow* blow, const char* fault) {
    static Words words;
    memset(job, 0, sizeof *job);
    memset(&words, 0, sizeof words);
    words_add(&words, test.train);
    words_add(&words, arguments);
    size_t port = port_reserve(&job->reserved);
    job->world = world;
    job->began_ms = now_ms();
    for (size_t r = 0; r < world; r++) {
        Start start = {r, world, port, blow, fault, -1};
        int sockets[2] = {-1, -1};
        bool has_bad_disk = bad_disk && (bad_rank == SIZE_MAX || bad_rank == r);
        need(!has_bad_disk || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0, "a socket");
        start.disk_socket = sockets[1];
        program_start(&job->ranks[r], words.words, job_become, &start);
        job->listeners[r] = -1;
        if (!has_bad_disk) continue;
        close(sockets[1]);
        job->listeners[r] = bad_disk_listen(sockets[0]);
        close(sockets[0]);
        need(job->listeners[r] >= 0, "a filter of system calls");
    }
}

// Lines of steps that rank 0 has written so far.
static size_t lines_written(const Job* job) {
    size_t lines = 0;
    for (const char* at = job->ranks[0].text[0]; (at = strstr(at, "\nstep ")) != NULL; at++) lines++;
    return lines;
}

static void job_look(Job* job) {
    for (size_t r = 0; r < job->world; r++) {
        Program* p = &job->ranks[r];
        bool was_stopped = p->stopped, had_ended = p->ended;
        program_look(p);
        if (p->ended) job->ended_ms = fmax(job->ended_ms, p->ended_ms);
        bool stops = p->stopped && !was_stopped, dies = p->ended && !had_ended && WIFSIGNALED(p->status);
        if (!stops && !dies) continue;
        job->hit[r] = true;
        if (!job->struck) job->struck_ms = now_ms();
        job->struck = true;
    }
}

// Until all have ended; meanwhile their calls to a bad disk are answered. Those that are stopped are killed when the
// others have ended, and so is what runs for too long.
static void job_wait(Job* job, const Blow* blow) {
    double due = NAN;
    size_t lines = 0;
    pid_t pids[RANKS_MAX];
    for (size_t r = 0; r < job->world; r++) pids[r] = job->ranks[r].pid;
    for (bool busy = true; busy;) {
        size_t running = 0, left = 0;
        if (bad_disk) bad_disk_serve(bad_disk, job->listeners, pids, job->world, 1);
        else sleep_ms(1);
        job_look(job);
        for (size_t r = 0; r < job->world; r++) {
            running += !job->ranks[r].ended && !job->ranks[r].stopped;
            left += !job->ranks[r].ended;
        }
        busy = left > 0;
        if (lines == 0 || (blow->signal && !blow->point && lines < blow->lines)) lines = lines_written(job);
        if (lines > 0 && job->first_line_ms == 0) job->first_line_ms = now_ms();
        if (blow->signal && !blow->point && isnan(due) && lines >= blow->lines) due = now_ms() + blow->after_ms;
        bool now = blow->signal && (blow->point ? job->struck : now_ms() >= due);
        bool late = now_ms() > (job->struck ? job->struck_ms + TIMEOUT_MS + SLACK_MS : job->began_ms + LIMIT_MS);
        job->late |= late && running > 0;
        for (size_t r = 0; r < job->world; r++) {
            if (job->ranks[r].ended) continue;
            bool strikes = now && !job->hit[r] && (blow->all || r == blow->victim);
            if (strikes) kill(pids[r], blow->signal);
            job->hit[r] |= strikes;
            if (late || (running == 0 && job->ranks[r].stopped)) kill(pids[r], SIGKILL);
        }
    }
    close(job->reserved);
    for (size_t r = 0; r < job->world; r++) if (job->listeners[r] >= 0) close(job->listeners[r]);
    for (int stream = 0; stream < 2; stream++) job->text[stream] = job->ranks[0].text[stream];
}

static void job_free(Job* job) {
    for (size_t r = 0; r < job->world; r++) program_free(&job->ranks[r]);
    memset(job, 0, sizeof *job);
}

static bool job_good(const Job* job) {
    bool good = !job->late;
    for (size_t r = 0; r < job->world; r++) good = good && program_good(&job->ranks[r]);
    return good;
}

static void blame_job(const Job* job) {
    for (size_t r = 0; r < job->world; r++)
        blame("rank %zu: exit code %d: %.400s", r, program_code(&job->ranks[r]), job->ranks[r].text[1]);
}

// Those that nobody hit end by themselves, in time, and with a sentence.
static void check_survivors(const Job* job) {
    bool good = !job->late;
    for (size_t r = 0; r < job->world; r++)
        if (!job->hit[r]) good = good && program_code(&job->ranks[r]) <= 1;
    if (good) return;
    blame("%s", job->late ? "a rank did not end by itself within the time-out" : "a rank that was not hit ended badly");
    blame_job(job);
}

// Trains; true if all ended well, which is blamed otherwise.
static bool run_well(Job* job, size_t world, const char* arguments) {
    job_start(job, world, arguments, &NO_BLOW, NULL);
    job_wait(job, &NO_BLOW);
    bool good = job_good(job);
    expect(good, "%.700s: %s", arguments, job->late ? "hangs" : "fails");
    if (!good) blame_job(job);
    return good;
}

// Trains until the blow, which must come.
static void run_killed(size_t world, const char* arguments, const Blow* blow) {
    Job job;
    job_start(&job, world, arguments, blow, NULL);
    job_wait(&job, blow);
    expect(job.struck, "it was not killed");
    job_free(&job);
}

// ------------------------------------------------------------------------------------------------
// References

static struct {
    uint64_t weights[STEPS + 1];  // of every number of ranks
    uint64_t log[RANKS_MAX + 1];  // of each
    double losses[RANKS_MAX + 1][STEPS];
} reference;

// How a run saves.
typedef struct {
    size_t world, zero, every, hot;
    bool async;
    double bandwidth;
    size_t keep;
} Way;

// Good until the next call.
static const char* arguments_of(const Way* way, const char* more) {
    static char arguments[4096];
    char hot[64] = "", bandwidth[64] = "", keep[64] = "";
    if (way->hot) snprintf(hot, sizeof hot, "--ckpt-hot %zu", way->hot);
    if (way->keep) snprintf(keep, sizeof keep, "--ckpt-keep %zu", way->keep);
    if (way->bandwidth > 0) snprintf(bandwidth, sizeof bandwidth, "--ckpt-bandwidth %g", way->bandwidth);
    snprintf(arguments, sizeof arguments,
             MODEL
             " --data %.600s/train.bin --val %.600s/val.bin --out %.600s/run --zero %zu --ckpt-every %zu --ckpt-async "
             "%s %s %s %s %s",
             root, root, place, way->zero, way->every, way->async ? "on" : "off", hot, bandwidth, keep, more);
    return arguments;
}

static const char* run_path(void) { return text_of("%s/run", place); }

// 0 if they cannot be read.
static uint64_t weights_of(size_t step) {
    Error ignored;
    return weights_hash(text_of("%s/run/step_%08zu", place, step), &ignored);
}

static void run_remove(void) {
    remove_tree(run_path());
    remove_tree(hot_path(run_path()));
}

// Every checkpoint under its final name holds what the reference has at that step.
static void check_whole(const char* out) {
    uint64_t step = UINT64_MAX;
    while (checkpoint_before(&step, out, step)) {
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord record;
        Error error;
        checkpoint_path(path, out, step, "");
        if (!record_open(&manifest, &record, path, &error)) {
            blame("%s", error.text);
            continue;
        }
        json_free(&manifest);
        uint64_t hash = weights_hash(path, &error);
        expect(hash != 0, "%s", error.text);
        expect(step <= STEPS && hash == reference.weights[step], "%s has other tensors than the reference", path);
    }
}

static void check_weights(void) {
    expect(weights_of(STEPS) == reference.weights[STEPS], "other weights than the reference's after the last step");
}

// The run is complete, is the reference's, and has left nothing else.
static void check_complete(size_t world) {
    const char* out = run_path();
    check_weights();
    expect(log_hash(out, NULL) == reference.log[world], "another log than the reference's");
    DIR* directory = opendir(out);
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;) {
        char expected[64];
        unsigned long long step = 0;
        sscanf(entry->d_name, "step_%llu", &step);
        snprintf(expected, sizeof expected, "step_%08llu", step);
        bool log = strcmp(entry->d_name, "metrics.jsonl") == 0 || strcmp(entry->d_name, "events.jsonl") == 0;
        expect(entry->d_name[0] == '.' || log || strcmp(entry->d_name, expected) == 0,
               "%s is left behind", entry->d_name);
        DIR* inner = strcmp(entry->d_name, expected) == 0 ? opendir(text_of("%s/%s", out, expected)) : NULL;
        for (struct dirent* file; inner && (file = readdir(inner)) != NULL;)
            expect(!strstr(file->d_name, ".tmp"), "%s/%s is left behind", expected, file->d_name);
        if (inner) closedir(inner);
    }
    if (directory) closedir(directory);
    expect(!directory_exists(hot_path(out)), "%s is left behind", hot_path(out));
    expect(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "processes are left behind");
}

static size_t checkpoints_left(const char* out) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    while (checkpoint_before(&step, out, step)) count++;
    return count;
}

// At the end only those are left that are to be kept.
static void check_kept(const Way* way) {
    size_t count = checkpoints_left(run_path());
    expect(!way->keep || count <= way->keep, "%zu checkpoints are left, not %zu", count, way->keep);
}

static void test_references(void) {
    static const size_t worlds[4] = {1, 2, 3, 4};
    for (size_t i = 0; i < 4; i++) {
        for (size_t zero = 0; zero <= 2; zero++) {
            Way way = {worlds[i], zero, i == 0 && zero == 0 ? 1 : 5, 0, false, 0, 0};
            Job job;
            size_t different = 0;
            bool first = i == 0 && zero == 0;
            run_remove();
            if (run_well(&job, way.world, arguments_of(&way, ""))) {
                for (size_t step = way.every; step <= STEPS; step += way.every) {
                    uint64_t hash = weights_of(step);
                    if (first) reference.weights[step] = hash;
                    different += hash == 0 || hash != reference.weights[step];
                }
                uint64_t log = log_hash(run_path(), reference.losses[way.world]);
                if (zero == 0) reference.log[way.world] = log;
                expect(!different, "the tensors of %zu steps are not those of one rank", different);
                expect(log == reference.log[way.world], "the log is not that of --zero 0");
            }
            job_free(&job);
            verdict("reference: %zu rank%s, --zero %zu", way.world, way.world > 1 ? "s" : "", zero);
        }
    }
    run_remove();
}

// ------------------------------------------------------------------------------------------------
// Kills

// Where a run can be struck. Of the points of a save: how many steps after its beginning they may come when it is
// asynchronous.
typedef enum { OF_STEP, OF_VALIDATION, OF_BEGINNING, OF_WRITING, OF_END } PointKind;

static const struct {
    const char* name;
    PointKind kind;
    bool leader_only;
} POINTS[] = {
    {"load", OF_STEP, false},       {"forward", OF_STEP, false},        {"backward", OF_STEP, false},
    {"reduce", OF_STEP, false},     {"update", OF_STEP, false},         {"gather", OF_STEP, false},
    {"validate", OF_VALIDATION, false}, {"save", OF_BEGINNING, false},  {"snapshot", OF_BEGINNING, false},
    {"write", OF_WRITING, false},   {"flush", OF_WRITING, false},       {"checksums", OF_END, false},
    {"manifest", OF_END, true},     {"rename", OF_END, true},           {"clean", OF_END, false},
};
enum { POINT_COUNT = COUNT_OF(POINTS), GATHER = 5, SNAPSHOT = 8, ATTEMPTS = 8, IN_A_ROW = 3 };

// Numbers that depend on the case and on --seed alone.
typedef struct {
    uint64_t number, index;
} Dice;

static size_t dice_below(Dice* dice, size_t n) {
    return random4(test.seed, RANDOM_TEST, dice->number, dice->index++).bits[0] % n;
}

static void describe(char text[256], const Way* way, const Blow* blow) {
    char when[96], who[64], hot[64] = "", slow[64] = "";
    if (blow->point) snprintf(when, sizeof when, "%s of step %zu", blow->point, blow->step);
    else snprintf(when, sizeof when, "%.0f ms after line %zu", blow->after_ms, blow->lines);
    if (blow->all) snprintf(who, sizeof who, "all of %zu", way->world);
    else snprintf(who, sizeof who, "rank %zu of %zu", blow->victim, way->world);
    if (way->hot) snprintf(hot, sizeof hot, ", hot every %zu", way->hot);
    if (way->bandwidth > 0) snprintf(slow, sizeof slow, ", %g MB/s", way->bandwidth);
    snprintf(text, 256, "%s %s, %s, --zero %zu, %s every %zu%s%s", action_of(blow->signal), who, when, way->zero,
             way->async ? "async" : "sync", way->every, hot, slow);
}

static Mode* mode_of(const Way* way) { return &shared->modes[way->async * 2 + (way->hot > 0)]; }

// Steps that may be lost: as many as --ckpt-every says, and with asynchronous saves those of the write in flight, which
// ends before the next begins. Copies in memory are only made while nothing is being written.
static size_t most_lost(const Way* way) {
    if (way->async && way->every > 1) return 2 * way->every;
    return way->hot ? min_size(way->every, way->hot) : way->every;
}

// The step that a run resumed from; SIZE_MAX if it did not come so far as to say it.
static size_t resumed_from(const Job* job) {
    const char* path = strstr(job->text[0], "resumed from ");
    const char* step = path ? strstr(path, "/step_") : NULL;
    if (step) return (size_t)strtoull(step + 6, NULL, 10);
    return strstr(job->text[0], "starting from the beginning") ? 0 : SIZE_MAX;
}

// What a run said last of a save.
static size_t last_saved(const Job* job) {
    size_t step = 0;
    for (const char* at = job->text[0]; (at = strstr(at, "\nsaved ")) != NULL; at++) {
        const char* name = strstr(at, "/step_");
        if (name) step = (size_t)strtoull(name + 6, NULL, 10);
    }
    return step;
}

// Resumes the run, which must go on from step `from` (ANYWHERE: from any) and end as if nothing had happened.
#define ANYWHERE SIZE_MAX
static void resume_completes(const Way* way, const char* more, size_t from) {
    Job job;
    if (run_well(&job, way->world, arguments_of(way, text_of("--resume %s", more)))) {
        expect(from == ANYWHERE || resumed_from(&job) == from, "it resumed from step %zu, not %zu", resumed_from(&job),
               from);
        check_complete(way->world);
    }
    job_free(&job);
}

// What the restart after a death has lost; `logged` is the last step of the log and `saved` of a save before it.
static void check_restart(const Way* way, const Job* job, size_t logged, size_t saved, double died_ms) {
    Mode* mode = mode_of(way);
    size_t from = resumed_from(job);
    if (from == SIZE_MAX) return;
    size_t lost = logged > from ? logged - from : 0;
    expect(lost <= most_lost(way),
           "%zu steps are lost, from %zu back to %zu; at most %zu may be", lost, logged, from, most_lost(way));
    expect(from >= saved, "it resumed from step %zu, though %zu was saved", from, saved);
    count_add(&mode->restarts, 1);
    count_add(&mode->lost, lost);
    raise_to(&mode->lost_most, lost);
    raise_to(&mode->most_allowed, most_lost(way));
    if (job->first_line_ms == 0) return;
    Count us = (Count)(1e3 * (job->first_line_ms - died_ms));
    count_add(&mode->backs, 1);
    count_add(&mode->back_us, us);
    raise_to(&mode->back_us_most, us);
}

// One start of the run, with a blow or without. True if somebody was hit.
static bool start_and_strike(Job* job, const Way* way, const Blow* blow, bool resumes) {
    job_start(job, way->world, arguments_of(way, resumes ? "--resume" : ""), blow, NULL);
    job_wait(job, blow);
    if (job->struck) {
        count_add(&shared->kills, 1);
        count_add(&mode_of(way)->kills, 1);
        check_survivors(job);
        check_whole(run_path());
        check_whole(hot_path(run_path()));
    } else if (!job_good(job)) {
        blame("a run that nobody hit %s", job->late ? "hangs" : "fails");
        blame_job(job);
    }
    return job->struck;
}

// The step at which a fault is set so that the point is passed in it. An asynchronous save ends when it ends, which
// differs from run to run: then another attempt is made elsewhere, and the last is at the last step, whose save is
// waited for.
static size_t step_of(const Way* way, PointKind kind, size_t attempt, Dice* dice) {
    size_t interval = way->hot && !way->async && dice_below(dice, 2) ? way->hot : way->every, saves = STEPS / interval;
    size_t save = min_size(STEPS, interval * (dice_below(dice, saves + 1) + 1));
    if (kind == OF_STEP) return 1 + dice_below(dice, STEPS);
    if (kind == OF_VALIDATION) return 10 * (1 + dice_below(dice, STEPS / 10));
    if (attempt == ATTEMPTS - 1) return STEPS;
    if (kind == OF_BEGINNING || !way->async) return save;
    if (kind == OF_WRITING) return min_size(STEPS, save + attempt % 2);
    return min_size(STEPS, save + 1 + dice_below(dice, way->every));
}

// Strikes the first start at a named point; false if it was not struck.
static bool strike_at_point(char what[256], Job* job, Way* way, size_t combination, Dice* dice) {
    static const int signals[3] = {SIGKILL, SIGSTOP, SIGSEGV};
    size_t point = combination % POINT_COUNT, who = combination / POINT_COUNT % 3;
    Blow blow = {signals[combination / POINT_COUNT / 3 % 3], who > 0, 0, POINTS[point].name, 0, 0, 0};
    way->world = who < 2 ? 3 : 1;
    way->async = combination / POINT_COUNT / 9 % 2 == 0 || point == SNAPSHOT;
    if (!way->async) way->bandwidth = 0;
    if (point == SNAPSHOT) way->every = max_size(way->every, 2);
    if (point == GATHER) way->zero = 1 + dice_below(dice, 2);
    if (!POINTS[point].leader_only) blow.victim = dice_below(dice, way->world);
    for (size_t attempt = 0; attempt < ATTEMPTS; attempt++) {
        run_remove();
        blow.step = step_of(way, POINTS[point].kind, attempt, dice);
        describe(what, way, &blow);
        if (start_and_strike(job, way, &blow, false) || harness_now.failures) return true;
        check_complete(way->world);
        if (attempt + 1 < ATTEMPTS) job_free(job);
        count_add(&shared->quiet, 1);
    }
    return false;
}

static void kill_case(Count number) {
    static const int signals[3] = {SIGKILL, SIGSTOP, SIGSEGV};
    enum { COMBINATIONS = POINT_COUNT * 3 * 3 * 2, STRIDE = 101 };  // a stride that has no divisor in common with them
    Dice dice = {number, 0};
    Way way;
    Job job;
    char what[256] = "", more[256];
    size_t saved = 0, blows = 1, logged = 0;
    way.world = 1 + 2 * dice_below(&dice, 2);
    way.zero = dice_below(&dice, 3);
    way.every = 1 + dice_below(&dice, 7);
    way.hot = dice_below(&dice, 2);
    if (way.hot) way.hot = 1 + dice_below(&dice, 3);
    way.async = dice_below(&dice, 2);
    way.keep = 2 * dice_below(&dice, 2);
    way.bandwidth = way.async && dice_below(&dice, 3) == 0 ? 4 : 0;  // then a save lasts until the next, more or less
    if (number % 4 < 3) {  // at a point
        expect(strike_at_point(what, &job, &way, (number / 4 * 3 + number % 4) * STRIDE % COMBINATIONS, &dice),
               "no attempt came to the point");
    } else {
        blows = 1 + dice_below(&dice, IN_A_ROW);
        run_remove();
        for (size_t i = 0; i < blows; i++) {
            Blow blow = NO_BLOW;
            blow.signal = signals[dice_below(&dice, 3)];
            blow.all = dice_below(&dice, 2);
            blow.victim = dice_below(&dice, way.world);
            blow.lines = dice_below(&dice, STEPS);
            blow.after_ms = (double)dice_below(&dice, blow.lines ? 15 : 80);
            describe(more, &way, &blow);
            if (i == 0) snprintf(what, sizeof what, "%s", more);
            double died_ms = i ? job.ended_ms : 0;
            if (i) job_free(&job);
            bool struck = start_and_strike(&job, &way, &blow, i > 0);
            if (i > 0) check_restart(&way, &job, logged, saved, died_ms);
            saved = max_size(saved, last_saved(&job));
            logged = log_last(run_path());
            if (!struck) count_add(&shared->quiet, 1);
            if (!struck) blows = i + 1;
        }
    }
    saved = max_size(saved, last_saved(&job));
    logged = log_last(run_path());
    double died_ms = job.ended_ms;
    job_free(&job);
    char from[32] = "?";
    if (run_well(&job, way.world, arguments_of(&way, "--resume"))) {
        check_restart(&way, &job, logged, saved, died_ms);
        check_complete(way.world);
        check_kept(&way);
        snprintf(from, sizeof from, "%zu", resumed_from(&job));
    }
    job_free(&job);
    verdict("case %llu: %s%s: step %zu, resumed from %s", number, what, blows > 1 ? ", and again" : "", logged, from);
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

// Workers take the cases of a list in turn, each in a directory of its own.
static void workers_share(const char* name, size_t cases, void (*enter)(void), void (*run)(size_t)) {
    pid_t workers[64];
    size_t count = min_size(test.workers, cases);
    fflush(stdout);
    shared->taken = 0;
    for (size_t w = 0; w < count; w++) {
        workers[w] = fork();
        need(workers[w] >= 0, "a process");
        if (workers[w] != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        worker_enter(text_of("%s_%zu", name, w));
        if (enter) enter();
        for (Count i; (i = __atomic_fetch_add(&shared->taken, 1, __ATOMIC_RELAXED)) < cases;) run(i);
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

#define SMALL                                                                                                         \
    "--family gpt2 --layers 1 --heads 1 --channels 8 --ffn 8 --seq 8 --batch 1 --total-batch 16 --steps 4 --lr 3e-3 " \
    "--warmup 1 --threads 1 --reduce exact --timeout 2 --zero 1 --ckpt-every 2 --ckpt-async off"

enum { SMALL_FILES = 3 };

// The newer of two checkpoints of a run by two ranks.
static struct {
    char directory[PATH_MAX], path[SMALL_FILES][PATH_MAX + 32];
    char* bytes[SMALL_FILES];
    size_t size[SMALL_FILES];
    uint64_t weights;
} small;

static const char* small_arguments(const char* more) {
    static char arguments[4096];
    snprintf(arguments, sizeof arguments, SMALL " --data %.600s/train.bin --out %.600s/small %s", root, place, more);
    return arguments;
}

static void small_check_weights(void) {
    Error ignored;
    expect(weights_hash(small.directory, &ignored) == small.weights, "other weights at the end");
}

static void small_restore(void) {
    remove_tree(small.directory);
    remove_tree(text_of("%s.old", small.directory));
    remove_tree(text_of("%s.tmp", small.directory));
    need(mkdir(small.directory, 0755) == 0, "%s", small.directory);
    for (size_t f = 0; f < SMALL_FILES; f++) put_bytes(small.path[f], small.bytes[f], small.size[f]);
}

// The trainer on the damaged checkpoint: it names it, goes back to step 2, and comes to the same end.
static void small_resume(size_t world, const char* what, size_t number) {
    Job job;
    if (harness_now.failures > 10) return;  // enough is wrong
    if (run_well(&job, world, small_arguments("--resume"))) {
        bool named = strstr(job.text[1], small.directory) && strstr(job.text[1], "trying the checkpoint before it");
        expect(named, "%s %zu, %zu ranks: it says '%.600s'", what, number, world, job.text[1]);
        expect(resumed_from(&job) == 2,
               "%s %zu, %zu ranks: it says that it resumes from step %zu, not 2", what, number, world,
               resumed_from(&job));
        small_check_weights();
    } else {
        blame("with %s %zu", what, number);
    }
    job_free(&job);
}

// The same without the program, which is faster: whether a model can be loaded from the damaged checkpoint.
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
    int file = open(small.path[f], O_WRONLY);
    need(file >= 0, "%s", small.path[f]);
    for (size_t at = f % stride; at < small.size[f]; at += stride) {
        char byte = (char)(small.bytes[f][at] ^ (1 << at % 8));
        need(pwrite(file, &byte, 1, (off_t)at) == 1, "%s", small.path[f]);
        error.text[0] = 0;
        bool loads = small_loads(model, &error), named = strstr(error.text, small.directory) != NULL;
        expect(!loads, "byte %zu: the change is not found", at);
        expect(loads || named, "byte %zu: the message names no file: %s", at, error.text);
        need(pwrite(file, small.bytes[f] + at, 1, (off_t)at) == 1, "%s", small.path[f]);
        found += !loads && named;
        flips++;
    }
    close(file);
    expect(small_loads(model, &error), "it does not load any more: %s", error.text);
    verdict("%s: %zu of %zu changed bytes are found when it is loaded", strrchr(small.path[f], '/') + 1, found, flips);
}

static void flip_resumed(size_t f, size_t stride) {
    size_t flips = 0;
    for (size_t at = (f * 5) % stride; at < small.size[f]; at += stride, flips++) {
        char* bytes = (char*)allocate(small.size[f]);
        need(bytes != NULL, "memory");
        memcpy(bytes, small.bytes[f], small.size[f]);
        bytes[at] = (char)(bytes[at] ^ (1 << at % 8));
        small_restore();
        put_bytes(small.path[f], bytes, small.size[f]);
        small_resume(1 + flips % 2, "byte", at);
        free(bytes);
    }
    verdict("%s: the trainer passes over it and trains again, with %zu bytes changed in turn",
            strrchr(small.path[f], '/') + 1, flips);
}

static void damage_file(size_t f, bool all) {
    const char* name = strrchr(small.path[f], '/') + 1;
    const size_t sizes[] = {0, 1, 7, 8, 9, small.size[f] / 2, small.size[f] - 1};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        if (!all && i % 3 != f) continue;
        small_restore();
        need(truncate(small.path[f], (off_t)sizes[i]) == 0, "%s", small.path[f]);
        small_resume(1 + i % 2, "bytes left:", sizes[i]);
    }
    verdict("%s cut short", name);
    for (size_t world = 1; world <= 2; world++) {
        small_restore();
        need(unlink(small.path[f]) == 0, "%s", small.path[f]);
        small_resume(world, "missing file", f);
    }
    verdict("%s missing", name);
    small_restore();
    need(unlink(small.path[f]) == 0 && mkdir(small.path[f], 0755) == 0, "%s", small.path[f]);
    small_resume(1, "directory in the place of file", f);
    verdict("a directory in the place of %s", name);
}

// A damaged checkpoint is replaced by one of the same step, and the run is killed between the two names.
static void damage_and_kill(const char* point) {
    Blow blow = {SIGKILL, true, 0, point, 4, 0, 0};
    Job job;
    small_restore();
    put_bytes(small.path[1], small.bytes[1], small.size[1] - 1);
    run_killed(2, small_arguments("--resume"), &blow);
    if (run_well(&job, 1, small_arguments("--resume"))) small_check_weights();
    job_free(&job);
    expect(!directory_exists(text_of("%s.old", small.directory)), "%s.old is left behind", small.directory);
    expect(!directory_exists(text_of("%s.tmp", small.directory)), "%s.tmp is left behind", small.directory);
    verdict("killed at %s while a damaged checkpoint is replaced", point);
}

// The newest is damaged; what is saved after going back must not be pruned in its favour.
static void damage_and_prune(void) {
    Blow blow = {SIGKILL, true, 0, "load", 4, 0, 0};
    Job job;
    char arguments[4096], *every;
    small_restore();
    put_bytes(small.path[1], small.bytes[1], small.size[1] - 1);
    snprintf(arguments, sizeof arguments, "%s", small_arguments("--resume --ckpt-keep 1"));
    need((every = strstr(arguments, "--ckpt-every 2")) != NULL, "the flag");
    every[strlen("--ckpt-every ")] = '1';
    job_start(&job, 1, arguments, &blow, NULL);
    job_wait(&job, &blow);
    if (!job.struck || resumed_from(&job) != 2 || last_saved(&job) != 3) blame_job(&job);
    job_free(&job);
    if (run_well(&job, 1, arguments)) {
        expect(resumed_from(&job) == 3, "it resumed from step %zu", resumed_from(&job));
        small_check_weights();
    }
    job_free(&job);
    verdict("step 4 is damaged, so step 3 is saved, with --ckpt-keep 1: then the run resumes from step 3");
    remove_tree(text_of("%s/small", place));
    if (run_well(&job, 2, small_arguments(""))) check_survivors(&job);
    job_free(&job);
}

static void test_damage(void) {
    static const char* const names[SMALL_FILES] = {"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"};
    static const char* const points[] = {"write", "manifest", "rename", "clean"};
    bool all = test.kills >= 500;
    Job job;
    Json manifest;
    RunRecord record;
    Model model;
    ModelOptions options;
    Error error;
    remove_tree(text_of("%s/small", place));
    bool good = run_well(&job, 2, small_arguments(""));
    job_free(&job);
    snprintf(small.directory, sizeof small.directory, "%.1000s/small/step_00000004", place);
    for (size_t f = 0; good && f < SMALL_FILES; f++) {
        snprintf(small.path[f], sizeof small.path[f], "%s/%s", small.directory, names[f]);
        small.bytes[f] = text_read(small.path[f], &small.size[f]);
        good = small.size[f] > 0;
    }
    small.weights = good ? weights_hash(small.directory, &error) : 0;
    memset(&options, 0, sizeof options);
    options.B = 1;
    options.T = 8;
    options.training = options.master_weights = true;
    options.optimizer = OPTIMIZER_ADAMW;
    good = good && record_open(&manifest, &record, small.directory, &error);
    if (good) json_free(&manifest);
    good = good && model_create(&model, &record.config, options, &error) && small_loads(&model, &error);
    expect(good, "a checkpoint that is whole does not load");
    if (!verdict("a checkpoint by two ranks")) return;
    for (size_t f = 0; f < SMALL_FILES; f++) flip_loaded(&model, f, all ? 1 : 37);
    for (size_t f = 0; f < SMALL_FILES; f++) flip_resumed(f, all ? 37 : 997);
    for (size_t f = 0; f < SMALL_FILES; f++) damage_file(f, all);
    for (size_t i = 0; i < COUNT_OF(points); i++) damage_and_kill(points[i]);
    damage_and_prune();

    small_restore();
    put_bytes(small.path[0], small.bytes[0], small.size[0] / 2);
    put_bytes(text_of("%s/small/step_00000002/manifest.json", place), "{}", 2);
    job_start(&job, 1, small_arguments("--resume"), &NO_BLOW, NULL);
    job_wait(&job, &NO_BLOW);
    bool ends = !job.late && program_code(&job.ranks[0]) == 1;
    if (!ends || !strstr(job.text[1], "no checkpoint in")) blame_job(&job);
    job_free(&job);
    verdict("all checkpoints damaged: the trainer says so, and ends");
    model_free(&model);
    for (size_t f = 0; f < SMALL_FILES; f++) free(small.bytes[f]);
    remove_tree(text_of("%s/small", place));
}

// ------------------------------------------------------------------------------------------------
// Disk

typedef enum { FULL, SHORT_WRITES, READ_ONLY, DELETED, HOT_FULL } Trouble;

typedef struct {
    const char* name;
    Trouble trouble;
    size_t size;          // of the disk (KB), or of the longest file (bytes)
    const char* message;  // what rank 0 says; NULL: as it comes
} DiskCase;

static const DiskCase DISK_CASES[] = {
    {"a disk on which no checkpoint fits", FULL, 80, "No space left"},
    {"a disk on which two checkpoints fit", FULL, 280, "No space left"},
    {"writes that are cut short", SHORT_WRITES, 32768, "File too large"},
    {"a directory that becomes read-only", READ_ONLY, 0, "Permission denied"},
    {"a directory that is deleted", DELETED, 0, NULL},
    {"a full disk for copies in memory", HOT_FULL, 64, "No space left"},
};

static bool mounts;  // this process may mount disks

static bool disk_mount(const char* path, size_t kilobytes) {
    need(mkdir(path, 0755) == 0 || errno == EEXIST, "%s", path);
    return mount("tmpfs", path, "tmpfs", 0, text_of("size=%zuk,mode=0755", kilobytes)) == 0;
}

static void disk_case(const DiskCase* c, size_t world, bool async) {
    Way way = {world, world > 1 ? 2 : 0, c->trouble == HOT_FULL ? 12 : 4, 0, async, 0, 0};
    bool has_disk = c->trouble == FULL || c->trouble == HOT_FULL;
    char out[PATH_MAX], disk[PATH_MAX], hot[PATH_MAX + 64] = "";
    Job job;
    if (has_disk && !mounts) {
        skip(c->name, "this machine does not let the test mount a disk");
        return;
    }
    run_remove();
    snprintf(out, sizeof out, "%s", run_path());
    snprintf(disk, sizeof disk, "%.1000s/%s", place, c->trouble == HOT_FULL ? "hot" : "run");
    if (has_disk) need(disk_mount(disk, c->size), "%s", disk);
    if (c->trouble == HOT_FULL) snprintf(hot, sizeof hot, "--ckpt-hot 3 --ckpt-hot-dir %s", disk);
    drops_rights = c->trouble == READ_ONLY && geteuid() == 0;
    if (drops_rights) need(mkdir(out, 0755) == 0 && chown(out, 65534, 65534) == 0, "%s", out);
    bool acts = c->trouble == READ_ONLY || c->trouble == DELETED;
    // What is written beside training keeps the disk full for a while, in which the log must do without it.
    const char* fault = acts ? SLOWLY : c->trouble == FULL && async ? "rank 0 step 1 at flush do delay 50" : NULL;
    file_limit = c->trouble == SHORT_WRITES ? c->size : 0;
    job_start(&job, world, arguments_of(&way, hot), &NO_BLOW, fault);
    file_limit = 0;
    while (acts && !directory_exists(text_of("%s/step_00000004", out)) && now_ms() < job.began_ms + LIMIT_MS)
        sleep_ms(1);
    if (c->trouble == READ_ONLY) chmod(out, 0555);
    if (c->trouble == DELETED) remove_tree(out);
    job_wait(&job, &NO_BLOW);
    bool good = job_good(&job);
    check_survivors(&job);
    expect(!c->message || strstr(job.text[1], c->message), "it does not say '%s'", c->message);
    expect(good || strncmp(job.text[1], "train: ", 7) == 0, "it fails without a sentence");
    expect(!good || c->trouble == DELETED || c->trouble == HOT_FULL,
           "it says that all is well, though its last step cannot be saved");
    if (good) check_weights();
    expect(c->trouble == DELETED || log_last(out) == STEPS,
           "training did not go on: it ended after step %zu", log_last(out));
    expect(!good || job.text[1][0] != 0, "it says nothing of the trouble");
    check_whole(out);
    expect(c->trouble != READ_ONLY || directory_exists(text_of("%s/step_00000004", out)),
           "the first checkpoint is gone");
    if (harness_now.failures) blame_job(&job);
    job_free(&job);

    // The trouble is over: the run goes on.
    if (c->trouble == FULL) need(mount("tmpfs", disk, "tmpfs", MS_REMOUNT, "size=64m") == 0, "%s", disk);
    if (c->trouble == READ_ONLY) chmod(out, 0755);
    if (run_well(&job, world, arguments_of(&way, text_of("%s --resume", hot)))) {
        if (c->trouble == DELETED) check_weights();  // the log is gone
        else check_complete(world);
    }
    job_free(&job);
    drops_rights = false;
    if (has_disk) umount2(disk, MNT_DETACH);
    run_remove();
    verdict("%s: %zu rank%s, %s, %s", c->name, world, world > 1 ? "s" : "", async ? "async" : "sync",
            good ? "runs to its end" : "ends with a sentence, and resumes");
}

// In a process of its own, whose mounts nobody else sees.
static void disk_enter(void) {
    mounts = unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
    need(chmod(place, 0777) == 0, "%s", place);
}

static void disk_run(size_t i) { disk_case(&DISK_CASES[i / 2], i % 2 ? 3 : 1, i % 2); }

static void test_disk(void) { workers_share("disk", 2 * COUNT_OF(DISK_CASES), disk_enter, disk_run); }

// ------------------------------------------------------------------------------------------------
// A disk that fails: 'Input/output error', from the kernel for all that the trainer can see

#define SAVES_FAIL "/step_00000008"  // what has this in its path is the first that the disk does not take
#define FAIL_STEP ((size_t)8)        // its step

enum { DISK_CHANGES = DISK_WRITE | DISK_FLUSH | DISK_RENAME | DISK_OPEN | DISK_MAKE | DISK_REMOVE | DISK_CUT };

static const struct { const char* name; unsigned calls; const char* inside; } FAILING_SAVES[] = {
    {"flushes", DISK_FLUSH, ".safetensors"},
    {"writes", DISK_WRITE, "/step_"},
    {"renames", DISK_RENAME, "/step_"},
    {"all that changes --out", DISK_CHANGES, "/run"},
};
enum { FAILING_SAVE_COUNT = COUNT_OF(FAILING_SAVES) };

static BadDisk disk_that_fails(unsigned calls, const char* inside, const char* after, uint64_t first, uint64_t length) {
    BadDisk disk;
    memset(&disk, 0, sizeof disk);
    disk.calls = calls;
    disk.error = EIO;
    disk.inside = inside;
    disk.after = after;
    disk.first = first;
    disk.length = length;
    return disk;
}

static void job_run_on(BadDisk* disk, size_t rank, Job* job, size_t world, const char* arguments, const char* fault) {
    bad_disk = disk;
    bad_rank = rank;
    job_start(job, world, arguments, &NO_BLOW, fault);
    job_wait(job, &NO_BLOW);
    bad_disk = NULL;
    bad_rank = SIZE_MAX;
    check_survivors(job);
}

// A run that ended with an error ended with a sentence that gives the reason.
static void check_sentence(const Job* job) {
    const char* text = job->text[1];
    const char* last = text;
    for (const char* at = text; (at = strchr(at, '\n')) != NULL && at[1]; last = ++at) continue;
    expect(strncmp(last, "train: ", 7) == 0 && strstr(last, strerror(EIO)),
           "it ends without a sentence that says '%s': %.300s", strerror(EIO), text);
}

// Every save after the first fails: one sentence for each, to the end. Of 1 rank or of 3, sync or async.
static void failing_save(size_t kind, size_t index) {
    Way way = {index < 2 ? 1 : 3, index < 2 ? 0 : 2, 4, 0, index % 2, 0, 0};
    size_t rank = index < 2 ? 0 : index - 1, told = 0, last_good = FAIL_STEP - way.every;
    BadDisk disk = disk_that_fails(FAILING_SAVES[kind].calls, FAILING_SAVES[kind].inside, SAVES_FAIL, 0, UINT64_MAX);
    bool log_fails = rank == 0 && strcmp(disk.inside, "/step_") != 0;
    char* end;
    Job job;
    run_remove();
    // Another rank that still writes hears of the failure first: the reason must not be lost by that.
    const char* fault = way.async ? "rank 1 step 1 at write do delay 50" : NULL;
    job_run_on(&disk, rank, &job, way.world, arguments_of(&way, ""), fault);
    expect(program_code(&job.ranks[0]) == 1, "it should end with exit code 1");
    check_sentence(&job);
    for (char* line = job.ranks[0].text[1]; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        size_t step = strstr(line, "train: step ") == line ? (size_t)strtoull(line + 12, NULL, 10) : 0;
        bool of_log = log_fails && (strstr(line, "metrics.jsonl") || strstr(line, "events.jsonl")), last = end[1] == 0;
        told += step > 0;
        expect(step == 0 || step == last_good + told * way.every, "unexpected: %s", line);
        expect(step != 0 || of_log || last, "unexpected: %s", line);
        expect(strstr(line, run_path()) && strstr(line, strerror(EIO)), "no path, or no reason: %s", line);
    }
    size_t expected = (STEPS - 1 - last_good) / way.every;
    expect(told == expected, "%zu failed saves are told of %zu", told, expected);
    expect(log_fails || log_hash(run_path(), NULL) == reference.log[way.world], "another log than the reference's");
    check_whole(run_path());
    if (harness_now.failures) blame_job(&job);
    job_free(&job);
    resume_completes(&way, "", last_good);
    verdict("%s fail: rank %zu of %zu, %s: trains to the end, and resumes from step %zu", FAILING_SAVES[kind].name,
            rank, way.world, way.async ? "async" : "sync", last_good);
}

// The log's disk fails for a while.
static void failing_log(size_t index) {
    Way way = {1, 0, 4, 0, index, 0, 0};
    BadDisk disk = disk_that_fails(DISK_WRITE, "metrics.jsonl", SAVES_FAIL, 0, 10);
    Job job;
    run_remove();
    job_run_on(&disk, 0, &job, way.world, arguments_of(&way, ""), NULL);
    expect(job_good(&job) && disk.failed == disk.length, "%zu writes failed", (size_t)disk.failed);
    expect(strstr(job.text[1], strerror(EIO)) && strstr(job.text[1], "metrics.jsonl"), "it does not say what failed");
    check_complete(way.world);
    if (harness_now.failures) blame_job(&job);
    job_free(&job);
    verdict("the log cannot be written for a while, %s: no line is lost", way.async ? "async" : "sync");
}

static char half[PATH_MAX];  // a run that was killed, with checkpoints of the steps 10 and 20
static const Way HALF_WAY = {1, 0, 10, 0, false, 0, 0};

static void half_restore(void) {
    run_remove();
    need(system(text_of("cp -R '%s' '%s'", half, run_path())) == 0, "a copy of a run");
}

// What cannot be read is named, or ends the run; a run is never begun anew over one that is there.
static const struct {
    const char* name;
    unsigned calls;
    const char* inside;
    size_t world, rank, from;  // from: the step; SIZE_MAX: it ends
    int error;
} FAILING_LOADS[] = {
    {"the newest checkpoint", DISK_READ, "/step_00000020", 1, 0, 10, EIO},
    {"the newest checkpoint, by one of three ranks", DISK_READ, "/step_00000020/rank_", 3, 1, 10, EIO},
    {"the files of the newest checkpoint cannot be opened", DISK_OPEN, "/step_00000020/", 1, 0, 10, EIO},
    {"the manifest of the newest, for want of descriptors", DISK_OPEN, "/step_00000020/manifest", 1, 0, SIZE_MAX,
     EMFILE},
    {"its files, for want of descriptors of one of three ranks", DISK_OPEN, "/step_00000020/rank_", 3, 1, SIZE_MAX,
     EMFILE},
    {"its files, for want of memory", DISK_READ, "/step_00000020/rank_", 1, 0, SIZE_MAX, ENOMEM},
    {"any checkpoint", DISK_READ, "/step_", 1, 0, SIZE_MAX, EIO},
    {"the list of checkpoints", DISK_LIST, "/run", 1, 0, SIZE_MAX, EIO},
    {"the directory of the run", DISK_OPEN, "/run", 3, 0, SIZE_MAX, EIO},
    {"the log", DISK_READ, "metrics.jsonl", 1, 0, SIZE_MAX, EIO},
};

static void failing_load(size_t i) {
    size_t world = FAILING_LOADS[i].world, from = FAILING_LOADS[i].from;
    Way way = HALF_WAY;
    BadDisk disk = disk_that_fails(FAILING_LOADS[i].calls, FAILING_LOADS[i].inside, NULL, 0, UINT64_MAX);
    Job job;
    disk.error = FAILING_LOADS[i].error;
    half_restore();
    uint64_t log = log_hash(run_path(), NULL);
    way.world = world;
    job_run_on(&disk, FAILING_LOADS[i].rank, &job, world, arguments_of(&way, "--resume"), NULL);
    bool good = job_good(&job);
    expect(good == (from != SIZE_MAX), good ? "it trains" : "it does not train");
    expect(!good || resumed_from(&job) == from, "it resumed from step %zu", resumed_from(&job));
    expect(strstr(job.text[1], strerror(disk.error)) && strstr(job.text[1], disk.inside),
           "it does not say what cannot be read");
    if (good) check_weights();
    else if (log_hash(run_path(), NULL) != log) blame("it has changed the log");
    check_whole(run_path());
    if (harness_now.failures) blame_job(&job);
    job_free(&job);
    if (!good) resume_completes(&HALF_WAY, "", 20);
    verdict("cannot be read: %s: %s", FAILING_LOADS[i].name,
            good ? "the one before it is used" : "it ends with a sentence");
}

// Every call of a run that touches --out fails in turn, once.
static uint64_t calls_made[2];  // by a run that begins, and by one that resumes

static const char* one_call_arguments(bool resumes) {
    return arguments_of(&HALF_WAY, resumes ? "--ckpt-keep 1 --resume" : "--ckpt-keep 1");
}

static void count_calls(bool resumes) {
    BadDisk disk = disk_that_fails(DISK_ALL, "/run", NULL, 0, 0);
    Job job;
    run_remove();
    if (resumes) half_restore();
    job_run_on(&disk, 0, &job, 1, one_call_arguments(resumes), NULL);
    if (!job_good(&job)) blame_job(&job);
    check_complete(1);
    calls_made[resumes] = disk.met;
    job_free(&job);
    verdict("a run that %s touches its directory %zu times", resumes ? "resumes" : "begins", (size_t)disk.met);
}

static void one_call_fails(bool resumes, uint64_t number) {
    BadDisk disk = disk_that_fails(DISK_ALL, "/run", NULL, number, 1);
    Job job;
    run_remove();
    if (resumes) half_restore();
    job_run_on(&disk, 0, &job, 1, one_call_arguments(resumes), NULL);
    // What is written is needed; what prunes may fail until the next save.
    bool good = job_good(&job), needed = (disk.kind & DISK_CHANGES) && disk.kind != DISK_REMOVE;
    size_t saved = max_size(last_saved(&job), resumes ? 20 : 0);
    expect(disk.failed == 1, "no call failed");
    if (good) check_weights();
    expect(!good || log_hash(run_path(), NULL) == reference.log[1], "another log than the reference's");
    needed = needed && (strstr(disk.path, ".tmp") || strstr(disk.path, "metrics.jsonl"));
    expect(!good || !needed || strstr(job.text[1], strerror(EIO)), "it says nothing of it");
    if (!good) check_sentence(&job);
    expect(!resumes || !good || resumed_from(&job) == 20 || strstr(job.text[1], "trying the checkpoint before it"),
           "it goes on from step %zu and says nothing of it", resumed_from(&job));
    check_whole(run_path());
    if (harness_now.failures) blame_job(&job);
    job_free(&job);
    if (run_well(&job, 1, one_call_arguments(true))) {
        size_t from = resumed_from(&job);
        expect(from >= saved && from <= STEPS, "then it resumed from step %zu, though %zu was saved", from, saved);
        check_complete(1);
    }
    job_free(&job);
    verdict("call %zu of a run that %s, a %s of %s: %s", (size_t)number, resumes ? "resumes" : "begins",
            disk_kind_name(disk.kind), strstr(disk.path, "/run") ? strstr(disk.path, "/run") + 1 : "?",
            good ? "it runs to its end" : "it ends with a sentence");
}

// Reads and writes that do half of what they are asked, always.
static void halved(size_t index) {
    Way way = {index ? 3 : 1, index ? 1 : 0, 5, 3, index, 0, 0};
    Blow blow = {SIGKILL, true, 0, "load", 18, 0, 0};
    BadDisk disk = disk_that_fails(DISK_READ | DISK_WRITE, "/run", NULL, 0, UINT64_MAX);
    uint64_t failed;
    Job job;
    disk.error = 0;
    run_remove();
    bad_disk = &disk;
    job_start(&job, way.world, arguments_of(&way, ""), &blow, NULL);
    job_wait(&job, &blow);
    bad_disk = NULL;
    failed = disk.failed;
    expect(job.struck, "it was not killed");
    check_whole(run_path());
    job_free(&job);
    job_run_on(&disk, SIZE_MAX, &job, way.world, arguments_of(&way, "--resume"), NULL);
    size_t from = resumed_from(&job);
    if (!job_good(&job) || from < 10 || from == SIZE_MAX) blame_job(&job);
    expect(failed >= 100 && disk.failed >= failed + 100,
           "only %zu, %zu calls were cut", (size_t)failed, (size_t)disk.failed);
    job_free(&job);
    check_complete(way.world);
    verdict("%zu reads and writes did half of what they were asked: %zu rank%s, %s", (size_t)disk.failed, way.world,
            way.world > 1 ? "s" : "", way.async ? "async" : "sync");
}

enum { FAILING_LOAD_COUNT = COUNT_OF(FAILING_LOADS), SAMPLED_CALLS = 8 };

// With 500 kills everything; else each kind of save in two of the four ways, and some calls.
static bool all_fail(void) { return test.kills >= 500; }

static size_t calls_of(bool resumes) {
    return all_fail() ? (size_t)calls_made[resumes] : min_size(SAMPLED_CALLS, (size_t)calls_made[resumes]);
}

static size_t failing_count(size_t part) {
    const size_t saves = FAILING_SAVE_COUNT * (all_fail() ? 4 : 2);
    const size_t counts[] = {saves, FAILING_LOAD_COUNT, 2, 2, calls_of(false), calls_of(true)};
    return part < COUNT_OF(counts) ? counts[part] : 0;
}

static void failing_case(size_t i) {
    size_t part = 0;
    while (i >= failing_count(part)) i -= failing_count(part++);
    bool resumes = part == 5;
    if (part == 0) failing_save(i / (all_fail() ? 4 : 2), all_fail() ? i % 4 : 2 * (i % 2) + i / 2 % 2);
    else if (part == 1) failing_load(i);
    else if (part == 2) failing_log(i);
    else if (part == 3) halved(i);
    else one_call_fails(resumes, (i * calls_made[resumes] / calls_of(resumes) + test.seed) % calls_made[resumes]);
}

static void test_failing(void) {
    Blow blow = {SIGKILL, true, 0, "load", 23, 0, 0};
    if (!bad_disk_possible()) {
        skip("a disk that fails", "this machine does not let the test answer system calls (seccomp)");
        return;
    }
    run_remove();
    snprintf(half, sizeof half, "%.1000s/half", root);
    run_killed(1, arguments_of(&HALF_WAY, ""), &blow);
    need(rename(run_path(), half) == 0, "%s", half);
    for (int resumes = 0; resumes < 2; resumes++) count_calls(resumes);
    size_t cases = 0;
    for (size_t part = 0; failing_count(part) > 0; part++) cases += failing_count(part);
    workers_share("failing", cases, NULL, failing_case);
    remove_tree(half);
}

// ------------------------------------------------------------------------------------------------
// A clock that is set back

// Goes an hour back whenever a file takes its name, and far forward once; that is also what the files say.
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

// The checkpoints of the highest step and of the latest time in a directory, and how many there are.
static size_t newest_of(const char* out, size_t* by_step, size_t* by_time) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    time_t latest = 0;
    *by_step = *by_time = 0;
    while (checkpoint_before(&step, out, step)) {
        struct stat status;
        if (stat(text_of("%s/step_%08llu", out, (unsigned long long)step), &status) != 0) continue;
        if (count++ == 0) *by_step = (size_t)step;
        if (count == 1 || status.st_mtime > latest) *by_time = (size_t)step;
        if (count == 1 || status.st_mtime > latest) latest = status.st_mtime;
    }
    return count;
}

// Saves by the minute, prunes, keeps copies in memory, and is killed, while the clock goes back and forth.
static void clock_case(size_t world, bool async) {
    enum { LINES = 18, KEEP = 3, SAVES_LEAST = 5 };
    Way way = {world, world > 1 ? 1 : 0, 1, 4, async, 0, 0};
    Blow blow = {SIGKILL, true, 0, NULL, 0, LINES, 0};
    size_t by_step, hot_step, ignored, saves = 0;
    char arguments[4096], minutes[4096];
    struct stat newest;
    Job job;
    run_remove();
    snprintf(arguments, sizeof arguments, "%s", arguments_of(&way, "--ckpt-keep 3"));
    char* every = strstr(arguments, "--ckpt-every 1 ");
    need(every != NULL, "the flag");
    snprintf(minutes, sizeof minutes, "%.*s--ckpt-every 0.001min %.2000s", (int)(every - arguments), arguments,
             every + strlen("--ckpt-every 1 "));
    job_start(&job, world, minutes, &blow, SLOWLY);
    job_wait(&job, &blow);
    expect(job.struck, "it was not killed");
    for (const char* at = job.text[0]; (at = strstr(at, "\nsaved ")) != NULL; at++) saves++;
    expect(saves >= SAVES_LEAST, "in %d slow steps it saved only %zu times", LINES, saves);
    size_t count_left = newest_of(run_path(), &by_step, &ignored), saved = last_saved(&job);
    newest_of(hot_path(run_path()), &hot_step, &ignored);
    expect(by_step >= saved && count_left >= KEEP && count_left <= KEEP + 1,
           "of %zu saves, the last of step %zu, %zu are left, up to step %zu", saves, saved, count_left, by_step);
    bool there = stat(text_of("%s/step_%08zu", run_path(), by_step), &newest) == 0;
    expect(there && fabs(difftime(newest.st_mtime, time(NULL))) >= 1800, "the clock was not set");
    check_survivors(&job);
    check_whole(run_path());
    job_free(&job);
    snprintf(arguments, sizeof arguments, "%.4000s --resume", minutes);
    if (run_well(&job, world, arguments)) {
        expect(resumed_from(&job) == max_size(by_step, hot_step),
               "it resumed from step %zu, not %zu", resumed_from(&job), max_size(by_step, hot_step));
        check_complete(world);
    }
    job_free(&job);
    verdict("the clock goes back and forth: %zu rank%s, %s: %zu saves, resumed from the newest", world,
            world > 1 ? "s" : "", async ? "async" : "sync", saves);
}

// The oldest checkpoint has the newest time.
static void old_looks_new(void) {
    Way way = {1, 0, 4, 0, false, 0, 0};
    Blow blow = {SIGKILL, true, 0, "load", 18, 0, 0};
    size_t by_step, by_time;
    Job job;
    run_remove();
    run_killed(1, arguments_of(&way, ""), &blow);
    for (size_t step = 4; step <= 16; step += 4) {
        static const char* const names[] = {"", "/manifest.json", "/rank_00000.safetensors"};
        const struct timespec time = {(time_t)(2000000000 - 100000000 * step), 0}, times[2] = {time, time};
        for (size_t f = 0; f < 3; f++)
            need(utimensat(AT_FDCWD, text_of("%s/step_%08zu%s", run_path(), step, names[f]), times, 0) == 0, "a time");
    }
    newest_of(run_path(), &by_step, &by_time);
    expect(by_step == 16 && by_time == 4, "steps %zu and %zu are the newest", by_step, by_time);
    if (run_well(&job, 1, arguments_of(&way, "--ckpt-keep 2 --resume"))) {
        expect(resumed_from(&job) == 16, "it resumed from step %zu", resumed_from(&job));
        check_complete(1);
        expect(newest_of(run_path(), &by_step, &by_time) == 2 && by_step == STEPS, "it kept others than the newest");
    }
    job_free(&job);
    verdict("the oldest checkpoint has the newest time: resumed from the highest step, and kept the highest two");
}

static void clock_run(size_t i) {
    if (i == 2) old_looks_new();
    else clock_case(i ? 3 : 1, i);
}

static void test_clock(void) {
    char library[PATH_MAX];
    const char* compiler = getenv("CC");
    snprintf(library, sizeof library, "%.1000s/clock.so", root);
    put_bytes(text_of("%s/clock.c", root), CLOCK_SOURCE, strlen(CLOCK_SOURCE));
    bool compiles = system(text_of("%s -shared -fPIC -O1 -o '%s' '%s/clock.c' > /dev/null 2>&1",
                                   compiler && compiler[0] ? compiler : "cc", library, root)) == 0;
    bool works = compiles && system(text_of("LD_PRELOAD='%s' '%s' --help > /dev/null 2>&1", library, test.train)) == 0;
    if (!works)
        skip("a clock that is set back",
             compiles ? "the program wants its own libraries first, as with the address sanitizer"
                      : "there is no C compiler; set CC");
    preload = library;
    if (works) workers_share("clock", 3, NULL, clock_run);
    preload = NULL;
    if (!works) old_looks_new();
}
// ------------------------------------------------------------------------------------------------
// Other numbers of ranks; copies in memory

static void test_reshard(void) {
    static const struct { size_t world, zero, end; } legs[] = {{3, 2, 8}, {2, 1, 16}, {1, 0, 24}, {4, 2, STEPS}};
    enum { LEGS = COUNT_OF(legs) };
    double losses[STEPS];
    run_remove();
    for (size_t i = 0; i < LEGS; i++) {
        Way way = {legs[i].world, legs[i].zero, 8, 0, false, 0, 0};
        Blow blow = {i + 1 < LEGS ? SIGKILL : 0, true, 0, "load", legs[i].end + 1, 0, 0};
        Job job;
        job_start(&job, way.world, arguments_of(&way, i ? "--resume" : ""), &blow, NULL);
        job_wait(&job, &blow);
        if (blow.signal ? !job.struck : !job_good(&job)) blame_job(&job);
        expect(i == 0 || resumed_from(&job) == legs[i - 1].end, "it did not resume from step %zu", legs[i - 1].end);
        expect(weights_of(legs[i].end) == reference.weights[legs[i].end], "other tensors than one rank's");
        job_free(&job);
        verdict("%zu ranks, --zero %zu, until step %zu: the tensors of one rank that nobody killed", way.world,
                way.zero, legs[i].end);
    }
    log_hash(run_path(), losses);
    for (size_t i = 0; i < STEPS; i++)
        expect(fabs(losses[i] / reference.losses[1][i] - 1) < LOSS_BOUND,
               "loss of step %zu: %.9g, of one rank %.9g", i + 1, losses[i], reference.losses[1][i]);
    verdict("the losses of 3, 2, 1 and 4 ranks in turn are those of one");
    run_remove();
}

static void check_left(const char* when, const size_t* steps, size_t count) {
    for (size_t i = 0; i < count; i++)
        expect(weights_of(steps[i]) == reference.weights[steps[i]], "%s: step %zu is not there", when, steps[i]);
    expect(checkpoints_left(run_path()) == count, "%s: %zu checkpoints are left", when, checkpoints_left(run_path()));
}

// A resume that saves half as often keeps the checkpoints that are there.
static void prune_less_often(void) {
    static const size_t steps[] = {4, 8, 12, 16, 24, STEPS};
    Way way = {1, 0, 4, 0, false, 0, 0};
    Blow blow = {SIGKILL, true, 0, "load", 14, 0, 0};
    run_remove();
    run_killed(1, arguments_of(&way, ""), &blow);
    way.every = 8;
    way.async = true;
    resume_completes(&way, "", ANYWHERE);
    check_left("at the end", steps, COUNT_OF(steps));
    verdict("saves every 4 steps, then every 8: all whole ones stay");
}

// Killed while an old checkpoint is removed. It holds so many other files that this takes a while.
static void test_prune(void) {
    enum { FILES = 3000 };
    Way way = {1, 0, 4, 0, false, 0, 0};
    char old[PATH_MAX];
    Job job;
    prune_less_often();
    run_remove();
    snprintf(old, sizeof old, "%.4000s/step_00000004", run_path());
    job_start(&job, 1, arguments_of(&way, "--ckpt-keep 1"), &NO_BLOW, SLOWLY);
    while (!directory_exists(old) && now_ms() < job.began_ms + LIMIT_MS) sleep_ms(1);
    for (size_t i = 0; i < FILES; i++) {
        int file = open(text_of("%s/%zu", old, i), O_WRONLY | O_CREAT, 0666);
        if (file >= 0) close(file);
    }
    bool there = true, whole = true;
    while (there && whole && now_ms() < job.began_ms + LIMIT_MS) {
        whole = access(text_of("%s/manifest.json", old), F_OK) == 0 &&
                access(text_of("%s/rank_00000.safetensors", old), F_OK) == 0;
        there = directory_exists(old);
    }
    kill(job.ranks[0].pid, SIGKILL);
    job_wait(&job, &NO_BLOW);
    job_free(&job);
    check_whole(run_path());
    resume_completes(&way, "--ckpt-keep 1", ANYWHERE);
    run_remove();
    verdict("killed while an old checkpoint is removed: there is none that is not whole");
}

// The first start does not find --out, the second does: both must keep their copies in one place.
static void hot_relative(void) {
    Way way = {1, 0, 20, 2, false, 0, 0};
    Blow blow = {SIGKILL, true, 0, "load", 8, 0, 0};
    char absolute[PATH_MAX], *relative = NULL, arguments[2048];
    Job job;
    run_remove();
    snprintf(absolute, sizeof absolute, "%s", run_path());
    snprintf(arguments, sizeof arguments, "%.2000s", arguments_of(&way, "--resume"));
    need(chdir(place) == 0 && (relative = strstr(arguments, absolute)) != NULL, "%s", place);
    memmove(relative, relative + strlen(absolute) - 3, strlen(relative + strlen(absolute) - 3) + 1);  // leaves "run"
    remove_tree(hot_path("run"));
    run_killed(1, arguments, &blow);
    run_well(&job, 1, arguments);
    expect(resumed_from(&job) == 6, "it resumed from step %zu, though there was a copy of step 6 in memory",
           resumed_from(&job));
    job_free(&job);
    check_complete(1);
    expect(!directory_exists(hot_path("run")), "%s is left behind", hot_path("run"));
    verdict("copies in memory of a run whose --out is relative and new");
    remove_tree(hot_path("run"));
    run_remove();
}

// Saves at 5, copies in memory at 4 and 6, killed in step 8: what happens to the copies decides where the run goes on.
static void hot_then(const char* what, const char* damaged, bool lost, size_t expected) {
    Way way = {3, 2, 5, 2, false, 0, 0};
    Blow blow = {SIGKILL, true, 0, "load", 8, 0, 0};
    Job job;
    run_remove();
    run_killed(way.world, arguments_of(&way, ""), &blow);
    const char* hot = hot_path(run_path());
    expect(directory_exists(text_of("%s/step_00000006", hot)), "there is no copy of step 6 in memory");
    expect(!damaged || truncate(text_of("%s/%s", hot, damaged), 100) == 0, "there is no %s", damaged);
    if (lost) remove_tree(hot);
    if (run_well(&job, way.world, arguments_of(&way, "--resume"))) {
        expect(resumed_from(&job) == expected,
               "it resumed from step %zu in place of %zu", resumed_from(&job), expected);
        expect(!damaged || strstr(job.text[1], damaged), "it does not name %s", damaged);
        check_complete(way.world);
    }
    job_free(&job);
    run_remove();
    verdict("copies in memory %s", what);
}

static void test_hot(void) {
    hot_then("are newer: used", NULL, false, 6);
    hot_then("are damaged: the checkpoint before is used", "step_00000006/rank_00002.safetensors", false, 5);
    hot_then("have no good manifest: the checkpoint before is used", "step_00000006/manifest.json", false, 5);
    hot_then("are gone with the machine: the newest checkpoint is used", NULL, true, 5);
    hot_relative();
}

// ------------------------------------------------------------------------------------------------
// Rewinds
//
// Every skipped step counts as a divergence; each run has several.

#define REWINDS "--diverged-after 1 --rewind 99 --rewind-lr 0.99 --ckpt-keep 6"
enum { REWOUND_MAX = 32, REWIND_POINTS = 4, REWIND_KILLS = 8, REWIND_STOPS = 14 };  // of each way, up to so many

static const Way REWIND_WAYS[] = {{1, 0, 2, 0, false, 0, 0}, {3, 2, 2, 1, true, 0, 0}};
enum { REWIND_WAYS_COUNT = COUNT_OF(REWIND_WAYS) };

static struct {
    uint64_t weights, log;
    size_t steps[REWOUND_MAX], count;  // in which the run diverged
} rewound[REWIND_WAYS_COUNT];          // what a run of each way leaves that nobody kills

static void rewind_reference(size_t way) {
    Job job;
    size_t bytes;
    run_remove();
    if (run_well(&job, REWIND_WAYS[way].world, arguments_of(&REWIND_WAYS[way], REWINDS))) {
        char* events = text_read(text_of("%s/events.jsonl", run_path()), &bytes);
        const char mark[] = "\"event\": \"rewound\",\"step\": ";
        for (const char* at = events; (at = strstr(at, mark)) != NULL && rewound[way].count < REWOUND_MAX; at++)
            rewound[way].steps[rewound[way].count++] = (size_t)strtoull(at + sizeof mark - 1, NULL, 10);
        free(events);
        rewound[way].weights = weights_of(STEPS);
        rewound[way].log = log_hash(run_path(), NULL);
        expect(rewound[way].count >= 2 && rewound[way].weights != 0, "it rewound %zu times", rewound[way].count);
    }
    job_free(&job);
    verdict("%zu ranks: a run that diverges goes back %zu times, and ends", REWIND_WAYS[way].world, rewound[way].count);
}

static void rewind_case(size_t i) {
    size_t number = i / REWIND_WAYS_COUNT, way_number = i % REWIND_WAYS_COUNT;
    const Way* way = &REWIND_WAYS[way_number];
    Dice dice = {i, 0};
    Blow blow = {SIGKILL, number % 2 == 0, dice_below(&dice, way->world), NULL, 0, 0, 0};
    char what[256];
    Job job;
    if (number >= REWIND_KILLS) {  // told to stop, it saves what a rewind must not use
        blow.signal = SIGTERM;
        blow.all = true;
    }
    if (number < REWIND_POINTS) {  // the later points of a run are passed after another rewind
        blow.point = number / 2 % 2 ? "rewind" : "forget";
        blow.step = rewound[way_number].steps[dice_below(&dice, rewound[way_number].count)];
    } else {
        blow.lines = dice_below(&dice, STEPS);
        blow.after_ms = (double)dice_below(&dice, 15);
    }
    describe(what, way, &blow);
    run_remove();
    job_start(&job, way->world, arguments_of(way, REWINDS), &blow, NULL);
    job_wait(&job, &blow);
    expect(!blow.point || job.struck, "it did not come to the point");
    if (job.struck) check_survivors(&job);
    if (job.struck) count_add(&shared->kills, 1);
    job_free(&job);
    if (run_well(&job, way->world, arguments_of(way, REWINDS " --resume"))) {
        expect(weights_of(STEPS) == rewound[way_number].weights, "other weights than the run's that nobody killed");
        expect(log_hash(run_path(), NULL) == rewound[way_number].log, "another log than the run's that nobody killed");
    }
    job_free(&job);
    verdict("rewinding: %s", what);
}

// A run that saves less often than before it was killed goes back to what it saved then.
static void rewind_other_cadence(void) {
    Way way = REWIND_WAYS[0];
    Blow blow = {SIGKILL, true, 0, "load", rewound[0].steps[0], 0, 0};
    Job job;
    run_remove();
    run_killed(1, arguments_of(&way, REWINDS), &blow);
    way.every = STEPS - 1;
    if (run_well(&job, 1, arguments_of(&way, REWINDS " --resume"))) {
        const char* went = strstr(job.text[0], text_of("went back from step %zu to ", rewound[0].steps[0]));
        bool to_checkpoint = went && strstr(went, " to 0: ") != strstr(went, " to ");
        expect(to_checkpoint, "it did not go back to a checkpoint");
    }
    job_free(&job);
    verdict("rewinding with another --ckpt-every");
}

static void test_rewind(void) {
    for (size_t way = 0; way < REWIND_WAYS_COUNT; way++) rewind_reference(way);
    workers_share("rewind", REWIND_STOPS * REWIND_WAYS_COUNT, NULL, rewind_case);
    rewind_other_cadence();
}

// ------------------------------------------------------------------------------------------------

// The directory, with the program in it, since others than this user are to start it.
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
        {"failing", test_failing}, {"clock", test_clock},
        {"prune", test_prune}, {"reshard", test_reshard}, {"hot", test_hot},
        {"rewind", test_rewind},
    };
    enum { TESTS = sizeof tests / sizeof tests[0] };
    const char* train = "./train";
    char train_path[PATH_MAX];
    int code;
    test.kills = 60;
    test.seed = 1;
    test.workers = 4;
    Flag flags[] = {
        {"train", FLAG_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"kills", FLAG_COUNT, &test.kills, "N", 1, 1e9,
         "kills at least; from 500 on every byte of a checkpoint is damaged and every call fails, too", false},
        {"seed", FLAG_COUNT, &test.seed, "N", 0, 9e15, "of what the cases leave to chance", false},
        {"workers", FLAG_COUNT, &test.workers, "N", 1, 64, "cases at a time", false},
        {"only", FLAG_TEXT, &test.only, "NAME", 0, 0, "one of the tests (and the references)", false},
        {"case", FLAG_COUNT, &test.one_case, "I", 1, 1e9, "one case of the kills", false},
    };
    if (!flags_begin(&code, "soak", NULL, flags, COUNT_OF(flags), argc, argv)) return code;
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
        if (!wanted && i > 0) continue;  // the references are needed by the others
        tests[i].run();
        printf("%s: %.1f s\n", tests[i].name, (now_ms() - began) / 1e3);
    }
    if (shared->kills > 0) print_modes();
    return tests_end();
}
