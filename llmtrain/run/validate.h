// validate.h: the loss of a model over a set of data, without gradients.
//
//   double loss;
//   bool ok = model_validate(&model, &loss, &dataset, 0, 0, tokens, targets, B, T, &error);
//
// Every rank takes its share of the windows and returns the same loss. Dropout is off meanwhile. The weights are
// unchanged; the activations of a step in progress are overwritten.

#ifndef LLMTRAIN_VALIDATE_H
#define LLMTRAIN_VALIDATE_H

#include "../../llmtrain.h"
#include "../base/files.h"
#include "../text/data.h"

// Mean loss per token over the first `windows` windows of the data (all of them if 0 or more than there are), which
// overlap by `overlap` tokens, B at a time, sharded over the ranks; tokens, targets (B, T) are scratch.
static inline bool model_validate(Model* model, double* loss, const Dataset* data, size_t windows, size_t overlap,
                                  int32_t* tokens, int32_t* targets, size_t B, size_t T, Error* error) {
    enum { LOSS, TOKENS, COUNT };
    FlatVector* flat = &model->flat;
    size_t available = dataset_windows(data, T, overlap), rank = flat->options.rank, world = flat->options.world;
    if (windows == 0 || windows > available) windows = available;
    Dropout dropout = model->dropout;
    double own[COUNT] = {0, 0}, sum[COUNT] = {0, 0};
    fill_zero(flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    Progress progress = progress_begin("validation", windows);
    bool ok = true;
    model->dropout.p = 0;
    for (size_t first = rank * B; first < windows; first += world * B) {
        size_t batch = min_size(B, windows - first);
        ok = dataset_batch(tokens, targets, data, first, (int32_t)model->config.vocab, batch, T, overlap, error);
        if (!ok) break;
        model_losses(model, tokens, targets, batch, T);
        own[TOKENS] += (double)targets_count(targets, batch * T);
        if (rank == 0) progress_show(&progress, first + batch);
    }
    progress_end(&progress);
    device_download(&own[LOSS], flat->scalars + SUM_LOSS, sizeof(double), model->stream);
    model->dropout = dropout;
    if (!ok || !stats_gather(&model->stats, own, COUNT, error)) return false;
    for (size_t r = 0; r < world; r++)
        for (size_t i = 0; i < COUNT; i++) sum[i] += stats_of(&model->stats, r, i);
    *loss = sum[LOSS] / sum[TOKENS];
    return true;
}

#endif  // LLMTRAIN_VALIDATE_H
