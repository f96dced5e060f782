// goodput.h: where the time of a run went, from its events.jsonl and metrics.jsonl.
//
//   GoodputLog log = {0};
//   if (!goodput_event(&log, &json)) ...                           each line of events.jsonl
//   goodput_add(&log, step, time);                                 then each line of metrics.jsonl, in order
//   goodput_close(&g, &log);
//   printf("%.1f%% of %.0f s", 100 * g.steps / g.wall, g.wall);
//
// A start of the program trains in a stretch of steps; a rewind ends it and begins another. Set-up, steps and pauses of
// a stretch, and the time between two starts, are disjoint parts of the wall time, so that the sum is exact. A stretch
// ends with the last line or event that is known of it: what a killed program did after that is down time. When a
// stretch begins at step R, the steps after R of those before it are made again: they are `repeated`.

#ifndef LLMTRAIN_GOODPUT_H
#define LLMTRAIN_GOODPUT_H

#include "../base/times.h"

typedef struct {
    double wall;            // seconds, from the first start of the program to the last that is known of it; the sum of:
    double steps;           // steps that the run still has
    double repeated;        // steps that were lost in a crash or a rewind, and made again
    double validation, samples, saves;  // what training paused for
    double setup;           // from a start to its first step, and going back in a rewind
    double down;            // from the end of a start to the next, with starts that did not get to a step
    uint64_t starts, rewinds;
    uint64_t repeated_steps;  // of which a line was in the log
} Goodput;

// The parts of the wall time, for tables and bars: the value is *(const double*)((const char*)&goodput + offset).
static const struct {
    const char* name;
    size_t offset;
} GOODPUT_PARTS[] = {
    {"steps", offsetof(Goodput, steps)}, {"repeated steps", offsetof(Goodput, repeated)},
    {"validation", offsetof(Goodput, validation)}, {"samples", offsetof(Goodput, samples)},
    {"saves", offsetof(Goodput, saves)}, {"set-up", offsetof(Goodput, setup)}, {"down", offsetof(Goodput, down)},
};
enum { GOODPUT_PART_COUNT = sizeof GOODPUT_PARTS / sizeof *GOODPUT_PARTS };

// What training pauses for.
typedef enum { PAUSE_VALIDATION, PAUSE_SAMPLE, PAUSE_SAVE, PAUSE_KINDS } PauseKind;

typedef struct {
    PauseKind kind;
    double time, seconds;   // when it ended
    size_t stretch;
} GoodputPause;

typedef struct {
    double begin, trains, end;  // Unix times: its set-up begins; its first step may begin; the last that is known
    uint64_t from, until;   // steps done when it begins; those after `until` were made again
    uint64_t line;          // the last line of a step up to `until`; 0: none
    double line_time;
    uint64_t lost;          // the first line after `until`, which was removed; 0: none
    double lost_time;
    bool rewound;           // begins with a rewind, not with a start
} GoodputStretch;

typedef struct {
    GoodputStretch* stretches;
    GoodputPause* pauses;
    size_t count, capacity, pause_count, pause_capacity;
    size_t at;              // the stretch of the last line
    bool open;              // the program of the last stretch may still run
    uint64_t repeated_steps;
} GoodputLog;

static inline void goodput_free(GoodputLog* log) {
    free(log->stretches);
    free(log->pauses);
    memset(log, 0, sizeof *log);
}

// A stretch that continues from step `from` has begun at `begin`, and trains since `trains`.
static inline bool goodput_begin(GoodputLog* log, uint64_t from, double begin, double trains, bool rewound) {
    if (!memory_grow(&log->stretches, &log->capacity, log->count + 1, sizeof *log->stretches)) return false;
    for (size_t i = 0; i < log->count; i++) {
        GoodputStretch* s = &log->stretches[i];
        if (from >= s->until) continue;
        s->until = from;
        s->lost = 0;  // it was after another step; the event of the cut gives the first of this one
    }
    GoodputStretch s = {.begin = begin, .trains = trains, .end = trains, .from = from, .until = UINT64_MAX,
                        .rewound = rewound};
    log->stretches[log->count++] = s;
    log->open = true;
    return true;
}

// The lines after a step were removed: from `first` on, which was written at first_time, to `last`.
static inline void goodput_cut(GoodputLog* log, uint64_t step, uint64_t first, double first_time, uint64_t last,
                               double last_time) {
    log->repeated_steps += last - step;
    for (size_t i = log->count; i-- > 0;) {
        GoodputStretch* s = &log->stretches[i];
        if (last_time >= s->begin && last_time > s->end) s->end = last_time;
        if (last_time >= s->begin) last_time = 0;  // it is of this stretch
        if (first_time < s->begin) continue;
        s->lost = first;
        s->lost_time = first_time;
        s->until = s->until < step ? s->until : step;
        return;
    }
}

