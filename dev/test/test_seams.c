// test_seams.c: what later features build on, without them, changes no bit.
//
//   weights   a head whose rows all weigh 1 against no weights; a row of weight 0 has no gradient
//   output    block_output in the middle of a model: the rest of it gives the same losses and gradients
//   slots     two micro-batches in flight, in their own slots, against one after the other
//   step      model_step against the calls that it consists of
//   lora      pairs whose b is 0 change no bit, and others do; their gradients against differences of the loss
//   objectives  the derivatives of each objective against differences
//   tensors   shapes, splits, weight decay, hidden matrices and shared second moments of both families, by hand
//
//   make build/test_seams && build/test_seams

#include "llmtrain/run/objectives.h"
#include "harness.h"

enum { B = 2, T = 10, N = B * T, V = 61, L = 3, C = 24 };

static const Config GPT2_SMALL = {.family = FAMILY_GPT2, .layers = L, .heads = 3, .channels = C, .context = T,
                                  .vocab = V, .tied = true};
static const Config LLAMA_SMALL = {.family = FAMILY_LLAMA, .layers = L, .heads = 4, .kv_heads = 2, .channels = C,
                                   .ffn = 40, .context = T, .vocab = V, .qk_norm = true, .head_size = 6};

static Error error;

static void model_open(Model* model, const Config* config, size_t slots) {
    ModelOptions options = {.B = B, .T = T, .slots = slots, .training = true,
                            .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    need(model_create(model, config, options, &error) && model_randomize(model, 7, &error), "%s", error.text);
}

// Micro-batch `number`; some targets do not count.
static void batch_fill(int32_t tokens[N], int32_t targets[N], uint64_t number) {
    for (size_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)(random_bits(1, RANDOM_TEST, number, i) % V);
        targets[i] = i % 7 == 3 ? -1 : (int32_t)(random_bits(2, RANDOM_TEST, number, i) % V);
    }
}

static uint64_t gradients_hash(const Model* model) {
    return hash_bytes(model->flat.grads, model->flat.sums_size * sizeof(float));
}

// What model_gradients does after its forward.
static void backward(Model* model, const float* weights) {
    flat_begin_bucket(&model->flat, model_head_bucket(model));
    model_head(model, weights, 1.0f / N);
    model_backward(model);
}

static void test_weights(const char* name, const Config* config) {
    Model model;
    int32_t tokens[N], targets[N];
    float weights[N];
    uint64_t hash[3];
    double heaviest = 0;
    model_open(&model, config, 1);
    batch_fill(tokens, targets, 1);
    for (int pass = 0; pass < 3; pass++) {
        for (size_t i = 0; i < N; i++) weights[i] = pass < 2 ? 1.0f : (float)(i % 4) / 2;
        model_begin_step(&model, 1, 1);
        model.flat.micro = 1;
        model_upload(&model, tokens, targets, B, T, false);
        model_forward(&model);
        backward(&model, pass ? weights : NULL);
        hash[pass] = gradients_hash(&model);
    }
    check(hash[0] == hash[1], "%s: weights of 1 give the gradients of no weights", name);
    check(hash[0] != hash[2], "%s: other weights give others", name);
    // The last row's hidden state feeds no other row: its gradient is that of its own loss, times its weight. The logits
    // are computed in several parts, of which the last has it.
    model_begin_step(&model, 1, 1);
    model.logits_rows = min_size(7, model.logits_rows);
    for (size_t i = 0; i < N; i++) weights[i] = i + 1 == N ? 0.0f : 1.0f;
    model_forward(&model);
    flat_begin_bucket(&model.flat, model_head_bucket(&model));
    model_head(&model, weights, 1.0f / N);
    for (size_t c = 0; c < C; c++) heaviest = fmax(heaviest, fabs(float_of(model.gradients.hidden[(N - 1) * C + c])));
    check(heaviest == 0, "%s: a row of weight 0 has no gradient: %g", name, heaviest);
    check(model.activations->losses[N - 1] > 0, "%s: its loss is computed all the same", name);
    model_free(&model);
}

