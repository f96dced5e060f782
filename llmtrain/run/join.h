// join.h: how a process becomes a rank of a run, and how it leaves with an exit code: run_join, run_finish, run_exit.
//
// A rank that fails tells the others why before it leaves, so that none waits for it.

#ifndef LLMTRAIN_JOIN_H
#define LLMTRAIN_JOIN_H

#include "../base/container.h"
#include "save.h"

// With --plan, plans for as many ranks as a launcher has started, and prints on one.
static inline bool run_join_plan(Launch* launch, uint64_t* ranks, Error* error) {
    if (!launch_find(launch, error)) return false;
    if (launch->world > 1) *ranks = launch->world;
    return launch->rank == 0 || freopen("/dev/null", "w", stdout) != NULL || fail_file(error, "open", "/dev/null");
}

// Becomes one rank of the run: as the launcher's environment says, or by forking `ranks` ranks here if that is not 0.
// threads: of --threads.
static inline bool run_join(Run* run, Launch* launch, uint64_t ranks, double timeout, uint64_t threads, Error* error) {
    run->facts.started = unix_time();
    run->facts.started_ms = now_ms();
    if (!(ranks ? launch_fork(launch, ranks, error) : launch_find(launch, error)))
        return fail_as(error, ranks && getenv("RANK") ? ERROR_USAGE : error->kind);  // there is a launcher already
    if (launch->rank > 0 && freopen("/dev/null", "w", stdout) == NULL) return fail_file(error, "open", "/dev/null");
    launch->ended = heartbeat_ended;
    size_t here = launch->local_world == launch->world ? launch->world : 0;  // ranks that a supervisor here sees
    if (!heartbeat_open(getenv(HEARTBEAT_VARIABLE), launch->rank, here, error)) return false;
    if (!comm_open(&run->comm, launch, 1e3 * timeout, error)) return false;
    threads_choose(threads, run->comm.local_world, ranks == 0 && threads_are_bound(), stdout);
    if (run->comm.world > 1) printf("%zu ranks (%s)\n", run->comm.world, launch->launcher);
    return true;
}

// Called when the flags are wrong: connects to the other ranks, if there are any, so that run_exit can notify them.
static inline void run_refuse(Run* run, Launch* launch, double timeout) {
    Error ignored;
    if (!launch_find(launch, &ignored) || launch->world == 1) return;
    if (!comm_open(&run->comm, launch, 1e3 * timeout, &ignored)) run->comm.world = 0;
}

// After the last step, or at a signal.
static inline bool run_finish(Run* run, bool signaled, Error* error) {
    const char* out = run->options->out;
    uint64_t step = run->record.state.step;
    if (!run_agree(run, flat_await_all(&run->model.flat, error), error)) return false;
    if (signaled) run_drop_tier_save(run);
    if (!run_save_wait(run, error)) return false;
    // One that stops after a validation, or has resumed from a tier's checkpoint of its last step, may have none yet.
    bool saved = out == NULL || step == 0 || run->saved == step;
    if (!saved && !run_save_last(run, false, error)) return false;
    pruner_await(&run->pruner);
    if (run->options->keep_best && run->validations.kept > 0)
        say(stdout, "lowest validation loss of a checkpoint: %.6f, %s/step_%08llu", run->validations.kept_loss, out,
            (unsigned long long)run->validations.kept);
    if (!signaled) {
        run_finish_tiers(run);
        // What the check of the shards has found after the last batch was read.
        return run_agree(run, log_sync(&run->log, error) && shard_check_good(&run->check, error), error);
    }
    fail_with(error, "stopped by a signal after step %llu; %s", (unsigned long long)step,
              out ? "the same command with --resume continues" : "nothing was saved, since there is no --out");
    error->kind = out ? ERROR_STOPPED : ERROR_OUTSIDE;
    return fail_on_all_ranks(error);
}

#define REAP_MS 2e3  // the time that forked ranks have to end after rank 0 has failed

// Reports how the run ended, notifies the other ranks, and frees everything. Returns the exit code of the program.
static inline int run_exit(Run* run, Launch* launch, bool ok, const Error* error, double timeout) {
    bool stopped = !ok && error->kind == ERROR_STOPPED;
    Error of_others;
    if (!ok) launch_report(launch, "train", error->text);
    if (!ok && run->comm.world > 1 && !error->on_all_ranks) comm_abort(&run->comm, error->text);
    if (ok) heartbeat_send(HEARTBEAT_DONE, run->record.state.step);
    if (run->cadence.began_ms > 0)
        run_tell_with(run, false, "ms", run_save_ms(run).text, ok ? "done" : stopped ? "stopped" : "failed",
                      run->record.state.step, "%s", ok ? "the run is done" : error->text);
    run_free(run);
    int code = ok ? 0 : error->kind == ERROR_USAGE ? 2 : stopped && run->stopped_by != SIGINT ? EXIT_SAVED : 1;
    return launch_reap(launch, "train", code, ok ? 1e3 * timeout : REAP_MS, &of_others);
}

#endif  // LLMTRAIN_JOIN_H
