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

// ------------------------------------------------------------------------------------------------
// 1. Parts of the page

static inline const char* duration_text(char text[40], double seconds) {
    double s = floor(seconds + 0.5);
    if (!isfinite(seconds)) return strcpy(text, "-");
    if (s >= 172800) snprintf(text, 40, "%.0f d %.0f h", floor(s / 86400), floor(fmod(s, 86400) / 3600));
    else if (s >= 3600) snprintf(text, 40, "%.0f h %.0f min", floor(s / 3600), floor(fmod(s, 3600) / 60));
    else if (s >= 60) snprintf(text, 40, "%.0f min %.0f s", floor(s / 60), fmod(s, 60));
    else snprintf(text, 40, "%.3g s", seconds);
    return text;
}

// From its first start to the last that is known, or the time of its steps.
static inline double run_wall(const Run* run) {
    return run->goodput.wall > 0 ? run->goodput.wall : metrics_seconds(&run->metrics);
}

// A number of run.jsonl; NAN if it is not there.
static inline double start_number(const Run* run, const char* key) {
    double value = NAN;
    if (run->started) json_number(&run->start, json_get(&run->start, 0, key), &value);
    return value;
}

static inline double run_cost(const Run* run, double price) {
    double ranks = start_number(run, "ranks");
    if (!(price > 0)) return NAN;
    return price * run_wall(run) / 3600 * (isfinite(ranks) ? ranks : (double)max_size(run->heat.ranks, 1));
}

// The text of a node: a string, a number, or the elements of an array.
static inline void page_node(Page* page, const Json* json, uint32_t node) {
    if (json_is(json, node, JSON_ARRAY)) {
        for (uint32_t i = json_first(json, node); i != JSON_NONE; i = json_next(json, i)) {
            page_node(page, json, i);
            if (json_next(json, i) != JSON_NONE) page_put(page, ", ");
        }
    } else if (json_is(json, node, JSON_STRING)) {
        page_text(page, json->text + json->nodes[node].start, json->nodes[node].bytes);
    } else if (json_is(json, node, JSON_NUMBER)) {
        char text[40];
        double value = NAN;
        json_number(json, node, &value);
        page_string(page, number_text(text, value));
    }
}

static inline void page_state(Page* page, const Run* run) {
    static const char* const names[] = {"running", "done", "stopped", "failed"};
    page_put(page, "<span class=\"state s%d\">%s</span>", (int)run->events.state, names[run->events.state]);
}

// The numbers of a run that count most: tiles of one run, columns of a table of several. A value that is not known is
// empty.
typedef struct {
    char value[64], detail[64];
    const char* name;
} Fact;

enum { FACTS_MAX = 16 };

static inline void fact_add(Fact* facts, size_t* count, bool known, const char* value, const char* name,
                            const char* detail) {
    Fact* fact = &facts[(*count)++];
    snprintf(fact->value, sizeof fact->value, "%s", known ? value : "");
    snprintf(fact->detail, sizeof fact->detail, "%s", detail);
    fact->name = name;
}

static inline void fact_number(Fact* facts, size_t* count, double number, const char* name, const char* detail) {
    char text[40];
    fact_add(facts, count, isfinite(number), number_text(text, number), name, detail);
}

