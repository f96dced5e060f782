// test_supervise.c: the supervisor of a run, against commands that die, stop, hang, ignore signals and print too much.
//
//   make build/supervise build/test_supervise build/train-FP32
//   build/test_supervise --train build/train-FP32
//   build/test_supervise --train ... --slack 10000                  on a slow machine, or under a sanitizer
//
//   1. cases     a supervisor in a directory of its own, what it ends with, and what it leaves
//   2. acts      what the commands do: this program, started as `test_supervise act NAME`
//   3. checks    of each case
//   4. trainer   a real run of two ranks: killed, hung, and of one rank less; it ends with the bits of one left alone
//   5. units     heartbeats, events, words of a command, who is blamed
//   6. lanes     cases at once, since they wait most of the time
//
// Acts leave a line in the file `trace` for whatever a check wants to know: what, process, time, more.

#include "llmtrain/data.h"
#define main supervise_main  // the program is included, so that what is tested is what ships
#include "launch/supervise.c"
#undef main
#include "pieces.h"

#include <ftw.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define CASE_MS 60e3        // after which a supervisor is said to hang
#define FLOOD_BYTES ((size_t)10 << 20)

static int passed, failed;
static double slack_ms = 3000;  // what a busy machine may add
static const char* case_name = "";
static char self_path[FILE_PATH_MAX], train_path[FILE_PATH_MAX], supervise_path[FILE_PATH_MAX];

static bool check(bool ok, const char* what) {
    *(ok ? &passed : &failed) += 1;
    if (!ok) printf("%s: %s   FAILED\n", case_name, what);
    return ok;
}

// lowest <= value <= highest; NaN fails.
static bool check_between(double value, double lowest, double highest, const char* what) {
    bool ok = value >= lowest && value <= highest;
    *(ok ? &passed : &failed) += 1;
    if (!ok) printf("%s: %s: %g is not from %g to %g   FAILED\n", case_name, what, value, lowest, highest);
    return ok;
}

static bool check_text(const char* text, const char* fragment) {
    bool ok = strstr(text, fragment) != NULL;
    *(ok ? &passed : &failed) += 1;
    if (!ok) printf("%s: '%s' is not in: %.600s   FAILED\n", case_name, fragment, text);
    return ok;
}

static void must(bool ok, const char* what) {
    if (ok) return;
    printf("test_supervise: cannot go on: %s: %s\n0 passed, 1 failed\n", what, strerror(errno));
    exit(1);
}

// ------------------------------------------------------------------------------------------------
// 1. Cases

typedef struct {
    pid_t supervisor;
    int code;               // it ended with; 128 + signal
    double began, ended;
    int output;             // to read its standard output from, if it is a pipe; otherwise -1
} Case;

