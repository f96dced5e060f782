// cluster.h: how long a training step takes on a cluster of GPUs, for each way to lay a model out over them: by tensor
// (tp), context (cp), pipeline (pp) and data (dp) parallelism, ZeRO, micro-batches and recomputation.
//
//   Cluster cluster;
//   if (!cluster_open(&cluster, "H100", &error)) return false;         the data sheet; then change what differs
//   ClusterStep step;
//   if (!cluster_predict(&step, &cluster, &CLUSTER_FIT, &model, &layout, true, &error)) return false;
//
//   1. cluster   data sheets, links, what they reach in practice
//   2. block     the operations of a block on one GPU, and its messages
//   3. memory    of a GPU
//   4. step      the pipeline's table, gradients and parameters between copies, the update
//
// cluster_search.h finds the fastest layouts.
//
// Arithmetic and bytes are those of costs.h; their rates are shares of the data sheet, fitted to published runs
// (CLUSTER_FIT; `make plan-published`, doc/planner.md). Messages of tp, cp and pp delay the operations that wait for
// them, and with them the pipeline, whose table (schedule.h) is made of these times; those of dp run under the backward
// and the next forward. Loading data, validation and jitter between GPUs are not counted.
//
// Ranks are numbered tp first, then cp, pp, dp, as in mesh.h, so that tp stays inside a machine.

#ifndef LLMTRAIN_CLUSTER_H
#define LLMTRAIN_CLUSTER_H

#include "predict.h"
#include "../llmtrain/base/data_sheets.h"
#include "../llmtrain/ranks/schedule.h"
#include "../llmtrain/run/presets.h"

// ------------------------------------------------------------------------------------------------
// 1. Cluster

typedef struct {
    DevicePeak gpu;
    double watts;             // power limit of a GPU
    double network;           // GB/s of a GPU to other machines, in each direction
    double oversubscription;  // what the network's rate is divided by between pods
    size_t machine, pod;      // GPUs
    double latency_ms;        // of a message
} Cluster;

// Shares of the data sheet that runs reach.
typedef struct {
    double gemm, hopper;  // of the peak, by large matmuls: up to A100; from H100 on, which lower their clock under load
    double edge;          // a matmul of M x N x K is slower by (1 + edge / M) (1 + edge / N) (1 + edge / K)
    double attention;     // of what large matmuls reach
    double memory, link;  // of the bandwidths
    double tensor, data;  // shares of the time of messages that are not hidden although they overlap
    double power;         // the clock follows this power of the power limit
} ClusterFit;
static const ClusterFit CLUSTER_FIT = {0.667, 0.561, 88, 0.43, 0.90, 0.90, 0.70, 0.133, 0.40};

// From the data sheet of a GPU, in machines of 8 with 400 Gbit/s each.
static inline bool cluster_open(Cluster* c, const char* gpu, Error* error) {
    const DevicePeak* peak = device_find(gpu);
    if (peak == NULL || peak->memory_gb == 0)
        return fail_with(error, "there is no data sheet of a GPU named '%s'; choose A100, H100, H200, B200 or another "
                         "one that llmtrain/base/data_sheets.h lists with its memory", gpu);
    const Cluster cluster = {.gpu = *peak, .watts = peak->watts, .network = 50, .oversubscription = 1, .machine = 8,
                             .pod = SIZE_MAX, .latency_ms = 0.005};
    *c = cluster;
    return true;
}

typedef enum { SCORES_TILED, SCORES_STORED, SCORES_AGAIN } ClusterScores;  // (T, T) of attention: never in memory, kept
                                                                           // there, or computed again in the backward
// The model, the batch, and how the program works; zeros: as this one does.
typedef struct {
    Config config;
    size_t T, sequences;      // of a step, on all GPUs
    ClusterScores scores;
    bool whole_rows;          // without sequence parallelism: norms, and what they keep, are not divided by tp
    bool parallel;            // attention and feed-forward side by side: half the messages of tp
    bool tp_overlaps, dp_waits;  // tp's messages run under matmuls; dp's do not run under the backward
    double logit_bytes;       // of an element of the logits, all of which are in memory at once; 0: in small parts
    double kept_bytes;        // of a row, that a block keeps; 0: those of the level of recomputation
} ClusterModel;

typedef struct {
    size_t tp, cp, pp, dp, chunks, B, zero, shard;  // B: sequences of a micro-batch
    PipelineKind kind;
    RecomputeLevel recompute;
} ClusterLayout;

