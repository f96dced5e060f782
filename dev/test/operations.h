// operations.h: a test of every operation of the model, for whichever backend includes it.
//
// test_kernels.c includes it for the operations of kernels_cpu.h, which must agree with the double references of
// reference.h; test_cuda.cu for those of kernels.cuh, which must agree with the operations of kernels_cpu.h. An output
// is right if for each element
//
//     |output - expected| <= factor (epsilon (|expected| + rounded) + 4 sqrt(length) unit (size + |start|) + tiny)
//
// epsilon   FLOATX_EPSILON if the element is stored as floatX, otherwise 0 (for `rounded`: always FLOATX_EPSILON)
// length    of the longest sum behind the element: rounding errors of random sign grow with its square root
// unit      2^-24, the rounding of a float; 2^-53 for sums of doubles
// size      the sum of the absolute values of the terms; `rounded` the same for what is stored on the way (Result)
// start     what an output that is added to held before
// tiny      2^-125, where floats lose places and exp_fast is 0; for FP16 half of the smallest number, 2^-25
// factor    1 against the reference; 2 between backends, each of which may be off by that much
//
// The gradients of the references are compared with finite differences of their forwards, wherever there are few
// enough inputs.
//
// A worked example, of an operation out = in^2 with the loops reference_square and reference_square_backward in
// reference.h:
//
//     OPERATION(square_forward, x(c, 0), x(c, 1), s->N)            calls it: floatX arrays 0 and 1 of case c, N of s
//     OPERATION(square_backward, x(c, 0), x(c, 1), x(c, 2), s->N)
//     static void test_square(size_t N) {
//         if (!wanted("square_forward square_backward")) return;   the program's --only
//         Shape s = {.N = N};
//         Case c = case_begin(operation_square_forward, &s, "N=%zu", N);
//         Result* out = output(&c, "out", OUTPUT, STORED, N, 1);   array 0: overwritten, floatX, N elements, no sums
//         double* in[1] = {input(&c, "in", N, 2.0)};               array 1: random floatX, std 2; in[0]: as doubles
//         reference_square(out, in, &s);                           fills in what array 0 should hold
//         case_prove(&c);                                          runs it in several ways, compares, prints
//         Case b = case_begin(operation_square_backward, &s, "%s", c.shape);
//         Result* din = output(&b, "din", OUTPUT, STORED, N, 1);
//         double* dout = input(&b, "dout", N, 1.0);
//         input_again(&b, &c.arrays[1]);                           array 2: the forward's input
//         reference_gradient(&b, &din, 1, reference_square, reference_square_backward, dout, N, in);
//         case_prove(&b);
//         release();                                               frees the memory of both cases
//     }
//
// case_prove also makes one element of each input NaN, then infinite, which some output must show. If not every element
// is used, newest(&c)->live = i chooses the one of the array made last; c.witness = 0 says that array 0 must show it.
//
// Before it is included, define: the kernels; ON_CUDA, 0 or 1; CPU(operation), the name of the CPU's operation;
// RUN(operation, arguments...), which calls it on the backend that c->on_cpu selects; SCRATCH(bytes), the scratch bytes
// that CUDA's operation asks for. The includer also defines the functions declared here without a body.

#ifndef LLMTRAIN_OPERATIONS_H
#define LLMTRAIN_OPERATIONS_H

#include "harness.h"
#include "llmtrain/ops/nf4.h"
#include "reference.h"

#ifdef PRECISION_FP16
enum { FP16 = 1 };
#else
enum { FP16 = 0 };
#endif
// The smallest number with full precision: what is stored below it has an absolute error, not a relative one.
#define SMALLEST_NORMAL (FP16 ? 0x1p-14 : 0x1p-126)

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // of structures whose remaining members are zero

// ------------------------------------------------------------------------------------------------
// Memory: freed together after each test

static void* held[512];
static size_t held_count;

// Zeros; allocated to the exact byte, for the sanitizers.
static void* hold(size_t bytes) {
    void* memory = calloc(1, max_size(bytes, 1));
    need(memory != NULL && held_count < COUNT_OF(held), "memory for a case");
    return held[held_count++] = memory;
}

static void release(void) {
    while (held_count > 0) free(held[--held_count]);
}

static double* hold_doubles(size_t n) { return (double*)hold(n * sizeof(double)); }

static Result* result(size_t n) {
    Result* r = (Result*)hold(sizeof *r);
    r->n = n;
    r->value = hold_doubles(n);
    r->size = hold_doubles(n);
    r->rounded = hold_doubles(n);
    return r;
}

// ------------------------------------------------------------------------------------------------
// Cases: one call of one operation
//
// An array of a case is an input, an output that is overwritten, one that is added to, one that is updated in place, or
// memory that the operation uses and nobody reads. The call takes the arrays in the order in which they were made.

enum { GUARD = 256, ARRAYS = 10 };
typedef enum { INPUT, OUTPUT, ADDED, IN_PLACE, UNREAD } Role;
typedef enum { STORED, FLOAT, DOUBLE, INTEGER, LONG, BYTE, HALF } Kind;  // floatX, ..., int32_t, int64_t, uint8_t, bf16

typedef struct {
    const char* name;
    Role role;
    Kind kind;
    size_t n;
    size_t live;         // an element that must influence the outputs
    void *start, *host;  // before any call; after the CPU's operation, followed by a guard
    void *got, *first;   // after CUDA's operation: its latest run, and the one before
    char* device;        // allocation: guard, elements, guard
    void* elements;      // on the device
    Result* expected;    // what an output should hold, and what its error may scale with; NULL: the CPU's output
    size_t length;       // of the sums behind it, or SAME_BITS: no sums, and CUDA's bits must equal the CPU's
} Array;

static const size_t SAME_BITS = SIZE_MAX;

typedef struct Case {
    const char* name;
    char shape[80];
    void (*call)(const struct Case* c);
    Shape s;
    Array arrays[ARRAYS];
    int count;
    int witness;           // the output that must show a NaN from any input, or -1: any of them
    bool changes;          // outputs are integers: a NaN shows as a change of their bits
    bool silent;           // no NaN shows
    bool on_cpu;
    size_t scratch_bytes;  // that CUDA's operation asks for
    float p, dloss;
    double scale, limit;
    OptimizerStep step;
    TensorShape tensor;
} Case;

typedef struct {
    const char* name;
    void (*call)(const Case* c);
} Operation;

// operation_NAME: calls an operation with arrays of a case c and sizes of its shape s.
#define OPERATION(name, ...) OPERATION_AS(name, #name, name, __VA_ARGS__)
#define OPERATION_AS(id, title, operation, ...) \
    static void call_##id(const Case* c) { \
        const Shape* s = &c->s; \
        RUN(operation, __VA_ARGS__); \
    } \
    static const Operation operation_##id = {title, call_##id};

static uint64_t cases;
static const char* only;  // which operations to test: those whose names contain this

static bool wanted(const char* names) { return only == NULL || strstr(names, only) != NULL; }

static void case_prove(Case* c);  // checks everything about a case whose CPU outputs are ready

HARNESS_FORMAT(3, 4)
static Case case_begin(Operation o, const Shape* s, const char* format, ...) {
    Case c = {.name = o.name, .call = o.call, .s = *s, .witness = -1};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c.shape, sizeof c.shape, format, arguments);
    va_end(arguments);
    cases++;
    return c;
}

HARNESS_FORMAT(3, 4)
static void case_check(const Case* c, bool good, const char* format, ...) {
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    check(good, "%-28s %-34s %s %s", c->name, c->shape, FLOATX_NAME, text);
}

static size_t kind_bytes(Kind kind) {
    if (kind == BYTE || kind == HALF) return kind == BYTE ? 1 : 2;
    return kind == STORED ? sizeof(floatX) : kind == DOUBLE || kind == LONG ? sizeof(double) : sizeof(float);
}
static size_t array_bytes(const Array* a) { return a->n * kind_bytes(a->kind); }

static double array_get(const Array* a, const void* data, size_t i) {
    if (a->kind == STORED) return (double)float_of(((const floatX*)data)[i]);
    if (a->kind == FLOAT) return (double)((const float*)data)[i];
    if (a->kind == DOUBLE) return ((const double*)data)[i];
    if (a->kind == LONG) return (double)((const int64_t*)data)[i];
    if (a->kind == BYTE) return (double)((const uint8_t*)data)[i];
    if (a->kind == HALF) return (double)float_from_bf16(((const uint16_t*)data)[i]);
    return (double)((const int32_t*)data)[i];
}

static void array_set(const Array* a, void* data, size_t i, double x) {
    if (a->kind == STORED) ((floatX*)data)[i] = floatX_of((float)x);
    else if (a->kind == FLOAT) ((float*)data)[i] = (float)x;
    else if (a->kind == DOUBLE) ((double*)data)[i] = x;
    else if (a->kind == LONG) ((int64_t*)data)[i] = (int64_t)x;
    else if (a->kind == BYTE) ((uint8_t*)data)[i] = (uint8_t)(int64_t)x;
    else if (a->kind == HALF) ((uint16_t*)data)[i] = bf16_from_float((float)x);
    else ((int32_t*)data)[i] = (int32_t)x;
}

// An array of n normal random numbers times `scale`, rounded to its type; NULL if n = 0.
static Array* array(Case* c, const char* name, Role role, Kind kind, size_t n, double scale) {
    Array* a = &c->arrays[c->count++];
    need(c->count <= ARRAYS, "too many arrays: raise ARRAYS");
    a->name = name;
    a->role = role;
    a->kind = kind;
    a->n = n;
    if (n == 0) return a;
    a->live = n / 2;
    a->start = hold(array_bytes(a));
    a->host = hold(array_bytes(a) + (role == INPUT ? 0 : GUARD));
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        array_set(a, a->start, i, scale * random_normal(1, RANDOM_TEST, cases * ARRAYS + (uint64_t)c->count, i));
    return a;
}

// The elements of an array on the host, as doubles: starting values, or the CPU operation's results. NULL if there are
// none.
static double* doubles(const Array* a, const void* data) {
    if (a->n == 0) return NULL;
    double* r = hold_doubles(a->n);
    #pragma omp parallel for
    for (size_t i = 0; i < a->n; i++) r[i] = array_get(a, data, i);
    return r;
}

// Inputs: random floatX, or copies of another host array. They return the values as doubles.
static double* input(Case* c, const char* name, size_t n, double scale) {
    Array* a = array(c, name, INPUT, STORED, n, scale);
    return doubles(a, a->start);
}
static double* input_from(Case* c, const char* name, Kind kind, size_t n, const void* values) {
    Array* a = array(c, name, INPUT, kind, n, 1);
    if (n > 0) memcpy(a->start, values, array_bytes(a));
    return doubles(a, a->start);
}
static double* input_again(Case* c, const Array* a) { return input_from(c, a->name, a->kind, a->n, a->start); }

// An output. The caller fills the returned result, zeros so far, with the expected values; `length` is of the sums.
static Result* output(Case* c, const char* name, Role role, Kind kind, size_t n, size_t length) {
    Array* a = array(c, name, role, kind, n, 1);
    a->length = length;
    return a->expected = result(n);
}

static Array* newest(Case* c) { return &c->arrays[c->count - 1]; }

// An array's pointer on the backend under test.
static void* at(const Case* c, int array) { return c->on_cpu ? c->arrays[array].host : c->arrays[array].elements; }
static floatX* x(const Case* c, int array) { return (floatX*)at(c, array); }
static float* f(const Case* c, int array) { return (float*)at(c, array); }
static double* d(const Case* c, int array) { return (double*)at(c, array); }
static int32_t* i32(const Case* c, int array) { return (int32_t*)at(c, array); }

// The result of the operation under test.
static const void* made(const Array* a) { return ON_CUDA ? a->got : a->host; }

static bool is_output(const Array* a) { return a->n > 0 && a->role != INPUT && a->role != UNREAD; }

// Resets an array to its starting values; if it is `poison`, its live element becomes `value`.
static void array_fresh(const Array* a, void* data, const Array* poison, double value) {
    if (a->role == OUTPUT || a->role == UNREAD) memset(data, 0xFF, array_bytes(a));  // NaN in every type
    else memcpy(data, a->start, array_bytes(a));
    if (a == poison) array_set(a, data, a->live, value);
}

// Leaves the outputs of the CPU's operation in each array's `host`.
static void case_cpu(Case* c, const Array* poison, double value) {
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n == 0) continue;
        array_fresh(a, a->host, poison, value);
        if (a->role != INPUT) memset((char*)a->host + array_bytes(a), 0xA5, GUARD);
    }
    c->on_cpu = true;
    c->call(c);
    c->on_cpu = false;
}

