// test_plan.c: what tools/predict.h and build/plan predict. dev/bench/plan.sh compares it with runs.
//
//   build/test_plan --plan build/plan-BF16 --train build/train-BF16
//
// The bytes of a block's activations at each level of --recompute, those of all else, and the operations of a step,
// against counts by hand; the predicted time of large models; that build/plan prints what ./train --plan prints; that
// each row of what fits, given as flags, takes what the row says; what it prints if nothing fits; refusals.
//
// Clusters (tools/cluster.h): more bandwidth, power or memory is never slower; bubbles are those of the pipelines'
// tables; memory, failures and islands against counts by hand and published numbers; all layouts of up to 131,072 GPUs.

#define PRECISION_BF16

#include "tools/cluster_search.h"
#include "llmtrain/run/presets.h"

#include "harness.h"

static const char *plan_program = "build/plan-BF16", *train_program = "build/train-BF16";

// ------------------------------------------------------------------------------------------------
// Predictions

static Rates rates_of(const char* text) {
    Rates rates;
    Error error;
    need(rates_parse(&rates, text, &error), "%s", error.text);
    return rates;
}

static void llama_plan(Model* model, ModelOptions options) {
    Config config;
    Error error;
    need(config_preset(&config, "llama:8B", &error) && model_plan(model, &config, options, &error), "%s", error.text);
}

// Of a line of the memory plan; 0: there is none.
static size_t line_bytes(const Model* model, const char* name) {
    for (size_t i = 0; i < model->memory.count; i++)
        if (strcmp(model->memory.lines[i].name, name) == 0) return model->memory.lines[i].bytes;
    return 0;
}

