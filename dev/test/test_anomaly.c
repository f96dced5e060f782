// test_anomaly.c: bad sequences are found, and the operation that first computes a number that is not finite.
//
//   make build/test_anomaly build/train-FP32 build/tokenize build/corpus
//   build/test_anomaly [--train PATH] [--tokenize PATH] [--corpus PATH]
//
//   operations   NaN or infinity in each tensor, and weights whose product overflows in the forward or the backward of
//                a given operation: that operation, its block and the sequence are named
//   norms        the gradient of a single sequence is that of a step of it alone; the step's gradients stay as they are
//   planted      20 bad sequences in the data of a run, on one rank and on three: garbage, one token again and again,
//                shifted text, tokens that the text does not have. Each is the first that its step's event names, with
//                shard and position; no other step is traced; the weights are those of a run that traces nothing; and
//                tokenize --show prints the text that was planted

#include "llmtrain/anomaly.h"
#include "llmtrain/flags.h"
#include "harness.h"
#include "pieces.h"

static Error error;

// ------------------------------------------------------------------------------------------------
// Operations

enum { V = 61, L = 3, B = 2, T = 8, MICRO = 2 };

static const Config GPT2 = {.family = FAMILY_GPT2, .layers = L, .heads = 2, .channels = 16, .context = T, .vocab = V,
                            .tied = true};
static const Config LLAMA = {.family = FAMILY_LLAMA, .layers = L, .heads = 4, .kv_heads = 2, .channels = 32,
                             .context = T, .vocab = V, .qkv_bias = true, .qk_norm = true};

static void model_of(Model* model, const Config* config, uint64_t seed) {
    ModelOptions options = {.B = B, .T = T, .training = true};
    need(model_create(model, config, options, &error) && model_randomize(model, seed, &error), "%s", error.text);
}

static Tensor* tensor_of(Model* model, const char* name) {
    for (size_t i = 0; i < model->parameters.count; i++)
        if (strcmp(model->parameters.tensors[i].name, name) == 0) return &model->parameters.tensors[i];
    need(false, "a tensor %s", name);
    return NULL;
}

// Sets n elements from the first on to a value.
static void tensor_set(Model* model, const Tensor* t, size_t n, float value) {
    for (size_t i = 0; i < n; i++)
        need(model_set_params(model, t->offset + i, &value, 1, &error), "%s", error.text);
}

static void tensor_multiply(Model* model, const Tensor* t, float factor) {
    for (size_t i = 0; i < tensor_elements(t); i++) {
        float value = factor * float_of(model->flat.params[t->offset + i]);
        need(model_set_params(model, t->offset + i, &value, 1, &error), "%s", error.text);
    }
}

// A loader that is not started, of B MICRO sequences of tokens.
static void loader_of(Loader* loader, Dataset* data) {
    static uint16_t tokens[(B * MICRO + 1) * T + 1];
    for (size_t i = 0; i < COUNT_OF(tokens); i++) tokens[i] = (uint16_t)(random4(3, RANDOM_TEST, 0, i).bits[0] % V);
    need(dataset_from_memory(data, tokens, sizeof tokens[0], COUNT_OF(tokens), &error) &&
         loader_open(loader, data, V, 7, 0, 1, B, T, &error), "%s", error.text);
}

static StepTrace trace_of(Model* model, double loss_scale) {
    int32_t tokens[B * T], targets[B * T];
    StepTrace trace;
    Dataset data;
    Loader loader;
    loader_of(&loader, &data);
    model_begin_step(model, loss_scale, MICRO);
    need(anomaly_begin(&trace, model, &error) && anomaly_trace(&trace, &loader, 0, tokens, targets, &error), "%s",
         error.text);
    anomaly_end(&trace);
    loader_close(&loader);
    dataset_close(&data);
    return trace;
}

