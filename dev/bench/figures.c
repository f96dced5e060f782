// figures.c: the main tables of RESULTS.md as pictures.
//
//   build/figures [--results dev/bench/RESULTS.md] [--out doc]
//
// writes doc/results_speed.svg, doc/results_memory.svg and doc/results_optimizers.svg. The numbers are in RESULTS.md
// alone: after a change there, run it again. dev/test/test_report.c compares the pictures with the tables.

#include "llmtrain/base/flags.h"
#include "llmtrain/base/files.h"
#include "tools/svg.h"

// ------------------------------------------------------------------------------------------------
// 1. Tables

enum { ROWS_MAX = 40, CELLS_MAX = 20, CELL_BYTES = 96 };

typedef struct {
    char cells[ROWS_MAX][CELLS_MAX][CELL_BYTES];  // row 0: the headings
    size_t rows;
} Table;

// Reads the table whose first line begins with `heading`.
static bool table_read(Table* table, const char* text, const char* heading, Error* error) {
    const char* line = strstr(text, heading);
    memset(table, 0, sizeof *table);
    if (line == NULL)
        return fail_with(error, "RESULTS.md has no table that begins with '%s'; adapt figures.c", heading);
    for (size_t lines = 0; *line == '|' && table->rows < ROWS_MAX; lines++) {
        const char *end = strchr(line, '\n'), *at = line + 1;
        if (end == NULL) break;
        for (size_t c = 0; lines != 1 && c < CELLS_MAX && at < end; c++) {  // line 1: |---|---|
            size_t bytes = strcspn(at, "|\n"), first = strspn(at, " "), last = bytes;
            while (last > first && at[last - 1] == ' ') last--;
            snprintf(table->cells[table->rows][c], CELL_BYTES, "%.*s", (int)(last - min_size(first, last)), at + first);
            at += bytes + 1;
        }
        table->rows += lines != 1;
        line = end + 1;
    }
    return table->rows > 1 || fail_with(error, "the table '%s' of RESULTS.md is empty", heading);
}

// The number that a text begins with, which may have commas between thousands; NAN: there is none.
static double cell_number(const char* text) {
    char digits[32];
    size_t n = 0;
    for (; (*text >= '0' && *text <= '9') || *text == ',' || *text == '.'; text++)
        if (*text != ',' && n + 1 < sizeof digits) digits[n++] = *text;
    digits[n] = 0;
    return n > 0 ? strtod(digits, NULL) : NAN;
}

// ------------------------------------------------------------------------------------------------
// 2. Pictures

enum { WIDTH = 900, MARGIN = 24, ROW = 24, TOP = 92 };

static void figure_begin(Page* page, int height, const char* title, const char* note) {
    page_put(page, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" style=\"" SVG_FONT "\">\n<style>",
             WIDTH, height);
    json_put(page, SVG_STYLE, sizeof SVG_STYLE - 1);
    page_put(page, "text{font-size:12.5px;fill:var(--ink)}.title{font-size:16px;font-weight:600}.note{fill:var(--dim);"
             "font-size:12px}.name{font-weight:600}.range{stroke-width:1.6;fill:none}</style>\n"
             "<rect width=\"%d\" height=\"%d\" rx=\"6\" fill=\"var(--paper)\"/>\n"
             "<text class=\"title\" x=\"%d\" y=\"34\">%s</text>\n<text class=\"note\" x=\"%d\" y=\"55\">", WIDTH,
             height, MARGIN, title, MARGIN);
    page_string(page, note);
    page_put(page, "</text>\n");
}

static bool figure_end(Page* page, const char* directory, const char* name, Error* error) {
    char path[FILE_PATH_MAX];
    page_put(page, "</svg>\n");
    snprintf(path, sizeof path, "%.4000s/%s", directory, name);
    bool good = json_write_done(page, error) && file_write_atomic(path, page->text, page->bytes, error);
    json_writer_free(page);
    return good;
}

