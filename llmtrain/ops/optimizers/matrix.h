// matrix.h: optimizers that treat the weight of a block as a matrix: Muon, GaLore, LDAdam.
//
//   1. operations    what a backend must provide; those of a CPU
//   2. matrices      stacked in one tensor: queries, keys and values; gate and up
//   3. Muon          the momentum with all singular values made equal
//   4. subspaces     leading singular vectors, orthonormal bases, projections
//   5. GaLore        AdamW in a subspace of the gradients that is recomputed every 200 updates
//   6. LDAdam        AdamW in a subspace that follows the gradients; what it leaves out is added to the next gradient
//   7. update
//
// The algorithms are written once, as sequences of operations on float matrices, and each backend fills in a table of
// these operations: update.h and update.cuh. They apply to hidden matrices (TensorShape) only; embeddings, head,
// norms and biases use AdamW, as in their papers.
//
//     matrix_update(&MATRIX_OPERATIONS, slice, step, stream);   // the whole tensor, slice->scratch included

#ifndef LLMTRAIN_OPTIMIZERS_MATRIX_H
#define LLMTRAIN_OPTIMIZERS_MATRIX_H

#include "../gemm.h"
#include "optimizers.h"

// ------------------------------------------------------------------------------------------------
// 1. Operations
//
// All matrices are floats, dense, row-major, in the memory of the backend.

// out (M, N) = a b, where one of a and b may be stored transposed.
typedef enum {
    MATRIX_NN,  // a (M, K), b (K, N)
    MATRIX_NT,  // a (M, K), b (N, K)
    MATRIX_TN   // a (K, M), b (K, N)
} MatrixForm;

typedef enum {
    COMBINE_SUM,              // alpha x + beta y
    COMBINE_SQUARE,           // alpha x + beta y^2
    COMBINE_SQUARE_ABSOLUTE   // |alpha x + beta y^2|
} Combination;

HOST_DEVICE static inline float combined(Combination kind, float alpha, float x, float beta, float y) {
    float sum = alpha * x + beta * (kind == COMBINE_SUM ? y : y * y);
    return kind == COMBINE_SQUARE_ABSOLUTE ? fabsf(sum) : sum;
}

typedef struct {
    // rounds: a GPU may round a and b to TF32, 10 bits of fraction
    void (*multiply)(float* out, const float* a, const float* b, MatrixForm form, bool rounds, size_t M, size_t N,
                     size_t K, Stream stream);
    // out (n), which may be x or y
    void (*combine)(float* out, Combination kind, float alpha, const float* x, float beta, const float* y, size_t n,
                    Stream stream);
    void (*sum_of_squares)(double* out, const float* x, size_t n, Stream stream);
    // out (n) = factor x / (sqrt(squares) + epsilon) + rest y; out may be x or y
    void (*normalize)(float* out, const float* x, const double* squares, float epsilon, float rest, const float* y,
                      size_t n, Stream stream);
    // x (n) = uniform random numbers between -1 and 1, from number `first` of the update's sequence on
    void (*randomize)(float* x, uint64_t seed, uint64_t step, size_t first, size_t n, Stream stream);
    // Makes the rows of x (r, d) orthonormal: each becomes a linear combination of itself and those before it.
    void (*orthonormalize)(float* x, size_t r, size_t d, Stream stream);
    // The element-wise optimizers' update.
    void (*elements)(const OptimizerSlice* slice, const OptimizerStep* step, Stream stream);
} MatrixOperations;

LLMTRAIN_CPU_BEGIN

static inline void matrix_multiply(float* out, const float* a, const float* b, MatrixForm form, bool rounds, size_t M,
                                   size_t N, size_t K, Stream stream) {
    (void)rounds, (void)stream;
    bool a_transposed = form == MATRIX_TN, b_transposed = form == MATRIX_NT;
    gemm_compute(out, DTYPE_F32, N, false, gemm_matrix(a, DTYPE_F32, a_transposed ? M : K, a_transposed),
                 gemm_matrix(b, DTYPE_F32, b_transposed ? K : N, b_transposed), NULL, DTYPE_F32, M, N, K);
}

