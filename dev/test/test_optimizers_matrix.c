// test_optimizers_matrix.c: Muon, GaLore and LDAdam against float64 results of dev/peers/optimizers_matrix.py.
//
//   updates     100 of each, of a wide matrix, a tall one, and three in one tensor: the final weights
//   subspaces   leading singular vectors equal NumPy's SVD; bases are orthonormal, even for a matrix of zeros
//   bits        the same for 1 and 3 threads, and for a tensor at another address
//   others      a tensor that is not a hidden matrix gets AdamW's update, to the bit

#include "kernels_cpu.h"
#include "harness.h"
#include "whole_tensors.h"

enum { STEPS = 100, RANK = 3, ELEMENTS = 512 };

static SafetensorsFile fixture;

// The array of that name, and its number of elements.
static void* fixture_array(const char* name, size_t* n) {
    Error error;
    const SafetensorsTensor* t = safetensors_find(&fixture, name);
    need(t != NULL, "%s in the fixture", name);
    void* data = memory_allocate(t->bytes);
    need(data != NULL && safetensors_read(&fixture, t, data, t->bytes, NULL, &error), "%s", name);
    *n = t->bytes / dtype_bytes(t->type);
    return data;
}

// gradient() of optimizers_matrix.py.
static void gradient(float* g, size_t update, size_t first, size_t rows, size_t cols, bool falls) {
    for (size_t i = 0; i < rows * cols; i++) {
        uint32_t x = (uint32_t)(update * 100003 + first + i) * 2654435761u;
        x = (x ^ x >> 15) * 2246822519u;
        x = (x ^ x >> 13) * 3266489917u;
        size_t along = rows <= cols ? i / cols : i % cols;
        g[i] = ((float)(x >> 8) * 0x1p-23f - 1.0f) * (falls ? (float)ldexp(1.0, -2 * (int)along) : 1.0f);
    }
}

typedef struct {
    const char* name;
    TensorShape shape;
} TestShape;

static const TestShape SHAPES[] = {
    {"wide", {.rows = 12, .cols = 20, .hidden = true}},
    {"tall", {.rows = 24, .cols = 10, .hidden = true}},
    {"stacked", {.rows = 24, .cols = 16, .hidden = true, .stacked = {12, 6, 6}}},
};

// A tensor with its states, each in an exactly sized allocation.
typedef struct {
    OptimizerSlice slice;
    float* grads;
    size_t counts[OPTIMIZER_STATES];
} TestTensor;

static TestTensor tensor_make(OptimizerKind kind, const TensorShape* shape, const float* weights) {
    TestTensor t;
    memset(&t, 0, sizeof t);
    t.slice.n = shape_elements(shape);
    t.slice.first = 64;
    t.slice.shape = *shape;
    t.slice.params = (floatX*)malloc(t.slice.n * sizeof(float));
    t.slice.grads = t.grads = (float*)malloc(t.slice.n * sizeof(float));
    t.slice.scratch = (float*)malloc(max_size(1, optimizer_scratch_floats(kind, shape, RANK)) * sizeof(float));
    memcpy(t.slice.params, weights, t.slice.n * sizeof(float));
    for (size_t s = 0; s < optimizer_states(kind); s++) {
        size_t index;
        t.counts[s] = optimizer_state_part(&index, OPTIMIZERS[kind].states[s].shape, shape, RANK, 0, t.slice.n);
        if (t.counts[s] > 0) t.slice.states[s] = calloc(t.counts[s], sizeof(float));
    }
    return t;
}

static void tensor_free(TestTensor* t) {
    for (size_t s = 0; s < OPTIMIZER_STATES; s++) free(t->slice.states[s]);
    free(t->slice.params);
    free(t->grads);
    free(t->slice.scratch);
}

static OptimizerStep step_of(OptimizerKind kind) {
    OptimizerStep o = {.kind = kind, .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f,
                       .weight_decay = 0.1f, .grad_scale = 0.5f, .seed = 1, .rank = RANK};
    return o;
}

