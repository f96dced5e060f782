// supervise.h: who watches a run, and starts it again when it dies or hangs.
//
//   1. heartbeats  what each rank tells of itself, through a page of shared memory: beat_open, beat, beat_close
//   2. events      what happens to a run, a line each in events.jsonl: event_write
//   3. processes   what /proc knows of them
//   4. output      of the command, passed on unchanged; its last lines are kept
//   5. command     what its words say: the trainer or not, the number of ranks
//   6. start       in a session of its own
//   7. watch       until it ends, dies or hangs
//   8. post-mortem failures/failure_0001.json
//   9. end         of every process that the command has left
//  10. use         supervise_main: ./train supervise [FLAGS] -- COMMAND...
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
#include <sys/uio.h>
#include <sys/wait.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on every architecture; a Linux before 5.3 does not know it
#endif

#define SUPERVISE_SAVED 75  // exit code: stopped by a signal, and to be continued (EX_TEMPFAIL of sysexits.h)

// ------------------------------------------------------------------------------------------------
// 1. Heartbeats
//
// Each rank has a file in the directory that the supervisor names in LLMTRAIN_HEARTBEATS, maps it, and writes into it
// what it is at. That takes no system call. Without a supervisor nothing happens. One thread of a rank beats.
//
// The directory lies in /dev/shm, so that no disk can make a beat wait, and ranks of other machines do not find it.

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
    munmap(h, sizeof *h);
    *beat_state() = NULL;
}

// directory: getenv(BEAT_VARIABLE); if it is NULL, or is none of this machine, nothing happens, ever. world: how many
// ranks beat there, if all are on this machine; otherwise 0.
static inline bool beat_open(const char* directory, size_t rank, size_t world, Error* error) {
    char path[FILE_PATH_MAX + 32], temporary[FILE_PATH_MAX + 32];
    if (directory == NULL || *beat_state() || !directory_exists(directory)) return true;
    snprintf(path, sizeof path, "%s/rank_%zu", directory, rank);
    snprintf(temporary, sizeof temporary, "%s/new_%zu", directory, rank);
    int file = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return fail_file(error, "create", temporary);
    void* memory = MAP_FAILED;
    errno = posix_fallocate(file, 0, sizeof(Heartbeat));  // so that there is memory behind every beat
    if (errno == 0) memory = mmap(NULL, sizeof(Heartbeat), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int reason = errno;
    close(file);
    errno = reason;
    if (memory == MAP_FAILED) return fail_file(error, "map", temporary);
    Heartbeat* h = (Heartbeat*)memory;
    h->pid = (uint64_t)getpid();
    h->rank = rank;
    h->world = world;
    beat_write(h, BEAT_SETUP, 0, NULL, false);
    if (rename(temporary, path) != 0) {
        fail_file(error, "create", path);
        munmap(memory, sizeof *h);
        return false;
    }
    *beat_state() = h;
    atexit(beat_close);
    return true;
}

// For the supervisor. A beat in whose middle the rank was stopped or killed is read as it stands; its counter is odd.
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

// Appends what was written as a line to events.jsonl, in one piece: several processes may do so at once. A line that a
// full disk has cut stays alone.
static inline bool events_append(const char* directory, const JsonWriter* line, Error* error) {
    char path[FILE_PATH_MAX + 32], last = '\n', newline[] = "\n";
    if (!json_write_done(line, error)) return false;
    snprintf(path, sizeof path, "%.*s/events.jsonl", (int)FILE_PATH_MAX, directory);
    int file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) return fail_file(error, "open", path);
    off_t end = lseek(file, 0, SEEK_END);
    bool cut = end > 0 && pread(file, &last, 1, end - 1) == 1 && last != '\n';
    struct iovec parts[3] = {{newline, cut}, {line->text, line->bytes}, {newline, 1}};
    errno = ENOSPC;  // what it means if less is written, without an error
    bool good = writev(file, parts, 3) == (ssize_t)(line->bytes + 1 + cut);
    if (!good) fail_file(error, "write", path);
    close(file);
    return good;
}

static inline bool event_write(const char* directory, const char* event, uint64_t step, const char* detail,
                               Error* error) {
    JsonWriter w;
    char time_text[64];
    memset(&w, 0, sizeof w);
    time_utc(time_text);
    json_write_begin(&w, '{');
    json_member_string(&w, "time", time_text);
    json_member_string(&w, "event", event);
    json_member_u64(&w, "step", step);
    json_member_string(&w, "detail", detail);
    json_write_end(&w, '}');
    bool good = events_append(directory, &w, error);
    json_writer_free(&w);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 3. Processes

typedef struct {
    pid_t pid, parent, session;
    char state;        // R, S, D, T (stopped), Z (has ended), ...
    uint64_t started;  // in ticks since the machine started: tells it from a later process with its number
    int status;        // of one that has ended, as waitpid tells it
} Process;

typedef struct {
    Process* list;     // owned
    size_t count, capacity;
} Processes;

// False if there is none of that number.
static inline bool process_read(Process* p, pid_t pid) {
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[bytes > 0 ? bytes : 0] = 0;
    const char* at = strrchr(text, ')');  // the end of field 2, the name, which can hold anything
    if (at == NULL) return false;
    memset(p, 0, sizeof *p);
    p->pid = pid;
    at++;
    for (int field = 3; *at; field++) {  // numbered as in proc(5)
        at += strspn(at, " ");
        if (field == 3) p->state = *at;
        if (field == 4) p->parent = (pid_t)strtol(at, NULL, 10);
        if (field == 6) p->session = (pid_t)strtol(at, NULL, 10);
        if (field == 22) p->started = strtoull(at, NULL, 10);
        if (field == 52) p->status = (int)strtol(at, NULL, 10);
        at += strcspn(at, " \n");
        at += *at == '\n';
    }
    return true;
}

// Lists all. First come the command and what it has started: those that descend from this process and have left its
// session; returns how many these are. What loses its parent becomes our child (PR_SET_CHILD_SUBREAPER), so nothing
// escapes.
static inline size_t processes_read(Processes* all) {
    DIR* directory = opendir("/proc");
    size_t ours = 0, before = SIZE_MAX;
    pid_t self = getpid(), session = getsid(0);
    all->count = 0;
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        if (all->count == all->capacity) {
            size_t capacity = 2 * all->capacity + 256;
            Process* grown = (Process*)realloc(all->list, capacity * sizeof *grown);
            if (grown == NULL) break;
            all->list = grown;
            all->capacity = capacity;
        }
        all->count += process_read(&all->list[all->count], (pid_t)strtol(entry->d_name, NULL, 10));
    }
    if (directory) closedir(directory);
    while (ours != before) {
        before = ours;
        for (size_t i = ours; i < all->count; i++) {
            Process p = all->list[i];
            bool child = p.parent == self && p.session != session;
            for (size_t k = 0; k < ours && !child; k++) child = all->list[k].pid == p.parent;
            if (!child) continue;
            all->list[i] = all->list[ours];
            all->list[ours++] = p;
        }
    }
    return ours;
}

