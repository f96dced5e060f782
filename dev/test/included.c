// included.c: for include.sh, which compiles it twice for each case, with -DPART=1 and 2, as the two files of a program.
// The program has functions and macros of its own, whose names a user may well choose: the first part has them before
// it includes our headers, the second after. Both train a model for a step, and must agree.

#if PART == 1
#include "own_names.h"
#endif

#include "llmtrain/checkpoint/source.h"
#include "llmtrain/run/join.h"
#include "llmtrain/run/presets.h"
#include "llmtrain/run/rewind.h"
#include "llmtrain/run/step.h"
#include "llmtrain/text/generate.h"

#if PART == 2
#include "own_names.h"
#endif

double loss_of_part_2(void);

#if PART == 1
static double loss_of_part_1(void) {
#else
double loss_of_part_2(void) {
#endif
    enum { LENGTH = 8 };
    Error error;
    Model model;
    StepResult result;
    StepFlags none = {.stop = false};
    Config config;
    ModelOptions options;
    int32_t tokens[LENGTH], targets[LENGTH];
    memset(&config, 0, sizeof config);
    memset(&options, 0, sizeof options);
    config.layers = config.heads = 1;
    config.channels = config.vocab = 32;
    config.context = options.T = LENGTH;
    config.tied = options.training = true;
    options.B = 1;
    options.optimizer = optimizer_defaults(OPTIMIZER_ADAMW);
    for (int i = 0; i < LENGTH; i++) tokens[i] = i, targets[i] = i + 1;
    bool ok = config_complete(&config, &error) && model_create(&model, &config, options, &error) &&
              model_randomize(&model, 1, &error);
    if (ok) {
        model_begin_step(&model, 1.0, 1);
        model_gradients(&model, tokens, targets, 1, LENGTH);
        ok = model_finish_step(&model, &result, none, &error);
        model_free(&model);
    }
    if (!ok) fprintf(stderr, "included: %s\n", error.text);
    return ok ? result.loss : NAN;
}

#if PART == 1
int main(void) {
    double first = loss_of_part_1(), second = loss_of_part_2();
#ifdef SYSTEM_LINUX
    const char* branch = "linux";
#else
    const char* branch = "posix";
#endif
    printf("%s %.6f %.6f\n", branch, first, second);
    return first == second ? 0 : 1;
}
#endif
