// optimizers.h: the table of optimizers, and the arguments of one step.
//
// A new element-wise optimizer is a constant, a row and a branch of optimizer_element here, and a loop in
// optimizer_apply (update.h). The flag --optimizer, the memory plan, ZeRO's shards and checkpoints follow from the
// table.
//
//   1. table       names; states, their types and shapes; where ZeRO may cut a tensor
//   2. step        the arguments of an update
//   3. rounding    stochastic, for parameters without master weights
//   4. elements    the formulas of AdamW, SGD, momentum and Lion, for both backends

#ifndef LLMTRAIN_OPTIMIZERS_H
#define LLMTRAIN_OPTIMIZERS_H

#include "../base.h"
#include "../dtypes.h"

// ------------------------------------------------------------------------------------------------
// 1. Table

typedef enum {
    OPTIMIZER_ADAMW, OPTIMIZER_SGD, OPTIMIZER_MOMENTUM, OPTIMIZER_LION,
    OPTIMIZER_ELEMENTWISE,  // those before it are formulas of an element: optimizer_element
    OPTIMIZER_ADAMW_8BIT = OPTIMIZER_ELEMENTWISE, OPTIMIZER_ADAMW_BF16,  // quantized.h
    OPTIMIZER_ADAFACTOR, OPTIMIZER_CAME, OPTIMIZER_ADAM_MINI, OPTIMIZER_SM3,  // factored.h
    OPTIMIZER_MUON, OPTIMIZER_GALORE, OPTIMIZER_LDADAM,  // matrix.h
    OPTIMIZER_COUNT
} OptimizerKind;

// How many elements a state has for a tensor.
typedef enum {
    STATE_ELEMENTS,   // one for each element of the tensor
    STATE_BLOCKS,     // one for OPTIMIZER_BLOCK of them, counted from the tensor's first
    STATE_ROWS,       // one for a row of a matrix; none for a vector
    STATE_COLUMNS,    // one for a column of a matrix; none for a vector
    STATE_VECTORS,    // one for each element of a vector; none for a matrix
    STATE_VECTOR,     // a single one for a vector; none for a matrix
    STATE_HIDDEN,     // one for each element of a hidden matrix (TensorShape); none for others
    STATE_OTHERS,     // one for each element of any tensor but a hidden matrix
    STATE_BASIS,      // rank x the shorter side of a hidden matrix: the basis of a low-rank projection
    STATE_LOW_RANK    // rank x the longer side of a hidden matrix: what is kept of its projection
} StateShape;

// Where a shard of ZeRO may begin and end.
typedef enum {
    SHARD_ANYWHERE,
    SHARD_BLOCKS,         // between the blocks of STATE_BLOCKS
    SHARD_MATRICES,       // a hidden matrix is never split, since an update needs all of it: matrix.h
    SHARD_TENSORS         // no tensor is split
} ShardRule;

typedef struct {
    const char* name;     // also in checkpoints
    Dtype dtype;
    StateShape shape;
} OptimizerState;

enum {
    OPTIMIZER_STATES = 6,    // the most states of an optimizer
    OPTIMIZER_BLOCK = 256,   // elements of a tensor that share a scale
    FACTORED_PIECES = 32,    // partial column sums of an update, in scratch memory (factored.h)
    FACTORED_SCALARS = 4
};