static inline void matrix_combine(float* out, Combination kind, float alpha, const float* x, float beta, const float* y,
                                  size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = combined(kind, alpha, x[i], beta, y[i]);
}

static inline void matrix_normalize(float* out, const float* x, const double* squares, float epsilon, float rest,
                                    const float* y, size_t n, Stream stream) {
    (void)stream;
    float factor = 1.0f / ((float)sqrt(*squares) + epsilon);
    matrix_combine(out, COMBINE_SUM, factor, x, rest, y, n, stream);
}

static inline void matrix_randomize(float* x, uint64_t seed, uint64_t step, size_t first, size_t n, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(int32_t)random_bits(seed, RANDOM_BASIS, step, first + i) * 0x1p-31f;
}

// Modified Gram-Schmidt, which removes the part along a finished row from all later ones; run twice, since rows that
// were nearly dependent are not yet orthogonal after the first pass ("twice is enough", W. Kahan).
static inline void matrix_orthonormalize(float* x, size_t r, size_t d, Stream stream) {
    (void)stream;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t j = 0; j < r; j++) {
            float* q = x + j * d;
            float squares = VECTOR_SUM(i, d, q[i] * q[i]), factor = squares > 0.0f ? 1.0f / sqrtf(squares) : 0.0f;
            for (size_t i = 0; i < d; i++) q[i] *= factor;
            #pragma omp parallel for if ((r - j) * d > 65536)
            for (size_t row = j + 1; row < r; row++) {
                float* later = x + row * d;
                float along = VECTOR_SUM(i, d, q[i] * later[i]);
                for (size_t i = 0; i < d; i++) later[i] = multiply_add(-along, q[i], later[i]);
            }
        }
    }
}

LLMTRAIN_CPU_END

// ------------------------------------------------------------------------------------------------
// 2. Matrices
//
// All three sources train queries, keys and values as separate matrices, and gate and up too. Here they are rows of one
// tensor, but are updated separately: "for Q, K, V it works better" (Jordan, below), and Llama's published layers, for
// which GaLore and LDAdam were made, have them separate. All query heads are one matrix.

typedef struct {
    size_t rows, cols;
    size_t d, l;      // the shorter side and the longer one
    size_t r;         // of the projection: rank, at most d
    size_t size;      // rows * cols
} Matrix;

static inline Matrix matrix_of(size_t rows, size_t cols, size_t rank) {
    size_t d = min_size(rows, cols);
    Matrix m = {rows, cols, d, max_size(rows, cols), min_size(rank, d), rows * cols};
    return m;
}

// The update of one matrix of a tensor.
typedef struct {
    const MatrixOperations* run;
    const OptimizerStep* step;
    OptimizerSlice slice;   // of the matrix alone, states too
    Matrix m;
    double* squares;        // (1) a sum of squares
    float* scratch;         // the part of it not yet taken
    Stream stream;
} MatrixUpdate;

enum { MATRIX_SCRATCH_UNIT = 64 };  // floats: arrays of the scratch begin on multiples of it

static inline float* matrix_take(MatrixUpdate* u, size_t n) {
    float* x = u->scratch;
    u->scratch += round_up(n, MATRIX_SCRATCH_UNIT);
    return x;
}

// w -= lr (scale direction + weight_decay w), for the matrix's weights: SGD.
static inline void matrix_step(MatrixUpdate* u, const float* direction, float scale) {
    OptimizerStep sgd = *u->step;
    OptimizerSlice slice = u->slice;
    sgd.kind = OPTIMIZER_SGD;
    sgd.grad_scale = scale;
    slice.grads = direction;
    memset(slice.states, 0, sizeof slice.states);
    u->run->elements(&slice, &sgd, u->stream);
}

