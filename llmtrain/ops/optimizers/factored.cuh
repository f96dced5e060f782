// factored.cuh: Adafactor, CAME, Adam-mini and SM3 in CUDA; the formulas and the functions in C are in
// factored.h.
//
// The kernels are the passes of factored.h: each reads the gradients (and m) once more. Sums have a fixed
// order, which differs from the CPU's.

#ifndef LLMTRAIN_OPTIMIZERS_FACTORED_CUH
#define LLMTRAIN_OPTIMIZERS_FACTORED_CUH

#include "../blocks.cuh"
#include "factored.h"

// ------------------------------------------------------------------------------------------------
// 1. Sums

enum { FACTORED_THREADS = 256, FACTORED_STATE_THREADS = 1024 };

// A block owns one row after another, gridDim.x apart. TERM_MOMENT updates m.
template <FactoredTerm TERM>
static __global__ void factored_rows_kernel(Factored f) {
    __shared__ float shared[WARP];
    float clip = TERM == TERM_MOMENT ? f.scalars[SCALAR_CLIP] : 1.0f;
    for (size_t row = blockIdx.x; row < f.R; row += gridDim.x) {
        float value = factored_row_value(&f, TERM, row), sum = 0.0f;
        for (size_t c = threadIdx.x; c < f.C; c += blockDim.x) {
            sum = factored_joined(TERM, sum, factored_term(&f, TERM, value, clip, row * f.C + c, c));
        }
        sum = block_combine(sum, 0.0f, shared, [](float a, float b) { return factored_joined(TERM, a, b); });
        if (threadIdx.x == 0) f.row_sums[row] = sum;
    }
}

// Block (x, y): a thread owns a column, and adds up the rows of piece y.
template <FactoredTerm TERM>
static __global__ void factored_columns_kernel(Factored f) {
    size_t c = (size_t)blockIdx.x * blockDim.x + threadIdx.x, piece = blockIdx.y;
    if (c >= f.C) return;
    float clip = TERM == TERM_RESIDUAL ? f.scalars[SCALAR_CLIP] : 1.0f, sum = 0.0f;
    for (size_t row = f.R * piece / FACTORED_PIECES; row < f.R * (piece + 1) / FACTORED_PIECES; row++) {
        float term = factored_term(&f, TERM, factored_row_value(&f, TERM, row), clip, row * f.C + c, c);
        sum = factored_joined(TERM, sum, term);
    }
    f.partial[piece * f.C + c] = sum;
}

template <FactoredTerm TERM>
static inline void factored_sum_rows(const Factored* f, Stream stream) {
    unsigned threads = block_threads(f->C, FACTORED_THREADS);
    factored_rows_kernel<TERM><<<grid_blocks(f->R), threads, 0, stream->compute>>>(*f);
    LAUNCH_CHECK();
}

