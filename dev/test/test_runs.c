// test_runs.c: tests of whole runs: the trainer itself, called as a function. The file includes train.cu, with its main
// renamed, so that the tested code is the shipped code.
//
//   cc -std=c11 -O2 -ffp-contract=off -fopenmp -I. dev/test/test_runs.c -o build/test_runs -lm -ldl -pthread
//   build/test_runs [--runs | --files | --signals | --damage]      all parts, or one of them
//
//   --runs      the same bits twice, with 1 to 3 threads, and after a resume: each family, optimizer and schedule
//   --files     the log, the manifest, tiers, offloading, several ranks, resumes of odd sizes; times, losses, defaults
//   --signals   a signal stops a run, which saves; one process per directory; the events of runs
//   --damage    checkpoints truncated anywhere, or with any byte changed: refused or skipped, never used; pruning
//
// Runs are named a and b, in a directory of the test's own. Run it in the root of the checkout.

#define CADENCE_FIRST_MS 150.0  // of --ckpt-every auto, where it is a minute
#define main train_main
#include "train.cu"
#undef main

#include "data/shards.h"
#include "small_model.h"

enum { STEPS = 20 };  // of a small run

// Other work on the machine makes steps longer: what is measured is tried up to so many times.
enum { ATTEMPTS = 4 };

