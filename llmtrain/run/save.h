// save.h: the checkpoints of a run: where they are, which one it resumes from, when it saves, which ones stay.
//
//   1. tiers    --out and the directories of --ckpt-tier: run_open_tiers
//   2. loading  the newest good checkpoint of all of them: run_load
//   3. opening  --out, the weights and the state of the first step: run_open_out
//   4. saving   run_save_due, run_save, run_save_wait, run_save_last
//
// Under its final name a checkpoint is complete, in every directory and at all times, so a run may be killed at any
// point: resumed, it gives the same bits as one that was not. All ranks decide alike when to save and what to load:
// rank 0 looks into the directories, and the ranks exchange once per step how far a save is.

#ifndef LLMTRAIN_SAVE_H
#define LLMTRAIN_SAVE_H

#include "facts.h"

// ------------------------------------------------------------------------------------------------
// 1. Tiers

// A run has a directory in each tier, DIR/ID, with a random id, so that it never finds another run's checkpoints.
// OUT/tiers lists them: each start keeps those that the start before it has listed, if it sees them, and makes the
// others. What is not seen, on another machine or left out, is no longer the run's once the start begins to train: the
// run goes on without it, and would not know its own checkpoints there from those of a branch that it has left, or from
// before a rewind. A copy of --out is another run: the list says where it belongs.

// The file OUT/tiers, and its first line: which directory it belongs to.
static inline bool run_tier_list(char path[FILE_PATH_MAX], char belongs[FILE_PATH_MAX + 32], const char* out,
                                 Error* error) {
    char here[FILE_PATH_MAX];
    struct stat status;
    snprintf(path, FILE_PATH_MAX, "%.4000s/tiers", out);
    if (stat(out, &status) != 0 || realpath(out, here) == NULL) return fail_file(error, "look at", out);
    snprintf(belongs, FILE_PATH_MAX + 32, "%016llx %s\n", (unsigned long long)status.st_ino, here);
    return true;
}

// Rank 0: takes the ids of the tiers from the list, and random ones for others. A new run has no list.
static inline bool run_find_tiers(const Run* run, uint64_t ids[TEXT_LIST_MAX], Error* error) {
    const RunOptions* o = run->options;
    char path[FILE_PATH_MAX], belongs[FILE_PATH_MAX + 32], line[FILE_PATH_MAX + 32], name[FILE_PATH_MAX];
    unsigned long long id;
    unsigned found = 0;  // a bit for each
    if (!run_tier_list(path, belongs, o->out, error)) return false;
    if (!o->resume && unlink(path) != 0 && errno != ENOENT) return fail_file(error, "remove", path);
    FILE* random = fopen("/dev/urandom", "rb");
    bool good = random && fread(ids, sizeof *ids, TEXT_LIST_MAX, random) == TEXT_LIST_MAX;
    if (!good) fail_file(error, "read", "/dev/urandom");
    if (random) fclose(random);
    FILE* list = fopen(path, "r");
    if (good && list == NULL && errno != ENOENT) good = fail_file(error, "open", path);
    bool ours = list && fgets(line, sizeof line, list) && strcmp(line, belongs) == 0;
    while (list && fscanf(list, "%llx %4000[^\n]", &id, name) == 2) {
        size_t i = 1;
        snprintf(line, sizeof line, "%s/%016llx", name, id);
        bool there = directory_exists(line);
        while (i < run->tier_count && ((found >> i & 1) || strcmp(name, run->tiers[i].directory) != 0)) i++;
        if (ours && there && i < run->tier_count) {
            found |= 1u << i;
            ids[i - 1] = id;
        } else {
            say(stdout, "note: the run's checkpoints in %s are not used: %s", line,
                !ours ? "--out is a copy, or was moved" : there ? "--ckpt-tier does not name them" : "it is gone");
        }
    }
    if (list && ferror(list)) good = fail_file(error, "read", path);
    if (list) fclose(list);
    return good;
}