#define STATE_NONE {NULL, DTYPE_F32, STATE_ELEMENTS}
static const struct {
    const char* name;                         // as --optimizer takes it
    OptimizerState states[OPTIMIZER_STATES];  // the list ends before the first whose name is NULL
    ShardRule rule;
} OPTIMIZERS[OPTIMIZER_COUNT] = {
    {"adamw", {{"m", DTYPE_F32, STATE_ELEMENTS}, {"v", DTYPE_F32, STATE_ELEMENTS}}, SHARD_ANYWHERE},
    {"sgd", {STATE_NONE}, SHARD_ANYWHERE},
    {"momentum", {{"m", DTYPE_F32, STATE_ELEMENTS}}, SHARD_ANYWHERE},
    {"lion", {{"m", DTYPE_F32, STATE_ELEMENTS}}, SHARD_ANYWHERE},
    {"adamw-8bit", {{"m", DTYPE_U8, STATE_ELEMENTS}, {"v", DTYPE_U8, STATE_ELEMENTS},
                    {"m_scale", DTYPE_F32, STATE_BLOCKS}, {"v_scale", DTYPE_F32, STATE_BLOCKS}}, SHARD_BLOCKS},
    {"adamw-bf16", {{"m", DTYPE_BF16, STATE_ELEMENTS}, {"v", DTYPE_BF16, STATE_ELEMENTS}}, SHARD_ANYWHERE},
    {"adafactor", {{"v_row", DTYPE_F32, STATE_ROWS}, {"v_column", DTYPE_F32, STATE_COLUMNS},
                   {"v", DTYPE_F32, STATE_VECTORS}}, SHARD_TENSORS},
    {"came", {{"v_row", DTYPE_F32, STATE_ROWS}, {"v_column", DTYPE_F32, STATE_COLUMNS},
              {"v", DTYPE_F32, STATE_VECTORS}, {"m", DTYPE_F32, STATE_ELEMENTS},
              {"r_row", DTYPE_F32, STATE_ROWS}, {"r_column", DTYPE_F32, STATE_COLUMNS}}, SHARD_TENSORS},
    {"adam-mini", {{"v_row", DTYPE_F32, STATE_ROWS}, {"v", DTYPE_F32, STATE_VECTOR},
                   {"m", DTYPE_F32, STATE_ELEMENTS}}, SHARD_TENSORS},
    {"sm3", {{"v_row", DTYPE_F32, STATE_ROWS}, {"v_column", DTYPE_F32, STATE_COLUMNS},
             {"v", DTYPE_F32, STATE_VECTORS}, {"m", DTYPE_F32, STATE_ELEMENTS}}, SHARD_TENSORS},
    {"muon", {{"m", DTYPE_F32, STATE_ELEMENTS}, {"v", DTYPE_F32, STATE_OTHERS}}, SHARD_MATRICES},
    {"galore", {{"m_low", DTYPE_F32, STATE_LOW_RANK}, {"v_low", DTYPE_F32, STATE_LOW_RANK},
                {"projection", DTYPE_F32, STATE_BASIS},
                {"m", DTYPE_F32, STATE_OTHERS}, {"v", DTYPE_F32, STATE_OTHERS}}, SHARD_MATRICES},
    {"ldadam", {{"m_low", DTYPE_F32, STATE_LOW_RANK}, {"v_low", DTYPE_F32, STATE_LOW_RANK},
                {"projection", DTYPE_F32, STATE_BASIS},
                {"m", DTYPE_F32, STATE_OTHERS}, {"v", DTYPE_F32, STATE_OTHERS},
                {"error", DTYPE_F32, STATE_HIDDEN}}, SHARD_MATRICES},
};

static inline size_t optimizer_states(OptimizerKind kind) {
    size_t count = 0;
    while (count < OPTIMIZER_STATES && OPTIMIZERS[kind].states[count].name) count++;
    return count;
}

// Whether an optimizer keeps its state in a subspace of each matrix.
static inline bool optimizer_has_rank(OptimizerKind kind) {
    for (size_t s = 0; s < optimizer_states(kind); s++)
        if (OPTIMIZERS[kind].states[s].shape == STATE_BASIS) return true;
    return false;
}

// The optimizers' names as the choices of a flag: "adamw|sgd|momentum|lion|...".
static inline const char* optimizer_names(void) {
    static char names[OPTIMIZER_COUNT * 16];
    size_t length = 0;
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++)
        length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", kind ? "|" : "",
                                   OPTIMIZERS[kind].name);
    return names;
}

enum { SHAPE_MATRICES = 3 };  // queries, keys, values

// What an optimizer knows of a tensor.
typedef struct {
    size_t rows, cols;    // cols 0: a vector of `rows` elements
    bool hidden;          // a matrix inside a block, neither embedding nor head
    size_t qk_rows, D;  // how many rows, from the first on, are queries and keys, with D rows per head
    size_t stacked[SHAPE_MATRICES];  // rows of each of the matrices stacked in it; all 0: it is one matrix
} TensorShape;

static inline size_t shape_elements(const TensorShape* t) { return t->rows * (t->cols ? t->cols : 1); }

// rows of each matrix in a tensor; returns how many there are.
static inline size_t shape_matrices(size_t rows[SHAPE_MATRICES], const TensorShape* t) {
    size_t count = 0;
    for (; count < SHAPE_MATRICES && t->stacked[count] > 0; count++) rows[count] = t->stacked[count];
    if (count == 0) rows[count++] = t->rows;
    return count;
}

