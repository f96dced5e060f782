// report_page.h: the page of build/report: what it shows of a run or of several, as HTML and SVG.
//
//   1. parts   of the page: head, table of the runs, time, ranks, events, sequences, samples
//   2. page    all of them
//
// What has no data is left out. The page holds no date and nothing of the machine: equal files give equal bytes.

#ifndef LLMTRAIN_REPORT_PAGE_H
#define LLMTRAIN_REPORT_PAGE_H

#include "report_charts.h"
#include "report_style.h"
#include "../llmtrain/base/progress.h"  // duration_text

// ------------------------------------------------------------------------------------------------
// 1. Parts of the page

// From its first start to the last that is known, or the time of its steps.
static inline double run_wall(const Run* run) {
    return run->goodput.wall > 0 ? run->goodput.wall : run->metrics.seconds;
}

// A number of run.jsonl; NAN if it is not there.
static inline double start_number(const Run* run, const char* key) {
    double value = NAN;
    json_number(&run->start, json_get(&run->start, 0, key), &value);
    return value;
}

// The text of a node, between two of the page: a string, a number, or the elements of an array.
static inline void page_node(Page* page, const char* before, const Json* json, uint32_t node, const char* after) {
    page_put(page, "%s", before);
    if (json_is(json, node, JSON_ARRAY)) {
        for (uint32_t i = json_first(json, node); i != JSON_NONE; i = json_next(json, i))
            page_node(page, "", json, i, json_next(json, i) == JSON_NONE ? "" : ", ");
    } else if (json_is(json, node, JSON_STRING)) {
        page_text(page, json->text + json->nodes[node].start, json->nodes[node].bytes);
    } else if (json_is(json, node, JSON_NUMBER)) {
        char text[40];
        double value = NAN;
        json_number(json, node, &value);
        page_put(page, "%s", number_text(text, value));
    }
    page_put(page, "%s", after);
}

static inline const char* run_state(const Run* run) {
    static const char* const states[] = {
        "<span class=\"state s0\">running</span>", "<span class=\"state s1\">done</span>",
        "<span class=\"state s2\">stopped</span>", "<span class=\"state s3\">failed</span>"};
    return states[run->events.state];
}

// The numbers of a run that count most: tiles of one run, columns of a table of several. A value that is not known is
// empty.
typedef struct {
    char value[64], detail[64];
    const char* name;
} Fact;

typedef struct {
    Fact rows[16];
    size_t count;
} Facts;

// known: whether there is a value. format: as printf.
__attribute__((format(printf, 5, 6))) static inline void fact_add(Facts* facts, bool known, const char* name,
                                                                  const char* detail, const char* format, ...) {
    Fact* fact = &facts->rows[facts->count++];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fact->value, sizeof fact->value, format, arguments);
    va_end(arguments);
    snprintf(fact->detail, sizeof fact->detail, "%s", detail);
    fact->name = name;
    if (!known) fact->value[0] = 0;
}