static inline size_t run_facts(Fact facts[FACTS_MAX], const Run* run, double price) {
    const Metrics* m = &run->metrics;
    const Goodput* g = &run->goodput;
    char text[40], number[40], detail[64] = "";
    size_t n = 0;
    double steps = start_number(run, "steps"), cost = run_cost(run, price), mfu = metrics_mean(m, KEY_MFU);
    double above = m->last[KEY_VAL] / run->floor - 1;
    fact_number(facts, &n, metrics_recent(m, KEY_LOSS), "training loss", ", recent mean");
    fact_number(facts, &n, m->last[KEY_VAL], "validation loss", ", last");
    if (isfinite(m->best_step)) snprintf(detail, sizeof detail, ", step %s", number_text(number, m->best_step));
    fact_number(facts, &n, m->best_val, "validation loss, best", detail);
    snprintf(text, sizeof text, "%+.1f%%", 100 * above);
    fact_add(facts, &n, isfinite(above), text, "above the entropy floor", "");
    snprintf(detail, sizeof detail, "%s%s", steps > 0 ? " of " : "", steps > 0 ? number_text(number, steps) : "");
    fact_number(facts, &n, m->last[KEY_STEP], "steps", detail);
    fact_add(facts, &n, m->last[KEY_TOKENS] > 0, number_short(text, m->last[KEY_TOKENS]), "tokens", "");
    fact_add(facts, &n, m->count > 0, duration_text(text, run_wall(run)), "time", "");
    fact_add(facts, &n, metrics_mean(m, KEY_RATE) > 0, number_short(text, metrics_mean(m, KEY_RATE)),
             "tokens per second", "");
    snprintf(text, sizeof text, "%.1f%%", 100 * mfu);
    fact_add(facts, &n, isfinite(mfu), text, "model FLOPs utilization", "");
    snprintf(text, sizeof text, "%.1f%%", 100 * g->steps / g->wall);
    fact_add(facts, &n, g->wall > 0, text, "goodput", "");
    snprintf(text, sizeof text, m->joules < 3.6e6 ? "%.3g J" : "%.3g kWh", m->joules / (m->joules < 3.6e6 ? 1 : 3.6e6));
    fact_add(facts, &n, m->joules > 0, text, "energy", "");
    snprintf(text, sizeof text, "$%.2f", cost);
    fact_add(facts, &n, isfinite(cost) && m->count > 0, text, "cost", "");
    fact_add(facts, &n, m->last[KEY_SKIPPED] > 0, number_text(text, m->last[KEY_SKIPPED]), "steps skipped", "");
    return n;
}

static const struct {
    const char *name, *key;
} START_ROWS[] = {
    {"parameters", "parameters"}, {"of which train", "trained"}, {"family", "family"}, {"layers", "layers"},
    {"channels", "channels"}, {"heads", "heads"}, {"key/value heads", "kv_heads"}, {"vocabulary", "vocab"},
    {"sequence", "seq"}, {"FLOPs per token", "flops_per_token"}, {"precision", "precision"}, {"device", "device"},
    {"hosts", "hosts"}, {"ranks", "ranks"}, {"data parallel", "dp"}, {"tensor parallel", "tp"},
    {"pipeline stages", "pp"}, {"context parallel", "cp"}, {"ZeRO stage", "zero"}, {"micro-batch", "batch"},
    {"tokens per step", "total_batch"}, {"data", "data"}, {"llmtrain", "version"}, {"command", "command"},
};

// What run.jsonl says. A layout of one rank is not shown.
static inline void start_write(Page* page, const Run* run) {
    page_put(page, "<dl>");
    for (size_t i = 0; i < sizeof START_ROWS / sizeof *START_ROWS; i++) {
        const char* key = START_ROWS[i].key;
        uint32_t node = json_get(&run->start, 0, key);
        bool layout = strlen(key) == 2 || strcmp(key, "zero") == 0;
        if (node == JSON_NONE || (layout && start_number(run, key) <= (strcmp(key, "zero") == 0 ? 0 : 1))) continue;
        if (start_number(run, key) == 0) continue;  // not known
        if (strcmp(key, "trained") == 0 && start_number(run, key) == start_number(run, "parameters")) continue;
        bool command = strcmp(key, "command") == 0;
        page_put(page, "<div%s><dt>%s</dt><dd>%s", command ? " class=\"wide\"" : "", START_ROWS[i].name,
                 command ? "<code>" : "");
        page_node(page, &run->start, node);
        page_put(page, "%s</dd></div>", command ? "</code>" : "");
    }
    page_put(page, "</dl>");
}

static inline void head_write(Page* page, const Report* report) {
    const Run* run = &report->runs[0];
    Fact facts[FACTS_MAX];
    page_put(page, "<h1>");
    page_string(page, run->directory);
    page_state(page, run);
    page_put(page, "</h1><div class=\"tiles\">");
    for (size_t i = 0, n = run_facts(facts, run, report->price); i < n; i++) {
        if (facts[i].value[0] == 0) continue;
        page_put(page, "<div><b>%s</b><small>%s%s</small></div>", facts[i].value, facts[i].name,
                 facts[i].detail);
    }
    page_put(page, "</div>");
    if (run->started) start_write(page, run);
}

// The tokens with which the mean loss of a run first was at most `loss`.
static inline double tokens_to(const Run* run, Key key, double loss) {
    for (size_t i = 0; i < run->metrics.count; i++)
        if (cell_mean(&run->metrics.columns[i].cells[key]) <= loss) return run->metrics.columns[i].tokens;
    return NAN;
}

// The lowest loss that all runs reach, in the validation if all have one, or else in training.
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
    return common;
}

