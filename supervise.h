// supervise.h: who watches a run, and starts it again when it dies or hangs.
//
//   1. heartbeats  what each rank tells of itself, through shared memory: beat_open, beat, beat_close
//   2. events      what happens to a run, a line each in events.jsonl: event_write
//   3. processes   what /proc knows of them, and their end
//   4. output      of the command, passed on unchanged; its last lines are kept
//   5. command     what its words say: the trainer or not, the number of ranks
//   6. start       in a session of its own
//   7. watch       until it ends, dies or hangs
//   8. post-mortem failures/failure_0001.json
//   9. use         supervise_main: ./train supervise [FLAGS] -- COMMAND...
//
// COMMAND is the trainer with --resume, or a launcher (mpirun, srun) with it. When it or one of its ranks dies, or the
// heartbeat of a rank stands still for longer than its phase may, a post-mortem is written, all that is left of it is
// ended, and it is started again; the trainer's own --resume finds the newest good checkpoint.
//
// The supervisor watches the ranks of its own machine. Those of others do not beat; what becomes of them is for the
// launcher and for the trainer's --timeout to find out, which end the command. COMMAND must end when the trainer does,
// with its exit code.
//
// The exit code is that of COMMAND where it is 0 (done), 2 (wrong flags) or 75 (saved after a signal, to be continued),
// or where a signal to the supervisor was passed on to it; otherwise 1: gave up. All limits are of the monotonic clock.

#ifndef LLMTRAIN_SUPERVISE_H
#define LLMTRAIN_SUPERVISE_H

#include "files.h"
#include "flags.h"
#include "json.h"

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

#define SUPERVISE_SAVED 75  // exit code: stopped by a signal, and to be continued (EX_TEMPFAIL of sysexits.h)

// ------------------------------------------------------------------------------------------------
// 1. Heartbeats
//
// Each rank maps the file that the supervisor names in LLMTRAIN_HEARTBEATS, takes a place in it, and writes there what
// it is at. That takes no system call. Without a supervisor nothing happens. One thread of a rank beats.
//
// The file lies in /dev/shm, so that no disk can make a beat wait, and ranks of other machines do not find it; in /tmp
// where there is no room in /dev/shm.

#define BEAT_VARIABLE "LLMTRAIN_HEARTBEATS"

// Each has a time limit of its own. DONE: there is only tidying up to be done.
typedef enum { BEAT_SETUP, BEAT_STEP, BEAT_COLLECTIVE, BEAT_CHECKPOINT, BEAT_DONE, BEAT_PHASES } BeatPhase;
#define BEAT_PHASE_NAMES "setup|step|collective|checkpoint|done"

typedef struct {
    uint64_t counter;     // moves with every beat; odd while the rest is being written
    uint64_t ms;          // time of the beat, as now_ms tells it
    uint64_t pid, rank;
    uint64_t world;       // how many ranks beat here, 0 if that is not known
    uint64_t phase, step;
    uint64_t closed;      // the process ends of its own accord, well or badly; one that is killed leaves 0
    char collective[32];  // the last one that was named
} Heartbeat;

#define BEAT_RANKS 1024   // of one machine; more are not watched

typedef struct {
    uint64_t count;       // of the ranks that have come
    Heartbeat ranks[BEAT_RANKS];
} Heartbeats;

// That of this process; NULL without a supervisor.
static inline Heartbeat** beat_state(void) {
    static Heartbeat* mapped;
    return &mapped;
}

