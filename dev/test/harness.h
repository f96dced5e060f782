// harness.h: checks, files and processes for the test programs.
//
//   1. checks     conditions that are counted, and printed with the error and its bound
//   2. files      a directory of the test's own, which is removed at the end; small things to do with files
//   3. programs   started by the test, which waits for them and reads their output
//
// Five lines of use:
//
//     tests_begin("test_sums");
//     check(sum == 4, "two and two");                                   a test: a line that says ok or FAILED
//     check_bound(error, 1e-5, "a sum of %d terms", n);                 the same: error <= bound, which NaN is not
//     for (...) expect(a[i] == b[i], "element %zu is %g", i, a[i]);     many conditions that make one test; only those
//     verdict("every element");                                         that do not hold are printed, below its line
//     return tests_end();                                               N passed, N failed
//
// Processes that the test forks count into the same sums. A benchmark sets harness_name, and uses need() alone. The
// header needs system.h, and compiles as C11 and C++20.

#ifndef LLMTRAIN_HARNESS_H
#define LLMTRAIN_HARNESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "llmtrain/base/system.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define HARNESS_FORMAT(text, first) __attribute__((format(printf, text, first)))
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

// ------------------------------------------------------------------------------------------------
// 1. Checks

typedef struct {
    unsigned long long passed, failed, skipped;
} TestCounts;

static TestCounts counts_of_one_process, *harness_counts = &counts_of_one_process;
static const char* harness_name = "test";

// The current test: the conditions expected so far, the number that failed, and their messages.
static struct {
    unsigned long long conditions, failures;
    char text[8192];
    size_t used;
} harness_now;

static inline void count_add(unsigned long long* count, unsigned long long n) {
    __atomic_fetch_add(count, n, __ATOMIC_RELAXED);
}

// Ends the program unless a condition holds without which no other result means anything; a test with the sums so far.
HARNESS_FORMAT(2, 3) static inline void need(bool good, const char* format, ...) {
    if (good) return;
    int reason = errno;
    char what[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    printf("%s%s: aborted: %s", harness_now.text, harness_name, what);
    if (reason) printf(" (%s)", strerror(reason));
    printf("\n");
    if (harness_counts != &counts_of_one_process)
        printf("%llu passed, %llu failed\n", harness_counts->passed, harness_counts->failed + 1);
    fflush(stdout);
    exit(3);
}

static inline void tests_begin(const char* program) {
    harness_name = program;
    void* memory = mmap(NULL, sizeof *harness_counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "memory");
    harness_counts = (TestCounts*)memory;
}

static inline int tests_end(void) {
    if (harness_counts->skipped) printf("%llu skipped\n", harness_counts->skipped);
    printf("%llu passed, %llu failed\n", harness_counts->passed, harness_counts->failed);
    return harness_counts->failed == 0 && harness_counts->passed > 0 ? 0 : 1;
}

// One line of a test, in one piece, since several processes may write.
static inline bool harness_line(bool good, const char* numbers, const char* format, va_list arguments) {
    char line[2048];
    vsnprintf(line, sizeof line, format, arguments);
    printf("%s %-*s%s\n%s", good ? "ok     " : "FAILED ", numbers[0] ? 78 : 0, line, numbers, harness_now.text);
    fflush(stdout);
    count_add(good ? &harness_counts->passed : &harness_counts->failed, 1);
    return good;
}

HARNESS_FORMAT(2, 3) static inline bool check(bool good, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    harness_line(good, "", format, arguments);
    va_end(arguments);
    return good;
}

HARNESS_FORMAT(3, 4) static inline bool check_bound(double error, double bound, const char* format, ...) {
    char numbers[64];
    va_list arguments;
    snprintf(numbers, sizeof numbers, " error %.2e %s %.2e", error, error <= bound ? "<=" : "exceeds", bound);
    va_start(arguments, format);
    harness_line(error <= bound, numbers, format, arguments);
    va_end(arguments);
    return error <= bound;
}

HARNESS_FORMAT(2, 3) static inline bool expect(bool good, const char* format, ...) {
    harness_now.conditions++;
    if (good) return true;
    harness_now.failures++;
    size_t left = sizeof harness_now.text - harness_now.used;
    if (harness_now.failures > 20 || left < 1200) return false;
    char* line = harness_now.text + harness_now.used;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + 8, 1024, format, arguments);
    va_end(arguments);
    memset(line, ' ', 8);
    length = 8 + (length < 1023 ? length : 1023);
    line[length] = '\n';
    line[length + 1] = 0;
    harness_now.used += (size_t)length + 1;
    return false;
}

