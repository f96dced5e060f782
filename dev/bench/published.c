// published.c: are published training runs as fast as tools/cluster.h predicts, and do they take the memory?
//
//   make plan-published      build/published --points dev/bench/published.txt --table doc/published.md
//                            --plot doc/published.svg
//
// Fits the constants of ClusterFit to every second run of the first part of the file; the others, and the runs of the
// second part, are held out. Prints what is predicted for each run. Exit code 1 if the runs of the first part that are
// held out are off by more than 10% on average or one by more than 25%, or if the constants of CLUSTER_FIT are worse
// than the fitted ones, by more than a hundredth of what is minimized.

#define PRECISION_BF16

#include "llmtrain/base/flags.h"
#include "tools/cluster.h"
#include "dev/test/harness.h"

enum { POINTS = 128, STARTS = 2, CONSTANTS = sizeof(ClusterFit) / sizeof(double) };
static const char* const CONSTANT_NAMES[CONSTANTS] = {"gemm", "hopper", "edge", "attention", "memory", "link", "tensor",
                                                      "data", "power"};
// Limits of the constants: what would make sense.
static const double LOW[CONSTANTS] = {0.5, 0.4, 20, 0.2, 0.3, 0.5, 0.3, 0.02, 0.2};
static const double HIGH[CONSTANTS] = {0.95, 0.9, 400, 1, 0.9, 0.9, 1, 0.6, 0.8};

typedef enum { PART_RUNS, PART_MORE, PART_MEMORY } Part;

typedef struct {
    char name[96], source[160], unit[32];
    Part part;
    bool fitted;
    Cluster cluster;
    ClusterModel model;
    ClusterLayout layout;
    size_t gpus;
    bool chooses_B, chooses_chunks;         // the source does not say how many: those that are predicted to be best
    double reported, published_ms, memory;  // GiB; 0: not published
    ClusterStep step;                       // predicted
} Point;

static Point points[POINTS];
static size_t point_count;