// Adds a line: what, process, milliseconds, more.
static void trace(const char* what, const char* more) {
    char line[512];
    int file = open("trace", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int bytes = snprintf(line, sizeof line, "%s %ld %.0f %s\n", what, (long)getpid(), now_ms(), more);
    if (file >= 0 && write(file, line, (size_t)bytes) == bytes) close(file);
}

// The number-th line (from 0) that begins with `what`; false if there are fewer. Any output may be NULL.
static bool trace_find(const char* what, size_t number, long* pid, double* ms, char more[512]) {
    char line[512], name[64], rest[512];
    long p;
    double t;
    bool found = false;
    FILE* file = fopen("trace", "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        rest[0] = 0;
        bool read = sscanf(line, "%63s %ld %lf %511[^\n]", name, &p, &t, rest) >= 3;
        if (!read || strcmp(name, what) != 0 || number-- > 0) continue;
        found = true;
        if (pid) *pid = p;
        if (ms) *ms = t;
        if (more) memcpy(more, rest, sizeof rest);
    }
    if (file) fclose(file);
    return found;
}

static size_t trace_count(const char* what) {
    size_t count = 0;
    while (trace_find(what, count, NULL, NULL, NULL)) count++;
    return count;
}

static double trace_ms(const char* what, size_t number) {
    double ms = NAN;
    trace_find(what, number, NULL, &ms, NULL);
    return ms;
}

static bool trace_await(const char* what, size_t number) {
    double until = now_ms() + CASE_MS / 2;
    while (!trace_find(what, number, NULL, NULL, NULL)) {
        if (now_ms() > until) return check(false, what);
        sleep_ms(5);
    }
    return true;
}

// A file that says something to whom it may concern.
static void mark(const char* name) {
    int file = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (file >= 0) close(file);
}

// Runs supervise_main in a process of its own with these words, in which SELF stands for this program, TRAIN for the
// trainer and SUPERVISE for the supervisor; a command that begins with TRAIN or SUPERVISE is run as it stands. Standard
// error goes to a file, standard output to another, or to a pipe.
static Case case_start(const char* words, bool piped) {
    static char text[4096];
    Case c = {0, -1, now_ms(), NAN, -1};
    int ends[2] = {-1, -1};
    must(!piped || pipe2(ends, O_CLOEXEC) == 0, "pipe");
    fflush(NULL);
    c.supervisor = fork();
    must(c.supervisor >= 0, "fork");
    if (c.supervisor > 0) {
        if (piped) close(ends[1]);
        c.output = ends[0];
        return c;
    }
    char* argv[64];
    int argc = 0, out = piped ? ends[1] : open("stdout", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int err = open("stderr", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    must(dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0, "dup2");
    bool whole = strncmp(words, "TRAIN ", 6) == 0 || strncmp(words, "SUPERVISE ", 10) == 0;
    snprintf(text, sizeof text, "%s%s", whole ? "" : "supervise ", words);
    for (char* word = strtok(text, " "); word && argc < 63; word = strtok(NULL, " ")) {
        if (strcmp(word, "SELF") == 0) word = self_path;
        else if (strcmp(word, "TRAIN") == 0) word = train_path;
        else if (strcmp(word, "SUPERVISE") == 0) word = supervise_path;
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    if (whole) execv(argv[0], argv);
    int code = supervise_main(argc, argv);
    fflush(NULL);
    _exit(code);
}

// Waits for its end.
static void case_end(Case* c) {
    int status = 0;
    pid_t pid = 0;
    for (double until = now_ms() + CASE_MS; pid == 0 && now_ms() < until;) {
        pid = waitpid(c->supervisor, &status, WNOHANG);
        if (pid == 0) sleep_ms(2);
    }
    c->ended = now_ms();
    if (!check(pid == c->supervisor, "the supervisor ends")) {
        kill(c->supervisor, SIGKILL);
        waitpid(c->supervisor, &status, 0);
    }
    c->code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (c->output >= 0) close(c->output);
}

static void case_run(const char* words, int code) {
    Case c = case_start(words, false);
    case_end(&c);
    check_between(c.code, code, code, "exit code");
}

// The text of a file, "" if there is none.
static const char* file_text(const char* path) {
    static char text[1 << 16];
    FILE* file = fopen(path, "re");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    if (file) fclose(file);
    return text;
}

static size_t count_in(const char* text, const char* fragment) {
    size_t count = 0;
    for (const char* at = text; (at = strstr(at, fragment)) != NULL; at++) count++;
    return count;
}

static size_t events_count(const char* event) {
    char fragment[64];
    snprintf(fragment, sizeof fragment, "\"event\": \"%s\"", event);
    return count_in(file_text("events.jsonl"), fragment);
}

static bool failure_read(Json* json, int number) {
    char path[64], *text;
    size_t bytes;
    Error error;
    snprintf(path, sizeof path, "failures/failure_%04d.json", number);
    if (!check(file_read(path, 1 << 20, &text, &bytes, &error), "the post-mortem is there")) return false;
    bool good = check(json_parse(json, text, bytes, path, &error), "the post-mortem is JSON");
    if (!good) printf("%s\n%s\n", error.text, text);
    free(text);
    return good;
}

// A value of the post-mortem as text: of the whole (rank < 0), or of a rank.
static const char* failure_value(const Json* json, int rank, const char* key) {
    static char text[2048];
    uint32_t node = 0;
    uint64_t number;
    if (rank >= 0)
        for (node = json_first(json, json_get(json, 0, "ranks")); node != JSON_NONE; node = json_next(json, node))
            if (json_u64(json, json_get(json, node, "rank"), &number) && (int)number == rank) break;
    uint32_t value = json_get(json, node, key);
    if (value == JSON_NONE) return "absent";
    const JsonNode* n = &json->nodes[value];
    snprintf(text, sizeof text, "%.*s", (int)n->bytes, json->text + n->start);
    return n->type == JSON_NULL ? "null" : n->type == JSON_TRUE ? "true" : n->type == JSON_FALSE ? "false" : text;
}

static void failure_check(const Json* json, int rank, const char* key, const char* expected) {
    char what[128];
    const char* value = failure_value(json, rank, key);
    snprintf(what, sizeof what, "post-mortem, rank %d: %s is %.40s, not %s", rank, key, value, expected);
    check(strcmp(value, expected) == 0, what);
}

// ------------------------------------------------------------------------------------------------
// 2. Acts

#define FAULT_ONCE "TEST_FAULT_ONCE"

// Forks rank 1 and opens the heartbeat of each; returns the rank.
static size_t act_ranks(size_t world) {
    Error error;
    size_t rank = 0;
    for (size_t i = 1; i < world && rank == 0; i++)
        if (fork() == 0) rank = i;
    if (!heartbeat_open(getenv(HEARTBEAT_VARIABLE), rank, world, &error)) fprintf(stderr, "%s\n", error.text);
    if (rank > 0) trace("rank", "");
    return rank;
}

static void act_steps(uint64_t first, uint64_t last) {
    for (uint64_t step = first; step <= last; step++) {
        heartbeat(HEARTBEAT_STEP, step);
        sleep_ms(2);
    }
}

// Beats for a while, longer than any case lasts.
static void act_on(uint64_t step) {
    for (double until = now_ms() + CASE_MS; now_ms() < until;) {
        heartbeat(HEARTBEAT_STEP, step);
        sleep_ms(20);
    }
}

static volatile sig_atomic_t act_signal;
static void act_handler(int number) { act_signal = number; }

// Works until a signal comes, and then says that it has saved.
static int act_preempted(void) {
    signal(SIGTERM, act_handler);
    signal(SIGUSR1, act_handler);
    act_ranks(1);
    trace("ready", "");
    for (double until = now_ms() + CASE_MS; !act_signal && now_ms() < until;) {
        heartbeat(HEARTBEAT_STEP, 5);
        sleep_ms(5);
    }
    heartbeat(HEARTBEAT_CHECKPOINT, 5);
    sleep_ms(200);
    char text[16];
    snprintf(text, sizeof text, "%d", (int)act_signal);
    trace("saved", text);
    return EXIT_SAVED;
}

static void act_flood(void) {
    static char chunk[1 << 16];
    for (size_t at = 0; at < FLOOD_BYTES; at += sizeof chunk) {
        for (size_t i = 0; i < sizeof chunk; i++) chunk[i] = (char)('a' + (at + i) / 7 % 26);
        for (size_t i = 0; i < sizeof chunk;) {
            ssize_t n = write(STDOUT_FILENO, chunk + i, sizeof chunk - i);
            if (n < 0) exit(9);
            i += (size_t)n;
        }
    }
}

// What a process inherits is as if there were no supervisor.
static bool act_is_clean(void) {
    sigset_t mask;
    struct sigaction pipe_action;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    sigaction(SIGPIPE, NULL, &pipe_action);
    bool clean = pipe_action.sa_handler == SIG_DFL && fcntl(3, F_GETFD) < 0 && getsid(0) == getpid();
    for (int number = 1; number < SIGRTMIN; number++) clean = clean && !sigismember(&mask, number);
    return clean;
}

// Leaves the supervisor two descriptors when the command has ended: enough for a file, too few for a start.
static void act_starve(void) {
    char path[64];
    struct rlimit limit;
    rlim_t number = 0;  // the first that is free: the next after the pipe that the command writes to
    do snprintf(path, sizeof path, "/proc/%ld/fd/%llu", (long)getppid(), (unsigned long long)++number);
    while (access(path, F_OK) == 0);
    prlimit(getppid(), RLIMIT_NOFILE, NULL, &limit);
    limit.rlim_cur = number + 1;
    prlimit(getppid(), RLIMIT_NOFILE, &limit, NULL);
}

static int act(const char* name, char** argv) {
    const char* ranks = command_find(argv, "--ranks");
    char start[512];
    snprintf(start, sizeof start, "%s", getenv(HEARTBEAT_VARIABLE) ? getenv(HEARTBEAT_VARIABLE) : "");
    trace("start", start);
    size_t attempt = trace_count("start");
    trace("ranks", ranks ? ranks : "");
    if (strcmp(name, "done") == 0) {
        if (!act_is_clean()) return 9;
        printf("some output\n");
        fflush(stdout);
        fprintf(stderr, "some errors\n");
        printf("no end of line");
        return 0;
    }
    if (strcmp(name, "code") == 0) return atoi(argv[3]);
    if (strcmp(name, "killed") == 0) {
        act_ranks(1);
        act_steps(1, attempt == 1 ? 31 : 40);
        if (attempt > 1) return 0;
        trace("death", "");
        raise(SIGKILL);
    }
    if (strcmp(name, "stopped") == 0) {
        if (attempt > 1) return 0;
        if (act_ranks(2) == 0) act_on(31);
        act_steps(1, 31);
        heartbeat_collective("reduce_scatter");
        trace("stop", "");
        raise(SIGSTOP);
    }
    if (strcmp(name, "clock") == 0) {  // the time of its last beat, far ahead or long ago, means nothing
        if (attempt > 2) return 0;
        act_ranks(1);
        for (int i = 0; i < 75; i++) {
            act_steps(attempt, attempt);
            (*heartbeat_state())->ms = i % 2 ? 0 : (uint64_t)now_ms() + 1000000000;
            sleep_ms(20);
        }
        trace("stop", "");
        sleep_ms(CASE_MS);
    }
    if (strcmp(name, "rank_killed") == 0 || strcmp(name, "noticed") == 0) {
        if (attempt > 1) return 0;
        if (act_ranks(2) == 1) {
            act_steps(1, 7);
            trace("death", "");
            raise(SIGKILL);
        }
        if (strcmp(name, "rank_killed") == 0) act_on(7);
        act_steps(1, 500);  // until the supervisor has seen rank 1, however busy the machine is
        return 1;
    }
    if (strcmp(name, "takes_along") == 0) {
        if (attempt > 3) return 0;
        if (act_ranks(4) > 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            act_on(9);
        }
        act_steps(1, 9);
        sleep_ms(100);
        raise(SIGKILL);
    }
    if (strcmp(name, "gives_up") == 0) {
        size_t rank = act_ranks(2);
        act_steps(1, rank == 1 ? 5 : 150);
        return 1;
    }
    if (strcmp(name, "deaf") == 0) {
        if (attempt > 1) return 0;
        for (int i = 0; i < 3; i++) {
            if (fork() > 0) continue;
            if (i == 0) signal(SIGTERM, SIG_IGN);
            if (i == 1 && (setsid() < 0 || fork() > 0)) _exit(0);  // and leaves the session, and its parent
            trace("left", "");
            sleep_ms(CASE_MS);
            _exit(0);
        }
        trace_await("left", 2);
        trace("death", "");
        return 1;
    }
    if (strcmp(name, "absent") == 0) {
        Error error;
        heartbeat_open(getenv(HEARTBEAT_VARIABLE), 0, 2, &error);
        for (double until = now_ms() + CASE_MS; now_ms() < until; sleep_ms(20)) heartbeat(HEARTBEAT_SETUP, 0);
    }
    if (strcmp(name, "mute") == 0) sleep_ms(CASE_MS);
    if (strcmp(name, "further") == 0) {
        act_ranks(1);
        act_steps(1, 3 * attempt);
        return attempt == 5 ? 0 : 1;
    }
    if (strcmp(name, "fails") == 0) {
        act_ranks(1);
        act_steps(1, 3);
        for (int i = 1; i <= 30; i++) printf("line %d \"\x01\n", i);
        fwrite("bytes \xff and\0zero", 1, 16, stdout);
        return 1;
    }
    if (strcmp(name, "preempted") == 0) return act_preempted();
    if (strcmp(name, "wrapped") == 0) {  // by something that a signal ends
        int status = 0;
        pid_t child = fork();
        if (child == 0) exit(act_preempted());
        waitpid(child, &status, 0);
        return WEXITSTATUS(status);
    }
    if (strcmp(name, "frozen") == 0) {
        act_ranks(1);
        trace("ready", "");
        for (double until = now_ms() + 6e3; now_ms() < until; sleep_ms(20)) heartbeat(HEARTBEAT_STEP, 1);
        return 0;
    }
    if (strcmp(name, "ignores") == 0) {
        signal(SIGTERM, SIG_IGN);
        act_ranks(1);
        trace("ready", "");
        act_on(1);
    }
    if (strcmp(name, "flood") == 0 || strcmp(name, "unread") == 0) {
        act_flood();
        trace("written", "");
        if (strcmp(name, "flood") == 0) return 0;
        for (double until = now_ms() + CASE_MS; access("go", F_OK) != 0 && now_ms() < until;) sleep_ms(5);
        printf("the end\n");
        return 0;
    }
    if (strcmp(name, "outlives") == 0) {
        if (attempt > 1) return 0;
        signal(SIGTERM, SIG_IGN);
        bool stops = act_ranks(2) == 1;
        act_steps(1, 1);
        if (stops) raise(SIGSTOP);
        for (double until = now_ms() + CASE_MS; access("failures", F_OK) != 0 && now_ms() < until;) act_steps(1, 1);
        trace("outlived", "");
        act_on(1);
    }
    if (strcmp(name, "starves") == 0) {
        if (access("go", F_OK) == 0) return 0;
        for (double until = now_ms() + CASE_MS; events_count("start") < attempt && now_ms() < until;) sleep_ms(5);
        sleep_ms(200);  // the event comes first, then the start
        act_starve();
        return 1;
    }
    if (strcmp(name, "vanishes") == 0) {
        unlink("vanishing");
        return 1;
    }
    if (strcmp(name, "patient") == 0) {  // more than --timeout, where another limit holds
        act_ranks(1);
        sleep_ms(2100);
        act_steps(1, 5);
        heartbeat(HEARTBEAT_CHECKPOINT, 5);
        sleep_ms(2100);
        heartbeat(HEARTBEAT_DONE, 5);
        return 0;
    }
    if (strcmp(name, "trains") == 0) {  // becomes the trainer, with a fault that does not come again
        const char* fault = getenv(FAULT_ONCE);
        if (fault && attempt == 1) setenv("LLMTRAIN_TEST_FAULT", fault, 1);
        execv(argv[3], argv + 3);
    }
    if (strcmp(name, "lost") == 0) {
        Error error;
        heartbeat_open(getenv(HEARTBEAT_VARIABLE), 0, 0, &error);
        if (ranks && atoi(ranks) <= 2) return 0;
        raise(SIGKILL);
    }
    return 9;
}

// ------------------------------------------------------------------------------------------------
// 3. Checks

static void case_done(void) {
    case_run("--out . -- SELF act done", 0);
    check(strcmp(file_text("stdout"), "some output\nno end of line") == 0, "standard output is passed on");
    check(strcmp(file_text("stderr"), "some errors\n") == 0, "standard error is passed on, and nothing is added");
    check_between((double)trace_count("start"), 1, 1, "starts");
    check(events_count("start") == 1 && events_count("done") == 1 && events_count("failure") == 0, "events");
    check(!directory_exists("failures"), "no post-mortem");
}

static void case_codes(void) {
    case_run("-- SELF act code 2 --out .", 2);
    check_between((double)trace_count("start"), 1, 1, "wrong flags: starts");
    case_run("-- SELF act code 75 --out=.", 75);
    check_between((double)trace_count("start"), 2, 2, "saved: starts");
    check(events_count("stopped") == 1, "saved: event");
}

static void case_killed(void) {
    Json json;
    case_run("--out . -- SELF act killed", 0);
    check_between(trace_ms("start", 1) - trace_ms("death", 0), 0, 1000 + slack_ms, "from death to restart, ms");
    check_between((double)trace_count("start"), 2, 2, "starts");
    check(events_count("restart") == 1 && events_count("done") == 1, "events");
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", "signal");
    failure_check(&json, -1, "rank", "0");
    failure_check(&json, -1, "signal", "9");
    failure_check(&json, -1, "exit_code", "null");
    failure_check(&json, -1, "phase", "step");
    failure_check(&json, -1, "step", "31");
    failure_check(&json, -1, "progress", "true");
    failure_check(&json, 0, "alive", "false");
    failure_check(&json, 0, "signal", "9");
    check_text(failure_value(&json, -1, "what"), "was ended by signal 9 (Killed) in phase step, step 31");
    check(strtod(failure_value(&json, -1, "disk_free_bytes"), NULL) > 0, "free bytes of the disk");
    check(strtod(failure_value(&json, -1, "memory_available_bytes"), NULL) > 0, "memory available");
    check(json_count(&json, json_get(&json, 0, "command")) == 3, "command");
    check_text(failure_value(&json, -1, "time"), "Z");
    json_free(&json);
}

static void case_stopped(void) {
    Json json;
    case_run("--timeout 1 --out . -- SELF act stopped", 0);
    check_between(trace_ms("start", 1) - trace_ms("stop", 0), 1000, 2000 + slack_ms, "from stop to restart, ms");
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", "hang");
    failure_check(&json, -1, "rank", "1");
    failure_check(&json, -1, "phase", "collective");
    failure_check(&json, -1, "step", "31");
    failure_check(&json, -1, "collective", "reduce_scatter");
    failure_check(&json, -1, "signal", "null");
    failure_check(&json, -1, "exit_code", "null");
    failure_check(&json, 0, "alive", "true");
    failure_check(&json, 1, "alive", "true");
    failure_check(&json, 1, "state", "T");
    double ages[2];
    for (int i = 0; i < 2; i++) ages[i] = strtod(failure_value(&json, i, "age_seconds"), NULL);
    check_between(ages[1], 1, 2 + 1e-3 * slack_ms, "seconds until a hang is seen");
    check_between(ages[0], 0, 0.5 + 1e-3 * slack_ms, "age of the other rank");
    check_text(failure_value(&json, -1, "what"), "sent its last heartbeat");
    check_text(failure_value(&json, -1, "what"), "in phase collective, step 31, in reduce_scatter; it was stopped by");
    json_free(&json);
}

static void case_clock(void) {
    Json json;
    case_run("--timeout 1 --out . -- SELF act clock", 0);
    check_between((double)trace_count("start"), 3, 3, "starts");
    for (size_t i = 0; i < 2; i++)  // not before it has stopped
        check_between(trace_ms("start", i + 1) - trace_ms("stop", i), 800, 2000 + slack_ms, "from stop to restart, ms");
    if (!failure_read(&json, 2)) return;
    failure_check(&json, -1, "kind", "hang");
    json_free(&json);
}

static void case_rank_killed(void) {
    Json json;
    case_run("--out . -- SELF act rank_killed", 0);
    check_between(trace_ms("start", 1) - trace_ms("death", 0), 0, SUPERVISE_LOST_MS + 1000 + slack_ms,
                  "from death to restart, ms");
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", "lost rank");
    failure_check(&json, -1, "rank", "1");
    failure_check(&json, -1, "signal", "9");
    failure_check(&json, -1, "step", "7");
    failure_check(&json, 0, "alive", "true");
    failure_check(&json, 1, "alive", "false");
    json_free(&json);
}

static void case_noticed(void) {
    Json json;
    case_run("--out . -- SELF act noticed", 0);
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", "exit");
    failure_check(&json, -1, "rank", "1");
    failure_check(&json, -1, "signal", "9");
    check_text(failure_value(&json, -1, "what"),
               "signal 9 (Killed) in phase step, step 7; the command ended with exit code 1");
    json_free(&json);
}

static void case_takes_along(void) {
    Json json;
    case_run("--out . -- SELF act takes_along", 0);
    for (int i = 1; i <= 3; i++) {
        if (!failure_read(&json, i)) return;
        failure_check(&json, -1, "rank", "0");
        failure_check(&json, -1, "signal", "9");
        json_free(&json);
    }
}

static void case_gives_up(void) {
    Json json;
    case_run("--max-restarts 1 --out . -- SELF act gives_up", 1);
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "rank", "1");
    failure_check(&json, -1, "exit_code", "1");
    failure_check(&json, 1, "closed", "true");
    check_text(failure_value(&json, -1, "what"), "exited first in phase step, step 5");
    json_free(&json);
}

static void case_deaf(void) {
    long pid;
    case_run("--out . -- SELF act deaf", 0);
    check_between(trace_ms("start", 1) - trace_ms("death", 0), SUPERVISE_TERM_MS, SUPERVISE_TERM_MS + 2000 + slack_ms,
                  "from death to restart, ms");
    for (size_t i = 0; i < 3; i++)
        check(trace_find("left", i, &pid, NULL, NULL) && kill((pid_t)pid, 0) != 0, "what it left is ended");
}

static void case_absent(void) {
    Json json;
    case_run("--setup-timeout 1 --max-restarts 1 --out . -- SELF act absent", 1);
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", "absent rank");
    failure_check(&json, 0, "phase", "setup");
    check_text(failure_value(&json, -1, "what"), "rank 1 of 2 has sent no heartbeat");
    json_free(&json);
}

static void case_mute(void) {
    Json json;
    Case c = case_start("--setup-timeout 1 --max-restarts 1 --out . -- SELF act mute", false);
    case_end(&c);
    check_between(c.code, 1, 1, "exit code");
    check_between(c.ended - c.began, 1000, 2000 + slack_ms, "ms");
    if (!failure_read(&json, 1)) return;
    check_text(failure_value(&json, -1, "what"), "no rank has sent a heartbeat");
    json_free(&json);
}

static void case_fails(void) {
    Json json;
    case_run("--max-restarts 3 --out . -- SELF act fails", 1);
    check_between((double)trace_count("start"), 4, 4, "starts: one with progress, three without");
    check_between(trace_ms("start", 1) - trace_ms("start", 0), 0, 1000 + slack_ms, "none after progress, ms");
    check_between(trace_ms("start", 2) - trace_ms("start", 1), 500, 1500 + slack_ms, "first pause, ms");
    check_between(trace_ms("start", 3) - trace_ms("start", 2), 1000, 2000 + slack_ms, "second pause, ms");
    check(events_count("failure") == 4 && events_count("gave up") == 1, "events");
    check_text(file_text("stderr"), "gave up: 3 consecutive failures without progress; best step 3, 4 starts");
    check_text(file_text("stderr"), "failure_0004.json");
    if (!failure_read(&json, 4)) return;
    uint32_t output = json_get(&json, 0, "output");
    char line[64] = "";
    check_between(json_count(&json, output), TAIL_LINES, TAIL_LINES, "lines of output");
    json_string(&json, json_first(&json, output), line, sizeof line);
    check(strcmp(line, "line 12 \"\x01") == 0, "the first of them");
    for (uint32_t i = json_first(&json, output); i != JSON_NONE; i = json_next(&json, i))
        json_string(&json, i, line, sizeof line);
    check(strcmp(line, "bytes \xEF\xBF\xBD and zero") == 0, "the last of them");
    failure_check(&json, -1, "progress", "false");
    failure_check(&json, -1, "rank", "0");
    json_free(&json);
}

static void case_further(void) {
    case_run("--max-restarts 1 --out . -- SELF act further", 0);
    check_between((double)trace_count("start"), 5, 5, "starts");
}

static void case_fewer(void) {
    static const char* const expected[] = {"4", "4", "2"};
    char ranks[512];
    case_run("--min-ranks 2 --max-restarts 2 --out . -- SELF act lost --ranks 4 --total-batch 64 --batch 2 --seq 4", 0);
    check_between((double)trace_count("start"), 3, 3, "starts");
    for (size_t i = 0; i < 3; i++)
        check(trace_find("ranks", i, NULL, NULL, ranks) && strcmp(ranks, expected[i]) == 0,
              "number of ranks: 3 does not divide 8 micro-batches");
    check(events_count("fewer ranks") == 1, "event");
}

static void case_fewer_impossible(void) {
    case_run("--min-ranks 2 --max-restarts 3 --out . -- SELF act lost", 1);
    check_text(file_text("stderr"), "nothing in the command says how many there are");
    check_between((double)trace_count("start"), 3, 3, "starts");
    check(events_count("fewer ranks") == 0, "no event");
}

static void case_patient(void) {
    case_run("--timeout 1 --out . -- SELF act patient", 0);
    check_between((double)trace_count("start"), 1, 1, "starts");
}

static void case_preempted(void) {
    static const int numbers[2] = {SIGUSR1, SIGTERM};
    char more[512];
    for (size_t i = 0; i < 2; i++) {
        Case c = case_start(i == 0 ? "--out . -- SELF act preempted" : "--out . -- SELF act wrapped", false);
        if (trace_await("ready", i)) {
            sleep_ms(100);  // until the supervisor knows the rank
            if (i == 0) {
                case_run("--out . -- SELF act done", 1);
                check_text(file_text("stderr"), "another supervisor watches .");
            }
            kill(c.supervisor, numbers[i]);
        }
        case_end(&c);
        check_between(c.code, 75, 75, "exit code");
        check(trace_find("saved", i, NULL, NULL, more) && atoi(more) == numbers[i], "the signal is passed on");
    }
    check_between((double)trace_count("start"), 2, 2, "starts");
    check(events_count("signal") == 2 && events_count("stopped") == 2 && events_count("failure") == 0, "events");
}

static void case_ignores(void) {
    Case c = case_start("--checkpoint-timeout 1 --out . -- SELF act ignores", false);
    trace_await("ready", 0);
    double sent = now_ms();
    kill(c.supervisor, SIGTERM);
    case_end(&c);
    check_between(c.code, 1, 1, "exit code");
    check_between(c.ended - sent, 1000, 2000 + slack_ms, "ms from signal to end");
    check_between((double)trace_count("start"), 1, 1, "starts");
}

static void case_pause(void) {
    Case c = case_start("--out . -- SELF act code 1", false);
    for (double until = now_ms() + CASE_MS / 2; events_count("restart") < 4 && now_ms() < until;) sleep_ms(20);
    double sent = now_ms();
    kill(c.supervisor, SIGINT);  // in a pause of 4 s
    case_end(&c);
    check_between(c.code, 75, 75, "exit code");
    check_between(c.ended - sent, 0, 1000 + slack_ms, "ms from signal to end");
    check_between((double)trace_count("start"), 4, 4, "starts");
}

static void case_orphaned(void) {
    char beats[512];
    Case c = case_start("--out . -- SELF act preempted", false);
    trace_await("ready", 0);
    kill(c.supervisor, SIGKILL);
    case_end(&c);
    check(trace_await("saved", 0), "the command saves when its supervisor is killed");
    bool found = trace_find("start", 0, NULL, NULL, beats);
    check(found && unlink(beats) == 0, "its heartbeats can be removed");
}

static void case_frozen(void) {
    long pid = 0;
    Case c = case_start("--timeout 3 --out . -- SELF act frozen", false);
    trace_await("ready", 0);
    if (trace_find("ready", 0, &pid, NULL, NULL)) {
        kill((pid_t)pid, SIGSTOP);  // both, as when a container is frozen
        sleep_ms(200);
        kill(c.supervisor, SIGSTOP);
        sleep_ms(4000);
        kill(c.supervisor, SIGCONT);
        sleep_ms(300);
        kill((pid_t)pid, SIGCONT);
    }
    case_end(&c);
    check_between(c.code, 0, 0, "exit code");
    check_between((double)trace_count("start"), 1, 1, "starts: time in which nobody ran is not counted");
}

// Reads until the end, or until there was nothing for a while; returns the bytes in all, of which text has the first.
static size_t read_all(char* text, size_t size, size_t at, int file, double patience_ms) {
    char rest[4096];
    struct pollfd polled = {file, POLLIN, 0};
    while (poll(&polled, 1, (int)patience_ms) > 0) {
        ssize_t n = at < size ? read(file, text + at, size - at) : read(file, rest, sizeof rest);
        if (n <= 0) break;
        at += (size_t)n;
    }
    return at;
}

// Whether these are the bytes of a flood from the first-th on.
static bool is_flood(const char* text, size_t bytes, size_t first) {
    for (size_t i = 0; i < bytes; i++) if (text[i] != (char)('a' + (first + i) / 7 % 26)) return false;
    return true;
}

static void case_flood(void) {
    char* text = (char*)allocate(2 * FLOOD_BYTES);
    must(text != NULL, "memory");
    Case c = case_start("--out . -- SELF act flood", true);
    size_t bytes = read_all(text, 2 * FLOOD_BYTES, 0, c.output, CASE_MS);
    case_end(&c);
    check_between(c.code, 0, 0, "exit code");
    check_between((double)bytes, (double)FLOOD_BYTES, (double)FLOOD_BYTES, "bytes");
    check(bytes == FLOOD_BYTES && is_flood(text, bytes, 0), "all is passed on unchanged");
    free(text);
}

// Nobody reads any more, or the disk is full.
static void case_untaken(void) {
    Case c = case_start("--out . -- SELF act flood", true);
    close(c.output);
    c.output = -1;
    case_end(&c);
    check_between(c.code, 0, 0, "nobody reads: exit code");
    check_between(c.ended - c.began, 0, RELAY_STUCK_MS + 2000 + slack_ms, "nobody reads: ms");
    must(symlink("/dev/full", "stdout") == 0, "symlink");
    double began = now_ms();
    case_run("--out . -- SELF act flood", 0);
    check_between(now_ms() - began, 0, RELAY_STUCK_MS / 2 + slack_ms, "the disk is full: ms");
    check_between((double)trace_count("written"), 2, 2, "all is written");
}

static void case_unread(void) {
    char* text = (char*)allocate(2 * FLOOD_BYTES + 1);
    must(text != NULL, "memory");
    Case c = case_start("--out . -- SELF act unread", true);
    check(trace_await("written", 0), "a command whose output nobody reads goes on");
    check_between(trace_ms("written", 0) - trace_ms("start", 0), 0, RELAY_STUCK_MS + 5000 + slack_ms, "ms to write");
    size_t bytes = read_all(text, 2 * FLOOD_BYTES, 0, c.output, 1000);
    mark("go");
    bytes = read_all(text, 2 * FLOOD_BYTES, bytes, c.output, CASE_MS);
    case_end(&c);
    check_between(c.code, 0, 0, "exit code");
    text[bytes] = 0;
    unsigned long long missing = 0;
    char* note = strstr(text, "\nsupervise: ");
    check(note && sscanf(note, "\nsupervise: %llu bytes of output are missing here", &missing) == 1, "it is said");
    char* rest = note ? strchr(note + 1, '\n') : NULL;
    char* end = rest ? strstr(rest, "the end\n") : NULL;
    if (check(end && end[8] == 0, "what came later is passed on")) {
        size_t before = (size_t)(note - text), after = (size_t)(end - rest) - 1;
        check(is_flood(text, before, 0) && is_flood(rest + 1, after, before + missing), "what was read is unchanged");
        check(before + missing + after == FLOOD_BYTES, "what is missing is counted");
    }
    free(text);
}

// A pipe in place of events.jsonl: whoever writes to it waits, once it is full, as for a disk that hangs.
static int disk_make(void) {
    must(mkfifo("events.jsonl", 0666) == 0, "mkfifo");
    int disk = open("events.jsonl", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    must(disk >= 0, "open a pipe");
    return disk;
}

// From the first event on.
static void disk_hang(int disk) {
    static char text[4096];
    struct pollfd polled = {disk, POLLIN, 0};
    check(poll(&polled, 1, (int)CASE_MS / 2) == 1, "the first event");
    for (size_t bytes = sizeof text; bytes > 0; bytes /= 2)
        while (write(disk, text, bytes) > 0) {}
}

static void disk_go_on(int disk) {
    char text[4096];
    while (read(disk, text, sizeof text) > 0) {}
}

static void check_ends(long pid, double ms, const char* what) {
    for (double until = now_ms() + ms; kill((pid_t)pid, 0) == 0 && now_ms() < until;) sleep_ms(5);
    check(kill((pid_t)pid, 0) != 0, what);
}

static void case_disk_hangs(void) {
    long pid = 0;
    int disk = disk_make();
    Case c = case_start("--timeout 1 --out . -- SELF act outlives", false);
    disk_hang(disk);
    if (trace_await("rank", 0) && trace_find("rank", 0, &pid, NULL, NULL))
        check_ends(pid, 2000 + slack_ms, "the ranks are ended while the disk hangs");
    check_between((double)trace_count("start"), 1, 1, "starts while the disk hangs");
    disk_go_on(disk);
    case_end(&c);
    check_between(c.code, 0, 0, "exit code");
    check_between((double)trace_count("start"), 2, 2, "starts");
    check(trace_count("outlived") == 0, "no rank is left when the post-mortem is written");
    check(access("failures/failure_0001.json", F_OK) == 0, "the post-mortem is there");

    disk_go_on(disk);
    c = case_start("--out . -- SELF act preempted", false);
    disk_hang(disk);
    trace_await("ready", 0);
    kill(c.supervisor, SIGTERM);
    check(trace_await("saved", 0), "a signal is passed on while the disk hangs");
    disk_go_on(disk);
    case_end(&c);
    check_between(c.code, 75, 75, "exit code");

    size_t ready = trace_count("ready");
    disk_go_on(disk);
    c = case_start("--checkpoint-timeout 1 --out . -- SELF act ignores", false);
    trace_await("ready", ready);
    disk_hang(disk);
    kill(c.supervisor, SIGTERM);
    if (check(trace_find("ready", ready, &pid, NULL, NULL), "it has begun"))
        check_ends(pid, 3000 + slack_ms, "what ignores a signal is ended while the disk hangs");
    disk_go_on(disk);
    case_end(&c);
    check_between(c.code, 1, 1, "exit code");
    close(disk);
}

// A start that fails is a failure like others.
static void case_starved(void) {
    Json json;
    case_run("--max-restarts 2 --out . -- SELF act starves", 1);
    check_between((double)trace_count("start"), 1, 1, "starts");
    check_text(file_text("stderr"), "cannot start");
    check_text(file_text("stderr"), "gave up: 2 consecutive failures without progress; best step 0, 2 starts");
    check(events_count("failure") == 2 && events_count("gave up") == 1, "events");
    if (failure_read(&json, 2)) {
        failure_check(&json, -1, "kind", "start");
        failure_check(&json, -1, "rank", "null");
        failure_check(&json, -1, "exit_code", "null");
        check_text(failure_value(&json, -1, "what"), "Too many open files; check the command after --, and the limits");
        json_free(&json);
    }
    unlink("stderr");
    Case c = case_start("--max-restarts 9 --out . -- SELF act starves", false);
    for (double until = now_ms() + CASE_MS / 2; !strstr(file_text("stderr"), "cannot start") && now_ms() < until;)
        sleep_ms(5);
    struct rlimit limit;
    mark("go");
    getrlimit(RLIMIT_NOFILE, &limit);
    prlimit(c.supervisor, RLIMIT_NOFILE, &limit, NULL);
    case_end(&c);
    check_between(c.code, 0, 0, "exit code when there are descriptors again");
    check_between((double)trace_count("start"), 3, 3, "starts");
}

static void case_vanished(void) {
    must(symlink(self_path, "vanishing") == 0, "symlink");
    case_run("--max-restarts 2 --out . -- ./vanishing act vanishes", 1);
    check_text(file_text("stderr"), "cannot start ./vanishing: No such file");
    check(events_count("failure") == 2 && events_count("gave up") == 1, "events");
}

static void case_refusals(void) {
    static const struct {
        const char* words;
        int code;
        const char* says;
    } cases[] = {
        {"--out .", 2, "there is no command to run"},
        {"--out . --", 2, "there is no command to run"},
        {"--time 5 --out . -- SELF act done", 2, "did you mean --timeout?"},
        {"--max-restarts 0 --out . -- SELF act done", 2, "--max-restarts is '0'"},
        {"-- SELF act done", 2, "neither the supervisor nor the command has --out"},
        {"-- ./train act done --out .", 2, "no --resume"},
        {"-- ./train act done --out . --resume off", 2, "no --resume"},
        {"-- mpirun -np 2 ./train act done --out .", 2, "no --resume"},
        {"--out . -- ./no-such-program", 2, "cannot start ./no-such-program: No such file"},
        {"--out trace/x -- SELF act done", 1, "trace"},
    };
    must(symlink(self_path, "train") == 0, "symlink");
    trace("nothing", "");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unlink("stderr");
        case_run(cases[i].words, cases[i].code);
        check_text(file_text("stderr"), cases[i].says);
        check_between((double)count_in(file_text("stderr"), "supervise: "), 1, 1, "sentences");
    }
    check_between((double)trace_count("start"), 0, 0, "starts");
    case_run("-- ./train act done --out . --resume", 0);
    case_run("-- ./train act done --out . --resume=on", 0);
    case_run("--help", 0);
    check_text(file_text("stdout"), "--checkpoint-timeout");
}

// ------------------------------------------------------------------------------------------------
// 4. Trainer
//
// With sums of gradients that are exact, the weights are the same bits for any number of ranks, and however often the
// run was ended. These cases have the bounds that the README states, and no slack but what --slack gives.

#define STEPS 24
#define STRIKE_STEP 12  // between two checkpoints
#define RESTART_MS 3e3  // from the death of a rank to the first step, beside what the trainer takes to load
#define FOUND_MS 1e3    // from the end of its time limit until a hang is found
#define LOSS_BOUND 1e-5 // relative, between numbers of ranks: they add losses in another order
#define TRAINER                                                                                              \
    "TRAIN --ranks 2 --family gpt2 --layers 2 --heads 2 --channels 16 --seq 16 --batch 1 --total-batch 128 " \
    "--steps 24 --lr 3e-3 --warmup 3 --threads 1 --reduce exact --timeout 20 --ckpt-every 5 --resume on "    \
    "--data ../train.bin --out run"
#define SLOWLY "rank 1 step 1 at update do delay 50"  // so that rank 0 waits in each step, and there is time to strike

static double strict_slack_ms;

// What a run leaves that nobody disturbs.
static struct {
    uint64_t weights;
    double losses[STEPS], load_ms;  // from its start to its first step
} reference;

static uint64_t train_weights(void) {
    Error error;
    char path[64];
    snprintf(path, sizeof path, "run/step_%08d", STEPS);
    uint64_t hash = weights_hash(path, &error);
    if (hash == 0) printf("%s: %s\n", case_name, error.text);
    return hash;
}

static void train_losses(double losses[STEPS]) {
    char line[2048];
    size_t step;
    double loss;
    FILE* file = fopen("run/metrics.jsonl", "re");
    for (size_t i = 0; i < STEPS; i++) losses[i] = NAN;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "{\"step\": %zu,\"loss\": %lf", &step, &loss) == 2 && step >= 1 && step <= STEPS)
            losses[step - 1] = loss;
    if (file) fclose(file);
}

// Waits for a line of a step that the number-th start (from 1) has written; returns when it came.
static double train_await_step(int number) {
    for (double until = now_ms() + CASE_MS / 2; now_ms() < until; sleep_ms(1)) {
        const char* at = file_text("stdout");
        for (int i = 0; i < number && at; i++) at = strstr(i == 0 ? at : at + 1, "ranks (forked)");
        if (at && strstr(at, "\nstep ")) return now_ms();
    }
    check(false, "a step comes");
    return NAN;
}

static Case train_start(const char* flags) {
    char words[2048];
    snprintf(words, sizeof words, "SUPERVISE %s --out . -- SELF act trains " TRAINER, flags);
    return case_start(words, false);
}

// The heartbeat of a rank in a supervisor's file, or NULL; that of a rank that has ended stays as it was.
static const Heartbeat* beat_map(const char* path, size_t rank) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void* memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(Heartbeats), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) return NULL;
    const Heartbeats* beats = (const Heartbeats*)memory;
    for (size_t i = 0; i < HEARTBEAT_RANKS; i++)
        if (beats->ranks[i].counter > 1 && beats->ranks[i].rank == rank) return &beats->ranks[i];
    munmap(memory, sizeof(Heartbeats));
    return NULL;
}