// Calls the program with the words of `line`, its output in the file "output"; returns its exit code.
static int train(const char* line) {
    Words w = {.count = 0};
    words_add(&w, "train");
    words_add(&w, line);
    fflush(stdout);
    fflush(stderr);
    int saved[2] = {dup(1), dup(2)}, file = open("output", O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(file, 1);
    dup2(file, 2);
    int code = train_main((int)w.count, w.words);
    fflush(stdout);
    fflush(stderr);
    dup2(saved[0], 1);
    dup2(saved[1], 2);
    close(saved[0]);
    close(saved[1]);
    close(file);
    return code;
}

// The same in a child, with a fault (fault.h) or without (""). OpenMP's threads do not survive a fork: the line says
// --threads 1.
static pid_t train_start(const char* fault, const char* line) {
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return child;
    setenv("LLMTRAIN_TEST_FAULT", fault, 1);
    fault_state()->read = false;
    _exit(train(line));
}

// Its exit code, or 128 plus the signal that ended it, as a shell shows it.
static int train_wait(pid_t child) {
    int status = -1;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int train_apart(const char* fault, const char* line) { return train_wait(train_start(fault, line)); }

static bool text_contains(const char* path, const char* words) {
    char* text = text_read(path, NULL);
    bool found = strstr(text, words) != NULL;
    free(text);
    return found;
}

static bool output_contains(const char* words) { return text_contains("output", words); }

// Hash of a file of the run; 0 if it cannot be read. For the log: without the members for time and memory.
static uint64_t run_hash(const char* run, const char* name) {
    const char* path = text_of("%s/%s", run, name);
    if (!file_exists(path)) return 0;
    size_t bytes;
    char* data = text_read(path, &bytes);
    Hash hash = hash_begin(0);
    if (strcmp(name, "metrics.jsonl") == 0) {
        for (char* line = strtok(data, "\n"); line; line = strtok(NULL, "\n")) {
            char* timing = strstr(line, "\"ms\"");
            hash_add(&hash, line, timing ? (size_t)(timing - line) : strlen(line));
        }
    } else {
        hash_add(&hash, data, bytes);
    }
    free(data);
    return hash_end(&hash);
}

// Runs a and b have the same checkpoint at `step`, manifest included, and the same log.
static bool runs_equal(int step) {
    const char* names[] = {text_of("step_%08d/rank_00000.safetensors", step), text_of("step_%08d/manifest.json", step),
                           "metrics.jsonl"};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (run_hash("a", names[i]) == 0 || run_hash("a", names[i]) != run_hash("b", names[i])) return false;
    return true;
}

static void runs_remove(void) {
    remove_tree("a");
    remove_tree("b");
}

#define FLOOR 2.625  // nats per token, of floor.bin: as its header says

static void write_shards(void) {
    Error error;
    ShardWriter writer;
    int32_t tokens[3000];
    for (int kind = 0; kind < 3; kind++) {
        const char* path = kind == 2 ? "floor.bin" : kind ? "val.bin" : "train.bin";
        random_tokens(tokens, 3000, 61, 20 + (uint64_t)kind);
        for (int i = 0; i < 3000; i++) if (i % 3) tokens[i] = (tokens[i - 1] * 7 + 1) % 61;  // something to learn
        need(shard_writer_open(&writer, path, 61, kind == 2 ? FLOOR : 0, &error) &&
                 shard_writer_add(&writer, tokens, 3000, &error) && shard_writer_finish(&writer, &error) &&
                 shard_publish(path, &error),
             "%s", error.text);
    }
}

// The flags of a small run, but for when it validates and saves.
static const char* small_run_at(const char* name, const char* more) {
    return text_of("--data train.bin --val val.bin --out %s --layers 2 --heads 4 --channels 40 --ffn 72 --seq 16 "
                   "--batch 3 --steps 20 --val-windows 20 --warmup 5 --lr 0.01 %s", name, more);
}

static const char* small_run(const char* name, const char* more) {
    return small_run_at(name, text_of("--val-every 7 --ckpt-every 10 %s", more));
}

// A run whose steps take no time, so that what is measured is what is waited for.
static const char* tiny_run(const char* more) {
    return text_of("--data train.bin --val val.bin --out a --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 "
                   "--steps 20 --val-windows 2 --threads 1 %s", more);
}

// The numbers of a member of the log, a line each; NAN for null. Returns how many lines there are.
static size_t log_numbers(double* numbers, size_t most, const char* run, const char* member) {
    const char* key = text_of("\"%s\": ", member);
    char* data = text_read(text_of("%s/metrics.jsonl", run), NULL);
    size_t count = 0;
    for (char* line = strtok(data, "\n"); line && count < most; line = strtok(NULL, "\n")) {
        const char* at = strstr(line, key);
        numbers[count++] = at && strncmp(at + strlen(key), "null", 4) != 0 ? strtod(at + strlen(key), NULL) : NAN;
    }
    free(data);
    return count;
}

// ------------------------------------------------------------------------------------------------
// Runs

// One kind of run: twice, with different numbers of threads, and resumed in the middle.
static void test_run_kind(const char* what, const char* flags) {
    runs_remove();
    bool ok = train(small_run("a", flags)) == 0 && train(small_run("b", flags)) == 0;
    check(ok && runs_equal(20), "%s: two runs are the same, weights, moments, state and log", what);
    for (int threads = 1; threads <= 3; threads++) {
        remove_tree("b");
        ok = train(small_run("b", text_of("%s --threads %d", flags, threads))) == 0;
        check(ok && runs_equal(20), "%s: %d thread%s: the same", what, threads, threads > 1 ? "s" : "");
    }
    // Simulates the loss of the second half: resuming from step 10 must write it again.
    remove_tree("b/step_00000020");
    ok = train(small_run("b", text_of("%s --resume", flags))) == 0 && output_contains("resumed from");
    check(ok && runs_equal(20), "%s: 10 steps, resumed for 10: the same", what);
}

// FP16 gradients that overflow on two ranks: the same steps are skipped as on one, with the same loss scales.
static void test_overflow_of_ranks(void) {
    const char* flags = "--loss-scale 16777216 --scale-growth 3 --total-batch 96";
    double skipped[2][STEPS], losses[2][STEPS], worst = 0;
    runs_remove();
    bool ok = train_apart("", small_run("a", text_of("--threads 1 %s --ranks 2", flags))) == 0;
    ok = ok && train(small_run("b", flags)) == 0;
    for (int run = 0; run < 2; run++) {
        ok = ok && log_numbers(skipped[run], STEPS, run ? "b" : "a", "skipped") == STEPS;
        ok = ok && log_numbers(losses[run], STEPS, run ? "b" : "a", "loss") == STEPS;
    }
    for (size_t i = 0; ok && i < STEPS; i++) worst = fmax(worst, fabs(losses[0][i] / losses[1][i] - 1));
    check(ok && skipped[0][0] == 1 && memcmp(skipped[0], skipped[1], sizeof skipped[0]) == 0,
          "overflows on two ranks: the steps of one rank are skipped");
    check_bound(ok ? worst : NAN, bound_of(1e-5, 2), "overflows on two ranks: the losses of one rank");
}

// FP16: a resumed run takes the checkpoint's loss scale, even if that has fallen to 1.
static void test_resumed_loss_scale(void) {
    const char* weights = "step_00000020/rank_00000.safetensors";
    remove_tree("a");
    bool ok = train(small_run("a", "--loss-scale 1 --scale-growth 1000")) == 0;
    uint64_t hash = run_hash("a", weights);
    remove_tree("a/step_00000020");
    ok = ok && train(small_run("a", "--loss-scale 65536 --scale-growth 1000 --resume")) == 0;
    check(ok && hash != 0 && hash == run_hash("a", weights), "a loss scale of 1 is resumed");
}

static void test_runs(void) {
    const char* log = "a/metrics.jsonl";
    test_run_kind("gpt2", "");
    test_run_kind("llama, grouped queries, untied, dropout", "--family llama --kv-heads 2 --tied off --dropout 0.1");
    test_run_kind("accumulation and skipped steps",
                  "--total-batch 144 --spike-skip 1.02 --spike-warmup 2 --spike-sigma 1");
    check(text_contains(log, "\"skipped\": 1,") && text_contains(log, "\"skipped\": 2,"), "that run did skip steps");
    test_run_kind("lion, wsd", "--optimizer lion --schedule wsd");
    test_run_kind("momentum", "--optimizer momentum");
    test_run_kind("sgd, no masters", "--optimizer sgd --masters off");
    if (FLOATX_DTYPE != DTYPE_F16) return;
    test_run_kind("a loss scale that overflows at first", "--loss-scale 16777216 --scale-growth 3");
    check(text_contains(log, "\"skipped\": 1,") && !text_contains(log, "\"skipped\": 15,"),
          "that run did overflow, and went on");
    test_overflow_of_ranks();
    test_resumed_loss_scale();
}

// ------------------------------------------------------------------------------------------------
// Files

// A checkpoint whose snapshot takes longer than the next step must still hold a single step.
static void test_slow_snapshot(void) {
    runs_remove();
    double began = now_ms();
    int slow = train_apart("rank 0 step 1 at copy do delay 100", small_run("a", "--threads 1"));
    double ms = now_ms() - began;
    check(slow == 0 && ms > 200 && train(small_run("b", "")) == 0 && runs_equal(10) && runs_equal(20),
          "a slow snapshot: the checkpoint is of one step");
}

// A mixture: the log has the shares of the samples so far, which do not depend on the ranks, on a resume or on going
// back; with other weights it would be another run.
static void test_mixture(void) {
    enum { SAMPLES = 6 };
    const char* more = "--layers 1 --heads 2 --channels 8 --seq 16 --warmup 0 --lr 0.01 --schedule constant "
                       "--ckpt-every 4 --out";
    const char* begins = "--data train.bin:3,val.bin:1";
    double found[2] = {0}, loss[2][STEPS], worst = 0;
    Dataset data;
    Error error;
    runs_remove();
    bool ok = train(text_of("%s %s a --batch %d --steps 12", begins, more, SAMPLES)) == 0 &&
              output_contains("data: 75% of the samples from train.bin, 3000 tokens\ndata: 25% of the samples from "
                              "val.bin, 3000 tokens\n");
    ok = ok && train_apart("", text_of("%s %s b --batch %d --ranks 2 --steps 7", begins, more, SAMPLES / 2)) == 0;
    remove_tree("b/step_00000007");  // as after a kill
    ok = ok && train_apart("", text_of("%s %s b --batch %d --ranks 2 --steps 12 --resume", begins, more,
                                       SAMPLES / 2)) == 0;
    need(dataset_open(&data, "train.bin:3,val.bin:1", &error), "%s", error.text);
    char* logs[2] = {text_read("a/metrics.jsonl", NULL), text_read("b/metrics.jsonl", NULL)};
    const char* at[2] = {logs[0], logs[1]};
    for (uint64_t step = 0; ok && step < 12; step++) {
        for (uint64_t i = 0; i < SAMPLES; i++) found[dataset_sample(&data, 1337, step * SAMPLES + i, 16).shard]++;
        for (int run = 0; run < 2 && ok; run++) {
            double shares[2] = {NAN, NAN}, n = (double)((step + 1) * SAMPLES);
            ok = (at[run] = strstr(at[run], "\"shares\": [")) != NULL &&
                 sscanf(at[run]++, "\"shares\": [%lf, %lf]}", &shares[0], &shares[1]) == 2 &&
                 fabs(shares[0] - found[0] / n) < 1e-12 && fabs(shares[1] - found[1] / n) < 1e-12;
        }
    }
    check(ok && found[0] + found[1] == 12 * SAMPLES && found[1] > 5, "a mixture: the log's shares, 1 rank, and 2 that "
          "resume: %g and %g samples", found[0], found[1]);
    for (int run = 0; run < 2; run++) ok = ok && log_numbers(loss[run], STEPS, run ? "b" : "a", "loss") == 12;
    for (int i = 0; i < 12; i++) worst = fmax(worst, fabs(loss[1][i] / loss[0][i] - 1));
    check_bound(ok ? worst : NAN, bound_of(1e-5, 1), "a mixture: the losses of 1 and 2 ranks");
    check(train(text_of("--data train.bin:2,val.bin:1 %s a --batch %d --steps 14 --resume", more, SAMPLES)) == 2 &&
              output_contains("other data than --data"), "a mixture: a resume with other weights is refused");
    for (int run = 0; run < 2; run++) free(logs[run]);
    dataset_close(&data);
}

// Checks the log of a run with known flags.
static void test_log(void) {
    static const char* const names[] = {"step", "val_loss", "tokens", "lr", "mfu", "ms", "skipped", "tok_per_s"};
    double n[8][STEPS + 1], *steps = n[0], *val = n[1], *tokens = n[2], *lr = n[3], *mfu = n[4], *ms = n[5], error = 0;
    bool counts = true, validates = true;
    size_t lines = 0;
    remove_tree("a");
    double began = now_ms();
    int code = train(small_run("a", "--peak-tflops 0.001"));
    double took = now_ms() - began;
    for (int i = 0; i < 8; i++) lines = log_numbers(n[i], STEPS + 1, "a", names[i]);
    for (size_t i = 0; i < lines && i < STEPS; i++) {
        // A warm-up of 5 steps to 0.01, then a cosine to a tenth of it at step 20.
        double x = i < 5 ? 0 : (double)(i - 5) / 14;
        double cosine = 0.01 * (0.1 + 0.9 * 0.5 * (1 + cos(3.14159265358979 * x)));
        counts = counts && steps[i] == (double)(i + 1) && tokens[i] == (double)(i + 1) * 3 * 16 && n[6][i] == 0;
        validates = validates && isfinite(val[i]) == (i + 1 == 7 || i + 1 == 14 || i + 1 == 20);
        error = fmax(error, fabs(lr[i] / (i < 5 ? 0.01 * (double)(i + 1) / 5 : cosine) - 1));
        // 6 operations for each of 27704 weights, and 6 x 2 x 16 x 40 of attention; 48 tokens, 1e9 operations a second.
        double flops = 6 * 27704 + 6 * 2 * 16 * 40;
        error = fmax(error, fabs(mfu[i] / (flops * 48 / (ms[i] * 1e-3 * 1e9)) - 1));
        error = fmax(error, fabs(n[7][i] / (48 / (ms[i] * 1e-3)) - 1));
    }
    check(code == 0 && lines == STEPS && counts, "log: a line for each step, with its number and the tokens so far");
    check(validates, "log: --val-every 7 validates after steps 7, 14 and the last");
    check(output_contains("\nprecision " FLOATX_NAME ", matmuls by ") && output_contains(": 28344 parameters\n") &&
              output_contains(", MFU against 0.001 TFLOP/s (--peak-tflops)\n"),
          "the start prints the parameters, the precision and the peak");
    // After k steps 20 - k are left, as long as the steps so far, which took less than the whole run.
    char *output = text_read("output", NULL), *line = output;
    for (unsigned long long k; (line = strstr(line, "\nstep ")) != NULL; line++) {
        const char *end = strstr(line, " min left\n"), *last = end;
        while (last && last > line && last[-1] != ' ') last--;
        if (!expect(last && sscanf(line, " step %llu/20 |", &k) == 1 && k > 0, "the line: %.200s", line)) continue;
        double most = took / 6e4 * (double)(STEPS - k) / (double)k, left = strtod(last, NULL);
        expect(left >= 0 && left <= most + 0.051, "after step %llu: %g min left, at most %g", k, left, most);
    }
    free(output);
    verdict("the time left, by the steps so far");
    double memory[STEPS], peak = (double)memory_peak();
    log_numbers(memory, STEPS, "a", "mem_bytes");
    check(memory[0] > peak / 2 && memory[0] <= memory[STEPS - 1] && memory[STEPS - 1] <= 1.1 * peak,
          "log: mem_bytes, %.0f, of the %.0f that the process has needed", memory[STEPS - 1], peak);
    check_bound(error, 1e-6, "log: learning rate, tokens per second and mfu");

    // A manifest has the flags that change the result, and a resume reports those that differ.
    static const struct { const char* member; bool there; } flags[] = {
        {"\"lr\": \"0.01\"", true}, {"\"warmup\": \"5\"", true}, {"\"batch\": \"3\"", true},
        {"\"steps\": \"20\"", true}, {"\"weight-decay\": \"0.1\"", true}, {"\"beta2\": \"0.95\"", true},
        {"\"clip\": \"1\"", true}, {"\"out\": ", false}, {"\"threads\": ", false}, {"\"val-every\": ", false},
        {"\"ckpt-every\": ", false}};
    for (size_t i = 0; i < COUNT_OF(flags); i++)
        counts = counts && flags[i].there == text_contains("a/step_00000020/manifest.json", flags[i].member);
    check(counts, "manifest: the flags that change what a run computes, and no others");
    remove_tree("a/step_00000020");
    remove_tree("b");
    code = train(small_run("a", "--weight-decay 0.2 --resume"));
    check(code == 0 && output_contains("note: --weight-decay was '0.1' in that run and is '0.2' now") &&
              !output_contains("note: --lr"),
          "a resume reports the flags that differ, and no others");

    code = train(small_run("b", "--log-every 3"));
    lines = log_numbers(steps, STEPS + 1, "b", "step");
    const double logged[] = {3, 6, 7, 9, 12, 14, 15, 18, 20};
    check(code == 0 && lines == 9 && memcmp(steps, logged, sizeof logged) == 0,
          "log: --log-every 3 has every third step, validations and the last");

    remove_tree("b");
    code = train("--data train.bin --out b --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 --steps 5 "
                 "--log-every 3");
    lines = log_numbers(steps, STEPS + 1, "b", "step");
    check(code == 0 && lines == 2 && steps[0] == 3 && steps[1] == 5,
          "log: --log-every 3 of 5 steps without validation has the third and the last");
}

// A run has diverged when --diverged-after consecutive steps were skipped, however many were skipped in all.
static void test_divergence(void) {
    const char* skipping = "--clip 0 --spike-skip 1.02 --spike-warmup 2 --total-batch 144";
    double skipped[STEPS + 1];
    runs_remove();
    bool ok = train(small_run("a", skipping)) == 0 && log_numbers(skipped, STEPS + 1, "a", "skipped") == STEPS;
    size_t most = 0, consecutive = 0;
    for (size_t i = 0; ok && i < STEPS; i++) {
        consecutive = skipped[i] > (i ? skipped[i - 1] : 0) ? consecutive + 1 : 0;
        most = max_size(most, consecutive);
    }
    check(ok && most > 0 && skipped[STEPS - 1] > most, "some steps are skipped, not all of them consecutive");
    ok = train(small_run("b", text_of("%s --diverged-after %zu", skipping, most + 1))) == 0;
    check(ok && run_hash("a", "metrics.jsonl") == run_hash("b", "metrics.jsonl"),
          "skipped steps that are not consecutive are no divergence");
    remove_tree("b");
    ok = train(small_run("b", text_of("%s --diverged-after %zu", skipping, most))) == 1;
    check(ok && output_contains("steps were skipped"), "as many consecutive ones as --diverged-after are");
}

// A line torn by a power cut is removed from the log when the run is resumed, and so is one with a wrong step; the user
// is told.
static void test_torn_log(void) {
    double steps[STEPS + 1];
    bool right = true;
    remove_tree("a");
    need(train(small_run("a", "")) == 0, "the run whose log is to be torn failed");
    size_t bytes, lines;
    char* text = text_read("a/metrics.jsonl", &bytes);
    memcpy(strstr(text, "\"step\": 8,"), "\"step\":88,", 10);
    memset(strstr(text, "\"step\": 5,") + 20, 0, 40);
    put_bytes("a/metrics.jsonl", text, bytes);
    free(text);
    remove_tree("a/step_00000020");
    bool ok = train(small_run("a", "--resume")) == 0 && output_contains("removed 2 damaged lines");
    lines = log_numbers(steps, STEPS + 1, "a", "step");
    for (size_t i = 0; i < lines; i++) right = right && steps[i] == (double)(i < 4 ? i + 1 : i < 6 ? i + 2 : i + 3);
    check(ok && lines == STEPS - 2 && right,
          "a torn line of the log is removed, and one of a wrong step, and reported");

    // The same for the last line, unless it is of a step after the checkpoint's.
    for (int later = 0; later < 2; later++) {
        text = text_read("a/metrics.jsonl", &bytes);
        put_bytes("a/metrics.jsonl", text, bytes - 30);
        free(text);
        if (later) remove_tree("a/step_00000020");
        ok = train(small_run("a", "--resume")) == 0;
        check(ok && output_contains("removed 1 damaged line") == !later, "a last line that is cut: %s",
              later ? "its step is done again" : "reported");
    }
}

// Of a validation text whose entropy is known the console has it, and by how much of it the loss is above or below.
static void test_floor(void) {
    double val[STEPS], printed[3];
    remove_tree("a");
    bool ok = train("--data train.bin --val floor.bin --out a --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 "
                    "--steps 20 --val-windows 2 --val-every 7 --lr 0.05 --warmup 0 --threads 1") == 0;
    ok = ok && log_numbers(val, STEPS, "a", "val_loss") == STEPS;
    char *output = text_read("output", NULL), *at = output;
    for (int step = 7; ok && step <= 21; step += 7) {
        double loss = val[step < STEPS ? step - 1 : STEPS - 1];
        at = strstr(at, " | val ");
        if (!expect(at && sscanf(at, " | val %lf (floor %lf %lf%%)", &printed[0], &printed[1], &printed[2]) == 3,
                    "no floor after step %d: %.200s", step, at ? at : "")) break;
        at++;
        expect(fabs(printed[0] - loss) <= 5.1e-5 && printed[1] == FLOOR &&
                   fabs(printed[2] - (loss / FLOOR * 100 - 100)) <= 0.051,
               "a loss of %g, printed as %g, a floor of %g, printed as %g, %+g%%", loss, printed[0], FLOOR, printed[1],
               printed[2]);
    }
    free(output);
    verdict("the validation loss, its floor, and by how much of it the loss is above");
}

// The log of one or two ranks, with one or several micro-batches: the losses of all ranks, the tokens of all, and the
// share of a rank's own peak that it reaches, which is as much with two ranks as with one. Of a token's operations a
// frozen weight saves the 2 of its gradient, and one of a block without a backward 4, as attention does there.
static void test_log_of_ranks(void) {
    static const char* const names[] = {
        "loss", "loss_ranks_min", "loss_ranks_median", "loss_ranks_max", "ms", "tok_per_s", "tokens", "mfu"};
    enum { ALL = 27704, HEAD = 61 * 40, BLOCK = 4 * 40 * 40 + 2 * 40 * 72, ATTENTION = 2 * 16 * 40 };
    static const struct { int ranks, micro_batches; const char* flags; double flops; } cases[] = {
        {2, 1, "", 6 * ALL + 6 * ATTENTION}, {2, 3, "", 6 * ALL + 6 * ATTENTION}, {1, 2, "", 6 * ALL + 6 * ATTENTION},
        {1, 1, "--train block.0.*", 6 * ALL - 2 * (HEAD + BLOCK) + 6 * ATTENTION},
        {2, 1, "--train block.1.*,position_embedding", 6 * ALL - 2 * (HEAD + BLOCK) + 6 * ATTENTION},
        {2, 1, "--train block.1.*", 6 * ALL - 2 * HEAD - 4 * BLOCK + 4 * ATTENTION},
        {1, 1, "--train final_norm*", 6 * ALL - 2 * HEAD - 8 * BLOCK + 2 * ATTENTION},
        // Without biases, with a third matrix of the feed-forward and a head of its own.
        {1, 1, "--family llama --tied off", 6 * (HEAD + 2 * (BLOCK + 40 * 72 + 80) + 40) + 6 * ATTENTION}};
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        int ranks = cases[k].ranks, micro = cases[k].micro_batches, tokens = ranks * micro * 48;
        double n[8][STEPS], error = 0;
        bool sorted = true;
        remove_tree("a");
        bool ok = train_apart("", small_run("a", text_of("--threads 1 --ranks %d --total-batch %d --peak-tflops 0.002 "
                                                         "%s", ranks, tokens, cases[k].flags))) == 0;
        for (int i = 0; i < 8; i++) ok = ok && log_numbers(n[i], STEPS, "a", names[i]) == STEPS;
        for (size_t i = 0; ok && i < STEPS; i++) {
            double seconds = n[4][i] * 1e-3;
            sorted = sorted && (n[1][i] < n[3][i]) == (ranks > 1) && n[2][i] == n[1][i];
            sorted = sorted && n[6][i] == (double)(i + 1) * tokens;
            error = fmax(error, fabs(n[0][i] / (0.5 * (n[1][i] + n[3][i])) - 1));
            error = fmax(error, fabs(n[5][i] / (tokens / seconds) - 1));
            error = fmax(error, fabs(n[7][i] / (cases[k].flops * micro * 48 / (seconds * 2e9)) - 1));
        }
        check(ok && sorted, "log, %d ranks, %d micro-batches %s: smallest and largest loss, the tokens of all", ranks,
              micro, cases[k].flags);
        check_bound(ok ? error : NAN, 1e-6, "log, %d ranks, %d micro-batches %s: mean loss, tokens per second, mfu",
                    ranks, micro, cases[k].flags);
    }
}

// --ckpt-every auto prints what the first save has cost: the delay of the one step that waits for its snapshot, without
// the other steps, which are slow too; or, of a save that is not asynchronous, its own. How long training was stalled
// is said without what was written in the background.
static void test_cost_of_saves(void) {
    static const struct { const char *flags, *point; double cost, took, stalled, background; } cases[] = {
        {"--ckpt-async on", "copy", 50, 95, 40, 0}, {"--ckpt-async on", "flush", 1, 95, 0, 60},
        {"--ckpt-async off", "save", 50, 0, 0, 0}, {"--ckpt-async off", "flush", 50, 95, 95, 0},
        {"--ckpt-async off", "checksums", 50, 95, 0, 0}};
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        double cost = NAN, minutes = NAN, took = NAN, stalled = NAN;
        bool good = false;
        for (int attempt = 0; attempt < ATTEMPTS && !good; attempt++) {
            cost = minutes = took = stalled = NAN;
            remove_tree("a");
            good = train_apart(text_of("rank 0 step 1 at load do delay 20; rank 0 step 1 at %s do delay 100",
                                       cases[k].point),
                               tiny_run(text_of("--ckpt-every auto %s", cases[k].flags))) == 0;
            char* text = text_read("output", NULL);
            const char *said = strstr(text, "next checkpoint in "), *saved = strstr(text, "saved a/step_");
            if (said) sscanf(said, "next checkpoint in %lf min: a save costs %lf ms", &minutes, &cost);
            if (saved) sscanf(saved, "%*s %*s in %lf ms, of which training was stalled for %lf", &took, &stalled);
            good = good && cost >= cases[k].cost && cost < 1500 && took >= cases[k].took &&
                   stalled >= cases[k].stalled && took - stalled >= cases[k].background;
            free(text);
        }
        check(good, "%s, a delay of 100 ms at %s: a save is said to cost %.0f ms, to take %.0f, and to stall training "
              "for %.0f", cases[k].flags, cases[k].point, cost, took, stalled);
        double due = sqrt(2 * cost * 24 * 3.6e6) / 6e4, rounded = sqrt(2 * fabs(cost - 0.5) * 24 * 3.6e6) / 6e4;
        check_bound(fabs(minutes - due), 0.06 + due - rounded, "and the next is due after %.1f min", minutes);
    }
}

