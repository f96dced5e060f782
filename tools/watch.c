// watch.c: the program build/watch, which shows how runs are doing, from the files that they write.
//
//   build/watch runs/x runs/y                a page that is drawn every second, until Ctrl-C
//   build/watch runs/x --once && ...         a line for each run, as always where the output is no terminal
//
// Exit code: 0 the runs are running or done; 1 one is stalled or has failed; 75 otherwise, if one was stopped and is to
// be resumed; 2 a flag is wrong, or there is no run.
//
// It reads the ends of metrics.jsonl and events.jsonl, and only a few lines from the rest of the first, so that a look
// takes a few milliseconds however long the run is. It writes nothing and locks nothing: no run notices it. A run is
// stalled if a line is long overdue, and its supervisor, if that runs on this machine, has no new heartbeat either.
//
//   1. files    ends of files, lines, events, heartbeats
//   2. view     all that is shown of a run, and its state
//   3. page     of a terminal
//   4. main

#include "../llmtrain/base/flags.h"
#include "../llmtrain/base/json.h"
#include "../llmtrain/base/progress.h"
#include "../llmtrain/base/times.h"
#include "../llmtrain/run/heartbeat.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // members that are not named are zero

// ------------------------------------------------------------------------------------------------
// 1. Files

enum { STEPS_MAX = 50, CURVE_CELLS = 60, EVENTS_SHOWN = 5 };
#define TAIL_BYTES ((size_t)1 << 20)         // of metrics.jsonl and of events.jsonl, each time
#define TAIL_BYTES_FIRST ((size_t)64 << 20)  // the first time: the last validation may be far back
#define CURVE_BYTES ((size_t)4096)           // of metrics.jsonl for a cell of the curve: some lines

// The end of a file: whole lines, without those that are not complete yet.
typedef struct {
    char* text;
    size_t bytes, file_bytes;
    double changed;  // Unix seconds
    bool found;
} Tail;

static double unix_seconds(void) {
    const char* test = getenv("LLMTRAIN_TEST_NOW");
    return test ? strtod(test, NULL) : unix_time();
}

// Reads at most `most` bytes from `first` on; fewer if the file, which may be cut meanwhile, has fewer.
static bool part_read(Tail* t, const char* path, size_t first, size_t most, Error* error) {
    struct stat status;
    memset(t, 0, sizeof *t);
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return true;
    if (file < 0 || fstat(file, &status) != 0) {
        fail_file(error, "open", path);
        if (file >= 0) close(file);
        return false;
    }
    t->found = true;
    t->changed = (double)status.st_mtime;
    t->file_bytes = (size_t)status.st_size;
    if (first == SIZE_MAX) first = t->file_bytes - min_size(t->file_bytes, most);
    most = min_size(most, t->file_bytes - min_size(first, t->file_bytes));
    t->text = (char*)memory_allocate(most + 1);
    ssize_t n = t->text ? pread(file, t->text, most, (off_t)first) : 0;
    bool good = t->text ? n >= 0 || fail_file(error, "read", path) : fail_memory(error, path, most);
    close(file);
    if (!good) return free(t->text), t->text = NULL, false;
    size_t begin = 0, end = (size_t)n;
    while (end > 0 && t->text[end - 1] != '\n') end--;
    while (first > 0 && begin < end && t->text[begin++] != '\n') {}  // the rest of a line
    memmove(t->text, t->text + begin, end - begin);
    t->bytes = end - begin;
    t->text[t->bytes] = 0;
    for (size_t i = 0; i < t->bytes; i++)
        if (t->text[i] == 0) t->text[i] = ' ';  // what a power cut leaves
    return true;
}

static bool tail_read(Tail* t, const char* directory, const char* name, size_t most, Error* error) {
    char path[FILE_PATH_MAX + 32];
    snprintf(path, sizeof path, "%.4000s/%s", directory, name);
    return part_read(t, path, SIZE_MAX, most, error);
}

// Parses the line that ends before text[*end]; *end: where it begins. False when there is no other line; lines that are
// not JSON are passed over.
static bool line_before(Json* json, const char* text, size_t* end) {
    while (*end > 0) {
        size_t last = *end - 1, first = last;
        Error ignored;
        while (first > 0 && text[first - 1] != '\n') first--;
        *end = first;
        if (json_parse(json, text + first, last - first, "line", &ignored)) return true;
    }
    return false;
}

