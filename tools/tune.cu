// tune.cu: times cuBLASLt's algorithms for the matmuls of a training step, and stores the best of each in a file.
//
//   make build/tune CUDA=on ARCH=sm_90a PRECISION=BF16
//   build/tune --model gpt2:124M --batch 64 --seq 1024 --out h200.json       with the model and batch of the run
//   ./train ... --matmul-algorithms h200.json                                the same file, the same bits
//
//   1. flags     the flags of ./train that determine the matmuls
//   2. shapes    of one micro-batch and an update, found by computing them
//   3. operands  random numbers in the device's memory
//   4. trial     the algorithms of a shape: checked against the first, timed in turn
//   5. program   the table, the file
//
// A trial asks the library for 8 proposals under the conditions of a model without a file, and for 8 more under wider
// ones: the memory of --workspace, arrays aligned to 128 bytes as a model's are, and split sums whose parts are added
// in the type of the result where that is float. It runs them in turn, one run of each after the other, until each has
// had 5 runs and 20 ms; the one with the smallest median is stored. A proposal whose results differ from the first's by
// more than the order of sums explains is reported, and never stored. Exit code: 0 done; 1 something failed; 2 a flag
// is wrong.

#include "../llmtrain/run/presets.h"

#ifndef LLMTRAIN_CUDA

int main(void) {
    fputs("tune: a CPU build has no matmul algorithms to choose from; build it where there is a GPU, with CUDA=on\n",
          stderr);
    return 1;
}

#else

// ------------------------------------------------------------------------------------------------
// 1. Flags

typedef struct {
    const char *model, *train, *out;
    Config config;  // only the fields set by flags
    uint64_t batch, seq, rank, workspace_mb;
    OptimizerKind optimizer;
    RecomputeLevel recompute;
    bool master_weights, tf32;
} Options;

static Flags options_flags(Options* o) {
    memset(o, 0, sizeof *o);
    o->config.tied = true;
    o->config.rope_theta = 10000;
    const Flag table[] = {
        FLAG_HEADING("Same as for ./train"),
        FLAG_TEXT("model", &o->model, NULL, "NAME", 0, "preset, such as gpt2:124M or llama:1B"),
        FLAG_COUNT("batch", &o->batch, 4, 1, 65536, 0, "sequences per micro-batch and rank"),
        FLAG_COUNT("seq", &o->seq, 0, 0, 1 << 24, 0, "tokens per training sequence; 0: --context"),
        FLAG_TEXT("train", &o->train, NULL, "NAMES", 0, "train only these tensors"),
        FLAG_CHOICE("optimizer", &o->optimizer, OPTIMIZER_ADAMW, optimizer_names(), 0, "update rule"),
        FLAG_COUNT("optimizer-rank", &o->rank, 128, 1, 65536, 0, "galore, ldadam: rank of the subspace"),
        FLAG_SWITCH("masters", &o->master_weights, true, 0, "16-bit builds: keep fp32 master weights"),
        FLAG_SWITCH("tf32", &o->tf32, false, 0, "fp32 builds: allow TF32 matmuls"),
        FLAG_CHOICE("recompute", &o->recompute, RECOMPUTE_NONE, RECOMPUTE_NAMES, 0,
                    "activations to recompute in the backward pass, as in ./train"),
    };
    const Flag own[] = {
        FLAG_HEADING("The result"),
        FLAG_TEXT("out", &o->out, NULL, "FILE", 0, "file to write, for --matmul-algorithms of ./train"),
        FLAG_COUNT("workspace", &o->workspace_mb, 128, 32, MATMUL_WORKSPACE_MAX >> 20, 0,
                   "MiB of memory that an algorithm may need, for sums in parts; ./train --plan counts what the file "
                   "needs"),
    };
    Flags flags = flags_of(table, sizeof table / sizeof(Flag));
    fields_flags(&flags, CONFIG_FIELDS, CONFIG_FIELD_COUNT, &o->config);
    flags_append(&flags, own, sizeof own / sizeof(Flag));
    return flags;
}

// ------------------------------------------------------------------------------------------------
// 2. Shapes

typedef struct {
    MatmulShape shape;
    uint64_t calls;
} UsedShape;

