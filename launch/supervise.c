// supervise.c: the program ./supervise, which runs a command and starts it again when it dies or hangs.
//
//   ./supervise --timeout 300 -- ./train --ranks 4 --resume --ckpt-every 500 --data ... --out runs/x
//   ./supervise -- mpirun -np 4 ./train --resume --ckpt-every 500 --data ... --out runs/x
//   cat runs/x/events.jsonl                    what happened, and when: one line per event
//   cat runs/x/failures/failure_0001.json      the post-mortem of a failure: rank, phase, step, signal, last output
//   kill PID                                   the ranks save, and all end; the same command continues the run
//
// It watches the ranks of this machine: their processes, and the heartbeats that they write to shared memory
// (llmtrain/run/heartbeat.h). When the command or a rank dies, or a rank sends no heartbeat for longer than its phase
// may take, it ends every process of the command, writes a post-mortem, and starts the command again; the trainer's
// --resume finds the newest good checkpoint. Without progress it pauses first, each time twice as long, and gives up
// after --max-restarts consecutive failures. With --min-ranks it starts fewer ranks when one seems to be lost.
//
// It saves nothing itself, and does not see ranks of other machines: the trainer's --timeout and the launcher find
// those, and end the command. The command must end when the trainer ends, with the trainer's exit code.
//
// Exit codes: the command's where it is 0 (done), 2 (a flag or the data are wrong) or 75 (it received a signal and
// saved the run: start it again), or where the supervisor has passed on a signal; 2 if the command cannot be started
// the first time; otherwise 1: gave up.
//
// No process of one start is left when the next one begins. Nothing waits for a disk or a reader while ranks have to be
// signaled or ended. Time limits use the monotonic clock, and count only while the supervisor itself runs.
//
//   1. output      passed on unchanged; the last lines are kept for the post-mortem
//   2. command     whether it is the trainer, its number of ranks
//   3. start       in a session of its own
//   4. watch       until it ends, dies or hangs; which rank is to blame
//   5. post-mortem failures/failure_0001.json
//   6. main        flags, restarts, the end

#include "../llmtrain/base/flags.h"
#include "../llmtrain/run/heartbeat.h"
#include "../llmtrain/run/log.h"

#include <sys/file.h>
#include <sys/statvfs.h>

#define FORMAT(text, first) __attribute__((format(printf, text, first)))

// ------------------------------------------------------------------------------------------------
// 1. Output
//
// Bytes that the command writes go from its pipes to our own output, as many as it accepts without blocking. A slow
// reader slows the command. Output to a reader that accepts nothing at all is dropped, and a line says so.

#define RELAY_CHUNK ((size_t)4096)  // a pipe that poll reports as writable takes this many bytes without blocking
#define RELAY_PIPE (1 << 20)        // bytes that the command can be ahead of us
#define RELAY_STUCK_MS 5e3          // until a reader that takes nothing is given up
#define RELAY_RETRY_MS 20           // between two attempts to write
#define TAIL_LINES ((size_t)20)
#define TAIL_LINE_BYTES ((size_t)2048)  // the rest of a longer line is left out

// The last lines of all output.
typedef struct {
    char lines[TAIL_LINES][TAIL_LINE_BYTES];  // line i is in slot i % TAIL_LINES; each ends in 0
    size_t count, bytes;  // lines so far; bytes in the last
    int from;             // the stream that continues the last line; -1: none, it is complete
} Tail;

