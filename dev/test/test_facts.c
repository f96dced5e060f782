// test_facts.c: what the trainer records of a run for the programs that show it.
//
//   build/test_facts --train build/train-FP32
//
//   1. goodput      where the time of a run went: runs made up by a simulation that knows the answer; damaged logs
//   2. records      a run of two ranks that is killed twice, and one that rewinds: the lines of metrics.jsonl,
//                   ranks.jsonl, samples.jsonl and run.jsonl against those of a run that is not, and each other
//   3. columns      clip and load_ms, against the norms, and a loader that is made slow
//   4. prometheus   a reader of the text format, while the run writes; names with odd characters; a disk that refuses
//   5. documents    every key and metric is in doc/formats.md
//
// Run it in the root of the checkout.

#include "llmtrain/run/goodput.h"
#include "harness.h"
#include "pieces.h"

static char train_program[PATH_MAX], formats[PATH_MAX];

// Runs the trainer, with a fault (fault.h) or without (""), on one thread; its output in the files "output", "errors".
HARNESS_FORMAT(2, 3) static int train(const char* fault, const char* format, ...) {
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    int status = system(text_of("LLMTRAIN_TEST_FAULT='%s' OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive %s --data "
                                "train.bin --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --threads 1 %s > "
                                "output 2> errors", fault, train_program, line));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static bool text_has(const char* path, const char* words) {
    char* text = text_read(path, NULL);
    bool found = strstr(text, words) != NULL;
    free(text);
    return found;
}

// ------------------------------------------------------------------------------------------------
// Lines of JSON

typedef struct {
    Json* lines;
    size_t count;
} Lines;

static Lines lines_read(const char* path) {
    Lines l = {NULL, 0};
    size_t capacity = 0;
    Error error;
    char *text = text_read(path, NULL), *rest = text;
    for (char* line; (line = strsep(&rest, "\n")) != NULL && *line; l.count++) {
        need(memory_grow(&l.lines, &capacity, l.count + 1, sizeof(Json)), "memory");
        need(json_parse(&l.lines[l.count], line, strlen(line), path, &error), "%s", error.text);
    }
    free(text);
    return l;
}

static void lines_free(Lines* l) {
    for (size_t i = 0; i < l->count; i++) json_free(&l->lines[i]);
    free(l->lines);
    l->lines = NULL;
}

static double number_of(const Json* json, const char* key) {
    double value = NAN;
    json_number(json, json_get(json, 0, key), &value);
    return value;
}

static const char* string_of(const Json* json, const char* key) {
    static char texts[4][PATH_MAX];
    static size_t next;
    char* text = texts[next++ % COUNT_OF(texts)];
    if (!json_string(json, json_get(json, 0, key), text, PATH_MAX)) text[0] = 0;
    return text;
}

// Element r of the array of a key.
static double element_of(const Json* json, const char* key, size_t r) {
    double value = NAN;
    uint32_t i = json_first(json, json_get(json, 0, key));
    while (r-- > 0) i = json_next(json, i);
    json_number(json, i, &value);
    return value;
}

// ------------------------------------------------------------------------------------------------
// 1. Goodput

// Of the files of a run; lines that are not whole are left out, as in build/report.
static void goodput_of(Goodput* g, const char* directory) {
    static const char* const files[] = {"events.jsonl", "metrics.jsonl"};
    GoodputLog log = {0};
    Error error;
    for (int f = 0; f < 2; f++) {
        char* text = text_read(text_of("%s/%s", directory, files[f]), NULL);
        Json json;
        for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
            if (!json_parse(&json, line, (size_t)(end - line), files[f], &error)) continue;
            if (f == 0) need(goodput_event(&log, &json), "no memory");
            else goodput_add(&log, (uint64_t)number_of(&json, "step"), number_of(&json, "time"));
            json_free(&json);
        }
        free(text);
    }
    goodput_close(g, &log);
}

static double parts_sum(const Goodput* g) {
    double sum = 0;
    for (size_t i = 0; i < GOODPUT_PART_COUNT; i++)
        sum += *(const double*)(const void*)((const char*)g + GOODPUT_PARTS[i].offset);
    return sum;
}

// A run that takes its time from random numbers, in eighths of a second, which a double and three decimals hold.
typedef struct {
    double now, wall_began;
    uint64_t number, step, saved;       // random numbers used; steps done; the newest checkpoint
    double times[400], costs[400];      // of the steps done: when their lines were written, what they took
    Goodput known;
    FILE *events, *metrics;
} Simulation;

static double random_time(Simulation* s, int most) {
    return (1 + (double)(random4(3, RANDOM_TEST, 0, s->number++).bits[0] % (unsigned)most)) / 8;
}

static bool random_one_of(Simulation* s, unsigned n) {
    return random4(3, RANDOM_TEST, 1, s->number++).bits[0] % n == 0;
}