// A line of metrics.jsonl; NAN: it does not have that number.
typedef struct {
    uint64_t step;
    double time, loss, val, norm, lr, skipped, ms, rate, mfu, waits, memory, power;
} Line;

static Line line_of(const Json* json) {
    static const struct { const char* key; size_t offset; } keys[] = {
        {"time", offsetof(Line, time)}, {"loss", offsetof(Line, loss)}, {"val_loss", offsetof(Line, val)},
        {"grad_norm", offsetof(Line, norm)}, {"lr", offsetof(Line, lr)}, {"skipped", offsetof(Line, skipped)},
        {"ms", offsetof(Line, ms)}, {"tok_per_s", offsetof(Line, rate)}, {"mfu", offsetof(Line, mfu)},
        {"wait_share", offsetof(Line, waits)}, {"mem_bytes", offsetof(Line, memory)},
        {"power_w", offsetof(Line, power)},
    };
    Line line = {0};
    json_u64(json, json_get(json, 0, "step"), &line.step);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        double* value = (double*)((char*)&line + keys[i].offset);
        *value = NAN;
        json_number(json, json_get(json, 0, keys[i].key), value);
    }
    return line;
}

typedef struct {
    uint64_t step;
    double time;  // Unix seconds
    char clock[12], name[32], detail[512];
} Event;

static Event event_of(const Json* json) {
    Event e = {0};
    char text[64] = "", detail[1024] = "";
    json_u64(json, json_get(json, 0, "step"), &e.step);
    json_string(json, json_get(json, 0, "event"), e.name, sizeof e.name);
    json_string(json, json_get(json, 0, "detail"), detail, sizeof detail);
    text_make_visible(e.detail, sizeof e.detail, detail);
    json_string(json, json_get(json, 0, "time"), text, sizeof text);
    double time = unix_time_of(text);
    if (isnan(time)) return e;
    snprintf(e.clock, sizeof e.clock, "%.8s", text + 11);
    e.time = time;
    return e;
}

// Finds the heartbeat of the rank 0 that has a log open, if a supervisor on this machine watches it.
static bool heartbeat_find(Heartbeat* found, const char* log) {
    glob_t files = {0};
    bool is_there = false;
    glob(SYSTEM_MEMORY_FOLDER "/llmtrain-locked-??????", GLOB_NOSORT, NULL, &files);
    glob("/tmp/llmtrain-locked-??????", GLOB_NOSORT | GLOB_APPEND, NULL, &files);
    for (size_t i = 0; i < files.gl_pathc && !is_there; i++) {
        size_t bytes = 0;
        Error ignored;
        int file = file_open(&bytes, files.gl_pathv[i], &ignored);
        void* memory = file >= 0 && bytes == sizeof(Heartbeats) ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0)
                                                                : MAP_FAILED;
        const Heartbeats* all = (const Heartbeats*)memory;
        for (size_t k = 0; memory != MAP_FAILED && !is_there && k < min_size(all->count, HEARTBEAT_RANKS); k++) {
            *found = heartbeat_read(&all->ranks[k]);
            is_there = found->rank == 0 && !found->closed && process_has_open((pid_t)found->pid, log);
        }
        if (memory != MAP_FAILED) munmap(memory, bytes);
        if (file >= 0) close(file);
    }
    globfree(&files);
    return is_there;
}

// ------------------------------------------------------------------------------------------------
// 2. View

typedef enum { STATE_RUNNING, STATE_DONE, STATE_STOPPED, STATE_STALLED, STATE_FAILED } State;
static const char* const STATE_NAMES[] = {"running", "done", "stopped", "stalled", "failed"};

#define STALLED_S 60.0          // without a line, or 20 usual times between two lines
#define STALLED_SETUP_S 1800.0  // before the first line of a start