// Ends the test: it passes if at least one condition was expected since the last test, and all held.
HARNESS_FORMAT(1, 2) static inline bool verdict(const char* format, ...) {
    char numbers[64] = "";
    if (harness_now.conditions == 0) expect(false, "nothing was expected");
    bool good = harness_now.failures == 0;
    if (harness_now.conditions > 1)
        snprintf(numbers, sizeof numbers, " %llu conditions, %llu fail", harness_now.conditions, harness_now.failures);
    va_list arguments;
    va_start(arguments, format);
    harness_line(good, numbers, format, arguments);
    va_end(arguments);
    memset(&harness_now, 0, sizeof harness_now);
    return good;
}

static inline void skip(const char* what, const char* reason) {
    printf("skipped %s: %s\n", what, reason);
    fflush(stdout);
    count_add(&harness_counts->skipped, 1);
}

// Checks that an operation was refused, and that its error message contains these words.
static inline bool expect_refusal(bool accepted, const Error* error, const char* words, const char* what) {
    if (!expect(!accepted, "%s: it is accepted", what)) return false;
    return expect(strstr(error->text, words) != NULL, "%s: '%s' is not in: %.400s", what, words, error->text);
}

static inline size_t count_in(const char* text, const char* fragment) {
    size_t count = 0;
    for (const char* at = text; (at = strstr(at, fragment)) != NULL; at++) count++;
    return count;
}

// Prints a program's output, which may be any bytes, with each of its lines indented.
static inline void print_indented(const char* text) {
    while (*text) {
        size_t length = strcspn(text, "\n");
        printf("        | ");
        for (size_t i = 0; i < min_size(length, 600); i++) putchar(isprint((unsigned char)text[i]) ? text[i] : '?');
        putchar('\n');
        text += length + (text[length] == '\n');
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Files

static char root[PATH_MAX];  // the directory of the test, absolute
static pid_t root_owner;     // processes forked by it leave it alone

// A formatted text that stays valid for 15 more calls.
HARNESS_FORMAT(1, 2) static inline const char* text_of(const char* format, ...) {
    static char texts[16][PATH_MAX + 256];
    static size_t next;
    char* text = texts[next++ % 16];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof texts[0], format, arguments);
    va_end(arguments);
    return text;
}

// Calls `visit` with the path of each entry of a directory; false if there is no such directory.
static inline bool directory_each(const char* path, void (*visit)(const char* path, void* context), void* context) {
    DIR* directory = opendir(path);
    if (directory == NULL) return false;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        char inner[PATH_MAX];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(inner, sizeof inner, "%.3000s/%s", path, entry->d_name);
        visit(inner, context);
    }
    closedir(directory);
    return true;
}

static inline void remove_tree(const char* path);
static inline void remove_visited(const char* path, void* context) {
    (void)context;
    remove_tree(path);
}

static inline void remove_tree(const char* path) {
    struct stat status;
    if (lstat(path, &status) != 0) return;
    if (S_ISDIR(status.st_mode)) directory_each(path, remove_visited, NULL);
    remove(path);
}

static inline void root_remove(void) {
    if (getpid() == root_owner && chdir("/") == 0) remove_tree(root);
}

// Creates it under $TMPDIR or /tmp, named after the test, open to other users, and enters it; it is removed at the end.
static inline void root_enter(void) {
    const char* parent = getenv("TMPDIR");
    if (parent == NULL || parent[0] == 0) parent = "/tmp";
    snprintf(root, sizeof root, "%.1000s/%.100s_XXXXXX", parent, harness_name);
    need(mkdtemp(root) && chdir(root) == 0 && getcwd(root, sizeof root) && chmod(root, 0755) == 0, "%s", root);
    root_owner = getpid();
    atexit(root_remove);
}

