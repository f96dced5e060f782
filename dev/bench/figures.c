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

// A picture of some columns of a table: a panel for each, with a bar or a range for each row.
typedef struct {
    const char *file, *title, *note;
    const char* table;        // its first line begins with this
    const char* unit;         // of bars; NULL: means with ranges, as "1.75 (1.73, 1.76)"
    int names, gap, columns[3];  // their width, and that between panels; columns: 0 ends them
} Figure;

static const Figure FIGURES[] = {
    {"results_speed.svg", "Training GPT-2 124M on two CPU cores: tokens per second",
     "AMD EPYC (Zen 4, AVX-512); higher is better. Numbers and commands: dev/bench/RESULTS.md",
     "| | B=4 T=64: tokens/s | peak MB |", "tokens/s", 205, 26, {1, 5, 9}},
    {"results_memory.svg", "Training GPT-2 124M on two CPU cores: peak memory",
     "The resident size of the process; lower is better. Numbers and commands: dev/bench/RESULTS.md",
     "| | B=4 T=64: tokens/s | peak MB |", "MB", 205, 26, {2, 6, 10}},
    {"results_optimizers.svg", "Optimizers: validation loss after 300 steps, nats per byte",
     "Each at its best learning rate; mean, lowest and highest of three seeds; lower is better. Numbers: "
     "dev/bench/RESULTS.md", "| optimizer | Tiny Shakespeare: rate |", NULL, 150, 54, {2, 5}},
};

static const char* name_class(const char* name) { return strncmp(name, "ours", 4) == 0 ? " class=\"name\"" : ""; }

// The bars of a column.
static void bars_write(Page* page, const Table* table, int column) {
    double most = 0;
    for (size_t r = 1; r < table->rows; r++) most = fmax(most, cell_number(table->cells[r][column]));
    for (size_t r = 1; r < table->rows; r++) {
        const char* name = table->cells[r][0];
        double value = cell_number(table->cells[r][column]), share = 78 * value / most;
        int color = name_class(name)[0] ? 0 : strstr(name, "eager") ? 7 : 1;
        if (isnan(value)) continue;
        page_put(page, "<rect y=\"%zu\" width=\"%.2f%%\" height=\"%d\" rx=\"2\" fill=\"var(--c%d)\"/>"
                 "<text x=\"%.2f%%\" dx=\"6\" y=\"%zu\"%s>", ROW * (r - 1) + 3, share, ROW - 7, color, share,
                 ROW * (r - 1) + 16, name_class(name));
        page_string(page, "", table->cells[r][column], "</text>\n");
    }
}

// The means and ranges of a column, on an axis.
static bool ranges_write(Page* page, const Table* table, int column, Error* error) {
    double values[ROWS_MAX][3], ticks[SVG_TICKS_MAX];  // mean, low, high
    SvgScale scale = {INFINITY, -INFINITY, false};
    for (size_t r = 1; r < table->rows; r++) {
        const char* text = table->cells[r][column];
        if (sscanf(text, "%lf (%lf, %lf)", &values[r][0], &values[r][1], &values[r][2]) != 3)
            return fail_with(error, "RESULTS.md: '%s' is no mean with a range; adapt figures.c", text);
        scale.low = fmin(scale.low, values[r][1]);
        scale.high = fmax(scale.high, values[r][2]);
    }
    double pad = 0.04 * (scale.high - scale.low);
    scale.low -= pad;
    scale.high += pad;
    for (int i = 0, n = svg_ticks(ticks, &scale, 6); i < n; i++)
        page_put(page, "<line x1=\"%.2f%%\" x2=\"%.2f%%\" y2=\"100%%\"/>\n", 100 * svg_at(&scale, ticks[i]),
                 100 * svg_at(&scale, ticks[i]));
    svg_axis_x(page, &scale, 6, "a", "");
    page_put(page, "\n");
    for (size_t r = 1; r < table->rows; r++) {
        size_t y = ROW * (r - 1) + ROW / 2;
        page_put(page, "<line class=\"range\" style=\"stroke:var(--c0)\" x1=\"%.2f%%\" x2=\"%.2f%%\" y1=\"%zu\" "
                 "y2=\"%zu\"/><circle cx=\"%.2f%%\" cy=\"%zu\" r=\"4.2\" fill=\"var(--c0)\"/>\n",
                 100 * svg_at(&scale, values[r][1]), 100 * svg_at(&scale, values[r][2]), y, y,
                 100 * svg_at(&scale, values[r][0]), y);
    }
    return true;
}

