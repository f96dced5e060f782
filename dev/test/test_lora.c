// test_lora.c: LoRA: the gradients of its pairs, training with it, and adapters in the format of PEFT.
//
//   build/test_lora --train build/train-FP32 --export build/export --generate build/generate-FP32
//
//   1. gradients   against PEFT in float64 (dev/peers/lora.py), and against differences of the loss, with dropout too
//   2. training    what the pairs leave alone; recomputing; two models; the same bits on any layout; kill and resume
//   3. adapters    in and out of the format of PEFT, merged, added up; refusals
//   4. 4 bits      --quantize: the codes of bitsandbytes; the bits of training beside what they stand for; on any layout

#define main train_main
#include "train.cu"
#undef main
#include "tools/export.h"
#include "tools/open.h"

#include "pieces.h"
#include "small_model.h"

static char fixtures[PATH_MAX], train_program[PATH_MAX], export_program[PATH_MAX], generate_program[PATH_MAX];

// Runs a program of the build, its output in the file "output"; returns its exit code.
static int run_program(const char* program, const char* line) {
    int status = system(text_of("OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive %s %s > output 2>&1", program, line));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static bool output_has(const char* words) {
    char* text = text_read("output", NULL);
    bool found = strstr(text, words) != NULL;
    free(text);
    return found;
}

// ------------------------------------------------------------------------------------------------
// 1. Gradients

enum { B = 2, T = 12, N = B * T };

static const struct { const char *name, *base; } CASES[] = {
    {"llama_all", "llama"}, {"llama_qv_rs", "llama"}, {"llama_tied_qv", "llama_tied"}, {"qwen2_all_rs", "qwen2"},
    {"gpt2_all", "gpt2"}, {"gpt2_qv_rs", "gpt2"}};

static void* tensor_of(const char* name, size_t* bytes) {
    SafetensorsFile f;
    Error error;
    void* data = NULL;
    need(safetensors_open(&f, "expected.safetensors", &error), "%s", error.text);
    for (size_t i = 0; i < f.header.count; i++) {
        const SafetensorsTensor* t = &f.header.tensors[i];
        if (strcmp(t->name, name) != 0) continue;
        data = memory_allocate(t->bytes);
        need(safetensors_read_range(&f, t, 0, t->bytes, data, &error), "%s", error.text);
        if (bytes) *bytes = t->bytes;
    }
    safetensors_close(&f);
    need(data != NULL, "the fixture has no %s", name);
    return data;
}

// The largest difference over the largest value.
static double apart(const float* found, const char* name, size_t n, double scale, bool relative) {
    size_t bytes;
    float* expected = (float*)tensor_of(name, &bytes);
    double worst = 0, most = 0;
    need(bytes == n * sizeof(float), "%s", name);
    for (size_t i = 0; i < n; i++) {
        double difference = fabs((double)found[i] * scale - (double)expected[i]);
        worst = difference > worst || isnan(difference) ? difference : worst;
        most = fmax(most, fabs((double)expected[i]));
    }
    free(expected);
    return relative ? worst / most : worst;
}

// Calls what for each pair of a model: with the tensor of a or b, and its name at PEFT.
static void each_pair(const Model* model, const Adapter* a, ModelSource* s,
                      void (*what)(const Model*, const Tensor*, const char* name, void* context), void* context) {
    ForeignTensor* list;
    size_t count;
    Error error;
    need(convert_list(&list, &count, &s->config, &s->parameters, &error), "%s", error.text);
    for (size_t i = 0; i < model->config.layers * BLOCK_LINEARS; i++) {
        const Linear* linears[BLOCK_LINEARS];
        char module[96];
        block_linears(linears, &model->weights.blocks[i / BLOCK_LINEARS]);
        for (size_t k = 0; k < 2 * linears[i % BLOCK_LINEARS]->pair_count; k++) {
            const LoraPair* p = &linears[i % BLOCK_LINEARS]->pairs[k / 2];
            const char* weight = model_tensor(model, linears[i % BLOCK_LINEARS]->weight)->name;
            peft_module(module, list, adapter_find(a, s, weight, p->first));
            what(model, model_tensor(model, k % 2 ? p->b : p->a), text_of("%s.lora_%c", module, k % 2 ? 'B' : 'A'),
                 context);
        }
    }
    free(list);
}

static void compare_gradient(const Model* model, const Tensor* t, const char* name, void* worst) {
    size_t n = tensor_elements(t);
    float* found = (float*)memory_allocate(n * sizeof(float));
    device_download(found, flat_gradient(&model->flat, t), n * sizeof(float), model->stream);
    *(double*)worst = fmax(*(double*)worst, apart(found, text_of("grad.%s", name), n, flat_scale(&model->flat), true));
    free(found);
}

static void compare_weight(const Model* model, const Tensor* t, const char* name, void* worst) {
    size_t n = tensor_elements(t);
    float* found = (float*)memory_allocate(n * sizeof(float));
    floats_download(found, flat_param(&model->flat, t), n, model);
    *(double*)worst = fmax(*(double*)worst, apart(found, text_of("after.%s", name), n, 1, false));
    free(found);
}

static void test_fixtures(void) {
    for (size_t c = 0; c < COUNT_OF(CASES); c++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%.3000s/%s", fixtures, CASES[c].name);
        const bool given[3] = {false, false, false};
        ModelSource s;
        Adapter a;
        Model model;
        Error error;
        int32_t tokens[N], targets[N];
        double gradients = 0, weights = 0, merged = 0, first = 0;
        ModelOptions options = small_options(B, T);
        need(unlink("expected.safetensors") == 0 || errno == ENOENT, "unlink");
        need(symlink(text_of("%s/expected.safetensors", path), "expected.safetensors") == 0, "symlink");
        need(source_open(&s, text_of("%s/%s", fixtures, CASES[c].base), &error) && adapter_open(&a, path, &s, &error),
             "%s", error.text);
        Config config = s.config;
        config.lora = a.r;
        need(adapter_configure(&config, &a, &s, given, &error), "%s", error.text);
        options.optimizer.beta2 = 0.95;
        options.optimizer.weight_decay = 0.1;
        need(model_create(&model, &config, options, &error) && source_load(&model, &s, "init-from", &error) &&
             adapter_set(&model, &a, &s, &error), "%s", error.text);
        int32_t* batch = (int32_t*)tensor_of("tokens", NULL);
        double* loss = (double*)tensor_of("loss", NULL);
        for (size_t i = 0; i < N; i++) {
            tokens[i] = batch[i / T * (T + 1) + i % T];
            targets[i] = batch[i / T * (T + 1) + i % T + 1];
        }
        for (uint64_t step = 0; step < 5; step++) {
            double found = batch_gradients(&model, NULL, tokens, targets, B, T);
            if (step == 0) first = fabs(found / *loss - 1);
            if (step == 0) each_pair(&model, &a, &s, compare_gradient, &gradients);
            model_update(&model, step + 1, 1e-3, 1);
        }
        each_pair(&model, &a, &s, compare_weight, &weights);
        check_bound(first, 1e-6, "%s: loss of PEFT", CASES[c].name);
        check_bound(gradients, 2e-6, "%s: gradients of PEFT", CASES[c].name);
        check_bound(weights, 1e-5, "%s: weights after 5 steps of AdamW", CASES[c].name);
        model_free(&model);
        const char* last = s.config.family == FAMILY_GPT2 ? "transformer.h.1.attn.c_attn.weight"
                                                           : "model.layers.1.self_attn.v_proj.weight";
        ForeignTensor* list = NULL;
        size_t count, i = 0;
        const float* values;
        need(source_add_adapters(&s, path, NULL, &error) &&
             convert_list(&list, &count, &s.config, &s.parameters, &error), "%s", error.text);
        while (strcmp(list[i].name, last) != 0) i++;
        need(source_read(&values, &s, list[i].tensor, &error), "%s", error.text);
        size_t n = list[i].rows * list[i].cols;
        float* theirs = (float*)memory_allocate(n * sizeof(float));
        for (size_t e = 0; e < n; e++)
            theirs[e] = values[list[i].first * list[i].cols +
                               (list[i].transposed ? e % list[i].rows * list[i].cols + e / list[i].rows : e)];
        merged = apart(theirs, text_of("merged.%s", last), n, 1, false);
        check_bound(merged, 1e-6, "%s: weights of merge_and_unload", CASES[c].name);
        free(theirs);
        free(list);
        free(batch);
        free(loss);
        adapter_close(&a);
        source_close(&s);
    }
}

// A model with pairs of which no element is zero.
static void lora_model(Model* model, Family family, int targets, float dropout, ModelOptions options) {
    Config c = small_config(family);
    Error error;
    c.lora = 3;
    c.lora_alpha = 7;
    c.lora_targets = targets;
    options.lora_drops = dropout > 0;
    small_create(model, &c, options, 5);
    model->dropout.adapters = dropout;
    model->dropout.seed = 3;
    for (uint32_t i = 0; i < model->parameters.count; i++) {
        const TensorId id = {i};
        const Tensor* t = model_tensor(model, id);
        size_t n = tensor_elements(t);
        float* values = (float*)memory_allocate(n * sizeof(float));
        for (size_t e = 0; e < n; e++)
            values[e] = (float)((double)random_bits(7, RANDOM_TEST, i, e) * 0x1p-32 * 0.2 - 0.1);
        if (t->adapter == 'b') need(flat_set_params(&model->flat, id, 0, values, n, &error), "%s", error.text);
        free(values);
    }
}

// Differences of the loss along random directions in all a, and in all b, against the gradients.
static void test_differences(void) {
    static const struct { Family family; int targets; float dropout; } cases[] = {
        {FAMILY_GPT2, LORA_QKV, 0}, {FAMILY_GPT2, LORA_ATTENTION_OUT, 0}, {FAMILY_GPT2, LORA_FFN_IN, 0},
        {FAMILY_GPT2, LORA_FFN_OUT, 0}, {FAMILY_GPT2, 0, 0.3f}, {FAMILY_LLAMA, LORA_Q, 0}, {FAMILY_LLAMA, LORA_K, 0},
        {FAMILY_LLAMA, LORA_V, 0}, {FAMILY_LLAMA, LORA_QKV, 0}, {FAMILY_LLAMA, LORA_ATTENTION_OUT, 0},
        {FAMILY_LLAMA, LORA_GATE, 0}, {FAMILY_LLAMA, LORA_UP, 0}, {FAMILY_LLAMA, LORA_FFN_IN, 0},
        {FAMILY_LLAMA, LORA_FFN_OUT, 0}, {FAMILY_LLAMA, 0, 0}, {FAMILY_LLAMA, 0, 0.3f}};
    int32_t tokens[N], targets[N];
    random_tokens(tokens, N, 61, 1);
    random_tokens(targets, N, 61, 2);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        Model model;
        Error error;
        double worst = 0;
        lora_model(&model, cases[c].family, cases[c].targets, cases[c].dropout, small_options(B, T));
        size_t P = model.parameters.flat_size;
        float *grads = (float*)memory_allocate(P * sizeof(float)), *start = (float*)memory_allocate(P * sizeof(float));
        float* direction = (float*)memory_allocate(P * sizeof(float));
        float* moved = (float*)memory_allocate(P * sizeof(float));
        batch_gradients(&model, NULL, tokens, targets, B, T);
        for (uint32_t i = 0; i < model.parameters.count; i++) {
            const Tensor* t = &model.parameters.tensors[i];
            if (!t->adapter) continue;
            device_download(grads + t->offset, flat_gradient(&model.flat, t), t->size * sizeof(float), model.stream);
            floats_download(start + t->offset, flat_param(&model.flat, t), t->size, &model);
        }
        for (int round = 0; round < 6; round++) {
            double length = 0, along = 0, size = 0, losses[2];
            for (uint32_t i = 0; i < model.parameters.count; i++) {
                const Tensor* t = &model.parameters.tensors[i];
                for (size_t e = t->offset; t->adapter == "ab"[round % 2] && e < t->offset + t->size; e++) {
                    direction[e] = (float)((double)random_bits(8, RANDOM_TEST, (uint64_t)round, e) * 0x1p-32 - 0.5);
                    length += (double)direction[e] * (double)direction[e];
                    along += (double)direction[e] * (double)grads[e] * flat_scale(&model.flat);
                    size += pow((double)grads[e] * flat_scale(&model.flat), 2);
                }
            }
            for (int side = 0; side < 2; side++) {
                for (uint32_t i = 0; i < model.parameters.count; i++) {
                    const Tensor* t = &model.parameters.tensors[i];
                    const TensorId id = {i};
                    if (t->adapter != "ab"[round % 2]) continue;
                    for (size_t e = t->offset; e < t->offset + t->size; e++)
                        moved[e] = start[e] + (side ? -0.1f : 0.1f) * direction[e] / (float)sqrt(length);
                    need(flat_set_params(&model.flat, id, 0, moved + t->offset, t->size, &error), "%s", error.text);
                }
                losses[side] = batch_gradients(&model, NULL, tokens, targets, B, T);
            }
            for (uint32_t i = 0; i < model.parameters.count; i++) {
                const TensorId id = {i};
                const Tensor* t = &model.parameters.tensors[i];
                if (t->adapter) need(flat_set_params(&model.flat, id, 0, start + t->offset, t->size, &error), "set");
            }
            double difference = fabs((losses[0] - losses[1]) / 0.2 - along / sqrt(length)) / sqrt(size);
            worst = difference > worst || isnan(difference) ? difference : worst;
        }
        check_bound(worst, 1e-3, "%s, targets %d, dropout %g: differences of the loss", family_name(cases[c].family),
                    cases[c].targets, (double)cases[c].dropout);
        free(grads);
        free(start);
        free(direction);
        free(moved);
        model_free(&model);
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Training

// New pairs change nothing: b is 0. And scale 0 switches any off.
static void test_beginning(void) {
    int32_t tokens[N], targets[N];
    random_tokens(tokens, N, 61, 1);
    random_tokens(targets, N, 61, 2);
    for (int f = 0; f < 2; f++) {
        Family family = f ? FAMILY_LLAMA : FAMILY_GPT2;
        Model base, model;
        Config c = small_config(family);
        small_create(&base, &c, small_options(B, T), 5);
        c.lora = 4;
        small_create(&model, &c, small_options(B, T), 5);
        double expected = batch_gradients(&base, NULL, tokens, targets, B, T);
        check(batch_gradients(&model, NULL, tokens, targets, B, T) == expected,
              "%s: new pairs: the base's loss to the bit", family_name(family));
        model_free(&model);
        lora_model(&model, family, 0, 0, small_options(B, T));
        expect(batch_gradients(&model, NULL, tokens, targets, B, T) != expected, "pairs have no effect");
        model.layers.adapters.scale = 0;
        expect(batch_gradients(&model, NULL, tokens, targets, B, T) == expected, "scale 0 leaves an effect");
        verdict("%s: pairs have an effect, and with a scale of 0 none", family_name(family));
        model_free(&model);
        model_free(&base);
    }
}

static void step_of(Model* model, uint64_t step) {
    int32_t tokens[N], targets[N];
    random_tokens(tokens, N, 61, 2 * step);
    random_tokens(targets, N, 61, 2 * step + 1);
    batch_gradients(model, NULL, tokens, targets, B, T);
    model_update(model, step, 0.01, 1);
}

// A hash of all weights. The optimizer has no state of those that are frozen.
static uint64_t weights_of(const Model* model) {
    Hash hash = hash_begin(0);
    for (uint32_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        hash_add(&hash, flat_param(&model->flat, t), t->size * sizeof(floatX));
    }
    return hash_end(&hash);
}

// Every b changes in a step, whatever is computed again; nothing else than the pairs does; another model beside it
// changes no bit.
static void test_steps(void) {
    for (int f = 0; f < 2; f++) {
        uint64_t first = 0;
        for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK + 1; level++) {
            bool two = level > RECOMPUTE_BLOCK;
            Model model, other, before;
            Config c = small_config(f ? FAMILY_LLAMA : FAMILY_GPT2);
            ModelOptions options = small_options(B, T);
            options.recompute = two ? RECOMPUTE_NONE : (RecomputeLevel)level;
            options.lora_drops = true;
            c.lora = 4;
            small_create(&model, &c, options, 5);
            small_create(&before, &c, options, 5);
            model.dropout.adapters = 0.2f;
            if (two) lora_model(&other, f ? FAMILY_GPT2 : FAMILY_LLAMA, 0, 0.1f, small_options(B, T));
            step_of(&model, 1);
            for (uint32_t i = 0; i < model.parameters.count; i++) {
                const Tensor* t = &model.parameters.tensors[i];
                size_t bytes = t->size * sizeof(floatX);
                bool same = memcmp(flat_param(&model.flat, t), flat_param(&before.flat, t), bytes) == 0;
                // The first gradient of a is 0, as b is: but AdamW lets it decay.
                if (t->adapter == 'a') continue;
                expect(same == !t->adapter, "%s %s", t->name, same ? "did not change" : "changed");
            }
            for (uint64_t step = 2; step < 5; step++) {
                if (two) step_of(&other, step);
                step_of(&model, step);
            }
            uint64_t hash = weights_of(&model);
            if (level == RECOMPUTE_NONE) first = hash;
            expect(hash == first, "level %d: other bits", level);
            if (two) model_free(&other);
            model_free(&before);
            model_free(&model);
        }
        verdict("%s: each b changes in one step, no weight does; the same bits at each level of --recompute, and "
                "beside another model", f ? "llama" : "gpt2");
    }
}

#define LLAMA "--family llama --layers 4 --heads 4 --kv-heads 2 --channels 32 --ffn 48"
// A step that changes nothing, so that a checkpoint has the weights that the run begins with.
#define STILL "--data train.bin --seq 16 --batch 2 --warmup 0 --steps 1 --lr 0 --threads 1"
#define SMALL "--data train.bin --seq 16 --batch 2 --warmup 0 --lr 0.02 --threads 1 --check-every 1"
#define LORA "--lora 4 --lora-dropout 0.2"

static uint64_t hash_of(const char* run, size_t step) {
    Error error;
    return weights_hash(text_of("%s/step_%08zu", run, step), &error);
}

static void test_layouts(void) {
    static const struct { const char *alone, *layout; } cases[] = {
        {"", "--ranks 2 --zero 0"}, {"", "--ranks 4 --zero 1"}, {"", "--ranks 2 --zero 2"},
        {"", "--ranks 4 --zero 3"}, {"", "--ranks 2 --zero 1 --recompute block"},
        {"", "--ranks 2 --pp 2 --pipeline 1f1b"}, {"", "--ranks 2 --pp 2 --pipeline gpipe"},
        {"", "--ranks 2 --pp 2 --pipeline interleaved"}, {"", "--ranks 4 --pp 2 --zero 1"},
        {"--row-leaves 1", "--ranks 2 --pp 2 --pipeline zb-h1 --row-leaves 1"},
        {"--row-leaves 1", "--ranks 2 --pp 2 --pipeline zb-h2 --row-leaves 1"},
        {"--row-leaves 2", "--ranks 2 --cp 2"}, {"--row-leaves 2", "--ranks 4 --cp 2 --pp 2"}};
    const char* families[] = {"--layers 4 --heads 4 --channels 32", LLAMA};
    for (int f = 0; f < 2; f++) {
        const char* usual = "";
        uint64_t expected = 0;
        for (size_t i = f; i < COUNT_OF(cases); i += f == 0 ? 3 : 1) {  // all for llama, some for gpt2
            if (expected == 0 || strcmp(usual, cases[i].alone) != 0) {
                remove_tree("alone");
                const char* line = text_of(SMALL " %s " LORA " --reduce exact --total-batch 128 --steps 4 --out alone %s",
                                           families[f], cases[i].alone);
                expect(run_program(train_program, line) == 0, "alone");
                usual = cases[i].alone;
                expected = hash_of("alone", 4);
            }
            remove_tree("many");
            int code = run_program(train_program, text_of(SMALL " %s " LORA " --reduce exact --total-batch 128 --steps "
                                                          "4 --out many %s", families[f], cases[i].layout));
            if (!expect(code == 0, "%s ends with %d", cases[i].layout, code)) print_indented(text_read("output", NULL));
            expect(expected && hash_of("many", 4) == expected, "%s: other bits", cases[i].layout);
        }
        verdict("%s: ranks, ZeRO, pipelines and --cp give the bits of one rank, with --lora-dropout",
                f ? "llama" : "gpt2");
    }
}

static void test_resume(void) {
    static const char line[] = SMALL " " LLAMA " --steps 4 --lora-dropout 0.2 --train '*norm*' --ckpt-every 2 "
                               "--ckpt-async off";
    const char* lora = "--lora 4 --lora-plus 3";
    static const char* const places[] = {"1 at load", "2 at forward", "2 at rename", "3 at load", "3 at reduce",
                                         "3 at update", "4 at backward"};
    remove_tree("a");
    remove_tree("b");
    expect(run_program(train_program, text_of("%s %s --out a", line, lora)) == 0, "unbroken");
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        setenv("LLMTRAIN_TEST_FAULT", text_of("rank 0 step %s do kill", places[i]), 1);
        expect(run_program(train_program, text_of("%s %s --out b --resume", line, lora)) != 0, "step %s: not killed",
               places[i]);
        expect(hash_of("b", 4) == 0, "step %s: it ended", places[i]);
    }
    unsetenv("LLMTRAIN_TEST_FAULT");
    expect(run_program(train_program, text_of("%s %s --out b --resume", line, lora)) == 0, "resumed");
    expect(hash_of("a", 4) != 0 && hash_of("a", 4) == hash_of("b", 4), "other bits");
    verdict("--train norms with --lora: killed at any point and resumed, the bits of the unbroken run");
    static const char* const others[] = {"--lora 3 --lora-alpha 8", "--lora 4 --lora-alpha 5",
                                         "--lora 4 --lora-scale rs", "--lora 4 --lora-targets q"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        remove_tree("c");
        copy_tree("a", "c");
        expect(run_program(train_program, text_of("%s %s --out c --resume", line, others[i])) != 0 &&
               output_has("give the same flags"), "%s is accepted", others[i]);
    }
    verdict("a resume with another rank, alpha, scale or other targets is refused");
}

