// flops.h: the floating-point operations of training on a token, for MFU.

#ifndef LLMTRAIN_FLOPS_H
#define LLMTRAIN_FLOPS_H

#include "../../llmtrain.h"

// Floating-point operations of training on one token: 6 per weight that multiplies it (2 forward, 4 backward, of which
// 2 for a gradient that a frozen one does not have), and attention's two matmuls over T/2 positions on average, forward
// and twice backward. Blocks before the first that trains have no backward.
static inline double model_flops_per_token(const Model* model, size_t T) {
    const Config* c = &model->config;
    size_t looked_up = c->tied ? 0 : c->vocab * c->channels;
    size_t ends = model_backward_ends(model), unused = 0;
    if (c->family == FAMILY_GPT2) looked_up += c->context * c->channels;
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        bool multiplies = t->bucket > 0 || c->tied;
        if (!t->trains && t->cols > 0 && i != model->weights.position_embedding.row && multiplies)
            unused += part_whole_elements(&t->part) * (t->bucket > 0 && t->bucket <= ends ? 2 : 1);
    }
    return 6.0 * (double)(model->parameters.true_size - looked_up) - 2.0 * (double)unused +
        (double)((6 * c->layers - 4 * ends) * T * c->heads * config_head_size(c));
}

#endif  // LLMTRAIN_FLOPS_H
