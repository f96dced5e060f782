// test_trace.c: bad sequences are found, and so is the operation that first computes a non-finite number.
//
//   make build/test_trace build/train-FP32 build/tokenize build/corpus
//   build/test_trace [--train PATH] [--tokenize PATH] [--corpus PATH]
//
//   operations   NaN or infinity in each tensor, and weights whose matmul overflows in the forward or the backward of
//                a given operation: that operation, its block and the sequence are reported
//   norms        the gradient of one sequence equals that of a step on it alone; the step's gradients do not change
//   planted      20 bad sequences in the data of a run, on one rank and on two: garbage, one token repeated, shifted
//                text, tokens that do not occur in the text. Each is listed first in its step's event, with shard and
//                position; no other step is traced; the weights are those of a run without tracing; and tokenize --show
//                prints the planted text

#include "llmtrain/run/trace.h"
#include "llmtrain/base/flags.h"
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

static void tensor_write(Model* model, const Tensor* t, size_t first, const float* values, size_t n) {
    TensorId id = {(uint32_t)(t - model->parameters.tensors)};
    need(flat_set_params(&model->flat, id, first, values, n, &error), "%s", error.text);
}

// Sets the first n elements to a value.
static void tensor_set(Model* model, const Tensor* t, size_t n, float value) {
    for (size_t i = 0; i < n; i++) tensor_write(model, t, i, &value, 1);
}

static void tensor_multiply(Model* model, const Tensor* t, float factor) {
    for (size_t i = 0; i < tensor_elements(t); i++) {
        float value = factor * float_of(model->flat.params[t->offset + i]);
        tensor_write(model, t, i, &value, 1);
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
    need(trace_begin(&trace, model, &error) && trace_sequences(&trace, &loader, 0, tokens, targets, &error), "%s",
         error.text);
    trace_end(&trace);
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
        tensor_write(&model, t, 0, before, n);
    }
    StepTrace trace = trace_of(&model, 1);
    expect(trace.not_finite[0] == 0, "nothing is planted: %s", trace.not_finite);
    verdict("%s: NaN or infinity in any tensor: the operation, the block and the tensor are named", family);
    model_free(&model);
}

// Finite weights whose results overflow.
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
        Window window = {(size_t)s->shard, (size_t)s->start, NULL, 0};
        StepResult result;
        StepFlags flags = {.stop = false};
        need(window_read(tokens, targets, &data, window, V, T, &error), "%s", error.text);
        model_begin_step(&single, 1, 1);
        model_gradients(&single, tokens, targets, 1, T);
        need(model_finish_step(&single, &result, flags, &error), "%s", error.text);
        worst = fmax(worst, fabs(result.loss / s->loss - 1));
        worst = fmax(worst, fabs(result.grad_norm / (B * MICRO) / s->norm - 1));
    }
    check(trace.count == B * MICRO, "all %d sequences of the step are traced", B * MICRO);
    check_bound(worst, 8 * 0x1p-24, "losses and norms are those of steps of one sequence");
    model_begin_step(&model, 1, MICRO);
    memcpy(model.flat.grads, before, bytes);
    need(trace_begin(&trace, &model, &error), "%s", error.text);
    need(trace_sequences(&trace, &loader, 0, (int32_t[B * T]){0}, (int32_t[B * T]){0}, &error), "%s", error.text);
    trace_end(&trace);
    check(memcmp(before, model.flat.grads, bytes) == 0, "the sums of the step's gradients stay as they are");
    uint16_t ends[(B * MICRO + 1) * T + 1];
    for (size_t i = 0; i < COUNT_OF(ends); i++) ends[i] = 3;
    Dataset masked;
    need(dataset_from_memory(&masked, ends, sizeof ends[0], COUNT_OF(ends), &error), "%s", error.text);
    masked.mask_documents = true;
    masked.end_of_text = 3;
    loader.dataset = &masked;
    need(trace_begin(&trace, &model, &error), "%s", error.text);
    need(trace_sequences(&trace, &loader, 0, (int32_t[B * T]){0}, (int32_t[B * T]){0}, &error), "%s", error.text);
    trace_end(&trace);
    const volatile sig_atomic_t stop = SIGTERM;
    StepTrace cut;
    need(trace_begin(&cut, &model, &error), "%s", error.text);
    cut.stop = &stop;
    need(trace_sequences(&cut, &loader, 0, (int32_t[B * T]){0}, (int32_t[B * T]){0}, &error), "%s", error.text);
    trace_end(&cut);
    expect(cut.count == 1 && cut.ended == SIGTERM, "a signal does not end a trace: %zu sequences", cut.count);
    for (size_t i = 0; i < trace.count; i++)
        expect(trace.worst[TRACE_LOSS][i].loss == 0 && trace.worst[TRACE_LOSS][i].norm == 0, "loss %g, norm %g",
               trace.worst[TRACE_LOSS][i].loss, trace.worst[TRACE_LOSS][i].norm);
    verdict("sequences without a target have no loss and no gradient");
    dataset_close(&masked);
    size_t end = model.flat.buckets[0].end, available = device_available(1);
    model.flat.buckets[0].end = 4 * (available / sizeof(float));
    if (available < SIZE_MAX / 8)
        check(!trace_begin(&trace, &model, &error) && strstr(error.text, "are free"),
              "a trace that needs more memory than is free does not begin: %s", error.text);
    model.flat.buckets[0].end = end;
    free(before);
    loader_close(&loader);
    dataset_close(&data);
    model_free(&single);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// Planted sequences

