// supervise.c: the program that watches a run, and starts it again when it dies or hangs.
//
//   ./supervise --max-restarts 20 -- ./train --ranks 4 --resume --ckpt-every 500 --data ... --out runs/x
//
//   1. processes   what /proc knows of them, and their end
//   2. output      of the command, passed on unchanged; its last lines are kept
//   3. command     what its words say: the trainer or not, the number of ranks
//   4. start       in a session of its own
//   5. watch       until it ends, dies or hangs
//   6. post-mortem failures/failure_0001.json
//   7. use         main: ./supervise [FLAGS] -- COMMAND...
//
// COMMAND is the trainer with --resume, or a launcher (mpirun, srun) with it. When it or one of its ranks dies, or the
// heartbeat of a rank stands still for longer than its phase may, all that is left of it is ended, a post-mortem is
// written, and it is started again; the trainer's own --resume finds the newest good checkpoint.
//
// The supervisor watches the ranks of its own machine. Those of others do not beat; what becomes of them is for the
// launcher and for the trainer's --timeout to find out, which end the command. COMMAND must end when the trainer does,
// with its exit code.
//
// The exit code is that of COMMAND where it is 0 (done), 2 (wrong flags) or 75 (saved after a signal, to be continued),
// or where a signal to the supervisor was passed on to it; 2 where it cannot be started at first; otherwise 1: gave up.
// All limits are of the monotonic clock.

#include "llmtrain/flags.h"
#include "llmtrain/heartbeat.h"

#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on every architecture; a Linux before 5.3 does not know it
#endif

// ------------------------------------------------------------------------------------------------
// 1. Processes

typedef struct {
    int parent, session;
    char state;  // R, S, D, T (stopped), Z (has ended), ...
    int status;  // of one that has ended, as waitpid tells it
} Process;

// False if there is none of that number. Where there may be one, and only a descriptor or memory is missing to read of
// it, nothing is known of it: all is 0.
static bool process_read(Process* p, pid_t pid) {
    char path[64], text[2048];
    memset(p, 0, sizeof *p);
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file < 0 ? -1 : read(file, text, sizeof text - 1);
    bool unknown = bytes < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM);
    if (file >= 0) close(file);
    if (bytes <= 0) return unknown;
    text[bytes] = 0;
    const char* at = strrchr(text, ')');  // the end of field 2 of proc(5), the name, which can hold anything
    if (at == NULL || sscanf(at, ") %c %d %*d %d", &p->state, &p->parent, &p->session) != 3) return false;
    for (int field = 2; at && field < 52; field++) at = strchr(at + 1, ' ');
    p->status = at ? atoi(at) : 0;
    return true;
}

// Sends a signal (0: none) to our children that have left our session; returns how many there are, or may be. Since
// what loses its parent becomes our child (PR_SET_CHILD_SUBREAPER), there is one as long as anything is left of the
// command.
static size_t processes_signal(int number) {
    DIR* directory = opendir("/proc");
    if (directory == NULL) return 1;
    size_t count = 0;
    Process p;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        pid_t pid = (pid_t)atoi(entry->d_name);  // 0: what is no process
        if (pid == 0 || !process_read(&p, pid)) continue;
        bool known = p.state != 0;
        if (known && (p.parent != getpid() || p.session == getsid(0))) continue;
        if (known && number) kill(pid, number);
        count++;
    }
    closedir(directory);
    return count;
}

// As a shell tells it: the exit code, or 128 and the signal.
static int status_code(int status) {
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// "was ended by signal 9 (Killed)".
static void status_text(char* text, size_t size, int status) {
    int number = WTERMSIG(status);
    if (WIFSIGNALED(status)) snprintf(text, size, "was ended by signal %d (%s)", number, strsignal(number));
    else snprintf(text, size, "ended with exit code %d", WEXITSTATUS(status));
}

// ------------------------------------------------------------------------------------------------
// 2. Output
//
// What the command writes goes from its pipes to our own output, as far as that takes it without waiting. A reader that
// is slow slows the command; for one that takes nothing at all output is dropped, and that is said where it is missing.

#define RELAY_CHUNK ((size_t)4096)  // what a pipe takes without waiting, when poll says that it takes something
#define RELAY_PIPE (1 << 20)        // bytes that the command can be ahead of us
#define RELAY_STUCK_MS 5e3          // for a reader to take something
#define RELAY_PAUSE_MS 20           // between two attempts to give a reader our own words
#define TAIL_LINES ((size_t)20)
#define TAIL_LINE_BYTES ((size_t)2048)  // the rest of a longer line is left out

// The last lines of all that was written.
typedef struct {
    char lines[TAIL_LINES][TAIL_LINE_BYTES];  // line i is in place i % TAIL_LINES; each ends in 0
    size_t count, bytes;  // lines so far; bytes in the last
    int from;             // who is to continue the last line; -1: nobody, it is whole
} Tail;

typedef struct {
    int from, to;            // from is -1 when nobody writes there any more
    char held[RELAY_CHUNK];  // what was read and is still to be written
    size_t bytes;            // of these
    double moved_ms;         // when something of them was taken, or they were read
    uint64_t dropped;        // bytes that nobody took, which is still to be said
    char last;               // byte that was written
} Relay;

static void tail_put(Tail* t, const char* text, size_t bytes, int from) {
    for (size_t i = 0; i < bytes; i++) {
        if (t->count == 0 || t->from != from) {
            t->count++;
            t->bytes = 0;
            t->from = from;
        }
        char* line = t->lines[(t->count - 1) % TAIL_LINES];
        if (text[i] == '\n') t->from = -1;
        else if (t->bytes < TAIL_LINE_BYTES - 1) line[t->bytes++] = text[i] ? text[i] : ' ';
        line[t->bytes] = 0;
    }
}

// As an array of strings.
static void tail_write(JsonWriter* w, const Tail* t) {
    json_write_begin(w, '[');
    for (size_t i = t->count - min_size(t->count, TAIL_LINES); i < t->count; i++)
        json_write_string(w, t->lines[i % TAIL_LINES]);
    json_write_end(w, ']');
}

static struct pollfd polled_for(int file, short events) {
    struct pollfd polled = {file, events, 0};
    return polled;
}

// A terminal takes a part of what is written, and then makes the writer wait, unless it was opened not to: once more,
// since what we were given is that of others too. Where it cannot be opened, as it is.
static int relay_open(int file) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int own = isatty(file) ? open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    return own >= 0 ? own : file;
}