typedef struct {
    int from, to;            // from: the command's pipe, -1 when it is closed
    char held[RELAY_CHUNK];  // read, and still to be written
    size_t bytes;            // in held
    double moved_ms;         // when bytes were last read, or taken
    uint64_t dropped;        // bytes that were dropped and not reported yet
    char last;               // the last byte that was written
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

// Writes the lines as an array of strings.
static void tail_write(JsonWriter* w, const Tail* t) {
    json_write_begin(w, '[');
    for (size_t i = t->count - min_size(t->count, TAIL_LINES); i < t->count; i++)
        json_write_string(w, t->lines[i % TAIL_LINES]);
    json_write_end(w, ']');
}

// A terminal that poll reports as writable may take a part, and block for the rest. So it is opened again, to write
// without blocking: the descriptor that we were given is shared with other processes. If that fails, it is used.
static int relay_open(int file) {
    char path[64];
    int own = terminal_path(path, file) ? open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    return own >= 0 ? own : file;
}

static void relay_close(Relay* r) {
    if (r->from >= 0) close(r->from);
    r->from = -1;
}

// Writes as much as is taken without blocking; returns how many bytes, or -1 with errno.
static ssize_t relay_write(Relay* r, const char* text, size_t bytes) {
    struct pollfd end = {r->to, POLLOUT, 0};
    errno = EAGAIN;
    ssize_t written = poll(&end, 1, 0) > 0 ? write(r->to, text, bytes) : -1;
    if (written <= 0) return -1;
    r->last = text[written - 1];
    r->moved_ms = now_ms();
    return written;
}

// Writes as much of the held bytes as is taken. They are dropped when the reader takes nothing for too long or is gone,
// or the disk is full; a line says so before the next bytes that are taken. True when no more bytes are held.
static bool relay_flush(Relay* r) {
    char note[128];
    if (r->bytes == 0) return true;
    if (r->dropped) {
        int bytes = snprintf(note, sizeof note, "%ssupervise: %llu bytes of output are missing here: they could not be "
                             "written\n", r->last == '\n' ? "" : "\n", (unsigned long long)r->dropped);
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

// Waits until the held bytes are written or dropped.
static void relay_drain(Relay* r) {
    while (!relay_flush(r)) poll(NULL, 0, RELAY_RETRY_MS);
}

// A sentence of the supervisor, on a line of its own.
static void relay_say(Relay* r, const char* sentence) {
    relay_drain(r);
    int bytes = snprintf(r->held, sizeof r->held, "%ssupervise: %s\n", r->last == '\n' ? "" : "\n", sentence);
    r->bytes = min_size((size_t)bytes, sizeof r->held - 1);
    r->moved_ms = now_ms();
    relay_drain(r);
}

// False when there is nothing to move at present.
static bool relay_move(Relay* r, Tail* tail) {
    if (r->bytes == 0) {
        ssize_t bytes = read(r->from, r->held, sizeof r->held);  // does not block
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
// 2. Command: its words, ended by NULL

// The value that word i gives to a flag: the word after the flag, or the part after '='; otherwise NULL.
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

// A whole number as flags.h reads it; 0 if the text is not one.
static uint64_t command_number(const char* text) {
    uint64_t number = 0;
    Error ignored;
    Flag flag = {"", KIND_COUNT, &number, "N", 0, 1e12, "", false};
    return text && flag_set(&flag, text, &ignored) ? number : 0;
}

// Whether a word is the trainer's program: train, train-FP32, ...
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

// Where the words give the number of ranks, as in "-np 4" or "--ranks=4", and that number; NULL if nowhere. If several
// do (nice -n 10 mpirun -n 4 ...), the last that agrees with `world`, which the ranks reported (0: unknown).
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

// The largest number of ranks from `min` to `ranks` - 1 that divides the micro-batches of a step; 0: there is none. If
// the command does not say how many these are, one that divides `ranks`: that divides them too.
static size_t command_fewer_ranks(char* const* words, size_t ranks, size_t min) {
    uint64_t micro = command_number(command_find(words, "--batch")) * command_number(command_find(words, "--seq"));
    uint64_t total = command_number(command_find(words, "--total-batch"));
    uint64_t cp = max_size(command_number(command_find(words, "--cp")), 1);
    uint64_t tp = max_size(command_number(command_find(words, "--tp")), 1);
    uint64_t group = tp * cp * max_size(command_number(command_find(words, "--pp")), 1);  // that share a micro-batch
    uint64_t parts = total > 0 && micro > 0 ? total / micro : ranks / group;
    uint64_t shard = command_number(command_find(words, "--shard"));  // must divide the ranks of a stage
    size_t fewer = (ranks - 1) / group;
    while (fewer > 0 && (parts % fewer != 0 || (shard > 0 && fewer * cp % shard != 0))) fewer--;
    return fewer * group >= min ? fewer * group : 0;
}

// ------------------------------------------------------------------------------------------------
// 3. Start

#define SUPERVISE_READ_MS 50.0       // between two reads of the heartbeats
#define SUPERVISE_READ_MAX_MS 250.0  // counted at most: if we slept for longer, the ranks may have slept too
#define SUPERVISE_LOST_MS 3e3        // for the other ranks to end after one has died
#define SUPERVISE_ABSENT_MS 1e3      // until a rank without a heartbeat is absent, once others have sent one
#define SUPERVISE_TOGETHER_MS 200.0  // ranks that end within this time end together
#define SUPERVISE_TERM_MS 2e3        // from SIGTERM to SIGKILL
#define SUPERVISE_KILL_MS 30e3       // from SIGKILL to the end of any process that can end
#define SUPERVISE_SWEEP_MS 20        // between two searches for processes that are left
#define SUPERVISE_WATCHED ((size_t)256)  // ranks whose end wakes us; each takes a descriptor
#define SUPERVISE_PAUSE_MS 500.0     // after a failure without progress; then twice as long each time
#define SUPERVISE_PAUSE_MAX_MS 30e3

// The first SIGNALS_READ are read in supervise_poll from a pipe, a byte each; the supervisor ignores the others.
static const int SIGNALS[] = {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGPIPE, SIGXFSZ};
enum { SIGNALS_READ = 5, SIGNALS_COUNT = sizeof SIGNALS / sizeof(int) };
static int signal_pipe[2] = {-1, -1};

static void signal_came(int number) {
    int reason = errno;
    char byte = (char)number;
    if (write(signal_pipe[1], &byte, 1) < 0) byte = 0;  // the pipe is full of signals: drops this one
    errno = reason;
}

// A rank as the supervisor sees it.
typedef struct {
    Heartbeat seen;   // the last that was read
    double still_ms;  // since it changed, at read_ms
    char state;       // Process.state
    int end;          // of process_watch, readable when the rank has ended; -1: none
    double ended_ms;  // when its end was seen; 0: it runs
    double dead_ms;   // since then, at read_ms
    double lost_ms;   // since it has seen that a GPU is lost, at read_ms
    int status;       // of a rank that has ended, as from waitpid; 0: unknown, or all is well
} RankView;

typedef struct {
    // flags
    uint64_t max_restarts, min_ranks;
    double limits[HEARTBEAT_PHASES];  // seconds that a phase may take without a heartbeat; 0: any
    const char* out;
    char** words;     // of the command
    // this process
    int signal;       // the first received since the last event; 0: none
    sigset_t mask, mask_before;  // mask: of the signals that are read
    struct sigaction actions_before[SIGNALS_COUNT];
    Relay relays[2];  // standard output and standard error
    Tail tail;
    // all starts
    size_t starts, failures, losses;  // failures, losses of a rank: consecutive, without progress
    uint64_t best_step;
    bool stopping;    // a signal was received
    double stop_by_ms;
    // this start
    pid_t child;
    Guard guard;      // of the command
    bool ended;       // the command has
    int status;       // as from waitpid; 0 while it runs
    bool progress;    // a rank was beyond best_step
    char heartbeats_path[HEARTBEAT_PATH_BYTES];
    Heartbeats* heartbeats;  // mapped
    int heartbeats_lock;
    RankView views[HEARTBEAT_RANKS];  // in the order in which the ranks started
    size_t view_count;
    size_t world;     // as the ranks reported it; 0: unknown
    double read_ms;   // of the last read of the heartbeats
    double age_ms, ranks_ms;  // since the start, and since the first heartbeat, without time in which we slept
} Supervisor;

typedef struct {
    const char* kind;      // "start", "exit", "signal", "lost rank", "absent rank", "hang", "late"
    const RankView* rank;  // to blame, or NULL
    bool lost;             // one rank seems to be gone for good
    char what[1024];       // a sentence
} Failure;

// Continues the sentence.
FORMAT(2, 3) static void failure_add(Failure* f, const char* format, ...) {
    size_t bytes = strlen(f->what);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->what + bytes, sizeof f->what - bytes, format, arguments);
    va_end(arguments);
}

// Writes a sentence to standard error, if `aloud`, and to events.jsonl, if `event` is not NULL.
FORMAT(4, 5) static void supervise_tell(Supervisor* s, bool aloud, const char* event, const char* format, ...) {
    char text[2048], visible[2048];
    Error error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    text_make_visible(visible, sizeof visible, text);
    if (aloud) relay_say(&s->relays[1], visible);
    bool good = event == NULL || event_write(s->out, NULL, event, s->best_step, text, NULL, NULL, &error);
    if (!good) relay_say(&s->relays[1], error.text);
}

// In the child: becomes the command, or leaves the reason why it cannot.
static void supervise_become(Supervisor* s, pid_t parent, int out, int err) {
    if (!process_end_with_parent(parent, SIGTERM)) _exit(1);  // when the supervisor dies the command saves and stops
    for (int i = 0; i < SIGNALS_COUNT; i++) sigaction(SIGNALS[i], &s->actions_before[i], NULL);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bool good = setsid() >= 0 && null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
                dup2(err, STDERR_FILENO) >= 0 && sigprocmask(SIG_SETMASK, &s->mask_before, NULL) == 0 &&
                setenv(HEARTBEAT_VARIABLE, s->heartbeats_path, 1) == 0;
    if (good) execvp(s->words[0], s->words);
    s->heartbeats->start_errno = errno;
    _exit(127);
}

static bool failure_cannot_start(Failure* f, const Supervisor* s, const char* reason) {
    f->kind = "start";
    failure_add(f, "cannot start %.200s: %.600s; check the command after --, and the limits on processes and files "
                "(ulimit -u, -n)", s->words[0], reason);
    return false;
}

// Starts the command; false with the reason if that fails. If the child cannot exec, that is seen when it has ended.
static bool supervise_start(Failure* f, Supervisor* s) {
    int pipes[2][2], made = 0;  // for standard output and standard error
    Error error;
    s->starts++;
    supervise_tell(s, false, "start", "start %zu", s->starts);
    s->ended = true;
    s->progress = false;
    s->status = 0;
    s->tail.count = s->world = 0;
    s->read_ms = now_ms();
    s->age_ms = s->ranks_ms = 0;
    s->heartbeats = heartbeats_make(&s->heartbeats_lock, s->heartbeats_path, &error);
    if (s->heartbeats == NULL) return failure_cannot_start(f, s, error.text);
    while (made < 2 && pipe_open(pipes[made])) fcntl(pipes[made++][1], F_SETFL, 0);  // the command's end blocks
    pid_t parent = getpid();
    s->child = made == 2 ? fork() : -1;
    if (s->child == 0) supervise_become(s, parent, pipes[0][1], pipes[1][1]);
    s->ended = s->child < 0;
    if (!s->ended) s->guard = guard_begin(s->child, SIGTERM);
    if (s->ended) failure_cannot_start(f, s, strerror(errno));
    for (int i = 0; i < made; i++) {
        close(pipes[i][1]);
        pipe_enlarge(pipes[i][0], RELAY_PIPE);  // the user's limit may make it smaller
        s->relays[i].from = pipes[i][0];
    }
    return !s->ended;
}

// ------------------------------------------------------------------------------------------------
// 4. Watch

static double supervise_limit_ms(const Supervisor* s, uint64_t phase) {
    return s->limits[phase] > 0 ? 1e3 * s->limits[phase] : (double)INFINITY;
}

// Sends a signal to the ranks that run; true if there was one.
static bool supervise_signal_ranks(const Supervisor* s, int number) {
    bool sent = false;
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].ended_ms == 0) sent = kill((pid_t)s->views[i].seen.pid, number) == 0 || sent;
    return sent;
}

static void rank_has_ended(RankView* view, double now, int status) {
    if (status) view->status = status;
    if (view->ended_ms > 0) return;
    view->ended_ms = now;
    if (view->end >= 0) close(view->end);
    view->end = -1;
}

// The rank that is this process, or NULL.
static RankView* supervise_rank(Supervisor* s, pid_t pid) {
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].seen.pid == (uint64_t)pid) return &s->views[i];
    return NULL;
}

