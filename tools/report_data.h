// report_data.h: the files of a run, in memory that does not grow with their lines: what build/report shows.
//
//   Run run;
//   if (!run_read(&run, "runs/x", COLUMNS_MAX, &error)) ...
//   run_free(&run);
//
// The lines of a file are counted, and then read one by one. Of metrics.jsonl, which may have millions of them,
// COLUMNS_MAX columns keep of every number the minimum, the maximum and the sum over an equal count of lines each. So
// no spike is lost. The ranks' times are kept in the same way. What is no whole line, as the last one of a run that was
// killed may be, is counted and left out, and so is a file that is not there.

#ifndef LLMTRAIN_REPORT_DATA_H
#define LLMTRAIN_REPORT_DATA_H

#include "../llmtrain/base/files.h"
#include "../llmtrain/base/json.h"
#include "../llmtrain/run/goodput.h"

#include <assert.h>

enum { RUNS_MAX = 8, COLUMNS_MAX = 800, HEAT_COLUMNS = 512, HEAT_ROWS = 256, EVENTS_SHOWN = 50,
       SAMPLES_KEPT = 8, WORST_KEPT = 10, RANKS_SHOWN = 8 };

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
    Column* columns;     // at most COLUMNS_MAX
    size_t count;        // of columns in use
    uint64_t lines;
    double last[KEYS];   // the last number of each key; NAN: there is none
    double joules, seconds;
    double best_val, best_step;
} Metrics;

// A decimal number, to 15 digits, in a fraction of strtod's time; *p is left behind it.
static inline double metrics_number(const char** p) {
    static const double tens[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                  1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char *begin = *p, *at = begin + (*begin == '-'), *point = NULL;
    double digits = 0;
    for (; (*at >= '0' && *at <= '9') || (*at == '.' && !point); at++) {
        if (*at == '.') point = at;
        else digits = digits * 10 + (*at - '0');
    }
    size_t places = point ? (size_t)(at - point - 1) : 0;
    *p = at;
    if (*at == 'e' || *at == 'E' || places >= sizeof tens / sizeof *tens) return strtod(begin, (char**)(void*)p);
    return (*begin == '-' ? -digits : digits) / tens[places];
}

// Reads a line of metrics.jsonl: not json_parse, which would take longer for a line than the rest of the program.
// values: NAN for what is not there, no number, or too large for sums of it. False if the line is not a whole object.
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
        double value = number && key >= 0 ? metrics_number(&p) : NAN;
        if (fabs(value) < 1e300) values[key] = value;
        size_t skipped = *p == '"' ? 1 + strcspn(p + 1, "\"") : *p == '[' ? strcspn(p, "]") : 0;
        if (p[skipped] == 0) return false;
        p += skipped ? skipped + 1 : strspn(p, "+-.0123456789abcdefghijklmnopqrstuvwxyzEINT");
        p += strspn(p, " ");
    }
    return p[1 + strspn(p + 1, " \r\n")] == 0;
}

static inline void cell_add(Cell* cell, double value) {
    cell->low = cell->count ? fmin(cell->low, value) : value;
    cell->high = cell->count ? fmax(cell->high, value) : value;
    cell->sum += value;
    cell->count++;
}

static inline double cell_mean(const Cell* cell) { return cell->count ? cell->sum / (double)cell->count : NAN; }

