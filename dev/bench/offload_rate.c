// offload_rate.c: how close training with --offload comes to the speed of the disk.
//
//   cc -std=c11 -O3 -march=native -fopenmp -I. dev/bench/offload_rate.c -o build/offload_rate -lm -pthread
//   build/offload_rate [--model gpt2:124M] [--dir build] [--offload optimizer] [--batch 1] [--seq 64] [--steps 8]
//
// Steps alternate with measurements of the disk alone: a loop of pread and pwrite of the same pieces, bypassing the
// page cache like the run, in a file of its own. With optimizer state each piece is read and written, in one thread and
// then with a thread per direction; with activations all offloaded pieces are written, then read back in reverse order.
// Prints medians over the steps after the first two, which write to new file blocks: of the update, of the whole step,
// and of the processor time of a step, which other programs do not lengthen; and the update and the step as multiples
// of the faster loop. Compile it with -DPRECISION_BF16 for states with master weights.

#include "llmtrain/run/presets.h"
#include "tools/predict.h"
#include "dev/test/harness.h"

enum { STEPS_MAX = 100, WARM = 2 };
typedef enum { STEP, UPDATE, DISK, DISK_AT_ONCE, PROCESSOR, TIMES } Time;

typedef struct {
    Offload alone;          // a store without threads: its file
    char* memory[2];        // (alone.largest) a piece to read, a piece to write
    double ms[TIMES][STEPS_MAX];
} Measured;

// A file with the pieces of another store.
static void alone_open(Measured* m, const Offload* store, const char* directory) {
    Error error;
    need(offload_plan(&m->alone, store->what, 1, store->planned, &error), "%s", error.text);
    for (size_t p = 0; p < store->planned; p++) offload_size(&m->alone, p, offload_bytes(store, p));
    need(path_copy(m->alone.directory, directory, &error) && offload_open_file(&m->alone, 0, &error), "%s", error.text);
    for (size_t i = 0; i < 2; i++) {
        m->memory[i] = (char*)device_allocate(m->alone.largest, NULL, &error);  // as the store's slots: large pages
        need(m->memory[i] != NULL, "%s", error.text);
    }
}

static void alone_move(Measured* m, size_t piece, bool writes) {
    Error error;
    Offload* o = &m->alone;
    need(offload_transfer(o, m->memory[writes], o->offsets[piece], offload_bytes(o, piece), writes, &error), "%s",
         error.text);
}

static double alone_ms(Measured* m, bool optimizer) {
    double began = now_ms();
    size_t count = m->alone.planned;
    for (size_t p = 0; p < count; p++) {
        if (optimizer) alone_move(m, p, false);
        alone_move(m, p, true);
    }
    for (size_t p = count; p-- > 0 && !optimizer;) alone_move(m, p, false);
    return now_ms() - began;
}

// The same, with all reads in one thread and all writes in another.
static double alone_at_once_ms(Measured* m) {
    double began = now_ms();
    #pragma omp parallel for num_threads(2) schedule(static, 1)
    for (int direction = 0; direction < 2; direction++)
        for (size_t p = 0; p < m->alone.planned; p++) alone_move(m, p, direction == 1);
    return now_ms() - began;
}

static void step(Measured* m, Model* model, const int32_t* tokens, size_t number) {
    StepFlags flags = {.stop = false};
    StepResult result;
    Error error;
    double began = now_ms(), processor = processor_ms();
    model_begin_step(model, 1.0, 1);
    model_gradients(model, tokens, tokens, model->options.B, model->options.T);
    need(model_finish_step(model, &result, flags, &error), "%s", error.text);
    double computed = now_ms();
    model_update(model, number + 1, 1e-5, 1.0);
    need(offload_flush(&model->flat.offloaded.store, &error) || !flat_offloads(&model->flat), "%s", error.text);
    m->ms[UPDATE][number] = now_ms() - computed;
    m->ms[STEP][number] = now_ms() - began;
    m->ms[PROCESSOR][number] = (processor_ms() - processor) / (double)threads_count();
}

static double median(double* values, size_t count) {
    qsort(values, count, sizeof(double), compare_doubles);
    return values[count / 2];
}