// ------------------------------------------------------------------------------------------------
// 3. Adapters

// A run of a base, exported as "base"; a run with pairs beside it in "run", exported as the adapter "adapter".
static void make_runs(void) {
    remove_tree("a");
    bool ok = run_program(train_program, text_of(SMALL " " LLAMA " --steps 4 --out start")) == 0 &&
              run_program(export_program, "--out start --to hf --dir base") == 0 &&
              run_program(train_program, SMALL " --init-from base --lora 4 --lora-alpha 6 --lora-scale rs "
                          "--steps 4 --out run") == 0 &&
              run_program(export_program, "--out run --to peft --dir adapter") == 0;
    if (!ok) print_indented(text_read("output", NULL));
    need(ok, "runs");
}

// A tensor of a file, as it stores floats.
static float* file_values(size_t* elements, const char* file, const char* name) {
    SafetensorsFile f;
    Error error;
    need(safetensors_open(&f, file, &error), "%s", error.text);
    const SafetensorsTensor* t = safetensors_find(&f, name);
    need(t && t->type == DTYPE_F32, "%s", name);
    float* values = (float*)memory_allocate(t->bytes);
    need(safetensors_read(&f, t, values, t->bytes, NULL, &error), "%s", error.text);
    *elements = t->bytes / sizeof(float);
    safetensors_close(&f);
    return values;
}

