// test_kernels.c: proves every operation of kernels_cpu.h, for one storage type.
//
//     cc -O2 -fopenmp dev/test/test_kernels.c -o build/test_kernels -lm      (also -DPRECISION_BF16, -DPRECISION_FP16)
//     OMP_WAIT_POLICY=passive build/test_kernels       (three threads that spin on two processors take twice as long)
//
// Values: each output is compared with the double reference of reference.h, which sees the very inputs that the kernel
// sees; the reference's gradients are compared with finite differences of its forward on the same inputs, wherever
// there are few enough of them. An output is right if for each element
//
//     |kernel - reference| <= epsilon (|reference| + rounded) + 4 sqrt(length) 2^-24 size + tiny
//
// epsilon   FLOATX_EPSILON if the element is stored as floatX, otherwise 0 (for `rounded`: always FLOATX_EPSILON)
// length    of the longest sum behind the element: rounding errors of random sign grow with its square root
// size      the sum of the absolute values of the terms; `rounded` the same for what is stored on the way (Result)
// tiny      2^-125, where floats lose places and exp_fast is 0; for FP16 half of the smallest number, 2^-25
//
// Around the values, for each operation and shape: what is overwritten starts as NaN, what is added to starts as random
// numbers; the bytes behind each output stay as they were; inputs are allocated to the byte, for the sanitizers;
// 1, 2 and 3 threads give the same bits; a NaN or infinity in any input is not swallowed.

#include "kernels_cpu.h"
#include "reference.h"

#include <float.h>

#ifdef PRECISION_FP16
enum { FP16 = 1 };
#else
enum { FP16 = 0 };
#endif

static int passed, failed;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void check(bool ok, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs(ok ? "ok      " : "FAILED  ", stdout);
    vprintf(format, arguments);
    putchar('\n');
    va_end(arguments);
    if (ok) passed++; else failed++;
}

// ------------------------------------------------------------------------------------------------
// Memory: freed together after each case

static void* held[256];
static size_t held_count;

static void* hold(size_t bytes) {
    void* memory = malloc(bytes ? bytes : 1);
    if (memory == NULL || held_count == sizeof held / sizeof held[0]) {
        fputs("test_kernels: no memory for a case\n", stderr);
        exit(1);
    }
    return held[held_count++] = memory;
}

static void release(void) {
    while (held_count > 0) free(held[--held_count]);
}

static double* hold_doubles(size_t n) {
    double* x = (double*)hold(n * sizeof(double));
    for (size_t i = 0; i < n; i++) x[i] = 0.0;
    return x;
}

static Result result(size_t n) {
    Result r;
    r.value = hold_doubles(n);
    r.size = hold_doubles(n);
    r.rounded = hold_doubles(n);
    r.n = n;
    return r;
}

// ------------------------------------------------------------------------------------------------
// Cases: one call of one operation
//
// An array of a case is an input, an output that is overwritten, one that is added to, or one that is worked on in
// place. The call sees the arrays in the order in which they were made.

enum { GUARD = 64, ARRAYS = 10 };
typedef enum { INPUT, OUTPUT, ADDED, IN_PLACE } Role;

typedef struct {
    const char* name;
    Role role;
    bool stored;  // floatX; otherwise float
    size_t n;
    size_t live;  // an element that must matter to the outputs
    void *data, *start;
} Array;

typedef struct Case {
    const char* name;
    char shape[80];
    void (*call)(const struct Case* c);
    Shape s;
    Array arrays[ARRAYS];
    int count;
    int witness;  // the array that must show a NaN in any input, or -1: any output
    float p, dloss;
    OptimizerStep step;
} Case;

static uint64_t cases;

static Case case_begin(const char* name, void (*call)(const Case* c), const Shape* s) {
    Case c;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.call = call;
    c.s = *s;
    c.witness = -1;
    cases++;
    return c;
}

static size_t array_bytes(const Array* a) { return a->n * (a->stored ? sizeof(floatX) : sizeof(float)); }
static double array_get(const Array* a, const void* data, size_t i) {
    return a->stored ? (double)float_of(((const floatX*)data)[i]) : (double)((const float*)data)[i];
}
static void array_set(const Array* a, void* data, size_t i, double x) {
    if (a->stored) ((floatX*)data)[i] = floatX_of((float)x);
    else ((float*)data)[i] = (float)x;
}

// An array of n normal random numbers times `scale`, rounded to its type; n = 0 is NULL.
static Array* case_array(Case* c, const char* name, Role role, bool stored, size_t n, double scale) {
    Array* a = &c->arrays[c->count++];
    a->name = name;
    a->role = role;
    a->stored = stored;
    a->n = n;
    if (n == 0) return a;
    a->live = n / 2;
    a->data = hold(array_bytes(a) + (role == INPUT ? 0 : GUARD));
    a->start = hold(array_bytes(a));
    for (size_t i = 0; i < n; i++)
        array_set(a, a->start, i, scale * random_normal(1, RANDOM_TEST, cases * ARRAYS + (uint64_t)c->count, i));
    memcpy(a->data, a->start, array_bytes(a));
    return a;
}
static Array* input(Case* c, const char* name, size_t n, double scale) {
    return case_array(c, name, INPUT, true, n, scale);
}
static Array* output(Case* c, const char* name, size_t n) { return case_array(c, name, OUTPUT, true, n, 1); }
static Array* added(Case* c, const char* name, size_t n) { return case_array(c, name, ADDED, true, n, 1); }
static Array* in_place(Case* c, const char* name, size_t n) { return case_array(c, name, IN_PLACE, true, n, 1); }
static Array* input_float(Case* c, const char* name, size_t n) { return case_array(c, name, INPUT, false, n, 1); }
static Array* output_float(Case* c, const char* name, size_t n) { return case_array(c, name, OUTPUT, false, n, 1); }
static Array* added_float(Case* c, const char* name, size_t n) { return case_array(c, name, ADDED, false, n, 1); }
static Array* in_place_float(Case* c, const char* name, size_t n) { return case_array(c, name, IN_PLACE, false, n, 1); }

static floatX* x(const Case* c, int array) { return (floatX*)c->arrays[array].data; }
static float* f(const Case* c, int array) { return (float*)c->arrays[array].data; }

// The starting values of an array in double; NULL if there is none.
static double* doubles(const Case* c, int array) {
    const Array* a = &c->arrays[array];
    if (a->n == 0) return NULL;
    double* r = hold_doubles(a->n);
    for (size_t i = 0; i < a->n; i++) r[i] = array_get(a, a->start, i);
    return r;
}

// Calls the operation on fresh outputs; `poison`, if it is not NULL, has its live element replaced by `value`.
// Returns a hash of all outputs.
static uint64_t case_run(const Case* c, int threads, const Array* poison, double value) {
    Hash h = hash_begin(0);
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n == 0) continue;
        if (a->role == OUTPUT) memset(a->data, 0xFF, array_bytes(a));  // NaN in every type
        else memcpy(a->data, a->start, array_bytes(a));
        if (a->role != INPUT) memset((char*)a->data + array_bytes(a), 0xA5, GUARD);
        if (a == poison) array_set(a, a->data, a->live, value);
    }
    threads_set((size_t)threads);
    c->call(c);
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n > 0 && a->role != INPUT) hash_add(&h, a->data, array_bytes(a));
    }
    return hash_end(&h);
}

static bool guards_intact(const Case* c) {
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n == 0 || a->role == INPUT) continue;
        for (size_t b = 0; b < GUARD; b++) if (((unsigned char*)a->data)[array_bytes(a) + b] != 0xA5) return false;
    }
    return true;
}

// Whether a NaN (or, with `infinity` set, any number that is not finite) shows: in the witness if there is one, in what
// was added to a poisoned sum, otherwise in an output that is not the poisoned array, unless that is all there is.
static bool case_shows(const Case* c, const Array* poison, bool infinity) {
    int others = 0;
    for (int i = 0; i < c->count; i++) others += c->arrays[i].role != INPUT && &c->arrays[i] != poison;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->role == INPUT) continue;
        if (c->witness >= 0 && i != c->witness) continue;
        if (c->witness < 0 && (poison->role == ADDED ? a != poison : a == poison && others > 0)) continue;
        for (size_t j = 0; j < a->n; j++) {
            double value = array_get(a, a->data, j);
            if (infinity ? !isfinite(value) : isnan(value)) return true;
        }
    }
    return false;
}

// Everything about a case but its values; leaves the outputs of a clean run behind.
static void case_prove(Case* c) {
    char swallowed[200] = "";
    uint64_t hash = case_run(c, 1, NULL, 0.0);
    bool guarded = guards_intact(c), same = case_run(c, 2, NULL, 0.0) == hash && case_run(c, 3, NULL, 0.0) == hash;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->role == OUTPUT || a->n == 0) continue;
        case_run(c, 2, a, NAN);
        guarded = guarded && guards_intact(c);
        size_t length = strlen(swallowed);
        if (!case_shows(c, a, false)) snprintf(swallowed + length, sizeof swallowed - length, " NaN in %s", a->name);
        case_run(c, 2, a, INFINITY);
        length = strlen(swallowed);
        if (c->witness < 0 && !case_shows(c, a, true))
            snprintf(swallowed + length, sizeof swallowed - length, " infinity in %s", a->name);
    }
    bool repeats = case_run(c, 2, NULL, 0.0) == hash;
    check(guarded && same && repeats && swallowed[0] == 0,
          "%-28s %-30s %s  1 = 2 = 3 threads: %s, guards: %s, swallowed:%s", c->name, c->shape, FLOATX_NAME,
          same && repeats ? "same bits" : "DIFFERENT", guarded ? "intact" : "BROKEN",
          swallowed[0] ? swallowed : " nothing");
}

// Compares an output with the reference; prints the element whose error is the largest part of its bound.
static void case_compare(const Case* c, int array, const Result* r, size_t length) {
    const Array* a = &c->arrays[array];
    double worst = -1.0, worst_error = 0.0, worst_bound = 0.0, tiny = a->stored && FP16 ? 0x1p-25 : 0x1p-125;
    bool ok = a->n == r->n;
    for (size_t i = 0; i < a->n && i < r->n; i++) {
        double start = a->role == ADDED ? array_get(a, a->start, i) : 0.0, reference = start + r->value[i];
        double error = fabs(array_get(a, a->data, i) - reference);
        double bound = (a->stored ? FLOATX_EPSILON * fabs(reference) : 0.0) + FLOATX_EPSILON * r->rounded[i]
                     + 4.0 * sqrt((double)length) * 0x1p-24 * (r->size[i] + fabs(start)) + tiny;
        if (!(error <= bound)) ok = false;
        if (isnan(worst) || error / bound <= worst) continue;
        worst = error / bound;
        worst_error = error;
        worst_bound = bound;
    }
    check(ok, "%-28s %-30s %s  %-16s err %.1e <= %.1e", c->name, c->shape, FLOATX_NAME, a->name,
          worst_error, worst_bound);
}