// The operation that first reads a tensor.
static const char* first_reader(const char* tensor) {
    static const char* const readers[][2] = {
        {"token_embedding", "embedding, forward"}, {"position_embedding", "embedding, forward"},
        {"norm1_", "norm1 of block 1, forward"}, {"qkv_", "qkv matmul of block 1, forward"},
        {"_norm_weight", "norm or rotation of queries and keys of block 1, forward"},
        {"attention_out_", "attention_out matmul of block 1, forward"}, {"norm2_", "norm2 of block 1, forward"},
        {"ffn_in_", "ffn_in matmul of block 1, forward"}, {"ffn_out_", "ffn_out matmul of block 1, forward"},
        {"head_weight", "head matmul, forward"}};
    if (strncmp(tensor, "final_norm", 10) == 0) return "final norm, forward";
    for (size_t i = 0; i < COUNT_OF(readers); i++)
        if (strstr(tensor, readers[i][0])) return readers[i][1];
    return "nothing";
}

// NaN and infinity in each tensor of block 1 and outside the blocks.
static void test_tensors(const Config* config, const char* family) {
    Model model;
    model_of(&model, config, 5);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        float before[V * 32];
        size_t n = min_size(tensor_elements(t), COUNT_OF(before));
        if (t->bucket > 0 && t->bucket <= L && t->bucket != 2) continue;
        for (size_t k = 0; k < n; k++) before[k] = float_of(model.flat.params[t->offset + k]);
        tensor_set(&model, t, n, i % 2 ? NAN : INFINITY);
        StepTrace trace = trace_of(&model, 1);
        expect(strstr(trace.not_finite, first_reader(t->name)) == trace.not_finite, "%s: %s", t->name,
               trace.not_finite);
        expect(strstr(trace.not_finite, text_of("weights that are not finite: %s", t->name)) != NULL, "%s: %s", t->name,
               trace.not_finite);
        expect(!isfinite(trace.worst[TRACE_NORM][0].norm), "%s: the largest gradient is %g", t->name,
               trace.worst[TRACE_NORM][0].norm);
        need(model_set_params(&model, t->offset, before, n, &error), "%s", error.text);
    }
    StepTrace trace = trace_of(&model, 1);
    expect(trace.not_finite[0] == 0, "nothing is planted: %s", trace.not_finite);
    verdict("%s: NaN or infinity in any tensor: the operation, the block and the tensor are named", family);
    model_free(&model);
}

