// test_cuda.cu: tests every operation of the CUDA backend against the CPU operation of the same name, for one storage
// dtype (-DPRECISION_BF16, -DPRECISION_FP16, or float). test_kernels.c tests the CPU operations.
//
//     nvcc -std=c++20 -O3 -arch=native -DLLMTRAIN_CUDA -I. -Xcompiler -fopenmp dev/test/test_cuda.cu
//         -o build/test_cuda -lcublasLt
//     build/test_cuda                        the same where dev/emulator and a C++ compiler have built it
//     build/test_cuda --only attention       the operations with that in their names
//     build/test_cuda --shapes huge          on a GPU: vectors of more than 2^31 elements as well
//     build/test_cuda --shapes tiny --exact  for compute-sanitizer: a few shapes, each array in an allocation of its
//                                            exact size, since guard zones would be valid memory; outputs uninitialized
//
// operations.h has the cases and says when an output is right: within twice the bound that test_kernels.c puts on the
// distance between the CPU's operation and the truth. Where nothing is rounded differently, the bits must be the same.
// A NaN fails.
//
// Besides the values, for each operation and shape, once with arrays aligned to 256 bytes and once with all moved by
// one element, so that the kernels for 16 bytes at a time and for one element both run:
//   - overwritten outputs start as NaN, accumulated ones as random numbers, which must have been added to
//   - the bytes before and behind each output, and behind the requested scratch memory, do not change
//   - inputs do not change
//   - a second run, on scratch memory filled with other bytes, gives the same bits
//   - a NaN in any input reaches an output

#include "llmtrain/base/device_cpu.h"
#include "kernels.cuh"
#include "llmtrain/base/device.cuh"
#include "llmtrain/base/flags.h"

static Stream stream;
static bool exact_memory;
typedef enum { SHAPES_TINY, SHAPES_ODD, SHAPES_LARGE, SHAPES_HUGE } Shapes;
static int shapes;

enum { ON_CUDA = 1 };
#define CPU(operation) cpu::operation
#define RUN(operation, ...) \
    do { \
        if (c->on_cpu) cpu::operation(__VA_ARGS__, NULL); \
        else ::operation(__VA_ARGS__, stream); \
    } while (0)
#define SCRATCH(bytes) (bytes)
#include "dev/test/operations.h"

// ------------------------------------------------------------------------------------------------
// Runs

static char* held_scratch;  // used by scratch_memory
static size_t held_scratch_bytes;

static void* device_memory(size_t bytes) {
    Error error;
    void* memory = device_allocate(max_size(bytes, 1), stream, &error);
    need(memory != NULL, "%s", error.text);
    return memory;
}

// Memory for a case: filled with the guards' pattern, or, for the sanitizers, uninitialized.
static void* fresh_memory(size_t bytes) {
    void* memory = NULL;
    if (!exact_memory) memory = device_memory(bytes);
    else CUDA_CHECK(cudaMalloc(&memory, max_size(bytes, 1)));
    if (!exact_memory) CUDA_CHECK(cudaMemsetAsync(memory, 0xA5, bytes, stream->compute));
    return memory;
}

// Scratch memory of `bytes` bytes, with a guard behind it: always the same, since operations may ask for a lot. Fills
// its beginning, which is the part that they use.
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
    device_download(guard, device, GUARD, stream);
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0xA5) return false;
    return true;
}