// ------------------------------------------------------------------------------------------------
// 4. Output
//
// What the command writes is taken from its pipes whenever there is something, so that it never waits for long, and
// passed on when that is possible without waiting. A reader that is merely slow slows the command; for one that takes
// nothing at all, output is dropped, and that is said where it is missing.

#define RELAY_BYTES ((size_t)1 << 20)
#define RELAY_CHUNK ((size_t)64 << 10)  // what a pipe holds
#define RELAY_MOST (RELAY_BYTES + 2 * RELAY_CHUNK)  // with the last words, for which room is always kept
#define RELAY_READS 16                  // chunks in a row, before something else has its turn
#define RELAY_WRITE ((size_t)4096)      // what a pipe takes without waiting, when poll says that it takes something
#define RELAY_STUCK_MS 5e3              // for a reader to take something
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
    char* text;        // (RELAY_MOST) owned
    size_t first, end; // what waits, in text
    uint64_t dropped;  // bytes, after that
    double moved_ms;   // when something was taken, or began to wait
    bool gone;         // nobody reads
    char last;         // byte of all that was put in
} Relay;

static inline void tail_put(Tail* t, const char* text, size_t bytes, int from) {
    size_t skip = bytes > TAIL_BYTES - 1 ? bytes - (TAIL_BYTES - 1) : 0;
    text += skip;
    bytes -= skip;
    if (t->bytes + bytes + 1 > sizeof t->text) {
        memmove(t->text, t->text + t->bytes - TAIL_BYTES, TAIL_BYTES);
        t->bytes = TAIL_BYTES;
    }
    if (t->from != from && t->bytes > 0 && t->text[t->bytes - 1] != '\n') t->text[t->bytes++] = '\n';
    memcpy(t->text + t->bytes, text, bytes);
    t->bytes += bytes;
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

static inline void relay_put(Relay* r, const char* text, size_t bytes) {
    if (bytes == 0 || r->gone) return;
    if (r->first == r->end) {
        r->first = r->end = 0;
        r->moved_ms = now_ms();
        if (r->dropped) {
            r->end = (size_t)snprintf(r->text, RELAY_MOST, "%ssupervise: %llu bytes of output are missing here: nobody "
                                      "took them\n", r->last == '\n' ? "" : "\n", (unsigned long long)r->dropped);
            r->last = '\n';
        }
        r->dropped = 0;
    }
    if (r->end + bytes > RELAY_MOST) {
        memmove(r->text, r->text + r->first, r->end - r->first);
        r->end -= r->first;
        r->first = 0;
    }
    if (r->dropped || r->end + bytes > RELAY_MOST) {
        r->dropped += bytes;
        return;
    }
    memcpy(r->text + r->end, text, bytes);
    r->end += bytes;
    r->last = text[bytes - 1];
}

static inline bool relay_has_room(const Relay* r) {
    return r->end - r->first + RELAY_CHUNK <= RELAY_BYTES || r->gone || now_ms() - r->moved_ms > RELAY_STUCK_MS;
}

static inline void relay_read(Relay* r, Tail* tail, bool even_without_room) {
    char chunk[RELAY_CHUNK];
    for (int i = 0; i < RELAY_READS && r->from >= 0 && (even_without_room || relay_has_room(r)); i++) {
        ssize_t n = read(r->from, chunk, sizeof chunk);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            close(r->from);
            r->from = -1;
            return;
        }
        tail_put(tail, chunk, (size_t)n, r->to);
        relay_put(r, chunk, (size_t)n);
    }
}

static inline void relay_write(Relay* r) {
    while (r->first < r->end) {
        struct pollfd polled = {r->to, POLLOUT, 0};
        if (poll(&polled, 1, 0) <= 0) return;
        ssize_t n = write(r->to, r->text + r->first, min_size(r->end - r->first, RELAY_WRITE));
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n < 0) {  // a disk that is full now may have space later; other reasons are for good
            r->gone = errno != ENOSPC && errno != EDQUOT;
            r->dropped += r->end - r->first;
            n = (ssize_t)(r->end - r->first);
        }
        r->first += (size_t)n;
        r->moved_ms = now_ms();
    }
}

// ------------------------------------------------------------------------------------------------
// 5. Command

#define COMMAND_NONE SIZE_MAX

// The value of a flag: the word after it, or what stands behind its '='; NULL if it is not there.
static inline const char* command_value(char* const* words, size_t count, const char* flag) {
    size_t length = strlen(flag);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(words[i], flag) == 0 && i + 1 < count) return words[i + 1];
        if (strncmp(words[i], flag, length) == 0 && words[i][length] == '=') return words[i] + length + 1;
    }
    return NULL;
}