// Whether a NaN (or, with `infinity` set, any non-finite number) shows: in the witness if there is one; otherwise, for
// a poisoned sum, in that sum; otherwise in an output that is not the poisoned array, unless there is no other.
static bool case_shows(const Case* c, const Array* poison, bool infinity, bool host) {
    int others = 0;
    for (int i = 0; i < c->count; i++) others += is_output(&c->arrays[i]) && &c->arrays[i] != poison;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        const void* data = host ? a->host : a->got;
        if (!is_output(a) || (c->witness >= 0 && i != c->witness)) continue;
        if (c->witness < 0 && (poison->role == ADDED ? a != poison : a == poison && others > 0)) continue;
        if (c->changes && memcmp(data, a->first, array_bytes(a)) != 0) return true;
        for (size_t j = 0; j < a->n; j++) {
            double value = array_get(a, data, j);
            if (infinity ? !isfinite(value) : isnan(value)) return true;
        }
    }
    return false;
}

static bool case_can_poison(const Case* c, const Array* a) {
    bool number = a->kind == STORED || a->kind == FLOAT || a->kind == DOUBLE;
    return !c->silent && number && a->n > 0 && a->role != OUTPUT && a->role != UNREAD;
}

// 8-bit codes, or halves, against the CPU's: equal if both processors fuse multiply-adds. Otherwise one in thousands is
// rounded differently and has the adjacent code.
static void case_compare_codes(const Case* c, const Array* a, const char* where) {
    size_t off = 0, far = 0;
    for (size_t i = 0; i < a->n; i++) {
        int got = a->kind == BYTE ? ((uint8_t*)a->got)[i] : ((uint16_t*)a->got)[i];
        int expected = a->kind == BYTE ? ((uint8_t*)a->host)[i] : ((uint16_t*)a->host)[i];
        off += got != expected;
        far += got > expected + 1 || got < expected - 1;
    }
    case_check(c, far == 0 && off <= a->n / 100, "%-6s %-16s %zu of %zu differ by a place, %zu by more", where, a->name,
               off, a->n, far);
}

// The error of some elements of an output.
typedef struct {
    size_t wrong, first;         // how many are, and the first of them
    size_t worst;                // the element whose error is the largest part of its bound, the first of several
    double part, error, bound;   // of that one: error / bound; -1: there is none yet
} Compared;

// Adds an element, or others; a NaN is the largest error.
static void compared_add(Compared* all, const Compared* more) {
    if (more->wrong > 0 && (all->wrong == 0 || more->first < all->first)) all->first = more->first;
    all->wrong += more->wrong;
    bool equal = more->part == all->part || (isnan(more->part) && isnan(all->part));
    if (equal ? more->worst >= all->worst : isnan(all->part) || more->part < all->part) return;
    all->worst = more->worst;
    all->part = more->part;
    all->error = more->error;
    all->bound = more->bound;
}

// An output against the CPU's, or on the CPU against the reference; prints the element whose error is the largest part
// of its bound.
static void case_compare(const Case* c, const Array* a, const char* where) {
    double tiny = a->kind == STORED && FP16 ? 0x1p-25 : 0x1p-125;
    double unit = a->kind == DOUBLE ? 0x1p-53 : 0x1p-24, epsilon = a->kind == STORED ? (double)FLOATX_EPSILON : 0.0;
    bool bits = ON_CUDA && (a->length == SAME_BITS || a->expected == NULL);
    const Compared none = {0, 0, 0, -1.0, 0.0, 0.0};
    Compared all = none;
    if (a->kind == BYTE || a->kind == HALF) {
        case_compare_codes(c, a, where);
        return;
    }
    size_t bytes = kind_bytes(a->kind), length = a->length == SAME_BITS ? 1 : a->length;
    #pragma omp parallel
    {
        Compared own = none;
        #pragma omp for
        for (size_t i = 0; i < a->n; i++) {
            double start = a->role == ADDED ? array_get(a, a->start, i) : 0.0, got = array_get(a, made(a), i);
            double expected = ON_CUDA ? array_get(a, a->host, i) : start + a->expected->value[i];
            double error = fabs(got - expected), bound = 0.0;
            bool right = bits && memcmp((char*)a->got + i * bytes, (char*)a->host + i * bytes, bytes) == 0;
            if (!bits) {
                bound = epsilon * fabs(expected) + (double)FLOATX_EPSILON * a->expected->rounded[i]
                      + 4.0 * sqrt((double)length) * unit * (a->expected->size[i] + fabs(start)) + tiny;
                bound *= ON_CUDA ? 2.0 : 1.0;
                right = error <= bound;
            }
            const Compared one = {!right, i, i, error / bound, error, bound};
            compared_add(&own, &one);
        }
        #pragma omp critical
        compared_add(&all, &own);
    }
    size_t first = all.first;
    case_check(c, all.wrong == 0, "%-6s %-16s %s", where, a->name,
               bits ? "same bits" : text_of("err %.1e <= %.1e", all.error, all.bound));
    if (all.wrong > 0)
        printf("        %zu of %zu elements are wrong; the first is number %zu: %.9g in place of %.9g\n", all.wrong,
               a->n, first, array_get(a, made(a), first),
               ON_CUDA ? array_get(a, a->host, first) : a->expected->value[first]);
}

// ------------------------------------------------------------------------------------------------
// The reference's gradients against finite differences
//
// d objective / dx = (8 (f(x + h) - f(x - h)) - (f(x + 2h) - f(x - 2h))) / 12h, with an error of order h^4: at h = 1e-4
// only the rounding of f remains, about 1e-16 / h times the sum of its terms.

// The sum of dout * out; *terms, that of their absolute values.
static double objective(ReferenceForward forward, Result* out, const double* dout, double* const* in, const Shape* s,
                        double* terms) {
    double sum = 0.0;
    *terms = 0.0;
    memset(out->value, 0, out->n * sizeof(double));
    forward(out, in, s);
    for (size_t i = 0; i < out->n; i++) {
        sum += dout[i] * out->value[i];
        *terms += fabs(dout[i] * out->value[i]);
    }
    return sum;
}

// din = the gradients of the reference, checked by finite differences if there are few inputs.
static void reference_gradient(const Case* c, Result* const* din, int inputs, ReferenceForward forward,
                               ReferenceBackward backward, const double* dout, size_t outputs, double* const* in) {
    static const double steps[4] = {1.0, -1.0, 2.0, -2.0}, weights[4] = {8.0, -8.0, -1.0, 1.0}, h = 1e-4;
    size_t total = 0;
    double error = 0.0, largest = 0.0, terms = 0.0;
    backward(din, dout, in, &c->s);
    for (int i = 0; i < inputs; i++) if (in[i]) total += din[i]->n;
    if (ON_CUDA || total > 800) return;
    Result* out = result(outputs);
    for (int i = 0; i < inputs; i++) {
        for (size_t j = 0; in[i] && j < din[i]->n; j++) {
            double x = in[i][j], difference = 0.0;
            for (int k = 0; k < 4; k++) {
                in[i][j] = x + steps[k] * h;
                difference += weights[k] / (12.0 * h) * objective(forward, out, dout, in, &c->s, &terms);
            }
            in[i][j] = x;
            double e = fabs(difference - din[i]->value[j]);
            if (!(e <= error)) error = e;
            largest = fmax(largest, fabs(din[i]->value[j]));
        }
    }
    double bound = 1e-9 * largest + 1e-11 * terms + 1e-15;
    check(error <= bound, "%-28s %-34s double  reference against finite differences  err %.1e <= %.1e",
          c->name, c->shape, error, bound);
}

// ------------------------------------------------------------------------------------------------
// Embedding

OPERATION(embedding_forward, x(c, 0), i32(c, 3), i32(c, 4), x(c, 1), x(c, 2), s->N, s->C)
OPERATION(embedding_backward, f(c, 0), f(c, 1), x(c, 2), i32(c, 3), i32(c, 4), s->N, s->C)

typedef enum { TOKENS_RANDOM, TOKENS_EQUAL, TOKENS_ORDERED } Tokens;

static int32_t* make_tokens(Tokens kind, size_t n, size_t V) {
    int32_t* tokens = (int32_t*)hold(n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) {
        size_t random = random_bits(2, RANDOM_TEST, cases, i) % V;
        tokens[i] = (int32_t)(kind == TOKENS_EQUAL ? V - 1 : kind == TOKENS_ORDERED ? (n - i) % V : random);
    }
    return tokens;
}

// Positions of B sequences of T tokens, below first + T: those from `first` on, as of one document per sequence, or any
// that repeat and come in any order, or one for all rows.
typedef enum { POSITIONS_NONE, POSITIONS_ORDERED, POSITIONS_RANDOM, POSITIONS_EQUAL } Positions;

static int32_t* make_positions(Positions kind, size_t B, size_t T, size_t first) {
    int32_t* positions = make_tokens(kind == POSITIONS_EQUAL ? TOKENS_EQUAL : TOKENS_RANDOM, B * T, first + T);
    for (size_t i = 0; i < B * T && kind == POSITIONS_ORDERED; i++) positions[i] = (int32_t)(first + i % T);
    return positions;
}

static void test_embedding(size_t B, size_t T, size_t C, size_t V, Positions order, size_t first_position,
                           Tokens kind) {
    if (!wanted("embedding_forward embedding_backward")) return;
    static const char* const kinds[] = {"", " equal", " ordered"};
    static const char* const orders[] = {" no pos", "", " any", " equal"};
    size_t N = B * T, n = N * C, position_count = order ? (first_position + T) * C : 0;
    int32_t *tokens = make_tokens(kind, N, V), *positions = make_positions(order, B, T, first_position);
    Shape s = {.C = C, .N = N, .V = V, .tokens = tokens, .positions = positions};
    Case c = case_begin(operation_embedding_forward, &s, "B=%zu T=%zu C=%zu V=%zu at %zu%s%s", B, T, C,
                        V, first_position, orders[order], kinds[kind]);
    Result* out = output(&c, "out", OUTPUT, STORED, n, SAME_BITS);
    double* token_weight = input(&c, "token_weight", V * C, 1);
    newest(&c)->live = (size_t)tokens[0] * C;
    double* position_weight = input(&c, "position_weight", position_count, 1);
    newest(&c)->live = (size_t)positions[0] * C;
    input_from(&c, "tokens", INTEGER, N, tokens);
    input_from(&c, "positions", INTEGER, order ? N : 0, positions);
    double* in[2] = {token_weight, position_weight};
    reference_embedding(out, in, &s);
    case_prove(&c);

    Case b = case_begin(operation_embedding_backward, &s, "%s", c.shape);
    b.scratch_bytes = SCRATCH(embedding_backward_scratch_bytes(N, C));
    Result* dtoken_weight = output(&b, "dtoken_weight", ADDED, FLOAT, V * C, N);
    newest(&b)->live = (size_t)tokens[0] * C;
    size_t longest = order == POSITIONS_ORDERED ? B : N;  // the most rows of one position
    Result* din[2] = {dtoken_weight, output(&b, "dposition_weight", ADDED, FLOAT, position_count, longest)};
    newest(&b)->live = (size_t)positions[0] * C;
    double* dout = input(&b, "dout", n, 1);
    input_again(&b, &c.arrays[3]);
    input_again(&b, &c.arrays[4]);
    reference_gradient(&b, din, 2, reference_embedding, reference_embedding_backward, dout, n, in);
    case_prove(&b);
    release();
}

// ------------------------------------------------------------------------------------------------
// Normalization

OPERATION(layernorm_forward, x(c, 0), x(c, 1), f(c, 2), f(c, 3), x(c, 4), x(c, 5), x(c, 6), x(c, 7),
          (float)s->epsilon, s->N, s->C)
OPERATION(rmsnorm_forward, x(c, 0), x(c, 1), f(c, 3), x(c, 4), x(c, 5), x(c, 6), (float)s->epsilon, s->N, s->C)
OPERATION(layernorm_backward, x(c, 0), f(c, 1), f(c, 2), x(c, 3), x(c, 4), x(c, 5), f(c, 6), f(c, 7), s->N, s->C)
OPERATION(rmsnorm_backward, x(c, 0), f(c, 1), x(c, 3), x(c, 4), x(c, 5), f(c, 7), s->N, s->C)