static bool figure_draw(Page* page, const Figure* f, const Table* table, Error* error) {
    size_t rows = table->rows - 1;
    int panels = f->columns[2] ? 3 : 2, wide = (WIDTH - f->names - MARGIN - f->gap * (panels - 1)) / panels;
    int height = TOP + ROW * (int)rows + (f->unit ? 16 : 42);
    page_put(page, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" style=\"" SVG_FONT "\">\n<style>",
             WIDTH, height);
    json_put(page, SVG_STYLE, sizeof SVG_STYLE - 1);
    page_put(page, "text{font-size:12.5px;fill:var(--ink)}.title{font-size:16px;font-weight:600}.note{fill:var(--dim);"
             "font-size:12px}.name{font-weight:600}.range{stroke-width:1.6;fill:none}</style>\n"
             "<rect width=\"%d\" height=\"%d\" rx=\"6\" fill=\"var(--paper)\"/>\n"
             "<text class=\"title\" x=\"%d\" y=\"34\">%s</text>\n<text class=\"note\" x=\"%d\" y=\"55\">%s</text>\n",
             WIDTH, height, MARGIN, f->title, MARGIN, f->note);
    for (size_t r = 1; r <= rows; r++) {
        const char* name = table->cells[r][0];
        page_put(page, "<text x=\"%d\" y=\"%zu\"%s>", MARGIN, TOP + ROW * (r - 1) + 16, name_class(name));
        page_text(page, name, strcspn(name, "("));
        page_put(page, "</text>\n");
    }
    for (int p = 0; p < panels; p++) {
        int column = f->columns[p], heading = column;
        while (heading > 0 && strchr(table->cells[0][heading], ':') == NULL) heading--;  // "B=4 T=64: tokens/s"
        page_put(page, "<svg%s x=\"%d\" y=\"%d\" width=\"%d\" height=\"%zu\" overflow=\"visible\">\n"
                 "<text class=\"note\" y=\"-10\">", f->unit ? "" : " class=\"plot\"", f->names + (wide + f->gap) * p,
                 TOP, wide, ROW * rows);
        page_text(page, table->cells[0][heading], strcspn(table->cells[0][heading], ":"));
        page_put(page, "%s%s</text>\n", f->unit ? ", " : "", f->unit ? f->unit : "");
        if (f->unit) bars_write(page, table, column);
        else if (!ranges_write(page, table, column, error)) return false;
        page_put(page, "</svg>\n");
    }
    page_put(page, "</svg>\n");
    return json_write_done(page, error);
}

// ------------------------------------------------------------------------------------------------
// 3. main

static bool figures_write(const char* results, const char* out, Error* error) {
    static Table table;
    char* text = NULL;
    size_t bytes;
    bool good = file_read(results, 1 << 24, &text, &bytes, error);
    for (size_t i = 0; good && i < sizeof FIGURES / sizeof *FIGURES; i++) {
        char path[FILE_PATH_MAX];
        Page page = {0};
        snprintf(path, sizeof path, "%.4000s/%s", out, FIGURES[i].file);
        good = table_read(&table, text, FIGURES[i].table, error) && figure_draw(&page, &FIGURES[i], &table, error) &&
               file_write_atomic(path, page.text, page.bytes, error);
        json_writer_free(&page);
    }
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
