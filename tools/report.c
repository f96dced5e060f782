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

// Reads the runs and writes the page. *done: all runs are done.
static bool report_make(const Options* o, char** directories, size_t count, bool* done, Error* error) {
    Run runs[RUNS_MAX];
    Page page = {0};
    size_t read = 0, columns = count > 1 ? COLUMNS_MAX / 2 : COLUMNS_MAX;
    while (read < count && run_read(&runs[read], directories[read], columns, error)) read++;
    *done = true;
    for (size_t i = 0; i < read; i++) *done = *done && runs[i].events.state == STATE_DONE;
    Report report = {.runs = runs, .count = count, .price = o->price, .watch = *done ? 0 : o->watch};
    bool good = read == count && report_write(&page, &report, error) &&
                file_write_atomic(o->out, page.text, page.bytes, error);
    json_writer_free(&page);
    for (size_t i = 0; i < read; i++) run_free(&runs[i]);
    return good;
}

int main(int argc, char** argv) {
    Options o;
    const Flag table[] = {
        FLAG_TEXT("out", &o.out, NULL, "FILE", 0, "the page to write, for example report.html (required)"),
        FLAG_REAL("price", &o.price, 0, 0, 1e6, 0,
                  "price in dollars of an hour of one rank's device, for the cost of a run; 0: no cost"),
        FLAG_COUNT("watch", &o.watch, 0, 0, 86400, 0,
                   "write the page again every N seconds until all runs are done, and let the browser load it again; "
                   "0: write it once"),
    };
    Flags flags = flags_of(table, sizeof table / sizeof table[0]);
    int count = 0, code;
    Error error;
    files_open_standard();
    while (count < RUNS_MAX && count + 1 < argc && argv[count + 1][0] != '-') {  // the runs come before the flags
        char* run = argv[++count];
        for (size_t n = strlen(run); n > 1 && run[n - 1] == '/'; n--) run[n - 1] = 0;
    }
    if (!flags_begin(&code, "report", "report DIR... --out FILE: writes a page about runs (the --out of each) as HTML",
                     &flags, argc - count, argv + count))
        return code;
    bool good = true, done = false;
    if (count == 0) good = fail_with(&error, "no run is given; name its --out first: report runs/x --out report.html");
    else if (!o.out || !o.out[0]) good = fail_with(&error, "--out FILE is missing; give the page to write");
    if (!good) code = 2;
    while (good && !done) {
        good = report_make(&o, argv + 1, (size_t)count, &done, &error);
        done = done || o.watch == 0;
        if (good && !done) sleep_ms(1000.0 * (double)o.watch);
    }
    if (good) return 0;
    fprintf(stderr, "report: %s\n", error.text);
    return code ? code : 1;
}