// Reads an event. False if out of memory; what is no event, or is one of the supervisor, changes nothing.
static inline bool goodput_event(GoodputLog* log, const Json* json) {
    static const struct {
        const char* name;
        PauseKind kind;
        bool ends;
    } events[] = {
        {"validation", PAUSE_VALIDATION, false}, {"sample", PAUSE_SAMPLE, false}, {"saved", PAUSE_SAVE, false},
        {"not_saved", PAUSE_SAVE, false}, {"done", PAUSE_SAVE, true}, {"stopped", PAUSE_SAVE, true},
        {"failed", PAUSE_SAVE, true}, {"failure", PAUSE_KINDS, true}, {"not_logged", PAUSE_KINDS, false},
        {"no_gain", PAUSE_KINDS, false}, {"slow", PAUSE_KINDS, false}, {"offload", PAUSE_KINDS, false},
        {"bad_batch", PAUSE_KINDS, false},
    };
    char name[32] = "";
    uint64_t step = 0, first = 0, last = 0;
    double ms = 0, first_time, last_time, time;
    if (!json_string(json, json_get(json, 0, "event"), name, sizeof name)) return true;
    if (!json_time(json, json_get(json, 0, "time"), &time)) return true;
    json_u64(json, json_get(json, 0, "step"), &step);
    json_number(json, json_get(json, 0, "ms"), &ms);
    bool begins = strcmp(name, "begun") == 0 || strcmp(name, "resumed") == 0, rewound = strcmp(name, "rewound") == 0;
    uint32_t back = json_get(json, 0, "back"), lines = json_get(json, 0, "lines");
    if (rewound && (!json_u64(json, json_get(json, back, "to"), &step) ||
                    !json_number(json, json_get(json, back, "ms"), &ms))) return true;
    if (rewound && log->count > 0) log->stretches[log->count - 1].end = time - ms / 1e3;
    if (begins || rewound) return goodput_begin(log, step, time - ms / 1e3, time, rewound);
    if (strcmp(name, "cut") == 0 && json_u64(json, json_get(json, lines, "first"), &first) &&
        json_number(json, json_get(json, lines, "first_time"), &first_time) &&
        json_u64(json, json_get(json, lines, "last"), &last) &&
        json_number(json, json_get(json, lines, "last_time"), &last_time))
        goodput_cut(log, step, first, first_time, last, last_time);
    for (size_t i = 0; log->open && i < sizeof events / sizeof *events; i++) {
        if (strcmp(name, events[i].name) != 0) continue;
        GoodputStretch* s = &log->stretches[log->count - 1];
        log->open = !events[i].ends;
        if (strcmp(name, "failure") == 0) return true;  // of the supervisor: it has died before
        s->end = time;
        if (ms <= 0 || events[i].kind == PAUSE_KINDS) return true;
        if (!memory_grow(&log->pauses, &log->pause_capacity, log->pause_count + 1, sizeof *log->pauses)) return false;
        GoodputPause pause = {events[i].kind, time, ms / 1e3, log->count - 1};
        log->pauses[log->pause_count++] = pause;
    }
    return true;
}

// A line of metrics.jsonl, in the order of the file. time: NAN if it has none.
static inline void goodput_add(GoodputLog* log, uint64_t step, double time) {
    if (log->count == 0 || !(time > 0)) return;
    while (log->at + 1 < log->count && time >= log->stretches[log->at + 1].begin) log->at++;
    GoodputStretch* s = &log->stretches[log->at];
    if (time > s->end && (log->at + 1 < log->count || log->open)) s->end = time;
    if (step > s->until) return;
    s->line = step;
    s->line_time = time;
}

// When the last step of a stretch that the run still has was done.
static inline double goodput_until(const GoodputStretch* s) {
    if (s->until == UINT64_MAX) return s->end;
    if (s->until <= s->from) return s->trains;
    uint64_t before = s->line ? s->line : s->from;
    double time = s->line ? s->line_time : s->trains;
    if (s->line < s->until && s->lost == 0) return s->end;  // no later line: it ended before the next was due
    if (s->line < s->until)
        time += (s->lost_time - time) * (double)(s->until - before) / (double)(s->lost - before);
    return fmin(fmax(time, s->trains), s->end);
}

// Adds up a stretch, from s->trains to s->end.
static inline void goodput_stretch(Goodput* g, const GoodputLog* log, size_t* pause, size_t at) {
    const GoodputStretch* s = &log->stretches[at];
    double until = goodput_until(s), halves[2] = {until - s->trains, s->end - until};
    double pauses[2][PAUSE_KINDS] = {{0}};
    for (; *pause < log->pause_count && log->pauses[*pause].stretch == at; ++*pause) {
        const GoodputPause* p = &log->pauses[*pause];
        pauses[p->time > until][p->kind] += p->seconds;
    }
    for (int half = 0; half < 2; half++) {
        double* p = pauses[half];
        double sum = p[PAUSE_VALIDATION] + p[PAUSE_SAMPLE] + p[PAUSE_SAVE];
        double scale = sum > halves[half] ? halves[half] / sum : 1;  // a clock that was set
        g->validation += scale * p[PAUSE_VALIDATION];
        g->samples += scale * p[PAUSE_SAMPLE];
        g->saves += scale * p[PAUSE_SAVE];
        *(half ? &g->repeated : &g->steps) += sum > halves[half] ? 0 : halves[half] - sum;
    }
}

// Adds up the parts, and frees the log.
static inline void goodput_close(Goodput* g, GoodputLog* log) {
    size_t pause = 0;
    memset(g, 0, sizeof *g);
    for (size_t i = 0; i < log->count; i++) {
        GoodputStretch *s = &log->stretches[i], *next = i + 1 < log->count ? s + 1 : NULL;
        s->trains = fmax(s->trains, s->begin);
        s->end = fmax(next ? fmin(s->end, next->begin) : s->end, s->trains);  // also if a clock was set back
        if (next) next->begin = fmax(next->begin, s->end);
        g->setup += s->trains - s->begin;
        g->starts += !s->rewound;
        g->rewinds += s->rewound;
        if (next) g->down += next->begin - s->end;
        goodput_stretch(g, log, &pause, i);
    }
    if (log->count > 0) g->wall = log->stretches[log->count - 1].end - log->stretches[0].begin;
    g->repeated_steps = log->repeated_steps;
    goodput_free(log);
}

#endif  // LLMTRAIN_GOODPUT_H