// A rank's own time has its delay of 40 ms in each step; for the other rank, and for it alone, that is a wait.
static void test_times(void) {
    static const char* const names[] = {"ms", "ms_ranks_min", "ms_ranks_max", "wait_share", "slowest_rank"};
    static const struct { int ranks, victim; } cases[] = {{1, 0}, {2, 0}, {2, 1}};
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        double n[5][STEPS], *ms = n[0], *low = n[1], *high = n[2], *share = n[3], all = 0, waits = 0, least = 0;
        int ranks = cases[k].ranks, victim = cases[k].victim, named = 0;
        bool good = false;
        for (int attempt = 0; attempt < ATTEMPTS && !good; attempt++) {
            remove_tree("a");
            good = train_apart(text_of("rank %d step 1 at load do delay 40", victim),
                               tiny_run(text_of("--ranks %d", ranks))) == 0;
            for (int i = 0; i < 5; i++) good = good && log_numbers(n[i], STEPS, "a", names[i]) == STEPS;
            all = waits = named = 0;
            least = INFINITY;
            for (size_t t = 0; good && t < STEPS; t++) {
                double waited = share[t] / (1 - share[t]) * (victim ? low[t] : high[t]);  // of rank 0
                all += ms[t];
                waits += waited;
                least = fmin(least, waited);
                named += n[4][t] == victim;
                good = high[t] >= 39.9 && (ranks == 1 ? low[t] == high[t] && share[t] < 1e-3 : low[t] < high[t]);
            }
            good = good && named > STEPS * 3 / 4 && (victim ? waits > 0.5 * all && waits > 30 * STEPS : least < 15);
        }
        check(good, "%d rank%s, rank %d is 40 ms late: it is the slowest in %d steps; rank 0 waits %.0f of %.0f ms",
              ranks, ranks > 1 ? "s" : "", victim, named, waits, all);
    }
}

// What a rank does in a pause, a validation or a save, belongs to no step: neither to its own time, of which it would
// be a straggler, nor, as a wait, to those of the ranks that wait for it meanwhile, whose own time would shrink.
static void test_pauses(void) {
    static const char* const names[] = {"ms", "ms_ranks_min", "ms_ranks_median", "ms_ranks_max"};
    static const struct { const char *point, *flags; } cases[] = {
        {"validate", "--val-every 3 --ckpt-every 100"}, {"save", "--val-every 100 --ckpt-every 3 --ckpt-async off"}};
    for (size_t k = 0; k < COUNT_OF(cases); k++)
        for (int victim = 0; victim < 2; victim++) {
            double n[4][STEPS], least[4][2];  // of steps after a pause, and of others
            bool good = false;
            for (size_t i = 0; i < 8; i++) least[i / 2][i % 2] = INFINITY;
            for (int attempt = 0; attempt < ATTEMPTS && !good; attempt++) {
                remove_tree("a");
                good = train_apart(text_of("rank %d step 1 at %s do delay 50", victim, cases[k].point),
                                   tiny_run(text_of("--ranks 2 %s", cases[k].flags))) == 0;
                for (int i = 0; i < 4; i++) good = good && log_numbers(n[i], STEPS, "a", names[i]) == STEPS;
                expect(good, "the run with a delay at %s of rank %d", cases[k].point, victim);
                for (size_t t = 1; good && t < STEPS; t++)
                    for (int i = 0; i < 4; i++) least[i][t % 3 != 0] = fmin(least[i][t % 3 != 0], n[i][t]);
                for (int i = 0; i < 4; i++) good = good && fabs(least[i][0] - least[i][1]) < 25 && least[i][0] > -1;
            }
            for (int i = 0; i < 4; i++)
                expect(good, "delays of 50 ms of rank %d at %s: %s is at least %g after pauses, otherwise %g", victim,
                       cases[k].point, names[i], least[i][0], least[i][1]);
        }
    verdict("pauses: neither the delayed rank's nor the waiting one's next step has another time");
}

// A tier's checkpoints belong to one run: a resume takes the newest of its own, also after one that was refused, and
// none that the run has left behind, or of an earlier run in the same --out.
static void test_tier(void) {
    const char *kill_13 = "rank 0 step 13 at load do kill", *kill_18 = "rank 0 step 18 at load do kill";
    runs_remove();
    need(train(small_run("b", "")) == 0, "the run to compare with failed");
    const char *tier = "--threads 1 --ckpt-async off --ckpt-tier ./tier:5", *left = "--ckpt-tier does not name them";
    bool killed = train_apart(kill_18, small_run("a", tier)) != 0;
    check(killed && train(small_run("a", "--resume --ckpt-tier ./tier:7:1")) == 0 &&
              output_contains("step_00000015 in") && runs_equal(20),
          "a tier's checkpoint is resumed");

    remove_tree("a");
    killed = train_apart(kill_18, small_run("a", tier)) != 0;
    bool refused = train(small_run("a", "--resume --seed 1")) == 2 && output_contains(left);
    check(killed && refused && train(small_run("a", "--resume --ckpt-tier ./tier:5")) == 0 &&
              output_contains("step_00000015 in") && runs_equal(20),
          "also after a resume without the tier that was refused");

    remove_tree("a");
    killed = train_apart(kill_18, small_run("a", tier)) != 0;
    killed = train_apart(kill_13, small_run("a", "--threads 1 --resume")) != 0 && killed && output_contains(left);
    check(killed && train(small_run("a", "--resume --ckpt-tier ./tier:5")) == 0 &&
              output_contains("step_00000010 in") && runs_equal(20),
          "but not once the run has gone on without the tier");

    remove_tree("a");
    killed = train_apart(kill_18, small_run("a", text_of("%s --clip 0.1", tier))) != 0;
    need(system("rm -rf a/step_* a/*.jsonl") == 0, "what a run leaves but its list of tiers is removed");
    killed = train_apart(kill_13, small_run("a", "--threads 1 --ckpt-async off")) != 0 && killed;
    check(killed && train(small_run("a", "--resume --ckpt-async off --ckpt-tier ./tier:5")) == 0 &&
              output_contains("step_00000010 in") && runs_equal(20),
          "that of an earlier run in the same --out is not");
}

// Two ranks with slow collectives must compute what one rank does: the same samples, dropout masks, averages and
// validation; no parameter is used before it has been gathered. They send what --plan predicts.
static void test_two_ranks(void) {
    static const char* const names[] = {"loss", "grad_norm", "val_loss", "tokens", "comm_bytes"};
    const char* flags = "--total-batch 192 --dropout 0.1 --reduce exact";
    double n[2][5][STEPS], worst = 0, planned = 0, sent = 0;
    runs_remove();
    bool ok = train_apart("rank 1 step 1 at collective do delay 2",
                          small_run("a", text_of("--threads 1 %s --ranks 2 --zero 1", flags))) == 0;
    ok = ok && train(small_run("b", flags)) == 0;
    for (int i = 0; ok && i < 10; i++)
        ok = log_numbers(n[i / 5][i % 5], STEPS, i / 5 ? "b" : "a", names[i % 5]) == STEPS;
    for (size_t i = 0; ok && i < STEPS; i++) {
        for (int k = 0; k < 4; k++) {
            double of_one = n[1][k][i], error_of_two = fabs(n[0][k][i] / of_one - 1);
            if (!isnan(of_one)) worst = error_of_two <= worst ? worst : error_of_two;
            ok = ok && isnan(of_one) == isnan(error_of_two);
        }
        sent += n[0][4][i] / (int)STEPS;
    }
    check_bound(ok ? worst : NAN, 1e-9, "two ranks: loss, norm, validation and tokens of one rank");

    ok = train(small_run("nothing", "--plan --ranks 2 --zero 1 --total-batch 192 --memory 1")) == 0;
    char* text = text_read("output", NULL);
    const char* row = strstr(text, "\n  sent per step ");
    if (row) sscanf(row, " sent per step %lf", &planned);
    // Rounded to 0.01; of the twenty steps' gathers, of 0.055 MB, those before validations and saves end outside steps.
    check_bound(fabs(planned - 1e-6 * sent), 0.005 + 5 * 0.055 / 20, "--plan: MB sent per step of two ranks");
    ok = train(small_run("nothing", "--recompute auto --memory 0.001")) == 2;
    check(ok && output_contains("the run needs 0.") && output_contains("--memory larger"),
          "--recompute auto: a budget that nothing fits is refused, with what the run needs");
    check(ok && strstr(text, "GB in all, within --memory 1\n") != NULL, "--plan --memory: whether it fits");
    free(text);
}

