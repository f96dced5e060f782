// test_supervise.c: the supervisor, against commands that die, stop, hang, ignore signals and print too much.
//
//   make build/test_supervise build/train-FP32
//   build/test_supervise --train build/train-FP32
//   build/test_supervise --train ... --slack 10000                  on a slow machine, or under a sanitizer
//
//   1. supervisors  each in a directory of its own: how it ends, and which files it leaves
//   2. acts         what the commands do: this program, started as `test_supervise act INSTRUCTION...`
//   3. steps        of cases: what happens to the supervisor, and what is expected
//   4. output       cases that read it, or do not
//   5. table        of the other cases
//   6. trainer      a run of two ranks: killed, hung, and with one rank fewer; it ends with an undisturbed run's bits
//   7. units        heartbeats, events, words of a command, which rank is blamed
//   8. main         cases run at once, since they mostly wait

#include "data/shards.h"
#define main supervise_main  // the program is included, so that the test covers what ships
#include "launch/supervise.c"
#undef main
#include "machine.h"
#include "pieces.h"

#define CASE_MS 60e3        // after which a supervisor counts as hung
#define FLOOD_BYTES ((size_t)10 << 20)

static double slack_ms = 3000;  // allowed for a busy machine
static const char* case_name = "";
static bool linux_tells;  // Linux shows how processes have ended, and which are stopped
static char self_path[FILE_PATH_MAX], train_path[FILE_PATH_MAX], supervise_path[FILE_PATH_MAX];

static bool check_case(bool ok, const char* what) { return check(ok, "%s: %s", case_name, what); }

// lowest <= value <= highest; NaN fails.
static bool check_between(double value, double lowest, double highest, const char* what) {
    bool ok = value >= lowest && value <= highest;
    return check(ok, "%s: %s: %g, from %g to %g", case_name, what, value, lowest, highest);
}

static bool check_text(const char* text, const char* fragment) {
    bool ok = strstr(text, fragment) != NULL;
    return check(ok, "%s: '%s'%s%.600s", case_name, fragment, ok ? "" : " is not in: ", ok ? "" : text);
}

// ------------------------------------------------------------------------------------------------
// 1. Supervisors
//
// Commands and cases write lines to the file `trace` for the checks: name, process, time, more.

static void trace(const char* what, const char* more) {
    char line[512];
    int file = open("trace", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int bytes = snprintf(line, sizeof line, "%s %ld %.0f %s\n", what, (long)getpid(), now_ms(), more);
    if (file >= 0 && write(file, line, (size_t)bytes) == bytes) close(file);
}

typedef struct {
    pid_t pid;
    double ms;
    char more[512];
} Traced;

// The number-th line (from 0) whose name is `what`; with process 0, which does not exist, if there are fewer.
static Traced trace_find(const char* what, size_t number) {
    static const Traced none = {0, (double)NAN, ""};
    char line[512], name[64];
    bool found = false;
    Traced t = none;
    FILE* file = fopen("trace", "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        t = none;
        bool read = sscanf(line, "%63s %d %lf %511[^\n]", name, &t.pid, &t.ms, t.more) >= 3;
        found = read && strcmp(name, what) == 0 && number-- == 0;
    }
    if (file) fclose(file);
    return found ? t : none;
}

static bool is_traced(const char* what, size_t number) { return trace_find(what, number).pid > 0; }

static size_t trace_count(const char* what) {
    size_t count = 0;
    while (is_traced(what, count)) count++;
    return count;
}

// The text of a file; "" if it does not exist.
static const char* file_text(const char* path) {
    static char text[1 << 16];
    FILE* file = fopen(path, "re");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    if (file) fclose(file);
    return text;
}

static size_t events_count(const char* event) {
    return count_in(file_text("events.jsonl"), text_of("\"event\": \"%s\"", event));
}

// Checks a count.
static bool check_count(size_t count, size_t expected, const char* what) {
    return check(count == expected, "%s: %s: %zu of %zu", case_name, what, count, expected);
}

static pid_t fork_process(void) {
    fflush(NULL);
    pid_t pid = fork();
    need(pid >= 0, "fork");
    return pid;
}

// Waits until condition(name, number) holds.
static bool await(bool (*condition)(const char* name, size_t number), const char* name, size_t number) {
    for (double until = now_ms() + CASE_MS / 2; !condition(name, number); sleep_ms(5))
        if (now_ms() > until) return check_case(false, text_of("%s comes", name));
    return true;
}

static bool is_event(const char* event, size_t number) { return events_count(event) > number; }
static bool is_said(const char* text, size_t number) { return count_in(file_text("stderr"), text) > number; }

typedef struct {
    pid_t pid;
    double began, ended;
    int output;             // its standard output, if that is a pipe; otherwise -1
} Supervised;

// Runs supervise_main in a process of its own with these words, where SELF is this program, TRAIN the trainer and
// SUPERVISE the supervisor; a command that begins with TRAIN or SUPERVISE is run as it is. With COMPANY first, the
// supervisor has a child that the command did not start. Standard error goes to a file, standard output to another, or
// to a pipe.
static Supervised supervised_start(const char* text, bool piped) {
    static Words words;
    Supervised s = {0, now_ms(), NAN, -1};
    int ends[2] = {-1, -1};
    need(!piped || (pipe_open(ends) && fcntl(ends[0], F_SETFL, 0) == 0 && fcntl(ends[1], F_SETFL, 0) == 0), "pipe");
    s.pid = fork_process();
    if (s.pid > 0) {
        if (piped) close(ends[1]);
        s.output = ends[0];
        return s;
    }
    int out = piped ? ends[1] : open("stdout", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int err = open("stderr", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    need(dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0, "dup2");
    bool company = strncmp(text, "COMPANY ", 8) == 0;
    if (company) text += 8;
    if (company && fork() == 0) {
        trace("ready", "");
        sleep_ms(CASE_MS);
        _exit(0);
    }
    bool whole = strncmp(text, "TRAIN ", 6) == 0 || strncmp(text, "SUPERVISE ", 10) == 0;
    words_add(&words, whole ? "" : "supervise ");
    words_add(&words, text);
    for (char** word = words.words; *word; word++) {
        if (strcmp(*word, "SELF") == 0) *word = self_path;
        else if (strcmp(*word, "TRAIN") == 0) *word = train_path;
        else if (strcmp(*word, "SUPERVISE") == 0) *word = supervise_path;
    }
    if (whole) execv(words.words[0], words.words);
    int code = supervise_main((int)words.count, words.words);
    fflush(NULL);
    _exit(code);
}

// Waits for its end.
static void supervised_end(Supervised* s, int code) {
    int status = 0;
    pid_t pid = 0;
    for (double until = now_ms() + CASE_MS; pid == 0 && now_ms() < until; sleep_ms(2))
        pid = waitpid(s->pid, &status, WNOHANG);
    s->ended = now_ms();
    if (!check_case(pid == s->pid, "the supervisor ends")) {
        kill(s->pid, SIGKILL);
        waitpid(s->pid, &status, 0);
    }
    check_count((size_t)status_code(status), (size_t)code, "exit code");
    if (s->output >= 0) close(s->output);
    trace("end", "");
}

static bool failure_read(Json* json, int number) {
    char* text;
    size_t bytes = 0;
    Error error;
    const char* path = text_of("failures/failure_%04d.json", number);
    if (!check_case(file_read(path, 1 << 20, &text, &bytes, &error), "the post-mortem is there")) return false;
    bool good = check_case(json_parse(json, text, bytes, path, &error), "the post-mortem is JSON");
    if (!good) printf("%s\n%s\n", error.text, text);
    free(text);
    return good;
}

// A value of the post-mortem, as text. "1.phase" is rank 1's, "output.1" the second line of the output.
static const char* failure_value(const Json* json, const char* key, uint32_t* value) {
    static char text[2048];
    uint32_t node = 0;
    uint64_t number;
    const char* dot = strchr(key, '.');
    bool line = dot && strncmp(key, "output", 6) == 0;
    if (dot && !line)
        for (node = json_first(json, json_get(json, 0, "ranks")); node != JSON_NONE; node = json_next(json, node))
            if (json_u64(json, json_get(json, node, "rank"), &number) && (int)number == atoi(key)) break;
    *value = line ? json_first(json, json_get(json, 0, "output")) : json_get(json, node, dot ? dot + 1 : key);
    for (int i = line ? atoi(dot + 1) : 0; i > 0 && *value != JSON_NONE; i--) *value = json_next(json, *value);
    if (*value == JSON_NONE) return "absent";
    const JsonNode* n = &json->nodes[*value];
    snprintf(text, sizeof text, "%.*s", (int)n->bytes, json->text + n->start);
    return n->type == JSON_NULL ? "null" : n->type == JSON_TRUE ? "true" : n->type == JSON_FALSE ? "false" : text;
}

// "KEY VALUE"; "KEY ~TEXT": contains it; "KEY >NUMBER"; "KEY LOWEST to HIGHEST", with slack; "KEY #N": N elements.
static void failure_check(const Json* json, const char* expected) {
    char key[64];
    int at = 0;
    double lowest, highest;
    uint32_t node = JSON_NONE;
    need(sscanf(expected, "%63s %n", key, &at) == 1, "a key: %s", expected);
    const char *wanted = expected + at, *value = json->nodes ? failure_value(json, key, &node) : "not there";
    if (wanted[0] == '~') check_text(value, wanted + 1);
    else if (wanted[0] == '>') check_case(strtod(value, NULL) > atof(wanted + 1), expected);
    else if (wanted[0] == '#') check_count((size_t)json_count(json, node), strtoul(wanted + 1, NULL, 10), expected);
    else if (sscanf(wanted, "%lf to %lf", &lowest, &highest) == 2)
        check_between(strtod(value, NULL), lowest, highest + 1e-3 * slack_ms, expected);
    else check(strcmp(value, wanted) == 0, "%s: the post-mortem has %s: %.60s", case_name, expected, value);
}

// ------------------------------------------------------------------------------------------------
// 2. Acts
//
// An act is a list of instructions, NAME or NAME=VALUE, that each rank executes in order; R:NAME is for rank R alone. A
// word that begins with --, and all after it, are for the supervisor.

#define FAULT_ONCE "TEST_FAULT_ONCE"

// Forks ranks and opens the heartbeat of each; returns the rank.
static size_t act_ranks(size_t world) {
    Error error;
    size_t rank = 0;
    for (size_t i = 1; i < world && rank == 0; i++)
        if (fork() == 0) rank = i;
    if (!heartbeat_open(getenv(HEARTBEAT_VARIABLE), rank, world, &error)) fprintf(stderr, "%s\n", error.text);
    if (rank > 0) trace("rank", "");
    return rank;
}

// Waits for the ranks that this one has forked.
static void act_reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, 0)) > 0;) heartbeat_ended(pid, status);
}