static void test_output(const char* name, const Config* config) {
    Model model;
    int32_t tokens[N], targets[N];
    uint64_t hash[2];
    float losses[2][N];
    model_open(&model, config, 1);
    batch_fill(tokens, targets, 1);
    for (int cut = 0; cut < 2; cut++) {
        Activations* a = model.activations;
        model_begin_step(&model, 1, 1);
        model.flat.micro = 1;
        model_upload(&model, tokens, targets, B, T, false);
        model_forward(&model);
        if (cut) {  // the last two blocks again, from the first one's output, as the next stage of a pipeline
            model.first_block = 0;
            block_forward(&model, 0);
            block_output(&model, a->blocks[1].input, 0);
            model.first_block = 1;
            for (size_t l = 1; l < L; l++) block_forward(&model, l);
            norm_forward(&model, a->hidden, a->output, a->mean, a->rstd, a->blocks[L - 1].attention_residual, a->branch,
                         model.weights.final_norm, N);
        }
        backward(&model, NULL);
        memcpy(losses[cut], a->losses, sizeof losses[cut]);
        hash[cut] = gradients_hash(&model);
    }
    check(memcmp(losses[0], losses[1], sizeof losses[0]) == 0, "%s: a block's output as one tensor: the losses", name);
    check(hash[0] == hash[1], "%s: a block's output as one tensor: the gradients", name);
    model_free(&model);
}

static void test_slots(const char* name, const Config* config) {
    Model one, two;
    int32_t tokens[2][N], targets[2][N];
    model_open(&one, config, 1);
    model_open(&two, config, 2);
    model_begin_step(&one, 1, 2);
    model_begin_step(&two, 1, 2);
    for (uint64_t i = 0; i < 2; i++) {
        batch_fill(tokens[i], targets[i], i);
        one.flat.micro++;
        model_upload(&one, tokens[i], targets[i], B, T, false);
        model_forward(&one);
        backward(&one, NULL);
    }
    for (size_t i = 0; i < 2; i++) {  // both forwards, then both backwards
        model_use_slot(&two, i);
        model_upload(&two, tokens[i], targets[i], B, T, false);
        model_forward(&two);
    }
    for (size_t i = 0; i < 2; i++) {
        two.flat.micro++;
        model_use_slot(&two, i);
        backward(&two, NULL);
    }
    check(gradients_hash(&one) == gradients_hash(&two), "%s: two micro-batches in flight: the same gradients", name);
    model_free(&one);
    model_free(&two);
}

typedef struct {
    int32_t tokens[N], targets[N];
    uint64_t next;
} Source;

static bool source_next(void* source, const int32_t** tokens, const int32_t** targets, Error* e) {
    Source* s = (Source*)source;
    if (s->next == 3) return fail_with(e, "there are three micro-batches");
    batch_fill(s->tokens, s->targets, s->next++);
    *tokens = s->tokens;
    *targets = s->targets;
    return true;
}

static void test_step(const char* name, const Config* config) {
    Model model;
    Source source = {.next = 0};
    int32_t tokens[N], targets[N];
    model_open(&model, config, 1);
    model_begin_step(&model, 8, 3);
    for (uint64_t i = 0; i < 3; i++) {
        batch_fill(tokens, targets, i);
        model_gradients(&model, tokens, targets, B, T);
    }
    uint64_t hash = gradients_hash(&model);
    bool ok = model_step(&model, source_next, &source, 8, 3, &error);
    check(ok && gradients_hash(&model) == hash, "%s: model_step: the gradients of its micro-batches", name);
    check(!model_step(&model, source_next, &source, 8, 1, &error) && strstr(error.text, "three"),
          "%s: model_step: an error of the source is its own", name);
    model_free(&model);
}

static double batch_loss(Model* model, const int32_t* tokens, const int32_t* targets) {
    ExactSum sum;
    fill_zero(&model->flat.sums->losses, sizeof sum, model->stream);
    model_losses(model, tokens, targets, B, T);
    device_download(&sum, &model->flat.sums->losses, sizeof sum, model->stream);
    return exact_value(sum) / (double)targets_count(targets, N);
}

