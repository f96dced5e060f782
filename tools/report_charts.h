// report_charts.h: the charts of build/report, as a table; each has lines for keys of the metrics, over the steps.
//
//   charts_write(&page, &report)
//
// A chart of one run has a line for each of its keys, in a color each; of several runs it has a line for each run. A
// column with several steps has their mean on the line, and their minimum and maximum in the band about it. What has no
// data is left out.

#ifndef LLMTRAIN_REPORT_CHARTS_H
#define LLMTRAIN_REPORT_CHARTS_H

#include "report_data.h"
#include "svg.h"

typedef struct {
    const Run* runs;
    size_t count;
    double price;        // of an hour of a rank's device; 0: not given
    uint64_t watch;      // seconds after which a browser reads the page again; 0: never
    double high[3];      // the ends of the x axes: steps, tokens, time
    double time_unit;    // seconds of the time's unit
    const char* time_name;
} Report;

// ------------------------------------------------------------------------------------------------
// Charts

typedef enum { DRAW_LINE, DRAW_DOTS } DrawKind;  // a line has a band from the minimum to the maximum
enum {
    CHART_LOG = 1, CHART_ZERO = 2,  // its scale; from 0 on
    CHART_FLOOR = 4,                // with a line at the entropy floor
    CHART_EXCESS = 8,               // the numbers are what is above the floor
    CHART_MARKS = 16,               // with clipped, skipped and traced steps
    CHART_WIDE = 32, CHART_RANKS = 64  // for more than one rank
};

typedef struct {
    Key key;
    const char* name;
    DrawKind kind;
} Series;

typedef struct {
    const char *section, *title, *unit;
    double factor;       // of the numbers
    unsigned options;
    size_t count;
    Series series[4];
} Chart;

static const Chart CHARTS[] = {
    {"Loss", "Loss", "nats per token", 1, CHART_FLOOR | CHART_WIDE, 2,
     {{KEY_LOSS, "training", DRAW_LINE}, {KEY_VAL, "validation", DRAW_DOTS}}},
    {"Loss", "Above the entropy floor", "nats per token", 1, CHART_LOG | CHART_EXCESS | CHART_WIDE, 2,
     {{KEY_LOSS, "training", DRAW_LINE}, {KEY_VAL, "validation", DRAW_DOTS}}},
    {"Loss", "Pairs or answers on the right side", "%", 100, 0, 1, {{KEY_ACCURACY, "accuracy", DRAW_LINE}}},
    {"Loss", "Margin", "", 1, 0, 1, {{KEY_MARGIN, "margin", DRAW_LINE}}},
    {"Loss", "Log-probability of answers", "nats per answer", 1, 0, 2,
     {{KEY_CHOSEN, "chosen", DRAW_LINE}, {KEY_REJECTED, "rejected", DRAW_LINE}}},
    {"Optimization", "Gradient norm", "before clipping", 1, CHART_LOG | CHART_MARKS, 1,
     {{KEY_NORM, "norm", DRAW_LINE}}},
    {"Optimization", "Learning rate", "", 1, CHART_ZERO, 1, {{KEY_LR, "rate", DRAW_LINE}}},
    {"Speed", "Throughput", "tokens per second", 1, CHART_ZERO, 1, {{KEY_RATE, "tokens/s", DRAW_LINE}}},
    {"Speed", "Time of a step", "ms", 1, CHART_ZERO, 2,
     {{KEY_MS, "step", DRAW_LINE}, {KEY_LOAD, "waiting for data", DRAW_LINE}}},
    {"Speed", "Model FLOPs utilization", "%", 100, CHART_ZERO, 1, {{KEY_MFU, "MFU", DRAW_LINE}}},
    {"Speed", "Memory", "GB", 1e-9, CHART_ZERO, 1, {{KEY_MEMORY, "memory", DRAW_LINE}}},
    {"Speed", "Computing time of the ranks", "ms", 1, CHART_ZERO | CHART_RANKS, 2,
     {{KEY_MS_MEDIAN, "median", DRAW_LINE}, {KEY_MS_MAX, "slowest", DRAW_LINE}}},
    {"Speed", "Waiting for other ranks", "% of a step of rank 0", 100, CHART_ZERO | CHART_RANKS, 1,
     {{KEY_WAIT, "waits", DRAW_LINE}}},
    {"Machine", "Power", "W", 1, CHART_ZERO, 1, {{KEY_POWER, "power", DRAW_LINE}}},
    {"Machine", "Energy", "joules per token", 1, CHART_ZERO, 1, {{KEY_ENERGY, "energy", DRAW_LINE}}},
    {"Machine", "Temperature", "degrees Celsius", 1, 0, 1, {{KEY_TEMPERATURE, "temperature", DRAW_LINE}}},
    {"Machine", "Clock", "MHz", 1, 0, 1, {{KEY_CLOCK, "clock", DRAW_LINE}}},
};

