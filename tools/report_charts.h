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
    double high[3];      // the ends of the x axes, AXES
    double time_unit;    // seconds of the unit of the time axis
    const char* axes[3]; // their names: steps, tokens, the unit
} Report;

// ------------------------------------------------------------------------------------------------
// Charts

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
    bool dots;           // a dot for each number; else a band about the line, from the minimum to the maximum
} Series;

typedef struct {
    const char *section, *title, *unit;
    double factor;       // of the numbers
    unsigned options;
    size_t count;
    Series series[2];
} Chart;

static const Chart CHARTS[] = {
    {"Loss", "Loss", "nats per token", 1, CHART_FLOOR | CHART_WIDE, 2,
     {{KEY_LOSS, "training", false}, {KEY_VAL, "validation", true}}},
    {"Loss", "Above the entropy floor", "nats per token", 1, CHART_LOG | CHART_EXCESS | CHART_WIDE, 2,
     {{KEY_LOSS, "training", false}, {KEY_VAL, "validation", true}}},
    {"Loss", "Pairs or answers on the right side", "%", 100, 0, 1, {{KEY_ACCURACY, "accuracy", false}}},
    {"Loss", "Margin", "", 1, 0, 1, {{KEY_MARGIN, "margin", false}}},
    {"Loss", "Log-probability of answers", "nats per answer", 1, 0, 2,
     {{KEY_CHOSEN, "chosen", false}, {KEY_REJECTED, "rejected", false}}},
    {"Optimization", "Gradient norm", "before clipping", 1, CHART_LOG | CHART_MARKS, 1, {{KEY_NORM, "norm", false}}},
    {"Optimization", "Learning rate", "", 1, CHART_ZERO, 1, {{KEY_LR, "rate", false}}},
    {"Speed", "Throughput", "tokens per second", 1, CHART_ZERO, 1, {{KEY_RATE, "tokens/s", false}}},
    {"Speed", "Time of a step", "ms", 1, CHART_ZERO, 2,
     {{KEY_MS, "step", false}, {KEY_LOAD, "waiting for data", false}}},
    {"Speed", "Model FLOPs utilization", "%", 100, CHART_ZERO, 1, {{KEY_MFU, "MFU", false}}},
    {"Speed", "Memory", "GB", 1e-9, CHART_ZERO, 1, {{KEY_MEMORY, "memory", false}}},
    {"Speed", "Computing time of the ranks", "ms", 1, CHART_ZERO | CHART_RANKS, 2,
     {{KEY_MS_MEDIAN, "median", false}, {KEY_MS_MAX, "slowest", false}}},
    {"Speed", "Waiting for other ranks", "% of a step of rank 0", 100, CHART_ZERO | CHART_RANKS, 1,
     {{KEY_WAIT, "waits", false}}},
    {"Machine", "Power", "W", 1, CHART_ZERO, 1, {{KEY_POWER, "power", false}}},
    {"Machine", "Energy", "joules per token", 1, CHART_ZERO, 1, {{KEY_ENERGY, "energy", false}}},
    {"Machine", "Temperature", "degrees Celsius", 1, 0, 1, {{KEY_TEMPERATURE, "temperature", false}}},
    {"Machine", "Clock", "MHz", 1, 0, 1, {{KEY_CLOCK, "clock", false}}},
};

// The number by which the script hides a series of a run.
static inline size_t chart_series_id(const Chart* chart, size_t s) { return 100 + 10 * (size_t)(chart - CHARTS) + s; }

// A number of a cell as the chart shows it; NAN where it has none.
static inline double chart_value(const Chart* chart, const Run* run, const Cell* cell, double value) {
    if (cell->count == 0) return NAN;
    if (chart->options & CHART_EXCESS) value -= run->floor;
    value *= chart->factor;
    return (chart->options & CHART_LOG) && !(value > 0) ? NAN : value;
}

