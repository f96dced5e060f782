// test_report.c: the page of build/report, and the pictures of build/figures.
//
//   make build/test_report build/report build/figures
//   build/test_report [--report PATH] [--figures PATH]
//
//   1. page     a checker: tags nest, attributes are quoted, text is escaped, coordinates are numbers
//   2. numbers  lines of the metrics against strtod and against their prefixes; columns against all lines
//   3. charts   ticks; bitmap, decoded; texts from outside
//   4. runs     a tiny run, hostile texts, runs that lack files, have one line, or end in the middle of one
//   5. programs same bytes, several runs, --watch, refusals, 100,000 lines; figures against RESULTS.md

#include "harness.h"

#include "llmtrain/base/flags.h"
#include "tools/report_page.h"

static Error error;
static char *report_program, *figures_program;

// ------------------------------------------------------------------------------------------------
// 1. Page

enum { TAGS_MAX = 64 };

typedef struct {
    const char* at;
    char open[TAGS_MAX][32];
    size_t depth, elements;
    char problem[200];
} Checker;

static bool wrong(Checker* c, const char* what) {
    if (c->problem[0] == 0) snprintf(c->problem, sizeof c->problem, "%s: %.80s", what, c->at);
    return false;
}

// A text or the value of an attribute, up to one of two characters.
static bool check_text(Checker* c, char end, bool coordinates) {
    static const char* const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    for (; *c->at && *c->at != end; c->at += utf8_bytes(c->at)) {
        bool known = *c->at != '&';
        for (size_t i = 0; i < COUNT_OF(entities); i++) known |= strncmp(c->at, entities[i], strlen(entities[i])) == 0;
        if (!known) return wrong(c, "an unknown entity");
        if (*c->at == '<') return wrong(c, "a bracket in a text");
        if (utf8_bytes(c->at) == 0) return wrong(c, "no UTF-8");
        if ((unsigned char)*c->at < 32 && *c->at != '\n' && *c->at != '\t') return wrong(c, "a control character");
        if (coordinates && (strncmp(c->at, "nan", 3) == 0 || strncmp(c->at, "inf", 3) == 0))
            return wrong(c, "a coordinate that is no number");
    }
    return *c->at == end || wrong(c, "an open text");
}

static bool check_attributes(Checker* c) {
    static const char* const numbers[] = {"x", "x1", "x2", "y", "y1", "y2", "dy", "d", "width", "height", "cx", "cy",
                                          "data-v", "data-w", "data-s", "viewBox", "style"};
    char names[16][32];
    size_t count = 0;
    while (*c->at == ' ') {
        c->at++;
        size_t length = strcspn(c->at, "= />");
        if (length == 0 || length > 31 || count == COUNT_OF(names)) return wrong(c, "an attribute");
        snprintf(names[count], 32, "%.*s", (int)length, c->at);
        for (size_t i = 0; i < count; i++)
            if (strcmp(names[i], names[count]) == 0) return wrong(c, "an attribute twice");
        c->at += length;
        if (strncmp(c->at, "=\"", 2) != 0) return wrong(c, "an attribute without quotes");
        c->at += 2;
        bool number = false;
        for (size_t i = 0; i < COUNT_OF(numbers); i++) number |= strcmp(numbers[i], names[count]) == 0;
        if (!check_text(c, '"', number)) return false;
        c->at++;
        count++;
    }
    return true;
}

// Whether a page or picture is well-formed; stricter than HTML asks: every element is closed.
static bool page_good(Checker* c, const char* text) {
    memset(c, 0, sizeof *c);
    c->at = text;
    if (strncmp(text, "<!doctype html>\n", 16) == 0) c->at += 16;
    while (*c->at) {
        if (*c->at != '<') {
            if (c->depth == 0 && *c->at != '\n') return wrong(c, "a text outside");
            const char* end = c->at + strcspn(c->at, "<");
            bool here = check_text(c, *end, false);
            if (!here) return false;
            continue;
        }
        bool closes = c->at[1] == '/';
        const char* name = c->at + 1 + closes;
        size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789");
        if (length == 0 || length > 31) return wrong(c, "a bracket");
        if (closes) {
            const char* inner = c->depth ? c->open[c->depth - 1] : "";
            if (strlen(inner) != length || memcmp(inner, name, length) != 0) return wrong(c, "closes another element");
            c->depth--;
            c->at = name + length;
        } else {
            if (c->depth == TAGS_MAX) return wrong(c, "too deep");
            snprintf(c->open[c->depth++], 32, "%.*s", (int)length, name);
            c->elements++;
            c->at = name + length;
            if (!check_attributes(c)) return false;
            bool empty = *c->at == '/';
            c->depth -= empty;
            c->at += empty;
        }
        if (*c->at != '>') return wrong(c, "an open tag");
        c->at++;
        bool raw = !closes && c->at[-2] != '/' && (strncmp(name, "script", 6) == 0 || strncmp(name, "style", 5) == 0);
        if (raw) c->at = strstr(c->at, name[1] == 'c' ? "</script>" : "</style>");
        if (raw && c->at == NULL) return c->at = "", wrong(c, "an open script");
    }
    return c->depth == 0 || wrong(c, "an open element");
}

static void test_checker(void) {
    static const char* const bad[] = {"<a><b></a></b>", "<a", "<a>", "<a x=1></a>", "<a x=\"1\" x=\"2\"/>",
                                      "<a>&nbsp;</a>", "<a>\x01</a>", "<a>\xff</a>", "<path d=\"M0 nan\"/>",
                                      "<script>", "x", "<a>a < b</a>"};
    Checker c;
    for (size_t i = 0; i < COUNT_OF(bad); i++) expect(!page_good(&c, bad[i]), "accepts %s", bad[i]);
    expect(page_good(&c, "<a x=\"&lt;\">b &amp; c<b/><script>1 < 2</script></a>\n"), "%s", c.problem);
    verdict("the checker refuses what is not well-formed");
}