static void tensor_train(TestTensor* t, OptimizerKind kind, size_t steps) {
    OptimizerStep o = step_of(kind);
    for (size_t step = 1; step <= steps; step++) {
        size_t rows[SHAPE_MATRICES], count = shape_matrices(rows, &t->slice.shape), first = 0;
        o.step = step <= STEPS / 2 ? step : 120 + step;  // 1 to 50 and 171 to 220: GaLore's subspace changes in 201
        size_t cols = max_size(1, t->slice.shape.cols);
        for (size_t i = 0; i < count; first += rows[i++] * cols)
            gradient(t->grads + first, o.step, first, rows[i], cols, kind != OPTIMIZER_MUON);
        for (size_t i = 0; i < t->slice.n; i++) t->grads[i] *= 2.0f;  // which grad_scale undoes
        optimizer_update(&t->slice, &o, NULL);
    }
}

static void test_updates(OptimizerKind kind, double bound) {
    for (size_t s = 0; s < COUNT_OF(SHAPES); s++) {
        size_t n;
        char name[64];
        double worst = 0.0;
        snprintf(name, sizeof name, "%s.%s.start", OPTIMIZERS[kind].name, SHAPES[s].name);
        float* start = (float*)fixture_array(name, &n);
        snprintf(name, sizeof name, "%s.%s.final", OPTIMIZERS[kind].name, SHAPES[s].name);
        double* final = (double*)fixture_array(name, &n);
        uint64_t hashes[3];
        for (int run = 0; run < 3; run++) {
            threads_set(run == 1 ? 3 : 1);
            TestTensor t = tensor_make(kind, &SHAPES[s].shape, start);
            tensor_train(&t, kind, STEPS);
            for (size_t i = 0; i < n && run == 0; i++) {
                double error = fabs((double)float_of(t.slice.params[i]) - final[i]);
                if (!(error <= worst)) worst = error;
            }
            hashes[run] = hash_bytes(t.slice.params, n * sizeof(float));
            for (size_t state = 0; state < OPTIMIZER_STATES; state++)
                if (t.slice.states[state])
                    hashes[run] ^= hash_bytes(t.slice.states[state], t.counts[state] * sizeof(float));
            tensor_free(&t);
        }
        check_bound(worst, bound, "%s, %s: weights after %d updates against float64", OPTIMIZERS[kind].name,
                    SHAPES[s].name, STEPS);
        check(hashes[0] == hashes[1] && hashes[0] == hashes[2], "%s, %s: the same bits again and with 3 threads",
              OPTIMIZERS[kind].name, SHAPES[s].name);
        free(start);
        free(final);
    }
}

// The largest element of q q^T - 1.
static double not_orthonormal(const float* q, size_t r, size_t d) {
    double worst = 0.0;
    for (size_t a = 0; a < r; a++)
        for (size_t b = 0; b < r; b++) {
            double dot = VECTOR_SUM_DOUBLE(i, d, (double)q[a * d + i] * (double)q[b * d + i]);
            worst = fmax(worst, isnan(dot) ? INFINITY : fabs(dot - (a == b)));
        }
    return worst;
}

