// optimizer_flags.h: the flags of the optimizer.

#ifndef LLMTRAIN_OPTIMIZER_FLAGS_H
#define LLMTRAIN_OPTIMIZER_FLAGS_H

#include "../base/flags.h"
#include "../ops/optimizers/optimizers.h"

// train, lr, clip: where these go, which are other parts' to use.
static inline void optimizer_flags(Flags* flags, OptimizerOptions* o, const char** train, double* lr, double* clip) {
    OptimizerOptions d = optimizer_defaults(OPTIMIZER_ADAMW);
    const Flag table[] = {
        FLAG_HEADING("Optimizer"),
        FLAG_TEXT("train", train, NULL, "NAMES", FLAG_FIXED,
                  "train only these tensors, e.g. 'block.*' or '*norm*,head_weight'; the others are frozen"),
        FLAG_CHOICE("optimizer", &o->kind, d.kind, optimizer_names(), 0, "update rule"),
        FLAG_REAL("lr", lr, 6e-4, 0, 100, 0, "peak learning rate"),
        FLAG_REAL("beta1", &o->beta1, d.beta1, 0, 0.99999, 0, "decay of the first moment; momentum: the coefficient"),
        FLAG_REAL("beta2", &o->beta2, d.beta2, 0, 0.99999, 0,
                  "adamw: decay of the second moment; lion: of the momentum"),
        FLAG_REAL("epsilon", &o->epsilon, d.epsilon, 1e-15, 1, 0, "adamw: term added to the denominator for stability"),
        FLAG_REAL("weight-decay", &o->weight_decay, d.weight_decay, 0, 10, 0,
                  "decoupled weight decay, applied to matrices only"),
        FLAG_COUNT("optimizer-rank", &o->rank, d.rank, 1, 65536, 0,
                   "galore, ldadam: rank of the subspace that holds a matrix's optimizer state"),
        FLAG_REAL("lora-plus", &o->lora_plus, 1, 1e-3, 1e3, 0,
                  "with --lora: times --lr, the learning rate of the second matrix of each pair (LoRA+)"),
        FLAG_REAL("clip", clip, 1, 0, 1e9, 0,
                  "clip the gradient norm to X, or to the bound of --spike-sigma if that is larger; 0: no clipping"),
        FLAG_SWITCH("masters", &o->master_weights, d.master_weights, 0,
                    "16-bit builds: keep fp32 master weights; off: update 16-bit weights with stochastic rounding"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

#endif  // LLMTRAIN_OPTIMIZER_FLAGS_H