// The page of runs as a text, which the caller frees; NULL with the error.
static char* page_of(const char* const* directories, size_t count, double price) {
    Run runs[RUNS_MAX];
    Page page = {0};
    size_t read = 0;
    while (read < count && run_read(&runs[read], directories[read], count > 1 ? 400 : COLUMNS_MAX, &error)) read++;
    Report report = {.runs = runs, .count = count, .price = price};
    bool good = read == count && report_write(&page, &report, &error);
    for (size_t i = 0; i < read; i++) run_free(&runs[i]);
    if (good) return page.text;
    json_writer_free(&page);
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// 2. Numbers

static double random_double(uint64_t index) {
    double mantissa = (double)random_bits(7, RANDOM_TEST, 0, 2 * index) / 4294967296.0 + 1e-9;
    return mantissa * pow(10, (double)(random_bits(7, RANDOM_TEST, 0, 2 * index + 1) % 44) - 22);
}

static void test_metric_numbers(void) {
    static const char* const forms[] = {"0", "-0", "12", "1.5", "-2.25e-3", "1e300", "1e-300", "12345678901234567890",
                                        "0.00000000000000000000000000000123", "1E5", "1e+5",
                                        "1000000000000000000000000"};
    double worst = 0;
    for (size_t i = 0; i < 20000 + COUNT_OF(forms); i++) {
        char text[64];
        const char* at = text;
        if (i < COUNT_OF(forms)) snprintf(text, sizeof text, "%s,", forms[i]);
        else snprintf(text, sizeof text, i % 2 ? "%.17g," : "%.9g,", random_double(i));
        double value = metrics_number(&at), exact = strtod(text, NULL);
        if (!expect(*at == ',', "%s is read to %s", text, at)) break;
        worst = fmax(worst, exact == 0 ? fabs(value) : fabs(value / exact - 1));
    }
    check_bound(worst, 4 * 2.3e-16, "numbers of the metrics against strtod, relative");
    verdict("numbers of the metrics are read to their ends");
}

static const char LINE[] =
    "{\"step\": 12,\"loss\": 2.5,\"val_loss\": null,\"grad_norm\": \"nan\",\"lr\": 1e-4,\"other\": [1,2],"
    "\"tokens\": 640,\"tokens_x\": 7,\"loss_ranks_min\": 1,\"mfu\": NaN,\"time\": 1764000000.25}\n";

static void test_lines(void) {
    double v[KEYS];
    char text[sizeof LINE];
    expect(metrics_line(v, LINE), "the line");
    expect(v[KEY_STEP] == 12 && v[KEY_LOSS] == 2.5 && v[KEY_TOKENS] == 640 && v[KEY_LR] == 1e-4, "numbers");
    expect(fabs(v[KEY_TIME] - 1764000000.25) < 1e-6, "time %.6f", v[KEY_TIME]);
    expect(isnan(v[KEY_VAL]) && isnan(v[KEY_NORM]) && isnan(v[KEY_MFU]) && isnan(v[KEY_CLIP]), "what is no number");
    for (size_t n = 0; n + 2 < sizeof LINE; n++) {
        snprintf(text, sizeof text, "%.*s", (int)n, LINE);
        expect(!metrics_line(v, text), "the first %zu bytes are no line", n);
    }
    static const char* const bad[] = {"", "\n", "{}", "[1]", "{\"step\" 1}", "{\"step\": 1} x", "{step: 1}",
                                      "{\"a\": {}}",
                                      "{\"step\": 1,}", "{,\"step\": 1}", "{\"step\": 1\"loss\": 2}"};
    for (size_t i = 0; i < COUNT_OF(bad); i++) expect(!metrics_line(v, bad[i]), "'%s' is no line", bad[i]);
    verdict("a line, its prefixes, and what is no line");
}

// Columns against all lines: their bounds, sums and counts, for numbers of lines around the merges.
static void test_columns(void) {
    enum { MOST = 12345 };
    static const size_t sizes[] = {1, 2, COLUMNS_MAX - 1, COLUMNS_MAX, COLUMNS_MAX + 1, 2 * COLUMNS_MAX + 1, 5000,
                                   MOST};
    static double losses[MOST];
    double worst = 0;
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        size_t n = sizes[k], each = (n + COLUMNS_MAX - 1) / COLUMNS_MAX, spike = n / 3, at = 0;
        Metrics m;
        memset(&m, 0, sizeof m);
        m.columns = (Column*)calloc(COLUMNS_MAX, sizeof *m.columns);
        m.best_val = m.best_step = NAN;
        for (int i = 0; i < KEYS; i++) m.last[i] = NAN;
        for (size_t i = 0; i < n; i++) {
            double v[KEYS];
            for (int q = 0; q < KEYS; q++) v[q] = NAN;
            losses[i] = i == spike ? 1e3 : 2 + (double)random_bits(3, RANDOM_TEST, 0, i) / 4294967296.0;
            v[KEY_STEP] = (double)(i + 1);
            v[KEY_TOKENS] = 100 * (double)(i + 1);
            v[KEY_MS] = 500;
            if (i % 7 != 5) v[KEY_LOSS] = losses[i];
            if (i % 100 == 99) v[KEY_VAL] = 5 - 1e-4 * (double)i;
            metrics_add(&m, v, each);
        }
        expect(m.count <= COLUMNS_MAX && 2 * m.count >= (n < COLUMNS_MAX ? n : COLUMNS_MAX), "%zu columns", m.count);
        for (size_t c = 0; c < m.count; c++) {
            Cell cell = {INFINITY, -INFINITY, 0, 0}, *have = &m.columns[c].cells[KEY_LOSS];
            size_t end = at + each < n ? at + each : n;
            for (; at < end; at++) {
                if (at % 7 == 5) continue;
                cell = (Cell){fmin(cell.low, losses[at]), fmax(cell.high, losses[at]), cell.sum + losses[at],
                              cell.count + 1};
            }
            expect(have->count == cell.count && m.columns[c].step == (double)at, "column %zu of %zu lines", c, n);
            if (cell.count == 0) continue;
            expect(have->low == cell.low && have->high == cell.high, "bounds of column %zu of %zu lines", c, n);
            worst = fmax(worst, fabs(have->sum / cell.sum - 1));
        }
        expect(at == n && m.lines == n && m.seconds == 0.5 * (double)n, "%zu lines, %g s", n, m.seconds);
        expect(n < 100 || (m.best_step == (double)(n / 100 * 100) &&
                           fabs(m.best_val - (5 - 1e-4 * (m.best_step - 1))) < 1e-12),
               "the best validation loss of %zu lines is of step %g", n, m.best_step);
        free(m.columns);
    }
    verdict("columns have the bounds of all their lines");
    check_bound(worst, 1e-13, "and their sums, relative");  // 16 lines: 16 roundings of 1.1e-16
}