// A row of the table of runs: `text` gives a run's cell.
static inline void row_begin(Page* page, const char* name) {
    page_put(page, "<tr><td class=\"nowrap fact\">");
    page_string(page, name);
    page_put(page, "</td>");
}

// A flag of a run, as it was given; JSON_NONE.
static inline uint32_t run_flag(const Run* run, const char* name) {
    return run->started ? json_get(&run->start, json_get(&run->start, 0, "flags"), name) : JSON_NONE;
}

static inline bool flag_equal(const Run* a, const Run* b, const char* name) {
    uint32_t i = run_flag(a, name), j = run_flag(b, name);
    if (i == JSON_NONE || j == JSON_NONE) return i == j;
    const JsonNode *x = &a->start.nodes[i], *y = &b->start.nodes[j];
    return x->bytes == y->bytes && memcmp(a->start.text + x->start, b->start.text + y->start, x->bytes) == 0;
}

// The flags that are not the same in all runs.
static inline void flags_rows(Page* page, const Report* report) {
    bool begun = false;
    for (size_t r = 0; r < report->count; r++) {
        const Run* run = &report->runs[r];
        uint32_t flags = run->started ? json_get(&run->start, 0, "flags") : JSON_NONE;
        for (uint32_t i = json_first(&run->start, flags); i != JSON_NONE; i = json_next(&run->start, i)) {
            const char* name = json_key(&run->start, i);
            bool same = true, shown = strcmp(name, "out") == 0;
            for (size_t q = 0; q < r; q++) shown = shown || run_flag(&report->runs[q], name) != JSON_NONE;
            for (size_t q = 0; q < report->count; q++) same = same && flag_equal(run, &report->runs[q], name);
            if (same || shown) continue;
            if (!begun)
                page_put(page, "<tr><th class=\"sub\" colspan=\"%zu\">Flags that differ</th></tr>", report->count + 1);
            begun = true;
            page_put(page, "<tr><td class=\"nowrap\"><code>--");
            page_string(page, name);
            page_put(page, "</code></td>");
            for (size_t q = 0; q < report->count; q++) {
                page_put(page, "<td class=\"n\">");
                page_node(page, &report->runs[q].start, run_flag(&report->runs[q], name));
                page_put(page, "</td>");
            }
            page_put(page, "</tr>");
        }
    }
}

static inline void runs_table(Page* page, const Report* report) {
    Fact facts[RUNS_MAX][FACTS_MAX];
    size_t n = 0;
    char text[40], name[96], loss[40];
    Key key;
    double common = common_loss(&key, report);
    page_put(page, "<div class=\"scroll\"><table><thead><tr><th></th>");
    for (size_t r = 0; r < report->count; r++) {
        page_put(page, "<th class=\"n\"><i class=\"key\" style=\"background:var(--c%zu)\"></i>", r % 8);
        page_string(page, report->runs[r].directory);
        page_put(page, "</th>");
        n = run_facts(facts[r], &report->runs[r], report->price);
    }
    page_put(page, "</tr></thead><tbody>");
    row_begin(page, "state");
    for (size_t r = 0; r < report->count; r++) {
        page_put(page, "<td class=\"n\">");
        page_state(page, &report->runs[r]);
        page_put(page, "</td>");
    }
    page_put(page, "</tr>");
    for (size_t i = 0; i < n; i++) {
        bool any = false;
        for (size_t r = 0; r < report->count; r++) any = any || facts[r][i].value[0];
        if (!any) continue;
        row_begin(page, facts[0][i].name);
        for (size_t r = 0; r < report->count; r++) page_put(page, "<td class=\"n\">%s</td>", facts[r][i].value);
        page_put(page, "</tr>");
    }
    snprintf(name, sizeof name, "tokens to a %s loss of %s", key == KEY_VAL ? "validation" : "training",
             number_text(loss, common));
    if (isfinite(common)) {
        row_begin(page, name);
        for (size_t r = 0; r < report->count; r++) {
            double tokens = tokens_to(&report->runs[r], key, common);
            page_put(page, "<td class=\"n\">%s</td>", isfinite(tokens) ? number_short(text, tokens) : "");
        }
        page_put(page, "</tr>");
    }
    flags_rows(page, report);
    page_put(page, "</tbody></table></div>");
}