static void relay_close(Relay* r) {
    if (r->from >= 0) close(r->from);
    r->from = -1;
}

// Writes what is taken without waiting; returns how many bytes, or -1 with errno.
static ssize_t relay_write(Relay* r, const char* text, size_t bytes) {
    struct pollfd end = polled_for(r->to, POLLOUT);
    errno = EAGAIN;
    ssize_t written = poll(&end, 1, 0) > 0 ? write(r->to, text, bytes) : -1;
    if (written <= 0) return -1;
    r->last = text[written - 1];
    r->moved_ms = now_ms();
    return written;
}

// Writes of what is held as much as is taken. It is dropped when the reader has taken nothing for too long, nobody
// reads any more, or the disk is full; that is said before what is taken later. True when nothing is held any more.
static bool relay_flush(Relay* r) {
    char note[128];
    if (r->bytes == 0) return true;
    if (r->dropped) {
        unsigned long long missing = r->dropped;
        int bytes = snprintf(note, sizeof note, "%ssupervise: %llu bytes of output are missing here: "
                             "nobody took them\n", r->last == '\n' ? "" : "\n", missing);
        if (relay_write(r, note, (size_t)bytes) == bytes) r->dropped = 0;
    }
    ssize_t written = r->dropped ? -1 : relay_write(r, r->held, r->bytes);
    if (written > 0) {
        r->bytes -= (size_t)written;
        memmove(r->held, r->held + written, r->bytes);
    } else if (r->dropped || errno != EAGAIN || now_ms() - r->moved_ms > RELAY_STUCK_MS) {
        r->dropped += r->bytes;
        r->bytes = 0;
    }
    return r->bytes == 0;
}

// A sentence of the supervisor's own, on a line of its own.
static void relay_say(Relay* r, const char* sentence) {
    while (!relay_flush(r)) poll(NULL, 0, RELAY_PAUSE_MS);
    int bytes = snprintf(r->held, sizeof r->held, "%ssupervise: %s\n", r->last == '\n' ? "" : "\n", sentence);
    r->bytes = min_size((size_t)bytes, sizeof r->held - 1);
    r->moved_ms = now_ms();
    while (!relay_flush(r)) poll(NULL, 0, RELAY_PAUSE_MS);
}

