// progress.h: a bar on the terminal for long work: how far it is, and the time left.
//
//   Progress progress = progress_begin("tokenizing", bytes);
//   while (...) progress_step(&progress, taken);
//   progress_end(&progress);                                 also after a failure, before its message
//
// It is on standard error, only if that is a terminal, in one line as wide as that; it is drawn at most five times a
// second, and gone after progress_end. One thread uses it, of one rank. A step that draws nothing reads the clock.

#ifndef LLMTRAIN_PROGRESS_H
#define LLMTRAIN_PROGRESS_H

#include "system.h"

// A duration: "0.042 s", "4.2 s", "45 s", "12 min", "3.4 h", "2.1 days".
static inline void duration_text(char* text, size_t size, double seconds) {
    if (seconds < 0.095) snprintf(text, size, "%.2g s", seconds);
    else if (seconds < 9.95) snprintf(text, size, "%.1f s", seconds);
    else if (seconds < 120) snprintf(text, size, "%.0f s", seconds);
    else if (seconds < 2 * 3600) snprintf(text, size, "%.0f min", seconds / 60);
    else if (seconds < 2 * 86400) snprintf(text, size, "%.1f h", seconds / 3600);
    else snprintf(text, size, "%.1f days", seconds / 86400);
}

// A bar of so many cells, of which `part`, 0 to 1, are full. full, empty: a character each, in UTF-8.
static inline void bar_text(char* text, size_t size, size_t cells, double part, const char* full, const char* empty) {
    size_t filled = (size_t)(fmin(fmax(part, 0), 1) * (double)cells), used = 0;
    text[0] = 0;
    for (size_t i = 0; i < cells && used + 5 < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s", i < filled ? full : empty);
}

typedef struct {
    const char* what;
    uint64_t total, done;  // total: 0 if it is not known
    double began, shown;   // shown: when it was last drawn; began: it was not
} Progress;

static inline Progress progress_begin(const char* what, uint64_t total) {
    Progress p = {what, total, 0, now_ms(), 0};
    p.shown = p.began;
    return p;
}

enum { PROGRESS_CELLS = 40, PROGRESS_CELLS_MIN = 8, PROGRESS_COLUMNS = 400 };

static inline void progress_draw(const Progress* p, double now, size_t columns) {
    char what[PROGRESS_COLUMNS], bar[PROGRESS_CELLS + 8], left[64], still[32];
    double part = p->total ? fmin((double)p->done / (double)p->total, 1.0) : 0;
    if (part > 0) {
        duration_text(still, sizeof still, fmax(1e-3 * (now - p->began) * (1 - part) / part, 0.1));
        snprintf(left, sizeof left, "%3.0f%%, %s left", floor(100 * part), still);
    } else {
        snprintf(left, sizeof left, "%llu", (unsigned long long)p->done);
    }
    size_t width = min_size(columns, sizeof what) - 1, used = strlen(left) + 1;  // the last column makes some wrap
    text_make_visible(what, width > used + 5 ? width - used : 5, p->what);
    used += strlen(what) + 3;
    size_t cells = width > used ? min_size(width - used, PROGRESS_CELLS) : 0;
    bar_text(bar, sizeof bar, cells, part, "#", ".");
    bool has_bar = p->total > 0 && cells >= PROGRESS_CELLS_MIN;
    used = (size_t)fprintf(stderr, "\r%s%s%s%s%s", what, has_bar ? " [" : " ", has_bar ? bar : "",
                           has_bar ? "] " : "", left) - 1;
    fprintf(stderr, "%*s", width > used ? (int)(width - used) : 0, "");  // over the end of a longer one before
}

static inline void progress_show(Progress* p, uint64_t done) {
    size_t columns, rows;
    double now = now_ms();
    p->done = done;
    if (now - p->shown < 200 || done == 0 || !isatty(STDERR_FILENO)) return;
    p->shown = now;
    terminal_size(&columns, &rows, STDERR_FILENO);
    progress_draw(p, now, columns);
}

static inline void progress_step(Progress* p, uint64_t more) { progress_show(p, p->done + more); }

// Clears the line.
static inline void progress_end(const Progress* p) {
    size_t columns, rows;
    if (p->shown == p->began) return;
    terminal_size(&columns, &rows, STDERR_FILENO);
    fprintf(stderr, "\r%*s\r", (int)min_size(columns, PROGRESS_COLUMNS) - 1, "");
}

#endif  // LLMTRAIN_PROGRESS_H