// The pairs of every layer, plain or divided by the root of the rank: without b the model is the base.
static void test_lora(const char* name, const Config* base, LoraScale scale) {
    Model plain, model;
    Config config = *base;
    int32_t tokens[N], targets[N];
    float b[C * 4 * 3];
    double worst = 0;
    config.lora = 3;
    config.lora_alpha = 6;
    config.lora_scale = scale;
    model_open(&plain, base, 1);
    model_open(&model, &config, 1);
    batch_fill(tokens, targets, 1);
    double expected = batch_loss(&plain, tokens, targets);
    check(batch_loss(&model, tokens, targets) == expected, "%s: pairs whose b is zero give the losses of the base", name);
    for (uint32_t i = 0; i < model.parameters.count; i++) {
        const TensorId id = {i};
        const Tensor* t = &model.parameters.tensors[i];
        size_t n = tensor_elements(t);
        check(t->trains == (t->adapter != 0), "%s: %s trains, or does not", name, t->name);
        if (t->adapter != 'b') continue;
        need(n <= COUNT_OF(b), "%zu elements", n);
        for (size_t e = 0; e < n; e++) b[e] = 0.1f * random_normal(3, RANDOM_TEST, i, e);
        need(flat_set_params(&model.flat, id, 0, b, n, &error), "%s", error.text);
    }
    check(fabs(batch_loss(&model, tokens, targets) - expected) > 1e-3, "%s: others change them", name);
    model.layers.adapters.scale = 0;
    check(batch_loss(&model, tokens, targets) == expected, "%s: switched off, the losses of the base", name);
    model.layers.adapters.scale = config_lora_scale(&config);
    model_begin_step(&model, 1, 1);
    model_gradients(&model, tokens, targets, B, T);
    double mean = (double)N / (double)targets_count(targets, N);
    for (uint32_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        if (!t->adapter) continue;
        const float* gradient = flat_gradient(&model.flat, t);
        size_t e = 0;
        for (size_t k = 0; k < tensor_elements(t); k++) e = fabsf(gradient[k]) > fabsf(gradient[e]) ? k : e;
        floatX *w = (floatX*)(uintptr_t)flat_param(&model.flat, t) + e, was = *w;
        double loss[2], exact = (double)gradient[e] * mean, step = 0.02;
        for (int side = 0; side < 2; side++) {
            *w = was + (floatX)(side ? step : -step);
            loss[side] = batch_loss(&model, tokens, targets);
        }
        *w = was;
        worst = fmax(worst, fabs((loss[1] - loss[0]) / (2 * step) - exact) / (fabs(exact) + 1e-3));
    }
    check(worst < 0.05, "%s: the largest gradients of the pairs are %.1e from differences of the loss", name, worst);
    model_free(&plain);
    model_free(&model);
}

static void test_objectives(void) {
    ObjectiveOptions o = {.beta = 0.3, .margin = 0.4, .label_smoothing = 0.1};
    for (int kind = OBJECTIVE_DPO; kind < OBJECTIVE_COUNT; kind++) {
        double worst = 0;
        for (int i = 0; i < 40; i++) {
            double x[2] = {-0.05 - 0.11 * i, -0.3 - 0.07 * (i * 7 % 40)}, d[2], other[2], h = 1e-6;
            double value = OBJECTIVES[kind].loss(d, x, &o);
            if (kind == OBJECTIVE_HINGE && fabs(value) < 1e-3) continue;  // its corner
            for (int k = 0; k < (kind == OBJECTIVE_KTO ? 1 : 2); k++) {
                double y[2][2] = {{x[0], x[1]}, {x[0], x[1]}};
                y[0][k] -= h;
                y[1][k] += h;
                double slope = (OBJECTIVES[kind].loss(other, y[1], &o) - OBJECTIVES[kind].loss(other, y[0], &o)) / (2 * h);
                worst = fmax(worst, fabs(slope - d[k]) / (fabs(d[k]) + 1e-3));
            }
        }
        check(worst < 1e-6, "%s: its derivatives are %.1e from differences", OBJECTIVES[kind].name, worst);
    }
    double d[2], even[2] = {0, 0};
    check(fabs(objective_dpo(d, even, &o) - log(2)) < 1e-15, "dpo of equal answers is ln 2");
}

