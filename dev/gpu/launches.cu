// dev/gpu/launches.cu: lists the kernels that a training step of a model of any size launches, without running them.
//
//     EMULATE_LAUNCHES=step.txt EMULATE_PROCESSORS=132 build/launches-BF16 --model gpt2:1558M --batch 32 --seq 1024
//
// The program is compiled with the emulator (dev/emulator/launches.h describes the list's format), so the launches come
// from the code of the model and its launchers. Before the step is a line with its flops, as MFU counts them: {"step":
// flops}. dev/gpu/bounds.py computes a bound for each of these kernels: make bounds.

#include "llmtrain/run/flops.h"
#include "llmtrain/run/presets.h"
#include "kernels.cuh"

typedef struct {
    const char* model;
    uint64_t batch, seq;
} Options;

static bool launches_step(const Options* o, Error* error) {
    Config config;
    Model model;
    ModelOptions options;
    StepFlags flags = {.stop = false};
    StepResult result;
    memset(&options, 0, sizeof options);
    options.B = o->batch;
    options.T = o->seq;
    options.training = true;
    options.optimizer = optimizer_defaults(OPTIMIZER_ADAMW);
    if (!config_preset(&config, o->model, error) || !config_complete(&config, error)) return false;
    if (!model_create(&model, &config, options, error)) return false;
    int32_t* tokens = (int32_t*)calloc(options.B * options.T, sizeof *tokens);
    bool ok = tokens != NULL || fail_with(error, "out of memory for the batch; make --batch smaller");
    if (ok) {
        double flops = (double)(options.B * options.T) * model_flops_per_token(&model, options.T);
        fprintf(emulator::launches_file(), "{\"step\": %.17g}\n", flops);
        model_begin_step(&model, 1.0, 1);
        model_gradients(&model, tokens, tokens, options.B, options.T);
        ok = model_finish_step(&model, &result, flags, error);
    }
    if (ok) model_update(&model, 1, 1e-4, 1.0);
    free(tokens);
    model_free(&model);
    return ok;
}

int main(int argc, char** argv) {
    Options o = {"gpt2:124M", 64, 1024};
    const Flag rows[] = {
        {"model", KIND_TEXT, &o.model, "NAME", 0, 0, "a preset of llmtrain/run/presets.h", 0},
        {"batch", KIND_COUNT, &o.batch, "N", 1, 65536, "sequences of a step", 0},
        {"seq", KIND_COUNT, &o.seq, "N", 1, 16777216, "tokens of a sequence", 0},
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    int code;
    Error error;
    if (!flags_begin(&code, "launches", "launches: what a training step launches (" FLOATX_NAME " build).", &flags,
                     argc, argv))
        return code;
    if (getenv("EMULATE_LAUNCHES") == NULL)
        return fprintf(stderr, "launches: set EMULATE_LAUNCHES to the file that is to list them\n"), 2;
    return launches_step(&o, &error) ? 0 : (fprintf(stderr, "launches: %s\n", error.text), 1);
}
