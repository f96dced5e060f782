// test_seams.c: what later features build on, without them, changes no bit.
//
//   weights   a head whose rows all weigh 1 against no weights; a row of weight 0 has no gradient
//   output    block_output in the middle of a model: the rest of it gives the same losses and gradients
//   slots     two micro-batches in flight, in their own slots, against one after the other
//   step      model_step against the calls that it consists of
//   split     how tensor parallelism may split each tensor of both families
//
//   make build/test_seams && build/test_seams

#include "llmtrain.h"
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
    // are computed in three parts, of which the last has it.
    model_begin_step(&model, 1, 1);
    model.logits_rows = 7;
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

static void test_split(const char* name, const Config* config) {
    static const struct { const char* suffix; TensorSplit split; } expected[] = {
        {"qkv_weight", SPLIT_ROWS}, {"qkv_bias", SPLIT_ROWS}, {"ffn_in_weight", SPLIT_ROWS},
        {"ffn_in_bias", SPLIT_ROWS}, {"attention_out_weight", SPLIT_COLUMNS}, {"ffn_out_weight", SPLIT_COLUMNS},
        {"token_embedding", SPLIT_ROWS}, {"head_weight", SPLIT_ROWS}};
    Model model;
    size_t wrong = 0, split = 0;
    model_open(&model, config, 1);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        TensorSplit should = SPLIT_NONE;
        for (size_t k = 0; k < COUNT_OF(expected); k++) {
            size_t length = strlen(t->name), end = strlen(expected[k].suffix);
            if (length >= end && strcmp(t->name + length - end, expected[k].suffix) == 0) should = expected[k].split;
        }
        wrong += t->split != should;
        split += t->split != SPLIT_NONE;
    }
    check(wrong == 0 && split >= 4 * L + 1, "%s: tensors say how they may be split: %zu wrong", name, wrong);
    model_free(&model);
}

int main(void) {
    static const struct { const char* name; const Config* config; } families[] = {
        {"gpt2", &GPT2_SMALL}, {"llama", &LLAMA_SMALL}};
    tests_begin("test_seams");
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        test_weights(families[i].name, families[i].config);
        test_output(families[i].name, families[i].config);
        test_slots(families[i].name, families[i].config);
        test_step(families[i].name, families[i].config);
        test_split(families[i].name, families[i].config);
    }
    return tests_end();
}