// Rank 0, when all that can be refused has been checked: the run continues with these tiers, and without others.
static inline bool run_list_tiers(const Run* run, Error* error) {
    char path[FILE_PATH_MAX], line[FILE_PATH_MAX + 32];
    FileWriter w;
    if (!run_tier_list(path, line, run->options->out, error)) return false;
    file_clean(path);
    if (run->tier_count == 1) return unlink(path) == 0 || errno == ENOENT || fail_file(error, "remove", path);
    bool good = file_begin(&w, path, error);
    for (size_t i = 0; good && i < run->tier_count; i++) {
        const char *directory = run->tiers[i].directory, *slash = strrchr(directory, '/');
        if (i > 0) snprintf(line, sizeof line, "%s %.*s\n", slash + 1, (int)(slash - directory), directory);
        good = file_append(&w, line, strlen(line), error);
    }
    return good && file_end(&w, error);
}

// All ranks must see the directories that rank 0 makes: each writes a part of a checkpoint, and reads the others'.
static inline bool run_open_tiers(Run* run, Error* error) {
    const TextList* texts = &run->options->ckpt_tiers;
    bool leads = run->comm.rank == 0, good = true;
    uint64_t ids[TEXT_LIST_MAX] = {0};
    snprintf(run->tiers[0].directory, FILE_PATH_MAX, "%.4000s", run->options->out);
    run->tier_count = 1 + texts->count;
    for (size_t i = 1; i < run->tier_count; i++) good = good && tier_parse(&run->tiers[i], texts->texts[i - 1], error);
    if (leads) good = good && run_find_tiers(run, ids, error);
    if (!run_agree(run, good, error)) return false;
    if (texts->count == 0) return true;
    if (run->comm.world > 1 && !comm_broadcast(&run->comm, ids, TEXT_LIST_MAX, DTYPE_I64, 0, error)) return false;
    for (size_t i = 1; i < run->tier_count; i++) {
        Tier* tier = &run->tiers[i];
        size_t length = strlen(tier->directory);
        snprintf(tier->directory + length, 32, "/%016llx", (unsigned long long)ids[i - 1]);
        tier->made = leads && good && !directory_exists(tier->directory);
        if (leads) good = good && directory_make(tier->directory, error);
        say(stdout, "also saving every %llu steps in %s", (unsigned long long)tier->every, tier->directory);
    }
    if (!run_agree(run, good, error)) return false;
    for (size_t i = 1; i < run->tier_count; i++)
        if (!directory_exists(run->tiers[i].directory))
            good = fail_with(error, "rank %zu does not see %.600s, which rank 0 has made; give --ckpt-tier a directory "
                             "that all machines share", run->comm.rank, run->tiers[i].directory);
    return run_agree(run, good, error);
}

// Sets aside what is later than the state: after a rewind in all tiers, so that no resume uses it. When a run begins,
// only in those of --ckpt-tier, where it is damaged or of another branch. Cuts the log back to the state.
static inline bool run_set_aside(Run* run, bool rewinds, Error* error) {
    uint64_t step = run->record.state.step;
    bool good = true;
    for (size_t i = 0; i < run->tier_count; i++) {
        run->tiers[i].saved = step;
        if (run->comm.rank > 0) continue;
        checkpoint_clean(run->tiers[i].directory);
        if (i > 0 || rewinds) good = good && checkpoint_set_aside(run->tiers[i].directory, step + 1, true, error);
    }
    return good && (run->log.file == NULL || log_cut_back(&run->log, step, error));
}

// --keep-best: the checkpoint of a step is in --out; it is kept if no other there has a lower validation loss.
static inline void run_keep_if_best(Run* run, uint64_t step, double loss) {
    Validations* v = &run->validations;
    if (v->kept > 0 && !(loss < v->kept_loss)) return;
    v->kept = step;
    v->kept_loss = loss;
}