// False when there is nothing to move, for now.
static bool relay_move(Relay* r, Tail* tail) {
    if (r->bytes == 0) {
        ssize_t bytes = read(r->from, r->held, sizeof r->held);  // does not wait
        if (bytes == 0) relay_close(r);
        if (bytes <= 0) return false;
        r->bytes = (size_t)bytes;
        r->moved_ms = now_ms();
        tail_put(tail, r->held, r->bytes, r->to);
    }
    relay_flush(r);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Command: its words, of which the last is followed by NULL

// The value that word i gives to a flag: the word after the flag's own, or what is behind its '='; otherwise NULL.
static char* command_value(char* const* words, size_t i, const char* flag) {
    size_t length = strlen(flag);
    if (strncmp(words[i], flag, length) == 0 && words[i][length] == '=') return words[i] + length + 1;
    return i > 0 && strcmp(words[i - 1], flag) == 0 ? words[i] : NULL;
}

// The last value of a flag, or NULL.
static char* command_find(char* const* words, const char* flag) {
    char* found = NULL;
    for (size_t i = 0; words[i]; i++) {
        char* value = command_value(words, i, flag);
        if (value) found = value;
    }
    return found;
}

static uint64_t command_number(const char* text) {
    uint64_t number = 0;
    return text && json_digits(&number, text, strlen(text), (uint64_t)1 << 32) ? number : 0;
}

// Whether a word is the trainer's program: train, or train-FP32 and its like.
static bool command_is_trainer(char* const* words) {
    for (size_t i = 0; words[i]; i++) {
        const char *slash = strrchr(words[i], '/'), *name = slash ? slash + 1 : words[i];
        bool named = strcmp(name, "train") == 0 || strncmp(name, "train-", 6) == 0;
        if (named && (i == 0 || (access(words[i], X_OK) == 0 && !directory_exists(words[i])))) return true;
    }
    return false;
}

static bool command_resumes(char* const* words) {
    for (size_t i = 0; words[i]; i++) {
        if (strcmp(words[i], "--resume=on") == 0) return true;
        if (strcmp(words[i], "--resume") == 0) return words[i + 1] == NULL || strcmp(words[i + 1], "off") != 0;
    }
    return false;
}

// Where the words say how many ranks there are, as in "-np 4" or "--ranks=4", and that number; NULL if nowhere. Of
// several (nice -n 10 mpirun -n 4 ...) the last that says what the ranks say: world, or 0.
static char* command_ranks(size_t* ranks, char* const* words, size_t world) {
    static const char* const flags[] = {"--ranks", "-np", "--np", "-n"};
    char* found = NULL;
    for (size_t f = 0; f < sizeof flags / sizeof flags[0] && found == NULL; f++) {
        for (size_t i = 0; words[i]; i++) {
            char* value = command_value(words, i, flags[f]);
            size_t number = command_number(value);
            if (number == 0 || (world > 0 && number != world)) continue;
            *ranks = number;
            found = value;
        }
    }
    return found;
}

// The largest number of ranks below `ranks` that the next start can have, 0 if there is none. The batch of a step must
// divide among them.
static size_t command_fewer_ranks(char* const* words, size_t ranks, size_t least) {
    uint64_t micro = command_number(command_find(words, "--batch")) * command_number(command_find(words, "--seq"));
    uint64_t total = command_number(command_find(words, "--total-batch"));
    size_t fewer = ranks - 1;
    while (fewer > 0 && micro && total && total / micro % fewer != 0) fewer--;
    return fewer >= least ? fewer : 0;
}

// ------------------------------------------------------------------------------------------------
// 4. Start

#define SUPERVISE_LOOK_MS 50.0       // between two looks at the heartbeats
#define SUPERVISE_LOOK_MOST_MS 1e3   // of these that count: if we slept for longer, the ranks may have too
#define SUPERVISE_LOST_MS 3e3        // for the others to end, when a rank has died
#define SUPERVISE_ABSENT_MS 1e3      // after which a rank that has not come, when others have, is missed
#define SUPERVISE_TOGETHER_MS 200.0  // in which ranks end that end together
#define SUPERVISE_TERM_MS 2e3        // from SIGTERM to SIGKILL
#define SUPERVISE_KILL_MS 30e3       // from SIGKILL to the end of any process that can end
#define SUPERVISE_SWEEP_MS 20        // between two looks for what is left
#define SUPERVISE_WATCHED ((size_t)256)  // ranks whose end wakes us: that takes a descriptor each
#define SUPERVISE_PAUSE_MS 500.0     // after a failure without progress; then twice as long each time
#define SUPERVISE_PAUSE_MOST_MS 30e3

// A rank as the supervisor sees it.
typedef struct {
    Heartbeat seen;    // at the last look
    double still_ms;   // that it has not moved
    char state;        // Process.state
    int end;           // a descriptor that can be read when it has ended; -1 when that was seen
    double gone_ms;    // when it was seen to have ended; 0: it has not
    int status;        // of one that has ended, as waitpid tells it; 0: not known, or all is well
} RankView;

typedef struct {
    // flags
    uint64_t max_failures, least_ranks;
    double limits[HEARTBEAT_PHASES];  // of a phase, in seconds; 0: none
    const char* out;
    char** words;          // of the command
    // this process
    int signals;           // a signalfd
    int signal;            // the first that came; 0: none
    sigset_t mask_before;
    void (*pipe_before)(int);
    Relay relays[2];       // standard output and standard error
    Tail tail;
    // all starts
    size_t starts, failures_in_row, lost_in_row;  // in_row: without progress
    uint64_t best_step;
    bool stopping;         // by a signal
    double stop_by_ms;
    // this start
    pid_t child;
    bool ended;            // the command has
    int status;            // as waitpid tells it; 0 before
    bool progress;         // some rank was beyond best_step
    char beats_path[HEARTBEAT_PATH_BYTES];
    Heartbeats* beats;     // mapped
    RankView views[HEARTBEAT_RANKS];  // in the order in which the ranks came
    size_t view_count;
    size_t world;          // as the ranks say; 0: not known
    double looked_ms;
    double age_ms, ranks_ms;  // since the start, and since the first rank came, while we were awake
} Supervisor;

// What has failed.
typedef struct {
    const char* kind;      // "start", "exit", "signal", "lost rank", "absent rank", "hang", "late"
    const RankView* rank;  // to blame, or NULL
    bool lost;             // looks as if there were a rank less now
    char what[1024];       // a sentence
} Failure;

// Continues the sentence.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void failure_add(Failure* f, const char* format, ...) {
    size_t bytes = strlen(f->what);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->what + bytes, sizeof f->what - bytes, format, arguments);
    va_end(arguments);
}

// Tells people, on standard error, if it is said aloud, and events.jsonl, if it is an event.
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static void supervise_tell(Supervisor* s, bool aloud, const char* event, const char* format, ...) {
    char text[2048];
    Error error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (aloud) relay_say(&s->relays[1], text);
    if (event == NULL || event_write(s->out, event, s->best_step, text, &error)) return;
    relay_say(&s->relays[1], error.text);
}

// In the child: becomes the command, or tells why it cannot.
static void supervise_become(Supervisor* s, pid_t parent, int out, int err) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // without a supervisor it saves and stops
    if (getppid() != parent) _exit(1);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bool good = setsid() >= 0 && null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
                dup2(err, STDERR_FILENO) >= 0 && sigprocmask(SIG_SETMASK, &s->mask_before, NULL) == 0 &&
                setenv(HEARTBEAT_VARIABLE, s->beats_path, 1) == 0;
    signal(SIGPIPE, s->pipe_before);
    if (good) execvp(s->words[0], s->words);
    s->beats->start_errno = errno;
    _exit(127);
}

static void failure_cannot_start(Failure* f, const Supervisor* s, const char* reason) {
    f->kind = "start";
    failure_add(f, "cannot start %.200s: %.600s; check the command after --, and the limits on processes and files "
                "(ulimit -u, -n)", s->words[0], reason);
}