static inline void beat_write(Heartbeat* h, uint64_t phase, uint64_t step, const char* collective, bool closed) {
    uint64_t counter = h->counter;
    __atomic_store_n(&h->counter, counter + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    h->ms = (uint64_t)now_ms();
    h->phase = phase;
    h->step = step;
    h->closed = closed;
    if (collective) {
        size_t bytes = min_size(strlen(collective), sizeof h->collective - 1);
        memcpy(h->collective, collective, bytes);
        memset(h->collective + bytes, 0, sizeof h->collective - bytes);
    }
    __atomic_store_n(&h->counter, counter + 2, __ATOMIC_RELEASE);
}

// What the rank begins now. Steps count from 1.
static inline void beat(BeatPhase phase, uint64_t step) {
    Heartbeat* h = *beat_state();
    if (h) beat_write(h, (uint64_t)phase, step, NULL, false);
}

// A collective begins, in the step of the last beat.
static inline void beat_collective(const char* name) {
    Heartbeat* h = *beat_state();
    if (h) beat_write(h, BEAT_COLLECTIVE, h->step, name, false);
}

// The process ends of its own accord. exit(), and so a return from main, does this by itself.
static inline void beat_close(void) {
    Heartbeat* h = *beat_state();
    if (h == NULL || h->pid != (uint64_t)getpid()) return;  // a fork's end is not the rank's
    beat_write(h, h->phase, h->step, NULL, true);
    *beat_state() = NULL;
}

// path: getenv(BEAT_VARIABLE); if it is NULL, or is none of this machine, nothing happens, ever. world: how many ranks
// beat there, if all are on this machine; otherwise 0.
static inline bool beat_open(const char* path, size_t rank, size_t world, Error* error) {
    if (path == NULL || *beat_state()) return true;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return true;
    void* memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(Heartbeats), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return fail_file(error, "map the heartbeats in", path);
    close(file);
    Heartbeats* beats = (Heartbeats*)memory;
    uint64_t place = __atomic_fetch_add(&beats->count, 1, __ATOMIC_RELAXED);
    if (place >= BEAT_RANKS) return true;
    Heartbeat* h = &beats->ranks[place];
    h->pid = (uint64_t)getpid();
    h->rank = rank;
    h->world = world;
    beat_write(h, BEAT_SETUP, 0, NULL, false);
    *beat_state() = h;
    atexit(beat_close);
    return true;
}

// For the supervisor: a new file in place of the old one, if any; NULL after a failure.
static inline Heartbeats* beats_make(const char* path, Error* error) {
    unlink(path);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    void* memory = MAP_FAILED;
    if (file >= 0) errno = posix_fallocate(file, 0, sizeof(Heartbeats));  // so that there is memory behind every beat
    if (file >= 0 && errno == 0) memory = mmap(NULL, sizeof(Heartbeats), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) fail_file(error, "make the heartbeats in", path);
    if (file >= 0) close(file);
    return memory == MAP_FAILED ? NULL : (Heartbeats*)memory;
}

// A beat in whose middle the rank was stopped or killed is read as it stands; its counter is odd.
static inline Heartbeat beat_read(const Heartbeat* h) {
    Heartbeat copy;
    bool whole = false;
    for (int attempt = 0; attempt < 100 && !whole; attempt++) {
        uint64_t before = __atomic_load_n(&h->counter, __ATOMIC_ACQUIRE);
        memcpy(&copy, h, sizeof copy);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        whole = before % 2 == 0 && __atomic_load_n(&h->counter, __ATOMIC_RELAXED) == before;
    }
    copy.counter |= !whole;
    copy.collective[sizeof copy.collective - 1] = 0;
    if (copy.phase >= BEAT_PHASES) copy.phase = BEAT_DONE;
    return copy;
}

// ------------------------------------------------------------------------------------------------
// 2. Events

// The calendar's time, for people.
static inline void time_utc(char text[64]) {
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t bytes = strftime(text, 32, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + bytes, 64 - bytes, ".%03dZ", (int)(now.tv_nsec / 1000000));
}

// Appends a line to events.jsonl, in one write: several processes may do so at once. A line that a full disk has cut
// stays alone.
static inline bool event_write(const char* directory, const char* event, uint64_t step, const char* detail,
                               Error* error) {
    char path[FILE_PATH_MAX + 32], time_text[64], last = '\n';
    JsonWriter w;
    snprintf(path, sizeof path, "%.*s/events.jsonl", (int)FILE_PATH_MAX, directory);
    int file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) return fail_file(error, "open", path);
    off_t end = lseek(file, 0, SEEK_END);
    bool cut = end > 0 && pread(file, &last, 1, end - 1) == 1 && last != '\n';
    time_utc(time_text);
    memset(&w, 0, sizeof w);
    if (cut) json_put(&w, "\n", 1);
    json_write_begin(&w, '{');
    json_member_string(&w, "time", time_text);
    json_member_string(&w, "event", event);
    json_member_u64(&w, "step", step);
    json_member_string(&w, "detail", detail);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool good = json_write_done(&w, error);
    errno = ENOSPC;  // what it means if less is written, without an error
    if (good && write(file, w.text, w.bytes) != (ssize_t)w.bytes) good = fail_file(error, "write", path);
    json_writer_free(&w);
    close(file);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 3. Processes

typedef struct {
    int parent, session;
    char state;  // R, S, D, T (stopped), Z (has ended), ...
    int status;  // of one that has ended, as waitpid tells it
} Process;

// False if there is none of that number.
static inline bool process_read(Process* p, pid_t pid) {
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[bytes > 0 ? bytes : 0] = 0;
    const char* at = strrchr(text, ')');  // the end of field 2 of proc(5), the name, which can hold anything
    if (at == NULL || sscanf(at, ") %c %d %*d %d", &p->state, &p->parent, &p->session) != 3) return false;
    for (int field = 2; at && field < 52; field++) at = strchr(at + 1, ' ');
    p->status = at ? atoi(at) : 0;
    return true;
}

// Sends a signal (0: none) to our children that have left our session; returns how many there are. Since what loses its
// parent becomes our child (PR_SET_CHILD_SUBREAPER), there is one as long as anything is left of the command.
static inline size_t processes_signal(int number) {
    DIR* directory = opendir("/proc");
    size_t count = 0;
    Process p;
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;) {
        pid_t pid = (pid_t)atoi(entry->d_name);  // 0: what is no process
        if (pid == 0 || !process_read(&p, pid) || p.parent != getpid() || p.session == getsid(0)) continue;
        if (number) kill(pid, number);
        count++;
    }
    if (directory) closedir(directory);
    return count;
}

// ------------------------------------------------------------------------------------------------
// 4. Output
//
// What the command writes goes from its pipes to our own output, as far as that takes it without waiting. A reader that
// is slow slows the command; for one that takes nothing at all output is dropped, and that is said where it is missing.

#define RELAY_CHUNK ((size_t)4096)  // what a pipe takes without waiting, when poll says that it takes something
#define RELAY_CHUNKS 64             // in a row, before something else has its turn
#define RELAY_PIPE (1 << 20)        // bytes that the command can be ahead of the reader
#define RELAY_STUCK_MS 5e3          // for a reader to take something
#define RELAY_PAUSE_MS 20           // between two attempts to write to who does not take what he said
#define TAIL_BYTES ((size_t)16 << 10)
#define TAIL_LINES 20

// The end of all that was written.
typedef struct {
    char text[2 * TAIL_BYTES];
    size_t bytes;
    int from;  // who wrote the last piece
} Tail;

typedef struct {
    int from, to;      // from is -1 when nobody writes there any more
    bool waits;        // there is something, but `to` does not take it
    double moved_ms;   // when something was taken, or there was nothing
    uint64_t dropped;  // bytes since then
    char last;         // byte that was written
} Relay;

static inline void tail_put(Tail* t, const char* text, size_t bytes, int from) {
    size_t kept = min_size(bytes, TAIL_BYTES - 1);
    if (t->bytes + kept + 1 > sizeof t->text) {
        memmove(t->text, t->text + t->bytes - TAIL_BYTES, TAIL_BYTES);
        t->bytes = TAIL_BYTES;
    }
    if (t->from != from && t->bytes > 0 && t->text[t->bytes - 1] != '\n') t->text[t->bytes++] = '\n';
    memcpy(t->text + t->bytes, text + bytes - kept, kept);
    t->bytes += kept;
    t->from = from;
}

// The last lines, as an array of strings.
static inline void tail_write(JsonWriter* w, const Tail* t) {
    char line[sizeof t->text + 1];
    size_t first = t->bytes - (t->bytes > 0 && t->text[t->bytes - 1] == '\n');
    for (int lines = 0; first > 0; first--)
        if (t->text[first - 1] == '\n' && ++lines == TAIL_LINES) break;
    json_write_begin(w, '[');
    while (first < t->bytes) {
        const char* newline = (const char*)memchr(t->text + first, '\n', t->bytes - first);
        size_t bytes = (newline ? (size_t)(newline - t->text) : t->bytes) - first;
        memcpy(line, t->text + first, bytes);
        line[bytes] = 0;
        for (size_t i = 0; i < bytes; i++) if (line[i] == 0) line[i] = ' ';
        json_write_string(w, line);
        first += bytes + 1;
    }
    json_write_end(w, ']');
}

static inline struct pollfd polled_for(int file, short events) {
    struct pollfd polled = {file, events, 0};
    return polled;
}