static void simulate_event(Simulation* s, const char* event, const char* more) {
    time_t whole = (time_t)s->now;
    struct tm utc;
    char text[32];
    gmtime_r(&whole, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    fprintf(s->events, "{\"time\": \"%s.%03dZ\",\"event\": \"%s\",\"step\": %llu,\"detail\": \"x\"%s}\n", text,
            (int)((s->now - (double)whole) * 1000), event, (unsigned long long)s->step, more);
}

static void simulate_pause(Simulation* s, const char* event, double* part) {
    double took = random_time(s, 40);
    s->now += took;
    *part += took;
    simulate_event(s, event, text_of(",\"ms\": %.3f", took * 1e3));
}

// Goes back to a step, in a new start of the program or in a rewind: the steps after it count as repeated.
static void simulate_back(Simulation* s, uint64_t to, double* lost_since) {
    uint64_t last = s->step;
    for (uint64_t i = to + 1; i <= last; i++) {
        s->known.repeated += s->costs[i];
        s->known.steps -= s->costs[i];
    }
    s->known.repeated_steps += last - to;
    s->step = to;
    if (last > to)
        simulate_event(s, "cut", text_of(",\"lines\": {\"first\": %llu,\"first_time\": %.3f,\"last\": %llu,"
                                         "\"last_time\": %.3f}", (unsigned long long)to + 1, s->times[to + 1],
                                         (unsigned long long)last, s->times[last]));
    *lost_since = s->now;
}

// One start, of up to `steps` steps; it may be killed, and rewind.
static bool simulate_start(Simulation* s, uint64_t steps, bool first) {
    double setup = random_time(s, 80), since;
    s->now += setup;
    s->known.setup += setup;
    s->known.starts++;
    if (!first) simulate_back(s, s->saved, &since);
    simulate_event(s, first ? "begun" : "resumed", text_of(",\"ms\": %.3f", setup * 1e3));
    while (s->step < steps) {
        double cost = random_time(s, 16);
        s->now += cost;
        if (random_one_of(s, 40) && s->step > s->saved) {  // this step diverges
            double back = random_time(s, 8);
            uint64_t from = ++s->step;
            s->known.repeated += cost;
            s->now += back;
            s->known.setup += back;
            s->step = from - 1;
            simulate_back(s, s->saved, &since);
            uint64_t to = s->step;
            s->step = from;
            simulate_event(s, "rewound", text_of(",\"back\": {\"to\": %llu,\"ms\": %.3f}", (unsigned long long)to,
                                                 back * 1e3));
            s->step = to;
            s->known.rewinds++;
            continue;
        }
        s->step++;
        s->times[s->step] = s->now;
        s->costs[s->step] = cost;
        s->known.steps += cost;
        if (s->step % 10 == 0) {
            simulate_pause(s, "saved", &s->known.saves);
            s->saved = s->step;
        }
        if (s->step % 8 == 0) simulate_pause(s, "validation", &s->known.validation);
        if (s->step % 15 == 0) simulate_pause(s, "sample", &s->known.samples);
        if (random_one_of(s, 50)) return false;
    }
    simulate_event(s, "done", ",\"ms\": 0.000");
    return true;
}

static void simulate(Simulation* s, const char* directory, uint64_t number) {
    memset(s, 0, sizeof *s);
    s->number = number << 32;
    s->now = s->wall_began = 1795341600;
    need(mkdir(directory, 0755) == 0, "%s", directory);
    s->events = fopen(text_of("%s/events.jsonl", directory), "w");
    s->metrics = fopen(text_of("%s/metrics.jsonl", directory), "w");
    need(s->events && s->metrics, "%s", directory);
    simulate_event(s, "start", "");  // of the supervisor
    for (bool first = true; !simulate_start(s, 300, first); first = false) {
        double down = random_time(s, 400);
        simulate_event(s, "slow", "");  // the last that is known
        s->now += down / 2;
        simulate_event(s, "failure", "");
        s->now += down / 2;
        simulate_event(s, "restart", "");
        s->known.down += down;
    }
    s->known.wall = s->now - s->wall_began;
    for (uint64_t i = 1; i <= s->step; i++)
        fprintf(s->metrics, "{\"step\": %llu,\"loss\": 1.5,\"time\": %.3f}\n", (unsigned long long)i, s->times[i]);
    fclose(s->events);
    fclose(s->metrics);
}

static void test_goodput(void) {
    enum { RUNS = 20 };
    static Simulation s;
    Goodput g;
    uint64_t starts = 0, rewinds = 0;
    for (uint64_t i = 0; i < RUNS; i++) {
        char directory[32];
        snprintf(directory, sizeof directory, "simulated_%d", (int)i);
        simulate(&s, directory, i);
        goodput_of(&g, directory);
        for (size_t k = 0; k < GOODPUT_PART_COUNT; k++) {
            double known = *(const double*)(const void*)((const char*)&s.known + GOODPUT_PARTS[k].offset);
            double found = *(const double*)(const void*)((const char*)&g + GOODPUT_PARTS[k].offset);
            expect(fabs(found - known) <= 1e-9 * s.known.wall, "run %d: %s: %.6f s, not %.6f s", (int)i,
                   GOODPUT_PARTS[k].name, found, known);
        }
        expect(g.starts == s.known.starts && g.rewinds == s.known.rewinds &&
                   g.repeated_steps == s.known.repeated_steps, "run %d: %d starts, %d rewinds, %d steps", (int)i,
               (int)g.starts, (int)g.rewinds, (int)g.repeated_steps);
        expect(fabs(g.wall - s.known.wall) <= 1e-9 * g.wall && fabs(parts_sum(&g) - g.wall) <= 1e-12 * g.wall,
               "run %d: wall time %.6f s", (int)i, g.wall);
        starts += g.starts;
        rewinds += g.rewinds;
    }
    expect(starts > 2 * RUNS && rewinds > RUNS, "%d starts, %d rewinds", (int)starts, (int)rewinds);
    verdict("goodput: %d simulated runs, with %d starts and %d rewinds", RUNS, (int)starts, (int)rewinds);
}

#define AT(time) "{\"time\": \"2026-11-22T10:" time "Z\",\"event\": "

// Logs by hand, and their parts in seconds.
static void test_goodput_cases(void) {
    static const struct {
        const char *what, *events, *metrics;
        double steps, repeated, saves, setup, down;
    } cases[] = {
        {"a run in progress", AT("00:10.000") "\"begun\",\"step\": 0,\"ms\": 10000}\n",
         "{\"step\": 1,\"time\": 1795341612}\n{\"step\": 2,\"time\": 1795341614}\n", 4, 0, 0, 10, 0},
        {"a line in four: step 22 was done half-way between the lines of 20 and 24",
         AT("00:00.000") "\"begun\",\"step\": 0,\"ms\": 0}\n" AT("01:00.000")
         "\"cut\",\"step\": 22,\"lines\": {\"first\": 24,\"first_time\": 1795341624.0,\"last\": 28,\"last_time\": "
         "1795341628}}\n" AT("01:00.000") "\"resumed\",\"step\": 22,\"ms\": 2000}\n" AT("01:10.000") "\"done\"}\n",
         "{\"step\": 20,\"time\": 1795341620}\n{\"step\": 24,\"time\": 1795341662}\n", 32, 6, 0, 2, 30},
        {"no line after the checkpoint", AT("00:00.000") "\"begun\",\"step\": 0,\"ms\": 0}\n"
         AT("00:09.000") "\"saved\",\"step\": 9,\"ms\": 1000}\n" AT("01:00.000") "\"resumed\",\"step\": 9,\"ms\": 0}\n",
         "", 8, 0, 1, 0, 51},
        {"an older checkpoint: all of the second start was in vain",
         AT("00:00.000") "\"begun\",\"step\": 0,\"ms\": 0}\n" AT("00:20.000") "\"stopped\",\"step\": 20}\n"
         AT("00:30.000") "\"resumed\",\"step\": 20,\"ms\": 0}\n" AT("00:40.000") "\"failed\",\"step\": 30}\n"
         AT("00:50.000") "\"damaged\",\"step\": 20}\n" AT("00:50.000")
         "\"cut\",\"step\": 10,\"lines\": {\"first\": 11,\"first_time\": 1795341611,\"last\": 30,\"last_time\": "
         "1795341640}}\n" AT("00:50.000") "\"resumed\",\"step\": 10,\"ms\": 0}\n" AT("01:00.000") "\"done\"}\n",
         "{\"step\": 10,\"time\": 1795341610}\n{\"step\": 11,\"time\": 1795341651}\n", 20, 20, 0, 0, 20},
        {"a clock that was set back", AT("00:30.000") "\"begun\",\"step\": 0,\"ms\": 0}\n"
         AT("00:10.000") "\"saved\",\"step\": 1,\"ms\": 9000}\n" AT("00:40.000") "\"done\",\"step\": 9}\n",
         "{\"step\": 1,\"time\": 1795341605}\n", 1, 0, 9, 0, 0},
        {"torn lines",
         "{\"time\": \"2026\n" AT("00:00.000") "\"begun\",\"step\": 0,\"ms\": 0}\n" AT("00:01.000") "\"do",
         "{\"step\": 1,\"time\": 1795341601}\n{\"step\": 2,\"time\": 17953416", 1, 0, 0, 0, 0},
        {"of an earlier version", AT("00:00.000") "\"begun\",\"step\": 0}\n" AT("00:08.000") "\"done\"}\n",
         "{\"step\": 1,\"loss\": 1}\n", 8, 0, 0, 0, 0},
        {"nothing", "", "", 0, 0, 0, 0, 0},
    };
    Goodput g;
    need(mkdir("cases", 0755) == 0, "cases");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_text("cases/events.jsonl", cases[i].events);
        put_text("cases/metrics.jsonl", cases[i].metrics);
        goodput_of(&g, "cases");
        double found[] = {g.steps, g.repeated, g.saves, g.setup, g.down};
        const double* known = &cases[i].steps;
        for (size_t k = 0; k < COUNT_OF(found); k++)
            expect(fabs(found[k] - known[k]) < 1e-6, "%s: %.6f s, not %.6f s, of %s", cases[i].what, found[k],
                   known[k], ((const char*[]){"steps", "repeated", "saves", "setup", "down"})[k]);
        expect(fabs(parts_sum(&g) - g.wall) <= 1e-9 * g.wall, "%s: the sum", cases[i].what);
    }
    verdict("goodput: logs by hand: gaps, older checkpoints, clocks, torn lines");
}