typedef struct {
    const char* directory;
    char name[256];              // the directory, as far as a terminal may show it
    Line line;                   // the last
    bool logged;                 // there is one
    double val;                  // the last; NAN: none
    uint64_t val_step;
    double step_s, gap_s;        // medians: of a step, of what is between two lines; NAN: not known
    double curve[CURVE_CELLS];   // loss over the run; NAN: not known
    double steps, floor;         // to do; entropy of the validation text; NAN: not known
    Event events[EVENTS_SHOWN], saved, turn;  // the last; the last save; the last that begins or ends a start
    size_t event_count;
    uint64_t planned;            // the checkpoint whose manifest was read for `steps`
    bool read;                   // not the first time
    State state;
    char why[768];               // of a state that is not good
    char beat[128];              // the last heartbeat; empty: there is none
    double beat_age;
} View;

static double median(double* values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return count ? values[count / 2] : (double)NAN;
}

// Means of the loss over the run, each of some lines from one of so many equally distant places in the file.
static void view_read_curve(View* v, const char* path, size_t bytes) {
    for (size_t cell = 0; cell < CURVE_CELLS; cell++) {
        size_t first = bytes / CURVE_CELLS * cell, part = bytes / CURVE_CELLS, count = 0;
        if (cell + 1 == CURVE_CELLS) part = bytes - first;
        Tail t;
        Error ignored;
        Json json;
        double sum = 0;
        v->curve[cell] = NAN;
        if (!part_read(&t, path, first, min_size(part + CURVE_BYTES / 4, CURVE_BYTES), &ignored)) continue;
        for (size_t end = t.bytes; line_before(&json, t.text, &end); json_free(&json)) {
            Line line = line_of(&json);
            if (isnan(line.loss)) continue;
            sum += line.loss;
            count++;
        }
        if (count) v->curve[cell] = sum / (double)count;
        free(t.text);
    }
}

// The last validation is the last of its kind in the text.
static void view_find_val(View* v, const Tail* t) {
    static const char key[] = "\"val_loss\": ";
    const char* found = NULL;
    Json json;
    for (const char* at = t->text; at && (at = strstr(at, key)) != NULL; at += sizeof key - 1)
        if (at[sizeof key - 1] != 'n' && at[sizeof key - 1] != '"') found = at;
    const char* line_end = found ? strchr(found, '\n') : NULL;
    size_t end = line_end ? (size_t)(line_end + 1 - t->text) : 0;
    if (end == 0 || !line_before(&json, t->text, &end)) return;
    Line line = line_of(&json);
    if (!isnan(line.val)) v->val = line.val, v->val_step = line.step;
    json_free(&json);
}

static bool view_read_metrics(View* v, bool* found, Error* error) {
    Tail t;
    Json json;
    char path[FILE_PATH_MAX + 32];
    double ms[STEPS_MAX], steps[STEPS_MAX];
    size_t count = 0, timed = 0, gaps = 0;
    uint64_t later = 0;
    if (!tail_read(&t, v->directory, "metrics.jsonl", v->read ? TAIL_BYTES : TAIL_BYTES_FIRST, error)) return false;
    *found = t.found;
    v->logged = false;
    for (size_t end = t.bytes; count < STEPS_MAX && line_before(&json, t.text, &end); json_free(&json)) {
        Line line = line_of(&json);
        if (line.step == 0) continue;
        if (count++ == 0) v->line = line;
        if (line.ms > 0) ms[timed++] = line.ms;
        if (later > line.step) steps[gaps++] = (double)(later - line.step);
        later = line.step;
    }
    v->logged = count > 0;
    if (v->logged && isnan(v->line.time)) v->line.time = t.changed;
    v->step_s = 1e-3 * median(ms, timed);
    v->gap_s = gaps ? v->step_s * median(steps, gaps) : v->step_s;
    view_find_val(v, &t);
    snprintf(path, sizeof path, "%.4000s/metrics.jsonl", v->directory);
    if (v->logged) view_read_curve(v, path, t.file_bytes);
    free(t.text);
    return true;
}

static bool event_is(const Event* e, const char* names) { return choice_find(names, e->name) >= 0; }
#define EVENTS_BEGIN "begun|resumed|start|restart"
#define EVENTS_END "done|stopped|failed|failure|gave up"

