// dev/bench/bench.c: where the time of a training step goes, and how its cost scales.
//
//     gcc -std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -march=native -fopenmp dev/bench/bench.c
//     -I.
//         -o build/bench-fp32 -lm -pthread            (-DPRECISION_BF16 or -DPRECISION_FP16: other storage dtypes)
//
//     build/bench-fp32                                the table of one step of GPT-2 124M
//     build/bench-fp32 --model llama:15M --batch 8 --seq 128 --steps 20 --threads 1 --json step.json
//     build/bench-fp32 --sweep                        cost against sequence length, batch size and parameters
//     build/bench-fp32 --tour --model gpt2:tiny       each operation of one step, with its results (make tour)
//     build/bench-fp32 --recompute block              time and memory of each level of --recompute from that one down
//     build/bench-fp32 --kernels step.txt             also writes the table's operations and milliseconds, one per line
//     build/bench-fp32 --attention --threads 1        attention alone, over head sizes and sequence lengths
//
// On a GPU (make bench CUDA=on ARCH=sm_90a):
//
//     nvcc -std=c++20 -O3 -arch=sm_90a -DLLMTRAIN_CUDA -DPRECISION_BF16 -I. -Xcompiler -fopenmp -x cu dev/bench/bench.c
//         -o build/bench-cuda-BF16 -lcublasLt
//     build/bench-cuda-BF16 --batch 64 --seq 1024 --steps 80
//
// A step is that of train.cu's loop: zero gradients, forward, head, backward, norm, AdamW; with random weights and
// random tokens, without the loader and without log lines. After one warm-up step, the median and the minimum of the
// timed steps are printed, and the table shows the step with the median time. On a shared machine, threads that spin at
// the end of each operation delay the thread that they wait for: set OMP_WAIT_POLICY=passive there.
//
// The model's code is unchanged: this file includes the operations, then defines a macro over each of their names that
// starts a timer, calls, and stops it, then includes the model. (A macro is not expanded again in its own expansion.)
// Times are taken on the calling thread, on a GPU between events of its stream, outermost calls only. Each operation
// states its arithmetic (an exponential counts as 25) and its minimum memory traffic: inputs read once, outputs written
// once.
//
// The column "bound" shows what limits an operation, arithmetic or memory, and the next column how close it comes: the
// time of its flops at the peak, or of its bytes at the memory's rate, whichever is longer, over the measured time.
// Peaks are measured on the same threads after every step, since the speed of a shared machine changes: in registers
// alone for arithmetic, over an array far larger than the caches for memory. On a GPU arithmetic's peaks are those of
// its data sheet; for a device whose data sheet is not known here, whatever depends on them is n/a. Data that is still
// in a cache can be read faster than memory's rate: then the share is over 100%.

#include "bench_device.h"
#include "llmtrain/model/costs.h"
#ifndef LLMTRAIN_CUDA
#include "tour.h"
#endif

// ------------------------------------------------------------------------------------------------
// 1. Profile: what the operations of one step cost

typedef struct {
    const char* name;
    size_t n, k;            // outputs and inputs of a matmul, each shape being a row of its own; 0 for others
    size_t calls;
    double ms, flops, bytes;
} OperationCost;

enum { OPERATIONS_MAX = 64 };

typedef struct {
    OperationCost operations[OPERATIONS_MAX];
    size_t count;
    size_t depth;           // operations begun but not ended: a call inside another one is part of it
    double last_ms;         // on a CPU: how long the last outermost one took
    double step_ms;
} Profile;

static Profile* profile;    // NULL: operations are not recorded
static Spans profile_spans;  // of the model whose operations are recorded
static size_t profile_T;    // the length of its sequences, which operations on rows do not know

static inline void profile_begin(void) {
    if (profile != NULL && profile->depth++ == 0) span_begin(&profile_spans);
}

static inline void profile_end(const char* name, size_t n, size_t k, double flops, double bytes) {
    if (profile == NULL || --profile->depth > 0) return;
    span_end(&profile_spans);
    size_t i = 0;
    OperationCost* o = profile->operations;
    while (i < profile->count && (strcmp(o[i].name, name) != 0 || o[i].n != n || o[i].k != k)) i++;
    if (i == OPERATIONS_MAX) return;  // shows as time outside the operations
    if (i == profile->count) {
        memset(&o[i], 0, sizeof o[i]);
        o[i].name = name;
        o[i].n = n;
        o[i].k = k;
        profile->count++;
    }
    double before = o[i].ms;
    span_add(&profile_spans, &o[i].ms);
    profile->last_ms = o[i].ms - before;
    o[i].calls++;
    o[i].flops += flops;
    o[i].bytes += bytes;
}

// After the call come its arrays, which the tour reads on the CPU.
#ifdef LLMTRAIN_CUDA
#define TIMED_PRODUCT(name, n, k, flops, bytes, call, ...) \
    do { \
        profile_begin(); \
        call; \
        profile_end(name, n, k, flops, bytes); \
    } while (0)
#else
#define TIMED_PRODUCT(name, n, k, flops, bytes, call, ...) \
    do { \
        profile_begin(); \
        call; \
        profile_end(name, n, k, flops, bytes); \
        if (tour.parameters != NULL) { \
            const TourArray arrays[] = {__VA_ARGS__}; \
            tour_print(name, flops, bytes, profile->last_ms, arrays, sizeof arrays / sizeof arrays[0]); \
        } \
    } while (0)
#endif
#define TIMED(name, flops, bytes, call, ...) TIMED_PRODUCT(name, 0, 0, flops, bytes, call, __VA_ARGS__)

// cost_matmul with a GELU, or its backward, of `elements` numbers, each of which costs `flops` and is written or read.
static Cost cost_matmul_gelu(size_t M, size_t N, size_t K, size_t elements, double flops) {
    Cost c = cost_matmul(M, N, K);
    c.flops += flops * (double)elements;
    c.bytes += COST_X * (double)elements;
    return c;
}

// The same with a cost of costs.h.
#define TIMED_COST(name, n, k, cost, call, ...) \
    TIMED_PRODUCT(name, n, k, (cost).flops, (cost).bytes, call, __VA_ARGS__)

// ------------------------------------------------------------------------------------------------
// 2. The cost of each operation
//
// Those of costs.h. A macro argument with a side effect must not be used twice, so dout of embedding_backward, which
// may be a call of dropout, is in no cost.

#define embedding_forward(out, tokens, positions, token, position, N, C, stream) \
    TIMED_COST("embedding_forward", 0, 0, cost_embedding_forward((N) / profile_T, profile_T, C, (position) != NULL), \
               embedding_forward(out, tokens, positions, token, position, N, C, stream), \
               WROTE("out", out, N, C), READ("tokens", N), READ("positions", N), \
               READ("token", tour_tensor(0)->size / (C), C), READ_IF(position, "position", profile_T, C))

