// checkpoint_cost.c: what saving and loading a model cost, beside what the disk can do.
//
//   cc -std=c11 -O3 -march=native -fopenmp -I. dev/checkpoint_cost.c -o build/checkpoint_cost -lm -pthread
//   build/checkpoint_cost [--model gpt2:124M] [--dir build] [--rounds 5]
//
// A round does in turn, so that all meet the same disk:
//   write   dd of as many bytes, from the page cache, with fsync
//   sync    a save without a snapshot: training stands all the time
//   async   a save with one: training stands while the snapshot is taken, and while the finished files get their name
//   read    dd of the checkpoint's file to /dev/null; load: of the checkpoint into the model; both after the file was
//           dropped from the page cache, and once more from there
// Medians of the rounds are printed. The table needs a machine, and a disk, that nobody else is using.

#include "../checkpoint.h"

typedef enum { WRITE, SYNC, ASYNC, STALL, READ_COLD, LOAD_COLD, READ_WARM, LOAD_WARM, TIMES } Time;
#define ROUNDS_MAX 100
#define STEP ((uint64_t)1)  // of the checkpoint

typedef struct {
    Model model;
    RunRecord run;
    char out[FILE_PATH_MAX], checkpoint[FILE_PATH_MAX], file[FILE_PATH_MAX + 64], copy[FILE_PATH_MAX + 64];
    double ms[TIMES][ROUNDS_MAX];
} Cost;

static void need(bool good, const Error* error) {
    if (good) return;
    fprintf(stderr, "checkpoint_cost: %s\n", error->text);
    exit(1);
}

static void save(Cost* c, bool snapshots, size_t round) {
    Saver saver;
    Error error;
    need(saver_open(&saver, &c->model, snapshots, 0, &error), &error);
    if (snapshots) memset(saver.snapshot, 1, saver.bytes);  // the first snapshot of a run meets new memory; the others do not
    double began = now_ms();
    saver_begin(&saver, &c->model, &c->run, c->out, NULL);
    while (saver_state(&saver) == SAVER_WRITING) comm_sleep(1);  // a step would ask once
    need(saver_end(&saver, &error), &error);
    c->ms[snapshots ? ASYNC : SYNC][round] = now_ms() - began;
    if (snapshots) c->ms[STALL][round] = saver.stalled_ms;
    saver_close(&saver);
}

static double load_ms(Cost* c) {
    Json manifest;
    RunRecord saved;
    Error error;
    double began = now_ms();
    need(manifest_open(&manifest, &saved, c->checkpoint, &error), &error);
    need(checkpoint_load(&c->model, &manifest, c->checkpoint, false, &error), &error);
    json_free(&manifest);
    return now_ms() - began;
}

static double dd_ms(const char* from, const char* to, const char* how) {
    char command[3 * FILE_PATH_MAX];
    Error error;
    snprintf(command, sizeof command, "dd 'if=%s' 'of=%s' bs=4M %s 2>/dev/null", from, to, how);
    double began = now_ms();
    need(system(command) == 0 || fail(&error, "%s: dd failed; give a --dir that can be written", command), &error);
    return now_ms() - began;
}

// So that the next read comes from the disk. What the disk, or the host of a virtual machine, keeps for itself stays there.
static void drop(const char* path) {
    Error error;
    int file = open(path, O_RDONLY);
    need(file >= 0 || fail_file(&error, "open", path), &error);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
}

static double median(const Cost* c, Time time, size_t rounds) {
    double sorted[ROUNDS_MAX];
    memcpy(sorted, c->ms[time], rounds * sizeof(double));
    qsort(sorted, rounds, sizeof(double), compare_doubles);
    return sorted[rounds / 2];
}

int main(int argc, char** argv) {
    static Cost c;
    const char *name = "gpt2:124M", *directory = "build";
    uint64_t rounds = 5;
    Config config;
    Error error;
    int code;
    Flag flags[] = {
        {"model", FLAG_TEXT, &name, "NAME", 0, 0, "whose checkpoint, as of the trainer", false},
        {"dir", FLAG_TEXT, &directory, "DIR", 0, 0, "on the disk in question", false},
        {"rounds", FLAG_COUNT, &rounds, "N", 1, ROUNDS_MAX, "of which the medians are told", false},
    };
    if (!flags_begin(&code, "checkpoint_cost", NULL, flags, sizeof flags / sizeof flags[0], argc, argv)) return code;
    ModelOptions options = {.B = 1, .T = 64, .training = true, .optimizer = OPTIMIZER_ADAMW, .masters = true};
    memset(&config, 0, sizeof config);
    config.tied = true;
    need(config_preset(&config, name, &error) && config_complete(&config, &error), &error);
    need(model_create(&c.model, &config, options, &error) && model_randomize(&c.model, 1, &error), &error);
    c.run.config = config;
    c.run.masters = true;
    c.run.state = run_state_begin(false, 1);
    c.run.state.step = STEP;
    snprintf(c.out, sizeof c.out, "%.3900s/checkpoint_cost.out", directory);
    snprintf(c.copy, sizeof c.copy, "%s/copy", c.out);
    checkpoint_path(c.checkpoint, c.out, STEP, "");
    snprintf(c.file, sizeof c.file, "%s/" CHECKPOINT_FILE, c.checkpoint, (size_t)0);
    checkpoint_discard(c.out);
    need(directory_make(c.out, &error), &error);
    save(&c, false, 0);  // a file to copy
    for (size_t r = 0; r < rounds; r++) {
        dd_ms(c.file, "/dev/null", "");  // into the page cache
        c.ms[WRITE][r] = dd_ms(c.file, c.copy, "conv=fsync");
        unlink(c.copy);
        save(&c, false, r);
        save(&c, true, r);
        drop(c.file);
        c.ms[READ_COLD][r] = dd_ms(c.file, "/dev/null", "");
        drop(c.file);
        c.ms[LOAD_COLD][r] = load_ms(&c);
        c.ms[READ_WARM][r] = dd_ms(c.file, "/dev/null", "");
        c.ms[LOAD_WARM][r] = load_ms(&c);
    }
    checkpoint_discard(c.out);
    double bytes = (double)checkpoint_bytes(&c.model), m[TIMES];
    for (int t = 0; t < TIMES; t++) m[t] = median(&c, (Time)t, rounds);
    static const struct { const char* what; Time time, against; } rows[] = {
        {"dd, write and fsync", WRITE, TIMES}, {"synchronous save", SYNC, WRITE}, {"asynchronous save", ASYNC, WRITE},
        {"dd, read from the disk", READ_COLD, TIMES}, {"load from the disk", LOAD_COLD, READ_COLD},
        {"dd, read from the page cache", READ_WARM, TIMES}, {"load from the page cache", LOAD_WARM, READ_WARM},
    };
    printf("%s, %s: %.2f GB a checkpoint, medians of %llu rounds\n\n", name, FLOATX_NAME, 1e-9 * bytes, (unsigned long long)rounds);
    printf("  %-30s %8s %8s %16s\n", "", "ms", "GB/s", "of dd's rate");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double ms = m[rows[i].time];
        printf("  %-30s %8.0f %8.2f", rows[i].what, ms, 1e-6 * bytes / ms);
        if (rows[i].against < TIMES) printf(" %15.0f%%", 100 * m[rows[i].against] / ms);
        printf("\n");
    }
    printf("\n  training stands for %.0f ms in an asynchronous save: %.1f%% of a synchronous one\n", m[STALL], 100 * m[STALL] / m[SYNC]);
    model_free(&c.model);
    return 0;
}
