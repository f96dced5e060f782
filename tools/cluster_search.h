// cluster_search.h: the fastest layouts of a model on a cluster, and what a long run on it takes: failures,
// checkpoints, money, energy; islands of GPUs that the internet connects.
//
//   size_t count;
//   bool ok = cluster_search(choices, &count, &cluster, &model, gpus, memory_gb, &error);   the fastest first
//   Goodput g = goodput_of(gpus, 50700, stall_s, write_s, restart_s);

#ifndef LLMTRAIN_CLUSTER_SEARCH_H
#define LLMTRAIN_CLUSTER_SEARCH_H

#include "cluster.h"
#include "../llmtrain/base/progress.h"
#include "../llmtrain/ranks/layout.h"

// ------------------------------------------------------------------------------------------------
// 1. Layouts

typedef struct {
    ClusterLayout layout;
    ClusterStep step;
} ClusterChoice;

enum { CLUSTER_CHOICES = 256 };  // that are compared with the tables of their pipelines

static inline int cluster_compare(const void* a, const void* b) {
    const ClusterStep *x = &((const ClusterChoice*)a)->step, *y = &((const ClusterChoice*)b)->step;
    if (x->ms != y->ms) return x->ms < y->ms ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// The choices found so far, in any order; of CLUSTER_CHOICES the slowest is the last.
typedef struct {
    ClusterChoice* choices;  // (CLUSTER_CHOICES)
    size_t count, tried;
    double least;            // bytes of the layout that needs the fewest
    const Cluster* cluster;
    const ClusterModel* model;
    double limit;            // bytes of a GPU
} ClusterSearch;

// Whether a layout can run: what is divided is divisible, each GPU has something to do, and train takes it.
static inline bool cluster_divides(const ClusterModel* m, const ClusterLayout* l, size_t machine) {
    const Config* c = &m->config;
    Error ignored;
    bool rows = l->tp <= machine && (l->cp == 1 || m->T / l->cp >= 1024);
    bool pieces = l->pp <= CLUSTER_STAGES && l->pp * l->chunks <= c->layers;
    bool kept = l->pp == 1 || !pipeline_splits(l->kind) || l->recompute == RECOMPUTE_NONE;
    bool batch = l->dp * l->B <= m->sequences && m->sequences % (l->dp * l->B) == 0;
    if (!rows || !pieces || !kept || !batch) return false;
    Layout layout = {.zero = l->zero, .shard = l->shard, .tp = l->tp, .cp = l->cp, .pp = l->pp, .leaves = l->tp,
                     .row_leaves = l->cp, .pipeline = l->kind};
    if (l->kind == PIPELINE_INTERLEAVED) layout.chunks = l->chunks;
    layout.kv_copies = layout_kv_copies(&layout, c);
    return layout_check(&layout, l->tp * l->cp * l->pp * l->dp, c, m->T, false, &ignored);
}

// Estimates one layout, and keeps it if it fits and is among the fastest.
static inline void cluster_try(ClusterSearch* s, const ClusterLayout* l) {
    ClusterChoice* worst = &s->choices[s->count - (s->count == CLUSTER_CHOICES)];
    ClusterStep step;
    Error ignored;
    if (!cluster_predict(&step, s->cluster, &CLUSTER_FIT, s->model, l, false, &ignored)) return;
    s->tried++;
    s->least = fmin(s->least, step.bytes);
    if (step.bytes > s->limit || (s->count == CLUSTER_CHOICES && step.ms >= worst->step.ms)) return;
    worst->layout = *l, worst->step = step;
    s->count += s->count < CLUSTER_CHOICES;
    // The slowest is the last.
    for (size_t i = 0; s->count == CLUSTER_CHOICES && i + 1 < s->count; i++) {
        ClusterChoice kept = s->choices[i], *last = &s->choices[s->count - 1];
        if (kept.step.ms > last->step.ms) s->choices[i] = *last, *last = kept;
    }
}

// All schedules, micro-batches, ZeRO stages and levels of recomputation of a layout over (tp, cp, pp, dp). Pipelines
// take ZeRO 1: 2 and 3 would communicate in every micro-batch.
static inline void cluster_try_all(ClusterSearch* s, ClusterLayout l) {
    static const struct { PipelineKind kind; size_t chunks; } schedules[] = {
        {PIPELINE_1F1B, 1}, {PIPELINE_INTERLEAVED, 2}, {PIPELINE_INTERLEAVED, 4}, {PIPELINE_INTERLEAVED, 8},
        {PIPELINE_ZB_H1, 1}, {PIPELINE_ZB_H2, 1}};
    static const RecomputeLevel levels[] = {RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_ATTENTION, RECOMPUTE_BLOCK};
    size_t sharded = l.dp * l.cp, machine = s->cluster->machine;
    for (size_t i = 0; i < (l.pp > 1 ? sizeof schedules / sizeof *schedules : 1); i++)
        for (l.B = 1; l.B <= 16; l.B *= 2)
            for (l.zero = sharded > 1; l.zero <= (sharded == 1 ? 0u : l.pp > 1 ? 1u : 3u); l.zero++)
                for (int hybrid = 0; hybrid <= (sharded > machine && l.zero > 0 && sharded % machine == 0); hybrid++)
                    for (size_t r = 0; r < sizeof levels / sizeof *levels; r++) {
                        l.kind = schedules[i].kind, l.chunks = schedules[i].chunks, l.recompute = levels[r];
                        l.shard = hybrid ? machine : 0;
                        if (cluster_divides(s->model, &l, machine)) cluster_try(s, &l);
                    }
}

// Whether what is tried is what was asked for: a number above 1, or any.
static inline bool cluster_wanted(uint64_t asked, size_t tried) { return asked <= 1 || asked == tried; }

// Lists the layouts over all GPUs that fit `memory_gb`, the fastest first: choices (CLUSTER_CHOICES), of which *count
// are found; with tp, cp or pp of `asked` above 1 those with these alone. Fails, saying why, if there is none.
static inline bool cluster_search(ClusterChoice* choices, size_t* count, const Cluster* c, const ClusterModel* m,
                                  const Layout* asked, size_t gpus, double memory_gb, Error* error) {
    ClusterSearch s = {choices, 0, 0, INFINITY, c, m, 1e9 * memory_gb};
    Progress progress = progress_begin("planning", 0);
    for (size_t tp = 1; tp <= c->machine; tp *= 2)
        for (size_t cp = 1; cp <= 64; cp *= 2)
            for (size_t pp = 1; pp <= CLUSTER_STAGES && pp <= m->config.layers; pp++) {
                ClusterLayout l = {tp, cp, pp, gpus / (tp * cp * pp), 1, 1, 0, 0, PIPELINE_1F1B, RECOMPUTE_NONE};
                bool wanted = cluster_wanted(asked->tp, tp) && cluster_wanted(asked->cp, cp) &&
                              cluster_wanted(asked->pp, pp);
                if (wanted && l.dp > 0 && l.dp * tp * cp * pp == gpus) cluster_try_all(&s, l);
                progress_show(&progress, s.tried);
            }
    progress_end(&progress);
    *count = s.count;
    if (s.tried == 0)
        return fail_with(error, "no layout of %zu GPUs%s divides a step of %zu sequences; choose another "
                         "--total-batch, as a multiple of a large power of two", gpus,
                         asked->tp > 1 || asked->cp > 1 || asked->pp > 1 ? " with these --tp, --cp and --pp" : "",
                         m->sequences);
    if (s.count == 0)
        return fail_with(error, "no layout of %zu GPUs fits in %g GB; the smallest needs %.1f GB", gpus, memory_gb,
                         1e-9 * s.least);
    for (size_t i = 0; i < s.count; i++) {
        ClusterStep* step = &choices[i].step;
        if (!cluster_predict(step, c, &CLUSTER_FIT, m, &choices[i].layout, true, error)) return false;
    }
    qsort(choices, s.count, sizeof *choices, cluster_compare);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Months

typedef struct { double mtbf_s, every_s, share; } Goodput;  // of all GPUs; between checkpoints; of the time that counts

// A failure of any GPU costs the steps since the last checkpoint and a restart. Checkpoints, each of which stops
// training for stall_s, are made at the interval that loses the least (Young, "A first order approximation to the
// optimum checkpoint interval"), and not before the one before is written.
static inline Goodput goodput_of(double gpus, double gpu_mtbf_h, double stall_s, double write_s, double restart_s) {
    Goodput g = {3600 * gpu_mtbf_h / gpus, 0, 0};
    g.every_s = fmax(write_s, sqrt(2 * stall_s * g.mtbf_s));
    g.share = fmax(0, 1 - stall_s / g.every_s - (g.every_s / 2 + restart_s) / g.mtbf_s);
    return g;
}

// Islands that train alone for H steps and then average what they have learned (DiLoCo, arxiv.org/abs/2311.08105): the
// share of the time in which they compute. One byte of each parameter is sent around a ring, twice, at `rate` GB/s.
static inline double islands_share(double parameters, double islands, double rate, double H, double step_ms) {
    double sync_ms = islands > 1 ? 1e-6 * 2 * (islands - 1) / islands * parameters / rate : 0;
    return H * step_ms / (H * step_ms + sync_ms);
}

#endif  // LLMTRAIN_CLUSTER_SEARCH_H