#define embedding_backward(dtoken, dposition, dout, tokens, positions, N, C, stream) \
    TIMED_COST("embedding_backward", 0, 0, cost_position_backward((N) / profile_T, profile_T, C), \
               embedding_backward(dtoken, dposition, dout, tokens, positions, N, C, stream), \
               WROTE("dposition", dposition, profile_T, C), READ("dout", N, C), READ("positions", N))

#define embedding_backward_part(dtoken, dout, tokens, first, rows, N, C, stream) \
    TIMED_COST("embedding_backward_part", 0, 0, cost_embedding_backward((N) / profile_T, profile_T, C), \
               embedding_backward_part(dtoken, dout, tokens, first, rows, N, C, stream), \
               WROTE("dtoken", dtoken, rows, C), READ("dout", N, C), READ("tokens", N))

#define layernorm_forward(out, residual, mean, rstd, in, branch, weight, bias, epsilon, N, C, stream) \
    TIMED_COST("layernorm_forward", 0, 0, cost_norm_forward(N, C, true, (branch) != NULL), \
               layernorm_forward(out, residual, mean, rstd, in, branch, weight, bias, epsilon, N, C, stream), \
               WROTE("out", out, N, C), WROTE("residual", (branch) ? (residual) : NULL, N, C), WROTE("mean", mean, N), \
               WROTE("rstd", rstd, N), READ("in", N, C), READ_IF(branch, "branch", N, C), READ("weight", C), \
               READ("bias", C))

#define rmsnorm_forward(out, residual, rstd, in, branch, weight, epsilon, N, C, stream) \
    TIMED_COST("rmsnorm_forward", 0, 0, cost_norm_forward(N, C, false, (branch) != NULL), \
               rmsnorm_forward(out, residual, rstd, in, branch, weight, epsilon, N, C, stream), \
               WROTE("out", out, N, C), WROTE("residual", (branch) ? (residual) : NULL, N, C), WROTE("rstd", rstd, N), \
               READ("in", N, C), READ_IF(branch, "branch", N, C), READ("weight", C))

#define layernorm_backward(dx, dweight, dbias, dout, x, weight, mean, rstd, N, C, stream) \
    TIMED_COST("layernorm_backward", 0, 0, cost_norm_backward(N, C, true), \
               layernorm_backward(dx, dweight, dbias, dout, x, weight, mean, rstd, N, C, stream), \
               WROTE("dx", dx, N, C), WROTE("dweight", dweight, C), WROTE("dbias", dbias, C), READ("dout", N, C), \
               READ("x", N, C), READ("weight", C), READ("mean", N), READ("rstd", N))

#define rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, stream) \
    TIMED_COST("rmsnorm_backward", 0, 0, cost_norm_backward(N, C, false), \
               rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, stream), \
               WROTE("dx", dx, N, C), WROTE("dweight", dweight, C), READ("dout", N, C), READ("x", N, C), \
               READ("weight", C), READ("rstd", N))

#define matmul_forward(out, in, weight, bias, M, N, K, stream) \
    TIMED_COST("matmul_forward", N, K, cost_matmul(M, N, K), \
               matmul_forward(out, in, weight, bias, M, N, K, stream), \
               WROTE("out", out, M, N), READ("in", M, K), READ("weight", N, K), READ_IF(bias, "bias", N))

#define matmul_backward_input(din, dout, weight, M, N, K, stream) \
    TIMED_COST("matmul_backward_input", N, K, cost_matmul(M, N, K), \
               matmul_backward_input(din, dout, weight, M, N, K, stream), \
               WROTE("din", din, M, K), READ("dout", M, N), READ("weight", N, K))

#define matmul_backward_weight(dweight, dbias, dout, in, adds, M, N, K, stream) \
    TIMED_COST("matmul_backward_weight", N, K, cost_matmul_weight(M, N, K), \
               matmul_backward_weight(dweight, dbias, dout, in, adds, M, N, K, stream), \
               WROTE("dweight", dweight, N, K), WROTE("dbias", dbias, N), READ("dout", M, N), READ("in", M, K))

#define qk_norm_forward(qkv, saved, rstd, q_weight, k_weight, epsilon, N, H, K, D, stream) \
    TIMED_COST("qk_norm_forward", 0, 0, cost_qk_norm_forward(N, (H) + (K), D), \
               qk_norm_forward(qkv, saved, rstd, q_weight, k_weight, epsilon, N, H, K, D, stream), \
               WROTE("qkv", qkv, N, (H) + 2 * (K), D), WROTE("saved", saved, N, (H) + (K), D), \
               WROTE("rstd", rstd, N, (H) + (K)), READ("q_weight", D), READ("k_weight", D))

#define qk_norm_backward(dqkv, dq_weight, dk_weight, saved, rstd, q_weight, k_weight, N, H, K, D, stream) \
    TIMED_COST("qk_norm_backward", 0, 0, cost_qk_norm_backward(N, (H) + (K), D), \
               qk_norm_backward(dqkv, dq_weight, dk_weight, saved, rstd, q_weight, k_weight, N, H, K, D, stream), \
               WROTE("dqkv", dqkv, N, (H) + 2 * (K), D), WROTE("dq_weight", dq_weight, D), \
               WROTE("dk_weight", dk_weight, D), READ("saved", N, (H) + (K), D), READ("rstd", N, (H) + (K)))

#define rope_forward(qkv, table, positions, N, H, K, D, stream) \
    TIMED_COST("rope_forward", 0, 0, cost_rope((N) / profile_T, profile_T, (H) + (K), D), \
               rope_forward(qkv, table, positions, N, H, K, D, stream), \
               WROTE("qkv", qkv, N, (H) + 2 * (K), D), READ("table", profile_T, (D) / 2, 2), READ("positions", N))

#define rope_backward(dqkv, table, positions, N, H, K, D, stream) \
    TIMED_COST("rope_backward", 0, 0, cost_rope((N) / profile_T, profile_T, (H) + (K), D), \
               rope_backward(dqkv, table, positions, N, H, K, D, stream), \
               WROTE("dqkv", dqkv, N, (H) + 2 * (K), D), READ("table", profile_T, (D) / 2, 2), READ("positions", N))

#define heads_split(out, in, parts, N, H, K, D, stream) \
    TIMED("heads_split", 0.0, 2 * COST_X * (double)(N) * (double)(((H) + 2 * (K)) * (D)), \
          heads_split(out, in, parts, N, H, K, D, stream), \
          WROTE("out", out, parts, N, ((H) + 2 * (K)) / (parts), D), READ("in", N, (H) + 2 * (K), D))