// Starts the command; false with what is in the way. That it cannot become what it is to be is seen when it has ended.
static bool supervise_start(Failure* f, Supervisor* s) {
    int pipes[2][2], made = 0;  // for standard output and standard error
    Error error;
    s->starts++;
    supervise_tell(s, false, "start", "start %zu", s->starts);
    s->ended = true;
    s->progress = false;
    s->status = 0;
    s->tail.count = s->world = 0;
    s->looked_ms = now_ms();
    s->age_ms = s->ranks_ms = 0;
    s->beats = heartbeats_make(s->beats_path, &error);
    if (s->beats == NULL) {
        failure_cannot_start(f, s, error.text);
        return false;
    }
    while (made < 2 && pipe2(pipes[made], O_CLOEXEC) == 0) made++;
    pid_t parent = getpid();
    s->child = made == 2 ? fork() : -1;
    if (s->child == 0) supervise_become(s, parent, pipes[0][1], pipes[1][1]);
    s->ended = s->child < 0;
    if (s->ended) failure_cannot_start(f, s, strerror(errno));
    for (int i = 0; i < made; i++) {
        close(pipes[i][1]);
        fcntl(pipes[i][0], F_SETPIPE_SZ, RELAY_PIPE);  // it may be less, where users share a limit
        fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
        s->relays[i].from = pipes[i][0];
    }
    return !s->ended;
}

// ------------------------------------------------------------------------------------------------
// 5. Watch

static double supervise_limit_ms(const Supervisor* s, uint64_t phase) {
    return s->limits[phase] > 0 ? 1e3 * s->limits[phase] : (double)INFINITY;
}

// Sends a signal to the ranks that are left; true if there was one.
static bool supervise_signal_ranks(const Supervisor* s, int number) {
    bool stats = false;
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].gone_ms == 0) stats = kill((pid_t)s->views[i].seen.pid, number) == 0 || stats;
    return stats;
}

static void rank_is_gone(RankView* view, double now, int status) {
    if (status) view->status = status;
    if (view->gone_ms > 0) return;
    view->gone_ms = now;
    if (view->end >= 0) close(view->end);
    view->end = -1;
}

// The rank that is this process, or NULL.
static RankView* supervise_rank(Supervisor* s, pid_t pid) {
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].seen.pid == (uint64_t)pid) return &s->views[i];
    return NULL;
}

// Signals and output, for at most that long; less if something happens. True if a rank has ended.
static bool supervise_poll(Supervisor* s, double ms) {
    struct signalfd_siginfo info;
    struct pollfd polled[3 + SUPERVISE_WATCHED];  // signals, both relays, ranks
    nfds_t count = 0;
    bool rank_ended = false;
    pid_t pid;
    int status;
    polled[count++] = polled_for(s->signals, POLLIN);
    for (int i = 0; i < 2; i++) {
        const Relay* r = &s->relays[i];
        polled[count++] = r->bytes > 0 ? polled_for(r->to, POLLOUT) : polled_for(r->from, POLLIN);
    }
    for (size_t i = 0; i < min_size(s->view_count, SUPERVISE_WATCHED); i++)
        polled[count++] = polled_for(s->views[i].end, POLLIN);
    poll(polled, count, (int)ceil(fmax(ms, 0)));
    for (nfds_t i = 3; i < count; i++) {
        Process p;
        if (polled[i].revents == 0) continue;
        RankView* view = &s->views[i - 3];
        process_read(&p, (pid_t)view->seen.pid);
        rank_is_gone(view, now_ms(), p.status);
        rank_ended = true;
    }
    while (read(s->signals, &info, sizeof info) == sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGCHLD) continue;
        if (!s->stopping) s->stop_by_ms = now_ms() + supervise_limit_ms(s, HEARTBEAT_CHECKPOINT);
        s->stopping = true;
        // To the ranks, since not every launcher passes it on: mpirun ends them a second after a SIGTERM. Where none is
        // known, to the command. SIGHUP: the terminal is gone.
        int passed = number == SIGHUP ? SIGTERM : number;
        if (!supervise_signal_ranks(s, passed) && !s->ended && kill(-s->child, passed) != 0) kill(s->child, passed);
        if (s->signal == 0) s->signal = number;
    }
    for (int i = 0; i < 2; i++) relay_move(&s->relays[i], &s->tail);
    double now = now_ms();
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        RankView* view = supervise_rank(s, pid);  // one whose parent ended before we had looked
        if (view) rank_is_gone(view, now, status);
        if (pid != s->child || s->ended) continue;
        s->ended = true;
        s->status = status;
    }
    return rank_ended;
}

// Looks at every rank.
static void supervise_look(Supervisor* s) {
    double now = now_ms(), passed = fmin(now - s->looked_ms, SUPERVISE_LOOK_MOST_MS);
    s->looked_ms = now;
    s->age_ms += passed;
    const Heartbeat* beats = s->beats->ranks;
    while (s->view_count < HEARTBEAT_RANKS && __atomic_load_n(&beats[s->view_count].counter, __ATOMIC_ACQUIRE) > 1) {
        RankView* view = &s->views[s->view_count];  // has come since
        memset(view, 0, sizeof *view);
        view->still_ms = -passed;
        view->seen = heartbeat_read(&beats[s->view_count++]);
        bool watched = s->view_count <= SUPERVISE_WATCHED;  // of the others an end is seen at the next look
        view->end = watched ? (int)syscall(SYS_pidfd_open, (pid_t)view->seen.pid, 0) : -1;
        s->world = (size_t)view->seen.world;
    }
    if (s->view_count > 0) s->ranks_ms += passed;
    for (size_t i = 0; i < s->view_count; i++) {
        RankView* view = &s->views[i];
        Process p;
        if (view->gone_ms == 0) {
            bool there = process_read(&p, (pid_t)view->seen.pid);
            if (p.state) view->state = p.state;
            if (!there || p.state == 'Z' || p.state == 'X') rank_is_gone(view, now, p.status);
        }
        Heartbeat h = heartbeat_read(&beats[i]);  // after the process, so that the last word of one that is gone is read
        view->still_ms = h.counter == view->seen.counter ? view->still_ms + passed : 0;
        view->seen = h;
        if (h.phase == HEARTBEAT_SETUP || h.step <= s->best_step) continue;
        s->best_step = h.step;
        s->progress = true;
    }
}

