// factored.h: optimizers that keep a second moment per row and column instead of per element, in plain C:
// the specification of the kernels of the same name, and the CPU backend.
//
//   1. methods      Adafactor, CAME, Adam-mini, SM3: their formulas
//   2. elements     what an element adds to the sums of its row and column, and how it is updated
//   3. passes       over a tensor, on a CPU
//   4. update
//
//   optimizer    states of a matrix of R rows and C columns       bytes per parameter, R = C = 1024
//   adafactor    v_row (R), v_column (C)                          0.01
//   came         m (R, C), v_row, r_row (R), v_column, r_column   4.02
//   adam-mini    m (R, C), v_row (R)                              4.004
//   sm3          m (R, C), v_row (R), v_column (C)                4.01
//
// A vector is a matrix of one row: its v_column is its state v, one number per element; Adam-mini has one v for it all.
// An update needs the sums of whole rows and columns, so ZeRO shards these optimizers tensor by tensor.

#ifndef LLMTRAIN_OPTIMIZERS_FACTORED_H
#define LLMTRAIN_OPTIMIZERS_FACTORED_H

#include "optimizers.h"

// ------------------------------------------------------------------------------------------------
// 1. Methods
//
// g is the gradient (R, C), t the number of the update; means are over the elements of a row, of a column, of all.
//
// Adafactor  "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", with the constants of torch.optim:
//     rate = t^-0.8
//     v_row    += rate (mean of g^2 + 1e-30 over the row    - v_row)
//     v_column += rate (mean of g^2 + 1e-30 over the column - v_column)
//     u = g / sqrt(v_row v_column / mean of v_row);  u /= max(1, root mean square of u)
//     w -= lr weight_decay w + min(lr, 1 / sqrt(t)) max(0.001, root mean square of w) u
// CAME       "CAME: Confidence-guided Adaptive Memory Efficient Optimization":
//     v_row, v_column, u as above, with rate = 1 - beta2
//     m += (1 - beta1) (u - m)
//     r_row, r_column as v_row, v_column, of (u - m)^2 + 1e-16 in place of g^2 + 1e-30, with rate = 0.0001
//     w -= lr (m / sqrt(r_row r_column / mean of r_row) + weight_decay w);   of a vector: w -= lr (m + weight_decay w)
// Adam-mini  "Adam-mini: Use Fewer Learning Rates To Gain More": AdamW, where v is one number for a head of queries or
//            keys, for a row of another matrix, for a vector:
//     m += (1 - beta1) (g - m);  v += (1 - beta2) (mean of g^2 over that - v)
//     w -= lr (m' / (sqrt(v') + epsilon) + weight_decay w)    m', v': bias-corrected
// SM3        "Memory-Efficient Adaptive Optimization", SM3-II with momentum:
//     n = min(v_row, v_column) + g^2
//     m += (1 - beta1) (g / sqrt(n) - m);  w -= lr (m + weight_decay w)    0 / 0 is 0
//     v_row = max of n over the row;  v_column = max of n over the column

#define FACTORED_SQUARE_FLOOR 1e-30f    // added to g^2
#define FACTORED_RESIDUAL_FLOOR 1e-16f  // and to CAME's (u - m)^2
#define CAME_RATE 1e-4f                 // 1 - beta3
#define ADAFACTOR_DECAY 0.8
#define ADAFACTOR_LEAST_SIZE 1e-3f      // of the weights' root mean square

// ------------------------------------------------------------------------------------------------
// 2. Elements

// Rows are divided into FACTORED_PIECES pieces. Each has column sums of its own, which are then added in order.

typedef struct {
    OptimizerKind kind;
    float grad_scale, beta1, decay;                    // decay: lr weight_decay
    float rate;                                        // of v_row and v_column
    float step;                                        // what an update's direction is multiplied by
    size_t R, C;
    const float* grads;                                // (R, C), as are the next three
    float *m, *master_weights;
    floatX* params;
    float *v_row, *v_column, *r_row, *r_column;        // (R), (C); NULL: none
    float *row_sums, *row_factors, *column_factors;    // scratch: (R), (R), (C)
    float* partial;                                    // (FACTORED_PIECES, C) sums over the rows of a piece
    float* scalars;                                    // (FACTORED_SCALARS)
} Factored;