static bool view_read_events(View* v, bool* found, Error* error) {
    Tail t;
    Json json;
    if (!tail_read(&t, v->directory, "events.jsonl", TAIL_BYTES, error)) return false;
    *found = *found || t.found;
    v->event_count = 0;
    memset(&v->turn, 0, sizeof v->turn);
    bool turned = false, saved = false;
    for (size_t end = t.bytes; line_before(&json, t.text, &end); json_free(&json)) {
        Event e = event_of(&json);
        if (v->event_count < EVENTS_SHOWN) v->events[v->event_count++] = e;
        if (!turned && event_is(&e, EVENTS_BEGIN "|" EVENTS_END)) v->turn = e, turned = true;
        if (!saved && event_is(&e, "saved")) v->saved = e, saved = true;
    }
    free(t.text);
    return true;
}

// What the run plans: from the last line of run.jsonl, or else from the manifest of the last checkpoint.
static void view_read_plan(View* v) {
    char name[64], text[32] = "";
    Tail t;
    Json json;
    Error ignored;
    if (!tail_read(&t, v->directory, "run.jsonl", TAIL_BYTES, &ignored)) return;
    size_t end = t.bytes;
    bool there = line_before(&json, t.text, &end);
    free(t.text);
    if (there) {
        json_number(&json, json_get(&json, 0, "steps"), &v->steps);
        json_number(&json, json_get(&json, 0, "floor"), &v->floor);
        json_free(&json);
        return;
    }
    if (v->saved.step == 0 || v->saved.step == v->planned) return;
    char path[FILE_PATH_MAX + 64], *manifest;
    size_t bytes;
    v->planned = v->saved.step;
    snprintf(name, sizeof name, "step_%08llu/manifest.json", (unsigned long long)v->saved.step);
    snprintf(path, sizeof path, "%.4000s/%s", v->directory, name);
    if (!file_read(path, JSON_BYTES_MAX, &manifest, &bytes, &ignored)) return;
    if (json_parse(&json, manifest, bytes, path, &ignored)) {
        if (json_string(&json, json_get(&json, json_get(&json, 0, "flags"), "steps"), text, sizeof text))
            v->steps = strtod(text, NULL);
        json_free(&json);
    }
    free(manifest);
}

static void view_judge(View* v, double now) {
    char quiet[32], usual[32];
    double began = event_is(&v->turn, EVENTS_BEGIN) ? v->turn.time : 0, sign = v->logged ? v->line.time : 0;
    bool sets_up = !v->logged || began > sign;
    for (size_t i = 0; i < v->event_count; i++) sign = fmax(sign, v->events[i].time);
    double age = fmax(now - sign, 0), limit = sets_up ? STALLED_SETUP_S : fmax(STALLED_S, 20 * v->gap_s);
    v->why[0] = 0;
    v->state = STATE_RUNNING;
    if (event_is(&v->turn, "done")) v->state = STATE_DONE;
    else if (event_is(&v->turn, "stopped")) v->state = STATE_STOPPED;
    else if (event_is(&v->turn, EVENTS_END)) v->state = STATE_FAILED;
    else if (age > limit && (v->beat[0] == 0 || v->beat_age > limit)) v->state = STATE_STALLED;
    if (v->state == STATE_STOPPED || v->state == STATE_FAILED)
        snprintf(v->why, sizeof v->why, "%s", v->turn.detail);
    if (v->state != STATE_STALLED) return;
    snprintf(quiet, sizeof quiet, "%.0f s", age);
    if (age >= 1000) duration_text(quiet, sizeof quiet, age);
    duration_text(usual, sizeof usual, v->step_s);
    snprintf(v->why, sizeof v->why, v->step_s > 0 ? "no line for %s (usual step %s)" : "no line for %s", quiet, usual);
}