// Of the first start; waits for it.
static const Heartbeat* train_beats(size_t rank) {
    char path[512];
    const Heartbeat* beats = NULL;
    if (!trace_await("start", 0)) return NULL;
    trace_find("start", 0, NULL, NULL, path);
    for (double until = now_ms() + CASE_MS / 2; beats == NULL && now_ms() < until; sleep_ms(1))
        beats = beat_map(path, rank);
    check(beats != NULL, "the rank comes");
    return beats;
}

static bool beats_await_step(const Heartbeat* beats, uint64_t step) {
    double until = now_ms() + CASE_MS / 2;
    while (heartbeat_read(beats).step < step && now_ms() < until) sleep_ms(1);
    return check(heartbeat_read(beats).step >= step, "the step to strike in comes");
}

// After so many starts the run is complete, and nobody can tell.
static void train_check_end(Case* c, size_t starts) {
    case_end(c);
    check_between(c->code, 0, 0, "exit code");
    check_between((double)trace_count("start"), (double)starts, (double)starts, "starts");
    check(train_weights() == reference.weights, "the weights are those of a run that was left alone");
}

static void train_reference(void) {
    double began = now_ms();
    Case c = case_start(TRAINER, false);
    reference.load_ms = train_await_step(1) - began;
    case_end(&c);
    check_between(c.code, 0, 0, "exit code");
    reference.weights = train_weights();
    check(reference.weights != 0, "it leaves its weights");
    train_losses(reference.losses);
    printf("trainer: from start to first step in %.0f ms\n", reference.load_ms);
}