static void act_steps(uint64_t last) {
    for (uint64_t step = 1; step <= last; step++) {
        heartbeat_send(HEARTBEAT_STEP, step);
        sleep_ms(2);
    }
}

// Sends heartbeats of one step (0: of the set-up) until the file exists, for at most `ms`.
static void act_await(const char* path, uint64_t step, double ms) {
    for (double until = now_ms() + ms; now_ms() < until && !(path && file_exists(path)); sleep_ms(10))
        heartbeat_send(step ? HEARTBEAT_STEP : HEARTBEAT_SETUP, step);
}

static volatile sig_atomic_t act_signal;
static void act_handler(int number) { act_signal = number; }

static void act_asked(int number) {
    (void)number;
    trace("asked", "");
    _exit(0);
}

// Works until a signal comes, and then reports a save, or whatever the code says.
static int act_preempted(int code) {
    signal(SIGTERM, act_handler);
    signal(SIGUSR1, act_handler);
    act_ranks(1);
    trace("ready", "");
    for (double until = now_ms() + CASE_MS; !act_signal && now_ms() < until; sleep_ms(5))
        heartbeat_send(HEARTBEAT_STEP, 5);
    heartbeat_send(HEARTBEAT_PAUSE, 5);
    sleep_ms(200);
    trace("saved", text_of("%d", (int)act_signal));
    return code;
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

// Whether a process inherits the same as without a supervisor.
static bool act_is_clean(void) {
    sigset_t mask;
    struct sigaction pipe_action, size_action;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    sigaction(SIGPIPE, NULL, &pipe_action);
    sigaction(SIGXFSZ, NULL, &size_action);
    bool clean = pipe_action.sa_handler == SIG_DFL && size_action.sa_handler == SIG_DFL && fcntl(3, F_GETFD) < 0 &&
                 getsid(0) == getpid();
    for (int number = 1; number < 32; number++) clean = clean && !sigismember(&mask, number);
    return clean;
}

// Children that survive a SIGTERM to the command's process, session and children.
static void act_deaf(void) {
    for (int i = 0; i < 3; i++) {
        if (fork() > 0) continue;
        if (i == 0) signal(SIGTERM, SIG_IGN);
        if (i == 1 && (setsid() < 0 || fork() > 0)) _exit(0);  // leaves the session, and its parent
        trace("left", "");
        sleep_ms(CASE_MS);
        _exit(0);
    }
    await(is_traced, "left", 2);
    trace("death", "");
}

// Leaves the supervisor two free descriptors when the command has ended: enough for a file, too few for a start.
static void act_starve(size_t attempt) {
    await(is_event, "start", attempt - 1);
    sleep_ms(200);  // the event comes first, then the start
    rlim_t number = 1;  // the first free one: the next after the pipe that the command writes to
    while (file_exists(text_of("/proc/%ld/fd/%llu", (long)getppid(), (unsigned long long)number))) number++;
    machine_limit_files(getppid(), number + 1);
}

// A last heartbeat with a time far ahead or long ago must not matter.
static void act_clock(size_t step) {
    for (int i = 0; i < 75; i++) {
        act_steps(step);
        heartbeat_slot->ms = i % 2 ? 0 : (uint64_t)now_ms() + 1000000000;
        sleep_ms(20);
    }
    trace("stop", "");
    sleep_ms(CASE_MS);
}

// Returns the exit code.
static int act(char** words) {
    Error error;
    const char *ranks = command_find(words, "--ranks"), *fault = getenv(FAULT_ONCE);
    const char* heartbeats = getenv(HEARTBEAT_VARIABLE);
    size_t rank = 0;
    trace("start", heartbeats ? heartbeats : "");
    size_t attempt = trace_count("start");
    trace("ranks", ranks ? ranks : "");
    for (char** word = words; *word && strncmp(*word, "--", 2) != 0; word++) {
        const char *colon = strchr(*word, ':'), *name = colon ? colon + 1 : *word, *equals = strchr(name, '=');
        const char* value = equals ? equals + 1 : "";
        size_t number = strtoul(value, NULL, 10), length = equals ? (size_t)(equals - name) : strlen(name);
        if (colon && strtoul(*word, NULL, 10) != rank) continue;
#define IS(text) (length == sizeof text - 1 && memcmp(name, text, length) == 0)
        if (IS("times")) {  // succeeds if it was started more often
            if (attempt > number) return 0;
        } else if (IS("enough")) {  // or if there are at most this many --ranks
            if (ranks && strtoul(ranks, NULL, 10) <= number) return 0;
        } else if (IS("unless")) {  // or if the file exists
            if (file_exists(value)) return 0;
        } else if (IS("clean")) {
            if (!act_is_clean()) return 9;
        } else if (IS("exit")) return (int)number;
        else if (IS("ranks")) rank = act_ranks(number);
        else if (IS("alone")) heartbeat_open(heartbeats, 0, number, &error);  // rank 0 of this many
        else if (IS("steps")) act_steps(number);
        else if (IS("further")) act_steps(number * attempt);
        else if (IS("on")) act_await(NULL, number, CASE_MS);  // longer than any case lasts
        else if (IS("while")) act_await(NULL, 1, (double)number);
        else if (IS("await")) act_await(value, 1, CASE_MS);
        else if (IS("collective")) heartbeat_collective(value);
        else if (IS("save")) heartbeat_send(HEARTBEAT_PAUSE, number);
        else if (IS("done")) heartbeat_send(HEARTBEAT_DONE, number);
        else if (IS("sleep")) sleep_ms((double)number);
        else if (IS("trace")) trace(value, "");
        else if (IS("kill")) trace("death", ""), raise(SIGKILL);
        else if (IS("stop")) trace("stop", ""), raise(SIGSTOP);
        else if (IS("ignore")) signal(SIGTERM, SIG_IGN);
        else if (IS("asks")) signal(SIGTERM, act_asked);
        else if (IS("reap")) act_reap();
        else if (IS("follow")) process_end_with_parent(getppid(), SIGKILL);
        else if (IS("clock")) act_clock(attempt);
        else if (IS("deaf")) act_deaf();
        else if (IS("flood")) act_flood();
        else if (IS("starve")) act_starve(attempt);
        else if (IS("remove")) unlink(value);
        else if (IS("end")) printf("the end\n");
        else if (IS("hello")) {
            printf("some output\n");
            fflush(stdout);
            fprintf(stderr, "some errors\n");
            printf("no end of line");
        } else if (IS("lines")) {
            for (int i = 1; i <= 30; i++) printf("line %d \"\x01\n", i);
            fwrite("bytes \xff and\0zero", 1, 16, stdout);
        } else if (IS("preempted")) return act_preempted(equals ? (int)number : EXIT_SAVED);
        else if (IS("wrapped")) {  // by a parent that a signal would end
            int status = 0;
            pid_t child = fork();
            if (child == 0) exit(act_preempted(EXIT_SAVED));
            waitpid(child, &status, 0);
            return WEXITSTATUS(status);
        } else if (IS("trains")) {  // becomes the trainer, with a fault only at the first start
            if (fault && attempt == 1) setenv("LLMTRAIN_TEST_FAULT", fault, 1);
            execv(word[1], word + 1);
        } else return 9;
#undef IS
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// 3. Steps
//
// A case lists what happens to a supervisor, and what is expected, in order.
//   start WORDS, end CODE     starts the supervisor, and waits for its end; `run CODE WORDS` is both
//   refuse CODE TEXT | WORDS  it does not start with these words, and says why in one sentence
//   send S, to NAME S         sends it a signal, or the process that wrote the first line with this name to the trace
//   await NAME I, event, said until the trace has the I-th line of the name (from 0), or this many events, or a text
//   sleep MS, make PATH, link PATH   an empty file, a link to this program
//   unsay, limits             clears the supervisor's standard error; lets it open as many files as this program may
//   disk hangs, disk goes on  for writes to events.jsonl
//   gone NAME I MS            the process that wrote this line ends in this time, with slack; 0: it has ended
//   starts N                  number of starts of the command
//   events N NAME             number of events
//   traces N NAME             number of lines with this name in the trace
//   trace NAME I MORE         the I-th of them
//   ms A I B J LOWEST HIGHEST between two lines of the trace, with slack
//   says TEXT, logs TEXT      in standard error of the supervisor, in events.jsonl; `prints TEXT` in standard output
//   there PATH, not PATH      files
//   failure N                 the post-mortem that the following steps check
//   KEY VALUE                 a value in it, see failure_check

typedef struct {
    const char* name;
    const char* words;       // of the supervisor; NULL: the steps start it
    int code;                // its exit code
    const char* steps[32];
    const char* signal;      // sent to it when the command has traced "ready"; NULL: none
    void (*also)(void);      // more checks
    void (*run)(void);       // replaces all this: a case of section 4 or 6
    bool asks_linux;         // needs process states that only Linux shows
} Case;

#define DO(...) .steps = {__VA_ARGS__}

static const Case* this_case;

// Simulates a disk that hangs: events.jsonl is a pipe, and full from the first event on.
static void disk_hang(bool hangs) {
    static int disk = -1;
    static char text[4096];
    if (disk < 0) need(mkfifo("events.jsonl", 0666) == 0, "mkfifo");
    if (disk < 0) disk = open("events.jsonl", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct pollfd polled = {disk, POLLIN, 0};
    if (hangs) check_case(poll(&polled, 1, (int)CASE_MS / 2) == 1, "the first event");
    for (size_t bytes = sizeof text; hangs && bytes > 0; bytes /= 2)
        while (write(disk, text, bytes) > 0) {}
    while (!hangs && read(disk, text, sizeof text) > 0) {}
}

static int signal_of(const char* name) {
    static const struct {
        const char* name;
        int number;
    } signals[] = {{"TERM", SIGTERM}, {"INT", SIGINT}, {"USR1", SIGUSR1}, {"HUP", SIGHUP}, {"KILL", SIGKILL},
                   {"STOP", SIGSTOP}, {"CONT", SIGCONT}};
    size_t i = 0;
    while (strcmp(signals[i].name, name) != 0) need(++i < COUNT_OF(signals), "a signal: %s", name);
    return signals[i].number;
}

// The text after a word that it begins with, or NULL.
static const char* after(const char* text, const char* word) {
    size_t length = strlen(word);
    return strncmp(text, word, length) != 0 || (text[length] && text[length] != ' ') ? NULL :
           text + length + (text[length] == ' ');
}

static void step_do(Json* json, const char* text) {
    static Supervised s;
    char a[32], b[32], more[512];
    size_t count = 0, i, j;
    double lowest, highest;
    int at = 0;
    const char* rest;
    if ((rest = after(text, "start"))) s = supervised_start(rest, false);
    else if ((rest = after(text, "end"))) supervised_end(&s, atoi(rest));
    else if (sscanf(text, "run %zu %n", &count, &at) == 1) {
        Supervised other = supervised_start(text + at, false);
        supervised_end(&other, (int)count);
    } else if (sscanf(text, "refuse %zu %511[^|]| %n", &count, more, &at) == 2) {
        unlink("stderr");
        more[strlen(more) - 1] = 0;  // the blank before |
        step_do(json, text_of("run %zu %s", count, text + at));
        check_text(file_text("stderr"), more);
        check_count(count_in(file_text("stderr"), "supervise: "), 1, "sentences");
    } else if ((rest = after(text, "send"))) trace("signal", ""), kill(s.pid, signal_of(rest));
    else if (sscanf(text, "to %31s %31s", a, b) == 2) {
        pid_t pid = trace_find(a, 0).pid;
        check_case(pid > 0 && kill(pid, signal_of(b)) == 0, text);
    } else if (sscanf(text, "await event %zu %n", &count, &at) == 1) await(is_event, text + at, count - 1);
    else if ((rest = after(text, "await said"))) await(is_said, rest, 0);
    else if (sscanf(text, "await %31s %zu", a, &i) == 2) await(is_traced, a, i);
    else if ((rest = after(text, "sleep"))) sleep_ms(atof(rest));
    else if ((rest = after(text, "make"))) put_text(rest, "");
    else if ((rest = after(text, "link"))) need(symlink(self_path, rest) == 0, "symlink");
    else if (after(text, "unsay")) unlink("stderr");
    else if (after(text, "limits")) {
        struct rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        machine_limit_files(s.pid, limit.rlim_cur);
    } else if ((rest = after(text, "disk"))) disk_hang(strcmp(rest, "hangs") == 0);
    else if (sscanf(text, "gone %31s %zu %lf", a, &i, &highest) == 3) {
        pid_t pid = trace_find(a, i).pid;
        double until = highest > 0 ? now_ms() + highest + slack_ms : 0;
        while (pid > 0 && kill(pid, 0) == 0 && now_ms() < until) sleep_ms(5);
        check_case(pid > 0 && kill(pid, 0) != 0, text);
    } else if ((rest = after(text, "starts"))) check_count(trace_count("start"), strtoul(rest, NULL, 10), "starts");
    else if (sscanf(text, "events %zu %n", &count, &at) == 1) check_count(events_count(text + at), count, text);
    else if (sscanf(text, "traces %zu %31s", &count, a) == 2) check_count(trace_count(a), count, text);
    else if (sscanf(text, "trace %31s %zu %n", a, &i, &at) == 2)
        check_case(is_traced(a, i) && strcmp(trace_find(a, i).more, text + at) == 0, text);
    else if (sscanf(text, "ms %31s %zu %31s %zu %lf %lf", a, &i, b, &j, &lowest, &highest) == 6)
        check_between(trace_find(b, j).ms - trace_find(a, i).ms, lowest, highest + slack_ms, text);
    else if ((rest = after(text, "says"))) check_text(file_text("stderr"), rest);
    else if ((rest = after(text, "logs"))) check_text(file_text("events.jsonl"), rest);
    else if ((rest = after(text, "prints"))) check_text(file_text("stdout"), rest);
    else if ((rest = after(text, "there"))) check_case(file_exists(rest), text);
    else if ((rest = after(text, "not"))) check_case(!file_exists(rest), text);
    else if ((rest = after(text, "failure"))) {
        json_free(json);
        if (!failure_read(json, atoi(rest))) memset(json, 0, sizeof *json);
    } else if (linux_tells || strstr(text, ".state ") == NULL) failure_check(json, text);
}

// Executes the steps of this case.
static void case_do_steps(void) {
    Json json;
    memset(&json, 0, sizeof json);
    for (size_t i = 0; i < COUNT_OF(this_case->steps) && this_case->steps[i]; i++) step_do(&json, this_case->steps[i]);
    json_free(&json);
}

static void case_run(void) {
    const Case* c = this_case;
    trace("begin", "");
    if (c->words) {
        step_do(NULL, text_of("start %s", c->words));
        // At once: the supervisor may not have looked since the rank sent its first heartbeat.
        if (c->signal && await(is_traced, "ready", 0)) step_do(NULL, text_of("send %s", c->signal));
        step_do(NULL, text_of("end %d", c->code));
        check_case(events_count("signal") <= trace_count("signal"), "it reports no signal that was not sent");
    }
    case_do_steps();
    if (c->also) c->also();
}

static void done_also(void) {
    check_case(strcmp(file_text("stdout"), "some output\nno end of line") == 0, "standard output is passed on");
    check_case(strcmp(file_text("stderr"), "some errors\n") == 0, "standard error is passed on, and nothing is added");
}

static void orphaned_also(void) {
    await(is_traced, "saved", 0);
    bool gone = unlink(trace_find("start", 0).more) == 0 || errno == ENOENT;  // the next supervisor removes them
    check_case(gone, "its heartbeats can be removed");
}

// ------------------------------------------------------------------------------------------------
// 4. Output

// Reads until the end, or until nothing comes for a while; returns the total bytes, of which text has the first.
static size_t read_all(char* text, size_t size, size_t at, int file, double limit_ms) {
    char rest[4096];
    struct pollfd polled = {file, POLLIN, 0};
    while (poll(&polled, 1, (int)limit_ms) > 0) {
        ssize_t n = at < size ? read(file, text + at, size - at) : read(file, rest, sizeof rest);
        if (n <= 0) break;
        at += (size_t)n;
    }
    return at;
}

// Whether these bytes are those of a flood from offset `first` on.
static bool is_flood(const char* text, size_t bytes, size_t first) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] != (char)('a' + (first + i) / 7 % 26)) return false;
    return true;
}

static void case_flood(void) {
    char* text = (char*)memory_allocate(2 * FLOOD_BYTES);
    need(text != NULL, "memory");
    Supervised s = supervised_start("--out . -- SELF act flood", true);
    size_t bytes = read_all(text, 2 * FLOOD_BYTES, 0, s.output, CASE_MS);
    supervised_end(&s, 0);
    check_count(bytes, FLOOD_BYTES, "bytes");
    check_case(bytes == FLOOD_BYTES && is_flood(text, bytes, 0), "all is passed on unchanged");
    free(text);
}

// Nobody reads its output, or the disk is full.
static void case_untaken(void) {
    Supervised s = supervised_start("--out . -- SELF act flood trace=written", true);
    close(s.output);
    s.output = -1;
    supervised_end(&s, 0);
    check_between(s.ended - s.began, 0, RELAY_STUCK_MS + 2000 + slack_ms, "nobody reads: ms");
    need(symlink("/dev/full", "stdout") == 0, "symlink");
    s = supervised_start("--out . -- SELF act flood trace=written", false);
    supervised_end(&s, 0);
    check_between(s.ended - s.began, 0, RELAY_STUCK_MS / 2 + slack_ms, "the disk is full: ms");
    check_count(trace_count("written"), 2, "all is written");
}

static void case_unread(void) {
    char* text = (char*)memory_allocate(2 * FLOOD_BYTES + 1);
    need(text != NULL, "memory");
    Supervised s = supervised_start("--out . -- SELF act flood trace=written await=go end", true);
    check_case(await(is_traced, "written", 0), "a command whose output nobody reads continues");
    check_between(trace_find("written", 0).ms - trace_find("start", 0).ms, 0, RELAY_STUCK_MS + 5000 + slack_ms,
                  "ms to write");
    size_t bytes = read_all(text, 2 * FLOOD_BYTES, 0, s.output, 1000);
    put_text("go", "");
    bytes = read_all(text, 2 * FLOOD_BYTES, bytes, s.output, CASE_MS);
    supervised_end(&s, 0);
    text[bytes] = 0;
    unsigned long long missing = 0;
    char* note = strstr(text, "\nsupervise: ");
    check_case(note && sscanf(note, "\nsupervise: %llu bytes of output are missing here", &missing) == 1, "it is said");
    char* rest = note ? strchr(note + 1, '\n') : NULL;
    char* end = rest ? strstr(rest, "the end\n") : NULL;
    if (check_case(end && end[8] == 0, "what came later is passed on")) {
        size_t before = (size_t)(note - text), after = (size_t)(end - rest) - 1;
        bool unchanged = is_flood(text, before, 0) && is_flood(rest + 1, after, before + missing);
        check_case(unchanged, "what was read is unchanged");
        check_case(before + missing + after == FLOOD_BYTES, "what is missing is counted");
    }
    free(text);
}

// ------------------------------------------------------------------------------------------------
// 5. Table

static const Case CASES[] = {
    {"done", "--out . -- SELF act clean hello", 0,
     DO("starts 1", "events 1 start", "events 1 done", "events 0 failure", "events 0 signal", "not failures"),
     .also = done_also},
    {"wrong flags", "-- SELF act exit=2 --out .", 2, DO("starts 1")},
    {"saved", "-- SELF act exit=75 --out=.", 75, DO("starts 1", "events 1 stopped")},

    // A command that is killed, and ranks that are killed.
    {"killed", "--out . -- SELF act ranks=1 steps=31 times=1 kill", 0,
     DO("ms death 0 start 1 0 1000", "starts 2", "events 1 restart", "events 1 done", "failure 1", "kind signal",
        "rank 0", "signal 9", "exit_code null", "phase step", "step 31", "progress true", "0.alive false", "0.signal 9",
        "what ~was terminated by signal 9 (Killed) in phase step, step 31", "disk_free_bytes >0",
        "memory_available_bytes >0", "command #6", "time ~Z")},
    {"rank killed", "--out . -- SELF act times=1 ranks=2 1:steps=7 1:kill on=7", 0,
     DO("ms death 0 start 1 0 4000", "failure 1", "kind lost rank", "rank 1", "signal 9", "step 7", "0.alive true",
        "1.alive false"), .asks_linux = true},
    {"noticed", "--out . -- SELF act times=1 ranks=2 1:steps=7 1:kill 0:reap steps=100 exit=1", 0,
     DO("failure 1", "kind exit", "rank 1", "signal 9",
        "what ~signal 9 (Killed) in phase step, step 7; the command ended with exit code 1")},
    {"takes along", "--out . -- SELF act times=3 ranks=4 0:steps=9 0:sleep=100 0:kill follow on=9", 0,
     DO("failure 1", "rank 0", "signal 9", "failure 2", "rank 0", "signal 9", "failure 3", "rank 0", "signal 9")},
    {"gives up", "--max-restarts 1 --out . -- SELF act ranks=2 1:steps=5 1:exit=3 0:reap exit=1", 1,
     DO("failure 1", "rank 1", "exit_code 3", "1.closed true", "what ~exited first in phase step, step 5")},
    {"deaf", "--out . -- SELF act times=1 deaf exit=1", 0,
     DO("ms death 0 start 1 2000 4000", "gone left 0 0", "gone left 1 0", "gone left 2 0"), .asks_linux = true},

    // Hangs.
    {"stopped", "--timeout 1 --out . -- SELF act times=1 asks ranks=2 0:on=31 steps=31 collective=reduce_scatter stop",
     0, DO("traces 0 asked", "ms stop 0 start 1 1000 2000", "failure 1", "kind hang", "rank 1", "phase collective",
           "step 31", "collective reduce_scatter", "signal null", "exit_code null", "0.alive true", "1.alive true",
           "1.state T", "1.age_seconds 1 to 2", "0.age_seconds 0 to 0.5", "what ~sent its last heartbeat",
           "what ~in phase collective, step 31, in reduce_scatter; it was stopped by"), .asks_linux = true},
    {"clock", "--timeout 3 --out . -- SELF act times=2 ranks=1 clock", 0,
     DO("starts 3", "ms stop 0 start 1 2800 4000", "ms stop 1 start 2 2800 4000", "failure 2", "kind hang")},
    {"absent", "--setup-timeout 1 --max-restarts 1 --out . -- SELF act alone=2 on=0", 1,
     DO("failure 1", "kind absent rank", "0.phase setup", "what ~rank 1 of 2 has sent no heartbeat")},
    {"mute", "--setup-timeout 1 --max-restarts 1 --out . -- SELF act sleep=60000", 1,
     DO("ms begin 0 end 0 1000 2000", "failure 1", "what ~no rank has sent a heartbeat")},
    {"hangs at its end", "--timeout 1 --setup-timeout 60 --checkpoint-timeout 60 --out . -- SELF act times=1 ranks=1 "
     "steps=5 done=5 trace=over sleep=60000", 0,
     DO("ms over 0 start 1 900 2000", "starts 2", "failure 1", "kind hang", "rank 0", "phase done", "step 5")},
    {"hangs in a save", "--timeout 60 --setup-timeout 60 --checkpoint-timeout 1 --out . -- SELF act times=1 ranks=1 "
     "steps=5 save=5 trace=over sleep=60000", 0,
     DO("ms over 0 start 1 900 2000", "starts 2", "failure 1", "kind hang", "rank 0", "phase checkpoint", "step 5")},
    {"other limits", "--timeout 1 --out . -- SELF act ranks=1 sleep=2100 steps=5 save=5 sleep=2100 done=5", 0,
     DO("starts 1")},

    // Restarts: with and without progress, and with fewer ranks. 3 ranks do not divide 8 micro-batches.
    {"company", "COMPANY --out . -- SELF act await=trace hello", 0,
     DO("to ready KILL")},  // a child that the command did not start is left alone
    {"fails", "--max-restarts 3 --out . -- SELF act ranks=1 steps=3 lines exit=1", 1,
     DO("starts 4", "ms start 0 start 1 0 1000", "ms start 1 start 2 500 1500", "ms start 2 start 3 1000 2000",
        "events 4 failure", "events 1 gave up", "logs after 0.0 s; 0 consecutive failures",
        "logs after 0.5 s; 1 consecutive failures", "logs after 1.0 s; 2 consecutive failures",
        "says gave up: 3 consecutive failures without progress; best step 3, 4 starts", "says failure_0004.json",
        "failure 4", "output #20", "progress false", "rank 0", "output.0 line 12 \"\x01",
        "output.19 bytes \xEF\xBF\xBD and zero")},
    {"further", "--max-restarts 1 --out . -- SELF act ranks=1 further=3 times=4 exit=1", 0, DO("starts 5")},
    {"fewer", "--min-ranks 2 --max-restarts 2 --out . -- SELF act alone=0 enough=2 kill --ranks 4 --total-batch 64 "
     "--batch 2 --seq 4", 0,
     DO("starts 3", "trace ranks 0 4", "trace ranks 1 4", "trace ranks 2 2", "events 1 fewer ranks")},
    {"fewer, sharing rows", "--min-ranks 2 --max-restarts 2 --out . -- SELF act alone=0 enough=3 kill --ranks 6 --cp 3 "
     "--total-batch 64 --batch 2 --seq 4", 0,
     DO("starts 3", "trace ranks 0 6", "trace ranks 1 6", "trace ranks 2 3", "events 1 fewer ranks")},
    {"fewer, sharing layers", "--min-ranks 2 --max-restarts 2 --out . -- SELF act alone=0 enough=4 kill --ranks 8 "
     "--tp 2 --cp 2 --total-batch 64 --batch 2 --seq 4", 0,
     DO("starts 3", "trace ranks 0 8", "trace ranks 1 8", "trace ranks 2 4", "events 1 fewer ranks")},
    {"fewer, of an unknown number of micro-batches", "--min-ranks 1 --max-restarts 2 --out . -- SELF act alone=0 "
     "enough=1 kill --ranks 3", 0, DO("starts 3", "trace ranks 1 3", "trace ranks 2 1", "events 1 fewer ranks")},
    {"fewer, impossible", "--min-ranks 2 --max-restarts 3 --out . -- SELF act alone=0 kill", 1,
     DO("says nothing in the command gives the number of ranks", "starts 3", "events 0 fewer ranks")},
    {"vanished",
     DO("link vanishing", "run 1 --max-restarts 2 --out . -- ./vanishing act remove=vanishing exit=1",
        "says cannot start ./vanishing: No such file", "events 2 failure", "events 1 gave up")},

    // Signals.
    {"preempted", "--out . -- SELF act preempted", 75, .signal = "USR1",
     DO("trace saved 0 10", "starts 1", "events 1 signal", "events 1 stopped", "events 0 failure")},
    {"fails when asked", "--out . -- SELF act preempted=9", 9, .signal = "TERM",
     DO("trace saved 0 15", "starts 1", "events 1 signal", "events 1 stopped", "events 0 failure")},
    {"wrapped", "--out . -- SELF act wrapped", 75, .signal = "TERM",
     DO("trace saved 0 15", "starts 1", "events 1 signal", "events 1 stopped", "events 0 failure")},
    {"hung up", "--out . -- SELF act preempted", 75, .signal = "HUP", DO("trace saved 0 15", "starts 1")},
    {"ignores", "--checkpoint-timeout 1 --out . -- SELF act ignore ranks=1 trace=ready on=1", 1, .signal = "TERM",
     DO("ms signal 0 end 0 1000 2000", "starts 1")},
    {"orphaned", "--out . -- SELF act preempted", 128 + SIGKILL, .signal = "KILL", .also = orphaned_also},

    {"locked",
     DO("start --out . -- SELF act preempted", "await ready 0", "run 1 --out . -- SELF act clean",
        "says another supervisor watches .", "send TERM", "end 75")},
    {"pause",  // of 4 s
     DO("start --out . -- SELF act exit=1", "await event 4 restart", "send INT", "end 75", "ms signal 0 end 0 0 1000",
        "starts 4")},
    // Time in which nothing ran must not count: supervisor and command stop together, as when a container is frozen.
    {"frozen",
     DO("start --timeout 3 --out . -- SELF act ranks=1 trace=ready while=6500", "await ready 0", "to ready STOP",
        "sleep 100", "send STOP", "sleep 1200", "send CONT", "sleep 100", "send STOP", "sleep 1200", "send CONT",
        "sleep 100", "send STOP", "sleep 1200", "send CONT", "sleep 100", "send STOP", "sleep 1200", "send CONT",
        "sleep 100", "to ready CONT", "end 0", "starts 1")},
    {"frozen after a death",
     DO("start --out . -- SELF act times=1 ranks=2 1:steps=7 1:kill await=go exit=1", "await death 0", "sleep 200",
        "to start STOP", "send STOP", "sleep 4000", "send CONT", "sleep 300", "to start CONT", "make go", "end 0",
        "failure 1", "kind exit", "rank 1", "signal 9"), .asks_linux = true},

    // A failed start is a failure like any other, until there are descriptors again.
    {"starved",
     DO("run 1 --max-restarts 2 --out . -- SELF act unless=go starve exit=1", "starts 1", "says cannot start",
        "says gave up: 2 consecutive failures without progress; best step 0, 2 starts", "events 2 failure",
        "events 1 gave up", "failure 2", "kind start", "rank null", "exit_code null",
        "what ~Too many open files; check the command after --, and the limits", "unsay",
        "start --max-restarts 9 --out . -- SELF act unless=go starve exit=1", "await said cannot start", "make go",
        "limits", "end 0", "starts 3")},

    // While the disk hangs, ranks are still killed and signals passed on; no rank is left when the post-mortem is
    // written.
    {"disk hangs",
     DO("disk goes on",
        "start --timeout 1 --out . -- SELF act times=1 ignore ranks=2 steps=1 1:stop await=failures trace=outlived "
        "on=1", "disk hangs", "await rank 0", "gone rank 0 2000", "starts 1", "disk goes on", "end 0", "starts 2",
        "traces 0 outlived", "there failures/failure_0001.json", "disk goes on", "start --out . -- SELF act preempted",
        "disk hangs", "await ready 0", "send TERM", "await saved 0", "traces 1 saved", "disk goes on", "end 75",
        "disk goes on", "start --checkpoint-timeout 1 --out . -- SELF act ignore ranks=1 trace=ready on=1",
        "await ready 1", "disk hangs", "send TERM", "gone ready 1 3000", "disk goes on", "end 1")},
    {"refusals",
     DO("link train", "refuse 2 there is no command to run | --out .",
        "refuse 2 there is no command to run | --out . --",
        "refuse 2 did you mean --timeout? | --time 5 --out . -- SELF act clean",
        "refuse 2 --max-restarts is '0' | --max-restarts 0 --out . -- SELF act clean",
        "refuse 2 neither the supervisor nor the command has --out | -- SELF act clean",
        "refuse 2 no --resume | -- ./train act clean --out .",
        "refuse 2 no --resume | -- ./train act clean --out . --resume off",
        "refuse 2 no --resume | -- mpirun -np 2 ./train act clean --out .",
        "refuse 2 cannot start ./no-such-program: No such file | --out . -- ./no-such-program",
        "refuse 1 trace | --out trace/x -- SELF act clean", "starts 0", "run 0 -- ./train act clean --out . --resume",
        "run 0 -- ./train act clean --out . --resume=on", "run 0 --help", "prints --checkpoint-timeout")},
    {"flood", .run = case_flood}, {"untaken", .run = case_untaken}, {"unread", .run = case_unread},
};

// ------------------------------------------------------------------------------------------------
// 6. Trainer
//
// With exact sums of gradients, the weights have the same bits for any number of ranks, and however often the run was
// killed. These cases must meet the bounds stated in the documents, plus only what --slack gives.

#define STEPS 24
#define STRIKE_STEP 12  // between two checkpoints
#define RESTART_MS 3e3  // from the death of a rank to the first step, without the trainer's loading time
#define FOUND_MS 1e3    // from the end of its time limit until a hang is found
#define STOOD_MS 50.0   // between two looks of 2 ms each: beyond it this process was not running
#define TRAINER                                                                                              \
    "TRAIN --ranks 2 --family gpt2 --layers 2 --heads 2 --channels 16 --seq 16 --batch 1 --total-batch 128 " \
    "--steps 24 --lr 3e-3 --warmup 3 --threads 1 --reduce exact --timeout 20 --ckpt-every 5 --resume on "    \
    "--data ../train.bin --out run"
#define SLOWLY "rank 1 step 1 at update do delay 50"  // rank 0 waits in each step, which leaves time to strike

static double strict_slack_ms;

// Results of an undisturbed run.
static struct {
    uint64_t weights;
    double losses[STEPS], load_ms;  // from its start to its first step
} reference;

static uint64_t train_weights(void) {
    Error error;
    return weights_hash(text_of("run/step_%08d", STEPS), &error);
}

// Waits for the first step of the number-th start (from 1); returns its time.
static double train_await_step(int number) {
    for (double until = now_ms() + CASE_MS / 2; now_ms() < until; sleep_ms(1)) {
        const char* at = file_text("stdout");
        for (int i = 0; i < number && at; i++) at = strstr(i == 0 ? at : at + 1, "ranks (forked)");
        if (at && strstr(at, "\nstep ")) return now_ms();
    }
    check_case(false, "a step comes");
    return NAN;
}

static Supervised train_start(const char* flags) {
    return supervised_start(text_of("SUPERVISE %s --out . -- SELF act trains " TRAINER, flags), false);
}

// A rank's heartbeat in a supervisor's file, or NULL; that of a rank that has ended stays as it was.
static const Heartbeat* heartbeat_map(const char* path, size_t rank) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void* memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(Heartbeats), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) return NULL;
    const Heartbeats* heartbeats = (const Heartbeats*)memory;
    for (size_t i = 0; i < HEARTBEAT_RANKS; i++)
        if (heartbeats->ranks[i].counter > 1 && heartbeats->ranks[i].rank == rank) return &heartbeats->ranks[i];
    munmap(memory, sizeof(Heartbeats));
    return NULL;
}