// Makes writes past the first `bytes` bytes of any file fail, until it is called with RLIM_INFINITY.
static inline void file_size_limit(rlim_t bytes) {
    struct rlimit limit;
    need(getrlimit(RLIMIT_FSIZE, &limit) == 0, "a limit");
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    need(setrlimit(RLIMIT_FSIZE, &limit) == 0, "a limit");
}

static inline bool file_exists(const char* path) { return access(path, F_OK) == 0; }

// The whole contents of a file, and a zero byte; "" if there is no file. The caller frees it. bytes may be NULL.
static inline char* text_read(const char* path, size_t* bytes) {
    FILE* file = fopen(path, "rbe");
    size_t used = 0, room = (size_t)1 << 16;
    char* text = (char*)malloc(room);
    for (size_t n; text && file && (n = fread(text + used, 1, room - used - 1, file)) > 0;) {
        used += n;
        if (room - used < 2) text = (char*)realloc(text, room *= 2);
    }
    if (file) fclose(file);
    need(text != NULL, "memory for %s", path);
    text[used] = 0;
    if (bytes) *bytes = used;
    return text;
}

static inline void put_bytes(const char* path, const void* data, size_t bytes) {
    FILE* file = fopen(path, "wbe");
    need(file && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0, "%s", path);
}

static inline void put_text(const char* path, const char* text) { put_bytes(path, text, strlen(text)); }

// Overwrites a part of a file.
static inline void patch(const char* path, size_t offset, const void* data, size_t bytes) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    need(file >= 0 && pwrite(file, data, bytes, (off_t)offset) == (ssize_t)bytes && close(file) == 0, "%s", path);
}

static inline void flip_byte(const char* path, size_t offset) {
    unsigned char byte = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    need(file >= 0 && pread(file, &byte, 1, (off_t)offset) == 1 && close(file) == 0, "%s", path);
    byte ^= 0x55;
    patch(path, offset, &byte, 1);
}

static inline void copy_tree(const char* from, const char* to);
static inline void copy_visited(const char* path, void* to) {
    copy_tree(path, text_of("%s%s", (const char*)to, strrchr(path, '/')));
}

static inline void copy_tree(const char* from, const char* to) {
    char target[PATH_MAX];
    struct stat status;
    snprintf(target, sizeof target, "%s", to);
    need(stat(from, &status) == 0, "%s", from);
    if (S_ISDIR(status.st_mode)) {
        need(mkdir(target, 0777) == 0 && directory_each(from, copy_visited, target), "%s", target);
        return;
    }
    size_t bytes;
    char* data = text_read(from, &bytes);
    put_bytes(target, data, bytes);
    free(data);
}

typedef struct { const char* part; int count; } NameCount;
static inline void name_count(const char* path, void* context) {
    NameCount* names = (NameCount*)context;
    names->count += strstr(strrchr(path, '/'), names->part) != NULL;
}

// Entries of a directory whose names have `part` in them; -1 if there is no such directory.
static inline int directory_count(const char* path, const char* part) {
    NameCount names = {part, 0};
    return directory_each(path, name_count, &names) ? names.count : -1;
}

static inline int open_descriptors(void) { return directory_count("/dev/fd", ""); }

// ------------------------------------------------------------------------------------------------
// 3. Programs

#define PROGRAM_MS 600e3  // after this a program is treated as hung; enough for a busy machine

enum { WORDS_MAX = 190, EXIT_NOT_RUN = 113 };  // the status of a child that could not become the program

// A command line.
typedef struct {
    char* words[WORDS_MAX + 2];  // NULL ends it
    size_t count;
    char text[12288];            // the memory for the words
    size_t used;
} Words;

static inline void words_put(Words* w, size_t place, const char* word, size_t length) {
    need(place < WORDS_MAX && w->used + length < sizeof w->text, "a command line that is too long");
    w->words[place] = w->text + w->used;
    memcpy(w->words[place], word, length);
    w->words[place][length] = 0;
    w->used += length + 1;
    if (place == w->count) w->words[++w->count] = NULL;
}

// Splits a text into words at blanks; '' is an empty word.
static inline void words_add(Words* w, const char* text) {
    while (*(text += strspn(text, " "))) {
        size_t length = strcspn(text, " ");
        words_put(w, w->count, text, length == 2 && memcmp(text, "''", 2) == 0 ? 0 : length);
        text += length;
    }
}