// Returns how many bytes were not taken: all if nobody reads any more, or the disk is full.
static inline size_t relay_write(Relay* r, const char* text, size_t bytes) {
    struct pollfd end = polled_for(r->to, POLLOUT);
    double until = now_ms() + RELAY_STUCK_MS;  // a terminal can say that it takes something and take nothing
    r->last = text[bytes - 1];
    while (bytes > 0 && now_ms() < until && poll(&end, 1, r->dropped ? 0 : (int)RELAY_STUCK_MS) > 0) {
        ssize_t n = write(r->to, text, min_size(bytes, RELAY_CHUNK));
        if (n < 0 && errno != EAGAIN) break;
        text += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
        if (n < 0 && r->dropped) break;
        if (n < 0) poll(NULL, 0, RELAY_PAUSE_MS);
    }
    r->moved_ms = now_ms();
    return bytes;
}

// A terminal takes a part of what is written, and then makes the writer wait, unless it was opened not to: once more,
// since what we were given is that of others too. Where it cannot be opened, as it is.
static inline int relay_open(int file) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int own = isatty(file) ? open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    return own >= 0 ? own : file;
}

// What is missing before it is said first.
static inline void relay_put(Relay* r, const char* text, size_t bytes) {
    char note[128];
    if (r->dropped) {
        snprintf(note, sizeof note, "%ssupervise: %llu bytes of output are missing here: nobody took them\n",
                 r->last == '\n' ? "" : "\n", (unsigned long long)r->dropped);
        if (relay_write(r, note, strlen(note)) == 0) r->dropped = 0;
    }
    r->dropped += r->dropped ? bytes : relay_write(r, text, bytes);
}

// A sentence of the supervisor's own, on a line of its own.
static inline void relay_say(Relay* r, const char* sentence) {
    char text[2200];
    snprintf(text, sizeof text, "%ssupervise: %s\n", r->last == '\n' ? "" : "\n", sentence);
    relay_put(r, text, strlen(text));
}

static inline void relay_close(Relay* r) {
    if (r->from >= 0) close(r->from);
    r->from = -1;
}

// False when there is nothing left to move, for now.
static inline bool relay_move(Relay* r, Tail* tail) {
    char chunk[RELAY_CHUNK];
    for (int i = 0; i < RELAY_CHUNKS && r->from >= 0; i++) {
        struct pollfd ends[2] = {polled_for(r->from, POLLIN), polled_for(r->to, POLLOUT)};
        poll(ends, 2, 0);
        bool there = ends[0].revents != 0, takes = ends[1].revents != 0;
        if (!there) r->moved_ms = now_ms();
        r->waits = there && !takes && !r->dropped && now_ms() - r->moved_ms < RELAY_STUCK_MS;
        if (!there || r->waits) return there;
        ssize_t n = read(r->from, chunk, sizeof chunk);
        if (n > 0) tail_put(tail, chunk, (size_t)n, r->to);
        if (n > 0 && takes) relay_put(r, chunk, (size_t)n);
        else if (n > 0) r->dropped += (size_t)n;
        else relay_close(r);
    }
    return r->from >= 0;
}

// ------------------------------------------------------------------------------------------------
// 5. Command

#define COMMAND_NONE SIZE_MAX

// The last word with the value of a flag, which stands after it or behind its '='; COMMAND_NONE if there is none.
static inline size_t command_find(const char** value, char* const* words, size_t count, const char* flag) {
    size_t length = strlen(flag);
    for (size_t i = count; i-- > 0;) {
        bool joined = strncmp(words[i], flag, length) == 0 && words[i][length] == '=';
        *value = words[i] + (joined ? length + 1 : 0);
        if (joined || (i > 0 && strcmp(words[i - 1], flag) == 0)) return i;
    }
    *value = NULL;
    return COMMAND_NONE;
}

static inline uint64_t command_number(const char* text) {
    uint64_t number = 0;
    return text && json_digits(&number, text, strlen(text), (uint64_t)1 << 32) ? number : 0;
}

// Whether a word is the trainer's program: train, or train-FP32 and its like.
static inline bool command_is_trainer(char* const* words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char *slash = strrchr(words[i], '/'), *name = slash ? slash + 1 : words[i];
        bool named = strcmp(name, "train") == 0 || strncmp(name, "train-", 6) == 0;
        if (named && (i == 0 || (access(words[i], X_OK) == 0 && !directory_exists(words[i])))) return true;
    }
    return false;
}

static inline bool command_resumes(char* const* words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(words[i], "--resume=on") == 0) return true;
        if (strcmp(words[i], "--resume") == 0) return i + 1 == count || strcmp(words[i + 1], "off") != 0;
    }
    return false;
}

// The word that says how many ranks there are, as "4" or as "--ranks=4", and that number; COMMAND_NONE if there is
// none. Of several (nice -n 10 mpirun -n 4 ...) the last that says what the ranks say: world, or 0.
static inline size_t command_ranks(size_t* ranks, char* const* words, size_t count, size_t world) {
    static const char* const flags[] = {"--ranks", "-np", "--np", "-n"};
    const char* text;
    for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
        for (size_t at = count; (at = command_find(&text, words, at, flags[f])) != COMMAND_NONE;) {
            size_t number = command_number(text);
            if (number == 0 || (world > 0 && number != world)) continue;
            *ranks = number;
            return at;
        }
    }
    return COMMAND_NONE;
}

// The largest number of ranks below `ranks` that the next start can have, 0 if there is none. The batch of a step must
// divide among them.
static inline size_t command_fewer_ranks(char* const* words, size_t count, size_t ranks, size_t least) {
    const char *total, *batch, *seq;
    command_find(&total, words, count, "--total-batch");
    command_find(&batch, words, count, "--batch");
    command_find(&seq, words, count, "--seq");
    uint64_t micro = command_number(batch) * command_number(seq), fewer = ranks - 1;
    while (fewer > 0 && micro && total && command_number(total) / micro % fewer != 0) fewer--;
    return fewer >= least ? fewer : 0;
}

// The words in one line, for people.
static inline void command_text(char* text, size_t size, char* const* words, size_t count) {
    size_t at = 0;
    text[0] = 0;
    for (size_t i = 0; i < count && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%s", i ? " " : "", words[i]);
}

// ------------------------------------------------------------------------------------------------
// 6. Start

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
    bool gone;         // it has ended
    double gone_ms;    // when that was seen
    int status;        // of one that has ended, as waitpid tells it; 0: not known, or all is well
} RankView;