// What has become of a rank; the later ones weigh more when one is to blame.
typedef enum { RANK_DONE, RANK_RUNS, RANK_GAVE_UP, RANK_KILLED } RankFate;

static RankFate rank_fate(const RankView* view) {
    if (view->seen.closed) return view->seen.phase == HEARTBEAT_DONE ? RANK_DONE : RANK_GAVE_UP;
    return view->gone_ms > 0 ? RANK_KILLED : RANK_RUNS;
}

static bool rank_is_stopped(const RankView* view) { return view->state == 'T' || view->state == 't'; }

// Whether a is rather to blame than b. Of two that were killed that is the one that was seen dead first; of two that
// run the one that was stopped, is in an earlier step, or is not yet in the collective in which the other waits.
// Otherwise it is the one that beat last the longest ago.
static bool rank_is_worse(const RankView* a, const RankView* b) {
    RankFate fate = rank_fate(a);
    bool a_stopped = rank_is_stopped(a), b_stopped = rank_is_stopped(b);
    bool a_waits = a->seen.phase == HEARTBEAT_COLLECTIVE, b_waits = b->seen.phase == HEARTBEAT_COLLECTIVE;
    if (fate != rank_fate(b)) return fate > rank_fate(b);
    if (fate == RANK_KILLED && a->gone_ms != b->gone_ms) return a->gone_ms < b->gone_ms;
    if (fate == RANK_RUNS && a_stopped != b_stopped) return a_stopped;
    if (fate == RANK_RUNS && a->seen.step != b->seen.step) return a->seen.step < b->seen.step;
    if (fate == RANK_RUNS && a_waits != b_waits) return b_waits;
    return fate == RANK_RUNS ? a->still_ms > b->still_ms : a->seen.ms < b->seen.ms;
}

// The rank that is to blame if something is wrong; NULL if none has come.
static const RankView* supervise_worst(const Supervisor* s) {
    const RankView* worst = s->view_count > 0 ? s->views : NULL;
    for (size_t i = 1; i < s->view_count; i++)
        if (rank_is_worse(&s->views[i], worst)) worst = &s->views[i];
    return worst;
}

// The lowest rank that never came, though others have; `world` if all have, or nobody knows.
static size_t supervise_absent(const Supervisor* s) {
    for (size_t rank = 0; s->view_count < HEARTBEAT_RANKS && rank < s->world; rank++) {
        bool came = false;
        for (size_t i = 0; i < s->view_count; i++) came = came || s->views[i].seen.rank == rank;
        if (!came) return rank;
    }
    return s->world;
}

// "rank 1 (process 77) HAS in phase collective, step 31, in reduce_scatter".
static void failure_add_rank(Failure* f, const RankView* view, const char* has) {
    const Heartbeat* h = &view->seen;
    unsigned long long rank = h->rank, pid = h->pid, step = h->step;
    failure_add(f, "rank %llu (process %llu) %s in phase %s", rank, pid, has, HEARTBEAT_PHASE_NAMES[h->phase]);
    if (step > 0) failure_add(f, ", step %llu", step);
    if (h->phase == HEARTBEAT_COLLECTIVE && h->collective[0]) failure_add(f, ", in %s", h->collective);
}

// A rank whose heartbeat stands still for too long: it, or the one that it waits for.
static bool supervise_find_hang(Failure* f, const Supervisor* s, const RankView* worst) {
    const RankView* late = NULL;
    char has[64];
    for (size_t i = 0; i < s->view_count && late == NULL; i++) {
        const RankView* view = &s->views[i];
        if (view->gone_ms == 0 && view->still_ms > supervise_limit_ms(s, view->seen.phase)) late = view;
    }
    if (late == NULL) return false;
    bool itself = worst->still_ms > supervise_limit_ms(s, worst->seen.phase);
    const char* did = rank_fate(worst) == RANK_GAVE_UP ? "gave up" : itself ? "stopped beating" : "beat last";
    f->kind = "hang";
    f->rank = worst;
    snprintf(has, sizeof has, "%s %.1f s ago", did, 1e-3 * worst->still_ms);
    failure_add_rank(f, worst, has);
    if (rank_is_stopped(worst)) failure_add(f, "; it was stopped by a signal");
    if (worst->state == 'D') failure_add(f, "; it waits for a device or a disk");
    if (itself) return true;
    snprintf(has, sizeof has, "has not beaten for %.1f s", 1e-3 * late->still_ms);
    failure_add(f, "; ");
    failure_add_rank(f, late, has);
    return true;
}

static void failure_blame_killed(Failure* f, const RankView* view) {
    char end[96] = "is gone without a word";
    if (view->status) status_text(end, sizeof end, view->status);
    f->rank = view;
    f->lost = view->status == 0 || WIFSIGNALED(view->status);
    failure_add_rank(f, view, end);
}