// Removes the checkpoints of a tier that are superfluous now that the newest one has been saved or loaded.
// (A newest one that was only found may be damaged, and the older ones may be all that is left.)
static inline void run_prune(Run* run, size_t tier, uint64_t newest) {
    const RunOptions* o = run->options;
    const Tier* t = &run->tiers[tier];
    const KeepRule rule = {.newest = tier ? t->keep : o->ckpt_keep, .forever = tier ? 0 : o->ckpt_keep_every,
                           .best = tier == 0 && o->keep_best ? run->validations.kept : 0,
                           .rewinds = tier == 0 && o->rewind > 0};
    if (run->comm.rank == 0) pruner_begin(&run->pruner, t->directory, newest, &rule);
}

// When the last step is in --out: a tier in memory is emptied, and in others no more stay than should.
static inline void run_finish_tiers(Run* run) {
    const char memory[] = SYSTEM_MEMORY_FOLDER "/";
    for (size_t i = 1; i < run->tier_count && run->comm.rank == 0; i++) {
        const char* directory = run->tiers[i].directory;
        uint64_t newest;
        if (strncmp(directory, memory, strlen(memory)) == 0) checkpoint_discard(directory);
        else if (checkpoint_before(&newest, directory, UINT64_MAX)) run_prune(run, i, newest);
    }
    pruner_await(&run->pruner);
}

// ------------------------------------------------------------------------------------------------
// 2. Loading

// Finds the next checkpoint in the order in which they are tried, as rank 0 sees it: that with the highest step below
// *step, or of *step in a tier after *tier; of equal ones that of the first tier. asked: see run_load.
static inline bool run_checkpoint_before(Run* run, uint64_t* step, size_t* tier, bool asked, bool* found,
                                         Error* error) {
    int64_t next[3] = {0, 0, 0};  // found, step, tier
    bool good = true;
    for (size_t i = 0; run->comm.rank == 0 && good && i < (asked ? 1 : run->tier_count); i++) {
        const char* directory = run->tiers[i].directory;
        uint64_t at = *step + (i > *tier), skipped;
        SaveKind kind;
        bool there;
        do good = checkpoint_find_before(&at, &there, directory, at, error);
        while (good && there && asked && checkpoint_describe(&kind, &skipped, directory, at) && kind != SAVE_REQUESTED);
        if (!good || !there || (next[0] && (int64_t)at <= next[1])) continue;
        next[0] = 1;
        next[1] = (int64_t)at;
        next[2] = (int64_t)i;
    }
    if (!run_agree(run, good, error)) return false;
    if (run->comm.world > 1 && !comm_broadcast(&run->comm, next, 3, DTYPE_I64, 0, error)) return false;
    *found = next[0] != 0;
    *step = (uint64_t)next[1];
    *tier = (size_t)next[2];
    return true;
}

// Loads the newest checkpoint of a step below `before` that is good on all ranks; *found says whether there was any,
// good or not. asked: considers only checkpoints that --ckpt-every asked for, and none of --ckpt-tier.
static inline bool run_load(Run* run, uint64_t before, bool asked, bool* found, Error* error) {
    bool more;
    uint64_t step = before;
    size_t tier = TEXT_LIST_MAX;
    *found = false;
    for (;;) {
        double began = now_ms();
        char path[FILE_PATH_MAX];
        Json manifest;
        RunRecord saved;
        Error fault;
        if (!run_checkpoint_before(run, &step, &tier, asked, &more, error)) return false;
        if (!more) break;
        *found = true;
        checkpoint_path(path, run->tiers[tier].directory, step, "");
        bool good = record_open(&manifest, &saved, path, error);
        bool fits = !good || resume_agrees(&saved, &run->record, &manifest, path, error) ||
                    fail_as(error, ERROR_USAGE);
        if (good && fits) good = checkpoint_load(&run->model.flat, &manifest, path, false, error);
        if (!good && error->kind == ERROR_PROCESS) fits = false;  // no reason to use an older one
        bool all = run_agree(run, fits, error), usable = all && run_agree(run, good, error);
        if (usable) {
            say(stdout, "resumed from %s in %.0f ms", path, now_ms() - began);
            if (!asked) resume_compare_flags(&run->record, &manifest);
            resume_compare_parts("leaves", saved.leaves, run->record.leaves);
            resume_compare_parts("row-leaves", saved.row_leaves, run->record.row_leaves);
            resume_compare_parts("kv-copies", saved.kv_copies, run->record.kv_copies);
            if (saved.total_batch) resume_compare_parts("total-batch", saved.total_batch, run->record.total_batch);
            char precision[16];
            run->record.state = saved.state;
            run->record.base = saved.base;
            if (!resume_same_precision(precision, &manifest))  // a loss scale belongs to FP16
                run->record.state.loss_scale = FLOATX_DTYPE == DTYPE_F16 ? run->options->loss_scale : 1;
            run->saved = tier ? 0 : step;
        }
        json_free(&manifest);
        if (!all || usable) return usable;
        if (run->comm.world > 1 && comm_failed(&run->comm, &fault)) return false;
        if (run->comm.rank == 0) fprintf(stderr, "train: %s; trying the checkpoint before it\n", error->text);
        run_tell(run, false, "damaged", step, "%s", error->text);
    }
    if (!*found) return true;
    return fail_with(error, "no checkpoint in %s can be used, for the reasons above; start again with another --out",
                     run->options->out) || fail_on_all_ranks(error);
}