// A rank's heartbeat in the first start; waits for it, and until it has reached this step.
static const Heartbeat* train_heartbeat(size_t rank, uint64_t step) {
    const Heartbeat* h = NULL;
    double until = now_ms() + CASE_MS / 2;
    await(is_traced, "start", 0);
    for (Traced t = trace_find("start", 0); h == NULL && now_ms() < until; sleep_ms(1)) h = heartbeat_map(t.more, rank);
    while (h && heartbeat_read(h).step < step && now_ms() < until) sleep_ms(1);
    bool there = check_case(h != NULL, "the rank comes") && heartbeat_read(h).step >= step;
    return (step == 0 && there) || check_case(there, "the step to strike in comes") ? h : NULL;
}

// Checks that the run completed after this many starts, with the weights of an undisturbed one.
static void train_check_end(Supervised* s, size_t starts) {
    supervised_end(s, 0);
    check_count(trace_count("start"), starts, "starts");
    check_case(train_weights() == reference.weights, "the weights are those of a run that was left alone");
}

static void train_reference(void) {
    double began = now_ms();
    Supervised s = supervised_start(TRAINER, false);
    reference.load_ms = train_await_step(1) - began;
    supervised_end(&s, 0);
    reference.weights = train_weights();
    check_case(reference.weights != 0, "it leaves its weights");
    check_count(log_numbers(reference.losses, STEPS, "run", "loss"), STEPS, "losses");
    printf("trainer: from start to first step in %.0f ms\n", reference.load_ms);
}