template <FactoredTerm TERM>
static inline void factored_sum_columns(const Factored* f, Stream stream) {
    dim3 grid(grid_blocks(divide_up(f->C, FACTORED_THREADS)), FACTORED_PIECES);
    factored_columns_kernel<TERM><<<grid, FACTORED_THREADS, 0, stream->compute>>>(*f);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 2. States
//
// One block each: rows and columns are few compared with elements.

// Updates the states of rows (NULL: a vector has none) and columns, and their factors, as cpu::factored_factors does.
static __global__ void factored_factors_kernel(Factored f, float* rows, float* columns, float rate) {
    __shared__ float shared[WARP];
    float sum = 0.0f;
    for (size_t row = threadIdx.x; rows && row < f.R; row += blockDim.x) {
        rows[row] = factored_moved(rows[row], f.row_sums[row] / (float)f.C, rate);
        sum += rows[row];
    }
    float mean = block_sum(sum, shared) / (float)f.R;
    for (size_t row = threadIdx.x; row < f.R; row += blockDim.x)
        f.row_factors[row] = rows ? 1.0f / sqrtf(rows[row] / mean) : 1.0f;
    for (size_t c = threadIdx.x; c < f.C; c += blockDim.x) {
        columns[c] = factored_moved(columns[c], factored_column(&f, TERM_SQUARE, c) / (float)f.R, rate);
        f.column_factors[c] = 1.0f / sqrtf(columns[c]);
    }
}

// From the mean of what was summed last: CAME's clip factor, or Adafactor's step, which is first scaled by the size of
// the weights and then clipped.
static __global__ void factored_scalar_kernel(Factored f, FactoredTerm term) {
    __shared__ float shared[WARP];
    float sum = 0.0f;
    for (size_t row = threadIdx.x; row < f.R; row += blockDim.x) sum += f.row_sums[row];
    float mean = block_sum(sum, shared) / (float)f.R / (float)f.C;
    if (threadIdx.x > 0) return;
    if (term == TERM_WEIGHT) {
        float size = sqrtf(mean);
        f.scalars[SCALAR_STEP] = f.step * (size > ADAFACTOR_LEAST_SIZE ? size : ADAFACTOR_LEAST_SIZE);
    } else {
        f.scalars[SCALAR_CLIP] = factored_clip(mean);
        if (f.kind == OPTIMIZER_ADAFACTOR) f.scalars[SCALAR_STEP] *= f.scalars[SCALAR_CLIP];
    }
}

// Adam-mini's v of every row, from the sums of its head; the threads of a head's rows all compute the same number.
static __global__ void factored_mini_kernel(Factored f, TensorShape shape, float v_correction, float epsilon) {
    size_t row = flat_index(1), first;
    if (row >= f.R) return;
    size_t end = factored_group(&first, &f, &shape, row);
    float sum = 0.0f;
    for (size_t i = first; i < end; i++) sum += f.row_sums[i];
    float v = factored_moved(f.v_row[row], sum / ((float)(end - first) * (float)f.C), f.rate);
    f.v_row[row] = v;
    f.row_factors[row] = factored_mini(v, v_correction, epsilon);
}

// SM3's states: the maxima of rows and columns.
static __global__ void factored_largest_kernel(Factored f) {
    size_t i = flat_index(1);
    if (i < f.C) f.v_column[i] = factored_column(&f, TERM_BOUND, i);
    if (f.v_row && i < f.R) f.v_row[i] = f.row_sums[i];
}

static inline void factored_find_factors(const Factored* f, float* rows, float* columns, float rate, Stream stream) {
    factored_factors_kernel<<<1, FACTORED_STATE_THREADS, 0, stream->compute>>>(*f, rows, columns, rate);
    LAUNCH_CHECK();
}

static inline void factored_find_scalar(const Factored* f, FactoredTerm term, Stream stream) {
    factored_scalar_kernel<<<1, FACTORED_STATE_THREADS, 0, stream->compute>>>(*f, term);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. Update

// A block owns one row after another, gridDim.x apart.
template <OptimizerKind KIND>
static __global__ void factored_apply_kernel(Factored f, OptimizerStep o, size_t first_position) {
    float step = KIND == OPTIMIZER_ADAFACTOR ? f.scalars[SCALAR_STEP] : f.step;
    for (size_t row = blockIdx.x; row < f.R; row += gridDim.x) {
        for (size_t c = threadIdx.x; c < f.C; c += blockDim.x) {
            size_t i = row * f.C + c;
            float w = factored_element(&f, KIND, step, factored_weight(&f, i), i, row, c);
            if (f.master_weights) f.master_weights[i] = w;
            if (f.master_weights || FLOATX_IS_FLOAT) {
                f.params[i] = floatX_of(w);
            } else {
                uint32_t random = random_bits(o.seed, RANDOM_ROUNDING, o.step, first_position + i);
                f.params[i] = floatX_of_stochastic(w, random);
            }
        }
    }
}

static inline void factored_update(const OptimizerSlice* slice, const OptimizerStep* o, Stream stream) {
    const Factored f = factored_begin(slice, o);
    auto apply = factored_apply_kernel<OPTIMIZER_SM3>;
    if (f.kind == OPTIMIZER_SM3) {
        factored_sum_rows<TERM_BOUND>(&f, stream);
        factored_sum_columns<TERM_BOUND>(&f, stream);
    } else {
        factored_sum_rows<TERM_SQUARE>(&f, stream);
    }
    if (f.kind == OPTIMIZER_ADAM_MINI) {
        float v_correction = (float)(1.0 / (1.0 - pow_double((double)o->beta2, (double)o->step)));
        factored_mini_kernel<<<flat_blocks(f.R, 1), FLAT_THREADS, 0, stream->compute>>>(f, slice->shape, v_correction,
                                                                                         o->epsilon);
        LAUNCH_CHECK();
        apply = factored_apply_kernel<OPTIMIZER_ADAM_MINI>;
    } else if (f.kind != OPTIMIZER_SM3) {
        factored_sum_columns<TERM_SQUARE>(&f, stream);
        factored_find_factors(&f, f.v_row, f.v_column, f.rate, stream);
        if (f.kind == OPTIMIZER_ADAFACTOR) {
            factored_sum_rows<TERM_WEIGHT>(&f, stream);
            factored_find_scalar(&f, TERM_WEIGHT, stream);
        }
        factored_sum_rows<TERM_UPDATE>(&f, stream);
        factored_find_scalar(&f, TERM_UPDATE, stream);
        apply = factored_apply_kernel<OPTIMIZER_ADAFACTOR>;
    }
    if (f.kind == OPTIMIZER_CAME) {
        factored_sum_rows<TERM_MOMENT>(&f, stream);
        if (f.r_row) factored_sum_columns<TERM_RESIDUAL>(&f, stream);
        if (f.r_row) factored_find_factors(&f, f.r_row, f.r_column, CAME_RATE, stream);
        apply = factored_apply_kernel<OPTIMIZER_CAME>;
    }
    apply<<<grid_blocks(f.R), block_threads(f.C, FACTORED_THREADS), 0, stream->compute>>>(f, *o, slice->first);
    LAUNCH_CHECK();
    if (f.kind != OPTIMIZER_SM3) return;
    factored_largest_kernel<<<flat_blocks(max_size(f.R, f.C), 1), FLAT_THREADS, 0, stream->compute>>>(f);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_OPTIMIZERS_FACTORED_CUH