// ------------------------------------------------------------------------------------------------
// 3. Charts

static void test_ticks(void) {
    for (uint64_t i = 0; i < 3000; i++) {
        double ticks[SVG_TICKS_MAX], a = random_double(2 * i), b = random_double(2 * i + 1);
        SvgScale s = {fmin(a, b), fmax(a, b), i % 2 == 1};
        if (i % 4 == 0) s.high = s.low * (1 + 1e-3 * (1 + (double)(i % 97)));
        int n = svg_ticks(ticks, &s, 6);
        expect(n >= 1 && n <= SVG_TICKS_MAX, "%d ticks from %g to %g", n, s.low, s.high);
        expect(s.log || n <= 7, "%d even ticks from %g to %g", n, s.low, s.high);
        for (int k = 0; k < n; k++) {
            double at = svg_at(&s, ticks[k]);
            expect(at > -1e-6 && at < 1 + 1e-6, "tick %g from %g to %g", ticks[k], s.low, s.high);
            expect(k == 0 || ticks[k] > ticks[k - (k > 0)], "tick %g is not above the one before", ticks[k]);
        }
        if (s.log || n < 2) continue;
        double step = ticks[1] - ticks[0], digit = step / pow(10, floor(log10(step) + 1e-6));
        bool round = fabs(digit - 1) < 1e-5 || fabs(digit - 2) < 1e-5 || fabs(digit - 5) < 1e-5;
        expect(round || s.low * 1e-10 > step, "a step of %g", step);
    }
    verdict("ticks are multiples of 1, 2 or 5, inside the axis");
}

// Bytes of a data URI.
static size_t base64_read(unsigned char* out, const char* text) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0;
    for (; text[0] && text[0] != '"'; text += 4) {
        uint32_t group = 0;
        int bytes = text[2] == '=' ? 1 : text[3] == '=' ? 2 : 3;
        for (int i = 0; i < 4; i++)
            group = group << 6 | (text[i] == '=' ? 0 : (uint32_t)(strchr(letters, text[i]) - letters));
        for (int i = 0; i < bytes; i++) out[n++] = (unsigned char)(group >> (16 - 8 * i));
    }
    return n;
}

static size_t little_endian(const unsigned char* p) {
    return p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
}

static void test_bitmap(size_t width, size_t height) {
    unsigned char *cells = (unsigned char*)malloc(width * height), *file, palette[256][3];
    Page page = {0};
    for (size_t i = 0; i < width * height; i++) cells[i] = (unsigned char)random_bits(5, RANDOM_TEST, 0, i);
    for (int i = 0; i < 768; i++) palette[i / 3][i % 3] = (unsigned char)(255 - i / 3 + i % 3);
    bitmap_uri(&page, cells, width, height, palette);
    need(page.text && cells, "a picture");
    expect(strncmp(page.text, "data:image/bmp;base64,", 22) == 0, "the URI");
    file = (unsigned char*)malloc(page.bytes);
    size_t bytes = base64_read(file, page.text + 22), row = (width + 3) / 4 * 4, wrong_cells = 0;
    expect(memcmp(file, "BM", 2) == 0 && bytes == 14 + 40 + 1024 + row * height, "%zu bytes", bytes);
    // BITMAPFILEHEADER and BITMAPINFOHEADER: sizes, where the cells are, planes and bits, no compression
    const size_t fields[][2] = {{2, bytes}, {6, 0}, {10, 14 + 40 + 1024}, {14, 40}, {18, width}, {22, height},
                                {26, 1 + (8 << 16)}, {30, 0}, {34, 0}, {46, 0}, {50, 0}};
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        expect(little_endian(file + fields[i][0]) == fields[i][1], "the field at byte %zu", fields[i][0]);
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < width; x++) {
            unsigned char cell = cells[y * width + x];
            const unsigned char *color = file + 54 + 4 * file[1078 + (height - 1 - y) * row + x], *want = palette[cell];
            wrong_cells += color[2] != want[0] || color[1] != want[1] || color[0] != want[2] || color[3] != 0;
        }
    expect(wrong_cells == 0, "%zu wrong cells", wrong_cells);
    verdict("a bitmap of %zu x %zu cells", width, height);
    free(cells);
    free(file);
    json_writer_free(&page);
}