static void train_killed(bool rank_0, bool rank_1) {
    Json json;
    double started = NAN, stepped = NAN;
    setenv("LLMTRAIN_TEST_FAULT", SLOWLY, 1);
    Case c = train_start("--timeout 20");
    const Heartbeat *first = train_beats(0), *second = train_beats(1);
    if (first && second && beats_await_step(first, STRIKE_STEP)) {
        double struck = now_ms();
        if (rank_0) kill((pid_t)heartbeat_read(first).pid, SIGKILL);
        if (rank_1) kill((pid_t)heartbeat_read(second).pid, SIGKILL);
        stepped = train_await_step(2) - struck;
        started = trace_ms("start", 1) - struck;
    }
    train_check_end(&c, 2);
    check_between(started, 0, RESTART_MS + strict_slack_ms, "from death to restart, ms");
    check_between(stepped, 0, RESTART_MS + reference.load_ms + strict_slack_ms, "from death to the next step, ms");
    printf("%s: started again after %.0f ms, first step after %.0f ms\n", case_name, started, stepped);
    if (!failure_read(&json, 1)) return;
    failure_check(&json, -1, "kind", rank_0 ? "signal" : "exit");
    if (rank_0) failure_check(&json, -1, "signal", "9");  // of rank 1, rank 0 may be the one to take notice
    if (rank_0 != rank_1) failure_check(&json, -1, "rank", rank_0 ? "0" : "1");
    json_free(&json);
}