// Elements of a state of STATE_ELEMENTS, _HIDDEN, _BASIS or _LOW_RANK for one of these matrices; 0 for other shapes.
static inline size_t matrix_state_count(StateShape shape, size_t rows, size_t cols, size_t rank) {
    size_t shorter = min_size(rows, cols), longer = max_size(rows, cols);
    if (shape == STATE_BASIS) return min_size(rank, shorter) * shorter;
    if (shape == STATE_LOW_RANK) return min_size(rank, shorter) * longer;
    return shape == STATE_HIDDEN || shape == STATE_ELEMENTS ? rows * cols : 0;
}

// Returns how many elements of a state belong to elements [first, end) of a tensor; *index is the first of them, in the
// state of the whole tensor. A state without an element or block for each of the tensor's belongs to the whole tensor,
// which is then not cut. rank: of a low-rank optimizer.
static inline size_t optimizer_state_part(size_t* index, StateShape shape, const TensorShape* t, size_t rank,
                                          size_t first, size_t end) {
    size_t rows[SHAPE_MATRICES], count = shape_matrices(rows, t), whole = 0;
    bool matrix = t->cols > 0;
    *index = 0;
    if (first >= end) return 0;
    switch (shape) {
    case STATE_BLOCKS:
        *index = first / OPTIMIZER_BLOCK;
        return (end + OPTIMIZER_BLOCK - 1) / OPTIMIZER_BLOCK - *index;
    case STATE_ROWS: return matrix ? t->rows : 0;
    case STATE_COLUMNS: return t->cols;
    case STATE_VECTOR: return matrix ? 0 : 1;
    case STATE_BASIS:
    case STATE_LOW_RANK:
        for (size_t i = 0; i < count && t->hidden; i++) whole += matrix_state_count(shape, rows[i], t->cols, rank);
        return whole;
    case STATE_ELEMENTS: whole = 1; break;
    case STATE_VECTORS: whole = !matrix; break;
    case STATE_HIDDEN: whole = t->hidden; break;
    case STATE_OTHERS: whole = !t->hidden; break;
    }
    *index = first;
    return whole * (end - first);
}

// Bytes of all states of a tensor.
static inline double optimizer_state_bytes(OptimizerKind kind, const TensorShape* t, size_t rank) {
    double bytes = 0;
    size_t index;
    for (size_t s = 0; s < optimizer_states(kind); s++)
        bytes += (double)dtype_bytes(OPTIMIZERS[kind].states[s].dtype) *
                 (double)optimizer_state_part(&index, OPTIMIZERS[kind].states[s].shape, t, rank, 0, shape_elements(t));
    return bytes;
}

// Whether an update needs the tensor whole.
static inline bool optimizer_whole(OptimizerKind kind, const TensorShape* t) {
    ShardRule rule = OPTIMIZERS[kind].rule;
    return rule == SHARD_TENSORS || (rule == SHARD_MATRICES && t->hidden);
}

// Floats of scratch memory that the update of a tensor takes: sums of rows and columns (factored.h), or the
// arrays of muon_update, galore_update or ldadam_update, each rounded up to a multiple of 64, and one sum.
static inline size_t optimizer_scratch_floats(OptimizerKind kind, const TensorShape* t, size_t rank) {
    size_t rows[SHAPE_MATRICES], count = shape_matrices(rows, t), most = 0;
    size_t R = t->cols ? t->rows : 1, C = t->cols ? t->cols : t->rows;  // a vector is a row
    if (OPTIMIZERS[kind].rule == SHARD_TENSORS) return 2 * R + (1 + FACTORED_PIECES) * C + FACTORED_SCALARS;
    if (OPTIMIZERS[kind].rule != SHARD_MATRICES || !t->hidden) return 0;
    for (size_t i = 0; i < count; i++) {
        size_t n = rows[i] * t->cols, d = min_size(rows[i], t->cols), r = min_size(rank, d);
        size_t low = matrix_state_count(STATE_LOW_RANK, rows[i], t->cols, rank);
        size_t floats = 2 * n + 2 * d * d;
        if (kind == OPTIMIZER_GALORE) floats = 3 * low + r * d + n;
        if (kind == OPTIMIZER_LDADAM) floats = 3 * low + r * d + n + 2 * r * r;
        most = max_size(most, floats + 8 * 64);
    }
    return most;
}