typedef struct {
    double ms, bubble_ms, tp_ms, cp_ms, dp_ms, update_ms, recompute_ms;  // parts; messages: what is not hidden
    double bytes, mfu;
} ClusterStep;

typedef struct { double work[PIPELINE_WORKS], tp_ms, cp_ms, recompute_ms; } ClusterWork;

static inline double cluster_clock(const Cluster* c, const ClusterFit* f) {
    return fmin(1, pow(c->watts / c->gpu.watts, f->power)) * (c->gpu.bf16 > 500 ? f->hopper : f->gemm);
}

static inline double cluster_bytes_ms(const Cluster* c, const ClusterFit* f, double bytes) {
    return 1e-6 * bytes / (c->gpu.memory * f->memory);
}

static inline double cluster_matmul_ms(const Cluster* c, const ClusterFit* f, double m, double n, double k) {
    double edges = (1 + f->edge / m) * (1 + f->edge / n) * (1 + f->edge / k);
    double ms = 1e-9 * 2 * m * n * k * edges / (c->gpu.bf16 * cluster_clock(c, f));
    return fmax(ms, cluster_bytes_ms(c, f, COST_X * (m * k + n * k + m * n)));
}

// GB/s at which a ring of `size` GPUs, each `stride` after the one before, sends. Each member in a machine drives its
// network card; between pods all rings share what leads there.
static inline double cluster_rate(const Cluster* c, const ClusterFit* f, size_t stride, size_t size) {
    size_t inside = max_size(1, min_size(size, c->machine / stride));
    double rate = c->gpu.link, network = c->network * (double)inside;
    if (stride * size > c->machine) rate = fmin(rate, network);
    if (stride * size > c->pod)
        rate = fmin(rate, network * fmin(1, (double)max_size(1, c->pod / stride) / c->oversubscription));
    return rate * f->link;
}

// An all-gather or reduce-scatter of `bytes` in all, in `parts`.
static inline double cluster_gather_ms(const Cluster* c, const ClusterFit* f, size_t stride, size_t size, double bytes,
                                       double parts) {
    if (size == 1) return 0;
    double n = (double)size, hops = (double)divide_up(size, max_size(1, min_size(size, c->machine / stride)));
    return 1e-6 * bytes * (n - 1) / n / cluster_rate(c, f, stride, size) + parts * hops * c->latency_ms;
}

// ------------------------------------------------------------------------------------------------
// 2. Block

static inline BlockShape cluster_shape(const ClusterModel* m, const ClusterLayout* l) {
    const Config* c = &m->config;
    BlockShape s = {l->B, m->T, c->channels, divide_up(c->heads, l->tp), divide_up(c->kv_heads, l->tp),
                    config_head_size(c), divide_up(c->ffn, l->tp), c->family == FAMILY_LLAMA, c->qk_norm, 1, 1,
                    1, 1};
    return s;
}

// Forward and backward of attention on a GPU.
static inline void cluster_attention(double ms[2], const Cluster* c, const ClusterFit* f, const ClusterModel* m,
                                     const BlockShape* s, double cp) {
    double rate = 1e9 * c->gpu.bf16 * cluster_clock(c, f) * f->attention, T = (double)s->T;
    double pairs = (double)(s->B * s->H) * T * T / cp;
    Cost tiled[2] = {cost_attention_forward(s->B, s->T, s->H, s->K, s->D),
                     cost_attention_backward(s->B, s->T, s->H, s->K, s->D)};
    for (int i = 0; i < 2; i++) {
        ms[i] = fmax(tiled[i].flops / cp / rate * (1 + 1024 / T), cluster_bytes_ms(c, f, tiled[i].bytes / cp));
        // Stored scores: matmuls of all pairs, not half; written and read by softmax and dropout.
        if (m->scores != SCORES_TILED)
            ms[i] = (double)(i + 1) * 2 * cluster_matmul_ms(c, f, pairs / T, T, (double)s->D) +
                cluster_bytes_ms(c, f, pairs * (i ? 17 : 13));
    }
    if (m->scores == SCORES_AGAIN) ms[1] += ms[0];
}