// The scale of a chart; false if there is nothing to show. Linear scales end above the means, without those of the
// first columns, whose loss is far above all others: what is higher is cut off at the top, and *highest and
// *highest_step say what it was.
static inline bool chart_scale(SvgScale* scale, double* highest, double* highest_step, const Report* report,
                               const Chart* chart) {
    double low = INFINITY, high = -INFINITY, all_high = -INFINITY;
    *highest_step = 0;
    for (size_t r = 0; r < report->count; r++) {
        const Run* run = &report->runs[r];
        for (size_t i = 0; i < run->metrics.count * chart->count; i++) {
            const Column* column = &run->metrics.columns[i / chart->count];
            const Cell* cell = &column->cells[chart->series[i % chart->count].key];
            double top = chart_value(chart, run, cell, cell->high);
            low = fmin(low, fmin(top, chart_value(chart, run, cell, cell->low)));
            bool early = i / chart->count < run->metrics.count / 32;
            if (!early) high = fmax(high, chart_value(chart, run, cell, cell_mean(cell)));
            if (top > all_high) *highest_step = column->step;
            all_high = fmax(all_high, top);
        }
        if (chart->options & CHART_FLOOR) low = fmin(low, run->floor);
    }
    if (!(low <= all_high)) return false;
    bool log_scale = chart->options & CHART_LOG;
    if (chart->options & CHART_ZERO) low = fmin(low, 0);
    if (log_scale || !(high > low) || all_high - low < 1.5 * (high - low)) high = all_high;
    if (high - low <= 1e-9 * fmax(fabs(high), fabs(low))) {  // all the same
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
        if (i > 0) page_put(page, ",");
        if (isfinite(values[i])) page_put(page, "%.*g", digits, values[i]);
    }
    page_put(page, "\"");
}

typedef struct {
    double step;
    int y;               // of its upper end
} Stroke;

// The rest of a path of short vertical strokes at steps: events, marked steps, or dots, which have no height.
static inline void strokes_write(Page* page, const Report* report, const Stroke* strokes, size_t count, int height) {
    page_put(page, " data-s=\"");
    for (size_t i = 0; i < count; i++) page_put(page, "%s%.0f", i ? "," : "", strokes[i].step);
    page_put(page, "\" d=\"");
    for (size_t i = 0; i < count; i++)
        page_put(page, "M%d %dv%d", svg_units(fmin(fmax(strokes[i].step / report->high[0], 0), 1)), strokes[i].y,
                 height);
    page_put(page, "\"/>");
}

// The values of a series of a run, one for each column, and where the columns are on the axis.
typedef struct {
    double x[COLUMNS_MAX], low[COLUMNS_MAX], mean[COLUMNS_MAX], high[COLUMNS_MAX];
} Curve;

// Begins a path of a series of a run. Several runs have a color each, one run one for each series.
static inline void curve_begin(Page* page, const Report* report, const Chart* chart, size_t r, size_t s,
                               const char* class_name) {
    bool several = report->count > 1;
    page_put(page, "<path class=\"%s\" style=\"%s:var(--c%zu)\" data-r=\"%zu\" data-k=\"%zu\" data-n=\"", class_name,
             strcmp(class_name, "band") == 0 ? "fill" : "stroke", several ? r : s, r,
             several ? r : chart_series_id(chart, s));
    page_string(page, "", several ? report->runs[r].directory : chart->series[s].name,
                several && s > 0 ? ", validation\"" : "\"");
}