// ------------------------------------------------------------------------------------------------
// 2. Records

#define RUN "--val val.bin --ckpt-every 8 --ckpt-async off --val-every 10 --sample-every 12 --tokens 30 " \
            "--ranks 2 --peak-tflops 0.001 --prompt \"it's \\\"x\\\" \xc3\xa9\" "

// The member `key` of the lines of two files is the same in each, as text up to the member `until`.
static bool files_same(const char* a, const char* b, const char* until) {
    char *texts[2] = {text_read(a, NULL), text_read(b, NULL)}, *rest[2] = {texts[0], texts[1]}, *lines[2];
    bool same = texts[0][0] != 0;
    for (bool more = true; more && same;) {
        for (int i = 0; i < 2; i++) {
            lines[i] = strsep(&rest[i], "\n");
            char* end = lines[i] && until ? strstr(lines[i], until) : NULL;
            if (end) *end = 0;
        }
        more = lines[0] && lines[1];
        same = more ? strcmp(lines[0], lines[1]) == 0 : !lines[0] && !lines[1];
    }
    free(texts[0]);
    free(texts[1]);
    return same;
}

// Each line of ranks.jsonl against the statistics of the same line of metrics.jsonl.
static void expect_ranks(const char* run, size_t world) {
    Lines metrics = lines_read(text_of("%s/metrics.jsonl", run)), ranks = lines_read(text_of("%s/ranks.jsonl", run));
    expect(metrics.count > 0 && ranks.count == metrics.count, "%zu lines, not %zu", ranks.count, metrics.count);
    for (size_t i = 0; i < min_size(ranks.count, metrics.count); i++) {
        const Json *line = &ranks.lines[i], *of = &metrics.lines[i];
        static const struct { const char *key, *least, *most; } keys[] = {
            {"loss", "loss_ranks_min", "loss_ranks_max"}, {"busy_ms", "ms_ranks_min", "ms_ranks_max"},
            {"wait_ms", NULL, NULL}};
        expect(number_of(line, "step") == number_of(of, "step"), "step %g", number_of(line, "step"));
        for (size_t k = 0; k < COUNT_OF(keys); k++) {
            double least = INFINITY, most = -INFINITY;
            expect(json_count(line, json_get(line, 0, keys[k].key)) == world, "%s of all ranks", keys[k].key);
            for (size_t r = 0; r < world; r++) {
                least = fmin(least, element_of(line, keys[k].key, r));
                most = fmax(most, element_of(line, keys[k].key, r));
            }
            bool good = keys[k].least ? least == number_of(of, keys[k].least) && most == number_of(of, keys[k].most)
                                      : least >= 0 && most < 1e4;
            expect(good, "step %g: %s from %g to %g", number_of(of, "step"), keys[k].key, least, most);
        }
        size_t slowest = (size_t)number_of(of, "slowest_rank");
        expect(element_of(line, "busy_ms", slowest) == number_of(of, "ms_ranks_max"), "the slowest rank");
    }
    lines_free(&metrics);
    lines_free(&ranks);
}