// A number of a cell as the chart shows it; NAN where it has none.
static inline double chart_value(const Chart* chart, const Run* run, const Cell* cell, double value) {
    if (cell->count == 0) return NAN;
    if (chart->options & CHART_EXCESS) value -= run->floor;
    value *= chart->factor;
    return (chart->options & CHART_LOG) && !(value > 0) ? NAN : value;
}

// The first columns of a run, whose loss is far above all others, do not set the scale.
static inline size_t chart_from(const Run* run) { return run->metrics.count / 32; }

// The scale of a chart; false if there is nothing to show. Linear scales end above the means: what is higher is cut off
// at the top, and *highest and *highest_step say what it was.
static inline bool chart_scale(SvgScale* scale, double* highest, double* highest_step, const Report* report,
                        const Chart* chart) {
    double low = INFINITY, high = -INFINITY, all_high = -INFINITY;
    *highest_step = 0;
    for (size_t r = 0; r < report->count; r++) {
        const Run* run = &report->runs[r];
        for (size_t i = 0; i < run->metrics.count; i++) {
            for (size_t s = 0; s < chart->count; s++) {
                const Cell* cell = &run->metrics.columns[i].cells[chart->series[s].key];
                double top = chart_value(chart, run, cell, cell->high);
                double bottom = chart_value(chart, run, cell, cell->low);
                if (bottom < low) low = bottom;
                if (top < low) low = top;
                if (i >= chart_from(run)) high = fmax(high, chart_value(chart, run, cell, cell_mean(cell)));
                if (top > all_high) *highest_step = run->metrics.columns[i].step;
                if (top > all_high) all_high = top;
            }
        }
        if ((chart->options & CHART_FLOOR) && isfinite(run->floor)) low = fmin(low, run->floor);
    }
    if (!(low <= all_high)) return false;
    bool log_scale = chart->options & CHART_LOG;
    if (chart->options & CHART_ZERO) low = fmin(low, 0);
    if (log_scale || !(high > low) || all_high - low < 1.5 * (high - low)) high = all_high;
    if (high - low < 1e-9 * fmax(fabs(high), fabs(low))) {  // all the same
        if (!(chart->options & CHART_ZERO)) low -= log_scale ? 0.5 * low : fmax(fabs(low), 1) / 2;
        high += high == 0 ? 1 : fabs(high) / 2;
    }
    *highest = all_high > high ? all_high : NAN;
    double pad = 0.04 * (high - low);
    scale->log = log_scale;
    scale->low = log_scale ? low / 1.1 : low == 0 && (chart->options & CHART_ZERO) ? 0 : low - pad;
    scale->high = log_scale ? high * 1.1 : high + pad;
    if (chart->options & CHART_MARKS) scale->low *= pow(high / low, -0.18);  // rows of marks below the line
    return true;
}

// Numbers of columns, with commas between them, for the cursor.
static inline void page_values(Page* page, const char* name, int digits, const double* values, size_t count) {
    page_put(page, " %s=\"", name);
    for (size_t i = 0; i < count; i++) {
        if (isfinite(values[i])) page_put(page, "%s%.*g", i ? "," : "", digits, values[i]);
        else page_put(page, "%s", i ? "," : "");
    }
    page_put(page, "\"");
}

typedef struct {
    double low[COLUMNS_MAX], mean[COLUMNS_MAX], high[COLUMNS_MAX];  // values
    double x[COLUMNS_MAX], y[COLUMNS_MAX];                          // of the means, on the axes
} Curve;