static void test_escapes(void) {
    static const char hostile[] = "<script>&\"'\x01\x7f\xff\xc3(\xed\xa0\x80\xef\xbf\xbf\xc2\x85 "
                                  "\xe2\x82\xac\t\n</svg>";
    Page page = {0};
    Checker c;
    char text[40];
    page_text(&page, hostile, sizeof hostile - 1);
    expect(strcmp(page.text, "&lt;script&gt;&amp;&quot;&#39;\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd("
                  "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd \xe2\x82\xac\t\n&lt;/svg&gt;") == 0,
                  "%s",
           page.text);
    json_writer_free(&page);
    page_text(&page, "a\0b", 3);
    expect(strcmp(page.text, "a\xef\xbf\xbd" "b") == 0, "%s", page.text);
    json_writer_free(&page);
    for (size_t n = 0; n < sizeof hostile; n++) {
        page_put(&page, "<p x=\"");
        page_text(&page, hostile, n);
        page_put(&page, "\"></p>");
        expect(page_good(&c, page.text), "%zu bytes: %s", n, c.problem);
        json_writer_free(&page);
    }
    static const struct { double value; const char *text, *brief; } numbers[] = {
        {0, "0", "0"}, {2.5, "2.5", "2.5"}, {1234, "1234", "1234"}, {-1234567, "-1,234,567", "-1.235M"},
        {99999.4, "99999", "100k"}, {100000, "100,000", "100k"}, {1e9, "1,000,000,000", "1B"}, {1e-7, "1e-07", "1e-07"},
        {NAN, "-", "nan"}};
    for (size_t i = 0; i + 1 < COUNT_OF(numbers); i++) {
        expect(strcmp(number_text(text, numbers[i].value), numbers[i].text) == 0, "%s", text);
        expect(strcmp(number_short(text, numbers[i].value), numbers[i].brief) == 0, "%s", text);
    }
    expect(strcmp(number_text(text, NAN), "-") == 0, "%s", text);
    verdict("texts from outside are escaped, numbers are short");
}

// ------------------------------------------------------------------------------------------------
// 4. Runs

static void put_line(const char* path, const char* line) {
    FILE* file = fopen(path, "ae");
    need(file && fputs(line, file) >= 0 && fclose(file) == 0, "%s", path);
}

// A run of some lines, with everything that a run may have, and texts from outside.
static void run_make(const char* directory, int lines, const char* text, double lr) {
    need(mkdir(directory, 0755) == 0, "%s", directory);
    const char *metrics = text_of("%s/metrics.jsonl", directory), *events = text_of("%s/events.jsonl", directory);
    FILE *file = fopen(metrics, "we"), *ranks = fopen(text_of("%s/ranks.jsonl", directory), "we");
    need(file && ranks, "%s", metrics);
    for (int i = 1; i <= lines; i++) {
        double loss = 2.4 + 3.0 / i + (i == lines * 3 / 4 ? 4 : 0);
        fprintf(file, "{\"step\": %d,\"loss\": %.17g,\"val_loss\": ", i, loss);
        fprintf(file, i % 10 == 0 ? "%.17g" : "null", 2.5 + 3.0 / i);
        fprintf(file, ",\"grad_norm\": %g,\"lr\": %g,\"clip\": %g,\"tokens\": %d,\"skipped\": %d,\"ms\": 500,"
                "\"wait_share\": 0.1,\"ms_ranks_median\": 400,\"ms_ranks_max\": 450,\"load_ms\": 1,"
                "\"tok_per_s\": 2000,\"mfu\": 0.4,\"mem_bytes\": 2e9,\"time\": %.3f,\"power_w\": 300,"
                "\"joules_per_token\": 0.15,\"gpu_temp_c\": 60,\"clock_mhz\": 1980%s}\n", 1 + 1.0 / i, lr,
                i < 4 ? 0.5 : 1.0, 1000 * i, i > lines / 2,
                1764000010 + 0.5 * i, i == 7 ? ",\"worst_loss\": 9" : "");
        fprintf(ranks, "{\"step\": %d,\"loss\": [1,1,1],\"busy_ms\": [400,%d,401],\"wait_ms\": [99,0,null]}\n", i,
                i % 2 ? 800 : 399);
    }
    need(fclose(file) == 0 && fclose(ranks) == 0, "%s", metrics);
    put_text(events, "{\"time\": \"2025-11-24T16:00:10.000Z\",\"event\": \"begun\",\"step\": 0,"
             "\"detail\": \"3 ranks\",\"ms\": 10000}\n");
    for (int i = 0; i < 2; i++)  // as if the step were made again
        put_line(events, text_of("{\"time\": \"2025-11-24T16:00:13.000Z\",\"event\": \"bad_batch\",\"step\": 7,"
                                 "\"detail\": \"%s\",\"sequences\": [{\"shard\": \"a %s.bin\",\"at\": 41,"
                                 "\"tokens\": 65,\"loss\": 9.5,\"grad_norm\": null},"
                                 "{\"shard\": \"b.bin\",\"at\": 5,\"tokens\": 65,\"loss\": null}]}\n", text, text));
    put_line(events, text_of("{\"time\": \"2025-11-24T16:00:%06.3fZ\",\"event\": \"saved\",\"step\": %d,"
                             "\"detail\": \"saved\",\"ms\": 100}\n", 10 + 0.5 * lines, lines));
    put_line(events, text_of("{\"time\": \"2025-11-24T16:00:%06.3fZ\",\"event\": \"done\",\"step\": %d,"
                             "\"detail\": \"%s\"}\n",
                             10.1 + 0.5 * lines, lines, text));
    put_text(text_of("%s/samples.jsonl", directory),
             text_of("{\"step\": 10,\"seed\": 1,\"prompt\": \"Once %s\",\"text\": \" upon %s\"}\n", text, text));
    put_text(text_of("%s/run.jsonl", directory),
             text_of("{\"time\": 1764000000,\"step\": 1,\"command\": \"./train %s\","
                     "\"flags\": {\"lr\": \"%g\",\"data\": \"%s\",\"out\": \"o%c\"},\"family\": \"llama\","
                     "\"layers\": 2,\"parameters\": 1100000,\"trained\": 1100000,\"device\": \"%s\","
                     "\"hosts\": [\"h0\",\"%s\"],\"ranks\": 3,\"tp\": 1,\"zero\": 1,\"steps\": %d,"
                     "\"floor\": 2.25,\"data\": \"%s\",\"version\": \"0.1\"}\n", text, lr, text, directory[0],
                     text, text, lines, text));
}