static inline uint64_t command_number(char* const* words, size_t count, const char* flag) {
    const char* text = command_value(words, count, flag);
    uint64_t number = 0;
    return text && json_digits(&number, text, strlen(text), (uint64_t)1 << 53) ? number : 0;
}

// Whether a word is the trainer's program: train, or train-FP32 and its like.
static inline bool command_is_trainer(char* const* words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char *slash = strrchr(words[i], '/'), *name = slash ? slash + 1 : words[i];
        if (strcmp(name, "train") != 0 && strncmp(name, "train-", 6) != 0) continue;
        struct stat status;
        bool program = stat(words[i], &status) == 0 && S_ISREG(status.st_mode) && access(words[i], X_OK) == 0;
        if (i == 0 || program) return true;
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
// none. Several words may look like it (nice -n 10 ...): one that says what the ranks say, world, is better.
static inline size_t command_ranks(size_t* ranks, char* const* words, size_t count, size_t world) {
    static const char* const flags[] = {"--ranks", "-np", "--np", "-n"};
    size_t found = COMMAND_NONE;
    for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
        size_t length = strlen(flags[f]);
        for (size_t i = 0; i < count; i++) {
            uint64_t number = 0;
            bool alone = i > 0 && strcmp(words[i - 1], flags[f]) == 0;
            bool joined = strncmp(words[i], flags[f], length) == 0 && words[i][length] == '=';
            const char* text = words[i] + (joined ? length + 1 : 0);
            if ((!alone && !joined) || !json_digits(&number, text, strlen(text), 1 << 20) || number == 0) continue;
            if (found != COMMAND_NONE && number != world) continue;
            found = i;
            *ranks = (size_t)number;
            if (number == world) return found;
        }
    }
    return found;
}

// The largest number of ranks below `ranks` that the next start can have, 0 if there is none. The batch of a step must
// divide among them.
static inline size_t command_fewer_ranks(char* const* words, size_t count, size_t ranks, size_t least) {
    uint64_t total = command_number(words, count, "--total-batch");
    uint64_t micro = command_number(words, count, "--batch") * command_number(words, count, "--seq");
    size_t fewer = ranks - 1;
    while (fewer > 0 && total && micro && total / micro % fewer != 0) fewer--;
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
#define SUPERVISE_AT_ONCE_MS 10e3    // a failure before this makes the next start wait, if there was no progress
#define SUPERVISE_PAUSE_MS 500.0     // for the first time, then twice as long each time
#define SUPERVISE_PAUSE_MOST_MS 30e3
#define SUPERVISE_RECENT 10          // failures in the last report
#define SUPERVISE_POLLED 5           // signals, and the two ends of both relays

// A rank as the supervisor sees it.
typedef struct {
    Heartbeat* mapped;
    Heartbeat seen;    // at the last look
    double read_ms;    // when that was
    double still_ms;   // that it has not moved
    uint64_t started;  // Process.started
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
    size_t ranks_at;       // the word that was replaced, or COMMAND_NONE
    char ranks_word[32];   // what stands there now
    // this process
    char beats[FILE_PATH_MAX + 32];  // directory of the heartbeats
    int lock, signals;               // descriptors: of `out`, and a signalfd
    sigset_t mask_before;
    void (*pipe_before)(int);
    Relay relays[2];       // standard output and standard error
    Tail tail;
    Processes processes;
    bool event_failed;     // that was said already
    // all starts
    size_t starts, failures, failures_in_row, lost_in_row;  // in_row: without progress
    uint64_t best_step;
    double began_ms;
    char recent[SUPERVISE_RECENT][256];  // sentences of the last failures
    bool stopping;         // by a signal
    double stop_by_ms;
    // this start
    pid_t child;
    bool ended, ending;    // the command has ended; it is being ended
    int status;            // as waitpid tells it
    bool progress;         // some rank was beyond best_step
    RankView* views;       // owned, in the order in which the ranks came
    struct pollfd* polled; // owned (view_capacity + SUPERVISE_POLLED)
    size_t view_count, view_capacity;
    size_t world;          // as the ranks say; 0: not known
    double started_ms, looked_ms;
    double age_ms, ranks_ms;  // since the start, and since the first rank came, while we were awake
} Supervisor;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline void supervise_say(Supervisor* s, const char* format, ...) {
    char text[2048];
    Relay* r = &s->relays[1];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (r->last != '\n') relay_put(r, "\n", 1);
    relay_put(r, "supervise: ", 11);
    relay_put(r, text, strlen(text));
    relay_put(r, "\n", 1);
    relay_write(r);
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline void supervise_event(Supervisor* s, const char* event, const char* format, ...) {
    char text[2048];
    Error error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (event_write(s->out, event, s->best_step, text, &error) || s->event_failed) return;
    s->event_failed = true;
    supervise_say(s, "%s", error.text);
}

// Also those that have come since the last look.
static inline void supervise_forget_ranks(Supervisor* s) {
    DIR* directory = opendir(s->beats);
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;)
        if (entry->d_name[0] != '.') unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory) closedir(directory);
    for (size_t i = 0; i < s->view_count; i++) {
        munmap(s->views[i].mapped, sizeof(Heartbeat));
        if (s->views[i].end >= 0) close(s->views[i].end);
    }
    s->view_count = s->world = 0;
}

// In the child: becomes the command, or returns why it cannot.
static inline int supervise_become(Supervisor* s, pid_t parent, int out, int err) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // without a supervisor it saves and stops
    if (getppid() != parent) _exit(1);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bool good = setsid() >= 0 && null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
                dup2(err, STDERR_FILENO) >= 0 && sigprocmask(SIG_SETMASK, &s->mask_before, NULL) == 0;
    if (good) {
        signal(SIGPIPE, s->pipe_before);
        execvp(s->words[0], s->words);
    }
    return errno;
}

