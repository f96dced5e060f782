// test_cuda.cu: proves every operation of the CUDA backend against the CPU operation of the same name, for one storage
// type (-DPRECISION_BF16, -DPRECISION_FP16, or float). The CPU operations are proved by test_kernels.c.
//
//     nvcc -std=c++17 -O3 -arch=native -DLLMTRAIN_CUDA -I. -Xcompiler -fopenmp dev/test/test_cuda.cu
//         -o build/test_cuda -lcublasLt
//     build/test_cuda                        the same where dev/emulator and a C++ compiler have built it
//     build/test_cuda --only attention       the operations with that in their names
//     build/test_cuda --shapes huge          on a GPU: vectors of more than 2^31 elements as well
//     build/test_cuda --shapes tiny --exact  for compute-sanitizer: a few shapes, each array in memory of its own to
//                                            the byte, where guard zones would be valid, and outputs not yet written
//
// An output is right if for each element
//
//     |CUDA - CPU| <= 2 (epsilon (|CPU| + rounded) + 4 sqrt(length) u (size + |start|) + tiny)
//
// which is twice the bound that test_kernels.c puts on the distance between the CPU operation and the truth, with the
// letters explained there; size and rounded come from the double references of reference.h, element by element, and
// u = 2^-24, or 2^-53 for sums of doubles. Where nothing is rounded differently, the bits must be the same. A NaN
// fails.
//
// Around the values, for each operation and shape, once with arrays on 256 bytes and once with all of them moved by one
// element, so that the kernels for 16 bytes at a time and for one element both run:
//   - what is overwritten starts as NaN; what is added to starts as random numbers, and must have been added to
//   - the bytes before and behind each output, and behind the scratch memory that the operation said it needs, stay
//   - inputs stay as they were
//   - a second run, on scratch memory filled with other bytes, gives the same bits
//   - a NaN in any input shows in the outputs

#include "kernels.cuh"
#include "llmtrain/flags.h"
#include "dev/test/reference.h"

#ifdef PRECISION_FP16
enum { FP16 = 1 };
#else
enum { FP16 = 0 };
#endif

// The smallest number with all its places: what is stored below it has an absolute error, not a relative one.
#define SMALLEST_NORMAL (FP16 ? 0x1p-14 : 0x1p-126)

static int passed, failed;
static Stream stream;
static const char* only;  // of the operations to test: what must be in their names
static bool exact_memory;
typedef enum { SHAPES_TINY, SHAPES_ODD, SHAPES_LARGE, SHAPES_HUGE } Shapes;
static int shapes;

__attribute__((format(printf, 2, 3)))
static void check(bool ok, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs(ok ? "ok      " : "FAILED  ", stdout);
    vprintf(format, arguments);
    putchar('\n');
    fflush(stdout);
    va_end(arguments);
    if (ok) passed++; else failed++;
}

static char* held_scratch;  // of scratch_memory
static size_t held_scratch_bytes;

static bool wanted(const char* name) { return only == NULL || strstr(name, only) != NULL; }

// ------------------------------------------------------------------------------------------------
// Memory of the host: freed together after each case

static void* held[256];
static size_t held_count;

static void* hold(size_t bytes) {
    void* memory = allocate(bytes);
    if (memory == NULL || held_count == sizeof held / sizeof held[0]) {
        fputs("test_cuda: no memory for a case\n", stderr);
        exit(1);
    }
    return held[held_count++] = memory;
}

static void release(void) {
    while (held_count > 0) free(held[--held_count]);
}

static Result result(size_t n) {
    Result r;
    r.value = (double*)hold(n * sizeof(double));
    r.size = (double*)hold(n * sizeof(double));
    r.rounded = (double*)hold(n * sizeof(double));
    r.n = n;
    return r;
}

// ------------------------------------------------------------------------------------------------
// Cases: one call of one operation
//
// An array of a case is an input, an output that is overwritten, one that is added to, one that is worked on in place,
// or memory that the operation uses and nobody reads. The call sees the arrays in the order in which they were made.

enum { GUARD = 256, ARRAYS = 10 };
typedef enum { INPUT, OUTPUT, ADDED, IN_PLACE, UNREAD } Role;
typedef enum { STORED, FLOAT, DOUBLE, INTEGER, LONG } Kind;  // the last two: int32_t, int64_t

typedef struct {
    const char* name;
    Role role;
    Kind kind;
    size_t n;
    size_t live;          // an element that must matter to the outputs
    void *start, *host;   // before any call; of the CPU operation
    void *got, *first;    // of the CUDA operation: its newest run, and the one before
    char *device;         // allocation: guard, elements, guard
    void* elements;       // on the device
    const Result* bound;  // NULL: the same bits as on the CPU
    size_t length;
} Array;

typedef struct Case {
    const char* name;
    char shape[80];
    void (*call)(const struct Case* c);
    Shape s;
    Array arrays[ARRAYS];
    int count;
    int witness;           // the output that must show a NaN in any input, or -1: any of them
    bool changes;          // it shows by other bits than those without the NaN, since outputs are integers
    bool on_cpu;
    size_t scratch_bytes;  // that the CUDA operation says it needs
    float p, dloss;
    double scale, limit;
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

static size_t kind_bytes(Kind kind) {
    return kind == STORED ? sizeof(floatX) : kind == DOUBLE || kind == LONG ? sizeof(double) : sizeof(float);
}
static size_t array_bytes(const Array* a) { return a->n * kind_bytes(a->kind); }

static double array_get(const Array* a, const void* data, size_t i) {
    if (a->kind == STORED) return (double)float_of(((const floatX*)data)[i]);
    if (a->kind == FLOAT) return (double)((const float*)data)[i];
    if (a->kind == DOUBLE) return ((const double*)data)[i];
    if (a->kind == LONG) return (double)((const int64_t*)data)[i];
    return (double)((const int32_t*)data)[i];
}

static void array_set(const Array* a, void* data, size_t i, double x) {
    if (a->kind == STORED) ((floatX*)data)[i] = floatX_of((float)x);
    else if (a->kind == FLOAT) ((float*)data)[i] = (float)x;
    else if (a->kind == DOUBLE) ((double*)data)[i] = x;
    else if (a->kind == LONG) ((int64_t*)data)[i] = (int64_t)x;
    else ((int32_t*)data)[i] = (int32_t)x;
}

// An array of n normal random numbers times `scale`, rounded to its type; n = 0 is NULL.
static Array* case_array(Case* c, const char* name, Role role, Kind kind, size_t n, double scale) {
    Array* a = &c->arrays[c->count++];
    a->name = name;
    a->role = role;
    a->kind = kind;
    a->n = n;
    if (n == 0) return a;
    a->live = n / 2;
    a->start = hold(array_bytes(a));
    a->host = hold(array_bytes(a));
    a->got = hold(array_bytes(a));
    a->first = hold(array_bytes(a));
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        array_set(a, a->start, i, scale * random_normal(1, RANDOM_TEST, cases * ARRAYS + (uint64_t)c->count, i));
    return a;
}

static Array* input(Case* c, const char* name, size_t n, double scale) {
    return case_array(c, name, INPUT, STORED, n, scale);
}
static Array* output(Case* c, const char* name, size_t n) { return case_array(c, name, OUTPUT, STORED, n, 1); }
static Array* in_place(Case* c, const char* name, size_t n) { return case_array(c, name, IN_PLACE, STORED, n, 1); }
static Array* input_float(Case* c, const char* name, size_t n) { return case_array(c, name, INPUT, FLOAT, n, 1); }
static Array* output_float(Case* c, const char* name, size_t n) { return case_array(c, name, OUTPUT, FLOAT, n, 1); }
static Array* added_float(Case* c, const char* name, size_t n) { return case_array(c, name, ADDED, FLOAT, n, 1); }
static Array* in_place_float(Case* c, const char* name, size_t n) { return case_array(c, name, IN_PLACE, FLOAT, n, 1); }

// An input with the values of an array on the host; NULL where there is none.
static Array* input_from(Case* c, const char* name, Kind kind, size_t n, const void* values) {
    Array* a = case_array(c, name, INPUT, kind, n, 1);
    if (n > 0) memcpy(a->start, values, array_bytes(a));
    return a;
}

// The array as the call takes it.
static void* at(const Case* c, int array) { return c->on_cpu ? c->arrays[array].host : c->arrays[array].elements; }
static floatX* x(const Case* c, int array) { return (floatX*)at(c, array); }
static float* f(const Case* c, int array) { return (float*)at(c, array); }
static double* d(const Case* c, int array) { return (double*)at(c, array); }
static int32_t* i32(const Case* c, int array) { return (int32_t*)at(c, array); }
static int64_t* i64(const Case* c, int array) { return (int64_t*)at(c, array); }

#define RUN(operation, ...) \
    do { \
        if (c->on_cpu) cpu::operation(__VA_ARGS__, NULL); \
        else ::operation(__VA_ARGS__, stream); \
    } while (0)

// What an array holds on the host, in double: its starting values, or those of the CPU operation. NULL if there is
// none.
static double* doubles(const Case* c, int array, bool after) {
    const Array* a = &c->arrays[array];
    if (a->n == 0) return NULL;
    double* r = (double*)hold(a->n * sizeof(double));
    for (size_t i = 0; i < a->n; i++) r[i] = array_get(a, after ? a->host : a->start, i);
    return r;
}

// Says that an output is to be compared within the reference's bound, with sums of this length.
static void bounded(Case* c, int array, const Result* r, size_t length) {
    c->arrays[array].bound = r;
    c->arrays[array].length = length;
}

// ------------------------------------------------------------------------------------------------
// Runs

// Fresh values, of which the live one of `poison`, if that is not NULL, is NaN.
static void array_fresh(const Array* a, void* data, const Array* poison) {
    if (a->role == OUTPUT || a->role == UNREAD) memset(data, 0xFF, array_bytes(a));  // NaN in every type
    else memcpy(data, a->start, array_bytes(a));
    if (a == poison) array_set(a, data, a->live, NAN);
}

// Leaves the outputs in the arrays' `host`.
static void case_cpu(Case* c, const Array* poison) {
    for (int i = 0; i < c->count; i++)
        if (c->arrays[i].n > 0) array_fresh(&c->arrays[i], c->arrays[i].host, poison);
    c->on_cpu = true;
    c->call(c);
    c->on_cpu = false;
}

static void* device_memory(size_t bytes) {
    Error error;
    void* memory = device_allocate(max_size(bytes, 1), stream, &error);
    if (memory != NULL) return memory;
    fprintf(stderr, "test_cuda: %s\n", error.text);
    exit(1);
}

// Memory for a case: full of the pattern of the guards, or, for the sanitizers, never written.
static void* fresh_memory(size_t bytes) {
    void* memory = NULL;
    if (!exact_memory) memory = device_memory(bytes);
    else CUDA_CHECK(cudaMalloc(&memory, max_size(bytes, 1)));
    if (!exact_memory) CUDA_CHECK(cudaMemsetAsync(memory, 0xA5, bytes, stream->compute));
    return memory;
}

// Scratch memory of so many bytes, with a guard behind it: always the same, since operations may ask for a lot. Of that
// the beginning, which is where they use it, is filled.
static char* scratch_memory(size_t bytes, unsigned char filling) {
    const size_t filled = min_size(bytes, (size_t)1 << 20);
    if (exact_memory) return (char*)fresh_memory(bytes);
    if (bytes + GUARD > held_scratch_bytes) {
        if (held_scratch) CUDA_CHECK(cudaFree(held_scratch));
        held_scratch_bytes = bytes + GUARD;
        held_scratch = (char*)device_memory(held_scratch_bytes);
    }
    CUDA_CHECK(cudaMemsetAsync(held_scratch, filling, filled, stream->compute));
    CUDA_CHECK(cudaMemsetAsync(held_scratch + bytes, 0xA5, GUARD, stream->compute));
    return held_scratch;
}

static bool guard_intact(const char* device) {
    unsigned char guard[GUARD];
    download(guard, device, GUARD, stream);
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0xA5) return false;
    return true;
}