#define heads_join(out, in, parts, N, H, K, D, stream) \
    TIMED("heads_join", 0.0, 2 * COST_X * (double)(N) * (double)(((H) + 2 * (K)) * (D)), \
          heads_join(out, in, parts, N, H, K, D, stream), \
          WROTE("out", out, N, (H) + 2 * (K), D), READ("in", parts, N, ((H) + 2 * (K)) / (parts), D))

#define heads_repeat(out, in, copies, N, H, K, D, stream) \
    TIMED("heads_repeat", 0.0, 2 * COST_X * (double)(N) * (double)(((H) + (K) * ((copies) + 1)) * (D)), \
          heads_repeat(out, in, copies, N, H, K, D, stream), \
          WROTE("out", out, N, (H) + 2 * (K) * (copies), D), READ("in", N, (H) + 2 * (K), D))

#define heads_sum(out, in, copies, N, H, K, D, stream) \
    TIMED("heads_sum", 0.0, 2 * COST_X * (double)(N) * (double)(((H) + (K) * ((copies) + 1)) * (D)), \
          heads_sum(out, in, copies, N, H, K, D, stream), \
          WROTE("out", out, N, (H) + 2 * (K), D), READ("in", N, (H) + 2 * (K) * (copies), D))

#define attention_forward(out, lse, qkv, B, T, H, K, D, stream) \
    TIMED_COST("attention_forward", 0, 0, cost_attention_forward(B, T, H, K, D), \
               attention_forward(out, lse, qkv, B, T, H, K, D, stream), \
               WROTE("out", out, B, T, H, D), WROTE("lse", lse, B, H, T), READ("qkv", B, T, (H) + 2 * (K), D))

#define attention_backward(dqkv, delta, dout, out, lse, qkv, B, T, H, K, D, stream) \
    TIMED_COST("attention_backward", 0, 0, cost_attention_backward(B, T, H, K, D), \
               attention_backward(dqkv, delta, dout, out, lse, qkv, B, T, H, K, D, stream), \
               WROTE("dqkv", dqkv, B, T, (H) + 2 * (K), D), READ("dout", B, T, H, D), READ("out", B, T, H, D), \
               READ("lse", B, H, T), READ("qkv", B, T, (H) + 2 * (K), D))

#define matmul_gelu_forward(out, pre, in, weight, bias, M, N, K, stream) \
    TIMED_COST("matmul_gelu_forward", N, K, cost_matmul_gelu(M, N, K, (M) * (N), COST_SIGMOID + 7), \
               matmul_gelu_forward(out, pre, in, weight, bias, M, N, K, stream), \
               WROTE("out", out, M, N), WROTE("pre", pre, M, N), READ("in", M, K), READ("weight", N, K), \
               READ_IF(bias, "bias", N))

#define gelu_recompute(out, pre, in, weight, bias, M, N, K, stream) \
    TIMED_COST("gelu_recompute", 0, 0, cost_gelu_forward((double)(M) * (N)), \
               gelu_recompute(out, pre, in, weight, bias, M, N, K, stream), \
               WROTE("out", out, M, N), READ("pre", M, N))

#define matmul_gelu_backward_input(din, dout, weight, pre, M, N, K, stream) \
    TIMED_COST("matmul_gelu_backward_input", N, K, cost_matmul_gelu(M, N, K, (M) * (K), COST_SIGMOID + 15), \
               matmul_gelu_backward_input(din, dout, weight, pre, M, N, K, stream), \
               WROTE("din", din, M, K), READ("dout", M, N), READ("weight", N, K), READ("pre", M, K))

#define swiglu_forward(out, in, N, F, stream) \
    TIMED_COST("swiglu_forward", 0, 0, cost_swiglu_forward((double)(N) * (F)), \
               swiglu_forward(out, in, N, F, stream), \
               WROTE("out", out, N, F), READ("in", N, 2 * (F)))

#define swiglu_backward(din, dout, in, N, F, stream) \
    TIMED_COST("swiglu_backward", 0, 0, cost_swiglu_backward((double)(N) * (F)), \
               swiglu_backward(din, dout, in, N, F, stream), \
               WROTE("din", din, N, 2 * (F)), READ("dout", N, F), READ("in", N, 2 * (F)))

#define classifier(logits, losses, targets, dloss, weights, N, V, Vp, stream) \
    TIMED_COST("classifier", 0, 0, cost_classifier(N, V, Vp, (dloss) != 0), \
               classifier(logits, losses, targets, dloss, weights, N, V, Vp, stream), \
               WROTE("losses", losses, N), WROTE("dlogits", (dloss) != 0 ? (logits) : NULL, N, Vp), \
               READ("logits", N, Vp), READ("targets", N), READ_IF(weights, "weights", N))

#define WROTE_SUM(sum) WROTE("sum so far", &(double){exact_value(*(sum))}, 1)

#define exact_sum_squares(out, x, n, stream) \
    TIMED("exact_sum_squares", 2.0 * (n), 4.0 * (n), exact_sum_squares(out, x, n, stream), WROTE_SUM(out), \
          READ("x", n))

#define exact_sum(out, x, n, stream) \
    TIMED("exact_sum", 1.0 * (n), 4.0 * (n), exact_sum(out, x, n, stream), WROTE_SUM(out), READ("x", n))

#define fill_zero(memory, bytes, stream) \
    TIMED("fill_zero", 0.0, 1.0 * (bytes), fill_zero(memory, bytes, stream), \
          WROTE("memory", memory, (bytes) / sizeof *(memory)))

// Flops are those of AdamW. Master weights, states and parameters without master weights are read and written.
#define optimizer_update(slice, o, stream) \
    TIMED("optimizer_update", 16.0 * (slice)->n, optimizer_slice_bytes(slice, o), \
          optimizer_update(slice, o, stream), WROTE(tour_tensor((slice)->first)->name, (slice)->params, (slice)->n), \
          WROTE("master weights", (slice)->master_weights, (slice)->n), READ("grads", (slice)->n))

// On a GPU a list is one launch; the CPU's tour shows each tensor.
#ifdef LLMTRAIN_CUDA
#define optimizer_update_list(slices, count, o, stream) \
    TIMED("optimizer_update", 16.0 * optimizer_list_elements(slices, count), optimizer_list_bytes(slices, count, o), \
          optimizer_update_list(slices, count, o, stream))
#else
#define optimizer_update_list(slices, count, o, stream) \
    for (size_t slice_ = 0; slice_ < (count); slice_++) optimizer_update(&(slices)[slice_], o, stream)
#endif