// Adds a line; `each` of them are a column. One whose step is not after the step before is of a run that went back, and
// is left out.
static inline void metrics_add(Metrics* m, const double values[KEYS], uint64_t each) {
    const double* last = m->last;
    double steps = values[KEY_STEP] - (m->lines ? last[KEY_STEP] : 0), ms = values[KEY_MS];
    if (!(steps > 0)) return;
    bool timed = values[KEY_TIME] >= last[KEY_TIME];  // false if one of them is NAN
    double tokens = values[KEY_TOKENS] - (m->lines ? last[KEY_TOKENS] : 0);
    Column* column = &m->columns[m->lines++ / each];
    m->count = (size_t)(column - m->columns) + 1;
    m->seconds += timed ? values[KEY_TIME] - last[KEY_TIME] : isfinite(ms) ? ms / 1e3 * steps : 0;
    column->step = values[KEY_STEP];
    column->tokens = isfinite(tokens) ? values[KEY_TOKENS] : 0;
    column->seconds = m->seconds;
    for (int i = 0; i < KEYS; i++) {
        if (isfinite(values[i])) cell_add(&column->cells[i], values[i]);
        if (isfinite(values[i]) || i == KEY_TIME) m->last[i] = values[i];
    }
    if (isfinite(values[KEY_ENERGY]) && tokens > 0) m->joules += values[KEY_ENERGY] * tokens;
    if (values[KEY_VAL] < m->best_val || (isnan(m->best_val) && isfinite(values[KEY_VAL]))) {
        m->best_val = values[KEY_VAL];
        m->best_step = values[KEY_STEP];
    }
}

// The mean of a key over the last columns.
static inline double metrics_mean(const Metrics* m, Key key, size_t columns) {
    Cell sum = {0, 0, 0, 0};
    for (size_t i = m->count - min_size(columns, m->count); i < m->count; i++) {
        sum.sum += m->columns[i].cells[key].sum;
        sum.count += m->columns[i].cells[key].count;
    }
    return cell_mean(&sum);
}

// ------------------------------------------------------------------------------------------------
// 2. Events

typedef enum { MARK_START, MARK_SAVE, MARK_REWIND, MARK_BATCH, MARK_WARNING, MARK_FAULT, MARK_END, MARKS } MarkKind;
typedef enum { STATE_RUNNING, STATE_DONE, STATE_STOPPED, STATE_FAILED, STATES } RunState;

static const struct {
    const char* event;
    MarkKind kind;      // MARKS: none
    RunState then;      // the state of the run after it; STATES: as before
} EVENT_KINDS[] = {
    {"start", MARKS, STATE_RUNNING}, {"begun", MARK_START, STATE_RUNNING}, {"resumed", MARK_START, STATE_RUNNING},
    {"saved", MARK_SAVE, STATES}, {"rewound", MARK_REWIND, STATES}, {"bad_batch", MARK_BATCH, STATES},
    {"slow", MARK_WARNING, STATES}, {"throttled", MARK_WARNING, STATES}, {"hot", MARK_WARNING, STATES},
    {"fewer ranks", MARK_WARNING, STATES}, {"damaged", MARK_FAULT, STATES}, {"not_saved", MARK_FAULT, STATES},
    {"not_logged", MARK_FAULT, STATES}, {"xid", MARK_FAULT, STATES}, {"ecc", MARK_FAULT, STATES},
    {"failure", MARK_FAULT, STATE_FAILED}, {"failed", MARK_FAULT, STATE_FAILED}, {"gave up", MARK_FAULT, STATE_FAILED},
    {"stopped", MARK_END, STATE_STOPPED}, {"done", MARK_END, STATE_DONE}, {"no_gain", MARK_END, STATES},
};

typedef struct {
    double step;
    MarkKind kind;
} Mark;

typedef struct {
    char shard[FILE_PATH_MAX];
    double step, at, tokens, loss, norm;
} Worst;

typedef struct {
    char* shown[EVENTS_SHOWN];  // the lines of the last events, a ring
    size_t count;               // of all events
    Mark* marks;
    size_t mark_count, mark_capacity;
    Worst worst[WORST_KEPT];    // the sequences with the highest losses
    size_t worst_count;
    RunState state;
} Events;

// The order of the worst sequences. One without a number as its loss is the worst.
static inline double worst_rank(const Worst* w) { return isfinite(w->loss) ? w->loss : INFINITY; }