// The names of the rows, on the left; what is ours is bold.
static void names_write(Page* page, const Table* table, bool (*ours)(const char*)) {
    for (size_t r = 1; r < table->rows; r++) {
        const char* name = table->cells[r][0];
        page_put(page, "<text x=\"%d\" y=\"%zu\"%s>", MARGIN, TOP + ROW * (r - 1) + 16,
                 ours(name) ? " class=\"name\"" : "");
        page_text(page, name, strcspn(name, "("));
        page_put(page, "</text>\n");
    }
}

static bool begins_with_ours(const char* name) { return strncmp(name, "ours", 4) == 0; }
static bool none_is_ours(const char* name) { return (void)name, false; }

// Bars: a panel for each of some columns, with a bar for each row.
static bool bars_figure(const Table* table, const int* columns, size_t count, const char* unit, const char* directory,
                        const char* name, const char* title, const char* note, Error* error) {
    enum { NAMES = 205, GAP = 26 };
    Page page = {0};
    int height = (int)(TOP + ROW * (table->rows - 1) + 16);
    int wide = (WIDTH - NAMES - MARGIN - GAP * ((int)count - 1)) / (int)count;
    figure_begin(&page, height, title, note);
    names_write(&page, table, begins_with_ours);
    for (size_t p = 0; p < count; p++) {
        const char* heading = table->cells[0][columns[p]];
        for (int c = columns[p]; strchr(heading, ':') == NULL && c > 0; c--) heading = table->cells[0][c];
        double most = 0;
        for (size_t r = 1; r < table->rows; r++) most = fmax(most, cell_number(table->cells[r][columns[p]]));
        page_put(&page, "<svg x=\"%d\" y=\"%d\" width=\"%d\" height=\"%zu\" overflow=\"visible\">\n"
                 "<text class=\"note\" y=\"-10\">", NAMES + (wide + GAP) * (int)p, TOP, wide, ROW * (table->rows - 1));
        page_text(&page, heading, strcspn(heading, ":"));
        page_put(&page, ", %s</text>\n", unit);
        for (size_t r = 1; r < table->rows; r++) {
            const char* label = table->cells[r][0];
            double value = cell_number(table->cells[r][columns[p]]), share = 78 * value / most;
            int color = begins_with_ours(label) ? 0 : strstr(label, "eager") ? 7 : 1;
            if (isnan(value)) continue;
            page_put(&page, "<rect y=\"%zu\" width=\"%.2f%%\" height=\"%d\" rx=\"2\" fill=\"var(--c%d)\"/>"
                     "<text x=\"%.2f%%\" dx=\"6\" y=\"%zu\"%s>", ROW * (r - 1) + 3, share, ROW - 7, color, share,
                     ROW * (r - 1) + 16, begins_with_ours(label) ? " class=\"name\"" : "");
            page_string(&page, table->cells[r][columns[p]]);
            page_put(&page, "</text>\n");
        }
        page_put(&page, "</svg>\n");
    }
    return figure_end(&page, directory, name, error);
}

