// validation.h: the validations of a run: --val-every, and what follows from their results: --keep-best, --stop-after.
//
//   run_catch_up(&run, &options, steps, &due, &error)           at the start, and after a rewind
//   run_validate(&run, &options, &val_loss, &due, &error)       one that is due
//
// A validation may take minutes: the step's line and its checkpoint are written before it, a signal ends it, and the
// next start makes up for it. All results are in metrics.jsonl, which is the only memory of them: a run that was killed
// knows the same as one that was not.

#ifndef LLMTRAIN_VALIDATION_H
#define LLMTRAIN_VALIDATION_H

#include "step.h"
#include "validate.h"

typedef struct {
    uint64_t every, windows, overlap, stop_after;
} ValidationOptions;

// Appends the flags of these options, and sets the defaults.
static inline void validation_flags(Flags* flags, ValidationOptions* o) {
    const Flag table[] = {
        FLAG_COUNT("val-every", &o->every, 0, 0, 1e12, FLAG_FREE, "validate every N steps; 0: only after the last"),
        FLAG_COUNT("val-windows", &o->windows, 0, 0, 1e12, FLAG_FREE,
                   "number of validation sequences, of --seq tokens each; 0: all of --val"),
        FLAG_COUNT("val-overlap", &o->overlap, 0, 0, 1e7, FLAG_FREE,
                   "tokens shared by consecutive validation sequences, given as context and not scored again"),
        FLAG_COUNT("stop-after", &o->stop_after, 0, 0, 1e9, FLAG_FREE,
                   "end the run after N consecutive validations without a lower loss; 0: never"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

static inline bool validation_options_check(const ValidationOptions* o, bool keeps_best, bool validates, Error* error) {
    const char* flag = o->every ? "val-every" : o->stop_after ? "stop-after" : "keep-best";
    if ((o->every || o->stop_after || keeps_best) && !validates)
        return fail_with(error, "--%s needs --val, the shards to validate on", flag);
    return o->stop_after == 0 || o->every > 0 ||
           fail_with(error, "--stop-after needs --val-every, the steps between two validations");
}

static inline bool validation_overlap_check(const ValidationOptions* o, uint64_t T, bool conversations, Error* error) {
    if (conversations && o->overlap > 0)
        return fail_with(error, "--val-overlap is for texts: a conversation is validated as a whole; leave it out");
    return o->overlap < T ||
           fail_with(error, "--val-overlap %llu leaves no new tokens in sequences of %llu; make it smaller than --seq",
                     (unsigned long long)o->overlap, (unsigned long long)T);
}

// Whether a validation is due after a step of so many.
static inline bool validation_due(const ValidationOptions* o, uint64_t step, uint64_t steps) {
    return step == steps || step_every(step, o->every);
}

// Counts a result. --keep-best: the checkpoint of that step, if it is in --out, is not pruned until there is a better.
static inline void run_count_validation(Run* run, uint64_t step, double loss, bool saved) {
    Validations* v = &run->validations;
    bool better = loss < v->best;
    if (!isfinite(loss)) return;  // null in the log, which must tell the same after a restart
    v->since = better ? 0 : v->since + 1;
    if (better) v->best = loss;
    if (better) v->step = step;
    if (saved) run_keep_if_best(run, step, loss);
}

// Counts the validations in the log of a run, which ends with the step of its state. *left_out: that of this step is
// due and has no result. All ranks call it.
static inline bool run_read_validations(Run* run, const ValidationOptions* o, uint64_t steps, bool* left_out,
                                        Error* error) {
    Validations none = {.best = INFINITY};
    uint64_t here = run->record.state.step;
    struct {
        Validations validations;
        int64_t left_out;
    } all = {none, 0};
    char* text = NULL;
    size_t bytes = 0;
    run->validations = none;
    bool reads = run->log.file && run->val.shard_count > 0;
    bool good = !reads || file_read(run->log.path, LOG_BYTES_MAX, &text, &bytes, error);
    for (const char *line = text, *end; good && line && (end = strchr(line, '\n')); line = end + 1) {
        LogLine l;
        char path[FILE_PATH_MAX];
        if (!log_line_read(&l, line, (size_t)(end - line))) continue;
        uint64_t step = l.step;
        double loss = l.val_loss;
        all.left_out = isnan(loss) && step == here && validation_due(o, step, steps);  // one that was made is not NaN
        checkpoint_path(path, run->options->out, step, "");
        if (!isnan(loss)) run_count_validation(run, step, loss, directory_exists(path));
    }
    free(text);
    all.validations = run->validations;
    if (!run_agree(run, good, error)) return false;
    if (run->comm.world > 1 && !comm_broadcast(&run->comm, &all, sizeof all / 8, DTYPE_I64, 0, error)) return false;
    run->validations = all.validations;
    *left_out = all.left_out != 0;
    return true;
}

// --stop-after.
static inline void run_stop_without_gain(Run* run, const ValidationOptions* o, Due* due) {
    const Validations* seen = &run->validations;
    if (o->stop_after == 0 || seen->since < o->stop_after) return;
    due->stop = true;
    run_tell(run, true, "no_gain", run->record.state.step, "stopping: no validation since that of step %llu has a "
             "lower loss than its %.6f", (unsigned long long)seen->step, seen->best);
}

// A validation that is due after a step whose line is in the log; *val_loss: its result, NAN if a signal has ended it.
// Afterwards due->stop says whether the run stops, after the signal or as --stop-after says.
static inline bool run_validate(Run* run, const ValidationOptions* o, double* val_loss, Due* due, Error* error) {
    const ModelOptions* m = &run->model.options;
    const Validations* seen = &run->validations;
    uint64_t step = run->record.state.step;
    Validation v = {.data = &run->val, .windows = o->windows, .overlap = o->overlap, .tokens = run->tokens,
                    .targets = run->targets, .B = m->B, .T = m->T, .stop = run->interrupted};
    Error why;
    double began = now_ms();
    fault_point("validate");
    comm_extend_timeout(&run->comm, true);
    if (!run_agree(run, model_validate(&run->model, &v, error), error)) return false;
    *val_loss = v.loss;
    run_tell_with(run, false, "ms", event_ms(now_ms() - began).text, "validation", step,
                  v.ended ? "ended by a signal" : "the loss is %.6f", v.loss);
    if (v.ended) {
        run->stopped_by = v.ended;
        return due->stop = due->signaled = true;
    }
    bool logged = run->log.file == NULL || log_add_val_loss(&run->log, v.loss, &why);
    if (!logged)
        fprintf(stderr, "train: %s. Training continues; the log lacks the validation loss of step %llu, %.6f, which "
                "therefore does not count\n", why.text, (unsigned long long)step, v.loss);
    if (logged) tfevents_val_loss(&run->log.tensorboard, step, v.loss);
    if (!run_agree(run, logged, &why)) return run->comm.world <= 1 || !comm_failed(&run->comm, error);
    run_count_validation(run, step, v.loss, run->saved == step);
    run->facts.val_loss = v.loss;
    run_export(run);
    bool saving = saver_state(&run->saver) != SAVER_IDLE && run->saving == 0 && run->saver.step == step;
    bool saves = run->options->keep_best && seen->step == step && run->saved != step && !saving;
    // A rewind does not go back to it, as a run that was resumed here would not have it.
    if (saves && !run_save_begin(run, 0, run_save_kind(run), error)) return false;  // after the end of the one before
    if ((saves || saving) && isfinite(v.loss)) {
        run->validations.saving = step;
        run->validations.saving_loss = v.loss;
    }
    if (saves && run->saver.snapshot == NULL && !run_save_wait(run, error)) return false;
    if (run->options->keep_best && seen->kept == step) run_prune(run, 0, step);  // the one that was best before
    run_stop_without_gain(run, o, due);
    return true;
}

// When a run begins, resumes or has gone back: learns of its earlier validations, and makes the one of this step if a
// signal or a kill has left it out. due->stop: as after a validation.
static inline bool run_catch_up(Run* run, const ValidationOptions* o, uint64_t steps, Due* due, Error* error) {
    unsigned long long step = run->record.state.step;
    bool left_out;
    double val_loss;
    if (!run_read_validations(run, o, steps, &left_out, error)) return false;
    if (run->began_ms == 0 && run->saved > 0) run_prune(run, 0, run->saved);  // now the best is known
    if (!left_out) {
        if (step >= steps) printf("nothing to do: the run is already at step %llu of %llu\n", step,
                                  (unsigned long long)steps);
        run_stop_without_gain(run, o, due);
        return true;
    }
    heartbeat_send(HEARTBEAT_PAUSE, step);
    printf("the validation of step %llu was left out: making it now\n", step);
    if (!run_validate(run, o, &val_loss, due, error)) return false;
    if (!due->signaled) printf("step %5llu | val %.4f\n", step, val_loss);
    return true;
}

#endif  // LLMTRAIN_VALIDATION_H