static void test_subspaces(void) {
    enum { ROWS = 16, COLS = 40 };
    size_t n;
    float* g = (float*)fixture_array("spectrum", &n);
    double* expected = (double*)fixture_array("spectrum.basis", &n);
    OptimizerStep o = step_of(OPTIMIZER_GALORE);
    float scratch[64], basis[RANK * ROWS] = {0}, other[RANK * ROWS], low[RANK * COLS], zeros[ROWS * COLS] = {0};
    MatrixUpdate u = {.run = &MATRIX_OPERATIONS, .step = &o, .m = matrix_of(ROWS, COLS, RANK),
                      .squares = (double*)scratch};
    o.step = 1;
    matrix_leading_vectors(&u, basis, g, other, low);
    double worst = 0.0;
    for (size_t k = 0; k < RANK; k++) {
        double sign = VECTOR_SUM_DOUBLE(i, ROWS, (double)basis[k * ROWS + i] * expected[k * ROWS + i]) < 0 ? -1.0 : 1.0;
        for (size_t i = 0; i < ROWS; i++)
            worst = fmax(worst, fabs(sign * (double)basis[k * ROWS + i] - expected[k * ROWS + i]));
    }
    // The third singular value is a sixteenth of the first, whose rounding errors affect it.
    check_bound(worst, 16 * 16 * 0x1p-24, "leading singular vectors against NumPy's SVD");
    check_bound(not_orthonormal(basis, RANK, ROWS), 16 * 0x1p-24, "they are orthonormal");
    memcpy(other, basis, sizeof basis);
    matrix_power_iteration(&u, basis, other, zeros, low);
    check_bound(not_orthonormal(basis, RANK, ROWS), 16 * 0x1p-24, "a matrix of zeros leaves a basis orthonormal");
    float equal[RANK * ROWS];
    for (size_t i = 0; i < RANK * ROWS; i++) equal[i] = (float)(i % ROWS) + 1e-6f * (float)(i * i % 7);
    matrix_orthonormalize(equal, RANK, ROWS, NULL);
    check_bound(not_orthonormal(equal, RANK, ROWS), 16 * 0x1p-24, "rows that were nearly the same become orthonormal");
    free(g);
    free(expected);
}

// An embedding and a vector get AdamW's update, whose m and v are then other states in OPTIMIZERS.
static void test_others(OptimizerKind kind) {
    const TensorShape shapes[2] = {{.rows = 5, .cols = 8}, {.rows = 40}};
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        float start[40];
        gradient(start, 3, 0, 1, 40, false);
        TestTensor a = tensor_make(kind, &shapes[s], start), b = tensor_make(OPTIMIZER_ADAMW, &shapes[s], start);
        tensor_train(&a, kind, 3);
        for (size_t step = 1; step <= 3; step++) {
            OptimizerStep o = step_of(OPTIMIZER_ADAMW);
            o.step = step;
            gradient(b.grads, step, 0, shapes[s].rows, max_size(1, shapes[s].cols), kind != OPTIMIZER_MUON);
            for (size_t i = 0; i < 40; i++) b.grads[i] *= 2.0f;
            optimizer_update(&b.slice, &o, NULL);
        }
        expect(memcmp(a.slice.params, b.slice.params, sizeof start) == 0, "tensor %zu", s);
        tensor_free(&a);
        tensor_free(&b);
    }
    verdict("%s: embeddings and vectors are AdamW's", OPTIMIZERS[kind].name);
}

int main(void) {
    Error error;
    tests_begin("test_optimizers_matrix");
    need(safetensors_open(&fixture, "dev/test/fixtures/optimizers_matrix.safetensors", &error), "%s", error.text);
    // Each update rounds a weight of about 1 and a direction, whose error is amplified: by the slope at 0 of Muon's
    // five iterations, 3.4445^5; by the square of the ratio of the first to the third singular value.
    test_updates(OPTIMIZER_MUON, STEPS * 0x1p-24 * (1 + 0.01 * 0.2 * sqrt(24.0) * pow(3.4445, 5)));
    test_updates(OPTIMIZER_GALORE, STEPS * 0x1p-24 * (1 + 0.01 * 16 * 16));
    test_updates(OPTIMIZER_LDADAM, STEPS * 0x1p-24 * (1 + 0.01 * 16 * 16));
    test_subspaces();
    for (int kind = OPTIMIZER_MUON; kind <= OPTIMIZER_LDADAM; kind++) test_others((OptimizerKind)kind);
    safetensors_close(&fixture);
    return tests_end();
}
