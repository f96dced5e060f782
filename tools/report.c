// report.c: a page about a run, or about several beside each other, from the files that they write.
//
//     build/report runs/a --out report.html
//     build/report runs/a runs/b --out report.html --price 2.5
//     build/report runs/a --out report.html --watch 30        writes it again every 30 seconds until the run is done
//
// The page is one HTML file with its pictures, and needs no network. A file of a run that is not there, or has nothing
// to show, leaves out its part of the page. Equal files give equal bytes.
//
// Build: cc -O2 -o build/report tools/report.c -lm

#include "report_page.h"
#include "../llmtrain/base/flags.h"

typedef struct {
    const char* out;
    double price;
    uint64_t watch;
} Options;

static Flags options_flags(Options* o) {
    const Flag table[] = {
        FLAG_TEXT("out", &o->out, NULL, "FILE", 0, "the page to write, as report.html (required)"),
        FLAG_REAL("price", &o->price, 0, 0, 1e6, 0,
                  "price in dollars of an hour of one rank's device, for the cost of a run; 0: no cost"),
        FLAG_COUNT("watch", &o->watch, 0, 0, 86400, 0,
                   "write the page again every N seconds until all runs are done, and let the browser load it again; "
                   "0: write it once"),
    };
    return flags_of(table, sizeof table / sizeof table[0]);
}

// Reads the runs and writes the page. *done: all runs are done.
static bool report_make(const Options* o, const char* const* directories, size_t count, bool* done, Error* error) {
    Run* runs = (Run*)memory_allocate(count * sizeof *runs);
    Page page = {0};
    size_t read = 0, columns = count > 1 ? COLUMNS_MAX / 2 : COLUMNS_MAX;
    if (runs == NULL) return fail_memory(error, "the runs", count * sizeof *runs);
    while (read < count && run_read(&runs[read], directories[read], columns, error)) read++;
    bool good = read == count;
    *done = true;
    for (size_t i = 0; i < read; i++) *done = *done && runs[i].events.state == STATE_DONE;
    Report report = {.runs = runs, .count = count, .price = o->price, .watch = *done ? 0 : o->watch};
    good = good && report_write(&page, &report, error) && file_write_atomic(o->out, page.text, page.bytes, error);
    json_writer_free(&page);
    for (size_t i = 0; i < read; i++) run_free(&runs[i]);
    free(runs);
    return good;
}

int main(int argc, char** argv) {
    const char* directories[RUNS_MAX];
    Options o;
    Flags flags = options_flags(&o);
    size_t count = 0;
    int code;
    Error error;
    files_open_standard();
    while (count < RUNS_MAX && argc > 1 && strncmp(argv[1], "-", 1) != 0) {  // the runs come before the flags
        size_t length = strlen(argv[1]);
        while (length > 1 && argv[1][length - 1] == '/') argv[1][--length] = 0;
        directories[count++] = argv[1];
        argv[1] = argv[0];
        argv++;
        argc--;
    }
    if (!flags_begin(&code, "report", "usage: report DIR... --out FILE: a page about runs, the --out of each, as HTML.",
                     &flags, argc, argv))
        return code;
    bool good = true, done = false;
    if (count == 0) good = fail_with(&error, "no run is given; name its --out first: report runs/x --out report.html");
    else if (!o.out || !o.out[0]) good = fail_with(&error, "--out FILE is missing; give the page to write");
    if (!good) code = 2;
    do {
        good = good && report_make(&o, directories, count, &done, &error);
        if (good && o.watch > 0 && !done) sleep_ms(1000.0 * (double)o.watch);
    } while (good && o.watch > 0 && !done);
    if (good) return 0;
    fprintf(stderr, "report: %s\n", error.text);
    return code ? code : 1;
}