static inline void page_section(Page* page, const Report* report, const Run* run, const char* title) {
    page_put(page, "<h2>%s", title);
    if (report->count > 1) page_put(page, " <span class=\"dim\">");
    if (report->count > 1) page_string(page, run->directory);
    page_put(page, "%s</h2>", report->count > 1 ? "</span>" : "");
}

static inline void goodput_write(Page* page, const Report* report, const Run* run) {
    static const int colors[] = {2, 4, 0, 3, 5, 6, 7};
    const Goodput* g = &run->goodput;
    char text[40];
    if (!(g->wall > 0)) return;
    page_section(page, report, run, "Where the time went");
    page_put(page, "<div class=\"bar\">");
    for (size_t i = 0; i < GOODPUT_PART_COUNT; i++) {
        double seconds = *(const double*)(const void*)((const char*)g + GOODPUT_PARTS[i].offset);
        if (seconds <= 0) continue;
        page_put(page, "<span title=\"%s\" style=\"width:%.3f%%;background:var(--c%d)\"></span>", GOODPUT_PARTS[i].name,
                 100 * seconds / g->wall, colors[i % 7]);
    }
    page_put(page, "</div><div class=\"scroll\"><table><tbody>");
    for (size_t i = 0; i < GOODPUT_PART_COUNT; i++) {
        double seconds = *(const double*)(const void*)((const char*)g + GOODPUT_PARTS[i].offset);
        if (seconds <= 0) continue;
        page_put(page, "<tr><td><i class=\"key\" style=\"background:var(--c%d)\"></i>%s</td><td class=\"n\">%s</td>"
                 "<td class=\"n\">%.2f%%</td></tr>", colors[i % 7], GOODPUT_PARTS[i].name, duration_text(text, seconds),
                 100 * seconds / g->wall);
    }
    page_put(page, "</tbody></table></div><p class=\"note\">%llu start%s",
             (unsigned long long)g->starts, g->starts == 1 ? "" : "s");
    if (g->rewinds > 0) page_put(page, ", %llu rewind%s", (unsigned long long)g->rewinds, g->rewinds == 1 ? "" : "s");
    if (g->repeated_steps > 0)
        page_put(page, ", %s steps made again", number_text(text, (double)g->repeated_steps));
    page_put(page, ".</p>");
}

// From half the median, blue, to twice the median, red; the median is white.
static inline void heat_palette(unsigned char palette[256][3]) {
    static const double blue[3] = {33, 82, 148}, red[3] = {178, 24, 43}, middle[3] = {247, 247, 245};
    for (int i = 0; i < 256; i++) {
        double at = fabs(i - 128.0) / 128, curve = pow(at, 0.8);
        const double* end = i < 128 ? blue : red;
        for (int k = 0; k < 3; k++) palette[i][k] = (unsigned char)lrint(middle[k] + (end[k] - middle[k]) * curve);
    }
}

static inline void heat_image(Page* page, const Heat* h) {
    static unsigned char cells[HEAT_ROWS * HEAT_COLUMNS], palette[256][3];
    heat_palette(palette);
    for (size_t row = 0; row < h->rows; row++) {
        for (size_t i = 0; i < h->count; i++) {
            const HeatCell* cell = &h->cells[i * HEAT_ROWS + row];
            double ratio = cell->count ? (double)cell->ratio / cell->count : 1;
            cells[row * h->count + i] = (unsigned char)lrint(fmin(fmax(128 + 128 * log2(ratio), 0), 255));
        }
    }
    png_uri(page, cells, h->count, h->rows, palette);
}

static inline void ranks_table(Page* page, const Heat* h) {
    enum { SHOWN = 8 };
    size_t order[SHOWN], count = 0;
    for (size_t r = 0; r < h->ranks; r++) {
        double mean = h->sums[r].lines ? h->sums[r].ratio / (double)h->sums[r].lines : 0;
        size_t i = count < SHOWN ? count++ : SHOWN;
        for (; i > 0; i--) {
            const RankSum* other = &h->sums[order[i - 1]];
            if (mean <= other->ratio / (double)max_size(other->lines, 1)) break;
            if (i < SHOWN) order[i] = order[i - 1];
        }
        if (i < SHOWN) order[i] = r;
    }
    page_put(page, "<div class=\"scroll\"><table><thead><tr><th class=\"n\">rank</th><th class=\"n\">computes, ms</th>"
             "<th class=\"n\">of the median</th><th class=\"n\">waits, ms</th><th class=\"n\">slowest in</th></tr><"
             "/thead>"
             "<tbody>");
    for (size_t i = 0; i < count; i++) {
        const RankSum* s = &h->sums[order[i]];
        double lines = (double)max_size(s->lines, 1);
        page_put(page, "<tr><td class=\"n\">%zu</td><td class=\"n\">%.2f</td><td class=\"n\">%.3f</td>"
                 "<td class=\"n\">%.2f</td><td class=\"n\">%.1f%% of the steps</td></tr>", order[i], s->busy / lines,
                 s->ratio / lines, s->wait / lines, 100 * (double)s->slowest / lines);
    }
    page_put(page, "</tbody></table></div>");
}

