// test_preferences.c: objectives that prefer answers to others (llmtrain/run/objectives.h), their references
// (llmtrain/text/logps.h), and the calls of llmtrain/run/score.h, which programs with an objective of their own use.
//
//   make build/test_preferences build/train-FP32 build/evaluate-FP32
//   build/test_preferences [--train PATH] [--evaluate PATH]
//
//   1. formulas   losses and derivatives against TRL's formulas in decimals (dev/peers/objectives.py)
//   2. models     loss, log-probabilities and gradients of packed pairs, against each answer computed alone
//   3. calls      of score.h, each against model_gradients or finite differences; two models in one process
//   4. programs   ranks, kills, checks and traces with an objective; references; refusals
//
// Gradients of whole models are compared with finite differences in random directions: of a loss that the test computes
// from each answer alone, so that neither packing nor weights are shared with what is tested.

#include "llmtrain/run/objectives.h"
#include "llmtrain/run/score.h"
#include "data/shards.h"
#include "pieces.h"
#include "small_model.h"

#include <math.h>

static Error error;
static Tokenizer bytes_only;
static const char *train, *evaluate;

static size_t draw(uint64_t seed, uint64_t number, size_t below) {
    return random_bits(seed, RANDOM_TEST, number, 0) % below;
}

// ------------------------------------------------------------------------------------------------
// 1. Formulas

static void test_fixture(const char* fixture) {
    char *text = text_read(fixture, NULL), *rest = text;
    size_t counts[OBJECTIVE_COUNT] = {0};
    double worst = 0;
    for (char* line; (line = strsep(&rest, "\n")) != NULL;) {
        char name[16];
        ObjectiveOptions o = {0};
        double x[2], exact[3], d[2];
        if (line[0] == '#' || line[0] == 0) continue;
        need(sscanf(line, "%15s %lf %lf %lf %lf %lf %lf %lf %lf", name, &o.beta, &o.margin, &o.label_smoothing, &x[0],
                    &x[1], &exact[0], &exact[1], &exact[2]) == 9, "%s", line);
        while (o.kind < OBJECTIVE_COUNT && strcmp(OBJECTIVES[o.kind].name, name) != 0) o.kind++;
        need(o.kind < OBJECTIVE_COUNT && OBJECTIVES[o.kind].loss, "%s", line);
        counts[o.kind]++;
        double loss = OBJECTIVES[o.kind].loss(d, x, &o);
        const double found[3] = {loss, d[0], d[1]};
        for (int i = 0; i < 3; i++) {
            double off = fabs(found[i] - exact[i]) - 0x1p-1022, size = fabs(exact[i]);  // below it digits are lost
            worst = off > 0 ? fmax(worst, off / size) : worst;
            expect(off <= 1e-12 * size, "%s: %.17g, not %.17g", line, found[i], exact[i]);
        }
    }
    for (int k = 1; k < OBJECTIVE_COUNT; k++) expect(counts[k] > 15, "%zu of %s", counts[k], OBJECTIVES[k].name);
    verdict("formulas: losses and derivatives of TRL's formulas, at most %.1e off", worst);
    free(text);
}

// Derivatives of each row against differences of its own loss, at random places.
static void test_derivatives(void) {
    for (int kind = 1; kind < OBJECTIVE_COUNT; kind++) {
        for (uint64_t i = 0; i < 200; i++) {
            double range = OBJECTIVES[kind].means ? 2 : 12, d[2], ignored[2], h = 1e-5;
            ObjectiveOptions o = {.kind = kind, .beta = 0.05 + 0.01 * (double)draw(i, 0, 100),
                                  .margin = 0.1 * (double)draw(i, 1, 10),
                                  .label_smoothing = 0.05 * (double)draw(i, 2, 8)};
            double x[2] = {-0.01 - range * random_uniform(i, RANDOM_TEST, 3, 0),
                           -0.01 - range * random_uniform(i, RANDOM_TEST, 4, 0)};
            OBJECTIVES[kind].loss(d, x, &o);
            for (int by = 0; by < (OBJECTIVES[kind].pairs ? 2 : 1); by++) {
                double up[2] = {x[0], x[1]}, down[2] = {x[0], x[1]};
                up[by] += h;
                down[by] -= h;
                double change = OBJECTIVES[kind].loss(ignored, up, &o) - OBJECTIVES[kind].loss(ignored, down, &o);
                bool bends = kind == OBJECTIVE_HINGE && fabs(1 - o.beta * (x[0] - x[1])) < 2 * h * o.beta;
                expect(bends || fabs(change / (2 * h) - d[by]) <= 1e-6 * (1 + fabs(d[by])), "%s at %g %g: %g, not %g",
                       OBJECTIVES[kind].name, x[0], x[1], d[by], change / (2 * h));
            }
        }
        verdict("formulas: derivatives of %s are those of its loss", OBJECTIVES[kind].name);
    }
}

// Where probabilities or ratios reach what a double or a float can say, all numbers stay finite.
static void test_extremes(void) {
    static const double values[] = {0, -1e-300, -1e-30, -1e-12, -1, -50, -800, -1e5, -1e12};
    for (int kind = 1; kind < OBJECTIVE_COUNT; kind++) {
        ObjectiveOptions o = {.kind = kind, .beta = 0.1, .margin = 0.5};
        for (size_t i = 0; i < COUNT_OF(values); i++)
            for (size_t k = 0; k < COUNT_OF(values); k++) {
                double x[2] = {values[i], values[k]}, d[2];
                double loss = OBJECTIVES[kind].loss(d, x, &o);
                expect(isfinite(loss) && isfinite((float)d[0]) && isfinite((float)d[1]), "%s(%g, %g): %g, %g, %g",
                       OBJECTIVES[kind].name, x[0], x[1], loss, d[0], d[1]);
                expect(d[0] <= 0 || kind == OBJECTIVE_IPO, "%s(%g, %g): a likelier answer is worse",
                       OBJECTIVES[kind].name, x[0], x[1]);
            }
        verdict("formulas: %s is finite, also where p is 0 or 1", OBJECTIVES[kind].name);
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Models

enum { VOCABULARY = 256, TRAIN_GROUPS = 60, VAL_GROUPS = 12, PT = 48, PB = 3, MICRO = 2 };

// One document: a prompt, and an answer of one span or two. Returns its tokens.
static size_t document_make(int32_t* ids, TrainedSpan* spans, size_t* count, uint64_t prompt, uint64_t answer) {
    size_t n = 2 + draw(prompt, 0, 7), trained = 1 + draw(answer, 1, 9);
    TrainedSpan first = {n, (uint32_t)trained, 1};
    spans[0] = first;
    *count = 1;
    n += trained;
    if (draw(answer, 2, 3) == 0) {
        TrainedSpan second = {n + 2, (uint32_t)(1 + draw(answer, 3, 4)), 1};
        spans[(*count)++] = second;
        n += 2 + second.tokens;
    }
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)draw(i < first.first ? prompt : answer, 10 + i, VOCABULARY);
    return n;
}

// Shards PREFIX_train_*.bin and PREFIX_val_*.bin of pairs, or of desirable and undesirable answers, or plain ones.
static void write_answers(const char* prefix, SpanKind kind, uint64_t seed) {
    static ShardSet set;
    shard_set_begin(&set, prefix, &bytes_only, 500, 0);
    for (uint64_t g = 0; g < TRAIN_GROUPS + VAL_GROUPS; g++) {
        Series* series = &set.series[g >= TRAIN_GROUPS];
        int32_t ids[2][64];
        TrainedSpan spans[2][2];
        size_t counts[2], n[2], answers = kind == SPAN_CHOSEN ? 2 : 1;
        for (size_t a = 0; a < answers; a++)
            n[a] = document_make(ids[a], spans[a], &counts[a], seed + g, seed + 1000 * (a + 1) + g);
        need(series_begin_group(series, n[0] + (answers > 1 ? n[1] : 0), &error), "%s", error.text);
        for (size_t a = 0; a < answers; a++) {
            SpanKind own = kind == SPAN_DESIRABLE && draw(seed + g, 8, 3) == 0 ? SPAN_UNDESIRABLE
                         : a == 1 ? SPAN_REJECTED : kind;
            need(series_add_document(series, ids[a], n[a], spans[a], counts[a], own, a == 0, &error), "%s", error.text);
        }
    }
    need(shard_set_publish(&set, &error), "%s", error.text);
}

static void open_answers(Dataset* data, const char* patterns, size_t T, bool pack) {
    need(dataset_open(data, patterns, &error) && dataset_pack(data, T, pack, TOO_LONG_DROP, &error), "%s", error.text);
    data->mask_documents = true;
    data->end_of_text = -1;
}

static Config answers_config(Family family) {
    Config c = small_config(family);
    c.vocab = VOCABULARY;
    c.context = 64;
    need(config_complete(&c, &error), "%s", error.text);
    return c;
}

static ModelOptions answers_options(size_t B, size_t T) {
    ModelOptions o = small_options(B, T);
    o.cached_sequences = 0;
    o.mask_documents = o.weighs = true;
    o.end_of_text = -1;
    return o;
}

// The log-probability of a document, computed alone; *count: of its tokens, those that are trained. losses: of them.
static double document_logp(Model* alone, const Dataset* data, size_t shard, size_t document, size_t* count,
                            float* losses) {
    const SpanFile* f = &data->spans[shard];
    const SpanDocument* d = &f->documents[document];
    int32_t ids[64], targets[64];
    size_t span = d->span, n = d->tokens;
    double sum = 0;
    *count = 0;
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)shard_token(&data->shards[shard], (size_t)d->first + i);
    for (size_t i = 0; i + 1 < n; i++) {
        bool trains = span_file_trains(f, &span, d->first + i + 1);
        targets[i] = trains ? ids[i + 1] : TARGET_NONE;
        *count += trains;
    }
    model_score(alone, ids, targets, 1, n - 1, losses);
    for (size_t i = 0; i + 1 < n; i++) sum -= (double)losses[i];
    return sum;
}