// A mean and a range for each row, "1.75 (1.73, 1.76)", in two panels.
static bool ranges_figure(const Table* table, const int columns[2], const char* const headings[2],
                          const char* directory, const char* name, const char* title, const char* note, Error* error) {
    enum { NAMES = 150, GAP = 44, WIDE = (WIDTH - NAMES - MARGIN - GAP - 10) / 2 };
    Page page = {0};
    size_t rows = table->rows - 1;
    figure_begin(&page, (int)(TOP + ROW * rows + 42), title, note);
    names_write(&page, table, none_is_ours);
    for (int p = 0; p < 2; p++) {
        double means[ROWS_MAX], lows[ROWS_MAX], highs[ROWS_MAX], ticks[SVG_TICKS_MAX];
        SvgScale scale = {INFINITY, -INFINITY, false};
        for (size_t r = 0; r < rows; r++) {
            const char *text = table->cells[r + 1][columns[p]], *range = strchr(text, '('), *comma = strstr(text, ", ");
            if (range == NULL || comma == NULL)
                return fail_with(error, "RESULTS.md: '%s' is no mean with a range; adapt figures.c", text);
            means[r] = cell_number(text);
            lows[r] = cell_number(range + 1);
            highs[r] = cell_number(comma + 2);
            scale.low = fmin(scale.low, lows[r]);
            scale.high = fmax(scale.high, highs[r]);
        }
        double pad = 0.04 * (scale.high - scale.low);
        scale.low -= pad;
        scale.high += pad;
        page_put(&page, "<svg class=\"plot\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%zu\">\n<text y=\"-10\">%s</text>"
                 "\n", NAMES + (WIDE + GAP) * p, TOP, WIDE, ROW * rows, headings[p]);
        for (int i = 0, n = svg_ticks(ticks, &scale, 6); i < n; i++)
            page_put(&page, "<line x1=\"%.2f%%\" x2=\"%.2f%%\" y2=\"100%%\"/>\n", 100 * svg_at(&scale, ticks[i]),
                     100 * svg_at(&scale, ticks[i]));
        svg_axis_x(&page, &scale, 6, "a", "");
        page_put(&page, "\n");
        for (size_t r = 0; r < rows; r++) {
            size_t y = ROW * r + ROW / 2;
            page_put(&page, "<line class=\"range\" style=\"stroke:var(--c0)\" x1=\"%.2f%%\" x2=\"%.2f%%\" y1=\"%zu\" "
                     "y2=\"%zu\"/><circle cx=\"%.2f%%\" cy=\"%zu\" r=\"4.2\" fill=\"var(--c0)\"/>\n",
                     100 * svg_at(&scale, lows[r]), 100 * svg_at(&scale, highs[r]), y, y,
                     100 * svg_at(&scale, means[r]), y);
        }
        page_put(&page, "</svg>\n");
    }
    return figure_end(&page, directory, name, error);
}

// ------------------------------------------------------------------------------------------------
// 3. main

static bool figures_write(const char* results, const char* out, Error* error) {
    static const int rates[] = {1, 5, 9}, peaks[] = {2, 6, 10}, losses[2] = {2, 5};
    static const char* const texts[2] = {"Tiny Shakespeare", "the demo's corpus"};
    static Table table;
    char* text = NULL;
    size_t bytes;
    bool good = file_read(results, 1 << 24, &text, &bytes, error);
    good = good && table_read(&table, text, "| | B=4 T=64: tokens/s | peak MB |", error);
    good = good && bars_figure(&table, rates, 3, "tokens/s", out, "results_speed.svg",
                               "Training GPT-2 124M on two CPU cores: tokens per second",
                               "AMD EPYC (Zen 4, AVX-512); higher is better. Numbers and commands: "
                               "dev/bench/RESULTS.md", error);
    good = good && bars_figure(&table, peaks, 3, "MB", out, "results_memory.svg",
                               "Training GPT-2 124M on two CPU cores: peak memory",
                               "The resident size of the process; lower is better. Numbers and commands: "
                               "dev/bench/RESULTS.md", error);
    good = good && table_read(&table, text, "| optimizer | Tiny Shakespeare: rate |", error);
    good = good && ranges_figure(&table, losses, texts, out, "results_optimizers.svg",
                                 "Optimizers: validation loss after 300 steps, nats per byte",
                                 "Each at its best learning rate; mean, lowest and highest of three seeds; lower is "
                                 "better. Numbers: dev/bench/RESULTS.md", error);
    free(text);
    return good;
}

int main(int argc, char** argv) {
    const char *results, *out;
    const Flag table[] = {
        FLAG_TEXT("results", &results, "dev/bench/RESULTS.md", "FILE", 0, "the tables"),
        FLAG_TEXT("out", &out, "doc", "DIR", 0, "directory of the pictures"),
    };
    Flags flags = flags_of(table, sizeof table / sizeof table[0]);
    int code;
    Error error;
    if (!flags_begin(&code, "figures", NULL, &flags, argc, argv)) return code;
    if (figures_write(results, out, &error)) return 0;
    fprintf(stderr, "figures: %s\n", error.text);
    return 1;
}
