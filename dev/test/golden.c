// golden.c: the same bits everywhere. Trains small models for 20 steps and compares a hash of their weights, losses and
// gradient norms with the table's: it must be the same on every processor with fused multiply-add, for every compiler,
// optimization level, gemm kernel and number of threads.
//
//     build/golden            fails where a hash differs; without fused multiply-add it only compares thread counts
//     build/golden --print    prints the current hashes, to be pasted into the table when the arithmetic is changed
//
// Matmuls of bfloat16 pairs add in an order of their own: AVX512_BF16 has the second column; AMX has none yet, since
// the table was made without such a processor.

#include "llmtrain.h"
#include "llmtrain/checkpoint/state.h"
#include "harness.h"

enum { B = 2, T = 40, VOCAB = 97, STEPS = 20 };

static const Config GPT2_SMALL = {.family = FAMILY_GPT2, .layers = 2, .heads = 3, .kv_heads = 3, .channels = 36,
                                  .ffn = 400, .context = T, .vocab = VOCAB, .tied = true};
static const Config LLAMA_SMALL = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .channels = 48,
                                   .ffn = 72, .context = T, .vocab = VOCAB};

static const struct {
    const char* name;
    const Config* config;
    OptimizerKind optimizer;
    double dropout;
    size_t micro_batches;
    uint64_t golden[2];  // with matmuls of floats; with matmuls of AVX512_BF16
} CASES[] = {
#if defined(PRECISION_BF16)
    {"GPT-2, AdamW", &GPT2_SMALL, OPTIMIZER_ADAMW, 0, 1,
     {0x7e5566d8bc1af768, 0x1ced1f3b7e92cded}},
    {"Llama, AdamW, 2 micro-batches", &LLAMA_SMALL, OPTIMIZER_ADAMW, 0, 2,
     {0x9d5300f3c2d9a0c2, 0xb23184b49fd09c90}},
#else
    {"GPT-2, AdamW", &GPT2_SMALL, OPTIMIZER_ADAMW, 0, 1, {0xd65356fbe83d801e, 0}},
    {"GPT-2, AdamW, dropout", &GPT2_SMALL, OPTIMIZER_ADAMW, 0.1, 1, {0xc1129bfbe0b3bdf7, 0}},
    {"GPT-2, SGD", &GPT2_SMALL, OPTIMIZER_SGD, 0, 1, {0x12c94adaa224d7e0, 0}},
    {"GPT-2, Lion", &GPT2_SMALL, OPTIMIZER_LION, 0, 1, {0xdb72dbc3b0f07dc0, 0}},
    {"Llama, AdamW, 2 micro-batches", &LLAMA_SMALL, OPTIMIZER_ADAMW, 0, 2, {0x54c6d4ae9bb3132a, 0}},
    {"Llama, momentum", &LLAMA_SMALL, OPTIMIZER_MOMENTUM, 0, 1, {0x8340978a10abfd00, 0}},
    {"Llama, Muon", &LLAMA_SMALL, OPTIMIZER_MUON, 0, 1, {0xbd6ab216b89b9258, 0}},
    {"GPT-2, GaLore", &GPT2_SMALL, OPTIMIZER_GALORE, 0, 1, {0xf1f21019cfe64dac, 0}},
    {"Llama, LDAdam", &LLAMA_SMALL, OPTIMIZER_LDADAM, 0, 1, {0x2336a6bae26751e9, 0}},
    {"Llama, AdamW, dropout, 3 micro-batches", &LLAMA_SMALL, OPTIMIZER_ADAMW, 0.2, 3, {0x3d037a475ae95d72, 0}},
    {"Llama, AdamW with 8-bit states", &LLAMA_SMALL, OPTIMIZER_ADAMW_8BIT, 0, 1, {0x1488775cee0d449a, 0}},
    {"GPT-2, AdamW with BF16 states", &GPT2_SMALL, OPTIMIZER_ADAMW_BF16, 0, 1, {0x22fbe92f3abb6da9, 0}},
    {"Llama, Adafactor", &LLAMA_SMALL, OPTIMIZER_ADAFACTOR, 0, 1, {0x5b5c59ff9a0405c2, 0}},
    {"GPT-2, CAME", &GPT2_SMALL, OPTIMIZER_CAME, 0, 1, {0x2b443442f389aa3b, 0}},
    {"Llama, Adam-mini", &LLAMA_SMALL, OPTIMIZER_ADAM_MINI, 0, 1, {0xca65e4fb26b3e63d, 0}},
    {"GPT-2, SM3", &GPT2_SMALL, OPTIMIZER_SM3, 0, 1, {0xcee6632f3c6fa3fc, 0}},
#endif
};