// Reads the heartbeat and the process state of every rank.
static void supervise_read_ranks(Supervisor* s) {
    double now = now_ms(), passed = fmin(now - s->read_ms, SUPERVISE_READ_MAX_MS);
    const Heartbeat* slots = s->heartbeats->ranks;
    s->read_ms = now;
    s->age_ms += passed;
    while (s->view_count < HEARTBEAT_RANKS && __atomic_load_n(&slots[s->view_count].counter, __ATOMIC_ACQUIRE) > 1) {
        RankView* view = &s->views[s->view_count];  // has started since the last read
        *view = (RankView){.seen = heartbeat_read(&slots[s->view_count++]), .still_ms = -passed};
        bool watched = s->view_count <= SUPERVISE_WATCHED;  // the end of others is seen here
        view->end = watched ? process_watch((pid_t)view->seen.pid) : -1;
        s->world = (size_t)view->seen.world;
    }
    if (s->view_count > 0) s->ranks_ms += passed;
    for (size_t i = 0; i < s->view_count; i++) {
        RankView* view = &s->views[i];
        Process p;
        if (view->ended_ms > 0) {
            view->dead_ms += passed;
        } else {
            bool exists = process_read(&p, (pid_t)view->seen.pid);
            if (p.state) view->state = p.state;
            if (!exists || p.state == 'Z' || p.state == 'X') rank_has_ended(view, now, p.status);
        }
        Heartbeat h = heartbeat_read(&slots[i]);  // after the process, so that the last one of a dead rank is read
        view->still_ms = h.counter == view->seen.counter ? view->still_ms + passed : now - now_ms();
        if (view->status == 0) view->status = (int)h.status;
        if (h.xid) view->lost_ms += passed;
        view->seen = h;
        if (h.phase == HEARTBEAT_SETUP || h.step <= s->best_step) continue;
        s->best_step = h.step;
        s->progress = true;
    }
}