typedef struct {
    // flags
    uint64_t max_failures, least_ranks;
    double timeout, setup_timeout, checkpoint_timeout;  // seconds; 0: no limit
    const char* out;
    // command
    char** words;          // (word_count + 1) ends in NULL
    size_t word_count;
    char ranks_word[32];   // stands among the words when the number of ranks was lowered
    // this process
    char beats_path[64];
    int signals;           // a signalfd
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
    int status;            // as waitpid tells it
    bool progress;         // some rank was beyond best_step
    Heartbeats* beats;     // mapped
    RankView views[BEAT_RANKS];  // in the order in which the ranks came
    size_t view_count;
    size_t world;          // as the ranks say; 0: not known
    double started_ms, looked_ms;
    double age_ms, ranks_ms;  // since the start, and since the first rank came, while we were awake
} Supervisor;

// Tells people, on standard error, if it is said aloud, and events.jsonl, if it is an event.
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline void supervise_tell(Supervisor* s, bool aloud, const char* event, const char* format, ...) {
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

static inline void supervise_forget_ranks(Supervisor* s) {
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].end >= 0) close(s->views[i].end);
    if (s->beats) munmap(s->beats, sizeof *s->beats);
    s->beats = NULL;
    s->view_count = 0;
}

// In the child: becomes the command, or tells why it cannot.
static inline void supervise_become(Supervisor* s, pid_t parent, int out, int err, int tell) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // without a supervisor it saves and stops
    if (getppid() != parent) _exit(1);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bool good = setsid() >= 0 && null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
                dup2(err, STDERR_FILENO) >= 0 && sigprocmask(SIG_SETMASK, &s->mask_before, NULL) == 0;
    signal(SIGPIPE, s->pipe_before);
    if (good) execvp(s->words[0], s->words);
    int reason = errno;
    _exit(write(tell, &reason, sizeof reason) == sizeof reason ? 127 : 126);
}

// Starts the command. Returns -1, or the code to exit with.
static inline int supervise_start(Supervisor* s) {
    int pipes[3][2], reason;  // standard output, standard error, and one that closes when the command has begun
    char text[1024];
    Error error;
    s->tail.bytes = s->world = 0;
    s->ended = s->progress = false;
    s->beats = beats_make(s->beats_path, &error);
    if (s->beats == NULL) supervise_tell(s, true, NULL, "%s", error.text);
    if (s->beats == NULL) return 1;
    bool made = true;
    for (int i = 0; i < 3; i++) made = made && pipe2(pipes[i], O_CLOEXEC) == 0;
    pid_t parent = getpid();
    s->child = made ? fork() : -1;
    if (s->child == 0) supervise_become(s, parent, pipes[0][1], pipes[1][1], pipes[2][1]);
    if (s->child < 0) {
        supervise_tell(s, true, NULL, "cannot start %.600s: %s; raise the limits on processes (ulimit -u, -n)",
                       s->words[0], strerror(errno));
        return 1;
    }
    for (int i = 0; i < 3; i++) close(pipes[i][1]);
    if (read(pipes[2][0], &reason, sizeof reason) != 0) {
        supervise_tell(s, true, NULL, "cannot start %.600s: %s; check the command after --", s->words[0],
                       strerror(reason));
        waitpid(s->child, NULL, 0);
        return 2;
    }
    close(pipes[2][0]);
    for (int i = 0; i < 2; i++) {
        fcntl(pipes[i][0], F_SETPIPE_SZ, RELAY_PIPE);  // it may be less, where users share a limit
        s->relays[i].from = pipes[i][0];
    }
    s->starts++;
    s->started_ms = s->looked_ms = now_ms();
    s->age_ms = s->ranks_ms = 0;
    command_text(text, sizeof text, s->words, s->word_count);
    supervise_tell(s, false, "start", "start %zu, process %ld: %s", s->starts, (long)s->child, text);
    return -1;
}

// ------------------------------------------------------------------------------------------------
// 7. Watch

// What has failed.
typedef struct {
    const char* kind;  // "exit", "signal", "lost rank", "absent rank", "hang", "late"
    size_t rank;       // to blame: its place in views, or COMMAND_NONE
    bool lost;         // looks as if there were a rank less now
    char what[1024];   // a sentence
} Failure;

static inline double supervise_limit_ms(const Supervisor* s, uint64_t phase) {
    double seconds = s->timeout;
    if (phase == BEAT_SETUP) seconds = s->setup_timeout;
    if (phase == BEAT_CHECKPOINT) seconds = s->checkpoint_timeout;
    return seconds > 0 ? 1e3 * seconds : (double)INFINITY;
}

// Passes a signal on to the ranks, since not every launcher does: mpirun ends them a second after a SIGTERM. Where none
// is known, to the command.
static inline void supervise_pass_on(const Supervisor* s, int number) {
    bool told = false;
    if (s->child == 0 || s->ended) return;
    for (size_t i = 0; i < s->view_count; i++)
        if (!s->views[i].gone) told = kill((pid_t)s->views[i].seen.pid, number) == 0 || told;
    if (!told) kill(-s->child, number);
}

static inline void rank_is_gone(RankView* view, double now, int status) {
    view->gone = true;
    view->gone_ms = now;
    view->status = status;
    if (view->end >= 0) close(view->end);
    view->end = -1;
}

// Signals and output, for at most that long; less if something happens. True if a rank has ended.
static inline bool supervise_poll(Supervisor* s, double ms) {
    struct signalfd_siginfo info;
    struct pollfd polled[3 + BEAT_RANKS];  // signals, both relays, ranks
    nfds_t count = 0;
    bool rank_ended = false;
    pid_t pid;
    int status;
    polled[count++] = polled_for(s->signals, POLLIN);
    for (int i = 0; i < 2; i++) {
        const Relay* r = &s->relays[i];
        polled[count++] = r->waits ? polled_for(r->to, POLLOUT) : polled_for(r->from, POLLIN);
    }
    for (size_t i = 0; i < s->view_count; i++) polled[count++] = polled_for(s->views[i].end, POLLIN);
    poll(polled, count, (int)ceil(fmax(ms, 0)));
    for (nfds_t i = 3; i < count; i++) rank_ended |= polled[i].revents != 0;
    while (read(s->signals, &info, sizeof info) == sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGCHLD) continue;
        if (!s->stopping) s->stop_by_ms = now_ms() + supervise_limit_ms(s, BEAT_CHECKPOINT);
        s->stopping = true;
        supervise_tell(s, false, "signal", "signal %d (%s)", number, strsignal(number));
        supervise_pass_on(s, number == SIGHUP ? SIGTERM : number);  // SIGHUP: the terminal is gone
    }
    for (int i = 0; i < 2; i++) relay_move(&s->relays[i], &s->tail);
    double now = now_ms();
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (size_t i = 0; i < s->view_count; i++)  // a rank whose parent ended before we had looked
            if (s->views[i].seen.pid == (uint64_t)pid && !s->views[i].gone) rank_is_gone(&s->views[i], now, status);
        if (pid != s->child || s->ended) continue;
        s->ended = true;
        s->status = status;
    }
    return rank_ended;
}