static void train_killed(void) {
    double started = NAN, stepped = NAN;
    setenv("LLMTRAIN_TEST_FAULT", SLOWLY, 1);
    Supervised s = train_start("--timeout 20");
    const Heartbeat* ranks[2] = {train_heartbeat(0, STRIKE_STEP), train_heartbeat(1, 0)};
    if (ranks[0] && ranks[1]) {
        double struck = now_ms();
        for (size_t i = 0; i < 2; i++)
            if (strchr(this_case->words, '0' + (int)i)) kill((pid_t)heartbeat_read(ranks[i]).pid, SIGKILL);
        stepped = train_await_step(2) - struck;
        started = trace_find("start", 1).ms - struck;
    }
    train_check_end(&s, 2);
    check_between(started, 0, RESTART_MS + strict_slack_ms, "from death to restart, ms");
    check_between(stepped, 0, RESTART_MS + reference.load_ms + strict_slack_ms, "from death to the next step, ms");
    case_do_steps();
}

// Stops rank 0 while it waits for the other rank's gradients.
static void stop_in_collective(void) {
    const Heartbeat* h = train_heartbeat(0, STRIKE_STEP);
    pid_t pid = h ? (pid_t)heartbeat_read(h).pid : 0;
    for (double until = now_ms() + CASE_MS / 2; h && now_ms() < until; sleep_ms(1)) {
        if (heartbeat_read(h).phase != HEARTBEAT_COLLECTIVE) continue;
        kill(pid, SIGSTOP);
        sleep_ms(5);
        if (heartbeat_read(h).phase == HEARTBEAT_COLLECTIVE) return;
        kill(pid, SIGCONT);  // the collective was over
    }
    check_case(false, "rank 0 stops in a collective");
}