// The samples of a run are what it printed, with U+FFFD for what is not UTF-8.
static void expect_samples(const char* run, const char* printed) {
    Lines samples = lines_read(text_of("%s/samples.jsonl", run));
    char* output = text_read(printed, NULL);
    expect(samples.count == 3, "%zu samples", samples.count);
    for (size_t i = 0; i < samples.count; i++) {
        const Json* line = &samples.lines[i];
        const char *prompt = string_of(line, "prompt"), *text = string_of(line, "text"), *at = output;
        expect(strcmp(prompt, "it's \"x\" \xc3\xa9") == 0, "the prompt is %s", prompt);
        expect(number_of(line, "step") == (double)(12 * (i + 1)) && number_of(line, "seed") == 1337, "sample %zu", i);
        for (size_t k = 0; k <= i && at; k++) {
            at = strstr(at, prompt);
            if (at) at += strlen(prompt);
        }
        need(at != NULL, "sample %zu was printed", i);
        while (*text) {
            size_t bytes = utf8_bytes(at);
            bool broken = bytes == 0;
            if (!expect(strncmp(text, broken ? "\xEF\xBF\xBD" : at, broken ? 3 : bytes) == 0, "sample %zu: at %.9s", i,
                        text)) break;
            text += broken ? 3 : bytes;
            at += broken ? 1 : bytes;
        }
        expect(*at == '\n', "sample %zu: the text ends early", i);
    }
    free(output);
    lines_free(&samples);
}