// The class and the numbers of a path.
static inline void page_attributes(Page* page, const char* kind, size_t color, size_t run, size_t key,
                                   const char* name) {
    page_put(page, "class=\"%s\" style=\"%s:var(--c%zu)\" data-r=\"%zu\" data-k=\"%zu\" data-n=\"", kind,
             strcmp(kind, "band") == 0 ? "fill" : "stroke", color % 8, run, key);
    page_string(page, name);
    page_put(page, "\"");
}

// Sets the numbers of a series of a run; returns how many columns have one. *wide: some have several.
static inline size_t curve_set(Curve* c, bool* wide, const Report* report, const Chart* chart, const SvgScale* scale,
                               const Run* run, Key key) {
    size_t there = 0;
    *wide = false;
    for (size_t i = 0; i < run->metrics.count; i++) {
        const Cell* cell = &run->metrics.columns[i].cells[key];
        c->x[i] = run->metrics.columns[i].step / report->high[0];
        c->mean[i] = chart_value(chart, run, cell, cell_mean(cell));
        c->low[i] = chart_value(chart, run, cell, cell->low);
        c->high[i] = chart_value(chart, run, cell, cell->high);
        if (isnan(c->low[i])) c->low[i] = c->mean[i];  // below the floor, on a log scale
        if (isnan(c->mean[i])) c->low[i] = c->high[i] = NAN;
        c->y[i] = isfinite(c->mean[i]) ? svg_at(scale, c->mean[i]) : NAN;
        *wide = *wide || c->low[i] < c->high[i];
        there += isfinite(c->mean[i]);
    }
    return there;
}

// The band of a curve, under its line.
static inline void curve_band(Page* page, Curve* c, const SvgScale* scale, size_t n, size_t color, size_t run,
                              size_t key, const char* name) {
    Page attributes = {0};
    page_attributes(&attributes, "band", color, run, key, name);
    page_values(&attributes, "data-v", 4, c->low, n);
    page_values(&attributes, "data-w", 4, c->high, n);
    for (size_t i = 0; i < n; i++) {
        c->low[i] = isfinite(c->low[i]) ? svg_at(scale, c->low[i]) : NAN;
        c->high[i] = isfinite(c->high[i]) ? svg_at(scale, c->high[i]) : NAN;
    }
    if (!attributes.failed) svg_band(page, c->x, c->low, c->high, n, attributes.text);
    page->failed = page->failed || attributes.failed;
    json_writer_free(&attributes);
}

// Dots on a line that has the numbers.
static inline void curve_dots(Page* page, const Curve* c, const Run* run, size_t color, size_t r, size_t key,
                              const char* name) {
    Page attributes = {0};
    page_attributes(&attributes, "dot", color, r, key, name);
    page_put(&attributes, " data-s=\"");
    for (size_t i = 0, done = 0; i < run->metrics.count; i++)
        if (isfinite(c->y[i])) page_put(&attributes, "%s%.0f", done++ ? "," : "", run->metrics.columns[i].step);
    page_put(&attributes, "\"");
    if (!attributes.failed) svg_dots(page, c->x, c->y, run->metrics.count, attributes.text);
    page->failed = page->failed || attributes.failed;
    json_writer_free(&attributes);
}

// The line of a series of a run, with its band or dots. Several runs have a color each, one run one for each series.
static inline void chart_curve(Page* page, Curve* c, const Report* report, const Chart* chart, const SvgScale* scale,
                               size_t r, size_t s) {
    enum { DOTS_MAX = 120 };
    const Run* run = &report->runs[r];
    bool several = report->count > 1, dots = chart->series[s].kind == DRAW_DOTS, wide;
    size_t n = run->metrics.count, color = several ? r : s;
    size_t key = several ? r : 100 + 10 * (size_t)(chart - CHARTS) + s;
    size_t there = curve_set(c, &wide, report, chart, scale, run, chart->series[s].key);
    char name[FILE_PATH_MAX + 16];
    Page attributes = {0};
    if (there == 0) return;
    snprintf(name, sizeof name, "%s%s", several ? run->directory : chart->series[s].name,
             several && s > 0 ? ", validation" : "");
    page_attributes(&attributes, "line", color, r, key, name);
    if (dots) page_put(&attributes, " data-d=\"1\"%s", several ? " stroke-dasharray=\"4 2\"" : "");
    page_values(&attributes, "data-v", 5, c->mean, n);
    if (wide && !dots) curve_band(page, c, scale, n, color, r, key, name);
    if (!attributes.failed) svg_line(page, c->x, c->y, n, dots, attributes.text);
    page->failed = page->failed || attributes.failed;
    json_writer_free(&attributes);
    if (dots && there <= DOTS_MAX) curve_dots(page, c, run, color, r, key, name);
}