#define STEP_S 5.0  // longer than any step that does not hang, on a busy machine
#define SAVE_S 6.0  // longer than a save: it waits for the disk several times, which all cases share

// A rank hangs in a phase with this limit; no other limit applies. A rank that waits for it in a phase with the same
// limit may have sent its last heartbeat earlier: the limit counts from the older one.
static void train_hung(void) {
    const char* fault = this_case->words;
    bool saves = strstr(fault, " at save ") != NULL, collective = strstr(fault, "collective") != NULL;
    double found = NAN, stood = 0, limit_s = saves ? SAVE_S : STEP_S, limit_ms = 1e3 * limit_s;
    setenv(collective ? "LLMTRAIN_TEST_FAULT" : FAULT_ONCE, collective ? SLOWLY : fault, 1);
    double step_s = saves ? 20 : limit_s, save_s = saves ? limit_s : 20;
    Supervised s = train_start(text_of("--timeout %g --checkpoint-timeout %g", step_s, save_s));
    const Heartbeat* ranks[2] = {train_heartbeat(0, 0), train_heartbeat(1, 0)};
    if (collective) stop_in_collective();
    // If the machine was suspended or is overloaded, this process is late, as is the supervisor, which does not count
    // that time either; nor can it look while it waits for a processor.
    double seen = now_ms(), until = seen + CASE_MS / 2, waited = 0;
    for (; isnan(found) && now_ms() < until; sleep_ms(2)) {
        double oldest = INFINITY;
        for (size_t r = 0; r < 2; r++) {
            if (ranks[r] == NULL) continue;
            Heartbeat h = heartbeat_read(ranks[r]);
            if ((h.phase == HEARTBEAT_PAUSE) == saves) oldest = fmin(oldest, (double)h.ms);
        }
        stood += fmax(now_ms() - seen - STOOD_MS, 0);
        seen = now_ms();
        waited = fmax(machine_waited_ms(s.pid), waited);  // 0 once it has ended
        if (events_count("failure") > 0) found = now_ms() - oldest;
    }
    train_check_end(&s, 2);
    check_between(found, limit_ms, limit_ms + FOUND_MS + stood + waited + strict_slack_ms,
                  "from the oldest last heartbeat to the event, ms");
    case_do_steps();
}