enum { SCALAR_CLIP, SCALAR_STEP };  // what CAME multiplies u by; what an update's direction is multiplied by

typedef enum {
    TERM_SQUARE,    // g^2 and its floor
    TERM_WEIGHT,    // w^2
    TERM_UPDATE,    // u^2
    TERM_MOMENT,    // updates m; then (u - m)^2 and its floor
    TERM_RESIDUAL,  // the same, with m already updated
    TERM_BOUND      // SM3's n, of which the maximum is taken, not the sum
} FactoredTerm;

// The larger of two numbers >= 0; NaN is the largest.
HOST_DEVICE ALWAYS_INLINE float larger(float a, float b) {
    uint32_t x = bits_from_float(a), y = bits_from_float(b);
    return float_from_bits(x > y ? x : y);
}

// Two terms, or two sums of them, in one: the maximum for TERM_BOUND, otherwise the sum.
HOST_DEVICE ALWAYS_INLINE float factored_joined(FactoredTerm term, float a, float b) {
    return term == TERM_BOUND ? larger(a, b) : a + b;
}

// What the pieces have of column c, joined.
HOST_DEVICE ALWAYS_INLINE float factored_column(const Factored* f, FactoredTerm term, size_t c) {
    float sum = f->partial[c];
    for (size_t piece = 1; piece < FACTORED_PIECES; piece++)
        sum = factored_joined(term, sum, f->partial[piece * f->C + c]);
    return sum;
}

HOST_DEVICE ALWAYS_INLINE float factored_weight(const Factored* f, size_t i) {
    return f->master_weights ? f->master_weights[i] : float_of(f->params[i]);
}

// SM3's n; a NaN in either state propagates.
HOST_DEVICE ALWAYS_INLINE float factored_bound(const Factored* f, float g, float row, float column) {
    return multiply_add(g, g, f->v_row == NULL || !(row <= column || row != row) ? column : row);
}

// Element i, of row `row` and column c.
HOST_DEVICE ALWAYS_INLINE float factored_term(const Factored* f, FactoredTerm term, float row_value, float clip,
                                              size_t i, size_t c) {
    if (term == TERM_WEIGHT) return factored_weight(f, i) * factored_weight(f, i);
    float g = f->grads[i] * f->grad_scale;
    if (term == TERM_SQUARE) return multiply_add(g, g, f->kind == OPTIMIZER_ADAM_MINI ? 0.0f : FACTORED_SQUARE_FLOOR);
    if (term == TERM_BOUND) return factored_bound(f, g, row_value, f->v_column[c]);
    float u = g * row_value * f->column_factors[c];
    if (term == TERM_UPDATE) return u * u;
    u *= clip;
    float m = f->m[i];
    if (term == TERM_MOMENT) f->m[i] = m = multiply_add(1.0f - f->beta1, u - m, m);
    return multiply_add(u - m, u - m, FACTORED_RESIDUAL_FLOOR);
}

// The value that a term needs for its row.
HOST_DEVICE ALWAYS_INLINE float factored_row_value(const Factored* f, FactoredTerm term, size_t row) {
    if (term == TERM_BOUND) return f->v_row ? f->v_row[row] : 0.0f;
    return term == TERM_SQUARE || term == TERM_WEIGHT ? 0.0f : f->row_factors[row];
}

