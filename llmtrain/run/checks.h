// checks.h: what watches over the steps of a run: equal ranks, stragglers, the cost of offloading, traces of spikes.
//
//   1. ranks      whether they hold and compute the same: run_compare; stragglers: run_report_straggler
//   2. offload    what it costs: run_report_offload
//   3. tracing    the sequences behind a step that is skipped, clipped hard or has a high loss: run_trace
//
// Checks change neither parameters nor optimizer state nor the step's gradients: a run has the same bits without them.

#ifndef LLMTRAIN_CHECKS_H
#define LLMTRAIN_CHECKS_H

#include "run.h"
#include "stages.h"
#include "trace.h"

// ------------------------------------------------------------------------------------------------
// 1. Ranks

// For tests: a bit of a parameter of the first block changes, as in faulty memory (fault.h: corrupt).
static inline void parameter_corrupt(void* target) {
    Model* model = (Model*)target;
    unsigned char byte;
    Error ignored;
    void* first = flat_kept(&model->flat, &model->flat.buckets[1], model->flat.buckets[1].kept.first);
    flat_await_all(&model->flat, &ignored);
    device_download(&byte, first, 1, model->stream);
    byte ^= 1;
    device_upload(first, &byte, 1, model->stream);
}

// Whether a step can be traced to its sequences: each rank computes its own, with the heads that the model has.
static inline bool model_can_trace(const Model* model) {
    return !model_is_divided(model) && model->context.copies == 1;
}

// Finds out whether all ranks compute with the same code on the same kind of device, and so get the same bits.
static inline bool run_compare_devices(Run* run, Error* error) {
    char own[512], device[320], *texts = NULL;
    double peak;
    size_t* begins = NULL;
    fault_register(parameter_corrupt, &run->model);
    if (!model_can_trace(&run->model) && run->options->guard.spike_trace + run->options->guard.spike_loss > 0)
        printf("note: steps are not traced to their sequences, because %s\n",
               model_is_divided(&run->model) ? "several ranks compute each" : "--kv-copies changes their arrays");
    if (run->comm.world <= 1) return true;
    device_describe(device, sizeof device, &peak, run->model.stream);
    snprintf(own, sizeof own, "%s, compiled by %.150s, algorithms %016llx", device, __VERSION__,
             (unsigned long long)matmul_choices_hash(run->model.stream));
    if (!comm_gather_texts(&run->comm, &texts, &begins, own, error)) return false;
    run->same_devices = true;
    for (size_t r = 1; r < run->comm.world; r++) run->same_devices &= strcmp(texts, texts + begins[r]) == 0;
    free(texts);
    free(begins);
    if (run->options->check_every && !run->same_devices)
        printf("note: ranks have different devices, compilers or --matmul-algorithms files; --check-every compares "
               "only their parameters\n");
    if (run->options->check_every && run->model.flat.stage_world == 1)
        printf("note: no two ranks have the same part of the model, so --check-every has %s to compare\n",
               run->model.flat.tp > 1 ? "only what --tp does not divide" :
               run->model.config.tied && run->model.flat.pp > 1 ? "nothing but the tied embedding" : "nothing");
    else if (run->options->check_every && run->model.flat.dp_world == 1)
        printf("note: each rank has other rows, so --check-every compares only parameters\n");
    return true;
}

// Whether all ranks, which have the same parameters, compute the same values with them: compares the checksum of the
// hidden states, and the sum of the losses, of a fixed batch (B, T). Finds wrong arithmetic on one machine, which
// gradients would spread to the parameters of all. Overwrites the activations; tokens, targets (B, T) are scratch.
static inline bool model_compare_forward(Model* model, int32_t* tokens, int32_t* targets, size_t B, size_t T,
                                         Error* error) {
    static const char* const names[] = {"the hidden states that it computes from the same parameters and tokens",
                                        "the losses that it computes from the same parameters and tokens"};
    FlatVector* flat = &model->flat;
    Dropout dropout = model->dropout;
    Objective objective = model->objective;
    ExactSum losses;
    size_t N = B * T;
    uint64_t* own = model->stats.checksums + 2 * model->stats.rank;
    if (flat->options.world == 1) return true;
    for (size_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)(i * 7919 % model->config.vocab);
        targets[i] = (int32_t)((i + 1) * 7919 % model->config.vocab);
    }
    fill_zero(&flat->sums->losses, sizeof losses, model->stream);
    model->dropout.p = model->dropout.adapters = 0;
    model->objective.weigh = NULL;  // it knows no such batch
    pipeline_losses(model, tokens, targets, B, T);
    model->dropout = dropout;
    model->objective = objective;
    if (model_has_head(model)) {
        vector_checksum(flat->checksums, model->activations->hidden, 0,
                        model->activations->rows * model->config.channels, model->stream);
        device_download(own, flat->checksums, sizeof(uint64_t), model->stream);
        device_download(&losses, &flat->sums->losses, sizeof losses, model->stream);
        own[1] = bits_from_double(exact_value(losses));
    }
    return ranks_same(&model->stats, flat, 2, names, error);
}

