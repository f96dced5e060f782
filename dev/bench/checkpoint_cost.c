// checkpoint_cost.c: the time to save and load a model, compared with the speed of the disk.
//
//   cc -std=c11 -O3 -march=native -fopenmp -I. dev/bench/checkpoint_cost.c -o build/checkpoint_cost -lm -pthread
//   build/checkpoint_cost [--model gpt2:124M] [--dir build] [--rounds 5]
//
// A round does each of these seven, in a different order (a multiplication modulo 7):
//   write   dd of as many bytes, from the page cache, with fsync
//   sync    a save without a snapshot: training stops throughout
//   async   a save with a snapshot, while training continues: how long steps wait for it, and how much longer they take
//           in total than the same number of steps just before
//   read    dd of the checkpoint's file to /dev/null; load: of the checkpoint into the model; both after the file was
//           dropped from the page cache, and again with the file in it
// Before each write as many bytes are written and removed again: a virtual machine returns free memory to its host, and
// the first touch of the memory that it gets back is slower than most disks. Prints medians of the rounds. The
// table needs a machine, and a disk, without other users.

#include "llmtrain/checkpoint/record.h"
#include "llmtrain/run/presets.h"
#include "dev/test/harness.h"

typedef enum { WRITE, SYNC, ASYNC, READ_COLD, LOAD_COLD, READ_WARM, LOAD_WARM, STALL, LOST, TIMES } Time;
enum { B = 1, T = 64, STEPS_BEFORE = 3 };
#define ROUNDS_MAX 100

typedef struct {
    Model model;
    RunRecord run;        // of the newest checkpoint
    char out[FILE_PATH_MAX], checkpoint[FILE_PATH_MAX], file[FILE_PATH_MAX + 64];  // its directories and its one file
    char copy[FILE_PATH_MAX + 64];
    double ms[TIMES][ROUNDS_MAX];
} SaveCost;

static double dd_ms(const char* from, const char* to, const char* how) {
    char command[3 * FILE_PATH_MAX];
    snprintf(command, sizeof command, "dd 'if=%s' 'of=%s' bs=4M %s 2>/dev/null", from, to, how);
    double began = now_ms();
    need(system(command) == 0, "%s: dd failed; give a --dir that can be written", command);
    return now_ms() - began;
}

static void touch_memory(const SaveCost* c) {
    char how[64];
    snprintf(how, sizeof how, "count=%zu", checkpoint_bytes(&c->model.flat) >> 22);
    dd_ms("/dev/zero", c->copy, how);
    unlink(c->copy);
}

static double step_ms(SaveCost* c, Saver* saver) {
    static int32_t tokens[B * T], targets[B * T];
    StepFlags flags = {.stop = false};
    StepResult result;
    Error error;
    double began = now_ms();
    for (int i = 0; i < B * T; i++) tokens[i] = targets[i] = i;
    model_begin_step(&c->model, 1.0, 1);
    model_gradients(&c->model, tokens, targets, B, T);
    need(model_finish_step(&c->model, &result, flags, &error), "%s", error.text);
    saver_await_snapshot(saver);
    model_update(&c->model, ++c->run.state.updates, 1e-5, 1.0);
    return now_ms() - began;
}

static void save(SaveCost* c, bool snapshots, size_t round) {
    Saver saver;
    JsonWriter manifest;
    Error error;
    double before_ms = 0, during_ms = 0;
    size_t steps = 0;
    uint64_t before = c->run.state.step++;
    checkpoint_remove(c->out, before);
    checkpoint_path(c->checkpoint, c->out, c->run.state.step, "");
    snprintf(c->file, sizeof c->file, "%s/" CHECKPOINT_FILE, c->checkpoint, (size_t)0);
    need(saver_open(&saver, &c->model.flat, snapshots, 0, &error), "%s", error.text);
    if (snapshots) memset(saver.snapshot, 1, saver.bytes);  // only a run's first save meets new memory
    for (int i = 0; i < STEPS_BEFORE; i++) before_ms += step_ms(c, &saver) / STEPS_BEFORE;
    touch_memory(c);
    double began = now_ms();
    record_write(&manifest, &c->run, &c->model.flat);
    saver_begin(&saver, c->run.state.step, c->out, &manifest);
    for (; saver_state(&saver) == SAVER_WRITING; steps++) during_ms += step_ms(c, &saver);
    need(saver_end(&saver, &error), "%s", error.text);
    c->ms[snapshots ? ASYNC : SYNC][round] = now_ms() - began;
    if (snapshots) c->ms[STALL][round] = saver.stalled_ms;
    if (snapshots) c->ms[LOST][round] = during_ms - (double)steps * before_ms;
    saver_close(&saver);
}