// ------------------------------------------------------------------------------------------------
// 3. Opening

// Opens the log and the tiers, and sets weights and state to where the run begins.
static inline bool run_open_begin(Run* run, bool writes, bool* found, Error* error) {
    const RunOptions* o = run->options;
    // A new run reads its weights before anything is written.
    bool ok = (!writes || directory_make(o->out, error)) && (o->resume || run_start(run, error));
    if (!run_agree(run, ok, error)) return false;
    if (!run_agree(run, !writes || log_open(&run->log, o->out, error), error)) return false;
    run->log.tensorboard.run = o->tensorboard && writes ? o->out : NULL;
    run->log.tensorboard.every = o->tensorboard_every;
    if (o->out && !run_open_tiers(run, error)) return false;
    if (o->resume && !run_load(run, UINT64_MAX, false, found, error)) return false;
    if (o->resume && !*found) say(stdout, "no checkpoint in %s yet: starting from the beginning", o->out);
    if (!run_agree(run, *found || !o->resume || run_start(run, error), error)) return false;
    ok = run_set_aside(run, false, error) && (*found || run_keep_tokenizer(run, error)) &&
         (!writes || run_list_tiers(run, error));
    source_close(&run->source);  // a run that resumes has used only its configuration
    return run_agree(run, ok, error);
}

// Opens --out, and sets weights, state and log to where the run begins; *found says whether that is a checkpoint. A
// start that is refused leaves no directory or file that was not there, but for the parents of new directories.
static inline bool run_open_out(Run* run, bool* found, Error* error) {
    const char* out = run->options->out;
    struct stat status;
    bool writes = run->comm.rank == 0 && out, makes = writes && !directory_exists(out);
    *found = false;
    if (run_open_begin(run, writes, found, error)) return run_begin_telemetry(run), true;
    if (!writes) return false;
    for (size_t i = 1; i < run->tier_count; i++) if (run->tiers[i].made) rmdir(run->tiers[i].directory);
    bool empty = run->log.file && run->log.made && fstat(fileno(run->log.file), &status) == 0 && status.st_size == 0;
    if (empty) remove(run->log.path);
    if (makes) rmdir(out);
    return false;
}

// ------------------------------------------------------------------------------------------------
// 4. Saving
//
// A save begins (run_save_begin), and steps continue during it. When all ranks have written their parts, it is
// completed (run_save_complete); run_save_wait waits for that first.