// One block and one micro-batch on one GPU.
static inline ClusterWork cluster_block(const Cluster* c, const ClusterFit* f, const ClusterModel* m,
                                        const ClusterLayout* l) {
    BlockShape s = cluster_shape(m, l);
    double cp = (double)l->cp, N = (double)(s.B * s.T) / cp, C = (double)s.C, D = (double)s.D;
    double wide = (double)(s.H + 2 * s.K) * D, gates = s.llama ? 2 : 1;
    size_t rows = max_size(1, s.B * s.T / l->cp / (m->whole_rows ? 1 : l->tp)), act = s.B * s.T / l->cp * s.F;
    double qkv = cluster_matmul_ms(c, f, N, wide, C), out = cluster_matmul_ms(c, f, N, C, (double)s.H * D);
    double in = cluster_matmul_ms(c, f, N, gates * (double)s.F, C), down = cluster_matmul_ms(c, f, N, C, (double)s.F);
    double matmuls = qkv + out + in + down, attention[2];
    cluster_attention(attention, c, f, m, &s, cp);
    double norms = cluster_bytes_ms(c, f, 2 * cost_norm_forward(rows, s.C, !s.llama, true).bytes);
    double norms_back = cluster_bytes_ms(c, f, 2 * cost_norm_backward(rows, s.C, !s.llama).bytes);
    Cost acts[2] = {s.llama ? cost_swiglu_forward((double)act) : cost_gelu_forward((double)act),
                    s.llama ? cost_swiglu_backward((double)act) : cost_gelu_backward((double)act)};
    double rope = s.llama ? cluster_bytes_ms(c, f, cost_rope(s.B, s.T, s.H + s.K, s.D).bytes / cp) : 0;
    double forward_act = cluster_bytes_ms(c, f, acts[0].bytes), backward_act = cluster_bytes_ms(c, f, acts[1].bytes);
    // Rows are gathered before the column cuts and scattered after the row cuts, forward and backward; with sequence
    // parallelism gathered again for the gradients of the weights.
    double tp = cluster_gather_ms(c, f, 1, l->tp, COST_X * N * C, 1) * f->tensor * (m->tp_overlaps ? 0.5 : 1);
    double gathers = m->parallel ? 2 : 4, again = m->whole_rows ? 0 : gathers / 2;
    double keys = cluster_gather_ms(c, f, l->tp, l->cp, COST_X * N * cp * 2 * (double)s.K * D, 1);
    ClusterWork w = {{0}, (2 * gathers + again) * tp, 3.5 * keys, 0};
    if (l->recompute >= RECOMPUTE_NORMS) w.recompute_ms += norms;
    if (l->recompute >= RECOMPUTE_GELU) w.recompute_ms += forward_act;
    if (l->recompute >= RECOMPUTE_ATTENTION) w.recompute_ms += qkv + rope + attention[0] + keys;
    if (l->recompute >= RECOMPUTE_BLOCK) w.recompute_ms += out + in + (gathers - 1) * tp, w.tp_ms += (gathers - 1) * tp;
    w.work[PIPELINE_FORWARD] = matmuls + attention[0] + norms + forward_act + rope + gathers * tp + keys;
    w.work[PIPELINE_BACKWARD] = matmuls + attention[1] + norms_back + backward_act + rope + (gathers + again) * tp +
        2.5 * keys + w.recompute_ms;
    w.work[PIPELINE_WEIGHTS] = matmuls;
    return w;
}

// ------------------------------------------------------------------------------------------------
// 3. Memory

static inline double cluster_block_parameters(const Config* c) {
    double C = (double)c->channels, D = (double)config_head_size(c), H = (double)c->heads, K = (double)c->kv_heads;
    return C * D * (2 * H + 2 * K) + (c->family == FAMILY_LLAMA ? 3 : 2) * (double)c->ffn * C;
}

static inline double cluster_parameters(const Config* c) {
    double tables = (double)c->vocab * (c->tied ? 1 : 2) + (c->family == FAMILY_GPT2 ? (double)c->context : 0);
    return (double)c->layers * cluster_block_parameters(c) + tables * (double)c->channels;
}

// Parameters outside the blocks of a stage.
static inline double cluster_outside(const ClusterModel* m, const ClusterLayout* l, size_t stage) {
    double table = (double)config_padded_vocab(&m->config) * (double)m->config.channels / (double)l->tp;
    bool first = stage == 0, last = stage == l->pp - 1;
    return first && last && m->config.tied ? table : table * (first + last);
}

