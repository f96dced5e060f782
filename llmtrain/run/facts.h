// facts.h: what a run records of itself for programs that show it, besides metrics and events.
//
//   1. Prometheus   the numbers of a logged step as a text file that Prometheus' node_exporter reads: run_export
//   2. start        a line of run.jsonl: run_record_start
//   3. step         what a step adds to its line in the log: run_keep_ranks, run_log_step
//   4. samples      a line of samples.jsonl: run_sample
//
// Programs that show a run read these files. A disk that refuses them is reported once, and training continues.

#ifndef LLMTRAIN_FACTS_H
#define LLMTRAIN_FACTS_H

#include "flops.h"
#include "run.h"
#include "../text/generate.h"

// ------------------------------------------------------------------------------------------------
// 1. Prometheus

// Appends a metric with its help. kind: gauge or counter. run: the value of its label, escaped.
static inline void prometheus_put(JsonWriter* w, const char* run, const char* kind, const char* name, const char* help,
                                  double value) {
    char number[40], text[640];
    if (isfinite(value)) real_text(number, sizeof number, value, 15);
    else snprintf(number, sizeof number, "%s", isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf");
    for (char* p = number; *p; p++) if (*p == ',') *p = '.';  // a locale's decimal comma
    int bytes = snprintf(text, sizeof text, "# HELP llmtrain_%s %s\n# TYPE llmtrain_%s %s\nllmtrain_%s{run=\"%s\"} "
                         "%s\n", name, help, name, kind, name, run, number);
    json_put(w, text, (size_t)bytes);
}

// The name of a run as the value of a label.
static inline void prometheus_label(char* label, size_t size, const char* out) {
    static const char special[] = "\\\"\n", letters[] = "\\\"n";
    char name[256];
    size_t used = 0, n;
    run_name(name, sizeof name, out);
    label[0] = 0;
    for (const char* p = name; *p && used + 5 < size; p += max_size(n, 1)) {
        const char* found = strchr(special, *p);
        n = utf8_bytes(p);
        if (found) used += (size_t)snprintf(label + used, size - used, "\\%c", letters[found - special]);
        else used += (size_t)snprintf(label + used, size - used, "%.*s", n ? (int)n : 1, n ? p : "?");
    }
}

static inline void prometheus_text(JsonWriter* w, const Run* run) {
    const StepLog* s = &run->facts.last;
    const RunState* state = &run->record.state;
    char label[256];
    prometheus_label(label, sizeof label, run->options->out);
#define GAUGE(name, help, value) prometheus_put(w, label, "gauge", name, help, (double)(value))
#define COUNTER(name, help, value) prometheus_put(w, label, "counter", name, help, (double)(value))
    GAUGE("step", "Optimizer steps done.", s->step);
    GAUGE("steps", "Optimizer steps to do.", s->steps);
    GAUGE("loss", "Training loss of the step, nats per token.", s->result.loss);
    if (!isnan(run->facts.val_loss)) GAUGE("val_loss", "Last validation loss, nats per token.", run->facts.val_loss);
    if (s->entropy_floor > 0) GAUGE("entropy_floor", "Loss of the true source of the data.", s->entropy_floor);
    GAUGE("grad_norm", "Norm of the gradient, before clipping.", s->result.grad_norm);
    GAUGE("clip_factor", "Factor of the gradient by clipping, 0 if the step was skipped.", s->clip);
    GAUGE("lr", "Learning rate.", s->lr);
    COUNTER("tokens_total", "Tokens consumed.", s->tokens);
    if (!isnan(s->epoch)) GAUGE("epoch", "How many times all samples were read.", s->epoch);
    COUNTER("skipped_total", "Steps skipped.", s->skipped);
    COUNTER("rewinds_total", "How often the run went back to an earlier checkpoint.", state->rewinds);
    COUNTER("restarts_total", "Starts of the program after the first.", run->facts.restarts);
    GAUGE("step_seconds", "Duration of the step.", s->ms / 1e3);
    GAUGE("load_seconds", "Waiting for data, per step.", s->load_ms / 1e3);
    GAUGE("tokens_per_second", "Tokens per second of all ranks.", s->tokens_per_second);
    if (!isnan(s->mfu)) GAUGE("mfu", "Model FLOPs utilization.", s->mfu);
    GAUGE("memory_bytes", "Memory of the GPU, or peak resident size of rank 0 on a CPU.", s->memory);
    GAUGE("ranks", "Ranks that train.", s->ranks);
    GAUGE("wait_share", "Fraction of the step in which rank 0 waited for other ranks.", s->result.wait_share);
    GAUGE("slowest_rank", "The rank that took longest.", s->result.slowest);
    GAUGE("slowest_factor", "Its time, divided by the median.", s->result.busy_max / s->result.busy_median);
    GAUGE("seconds_left", "Estimate of the time to the last step.", s->minutes_left * 60);
    GAUGE("last_step_seconds", "Unix time of the last logged step.", s->time);
    if (run->facts.saved_time > 0)
        GAUGE("last_save_seconds", "Unix time of the last checkpoint in --out.", run->facts.saved_time);
#undef GAUGE
#undef COUNTER
}

// Writes the file of --prometheus: under another name first, so that no reader sees half of it; it is not flushed to
// the disk, since a step would wait for that.
static inline void run_export(Run* run) {
    const char* path = run->options->prometheus;
    char temporary[FILE_PATH_MAX + 8];
    Error why;
    JsonWriter w = {0};
    if (path == NULL || run->log.file == NULL || run->facts.last.step == 0) return;
    snprintf(temporary, sizeof temporary, "%.4000s.tmp", path);
    prometheus_text(&w, run);
    bool good = json_write_done(&w, &why);
    int file = good ? open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    if (good && file < 0) good = fail_file(&why, "open", temporary);
    errno = ENOSPC;  // the reason if less is written without an error
    if (good && write(file, w.text, w.bytes) != (ssize_t)w.bytes) good = fail_file(&why, "write", temporary);
    if (file >= 0 && close(file) != 0 && good) good = fail_file(&why, "close", temporary);
    if (good && rename(temporary, path) != 0) good = fail_file(&why, "rename", temporary);
    if (file >= 0 && !good) unlink(temporary);
    json_writer_free(&w);
    run_wrote(&run->facts.export_refused, good, &why);
}

// ------------------------------------------------------------------------------------------------
// 2. Start

// A command as a shell reads it.
static inline void command_write(JsonWriter* w, char** arguments) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=,+@%";
    JsonWriter line = {0};
    for (char** a = arguments; a && *a; a++) {
        const char* text = *a;
        bool quoted = *text == 0 || text[strspn(text, plain)] != 0;
        if (a > arguments) json_put(&line, " ", 1);
        if (quoted) json_put(&line, "'", 1);
        for (; *text; text++) json_put(&line, *text == '\'' ? "'\\''" : text, *text == '\'' ? 4 : 1);
        if (quoted) json_put(&line, "'", 1);
    }
    w->failed |= line.failed;
    json_member_string(w, "command", line.text ? line.text : "");
    json_writer_free(&line);
}