// The tiers in which a step is to be saved, a bit for each. stop: the run ends; asked: --ckpt-every in minutes. When
// saves are synchronous, or one has to wait for another anyway, or a tier has waited since before the last save in
// --out, these are all that are due; otherwise one at a time: --out, and then, when no save is in progress, the tier
// whose last save is oldest.
static inline unsigned run_save_due(const Run* run, uint64_t step, bool stop, bool asked) {
    bool out = run->options->out && (stop || asked || cadence_due(&run->cadence, step));
    bool busy = saver_state(&run->saver) != SAVER_IDLE, overdue = false;
    unsigned due = 0;
    size_t oldest = 0;
    for (size_t i = 1; i < run->tier_count && !stop; i++) {
        const Tier* tier = &run->tiers[i];
        if (step / tier->every == tier->saved / tier->every) continue;
        due |= 1u << i;
        overdue |= step / tier->every * tier->every <= run->tiers[0].saved;
        if (oldest == 0 || tier->saved < run->tiers[oldest].saved) oldest = i;
    }
    if (run->saver.snapshot == NULL || (out && (busy || overdue))) return due | out;
    return out || busy || oldest == 0 ? out : 1u << oldest;
}

// Completes the save in progress; *good: the checkpoint is there; if not, *error says why. False if a rank is lost.
static inline bool run_save_complete(Run* run, bool* good, Error* error) {
    Cadence* c = &run->cadence;
    uint64_t step = run->saver.step;
    double began = run->saver.began_ms;
    fault_point("checksums");
    heartbeat_send(HEARTBEAT_PAUSE, run->record.state.step);
    comm_extend_timeout(&run->comm, true);
    *good = saver_end(&run->saver, error);
    comm_extend_timeout(&run->comm, false);
    run->facts.save_ms += run->saver.stalled_ms;
    if (!*good) return run->comm.world <= 1 || !comm_failed(&run->comm, error);
    if (run->saving == 0) {
        run->saved = step;
        if (run->validations.saving == step) run_keep_if_best(run, step, run->validations.saving_loss);
        c->took_ms = now_ms() - began;
        run->facts.saved_time = unix_time();
        run_tell_with(run, true, "ms", run_save_ms(run).text, "saved", step,
                      "saved %s/step_%08llu in %.0f ms, of which training was stalled for %.0f ms", run->options->out,
                      (unsigned long long)step, c->took_ms, run->saver.stalled_ms);
        run_export(run);
    }
    fault_point("clean");
    run_prune(run, run->saving, step);
    return true;
}

// The same, but reports a failed save: training continues without that checkpoint. last: it ends, and run_finish tries
// once more.
static inline bool run_save_complete_or_report(Run* run, bool last, Error* error) {
    bool good;
    uint64_t step = run->saver.step;
    if (!run_save_complete(run, &good, error)) return false;
    if (!good && run->comm.rank == 0)
        fprintf(stderr, "train: step %llu was not saved: %s. %s; earlier checkpoints are unchanged\n",
                (unsigned long long)step, error->text, last ? "The save is tried once more" : "Training continues");
    if (!good) run_tell_with(run, false, "ms", run_save_ms(run).text, "not_saved", step, "%s", error->text);
    return true;
}

// After a checkpoint: with --ckpt-every auto, chooses when the next is due.
static inline void run_schedule_save(Run* run) {
    Cadence* c = &run->cadence;
    if (!cadence_choose(c)) return;
    printf("next checkpoint in %.1f min: a save costs %.0f ms, mean time between failures %g h; expected cost %.2f%% "
           "of the time, measured so far %.2f%%\n", c->every_ms / 6e4, c->cost_ms, c->mtbf_ms / 3.6e6,
           100 * c->cost_ms / c->every_ms, 100 * (c->costs_ms + c->cost_ms) / (now_ms() - c->began_ms));
}

// Between two steps: waits for the save in progress, if there is one.
static inline bool run_save_wait(Run* run, Error* error) {
    if (saver_state(&run->saver) == SAVER_IDLE) return true;
    double began = now_ms();
    saver_unthrottle(&run->saver, true);
    bool ok = run_save_complete_or_report(run, false, error);
    saver_unthrottle(&run->saver, false);
    run->cadence.cost_ms += now_ms() - began;
    run_schedule_save(run);
    return ok;
}