static inline void facts_add(Facts* f, const Run* run, double price) {
    const Metrics* m = &run->metrics;
    const Goodput* g = &run->goodput;
    const double *last = m->last, wall = run_wall(run), steps = start_number(run, "steps");
    char text[64], best[64] = "", all[64];
    double ranks = start_number(run, "ranks"), loss = metrics_mean(m, KEY_LOSS, m->count / 50 + 1);
    double mfu = metrics_mean(m, KEY_MFU, COLUMNS_MAX), rate = metrics_mean(m, KEY_RATE, COLUMNS_MAX);
    double above = last[KEY_VAL] / run->floor - 1;
    bool timed = m->count > 0 && isfinite(wall), kwh = m->joules >= 3.6e6;
    if (!isfinite(ranks)) ranks = (double)max_size(run->heat.ranks, 1);
    if (isfinite(m->best_step)) snprintf(best, sizeof best, ", step %s", number_text(text, m->best_step));
    snprintf(all, sizeof all, " of %s", number_text(text, steps));
    fact_add(f, isfinite(loss), "training loss", ", recent mean", "%s", number_text(text, loss));
    fact_add(f, isfinite(last[KEY_VAL]), "validation loss", ", last", "%s", number_text(text, last[KEY_VAL]));
    fact_add(f, isfinite(m->best_val), "validation loss, best", best, "%s", number_text(text, m->best_val));
    fact_add(f, isfinite(above), "above the entropy floor", "", "%+.1f%%", 100 * above);
    fact_add(f, m->lines > 0, "steps", steps > 0 ? all : "", "%s", number_text(text, last[KEY_STEP]));
    fact_add(f, last[KEY_TOKENS] > 0, "tokens", "", "%s", number_short(text, last[KEY_TOKENS]));
    duration_text(text, sizeof text, wall);
    fact_add(f, timed, "time", "", "%s", text);
    fact_add(f, rate > 0, "tokens per second", "", "%s", number_short(text, rate));
    fact_add(f, isfinite(mfu), "model FLOPs utilization", "", "%.1f%%", 100 * mfu);
    fact_add(f, g->wall > 0, "goodput", "", "%.1f%%", 100 * g->steps / g->wall);
    fact_add(f, m->joules > 0, "energy", "", "%.3g %s", kwh ? m->joules / 3.6e6 : m->joules, kwh ? "kWh" : "J");
    fact_add(f, timed && price > 0, "cost", "", "$%.2f", price * wall / 3600 * ranks);
    fact_add(f, last[KEY_SKIPPED] > 0, "steps skipped", "", "%s", number_text(text, last[KEY_SKIPPED]));
}

static const struct {
    const char *name, *key;
    double hidden;      // the highest number that is not shown: not known, or no parallelism
} START_ROWS[] = {
    {"parameters", "parameters", 0}, {"of which train", "trained", 0}, {"family", "family", 0}, {"layers", "layers", 0},
    {"channels", "channels", 0}, {"heads", "heads", 0}, {"key/value heads", "kv_heads", 0}, {"vocabulary", "vocab", 0},
    {"sequence", "seq", 0}, {"FLOPs per token", "flops_per_token", 0}, {"precision", "precision", 0},
    {"device", "device", 0}, {"hosts", "hosts", 0}, {"ranks", "ranks", 0}, {"data parallel", "dp", 1},
    {"tensor parallel", "tp", 1}, {"pipeline stages", "pp", 1}, {"context parallel", "cp", 1},
    {"ZeRO stage", "zero", 0}, {"micro-batch", "batch", 0}, {"tokens per step", "total_batch", 0}, {"data", "data", 0},
    {"llmtrain", "version", 0}, {"command", "command", 0},
};

// What run.jsonl says.
static inline void start_write(Page* page, const Run* run) {
    page_put(page, "<dl>");
    for (size_t i = 0; i < sizeof START_ROWS / sizeof *START_ROWS; i++) {
        const char* key = START_ROWS[i].key;
        uint32_t node = json_get(&run->start, 0, key);
        double number = start_number(run, key);
        bool all_train = strcmp(key, "trained") == 0 && number == start_number(run, "parameters");
        if (node == JSON_NONE || number <= START_ROWS[i].hidden || all_train) continue;
        bool command = strcmp(key, "command") == 0;
        page_put(page, "<div%s><dt>%s</dt>", command ? " class=\"wide\"" : "", START_ROWS[i].name);
        page_node(page, command ? "<dd><code>" : "<dd>", &run->start, node, command ? "</code></dd>" : "</dd>");
        page_put(page, "</div>");
    }
    page_put(page, "</dl>");
}

static inline void head_write(Page* page, const Report* report) {
    const Run* run = &report->runs[0];
    Facts facts = {.count = 0};
    facts_add(&facts, run, report->price);
    page_string(page, "<h1>", run->directory, run_state(run));
    page_put(page, "</h1><div class=\"tiles\">");
    for (const Fact* fact = facts.rows; fact < facts.rows + facts.count; fact++)
        if (fact->value[0])
            page_put(page, "<div><b>%s</b><small>%s%s</small></div>", fact->value, fact->name, fact->detail);
    page_put(page, "</div>");
    if (json_count(&run->start, 0) > 0) start_write(page, run);
}