// ------------------------------------------------------------------------------------------------
// 3. Muon
//
// "Muon: An optimizer for hidden layers in neural networks" (K. Jordan and others, 2024), with the scale and the weight
// decay of "Muon is Scalable for LLM Training" (J. Liu and others, 2025):
//
//   m = 0.95 m + 0.05 g;   u = 0.95 m + 0.05 g                           Nesterov's momentum
//   x = u / (|u| + 1e-7)                                                 Frobenius norm: singular values up to 1
//   five times: A = x x^T;  x = a x + (b A + c A A) x                    a, b, c = 3.4445, -4.7750, 2.0315
//   w -= lr (0.2 sqrt(max(rows, cols)) x + weight_decay w)
//
// The Newton-Schulz iteration brings singular values to between 0.7 and 1.2, whatever they were, down to about a
// thousandth of the largest; it needs only matmuls. The scale makes the update's root mean square about 0.2, like
// AdamW's, so that the same learning rate and weight decay serve both. A tall matrix has A = x^T x, the smaller one.
// An update of a d x l matrix takes 5 (4 d^2 l + 2 d^3) flops; its forward and backward take 6 d l per token.

#define MUON_MOMENTUM 0.95f

static inline void muon_update(MatrixUpdate* u) {
    const MatrixOperations* run = u->run;
    const Matrix* m = &u->m;
    float* momentum = (float*)u->slice.states[0];
    size_t n = m->size, d = m->d;
    bool wide = m->rows <= m->cols;
    float *x = matrix_take(u, n), *y = matrix_take(u, n);                   // (rows, cols)
    float *gram = matrix_take(u, d * d), *square = matrix_take(u, d * d);   // (d, d)
    float fresh = (1.0f - MUON_MOMENTUM) * u->step->grad_scale;
    run->combine(momentum, COMBINE_SUM, MUON_MOMENTUM, momentum, fresh, u->slice.grads, n, u->stream);
    run->combine(x, COMBINE_SUM, MUON_MOMENTUM, momentum, fresh, u->slice.grads, n, u->stream);
    run->sum_of_squares(u->squares, x, n, u->stream);
    run->normalize(x, x, u->squares, 1e-7f, 0.0f, x, n, u->stream);
    for (int iteration = 0; iteration < 5; iteration++) {
        run->multiply(gram, x, x, wide ? MATRIX_NT : MATRIX_TN, true, d, d, m->l, u->stream);
        run->multiply(square, gram, gram, MATRIX_NT, true, d, d, d, u->stream);  // it is symmetric
        run->combine(gram, COMBINE_SUM, -4.7750f, gram, 2.0315f, square, d * d, u->stream);
        run->multiply(y, wide ? gram : x, wide ? x : gram, MATRIX_NN, true, m->rows, m->cols, d, u->stream);
        run->combine(x, COMBINE_SUM, 3.4445f, x, 1.0f, y, n, u->stream);
    }
    matrix_step(u, x, 0.2f * sqrtf((float)m->l));
}

// ------------------------------------------------------------------------------------------------
// 4. Subspaces
//
// A basis (r, d) has r orthonormal rows, as long as the matrix's shorter side. If g is wide (d = rows), the projection
// of g is basis g, if tall, basis g^T: (r, l) in both cases.

static inline void matrix_project(const MatrixUpdate* u, float* low, const float* basis, const float* g) {
    const Matrix* m = &u->m;
    u->run->multiply(low, basis, g, m->rows <= m->cols ? MATRIX_NN : MATRIX_NT, false, m->r, m->l, m->d, u->stream);
}

// out (rows, cols) = the matrix with the projection `low` and no part outside the subspace.
static inline void matrix_project_back(const MatrixUpdate* u, float* out, const float* basis, const float* low) {
    const Matrix* m = &u->m;
    bool wide = m->rows <= m->cols;
    u->run->multiply(out, wide ? basis : low, wide ? low : basis, MATRIX_TN, false, m->rows, m->cols, m->r, u->stream);
}