static void test_norm(bool layernorm, bool branch, size_t N, size_t C, double scale) {
    if (!wanted(layernorm ? "layernorm_forward layernorm_backward" : "rmsnorm_forward rmsnorm_backward")) return;
    const size_t n = N * C, means = layernorm ? N : 0, biases = layernorm ? C : 0;
    Shape s = {.C = C, .N = N, .epsilon = (double)1e-5f, .mean = layernorm};
    Case c = case_begin(layernorm ? operation_layernorm_forward : operation_rmsnorm_forward, &s, "N=%zu C=%zu x%.0g%s",
                        N, C, scale, branch ? " branch" : "");
    Result* out = output(&c, "out", OUTPUT, STORED, n, C);
    Result* residual = output(&c, "residual", OUTPUT, STORED, branch ? n : 0, SAME_BITS);
    Result* mean = output(&c, "mean", OUTPUT, FLOAT, means, C);
    Result* rstd = output(&c, "rstd", OUTPUT, FLOAT, N, C);
    double *in[3] = {input(&c, "in", n, scale), NULL, NULL}, *branches = input(&c, "branch", branch ? n : 0, scale);
    const Array* x = &c.arrays[branch ? 1 : 4];
    for (size_t i = 0; branch && i < n; i++) result_add(residual, i, in[0][i] + branches[i], 0.0);
    in[1] = input(&c, "weight", C, 1);
    in[2] = input(&c, "bias", biases, 1);
    c.witness = 0;
    case_cpu(&c, NULL, 0);
    in[0] = doubles(x, x->host);  // the sum is normalized as it was stored
    reference_norm(out, in, &s);
    for (size_t row = 0; row < N; row++) {
        RowStatistics r = reference_statistics(in[0] + row * C, &s);
        if (layernorm) result_add(mean, row, r.mean, r.average);
        result_add(rstd, row, r.rstd, r.rstd * (1.0 + r.average * r.rstd));
    }
    case_prove(&c);

    Case b = case_begin(layernorm ? operation_layernorm_backward : operation_rmsnorm_backward, &s, "%s", c.shape);
    b.scratch_bytes = SCRATCH(layernorm_backward_scratch_bytes(N, C) / (layernorm ? 1 : 2));  // dbias takes half
    Result *dx = output(&b, "dx", ADDED, STORED, n, C), *dweight = output(&b, "dweight", ADDED, FLOAT, C, N + C);
    Result* din[3] = {dx, dweight, output(&b, "dbias", ADDED, FLOAT, biases, N)};
    double* dout = input(&b, "dout", n, 1);
    input_from(&b, "x", STORED, n, x->host);
    input_again(&b, &c.arrays[6]);
    input_from(&b, "mean", FLOAT, means, c.arrays[2].host);
    input_from(&b, "rstd", FLOAT, N, c.arrays[3].host);
    reference_gradient(&b, din, layernorm ? 3 : 2, reference_norm, reference_norm_backward, dout, n, in);
    case_prove(&b);
    release();
}

// ------------------------------------------------------------------------------------------------
// Matmul

OPERATION(matmul_forward, x(c, 0), x(c, 1), x(c, 2), x(c, 3), s->M, s->N, s->K)
OPERATION(matmul_backward_input, x(c, 0), x(c, 1), x(c, 2), s->M, s->N, s->K)
OPERATION(matmul_backward_weight, f(c, 0), f(c, 1), x(c, 2), x(c, 3), true, s->M, s->N, s->K)
OPERATION(matmul_forward_sums, f(c, 0), x(c, 1), x(c, 2), s->M, s->N, s->K)
OPERATION(matmul_backward_input_sums, f(c, 0), x(c, 1), x(c, 2), s->M, s->N, s->K)
OPERATION_AS(matmul_overwrites, "matmul_backward_weight, not adding", matmul_backward_weight, f(c, 0), f(c, 1), x(c, 2),
             x(c, 3), false, s->M, s->N, s->K)

// The same with a GELU after it or before it, which each backend may fuse: defined by the includer.
static void test_matmul_gelu_forward(const Case* forward, const Result* pre);
static void test_matmul_gelu_backward(const Case* backward, const Result* sum);