// Starts the command. *wrong_flags: it fails on account of what COMMAND names.
static inline bool supervise_start(Supervisor* s, bool* wrong_flags, Error* error) {
    int pipes[3][2];  // standard output, standard error, and one that closes when the command has begun
    int reason = 0, made = 0;
    char text[1024];
    *wrong_flags = false;
    supervise_forget_ranks(s);
    s->tail.bytes = 0;
    s->ended = s->ending = s->progress = false;
    while (made < 3 && pipe2(pipes[made], O_CLOEXEC) == 0) made++;
    pid_t parent = getpid();
    s->child = made == 3 ? fork() : -1;
    if (s->child == 0) {
        reason = supervise_become(s, parent, pipes[0][1], pipes[1][1]);
        _exit(write(pipes[2][1], &reason, sizeof reason) == sizeof reason ? 127 : 126);
    }
    if (s->child < 0) reason = errno;
    for (int i = 0; i < made; i++) close(pipes[i][1]);
    if (s->child > 0) {
        ssize_t n;
        do n = read(pipes[2][0], &reason, sizeof reason); while (n < 0 && errno == EINTR);
        close(pipes[2][0]);
        for (int i = 0; i < 2; i++) {
            fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
            s->relays[i].from = pipes[i][0];
        }
        s->starts++;
        s->started_ms = s->looked_ms = now_ms();
        s->age_ms = s->ranks_ms = 0;
        command_text(text, sizeof text, s->words, s->word_count);
        if (n == 0) {
            supervise_event(s, "start", "start %zu, process %ld: %s", s->starts, (long)s->child, text);
            return true;
        }
        waitpid(s->child, NULL, 0);
        *wrong_flags = true;
    } else {
        for (int i = 0; i < made; i++) close(pipes[i][0]);
    }
    s->child = 0;
    const char* remedy = *wrong_flags ? "check the command after --" : "raise the limits on processes (ulimit -u, -n)";
    return fail(error, "cannot start %.600s: %s; %s", s->words[0], strerror(reason), remedy);
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
    if (s->child == 0 || s->ended || s->ending) return;
    for (size_t i = 0; i < s->view_count; i++)
        if (!s->views[i].gone) told = kill((pid_t)s->views[i].seen.pid, number) == 0 || told;
    if (!told) kill(-s->child, number);
}

// Signals and output, for at most that long; less if something happens. True if a rank has ended.
static inline bool supervise_poll(Supervisor* s, double ms) {
    struct signalfd_siginfo info;
    struct pollfd *polled = s->polled, first = {s->signals, POLLIN, 0};
    nfds_t count = 0;
    bool rank_ended = false;
    pid_t pid;
    int status;
    polled[count++] = first;
    for (int i = 0; i < 2; i++) {
        Relay* r = &s->relays[i];
        struct pollfd input = {r->from >= 0 && relay_has_room(r) ? r->from : -1, POLLIN, 0};
        struct pollfd output = {r->first < r->end ? r->to : -1, POLLOUT, 0};
        polled[count++] = input;
        polled[count++] = output;
    }
    for (size_t i = 0; i < s->view_count && !s->ending; i++) {
        struct pollfd end = {s->views[i].end, POLLIN, 0};
        polled[count++] = end;
    }
    bool happened = poll(polled, count, (int)ceil(fmax(ms, 0))) > 0;
    for (nfds_t i = SUPERVISE_POLLED; i < count && happened; i++) rank_ended |= polled[i].revents != 0;
    while (read(s->signals, &info, sizeof info) == sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGCHLD) continue;
        if (!s->stopping) s->stop_by_ms = now_ms() + supervise_limit_ms(s, BEAT_CHECKPOINT);
        s->stopping = true;
        supervise_event(s, "signal", "signal %d (%s)", number, strsignal(number));
        supervise_pass_on(s, number == SIGHUP ? SIGTERM : number);
    }
    for (int i = 0; i < 2; i++) {
        relay_read(&s->relays[i], &s->tail, false);
        relay_write(&s->relays[i]);
    }
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid != s->child || s->ended) continue;
        s->ended = true;
        s->status = status;
    }
    return rank_ended;
}

// Maps the heartbeats of ranks that have come since.
static inline void supervise_find_ranks(Supervisor* s) {
    DIR* directory = s->world > 0 && s->view_count >= s->world ? NULL : opendir(s->beats);
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;) {
        uint64_t rank;
        bool known = strncmp(entry->d_name, "rank_", 5) != 0 ||
                     !json_digits(&rank, entry->d_name + 5, strlen(entry->d_name + 5), UINT32_MAX);
        for (size_t i = 0; i < s->view_count && !known; i++) known = s->views[i].seen.rank == rank;
        if (known) continue;
        if (s->view_count == s->view_capacity) {
            size_t capacity = 2 * s->view_capacity + 8;
            RankView* grown = (RankView*)realloc(s->views, capacity * sizeof *grown);
            if (grown) s->views = grown;
            struct pollfd* polled = (struct pollfd*)realloc(s->polled, (capacity + SUPERVISE_POLLED) * sizeof *polled);
            if (polled) s->polled = polled;
            if (grown == NULL || polled == NULL) break;
            s->view_capacity = capacity;
        }
        char path[FILE_PATH_MAX + 64];
        snprintf(path, sizeof path, "%s/rank_%llu", s->beats, (unsigned long long)rank);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        void* memory = mmap(NULL, sizeof(Heartbeat), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (memory == MAP_FAILED) continue;
        RankView* view = &s->views[s->view_count++];
        memset(view, 0, sizeof *view);
        view->mapped = (Heartbeat*)memory;
        view->seen = beat_read(view->mapped);
        view->read_ms = now_ms();
        view->end = (int)syscall(SYS_pidfd_open, (pid_t)view->seen.pid, 0);
        s->world = (size_t)view->seen.world;
    }
    if (directory) closedir(directory);
}