// The order of the table: by kind, and within a kind the largest first.
static int shape_compare(const void* a, const void* b) {
    const MatmulShape *x = &((const UsedShape*)a)->shape, *y = &((const UsedShape*)b)->shape;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    const uint64_t of_x[4] = {x->M, x->N, x->K, x->bias}, of_y[4] = {y->M, y->N, y->K, y->bias};
    for (int i = 0; i < 4; i++)
        if (of_x[i] != of_y[i]) return of_x[i] > of_y[i] ? -1 : 1;
    return 0;
}

// Lists the shapes that the library has computed so far; fails if there are none.
static bool shapes_list(UsedShape** shapes, size_t* count, const struct Matmul* matmul, Error* error) {
    *count = 0;
    *shapes = (UsedShape*)memory_allocate(matmul ? matmul->count * sizeof(UsedShape) : 0);
    if (*shapes == NULL) return fail_with(error, "out of memory for the list of matmuls");
    for (size_t i = 0; matmul && i < matmul->capacity; i++) {
        const MatmulPlan* plan = &matmul->plans[i];
        UsedShape used = {plan->shape, plan->calls};
        if (plan->taken && plan->calls > 0) (*shapes)[(*count)++] = used;
    }
    qsort(*shapes, *count, sizeof **shapes, shape_compare);
    if (*count > 0) return true;
    free(*shapes);
    return fail_with(error, "cuBLASLt takes none of this model's matmuls; give sizes that are multiples of 8");
}

// Finds the shapes by computing one micro-batch and an update with random weights. The caller frees *shapes.
static bool shapes_find(UsedShape** shapes, size_t* count, const Config* config, const Options* o, Error* error) {
    Model model;
    StepResult result;
    StepFlags none = {0};
    OptimizerOptions optimizer = optimizer_defaults(o->optimizer);
    optimizer.rank = o->rank;
    optimizer.master_weights = o->master_weights;
    const ModelOptions options = {.B = o->batch, .T = o->seq ? o->seq : config->context, .training = true,
                                  .optimizer = optimizer, .tf32 = o->tf32, .recompute = o->recompute,
                                  .train = o->train};
    if (!model_create(&model, config, options, error)) return false;
    size_t N = options.B * options.T;
    int32_t* tokens = (int32_t*)memory_allocate(N * sizeof(int32_t));
    bool ok = tokens != NULL || fail_with(error, "out of memory for a batch; make --batch smaller");
    for (size_t i = 0; ok && i < N; i++)
        tokens[i] = (int32_t)(random_bits(1, RANDOM_TEST, 0, i) % model.config.vocab);
    if (ok && (ok = model_randomize(&model, 1, error))) {
        model_begin_step(&model, 1.0, 1);
        model_gradients(&model, tokens, tokens, options.B, options.T);
        ok = model_finish_step(&model, &result, none, error);
    }
    if (ok) {
        model_update(&model, 1, 1e-4, 1.0);
        device_wait(model.stream);
        ok = shapes_list(shapes, count, model.stream->matmul, error);
    }
    free(tokens);
    model_free(&model);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Operands
//
// Uniform in [-1, 1), since the power that a multiplier draws, and so the clock, depends on the bits that it gets. An
// array repeats POOL such numbers; POOL is prime, so that rows do not repeat.

enum { POOL = 1048573 };

typedef struct {
    void *first, *second, *bias;                // in the order of matmul.cuh's table
    void *out, *pre, *out_of_first, *pre_of_first;
    size_t out_bytes, pre_bytes;
    size_t terms;                               // products added up per output
    bool out_is_float;
} Operands;

typedef struct {
    Stream stream;
    void* scratch;      // (wide.workspace)
    MatmulRequest wide; // the wider conditions
    floatX* pool;       // (POOL), on the device
    float* float_pool;  // (POOL)
    float* worst;       // (COMPARERS)
    cudaEvent_t began, ended;
} Bench;

enum { COMPARE_BLOCKS = 512, COMPARE_THREADS = 256, COMPARERS = COMPARE_BLOCKS * COMPARE_THREADS };

static void fill(void* array, size_t bytes, const void* pool, size_t pool_bytes, Stream stream) {
    for (size_t done = 0; done < bytes; done += pool_bytes)
        device_copy((char*)array + done, pool, min_size(pool_bytes, bytes - done), stream);
}

static void operands_free(Operands* p) {
    void* const arrays[] = {p->first, p->second, p->bias, p->out, p->pre, p->out_of_first, p->pre_of_first};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) device_free(arrays[i], 0);
}