// Keeps only what a program needs to start and the variables of sanitizers, OpenMP and the emulator.
static inline void environment_clear(void) {
    extern char** environ;
    static const char* const kept[] = {"PATH=", "HOME=", "TMPDIR=", "LD_LIBRARY_PATH=", "OMP_", "EMULATE_", "MUTANT",
                                       "ASAN_OPTIONS=", "UBSAN_OPTIONS=", "TSAN_OPTIONS=", "LSAN_OPTIONS="};
    for (size_t i = 0; environ && environ[i];) {
        bool keep = false;
        char name[256];
        for (size_t k = 0; k < COUNT_OF(kept); k++) keep = keep || strncmp(environ[i], kept[k], strlen(kept[k])) == 0;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(environ[i], "="), environ[i]);
        if (keep || unsetenv(name) != 0) i++;
    }
}

// Sets variables: NAME=VALUE, separated by |. NULL: none.
static inline void environment_set(const char* list) {
    while (list && *list) {
        char pair[1024];
        size_t length = strcspn(list, "|");
        snprintf(pair, sizeof pair, "%.*s", (int)length, list);
        char* value = strchr(pair, '=');
        need(value != NULL, "a variable without a value: %s", pair);
        *value = 0;
        setenv(pair, value + 1, 1);
        list += length + (list[length] == '|');
    }
}

typedef struct {
    pid_t pid;                  // leads a process group
    int pipes[2];               // from its standard output and error
    bool ended, stopped, late;  // late: it did not end by itself in time
    int status;                 // of waitpid
    double began_ms, stopped_ms, ended_ms;
    size_t peak;                // bytes of memory
    char* text[2];              // its output so far, with ? for a zero byte; owned
    size_t used[2];
} Program;

// Starts a program; `become`, if not NULL, runs in the child first and sets environment, limits, rights. Without words
// the child then ends. It has no input, and dies with the test.
static inline void program_start(Program* p, char* const* words, void (*become)(const void*), const void* context) {
    int out[2], err[2];
    memset(p, 0, sizeof *p);
    need(pipe_open(out) && pipe_open(err), "pipes");
    p->pipes[0] = out[0];
    p->pipes[1] = err[0];
    for (int i = 0; i < 2; i++) {
        pipe_enlarge(p->pipes[i], 1 << 20);  // in case nobody reads for a while
    }
    fcntl(out[1], F_SETFL, 0);  // the program's ends are blocking
    fcntl(err[1], F_SETFL, 0);
    pid_t parent = getpid();
    p->began_ms = now_ms();
    fflush(NULL);
    p->pid = fork();
    need(p->pid >= 0, "a process");
    if (p->pid > 0) {
        close(out[1]);
        close(err[1]);
        setpgid(p->pid, p->pid);
        return;
    }
    const struct rlimit no_core = {0, 0};
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    setpgid(0, 0);
    if (!process_end_with_parent(parent, SIGKILL)) _exit(EXIT_NOT_RUN);
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(nothing, 0) != 0 || dup2(out[1], 1) != 1 || dup2(err[1], 2) != 2) _exit(EXIT_NOT_RUN);
    if (become) become(context);
    fflush(NULL);
    if (words == NULL) _exit(0);
    execvp(words[0], words);
    _exit(EXIT_NOT_RUN);
}

static inline void program_read(Program* p) {
    for (int i = 0; i < 2; i++) {
        for (ssize_t n = 1; n > 0; p->used[i] += n > 0 ? (size_t)n : 0) {
            p->text[i] = (char*)realloc(p->text[i], p->used[i] + 65537);
            need(p->text[i] != NULL, "memory for what a program writes");
            char* text = p->text[i] + p->used[i];
            n = read(p->pipes[i], text, 65536);
            for (ssize_t k = 0; k < n; k++)
                if (text[k] == 0) text[k] = '?';
            text[n > 0 ? n : 0] = 0;
        }
    }
}