// What a block keeps of a token at each level, in bytes of BF16, and what all blocks but the last keep with the last,
// which keeps all: counted by hand from the table of levels in activations.h.
static void test_activations(void) {
    static const struct { const char* model; size_t T, bytes[RECOMPUTE_AUTO]; } cases[] = {
        // 2 (8 x 768 + 2 x 3072) + 4 (4 + 12): without norms 2 x 2 x 768 + 16; GELU 2 x 3072; queries, keys, values and
        // attention 2 x 4 x 768 + 4 x 12; the stream after attention and ffn_in 2 (768 + 3072).
        {"gpt2:124M", 512, {24640, 21552, 15408, 9216, 1536}},
        // 2 (5 x 2048 + 48 x 64 + 3 x 8192) + 4 (4 + 32): 2 x 2 x 2048 + 16; 2 x 8192; 2 (48 x 64 + 2048) + 4 x 32;
        // 2 (2048 + 2 x 8192).
        {"llama:1B", 256, {75920, 67712, 51328, 40960, 4096}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int level = 0; level < RECOMPUTE_AUTO; level++) {
            Config config;
            Model model;
            Error error;
            ModelOptions options = {.B = 2, .T = cases[i].T, .training = true, .recompute = (RecomputeLevel)level,
                                    .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
            need(config_preset(&config, cases[i].model, &error) && model_plan(&model, &config, options, &error), "%s",
                 error.text);
            size_t found = line_bytes(&model, "activations of the blocks"), rows = 2 * cases[i].T;
            size_t others = model.config.layers - 1;
            size_t expected = rows * (others * cases[i].bytes[level] + cases[i].bytes[0]);
            expect(found == expected, "%s, level %d: %zu bytes, not %zu", cases[i].model, level, found, expected);
            model_free(&model);
        }
    verdict("--recompute: the bytes of the blocks' activations at each level, counted by hand");
}

// The other lines of GPT-2 124M, 4 x 1024 tokens, with numbers of 2 bytes: 124,475,904 parameters with the 47 rows of
// padding of the vocabulary, 7,087,872 of a block. The states' bytes are those of doc/running.md.
static void test_memory(void) {
    static const double P = 124475904, BLOCK = 7087872, ROWS = 4096;
    static const struct {
        const char* line;
        double bytes;
        OptimizerKind kind;
        size_t world, stage;
        const char* train;
    } cases[] = {
        {"parameters (bf16)", 2 * P, OPTIMIZER_ADAMW, 1, 0, NULL},
        {"master weights (fp32)", 4 * P, OPTIMIZER_ADAMW, 1, 0, NULL},
        {"gradients (fp32)", 4 * P, OPTIMIZER_ADAMW, 1, 0, NULL},
        // Of the stream, the hidden state, a branch and attention 4 x 768, of q, k, v 3 x 768, 3072; and 12 floats.
        {"gradients of activations", ROWS * (2 * (7 * 768 + 3072) + 4 * 12), OPTIMIZER_ADAMW, 1, 0, NULL},
        // A branch, the stream after the last block, the hidden state; mean, rstd and loss.
        {"activations outside the blocks", ROWS * (2 * 3 * 768 + 4 * 3), OPTIMIZER_ADAMW, 1, 0, NULL},
        {"KV cache", 3 * 12 * 1024.0 * 2 * 768 * 2, OPTIMIZER_ADAMW, 1, 0, NULL},
        // Ranks sum gradients in 64 bits. A stage shards the states, then the gradients too.
        {"gradients (64-bit fixed point)", 8 * P, OPTIMIZER_ADAMW, 4, 1, NULL},
        {"gradients (64-bit fixed point)", 8 * P / 4, OPTIMIZER_ADAMW, 4, 2, NULL},
        {"parameters (bf16)", 2 * P, OPTIMIZER_ADAMW, 4, 2, NULL},
        {"master weights (fp32)", 4 * P / 4, OPTIMIZER_ADAMW, 4, 1, NULL},
        {"optimizer state", 8 * P / 4, OPTIMIZER_ADAMW, 4, 1, NULL},
        {"optimizer state", 8 * P, OPTIMIZER_ADAMW, 4, 0, NULL},
        // Of frozen tensors there is the weight alone.
        {"parameters (bf16)", 2 * P, OPTIMIZER_ADAMW, 1, 0, "block.11.*"},
        {"master weights (fp32)", 4 * BLOCK, OPTIMIZER_ADAMW, 1, 0, "block.11.*"},
        {"gradients (fp32)", 4 * BLOCK, OPTIMIZER_ADAMW, 1, 0, "block.11.*"},
        {"optimizer state", 8 * BLOCK, OPTIMIZER_ADAMW, 1, 0, "block.11.*"},
        {"optimizer state", 8.00 * P, OPTIMIZER_ADAMW, 1, 0, NULL},
        {"optimizer state", 4.00 * P, OPTIMIZER_ADAMW_BF16, 1, 0, NULL},
        {"optimizer state", 2.03 * P, OPTIMIZER_ADAMW_8BIT, 1, 0, NULL},
        {"optimizer state", 4.00 * P, OPTIMIZER_ADAM_MINI, 1, 0, NULL},
        {"optimizer state", 4.02 * P, OPTIMIZER_CAME, 1, 0, NULL},
        {"optimizer state", 4.01 * P, OPTIMIZER_SM3, 1, 0, NULL},
        {"optimizer state", 0.01 * P, OPTIMIZER_ADAFACTOR, 1, 0, NULL},
        {"optimizer state", 5.27 * P, OPTIMIZER_MUON, 1, 0, NULL},
        {"optimizer state", 3.68 * P, OPTIMIZER_GALORE, 1, 0, NULL},
        {"optimizer state", 6.41 * P, OPTIMIZER_LDADAM, 1, 0, NULL},
        {"optimizer state", 4.00 * P, OPTIMIZER_LION, 1, 0, NULL},
        {"optimizer state", 4.00 * P, OPTIMIZER_MOMENTUM, 1, 0, NULL},
        {"optimizer state", 0, OPTIMIZER_SGD, 1, 0, NULL},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Config config;
        Model model;
        Error error;
        ModelOptions options = {.B = 4, .T = 1024, .training = true, .optimizer = optimizer_defaults(cases[i].kind),
                                .cached_sequences = 3, .train = cases[i].train,
                                .ranks = {.world = cases[i].world, .stage = cases[i].stage,
                                          .reduce = cases[i].world > 1 ? REDUCE_EXACT : REDUCE_FLOAT}};
        need(config_preset(&config, "gpt2:124M", &error) && model_plan(&model, &config, options, &error), "%s",
             error.text);
        // States are stated to two digits; a shard ends between tensors or pieces.
        bool rounded = strcmp(cases[i].line, "optimizer state") == 0;
        double bound = rounded ? 0.006 * P : 1e-4 * cases[i].bytes, found = (double)line_bytes(&model, cases[i].line);
        expect(fabs(found - cases[i].bytes) <= bound, "%s, %s, %zu ranks, stage %zu%s%s: %.0f bytes, not %.0f",
               cases[i].line, OPTIMIZERS[cases[i].kind].name, cases[i].world, cases[i].stage,
               cases[i].train ? ", --train " : "", cases[i].train ? cases[i].train : "", found, cases[i].bytes);
        model_free(&model);
    }
    verdict("--plan: parameters, gradients, states and activations, counted by hand");
}

// A rank of --tp has its part of what is divided, and what is not; its activations are of its rows, and in attention
// and the feed-forward of its heads and units.
static void test_tensor_memory(void) {
    static const double P = 124475904, COMMON = 768 * (1024 + 12 * 6 + 2), ROWS = 4096;
    double before[2] = {INFINITY, INFINITY};
    for (size_t tp = 1; tp <= 4; tp *= 2)
        for (int level = 0; level < 2; level++) {
            Config config;
            Model model;
            Error error;
            ModelOptions options = {.B = 4, .T = 1024, .training = true,
                                    .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                                    .recompute = level ? RECOMPUTE_BLOCK : RECOMPUTE_NONE,
                                    .ranks = {.world = tp, .tp = tp, .leaves = tp, .reduce = REDUCE_EXACT}};
            need(config_preset(&config, "gpt2:124M", &error) && model_plan(&model, &config, options, &error), "%s",
                 error.text);
            double own = (P - COMMON) / (double)tp + COMMON, rows = ROWS / (double)tp;
            const struct { const char* line; double bytes; } lines[] = {
                {"parameters (bf16)", 2 * own}, {"master weights (fp32)", 4 * own}, {"optimizer state", 8 * own},
                {"gradients (64-bit fixed point)", 8 * own},
                // Of a row as in test_activations, with a share of each, and the last block keeps all.
                {"activations of the blocks", rows * (level ? 11 * 1536 + 24640 : 12 * 24640)}};
            for (size_t i = 0; i < COUNT_OF(lines); i++) {
                double found = (double)line_bytes(&model, lines[i].line);
                expect(fabs(found - lines[i].bytes) <= 1e-3 * lines[i].bytes, "--tp %zu, %s: %.0f bytes, not %.0f", tp,
                       lines[i].line, found, lines[i].bytes);
            }
            double total = (double)model.memory.total;
            expect(total < 0.7 * before[level], "--tp %zu: %.0f bytes after %.0f", tp, total, before[level]);
            before[level] = total;
            model_free(&model);
        }
    verdict("--plan: memory falls with --tp, counted by hand");
}

static void test_impossible(void) {
    static const struct { size_t B, T, slots; int offload; const char* says; } cases[] = {
        {0, 64, 1, OFFLOAD_NOTHING, "a batch of 0 sequences of 64 tokens is impossible; give at least 1 of each"},
        {2, 0, 1, OFFLOAD_NOTHING, "a batch of 2 sequences of 0 tokens is impossible"},
        {SIZE_MAX / 2, 4, 1, OFFLOAD_NOTHING, "sequences of 4 tokens is impossible"},
        {2, 1025, 1, OFFLOAD_NOTHING, "sequences of 1025 tokens do not fit the model's context of 1024"},
        {2, 64, 2, OFFLOAD_BOTH, "activations cannot be offloaded with several slots, or --pp; leave out one"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Config config;
        Model model;
        Error error;
        ModelOptions options = {.B = cases[i].B, .T = cases[i].T, .slots = cases[i].slots, .training = true,
                                .offload = cases[i].offload, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
        need(config_preset(&config, "gpt2:124M", &error), "%s", error.text);
        expect_refusal(model_plan(&model, &config, options, &error), &error, cases[i].says, cases[i].says);
    }
    verdict("batches, sequences and slots that no model can have are refused");
}

// The scratch of an update, in floats: only optimizers that need whole tensors or matrices have any, the latter only
// for hidden matrices. Muon keeps two arrays like the largest matrix, and two squares of its shorter side.
static void test_scratch(void) {
    Config config;
    Model model;
    Error error;
    ModelOptions options = {.B = 1, .T = 64, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    need(config_preset(&config, "gpt2:124M", &error) && model_plan(&model, &config, options, &error), "%s", error.text);
    for (int kind = 0; kind < OPTIMIZER_COUNT; kind++)
        for (size_t i = 0; i < model.parameters.count; i++) {
            const Tensor* t = &model.parameters.tensors[i];
            ShardRule rule = OPTIMIZERS[kind].rule;
            size_t found = optimizer_scratch_floats((OptimizerKind)kind, &t->shape, 64);
            bool needs = rule == SHARD_TENSORS || (rule == SHARD_MATRICES && t->shape.hidden);
            expect((found > 0) == needs, "%s, %s: %zu floats", OPTIMIZERS[kind].name, t->name, found);
            if (kind != OPTIMIZER_MUON || !needs) continue;
            size_t rows = strstr(t->name, "ffn") ? 3072 : 768, floats = 2 * rows * 768 + 2 * 768 * 768;
            expect(found >= floats && found <= floats + 512, "muon, %s: %zu floats for %zu", t->name, found, floats);
        }
    model_free(&model);
    verdict("the scratch memory of updates, counted by hand");
}

// The operations of a step at one rate for all of them: 6 for each weight and token, and for each visible pair of query
// and key of a head 14 D, of two products forward and five backward, and two exponentials. All else is less than 1%.
static void test_operations(void) {
    static const struct { const char* model; size_t B, T; double weights, heads, D, layers; } cases[] = {
        {"gpt2:124M", 4, 1024, 124439808 - 1024 * 768, 12, 64, 12}, {"gpt2:124M", 1, 256, 123653376, 12, 64, 12},
        {"llama:1B", 2, 2048, 1235814400, 32, 64, 16}};
    Rates rates = rates_of("1,1");
    rates.other = rates.matmul;
    rates.memory = rates.comm = rates.offload = 1e30;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t micro = 1; micro <= 3; micro += 2) {
            Config config;
            Model model;
            Error error;
            ModelOptions options = {.B = cases[i].B, .T = cases[i].T, .training = true,
                                    .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
            need(config_preset(&config, cases[i].model, &error) && model_plan(&model, &config, options, &error), "%s",
                 error.text);
            double rows = (double)(micro * cases[i].B * cases[i].T), pairs = 0;
            for (size_t t = 0; t < cases[i].T; t++) pairs += (double)(t + 1) / (double)cases[i].T;  // of a token
            double attention = pairs * cases[i].heads * cases[i].layers * (14 * cases[i].D + 2 * 28);
            double expected = rows * (6 * cases[i].weights + attention);
            double ratio = 1e-3 * step_ms(&model, &rates, micro) * rates.matmul / expected;
            expect(ratio > 1 && ratio < 1.01 + 3 / rows, "%s, %zu x %zu x %zu: %g of the operations", cases[i].model,
                   micro, cases[i].B, cases[i].T, ratio);  // 18 for each update of a weight
            model_free(&model);
        }
    verdict("the operations of a step, counted by hand");
    // Each part by itself: a visible pair costs 4 more operations for each more element of D forward, 10 backward.
    Cost a = cost_attention_forward(3, 7, 4, 2, 16), b = cost_attention_forward(3, 7, 4, 2, 17);
    Cost c = cost_attention_backward(3, 7, 4, 2, 16), d = cost_attention_backward(3, 7, 4, 2, 17);
    check(b.flops - a.flops == 3 * 4 * 28 * 4 && d.flops - c.flops == 3 * 4 * 28 * 10,
          "attention: two products for a visible pair forward, five backward");
    // Position embeddings are read once for all sequences, and added; their gradients are sums in float, of one more
    // pass over those of the output.
    Cost with = cost_embedding_forward(3, 7, 16, true), without = cost_embedding_forward(3, 7, 16, false);
    Cost back = cost_position_backward(3, 7, 16);
    check(with.bytes - without.bytes == 2 * 7 * 16 && with.flops - without.flops == 3 * 7 * 16 &&
              back.bytes == (2 * 3 + 8) * 7 * 16 + 4 * 3 * 7 && back.flops == 3 * 7 * 16,
          "embeddings: what positions add");
    // Muon's five iterations have two products of a matrix with a square of its shorter side, and one of two squares.
    for (size_t world = 1; world <= 4; world += 3) {
        Config config;
        Model model;
        Error error;
        ModelOptions options = {.B = 1, .T = 64, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_MUON),
                                .ranks = {.world = world, .stage = world > 1, .reduce = REDUCE_EXACT}};
        need(config_preset(&config, "gpt2:124M", &error) && model_plan(&model, &config, options, &error), "%s",
             error.text);
        double side = 768, n = (2304 + 768 + 3072 + 3072) * side;
        double expected = 12 * 5 * (4 * side * n + 4 * 2 * side * side * side);
        check_bound(fabs(muon_cost(&model.flat).flops * (double)world / expected - 1), 1e-9,
                    "Muon's operations, %zu ranks", world);
        model_free(&model);
    }
}

// Llama 8B, 8,192 tokens in 16 bits: the blocks' activations shrink from 36.5 GB to less than 4, at less than 35% more
// time by the costs of the operations, at the rates of a CPU and of a GPU.
static void test_recompute(void) {
    const Rates rates[] = {rates_of("300,25"), rates_of("500000,2500")};
    Model model;
    ModelOptions options = {.B = 1, .T = 8192, .training = true, .recompute = RECOMPUTE_BLOCK,
                            .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    llama_plan(&model, options);
    check_bound(1e-9 * (double)line_bytes(&model, "activations of the blocks"), 4,
                "llama:8B, 8192 tokens, --recompute block: GB of activations");
    for (int i = 0; i < 2; i++) {
        double added = model_recompute_ms(&model, &rates[i]);
        check_bound(added / (step_ms(&model, &rates[i], 1) - added), 0.35, "and share of time added, rates %d", i);
    }
    double all = step_ms(&model, &rates[0], 1);
    model_free(&model);
    options.train = "block.31.*";
    llama_plan(&model, options);
    check_bound(step_ms(&model, &rates[0], 1) / all, 0.4, "llama:8B, training its last block alone: share of the time");
    model_free(&model);
}

static void test_offload(void) {
    Rates rates = rates_of("300,25");
    Model model;
    ModelOptions options = {.B = 1, .T = 8192, .training = true, .recompute = RECOMPUTE_BLOCK,
                            .optimizer = optimizer_defaults(OPTIMIZER_ADAMW), .train = "block.2[0-9].*,block.3[01].*",
                            .offload = OFFLOAD_ACTIVATIONS};
    llama_plan(&model, options);
    size_t piece = offload_bytes(&model.offloaded.store, 20);
    rates.offload = offload_rate_hidden(&model, &rates);
    double hidden = offload_wait_ms(&model, &rates);
    rates.offload *= 0.9;
    check(hidden == 0 && offload_wait_ms(&model, &rates) > 0,
          "--offload activations: at the rate that the plan prints nothing waits, below it something does");
    check(offload_total(&model.offloaded.store) < 10 * piece && offload_blocks_bytes(&model.offloaded) == 9 * piece,
          "--offload activations --train: blocks without a backward take no room");
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// The program

#define SMALL "--layers 2 --heads 4 --channels 40 --ffn 72 --vocab 256 --seq 16 --batch 3 "

// What it prints, static: its standard output, or its errors if `code` is above 0; empty if it exits with another code.
// -1: its standard output if it exits with 1.
static const char* program_says(const char* program, int code, const char* arguments) {
    static char text[16384];
    Program p;
    Words words = {.count = 0};
    words_add(&words, program);
    words_add(&words, arguments);
    program_start(&p, words.words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    bool good = !p.late && program_code(&p) == abs(code);
    if (!good) program_print(&p, arguments);
    snprintf(text, sizeof text, "%s", good ? p.text[code > 0 ? 1 : 0] : "");
    program_free(&p);
    return text;
}

// The GB and ms that it predicts for a step with these flags; NAN: none.
static void predicted(double* gb, double* ms, const char* arguments) {
    const char* line = strstr(program_says(plan_program, 0, arguments), "a step with these flags: ");
    *gb = *ms = NAN;
    if (line) sscanf(line, "a step with these flags: %lf GB, %lf ms", gb, ms);
}

// The first lines are those of ./train --plan, but for the size of the program itself; with --memory the last has the
// sum of all that is in memory.
static void test_same(void) {
    static const char* const flags[] = {
        SMALL "--out none --ckpt-every 1 ", SMALL "--ranks 3 --zero 2 --total-batch 288 --recompute norms ",
        "--layers 4 --heads 4 --channels 40 --ffn 96 --vocab 256 --seq 16 --batch 3 --ranks 8 --tp 4 --pp 2 ",
        "--model gpt2:124M --batch 4 --seq 256 --recompute auto --memory 2 --offload activations --offload-dir . "};
    for (size_t i = 0; i < COUNT_OF(flags); i++) {
        static char of_train[16384];
        size_t lines = 0;
        double mb, sum = 0, gb = NAN;
        snprintf(of_train, sizeof of_train, "%s", program_says(train_program, i == 3 ? -1 : 0, text_of("%s --plan", flags[i])));
        const char* said = program_says(plan_program, 0, text_of("%s --rate 300,25", flags[i]));
        for (char *rest = of_train, *line; (line = strsep(&rest, "\n")) != NULL && *line; lines++) {
            size_t length = strcspn(said, "\n");
            bool varies = strstr(line, "outside: the program") || strstr(line, "GB in all");
            expect(varies || (strlen(line) == length && strncmp(line, said, length) == 0), "%s: '%s' is '%.*s'",
                   flags[i], line, (int)length, said);
            bool counts = strncmp(line, "  total ", 8) == 0 || strncmp(line, "  outside: ", 11) == 0;
            if (counts && sscanf(line + strcspn(line, "0123456789"), "%lf", &mb) == 1) sum += mb;
            sscanf(line, " %lf GB in all", &gb);
            said += length + (said[length] != 0);
        }
        expect(lines > 10, "%s: %zu lines", flags[i], lines);
        bool within = strstr(flags[i], "--memory") != NULL;
        expect(isnan(gb) == !within && (!within || fabs(gb - 1e-3 * sum) < 0.00051 + 1e-5 * (double)lines),
               "%s: the lines add up to %g MB, not %g GB", flags[i], sum, gb);
    }
    verdict("build/plan begins with what ./train --plan prints");
    const char* said = program_says(train_program, 1, SMALL "--plan --memory 0.001");
    expect(strcmp(said, "train: the run does not fit --memory 0.001; make --batch, --seq or the model smaller, or "
                  "--memory larger\n") == 0, "%s", said);
    program_says(train_program, 1, SMALL "--plan --pp 2 --ranks 2 --memory 0.001");
    verdict("--plan fails if the run does not fit --memory");
}

// A model of 1 B parameters, whose weights alone are 2.5 GB, is fine-tuned in 4 GB, and with weights of 4 bits in 2.5.
static void test_lora(void) {
    const char* flags = "--plan --model llama:1B --seq 2048 --batch 1 --lora 16 --recompute block";
    expect(strstr(program_says(train_program, 0, text_of("%s --memory 4", flags)), "within --memory 4"), "LoRA");
    expect(strstr(program_says(train_program, 0, text_of("%s --memory 2.5 --quantize nf4", flags)),
                  "within --memory 2.5"), "4 bits");
    verdict("--plan: a model of 1 B parameters with LoRA takes at most 4 GB, and with --quantize nf4 2.5 GB");
}

// What is refused in this precision alone, and of models that are divided.
static void test_tensor_refusals(void) {
    static const char tiny[] = "--plan --layers 2 --heads 4 --channels 40 --ffn 96 --vocab 256 --seq 16 --batch 2 ";
    static const struct { const char *flags, *says; } cases[] = {
        {"--ranks 2 --tp 2 --masters off", "--masters off rounds by an element's place in its tensor, and with --tp 2"},
        {"--ranks 2 --tp 2 --optimizer galore", "--optimizer galore needs whole tensors, and with --tp 2"},
        {"--ranks 8 --tp 8", "--tp 8 does not divide the model's 4 heads"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int p = 0; p < 2; p++) {
            const char* said = program_says(p ? train_program : plan_program, 2, text_of("%s%s", tiny, cases[i].flags));
            expect(strstr(said, cases[i].says) != NULL, "%s: %s", cases[i].flags, said);
        }
    verdict("--tp: what the trainer refuses, build/plan refuses");
}

// What a rank's checkpoints, its collectives and an offloaded state take, in MB, for GPT-2 124M and steps of two
// micro-batches. A ring of 4 ranks sends 3/4 of an array to reduce and scatter it, and as much to gather it.
static void test_moved(void) {
    // COMMON: what tensor parallelism does not divide, positions, norms and the biases of layers divided by inputs.
    static const double P = 124.475904, BLOCK = 7.087872, COMMON = 1e-6 * 768 * (1024 + 12 * 6 + 2);
    static const double HALF_ROWS = 1e-6 * 2048 * 768;
    static const struct { const char *flags, *line; double mb; } cases[] = {
        {"--ranks 4", "outside: snapshot", 12 * P / 4},
        {"--ranks 2 --tp 2", "outside: snapshot", 12 * ((P - COMMON) / 2 + COMMON)},
        {"--ranks 4", "in --ckpt-tier: each checkpoint", 12 * P / 4},
        {"--ranks 4 --masters off", "outside: snapshot", (2 + 8) * P / 4},
        {"--ranks 4 --train block.11.*", "outside: snapshot", 12 * BLOCK / 4},
        {"--offload optimizer --offload-dir .", "in --offload-dir", 12 * P},
        {"--offload optimizer --offload-dir .", "offloaded: read per step", 12 * P},
        {"--offload optimizer --offload-dir .", "offloaded: written per step", 12 * P},
        {"--offload optimizer --offload-dir .", "outside: snapshot", NAN},  // there is none
        {"--ranks 4", "sent per step", 0.75 * (8 + 8) * P},
        {"--ranks 4 --reduce float", "sent per step", 0.75 * (4 + 4) * P},
        {"--ranks 4 --reduce storage", "sent per step", 0.75 * (2 + 2) * P},
        {"--ranks 4 --zero 1", "sent per step", 0.75 * (8 + 2) * P},  // the weights are gathered
        {"--ranks 4 --zero 2", "sent per step", 0.75 * (2 * 8 + 2) * P},
        // 12 blocks in 4 passes; the first two of all but the first pass are still there.
        {"--ranks 4 --zero 3", "sent per step",
         0.75 * (2 * 8 * P + 2 * (P - 12 * BLOCK) + 2 * (12 + 3 * 10) * BLOCK)},
        {"--ranks 4 --zero 1 --shard 2", "sent per step", 0.5 * (8 + 2) * P + 8 * (0.25 + 0.25) * P},
        {"--ranks 4 --zero 1 --train block.11.*", "sent per step", 0.75 * (8 + 2) * BLOCK},
        // 4 micro-batches, of which a rank has 2048 rows: queries, keys, values and results, forward and back.
        {"--ranks 4 --cp 2", "sent per step", 0.75 * (8 + 8) * P + 1e-6 * 4 * 12 * 2048 * 0.5 * 2 * (4 * 768) * 2},
        {"--ranks 4 --cp 4 --recompute block", "sent per step",  // 8 of 1024 rows; 11 blocks send forward again
         0.75 * (8 + 8) * P + 1e-6 * 8 * (2 * 12 + 11) * 1024 * 0.75 * (4 * 768) * 2},
        // 4 micro-batches of 4096 rows over pairs, each rank with half of the divided parameters. A rank sends half of
        // the rows: in 16 bits 2 times forward in each block and 4 backward, for the embedding forward and back, and
        // for the head; in float twice forward, twice backward, and for the head. And 3 floats of its 4096 rows.
        {"--ranks 4 --tp 2", "sent per step",
         0.5 * 16 * ((P - COMMON) / 2 + COMMON) + 16 * COMMON / 2 +
             4 * HALF_ROWS * ((12 * 6 + 3) * 2 + (12 * 4 + 1) * 4) + 1e-6 * 4 * 3 * 4096 * 4},
        {"--ranks 4 --tp 2 --zero 1", "sent per step",
         0.5 * 10 * ((P - COMMON) / 2 + COMMON) + 16 * COMMON / 2 +
             4 * HALF_ROWS * ((12 * 6 + 3) * 2 + (12 * 4 + 1) * 4) + 1e-6 * 4 * 3 * 4096 * 4},
        // Of two leaves on each rank twice the statistics; reduced without leaves, all but COMMON in 16 bits.
        {"--ranks 4 --tp 2 --leaves 4", "sent per step",
         0.5 * 16 * ((P - COMMON) / 2 + COMMON) + 16 * COMMON / 2 +
             4 * HALF_ROWS * ((12 * 6 + 3) * 2 + (12 * 4 + 1) * 4) + 1e-6 * 4 * 3 * 4096 * 2 * 4},
        {"--ranks 4 --tp 2 --leaves 1 --reduce storage", "sent per step",
         0.5 * 4 * ((P - COMMON) / 2 + COMMON) + 8 * COMMON / 2 + 4 * HALF_ROWS * (12 * 10 + 4) * 2 +
             1e-6 * 4 * 3 * 4096 * 4}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double mb = NAN;
        const char* said = program_says(train_program, 0, text_of(
            "--plan --model gpt2:124M --batch 4 --total-batch 32768 --out none --ckpt-every 5 --ckpt-tier x:20 %s",
            cases[i].flags));
        const char* line = strstr(said, cases[i].line);
        if (line) sscanf(line + strlen(cases[i].line), "%lf", &mb);
        expect(isnan(cases[i].mb) ? isnan(mb) : fabs(mb - cases[i].mb) < 0.0051 + 1e-4 * cases[i].mb,
               "%s: %s: %g MB, not %g", cases[i].flags, cases[i].line, mb, cases[i].mb);
    }
    verdict("--plan: checkpoints, offloaded states and what is sent, counted by hand");
}

// The memory of the fullest stage in GB, by the table of stages that build/plan prints; 0: there is none.
static double fullest_stage(const char* flags) {
    double most = 0, mb;
    const char* line = strstr(program_says(plan_program, 0, flags), "\n  stage ");
    for (line = line ? strchr(line + 1, '\n') : NULL; line && sscanf(line, " %*u %*u %lf", &mb) == 1;
         line = strchr(line + 1, '\n'))
        most = fmax(most, 1e-3 * mb);
    return most;
}

// Of the rows that fit, each has at most --memory, and later ones are slower; each, given as flags with the sizes,
// takes what it says.
static void test_choices(void) {
    static const struct { double gb; const char *sizes, *batches, *first, *all; } cases[] = {
        {1, "--layers 2 --heads 4 --channels 40 --ffn 72 --vocab 256 --seq 16 --ranks 2", "--batch 6", "--zero",
         "adamw"},
        {1, "--layers 2 --heads 4 --channels 40 --vocab 256 --seq 16", "--batch 6 --optimizer lion", "", "lion "},
        {1, "--layers 2 --heads 4 --channels 40 --ffn 96 --vocab 256 --seq 16 --ranks 4", "--batch 6 --tp 2",
         "--tp 2", "adamw "},
        {1, "--layers 2 --heads 4 --channels 40 --ffn 96 --vocab 256 --seq 16 --ranks 2 --reduce storage",
         "--batch 6 --tp 2 --leaves 1", "--zero 0 --tp 2 --leaves 1", "adamw --masters on"},
        {0.5, "--model llama:15M --seq 256 --ranks 4", "--batch 8 --pp 4 --pipeline 1f1b", "--pp 4 --pipeline 1f1b",
         "adamw"},
        {0.4, "--model llama:15M --seq 256 --ranks 4 --heads 8 --kv-heads 1", "--batch 4 --pp 2 --cp 2 --row-leaves 4",
         "--cp 2 --row-leaves 4 --kv-copies 4 --pp 2", "adamw"},
        {0.9, "--model gpt2:124M --seq 256 --ranks 4", "--batch 8 --tp 4", "--tp 4", "adamw "},
        {0.45, "--model llama:15M --seq 256", "--batch 8", "--optimizer adamw", "adamw"},
        {12, "--model llama:1B --seq 2048", "--batch 1", "--optimizer adamw-8bit --masters off",
         "adamw"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double of_row[2], gb, ms, before = 0;
        static char said[16384];
        char row[512];
        size_t rows = 0;
        const char* flags = text_of("%s %s --memory %g --rate 300,25", cases[i].sizes, cases[i].batches, cases[i].gb);
        snprintf(said, sizeof said, "%s", program_says(plan_program, 0, flags));
        const char* list = strstr(said, text_of("within %g GB\n", cases[i].gb));
        expect(list != NULL, "%s: %s", flags, said);
        for (; list && (list = strchr(list, '\n')) != NULL; list++) {
            if (sscanf(list, " %lf %lf %*f %511[^\n]", &of_row[0], &of_row[1], row) < 3) continue;
            expect(of_row[0] <= cases[i].gb + 5e-4 && of_row[1] >= before, "%g GB, %g ms after %g: %s", of_row[0],
                   of_row[1], before, row);
            before = of_row[1];
            expect(strstr(row, text_of("--optimizer %s", cases[i].all)), "another method: %s", row);
            if (rows++ == 0) expect(strstr(row, cases[i].first), "%s: the first row is %s", flags, row);
            // Without --total-batch a step is one micro-batch, as the row's is if it says nothing else.
            predicted(&gb, &ms, text_of("%s %s --rate 300,25", cases[i].sizes, row));
            expect(fabs(gb - of_row[0]) < 2e-3 && fabs(ms - of_row[1]) <= 0.051 + 0.01 * ms,
                   "%s: the row says %g GB, %g ms, its flags take %g GB, %g ms", row, of_row[0], of_row[1], gb, ms);
            double fullest = fullest_stage(text_of("%s %s --rate 300,25", cases[i].sizes, row));
            expect((strstr(row, "--pp") != NULL) == (fullest > 0), "%s: no table of stages", row);
            if (fullest > 0) expect(fabs(fullest - of_row[0]) < 2e-3, "%s: the fullest stage has %g GB", row, fullest);
        }
        expect(rows > 1, "%s: %zu rows", flags, rows);
    }
    verdict("build/plan --memory: what fits, fastest first; the flags of a row take what it says");
}

// ------------------------------------------------------------------------------------------------
// Clusters

static ClusterModel cluster_405B(size_t T, size_t sequences) {
    ClusterModel m;
    Error error;
    memset(&m, 0, sizeof m);
    need(config_preset(&m.config, "llama:405B", &error) && config_complete(&m.config, &error), "%s", error.text);
    m.T = T;
    m.sequences = sequences;
    return m;
}

static Cluster cluster_of(const char* gpu) {
    Cluster c;
    Error error;
    need(cluster_open(&c, gpu, &error), "%s", error.text);
    return c;
}

static ClusterStep cluster_step(const Cluster* c, const ClusterModel* m, const ClusterLayout* l) {
    ClusterStep step;
    Error error;
    need(cluster_predict(&step, c, &CLUSTER_FIT, m, l, true, &error), "%s", error.text);
    return step;
}

// Llama 3's layout, and others on as many GPUs.
static const ClusterLayout LAYOUTS[] = {
    {8, 1, 16, 64, 8, 1, 1, 0, PIPELINE_INTERLEAVED, RECOMPUTE_NONE},
    {8, 1, 16, 64, 1, 1, 1, 8, PIPELINE_1F1B, RECOMPUTE_BLOCK},
    {4, 4, 16, 32, 1, 2, 1, 0, PIPELINE_ZB_H1, RECOMPUTE_GELU},
    {8, 1, 1, 1024, 1, 1, 3, 0, PIPELINE_1F1B, RECOMPUTE_BLOCK},
    {8, 1, 1, 1024, 1, 1, 2, 8, PIPELINE_1F1B, RECOMPUTE_ATTENTION},
    {2, 2, 32, 64, 2, 1, 1, 0, PIPELINE_INTERLEAVED, RECOMPUTE_NONE}};

// Each column of a data sheet, and of the network, made better.
static void test_cluster_rates(void) {
    ClusterModel m = cluster_405B(8192, 2048);
    for (size_t i = 0; i < COUNT_OF(LAYOUTS); i++) {
        Cluster c = cluster_of("H100");
        c.pod = 1024, c.oversubscription = 7, c.watts = 500;
        ClusterStep before = cluster_step(&c, &m, &LAYOUTS[i]);
        double* better[] = {&c.network, &c.gpu.link, &c.gpu.memory, &c.gpu.bf16, &c.watts};
        for (size_t k = 0; k < COUNT_OF(better); k++) {
            double was = *better[k];
            for (double factor = 1.1; factor < 20; factor *= 1.5) {
                *better[k] = was * factor;
                ClusterStep after = cluster_step(&c, &m, &LAYOUTS[i]);
                expect(after.ms <= before.ms && after.bytes == before.bytes, "layout %zu, rate %zu x %g: %g ms, not %g",
                       i, k, factor, after.ms, before.ms);
            }
            *better[k] = was;
        }
        c.oversubscription = 1;
        expect(cluster_step(&c, &m, &LAYOUTS[i]).ms <= before.ms, "layout %zu: a network without oversubscription", i);
        c.latency_ms = 0;
        ClusterStep after = cluster_step(&c, &m, &LAYOUTS[i]);
        expect(after.ms < before.ms && after.mfu < 1 && after.mfu > 0.1, "layout %zu: mfu %g", i, after.mfu);
        c.network = 1e-3;  // nothing hides this
        expect(cluster_step(&c, &m, &LAYOUTS[i]).dp_ms > 100 * before.ms, "layout %zu: a network of 1 MB/s", i);
    }
    verdict("clusters: a step is never slower with more bandwidth, power or flops; a slow network is not hidden");
}

// Ends that come from few micro-batches are those of the whole table, and equal stages lose what the formulas say.
static void test_cluster_bubbles(void) {
    double costs[PIPELINE_WORKS * 16], worst = 0;
    for (size_t kind = 0; kind < 5; kind++)
        for (size_t P = 2; P <= 16; P += 7)
            for (size_t micros = 1; micros < 200; micros += 11) {
                ClusterLayout l = {1, 1, P, 1, kind == PIPELINE_INTERLEAVED ? 3 : 1, 1, 1, 0, (PipelineKind)kind,
                                   RECOMPUTE_NONE};
                PipelineTable t;
                Error error;
                size_t slots[16];
                double ms = 0;
                for (size_t i = 0; i < PIPELINE_WORKS * P; i++)
                    costs[i] = 1 + 0.1 * (double)random_uniform(micros, RANDOM_TEST, kind, i);
                need(pipeline_table_make(&t, l.kind, P, micros, l.chunks, costs, 0.05, &error) &&
                     cluster_pipeline(&ms, slots, &l, micros, costs, 0.05, &error), "%s", error.text);
                worst = fmax(worst, fabs(ms / t.end - 1));
                expect(memcmp(slots, t.slots, P * sizeof *slots) == 0 || kind == PIPELINE_GPIPE ||
                       micros > 4 * P, "kind %zu: slots", kind);
                pipeline_table_free(&t);
            }
    verdict("clusters: the slots of pipelines");
    check_bound(worst, 0.03, "clusters: pipelines of many micro-batches end as their tables do");
    Cluster c = cluster_of("H100");
    c.latency_ms = 0, c.network = 1e9, c.gpu.link = 1e9;
    ClusterModel m = cluster_405B(8192, 2048);
    m.config.layers = 128;
    m.config.vocab = 128;  // a head that takes no time
    ClusterLayout l = LAYOUTS[0];
    for (l.chunks = 1; l.chunks <= 8; l.chunks *= 2) {
        ClusterStep step = cluster_step(&c, &m, &l);
        double lost = 15.0 / (double)l.chunks, share = step.bubble_ms / (step.ms - step.update_ms);
        check_bound(fabs(share / (lost / (32 + lost)) - 1), 0.01, "clusters: the bubble of 16 stages of %zu chunks",
                    l.chunks);
    }
}

// Bytes by hand: 405,853,388,800 parameters, of which a GPU of tp 8, pp 16 has a stage's.
static void test_cluster_memory(void) {
    ClusterModel m = cluster_405B(8192, 2048);
    const double block = 2 * 16384.0 * 128 * (128 + 8) + 3 * 53248.0 * 16384;
    const double table = 128256.0 * 16384;
    check_bound(fabs(cluster_parameters(&m.config) / 405853388800.0 - 1), 2e-5, "clusters: parameters, without norms");
    ClusterLayout l = LAYOUTS[0];
    double first = (8 * block + table) / 8, one = cluster_memory(&m, &l, 0, 1) - cluster_memory(&m, &l, 0, 0);
    // Of a row: input, attention_residual, two norms' outputs 4 C, H D of attention, q, k, v, 3 F; 4 (4 + H) of floats,
    // all divided by tp, with the norms' floats of the rows of sequence parallelism not divided.
    double row = 2 * (4 * 16384.0 + 16384 + 144 * 128 + 3 * 53248) / 8 + 4 * (4 + 16);
    check_bound(fabs(one / (8192 * row) - 1), 1e-3, "clusters: what a chunk of one block keeps");
    l.zero = 0;
    double none = cluster_memory(&m, &l, 0, 0);
    l.zero = 1;
    double shared = cluster_memory(&m, &l, 0, 0);
    check_bound(fabs((none - shared) / (12 * first * 63 / 64) - 1), 1e-6, "clusters: ZeRO 1 shards 12 bytes of each "
                "parameter");
    l = LAYOUTS[3];
    double all = (126 * block + 2 * table) / 8, fixed = cluster_memory(&m, &l, 0, 0);
    l.dp *= 2;
    double halved = fixed - cluster_memory(&m, &l, 0, 0);
    check_bound(fabs(halved / ((18 * all - 2 * 2 * table / 8) / 2048) - 1), 1e-3, "clusters: ZeRO 3 on twice the GPUs");
}

// Whether ./train takes a layout, up to the plan of the pipeline, whose table takes long to make for many stages.
static bool train_takes(const ClusterModel* m, const ClusterLayout* l, Error* error) {
    Layout layout = {.zero = l->zero, .shard = l->shard, .tp = l->tp, .cp = l->cp, .pp = l->pp,
                     .chunks = l->chunks > 1 ? l->chunks : 0, .leaves = l->tp, .row_leaves = l->cp,
                     .pipeline = l->kind};
    OptimizerOptions adamw = optimizer_defaults(OPTIMIZER_ADAMW);
    RankOptions ranks = {.tp = l->tp};
    layout.kv_copies = layout_kv_copies(&layout, &m->config);
    if (l->pp > 1 && pipeline_splits(l->kind) && l->recompute != RECOMPUTE_NONE)
        return fail_with(error, "--recompute with a split backward");
    return layout_check(&layout, l->tp * l->cp * l->pp * l->dp, &m->config, m->T, false, error) &&
           tensor_check(&ranks, &adamw, true, error);
}

// Sizes of clusters up to 131,072 GPUs: each layout has all GPUs, fits, runs, and is not faster than the one before.
static void test_cluster_search(void) {
    static const struct { const char* model; size_t T, sequences, gpus; } cases[] = {
        {"gpt2:124M", 1024, 512, 1}, {"llama:8B", 8192, 128, 8}, {"llama:8B", 8192, 120, 24},
        {"llama:70B", 8192, 512, 64}, {"llama:70B", 8192, 1536, 1536},
        {"llama:405B", 8192, 2048, 16384}, {"llama:405B", 131072, 128, 16384},
        {"llama:405B", 8192, 8192, 131072}};
    ClusterChoice* choices = (ClusterChoice*)memory_allocate(CLUSTER_CHOICES * sizeof *choices);
    double began_ms = now_ms();
    for (size_t i = 0; choices && i < COUNT_OF(cases); i++) {
        Cluster c = cluster_of(i % 2 ? "H100" : "A100");
        ClusterModel m = cluster_405B(cases[i].T, cases[i].sequences);
        size_t count = 0;
        Error error;
        if (cases[i].gpus < 8) c.machine = cases[i].gpus;
        need(config_preset(&m.config, cases[i].model, &error) && config_complete(&m.config, &error), "%s", error.text);
        const Layout any = {.tp = 0}, pairs = {.tp = 2};
        expect(cluster_search(choices, &count, &c, &m, &pairs, cases[i].gpus, 76, &error) == (cases[i].gpus > 1),
               "%s on %zu GPUs with --tp 2", cases[i].model, cases[i].gpus);
        for (size_t k = 0; k < count && cases[i].gpus > 1; k++) expect(choices[k].layout.tp == 2, "--tp 2 alone");
        expect(cluster_search(choices, &count, &c, &m, &any, cases[i].gpus, 76, &error) && count > 0, "%s on %zu GPUs",
               cases[i].model, cases[i].gpus);
        for (size_t k = 0; k < count; k++) {
            const ClusterLayout* l = &choices[k].layout;
            expect(train_takes(&m, l, &error), "%s on %zu GPUs: tp %zu cp %zu pp %zu dp %zu: %s", cases[i].model,
                   cases[i].gpus, l->tp, l->cp, l->pp, l->dp, error.text);
            expect(l->tp * l->cp * l->pp * l->dp == cases[i].gpus && choices[k].step.bytes <= 76e9 &&
                   (k == 0 || choices[k].step.ms >= choices[k - 1].step.ms) &&
                   m.sequences % (l->dp * l->B) == 0 && l->pp * l->chunks <= m.config.layers && choices[k].step.mfu < 1,
                   "%s on %zu GPUs: tp %zu cp %zu pp %zu dp %zu, %g GB", cases[i].model, cases[i].gpus, l->tp, l->cp,
                   l->pp, l->dp, 1e-9 * choices[k].step.bytes);
        }
    }
    free(choices);
    verdict("clusters: layouts of 1 to 131,072 GPUs");
    check(now_ms() < began_ms + 60e3, "clusters: %.1f s for these lists", 1e-3 * (now_ms() - began_ms));
}

// Llama 3 lost less than 10% of 54 days of 16,384 GPUs to 419 failures; INTELLECT-1's inner steps of 38 minutes and
// exchanges of 103 and 469 seconds gave 95.7% and 82.9%.
static void test_cluster_months(void) {
    Goodput g = goodput_of(16384, 50700, 1, 3.2, 600);
    check(g.share > 0.9 && fabs(g.mtbf_s / 3600 - 3.09) < 0.01, "clusters: Llama 3, %.3f of the time, a failure in "
          "%.2f h", g.share, g.mtbf_s / 3600);
    check_bound(fabs(goodput_of(16384, 50700, 30, 0, 600).share - 0.873), 1e-3, "clusters: with stalls of 30 s");
    check_bound(fabs(goodput_of(131072, 50700, 1, 0, 600).share - 0.531), 1e-3, "clusters: of 131,072 GPUs");
    check_bound(goodput_of(1e7, 50700, 30, 0, 600).share, 0, "clusters: too many GPUs to train");
    check(goodput_of(1024, 50700, 1, 1e4, 600).every_s == 1e4, "clusters: not before the last checkpoint is written");
    // 103 and 469 s for 2 x 10.2e9 bytes x 13 / 14.
    check_bound(fabs(islands_share(10.2e9, 14, 2 * 10.2 * 13 / 14 / 103, 100, 22800) - 0.957), 1e-3, "clusters: "
                "INTELLECT-1 in the United States");
    check_bound(fabs(islands_share(10.2e9, 14, 2 * 10.2 * 13 / 14 / 469, 100, 22800) - 0.829), 1e-3, "clusters: "
                "INTELLECT-1 on three continents");
    check(islands_share(10.2e9, 1, 1e-9, 1, 1) == 1, "clusters: one island has nobody to wait for");
}

static void test_cluster_program(void) {
    double ms[2], share[2], price, hours, energy;
    const char* base = "--model llama:70B --seq 8192 --total-batch 4194304 --steps 1000 --gpus 512 ";
    const char* flags = "--network 400,256,7 --gpu-mtbf 500 --gpu-price 3";
    const char *said = program_says(plan_program, 0, text_of("%s%s", base, flags)), *row = strstr(said, "layout\n");
    const char *months = strstr(said, "fails every 1.0 hours: "), *cost = strstr(said, "1000 steps");
    bool read = row && months && cost && sscanf(row, "layout %lf", &ms[0]) == 1 &&
        sscanf(months, "fails every 1.0 hours: with a checkpoint of 0.99 TB every %*f minutes, %lf", &share[0]) == 1 &&
        sscanf(cost, "1000 steps, 4.19e+09 tokens: %*f days, %lf GPU hours, %lf at 3 an hour, %lf", &hours, &price,
               &energy) == 3;
    check(read && fabs(price / (3 * hours) - 1) < 0.01 && fabs(energy / (0.7e-3 * hours) - 1) < 0.01 &&
          fabs(hours / (1000 * ms[0] / 3.6e6 / (0.01 * share[0]) * 512) - 1) < 0.02, "build/plan --gpus: cost, energy");
    said = program_says(plan_program, 0, text_of("%s--gpu-watts 350 --islands 4 --internet 100", base));
    row = strstr(said, "layout\n");
    read = row && sscanf(row, "layout %lf", &ms[1]) == 1;
    const char* island = strstr(said, "4 clusters that average every 100 steps at 100 Gbit/s: ");
    read = read && island && sscanf(strchr(island, ':'), ": %lf", &share[1]) == 1;
    check(read && ms[1] > 1.15 * ms[0] && fabs(share[1] / 100 - islands_share(70.55e9, 4, 12.5, 100, ms[1])) < 2e-3,
          "build/plan --gpus: half the power, four clusters");
}

static void test_cluster_refusals(void) {
    static const struct { const char *arguments, *says; } cases[] = {
        {"--model llama:8B --gpus 8 --total-batch 65536 --gpu X100", "there is no data sheet of a GPU named 'X100'"},
        {"--model llama:8B --gpus 8 --total-batch 65536 --gpu 'GeForce-RTX-4090'", "there is no data sheet"},
        {"--model llama:8B --gpus 8", "--gpus needs --total-batch"},
        {"--model llama:8B --gpus 8 --total-batch 65535", "--gpus needs --total-batch"},
        {"--layers 2 --heads 2 --channels 64 --seq 64 --gpus 8 --total-batch 64", "--gpus needs --vocab"},
        {"--model llama:9B --gpus 8 --total-batch 65536", "there is no model 'llama:9B'"},
        {"--model llama:8B --gpus 8 --total-batch 65536 --network fast", "--network is 'fast'"},
        {"--model llama:8B --gpus 8 --total-batch 65536 --network 400,8", "--network is '400,8'"},
        {"--model llama:8B --gpus 8 --total-batch 65536 --network 400,8,0.5", "--network is '400,8,0.5'"},
        {"--model llama:405B --gpus 8 --total-batch 65536", "no layout of 8 GPUs fits in 76 GB; the smallest needs"},
        {"--model llama:8B --gpus 37 --total-batch 65536", "no layout of 37 GPUs divides a step of 8 seq"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char* said = program_says(plan_program, 2, cases[i].arguments);
        expect(strstr(said, cases[i].says), "%s: %s", cases[i].arguments, said);
    }
    verdict("build/plan --gpus: refusals");
}

static void test_program(void) {
    double gb, slow, fast;
    predicted(&gb, &slow, SMALL "--ranks 2 --total-batch 192 --rate 1,0.1,0.1,0.1");
    predicted(&gb, &fast, SMALL "--ranks 2 --total-batch 192 --rate 10,1,1,1");
    check_bound(fabs(slow / fast / 10 - 1), 0.05, "a step at ten times the rates takes a tenth of the time");
    predicted(&gb, &fast, SMALL);
    check(gb > 0 && fast > 0, "without --rate: measured here, %.3f ms", fast);
    static const struct { int code; const char *arguments, *says; } cases[] = {
        {0, SMALL "--ranks 2 --memory 1 --rate 300,25", "--zero 0 --reduce exact is the lowest stage that fits in"},
        {0, SMALL "--ranks 2 --memory 1 --rate 100,10", "--zero 1 --optimizer adamw"},
        {1, SMALL "--memory 0.001 --rate 300,25", "plan: no flags fit --memory 0.001; make"},
        {-1, SMALL "--memory 0.001 --rate 300,25", "nothing fits in 0.001 GB; the nearest needs 0."},
        {-1, SMALL "--memory 0.001 --rate 300,25", "--batch 1 --optimizer adamw"},
        {-1, SMALL "--memory 0.001 --rate 300,25", "--recompute auto --memory 0."},
        {0, SMALL "--recompute norms --rate 300,25", "recomputation: +"},
        {0, SMALL "--offload optimizer --offload-dir . --rate 300,25,1,2", "waiting for the offloaded optimizer state"},
        // 16 of 1504 parameters are trained.
        {0, "--layers 1 --heads 1 --channels 8 --vocab 61 --seq 16 --batch 3 --rate 300,25 --train final_norm*",
         "bytes per parameter: adamw 0.09, sgd 0.00, momentum 0.04, lion 0.04, "},
        {0, "--help", "--rate F,M"},
        {0, "--help", "--total-batch N"},
        {1, SMALL "--data none", "plan: no file matches 'none'"},
        {2, SMALL "--rate 300", "plan: --rate is '300'; give"},
        {2, SMALL "--rate 300,0", "--rate is '300,0'; give"},
        {2, SMALL "--rate 300,25,1,2,", "--rate is '300,25,1,2,'; give"},
        {2, SMALL "--rate 300,25,", "as in 300,25 or 300,25,1,2"},
        {2, SMALL "--rate nan,25", "--rate is 'nan,25'; give"},
        {2, SMALL "--rates 300,25", "did you mean --rate?"},
        {2, SMALL "--recompute auto", "plan: --recompute auto needs --memory"},
        {2, SMALL "--total-batch 33", "--total-batch 33 is not a multiple"},
        {2, "--seq 16", "plan: "},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char* said = program_says(plan_program, cases[i].code, cases[i].arguments);
        expect(strstr(said, cases[i].says) != NULL, "%s: no '%s' in: %s", cases[i].arguments, cases[i].says, said);
        expect(cases[i].code <= 0 || (strchr(said, '\n') && strchr(said, '\n')[1] == 0), "%s: not one line: %s",
               cases[i].arguments, said);
    }
    verdict("build/plan: stages, what is nearest if nothing fits, recomputation, offloading; refusals in one sentence");
}

// ------------------------------------------------------------------------------------------------
// Containers

static void group_put(const char* group, const char* file, const char* text) {
    Error error;
    need(directory_make(text_of("root/%s", group), &error), "%s", error.text);
    put_text(text_of("root/%s/%s", group, file), text);
}

// What container.h finds in a file system of our own, as machines, containers and schedulers have it.
static void test_containers(void) {
    static const struct {
        const char* name;
        const char* files[8][3];  // a directory, a file and its text
        double memory, processors;
    } cases[] = {
        {"no limits", {{"proc/self", "cgroup", "0::/\n"}}, (double)SIZE_MAX, INFINITY},
        {"version 2 in a container: the page cache is free",
         {{"proc/self", "cgroup", "0::/\n"}, {"sys/fs/cgroup", "memory.max", "4000000000\n"},
          {"sys/fs/cgroup", "memory.current", "3990000000\n"}, {"sys/fs/cgroup", "cpu.max", "max 100000\n"},
          {"sys/fs/cgrou", "memory.max", "1\n"}, {"sys/fs/cgrou", "memory.current", "0\n"},  // above all groups
          {"sys/fs/cgroup", "memory.stat", "anon 100000000\nfile 3880000000\ninactive_file 3800000000\n"
           "active_file 80000000\nslab_reclaimable 1000000\nslab_unreclaimable 7\n"}},
         4000000000. - 3990000000. + 3881000000., INFINITY},
        {"version 2, a scope: the least of all levels",
         {{"proc/self", "cgroup", "0::/a.slice/run.scope\n"}, {"sys/fs/cgroup/a.slice", "memory.max", "max\n"},
          {"sys/fs/cgroup/a.slice", "memory.current", "900000000\n"},
          {"sys/fs/cgroup/a.slice", "cpu.max", "50000 100000\n"},
          {"sys/fs/cgroup/a.slice/run.scope", "memory.max", "500000000\n"},
          {"sys/fs/cgroup/a.slice/run.scope", "memory.current", "100000000\n"},
          {"sys/fs/cgroup/a.slice/run.scope", "cpu.max", "150000 100000\n"}}, 400000000, 0.5},
        {"version 1: a parent's limit",
         {{"proc/self", "cgroup", "5:cpu,cpuacct:/job\n4:memory:/a/b\n1:name=systemd:/\n"},
          {"sys/fs/cgroup/memory/a/b", "memory.limit_in_bytes", "9223372036854771712\n"},
          {"sys/fs/cgroup/memory/a/b", "memory.usage_in_bytes", "1000\n"},
          {"sys/fs/cgroup/memory/a", "memory.limit_in_bytes", "300000000\n"},
          {"sys/fs/cgroup/memory/a", "memory.usage_in_bytes", "200000000\n"},
          {"sys/fs/cgroup/memory/a", "memory.stat", "inactive_file 1\ntotal_inactive_file 50000000\n"},
          {"sys/fs/cgroup/cpu,cpuacct/job", "cpu.cfs_quota_us", "25000\n"},
          {"sys/fs/cgroup/cpu,cpuacct/job", "cpu.cfs_period_us", "100000\n"}}, 150000000, 0.25},
        {"version 1 in a container: its group is at the mount point",
         {{"proc/self", "cgroup", "4:memory:/docker/abc\n3:cpu:/docker/abc\n"},
          {"sys/fs/cgroup/memory", "memory.limit_in_bytes", "100000\n"},
          {"sys/fs/cgroup/memory", "memory.usage_in_bytes", "250000\n"},
          {"sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "-1\n"},
          {"sys/fs/cgroup/cpu", "cpu.cfs_period_us", "100000\n"}}, 0, INFINITY},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        remove_tree("root");
        for (size_t f = 0; f < COUNT_OF(cases[i].files) && cases[i].files[f][0]; f++)
            group_put(cases[i].files[f][0], cases[i].files[f][1], cases[i].files[f][2]);
        ContainerLimits found = container_limits("root");
        expect((double)found.memory == cases[i].memory && found.processors == cases[i].processors,
               "%s: %zu bytes, %g processors", cases[i].name, found.memory, found.processors);
    }
    verdict("containers: memory and processor time of both versions of control groups, at every level");
}

// A child joins the groups and says what it has.
static void groups_tell(const void* context) {
    const char* const* folders = (const char* const*)context;
    for (int i = 0; i < 2; i++) put_text(text_of("%s/cgroup.procs", folders[i]), text_of("%d", (int)getpid()));
    size_t free_before = container_limits("").memory;
    char* used = (char*)malloc((size_t)40 << 20);
    for (size_t i = 0; used && i < (size_t)40 << 20; i += 4096) used[i] = 1;
    size_t left = container_limits("").memory;
    threads_set(4);
    threads_choose(0, 1, false, stdout);
    printf("%zu MB, then %zu, %g processors, %zu threads\n", free_before >> 20, left >> 20,
           container_limits("").processors, threads_count());
    free(used);
}

// Groups that the kernel keeps, where the test may make them.
static void test_real_groups(void) {
    const char* folders[2] = {text_of("/sys/fs/cgroup/memory/llmtrain-%d", (int)getpid()),
                              text_of("/sys/fs/cgroup/cpu/llmtrain-%d", (int)getpid())};
    Program child;
    size_t mb[2] = {0, 0}, threads = 0;
    double processors = 0;
    bool made[2] = {mkdir(folders[0], 0755) == 0, mkdir(folders[1], 0755) == 0};
    if (made[0] && made[1]) {
        put_text(text_of("%s/memory.limit_in_bytes", folders[0]), "200000000");
        put_text(text_of("%s/cpu.cfs_quota_us", folders[1]), "150000");
        put_text(text_of("%s/cpu.cfs_period_us", folders[1]), "100000");
        program_start(&child, NULL, groups_tell, folders);
        programs_wait(&child, 1, PROGRAM_MS);
        const char* line = child.text[0] ? strstr(child.text[0], "container has the time of 1.5 of 4 processors") : NULL;
        line = line ? strchr(line, '\n') : NULL;
        int found = line ? sscanf(line + 1, "%zu MB, then %zu, %lf processors, %zu", &mb[0], &mb[1], &processors,
                                  &threads) : 0;
        check(found == 4 && mb[0] > 120 && mb[0] <= 190 && mb[0] - mb[1] >= 39 && mb[0] - mb[1] < 60 &&
                  processors == 1.5 && threads == 2,
              "in a group of 200 MB and one of 1.5 processors: %zu MB, then %zu, %g processors, %zu threads", mb[0],
              mb[1], processors, threads);
        program_free(&child);
    } else {
        skip("real control groups", "/sys/fs/cgroup/memory and cpu are not ours");
    }
    for (int i = 0; i < 2; i++) if (made[i]) rmdir(folders[i]);
}

// A plan that cannot be written is a failure.
static void test_full_output(void) {
    Program p;
    Words words = {.count = 0};
    const char* line = text_of("exec %s " SMALL "> /dev/full", plan_program);
    words_add(&words, "sh -c");
    words_put(&words, words.count, line, strlen(line));
    program_start(&p, words.words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    check(program_code(&p) == 1 && strstr(p.text[1], "standard output"), "build/plan on a full disk: %s", p.text[1]);
    program_free(&p);
}

// Programs start themselves again with a short spin of OpenMP's threads, unless the user has decided.
static void test_spin(void) {
    static const struct { const char *variables, *count; } cases[] = {
        {"", "'1000'"}, {"GOMP_SPINCOUNT=77", "'77'"}, {"OMP_WAIT_POLICY=passive", "'0'"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Program p;
        Words words = {.count = 0};
        words_add(&words, text_of("env -u OMP_WAIT_POLICY OMP_DISPLAY_ENV=verbose %s %s --help", cases[i].variables,
                                  train_program));
        program_start(&p, words.words, NULL, NULL);
        programs_wait(&p, 1, PROGRAM_MS);
        const char *at = p.text[1], *last = NULL;
        while ((at = strstr(at, "GOMP_SPINCOUNT = ")) != NULL) last = at += strlen("GOMP_SPINCOUNT = ");
        if (i == 0 && last == NULL) {
            skip("the spin of threads", "the OpenMP of this compiler has another");
            program_free(&p);
            return;
        }
        expect(last && strncmp(last, cases[i].count, strlen(cases[i].count)) == 0, "%s: GOMP_SPINCOUNT is %.10s",
               cases[i].variables, last ? last : "unknown");
        program_free(&p);
    }
    verdict("threads that wait spin briefly, or as the user says");
}

int main(int argc, char** argv) {
    static char paths[2][PATH_MAX];
    const Flag rows[] = {FLAG_TEXT("plan", &plan_program, plan_program, "PATH", 0, "the program, for BF16"),
                         FLAG_TEXT("train", &train_program, train_program, "PATH", 0, "the trainer, for BF16")};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_plan", NULL, &flags, argc, argv)) return code;
    tests_begin("test_plan");
    need(realpath(plan_program, paths[0]) != NULL, "%s", plan_program);
    need(realpath(train_program, paths[1]) != NULL, "%s", train_program);
    plan_program = paths[0];
    train_program = paths[1];
    environment_clear();
    root_enter();
    test_activations();
    test_memory();
    test_tensor_memory();
    test_impossible();
    test_scratch();
    test_operations();
    test_recompute();
    test_offload();
    test_moved();
    test_tensor_refusals();
    test_same();
    test_lora();
    test_choices();
    test_cluster_rates();
    test_cluster_bubbles();
    test_cluster_memory();
    test_cluster_search();
    test_cluster_months();
    test_cluster_program();
    test_cluster_refusals();
    test_program();
    test_containers();
    test_real_groups();
    test_spin();
    test_full_output();
    return tests_end();
}