static bool operands_make(Operands* p, const MatmulShape* s, const Bench* bench, Error* error) {
    bool forward = matmul_is_forward(s->kind), of_weight = s->kind == MATMUL_BACKWARD_WEIGHT;
    size_t bytes = dtype_bytes((Dtype)s->type), MN = s->M * s->N, MK = s->M * s->K, NK = s->N * s->K;
    memset(p, 0, sizeof *p);
    p->out_is_float = matmul_makes_floats(s->kind) || s->type == DTYPE_F32;
    p->out_bytes = (p->out_is_float ? sizeof(float) : bytes) * (forward ? MN : of_weight ? NK : MK);
    p->pre_bytes = matmul_has_gelu(s->kind) ? p->out_bytes : 0;
    p->terms = forward ? s->K : of_weight ? s->M : s->N;
    struct {
        void** array;
        size_t bytes;
    } const all[] = {{&p->first, bytes * (of_weight ? MK : NK)}, {&p->second, bytes * (forward ? MK : MN)},
                     {&p->bias, s->bias ? bytes * s->N : 0},
                     {&p->out, p->out_bytes}, {&p->out_of_first, p->out_bytes},
                     {&p->pre, p->pre_bytes}, {&p->pre_of_first, p->pre_bytes}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (all[i].bytes == 0) continue;
        *all[i].array = device_allocate(all[i].bytes, bench->stream, error);
        if (*all[i].array == NULL) return operands_free(p), false;
        bool floats = s->type == DTYPE_F32;
        fill(*all[i].array, all[i].bytes, floats ? (const void*)bench->float_pool : bench->pool,
             POOL * (floats ? sizeof(float) : sizeof(floatX)), bench->stream);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Trial

// worst[thread]: the largest |a - b| / (absolute + relative |a|); NaN is taken as infinite.
template <typename T>
static __global__ void compare_kernel(float* worst, const T* a, const T* b, size_t n, float absolute, float relative) {
    float most = 0.0f;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = thread; i < n; i += (size_t)gridDim.x * blockDim.x) {
        float x = float_widen(a[i]), part = fabsf(x - float_widen(b[i])) / (absolute + relative * fabsf(x));
        most = part <= most ? most : part == part ? part : INFINITY;
    }
    worst[thread] = most;
}

// Whether two results of a shape are as close to each other as rounding allows.
//
// A sum of n products of such operands is correct within 4 sqrt(n) 2^-24 (n / 4 + 1), whatever the order of its terms:
// n / 4 is the mean of the sum of their magnitudes. Two differ by up to twice that, and by the rounding of both. TF32
// may round or truncate operands. The library's GELU may use a tanh that is correct to 2^-11: its effect on a sum is
// proportional to the sum's size, about sqrt(n) / 3.
static bool results_agree(const MatmulShape* s, const Operands* p, const void* a, const void* b, size_t bytes,
                          const Bench* bench) {
    float* worst = (float*)matmul_allocate(COMPARERS * sizeof(float));
    size_t n = bytes / (p->out_is_float ? sizeof(float) : sizeof(floatX));
    unsigned blocks = (unsigned)min_size(COMPARE_BLOCKS, divide_up(n, COMPARE_THREADS));
    double root = sqrt((double)p->terms), absolute = 8.0 * root * 0x1p-24 * ((double)p->terms / 4.0 + 1.0);
    if (s->tf32) absolute += root * 0x1p-8;
    if (matmul_has_gelu(s->kind)) absolute += root * 0x1p-11;
    float most = 0.0f, relative = p->out_is_float ? 0x1p-22f : 2.0f * FLOATX_EPSILON;
    if (p->out_is_float)
        compare_kernel<float><<<blocks, COMPARE_THREADS, 0, bench->stream->compute>>>(
            bench->worst, (const float*)a, (const float*)b, n, (float)absolute, relative);
    else
        compare_kernel<floatX><<<blocks, COMPARE_THREADS, 0, bench->stream->compute>>>(
            bench->worst, (const floatX*)a, (const floatX*)b, n, (float)absolute, relative);
    LAUNCH_CHECK();
    device_download(worst, bench->worst, blocks * COMPARE_THREADS * sizeof(float), bench->stream);
    for (size_t i = 0; i < blocks * COMPARE_THREADS; i++) most = fmaxf(most, worst[i]);
    free(worst);
    return most <= 1.0f;
}

enum { PROPOSALS = 8, PROPOSALS_ALL = 2 * PROPOSALS, RUNS_MIN = 5, RUNS_MAX = 4096 };
static const double RUNS_MS = 20;

typedef struct {
    MatmulPlan plan;     // with this algorithm
    bool runs, right;
    double ms[RUNS_MAX];
    double sum, median;
} Proposal;

typedef struct {
    Proposal* proposals;  // (PROPOSALS_ALL)
    size_t count, best;
} Trial;

static cublasStatus_t proposal_run(const Proposal* proposal, const Operands* p, const Bench* bench) {
    return matmul_plan_run(bench->stream->matmul, &proposal->plan, p->out, p->first, p->second, p->bias, p->pre, false,
                           bench->stream);
}

// Appends what the library proposes under these conditions and has not proposed before, with a plan of its own, and
// checks which of them run and are right: the very first, which a model without a file uses, is right by definition.
static void trial_propose(Trial* trial, const MatmulShape* s, const MatmulRequest* request, const Operands* p,
                          const Bench* bench) {
    cublasLtMatmulHeuristicResult_t results[PROPOSALS];
    struct Matmul* matmul = matmul_state(bench->stream);
    MatmulPlan plan = matmul_plan_describe(*s, request->alignment);
    size_t found = (size_t)matmul_plan_propose(results, PROPOSALS, matmul, &plan, request), before = trial->count;
    matmul_plan_free(&plan);
    for (size_t i = 0; i < found; i++) {
        Proposal* proposal = &trial->proposals[trial->count];
        bool known = false;
        for (size_t k = 0; k < before; k++)
            known = known || memcmp(&trial->proposals[k].plan.algorithm, &results[i].algo, sizeof results[i].algo) == 0;
        if (known || results[i].state != CUBLAS_STATUS_SUCCESS) continue;
        memset(proposal, 0, sizeof *proposal);
        proposal->plan = matmul_plan_describe(*s, request->alignment);
        matmul_plan_take(&proposal->plan, &results[i].algo, results[i].workspaceSize);
        cublasStatus_t status = proposal_run(proposal, p, bench);
        proposal->runs = status == CUBLAS_STATUS_SUCCESS;
        if (trial->count++ == 0) {
            matmul_check(status, "cublasLtMatmul", s, __FILE__, __LINE__);
            device_copy(p->out_of_first, p->out, p->out_bytes, bench->stream);
            if (p->pre) device_copy(p->pre_of_first, p->pre, p->pre_bytes, bench->stream);
        }
        bool reads_pre = s->kind == MATMUL_GELU_BACKWARD_INPUT;
        proposal->right = proposal->runs && results_agree(s, p, p->out_of_first, p->out, p->out_bytes, bench) &&
                          (p->pre == NULL || reads_pre ||
                           results_agree(s, p, p->pre_of_first, p->pre, p->pre_bytes, bench));
    }
}

static void trial_begin(Trial* trial, const MatmulShape* s, const Operands* p, const Bench* bench) {
    MatmulRequest wide = bench->wide;
    if (p->out_is_float) wide.schemes |= CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    trial->count = trial->best = 0;
    trial_propose(trial, s, &MATMUL_REQUEST, p, bench);
    if (trial->count > 0) trial_propose(trial, s, &wide, p, bench);
}

static void trial_end(const Trial* trial) {
    for (size_t i = 0; i < trial->count; i++) matmul_plan_free(&trial->proposals[i].plan);
}

// Times in turn the proposals that run and are right; the best is the one with the smallest median.
static void trial_time(Trial* trial, const Operands* p, const Bench* bench) {
    size_t runs = 0;
    double least = 0;
    for (; runs < RUNS_MIN || (runs < RUNS_MAX && least < RUNS_MS); runs++) {
        least = INFINITY;
        for (size_t i = 0; i < trial->count; i++) {
            Proposal* proposal = &trial->proposals[i];
            float ms = 0;
            if (!proposal->right) continue;
            CUDA_CHECK(cudaEventRecord(bench->began, bench->stream->compute));
            matmul_check(proposal_run(proposal, p, bench), "cublasLtMatmul", &proposal->plan.shape, __FILE__, __LINE__);
            CUDA_CHECK(cudaEventRecord(bench->ended, bench->stream->compute));
            CUDA_CHECK(cudaEventSynchronize(bench->ended));
            CUDA_CHECK(cudaEventElapsedTime(&ms, bench->began, bench->ended));
            proposal->ms[runs] = (double)ms;
            proposal->sum += (double)ms;
            least = fmin(least, proposal->sum);
        }
    }
    for (size_t i = 0; i < trial->count; i++) {
        Proposal* proposal = &trial->proposals[i];
        qsort(proposal->ms, runs, sizeof(double), compare_doubles);
        proposal->median = proposal->ms[runs / 2];
        if (proposal->right && proposal->median < trial->proposals[trial->best].median) trial->best = i;
    }
}

// ------------------------------------------------------------------------------------------------
// 5. Program

static bool bench_open(Bench* bench, bool tf32, uint64_t workspace, Error* error) {
    memset(bench, 0, sizeof *bench);
    bench->wide = MATMUL_REQUEST;
    bench->wide.workspace = workspace;
    bench->wide.alignment = 128;
    if (!device_open(&bench->stream, tf32, error)) return false;
    floatX* values = (floatX*)memory_allocate(POOL * sizeof(floatX));
    float* floats = (float*)memory_allocate(POOL * sizeof(float));
    bool ok = (values && floats) || fail_with(error, "out of memory for random numbers; close other programs");
    ok = ok && (bench->scratch = device_allocate(bench->wide.workspace, bench->stream, error)) != NULL;
    ok = ok && (bench->pool = (floatX*)device_allocate(POOL * sizeof(floatX), bench->stream, error)) != NULL;
    ok = ok && (bench->float_pool = (float*)device_allocate(POOL * sizeof(float), bench->stream, error)) != NULL;
    ok = ok && (bench->worst = (float*)device_allocate(COMPARERS * sizeof(float), bench->stream, error)) != NULL;
    if (ok) {
        for (size_t i = 0; i < POOL; i++) {
            floats[i] = 2.0f * random_uniform(1, RANDOM_TEST, 1, i) - 1.0f;
            values[i] = floatX_of(floats[i]);
        }
        device_upload(bench->pool, values, POOL * sizeof(floatX), bench->stream);
        device_upload(bench->float_pool, floats, POOL * sizeof(float), bench->stream);
        bench->stream->scratch = bench->scratch;
        bench->stream->scratch_bytes = bench->wide.workspace;
        CUDA_CHECK(cudaEventCreate(&bench->began));
        CUDA_CHECK(cudaEventCreate(&bench->ended));
    }
    free(values);
    free(floats);
    return ok;
}

static void bench_close(Bench* bench) {
    if (bench->stream == NULL) return;
    device_wait(bench->stream);
    void* const arrays[] = {bench->scratch, bench->pool, bench->float_pool, bench->worst};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) device_free(arrays[i], 0);
    if (bench->began) CUDA_CHECK(cudaEventDestroy(bench->began));
    if (bench->ended) CUDA_CHECK(cudaEventDestroy(bench->ended));
    device_close(bench->stream);
}

