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
//   1. files    parts of files, lines, events, heartbeats
//   2. view     what is known of a run, and its state
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

// A part of a file: whole lines, without those that are not complete yet.
typedef struct {
    char* text;
    size_t bytes, file_bytes;
    double changed;  // Unix seconds
    bool found;
} Part;

static double unix_seconds(void) {
    const char* test = getenv("LLMTRAIN_TEST_NOW");
    return test ? strtod(test, NULL) : unix_time();
}

// Reads at most `most` bytes from `first` on, SIZE_MAX: of the end; fewer if the file, which may be cut meanwhile, has
// fewer. A file that is not there is no error.
static bool part_read(Part* p, const char* directory, const char* name, size_t first, size_t most, Error* error) {
    char path[FILE_PATH_MAX + 32];
    struct stat status;
    memset(p, 0, sizeof *p);
    snprintf(path, sizeof path, "%.4000s/%s", directory, name);
    p->found = stat(path, &status) == 0;
    if (!p->found) return errno == ENOENT || errno == ENOTDIR || fail_file(error, "look at", path);
    int file = file_open(&p->file_bytes, path, error);
    if (file < 0) return false;
    p->changed = (double)status.st_mtime;
    if (first == SIZE_MAX) first = p->file_bytes - min_size(p->file_bytes, most);
    most = min_size(most, p->file_bytes - min_size(first, p->file_bytes));
    p->text = (char*)memory_allocate(most + 1);
    ssize_t n = p->text ? pread(file, p->text, most, (off_t)first) : 0;
    bool good = p->text ? n >= 0 || fail_file(error, "read", path) : fail_memory(error, path, most);
    close(file);
    if (!good) return free(p->text), false;
    size_t begin = 0, end = (size_t)n;
    while (end > 0 && p->text[end - 1] != '\n') end--;
    while (first > 0 && begin < end && p->text[begin++] != '\n') {}  // the rest of a line
    p->bytes = end - begin;
    memmove(p->text, p->text + begin, p->bytes);
    p->text[p->bytes] = 0;
    for (size_t i = 0; i < p->bytes; i++)
        if (p->text[i] == 0) p->text[i] = ' ';  // what a power cut leaves
    return true;
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

// A number of a line; NAN: it does not have that.
static double number_of(const Json* line, const char* key) {
    double number = NAN;
    json_number(line, json_get(line, 0, key), &number);
    return number;
}

typedef struct {
    double step, time;  // Unix seconds
    char clock[12], name[32], detail[512];
} Event;

static Event event_of(const Json* json) {
    Event e = {0};
    char text[64] = "", detail[1024] = "";
    json_number(json, json_get(json, 0, "step"), &e.step);
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

// Seconds since the last heartbeat of the rank 0 that has a log open; INFINITY without a supervisor on this machine.
static double heartbeat_age(const char* log) {
    double age = INFINITY;
    glob_t files = {0};
    glob(SYSTEM_MEMORY_FOLDER "/llmtrain-locked-??????", GLOB_NOSORT, NULL, &files);
    glob("/tmp/llmtrain-locked-??????", GLOB_NOSORT | GLOB_APPEND, NULL, &files);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        char* copy;
        size_t bytes;
        Error ignored;
        if (!file_read(files.gl_pathv[i], sizeof(Heartbeats), &copy, &bytes, &ignored)) continue;
        const Heartbeats* all = (const Heartbeats*)(const void*)copy;
        for (size_t k = 0; bytes == sizeof *all && k < min_size(all->count, HEARTBEAT_RANKS); k++) {
            const Heartbeat* h = &all->ranks[k];
            if (h->rank == 0 && !h->closed && process_has_open((pid_t)h->pid, log))
                age = 1e-3 * (now_ms() - (double)h->ms);
        }
        free(copy);
    }
    globfree(&files);
    return age;
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
    Json line;                   // the last of metrics.jsonl
    bool logged;                 // there is one
    size_t log_bytes;            // of the file
    double step, time;           // its own
    double val, val_step;        // the last; NAN: none
    double step_s, gap_s;        // medians: of a step, of what is between two lines; NAN: not known
    double steps, floor;         // to do; entropy of the validation text; NAN: not known
    Event events[EVENTS_SHOWN], saved, turn;  // the last; the last save; the last that begins or ends a start
    size_t event_count;
    bool read;                   // not the first time
    State state;
    char why[768];               // of a state that is not good
} View;

static double median(double* values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return count ? values[count / 2] : (double)NAN;
}

// The last validation is the last of its kind in the text.
static void view_find_val(View* v, const Part* p) {
    static const char key[] = "\"val_loss\": ";
    const char* found = NULL;
    Json json;
    for (const char* at = p->text; at && (at = strstr(at, key)) != NULL; at += sizeof key - 1)
        if (at[sizeof key - 1] != 'n' && at[sizeof key - 1] != '"') found = at;
    const char* line_end = found ? strchr(found, '\n') : NULL;
    size_t end = line_end ? (size_t)(line_end + 1 - p->text) : 0;
    if (end == 0 || !line_before(&json, p->text, &end)) return;
    v->val = number_of(&json, "val_loss");
    v->val_step = number_of(&json, "step");
    json_free(&json);
}

static bool view_read_metrics(View* v, bool* found, Error* error) {
    Part p;
    Json json;
    double ms[STEPS_MAX], steps[STEPS_MAX], later = 0;
    size_t count = 0, timed = 0, gaps = 0, most = v->read ? TAIL_BYTES : TAIL_BYTES_FIRST;
    if (!part_read(&p, v->directory, "metrics.jsonl", SIZE_MAX, most, error)) return false;
    *found = p.found;
    v->log_bytes = p.file_bytes;
    json_free(&v->line);
    for (size_t end = p.bytes; count < STEPS_MAX && line_before(&json, p.text, &end); json_free(&json)) {
        double step = number_of(&json, "step"), took = number_of(&json, "ms");
        if (!(step > 0)) continue;
        if (took > 0) ms[timed++] = took;
        if (later > step) steps[gaps++] = later - step;
        later = step;
        if (count++ > 0) continue;
        v->line = json;
        v->step = step;
        memset(&json, 0, sizeof json);
    }
    v->logged = count > 0;
    v->time = v->logged ? number_of(&v->line, "time") : 0;
    if (isnan(v->time)) v->time = p.changed;
    v->step_s = 1e-3 * median(ms, timed);
    v->gap_s = gaps ? v->step_s * median(steps, gaps) : v->step_s;
    view_find_val(v, &p);
    free(p.text);
    return true;
}

static bool event_is(const Event* e, const char* names) { return choice_find(names, e->name) >= 0; }
#define EVENTS_BEGIN "begun|resumed|start|restart"
#define EVENTS_END "done|stopped|failed|failure|gave up"

static bool view_read_events(View* v, bool* found, Error* error) {
    Part p;
    Json json;
    if (!part_read(&p, v->directory, "events.jsonl", SIZE_MAX, TAIL_BYTES, error)) return false;
    *found = *found || p.found;
    v->event_count = 0;
    memset(&v->turn, 0, sizeof v->turn);
    bool turned = false, saved = false;
    for (size_t end = p.bytes; line_before(&json, p.text, &end); json_free(&json)) {
        Event e = event_of(&json);
        if (v->event_count < EVENTS_SHOWN) v->events[v->event_count++] = e;
        if (!turned && event_is(&e, EVENTS_BEGIN "|" EVENTS_END)) v->turn = e, turned = true;
        if (!saved && event_is(&e, "saved")) v->saved = e, saved = true;
    }
    free(p.text);
    return true;
}

// What the run plans: from the last line of run.jsonl.
static void view_read_plan(View* v) {
    Part p;
    Json json;
    Error ignored;
    if (!part_read(&p, v->directory, "run.jsonl", SIZE_MAX, TAIL_BYTES, &ignored)) return;
    size_t end = p.bytes;
    if (line_before(&json, p.text, &end)) {
        v->steps = number_of(&json, "steps");
        v->floor = number_of(&json, "floor");
        json_free(&json);
    }
    free(p.text);
}

static void view_judge(View* v, double now) {
    char quiet[32], usual[32], log[FILE_PATH_MAX + 32];
    double began = event_is(&v->turn, EVENTS_BEGIN) ? v->turn.time : 0, sign = v->time;
    bool sets_up = !v->logged || began > sign;
    for (size_t i = 0; i < v->event_count; i++) sign = fmax(sign, v->events[i].time);
    double age = fmax(now - sign, 0), limit = sets_up ? STALLED_SETUP_S : fmax(STALLED_S, 20 * v->gap_s);
    snprintf(log, sizeof log, "%.4000s/metrics.jsonl", v->directory);
    v->why[0] = 0;
    v->state = STATE_RUNNING;
    if (event_is(&v->turn, "done")) v->state = STATE_DONE;
    else if (event_is(&v->turn, "stopped")) v->state = STATE_STOPPED;
    else if (event_is(&v->turn, EVENTS_END)) v->state = STATE_FAILED;
    else if (age > limit && heartbeat_age(log) > limit) v->state = STATE_STALLED;
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
    double rest = (v->steps - v->step) * v->step_s;
    snprintf(text, size, "%s %.0f", shorter && v->steps > 0 ? "" : "step", v->step);
    if (!(v->steps > 0)) return;
    number_add(text, size, v->steps, "/%.0f");
    if (!shorter) number_add(text, size, floor(100 * fmin(v->step / v->steps, 1)), " (%.0f%%)");
    if (v->state != STATE_RUNNING || !(rest > 0)) return;
    duration_text(left, sizeof left, rest);
    size_t used = strlen(text);
    snprintf(text + used, size - used, ", %s left", left);
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

// Means of the loss over the run, at most `cells`, each of some lines from one of so many equally distant places in the
// file; returns how many are known.
static size_t curve_read(double curve[CURVE_CELLS], const View* v, size_t cells) {
    Part p;
    Error ignored;
    Json json;
    size_t known = 0;
    for (size_t cell = 0; cell < cells; cell++) {
        size_t first = v->log_bytes / cells * cell, count = 0;
        size_t part = cell + 1 < cells ? v->log_bytes / cells : v->log_bytes - first;
        double sum = 0;
        size_t most = min_size(part + CURVE_BYTES / 4, CURVE_BYTES);
        if (!part_read(&p, v->directory, "metrics.jsonl", first, most, &ignored)) continue;
        for (size_t at = p.bytes; line_before(&json, p.text, &at); json_free(&json)) {
            double loss = number_of(&json, "loss");
            if (isnan(loss)) continue;
            sum += loss;
            count++;
        }
        if (count) curve[known++] = sum / (double)count;
        free(p.text);
    }
    return known;
}

// A character for each cell; the first tenth, where the loss falls from its start, does not count for the scale.
static void curve_text(char* text, size_t size, const double* curve, size_t cells, bool ascii) {
    double low = INFINITY, high = -INFINITY;
    size_t used = 0;
    for (size_t i = cells / 10; i < cells; i++) low = fmin(low, curve[i]), high = fmax(high, curve[i]);
    text[0] = 0;
    for (size_t i = 0; i < cells && used + 4 < size; i++) {
        double part = high > low ? (curve[i] - low) / (high - low) : 0;
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
    double part = v->step / v->steps;
    if (!(v->steps > 0) || cells < PROGRESS_CELLS_MIN) {
        page_line(p, "", "%s", steps);
        return;
    }
    bar_text(bar, sizeof bar, cells, part, p->ascii ? "#" : "\xE2\x96\x88", p->ascii ? "." : "\xE2\x96\x91");
    page_line(p, "", "[%s]%3.0f%%%s", bar, floor(100 * fmin(part, 1)), steps);
}

static void page_numbers(Page* p, const View* v) {
    char text[256] = "", curve[3 * CURVE_CELLS + 16];
    double losses[CURVE_CELLS], loss = number_of(&v->line, "loss"), norm = number_of(&v->line, "grad_norm");
    double skipped = number_of(&v->line, "skipped"), waits = number_of(&v->line, "wait_share");
    size_t cells = curve_read(losses, v, p->columns > 20 ? min_size(p->columns - 20, CURVE_CELLS) : 0);
    if (isnan(loss)) snprintf(text, sizeof text, "not finite");
    number_add(text, sizeof text, loss, "%.4f");
    curve_text(curve, sizeof curve, losses, cells, p->ascii);
    page_line(p, isnan(loss) ? RED : "", "loss    %s  %s", text, curve);
    val_text(text, sizeof text, v);
    if (!isnan(v->val)) page_line(p, "", "val     %s, step %.0f", text, v->val_step);
    snprintf(text, sizeof text, isnan(norm) ? "not finite" : "%.3f", norm);
    number_add(text, sizeof text, number_of(&v->line, "lr"), ", lr %.2e");
    if (skipped > 0) number_add(text, sizeof text, skipped, ", %.0f skipped");
    page_line(p, isnan(norm) ? RED : "", "norm    %s", text);
    snprintf(text, sizeof text, "%.0f tok/s", number_of(&v->line, "tok_per_s"));
    number_add(text, sizeof text, 100 * number_of(&v->line, "mfu"), ", mfu %.1f%%");
    if (waits >= 0.005) number_add(text, sizeof text, 100 * waits, ", waits %.0f%%");
    number_add(text, sizeof text, v->step_s, ", %.3g s a step");
    page_line(p, "", "speed   %s", text);
    text[0] = 0;
    number_add(text, sizeof text, 1e-9 * number_of(&v->line, "mem_bytes"), "%.2f GB");
    number_add(text, sizeof text, number_of(&v->line, "power_w"), ", %.0f W");
    page_line(p, "", "memory  %s", text);
}

static void page_view(Page* p, const View* v, double now) {
    static const char* const colors[] = {GREEN, GREEN, YELLOW, RED, RED};
    char ago[32];
    page_line(p, colors[v->state], "%s: %s", v->name, STATE_NAMES[v->state]);
    if (v->why[0]) page_line(p, colors[v->state], "%s", v->why);
    if (v->logged) page_bar(p, v);
    if (v->logged) page_numbers(p, v);
    duration_text(ago, sizeof ago, fmax(now - v->saved.time, 0));
    if (v->saved.name[0]) page_line(p, "", "saved   step %.0f, %s ago", v->saved.step, ago);
    for (size_t i = v->event_count; i-- > 0;)
        page_line(p, "", "%s %s: %s", v->events[i].clock, v->events[i].name, v->events[i].detail);
    page_line(p, "", "%s", "");
}

// Signals: what to do after the current page, or at once.
static volatile sig_atomic_t page_ends, page_suspends, page_changes;
static void page_signaled(int number) {
    page_changes = 1;
    if (number == SIGTSTP) page_suspends = 1;
    else if (number != SIGWINCH) page_ends = 1;
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
    char steps[128], text[256] = ", loss not finite";
    printf("%s: %s%s%s", v->name, STATE_NAMES[v->state], v->why[0] ? ": " : "", v->why);
    if (v->logged) {
        double loss = number_of(&v->line, "loss"), rate = number_of(&v->line, "tok_per_s");
        steps_text(steps, sizeof steps, v, false);
        if (!isnan(loss)) snprintf(text, sizeof text, ", loss %.4f", loss);
        printf("; %s%s", steps, text);
        val_text(text, sizeof text, v);
        if (!isnan(v->val)) printf(", val %s", text);
        if (!isnan(rate)) printf(", %.0f tok/s", rate);
    }
    if (v->saved.name[0]) printf(", saved step %.0f", v->saved.step);
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
    while (!page_ends) {
        Page page = {.ascii = ascii};
        Error error;
        page_changes = 0;
        if (page_suspends) {
            page_suspends = 0;
            page_close();
            raise(SIGSTOP);
            page_open();
        }
        terminal_size(&page.columns, &page.rows, STDOUT_FILENO);
        double now = unix_seconds();
        fputs("\033[H", stdout);
        for (size_t i = 0; i < count; i++) {
            if (view_read(&views[i], now, &error)) page_view(&page, &views[i], now);
            else page_line(&page, RED, "%s", error.text);
        }
        fputs("\033[J", stdout);
        if (fflush(stdout) != 0) break;  // the terminal is gone
        if (!page_changes && !page_ends) poll(NULL, 0, 1000);
    }
    page_close();
}

int main(int argc, char** argv) {
    static View* views;
    bool ascii, once;
    const Flag rows[] = {
        FLAG_SWITCH("ascii", &ascii, false, 0, "draw bars and curves with ASCII characters alone"),
        FLAG_SWITCH("once", &once, false, 0, "print a line per run and exit, as when the output is not a terminal"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    Error error;
    const char* terminal = getenv("TERM");
    size_t count = 0;
    int code, kept = 1;
    files_open_standard();
    views = (View*)memory_allocate((size_t)argc * sizeof *views);
    for (int i = 1; views && i < argc; i++) {
        bool value = strcmp(argv[i], "on") == 0 || strcmp(argv[i], "off") == 0;
        bool is_run = argv[i][0] != '-' && !(value && strncmp(argv[i - 1], "--", 2) == 0);
        if (is_run) views[count++].directory = argv[i];
        else argv[kept++] = argv[i];
    }
    const char* title = "watch DIR...: shows how the runs in these directories (--out) are doing\n";
    if (!flags_begin(&code, "watch", title, &flags, kept, argv)) return code;
    bool good = (views || fail_memory(&error, "the runs", (size_t)argc * sizeof *views)) &&
                (count > 0 || fail_with(&error, "give the directories of runs, as in: watch runs/x"));
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