// Reads all that is shown of a run.
static bool view_read(View* v, double now, Error* error) {
    bool found = false;
    char log[FILE_PATH_MAX + 32], ago[32];
    Heartbeat h;
    if (!v->read) v->val = v->steps = v->floor = NAN;
    text_make_visible(v->name, sizeof v->name, v->directory);
    if (!view_read_metrics(v, &found, error) || !view_read_events(v, &found, error)) return false;
    if (!found && !directory_exists(v->directory))
        return fail_with(error, "%.600s is not a directory; check the path", v->directory);
    if (!found)
        return fail_with(error, "%.600s has neither metrics.jsonl nor events.jsonl, as the --out of a run has; check "
                         "the path", v->directory);
    view_read_plan(v);
    v->read = true;
    v->beat[0] = 0;
    snprintf(log, sizeof log, "%.4000s/metrics.jsonl", v->directory);
    if (heartbeat_find(&h, log)) {
        v->beat_age = 1e-3 * fmax(now_ms() - (double)h.ms, 0);
        duration_text(ago, sizeof ago, v->beat_age);
        bool waits = h.phase == HEARTBEAT_COLLECTIVE && h.collective[0];
        snprintf(v->beat, sizeof v->beat, "%s ago, in %s of step %llu", ago,
                 waits ? h.collective : HEARTBEAT_PHASE_NAMES[h.phase], (unsigned long long)h.step);
    }
    view_judge(v, now);
    return true;
}

// Appends to a text if the number is known.
__attribute__((format(printf, 4, 0))) static void number_add(char* text, size_t size, double value,
                                                             const char* format) {
    size_t used = strlen(text);
    if (!isnan(value)) snprintf(text + used, size - used, format, value);
}

static void val_text(char* text, size_t size, const View* v) {
    snprintf(text, size, "%.4f", v->val);
    if (!(v->floor > 0)) return;
    number_add(text, size, v->floor, ", floor %.4f");
    number_add(text, size, 100 * (v->val / v->floor - 1), " (%+.1f%%)");
}

// "step 120/500 (24%), 3.2 min left"; shorter: without words.
static void steps_text(char* text, size_t size, const View* v, bool shorter) {
    char left[32];
    unsigned long long step = v->line.step;
    if (!(v->steps > 0)) {
        snprintf(text, size, "step %llu", step);
        return;
    }
    double done = (double)step / v->steps, rest = (v->steps - (double)step) * v->step_s;
    int used = snprintf(text, size, "%s %llu/%.0f", shorter ? "" : "step", step, v->steps);
    if (!shorter) snprintf(text + used, size - (size_t)used, " (%.0f%%)", floor(100 * fmin(done, 1)));
    if (v->state != STATE_RUNNING || !(rest > 0)) return;
    duration_text(left, sizeof left, rest);
    used = (int)strlen(text);
    snprintf(text + used, size - (size_t)used, ", %s left", left);
}

// ------------------------------------------------------------------------------------------------
// 3. Page

typedef struct {
    size_t columns, rows, row;
    bool ascii;
} Page;

#define RED "\033[31m"
#define GREEN "\033[32m"
#define YELLOW "\033[33m"

// A line, cut at the width of the terminal. color: "" for none.
__attribute__((format(printf, 3, 4))) static void page_line(Page* p, const char* color, const char* format, ...) {
    char text[2048];
    va_list arguments;
    if (++p->row >= p->rows) return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fputs(color, stdout);
    size_t column = 0;
    for (const char* at = text; *at && column < p->columns; column++) {
        size_t n = max_size(utf8_bytes(at), 1);
        if (p->ascii && n > 1) putchar('?');
        else fwrite(at, 1, n, stdout);
        at += n;
    }
    fputs(color[0] ? "\033[0m\033[K\n" : "\033[K\n", stdout);
}

// A character of the curve for each known cell; the first tenth, where the loss falls from its start, does not count
// for the scale.
static void curve_text(char* text, size_t size, const View* v, size_t cells, bool ascii) {
    double known[CURVE_CELLS], low = INFINITY, high = -INFINITY;
    size_t count = 0, used = 0;
    for (size_t i = 0; i < CURVE_CELLS; i++)
        if (isfinite(v->curve[i])) known[count++] = v->curve[i];
    for (size_t i = count / 10; i < count; i++) low = fmin(low, known[i]), high = fmax(high, known[i]);
    cells = min_size(cells, count);
    text[0] = 0;
    for (size_t i = 0; i < cells && used + 4 < size; i++) {
        double sum = 0;
        size_t first = i * count / cells, end = (i + 1) * count / cells;
        for (size_t k = first; k < end; k++) sum += known[k];
        double part = high > low ? (sum / (double)(end - first) - low) / (high - low) : 0;
        int level = (int)fmin(fmax(8 * part, 0), 7);
        used += (size_t)(ascii ? snprintf(text + used, size - used, "%c", "_.:-=+*#"[level])
                               : snprintf(text + used, size - used, "\xE2\x96%c", 0x81 + level));
    }
}