// ------------------------------------------------------------------------------------------------
// The reference's gradients against finite differences
//
// d objective / dx = (8 (f(x + h) - f(x - h)) - (f(x + 2h) - f(x - 2h))) / 12h, with an error of order h^4: at h = 1e-4
// the rounding of f, about 1e-16 / h times the sum of its terms, is what remains.

static double objective(ReferenceForward forward, Result* out, const double* dout, double* const* in, const Shape* s) {
    double sum = 0.0;
    memset(out->value, 0, out->n * sizeof(double));
    forward(out, in, s);
    for (size_t i = 0; i < out->n; i++) sum += dout[i] * out->value[i];
    return sum;
}

static double finite_difference(double* at, ReferenceForward forward, Result* out, const double* dout,
                                double* const* in, const Shape* s) {
    static const double steps[4] = {1.0, -1.0, 2.0, -2.0}, weights[4] = {8.0, -8.0, -1.0, 1.0};
    double x0 = *at, h = 1e-4, sum = 0.0;
    for (int i = 0; i < 4; i++) {
        *at = x0 + steps[i] * h;
        sum += weights[i] * objective(forward, out, dout, in, s);
    }
    *at = x0;
    return sum / (12.0 * h);
}

// din = the gradients of the reference, proved by finite differences if there are few inputs.
static void reference_gradient(const Case* c, Result* din, int inputs, ReferenceForward forward,
                               ReferenceBackward backward, const double* dout, size_t outputs, double* const* in) {
    size_t total = 0;
    double error = 0.0, largest = 0.0, terms = 0.0;
    backward(din, dout, in, &c->s);
    for (int i = 0; i < inputs; i++) if (in[i]) total += din[i].n;
    if (total > 800) return;
    Result out = result(outputs);
    objective(forward, &out, dout, in, &c->s);
    for (size_t i = 0; i < outputs; i++) terms += fabs(dout[i] * out.value[i]);
    for (int i = 0; i < inputs; i++) {
        for (size_t j = 0; in[i] && j < din[i].n; j++) {
            double e = fabs(finite_difference(&in[i][j], forward, &out, dout, in, &c->s) - din[i].value[j]);
            if (!(e <= error)) error = e;
            largest = fmax(largest, fabs(din[i].value[j]));
        }
    }
    double bound = 1e-9 * largest + 1e-11 * terms + 1e-15;
    check(error <= bound, "%-28s %-30s double  reference against finite differences  err %.1e <= %.1e",
          c->name, c->shape, error, bound);
}

// ------------------------------------------------------------------------------------------------
// Embedding

static void call_embedding_forward(const Case* c) {
    embedding_forward(x(c, 0), c->s.tokens, x(c, 1), x(c, 2), c->s.first_position, c->s.B, c->s.T, c->s.C, NULL);
}
static void call_embedding_backward(const Case* c) {
    embedding_backward(f(c, 0), f(c, 1), x(c, 2), c->s.tokens, c->s.B, c->s.T, c->s.C, NULL);
}

static int32_t* random_tokens(size_t n, size_t V) {
    int32_t* tokens = (int32_t*)hold(n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(random_bits(2, RANDOM_TEST, cases, i) % V);
    return tokens;
}

static void test_embedding(size_t B, size_t T, size_t C, size_t V, bool positions, size_t first_position) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.B = B, s.T = T, s.C = C, s.V = V, s.first_position = first_position;
    s.tokens = random_tokens(B * T, V);
    size_t position_count = positions ? (first_position + T) * C : 0;
    Case c = case_begin("embedding_forward", call_embedding_forward, &s);
    snprintf(c.shape, sizeof c.shape, "B=%zu T=%zu C=%zu V=%zu at %zu%s", B, T, C, V, first_position,
             positions ? "" : " no pos");
    output(&c, "out", B * T * C);
    input(&c, "token_weight", V * C, 1)->live = (size_t)s.tokens[0] * C;
    input(&c, "position_weight", position_count, 1)->live = first_position * C;
    case_prove(&c);
    double* in[2] = {doubles(&c, 1), doubles(&c, 2)};
    Result out = result(B * T * C);
    reference_embedding(&out, in, &s);
    case_compare(&c, 0, &out, 1);

    s.first_position = 0;
    Case b = case_begin("embedding_backward", call_embedding_backward, &s);
    snprintf(b.shape, sizeof b.shape, "B=%zu T=%zu C=%zu V=%zu%s", B, T, C, V, positions ? "" : " no pos");
    added_float(&b, "dtoken_weight", V * C)->live = (size_t)s.tokens[0] * C;
    added_float(&b, "dposition_weight", position_count);
    input(&b, "dout", B * T * C, 1);
    case_prove(&b);
    Result din[2] = {result(V * C), result(position_count)};
    reference_gradient(&b, din, 2, reference_embedding, reference_embedding_backward, doubles(&b, 2), B * T * C, in);
    case_compare(&b, 0, &din[0], B * T);
    if (positions) case_compare(&b, 1, &din[1], B);
    release();
}

// ------------------------------------------------------------------------------------------------
// Normalisation

static void call_layernorm_forward(const Case* c) {
    layernorm_forward(x(c, 0), x(c, 1), f(c, 2), f(c, 3), x(c, 4), x(c, 5), x(c, 6), x(c, 7), (float)c->s.epsilon,
                      c->s.N, c->s.C, NULL);
}
static void call_rmsnorm_forward(const Case* c) {
    rmsnorm_forward(x(c, 0), x(c, 1), f(c, 3), x(c, 4), x(c, 5), x(c, 6), (float)c->s.epsilon, c->s.N, c->s.C, NULL);
}
static void call_layernorm_backward(const Case* c) {
    layernorm_backward(x(c, 0), f(c, 1), f(c, 2), x(c, 3), x(c, 4), x(c, 5), f(c, 6), f(c, 7), c->s.N, c->s.C, NULL);
}
static void call_rmsnorm_backward(const Case* c) {
    rmsnorm_backward(x(c, 0), f(c, 1), x(c, 3), x(c, 4), x(c, 5), f(c, 7), c->s.N, c->s.C, NULL);
}

