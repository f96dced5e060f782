// objectives.h: what ./train can minimize: the loss of answers, or how well the model prefers one answer to another.
//
//   1. table     a row per objective: a function of the log-probabilities of the answers, and its derivatives
//   2. options   the flags
//   3. weights   from the losses of a batch's tokens to weights, which model_head needs (model/objective.h)
//
// A preference objective looks at whole answers: x = the sum or the mean of the log-probabilities of an answer's
// tokens, less the same of a reference model, which are numbers from a file (text/logps.h), or what the model itself
// says without its pairs of LoRA. Since dx/d(-log p) is -1, or -1 over the length, a token's weight is that times
// dL/dx. Formulas as in TRL.

#ifndef LLMTRAIN_OBJECTIVES_H
#define LLMTRAIN_OBJECTIVES_H

#include "../../llmtrain.h"
#include "../base/flags.h"
#include "../ranks/layout.h"
#include "../text/logps.h"

// ------------------------------------------------------------------------------------------------
// 1. Table

typedef enum { OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_IPO, OBJECTIVE_SIMPO, OBJECTIVE_ORPO, OBJECTIVE_KTO,
               OBJECTIVE_HINGE, OBJECTIVE_COUNT } ObjectiveKind;

typedef struct {
    int kind;                // ObjectiveKind
    double beta, margin, label_smoothing, sft_weight;
    const char* reference;
    const char* val_reference;
} ObjectiveOptions;

// 1 / (1 + e^-x) and its logarithm, exact for large |x| too.
static inline double sigmoid_double(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }
static inline double log_sigmoid_double(double x) { return x >= 0 ? -log1p(exp(-x)) : x - log1p(exp(x)); }

// The loss of x[0], that of the chosen answer, and x[1], of the rejected one; of kto x[0] alone. d: its derivatives.
typedef double (*ObjectiveLoss)(double d[2], const double x[2], const ObjectiveOptions* o);

// "Direct Preference Optimization", Rafailov et al., 2023; smoothed as in "A Note on DPO with Noisy Preferences",
// Mitchell, 2023.
static inline double objective_dpo(double d[2], const double x[2], const ObjectiveOptions* o) {
    double z = o->beta * (x[0] - x[1]), e = o->label_smoothing;
    d[0] = -o->beta * (sigmoid_double(-z) * (1 - e) - sigmoid_double(z) * e);
    d[1] = -d[0];
    return -(1 - e) * log_sigmoid_double(z) - e * log_sigmoid_double(-z);
}

// "A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al., 2023.
static inline double objective_ipo(double d[2], const double x[2], const ObjectiveOptions* o) {
    double off = x[0] - x[1] - 1 / (2 * o->beta);
    d[0] = 2 * off;
    d[1] = -d[0];
    return off * off;
}

// "SimPO: Simple Preference Optimization with a Reference-Free Reward", Meng et al., 2024.
static inline double objective_simpo(double d[2], const double x[2], const ObjectiveOptions* o) {
    double z = o->beta * (x[0] - x[1]) - o->margin;
    d[0] = -o->beta * sigmoid_double(-z);
    d[1] = -d[0];
    return -log_sigmoid_double(z);
}

// "ORPO: Monolithic Preference Optimization without Reference Model", Hong et al., 2024: the loss of the chosen answer,
// and that of the ratio of the odds. x is the mean: the odds are p / (1 - p), p = e^x. A float does not tell a p above
// 1 - 2^-24 from 1, where the odds are infinite: p is at most that. q = 1 - p, and the derivatives are those of the
// sigmoid of the log of the ratio, multiplied out so that neither a p of 0 nor one of 1 divides 0 by 0.
static inline double objective_orpo(double d[2], const double x[2], const ObjectiveOptions* o) {
    double c = fmin(x[0], -0x1p-24), r = fmin(x[1], -0x1p-24), qc = -expm1(c), qr = -expm1(r);
    double sum = exp(c - r) * qr + qc;
    d[0] = -1 - o->beta / sum;
    d[1] = o->beta * (qc / sum) / qr;
    return -x[0] - o->beta * log_sigmoid_double(c - r - (log(qc) - log(qr)));
}

// "SLiC-HF: Sequence Likelihood Calibration with Human Feedback", Zhao et al., 2023, on the ratios of DPO.
static inline double objective_hinge(double d[2], const double x[2], const ObjectiveOptions* o) {
    double left = 1 - o->beta * (x[0] - x[1]);
    d[0] = left > 0 ? -o->beta : 0;
    d[1] = -d[0];
    return fmax(left, 0);
}