// Blocks of a stage: those of the pieces i with i mod pp = stage.
static inline double cluster_blocks(const ClusterModel* m, const ClusterLayout* l, size_t stage) {
    double count = 0;
    for (size_t chunk = 0; chunk < l->chunks; chunk++)
        count += (double)slice_length(comm_even_slice(chunk * l->pp + stage, l->pp * l->chunks, m->config.layers));
    return count;
}

// Bytes of a stage's GPU with AdamW and float sums. slots: activations of chunks that it holds.
static inline double cluster_memory(const ClusterModel* m, const ClusterLayout* l, size_t stage, double slots) {
    BlockShape s = cluster_shape(m, l), narrow = s;
    double d = (double)(l->zero == 0 ? 1 : l->shard ? l->shard : l->dp * l->cp), blocks = cluster_blocks(m, l, stage);
    double one = cluster_block_parameters(&m->config) / (double)l->tp, outside = cluster_outside(m, l, stage);
    double all = blocks * one + outside, whole = 0, kept = 0, N = (double)(s.B * s.T / l->cp);
    if (!m->whole_rows) narrow.C = divide_up(s.C, l->tp);
    unsigned again = recompute_operations(l->recompute);
    for (int o = 0; o <= BLOCK_KEPT; o++) {
        double bytes = block_bytes_made((BlockOperation)o, &narrow) / (double)l->cp;
        whole += bytes;
        if (!(again >> o & 1)) kept += bytes;
    }
    if (m->kept_bytes > 0) kept = m->kept_bytes * N / (double)l->tp;
    double scores = m->scores == SCORES_TILED ? 0 : 5 * N * (double)(s.T * s.H);  // two arrays and a mask of dropout
    if (m->scores == SCORES_STORED && l->recompute < RECOMPUTE_ATTENTION) kept += scores;
    // Parameters, gradients, then master weights, m and v; of stage 3 two blocks, and from stage 2 on staging, whole.
    double states = (l->zero == 3 ? 2 * (blocks * one / d + outside + 2 * one) : 2 * all) +
        4 * (l->zero >= 2 ? all / d + outside + 2 * one : all) + 12 * all / d;
    double logits = stage == l->pp - 1 ? m->logit_bytes * N * (double)(config_padded_vocab(&m->config) / l->tp) : 0;
    // Before the backward the logits, then a block and its gradients, and the gathered rows of its norms.
    double working = 2 * whole + scores + (l->tp > 1 ? 2 * COST_X * N * (double)s.C : 0);
    return 1.5e9 + states + slots * blocks / (double)l->chunks * kept + fmax(working, logits);
}

// ------------------------------------------------------------------------------------------------
// 4. Step

enum { CLUSTER_STAGES = 512 };  // at most

// Milliseconds until the pipeline has ended, and the most activations that each stage holds (slots, (pp)). Many
// micro-batches: from two tables of fewer, since further groups of pp take the same time, to a few per cent.
static inline bool cluster_pipeline(double* ms, size_t* slots, const ClusterLayout* l, size_t micros,
                                    const double* costs, double hop, Error* error) {
    size_t groups = max_size(4, 64 / l->pp), least = groups * l->pp + micros % l->pp, few = min_size(micros, least);
    double ends[2] = {0, 0};
    for (int i = 0; i < (few < micros ? 2 : 1); i++) {
        PipelineTable t;
        size_t m = few - (i ? groups / 2 * l->pp : 0);
        if (!pipeline_table_make(&t, l->kind, l->pp, m, l->chunks, costs, hop, error)) return false;
        if (i == 0) memcpy(slots, t.slots, l->pp * sizeof *slots);
        ends[i] = t.end;
        pipeline_table_free(&t);
    }
    *ms = ends[0] + (few < micros ? (ends[0] - ends[1]) * (double)((micros - few) / l->pp) / (double)(groups / 2) : 0);
    return true;
}

// What of the time of messages is not hidden under `window` milliseconds of computation.
static inline double cluster_exposed(const ClusterFit* f, const ClusterModel* m, double ms, double window) {
    return m->dp_waits ? ms : fmax(f->data * ms, ms - window);
}