// A rank that dies in every start, as if its machine were broken, until the run continues without it.
static void train_fewer(void) {
    double losses[STEPS];
    size_t differ = 0;
    setenv("LLMTRAIN_TEST_FAULT", "rank 1 step 12 at forward do kill", 1);
    Supervised s = train_start("--min-ranks 1");
    train_check_end(&s, 4);
    case_do_steps();
    check_count(log_numbers(losses, STEPS, "run", "loss"), STEPS, "losses");
    for (size_t i = 0; i < STEPS; i++) differ += !(losses[i] == reference.losses[i]);
    check(differ == 0, "%s: %zu losses are not those of two ranks", case_name, differ);
}

// Kills run one after the other, since restarts are timed and need a free machine.
static const Case TRAINER_KILLS[] = {
    {"trainer, asked to supervise",
     DO("run 2 TRAIN supervise --out . -- true", "says a separate program: ./supervise")},
    {"trainer, rank 0 killed", "0", .run = train_killed, DO("failure 1", "kind signal", "signal 9", "rank 0")},
    {"trainer, rank 1 killed", "1", .run = train_killed, DO("failure 1", "kind exit", "rank 1", "signal 9",
        "says rank 1 was terminated by signal 9")},
    {"trainer, all killed", "0 1", .run = train_killed, DO("failure 1", "kind signal", "signal 9")},
};
static const Case TRAINER_HANGS[] = {
    {"trainer, hangs in a step", "rank 1 step 12 at forward do hang", .run = train_hung,
     DO("failure 1", "kind hang", "rank 1", "phase step")},
    {"trainer, hangs while it sends gradients", "rank 0 step 12 at reduce do hang", .run = train_hung,
     DO("failure 1", "kind hang", "rank 0", "phase step")},
    {"trainer, hangs in a checkpoint", "rank 1 step 10 at save do hang", .run = train_hung,
     DO("failure 1", "kind hang", "rank 1", "phase checkpoint")},
    {"trainer, stopped in a step", "rank 0 step 12 at forward do stop", .run = train_hung,
     DO("failure 1", "kind hang", "rank 0", "phase step", "0.state T")},
    {"trainer, stopped in a collective", "rank 0 in a collective", .run = train_hung,
     DO("failure 1", "kind hang", "rank 0", "phase collective", "0.state T")},
    {"trainer, stopped in a checkpoint", "rank 0 step 10 at save do stop", .run = train_hung,
     DO("failure 1", "kind hang", "rank 0", "phase checkpoint", "0.state T")},
    {"trainer, a rank lost for good", .run = train_fewer,
     DO("trace ranks 0 2", "trace ranks 1 2", "trace ranks 2 2", "trace ranks 3 1", "events 1 fewer ranks")},
};

// ------------------------------------------------------------------------------------------------
// 7. Units

static void unit_clock(void) { now_ms(); }
static void unit_heartbeats(void) {
    for (uint64_t i = 0; i < 1000; i++) {
        heartbeat_send(HEARTBEAT_STEP, i);
        heartbeat_collective("all_gather");
    }
}

// A heartbeat must be read whole, or recognized as torn.
static void test_torn_heartbeats(const Heartbeat* mapped) {
    bool one_core = machine_cores() < 2;
    heartbeat_write(heartbeat_slot, HEARTBEAT_STEP, 0, "0", false);
    pid_t writer = fork_process();
    machine_use_core(writer == 0);
    if (writer == 0) for (uint64_t i = 1;; i++) {
        heartbeat_write(heartbeat_slot, HEARTBEAT_STEP, i, text_of("%llu", (unsigned long long)i), false);
        for (double until = now_ms() + 1e-3; now_ms() < until;) {}
        if (one_core && i % 100 == 0) sched_yield();
    }
    enum { READS = 1000, MORE_READS = 100000 };  // the second as far as possible in two seconds
    bool whole = true;
    size_t different = 0;
    double more_until = now_ms() + 2000, until = now_ms() + 2 * CASE_MS;
    for (uint64_t last = 0; different < MORE_READS && now_ms() < (different < READS ? until : more_until);) {
        Heartbeat h = heartbeat_read(mapped);
        if (h.counter % 2 == 1) continue;  // the writer was interrupted in the middle of it
        whole = whole && strtoull(h.collective, NULL, 10) == h.step;
        different += h.step != last;
        if (one_core && h.step == last) sched_yield();
        last = h.step;
    }
    kill(writer, SIGKILL);
    waitpid(writer, NULL, 0);
    machine_use_core(-1);
    check_case(whole, "heartbeats are read whole");
    check_case(different >= READS, "heartbeats are read while they are written");
}

static void test_heartbeats(void) {
    Error error;
    case_name = "heartbeats";
    heartbeat_send(HEARTBEAT_STEP, 1);
    heartbeat_collective("all_gather");
    heartbeat_close();
    bool opened = heartbeat_open(NULL, 0, 1, &error);
    check_case(opened && heartbeat_slot == NULL, "without a supervisor nothing happens");
    opened = heartbeat_open("/nonexistent", 0, 1, &error);
    check_case(opened && heartbeat_slot == NULL, "nor with one on another machine");
    char path[HEARTBEAT_PATH_BYTES];
    int lock;
    Heartbeats* heartbeats = heartbeats_make(&lock, path, &error);
    opened = heartbeats && heartbeat_open(path, 3, 4, &error) && heartbeat_slot != NULL;
    if (!check_case(opened, "opened")) return;
    const Heartbeat* mapped = heartbeat_map(path, 3);
    need(mapped != NULL, "map");
    Heartbeat h = heartbeat_read(mapped);
    check_case(h.rank == 3 && h.world == 4 && h.pid == (uint64_t)getpid(), "rank, world and process");
    check_case(h.phase == HEARTBEAT_SETUP && h.step == 0 && h.closed == 0, "first heartbeat");
    double before = now_ms();
    heartbeat_send(HEARTBEAT_PAUSE, 12);
    heartbeat_collective("a name of more than thirty-two characters");
    h = heartbeat_read(mapped);
    check_case(h.phase == HEARTBEAT_COLLECTIVE && h.step == 12, "a collective keeps the step");
    check_between((double)h.ms, before - 1, before + 1000 + slack_ms, "time of a heartbeat, ms");
    check_case(strcmp(h.collective, "a name of more than thirty-two ") == 0, "a long name is cut");
    heartbeat_collective("barrier");
    check_case(strcmp(heartbeat_read(mapped).collective, "barrier") == 0, "a short name replaces it");
    bool possible = machine_runs_without_calls(unit_clock);
    if (possible) check_case(machine_runs_without_calls(unit_heartbeats), "no system calls");
    else skip("that a heartbeat makes no system calls", "here the clock does, or none can be forbidden");
    test_torn_heartbeats(mapped);
    heartbeat_slot->counter = 2;
    heartbeat_close();
    h = heartbeat_read(mapped);
    check_case(h.closed == 1 && heartbeat_slot == NULL, "closed");
    heartbeats->count = HEARTBEAT_RANKS;
    check_case(heartbeat_open(path, 0, 1, &error) && heartbeat_slot == NULL, "one too many has no heartbeat");
    munmap(heartbeats, sizeof *heartbeats);
    close(lock);
    unlink(path);
}

// What a killed supervisor has left is removed by the next one, but not the file of one that runs.
static void test_left_heartbeats(void) {
    char paths[2][HEARTBEAT_PATH_BYTES], *left = (char*)mmap(NULL, HEARTBEAT_PATH_BYTES, PROT_READ | PROT_WRITE,
                                                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Heartbeats* made[2];
    int locks[3];
    Error error;
    case_name = "heartbeats that are left";
    need(left != MAP_FAILED, "memory");
    pid_t killed = fork_process();
    if (killed == 0) {
        if (!heartbeats_make(&locks[2], left, &error)) _exit(EXIT_NOT_RUN);
        raise(SIGKILL);
    }
    waitpid(killed, NULL, 0);
    check_case(file_exists(left), "a killed supervisor leaves its file");
    for (int i = 0; i < 2; i++) made[i] = heartbeats_make(&locks[i], paths[i], &error);
    need(made[0] && made[1], "%s", error.text);
    check_case(!file_exists(left), "the next removes it");
    for (int i = 0; i < 2; i++) {  // of a build that took no lock, or where none could be taken
        const char* other = text_of("%s/llmtrain-%s-a%05d", SYSTEM_MEMORY_FOLDER, i ? "locked" : "heartbeats",
                                    (int)(getpid() % 100000));
        static Heartbeats unlocked;
        need(file_write_atomic(other, (const char*)&unlocked, sizeof unlocked, &error), "%s", error.text);
        heartbeats_clean(SYSTEM_MEMORY_FOLDER);
        check_case(file_exists(other), "one that has no lock stays");
        unlink(other);
    }
    check_case(file_exists(paths[0]) && file_exists(paths[1]), "but not the file of one that runs");
    for (int i = 0; i < 2; i++) munmap(made[i], sizeof *made[i]), close(locks[i]), unlink(paths[i]);
    munmap(left, HEARTBEAT_PATH_BYTES);
}

// Becomes a rank of the trainer with these variables of a launcher.
static void become_rank(const char* heartbeats, const char* variables) {
    Words words = {.count = 0};
    environment_clear();
    environment_set(variables);
    setenv(HEARTBEAT_VARIABLE, heartbeats, 1);
    words_add(&words, text_of("%s --data %s/train.bin --out %s/alone --layers 1 --heads 1 --channels 8 --seq 8 "
                              "--batch 1", train_path, root, root));
    if (freopen("/dev/null", "w", stdout)) execv(words.words[0], words.words);
    _exit(EXIT_NOT_RUN);
}

// A rank tells the supervisor the number of ranks only if all are on this machine: otherwise those of others would be
// missed, or not.
static void test_world(void) {
#define RANK_OF_2 "RANK=0|WORLD_SIZE=2|MASTER_ADDR=127.0.0.1|MASTER_PORT=9|LOCAL_RANK=0"
    static const struct { const char* variables; uint64_t world; } cases[] = {
        {RANK_OF_2, 0}, {RANK_OF_2 "|LOCAL_WORLD_SIZE=1", 0}, {RANK_OF_2 "|LOCAL_WORLD_SIZE=2", 2}};
    Error error;
    char path[HEARTBEAT_PATH_BYTES];
    case_name = "world";
    int lock;
    Heartbeats* heartbeats = heartbeats_make(&lock, path, &error);
    need(heartbeats != NULL, "%s", error.text);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        pid_t rank = fork_process();
        if (rank == 0) become_rank(path, cases[i].variables);
        const Heartbeat* h = &heartbeats->ranks[i];
        for (double until = now_ms() + CASE_MS; h->counter < 2 && now_ms() < until; sleep_ms(1)) {}
        check_case(h->counter >= 2 && heartbeat_read(h).world == cases[i].world, cases[i].variables);
        kill(rank, SIGKILL);
        waitpid(rank, NULL, 0);
    }
    munmap(heartbeats, sizeof *heartbeats);
    close(lock);
    unlink(path);
}