// Looks at every rank.
static inline void supervise_look(Supervisor* s) {
    double now = now_ms(), passed = fmin(now - s->looked_ms, SUPERVISE_LOOK_MOST_MS);
    s->looked_ms = now;
    s->age_ms += passed;
    supervise_find_ranks(s);
    if (s->view_count > 0) s->ranks_ms += passed;
    for (size_t i = 0; i < s->view_count; i++) {
        RankView* view = &s->views[i];
        Process p;
        bool there = !view->gone && process_read(&p, (pid_t)view->seen.pid);
        if (there && view->started == 0) view->started = p.started;
        there = there && view->started == p.started;
        if (there) view->state = p.state;
        if (!view->gone && (!there || p.state == 'Z' || p.state == 'X')) {
            view->gone = true;
            view->gone_ms = now;
            view->status = there ? p.status : 0;
            if (view->end >= 0) close(view->end);
            view->end = -1;
        }
        Heartbeat h = beat_read(view->mapped);  // after the process, so that the last word of one that is gone is read
        double read_ms = now_ms();
        view->still_ms += fmin(read_ms - view->read_ms, SUPERVISE_LOOK_MOST_MS);
        if (h.counter != view->seen.counter) view->still_ms = 0;
        view->read_ms = read_ms;
        view->seen = h;
        if (h.phase == BEAT_SETUP || h.step <= s->best_step) continue;
        s->best_step = h.step;
        s->progress = true;
    }
}

static inline double rank_age_ms(const RankView* view) { return fmax(0, now_ms() - (double)view->seen.ms); }

// The rank, and what it was at: two parts of a sentence.
static inline void rank_name(char* text, size_t size, const RankView* view) {
    unsigned long long rank = view->seen.rank, pid = view->seen.pid;
    snprintf(text, size, "rank %llu (process %llu)", rank, pid);
}
static inline void rank_place(char* text, size_t size, const RankView* view) {
    char phase[16], step[32] = "", collective[48] = "";
    choice_name(BEAT_PHASE_NAMES, (int)view->seen.phase, phase, sizeof phase);
    if (view->seen.step > 0) snprintf(step, sizeof step, ", step %llu", (unsigned long long)view->seen.step);
    if (view->seen.phase == BEAT_COLLECTIVE && view->seen.collective[0])
        snprintf(collective, sizeof collective, ", in %s", view->seen.collective);
    snprintf(text, size, "in phase %s%s%s", phase, step, collective);
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
    for (size_t rank = 0; s->view_count < s->world && rank < s->world; rank++) {
        bool came = false;
        for (size_t i = 0; i < s->view_count; i++) came = came || s->views[i].seen.rank == rank;
        if (!came) return rank;
    }
    return COMMAND_NONE;
}

// Blames a rank that was killed; `what` goes on with what else is known.
static inline void failure_blame_lost(Failure* f, const Supervisor* s, size_t i, const char* more) {
    char name[64], place[128], end[96] = "is gone without a word";
    const RankView* view = &s->views[i];
    rank_name(name, sizeof name, view);
    rank_place(place, sizeof place, view);
    if (view->status) status_text(end, sizeof end, view->status);
    f->rank = i;
    f->lost = f->lost || view->status == 0 || WIFSIGNALED(view->status);
    snprintf(f->what, sizeof f->what, "%s %s %s%s", name, end, place, more);
}

// The command has ended, and not well.
static inline void supervise_explain_end(Failure* f, Supervisor* s) {
    char end[96], more[160], name[64], place[128];
    size_t lost = supervise_first_lost(s), itself = COMMAND_NONE;  // lost: before its end, as it seems
    supervise_look(s);
    for (size_t i = 0; i < s->view_count; i++)
        if (s->views[i].seen.pid == (uint64_t)s->child) itself = i;
    if (itself != COMMAND_NONE) s->views[itself].status = s->status;
    status_text(end, sizeof end, s->status);
    bool killed = WIFSIGNALED(s->status);
    f->kind = killed ? "signal" : "exit";
    f->lost = killed || WEXITSTATUS(s->status) > 128;  // so a shell and launchers tell of a signal
    snprintf(f->what, sizeof f->what, "the command %s", end);
    // Forked ranks end with the one that is the command, and may be seen to do so a little before it.
    bool first = lost == COMMAND_NONE || now_ms() - s->views[lost].gone_ms < SUPERVISE_TOGETHER_MS;
    if (killed && itself != COMMAND_NONE && first) lost = itself;
    if (lost == COMMAND_NONE) lost = supervise_first_lost(s);
    size_t absent = supervise_absent(s), closed = supervise_first_closed(s);
    if (lost != COMMAND_NONE) {
        snprintf(more, sizeof more, "; the command %s", end);
        failure_blame_lost(f, s, lost, lost == itself ? "" : more);
    } else if (absent != COMMAND_NONE && s->ranks_ms > SUPERVISE_ABSENT_MS) {
        f->lost = true;
        snprintf(f->what, sizeof f->what, "rank %zu of %zu never came; the command %s", absent, s->world, end);
    } else if (closed != COMMAND_NONE) {
        f->rank = closed;
        rank_name(name, sizeof name, &s->views[closed]);
        rank_place(place, sizeof place, &s->views[closed]);
        const char* first_of = s->view_count > 1 ? " first" : "";
        snprintf(f->what, sizeof f->what, "the command %s; %s gave up%s %s", end, name, first_of, place);
    }
}