static inline void ranks_write(Page* page, const Report* report, const Run* run) {
    const Heat* h = &run->heat;
    if (h->count == 0 || h->ranks < 2) return;
    SvgScale x = {0, h->steps[h->count - 1], false}, y = {(double)h->ranks, 0, false};
    page_section(page, report, run, "Ranks");
    page_put(page, "<figure><figcaption><b>Computing time of each rank</b>, <span class=\"dim\">of the median of all "
             "ranks, from half (blue) to twice (red); rank 0 is at the top</span></figcaption><div class=\"box\"><svg "
             "class=\"plot\" height=\"%d\"><image class=\"heat\" width=\"100%%\" height=\"100%%\" "
             "preserveAspectRatio=\"none\" href=\"", (int)fmin(fmax(16.0 * (double)h->rows, 48), 300));
    heat_image(page, h);
    page_put(page, "\"/><rect class=\"frame\" width=\"100%%\" height=\"100%%\"/>");
    double ticks[SVG_TICKS_MAX];
    SvgScale up = {0, (double)h->ranks, false};
    for (int i = 0, n = svg_ticks(ticks, &up, h->ranks < 4 ? (int)h->ranks : 5); i < n; i++)
        if (ticks[i] < (double)h->ranks && ticks[i] == floor(ticks[i]))
            page_put(page, "<text class=\"y\" x=\"-7\" y=\"%.2f%%\" dy=\".33em\">%.0f</text>",
                     100 * svg_at(&y, (double)h->ranks - ticks[i] - 0.5), ticks[i]);
    svg_axis_x(page, &x, 5, "a", "steps");
    page_put(page, "</svg></div></figure>");
    ranks_table(page, h);
}

static const struct {
    const char* name;
    int color;
} MARK_NAMES[MARKS] = {{"starts", 2}, {"saves", 0}, {"rewinds", 3}, {"bad batches", 6}, {"warnings", 1}, {"faults", 4},
                       {"ends", 7}};

// The strokes of a kind of events, in one of `rows` rows. Strokes that would lie on one another are one.
static inline void time_marks(Page* page, const Report* report, const Run* run, MarkKind kind, double row,
                              double rows) {
    const Events* e = &run->events;
    bool used[COLUMNS_MAX + 1] = {false};
    Page path = {0};
    page_put(page, "<path class=\"mark\" data-r=\"%zu\" style=\"stroke-width:2;stroke:var(--c%d)\" data-s=\"",
             (size_t)(run - report->runs), MARK_NAMES[kind].color);
    for (size_t i = 0, n = 0; i < e->mark_count; i++) {
        double at = fmin(fmax(e->marks[i].step / report->high[0], 0), 1);
        size_t column = (size_t)(COLUMNS_MAX * at);
        if (e->marks[i].kind != kind || used[column]) continue;
        used[column] = true;
        page_put(page, "%s%.0f", n++ ? "," : "", e->marks[i].step);
        page_put(&path, "M%d %dv%d", svg_units(at), svg_units((row + 0.2) / rows), svg_units(0.6 / rows));
    }
    page_put(page, "\" d=\"");
    if (path.text) json_put(page, path.text, path.bytes);
    page->failed = page->failed || path.failed;
    json_writer_free(&path);
    page_put(page, "\"/>");
}