// The names of the machines, each once, in the order of the first rank there. texts: rank r's is at begins[r].
static inline void hosts_write(JsonWriter* w, const char* texts, const size_t* begins, size_t world) {
    json_member_begin(w, "hosts", '[');
    for (size_t r = 0; r < world; r++) {
        bool seen = false;
        for (size_t q = 0; q < r && !seen; q++) seen = strcmp(texts + begins[q], texts + begins[r]) == 0;
        if (!seen) json_write_string(w, texts + begins[r]);
    }
    json_write_end(w, ']');
}

// How many lines run.jsonl has: the starts before this one.
static inline uint64_t run_count_starts(const Run* run) {
    char path[FILE_PATH_MAX], *text = NULL;
    uint64_t lines = 0;
    size_t bytes = 0;
    Error ignored;
    snprintf(path, sizeof path, "%.4000s/run.jsonl", run->options->out);
    if (access(path, F_OK) != 0 || !file_read(path, JSON_BYTES_MAX, &text, &bytes, &ignored)) return 0;
    for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
    free(text);
    return lines;
}

// Writes the line of this start to run.jsonl.
static inline void run_write_start(Run* run, const char* texts, const size_t* begins) {
    const RunRecord* r = &run->record;
    const Model* model = &run->model;
    const FlatVector* flat = &model->flat;
    const RankOptions* ranks = &model->options.ranks;
    const Flags* flags = r->flags;
    double peak, entropy = run->val.entropy_floor > 0 ? run->val.entropy_floor : run->train.entropy_floor;
    size_t B = model->options.B, T = model->options.T;
    char device[320], data[FILE_PATH_MAX] = "";
    Flag* flag = flag_find((Flags*)(uintptr_t)flags, "data");
    JsonWriter w = {0};
    Error why;
    if (run->log.file == NULL) return;
    run->facts.restarts = run_count_starts(run);
    device_describe(device, sizeof device, &peak, model->stream);
    if (flag) flag_text(data, sizeof data, flag);
    flag = flag_find((Flags*)(uintptr_t)flags, "steps");
    json_write_begin(&w, '{');
    json_member_number(&w, "time", run->facts.started);
    json_member_u64(&w, "step", r->state.step + 1);
    command_write(&w, flags->arguments);
    flags_write(&w, flags, FLAG_GIVEN, true);
    fields_write(&w, CONFIG_FIELDS, CONFIG_FIELD_COUNT, &r->config);
    json_member_u64(&w, "seq", T);
    json_member_u64(&w, "parameters", model->parameters.true_size);
    json_member_u64(&w, "trained", parameters_trained(&model->parameters));
    json_member_number(&w, "flops_per_token", model_flops_per_token(model, T));
    json_member_string(&w, "precision", FLOATX_NAME);
    json_member_string(&w, "device", device);
    hosts_write(&w, texts, begins, run->comm.world);
    json_member_u64(&w, "ranks", run->comm.world);
    json_member_u64(&w, "dp", flat->dp_world);
    json_member_u64(&w, "tp", max_size(ranks->tp, 1));
    json_member_u64(&w, "pp", max_size(ranks->pp, 1));
    json_member_u64(&w, "cp", max_size(ranks->cp, 1));
    json_member_u64(&w, "zero", (uint64_t)flat->options.stage);
    json_member_u64(&w, "batch", B);
    json_member_u64(&w, "total_batch", B * T * flat->dp_world * max_size(model->options.pipeline.micro_batches, 1));
    json_member_u64(&w, "steps", flag ? *(uint64_t*)flag->value : 0);
    json_member_string(&w, "data", data);
    json_member_number(&w, "floor", entropy > 0 ? entropy : NAN);
    json_member_string(&w, "version", LLMTRAIN_VERSION);
    run_wrote(&run->events_refused, lines_append(run->options->out, "run.jsonl", NULL, &w, &why), &why);
}

