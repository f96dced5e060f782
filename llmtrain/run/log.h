// log.h: the reports of a run to its user.
//
//   1. step      the outcome of a logged step: a line on the console (step_print)
//   2. lines     files to which lines are appended, and which a resume cuts back: lines_append, log_cut_file
//   3. metrics   a step with more numbers as a line of JSON in metrics.jsonl: log_write; its ranks in ranks.jsonl
//   4. events    starts, resumes, saves, faults: a line each in events.jsonl: event_write
//
//   Log log;
//   if (!log_open(&log, "runs/x", &error) || !log_cut_back(&log, state.step, &error)) ...
//   log_write(&log, &step);
//   log_close(&log);
//
// After log_cut_back the log holds the lines of steps 1 to `step`, each whole, and training appends the rest: a run
// that was killed and resumed leaves the log of a run that was not.

#ifndef LLMTRAIN_LOG_H
#define LLMTRAIN_LOG_H

#include "../base/files.h"
#include "../base/telemetry.h"
#include "../checkpoint/state.h"
#include "../ranks/step_result.h"
#include "../text/data.h"
#include "tfevents.h"

#include <sys/file.h>

// ------------------------------------------------------------------------------------------------
// 1. Step

// What is known of each rank in a step: the first statistics that ranks_finish_step gathers.
enum { RANK_LOSS, RANK_BUSY, RANK_WAIT, RANK_FACTS };

typedef struct {
    uint64_t step, steps, tokens, skipped; // steps done and to do, tokens consumed, steps skipped so far
    StepResult result;                     // loss and norm, and how the ranks differ
    double epoch;                          // how many times all samples were read; NAN for a mixture
    double val_loss;                       // NAN in steps that do not validate
    double entropy_floor;                  // of the validation text; 0: unknown
    double lr;
    double clip;                           // factor of the gradient that the guard has chosen; 0: the step was skipped
    bool updated;                          // false: the step was skipped
    bool saving;                           // a checkpoint was being written during it
    double began_ms;                       // when it began
    double ms, tokens_per_second;
    double mfu;                            // model FLOPs utilization, of the peak that was given; NAN without one
    double minutes_left;
    uint64_t memory;                       // bytes allocated on the device
    uint64_t sent_before, sent;            // bytes that this rank sent in the run before the step; and in the step
    double load_ms;                        // waiting for the data: mean over the steps since the last line; or NAN
    double time;                           // Unix time, seconds
    size_t ranks;
    const double* of_ranks;                // (ranks, RANK_FACTS) of this step; NULL: one rank
    double trace_ms;                       // time that the trace took, not included in `ms`
    bool traced;                           // down to its sequences; those with the largest loss and gradient:
    SequenceTrace worst_loss, worst_norm;
    const MixtureCounts* mixture;          // of the samples consumed
    bool prefers;                          // the objective prefers answers to others: how well it does
    ObjectiveLog objective;
} StepLog;

static inline void step_print(FILE* out, const StepLog* s) {
    char val[64] = "", mfu[32] = "n/a", waits[32] = "", skipped[32] = "";
    if (s->skipped > 0) snprintf(skipped, sizeof skipped, " | skipped %llu", (unsigned long long)s->skipped);
    if (!isnan(s->val_loss)) snprintf(val, sizeof val, " | val %.4f", s->val_loss);
    if (!isnan(s->val_loss) && s->entropy_floor > 0)
        snprintf(val, sizeof val, " | val %.4f (floor %.4f %+.1f%%)", s->val_loss, s->entropy_floor,
                 100 * (s->val_loss / s->entropy_floor - 1));
    if (!isnan(s->mfu)) snprintf(mfu, sizeof mfu, "%.1f%%", 100 * s->mfu);
    if (s->ranks > 1) snprintf(waits, sizeof waits, " | waits %.0f%%", 100 * s->result.wait_share);
    fprintf(out, "step %5llu/%llu | loss %.4f%s | norm %.3f | lr %.2e | %.0f ms | %.0f tok/s | mfu %s%s%s | %.1f min "
            "left\n", (unsigned long long)s->step, (unsigned long long)s->steps, s->result.loss, val,
            s->result.grad_norm, s->lr, s->ms, s->tokens_per_second, mfu, waits, skipped, s->minutes_left);
    fflush(out);
}

// ------------------------------------------------------------------------------------------------
// 2. Lines