// Offloading changes no bit, for any optimizer, ZeRO stage and number of ranks; a run that offloads can resume one that
// does not, and vice versa.
static void test_offload(void) {
    static const char* const kinds[] = {"optimizer", "optimizer,activations", "activations"};
    for (int kind = 0; kind < OPTIMIZER_COUNT + 3; kind++) {
        int ranks = 1 + kind % 3, zero = kind % 3;
        const char *optimizer = OPTIMIZERS[kind % OPTIMIZER_COUNT].name;
        const char *offload = kinds[kind < OPTIMIZER_COUNT ? kind % 2 : 2];
        const char* family = kind % 2 ? "--family llama --kv-heads 2 --tied off" : "";
        bool same = true, resumed = true;
        for (int i = 0; i < (device_is_host() ? 2 : 3); i++) {     // nothing; to a file; to host memory
            for (int part = 0; part < (i == 0 ? 1 : 2); part++) {  // all steps; again the last ones, offloaded or not
                const char* run = i == 0 ? "a" : "b";
                const char* away = text_of("--offload %s%s", offload, i == 1 ? " --offload-dir ." : "");
                if (i == 0 || (part && kind % 2)) away = "";
                remove_tree(part ? text_of("%s/step_00000004", run) : run);
                bool good = train_apart("", text_of(
                    "--data train.bin --out %s --layers 4 --heads 4 --channels 48 --seq 8 --batch 1 --total-batch 48 "
                    "--steps 4 --ckpt-every 2 --lr 0.01 --optimizer %s --reduce exact --threads 1 --masters %s "
                    "--ranks %d --zero %d %s %s %s", run, optimizer, kind % 4 == 3 ? "off" : "on", ranks, zero, family,
                    away, part ? "--resume" : "")) == 0;
                good = good && (i == 0 || runs_equal(4));
                if (part) resumed = resumed && good;
                else same = same && good;
            }
        }
        check(same, "--offload %s, %s, %d rank%s, --zero %d: the same bits", offload, optimizer, ranks,
              ranks > 1 ? "s" : "", zero);
        check(resumed, "--offload %s, %s, %d rank%s, --zero %d: resumed to the same bits", offload, optimizer, ranks,
              ranks > 1 ? "s" : "", zero);
    }
}

// A disk that fails under --offload, or returns other bytes than were written, ends the run with a message; the last
// checkpoint is there, and can be resumed.
static void test_offload_fails(void) {
    static const char* const kinds[][2] = {{"optimizer", "optimizer state"}, {"activations", "activations"}};
    static const char* const actions[] = {"write", "read", "damage"};
    static const char flags[] = "--data train.bin --layers 4 --heads 2 --channels 16 --seq 8 --batch 2 --steps 6 "
                                "--ckpt-every 3 --lr 0.01 --threads 1";
    remove_tree("b");
    bool whole = train_apart("", text_of("%s --out b", flags)) == 0;
    for (int i = 0; i < 6; i++) {
        const char *const *kind = kinds[i % 2], *action = actions[i / 2];
        const char* fault = text_of("rank 0 step 5 at offload_%s do flip", action);
        char said[400];
        if (i < 4) snprintf(said, sizeof said, "cannot %s the %s (--offload) in", action, kind[1]);
        else snprintf(said, sizeof said, "the %s (--offload) in . does not match its checksum", kind[1]);
        remove_tree("a");
        bool ok = whole && train_apart(fault, text_of("%s --out a --offload %s --offload-dir .", flags, kind[0])) == 1;
        ok = ok && output_contains(said) && train_apart("", text_of("%s --out a --resume", flags)) == 0;
        check(ok && output_contains("step_00000003") && runs_equal(6),
              "%s: said, and resumed from the checkpoint before", said);
    }
}

// --ckpt-bandwidth 1 makes the save of this 332 kB checkpoint take a third of a second, during 50 ms steps.
static void test_bandwidth(void) {
    double ms = 0;
    for (int attempt = 0; attempt < ATTEMPTS && !(ms > 330 && ms < 2000); attempt++) {
        remove_tree("a");
        bool ok = train_apart("rank 0 step 1 at load do delay 50",
                              small_run("a", "--threads 1 --ckpt-bandwidth 1")) == 0;
        char* text = text_read("output", NULL);
        const char* saved = strstr(text, "a/step_00000010 in ");
        if (!ok || saved == NULL || sscanf(saved, "a/step_00000010 in %lf ms", &ms) != 1) ms = NAN;
        free(text);
    }
    check(ms > 330 && ms < 2000, "--ckpt-bandwidth 1: 332 kB take a third of a second, at most two");
}

// The dependent sizes of a preset follow from the sizes that flags give: 32000 x 144 for the embedding, 6 blocks of 4 x
// 144 x 144 + 3 x 144 x 384 + 2 x 144, and a norm.
static void test_resized_preset(void) {
    check(train("--plan --model llama:15M --channels 144") == 0 && output_contains("6102864 parameters"),
          "--model llama:15M --channels 144: 6 heads of 24, ffn 384");
}

// A resumed run must end as the run did also where the vocabulary is padded within a block of 8-bit states, since a
// checkpoint does not hold the padding.
static void test_padded_states(void) {
    const char* line = "--data train.bin --layers 1 --seq 16 --batch 1 --steps 40 --ckpt-every 4 --heads 2 "
                       "--channels 36 --optimizer adamw-8bit --lr 3e-3 --warmup 0 --schedule constant";
    runs_remove();
    bool ok = train(text_of("%s --out a", line)) == 0;
    copy_tree("a", "b");
    for (int step = 8; step <= 40; step += 4) remove_tree(text_of("b/step_%08d", step));
    ok = ok && train(text_of("%s --out b --resume", line)) == 0 && output_contains("b/step_00000004 in");
    check(ok && runs_equal(40), "padding within a block of 8-bit states, resumed: the same");
    runs_remove();
}

// Each kind of save, in --out and in a tier, of a wide model: its tensors have several checkpoint chunks, and their
// sizes are no multiples of the pieces in which memory is copied. A run that resumes ends as the one that went on, and
// how a run saves changes none of its bytes. Llama's feed-forward is cut between two ranks so that a part of more than
// a chunk does not begin at element 0.
static void test_wide_saves(void) {
    static const struct { const char* flags; bool like_first; } WAYS[] = {
        {"--heads 10 --channels 520 --ckpt-async on", true},
        {"--heads 10 --channels 520 --ckpt-async off", true},
        {"--heads 10 --channels 520 --offload optimizer --offload-dir .", true},
        {"--heads 10 --channels 520 --train final_norm* --ckpt-async off", false},
        {"--heads 1 --channels 17 --ffn 61681 --train final_norm* --ckpt-async off", false},  // 2^20 + 1 weights
        {"--heads 10 --channels 520 --family llama --ffn 2304 --ranks 2 --zero 1 --reduce exact --ckpt-async off",
         false},
    };
    const char *weights = "step_00000003/rank_00000.safetensors", *manifest = "step_00000003/manifest.json";
    uint64_t first[2] = {0, 0};
    for (size_t i = 0; i < COUNT_OF(WAYS); i++) {
        char line[400], out[512], tier[512];
        snprintf(line, sizeof line, "--data train.bin --layers 1 --seq 8 --batch 1 --steps 3 --optimizer "
                 " momentum --warmup 0 --lr 0.01 --threads 1 %s", WAYS[i].flags);
        snprintf(out, sizeof out, "%s --out a --ckpt-every 2", line);
        snprintf(tier, sizeof tier, "%s --out b --ckpt-every 5 --ckpt-tier ./wide_tier:2", line);
        runs_remove();
        remove_tree("wide_tier");
        bool ok = train_apart("", out) == 0 && train_apart("", tier) == 0 && runs_equal(3);
        remove_tree("b/step_00000003");
        ok = ok && train_apart("", text_of("%s --resume", tier)) == 0 && output_contains("step_00000002 in");
        check(ok && runs_equal(3), "a wide model, %s, resumed from a tier: the same", WAYS[i].flags);
        remove_tree("a/step_00000003");
        ok = ok && train_apart("", text_of("%s --resume", out)) == 0 && output_contains("a/step_00000002 in");
        check(ok && runs_equal(3), "a wide model, %s, resumed: the same", WAYS[i].flags);
        const uint64_t here[] = {run_hash("a", weights), run_hash("a", manifest)};
        if (i == 0) memcpy(first, here, sizeof first);
        if (WAYS[i].like_first)
            check(first[0] != 0 && memcmp(here, first, sizeof first) == 0, "a wide model, %s: the same files",
                  WAYS[i].flags);
    }
    runs_remove();
    remove_tree("wide_tier");
}

// The sum of the losses of a row of T + 1 tokens in which attention does not cross an end of text, and in *count how
// many targets there are: each document is computed by itself, and the token behind an end of text is no target, nor
// are the first `known`.
static double loss_by_document(size_t* count, Model* model, const int32_t* row, size_t T, int32_t end, size_t known) {
    int32_t targets[64];
    double sum = 0;
    need(T <= COUNT_OF(targets), "a row of %zu tokens", T);
    for (size_t t = 0; t < T; t++) targets[t] = row[t] == end || t < known ? -1 : row[t + 1];
    for (size_t first = 0, last; first < T; first = last + 1) {
        for (last = first; last + 1 < T && row[last] != end;) last++;
        size_t scored = targets_count(targets + first, last + 1 - first);
        if (scored > 0)
            sum += (double)scored *
                   batch_gradients(model, NULL, row + first, targets + first, 1, last + 1 - first);
        *count += scored;
    }
    return sum;
}

// The loss of a step and val_loss are means over all targets: of all ranks and micro-batches. With --documents mask
// documents do not see each other, and each is computed by itself here; Llama's positions are relative. The masks of
// dropout are those of --seed and of the token's number. The last validation is of the weights in the last checkpoint.
static void test_mean_losses(void) {
    enum { T = 16, END = 7, WINDOWS = 40, BATCH = 3 };
    static const struct { size_t overlap, ranks; bool masks; double dropout; } cases[] = {
        {0, 1, true, 0}, {5, 2, true, 0}, {0, 2, false, 0}, {5, 1, false, 0}, {0, 2, false, 0.25}};
    Config c = small_config(FAMILY_LLAMA);
    Model model;
    RunRecord saved;
    Dataset data[2];
    Error error;
    c.context = T;
    need(model_create(&model, &c, small_options(1, T), &error), "%s", error.text);
    need(dataset_open(&data[0], "train.bin", &error) && dataset_open(&data[1], "val.bin", &error), "%s", error.text);
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        double loss[2][2], mean[2] = {0, 0};
        size_t overlap = cases[k].overlap, ranks = cases[k].ranks, ends = 0;
        remove_tree("a");
        bool ok = train_apart("", text_of(
            "--data train.bin --val val.bin --out a --family llama --layers 2 --heads 4 --kv-heads 2 --channels 40 "
            "--ffn 72 --tied off --seq %d --batch %d --steps 2 --warmup 0 --lr 0.01 --seed 5 --val-every 2 "
            "--val-windows %d --val-overlap %zu --threads 1 --ranks %zu --dropout %g %s", T, BATCH, WINDOWS, overlap,
            ranks, cases[k].dropout,
            cases[k].masks ? text_of("--documents mask --end-of-text %d", END) : "")) ==
            0 && log_numbers(loss[0], 2, "a", "loss") == 2 && log_numbers(loss[1], 2, "a", "val_loss") == 2;
        for (int validates = 0; ok && validates < 2; validates++) {
            const Shard* shard = data[validates].shards;
            size_t rows = validates ? (size_t)WINDOWS : BATCH * ranks, count = 0;
            double sum = 0;
            if (validates) need(model_load(&model, &saved, "a/step_00000002", true, &error), "%s", error.text);
            else need(model_randomize(&model, 5, &error), "%s", error.text);
            for (size_t i = 0; i < rows; i++) {
                int32_t row[T + 1];
                size_t start = validates ? i * (T - overlap) : dataset_sample(&data[0], 5, i, T).start;
                for (size_t t = 0; t <= T; t++) row[t] = (int32_t)shard_token(shard, start + t);
                for (size_t t = 0; t + 1 < T; t++) ends += row[t] == END;
                const Dropout dropout = {validates ? 0 : (float)cases[k].dropout, 5, i * T};
                model.dropout = dropout;
                sum += loss_by_document(&count, &model, row, T, cases[k].masks ? END : -1,
                                        validates && i > 0 ? overlap : 0);
            }
            mean[validates] = sum / (double)count;
        }
        const double found[2] = {loss[0][0], loss[1][1]};
        for (int validates = 0; validates < 2; validates++)
            check_bound(ok && ends > 4 ? fabs(found[validates] / mean[validates] - 1) : NAN, bound_of(1e-5, c.layers),
                        "%s, %zu rank%s, windows that overlap by %zu, dropout %g: %s is that of each %s alone",
                        cases[k].masks ? "documents masked" : "joined", ranks, ranks > 1 ? "s" : "", overlap,
                        cases[k].dropout, validates ? "val_loss" : "the loss of the first step",
                        cases[k].masks ? "document" : "row");
    }
    for (int i = 0; i < 2; i++) dataset_close(&data[i]);
    model_free(&model);
    runs_remove();
}