// Which columns have clipped, skipped or traced steps.
static inline bool column_marked(const Metrics* m, size_t i, int kind) {
    const Cell* cells = m->columns[i].cells;
    const Cell* skipped = &cells[KEY_SKIPPED];
    double before = i ? m->columns[i - 1].cells[KEY_SKIPPED].high : 0;
    if (kind == 0) return cells[KEY_CLIP].count > 0 && cells[KEY_CLIP].low < 1;
    if (kind == 1) return skipped->count > 0 && skipped->high > before;
    return cells[KEY_WORST].count > 0;
}

static const struct {
    const char* name;
    size_t color;
} MARK_ROWS[3] = {{"clipped", 7}, {"skipped", 4}, {"traced", 3}};

// Rows of short strokes at the bottom of the plot.
static inline void chart_marks(Page* page, const Report* report) {
    for (size_t kind = 0; kind < 3; kind++) {
        const Metrics* m = &report->runs[0].metrics;
        bool any = false;
        for (size_t i = 0; i < m->count && !any; i++) any = column_marked(m, i, (int)kind);
        if (!any) continue;
        page_put(page, "<path class=\"mark\" data-r=\"0\" data-k=\"m%zu\" style=\"stroke:var(--c%zu)\" data-s=\"", kind,
                 MARK_ROWS[kind].color);
        for (size_t i = 0, n = 0; i < m->count; i++)
            if (column_marked(m, i, (int)kind)) page_put(page, "%s%.0f", n++ ? "," : "", m->columns[i].step);
        page_put(page, "\" d=\"");
        for (size_t i = 0; i < m->count; i++)
            if (column_marked(m, i, (int)kind))
                page_put(page, "M%d %zuv-200", svg_units(m->columns[i].step / report->high[0]), SVG_UNITS - 260 * kind);
        page_put(page, "\"/>");
    }
}

// What a line is: a button, with which the script hides it.
static inline void page_key(Page* page, const char* key, size_t color, const char* name) {
    page_put(page, "<button type=\"button\" data-k=\"%s\"><i class=\"key\" style=\"background:var(--c%zu)\"></i>", key,
             color % 8);
    page_string(page, name);
    page_put(page, "</button>");
}

static inline bool series_there(const Report* report, Key key) {
    for (size_t r = 0; r < report->count; r++)
        for (size_t i = 0; i < report->runs[r].metrics.count; i++)
            if (report->runs[r].metrics.columns[i].cells[key].count > 0) return true;
    return false;
}

static inline void chart_caption(Page* page, const Report* report, const Chart* chart) {
    char key[40];
    page_put(page, "<figcaption><b>%s</b>%s<span class=\"dim\">%s</span> ", chart->title, chart->unit[0] ? ", " : "",
             chart->unit);
    size_t there = 0;
    for (size_t s = 0; s < chart->count; s++) there += series_there(report, chart->series[s].key);
    for (size_t r = 0; r < report->count && report->count > 1; r++) {
        snprintf(key, sizeof key, "%zu", r);
        page_key(page, key, r, report->runs[r].directory);
    }
    for (size_t s = 0; s < chart->count && report->count == 1 && there > 1; s++) {
        snprintf(key, sizeof key, "%zu", 100 + 10 * (size_t)(chart - CHARTS) + s);
        if (series_there(report, chart->series[s].key)) page_key(page, key, s, chart->series[s].name);
    }
    for (size_t kind = 0; kind < 3 && (chart->options & CHART_MARKS) && report->count == 1; kind++) {
        const Metrics* m = &report->runs[0].metrics;
        bool any = false;
        for (size_t i = 0; i < m->count && !any; i++) any = column_marked(m, i, (int)kind);
        snprintf(key, sizeof key, "m%zu", kind);
        if (any) page_key(page, key, MARK_ROWS[kind].color, MARK_ROWS[kind].name);
    }
    page_put(page, "</figcaption><output></output>");
}