static float* exported(const char* directory, const char* name, size_t elements) {
    size_t found;
    float* values = file_values(&found, text_of("%s/model.safetensors", directory), name);
    need(found == elements, "%s", name);
    return values;
}

static bool same_files(const char* a, const char* b) {
    size_t bytes[2];
    if (!file_exists(a) || !file_exists(b)) return false;
    char *first = text_read(a, &bytes[0]), *second = text_read(b, &bytes[1]);
    bool same = bytes[0] == bytes[1] && memcmp(first, second, bytes[0]) == 0;
    free(first);
    free(second);
    return same;
}

// Whether two files of safetensors have the same tensors, whatever else their headers say.
static bool same_numbers(const char* a, const char* b) {
    SafetensorsFile files[2];
    Error error;
    size_t bytes[2];
    char* text[2];
    for (int i = 0; i < 2; i++) {
        text[i] = text_read(i ? b : a, &bytes[i]);
        need(safetensors_open(&files[i], i ? b : a, &error), "%s", error.text);
    }
    bool same = bytes[0] - files[0].data_start == bytes[1] - files[1].data_start && bytes[0] > files[0].data_start &&
                memcmp(text[0] + files[0].data_start, text[1] + files[1].data_start,
                       bytes[0] - files[0].data_start) == 0;
    for (int i = 0; i < 2; i++) {
        safetensors_close(&files[i]);
        free(text[i]);
    }
    return same;
}