// A row of strokes for each kind of event that the run has, over the steps.
static inline void time_line(Page* page, const Report* report, const Run* run) {
    const Events* e = &run->events;
    size_t rows = 0, row = 0;
    bool there[MARKS] = {false};
    for (size_t i = 0; i < e->mark_count; i++) there[e->marks[i].kind] = true;
    for (int kind = 0; kind < MARKS; kind++) rows += there[kind];
    if (rows == 0) return;
    page_put(page, "<figure><div class=\"box\" style=\"padding-left:6rem\"><svg class=\"plot\" height=\"%zu\">",
             26 * rows);
    for (int kind = 0; kind < MARKS; kind++) {
        if (!there[kind]) continue;
        double y = 100 * ((double)row++ + 0.5) / (double)rows;
        page_put(page, "<line x2=\"100%%\" y1=\"%.2f%%\" y2=\"%.2f%%\"/><text class=\"y\" x=\"-12\" y=\"%.2f%%\" "
                 "dy=\".33em\">%s</text>", y, y, y, MARK_NAMES[kind].name);
    }
    chart_axes(page, report, NULL);
    svg_curves_begin(page);
    row = 0;
    for (int kind = 0; kind < MARKS; kind++)
        if (there[kind]) time_marks(page, report, run, (MarkKind)kind, (double)row++, (double)rows);
    svg_curves_end(page);
    page_put(page, "</svg></div></figure>");
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
        char* cut = strchr(text, '.');
        if (cut) *cut = 0;
        if ((cut = strchr(text, 'T'))) *cut = ' ';
        page_put(page, "<tr><td class=\"nowrap dim\">");
        page_string(page, text);
        page_put(page, "</td><td class=\"n\">%s</td><td class=\"nowrap\">", number_text(text, step));
        page_node(page, &json, json_get(&json, 0, "event"));
        page_put(page, "</td><td>");
        page_node(page, &json, json_get(&json, 0, "detail"));
        page_put(page, "</td></tr>");
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
        page_put(page, "<tr><td class=\"n\">%s</td><td class=\"n\">%s</td><td class=\"n\">%s</td>"
                 "<td class=\"nowrap\"><code>build/tokenize --show ", number_text(a, w->loss), number_text(b, w->norm),
                 number_text(c, w->step));
        page_string(page, shard);
        page_put(page, " --at %.0f --tokens %.0f</code></td></tr>", w->at, w->tokens);
    }
    page_put(page, "</tbody></table></div>");
}

static inline void sample_write(Page* page, const char* line) {
    enum { TEXT_MAX = 4000 };
    Json json;
    Error ignored;
    if (!json_parse_as_python(&json, line, strcspn(line, "\n"), "sample", &ignored)) return;
    uint32_t prompt = json_get(&json, 0, "prompt"), text = json_get(&json, 0, "text");
    page_put(page, "<h3>step ");
    page_node(page, &json, json_get(&json, 0, "step"));
    page_put(page, "</h3><p class=\"sample\"><span class=\"prompt\">");
    page_node(page, &json, prompt);
    page_put(page, "</span>");
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

// The positions of all columns on the three axes, for the script.
static inline void positions_write(Page* page, const Report* report) {
    page_put(page, "<script type=\"application/json\" id=\"x\">{\"high\":[%.9g,%.9g,%.9g],\"runs\":[", report->high[0],
             report->high[1], report->high[2]);
    for (size_t r = 0; r < report->count; r++) {
        const Metrics* m = &report->runs[r].metrics;
        for (int a = 0; a < 3; a++) {
            page_put(page, "%s[", a ? "," : r ? ",[" : "[");
            for (size_t i = 0; i < m->count; i++) {
                const Column* c = &m->columns[i];
                double positions[3] = {c->step, c->tokens, c->seconds / report->time_unit};
                page_put(page, "%s%.8g", i ? "," : "", positions[a]);
            }
            page_put(page, "]");
        }
        page_put(page, "]");
    }
    page_put(page, "]}</script>");
}

// The ends of the axes.
static inline void report_measure(Report* report) {
    double seconds = 0;
    for (size_t r = 0; r < report->count; r++) {
        const Metrics* m = &report->runs[r].metrics;
        if (m->count == 0) continue;
        report->high[0] = fmax(report->high[0], m->columns[m->count - 1].step);
        report->high[1] = fmax(report->high[1], m->columns[m->count - 1].tokens);
        seconds = fmax(seconds, metrics_seconds(m));
    }
    report->time_unit = seconds < 180 ? 1 : seconds < 7200 ? 60 : 3600;
    report->time_name = seconds < 180 ? "seconds" : seconds < 7200 ? "minutes" : "hours";
    report->high[2] = seconds / report->time_unit;
    for (int a = 0; a < 3; a++) if (!(report->high[a] > 0)) report->high[a] = 1;
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
    page_put(page, "<title>");
    for (size_t r = 0; r < report->count; r++) {
        if (r > 0) page_put(page, ", ");
        page_string(page, report->runs[r].directory);
        broken += report->runs[r].metrics.broken;
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