// The starts of the run that was killed twice: steps, times, and what is known of flags and model.
static void expect_starts(const char* run, double began, double ended) {
    static const double first[] = {1, 9, 25};
    Lines starts = lines_read(text_of("%s/run.jsonl", run)), metrics = lines_read(text_of("%s/metrics.jsonl", run));
    expect(starts.count == 3, "%zu starts", starts.count);
    double before = began;
    for (size_t i = 0; i < starts.count; i++) {
        const Json *s = &starts.lines[i], *m = &metrics.lines[10];
        char flag[256] = "", host[256] = "", own[256] = "";
        static const struct { const char* key; double value; } numbers[] = {
            {"layers", 1}, {"heads", 2}, {"kv_heads", 2}, {"channels", 16}, {"seq", 16}, {"vocab", 256}, {"ranks", 2},
            {"dp", 2}, {"tp", 1}, {"pp", 1}, {"cp", 1}, {"zero", 0}, {"batch", 2}, {"total_batch", 64}, {"steps", 40},
            {"floor", 2.625}};
        for (size_t k = 0; k < COUNT_OF(numbers); k++)
            expect(number_of(s, numbers[k].key) == numbers[k].value, "%s is %g", numbers[k].key,
                   number_of(s, numbers[k].key));
        expect(number_of(s, "step") == first[i], "start %zu at step %g", i, number_of(s, "step"));
        double time = number_of(s, "time");
        expect(time >= before - 0.002 && time <= ended, "start %zu at %.3f", i, time);
        before = time;
        // mfu = operations of a token * tokens per second / peak of all ranks
        double flops = number_of(m, "mfu") * 1e9 * 2 / number_of(m, "tok_per_s");
        expect(fabs(number_of(s, "flops_per_token") / flops - 1) < 1e-9, "%g FLOPs", number_of(s, "flops_per_token"));
        // 256 rows of tokens and 16 positions; q, k, v, o, two of the feed-forward with biases; three layernorms
        double parameters = (256 + 16) * 16 + (12 * 16 * 16 + 13 * 16) + 2 * 16 - 4 * 16 + 4 * 16;
        expect(number_of(s, "parameters") == parameters && number_of(s, "trained") == parameters, "%g parameters",
               number_of(s, "parameters"));
        expect(strcmp(string_of(s, "family"), "gpt2") == 0 && strcmp(string_of(s, "precision"), "fp32") == 0 &&
                   strcmp(string_of(s, "data"), "train.bin") == 0 && string_of(s, "device")[0] &&
                   string_of(s, "version")[0], "family, precision, data, device, version");
        uint32_t flags = json_get(s, 0, "flags");
        expect(json_string(s, json_get(s, flags, "ckpt-every"), flag, sizeof flag) && strcmp(flag, "8") == 0 &&
                   json_get(s, flags, "lr") == JSON_NONE && (json_get(s, flags, "resume") != JSON_NONE) == (i > 0),
               "the flags that were given");
        gethostname(own, sizeof own - 1);
        uint32_t hosts = json_get(s, 0, "hosts");
        expect(json_count(s, hosts) == 1 && json_string(s, json_first(s, hosts), host, sizeof host) &&
                   strcmp(own, host) == 0, "the host is %s", host);
        put_text("command", text_of("printf '%%s\\n' %s", string_of(s, "command")));
        expect(system("sh command > words") == 0 && text_has("words", "\n--prompt\nit's \"x\" \xc3\xa9\n") &&
                   text_has("words", "\n--data\ntrain.bin\n"), "the command for a shell: %s", string_of(s, "command"));
    }
    lines_free(&starts);
    lines_free(&metrics);
}

// The parts of a real run, against the clock of this test.
static void expect_goodput(const char* run, double began, double ended, double down) {
    Goodput g;
    double ms = 0, pauses[2] = {0};
    goodput_of(&g, run);
    expect(fabs(parts_sum(&g) - g.wall) <= 1e-9 * g.wall, "the parts are %.9f s, not %.9f s", parts_sum(&g), g.wall);
    expect(g.wall > 0 && g.wall < ended - began + 0.002, "wall time %.3f s of %.3f s", g.wall, ended - began);
    expect(g.down >= down && g.setup > 0 && g.saves > 0, "down %.3f s of %.3f s, set-up %.3f s, saves %.3f s", g.down,
           down, g.setup, g.saves);
    Lines metrics = lines_read(text_of("%s/metrics.jsonl", run)), events = lines_read(text_of("%s/events.jsonl", run));
    for (size_t i = 0; i < metrics.count; i++) ms += number_of(&metrics.lines[i], "ms");
    for (size_t i = 0; i < events.count; i++)
        for (int k = 0; k < 2; k++)
            if (strcmp(string_of(&events.lines[i], "event"), k ? "sample" : "validation") == 0)
                pauses[k] += number_of(&events.lines[i], "ms");
    expect(g.steps > 1e-3 * ms - 0.01 && ms > 0, "steps: %.3f s of %.3f s", g.steps, 1e-3 * ms);
    expect(fabs(g.validation - 1e-3 * pauses[0]) < 1e-6 && fabs(g.samples - 1e-3 * pauses[1]) < 1e-6 &&
               pauses[0] > 0 && pauses[1] > 0, "validation %.6f s, samples %.6f s", g.validation, g.samples);
    bool steps = g.repeated_steps == 6 || g.repeated_steps == 7;  // rank 0 may log a step in which rank 1 is killed
    expect(g.starts == 3 && g.repeated > 0 && steps, "%d starts, %.3f s for %d repeated steps",
           (int)g.starts, g.repeated, (int)g.repeated_steps);
    lines_free(&metrics);
    lines_free(&events);
}

static double unix_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void test_records(void) {
    need(train("", RUN "--out whole --steps 40") == 0, "a run");
    need(rename("output", "printed") == 0, "its output");
    double began = unix_now();
    expect(train("rank 1 step 13 at update do kill", RUN "--out killed --steps 40") != 0, "it is not killed");
    sleep_ms(200);
    expect(train("rank 0 step 27 at load do kill", RUN "--out killed --steps 40 --resume") != 0, "it is not killed");
    sleep_ms(200);
    expect(train("", RUN "--out killed --steps 40 --resume") == 0, "it fails");
    double ended = unix_now();
    expect(files_same("whole/metrics.jsonl", "killed/metrics.jsonl", "\"ms\""), "other metrics");
    expect(files_same("whole/ranks.jsonl", "killed/ranks.jsonl", "\"busy_ms\""), "other losses of ranks");
    expect(files_same("whole/samples.jsonl", "killed/samples.jsonl", NULL), "other samples");
    verdict("records: a run that was killed twice has the lines of one that was not");
    expect_ranks("whole", 2);
    expect_ranks("killed", 2);
    verdict("ranks.jsonl: a number for each rank, of which metrics.jsonl has the statistics");
    expect_samples("whole", "printed");
    verdict("samples.jsonl: what was printed, also where it is not UTF-8");
    expect_starts("killed", began, ended);
    verdict("run.jsonl: a line for each start");
    expect_goodput("killed", began, ended, 0.4);
    verdict("goodput: the run that was killed twice");

    Lines metrics = lines_read("killed/metrics.jsonl");
    double before = began;
    for (size_t i = 0; i < metrics.count; i++) {
        double time = number_of(&metrics.lines[i], "time");
        expect(time >= before - 0.002 && time < ended && fabs(time * 1e3 - rint(time * 1e3)) < 1e-3, "%.6f", time);
        before = time;
    }
    lines_free(&metrics);
    verdict("metrics.jsonl: time increases from line to line, in milliseconds");
}

