// objective.h: what a step minimizes, if it is not the mean loss of its targets: the mean over all pairs of answers, say,
// of a value that follows from the losses of their tokens. Its gradient is that of the tokens' losses, each times a
// weight. run/objectives.h has the objectives of ./train; a program of your own can set one too.

#ifndef LLMTRAIN_OBJECTIVE_H
#define LLMTRAIN_OBJECTIVE_H

#include "tensors.h"

typedef struct {
    void (*weigh)(void* context);               // fills weights and values from the slot's losses; NULL: no objective
    size_t (*count)(void* context, size_t B);   // what the mean is over, in B sequences from dropout.first_token on
    // Computes the reference of a batch's answers before it. All ranks call it; B may be 0. NULL: there is none.
    void (*refer)(void* context, const int32_t* tokens, const int32_t* targets, size_t B);
    void* context;
    bool validates;                             // the batch is one of a validation
    float *weights, *values;                    // (N) each, on the device; the values add up to that of the batch
} Objective;

// Makes of logits (rows, padded vocabulary), those of the batch from row `first` on, their losses and, if dloss is not
// 0, in place their gradient: dloss times that of the sum of the losses. For distillation, entropies; on the device.
typedef struct {
    void (*apply)(void* context, floatX* logits, float* losses, float dloss, size_t first, size_t rows);  // NULL: none
    void* context;
} HeadRule;

static inline void objective_layout(Objective* o, size_t N, Arena* arena) {
    o->weights = (float*)arena_take(arena, "objective", N * sizeof(float));
    o->values = (float*)arena_take(arena, "objective", N * sizeof(float));
}

#endif  // LLMTRAIN_OBJECTIVE_H