// Asks the ranks to end, since not every launcher passes the signal on (mpirun kills them a second after a SIGTERM), or
// the command where no rank is known. SIGHUP: the terminal is gone.
static void supervise_pass_signal(Supervisor* s, int number) {
    int passed = number == SIGHUP ? SIGTERM : number;
    if (!s->stopping) s->stop_by_ms = now_ms() + supervise_limit_ms(s, HEARTBEAT_PAUSE);
    s->stopping = true;
    if (s->heartbeats) supervise_read_ranks(s);  // one may have started since the last time
    if (!supervise_signal_ranks(s, passed) && !s->ended && kill(-s->child, passed) != 0) kill(s->child, passed);
    if (s->signal == 0) s->signal = number;
}

// Waits at most `ms` for signals, output and ends of processes, and handles them.
static void supervise_poll(Supervisor* s, double ms) {
    char came;
    struct pollfd polled[3 + SUPERVISE_WATCHED] = {{signal_pipe[0], POLLIN, 0}};  // signals, both relays, ranks
    nfds_t count = 1;
    pid_t pid;
    int status;
    for (Relay* r = s->relays; r < s->relays + 2; r++) {
        struct pollfd from = {r->from, POLLIN, 0}, to = {r->to, POLLOUT, 0};
        polled[count++] = r->bytes > 0 ? to : from;
    }
    for (size_t i = 0; i < min_size(s->view_count, SUPERVISE_WATCHED); i++)
        polled[count++] = (struct pollfd){s->views[i].end, POLLIN, 0};
    sigprocmask(SIG_UNBLOCK, &s->mask, NULL);
    poll(polled, count, (int)ceil(fmax(ms, 0)));
    sigprocmask(SIG_BLOCK, &s->mask, NULL);
    double now = now_ms();
    for (nfds_t i = 3; i < count; i++) {
        Process p;
        if (polled[i].revents == 0) continue;
        process_read(&p, (pid_t)s->views[i - 3].seen.pid);
        rank_has_ended(&s->views[i - 3], now, p.status);
    }
    while (read(signal_pipe[0], &came, 1) == 1)
        if (came != SIGCHLD) supervise_pass_signal(s, came);
    for (int i = 0; i < 2; i++) relay_move(&s->relays[i], &s->tail);
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        RankView* view = supervise_rank(s, pid);  // a rank whose parent ended before the rank did
        if (view) rank_has_ended(view, now, status);
        if (pid != s->child || s->ended) continue;
        s->ended = true;
        s->status = status;
    }
}

// The fate of a rank; the one with the later value here is blamed first.
typedef enum { RANK_DONE, RANK_RUNS, RANK_EXITED, RANK_KILLED } RankFate;

static RankFate rank_fate(const RankView* view) {
    if (view->seen.closed) return view->seen.phase == HEARTBEAT_DONE ? RANK_DONE : RANK_EXITED;
    return view->ended_ms > 0 ? RANK_KILLED : RANK_RUNS;
}

static bool rank_is_stopped(const RankView* view) { return view->state == 'T' || view->state == 't'; }