// The loss of a model with adapters.
static double loss_of(const char* out, const char* from, const char* adapter) {
    Model model;
    Tokenizer tokenizer;
    Error error;
    int32_t tokens[N], targets[N];
    ExactSum sum;
    const ModelOpening opening = {.out = out, .init_from = from, .adapter = adapter, .program = "test",
                                  .options = {.B = B, .T = T}};
    random_tokens(tokens, N, 61, 1);
    random_tokens(targets, N, 61, 2);
    need(model_open_planned(&model, &tokenizer, &opening, &error), "%s", error.text);
    model_upload(&model, tokens, NULL, B, T, false);
    model_forward(&model);
    fill_zero(&model.flat.sums->losses, sizeof sum, model.stream);
    model_losses(&model, tokens, targets, B, T);
    device_download(&sum, &model.flat.sums->losses, sizeof sum, model.stream);
    tokenizer_close(&tokenizer);
    model_free(&model);
    return exact_value(sum) / N;
}

static void test_in_and_out(void) {
    const char* weights = "model.safetensors";
    expect(run_program(export_program, "--out run --to hf --dir merged") == 0 && output_has("merged 28 pairs"),
           "merged");
    expect(run_program(export_program, "--init-from base --adapter adapter --to hf --dir again") == 0, "again");
    expect(run_program(export_program, "--out run --base base --to hf --dir onto") == 0, "onto the base");
    expect(same_files(text_of("merged/%s", weights), text_of("again/%s", weights)), "the adapter merges to other bits");
    expect(same_files(text_of("merged/%s", weights), text_of("onto/%s", weights)), "--base merges to other bits");
    verdict("a run merged, its adapter merged into the base, and --base: the same file");
    double base = loss_of(NULL, "base", NULL), unmerged = loss_of("run", NULL, NULL);
    double merged = loss_of(NULL, "merged", NULL);
    check(fabs(base - unmerged) > 1e-4, "the pairs change the loss, from %g to %g", base, unmerged);
    check_bound(fabs(merged / unmerged - 1), 2e-6, "merged and unmerged: the loss");
    check(loss_of(NULL, "base", "adapter") == merged, "--adapter gives the loss of the merged weights to the bit");
    // Twice: the change of each weight is doubled; with weights of 0.75 and -0.25, halved.
    ModelSource s[4];
    const char* lists[4] = {NULL, "adapter", "adapter,adapter", "adapter:0.75,./adapter:-25e-2"};
    const float* values[4];
    double worst = 0, half = 0, most = 0;
    Error error;
    for (int i = 0; i < 4; i++)
        need(source_open(&s[i], "base", &error) && (i == 0 || source_add_adapters(&s[i], lists[i], NULL, &error)), "%s",
             error.text);
    for (size_t i = 0; i < s[0].parameters.count; i++) {
        for (int k = 0; k < 4; k++) need(source_read(&values[k], &s[k], i, &error), "%s", error.text);
        for (size_t e = 0; e < tensor_elements(&s[0].parameters.tensors[i]); e++) {
            most = fmax(most, fabs(values[1][e] - values[0][e]));
            worst = fmax(worst, fabs((values[2][e] - values[0][e]) - 2 * (values[1][e] - values[0][e])));
            half = fmax(half, fabs((values[3][e] - values[0][e]) - 0.5 * (values[1][e] - values[0][e])));
        }
    }
    for (int i = 0; i < 4; i++) source_close(&s[i]);
    check(most > 1e-3, "the adapter changes weights by up to %g", most);
    check_bound(worst, 2e-7, "--adapter A,A adds it twice");
    check_bound(half, 2e-7, "--adapter A:0.75,A:-0.25 adds half of it");
    copy_tree("adapter", "colon:2");
    expect(loss_of(NULL, "base", "colon:2") == merged, "a directory whose name ends with a number counts once");
    expect(run_program(export_program, "--init-from base --adapter adapter:x --to hf --dir no") != 0 &&
           output_has("adapter:x"), "a weight that is no number");
    verdict("a weight follows the last colon, unless that is a directory's name");
    // Training from it.
    expect(run_program(train_program, STILL " --init-from base --adapter adapter --lora 4 --out on") == 0,
           "continued");
    expect(run_program(export_program, "--out on --to peft --dir adapter.on") == 0 &&
           same_files("adapter/adapter_model.safetensors", "adapter.on/adapter_model.safetensors") &&
           same_files("adapter/adapter_config.json", "adapter.on/adapter_config.json"), "the pairs of --adapter");
    verdict("--lora --adapter begins with the adapter's pairs, alpha, scale and targets");
    expect(run_program(train_program, STILL " --init-from base --adapter adapter --out whole") == 0,
           "merged");
    expect(run_program(export_program, "--out whole --to hf --dir whole.hf") == 0 &&
           same_files(text_of("merged/%s", weights), text_of("whole.hf/%s", weights)), "other weights");
    verdict("without --lora its weights are merged before training");
    expect(run_program(train_program, SMALL " --init-from base --adapter adapter --lora 3 --out no") != 0 &&
           output_has("--lora 4 --lora-alpha 6 --lora-scale rs"), "another rank");
    expect(run_program(train_program, SMALL " --init-from base --adapter adapter --lora 4 --lora-targets q "
                       "--out no") != 0 && output_has("28 pairs"), "other targets");
    expect(run_program(train_program, SMALL " " LLAMA " --adapter adapter --out no") == 2, "no --init-from");
    static const char* const many[] = {"adapter,adapter", "adapter:0.5"};
    for (size_t i = 0; i < COUNT_OF(many); i++)
        expect(run_program(train_program, text_of(SMALL " --init-from base --lora 4 --adapter %s --out no", many[i])) &&
               output_has(text_of("--adapter %s is a list or has a weight", many[i])), "%s", many[i]);
    expect(!file_exists("no"), "a refused start left its directory");
    verdict("other flags than the adapter's are refused");
    const char* twice = "has pairs of LoRA of its own, and --adapter others; give the model that it began with";
    expect(run_program(export_program, "--out run --adapter adapter --to hf --dir no") == 1 && output_has(twice) &&
           run_program(export_program, "--out run --base base --adapter adapter --to hf --dir no") == 1 &&
           output_has(twice), "export");
    expect(run_program(generate_program, "--out run --adapter adapter --prompt-ids 1") == 1 && output_has(twice),
           "generate");
    expect(run_program(train_program, SMALL " --init-from run --adapter adapter --out no") == 2 &&
           output_has(twice) && !file_exists("no"), "train");
    verdict("an adapter is not added to a run's own pairs");
}