// The places of texts in a page, in this order.
static void expect_order(const char* page, const char* const* texts, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char* found = strstr(page, texts[i]);
        if (expect(found != NULL, "'%s' after '%s'", texts[i], i ? texts[i - 1] : "")) page = found;
    }
}

static void test_tiny(void) {
    static const char* const parts[] = {
        "<!doctype html>", "<title>tiny</title>", "<h1>tiny<span class=\"state s1\">done</span></h1>",
        "<b>2.55</b><small>training loss, recent mean</small>", "<b>2.65</b><small>validation loss, last</small>",
        "<b>2.65</b><small>validation loss, best, step 20</small>", 
        "<b>+17.8%</b><small>above the entropy floor</small>",
        "<b>20</b><small>steps of 20</small>", "<b>20k</b><small>tokens</small>", "<b>20 s</b><small>time</small>",
        "<b>2000</b><small>tokens per second</small>", "<b>40.0%</b>", "<b>49.8%</b><small>goodput</small>",
        "<b>3e+03 J</b><small>energy</small>", "<b>$0.04</b><small>cost</small>",
        "<b>1</b><small>steps skipped</small>",
        "<dt>parameters</dt><dd>1,100,000</dd>", "<dt>hosts</dt><dd>h0, node</dd>", "<dt>ranks</dt><dd>3</dd>",
        "<h2>Loss</h2>", "<b>Loss</b>", "class=\"line floor\"", "2.25, the entropy of the validation text",
        "<b>Above the entropy floor</b>", "<h2>Optimization</h2>", "<b>Gradient norm</b>", "clipped</button>",
        "skipped</button>", "traced</button>", "data-s=\"1,2,3\"", "data-s=\"11\"", "data-s=\"7\"",
        "<b>Learning rate</b>",
        "<h2>Speed</h2>", "<b>Throughput</b>", "<b>Time of a step</b>", "<b>Model FLOPs utilization</b>",
        "<b>Memory</b>",
        "<b>Computing time of the ranks</b>", "<b>Waiting for other ranks</b>", "<h2>Machine</h2>", "<b>Power</b>",
        "<b>Energy</b>", "<b>Temperature</b>", "<b>Clock</b>", "<h2>Where the time went</h2>",
        "set-up</td><td class=\"n\">10 s",
        "1 start.</p>", "<h2>Ranks</h2>", "data:image/bmp;base64,",
        ("<tr><td class=\"n\">1</td><td class=\"n\">599.50</td><td class=\"n\">1.496</td><td class=\"n\">0.00</td>"
         "<td class=\"n\">50.0% of the steps</td></tr>"),
        "<h2>Events</h2>", "starts</text>", "saves</text>", "bad batches</text>", "ends</text>", "2025-11-24 16:00:13",
        "bad_batch", "<h2>Sequences with the highest losses</h2>",
        "<td class=\"n\">-</td><td class=\"n\">-</td><td class=\"n\">7</td>",
        "build/tokenize --show &#39;b.bin&#39; --at 5 --tokens 65",
        "<td class=\"n\">9.5</td>", "build/tokenize --show &#39;a node.bin&#39; --at 41 --tokens 65",
        "<h2>Samples</h2>",
        "step 10", "<span class=\"prompt\">Once node</span> upon node</p>",
        "{\"high\":[20,20000,10],\"runs\":[[[1,2,3", "],[1000,2000,3000", "],[0.5,1,1.5", "(() => {", "</html>",
    };
    static const char* const directories[] = {"tiny", "slow"};
    Checker c;
    run_make("tiny", 20, "node", 1e-3);
    char* page = page_of(directories, 1, 2.5);
    need(page != NULL, "%s", error.text);
    expect(page_good(&c, page), "%s", c.problem);
    expect_order(page, parts, COUNT_OF(parts));
    expect(strstr(page, "http") == NULL, "no address: %.60s", strstr(page, "http") ? strstr(page, "http") : "");
    expect(strstr(page, "tensor parallel") == NULL && strstr(page, "of which train") == NULL, "what is not said");
    expect(count_in(page, "--at 41 ") == 1, "a sequence is there once");
    expect(strstr(page, "class=\"band\"") == NULL, "no band where each column is a line");
    verdict("the page of a tiny run, %zu elements, %zu bytes", c.elements, strlen(page));
    free(page);

    run_make("slow", 30, "node", 2e-3);
    page = page_of(directories, 2, 0);
    need(page != NULL, "%s", error.text);
    static const char* const both[] = {
        "<h1>2 runs</h1>", "tiny</th>", "slow</th>", "training loss", "<td class=\"n\">2.55</td>",
        "<td class=\"n\">2.5</td>",
        "tokens to a validation loss of 2.65</td><td class=\"n\">20k</td><td class=\"n\">20k</td>",
        "Flags that differ", "--lr</code></td><td class=\"n\">0.001</td><td class=\"n\">0.002</td>", "<b>Loss</b>",
        "tiny</button>", "slow</button>", "data-r=\"0\"", "data-r=\"1\"",
        "Where the time went <span class=\"dim\">tiny</span>", "Where the time went <span class=\"dim\">slow</span>",
    };
    expect(page_good(&c, page), "%s", c.problem);
    expect_order(page, both, COUNT_OF(both));
    expect(strstr(page, "--data</code>") == NULL && strstr(page, "--out</code>") == NULL, "flags that do not differ");
    verdict("the page of two runs");
    free(page);
}

