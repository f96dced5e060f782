// test_watch: tests of build/watch, on runs that are written here with fixed times, and of the bars of long work.
//
//   make build/test_watch build/watch build/tokenize && build/test_watch [--watch PATH] ...
//
//   1. lines      what is printed of runs in every state, and the exit codes
//   2. files      that are torn, damaged, missing, long
//   3. page       on a pseudo terminal: each line of it, widths, signals
//   4. bars       of a long work in this process, and of tokenize

#include "harness.h"

#include "llmtrain/base/flags.h"
#include "llmtrain/base/json.h"
#include "llmtrain/base/progress.h"
#include "llmtrain/run/heartbeat.h"

static struct {
    const char *watch, *tokenize;
} test;
static Error error;

#define T0 1764000000.0  // 2025-11-24T16:00:00Z

// ------------------------------------------------------------------------------------------------
// Runs

static void append(const char* path, const char* text) {
    FILE* file = fopen(path, "ab");
    need(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s", path);
}

// A line of metrics.jsonl: its loss is 3 - step / 1000. time: 0 for a line without one.
static const char* line_text(unsigned step, double time, double ms, const char* val_loss) {
    char timed[64] = "";
    if (time > 0) snprintf(timed, sizeof timed, "\"time\": %.3f,", time);
    return text_of("{\"step\": %u,\"loss\": %.4f,\"val_loss\": %s,\"grad_norm\": 0.5,\"lr\": 0.001,\"tokens\": 1,"
                   "\"skipped\": 0,%s\"ms\": %g,\"wait_share\": 0.25,\"tok_per_s\": 1234.5,\"mfu\": 0.412,"
                   "\"mem_bytes\": 2500000000}\n", step, 3 - step / 1000.0, val_loss, timed, ms);
}

static void event(const char* run, double time, const char* name, unsigned step, const char* detail) {
    char text[64];
    time_t whole = (time_t)floor(time);
    struct tm utc;
    gmtime_r(&whole, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    append(text_of("%s/events.jsonl", run),
           text_of("{\"time\": \"%s.%03dZ\",\"event\": \"%s\",\"step\": %u,\"detail\": \"%s\"}\n", text,
                   (int)(1000 * (time - floor(time))), name, step, detail));
}

// A run of `steps` steps of `ms` milliseconds so far, of every `every`th a line, that began at T0. Its last line is
// written at T0 + steps * ms / 1000.
static void make_run(const char* run, unsigned steps, double ms, unsigned every, bool timed) {
    remove_tree(run);
    need(mkdir(run, 0777) == 0, "%s", run);
    event(run, T0, "begun", 0, "1 ranks");
    FILE* file = fopen(text_of("%s/metrics.jsonl", run), "wbe");
    need(file != NULL, "%s", run);
    for (unsigned step = every; step <= steps; step += every)
        fputs(line_text(step, timed ? T0 + step * ms / 1000 : 0, ms, step == 100 ? "2.95" : "null"), file);
    need(fclose(file) == 0, "%s", run);
    put_text(text_of("%s/run.jsonl", run), "{\"time\": 1764000000,\"steps\": 1000,\"floor\": 2.5}\n");
}

static Program program;

static void set_environment(const void* list) {
    environment_clear();
    environment_set((const char*)list);
}

// Runs a program at a time; returns its exit code.
static int run_at(double now, const char* path, const char* arguments) {
    return program_execute(&program, path, arguments, set_environment, text_of("LLMTRAIN_TEST_NOW=%.3f", now));
}

// Expects an exit code, and the line of a run.
static void expect_line(double now, const char* arguments, int code, const char* line) {
    int got = run_at(now, test.watch, arguments);
    expect(got == code, "%s: exit code %d, not %d; %s", arguments, got, code, program.text[1]);
    expect(strcmp(program.text[0], line) == 0, "%s:\n          printed %s          expected %s", arguments,
           program.text[0], line);
}

// Expects these words in what is printed.
static void expect_words(double now, const char* arguments, int code, const char* words) {
    int got = run_at(now, test.watch, arguments);
    expect(got == code, "%s: exit code %d, not %d; %s%s", arguments, got, code, program.text[0], program.text[1]);
    expect(strstr(program.text[0], words) || strstr(program.text[1], words), "%s: '%s' is not in: %s%s", arguments,
           words, program.text[0], program.text[1]);
}

// ------------------------------------------------------------------------------------------------
// 1. Lines

static void test_states(void) {
    make_run("r", 200, 400, 1, true);
    expect_line(T0 + 85, "r", 0, "r: running; step 200/1000 (20%), 5 min left, loss 2.8000, val 2.9500, floor 2.5000 "
                "(+18.0%), 1234 tok/s\n");
    event("r", T0 + 40, "saved", 100, "saved r/step_00000100");
    expect_words(T0 + 85, "r --once", 0, "1234 tok/s, saved step 100\n");
    expect_words(T0 + 85, "--once on r", 0, "r: running");
    event("r", T0 + 81, "stopped", 200, "stopped by a signal");
    expect_line(T0 + 9e6, "r", 75, "r: stopped: stopped by a signal; step 200/1000 (20%), loss 2.8000, val 2.9500, "
                "floor 2.5000 (+18.0%), 1234 tok/s, saved step 100\n");
    event("r", T0 + 9e6, "resumed", 100, "1 ranks");
    expect_words(T0 + 9e6 + 1, "r", 0, "r: running; step 200/1000 (20%)");
    event("r", T0 + 9e6 + 2, "failed", 200, "the disk is full\\u001b[31m");
    expect_words(T0 + 9e6 + 3, "r", 1, "r: failed: the disk is full\\x1b[31m; step 200");
    event("r", T0 + 9e6 + 3, "failure", 200, "rank 0 exited");
    expect_words(T0 + 9e6 + 4, "r", 1, "r: failed: rank 0 exited");
    event("r", T0 + 9e6 + 3, "restart", 200, "after 0.5 s");
    expect_words(T0 + 9e6 + 4, "r", 0, "r: running");
    event("r", T0 + 9e6 + 5, "gave up", 200, "gave up: 5 failures");
    expect_words(T0 + 9e6 + 6, "r", 1, "r: failed: gave up: 5 failures");
    event("r", T0 + 9e6 + 5, "start", 200, "start 7");
    event("r", T0 + 9e6 + 7, "slow", 200, "note: rank 1 is a straggler");
    expect_words(T0 + 9e6 + 8, "r", 0, "r: running");
    event("r", T0 + 9e6 + 9, "done", 200, "the run is done");
    expect_words(T0 + 9e8, "r", 0, "r: done; step 200/1000");
    verdict("running, stopped, failed, restarted, given up and done: lines and exit codes");
}

// A run is stalled after 60 s, or 20 times the time between two lines, without a line or an event.
static void test_stalls(void) {
    make_run("r", 200, 400, 1, true);
    expect_words(T0 + 80 + 59, "r", 0, "r: running");
    expect_words(T0 + 80 + 130, "r", 1, "r: stalled: no line for 130 s (usual step 0.4 s); step 200/1000 (20%), loss");
    event("r", T0 + 80 + 100, "saved", 200, "saved r/step_00000200");
    expect_words(T0 + 80 + 130, "r", 0, "r: running");
    make_run("r", 60, 10000, 1, true);
    expect_words(T0 + 600 + 199, "r", 0, "r: running");
    expect_words(T0 + 600 + 201, "r", 1, "no line for 201 s (usual step 10 s)");
    make_run("r", 600, 1000, 10, true);
    expect_words(T0 + 600 + 199, "r", 0, "r: running");
    expect_words(T0 + 600 + 201, "r", 1, "no line for 201 s (usual step 1.0 s)");
    expect_words(T0 + 600 + 7300, "r", 1, "no line for 2.0 h");
    verdict("stalled after 60 s or 20 lines' time, whichever is later");

    // Of 59 fast steps and 41 slow ones, the last 50 count, and their median is a slow one.
    make_run("r", 59, 100, 1, true);
    for (unsigned step = 60; step <= 100; step++)
        append("r/metrics.jsonl", line_text(step, T0 + step * 8, 8000, "null"));
    expect_words(T0 + 800 + 159, "r", 0, "100/1000 (10%), 2.0 h left");
    expect_words(T0 + 800 + 161, "r", 1, "usual step 8.0 s");
    verdict("the usual step is the median of the last 50");

    make_run("r", 0, 400, 1, true);
    event("r", T0 + 5, "resumed", 0, "1 ranks");
    expect_line(T0 + 5 + 1799, "r", 0, "r: running\n");
    expect_line(T0 + 5 + 1801, "r", 1, "r: stalled: no line for 30 min\n");
    make_run("r", 200, 400, 1, true);
    event("r", T0 + 1000, "resumed", 100, "1 ranks");
    expect_words(T0 + 1000 + 1799, "r", 0, "r: running");
    expect_words(T0 + 1000 + 1801, "r", 1, "r: stalled");
    verdict("the first line of a start may take 30 minutes");

    static const char* const dates[] = {"2024-02-29T23:59:59", "2024-03-01T00:00:00", "2023-12-31T23:59:59",
                                        "2100-03-01T12:00:00", "1999-01-01T00:00:00", "2026-11-28T11:22:33"};
    for (size_t i = 0; i < COUNT_OF(dates); i++) {
        struct tm utc = {.tm_isdst = 0};
        need(sscanf(dates[i], "%d-%d-%dT%d:%d:%d", &utc.tm_year, &utc.tm_mon, &utc.tm_mday, &utc.tm_hour, &utc.tm_min,
                    &utc.tm_sec) == 6, "a date");
        utc.tm_year -= 1900;
        utc.tm_mon--;
        double seconds = (double)timegm(&utc);
        make_run("r", 0, 400, 1, true);
        put_text("r/events.jsonl", text_of("{\"time\": \"%s.000Z\",\"event\": \"begun\",\"step\": 0,\"detail\": "
                                           "\"\"}\n", dates[i]));
        expect_words(seconds + 1799, "r", 0, "r: running");
        expect_words(seconds + 1801, "r", 1, "r: stalled");
    }
    verdict("the times of events, with leap days");
}

// A heartbeat in the file of a supervisor, of this process, which has the log open.
static void test_heartbeats(void) {
    int lock, log;
    char path[HEARTBEAT_PATH_BYTES];
    make_run("r", 200, 400, 1, true);
    Heartbeats* all = heartbeats_make(&lock, path, &error);
    need(all != NULL, "%s", error.text);
    Heartbeat* h = &all->ranks[1];
    log = open("r/metrics.jsonl", O_RDONLY | O_CLOEXEC);
    all->count = 2;
    all->ranks[0].rank = 1;
    all->ranks[0].pid = h->pid = (uint64_t)getpid();
    heartbeat_write(h, HEARTBEAT_PAUSE, 200, NULL, false);
    expect_words(T0 + 80 + 130, "r", 0, "r: running");
    h->ms = (uint64_t)now_ms() - 100000;
    expect_words(T0 + 80 + 130, "r", 1, "r: stalled");
    heartbeat_write(h, HEARTBEAT_PAUSE, 200, NULL, true);
    expect_words(T0 + 80 + 130, "r", 1, "r: stalled");
    heartbeat_write(h, HEARTBEAT_PAUSE, 200, NULL, false);
    close(log);
    expect_words(T0 + 80 + 130, "r", 1, "r: stalled");
    munmap(all, sizeof *all);
    close(lock);
    unlink(path);
    verdict("a heartbeat of the run's own rank 0 shows that it is not stalled");
}

static void test_several(void) {
    make_run("a", 200, 400, 1, true);
    make_run("b", 200, 400, 1, true);
    make_run("c", 200, 400, 1, true);
    event("b", T0 + 80, "stopped", 200, "");
    event("c", T0 + 80, "done", 200, "");
    expect_words(T0 + 85, "a b c", 75, "c: done");
    expect_words(T0 + 85, "c a", 0, "a: running");
    expect_words(T0 + 85 + 100, "c b a", 1, "b: stopped");
    expect_words(T0 + 85 + 100, "a b", 1, "b: stopped");
    char many[1024] = "";
    for (int i = 0; i < 100; i++) strcat(many, "c ");
    expect_words(T0 + 85 + 100, text_of("%sa", many), 1, "a: stalled");
    verdict("several runs, also many: the worst of them gives the exit code");
}

// ------------------------------------------------------------------------------------------------
// 2. Files

static void test_damage(void) {
    make_run("r", 200, 400, 1, true);
    append("r/metrics.jsonl", "{\"step\": 201,\"loss\": 1.0,\"time\": 17640001");
    append("r/events.jsonl", "{\"time\": \"2025-11-24T16:01:00.000Z\",\"event\": \"fail");
    expect_words(T0 + 85, "r", 0, "r: running; step 200/1000 (20%), 5 min left, loss 2.8000");
    append("r/metrics.jsonl", "\n\n{]\nnot JSON\n");
    append("r/events.jsonl", "\nnot JSON\n[]\n{}\n");
    expect_words(T0 + 85, "r", 0, "r: running; step 200/1000 (20%), 5 min left, loss 2.8000, val 2.9500");
    int file = open("r/metrics.jsonl", O_WRONLY | O_APPEND | O_CLOEXEC);
    need(write(file, "\0\0\0\0", 4) == 4 && close(file) == 0, "zeros");
    append("r/metrics.jsonl", text_of("\n%s", line_text(202, T0 + 81, 400, "2.9")));
    expect_words(T0 + 85, "r", 0, "r: running; step 202/1000 (20%), 5 min left, loss 2.7980, val 2.9000");
    append("r/metrics.jsonl", "{\"step\": 203,\"loss\": null,\"val_loss\": \"nan\",\"grad_norm\": null,\"time\": "
           "1764000082,\"ms\": 400}\n");
    expect_words(T0 + 85, "r", 0, "r: running; step 203/1000 (20%), 5 min left, loss not finite, val 2.9000, floor");
    verdict("torn and damaged lines, zeros, losses that are not finite");

    make_run("r", 200, 400, 1, false);
    struct timespec times[2] = {{(time_t)T0 + 80, 0}, {(time_t)T0 + 80, 0}};
    need(utimensat(AT_FDCWD, "r/metrics.jsonl", times, 0) == 0, "a time");
    expect_words(T0 + 80 + 59, "r", 0, "r: running");
    expect_words(T0 + 80 + 130, "r", 1, "no line for 130 s (usual step 0.4 s)");
    verdict("logs without times: that of the file counts");

    need(remove("r/run.jsonl") == 0, "run.jsonl");
    expect_words(T0 + 85, "r", 0, "r: running; step 200, loss 2.8000, val 2.9500, 1234 tok/s\n");
    verdict("without run.jsonl nothing is said of what is planned");

    make_run("r", 9000, 400, 1, true);
    expect_words(T0 + 3605, "r", 0, "loss -6.0000, val 2.9500");
    verdict("the last validation is found though it is far back");
}

static void test_refusals(void) {
    make_run("r", 200, 400, 1, true);
    need(remove("r/events.jsonl") == 0, "events");
    expect_words(T0 + 85, "r", 0, "r: running; step 200/1000");
    expect_words(T0 + 80 + 130, "r", 1, "r: stalled");
    make_run("r", 200, 400, 1, true);
    need(remove("r/metrics.jsonl") == 0, "metrics");
    expect_line(T0 + 5, "r", 0, "r: running\n");
    need(remove("r/events.jsonl") == 0, "events");
    expect_words(T0 + 5, "r", 2, "watch: r has neither metrics.jsonl nor events.jsonl");
    expect_words(T0 + 5, "none", 2, "watch: none is not a directory; check the path");
    put_text("file", "x");
    expect_words(T0 + 5, "file", 2, "watch: file is not a directory; check the path");
    expect_words(T0 + 5, "", 2, "watch: give the directories of runs, as in: watch runs/x");
    expect_words(T0 + 5, "r --onc", 2, "did you mean --once?");
    expect_words(T0 + 5, "r --once maybe", 2, "neither metrics.jsonl");
    expect_words(T0 + 5, "--help", 0, "--ascii on|off");
    need(mkdir("r/metrics.jsonl", 0777) == 0, "a directory");
    expect_words(T0 + 5, "r", 2, "r/metrics.jsonl is not a file; check the path");
    verdict("missing files and wrong arguments: sentences, and exit code 2");
}

// ------------------------------------------------------------------------------------------------
// 3. Page

// A program on a pseudo terminal, and what it has written.
typedef struct {
    pid_t pid;
    int file, status;
    bool ended;
    char text[1 << 18];
    size_t used;
} Terminal;
static Terminal terminal;

static void terminal_resize(unsigned short columns, unsigned short rows) {
    struct winsize size = {.ws_col = columns, .ws_row = rows};
    need(ioctl(terminal.file, TIOCSWINSZ, &size) == 0, "the size of a terminal");
}

// Starts a program, or with path NULL the function, whose both outputs are the terminal.
static void terminal_start(const char* path, const char* arguments, void (*function)(void), double now,
                           unsigned short columns, unsigned short rows) {
    Words words = {.count = 0};
    memset(&terminal, 0, sizeof terminal);
    terminal.file = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    need(terminal.file >= 0 && grantpt(terminal.file) == 0 && unlockpt(terminal.file) == 0, "a pseudo terminal");
    const char* name = text_of("%s", ptsname(terminal.file));
    const char* environment = text_of("TERM=xterm|LLMTRAIN_TEST_NOW=%.3f", now);
    terminal_resize(columns, rows);
    if (path) words_add(&words, path), words_add(&words, arguments);
    fflush(NULL);
    pid_t parent = getpid();
    terminal.pid = fork();
    need(terminal.pid >= 0, "a process");
    if (terminal.pid > 0) return;
    int file = -1;
    if (!process_end_with_parent(parent, SIGKILL) || setsid() < 0 || (file = open(name, O_RDWR)) < 0) _exit(113);
    ioctl(file, TIOCSCTTY, 0);
    if (dup2(file, 0) != 0 || dup2(file, 1) != 1 || dup2(file, 2) != 2) _exit(113);
    if (function) function();
    if (function) _exit(0);
    set_environment(environment);
    execvp(words.words[0], words.words);
    _exit(113);
}

// Reads until a text is there, after `from`, or the program has ended, or 20 seconds are over.
static bool terminal_await(const char* text, size_t from) {
    double began = now_ms();
    while (now_ms() - began < 20e3) {
        struct pollfd polled = {terminal.file, POLLIN, 0};
        size_t room = sizeof terminal.text - 1 - terminal.used;
        ssize_t n = poll(&polled, 1, 20) > 0 && room ? read(terminal.file, terminal.text + terminal.used, room) : 0;
        if (n > 0) terminal.used += (size_t)n;
        if (text && strstr(terminal.text + from, text)) return true;
        if (n > 0) continue;
        if (terminal.ended) return false;  // and nothing was left to read
        terminal.ended = waitpid(terminal.pid, &terminal.status, WNOHANG) == terminal.pid;
    }
    return false;
}

// Waits for the end of the program; its exit code.
static int terminal_end(void) {
    terminal_await(NULL, 0);
    if (!terminal.ended) kill(terminal.pid, SIGKILL), waitpid(terminal.pid, &terminal.status, 0);
    close(terminal.file);
    return WIFEXITED(terminal.status) ? WEXITSTATUS(terminal.status) : 128 + WTERMSIG(terminal.status);
}

// The newest whole page after `from`, waiting for one, as lines without colors.
static const char* terminal_page(size_t from) {
    static char page[16384];
    static const char home[] = "\033[H", end[] = "\033[J";
    size_t used = 0;
    page[0] = 0;
    if (!terminal_await(end, from)) return page;
    const char *first = terminal.text + from, *last = NULL;
    for (const char* at = first; (at = strstr(at, home)) != NULL; at++)
        if (strstr(at, end)) last = at + 3;
    if (last == NULL) return page;
    for (const char* at = last; strncmp(at, end, 3) != 0 && used + 1 < sizeof page; at++) {
        if (*at == '\033') at += strcspn(at, "mK");
        else if (*at != '\r') page[used++] = *at;
    }
    page[used] = 0;
    return page;
}

// The columns of the widest line, each character being one.
static size_t page_width(const char* page) {
    size_t widest = 0, width = 0;
    for (; *page; page++) {
        width = *page == '\n' ? 0 : width + ((*page & 0xc0) != 0x80);
        widest = max_size(widest, width);
    }
    return widest;
}

static void make_shown_run(void) {
    make_run("r", 200, 400, 1, true);
    event("r", T0 + 40, "saved", 100, "saved r/step_00000100 in 84 ms, of which training was stalled for 3 ms");
    event("r", T0 + 41, "slow", 101, "\\u001b[2J\\u0007 a note that is so long that it must be cut: 1234567890 "
          "1234567890");
}

static const char PAGE_80[] =
    "r: running\n"
    "[##########...........................................] 20% 200/1000, 5 min left\n"
    "loss    2.8000  #######**********+++++++++======-------:::::::.........____\n"
    "val     2.9500, floor 2.5000 (+18.0%), step 100\n"
    "norm    0.500, lr 1.00e-03\n"
    "speed   1234 tok/s, mfu 41.2%, waits 25%, 0.4 s a step\n"
    "memory  2.50 GB\n"
    "saved   step 100, 45 s ago\n"
    "16:00:00 begun: 1 ranks\n"
    "16:00:40 saved: saved r/step_00000100 in 84 ms, of which training was stalled fo\n"
    "16:00:41 slow: \\x1b[2J\\x07 a note that is so long that it must be cut: 123456789\n"
    "\n";

static void test_page(void) {
    make_shown_run();
    terminal_start(test.watch, "r --ascii", NULL, T0 + 85, 80, 30);
    const char* page = terminal_page(0);
    // The curve depends on where the lines lie in the file; its shape is checked below.
    const char *curve = strstr(page, "loss    2.8000  "), *expected = strstr(PAGE_80, "loss    2.8000  ");
    expect(curve != NULL, "no curve in:\n%s", page);
    if (curve) {
        size_t cells = strcspn(curve + 16, "\n");
        expect(cells == 60, "%zu cells", cells);
        expect(curve[16] == '#' && curve[16 + cells - 1] == '_', "it falls: %.*s", (int)cells, curve + 16);
        expect(strncmp(page, PAGE_80, (size_t)(expected - PAGE_80)) == 0 &&
               strcmp(strchr(curve, '\n'), strchr(expected, '\n')) == 0, "another page:\n%s", page);
        for (size_t i = 1; i < cells; i++) {
            static const char levels[] = "#*+=-:._";
            expect(strchr(levels, curve[16 + i]) >= strchr(levels, curve[15 + i]), "cell %zu rises", i);
        }
    }
    expect(strstr(terminal.text, "\033[?25l") != NULL, "the cursor is not hidden");
    expect(strpbrk(terminal.text, "\a") == NULL && strstr(terminal.text, "\033[2J") == NULL, "an event's own commands");
    for (const char* at = terminal.text; *at; at++) expect((unsigned char)*at < 0x80, "--ascii, and byte %02x", *at);
    verdict("a page of 80 columns with --ascii, every line");

    // A line more, and a narrower terminal: the page changes within a second, or at once.
    size_t before = terminal.used;
    append("r/metrics.jsonl", line_text(201, T0 + 80.4, 400, "2.75"));
    expect(terminal_await("201/1000", before), "the new line is not shown");
    expect(strstr(terminal_page(before), "val     2.7500, floor 2.5000 (+10.0%), step 201\n") != NULL, "the new loss");
    before = terminal.used;
    double resized = now_ms();
    terminal_resize(40, 30);
    while (page_width(page = terminal_page(before)) != 40 && now_ms() - resized < 20e3) before = terminal.used;
    double took = now_ms() - resized;
    expect(page_width(page) == 40 && strstr(page, "[##...........] 20% 201/1000, 5 min left\n") != NULL &&
           strstr(page, "\nval     2.7500, floor 2.5000 (+10.0%), s\n") != NULL, "%zu columns:\n%s",
           page_width(page), page);
    expect(took < 900, "the page is drawn %.0f ms after a change of its size", took);
    before = terminal.used;
    terminal_resize(60, 6);
    while (page_width(page = terminal_page(before)) != 60 && now_ms() - resized < 40e3) before = terminal.used;
    expect(count_in(page, "\n") == 5 && page_width(page) == 60, "more than the height:\n%s", page);
    verdict("new lines, and the sizes 40 and 60 x 6 of the terminal");

    before = terminal.used;
    need(write(terminal.file, "\003", 1) == 1, "Ctrl-C");
    int code = terminal_end();
    static const char restored[] = "\033[?7h\033[?25h\033[?1049l";
    size_t length = sizeof restored - 1;
    expect(code == 0, "exit code %d", code);
    expect(terminal.used >= length && strcmp(terminal.text + terminal.used - length, restored) == 0, "the last bytes");
    verdict("Ctrl-C restores the cursor and the screen");
}

static void test_page_states(void) {
    make_shown_run();
    terminal_start(test.watch, "r", NULL, T0 + 80 + 130, 80, 30);
    const char* page = terminal_page(0);
    expect(strstr(page, "r: stalled\nno line for 130 s (usual step 0.4 s)\n[\xE2\x96\x88") != NULL, "stalled:\n%s",
           page);
    expect(strstr(terminal.text, "\033[31mno line for 130 s (usual step 0.4 s)\033[0m") != NULL, "it is not red");
    expect(strstr(page, "\xE2\x96\x91] 20% 200/1000\n") != NULL && strstr(page, "2.8000  \xE2\x96\x88") != NULL &&
           strstr(page, "\xE2\x96\x81\n") != NULL && page_width(page) == 80, "bars of characters:\n%s", page);
    kill(terminal.pid, SIGTERM);
    int code = terminal_end();
    expect(code == 1, "exit code %d", code);
    verdict("a stalled run is red, and gives its exit code; bars without --ascii");

    make_shown_run();
    make_run("s", 0, 400, 1, true);
    terminal_start(test.watch, "r s --ascii", NULL, T0 + 85, 80, 30);
    page = terminal_page(0);
    expect(strncmp(page, "r: running\n", 11) == 0 && strstr(page, "\n\ns: running\n16:00:00 begun: 1 ranks\n") != NULL,
           "two runs:\n%s", page);
    size_t before = terminal.used;
    remove_tree("r");
    expect(terminal_await("r is not a directory; check the path", before), "the run that is gone");
    expect(strstr(terminal_page(before), "\ns: running\n") != NULL, "the other run");
    kill(terminal.pid, SIGINT);
    terminal_end();
    verdict("two runs, and one that is removed meanwhile");

    terminal_start(test.watch, "none", NULL, T0 + 85, 80, 30);
    code = terminal_end();
    expect(code == 2 && strcmp(terminal.text, "watch: none is not a directory; check the path\r\n") == 0, "%d: %s",
           code, terminal.text);
    make_shown_run();
    terminal_start(test.watch, "r --once", NULL, T0 + 85, 80, 30);
    code = terminal_end();
    expect(code == 0 && strncmp(terminal.text, "r: running; step 200/1000 (20%), ", 33) == 0, "%d: %s", code,
           terminal.text);
    verdict("on a terminal: a run that is not there, and --once");
}

// ------------------------------------------------------------------------------------------------
// 4. Bars

static void work(void) {
    for (int total = 0; total <= 1000; total += 1000) {
        Progress progress = progress_begin("a name \033[31m of work", (uint64_t)total);
        for (int i = 0; i < 10; i++) {
            progress_step(&progress, 50);
            sleep_ms(50);
        }
        progress_end(&progress);
        fprintf(stderr, "end\n");
    }
}

static void test_bar(unsigned short columns, const char* fragment) {
    terminal_start(NULL, NULL, work, 0, columns, 24);
    int code = terminal_end();
    expect(code == 0, "exit code %d", code);
    // What each return of the carriage begins: the bars, the blanks that clear the line, and what follows.
    size_t drawn = 0, widest = 0, ends = 0;
    for (const char* at = terminal.text; (at = strchr(at, '\r')) != NULL; at++) {
        size_t length = strcspn(at + 1, "\r\n"), blanks = strspn(at + 1, " ");
        widest = max_size(widest, length);
        drawn += length > 0 && blanks < length && strncmp(at + 1, "end", 3) != 0;
        if (strncmp(at + 1, "end\r\n", 5) != 0) continue;
        ends++;
        const char* cleared = at;
        while (cleared > terminal.text && cleared[-1] == ' ') cleared--;
        expect(at - cleared == columns - 1, "%td blanks clear %d columns", at - cleared, columns - 1);
    }
    expect(ends == 2, "%zu bars end", ends);
    expect(drawn >= 2 && drawn <= 6, "%zu lines in 2 x 0.5 s", drawn);  // 2 each on an idle machine
    expect(widest == columns - 1u, "%zu of %d columns", widest, columns);
    expect(strstr(terminal.text, fragment) != NULL, "'%s' is not in: %s", fragment, terminal.text);
    expect(strchr(terminal.text, '\033') == NULL, "the name's own commands");
    verdict("a bar of %d columns: at most five a second, cleared at its end", columns);
}

// A file for a tokenizer to read.
static void make_long_text(const char* path, uint64_t words) {
    FILE* file = fopen(path, "wbe");
    need(file != NULL, "%s", path);
    for (uint64_t i = 0; i < words; i++)
        fprintf(file, "%llx%c", (unsigned long long)(random_bits(1, RANDOM_TEST, 0, i) % 60000000), i % 9 ? ' ' : '\n');
    need(fclose(file) == 0, "%s", path);
}

// Runs tokenize on a terminal, with ever longer texts until one takes so long that a bar is drawn; its exit code.
static int tokenize_long(const char* arguments, uint64_t words) {
    for (;; words *= 4) {
        make_long_text("long.txt", words);
        terminal_start(test.tokenize, text_of("--text long.txt %s", arguments), NULL, 0, 80, 24);
        int code = terminal_end();
        if (code != 0 || strchr(terminal.text, '[') || words > 20000000) return code;
    }
}

static void test_programs(void) {
#ifdef __SANITIZE_ADDRESS__  // which, with small pieces, makes these many times slower
    enum { WORDS = 60000, WORDS_OF_SHARDS = 2000 };
#else
    enum { WORDS = 600000, WORDS_OF_SHARDS = WORDS };
#endif
    int code = tokenize_long("--train-bpe 600 --out bpe", WORDS);
    expect(code == 0, "exit code %d: %s", code, terminal.text);
    expect(strstr(terminal.text, "\rcounting words [#") != NULL || strstr(terminal.text, "\rmerging [") != NULL,
           "no bar: %.600s", terminal.text);
    const char* result = strstr(terminal.text, "bpe/tokenizer.json: ");
    expect(result && result[-1] == '\r' && result[-2] == ' ', "the bar is not cleared: %.600s", terminal.text);
    code = tokenize_long("--tokenizer bpe --out x --val 0.1", WORDS_OF_SHARDS);
    expect(code == 0 && strstr(terminal.text, "\rtokenizing [") != NULL, "%d, no bar: %.600s", code, terminal.text);
    verdict("tokenize shows bars on a terminal");

    code = run_at(0, test.tokenize, "--tokenizer bpe --text long.txt --out y --val 0.1");
    expect(code == 0 && program.used[1] == 0 && strchr(program.text[0], '\r') == NULL &&
           strncmp(program.text[0], "y_train_*.bin: ", 15) == 0, "%d: %s%s", code, program.text[0], program.text[1]);
    verdict("and nothing elsewhere");
}

int main(int argc, char** argv) {
    const Flag rows[] = {
        FLAG_TEXT("watch", &test.watch, "build/watch", "PATH", 0, "the program"),
        FLAG_TEXT("tokenize", &test.tokenize, "build/tokenize", "PATH", 0, "the program that shows bars"),
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_watch", NULL, &flags, argc, argv)) return code;
    tests_begin("test_watch");
    test.watch = realpath(test.watch, NULL);
    test.tokenize = realpath(test.tokenize, NULL);
    need(test.watch && test.tokenize, "make build/watch build/tokenize");
    root_enter();
    test_states();
    test_stalls();
    test_heartbeats();
    test_several();
    test_damage();
    test_refusals();
    test_page();
    test_page_states();
    test_bar(80, "\ra name \\x1b[31m of work [####");
    test_bar(24, "\ra name");
    test_programs();
    return tests_end();
}