// One run of the CUDA operation, with all arrays moved by `shift` elements and the scratch memory full of `filling`.
// The outputs are then in the arrays' `got`. Adds to `broken` what was touched that must not be.
static void case_cuda_run(Case* c, size_t shift, unsigned char filling, const Array* poison, char* broken,
                          size_t size) {
    size_t guard = exact_memory ? 0 : GUARD;
    for (int i = 0; i < c->count; i++) {
        Array* a = &c->arrays[i];
        if (a->n == 0) continue;
        size_t moved = guard + shift * kind_bytes(a->kind), bytes = array_bytes(a);
        a->device = (char*)fresh_memory(moved + bytes + guard);
        a->elements = a->device + moved;
        if (exact_memory && (a->role == OUTPUT || a->role == UNREAD)) continue;
        array_fresh(a, a->got, poison);
        upload(a->elements, a->got, bytes, stream);
    }
    char* scratch = scratch_memory(c->scratch_bytes, filling);
    stream->scratch = scratch;
    stream->scratch_bytes = c->scratch_bytes;

    c->call(c);
    CUDA_CHECK(cudaStreamSynchronize(stream->compute));
    stream->scratch = NULL;
    stream->scratch_bytes = 0;

    if (guard > 0 && !guard_intact(scratch + c->scratch_bytes)) snprintf(broken, size, "behind the scratch memory");
    if (exact_memory) CUDA_CHECK(cudaFree(scratch));
    for (int i = 0; i < c->count; i++) {
        Array* a = &c->arrays[i];
        if (a->n == 0) continue;
        if (a->role != UNREAD) download(a->got, a->elements, array_bytes(a), stream);
        char* elements = (char*)a->elements;
        if (guard > 0 && !(guard_intact(elements - GUARD) && guard_intact(elements + array_bytes(a))))
            snprintf(broken, size, "outside of %s", a->name);
        bool changed = a->role == INPUT && poison != a && memcmp(a->got, a->start, array_bytes(a)) != 0;
        if (changed) snprintf(broken, size, "the input %s", a->name);
        CUDA_CHECK(cudaFree(a->device));
        a->device = NULL;
        a->elements = NULL;
    }
}

static bool is_output(const Array* a) { return a->n > 0 && a->role != INPUT && a->role != UNREAD; }

// Whether a NaN shows: in the witness if there is one, in what was added to a poisoned sum, otherwise in an output that
// is not the poisoned array, unless that is all there is.
static bool case_shows(const Case* c, const Array* poison, bool host) {
    int others = 0;
    for (int i = 0; i < c->count; i++) others += is_output(&c->arrays[i]) && &c->arrays[i] != poison;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (!is_output(a) || (c->witness >= 0 && i != c->witness)) continue;
        if (c->witness < 0 && (poison->role == ADDED ? a != poison : a == poison && others > 0)) continue;
        if (c->changes && memcmp(host ? a->host : a->got, a->first, array_bytes(a)) != 0) return true;
        for (size_t j = 0; j < a->n; j++)
            if (isnan(array_get(a, host ? a->host : a->got, j))) return true;
    }
    return false;
}

// The outputs in `got` against those of the CPU; prints the element whose error is the largest part of its bound.
static void case_compare(const Case* c, const Array* a, const char* where) {
    double worst = -1.0, worst_error = 0.0, worst_bound = 0.0, tiny = a->kind == STORED && FP16 ? 0x1p-25 : 0x1p-125;
    double unit = a->kind == DOUBLE ? 0x1p-53 : 0x1p-24, epsilon = a->kind == STORED ? (double)FLOATX_EPSILON : 0.0;
    size_t wrong = 0, first = 0;
    if (a->bound == NULL) {
        for (size_t i = 0; i < a->n; i++) {
            size_t bytes = kind_bytes(a->kind);
            if (memcmp((char*)a->got + i * bytes, (char*)a->host + i * bytes, bytes) != 0 && wrong++ == 0) first = i;
        }
        check(wrong == 0, "%-28s %-34s %s %-6s %-16s same bits", c->name, c->shape, FLOATX_NAME, where, a->name);
    } else {
        for (size_t i = 0; i < a->n && i < a->bound->n; i++) {
            double cpu = array_get(a, a->host, i), start = a->role == ADDED ? array_get(a, a->start, i) : 0.0;
            double error = fabs(array_get(a, a->got, i) - cpu);
            double bound = 2.0 * (epsilon * fabs(cpu) + (double)FLOATX_EPSILON * a->bound->rounded[i]
                                  + 4.0 * sqrt((double)a->length) * unit * (a->bound->size[i] + fabs(start)) + tiny);
            if (!(error <= bound) && wrong++ == 0) first = i;
            if (isnan(worst) || error / bound <= worst) continue;
            worst = error / bound;
            worst_error = error;
            worst_bound = bound;
        }
        check(wrong == 0 && a->n == a->bound->n, "%-28s %-34s %s %-6s %-16s err %.1e <= %.1e", c->name, c->shape,
              FLOATX_NAME, where, a->name, worst_error, worst_bound);
    }
    if (wrong > 0)
        printf("        %zu of %zu elements are wrong; the first is number %zu: %.9g, on the CPU %.9g\n", wrong, a->n,
               first, array_get(a, a->got, first), array_get(a, a->host, first));
}