static void test_hostile(void) {
    static const char text[] = "<script>alert(1)</script></svg></p>&amp;\\u0000\\u0001<!--\xc3\xa9 ${x} %s %n \\\"'";
    static const char* const directories[] = {"x<i>\"&'", "tiny"};
    Checker c;
    run_make(directories[0], 12, text, 1e-3);
    put_line("x<i>\"&'/samples.jsonl", "{\"step\": 11,\"prompt\": \"\xff\xfe broken\",\"text\": 7}\n");
    put_line("x<i>\"&'/samples.jsonl", "{\"step\": 12,\"prompt\": {\"a\": [1]},\"text\": \"ok </script> \\ud800\"}\n");
    for (size_t count = 1; count <= 2; count++) {
        char* page = page_of(directories, count, 0);
        need(page != NULL, "%s", error.text);
        expect(page_good(&c, page), "%zu runs: %s", count, c.problem);
        expect(count_in(page, "<script") == 2 && count_in(page, "</script>") == 2, "two scripts, which are ours");
        expect(count_in(page, "&lt;script&gt;alert(1)&lt;/script&gt;&lt;/svg&gt;") >= 5, "the text is there");
        expect(strstr(page, "<i>\"") == NULL && strstr(page, "<!--") == NULL, "no markup from outside");
        free(page);
    }
    verdict("hostile texts stay texts");
}

// Runs that lack something; the page is good, and lacks that part.
static void test_lacking(void) {
    static const char *const files[] = {"metrics", "events", "ranks", "samples", "run"};
    static const char* const headings[] = {"<h2>Loss</h2>", "<h2>Events</h2>", "<h2>Ranks</h2>", "<h2>Samples</h2>",
                                           "<dl>"};
    static const char* const directories[] = {"lacks"};
    Checker c;
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        for (int kind = 0; kind < 3; kind++) {  // no file, an empty one, one that ends in the middle of its only line
            copy_tree("tiny", "lacks");
            const char* path = text_of("lacks/%s.jsonl", files[i]);
            need(kind > 0 ? truncate(path, kind == 1 ? 0 : 31) == 0 : remove(path) == 0, "%s", path);
            char* page = page_of(directories, 1, 1);
            if (expect(page != NULL, "%s", error.text)) {
                expect(page_good(&c, page), "%s, %d: %s", files[i], kind, c.problem);
                for (size_t k = 0; k < COUNT_OF(files); k++)
                    expect((strstr(page, headings[k]) != NULL) == (k != i), "%s without %s", headings[k], files[i]);
                expect((strstr(page, "1 incomplete line") != NULL) == (kind == 2),
                       "the incomplete line of %s", files[i]);
            }
            free(page);
            remove_tree("lacks");
        }
    }
    verdict("a run without one of its files");
    static const char* const lines[] = {
        "{\"step\": 1,\"loss\": 2.5}\n", "{\"step\": 1,\"loss\": null}\n",
        "{\"step\": 1,\"loss\": 0,\"grad_norm\": 0}\n",
        "{\"step\": 1,\"loss\": -1e308,\"lr\": 1e308}\n{\"step\": 2,\"loss\": 1e308,\"lr\": -1e308}\n",
        ("{\"step\": 1,\"loss\": 2,\"val_loss\": NaN,\"grad_norm\": NaN}\n"
         "{\"step\": 2,\"loss\": Infinity,\"grad_norm\": 1e999}\n"),
        "{\"step\": 1,\"loss\": 2}\n{\"step\": 2,\"loss\": null}\n{\"step\": 3,\"loss\": 3}\n{\"step\": 4,\"lo",
        "{\"step\": 5,\"loss\": 2}\n{\"step\": 4,\"loss\": 2}\n{\"loss\": 2}\n{\"step\": \"x\"}\n",
        "{\"step\": 1,\"tokens\": 1e300,\"time\": -5,\"ms\": -1e9,\"wait_share\": 2,\"clip\": -1,\"skipped\": 9}\n",
        "\n\n{}\n[]\nx\n", "{\"step\": 1e18,\"loss\": 2}\n{\"step\": 1e19,\"loss\": 2}\n",
    };
    need(mkdir("lines", 0755) == 0, "a directory");
    static const char* const odd[] = {"lines"};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        put_text("lines/metrics.jsonl", lines[i]);
        char* page = page_of(odd, 1, 1);
        if (!expect(page != NULL, "lines %zu: %s", i, error.text)) continue;
        expect(page_good(&c, page), "lines %zu: %s", i, c.problem);
        expect(strstr(page, ">nan") == NULL && strstr(page, ">-nan") == NULL && strstr(page, ">inf") == NULL,
               "lines %zu", i);
        expect(strstr(page, "running") != NULL, "no event: it runs");
        if (i == 0) expect(strstr(page, "<b>Loss</b>") != NULL && strstr(page, "h5\"") != NULL, "a dot for one line");
        if (i == 2) expect(count_in(page, "h5\"/>") == 1 && strstr(page, "M5000 -") == NULL, "a loss of 0");
        if (i == 3) expect(strstr(page, "<h2>") == NULL, "numbers too large for a sum are left out");
        if (i == 5) expect(strstr(page, "data-v=\"2,,3\"") && strstr(page, ">1 incomplete line of the logs"), "a gap");
        if (i == 5) expect(count_in(page, "h5") == 2, "a line ends at a gap");
        if (i == 6) expect(count_in(page, "[5]") == 1, "a step that is not after the one before is left out");
        free(page);
    }
    verdict("one line, NaN, null, gaps, a torn line, numbers beyond reason");
}

