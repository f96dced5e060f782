// predict.h: how long a training step will take, before it runs: the costs of its operations at a machine's rates.
//
//   Rates rates;
//   bool ok = rates_measure(&rates, &shape, ranks, &error);  on a CPU, three seconds; or rates_parse, of a text
//   double ms = step_ms(&model, &rates, micro_batches);      after model_plan
//
//   1. rates   given, or measured with operations of the model's own sizes
//   2. step    a step of train.cu, operation by operation
//
// Rates are those that the operations reach, not the machine's peaks. They are measured in CPU time: time that other
// programs take is not counted, and steps are slower by that while they run. Loading data, validating, saving and
// waiting for a slower rank are not counted.

#ifndef LLMTRAIN_PREDICT_H
#define LLMTRAIN_PREDICT_H

#include "../llmtrain/run/stages.h"

// ------------------------------------------------------------------------------------------------
// 1. Rates

// Rates of one rank as text, "300,25" to "300,25,1,2": matmul GFLOP/s; GB/s of memory, of the network, of offloading.
// The last two are 1 if they are not given.
static inline bool rates_parse(Rates* r, const char* text, Error* error) {
    double values[4] = {0, 0, 1, 1};
    char commas[] = ",,,";
    int count = sscanf(text, "%lf,%lf%c%lf%c%lf%c", &values[0], &values[1], &commas[0], &values[2], &commas[1],
                       &values[3], &commas[2]);
    bool good = (count == 2 || count == 4 || count == 6) && strcmp(commas, ",,,") == 0;
    for (int i = 0; i < 4; i++) good = good && values[i] > 0 && values[i] < 1e9;
    if (!good)
        return fail_with(error, "--rate is '%s'; give matmul GFLOP/s and memory GB/s, then optionally network GB/s and "
                         "offload GB/s, as in 300,25 or 300,25,1,2", text);
    const Rates rates = {.matmul = 1e9 * values[0],
                         .other = 0.3 * (1e9 * values[0]),  // about what CPUs achieve (dev/bench/RESULTS.md)
                         .memory = 1e9 * values[1], .comm = 1e9 * values[2], .offload = 1e9 * values[3]};
    *r = rates;
    return true;
}

typedef enum { RATED_MATMUL, RATED_OTHER, RATED_MEMORY, RATED_UPDATE } Rated;

typedef struct {
    size_t M, N, K, B, T, H, D, n;
    floatX *in, *weight, *out;              // (M, K), (N, K), (M, N)
    floatX *qkv, *attended, *dqkv;          // (B, T, 3 H D), (B, T, H D), (B, T, 3 H D)
    float *dweight, *lse, *delta, *stream;  // (N, K), (B, H, T), (B, H, T), (n)
    OptimizerSlice slice;                   // of arrays in `stream`
    OptimizerStep step;
} RatesArrays;

// CPU time of this process, over all its threads.
static inline double processor_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static inline void rated_run(const RatesArrays* a, Rated what) {
    Stream none = NULL;
    switch (what) {
    case RATED_MATMUL:
        matmul_forward(a->out, a->in, a->weight, NULL, a->M, a->N, a->K, none);
        matmul_backward_input(a->in, a->out, a->weight, a->M, a->N, a->K, none);
        matmul_backward_weight(a->dweight, NULL, a->out, a->in, false, a->M, a->N, a->K, none);
        break;
    case RATED_OTHER:
        attention_forward(a->attended, a->lse, a->qkv, a->B, a->T, a->H, a->H, a->D, none);
        attention_backward(a->dqkv, a->delta, a->attended, a->attended, a->lse, a->qkv, a->B, a->T, a->H, a->H, a->D,
                           none);
        break;
    case RATED_MEMORY: vector_add(a->stream, a->stream + a->n / 2, a->n / 2, none); break;
    case RATED_UPDATE: optimizer_update(&a->slice, &a->step, none); break;
    }
}

// How often it runs per second: the better of two windows, since other programs may use the caches meanwhile. A window
// has enough runs for the clock's error not to matter: the time of threads on other processors is counted in steps of
// a few milliseconds.
static inline double rated_per_second(const RatesArrays* a, Rated what, double window_ms) {
    double best = 0;
    rated_run(a, what);  // warms up
    for (int window = 0; window < 2; window++) {
        double began = now_ms(), processor = processor_ms(), runs = 0;
        for (; now_ms() - began < window_ms; runs++) rated_run(a, what);
        best = fmax(best, 1e3 * runs * (double)threads_count() / (processor_ms() - processor));
    }
    return best;
}