// One block power iteration: `to` = an orthonormal basis of the span of (g g^T / |g g^T from| + 1e-7) from, or the same
// with g^T g if g is tall. The second term changes no singular vector, and keeps the basis at full rank where g has a
// rank below r or is 0. low (r, l) is overwritten.
static inline void matrix_power_iteration(const MatrixUpdate* u, float* to, const float* from, const float* g,
                                          float* low) {
    const Matrix* m = &u->m;
    size_t n = m->r * m->d;
    matrix_project(u, low, from, g);
    u->run->multiply(to, low, g, m->rows <= m->cols ? MATRIX_NT : MATRIX_NN, false, m->r, m->d, m->l, u->stream);
    u->run->sum_of_squares(u->squares, to, n, u->stream);
    u->run->normalize(to, to, u->squares, 1e-30f, 1e-7f, from, n, u->stream);
    u->run->orthonormalize(to, m->r, m->d, u->stream);
}

// basis (r, d) = the singular vectors of g to its r largest singular values, by subspace iteration: 10 power iterations
// from the previous basis, or 0, plus small random vectors, so that signs stay where they can and every direction can
// be reached. After them a vector of singular value s still contains about (s'/s)^20 of one with a smaller value s'.
// Where these are close, the subspace holds nearly as much of g as the best ("Finding Structure with Randomness",
// Halko, Martinsson, Tropp, 2011). It needs no LAPACK and gives the same bits each time. other: (r, d).
static inline void matrix_leading_vectors(const MatrixUpdate* u, float* basis, const float* g, float* other,
                                          float* low) {
    size_t n = u->m.r * u->m.d;
    u->run->randomize(other, u->step->seed, u->step->step, u->slice.first, n, u->stream);
    u->run->combine(basis, COMBINE_SUM, 1.0f, basis, 0.01f, other, n, u->stream);
    u->run->orthonormalize(basis, u->m.r, u->m.d, u->stream);
    for (int iteration = 0; iteration < 10; iteration += 2) {
        matrix_power_iteration(u, other, basis, g, low);
        matrix_power_iteration(u, basis, other, g, low);
    }
}

// out (n) = AdamW's direction without weight decay for a gradient (n) that is already scaled: the step of a weight of 0
// at learning rate -1. spare: (n).
static inline void matrix_adam_direction(const MatrixUpdate* u, float* out, float* m, float* v, const float* gradient,
                                         float* spare, size_t n) {
    OptimizerStep adamw = *u->step;
    OptimizerSlice slice = {.params = (floatX*)spare, .master_weights = out, .grads = gradient, .states = {m, v},
                            .n = n};
    adamw.kind = OPTIMIZER_ADAMW;
    adamw.lr = -1.0f;
    adamw.weight_decay = 0.0f;
    adamw.grad_scale = 1.0f;
    u->run->combine(out, COMBINE_SUM, 0.0f, gradient, 0.0f, gradient, n, u->stream);
    u->run->elements(&slice, &adamw, u->stream);
}

// ------------------------------------------------------------------------------------------------
// 5. GaLore
//
// "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection" (J. Zhao and others, 2024). For g wide:
//
//   every 200 updates:  P = the r leading left singular vectors of g
//   R = P^T g;   N = AdamW's direction for R, whose m and v stay as they are when P changes
//   w -= lr (0.25 P N + weight_decay w)
//
// A tall g is projected from the right. The paper's scale of 0.25 goes with learning rates of about ten times AdamW's.

enum { GALORE_REFRESH = 200 };
#define GALORE_SCALE 0.25f