// Looks at every rank.
static inline void supervise_look(Supervisor* s) {
    double now = now_ms(), passed = fmin(now - s->looked_ms, SUPERVISE_LOOK_MOST_MS);
    s->looked_ms = now;
    s->age_ms += passed;
    const Heartbeat* beats = s->beats->ranks;
    while (s->view_count < BEAT_RANKS && __atomic_load_n(&beats[s->view_count].counter, __ATOMIC_ACQUIRE) > 1) {
        RankView* view = &s->views[s->view_count];  // has come since
        memset(view, 0, sizeof *view);
        view->still_ms = -passed;
        view->seen = beat_read(&beats[s->view_count++]);
        bool watched = s->view_count <= SUPERVISE_WATCHED;  // of the others an end is seen at the next look
        view->end = watched ? (int)syscall(SYS_pidfd_open, (pid_t)view->seen.pid, 0) : -1;
        s->world = (size_t)view->seen.world;
    }
    if (s->view_count > 0) s->ranks_ms += passed;
    for (size_t i = 0; i < s->view_count; i++) {
        RankView* view = &s->views[i];
        Process p;
        bool there = !view->gone && process_read(&p, (pid_t)view->seen.pid);
        if (there) view->state = p.state;
        if (!view->gone && (!there || p.state == 'Z' || p.state == 'X')) rank_is_gone(view, now, there ? p.status : 0);
        Heartbeat h = beat_read(&beats[i]);  // after the process, so that the last word of one that is gone is read
        view->still_ms = h.counter == view->seen.counter ? view->still_ms + passed : 0;
        view->seen = h;
        if (h.phase == BEAT_SETUP || h.step <= s->best_step) continue;
        s->best_step = h.step;
        s->progress = true;
    }
}

// Continues the sentence.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline void failure_add(Failure* f, const char* format, ...) {
    size_t bytes = strlen(f->what);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->what + bytes, sizeof f->what - bytes, format, arguments);
    va_end(arguments);
}

// "rank 1 (process 77) HAS in phase collective, step 31, in reduce_scatter".
static inline void failure_add_rank(Failure* f, const RankView* view, const char* has) {
    const Heartbeat* h = &view->seen;
    char phase[16];
    choice_name(BEAT_PHASE_NAMES, (int)h->phase, phase, sizeof phase);
    unsigned long long rank = h->rank, pid = h->pid, step = h->step;
    failure_add(f, "rank %llu (process %llu) %s in phase %s", rank, pid, has, phase);
    if (step > 0) failure_add(f, ", step %llu", step);
    if (h->phase == BEAT_COLLECTIVE && h->collective[0]) failure_add(f, ", in %s", h->collective);
}

// "was ended by signal 9 (Killed)".
static inline void status_text(char* text, size_t size, int status) {
    int number = WTERMSIG(status);
    if (WIFSIGNALED(status)) snprintf(text, size, "was ended by signal %d (%s)", number, strsignal(number));
    else snprintf(text, size, "ended with exit code %d", WEXITSTATUS(status));
}

// The rank that was killed first: it is gone without having closed its heartbeat. Of several at once it is the one that
// beat last the longest ago.
static inline size_t supervise_first_lost(const Supervisor* s) {
    size_t first = COMMAND_NONE;
    for (size_t i = 0; i < s->view_count; i++) {
        const RankView *view = &s->views[i], *best = &s->views[first == COMMAND_NONE ? i : first];
        if (!view->gone || view->seen.closed) continue;
        bool together = view->gone_ms == best->gone_ms;
        bool earlier = together ? view->seen.ms < best->seen.ms : view->gone_ms < best->gone_ms;
        if (first == COMMAND_NONE || earlier) first = i;
    }
    return first;
}

// The rank that gave up first.
static inline size_t supervise_first_closed(const Supervisor* s) {
    size_t first = COMMAND_NONE;
    for (size_t i = 0; i < s->view_count; i++) {
        const Heartbeat* h = &s->views[i].seen;
        if (!h->closed || h->phase == BEAT_DONE) continue;
        if (first == COMMAND_NONE || h->ms < s->views[first].seen.ms) first = i;
    }
    return first;
}

// The lowest rank that never came, though others have; COMMAND_NONE if all have, or nobody knows.
static inline size_t supervise_absent(const Supervisor* s) {
    for (size_t rank = 0; s->view_count < min_size(s->world, BEAT_RANKS) && rank < s->world; rank++) {
        bool came = false;
        for (size_t i = 0; i < s->view_count; i++) came = came || s->views[i].seen.rank == rank;
        if (!came) return rank;
    }
    return COMMAND_NONE;
}

// Blames a rank that was killed.
static inline void failure_blame_lost(Failure* f, const Supervisor* s, size_t i) {
    char end[96] = "is gone without a word";
    const RankView* view = &s->views[i];
    if (view->status) status_text(end, sizeof end, view->status);
    f->rank = i;
    f->lost = f->lost || view->status == 0 || WIFSIGNALED(view->status);
    failure_add_rank(f, view, end);
}

// The command has ended, and not well.
static inline void supervise_explain_end(Failure* f, Supervisor* s) {
    char end[96];
    size_t itself = COMMAND_NONE;
    supervise_look(s);
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].seen.pid == (uint64_t)s->child) itself = i;
    if (itself != COMMAND_NONE) s->views[itself].status = s->status;
    size_t lost = supervise_first_lost(s), absent = supervise_absent(s), closed = supervise_first_closed(s);
    bool killed = WIFSIGNALED(s->status);
    // Forked ranks end with the one that is the command, and may be seen to do so a little before it.
    bool together = lost != COMMAND_NONE && now_ms() - s->views[lost].gone_ms < SUPERVISE_TOGETHER_MS;
    if (killed && itself != COMMAND_NONE && together) lost = itself;
    status_text(end, sizeof end, s->status);
    f->kind = killed ? "signal" : "exit";
    f->lost = killed || WEXITSTATUS(s->status) > 128;  // so a shell and launchers tell of a signal
    if (lost != COMMAND_NONE) {
        failure_blame_lost(f, s, lost);
        if (lost != itself) failure_add(f, "; the command %s", end);
        return;
    }
    failure_add(f, "the command %s", end);
    if (absent != COMMAND_NONE && s->ranks_ms > SUPERVISE_ABSENT_MS) {
        f->lost = true;
        failure_add(f, "; rank %zu of %zu never came", absent, s->world);
    } else if (closed != COMMAND_NONE) {
        f->rank = closed;
        failure_add(f, "; ");
        failure_add_rank(f, &s->views[closed], s->view_count > 1 ? "gave up first" : "gave up");
    }
}