#define LOG_BYTES_MAX ((size_t)1 << 34)  // of a file

// The lines that a resume or rewind removes, whose steps are made again.
typedef struct {
    uint64_t first, last;             // steps; 0: none are removed
    double first_time, last_time;     // when they were written; NAN: that is not known
} LogCut;

typedef struct {
    uint64_t step;
    double val_loss;                  // NAN if it has none, INFINITY if that is no number
    double time;                      // NAN if it has none
} LogLine;

// False if the line is not complete JSON with a step, as after a power cut.
static inline bool log_line_read(LogLine* l, const char* line, size_t bytes) {
    Json json;
    Error ignored;
    if (!json_parse(&json, line, bytes, "log", &ignored)) return false;
    bool ok = json_u64(&json, json_get(&json, 0, "step"), &l->step);
    uint32_t loss = json_get(&json, 0, "val_loss");
    if (!json_number(&json, loss, &l->val_loss)) l->val_loss = json_is(&json, loss, JSON_STRING) ? INFINITY : NAN;
    if (!json_number(&json, json_get(&json, 0, "time"), &l->time)) l->time = NAN;
    json_free(&json);
    return ok;
}

// Keeps the complete lines of a log whose step is `step` or below, in place; returns the remaining bytes. *damaged: the
// lines lost among them, which are incomplete, or of a step that the lines after them have not reached. An incomplete
// last line is one of them if the lines before it have not reached `step`. *cut: the others that are removed; or NULL.
static inline size_t log_keep_until(char* text, size_t bytes, uint64_t step, size_t* damaged, LogCut* cut) {
    size_t kept = 0, position = 0, later = 0;  // later: lines of seemingly later steps, since the last that was kept
    uint64_t reached = 0;
    LogCut removed = {0, 0, NAN, NAN};
    *damaged = 0;
    while (position < bytes) {
        char* end = (char*)memchr(text + position, '\n', bytes - position);
        LogLine l = {0, NAN, NAN};
        if (end == NULL) {
            *damaged += reached < step;
            break;
        }
        size_t length = (size_t)(end - text) + 1 - position;
        bool whole = log_line_read(&l, text + position, length - 1);
        if (whole && l.step <= step) {
            memmove(text + kept, text + position, length);
            kept += length;
            *damaged += later;
            later = 0;
            reached = l.step;
        } else if (whole || later > 0) {
            if (later++ == 0) removed.first = l.step, removed.first_time = l.time;
            if (whole) removed.last = l.step, removed.last_time = l.time;
        } else {
            ++*damaged;
        }
        position += length;
    }
    if (later == 0) removed.first = removed.last = 0;
    if (cut) *cut = removed;
    return kept;
}

// Cuts a file of lines back to those up to `step`. Lines that a power cut has damaged are removed too, and the gap is
// reported; *replaced: the path is a new file then.
static inline bool log_cut_file(bool* replaced, LogCut* cut, const char* path, uint64_t step, Error* error) {
    char* text = NULL;
    size_t bytes = 0, damaged;
    *replaced = false;
    if (!file_read(path, LOG_BYTES_MAX, &text, &bytes, error)) return false;
    size_t kept = log_keep_until(text, bytes, step, &damaged, cut);
    bool ok = kept == bytes;
    if (damaged > 0) {
        say(stderr, "train: %s: removed %zu damaged line%s, whose step%s the log now lacks; no weights are "
            "affected", path, damaged, damaged > 1 ? "s" : "", damaged > 1 ? "s" : "");
        ok = *replaced = file_write_atomic(path, text, kept, error);
    } else if (!ok) {
        int file = open(path, O_WRONLY | O_CLOEXEC);
        ok = (file >= 0 && ftruncate(file, (off_t)kept) == 0) || fail_file(error, "truncate", path);
        if (file >= 0) close(file);
    }
    free(text);
    return ok;
}

// Opens a file to append lines to it, and ends one that a full disk has truncated; -1 after a failure.
static inline int lines_open(char path[FILE_PATH_MAX + 32], const char* directory, const char* name, Error* error) {
    char last = '\n';
    snprintf(path, FILE_PATH_MAX + 32, "%.*s/%s", (int)FILE_PATH_MAX, directory, name);
    int file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    off_t end = file < 0 ? 0 : lseek(file, 0, SEEK_END);
    bool cut = end > 0 && pread(file, &last, 1, end - 1) == 1 && last != '\n';
    if (file >= 0 && (!cut || write(file, "\n", 1) == 1)) return file;
    fail_file(error, file < 0 ? "open" : "write", path);
    if (file >= 0) close(file);
    return -1;
}