static void test_rewinds(void) {
    Goodput g;
    int code = train("", "--out back --ranks 2 --ckpt-every 1 --clip 0 --spike-skip 1.02 --spike-warmup 2 "
                     "--diverged-after 1 --rewind 3 --steps 60");
    char* events = text_read("back/events.jsonl", NULL);
    size_t rewinds = count_in(events, "\"event\": \"rewound\"");
    free(events);
    expect(code == 1 && rewinds > 0, "code %d, %zu rewinds", code, rewinds);
    expect_ranks("back", 2);
    goodput_of(&g, "back");
    expect(g.rewinds == rewinds && g.starts == 1 && g.repeated > 0 && g.steps > 0 && g.down == 0 &&
               fabs(parts_sum(&g) - g.wall) <= 1e-9 * g.wall, "%d rewinds, repeated %.3f s, steps %.3f s",
           (int)g.rewinds, g.repeated, g.steps);
    verdict("a run that rewinds: its lines, and its goodput");
}

// What cannot be written is reported once, and training continues; alone, a rank has no ranks.jsonl.
static void test_refused(void) {
    need(mkdir("bad", 0755) == 0 && symlink("nowhere/x", "bad/ranks.jsonl") == 0 &&
             symlink("nowhere/x", "bad/samples.jsonl") == 0, "links to a directory that is not there");
    int code = train("", "--out bad --ranks 2 --steps 6 --sample-every 2 --tokens 4");
    char* errors = text_read("errors", NULL);
    expect(code == 0 && count_in(errors, "bad/ranks.jsonl") == 1 && count_in(errors, "bad/samples.jsonl") == 1 &&
               count_in(errors, "Training continues\n") == count_in(errors, "\n"), "code %d: %s", code, errors);
    free(errors);
    need(mkdir("worse", 0755) == 0 && mkdir("worse/ranks.jsonl", 0755) == 0, "worse");
    expect(train("", "--out worse --ranks 2 --steps 6") == 1 && text_has("errors", "worse/ranks.jsonl is not a file"),
           "a directory in place of the file");
    code = train("", "--out alone --steps 3");
    expect(code == 0 && !file_exists("alone/ranks.jsonl") && !file_exists("alone/samples.jsonl") &&
           text_has("alone/events.jsonl", "\"1 rank, --zero 0"), "code %d", code);
    verdict("files that cannot be written: reported, and training continues");
}

// ------------------------------------------------------------------------------------------------
// 3. Columns

static void test_clip(void) {
    double norm[40], clip[40], skipped[40], before = 0;
    need(train("", "--out clip --steps 40 --clip 0.7 --spike-sigma 0 --spike-skip 1.1 --spike-warmup 8 "
               "--spike-trace 0 --lr 0.05 --warmup 2") == 0, "a run");
    size_t lines = log_numbers(norm, 40, "clip", "grad_norm"), clips = 0, ones = 0;
    expect(lines == 40 && log_numbers(clip, 40, "clip", "clip") == 40 &&
               log_numbers(skipped, 40, "clip", "skipped") == 40, "%zu lines", lines);
    for (size_t i = 0; i < lines; i++) {
        double factor = skipped[i] > before ? 0 : norm[i] > 0.7 ? 0.7 / norm[i] : 1;
        expect(fabs(clip[i] - factor) < 1e-12, "step %zu: clip %g, norm %g", i + 1, clip[i], norm[i]);
        clips += factor > 0 && factor < 1;
        ones += factor == 1;
        before = skipped[i];
    }
    expect(clips > 0 && ones > 0 && before > 0, "%zu clipped, %zu not, %g skipped", clips, ones, before);
    verdict("clip: %zu steps are clipped, %zu are not, %g are skipped", clips, ones, before);
}

