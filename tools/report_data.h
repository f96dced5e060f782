// report_data.h: the files of a run, in memory that does not grow with their lines: what build/report shows.
//
//   Run run;
//   if (!run_read(&run, "runs/x", COLUMNS_MAX, &error)) ...
//   run_free(&run);
//
// Of metrics.jsonl, which may have millions of lines, each is read once. COLUMNS_MAX columns keep of every number the
// minimum, the maximum and the sum of some lines each; when all are full, each two become one. So no spike is lost. The
// ranks' times are kept in the same way. What is no whole line, as the last one of a run that was killed may be, is
// counted and left out, and so is a file that is not there.

#ifndef LLMTRAIN_REPORT_DATA_H
#define LLMTRAIN_REPORT_DATA_H

#include "../llmtrain/base/files.h"
#include "../llmtrain/base/json.h"
#include "../llmtrain/run/goodput.h"

#include <assert.h>

enum { RUNS_MAX = 8, COLUMNS_MAX = 800, HEAT_COLUMNS = 512, HEAT_ROWS = 256, EVENTS_SHOWN = 50,
       SAMPLES_KEPT = 8, WORST_KEPT = 10 };

// ------------------------------------------------------------------------------------------------
// 1. Metrics

typedef enum {
    KEY_STEP, KEY_TOKENS, KEY_TIME, KEY_LOSS, KEY_VAL, KEY_NORM, KEY_LR, KEY_SKIPPED, KEY_MS, KEY_MS_MEDIAN, KEY_MS_MAX,
    KEY_WAIT, KEY_LOAD, KEY_RATE, KEY_MFU, KEY_MEMORY, KEY_CLIP, KEY_POWER, KEY_ENERGY, KEY_TEMPERATURE, KEY_CLOCK,
    KEY_WORST, KEY_ACCURACY, KEY_MARGIN, KEY_CHOSEN, KEY_REJECTED, KEYS
} Key;

static const char* const KEY_NAMES[] = {
    "step", "tokens", "time", "loss", "val_loss", "grad_norm", "lr", "skipped", "ms", "ms_ranks_median", "ms_ranks_max",
    "wait_share", "load_ms", "tok_per_s", "mfu", "mem_bytes", "clip", "power_w", "joules_per_token", "gpu_temp_c",
    "clock_mhz", "worst_loss", "reward_accuracy", "reward_margin", "logp_chosen", "logp_rejected",
};
static_assert(sizeof KEY_NAMES / sizeof *KEY_NAMES == KEYS, "each key has a name");

typedef struct {
    double low, high, sum;
    uint64_t count;      // of lines that have the number
} Cell;

// Some lines of the metrics, one after the other.
typedef struct {
    double step, tokens, seconds;  // of the last of them; seconds since training began
    Cell cells[KEYS];
} Column;

typedef struct {
    Column* columns;     // `most` of them, at most COLUMNS_MAX
    size_t most, count;  // even; of columns in use
    uint64_t per_column, in_last, lines, broken;
    double last[KEYS];   // the last number of each key; NAN: there is none
    double joules;
    double best_val, best_step;
} Metrics;