// With masked documents sequences differ in the number of their targets. However the 12 of a step are spread over
// micro-batches and ranks, the steps are the same.
static void test_masked_batches(void) {
    static const struct { int batch, ranks; const char* flags; } ways[] = {
        {12, 1, ""}, {4, 1, ""}, {1, 1, ""}, {3, 2, ""}, {1, 3, "--zero 2"}, {2, 2, "--recompute block"}};
    double first[2][4], numbers[2][4];
    static const char* const names[] = {"loss", "grad_norm"};
    for (size_t k = 0; k < COUNT_OF(ways); k++) {
        remove_tree("a");
        expect(train_apart("", text_of(
            "--data train.bin --out a --family llama --layers 2 --heads 4 --channels 40 --seq 16 --batch %d "
            "--total-batch 192 --steps 4 --warmup 0 --lr 0.01 --threads 1 --ranks %d --documents mask --end-of-text 7 "
            "%s", ways[k].batch, ways[k].ranks, ways[k].flags)) == 0, "--batch %d", ways[k].batch);
        for (int n = 0; n < 2; n++) {
            expect(log_numbers(k ? numbers[n] : first[n], 4, "a", names[n]) == 4, "the log");
            for (int step = 0; k > 0 && step < 4; step++) {
                double off = fabs(numbers[n][step] / first[n][step] - 1);
                expect(off <= bound_of(1e-5, 2), "--batch %d, %d ranks: %s of step %d is off by %g", ways[k].batch,
                       ways[k].ranks, names[n], step + 1, off);
            }
        }
    }
    verdict("documents masked: micro-batches and ranks do not change the loss and the norm of a step");
    runs_remove();
}

// With one window of data all samples are the same: from the same weights, --seed changes the dropout alone.
static void test_dropout_seed(void) {
    static const int seeds[] = {1, 2, 1};
    ShardWriter writer;
    Error error;
    int32_t tokens[17];
    double losses[3] = {0, 0, 0};
    random_tokens(tokens, 17, 61, 5);
    need(shard_writer_open(&writer, "one.bin", 61, 0, &error) && shard_writer_add(&writer, tokens, 17, &error) &&
             shard_writer_finish(&writer, &error) && shard_publish("one.bin", &error), "%s", error.text);
    const char* line = "--data one.bin --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 --steps 1 --threads 1";
    runs_remove();
    bool ok = train_apart("", text_of("%s --out b", line)) == 0;
    for (int i = 0; i < 3; i++) {
        remove_tree("a");
        ok = ok && train_apart("", text_of("%s --out a --init-from b --dropout 0.3 --seed %d", line, seeds[i])) == 0 &&
             log_numbers(&losses[i], 1, "a", "loss") == 1;
    }
    check(ok && losses[0] == losses[2] && losses[0] != losses[1], "--seed chooses the dropout: losses %.9g, %.9g, %.9g",
          losses[0], losses[1], losses[2]);
    runs_remove();
}

// A list of texts, as checkpoints record it, also where it has none, or no room.
static void test_text_lists(void) {
    static const struct { TextList list; const char* text; } cases[] = {
        {{{NULL}, 0}, ""}, {{{""}, 1}, ""}, {{{"a"}, 1}, "a"}, {{{"a", "bc", "d"}, 3}, "a bc d"},
        {{{"12345", "6789"}, 2}, "12345 6"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[8];
        TextList list = cases[i].list;
        const Flag flag = {"stop", KIND_TEXTS, &list, "TEXT", 0, 0, "", 0};
        memset(text, 'x', sizeof text);
        flag_text(text, sizeof text, &flag);
        expect(strcmp(text, cases[i].text) == 0, "'%.8s', not '%s'", text, cases[i].text);
    }
    verdict("a list of texts as a text");
}

// What --help says that a flag is by default, the run records; and given so, flags change no bit.
static void test_help(void) {
    static char line[4096], names[FLAGS_MAX][32], values[FLAGS_MAX][32];
    size_t count = 0, recorded = 0, used = 0;
    runs_remove();
    used += (size_t)snprintf(line, sizeof line, "%s", small_run("b", ""));
    expect(train("--help") == 0, "--help");
    char *help = text_read("output", NULL), *next = strstr(help, "\n  --");
    while (next && count < FLAGS_MAX) {
        char *begin = next + 5, *end, *open = NULL;
        if ((next = strstr(begin, "\n  --")) != NULL) *next = 0;
        if ((end = strstr(begin, "\n\n")) != NULL) *end = 0;  // a heading
        end = begin + strlen(begin);
        while (end > begin && end[-1] == '\n') *--end = 0;
        if (end[-1] == ']') open = strrchr(begin, '[');
        if (open == NULL || sscanf(begin, "%31[^ ]", names[count]) != 1 || strstr(line, text_of("--%s ", names[count])))
            continue;
        snprintf(values[count], sizeof values[count], "%.*s", (int)(end - open) - 2, open + 1);
        used += (size_t)snprintf(line + used, sizeof line - used, " --%s=%s", names[count], values[count]);
        count++;
    }
    bool ok = train(small_run("a", "")) == 0 && train(line) == 0;
    char* manifest = text_read("a/step_00000020/manifest.json", NULL);
    for (size_t i = 0; i < count; i++) {
        const char *key = text_of("\"%s\": \"", names[i]), *at = strstr(manifest, key);
        if (at == NULL) continue;
        recorded++;
        at += strlen(key);
        expect(strncmp(at, text_of("%s\"", values[i]), strlen(values[i]) + 1) == 0,
               "--%s is %s in --help, and the run records %.20s", names[i], values[i], at);
    }
    expect(ok && count > 60 && recorded > 30 && runs_equal(20), "%zu defaults, %zu recorded", count, recorded);
    verdict("--help: defaults are what a run records, and what it does without the flags");
    free(help);
    free(manifest);
    runs_remove();
}

static void test_files(void) {
    test_slow_snapshot();
    test_mixture();
    test_log();
    test_floor();
    test_divergence();
    test_torn_log();
    test_log_of_ranks();
    test_cost_of_saves();
    test_times();
    test_pauses();
    test_tier();
    test_two_ranks();
    test_offload();
    test_offload_fails();
    test_bandwidth();
    test_resized_preset();
    test_padded_states();
    test_wide_saves();
    test_mean_losses();
    test_masked_batches();
    test_dropout_seed();
    test_help();
    test_text_lists();
    check(train(small_run("a", "--resume")) == 0 && output_contains("starting from the beginning") &&
              train(small_run("b", "")) == 0 && runs_equal(20),
          "--resume without a checkpoint starts from the beginning");
    check(train(small_run("a", "")) == 1 && output_contains("--resume") && runs_equal(20),
          "a run in --out is not overwritten without --resume");
    check(train(small_run("a", "--resume")) == 0 && runs_equal(20),
          "--resume of a finished run does nothing and says nothing wrong");
}

// ------------------------------------------------------------------------------------------------
// Signals

// Runs a slow run in a child and sends it a signal, or two, once it has logged a step; returns its exit code.
static int train_and_signal(int first, int second, const char* flags) {
    struct stat status;
    remove_tree("a");
    const char* line = small_run("a", text_of("--threads 1 %s", flags));
    pid_t child = train_start("rank 0 step 2 at load do delay 50", line);
    for (int wait = 0; wait < 5000 && !(stat("a/metrics.jsonl", &status) == 0 && status.st_size > 0); wait++)
        usleep(1000);
    kill(child, first);
    if (second) usleep(10000);
    if (second) kill(child, second);
    return train_wait(child);
}

// A run that gets a stop signal saves a checkpoint, leaves no other process in its directory, and can be resumed.
static void test_signal(void) {
    static const struct { const char* name; int first, second, code; } cases[] = {
        {"SIGTERM", SIGTERM, 0, EXIT_SAVED}, {"SIGINT", SIGINT, 0, 1}, {"SIGUSR1", SIGUSR1, 0, EXIT_SAVED},
        {"SIGTERM, then SIGINT", SIGTERM, SIGINT, EXIT_SAVED}};
    remove_tree("b");
    need(train(small_run("b", "")) == 0, "the run to compare with failed");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int code = train_and_signal(cases[i].first, cases[i].second, "");
        check(code == cases[i].code && output_contains("stopped by a signal after step"),
              "%s: the run says that it stopped and how to continue", cases[i].name);
        const char* events = "a/events.jsonl";
        check(text_contains(events, "\"stopped\"") && !text_contains(events, "\"failed\""),
              "%s: events.jsonl says so too", cases[i].name);
        check(train(small_run("a", "--resume")) == 0 && runs_equal(20), "%s: resumed to the same end", cases[i].name);
    }

    remove_tree("tier");
    int code = train_and_signal(SIGTERM, 0, "--ckpt-tier ./tier:1 --ckpt-bandwidth 0.001");
    check(code == EXIT_SAVED && output_contains("is dropped") && system("ls tier/*/step_* > output 2>&1") != 0,
          "a signal does not wait for a tier's save in progress");
    check(train(small_run("a", "--resume")) == 0 && runs_equal(20), "and the run is resumed to the same end");

    FILE* other = fopen("a/metrics.jsonl", "ab");
    need(other != NULL && flock(fileno(other), LOCK_EX) == 0, "cannot lock a/metrics.jsonl");
    check(train(small_run("a", "--resume")) == 1 && output_contains("another process"),
          "two processes on one directory: the second is refused");
    fclose(other);
    remove_tree("a");  // the first has no line yet
    need(mkdir("a", 0755) == 0 && (other = fopen("a/metrics.jsonl", "ab")) && flock(fileno(other), LOCK_EX) == 0, "a");
    for (int resumes = 0; resumes < 2; resumes++)
        check(train(small_run("a", resumes ? "--resume" : "")) == 1 && output_contains("another process") &&
                  file_exists("a/metrics.jsonl"), "%s: the second leaves the log", resumes ? "--resume" : "a new run");
    fclose(other);
}

// Waits until a run says so; then, a little later, something happens to it.
static void output_await(const char* words) {
    for (int wait = 0; wait < 60000 && !output_contains(words); wait++) usleep(1000);
    usleep(30000);
}