// What is known of each tensor, in the order of the flat vector. Weight decay is for matrices alone, embeddings
// included (nanoGPT). Muon's, GaLore's and LDAdam's matrices are those inside the blocks; queries, keys and values, and
// Llama's gate and up, are matrices of their own ("Muon is Scalable for LLM Training"). A second moment of Adam-mini
// belongs to a head of queries or keys, to a row of any other matrix, or to a vector. Tensor parallelism splits as in
// "Megatron-LM".
typedef struct {
    const char* name;
    bool in_block;
    size_t rows, cols;
    TensorSplit split;
    bool hidden;
    size_t stacked[SHAPE_MATRICES], shared;  // the first `shared` rows share second moments, by heads
} Known;

#define VECTOR(name, in_block, rows, split) {name, in_block, rows, 0, split, false, {0}, 0}
#define MATRIX(name, rows, cols, split, ...) {name, true, rows, cols, split, true, __VA_ARGS__}
#define TABLE(name, rows, split) {name, false, rows, 24, split, false, {0}, 0}

static const Known GPT2_TENSORS[] = {
    TABLE("token_embedding", 61, SPLIT_ROWS), TABLE("position_embedding", 10, SPLIT_NONE),
    VECTOR("norm1_weight", true, 24, SPLIT_NONE), VECTOR("norm1_bias", true, 24, SPLIT_NONE),
    MATRIX("qkv_weight", 72, 24, SPLIT_ROWS, {24, 24, 24}, 48), VECTOR("qkv_bias", true, 72, SPLIT_ROWS),
    MATRIX("attention_out_weight", 24, 24, SPLIT_COLUMNS, {0}, 0), VECTOR("attention_out_bias", true, 24, SPLIT_NONE),
    VECTOR("norm2_weight", true, 24, SPLIT_NONE), VECTOR("norm2_bias", true, 24, SPLIT_NONE),
    MATRIX("ffn_in_weight", 96, 24, SPLIT_ROWS, {0}, 0), VECTOR("ffn_in_bias", true, 96, SPLIT_ROWS),
    MATRIX("ffn_out_weight", 24, 96, SPLIT_COLUMNS, {0}, 0), VECTOR("ffn_out_bias", true, 24, SPLIT_NONE),
    VECTOR("final_norm_weight", false, 24, SPLIT_NONE), VECTOR("final_norm_bias", false, 24, SPLIT_NONE)};
static const Known LLAMA_TENSORS[] = {
    TABLE("token_embedding", 61, SPLIT_ROWS), VECTOR("norm1_weight", true, 24, SPLIT_NONE),
    MATRIX("qkv_weight", 48, 24, SPLIT_ROWS, {24, 12, 12}, 36), VECTOR("q_norm_weight", true, 6, SPLIT_NONE),
    VECTOR("k_norm_weight", true, 6, SPLIT_NONE), MATRIX("attention_out_weight", 24, 24, SPLIT_COLUMNS, {0}, 0),
    VECTOR("norm2_weight", true, 24, SPLIT_NONE), MATRIX("ffn_in_weight", 80, 24, SPLIT_ROWS, {40, 40, 0}, 0),
    MATRIX("ffn_out_weight", 24, 40, SPLIT_COLUMNS, {0}, 0), VECTOR("final_norm_weight", false, 24, SPLIT_NONE),
    TABLE("head_weight", 61, SPLIT_ROWS)};

// Compares the table of the model with `known`; known_of has the row of each tensor then.
static void compare_tensors(const Known** known_of, const Model* model, const Known* known, size_t count) {
    size_t i = 0, first = 0, last = 0;
    while (!known[first].in_block) first++;
    while (last < count && (last < first || known[last].in_block)) last++;
    for (size_t k = 0, l = 0; k < count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        const Known* row = known_of[i] = &known[k];
        const char* name = row->in_block ? text_of("block.%zu.%s", l, row->name) : row->name;
        size_t bucket = row->in_block ? 1 + l : k < first ? 0 : 1 + L;
        if (!expect(i < model->parameters.count && strcmp(t->name, name) == 0, "tensor %zu is not %s", i, name)) return;
        expect(t->rows == row->rows && t->cols == row->cols && t->bucket == bucket && t->part.by == row->split,
               "%s: (%zu, %zu), bucket %zu, split %d", name, t->rows, t->cols, t->bucket, (int)t->part.by);
        expect(t->shape.hidden == row->hidden && memcmp(t->shape.stacked, row->stacked, sizeof row->stacked) == 0,
               "%s: is of hidden matrices: %d, of %zu, %zu, %zu rows", name, t->shape.hidden, t->shape.stacked[0],
               t->shape.stacked[1], t->shape.stacked[2]);
        if (++k == last && ++l < L) k = first;
    }
    expect(i == model->parameters.count, "there are %zu tensors, not %zu", model->parameters.count, i);
}