// The axes of a plot, as far as they are numbers.
static inline void chart_axes(Page* page, const Report* report, const SvgScale* scale) {
    if (scale) svg_axis_y(page, scale, 6);
    for (int a = 0; a < 3; a++) {
        SvgScale x = {0, report->high[a], false};
        const char* name = a == 0 ? "steps" : a == 1 ? "tokens" : report->time_name;
        svg_axis_x(page, &x, 5, a == 0 ? "a0" : a == 1 ? "a1" : "a2", name);
    }
}

// False if there is nothing to show.
static inline bool chart_there(const Report* report, const Chart* chart) {
    double highest, step;
    SvgScale scale;
    size_t ranks = 0;
    for (size_t r = 0; r < report->count; r++)
        ranks = max_size(ranks, metrics_mean(&report->runs[r].metrics, KEY_WAIT) > 0 ? 2 : 1);
    if ((chart->options & CHART_RANKS) && ranks < 2) return false;
    return chart_scale(&scale, &highest, &step, report, chart);
}

static inline void chart_write(Page* page, Curve* curve, const Report* report, const Chart* chart) {
    double highest, step;
    char text[40], other[40];
    SvgScale scale;
    if (!chart_scale(&scale, &highest, &step, report, chart)) return;
    page_put(page, "<figure%s>", chart->options & CHART_WIDE ? " class=\"wide\"" : "");
    chart_caption(page, report, chart);
    page_put(page, "<div class=\"box\"><svg class=\"plot\" height=\"%d\">", chart->options & CHART_WIDE ? 280 : 180);
    chart_axes(page, report, &scale);
    svg_curves_begin(page);
    for (size_t r = 0; r < report->count; r++)  // several runs: their first series, and what has dots
        for (size_t s = 0; s < chart->count; s++)
            if (s == 0 || report->count == 1 || chart->series[s].kind == DRAW_DOTS)
                chart_curve(page, curve, report, chart, &scale, r, s);
    for (size_t r = 0; r < report->count && (chart->options & CHART_FLOOR); r++) {
        double y = svg_at(&scale, report->runs[r].floor);
        if (isfinite(y) && (r == 0 || report->runs[r].floor != report->runs[0].floor))
            page_put(page, "<path class=\"line floor\" style=\"stroke:var(--dim)\" d=\"M0 %dH%d\"/>", svg_units(1 - y),
                     SVG_UNITS);
    }
    if ((chart->options & CHART_MARKS) && report->count == 1) chart_marks(page, report);
    svg_curves_end(page);
    page_put(page, "<line class=\"cursor\" y2=\"100%%\" style=\"display:none\"/></svg></div>");
    if (isfinite(highest))
        page_put(page, "<p class=\"note\">Cut off at the top; the highest value is %s, at or before step %s.</p>",
                 number_text(text, highest), number_text(other, step));
    bool floor = (chart->options & CHART_FLOOR) && isfinite(report->runs[0].floor);
    if (floor)
        page_put(page, "<p class=\"note\">Dashed: %s, the entropy of the validation text, which no model can beat.</p>",
                 number_text(text, report->runs[0].floor));
    page_put(page, "</figure>");
}

static inline void charts_write(Page* page, Curve* curve, const Report* report) {
    const char* section = NULL;
    for (size_t i = 0; i < sizeof CHARTS / sizeof *CHARTS; i++) {
        if (!chart_there(report, &CHARTS[i])) continue;
        bool begins = section == NULL || strcmp(section, CHARTS[i].section) != 0;
        if (begins && section) page_put(page, "</div>");
        if (begins) page_put(page, "<h2>%s</h2>", CHARTS[i].section);
        if (section == NULL)
            page_put(page, "<p id=\"axis\" hidden=\"\"><span class=\"dim\">x axis </span><button type=\"button\">steps"
                     "</button><button type=\"button\">tokens</button><button type=\"button\">%s</button></p>",
                     report->time_name);
        if (begins) page_put(page, "<div class=\"charts\">");
        section = CHARTS[i].section;
        chart_write(page, curve, report, &CHARTS[i]);
    }
    if (section) page_put(page, "</div>");
}

#endif  // LLMTRAIN_REPORT_CHARTS_H