// Everything about a case whose outputs on the CPU are there. Leaves those of the CUDA operation in `got`.
static void case_prove(Case* c) {
    char broken[128] = "", swallowed[128] = "";
    for (size_t shift = 0; shift < 2; shift++) {
        bool same = true;
        const char* where = shift ? "moved" : "";
        for (int run = 0; run < (shapes == SHAPES_TINY ? 1 : 2); run++) {
            case_cuda_run(c, shift, run ? 0x00 : 0xFF, NULL, broken, sizeof broken);
            for (int i = 0; i < c->count; i++) {
                const Array* a = &c->arrays[i];
                if (!is_output(a)) continue;
                if (run == 1) same = same && memcmp(a->first, a->got, array_bytes(a)) == 0;
                memcpy(a->first, a->got, array_bytes(a));
            }
        }
        for (int i = 0; i < c->count; i++)
            if (is_output(&c->arrays[i])) case_compare(c, &c->arrays[i], where);
        check(same && broken[0] == 0, "%-28s %-34s %s %-6s twice: %s, touched: %s", c->name, c->shape, FLOATX_NAME,
              where, shapes == SHAPES_TINY ? "not run" : same ? "same bits" : "DIFFERENT",
              broken[0] ? broken : "outputs only");
    }
    if (shapes == SHAPES_TINY) return;
    // Each array is made NaN in turn, unless it cannot be; then the clean run is put back for the caller.
    int tried = 0;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (a->n == 0 || a->role == OUTPUT || a->role == UNREAD || a->kind == INTEGER || a->kind == LONG) continue;
        tried++;
        case_cpu(c, a);
        bool expected = case_shows(c, a, true);
        case_cuda_run(c, 0, 0xFF, a, broken, sizeof broken);
        size_t length = strlen(swallowed);
        if (!expected || !case_shows(c, a, false))
            snprintf(swallowed + length, sizeof swallowed - length, " NaN in %s%s", a->name,
                     expected ? "" : " (by the CPU)");
    }
    if (tried > 0)
        check(swallowed[0] == 0, "%-28s %-34s %s swallowed:%s", c->name, c->shape, FLOATX_NAME,
              swallowed[0] ? swallowed : " nothing");
    case_cpu(c, NULL);
    for (int i = 0; i < c->count; i++)
        if (is_output(&c->arrays[i])) memcpy(c->arrays[i].got, c->arrays[i].first, array_bytes(&c->arrays[i]));
}

// ------------------------------------------------------------------------------------------------
// Device: what device.cuh promises

// out (n) = what is in tokens and targets (n each).
static __global__ void test_join(int32_t* out, const int32_t* tokens, const int32_t* targets, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tokens[i] + targets[i];
}

static void test_device(void) {
    enum { N = 1000, BATCHES = 5 };
    const size_t bytes = N * sizeof(int32_t);
    int32_t host[N], targets[N];
    int32_t* places[2] = {(int32_t*)device_memory(2 * bytes), (int32_t*)device_memory(2 * bytes)};
    int32_t* sums[BATCHES];
    Error error;
    bool zero = true, batches = true;
    download(host, places[1], bytes, stream);
    for (int i = 0; i < N; i++) zero = zero && host[i] == 0;
    check(zero, "device_allocate: zeros");
    bool prepared = device_prepare(stream, NULL, 0, 2 * bytes, &error);
    check(prepared, "device_prepare");
    if (!prepared) return;
    for (int batch = 0; batch < BATCHES; batch++) {
        sums[batch] = (int32_t*)device_memory(bytes);
        for (int i = 0; i < N; i++) host[i] = i, targets[i] = 1000000 * (batch + 1);
        int32_t* place = upload_batch(places, host, targets, bytes, stream);
        for (int i = 0; i < N; i++) host[i] = targets[i] = -1;  // which it says is allowed
        test_join<<<(N + 127) / 128, 128, 0, stream->compute>>>(sums[batch], place, place + N, N);
        LAUNCH_CHECK();
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        download(host, sums[batch], bytes, stream);
        for (int i = 0; i < N; i++) batches = batches && host[i] == 1000000 * (batch + 1) + i;
        device_free(sums[batch], bytes);
    }
    check(batches, "upload_batch: operations wait for their batch, and no batch overwrites one that is in use");
    fill_zero(places[0], bytes, stream);
    download(host, places[0], bytes, stream);
    zero = true;
    for (int i = 0; i < N; i++) zero = zero && host[i] == 0;
    check(zero, "fill_zero");
    device_free(places[0], 2 * bytes);
    device_free(places[1], 2 * bytes);
}

// ------------------------------------------------------------------------------------------------
// Embedding

static void call_embedding_forward(const Case* c) {
    RUN(embedding_forward, x(c, 0), i32(c, 3), x(c, 1), x(c, 2), c->s.first_position, c->s.B, c->s.T, c->s.C);
}
static void call_embedding_backward(const Case* c) {
    RUN(embedding_backward, f(c, 0), f(c, 1), x(c, 2), i32(c, 3), c->s.B, c->s.T, c->s.C);
}

typedef enum { TOKENS_RANDOM, TOKENS_EQUAL, TOKENS_DIFFERENT } Tokens;

static int32_t* make_tokens(Tokens kind, size_t n, size_t V) {
    int32_t* tokens = (int32_t*)hold(n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) {
        size_t random = random_bits(2, RANDOM_TEST, cases, i) % V;
        tokens[i] = (int32_t)(kind == TOKENS_EQUAL ? V - 1 : kind == TOKENS_DIFFERENT ? (n - i) % V : random);
    }
    return tokens;
}