static void train_word(void) {
    case_run("TRAIN supervise --out . -- true", 2);
    check_text(file_text("stderr"), "a program of its own: ./supervise");
}

static void train_rank_0_killed(void) { train_killed(true, false); }
static void train_rank_1_killed(void) { train_killed(false, true); }
static void train_all_killed(void) { train_killed(true, true); }

// Stops rank 0 while it waits for the other's gradients.
static void stop_in_collective(const Heartbeat* beats) {
    if (!beats_await_step(beats, STRIKE_STEP)) return;
    pid_t pid = (pid_t)heartbeat_read(beats).pid;
    for (double until = now_ms() + CASE_MS / 2; now_ms() < until; sleep_ms(1)) {
        if (heartbeat_read(beats).phase != HEARTBEAT_COLLECTIVE) continue;
        kill(pid, SIGSTOP);
        sleep_ms(5);
        if (heartbeat_read(beats).phase == HEARTBEAT_COLLECTIVE) return;
        kill(pid, SIGCONT);  // it was through
    }
    check(false, "rank 0 stops in a collective");
}

// A rank hangs in a phase with this limit; other limits do not help. fault NULL: it is stopped in a collective.
static void train_hung(const char* fault, double limit_s, int rank, const char* phase, const char* state) {
    Json json;
    char text[8], flags[80];
    double found = NAN, limit_ms = 1e3 * limit_s;
    bool saves = strcmp(phase, "checkpoint") == 0;
    snprintf(flags, sizeof flags, "--timeout %g --checkpoint-timeout %g", saves ? 20 : limit_s, saves ? limit_s : 20);
    setenv(fault ? FAULT_ONCE : "LLMTRAIN_TEST_FAULT", fault ? fault : SLOWLY, 1);
    Case c = train_start(flags);
    const Heartbeat* beats = train_beats((size_t)rank);
    if (beats && !fault) stop_in_collective(beats);
    for (double until = now_ms() + CASE_MS / 2; beats && isnan(found) && now_ms() < until; sleep_ms(2))
        if (events_count("failure") > 0) found = now_ms() - (double)heartbeat_read(beats).ms;
    train_check_end(&c, 2);
    check_between(found, limit_ms, limit_ms + FOUND_MS + strict_slack_ms, "from the last heartbeat to the event, ms");
    printf("%s: found %.0f ms after the limit\n", case_name, found - limit_ms);
    if (!failure_read(&json, 1)) return;
    snprintf(text, sizeof text, "%d", rank);
    failure_check(&json, -1, "kind", "hang");
    failure_check(&json, -1, "rank", text);
    failure_check(&json, -1, "phase", phase);
    if (state) failure_check(&json, rank, "state", state);
    json_free(&json);
}