// What a step on samples [first, first + count) should find: the mean of the objective over all groups, each answer
// computed alone; and what the log has of it.
// nearest: the least distance of x[0] - x[1] to 1 / beta, where hinge bends.
typedef struct { double loss, right, margin, logp[2], nearest; size_t groups, of_kind[2]; } Expected;

static Expected expected_of(Model* alone, const Dataset* data, const ObjectiveOptions* o, const double* reference,
                            uint64_t seed, size_t first, size_t count) {
    Expected e = {.nearest = INFINITY};
    bool means = o->kind == OBJECTIVE_IPO || o->kind == OBJECTIVE_SIMPO || o->kind == OBJECTIVE_ORPO;
    for (size_t i = first; i < first + count; i++) {
        Window w = dataset_sample(data, seed, i, PT);
        for (size_t g = w.packed->first[w.row]; g < w.packed->first[w.row + 1]; g++) {
            const PackedGroup* group = &w.packed->groups[g];
            const SpanDocument* d = &data->spans[group->shard].documents[group->document];
            double x[2] = {0, 0}, logp[2] = {0, 0}, ignored[2], sign = 1;
            size_t n[2], answers = d->kind == SPAN_CHOSEN ? 2 : 1;
            float losses[64];
            for (size_t a = 0; a < answers; a++) {
                size_t number = group->document + a;
                logp[a] = document_logp(alone, data, group->shard, number, &n[a], losses);
                x[a] = logp[a];
                if (reference) x[a] -= reference[dataset_document(data, group->shard, number)];
                if (means) x[a] /= (double)n[a];
            }
            if (answers == 1) sign = d->kind == SPAN_DESIRABLE ? 1 : -1;
            if (answers == 1) x[0] = sign * (x[0] - o->margin);
            e.loss += OBJECTIVES[o->kind].loss(ignored, x, o);
            if (answers == 2) e.loss -= o->sft_weight * logp[0] / (double)n[0];
            e.nearest = fmin(e.nearest, fabs(x[0] - x[1] - 1 / o->beta));
            e.right += x[0] > x[1];
            e.margin += o->beta * (x[0] - x[1]);
            for (size_t a = 0; a < answers; a++) {
                size_t kind = answers == 2 ? a : sign < 0;
                e.logp[kind] += logp[a];
                e.of_kind[kind]++;
            }
            e.groups++;
        }
    }
    e.loss /= (double)e.groups;
    e.right /= (double)e.groups;
    e.margin /= (double)e.groups;
    for (int k = 0; k < 2; k++) e.logp[k] /= (double)e.of_kind[k];
    return e;
}

// Finite differences: moves the weights of a model that train by h * u, u normal, and puts them back.
typedef struct { float *at, *moved; double* u; size_t n; } Direction;

static Direction direction_make(Model* model, uint64_t seed) {
    Direction d = {.n = 0};
    for (size_t i = 0; i < model->parameters.count; i++) d.n += tensor_elements(&model->parameters.tensors[i]);
    d.at = (float*)memory_allocate(d.n * sizeof(float));
    d.moved = (float*)memory_allocate(d.n * sizeof(float));
    d.u = (double*)memory_allocate(d.n * sizeof(double));
    for (size_t i = 0, at = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        need(model_weight_read(model, t->name, d.at + at, &error), "%s", error.text);
        for (size_t e = 0; e < tensor_elements(t); e++, at++)
            d.u[at] = t->trains ? (double)random_normal(seed, RANDOM_TEST, 1, at) : 0;
    }
    return d;
}

static void direction_free(Direction* d) {
    free(d->at);
    free(d->moved);
    free(d->u);
}

static void direction_move(const Direction* d, Model* model, double h) {
    for (size_t i = 0, at = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        size_t n = tensor_elements(t);
        for (size_t e = at; e < at + n; e++) d->moved[e] = (float)((double)d->at[e] + h * d->u[e]);
        need(model_weight_write(model, t->name, d->moved + at, &error), "%s", error.text);
        at += n;
    }
}

// The gradient of a step in a direction; *size: its norm.
static double direction_gradient(const Direction* d, Model* model, double* size) {
    double sum = 0, squares = 0;
    float* gradient = (float*)memory_allocate(parameters_longest(&model->parameters) * sizeof(float));
    for (size_t i = 0, at = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        size_t n = tensor_elements(t);
        if (t->trains) need(model_gradient_read(model, t->name, gradient, &error), "%s", error.text);
        for (size_t e = 0; t->trains && e < n; e++) {
            sum += (double)gradient[e] * d->u[at + e];
            squares += (double)gradient[e] * (double)gradient[e];
        }
        at += n;
    }
    free(gradient);
    *size = sqrt(squares);
    return sum;
}

typedef double (*LossOf)(Model* model, void* context);

// The derivative of a loss in a direction: central differences with two steps, whose cubic errors cancel.
static double direction_difference(const Direction* d, Model* model, LossOf loss, void* context) {
    const double h = 2e-3;
    double value[4];
    for (int i = 0; i < 4; i++) {
        static const double steps[4] = {2, 1, -1, -2};
        direction_move(d, model, steps[i] * h);
        value[i] = loss(model, context);
    }
    direction_move(d, model, 0);
    return (8 * (value[1] - value[2]) - (value[0] - value[3])) / (12 * h);
}

// Compares the gradients that a step has left in `model` with differences of a loss in directions; `other` has the same
// weights. The loss is a float sum of rounded losses: its error, some 1e-6 of it, is divided by 2e-3.
static void gradient_check(Model* model, Model* other, LossOf loss, void* context, const char* name) {
    double worst = 0, size;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        Direction d = direction_make(other, seed);
        double found = direction_gradient(&d, model, &size);
        double exact = direction_difference(&d, other, loss, context);
        worst = fmax(worst, fabs(found - exact) / size);
        direction_free(&d);
    }
    expect(size > 1e-4 && worst <= 3e-3, "%s: a derivative is off by %.2g of the gradient's norm, %.3g", name, worst,
           size);
}

// What a step needs, and the loss that it should have as a function of weights.
typedef struct {
    const Dataset* data;
    const ObjectiveOptions* options;
    const double* reference;
} Step;

static double step_loss(Model* model, void* context) {
    const Step* s = (const Step*)context;
    return expected_of(model, s->data, s->options, s->reference, 7, 0, MICRO * PB).loss;
}

// The log-probabilities that the objective has seen in the last micro-batch, against those of each answer alone.
static void packed_check(const ObjectiveRun* run, Model* alone, const Dataset* data, const char* name) {
    for (size_t b = 0; b < PB; b++) {
        Window w = dataset_sample(data, 7, (MICRO - 1) * PB + b, PT);
        size_t row = b * PT;
        for (size_t g = w.packed->first[w.row]; g < w.packed->first[w.row + 1]; g++) {
            const PackedGroup* group = &w.packed->groups[g];
            size_t end = group_end(&data->spans[group->shard], group->document), count;
            for (size_t i = group->document; i < end; i++) {
                float losses[64];
                size_t n = data->spans[group->shard].documents[i].tokens;
                document_logp(alone, data, group->shard, i, &count, losses);
                expect(memcmp(losses, run->losses + row, (n - 1) * sizeof(float)) == 0, "%s: answer %zu", name, i);
                row += n;
            }
        }
    }
}