static double optimizer_slice_bytes(const OptimizerSlice* slice, const OptimizerStep* o) {
    double bytes = (double)slice->n * (4 + (slice->master_weights ? 8 + COST_X : 2 * COST_X));
    size_t index;
    for (int s = 0; s < OPTIMIZER_STATES; s++) {
        const OptimizerState* state = &OPTIMIZERS[o->kind].states[s];
        if (slice->states[s] == NULL) continue;
        bytes += 2.0 * (double)dtype_bytes(state->dtype) *
                 (double)optimizer_state_part(&index, state->shape, &slice->shape, o->rank, 0, slice->n);
    }
    return bytes;
}

#ifdef LLMTRAIN_CUDA
static double optimizer_list_bytes(const OptimizerSlice* slices, size_t count, const OptimizerStep* o) {
    double bytes = 0;
    for (size_t i = 0; i < count; i++) bytes += optimizer_slice_bytes(&slices[i], o);
    return bytes;
}
static double optimizer_list_elements(const OptimizerSlice* slices, size_t count) {
    double elements = 0;
    for (size_t i = 0; i < count; i++) elements += (double)slices[i].n;
    return elements;
}
#endif

// The buckets that the model's code waits for and ends tell the tour the current section.
#include "llmtrain/ranks/zero.h"
#ifndef LLMTRAIN_CUDA
#define flat_await(flat, bucket) (tour_await(bucket, (flat)->count), flat_await(flat, bucket))
#define flat_end_bucket(flat, bucket) (flat_end_bucket(flat, bucket), tour_end_bucket(bucket))
#endif

#include "llmtrain/checkpoint/record.h"
#include "llmtrain/run/flops.h"
#include "llmtrain/run/presets.h"
#include "tools/predict.h"

// ------------------------------------------------------------------------------------------------
// 3. Steps

static double median(double* values, size_t count) {
    qsort(values, count, sizeof(double), compare_doubles);
    return values[count / 2];
}

typedef struct {
    const char *model, *json, *kernels;
    uint64_t batch, seq, steps, threads;
    bool sweep, tour, attention, master_weights;
    RecomputeLevel recompute;
    OptimizerKind optimizer;
} Options;

enum { OPTIMIZER_RANK = 128 };  // --optimizer-rank by default

typedef struct {
    Model model;
    RunState state;
    int32_t *tokens, *targets;  // (B, T)
} Bench;

// Byte models, smaller than any preset.
typedef struct {
    const char* name;
    Family family;
    size_t layers, heads, kv_heads, channels, context;
} SmallModel;

static const SmallModel SMALL_MODELS[] = {
    {"gpt2:tiny", FAMILY_GPT2, 2, 2, 2, 32, 32},    {"llama:tiny", FAMILY_LLAMA, 2, 2, 1, 32, 32},
    {"bytes:0.2M", FAMILY_GPT2, 2, 2, 2, 64, 1024}, {"bytes:1M", FAMILY_GPT2, 4, 4, 4, 128, 1024},
    {"bytes:5M", FAMILY_GPT2, 6, 4, 4, 256, 1024},  {"demo", FAMILY_LLAMA, 4, 4, 4, 144, 256},
};
enum { SMALL_MODEL_COUNT = sizeof SMALL_MODELS / sizeof SMALL_MODELS[0] };

static bool bench_config(Config* c, const char* name, Error* error) {
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < SMALL_MODEL_COUNT; i++) {
        const SmallModel* s = &SMALL_MODELS[i];
        if (strcmp(name, s->name) != 0) continue;
        c->family = s->family;
        c->layers = s->layers;
        c->heads = s->heads;
        c->kv_heads = s->kv_heads;
        c->channels = s->channels;
        c->context = s->context;
        c->vocab = 256;
        c->tied = true;
        return config_complete(c, error);
    }
    return config_preset(c, name, error) && config_complete(c, error);
}

static void bench_close(Bench* b) {
    model_free(&b->model);
    free(b->tokens);
    free(b->targets);
}

static bool bench_open(Bench* b, const Options* asked, const char* name, size_t B, size_t T, RecomputeLevel recompute,
                       Error* error) {
    Config config;
    ModelOptions o;
    memset(b, 0, sizeof *b);
    memset(&o, 0, sizeof o);
    o.B = B;
    o.T = profile_T = T;
    o.training = true;
    o.optimizer = optimizer_defaults(asked->optimizer);
    o.optimizer.master_weights = asked->master_weights;
    o.optimizer.rank = OPTIMIZER_RANK;
    o.optimizer.seed = 1337;
    o.recompute = recompute;
    if (!bench_config(&config, name, error) || !model_create(&b->model, &config, o, error)) return false;
    if (!model_randomize(&b->model, 1337, error)) return false;
    b->state = run_state_begin(FLOATX_DTYPE == DTYPE_F16, 1024);
    b->tokens = (int32_t*)memory_allocate(B * T * sizeof(int32_t));
    b->targets = (int32_t*)memory_allocate(B * T * sizeof(int32_t));
    if (b->tokens && b->targets) return true;
    bench_close(b);
    return fail_with(error, "out of memory for a batch of %zu tokens; make --batch or --seq smaller", B * T);
}

// One step of run_train in train.cu, with one micro-batch and that program's defaults.
static bool bench_step(Bench* b, double* ms, Error* error) {
    Model* model = &b->model;
    RunState* state = &b->state;
    Schedule schedule = {SCHEDULE_COSINE, 6e-4, 0.1, 100, 1000, 0.2, 1000, 0.5};
    GuardOptions guard = {1, 4, 20, 20, 0, 0, FLOATX_DTYPE == DTYPE_F16, 2000};
    size_t B = model->options.B, T = model->options.T;
    for (size_t i = 0; i < B * T; i++) {
        b->tokens[i] = (int32_t)(random_bits(1, RANDOM_TEST, state->step, i) % model->config.vocab);
        b->targets[i] = (int32_t)(random_bits(2, RANDOM_TEST, state->step, i) % model->config.vocab);
    }

    double started = now_ms(), factor = 0.0;
    StepResult result;
    StepFlags flags = {.stop = false};
    model_begin_step(model, state->loss_scale, 1);
    model_gradients(model, b->tokens, b->targets, B, T);
    if (!model_finish_step(model, &result, flags, error)) return false;
    double lr = schedule_lr(&schedule, state->step);
    bool taken = guard_step(state, &factor, &guard, result.grad_norm);
    if (taken) model_update(model, ++state->updates, lr, factor);
    state->step++;
    device_wait(model->stream);
    *ms = now_ms() - started;
    if (profile != NULL) spans_settle(&profile_spans);
    return taken ||
           fail_with(error, "step %llu has a gradient of norm %g and was skipped: its time says nothing; report it",
                     (unsigned long long)state->step, result.grad_norm);
}

// ------------------------------------------------------------------------------------------------
// 4. The table of one step