// Elements that an optimizer that does not need whole matrices updates per second, in arrays larger than the caches.
static inline double rates_update(RatesArrays* a, OptimizerKind kind, bool master_weights) {
    size_t n = a->n / 8;
    const OptimizerOptions options = optimizer_defaults(kind);
    const OptimizerSlice slice = {.params = (floatX*)a->stream,
                                  .master_weights = master_weights ? a->stream + 2 * n : NULL, .grads = a->stream + n,
                                  .n = n, .shape = {.rows = 512, .cols = n / 512}};
    a->step = optimizer_step(&options, 1, 1e-4, 1.0);
    a->slice = slice;
    for (size_t i = 0; i < optimizer_states(kind); i++) a->slice.states[i] = a->stream + (3 + i) * n;
    return (double)n * rated_per_second(a, RATED_UPDATE, 40);
}

// Measures the rates that operations of this size reach on a CPU with all threads; returns the rates of each of the
// ranks that share it.
static inline bool rates_measure(Rates* r, const BlockShape* s, size_t ranks, Error* error) {
    const size_t T = min_size(s->T, 1024);
    RatesArrays a = {.M = min_size(s->B * s->T, 1024), .N = min_size(s->F, 4096), .K = min_size(s->C, 1024),
                     .B = min_size(s->B, divide_up(1024, T)), .T = T, .H = min_size(s->H, 8), .D = s->D,
                     .n = (size_t)1 << 25};
    const double share = 1.0 / (double)ranks;
    size_t rows = a.B * a.T, stored = a.M * a.K + a.N * a.K + a.M * a.N + 7 * rows * a.H * a.D;
    size_t floats = a.N * a.K + 2 * rows * a.H + a.n;
    float* f = (float*)memory_allocate(floats * sizeof(float) + stored * sizeof(floatX));
    if (f == NULL) return fail_with(error, "out of memory for measuring the machine; give its rates with --rate");
    floatX* x = (floatX*)(f + floats);
    for (size_t i = 0; i < stored; i++) x[i] = floatX_of(0.01f * (float)(i % 7));
    a.in = x;
    a.weight = a.in + a.M * a.K;
    a.out = a.weight + a.N * a.K;
    a.qkv = a.out + a.M * a.N;
    a.attended = a.qkv + 3 * rows * a.H * a.D;
    a.dqkv = a.attended + rows * a.H * a.D;
    a.stream = f;
    a.dweight = a.stream + a.n;
    a.lse = a.dweight + a.N * a.K;
    a.delta = a.lse + rows * a.H;
    memset(a.stream, 0, a.n * sizeof(float));
    Cost matmul = cost_matmul(a.M, a.N, a.K), forward = cost_attention_forward(a.B, a.T, a.H, a.H, a.D);
    Cost backward = cost_attention_backward(a.B, a.T, a.H, a.H, a.D);
    memset(r, 0, sizeof *r);
    r->matmul = share * 3 * matmul.flops * rated_per_second(&a, RATED_MATMUL, 200);
    r->other = share * (forward.flops + backward.flops) * rated_per_second(&a, RATED_OTHER, 200);
    r->memory = share * 12.0 * (double)(a.n / 2) * rated_per_second(&a, RATED_MEMORY, 200);
    for (int o = 0; o < OPTIMIZER_COUNT; o++)
        for (int masters = 0; masters < (FLOATX_IS_FLOAT ? 1 : 2); masters++)
            if (OPTIMIZERS[o].rule == SHARD_ANYWHERE || OPTIMIZERS[o].rule == SHARD_BLOCKS)
                r->update[o][masters] = share * rates_update(&a, (OptimizerKind)o, masters > 0);
    r->comm = 0.05 * r->memory;
    r->offload = 1e9;
    free(f);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Step

static inline double costs_ms(const Cost* costs, size_t count, const Rates* r) {
    double ms = 0;
    for (size_t i = 0; i < count; i++) ms += cost_ms(&costs[i], r);
    return ms;
}

static inline double block_forward_ms(const BlockShape* s, const Rates* r) {
    double ms = 0;
    for (int o = 0; o < BLOCK_OPERATIONS; o++)  // the norm of attention's output is part of BLOCK_ATTENTION_OUT
        if (o != BLOCK_NORM1 && o != BLOCK_NORM2) ms += operation_ms((BlockOperation)o, s, r);
    const Cost others[] = {cost_norm_forward(shape_rows(s), s->C, !s->llama, true),
                           cost_matmul(shape_rows(s), s->C, s->F)};
    return ms + costs_ms(others, 2, r);
}

// For a block that recomputes nothing, without the gradients of its matmuls' weights.
static inline double block_backward_ms(const BlockShape* s, const Rates* r) {
    size_t N = shape_rows(s), C = s->C, heads = s->H + s->K, cp = max_size(s->cp, 1);
    double act = (double)N * (double)s->F;
    const Cost costs[] = {
        cost_matmul(N, C, s->F), s->llama ? cost_swiglu_backward(act) : cost_gelu_backward(act),  // ffn_out
        cost_matmul(N, s->llama ? 2 * s->F : s->F, C), cost_norm_backward(N, C, !s->llama),       // ffn_in
        cost_matmul(N, C, s->H * s->D),                                                           // attention_out
        cost_attention_backward(s->B, s->T, s->H / cp, s->K / cp, s->D),
        cost_matmul(N, (heads + s->K) * s->D, C), cost_norm_backward(N, C, !s->llama),            // qkv
    };
    double ms = costs_ms(costs, sizeof costs / sizeof costs[0], r);
    Cost rope = cost_rope(s->B, s->T, heads / cp, s->D), qk_norm = cost_qk_norm_backward(N, heads, s->D);
    return ms + (s->llama ? cost_ms(&rope, r) : 0) + (s->qk_norm ? cost_ms(&qk_norm, r) : 0);
}

// The gradients of the weights of matmuls that train.
static inline double weights_ms(const Model* model, const Rates* r) {
    double ms = 0;
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        bool head = i == model->weights.head.weight.row;
        if (!t->trains || !(t->shape.hidden || head)) continue;
        Cost cost = cost_matmul_weight(model_rows(model), t->size / t->cols, t->cols);
        ms += cost_ms(&cost, r);
    }
    return ms;
}