static inline bool rank_is_stopped(const RankView* view) { return view->state == 'T' || view->state == 't'; }

// Whether a hang is rather a's doing than b's: a was stopped, is in an earlier step, or is not yet in the collective in
// which b waits; or it beat last the longest ago.
static inline bool rank_holds_up(const RankView* a, const RankView* b) {
    bool a_stopped = rank_is_stopped(a), b_stopped = rank_is_stopped(b);
    bool a_waits = a->seen.phase == BEAT_COLLECTIVE, b_waits = b->seen.phase == BEAT_COLLECTIVE;
    if (a_stopped != b_stopped) return a_stopped;
    if (a->seen.step != b->seen.step) return a->seen.step < b->seen.step;
    if (a_waits != b_waits) return b_waits;
    return a->still_ms > b->still_ms;
}

// A rank whose heartbeat stands still for too long: it, or the one that it waits for.
static inline bool supervise_find_hang(Failure* f, const Supervisor* s) {
    const RankView *late = NULL, *blamed = NULL;
    for (size_t i = 0; i < s->view_count; i++) {
        const RankView* view = &s->views[i];
        if (view->gone) continue;
        if (late == NULL && view->still_ms > supervise_limit_ms(s, view->seen.phase)) late = view;
        if (blamed == NULL || rank_holds_up(view, blamed)) blamed = view;
    }
    if (late == NULL) return false;
    char has[64];
    bool itself = blamed->still_ms > supervise_limit_ms(s, blamed->seen.phase);
    f->kind = "hang";
    f->rank = (size_t)(blamed - s->views);
    snprintf(has, sizeof has, "%s %.1f s ago", itself ? "stopped beating" : "beat last", 1e-3 * blamed->still_ms);
    failure_add_rank(f, blamed, has);
    if (rank_is_stopped(blamed)) failure_add(f, "; it was stopped by a signal");
    if (blamed->state == 'D') failure_add(f, "; it waits for a device or a disk");
    if (itself) return true;
    snprintf(has, sizeof has, "has not beaten for %.1f s", 1e-3 * late->still_ms);
    failure_add(f, "; ");
    failure_add_rank(f, late, has);
    return true;
}

// Whether something is wrong while the command runs.
static inline bool supervise_find_failure(Failure* f, const Supervisor* s) {
    f->what[0] = 0;
    if (s->stopping) {
        f->kind = "late";
        failure_add(f, "the command did not end within %g s of the signal", s->checkpoint_timeout);
        return now_ms() > s->stop_by_ms;
    }
    size_t lost = supervise_first_lost(s), absent = supervise_absent(s);
    if (lost != COMMAND_NONE && now_ms() - s->views[lost].gone_ms > SUPERVISE_LOST_MS) {
        f->kind = "lost rank";
        failure_blame_lost(f, s, lost);
        failure_add(f, "; the command went on");
        return true;
    }
    bool late = s->age_ms > supervise_limit_ms(s, BEAT_SETUP);
    if (late && (absent != COMMAND_NONE || s->view_count == 0)) {
        f->kind = "absent rank";
        f->lost = absent != COMMAND_NONE;
        if (f->lost) failure_add(f, "rank %zu of %zu never came, in %.1f s", absent, s->world, 1e-3 * s->age_ms);
        else failure_add(f, "no rank has sent a heartbeat in %.1f s", 1e-3 * s->age_ms);
        return true;
    }
    return supervise_find_hang(f, s);
}

// Returns true when the command has ended well, or after a signal, false with what has failed.
static inline bool supervise_watch(Failure* f, Supervisor* s) {
    memset(f, 0, sizeof *f);
    f->rank = COMMAND_NONE;
    for (;;) {
        bool rank_ended = supervise_poll(s, SUPERVISE_LOOK_MS - (now_ms() - s->looked_ms));
        int code = WIFEXITED(s->status) ? WEXITSTATUS(s->status) : -1;
        if (s->ended && (s->stopping || code == 0 || code == SUPERVISE_SAVED)) return true;
        if (s->ended) supervise_explain_end(f, s);
        if (s->ended) return false;
        if (!rank_ended && now_ms() - s->looked_ms < SUPERVISE_LOOK_MS) continue;
        supervise_look(s);
        if (supervise_find_failure(f, s)) return false;
    }
}

// ------------------------------------------------------------------------------------------------
// 8. Post-mortem

static inline void json_member_bool(JsonWriter* w, const char* key, bool value) {
    json_write_key(w, key);
    json_write_bool(w, value);
}

// What is not known is null.
static inline void json_members_of_end(JsonWriter* w, bool known, int status) {
    json_member_number(w, "exit_code", known && WIFEXITED(status) ? WEXITSTATUS(status) : NAN);
    json_member_number(w, "signal", known && WIFSIGNALED(status) ? WTERMSIG(status) : NAN);
}

static inline void json_members_of_beat(JsonWriter* w, const Heartbeat* h) {
    char phase[16];
    choice_name(BEAT_PHASE_NAMES, (int)h->phase, phase, sizeof phase);
    json_member_string(w, "phase", phase);
    json_member_u64(w, "step", h->step);
    json_member_string(w, "collective", h->collective);
}