// When a run begins or resumes: its line in run.jsonl, and its event. All ranks call it.
static inline bool run_record_start(Run* run, bool resumed, Error* error) {
    char host[256] = "", *texts = NULL;
    size_t *begins = NULL, alone = 0;
    bool good = true, several = run->comm.world > 1;
    gethostname(host, sizeof host - 1);
    if (several) good = comm_gather_texts(&run->comm, &texts, &begins, host, error);
    if (good) run_write_start(run, several ? texts : host, several ? begins : &alone);
    free(texts);
    free(begins);
    run->facts.val_loss = NAN;
    if (good) run_tell_with(run, false, "ms", event_ms(now_ms() - run->facts.started_ms).text,
                            resumed ? "resumed" : "begun", run->record.state.step, "%zu rank%s, --zero %d, %s",
                            run->comm.world, several ? "s" : "", (int)run->model.flat.options.stage, FLOATX_NAME);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 3. Step

// Keeps what was gathered of each rank in a step, before the next numbers are gathered; NULL if it is not logged.
static inline const double* run_keep_ranks(Run* run) {
    const RankStats* stats = &run->model.stats;
    double* kept = run->facts.of_ranks;
    for (size_t r = 0; kept && r < stats->world; r++)
        memcpy(kept + r * RANK_FACTS, stats->gathered + r * stats->count, RANK_FACTS * sizeof(double));
    return kept;
}

// How long training has waited for saves since the last call, as the value of an event's member.
static inline EventMs run_save_ms(Run* run) {
    EventMs ms = event_ms(run->facts.save_ms);
    run->facts.save_ms = 0;
    return ms;
}

// Logs a step.
static inline void run_log_step(Run* run, StepLog* s) {
    RunFacts* f = &run->facts;
    s->load_ms = f->load_ms / (double)max_size(f->steps, 1);
    s->time = unix_time();
    f->load_ms = 0;
    f->steps = 0;
    if (run->log.file == NULL) return;
    log_write(&run->log, s);
    f->last = *s;
    run_export(run);
}

// ------------------------------------------------------------------------------------------------
// 4. Samples

// Prints a sample, and appends it to samples.jsonl.
static inline bool run_sample(Run* run, Sampler* sampler, Error* error) {
    double began = now_ms();
    uint64_t step = run->record.state.step;
    JsonWriter w = {0};
    Error why;
    sampler->stop = run->interrupted;
    if (!sampler_write(sampler, stdout, error)) return false;
    run_tell_with(run, false, "ms", event_ms(now_ms() - began).text, "sample", step, "%zu tokens",
                  sampler->texts[0].ids.count);
    if (run->log.file == NULL) return true;
    SampleText* text = &sampler->texts[0];
    if (!memory_grow(&text->text, &text->capacity, text->bytes + 1, 1))
        return fail_with(error, "out of memory for %zu bytes of text; make --tokens smaller", text->bytes);
    text->text[text->bytes] = 0;
    json_write_begin(&w, '{');
    json_member_u64(&w, "step", step);
    json_member_u64(&w, "seed", sampler->options.seed);
    json_member_string(&w, "prompt", sampler->prompt);
    json_write_key(&w, "text");
    json_write_text(&w, text->text, text->bytes);
    bool wrote = lines_append(run->options->out, "samples.jsonl", &run->log.tensorboard, &w, &why);
    run_wrote(&run->facts.samples_refused, wrote, &why);
    return true;
}

#endif  // LLMTRAIN_FACTS_H