static void test_events(void) {
    enum { WRITERS = 4, LINES = 100 };
    Error error;
    char detail[256];
    case_name = "events";
    const char* path = text_of("%s/events.jsonl", root);
    put_text(path, "{\"cut");
    pid_t writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        if ((writers[i] = fork_process()) > 0) continue;
        memset(detail, 'a' + i, sizeof detail - 1);
        detail[sizeof detail - 1] = 0;
        bool good = true;
        for (uint64_t k = 0; k < LINES; k++)
            good = good && event_write(root, NULL, "test \"quoted\"", k, detail, NULL, NULL, &error);
        _exit(!good);
    }
    bool all = true;
    for (int i = 0, status; i < WRITERS; i++) all = waitpid(writers[i], &status, 0) > 0 && status == 0 && all;
    check_case(all, "written");
    size_t lines = 0, bad = 0;
    char* text = text_read(path, NULL);
    check_case(strncmp(text, "{\"cut\n", 6) == 0, "a line that was cut stays alone");
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
    check_count(lines, WRITERS * LINES, "lines");
    check_count(bad, 0, "lines that are not JSON");
    free(text);
    check_case(!event_write("/nonexistent", NULL, "test", 0, "", NULL, NULL, &error), "a directory that is not there");
}

static void test_commands(void) {
    static const struct {
        const char* text;
        size_t world;
        const char* at;
        size_t ranks, min, fewer;
        bool resumes;
    } cases[] = {
        {"./train --ranks 4 --resume", 0, "4", 4, 1, 2, true},
        {"./train --ranks=4 --resume on", 4, "4", 4, 1, 2, true},
        {"mpirun -np 8 ./train --resume=on", 8, "8", 8, 8, 0, true},
        {"mpirun -n 8 ./train --resume off", 8, "8", 8, 4, 4, false},
        {"nice -n 10 mpirun -n 4 ./train", 4, "4", 4, 1, 2, false},
        {"nice -n 10 mpirun -np 4 ./train", 0, "4", 4, 1, 2, false},
        {"./train --ranks 1", 1, "1", 1, 1, 0, false},
        {"./train --ranks 6 --total-batch 96 --batch 2 --seq=8", 6, "6", 6, 1, 3, false},
        {"./train --ranks 6 --total-batch 96 --batch 2 --seq=8", 6, "6", 6, 4, 0, false},
        {"./train --ranks 6 --total-batch 96 --batch 2", 6, "6", 6, 4, 0, false},
        {"./train --ranks 6 --total-batch 96 --batch 2", 6, "6", 6, 1, 3, false},
        {"./train --ranks 6 --total-batch 0 --batch 2", 6, "6", 6, 1, 3, false},
        {"./train --ranks 8 --shard 4", 8, "8", 8, 1, 4, false},
        {"./train --ranks 8 --shard 3 --total-batch 96 --batch 2 --seq 4", 8, "8", 8, 1, 6, false},
        {"./train --ranks x -n 0", 0, NULL, 0, 0, 0, false},
        {"./train --ranks 4x -n -4", 0, NULL, 0, 0, 0, false},
        {"./train -n", 0, NULL, 0, 0, 0, false},
    };
    case_name = "commands";
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Words words = {0};
        size_t ranks = 0;
        words_add(&words, cases[i].text);
        const char* at = command_ranks(&ranks, words.words, cases[i].world);
        bool same = at && cases[i].at ? strcmp(at, cases[i].at) == 0 : at == cases[i].at;
        check(same, "%s: word of the ranks", cases[i].text);
        check(ranks == cases[i].ranks, "%s: ranks", cases[i].text);
        size_t fewer = ranks ? command_fewer_ranks(words.words, ranks, cases[i].min) : 0;
        check(fewer == cases[i].fewer, "%s: fewer ranks", cases[i].text);
        check(command_resumes(words.words) == cases[i].resumes, "%s: resumes", cases[i].text);
    }
}

// Heartbeats of three ranks, in the order in which they appeared: 2, 1, 0; and the slot of the rank to blame.
static const struct {
    const char* name;
    struct {
        HeartbeatPhase phase;
        uint64_t step;
        double still_ms;
        char state;
        bool closed;
    } ranks[3];
    int slot;               // -1: none
    const char* says;
} BLAMES[] = {
#define STEP HEARTBEAT_STEP  // limits: 1 s, also in a collective; a checkpoint may take 5 s
#define SUMS HEARTBEAT_COLLECTIVE
#define SAVE HEARTBEAT_PAUSE
    {"all is well", {{STEP, 0, 999, 'S', 0}, {STEP, 0, 999, 'S', 0}, {SUMS, 0, 999, 'S', 0}}, -1, NULL},
    {"the one that is not in the collective",
     {{SUMS, 0, 1001, 'S', 0}, {SUMS, 0, 1001, 'S', 0}, {SAVE, 0, 900, 'S', 0}}, 2,
     "rank 0 (process 0) sent its last heartbeat 0.9 s ago in phase checkpoint; rank 2 (process 0) has sent no "
     "heartbeat for 1.0 s"},
    {"the one that is a step behind",
     {{SUMS, 2, 1001, 'S', 0}, {SUMS, 1, 1001, 'S', 0}, {SAVE, 2, 900, 'S', 0}}, 1, NULL},
    {"the one that was stopped", {{SUMS, 2, 1001, 'T', 0}, {SUMS, 1, 1001, 'S', 0}, {SAVE, 2, 900, 'S', 0}}, 0,
     "sent its last heartbeat 1.0 s ago in phase collective, step 2; it was stopped by a signal"},
    {"the one that has stood still the longest",
     {{SUMS, 1, 1001, 'S', 0}, {SUMS, 1, 1001, 'S', 0}, {SUMS, 1, 1500, 'S', 0}}, 2, NULL},
    {"each phase has its limit", {{SUMS, 1, 999, 'S', 0}, {SUMS, 1, 999, 'S', 0}, {SAVE, 1, 1500, 'S', 0}}, -1, NULL},
    {"also a checkpoint", {{SUMS, 1, 999, 'S', 0}, {SUMS, 1, 999, 'S', 0}, {SAVE, 1, 5001, 'S', 0}}, 2, NULL},
    {"the one that has exited", {{SUMS, 1, 1001, 'S', 0}, {SUMS, 1, 1500, 'S', 1}, {SAVE, 1, 4999, 'S', 0}}, 1,
     "rank 1 (process 0) exited 1.5 s ago in phase collective"},
    {"0 is no limit", {{SUMS, 1, 999, 'S', 0}, {SUMS, 1, 999, 'S', 0}, {SAVE, 1, 5001, 'S', 0}}, -1, NULL},
};

static void test_blame(void) {
    static Supervisor s;
    RankView* views = s.views;
    case_name = "blame";
    s.view_count = s.world = 3;
    s.limits[HEARTBEAT_STEP] = s.limits[HEARTBEAT_COLLECTIVE] = 1;
    for (size_t i = 0; i < COUNT_OF(BLAMES); i++) {
        Failure f;
        memset(&f, 0, sizeof f);
        s.limits[HEARTBEAT_PAUSE] = i + 1 < COUNT_OF(BLAMES) ? 5 : 0;
        for (size_t k = 0; k < 3; k++) {
            views[k].seen.rank = 2 - k;
            views[k].seen.phase = BLAMES[i].ranks[k].phase;
            views[k].seen.step = BLAMES[i].ranks[k].step;
            views[k].seen.closed = BLAMES[i].ranks[k].closed;
            views[k].still_ms = BLAMES[i].ranks[k].still_ms;
            views[k].state = BLAMES[i].ranks[k].state;
        }
        bool found = supervise_find_failure(&f, &s);
        check_case(found == (BLAMES[i].slot >= 0) && (!found || (f.rank == &views[BLAMES[i].slot] && !f.lost)),
                   BLAMES[i].name);
        if (BLAMES[i].says) check_text(f.what, BLAMES[i].says);
    }

    // Of two that died at once, the one silent for longer; a rank that has closed its heartbeat has not died.
    for (size_t i = 0; i < 3; i++) views[i].ended_ms = 1;
    views[0].seen.closed = 1;
    views[1].seen.ms = 20;
    views[2].seen.ms = 10;
    check_case(supervise_worst(&s) == &views[2] && rank_fate(&views[2]) == RANK_KILLED, "silent for longer");
    views[2].ended_ms = 2;
    check_case(supervise_worst(&s) == &views[1], "seen dead first");
    for (size_t i = 0; i < 3; i++) {
        views[i].seen.closed = 1;
        views[i].seen.phase = i == 0 ? HEARTBEAT_DONE : HEARTBEAT_STEP;
    }
    check_case(supervise_worst(&s) == &views[2] && rank_fate(&views[2]) == RANK_EXITED, "exited first");
    check_case(supervise_absent(&s) == 3, "all came");
    s.view_count = 2;
    check_case(supervise_absent(&s) == 0, "one did not come");
    s.world = 0;
    check_case(supervise_absent(&s) == 0, "of an unknown number nobody is missed");
}