// Whether a is to blame rather than b. If both were killed: the one that was seen dead first; if both run: the one that
// is stopped, is in an earlier step, or has not reached the collective in which the other waits. Otherwise: the one
// with the older last heartbeat.
static bool rank_is_worse(const RankView* a, const RankView* b) {
    RankFate fate = rank_fate(a);
    bool a_stopped = rank_is_stopped(a), b_stopped = rank_is_stopped(b);
    bool a_waits = a->seen.phase == HEARTBEAT_COLLECTIVE, b_waits = b->seen.phase == HEARTBEAT_COLLECTIVE;
    if (fate != rank_fate(b)) return fate > rank_fate(b);
    if (fate == RANK_KILLED && a->ended_ms != b->ended_ms) return a->ended_ms < b->ended_ms;
    if (fate != RANK_RUNS) return a->seen.ms < b->seen.ms;
    if (a_stopped != b_stopped) return a_stopped;
    if (a->seen.step != b->seen.step) return a->seen.step < b->seen.step;
    return a_waits != b_waits ? b_waits : a->still_ms > b->still_ms;
}

// The rank that is to blame if something is wrong; NULL if none has started.
static const RankView* supervise_worst(const Supervisor* s) {
    const RankView* worst = s->view_count > 0 ? s->views : NULL;
    for (size_t i = 1; i < s->view_count; i++)
        if (rank_is_worse(&s->views[i], worst)) worst = &s->views[i];
    return worst;
}

// The lowest rank that has sent no heartbeat, though others have; `world` if all have, or if that is unknown.
static size_t supervise_absent(const Supervisor* s) {
    for (size_t rank = 0; s->view_count < HEARTBEAT_RANKS && rank < s->world; rank++) {
        bool started = false;
        for (size_t i = 0; i < s->view_count; i++) started = started || s->views[i].seen.rank == rank;
        if (!started) return rank;
    }
    return s->world;
}

// "rank 1 (process 77) DID in phase collective, step 31, in reduce_scatter".
static void failure_add_rank(Failure* f, const RankView* view, const char* did) {
    const Heartbeat* h = &view->seen;
    unsigned long long rank = h->rank, pid = h->pid, step = h->step;
    failure_add(f, "rank %llu (process %llu) %s in phase %s", rank, pid, did, HEARTBEAT_PHASE_NAMES[h->phase]);
    if (step > 0) failure_add(f, ", step %llu", step);
    if (h->phase == HEARTBEAT_COLLECTIVE && h->collective[0]) failure_add(f, ", in %s", h->collective);
}

// Whether a rank has sent no heartbeat for too long. That rank is to blame, or the rank that it waits for.
static bool supervise_find_hang(Failure* f, const Supervisor* s, const RankView* worst) {
    const RankView* late = NULL;
    char did[64];
    for (size_t i = 0; i < s->view_count && late == NULL; i++) {
        const RankView* view = &s->views[i];
        if (view->ended_ms == 0 && view->still_ms > supervise_limit_ms(s, view->seen.phase)) late = view;
    }
    if (late == NULL) return false;
    f->kind = "hang";
    f->rank = worst;
    snprintf(did, sizeof did, "%s %.1f s ago", rank_fate(worst) == RANK_EXITED ? "exited" : "sent its last heartbeat",
             1e-3 * worst->still_ms);
    failure_add_rank(f, worst, did);
    if (rank_is_stopped(worst)) failure_add(f, "; it was stopped by a signal");
    if (worst->state == 'D') failure_add(f, "; it is waiting for a device or a disk");
    if (worst->still_ms > supervise_limit_ms(s, worst->seen.phase)) return true;
    snprintf(did, sizeof did, "has sent no heartbeat for %.1f s", 1e-3 * late->still_ms);
    failure_add(f, "; ");
    failure_add_rank(f, late, did);
    return true;
}

// The rank that has seen that a GPU is lost, or NULL.
static const RankView* supervise_gpu_witness(const Supervisor* s) {
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].seen.xid) return &s->views[i];
    return NULL;
}

// Names the GPU that is lost, if one is: whatever has failed, that is why.
static void failure_add_gpu(Failure* f, const Supervisor* s) {
    const RankView* witness = supervise_gpu_witness(s);
    if (witness == NULL) return;
    unsigned number = (unsigned)witness->seen.xid;
    failure_add(f, "%sthe GPU %s is lost: XID %u, %s", f->what[0] ? "; " : "", witness->seen.gpu, number,
                telemetry_xid(number).meaning);
    f->lost = true;
}

static void failure_blame_killed(Failure* f, const RankView* view) {
    f->rank = view;
    f->lost = view->status == 0 || WIFSIGNALED(view->status);
    failure_add_rank(f, view, view->status ? status_text(view->status) : "ended with an unknown exit code");
}

// Whether something is wrong while the command runs.
static bool supervise_find_failure(Failure* f, const Supervisor* s) {
    const RankView *worst = supervise_worst(s), *witness = supervise_gpu_witness(s);
    size_t absent = supervise_absent(s);
    if (s->stopping) {
        if (now_ms() < s->stop_by_ms) return false;
        f->kind = "late";
        failure_add(f, "the command did not end within %g s of the signal", s->limits[HEARTBEAT_PAUSE]);
        return true;
    }
    if (worst && rank_fate(worst) == RANK_KILLED) {
        if (worst->dead_ms < SUPERVISE_LOST_MS) return false;
        f->kind = "lost rank";
        failure_blame_killed(f, worst);
        failure_add(f, "; the command did not end");
        return true;
    }
    if (witness && witness->lost_ms >= SUPERVISE_LOST_MS) {
        f->kind = "lost rank";
        failure_add(f, "the command did not end, although a rank has lost its GPU");
        return true;
    }
    if (s->age_ms > supervise_limit_ms(s, HEARTBEAT_SETUP) && (absent < s->world || worst == NULL)) {
        f->kind = "absent rank";
        f->lost = absent < s->world;
        if (f->lost) failure_add(f, "rank %zu of %zu has sent no heartbeat", absent, s->world);
        else failure_add(f, "no rank has sent a heartbeat");
        failure_add(f, " in the first %.1f s", 1e-3 * s->age_ms);
        return true;
    }
    return supervise_find_hang(f, s, worst);
}