static void page_bar(Page* p, const View* v) {
    char steps[128], bar[3 * CURVE_CELLS + 16];
    steps_text(steps, sizeof steps, v, true);
    size_t used = strlen(steps) + 6;  // the bar's brackets and the percentage
    size_t cells = p->columns > used ? min_size(p->columns - used, CURVE_CELLS) : 0;
    double part = (double)v->line.step / v->steps;
    if (!(v->steps > 0) || cells < PROGRESS_CELLS_MIN) {
        page_line(p, "", "%s", steps);
        return;
    }
    bar_text(bar, sizeof bar, cells, part, p->ascii ? "#" : "\xE2\x96\x88", p->ascii ? "." : "\xE2\x96\x91");
    page_line(p, "", "[%s]%3.0f%%%s", bar, floor(100 * fmin(part, 1)), steps);
}

static void page_numbers(Page* p, const View* v) {
    char text[256] = "", curve[3 * CURVE_CELLS + 16];
    const Line* l = &v->line;
    if (isnan(l->loss)) snprintf(text, sizeof text, "not finite");
    number_add(text, sizeof text, l->loss, "%.4f");
    curve_text(curve, sizeof curve, v, p->columns > 20 ? p->columns - 20 : 0, p->ascii);
    page_line(p, isnan(l->loss) ? RED : "", "loss    %s  %s", text, curve);
    val_text(text, sizeof text, v);
    if (!isnan(v->val)) page_line(p, "", "val     %s, step %llu", text, (unsigned long long)v->val_step);
    snprintf(text, sizeof text, isnan(l->norm) ? "not finite" : "%.3f", l->norm);
    number_add(text, sizeof text, l->lr, ", lr %.2e");
    number_add(text, sizeof text, l->skipped > 0 ? l->skipped : (double)NAN, ", %.0f skipped");
    page_line(p, isnan(l->norm) ? RED : "", "norm    %s", text);
    snprintf(text, sizeof text, "%.0f tok/s", l->rate);
    number_add(text, sizeof text, 100 * l->mfu, ", mfu %.1f%%");
    number_add(text, sizeof text, l->waits >= 0.005 ? 100 * l->waits : (double)NAN, ", waits %.0f%%");
    number_add(text, sizeof text, v->step_s, ", %.3g s a step");
    page_line(p, "", "speed   %s", text);
    text[0] = 0;
    number_add(text, sizeof text, 1e-9 * l->memory, "%.2f GB");
    number_add(text, sizeof text, l->power, ", %.0f W");
    page_line(p, "", "memory  %s", text);
}

static void page_view(Page* p, const View* v, double now) {
    static const char* const colors[] = {GREEN, GREEN, YELLOW, RED, RED};
    char ago[32];
    page_line(p, colors[v->state], "%s: %s", v->name, STATE_NAMES[v->state]);
    if (v->why[0]) page_line(p, colors[v->state], "%s", v->why);
    if (v->logged) page_bar(p, v);
    if (v->logged) page_numbers(p, v);
    if (v->beat[0]) page_line(p, "", "beat    %s", v->beat);
    duration_text(ago, sizeof ago, fmax(now - v->saved.time, 0));
    if (v->saved.name[0]) page_line(p, "", "saved   step %llu, %s ago", (unsigned long long)v->saved.step, ago);
    for (size_t i = v->event_count; i-- > 0;)
        page_line(p, "", "%s %s: %s", v->events[i].clock, v->events[i].name, v->events[i].detail);
    page_line(p, "", "%s", "");
}

// Signals: what to do after the current page.
static volatile sig_atomic_t page_signal;
static void page_signaled(int number) {
    if (page_signal != SIGINT && page_signal != SIGTERM) page_signal = number;
}

// The page is on the terminal's second screen, without a cursor and without wrapping.
static void page_open(void) { fputs("\033[?1049h\033[?25l\033[?7l", stdout); }
static void page_close(void) {
    fputs("\033[?7h\033[?25h\033[?1049l", stdout);
    fflush(stdout);
}