static void test_load(void) {
    double load[8], ms[8], time[8];
    need(train("rank 0 step 5 at load do delay 30", "--out load --ranks 2 --total-batch 128 --steps 8 --log-every 2")
         == 0, "a run");  // two micro-batches on each rank
    expect(log_numbers(load, 8, "load", "load_ms") == 4 && log_numbers(ms, 8, "load", "ms") == 4 &&
               log_numbers(time, 8, "load", "time") == 4, "4 lines");
    for (size_t i = 0; i < 4; i++) {
        expect(load[i] > 0 && (i < 2 ? load[i] < 60 : load[i] >= 60 && ms[i] > 60), "line %zu: %g ms", i, load[i]);
        double passed = i > 0 ? time[i] - time[i - 1] : INFINITY;
        expect(2 * load[i] < 1e3 * passed + 2, "line %zu: twice %g ms in %g s", i, load[i], passed);
    }
    Lines ranks = lines_read("load/ranks.jsonl");
    for (size_t i = 2; i < ranks.count; i++)
        expect(element_of(&ranks.lines[i], "busy_ms", 0) >= 60 && element_of(&ranks.lines[i], "wait_ms", 1) > 40,
               "line %zu: rank 0 takes %g ms, rank 1 waits %g ms", i, element_of(&ranks.lines[i], "busy_ms", 0),
               element_of(&ranks.lines[i], "wait_ms", 1));
    lines_free(&ranks);
    verdict("load_ms: a loader that is slow from step 5 on; rank 1 waits for it");
}

// ------------------------------------------------------------------------------------------------
// 4. Prometheus

typedef struct {
    char name[64], label[256];
    double value;
} Sample;

// Reads the text format: HELP, TYPE and a sample of each metric. Returns how many there are; 0: it is not valid.
static size_t prometheus_read(Sample* samples, size_t most, const char* path) {
    size_t bytes, count = 0;
    char *text = text_read(path, &bytes), *line = text, name[64], kind[16];
    bool good = bytes > 0 && text[bytes - 1] == '\n' && strlen(text) == bytes;
    for (char* end; good && count < most && *line; count++) {
        Sample* s = &samples[count];
        int at = 0;
        for (int part = 0; good && part < 3; part++, line = end + 1) {
            end = strchr(line, '\n');
            if (!(good = end != NULL)) break;
            *end = 0;
            if (part == 0) good = sscanf(line, "# HELP llmtrain_%63[a-z_] %n", s->name, &at) == 1 && line[at] != 0;
            if (part == 1) good = sscanf(line, "# TYPE llmtrain_%63[a-z_] %15[a-z]%n", name, kind, &at) == 2 &&
                                  line[at] == 0 && strcmp(name, s->name) == 0 &&
                                  strcmp(kind, strstr(name, "_total") ? "counter" : "gauge") == 0;
            if (part < 2) continue;
            char *quote, *out = s->label;
            good = sscanf(line, "llmtrain_%63[a-z_]{run=\"%n", name, &at) == 1 && at > 0 && strcmp(name, s->name) == 0;
            for (quote = line + at; good && *quote && *quote != '"'; quote++) {
                if (*quote == '\\' && *++quote == 'n') *quote = '\n';
                *out++ = *quote;
            }
            *out = 0;
            s->value = good ? strtod(quote + 3, &quote) : NAN;
            good = good && *quote == 0;
        }
    }
    free(text);
    return good ? count : 0;
}

static double sample_of(const Sample* samples, size_t count, const char* name) {
    for (size_t i = 0; i < count; i++) if (strcmp(samples[i].name, name) == 0) return samples[i].value;
    return NAN;
}

#define ODD "a\"b\\c\nd\xff"  // the label is its last part; the last byte is not UTF-8

static void test_prometheus(void) {
    static Sample samples[64];
    static const struct { const char *name, *key; double factor; } metrics[] = {
        {"step", "step", 1}, {"loss", "loss", 1}, {"val_loss", "val_loss", 1}, {"grad_norm", "grad_norm", 1},
        {"clip_factor", "clip", 1}, {"lr", "lr", 1}, {"tokens_total", "tokens", 1}, {"epoch", "epoch", 1},
        {"skipped_total", "skipped", 1}, {"step_seconds", "ms", 1e-3}, {"load_seconds", "load_ms", 1e-3},
        {"tokens_per_second", "tok_per_s", 1}, {"mfu", "mfu", 1}, {"memory_bytes", "mem_bytes", 1},
        {"wait_share", "wait_share", 1}, {"slowest_rank", "slowest_rank", 1}, {"last_step_seconds", "time", 1}};
    size_t reads = 0, bad = 0, count = 0;
    double step = 0;
    Words w = {.count = 0};
    Program p;
    words_add(&w, text_of("%s --data train.bin --val val.bin --val-every 50 --ckpt-every 50 --layers 1 --heads 2 "
                          "--channels 16 --seq 16 --batch 2 --threads 1 --ranks 2 --steps 300 --peak-tflops 1 "
                          "--prometheus x.prom --out", train_program));
    words_put(&w, w.count, "runs/" ODD "/", strlen("runs/" ODD "/"));
    need(mkdir("runs", 0755) == 0, "runs");
    program_start(&p, w.words, NULL, NULL);
    while (programs_run(&p, 1, PROGRAM_MS)) {
        if (!file_exists("x.prom")) continue;
        count = prometheus_read(samples, COUNT_OF(samples), "x.prom");
        reads++;
        double now = sample_of(samples, count, "step");
        bad += count < 20 || !(now >= step);
        step = now;
    }
    expect(program_good(&p), "it fails: %s", p.text[1]);
    program_free(&p);
    expect(reads > 20 && bad == 0, "%zu of %zu reads are not whole", bad, reads);
    count = prometheus_read(samples, COUNT_OF(samples), "x.prom");
    Lines log = lines_read("runs/" ODD "/metrics.jsonl");
    need(log.count == 300, "the log");
    for (size_t i = 0; i < COUNT_OF(metrics); i++) {
        double value = sample_of(samples, count, metrics[i].name);
        double known = number_of(&log.lines[299], metrics[i].key) * metrics[i].factor;
        expect(fabs(value - known) <= 1e-14 * fabs(known), "%s is %.17g, not %.17g", metrics[i].name, value, known);
    }
    for (size_t i = 0; i < count; i++)
        expect(strcmp(samples[i].label, "a\"b\\c\nd?") == 0, "the label is %s", samples[i].label);
    expect(sample_of(samples, count, "steps") == 300 && sample_of(samples, count, "ranks") == 2 &&
               sample_of(samples, count, "restarts_total") == 0 && sample_of(samples, count, "rewinds_total") == 0 &&
               sample_of(samples, count, "seconds_left") == 0 && sample_of(samples, count, "entropy_floor") == 2.625,
           "steps, ranks, restarts, rewinds");
    expect(fabs(sample_of(samples, count, "last_save_seconds") - sample_of(samples, count, "last_step_seconds")) < 10,
           "the last save");
    lines_free(&log);
    expect(directory_count(".", "x.prom") == 1, "a temporary file is left");
    verdict("prometheus: %zu metrics, whole in each read while the file is written", count);
    expect(train("", RUN "--out killed --resume --steps 41 --prometheus x.prom") == 0, "it fails");
    count = prometheus_read(samples, COUNT_OF(samples), "x.prom");
    expect(sample_of(samples, count, "restarts_total") == 3 && sample_of(samples, count, "step") == 41, "%g restarts",
           sample_of(samples, count, "restarts_total"));
    int code = train("", "--out alone --resume --steps 9 --prometheus nowhere/x.prom");
    char* errors = text_read("errors", NULL);
    expect(code == 0 && count_in(errors, "nowhere/x.prom.tmp") == 1 && count_in(errors, "\n") == 1, "%d: %s", code,
           errors);
    free(errors);
    expect(train("", "--prometheus x.prom") == 2 && text_has("errors", "--prometheus needs --out"), "without --out");
    verdict("prometheus: restarts; a directory that is not there is reported once; it needs --out");
}