// Whatever is wrong with the data, the weights are whole: the run saves them before it ends, and is resumed to the same
// end, on all ranks. A validation comes after the save of its step; if it fails, or a signal ends it, the next start
// makes it.
static void test_intact_work(void) {
    static const struct {
        const char *name, *fault, *flags, *awaited, *shard;
        int code;
        const char *checkpoint, *makes_up;  // a shell pattern; what the resume says
    } cases[] = {
        {"a shard is cut", "rank 0 step 5 at load do delay 60", "", "step     4/", "train.bin", 1,
         "a/step_000000*", "resumed from a/step_0000000"},
        {"a shard is cut, 3 ranks", "rank 1 step 5 at load do delay 60", "--ranks 3 --zero 2", "step     4/",
         "train.bin", 1, "a/step_000000*", "resumed from a/step_0000000"},
        {"a validation shard is cut", "rank 0 step 7 at validate do delay 300", "--ckpt-every 0", "step     6/",
         "val.bin", 1, "a/step_00000007", "the validation of step 7 was left out"},
        {"the same, 2 ranks", "rank 1 step 7 at validate do delay 300", "--ckpt-every 0 --ranks 2", "step     6/",
         "val.bin", 1, "a/step_00000007", "the validation of step 7 was left out"},
        {"the last validation fails", "rank 0 step 20 at validate do delay 300", "--ckpt-every 0", "step    19/",
         "val.bin", 1, "a/step_00000020", "the validation of step 20 was left out"},
        {"a signal in a validation", "rank 0 step 14 at validate do delay 300", "--ckpt-every 0", "step    13/", NULL,
         EXIT_SAVED, "a/step_00000014", "the validation of step 14 was left out"},
        {"a signal before a validation, whose step has no other line", "rank 0 step 14 at load do delay 300",
         "--ckpt-every 0 --log-every 13", "step    13/", NULL, EXIT_SAVED, "a/step_00000014",
         "the validation of step 14 was left out"},
        {"a signal to one rank of 2 in a validation", "rank 0 step 14 at validate do delay 300",
         "--ckpt-every 0 --ranks 2 --zero 1", "step    13/", NULL, EXIT_SAVED, "a/step_00000014",
         "the validation of step 14 was left out"},
        {"a signal to one rank of 2 in a trace", "rank 1 step 14 at trace do delay 2000", "--ckpt-every 0 --ranks 2 "
         "--clip 0.001 --spike-trace 1 --spike-warmup 2", "step    13/", NULL, EXIT_SAVED, "a/step_00000014",
         "the validation of step 14 was left out"},
        {"killed in the last validation", "rank 0 step 20 at validate do kill", "--ckpt-every 0", "step    19/", "",
         128 + SIGKILL, "a/step_00000020", "the validation of step 20 was left out"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char* flags = text_of("--threads 1 --total-batch 288 %s", cases[i].flags);
        runs_remove();
        need(train_apart("", small_run_at("b", text_of("--val-every 7 %s", flags))) == 0, "the run to compare with");
        remove("output");
        pid_t child = train_start(cases[i].fault, small_run_at("a", text_of("--val-every 7 %s", flags)));
        output_await(cases[i].awaited);
        if (strstr(cases[i].fault, "trace")) sleep_ms(1000);
        if (cases[i].shard == NULL) kill(child, SIGTERM);
        else if (cases[i].shard[0]) need(truncate(cases[i].shard, 1024 + 40) == 0, "%s", cases[i].shard);
        int code = train_wait(child);
        expect(code == cases[i].code, "exit code %d", code);
        expect(cases[i].code != 1 || output_contains("changed while it was in use"), "the reason");
        expect(system(text_of("ls -d %s > /dev/null", cases[i].checkpoint)) == 0, "the checkpoint");
        expect(!output_contains("step 14: clipped hard"), "a trace is made to its end after a signal");
        write_shards();
        expect(train_apart("", small_run_at("a", text_of("--val-every 7 %s --resume", flags))) == 0, "resumed");
        expect(output_contains(cases[i].makes_up), "the resume does not say: %s", cases[i].makes_up);
        expect(runs_equal(20), "the same end");
        verdict("nothing is lost: %s", cases[i].name);
    }
    runs_remove();
}

// A line for which there is no memory is lost, but neither the run nor the line before it is.
static void test_lost_line(void) {
    Log log;
    MixtureCounts none = {0};
    StepLog s = {.val_loss = NAN, .mixture = &none};
    Error error;
    bool added[3];
    remove_tree("a");
    need(directory_make("a", &error) && log_open(&log, "a", &error), "%s", error.text);
    for (int i = 0; i < 3; i++) {
        s.step = 6 + (uint64_t)i;
        log.waiting.failed = i == 1;
        log_write(&log, &s);
        added[i] = i == 0 || log_add_val_loss(&log, 1.5 + i, &error);
    }
    log_close(&log);
    char* text = text_read("a/metrics.jsonl", NULL);
    const char* second = strchr(text, '\n');
    check(!added[1] && added[2] && strncmp(text, "{\"step\": 6,", 11) == 0 && strstr(text, "null") < second &&
              strncmp(second, "\n{\"step\": 8,", 12) == 0 && strstr(second, "\"val_loss\": 3.5"),
          "a log line for which there is no memory is lost alone, and its validation goes to no other: %s", text);
    free(text);
    remove_tree("a");
    need(directory_make("a", &error) && log_open(&log, "a", &error), "%s", error.text);
    FILE* file = log.file;
    log.file = fopen("train.bin", "rb");  // refuses lines, as a full disk does
    log_write(&log, &s);
    log.waiting.failed = true;
    bool filled = log_add_val_loss(&log, 1.5, &error);
    s.step++;
    log_write(&log, &s);
    fclose(log.file);
    log.file = file;
    bool good = log_flush(&log, &error);
    text = text_read("a/metrics.jsonl", NULL);
    second = strchr(text, '\n');
    check(!filled && good && second && second[-1] == '}' && strncmp(second, "\n{\"step\": 9,", 12) == 0,
          "a line that waits stays whole when there is no memory for its validation loss");
    log.lost = true;
    good = log_cut_back(&log, 8, &error) && log_add_val_loss(&log, 2.5, &error);
    check(good && text_contains("a/metrics.jsonl", "\"val_loss\": 2.5"), "after a rewind no line is lost");
    log_close(&log);
    free(text);
    remove_tree("a");
}

// A validation loss of any length takes the place of null in its line: every line stays one object of JSON.
static void test_short_validation(void) {
    static const double losses[] = {3, 0, 2.5, 12, 1e-300, 2.7182818284590452, NAN, 7};
    Log log;
    MixtureCounts none = {0};
    StepLog s = {.val_loss = NAN, .mixture = &none};
    Error error;
    size_t lines = 0;
    remove_tree("a");
    need(directory_make("a", &error) && log_open(&log, "a", &error), "%s", error.text);
    for (size_t i = 0; i < COUNT_OF(losses); i++) {
        s.step = i + 1;
        log_write(&log, &s);
        need(log_add_val_loss(&log, losses[i], &error), "%s", error.text);
    }
    log_close(&log);
    char *text = text_read("a/metrics.jsonl", NULL), *rest = text;
    for (char* line; (line = strsep(&rest, "\n")) != NULL && *line; lines++) {
        Json json;
        double step = 0, loss = NAN;
        if (!expect(json_parse(&json, line, strlen(line), "a", &error), "%s: %s", line, error.text)) continue;
        json_number(&json, json_get(&json, 0, "step"), &step);
        json_number(&json, json_get(&json, 0, "val_loss"), &loss);
        expect(lines < COUNT_OF(losses) && step == (double)(lines + 1) &&
               (isnan(losses[lines]) ? isnan(loss) : loss == losses[lines]), "step %g: %s", step, line);
        json_free(&json);
    }
    expect(lines == COUNT_OF(losses), "%zu lines", lines);
    verdict("a validation loss of 1 character or of 20 takes the place of null in the log");
    free(text);
    remove_tree("a");
}

// A validation whose loss does not reach the log does not count, on all ranks: the next start does not know it.
static void test_lost_validation(void) {
    remove_tree("a");
    remove("output");
    pid_t child = train_start("rank 0 step 10 at validate do delay 2000",
                              tiny_run("--val-every 10 --ckpt-every 9 --ckpt-keep 1 --ckpt-async off --keep-best "
                                       "--lr 0 --ranks 2"));
    output_await("saved a/step_00000009");
    bool cut = truncate("a/metrics.jsonl", 0) == 0;
    check(train_wait(child) == 0 && cut && output_contains("which therefore does not count") &&
              directory_count("a", "step_") == 1 && file_exists("a/step_00000020/manifest.json"),
          "a validation that the log lacks keeps no checkpoint");
    remove_tree("a");
}

// A run that diverges again after each rewind goes back as far as --ckpt-keep lets it, and then says so.
static void test_no_checkpoint_left(void) {
    for (int keep = 1; keep <= 3; keep++) {
        remove_tree("a");
        int code = train_apart("", tiny_run(text_of("--clip 0 --spike-skip 0.5 --spike-warmup 3 --total-batch 48 "
                                                    "--diverged-after 1 --ckpt-every 1 --ckpt-keep %d --rewind 9",
                                                    keep)));
        expect(code == 1 && output_contains(text_of("also after the rewind to step %d, and --ckpt-keep %d has left no "
                                                    "checkpoint before that", 4 - keep, keep)), "--ckpt-keep %d", keep);
    }
    verdict("a run without a checkpoint to go back to says which it had");
    remove_tree("a");
}

// A name with control characters of all kinds reaches the terminal without them.
static void test_visible_names(void) {
#define HIDDEN "\x1b[31m\x7f\xc2\x85\xc2\xa9\n"
#define VISIBLE "\\x1b[31m\\x7f\\x85\xc2\xa9\\x0a"
    static const char *const lines[] = {"a" HIDDEN, "a" HIDDEN " --keep-best --resume",
                                        "b" HIDDEN " --resume --init-from a" HIDDEN "/step_00000020"};
    static const char* const shown[][2] = {
        {"data: 50% of the samples from x" VISIBLE ".bin, 3000 tokens\n", "saved a" VISIBLE "/step_00000020 in"},
        {"resumed from a" VISIBLE "/step_00000020 in", "validation loss of a checkpoint: "},
        {"starting from the weights of a" VISIBLE "/step_00000020\n", "no checkpoint in b" VISIBLE " yet"}};
    need(link("train.bin", "x" HIDDEN ".bin") == 0, "a shard");
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        const char* shape = i < 2 ? "--layers 1 --heads 1 --channels 8" : "";
        expect(train_apart("", text_of("--data x" HIDDEN ".bin:1,floor.bin:1 --val val.bin %s --seq 16 --batch 1 "
                                       "--steps 20 --threads 1 --out %s", shape, lines[i])) == 0, "run %zu", i);
        for (int k = 0; k < 2; k++) expect(output_contains(shown[i][k]), "%s is not shown", shown[i][k]);
        expect(!output_contains("\x1b") && !output_contains("\x7f") && !output_contains("\xc2\x85"), "run %zu", i);
    }
    verdict("names with control characters are shown without them");
    for (size_t i = 0; i < 2; i++) remove_tree(i ? "b" HIDDEN : "a" HIDDEN);
}

// A validation in which no target counts is not one that was left out: a run that is done stays done.
static void test_no_number(void) {
    const char* line = "--data train.bin --val ends.bin --out a --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 "
                       "--steps 4 --val-every 2 --documents mask --end-of-text 7 --threads 1 --resume";
    Error error;
    ShardWriter writer;
    int32_t ends[100];
    for (int i = 0; i < 100; i++) ends[i] = 7;
    need(shard_writer_open(&writer, "ends.bin", 61, 0, &error) && shard_writer_add(&writer, ends, 100, &error) &&
             shard_writer_finish(&writer, &error) && shard_publish("ends.bin", &error), "%s", error.text);
    runs_remove();
    bool made = train_apart("", line) == 0 && text_contains("a/metrics.jsonl", "\"val_loss\": \"nan\"");
    made = made && train_apart("", line) == 0 && output_contains("nothing to do: the run is already at step 4 of 4");
    check(made && !output_contains("left out"), "a validation without a number is made once");
    runs_remove();
}

// --keep-best: of the checkpoints before the newest the one with the lowest validation loss stays, also of a run that
// was killed in between; --stop-after ends the run when there is none better.
static void test_best(void) {
    static const char* const ways[] = {"", "--ckpt-every 3", "--ckpt-every 3 --ckpt-async off --ranks 2 --zero 1"};
    size_t older = 0;  // runs whose best checkpoint is not the one that they resume from
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        for (int seed = 1; seed <= 3; seed++) {  // a learning rate that is too high: losses rise and fall
            double losses[STEPS + 1];
            const char* line = tiny_run(text_of("--val-every 2 --keep-best --ckpt-keep 1 --schedule constant --lr 0.3 "
                                                "--warmup 0 --clip 0 --spike-skip 0 --seed %d %s", seed, ways[i]));
            char again[1024];
            snprintf(again, sizeof again, "%s --resume", line);
            remove_tree("a");
            int codes[2] = {train_apart("rank 0 step 13 at update do kill", line), train_apart("", again)};
            size_t lines = log_numbers(losses, STEPS + 1, "a", "val_loss"), best = 1;
            for (size_t n = 1; n < lines; n++) if (losses[n] < losses[best]) best = n;
            older += best + 1 < 12;
            expect(codes[0] == 128 + SIGKILL && codes[1] == 0 && lines == STEPS, "codes %d and %d, %zu lines", codes[0],
                   codes[1], lines);
            int kept = 1 + (best + 1 < STEPS);
            expect(directory_count("a", "step_") == kept, "not %d checkpoints", kept);
            expect(file_exists(text_of("a/step_%08zu/manifest.json", best + 1)), "the best, of step %zu", best + 1);
            expect(output_contains(text_of("%.6f, a/step_%08zu", losses[best], best + 1)), "the last line");
        }
        verdict("--keep-best %s keeps the newest and the best", ways[i]);
    }
    check(older > 0, "in %zu of the runs the best is older than what is resumed", older);
    remove_tree("a");
    const char* line = tiny_run("--val-every 3 --stop-after 2 --lr 0");
    bool ok = train_apart("", line) == 0 && output_contains("a/step_00000009") && directory_count("a", "step_") == 1;
    check(ok, "--stop-after 2 ends a run that does not learn after its third validation, saved");
    ok = train_apart("", text_of("%s --resume", line)) == 0 && directory_count("a", "step_") == 1;
    check(ok, "and it does not go on when it is resumed");
}