static double load_ms(SaveCost* c) {
    RunRecord saved;
    Error error;
    double began = now_ms();
    need(model_load(&c->model, &saved, c->checkpoint, false, &error), "%s", error.text);
    return now_ms() - began;
}

static void measure(SaveCost* c, Time time, size_t round) {
    double* ms = &c->ms[time][round];
    if (time == SYNC || time == ASYNC) {
        save(c, time == ASYNC, round);
    } else if (time == WRITE) {
        touch_memory(c);
        *ms = dd_ms(c->file, c->copy, "conv=fsync");
        unlink(c->copy);
    } else {
        // Drops the file from the page cache, so that the next read comes from the disk, or reads it into the cache.
        // Caches of the disk itself, or of a virtual machine's host, are not dropped.
        dd_ms(c->file, "/dev/null", time == READ_COLD || time == LOAD_COLD ? "iflag=nocache count=0" : "");
        *ms = time == READ_COLD || time == READ_WARM ? dd_ms(c->file, "/dev/null", "") : load_ms(c);
    }
}

int main(int argc, char** argv) {
    static SaveCost c;
    const char *name = "gpt2:124M", *directory = "build";
    uint64_t rounds = 5;
    Config config;
    Error error;
    int code;
    harness_name = "checkpoint_cost";
    const Flag own[] = {
        {"model", KIND_TEXT, &name, "NAME", 0, 0, "a preset of the trainer", false},
        {"dir", KIND_TEXT, &directory, "DIR", 0, 0, "directory on the disk to measure", false},
        {"rounds", KIND_COUNT, &rounds, "N", 1, ROUNDS_MAX, "measurements of each time; medians are printed", false},
    };
    Flags flags = flags_of(own, sizeof own / sizeof own[0]);
    if (!flags_begin(&code, "checkpoint_cost", NULL, &flags, argc, argv)) return code;
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    memset(&config, 0, sizeof config);
    config.tied = true;
    need(config_preset(&config, name, &error) && config_complete(&config, &error), "%s", error.text);
    need(model_create(&c.model, &config, options, &error) && model_randomize(&c.model, 1, &error), "%s", error.text);
    c.run.config = config;
    c.run.optimizer = options.optimizer;
    c.run.state = run_state_begin(false, 1);
    snprintf(c.out, sizeof c.out, "%.3900s/checkpoint_cost.out", directory);
    snprintf(c.copy, sizeof c.copy, "%s/copy", c.out);
    checkpoint_discard(c.out);
    need(directory_make(c.out, &error), "%s", error.text);
    save(&c, false, 0);  // a file to copy and to load
    for (size_t r = 0; r < rounds; r++)
        for (size_t i = 0; i < STALL; i++) measure(&c, (Time)((r + i * (1 + r % (STALL - 1))) % STALL), r);
    checkpoint_discard(c.out);
    double bytes = (double)checkpoint_bytes(&c.model.flat), m[TIMES];
    for (int t = 0; t < TIMES; t++) {
        qsort(c.ms[t], rounds, sizeof(double), compare_doubles);
        m[t] = c.ms[t][rounds / 2];
    }
    static const struct { const char* what; Time dd; } rows[STALL] = {
        [WRITE] = {"dd, write and fsync", WRITE}, [SYNC] = {"synchronous save", WRITE},
        [ASYNC] = {"asynchronous save", WRITE}, [READ_COLD] = {"dd, read from the disk", READ_COLD},
        [LOAD_COLD] = {"load from the disk", READ_COLD}, [READ_WARM] = {"dd, read from the page cache", READ_WARM},
        [LOAD_WARM] = {"load from the page cache", READ_WARM},
    };
    printf("%s, %s: %.2f GB a checkpoint, medians of %llu rounds\n\n", name, FLOATX_NAME, 1e-9 * bytes,
           (unsigned long long)rounds);
    printf("  %-30s %8s %8s %16s\n", "", "ms", "GB/s", "of dd's rate");
    for (int t = 0; t < STALL; t++) {
        printf("  %-30s %8.0f %8.2f", rows[t].what, m[t], 1e-6 * bytes / m[t]);
        if ((int)rows[t].dd != t) printf(" %15.0f%%", 100 * m[rows[t].dd] / m[t]);
        printf("\n");
    }
    printf("\n  training stands for %.0f ms in an asynchronous save: %.1f%% of a synchronous one\n", m[STALL],
           100 * m[STALL] / m[SYNC]);
    printf("  and the steps under it take %.0f ms longer than as many without\n", m[LOST]);
    model_free(&c.model);
    return 0;
}
