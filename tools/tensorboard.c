// tensorboard.c: finished runs for TensorBoard: an event file of what their logs say.
//
//   build/tensorboard runs/a runs/b --dir views && tensorboard --logdir views
//
// Reads:  metrics.jsonl of each run; events.jsonl, run.jsonl and samples.jsonl if there.
// Writes: DIR/a, DIR/b: an event file each, in place of one that this program wrote there before.
// Exit:   0 done; 1 a file cannot be read or written; 2 the command line is wrong.
//
// A run with --tensorboard has the same in its own directory tensorboard/, while it trains.

#include "../llmtrain/base/flags.h"
#include "../llmtrain/run/tfevents.h"

#include <signal.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

// Each run has a name, and a different one.
static bool arguments_check(char** runs, size_t count, const char* dir, Error* error) {
    char name[256], other[256];
    if (count == 0) return fail_with(error, "name the directories of runs, before the flags");
    if (dir == NULL || dir[0] == 0) return fail_with(error, "give --dir, the directory to write");
    for (size_t i = 0; i < count; i++) {
        run_name(name, sizeof name, runs[i]);
        if (name[0] == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            return fail_with(error, "'%.600s' does not end in the name of a run; give its directory as runs/x",
                             runs[i]);
        for (size_t j = 0; j < i; j++) {
            run_name(other, sizeof other, runs[j]);
            if (strcmp(name, other) == 0)
                return fail_with(error, "two runs are called %s; convert one of them into another --dir", name);
        }
    }
    return true;
}

static bool convert(char** runs, size_t count, const char* dir, uint64_t every, Error* error) {
    char name[256], path[FILE_PATH_MAX];
    for (size_t i = 0; i < count; i++) {
        run_name(name, sizeof name, runs[i]);
        snprintf(path, sizeof path, "%.3700s/%s", dir, name);
        if (!tfevents_convert(runs[i], path, every, error)) return false;
        say(stdout, "%s: an event file of %s", path, runs[i]);
    }
    return output_written(error);
}

int main(int argc, char** argv) {
    const char* dir = NULL;
    uint64_t every = 0;
    int count = 0, code;
    const Flag rows[] = {
        FLAG_TEXT("dir", &dir, NULL, "DIR", 0, "directory that gets a subdirectory for each run (required)"),
        FLAG_COUNT("every", &every, 0, 0, 1e12, 0,
                   "steps between two points of a curve; 0: as many as leave 20,000 points"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    Error error;
    files_open_standard();
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    while (count + 1 < argc && strncmp(argv[count + 1], "--", 2) != 0) count++;  // the runs come first
    if (!flags_begin(&code, "tensorboard", "tensorboard RUN ... --dir DIR: writes the logs of runs as event files for "
                     "TensorBoard", &flags, argc - count, argv + count)) return code;
    bool given = arguments_check(argv + 1, (size_t)count, dir, &error);
    if (given && convert(argv + 1, (size_t)count, dir, every, &error)) return 0;
    fprintf(stderr, "tensorboard: %s\n", error.text);
    return given ? 1 : 2;
}