// Ends the JSON of a line and writes it, in one write, so that several processes may do so at once.
static inline bool lines_write(int file, JsonWriter* w, const char* path, Error* error) {
    json_write_end(w, '}');
    json_put(w, "\n", 1);
    bool good = json_write_done(w, error);
    errno = ENOSPC;  // the reason if less is written without an error
    return good && (write(file, w->text, w->bytes) == (ssize_t)w->bytes || fail_file(error, "write", path));
}

// Appends a line, whose JSON has begun, to a file in a directory; frees the writer. tensorboard: shows it too; or NULL.
static inline bool lines_append(const char* directory, const char* name, TfEvents* tensorboard, JsonWriter* w,
                                Error* error) {
    char path[FILE_PATH_MAX + 32];
    int file = lines_open(path, directory, name, error);
    bool good = file >= 0 && lines_write(file, w, path, error);
    if (good && tensorboard) tfevents_line(tensorboard, name, w->text, w->bytes);
    json_writer_free(w);
    if (file >= 0) close(file);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 3. Metrics

// The keys of a line. A value that was not measured is null. The same run has the same numbers before `ms`.
#define LOG_COUNT(member, key) FIELD_SAVED(StepLog, member, KIND_COUNT, key, NULL)
#define LOG_REAL(member, key) FIELD_SAVED(StepLog, member, KIND_REAL, key, NULL)
static const Field METRICS[] = {
    LOG_COUNT(step, "step"), LOG_REAL(result.loss, "loss"), LOG_REAL(val_loss, "val_loss"),
    LOG_REAL(result.grad_norm, "grad_norm"), LOG_REAL(lr, "lr"), LOG_REAL(clip, "clip"), LOG_COUNT(tokens, "tokens"),
    LOG_REAL(epoch, "epoch"), LOG_COUNT(skipped, "skipped"), LOG_REAL(result.loss_min, "loss_ranks_min"),
    LOG_REAL(result.loss_median, "loss_ranks_median"), LOG_REAL(result.loss_max, "loss_ranks_max"),
    LOG_REAL(ms, "ms"), LOG_REAL(result.busy_min, "ms_ranks_min"), LOG_REAL(result.busy_median, "ms_ranks_median"),
    LOG_REAL(result.busy_max, "ms_ranks_max"), LOG_COUNT(result.slowest, "slowest_rank"),
    LOG_REAL(result.wait_share, "wait_share"), LOG_COUNT(sent, "comm_bytes"),
    LOG_REAL(tokens_per_second, "tok_per_s"), LOG_REAL(mfu, "mfu"), LOG_COUNT(memory, "mem_bytes"),
    LOG_REAL(load_ms, "load_ms"), LOG_REAL(time, "time"),
};

// Additional keys of a step that was traced.
static const Field TRACED_METRICS[] = {
    LOG_REAL(worst_loss.loss, "worst_loss"), LOG_REAL(worst_loss.shard, "worst_loss_shard"),
    LOG_REAL(worst_loss.start, "worst_loss_at"), LOG_REAL(worst_norm.norm, "worst_grad_norm"),
    LOG_REAL(worst_norm.shard, "worst_grad_shard"), LOG_REAL(worst_norm.start, "worst_grad_at"),
};

// And of one that prefers answers to others.
static const Field OBJECTIVE_METRICS[] = {
    LOG_REAL(objective.accuracy, "reward_accuracy"), LOG_REAL(objective.margin, "reward_margin"),
    LOG_REAL(objective.chosen, "logp_chosen"), LOG_REAL(objective.rejected, "logp_rejected"),
};

typedef struct {
    FILE* file;
    const char* directory;   // of the run
    char path[FILE_PATH_MAX];
    JsonWriter waiting;      // lines that a full disk has refused so far
    bool refused;            // and the user has been told
    bool made;               // this process has made the file
    bool lost;               // the last line: there was no memory for it
    int ranks;               // ranks.jsonl; 0: not open
    bool ranks_refused;      // it could not be written, and the user has been told
    Telemetry* telemetry;    // of this machine; NULL: none
    TfEvents tensorboard;    // --tensorboard
} Log;

enum { LOG_WAITING_MAX = 1 << 24 };      // bytes; lines beyond that are lost

static inline void log_path(char* path, size_t size, const char* directory) {
    snprintf(path, size, "%.4000s/metrics.jsonl", directory);
}

// Locks the log: only one process trains in its directory. Some file systems cannot (Lustre without -o flock).
static inline bool log_lock(Log* log, Error* error) {
    if (flock(fileno(log->file), LOCK_EX | LOCK_NB) == 0) return true;
    if (errno == EWOULDBLOCK)
        return fail_with(error, "another process is training in %s; wait for it, or give another --out",
                         log->directory);
    if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK) return fail_file(error, "lock", log->path);
    say(stderr, "train: the file system of %s does not support locks (%s); make sure that no other process trains "
        "there", log->directory, strerror(errno));
    return true;
}