// Whether a hang is rather a's doing than b's: a was stopped, is in an earlier step, or is not yet in the collective in
// which b waits; or it beat last the longest ago.
static inline bool rank_holds_up(const RankView* a, const RankView* b) {
    bool a_stopped = a->state == 'T' || a->state == 't', b_stopped = b->state == 'T' || b->state == 't';
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
    char name[64], place[128], late_place[128], why[64] = "", more[256] = "";
    bool itself = blamed->still_ms > supervise_limit_ms(s, blamed->seen.phase);
    rank_name(name, sizeof name, blamed);
    rank_place(place, sizeof place, blamed);
    rank_place(late_place, sizeof late_place, late);
    if (blamed->state == 'T' || blamed->state == 't') snprintf(why, sizeof why, "; it was stopped by a signal");
    if (blamed->state == 'D') snprintf(why, sizeof why, "; it waits for a device or a disk");
    if (!itself)
        snprintf(more, sizeof more, "; rank %llu has not beaten for %.1f s, %s", (unsigned long long)late->seen.rank,
                 1e-3 * late->still_ms, late_place);
    f->kind = "hang";
    f->rank = (size_t)(blamed - s->views);
    snprintf(f->what, sizeof f->what, "%s %s %.1f s ago %s%s%s", name, itself ? "stopped beating" : "beat last",
             1e-3 * blamed->still_ms, place, why, more);
    return true;
}

// Whether something is wrong while the command runs.
static inline bool supervise_find_failure(Failure* f, const Supervisor* s) {
    size_t lost = supervise_first_lost(s), absent = supervise_absent(s);
    if (lost != COMMAND_NONE && now_ms() - s->views[lost].gone_ms > SUPERVISE_LOST_MS) {
        f->kind = "lost rank";
        failure_blame_lost(f, s, lost, "; the command went on");
        return true;
    }
    bool late = s->age_ms > supervise_limit_ms(s, BEAT_SETUP);
    if (late && (absent != COMMAND_NONE || s->view_count == 0)) {
        f->kind = "absent rank";
        f->lost = absent != COMMAND_NONE;
        double seconds = 1e-3 * s->age_ms;
        snprintf(f->what, sizeof f->what, "no rank has sent a heartbeat in %.1f s", seconds);
        if (f->lost)
            snprintf(f->what, sizeof f->what, "rank %zu of %zu never came, in %.1f s", absent, s->world, seconds);
        return true;
    }
    return supervise_find_hang(f, s);
}

static inline bool supervise_ended_well(const Supervisor* s) {
    int code = WIFEXITED(s->status) ? WEXITSTATUS(s->status) : -1;
    return s->ended && (s->stopping || code == 0 || code == SUPERVISE_SAVED);
}

// Returns true when the command has ended well, or after a signal, false with what has failed.
static inline bool supervise_watch(Failure* f, Supervisor* s) {
    memset(f, 0, sizeof *f);
    f->rank = COMMAND_NONE;
    for (;;) {
        bool rank_ended = supervise_poll(s, SUPERVISE_LOOK_MS - (now_ms() - s->looked_ms));
        if (supervise_ended_well(s)) return true;
        if (s->ended) {
            supervise_explain_end(f, s);
            return false;
        }
        if (!rank_ended && now_ms() - s->looked_ms < SUPERVISE_LOOK_MS) continue;
        supervise_look(s);
        if (!s->stopping && supervise_find_failure(f, s)) return false;
        if (!s->stopping || now_ms() < s->stop_by_ms) continue;
        f->kind = "late";
        snprintf(f->what, sizeof f->what, "the command did not end within %g s of the signal", s->checkpoint_timeout);
        return false;
    }
}

// ------------------------------------------------------------------------------------------------
// 8. Post-mortem

static inline void json_member_status(JsonWriter* w, bool known, int status) {
    json_write_key(w, "exit_code");
    if (known && WIFEXITED(status)) json_write_i64(w, WEXITSTATUS(status));
    else json_write_raw(w, "null");
    json_write_key(w, "signal");
    if (known && WIFSIGNALED(status)) json_write_i64(w, WTERMSIG(status));
    else json_write_raw(w, "null");
}