// Whether all ranks hold the same parameters, and compute the same values with them.
static inline bool run_compare(Run* run, Error* error) {
    if (!ranks_compare(&run->model.stats, &run->model.flat, error)) return false;
    if (!run->same_devices || run->model.flat.dp_world == 1) return true;
    const ModelOptions* o = &run->model.options;
    fault_point("compare");
    bool same = model_compare_forward(&run->model, run->tokens, run->targets, o->B, o->T, error);
    fault_point("compared");
    return same;
}

// Reports a straggler after --slow-steps consecutive slow steps.
static inline void run_report_straggler(Run* run, const StepResult* result) {
    const RunOptions* o = run->options;
    bool slow = run->comm.world > 1 && result->busy_max > o->slow_factor * result->busy_median;
    if (!slow || result->slowest != run->slow_rank) run->slow_count = 0;
    run->slow_rank = result->slowest;
    run->slow_count += slow;
    if (!slow || run->slow_count != o->slow_steps) return;
    run_tell(run, true, "slow", run->record.state.step, "note: rank %zu is a straggler: its steps took %.0f ms without "
             "waiting, against a median of %.0f ms, in %llu consecutive steps", result->slowest, result->busy_max,
             result->busy_median, (unsigned long long)o->slow_steps);
}

// ------------------------------------------------------------------------------------------------
// 2. Offloading