// Whether something is wrong while the command runs.
static bool supervise_find_failure(Failure* f, const Supervisor* s) {
    const RankView* worst = supervise_worst(s);
    size_t absent = supervise_absent(s);
    if (s->stopping) {
        if (now_ms() < s->stop_by_ms) return false;
        f->kind = "late";
        failure_add(f, "the command did not end within %g s of the signal", s->limits[HEARTBEAT_CHECKPOINT]);
        return true;
    }
    if (worst && rank_fate(worst) == RANK_KILLED) {
        if (now_ms() - worst->gone_ms < SUPERVISE_LOST_MS) return false;
        f->kind = "lost rank";
        failure_blame_killed(f, worst);
        failure_add(f, "; the command went on");
        return true;
    }
    if (s->age_ms > supervise_limit_ms(s, HEARTBEAT_SETUP) && (absent < s->world || worst == NULL)) {
        f->kind = "absent rank";
        f->lost = absent < s->world;
        if (f->lost) failure_add(f, "rank %zu of %zu never came, in %.1f s", absent, s->world, 1e-3 * s->age_ms);
        else failure_add(f, "no rank has sent a heartbeat in %.1f s", 1e-3 * s->age_ms);
        return true;
    }
    return supervise_find_hang(f, s, worst);
}

// The command has ended, and not well.
static void supervise_explain_end(Failure* f, Supervisor* s) {
    char end[96];
    if (s->beats->start_errno) {
        failure_cannot_start(f, s, strerror(s->beats->start_errno));
        return;
    }
    supervise_look(s);
    RankView* itself = supervise_rank(s, s->child);
    if (itself) rank_is_gone(itself, now_ms(), s->status);
    const RankView* worst = supervise_worst(s);
    RankFate fate = worst ? rank_fate(worst) : RANK_DONE;
    size_t absent = supervise_absent(s);
    bool killed = WIFSIGNALED(s->status);
    f->kind = killed ? "signal" : "exit";
    status_text(end, sizeof end, s->status);
    if (fate == RANK_KILLED) {
        // Forked ranks end with the one that is the command, and may be seen to do so a little before it.
        if (killed && itself && now_ms() - worst->gone_ms < SUPERVISE_TOGETHER_MS) worst = itself;
        failure_blame_killed(f, worst);
        if (worst != itself) failure_add(f, "; the command %s", end);
    } else {
        failure_add(f, "the command %s", end);
    }
    bool missed = fate != RANK_KILLED && absent < s->world && s->ranks_ms > SUPERVISE_ABSENT_MS;
    if (missed) {
        failure_add(f, "; rank %zu of %zu never came", absent, s->world);
    } else if (fate == RANK_GAVE_UP) {
        f->rank = worst;
        failure_add(f, "; ");
        failure_add_rank(f, worst, s->view_count > 1 ? "gave up first" : "gave up");
    }
    f->lost = f->lost || missed || status_code(s->status) > 128;  // so launchers tell of a signal
}

// Returns true when the command has ended well, or after a signal, false with what has failed.
static bool supervise_watch(Failure* f, Supervisor* s) {
    while (true) {
        bool rank_ended = supervise_poll(s, SUPERVISE_LOOK_MS - (now_ms() - s->looked_ms));
        if (s->ended) break;
        if (!rank_ended && now_ms() - s->looked_ms < SUPERVISE_LOOK_MS) continue;
        supervise_look(s);
        if (supervise_find_failure(f, s)) return false;
    }
    int code = status_code(s->status);
    if (s->beats->start_errno == 0 && (s->stopping || code == 0 || code == EXIT_SAVED)) return true;
    supervise_explain_end(f, s);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 6. Post-mortem
//
// Begun before the processes are ended, with all that is gone then, and without touching the disk, for which they may
// be waiting; written when they are.

// What is not known is null.
static void json_members_of_end(JsonWriter* w, int status) {
    json_member_number(w, "exit_code", status && WIFEXITED(status) ? WEXITSTATUS(status) : NAN);
    json_member_number(w, "signal", status && WIFSIGNALED(status) ? WTERMSIG(status) : NAN);
}

static void json_members_of_beat(JsonWriter* w, const Heartbeat* h) {
    json_member_string(w, "phase", HEARTBEAT_PHASE_NAMES[h->phase]);
    json_member_u64(w, "step", h->step);
    json_member_string(w, "collective", h->collective);
}

// Bytes of memory that programs can have; NaN if that is not known.
static double memory_available(void) {
    char line[256];
    unsigned long long kilobytes = 0;
    bool found = false;
    FILE* file = fopen("/proc/meminfo", "re");
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1;
    if (file) fclose(file);
    return found ? 1024.0 * (double)kilobytes : (double)NAN;
}

static void failure_begin(JsonWriter* w, const Failure* f, const Supervisor* s) {
    char time_text[64], state[2] = "";
    time_utc(time_text);
    memset(w, 0, sizeof *w);
    w->line_depth = 2;
    json_write_begin(w, '{');
    json_member_string(w, "time", time_text);
    json_member_string(w, "what", f->what);
    json_member_string(w, "kind", f->kind);
    json_member_u64(w, "start", s->starts);
    json_member_number(w, "seconds", 1e-3 * s->age_ms);
    json_member_bool(w, "progress", s->progress);
    json_member_u64(w, "best_step", s->best_step);
    json_member_number(w, "rank", f->rank ? (double)f->rank->seen.rank : NAN);
    if (f->rank) json_members_of_beat(w, &f->rank->seen);
    // Of the rank to blame, if it is known how that ended; of the command otherwise.
    json_members_of_end(w, f->rank && f->rank->status ? f->rank->status : s->status);
    json_write_key(w, "ranks");
    json_write_begin(w, '[');
    for (size_t i = 0; i < s->view_count; i++) {
        const RankView* view = &s->views[i];
        state[0] = view->state;
        json_write_begin(w, '{');
        json_member_u64(w, "rank", view->seen.rank);
        json_member_u64(w, "pid", view->seen.pid);
        json_members_of_beat(w, &view->seen);
        json_member_number(w, "age_seconds", 1e-3 * fmax(0, now_ms() - (double)view->seen.ms));
        json_member_bool(w, "alive", view->gone_ms == 0);
        json_member_bool(w, "closed", view->seen.closed != 0);
        json_member_string(w, "state", state);
        json_members_of_end(w, view->status);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
    json_member_number(w, "memory_available_bytes", memory_available());
}

// Ends it, writes it under the next free name and frees it; path is "" if it could not be written.
static void failure_end(char* path, size_t size, JsonWriter* w, Supervisor* s) {
    Error error;
    struct statvfs disk;
    char directory[FILE_PATH_MAX + 16];
    double disk_free = statvfs(s->out, &disk) == 0 ? (double)disk.f_bavail * (double)disk.f_frsize : (double)NAN;
    json_member_number(w, "disk_free_bytes", disk_free);
    json_write_key(w, "output");
    tail_write(w, &s->tail);
    json_write_key(w, "command");
    json_write_begin(w, '[');
    for (size_t i = 0; s->words[i]; i++) json_write_string(w, s->words[i]);
    json_write_end(w, ']');
    json_write_end(w, '}');
    json_put(w, "\n", 1);
    snprintf(directory, sizeof directory, "%s/failures", s->out);
    bool good = json_write_done(w, &error) && directory_make(directory, &error);
    unsigned number = 0;
    do snprintf(path, size, "%s/failure_%04u.json", directory, ++number);
    while (access(path, F_OK) == 0);
    good = good && file_write_atomic(path, w->text, w->bytes, &error);
    json_writer_free(w);
    if (good) return;
    path[0] = 0;
    supervise_tell(s, true, NULL, "no post-mortem: %s", error.text);
}

// ------------------------------------------------------------------------------------------------
// 7. Use

// Ends what the command has left: what is known of its ranks, and every process; false if one does not end.
static bool supervise_end_all(Supervisor* s) {
    double began = now_ms(), passed = 0;
    int number = SIGTERM;
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].end >= 0) close(s->views[i].end);
    s->view_count = 0;
    if (s->beats) munmap(s->beats, sizeof *s->beats);
    s->beats = NULL;
    unlink(s->beats_path);
    while (processes_signal(number) > 0) {
        if (passed > SUPERVISE_TERM_MS + SUPERVISE_KILL_MS) return false;
        supervise_poll(s, SUPERVISE_SWEEP_MS);
        passed = now_ms() - began;
        number = passed > SUPERVISE_TERM_MS ? SIGKILL : SIGTERM;
    }
    for (int i = 0; i < 2; i++) {  // what they have written last
        Relay* r = &s->relays[i];
        struct pollfd end = polled_for(r->to, POLLOUT);
        while (relay_move(r, &s->tail))
            if (r->bytes > 0) poll(&end, 1, (int)SUPERVISE_LOOK_MS);
        relay_close(r);
    }
    return true;
}