// --lora-plus F: a first step of SGD moves B F times as far from zero, and A, whose gradient is zero, not at all.
static void test_lora_plus(void) {
    float* moved[2][2];
    const char* names[2] = {"lora_A", "lora_B"};
    size_t elements[2];
    for (int i = 0; i < 2; i++) {
        remove_tree("plus");
        remove_tree("plus.adapter");
        expect(run_program(train_program, text_of(SMALL " --init-from base --lora 4 --optimizer sgd --clip 0 --steps 1 "
                                                  "--out plus %s", i ? "--lora-plus 8" : "")) == 0 &&
               run_program(export_program, "--out plus --to peft --dir plus.adapter --dtype f32") == 0, "step %d", i);
        for (int k = 0; k < 2; k++)
            moved[i][k] = file_values(&elements[k], "plus.adapter/" PEFT_TENSORS, text_of(
                PEFT_PREFIX "model.layers.1.mlp.down_proj.%s.weight", names[k]));
    }
    double worst = 0, most = 0;
    for (size_t e = 0; e < elements[1]; e++) {
        worst = fmax(worst, fabs(moved[1][1][e] - 8 * moved[0][1][e]));
        most = fmax(most, fabs(moved[1][1][e]));
    }
    check(memcmp(moved[0][0], moved[1][0], elements[0] * sizeof(float)) == 0 && most > 0 && worst <= 2e-7 * most,
          "--lora-plus 8: B moves 8 times as far, by up to %g with an error of %g; A does not", most, worst);
    for (int i = 0; i < 4; i++) free(moved[i / 2][i % 2]);
}

// A copy of an adapter whose tensors have all values times `scale`, with one more tensor of rows x cols (cols 0: a
// vector) if it has a name, which "modules_to_save" names as `module`.
static void put_adapter(const char* to, const char* adapter, float scale, const char* name, const char* module,
                        size_t rows, size_t cols, const float* extra) {
    SafetensorsFile from;
    SafetensorsWriter w;
    Error error;
    const size_t shape[2] = {rows, cols};
    remove_tree(to);
    copy_tree(adapter, to);
    need(safetensors_open(&from, text_of("%s/adapter_model.safetensors", adapter), &error) &&
         safetensors_create(&w, text_of("%s/adapter_model.safetensors", to), &error), "%s", error.text);
    const SafetensorsHeader* h = &from.header;
    bool good = true;
    for (size_t i = 0; i < h->count; i++)
        good = good && safetensors_declare(&w, h->tensors[i].name, h->tensors[i].type, h->tensors[i].shape,
                                           h->tensors[i].dims, &error);
    if (name) good = good && safetensors_declare(&w, name, DTYPE_F32, shape, cols ? 2 : 1, &error);
    good = good && safetensors_begin(&w, &error);
    for (size_t i = 0; good && i < h->count; i++) {
        size_t n = h->tensors[i].bytes / sizeof(float);
        float* values = (float*)memory_allocate(h->tensors[i].bytes);
        good = safetensors_read(&from, &h->tensors[i], values, h->tensors[i].bytes, NULL, &error);
        for (size_t e = 0; e < n; e++) values[e] *= scale;
        good = good && safetensors_write(&w, values, h->tensors[i].bytes, &error);
        free(values);
    }
    if (name) good = good && safetensors_write(&w, extra, rows * max_size(cols, 1) * sizeof(float), &error);
    need(good && safetensors_end(&w, &error), "%s", error.text);
    safetensors_writer_free(&w);
    safetensors_close(&from);
    if (!name) return;
    char* text = text_read(text_of("%s/adapter_config.json", to), NULL);
    char* at = strstr(text, "\"bias\"");
    need(at != NULL, "bias");
    put_text(text_of("%s/adapter_config.json", to),
             text_of("%.*s\"modules_to_save\": [\"%s\"], %s", (int)(at - text), text, module, at));
    free(text);
}