static void test_norm(bool layernorm, bool branch, size_t N, size_t C, double scale) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.C = C, s.mean = layernorm, s.epsilon = (double)1e-5f;
    Case c = case_begin(layernorm ? "layernorm_forward" : "rmsnorm_forward",
                        layernorm ? call_layernorm_forward : call_rmsnorm_forward, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu C=%zu x%.0g%s", N, C, scale, branch ? " branch" : "");
    output(&c, "out", N * C);
    output(&c, "residual", branch ? N * C : 0);
    output_float(&c, "mean", layernorm ? N : 0);
    output_float(&c, "rstd", N);
    input(&c, "in", N * C, scale);
    input(&c, "branch", branch ? N * C : 0, scale);
    input(&c, "weight", C, 1);
    input(&c, "bias", layernorm ? C : 0, 1);
    c.witness = 0;
    case_prove(&c);

    double *normalised = doubles(&c, 4), *branches = doubles(&c, 5);
    Result residual = result(branch ? N * C : 0), out = result(N * C);
    Result mean = result(layernorm ? N : 0), rstd = result(N);
    for (size_t i = 0; branch && i < N * C; i++) {
        result_add(&residual, i, normalised[i] + branches[i], 0.0);
        normalised[i] = (double)float_of(x(&c, 1)[i]);  // what the kernel normalises is the rounded sum
    }
    double* in[3] = {normalised, doubles(&c, 6), doubles(&c, 7)};
    reference_norm(&out, in, &s);
    for (size_t row = 0; row < N; row++) {
        RowStatistics r = reference_statistics(normalised + row * C, &s);
        if (layernorm) result_add(&mean, row, r.mean, r.average);
        result_add(&rstd, row, r.rstd, r.rstd * (1.0 + r.average * r.rstd));
    }
    if (branch) case_compare(&c, 1, &residual, 1);
    case_compare(&c, 0, &out, C);
    if (layernorm) case_compare(&c, 2, &mean, C);
    case_compare(&c, 3, &rstd, C);

    Case b = case_begin(layernorm ? "layernorm_backward" : "rmsnorm_backward",
                        layernorm ? call_layernorm_backward : call_rmsnorm_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    added(&b, "dx", N * C);
    added_float(&b, "dweight", C);
    added_float(&b, "dbias", layernorm ? C : 0);
    input(&b, "dout", N * C, 1);
    memcpy(input(&b, "x", N * C, 1)->start, branch ? x(&c, 1) : x(&c, 4), N * C * sizeof(floatX));
    memcpy(input(&b, "weight", C, 1)->start, x(&c, 6), C * sizeof(floatX));
    if (layernorm) memcpy(input_float(&b, "mean", N)->start, f(&c, 2), N * sizeof(float));
    else input_float(&b, "mean", 0);
    memcpy(input_float(&b, "rstd", N)->start, f(&c, 3), N * sizeof(float));
    case_prove(&b);
    Result din[3] = {result(N * C), result(C), result(layernorm ? C : 0)};
    reference_gradient(&b, din, layernorm ? 3 : 2, reference_norm, reference_norm_backward, doubles(&b, 3), N * C, in);
    case_compare(&b, 0, &din[0], C);
    case_compare(&b, 1, &din[1], N + C);
    if (layernorm) case_compare(&b, 2, &din[2], N);
    release();
}

// ------------------------------------------------------------------------------------------------
// Matmul

static void call_matmul_forward(const Case* c) {
    matmul_forward(x(c, 0), x(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K, NULL);
}
static void call_matmul_backward_input(const Case* c) {
    matmul_backward_input(x(c, 0), x(c, 1), x(c, 2), c->s.M, c->s.N, c->s.K, NULL);
}
static void call_matmul_backward_weight(const Case* c) {
    matmul_backward_weight(f(c, 0), f(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K, NULL);
}

static void test_matmul(size_t M, size_t N, size_t K, bool bias) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.M = M, s.N = N, s.K = K;
    Case c = case_begin("matmul_forward", call_matmul_forward, &s);
    snprintf(c.shape, sizeof c.shape, "M=%zu N=%zu K=%zu%s", M, N, K, bias ? " bias" : "");
    output(&c, "out", M * N);
    input(&c, "in", M * K, 1);
    input(&c, "weight", N * K, 1);
    input(&c, "bias", bias ? N : 0, 1);
    case_prove(&c);
    double* in[3] = {doubles(&c, 1), doubles(&c, 2), doubles(&c, 3)};
    Result out = result(M * N);
    reference_matmul(&out, in, &s);
    case_compare(&c, 0, &out, K);

    Case b = case_begin("matmul_backward_input", call_matmul_backward_input, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    output(&b, "din", M * K);
    input(&b, "dout", M * N, 1);
    memcpy(input(&b, "weight", N * K, 1)->start, x(&c, 2), N * K * sizeof(floatX));
    case_prove(&b);
    Case w = case_begin("matmul_backward_weight", call_matmul_backward_weight, &s);
    memcpy(w.shape, c.shape, sizeof w.shape);
    added_float(&w, "dweight", N * K);
    added_float(&w, "dbias", bias ? N : 0);
    memcpy(input(&w, "dout", M * N, 1)->start, x(&b, 1), M * N * sizeof(floatX));
    memcpy(input(&w, "in", M * K, 1)->start, x(&c, 1), M * K * sizeof(floatX));
    case_prove(&w);
    Result din[3] = {result(M * K), result(N * K), result(bias ? N : 0)};
    reference_gradient(&b, din, 3, reference_matmul, reference_matmul_backward, doubles(&b, 1), M * N, in);
    case_compare(&b, 0, &din[0], N);
    case_compare(&w, 0, &din[1], M);
    if (bias) case_compare(&w, 1, &din[2], M);
    release();
}

// ------------------------------------------------------------------------------------------------
// RoPE

static void call_rope_forward(const Case* c) {
    rope_forward(x(c, 0), f(c, 1), c->s.first_position, c->s.B, c->s.T, c->s.H, c->s.K, c->s.D, NULL);
}
static void call_rope_backward(const Case* c) {
    rope_backward(x(c, 0), f(c, 1), c->s.B, c->s.T, c->s.H, c->s.K, c->s.D, NULL);
}

static void test_rope(size_t B, size_t T, size_t H, size_t K, size_t D, size_t first_position, float theta) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.B = B, s.T = T, s.H = H, s.K = K, s.D = D, s.first_position = first_position, s.theta = (double)theta;
    size_t n = B * T * (H + 2 * K) * D, positions = first_position + T;
    Case c = case_begin("rope_forward", call_rope_forward, &s);
    snprintf(c.shape, sizeof c.shape, "B=%zu T=%zu H=%zu K=%zu D=%zu at %zu", B, T, H, K, D, first_position);
    in_place(&c, "qkv", n)->live = 0;
    Array* table = input_float(&c, "table", positions * D);
    table->live = first_position * D;
    rope_table((float*)table->start, theta, positions, D);
    double error = 0.0;
    for (size_t i = 0; i < positions * D / 2; i++) {
        double angle = (double)(i / (D / 2)) * pow((double)theta, -2.0 * (double)(i % (D / 2)) / (double)D);
        error = fmax(error, fmax(fabs((double)((float*)table->start)[2 * i] - cos(angle)),
                                 fabs((double)((float*)table->start)[2 * i + 1] - sin(angle))));
    }
    check(error <= 0x1p-25, "%-28s %-30s float  err %.1e <= %.1e", "rope_table", c.shape, error, 0x1p-25);
    case_prove(&c);
    double* in[1] = {doubles(&c, 0)};
    Result out = result(n), din = result(n);
    reference_rope(&out, in, &s);
    case_compare(&c, 0, &out, 1);

    s.first_position = 0;
    Case b = case_begin("rope_backward", call_rope_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    in_place(&b, "dqkv", n)->live = 0;
    memcpy(input_float(&b, "table", positions * D)->start, f(&c, 1), positions * D * sizeof(float));
    b.arrays[1].live = 0;
    case_prove(&b);
    reference_gradient(&b, &din, 1, reference_rope, reference_rope_backward, doubles(&b, 0), n, in);
    case_compare(&b, 0, &din, 1);
    release();
}

// ------------------------------------------------------------------------------------------------
// Attention

static void call_attention_forward(const Case* c) {
    attention_forward(x(c, 0), f(c, 1), x(c, 2), c->s.B, c->s.T, c->s.H, c->s.K, c->s.D, NULL);
}
static void call_attention_backward(const Case* c) {
    attention_backward(x(c, 0), f(c, 1), x(c, 2), x(c, 3), f(c, 4), x(c, 5),
                       c->s.B, c->s.T, c->s.H, c->s.K, c->s.D, NULL);
}
// All positions one after another, in a cache with room for three more.
static void call_attention_decode(const Case* c) {
    size_t H = c->s.H, K = c->s.K, D = c->s.D;
    for (size_t t = 0; t < c->s.T; t++)
        attention_decode(x(c, 0) + t * H * D, x(c, 1), x(c, 2), f(c, 3), x(c, 4) + t * (H + 2 * K) * D, t, c->s.T + 3,
                         H, K, D, NULL);
}

static void test_attention(size_t B, size_t T, size_t H, size_t K, size_t D, double scale) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.B = B, s.T = T, s.H = H, s.K = K, s.D = D;
    size_t n = B * T * (H + 2 * K) * D, outs = B * T * H * D;
    Case c = case_begin("attention_forward", call_attention_forward, &s);
    snprintf(c.shape, sizeof c.shape, "B=%zu T=%zu H=%zu K=%zu D=%zu x%.2g", B, T, H, K, D, scale);
    output(&c, "out", outs);
    output_float(&c, "lse", B * H * T);
    input(&c, "qkv", n, scale)->live = 0;
    c.witness = 0;
    case_prove(&c);
    double* in[1] = {doubles(&c, 2)};
    Result out = result(outs), lse = result(B * H * T), din = result(n);
    reference_attention(&out, in, &s);
    reference_attention_lse(&lse, in, &s);
    case_compare(&c, 0, &out, T + D);
    case_compare(&c, 1, &lse, T + D);

    Case b = case_begin("attention_backward", call_attention_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    output(&b, "dqkv", n);
    output_float(&b, "delta", B * H * T);
    input(&b, "dout", outs, 1);
    memcpy(input(&b, "out", outs, 1)->start, x(&c, 0), outs * sizeof(floatX));
    memcpy(input_float(&b, "lse", B * H * T)->start, f(&c, 1), B * H * T * sizeof(float));
    memcpy(input(&b, "qkv", n, 1)->start, x(&c, 2), n * sizeof(floatX));
    b.witness = 0;
    case_prove(&b);
    reference_gradient(&b, &din, 1, reference_attention, reference_attention_backward, doubles(&b, 2), outs, in);
    case_compare(&b, 0, &din, T + D + H / K);

    if (B == 1) {
        Case d = case_begin("attention_decode", call_attention_decode, &s);
        memcpy(d.shape, c.shape, sizeof d.shape);
        output(&d, "out", outs);
        output(&d, "key_cache", (T + 3) * K * D);
        output(&d, "value_cache", (T + 3) * K * D);
        output_float(&d, "scores", H * (T + 3));
        memcpy(input(&d, "qkv", n, 1)->start, x(&c, 2), n * sizeof(floatX));
        d.witness = -1;
        case_prove(&d);
        case_compare(&d, 0, &out, T + D);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// GELU, SwiGLU

static void call_gelu_forward(const Case* c) { gelu_forward(x(c, 0), x(c, 1), c->s.N, NULL); }
static void call_gelu_backward(const Case* c) { gelu_backward(x(c, 0), x(c, 1), x(c, 2), c->s.N, NULL); }
static void call_swiglu_forward(const Case* c) { swiglu_forward(x(c, 0), x(c, 1), c->s.N, c->s.F, NULL); }
static void call_swiglu_backward(const Case* c) { swiglu_backward(x(c, 0), x(c, 1), x(c, 2), c->s.N, c->s.F, NULL); }

static void test_nonlinearity(bool gelu, size_t N, size_t F, double scale) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.F = F;
    size_t outs = N * F, ins = gelu ? outs : 2 * outs;
    if (gelu) s.N = outs;
    Case c = case_begin(gelu ? "gelu_forward" : "swiglu_forward", gelu ? call_gelu_forward : call_swiglu_forward, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu F=%zu x%.2g", N, F, scale);
    output(&c, "out", outs);
    input(&c, "in", ins, scale);
    case_prove(&c);
    double* in[1] = {doubles(&c, 1)};
    Result out = result(outs), din = result(ins);
    (gelu ? reference_gelu : reference_swiglu)(&out, in, &s);
    case_compare(&c, 0, &out, 1);

    Case b = case_begin(gelu ? "gelu_backward" : "swiglu_backward",
                        gelu ? call_gelu_backward : call_swiglu_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    output(&b, "din", ins);
    input(&b, "dout", outs, 1);
    memcpy(input(&b, "in", ins, 1)->start, x(&c, 1), ins * sizeof(floatX));
    case_prove(&b);
    reference_gradient(&b, &din, 1, gelu ? reference_gelu : reference_swiglu,
                       gelu ? reference_gelu_backward : reference_swiglu_backward, doubles(&b, 1), outs, in);
    case_compare(&b, 0, &din, 1);
    if (gelu) {
        floatX* same = (floatX*)hold(outs * sizeof(floatX));
        memcpy(same, x(&b, 1), outs * sizeof(floatX));
        gelu_backward(same, same, x(&b, 2), outs, NULL);
        check(memcmp(same, x(&b, 0), outs * sizeof(floatX)) == 0, "%-28s %-30s %s  din = dout: same bits",
              "gelu_backward", b.shape, FLOATX_NAME);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Dropout

static void call_dropout(const Case* c) { dropout(x(c, 0), x(c, 1), c->p, 11, 5, c->s.first_position, c->s.N, NULL); }

static void test_dropout(size_t N, size_t first, float p) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.first_position = first;
    Case c = case_begin("dropout", call_dropout, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu first=%zu p=%.2g", N, first, (double)p);
    c.p = p;
    output(&c, "out", N);
    Array* in = input(&c, "in", N, 1);
    Result out = result(N);
    size_t kept = 0;
    for (size_t i = 0; i < N; i++) {
        if ((double)random_bits(11, RANDOM_DROPOUT, 5, first + i) < (double)p * 0x1p32) continue;
        double value = array_get(in, in->start, i) / (1.0 - (double)p);
        result_add(&out, i, value, fabs(value));
        in->live = i;
        kept++;
    }
    case_prove(&c);
    case_compare(&c, 0, &out, 1);
    double expected = (double)N * (1.0 - (double)p), sigma = sqrt((double)N * (double)p * (1.0 - (double)p));
    check(fabs((double)kept - expected) <= 4.0 * sigma, "%-28s %-30s kept %zu, expected %.0f +- %.0f", c.name,
          c.shape, kept, expected, 4.0 * sigma);

    floatX* parts = (floatX*)hold(N * sizeof(floatX));  // in place, in three parts that do not start at a multiple of 4
    memcpy(parts, x(&c, 1), N * sizeof(floatX));
    for (size_t i = 0, step; i < N; i += step) {
        step = min_size(N / 3 + 1, N - i);
        dropout(parts + i, parts + i, p, 11, 5, first + i, step, NULL);
    }
    check(memcmp(parts, x(&c, 0), N * sizeof(floatX)) == 0, "%-28s %-30s %s  in place and in parts: same bits",
          c.name, c.shape, FLOATX_NAME);
    release();
}

// ------------------------------------------------------------------------------------------------
// Classifier

static void call_classifier(const Case* c) {
    classifier(x(c, 0), f(c, 1), c->s.tokens, c->dloss, c->s.N, c->s.V, c->s.Vp, NULL);
}

// ignored: every how many rows have no target (0: none, 1: all)
static void test_classifier(size_t N, size_t V, size_t Vp, double scale, size_t ignored, float dloss) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.V = V, s.Vp = Vp;
    int32_t* targets = random_tokens(N, V);
    for (size_t row = 0; ignored > 0 && row < N; row += ignored) targets[row] = -1;
    s.tokens = targets;
    Case c = case_begin("classifier", call_classifier, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu V=%zu Vp=%zu x%.3g -1:%zu", N, V, Vp, scale, ignored);
    c.dloss = dloss;
    Array* logits = case_array(&c, "logits", IN_PLACE, true, N * Vp, scale);
    output_float(&c, "losses", N);
    for (size_t row = 0; row < N; row++) {
        if (targets[row] >= 0) logits->live = row * Vp + V - 1;
        if (row % 2) array_set(logits, logits->start, row * Vp + row % V, 4.0 * scale);  // one large logit
        if (row % 4 == 1 && targets[row] >= 0) targets[row] = (int32_t)(row % V);        // which is the target's
        for (size_t v = 0; v < Vp; v++) {
            double logit = array_get(logits, logits->start, row * Vp + v);
            if (row % 4 == 2) logit = 4.0 * scale + logit / scale;  // ordinary, but far from 0
            if (v >= V) logit = NAN;                                // never read
            array_set(logits, logits->start, row * Vp + v, logit);
        }
    }
    if (ignored == 1) case_run(&c, 2, NULL, 0.0);
    else case_prove(&c);

    double *in[1] = {doubles(&c, 0)}, *dout = hold_doubles(N);
    Result losses = result(N), gradient = result(N * Vp);
    reference_classifier(&losses, in, &s);
    case_compare(&c, 1, &losses, V);
    for (size_t row = 0; row < N; row++) dout[row] = (double)dloss;
    reference_gradient(&c, &gradient, 1, reference_classifier, reference_classifier_backward, dout, N, in);
    case_compare(&c, 0, &gradient, V);

    c.dloss = 0.0f;
    case_run(&c, 2, NULL, 0.0);
    case_compare(&c, 1, &losses, V);
    check(memcmp(logits->data, logits->start, array_bytes(logits)) == 0,
          "%-28s %-30s %s  loss alone leaves the logits as they are", "classifier", c.shape, FLOATX_NAME);
    release();
}

// ------------------------------------------------------------------------------------------------
// Vectors

static void call_fill_zero(const Case* c) { fill_zero(f(c, 0), c->s.N * sizeof(float), NULL); }
static void call_cast_to_float(const Case* c) { cast_to_float(f(c, 0), x(c, 1), c->s.N, NULL); }
static void call_cast_from_float(const Case* c) { cast_from_float(x(c, 0), f(c, 1), c->s.N, NULL); }
static void call_sum_of_squares(const Case* c) {
    double sum;
    sum_of_squares(&sum, f(c, 1), c->s.N, NULL);
    memcpy(f(c, 0), &sum, sizeof sum);
    f(c, 2)[0] = (float)sum;
}
static void call_add(const Case* c) { add(f(c, 0), f(c, 1), c->s.N, NULL); }
static void call_add_stored(const Case* c) { add_stored(f(c, 0), x(c, 1), c->s.N, NULL); }
static void call_sum_scaled(const Case* c) {
    double sum = 2.5;  // it adds
    sum_scaled(&sum, f(c, 1), 0.75, c->s.N, NULL);
    memcpy(f(c, 0), &sum, sizeof sum);
    f(c, 2)[0] = (float)sum;
}

// Their output is a double, proved by its bits and rounded; exact is what it should be, magnitude the sum of absolute terms.
static void sum_begin(Case* c, size_t N) {
    output_float(c, "bits", 2);
    input_float(c, "x", N);
    output_float(c, "rounded", 1);
    c->witness = 2;
}
static void sum_compare(const Case* c, long double exact, long double magnitude, size_t N) {
    double sum, bound = 4.0 * sqrt((double)N) * 0x1p-53 * (double)magnitude;
    memcpy(&sum, f(c, 0), sizeof sum);
    double error = (double)fabsl((long double)sum - exact);
    check(error <= bound, "%-28s %-30s double  err %.1e <= %.1e", c->name, c->shape, error, bound);
}

static void test_vectors(size_t N) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N;
    Case zero = case_begin("fill_zero", call_fill_zero, &s);
    Case to = case_begin("cast_to_float", call_cast_to_float, &s);
    Case from = case_begin("cast_from_float", call_cast_from_float, &s);
    Case squares = case_begin("sum_of_squares", call_sum_of_squares, &s);
    Case scaled = case_begin("sum_scaled", call_sum_scaled, &s);
    Case sum = case_begin("add", call_add, &s), stored = case_begin("add_stored", call_add_stored, &s);
    Case* all[7] = {&zero, &to, &from, &squares, &scaled, &sum, &stored};
    for (int i = 0; i < 7; i++) snprintf(all[i]->shape, sizeof all[i]->shape, "N=%zu", N);
    output_float(&zero, "x", N);
    output_float(&to, "out", N);
    input(&to, "in", N, 3);
    output(&from, "out", N);
    input_float(&from, "in", N);
    sum_begin(&squares, N);
    sum_begin(&scaled, N);
    in_place_float(&sum, "out", N);
    input_float(&sum, "x", N);
    in_place_float(&stored, "out", N);
    input(&stored, "x", N, 3);
    for (int i = 0; i < 7; i++) case_prove(all[i]);

    Result nothing = result(N), wide = result(N), narrow = result(N);
    long double exact_squares = 0.0L, exact_sum = 2.5L, magnitude = 2.5L;
    bool same = true, added = true;
    for (size_t i = 0; i < N; i++) {
        result_add(&wide, i, array_get(&to.arrays[1], to.arrays[1].start, i), 0.0);
        result_add(&narrow, i, (double)f(&from, 1)[i], 0.0);
        floatX one = floatX_of(f(&from, 1)[i]);
        same = same && memcmp(&one, &x(&from, 0)[i], sizeof one) == 0 && (double)f(&to, 0)[i] == wide.value[i];
        float added_up = ((const float*)sum.arrays[0].start)[i] + f(&sum, 1)[i];
        added = added && memcmp(&added_up, &f(&sum, 0)[i], sizeof added_up) == 0;
        added_up = ((const float*)stored.arrays[0].start)[i] + float_of(x(&stored, 1)[i]);
        added = added && memcmp(&added_up, &f(&stored, 0)[i], sizeof added_up) == 0;
        exact_squares += (long double)f(&squares, 1)[i] * (long double)f(&squares, 1)[i];
        exact_sum += 0.75L * (long double)f(&scaled, 1)[i];
        magnitude += 0.75L * fabsl((long double)f(&scaled, 1)[i]);
    }
    check(same, "%-28s %-30s %s  exact, one by one", "casts", to.shape, FLOATX_NAME);
    check(added, "%-28s %-30s float  exact, one by one", "add, add_stored", sum.shape);
    case_compare(&zero, 0, &nothing, 1);
    case_compare(&to, 0, &wide, 1);
    case_compare(&from, 0, &narrow, 1);
    sum_compare(&squares, exact_squares, exact_squares, N);
    sum_compare(&scaled, exact_sum, magnitude, N);
    release();
}

// ------------------------------------------------------------------------------------------------
// Sums in fixed point, against integers of 128 bits
//
// The oracles know no floating-point arithmetic: a number is taken apart into an integer and a power of two, and is
// rounded where the specification rounds it, by comparing the bits that are cut off with a half.

__extension__ typedef unsigned __int128 Wide;
__extension__ typedef __int128 WideSigned;

static int wide_digits(Wide x) {
    int digits = 0;
    for (; x > 0; x >>= 1) digits++;
    return digits;
}

// x / 2^places to the nearest integer, ties to even; x is below 2^120.
static Wide wide_divide(Wide x, int places) {
    if (places <= 0) return x << -places;
    if (places > 120) return 0;
    Wide half = (Wide)1 << (places - 1), whole = x >> places, rest = x - (whole << places);
    return whole + (rest > half || (rest == half && whole % 2 == 1));
}

// An integer of at most `digits` binary digits near x; the result times 2^*exponent is nearest to x times what
// 2^*exponent was before.
static Wide wide_round(Wide x, int digits, int* exponent) {
    int extra = wide_digits(x) - digits;
    if (extra <= 0) return x;
    *exponent += extra;
    return wide_divide(x, extra);
}

// A positive double is the result times 2^*exponent.
static Wide wide_of(double x, int* exponent) {
    double fraction = frexp(x, exponent);
    *exponent -= 53;
    return (Wide)ldexp(fraction, 53);
}

// llrint((double)x * scale), which rounds twice: to 53 digits, and to an integer.
static int64_t oracle_fixed(float x, double scale) {
    int exponent, scale_exponent;
    if (x == 0.0f) return 0;
    Wide fraction = wide_of(fabs((double)x), &exponent) >> 29;  // a float has 24 digits
    Wide product = fraction * wide_of(scale, &scale_exponent);
    exponent += 29 + scale_exponent;
    product = wide_round(product, 53, &exponent);
    int64_t magnitude = (int64_t)wide_divide(product, -exponent);
    return x < 0.0f ? -magnitude : magnitude;
}

// (float)((double)sum * quantum), which rounds three times: to 53 digits, the product too, and to 24.
static float oracle_read(int64_t sum, double quantum) {
    int exponent = 0, quantum_exponent;
    Wide magnitude = wide_round(sum < 0 ? (Wide)0 - (Wide)sum : (Wide)sum, 53, &exponent);
    Wide product = magnitude * wide_of(quantum, &quantum_exponent);
    exponent += quantum_exponent;
    product = wide_round(wide_round(product, 53, &exponent), 24, &exponent);
    float value = ldexpf((float)product, exponent);
    return sum < 0 ? -value : value;
}

// Any float of magnitude up to 2^8, all exponents and signs alike, and ties and their neighbours at this scale.
static float fixed_sample(uint64_t test, size_t i, double scale) {
    Random4 r = random4(41, RANDOM_TEST, test, i);
    float any = float_from_bits((r.bits[0] & 0x807fffffu) | (r.bits[1] % 135) << 23);
    float tie = (float)(((double)(r.bits[1] % 4096) - 2047.5) / scale);
    return r.bits[2] % 4 > 0 ? any : r.bits[2] % 8 > 0 ? tie : nextafterf(tie, r.bits[0] % 2 ? 1.0f : -1.0f);
}

// What one call adds to n sums that lie `moved` elements into an array with a guard on both sides.
static void test_exact_add(size_t n, size_t moved, double scale, double limit) {
    enum { SIDE = 8 };
    const int64_t guard = 0x5A5A5A5A5A5A5A5A;
    const size_t length = n + 2 * SIDE;
    int64_t *array = (int64_t*)hold(length * sizeof(int64_t)), *expected = (int64_t*)hold(length * sizeof(int64_t));
    int64_t* start = (int64_t*)hold(length * sizeof(int64_t));
    float *values = (float*)hold((n + SIDE) * sizeof(float)), *in = values + moved;
    float inside = (float)limit;
    if ((double)inside > limit) inside = nextafterf(inside, 0.0f);
    const float outside[] = {nextafterf(inside, INFINITY), nextafterf(-inside, -INFINITY), FLT_MAX, INFINITY,
                             -INFINITY, NAN};
    for (size_t i = 0; i < length; i++) {
        bool ours = i >= SIDE + moved && i < SIDE + moved + n;
        Random4 r = random4(42, RANDOM_TEST, n, i);
        int64_t random = (int64_t)((uint64_t)r.bits[0] << 32 | r.bits[1]);
        start[i] = ours ? random / 4 : guard;  // far from the largest
    }
    bool right = true, marks = true, kept = true;
    for (int threads = 1; threads <= 3; threads++) {
        for (size_t j = 0; j <= sizeof outside / sizeof outside[0]; j++) {  // the last: all are inside
            bool all_inside = j == sizeof outside / sizeof outside[0];
            double bad[3] = {2.5, 0.0, 2.5};
            for (size_t i = 0; i < n; i++) in[i] = fixed_sample(n, i, scale);
            if (n > 0) in[0] = inside;
            if (n > 1) in[n - 1] = -inside;
            if (n > 0 && !all_inside) in[(j * 7919 + n / 2) % n] = outside[j];
            memcpy(array, start, length * sizeof(int64_t));
            memcpy(expected, start, length * sizeof(int64_t));
            for (size_t i = 0; i < n; i++) {
                bool adds = in[i] >= -inside && in[i] <= inside;
                if (adds) expected[SIDE + moved + i] += oracle_fixed(in[i], scale);
            }
            threads_set((size_t)threads);
            exact_add(array + SIDE + moved, &bad[1], in, scale, limit, n, NULL);
            right = right && memcmp(array, expected, length * sizeof(int64_t)) == 0;
            marks = marks && bad[0] == 2.5 && bad[2] == 2.5 && bad[1] == (n > 0 && !all_inside ? 1.0 : 0.0);
            bad[1] = 1.0;
            in[0] = 0.0f;
            exact_add(array + SIDE + moved, &bad[1], in, scale, limit, min_size(n, 1), NULL);
            kept = kept && bad[1] == 1.0;
        }
    }
    check(right && marks && kept, "%-28s N=%-5zu moved by %zu, x%-9.3g  int64  sums: %s, bad: %s", "exact_add", n,
          moved, scale, right ? "those of 128 bits" : "WRONG", marks && kept ? "right" : "WRONG");
    release();
}

// The sums of 1000 gradients in several orders and groupings: the same bits, which are those of a sum that cannot
// overflow, and so near to the real sum as the quantum promises.
static void test_exact_order(size_t n) {
    enum { GRADIENTS = 1000, GROUPS = 7 };
    const double scale = 0x1p50, quantum = 0x1p-50;
    float* gradients = (float*)hold(GRADIENTS * n * sizeof(float));
    int64_t *sums = (int64_t*)hold(n * sizeof(int64_t)), *first = (int64_t*)hold(n * sizeof(int64_t));
    int64_t* groups = (int64_t*)hold(GROUPS * n * sizeof(int64_t));
    float* out = (float*)hold(n * sizeof(float));
    size_t order[GRADIENTS], differing = 0, wrong = 0, far = 0;
    double bad = 0.0;
    for (size_t i = 0; i < GRADIENTS * n; i++) gradients[i] = fixed_sample(43, i, scale);
    for (size_t i = 0; i < GRADIENTS; i++) order[i] = i;
    for (int trial = 0; trial < 6; trial++) {  // forward, backward, four permutations
        for (size_t i = 0; trial > 0 && i < GRADIENTS - 1; i++) {
            size_t swapped = order[i], any = i + random_bits(44, RANDOM_TEST, (uint64_t)trial, i) % (GRADIENTS - i);
            size_t other = trial == 1 ? GRADIENTS - 1 - i : any;
            if (trial == 1 && other <= i) break;
            order[i] = order[other];
            order[other] = swapped;
        }
        threads_set(1 + (size_t)trial % 3);
        memset(sums, 0, n * sizeof(int64_t));
        memset(groups, 0, GROUPS * n * sizeof(int64_t));
        bool in_groups = trial >= 3;  // as ranks do it: each its share, and then the ranks' sums
        for (size_t i = 0; i < GRADIENTS; i++) {
            int64_t* to = in_groups ? groups + i * (size_t)trial % GROUPS * n : sums;
            exact_add(to, &bad, gradients + order[i] * n, scale, 512.0, n, NULL);
        }
        for (size_t g = 0; in_groups && g < GROUPS; g++)
            exact_merge(sums, groups + (g + (size_t)trial) % GROUPS * n, n, NULL);
        if (trial == 0) memcpy(first, sums, n * sizeof(int64_t));
        differing += memcmp(first, sums, n * sizeof(int64_t)) != 0;
    }
    exact_read(out, first, quantum, n, NULL);
    for (size_t i = 0; i < n; i++) {
        WideSigned sum = 0;
        long double real = 0.0L, size = 0.0L;
        for (size_t g = 0; g < GRADIENTS; g++) {
            sum += oracle_fixed(gradients[g * n + i], scale);
            real += (long double)gradients[g * n + i];
            size += fabsl((long double)gradients[g * n + i]);
        }
        wrong += sum != first[i];
        long double read = 0x1.00001p-24L * fabsl(real), ours = GRADIENTS * 0x1p-63L * size;  // roundings of both sides
        long double bound = 0.5L * GRADIENTS * (long double)quantum + read + ours;
        far += !(fabsl((long double)out[i] - real) <= bound);
    }
    check(differing == 0 && wrong == 0 && bad == 0.0, "%-28s N=%-5zu 1000 gradients in 6 orders  int64  "
          "%zu orders differ, %zu sums are not those of 128 bits", "exact_add, exact_merge", n, differing, wrong);
    check(far == 0, "%-28s N=%-5zu 1000 gradients  float  half a quantum each from the real sum; farther: %zu",
          "exact_read", n, far);
    release();
}

// Integers of every length, and those where rounding to 53 or to 24 digits is a tie.
static int64_t fixed_sum(size_t i) {
    Random4 r = random4(45, RANDOM_TEST, 0, i);
    const int64_t corners[] = {0, 1, -1, INT64_MAX, INT64_MIN, INT64_MAX - 1};
    if (i < sizeof corners / sizeof corners[0]) return corners[i];
    int64_t any = (int64_t)(((uint64_t)r.bits[0] << 32 | r.bits[1]) >> (1 + r.bits[2] % 63));
    int cut = (int)(r.bits[3] % 39);  // so many digits behind the first 24: all zero but the first
    int64_t tie = (int64_t)((2 * (uint64_t)(r.bits[0] % (1 << 24)) + 1) << cut);
    int64_t sum = r.bits[3] / 64 % 4 > 0 ? any : tie + (int64_t)(r.bits[1] % 3) - 1;
    return r.bits[2] / 64 % 2 ? sum : -sum;
}

static void test_exact_read(size_t n, size_t moved, double quantum) {
    enum { SIDE = 8 };
    int64_t* sums = (int64_t*)hold((n + SIDE) * sizeof(int64_t)) + moved;
    int64_t* other = (int64_t*)hold((n + 2 * SIDE) * sizeof(int64_t));
    float* out = (float*)hold((n + 2 * SIDE) * sizeof(float));
    size_t wrong = 0, wrong_merged = 0, touched = 0;
    for (size_t i = 0; i < n; i++) sums[i] = fixed_sum(i);
    for (int threads = 1; threads <= 3; threads++) {
        memset(out, 0xA5, (n + 2 * SIDE) * sizeof(float));
        memset(other, 0xA5, (n + 2 * SIDE) * sizeof(int64_t));
        for (size_t i = 0; i < n; i++) other[SIDE + moved + i] = -(sums[i] / 2) + (int64_t)i;
        threads_set((size_t)threads);
        exact_read(out + SIDE + moved, sums, quantum, n, NULL);
        exact_merge(other + SIDE + moved, sums, n, NULL);
        for (size_t i = 0; i < n; i++) {
            float expected = oracle_read(sums[i], quantum);
            wrong += memcmp(&expected, &out[SIDE + moved + i], sizeof expected) != 0;
            WideSigned merged = (WideSigned)sums[i] - sums[i] / 2 + (WideSigned)i;
            wrong_merged += other[SIDE + moved + i] != merged;
        }
        for (size_t i = 0; i < n + 2 * SIDE; i++) {
            bool ours = i >= SIDE + moved && i < SIDE + moved + n;
            bool same = bits_from_float(out[i]) == 0xA5A5A5A5u && (uint64_t)other[i] == 0xA5A5A5A5A5A5A5A5ull;
            touched += !ours && !same;
        }
    }
    check(wrong == 0 && touched == 0, "%-28s N=%-5zu moved by %zu, x%-9.3g  float  %zu wrong, %zu touched",
          "exact_read", n, moved, quantum, wrong, touched);
    check(wrong_merged == 0 && touched == 0, "%-28s N=%-5zu moved by %zu  int64  %zu wrong, %zu touched",
          "exact_merge", n, moved, wrong_merged, touched);
    release();
}

static void test_exact(void) {
    const double scales[] = {0x1p50, 0x1p50 / 3, 0x1.fffffffffffffp49, 4.0};
    const size_t lengths[] = {0, 1, 2, 3, 33, 257, 5001};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (size_t j = 0; j < sizeof scales / sizeof scales[0]; j++) {
            double limit = j % 2 ? 1000.9 : 512.0;  // 1000.9 is not a float; the nearest is above it
            test_exact_add(lengths[i], (i + j) % 4, scales[j], limit);
            test_exact_read(lengths[i], (i + j) % 4, 1.0 / scales[j]);
        }
    }
    test_exact_order(1);
    test_exact_order(33);
}

// ------------------------------------------------------------------------------------------------
// Checksum

static floatX floatX_from_bits(uint32_t bits) {
    floatX element;
    memcpy(&element, &bits, sizeof element);  // little-endian
    return element;
}

static uint64_t checksum_of(const floatX* elements, size_t first, size_t n) {
    uint64_t out = ~0ull;
    checksum(&out, elements, first, n, NULL);
    return out;
}

static int checksum_order(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return (x > y) - (x < y);
}

static void test_checksum(void) {
    enum { N = 67, PATTERNS = 65536, FLOATX_BITS = 8 * sizeof(floatX) };
    const size_t first = ((size_t)1 << 40) + 7;
    floatX elements[N];

    // By the formula, computed elsewhere.
    const float four[4] = {1.0f, -2.5f, 0.0f, 3072.0f};
    const uint64_t known = FLOATX_IS_FLOAT ? 0x4cd597bb516a77da : FP16 ? 0x13ad38a47442ba63 : 0xa96b93c4909dc940;
    for (int i = 0; i < 4; i++) elements[i] = floatX_of(four[i]);
    check(checksum_of(elements, first, 4) == known && checksum_of(elements, first, 0) == 0, "%-28s %s  a known answer",
          "checksum", FLOATX_NAME);

    // Cut into three parts at every pair of places, by 1, 2 and 3 threads.
    bool cut = true, place = true;
    for (size_t i = 0; i < N; i++) elements[i] = floatX_from_bits(random_bits(46, RANDOM_TEST, 0, i));
    threads_set(1);
    uint64_t whole = checksum_of(elements, first, N);
    for (size_t a = 0; a <= N; a++) {
        for (size_t b = a; b <= N; b++) {
            threads_set(1 + (a + b) % 3);
            uint64_t sum = checksum_of(elements, first, a) + checksum_of(elements + a, first + a, b - a);
            cut = cut && sum + checksum_of(elements + b, first + b, N - b) == whole;
        }
        place = place && checksum_of(elements, first + 1 + a, N) != whole;
    }
    check(cut, "%-28s N=%d %s  the sum of any three parts is the whole", "checksum", N, FLOATX_NAME);
    check(place, "%-28s N=%d %s  elsewhere in the vector it is another", "checksum", N, FLOATX_NAME);

    // Every flipped bit, and every swap of two elements that differ; here many are nearly alike, as parameters are.
    size_t flips = 0, swaps = 0, unseen = 0;
    threads_set(1);
    for (int content = 0; content < 3; content++) {
        for (size_t i = 0; i < N; i++) {
            uint32_t random = random_bits(47, RANDOM_TEST, 0, i);
            elements[i] = floatX_from_bits(content == 0 ? random : content == 1 ? (uint32_t)i % 3 : (uint32_t)i);
        }
        whole = checksum_of(elements, 0, N);
        for (size_t i = 0; i < N; i++) {
            floatX held_i = elements[i];
            for (int bit = 0; bit < FLOATX_BITS; bit++, flips++) {
                uint32_t bits = 0;
                memcpy(&bits, &held_i, sizeof held_i);
                elements[i] = floatX_from_bits(bits ^ 1u << bit);
                unseen += checksum_of(elements, 0, N) == whole;
            }
            elements[i] = held_i;
            for (size_t j = 0; j < i; j++) {
                floatX held_j = elements[j];
                if (memcmp(&held_i, &held_j, sizeof held_i) == 0) continue;
                elements[i] = held_j, elements[j] = held_i;
                swaps++;
                unseen += checksum_of(elements, 0, N) == whole;
                elements[i] = held_i, elements[j] = held_j;
            }
        }
    }
    check(unseen == 0, "%-28s N=%d %s  unseen of %zu flipped bits and %zu swaps: %zu", "checksum", N, FLOATX_NAME,
          flips, swaps, unseen);

    // No two contents of an element have the same checksum: all of them in 16 bits.
    uint64_t* sums = (uint64_t*)hold(PATTERNS * sizeof(uint64_t));
    size_t equal = 0;
    for (size_t at = 0; at < 4; at++) {
        for (uint32_t i = 0; i < PATTERNS; i++) {
            floatX element = floatX_from_bits(FLOATX_IS_FLOAT ? i * 65537u : i);
            sums[i] = checksum_of(&element, at * 12345679, 1);
        }
        qsort(sums, PATTERNS, sizeof sums[0], checksum_order);
        for (size_t i = 1; i < PATTERNS; i++) equal += sums[i] == sums[i - 1];
    }
    check(equal == 0, "%-28s %s  %d contents of an element at 4 places, with equal checksums: %zu", "checksum",
          FLOATX_NAME, PATTERNS, equal);
    release();
}

// ------------------------------------------------------------------------------------------------
// Optimizers

static void call_optimizer(const Case* c) {
    optimizer_update(x(c, 0), f(c, 1), f(c, 2), f(c, 3), f(c, 4), &c->step, c->s.first_position, c->s.N, NULL);
}

// One element of the formulas above optimizer_apply; the sizes are those of w, m and v.
static void reference_optimizer(double* w, double* m, double* v, double* sizes, double grad, const OptimizerStep* o) {
    double g = grad * (double)o->grad_scale, beta1 = (double)o->beta1, beta2 = (double)o->beta2, lr = (double)o->lr;
    double direction = g, direction_size = fabs(g), m0 = *m, w0 = *w;
    if (o->kind == OPTIMIZER_ADAMW) {
        sizes[1] = fabs(*m) + (1.0 - beta1) * (fabs(g) + fabs(*m));
        sizes[2] = fabs(*v) + (1.0 - beta2) * (g * g + fabs(*v));
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * g * g;
        double corrected = 1.0 / (1.0 - pow(beta1, (double)o->step));
        double divisor = sqrt(*v / (1.0 - pow(beta2, (double)o->step))) + (double)o->epsilon;
        direction = *m * corrected / divisor;
        direction_size = corrected / divisor * (sizes[1] + fabs(*m) * sizes[2] / *v);
    } else if (o->kind == OPTIMIZER_MOMENTUM) {
        sizes[1] = direction_size = fabs(beta1 * *m) + fabs(g);
        direction = *m = beta1 * *m + g;
    } else if (o->kind == OPTIMIZER_LION) {
        double mixed = beta1 * m0 + (1.0 - beta1) * g;
        direction = mixed > 0.0 ? 1.0 : mixed < 0.0 ? -1.0 : 0.0;
        direction_size = 1.0;
        *m = beta2 * m0 + (1.0 - beta2) * g;
        sizes[1] = fabs(beta2 * m0) + fabs((1.0 - beta2) * g);
    }
    *w = w0 - lr * (direction + (double)o->weight_decay * w0);
    sizes[0] = fabs(w0) + lr * (direction_size + fabs((double)o->weight_decay * w0));
}

static void test_optimizer(OptimizerKind kind, bool master_weights, size_t N, uint64_t step) {
    static const char* const names[4] = {"adamw", "sgd", "momentum", "lion"};
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.first_position = 1001;
    bool has_m = kind != OPTIMIZER_SGD, has_v = kind == OPTIMIZER_ADAMW;
    Case c = case_begin("optimizer_update", call_optimizer, &s);
    snprintf(c.shape, sizeof c.shape, "%s N=%zu step=%zu%s", names[kind], N, (size_t)step, master_weights ? " masters" : "");
    c.step.kind = kind;
    c.step.lr = 0.01f, c.step.beta1 = 0.9f, c.step.beta2 = 0.99f, c.step.epsilon = 1e-8f, c.step.weight_decay = 0.1f;
    c.step.grad_scale = 0.37f, c.step.seed = 9, c.step.step = step;
    if (master_weights) output(&c, "params", N);
    else in_place(&c, "params", N);
    in_place_float(&c, "masters", master_weights ? N : 0);
    in_place_float(&c, "m", has_m ? N : 0);
    Array* v = in_place_float(&c, "v", has_v ? N : 0);
    Array* grads = input_float(&c, "grads", N);
    for (size_t i = 0; i < v->n; i++) array_set(v, v->start, i, 0.01 + fabs(array_get(v, v->start, i)));
    if (has_m && N > 1) array_set(&c.arrays[2], c.arrays[2].start, 0, 0.0), array_set(grads, grads->start, 0, 0.0);
    c.witness = 0;
    case_prove(&c);

    int weights = master_weights ? 1 : 0;
    double *w = doubles(&c, weights), *m = doubles(&c, 2), *vv = doubles(&c, 3), *g = doubles(&c, 4), unused = 0.0;
    Result new_w = result(N), new_m = result(has_m ? N : 0), new_v = result(has_v ? N : 0);
    for (size_t i = 0; i < N; i++) {
        double sizes[3] = {0.0, 0.0, 0.0};
        reference_optimizer(&w[i], m ? &m[i] : &unused, vv ? &vv[i] : &unused, sizes, g[i], &c.step);
        result_add(&new_w, i, w[i], sizes[0]);
        if (!master_weights && !FLOATX_IS_FLOAT) new_w.rounded[i] = fabs(w[i]);  // a whole place instead of half of one
        if (has_m) result_add(&new_m, i, m[i], sizes[1]);
        if (has_v) result_add(&new_v, i, vv[i], sizes[2]);
    }
    if (master_weights) case_compare(&c, 1, &new_w, 1);
    case_compare(&c, 0, &new_w, 1);
    if (has_m) case_compare(&c, 2, &new_m, 1);
    if (has_v) case_compare(&c, 3, &new_v, 1);

    // Parameters are the roundings of the float result; in parts, with their positions, the bits are the same.
    bool exact = true;
    float* exact_w = (float*)hold(N * sizeof(float));
    for (size_t i = 0; i < N; i++) exact_w[i] = (float)array_get(&c.arrays[weights], c.arrays[weights].start, i);
    floatX* parts = (floatX*)hold(N * sizeof(floatX));
    memcpy(parts, c.arrays[0].start, N * sizeof(floatX));
    float *m_parts = (float*)hold(N * sizeof(float)), *v_parts = (float*)hold(N * sizeof(float));
    for (int whole = 1; whole >= 0; whole--) {
        if (has_m) memcpy(m_parts, c.arrays[2].start, N * sizeof(float));
        if (has_v) memcpy(v_parts, c.arrays[3].start, N * sizeof(float));
        size_t length = whole ? N : N / 2 + 1;
        for (size_t i = 0; i < N; i += length)
            optimizer_update(parts + i, whole ? exact_w : master_weights ? exact_w + i : NULL, m_parts + i, v_parts + i,
                             f(&c, 4) + i, &c.step, 1001 + i, min_size(length, N - i), NULL);
        for (size_t i = 0; whole && i < N; i++) {
            uint32_t random = random_bits(9, RANDOM_ROUNDING, step, 1001 + i);
            floatX p = master_weights ? floatX_of(exact_w[i]) : floatX_of_stochastic(exact_w[i], random);
            exact = exact && memcmp(&p, &x(&c, 0)[i], sizeof p) == 0;
            exact_w[i] = (float)array_get(&c.arrays[weights], c.arrays[weights].start, i);
            parts[i] = ((floatX*)c.arrays[0].start)[i];
        }
    }
    bool same = memcmp(parts, x(&c, 0), N * sizeof(floatX)) == 0;
    check(exact && same, "%-28s %-30s %s  params = rounded result: %s; in parts: %s", c.name, c.shape, FLOATX_NAME,
          exact ? "exact" : "NO", same ? "same bits" : "DIFFERENT");
    release();
}

// ------------------------------------------------------------------------------------------------
// Elementary functions, random numbers and the hash

// e^x over all floats, in units of the last place; steps of 509 patterns visit every exponent 16,000 times.
static void test_exp(void) {
    double worst = 0.0;
    bool limits = true;
    for (uint64_t pattern = 0; pattern <= 0xffffffffull; pattern += 509) {
        float in = float_from_bits((uint32_t)pattern), got = exp_fast(in);
        if (in != in) limits = limits && got != got;
        else if (in < -87.3f) limits = limits && got == 0.0f;
        else if (in > 88.73f) limits = limits && got == INFINITY;
        else if (in <= 88.3f) {
            double want = exp((double)in);
            double error = fabs((double)got - want) / ldexp(1.0, (int)floor(log2(want)) - 23);
            if (!(error <= worst)) worst = error;
        } else limits = limits && got > 2e38f;
    }
    limits = limits && exp_fast(INFINITY) == INFINITY && exp_fast(-INFINITY) == 0.0f && exp_fast(0.0f) == 1.0f;
    limits = limits && exp_fast(-0.0f) == 1.0f && isnan(exp_fast(NAN)) && isnan(sigmoid(NAN));
    limits = limits && sigmoid(INFINITY) == 1.0f && sigmoid(-INFINITY) == 0.0f;
    check(worst <= 2.0, "%-28s %-30s err %.2f <= 2 units in the last place", "exp_fast", "-87.3 to 88.3", worst);
    check(limits, "%-28s %-30s", "exp_fast, sigmoid", "0, infinity and NaN beyond");
}

static void test_random(void) {
    // The known answers that the authors publish: counter and key all zeros, all ones, and the digits of pi.
    static const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    static const uint32_t pi[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    Random4 a = random4(0, (RandomPurpose)0, 0, 0), b = random4(~0ull, (RandomPurpose)0xffffffffu, 0xffffffffu, ~0ull);
    Random4 d = random4(0x299f31d0a4093822ull, (RandomPurpose)0x03707344, 0x13198a2e, 0x85a308d3243f6a88ull);
    bool known = memcmp(&a, zeros, 16) == 0 && memcmp(&b, ones, 16) == 0 && memcmp(&d, pi, 16) == 0;
    check(known, "%-28s three known answers", "random4");
    bool lanes = true;
    for (uint64_t i = 0; i < 64; i++)
        lanes = lanes && random_bits(3, RANDOM_TEST, 4, i) == random4(3, RANDOM_TEST, 4, i / 4).bits[i % 4];
    check(lanes, "%-28s is lane index %% 4 of random4", "random_bits");

    const uint64_t n = 1000000;
    double uniform_mean = 0.0, uniform_lag = 0.0, last = 0.0, sums[4] = {0.0, 0.0, 0.0, 0.0}, lag = 0.0, before = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        double u = (double)random_uniform(21, RANDOM_TEST, 0, i) - 0.5;
        double z = (double)random_normal(22, RANDOM_TEST, 0, i), power = 1.0;
        uniform_mean += u;
        uniform_lag += u * last;
        lag += z * before;
        last = u;
        before = z;
        for (int k = 0; k < 4; k++) sums[k] += power *= z;
    }
    double N = (double)n, root = sqrt(N);
    check(fabs(uniform_mean / N) <= 4.0 / sqrt(12.0) / root, "%-28s mean - 1/2: %.1e <= %.1e", "random_uniform",
          fabs(uniform_mean / N), 4.0 / sqrt(12.0) / root);
    check(fabs(12.0 * uniform_lag / N) <= 4.0 / root, "%-28s correlation of neighbours: %.1e <= %.1e", "random_uniform",
          fabs(12.0 * uniform_lag / N), 4.0 / root);
    const double expected[4] = {0.0, 1.0, 0.0, 3.0}, variance[4] = {1.0, 2.0, 15.0, 96.0};  // of the power's estimate
    for (int k = 0; k < 4; k++)
        check(fabs(sums[k] / N - expected[k]) <= 4.0 * sqrt(variance[k]) / root, "%-28s moment %d: |%.5f - %g| <= %.1e",
              "random_normal", k + 1, sums[k] / N, expected[k], 4.0 * sqrt(variance[k]) / root);
    check(fabs(lag / N) <= 4.0 / root, "%-28s correlation of neighbours: %.1e <= %.1e", "random_normal",
          fabs(lag / N), 4.0 / root);
}

static void test_hash(void) {
    const char* text = "Nobody inspects the spammish repetition";
    check(hash_bytes("", 0) == 0xEF46DB3751D8E999ull && hash_bytes("abc", 3) == 0x44BC2CF5AD770999ull
          && hash_bytes(text, strlen(text)) == 0xFBCEA83C8A378BF1ull, "%-28s three known answers", "hash_bytes");
    unsigned char bytes[257];
    bool same = true;
    for (int i = 0; i < 257; i++) bytes[i] = (unsigned char)(i * 151 + 7);
    for (size_t first = 0; first <= 257; first++) {
        for (size_t second = first; second <= 257; second += 13) {
            Hash h = hash_begin(0);
            hash_add(&h, bytes, first);
            hash_add(&h, bytes + first, second - first);
            hash_add(&h, bytes + second, 257 - second);
            same = same && hash_end(&h) == hash_bytes(bytes, 257);
        }
    }
    check(same, "%-28s in three parts: the same", "hash_add");
}

// ------------------------------------------------------------------------------------------------
// Conversions of the 16-bit types, against a table of all numbers

#if FLOATX_IS_FLOAT
static void test_conversions(void) {
    bool same = true;
    for (uint64_t pattern = 0; pattern <= 0xffffffffull; pattern += 65521) {
        float in = float_from_bits((uint32_t)pattern), out = float_of(floatX_of(in));
        float drawn = floatX_of_stochastic(in, ~0u);
        same = same && (in != in ? out != out && drawn != drawn : bits_from_float(in) == bits_from_float(out) && in == drawn);
    }
    check(same, "%-28s %s are the identity", "conversions", FLOATX_NAME);
}
#else

#ifdef PRECISION_BF16
enum { MANTISSA = 7, BIAS = 127, INFINITE = 0x7f80 };
#else
enum { MANTISSA = 10, BIAS = 15, INFINITE = 0x7c00 };
#endif
static double table[INFINITE + 1];  // by pattern: what the bits 0, exponent, mantissa stand for; last, 2^(maximum + 1)

static void table_make(void) {
    for (int bits = 0; bits <= INFINITE; bits++) {
        int exponent = bits >> MANTISSA, mantissa = bits & ((1 << MANTISSA) - 1);
        table[bits] = exponent == 0 ? ldexp(mantissa, 1 - BIAS - MANTISSA)
                                    : ldexp(mantissa + (1 << MANTISSA), exponent - BIAS - MANTISSA);
    }
}

// The largest pattern whose number is not above |x|.
static int table_below(double magnitude) {
    int low = 0, high = INFINITE;
    if (magnitude >= table[INFINITE]) return INFINITE;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table[middle] <= magnitude) low = middle;
        else high = middle;
    }
    return low;
}

static bool nearest_agrees(float in) {
    uint16_t got = floatX_of(in).bits, sign = (uint16_t)(bits_from_float(in) >> 31 << 15);
    if (in != in) return (got & 0x7fff) > INFINITE && (got & 0x8000) == sign;
    double magnitude = fabs((double)in);
    int want = table_below(magnitude);
    if (want < INFINITE) {
        double down = magnitude - table[want], up = table[want + 1] - magnitude;
        if (up < down || (up == down && (want & 1))) want++;
    }
    return got == (sign | want);
}

// All draws are neighbours of x, and their mean is x within 4 sigma.
// Independent: the correlation of an element's rounding with that of the one to four places before it has deviation
// 1 / sqrt(n) when there is none.
static void test_stochastic(float in) {
    enum { LAGS = 4 };
    const uint64_t n = 1000000;
    double sum = 0.0, magnitude = fabs((double)in), together[LAGS] = {0};
    int low = table_below(magnitude);
    bool neighbours = true;
    double unit = table[low + 1] - table[low], fraction = (magnitude - table[low]) / unit, before[LAGS] = {0};
    for (uint64_t i = 0; i < n; i++) {
        double drawn = (double)float_of(floatX_of_stochastic(in, random_bits(31, RANDOM_TEST, bits_from_float(in), i)));
        bool up = fabs(drawn) == table[low + 1] && magnitude > table[low];
        neighbours = neighbours && (up || fabs(drawn) == table[low]);
        neighbours = neighbours && (drawn == 0.0 || (drawn < 0.0) == (in < 0.0f));
        sum += drawn - (double)in;
        double deviation = (up ? 1.0 : 0.0) - fraction;
        for (int lag = LAGS - 1; lag >= 0; lag--) {
            together[lag] += deviation * before[lag];
            before[lag] = lag > 0 ? before[lag - 1] : deviation;
        }
    }
    double variance = fraction * (1.0 - fraction), correlation = 0.0;
    double bound = 4.0 * unit * sqrt(variance / (double)n), error = fabs(sum / (double)n);
    for (int lag = 0; lag < LAGS && variance > 0.0; lag++)
        correlation = fmax(correlation, fabs(together[lag]) / variance / sqrt((double)n));
    check(correlation <= 4.0, "%-28s x = %-26.9g %s  neighbours' roundings correlate by %.1f deviations <= 4",
          "floatX_of_stochastic", (double)in, FLOATX_NAME, correlation);
    check(neighbours && error <= bound, "%-28s x = %-26.9g %s  bias %.1e <= %.1e, draws are %s", "floatX_of_stochastic",
          (double)in, FLOATX_NAME, error, bound, neighbours ? "neighbours" : "NOT NEIGHBOURS");
}

static void test_conversions(void) {
    size_t wrong_value = 0, wrong_trip = 0, moved = 0, wrong_nearest = 0;
    table_make();
    for (uint32_t bits = 0; bits < 65536; bits++) {
        floatX in, out;
        in.bits = (uint16_t)bits;
        float value = float_of(in);
        out = floatX_of(value);
        int rest = bits & 0x7fff;
        if (rest > INFINITE) {
            wrong_value += !isnan(value);
            wrong_trip += (out.bits & 0x7fff) <= INFINITE;
        } else {
            double want = rest == INFINITE ? (double)INFINITY : table[rest];
            wrong_value += (double)value != (bits & 0x8000 ? -want : want) || (bits_from_float(value) >> 31) != bits >> 15;
            wrong_trip += out.bits != in.bits;
        }
        for (uint32_t i = 0; i < 8; i++) {
            float drawn = float_of(floatX_of_stochastic(value, i < 2 ? 0u - i : random_bits(32, RANDOM_TEST, bits, i)));
            moved += rest > INFINITE ? !isnan(drawn) : bits_from_float(drawn) != bits_from_float(value);
        }
    }
    check(wrong_value == 0, "%-28s 65536 patterns %s, wrong: %zu", "float_of", FLOATX_NAME, wrong_value);
    check(wrong_trip == 0, "%-28s 65536 patterns %s there and back, wrong: %zu", "floatX_of", FLOATX_NAME, wrong_trip);
    check(moved == 0, "%-28s 65536 patterns %s must not move, moved: %zu", "floatX_of_stochastic", FLOATX_NAME, moved);

    size_t tried = 0;
    for (uint64_t i = 0; i < 1000000; i++, tried += 2) {
        uint32_t random = random_bits(33, RANDOM_TEST, 0, i);
        wrong_nearest += !nearest_agrees(float_from_bits(random));  // any float
        int exponent = (int)(random % (2 * BIAS + 30)) - BIAS - MANTISSA - 5;
        float near = (float)ldexp(1.0 + (double)(random >> 9) * 0x1p-23, exponent);
        wrong_nearest += !nearest_agrees(random & 256 ? -near : near);  // the type's own range
    }
    for (int bits = 0; bits < INFINITE; bits++) {  // each number, each midpoint, and the floats on both sides of it
        float middle = (float)(0.5 * (table[bits] + table[bits + 1]));
        uint32_t b = bits_from_float(middle);
        wrong_nearest += !nearest_agrees(middle) + !nearest_agrees(-middle) + !nearest_agrees(float_from_bits(b + 1));
        wrong_nearest += !nearest_agrees(float_from_bits(b - (b > 0))) + !nearest_agrees((float)table[bits]);
        tried += 5;
    }
    const uint32_t edges[] = {0, 1, 2, 0x007fffff, 0x00800000, 0x7f7fffff, 0x7f800000,
                              0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++, tried += 2)
        wrong_nearest += !nearest_agrees(float_from_bits(edges[i]))
                       + !nearest_agrees(float_from_bits(edges[i] | 0x80000000u));
    check(wrong_nearest == 0, "%-28s %zu floats to the nearest %s, ties to even, wrong: %zu", "floatX_of", tried,
          FLOATX_NAME, wrong_nearest);

    const float values[] = {1.001f, -1.001f, 3.14159265f, -1234.56f, 0.3e-6f, -0.7e-7f, 5.1e-5f, 0.99999f, 2.0000002f,
                            65503.0f, 0.1f, -1.5f, 0.0f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) test_stochastic(values[i]);
}
#endif

// Copies of any length, from and to any address: all bytes, and none next to them. Those of 256 KiB and more are copied
// in pieces, which go past the caches.
static void test_copies(void) {
    enum { PIECE = 1 << 18, ROOM = 4 * PIECE };
    const size_t lengths[] = {0, 1, 15, 17, 4095, PIECE - 1, PIECE, PIECE + 1, PIECE + 31, 2 * PIECE - 7, 3 * PIECE + 999};
    unsigned char *from = (unsigned char*)hold(ROOM), *to = (unsigned char*)hold(ROOM);
    unsigned char* expected = (unsigned char*)hold(ROOM);
    size_t wrong = 0, copies = 0;
    for (size_t i = 0; i < ROOM; i++) from[i] = (unsigned char)(random_bits(5, RANDOM_TEST, 1, i) >> 8);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (size_t shift = 0; shift < 8; shift++, copies += 2) {
            size_t source = 64 + 5 * shift, target = 64 + 3 * shift, bytes = lengths[i];
            for (int direction = 0; direction < 2; direction++) {
                memset(to, 0xa5, ROOM);
                memset(expected, 0xa5, ROOM);
                memcpy(expected + target, from + source, bytes);
                if (direction) upload(to + target, from + source, bytes, NULL);
                else download(to + target, from + source, bytes, NULL);
                wrong += memcmp(to, expected, ROOM) != 0;
            }
        }
    }
    check(wrong == 0, "%-28s %zu copies of 0 to %zu bytes, odd addresses, wrong: %zu", "upload, download", copies,
          lengths[sizeof lengths / sizeof lengths[0] - 1], wrong);
    release();
}

int main(void) {
    test_exp();
    test_random();
    test_hash();
    test_conversions();

    for (int positions = 0; positions < 2; positions++) {
        test_embedding(1, 1, 1, 3, positions, 0);
        test_embedding(2, 5, 7, 4, positions, 3);
        test_embedding(3, 33, 36, 20, positions, 0);
        test_embedding(2, 65, 129, 50, positions, 7);
        test_embedding(1, 130, 768, 257, positions, 1);
    }
    for (int kind = 0; kind < 4; kind++) {
        bool layernorm = kind / 2, branch = kind % 2;
        test_norm(layernorm, branch, 1, 1, 1.0);
        test_norm(layernorm, branch, 5, 7, 1.0);
        test_norm(layernorm, branch, 33, 36, 1.0);
        test_norm(layernorm, branch, 65, 129, 100.0);
        test_norm(layernorm, branch, 130, 768, 0.01);
    }
    for (int bias = 0; bias < 2; bias++) {
        test_matmul(1, 1, 1, bias);
        test_matmul(5, 7, 3, bias);
        test_matmul(33, 1, 36, bias);
        test_matmul(2, 257, 129, bias);
        test_matmul(65, 36, 1, bias);
        test_matmul(130, 129, 768, bias);
    }
    test_rope(1, 1, 1, 1, 2, 0, 10000.0f);
    test_rope(2, 5, 4, 2, 6, 0, 10000.0f);
    test_rope(2, 33, 4, 1, 10, 5, 10000.0f);
    test_rope(1, 65, 3, 3, 12, 100, 500000.0f);
    test_rope(1, 130, 2, 2, 256, 3000, 500000.0f);

    test_attention(1, 1, 1, 1, 1, 1.0);
    test_attention(2, 3, 2, 1, 2, 1.0);
    test_attention(1, 33, 4, 2, 2, 1.0);
    test_attention(1, 9, 4, 1, 10, 1.0);
    test_attention(2, 33, 6, 2, 10, 1.0);
    test_attention(1, 32, 4, 4, 12, 1.0);
    test_attention(1, 65, 4, 2, 12, 1.0);
    test_attention(1, 64, 2, 2, 32, 1.0);
    test_attention(1, 65, 2, 1, 80, 3.0);
    test_attention(2, 130, 2, 1, 64, 1.0);
    test_attention(1, 130, 2, 2, 128, 0.1);
    test_attention(1, 65, 2, 1, 256, 1.0);
    test_attention(1, 150, 3, 3, 80, 4.0);  // scores up to about 80
    test_attention(1, 129, 1, 1, 1, 10.0);  // scores up to about 500

    for (int gelu = 0; gelu < 2; gelu++) {
        test_nonlinearity(gelu, 1, 1, 1.0);
        test_nonlinearity(gelu, 5, 7, 1.0);
        test_nonlinearity(gelu, 33, 129, 3.0);
        test_nonlinearity(gelu, 65, 768, 30.0);
        test_nonlinearity(gelu, 7, 36, gelu || !FP16 ? 1e4 : 100.0);  // FP16 ends at 65504
    }
    test_dropout(1, 0, 0.1f);
    test_dropout(7, 3, 0.0f);
    test_dropout(1000, 1, 0.5f);
    test_dropout(99999, 6, 0.1f);
    test_dropout(99999, ((size_t)1 << 40) + 1, 0.9f);

    test_classifier(1, 1, 1, 1.0, 0, 1.0f);
    test_classifier(5, 7, 8, 1.0, 3, 0.25f);
    test_classifier(33, 257, 384, 1.0, 4, 1.0f / 33);
    test_classifier(65, 257, 384, 3.0, 0, 1024.0f / 65);
    test_classifier(9, 257, 384, 20.0, 4, 1.0f);  // to +- 80
    test_classifier(29, 257, 384, 2500.0, 3, 1.0f);  // to +- 1e4
    test_classifier(4, 257, 384, 1.0, 1, 1.0f);  // no targets at all

    test_vectors(1);
    test_vectors(33);
    test_vectors(255);
    test_vectors(70001);
    test_exact();
    test_checksum();
    test_copies();
    for (int kind = 0; kind < 4; kind++) {
        for (int master_weights = 0; master_weights < 2; master_weights++) {
            test_optimizer((OptimizerKind)kind, master_weights, 1, 1);
            test_optimizer((OptimizerKind)kind, master_weights, 5001, 1);
            test_optimizer((OptimizerKind)kind, master_weights, 5001, 1000);
        }
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