// A second Ctrl-C ends a run at once, here in a step that never ends. Nothing of it is saved.
static void test_second_interrupt(void) {
    remove_tree("a");
    pid_t child = train_start("rank 0 step 12 at load do hang", small_run("a", "--threads 1 --ckpt-async off"));
    for (int i = 0; i < 2; i++) {
        const char* awaited = i ? "train: stopping after this step" : "step     11";
        for (int wait = 0; wait < 20000 && !output_contains(awaited); wait++) usleep(1000);
        kill(child, SIGINT);
    }
    siginfo_t info = {0};
    for (int wait = 0; wait < 20000 && info.si_pid == 0; wait++) {
        usleep(1000);
        waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT);
    }
    kill(child, SIGKILL);
    int code = train_wait(child);
    check(code == 128 + SIGINT && directory_count("a", "step_") == 1 && !output_contains("stopped by a signal"),
          "SIGINT twice: the run ends at once, with code %d", code);
    check(train(small_run("a", "--resume")) == 0 && runs_equal(20), "SIGINT twice: resumed to the same end");
}

// A line of events.jsonl that a full disk has cut stays a line of its own: the next one is whole.
static void test_torn_events(void) {
    static const struct { const char *before, *between; } cases[] = {
        {"", ""}, {"{\"event\": \"begun\"}\n", ""}, {"{\"event\": \"beg", "\n"}, {"{", "\n"}};
    Error error;
    remove_tree("a");
    need(directory_make("a", &error), "%s", error.text);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_text("a/events.jsonl", cases[i].before);
        bool good = event_write("a", NULL, "saved", 3, "full", NULL, NULL, &error);
        char* text = text_read("a/events.jsonl", NULL);
        const char* begins = text_of("%s%s{\"time\"", cases[i].before, cases[i].between);
        const char* end = strstr(text, "Z\",\"event\": \"saved\",\"step\": 3,\"detail\": \"full\"}\n");
        expect(good && strncmp(text, begins, strlen(begins)) == 0 && end && strchr(end, '\n')[1] == 0, "after '%s': %s",
               cases[i].before, text);
        free(text);
    }
    verdict("events.jsonl: a line after one that is cut");
}

static char formats[PATH_MAX];  // doc/formats.md

// Appends the events of run a, each with its step, to `text`, and the names to `seen`, each in quotes.
static void events_read(char* text, size_t size, char* seen, size_t seen_size) {
    char *events = text_read("a/events.jsonl", NULL), name[32];
    unsigned long long step;
    for (const char* at = events; (at = strstr(at, "\"event\": \"")) != NULL; at++) {
        need(sscanf(at, "\"event\": \"%31[^\"]\",\"step\": %llu", name, &step) == 2, "%.60s", at);
        snprintf(text + strlen(text), size - strlen(text), "%s%s %llu", text[0] ? ", " : "", name, step);
        snprintf(seen + strlen(seen), seen_size - strlen(seen), "`%s` ", name);
    }
    free(events);
}

// The events of runs in which each can happen, and their exit codes. All are in the table of doc/formats.md, and all
// that are in it have happened.
static void test_events(void) {
#define SKIPS "--clip 0 --spike-skip 1.02 --spike-warmup 2 --total-batch 48 --diverged-after 1 "
    static const struct {
        const char *fault, *flags;
        int code;
        const char* events;    // a shell pattern
        const char* damaged;   // a checkpoint of the run before, which is resumed
        rlim_t file_bytes;     // the most that a file may have; 0: any number
    } cases[] = {
        {"", "--ckpt-every 10", 0, "begun 0, saved 10, saved 20, validation 20, done 20", NULL, 0},
        {"", "--ckpt-every 10 --resume", 0, "damaged 20, cut 10, resumed 10, saved 20, validation 20, done 20",
         "a/step_00000020", 0},
        {"", "--ckpt-every 10 --resume", 0, "resumed 20, done 20", "", 0},
        {"", "--ckpt-every 10 --resume", 1, "damaged 20, damaged 10", "a/step_000000?0", 0},
        {"", "--ckpt-every 10", 1, "begun 0, not_saved 10, *failed 20", NULL, 10000},
        {"", "--ckpt-every 10 --ranks 4 --zero 2", 1,
         "begun 0, *saved 10, *not_logged 20, saved 20, validation 20, failed 20", NULL, 9900},
        {"", "--lr 0 --val-every 1 --stop-after 1", 0,
         "begun 0, validation 1, validation 2, no_gain 2, saved 2, done 2", NULL, 0},
        {"", "--offload optimizer --offload-dir .", 0, "begun 0, offload 3, saved 20, validation 20, done 20", NULL, 0},
        {"", SKIPS, 1, "begun 0, bad_batch *, failed *", NULL, 0},
        {"", SKIPS "--ckpt-every 1 --rewind 1", 1, "begun 0, *, bad_batch *, rewound *, failed *", NULL, 0},
        {"rank 1 step 1 at load do delay 50", "--ranks 2 --slow-factor 1.5 --slow-steps 3", 0,
         "begun 0, slow *, saved 20, validation 20, done 20", NULL, 0},
    };
    char seen[4096] = "`sample` ", documented[512] = "", text[1024] = "";  // that one is made in test_facts
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        text[0] = 0;
        if (cases[i].damaged == NULL) remove_tree("a");
        else if (cases[i].damaged[0])
            need(system(text_of("for s in %s; do echo >> $s/manifest.json; done", cases[i].damaged)) == 0, "damage");
        remove("a/events.jsonl");
        if (cases[i].file_bytes) file_size_limit(cases[i].file_bytes);
        int code = train_apart(cases[i].fault, tiny_run(cases[i].flags));
        if (cases[i].file_bytes) file_size_limit(RLIM_INFINITY);
        events_read(text, sizeof text, seen, sizeof seen);
        expect(code == cases[i].code && fnmatch(cases[i].events, text, 0) == 0, "%s: code %d, %s", cases[i].flags, code,
               text);
    }
    text[0] = 0;
    expect(train_and_signal(SIGTERM, 0, "") == EXIT_SAVED, "SIGTERM");
    events_read(text, sizeof text, seen, sizeof seen);
    expect(fnmatch("begun 0, saved *, stopped *", text, 0) == 0, "SIGTERM: %s", text);

    char *table = text_read(formats, NULL), *row = strstr(table, "| events of the trainer");
    char* end = row ? strstr(row, "\n\n") : NULL;
    need(end != NULL, "the table of events in %s", formats);
    *end = 0;
    while ((row = strstr(row, "\n| `")) != NULL) {
        row += 3;
        snprintf(documented + strlen(documented), sizeof documented - strlen(documented), "%.*s",
                 (int)strcspn(row, "|"), row);
    }
    const char* sets[] = {documented, seen};
    for (int i = 0; i < 2; i++)
        for (const char* at = sets[i]; (at = strchr(at, '`')) != NULL; at = strchr(at + 1, '`') + 1) {
            const char* name = text_of("%.*s`", (int)strcspn(at + 1, "`") + 1, at);
            // Those of a machine's faults happen in test_telemetry.c.
            expect(strstr(i ? documented : text_of("%s`xid`ecc`throttled`hot`", seen), name) != NULL, "%s %s", name,
                   i ? "is not documented" : "has not happened");
        }
    free(table);
    verdict("events.jsonl: what happens to a run, all of it documented");
}

// ------------------------------------------------------------------------------------------------
// Damage

// Tries to load one checkpoint as the program does; true if that succeeds, or fails without a word.
static bool loads(Model* model, const char* directory) {
    Json manifest;
    RunRecord record;
    Error error;
    error.text[0] = 0;
    bool ok = record_open(&manifest, &record, directory, &error);
    if (ok) {
        ok = checkpoint_load(&model->flat, &manifest, directory, false, &error);
        json_free(&manifest);
    }
    return ok || error.text[0] == 0;
}

// After a whole checkpoint is loaded: whether its weights, loaded again without optimizer state, are the same.
static bool loads_weights_alone(Model* model, const char* directory) {
    FlatVector* flat = &model->flat;
    Json manifest;
    Error error;
    size_t P = model->parameters.flat_size, used = 0;
    floatX *all = (floatX*)memory_allocate(P * sizeof(floatX)), *alone = (floatX*)memory_allocate(P * sizeof(floatX));
    float* state = (float*)memory_allocate(P * sizeof(float));
    device_download(all, flat->params, P * sizeof(floatX), model->stream);
    need(flat_reset_optimizer(flat, &error) && manifest_open(&manifest, directory, &error) &&
             checkpoint_load(flat, &manifest, directory, true, &error),
         "%s", error.text);
    device_download(alone, flat->params, P * sizeof(floatX), model->stream);
    for (size_t s = 0; s < OPTIMIZER_STATES && flat->states[s]; s++) {
        device_download(state, flat->states[s], P * sizeof(float), model->stream);
        for (size_t i = 0; i < P; i++) used += state[i] != 0;
    }
    bool same = memcmp(all, alone, P * sizeof(floatX)) == 0;
    json_free(&manifest);
    free(all);
    free(alone);
    free(state);
    return same && used == 0;
}

// Makes one weight of a checkpoint not finite, as a run that went wrong would have saved it: with right checksums.
static void put_nan(const char* weights, const char* manifest) {
    SafetensorsFile f;
    Error error;
    size_t bytes, length;
    char tail[64];
    need(safetensors_open(&f, weights, &error), "%s", error.text);
    char *data = text_read(weights, &bytes), *text = text_read(manifest, &length);
    const SafetensorsTensor* t = &f.header.tensors[0];
    char* tensor = data + f.data_start + t->offset;
    const char* before = text_of("%016llx", (unsigned long long)hash_bytes(tensor, t->bytes));
    memset(tensor + 5 * dtype_bytes(t->type), 0xff, dtype_bytes(t->type));
    const char* after = text_of("%016llx", (unsigned long long)hash_bytes(tensor, t->bytes));
    char *at = strstr(text, before), *end = strstr(text, ",\n  \"checksum\"");
    need(at != NULL && end != NULL, "the checksum of %s", t->name);
    memcpy(at, after, 16);
    manifest_tail(tail, text, (size_t)(end - text));
    strcpy(end, tail);
    put_bytes(weights, data, bytes);
    put_bytes(manifest, text, length);
    safetensors_close(&f);
    free(data);
    free(text);
}