static inline void galore_update(MatrixUpdate* u) {
    const Matrix* m = &u->m;
    float *state_m = (float*)u->slice.states[0], *state_v = (float*)u->slice.states[1];  // (r, l)
    float* basis = (float*)u->slice.states[2];                                           // (r, d)
    size_t low_size = m->r * m->l;
    float *low = matrix_take(u, low_size), *spare = matrix_take(u, low_size), *normal = matrix_take(u, low_size);
    float *other = matrix_take(u, m->r * m->d), *direction = matrix_take(u, m->size);
    if ((u->step->step - 1) % GALORE_REFRESH == 0) matrix_leading_vectors(u, basis, u->slice.grads, other, low);
    matrix_project(u, low, basis, u->slice.grads);
    u->run->combine(low, COMBINE_SUM, u->step->grad_scale, low, 0.0f, low, low_size, u->stream);
    matrix_adam_direction(u, normal, state_m, state_v, low, spare, low_size);
    matrix_project_back(u, direction, basis, normal);
    matrix_step(u, direction, GALORE_SCALE);
}

// ------------------------------------------------------------------------------------------------
// 6. LDAdam
//
// "LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics" (T. Robert and others, 2025), algorithm 1,
// for g wide, with ' for the state left by the previous update, and ^ for a bias-corrected mean:
//
//   A = g + E'                                                   error feedback
//   U = one block power iteration of 0.908 U' m'^ + 0.092 A, from U'; in the first update A's leading singular vectors
//   C = U^T U',  R = U^T A
//   m = C m';   v = (1 - beta2^(t-1)) |C^2 (v'^ - m'^ ^2) + (C m'^)^2|       squares of elements: v as if its gradients
//                                                                          had been projected to U
//   E = A - U R + beta1 / (1 - beta1) (U' m' - U m)              what the projections have left out
//   N = AdamW's direction for R, from m and v
//   w -= lr (U N + weight_decay w)
//
// The authors keep E in the gradient buffer, where the next gradient is added to it; here gradients are summed over
// ranks and cleared first, so E is a separate state, with one number per element of the matrix.

#define LDADAM_RHO 0.908f

// Projects m and v from the subspace of `before` to that of `after`: v in place, m to m_after (r, l). Overwrites turn
// and turn_squared (r, r), and variance (r, l).
static inline void ldadam_turn(const MatrixUpdate* u, const float* after, const float* before, float* turn,
                               float* turn_squared, float* m_after, float* variance) {
    const MatrixOperations* run = u->run;
    const Matrix* m = &u->m;
    float *state_m = (float*)u->slice.states[0], *state_v = (float*)u->slice.states[1];
    size_t n = m->r * m->l;
    double updates = (double)(u->step->step - 1);
    float m_bias = (float)(1.0 - pow_double((double)u->step->beta1, updates));
    float v_bias = (float)(1.0 - pow_double((double)u->step->beta2, updates));
    run->multiply(turn, after, before, MATRIX_NT, false, m->r, m->r, m->d, u->stream);
    run->combine(turn_squared, COMBINE_SQUARE, 0.0f, turn, 1.0f, turn, m->r * m->r, u->stream);
    run->multiply(m_after, turn, state_m, MATRIX_NN, false, m->r, m->l, m->r, u->stream);
    run->combine(variance, COMBINE_SQUARE, 1.0f / v_bias, state_v, -1.0f / (m_bias * m_bias), state_m, n, u->stream);
    run->multiply(state_v, turn_squared, variance, MATRIX_NN, false, m->r, m->l, m->r, u->stream);
    run->combine(state_v, COMBINE_SQUARE_ABSOLUTE, v_bias, state_v, v_bias / (m_bias * m_bias), m_after, n, u->stream);
}