// Hinge bends, which spoils differences: the beta for which no pair is near that.
static double beta_of_hinge(Model* alone, const Dataset* data, ObjectiveOptions o, const double* reference) {
    double best = 0, farthest = 0;
    for (int i = 1; i <= 24; i++) {
        o.beta = 8.0 / i;
        Expected e = expected_of(alone, data, &o, reference, 7, 0, MICRO * PB);
        if (e.nearest > farthest) farthest = e.nearest, best = o.beta;
    }
    expect(farthest > 0.25, "every beta has a pair where hinge bends, at %g", farthest);
    return best;
}

// One objective on one model: a step of two micro-batches of packed rows.
static void test_step(Family family, ObjectiveOptions* o, const char* more) {
    bool kto = o->kind == OBJECTIVE_KTO;
    const char* name = text_of("%s, %s%s", family_name(family), OBJECTIVES[o->kind].name, more);
    static int32_t tokens[PB * PT], targets[PB * PT];
    Config c = answers_config(family);
    Model model, alone;
    Dataset data;
    ObjectiveRun run;
    StepResult result;
    StepFlags flags = {.stop = false};
    open_answers(&data, kto ? "k_train_*.bin" : "p_train_*.bin", PT, true);
    small_create(&model, &c, answers_options(PB, PT), 5);
    ModelOptions single = answers_options(1, PT);
    single.mask_documents = false;
    small_create(&alone, &c, single, 5);
    need(objective_open(&run, o, &model, &data, NULL, 7, &error), "%s", error.text);
    run.compared = true;  // the reference is of no model
    size_t groups = 0;
    if (o->kind == OBJECTIVE_HINGE) o->beta = beta_of_hinge(&alone, &data, *o, run.reference);
    model_begin_step(&model, 1, MICRO);
    for (size_t i = 0; i < MICRO; i++) {
        for (size_t b = 0; b < PB; b++) {
            Window w = dataset_sample(&data, 7, i * PB + b, PT);
            groups += w.packed->first[w.row + 1] - w.packed->first[w.row];
            need(window_read(tokens + b * PT, targets + b * PT, &data, w, VOCABULARY, PT, &error), "%s", error.text);
        }
        model.dropout.first_token = i * PB * PT;
        model_gradients(&model, tokens, targets, PB, PT);
    }
    memcpy(flags.counted, run.counted, sizeof flags.counted);
    need(model_finish_step(&model, &result, flags, &error), "%s", error.text);
    packed_check(&run, &alone, &data, name);
    Expected e = expected_of(&alone, &data, o, run.reference, 7, 0, MICRO * PB);
    ObjectiveLog log = objective_log(o->kind, result.flags.counted);
    expect(groups == e.groups && groups > MICRO * PB, "%zu groups, not %zu", groups, e.groups);
    expect(fabs(result.loss - e.loss) <= 1e-6 * (1 + fabs(e.loss)), "%s: loss %.9g, not %.9g", name, result.loss,
           e.loss);
    expect(log.accuracy == e.right && fabs(log.margin - e.margin) < 1e-5, "%s: accuracy %g, not %g; margin %g, not %g",
           name, log.accuracy, e.right, log.margin, e.margin);
    expect(fabs(log.chosen - e.logp[0]) < 1e-5 && fabs(log.rejected - e.logp[1]) < 1e-5,
           "%s: log p %g and %g, not %g and %g", name, log.chosen, log.rejected, e.logp[0], e.logp[1]);
    expect(!kto || e.of_kind[0] != e.of_kind[1], "as many of each kind");
    Step step = {&data, o, run.reference};
    gradient_check(&model, &alone, step_loss, &step, name);
    verdict("%s: loss, metrics, log-probabilities to the bit, gradient", name);
    objective_close(&run);
    dataset_close(&data);
    model_free(&model);
    model_free(&alone);
}

// A reference of numbers that are not far from what a random model says.
static void write_reference(const char* path, const char* patterns) {
    Dataset data;
    open_answers(&data, patterns, PT, true);
    size_t n = dataset_documents(&data), document = 0;
    double* values = (double*)memory_allocate(n * sizeof(double));
    for (size_t i = 0; i < data.shard_count; i++)
        for (size_t k = 0; k < data.spans[i].document_count; k++, document++)
            for (size_t s = data.spans[i].documents[k].span; s < span_file_end(&data.spans[i], k); s++)
                values[document] -= data.spans[i].spans[s].tokens *
                                    (5.3 + 0.6 * random_uniform(3, RANDOM_TEST, 5, document));
    need(logps_write(path, &data, 1, values, &error), "%s", error.text);
    free(values);
    dataset_close(&data);
}