// Explains a command that has ended with a failure.
static void supervise_explain_end(Failure* f, Supervisor* s) {
    RankView* itself = supervise_rank(s, s->child);
    if (itself) rank_has_ended(itself, now_ms(), s->status);
    const RankView* worst = supervise_worst(s);
    RankFate fate = worst ? rank_fate(worst) : RANK_DONE;
    size_t absent = supervise_absent(s);
    bool killed = WIFSIGNALED(s->status);
    f->kind = killed ? "signal" : "exit";
    if (fate == RANK_KILLED) {
        // Forked ranks end with the one that is the command, and may be seen to end a little before it.
        if (killed && itself && now_ms() - worst->ended_ms < SUPERVISE_TOGETHER_MS) worst = itself;
        failure_blame_killed(f, worst);
    }
    if (fate != RANK_KILLED || worst != itself)
        failure_add(f, "%sthe command %s", f->what[0] ? "; " : "", status_text(s->status));
    bool missed = fate != RANK_KILLED && absent < s->world && s->ranks_ms > SUPERVISE_ABSENT_MS;
    if (missed) {
        failure_add(f, "; rank %zu of %zu never sent a heartbeat", absent, s->world);
    } else if (fate == RANK_EXITED) {
        f->rank = worst;
        failure_add(f, "; ");
        failure_add_rank(f, worst, s->view_count > 1 ? "exited first" : "exited");
    }
    f->lost = f->lost || missed || status_code(s->status) > 128;  // how launchers report a signal
}

// Returns true when the command has ended well, or after a signal; false with what has failed.
static bool supervise_watch(Failure* f, Supervisor* s) {
    while (!s->ended) {
        supervise_poll(s, SUPERVISE_READ_MS - (now_ms() - s->read_ms));
        if (s->ended || now_ms() - s->read_ms < SUPERVISE_READ_MS) continue;
        supervise_read_ranks(s);
        if (supervise_find_failure(f, s)) return false;
    }
    supervise_read_ranks(s);
    int code = status_code(s->status);
    if (s->heartbeats->start_errno) return failure_cannot_start(f, s, strerror(s->heartbeats->start_errno));
    if (s->stopping || code == 0 || code == EXIT_SAVED) return true;
    supervise_explain_end(f, s);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 5. Post-mortem
//
// Begun before the processes are ended, with everything that would be lost then, and without touching the disk, which
// may hang; completed after they have ended.

// Unknown values are null.
static void json_members_of_end(JsonWriter* w, int status) {
    json_member_number(w, "exit_code", status && WIFEXITED(status) ? WEXITSTATUS(status) : NAN);
    json_member_number(w, "signal", status && WIFSIGNALED(status) ? WTERMSIG(status) : NAN);
}

static void json_members_of_heartbeat(JsonWriter* w, const Heartbeat* h) {
    json_member_string(w, "phase", HEARTBEAT_PHASE_NAMES[h->phase]);
    json_member_u64(w, "step", h->step);
    json_member_string(w, "collective", h->collective);
}

static void failure_begin(JsonWriter* w, const Failure* f, const Supervisor* s) {
    *w = (JsonWriter){.line_depth = 2};
    json_write_begin(w, '{');
    json_member_time(w);
    json_member_string(w, "what", f->what);
    json_member_string(w, "kind", f->kind);
    json_member_u64(w, "start", s->starts);
    json_member_number(w, "seconds", 1e-3 * s->age_ms);
    json_member_bool(w, "progress", s->progress);
    json_member_u64(w, "best_step", s->best_step);
    json_member_number(w, "rank", f->rank ? (double)f->rank->seen.rank : NAN);
    if (f->rank) json_members_of_heartbeat(w, &f->rank->seen);
    // How the rank to blame ended; without one, how the command did.
    json_members_of_end(w, f->rank && (pid_t)f->rank->seen.pid != s->child ? f->rank->status : s->status);
    json_write_key(w, "ranks");
    json_write_begin(w, '[');
    for (size_t i = 0; i < s->view_count; i++) {
        const RankView* view = &s->views[i];
        const char state[] = {view->state, 0};
        json_write_begin(w, '{');
        json_member_u64(w, "rank", view->seen.rank);
        json_member_u64(w, "pid", view->seen.pid);
        json_members_of_heartbeat(w, &view->seen);
        json_member_number(w, "age_seconds", 1e-3 * fmax(0, now_ms() - (double)view->seen.ms));
        json_member_bool(w, "alive", view->ended_ms == 0);
        json_member_bool(w, "closed", view->seen.closed != 0);
        json_member_string(w, "state", state);
        json_members_of_end(w, view->status);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
    size_t memory = memory_available();
    json_member_number(w, "memory_available_bytes", memory == SIZE_MAX ? (double)NAN : (double)memory);
}

// Completes the post-mortem, writes it under the next free name, and frees it. Returns its path, or "" on failure.
static const char* failure_end(JsonWriter* w, Supervisor* s) {
    static char directory[FILE_PATH_MAX], path[FILE_PATH_MAX + 32];
    Error error;
    struct statvfs disk;
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
    do snprintf(path, sizeof path, "%s/failure_%04u.json", directory, ++number);
    while (access(path, F_OK) == 0);
    good = good && file_write_atomic(path, w->text, w->bytes, &error);
    json_writer_free(w);
    if (!good) supervise_tell(s, true, NULL, "the post-mortem was not written: %s", error.text);
    return good ? path : "";
}

// ------------------------------------------------------------------------------------------------
// 6. Main

// Ends every process that the command has left; false if one does not end.
static bool supervise_end_all(Supervisor* s) {
    double began = now_ms(), passed = 0;
    int number = SIGTERM;
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].end >= 0) close(s->views[i].end);
    s->view_count = 0;
    if (s->heartbeats) munmap(s->heartbeats, sizeof *s->heartbeats), close(s->heartbeats_lock);
    s->heartbeats = NULL;
    unlink(s->heartbeats_path);
    guard_end(&s->guard);
    while (processes_signal(s->child, number) > 0) {
        if (passed > SUPERVISE_TERM_MS + SUPERVISE_KILL_MS) return false;
        supervise_poll(s, SUPERVISE_SWEEP_MS);
        passed = now_ms() - began;
        number = passed > SUPERVISE_TERM_MS ? SIGKILL : SIGTERM;
    }
    for (Relay* r = s->relays; r < s->relays + 2; r++) {  // their last output
        while (relay_move(r, &s->tail)) relay_drain(r);
        relay_close(r);
    }
    return true;
}