// The cost of a tensor's update, by which tensors are distributed over ranks: its elements, or the multiplications of
// whole matrices.
static inline double optimizer_work(OptimizerKind kind, const TensorShape* t) {
    double shorter = (double)(t->rows < t->cols ? t->rows : t->cols), n = (double)shape_elements(t);
    return OPTIMIZERS[kind].rule == SHARD_MATRICES && t->hidden ? n * shorter : n;
}

// ------------------------------------------------------------------------------------------------
// 2. Step

// What a user chooses, from the flag to the update: a model's options contain it, a checkpoint records it.
typedef struct {
    OptimizerKind kind;
    double beta1, beta2, epsilon, weight_decay;
    size_t rank;              // of low-rank optimizers
    bool master_weights;      // keep a float copy of 16-bit parameters, which the optimizer updates
    uint64_t seed;            // of stochastic rounding
    double lora_plus;         // the learning rate of LoRA's b is so many times that of a; 0: as it is
} OptimizerOptions;

// The defaults of train.cu's flags, too.
static inline OptimizerOptions optimizer_defaults(OptimizerKind kind) {
    OptimizerOptions o = {.kind = kind, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .rank = 128,
                          .master_weights = true};
    return o;
}

// The same for every parameter, except for the weight decay and what LoRA+ does: see optimizer_step_of.
typedef struct {
    OptimizerKind kind;
    float lr, beta1, beta2, epsilon, weight_decay;
    float grad_scale;     // gradients are multiplied by it: clipping, and undoing the loss scale
    uint64_t seed, step;  // step counts from 1; both choose the random bits of stochastic rounding
    size_t rank;          // of low-rank optimizers
} OptimizerStep;

// Step number `step`, from 1; gradients are multiplied by grad_scale first.
static inline OptimizerStep optimizer_step(const OptimizerOptions* o, uint64_t step, double lr, double grad_scale) {
    OptimizerStep s = {.kind = o->kind, .lr = (float)lr, .beta1 = (float)o->beta1, .beta2 = (float)o->beta2,
                       .epsilon = (float)o->epsilon, .weight_decay = (float)o->weight_decay,
                       .grad_scale = (float)grad_scale, .seed = o->seed, .step = step, .rank = o->rank};
    return s;
}

// A slice of a tensor to update: all of it where optimizer_whole says so.
typedef struct OptimizerSlice {
    floatX* params;                  // (n)
    float* master_weights;           // (n) the float copy that is updated and then rounded to params; NULL: params are
                                     // updated themselves, rounded stochastically where floatX is not float
    const float* grads;              // (n)
    void* states[OPTIMIZER_STATES];  // those elements that belong to the slice; NULL where the tensor has none
    size_t first, n;                 // first: position in the flat vector, which numbers the random bits
    TensorShape shape;               // of the tensor
    bool no_decay;                   // its tensor has no weight decay
    float lr_factor;                 // its learning rate is so many times that of the step; 0: as it is
    float* scratch;                  // (optimizer_scratch_floats)
} OptimizerSlice;

// The step of a slice.
static inline OptimizerStep optimizer_step_of(const OptimizerSlice* slice, const OptimizerStep* o) {
    OptimizerStep own = *o;
    if (slice->no_decay) own.weight_decay = 0;
    if (slice->lr_factor != 0) own.lr *= slice->lr_factor;
    return own;
}

// ------------------------------------------------------------------------------------------------
// 3. Rounding
//
// Rounds up with a probability equal to the fraction that is cut off, so that the mean is exact; `random` is uniform.

// The lower 16 bits of `random` are used.
HOST_DEVICE ALWAYS_INLINE uint16_t bf16_of_stochastic(float x, uint32_t random) {
    uint32_t b = bits_from_float(x);
    bool special = (b & 0x7f800000u) == 0x7f800000u;
    return (uint16_t)((special ? b | (x != x ? 0x400000u : 0u) : b + (random & 0xffff)) >> 16);
}

HOST_DEVICE ALWAYS_INLINE floatX floatX_of_stochastic(float x, uint32_t random) {
#if defined(PRECISION_BF16)
    floatX r = {bf16_of_stochastic(x, random)};
    return r;
#elif defined(PRECISION_FP16)
    if (!(fabsf(x) < 65504.0f)) return floatX_of(x);  // the largest finite number has no neighbor above
    uint32_t exponent = bits_from_float(x) & 0x7f800000u;
    // The distance between neighbors in floatX at x.
    float unit = float_from_bits((exponent < 0x38800000u ? 0x38800000u : exponent) - (10u << 23));
    float quotient = x / unit, cut = truncf(quotient);
    bool away = (float)(random >> 8) * 0x1p-24f < fabsf(quotient - cut);
    return floatX_of((cut + copysignf(away ? 1.0f : 0.0f, x)) * unit);
#else
    (void)random;
    return x;
#endif
}