// The signal that came while the command ran, when that can keep nobody waiting any more.
static void supervise_tell_signal(Supervisor* s) {
    if (s->signal) supervise_tell(s, false, "signal", "signal %d (%s)", s->signal, strsignal(s->signal));
    s->signal = 0;
}

// Fewer ranks next time, if the flags allow it and the command has a word for it.
static void supervise_lower_ranks(Supervisor* s) {
    size_t ranks = 0;
    char* digits = command_ranks(&ranks, s->words, s->world);
    size_t fewer = digits ? command_fewer_ranks(s->words, ranks, s->least_ranks) : 0;
    if (fewer == 0) {
        supervise_tell(s, true, NULL, "a rank seems to be lost, but %s: their number stays", digits ?
                       "no smaller number of ranks that --min-ranks allows divides the batch" :
                       "nothing in the command says how many there are (--ranks N, -np N, -n N)");
        return;
    }
    snprintf(digits, strlen(digits) + 1, "%zu", fewer);
    s->lost_in_row = s->failures_in_row = 0;  // another number of ranks is another attempt
    supervise_tell(s, true, "fewer ranks", "%zu ranks failed twice without progress, as if one were lost: now %zu",
                   ranks, fewer);
}

static int supervise_give_up(Supervisor* s, const char* why) {
    supervise_tell(s, true, "gave up", "gave up: %s; best step %llu, %zu starts; see %.600s/failures", why,
                   (unsigned long long)s->best_step, s->starts, s->out);
    return 1;
}

// After a failure: ends what is left, says it, and pauses. Returns the exit code, or -1 to start again.
static int supervise_fail(Supervisor* s, const Failure* f) {
    char path[FILE_PATH_MAX + 64], why[64];
    JsonWriter w;
    bool wrong_flags = status_code(s->status) == 2, late = strcmp(f->kind, "late") == 0;
    failure_begin(&w, f, s);
    supervise_signal_ranks(s, SIGKILL);  // there is nothing that they could save without the others
    bool all_ended = supervise_end_all(s);
    supervise_tell_signal(s);
    if (s->starts == 1 && strcmp(f->kind, "start") == 0) {  // nor will it start later
        json_writer_free(&w);
        supervise_tell(s, true, NULL, "%s", f->what);
        return 2;
    }
    failure_end(path, sizeof path, &w, s);
    supervise_tell(s, true, "failure", "%s%s%s", f->what, path[0] ? "; see " : "", path);
    s->failures_in_row = s->progress ? 0 : s->failures_in_row + 1;
    s->lost_in_row = s->progress || !f->lost ? 0 : s->lost_in_row + 1;

    if (!all_ended) return supervise_give_up(s, "some processes do not end, even by SIGKILL; restart the machine");
    if (wrong_flags) return 2;
    if (late) return 1;
    if (s->stopping) return EXIT_SAVED;  // a signal came while nothing ran
    if (s->least_ranks > 0 && s->lost_in_row >= 2) supervise_lower_ranks(s);
    snprintf(why, sizeof why, "%zu failures in a row without progress", s->failures_in_row);
    if (s->failures_in_row >= s->max_failures) return supervise_give_up(s, why);
    double pause_ms = fmin(ldexp(SUPERVISE_PAUSE_MS, (int)s->failures_in_row - 1), SUPERVISE_PAUSE_MOST_MS);
    if (s->progress) pause_ms = 0;
    supervise_tell(s, false, "restart", "after %.1f s; %s", 1e-3 * pause_ms, why);
    double until = now_ms() + pause_ms;
    while (!s->stopping && now_ms() < until) supervise_poll(s, until - now_ms());
    supervise_tell_signal(s);
    return s->stopping ? EXIT_SAVED : -1;
}