// Reopens the path, which is a new file now.
static inline bool log_open_again(Log* log, const char* action, Error* error) {
    FILE* again = fopen(log->path, "ab");
    if (again == NULL) return fail_file(error, action, log->path);
    fclose(log->file);
    log->file = again;
    return log_lock(log, error);
}

static inline bool log_open(Log* log, const char* directory, Error* error) {
    struct stat status;
    memset(log, 0, sizeof *log);
    log->directory = directory;
    log_path(log->path, sizeof log->path, directory);
    bool found = stat(log->path, &status) == 0;
    if (found && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))  // a pipe would wait for a reader
        return fail_with(error, "%s is not a file; move it away, or give another --out", log->path);
    log->file = fopen(log->path, "ab");
    if (log->file == NULL) return fail_file(error, "open", log->path);
    log->made = !found;
    if (log_lock(log, error)) return true;
    fclose(log->file);
    log->file = NULL;  // it is another's
    return false;
}

// Replaces a log that someone has deleted, so that the rest of the run is not lost too.
static inline bool log_replace_deleted(Log* log, Error* error) {
    struct stat status;
    bool found = fstat(fileno(log->file), &status) == 0;
    if (found ? status.st_nlink > 0 : errno != ESTALE) return true;  // ESTALE: on NFS another machine has deleted it
    say(stderr, "train: %s was deleted while the run was writing to it; starting a new one", log->path);
    return directory_make(log->directory, error) && log_open_again(log, "create", error);
}