// A decimal number, to 15 digits, in a fraction of strtod's time; *p is left behind it.
static inline double metrics_number(const char** p) {
    static const double tens[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                  1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char* at = *p + (**p == '-');
    uint64_t digits = 0;
    int exponent = 0, point = 0;
    for (;; at++) {
        if (*at == '.' && !point) point = 1;
        else if (*at < '0' || *at > '9') break;
        else if (digits < (uint64_t)1e17) digits = digits * 10 + (uint64_t)(*at - '0'), exponent -= point;
        else exponent += !point;
    }
    if (*at == 'e' || *at == 'E') {
        char* end;
        exponent += (int)fmin(fmax((double)strtol(at + 1, &end, 10), -9999), 9999);
        at = end;
    }
    double value = (double)digits;
    if (exponent < -22 || exponent > 22) value = strtod(*p + (**p == '-'), NULL);
    else value = exponent < 0 ? value / tens[-exponent] : value * tens[exponent];
    value = **p == '-' ? -value : value;
    *p = at;
    return value;
}

// Reads a line of metrics.jsonl: not json_parse, which would take longer for a line than the rest of the program.
// values: NAN for what is not there or no number. False if the line is not a whole object.
static inline bool metrics_line(double values[KEYS], const char* p) {
    int next = 0;  // lines have their keys in the order of the one before
    for (int i = 0; i < KEYS; i++) values[i] = NAN;
    for (bool first = true; *p != '}'; first = false) {
        if (*p++ != (first ? '{' : ',')) return false;
        p += strspn(p, " ");
        const char* name = p + 1;
        size_t length = strcspn(name, "\"\\");
        if (*p != '"' || name[length] != '"') return false;
        p = name + length + 1;
        p += strspn(p, " ");
        if (*p++ != ':') return false;
        p += strspn(p, " ");
        int key = -1;
        for (int i = 0; i < KEYS && key < 0; i++) {
            const char* known = KEY_NAMES[(next + i) % KEYS];
            bool same = *known == *name && strncmp(known, name, length) == 0 && known[length] == 0;
            if (same) key = (next + i) % KEYS;
        }
        bool number = *p == '-' || (*p >= '0' && *p <= '9');
        if (key >= 0) next = key + 1;
        if (number && key >= 0) values[key] = metrics_number(&p);
        if (number && key >= 0 && !isfinite(values[key])) values[key] = NAN;
        size_t skipped = *p == '"' ? 1 + strcspn(p + 1, "\"") : *p == '[' ? strcspn(p, "]") : 0;
        if (p[skipped] == 0) return false;
        p += skipped ? skipped + 1 : strspn(p, "+-.0123456789abcdefghijklmnopqrstuvwxyzEINT");
        p += strspn(p, " ");
    }
    return p[1 + strspn(p + 1, " \r\n")] == 0;
}

static inline void cell_add(Cell* cell, const Cell* other) {
    if (other->count == 0) return;
    cell->low = cell->count ? fmin(cell->low, other->low) : other->low;
    cell->high = cell->count ? fmax(cell->high, other->high) : other->high;
    cell->sum += other->sum;
    cell->count += other->count;
}

static inline void column_add(Column* column, const Column* other) {
    column->step = other->step;
    column->tokens = other->tokens;
    column->seconds = other->seconds;
    for (int i = 0; i < KEYS; i++) cell_add(&column->cells[i], &other->cells[i]);
}

static inline double cell_mean(const Cell* cell) { return cell->count ? cell->sum / (double)cell->count : NAN; }

// Adds a line. One whose step is not after the step before is of a run that went back, and is left out.
static inline void metrics_add(Metrics* m, const double values[KEYS]) {
    Column line;
    const double* last = m->last;
    double steps = values[KEY_STEP] - (m->lines ? last[KEY_STEP] : 0), ms = values[KEY_MS];
    if (!(steps > 0)) return;
    bool timed = values[KEY_TIME] >= last[KEY_TIME];  // false if one of them is NAN
    double seconds = timed ? values[KEY_TIME] - last[KEY_TIME] : isfinite(ms) ? ms / 1e3 * steps : 0;
    double tokens = values[KEY_TOKENS] - (m->lines ? last[KEY_TOKENS] : 0);
    bool new_column = m->count == 0 || m->in_last == m->per_column;
    if (new_column && m->count == m->most) {
        m->count /= 2;
        for (size_t i = 0; i < m->count; i++) {
            column_add(&m->columns[2 * i], &m->columns[2 * i + 1]);
            if (i > 0) m->columns[i] = m->columns[2 * i];
        }
        m->per_column *= 2;
    }
    line.step = values[KEY_STEP];
    line.tokens = isfinite(tokens) ? values[KEY_TOKENS] : 0;
    line.seconds = seconds + (m->count ? m->columns[m->count - 1].seconds : 0);
    for (int i = 0; i < KEYS; i++) {
        Cell cell = {values[i], values[i], values[i], 1}, none = {0, 0, 0, 0};
        line.cells[i] = isfinite(values[i]) ? cell : none;
        if (isfinite(values[i]) || i == KEY_TIME) m->last[i] = values[i];
    }
    if (isfinite(values[KEY_ENERGY]) && tokens > 0) m->joules += values[KEY_ENERGY] * tokens;
    if (values[KEY_VAL] < m->best_val || (isnan(m->best_val) && isfinite(values[KEY_VAL]))) {
        m->best_val = values[KEY_VAL];
        m->best_step = values[KEY_STEP];
    }
    m->lines++;
    m->in_last = new_column ? 1 : m->in_last + 1;
    if (new_column) m->columns[m->count++] = line;
    else column_add(&m->columns[m->count - 1], &line);
}

// The mean of a key over the last columns, a fiftieth of the run.
static inline double metrics_recent(const Metrics* m, Key key) {
    Cell cell = {0, 0, 0, 0};
    for (size_t n = m->count / 50 + 1, i = m->count > n ? m->count - n : 0; i < m->count; i++)
        cell_add(&cell, &m->columns[i].cells[key]);
    return cell_mean(&cell);
}

static inline double metrics_mean(const Metrics* m, Key key) {
    Cell cell = {0, 0, 0, 0};
    for (size_t i = 0; i < m->count; i++) cell_add(&cell, &m->columns[i].cells[key]);
    return cell_mean(&cell);
}

static inline double metrics_seconds(const Metrics* m) { return m->count ? m->columns[m->count - 1].seconds : 0; }

// ------------------------------------------------------------------------------------------------
// 2. Events

typedef enum { MARK_START, MARK_SAVE, MARK_REWIND, MARK_BATCH, MARK_WARNING, MARK_FAULT, MARK_END, MARKS } MarkKind;

static const struct {
    const char* event;
    MarkKind kind;
} MARK_EVENTS[] = {
    {"begun", MARK_START}, {"resumed", MARK_START}, {"saved", MARK_SAVE}, {"rewound", MARK_REWIND},
    {"bad_batch", MARK_BATCH}, {"slow", MARK_WARNING}, {"throttled", MARK_WARNING}, {"hot", MARK_WARNING},
    {"fewer ranks", MARK_WARNING}, {"damaged", MARK_FAULT}, {"not_saved", MARK_FAULT}, {"not_logged", MARK_FAULT},
    {"failure", MARK_FAULT}, {"failed", MARK_FAULT}, {"gave up", MARK_FAULT}, {"xid", MARK_FAULT}, {"ecc", MARK_FAULT},
    {"stopped", MARK_END}, {"done", MARK_END}, {"no_gain", MARK_END},
};

typedef enum { STATE_RUNNING, STATE_DONE, STATE_STOPPED, STATE_FAILED } RunState;

typedef struct {
    double step;
    MarkKind kind;
} Mark;

typedef struct {
    char shard[FILE_PATH_MAX];
    double step, at, tokens, loss, norm;
} Worst;

typedef struct {
    char* text;                   // of events.jsonl
    size_t bytes;
    const char* shown[EVENTS_SHOWN];  // the last events, a ring: lines of the text
    size_t count;                 // of all events
    Mark* marks;
    size_t mark_count, mark_capacity;
    Worst worst[WORST_KEPT];      // the sequences with the highest losses
    size_t worst_count;
    RunState state;
} Events;

// The order of the worst sequences. One without a number as its loss is the worst.
static inline double worst_rank(const Worst* w) { return isfinite(w->loss) ? w->loss : INFINITY; }

static inline void events_add_worst(Events* e, const Json* json, uint32_t node, double step) {
    Worst w;
    memset(&w, 0, sizeof w);
    w.step = step;
    w.at = w.tokens = w.loss = w.norm = NAN;
    if (!json_string(json, json_get(json, node, "shard"), w.shard, sizeof w.shard)) return;
    json_number(json, json_get(json, node, "at"), &w.at);
    json_number(json, json_get(json, node, "tokens"), &w.tokens);
    json_number(json, json_get(json, node, "loss"), &w.loss);
    json_number(json, json_get(json, node, "grad_norm"), &w.norm);
    for (size_t k = 0; k < e->worst_count; k++)  // a step that was made again has the same sequences
        if (e->worst[k].step == step && e->worst[k].at == w.at && strcmp(e->worst[k].shard, w.shard) == 0) return;
    size_t i = e->worst_count;
    if (i == WORST_KEPT && worst_rank(&w) <= worst_rank(&e->worst[i - 1])) return;
    if (i < WORST_KEPT) e->worst_count++;
    else i--;
    for (; i > 0 && worst_rank(&w) > worst_rank(&e->worst[i - 1]); i--) e->worst[i] = e->worst[i - 1];
    e->worst[i] = w;
}

// What a run does after an event.
static inline RunState state_after(RunState before, const char* event) {
    if (strcmp(event, "done") == 0) return STATE_DONE;
    if (strcmp(event, "stopped") == 0) return before == STATE_DONE ? before : STATE_STOPPED;
    if (strcmp(event, "failed") == 0 || strcmp(event, "failure") == 0 || strcmp(event, "gave up") == 0)
        return STATE_FAILED;
    bool begins = strcmp(event, "begun") == 0 || strcmp(event, "resumed") == 0 || strcmp(event, "start") == 0;
    return begins ? STATE_RUNNING : before;
}

static inline bool events_add(Events* e, const char* line, size_t bytes, Error* error) {
    Json json;
    Error ignored;
    char name[64];
    double step = 0;
    bool good = true;
    if (!json_parse(&json, line, bytes, "event", &ignored)) return true;
    if (!json_string(&json, json_get(&json, 0, "event"), name, sizeof name)) return json_free(&json), true;
    json_number(&json, json_get(&json, 0, "step"), &step);
    for (size_t i = 0; good && i < sizeof MARK_EVENTS / sizeof *MARK_EVENTS; i++) {
        if (strcmp(name, MARK_EVENTS[i].event) != 0) continue;
        good = memory_grow(&e->marks, &e->mark_capacity, e->mark_count + 1, sizeof *e->marks);
        if (good) e->marks[e->mark_count++] = (Mark){step, MARK_EVENTS[i].kind};
    }
    e->state = state_after(e->state, name);
    e->shown[e->count++ % EVENTS_SHOWN] = line;
    uint32_t sequences = json_get(&json, 0, "sequences");
    for (uint32_t i = json_first(&json, sequences); i != JSON_NONE; i = json_next(&json, i))
        events_add_worst(e, &json, i, step);
    json_free(&json);
    return good || fail_with(error, "out of memory for %zu events", e->mark_count);
}

// ------------------------------------------------------------------------------------------------
// 3. Ranks

typedef struct {
    float ratio;         // the sum of a band of ranks' times, each of the median
    uint32_t count;
} HeatCell;

typedef struct {
    double busy, wait, ratio;
    uint64_t lines, slowest;
} RankSum;

typedef struct {
    HeatCell* cells;     // (HEAT_COLUMNS, HEAT_ROWS)
    double steps[HEAT_COLUMNS];
    size_t count, rows, ranks, sum_capacity;
    uint64_t per_column, in_last;
    RankSum* sums;       // of each rank
    double *busy, *wait, *order;  // a line
    size_t line_capacity[3];
} Heat;

// The numbers of an array in a line; null is NAN.
static inline bool ranks_numbers(double** numbers, size_t* capacity, size_t* count, const char* line, const char* key) {
    const char* p = strstr(line, key);
    *count = 0;
    if (p == NULL) return true;
    p += strlen(key);
    p += strspn(p, " :[");
    while (*p && *p != ']') {
        if (!memory_grow(numbers, capacity, *count + 1, sizeof **numbers)) return false;
        char* end = NULL;
        double value = *p == 'n' ? NAN : strtod(p, &end);
        (*numbers)[(*count)++] = end == p || !isfinite(value) ? NAN : value;
        p += strcspn(p, ",]");
        p += strspn(p, ", ");
    }
    return true;
}

static inline void heat_new_column(Heat* h) {
    if (h->count == HEAT_COLUMNS) {
        for (size_t i = 0; i < HEAT_COLUMNS / 2; i++) {
            h->steps[i] = h->steps[2 * i + 1];
            for (size_t row = 0; row < HEAT_ROWS; row++) {
                HeatCell a = h->cells[2 * i * HEAT_ROWS + row], b = h->cells[(2 * i + 1) * HEAT_ROWS + row];
                h->cells[i * HEAT_ROWS + row] = (HeatCell){a.ratio + b.ratio, a.count + b.count};
            }
        }
        h->count = HEAT_COLUMNS / 2;
        h->per_column *= 2;
    }
    memset(h->cells + h->count * HEAT_ROWS, 0, HEAT_ROWS * sizeof *h->cells);
    h->count++;
    h->in_last = 0;
}

static inline bool ranks_add(Heat* h, const char* line, Error* error) {
    size_t ranks, waits;
    const char* step = strstr(line, "\"step\":");
    if (step == NULL || strchr(line, '}') == NULL) return true;
    bool good = ranks_numbers(&h->busy, &h->line_capacity[0], &ranks, line, "\"busy_ms\"") &&
                ranks_numbers(&h->wait, &h->line_capacity[1], &waits, line, "\"wait_ms\"") &&
                memory_grow(&h->order, &h->line_capacity[2], ranks + 1, sizeof *h->order);
    if (good && ranks > h->ranks) {
        good = memory_grow(&h->sums, &h->sum_capacity, ranks, sizeof *h->sums);
        if (good) memset(h->sums + h->ranks, 0, (ranks - h->ranks) * sizeof *h->sums);
    }
    if (!good) return fail_with(error, "out of memory for the times of %zu ranks", ranks);
    size_t known = 0, slowest = 0;
    for (size_t i = 0; i < ranks; i++) if (h->busy[i] > 0) h->order[known++] = h->busy[i];
    if (known == 0) return true;
    if (h->ranks < ranks) h->ranks = ranks;
    h->rows = min_size(h->ranks, HEAT_ROWS);
    qsort(h->order, known, sizeof *h->order, compare_doubles);
    double median = h->order[(known - 1) / 2];
    if (h->count == 0 || h->in_last == h->per_column) heat_new_column(h);
    h->in_last++;
    h->steps[h->count - 1] = strtod(step + 7, NULL);
    for (size_t i = 0; i < ranks; i++) {
        if (!(h->busy[i] > 0)) continue;
        size_t row = ranks <= HEAT_ROWS ? i : i * HEAT_ROWS / ranks;
        HeatCell* cell = &h->cells[(h->count - 1) * HEAT_ROWS + row];
        cell->ratio += (float)(h->busy[i] / median);
        cell->count++;
        h->sums[i].busy += h->busy[i];
        h->sums[i].ratio += h->busy[i] / median;
        h->sums[i].wait += i < waits && isfinite(h->wait[i]) ? h->wait[i] : 0;
        h->sums[i].lines++;
        if (!(h->busy[slowest] >= h->busy[i])) slowest = i;
    }
    h->sums[slowest].slowest++;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. A run

typedef struct {
    const char* directory;
    Metrics metrics;
    Events events;
    Heat heat;
    Goodput goodput;     // its wall time is 0: not known
    char* samples[SAMPLES_KEPT + 1];  // lines: every so many of samples.jsonl, and the last
    size_t sample_count;
    uint64_t sample_lines, sample_stride;
    Json start;          // the last line of run.jsonl
    bool started;        // there is one
    uint64_t starts;
    double floor;        // the entropy of the validation text; NAN: not known
} Run;

static inline bool samples_add(Run* run, const char* line, Error* error) {
    bool kept = run->sample_lines++ % run->sample_stride == 0;
    if (kept && run->sample_count == SAMPLES_KEPT) {
        for (size_t i = 0; i < SAMPLES_KEPT / 2; i++) {
            free(run->samples[2 * i + 1]);
            run->samples[i] = run->samples[2 * i];
        }
        memset(run->samples + SAMPLES_KEPT / 2, 0, SAMPLES_KEPT / 2 * sizeof *run->samples);
        run->sample_count = SAMPLES_KEPT / 2;
        run->sample_stride *= 2;
        kept = (run->sample_lines - 1) % run->sample_stride == 0;
    }
    char* copy = strdup(line);
    if (copy == NULL) return fail_with(error, "out of memory for a sample");
    free(run->samples[SAMPLES_KEPT]);
    run->samples[SAMPLES_KEPT] = NULL;
    if (kept) run->samples[run->sample_count++] = copy;
    else run->samples[SAMPLES_KEPT] = copy;  // the last one, as long as it is
    return true;
}

static inline bool start_add(Run* run, const char* line, Error* error) {
    Json json;
    Error ignored;
    (void)error;
    if (!json_parse(&json, line, strcspn(line, "\n"), "run", &ignored)) return true;
    json_free(&run->start);
    run->start = json;
    run->started = true;
    run->starts++;
    json_number(&json, json_get(&json, 0, "floor"), &run->floor);
    return true;
}

static inline bool heat_add(Run* run, const char* line, Error* error) { return ranks_add(&run->heat, line, error); }

// Calls `add` with each whole line of a file of the run. *found: whether the file is there.
static inline bool run_lines(Run* run, bool* found, const char* name, bool (*add)(Run*, const char*, Error*),
                             Error* error) {
    char path[FILE_PATH_MAX], *line = NULL;
    size_t capacity = 0, bytes;
    ssize_t length;
    bool good = true;
    snprintf(path, sizeof path, "%.4000s/%s", run->directory, name);
    int file = access(path, F_OK) == 0 ? file_open(&bytes, path, error) : -2;
    if (file == -1) return false;
    FILE* stream = file < 0 ? NULL : fdopen(file, "rb");
    if (file >= 0 && stream == NULL) good = fail_file(error, "open", path);
    while (good && stream && (length = getline(&line, &capacity, stream)) > 0)
        if (line[length - 1] == '\n' && strlen(line) == (size_t)length) good = add(run, line, error);
        else run->metrics.broken++;
    if (good && stream && ferror(stream)) good = fail_file(error, "read", path);
    *found = *found || stream;
    if (stream) fclose(stream);
    else if (file >= 0) close(file);
    free(line);
    return good;
}

typedef struct {
    Run run;
    GoodputLog goodput;
} RunReader;

// A line of the metrics. The reader begins with its run.
static inline bool metrics_read(Run* run, const char* line, Error* error) {
    double values[KEYS];
    (void)error;
    if (!metrics_line(values, line)) return run->metrics.broken++, true;
    goodput_add(&((RunReader*)run)->goodput, (uint64_t)fmax(values[KEY_STEP], 0), values[KEY_TIME]);
    metrics_add(&run->metrics, values);
    return true;
}

static inline void run_free(Run* run) {
    free(run->metrics.columns);
    free(run->events.text);
    free(run->events.marks);
    free(run->heat.cells);
    free(run->heat.sums);
    free(run->heat.busy);
    free(run->heat.wait);
    free(run->heat.order);
    for (size_t i = 0; i <= SAMPLES_KEPT; i++) free(run->samples[i]);
    json_free(&run->start);
    memset(run, 0, sizeof *run);
}

static inline bool events_read(RunReader* reader, bool* found, Error* error) {
    Events* e = &reader->run.events;
    char path[FILE_PATH_MAX];
    snprintf(path, sizeof path, "%.4000s/events.jsonl", reader->run.directory);
    if (access(path, F_OK) != 0) return true;
    *found = true;
    if (!file_read(path, JSON_BYTES_MAX, &e->text, &e->bytes, error)) return false;
    const char *line = e->text, *end;
    for (; (end = (const char*)memchr(line, '\n', e->bytes - (size_t)(line - e->text))) != NULL; line = end + 1)
        if (!events_add(e, line, (size_t)(end - line), error)) return false;
    return goodput_open(&reader->goodput, e->text, e->bytes, error);
}

// Reads what is there of a run, its metrics into at most `columns` columns. After a failure there is nothing to free.
static inline bool run_read(Run* run, const char* directory, size_t columns, Error* error) {
    RunReader r;
    bool found = false;
    memset(&r, 0, sizeof r);
    r.run.directory = directory;
    r.run.floor = r.run.metrics.best_val = r.run.metrics.best_step = NAN;
    for (int i = 0; i < KEYS; i++) r.run.metrics.last[i] = NAN;
    r.run.metrics.per_column = r.run.heat.per_column = r.run.sample_stride = 1;
    r.run.metrics.columns = (Column*)memory_allocate(columns * sizeof(Column));
    r.run.metrics.most = columns;
    r.run.heat.cells = (HeatCell*)memory_allocate((size_t)HEAT_COLUMNS * HEAT_ROWS * sizeof(HeatCell));
    bool good = (r.run.metrics.columns && r.run.heat.cells) || fail_with(error, "out of memory for %s", directory);
    good = good && events_read(&r, &found, error);
    good = good && run_lines(&r.run, &found, "metrics.jsonl", metrics_read, error);
    goodput_close(&r.run.goodput, &r.goodput);
    if (isnan(r.run.metrics.last[KEY_TIME])) r.run.goodput.wall = 0;  // lines without times do not tell
    good = good && run_lines(&r.run, &found, "ranks.jsonl", heat_add, error);
    good = good && run_lines(&r.run, &found, "samples.jsonl", samples_add, error);
    good = good && run_lines(&r.run, &found, "run.jsonl", start_add, error);
    if (good && !found) good = fail_with(error, "%.600s has no metrics.jsonl; give the --out of a run", directory);
    *run = r.run;
    if (!good) run_free(run);
    return good;
}

#endif  // LLMTRAIN_REPORT_DATA_H