// Whole tensors of "modules_to_save" replace those of the base, and pairs are merged as without them.
static void test_whole_tensors(void) {
    enum { ROWS = 61, COLS = 32 };
    static const struct { const char *module, *name, *also; size_t rows, cols; } saved[] = {
        {"lm_head", "lm_head.weight", "model.norm.weight", ROWS, COLS},
        {"embed_tokens", "model.embed_tokens.weight", "lm_head.weight", ROWS, COLS},
        {"norm", "model.norm.weight", "lm_head.weight", COLS, 0}};
    const char* merge = "--init-from untied --adapter whole --to hf --dir whole.merged";
    const char* pair = "model.layers.1.self_attn.o_proj.weight";
    float extra[(ROWS + 1) * COLS];
    need(run_program(train_program, SMALL " " LLAMA " --tied off --steps 4 --out untied.start") == 0 &&
             run_program(export_program, "--out untied.start --to hf --dir untied") == 0 &&
             run_program(train_program, SMALL " --init-from untied --lora 4 --steps 4 --out untied.run") == 0 &&
             run_program(export_program, "--out untied.run --to hf --dir untied.merged") == 0 &&
             run_program(export_program, "--out untied.run --to peft --dir untied.adapter") == 0, "runs");
    for (size_t i = 0; i < COUNT_OF(extra); i++) extra[i] = 0.01f * (float)(i % 97);
    for (size_t i = 0; i < COUNT_OF(saved); i++) {
        size_t n = saved[i].rows * max_size(saved[i].cols, 1), rest = i == 0 ? COLS : ROWS * COLS;
        remove_tree("whole.merged");
        put_adapter("whole", "untied.adapter", 1, text_of("base_model.model.%s", saved[i].name), saved[i].module,
                    saved[i].rows, saved[i].cols, extra);
        if (!expect(run_program(export_program, merge) == 0, "%s", saved[i].name)) {
            print_indented(text_read("output", NULL));
            continue;
        }
        float *found = exported("whole.merged", saved[i].name, n), *base = exported("untied", saved[i].also, rest);
        float *kept = exported("whole.merged", saved[i].also, rest);
        float* with = exported("whole.merged", pair, COLS * COLS);
        float* without = exported("untied.merged", pair, COLS * COLS);
        expect(memcmp(found, extra, n * sizeof(float)) == 0, "%s is not that of the adapter", saved[i].name);
        expect(memcmp(kept, base, rest * sizeof(float)) == 0, "%s is not the base's", saved[i].also);
        expect(memcmp(with, without, COLS * COLS * sizeof(float)) == 0, "the pair of %s is merged otherwise", pair);
        free(found), free(base), free(kept), free(with), free(without);
    }
    // A vocabulary of another size, as after resize_token_embeddings().
    expect(run_program(export_program, "--init-from untied --adapter whole:0.5 --to hf --dir none") == 1 &&
           output_has("cannot count 0.5 times"), "half of a whole tensor");
    put_adapter("whole", "untied.adapter", 1, "base_model.model.lm_head.weight", "lm_head", ROWS + 1, COLS, extra);
    expect(run_program(export_program, "--init-from untied --adapter whole --to hf --dir none") == 1 &&
           output_has("lm_head.weight is not 61 x 32") && !file_exists("none"), "a larger vocabulary");
    expect(run_program(train_program, SMALL " --init-from untied --adapter whole --lora 4 --out none") == 1 &&
           output_has("lm_head.weight is not 61 x 32") && !file_exists("none"), "training with a larger vocabulary");
    // An embedding that is also the head: of which of them the tensor is, the file does not say.
    put_adapter("whole", "adapter", 1, "base_model.model.model.embed_tokens.weight", "embed_tokens", ROWS, COLS, extra);
    expect(run_program(export_program, "--init-from base --adapter whole --to hf --dir none") == 1 &&
           output_has("replaces an embedding that is also the head") && !file_exists("none"), "a tied embedding");
    verdict("whole tensors of modules_to_save replace the base's; a vocabulary of another size is refused");
}

// A GGUF file of a run with pairs, or of a base and an adapter, is that of the merged model.
static void test_gguf(void) {
    expect(run_program(export_program, "--init-from merged --to gguf --dir g.merged") == 0 &&
           run_program(export_program, "--out run --to gguf --dir g.run") == 0 &&
           run_program(export_program, "--init-from base --adapter adapter --to gguf --dir g.adapter") == 0 &&
           run_program(export_program, "--init-from base --to gguf --dir g.base") == 0, "exports to GGUF");
    expect(same_files("g.run/model.gguf", "g.merged/model.gguf"), "of a run: other numbers");
    expect(same_files("g.adapter/model.gguf", "g.merged/model.gguf"), "of an adapter: other numbers");
    expect(!same_files("g.base/model.gguf", "g.merged/model.gguf"), "the base without the adapter is the same");
    verdict("GGUF of a run with pairs, and of a base with an adapter: the file of the merged model");
}

// Exports with an adapter that has a fault, and expects a sentence with these words, and nothing written.
static void expect_no_export(const char* what, const char* line, const char* words) {
    expect(run_program(export_program, text_of("%s --dir none", line)) == 1, "%s: it is accepted", what);
    char* text = text_read("output", NULL);
    expect(strstr(text, words) && count_in(text, "\n") == 1, "%s: '%s' is not in: %s", what, words, text);
    expect(!file_exists("none") && directory_count(".", "none") == 0, "%s: something is written", what);
    remove_tree("none");
    free(text);
}

// The adapter with another text in its configuration.
static void bad_config(const char* old, const char* with) {
    size_t length;
    remove_tree("bad");
    copy_tree("adapter", "bad");
    char* text = text_read("bad/adapter_config.json", &length);
    char* at = strstr(text, old);
    need(at != NULL, "%s", old);
    put_text("bad/adapter_config.json", text_of("%.*s%s%s", (int)(at - text), text, with, at + strlen(old)));
    free(text);
}

// The adapter with other bytes in place of a text of its tensors' header, of the same length.
static void bad_tensors(const char* old, const char* with) {
    size_t length, words = strlen(old);
    remove_tree("bad");
    copy_tree("adapter", "bad");
    char* bytes = text_read("bad/adapter_model.safetensors", &length);
    size_t i = 0;
    while (i + words < length && memcmp(bytes + i, old, words) != 0) i++;
    need(i + words < length && strlen(with) == words, "%s", old);
    patch("bad/adapter_model.safetensors", i, with, words);
    free(bytes);
}