// The tokens with which the mean loss of a run first was at most `loss`.
static inline double tokens_to(const Run* run, Key key, double loss) {
    for (size_t i = 0; i < run->metrics.count; i++)
        if (cell_mean(&run->metrics.columns[i].cells[key]) <= loss) return run->metrics.columns[i].tokens;
    return NAN;
}

// The lowest loss that all runs reach, in the validation if all have one, or else in training; NAN: there is none.
static inline double common_loss(Key* key, const Report* report) {
    double common = -INFINITY;
    *key = KEY_VAL;
    for (size_t r = 0; r < report->count; r++)
        if (isnan(report->runs[r].metrics.best_val)) *key = KEY_LOSS;
    for (size_t r = 0; r < report->count; r++) {
        double least = INFINITY;
        for (size_t i = 0; i < report->runs[r].metrics.count; i++)
            least = fmin(least, cell_mean(&report->runs[r].metrics.columns[i].cells[*key]));
        common = fmax(common, least);
    }
    return isfinite(common) ? common : NAN;
}

// A flag of a run, as it was given; "": it was not.
static inline const char* run_flag(const Run* run, const char* name) {
    uint32_t node = json_get(&run->start, json_get(&run->start, 0, "flags"), name);
    return json_is(&run->start, node, JSON_STRING) ? run->start.text + run->start.nodes[node].start : "";
}

// The flags that are not the same in all runs.
static inline void flags_rows(Page* page, const Report* report) {
    bool begun = false;
    for (size_t r = 0; r < report->count; r++) {
        const Json* start = &report->runs[r].start;
        uint32_t flags = json_get(start, 0, "flags");
        for (uint32_t i = json_first(start, flags); i != JSON_NONE; i = json_next(start, i)) {
            const char *name = json_key(start, i), *first = run_flag(&report->runs[0], name);
            bool same = true, shown = strcmp(name, "out") == 0;
            for (size_t q = 0; q < r; q++) shown = shown || run_flag(&report->runs[q], name)[0];
            for (size_t q = 1; q < report->count; q++)
                same = same && strcmp(run_flag(&report->runs[q], name), first) == 0;
            if (same || shown) continue;
            if (!begun)
                page_put(page, "<tr><th class=\"sub\" colspan=\"%zu\">Flags that differ</th></tr>", report->count + 1);
            begun = true;
            page_string(page, "<tr><td class=\"nowrap\"><code>--", name, "</code></td>");
            for (size_t q = 0; q < report->count; q++)
                page_string(page, "<td class=\"n\">", run_flag(&report->runs[q], name), "</td>");
            page_put(page, "</tr>");
        }
    }
}

static inline void runs_table(Page* page, const Report* report) {
    Facts facts[RUNS_MAX];
    char text[40], name[96];
    Key key;
    double common = common_loss(&key, report);
    snprintf(name, sizeof name, "tokens to a %s loss of %s", key == KEY_VAL ? "validation" : "training",
             number_text(text, common));
    page_put(page, "<div class=\"scroll\"><table><thead><tr><th></th>");
    for (size_t r = 0; r < report->count; r++) {
        double tokens = tokens_to(&report->runs[r], key, common);
        facts[r].count = 0;
        fact_add(&facts[r], true, "state", "", "%s", run_state(&report->runs[r]));
        facts_add(&facts[r], &report->runs[r], report->price);
        fact_add(&facts[r], isfinite(tokens), name, "", "%s", number_short(text, tokens));
        page_put(page, "<th class=\"n\"><i class=\"key\" style=\"background:var(--c%zu)\"></i>", r);
        page_string(page, "", report->runs[r].directory, "</th>");
    }
    page_put(page, "</tr></thead><tbody>");
    for (size_t i = 0; i < facts[0].count; i++) {
        bool any = false;
        for (size_t r = 0; r < report->count; r++) any = any || facts[r].rows[i].value[0];
        if (!any) continue;
        page_put(page, "<tr><td class=\"nowrap fact\">%s</td>", facts[0].rows[i].name);
        for (size_t r = 0; r < report->count; r++) page_put(page, "<td class=\"n\">%s</td>", facts[r].rows[i].value);
        page_put(page, "</tr>");
    }
    flags_rows(page, report);
    page_put(page, "</tbody></table></div>");
}