// State of the machine: what a run runs out of.
static inline void json_members_of_machine(JsonWriter* w, const char* directory) {
    struct statvfs disk;
    double loads[3];
    char line[256];
    unsigned long long kilobytes = 0;
    FILE* file = fopen("/proc/meminfo", "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1;
    if (file) fclose(file);
    double disk_free = statvfs(directory, &disk) == 0 ? (double)disk.f_bavail * (double)disk.f_frsize : NAN;
    json_member_number(w, "disk_free_bytes", disk_free);
    json_member_number(w, "memory_available_bytes", found ? 1024.0 * (double)kilobytes : NAN);
    json_member_number(w, "load", getloadavg(loads, 3) > 0 ? loads[0] : NAN);
}

static inline void failure_write_json(JsonWriter* w, const Failure* f, const Supervisor* s) {
    char time_text[64], state[2] = "";
    const RankView* blamed = f->rank == COMMAND_NONE ? NULL : &s->views[f->rank];
    // Of the rank to blame, if it is known how that ended; of the command otherwise.
    bool of_rank = blamed && blamed->gone && blamed->status;
    time_utc(time_text);
    w->line_depth = 2;
    json_write_begin(w, '{');
    json_member_string(w, "time", time_text);
    json_member_string(w, "what", f->what);
    json_member_string(w, "kind", f->kind);
    json_member_u64(w, "start", s->starts);
    json_member_number(w, "seconds", 1e-3 * (now_ms() - s->started_ms));
    json_member_bool(w, "progress", s->progress);
    json_member_u64(w, "best_step", s->best_step);
    json_member_number(w, "rank", blamed ? (double)blamed->seen.rank : NAN);
    if (blamed) json_members_of_beat(w, &blamed->seen);
    json_members_of_end(w, of_rank || s->ended, of_rank ? blamed->status : s->status);
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
        json_member_bool(w, "alive", !view->gone);
        json_member_bool(w, "closed", view->seen.closed != 0);
        json_member_string(w, "state", state);
        json_members_of_end(w, view->gone && view->status, view->status);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
    json_write_key(w, "output");
    tail_write(w, &s->tail);
    json_members_of_machine(w, s->out);
    json_write_key(w, "command");
    json_write_begin(w, '[');
    for (size_t i = 0; i < s->word_count; i++) json_write_string(w, s->words[i]);
    json_write_end(w, ']');
    json_write_end(w, '}');
    json_put(w, "\n", 1);
}

// Writes it under the next free name; path is "" if it could not.
static inline void failure_write(char* path, size_t size, const Failure* f, Supervisor* s) {
    Error error;
    JsonWriter w;
    char directory[FILE_PATH_MAX + 16];
    memset(&w, 0, sizeof w);
    for (int i = 0; i < 2; i++) relay_move(&s->relays[i], &s->tail);  // the last words
    failure_write_json(&w, f, s);
    snprintf(directory, sizeof directory, "%s/failures", s->out);
    bool good = json_write_done(&w, &error) && directory_make(directory, &error);
    for (unsigned number = 1; good; number++) {
        snprintf(path, size, "%s/failure_%04u.json", directory, number);
        if (access(path, F_OK) != 0) break;
    }
    good = good && file_write_atomic(path, w.text, w.bytes, &error);
    json_writer_free(&w);
    if (good) return;
    path[0] = 0;
    supervise_tell(s, true, NULL, "no post-mortem: %s", error.text);
}

// ------------------------------------------------------------------------------------------------
// 9. Use

// Ends every process that the command has left; true when there is none any more.
static inline bool supervise_end_all(Supervisor* s) {
    double began = now_ms(), passed = 0;
    int number = SIGTERM;
    supervise_forget_ranks(s);
    while (processes_signal(number) > 0) {
        if (passed > SUPERVISE_TERM_MS + SUPERVISE_KILL_MS) return false;
        supervise_poll(s, SUPERVISE_SWEEP_MS);
        passed = now_ms() - began;
        number = passed > SUPERVISE_TERM_MS ? SIGKILL : SIGTERM;
    }
    for (int i = 0; i < 2; i++) {  // what they have written last
        Relay* r = &s->relays[i];
        struct pollfd end = polled_for(r->to, POLLOUT);
        while (relay_move(r, &s->tail)) poll(&end, 1, (int)SUPERVISE_LOOK_MS);
        relay_close(r);
    }
    return true;
}

// Fewer ranks next time, if the flags allow it and the command has a word for it.
static inline void supervise_lower_ranks(Supervisor* s) {
    size_t ranks = 0, at = command_ranks(&ranks, s->words, s->word_count, s->world);
    size_t fewer = at == COMMAND_NONE ? 0 : command_fewer_ranks(s->words, s->word_count, ranks, s->least_ranks);
    if (fewer == 0) {
        supervise_tell(s, true, NULL, "a rank seems to be lost, but %s: their number stays", at == COMMAND_NONE ?
                       "nothing in the command says how many there are (--ranks N, -np N, -n N)" :
                       "no smaller number of ranks that --min-ranks allows divides the batch");
        return;
    }
    const char* equals = strchr(s->words[at], '=');
    char word[sizeof s->ranks_word];
    snprintf(word, sizeof word, "%.*s%zu", equals ? (int)(equals + 1 - s->words[at]) : 0, s->words[at], fewer);
    memcpy(s->ranks_word, word, sizeof word);
    s->words[at] = s->ranks_word;
    s->lost_in_row = s->failures_in_row = 0;  // another number of ranks is another attempt
    supervise_tell(s, true, "fewer ranks", "%zu ranks failed twice without progress, as if one were lost: now %zu",
                   ranks, fewer);
}

static inline int supervise_give_up(Supervisor* s, const char* why) {
    supervise_tell(s, true, "gave up", "gave up: %s; best step %llu, %zu starts; see %.600s/failures", why,
                   (unsigned long long)s->best_step, s->starts, s->out);
    return 1;
}

// After a failure: says it, and ends what is left. Returns the exit code, or -1 to start again, after *pause_ms.
static inline int supervise_fail(double* pause_ms, Supervisor* s, const Failure* f) {
    char path[FILE_PATH_MAX + 64], why[64];
    bool wrong_flags = s->ended && WIFEXITED(s->status) && WEXITSTATUS(s->status) == 2;
    failure_write(path, sizeof path, f, s);
    supervise_tell(s, true, "failure", "%s%s%s", f->what, path[0] ? "; see " : "", path);
    s->failures_in_row = s->progress ? 0 : s->failures_in_row + 1;
    s->lost_in_row = s->progress || !f->lost ? 0 : s->lost_in_row + 1;

    if (!supervise_end_all(s))
        return supervise_give_up(s, "some processes do not end, even by SIGKILL; restart the machine");
    if (wrong_flags) return 2;
    if (s->stopping) return strcmp(f->kind, "late") == 0 ? 1 : SUPERVISE_SAVED;  // a signal came while nothing ran
    if (s->least_ranks > 0 && s->lost_in_row >= 2) supervise_lower_ranks(s);
    snprintf(why, sizeof why, "%zu failures in a row without progress", s->failures_in_row);
    if (s->failures_in_row >= s->max_failures) return supervise_give_up(s, why);
    if (!s->progress)
        *pause_ms = fmin(ldexp(SUPERVISE_PAUSE_MS, (int)s->failures_in_row - 1), SUPERVISE_PAUSE_MOST_MS);
    supervise_tell(s, false, "restart", "after %.1f s; %zu of %llu failures without progress", 1e-3 * *pause_ms,
                   s->failures_in_row, (unsigned long long)s->max_failures);
    return -1;
}

// The command has ended well, or after a signal. Returns the exit code.
static inline int supervise_finish(Supervisor* s) {
    char end[96];
    status_text(end, sizeof end, s->status);
    int code = WIFSIGNALED(s->status) ? 128 + WTERMSIG(s->status) : WEXITSTATUS(s->status);
    const char* more = code == SUPERVISE_SAVED ? ": to be continued" : "";
    supervise_look(s);
    supervise_tell(s, code != 0, code == 0 ? "done" : "stopped", "the command %s%s", end, more);
    if (!supervise_end_all(s)) supervise_tell(s, true, NULL, "some of its processes do not end, even by SIGKILL");
    return code;
}

static inline bool supervise_parse(Supervisor* s, int argc, char** argv, Error* error) {
    Flag flags[] = {
        {"max-restarts", FLAG_COUNT, &s->max_failures, "N", 1, 1e6,
         "gives up after so many failures in a row without progress", false},
        {"timeout", FLAG_REAL, &s->timeout, "S", 0, 1e9,
         "seconds without a heartbeat in a step or a collective; 0: no limit", false},
        {"setup-timeout", FLAG_REAL, &s->setup_timeout, "S", 0, 1e9, "the same before the first step", false},
        {"checkpoint-timeout", FLAG_REAL, &s->checkpoint_timeout, "S", 0, 1e9,
         "the same in a checkpoint; also for the command to end after a signal", false},
        {"min-ranks", FLAG_COUNT, &s->least_ranks, "N", 0, 65536,
         "goes on with fewer ranks, down to so many, when one seems lost; 0: never", false},
        {"out", FLAG_TEXT, &s->out, "DIR", 0, 0,
         "where events.jsonl and failures/ go; default: that of COMMAND", false},
    };
    size_t count = sizeof flags / sizeof flags[0];
    int dashes = 1;
    while (dashes < argc && strcmp(argv[dashes], "--") != 0) dashes++;
    if (flags_want_help(dashes, argv)) {
        printf("train supervise [FLAGS] -- COMMAND...: runs COMMAND, the trainer or a launcher with it, and starts it\n"
               "again when it dies or hangs.\n\n");
        flags_help(flags, count);
        s->word_count = 0;
        return true;
    }
    if (!flags_parse(flags, count, dashes, argv, error)) return false;
    if (dashes + 1 >= argc)
        return fail(error, "there is no command to run; give it last: supervise [FLAGS] -- ./train ...");
    s->words = argv + dashes + 1;
    s->word_count = (size_t)(argc - dashes - 1);
    if (command_is_trainer(s->words, s->word_count) && !command_resumes(s->words, s->word_count))
        return fail(error, "the command has no --resume, so that every start would begin anew; add --resume");
    if (s->out == NULL) command_find(&s->out, s->words, s->word_count, "--out");
    if (s->out == NULL || s->out[0] == 0)
        return fail(error, "neither the supervisor nor the command has --out; give the directory of the run");
    return strlen(s->out) <= 3900 || fail(error, "--out is longer than 3900 characters; give a shorter path");
}

// All that is needed before the first start.
static inline bool supervise_open(Supervisor* s, Error* error) {
    static const int signals[] = {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    static const char* const places[] = {"/dev/shm", "/tmp"};  // of this machine alone; the first is no disk
    sigset_t mask;
    if (!directory_make(s->out, error)) return false;
    int lock = open(s->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // until the process ends
    if (lock < 0) return fail_file(error, "open the directory", s->out);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail(error, "another supervisor watches %.600s; end it first, or give another --out", s->out);
    int beats = -1;  // the name is ours then
    for (size_t i = 0; beats < 0 && i < sizeof places / sizeof places[0]; i++) {
        snprintf(s->beats_path, sizeof s->beats_path, "%s/llmtrain-beats-XXXXXX", places[i]);
        beats = mkstemp(s->beats_path);
        if (beats < 0 || (errno = posix_fallocate(beats, 0, sizeof(Heartbeats))) == 0) continue;
        close(beats);
        unlink(s->beats_path);
        beats = -1;
    }
    if (beats < 0) s->beats_path[0] = 0;
    if (beats < 0) return fail_file(error, "make a file for heartbeats in", "/dev/shm or /tmp");
    close(beats);
    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) sigaddset(&mask, signals[i]);
    sigprocmask(SIG_BLOCK, &mask, &s->mask_before);
    s->pipe_before = signal(SIGPIPE, SIG_IGN);
    s->signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 || setenv(BEAT_VARIABLE, s->beats_path, 1) != 0)
        return fail(error, "cannot watch processes: %s; a newer Linux is needed", strerror(errno));
    return true;
}

// argv[0] is not looked at. Returns the exit code for the process to end with. To be called before threads are started.
static inline int supervise_main(int argc, char** argv) {
    static Supervisor supervisor;
    Supervisor* s = &supervisor;
    Error error;
    Failure failure;
    int code = -1;
    s->max_failures = 5;
    s->timeout = 600;
    s->setup_timeout = s->checkpoint_timeout = 1800;
    for (int i = 0; i < 2; i++) {
        s->relays[i].from = -1;
        s->relays[i].to = relay_open(i == 0 ? STDOUT_FILENO : STDERR_FILENO);
        s->relays[i].last = '\n';
    }
    if (!supervise_parse(s, argc, argv, &error)) code = 2;
    else if (s->word_count == 0) code = 0;  // it was asked for help
    else if (!supervise_open(s, &error)) code = 1;
    if (code > 0) supervise_tell(s, true, NULL, "%s", error.text);
    while (code < 0) {
        double pause_ms = 0;
        code = supervise_start(s);
        if (code >= 0) break;
        code = supervise_watch(&failure, s) ? supervise_finish(s) : supervise_fail(&pause_ms, s, &failure);
        double until = now_ms() + pause_ms;
        while (code < 0 && !s->stopping && now_ms() < until) supervise_poll(s, until - now_ms());
        if (code < 0 && s->stopping) code = SUPERVISE_SAVED;
    }
    unlink(s->beats_path);
    return code;
}

#endif  // LLMTRAIN_SUPERVISE_H