static void test_refusals(void) {
    static const struct { const char *old, *with, *words; } configs[] = {
        {"\"LORA\"", "\"LOHA\"", "\"peft_type\" is LOHA"}, {"\"none\"", "\"all\"", "\"bias\" is all"},
        {"\"bias\"", "\"sorcery\": 1, \"bias\"", "\"sorcery\""},
        {"\"use_dora\": false", "\"use_dora\": true", "magnitude"},
        {"\"r\": 4", "\"r\": 5", "is not 5 x 32"}, {"\"r\": 4", "\"r\": 0", "lacks"},
        {"\"bias\"", "\"init_lora_weights\": \"pissa\", \"bias\"", "pissa"},
        {"\"bias\"", "\"modules_to_save\": [\"lm_head\"], \"bias\"", "modules_to_save"},
        {"\"bias\"", "\"rank_pattern\": {\".*q_proj\": 2}, \"bias\"", "regular expression"},
        {"\"bias\"", "\"lora_bias\": true, \"bias\"", "lora_bias"}, {"\"q_proj\",", "", "does not name"},
        {"\"q_proj\",", "\"q_proj\",\"lm_head\",", "has no tensor of lm_head"}, {"{", "", "adapter_config.json"}};
    static const struct { const char *old, *with, *words; } tensors[] = {
        {"layers.1.self_attn.q_proj.lora_A", "layers.1.self_attn.q_proj.lora_X", "lora_A is missing"},
        {"layers.1.self_attn.q_proj.lora_B", "layers.1.self_attn.q_proj.lora_X", "lora_B is missing"},
        {"layers.1.mlp.up_proj.lora_A", "layers.9.mlp.up_proj.lora_A", "lora_A is missing"},
        {"base_model.model.model", "best_model..model.model", "does not begin with base_model.model."}};
    for (size_t i = 0; i < COUNT_OF(configs); i++) {
        bad_config(configs[i].old, configs[i].with);
        expect_no_export(configs[i].with, "--init-from base --adapter bad --to hf", configs[i].words);
    }
    for (size_t i = 0; i < COUNT_OF(tensors) - 1; i++) {
        bad_tensors(tensors[i].old, tensors[i].with);
        expect_no_export(tensors[i].with, "--init-from base --adapter bad --to hf", tensors[i].words);
    }
    static const float nan_bits = NAN;
    bad_tensors("F32", "F32");
    size_t length;
    free(text_read("bad/adapter_model.safetensors", &length));
    patch("bad/adapter_model.safetensors", length - sizeof nan_bits, &nan_bits, sizeof nan_bits);
    expect_no_export("NaN", "--init-from base --adapter bad --to hf", "is not finite");
    put_adapter("bad", "adapter", 0, NULL, NULL, 0, 0, NULL);
    expect_no_export("zeros", "--init-from base --adapter bad --to hf", "all its delta weights are zero");
    bad_tensors("F32", "I32");
    expect_no_export("type", "--init-from base --adapter bad --to hf", "is of type I32");
    unlink("bad/adapter_model.safetensors");
    expect_no_export("lost file", "--init-from base --adapter bad --to hf", "adapter_model.safetensors");
    expect_no_export("no adapter", "--init-from base --adapter base --to hf", "adapter_config.json");
    expect_no_export("an adapter as a model", "--init-from adapter --to hf", "holds a LoRA adapter");
    expect_no_export("a run without pairs", "--out start --to peft", "no pairs of LoRA");
    expect_no_export("norms of the run", "--out c --to peft", "--train");
    verdict("configurations and tensors that are not right: a sentence, exit code 1, nothing written");

    bool ok = run_program(train_program, SMALL " " LLAMA " --seed 8 --steps 4 --out other") == 0 &&
              run_program(export_program, "--out other --to hf --dir other.hf") == 0 &&
              run_program(export_program, "--out run --to hf --dtype bf16 --dir rounded") == 0 &&
              run_program(export_program, "--out start --to hf --dtype bf16 --dir base.bf16") == 0;
    expect(ok, "other models");
    expect_no_export("another base", "--init-from other.hf --adapter adapter --to hf", "was trained on other weights");
    expect_no_export("another --base", "--out run --base other.hf --to hf", "has other weights");
    expect(run_program(export_program, "--init-from base.bf16 --adapter adapter --to hf --dir half") == 0,
           "the base in another dtype is refused");
    expect(run_program(generate_program, "--init-from other.hf --adapter adapter --prompt-ids 1 --print-ids") == 1 &&
           output_has("was trained on other weights"), "generate takes another base");
    expect(run_program(train_program, SMALL " --init-from other.hf --adapter adapter --out no") == 1 &&
           output_has("was trained on other weights") && !file_exists("no"), "train takes another base");
    verdict("an adapter of ours is refused for another base, and taken for its base in another dtype");
    bad_tensors("llmtrain_base", "llmtrain_ease");
    expect(run_program(export_program, "--init-from other.hf --adapter bad --to hf --dir shapes") == 0 &&
           output_has("only shapes are compared"), "an adapter without a hash");
    verdict("one that names no base is checked by its shapes, with a note");
}

// ------------------------------------------------------------------------------------------------
// 4. 4 bits

// What a model stores of a model of bitsandbytes is that to the bit: codes, scales and their codes. What it has quantized
// only once is quantized again from the numbers, with the same codes.
static void test_bnb(void) {
    Model model;
    ModelSource s;
    Error error;
    size_t twice = 0, once = 0;
    need(source_open(&s, text_of("%s/../models/llama_nf4", fixtures), &error), "%s", error.text);
    Config c = s.config;
    c.lora = 4;
    c.quantize = QUANTIZE_NF4;
    need(config_complete(&c, &error), "%s", error.text);
    small_create(&model, &c, small_options(B, T), 5);
    need(source_load(&model, &s, "init-from", &error), "%s", error.text);
    for (size_t i = 0; i < s.piece_count; i++) {
        const SourcePiece* piece = &s.pieces[i];
        Nf4 q;
        if (!piece->quantized) continue;
        need(bnb_read(&q, piece->quantized, s.files, &error), "%s", error.text);
        const Tensor* t = NULL;
        for (size_t k = 0; k < model.parameters.count; k++)
            if (strcmp(model.parameters.tensors[k].name, s.parameters.tensors[piece->tensor].name) == 0)
                t = &model.parameters.tensors[k];
        need(t && t->quantized, "%s is not quantized", s.parameters.tensors[piece->tensor].name);
        const uint8_t* stored = (const uint8_t*)flat_param(&model.flat, t);
        for (size_t m = 0, first = 0; first < piece->first; m++) {
            stored += nf4_bytes(tensor_nf4_rows(t, m) * t->cols, true);
            first += tensor_nf4_rows(t, m) * t->cols;
        }
        bool doubled = piece->quantized->doubled;
        expect(memcmp(stored, q.codes, doubled ? nf4_bytes(q.n, true) : divide_up(q.n, 2)) == 0, "%s: other codes",
               t->name);
        twice += doubled;
        once += !doubled;
        free(q.codes);
    }
    expect(twice > 0 && once > 0, "%zu matrices with double quantization, %zu without", twice, once);
    source_close(&s);
    model_free(&model);
    verdict("a model of bitsandbytes keeps its codes and scales: %zu matrices", twice + once);
}