// Updates with weights of 1 and gradients of 0 leave 1 - lr x decay where weight decay applies. An update of Adam-mini
// with gradients of 1 in one row and small ones elsewhere, all of a size, moves those by lr, but by much less where
// they share a second moment with the large ones.
static void test_tensors(const char* name, const Config* config, const Known* known, size_t count) {
    static const size_t heads_rows[] = {8, 6};
    const Known* known_of[64];
    const size_t D = heads_rows[config->family == FAMILY_LLAMA];
    for (int kind = 0; kind < 2; kind++) {
        Model model;
        ModelOptions options = {.B = B, .T = T, .training = true,
                                .optimizer = optimizer_defaults(kind ? OPTIMIZER_ADAM_MINI : OPTIMIZER_ADAMW)};
        if (kind) options.optimizer.weight_decay = 0;
        need(model_create(&model, config, options, &error), "%s", error.text);
        compare_tensors(known_of, &model, known, count);
        for (uint64_t large = 0; large < (kind ? 99 : 1); large += 23) {
            for (size_t i = 0; i < model.parameters.count; i++) {
                const Tensor* t = &model.parameters.tensors[i];
                size_t cols = max_size(t->cols, 1);
                for (size_t k = 0; k < tensor_elements(t); k++) {
                    model.flat.params[t->offset + k] = floatX_of(1);
                    if (kind) model.flat.grads[t->offset + k] = k / cols == large % t->rows ? 1.0f : 0x1p-10f;
                }
            }
            need(flat_reset_optimizer(&model.flat, &error), "%s", error.text);
            model.flat.loss_scale = model.flat.mean_factor = 1;
            model_update(&model, 1, 0x1p-6, 1);
            for (size_t i = 0; i < model.parameters.count; i++) {
                const Tensor* t = &model.parameters.tensors[i];
                for (size_t row = 0; row < t->rows; row++) {
                    float w = float_of(model.flat.params[t->offset + row * max_size(t->cols, 1)]);
                    size_t other = large % t->rows, shared = known_of[i]->shared;
                    bool shares = t->cols == 0 || (row < shared && other < shared && row / D == other / D);
                    if (kind == 0)
                        expect(w == (t->cols ? 1 - 0x1p-6f * 0.1f : 1), "%s, row %zu: decays to %g", t->name, row,
                               (double)w);
                    else if (row != other)
                        expect((1 - w > 0x1p-7f) == !shares, "%s, row %zu with %zu: moves by %g", t->name, row, other,
                               (double)(1 - w));
                }
            }
        }
        model_free(&model);
    }
    verdict("%s: each tensor's shape, place, matrices, split, weight decay and shared second moments", name);
}

int main(void) {
    static const struct { const char* name; const Config* config; const Known* known; size_t count; } families[] = {
        {"gpt2", &GPT2_SMALL, GPT2_TENSORS, COUNT_OF(GPT2_TENSORS)},
        {"llama", &LLAMA_SMALL, LLAMA_TENSORS, COUNT_OF(LLAMA_TENSORS)}};
    tests_begin("test_seams");
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        test_weights(families[i].name, families[i].config);
        test_output(families[i].name, families[i].config);
        test_slots(families[i].name, families[i].config);
        test_step(families[i].name, families[i].config);
        test_lora(text_of("%s, plain", families[i].name), families[i].config, LORA_PLAIN);
        test_lora(text_of("%s, rs", families[i].name), families[i].config, LORA_RS);
        test_tensors(families[i].name, families[i].config, families[i].known, families[i].count);
    }
    test_objectives();
    return tests_end();
}