// Weights that are finite, while what is computed with them is not.
static void test_overflows(void) {
    typedef struct { const char* tensor; float factor; } Plant;
    static const struct {
        const Config* config;
        double loss_scale;
        Plant plants[4];
        const char* found;
    } cases[] = {
        {&GPT2, 1, {{"block.1.qkv_weight", 1e25f}}, "attention of block 1, forward"},
        {&LLAMA, 1, {{"block.1.q_norm_weight", 1e30f}, {"block.1.k_norm_weight", 1e30f}},
         "attention of block 1, forward"},
        {&LLAMA, 1, {{"block.2.ffn_in_weight", 1e30f}}, "activation function of block 2, forward"},
        {&LLAMA, 1, {{"head_weight", 1e38f}, {"final_norm_weight", 1e10f}}, "head matmul, forward"},
        {&GPT2, 1e30, {{"final_norm_weight", 0}, {"token_embedding", 1e30f}}, "head matmul, backward"},
        {&GPT2, 1e20, {{"block.2.norm2_weight", 0}, {"block.2.ffn_out_weight", 1e30f}},
         "activation function (GPT-2: or ffn_out matmul) of block 2, backward"},
        {&LLAMA, 1e20, {{"block.1.norm2_weight", 0}, {"block.1.ffn_out_weight", 1e30f}},
         "ffn_out matmul of block 1, backward"},
        {&GPT2, 1e20, {{"block.1.norm2_weight", 0}, {"block.1.ffn_in_weight", 1e30f}},
         "ffn_in matmul of block 1, backward"},
        {&GPT2, 1e20, {{"block.1.norm1_weight", 0}, {"block.1.attention_out_weight", 1e30f}},
         "attention_out matmul of block 1, backward"},
        {&GPT2, 1e20, {{"block.1.norm1_weight", 0}, {"block.1.qkv_weight", 1e30f}},
         "qkv matmul of block 1, backward"},
        {&GPT2, 1e25, {{"block.1.norm1_weight", 1e19f}, {"block.1.qkv_weight", 1e-24f}},
         "gradient of block.1.qkv_weight, backward"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Model model;
        model_of(&model, cases[i].config, 5);
        for (const Plant* p = cases[i].plants; p < cases[i].plants + 4 && p->tensor; p++)
            tensor_multiply(&model, tensor_of(&model, p->tensor), p->factor);
        StepTrace trace = trace_of(&model, cases[i].loss_scale);
        expect(strstr(trace.not_finite, cases[i].found) == trace.not_finite, "%s: '%s'", cases[i].found,
               trace.not_finite);
        model_free(&model);
    }
    verdict("finite weights whose use overflows: the operation and the block are named");
}

// ------------------------------------------------------------------------------------------------
// Norms

static void test_norms(void) {
    Model model, single;
    ModelOptions options = {.B = 1, .T = T, .training = true};
    int32_t tokens[T], targets[T];
    Dataset data;
    Loader loader;
    model_of(&model, &LLAMA, 5);
    need(model_create(&single, &LLAMA, options, &error) && model_randomize(&single, 5, &error), "%s", error.text);
    loader_of(&loader, &data);
    size_t bytes = model.flat.sums_size * sizeof(float);
    float* before = (float*)malloc(bytes);
    need(before != NULL, "memory");
    for (size_t i = 0; i < model.flat.sums_size; i++) before[i] = (float)(i % 7);
    StepTrace trace = trace_of(&model, 1);
    double worst = 0;
    for (size_t i = 0; i < trace.count; i++) {
        const SequenceTrace* s = &trace.worst[TRACE_NORM][i];
        Window window = {(size_t)s->shard, (size_t)s->start};
        StepResult result;
        StepFlags flags = {false, false, false, false};
        need(window_read(tokens, targets, &data, window, V, T, &error), "%s", error.text);
        model_begin_step(&single, 1, 1);
        model_gradients(&single, tokens, targets, 1, T);
        need(model_read(&single, &result, flags, &error), "%s", error.text);
        worst = fmax(worst, fabs(result.loss / s->loss - 1));
        worst = fmax(worst, fabs(result.grad_norm / (B * MICRO) / s->norm - 1));
    }
    check(trace.count == B * MICRO, "all %d sequences of the step are traced", B * MICRO);
    check_bound(worst, 8 * 0x1p-24, "losses and norms are those of steps of one sequence");
    model_begin_step(&model, 1, MICRO);
    memcpy(model.flat.grads, before, bytes);
    need(anomaly_begin(&trace, &model, &error), "%s", error.text);
    need(anomaly_trace(&trace, &loader, 0, (int32_t[B * T]){0}, (int32_t[B * T]){0}, &error), "%s", error.text);
    anomaly_end(&trace);
    check(memcmp(before, model.flat.grads, bytes) == 0, "the sums of the step's gradients stay as they are");
    free(before);
    loader_close(&loader);
    dataset_close(&data);
    model_free(&single);
    model_free(&model);
}

int main(int argc, char** argv) {
    const char* programs[3] = {"build/train-FP32", "build/tokenize", "build/corpus"};
    Flag flags[] = {
        {"train", FLAG_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
        {"tokenize", FLAG_TEXT, &programs[1], "PATH", 0, 0, "the program", 0},
        {"corpus", FLAG_TEXT, &programs[2], "PATH", 0, 0, "the program", 0},
    };
    int code;
    if (!flags_begin(&code, "test_anomaly", NULL, flags, COUNT_OF(flags), argc, argv)) return code;
    tests_begin("test_anomaly");
    test_tensors(&GPT2, "GPT-2");
    test_tensors(&LLAMA, "Llama");
    test_overflows();
    test_norms();
    return tests_end();
}