#define STEP_S 2.0  // more than a step takes that does not hang, on a busy machine
#define SAVE_S 6.0  // more than a save takes: it waits for the disk several times, for that of all cases at once

static void train_hung_step(void) { train_hung("rank 1 step 12 at forward do hang", STEP_S, 1, "step", NULL); }
static void train_hung_reduce(void) { train_hung("rank 0 step 12 at reduce do hang", STEP_S, 0, "step", NULL); }
static void train_hung_save(void) { train_hung("rank 1 step 10 at save do hang", SAVE_S, 1, "checkpoint", NULL); }
static void train_stopped_step(void) { train_hung("rank 0 step 12 at forward do stop", STEP_S, 0, "step", "T"); }
static void train_stopped_collective(void) { train_hung(NULL, STEP_S, 0, "collective", "T"); }
static void train_stopped_save(void) { train_hung("rank 0 step 10 at save do stop", SAVE_S, 0, "checkpoint", "T"); }

// A rank that dies in every start, as if its machine were broken, until the run goes on without it.
static void train_fewer(void) {
    static const char* const expected[] = {"2", "2", "2", "1"};
    char ranks[512];
    double losses[STEPS], worst = 0;
    setenv("LLMTRAIN_TEST_FAULT", "rank 1 step 12 at forward do kill", 1);
    Case c = train_start("--min-ranks 1");
    train_check_end(&c, 4);
    for (size_t i = 0; i < 4; i++)
        check(trace_find("ranks", i, NULL, NULL, ranks) && strcmp(ranks, expected[i]) == 0, "number of ranks");
    check(events_count("fewer ranks") == 1, "event");
    train_losses(losses);
    for (size_t i = 0; i < STEPS; i++) {
        double error = fabs(losses[i] - reference.losses[i]) / reference.losses[i];
        if (!(error <= worst)) worst = error;  // NaN too
    }
    check_between(worst, 0, LOSS_BOUND, "relative difference of the losses");
    printf("%s: relative difference of the losses at most %.1e, the weights have the same bits\n", case_name, worst);
}

// ------------------------------------------------------------------------------------------------
// 5. Units

// Runs body in a process in which any system call but its end is death.
static bool runs_without_system_calls(void (*body)(void)) {
    int status = 0;
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL),
    };
    struct sock_fprog filter = {sizeof rules / sizeof rules[0], rules};
    fflush(NULL);
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) _exit(1);
        body();
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void unit_clock(void) { now_ms(); }
static void unit_beats(void) {
    for (uint64_t i = 0; i < 1000; i++) {
        heartbeat(HEARTBEAT_STEP, i);
        heartbeat_collective("all_gather");
    }
}

static void test_beats(void) {
    Error error;
    case_name = "heartbeats";
    heartbeat(HEARTBEAT_STEP, 1);
    heartbeat_collective("all_gather");
    heartbeat_close();
    check(heartbeat_open(NULL, 0, 1, &error) && *heartbeat_state() == NULL, "without a supervisor nothing happens");
    check(heartbeat_open("/nonexistent", 0, 1, &error) && *heartbeat_state() == NULL, "nor with one on another machine");
    char path[HEARTBEAT_PATH_BYTES];
    Heartbeats* beats = heartbeats_make(path, &error);
    if (!check(beats && heartbeat_open(path, 3, 4, &error) && *heartbeat_state() != NULL, "opened")) return;
    const Heartbeat* mapped = beat_map(path, 3);
    must(mapped != NULL, "map");
    Heartbeat h = heartbeat_read(mapped);
    check(h.rank == 3 && h.world == 4 && h.pid == (uint64_t)getpid(), "who it is");
    check(h.phase == HEARTBEAT_SETUP && h.step == 0 && h.closed == 0, "first beat");
    double before = now_ms();
    heartbeat(HEARTBEAT_CHECKPOINT, 12);
    heartbeat_collective("a name of more than thirty-two characters");
    h = heartbeat_read(mapped);
    check(h.phase == HEARTBEAT_COLLECTIVE && h.step == 12, "a collective keeps the step");
    check_between((double)h.ms, before - 1, before + 1000 + slack_ms, "time of a beat, ms");
    check(strcmp(h.collective, "a name of more than thirty-two ") == 0, "a long name is cut");
    if (runs_without_system_calls(unit_clock)) check(runs_without_system_calls(unit_beats), "no system calls");
    else printf("skipped that a beat makes no system calls: here the clock does, or none can be forbidden\n");

    // A beat is read whole, or known not to be.
    heartbeat_write(*heartbeat_state(), HEARTBEAT_STEP, 0, "0", false);
    fflush(NULL);
    pid_t writer = fork();
    must(writer >= 0, "fork");
    if (writer == 0) for (uint64_t i = 1;; i++) {
        char name[32];
        snprintf(name, sizeof name, "%llu", (unsigned long long)i);
        heartbeat_write(*heartbeat_state(), HEARTBEAT_STEP, i, name, false);
        for (double until = now_ms() + 1e-3; now_ms() < until;) {}
    }
    bool whole = true;
    size_t different = 0;
    double until = now_ms() + CASE_MS / 2;
    for (uint64_t last = 0; different < 1000 && now_ms() < until;) {
        h = heartbeat_read(mapped);
        if (h.counter % 2 == 1) continue;  // the writer had to pause in the middle of it
        whole = whole && strtoull(h.collective, NULL, 10) == h.step;
        different += h.step != last;
        last = h.step;
    }
    kill(writer, SIGKILL);
    waitpid(writer, NULL, 0);
    check(whole, "beats are read whole");
    check(different == 1000, "beats are read while they are written");
    (*heartbeat_state())->counter = 2;
    heartbeat_close();
    h = heartbeat_read(mapped);
    check(h.closed == 1 && *heartbeat_state() == NULL, "closed");
    beats->count = HEARTBEAT_RANKS;
    check(heartbeat_open(path, 0, 1, &error) && *heartbeat_state() == NULL, "one too many does not beat");
    munmap(beats, sizeof *beats);
    unlink(path);
}