static inline void program_look(Program* p) {
    int status;
    struct rusage usage;
    program_read(p);
    if (p->ended || wait4(p->pid, &status, WNOHANG | WUNTRACED, &usage) != p->pid) return;
    program_read(p);
    bool stopped = WIFSTOPPED(status);
    *(stopped ? &p->stopped : &p->ended) = true;
    *(stopped ? &p->stopped_ms : &p->ended_ms) = now_ms();
    if (stopped) return;
    p->status = status;
    p->peak = memory_peak_of(&usage);
}

// Polls programs that belong together; false when all have ended. Kills the stopped ones once no other runs, and all
// after limit_ms milliseconds from the first one's start.
static inline bool programs_run(Program* programs, size_t count, double limit_ms) {
    size_t running = 0, left = 0;
    bool late = now_ms() > programs[0].began_ms + limit_ms;
    for (Program* p = programs; p < programs + count; p++) {
        program_look(p);
        running += !p->ended && !p->stopped;
        left += !p->ended;
    }
    for (Program* p = programs; p < programs + count && (late || running == 0); p++) {
        if (p->ended) continue;
        p->late |= !p->stopped;
        kill(-p->pid, SIGKILL);
    }
    return left > 0;
}

// Waits until all have ended.
static inline void programs_wait(Program* programs, size_t count, double limit_ms) {
    while (programs_run(programs, count, limit_ms)) sleep_ms(1);
}

static inline void program_free(Program* p) {
    for (int i = 0; i < 2 && p->pid > 0; i++) {
        free(p->text[i]);
        close(p->pipes[i]);
    }
    memset(p, 0, sizeof *p);
}

// Its exit code, or 128 plus the signal that ended it.
static inline int program_code(const Program* p) {
    return WIFSIGNALED(p->status) ? 128 + WTERMSIG(p->status) : WEXITSTATUS(p->status);
}

// Runs a program with arguments, separated by blanks, until it ends; its exit code, and its output in *p, whose last
// program is freed. become, context: as in program_start.
static inline int program_execute(Program* p, const char* path, const char* arguments, void (*become)(const void*),
                                  const void* context) {
    static Words words;
    memset(&words, 0, sizeof words);
    words_put(&words, 0, path, strlen(path));
    words_add(&words, arguments);
    program_free(p);
    program_start(p, words.words, become, context);
    programs_wait(p, 1, PROGRAM_MS);
    return program_code(p);
}

// A `become`: only variables that matter, and those of a list (environment_set).
static inline void become_alone(const void* variables) {
    environment_clear();
    environment_set("OMP_WAIT_POLICY=passive");
    environment_set((const char*)variables);
}

static inline bool program_good(const Program* p) { return !p->late && program_code(p) == 0; }

// Prints how it ended, and its error output.
static inline void program_print(const Program* p, const char* name) {
    bool killed = WIFSIGNALED(p->status);
    printf("        %s: %s %d%s%s, %.1f s\n", name, killed ? "signal" : "exit code", program_code(p) - 128 * killed,
           p->late ? ", did not end by itself" : "", p->stopped ? ", was stopped" : "",
           (p->ended_ms - p->began_ms) / 1e3);
    print_indented(p->text[1]);
}

// A port that the system gives to nobody else while *reserved is open: bound on all addresses, but not listening, so
// that a program that sets SO_REUSEADDR can listen on it.
static inline size_t port_reserve(int* reserved) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t length = sizeof address;
    int on = 1, off = 0;
    for (int family = 0; family < 2; family++) {  // IPv6, which accepts IPv4 too, or IPv4 alone
        memset(&address, 0, sizeof address);
        address.any.sa_family = family == 0 ? AF_INET6 : AF_INET;
        *reserved = descriptor_prepare(socket(address.any.sa_family, SOCK_STREAM, 0));
        bool takes_both = family == 1 || setsockopt(*reserved, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0;
        if (*reserved >= 0 && takes_both &&
            setsockopt(*reserved, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(*reserved, &address.any, family == 0 ? sizeof address.v6 : sizeof address.v4) == 0 &&
            getsockname(*reserved, &address.any, &length) == 0)
            return ntohs(family == 0 ? address.v6.sin6_port : address.v4.sin_port);
        if (*reserved >= 0) close(*reserved);
    }
    need(false, "a port");
    return 0;
}

#endif  // LLMTRAIN_HARNESS_H