// "KTO: Model Alignment as Prospect Theoretic Optimization", Ethayarajh et al., 2024, of a desirable answer; of an
// undesirable one x[0] and d[0] have the other sign. --margin is the paper's reference point, its estimate of the KL
// divergence, here a number.
static inline double objective_kto(double d[2], const double x[2], const ObjectiveOptions* o) {
    double left = sigmoid_double(-o->beta * x[0]);  // 1 - sigmoid(x), which would cancel
    d[0] = -o->beta * sigmoid_double(o->beta * x[0]) * left;
    d[1] = 0;
    return left;
}

static const struct {
    const char* name;
    bool pairs, means, reference;  // answers come in pairs; x is the mean over an answer; less that of the reference
    ObjectiveLoss loss;            // NULL: the mean loss of the targets
} OBJECTIVES[OBJECTIVE_COUNT] = {
    {"sft", false, false, false, NULL},           {"dpo", true, false, true, objective_dpo},
    {"ipo", true, true, true, objective_ipo},     {"simpo", true, true, false, objective_simpo},
    {"orpo", true, true, false, objective_orpo},  {"kto", false, false, true, objective_kto},
    {"hinge", true, false, true, objective_hinge},
};
#define OBJECTIVE_NAMES "sft|dpo|ipo|simpo|orpo|kto|hinge"

// ------------------------------------------------------------------------------------------------
// 2. Options

#define REFERENCE_OFF "adapter-off"

static inline bool objective_refers_to_base(const ObjectiveOptions* o) {
    return o->reference && strcmp(o->reference, REFERENCE_OFF) == 0;
}