// "12.3%" in as many columns; "n/a" if the share is not known.
static const char* percent(char text[16], int columns, double share) {
    if (isnan(share)) snprintf(text, 16, "%*s", columns, "n/a");
    else snprintf(text, 16, "%*.1f%%", columns - 1, 100 * share);
    return text;
}

// "312000.0"; "n/a" if the rate is not known.
static const char* gigaflops(char text[16], double rate) {
    if (isnan(rate)) snprintf(text, 16, "n/a");
    else snprintf(text, 16, "%.1f", 1e-9 * rate);
    return text;
}

// The time of an operation at the machine's limit, and which limit that is; NAN if the machine's limit is not known. A
// GPU uses tensor cores in attention too.
static double bound_ms(const OperationCost* o, const double* peaks, const char** limit) {
    bool products = o->n || (!device_is_host() && strncmp(o->name, "attention_", 10) == 0);
    double arithmetic = 1e3 * o->flops / peaks[products ? RATE_MATMUL : RATE_FP32];
    double memory = 1e3 * o->bytes / peaks[RATE_MEMORY];
    if (o->flops == 0) arithmetic = 0;
    *limit = isnan(arithmetic) ? "n/a" : memory > arithmetic ? "memory" : "arithmetic";
    return memory > arithmetic ? memory : arithmetic;
}

static void operation_print(const OperationCost* o, const double* peaks, double step_ms) {
    const char* limit;
    double bound = bound_ms(o, peaks, &limit);
    char label[64], share[16];
    if (o->n) snprintf(label, sizeof label, "%s (%zu, %zu)", o->name, o->n, o->k);
    else snprintf(label, sizeof label, "%s", o->name);
    printf("%-38s %5zu %9.*f %6.1f%% %9.1f %8.1f  %-10s %s\n", label, o->calls, device_is_host() ? 2 : 3, o->ms,
           100 * o->ms / step_ms, 1e-6 * o->flops / o->ms, 1e-6 * o->bytes / o->ms, limit,
           percent(share, 8, bound / o->ms));
}