static void test_embedding(size_t B, size_t T, size_t C, size_t V, bool positions, size_t first_position, Tokens kind) {
    if (!wanted("embedding_forward embedding_backward")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.B = B, s.T = T, s.C = C, s.V = V, s.first_position = first_position;
    int32_t* tokens = make_tokens(kind, B * T, V);
    s.tokens = tokens;
    size_t position_count = positions ? (first_position + T) * C : 0;
    Case c = case_begin("embedding_forward", call_embedding_forward, &s);
    snprintf(c.shape, sizeof c.shape, "B=%zu T=%zu C=%zu V=%zu at %zu%s%s", B, T, C, V, first_position,
             positions ? "" : " no pos", kind == TOKENS_EQUAL ? " equal" : kind == TOKENS_DIFFERENT ? " ordered" : "");
    output(&c, "out", B * T * C);
    input(&c, "token_weight", V * C, 1)->live = (size_t)tokens[0] * C;
    input(&c, "position_weight", position_count, 1)->live = first_position * C;
    input_from(&c, "tokens", INTEGER, B * T, tokens);
    case_cpu(&c, NULL);
    case_prove(&c);

    s.first_position = 0;
    Case b = case_begin("embedding_backward", call_embedding_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    b.scratch_bytes = embedding_backward_scratch_bytes(B, T, C);
    added_float(&b, "dtoken_weight", V * C)->live = (size_t)tokens[0] * C;
    added_float(&b, "dposition_weight", position_count);
    input(&b, "dout", B * T * C, 1);
    input_from(&b, "tokens", INTEGER, B * T, tokens);
    case_cpu(&b, NULL);
    double *in[2] = {doubles(&c, 1, false), doubles(&c, 2, false)};
    Result din[2] = {result(V * C), result(position_count)};
    reference_embedding_backward(din, doubles(&b, 2, false), in, &s);
    bounded(&b, 0, &din[0], B * T);
    bounded(&b, 1, &din[1], B);
    case_prove(&b);
    release();
}

// ------------------------------------------------------------------------------------------------
// Normalisation

static void call_layernorm_forward(const Case* c) {
    RUN(layernorm_forward, x(c, 0), x(c, 1), f(c, 2), f(c, 3), x(c, 4), x(c, 5), x(c, 6), x(c, 7), (float)c->s.epsilon,
        c->s.N, c->s.C);
}
static void call_rmsnorm_forward(const Case* c) {
    RUN(rmsnorm_forward, x(c, 0), x(c, 1), f(c, 3), x(c, 4), x(c, 5), x(c, 6), (float)c->s.epsilon, c->s.N, c->s.C);
}
static void call_layernorm_backward(const Case* c) {
    RUN(layernorm_backward, x(c, 0), f(c, 1), f(c, 2), x(c, 3), x(c, 4), x(c, 5), f(c, 6), f(c, 7), c->s.N, c->s.C);
}
static void call_rmsnorm_backward(const Case* c) {
    RUN(rmsnorm_backward, x(c, 0), f(c, 1), x(c, 3), x(c, 4), x(c, 5), f(c, 7), c->s.N, c->s.C);
}

static void test_norm(bool layernorm, bool branch, size_t N, size_t C, double scale) {
    if (!wanted(layernorm ? "layernorm_forward layernorm_backward" : "rmsnorm_forward rmsnorm_backward")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.C = C, s.mean = layernorm, s.epsilon = (double)1e-5f;
    Case c = case_begin(layernorm ? "layernorm_forward" : "rmsnorm_forward",
                        layernorm ? call_layernorm_forward : call_rmsnorm_forward, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu C=%zu x%.0g%s", N, C, scale, branch ? " branch" : "");
    output(&c, "out", N * C);
    output(&c, "residual", branch ? N * C : 0);  // the same bits: one addition and one rounding
    output_float(&c, "mean", layernorm ? N : 0);
    output_float(&c, "rstd", N);
    input(&c, "in", N * C, scale);
    input(&c, "branch", branch ? N * C : 0, scale);
    input(&c, "weight", C, 1);
    input(&c, "bias", layernorm ? C : 0, 1);
    c.witness = 0;
    case_cpu(&c, NULL);
    double* in[3] = {doubles(&c, branch ? 1 : 4, true), doubles(&c, 6, false), doubles(&c, 7, false)};
    Result out = result(N * C), mean = result(layernorm ? N : 0), rstd = result(N);
    reference_norm(&out, in, &s);
    for (size_t row = 0; row < N; row++) {
        RowStatistics r = reference_statistics(in[0] + row * C, &s);
        if (layernorm) result_add(&mean, row, r.mean, r.average);
        result_add(&rstd, row, r.rstd, r.rstd * (1.0 + r.average * r.rstd));
    }
    bounded(&c, 0, &out, C);
    bounded(&c, 2, &mean, C);
    bounded(&c, 3, &rstd, C);
    case_prove(&c);

    Case b = case_begin(layernorm ? "layernorm_backward" : "rmsnorm_backward",
                        layernorm ? call_layernorm_backward : call_rmsnorm_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    b.scratch_bytes = layernorm ? layernorm_backward_scratch_bytes(N, C) : rmsnorm_backward_scratch_bytes(N, C);
    case_array(&b, "dx", ADDED, STORED, N * C, 1);
    added_float(&b, "dweight", C);
    added_float(&b, "dbias", layernorm ? C : 0);
    input(&b, "dout", N * C, 1);
    input_from(&b, "x", STORED, N * C, c.arrays[branch ? 1 : 4].host);
    input_from(&b, "weight", STORED, C, c.arrays[6].start);
    input_from(&b, "mean", FLOAT, layernorm ? N : 0, c.arrays[2].host);
    input_from(&b, "rstd", FLOAT, N, c.arrays[3].host);
    case_cpu(&b, NULL);
    Result din[3] = {result(N * C), result(C), result(layernorm ? C : 0)};
    reference_norm_backward(din, doubles(&b, 3, false), in, &s);
    bounded(&b, 0, &din[0], C);
    bounded(&b, 1, &din[1], N + C);
    bounded(&b, 2, &din[2], N);
    case_prove(&b);
    release();
}

// ------------------------------------------------------------------------------------------------
// Matmul

static void call_matmul_forward(const Case* c) {
    RUN(matmul_forward, x(c, 0), x(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K);
}
static void call_matmul_backward_input(const Case* c) {
    RUN(matmul_backward_input, x(c, 0), x(c, 1), x(c, 2), c->s.M, c->s.N, c->s.K);
}
static void call_matmul_backward_weight(const Case* c) {
    RUN(matmul_backward_weight, f(c, 0), f(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K);
}
static void call_matmul_gelu_forward(const Case* c) {
    RUN(matmul_gelu_forward, x(c, 0), x(c, 4), x(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K);
}
static void call_matmul_gelu_backward_input(const Case* c) {
    RUN(matmul_gelu_backward_input, x(c, 0), x(c, 1), x(c, 2), x(c, 3), c->s.M, c->s.N, c->s.K);
}

// The derivative of GELU at n places, with its size, as a result for one in dout.
static Result gelu_slope(double* at, size_t n) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = n;
    Result slope = result(n);
    double *ones = (double*)hold(n * sizeof(double)), *in[1] = {at};
    for (size_t i = 0; i < n; i++) ones[i] = 1.0;
    reference_gelu_backward(&slope, ones, in, &s);
    return slope;
}

// The matmul and the GELU after it: an error of the sum moves the output by the slope there, and so does the rounding
// of the sum to floatX, which may happen before the GELU or not. Libraries take 1 + tanh(u), whose error is that of a
// 1, for what here is 2 sigmoid(2u): both forms are allowed.
static void test_matmul_gelu_forward(const Case* forward, const Result* pre) {
    Case c = case_begin("matmul_gelu_forward", call_matmul_gelu_forward, &forward->s);
    memcpy(c.shape, forward->shape, sizeof c.shape);
    c.scratch_bytes = forward->scratch_bytes;
    size_t n = forward->s.M * forward->s.N;
    output(&c, "out", n);
    for (int i = 1; i < 4; i++)
        input_from(&c, forward->arrays[i].name, STORED, forward->arrays[i].n, forward->arrays[i].start);
    output(&c, "pre", n);
    case_cpu(&c, NULL);
    double* in[1] = {doubles(&c, 4, true)};
    Shape s = c.s;
    s.N = n;
    Result out = result(n), slope = gelu_slope(in[0], n);
    reference_gelu(&out, in, &s);
    for (size_t i = 0; i < n; i++) {
        double steepest = fabs(slope.value[i]) + (double)FLOATX_EPSILON * fabs(in[0][i]);  // |gelu''| < 1.2, nearby
        out.size[i] += pre->size[i] * steepest + fabs(in[0][i]);
        out.rounded[i] = fabs(in[0][i]) * steepest;
    }
    bounded(&c, 0, &out, forward->s.K);
    bounded(&c, 4, pre, forward->s.K);
    case_prove(&c);
}

// din = sum * slope: the slope has an error of its own, and the sum may have been rounded to floatX before.
static void test_matmul_gelu_backward(const Case* backward, const Result* sum) {
    Case c = case_begin("matmul_gelu_backward_input", call_matmul_gelu_backward_input, &backward->s);
    memcpy(c.shape, backward->shape, sizeof c.shape);
    c.scratch_bytes = backward->scratch_bytes;
    size_t n = backward->s.M * backward->s.K;
    output(&c, "din", n);
    for (int i = 1; i < 3; i++)
        input_from(&c, backward->arrays[i].name, STORED, backward->arrays[i].n, backward->arrays[i].start);
    input(&c, "pre", n, 2);
    case_cpu(&c, NULL);
    double* pre = doubles(&c, 3, false);
    Result din = result(n), slope = gelu_slope(pre, n);
    for (size_t i = 0; i < n; i++) {
        double tanh_size = 1.0 + fabs(pre[i]) * (0.8 + 0.11 * pre[i] * pre[i]);  // of 1 + tanh(u) + x (1 - tanh^2) u'
        din.size[i] = sum->size[i] * fabs(slope.value[i]) + fabs(sum->value[i]) * (slope.size[i] + tanh_size);
        din.rounded[i] = fabs(sum->value[i] * slope.value[i]) + SMALLEST_NORMAL * fabs(slope.value[i]);
    }
    bounded(&c, 0, &din, backward->s.N);
    case_prove(&c);
}

static void test_matmul(size_t M, size_t N, size_t K, bool bias) {
    if (!wanted("matmul_forward matmul_backward_input matmul_backward_weight "
                "matmul_gelu_forward matmul_gelu_backward_input")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.M = M, s.N = N, s.K = K;
    Case c = case_begin("matmul_forward", call_matmul_forward, &s);
    snprintf(c.shape, sizeof c.shape, "M=%zu N=%zu K=%zu%s", M, N, K, bias ? " bias" : "");
    c.scratch_bytes = matmul_scratch_bytes();
    output(&c, "out", M * N);
    input(&c, "in", M * K, 1);
    input(&c, "weight", N * K, 1);
    input(&c, "bias", bias ? N : 0, 1);
    case_cpu(&c, NULL);
    double* in[3] = {doubles(&c, 1, false), doubles(&c, 2, false), doubles(&c, 3, false)};
    Result out = result(M * N);
    reference_matmul(&out, in, &s);
    bounded(&c, 0, &out, K + 1);
    case_prove(&c);
    if (bias) test_matmul_gelu_forward(&c, &out);

    Case b = case_begin("matmul_backward_input", call_matmul_backward_input, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    b.scratch_bytes = c.scratch_bytes;
    output(&b, "din", M * K);
    input(&b, "dout", M * N, 1);
    input_from(&b, "weight", STORED, N * K, c.arrays[2].start);
    case_cpu(&b, NULL);
    Case w = case_begin("matmul_backward_weight", call_matmul_backward_weight, &s);
    memcpy(w.shape, c.shape, sizeof w.shape);
    w.scratch_bytes = c.scratch_bytes;
    added_float(&w, "dweight", N * K);
    added_float(&w, "dbias", bias ? N : 0);
    input_from(&w, "dout", STORED, M * N, b.arrays[1].start);
    input_from(&w, "in", STORED, M * K, c.arrays[1].start);
    case_cpu(&w, NULL);
    Result din[3] = {result(M * K), result(N * K), result(bias ? N : 0)};
    reference_matmul_backward(din, doubles(&b, 1, false), in, &s);
    bounded(&b, 0, &din[0], N);
    bounded(&w, 0, &din[1], M + 1);
    bounded(&w, 1, &din[2], M + 1);
    case_prove(&b);
    case_prove(&w);
    test_matmul_gelu_backward(&b, &din[0]);
    release();
}

// ------------------------------------------------------------------------------------------------
// RoPE

static void call_rope_forward(const Case* c) {
    RUN(rope_forward, x(c, 0), f(c, 1), c->s.first_position, c->s.B, c->s.T, c->s.H, c->s.K, c->s.D);
}
static void call_rope_backward(const Case* c) {
    RUN(rope_backward, x(c, 0), f(c, 1), c->s.B, c->s.T, c->s.H, c->s.K, c->s.D);
}

static void test_rope(size_t B, size_t T, size_t H, size_t K, size_t D, size_t first_position, float theta) {
    if (!wanted("rope_forward rope_backward")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.B = B, s.T = T, s.H = H, s.K = K, s.D = D, s.first_position = first_position, s.theta = (double)theta;
    size_t n = B * T * (H + 2 * K) * D, positions = first_position + T;
    float* table = (float*)hold(positions * D * sizeof(float));
    rope_table(table, theta, positions, D);
    for (int backward = 0; backward < 2; backward++) {
        if (backward) s.first_position = 0;
        Case c = case_begin(backward ? "rope_backward" : "rope_forward",
                            backward ? call_rope_backward : call_rope_forward, &s);
        snprintf(c.shape, sizeof c.shape, "B=%zu T=%zu H=%zu K=%zu D=%zu at %zu", B, T, H, K, D, s.first_position);
        in_place(&c, "qkv", n)->live = 0;
        input_from(&c, "table", FLOAT, positions * D, table)->live = s.first_position * D;
        case_cpu(&c, NULL);
        Result out = result(n);
        reference_turn(&out, doubles(&c, 0, false), backward ? -1.0 : 1.0, &s);
        bounded(&c, 0, &out, 1);
        case_prove(&c);
        bool values = true;  // value heads are not touched
        for (size_t row = 0; row < B * T; row++) {
            size_t first = (row * (H + 2 * K) + H + K) * D;
            const floatX *got = (floatX*)c.arrays[0].got + first, *start = (floatX*)c.arrays[0].start + first;
            values = values && memcmp(got, start, K * D * sizeof(floatX)) == 0;
        }
        check(values, "%-28s %-34s %s value heads stay as they are", c.name, c.shape, FLOATX_NAME);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Attention

static void call_attention_forward(const Case* c) {
    RUN(attention_forward, x(c, 0), f(c, 1), x(c, 2), c->s.B, c->s.T, c->s.H, c->s.K, c->s.D);
}
static void call_attention_backward(const Case* c) {
    RUN(attention_backward, x(c, 0), f(c, 1), x(c, 2), x(c, 3), f(c, 4), x(c, 5), c->s.B, c->s.T, c->s.H, c->s.K,
        c->s.D);
}
// All positions one after another, of a context with three more, which are not looked at.
static void call_attention_decode(const Case* c) {
    size_t H = c->s.H, K = c->s.K, D = c->s.D;
    for (size_t t = 0; t < c->s.T; t++)
        RUN(attention_decode, x(c, 0) + t * H * D, x(c, 1), x(c, 2), f(c, 3), x(c, 4) + t * (H + 2 * K) * D, t,
            c->s.T + 3, H, K, D);
}

// Tensor cores take their operands as floatX: the probabilities before they meet the values, and the gradients of the
// scores before they meet keys and queries. Adds the sums of what is rounded so; out or din may be NULL.
static void attention_rounded(Result* out, Result* din, const double* qkv, const double* dout, const Shape* s) {
    double *p = (double*)hold(s->T * sizeof(double)), scale = 1.0 / sqrt((double)s->D), size;
    double* o = (double*)hold(s->D * sizeof(double));
    for (size_t row = 0; row < s->B * s->T * s->H; row++) {
        size_t b = row / (s->T * s->H), t = row / s->H % s->T, h = row % s->H, kv = h / (s->H / s->K);
        const double *q = qkv + reference_head(s, b, t, h), *g = dout ? dout + row * s->D : NULL;
        double delta = 0.0;
        reference_probabilities(p, &size, qkv, s, b, h, t);
        for (size_t i = 0; i < s->D; i++) o[i] = 0.0;
        for (size_t j = 0; j <= t; j++) {
            const double* v = qkv + reference_head(s, b, j, s->H + s->K + kv);
            for (size_t i = 0; i < s->D; i++) {
                o[i] += p[j] * v[i];
                if (out) out->rounded[row * s->D + i] += (p[j] + SMALLEST_NORMAL) * fabs(v[i]);
            }
        }
        for (size_t i = 0; g && i < s->D; i++) delta += g[i] * o[i];
        for (size_t j = 0; g && j <= t; j++) {
            size_t at_q = reference_head(s, b, t, h), at_k = reference_head(s, b, j, s->H + kv);
            size_t at_v = reference_head(s, b, j, s->H + s->K + kv);
            double dp = 0.0;
            for (size_t i = 0; i < s->D; i++) dp += g[i] * qkv[at_v + i];
            double ds = scale * (fabs(p[j] * (dp - delta)) + SMALLEST_NORMAL);
            for (size_t i = 0; i < s->D; i++) {
                din->rounded[at_v + i] += (p[j] + SMALLEST_NORMAL) * fabs(g[i]);
                din->rounded[at_q + i] += ds * fabs(qkv[at_k + i]);
                din->rounded[at_k + i] += ds * fabs(q[i]);
            }
        }
    }
}

static void test_attention(size_t B, size_t T, size_t H, size_t K, size_t D, double scale) {
    if (!wanted("attention_forward attention_backward attention_decode")) return;
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
    case_cpu(&c, NULL);
    double* in[1] = {doubles(&c, 2, false)};
    Result out = result(outs), lse = result(B * H * T), din = result(n);
    reference_attention(&out, in, &s);
    reference_attention_lse(&lse, in, &s);
    attention_rounded(&out, NULL, in[0], NULL, &s);
    bounded(&c, 0, &out, T + D);
    bounded(&c, 1, &lse, T + D);
    case_prove(&c);

    Case b = case_begin("attention_backward", call_attention_backward, &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    output(&b, "dqkv", n);
    case_array(&b, "delta", UNREAD, FLOAT, B * H * T, 1);
    input(&b, "dout", outs, 1);
    input_from(&b, "out", STORED, outs, c.arrays[0].host);
    input_from(&b, "lse", FLOAT, B * H * T, c.arrays[1].host);
    input_from(&b, "qkv", STORED, n, c.arrays[2].start);
    case_cpu(&b, NULL);
    double* dout = doubles(&b, 2, false);
    reference_attention_backward(&din, dout, in, &s);
    attention_rounded(NULL, &din, in[0], dout, &s);
    bounded(&b, 0, &din, T + D + H / K);
    case_prove(&b);

    if (B == 1 && T <= 150) {
        Case one = case_begin("attention_decode", call_attention_decode, &s);
        memcpy(one.shape, c.shape, sizeof one.shape);
        output(&one, "out", outs);
        output(&one, "key_cache", T * K * D);  // the same bits: copies
        output(&one, "value_cache", T * K * D);
        case_array(&one, "scores", UNREAD, FLOAT, H * (T + 3), 1);
        input_from(&one, "qkv", STORED, n, c.arrays[2].start)->live = 0;
        case_cpu(&one, NULL);
        bounded(&one, 0, &out, T + D);
        case_prove(&one);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// GELU, SwiGLU

static void call_gelu_forward(const Case* c) { RUN(gelu_forward, x(c, 0), x(c, 1), c->s.N); }
static void call_gelu_backward(const Case* c) { RUN(gelu_backward, x(c, 0), x(c, 1), x(c, 2), c->s.N); }
static void call_gelu_backward_in_place(const Case* c) { RUN(gelu_backward, x(c, 0), x(c, 0), x(c, 1), c->s.N); }
static void call_swiglu_forward(const Case* c) { RUN(swiglu_forward, x(c, 0), x(c, 1), c->s.N, c->s.F); }
static void call_swiglu_backward(const Case* c) { RUN(swiglu_backward, x(c, 0), x(c, 1), x(c, 2), c->s.N, c->s.F); }

static void test_nonlinearity(bool gelu, size_t N, size_t F, double scale) {
    if (!wanted(gelu ? "gelu_forward gelu_backward" : "swiglu_forward swiglu_backward")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.F = F;
    size_t outs = N * F, ins = gelu ? outs : 2 * outs;
    if (gelu) s.N = outs;
    Case c = case_begin(gelu ? "gelu_forward" : "swiglu_forward", gelu ? call_gelu_forward : call_swiglu_forward, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu F=%zu x%.2g", N, F, scale);
    output(&c, "out", outs);
    input(&c, "in", ins, scale);
    case_cpu(&c, NULL);
    double* in[1] = {doubles(&c, 1, false)};
    Result out = result(outs), din = result(ins);
    (gelu ? reference_gelu : reference_swiglu)(&out, in, &s);
    bounded(&c, 0, &out, 1);
    case_prove(&c);

    Case b = case_begin(gelu ? "gelu_backward" : "swiglu_backward", gelu ? call_gelu_backward : call_swiglu_backward,
                        &s);
    memcpy(b.shape, c.shape, sizeof b.shape);
    output(&b, "din", ins);
    input(&b, "dout", outs, 1);
    input_from(&b, "in", STORED, ins, c.arrays[1].start);
    case_cpu(&b, NULL);
    (gelu ? reference_gelu_backward : reference_swiglu_backward)(&din, doubles(&b, 1, false), in, &s);
    bounded(&b, 0, &din, 1);
    case_prove(&b);
    if (gelu) {
        Case same = case_begin("gelu_backward, din = dout", call_gelu_backward_in_place, &s);
        memcpy(same.shape, c.shape, sizeof same.shape);
        memcpy(in_place(&same, "din", outs)->start, b.arrays[1].start, outs * sizeof(floatX));
        input_from(&same, "in", STORED, outs, c.arrays[1].start);
        case_cpu(&same, NULL);
        bounded(&same, 0, &din, 1);
        case_prove(&same);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Dropout

static void call_dropout(const Case* c) { RUN(dropout, x(c, 0), x(c, 1), c->p, 11, 5, c->s.first_position, c->s.N); }
static void call_dropout_in_place(const Case* c) {
    RUN(dropout, x(c, 0), x(c, 0), c->p, 11, 5, c->s.first_position, c->s.N);
}

static void test_dropout(size_t N, size_t first, float p) {
    if (!wanted("dropout")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.first_position = first;
    for (int place = 0; place < 2; place++) {
        Case c = case_begin(place ? "dropout, in place" : "dropout", place ? call_dropout_in_place : call_dropout, &s);
        snprintf(c.shape, sizeof c.shape, "N=%zu first=%zu p=%.2g", N, first, (double)p);
        c.p = p;
        Array* out = place ? in_place(&c, "out", N) : output(&c, "out", N);
        Array* in = place ? out : input(&c, "in", N, 1);
        size_t kept = N;
        for (size_t i = 0; i < N; i++)
            if ((double)random_bits(11, RANDOM_DROPOUT, 5, first + i) >= (double)p * 0x1p32) kept = i;
        if (kept == N) continue;  // nothing to see a NaN by
        in->live = kept;
        case_cpu(&c, NULL);
        Result values = result(N);
        for (size_t i = 0; i < N; i++) values.size[i] = fabs(array_get(out, out->host, i));
        bounded(&c, 0, &values, 1);  // and so exactly 0 where the CPU has 0
        case_prove(&c);
        size_t wrong = 0;
        for (size_t i = 0; i < N; i++)
            wrong += (array_get(out, out->got, i) == 0.0) != (array_get(out, out->host, i) == 0.0);
        check(wrong == 0, "%-28s %-34s %s the same elements are dropped", c.name, c.shape, FLOATX_NAME);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Classifier

static void call_classifier(const Case* c) {
    RUN(classifier, x(c, 0), f(c, 1), i32(c, 2), c->dloss, c->s.N, c->s.V, c->s.Vp);
}

// ignored: every how many rows have no target (0: none)
static void test_classifier(size_t N, size_t V, size_t Vp, double scale, size_t ignored, float dloss) {
    if (!wanted("classifier")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.V = V, s.Vp = Vp;
    int32_t* targets = make_tokens(TOKENS_RANDOM, N, V);
    for (size_t row = 0; ignored > 0 && row < N; row += ignored) targets[row] = -1;
    s.tokens = targets;
    for (int loss_alone = 0; loss_alone < 2; loss_alone++) {
        Case c = case_begin("classifier", call_classifier, &s);
        snprintf(c.shape, sizeof c.shape, "N=%zu V=%zu Vp=%zu x%.3g -1:%zu%s", N, V, Vp, scale, ignored,
                 loss_alone ? " loss" : "");
        c.dloss = loss_alone ? 0.0f : dloss;
        Array* logits = case_array(&c, "logits", IN_PLACE, STORED, N * Vp, scale);
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
        input_from(&c, "targets", INTEGER, N, targets);
        case_cpu(&c, NULL);
        double *in[1] = {doubles(&c, 0, false)}, *dout = (double*)hold(N * sizeof(double));
        for (size_t row = 0; row < N; row++) dout[row] = (double)dloss;
        Result losses = result(N), gradient = result(N * Vp);
        reference_classifier(&losses, in, &s);
        reference_classifier_backward(&gradient, dout, in, &s);
        bounded(&c, 1, &losses, V);
        if (!loss_alone) bounded(&c, 0, &gradient, V);  // the loss alone leaves the bits of the logits
        case_prove(&c);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Vectors

static void call_cast_to_float(const Case* c) { RUN(cast_to_float, f(c, 0), x(c, 1), c->s.N); }
static void call_cast_from_float(const Case* c) { RUN(cast_from_float, x(c, 0), f(c, 1), c->s.N); }
static void call_sum_of_squares(const Case* c) { RUN(sum_of_squares, d(c, 0), f(c, 1), c->s.N); }
static void call_sum_scaled(const Case* c) { RUN(sum_scaled, d(c, 0), f(c, 1), 0.37, c->s.N); }

static void test_vectors(size_t N) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N;
    Case to = case_begin("cast_to_float", call_cast_to_float, &s);
    Case from = case_begin("cast_from_float", call_cast_from_float, &s);
    Case squares = case_begin("sum_of_squares", call_sum_of_squares, &s);
    Case scaled = case_begin("sum_scaled", call_sum_scaled, &s);
    Case* all[4] = {&to, &from, &squares, &scaled};
    for (int i = 0; i < 4; i++) snprintf(all[i]->shape, sizeof all[i]->shape, "N=%zu", N);
    output_float(&to, "out", N);
    input(&to, "in", N, 3);
    output(&from, "out", N);
    input_float(&from, "in", N);
    case_array(&squares, "out", OUTPUT, DOUBLE, 1, 1);
    input_float(&squares, "x", N);
    squares.scratch_bytes = sum_of_squares_scratch_bytes();
    case_array(&scaled, "out", ADDED, DOUBLE, 1, 1);
    input_float(&scaled, "x", N);
    scaled.scratch_bytes = sum_scaled_scratch_bytes();
    Result sum[2] = {result(1), result(1)};
    for (size_t i = 0; i < N; i++) {
        sum[0].size[0] += pow(array_get(&squares.arrays[1], squares.arrays[1].start, i), 2.0);
        sum[1].size[0] += 0.37 * fabs(array_get(&scaled.arrays[1], scaled.arrays[1].start, i));
    }
    bounded(&squares, 0, &sum[0], N);
    bounded(&scaled, 0, &sum[1], N);
    for (int i = 0; i < 4; i++) {
        if (!wanted(all[i]->name)) continue;
        case_cpu(all[i], NULL);
        case_prove(all[i]);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Sums in fixed point, add, checksum: the same bits as on the CPU

static void call_exact_add(const Case* c) {
    RUN(exact_add, i64(c, 0), d(c, 1), f(c, 2), c->scale, c->limit, c->s.N);
}
static void call_exact_merge(const Case* c) { RUN(exact_merge, i64(c, 0), i64(c, 1), c->s.N); }
static void call_exact_read(const Case* c) { RUN(exact_read, f(c, 0), i64(c, 1), 1.0 / c->scale, c->s.N); }
static void call_add(const Case* c) { RUN(add, f(c, 0), f(c, 1), c->s.N); }
static void call_add_stored(const Case* c) { RUN(add_stored, f(c, 0), x(c, 1), c->s.N); }
static void call_checksum(const Case* c) { RUN(checksum, (uint64_t*)i64(c, 0), x(c, 1), c->s.first_position, c->s.N); }

// Integers of any length up to 61 bits, which may be added up.
static Array* longs(Case* c, const char* name, Role role, size_t n) {
    Array* a = case_array(c, name, role, LONG, n, 1);
    for (size_t i = 0; i < n; i++) {
        Random4 r = random4(3, RANDOM_TEST, cases * ARRAYS + (uint64_t)c->count, i);
        int64_t any = (int64_t)(((uint64_t)r.bits[0] << 32 | r.bits[1]) >> (3 + r.bits[2] % 61));
        ((int64_t*)a->start)[i] = r.bits[3] % 2 ? any : -any;
    }
    return a;
}

// Floats of all exponents up to 2^8, and a fourth of them ties at this scale.
static void make_fixed(const Array* a, double scale) {
    for (size_t i = 0; i < a->n; i++) {
        Random4 r = random4(4, RANDOM_TEST, cases, i);
        float any = float_from_bits((r.bits[0] & 0x807fffffu) | (r.bits[1] % 135) << 23);
        float tie = (float)(((double)(r.bits[1] % 2048) - 1023.5) / scale);
        ((float*)a->start)[i] = r.bits[2] % 4 ? any : tie;
    }
}

// outside: how many elements are not within the limit.
static void test_exact_add(size_t N, double scale, double limit, size_t outside) {
    if (!wanted("exact_add")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N;
    Case c = case_begin("exact_add", call_exact_add, &s);
    snprintf(c.shape, sizeof c.shape, "N=%zu x%.3g to %g, %zu beyond", N, scale, limit, outside);
    c.scale = scale;
    c.limit = limit;
    c.changes = true;
    c.witness = outside ? -1 : 1;  // sums lack the NaN's element, and bad is 1 unless it was 1 already
    longs(&c, "sums", IN_PLACE, N);
    Array* bad = case_array(&c, "bad", IN_PLACE, LONG, 1, 0);  // the bits of a double: 0.0
    Array* in = input_float(&c, "x", N);
    make_fixed(in, scale);
    float* values = (float*)in->start;
    float inside = (float)limit;
    if ((double)inside > limit) inside = nextafterf(inside, 0.0f);
    const float beyond[5] = {nextafterf(inside, INFINITY), INFINITY, NAN, -INFINITY, nextafterf(-inside, -INFINITY)};
    if (N > 2) values[0] = inside, values[N - 1] = -inside;
    for (size_t i = 0; i < outside; i++) values[(i * 7919 + 1) % N] = beyond[i % 5];
    if (N > 0) values[in->live] = 1.0f;
    case_cpu(&c, NULL);
    double mark = outside ? 1.0 : 0.0;
    check(memcmp(bad->host, &mark, sizeof mark) == 0, "%-28s %-34s %s bad is %g on the CPU", c.name, c.shape,
          FLOATX_NAME, mark);
    case_prove(&c);
    release();
}

static void test_exact(size_t N) {
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N;
    s.first_position = ((size_t)1 << 40) + 7;
    test_exact_add(N, 0x1p50, 512.0, 0);
    test_exact_add(N, 0x1p50 / 3, 1000.9, 0);  // 1000.9 is not a float; the nearest is above it
    if (N > 3) test_exact_add(N, 0x1p50, 512.0, 1);
    if (N > 100) test_exact_add(N, 0x1p50 / 3, 1000.9, N / 4);
    Case merge = case_begin("exact_merge", call_exact_merge, &s);
    Case read = case_begin("exact_read", call_exact_read, &s), read_any = case_begin("exact_read", call_exact_read, &s);
    Case sum = case_begin("add", call_add, &s), check_sum = case_begin("checksum", call_checksum, &s);
    Case stored = case_begin("add_stored", call_add_stored, &s);
    Case* all[6] = {&merge, &read, &read_any, &sum, &check_sum, &stored};
    read.scale = 0x1p50;
    read_any.scale = 0x1p50 / 3;
    longs(&merge, "sums", IN_PLACE, N);
    longs(&merge, "x", INPUT, N);
    for (int i = 1; i < 3; i++) {
        output_float(all[i], "out", N);
        longs(all[i], "sums", INPUT, N);
    }
    in_place_float(&sum, "out", N);
    input_float(&sum, "x", N);
    in_place_float(&stored, "out", N);
    input(&stored, "x", N, 1);
    case_array(&check_sum, "out", OUTPUT, LONG, 1, 1);
    input(&check_sum, "x", N, 1);
    check_sum.changes = true;
    for (int i = 0; i < 6; i++) {
        snprintf(all[i]->shape, sizeof all[i]->shape, "N=%zu", N);
        if (!wanted(all[i]->name)) continue;
        case_cpu(all[i], NULL);
        case_prove(all[i]);
    }
    release();
}

// ------------------------------------------------------------------------------------------------
// Optimizers

static void call_optimizer(const Case* c) {
    RUN(optimizer_update, x(c, 0), f(c, 1), f(c, 2), f(c, 3), f(c, 4), &c->step, c->s.first_position, c->s.N);
}

// What the rounding errors of one element scale with: of w, m and v.
static void optimizer_sizes(double* sizes, double w, double m, double v, double grad, const OptimizerStep* o) {
    double g = fabs(grad * (double)o->grad_scale), direction = g, steps = (double)o->step;
    sizes[1] = fabs(m) + g;
    sizes[2] = fabs(v) + g * g;
    if (o->kind == OPTIMIZER_ADAMW) {
        double corrected = 1.0 / (1.0 - pow((double)o->beta1, steps));
        double new_v = (double)o->beta2 * v + (1.0 - (double)o->beta2) * g * g;
        double divisor = sqrt(new_v / (1.0 - pow((double)o->beta2, steps))) + (double)o->epsilon;
        direction = corrected / divisor * sizes[1] * (1.0 + sizes[2] / new_v);
    }
    if (o->kind == OPTIMIZER_MOMENTUM) direction = sizes[1];
    if (o->kind == OPTIMIZER_LION) direction = 1.0;
    sizes[0] = fabs(w) + (double)o->lr * (direction + fabs((double)o->weight_decay * w));
}

static void test_optimizer(OptimizerKind kind, bool master_weights, size_t N, size_t first, uint64_t step) {
    static const char* const names[4] = {"adamw", "sgd", "momentum", "lion"};
    if (!wanted("optimizer_update")) return;
    Shape s;
    memset(&s, 0, sizeof s);
    s.N = N, s.first_position = first;
    bool has_m = kind != OPTIMIZER_SGD, has_v = kind == OPTIMIZER_ADAMW;
    Case c = case_begin("optimizer_update", call_optimizer, &s);
    snprintf(c.shape, sizeof c.shape, "%s N=%zu first=%zu step=%zu%s", names[kind], N, first, (size_t)step,
             master_weights ? " masters" : "");
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
    case_cpu(&c, NULL);

    Array *params = &c.arrays[0], *weights = &c.arrays[master_weights ? 1 : 0], *m = &c.arrays[2];
    Result new_w = result(N), new_m = result(has_m ? N : 0), new_v = result(has_v ? N : 0);
    for (size_t i = 0; i < N; i++) {
        double sizes[3], w = array_get(weights, weights->start, i);
        optimizer_sizes(sizes, w, has_m ? array_get(m, m->start, i) : 0.0, has_v ? array_get(v, v->start, i) : 0.0,
                        array_get(grads, grads->start, i), &c.step);
        result_add(&new_w, i, 0.0, sizes[0]);
        if (!master_weights && !FLOATX_IS_FLOAT) new_w.rounded[i] = fabs(w) + sizes[0];  // a whole place, not half of one
        if (has_m) result_add(&new_m, i, 0.0, sizes[1]);
        if (has_v) result_add(&new_v, i, 0.0, sizes[2]);
    }
    bounded(&c, 0, &new_w, 1);
    bounded(&c, 1, &new_w, 1);
    bounded(&c, 2, &new_m, 1);
    bounded(&c, 3, &new_v, 1);
    case_prove(&c);

    // With master_weights, parameters are their roundings. Without, the random bits are those of the CPU, so that the
    // roundings are too, except where the sum before them differs by its last place: once in thousands.
    size_t different = 0;
    for (size_t i = 0; i < N; i++) {
        floatX rounded = master_weights ? floatX_of(((float*)weights->got)[i]) : ((floatX*)params->host)[i];
        different += memcmp(&rounded, (floatX*)params->got + i, sizeof rounded) != 0;
    }
    size_t allowed = master_weights ? 0 : FLOATX_IS_FLOAT ? N : N / 100;
    check(different <= allowed, "%-28s %-34s %s params are rounded alike: %zu differ <= %zu", c.name, c.shape,
          FLOATX_NAME, different, allowed);
    release();
}

// ------------------------------------------------------------------------------------------------
// Vectors beyond 2^31 elements: the same few values over and over, of which the last are compared with the CPU

static void test_huge(void) {
    const size_t n = ((size_t)1 << 31) + 4099, tail = 8192, first = n - tail;
    const size_t bytes = n * sizeof(floatX), tail_bytes = tail * sizeof(floatX);
    if (!wanted("huge gelu_forward dropout cast_to_float checksum")) return;
    Error error;
    floatX* in = (floatX*)device_allocate(bytes, stream, &error);
    floatX* out = in ? (floatX*)device_allocate(n * sizeof(float), stream, &error) : NULL;
    if (out == NULL) {
        check(false, "--shapes huge: %s", error.text);
        return;
    }
    floatX *values = (floatX*)hold(tail_bytes), *expected = (floatX*)hold(tail_bytes);
    floatX* got = (floatX*)hold(tail * sizeof(float));
    for (size_t i = 0; i < tail; i++) values[i] = floatX_of(1.0f + (float)i / (float)tail);
    upload(in + first, values, tail_bytes, stream);
    const char* const names[3] = {"gelu_forward", "dropout", "cast_to_float"};
    for (int operation = 0; operation < 3; operation++) {
        size_t wrong = 0;
        if (operation == 0) {
            ::gelu_forward(out, in, n, stream);
            cpu::gelu_forward(expected, values, tail, NULL);
        } else if (operation == 1) {
            ::dropout(out, in, 0.5f, 11, 5, 0, n, stream);
            cpu::dropout(expected, values, 0.5f, 11, 5, first, tail, NULL);
        } else {
            ::cast_to_float((float*)out, in, n, stream);
            memcpy(expected, values, tail_bytes);
        }
        download(got, operation == 2 ? (void*)((float*)out + first) : (void*)(out + first),
                 tail * (operation == 2 ? sizeof(float) : sizeof(floatX)), stream);
        for (size_t i = 0; i < tail; i++) {
            double a = operation == 2 ? (double)((float*)got)[i] : (double)float_of(got[i]);
            double b = (double)float_of(expected[i]);
            wrong += !(fabs(a - b) <= (2.0 * (double)FLOATX_EPSILON + 0x1p-20) * fabs(b));
        }
        check(wrong == 0, "%-28s N=%zu %s the last %zu elements", names[operation], n, FLOATX_NAME, tail);
    }
    uint64_t *sums = (uint64_t*)device_memory(2 * sizeof(uint64_t)), parts[2], last;
    ::checksum(sums, in, 5, n, stream);
    ::checksum(sums + 1, in, 5, first, stream);
    cpu::checksum(&last, values, 5 + first, tail, NULL);
    download(parts, sums, sizeof parts, stream);
    check(parts[0] == parts[1] + last, "%-28s N=%zu %s the last %zu elements", "checksum", n, FLOATX_NAME, tail);
    device_free(sums, 2 * sizeof(uint64_t));
    device_free(in, bytes);
    device_free(out, n * sizeof(float));
    release();
}

// ------------------------------------------------------------------------------------------------

static void test_odd_shapes(void) {
    for (int positions = 0; positions < 2; positions++) {
        test_embedding(1, 1, 1, 3, positions, 0, TOKENS_RANDOM);
        test_embedding(2, 5, 7, 4, positions, 3, TOKENS_RANDOM);
        test_embedding(3, 33, 40, 20, positions, 0, TOKENS_DIFFERENT);
        test_embedding(2, 65, 129, 50, positions, 7, TOKENS_EQUAL);
        test_embedding(1, 130, 264, 257, positions, 1, TOKENS_RANDOM);
    }
    for (int kind = 0; kind < 4; kind++) {
        bool layernorm = kind / 2, branch = kind % 2;
        test_norm(layernorm, branch, 1, 1, 1.0);
        test_norm(layernorm, branch, 5, 7, 1.0);
        test_norm(layernorm, branch, 33, 40, 1.0);
        test_norm(layernorm, branch, 65, 129, 100.0);
        test_norm(layernorm, branch, 5, 768, 0.01);
        test_norm(layernorm, branch, 2, 1600, 1.0);
    }
    for (int bias = 0; bias < 2; bias++) {
        test_matmul(1, 1, 1, bias);
        test_matmul(5, 7, 3, bias);
        test_matmul(33, 1, 36, bias);
        test_matmul(2, 257, 129, bias);
        test_matmul(65, 40, 1, bias);
        test_matmul(16, 24, 64, bias);
        test_matmul(67, 72, 136, bias);
    }
    test_rope(1, 1, 1, 1, 2, 0, 10000.0f);
    test_rope(2, 5, 4, 2, 6, 0, 10000.0f);
    test_rope(2, 33, 4, 1, 10, 5, 10000.0f);
    test_rope(1, 17, 3, 3, 16, 100, 500000.0f);
    test_rope(1, 9, 2, 2, 256, 300, 500000.0f);

    test_attention(1, 1, 1, 1, 1, 1.0);
    test_attention(2, 3, 2, 1, 2, 1.0);
    test_attention(2, 7, 4, 2, 16, 1.0);
    test_attention(1, 33, 6, 1, 33, 1.0);
    test_attention(1, 65, 4, 2, 12, 1.0);
    test_attention(1, 64, 2, 2, 64, 1.0);
    test_attention(1, 77, 2, 1, 80, 3.0);
    test_attention(2, 130, 2, 1, 64, 1.0);
    test_attention(1, 65, 2, 2, 96, 1.0);
    test_attention(1, 70, 2, 2, 128, 0.1);
    test_attention(1, 65, 2, 1, 256, 1.0);
    test_attention(1, 150, 1, 1, 80, 4.0);  // scores up to about 80
    test_attention(1, 129, 1, 1, 1, 10.0);  // scores up to about 500

    for (int gelu = 0; gelu < 2; gelu++) {
        test_nonlinearity(gelu, 1, 1, 1.0);
        test_nonlinearity(gelu, 5, 7, 1.0);
        test_nonlinearity(gelu, 33, 129, 3.0);
        test_nonlinearity(gelu, 9, 768, 30.0);
        test_nonlinearity(gelu, 7, 40, gelu || !FP16 ? 1e4 : 100.0);  // FP16 ends at 65504
    }
    test_dropout(1, 0, 0.1f);
    test_dropout(7, 3, 0.0f);
    test_dropout(1000, 1, 0.5f);
    test_dropout(5000, 6, 0.1f);
    test_dropout(5003, ((size_t)1 << 40) + 1, 0.9f);

    test_classifier(1, 1, 1, 1.0, 0, 1.0f);
    test_classifier(5, 7, 8, 1.0, 3, 0.25f);
    test_classifier(9, 257, 384, 1.0, 4, 1.0f / 33);
    test_classifier(8, 257, 257, 3.0, 0, 1024.0f / 65);
    test_classifier(9, 257, 384, 20.0, 4, 1.0f);     // to +- 80
    test_classifier(9, 2500, 2504, 2500.0, 3, 1.0f);  // to +- 1e4

    test_vectors(1);
    test_vectors(33);
    test_vectors(255);
    test_vectors(20001);
    test_exact(0);
    test_exact(1);
    test_exact(2);
    test_exact(33);
    test_exact(4096);
    test_exact(20001);
    for (int kind = 0; kind < 4; kind++) {
        for (int master_weights = 0; master_weights < 2; master_weights++) {
            test_optimizer((OptimizerKind)kind, master_weights, 1, 1001, 1);
            test_optimizer((OptimizerKind)kind, master_weights, 2048, 4096, 1);
            test_optimizer((OptimizerKind)kind, master_weights, 2051, 1001, 1000);
        }
    }
}

// Sizes of real models, which the emulator is too slow for: more blocks than processors, long rows, long loops.
static void test_large_shapes(void) {
    test_embedding(4, 1024, 768, 50257, true, 0, TOKENS_RANDOM);
    test_embedding(4, 1024, 768, 50257, true, 0, TOKENS_EQUAL);
    test_norm(true, true, 4096, 768, 1.0);
    test_norm(false, true, 2048, 4096, 1.0);
    test_norm(true, false, 100, 12288, 1.0);
    test_matmul(256, 2304, 768, true);
    test_matmul(1000, 771, 333, true);
    test_rope(2, 1024, 8, 2, 128, 0, 500000.0f);
    test_attention(1, 1024, 4, 4, 64, 1.0);
    test_attention(1, 777, 4, 1, 128, 1.0);
    test_attention(2, 500, 2, 2, 80, 1.0);
    test_nonlinearity(true, 1024, 3072, 1.0);
    test_nonlinearity(false, 1024, 1365, 1.0);
    test_dropout(3000001, 5, 0.1f);
    test_classifier(128, 50257, 50304, 1.0, 5, 1.0f / 128);
    test_vectors(5000011);
    test_exact(5000011);
    test_exact(4000000);
    test_optimizer(OPTIMIZER_ADAMW, true, 3000001, 8, 3);
    test_optimizer(OPTIMIZER_ADAMW, false, 3000001, 9, 3);
}

// One ragged and one round shape of each operation: compute-sanitizer makes every access slower by orders of magnitude.
static void test_tiny_shapes(void) {
    test_embedding(2, 9, 7, 4, true, 3, TOKENS_RANDOM);
    test_embedding(1, 33, 40, 20, true, 0, TOKENS_RANDOM);
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        test_norm(layernorm, true, 5, 7, 1.0);
        test_norm(layernorm, false, 9, 72, 1.0);
    }
    test_matmul(5, 7, 3, true);
    test_matmul(33, 40, 72, true);
    test_rope(1, 5, 4, 2, 6, 1, 10000.0f);
    test_rope(1, 5, 3, 1, 16, 0, 10000.0f);
    test_attention(1, 3, 2, 1, 2, 1.0);
    test_attention(1, 33, 4, 2, 10, 1.0);
    test_attention(1, 70, 2, 1, 64, 1.0);
    test_attention(1, 70, 1, 1, 128, 1.0);
    for (int gelu = 0; gelu < 2; gelu++) {
        test_nonlinearity(gelu, 5, 7, 1.0);
        test_nonlinearity(gelu, 9, 40, 1.0);
    }
    test_dropout(1000, 1, 0.5f);
    test_classifier(5, 7, 8, 1.0, 3, 0.25f);
    test_classifier(3, 257, 264, 1.0, 0, 1.0f);
    test_vectors(1001);
    test_exact(1001);
    test_exact(512);
    for (int kind = 0; kind < 4; kind++) {
        test_optimizer((OptimizerKind)kind, true, 1003, 8, 1);
        test_optimizer((OptimizerKind)kind, false, 1003, 9, 1);
    }
}

int main(int argc, char** argv) {
    shapes = SHAPES_ODD;
#ifndef EMULATED
    shapes = SHAPES_LARGE;
#endif
    Flag flags[] = {
        {"only", FLAG_TEXT, &only, "NAME", 0, 0, "the operations with this in their names", false},
        {"shapes", FLAG_CHOICE, &shapes, "tiny|odd|large|huge", 0, 0,
         "all up to this size; tiny: no others, and each once", false},
        {"exact", FLAG_SWITCH, &exact_memory, "", 0, 0, "arrays without guard zones around them", false},
    };
    const size_t count = sizeof flags / sizeof flags[0];
    if (flags_want_help(argc, argv)) {
        printf("test_cuda: the operations of the CUDA backend against those of the CPU\n\n");
        flags_help(flags, count);
        return 0;
    }
    Error error;
    if (!flags_parse(flags, count, argc, argv, &error) || !device_open(&stream, false, &error)) {
        fprintf(stderr, "test_cuda: %s\n", error.text);
        return 1;
    }
    if (only == NULL) test_device();
    if (shapes == SHAPES_TINY) test_tiny_shapes();
    else test_odd_shapes();
    if (shapes >= SHAPES_LARGE) test_large_shapes();
    if (shapes >= SHAPES_HUGE) test_huge();
    if (held_scratch) CUDA_CHECK(cudaFree(held_scratch));
    device_close(stream);
    if (passed == 0 && failed == 0) check(false, "nothing is called '%s'", only);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