// Reports once what offloading costs, after a few steps, when the disk has shown its speed.
static inline void run_report_offload(Run* run, double step_ms) {
    enum { REPORTED = 3 };  // the update that is reported: the first ones write unused space
    Model* model = &run->model;
    Offload* stores[2] = {&model->flat.offloaded.store, &model->offloaded.store};
    size_t bytes[2] = {offload_total(stores[0]), offload_blocks_bytes(&model->offloaded) * model->flat.micro_batches};
    if (bytes[0] + bytes[1] == 0 || run->offload_steps == REPORTED) return;
    run->offload_steps++;
    for (int i = 0; i < 2; i++) {
        OffloadCounts c = offload_counts(stores[i]);
        double waited = c.waited_ms - run->offload_waited_ms[i];
        run->offload_waited_ms[i] = c.waited_ms;
        if (bytes[i] == 0 || run->offload_steps < REPORTED) continue;
        run_tell(run, true, "offload", run->record.state.step, "note: each step reads and writes %.3f GB of %s, "
                 "reading at %.2f GB/s and writing at %.2f GB/s, and spends %.0f of its %.0f ms waiting for that",
                 1e-9 * (double)bytes[i], stores[i]->what, 1e-6 * (double)c.read / c.read_ms,
                 1e-6 * (double)c.written / c.written_ms, waited, step_ms);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Tracing

// One sequence of a report, as JSON and as a line with the command that shows its text.
static inline void run_report_sequence(const Run* run, JsonWriter* w, const SequenceTrace* s, double step_norm) {
    const char* shard = run->train.shards[(size_t)s->shard].path;
    char quoted[FILE_PATH_MAX + 64], visible[FILE_PATH_MAX + 128];
    shell_quote(quoted, sizeof quoted, shard);
    text_make_visible(visible, sizeof visible, quoted);
    const char* show = strcmp(visible, quoted) == 0 ? "build/tokenize --show" : "in";  // a command would find no file
    json_write_begin(w, '{');
    json_member_string(w, "shard", shard);
    json_member_number(w, "at", s->start);
    json_member_u64(w, "tokens", run->loader.T + 1);
    json_member_number(w, "sample", s->sample);
    json_member_number(w, "rank", s->rank);
    json_member_number(w, "loss", s->loss);
    json_member_number(w, "grad_norm", s->norm);
    json_write_end(w, '}');
    say(stdout, "  sample %.0f: loss %.4g, gradient %.3g of %.3g; %s %s --at %.0f --tokens %zu",
        s->sample, s->loss, s->norm, step_norm, show, visible, s->start, run->loader.T + 1);
}

// Rank 0 reports the worst sequences by one measure, and then those by the other that are not among them.
static inline void run_report_trace(Run* run, const StepTrace* trace, TraceMeasure by, const char* why,
                                    const StepResult* result) {
    const SequenceTrace *worst = trace->worst[by], *others = trace->worst[by == TRACE_LOSS ? TRACE_NORM : TRACE_LOSS];
    JsonWriter w;
    Error ignored;
    char detail[sizeof(Error)];
    snprintf(detail, sizeof detail, "%s%s%s", why,
             trace->not_finite[0] ? "; the first output that is not finite: " : "", trace->not_finite);
    printf("%s\n", detail);
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (size_t i = 0; i < trace->count; i++) run_report_sequence(run, &w, &worst[i], result->grad_norm);
    for (size_t i = 0; i < trace->count; i++) {
        bool there = false;
        for (size_t k = 0; k < trace->count; k++) there |= worst[k].sample == others[i].sample;
        if (!there) run_report_sequence(run, &w, &others[i], result->grad_norm);
    }
    json_write_end(&w, ']');
    fflush(stdout);
    if (json_write_done(&w, &ignored))
        run_write_event(run, "bad_batch", run->record.state.step + 1, detail, "sequences", w.text);
    json_writer_free(&w);
}

// After the guard's decision on a step, and before its update: if it is to be traced, finds its worst sequences and
// reports them; fills in what the log says of them. False, on all ranks, if one is lost or its data has changed.
static inline bool run_trace(Run* run, StepLog* s, double factor, Error* error) {
    RunState* state = &run->record.state;
    Model* model = &run->model;
    const Loader* loader = &run->loader;
    const StepResult* result = &s->result;
    StepTrace trace;
    Error why;
    char sentence[200];
    double began = now_ms();
    Spike spike = guard_traces(state, &run->options->guard, result->loss, result->grad_norm, s->updated, factor);
    bool whole = model_can_trace(model);
    s->traced = spike != SPIKE_NONE && whole && result->flags.stop == 0;  // a signal leaves time for the save alone
    s->trace_ms = 0;
    if (!s->traced) return true;
    unsigned long long step = state->step + 1;
    uint64_t first = state->samples - model->flat.micro_batches * loader->B * loader->world;
    heartbeat_send(HEARTBEAT_PAUSE, state->step);
    bool ok = trace_begin(&trace, model, &why), all = run_agree(run, ok, &why);
    if (!all) {  // no memory for it, which is no reason to end the run
        if (ok) trace_end(&trace);
        s->traced = false;
        printf("note: step %llu is not traced to its sequences: %s\n", step, why.text);
        return run->comm.world == 1 || !comm_failed(&run->comm, error);
    }
    comm_extend_timeout(&run->comm, true);
    trace.stop = run->interrupted;
    ok = trace_sequences(&trace, loader, first, run->tokens, run->targets, error) &&
         offload_check(&model->offloaded.store, error);
    trace_end(&trace);
    if (!run_agree(run, ok, error)) return false;
    if (trace.ended) {  // the step counts, and the run ends
        s->result.flags.stop = run->stopped_by = trace.ended;
        s->traced = false;
        s->trace_ms = now_ms() - began;
        return true;
    }
    comm_extend_timeout(&run->comm, true);
    if (!trace_gather(&trace, error)) return false;
    comm_extend_timeout(&run->comm, false);
    snprintf(sentence, sizeof sentence, "step %llu: %s, loss %.4g (mean %.4g), grad norm %.4g (mean %.4g)", step,
             SPIKE_NAMES[spike], result->loss, state->losses.mean, result->grad_norm, state->norms.mean);
    TraceMeasure first_measure = spike == SPIKE_LOSS ? TRACE_LOSS : TRACE_NORM;
    if (run->comm.rank == 0) run_report_trace(run, &trace, first_measure, sentence, result);
    s->worst_loss = trace.worst[TRACE_LOSS][0];
    s->worst_norm = trace.worst[TRACE_NORM][0];
    clock_start(&model->clock, &model->flat);
    s->trace_ms = now_ms() - began;
    return true;
}

#endif  // LLMTRAIN_CHECKS_H