// Runs the CUDA operation once, with all arrays moved by `shift` elements and scratch memory filled with `filling`. The
// outputs are then in the arrays' `got`. Adds forbidden writes to `broken`.
static void case_cuda_run(Case* c, size_t shift, unsigned char filling, const Array* poison, char* broken,
                          size_t size) {
    size_t guard = exact_memory ? 0 : GUARD;
    for (int i = 0; i < c->count; i++) {
        Array* a = &c->arrays[i];
        if (a->n == 0) continue;
        size_t moved = guard + shift * kind_bytes(a->kind), bytes = array_bytes(a);
        if (a->got == NULL) a->got = hold(bytes);
        if (a->first == NULL) a->first = hold(bytes);
        a->device = (char*)fresh_memory(moved + bytes + guard);
        a->elements = a->device + moved;
        if (exact_memory && (a->role == OUTPUT || a->role == UNREAD)) continue;
        array_fresh(a, a->got, poison, NAN);
        device_upload(a->elements, a->got, bytes, stream);
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
        if (a->role != UNREAD) device_download(a->got, a->elements, array_bytes(a), stream);
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

// Leaves the outputs in `got`.
static void case_prove(Case* c) {
    char broken[128] = "", swallowed[128] = "";
    case_cpu(c, NULL, 0);
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
        case_check(c, same && broken[0] == 0, "%-6s twice: %s, touched: %s", where,
                   shapes == SHAPES_TINY ? "not run" : same ? "same bits" : "DIFFERENT",
                   broken[0] ? broken : "outputs only");
    }
    if (shapes == SHAPES_TINY) return;
    // Each array is poisoned with NaN in turn, if it can be; then the clean run is restored for the caller.
    int tried = 0;
    for (int i = 0; i < c->count; i++) {
        const Array* a = &c->arrays[i];
        if (!case_can_poison(c, a)) continue;
        tried++;
        case_cpu(c, a, NAN);
        bool expected = case_shows(c, a, false, true);
        case_cuda_run(c, 0, 0xFF, a, broken, sizeof broken);
        size_t length = strlen(swallowed);
        if (!expected || !case_shows(c, a, false, false))
            snprintf(swallowed + length, sizeof swallowed - length, " NaN in %s%s", a->name,
                     expected ? "" : " (by the CPU)");
    }
    if (tried > 0)
        case_check(c, swallowed[0] == 0, "swallowed:%s", swallowed[0] ? swallowed : " nothing");
    case_cpu(c, NULL, 0);
    for (int i = 0; i < c->count; i++)
        if (is_output(&c->arrays[i])) memcpy(c->arrays[i].got, c->arrays[i].first, array_bytes(&c->arrays[i]));
}

// ------------------------------------------------------------------------------------------------
// Optimizers that need a whole matrix: one update, from states left by an update on the CPU

static const size_t MATRIX_RANK = 3;

static void call_matrix_optimizer(const Case* c) {
    OptimizerSlice slice = tensor_slice(c);
    for (int a = 4, s = 0; a < c->count; a++, s += s == 2 ? 3 : 1)  // states 3 and 4 do not belong to a matrix
        if (c->arrays[a].n > 0) slice.states[s] = f(c, a);
    RUN(optimizer_update, &slice, &c->step);
}
static const Operation operation_matrix_optimizer = {"optimizer_update", call_matrix_optimizer};

// amplified: the factor by which the rounding error of a matmul has grown in the update's direction.
static void test_matrix_optimizer(OptimizerKind kind, TensorShape shape, uint64_t step, double amplified) {
    if (!wanted("optimizer_update matrix")) return;
    static const char* const names[4] = {"m", "v", "projection", "error"};
    size_t n = shape_elements(&shape), index;
    bool tf32 = kind == OPTIMIZER_MUON && !FLOATX_IS_FLOAT;  // roundings that are larger, but many, of random sign
    double rounding = tf32 ? 8.0 * 0x1p13 : amplified;
    Shape s = {.N = n};
    Case c = case_begin(operation_matrix_optimizer, &s, "%s %zux%zu step=%zu", OPTIMIZERS[kind].name, shape.rows,
                        shape.cols, (size_t)step);
    c.tensor = shape;
    c.step = test_step(kind, max_size(1, step - 1));
    c.step.rank = MATRIX_RANK;
    c.scratch_bytes = scratch_bytes(shape.rows, shape.cols);
    Result* outputs[6] = {output(&c, "params", OUTPUT, STORED, n, 1), output(&c, "masters", IN_PLACE, FLOAT, n, 1)};
    int count = 2;
    array(&c, "grads", INPUT, FLOAT, n, 1);
    array(&c, "scratch", UNREAD, DOUBLE, optimizer_scratch_floats(kind, &shape, MATRIX_RANK) / 2, 1);  // aligned
    for (int i = 0; i < 4; i++) {
        int state = i == 3 ? 5 : i;
        if (state >= (int)optimizer_states(kind)) continue;
        size_t elements = optimizer_state_part(&index, OPTIMIZERS[kind].states[state].shape, &shape, MATRIX_RANK, 0, n);
        outputs[count++] = output(&c, names[i], IN_PLACE, FLOAT, elements, 1);
        if (elements > 0) memset(newest(&c)->start, 0, array_bytes(newest(&c)));
    }
    case_cpu(&c, NULL, 0);
    for (int a = 1; a < c.count && step > 1; a++)
        if (is_output(&c.arrays[a]) && c.arrays[a].n > 0)
            memcpy(c.arrays[a].start, c.arrays[a].host, array_bytes(&c.arrays[a]));
    for (int i = 0; i < count; i++)
        for (size_t j = 0; j < outputs[i]->n; j++)
            outputs[i]->size[j] = i < 2 ? 1.0 + (double)c.step.lr * rounding : kind == OPTIMIZER_MUON ? 1.0 : rounding;
    c.witness = 0;
    c.step.step = step;
    case_prove(&c);
    release();
}

static void test_matrix_optimizers(void) {
    const TensorShape shapes[4] = {{.rows = 5, .cols = 9, .hidden = true}, {.rows = 40, .cols = 24, .hidden = true},
                                   {.rows = 22, .cols = 12, .hidden = true, .stacked = {12, 5, 5}},
                                   {.rows = 2, .cols = 3, .hidden = true}};
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        test_matrix_optimizer(OPTIMIZER_MUON, shapes[i], 2, 500.0);  // 3.4445^5, the slope of its iterations at 0
        for (int refresh = 0; refresh < 2; refresh++) {
            test_matrix_optimizer(OPTIMIZER_GALORE, shapes[i], refresh ? 201 : 2, 100.0);
            test_matrix_optimizer(OPTIMIZER_LDADAM, shapes[i], refresh ? 1 : 3, 100.0);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// Device: the promises of device.cuh

// out (n) = the sum of a batch's tokens, targets and positions (n each).
static __global__ void test_join(int32_t* out, const int32_t* batch, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = batch[i] + batch[n + i] + batch[2 * n + i];
}

static void test_device(void) {
    enum { N = 1000, BATCHES = 5 };
    const size_t bytes = N * sizeof(int32_t);
    int32_t host[N], targets[N], positions[N];
    int32_t* places[2] = {(int32_t*)device_memory(3 * bytes), (int32_t*)device_memory(3 * bytes)};
    int32_t* sums[BATCHES];
    Error error;
    bool zero = true, batches = true;
    device_download(host, places[1], bytes, stream);
    for (int i = 0; i < N; i++) zero = zero && host[i] == 0;
    check(zero, "device_allocate: zeros");
    need(check(device_prepare(stream, NULL, 0, 3 * bytes, &error), "device_prepare"), "%s", error.text);
    for (int batch = 0; batch < BATCHES; batch++) {
        sums[batch] = (int32_t*)device_memory(bytes);
        for (int i = 0; i < N; i++) host[i] = i, targets[i] = 1000000 * (batch + 1), positions[i] = 1000 * (i % 7);
        int32_t* place = device_upload_batch(places, host, targets, positions, bytes, stream);
        for (int i = 0; i < N; i++) host[i] = targets[i] = positions[i] = -1;  // allowed by its description
        test_join<<<(N + 127) / 128, 128, 0, stream->compute>>>(sums[batch], place, N);
        LAUNCH_CHECK();
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        device_download(host, sums[batch], bytes, stream);
        for (int i = 0; i < N; i++) batches = batches && host[i] == 1000000 * (batch + 1) + 1000 * (i % 7) + i;
        device_free(sums[batch], bytes);
    }
    check(batches, "device_upload_batch: operations wait for their batch, and no batch overwrites one that is in use");
    fill_zero(places[0], bytes, stream);
    device_download(host, places[0], bytes, stream);
    zero = true;
    for (int i = 0; i < N; i++) zero = zero && host[i] == 0;
    check(zero, "fill_zero");
    device_free(places[0], 3 * bytes);
    device_free(places[1], 3 * bytes);
}

// ------------------------------------------------------------------------------------------------
// Matmuls with a GELU

OPERATION(matmul_gelu_forward, x(c, 0), x(c, 4), x(c, 1), x(c, 2), x(c, 3), s->M, s->N, s->K)
OPERATION(matmul_gelu_backward_input, x(c, 0), x(c, 1), x(c, 2), x(c, 3), s->M, s->N, s->K)

// The derivative of GELU at n places, with its size, as a result for one in dout.
static Result* gelu_slope(double* at, size_t n) {
    Shape s = {.N = n};
    Result* slope = result(n);
    double *ones = hold_doubles(n), *in[1] = {at};
    for (size_t i = 0; i < n; i++) ones[i] = 1.0;
    reference_gelu_backward(&slope, ones, in, &s);
    return slope;
}

// The matmul and the GELU after it: an error of the sum changes the output by the slope there, and so does the rounding
// of the sum to floatX, which may happen before the GELU or not. Libraries compute 1 + tanh(u), with the rounding error
// of a 1, where ours is 2 sigmoid(2u): both forms are allowed. On a GPU a fused GELU may use the hardware's tanh, with
// error 2^-11 ("PTX ISA", tanh.approx), not float's; the emulated library computes with floats.
#ifdef EMULATED
#define TANH_ERROR(fused) 0.0
#else
#define TANH_ERROR(fused) ((fused) ? 0x1p-11 / (double)FLOATX_EPSILON : 0.0)  // in units of floatX
#endif
static void test_matmul_gelu_forward(const Case* forward, const Result* sum) {
    Case c = case_begin(operation_matmul_gelu_forward, &forward->s, "%s", forward->shape);
    c.scratch_bytes = forward->scratch_bytes;
    size_t n = sum->n, K = forward->s.K;
    Result* out = output(&c, "out", OUTPUT, STORED, n, K);
    for (int i = 1; i < 4; i++) input_again(&c, &forward->arrays[i]);
    Result* pre = output(&c, "pre", OUTPUT, STORED, n, K);
    case_cpu(&c, NULL, 0);
    double* in[1] = {doubles(newest(&c), newest(&c)->host)};
    Shape s = {.N = n};
    Result* slope = gelu_slope(in[0], n);
    reference_gelu(out, in, &s);
    for (size_t i = 0; i < n; i++) {
        double steepest = fabs(slope->value[i]) + (double)FLOATX_EPSILON * fabs(in[0][i]);  // |gelu''| < 1.2, nearby
        result_add(pre, i, sum->value[i], sum->size[i]);
        out->size[i] += sum->size[i] * steepest + fabs(in[0][i]);
        out->rounded[i] = fabs(in[0][i]) * (steepest + TANH_ERROR(matmul_state(stream)->fuse_gelu) / 2);
    }
    case_prove(&c);
}

// din = sum * slope: the slope has an error of its own, and the sum may have been rounded to floatX before.
static void test_matmul_gelu_backward(const Case* backward, const Result* sum) {
    Case c = case_begin(operation_matmul_gelu_backward_input, &backward->s, "%s", backward->shape);
    c.scratch_bytes = backward->scratch_bytes;
    size_t n = sum->n;
    Result* din = output(&c, "din", OUTPUT, STORED, n, backward->s.N);
    for (int i = 1; i < 3; i++) input_again(&c, &backward->arrays[i]);
    double* pre = input(&c, "pre", n, 2);
    Result* slope = gelu_slope(pre, n);
    for (size_t i = 0; i < n; i++) {
        double tanh_size = 1.0 + fabs(pre[i]) * (0.8 + 0.11 * pre[i] * pre[i]);  // of 1 + tanh(u) + x (1 - tanh^2) u'
        din->size[i] = sum->size[i] * fabs(slope->value[i]) + fabs(sum->value[i]) * (slope->size[i] + tanh_size);
        din->rounded[i] = fabs(sum->value[i] * slope->value[i]) + SMALLEST_NORMAL * fabs(slope->value[i]) +
                          fabs(sum->value[i]) * tanh_size * TANH_ERROR(matmul_state(stream)->fuse_gelu);
    }
    case_prove(&c);
}

// ------------------------------------------------------------------------------------------------
// Sums in fixed point, checksum: the same bits as on the CPU

static int64_t* i64(const Case* c, int array) { return (int64_t*)at(c, array); }

OPERATION(exact_add, i64(c, 0), d(c, 1), f(c, 2), c->scale, c->limit, s->N)
OPERATION(exact_merge, i64(c, 0), i64(c, 1), s->N)
OPERATION(exact_read, f(c, 0), i64(c, 1), 1.0 / c->scale, s->N)
OPERATION(vector_checksum, (uint64_t*)i64(c, 0), x(c, 1), s->first_position, s->N)

// Integers of any length up to 61 bits, so that sums do not overflow.
static Array* longs(Case* c, const char* name, Role role, size_t n) {
    Array* a = array(c, name, role, LONG, n, 1);
    for (size_t i = 0; i < n; i++) {
        Random4 r = random4(3, RANDOM_TEST, cases * ARRAYS + (uint64_t)c->count, i);
        int64_t any = (int64_t)(((uint64_t)r.bits[0] << 32 | r.bits[1]) >> (3 + r.bits[2] % 61));
        ((int64_t*)a->start)[i] = r.bits[3] % 2 ? any : -any;
    }
    return a;
}

// Floats of all exponents up to 2^8, a quarter of them ties at this scale.
static void make_fixed(const Array* a, double scale) {
    for (size_t i = 0; i < a->n; i++) {
        Random4 r = random4(4, RANDOM_TEST, cases, i);
        float any = float_from_bits((r.bits[0] & 0x807fffffu) | (r.bits[1] % 135) << 23);
        float tie = (float)(((double)(r.bits[1] % 2048) - 1023.5) / scale);
        ((float*)a->start)[i] = r.bits[2] % 4 ? any : tie;
    }
}

// outside: number of elements beyond the limit.
static void test_exact_add(size_t N, double scale, double limit, size_t outside) {
    if (!wanted("exact_add")) return;
    Shape s = {.N = N};
    Case c = case_begin(operation_exact_add, &s, "N=%zu x%.3g to %g, %zu beyond", N, scale, limit, outside);
    c.scale = scale;
    c.limit = limit;
    c.changes = true;
    c.witness = outside ? -1 : 1;  // a NaN adds nothing to sums; bad becomes 1, or is 1 already
    longs(&c, "sums", IN_PLACE, N);
    Array* bad = array(&c, "bad", IN_PLACE, LONG, 1, 0);  // the bits of a double: 0.0
    Array* in = array(&c, "x", INPUT, FLOAT, N, 1);
    make_fixed(in, scale);
    float* values = (float*)in->start;
    float inside = (float)limit;
    if ((double)inside > limit) inside = nextafterf(inside, 0.0f);
    const float beyond[5] = {nextafterf(inside, INFINITY), INFINITY, NAN, -INFINITY, nextafterf(-inside, -INFINITY)};
    if (N > 2) values[0] = inside, values[N - 1] = -inside;
    for (size_t i = 0; i < outside; i++) values[(i * 7919 + 1) % N] = beyond[i % 5];
    if (N > 0) values[in->live] = 1.0f;
    case_prove(&c);
    double mark = outside ? 1.0 : 0.0;
    case_check(&c, memcmp(bad->host, &mark, sizeof mark) == 0, "bad is %g on the CPU", mark);
    release();
}

static void test_exact(size_t N) {
    Shape s = {.N = N, .first_position = ((size_t)1 << 40) + 7};
    test_exact_add(N, 0x1p50, 512.0, 0);
    test_exact_add(N, 0x1p50 / 3, 1000.9, 0);  // 1000.9 is not a float; the nearest is above it
    if (N > 3) test_exact_add(N, 0x1p50, 512.0, 1);
    if (N > 100) test_exact_add(N, 0x1p50 / 3, 1000.9, N / 4);
    const struct {
        Operation o;
        Role out;
        Kind out_kind, in_kind;
        double scale;
    } rows[4] = {
        {operation_exact_merge, IN_PLACE, LONG, LONG, 0},
        {operation_exact_read, OUTPUT, FLOAT, LONG, 0x1p50},
        {operation_exact_read, OUTPUT, FLOAT, LONG, 0x1p50 / 3},
        {operation_vector_checksum, OUTPUT, LONG, STORED, 0},
    };
    for (int i = 0; i < 4; i++) {
        if (!wanted(rows[i].o.name)) continue;
        Case c = case_begin(rows[i].o, &s, "N=%zu", N);
        c.scale = rows[i].scale;
        c.changes = i == 3;
        if (rows[i].out == IN_PLACE) longs(&c, "sums", IN_PLACE, N);
        else array(&c, "out", rows[i].out, rows[i].out_kind, i == 3 ? 1 : N, 1);
        if (rows[i].in_kind == LONG) longs(&c, "x", INPUT, N);
        else input(&c, "x", N, 1);
        case_prove(&c);
    }
    release();
}

// Sums of terms of all exponents, in two calls that begin at any address: the same limbs as on the CPU.
static void test_exact_sums(size_t N, size_t moved, float last) {
    if (!wanted("exact_sum exact_sum_squares")) return;
    size_t bytes = (N + moved) * sizeof(float);
    float *values = (float*)hold(bytes), *in = (float*)device_memory(bytes);
    ExactSum *sum = (ExactSum*)device_memory(sizeof(ExactSum)), got, expected;
    for (size_t i = 0; i < N + moved; i++) {
        Random4 r = random4(5, RANDOM_TEST, cases, i);
        values[i] = float_from_bits((r.bits[0] & 0x807fffffu) | (127 - 60 + r.bits[1] % 69) << 23);
    }
    values[moved + N - 1] = last;
    device_upload(in, values, bytes, stream);
    for (int squares = 0; squares < 2; squares++) {
        memset(&expected, 0, sizeof expected);
        fill_zero(sum, sizeof *sum, stream);
        for (int call = 0; call < 2; call++) {
            (squares ? ::exact_sum_squares : ::exact_sum)(sum, in + moved, N, stream);
            (squares ? cpu::exact_sum_squares : cpu::exact_sum)(&expected, values + moved, N, NULL);
        }
        device_download(&got, sum, sizeof got, stream);
        double value = exact_value(got), right = exact_value(expected);
        bool same = value == right;
        for (int w = 0; w < EXACT_WINDOWS; w++) {
            exact_carry(&got.windows[w]);
            exact_carry(&expected.windows[w]);
            same = same && memcmp(got.windows[w].limbs, expected.windows[w].limbs, sizeof got.windows[w].limbs) == 0;
        }
        check(isfinite(last) ? same : isnan(value) && isnan(right), "%-28s N=%zu moved by %zu, last %g: %.17g",
              squares ? "exact_sum_squares" : "exact_sum", N, moved, (double)last, value);
    }
    device_free(sum, sizeof(ExactSum));
    device_free(in, bytes);
    release();
}

// ------------------------------------------------------------------------------------------------
// Statistics of leaves: the same bits for logits at any address

static void test_leaves_moved(size_t N, size_t leaves, size_t width) {
    if (!wanted("classifier_leaves")) return;
    const size_t n = N * leaves * width, bytes = N * leaves * LEAF_STATS * sizeof(float);
    floatX *values = (floatX*)hold(n * sizeof(floatX)), *logits = (floatX*)device_memory((n + 1) * sizeof(floatX));
    float *stats = (float*)device_memory(bytes), *got[2] = {(float*)hold(bytes), (float*)hold(bytes)};
    int32_t* targets = (int32_t*)device_memory(N * sizeof(int32_t));  // zeros
    for (size_t i = 0; i < n; i++) values[i] = floatX_of(3.0f * random_normal(6, RANDOM_TEST, cases, i));
    for (size_t moved = 0; moved < 2; moved++) {
        device_upload(logits + moved, values, n * sizeof(floatX), stream);
        ::classifier_leaves(stats, logits + moved, targets, 0, leaves, N, leaves * width, leaves * width, stream);
        device_download(got[moved], stats, bytes, stream);
    }
    check(memcmp(got[0], got[1], bytes) == 0, "%-28s N=%zu leaves=%zu width=%zu %s the same bits, moved by one element",
          "classifier_leaves", N, leaves, width, FLOATX_NAME);
    device_free(targets, N * sizeof(int32_t));
    device_free(stats, bytes);
    device_free(logits, (n + 1) * sizeof(floatX));
    release();
}

// ------------------------------------------------------------------------------------------------
// Vectors beyond 2^31 elements: a few values, repeated, of which the last are compared with the CPU

static void test_huge(void) {
    const size_t n = ((size_t)1 << 31) + 4099, tail = 8192, first = n - tail;
    const size_t bytes = n * sizeof(floatX), tail_bytes = tail * sizeof(floatX);
    if (!wanted("huge gelu_forward dropout cast_to_float checksum")) return;
    Error error;
    floatX* in = (floatX*)device_allocate(bytes, stream, &error);
    floatX* out = in ? (floatX*)device_allocate(n * sizeof(float), stream, &error) : NULL;
    need(out != NULL, "--shapes huge: %s", error.text);
    floatX *values = (floatX*)hold(tail_bytes), *expected = (floatX*)hold(tail_bytes);
    floatX* got = (floatX*)hold(tail * sizeof(float));
    for (size_t i = 0; i < tail; i++) values[i] = floatX_of(1.0f + (float)i / (float)tail);
    device_upload(in + first, values, tail_bytes, stream);
    const char* const names[3] = {"gelu_forward", "dropout", "cast_to_float"};
    for (int operation = 0; operation < 3; operation++) {
        size_t wrong = 0;
        if (operation == 0) {
            ::gelu_forward(out, in, n, stream);
            cpu::gelu_forward(expected, values, tail, NULL);
        } else if (operation == 1) {
            ::dropout_apply(out, in, 0.5f, 11, 5, 0, n, stream);
            cpu::dropout_apply(expected, values, 0.5f, 11, 5, first, tail, NULL);
        } else {
            ::cast_to_float((float*)out, in, n, stream);
            memcpy(expected, values, tail_bytes);
        }
        device_download(got, operation == 2 ? (void*)((float*)out + first) : (void*)(out + first),
                        tail * (operation == 2 ? sizeof(float) : sizeof(floatX)), stream);
        for (size_t i = 0; i < tail; i++) {
            double a = operation == 2 ? (double)((float*)got)[i] : (double)float_of(got[i]);
            double b = (double)float_of(expected[i]);
            wrong += !(fabs(a - b) <= (2.0 * (double)FLOATX_EPSILON + 0x1p-20) * fabs(b));
        }
        check(wrong == 0, "%-28s N=%zu %s the last %zu elements", names[operation], n, FLOATX_NAME, tail);
    }
    uint64_t *sums = (uint64_t*)device_memory(2 * sizeof(uint64_t)), parts[2], last;
    ::vector_checksum(sums, in, 5, n, stream);
    ::vector_checksum(sums + 1, in, 5, first, stream);
    cpu::vector_checksum(&last, values, 5 + first, tail, NULL);
    device_download(parts, sums, sizeof parts, stream);
    check(parts[0] == parts[1] + last, "%-28s N=%zu %s the last %zu elements", "checksum", n, FLOATX_NAME, tail);
    device_free(sums, 2 * sizeof(uint64_t));
    device_free(in, bytes);
    device_free(out, n * sizeof(float));
    release();
}

// ------------------------------------------------------------------------------------------------

// Sizes of real models, too slow for the emulator: more blocks than processors, long rows, long loops.
static void test_large_shapes(void) {
    test_embedding(4, 1024, 768, 50257, POSITIONS_ORDERED, 0, TOKENS_RANDOM);
    test_embedding(4, 1024, 768, 50257, POSITIONS_RANDOM, 0, TOKENS_EQUAL);
    test_norm(true, true, 4096, 768, 1.0);
    test_norm(false, true, 2048, 4096, 1.0);
    test_norm(true, false, 100, 12288, 1.0);
    test_matmul(256, 2304, 768, true);
    test_matmul(1000, 771, 333, true);
    test_rope(2, 1024, 8, 2, 128, 0, 500000.0f);
    test_heads(4, 1024, 16, 8, 64);
    test_heads_copies(4, 1024, 16, 2, 128);
    test_heads_copies(3, 1024, 12, 4, 66);
    test_columns(4096, 1536, 1536, 12288);
    test_pair_columns(4096, 6144, 4096, 1024, 2.0f);
    test_pair_columns(4096, 777, 333, 111, 2.0f);
    test_leaves_sum(8, 1024, 1024, true);
    test_nf4(1024 * 768, 2048 * 768, 4096 * 768, true);
    test_nf4(777, 1000003, 1000803, false);
    test_embedding_parts(8, 6288, 4096, 768, true, TOKENS_RANDOM);
    test_attention(1, 1024, 4, 4, 64, 1.0);
    test_attention(1, 777, 4, 1, 128, 1.0);
    test_attention(2, 500, 2, 2, 80, 1.0);
    test_nonlinearity(true, 1024, 3072, 1.0);
    test_nonlinearity(false, 1024, 1365, 1.0);
    test_dropout(3000001, 5, 0.1f);
    test_classifier(128, 50257, 50304, 1.0, 5, 1.0f / 128);
    test_classifier_parts(8, 64, 50257, 50304, 1.0, 5, 1.0f / 64);
    test_vectors(5000011);
    test_vectors(4000000);
    test_exact(5000011);
    test_exact_sums(5000011, 0, 1.5f);
    test_exact(4000000);
    test_optimizer(OPTIMIZER_ADAMW, true, 3000001, 8, 3);
    test_optimizer(OPTIMIZER_ADAMW, false, 3000001, 9, 3);
}

// Rows of more channels than one block holds: each of a row's blocks reads the others' slabs for its sums.
static void test_slabs(void) {
    for (int kind = 0; kind < 4; kind++)
        for (size_t N = 1; N <= 2; N++) test_norm(kind / 2, kind % 2, N, NORM_SLAB + 8, 1.0);
}

// One ragged and one round shape per operation: compute-sanitizer makes every access slower by orders of magnitude.
static void test_tiny_shapes(void) {
    test_embedding(2, 9, 7, 4, POSITIONS_ORDERED, 3, TOKENS_RANDOM);
    test_embedding(1, 33, 40, 20, POSITIONS_EQUAL, 0, TOKENS_RANDOM);
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        test_norm(layernorm, true, 5, 7, 1.0);
        test_norm(layernorm, false, 9, 72, 1.0);
    }
    test_matmul(5, 7, 3, true);
    test_matmul(33, 40, 72, true);
    test_rope(1, 5, 4, 2, 6, 1, 10000.0f);
    test_rope(1, 5, 3, 1, 16, 0, 10000.0f);
    test_heads(2, 5, 6, 2, 6);
    test_heads(3, 5, 9, 3, 16);
    test_heads(4, 3, 8, 0, 8);
    test_heads_copies(2, 5, 6, 2, 6);
    test_heads_copies(3, 3, 9, 1, 16);
    test_columns(3, 8, 16, 24);
    test_leaves_sum(16, 2, 8, true);
    test_leaves_sum(4, 3, 7, false);
    test_nf4(3, 130, 140, false);
    test_nf4(64, 512, 640, true);
    test_embedding_parts(2, 5, 33, 8, true, TOKENS_RANDOM);
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
    test_classifier_parts(2, 3, 30, 32, 1.0, 2, 1.0f);
    test_vectors(1001);
    test_vectors(512);
    test_exact(1001);
    test_exact_sums(1001, 0, NAN);
    test_exact_sums(1000, 4, 1.5f);
    test_exact(512);
    for (int kind = 0; kind < 4; kind++) {
        test_optimizer((OptimizerKind)kind, true, 1003, 8, 1);
        test_optimizer((OptimizerKind)kind, false, 1003, 9, 1);
    }
    test_optimizer_list(OPTIMIZER_ADAMW, true);
}

int main(int argc, char** argv) {
    static const size_t lengths[6] = {0, 1, 2, 33, 4096, 20001};
    Error error;
    int code;
    shapes = SHAPES_ODD;
#ifndef EMULATED
    shapes = SHAPES_LARGE;
#endif
    const Flag rows[] = {
        {"only", KIND_TEXT, &only, "NAME", 0, 0, "the operations with this in their names", false},
        {"shapes", KIND_CHOICE, &shapes, "tiny|odd|large|huge", 0, 0,
         "all up to this size; tiny: no others, and each once", false},
        {"exact", KIND_SWITCH, &exact_memory, "", 0, 0, "arrays without guard zones around them", false},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    if (!flags_begin(&code, "test_cuda", NULL, &flags, argc, argv)) return code;
    tests_begin("test_cuda");
    need(device_open(&stream, false, &error), "%s", error.text);
    if (only == NULL) test_device();
    test_matrix_optimizers();
    if (shapes == SHAPES_TINY) test_tiny_shapes();
    else test_odd_shapes(), test_slabs();
    for (size_t i = 0; i < COUNT_OF(lengths) && shapes != SHAPES_TINY; i++) test_exact(lengths[i]);
    for (size_t i = 1; i < COUNT_OF(lengths) && shapes != SHAPES_TINY; i++)
        test_exact_sums(lengths[i], i % 3, i == 3 ? 0x1p51f : 1.5f);
    test_leaves_moved(3, 4, 72);
    test_leaves_moved(2, 1, 100);
    if (shapes >= SHAPES_LARGE) test_large_shapes();
    if (shapes >= SHAPES_HUGE) test_huge();
    if (held_scratch) CUDA_CHECK(cudaFree(held_scratch));
    device_close(stream);
    return tests_end();
}