// The command has ended well, or after a signal. Returns the exit code.
static int supervise_finish(Supervisor* s) {
    char end[96];
    int code = status_code(s->status);
    status_text(end, sizeof end, s->status);
    supervise_look(s);
    bool all_ended = supervise_end_all(s);
    supervise_tell_signal(s);
    supervise_tell(s, code != 0, code == 0 ? "done" : "stopped", "the command %s%s", end,
                   code == EXIT_SAVED ? ": to be continued" : "");
    if (!all_ended) supervise_tell(s, true, NULL, "some of its processes do not end, even by SIGKILL");
    return code;
}

// Whether there is something to supervise, and where.
static bool supervise_check(Supervisor* s, Error* error) {
    if (s->words[0] == NULL)
        return fail(error, "there is no command to run; give it last: supervise [FLAGS] -- ./train ...");
    if (command_is_trainer(s->words) && !command_resumes(s->words))
        return fail(error, "the command has no --resume, so that every start would begin anew; add --resume");
    if (s->out == NULL) s->out = command_find(s->words, "--out");
    if (s->out == NULL || s->out[0] == 0)
        return fail(error, "neither the supervisor nor the command has --out; give the directory of the run");
    return strlen(s->out) <= 3900 || fail(error, "--out is longer than 3900 characters; give a shorter path");
}

// All that is needed before the first start.
static bool supervise_open(Supervisor* s, Error* error) {
    static const int signals[] = {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    sigset_t mask;
    if (!directory_make(s->out, error)) return false;
    int lock = open(s->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // until the process ends
    if (lock < 0) return fail_file(error, "open the directory", s->out);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail(error, "another supervisor watches %.600s; end it first, or give another --out", s->out);
    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) sigaddset(&mask, signals[i]);
    sigprocmask(SIG_BLOCK, &mask, &s->mask_before);
    s->pipe_before = signal(SIGPIPE, SIG_IGN);
    s->signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
        return fail(error, "cannot watch processes: %s; a newer Linux is needed", strerror(errno));
    return true;
}

int main(int argc, char** argv) {
    static Supervisor supervisor;
    Supervisor* s = &supervisor;
    Flag flags[] = {
        {"max-restarts", FLAG_COUNT, &s->max_failures, "N", 1, 1e6,
         "gives up after so many failures in a row without progress", false},
        {"timeout", FLAG_REAL, &s->limits[HEARTBEAT_STEP], "S", 0, 1e9,
         "seconds without a heartbeat in a step or a collective; 0: no limit", false},
        {"setup-timeout", FLAG_REAL, &s->limits[HEARTBEAT_SETUP], "S", 0, 1e9, "the same before the first step", false},
        {"checkpoint-timeout", FLAG_REAL, &s->limits[HEARTBEAT_CHECKPOINT], "S", 0, 1e9,
         "the same in a checkpoint; also for the command to end after a signal", false},
        {"min-ranks", FLAG_COUNT, &s->least_ranks, "N", 0, 65536,
         "goes on with fewer ranks, down to so many, when one seems lost; 0: never", false},
        {"out", FLAG_TEXT, &s->out, "DIR", 0, 0,
         "where events.jsonl and failures/ go; default: that of COMMAND", false},
    };
    const char* title = "supervise [FLAGS] -- COMMAND...: runs COMMAND, the trainer or a launcher with it, and\n"
                        "starts it again when it dies or hangs.\n";
    Error error;
    int code, dashes = 1;
    files_open_standard();
    s->max_failures = 5;
    s->limits[HEARTBEAT_STEP] = 600;
    s->limits[HEARTBEAT_SETUP] = s->limits[HEARTBEAT_CHECKPOINT] = 1800;
    while (dashes < argc && strcmp(argv[dashes], "--") != 0) dashes++;
    if (!flags_begin(&code, "supervise", title, flags, sizeof flags / sizeof flags[0], dashes, argv)) return code;
    s->limits[HEARTBEAT_COLLECTIVE] = s->limits[HEARTBEAT_DONE] = s->limits[HEARTBEAT_STEP];
    s->words = argv + (dashes < argc ? dashes + 1 : argc);
    for (int i = 0; i < 2; i++) {
        s->relays[i].from = -1;
        s->relays[i].to = relay_open(i == 0 ? STDOUT_FILENO : STDERR_FILENO);
        s->relays[i].last = '\n';
    }
    code = !supervise_check(s, &error) ? 2 : !supervise_open(s, &error) ? 1 : -1;
    if (code > 0) relay_say(&s->relays[1], error.text);
    while (code < 0) {
        Failure failure;
        memset(&failure, 0, sizeof failure);
        if (supervise_start(&failure, s) && supervise_watch(&failure, s)) code = supervise_finish(s);
        else code = supervise_fail(s, &failure);
    }
    return code;
}