// Pairs that are trained beside 4 bits are those that are trained beside the numbers that these stand for.
static void test_quantized(void) {
    const char* bases[] = {"--layers 4 --heads 4 --channels 32", LLAMA};
    static const char* const layouts[] = {"--ranks 2 --zero 0", "--ranks 4 --zero 3", "--ranks 2 --pp 2 --recompute block",
                                          "--ranks 2 --cp 2"};
    for (int f = 0; f < 2; f++) {
        static const char* const made[] = {"q.base", "q.still", "q.numbers", "q.run", "q.beside", "q.a", "q.b",
                                           "q.original", "q.merged", "q.onto", "q.expected"};
        for (size_t i = 0; i < COUNT_OF(made); i++) remove_tree(made[i]);
        const char* line = SMALL " " LORA " --reduce exact --total-batch 128 --steps 4 --row-leaves 2";
        expect(run_program(train_program, text_of(SMALL " %s --steps 4 --out q.base", bases[f])) == 0 &&
               run_program(train_program, STILL " --init-from q.base --lora 4 --quantize nf4 --out q.still") == 0 &&
               run_program(export_program, "--out q.still --to hf --dtype f32 --dir q.numbers") == 0, "numbers of codes");
        expect(run_program(train_program, text_of("%s --init-from q.base --quantize nf4 --out q.run", line)) == 0 &&
               run_program(train_program, text_of("%s --init-from q.numbers --out q.beside", line)) == 0, "runs");
        expect(run_program(export_program, "--out q.run --to peft --dir q.a") == 0 &&
               run_program(export_program, "--out q.beside --to peft --dir q.b") == 0 &&
               same_numbers("q.a/adapter_model.safetensors", "q.b/adapter_model.safetensors"), "other pairs");
        static const char* const exports[] = {"--out q.base --to hf --dir q.original", "--out q.run --to hf --dir q.merged",
                                              "--out q.run --base q.original --to hf --dir q.onto",
                                              "--init-from q.original --adapter q.a --to hf --dir q.expected"};
        for (size_t i = 0; i < COUNT_OF(exports); i++) {
            if (!expect(run_program(export_program, exports[i]) == 0, "%s", exports[i]))
                print_indented(text_read("output", NULL));
        }
        expect(same_numbers("q.onto/model.safetensors", "q.expected/model.safetensors") &&
               !same_numbers("q.onto/model.safetensors", "q.merged/model.safetensors"), "--base: other weights");
        const char* generate = "--prompt-ids 1,2 --print-ids --tokens 8 --temperature 0";
        need(run_program(generate_program, text_of("--out q.run %s", generate)) == 0, "generate");
        char* ids = text_read("output", NULL);
        expect(run_program(generate_program, text_of("--init-from q.merged %s", generate)) == 0 && output_has(ids),
               "generate: other tokens than of the merged weights");
        free(ids);
        uint64_t expected = hash_of("q.run", 4);
        for (size_t i = 0; i < COUNT_OF(layouts); i++) {
            remove_tree("q.many");
            bool ok = run_program(train_program, text_of("%s --init-from q.base --quantize nf4 %s --out q.many", line,
                                                         layouts[i])) == 0;
            if (!expect(ok, "%s", layouts[i])) print_indented(text_read("output", NULL));
            expect(expected && hash_of("q.many", 4) == expected, "%s: other bits", layouts[i]);
        }
        remove_tree("q.many");
        const char* again = text_of("%s --init-from q.base --quantize nf4 --ckpt-every 2 --ckpt-async off --out q.many", line);
        setenv("LLMTRAIN_TEST_FAULT", "rank 0 step 3 at load do kill", 1);
        expect(run_program(train_program, again) != 0, "it is not killed");
        unsetenv("LLMTRAIN_TEST_FAULT");
        remove_tree("q.base");
        expect(run_program(train_program, text_of("%s --resume", again)) == 0 && hash_of("q.many", 4) == expected,
               "resumed without the base: other bits");
        remove_tree("q.many");
        expect(run_program(train_program, SMALL " --steps 1 " LORA " --init-from q.run --quantize nf4 --out q.many") == 0 &&
               output_has("starting from"), "another run from this one");
        verdict("%s: pairs beside 4 bits are those beside the numbers of their codes, to the bit; on %zu layouts; killed "
                "and resumed", f ? "llama" : "gpt2", COUNT_OF(layouts));
    }
    static const struct { const char *flags, *words; } refused[] = {
        {LLAMA " --quantize nf4", "--quantize is for --lora"}, {LLAMA " " LORA " --quantize nf4", "--init-from"},
        {"--init-from q.run --lora 4 --train 'block.1.*'", "cannot train"},
        {"--init-from q.run --quantize off", "quantize"}, {LLAMA " " LORA " --ranks 2 --tp 2", "--lora are not divided"}};
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        remove_tree("q.no");
        expect(run_program(train_program, text_of(SMALL " %s --steps 1 --out q.no", refused[i].flags)) != 0 &&
               output_has(refused[i].words), "%s", refused[i].flags);
    }
    Json manifest;
    Error error;
    SafetensorsFile file;
    need(manifest_open(&manifest, "q.run/step_00000004", &error) &&
         safetensors_open(&file, "q.run/step_00000004/frozen.safetensors", &error), "%s", error.text);
    for (size_t i = 0; i < file.header.count; i++)
        if (file.header.tensors[i].type == DTYPE_U8)
            patch("q.run/step_00000004/frozen.safetensors", file.data_start + file.header.tensors[i].offset + 40, "x", 1);
    safetensors_close(&file);
    json_free(&manifest);
    expect(run_program(export_program, "--out q.run --to hf --dir q.no") != 0 && output_has("checksum") &&
           !file_exists("q.no/config.json"), "damaged codes are exported");
    verdict("--quantize: refusals; damaged codes");
}

int main(int argc, char** argv) {
    const char* slash = strrchr(argv[0], '/');
    if (strncmp(slash ? slash + 1 : argv[0], "train", 5) == 0) return train_main(argc, argv);
    char* programs[] = {train_program, export_program, generate_program};
    static const char* const names[] = {"--train", "--export", "--generate"};
    static const char* const usual[] = {"build/train-FP32", "build/export", "build/generate-FP32"};
    tests_begin("test_lora");
    for (int i = 0; i < 3; i++) {
        const char* path = usual[i];
        for (int k = 1; k + 1 < argc; k += 2) if (strcmp(argv[k], names[i]) == 0) path = argv[k + 1];
        need(realpath(path, programs[i]) != NULL, "%s", path);
    }
    need(realpath("dev/test/fixtures/lora", fixtures) != NULL, "run it in the root of the checkout");
    root_enter();
    put_shard("train.bin", 61, 3000, 1);
    test_fixtures();
    test_differences();
    test_beginning();
    test_steps();
    test_layouts();
    test_resume();
    make_runs();
    test_in_and_out();
    test_lora_plus();
    test_whole_tensors();
    test_gguf();
    test_refusals();
    test_bnb();
    test_quantized();
    return tests_end();
}