int main(int argc, char** argv) {
    static Measured m;
    const char *name, *directory;
    uint64_t steps, B, T, vocabulary;
    int offload, code;
    Config config;
    Error error;
    Model model;
    harness_name = "offload_rate";
    const Flag rows[] = {
        FLAG_TEXT("model", &name, "gpt2:124M", "NAME", 0, "a preset of the trainer"),
        FLAG_TEXT("dir", &directory, "build", "DIR", 0, "directory on the disk to measure"),
        FLAG_CHOICE("offload", &offload, OFFLOAD_OPTIMIZER, OFFLOAD_CHOICES, 0, "optimizer or activations"),
        FLAG_COUNT("batch", &B, 1, 1, 1 << 20, 0, "sequences per step"),
        FLAG_COUNT("seq", &T, 64, 1, 1 << 20, 0, "tokens per sequence"),
        FLAG_COUNT("vocab", &vocabulary, 0, 0, 1 << 20, 0, "vocabulary; 0: the preset's"),
        FLAG_COUNT("steps", &steps, 8, WARM + 1, STEPS_MAX, 0, "steps to run"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    if (!flags_begin(&code, "offload_rate", NULL, &flags, argc, argv)) return code;
    bool optimizer = offload == OFFLOAD_OPTIMIZER;
    need(optimizer || offload == OFFLOAD_ACTIVATIONS, "--offload is one of optimizer and activations");
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .offload = offload, .offload_dir = directory};
    memset(&config, 0, sizeof config);
    config.tied = true;
    need(config_preset(&config, name, &error), "%s", error.text);
    if (vocabulary) config.vocab = vocabulary;
    config.context = max_size(config.context, T);
    // Weights are zero: times do not depend on them.
    need(model_create(&model, &config, options, &error), "%s", error.text);
    const Offload* store = optimizer ? &model.flat.offloaded.store : &model.offloaded.store;
    need(store->planned > 0, "nothing is offloaded");
    alone_open(&m, store, directory);
    int32_t* tokens = (int32_t*)memory_allocate(B * T * sizeof(int32_t));
    need(tokens != NULL, "out of memory for a batch");
    for (size_t i = 0; i < B * T; i++) tokens[i] = (int32_t)(i % config.vocab);
    double bytes = 2e-9 * (double)offload_total(store);
    printf("%s, %s, B=%zu T=%zu, --offload %s: %.3f GB moved per step, %.3f GB of memory at most\n", name, FLOATX_NAME,
           (size_t)B, (size_t)T, store->what, bytes, 1e-9 * (double)model.memory.total);
    printf("  %4s %12s %12s %12s %12s %12s\n", "step", "disk alone", "at once", "update", "whole step", "processor");
    for (size_t s = 0; s < steps; s++) {
        m.ms[DISK][s] = alone_ms(&m, optimizer);
        m.ms[DISK_AT_ONCE][s] = optimizer ? alone_at_once_ms(&m) : m.ms[DISK][s];
        step(&m, &model, tokens, s);
        printf("  %4zu %9.0f ms %9.0f ms %9.0f ms %9.0f ms %9.0f ms\n", s + 1, m.ms[DISK][s], m.ms[DISK_AT_ONCE][s],
               m.ms[UPDATE][s], m.ms[STEP][s], m.ms[PROCESSOR][s]);
        fflush(stdout);
    }
    double ms[TIMES];
    for (int t = 0; t < TIMES; t++) ms[t] = median(m.ms[t] + WARM, steps - WARM);
    double fastest = fmin(ms[DISK], ms[DISK_AT_ONCE]);
    printf(
        "  medians: disk alone %.0f ms, at once %.0f ms (%.2f GB/s), update %.0f ms (%.2f x), step %.0f ms (%.2f x), "
        "of that %.0f ms of each processor\n",
        ms[DISK], ms[DISK_AT_ONCE], 1e3 * bytes / fastest, ms[UPDATE], ms[UPDATE] / fastest, ms[STEP],
        ms[STEP] / fastest, ms[PROCESSOR]);
    printf("  peak memory of the process: %.3f GB\n", 1e-9 * (double)memory_peak());
    OffloadCounts c = offload_counts((Offload*)store);
    printf("  the store's threads, with checksums: read at %.2f GB/s, wrote at %.2f GB/s\n",
           1e-6 * (double)c.read / c.read_ms, 1e-6 * (double)c.written / c.written_ms);
    close(m.alone.file);
    for (size_t i = 0; i < 2; i++) device_free(m.memory[i], m.alone.largest);
    free(m.alone.offsets);
    free(tokens);
    model_free(&model);
    return 0;
}