// The description of a command that ended with this wait status.
static void explain(Failure* f, Supervisor* s, int status) {
    memset(f, 0, sizeof *f);
    s->status = status;
    supervise_explain_end(f, s);
}

static void test_ends(void) {
    static Supervisor s;
    Failure f;
    case_name = "ends";
    s.child = 11;
    s.view_count = s.world = 2;
    for (size_t i = 0; i < 2; i++) {
        s.views[i].seen.rank = 1 - i;  // the command is rank 0, and came last
        s.views[i].seen.pid = 10 + i;
        s.views[i].end = -1;
    }
    s.views[0].ended_ms = now_ms();
    explain(&f, &s, SIGKILL);
    check_case(f.rank == &s.views[1] && f.lost, "of ranks that end together, the command is blamed");
    check_text(f.what, "rank 0 (process 11) was terminated by signal 9 (Killed)");
    s.views[0].ended_ms = now_ms() - 500;
    explain(&f, &s, SIGKILL);
    check_case(f.rank == &s.views[0] && f.lost, "otherwise the rank that ended first");
    check_text(f.what, "rank 1 (process 10) ended with an unknown exit code in phase setup; "
                       "the command was terminated by");
    for (size_t i = 0; i < 2; i++) s.views[i].seen.closed = 1;
    explain(&f, &s, 1 << 8);
    check_case(!f.lost, "a command that fails has lost no rank");
    explain(&f, &s, 137 << 8);
    check_case(f.lost, "unless it reports a signal");
    s.world = 3;
    s.ranks_ms = 500;
    explain(&f, &s, 1 << 8);
    check_case(!f.lost, "a rank that has had no time to start is not missed");
    s.ranks_ms = 1500;
    explain(&f, &s, 1 << 8);
    check_case(f.lost, "one that had is");
    check_text(f.what, "the command ended with exit code 1; rank 2 of 3 never sent a heartbeat");
}

// The supervisor sees how a rank ended at once, before the rank's parent reaps it.
static void test_zombie(void) {
    static Supervisor s;
    Error error;
    case_name = "zombie";
    s.relays[0].from = s.relays[1].from = -1;
    s.heartbeats = heartbeats_make(&s.heartbeats_lock, s.heartbeats_path, &error);
    need(s.heartbeats != NULL, "%s", error.text);
    pid_t parent = fork_process();
    if (parent == 0) {
        if (fork() == 0) heartbeat_open(s.heartbeats_path, 0, 1, &error);
        for (;;) pause();
    }
    for (double until = now_ms() + CASE_MS / 2; s.view_count == 0 && now_ms() < until; sleep_ms(1))
        supervise_read_ranks(&s);
    if (check_case(s.view_count == 1, "the rank comes")) {
        kill((pid_t)s.views[0].seen.pid, SIGKILL);
        supervise_poll(&s, CASE_MS / 2);
        check_case(s.views[0].ended_ms > 0, "its end wakes the supervisor");
        check_case(s.views[0].status == SIGKILL, "and is known");
    }
    kill(parent, SIGKILL);
    waitpid(parent, NULL, 0);
    check_case(supervise_end_all(&s), "nothing is left of it");
}

// A process that cannot be inspected must not count as gone.
static void test_unseen(void) {
    static Supervisor s;
    Error error;
    Process p;
    struct rlimit limit, none;
    case_name = "no descriptors";
    s.heartbeats = heartbeats_make(&s.heartbeats_lock, s.heartbeats_path, &error);
    need(s.heartbeats != NULL && heartbeat_open(s.heartbeats_path, 0, 1, &error), "heartbeats");
    pid_t child = fork_process();
    if (child == 0) {
        setsid();
        raise(SIGSTOP);
        _exit(0);
    }
    waitpid(child, NULL, WUNTRACED);
    while (waitpid(-1, NULL, WNOHANG) > 0) {}  // what cases have left
    supervise_read_ranks(&s);
    check_case(s.view_count == 1 && s.views[0].ended_ms == 0, "a rank is there");
    bool there = process_read(&p, child);
    check_case(there && p.parent == getpid() && p.session == child && p.state == 'T', "a child is there");
    check_case(processes_signal(child, 0) == 1, "and is counted");
    getrlimit(RLIMIT_NOFILE, &none);
    limit = none;
    none.rlim_cur = 0;
    need(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    there = process_read(&p, child);
    size_t left = processes_signal(child, 0);
    supervise_read_ranks(&s);
    need(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    check_case(there, "a process that cannot be read is not gone");
    check_case(left > 0, "nor are all when /proc cannot be read");
    check_case(s.views[0].ended_ms == 0, "nor is a rank");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    check_case(!process_read(&p, child) && processes_signal(child, 0) == 0, "one that has ended is gone");
    heartbeat_close();
    check_case(supervise_end_all(&s) && !file_exists(s.heartbeats_path), "nothing is left of it");
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
    check_case(strcmp(w.text, "[\"out\",\"err\",\"\",\"more\"]") == 0, "two streams, cut lines, empty ones");
    json_writer_free(&w);
    memset(long_line, 'x', sizeof long_line - 1);
    for (size_t i = 0; i < 2; i++) tail_put(&t, long_line, sizeof long_line - 1, 1);
    tail_put(&t, "\nlast\n", 6, 1);
    tail_write(&w, &t);
    long_line[TAIL_LINE_BYTES - 1] = 0;
    check_case(strncmp(w.text, "[\"out\",\"err\",\"\",\"morexx", 23) == 0, "a line is continued");
    check_case(strstr(w.text, long_line + 4) && !strstr(w.text, long_line), "and cut when it is too long");
    check_case(strcmp(w.text + w.bytes - 9, "\",\"last\"]") == 0, "and one after it");
    json_writer_free(&w);
    for (size_t i = 0; i < TAIL_LINES; i++) tail_put(&t, "a\nb\n", 4, 1);
    tail_write(&w, &t);
    check_case(w.bytes == 1 + 4 * TAIL_LINES && strncmp(w.text, "[\"a\",\"b\",", 9) == 0, "so many lines are kept");
    json_writer_free(&w);
}

// ------------------------------------------------------------------------------------------------
// 8. Main

// Runs cases at once, each in a process and a directory of its own.
static void cases_run(const Case* cases, size_t count) {
    static int directories;
    pid_t children[COUNT_OF(CASES)] = {0};
    size_t left = 0;
    fflush(NULL);
    for (size_t i = 0; i < count; i++) {
        const char* directory = text_of("%s/%d", root, directories++);
        if (cases[i].asks_linux && !linux_tells) {
            skip(cases[i].name, "only Linux tells how any process has ended");
            continue;
        }
        left++;
        need(mkdir(directory, 0777) == 0 && (children[i] = fork()) >= 0, "%s", directory);
        if (children[i] > 0) continue;
        this_case = &cases[i];
        case_name = this_case->name;
        need(chdir(directory) == 0, "%s", directory);
        if (this_case->run) this_case->run();
        else case_run();
        for (size_t k = 0; is_traced("start", k); k++)
            check_case(!file_exists(trace_find("start", k).more), "the heartbeats are removed");
        fflush(NULL);
        _exit(0);
    }
    while (left > 0) {  // orphans end here too
        int status = 0;
        pid_t pid = waitpid(-1, &status, 0);
        need(pid > 0, "the end of a case");
        for (size_t i = 0; i < count; i++) {
            if (children[i] != pid) continue;
            case_name = cases[i].name;
            check_case(status == 0, "the case ends");
            left--;
        }
    }
}

static void test_trainer(void) {
    const char* directory = text_of("%s/reference", root);
    case_name = "trainer";
    need(access(supervise_path, X_OK) == 0, "%s; build it", supervise_path);
    put_shard(text_of("%s/train.bin", root), 64, 8000, 1);
    need(mkdir(directory, 0777) == 0 && chdir(directory) == 0, "%s", directory);
    train_reference();
    need(chdir(root) == 0, "%s", root);
    if (reference.weights == 0) return;  // not a working trainer, as already reported
    for (size_t i = 0; i < COUNT_OF(TRAINER_KILLS); i++) cases_run(&TRAINER_KILLS[i], 1);
    cases_run(TRAINER_HANGS, COUNT_OF(TRAINER_HANGS));
}

int main(int argc, char** argv) {
    if (argc > 2 && strcmp(argv[1], "act") == 0) return act(argv + 2);
    Error error;
    const char* train = "./train";
    const Flag rows[] = {
        {"train", KIND_TEXT, &train, "PATH", 0, 0, "the program, built for fp32", false},
        {"slack", KIND_REAL, &slack_ms, "MS", 0, 60000, "what a busy machine may add to any time", false},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    tests_begin("test_supervise");
    need(flags_parse(&flags, argc, argv, &error), "%s", error.text);
    if (flag_was_given(&flags, "slack")) strict_slack_ms = slack_ms;
    bool trainer = realpath(train, train_path) && access(train_path, X_OK) == 0 && !directory_exists(train_path);
    need(realpath(argv[0], self_path), "the path of this program");
    int length = (int)(strrchr(self_path, '/') - self_path);
    snprintf(supervise_path, sizeof supervise_path, "%.*s/supervise", length, self_path);
    machine_adopt_orphans(true);
    int watched = process_watch(getpid());
    linux_tells = watched >= 0;
    if (linux_tells) close(watched);
    unsetenv(HEARTBEAT_VARIABLE);
    root_enter();
    cases_run(CASES, COUNT_OF(CASES));
    if (trainer) test_trainer();
    else skip("the trainer's own runs", text_of("there is no %s; build it, or give --train PATH", train));
    test_heartbeats();
    test_left_heartbeats();
    if (trainer) test_world();
    test_events();
    test_commands();
    test_blame();
    test_ends();
    if (linux_tells) test_zombie();
    if (linux_tells) test_unseen();
    test_tail();
    case_name = "in the end";
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
    check_case(processes_signal(0, SIGKILL) == 0, "nothing is left running");
    return tests_end();
}