static void trial_print(const Trial* trial, const UsedShape* used) {
    const MatmulShape* s = &used->shape;
    const Proposal *first = &trial->proposals[0], *best = &trial->proposals[trial->best];
    printf("%-26s %-5s %-4s %9llu %7llu %7llu %6llu %10.4f %10.4f %6.1f%% %9.1f %6zu\n", matmul_names[s->kind],
           s->tf32 ? "tf32" : DTYPES[s->type].name, s->bias ? "yes" : "no", (unsigned long long)s->M,
           (unsigned long long)s->N, (unsigned long long)s->K, (unsigned long long)used->calls, first->median,
           best->median, 100.0 * (1.0 - best->median / first->median), 1e-6 * (double)best->plan.workspace,
           trial->count);
    for (size_t i = 1; i < trial->count; i++)
        if (!trial->proposals[i].right)
            printf("    proposal %zu %s\n", i + 1, trial->proposals[i].runs ? "is WRONG and not used" : "does not run");
    fflush(stdout);
}

// Tries every shape; appends the best of each to c.
static bool tune_shapes(MatmulChoices* c, const UsedShape* shapes, size_t count, const Bench* bench, Error* error) {
    double first = 0, best = 0;
    Trial trial = {(Proposal*)memory_allocate(PROPOSALS_ALL * sizeof(Proposal)), 0, 0};
    bool ok = trial.proposals != NULL || fail_with(error, "out of memory for times; close other programs");
    printf("%-26s %-5s %-4s %9s %7s %7s %6s %10s %10s %7s %9s %6s\n", "matmul", "dtype", "bias", "M", "N", "K", "calls",
           "first ms", "best ms", "gain", "MB of its", "tried");
    for (size_t i = 0; ok && i < count; i++) {
        Operands operands;
        if (!(ok = operands_make(&operands, &shapes[i].shape, bench, error))) break;
        trial_begin(&trial, &shapes[i].shape, &operands, bench);
        if (trial.count > 0) {
            trial_time(&trial, &operands, bench);
            trial_print(&trial, &shapes[i]);
            const Proposal* chosen = &trial.proposals[trial.best];
            MatmulChoice choice = {shapes[i].shape, chosen->plan.workspace, chosen->plan.alignment,
                                   chosen->plan.algorithm};
            c->choices[c->count++] = choice;
            first += (double)shapes[i].calls * trial.proposals[0].median;
            best += (double)shapes[i].calls * chosen->median;
        }
        trial_end(&trial);
        operands_free(&operands);
    }
    free(trial.proposals);
    if (ok)
        printf("one micro-batch and its update: %.3f ms of matmuls by first proposals, %.3f ms by the best, %.1f%% "
               "less\n", first, best, first > 0 ? 100.0 * (1.0 - best / first) : 0.0);
    return ok;
}