// Completes the previous save, and begins one in a tier, after flushing the log, so that it does not end before the
// checkpoint; but a log that cannot be flushed does not keep the run from saving.
static inline bool run_save_begin(Run* run, size_t tier, SaveKind kind, Error* error) {
    if (!run_save_wait(run, error)) return false;
    Error why;
    JsonWriter manifest;
    uint64_t step = run->record.state.step;
    double began = now_ms();
    if (!log_sync(&run->log, &why))
        run_tell(run, false, "not_logged", step, "%s; a resume from this checkpoint will lack those lines", why.text);
    fault_point("save");
    cadence_count_save(&run->cadence, began, tier == 0 && kind == SAVE_REQUESTED);
    run->saving = tier;
    run->tiers[tier].saved = step;
    run->record.kind = kind;
    record_write(&manifest, &run->record, &run->model.flat);
    saver_begin(&run->saver, step, run->tiers[tier].directory, &manifest);
    run->cadence.cost_ms = now_ms() - began;
    run->facts.save_ms += run->cadence.cost_ms - run->saver.stalled_ms;  // the rest when it is complete
    return true;
}

// Why a checkpoint is saved that --ckpt-every in minutes has not asked for.
static inline SaveKind run_save_kind(const Run* run) {
    return cadence_due(&run->cadence, run->record.state.step) ? SAVE_REQUESTED : SAVE_END;
}

// Saves in --out before the run ends, and waits until the checkpoint is there. again: if that fails, it is reported,
// and run_finish tries again.
static inline bool run_save_last(Run* run, bool again, Error* error) {
    bool good = false;
    if (!run_save_wait(run, error)) return false;  // when it returns, the bandwidth limit is set again
    saver_unthrottle(&run->saver, true);
    if (!run_save_begin(run, 0, run_save_kind(run), error)) return false;
    return again ? run_save_complete_or_report(run, true, error) : run_save_complete(run, &good, error) && good;
}

// Before the run ends with an error that has left the weights whole, and that all ranks know: saves the run, as it was
// in `state`, if it has not been saved since. Returns false.
static inline bool run_save_whole(Run* run, const RunState* state) {
    Error why;
    if (run->options->out == NULL || state->step == 0) return false;
    if (run->comm.world > 1 && comm_failed(&run->comm, &why)) return false;
    heartbeat_send(HEARTBEAT_PAUSE, state->step);
    if (!run_save_wait(run, &why) || run->saved == state->step) return false;
    run->record.state = *state;
    bool good = run_agree(run, flat_await_all(&run->model.flat, &why), &why) && run_save_last(run, false, &why);
    if (!good && run->comm.rank == 0) fprintf(stderr, "train: step %llu was not saved: %s\n",
                                              (unsigned long long)state->step, why.text);
    return false;
}

// A signal leaves no time to wait for a tier's save in progress.
static inline void run_drop_tier_save(Run* run) {
    if (run->saving == 0 || saver_state(&run->saver) == SAVER_IDLE) return;
    run_tell(run, true, "not_saved", run->saver.step, "the save of step %llu in %s is dropped: a signal ends the run",
             (unsigned long long)run->saver.step, run->saver.out);
    saver_cancel(&run->saver);
}

// Saves in the tiers that are due, while training continues; without a snapshot, or before the run ends, waits until
// the checkpoint is there. signaled: there may be no time to wait for a tier's save in progress, which is dropped.
static inline bool run_save(Run* run, unsigned due, bool last, bool signaled, Error* error) {
    if (signaled) run_drop_tier_save(run);
    if (last) return run_save_last(run, true, error);
    for (size_t i = 0; i < run->tier_count; i++) {
        if ((due >> i & 1) == 0) continue;
        if (!run_save_begin(run, i, SAVE_REQUESTED, error)) return false;
        if (run->saver.snapshot == NULL && !run_save_wait(run, error)) return false;
    }
    return true;
}

#endif  // LLMTRAIN_SAVE_H