// Predicts a step of a layout that divides the model. table: makes the pipeline's table; otherwise its bubble is that
// of equal stages.
static inline bool cluster_predict(ClusterStep* step, const Cluster* c, const ClusterFit* f, const ClusterModel* m,
                                   const ClusterLayout* l, bool table, Error* error) {
    size_t micros = m->sequences / (l->dp * l->B), P = l->pp, d = l->dp * l->cp, slots[CLUSTER_STAGES], ahead;
    const PipelineTable sizes = {P, micros, l->chunks, l->kind >= PIPELINE_ZB_H1, NULL, NULL, NULL, NULL, 0};
    ClusterWork block = cluster_block(c, f, m, l);
    double costs[3 * CLUSTER_STAGES], stage_ms = 0, N = (double)(l->B * m->T / l->cp), n = (double)micros;
    double C = (double)m->config.channels, Vp = (double)(config_padded_vocab(&m->config) / l->tp), most = 0;
    double head = cluster_matmul_ms(c, f, N, Vp, C);
    double classifier = cluster_bytes_ms(c, f, cost_classifier((size_t)N, (size_t)Vp, (size_t)Vp, true).bytes);
    memset(step, 0, sizeof *step);
    for (size_t s = 0; s < P; s++) {
        double sum = 0, blocks = cluster_blocks(m, l, s);
        for (int w = 0; w < PIPELINE_WORKS; w++) {
            double ms = blocks * block.work[w] + (s == P - 1 ? head + (w == 0 ? classifier : 0) : 0);
            costs[(size_t)w * P + s] = ms / (double)l->chunks;
            sum += ms;
        }
        pipeline_limits(&sizes, l->kind, s, &ahead, &slots[s]);
        stage_ms = fmax(stage_ms, sum);
        most = fmax(most, blocks * cluster_block_parameters(&m->config) / (double)l->tp + cluster_outside(m, l, s));
    }
    double hop = 1e-6 * COST_X * N * C / (double)l->tp / cluster_rate(c, f, l->tp * l->cp, 2) + c->latency_ms;
    double pipeline = stage_ms * (n + (double)(P - 1) / (double)l->chunks);
    if (table && P > 1 && !cluster_pipeline(&pipeline, slots, l, micros, costs, hop, error)) return false;
    // Gradients in float are reduced, parameters gathered: once a step, of stage 2 and 3 more often.
    size_t shard = l->zero == 0 ? 1 : l->shard ? l->shard : d, copies = d / shard, stride = l->tp * (l->cp > 1 ? 1 : P);
    double parts = 1 + (double)m->config.layers / (double)P, copied = 8 * most / (double)shard;
    double reduce = cluster_gather_ms(c, f, stride, shard, 4 * most, parts);
    double gather = cluster_gather_ms(c, f, stride, shard, COST_X * most, parts), micro = stage_ms;
    double copy = cluster_gather_ms(c, f, stride * shard, copies, copied, 2 * parts), forward = 0;
    for (size_t s = 0; s < P; s++) forward = fmax(forward, costs[s] * (double)l->chunks);
    if (l->zero < 2) step->dp_ms = cluster_exposed(f, m, reduce, micro - forward);
    if (l->zero == 2) step->dp_ms = n * cluster_exposed(f, m, reduce, micro - forward);
    if (l->zero == 3) step->dp_ms = n * cluster_exposed(f, m, reduce + 2 * gather, micro);
    else step->dp_ms += cluster_exposed(f, m, gather, forward);
    step->dp_ms += cluster_exposed(f, m, copy, fmax(0, micro - forward - reduce));
    double owned = most / (double)(l->zero ? d : 1), blocks = (double)m->config.layers / (double)P * n;
    step->update_ms = cluster_bytes_ms(c, f, (4 + 8 + 16 + COST_X) * owned);
    step->tp_ms = blocks * block.tp_ms;
    step->cp_ms = blocks * block.cp_ms;
    step->recompute_ms = blocks * block.recompute_ms;
    step->bubble_ms = pipeline - n * stage_ms;
    step->ms = pipeline + step->dp_ms + step->update_ms;
    for (size_t s = 0; s < P; s++) step->bytes = fmax(step->bytes, cluster_memory(m, l, s, (double)slots[s]));
    double tokens = (double)(m->sequences * m->T), matmuls = (double)m->config.layers *
        (cluster_block_parameters(&m->config) + (double)(m->T * m->config.heads * config_head_size(&m->config)));
    double flops = 6 * tokens * (matmuls + (double)m->config.vocab * C);
    step->mfu = flops / (1e9 * step->ms * c->gpu.bf16 * (double)(l->tp * l->cp * P * l->dp));
    return true;
}

#endif  // LLMTRAIN_CLUSTER_H