static void test_models(void) {
    write_reference("p.numbers", "p_train_*.bin");
    write_reference("k.numbers", "k_train_*.bin");
    for (Family family = FAMILY_GPT2; family <= FAMILY_LLAMA; family++) {
        for (int kind = 1; kind < OBJECTIVE_COUNT; kind++) {
            ObjectiveOptions o = {.kind = kind, .beta = OBJECTIVES[kind].means ? 1 : 0.2, .margin = 0.25};
            if (OBJECTIVES[kind].reference) o.reference = kind == OBJECTIVE_KTO ? "k.numbers" : "p.numbers";
            test_step(family, &o, "");
            bool smooths = kind == OBJECTIVE_DPO;
            if (smooths) o.label_smoothing = 0.2;
            if (OBJECTIVES[kind].pairs) o.sft_weight = 0.7;
            if (family == FAMILY_LLAMA && OBJECTIVES[kind].pairs)
                test_step(family, &o, smooths ? ", --label-smoothing, --sft-weight" : ", --sft-weight");
        }
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Calls

enum { CB = 3, CT = 16, CN = CB * CT, HIDDEN_MAX = CN * 64 };

// Two micro-batches of random tokens, with some targets left out.
typedef struct { int32_t tokens[MICRO][CN], targets[MICRO][CN]; } Batches;

static Batches batches_make(uint64_t seed) {
    Batches b;
    for (size_t i = 0; i < MICRO; i++) {
        random_tokens(b.tokens[i], CN, VOCABULARY, seed + 2 * i);
        random_tokens(b.targets[i], CN, VOCABULARY, seed + 2 * i + 1);
        for (size_t n = 0; n < CN; n++) if (draw(seed + i, n, 4) == 0) b.targets[i][n] = TARGET_NONE;
    }
    return b;
}

static ModelOptions calls_options(bool exact) {
    ModelOptions o = small_options(CB, CT);
    o.cached_sequences = 0;
    o.weighs = true;
    o.ranks.reduce = exact ? REDUCE_EXACT : REDUCE_FLOAT;
    return o;
}

static void finish(Model* model, StepResult* result) {
    StepFlags flags = {.stop = false};
    need(model_finish_step(model, result, flags, &error), "%s", error.text);
}

// Weights of 1 are no weights: a step's loss, norm and updated weights, to the bit. Others scale their rows' losses.
static void test_weighted(Family family, bool exact) {
    const char* name = text_of("%s%s", family_name(family), exact ? ", --reduce exact" : "");
    Config c = answers_config(family);
    Model plain, weighted;
    StepResult results[2];
    Batches b = batches_make(11);
    float ones[CN], losses[CN];
    small_create(&plain, &c, calls_options(exact), 5);
    small_create(&weighted, &c, calls_options(exact), 5);
    for (size_t n = 0; n < CN; n++) ones[n] = 1;
    for (uint64_t step = 1; step <= 2; step++) {
        double mean = 0, targets = 0;
        model_begin_step(&plain, 1, MICRO);
        for (size_t i = 0; i < MICRO; i++) model_gradients(&plain, b.tokens[i], b.targets[i], CB, CT);
        finish(&plain, &results[0]);
        model_begin_step(&weighted, 1, MICRO);
        for (size_t i = 0; i < MICRO; i++) {
            model_score(&weighted, b.tokens[i], b.targets[i], CB, CT, losses);
            model_backward_weighted(&weighted, ones, targets_count(b.targets[i], CN));
            for (size_t n = 0; n < CN; n++) {
                mean += (double)losses[n];
                targets += b.targets[i][n] >= 0;
                expect((losses[n] > 0) == (b.targets[i][n] >= 0), "%s: the loss of row %zu is %g", name, n, losses[n]);
            }
        }
        finish(&weighted, &results[1]);
        expect(results[0].loss == results[1].loss && results[0].grad_norm == results[1].grad_norm,
               "%s: loss %.17g and %.17g, norm %.17g and %.17g", name, results[0].loss, results[1].loss,
               results[0].grad_norm, results[1].grad_norm);
        expect(fabs(mean / targets / results[1].loss - 1) < 1e-6, "%s: losses that are not those of the step", name);
        model_update(&plain, step, 1e-3, 1);
        model_update(&weighted, step, 1e-3, 1);
        expect(model_hash(&plain) == model_hash(&weighted), "%s: other weights after step %d", name, (int)step);
    }
    verdict("calls: model_backward_weighted with weights of 1 has the bits of model_gradients (%s)", name);
    model_free(&plain);
    model_free(&weighted);
}

// The mean over 5 of the weighted losses of two micro-batches.
typedef struct { Batches b; float weights[MICRO][CN]; } Weighted;

static double weighted_loss(Model* model, void* context) {
    const Weighted* w = (const Weighted*)context;
    float losses[CN];
    double sum = 0;
    for (size_t i = 0; i < MICRO; i++) {
        model_score(model, w->b.tokens[i], w->b.targets[i], CB, CT, losses);
        for (size_t n = 0; n < CN; n++) sum += (double)w->weights[i][n] * (double)losses[n];
    }
    return sum / 5;
}

// Of the hidden states: the sum of what they are multiplied by, over what counts.
typedef struct { Batches b; float by[MICRO][HIDDEN_MAX]; } OfHidden;

static double hidden_loss(Model* model, void* context) {
    const OfHidden* h = (const OfHidden*)context;
    static float hidden[HIDDEN_MAX];
    size_t n = CN * model->config.channels;
    double sum = 0;
    for (size_t i = 0; i < MICRO; i++) {
        model_score(model, h->b.tokens[i], h->b.targets[i], CB, CT, NULL);
        need(model_hidden(model, hidden, &error), "%s", error.text);
        for (size_t e = 0; e < n; e++) sum += (double)h->by[i][e] * (double)hidden[e];
    }
    return sum / (7 + 4);
}

static void test_gradients_of_calls(Family family) {
    Config c = answers_config(family);
    Model model, other;
    StepResult result;
    static Weighted w;
    static OfHidden h;
    size_t C = c.channels;
    w.b = h.b = batches_make(21);
    small_create(&model, &c, calls_options(false), 5);
    small_create(&other, &c, calls_options(false), 5);
    for (size_t i = 0; i < MICRO; i++) {
        for (size_t n = 0; n < CN; n++) w.weights[i][n] = random_normal(4, RANDOM_TEST, i, n);
        for (size_t n = 0; n < CN * C; n++) h.by[i][n] = random_normal(5, RANDOM_TEST, i, n);
    }
    model_begin_step(&model, 1, MICRO);
    for (size_t i = 0; i < MICRO; i++) {
        model_score(&model, w.b.tokens[i], w.b.targets[i], CB, CT, NULL);
        model_backward_weighted(&model, w.weights[i], 2 + i);
    }
    finish(&model, &result);
    gradient_check(&model, &other, weighted_loss, &w, "model_backward_weighted");
    // The sums still hold the gradients of the step before.
    model_begin_step(&model, 4, MICRO);
    for (size_t i = 0; i < MICRO; i++) {
        model_score(&model, h.b.tokens[i], h.b.targets[i], CB, CT, NULL);
        need(model_backward_hidden(&model, h.by[i], i ? 4 : 7, &error), "%s", error.text);
    }
    finish(&model, &result);
    gradient_check(&model, &other, hidden_loss, &h, "model_backward_hidden");
    float* head = (float*)memory_allocate(VOCABULARY * C * sizeof(float));
    double largest = 0;
    if (!c.tied) need(model_gradient_read(&model, "head_weight", head, &error), "%s", error.text);
    for (size_t e = 0; e < VOCABULARY * C; e++) largest = fmax(largest, fabs((double)head[e]));
    expect(largest == 0, "a head that is not used has a gradient of %g", largest);
    verdict("calls: gradients of weighted losses, and of hidden states, are those of differences (%s)",
            family_name(family));
    free(head);
    model_free(&model);
    model_free(&other);
}

// A rule: soft targets, as in distillation. probabilities (MICRO, CN, V); the micro-batch.
typedef struct {
    Model* model;
    const float* probabilities;
    size_t micro;
    Batches b;
} Soft;

static void soft_apply(void* context, floatX* logits, float* losses, float dloss, size_t first, size_t rows) {
    const Soft* s = (const Soft*)context;
    size_t V = s->model->config.vocab, Vp = config_padded_vocab(&s->model->config);
    for (size_t r = 0; r < rows; r++) {
        floatX* row = logits + r * Vp;
        const float* q = s->probabilities + (s->micro * CN + first + r) * V;
        double largest = -INFINITY, sum = 0, loss = 0;
        for (size_t v = 0; v < V; v++) largest = fmax(largest, (double)float_of(row[v]));
        for (size_t v = 0; v < V; v++) sum += exp((double)float_of(row[v]) - largest);
        for (size_t v = 0; v < V; v++) loss -= (double)q[v] * ((double)float_of(row[v]) - largest - log(sum));
        losses[r] = (float)loss;
        for (size_t v = 0; v < Vp && dloss != 0; v++) {
            double p = v < V ? exp((double)float_of(row[v]) - largest) / sum : 0;
            row[v] = floatX_of((float)((double)dloss * (v < V ? p - (double)q[v] : 0)));
        }
    }
}

static double soft_loss(Model* model, void* context) {
    Soft s = *(Soft*)context;
    float losses[CN];
    double sum = 0;
    s.model = model;
    model->rule.apply = soft_apply;
    model->rule.context = &s;
    for (s.micro = 0; s.micro < MICRO; s.micro++) {
        model_score(model, s.b.tokens[s.micro], s.b.targets[s.micro], CB, CT, losses);
        for (size_t n = 0; n < CN; n++) sum += (double)losses[n];
    }
    return sum / (double)(MICRO * CN);
}

static void test_rule(void) {
    Config c = answers_config(FAMILY_LLAMA);
    Model model, other;
    StepResult result;
    static float q[MICRO * CN * VOCABULARY];
    static Soft soft;
    soft.b = batches_make(31);
    for (size_t i = 0; i < MICRO; i++)  // every row counts
        for (size_t n = 0; n < CN; n++) soft.b.targets[i][n] = 0;
    for (size_t row = 0; row < MICRO * CN; row++) {
        float sum = 0, *own = q + row * VOCABULARY;
        for (size_t v = 0; v < VOCABULARY; v++) sum += own[v] = expf(2 * random_normal(6, RANDOM_TEST, row, v));
        for (size_t v = 0; v < VOCABULARY; v++) own[v] /= sum;
    }
    small_create(&model, &c, calls_options(false), 5);
    small_create(&other, &c, calls_options(false), 5);
    soft.model = &model;
    soft.probabilities = q;
    model.rule.apply = soft_apply;
    model.rule.context = &soft;
    model_begin_step(&model, 1, MICRO);
    for (soft.micro = 0; soft.micro < MICRO; soft.micro++)
        model_gradients(&model, soft.b.tokens[soft.micro], soft.b.targets[soft.micro], CB, CT);
    finish(&model, &result);
    double loss = soft_loss(&other, &soft);
    expect(fabs(result.loss / loss - 1) < 1e-6, "loss %g, not %g", result.loss, loss);
    gradient_check(&model, &other, soft_loss, &soft, "a rule");
    verdict("calls: a HeadRule of soft targets: loss and gradient");
    model_free(&model);
    model_free(&other);
}

// The norm of each sequence's part of the gradient, against a step of that sequence alone; the step itself stays.
static void test_sequences(void) {
    Config c = answers_config(FAMILY_GPT2);
    Model model, other, alone;
    StepResult result;
    Batches b = batches_make(41);
    double losses[CB], norms[CB];
    ModelOptions single = calls_options(false);
    single.B = 1;
    small_create(&model, &c, calls_options(false), 5);
    small_create(&other, &c, calls_options(false), 5);
    small_create(&alone, &c, single, 5);
    for (int i = 0; i < 2; i++) {
        Model* m = i ? &other : &model;
        model_begin_step(m, 1, MICRO);
        for (size_t k = 0; k < MICRO; k++) model_gradients(m, b.tokens[k], b.targets[k], CB, CT);
        finish(m, &result);
        double total = (double)(targets_count(b.targets[0], CN) + targets_count(b.targets[1], CN));
        if (i == 0) need(sequence_norms(m, b.tokens[1], b.targets[1], CB, CT, losses, norms, &error), "%s", error.text);
        for (size_t s = 0; s < CB && i == 0; s++) {
            const int32_t* targets = b.targets[1] + s * CT;
            double norm, loss = batch_gradients(&alone, &norm, b.tokens[1] + s * CT, targets, 1, CT);
            double part = norm * (double)targets_count(targets, CT) / total;
            expect(fabs(losses[s] / loss - 1) < 1e-6 && fabs(norms[s] / part - 1) < 1e-5,
                   "sequence %zu: loss %g, not %g; norm %g, not %g", s, losses[s], loss, norms[s], part);
        }
        model_update(m, 1, 1e-3, 1);
    }
    expect(model_hash(&model) == model_hash(&other), "the norms have changed the step");
    verdict("calls: sequence_norms, and the step has the bits that it has without");
    model_free(&model);
    model_free(&other);
    model_free(&alone);
}

static void test_tensors(void) {
    Config c = answers_config(FAMILY_LLAMA), more = c, less = c;
    Model model, other, lora, narrow;
    StepResult result;
    Batches b = batches_make(51);
    static float values[VOCABULARY * 64], again[VOCABULARY * 64];
    more.lora = 4;
    less.ffn = 40;
    ModelOptions exact = calls_options(true);
    small_create(&model, &c, calls_options(false), 5);
    small_create(&other, &c, calls_options(false), 6);
    small_create(&lora, &more, calls_options(false), 7);
    small_create(&narrow, &less, exact, 8);
    model_begin_step(&model, 2, MICRO);
    for (size_t i = 0; i < MICRO; i++) model_gradients(&model, b.tokens[i], b.targets[i], CB, CT);
    finish(&model, &result);
    double squares = 0;
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        need(model_gradient_read(&model, t->name, values, &error), "%s", error.text);
        for (size_t e = 0; e < tensor_elements(t); e++) squares += (double)values[e] * (double)values[e];
        for (size_t e = 0; e < tensor_elements(t); e++) values[e] *= 0.5f;
        need(model_gradient_write(&model, t->name, values, &error) &&
             model_gradient_read(&model, t->name, again, &error), "%s", error.text);
        for (size_t e = 0; e < tensor_elements(t); e++)  // the step's scale is taken off and put on: two roundings
            if (!(fabsf(again[e] - values[e]) <= 3e-7f * fabsf(values[e]))) expect(false, "%s[%zu]", t->name, e);
    }
    check_bound(fabs(sqrt(squares) / result.grad_norm - 1), 1e-6, "calls: gradients by name have the step's norm");
    need(model_copy_weights(&other, &model, &error), "%s", error.text);
    expect(model_hash(&model) == model_hash(&other), "a copy of the weights is another");
    need(model_copy_weights(&lora, &model, &error), "%s", error.text);
    float of_lora[CN], of_base[CN];
    model_score(&model, b.tokens[0], b.targets[0], CB, CT, of_base);
    model_score(&lora, b.tokens[0], b.targets[0], CB, CT, of_lora);
    expect(memcmp(of_lora, of_base, sizeof of_base) == 0, "a copy with pairs of LoRA, whose b are 0, computes another");
    expect_refusal(model_copy_weights(&narrow, &model, &error), &error,
                   "block.0.ffn_in_weight is 144 x 40 in one model", "other shapes");
    expect_refusal(model_copy_weights(&model, &lora, &error) &&
                   model_weight_read(&model, "block.0.q.lora_a", values, &error), &error,
                   "the model has no tensor called block.0.q.lora_a", "a tensor that is not there");
    expect_refusal(model_gradient_read(&lora, "head_weight", values, &error), &error, "head_weight does not train",
                   "a gradient of a tensor that does not train");
    expect_refusal(model_gradient_read(&narrow, "head_weight", values, &error), &error, "summed in fixed point",
                   "gradients of --reduce exact");
    ModelOptions plain = calls_options(false);
    plain.weighs = false;
    Model without;
    small_create(&without, &c, plain, 5);
    expect(score_check(&model, &error), "%s", error.text);
    expect_refusal(score_check(&without, &error), &error, "options.weighs; set them", "a model without weights");
    verdict("calls: weights and gradients by name, a copy of all weights; refusals");
    model_free(&model);
    model_free(&other);
    model_free(&lora);
    model_free(&narrow);
    model_free(&without);
}

// Two models in one process: one with pairs of LoRA and an objective, one of another family. Each has the bits that it
// has alone, when their calls alternate.
typedef struct { Model model; ObjectiveRun run; ObjectiveOptions options; Dataset data; Batches b; } Trained;

static void trained_open(Trained* t, bool prefers) {
    Config c = answers_config(prefers ? FAMILY_LLAMA : FAMILY_GPT2);
    memset(t, 0, sizeof *t);
    t->b = batches_make(61);
    if (prefers) c.lora = 4;
    small_create(&t->model, &c, prefers ? answers_options(PB, PT) : calls_options(false), prefers ? 5 : 6);
    if (!prefers) return;
    ObjectiveOptions o = {.kind = OBJECTIVE_DPO, .beta = 0.2, .reference = "p.numbers"};
    t->options = o;
    open_answers(&t->data, "p_train_*.bin", PT, true);
    need(objective_open(&t->run, &t->options, &t->model, &t->data, NULL, 7, &error), "%s", error.text);
    t->run.compared = true;
}

static void trained_micro_batch(Trained* t, uint64_t step, size_t micro) {
    int32_t tokens[PB * PT], targets[PB * PT];
    uint64_t first = (step * MICRO + micro) * PB;
    if (t->run.model == NULL) {
        model_gradients(&t->model, t->b.tokens[micro], t->b.targets[micro], CB, CT);
        return;
    }
    for (size_t b = 0; b < PB; b++)
        need(window_read(tokens + b * PT, targets + b * PT, &t->data, dataset_sample(&t->data, 7, first + b, PT),
                         VOCABULARY, PT, &error), "%s", error.text);
    t->model.dropout.first_token = first * PT;
    model_gradients(&t->model, tokens, targets, PB, PT);
}

static void trained_close(Trained* t) {
    objective_close(&t->run);
    if (t->data.shard_count > 0) dataset_close(&t->data);
    model_free(&t->model);
}

// Trains those of two that take part, call by call; hashes and losses of the last step.
static void train_alternately(bool first, bool second, uint64_t hashes[2], double losses[2]) {
    static Trained both[2];
    const bool takes[2] = {first, second};
    for (int i = 0; i < 2; i++) if (takes[i]) trained_open(&both[i], i == 0);
    for (uint64_t step = 0; step < 3; step++) {
        for (int i = 0; i < 2; i++) if (takes[i]) model_begin_step(&both[i].model, 1, MICRO);
        for (size_t micro = 0; micro < MICRO; micro++)
            for (int i = 0; i < 2; i++) if (takes[i]) trained_micro_batch(&both[i], step, micro);
        for (int i = 0; i < 2; i++) {
            StepResult result;
            if (!takes[i]) continue;
            finish(&both[i].model, &result);
            losses[i] = result.loss;
            model_update(&both[i].model, step + 1, 1e-2, 1);
        }
    }
    for (int i = 0; i < 2; i++) if (takes[i]) hashes[i] = model_hash(&both[i].model);
    for (int i = 0; i < 2; i++) if (takes[i]) trained_close(&both[i]);
}

static void test_two_models(void) {
    uint64_t alone[2], together[2];
    double losses[2][2];
    train_alternately(true, false, alone, losses[0]);
    train_alternately(false, true, alone, losses[0]);
    train_alternately(true, true, together, losses[1]);
    expect(alone[0] != alone[1] && memcmp(alone, together, sizeof alone) == 0 &&
           memcmp(losses[0], losses[1], sizeof losses[0]) == 0, "other bits: losses %.9g %.9g, not %.9g %.9g",
           losses[1][0], losses[1][1], losses[0][0], losses[0][1]);
    verdict("calls: two models, one with LoRA and an objective, have the bits of each alone");
}

// A batch is scored after another without a backward between them, also if activations are offloaded.
static void test_scored_twice(void) {
    Config c = answers_config(FAMILY_LLAMA);
    float losses[2][3][CN];
    Batches b = batches_make(11);
    c.layers = 6;
    for (int offloads = 0; offloads < 2; offloads++) {
        Model model;
        ModelOptions options = calls_options(true);
        if (offloads) options.offload = OFFLOAD_ACTIVATIONS, options.offload_dir = ".";
        small_create(&model, &c, options, 5);
        alarm(60);  // it hung
        for (int i = 0; i < 3; i++)
            model_score(&model, b.tokens[i % 2], b.targets[i % 2], CB, CT, losses[offloads][i]);
        alarm(0);
        model_free(&model);
    }
    check(memcmp(losses[0], losses[1], sizeof losses[0]) == 0 &&
          memcmp(losses[0][0], losses[0][2], sizeof losses[0][0]) == 0 &&
          memcmp(losses[0][0], losses[0][1], sizeof losses[0][0]) != 0,
          "calls: batches that are scored one after the other, also with offloaded activations");
}

static void test_calls(void) {
    for (Family family = FAMILY_GPT2; family <= FAMILY_LLAMA; family++) {
        test_weighted(family, false);
        test_weighted(family, true);
        test_gradients_of_calls(family);
    }
    test_rule();
    test_sequences();
    test_tensors();
    test_two_models();
    test_scored_twice();
}

// ------------------------------------------------------------------------------------------------
// 4. Programs

static Program job;

// Runs a program with variables (environment_set), or NULL; returns its exit code, and leaves its output in `job`.
static int run_with(const char* variables, const char* program, const char* arguments) {
    return program_execute(&job, program, arguments, become_alone, variables);
}

static bool run(const char* program, const char* arguments) {
    bool good = run_with(NULL, program, arguments) == 0;
    if (!good) program_print(&job, arguments);
    return expect(good, "%s fails", arguments);
}

static bool text_contains(const char* path, const char* words) {
    char* text = text_read(path, NULL);
    bool found = strstr(text, words) != NULL;
    free(text);
    return found;
}

// The program ends with this exit code and one sentence that has these words, and has made no file `made`.
static void run_refuses(int code, const char* says, const char* made, const char* program, const char* arguments) {
    int found = run_with(NULL, program, arguments);
    const char* text = job.text[1] ? job.text[1] : "";
    expect(found == code && strstr(text, says), "%s: exit code %d: '%s' is not in '%s'", arguments, found, says, text);
    expect(count_in(text, "\n") == 1, "%s: more than a sentence: %s", arguments, text);
    expect(!file_exists(made), "%s: %s was made", arguments, made);
    remove_tree(made);
}

enum { STEPS = 4 };
#define BATCHES "--seq 64 --batch 2 --total-batch 512 --steps 4 --warmup 0 "
#define LEARNS "--lr 3e-3 --threads 1 "
#define PAIRS "--data p_train_*.bin --val p_val_*.bin "
#define KINDS "--data k_train_*.bin --val k_val_*.bin "
#define DPO "--objective dpo --reference p.ref --val-reference p.val.ref "
#define KTO "--objective kto --margin 0 --reference k.ref --val-reference k.val.ref "

static const char* preference_run(const char* name, const char* more) {
    return text_of("--init-from base --out %s " BATCHES "--val-every 4 %s", name, more);
}

// What a run has logged in all steps: loss, norm, the four metrics, val_loss; and its weights.
enum { KEYS = 7 };
static const char* const LOGGED[KEYS] = {"loss", "grad_norm", "reward_accuracy", "reward_margin", "logp_chosen",
                                         "logp_rejected", "val_loss"};
typedef struct { double values[KEYS][STEPS]; uint64_t hash; } RunLog;

static RunLog run_log(const char* name) {
    RunLog log;
    memset(&log, 0, sizeof log);
    for (int k = 0; k < KEYS; k++) {
        size_t lines = log_numbers(log.values[k], STEPS, name, LOGGED[k]);
        expect(lines == STEPS, "%s: %zu lines", name, lines);
        for (int s = 0; s < STEPS; s++) {
            expect(!isnan(log.values[k][s]) || (k == KEYS - 1 && s + 1 < STEPS), "%s: %s of step %d", name, LOGGED[k],
                   s + 1);
            if (isnan(log.values[k][s])) log.values[k][s] = 0;
        }
    }
    log.hash = weights_hash(text_of("%s/step_%08d", name, STEPS), &error);
    expect(log.hash != 0, "%s: %s", name, error.text);
    return log;
}

static void logs_same(const RunLog* a, const RunLog* b, const char* name) {
    for (int k = 0; k < KEYS; k++)
        for (int s = 0; s < STEPS; s++)
            expect(a->values[k][s] == b->values[k][s], "%s: %s of step %d is %.17g, not %.17g", name, LOGGED[k], s + 1,
                   b->values[k][s], a->values[k][s]);
    expect(a->hash == b->hash, "%s: other weights", name);
}

static void write_base(void) {
    put_shard("text.bin", VOCABULARY, 5000, 3);
    run(train, "--data text.bin --out base --family llama --layers 4 --heads 4 --kv-heads 2 --channels 32 --ffn 48 "
               "--context 64 --steps 2 --batch 2 --warmup 0 --threads 1 --lr 3e-3");
    static const char* const sets[][2] = {{"p.ref", "p_train_*.bin"}, {"p.val.ref", "p_val_*.bin"},
                                          {"k.ref", "k_train_*.bin"}, {"k.val.ref", "k_val_*.bin"}};
    for (size_t i = 0; i < COUNT_OF(sets); i++)
        run(evaluate, text_of("--init-from base --data %s --logps %s --threads 1", sets[i][1], sets[i][0]));
}

// A reference made of the weights that a run begins with: all margins of step 0 are 0, to the bit.
static void test_margins(void) {
    static const struct { const char *flags; double loss, accuracy; } cases[] = {
        {PAIRS DPO, M_LN2, 0},
        {PAIRS "--objective hinge --reference p.ref --val-reference p.val.ref", 1, 0},
        {PAIRS "--objective ipo --beta 0.5 --reference p.ref --val-reference p.val.ref", 1, 0},
        {KINDS KTO, 0.5, 0}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        remove_tree("one");
        const char* flags = text_of("--lr 0 --threads 1 %s --pack %s", cases[i].flags, i % 2 ? "on" : "off");
        if (!run(train, preference_run("one", flags))) continue;
        RunLog log = run_log("one");
        for (int s = 0; s < STEPS; s++)
            expect(log.values[3][s] == 0 && log.values[2][s] == cases[i].accuracy &&
                   fabs(log.values[0][s] - cases[i].loss) < 1e-7, "%s: margin %g, accuracy %g, loss %.9g",
                   cases[i].flags, log.values[3][s], log.values[2][s], log.values[0][s]);
        expect(fabs(log.values[6][STEPS - 1] - cases[i].loss) < 1e-7, "val_loss %g", log.values[6][STEPS - 1]);
    }
    verdict("programs: margins are exactly 0 where the reference is the model itself");
}

static void test_layouts(void) {
    static const struct { const char* base; const char* flags[12]; } cases[] = {
        {PAIRS DPO, {"--ranks 2 --zero 1", "--ranks 4 --zero 2", "--ranks 2 --zero 3", "--ranks 2 --pp 2",
                     "--ranks 2 --pp 2 --pipeline gpipe", "--ranks 2 --pp 2 --pipeline interleaved",
                     "--ranks 2 --pp 2 --pipeline zb-h1", "--ranks 4 --pp 2 --pipeline zb-h2 --zero 1",
                     "--recompute block", "--ranks 2 --check-every 1", "--threads 2"}},
        {PAIRS DPO "--lora 4 --sft-weight 0.5 --label-smoothing 0.1", {"--ranks 2 --zero 2", "--ranks 2 --pp 2",
                                                                      "--recompute block"}},
        {KINDS KTO, {"--ranks 2 --zero 3", "--ranks 2 --pp 2"}}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        remove_tree("one");
        run(train, preference_run("one", text_of(LEARNS "--reduce exact %s", cases[i].base)));
        RunLog one = run_log("one");
        expect(one.values[3][STEPS - 1] > one.values[3][0], "no margin is learned");
        expect(one.values[0][STEPS - 1] < one.values[0][0], "nothing is learned");
        for (size_t k = 0; k < COUNT_OF(cases[i].flags) && cases[i].flags[k]; k++) {
            remove_tree("other");
            bool threads = strstr(cases[i].flags[k], "--threads") != NULL;
            const char* flags = text_of("--lr 3e-3 --reduce exact %s %s %s", cases[i].base, cases[i].flags[k],
                                        threads ? "" : "--threads 1");
            if (!run(train, preference_run("other", flags))) continue;
            RunLog other = run_log("other");
            logs_same(&one, &other, flags);
        }
        verdict("programs: the same loss, norm, metrics and weights for every layout of ranks (%s)",
                i == 0 ? "dpo" : i == 1 ? "dpo, --lora" : "kto");
    }
}

static void test_kills(void) {
    static const char* const places[] = {"load", "reduce", "update", "rename"};
    const char* flags = PAIRS DPO LEARNS "--reduce exact --ckpt-every 2 --ckpt-async off --resume";
    size_t killed = 0;
    remove_tree("one");
    remove_tree("other");
    run(train, preference_run("one", flags));
    RunLog one = run_log("one");
    for (size_t i = 0; i < COUNT_OF(places); i++)
        killed += run_with(text_of("LLMTRAIN_TEST_FAULT=rank 0 step %zu at %s do kill", i == 3 ? 4 : 1 + i, places[i]),
                           train, preference_run("other", flags)) != 0;
    run(train, preference_run("other", flags));
    RunLog other = run_log("other");
    logs_same(&one, &other, "killed");
    expect(killed == COUNT_OF(places), "%zu kills", killed);
    verdict("programs: a run that is killed and resumed has the log and weights of one that is not");
}

// Without a file, from the model whose pairs are switched off: the bits of the file that the base makes, over all ranks,
// also where they have different answers to look up, and after kills; a run is longer than an epoch.
static void test_adapter_off(void) {
    static const struct { const char *data, *of_file, *of_base; const char* flags[8]; } cases[] = {
        {PAIRS, DPO, "--objective dpo --reference adapter-off ",
         {"", "--ranks 2 --zero 1", "--ranks 4 --zero 3", "--ranks 2 --zero 3",
          "--recompute block", "--offload activations --offload-dir .", "--spike-trace 1 --spike-loss 0.0001",
          "--ranks 2 --check-every 1"}},
        {KINDS, KTO, "--objective kto --margin 0 --reference adapter-off ", {"--ranks 2 --zero 2", "--pack off"}}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t k = 0; k < COUNT_OF(cases[i].flags) && cases[i].flags[k]; k++) {
            const char* flags = cases[i].flags[k];
            const char* alone = strstr(flags, "pack") ? flags : "";
            const char* both = text_of(LEARNS "--reduce exact --lora 4 %s", cases[i].data);
            if (k == 0 || *alone) {
                remove_tree("one");
                run(train, preference_run("one", text_of("%s %s %s", both, cases[i].of_file, alone)));
            }
            RunLog one = run_log("one");
            remove_tree("other");
            if (!run(train, preference_run("other", text_of("%s %s %s", both, cases[i].of_base, flags)))) continue;
            RunLog other = run_log("other");
            logs_same(&one, &other, flags);
            expect(one.values[3][0] == 0 && one.values[3][STEPS - 1] != 0, "margins %g, %g", one.values[3][0],
                   one.values[3][STEPS - 1]);
        }
    const char* flags = PAIRS "--objective dpo --reference adapter-off --lora 4 --quantize nf4 --reduce exact "
                        "--ckpt-every 1 --ckpt-async off --resume " LEARNS;
    remove_tree("one");
    remove_tree("other");
    run(train, preference_run("one", flags));
    RunLog one = run_log("one");
    for (size_t i = 0; i < 3; i++)
        expect(run_with(text_of("LLMTRAIN_TEST_FAULT=rank 0 step %zu at reduce do kill", i + 2), train,
                        preference_run("other", flags)) != 0, "it was not killed in step %zu", i + 2);
    run(train, preference_run("other", flags));
    RunLog other = run_log("other");
    logs_same(&one, &other, "killed");
    expect(one.values[3][0] == 0, "with weights in 4 bits the margin begins at %g", one.values[3][0]);
    verdict("programs: --reference adapter-off has the bits of the base's file, over ranks and after kills");

    // Answers that are cut are compared as they are cut.
    double margin = NAN;
    remove_tree("new");
    run(train, "--init-from base --out new --data k_train_*.bin --objective kto --margin 0 --reference adapter-off "
               "--lora 4 --too-long cut --seq 20 --batch 2 --steps 1 --warmup 0 --threads 1");
    expect(log_numbers(&margin, 1, "new", "reward_margin") == 1 && margin == 0, "cut answers have a margin of %g", margin);
    verdict("programs: --reference adapter-off with --too-long cut");

    // The model that training starts from is another one than that of the file.
    run(train, "--init-from base --out more --data text.bin --steps 4 --batch 2 --seq 64 --warmup 0 --lr 1e-2 "
               "--threads 1");
    static const char note[] = "note: --reference seems to be of another model than the one that training starts from";
    for (int k = 0; k < 2; k++) {
        remove_tree("new");
        run(train, text_of("--init-from %s --out new " BATCHES PAIRS DPO "--threads 1", k ? "more" : "base"));
        expect(job.text[0] && (int)count_in(job.text[0], note) == k, "%d: %s", k, job.text[0] ? job.text[0] : "");
    }
    remove_tree("new");
    verdict("programs: a reference of another model than the one that training starts from is noted");
}

// One row per group, or packed; another micro-batch: the mean is over the pairs of the step.
static void test_batches(void) {
    static const char* const objectives[] = {DPO, "--objective simpo", "--objective orpo --sft-weight 0.3"};
    for (size_t i = 0; i < COUNT_OF(objectives); i++) {
        double values[2][3];
        for (int k = 0; k < 2; k++) {
            remove_tree("one");
            // All of the data in a step, however it is packed.
            Dataset data;
            open_answers(&data, "p_train_*.bin", 64, k == 0);
            size_t rows = data.packed->rows;
            dataset_close(&data);
            run(train, text_of("--init-from base --out one --data p_train_*.bin %s --pack %s --seq 64 --batch 1 "
                               "--total-batch %zu --steps 1 --warmup 0 --lr 1e-3 --threads 1",
                               i == 0 ? "--objective dpo --reference p.ref" : objectives[i], k ? "off" : "on",
                               rows * 64));
            log_numbers(&values[k][0], 1, "one", "loss");
            log_numbers(&values[k][1], 1, "one", "grad_norm");
            log_numbers(&values[k][2], 1, "one", "logp_chosen");
        }
        expect(fabs(values[0][0] / values[1][0] - 1) < 1e-6 && fabs(values[0][1] / values[1][1] - 1) < 1e-5 &&
               fabs(values[0][2] / values[1][2] - 1) < 1e-6, "%s: loss %.9g and %.9g, norm %.9g and %.9g",
               objectives[i], values[0][0], values[1][0], values[0][1], values[1][1]);
    }
    verdict("programs: --pack on and off: the same loss, gradient and log-probabilities of an epoch");
    // A validation on the training data gives the mean of the steps of an epoch, if nothing is learned.
    double losses[100], val[100], sum = 0;
    remove_tree("one");
    run(train, "--init-from base --out one --data p_train_*.bin --val p_train_*.bin --objective orpo --sft-weight 0.3 "
               "--seq 64 --batch 1 --epochs 1 --pack off --lr 0 --warmup 0 --threads 1");
    size_t lines = log_numbers(losses, 100, "one", "loss");
    log_numbers(val, 100, "one", "val_loss");
    for (size_t i = 0; i < lines; i++) sum += losses[i];
    double mean = sum / (double)lines;
    expect(lines == TRAIN_GROUPS && fabs(val[lines - 1] / mean - 1) < 1e-6, "%zu steps: %.9g, not %.9g", lines,
           val[lines - 1], mean);
    verdict("programs: the validation loss is the objective");
}

// A step that is traced to its sequences stays as it is; the worst sequence has a pair's loss.
static void test_traced(void) {
    remove_tree("one");
    remove_tree("other");
    const char* flags = PAIRS DPO "--reduce exact --lr 0.1 --spike-warmup 1 --threads 1";
    run(train, preference_run("one", flags));
    run(train, preference_run("other", text_of("%s --spike-trace 1 --spike-loss 0.0001", flags)));
    RunLog one = run_log("one"), other = run_log("other");
    logs_same(&one, &other, "--spike-trace");
    expect(text_contains("other/events.jsonl", "bad_batch"), "no sequence is reported");
    double worst[STEPS];
    size_t traced = 0;
    log_numbers(worst, STEPS, "other", "worst_loss");
    for (int s = 0; s < STEPS; s++)
        traced += isfinite(worst[s]) && worst[s] >= other.values[0][s] * (1 - 1e-6);
    expect(traced > 0, "no worst_loss: %g %g %g %g", worst[0], worst[1], worst[2], worst[3]);
    verdict("programs: --spike-trace and --spike-loss report sequences by their objective, and change nothing");
}

// Desirable and undesirable answers in unequal numbers, and a step that has one kind alone.
static void test_kinds(void) {
    Dataset data;
    size_t of_kind[2] = {0};
    open_answers(&data, "k_train_*.bin", 64, true);
    for (size_t i = 0; i < data.shard_count; i++)
        for (size_t k = 0; k < data.spans[i].document_count; k++)
            of_kind[data.spans[i].documents[k].kind == SPAN_UNDESIRABLE]++;
    dataset_close(&data);
    expect(of_kind[0] > of_kind[1] && of_kind[1] > 0, "%zu and %zu", of_kind[0], of_kind[1]);
    // One row in a step has often no undesirable answer: its log-probability is null, not 0 or nan.
    double chosen[40], rejected[40];
    remove_tree("one");
    run(train, "--init-from base --out one --data k_train_*.bin --objective kto --margin 0.5 --reference k.ref "
               "--pack off --seq 64 --batch 1 --steps 20 --warmup 0 --lr 1e-3 --threads 1");
    size_t lines = log_numbers(chosen, 40, "one", "logp_chosen"), both = 0;
    log_numbers(rejected, 40, "one", "logp_rejected");
    for (size_t i = 0; i < lines; i++) {
        expect(isnan(chosen[i]) != isnan(rejected[i]), "step %zu: %g and %g", i + 1, chosen[i], rejected[i]);
        both |= isnan(chosen[i]) ? 1 : 2;
    }
    expect(lines == 20 && both == 3 && text_contains("one/metrics.jsonl", "\"logp_rejected\": null"), "%zu lines",
           lines);
    verdict("programs: kto with unequal numbers of kinds, and a step that has one alone");
}

static void test_refused(void) {
    static const struct { const char *says, *flags; } cases[] = {
        {"--reference and --val-reference are for dpo, ipo, kto and hinge, and --objective is simpo",
         PAIRS "--objective simpo --reference p.ref"},
        {"--reference and --val-reference are for dpo, ipo, kto and hinge, and --objective is sft",
         "--data text.bin --val-reference p.ref"},
        {"--objective ipo needs --reference FILE", PAIRS "--objective ipo"},
        {"--val and --val-reference go together with --objective dpo", PAIRS "--objective dpo --reference p.ref"},
        {"--val and --val-reference go together with --objective dpo",
         "--data p_train_*.bin --objective dpo --reference p.ref --val-reference p.val.ref"},
        {"--too-long cut would compare a part of an answer", PAIRS DPO "--too-long cut"},
        {"--reference adapter-off needs weights that stay as they are",
         PAIRS "--objective dpo --lora 2 --reference adapter-off --train *norm*"},
        {"--reference adapter-off covers --val too; leave --val-reference out",
         PAIRS "--objective dpo --lora 2 --reference adapter-off --val-reference p.val.ref"},
        {"--reference adapter-off needs ranks that have all layers; leave --pp out",
         PAIRS "--objective dpo --lora 2 --reference adapter-off --ranks 2 --pp 2"},
        {"--reference adapter-off switches the pairs of --lora off; give --lora",
         PAIRS "--objective dpo --reference adapter-off"},
        {"--objective dpo compares log-probabilities, which dropout changes at random", PAIRS DPO "--dropout 0.1"},
        {"--objective dpo compares log-probabilities, which dropout changes at random",
         PAIRS DPO "--lora 2 --lora-dropout 0.1"},
        {"--objective dpo looks at whole answers, of which --cp and --tp leave a rank a part",
         PAIRS DPO "--ranks 2 --cp 2"},
        {"--objective simpo looks at whole answers, of which --cp and --tp leave a rank a part",
         PAIRS "--objective simpo --ranks 2 --tp 2"},
        {"--label-smoothing is for --objective dpo", PAIRS "--objective simpo --label-smoothing 0.1"},
        {"--sft-weight is for pairs of answers, and --objective is kto", KINDS KTO "--sft-weight 1"},
        {"--objective simpo needs preferences, and text.bin of --data is text", "--data text.bin --objective simpo"},
        {"has documents that are desirable, and --objective simpo takes pairs of a chosen and a rejected one",
         KINDS "--objective simpo"},
        {"has documents that are chosen, and --objective kto takes desirable and undesirable ones", PAIRS KTO},
        {"has documents that are chosen, and --objective sft takes plain ones", PAIRS},
        {"has documents that are plain, and --objective orpo takes pairs",
         "--data m_train_*.bin --objective orpo"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        run_refuses(2, cases[i].says, "new", train,
                    text_of("--init-from base --out new --seq 64 --steps 1 --threads 1 %s", cases[i].flags));
    remove_tree("other");
    run(train, preference_run("other", PAIRS "--objective simpo --lora 2 " LEARNS));
    run_refuses(2, "--reference adapter-off would compare with the model under the adapter", "new", train,
                "--init-from other --out new " BATCHES PAIRS "--objective dpo --reference adapter-off --threads 1");
    verdict("programs: flags and data that do not go together are refused");

    // References.
    static const char of_p[] = "--init-from base --out new " BATCHES "--data p_train_*.bin --objective dpo "
                               "--reference ";
    size_t bytes;
    char* good = text_read("p.ref", &bytes);
    run_refuses(1, "k.ref is of other data; give build/evaluate --logps the same shards", "new", train,
                text_of("%sk.ref", of_p));
    run_refuses(1, "none.ref", "new", train, text_of("%snone.ref", of_p));
    run_refuses(1, "text.bin is not a file of log-probabilities", "new", train, text_of("%stext.bin", of_p));
    run(evaluate, "--init-from base --data p_train_*.bin --logps short.ref --seq 12 --threads 1");
    run_refuses(1, "short.ref has no number for document", "new", train, text_of("%sshort.ref", of_p));
    for (size_t cut = 0; cut < bytes; cut += cut < 80 ? 13 : bytes / 5 + 3) {
        put_bytes("cut.ref", good, cut);
        run_refuses(1, cut < 64 ? "is not a file of log-probabilities" : "is damaged or half copied", "new", train,
                    text_of("%scut.ref", of_p));
    }
    for (size_t i = 0; i < 6; i++) {
        static const size_t places[6] = {3, 9, 17, 25, 57, 100};
        put_bytes("flipped.ref", good, bytes);
        flip_byte("flipped.ref", places[i]);
        run_refuses(1, places[i] < 8 ? "is not a file" : "is damaged or half copied", "new", train,
                    text_of("%sflipped.ref", of_p));
    }
    free(good);
    verdict("programs: references of other data, with answers that were too long, cut, flipped, are refused");

    run_refuses(2, "--logps is for --data", "x.ref", evaluate, "--init-from base --text text.bin --logps x.ref");
    run_refuses(1, "--logps is for conversations, and --data has texts", "x.ref", evaluate,
                "--init-from base --data text.bin --logps x.ref --threads 1");
    verdict("programs: --logps of texts is refused");

    // A pair without its rejected answer: the .spans file is not what a writer writes.
    copy_tree("p_train_000000.bin", "q.bin");
    copy_tree("p_train_000000.spans", "q.spans");
    SpanHeader header;
    char* spans = text_read("q.spans", &bytes);
    memcpy(&header, spans, sizeof header);
    SpanDocument* documents = (SpanDocument*)(spans + sizeof header);
    documents[1].kind = SPAN_PLAIN;
    header.hash = span_file_hash(&header, documents, documents + header.documents);
    memcpy(spans, &header, sizeof header);
    put_bytes("q.spans", spans, bytes);
    patch("q.bin", offsetof(ShardHeader, spans), &header.hash, sizeof header.hash);
    run_refuses(1, "q.spans is damaged: its documents and spans do not fit together", "new", train,
                "--init-from base --out new " BATCHES "--data q.bin --objective simpo");
    free(spans);
    verdict("programs: a chosen answer without a rejected one is refused");

    // Resuming with another objective or reference.
    remove_tree("one");
    run(train, preference_run("one", PAIRS DPO LEARNS));
    run_refuses(2, "belongs to another run: there --objective is 'dpo', here it is 'hinge'", "new", train,
                preference_run("one", PAIRS "--objective hinge --reference p.ref --val-reference p.val.ref " LEARNS
                               "--resume"));
    verdict("programs: a run cannot be resumed with another --objective");
}

static void test_programs(void) {
    if (!train || !evaluate) {
        skip("programs", "train or evaluate is not built");
        return;
    }
    write_base();
    test_margins();
    test_layouts();
    test_kills();
    test_adapter_off();
    test_batches();
    test_traced();
    test_kinds();
    test_refused();
    program_free(&job);
}

int main(int argc, char** argv) {
    const char* programs[] = {"build/train-FP32", "build/evaluate-FP32"};
    const Flag rows[] = {{"train", KIND_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
                         {"evaluate", KIND_TEXT, &programs[1], "PATH", 0, 0, "the program", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_preferences", NULL, &flags, argc, argv)) return code;
    tests_begin("test_preferences");
    train = realpath(programs[0], NULL);
    evaluate = realpath(programs[1], NULL);
    char* fixture = realpath("dev/test/fixtures/objectives.txt", NULL);
    need(fixture != NULL, "run it in the root of the checkout");
    root_enter();
    bytes_only = tokenizer_of_bytes();
    test_fixture(fixture);
    test_derivatives();
    test_extremes();
    write_answers("p", SPAN_CHOSEN, 100000);
    write_answers("k", SPAN_DESIRABLE, 200000);
    write_answers("m", SPAN_PLAIN, 300000);
    test_models();
    test_calls();
    test_programs();
    free(fixture);
    free((char*)train);
    free((char*)evaluate);
    return tests_end();
}