static inline void events_add_worst(Events* e, const Json* json, uint32_t node, double step) {
    Worst w = {.step = step, .at = NAN, .tokens = NAN, .loss = NAN, .norm = NAN};
    if (!json_string(json, json_get(json, node, "shard"), w.shard, sizeof w.shard)) return;
    json_number(json, json_get(json, node, "at"), &w.at);
    json_number(json, json_get(json, node, "tokens"), &w.tokens);
    json_number(json, json_get(json, node, "loss"), &w.loss);
    json_number(json, json_get(json, node, "grad_norm"), &w.norm);
    for (size_t k = 0; k < e->worst_count; k++)  // a step that was made again has the same sequences
        if (e->worst[k].step == step && e->worst[k].at == w.at && strcmp(e->worst[k].shard, w.shard) == 0) return;
    size_t i = e->worst_count;
    if (i == WORST_KEPT && worst_rank(&w) <= worst_rank(&e->worst[--i])) return;
    for (; i > 0 && worst_rank(&w) > worst_rank(&e->worst[i - 1]); i--) e->worst[i] = e->worst[i - 1];
    e->worst[i] = w;
    e->worst_count = min_size(e->worst_count + 1, WORST_KEPT);
}

static inline bool events_add(Events* e, const Json* json, const char* line) {
    char name[64];
    double step = 0;
    if (!json_string(json, json_get(json, 0, "event"), name, sizeof name)) return true;
    json_number(json, json_get(json, 0, "step"), &step);
    for (size_t i = 0; i < sizeof EVENT_KINDS / sizeof *EVENT_KINDS; i++) {
        if (strcmp(name, EVENT_KINDS[i].event) != 0) continue;
        MarkKind kind = EVENT_KINDS[i].kind;
        RunState then = EVENT_KINDS[i].then;
        bool stays = then == STATES || (then == STATE_STOPPED && e->state == STATE_DONE);
        if (!stays) e->state = then;
        if (kind == MARKS) continue;
        if (!memory_grow(&e->marks, &e->mark_capacity, e->mark_count + 1, sizeof *e->marks)) return false;
        e->marks[e->mark_count++] = (Mark){step, kind};
    }
    uint32_t sequences = json_get(json, 0, "sequences");
    for (uint32_t i = json_first(json, sequences); i != JSON_NONE; i = json_next(json, i))
        events_add_worst(e, json, i, step);
    char** shown = &e->shown[e->count++ % EVENTS_SHOWN];
    free(*shown);
    *shown = strdup(line);
    return *shown != NULL;
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
    size_t rank;
} RankSum;

typedef struct {
    double* at;
    size_t count, capacity;
} Numbers;

typedef struct {
    HeatCell* cells;     // (HEAT_COLUMNS, HEAT_ROWS)
    double steps[HEAT_COLUMNS];
    size_t count, rows, ranks, sum_capacity;  // count: of columns
    uint64_t lines;
    RankSum* sums;       // of each rank; at the end the slowest first
    Numbers busy, wait, order;  // a line
} Heat;

// The numbers of an array in a line; null is NAN.
static inline bool ranks_numbers(Numbers* numbers, const char* line, const char* key) {
    const char* p = strstr(line, key);
    numbers->count = 0;
    if (p) p += strlen(key), p += strspn(p, " :[");
    while (p && *p && *p != ']') {
        if (!memory_grow(&numbers->at, &numbers->capacity, numbers->count + 1, sizeof(double))) return false;
        char* end = NULL;
        double value = *p == 'n' ? NAN : strtod(p, &end);
        numbers->at[numbers->count++] = end == p || !isfinite(value) ? NAN : value;
        p += strcspn(p, ",]");
        p += strspn(p, ", ");
    }
    return true;
}

static inline bool ranks_grow(Heat* h, size_t ranks) {
    if (!memory_grow(&h->sums, &h->sum_capacity, ranks, sizeof *h->sums)) return false;
    for (; h->ranks < ranks; h->ranks++) h->sums[h->ranks] = (RankSum){.rank = h->ranks};
    h->rows = min_size(h->ranks, HEAT_ROWS);
    return memory_grow(&h->order.at, &h->order.capacity, ranks, sizeof(double));
}

