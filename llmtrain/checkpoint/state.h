// state.h: the state that a run carries from step to step, and the decisions that follow from it.
//
//   1. schedule   the learning rate as a function of the step: schedule_lr
//   2. state      step, samples, running statistics: RunState, which a checkpoint saves
//   3. guard      clipping, skipped steps, the loss scale: guard_step; which steps are traced: guard_traces
//
//   double lr = schedule_lr(&schedule, state.step), factor;
//   if (guard_step(&state, &factor, &guard, grad_norm)) ...update with factor...

#ifndef LLMTRAIN_STATE_H
#define LLMTRAIN_STATE_H

#include "../base/json_fields.h"

// ------------------------------------------------------------------------------------------------
// 1. Schedule

typedef enum {
    SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_STEP, SCHEDULE_EXPONENTIAL
} ScheduleKind;
#define SCHEDULE_NAMES "constant|linear|cosine|wsd|step|exponential"

typedef struct {
    ScheduleKind kind;
    double lr;              // the highest rate, reached at the end of the warm-up
    double final_fraction;  // of lr, at the last step: linear, cosine, wsd, exponential
    uint64_t warmup, steps; // steps of warm-up, steps of the run
    double decay_fraction;  // wsd: the part of the run at its end in which the rate falls
    uint64_t decay_every;   // step: steps after which the rate is multiplied by decay_factor
    double decay_factor;
} Schedule;

// The learning rate of a step, counted from 0. Warm-up rises linearly from lr / warmup to lr. After it, with x going
// from 0 to 1 over the rest of the run: "SGDR: Stochastic Gradient Descent with Warm Restarts" (cosine, one period),
// "MiniCPM: Unveiling the Potential of Small Language Models" (warm-up, stable, decay).
static inline double schedule_lr(const Schedule* s, uint64_t step) {
    if (step < s->warmup) return s->lr * (double)(step + 1) / (double)s->warmup;
    uint64_t after = step - s->warmup;
    double length = s->steps > s->warmup + 1 ? (double)(s->steps - s->warmup - 1) : 1.0;
    double x = (double)after / length < 1.0 ? (double)after / length : 1.0;
    double fall = s->lr * (1.0 - s->final_fraction);
    double stable = 1.0 - s->decay_fraction;
    switch (s->kind) {
        case SCHEDULE_CONSTANT: return s->lr;
        case SCHEDULE_LINEAR: return s->lr - fall * x;
        case SCHEDULE_COSINE: return s->lr - fall * 0.5 * (1.0 - cos_double(3.14159265358979323846 * x));
        case SCHEDULE_WSD: return x <= stable ? s->lr : s->lr - fall * (x - stable) / s->decay_fraction;
        case SCHEDULE_STEP: return s->lr * pow_double(s->decay_factor, (double)(after / s->decay_every));
        case SCHEDULE_EXPONENTIAL: return s->lr * pow_double(s->final_fraction, x);
    }
    return s->lr;
}

