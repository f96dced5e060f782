// optimizers.h: the optimizers, a row each, and what one step of any of them takes.
//
// A new optimizer is a row here, a branch in optimizer_apply (kernels_cpu.h) and one in optimizer_element
// (kernels.cuh). The flag --optimizer, the memory plan, ZeRO's shards and checkpoints walk the table.
//
//   1. table       names, states
//   2. step        what an update is given
//   3. rounding    stochastic, for parameters without master weights
//
// Needs: llmtrain/types.h.

#ifndef LLMTRAIN_OPTIMIZERS_H
#define LLMTRAIN_OPTIMIZERS_H

#include "types.h"

// ------------------------------------------------------------------------------------------------
// 1. Table

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_SGD, OPTIMIZER_MOMENTUM, OPTIMIZER_LION, OPTIMIZER_COUNT } OptimizerKind;

enum { OPTIMIZER_STATES = 2 };  // the most arrays that an optimizer keeps, each with a float for every parameter

static const struct {
    const char* name;                      // as --optimizer takes it
    const char* states[OPTIMIZER_STATES];  // names of the arrays that it keeps, also in checkpoints; NULL: fewer
    bool by_matrix;                        // an update needs whole matrices: a ZeRO stage that cuts one is refused
} OPTIMIZERS[OPTIMIZER_COUNT] = {
    {"adamw", {"m", "v"}, false},
    {"sgd", {NULL, NULL}, false},
    {"momentum", {"m", NULL}, false},
    {"lion", {"m", NULL}, false},
};

static inline size_t optimizer_states(OptimizerKind kind) {
    size_t count = 0;
    while (count < OPTIMIZER_STATES && OPTIMIZERS[kind].states[count]) count++;
    return count;
}

// The optimizer of that name; OPTIMIZER_COUNT if there is none.
static inline OptimizerKind optimizer_find(const char* name) {
    int kind = 0;
    while (kind < OPTIMIZER_COUNT && strcmp(OPTIMIZERS[kind].name, name) != 0) kind++;
    return (OptimizerKind)kind;
}

// Their names as the choices of a flag: "adamw|sgd|momentum|lion".
static inline const char* optimizer_names(void) {
    static char names[OPTIMIZER_COUNT * 16];
    size_t length = 0;
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++)
        length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", kind ? "|" : "",
                                   OPTIMIZERS[kind].name);
    return names;
}

// ------------------------------------------------------------------------------------------------
// 2. Step

// The same for every parameter, but for the weight decay.
typedef struct {
    OptimizerKind kind;
    float lr, beta1, beta2, epsilon, weight_decay;
    float grad_scale;     // gradients are multiplied by it: clipping, and undoing the loss scale
    uint64_t seed, step;  // step counts from 1; both choose the random bits of stochastic rounding
} OptimizerStep;

// ------------------------------------------------------------------------------------------------
// 3. Rounding
//
// Rounds up with a probability equal to the fraction that is cut off, so that the mean is exact; `random` is uniform.

HOST_DEVICE static inline floatX floatX_of_stochastic(float x, uint32_t random) {
#if defined(PRECISION_BF16)
    uint32_t b = bits_from_float(x);
    bool special = (b & 0x7f800000u) == 0x7f800000u;
    floatX r;
    r.bits = (uint16_t)((special ? b | (x != x ? 0x400000u : 0u) : b + (random & 0xffff)) >> 16);
    return r;
#elif defined(PRECISION_FP16)
    if (!(fabsf(x) < 65504.0f)) return floatX_of(x);  // the largest finite number has no neighbour above
    uint32_t exponent = bits_from_float(x) & 0x7f800000u;
    // The distance between neighbours in floatX at x.
    float unit = float_from_bits((exponent < 0x38800000u ? 0x38800000u : exponent) - (10u << 23));
    float quotient = x / unit, cut = truncf(quotient);
    bool away = (float)(random >> 8) * 0x1p-24f < fabsf(quotient - cut);
    return floatX_of((cut + copysignf(away ? 1.0f : 0.0f, x)) * unit);
#else
    (void)random;
    return x;
#endif
}

#endif  // LLMTRAIN_OPTIMIZERS_H
