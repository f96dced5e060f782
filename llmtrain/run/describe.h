// describe.h: what a run prints before its first step: the model, the device, and what the flags imply.

#ifndef LLMTRAIN_DESCRIBE_H
#define LLMTRAIN_DESCRIBE_H

#include "samples.h"

static inline void run_print_model(const Run* run) {
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        char value[32];
        const Field* field = &CONFIG_FIELDS[i];
        field_text(value, sizeof value, field, &run->record.config);
        if (field->missing && strcmp(value, field->missing) == 0) continue;  // a feature that most models lack
        printf("%s%s %s", i ? ", " : "model: ", field->name, value);
    }
    const Parameters* p = &run->model.parameters;
    size_t trained = parameters_trained(p);
    printf(": %zu parameters", p->true_size);
    if (trained < p->true_size) printf(", of which %zu are trained", trained);
    printf("\n");
}

// Prints the device, and the peak for MFU: --peak-tflops, or the device's if it is known, which *peak_tflops becomes.
static inline void run_print_device(const Run* run, double* peak_tflops) {
    char text[320];
    double peak;
    device_describe(text, sizeof text, &peak, run->model.stream);
    const char* source = *peak_tflops > 0 ? " (--peak-tflops)" : "";
    if (*peak_tflops == 0) *peak_tflops = peak;
    printf("precision %s, matmuls by %s", FLOATX_NAME, text);
    if (*peak_tflops > 0) printf(", MFU against %g TFLOP/s%s", *peak_tflops, source);
    printf("\n");
}

// Prints the share and the size of each part of a mixture.
static inline void run_print_mixture(const Dataset* data) {
    if (data->part_count == 1) return;
    for (size_t i = 0; i < data->part_count; i++) {
        const DatasetPart* part = &data->parts[i];
        size_t tokens = 0;
        for (size_t k = part->first; k < part->end; k++) tokens += data->shards[k].count;
        char more[48] = "";
        if (part->end - part->first > 1) snprintf(more, sizeof more, " and %zu more", part->end - part->first - 1);
        say(stdout, "data: %g%% of the samples from %s%s, %zu tokens",
            100.0 * (double)part->of_cycle / (double)MIXTURE_CYCLE, data->shards[part->first].path, more, tokens);
    }
}

static inline void run_print_notes(const Run* run, const Schedule* schedule) {
    size_t T = run->model.options.T;
    unsigned long long step = run->record.state.step, steps = schedule->steps, warmup = schedule->warmup;
    run_print_mixture(&run->train);
    samples_print("--data", &run->train, T);
    samples_print("--val", &run->val, T);
    if (warmup > steps && step < steps)
        printf("note: --warmup %llu exceeds --steps %llu: the learning rate never reaches --lr\n", warmup, steps);
    if (run->options->out == NULL) printf("no --out: nothing will be saved\n");
    fflush(stdout);
}

#endif  // LLMTRAIN_DESCRIBE_H