// The line of a series of a run, with its band or dots.
static inline void chart_curve(Page* page, Curve* c, const Report* report, const Chart* chart, const SvgScale* scale,
                               size_t r, size_t s) {
    enum { DOTS_MAX = 120 };
    const Run* run = &report->runs[r];
    bool dots = chart->series[s].dots, wide = false;
    size_t n = run->metrics.count, there = 0;
    Stroke strokes[COLUMNS_MAX];
    for (size_t i = 0; i < n; i++) {
        const Column* column = &run->metrics.columns[i];
        const Cell* cell = &column->cells[chart->series[s].key];
        c->x[i] = column->step / report->high[0];
        c->mean[i] = chart_value(chart, run, cell, cell_mean(cell));
        c->low[i] = chart_value(chart, run, cell, cell->low);
        c->high[i] = chart_value(chart, run, cell, cell->high);
        if (isnan(c->low[i])) c->low[i] = c->mean[i];  // below the floor, on a log scale
        if (isnan(c->mean[i])) c->low[i] = c->high[i] = NAN;
        wide = wide || c->low[i] < c->high[i];
        if (isfinite(c->mean[i]))
            strokes[there++] = (Stroke){column->step, svg_units(1 - svg_at(scale, c->mean[i]))};
    }
    if (there == 0) return;
    if (wide && !dots) {
        curve_begin(page, report, chart, r, s, "band");
        page_values(page, "data-v", 4, c->low, n);
        page_values(page, "data-w", 4, c->high, n);
        svg_band(page, scale, c->x, c->low, c->high, n);
    }
    curve_begin(page, report, chart, r, s, "line");
    if (dots) page_put(page, " data-d=\"1\"%s", report->count > 1 ? " stroke-dasharray=\"4 2\"" : "");
    page_values(page, "data-v", 5, c->mean, n);
    svg_line(page, scale, c->x, c->mean, n, dots);
    if (!dots || there > DOTS_MAX) return;
    curve_begin(page, report, chart, r, s, "dot");
    strokes_write(page, report, strokes, there, 0);
}

// Steps that have a row of strokes at the bottom of the plot.
static const struct {
    const char* name;
    size_t color;
} MARK_ROWS[] = {{"clipped", 7}, {"skipped", 4}, {"traced", 3}};
enum { MARK_ROW_COUNT = sizeof MARK_ROWS / sizeof *MARK_ROWS };

// The columns with clipped, skipped or traced steps; returns how many there are.
static inline size_t marks_find(Stroke strokes[COLUMNS_MAX], const Metrics* m, size_t row) {
    size_t count = 0;
    double skipped = 0;
    for (size_t i = 0; i < m->count; i++) {
        const Cell *cells = m->columns[i].cells, *clip = &cells[KEY_CLIP];
        bool more = cells[KEY_SKIPPED].high > skipped;
        bool marked = row == 0 ? clip->count > 0 && clip->low < 1 : row == 1 ? more : cells[KEY_WORST].count > 0;
        skipped = cells[KEY_SKIPPED].high;
        if (marked) strokes[count++] = (Stroke){m->columns[i].step, SVG_UNITS - 260 * (int)row};
    }
    return count;
}

static inline void chart_marks(Page* page, const Report* report) {
    Stroke strokes[COLUMNS_MAX];
    for (size_t row = 0; row < MARK_ROW_COUNT; row++) {
        size_t count = marks_find(strokes, &report->runs[0].metrics, row);
        if (count == 0) continue;
        page_put(page, "<path class=\"mark\" data-r=\"0\" data-k=\"m%zu\" style=\"stroke:var(--c%zu)\"", row,
                 MARK_ROWS[row].color);
        strokes_write(page, report, strokes, count, -200);
    }
}

// What a line or a row of marks is: a button, with which the script hides what has this key.
static inline void page_key(Page* page, const char* prefix, size_t key, size_t color, const char* name) {
    page_put(page, "<button type=\"button\" data-k=\"%s%zu\"><i class=\"key\" style=\"background:var(--c%zu)\"></i>",
             prefix, key, color);
    page_string(page, "", name, "</button>");
}

// The title, and the keys of the lines if there are several: of the runs, or of the series of the run.
static inline void chart_caption(Page* page, const Report* report, const Chart* chart) {
    const Metrics* m = &report->runs[0].metrics;
    Stroke strokes[COLUMNS_MAX];
    size_t there = 0;
    page_put(page, "<figcaption><b>%s</b>%s<span class=\"dim\">%s</span> ", chart->title, chart->unit[0] ? ", " : "",
             chart->unit);
    for (size_t r = 0; r < report->count && report->count > 1; r++)
        page_key(page, "", r, r, report->runs[r].directory);
    for (size_t s = 0; s < chart->count; s++) there += isfinite(m->last[chart->series[s].key]);
    for (size_t s = 0; s < chart->count && report->count == 1 && there > 1; s++)
        page_key(page, "", chart_series_id(chart, s), s, chart->series[s].name);
    for (size_t row = 0; row < MARK_ROW_COUNT && report->count == 1 && (chart->options & CHART_MARKS); row++)
        if (marks_find(strokes, m, row) > 0) page_key(page, "m", row, MARK_ROWS[row].color, MARK_ROWS[row].name);
    page_put(page, "</figcaption><output></output>");
}