static inline bool log_flush(Log* log, Error* error) {
    JsonWriter* w = &log->waiting;
    if (!log_replace_deleted(log, error)) return false;
    while (w->bytes > 0) {
        errno = 0;
        ssize_t n = write(fileno(log->file), w->text, w->bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail_file(error, "write", log->path);
        w->bytes -= (size_t)n;
        memmove(w->text, w->text + n, w->bytes);
    }
    log->refused = false;
    return true;
}

// Flushes the log to the disk; true if there is none.
static inline bool log_sync(Log* log, Error* error) {
    return log->file == NULL || (log_flush(log, error) && (file_sync(fileno(log->file)) ||
                                                           fail_file(error, "flush", log->path)));
}

// Appends a line to ranks.jsonl, with a number for each rank. One that the disk refuses is lost.
static inline void log_write_ranks(Log* log, const StepLog* s) {
    static const char* const keys[RANK_FACTS] = {"loss", "busy_ms", "wait_ms"};
    char path[FILE_PATH_MAX + 32];
    JsonWriter w = {0};
    Error why;
    if (log->ranks == 0) log->ranks = lines_open(path, log->directory, "ranks.jsonl", &why);
    snprintf(path, sizeof path, "%.4000s/ranks.jsonl", log->directory);
    json_write_begin(&w, '{');
    json_member_u64(&w, "step", s->step);
    for (int i = 0; i < RANK_FACTS; i++) {
        json_member_begin(&w, keys[i], '[');
        for (size_t r = 0; r < s->ranks; r++) json_write_number(&w, s->of_ranks[r * RANK_FACTS + (size_t)i]);
        json_write_end(&w, ']');
    }
    bool good = log->ranks > 0 && lines_write(log->ranks, &w, path, &why);
    json_writer_free(&w);
    if (!good && !log->ranks_refused) fprintf(stderr, "train: %s. Training continues\n", why.text);
    log->ranks_refused = !good;
    if (good) return;
    if (log->ranks > 0) close(log->ranks);  // opened again, a line that was cut is ended
    log->ranks = 0;
}

// Appends one line. A full disk does not end the run: the line waits. Nor does a lack of memory: the line is lost.
static inline void log_write(Log* log, const StepLog* step) {
    JsonWriter w, *waiting = &log->waiting;
    Error why;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '{');
    fields_write(&w, METRICS, sizeof METRICS / sizeof METRICS[0], step);
    if (step->traced) fields_write(&w, TRACED_METRICS, sizeof TRACED_METRICS / sizeof TRACED_METRICS[0], step);
    if (step->prefers) fields_write(&w, OBJECTIVE_METRICS, sizeof OBJECTIVE_METRICS / sizeof *OBJECTIVE_METRICS, step);
    const MixtureCounts* m = step->mixture;
    if (m->parts > 1) {
        json_member_begin(&w, "shares", '[');
        for (size_t i = 0; i < m->parts; i++) json_write_number(&w, (double)m->counts[i] / (double)m->samples);
        json_write_end(&w, ']');
    }
    double machine[TELEMETRY_VALUES];
    telemetry_take(machine, log->telemetry, step->tokens);
    for (int v = 0; v < TELEMETRY_VALUES; v++) json_member_number(&w, TELEMETRY_KEYS[v], machine[v]);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    log->lost = !json_write_done(&w, &why) || waiting->bytes >= LOG_WAITING_MAX;
    if (!log->lost) {
        json_put(waiting, w.text, w.bytes);
        log->lost = !json_write_done(waiting, &why);
        waiting->failed = false;  // it still has the lines before
    }
    log->tensorboard.steps = step->steps;
    if (step->entropy_floor > 0) log->tensorboard.floor = step->entropy_floor;
    if (!log->lost) tfevents_line(&log->tensorboard, "metrics.jsonl", w.text, w.bytes);
    json_writer_free(&w);
    if (log->lost && waiting->bytes < LOG_WAITING_MAX)
        fprintf(stderr, "train: %s. Training continues; the log lacks step %llu\n", why.text,
                (unsigned long long)step->step);
    if (step->of_ranks) log_write_ranks(log, step);
    if (log_flush(log, &why)) return;
    if (!log->refused) fprintf(stderr, "train: %s. Training continues; log lines wait in memory\n", why.text);
    log->refused = true;
}

// The end of a text whose last line lacks a validation loss, from byte *from on, with it.
static inline bool log_line_fill(JsonWriter* w, size_t* from, const char* text, size_t bytes, double val_loss) {
    static const char lacks[] = "\"val_loss\": null";
    size_t null = 4, n = sizeof lacks - 1;
    for (size_t i = bytes; i-- > 0 && !(text[i] == '\n' && i + 1 < bytes);) {
        if (bytes - i < n || memcmp(text + i, lacks, n) != 0) continue;
        *from = i + n - null;
        size_t before = w->bytes;
        if (isfinite(val_loss)) json_write_number(w, val_loss);
        else json_write_string(w, "nan");  // or else the next start would take it for left out
        while (w->bytes < before + null) json_put(w, " ", 1);  // or else the end of the old line would stay behind it
        json_put(w, text + i + n, bytes - i - n);
        return true;
    }
    return false;
}

// Gives the last line of the log the validation loss that it lacks.
static inline bool log_add_val_loss(Log* log, double val_loss, Error* error) {
    char tail[4096];
    struct stat status;
    JsonWriter w, *waiting = &log->waiting;
    Error why;
    size_t from = 0;
    if (log->lost) return fail_with(error, "%s lacks the last line", log->path);  // this loss is not of the one before
    bool waits = !log_flush(log, &why), good = true;
    memset(&w, 0, sizeof w);
    size_t before = waiting->bytes;
    if (waits && log_line_fill(&w, &from, waiting->text, before, val_loss)) {
        waiting->failed |= w.failed;
        waiting->bytes = from;
        json_put(waiting, w.text, w.bytes);
        good = json_write_done(waiting, error);
        if (!good) waiting->bytes = before;  // no memory: the line as it was
        waiting->failed = false;
    } else if (!waits) {
        int file = open(log->path, O_RDWR | O_CLOEXEC);  // log->file appends
        good = (file >= 0 && fstat(file, &status) == 0) || fail_file(error, "open", log->path);
        size_t end = good ? (size_t)status.st_size : 0, bytes = min_size(end, sizeof tail);
        good = good && file_read_at(file, tail, bytes, end - bytes, log->path, error);
        good = good && (log_line_fill(&w, &from, tail, bytes, val_loss) ||
                        fail_with(error, "%s has no line that waits for a validation loss", log->path));
        good = good && json_write_done(&w, error);
        off_t at = good ? (off_t)(end - bytes + from) : 0;
        ssize_t n = 0;
        do n = good ? pwrite(file, w.text, w.bytes, at) : 0;
        while (n < 0 && errno == EINTR);
        if (good && n != (ssize_t)w.bytes) {  // a full disk: the line as it was
            good = fail_file(error, "write", log->path);
            if (pwrite(file, tail + from, bytes - from, at) < 0 || ftruncate(file, (off_t)end) != 0) errno = 0;
        }
        if (file >= 0) close(file);
    } else {
        good = fail_with(error, "%s", why.text);
    }
    json_writer_free(&w);
    return good;
}