// The plain format that make bounds --measured reads: a name without spaces, and the milliseconds of one step.
static bool kernels_write(const char* path, const Profile* p, Error* error) {
    JsonWriter w;
    char line[128];
    memset(&w, 0, sizeof w);
    for (size_t i = 0; i < p->count; i++) {
        const OperationCost* o = &p->operations[i];
        int used = snprintf(line, sizeof line, "%s", o->name);
        if (o->n) used += snprintf(line + used, sizeof line - (size_t)used, "(%zu,%zu)", o->n, o->k);
        used += snprintf(line + used, sizeof line - (size_t)used, " %.6f\n", o->ms);
        json_put(&w, line, (size_t)used);
    }
    bool ok = json_write_done(&w, error) && file_write_atomic(path, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

static int compare_costs(const void* a, const void* b) {
    double x = ((const OperationCost*)a)->ms, y = ((const OperationCost*)b)->ms;
    return (x < y) - (x > y);
}

static int compare_profiles(const void* a, const void* b) {
    double x = ((const Profile*)a)->step_ms, y = ((const Profile*)b)->step_ms;
    return (x > y) - (x < y);
}

typedef struct {
    double median_ms, min_ms, tokens_per_second, mfu, operations_ms, products_ms;
    size_t memory_peak, memory_plan;
} Totals;

static void table_print(const Profile* p, const double* peaks, const Totals* t) {
    char share[16];
    printf("%-38s %5s %9s %7s %9s %8s  %-10s %8s\n", "operation (matrix: outputs, inputs)", "calls", "ms/step", "share",
           "GFLOP/s", "GB/s", "bound", "of bound");
    for (size_t i = 0; i < p->count; i++) operation_print(&p->operations[i], peaks, p->step_ms);
    double others = t->operations_ms - t->products_ms, rest = p->step_ms - t->operations_ms;
    const char* rest_name = device_is_host() ? "rest: clearing the residual, sum of losses"
                                             : "rest: gaps between operations, uploads, events";
    printf("\n%-44s %9.2f %6.1f%%\n", "matrix products", t->products_ms, 100 * t->products_ms / p->step_ms);
    printf("%-44s %9.2f %6.1f%%\n", "other operations", others, 100 * others / p->step_ms);
    printf("%-44s %9.2f %6.1f%%\n", rest_name, rest, 100 * rest / p->step_ms);
    printf("%-44s %9.2f\n", "the whole step, median", t->median_ms);
    printf("%-44s %9.2f\n", "minimum", t->min_ms);
    printf("%-44s %9.1f\n", "tokens/s (median)", t->tokens_per_second);
    printf("%-44s %s\n", "model flops utilization", percent(share, 9, t->mfu));
    if (device_is_host()) printf("%-44s %9.1f\n", "peak resident memory, MB", 1e-6 * (double)t->memory_peak);
    printf("%-44s %9.1f\n", "planned memory of the model, MB", 1e-6 * (double)t->memory_plan);
}

static void table_write(JsonWriter* w, const Profile* p, const double* peaks, const Totals* t) {
    json_member_number(w, "peak_fp32_flops", peaks[RATE_FP32]);
    json_member_number(w, "peak_product_flops", peaks[RATE_MATMUL]);
    json_member_number(w, "peak_memory_bytes", peaks[RATE_MEMORY]);
    json_member_number(w, "ms_median", t->median_ms);
    json_member_number(w, "ms_min", t->min_ms);
    json_member_number(w, "tok_per_s", t->tokens_per_second);
    json_member_number(w, "mfu", t->mfu);
    json_member_number(w, "ms_operations", t->operations_ms);
    json_member_u64(w, "mem_bytes", t->memory_peak);
    json_member_u64(w, "plan_bytes", t->memory_plan);
    json_write_key(w, "operations");
    json_write_begin(w, '[');
    for (size_t i = 0; i < p->count; i++) {
        const OperationCost* o = &p->operations[i];
        const char* limit;
        double bound = bound_ms(o, peaks, &limit);
        json_write_begin(w, '{');
        json_member_string(w, "name", o->name);
        if (o->n) json_member_u64(w, "outputs", o->n);
        if (o->n) json_member_u64(w, "inputs", o->k);
        json_member_u64(w, "calls", o->calls);
        json_member_number(w, "ms", o->ms);
        json_member_number(w, "flops", o->flops);
        json_member_number(w, "bytes", o->bytes);
        json_member_string(w, "bound", limit);
        json_member_number(w, "of_bound", bound / o->ms);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
}

// Runs a warm-up step and the timed steps, measuring the peaks after each: peaks (RATE_COUNT) are the medians of rates
// (RATE_COUNT, steps). *memory: peak memory of the process, without the array for the memory's rate.
static bool bench_measure(Bench* b, double* peaks, Profile* profiles, double* rates, size_t steps, size_t* memory,
                          Error* error) {
    Meter meter;
    double now[RATE_COUNT], warm_up;
    profile = &profiles[0];
    bool ok = bench_step(b, &warm_up, error);
    profile = NULL;
    *memory = memory_peak();
    memset(profiles, 0, steps * sizeof(Profile));
    if (!ok || !meter_open(&meter, b->model.stream, error)) return false;
    meter_rates(&meter, now);
    for (size_t i = 0; ok && i < steps; i++) {
        profile = &profiles[i];
        ok = bench_step(b, &profiles[i].step_ms, error);
        profile = NULL;
        meter_rates(&meter, now);
        for (int kind = 0; kind < RATE_COUNT; kind++) rates[(size_t)kind * steps + i] = now[kind];
    }
    meter_close(&meter);
    for (int kind = 0; ok && kind < RATE_COUNT; kind++) peaks[kind] = median(rates + (size_t)kind * steps, steps);
    qsort(profiles, steps, sizeof(Profile), compare_profiles);
    return ok;
}

static Totals bench_totals(const Bench* b, const Profile* shown, const double* peaks, double min_ms, size_t memory) {
    Totals t;
    size_t T = b->model.options.T;
    memset(&t, 0, sizeof t);
    t.median_ms = shown->step_ms;
    t.min_ms = min_ms;
    t.tokens_per_second = 1e3 * (double)(b->model.options.B * T) / t.median_ms;
    t.mfu = t.tokens_per_second * model_flops_per_token(&b->model, T) / peaks[RATE_MATMUL];
    for (size_t i = 0; i < shown->count; i++) {
        t.operations_ms += shown->operations[i].ms;
        if (shown->operations[i].n) t.products_ms += shown->operations[i].ms;
    }
    t.memory_peak = memory;
    t.memory_plan = b->model.memory.total;
    return t;
}

static bool bench_table(const Options* o, JsonWriter* w, Error* error) {
    Bench b;
    double peaks[RATE_COUNT];
    char fp32[16], product[16];
    size_t memory = 0;
    if (!bench_open(&b, o, o->model, o->batch, o->seq, RECOMPUTE_NONE, error)) return false;
    Profile* profiles = (Profile*)memory_allocate(o->steps * sizeof(Profile));
    double* rates = (double*)memory_allocate(RATE_COUNT * o->steps * sizeof(double));
    bool ok = (profiles && rates) || fail_with(error, "out of memory for measuring; make --steps smaller");
    if (ok) memset(profiles, 0, o->steps * sizeof(Profile));
    ok = ok && spans_open(&profile_spans, b.model.stream, error);
    ok = ok && bench_measure(&b, peaks, profiles, rates, o->steps, &memory, error);
    if (ok) {
        Profile* shown = &profiles[o->steps / 2];
        qsort(shown->operations, shown->count, sizeof(OperationCost), compare_costs);
        Totals totals = bench_totals(&b, shown, peaks, profiles[0].step_ms, memory);
        printf("%s, %zu parameters, B=%zu T=%zu\n", o->model, b.model.parameters.true_size, (size_t)o->batch,
               (size_t)o->seq);
        printf("peaks: fp32 %s GFLOP/s, products of %s %s GFLOP/s, memory %.1f GB/s\n\n",
               gigaflops(fp32, peaks[RATE_FP32]), FLOATX_NAME, gigaflops(product, peaks[RATE_MATMUL]),
               1e-9 * peaks[RATE_MEMORY]);
        table_print(shown, peaks, &totals);
        table_write(w, shown, peaks, &totals);
        if (o->kernels) ok = kernels_write(o->kernels, shown, error);
    }
    spans_close(&profile_spans);
    free(profiles);
    free(rates);
    bench_close(&b);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 5. The tour: the first step of a model, operation by operation, after the same step has warmed up the machine

#ifdef LLMTRAIN_CUDA
static bool bench_tour(const Options* o, Error* error) {
    (void)o;
    return fail_with(error,
                     "--tour reads what operations wrote, here in the GPU's memory; 'make tour' runs it on the CPU");
}
#else
static bool bench_tour(const Options* o, Error* error) {
    Bench b;
    Profile timer;
    double ms;
    if (!bench_open(&b, o, o->model, o->batch, o->seq, RECOMPUTE_NONE, error)) return false;
    bool ok = bench_step(&b, &ms, error);
    bench_close(&b);
    if (!ok || !bench_open(&b, o, o->model, o->batch, o->seq, RECOMPUTE_NONE, error)) return false;
    const Config* c = &b.model.config;
    memset(&timer, 0, sizeof timer);
    profile = &timer;
    printf("%s: B=%zu T=%zu C=%zu L=%zu H=%zu K=%zu D=%zu F=%zu V=%zu, %zu parameters\n", o->model, (size_t)o->batch,
           (size_t)o->seq, c->channels, c->layers, c->heads, c->kv_heads, config_head_size(c), c->ffn, c->vocab,
           b.model.parameters.true_size);
    tour_begin(&b.model.parameters);
    ok = bench_step(&b, &ms, error);
    ok = tour_end(error) && ok;
    profile = NULL;
    bench_close(&b);
    return ok;
}
#endif

// ------------------------------------------------------------------------------------------------
// 6. Sweeps: every row is measured

// One row: the median of the steps after a warm-up step.
static bool sweep_row(const Options* o, JsonWriter* w, const char* model, size_t B, size_t T, Error* error) {
    Bench b;
    double ms = 0.0;
    if (!bench_open(&b, o, model, B, T, RECOMPUTE_NONE, error)) return false;
    double* times = (double*)memory_allocate(o->steps * sizeof(double));
    bool ok = times != NULL || fail_with(error, "out of memory for %zu times; make --steps smaller", (size_t)o->steps);
    ok = ok && bench_step(&b, &ms, error);
    for (size_t i = 0; ok && i < o->steps; i++) ok = bench_step(&b, &times[i], error);
    if (ok) {
        ms = median(times, o->steps);
        double flops = model_flops_per_token(&b.model, T), tokens = (double)(B * T);
        printf("%-12s %10zu %5zu %5zu %10.2f %11.1f %12.4f %9.1f %10.1f\n", model, b.model.parameters.true_size, B, T,
               ms, 1e3 * tokens / ms, ms / tokens, 1e-6 * flops * tokens / ms, 1e-6 * (double)b.model.memory.total);
        fflush(stdout);
        json_write_begin(w, '{');
        json_member_string(w, "model", model);
        json_member_u64(w, "parameters", b.model.parameters.true_size);
        json_member_u64(w, "B", B);
        json_member_u64(w, "T", T);
        json_member_number(w, "ms_median", ms);
        json_member_number(w, "tok_per_s", 1e3 * tokens / ms);
        json_member_u64(w, "plan_bytes", b.model.memory.total);
        json_write_end(w, '}');
    }
    free(times);
    bench_close(&b);
    return ok;
}

static void sweep_title(const char* title) {
    printf("\n%s\n%-12s %10s %5s %5s %10s %11s %12s %9s %10s\n", title, "model", "parameters", "B", "T", "ms/step",
           "tokens/s", "ms/token", "GFLOP/s", "plan, MB");
}

static bool bench_sweep(const Options* o, JsonWriter* w, Error* error) {
    static const char* const models[] = {"bytes:0.2M", "bytes:1M", "bytes:5M", "llama:15M", "gpt2:d6",
                                         "llama:42M", "llama:110M", "gpt2:d12"};
    bool ok = true;
    json_write_key(w, "sweep");
    json_write_begin(w, '[');
    sweep_title("Sequence length, at 1024 tokens a step");
    for (size_t T = 64; ok && T <= 1024; T *= 2) ok = sweep_row(o, w, o->model, 1024 / T, T, error);
    if (ok) sweep_title("Batch size");
    for (size_t B = 1; ok && B <= 16; B *= 2) ok = sweep_row(o, w, o->model, B, 64, error);
    if (ok) sweep_title("Parameters");
    for (size_t i = 0; ok && i < sizeof models / sizeof models[0]; i++) ok = sweep_row(o, w, models[i], 4, 256, error);
    json_write_end(w, ']');
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 7. Recomputation: each level against a model that keeps everything, in alternating steps, since the speed of a shared
// machine changes

static size_t bench_activations(const Bench* b) {
    const Arena* plan = &b->model.memory;
    size_t i = 0;
    while (i < plan->count && strcmp(plan->lines[i].name, "activations of the blocks") != 0) i++;
    return i < plan->count ? plan->lines[i].bytes : 0;
}

// One row: the median ratios of consecutive steps, for their time and their processor time, which other programs affect
// less; and the ratio computed from the operations' costs, at rates measured alongside. times (4, steps): both times,
// and the ratios.
static bool recompute_row(const Options* o, JsonWriter* w, RecomputeLevel level, double* times, Error* error) {
    Bench all, less;
    Rates rates;
    double ms, *ratios = times + 2 * o->steps, *of_processor = times + 3 * o->steps;
    char name[16];
    if (!bench_open(&all, o, o->model, o->batch, o->seq, RECOMPUTE_NONE, error)) return false;
    if (!bench_open(&less, o, o->model, o->batch, o->seq, level, error)) {
        bench_close(&all);
        return false;
    }
    BlockShape shape = model_block_shape(&all.model);
    bool ok = bench_step(&all, &ms, error) && bench_step(&less, &ms, error) &&
        (!device_is_host() || rates_measure(&rates, &shape, 1, error));
    for (size_t i = 0; ok && i < o->steps; i++) {
        double began = processor_ms();
        ok = bench_step(&all, &times[i], error);
        double middle = processor_ms();
        ok = ok && bench_step(&less, &times[o->steps + i], error);
        ratios[i] = times[o->steps + i] / times[i];
        of_processor[i] = (processor_ms() - middle) / (middle - began);
    }
    if (ok) {
        double ratio = median(ratios, o->steps), processor = median(of_processor, o->steps);
        double predicted = device_is_host() ? step_ms(&less.model, &rates, 1) / step_ms(&all.model, &rates, 1) : NAN;
        double saved = (double)bench_activations(&less) / (double)bench_activations(&all);
        choice_name(RECOMPUTE_NAMES, level, name, sizeof name);
        printf("%-12s %16.1f %8.3f %10.1f %10.1f %8.3f", name, 1e-6 * (double)bench_activations(&less), saved,
               1e-6 * (double)less.model.memory.total, median(times + o->steps, o->steps), ratio);
        if (device_is_host()) printf(" %10.3f %10.3f\n", processor, predicted);
        else printf(" %10s %10s\n", "n/a", "n/a");  // a GPU has no processor time, and its rates are not measured
        fflush(stdout);
        json_write_begin(w, '{');
        json_member_string(w, "level", name);
        json_member_u64(w, "activation_bytes", bench_activations(&less));
        json_member_u64(w, "plan_bytes", less.model.memory.total);
        json_member_number(w, "ms_of_none", median(times, o->steps));
        json_member_number(w, "ratio", ratio);
        json_member_number(w, "processor_ratio", processor);
        json_member_number(w, "predicted_ratio", predicted);
        json_write_end(w, '}');
    }
    bench_close(&less);
    bench_close(&all);
    return ok;
}

static bool bench_recompute(const Options* o, JsonWriter* w, Error* error) {
    int last = o->recompute == RECOMPUTE_AUTO ? RECOMPUTE_BLOCK : (int)o->recompute;
    double* times = (double*)memory_allocate(4 * o->steps * sizeof(double));
    bool ok = times != NULL || fail_with(error, "out of memory for the times; make --steps smaller");
    printf("%s, B=%zu T=%zu, %zu steps\n\n%-12s %16s %8s %10s %10s %8s %10s %10s\n", o->model, (size_t)o->batch,
           (size_t)o->seq, (size_t)o->steps, "--recompute", "activations, MB", "of none", "plan, MB", "ms/step",
           "of none", "processor", "predicted");
    json_write_key(w, "recompute");
    json_write_begin(w, '[');
    for (int level = last; ok && level >= 0; level--) ok = recompute_row(o, w, (RecomputeLevel)level, times, error);
    json_write_end(w, ']');
    free(times);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 8. Attention alone: each row is measured in rounds that alternate forward and backward, with peak measurements
// between them, by processor time; shares are those of the fastest of each. There are as few sequences as in a step, so
// that the arrays lie in the same cache as a step's

#ifdef LLMTRAIN_CUDA
static bool bench_attention(const Options* o, JsonWriter* w, Error* error) {
    (void)o, (void)w;
    return fail_with(error,
                     "--attention measures the CPU; on a GPU run dev/attention_forward.cu and attention_backward.cu");
}
#else
enum { ATTENTION_BATCH = 4, ATTENTION_HEADS = 4, ATTENTION_LENGTH = 4096 };  // the longest sequences have a batch of 1

// Shares of the peak: forward, backward. memory: of 8 arrays (tokens, heads, D) and 2 of floats.
static void attention_shares(double shares[2], floatX* memory, const float* numbers, size_t T, size_t D,
                             size_t rounds) {
    const size_t B = T < ATTENTION_LENGTH ? ATTENTION_BATCH : 1, H = ATTENTION_HEADS, n = B * T * H * D;
    const size_t turns = divide_up(ATTENTION_LENGTH * ATTENTION_LENGTH, B * T * T);
    floatX *qkv = memory, *dqkv = qkv + 3 * n, *out = dqkv + 3 * n, *dout = out + n;
    float *lse = (float*)(dout + n), *delta = lse + B * H * T;
    double flops[2] = {cost_attention_forward(B, T, H, H, D).flops, cost_attention_backward(B, T, H, H, D).flops};
    double peak = 0.0, threads = (double)threads_count(), fastest[2] = {INFINITY, INFINITY};
    for (size_t i = 0; i < 3 * n; i++) qkv[i] = floatX_of(numbers[i % 4093]);
    for (size_t i = 0; i < n; i++) dout[i] = floatX_of(numbers[i % 4099]);
    for (size_t turn = 0; turn < rounds * turns; turn++) {
        if (turn % turns == 0)
            peak = fmax(peak, peak_measure(peak_loop(false), threads_count(), CLOCK_THREAD_CPUTIME_ID, 10.0));
        double began = processor_ms();
        attention_forward(out, lse, qkv, B, T, H, H, D, NULL);
        double middle = processor_ms();
        attention_backward(dqkv, delta, dout, out, lse, qkv, B, T, H, H, D, NULL);
        fastest[0] = fmin(fastest[0], middle - began);
        fastest[1] = fmin(fastest[1], processor_ms() - middle);
    }
    for (int i = 0; i < 2; i++) shares[i] = 1e3 * flops[i] * threads / fastest[i] / peak;
}

static bool bench_attention(const Options* o, JsonWriter* w, Error* error) {
    static const size_t sizes[] = {32, 36, 64, 128}, lengths[] = {64, 256, 1024, 4096};
    const size_t n = ATTENTION_BATCH * ATTENTION_LENGTH * ATTENTION_HEADS;
    floatX* memory = (floatX*)memory_allocate(8 * n * 128 * sizeof(floatX) + 2 * n * sizeof(float));
    float numbers[4099];
    if (memory == NULL) return fail_with(error, "out of memory for the arrays of attention");
    for (size_t i = 0; i < 4099; i++) numbers[i] = random_normal(1, RANDOM_TEST, 0, i);
    printf("\nattention, %d sequences (the longest alone), %d heads: per cent of the fp32 peak\n%6s %6s %9s %9s\n",
           ATTENTION_BATCH, ATTENTION_HEADS, "D", "T", "forward", "backward");
    json_write_key(w, "attention");
    json_write_begin(w, '[');
    for (size_t i = 0; i < 16; i++) {
        size_t D = sizes[i / 4], T = lengths[i % 4];
        double shares[2];
        attention_shares(shares, memory, numbers, T, D, o->steps);
        printf("%6zu %6zu %8.1f%% %8.1f%%\n", D, T, 100 * shares[0], 100 * shares[1]);
        fflush(stdout);
        json_write_begin(w, '{');
        json_member_u64(w, "D", D);
        json_member_u64(w, "T", T);
        json_member_number(w, "forward", shares[0]);
        json_member_number(w, "backward", shares[1]);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
    free(memory);
    return true;
}
#endif

// ------------------------------------------------------------------------------------------------

static bool run(const Options* o, Error* error) {
    JsonWriter w;
    char device[300];
    memset(&w, 0, sizeof w);
    w.line_depth = 2;
    bench_describe(device, sizeof device);
    printf("%s, matrix products by %s, %zu threads\n", FLOATX_NAME, device, threads_count());
    fflush(stdout);
    json_write_begin(&w, '{');
    json_member_string(&w, "precision", FLOATX_NAME);
    json_member_string(&w, "gemm", device);
    json_member_u64(&w, "threads", threads_count());
    json_member_string(&w, "model", o->model);
    json_member_u64(&w, "B", o->batch);
    json_member_u64(&w, "T", o->seq);
    json_member_u64(&w, "steps", o->steps);
    bool ok = o->tour ? bench_tour(o, error) : o->sweep ? bench_sweep(o, &w, error)
            : o->recompute ? bench_recompute(o, &w, error)
            : o->attention ? bench_attention(o, &w, error) : bench_table(o, &w, error);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    if (ok && o->json) ok = json_write_done(&w, error) && file_write_atomic(o->json, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

int main(int argc, char** argv) {
    Options o = {"gpt2:124M", NULL, NULL, 4, 256, 5, 0, false, false, false, true, RECOMPUTE_NONE, OPTIMIZER_ADAMW};
    Error error;
    int code;
    const Flag rows[] = {
        {"model", KIND_TEXT, &o.model, "NAME", 0, 0,
         "a preset of llmtrain.h, gpt2:tiny, llama:tiny, demo (make demo's), or bytes:0.2M|1M|5M", false},
        {"batch", KIND_COUNT, &o.batch, "N", 1, 65536, "sequences of a step", false},
        {"seq", KIND_COUNT, &o.seq, "N", 1, 16777216, "tokens of a sequence", false},
        {"steps", KIND_COUNT, &o.steps, "N", 1, 100000, "timed steps, after one that warms up", false},
        {"threads", KIND_COUNT, &o.threads, "N", 0, 4096, "OpenMP threads; 0: as OpenMP decides", false},
        {"sweep", KIND_SWITCH, &o.sweep, "on|off", 0, 0, "measure against sequence, batch and parameters", false},
        {"tour", KIND_SWITCH, &o.tour, "on|off", 0, 0, "print each operation of one step, and what it computed", false},
        {"attention", KIND_SWITCH, &o.attention, "on|off", 0, 0,
         "measure attention alone over head sizes and sequence lengths, in as many rounds as --steps", false},
        {"recompute", KIND_CHOICE, &o.recompute, RECOMPUTE_NAMES, 0, 0,
         "measure the levels of recomputation in turn, up to this one; auto: all", false},
        {"optimizer", KIND_CHOICE, &o.optimizer, optimizer_names(), 0, 0, "update rule", false},
        {"masters", KIND_SWITCH, &o.master_weights, "on|off", 0, 0, "16-bit builds: fp32 master weights", false},
        {"json", KIND_TEXT, &o.json, "FILE", 0, 0, "write what was measured there too", false},
        {"kernels", KIND_TEXT, &o.kernels, "FILE", 0, 0,
         "write a line for each operation of the table there: its name and its milliseconds in one step", false},
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    if (!flags_begin(&code, "bench", "bench: where the time of a training step goes (" FLOATX_NAME " build).", &flags,
                     argc, argv)) return code;
    if (o.threads) threads_set(o.threads);
    if (run(&o, &error)) return 0;
    fprintf(stderr, "bench: %s\n", error.text);
    return 1;
}