static void test_events(const char* directory) {
    enum { WRITERS = 4, LINES = 100 };
    Error error;
    char path[FILE_PATH_MAX + 16], detail[256];
    case_name = "events";
    snprintf(path, sizeof path, "%s/events.jsonl", directory);
    FILE* file = fopen(path, "we");
    must(file != NULL && fputs("{\"cut", file) >= 0 && fclose(file) == 0, "write");
    fflush(NULL);
    pid_t writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        must((writers[i] = fork()) >= 0, "fork");
        if (writers[i] > 0) continue;
        memset(detail, 'a' + i, sizeof detail - 1);
        detail[sizeof detail - 1] = 0;
        bool good = true;
        for (int k = 0; k < LINES; k++)
            good = good && event_write(directory, "test \"quoted\"", (uint64_t)k, detail, &error);
        _exit(!good);
    }
    bool all = true;
    for (int i = 0, status; i < WRITERS; i++) all = waitpid(writers[i], &status, 0) > 0 && status == 0 && all;
    check(all, "written");
    char* text;
    size_t bytes, lines = 0, bad = 0;
    if (!check(file_read(path, 1 << 22, &text, &bytes, &error), "read")) return;
    check(strncmp(text, "{\"cut\n", 6) == 0, "a line that was cut stays alone");
    for (char* line = strtok(text + 6, "\n"); line; line = strtok(NULL, "\n")) {
        Json json;
        uint64_t step;
        bool good = json_parse(&json, line, strlen(line), "line", &error);
        lines += good && json_string(&json, json_get(&json, 0, "detail"), detail, sizeof detail) &&
                 strlen(detail) == 255 && json_u64(&json, json_get(&json, 0, "step"), &step) &&
                 json_string(&json, json_get(&json, 0, "time"), detail, sizeof "2030-01-01T00:00:00.000Z");
        bad += !good;
        if (good) json_free(&json);
    }
    check_between((double)lines, WRITERS * LINES, WRITERS * LINES, "lines");
    check_between((double)bad, 0, 0, "lines that are not JSON");
    free(text);
    check(!event_write("/nonexistent", "test", 0, "", &error), "a directory that is not there");
}