// Adds a line; `each` of them are a column.
static inline bool ranks_add(Heat* h, const char* line, uint64_t each) {
    const char* step = strstr(line, "\"step\":");
    if (step == NULL || strchr(line, '}') == NULL) return true;
    if (!ranks_numbers(&h->busy, line, "\"busy_ms\"") || !ranks_numbers(&h->wait, line, "\"wait_ms\"")) return false;
    size_t ranks = h->busy.count, known = 0, slowest = 0;
    const double *busy = h->busy.at, *wait = h->wait.at;
    if (!ranks_grow(h, ranks)) return false;
    for (size_t i = 0; i < ranks; i++) if (busy[i] > 0) h->order.at[known++] = busy[i];
    if (known == 0) return true;
    qsort(h->order.at, known, sizeof(double), compare_doubles);
    double median = h->order.at[(known - 1) / 2];
    size_t column = (size_t)(h->lines++ / each);
    h->count = column + 1;
    h->steps[column] = strtod(step + 7, NULL);
    for (size_t i = 0; i < ranks; i++) {
        if (!(busy[i] > 0)) continue;
        size_t row = ranks <= HEAT_ROWS ? i : i * HEAT_ROWS / ranks;
        HeatCell* cell = &h->cells[column * HEAT_ROWS + row];
        cell->ratio += (float)(busy[i] / median);
        cell->count++;
        h->sums[i].busy += busy[i];
        h->sums[i].ratio += busy[i] / median;
        h->sums[i].wait += i < h->wait.count && isfinite(wait[i]) ? wait[i] : 0;
        h->sums[i].lines++;
        if (!(busy[slowest] >= busy[i])) slowest = i;
    }
    h->sums[slowest].slowest++;
    return true;
}

