// rewind.h: a run that has diverged goes back to a checkpoint and continues with other data: run_rewind.
//
// It goes back to the same checkpoint even if it was killed and resumed. Later ones are set aside: no resume uses them.

#ifndef LLMTRAIN_REWIND_H
#define LLMTRAIN_REWIND_H

#include "save.h"

static inline void describe_divergence(char* text, size_t size, const RunState* state, const StepResult* result) {
    if (!isfinite(result->loss))
        snprintf(text, size, "the loss of step %llu is %g", (unsigned long long)state->step, result->loss);
    else
        snprintf(text, size, "the last %llu steps were skipped: the gradient's norm is %g, its running mean %g",
                 (unsigned long long)state->skipped_consecutive, result->grad_norm, state->norms.mean);
}

// The step of the oldest checkpoint before step `first` that --ckpt-keep has certainly left; 0: the beginning.
static inline uint64_t run_oldest_kept(const Run* run, uint64_t first) {
    uint64_t interval = run->cadence.steps, keep = run->options->ckpt_keep;
    uint64_t newest = interval ? (first - 1) / interval * interval : 0, span = keep ? (keep - 1) * interval : newest;
    return newest > span ? newest - span : 0;
}

// Where a run that has diverged goes back to: the newest checkpoint before step *before, or, if there is none and
// *begins, the beginning: then --ckpt-keep cannot have removed one. *first is the first of the steps that were skipped
// last. If the run got no further than the last time, that checkpoint was already bad, and it goes to the one before.
// False if the run may not go back.
static inline bool run_choose_rewind(Run* run, const char* why, uint64_t* first, uint64_t* before, bool* begins,
                                     Error* error) {
    const RunOptions* o = run->options;
    const RunState* state = &run->record.state;
    *first = state->step - state->skipped_consecutive + 1;
    bool again = state->rewinds > 0 && *first <= state->rewound_from;
    if (again) *first = state->rewound_from;
    *before = again ? state->rewound_to : *first;
    uint64_t oldest = run_oldest_kept(run, *first);
    // With a cadence in minutes, --ckpt-keep may have removed what came before the checkpoint of the last rewind.
    *begins = oldest == 0 && !(again && run->cadence.steps == 0 && o->ckpt_keep > 0);
    bool may = o->rewind > 0;
    if (!may) fail_with(error, "%s; lower --lr or raise --spike-skip, and --resume, or use --rewind", why);
    else if (state->rewinds >= o->rewind)
        may = fail_with(error, "%s, after %llu rewinds; lower --lr, and --resume", why,
                        (unsigned long long)state->rewinds);
    else if (again && *before <= oldest && oldest > 0)
        may = fail_with(error, "%s, also after the rewind to step %llu, and --ckpt-keep %llu has left no checkpoint "
                        "before that; lower --lr, and --resume", why, (unsigned long long)*before,
                        (unsigned long long)o->ckpt_keep);
    return may || fail_on_all_ranks(error);
}

// Called when the run has diverged: goes back to a checkpoint, and continues with the samples that come next and a
// smaller learning rate, as "PaLM: Scaling Language Modeling with Pathways" (5.1) does by hand. A run that is killed
// and resumed must go back to the same checkpoint, so only checkpoints that --ckpt-every asked for count: none made at
// a signal or by --keep-best, and none of --ckpt-tier.
static inline bool run_rewind(Run* run, const StepResult* result, Error* error) {
    RunState *state = &run->record.state, diverged = *state;
    uint64_t first, before;
    bool begins, found;
    char why[256], back[96];
    double began = now_ms();
    describe_divergence(why, sizeof why, &diverged, result);
    if (!run_choose_rewind(run, why, &first, &before, &begins, error)) return false;
    heartbeat_send(HEARTBEAT_PAUSE, diverged.step);
    if (!run_save_wait(run, error)) return false;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    pruner_await(&run->pruner);
    fault_point("rewind");
    if (!run_load(run, before, true, &found, error)) return false;
    if (!found && !begins)
        return fail_with(error, "%s, and the checkpoints before step %llu are gone; lower --lr, and --resume", why,
                         (unsigned long long)before) || fail_on_all_ranks(error);
    if (!found && !run_agree(run, run_start(run, error), error)) return false;
    state->samples = diverged.samples;
    state->rewinds = diverged.rewinds + 1;
    state->rewound_from = first;
    state->rewound_to = state->step;
    state->lr_factor = diverged.lr_factor * run->options->rewind_lr;
    fault_point("forget");
    if (!run_agree(run, run_set_aside(run, true, error), error)) return false;
    snprintf(back, sizeof back, "{\"to\": %llu,\"ms\": %s}", (unsigned long long)state->step,
             event_ms(now_ms() - began).text);
    run_tell_with(run, true, "back", back, "rewound", diverged.step, "went back from step %llu to %llu: %s; the "
                  "learning rate is now multiplied by %g", (unsigned long long)diverged.step,
                  (unsigned long long)state->step, why, state->lr_factor);
    run->cadence.saved_ms = now_ms();
    return true;
}

#endif  // LLMTRAIN_REWIND_H