// A library may add the bias as one more term.
static void test_matmul(size_t M, size_t N, size_t K, bool bias) {
    if (!wanted("matmul_forward matmul_backward_input matmul_backward_weight matmul_gelu_forward "
                "matmul_gelu_backward_input matmul_forward_sums matmul_backward_input_sums")) return;
    Shape s = {.M = M, .N = N, .K = K};
    Case c = case_begin(operation_matmul_forward, &s, "M=%zu N=%zu K=%zu%s", M, N, K, bias ? " bias" : "");
    c.scratch_bytes = SCRATCH(matmul_scratch_bytes());
    Result* out = output(&c, "out", OUTPUT, STORED, M * N, K + ON_CUDA);
    double *rows = input(&c, "in", M * K, 1), *weight = input(&c, "weight", N * K, 1);
    double* in[3] = {rows, weight, input(&c, "bias", bias ? N : 0, 1)};
    reference_matmul(out, in, &s);
    case_prove(&c);
    if (bias) test_matmul_gelu_forward(&c, out);

    Case b = case_begin(operation_matmul_backward_input, &s, "%s", c.shape);
    Case w = case_begin(operation_matmul_backward_weight, &s, "%s", c.shape);
    Case over = case_begin(operation_matmul_overwrites, &s, "%s", c.shape);
    b.scratch_bytes = w.scratch_bytes = over.scratch_bytes = c.scratch_bytes;
    Result* dinput = output(&b, "din", OUTPUT, STORED, M * K, N);
    double* dout = input(&b, "dout", M * N, 1);
    input_again(&b, &c.arrays[2]);
    Result* dweight = output(&w, "dweight", ADDED, FLOAT, N * K, M + ON_CUDA);
    Result* din[3] = {dinput, dweight, output(&w, "dbias", ADDED, FLOAT, bias ? N : 0, M + ON_CUDA)};
    array(&over, "dweight", OUTPUT, FLOAT, N * K, 1)->expected = dweight;
    newest(&over)->length = M + ON_CUDA;
    array(&over, "dbias", OUTPUT, FLOAT, bias ? N : 0, 1)->expected = din[2];
    newest(&over)->length = M + ON_CUDA;
    for (Case* k = &w; k; k = k == &w ? &over : NULL) {
        input_again(k, &b.arrays[1]);
        input_again(k, &c.arrays[1]);
    }
    reference_gradient(&b, din, 3, reference_matmul, reference_matmul_backward, dout, M * N, in);
    case_prove(&b);
    case_prove(&w);
    case_prove(&over);
    test_matmul_gelu_backward(&b, dinput);
    for (int backward = 0; backward < 2 && !bias; backward++) {  // the same sums, not rounded
        const Case* rounded = backward ? &b : &c;
        Case sums = case_begin(backward ? operation_matmul_backward_input_sums : operation_matmul_forward_sums, &s,
                               "%s", c.shape);
        sums.scratch_bytes = c.scratch_bytes;
        array(&sums, "out", OUTPUT, FLOAT, rounded->arrays[0].n, 1)->expected = rounded->arrays[0].expected;
        newest(&sums)->length = rounded->arrays[0].length;
        for (int i = 1; i <= 2; i++) input_again(&sums, &rounded->arrays[i]);
        case_prove(&sums);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Norms of query and key heads

OPERATION(qk_norm_forward, x(c, 0), x(c, 1), f(c, 2), x(c, 3), x(c, 4), (float)s->epsilon, s->N, s->H, s->K, s->D)
OPERATION(qk_norm_backward, x(c, 0), f(c, 1), f(c, 2), x(c, 3), f(c, 4), x(c, 5), x(c, 6), s->N, s->H, s->K, s->D)

static void test_qk_norm(size_t N, size_t H, size_t K, size_t D, double scale) {
    if (!wanted("qk_norm_forward qk_norm_backward")) return;
    Shape s = {.C = D, .N = N, .H = H, .K = K, .D = D, .epsilon = (double)1e-6f};
    size_t n = N * (H + 2 * K) * D, heads = N * (H + K);
    Case c = case_begin(operation_qk_norm_forward, &s, "N=%zu H=%zu K=%zu D=%zu x%.0g", N, H, K, D, scale);
    Result* out = output(&c, "qkv", IN_PLACE, STORED, n, D);
    Array* qkv = newest(&c);
    for (size_t i = 0; i < n; i++) array_set(qkv, qkv->start, i, scale * array_get(qkv, qkv->start, i));
    double* start = doubles(qkv, qkv->start);
    Result* saved = output(&c, "saved", OUTPUT, STORED, heads * D, SAME_BITS);
    Result* rstd = output(&c, "rstd", OUTPUT, FLOAT, heads, D);
    double *in[3] = {start, input(&c, "q_weight", D, 1), NULL};
    in[2] = input(&c, "k_weight", D, 1);
    c.witness = 0;
    qkv->live = 0;
    reference_qk_norm(out, in, &s);
    for (size_t i = 0; i < heads; i++) {
        const double* x = start + (i / (H + K) * (H + 2 * K) + i % (H + K)) * D;
        RowStatistics r = reference_statistics(x, &s);
        result_add(rstd, i, r.rstd, r.rstd);
        for (size_t d = 0; d < D; d++) result_add(saved, i * D + d, x[d], 0.0);
    }
    case_prove(&c);

    Case b = case_begin(operation_qk_norm_backward, &s, "%s", c.shape);
    b.scratch_bytes = SCRATCH(qk_norm_backward_scratch_bytes(N));
    Result* din[3] = {output(&b, "dqkv", IN_PLACE, STORED, n, D), NULL, NULL};
    Array* dqkv = newest(&b);
    dqkv->live = 0;
    double* dout = doubles(dqkv, dqkv->start);
    din[1] = output(&b, "dq_weight", ADDED, FLOAT, D, N * H + D);
    din[2] = output(&b, "dk_weight", ADDED, FLOAT, D, N * K + D);
    input_from(&b, "saved", STORED, heads * D, c.arrays[1].host);
    input_from(&b, "rstd", FLOAT, heads, c.arrays[2].host);
    input_again(&b, &c.arrays[3]);
    input_again(&b, &c.arrays[4]);
    reference_gradient(&b, din, 3, reference_qk_norm, reference_qk_norm_backward, dout, n, in);
    case_prove(&b);
    release();
}

// ------------------------------------------------------------------------------------------------
// RoPE

OPERATION(rope_forward, x(c, 0), f(c, 1), i32(c, 2), s->N, s->H, s->K, s->D)
OPERATION(rope_backward, x(c, 0), f(c, 1), i32(c, 2), s->N, s->H, s->K, s->D)

static void test_rope(size_t B, size_t T, size_t H, size_t K, size_t D, size_t first_position, float theta) {
    if (!wanted("rope_forward rope_backward")) return;
    Shape s = {.N = B * T, .H = H, .K = K, .D = D, .theta = (double)theta};
    size_t n = s.N * (H + 2 * K) * D, context = first_position + T;
    float* table = (float*)hold(context * D * sizeof(float));
    const RopeOptions rope = {.theta = (double)theta};
    rope_table(table, &rope, context, D);
    double error = 0.0, *in[1] = {NULL};
    for (size_t i = 0; i < context * D / 2; i++) {
        double angle = (double)(i / (D / 2)) * pow((double)theta, -2.0 * (double)(i % (D / 2)) / (double)D);
        error = fmax(error, fmax(fabs((double)table[2 * i] - cos(angle)), fabs((double)table[2 * i + 1] - sin(angle))));
    }
    check(error <= 0x1p-25, "%-28s positions=%zu D=%zu float  err %.1e <= %.1e", "rope_table", context, D, error,
          0x1p-25);
    for (int way = 0; way < 4; way++) {
        bool backward = way % 2, any = way / 2;
        int32_t* positions = make_positions(any ? POSITIONS_RANDOM : POSITIONS_ORDERED, B, T, first_position);
        s.positions = positions;
        Case c = case_begin(backward ? operation_rope_backward : operation_rope_forward, &s,
                            "B=%zu T=%zu H=%zu K=%zu D=%zu at %zu%s", B, T, H, K, D, first_position,
                            any ? " any" : "");
        Result* out = output(&c, "qkv", IN_PLACE, STORED, n, 1);
        Array* qkv = newest(&c);
        double* start = doubles(qkv, qkv->start);
        qkv->live = 0;
        input_from(&c, "table", FLOAT, context * D, table);
        newest(&c)->live = (size_t)positions[0] * D;
        input_from(&c, "positions", INTEGER, s.N, positions);
        if (backward) {
            reference_gradient(&c, &out, 1, reference_rope, reference_rope_backward, start, n, in);
        } else {
            in[0] = start;
            reference_rope(out, in, &s);
        }
        case_prove(&c);
        bool values = true;
        for (size_t row = 0; row < s.N; row++) {
            size_t first = (row * (H + 2 * K) + H + K) * D;
            const floatX *got = (const floatX*)made(qkv) + first, *before = (floatX*)qkv->start + first;
            values = values && memcmp(got, before, K * D * sizeof(floatX)) == 0;
        }
        case_check(&c, values, "value heads stay as they are");
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Parts of heads

OPERATION(heads_split, x(c, 0), x(c, 1), s->parts, s->N, s->H, s->K, s->D)
OPERATION(heads_join, x(c, 0), x(c, 1), s->parts, s->N, s->H, s->K, s->D)

// Whether an output has exactly the expected elements.
static bool heads_equal(const Array* out) {
    bool same = true;
    for (size_t i = 0; i < out->n; i++) same &= array_get(out, made(out), i) == out->expected->value[i];
    return same;
}

// Normal numbers, which repeat only after a prime number of elements. Eight times each is finite in FP16.
static double* heads_numbers(Case* c, size_t n) {
    Array* in = array(c, "in", INPUT, STORED, n, 1);
    for (size_t i = 0; i < n; i++) {
        uint16_t bits = (uint16_t)(0x400 + i % 26597);
        double number = FP16 ? (double)float_from_f16(bits) : (double)float_from_bf16(bits);
        array_set(in, in->start, i, FLOATX_IS_FLOAT ? (double)i : number);
    }
    return doubles(in, in->start);
}

static void test_heads(size_t parts, size_t N, size_t H, size_t K, size_t D) {
    if (!wanted("heads_split heads_join")) return;
    Shape s = {.N = N, .H = H, .K = K, .D = D, .parts = parts};
    size_t n = N * (H + 2 * K) * D;
    Case c = case_begin(operation_heads_split, &s, "parts=%zu N=%zu H=%zu K=%zu D=%zu", parts, N, H, K, D);
    Result* out = output(&c, "out", OUTPUT, STORED, n, SAME_BITS);
    double* rows = heads_numbers(&c, n);
    reference_heads(out, &rows, &s);
    case_prove(&c);
    case_check(&c, heads_equal(&c.arrays[0]), "every element is in its place");

    Case b = case_begin(operation_heads_join, &s, "%s", c.shape);
    Result* joined = output(&b, "out", OUTPUT, STORED, n, SAME_BITS);
    input_from(&b, "in", STORED, n, c.arrays[0].host);
    for (size_t i = 0; i < n; i++) result_add(joined, i, rows[i], 0.0);
    case_prove(&b);
    case_check(&b, heads_equal(&b.arrays[0]), "undoes heads_split");
    release();
}

OPERATION(heads_repeat, x(c, 0), x(c, 1), s->copies, s->N, s->H, s->K, s->D)
OPERATION(heads_sum, x(c, 0), x(c, 1), s->copies, s->N, s->H, s->K, s->D)

static void test_heads_copies(size_t copies, size_t N, size_t H, size_t K, size_t D) {
    if (!wanted("heads_repeat heads_sum")) return;
    Shape s = {.N = N, .H = H, .K = K, .D = D, .copies = copies};
    size_t few = N * (H + 2 * K) * D, row = (H + 2 * K * copies) * D, many = N * row, wrong = 0;
    Case c = case_begin(operation_heads_repeat, &s, "copies=%zu N=%zu H=%zu K=%zu D=%zu", copies, N, H, K, D);
    Result* out = output(&c, "out", OUTPUT, STORED, many, SAME_BITS);
    double* in = heads_numbers(&c, few);
    reference_heads_repeat(out, &in, &s);
    case_prove(&c);
    case_check(&c, heads_equal(&c.arrays[0]), "every element is in its place");

    Case b = case_begin(operation_heads_sum, &s, "%s", c.shape);
    Result* sum = output(&b, "out", OUTPUT, STORED, few, ON_CUDA ? SAME_BITS : copies);
    const Array* a = array(&b, "in", INPUT, STORED, many, 1);
    for (size_t i = 0; i < many; i += D) array_set(a, a->start, i, -0.0);  // kept in a query; as a sum it is 0
    double* dout = doubles(a, a->start);
    reference_gradient(&b, &sum, 1, reference_heads_repeat, reference_heads_sum, dout, many, &in);
    case_prove(&b);
    float* sums = (float*)hold(few * sizeof(float));
    for (size_t i = 0; i < many; i++) {
        float* to = &sums[reference_head_copied(i, &s)];
        *to = i % row < H * D ? (float)dout[i] : *to + (float)dout[i];
    }
    for (size_t i = 0; i < few; i++) {
        floatX rounded = floatX_of(sums[i]);
        wrong += memcmp(&rounded, (const floatX*)made(&b.arrays[0]) + i, sizeof rounded) != 0;
    }
    case_check(&b, wrong == 0, "the bits of sums in order, rounded once; others: %zu", wrong);

    if ((copies & (copies - 1)) == 0) {
        Case u = case_begin(operation_heads_sum, &s, "%s", c.shape);
        Result* times = output(&u, "out", OUTPUT, STORED, few, SAME_BITS);
        input_from(&u, "in", STORED, many, c.arrays[0].host);
        for (size_t i = 0; i < few; i++) {
            bool query = i / D % (H + 2 * K) < H;
            result_add(times, i, query ? in[i] : (double)copies * in[i], 0.0);
        }
        case_prove(&u);
        case_check(&u, heads_equal(&u.arrays[0]), "of heads_repeat: %zu times each key and value", copies);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Layers that ranks share: the operations of all `parts` ranks, one after the other, as one case

OPERATION(columns_copy, x(c, 0), s->C, x(c, 1), s->K, s->M, s->N)
OPERATION(leaves_sum, x(c, 0), f(c, 1), x(c, 2), s->parts, s->M, s->C)

// A block of `columns` columns out of rows of in_stride elements into rows of out_stride: what is between stays.
static void test_columns(size_t M, size_t columns, size_t out_stride, size_t in_stride) {
    if (!wanted("columns_copy")) return;
    Shape s = {.C = out_stride, .M = M, .N = columns, .K = in_stride};
    Case c = case_begin(operation_columns_copy, &s, "M=%zu columns=%zu %zu->%zu", M, columns, in_stride, out_stride);
    size_t n = (M - 1) * out_stride + columns;
    Result* out = output(&c, "out", IN_PLACE, STORED, n, SAME_BITS);
    double *start = doubles(&c.arrays[0], c.arrays[0].start), *in = input(&c, "in", (M - 1) * in_stride + columns, 1);
    newest(&c)->live = 0;
    c.arrays[0].live = 0;
    c.silent = out_stride == columns;  // all of out is overwritten
    for (size_t i = 0; i < n; i++) {
        bool copied = i % out_stride < columns;
        result_add(out, i, copied ? in[i / out_stride * in_stride + i % out_stride] : start[i], 0.0);
    }
    if (!c.silent) c.arrays[0].live = columns;
    case_prove(&c);
    case_check(&c, heads_equal(&c.arrays[0]), "every element is in its place");
    release();
}

OPERATION(columns_add, x(c, 0), x(c, 1), c->p, s->K, s->M, s->N, s->C)
OPERATION(columns_scale, x(c, 0), x(c, 1), c->p, s->K, s->M, s->N, s->C)

// The columns of a pair of LoRA: those of (N, width) from `first` on, and (N, columns).
static void test_pair_columns(size_t N, size_t width, size_t first, size_t columns, float scale) {
    if (!wanted("columns_add columns_scale")) return;
    Shape s = {.C = width, .M = columns, .N = N, .K = first};
    Case c = case_begin(operation_columns_add, &s, "N=%zu columns=%zu+%zu of %zu", N, first, columns, width);
    c.p = scale;
    Result* out = output(&c, "out", IN_PLACE, STORED, N * width, 1);
    double *start = doubles(&c.arrays[0], c.arrays[0].start), *in = input(&c, "in", N * columns, 1.0);
    c.arrays[0].live = first;
    for (size_t i = 0; i < N * width; i++) {
        size_t column = i % width - first;  // of those before it: a large number
        double term = column < columns ? (double)scale * in[i / width * columns + column] : 0;
        result_add(out, i, start[i] + term, fabs(start[i]) + fabs(term));
    }
    case_prove(&c);
    size_t others = 0;
    for (size_t i = 0; i < N * width; i++)
        others += i % width - first >= columns && array_get(&c.arrays[0], made(&c.arrays[0]), i) != start[i];
    case_check(&c, others == 0, "other columns stay as they are; not: %zu", others);

    Case b = case_begin(operation_columns_scale, &s, "%s", c.shape);
    b.p = scale;
    Result* some = output(&b, "out", OUTPUT, STORED, N * columns, SAME_BITS);
    double* all = input(&b, "in", N * width, 1.0);
    newest(&b)->live = first;
    for (size_t i = 0; i < N * columns; i++) {
        double value = (double)scale * all[i / columns * width + first + i % columns];
        result_add(some, i, value, fabs(value));
    }
    case_prove(&b);
    release();
}

// The tree over `count` numbers that are `stride` apart: neighbors first.
static float tree_sum(const float* x, size_t count, size_t stride) {
    if (count == 1) return *x;
    return tree_sum(x, count / 2, stride) + tree_sum(x + count / 2 * stride, count / 2, stride);
}

static void test_leaves_sum(size_t count, size_t M, size_t C, bool biased) {
    if (!wanted("leaves_sum")) return;
    Shape s = {.C = C, .M = M, .parts = count};
    size_t n = M * C, wrong = 0;
    Case c = case_begin(operation_leaves_sum, &s, "count=%zu M=%zu C=%zu%s", count, M, C, biased ? " bias" : "");
    Result* out = output(&c, "out", OUTPUT, STORED, n, ON_CUDA ? SAME_BITS : count);
    const Array* parts = array(&c, "parts", INPUT, FLOAT, count * n, 1);
    for (size_t i = 0; i < count * n && n > 1; i += n) ((float*)parts->start)[i] = -0.0f;  // their sum is -0 too
    double* bias = input(&c, "bias", biased ? C : 0, 1);
    for (size_t i = 0; i < count * n; i++) result_term(out, i % n, array_get(parts, parts->start, i));
    for (size_t i = 0; i < n && biased; i++) result_term(out, i, bias[i % C]);
    case_prove(&c);
    for (size_t i = 0; i < n; i++) {
        float sum = tree_sum((const float*)parts->start + i, count, n);
        if (biased) sum += (float)bias[i % C];
        floatX rounded = floatX_of(sum);
        wrong += memcmp(&rounded, (const floatX*)made(&c.arrays[0]) + i, sizeof rounded) != 0;
    }
    case_check(&c, wrong == 0, "the bits of pairs of neighbors, then of pairs of pairs; others: %zu", wrong);
    release();
}

// ------------------------------------------------------------------------------------------------
// Weights in 4 bits: test_nf4.c has more of them

// Arrays: out, codes, scales, map, scale_codes. N weights from `first` on, of M.
static void call_nf4_dequantize(const Case* c) {
    Nf4 q = {.n = c->s.M, .codes = (uint8_t*)at(c, 1), .scales = f(c, 2), .map = f(c, 3),
             .scale_codes = (uint8_t*)at(c, 4)};
    RUN(nf4_dequantize, x(c, 0), &q, c->s.first_position, c->s.N);
}
static const Operation operation_nf4_dequantize = {"nf4_dequantize", call_nf4_dequantize};

// Of `whole` weights those from `first` on, all codes being random; doubled: the scales have codes, too.
static void test_nf4(size_t first, size_t N, size_t whole, bool doubled) {
    if (!wanted("nf4_dequantize")) return;
    Shape s = {.M = whole, .N = N, .first_position = first};
    size_t blocks = divide_up(whole, NF4_BLOCK), groups = doubled ? divide_up(blocks, NF4_SCALES) : blocks;
    Case c = case_begin(operation_nf4_dequantize, &s, "%zu to %zu of %zu%s", first, first + N, whole,
                        doubled ? " doubled" : "");
    Result* out = output(&c, "out", OUTPUT, STORED, N, ON_CUDA ? SAME_BITS : 1);
    const Array* arrays[4] = {array(&c, "codes", INPUT, BYTE, divide_up(whole, 2), 1)};
    for (size_t i = 0; i < divide_up(whole, 2); i++)
        ((uint8_t*)arrays[0]->start)[i] = (uint8_t)random_bits(3, RANDOM_TEST, cases, i);
    arrays[1] = array(&c, "scales", INPUT, FLOAT, groups, 1);
    newest(&c)->live = first / NF4_BLOCK / (doubled ? NF4_SCALES : 1);
    arrays[2] = array(&c, "map", INPUT, FLOAT, doubled ? NF4_MAP : 0, 1);
    arrays[3] = array(&c, "scale_codes", INPUT, BYTE, doubled ? blocks : 0, 1);
    for (size_t i = 0; doubled && i < blocks; i++)
        ((uint8_t*)arrays[3]->start)[i] = (uint8_t)random_bits(4, RANDOM_TEST, cases, i);
    if (doubled) c.arrays[3].live = ((uint8_t*)arrays[3]->start)[first / NF4_BLOCK];
    for (size_t i = 0; i < N; i++) {
        size_t e = first + i, block = e / NF4_BLOCK;
        unsigned byte = ((uint8_t*)arrays[0]->start)[e / 2], code = e % 2 ? byte & 15 : byte >> 4;
        double scale = array_get(arrays[1], arrays[1]->start, block / (doubled ? NF4_SCALES : 1)), size = fabs(scale);
        if (doubled) {
            double offset = array_get(arrays[2], arrays[2]->start, NF4_OFFSET);
            scale = scale * array_get(arrays[2], arrays[2]->start, ((uint8_t*)arrays[3]->start)[block]);
            size = fabs(scale) + fabs(offset);
            scale += offset;
        }
        double number = (double)NF4_TABLE.values[code];
        result_add(out, i, number * scale, fabs(number) * size);
    }
    case_prove(&c);
    release();
}

// Arrays: out (N, C), token_weight (parts, V, C), position_weight, tokens, positions, memory (parts, N, C).
static void call_embedding_parts(const Case* c) {
    const Shape* s = &c->s;
    for (size_t p = 0; p < s->parts; p++)
        RUN(embedding_part_forward, x(c, 5) + p * s->N * s->C, i32(c, 3), x(c, 1) + p * s->V * s->C, p * s->V, s->V,
            s->N, s->C);
    RUN(embedding_join, x(c, 0), x(c, 5), i32(c, 3), i32(c, 4), x(c, 2), s->V, s->N, s->C);
}
static const Operation operation_embedding_parts = {"embedding_part_forward, _join", call_embedding_parts};

// Arrays: dtoken_weight (parts, V, C), nothing, dout (N, C), tokens, nothing.
static void call_embedding_backward_parts(const Case* c) {
    const Shape* s = &c->s;
    for (size_t p = 0; p < s->parts; p++)
        RUN(embedding_backward_part, f(c, 0) + p * s->V * s->C, x(c, 2), i32(c, 3), p * s->V, s->V, s->N, s->C);
}
static const Operation operation_embedding_backward_parts = {"embedding_backward_part", call_embedding_backward_parts};

// Runs the case again with `operation` instead of its own: array 0 must be the same, bit for bit.
static void case_same(Case* c, Operation operation, const char* as) {
    void* bits = hold(array_bytes(&c->arrays[0]));
    memcpy(bits, made(&c->arrays[0]), array_bytes(&c->arrays[0]));
    c->call = operation.call;
    case_prove(c);
    case_check(c, memcmp(bits, made(&c->arrays[0]), array_bytes(&c->arrays[0])) == 0, "the bits of %s", as);
}

// rows: of the vocabulary of a part.
static void test_embedding_parts(size_t parts, size_t rows, size_t N, size_t C, bool positioned, Tokens kind) {
    if (!wanted("embedding_part_forward embedding_join embedding_backward_part")) return;
    size_t n = N * C, context = positioned ? 9 : 0;
    int32_t *tokens = make_tokens(kind, N, parts * rows), *positions = make_tokens(TOKENS_RANDOM, N, 9);
    Shape s = {.C = C, .N = N, .V = rows, .parts = parts, .tokens = tokens, .positions = positions};
    Case c = case_begin(operation_embedding_parts, &s, "parts=%zu rows=%zu N=%zu C=%zu%s", parts, rows, N, C,
                        positioned ? "" : " no pos");
    Result* out = output(&c, "out", OUTPUT, STORED, n, SAME_BITS);
    Array* weight = array(&c, "token_weight", INPUT, STORED, parts * rows * C, 1);
    for (size_t i = 0; i < weight->n; i += 3) array_set(weight, weight->start, i, -0.0);
    weight->live = (size_t)tokens[0] * C;
    double* in[2] = {doubles(weight, weight->start), input(&c, "position_weight", context * C, 1)};
    newest(&c)->live = (size_t)positions[0] * C;
    input_from(&c, "tokens", INTEGER, N, tokens);
    input_from(&c, "positions", INTEGER, positioned ? N : 0, positions);
    array(&c, "memory", UNREAD, STORED, parts * n, 1);
    reference_embedding(out, in, &s);
    case_prove(&c);
    case_same(&c, operation_embedding_forward, "embedding_forward");

    Case b = case_begin(operation_embedding_backward_parts, &s, "%s", c.shape);
    b.scratch_bytes = SCRATCH(embedding_backward_scratch_bytes(N, C));
    Result* din[1] = {output(&b, "dtoken_weight", ADDED, FLOAT, parts * rows * C, N)};
    newest(&b)->live = (size_t)tokens[0] * C;
    array(&b, "dposition_weight", ADDED, FLOAT, 0, 1);
    double* dout = input(&b, "dout", n, 1);
    input_again(&b, &c.arrays[3]);
    array(&b, "positions", INPUT, INTEGER, 0, 1);
    in[1] = NULL;
    reference_embedding_backward(din, dout, in, &s);
    case_prove(&b);
    case_same(&b, operation_embedding_backward, "embedding_backward");
    release();
}

// ------------------------------------------------------------------------------------------------
// Attention

OPERATION(attention_forward, x(c, 0), f(c, 1), x(c, 2), s->B, s->T, s->H, s->K, s->D)
OPERATION(attention_backward, x(c, 0), f(c, 1), x(c, 2), x(c, 3), f(c, 4), x(c, 5), s->B, s->T, s->H, s->K, s->D)
// Of one sequence the first positions one at a time, then the later half at once; of several, first a part of each
// alone, of another length, then a token of all that have one left at a time. In a context with three more positions,
// which are not read.
static size_t decode_alone(size_t b, size_t B, size_t T) { return b * T / B; }
static void call_attention_decode(const Case* c) {
    size_t B = c->s.B, H = c->s.H, K = c->s.K, D = c->s.D, row = (H + 2 * K) * D, T = c->s.T, context = T + 3;
    float* scales = c->s.q8 ? f(c, 3) : NULL;
    for (size_t t = 0, count; B == 1 && t < T; t += count) {
        count = t < T / 2 ? 1 : T - t;
        RUN(attention_decode, x(c, 0) + t * H * D, x(c, 1), x(c, 2), scales, x(c, 4) + t * row, i32(c, 5) + t, B, count,
            context, H, K, D);
    }
    for (size_t b = 1; b < B; b++) {
        size_t vectors = b * context * K, bytes = vectors * D * (scales ? 1 : sizeof(floatX));
        if (decode_alone(b, B, T) == 0) continue;
        RUN(attention_decode, x(c, 0) + b * T * H * D, (char*)at(c, 1) + bytes, (char*)at(c, 2) + bytes,
            scales ? scales + 2 * vectors : NULL, x(c, 4) + b * T * row, i32(c, 5), 1, decode_alone(b, B, T), context,
            H, K, D);
    }
    for (size_t round = 0; B > 1 && round < T; round++) {
        size_t left = 0;
        while (left < B && decode_alone(left, B, T) + round < T) left++;
        for (size_t b = 0; b < left; b++)
            RUN(columns_copy, x(c, 6) + b * row, row, x(c, 4) + (b * T + decode_alone(b, B, T) + round) * row, row, 1,
                row);
        RUN(attention_decode, x(c, 7), x(c, 1), x(c, 2), scales, x(c, 6), i32(c, 5) + T + round * B, left, 1, context,
            H, K, D);
        for (size_t b = 0; b < left; b++)
            RUN(columns_copy, x(c, 0) + (b * T + decode_alone(b, B, T) + round) * H * D, H * D, x(c, 7) + b * H * D,
                H * D, 1, H * D);
    }
}
static const Operation operation_attention_decode = {"attention_decode", call_attention_decode};

// Rounds a key or value (D) to 8 bits.
static void quantize(double* x, size_t D) {
    float maximum = 0.0f;
    for (size_t d = 0; d < D; d++) maximum = fmaxf(maximum, fabsf((float)x[d]));
    float inverse = maximum > 0 ? 127.0f / maximum : 0.0f;
    for (size_t d = 0; d < D; d++) x[d] = (double)(maximum / 127.0f * (float)lrintf((float)x[d] * inverse));
}

static void test_decode(Shape s, const Array* qkv, const double* values, size_t n, bool q8) {
    size_t T = s.T, H = s.H, K = s.K, D = s.D, outs = s.B * T * H * D, row = (H + 2 * K) * D;
    size_t heads = s.B * (T + 3) * K, bytes = q8 ? 1 : sizeof(floatX);
    double* in[1] = {hold_doubles(n)};
    memcpy(in[0], values, n * sizeof(double));
    for (size_t i = 0; q8 && i < s.B * T * 2 * K; i++) quantize(in[0] + i / (2 * K) * row + (H + i % (2 * K)) * D, D);
    s.q8 = q8;
    Case c = case_begin(operation_attention_decode, &s, "B=%zu T=%zu H=%zu K=%zu D=%zu%s", s.B, T, H, K, D,
                        q8 ? " 8 bits" : "");
    reference_attention(output(&c, "out", OUTPUT, STORED, outs, T + D), in, &s);
    // Positions past T are not written, so the caches are not compared as outputs.
    array(&c, "keys", UNREAD, FLOAT, divide_up(heads * D * bytes, sizeof(float)), 1);
    array(&c, "values", UNREAD, FLOAT, divide_up(heads * D * bytes, sizeof(float)), 1);
    array(&c, "scales", UNREAD, FLOAT, q8 ? 2 * heads : 0, 1);
    input_again(&c, qkv);
    newest(&c)->live = 0;
    int32_t* positions = (int32_t*)hold((T + T * s.B) * sizeof(int32_t));
    for (size_t t = 0; t < T; t++) positions[t] = (int32_t)t;
    for (size_t i = 0; i < T * s.B; i++) positions[T + i] = (int32_t)(decode_alone(i % s.B, s.B, T) + i / s.B);
    input_from(&c, "positions", INTEGER, T + T * s.B, positions);
    array(&c, "rows", UNREAD, STORED, s.B * row, 1);
    array(&c, "outs", UNREAD, STORED, s.B * H * D, 1);
    c.witness = 0;
    case_prove(&c);
}

static void test_attention(size_t B, size_t T, size_t H, size_t K, size_t D, double scale) {
    if (!wanted("attention_forward attention_backward attention_decode")) return;
    size_t n = B * T * (H + 2 * K) * D, outs = B * T * H * D;
    Shape s = {.B = B, .T = T, .H = H, .K = K, .D = D, .smallest_normal = ON_CUDA ? SMALLEST_NORMAL : 0.0};
    Case c = case_begin(operation_attention_forward, &s, "B=%zu T=%zu H=%zu K=%zu D=%zu x%.2g", B, T, H,
                        K, D, scale);
    Result* out = output(&c, "out", OUTPUT, STORED, outs, T + D);
    s.lse = output(&c, "lse", OUTPUT, FLOAT, B * H * T, T + D);
    double* in[1] = {input(&c, "qkv", n, scale)};
    newest(&c)->live = 0;
    c.witness = 0;
    reference_attention(out, in, &s);
    case_prove(&c);

    s.lse = NULL;
    Case b = case_begin(operation_attention_backward, &s, "%s", c.shape);
    Result* din = output(&b, "dqkv", OUTPUT, STORED, n, T + D + H / K);
    array(&b, "delta", UNREAD, FLOAT, B * H * T, 1);
    double* dout = input(&b, "dout", outs, 1);
    input_from(&b, "out", STORED, outs, c.arrays[0].host);
    input_from(&b, "lse", FLOAT, B * H * T, c.arrays[1].host);
    input_again(&b, &c.arrays[2]);
    b.witness = 0;
    reference_gradient(&b, &din, 1, reference_attention, reference_attention_backward, dout, outs, in);
    case_prove(&b);

    if (T <= 150 && (B == 1 || T <= 20))
        for (int q8 = 0; q8 < 2; q8++) test_decode(s, &c.arrays[2], in[0], n, q8);
    release();
}

// ------------------------------------------------------------------------------------------------
// GELU, SwiGLU

OPERATION(gelu_forward, x(c, 0), x(c, 1), s->N)
OPERATION(gelu_backward, x(c, 0), x(c, 1), x(c, 2), s->N)
OPERATION_AS(gelu_backward_in_place, "gelu_backward, din = dout", gelu_backward, x(c, 0), x(c, 0), x(c, 1), s->N)
OPERATION(swiglu_forward, x(c, 0), x(c, 1), s->N, s->F)
OPERATION(swiglu_backward, x(c, 0), x(c, 1), x(c, 2), s->N, s->F)

static void test_nonlinearity(bool gelu, size_t N, size_t F, double scale) {
    if (!wanted(gelu ? "gelu_forward gelu_backward" : "swiglu_forward swiglu_backward")) return;
    size_t outs = N * F, ins = gelu ? outs : 2 * outs;
    Shape s = {.N = gelu ? outs : N, .F = F};
    Case c = case_begin(gelu ? operation_gelu_forward : operation_swiglu_forward, &s, "N=%zu F=%zu x%.2g", N, F, scale);
    ReferenceForward forward = gelu ? reference_gelu : reference_swiglu;
    Result* out = output(&c, "out", OUTPUT, STORED, outs, 1);
    double* in[1] = {input(&c, "in", ins, scale)};
    forward(out, in, &s);
    case_prove(&c);

    Case b = case_begin(gelu ? operation_gelu_backward : operation_swiglu_backward, &s, "%s", c.shape);
    Result* din = output(&b, "din", OUTPUT, STORED, ins, 1);
    double* dout = input(&b, "dout", outs, 1);
    input_again(&b, &c.arrays[1]);
    ReferenceBackward backward = gelu ? reference_gelu_backward : reference_swiglu_backward;
    reference_gradient(&b, &din, 1, forward, backward, dout, outs, in);
    case_prove(&b);
    if (gelu) {
        Case same = case_begin(operation_gelu_backward_in_place, &s, "%s", c.shape);
        Array* gradient = array(&same, "din", IN_PLACE, STORED, outs, 1);
        memcpy(gradient->start, b.arrays[1].start, outs * sizeof(floatX));
        gradient->expected = din;
        gradient->length = 1;
        input_again(&same, &c.arrays[1]);
        case_prove(&same);
        case_check(&same, memcmp(made(gradient), made(&b.arrays[0]), outs * sizeof(floatX)) == 0,
                   "din = dout: same bits");
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Dropout

OPERATION(dropout_apply, x(c, 0), x(c, 1), c->p, 11, 5, s->first_position, s->N)
OPERATION_AS(dropout_in_place, "dropout, in place", dropout_apply, x(c, 0), x(c, 0), c->p, 11, 5, s->first_position,
             s->N)
static void call_dropout_in_parts(const Case* c) {  // that do not begin at multiples of 4
    for (size_t i = 0, step; i < c->s.N; i += step) {
        step = min_size(c->s.N / 3 + 1, c->s.N - i);
        RUN(dropout_apply, x(c, 0) + i, x(c, 0) + i, c->p, 11, 5, c->s.first_position + i, step);
    }
}
static const Operation operation_dropout_in_parts = {"dropout, in place and in parts", call_dropout_in_parts};

static void test_dropout(size_t N, size_t first, float p) {
    if (!wanted("dropout")) return;
    const Operation ways[3] = {operation_dropout_apply, operation_dropout_in_place, operation_dropout_in_parts};
    Shape s = {.N = N, .first_position = first};
    const void* whole = NULL;
    for (int way = 0; way < 3; way++) {
        Case c = case_begin(ways[way], &s, "N=%zu first=%zu p=%.2g", N, first, (double)p);
        c.p = p;
        Result* values = output(&c, "out", way ? IN_PLACE : OUTPUT, STORED, N, 1);
        Array *out = newest(&c), *in = way ? out : array(&c, "in", INPUT, STORED, N, 1);
        size_t kept = 0, wrong = 0;
        for (size_t i = 0; i < N; i++) {
            array_set(in, in->start, i, (double)random_normal(1, RANDOM_TEST, 0, i));
            if ((double)random_bits(11, RANDOM_DROPOUT, 5, first + i) < (double)p * 0x1p32) continue;
            double value = array_get(in, in->start, i) / (1.0 - (double)p);
            result_add(values, i, value, fabs(value));
            in->live = i;
            kept++;
        }
        c.silent = kept == 0;
        case_prove(&c);
        for (size_t i = 0; i < N; i++) wrong += (array_get(out, made(out), i) == 0.0) != (values->value[i] == 0.0);
        case_check(&c, wrong == 0, "the same elements are dropped");
        double expected = (double)N * (1.0 - (double)p), sigma = sqrt((double)N * (double)p * (1.0 - (double)p));
        case_check(&c, fabs((double)kept - expected) <= 4.0 * sigma, "kept %zu, expected %.0f +- %.0f", kept, expected,
                   4.0 * sigma);
        if (way == 0) whole = made(out);
        else case_check(&c, memcmp(whole, made(out), N * sizeof(floatX)) == 0, "same bits");
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Classifier

OPERATION(classifier, x(c, 0), f(c, 1), i32(c, 2), c->dloss, f(c, 3), s->N, s->V, s->Vp)

// Three calls: gradients of unweighted rows; of rows with weights, every third of them 0; losses alone, for which the
// weights are not read. ignored: one row in `ignored` has no target (0: no row, 1: every row)
static void test_classifier(size_t N, size_t V, size_t Vp, double scale, size_t ignored, float dloss) {
    if (!wanted("classifier")) return;
    int32_t* targets = make_tokens(TOKENS_RANDOM, N, V);
    Shape s = {.N = N, .V = V, .Vp = Vp, .tokens = targets};
    double* dout = hold_doubles(N);
    for (size_t row = 0; ignored > 0 && row < N; row += ignored) targets[row] = -1;
    for (int way = 0; way < 3; way++) {
        static const char* const ways[3] = {"", " weights", " loss"};
        bool weighted = way > 0, loss_alone = way == 2;
        Case c = case_begin(operation_classifier, &s, "N=%zu V=%zu Vp=%zu x%.3g -1:%zu%s", N, V, Vp, scale,
                            ignored, ways[way]);
        c.dloss = loss_alone ? 0.0f : dloss;
        c.silent = ignored == 1;
        Array* logits = array(&c, "logits", IN_PLACE, STORED, N * Vp, scale);
        Result* losses = output(&c, "losses", OUTPUT, FLOAT, N, V);
        for (size_t row = 0; row < N; row++) {
            if (targets[row] >= 0) logits->live = row * Vp + V - 1;
            if (row % 2) array_set(logits, logits->start, row * Vp + row % V, 4.0 * scale);  // one large logit
            if (row % 4 == 1 && targets[row] >= 0) targets[row] = (int32_t)(row % V);        // at the target
            for (size_t v = 0; v < Vp; v++) {
                double logit = array_get(logits, logits->start, row * Vp + v);
                if (row % 4 == 2) logit = 4.0 * scale + logit / scale;  // ordinary, but far from 0
                if (v >= V) logit = NAN;                                // never read
                array_set(logits, logits->start, row * Vp + v, logit);
            }
        }
        input_from(&c, "targets", INTEGER, N, targets);
        Array* weights = array(&c, "weights", loss_alone ? UNREAD : INPUT, FLOAT, weighted ? N : 0, 1);
        for (size_t row = 0; row < weights->n; row++) {
            if (row % 3 == 2) array_set(weights, weights->start, row, 0.0);
            if (targets[row] >= 0) weights->live = row;
        }
        for (size_t row = 0; row < N; row++)
            dout[row] = (double)dloss * (weighted ? array_get(weights, weights->start, row) : 1.0);
        double* in[1] = {doubles(logits, logits->start)};
        reference_classifier(losses, in, &s);
        if (!loss_alone) {
            logits->expected = result(N * Vp);
            logits->length = V;
            reference_gradient(&c, &logits->expected, 1, reference_classifier, reference_classifier_backward, dout, N,
                               in);
        }
        case_prove(&c);
        if (loss_alone)
            case_check(&c, memcmp(made(logits), logits->start, array_bytes(logits)) == 0,
                       "loss alone leaves the logits as they are");
    }
    release();
}

// The same by `parts` ranks, whose leaves are `leaves` in all. Arrays as in test_classifier, and memory for the logits
// of a rank, (N, Vp / parts), and for the statistics, (parts, N, leaves / parts, LEAF_STATS).
static void call_classifier_parts(const Case* c) {
    const Shape* s = &c->s;
    size_t columns = s->Vp / s->parts, leaves = s->K / s->parts;
    for (size_t p = 0; p < s->parts; p++) {
        RUN(columns_copy, x(c, 4), columns, x(c, 0) + p * columns, s->Vp, s->N, columns);
        RUN(classifier_leaves, f(c, 5) + p * s->N * leaves * LEAF_STATS, x(c, 4), i32(c, 2), p * columns, leaves, s->N,
            s->V, columns);
    }
    for (size_t p = 0; p < s->parts; p++) {
        RUN(columns_copy, x(c, 4), columns, x(c, 0) + p * columns, s->Vp, s->N, columns);
        RUN(classifier_gradient, x(c, 4), f(c, 1), f(c, 5), i32(c, 2), c->dloss, f(c, 3), p * columns, s->parts, leaves,
            s->N, s->V, columns);
        RUN(columns_copy, x(c, 0) + p * columns, s->Vp, x(c, 4), columns, s->N, columns);
    }
}
static const Operation operation_classifier_parts = {"classifier_leaves, _gradient", call_classifier_parts};

// Every number of ranks gives the same bits; with one leaf they are those of `classifier`, on a GPU only if all arrays
// are aligned, which those of the last run are not.
static void test_classifier_parts(size_t leaves, size_t N, size_t V, size_t Vp, double scale, size_t ignored,
                                  float dloss) {
    if (!wanted("classifier_leaves classifier_gradient")) return;
    int32_t* targets = make_tokens(TOKENS_RANDOM, N, V);
    double* dout = hold_doubles(N);
    for (size_t row = 0; ignored > 0 && row < N; row += ignored) targets[row] = -1;
    floatX* logits_of_first = (floatX*)hold(N * Vp * sizeof(floatX));
    float* losses_of_first = (float*)hold(N * sizeof(float));
    uint64_t numbers = cases;
    for (size_t parts = 1; parts <= leaves; parts *= 2) {
        Shape s = {.N = N, .K = leaves, .V = V, .Vp = Vp, .parts = parts, .tokens = targets};
        cases = numbers;  // the same random numbers
        Case c = case_begin(operation_classifier_parts, &s, "parts=%zu of %zu N=%zu V=%zu Vp=%zu x%.3g", parts, leaves,
                            N, V, Vp, scale);
        c.dloss = dloss;
        Array* logits = array(&c, "logits", IN_PLACE, STORED, N * Vp, scale);
        Result* losses = output(&c, "losses", OUTPUT, FLOAT, N, V + leaves);
        for (size_t row = 0; row < N; row++) {
            if (targets[row] >= 0) logits->live = row * Vp + V - 1;
            for (size_t v = V; v < Vp; v++) array_set(logits, logits->start, row * Vp + v, NAN);  // never read
        }
        input_from(&c, "targets", INTEGER, N, targets);
        Array* weights = array(&c, "weights", INPUT, FLOAT, N, 1);
        for (size_t row = 0; row < N; row++) {
            if (targets[row] >= 0) weights->live = row;
            dout[row] = (double)dloss * array_get(weights, weights->start, row);
        }
        array(&c, "memory", UNREAD, STORED, N * Vp / parts, 1);
        array(&c, "stats", UNREAD, FLOAT, N * leaves * LEAF_STATS, 1);
        double* in[1] = {doubles(logits, logits->start)};
        reference_classifier(losses, in, &s);
        logits->expected = result(N * Vp);
        logits->length = V + leaves;
        reference_classifier_backward(&logits->expected, dout, in, &s);
        case_prove(&c);
        bool same = parts == 1 || (memcmp(made(logits), logits_of_first, array_bytes(logits)) == 0 &&
                                   memcmp(made(&c.arrays[1]), losses_of_first, N * sizeof(float)) == 0);
        case_check(&c, same, "the bits of one rank");
        memcpy(logits_of_first, made(logits), array_bytes(logits));
        memcpy(losses_of_first, made(&c.arrays[1]), N * sizeof(float));
        if (leaves == 1 && !ON_CUDA) case_same(&c, operation_classifier, "classifier");
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Vectors

OPERATION(fill_zero, f(c, 0), s->N * sizeof(float))
OPERATION(cast_to_float, f(c, 0), x(c, 1), s->N)
OPERATION(cast_from_float, x(c, 0), f(c, 1), s->N)
OPERATION(sum_of_squares, d(c, 0), f(c, 1), s->N)
OPERATION(vector_add, f(c, 0), f(c, 1), s->N)
OPERATION(vector_add_stored, f(c, 0), x(c, 1), s->N)

OPERATION(residual_forward, x(c, 0), x(c, 1), x(c, 2), s->N)

static void test_residual(size_t N) {
    if (!wanted("residual_forward")) return;
    Shape s = {.N = N};
    Case c = case_begin(operation_residual_forward, &s, "N=%zu", N);
    Result* out = output(&c, "out", OUTPUT, STORED, N, 1);
    const double *in = input(&c, "in", N, 1), *branch = input(&c, "branch", N, 1);
    for (size_t i = 0; i < N; i++) result_add(out, i, in[i] + branch[i], fabs(in[i]) + fabs(branch[i]));
    case_prove(&c);
    release();
}

static void test_vectors(size_t N) {
    Shape s = {.N = N};
    const struct { Operation o; Role out; Kind out_kind, in_kind; } rows[6] = {
        {operation_fill_zero, OUTPUT, FLOAT, FLOAT},
        {operation_cast_to_float, OUTPUT, FLOAT, STORED},
        {operation_cast_from_float, OUTPUT, STORED, FLOAT},
        {operation_vector_add, IN_PLACE, FLOAT, FLOAT},
        {operation_vector_add_stored, IN_PLACE, FLOAT, STORED},
        {operation_sum_of_squares, OUTPUT, DOUBLE, FLOAT},
    };
    for (int i = 0; i < 6; i++) {
        if (!wanted(rows[i].o.name)) continue;
        bool sum = rows[i].out_kind == DOUBLE, adds = rows[i].out == IN_PLACE;
        Case c = case_begin(rows[i].o, &s, "N=%zu", N);
        Result* r = output(&c, "out", rows[i].out, rows[i].out_kind, sum ? 1 : N, sum ? N : SAME_BITS);
        Array *out = newest(&c), *in = i == 0 ? NULL : array(&c, "x", INPUT, rows[i].in_kind, N, 1);
        if (sum) c.scratch_bytes = SCRATCH(sum_of_squares_scratch_bytes());
        long double total = 0.0L;
        for (size_t k = 0; in && k < N; k++) {
            long double value = (long double)array_get(in, in->start, k);
            total += value * value;
            if (!sum) r->value[k] = adds ? (double)(((float*)out->start)[k] + (float)value) : (double)value;
        }
        if (sum) result_add(r, 0, (double)total, (double)total);
        case_prove(&c);
        size_t wrong = 0, bytes = kind_bytes(out->kind);
        for (size_t k = 0; !sum && k < N; k++) {
            unsigned char exact[8];
            array_set(out, exact, 0, r->value[k]);
            wrong += memcmp(exact, (const char*)made(out) + k * bytes, bytes) != 0;
        }
        if (!sum) case_check(&c, wrong == 0, "exact, one by one; wrong: %zu", wrong);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Optimizers

static OptimizerStep test_step(OptimizerKind kind, uint64_t step) {
    OptimizerStep s = {.kind = kind, .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.99f, .epsilon = 1e-8f, .weight_decay = 0.1f,
                       .grad_scale = 0.37f, .seed = 9, .step = step};
    return s;
}

// Elements [begin, begin + n) of the case.
static OptimizerSlice optimizer_slice(const Case* c, size_t begin, size_t n) {
    OptimizerSlice slice = {.params = x(c, 0) + begin, .master_weights = f(c, 1) ? f(c, 1) + begin : NULL,
                            .grads = f(c, 4) + begin, .first = c->s.first_position + begin, .n = n,
                            .shape = {.rows = n}};
    for (int s = 0; s < 2; s++)
        if (f(c, 2 + s)) slice.states[s] = f(c, 2 + s) + begin;
    return slice;
}

static void call_optimizer(const Case* c) {
    OptimizerSlice slice = optimizer_slice(c, 0, c->s.N);
    RUN(optimizer_update, &slice, &c->step);
}
static const Operation operation_optimizer_update = {"optimizer_update", call_optimizer};
static void call_optimizer_in_parts(const Case* c) {
    for (size_t i = 0, length = c->s.N / 2 + 1; i < c->s.N; i += length) {
        OptimizerSlice slice = optimizer_slice(c, i, min_size(length, c->s.N - i));
        RUN(optimizer_update, &slice, &c->step);
    }
}

// The formulas of optimizer_element; `sizes` scale the errors of w, m and v.
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

static void test_optimizer(OptimizerKind kind, bool master_weights, size_t N, size_t first, uint64_t step) {
    if (!wanted("optimizer_update")) return;
    Shape s = {.N = N, .first_position = first};
    bool has_m = optimizer_states(kind) > 0, has_v = optimizer_states(kind) > 1;
    Case c = case_begin(operation_optimizer_update, &s, "%s N=%zu first=%zu step=%zu%s", OPTIMIZERS[kind].name,
                        N, first, (size_t)step, master_weights ? " masters" : "");
    c.step = test_step(kind, step);
    Result* new_params = output(&c, "params", master_weights ? OUTPUT : IN_PLACE, STORED, N, 1);
    Result* new_masters = output(&c, "masters", IN_PLACE, FLOAT, master_weights ? N : 0, 1);
    Result* new_m = output(&c, "m", IN_PLACE, FLOAT, has_m ? N : 0, 1);
    Result* new_v = output(&c, "v", IN_PLACE, FLOAT, has_v ? N : 0, 1);
    Array *params = &c.arrays[0], *masters = &c.arrays[1], *m = &c.arrays[2], *v = &c.arrays[3];
    Array *grads = array(&c, "grads", INPUT, FLOAT, N, 1), *weights = master_weights ? masters : params;
    for (size_t i = 0; i < v->n; i++) array_set(v, v->start, i, 0.01 + fabs(array_get(v, v->start, i)));
    if (has_m && N > 1) array_set(m, m->start, 0, 0.0), array_set(grads, grads->start, 0, 0.0);
    c.witness = 0;
    for (size_t i = 0; i < N; i++) {
        double sizes[3] = {0.0, 0.0, 0.0}, w = array_get(weights, weights->start, i);
        double old_m = has_m ? array_get(m, m->start, i) : 0.0, old_v = has_v ? array_get(v, v->start, i) : 0.0;
        reference_optimizer(&w, &old_m, &old_v, sizes, array_get(grads, grads->start, i), &c.step);
        result_add(new_params, i, w, sizes[0]);
        if (master_weights) result_add(new_masters, i, w, sizes[0]);
        else if (!FLOATX_IS_FLOAT) new_params->rounded[i] = fmax(fabs(w), SMALLEST_NORMAL);  // one ulp, not half
        if (has_m) result_add(new_m, i, old_m, sizes[1]);
        if (has_v) result_add(new_v, i, old_v, sizes[2]);
    }
    case_prove(&c);

    // Parameters are the rounded float results: of the master weights, or without them, stochastically, of an update of
    // the same weights as floats.
    const size_t bytes = N * sizeof(float);
    float *exact = (float*)hold(bytes), *m_and_v[2] = {(float*)hold(bytes), (float*)hold(bytes)};
    floatX* rounded = (floatX*)hold(N * sizeof(floatX));
    size_t different = 0;
    if (master_weights) {
        memcpy(exact, made(masters), bytes);
    } else {
        for (size_t i = 0; i < N; i++) exact[i] = (float)array_get(params, params->start, i);
        if (has_m) memcpy(m_and_v[0], m->start, bytes);
        if (has_v) memcpy(m_and_v[1], v->start, bytes);
        OptimizerSlice slice = {.params = rounded, .master_weights = exact, .grads = (float*)grads->start,
                                .states = {m_and_v[0], m_and_v[1]}, .first = first, .n = N};
        CPU(optimizer_update)(&slice, &c.step, NULL);
    }
    for (size_t i = 0; i < N; i++) {
        uint32_t random = random_bits(9, RANDOM_ROUNDING, step, first + i);
        rounded[i] = master_weights ? floatX_of(exact[i]) : floatX_of_stochastic(exact[i], random);
        different += memcmp(&rounded[i], (const floatX*)made(params) + i, sizeof(floatX)) != 0;
    }
    // CUDA's float may differ from the CPU's in the last place, and so, once in thousands, its rounded value.
    size_t allowed = master_weights || !ON_CUDA ? 0 : FLOATX_IS_FLOAT ? N : N / 100;
    case_check(&c, different <= allowed, "params are the rounded results: %zu differ <= %zu", different, allowed);

    memcpy(rounded, made(params), N * sizeof(floatX));
    c.call = call_optimizer_in_parts;
    c.name = "optimizer_update, in parts";
    case_prove(&c);
    case_check(&c, memcmp(rounded, made(params), N * sizeof(floatX)) == 0, "same bits");
    release();
}

// Optimizers with states of other types and shapes; test_optimizers.c checks their values over 100 steps. Here one step
// passes every check of a case, and CUDA agrees with the CPU. Gradients, weights and m, v are below about 30.

// The case's whole tensor: parameters, master weights, gradients, scratch. States are arrays after these, not set here.
static OptimizerSlice tensor_slice(const Case* c) {
    OptimizerSlice slice = {.params = x(c, 0), .master_weights = f(c, 1), .grads = f(c, 2),
                            .first = c->s.first_position, .n = c->s.N, .shape = c->tensor, .scratch = f(c, 3)};
    return slice;
}

static void call_tensor_update(const Case* c) {
    OptimizerSlice slice = tensor_slice(c);
    for (int s = 0; s + 4 < c->count; s++) slice.states[s] = at(c, 4 + s);
    RUN(optimizer_update, &slice, &c->step);
}
static const Operation operation_tensor_update = {"optimizer_update", call_tensor_update};

// The step, and the arrays of tensor_slice and the states, for N elements in `blocks` quantization blocks.
static void tensor_update_arrays(Case* c, OptimizerKind kind, bool master_weights, size_t blocks, uint64_t step) {
    size_t N = c->s.N, at;
    c->step = test_step(kind, step);
    c->witness = 0;
    array(c, "params", master_weights ? OUTPUT : IN_PLACE, STORED, N, 1);
    array(c, "masters", IN_PLACE, FLOAT, master_weights ? N : 0, 1);
    array(c, "grads", INPUT, FLOAT, N, 1);
    array(c, "scratch", UNREAD, FLOAT, optimizer_scratch_floats(kind, &c->tensor, 0), 1);
    for (size_t state = 0; state < optimizer_states(kind); state++) {
        const OptimizerState* o = &OPTIMIZERS[kind].states[state];
        Kind type = o->dtype == DTYPE_U8 ? BYTE : o->dtype == DTYPE_BF16 ? HALF : FLOAT;
        size_t n = o->shape == STATE_BLOCKS ? blocks : optimizer_state_part(&at, o->shape, &c->tensor, 0, 0, N);
        Array* a = array(c, o->name, IN_PLACE, type, n, 1);
        for (size_t i = 0; i < a->n; i++) {
            double value = array_get(a, a->start, i), uniform = (double)random_bits(2, RANDOM_TEST, state, i);
            if (type == BYTE) array_set(a, a->start, i, fmod(uniform, 256.0));
            else if (strcmp(o->name, "m") != 0) array_set(a, a->start, i, 0.01 + fabs(value));
        }
    }
}

// How far CUDA's results may be from the CPU's, for sums of `length` terms.
static void tensor_update_bounds(Case* c, size_t length) {
    bool master_weights = c->arrays[1].n > 0;
    for (int i = 0; ON_CUDA && i < c->count; i++) {
        Array* a = &c->arrays[i];
        if (!is_output(a)) continue;
        a->length = length;
        a->expected = result(a->n);
        for (size_t k = 0; k < a->n; k++) {
            double old = i < 2 ? fabs(array_get(&c->arrays[master_weights], c->arrays[master_weights].start, k)) : 30.0;
            result_add(a->expected, k, 0.0, i < 2 ? old + (double)c->step.lr * 30.0 : old);
            if (i == 0 && !master_weights && !FLOATX_IS_FLOAT)  // stochastic rounding
                a->expected->rounded[k] = fmax(old, SMALLEST_NORMAL);
        }
    }
}

static void test_tensor_update(OptimizerKind kind, bool master_weights, TensorShape tensor, uint64_t step) {
    if (!wanted("optimizer_update")) return;
    size_t N = shape_elements(&tensor);
    Shape s = {.N = N, .first_position = 64};
    Case c = case_begin(operation_tensor_update, &s, "%s %zux%zu step=%zu%s", OPTIMIZERS[kind].name, tensor.rows,
                        tensor.cols, (size_t)step, master_weights ? " masters" : "");
    c.tensor = tensor;
    tensor_update_arrays(&c, kind, master_weights, divide_up(N, OPTIMIZER_BLOCK), step);
    tensor_update_bounds(&c, tensor.rows + tensor.cols);
    case_prove(&c);
    release();
}

// Many slices in one call: most have 8 elements, and there are more than one CUDA launch takes; then longer ones, some
// at unaligned offsets. Every third has no weight decay.

enum { LIST_SHORT = 330, LIST_SLICES = LIST_SHORT + 5, LIST_ELEMENTS = 8 * LIST_SHORT + 2360 };

// The length of slice i.
static size_t list_slice_length(size_t i) {
    static const size_t longer[5] = {1024, 1032, 3, 1, 300};
    return i < LIST_SHORT ? 8 : longer[i % 5];
}

static size_t list_blocks(void) {
    size_t blocks = 0;
    for (size_t i = 0; i < LIST_SLICES; i++) blocks += divide_up(list_slice_length(i), OPTIMIZER_BLOCK);
    return blocks;
}

// The case's arrays: those of tensor_slice, then the states.
static void list_slices(const Case* c, OptimizerSlice slices[LIST_SLICES]) {
    for (size_t i = 0, begin = 0, block = 0; i < LIST_SLICES; i++) {
        OptimizerSlice* slice = &slices[i];
        *slice = tensor_slice(c);
        slice->params += begin;
        if (slice->master_weights) slice->master_weights += begin;
        slice->grads += begin;
        slice->first += begin;
        slice->n = slice->shape.rows = list_slice_length(i);
        slice->no_decay = i % 3 == 0;
        slice->lr_factor = i % 4 == 1 ? 2.0f : 0.0f;
        for (size_t s = 0; s < optimizer_states(c->step.kind); s++) {
            const OptimizerState* o = &OPTIMIZERS[c->step.kind].states[s];
            slice->states[s] = (char*)at(c, 4 + (int)s) + dtype_bytes(o->dtype) *
                               (o->shape == STATE_BLOCKS ? block : begin);
        }
        begin += slice->n;
        block += divide_up(slice->n, OPTIMIZER_BLOCK);
    }
}

static void call_list(const Case* c) {
    OptimizerSlice slices[LIST_SLICES];
    list_slices(c, slices);
    RUN(optimizer_update_list, slices, LIST_SLICES, &c->step);
}
static const Operation operation_list = {"optimizer_update_list", call_list};

static void call_list_one_by_one(const Case* c) {
    OptimizerSlice slices[LIST_SLICES];
    list_slices(c, slices);
    for (size_t i = 0; i < LIST_SLICES; i++) {
        OptimizerStep own = c->step;
        own.weight_decay = slices[i].no_decay ? 0.0f : 0.1f;
        if (slices[i].lr_factor != 0) own.lr *= 2.0f;
        slices[i].no_decay = false;
        slices[i].lr_factor = 0;
        RUN(optimizer_update, &slices[i], &own);
    }
}

static void test_optimizer_list(OptimizerKind kind, bool master_weights) {
    if (!wanted("optimizer_update_list")) return;
    Shape s = {.N = LIST_ELEMENTS, .first_position = 64};
    Case c = case_begin(operation_list, &s, "%s%s", OPTIMIZERS[kind].name, master_weights ? " masters" : "");
    tensor_update_arrays(&c, kind, master_weights, list_blocks(), 10);
    tensor_update_bounds(&c, 1);
    case_prove(&c);
    void* together[ARRAYS];
    for (int i = 0; i < c.count; i++) {
        if (!is_output(&c.arrays[i])) continue;
        together[i] = hold(array_bytes(&c.arrays[i]));
        memcpy(together[i], made(&c.arrays[i]), array_bytes(&c.arrays[i]));
    }
    c.call = call_list_one_by_one;
    c.name = "optimizer_update, one by one";
    case_prove(&c);
    bool same = true;
    for (int i = 0; i < c.count; i++)
        if (is_output(&c.arrays[i])) same &= memcmp(together[i], made(&c.arrays[i]), array_bytes(&c.arrays[i])) == 0;
    case_check(&c, same, "same bits");
    release();
}

// ------------------------------------------------------------------------------------------------
// Shapes that divide by nothing, and some that do. The larger ones take too long in the emulator.

static void test_odd_shapes(void) {
    for (int order = 0; order < 4; order++) {
        Positions positions = (Positions)order;
        test_embedding(1, 1, 1, 3, positions, 0, TOKENS_RANDOM);
        test_embedding(2, 5, 7, 4, positions, 3, TOKENS_RANDOM);
        test_embedding(3, 33, 36, 20, positions, 0, TOKENS_RANDOM);
        test_embedding(3, 33, 40, 20, positions, 0, TOKENS_ORDERED);
        if (positions > POSITIONS_ORDERED) continue;
        test_embedding(2, 65, 129, 50, positions, 7, TOKENS_RANDOM);
        test_embedding(2, 65, 129, 50, positions, 7, TOKENS_EQUAL);
        test_embedding(1, 130, ON_CUDA ? 264 : 768, 257, positions, 1, TOKENS_RANDOM);
    }
    test_embedding(3, 700, 3, 40, POSITIONS_ORDERED, 0, TOKENS_RANDOM);  // more rows than a block of a GPU sorts
    for (int kind = 0; kind < 4; kind++) {
        bool layernorm = kind / 2, branch = kind % 2;
        test_norm(layernorm, branch, 1, 1, 1.0);
        test_norm(layernorm, branch, 5, 7, 1.0);
        test_norm(layernorm, branch, 33, 36, 1.0);
        test_norm(layernorm, branch, 33, 40, 1.0);
        test_norm(layernorm, branch, 65, 129, 100.0);
        test_norm(layernorm, branch, ON_CUDA ? 5 : 130, 768, 0.01);
        test_norm(layernorm, branch, 2, 1600, 1.0);
    }
    for (int bias = 0; bias < 2; bias++) {
        test_matmul(1, 1, 1, bias);
        test_matmul(5, 7, 3, bias);
        test_matmul(33, 1, 36, bias);
        test_matmul(2, 257, 129, bias);
        test_matmul(65, 36, 1, bias);
        test_matmul(65, 40, 1, bias);
        test_matmul(16, 24, 64, bias);
        test_matmul(67, 72, 136, bias);
        if (!ON_CUDA) test_matmul(130, 129, 768, bias);
    }
    test_qk_norm(1, 1, 1, 2, 1);
    test_qk_norm(3, 4, 2, 10, 1);
    test_qk_norm(5, 3, 1, 16, 100);
    test_qk_norm(33, 4, 2, 64, 1);
    test_qk_norm(9, 9, 3, 136, 1e-3);
    test_qk_norm(17, 2, 1, 256, 1);
    test_rope(1, 1, 1, 1, 2, 0, 10000.0f);
    test_rope(2, 5, 4, 2, 6, 0, 10000.0f);
    test_rope(2, 33, 4, 1, 10, 5, 10000.0f);
    test_rope(1, 65, 3, 3, 12, 100, 500000.0f);
    test_rope(1, 17, 3, 3, 16, 100, 500000.0f);
    test_rope(1, 9, 2, 2, 256, 300, 500000.0f);
    if (!ON_CUDA) test_rope(1, 130, 2, 2, 256, 3000, 500000.0f);
    test_heads(1, 1, 1, 0, 2);
    test_heads(1, 3, 4, 2, 10);
    test_heads(2, 1, 4, 2, 8);
    test_heads(2, 7, 6, 2, 6);
    test_heads(3, 5, 9, 3, 16);
    test_heads(4, 33, 4, 4, 8);
    test_heads(4, 9, 12, 0, 20);
    test_heads(8, 3, 16, 8, 72);
    test_heads(2, 65, 2, 0, 128);
    test_heads(2, 5, 4, 2, 520);
    for (size_t copies = 1; copies <= 4; copies++)
        for (size_t K = 1; K <= 4; K++) {
            test_heads_copies(copies, K, copies * K, K, 2 * copies + 3);
            test_heads_copies(copies, 5 - K, copies * K, K, 8 * K);
        }
    test_heads_copies(1, 1, 1, 1, 1);
    test_heads_copies(2, 9, 3, 0, 8);
    test_heads_copies(5, 33, 10, 1, 16);
    test_heads_copies(8, 3, 16, 2, 72);
    test_heads_copies(4, 65, 8, 2, 128);
    test_heads_copies(2, 5, 4, 2, 520);
    test_heads_copies(3, 2, 3, 1, 521);
    test_pair_columns(1, 1, 0, 1, 1.0f);
    test_pair_columns(3, 40, 0, 40, 0.5f);
    test_pair_columns(5, 96, 32, 16, 2.0f);
    test_pair_columns(7, 41, 40, 1, -1.5f);
    test_pair_columns(9, 72, 24, 40, 0.3f);
    test_pair_columns(33, 80, 3, 24, 1.7f);
    test_pair_columns(2, 4100, 4, 4096, 0.25f);
    test_columns(1, 1, 1, 1);
    test_columns(5, 7, 7, 10);
    test_columns(33, 24, 64, 24);
    test_columns(3, 3, 8, 16);
    test_columns(9, 1040, 1048, 2080);
    for (size_t count = 1, i = 0; count <= LEAVES_MAX; count *= 2, i++) {
        test_leaves_sum(count, 1 + i, 7, i % 2);
        test_leaves_sum(count, 3, i % 3 == 2 ? 1100 : 40, i % 2 == 0);
    }
    for (int doubled = 0; doubled < 2; doubled++) {
        test_nf4(0, 1, 1, doubled);
        test_nf4(0, 64, 64, doubled);
        test_nf4(3, 130, 140, doubled);
        test_nf4(2, 256, 300, doubled);
        test_nf4(64, 4096, 5003, doubled);
        test_nf4(40, 72 * 8, 16384 + 64 * 3, doubled);
        test_nf4(16320, 264, 16384 + 64 * 4, doubled);
        test_nf4(0, 20001, 20001, doubled);
    }
    for (int positioned = 0; positioned < 2; positioned++) {
        test_embedding_parts(1, 3, 1, 1, positioned, TOKENS_RANDOM);
        test_embedding_parts(2, 5, 33, 7, positioned, TOKENS_RANDOM);
        test_embedding_parts(4, 9, 99, 40, positioned, TOKENS_RANDOM);
        test_embedding_parts(4, 2, 130, 72, positioned, TOKENS_EQUAL);
        test_embedding_parts(8, 4, 70, 8, positioned, TOKENS_ORDERED);
    }

    test_attention(1, 1, 1, 1, 1, 1.0);
    test_attention(2, 3, 2, 1, 2, 1.0);
    test_attention(1, 33, 4, 2, 2, 1.0);
    test_attention(2, 7, 4, 2, 16, 1.0);
    test_attention(1, 9, 4, 1, 10, 1.0);
    test_attention(1, 33, 6, 1, 33, 1.0);
    test_attention(2, 33, 6, 2, 10, 1.0);
    test_attention(1, 32, 4, 4, 12, 1.0);
    test_attention(1, 65, 4, 2, 12, 1.0);
    test_attention(1, 64, 2, 2, 32, 1.0);
    test_attention(1, 64, 2, 2, 64, 1.0);
    test_attention(1, ON_CUDA ? 77 : 65, 2, 1, 80, 3.0);
    test_attention(2, 130, 2, 1, 64, 1.0);
    test_attention(1, 65, 2, 2, 96, 1.0);
    test_attention(1, ON_CUDA ? 70 : 130, 2, 2, 128, 0.1);
    test_attention(1, 65, 2, 1, 256, 1.0);
    test_attention(1, ON_CUDA ? 3 : 577, 1, 1, 256, 1.0);  // more keys than fit into a thread's memory
    test_attention(1, 150, ON_CUDA ? 1 : 3, ON_CUDA ? 1 : 3, 80, 4.0);  // scores up to about 80
    test_attention(1, 129, 1, 1, 1, 10.0);                              // scores up to about 500

    for (int gelu = 0; gelu < 2; gelu++) {
        test_nonlinearity(gelu, 1, 1, 1.0);
        test_nonlinearity(gelu, 5, 7, 1.0);
        test_nonlinearity(gelu, 33, 129, 3.0);
        test_nonlinearity(gelu, ON_CUDA ? 9 : 65, 768, 30.0);
        test_nonlinearity(gelu, 7, 36, gelu || !FP16 ? 1e4 : 100.0);  // FP16's maximum is 65504
        test_nonlinearity(gelu, 7, 40, gelu || !FP16 ? 1e4 : 100.0);
    }
    test_dropout(1, 0, 0.1f);
    test_dropout(7, 3, 0.0f);
    test_dropout(1000, 1, 0.5f);
    test_dropout(ON_CUDA ? 5000 : 99999, 6, 0.1f);
    test_dropout(ON_CUDA ? 5003 : 99999, ((size_t)1 << 40) + 1, 0.9f);

    test_classifier(1, 1, 1, 1.0, 0, 1.0f);
    test_classifier(5, 7, 8, 1.0, 3, 0.25f);
    test_classifier(ON_CUDA ? 9 : 33, 257, 384, 1.0, 4, 1.0f / 33);
    test_classifier(ON_CUDA ? 8 : 65, 257, ON_CUDA ? 257 : 384, 3.0, 0, 1024.0f / 65);
    test_classifier(9, 257, 384, 20.0, 4, 1.0f);                                                     // to +- 80
    test_classifier(ON_CUDA ? 9 : 29, ON_CUDA ? 2500 : 257, ON_CUDA ? 2504 : 384, 2500.0, 3, 1.0f);  // to +- 1e4
    test_classifier(4, 257, 384, 1.0, 1, 1.0f);                                                      // no targets
    test_classifier_parts(1, 5, 7, 8, 1.0, 3, 0.25f);
    test_classifier_parts(1, 9, 257, 384, 3.0, 0, 1.0f);
    test_classifier_parts(4, 5, 19, 20, 1.0, 3, 0.25f);    // leaves of 5 logits
    test_classifier_parts(4, 9, 250, 256, 20.0, 4, 1.0f);
    test_classifier_parts(8, 7, 257, 384, 3.0, 0, 1.0f);   // leaves of padding alone
    test_classifier_parts(4, 9, 90, 96, 2500.0, 0, 1.0f);  // a rank's rows may be packed where a leaf's are not

    static const size_t lengths[7] = {0, 1, 2, 33, 255, 4096, ON_CUDA ? 20001 : 70001};
    for (int i = 0; i < 7; i++) test_vectors(lengths[i]), test_residual(lengths[i]);
    static const TensorShape tensors[6] = {{1, 1, false, 0, 0}, {5, 7, false, 0, 0}, {36, 40, true, 24, 8},
                                           {3, 700, true, 0, 0}, {300, 0, false, 0, 0}, {1, 0, false, 0, 0}};
    for (int kind = OPTIMIZER_ELEMENTWISE; kind <= OPTIMIZER_SM3; kind++)
        for (int i = 0; i < 12; i++)
            test_tensor_update((OptimizerKind)kind, i % 2, tensors[i / 2], i < 6 ? 10 : 1);
    test_optimizer_list(OPTIMIZER_ADAMW, true);
    test_optimizer_list(OPTIMIZER_ADAMW_8BIT, false);
    test_optimizer_list(OPTIMIZER_ADAMW_BF16, false);
    for (int kind = 0; !ON_CUDA && kind <= OPTIMIZER_ADAMW_BF16; kind++)
        test_optimizer_list((OptimizerKind)kind, kind % 2);
    for (int kind = 0; kind < OPTIMIZER_ELEMENTWISE; kind++) {
        for (int master_weights = 0; master_weights < 2; master_weights++) {
            test_optimizer((OptimizerKind)kind, master_weights, 1, 1001, 1);
            test_optimizer((OptimizerKind)kind, master_weights, 2048, 4096, 1);
            test_optimizer((OptimizerKind)kind, master_weights, ON_CUDA ? 2051 : 5001, 1001, 1);
            test_optimizer((OptimizerKind)kind, master_weights, ON_CUDA ? 2051 : 5001, 1001, 1000);
        }
    }
}

#endif  // LLMTRAIN_OPERATIONS_H