// ------------------------------------------------------------------------------------------------
// 5. Documents

// Whether a section of the page has a key, or its last words after the key of a row: `loss_ranks_min`, `_median`.
static bool is_documented(const char* section, const char* key) {
    if (strstr(section, text_of("`%s`", key))) return true;
    for (const char* at = key; (at = strchr(at, '_')) != NULL; at++)
        if (strstr(section, text_of("`%s`", at))) return true;
    return false;
}

static void expect_documented(const char* heading, const char* path) {
    char *page = text_read(formats, NULL), *begin = strstr(page, text_of("\n## %s\n", heading));
    need(begin != NULL, "%s in %s", heading, formats);
    char* end = strstr(begin + 4, "\n## ");
    if (end) *end = 0;
    Lines lines = lines_read(path);
    for (size_t i = 0; i < lines.count; i++) {
        const Json* line = &lines.lines[i];
        for (uint32_t m = json_first(line, 0); m != JSON_NONE; m = json_next(line, m)) {
            bool of_config = strcmp(heading, "run.jsonl") == 0;
            if (end && of_config) *end = '\n';  // its keys of the configuration are in the section of checkpoints
            expect(is_documented(of_config ? page : begin, json_key(line, m)), "%s: %s is not documented", path,
                   json_key(line, m));
        }
    }
    lines_free(&lines);
    free(page);
}

static void test_documents(void) {
    static Sample samples[64];
    expect_documented("metrics.jsonl", "whole/metrics.jsonl");
    expect_documented("events.jsonl", "killed/events.jsonl");
    expect_documented("events.jsonl", "back/events.jsonl");
    expect_documented("ranks.jsonl and samples.jsonl", "whole/ranks.jsonl");
    expect_documented("ranks.jsonl and samples.jsonl", "whole/samples.jsonl");
    expect_documented("run.jsonl", "killed/run.jsonl");
    char *page = text_read(formats, NULL), *section = strstr(page, "\n## The file of --prometheus\n");
    need(section != NULL, "metrics in %s", formats);
    *strstr(section + 4, "\n## ") = 0;
    size_t count = prometheus_read(samples, COUNT_OF(samples), "x.prom");
    for (size_t i = 0; i < count; i++)
        expect(strstr(section, text_of("`llmtrain_%s`", samples[i].name)) != NULL, "%s is not documented",
               samples[i].name);
    expect(count_in(section, "`llmtrain_") == count, "%zu metrics are documented, not %zu",
           count_in(section, "`llmtrain_"), count);
    free(page);
    verdict("documents: every key and metric is in doc/formats.md");
}

int main(int argc, char** argv) {
    tests_begin("test_facts");
    need(argc == 3 && strcmp(argv[1], "--train") == 0 && realpath(argv[2], train_program), "give --train PROGRAM");
    need(realpath("doc/formats.md", formats) != NULL, "run it in the root of the checkout");
    environment_clear();
    root_enter();
    put_shard("train.bin", 256, 20000, 1);
    put_shard("val.bin", 256, 2000, 2);
    double entropy = 2.625;
    patch("val.bin", 24, &entropy, sizeof entropy);
    test_goodput();
    test_goodput_cases();
    test_records();
    test_rewinds();
    test_refused();
    test_clip();
    test_load();
    test_prometheus();
    test_documents();
    return tests_end();
}