// Of many samples some are shown, at equal distances, and the last.
static void test_samples(void) {
    static const char* const directories[] = {"many"};
    need(mkdir("many", 0755) == 0, "a directory");
    for (size_t n = 1; n <= 40; n++) {
        put_line("many/samples.jsonl", text_of("{\"step\": %zu,\"prompt\": \"p\",\"text\": \"t\"}\n", n));
        char* page = page_of(directories, 1, 0);
        need(page != NULL, "%s", error.text);
        size_t each = (n + SAMPLES_KEPT - 1) / SAMPLES_KEPT, shown = 0;
        for (size_t i = 1; i <= n; i++) {
            bool here = strstr(page, text_of("<h3>step %zu</h3>", i)) != NULL;
            expect(here == ((i - 1) % each == 0 || i == n), "sample %zu of %zu", i, n);
            shown += here;
        }
        expect(count_in(page, "class=\"sample\"") == shown, "%zu samples of %zu", shown, n);
        free(page);
    }
    verdict("some of many samples, and the last");
}

static void test_states(void) {
    static const struct { const char *events, *state; } cases[] = {
        {"begun", "running"}, {"begun done", "done"}, {"begun failed", "failed"}, {"begun stopped", "stopped"},
        {"start begun failure restart", "failed"}, {"start begun failure restart start resumed", "running"},
        {"begun done stopped", "done"}, {"begun stopped resumed", "running"},
        {"start begun failure gave_up", "failed"}, {"begun saved slow", "running"}};
    static const char* const directories[] = {"states"};
    need(mkdir("states", 0755) == 0, "a directory");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Words w = {.count = 0};
        words_add(&w, cases[i].events);
        put_text("states/events.jsonl", "");
        for (size_t k = 0; k < w.count; k++) {
            if (strcmp(w.words[k], "gave_up") == 0) w.words[k][4] = ' ';
            put_line("states/events.jsonl",
                     text_of("{\"time\": \"2025-11-24T16:00:10.000Z\",\"event\": \"%s\",\"step\": %zu}\n",
                                                    w.words[k], k));
        }
        char* page = page_of(directories, 1, 0);
        expect(page && strstr(page, text_of("\">%s</span></h1>", cases[i].state)), "%s: %s", cases[i].events,
               cases[i].state);
        free(page);
    }
    verdict("the state of a run follows from its events");
}

// ------------------------------------------------------------------------------------------------
// 5. Programs

static Program program;

static int run_program(const char* path, const char* arguments) {
    return program_execute(&program, path, arguments, NULL, NULL);
}

static void test_program(void) {
    size_t bytes, others;
    expect(run_program(report_program, "tiny/ --out a.html --price 2.5") == 0, "%s", program.text[1]);
    expect(run_program(report_program, "tiny --price=2.5 --out b.html") == 0, "%s", program.text[1]);
    char *a = text_read("a.html", &bytes), *b = text_read("b.html", &others);
    expect(bytes > 10000 && bytes == others && memcmp(a, b, bytes) == 0, "%zu and %zu bytes", bytes, others);
    free(b);
    b = page_of((const char* const[]){"tiny"}, 1, 2.5);
    expect(b && strcmp(a, b) == 0, "the same as in this process");
    free(a);
    free(b);
    expect(run_program(report_program, "tiny slow --out c.html") == 0 && file_exists("c.html"), "%s", program.text[1]);
    verdict("the same files give the same bytes");
    need(symlink("loop", "loop") == 0, "a link to itself");
    static const struct { const char* arguments; int code; const char* words; } bad[] = {
        {"--out x.html", 2, "no run is given"}, {"tiny", 2, "--out FILE is missing"},
        {"tiny --out x.html slow", 2, "'slow' is not a flag"},
        {"nothing --out x.html", 1, "nothing has no metrics.jsonl"},
        {"loop --out x.html", 1, "cannot look at loop/events.jsonl: Too many levels of symbolic links"},
        {"tiny nothing --out x.html", 1, "nothing has no metrics.jsonl"}, {"tiny --out no/x.html", 1, "no/x.html"},
        {"tiny --out x.html --price -1", 2, "--price"}, {"a b c d e f g h i --out x.html", 2, "'i' is not a flag"}};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        int code = run_program(report_program, bad[i].arguments);
        expect(code == bad[i].code && strstr(program.text[1], bad[i].words), "%s: %d, %s", bad[i].arguments, code,
               program.text[1]);
    }
    expect(!file_exists("x.html"), "nothing is written");
    verdict("what is refused");
}

// Runs until all runs are done; each page is whole, and only the last one is not loaded again.
static void test_watch(void) {
    Checker c;
    Words w = {.count = 0};
    words_put(&w, 0, report_program, strlen(report_program));
    words_add(&w, "watched --out w.html --watch 1");
    copy_tree("tiny", "watched");
    put_line("watched/events.jsonl", "{\"time\": \"2025-11-24T16:01:00.000Z\",\"event\": \"resumed\",\"step\": 20}\n");
    program_free(&program);
    program_start(&program, w.words, NULL, NULL);
    double deadline = now_ms() + 30e3;
    while (!file_exists("w.html") && now_ms() < deadline) sleep_ms(5);
    char* page = text_read("w.html", NULL);
    expect(page_good(&c, page) && strstr(page, "<meta http-equiv=\"refresh\" content=\"1\"/>"), "%s", c.problem);
    expect(strstr(page, "running</span>") != NULL, "it runs");
    free(page);
    put_line("watched/events.jsonl", "{\"time\": \"2025-11-24T16:01:09.000Z\",\"event\": \"done\",\"step\": 20}\n");
    programs_wait(&program, 1, PROGRAM_MS);
    page = text_read("w.html", NULL);
    expect(program_good(&program), "%s", program.text[1]);
    expect(page_good(&c, page) && strstr(page, "http") == NULL && strstr(page, "done</span>"), "the last page: %s",
           c.problem);
    free(page);
    expect(directory_count(".", "w.html") == 1, "no temporary file is left");
    verdict("--watch writes the page again, until the run is done");
}