// Reports the signal that was received while the command ran, now that a slow disk delays nothing.
static void supervise_tell_signal(Supervisor* s) {
    if (s->signal) supervise_tell(s, false, "signal", "signal %d (%s)", s->signal, strsignal(s->signal));
    s->signal = 0;
}

// Starts fewer ranks next time, if the flags allow it and a word of the command gives their number.
static void supervise_lower_ranks(Supervisor* s) {
    size_t ranks = 0;
    char* digits = command_ranks(&ranks, s->words, s->world);
    size_t fewer = digits ? command_fewer_ranks(s->words, ranks, s->min_ranks) : 0;
    if (fewer == 0) {
        supervise_tell(s, true, NULL, "a rank seems to be lost, but %s: the next start has the same number of ranks",
                       digits ? "no smaller number of ranks that --min-ranks allows divides the batch"
                              : "nothing in the command gives the number of ranks (--ranks N, -np N, -n N)");
        return;
    }
    snprintf(digits, strlen(digits) + 1, "%zu", fewer);
    s->losses = s->failures = 0;  // another number of ranks is another attempt
    supervise_tell(s, true, "fewer ranks", "%zu ranks failed twice without progress, as if one were lost: now %zu",
                   ranks, fewer);
}

static int supervise_give_up(Supervisor* s, const char* why) {
    supervise_tell(s, true, "gave up", "gave up: %s; best step %llu, %zu starts; see %.600s/failures", why,
                   (unsigned long long)s->best_step, s->starts, s->out);
    return 1;
}

// After a failure that another start may mend: pauses. Returns the exit code, or -1 to start again.
static int supervise_retry(Supervisor* s, bool lost) {
    char why[64];
    s->failures = s->progress ? 0 : s->failures + 1;
    s->losses = s->progress || !lost ? 0 : s->losses + 1;
    if (s->min_ranks > 0 && s->losses >= 2) supervise_lower_ranks(s);
    snprintf(why, sizeof why, "%zu consecutive failures without progress", s->failures);
    if (s->failures >= s->max_restarts) return supervise_give_up(s, why);
    double pause_ms = fmin(ldexp(SUPERVISE_PAUSE_MS, (int)s->failures - 1), SUPERVISE_PAUSE_MAX_MS);
    if (s->progress) pause_ms = 0;
    supervise_tell(s, false, "restart", "after %.1f s; %s", 1e-3 * pause_ms, why);
    double until = now_ms() + pause_ms;
    while (!s->stopping && now_ms() < until) supervise_poll(s, until - now_ms());
    supervise_tell_signal(s);
    return s->stopping ? EXIT_SAVED : -1;
}

// One start of the command, to the end of all its processes. Returns the exit code, or -1 to start again.
static int supervise_run(Supervisor* s) {
    Failure f = {0};
    JsonWriter w;
    bool good = supervise_start(&f, s) && supervise_watch(&f, s);
    int code = status_code(s->status);
    if (!good) {
        failure_add_gpu(&f, s);
        failure_begin(&w, &f, s);
        supervise_signal_ranks(s, SIGKILL);  // they can save nothing without the others
    }
    bool all_ended = supervise_end_all(s);
    supervise_tell_signal(s);
    if (good) {
        supervise_tell(s, code != 0, code == 0 ? "done" : "stopped", "the command %s%s", status_text(s->status),
                       code == EXIT_SAVED ? ": the run is saved; the same command continues it" : "");
        if (!all_ended) supervise_tell(s, true, NULL, "some of its processes did not end, even after SIGKILL");
        return code;
    }
    if (s->starts == 1 && strcmp(f.kind, "start") == 0) {  // another start would fail too
        json_writer_free(&w);
        supervise_tell(s, true, NULL, "%s", f.what);
        return 2;
    }
    const char* path = failure_end(&w, s);
    supervise_tell(s, true, "failure", "%s%s%s", f.what, path[0] ? "; see " : "", path);
    if (!all_ended) return supervise_give_up(s, "some processes did not end, even after SIGKILL; restart the machine");
    if (code == 2) return 2;
    if (strcmp(f.kind, "late") == 0) return 1;
    return s->stopping ? EXIT_SAVED : supervise_retry(s, f.lost);  // stopping: by a signal while nothing ran
}