// The time that recomputation adds to a micro-batch.
static inline double model_recompute_ms(const Model* model, const Rates* r) {
    BlockShape s = model_block_shape(model);
    double ms = 0;
    size_t K = model_blocks(model);  // in a pipeline those of one stage, and others are like it
    for (size_t l = model_first_kept(model); l < K; l++)
        ms += recompute_ms(model->activations->kept[l].recomputed, &s, r);
    return ms * (double)model->config.layers / (double)K;
}

// Forward, head and backward of one micro-batch.
static inline double micro_batch_ms(const Model* model, const Rates* r) {
    const Config* c = &model->config;
    const FlatVector* flat = &model->flat;
    BlockShape s = model_block_shape(model);
    size_t N = shape_rows(&s), T = s.T / max_size(s.cp, 1), parts = divide_up(N, model->logits_rows);
    size_t C = s.C, V = c->vocab, Vp = config_padded_vocab(c);
    size_t L = c->layers, back = L - model_backward_ends(model);
    bool positions = c->family == FAMILY_GPT2;
    const Cost outside[] = {
        cost_embedding_forward(s.B, T, C, positions), cost_norm_forward(N, C, !s.llama, true),
        cost_norm_backward(N, C, !s.llama), cost_matmul(N, Vp, C), cost_classifier(N, V, Vp, true),
        cost_matmul(N, Vp, C),
        cost_of(0, 8.0 * (double)(parts - 1) * (double)Vp * (double)C),  // the head's gradient, once for every part
    };
    Cost embedding = cost_embedding_backward(s.B, T, C), position = cost_position_backward(s.B, T, C);
    // Staged gradients are written and added to the sums.
    Cost sums = cost_of(0, flat_stages(flat) ? 20.0 * (double)flat->parameters->flat_size : 0);
    return costs_ms(outside, sizeof outside / sizeof outside[0], r) + cost_ms(&sums, r) +
        (model->first_trained > 0 ? 0 : cost_ms(&embedding, r) + (positions ? cost_ms(&position, r) : 0)) + (double)L * block_forward_ms(&s, r) +
        (double)back * block_backward_ms(&s, r) + weights_ms(model, r) + model_recompute_ms(model, r);
}