// Returns the updated weight; updates m.
HOST_DEVICE ALWAYS_INLINE float factored_element(const Factored* f, OptimizerKind kind, float step, float w, size_t i,
                                                 size_t row, size_t c) {
    float direction;
    if (kind == OPTIMIZER_ADAFACTOR) {
        direction = f->grads[i] * f->grad_scale * f->row_factors[row] * f->column_factors[c];
    } else if (kind == OPTIMIZER_CAME) {
        direction = f->r_row ? f->m[i] * f->row_factors[row] * f->column_factors[c] : f->m[i];
    } else {
        float g = f->grads[i] * f->grad_scale, m = f->m[i];
        if (kind == OPTIMIZER_SM3) {
            float bound = factored_bound(f, g, f->v_row ? f->v_row[row] : 0.0f, f->v_column[c]);
            g = bound == 0.0f ? 0.0f : g / sqrtf(bound);
        }
        f->m[i] = m = multiply_add(1.0f - f->beta1, g - m, m);
        direction = kind == OPTIMIZER_SM3 ? m : m * f->row_factors[row];
    }
    return multiply_add(-step, direction, multiply_add(-f->decay, w, w));
}

static inline Factored factored_begin(const OptimizerSlice* slice, const OptimizerStep* o) {
    bool matrix = slice->shape.cols > 0;
    void* const* s = slice->states;
    Factored f = {.kind = o->kind, .grad_scale = o->grad_scale, .beta1 = o->beta1, .decay = o->lr * o->weight_decay,
                  .rate = 1.0f - o->beta2, .step = o->lr, .R = matrix ? slice->shape.rows : 1,
                  .C = matrix ? slice->shape.cols : slice->shape.rows, .grads = slice->grads,
                  .master_weights = slice->master_weights, .params = slice->params};
    if (o->kind == OPTIMIZER_ADAM_MINI) {
        f.v_row = (float*)(matrix ? s[0] : s[1]);
        f.m = (float*)s[2];
        f.step = o->lr * (float)(1.0 / (1.0 - pow_double((double)o->beta1, (double)o->step)));
    } else {
        f.v_row = (float*)s[0];
        f.v_column = (float*)(matrix ? s[1] : s[2]);
        f.m = (float*)s[3];
        f.r_row = (float*)s[4];
        f.r_column = (float*)s[5];
    }
    if (o->kind == OPTIMIZER_ADAFACTOR) {
        f.rate = (float)pow_double((double)o->step, -ADAFACTOR_DECAY);
        f.step = fminf(o->lr, (float)(1.0 / sqrt((double)o->step)));
    }
    f.row_sums = slice->scratch;
    f.row_factors = f.row_sums + f.R;
    f.column_factors = f.row_factors + f.R;
    f.partial = f.column_factors + f.C;
    f.scalars = f.partial + FACTORED_PIECES * f.C;
    return f;
}

// At a rate of 1, as in Adafactor's first step, nothing of the old state remains except a NaN: not even a rounding
// error, which could make the result negative.
HOST_DEVICE ALWAYS_INLINE float factored_moved(float state, float mean, float rate) {
    return rate == 1.0f ? multiply_add(0.0f, state, mean) : multiply_add(rate, mean - state, state);
}

// Row `row`, and the rows of its head in Adam-mini: [*first, end).
HOST_DEVICE ALWAYS_INLINE size_t factored_group(size_t* first, const Factored* f, const TensorShape* t, size_t row) {
    bool head = f->kind == OPTIMIZER_ADAM_MINI && row < t->qk_rows;
    *first = head ? row - row % t->D : row;
    return head ? *first + t->D : row + 1;
}

// What Adam-mini multiplies the m of a row by, except for `step`. v_correction: v's bias correction.
HOST_DEVICE ALWAYS_INLINE float factored_mini(float v, float v_correction, float epsilon) {
    return 1.0f / (sqrtf(v * v_correction) + epsilon);
}

// What u is multiplied by so that its root mean square is at most 1, from its mean square.
HOST_DEVICE ALWAYS_INLINE float factored_clip(float mean_square) {
    float size = sqrtf(mean_square);
    return size > 1.0f ? 1.0f / size : 1.0f;
}

LLMTRAIN_CPU_BEGIN