static inline void page_section(Page* page, const Report* report, const Run* run, const char* title) {
    page_put(page, "<h2>%s", title);
    if (report->count > 1) page_string(page, " <span class=\"dim\">", run->directory, "</span>");
    page_put(page, "</h2>");
}

static inline void goodput_write(Page* page, const Report* report, const Run* run) {
    static const int colors[GOODPUT_PART_COUNT] = {2, 4, 0, 3, 5, 6, 7};
    const Goodput* g = &run->goodput;
    double seconds[GOODPUT_PART_COUNT];
    char text[40];
    if (!(g->wall > 0)) return;
    page_section(page, report, run, "Where the time went");
    page_put(page, "<div class=\"bar\">");
    for (size_t i = 0; i < GOODPUT_PART_COUNT; i++) {
        memcpy(&seconds[i], (const char*)g + GOODPUT_PARTS[i].offset, sizeof *seconds);
        if (seconds[i] > 0)
            page_put(page, "<span title=\"%s\" style=\"width:%.3f%%;background:var(--c%d)\"></span>",
                     GOODPUT_PARTS[i].name, 100 * seconds[i] / g->wall, colors[i]);
    }
    page_put(page, "</div><div class=\"scroll\"><table><tbody>");
    for (size_t i = 0; i < GOODPUT_PART_COUNT; i++) {
        duration_text(text, sizeof text, seconds[i]);
        if (seconds[i] > 0)
            page_put(page, "<tr><td><i class=\"key\" style=\"background:var(--c%d)\"></i>%s</td><td class=\"n\">%s</td>"
                     "<td class=\"n\">%.2f%%</td></tr>", colors[i], GOODPUT_PARTS[i].name, text,
                     100 * seconds[i] / g->wall);
    }
    page_put(page, "</tbody></table></div><p class=\"note\">%llu start%s",
             (unsigned long long)g->starts, g->starts == 1 ? "" : "s");
    if (g->rewinds > 0) page_put(page, ", %llu rewind%s", (unsigned long long)g->rewinds, g->rewinds == 1 ? "" : "s");
    if (g->repeated_steps > 0)
        page_put(page, ", %s steps made again", number_text(text, (double)g->repeated_steps));
    page_put(page, ".</p>");
}

// Colors from half the median, blue, to twice the median, red; the median is white.
static inline void heat_image(Page* page, const Heat* h) {
    static const double blue[3] = {33, 82, 148}, red[3] = {178, 24, 43}, middle[3] = {247, 247, 245};
    static unsigned char cells[HEAT_ROWS * HEAT_COLUMNS], palette[256][3];
    for (int i = 0; i < 768; i++) {
        double at = pow(fabs(i / 3 - 128.0) / 128, 0.8), end = i / 3 < 128 ? blue[i % 3] : red[i % 3];
        palette[i / 3][i % 3] = (unsigned char)lrint(middle[i % 3] + (end - middle[i % 3]) * at);
    }
    for (size_t i = 0; i < h->rows * h->count; i++) {
        const HeatCell* cell = &h->cells[i % h->count * HEAT_ROWS + i / h->count];
        double ratio = cell->count ? (double)cell->ratio / cell->count : 1;
        cells[i] = (unsigned char)lrint(fmin(fmax(128 + 128 * log2(ratio), 0), 255));
    }
    bitmap_uri(page, cells, h->count, h->rows, palette);
}

// The slowest ranks.
static inline void ranks_table(Page* page, const Heat* h) {
    page_put(page, "<div class=\"scroll\"><table><thead><tr><th class=\"n\">rank</th><th class=\"n\">computes, ms</th>"
             "<th class=\"n\">of the median</th><th class=\"n\">waits, ms</th><th class=\"n\">slowest in</th></tr>"
             "</thead><tbody>");
    for (const RankSum* s = h->sums; s < h->sums + min_size(h->ranks, RANKS_SHOWN); s++) {
        double lines = (double)max_size(s->lines, 1);
        page_put(page, "<tr><td class=\"n\">%zu</td><td class=\"n\">%.2f</td><td class=\"n\">%.3f</td>"
                 "<td class=\"n\">%.2f</td><td class=\"n\">%.1f%% of the steps</td></tr>", s->rank, s->busy / lines,
                 s->ratio / lines, s->wait / lines, 100 * (double)s->slowest / lines);
    }
    page_put(page, "</tbody></table></div>");
}