static void test_damage(void) {
    static const char directory[] = "a/step_00000020", manifest[] = "a/step_00000020/manifest.json";
    static const char* const path[2] = {"a/step_00000020/rank_00000.safetensors", manifest};
    char* data[2];
    size_t bytes[2];
    int accepted_cut = 0, accepted_flip = 0;
    Error error;
    Model model;
    Config c = small_config(FAMILY_GPT2);
    runs_remove();
    need(train(small_run("a", "")) == 0, "the run that is to be damaged failed");
    c.context = 16;
    need(model_create(&model, &c, small_options(1, 1), &error), "%s", error.text);
    for (int i = 0; i < 2; i++) data[i] = text_read(path[i], &bytes[i]);
    check(loads(&model, directory), "the checkpoint loads while it is whole");
    check(loads_weights_alone(&model, directory), "a checkpoint's weights alone leave the optimizer as it is");
    for (uint64_t n = 0; n < 100; n++) {
        int i = (int)(n % 2);
        put_bytes(path[i], data[i], random_bits(1, RANDOM_TEST, 30, n) % bytes[i]);
        accepted_cut += loads(&model, directory);
        put_bytes(path[i], data[i], bytes[i]);
    }
    check_bound(accepted_cut, 0, "checkpoints cut at 100 random lengths that still load");
    for (uint64_t n = 0; n < 1000; n++) {
        int i = (int)(n % 2);
        size_t at = random_bits(1, RANDOM_TEST, 31, 2 * n) % bytes[i];
        char flip = (char)(1 + random_bits(1, RANDOM_TEST, 31, 2 * n + 1) % 255);
        data[i][at] ^= flip;
        put_bytes(path[i], data[i], bytes[i]);
        accepted_flip += loads(&model, directory);
        data[i][at] ^= flip;
        put_bytes(path[i], data[i], bytes[i]);
    }
    check_bound(accepted_flip, 0, "checkpoints with one of 1000 random bytes changed that still load");
    model_free(&model);

    // The whole program: the newest is damaged, the previous one is used, and the end is as if nothing had happened.
    need(train(small_run("b", "")) == 0, "the run to compare with failed");
    data[0][bytes[0] / 2]++;
    put_bytes(path[0], data[0], bytes[0]);
    check(train(small_run("a", "--resume")) == 0 && output_contains("step_00000020/rank_00000.safetensors") &&
              output_contains("resumed from") && runs_equal(20),
          "a damaged newest checkpoint: named, the one before used, the same end");
    put_nan(path[0], manifest);
    check(train(small_run("a", "--resume")) == 0 && output_contains("element 5 of ") &&
              output_contains("is not finite") && output_contains("resumed from a/step_00000010") && runs_equal(20),
          "a newest checkpoint with a weight that is not finite: the same");
    need(truncate("a/step_00000010/manifest.json", 100) == 0 && truncate(manifest, 100) == 0, "truncate");
    check(train(small_run("a", "--resume")) == 1 && output_contains("no checkpoint in"),
          "all checkpoints damaged: refused");
    free(data[0]);
    free(data[1]);
}

// A damaged checkpoint does not cause the removal of others.
static void test_pruning(void) {
    const KeepRule one = {.newest = 1};
    const char* manifest = "a/step_00000020/manifest.json";
    size_t there[2] = {0, 0}, bytes;
    runs_remove();
    need(train("--data train.bin --out a --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 --steps 20 "
               "--ckpt-every 5") == 0, "the run to prune failed");
    char* text = text_read(manifest, &bytes);
    for (int whole = 0; whole < 2; whole++) {
        put_bytes(manifest, text, whole ? bytes : 100);
        checkpoint_prune("a", 20, &one);
        for (int step = 5; step <= 20; step += 5) there[whole] += directory_exists(text_of("a/step_%08d", step));
    }
    free(text);
    check(there[0] == 4 && there[1] == 1,
          "pruning removes nothing while the newest checkpoint is damaged, and then what is older");
}

// Which checkpoints stay, by rules known by hand. `saved` has a letter for each step from 1 on: how its checkpoint was
// saved, r: --ckpt-every asked for it, s: so it did, amid skipped steps, e: the run ended or was told to stop; d: its
// manifest is damaged; -: there is none. `left` has the same letters for those that stay.
static void test_keep_rules(void) {
    static const struct { KeepRule rule; const char *saved, *left; } cases[] = {
        {{.newest = 0}, "rdrer", "rdrer"},
        {{.newest = 1}, "rrr", "--r"},
        {{.newest = 2}, "rrrrr", "---rr"},
        {{.newest = 2}, "rresr", "---sr"},         // of whatever kind, if the run may not rewind
        {{.newest = 2}, "rrddr", "-rddr"},         // damaged ones do not count, so that a good one stays
        {{.newest = 2}, "rdrdr", "--rdr"},
        {{.newest = 3}, "rrdedr-dr", "---edr-dr"},
        {{.newest = 1}, "rdr", "--r"},             // and are removed below those that count
        {{.newest = 1}, "rrd", "rrd"},             // nothing is removed below a newest one that is damaged
        {{.newest = 2, .rewinds = true}, "rrrere", "--rere"},
        {{.newest = 2, .rewinds = true}, "rrerr", "---rr"},
        {{.newest = 2, .rewinds = true}, "reeeer", "r--eer"},
        {{.newest = 2, .rewinds = true}, "rrdedr", "-rdedr"},
        {{.newest = 1, .rewinds = true}, "rrs", "rrs"},
        {{.newest = 1, .rewinds = true}, "rsr", "--r"},
        {{.newest = 1}, "rrs", "--s"},
        {{.newest = 1, .forever = 3}, "rrrrrrr", "--r--rr"},
        {{.newest = 1, .forever = 3}, "rrdrrer", "--d--er"},
        {{.newest = 1, .forever = 3}, "rr-rr-r", "---r--r"},
        {{.newest = 2, .forever = 3}, "rrrrrrr", "--r--rr"},
    };
    const char *letters = "rsed", *out = "rules";
    char* manifests[4];
    Config c = small_config(FAMILY_GPT2);
    RunRecord record = {.config = c, .state = run_state_begin(false, 1)};
    Model model;
    Error error;
    small_create(&model, &c, small_options(1, 1), 1);
    for (int kind = 0; kind < 4; kind++) {
        record.kind = letters[kind] == 'e' ? SAVE_END : SAVE_REQUESTED;
        record.state.step = 1;
        record.state.skipped_consecutive = letters[kind] == 's' ? 3 : 0;
        need(model_save(&model, &record, out, &error), "%s", error.text);
        manifests[kind] = text_read(text_of("%s/step_%08d/manifest.json", out, 1), NULL);
        if (letters[kind] == 'd') manifests[kind][strlen(manifests[kind]) / 2] ^= 1;
        checkpoint_discard(out);
    }
    model_free(&model);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        size_t count = strlen(cases[i].saved);
        char left[16] = "";
        need(directory_make(out, &error), "%s", error.text);
        for (size_t k = 0; k < count; k++) {
            const char* letter = strchr(letters, cases[i].saved[k]);
            if (letter == NULL) continue;
            need(directory_make(text_of("%s/step_%08zu", out, k + 1), &error), "%s", error.text);
            put_text(text_of("%s/step_%08zu/manifest.json", out, k + 1), manifests[letter - letters]);
        }
        checkpoint_prune(out, count, &cases[i].rule);
        for (size_t k = 0; k < count; k++)
            left[k] = directory_exists(text_of("%s/step_%08zu", out, k + 1)) ? cases[i].saved[k] : '-';
        expect(strcmp(left, cases[i].left) == 0, "newest %d, forever %d, rewinds %d: of %s there stay %s, not %s",
               (int)cases[i].rule.newest, (int)cases[i].rule.forever, cases[i].rule.rewinds, cases[i].saved, left,
               cases[i].left);
        expect(directory_count(out, ".old") == 0, "a part of a removed one is left");
        checkpoint_discard(out);
    }
    for (int kind = 0; kind < 4; kind++) free(manifests[kind]);
    verdict("pruning: which checkpoints stay: damaged ones, and those a run cannot rewind to, do not count");
}

// Checkpoints of adjacent steps, as --ckpt-every 1 and signals leave them, from each step on: those before it stay, and
// no other is found.
static void test_setting_aside(void) {
    static const int steps[] = {3, 4, 5, 7, 8};
    const char* out = "aside";
    Error error;
    for (int sets_aside = 0; sets_aside < 2; sets_aside++)
        for (uint64_t first = 0; first <= 9; first++) {
            uint64_t newest = 0, expected = 0;
            for (size_t i = 0; i < COUNT_OF(steps); i++)
                need(directory_make(text_of("%s/step_%08d", out, steps[i]), &error), "%s", error.text);
            expect(checkpoint_set_aside(out, first, sets_aside, &error), "%s", error.text);
            for (size_t i = 0; i < COUNT_OF(steps); i++) {
                const char* path = text_of("%s/step_%08d", out, steps[i]);
                bool stays = (uint64_t)steps[i] < first;
                if (stays) expected = (uint64_t)steps[i];
                expect(directory_exists(path) == stays, "from %d on: that of %d", (int)first, steps[i]);
                expect(directory_exists(text_of("%s" CHECKPOINT_ASIDE, path)) == (sets_aside && !stays),
                       "from %d on: that of %d, aside", (int)first, steps[i]);
            }
            checkpoint_before(&newest, out, UINT64_MAX);
            expect(newest == expected, "from %d on: %d is the newest", (int)first, (int)newest);
            checkpoint_discard(out);
        }
    verdict("checkpoints from a step on are set aside, or removed, and no others");
}

static size_t checkpoints_there(const char* directory) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    while (checkpoint_before(&step, directory, step)) count++;
    return count;
}

// Which checkpoints a run that may rewind keeps, and which it drops once it has rewound from step 12 to step 10.
static void test_going_back(void) {
    const KeepRule one = {.newest = 1, .rewinds = true};
    const char *out = "back", *tier = "back_tier";
    Config c = small_config(FAMILY_GPT2);
    RunRecord record = {.config = c, .state = run_state_begin(false, 1)};
    RunOptions options = {.out = out};
    Model model;
    Run run;
    Error error;
    small_create(&model, &c, small_options(1, 1), 1);
    need(directory_make(out, &error) && directory_make(tier, &error), "%s", error.text);
    for (record.state.step = 9; record.state.step <= 12; record.state.step++) {
        record.state.skipped_consecutive = record.state.step == 12 ? 3 : 0;
        need(model_save(&model, &record, out, &error) && model_save(&model, &record, tier, &error), "%s", error.text);
    }
    checkpoint_prune(out, 12, &one);
    check(checkpoints_there(out) == 4, "a run that may rewind keeps all checkpoints while steps are skipped");

    memset(&run, 0, sizeof run);
    run.options = &options;
    run.record.state.step = 10;
    snprintf(run.tiers[0].directory, sizeof run.tiers[0].directory, "%s", out);
    snprintf(run.tiers[1].directory, sizeof run.tiers[1].directory, "%s", tier);
    run.tier_count = 2;
    need(log_open(&run.log, out, &error) && run_set_aside(&run, true, &error), "%s", error.text);
    log_close(&run.log);
    uint64_t newest = 0, newest_tier = 0;
    checkpoint_before(&newest, out, UINT64_MAX);
    checkpoint_before(&newest_tier, tier, UINT64_MAX);
    check(newest == 10 && checkpoints_there(out) == 2 && newest_tier == 10 && checkpoints_there(tier) == 2,
          "after a rewind to step 10 no resume uses later checkpoints");
    checkpoint_prune(out, 10, &one);
    check(checkpoints_there(out) == 1, "and once no steps are skipped, older ones are removed");
    model_free(&model);
}

// Saves in --out follow one another without a pause: a tier gets its own all the same.
static void test_tier_waits(void) {
    RunOptions options = {.out = "out"};
    Run run;
    size_t saves = 0;
    memset(&run, 0, sizeof run);
    run.options = &options;
    run.cadence.steps = 2;
    run.saver.snapshot = (char*)&run;  // saves are asynchronous
    run.tier_count = 2;
    run.tiers[1].every = 4;
    for (uint64_t step = 1; step <= 40; step++) {
        run.saver.state = step % 2 ? SAVER_WRITING : SAVER_IDLE;
        unsigned due = run_save_due(&run, step, false, false);
        if (due & 1) run.tiers[0].saved = step;
        if (due & 2) run.tiers[1].saved = step;
        saves += due >> 1 & 1;
    }
    check(saves == 9, "a tier between saves in --out that leave no pause: %zu saves", saves);
}

int main(int argc, char** argv) {
    static const struct { const char* flag; void (*run)(void); } parts[] = {
        {"--runs", test_runs}, {"--files", test_files}, {"--files", test_tier_waits}, {"--signals", test_signal},
        {"--signals", test_second_interrupt}, {"--signals", test_intact_work}, {"--signals", test_no_number},
        {"--signals", test_lost_line}, {"--signals", test_short_validation}, {"--signals", test_lost_validation},
        {"--signals", test_visible_names}, {"--runs", test_no_checkpoint_left},
        {"--signals", test_events}, {"--signals", test_torn_events},
        {"--damage", test_damage}, {"--damage", test_best}, {"--damage", test_pruning},
        {"--damage", test_keep_rules}, {"--damage", test_setting_aside},
        {"--damage", test_going_back}};
    tests_begin("test_runs");
    printf("test_runs (%s)\n", FLOATX_NAME);
    need(realpath("doc/formats.md", formats) != NULL, "run it in the root of the checkout");
    root_enter();
    write_shards();
    for (size_t i = 0; i < COUNT_OF(parts); i++)
        if (argc == 1 || strcmp(argv[1], parts[i].flag) == 0) parts[i].run();
    return tests_end();
}