// ------------------------------------------------------------------------------------------------
// 3. Passes
//
// A thread owns a piece of the rows. The number of pieces is fixed, and so is the order of all sums.

enum { FACTORED_CHUNK = 512 };  // columns at a time

// terms (n) of row `row`, columns first to first + n - 1. `term` is a compile-time constant, as is `kind` below.
ALWAYS_INLINE void factored_terms(float* terms, const Factored* f, FactoredTerm term, float value, float clip,
                                  size_t row, size_t first, size_t n) {
    #pragma omp simd
    for (size_t c = 0; c < n; c++) terms[c] = factored_term(f, term, value, clip, row * f->C + first + c, first + c);
}

// Sums a term, or takes its maximum, over each row into row_sums (R) and, if `columns`, over the columns of each piece
// into partial. f is passed by value, so that the compiler sees that the writes do not change it.
static inline void factored_reduce(Factored f, FactoredTerm term, bool columns) {
    const float clip = f.scalars[SCALAR_CLIP];
    #pragma omp parallel for schedule(static)
    for (size_t piece = 0; piece < FACTORED_PIECES; piece++) {
        float terms[FACTORED_CHUNK], *partial = f.partial + piece * f.C;
        if (columns) memset(partial, 0, f.C * sizeof(float));
        for (size_t row = f.R * piece / FACTORED_PIECES; row < f.R * (piece + 1) / FACTORED_PIECES; row++) {
            float value = factored_row_value(&f, term, row), sum = 0.0f;
            for (size_t first = 0; first < f.C; first += FACTORED_CHUNK) {
                size_t n = min_size(FACTORED_CHUNK, f.C - first);
                switch (term) {
                case TERM_SQUARE: factored_terms(terms, &f, TERM_SQUARE, value, clip, row, first, n); break;
                case TERM_WEIGHT: factored_terms(terms, &f, TERM_WEIGHT, value, clip, row, first, n); break;
                case TERM_UPDATE: factored_terms(terms, &f, TERM_UPDATE, value, clip, row, first, n); break;
                case TERM_MOMENT: factored_terms(terms, &f, TERM_MOMENT, value, clip, row, first, n); break;
                case TERM_RESIDUAL: factored_terms(terms, &f, TERM_RESIDUAL, value, clip, row, first, n); break;
                case TERM_BOUND: factored_terms(terms, &f, TERM_BOUND, value, clip, row, first, n); break;
                }
                if (term == TERM_BOUND) for (size_t c = 0; c < n; c++) sum = larger(sum, terms[c]);
                else sum += VECTOR_SUM(c, n, terms[c]);
                for (size_t c = 0; columns && c < n; c++)
                    partial[first + c] = factored_joined(term, partial[first + c], terms[c]);
            }
            f.row_sums[row] = sum;
        }
    }
}

// The mean of what was reduced last.
static inline float factored_mean(const Factored* f) {
    return (float)(VECTOR_SUM_DOUBLE(row, f->R, (double)f->row_sums[row]) / ((double)f->R * (double)f->C));
}

// Updates the states of rows and columns from the sums, and their factors, whose product is 1 / sqrt(the row's state
// times the column's, divided by the mean of the rows' states).
static inline void factored_factors(const Factored* f, float* rows, float* columns, float rate) {
    float mean = 0.0f;
    if (rows) {
        for (size_t row = 0; row < f->R; row++)
            rows[row] = factored_moved(rows[row], f->row_sums[row] / (float)f->C, rate);
        mean = (float)(VECTOR_SUM_DOUBLE(row, f->R, (double)rows[row]) / (double)f->R);
    }
    for (size_t row = 0; row < f->R; row++) f->row_factors[row] = rows ? 1.0f / sqrtf(rows[row] / mean) : 1.0f;
    for (size_t c = 0; c < f->C; c++) {
        columns[c] = factored_moved(columns[c], factored_column(f, TERM_SQUARE, c) / (float)f->R, rate);
        f->column_factors[c] = 1.0f / sqrtf(columns[c]);
    }
}