// Checks that there is a command that can be supervised, and finds out where its events go.
static bool supervise_check(Supervisor* s, Error* error) {
    if (s->words[0] == NULL)
        return fail_with(error, "there is no command to run; give it after --, as in: ./supervise -- ./train ...");
    if (command_is_trainer(s->words) && !command_resumes(s->words))
        return fail_with(error, "the command has no --resume, so every start would begin at step 0; add --resume");
    if (s->out == NULL) s->out = command_find(s->words, "--out");
    if (s->out == NULL || s->out[0] == 0)
        return fail_with(error, "neither the supervisor nor the command has --out; give the directory of the run");
    return strlen(s->out) <= 3900 || fail_with(error, "--out is longer than 3900 characters; give a shorter path");
}

// Blocks the signals that are read, and remembers the previous mask and actions for the command.
static void supervise_take_signals(Supervisor* s) {
    sigemptyset(&s->mask);
    for (int i = 0; i < SIGNALS_READ; i++) sigaddset(&s->mask, SIGNALS[i]);
    sigprocmask(SIG_BLOCK, &s->mask, &s->mask_before);
    for (int i = 0; i < SIGNALS_COUNT; i++) {
        struct sigaction action = {.sa_handler = i < SIGNALS_READ ? signal_came : SIG_IGN};
        sigaction(SIGNALS[i], &action, &s->actions_before[i]);
    }
}

// Prepares the first start.
static bool supervise_open(Supervisor* s, Error* error) {
    supervise_take_signals(s);
    if (!directory_make(s->out, error)) return false;
    if (access(s->out, W_OK) != 0) return fail_file(error, "write to", s->out);
    int lock = open(s->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // held until the process ends
    if (lock < 0) return fail_file(error, "open the directory", s->out);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail_with(error, "another supervisor watches %.600s; end it first, or give another --out", s->out);
    return (pipe_open(signal_pipe) && process_adopt_orphans()) ||
           fail_with(error, "cannot watch processes: %s; raise the limit on open files (ulimit -n)", strerror(errno));
}

int main(int argc, char** argv) {
    static Supervisor supervisor;
    Supervisor* s = &supervisor;
    const Flag rows[] = {
        FLAG_COUNT("max-restarts", &s->max_restarts, 5, 1, 1e6, 0,
                   "give up after N consecutive failures that reached no new step"),
        FLAG_ROW("timeout", KIND_REAL, &s->limits[HEARTBEAT_STEP], 600, "S", 0, 1e9, 0,
                 "restart after S seconds without a heartbeat in a training step or a collective; 0: no limit"),
        FLAG_ROW("setup-timeout", KIND_REAL, &s->limits[HEARTBEAT_SETUP], 1800, "S", 0, 1e9, 0,
                 "restart after S seconds without a heartbeat between the start and the first step; 0: no limit"),
        FLAG_ROW("checkpoint-timeout", KIND_REAL, &s->limits[HEARTBEAT_PAUSE], 1800, "S", 0, 1e9, 0,
                 "restart after S seconds without a heartbeat in a save, validation or sample; after a signal, kill "
                 "COMMAND S seconds later; 0: no limit"),
        FLAG_COUNT("min-ranks", &s->min_ranks, 0, 0, 65536, 0,
                   "start fewer ranks, but at least N, when a rank seems to be lost twice without progress; 0: never"),
        FLAG_TEXT("out", &s->out, NULL, "DIR", 0,
                  "directory for events.jsonl and failures/; default: the --out of COMMAND"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    const char* title = "supervise [FLAGS] -- COMMAND...: runs COMMAND, which is ./train with --resume, alone or\n"
                        "under a launcher (mpirun, srun), and restarts it when it dies or hangs.\n";
    Error error;
    int code, dashes = 1;
    files_open_standard();
    while (dashes < argc && strcmp(argv[dashes], "--") != 0) dashes++;
    if (!flags_begin(&code, "supervise", title, &flags, dashes, argv)) return code;
    s->limits[HEARTBEAT_COLLECTIVE] = s->limits[HEARTBEAT_DONE] = s->limits[HEARTBEAT_STEP];
    s->words = argv + (dashes < argc ? dashes + 1 : argc);
    for (int i = 0; i < 2; i++) {
        int to = relay_open(i == 0 ? STDOUT_FILENO : STDERR_FILENO);
        s->relays[i] = (Relay){.from = -1, .to = to, .last = '\n'};
    }
    code = !supervise_check(s, &error) ? 2 : !supervise_open(s, &error) ? 1 : -1;
    if (code > 0) relay_say(&s->relays[1], error.text);
    while (code < 0) code = supervise_run(s);
    return code;
}
