// step.h: what surrounds the computation of a step in the training loop of train.cu.
//
//   StepLog s = step_begin(&run);            the clock starts
//   ...                                      pipeline_step: forward and backward
//   step_read(&run, &s, &error);             loss and norm over all ranks
//   run_update(&run, &s, factor);            unless the step is skipped
//   step_end(&run, &s, &due);                the clock stops, before anything that is due

#ifndef LLMTRAIN_STEP_H
#define LLMTRAIN_STEP_H

#include "checks.h"
#include "save.h"

// Whether a multiple of the interval is reached; never if it is 0.
static inline bool step_every(uint64_t step, uint64_t interval) { return interval > 0 && step % interval == 0; }

// What is due after a step.
typedef struct {
    bool stop, signaled;    // it was the last, or a signal has come; a signal
    bool validate, log, sample;
    unsigned save;          // where: run_save_due; 0: nowhere
} Due;

// Training begins here, or continues here after a rewind.
static inline void run_begin_clock(Run* run) {
    run->first_step = run->record.state.step;
    run->began_ms = now_ms();
}

static inline StepLog step_begin(Run* run) {
    StepLog s = {.val_loss = NAN, .began_ms = now_ms(), .sent_before = flat_bytes_so_far(&run->model.flat)};
    memset(run->objective.counted, 0, sizeof run->objective.counted);
    run->facts.steps++;
    fault_step(run->comm.rank, run->record.state.step + 1);
    return s;
}

// Reads the next micro-batch. A rank that cannot goes on with one that has no targets, since the others wait for it in
// collectives: step_read makes the step `broken`, and it does not count.
static inline void run_read_batch(Run* run) {
    size_t bytes = run->model.options.B * run->model.options.T * sizeof(int32_t);
    double began = now_ms();
    fault_point("load");
    if (!run->broken && (!shard_check_good(&run->check, &run->broken_why) ||
                         !loader_next(&run->loader, run->tokens, run->targets, &run->broken_why)))
        run->broken = run->broken_why.kind == ERROR_USAGE ? 2 : 1;
    run->facts.load_ms += now_ms() - began;
    if (!run->broken) return;
    memset(run->tokens, 0, bytes);
    memset(run->targets, -1, bytes);
}

// Ends a run after a step that does not count, saved as it was before. A damaged shard has the exit code of a wrong
// flag, since a supervisor's restart would train on it again.
static inline bool run_end_broken(Run* run, int broken, const RunState* before, Error* error) {
    if (run->broken) *error = run->broken_why;
    run_agree(run, !run->broken, error);
    run_save_whole(run, before);
    return broken == 2 ? fail_as(error, ERROR_USAGE) : false;
}

// Reads the step's loss and gradient norm over all ranks, and the flags that they exchange; completes a save that all
// ranks have written.
static inline bool step_read(Run* run, StepLog* s, Error* error) {
    Saver* saver = &run->saver;
    SaverState state = saver_state(saver);
    StepFlags flags = {*run->interrupted, cadence_due_now(&run->cadence, now_ms()), state == SAVER_WRITTEN,
                       state == SAVER_FAILED, run->broken, {0}};
    memcpy(flags.counted, run->objective.counted, sizeof flags.counted);
    heartbeat_collective("the reduction of gradients");
    if (!model_finish_step(&run->model, &s->result, flags, error)) return false;
    s->of_ranks = run_keep_ranks(run);
    heartbeat_send(HEARTBEAT_STEP, run->record.state.step + 1);
    run->stopped_by = s->result.flags.stop;
    s->saving = state != SAVER_IDLE;
    if (s->saving && s->result.flags.failed) saver_stop(saver);
    bool ends = s->saving && (s->result.flags.saved || s->result.flags.failed);
    return !ends || run_save_complete_or_report(run, false, error);
}

// The norm from which the guard decides: NAN, which skips the step, if the loss is not finite.
static inline double guarded_norm(const StepResult* result) { return isfinite(result->loss) ? result->grad_norm : NAN; }

static inline void run_update(Run* run, StepLog* s, double factor) {
    fault_point("update");
    s->clip = factor;
    if (!s->updated) return;
    saver_await_snapshot(&run->saver);  // a save in progress must have copied the parameters before they change
    model_update(&run->model, ++run->record.state.updates, s->lr, factor);
}

static inline bool run_diverged(const Run* run, const StepResult* result) {
    return run->record.state.skipped_consecutive >= run->options->diverged_after ||
           (!isfinite(result->loss) && run->options->rewind);
}

static inline bool due_pauses(const Due* due) { return due->validate || due->sample || due->save; }

// Ends the clock of a step, which excludes tracing and what follows. The host runs ahead of a GPU: it waits before a
// pause, so that the step's time includes the update, and after the first step, which is not counted.
static inline void step_end(Run* run, StepLog* s, const Due* due) {
    uint64_t step = run->record.state.step;
    bool first = step == run->first_step + 1, pauses = due_pauses(due);
    if (pauses || first) device_wait(run->model.stream);
    s->ms = now_ms() - s->began_ms - s->trace_ms;
    if (!first) cadence_count_step(&run->cadence, s->ms, s->saving);
    run_schedule_save(run);
    if (s->updated) run_report_offload(run, s->ms);
    if (pauses) heartbeat_send(HEARTBEAT_PAUSE, step);
}

#endif  // LLMTRAIN_STEP_H