static inline void ranks_write(Page* page, const Report* report, const Run* run) {
    const Heat* h = &run->heat;
    if (h->count == 0 || h->ranks < 2) return;
    double ranks = (double)h->ranks, ticks[SVG_TICKS_MAX];
    SvgScale x = {0, h->steps[h->count - 1], false}, y = {0, ranks, false};
    page_section(page, report, run, "Ranks");
    page_put(page, "<figure><figcaption><b>Computing time of each rank</b>, <span class=\"dim\">of the median of all "
             "ranks, from half (blue) to twice (red); rank 0 is at the top</span></figcaption><div class=\"box\"><svg "
             "class=\"plot\" height=\"%d\"><image class=\"heat\" width=\"100%%\" height=\"100%%\" "
             "preserveAspectRatio=\"none\" href=\"", (int)fmin(fmax(16.0 * (double)h->rows, 48), 300));
    heat_image(page, h);
    page_put(page, "\"/><rect class=\"frame\" width=\"100%%\" height=\"100%%\"/>");
    for (int i = 0, n = svg_ticks(ticks, &y, h->ranks < 4 ? (int)h->ranks : 5); i < n; i++)
        if (ticks[i] < ranks && ticks[i] == floor(ticks[i]))
            page_put(page, "<text class=\"y\" x=\"-7\" y=\"%.2f%%\" dy=\".33em\">%.0f</text>",
                     100 * (ticks[i] + 0.5) / ranks, ticks[i]);
    svg_axis_x(page, &x, 5, "a", "steps");
    page_put(page, "</svg></div></figure>");
    ranks_table(page, h);
}

static const struct {
    const char* name;
    int color;
} MARK_NAMES[MARKS] = {{"starts", 2}, {"saves", 0}, {"rewinds", 3}, {"bad batches", 6}, {"warnings", 1}, {"faults", 4},
                       {"ends", 7}};

// The strokes of a kind of events. Strokes that would lie on one another are one.
static inline void time_marks(Page* page, const Report* report, const Run* run, MarkKind kind, int y, int height) {
    const Events* e = &run->events;
    Stroke strokes[COLUMNS_MAX + 1];
    bool used[COLUMNS_MAX + 1] = {false};
    size_t count = 0;
    for (size_t i = 0; i < e->mark_count; i++) {
        double step = e->marks[i].step;
        size_t column = (size_t)(COLUMNS_MAX * fmin(fmax(step / report->high[0], 0), 1));
        if (e->marks[i].kind != kind || used[column]) continue;
        used[column] = true;
        strokes[count++] = (Stroke){step, y};
    }
    page_put(page, "<path class=\"mark\" data-r=\"%zu\" style=\"stroke-width:2;stroke:var(--c%d)\"",
             (size_t)(run - report->runs), MARK_NAMES[kind].color);
    strokes_write(page, report, strokes, count, height);
}

// A row of strokes for each kind of event that the run has, over the steps.
static inline void time_line(Page* page, const Report* report, const Run* run) {
    MarkKind rows[MARKS];
    int count = 0;
    for (int kind = 0; kind < MARKS; kind++) {
        bool there = false;
        for (size_t i = 0; i < run->events.mark_count; i++) there = there || (int)run->events.marks[i].kind == kind;
        if (there) rows[count++] = (MarkKind)kind;
    }
    if (count == 0) return;
    page_put(page, "<figure><div class=\"box\" style=\"padding-left:6rem\"><svg class=\"plot\" height=\"%d\">",
             26 * count);
    for (int row = 0; row < count; row++) {
        double y = 100 * (row + 0.5) / count;
        page_put(page, "<line x2=\"100%%\" y1=\"%.2f%%\" y2=\"%.2f%%\"/><text class=\"y\" x=\"-12\" y=\"%.2f%%\" "
                 "dy=\".33em\">%s</text>", y, y, y, MARK_NAMES[rows[row]].name);
    }
    axes_write(page, report);
    svg_curves_begin(page);
    for (int row = 0; row < count; row++)
        time_marks(page, report, run, rows[row], svg_units((row + 0.2) / count), svg_units(0.6 / count));
    page_put(page, "</svg></svg></div></figure>");
}

