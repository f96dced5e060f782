// validate.h: the loss of a model over a set of data, without gradients.
//
//   Validation v = {.data = &dataset, .tokens = tokens, .targets = targets, .B = B, .T = T};
//   if (model_validate(&model, &v, &error)) printf("%g", v.loss);
//
// Every rank takes its share of the windows and returns the same loss. Dropout is off meanwhile. The weights are
// unchanged; the activations of a step in progress are overwritten.

#ifndef LLMTRAIN_VALIDATE_H
#define LLMTRAIN_VALIDATE_H

#include "stages.h"
#include "../base/files.h"
#include "../base/progress.h"
#include "../text/data.h"

#include <signal.h>

typedef struct {
    const Dataset* data;
    size_t windows, overlap;     // windows to score, 0: all of the data; tokens that consecutive ones share
    int32_t *tokens, *targets;   // (B, T): scratch
    size_t B, T;                 // windows at a time, tokens of a window
    const volatile sig_atomic_t* stop;  // not 0: a signal has asked this rank to stop; NULL: none will
    double loss;                 // result: the mean per token
    int ended;                   // result: the signal that asked a rank to stop, SIGINT before others, or -1 if a rank
                                 // could not read its data: there is no loss; 0: there is one
} Validation;

// Computes the mean loss per token over the first windows of the data, sharded over the ranks. All ranks return
// together: with the same result, or, on a rank that cannot read its data, with an error, and `ended` on the others.
static inline bool model_validate(Model* model, Validation* v, Error* error) {
    enum { TOKENS, ENDS, MS, LOSSES, COUNT = LOSSES + STATS_OF_SUM };
    FlatVector* flat = &model->flat;
    size_t windows = dataset_windows(v->data, v->T, v->overlap), rank = flat->dp_rank, world = flat->dp_world;
    if (v->windows > 0) windows = min_size(windows, v->windows);
    size_t rounds = (windows + world * v->B - 1) / (world * v->B), look = 0;  // look: the next round to look up after
    Dropout dropout = model->dropout;
    double own[COUNT] = {0}, sum[COUNT] = {0}, began = now_ms();
    ExactSum losses;
    fill_zero(&flat->sums->losses, sizeof losses, model->stream);
    Progress progress = progress_begin("validation", windows);
    bool good = true, connected = true;
    model->dropout.p = model->dropout.adapters = 0;
    model->objective.validates = true;
    v->loss = NAN;
    v->ended = 0;
    for (size_t round = 0; connected && !v->ended && round < rounds; round++) {
        size_t first = (round * world + rank) * v->B, batch = first < windows ? min_size(v->B, windows - first) : 0;
        good = good && (batch == 0 || dataset_batch(v->tokens, v->targets, v->data, first,
                                                    (int32_t)model->config.vocab, batch, v->T, v->overlap, error));
        if (!good && model_is_divided(model)) {  // other ranks wait for what it computes
            memset(v->tokens, 0, v->B * v->T * sizeof(int32_t));
            memset(v->targets, -1, v->B * v->T * sizeof(int32_t));
        }
        model->dropout.first_token = first * v->T;  // of which an objective knows the answers
        if (model->objective.refer)
            model->objective.refer(model->objective.context, v->tokens, v->targets, good ? batch : 0);
        if (batch > 0 && (good || model_is_divided(model))) {
            pipeline_losses(model, v->tokens, v->targets, batch, v->T);
            if (model_has_head(model)) own[TOKENS] += (double)model_targets(model, v->targets, batch * v->T);
        } else {
            flat_accompany(flat);
        }
        if (flat->options.rank == 0) progress_show(&progress, first + batch);
        if (round < look && round + 1 < rounds) continue;
        // About once a second, and at the end, the ranks exchange how far they are, and whether to continue.
        device_download(&losses, &flat->sums->losses, sizeof losses, model->stream);
        stats_put_sum(own + LOSSES, losses);
        own[ENDS] = !good ? -1 : v->stop ? *v->stop : 0;
        own[MS] = (now_ms() - began) / (double)(round + 1);
        connected = stats_gather(&model->stats, own, COUNT, error);
        memset(sum, 0, sizeof sum);
        for (size_t r = 0; connected && r < model->stats.world; r++)
            for (size_t i = 0; i < COUNT; i++) sum[i] += stats_of(&model->stats, r, i);
        if (connected) v->ended = stats_end(&model->stats, ENDS);
        look = round + 1 + (size_t)fmin(1000 / fmax(sum[MS] / (double)model->stats.world, 1e-3), 1e6);
    }
    progress_end(&progress);
    model->dropout = dropout;
    model->objective.validates = false;
    if (good && connected && !v->ended) v->loss = exact_value(stats_sum(&model->stats, LOSSES)) / sum[TOKENS];
    return good && connected;
}

#endif  // LLMTRAIN_VALIDATE_H