// The three x axes, of which one is shown.
static inline void axes_write(Page* page, const Report* report) {
    static const char* const groups[] = {"a0", "a1", "a2"};
    for (int a = 0; a < 3; a++) {
        SvgScale x = {0, report->high[a], false};
        svg_axis_x(page, &x, 5, groups[a], report->axes[a]);
    }
}

static inline void axes_choice(Page* page, const Report* report) {
    page_put(page, "<p id=\"axis\" hidden=\"\"><span class=\"dim\">x axis </span>");
    for (int a = 0; a < 3; a++) page_put(page, "<button type=\"button\">%s</button>", report->axes[a]);
    page_put(page, "</p>");
}

static inline void chart_plot(Page* page, Curve* curve, const Report* report, const Chart* chart,
                              const SvgScale* scale) {
    page_put(page, "<div class=\"box\"><svg class=\"plot\" height=\"%d\">", chart->options & CHART_WIDE ? 280 : 180);
    svg_axis_y(page, scale, 6);
    axes_write(page, report);
    svg_curves_begin(page);
    for (size_t r = 0; r < report->count; r++)  // several runs: their first series, and what has dots
        for (size_t s = 0; s < chart->count; s++)
            if (s == 0 || report->count == 1 || chart->series[s].dots)
                chart_curve(page, curve, report, chart, scale, r, s);
    for (size_t r = 0; r < report->count && (chart->options & CHART_FLOOR); r++) {
        double floor = report->runs[r].floor;
        if (isfinite(floor) && (r == 0 || floor != report->runs[0].floor))
            page_put(page, "<path class=\"line floor\" style=\"stroke:var(--dim)\" d=\"M0 %dH%d\"/>",
                     svg_units(1 - svg_at(scale, floor)), SVG_UNITS);
    }
    if ((chart->options & CHART_MARKS) && report->count == 1) chart_marks(page, report);
    page_put(page, "</svg><line class=\"cursor\" y2=\"100%%\" style=\"display:none\"/></svg></div>");
}

static inline void charts_write(Page* page, Curve* curve, const Report* report) {
    const char* section = "";
    bool waits = false;
    for (size_t r = 0; r < report->count; r++)
        waits = waits || metrics_mean(&report->runs[r].metrics, KEY_WAIT, COLUMNS_MAX) > 0;
    for (size_t i = 0; i < sizeof CHARTS / sizeof *CHARTS; i++) {
        const Chart* chart = &CHARTS[i];
        double highest, step, floor = report->runs[0].floor;
        char text[40], other[40];
        SvgScale scale;
        if ((chart->options & CHART_RANKS) && !waits) continue;
        if (!chart_scale(&scale, &highest, &step, report, chart)) continue;
        if (strcmp(section, chart->section) != 0) {
            page_put(page, "%s<h2>%s</h2>", section[0] ? "</div>" : "", chart->section);
            if (section[0] == 0) axes_choice(page, report);
            page_put(page, "<div class=\"charts\">");
        }
        section = chart->section;
        page_put(page, "<figure%s>", chart->options & CHART_WIDE ? " class=\"wide\"" : "");
        chart_caption(page, report, chart);
        chart_plot(page, curve, report, chart, &scale);
        if (isfinite(highest))
            page_put(page, "<p class=\"note\">Cut off at the top; the highest value is %s, at or before step %s.</p>",
                     number_text(text, highest), number_text(other, step));
        if ((chart->options & CHART_FLOOR) && isfinite(floor))
            page_put(page, "<p class=\"note\">Dashed: %s, the entropy of the validation text, which no model can beat."
                     "</p>", number_text(text, floor));
        page_put(page, "</figure>");
    }
    if (section[0]) page_put(page, "</div>");
}

#endif  // LLMTRAIN_REPORT_CHARTS_H