static inline void events_write(Page* page, const Report* report, const Run* run) {
    const Events* e = &run->events;
    if (e->count == 0) return;
    page_section(page, report, run, "Events");
    time_line(page, report, run);
    size_t shown = min_size(e->count, EVENTS_SHOWN);
    if (shown < e->count) page_put(page, "<p class=\"dim\">The last %zu of %zu.</p>", shown, e->count);
    page_put(page, "<div class=\"scroll\"><table><thead><tr><th>time, UTC</th><th class=\"n\">step</th><th>event</th>"
             "<th></th></tr></thead><tbody>");
    for (size_t i = e->count - shown; i < e->count; i++) {
        const char* line = e->shown[i % EVENTS_SHOWN];
        char text[64] = "";
        double step = NAN;
        Json json;
        Error ignored;
        if (!json_parse(&json, line, strcspn(line, "\n"), "event", &ignored)) continue;
        json_number(&json, json_get(&json, 0, "step"), &step);
        json_string(&json, json_get(&json, 0, "time"), text, sizeof text);
        text[strcspn(text, ".")] = 0;
        if (text[strcspn(text, "T")]) text[strcspn(text, "T")] = ' ';
        page_string(page, "<tr><td class=\"nowrap dim\">", text, "</td>");
        page_put(page, "<td class=\"n\">%s</td>", number_text(text, step));
        page_node(page, "<td class=\"nowrap\">", &json, json_get(&json, 0, "event"), "</td>");
        page_node(page, "<td>", &json, json_get(&json, 0, "detail"), "</td></tr>");
        json_free(&json);
    }
    page_put(page, "</tbody></table></div>");
}

static inline void worst_write(Page* page, const Report* report, const Run* run) {
    const Events* e = &run->events;
    char a[40], b[40], c[40], shard[2 * FILE_PATH_MAX];
    if (e->worst_count == 0) return;
    page_section(page, report, run, "Sequences with the highest losses");
    page_put(page, "<p class=\"dim\">Of the steps that were traced. The command prints the text.</p>"
             "<div class=\"scroll\"><table><thead><tr><th class=\"n\">loss</th><th class=\"n\">gradient norm</th>"
             "<th class=\"n\">step</th><th></th></tr></thead><tbody>");
    for (size_t i = 0; i < e->worst_count; i++) {
        const Worst* w = &e->worst[i];
        shell_quote(shard, sizeof shard, w->shard);
        page_put(page, "<tr><td class=\"n\">%s</td><td class=\"n\">%s</td><td class=\"n\">%s</td>",
                 number_text(a, w->loss), number_text(b, w->norm), number_text(c, w->step));
        page_string(page, "<td class=\"nowrap\"><code>build/tokenize --show ", shard, "");
        page_put(page, " --at %.0f --tokens %.0f</code></td></tr>", w->at, w->tokens);
    }
    page_put(page, "</tbody></table></div>");
}

static inline void sample_write(Page* page, const char* line) {
    enum { TEXT_MAX = 4000 };
    Json json;
    Error ignored;
    if (!json_parse_as_python(&json, line, strcspn(line, "\n"), "sample", &ignored)) return;
    uint32_t text = json_get(&json, 0, "text");
    page_node(page, "<h3>step ", &json, json_get(&json, 0, "step"), "</h3><p class=\"sample\">");
    page_node(page, "<span class=\"prompt\">", &json, json_get(&json, 0, "prompt"), "</span>");
    if (json_is(&json, text, JSON_STRING)) {
        size_t bytes = json.nodes[text].bytes;
        page_text(page, json.text + json.nodes[text].start, min_size(bytes, TEXT_MAX));
        if (bytes > TEXT_MAX) page_put(page, "...");
    }
    page_put(page, "</p>");
    json_free(&json);
}

static inline void samples_write(Page* page, const Report* report, const Run* run) {
    if (run->sample_count == 0) return;
    page_section(page, report, run, "Samples");
    for (size_t i = 0; i <= SAMPLES_KEPT; i++) if (run->samples[i]) sample_write(page, run->samples[i]);
}