// The matmuls of Muon's updates, see matrix.h; ranks that shard the state divide them.
static inline Cost muon_cost(const FlatVector* flat) {
    Cost c = {true, 0, 0};
    for (size_t i = 0; i < flat->parameters->count && flat->holds.optimizer->kind == OPTIMIZER_MUON; i++) {
        const TensorShape* t = &flat->parameters->tensors[i].shape;
        double d = (double)min_size(t->rows, t->cols), n = (double)shape_elements(t);
        if (t->hidden) c.flops += 5 * (4 * d * n + 2 * d * d * d);
    }
    if (flat->options.stage > 0) c.flops /= (double)flat->shard_world;
    return c;
}

// Clearing the sums of staged gradients, taking the norm, updating what this rank owns.
static inline double update_ms(const Model* model, const Rates* r) {
    const FlatVector* flat = &model->flat;
    bool masters = flat_has_masters(&flat->holds);
    double x = sizeof(floatX), owned = 0, sum = flat->options.reduce == REDUCE_EXACT ? 8 : 4;
    double rate = r->update[flat->holds.optimizer->kind][masters];
    for (size_t b = 0; b < flat->count; b++) owned += (double)slice_length(flat->buckets[b].state);
    double bytes = owned * (sum + x + (masters ? 8 : x));
    for (size_t i = 0; i < optimizer_states(flat->holds.optimizer->kind); i++)
        bytes += 2.0 * (double)flat_state_bytes(flat, i);
    Cost sums = cost_of(0, (flat_stages(flat) ? sum * (double)flat->sums_size : 0) + sum * owned);
    Cost update = cost_of(18 * owned, bytes), muon = muon_cost(flat);
    double elements = rate > 0 ? 1e3 * owned / rate : 0, moved = cost_ms(&update, r);
    return cost_ms(&sums, r) + (elements > moved ? elements : moved) + cost_ms(&muon, r);
}

// A block's offloaded activations are written under the forward of the next block, and read under the backward of the
// block after it: the milliseconds that these two take.
static inline void offload_covers_ms(double* forward, double* backward, const Model* model, const Rates* r) {
    BlockShape s = model_block_shape(model);
    *forward = block_forward_ms(&s, r);
    *backward = block_backward_ms(&s, r) + recompute_ms(model->offloaded.blocks[0].recomputed, &s, r);
}

// Milliseconds that a micro-batch waits for offloaded activations.
static inline double offload_wait_ms(const Model* model, const Rates* r) {
    const OffloadBlocks* o = &model->offloaded;
    double forward, backward;
    if (offload_blocks_bytes(o) == 0) return 0;
    offload_covers_ms(&forward, &backward, model, r);
    double piece = 1e3 * (double)offload_bytes(&o->store, o->first) / r->offload;
    return (double)(o->moved - o->first) * (fmax(0, piece - forward) + fmax(0, piece - backward));
}

// The bytes per second at which it no longer waits for them.
static inline double offload_rate_hidden(const Model* model, const Rates* r) {
    double forward, backward;
    offload_covers_ms(&forward, &backward, model, r);
    return 1e3 * (double)offload_bytes(&model->offloaded.store, model->offloaded.first) / fmin(forward, backward);
}

// A step of this rank. On a CPU the collectives take time from the cores that compute; on a GPU they overlap with the
// computation. The update waits for the offloaded optimizer state.
static inline double step_ms(const Model* model, const Rates* r, size_t micro_batches) {
    double micro = micro_batch_ms(model, r) + offload_wait_ms(model, r), update = update_ms(model, r);
    double exchange = 1e3 * (double)model_bytes_exchanged(model) / r->comm;  // for which attention waits
    double comm = 1e3 * (double)model_bytes_sent(model, micro_batches) / r->comm - exchange * (double)micro_batches;
    if (model->pipeline.pp > 1) micro *= model->pipeline.table.end / model->pipeline.all_busy;  // stages share it
    double moved = flat_offloads(&model->flat) ? 2.0 * (double)offload_total(&model->flat.offloaded.store) : 0;
    double compute = (micro + exchange) * (double)micro_batches + update + 1e3 * moved / r->offload;
    if (device_is_host()) return compute + comm;
    return compute > comm ? compute : comm;
}

#endif  // LLMTRAIN_PREDICT_H