// For qsort: the slowest first.
static inline int ranks_compare(const void* a, const void* b) {
    const RankSum *x = (const RankSum*)a, *y = (const RankSum*)b;
    double mean = x->ratio / (double)max_size(x->lines, 1), other = y->ratio / (double)max_size(y->lines, 1);
    int order = compare_doubles(&other, &mean);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

// ------------------------------------------------------------------------------------------------
// 4. A run

typedef struct {
    const char* directory;
    bool found;          // one of its files
    uint64_t line, each; // of the file that is read: lines before this one; the lines of a column, or for one sample
    uint64_t broken;     // lines that are not whole
    Metrics metrics;
    Events events;
    Heat heat;
    GoodputLog log;
    Goodput goodput;     // its wall time is 0: not known
    char* samples[SAMPLES_KEPT + 1];  // lines: every so many of samples.jsonl, and the last
    size_t sample_count;
    Json start;          // the last line of run.jsonl; an empty object
    double floor;        // the entropy of the validation text; NAN: not known
} Run;

// A line of a file of the run; false if out of memory. What is no object is left out.

static inline bool metrics_take(Run* run, const char* line) {
    double values[KEYS];
    if (!metrics_line(values, line)) return run->broken++, true;
    goodput_add(&run->log, (uint64_t)fmax(values[KEY_STEP], 0), values[KEY_TIME]);
    metrics_add(&run->metrics, values, run->each);
    return true;
}

static inline bool event_take(Run* run, const char* line) {
    Json json;
    Error ignored;
    if (!json_parse(&json, line, strlen(line), "event", &ignored)) return true;
    bool good = events_add(&run->events, &json, line) && goodput_event(&run->log, &json);
    json_free(&json);
    return good;
}

static inline bool ranks_take(Run* run, const char* line) { return ranks_add(&run->heat, line, run->each); }

static inline bool sample_take(Run* run, const char* line) {
    char** last = &run->samples[run->sample_count];
    free(*last);
    *last = strdup(line);
    run->sample_count += run->line % run->each == 0;
    return *last != NULL;
}

static inline bool start_take(Run* run, const char* line) {
    Json json;
    Error ignored;
    if (!json_parse(&json, line, strlen(line), "run", &ignored)) return true;
    json_free(&run->start);
    run->start = json;
    json_number(&json, json_get(&json, 0, "floor"), &run->floor);
    return true;
}

// Calls `take` with each whole line of a file of the run, of which at most `most` are to be kept.
static inline bool run_lines(Run* run, const char* name, size_t most, bool (*take)(Run*, const char*), Error* error) {
    char path[FILE_PATH_MAX], *line = NULL;
    size_t capacity = 0, bytes;
    uint64_t lines = 0;
    ssize_t length;
    snprintf(path, sizeof path, "%.4000s/%s", run->directory, name);
    bool there, good = path_look(&there, path, error);
    if (!there) return good;
    int file = file_open(&bytes, path, error);
    if (file < 0) return false;
    FILE* stream = fdopen(file, "rb");
    if (stream == NULL) return close(file), fail_file(error, "open", path);
    run->found = true;
    while (getline(&line, &capacity, stream) > 0) lines++;
    bool failed = ferror(stream);
    rewind(stream);
    run->each = (lines + most - 1) / most;
    for (run->line = 0; good && run->line < lines && (length = getline(&line, &capacity, stream)) > 0; run->line++)
        if (line[length - 1] == '\n' && strlen(line) == (size_t)length) good = take(run, line);
        else run->broken++;
    if (!good) fail_with(error, "out of memory for line %llu of %.600s", (unsigned long long)run->line, path);
    if (good && (failed || ferror(stream))) good = fail_file(error, "read", path);
    fclose(stream);
    free(line);
    return good;
}

static inline void run_free(Run* run) {
    free(run->metrics.columns);
    for (size_t i = 0; i < EVENTS_SHOWN; i++) free(run->events.shown[i]);
    free(run->events.marks);
    free(run->heat.cells);
    free(run->heat.sums);
    free(run->heat.busy.at);
    free(run->heat.wait.at);
    free(run->heat.order.at);
    for (size_t i = 0; i <= SAMPLES_KEPT; i++) free(run->samples[i]);
    json_free(&run->start);
    goodput_free(&run->log);
    memset(run, 0, sizeof *run);
}

// Reads what is there of a run, its metrics into at most `columns` columns. After a failure there is nothing to free.
static inline bool run_read(Run* run, const char* directory, size_t columns, Error* error) {
    memset(run, 0, sizeof *run);
    run->directory = directory;
    run->floor = run->metrics.best_val = run->metrics.best_step = NAN;
    for (int i = 0; i < KEYS; i++) run->metrics.last[i] = NAN;
    run->metrics.columns = (Column*)memory_allocate(columns * sizeof(Column));
    run->heat.cells = (HeatCell*)memory_allocate((size_t)HEAT_COLUMNS * HEAT_ROWS * sizeof(HeatCell));
    bool good = (run->metrics.columns && run->heat.cells) || fail_with(error, "out of memory for %s", directory);
    good = good && json_parse(&run->start, "{}", 2, directory, error);
    good = good && run_lines(run, "events.jsonl", 1, event_take, error);
    good = good && run_lines(run, "metrics.jsonl", columns, metrics_take, error);
    good = good && run_lines(run, "ranks.jsonl", HEAT_COLUMNS, ranks_take, error);
    good = good && run_lines(run, "samples.jsonl", SAMPLES_KEPT, sample_take, error);
    good = good && run_lines(run, "run.jsonl", 1, start_take, error);
    good = good && (run->found || fail_with(error, "%.600s has no metrics.jsonl; give the --out of a run", directory));
    if (!good) return run_free(run), false;
    goodput_close(&run->goodput, &run->log);
    if (isnan(run->metrics.last[KEY_TIME])) run->goodput.wall = 0;  // lines without times do not tell
    if (run->heat.ranks) qsort(run->heat.sums, run->heat.ranks, sizeof *run->heat.sums, ranks_compare);
    return true;
}

#endif  // LLMTRAIN_REPORT_DATA_H