// Sets one "key=value" of the GPUs, the layout or the program.
static void point_set(Point* p, const char* key, const char* value) {
    double x = atof(value);
    size_t n = (size_t)x;
    Error error;
    struct { const char* name; size_t* to; } sizes[] = {
        {"gpus", &p->gpus}, {"pod", &p->cluster.pod}, {"T", &p->model.T}, {"sequences", &p->model.sequences},
        {"tp", &p->layout.tp}, {"cp", &p->layout.cp}, {"pp", &p->layout.pp}, {"chunks", &p->layout.chunks},
        {"B", &p->layout.B}, {"zero", &p->layout.zero}, {"shard", &p->layout.shard}};
    struct { const char* name; double* to; } reals[] = {
        {"watts", &p->cluster.watts}, {"network", &p->cluster.network}, {"bandwidth", &p->cluster.gpu.memory},
        {"memory", &p->memory}, {"oversubscription", &p->cluster.oversubscription}, {"logits", &p->model.logit_bytes},
        {"kept", &p->model.kept_bytes}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        if (strcmp(key, sizes[i].name) == 0) *sizes[i].to = n, key = "";
    for (size_t i = 0; i < COUNT_OF(reals); i++)
        if (strcmp(key, reals[i].name) == 0) *reals[i].to = x, key = "";
    if (strcmp(key, "gpu") == 0) need(cluster_open(&p->cluster, value, &error), "%s", error.text), key = "";
    if (strcmp(key, "kind") == 0) p->layout.kind = (PipelineKind)choice_find(PIPELINE_NAMES, value), key = "";
    if (strcmp(key, "recompute") == 0)
        p->layout.recompute = (RecomputeLevel)choice_find(RECOMPUTE_NAMES, value), key = "";
    if (strcmp(key, "scores") == 0) p->model.scores = value[0] == 's' ? SCORES_STORED : SCORES_AGAIN, key = "";
    if (strcmp(key, "rows") == 0) p->model.whole_rows = true, key = "";
    if (strcmp(key, "dp") == 0) p->model.dp_waits = true, key = "";
    if (strcmp(key, "parallel") == 0) p->model.parallel = true, key = "";
    if (strcmp(key, "tp-overlaps") == 0) p->model.tp_overlaps = true, key = "";
    need(key[0] == 0, "%s: unknown key %s", p->name, key);
}

static void point_set_all(Point* p, const char* text) {
    char key[32], value[32];
    for (int length; sscanf(text, " %31[^= ]=%31s%n", key, value, &length) == 2; text += length)
        point_set(p, key, value);
}

// The time of a published step.
static double point_published_ms(const Point* p) {
    const Config* c = &p->model.config;
    double tokens = (double)(p->model.sequences * p->model.T), gpus = (double)p->gpus;
    double heads = (double)(c->heads * config_head_size(c)) * (double)p->model.T * (double)c->layers;
    double blocks = (double)c->layers * cluster_block_parameters(c), head = (double)(c->vocab * c->channels);
    if (strcmp(p->unit, "tokens") == 0) return 1e3 * tokens / (p->reported * gpus);
    if (strcmp(p->unit, "seconds") == 0) return 1e3 * p->reported;
    if (strcmp(p->unit, "tflops") == 0)
        return 1e-9 * 6 * tokens * (blocks + 2 * heads + head) / (p->reported * gpus);
    if (strcmp(p->unit, "tflops-recomputed") == 0)
        return 1e-9 * tokens * (8 * (blocks + 2 * heads) + 6 * head) / (p->reported * gpus);
    need(strcmp(p->unit, "mfu") == 0 || p->part == PART_MEMORY, "%s: unknown unit %s", p->name, p->unit);
    return 1e-9 * 6 * tokens * (blocks + 2 * heads + head) / (0.01 * p->reported * p->cluster.gpu.bf16 * gpus);
}

static void points_read(const char* path) {
    char* text = text_read(path, NULL);
    Part part = PART_RUNS;
    size_t in_part = 0;
    Error error;
    for (char* line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char gpus[128], model[256], layout[256], reported[96];
        if (strncmp(line, "# ---- ", 7) == 0) {
            part = strstr(line, "More") ? PART_MORE : strstr(line, "Memory") ? PART_MEMORY : PART_RUNS;
            in_part = 0;
        }
        if (line[0] == '#') continue;
        Point* p = &points[point_count++];
        need(point_count <= POINTS, "too many points");
        memset(p, 0, sizeof *p);
        need(sscanf(line, "%95[^|]| %127[^|]| %255[^|]| %255[^|]| %95[^|]| %159[^\n]", p->name, gpus, model, layout,
                    reported, p->source) == 6, "%s", line);
        p->name[strcspn(p->name, "|") - 1] = 0;
        p->part = part;
        p->fitted = part == PART_RUNS && in_part++ % 2 == 0;
        p->layout.tp = p->layout.cp = p->layout.pp = p->layout.chunks = 1;
        point_set_all(p, gpus);
        p->cluster.gpu.memory_gb = p->memory > 0 ? p->memory : p->cluster.gpu.memory_gb;
        p->memory = 0;
        need(config_set(&p->model.config, model, &error) && config_complete(&p->model.config, &error), "%s: %s",
             p->name, error.text);
        point_set_all(p, layout);
        int length;
        need(sscanf(reported, "%lf %31s%n", &p->reported, p->unit, &length) == 2, "%s: %s", p->name, reported);
        point_set_all(p, reported + length);
        p->layout.dp = p->gpus / (p->layout.tp * p->layout.cp * p->layout.pp);
        p->chooses_B = p->layout.B == 0;
        p->chooses_chunks = p->layout.chunks == 0;
        size_t B = max_size(1, p->layout.B);
        need(p->layout.dp * p->layout.tp * p->layout.cp * p->layout.pp == p->gpus &&
             p->model.sequences % (p->layout.dp * B) == 0, "%s: does not divide", p->name);
        if (part != PART_MEMORY) p->published_ms = point_published_ms(p);
    }
    free(text);
}

static void point_predict(Point* p, const ClusterFit* f) {
    Error error;
    need(cluster_predict(&p->step, &p->cluster, f, &p->model, &p->layout, true, &error), "%s: %s", p->name, error.text);
}

// Chooses what the source does not say: the fastest that fits the GPU.
static void point_choose(Point* p, const ClusterFit* f) {
    ClusterLayout best = p->layout;
    double best_ms = INFINITY;
    size_t B = p->chooses_B ? 1 : p->layout.B, first = p->chooses_chunks ? 1 : p->layout.chunks;
    size_t B_end = p->chooses_B ? 16 : B, end = p->chooses_chunks ? 8 : first;
    for (; B <= B_end; B++)
        for (size_t chunks = first; chunks <= end; chunks++) {
            if (p->model.sequences % (p->layout.dp * B)) continue;
            if (p->chooses_chunks && p->model.config.layers % (chunks * p->layout.pp)) continue;
            p->layout.B = B, p->layout.chunks = chunks;
            point_predict(p, f);
            bool fits = p->step.bytes <= 1e9 * p->cluster.gpu.memory_gb;
            if (fits && p->step.ms < best_ms) best_ms = p->step.ms, best = p->layout;
        }
    if (p->chooses_B || p->chooses_chunks) need(best_ms < INFINITY, "%s: nothing fits", p->name);
    p->layout = best;
}

// Of the time: positive where the prediction is too slow.
static double point_error(const Point* p) { return p->step.ms / p->published_ms - 1; }

// What is minimized: the mean of |error|, and a little of its square, of the runs that are fitted.
static double fit_loss(const double* x) {
    ClusterFit f;
    double sum = 0, count = 0;
    memcpy(&f, x, sizeof f);
    for (size_t i = 0; i < point_count; i++) {
        if (!points[i].fitted) continue;
        point_predict(&points[i], &f);
        double e = log(points[i].step.ms / points[i].published_ms);
        sum += fabs(e) + 3 * e * e;
        count++;
    }
    return sum / count;
}

// Coordinate by coordinate, with steps that shrink.
static double fit_from(double* x) {
    double best = fit_loss(x);
    for (double step = 0.15; step > 0.01; step /= 2)
        for (int again = 0; again < 3; again++) {
            double before = best;
            for (int i = 0; i < CONSTANTS; i++)
                for (int sign = -1; sign <= 1; sign += 2) {
                    double kept = x[i];
                    x[i] = fmin(HIGH[i], fmax(LOW[i], x[i] * (1 + sign * step)));
                    double loss = fit_loss(x);
                    if (loss < best) best = loss;
                    else x[i] = kept;
                }
            if (before - best < 1e-5) break;
        }
    return best;
}

// From several points, so that the result does not depend on where the fit begins.
static double fit(double* x) {
    double start[CONSTANTS], best = fit_from(x);
    for (uint64_t n = 1; n <= STARTS; n++) {
        for (uint64_t i = 0; i < CONSTANTS; i++)
            start[i] = LOW[i] + (HIGH[i] - LOW[i]) * (double)random_uniform(n, RANDOM_TEST, 0, i);
        double loss = fit_from(start);
        if (loss < best) best = loss, memcpy(x, start, sizeof start);
    }
    return best;
}

typedef struct { size_t count; double mean, worst, mean_rate, worst_rate; } Errors;  // of the time, of 1 / time

static Errors errors_of(Part part, bool fitted) {
    Errors e = {0, 0, 0, 0, 0};
    for (size_t i = 0; i < point_count; i++) {
        const Point* p = &points[i];
        if (p->part != part || p->fitted != fitted) continue;
        e.mean += fabs(point_error(p));
        e.worst = fmax(e.worst, fabs(point_error(p)));
        e.mean_rate += fabs(p->published_ms / p->step.ms - 1);
        e.worst_rate = fmax(e.worst_rate, fabs(p->published_ms / p->step.ms - 1));
        e.count++;
    }
    e.mean /= (double)e.count;
    e.mean_rate /= (double)e.count;
    return e;
}

// Model TFLOP/s of a GPU, attention counted whole.
static double point_tflops(const Point* p, double ms) {
    const Config* c = &p->model.config;
    double tokens = (double)(p->model.sequences * p->model.T), L = (double)c->layers;
    double heads = 2 * (double)(c->heads * config_head_size(c)) * (double)p->model.T;
    double weights = L * (cluster_block_parameters(c) + heads) + (double)(c->vocab * c->channels);
    return 1e-9 * 6 * tokens * weights / (ms * (double)p->gpus);
}

static const char* point_use(const Point* p) {
    return p->part == PART_MORE ? "held out, more" : p->fitted ? "fitted" : "held out";
}

static void write_table(const char* path, const ClusterFit* f) {
    FILE* out = fopen(path, "wbe");
    need(out != NULL, "%s", path);
    fprintf(out, "# Published runs, and what the planner predicts\n\nWritten by `make plan-published` from "
            "dev/bench/published.txt, which has sources, layouts and what was left\nout. [planner.md](planner.md) says "
            "what is modeled. TFLOP/s of a GPU count attention without its causal half.\n\n"
            "| run | GPUs | TFLOP/s published | predicted | time | use | bubble | tp | cp | dp | recomputed |\n"
            "|--|--|--|--|--|--|--|--|--|--|--|\n");
    for (const Point* p = points; p < points + point_count; p++) {
        const ClusterStep* s = &p->step;
        if (p->part == PART_MEMORY) continue;
        double share = 100 / s->ms;
        fprintf(out, "| %s | %zu | %.0f | %.0f | %+.1f%% | %s | %.1f%% | %.1f%% | %.1f%% | %.1f%% | %.1f%% |\n",
                p->name, p->gpus, point_tflops(p, p->published_ms), point_tflops(p, s->ms), 100 * point_error(p),
                point_use(p), share * s->bubble_ms, share * s->tp_ms, share * s->cp_ms, share * s->dp_ms,
                share * s->recompute_ms);
    }
    fprintf(out, "\n| runs | number | mean error of the time | largest | mean error of the rate | largest |\n"
            "|--|--|--|--|--|--|\n");
    for (int i = 0; i < 3; i++) {
        static const char* const names[] = {"fitted", "held out", "held out, more"};
        Errors e = errors_of(i == 2 ? PART_MORE : PART_RUNS, i == 0);
        fprintf(out, "| %s | %zu | %.1f%% | %.1f%% | %.1f%% | %.1f%% |\n", names[i], e.count, 100 * e.mean,
                100 * e.worst, 100 * e.mean_rate, 100 * e.worst_rate);
    }
    fprintf(out, "\n| memory of a GPU | GiB published | predicted | error |\n|--|--|--|--|\n");
    for (const Point* p = points; p < points + point_count; p++)
        if (p->memory > 0)
            fprintf(out, "| %s | %.1f | %.1f | %+.1f%% |\n", p->name, p->memory, p->step.bytes / 0x1p30,
                    100 * (p->step.bytes / 0x1p30 / p->memory - 1));
    fprintf(out, "\nConstants: ");
    double x[CONSTANTS];
    memcpy(x, f, sizeof x);
    for (int i = 0; i < CONSTANTS; i++)
        fprintf(out, "%s %.3g%s", CONSTANT_NAMES[i], x[i], i + 1 < CONSTANTS ? ", " : ".\n");
    need(fclose(out) == 0, "%s", path);
}

// Predicted against published TFLOP/s.
static void write_plot(const char* path) {
    static const char* const colors[] = {"#888888", "#c0392b", "#2471a3"};
    FILE* out = fopen(path, "wbe");
    need(out != NULL, "%s", path);
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 620 600\" font-family=\"sans-serif\" "
            "font-size=\"13\">\n<rect width=\"620\" height=\"600\" fill=\"#fff\"/>\n");
    // 100 to 500 TFLOP/s are 60 to 560.
#define AT(x) (60 + 500 * ((x) - 100) / 400)
    for (int t = 100; t <= 500; t += 100)
        fprintf(out, "<path d=\"M%d 40V540M60 %dH560\" stroke=\"#ddd\"/><text x=\"%d\" y=\"558\" "
                "text-anchor=\"middle\">%d</text><text x=\"52\" y=\"%d\" text-anchor=\"end\">%d</text>\n", AT(t),
                600 - AT(t), AT(t), t, 604 - AT(t), t);
    for (int i = -1; i <= 1; i++) {
        double slope = 1 + 0.1 * i, end = i > 0 ? 500 / slope : 500, begin = i < 0 ? 100 / slope : 100;
        fprintf(out, "<path d=\"M%.1f %.1fL%.1f %.1f\" stroke=\"#aaa\" fill=\"none\"%s/>\n", AT(begin),
                600 - AT(slope * begin), AT(end), 600 - AT(slope * end), i ? " stroke-dasharray=\"4 4\"" : "");
    }
    for (const Point* p = points; p < points + point_count; p++) {
        if (p->part == PART_MEMORY) continue;
        fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\" fill-opacity=\"0.8\"><title>%s</title>"
                "</circle>\n", AT(point_tflops(p, p->published_ms)), 600 - AT(point_tflops(p, p->step.ms)),
                colors[p->part == PART_MORE ? 2 : !p->fitted], p->name);
    }
    for (int i = 0; i < 3; i++) {
        static const char* const names[] = {"fitted", "held out", "held out, more runs"};
        fprintf(out, "<circle cx=\"80\" cy=\"%d\" r=\"4\" fill=\"%s\"/><text x=\"92\" y=\"%d\">%s</text>\n",
                58 + 20 * i, colors[i], 62 + 20 * i, names[i]);
    }
    fprintf(out, "<text x=\"310\" y=\"582\" text-anchor=\"middle\">published TFLOP/s of a GPU</text>\n<text x=\"16\" "
            "y=\"290\" text-anchor=\"middle\" transform=\"rotate(-90 16 290)\">predicted</text>\n<text x=\"310\" "
            "y=\"24\" text-anchor=\"middle\">Published training runs; dashed: 10%% off</text>\n</svg>\n");