// ------------------------------------------------------------------------------------------------
// 4. Main

static void print_line(const View* v) {
    char steps[128], text[256] = "";
    const Line* l = &v->line;
    printf("%s: %s%s%s", v->name, STATE_NAMES[v->state], v->why[0] ? ": " : "", v->why);
    if (v->logged) {
        steps_text(steps, sizeof steps, v, false);
        number_add(text, sizeof text, l->loss, ", loss %.4f");
        printf("; %s%s", steps, isnan(l->loss) ? ", loss not finite" : text);
        val_text(text, sizeof text, v);
        if (!isnan(v->val)) printf(", val %s", text);
        if (!isnan(l->rate)) printf(", %.0f tok/s", l->rate);
    }
    if (v->saved.name[0]) printf(", saved step %llu", (unsigned long long)v->saved.step);
    printf("\n");
}

// The exit code for all runs.
static int views_code(const View* views, size_t count) {
    int code = 0;
    for (size_t i = 0; i < count; i++) {
        if (views[i].state >= STATE_STALLED) return 1;
        if (views[i].state == STATE_STOPPED) code = EXIT_SAVED;
    }
    return code;
}

// Draws the page until a signal ends it.
static void views_watch(View* views, size_t count, bool ascii) {
    const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGTSTP};
    struct sigaction action = {.sa_handler = page_signaled};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) sigaction(signals[i], &action, NULL);
    page_open();
    while (page_signal == 0 || page_signal == SIGWINCH || page_signal == SIGTSTP) {
        Page page = {.ascii = ascii};
        Error error;
        if (page_signal == SIGTSTP) {
            page_close();
            raise(SIGSTOP);
            page_open();
        }
        page_signal = 0;
        terminal_size(&page.columns, &page.rows, STDOUT_FILENO);
        double now = unix_seconds();
        fputs("\033[H", stdout);
        for (size_t i = 0; i < count; i++) {
            if (view_read(&views[i], now, &error)) page_view(&page, &views[i], now);
            else page_line(&page, RED, "%s", error.text);
        }
        fputs("\033[J", stdout);
        if (fflush(stdout) != 0) break;  // the terminal is gone
        if (page_signal == 0) poll(NULL, 0, 1000);
    }
    page_close();
}

int main(int argc, char** argv) {
    enum { RUNS_MAX = 64 };
    static View views[RUNS_MAX];
    bool ascii, once;
    const Flag rows[] = {
        FLAG_SWITCH("ascii", &ascii, false, 0, "draw bars and curves with ASCII characters alone"),
        FLAG_SWITCH("once", &once, false, 0, "print a line for each run and exit, as where the output is no terminal"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    Error error;
    const char* terminal = getenv("TERM");
    size_t count = 0;
    int code, kept = 1;
    files_open_standard();
    for (int i = 1; i < argc; i++) {
        bool value = strcmp(argv[i], "on") == 0 || strcmp(argv[i], "off") == 0;
        bool is_run = argv[i][0] != '-' && !(value && strncmp(argv[i - 1], "--", 2) == 0);
        if (!is_run) argv[kept++] = argv[i];
        else if (count < RUNS_MAX) views[count++].directory = argv[i];
    }
    const char* title = "watch DIR...: shows how the runs in these directories (--out) are doing\n";
    if (!flags_begin(&code, "watch", title, &flags, kept, argv)) return code;
    bool good = count > 0 || fail_with(&error, "give the directories of runs, as in: watch runs/x");
    for (size_t i = 0; good && i < count; i++) good = view_read(&views[i], unix_seconds(), &error);
    if (!good) {
        fprintf(stderr, "watch: %s\n", error.text);
        return 2;
    }
    if (!once && isatty(STDOUT_FILENO) && !(terminal && strcmp(terminal, "dumb") == 0)) {
        views_watch(views, count, ascii);
        return views_code(views, count);
    }
    for (size_t i = 0; i < count; i++) print_line(&views[i]);
    if (output_written(&error)) return views_code(views, count);
    fprintf(stderr, "watch: %s\n", error.text);
    return 1;
}