// Weights [begin, begin + n) of a slice as floats, for an update to change: the master weights, params if they are
// floats, or a copy in `memory` (n). On a CPU only, like the next function.
static inline float* optimizer_weights(float* memory, const OptimizerSlice* slice, size_t begin, size_t n) {
    float* w = FLOATX_IS_FLOAT ? (float*)(slice->params + begin) : memory;
    if (slice->master_weights) return slice->master_weights + begin;
    for (size_t i = 0; i < n && w == memory; i++) memory[i] = float_of(slice->params[begin + i]);
    return w;
}

// Stores elements [begin, begin + n) of params, from their updated floats w (n), which optimizer_weights returned.
static inline void optimizer_store(const OptimizerSlice* slice, const OptimizerStep* o, const float* w, size_t begin,
                                   size_t n) {
    floatX* p = slice->params + begin;
    enum { PIECE = LLMTRAIN_PIECE(512, 29) };
    uint32_t random[PIECE];
    if (FLOATX_IS_FLOAT && slice->master_weights == NULL) return;
    if (slice->master_weights != NULL) {
        for (size_t i = 0; i < n; i++) p[i] = floatX_of(w[i]);
        return;
    }
    for (size_t at = 0; at < n; at += PIECE) {
        size_t count = min_size(n - at, PIECE);
        random_fill(random, o->seed, RANDOM_ROUNDING, o->step, slice->first + begin + at, count);
        for (size_t i = 0; i < count; i++) p[at + i] = floatX_of_stochastic(w[at + i], random[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Elements
//
// g is the gradient times grad_scale. Multiply-adds are fused by hand, so that the compiler has no choice.
//
// AdamW     "Decoupled Weight Decay Regularization":  m, v: running means of g and g^2; m', v': bias-corrected;
//           w -= lr (m' / (sqrt(v') + epsilon) + weight_decay w)
// SGD       w -= lr (g + weight_decay w)
// momentum  m = beta1 m + g;  w -= lr (m + weight_decay w)
// Lion      "Symbolic Discovery of Optimization Algorithms":  w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w);
//           m = beta2 m + (1 - beta2) g

typedef struct {
    OptimizerStep step;
    float m_correction, v_correction;  // AdamW's
} ElementStep;

static inline ElementStep element_step(const OptimizerStep* o) {
    ElementStep e = {*o, 1.0f, 1.0f};
    e.m_correction = (float)(1.0 / (1.0 - pow_double((double)o->beta1, (double)o->step)));
    e.v_correction = (float)(1.0 / (1.0 - pow_double((double)o->beta2, (double)o->step)));
    return e;
}

// Updates w and what the kind keeps in m and v, which are floats here, whatever dtype they are stored in.
HOST_DEVICE ALWAYS_INLINE void optimizer_element(OptimizerKind kind, float* w, float* m, float* v, float grad,
                                                 const ElementStep* e) {
    const OptimizerStep* o = &e->step;
#ifdef __CUDA_ARCH__
    float g = __fmul_rn(grad, o->grad_scale), direction;  // which no compiler fuses with the subtraction of m
#else
    float g = grad * o->grad_scale, direction;
#endif
    if (kind == OPTIMIZER_SGD) {
        *w = multiply_add(-o->lr, multiply_add(grad, o->grad_scale, o->weight_decay * *w), *w);
        return;
    }
    if (kind == OPTIMIZER_ADAMW) {
        *m = multiply_add(1.0f - o->beta1, g - *m, *m);
        *v = multiply_add(1.0f - o->beta2, multiply_add(g, g, -*v), *v);
        direction = *m * e->m_correction / (sqrtf(*v * e->v_correction) + o->epsilon);
    } else if (kind == OPTIMIZER_MOMENTUM) {
        direction = *m = multiply_add(o->beta1, *m, g);
    } else {
        float mixed = multiply_add(o->beta1, *m, (1.0f - o->beta1) * g);
        direction = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // 0 and NaN stay what they are
        *m = multiply_add(o->beta2, *m, (1.0f - o->beta2) * g);
    }
    *w = multiply_add(-o->lr, multiply_add(o->weight_decay, *w, direction), *w);
}

#endif  // LLMTRAIN_OPTIMIZERS_H