static void test_size(void) {
    enum { LINES = 100000 };
    need(mkdir("long", 0755) == 0, "a directory");
    FILE* file = fopen("long/metrics.jsonl", "we");
    need(file != NULL, "a file");
    for (int i = 1; i <= LINES; i++) {
        double noise = (double)random_bits(9, RANDOM_TEST, 0, (uint64_t)i) / 4294967296.0;
        fprintf(file, "{\"step\": %d,\"loss\": %.15g,\"val_loss\": null,\"grad_norm\": %.15g,\"lr\": %.15g,"
                "\"clip\": %.15g,\"tokens\": %d000,\"epoch\": 0.5,\"skipped\": %d,\"loss_ranks_min\": %.15g,"
                "\"ms\": %.15g,\"ms_ranks_median\": %.15g,\"ms_ranks_max\": %.15g,\"wait_share\": %.15g,"
                "\"tok_per_s\": %.15g,\"mfu\": %.15g,\"mem_bytes\": 61234567890,\"time\": %.3f,\"load_ms\": %.15g,"
                "\"power_w\": %.15g,\"joules_per_token\": %.15g,\"gpu_temp_c\": %.15g,\"clock_mhz\": %.15g}\n", i,
                2 + noise + 10.0 / i + (i == 77777 ? 50 : 0), 1 + noise, 1e-3 * noise,
                noise, i, i / 1000, noise, 500 + noise, 400 + noise, 450 + noise, noise, 1e5 * noise, noise,
                1764000000 + 0.5 * i, noise, 300 + noise, noise, 60 + noise, 1900 + noise);
    }
    need(fclose(file) == 0, "a file");
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    expect(run_program(report_program, "long --out long.html") == 0, "%s", program.text[1]);
    getrusage(RUSAGE_CHILDREN, &after);
    double seconds = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec) +
                     1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec);
    size_t bytes;
    char* page = text_read("long.html", &bytes);
    Checker c;
    expect(page_good(&c, page), "%s", c.problem);
    expect(count_in(page, "52.") >= 1 && strstr(page, "step 77875"), "the spike of one line is there");
    verdict("%d lines", LINES);
    check_bound((double)bytes, 1e6, "bytes of the page of %d lines", LINES);
    check_bound(seconds, 5, "processor seconds");
    // Before it becomes the program, a child has the memory of this process: of a sanitizer that is more.
    if (memory_peak() < (size_t)50e6) check_bound((double)program.peak, 100e6, "bytes of memory");
    free(page);
}

static void test_figures(const char* source) {
    static const char* const names[] = {"results_speed.svg", "results_memory.svg", "results_optimizers.svg"};
    Checker c;
    size_t bytes, others;
    expect(run_program(figures_program, text_of("--results %s/dev/bench/RESULTS.md --out .", source)) == 0, "%s",
           program.text[1]);
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char *made = text_read(names[i], &bytes), *ours = text_read(text_of("%s/doc/%s", source, names[i]), &others);
        expect(page_good(&c, made) && c.elements > 20, "%s: %s", names[i], c.problem);
        expect(count_in(made, "http") == 1, "%s: only the name space is an address", names[i]);
        expect(bytes == others && memcmp(made, ours, bytes) == 0, "doc/%s is not what RESULTS.md says: "
               "run build/figures", names[i]);
        free(made);
        free(ours);
    }
    char *text = text_read(text_of("%s/dev/bench/RESULTS.md", source), &bytes), *number = strstr(text, "| 248.1 |");
    need(number != NULL, "the number 248.1");
    number[4] = '9';
    put_bytes("RESULTS.md", text, bytes);
    char* before = text_read(names[0], NULL);
    expect(run_program(figures_program, "--results RESULTS.md --out .") == 0, "%s", program.text[1]);
    char* after = text_read(names[0], NULL);
    expect(strcmp(before, after) != 0 && strstr(after, ">249.1<"), "another number is another picture");
    memcpy(strstr(text, "| optimizer |"), "| optimisers", 12);
    put_bytes("RESULTS.md", text, bytes);
    expect(run_program(figures_program, "--results RESULTS.md --out .") == 1, "a table is missing");
    expect(strstr(program.text[1], "has no table") != NULL, "%s", program.text[1]);
    verdict("the pictures in doc/ are those of RESULTS.md");
    free(text);
    free(before);
    free(after);
}

int main(int argc, char** argv) {
    const char *report_path = "build/report", *figures_path = "build/figures";
    const Flag rows[] = {{"report", KIND_TEXT, &report_path, "PATH", 0, 0, "the program", 0},
                         {"figures", KIND_TEXT, &figures_path, "PATH", 0, 0, "the program", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    char source[PATH_MAX];
    if (!flags_begin(&code, "test_report", NULL, &flags, argc, argv)) return code;
    tests_begin("test_report");
    report_program = realpath(report_path, NULL);
    figures_program = realpath(figures_path, NULL);
    need(getcwd(source, sizeof source) && file_exists("doc/formats.md"), "run it in the root of the checkout");
    root_enter();
    test_checker();
    test_metric_numbers();
    test_lines();
    test_columns();
    test_ticks();
    test_bitmap(1, 1);
    test_bitmap(7, 3);
    test_bitmap(HEAT_COLUMNS, HEAT_ROWS);
    test_escapes();
    test_tiny();
    test_hostile();
    test_lacking();
    test_samples();
    test_states();
    if (report_program) test_program(), test_watch(), test_size();
    else skip("the program report", text_of("there is none at %s", report_path));
    if (figures_program) test_figures(source);
    else skip("the program figures", text_of("there is none at %s", figures_path));
    program_free(&program);
    free(report_program);
    free(figures_program);
    return tests_end();
}