static inline void log_close(Log* log) {
    if (log->file) fclose(log->file);
    if (log->ranks > 0) close(log->ranks);
    log->ranks = 0;
    json_writer_free(&log->waiting);
    tfevents_close(&log->tensorboard);
    log->file = NULL;
}

// ------------------------------------------------------------------------------------------------
// 4. Events

// The date and time, UTC.
static inline void json_member_time(JsonWriter* w) {
    char text[64];
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t bytes = strftime(text, 32, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + bytes, sizeof text - bytes, ".%03dZ", (int)(now.tv_nsec / 1000000));
    json_member_string(w, "time", text);
}

// Appends a line to events.jsonl. key: the name of an additional member with a value in JSON; or NULL.
static inline bool event_write(const char* directory, TfEvents* tensorboard, const char* event, uint64_t step,
                               const char* detail, const char* key, const char* value, Error* error) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '{');
    json_member_time(&w);
    json_member_string(&w, "event", event);
    json_member_u64(&w, "step", step);
    json_member_string(&w, "detail", detail);
    if (key) json_write_key(&w, key);
    if (key) json_write_raw(&w, value);
    return lines_append(directory, "events.jsonl", tensorboard, &w, error);
}

// A duration as the value of an event's member.
typedef struct { char text[32]; } EventMs;
static inline EventMs event_ms(double ms) {
    EventMs m;
    long long us = llrint(1e3 * fmax(ms, 0));
    snprintf(m.text, sizeof m.text, "%lld.%03d", us / 1000, (int)(us % 1000));
    return m;
}

// Cuts the log back to the lines up to `step`, and what else has lines of steps: a run that resumes from a checkpoint,
// or goes back, writes the lines after it again.
static inline bool log_cut_back(Log* log, uint64_t step, Error* error) {
    static const char* const others[] = {"ranks.jsonl", "samples.jsonl"};
    size_t damaged;
    bool replaced, good = true;
    char path[FILE_PATH_MAX], detail[128];
    LogCut cut, ignored;
    struct stat status;
    log->lost = false;  // it was of a step that is made again
    tfevents_close(&log->tensorboard);
    log->waiting.bytes = log_keep_until(log->waiting.text, log->waiting.bytes, step, &damaged, NULL);
    if (log->ranks > 0) close(log->ranks);
    log->ranks = 0;
    if (!log_cut_file(&replaced, &cut, log->path, step, error)) return false;
    if (replaced && !log_open_again(log, "open", error)) return false;
    for (size_t i = 0; good && i < sizeof others / sizeof *others; i++) {
        snprintf(path, sizeof path, "%.4000s/%s", log->directory, others[i]);
        if (stat(path, &status) == 0) good = log_cut_file(&replaced, &ignored, path, step, error);
    }
    if (!good || cut.first == 0 || isnan(cut.first_time + cut.last_time)) return good;
    JsonWriter w = {0};
    Error why;
    snprintf(detail, sizeof detail, "the steps from %llu to %llu are made again", (unsigned long long)step + 1,
             (unsigned long long)cut.last);
    json_write_begin(&w, '{');
    json_member_u64(&w, "first", cut.first);
    json_member_number(&w, "first_time", cut.first_time);
    json_member_u64(&w, "last", cut.last);
    json_member_number(&w, "last_time", cut.last_time);
    json_write_end(&w, '}');
    if (json_write_done(&w, &why)) event_write(log->directory, NULL, "cut", step, detail, "lines", w.text, &why);
    json_writer_free(&w);
    return true;  // without the event, the time of these steps is not known
}

#endif  // LLMTRAIN_LOG_H