#undef AT
    need(fclose(out) == 0, "%s", path);
}

int main(int argc, char** argv) {
    const char *path, *table, *plot;
    bool refit;
    const Flag rows[] = {FLAG_TEXT("points", &path, "dev/bench/published.txt", "FILE", 0, "the runs"),
                         FLAG_TEXT("table", &table, NULL, "FILE", 0, "where to write the table, in Markdown"),
                         FLAG_TEXT("plot", &plot, NULL, "FILE", 0, "where to write the plot, as SVG"),
                         FLAG_SWITCH("fit", &refit, true, 0, "fit the constants; off: only use those of the header")};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "published", NULL, &flags, argc, argv)) return code;
    harness_name = "published";
    points_read(path);
    double x[CONSTANTS];
    memcpy(x, &CLUSTER_FIT, sizeof x);
    for (size_t i = 0; i < point_count; i++) point_choose(&points[i], &CLUSTER_FIT);
    double shipped = fit_loss(x), best = refit ? fit(x) : shipped;
    for (int i = 0; i < CONSTANTS; i++) printf("%s %.3g%s", CONSTANT_NAMES[i], x[i], i + 1 < CONSTANTS ? ", " : "\n");
    for (size_t i = 0; i < point_count; i++) {
        Point* p = &points[i];
        point_predict(p, &CLUSTER_FIT);
        if (p->part != PART_MEMORY)
            printf("%-36s %6zu GPUs, s: %8.2f, predicted %8.2f, %+6.1f%% %s\n", p->name, p->gpus,
                   1e-3 * p->published_ms, 1e-3 * p->step.ms, 100 * point_error(p), point_use(p));
        if (p->memory > 0)
            printf("%-36s %6zu GPUs, GiB: %6.1f, predicted %6.1f\n", p->name, p->gpus, p->memory,
                   p->step.bytes / 0x1p30);
    }
    if (table) write_table(table, &CLUSTER_FIT);
    if (plot) write_plot(plot);
    Errors fitted = errors_of(PART_RUNS, true), held = errors_of(PART_RUNS, false), more = errors_of(PART_MORE, false);
    printf("fitted: %zu runs, mean %.1f%%, largest %.1f%%; held out: %zu, %.1f%%, %.1f%%; more: %zu, %.1f%%, %.1f%%\n",
           fitted.count, 100 * fitted.mean, 100 * fitted.worst, held.count, 100 * held.mean, 100 * held.worst,
           more.count, 100 * more.mean, 100 * more.worst);
    bool same = shipped <= best + 0.01, good = held.mean <= 0.1 && held.worst <= 0.25;
    printf("what is minimized: %.4f with CLUSTER_FIT, %.4f with fitted constants\n", shipped, best);
    return same && good ? 0 : 1;
}