// The hash of a run; 0 if it failed, which this has then printed.
static uint64_t train(size_t number) {
    Error error;
    Model model;
    Config config = *CASES[number].config;
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(CASES[number].optimizer)};
    options.optimizer.rank = 8;
    Schedule schedule = {.kind = SCHEDULE_COSINE, .lr = 3e-3, .final_fraction = 0.1, .warmup = 4, .steps = STEPS};
    if (!model_create(&model, &config, options, &error) || !model_randomize(&model, 1, &error)) {
        expect(false, "%s", error.text);
        return 0;
    }
    model.dropout.p = (float)CASES[number].dropout;
    model.dropout.seed = 1;
    Hash hash = hash_begin(0);
    uint64_t drawn = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        StepResult result;
        StepFlags flags = {0};
        model_begin_step(&model, 1.0, CASES[number].micro_batches);
        for (size_t micro = 0; micro < CASES[number].micro_batches; micro++) {
            int32_t text[B * (T + 1)], tokens[B * T], targets[B * T];
            uint32_t last = 0;  // each token depends on the one before, so that there is something to learn
            for (size_t i = 0; i < COUNT_OF(text); i++) {
                last = (random_bits(1, RANDOM_TEST, 0, drawn++) % 5 + 3 * last) % VOCAB;
                text[i] = (int32_t)last;
            }
            for (size_t i = 0; i < B * T; i++) {
                tokens[i] = text[i / T * (T + 1) + i % T];
                targets[i] = text[i / T * (T + 1) + i % T + 1];
            }
            model.dropout.first_token = drawn;
            model_gradients(&model, tokens, targets, B, T);
        }
        if (!model_finish_step(&model, &result, flags, &error)) {
            expect(false, "%s", error.text);
            return 0;
        }
        double lr = schedule_lr(&schedule, step);
        model_update(&model, step + 1, lr, 1.0 / fmax(1.0, result.grad_norm));
        hash_add(&hash, &result.loss, sizeof result.loss);
        hash_add(&hash, &result.grad_norm, sizeof result.grad_norm);
    }
    hash_add(&hash, model.flat.params, model.parameters.flat_size * sizeof(floatX));
    model_free(&model);
    return hash_end(&hash);
}

int main(int argc, char** argv) {
    bool print = argc == 2 && strcmp(argv[1], "--print") == 0;
    if (argc != 1 && !print) return fprintf(stderr, "usage: golden [--print]\n"), 2;
    tests_begin("golden");
    gemm_backend();  // chooses the kernels
    bool pairs = FLOATX_DTYPE == DTYPE_BF16 && gemm_state.for_bf16->pairs;
    bool known = ARITHMETIC_FUSED && (!pairs || strcmp(gemm_state.for_bf16->name, "avx512bf16") == 0);
    if (!known) printf("no hashes are known for this arithmetic: only numbers of threads are compared\n");
    for (size_t i = 0; i < COUNT_OF(CASES); i++) {
        threads_set(1);
        uint64_t hash = train(i);
        if (print) printf("0x%016llx  ", (unsigned long long)hash);
        expect(print || !known || hash == CASES[i].golden[pairs], "%016llx", (unsigned long long)hash);
#ifdef _OPENMP
        threads_set(3);
        uint64_t threads = train(i);
        expect(hash == threads, "with 3 threads %016llx", (unsigned long long)threads);
#endif
        verdict("%s, %s, %s", CASES[i].name, FLOATX_NAME, gemm_backend());
    }
    return tests_end();
}