// Appends the flags of the schedule's shape, and sets the defaults.
static inline void schedule_flags(Flags* flags, Schedule* s) {
    const Flag table[] = {
        FLAG_HEADING("Schedule"),
        FLAG_CHOICE("schedule", &s->kind, SCHEDULE_COSINE, SCHEDULE_NAMES, 0,
                    "shape of the learning rate after warmup"),
        FLAG_COUNT("warmup", &s->warmup, 100, 0, 1e12, 0, "steps of linear warmup to --lr"),
        FLAG_REAL("lr-final", &s->final_fraction, 0.1, 0, 1, 0,
                  "final learning rate as a fraction of --lr (linear, cosine, wsd, exponential)"),
        FLAG_REAL("wsd-fraction", &s->decay_fraction, 0.2, 0.0001, 1, 0,
                  "with --schedule wsd: decay the rate over this last fraction of the steps after warmup"),
        FLAG_COUNT("decay-every", &s->decay_every, 1000, 1, 1e12, 0,
                   "with --schedule step: multiply the rate by --decay-factor every N steps"),
        FLAG_REAL("decay-factor", &s->decay_factor, 0.5, 0, 1, 0,
                  "with --schedule step: multiply the rate by X every --decay-every steps"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

// ------------------------------------------------------------------------------------------------
// 2. State

typedef struct {
    double mean, variance;
    uint64_t count;
} NormStatistics;

// Of the steps' losses: the mean over about the last 10, and the variance over about the last 50, taken from the
// differences between consecutive steps, so that a falling loss does not raise it.
typedef struct {
    double mean, variance, last;
    uint64_t count;
} LossStatistics;

// Together with parameters and optimizer state this is the whole state of a run.
typedef struct {
    uint64_t step;           // steps done, skipped ones included
    uint64_t samples;        // sequences consumed
    uint64_t updates;        // steps that were not skipped: the count that the optimizer uses
    NormStatistics norms;    // of the gradient's norm, over about the last hundred steps
    double loss_scale;       // 1 unless FP16
    uint64_t scale_good;     // finite steps since the last overflow or doubling
    uint64_t skipped_consecutive;  // consecutive skipped steps
    uint64_t rewinds;        // rewinds so far, and of the last:
    uint64_t rewound_from, rewound_to;  // the first bad step, and the step of the checkpoint
    double lr_factor;        // of the learning rate, after rewinds
    LossStatistics losses;
    uint64_t trace_debt;     // trace budget in use; shrinks by one per step: guard_traces
} RunState;

static const Field STATE_FIELDS[] = {
    FIELD_SAVED(RunState, step, KIND_COUNT, "step", NULL),
    FIELD_SAVED(RunState, samples, KIND_COUNT, "samples", NULL),
    FIELD_SAVED(RunState, updates, KIND_COUNT, "updates", NULL),
    FIELD_SAVED(RunState, norms.mean, KIND_REAL, "norm_mean", NULL),
    FIELD_SAVED(RunState, norms.variance, KIND_REAL, "norm_variance", NULL),
    FIELD_SAVED(RunState, norms.count, KIND_COUNT, "norm_count", NULL),
    FIELD_SAVED(RunState, loss_scale, KIND_REAL, "loss_scale", NULL),
    FIELD_SAVED(RunState, scale_good, KIND_COUNT, "scale_good", NULL),
    FIELD_SAVED(RunState, skipped_consecutive, KIND_COUNT, "skipped_consecutive", NULL),
    FIELD_SAVED(RunState, rewinds, KIND_COUNT, "rewinds", NULL),
    FIELD_SAVED(RunState, rewound_from, KIND_COUNT, "rewound_from", NULL),
    FIELD_SAVED(RunState, rewound_to, KIND_COUNT, "rewound_to", NULL),
    FIELD_SAVED(RunState, lr_factor, KIND_REAL, "lr_factor", NULL),
    FIELD_SAVED(RunState, losses.mean, KIND_REAL, "loss_mean", "0"),
    FIELD_SAVED(RunState, losses.variance, KIND_REAL, "loss_variance", "0"),
    FIELD_SAVED(RunState, losses.last, KIND_REAL, "loss_last", "0"),
    FIELD_SAVED(RunState, losses.count, KIND_COUNT, "loss_count", "0"),
    FIELD_SAVED(RunState, trace_debt, KIND_COUNT, "trace_debt", "0"),
};
enum { STATE_FIELD_COUNT = sizeof STATE_FIELDS / sizeof STATE_FIELDS[0] };

static inline RunState run_state_begin(bool dynamic_scale, double loss_scale) {
    RunState state = {.loss_scale = dynamic_scale ? loss_scale : 1.0, .lr_factor = 1.0};
    return state;
}

// Counts a step; updated: it was not skipped.
static inline void state_advance(RunState* state, bool updated) {
    state->skipped_consecutive = updated ? 0 : state->skipped_consecutive + 1;
    state->step++;
}

// ------------------------------------------------------------------------------------------------
// 3. Guard
//
// The spike guard watches the norm of the gradient. With FP16 the loss is scaled up before the backward so that small
// gradients do not underflow; the guard adapts that scale.

typedef struct {
    double clip;             // the norm is clipped to it; 0: never
    double spike_sigma;      // a norm within mean + spike_sigma * std is not clipped; 0: the rule is off
    double spike_skip;       // a step with a norm over spike_skip * mean is skipped; 0: the rule is off
    uint64_t spike_warmup;   // norms seen before the two rules hold
    double spike_trace;      // a step that is skipped, or clipped by more than this factor, is traced; 0: off
    double spike_loss;       // so is a step with a loss over mean + spike_loss * std; 0: off
    bool dynamic_scale;      // adapt the loss scale (FP16)
    uint64_t scale_growth;   // double it after this many finite steps
} GuardOptions;

// Decides on one step from its gradient's norm: returns false if it must be skipped, else true and the factor for the
// gradients, so that their norm is at most max(clip, mean + sigma * std). The statistics see the norm cut to these
// bounds: one spike moves them little, while norms that stay high move them a little every step, until they are
// accepted. They are the plain mean and variance of the first hundred norms, and after that weigh each new norm by
// 1/100. Also adapts the loss scale.
static inline bool guard_step(RunState* state, double* factor, const GuardOptions* o, double norm) {
    NormStatistics* n = &state->norms;
    bool finite = isfinite(norm), settled = n->count >= o->spike_warmup;
    if (o->dynamic_scale) {
        // "Mixed Precision Training": halve on overflow, double after many finite steps.
        state->scale_good = finite ? state->scale_good + 1 : 0;
        if (!finite && state->loss_scale > 1.0) state->loss_scale /= 2;
        if (state->scale_good >= o->scale_growth && state->loss_scale < 0x1p24) {
            state->loss_scale *= 2;
            state->scale_good = 0;
        }
    }
    *factor = 0.0;
    if (!finite) return false;
    double bound = o->clip > 0 ? o->clip : INFINITY, bar = INFINITY;
    if (settled && o->spike_sigma > 0 && o->clip > 0) bound = fmax(bound, n->mean + o->spike_sigma * sqrt(n->variance));
    if (settled && o->spike_skip > 0) bar = o->spike_skip * n->mean;
    double seen = fmin(norm, fmin(bound, bar)), distance = seen - n->mean;
    double weight = fmax(1.0 / (double)(n->count + 1), 0.01);
    n->mean += weight * distance;
    n->variance = (1.0 - weight) * (n->variance + weight * distance * distance);
    n->count++;
    if (norm > bar) return false;
    *factor = norm > bound ? bound / norm : 1.0;
    return true;
}

// Whether the loss of a step is over mean + sigma * std, once `warmup` losses were seen. The statistics see it cut to
// mean + 2 std, so that a bad step moves them little.
static inline bool loss_jumps(LossStatistics* l, double loss, double sigma, uint64_t warmup) {
    if (!isfinite(loss)) return false;
    double std = fmax(sqrt(l->variance), 1e-3 * fabs(l->mean));
    bool settled = l->count >= warmup, jumps = settled && sigma > 0 && loss > l->mean + sigma * std;
    double seen = settled ? fmin(loss, l->mean + 2 * std) : loss, step = seen - l->last, square = step * step / 2;
    if (settled) square = fmin(square, 4 * std * std);
    if (l->count > 0) l->variance += fmax(1.0 / (double)l->count, 0.02) * (square - l->variance);
    l->count++;
    l->mean += fmax(1.0 / (double)l->count, 0.1) * (seen - l->mean);
    l->last = seen;
    return jumps;
}

typedef enum { SPIKE_NONE, SPIKE_SKIPPED, SPIKE_CLIPPED, SPIKE_LOSS } Spike;
static const char* const SPIKE_NAMES[] = {"usual", "skipped", "clipped hard", "loss spike"};

// Whether a step, on which guard_step has decided, is to be traced to its sequences (trace.h), and why. Tracing costs
// about as much as a step, so if all steps are bad, only 1 in 100 is traced after a burst of 20. The decision depends
// only on the state, so that a resumed run traces the same steps.
static inline Spike guard_traces(RunState* state, const GuardOptions* o, double loss, double norm, bool update,
                                 double factor) {
    enum { COST = 100, DEBT_MAX = 20 * COST };
    bool overflow = o->dynamic_scale && isfinite(loss) && !isfinite(norm) && state->loss_scale > 1.0;  // is no anomaly
    bool hard = update && state->norms.count > o->spike_warmup && factor * o->spike_trace < 1.0;
    bool jumps = loss_jumps(&state->losses, loss, o->spike_loss, o->spike_warmup);
    Spike spike = jumps ? SPIKE_LOSS : SPIKE_NONE;
    if (o->spike_trace > 0 && hard) spike = SPIKE_CLIPPED;
    if (o->spike_trace > 0 && !update && !overflow) spike = SPIKE_SKIPPED;
    if (state->trace_debt > 0) state->trace_debt--;
    if (spike == SPIKE_NONE || state->trace_debt + COST > DEBT_MAX) return SPIKE_NONE;
    state->trace_debt += COST;
    return spike;
}

#endif  // LLMTRAIN_STATE_H