// Updates elements [first, first + n) of a row. Inlined, so that the compiler makes a loop for each kind.
ALWAYS_INLINE void factored_elements(const Factored* f, OptimizerKind kind, float step, float* w, size_t row,
                                     size_t first, size_t n) {
    #pragma omp simd
    for (size_t c = 0; c < n; c++) w[c] = factored_element(f, kind, step, w[c], row * f->C + first + c, row, first + c);
}

static inline void factored_apply(Factored f, const OptimizerSlice* slice, const OptimizerStep* o, float step) {
    #pragma omp parallel for schedule(static)
    for (size_t chunk = 0; chunk < f.R * divide_up(f.C, FACTORED_CHUNK); chunk++) {
        size_t row = chunk % f.R, first = chunk / f.R * FACTORED_CHUNK, n = min_size(FACTORED_CHUNK, f.C - first);
        float memory[FACTORED_CHUNK], *w = optimizer_weights(memory, slice, row * f.C + first, n);
        switch (f.kind) {
        case OPTIMIZER_ADAFACTOR: factored_elements(&f, OPTIMIZER_ADAFACTOR, step, w, row, first, n); break;
        case OPTIMIZER_CAME: factored_elements(&f, OPTIMIZER_CAME, step, w, row, first, n); break;
        case OPTIMIZER_ADAM_MINI: factored_elements(&f, OPTIMIZER_ADAM_MINI, step, w, row, first, n); break;
        default: factored_elements(&f, OPTIMIZER_SM3, step, w, row, first, n); break;
        }
        optimizer_store(slice, o, w, row * f.C + first, n);
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Update

static inline void factored_update(const OptimizerSlice* slice, const OptimizerStep* o) {
    const Factored f = factored_begin(slice, o);
    float step = f.step;
    f.scalars[SCALAR_CLIP] = 1.0f;
    factored_reduce(f, f.kind == OPTIMIZER_SM3 ? TERM_BOUND : TERM_SQUARE, f.kind != OPTIMIZER_ADAM_MINI);
    if (f.kind == OPTIMIZER_ADAFACTOR) {
        factored_factors(&f, f.v_row, f.v_column, f.rate);
        factored_reduce(f, TERM_WEIGHT, false);
        step *= fmaxf(ADAFACTOR_LEAST_SIZE, sqrtf(factored_mean(&f)));
        factored_reduce(f, TERM_UPDATE, false);
        step *= factored_clip(factored_mean(&f));
    } else if (f.kind == OPTIMIZER_CAME) {
        factored_factors(&f, f.v_row, f.v_column, f.rate);
        factored_reduce(f, TERM_UPDATE, false);
        f.scalars[SCALAR_CLIP] = factored_clip(factored_mean(&f));
        factored_reduce(f, TERM_MOMENT, f.r_row != NULL);
        if (f.r_row) factored_factors(&f, f.r_row, f.r_column, CAME_RATE);
    } else if (f.kind == OPTIMIZER_ADAM_MINI) {
        float v_correction = (float)(1.0 / (1.0 - pow_double((double)o->beta2, (double)o->step)));
        for (size_t row = 0, first; row < f.R; row++) {
            size_t end = factored_group(&first, &f, &slice->shape, row);
            double sum = VECTOR_SUM_DOUBLE(i, end - first, (double)f.row_sums[first + i]);
            f.v_row[row] = factored_moved(f.v_row[row], (float)(sum / ((double)(end - first) * (double)f.C)), f.rate);
            f.row_factors[row] = factored_mini(f.v_row[row], v_correction, o->epsilon);
        }
    }
    factored_apply(f, slice, o, step);
    if (f.kind != OPTIMIZER_SM3) return;
    for (size_t row = 0; f.v_row && row < f.R; row++) f.v_row[row] = f.row_sums[row];
    for (size_t c = 0; c < f.C; c++) f.v_column[c] = factored_column(&f, TERM_BOUND, c);
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_OPTIMIZERS_FACTORED_H