static inline void json_member_phase(JsonWriter* w, const Heartbeat* h) {
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
    json_write_key(w, "progress");
    json_write_bool(w, s->progress);
    json_member_u64(w, "best_step", s->best_step);
    json_write_key(w, "rank");
    if (blamed) json_write_u64(w, blamed->seen.rank);
    else json_write_raw(w, "null");
    if (blamed) json_member_phase(w, &blamed->seen);
    json_member_status(w, of_rank || s->ended, of_rank ? blamed->status : s->status);
    json_write_key(w, "ranks");
    json_write_begin(w, '[');
    for (size_t i = 0; i < s->view_count; i++) {
        const RankView* view = &s->views[i];
        state[0] = view->state;
        json_write_begin(w, '{');
        json_member_u64(w, "rank", view->seen.rank);
        json_member_u64(w, "pid", view->seen.pid);
        json_member_phase(w, &view->seen);
        json_member_number(w, "age_seconds", 1e-3 * rank_age_ms(view));
        json_write_key(w, "alive");
        json_write_bool(w, !view->gone);
        json_write_key(w, "closed");
        json_write_bool(w, view->seen.closed != 0);
        json_member_string(w, "state", state);
        json_member_status(w, view->gone && view->status, view->status);
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
static inline void failure_write(char* path, size_t size, const JsonWriter* w, Supervisor* s) {
    Error error;
    struct stat status;
    char directory[FILE_PATH_MAX + 16];
    snprintf(directory, sizeof directory, "%s/failures", s->out);
    bool good = json_write_done(w, &error) && directory_make(directory, &error);
    for (unsigned number = 1; good; number++) {
        snprintf(path, size, "%s/failure_%04u.json", directory, number);
        if (stat(path, &status) != 0) break;
    }
    if (good && file_write_atomic(path, w->text, w->bytes, &error)) return;
    path[0] = 0;
    supervise_say(s, "no post-mortem: %s", error.text);
}

// ------------------------------------------------------------------------------------------------
// 9. End

// Ends every process that the command has left; true when there is none any more. Twice none, since a process can lose
// its parent just while the list is read.
static inline bool supervise_end_all(Supervisor* s) {
    double began = now_ms();
    bool asked = false;
    s->ending = true;
    for (int none = 0; none < 2;) {
        supervise_poll(s, 0);
        size_t left = processes_read(&s->processes);
        none = left == 0 ? none + 1 : 0;
        if (left == 0) continue;
        double passed = now_ms() - began;
        if (passed > SUPERVISE_TERM_MS + SUPERVISE_KILL_MS) return false;
        int number = passed > SUPERVISE_TERM_MS ? SIGKILL : asked ? 0 : SIGTERM;
        for (size_t i = 0; i < left && number; i++) kill(s->processes.list[i].pid, number);
        asked = true;
        supervise_poll(s, SUPERVISE_SWEEP_MS);
    }
    for (int i = 0; i < 2; i++) {  // what they have written last
        relay_read(&s->relays[i], &s->tail, true);
        if (s->relays[i].from >= 0) close(s->relays[i].from);
        s->relays[i].from = -1;
        relay_write(&s->relays[i]);
    }
    s->child = 0;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 10. Use

// Fewer ranks next time, if the flags allow it and the command has a word for it.
static inline void supervise_lower_ranks(Supervisor* s) {
    size_t ranks = 0, at = command_ranks(&ranks, s->words, s->word_count, s->world);
    if (s->ranks_at != COMMAND_NONE) {
        const char* equals = strchr(s->ranks_word, '=');
        at = s->ranks_at;
        ranks = (size_t)strtoull(equals ? equals + 1 : s->ranks_word, NULL, 10);
    }
    size_t fewer = at == COMMAND_NONE ? 0 : command_fewer_ranks(s->words, s->word_count, ranks, s->least_ranks);
    if (at == COMMAND_NONE)
        supervise_say(s, "a rank seems to be lost, but nothing in the command says how many there are (--ranks N, "
                         "-np N, -n N): their number stays");
    else if (fewer == 0)
        supervise_say(s, "a rank seems to be lost, but no smaller number of ranks, at least %llu, divides the batch: "
                         "it stays at %zu", (unsigned long long)s->least_ranks, ranks);
    if (fewer == 0) return;
    const char* equals = strchr(s->words[at], '=');
    char word[sizeof s->ranks_word];
    snprintf(word, sizeof word, "%.*s%zu", equals ? (int)(equals + 1 - s->words[at]) : 0, s->words[at], fewer);
    memcpy(s->ranks_word, word, sizeof word);
    s->words[at] = s->ranks_word;
    s->ranks_at = at;
    s->lost_in_row = s->failures_in_row = 0;  // another number of ranks is another attempt
    supervise_say(s, "%zu ranks failed twice without progress, as if one were lost: now %zu ranks", ranks, fewer);
    supervise_event(s, "fewer ranks", "%zu ranks in place of %zu", fewer, ranks);
}

static inline int supervise_give_up(Supervisor* s, const char* why) {
    unsigned long long best = s->best_step;
    double minutes = (now_ms() - s->began_ms) / 6e4;
    supervise_say(s, "gave up: %s; best step %llu, %zu starts in %.1f min, %zu failures. The last of them:", why, best,
                  s->starts, minutes, s->failures);
    for (size_t i = s->failures > SUPERVISE_RECENT ? s->failures - SUPERVISE_RECENT : 0; i < s->failures; i++)
        supervise_say(s, "  %s", s->recent[i % SUPERVISE_RECENT]);
    supervise_event(s, "gave up", "%s", why);
    return 1;
}

// After a failure: ends what is left, and writes the post-mortem. Returns the exit code, or -1 to start again, after
// *pause_ms.
static inline int supervise_fail(double* pause_ms, Supervisor* s, const Failure* f) {
    char path[FILE_PATH_MAX + 64], what[256];
    JsonWriter w;
    memset(&w, 0, sizeof w);
    double ran_ms = now_ms() - s->started_ms;
    bool wrong_flags = s->ended && WIFEXITED(s->status) && WEXITSTATUS(s->status) == 2;
    for (int i = 0; i < 2; i++) relay_read(&s->relays[i], &s->tail, true);  // its last words
    failure_write_json(&w, f, s);
    bool ended = supervise_end_all(s);
    failure_write(path, sizeof path, &w, s);
    json_writer_free(&w);
    const char* slash = strrchr(path, '/');
    snprintf(what, sizeof what, "%.190s%s%.60s", f->what, slash ? ": " : "", slash ? slash + 1 : "");
    memcpy(s->recent[s->failures++ % SUPERVISE_RECENT], what, sizeof what);
    s->failures_in_row = s->progress ? 0 : s->failures_in_row + 1;
    s->lost_in_row = s->progress || !f->lost ? 0 : s->lost_in_row + 1;
    supervise_event(s, "failure", "%s%s%s", f->what, slash ? "; failures" : "", slash ? slash : "");
    supervise_say(s, "%s%s%s", f->what, path[0] ? "; see " : "", path);

    if (!ended) return supervise_give_up(s, "some processes do not end, even by SIGKILL; restart the machine");
    if (wrong_flags) return 2;
    if (s->stopping) return strcmp(f->kind, "late") == 0 ? 1 : SUPERVISE_SAVED;  // a signal came while nothing ran
    if (s->least_ranks > 0 && s->lost_in_row >= 2) supervise_lower_ranks(s);
    if (s->failures_in_row >= s->max_failures) {
        snprintf(what, sizeof what, "%zu failures in a row without progress", s->failures_in_row);
        return supervise_give_up(s, what);
    }
    *pause_ms = 0;
    if (!s->progress && ran_ms < SUPERVISE_AT_ONCE_MS)
        *pause_ms = fmin(SUPERVISE_PAUSE_MS * exp2((double)max_size(s->failures_in_row, 1) - 1),
                         SUPERVISE_PAUSE_MOST_MS);
    supervise_event(s, "restart", "after %.1f s; %zu of %llu failures without progress", 1e-3 * *pause_ms,
                    s->failures_in_row, (unsigned long long)s->max_failures);
    return -1;
}

// The command has ended well, or after a signal. Returns the exit code.
static inline int supervise_finish(Supervisor* s) {
    char end[96];
    status_text(end, sizeof end, s->status);
    int code = WIFSIGNALED(s->status) ? 128 + WTERMSIG(s->status) : WEXITSTATUS(s->status);
    supervise_look(s);
    supervise_event(s, code == 0 ? "done" : "stopped", "the command %s", end);
    if (code != 0) supervise_say(s, "the command %s%s", end, code == SUPERVISE_SAVED ? ": to be continued" : "");
    if (!supervise_end_all(s)) supervise_say(s, "some processes of the command could not be ended, even by SIGKILL");
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
    if (s->out == NULL) s->out = command_value(s->words, s->word_count, "--out");
    if (s->out == NULL || s->out[0] == 0)
        return fail(error, "neither the supervisor nor the command has --out; give the directory of the run");
    return strlen(s->out) <= 3900 || fail(error, "--out is longer than 3900 characters; give a shorter path");
}

// All that is needed before the first start.
static inline bool supervise_open(Supervisor* s, Error* error) {
    sigset_t mask;
    int opened = 0;
    // Descriptors 0, 1 and 2 are not to become those of something else.
    while (opened >= 0 && opened <= STDERR_FILENO) opened = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (opened >= 0) close(opened);
    if (!directory_make(s->out, error)) return false;
    s->lock = open(s->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->lock < 0) return fail_file(error, "open the directory", s->out);
    if (flock(s->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail(error, "another supervisor watches %.600s; end it first, or give another --out", s->out);
    snprintf(s->beats, sizeof s->beats, "/dev/shm/llmtrain-beats-XXXXXX");
    if (mkdtemp(s->beats) == NULL) {
        snprintf(s->beats, sizeof s->beats, "%s/.supervise-XXXXXX", s->out);
        if (mkdtemp(s->beats) == NULL) {
            s->beats[0] = 0;
            return fail_file(error, "make a directory for heartbeats in /dev/shm or in", s->out);
        }
    }
    for (int i = 0; i < 2; i++) s->relays[i].text = (char*)allocate(RELAY_MOST);
    s->polled = (struct pollfd*)allocate(SUPERVISE_POLLED * sizeof *s->polled);
    if (!s->relays[0].text || !s->relays[1].text || !s->polled)
        return fail(error, "not enough memory; free some memory");
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGUSR1);
    sigaddset(&mask, SIGHUP);  // passed on as SIGTERM: the terminal is gone
    sigprocmask(SIG_BLOCK, &mask, &s->mask_before);
    s->pipe_before = signal(SIGPIPE, SIG_IGN);
    s->signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 || setenv(BEAT_VARIABLE, s->beats, 1) != 0)
        return fail(error, "cannot watch processes: %s; a newer Linux is needed", strerror(errno));
    return true;
}

static inline void supervise_close(Supervisor* s) {
    Error error;
    supervise_forget_ranks(s);
    if (s->beats[0]) directory_remove(s->beats, &error);
    for (int i = 0; i < 2; i++) {
        Relay* r = &s->relays[i];
        for (relay_write(r); r->first < r->end && now_ms() - r->moved_ms < RELAY_STUCK_MS; relay_write(r)) {
            struct pollfd polled = {r->to, POLLOUT, 0};
            poll(&polled, 1, (int)SUPERVISE_LOOK_MS);
        }
        free(r->text);
    }
    if (s->lock >= 0) close(s->lock);
    if (s->signals >= 0) close(s->signals);
    free(s->processes.list);
    free(s->views);
    free(s->polled);
}

// argv[0] is not looked at. Returns the exit code. To be called before threads are started.
static inline int supervise_main(int argc, char** argv) {
    Supervisor* s = (Supervisor*)allocate(sizeof *s);
    Error error;
    Failure failure;
    int code = -1;
    bool wrong_flags;
    if (s == NULL) {
        fprintf(stderr, "supervise: not enough memory; free some memory\n");
        return 1;
    }
    s->max_failures = 5;
    s->timeout = 600;
    s->setup_timeout = s->checkpoint_timeout = 1800;
    s->ranks_at = COMMAND_NONE;
    s->lock = s->signals = -1;
    for (int i = 0; i < 2; i++) {
        s->relays[i].from = -1;
        s->relays[i].to = i == 0 ? STDOUT_FILENO : STDERR_FILENO;
        s->relays[i].last = '\n';
    }
    s->began_ms = now_ms();
    if (!supervise_parse(s, argc, argv, &error)) code = 2;
    else if (s->word_count == 0) code = 0;  // it was asked for help
    else if (!supervise_open(s, &error)) code = 1;
    if (code > 0) fprintf(stderr, "supervise: %s\n", error.text);
    while (code < 0) {
        double pause_ms = 0;
        if (!supervise_start(s, &wrong_flags, &error)) {
            supervise_say(s, "%s", error.text);
            code = wrong_flags ? 2 : 1;
            break;
        }
        code = supervise_watch(&failure, s) ? supervise_finish(s) : supervise_fail(&pause_ms, s, &failure);
        double until = now_ms() + pause_ms;
        while (code < 0 && !s->stopping && now_ms() < until) supervise_poll(s, until - now_ms());
        if (code < 0 && s->stopping) code = SUPERVISE_SAVED;
    }
    supervise_close(s);
    free(s);
    return code;
}

#endif  // LLMTRAIN_SUPERVISE_H