static inline void ldadam_update(MatrixUpdate* u) {
    const MatrixOperations* run = u->run;
    const Matrix* m = &u->m;
    float *state_m = (float*)u->slice.states[0], *state_v = (float*)u->slice.states[1];  // (r, l)
    float *before = (float*)u->slice.states[2], *error = (float*)u->slice.states[5];     // (r, d), (rows, cols)
    size_t low_size = m->r * m->l, basis_size = m->r * m->d, n = m->size;
    float *low = matrix_take(u, low_size), *spare = matrix_take(u, low_size), *normal = matrix_take(u, low_size);
    float *after = matrix_take(u, basis_size), *back = matrix_take(u, n);
    float *turn = matrix_take(u, m->r * m->r), *turn_squared = matrix_take(u, m->r * m->r);
    double updates = (double)(u->step->step - 1), beta1 = (double)u->step->beta1;
    float feedback = (float)(beta1 / (1.0 - beta1));
    run->combine(error, COMBINE_SUM, 1.0f, error, u->step->grad_scale, u->slice.grads, n, u->stream);
    if (updates > 0) {
        float rho = LDADAM_RHO / (float)(1.0 - pow_double(beta1, updates));
        matrix_project_back(u, back, before, state_m);
        run->combine(back, COMBINE_SUM, rho, back, 1.0f - LDADAM_RHO, error, n, u->stream);
        matrix_power_iteration(u, after, before, back, low);
        ldadam_turn(u, after, before, turn, turn_squared, normal, low);
        matrix_project_back(u, back, before, state_m);
        matrix_project(u, low, after, error);
        run->combine(error, COMBINE_SUM, 1.0f, error, feedback, back, n, u->stream);
        run->combine(state_m, COMBINE_SUM, 1.0f, normal, 0.0f, normal, low_size, u->stream);
    } else {
        matrix_leading_vectors(u, before, error, after, low);
        run->combine(after, COMBINE_SUM, 1.0f, before, 0.0f, before, basis_size, u->stream);
        matrix_project(u, low, after, error);
    }
    // Subtracts U R and U m from the error together.
    run->combine(spare, COMBINE_SUM, 1.0f, low, feedback, state_m, low_size, u->stream);
    matrix_project_back(u, back, after, spare);
    run->combine(error, COMBINE_SUM, 1.0f, error, -1.0f, back, n, u->stream);
    run->combine(before, COMBINE_SUM, 1.0f, after, 0.0f, after, basis_size, u->stream);
    matrix_adam_direction(u, normal, state_m, state_v, low, spare, low_size);
    matrix_project_back(u, back, after, normal);
    matrix_step(u, back, 1.0f);
}

// ------------------------------------------------------------------------------------------------
// 7. Update

// One step of the optimizer over a whole tensor.
static inline void matrix_update(const MatrixOperations* run, const OptimizerSlice* slice, const OptimizerStep* step,
                                 Stream stream) {
    const OptimizerState* states = OPTIMIZERS[step->kind].states;
    if (!slice->shape.hidden) {
        OptimizerStep adamw = *step;
        OptimizerSlice elements = *slice;
        adamw.kind = OPTIMIZER_ADAMW;
        for (size_t s = 0, held = 0; s < optimizer_states(step->kind); s++)
            if (slice->states[s]) elements.states[held++] = slice->states[s];
        run->elements(&elements, &adamw, stream);
        return;
    }
    size_t rows[SHAPE_MATRICES], count = shape_matrices(rows, &slice->shape), first = 0;
    size_t at[OPTIMIZER_STATES] = {0};
    for (size_t i = 0; i < count; i++) {
        MatrixUpdate u = {.run = run, .step = step, .slice = *slice,
                          .m = matrix_of(rows[i], slice->shape.cols, step->rank), .squares = (double*)slice->scratch,
                          .scratch = slice->scratch + MATRIX_SCRATCH_UNIT, .stream = stream};
        u.slice.params += first;
        if (slice->master_weights) u.slice.master_weights += first;
        u.slice.grads += first;
        u.slice.first += first;
        u.slice.n = u.m.size;
        for (size_t s = 0; s < optimizer_states(step->kind); s++) {
            if (slice->states[s]) u.slice.states[s] = (float*)slice->states[s] + at[s];
            at[s] += matrix_state_count(states[s].shape, rows[i], slice->shape.cols, step->rank);
        }
        if (step->kind == OPTIMIZER_MUON) muon_update(&u);
        else if (step->kind == OPTIMIZER_GALORE) galore_update(&u);
        else ldadam_update(&u);
        first += u.m.size;
    }
}

#endif  // LLMTRAIN_OPTIMIZERS_MATRIX_H