enum { PLANTED = 20, FIRST = 239, EVERY = 15, STEPS = FIRST + EVERY * PLANTED, STEP_SAMPLES = 2, LENGTH = 64,
       SEED = 1337 };

// Runs a program in the directory of the test and returns it with its output; the caller frees it.
static Program program_of(const char* program, const char* arguments) {
    static Words words;
    Program p;
    memset(&words, 0, sizeof words);
    words_put(&words, 0, program, strlen(program));
    words_add(&words, arguments);
    program_start(&p, words.words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    if (!program_good(&p)) program_print(&p, program);
    need(program_good(&p), "%s %s", program, arguments);
    return p;
}

static void program_run(const char* program, const char* arguments) {
    Program p = program_of(program, arguments);
    program_free(&p);
}

// The bad token that replaces a good one, at a position of planted sequence k.
static uint16_t planted_token(int k, uint64_t position, uint16_t good) {
    static const char repeated[] = "q~X#@&%$!^7";
    uint32_t random = random4(5, RANDOM_TEST, (uint64_t)k, position).bits[0];
    switch (k % 4) {
        case 0: return (uint16_t)(random % 256);        // garbage
        case 1: return (uint16_t)repeated[k / 4];       // one token
        case 2: return (uint16_t)(good + 1);            // shifted text
        default: return (uint16_t)(130 + random % 100); // tokens not in the text
    }
}

// Replaces the text of one sample in each of the steps FIRST + 1, FIRST + 1 + EVERY ...; starts gets their positions.
static void plant(size_t starts[PLANTED]) {
    Dataset data;
    need(dataset_open(&data, "bad_train_*.bin", &error), "%s", error.text);
    for (int k = 0; k < PLANTED; k++) {
        uint64_t sample = (uint64_t)(FIRST + EVERY * k) * STEP_SAMPLES + (uint64_t)k / 2 % STEP_SAMPLES;
        Window window = dataset_sample(&data, SEED, sample, LENGTH);
        uint16_t bad[LENGTH - 1];  // not the tokens shared with the windows before and after it
        for (size_t i = 0; i < COUNT_OF(bad); i++)
            bad[i] = planted_token(k, i, (uint16_t)shard_token(&data.shards[0], window.start + 1 + i));
        starts[k] = window.start;
        patch("bad_train_000000.bin", sizeof(ShardHeader) + 2 * (window.start + 1), bad, sizeof bad);
    }
    dataset_close(&data);
    const uint64_t unknown = 0;
    patch("bad_train_000000.bin", offsetof(ShardHeader, checksum), &unknown, sizeof unknown);
}

// Whether the first sequence in the event of step FIRST + 1 + EVERY * k is the planted one, and the console has a line
// about it; counts the events of other steps.
static void expect_found(const char* run, const size_t starts[PLANTED]) {
    char* events = text_read(text_of("%s/events.jsonl", run), NULL);
    int found = 0, others = 0;
    char* rest = events;
    for (char* line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        Json json;
        uint64_t step = 0, at = 0;
        char event[32] = "", shard[64] = "";
        need(json_parse(&json, line, strlen(line), "events", &error), "%s", error.text);
        json_string(&json, json_get(&json, 0, "event"), event, sizeof event);
        json_u64(&json, json_get(&json, 0, "step"), &step);
        if (strcmp(event, "bad_batch") == 0) {
            uint32_t sequence = json_first(&json, json_get(&json, 0, "sequences"));
            uint64_t k = (step - FIRST - 1) / EVERY;
            bool planted = step > FIRST && (step - FIRST - 1) % EVERY == 0 && k < PLANTED;
            json_u64(&json, json_get(&json, sequence, "at"), &at);
            json_string(&json, json_get(&json, sequence, "shard"), shard, sizeof shard);
            found += planted && at == starts[k] && strcmp(shard, "bad_train_000000.bin") == 0;
            others += !planted;
        }
        json_free(&json);
    }
    check(found == PLANTED, "%s: %d planted sequences of %d are found", run, found, PLANTED);
    check(others <= 2, "%s: %d other steps of %d are traced", run, others, STEPS - PLANTED);
    free(events);
}

static void test_planted(const char* train, const char* tokenize, const char* corpus) {
    static const char* const runs[][2] = {
        {"one", ""},
        {"ranks", "--ranks 2 --zero 2"},
        {"untraced", "--spike-trace 0 --spike-loss 0"},
    };
    size_t starts[PLANTED];
    uint64_t hashes[COUNT_OF(runs)];
    program_run(corpus, "--out text --bytes 200000 --val-bytes 1000");
    program_run(tokenize, "--bytes text_train.txt --out bad --val 0");
    plant(starts);
    for (size_t i = 0; i < COUNT_OF(runs); i++) {
        program_run(train, text_of("--data bad_train_*.bin --batch 1 --total-batch %d --layers 2 --heads 2 "
                                   "--channels 32 --seq %d --steps %d --lr 2e-3 --warmup 20 --reduce exact --threads 1 "
                                   "--log-every 15 --out %s %s", STEP_SAMPLES * LENGTH, LENGTH, STEPS, runs[i][0],
                                   runs[i][1]));
        if (i < 2) expect_found(runs[i][0], starts);
        hashes[i] = weights_hash(text_of("%s/step_%08d", runs[i][0], STEPS), &error);
    }
    check(hashes[0] != 0 && hashes[0] == hashes[1] && hashes[0] == hashes[2], "tracing changes no bit of the weights");
    double at[STEPS];
    size_t lines = log_numbers(at, STEPS, "one", "worst_loss_at"), logged = 0;
    for (size_t i = 0; i < lines; i++) logged += !isnan(at[i]) && at[i] == (double)starts[logged % PLANTED];
    check(logged == PLANTED, "metrics.jsonl has the positions of %zu planted sequences of %d", logged, PLANTED);
    Program p = program_of(tokenize, text_of("--show bad_train_000000.bin --at %zu --tokens 40", starts[1] + 5));
    check(strcmp(p.text[0], "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq\n") == 0,
          "tokenize --show prints what was planted");
    program_free(&p);
    need(rename("bad_train_000000.bin", "bad\x1b.bin") == 0, "a name that no terminal shows");
    p = program_of(train, text_of("--data bad?.bin --batch 1 --total-batch %d --layers 2 --heads 2 --channels 32 "
                                  "--seq %d --steps %d --lr 2e-3 --warmup 20 --threads 1", STEP_SAMPLES * LENGTH,
                                  LENGTH, FIRST + 2 * EVERY));
    check(strstr(p.text[0], "; in 'bad\\x1b.bin' --at ") && !strstr(p.text[0], "--show"),
          "and no command is shown for a file that it would not find");
    program_free(&p);
}

int main(int argc, char** argv) {
    const char* programs[3] = {"build/train-FP32", "build/tokenize", "build/corpus"};
    const Flag rows[] = {
        {"train", KIND_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
        {"tokenize", KIND_TEXT, &programs[1], "PATH", 0, 0, "the program", 0},
        {"corpus", KIND_TEXT, &programs[2], "PATH", 0, 0, "the program", 0},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_trace", NULL, &flags, argc, argv)) return code;
    tests_begin("test_trace");
    test_tensors(&GPT2, "GPT-2");
    test_tensors(&LLAMA, "Llama");
    test_overflows();
    test_norms();
    for (int i = 0; i < 3; i++) {
        const char* name = programs[i];
        programs[i] = realpath(name, NULL);
        need(programs[i] != NULL, "there is no %s", name);
    }
    root_enter();
    test_planted(programs[0], programs[1], programs[2]);
    for (int i = 0; i < 3; i++) free((char*)programs[i]);
    return tests_end();
}