static void split(char** words, char* text) {
    size_t count = 0;
    for (char* word = strtok(text, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
}

static void test_commands(void) {
    static const struct {
        const char* text;
        size_t world;
        const char* at;
        size_t ranks, least, fewer;
        bool resumes;
    } cases[] = {
        {"./train --ranks 4 --resume", 0, "4", 4, 1, 3, true},
        {"./train --ranks=4 --resume on", 4, "4", 4, 1, 3, true},
        {"mpirun -np 8 ./train --resume=on", 8, "8", 8, 8, 0, true},
        {"mpirun -n 8 ./train --resume off", 8, "8", 8, 7, 7, false},
        {"nice -n 10 mpirun -n 4 ./train", 4, "4", 4, 1, 3, false},
        {"nice -n 10 mpirun -np 4 ./train", 0, "4", 4, 1, 3, false},
        {"./train --ranks 1", 1, "1", 1, 1, 0, false},
        {"./train --ranks 6 --total-batch 96 --batch 2 --seq=8", 6, "6", 6, 1, 3, false},
        {"./train --ranks 6 --total-batch 96 --batch 2 --seq=8", 6, "6", 6, 4, 0, false},
        {"./train --ranks 6 --total-batch 96 --batch 2", 6, "6", 6, 4, 5, false},
        {"./train --ranks x -n 0", 0, NULL, 0, 0, 0, false},
        {"./train -n", 0, NULL, 0, 0, 0, false},
    };
    case_name = "commands";
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[256], *words[32];
        size_t ranks = 0;
        snprintf(text, sizeof text, "%s", cases[i].text);
        split(words, text);
        const char* at = command_ranks(&ranks, words, cases[i].world);
        check(at && cases[i].at ? strcmp(at, cases[i].at) == 0 : at == cases[i].at, cases[i].text);
        check(ranks == cases[i].ranks, cases[i].text);
        if (ranks) check(command_fewer_ranks(words, ranks, cases[i].least) == cases[i].fewer, cases[i].text);
        check(command_resumes(words) == cases[i].resumes, cases[i].text);
    }
}

// Whether a failure is found, and rank `place` (in the order in which they came) is blamed.
static bool blames(Failure* f, Supervisor* s, size_t place) {
    memset(f, 0, sizeof *f);
    return supervise_find_failure(f, s) && f->rank == &s->views[place];
}

static void test_blame(void) {
    static Supervisor s;
    RankView* views = s.views;
    Failure f;
    case_name = "blame";
    s.view_count = s.world = 3;
    s.limits[HEARTBEAT_STEP] = s.limits[HEARTBEAT_COLLECTIVE] = 1;
    s.limits[HEARTBEAT_CHECKPOINT] = 5;
    for (size_t i = 0; i < 3; i++) views[i].seen.rank = 2 - i;  // in the order in which they came
    memset(&f, 0, sizeof f);
    check(!supervise_find_failure(&f, &s), "all is well");

    // Two wait for one, which may take longer than they may.
    for (size_t i = 0; i < 3; i++) views[i].seen.phase = HEARTBEAT_COLLECTIVE;
    views[0].still_ms = views[1].still_ms = 1001;
    views[2].seen.phase = HEARTBEAT_CHECKPOINT;
    views[2].still_ms = 1500;
    check(blames(&f, &s, 2) && !f.lost, "who is not in the collective is blamed");
    check_text(f.what, "rank 0 (process 0) sent its last heartbeat 1.5 s ago in phase checkpoint; rank 2 (process 0) "
                       "has sent no heartbeat for 1.0 s");
    views[1].seen.step = 1;
    views[0].seen.step = views[2].seen.step = 2;
    check(blames(&f, &s, 1), "who is a step behind is blamed");
    views[0].state = 'T';
    check(blames(&f, &s, 0), "who was stopped is blamed");
    check_text(f.what, "sent its last heartbeat 1.0 s ago in phase collective, step 2; it was stopped by a signal");
    views[0].state = 'S';
    views[0].seen.step = views[1].seen.step = views[2].seen.step = 1;
    views[2].seen.phase = HEARTBEAT_COLLECTIVE;
    check(blames(&f, &s, 2), "who has stood still the longest is blamed");
    views[2].seen.phase = HEARTBEAT_CHECKPOINT;
    views[0].still_ms = views[1].still_ms = 999;
    check(!supervise_find_failure(&f, &s), "each phase has its limit");
    views[2].still_ms = 5001;
    check(blames(&f, &s, 2), "also a checkpoint");
    s.limits[HEARTBEAT_CHECKPOINT] = 0;
    check(!supervise_find_failure(&f, &s), "0 is no limit");

    // One that gave up is blamed for those that wait for it.
    views[1].seen.closed = 1;
    views[0].still_ms = 1001;
    views[1].still_ms = 1500;
    check(blames(&f, &s, 1), "who gave up is blamed");
    check_text(f.what, "rank 1 (process 0) exited 1.5 s ago in phase collective");

    // Of two that died at once the one that was silent for longer; one that has closed its heartbeat has not died.
    for (size_t i = 0; i < 3; i++) views[i].ended_ms = 1;
    views[0].seen.closed = 1;
    views[1].seen.closed = 0;
    views[1].seen.ms = 20;
    views[2].seen.ms = 10;
    check(supervise_worst(&s) == &views[2] && rank_fate(&views[2]) == RANK_KILLED, "silent for longer");
    views[2].ended_ms = 2;
    check(supervise_worst(&s) == &views[1], "seen dead first");
    for (size_t i = 0; i < 3; i++) {
        views[i].seen.closed = 1;
        views[i].seen.phase = i == 0 ? HEARTBEAT_DONE : HEARTBEAT_STEP;
    }
    check(supervise_worst(&s) == &views[2] && rank_fate(&views[2]) == RANK_EXITED, "gave up first");
    check(supervise_absent(&s) == 3, "all came");
    s.view_count = 2;
    check(supervise_absent(&s) == 0, "one did not come");
    s.world = 0;
    check(supervise_absent(&s) == 0, "of an unknown number nobody is missed");
}

// A process that cannot be looked at is not gone.
static void test_unseen(void) {
    static Supervisor s;
    Error error;
    Process p;
    struct rlimit limit, none;
    case_name = "no descriptors";
    s.heartbeats = heartbeats_make(s.heartbeats_path, &error);
    must(s.heartbeats != NULL && heartbeat_open(s.heartbeats_path, 0, 1, &error), "heartbeats");
    fflush(NULL);
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        setsid();
        raise(SIGSTOP);
        _exit(0);
    }
    waitpid(child, NULL, WUNTRACED);
    while (waitpid(-1, NULL, WNOHANG) > 0) {}  // what cases have left
    supervise_read_ranks(&s);
    check(s.view_count == 1 && s.views[0].ended_ms == 0, "a rank is there");
    check(process_read(&p, child) && p.parent == getpid() && p.session == child && p.state == 'T', "a child is there");
    check(processes_signal(0) == 1, "and is counted");
    getrlimit(RLIMIT_NOFILE, &none);
    limit = none;
    none.rlim_cur = 0;
    must(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    bool there = process_read(&p, child);
    size_t left = processes_signal(0);
    supervise_read_ranks(&s);
    must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    check(there, "a process that cannot be read is not gone");
    check(left > 0, "nor are all when /proc cannot be read");
    check(s.views[0].ended_ms == 0, "nor is a rank");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    check(!process_read(&p, child) && processes_signal(0) == 0, "one that has ended is gone");
    heartbeat_close();
    check(supervise_end_all(&s) && access(s.heartbeats_path, F_OK) != 0, "nothing is left of it");
}

static void test_tail(void) {
    static Tail t;
    static char long_line[2 * TAIL_LINE_BYTES];
    case_name = "tail";
    JsonWriter w;
    memset(&w, 0, sizeof w);
    tail_put(&t, "out", 3, 1);
    tail_put(&t, "err\n\n", 5, 2);
    tail_put(&t, "more", 4, 1);
    tail_write(&w, &t);
    check(strcmp(w.text, "[\"out\",\"err\",\"\",\"more\"]") == 0, "two streams, cut lines, empty ones");
    json_writer_free(&w);
    memset(long_line, 'x', sizeof long_line - 1);
    for (size_t i = 0; i < 2; i++) tail_put(&t, long_line, sizeof long_line - 1, 1);
    tail_put(&t, "\nlast\n", 6, 1);
    tail_write(&w, &t);
    long_line[TAIL_LINE_BYTES - 1] = 0;
    check(strncmp(w.text, "[\"out\",\"err\",\"\",\"morexx", 23) == 0, "a line is continued");
    check(strstr(w.text, long_line + 4) && !strstr(w.text, long_line), "and cut when it is too long");
    check(strcmp(w.text + w.bytes - 9, "\",\"last\"]") == 0, "and one after it");
    json_writer_free(&w);
    for (size_t i = 0; i < TAIL_LINES; i++) tail_put(&t, "a\nb\n", 4, 1);
    tail_write(&w, &t);
    check(w.bytes == 1 + 4 * TAIL_LINES && strncmp(w.text, "[\"a\",\"b\",", 9) == 0, "so many lines are kept");
    json_writer_free(&w);
}

// ------------------------------------------------------------------------------------------------
// 6. Lanes

typedef struct {
    const char* name;
    void (*run)(void);
} Lane;

static const Lane LANES[] = {
    {"done", case_done}, {"codes", case_codes}, {"killed", case_killed}, {"stopped", case_stopped},
    {"clock", case_clock}, {"rank killed", case_rank_killed}, {"noticed", case_noticed},
    {"takes along", case_takes_along}, {"gives up", case_gives_up}, {"deaf", case_deaf}, {"absent", case_absent},
    {"mute", case_mute}, {"fails", case_fails}, {"further", case_further}, {"fewer", case_fewer},
    {"fewer, impossible", case_fewer_impossible}, {"patient", case_patient}, {"preempted", case_preempted},
    {"ignores", case_ignores}, {"pause", case_pause}, {"orphaned", case_orphaned}, {"frozen", case_frozen},
    {"flood", case_flood}, {"untaken", case_untaken}, {"unread", case_unread}, {"refusals", case_refusals},
    {"disk hangs", case_disk_hangs}, {"starved", case_starved}, {"vanished", case_vanished},
};
static const Lane TRAINER_KILLS[] = {
    {"trainer, asked to supervise", train_word},
    {"trainer, rank 0 killed", train_rank_0_killed}, {"trainer, rank 1 killed", train_rank_1_killed},
    {"trainer, all killed", train_all_killed},
};
static const Lane TRAINER_HANGS[] = {
    {"trainer, hangs in a step", train_hung_step}, {"trainer, hangs while it sends gradients", train_hung_reduce},
    {"trainer, hangs in a checkpoint", train_hung_save}, {"trainer, stopped in a step", train_stopped_step},
    {"trainer, stopped in a collective", train_stopped_collective},
    {"trainer, stopped in a checkpoint", train_stopped_save}, {"trainer, a rank lost for good", train_fewer},
};
enum { LANE_COUNT = sizeof LANES / sizeof(Lane), KILL_COUNT = sizeof TRAINER_KILLS / sizeof(Lane),
       HANG_COUNT = sizeof TRAINER_HANGS / sizeof(Lane), LANES_MOST = LANE_COUNT };

typedef struct {
    int passed, failed;
    bool done;
} Tally;

// Runs them at once, each in a process and a directory of its own.
static void lanes_run(const Lane* lanes, size_t count, const char* base) {
    static int directories;
    char directory[512];
    pid_t children[LANES_MOST];
    size_t bytes = count * sizeof(Tally);
    Tally* tallies = (Tally*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(tallies != MAP_FAILED, "memory");
    fflush(NULL);
    for (size_t i = 0; i < count; i++) {
        snprintf(directory, sizeof directory, "%s/%d", base, directories++);
        must(mkdir(directory, 0777) == 0 && (children[i] = fork()) >= 0, "a lane");
        if (children[i] > 0) continue;
        passed = failed = 0;
        case_name = lanes[i].name;
        must(chdir(directory) == 0, "chdir");
        lanes[i].run();
        char beats[512];
        for (size_t k = 0; trace_find("start", k, NULL, NULL, beats); k++)
            check(access(beats, F_OK) != 0, "the heartbeats are removed");
        tallies[i].passed = passed;
        tallies[i].failed = failed;
        tallies[i].done = true;
        fflush(NULL);
        _exit(0);
    }
    for (size_t i = 0; i < count; i++) {
        waitpid(children[i], NULL, 0);
        case_name = lanes[i].name;
        check(tallies[i].done, "the lane ends");
        passed += tallies[i].passed;
        failed += tallies[i].failed;
    }
    munmap(tallies, bytes);
}

// What the cases of the trainer train on.
static void train_put_data(const char* base) {
    enum { VOCABULARY = 64, TOKENS = 8000 };
    static ShardWriter writer;
    Error error;
    char path[FILE_PATH_MAX];
    int32_t token = 0;
    snprintf(path, sizeof path, "%s/train.bin", base);
    bool good = shard_writer_open(&writer, path, VOCABULARY, 0, &error);
    for (size_t i = 0; good && i < TOKENS; i++) {
        Random4 r = random4(1, RANDOM_TEST, 0, i);
        token = r.bits[0] % 2 ? (token * 5 + 7) % VOCABULARY : (int32_t)(r.bits[1] % VOCABULARY);
        good = shard_writer_add(&writer, &token, 1, &error);
    }
    must(good && shard_writer_finish(&writer, &error) && shard_publish(path, &error), path);
}

// Kills one after the other, since the machine is to be free for the measured restarts.
static void test_trainer(const char* base) {
    char directory[512];
    must(access(supervise_path, X_OK) == 0, supervise_path);
    case_name = "trainer";
    train_put_data(base);
    snprintf(directory, sizeof directory, "%s/reference", base);
    must(mkdir(directory, 0777) == 0 && chdir(directory) == 0, directory);
    train_reference();
    must(chdir("/") == 0, "chdir");
    if (reference.weights == 0) return;  // it is no trainer, or of no use; that has been said
    for (size_t i = 0; i < KILL_COUNT; i++) lanes_run(&TRAINER_KILLS[i], 1, base);
    lanes_run(TRAINER_HANGS, HANG_COUNT, base);
}

static int remove_one(const char* path, const struct stat* status, int kind, struct FTW* place) {
    (void)status; (void)kind; (void)place;
    return remove(path);
}

int main(int argc, char** argv) {
    if (argc > 2 && strcmp(argv[1], "act") == 0) return act(argv[2], argv);
    Error error;
    const char* train = "./train";
    Flag flags[] = {
        {"train", FLAG_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"slack", FLAG_REAL, &slack_ms, "MS", 0, 60000, "what a busy machine may add to any time", false},
    };
    if (!flags_parse(flags, 2, argc, argv, &error)) {
        printf("test_supervise: %s\n0 passed, 1 failed\n", error.text);
        return 2;
    }
    if (flag_was_given(flags, 2, "slack")) strict_slack_ms = slack_ms;
    char base[] = "/tmp/test_supervise-XXXXXX";
    bool trainer = realpath(train, train_path) && access(train_path, X_OK) == 0 && !directory_exists(train_path);
    must(readlink("/proc/self/exe", self_path, sizeof self_path - 1) > 0 && mkdtemp(base) != NULL, "preparation");
    snprintf(supervise_path, sizeof supervise_path, "%.*s/supervise", (int)(strrchr(self_path, '/') - self_path), self_path);
    must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "preparation");
    unsetenv(HEARTBEAT_VARIABLE);
    lanes_run(LANES, LANE_COUNT, base);
    if (trainer) test_trainer(base);
    else printf("skipped the trainer's own runs: there is no %s; build it, or give --train PATH\n", train);
    test_beats();
    test_events(base);
    test_commands();
    test_blame();
    test_unseen();
    test_tail();
    case_name = "in the end";
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
    check(processes_signal(SIGKILL) == 0, "nothing is left running");
    nftw(base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