static inline void objective_flags(Flags* flags, ObjectiveOptions* o) {
    const Flag table[] = {
        FLAG_HEADING("Objective"),
        FLAG_CHOICE("objective", &o->kind, OBJECTIVE_SFT, OBJECTIVE_NAMES, FLAG_FIXED,
                    "sft: the loss of answers, or of texts; the others prefer one answer to another (pairs of chosen "
                    "and rejected ones; kto: answers that are desirable or not)"),
        FLAG_REAL("beta", &o->beta, 0.1, 1e-6, 1e6, 0,
                  "how far the model may move from the reference: the larger, the less; orpo: weight of the odds"),
        FLAG_REAL("margin", &o->margin, 0.5, -1e6, 1e6, 0,
                  "simpo: by how much the chosen answer should win; kto: the KL divergence from the reference"),
        FLAG_REAL("label-smoothing", &o->label_smoothing, 0, 0, 0.4999, 0, "dpo: the share of pairs that are the wrong "
                  "way round"),
        FLAG_REAL("sft-weight", &o->sft_weight, 0, 0, 1e6, 0,
                  "pairs: add X times the mean loss of the chosen answer's tokens"),
        FLAG_TEXT("reference", &o->reference, NULL, "FILE", 0,
                  "dpo, ipo, kto, hinge: log-probabilities of --data by the reference model (build/evaluate --logps); "
                  REFERENCE_OFF ": those of the model without the pairs of --lora"),
        FLAG_TEXT("val-reference", &o->val_reference, NULL, "FILE", 0,
                  "the same of --val; " REFERENCE_OFF " needs none"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

// The first document that is not of the kinds that an objective takes; NULL: all are.
static inline const SpanDocument* objective_misfit(const SpanFile* f, int kind) {
    for (size_t i = 0; i < f->document_count; i++) {
        SpanKind k = (SpanKind)f->documents[i].kind;
        bool fits = kind == OBJECTIVE_SFT ? k == SPAN_PLAIN
                  : OBJECTIVES[kind].pairs ? k == SPAN_CHOSEN || k == SPAN_REJECTED
                                           : k == SPAN_DESIRABLE || k == SPAN_UNDESIRABLE;
        if (!fits) return &f->documents[i];
    }
    return NULL;
}

// Refuses data of which an objective does not know what to do.
static inline bool objective_check_data(const ObjectiveOptions* o, const Dataset* data, const char* flag, Error* error) {
    const char* name = OBJECTIVES[o->kind].name;
    for (size_t i = 0; i < data->shard_count; i++) {
        if (o->kind != OBJECTIVE_SFT && data->shards[i].spans == 0)
            return fail_with(error, "--objective %s needs preferences, and %s of %s is text; make shards with tokenize "
                             "--chat", name, data->shards[i].path, flag);
        const SpanDocument* misfit = data->shards[i].spans ? objective_misfit(&data->spans[i], o->kind) : NULL;
        if (misfit)
            return fail_with(error, "%s has documents that are %s, and --objective %s takes %s; %s",
                             data->shards[i].path, SPAN_KIND_NAMES[misfit->kind], name,
                             o->kind == OBJECTIVE_SFT    ? "plain ones"
                             : OBJECTIVES[o->kind].pairs ? "pairs of a chosen and a rejected one"
                                                         : "desirable and undesirable ones",
                             o->kind == OBJECTIVE_SFT ? "give --objective dpo or another one, or convert the answers "
                                                        "wanted as messages" : "give data of that form");
    }
    return true;
}

// Refuses flags that do not go together. drops: there is dropout.
static inline bool objective_check(const ObjectiveOptions* o, bool drops, bool has_val, int too_long,
                                   const Layout* layout, Error* error) {
    const char* name = OBJECTIVES[o->kind].name;
    bool sft = o->kind == OBJECTIVE_SFT, refers = OBJECTIVES[o->kind].reference, base = objective_refers_to_base(o);
    if (!refers && (o->reference || o->val_reference))
        return fail_with(error, "--reference and --val-reference are for dpo, ipo, kto and hinge, and --objective is %s; "
                         "leave them out", name);
    if (refers && o->reference == NULL)
        return fail_with(error, "--objective %s needs --reference FILE, the log-probabilities of the model that it "
                         "starts from; make it with build/evaluate --init-from MODEL --data ... --logps FILE, or give "
                         "--reference " REFERENCE_OFF " with --lora", name);
    if (base && o->val_reference)
        return fail_with(error, "--reference " REFERENCE_OFF " covers --val too; leave --val-reference out");
    if (base && layout->pp > 1)
        return fail_with(error, "--reference " REFERENCE_OFF " needs ranks that have all layers; leave --pp out, or "
                         "give a file of build/evaluate --logps");
    if (refers && !base && has_val != (o->val_reference != NULL))
        return fail_with(error, "--val and --val-reference go together with --objective %s; give both, or neither", name);
    if (refers && !base && too_long == TOO_LONG_CUT)
        return fail_with(error, "--too-long cut would compare a part of an answer with the reference's whole one; leave "
                         "it out");
    if (!sft && drops)
        return fail_with(error, "--objective %s compares log-probabilities, which dropout changes at random; leave out "
                         "--dropout and --lora-dropout", name);
    if (!sft && (layout->cp > 1 || layout->tp > 1))
        return fail_with(error, "--objective %s looks at whole answers, of which --cp and --tp leave a rank a part; "
                         "choose --zero, --shard or --pp", name);
    if (o->label_smoothing > 0 && o->kind != OBJECTIVE_DPO)
        return fail_with(error, "--label-smoothing is for --objective dpo; leave it out");
    if (o->sft_weight > 0 && !OBJECTIVES[o->kind].pairs)
        return fail_with(error, "--sft-weight is for pairs of answers, and --objective is %s; leave it out", name);
    return true;
}

// Refuses --reference adapter-off for a model without pairs, or if these do not begin at zero, or if more is trained.
// continues: they have been trained before; train: what --train names, NULL: nothing.
static inline bool objective_check_pairs(const ObjectiveOptions* o, const Config* c, bool continues, const char* train,
                                         Error* error) {
    if (!objective_refers_to_base(o) || (c->lora > 0 && !continues && !train)) return true;
    if (train)
        return fail_with(error, "--reference " REFERENCE_OFF " needs weights that stay as they are, except for the "
                         "pairs of --lora; leave --train out, or give a file of build/evaluate --logps");
    if (c->lora == 0)
        return fail_with(error, "--reference " REFERENCE_OFF " switches the pairs of --lora off; give --lora");
    return fail_with(error, "--reference " REFERENCE_OFF " would compare with the model under the adapter, not with "
                     "the one that training starts from; give a file of build/evaluate --logps, with the adapter");
}

// ------------------------------------------------------------------------------------------------
// 3. Weights

// What the ranks add up in a step, as whole numbers, so that no order changes a bit: see objective_count.
enum { SUM_RIGHT, SUM_MARGIN, SUM_CHOSEN, SUM_REJECTED, SUM_COUNT, SUM_COUNT_REJECTED };
#define OBJECTIVE_UNIT 0x1p-20

typedef struct ObjectiveRun {
    const ObjectiveOptions* options;
    Model* model;
    const Dataset *train, *val;
    uint64_t seed;
    double *reference, *val_reference;   // (dataset_documents), owned, NAN: not known yet; NULL: none is needed
    float *losses, *weights, *values;    // (N) on the host, owned
    double counted[OBJECTIVE_SUMS];      // in this step, by this rank
    bool unknown;                        // the reference does not know an answer of the batch yet
    double apart;                        // the most that a token's mean differs from the file's in the first batch
    bool compared;                       // that is known
} ObjectiveRun;

static inline void objective_close(ObjectiveRun* r) {
    free(r->reference);
    free(r->val_reference);
    free(r->losses);
    free(r->weights);
    free(r->values);
    memset(r, 0, sizeof *r);
}

static inline const Dataset* objective_data(const ObjectiveRun* r) {
    return r->model->objective.validates ? r->val : r->train;
}

static inline double* objective_reference(const ObjectiveRun* r) {
    return r->model->objective.validates ? r->val_reference : r->reference;
}

static inline Window objective_window(const ObjectiveRun* r, uint64_t sample, size_t T) {
    if (r->model->objective.validates) return dataset_window(r->val, (size_t)sample, T, 0);
    return dataset_sample(r->train, r->seed, sample, T);
}

// Answers, or pairs of them, in B sequences.
static inline size_t objective_count(void* context, size_t B) {
    const ObjectiveRun* r = (const ObjectiveRun*)context;
    size_t T = r->model->options.T, count = 0;
    for (size_t b = 0; b < B; b++) {
        Window w = objective_window(r, r->model->dropout.first_token / T + b, T);
        count += w.packed->first[w.row + 1] - w.packed->first[w.row];
    }
    return count;
}

// An answer in the batch: its rows [first, first + rows), how many of them have a target, and what the model and the
// reference say of these.
typedef struct {
    size_t first, rows, count;
    size_t number;           // of its document: dataset_document
    double logp, reference;
    SpanKind kind;
} Answer;

static inline Answer answer_read(const ObjectiveRun* r, size_t shard, size_t document, size_t first, size_t T) {
    const Dataset* data = objective_data(r);
    const double* reference = objective_reference(r);
    const SpanFile* f = &data->spans[shard];
    const SpanDocument* d = &f->documents[document];
    Answer a = {.first = first, .rows = min_size(d->tokens - (size_t)1, T - first % T),
                .number = dataset_document(data, shard, document), .kind = (SpanKind)d->kind};
    for (size_t s = d->span; s < span_file_end(f, document); s++) a.count += f->spans[s].tokens;
    for (size_t row = first; row < first + a.rows; row++) a.logp -= (double)r->losses[row];
    if (reference) a.reference = reference[a.number];
    return a;
}

// What an objective sees of an answer.
static inline double answer_value(const ObjectiveRun* r, const Answer* a) {
    double x = a->logp - a->reference;
    return OBJECTIVES[r->options->kind].means ? x / (double)a->count : x;
}

// The weights of an answer's tokens, whose losses are -log p: the derivative of the objective is d.
static inline void answer_weigh(ObjectiveRun* r, const Answer* a, double d) {
    double weight = OBJECTIVES[r->options->kind].means ? -d / (double)a->count : -d;
    for (size_t row = a->first; row < a->first + a->rows; row++) r->weights[row] += (float)weight;
}

static inline void objective_add(ObjectiveRun* r, int sum, double value) {
    r->counted[sum] += rint(value / OBJECTIVE_UNIT);
}

// A pair, chosen and rejected, or an answer of kto.
static inline void objective_weigh_group(ObjectiveRun* r, const Answer* chosen, const Answer* rejected) {
    const ObjectiveOptions* o = r->options;
    double d[2], x[2] = {answer_value(r, chosen), rejected ? answer_value(r, rejected) : 0}, sign = 1, loss;
    if (rejected == NULL) {
        sign = chosen->kind == SPAN_DESIRABLE ? 1 : -1;
        x[0] = sign * (x[0] - o->margin);
    }
    loss = OBJECTIVES[o->kind].loss(d, x, o);
    answer_weigh(r, chosen, sign * d[0]);
    if (rejected) answer_weigh(r, rejected, d[1]);
    if (o->sft_weight > 0) {
        loss -= o->sft_weight * chosen->logp / (double)chosen->count;
        for (size_t row = chosen->first; row < chosen->first + chosen->rows; row++)
            r->weights[row] += (float)(o->sft_weight / (double)chosen->count);
    }
    r->values[chosen->first] = (float)loss;
    objective_add(r, SUM_RIGHT, x[0] > x[1]);
    objective_add(r, SUM_MARGIN, o->beta * (x[0] - x[1]));
    objective_add(r, sign > 0 ? SUM_CHOSEN : SUM_REJECTED, chosen->logp);
    objective_add(r, sign > 0 ? SUM_COUNT : SUM_COUNT_REJECTED, 1);
    if (rejected) objective_add(r, SUM_REJECTED, rejected->logp);
    if (rejected) objective_add(r, SUM_COUNT_REJECTED, 1);
}

// Means over a step of all ranks.
static inline ObjectiveLog objective_log(int kind, const double counted[OBJECTIVE_SUMS]) {
    double chosen = counted[SUM_COUNT], rejected = counted[SUM_COUNT_REJECTED];
    double all = OBJECTIVES[kind].pairs ? chosen : chosen + rejected;
    ObjectiveLog log = {counted[SUM_RIGHT] / all, counted[SUM_MARGIN] / all, counted[SUM_CHOSEN] / chosen,
                        counted[SUM_REJECTED] / rejected};
    return log;
}

// Looks at the pairs, or answers of kto, of B sequences from first_token on.
typedef void (*ObjectiveVisit)(ObjectiveRun* r, const Answer* chosen, const Answer* rejected);
static inline void objective_visit(ObjectiveRun* r, uint64_t first_token, size_t B, ObjectiveVisit visit) {
    const Dataset* data = objective_data(r);
    size_t T = r->model->options.T;
    for (size_t b = 0; b < B; b++) {
        Window w = objective_window(r, first_token / T + b, T);
        for (size_t g = w.packed->first[w.row], row = b * T; g < w.packed->first[w.row + 1]; g++) {
            const PackedGroup* group = &w.packed->groups[g];
            const SpanDocument* d = &data->spans[group->shard].documents[group->document];
            Answer first = answer_read(r, group->shard, group->document, row, T), second = {0};
            bool pair = d->kind == SPAN_CHOSEN;
            if (pair) second = answer_read(r, group->shard, group->document + 1, row + d->tokens, T);
            visit(r, &first, pair ? &second : NULL);
            row += group->tokens;
        }
    }
}

static inline void objective_compare(ObjectiveRun* r, const Answer* chosen, const Answer* rejected) {
    double apart = fabs(chosen->logp - chosen->reference) / (double)chosen->count;
    if (chosen->logp != 0) r->apart = fmax(r->apart, apart);  // it is 0 if the batch could not be read
    if (rejected) objective_compare(r, rejected, NULL);
}

// Says so if a file of log-probabilities is not of the model that training starts from: most often a mistake. Other
// builds and processors round otherwise, by less: a logit of 16 bits by up to 0.1 or so.
static inline void objective_compare_first(ObjectiveRun* r) {
    double rounding = FLOATX_DTYPE == DTYPE_F32 ? 0.01 : 0.25;
    const Activations* a = r->model->activations;
    if (r->compared || a->first_token > 0 || r->model->objective.validates || r->reference == NULL) return;
    r->compared = true;
    objective_visit(r, 0, a->B, objective_compare);
    if (r->apart > rounding)
        say(stdout, "note: --reference seems to be of another model than the one that training starts from: in the "
            "first batch a token's log-probability differs by up to %.2g on average over an answer", r->apart);
}

// Objective.weigh: from the slot's losses.
static inline void objective_weigh(void* context) {
    ObjectiveRun* r = (ObjectiveRun*)context;
    Model* model = r->model;
    const Activations* a = model->activations;
    size_t bytes = a->B * a->T * sizeof(float);
    device_download(r->losses, a->losses, bytes, model->stream);
    memset(r->weights, 0, bytes);
    memset(r->values, 0, bytes);
    objective_visit(r, a->first_token, a->B, objective_weigh_group);
    objective_compare_first(r);
    device_upload(model->objective.weights, r->weights, bytes, model->stream);
    device_upload(model->objective.values, r->values, bytes, model->stream);
}

static inline void objective_look_up(ObjectiveRun* r, const Answer* chosen, const Answer* rejected) {
    if (isnan(chosen->reference) || (rejected && isnan(rejected->reference))) r->unknown = true;
}

static inline void objective_keep(ObjectiveRun* r, const Answer* chosen, const Answer* rejected) {
    objective_reference(r)[chosen->number] = chosen->logp;
    if (rejected) objective_reference(r)[rejected->number] = rejected->logp;
}

// Objective.refer, of --reference adapter-off: a forward without pairs, if the reference is not known of all answers in
// the batch. B may be 0: other ranks have a batch.
static inline void objective_refer(void* context, const int32_t* tokens, const int32_t* targets, size_t B) {
    ObjectiveRun* r = (ObjectiveRun*)context;
    Model* model = r->model;
    float scale = model->layers.adapters.scale;
    size_t T = model->options.T;
    uint64_t first = model->dropout.first_token;
    r->unknown = false;
    objective_visit(r, first, B, objective_look_up);
    flat_barrier(&model->flat);
    if (!r->unknown) {  // others may have a forward, in which they need this rank's parameters
        flat_accompany(&model->flat);
        return;
    }
    model->layers.adapters.scale = 0;
    model_upload(model, tokens, targets, B, T, false);
    model_forward(model);
    model_head(model, NULL, 0.0f);
    model->layers.adapters.scale = scale;
    device_download(r->losses, model->activations->losses, B * T * sizeof(float), model->stream);
    objective_visit(r, first, B, objective_keep);
}

// The numbers of a reference that are found out as they are needed: *values, which the caller frees.
static inline bool objective_forget(double** values, const Dataset* data, Error* error) {
    size_t count = dataset_documents(data);
    *values = (double*)memory_allocate(max_size(count, 1) * sizeof(double));
    for (size_t i = 0; *values && i < count; i++) (*values)[i] = NAN;
    return *values || fail_with(error, "out of memory for the log-probabilities of %zu documents", count);
}

// Reads a reference, which must have a number for each answer that is used.
static inline bool objective_read(double** reference, const char* path, const Dataset* data, Error* error) {
    if (!logps_read(reference, path, data, error)) return false;
    for (size_t i = 0; i < data->part_count; i++)
        for (size_t g = 0; g < data->packed[i].group_count; g++) {
            const PackedGroup* group = &data->packed[i].groups[g];
            size_t end = group_end(&data->spans[group->shard], group->document);
            for (size_t d = group->document; d < end; d++)
                if (isnan((*reference)[dataset_document(data, group->shard, d)]))
                    return fail_with(error, "%.600s has no number for document %zu of %.300s, which was too long there; "
                                     "run build/evaluate --logps again, with a --seq of at least %u", path, d,
                                     data->shards[group->shard].path, group->tokens);
        }
    return true;
}

// Prepares an objective for a model that is allocated, and for data that is packed.
static inline bool objective_open(ObjectiveRun* r, const ObjectiveOptions* o, Model* model, const Dataset* train,
                                  const Dataset* val, uint64_t seed, Error* error) {
    size_t bytes = model->options.B * model->options.T * sizeof(float);
    ObjectiveRun run = {.options = o, .model = model, .train = train, .val = val, .seed = seed};
    *r = run;
    if (o->kind == OBJECTIVE_SFT) return true;
    if (objective_refers_to_base(o)) {
        model->objective.refer = objective_refer;
        if (!objective_forget(&r->reference, train, error) || !objective_forget(&r->val_reference, val, error))
            return false;
    } else if (o->reference && !objective_read(&r->reference, o->reference, train, error)) return false;
    if (o->val_reference && !objective_read(&r->val_reference, o->val_reference, val, error)) return false;
    r->losses = (float*)memory_allocate(bytes);
    r->weights = (float*)memory_allocate(bytes);
    r->values = (float*)memory_allocate(bytes);
    model->objective.weigh = objective_weigh;
    model->objective.count = objective_count;
    model->objective.context = r;
    return (r->losses && r->weights && r->values) || fail_with(error, "out of memory for a batch; make --batch smaller");
}

#endif  // LLMTRAIN_OBJECTIVES_H