static bool tune(const Config* config, const Options* o, Error* error) {
    UsedShape* shapes;
    size_t count;
    Bench bench;
    MatmulChoices c;
    if (!shapes_find(&shapes, &count, config, o, error)) return false;
    bool ok = bench_open(&bench, o->tf32, o->workspace_mb << 20, error);
    if (ok) {
        matmul_choices_here(&c);
        printf("%s, cuBLASLt %llu, %s\n", c.gpu, (unsigned long long)c.version, FLOATX_NAME);
        c.choices = (MatmulChoice*)memory_allocate(count * sizeof(MatmulChoice));
        ok = (c.choices || fail_with(error, "out of memory for the choices")) &&
             tune_shapes(&c, shapes, count, &bench, error) && matmul_choices_write(&c, o->out, error);
        if (ok) say(stdout, "%s: %zu matmul algorithms", o->out, c.count);
        matmul_choices_free(&c);
    }
    bench_close(&bench);
    free(shapes);
    return ok;
}

int main(int argc, char** argv) {
    Options o;
    Config config;
    Error error;
    int code;
    files_open_standard();
    Flags flags = options_flags(&o);
    const char* title = "tune: times cuBLASLt's algorithms for the matmuls of a training step, and stores the best";
    if (!flags_begin(&code, "tune", title, &flags, argc, argv)) return code;
    bool right = (o.out && o.out[0]) || fail_with(&error, "give --out, the file to write");
    right = right && config_choose(&config, o.model, &o.config, &flags, &error);
    if (right && config.context == 0) config.context = o.seq;
    right = right && config_complete(&config, &error);
    if (right && o.recompute == RECOMPUTE_AUTO)
        right = fail_with(&error, "--recompute auto is for ./train; give the level that it chooses");
    if (right && tune(&config, &o, &error)) return 0;
    fprintf(stderr, "tune: %s\n", error.text);
    return right ? 1 : 2;
}

#endif  // LLMTRAIN_CUDA
