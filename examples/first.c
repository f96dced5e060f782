// first.c: the smallest complete program: trains a tiny model on a string in memory, saves and loads it, and
// continues the string.
//
//   mkdir -p build && cc -O3 -ffp-contract=off -I. examples/first.c -o build/first -lm -pthread && build/first

#include "llmtrain.h"                    // Model
#include "llmtrain/checkpoint/record.h"  // model_save, model_load
#include "llmtrain/text/data.h"          // Dataset, Loader
#include "llmtrain/text/generate.h"      // Generator

int main(void) {
    const char* line = "the cat sat on the mat. the dog sat on the log. ";
    enum { B = 8, T = 32, STEPS = 150, TEXT = 2000, MORE = 48 };
    uint16_t text[TEXT];
    for (size_t i = 0; i < TEXT; i++) text[i] = (unsigned char)line[i % strlen(line)];

    Error error;
    Model model;
    Dataset data;
    Loader loader;
    Config config = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .channels = 64, .ffn = 128,
                     .context = T, .vocab = 256, .tied = true};
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .cached_sequences = 1};
    bool ok = dataset_from_memory(&data, text, sizeof text[0], TEXT, &error) &&
              model_create(&model, &config, options, &error) && model_randomize(&model, 1, &error) &&
              loader_open(&loader, &data, 256, 1, 0, 1, B, T, &error) && loader_start(&loader, 0, &error);
    if (!ok) return fprintf(stderr, "example: %s\n", error.text), 1;

    int32_t tokens[B * T], targets[B * T];
    StepResult result = {0};
    StepFlags flags = {0};
    for (uint64_t step = 1; step <= STEPS; step++) {
        if (!loader_next(&loader, tokens, targets, &error)) return fprintf(stderr, "example: %s\n", error.text), 1;
        model_begin_step(&model, 1.0, 1);
        model_gradients(&model, tokens, targets, B, T);
        if (!model_finish_step(&model, &result, flags, &error)) return fprintf(stderr, "example: %s\n", error.text), 1;
        model_update(&model, step, 3e-3, 1.0 / fmax(1.0, result.grad_norm));
        if (step % 50 == 0) printf("step %d loss %.3f\n", (int)step, result.loss);
    }

    RunRecord record = {.config = model.config, .optimizer = options.optimizer, .T = T}, saved;
    record.state = run_state_begin(false, 1.0);
    record.state.step = STEPS;
    // The checkpoint is a directory, example.out/step_00000150, that tools/generate.cu can open too.
    ok = model_save(&model, &record, "example.out", &error) &&
         model_load(&model, &saved, "example.out/step_00000150", false, &error);
    if (!ok) return fprintf(stderr, "example: %s\n", error.text), 1;
    checkpoint_discard("example.out");

    Tokenizer tokenizer = tokenizer_of_bytes();
    SamplingOptions sampling = {.temperature = 0, .top_p = 1};  // always the likeliest token
    Generator generator;
    Tokens prompt = {0};
    ok = tokenizer_encode(&prompt, &tokenizer, "the cat", 7, &error) &&
         generator_open(&generator, &model, &sampling, 1, prompt.count + MORE, &error);
    if (!ok) return fprintf(stderr, "example: %s\n", error.text), 1;
    printf("the cat");
    generator_append(&generator, prompt.ids, prompt.count);
    for (int i = 0; i < MORE; i++) {
        size_t bytes;
        const char* piece = tokenizer_piece(&bytes, &tokenizer, *generator_step(&generator));
        fwrite(piece, 1, bytes, stdout);
    }
    printf("\n");
    tokens_free(&prompt);
    generator_close(&generator);
    loader_close(&loader);
    dataset_close(&data);
    model_free(&model);
    return result.loss < 0.1 ? 0 : 1;  // it has learned two sentences by heart
}