// ------------------------------------------------------------------------------------------------
// 2. Page

// The position of a column on an axis.
static inline double column_at(const Report* report, const Column* column, int axis) {
    return axis == 0 ? column->step : axis == 1 ? column->tokens : column->seconds / report->time_unit;
}

// The positions of all columns on the three axes, for the script.
static inline void positions_write(Page* page, const Report* report) {
    page_put(page, "<script type=\"application/json\" id=\"x\">{\"high\":[%.9g,%.9g,%.9g],\"runs\":[", report->high[0],
             report->high[1], report->high[2]);
    for (size_t r = 0; r < report->count; r++) {
        const Metrics* m = &report->runs[r].metrics;
        for (int axis = 0; axis < 3; axis++) {
            page_put(page, "%s[", axis ? "," : r ? ",[" : "[");
            for (size_t i = 0; i < m->count; i++)
                page_put(page, "%s%.8g", i ? "," : "", column_at(report, &m->columns[i], axis));
            page_put(page, "]");
        }
        page_put(page, "]");
    }
    page_put(page, "]}</script>");
}

// The axes: to the last column of any run.
static inline void report_measure(Report* report) {
    double seconds = 0;
    for (size_t r = 0; r < report->count; r++) seconds = fmax(seconds, report->runs[r].metrics.seconds);
    report->axes[0] = "steps";
    report->axes[1] = "tokens";
    report->axes[2] = seconds < 180 ? "seconds" : seconds < 7200 ? "minutes" : "hours";
    report->time_unit = seconds < 180 ? 1 : seconds < 7200 ? 60 : 3600;
    for (int axis = 0; axis < 3; axis++) {
        for (size_t r = 0; r < report->count; r++) {
            const Metrics* m = &report->runs[r].metrics;
            if (m->count > 0)
                report->high[axis] = fmax(report->high[axis], column_at(report, &m->columns[m->count - 1], axis));
        }
        if (!(report->high[axis] > 0)) report->high[axis] = 1;
    }
}

// False if out of memory; the caller frees the page.
static inline bool report_write(Page* page, Report* report, Error* error) {
    Curve* curve = (Curve*)memory_allocate(sizeof *curve);
    uint64_t broken = 0;
    if (curve == NULL) return fail_memory(error, "a chart", sizeof *curve);
    report_measure(report);
    page_put(page, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><meta name=\"viewport\" "
             "content=\"width=device-width,initial-scale=1\"/>");
    if (report->watch > 0)
        page_put(page, "<meta http-equiv=\"refresh\" content=\"%llu\"/>", (unsigned long long)report->watch);
    for (size_t r = 0; r < report->count; r++) {
        page_string(page, r > 0 ? ", " : "<title>", report->runs[r].directory, "");
        broken += report->runs[r].broken;
    }
    page_put(page, "</title><style>");
    json_put(page, SVG_STYLE, sizeof SVG_STYLE - 1);
    json_put(page, PAGE_STYLE, sizeof PAGE_STYLE - 1);
    page_put(page, "</style></head><body>");
    if (report->count == 1) head_write(page, report);
    if (report->count > 1) page_put(page, "<h1>%zu runs</h1>", report->count);
    if (report->count > 1) runs_table(page, report);
    charts_write(page, curve, report);
    static void (*const parts[])(Page*, const Report*, const Run*) = {goodput_write, ranks_write, events_write,
                                                                      worst_write, samples_write};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (size_t r = 0; r < report->count; r++) parts[i](page, report, &report->runs[r]);
    if (broken > 0)
        page_put(page, "<p class=\"note\">%llu incomplete line%s of the logs left out.</p>", (unsigned long long)broken,
                 broken == 1 ? "" : "s");
    positions_write(page, report);
    page_put(page, "<script>\n");
    json_put(page, PAGE_SCRIPT, sizeof PAGE_SCRIPT - 1);
    page_put(page, "</script></body></html>\n");
    free(curve);
    return !page->failed || fail_memory(error, "the page", page->bytes);
}

#endif  // LLMTRAIN_REPORT_PAGE_H
