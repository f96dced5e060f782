// test_train.cu: tests of the whole model and of whole runs.
//
//   1. fixtures     losses, logits, every gradient and 20 training steps against float64 (dev/test/fixture.py)
//   2. pieces       dropout's gradient, schedules, the guard, the loss scale, when to save and what to keep, sampling,
//                   two models in one process; --recompute and --train
//   3. sizes        presets; initial weights and gradients of models that need several pieces
//   4. runs         the program itself, called as a function: same bits twice, with 1 to 3 threads, after a resume
//   5. damage       checkpoints truncated anywhere, or with any byte flipped: refused or skipped, never used
//
// This file includes train.cu, with its main renamed, so that the tested code is the shipped code. Run the tests from
// the repository's root; they work in a directory of their own under $TMPDIR or /tmp and remove it.

#define main train_main
#include "train.cu"
#undef main

#include "data/shards.h"

#include <sys/wait.h>

static char work[256];  // the test's directory
static int passed, failed;

// A check: error must be at most bound; NaN fails.
static void check(const char* what, double error, double bound) {
    bool ok = error <= bound;
    printf("%-78s err %.2e <= %.2e%s\n", what, error, bound, ok ? "" : "   FAILED");
    *(ok ? &passed : &failed) += 1;
}

static void check_true(const char* what, bool ok) {
    printf("%-78s %s\n", what, ok ? "ok" : "FAILED");
    *(ok ? &passed : &failed) += 1;
}

// For conditions that must hold: without them no further test makes sense.
static void need(bool ok, const Error* error) {
    if (ok) return;
    printf("test_train: %s\n0 passed, 1 failed\n", error->text);
    exit(1);
}

// ------------------------------------------------------------------------------------------------
// 1. Fixtures
//
// Errors are relative, in the Euclidean norm of a whole tensor. The bound in FP32 is 1e-5, about a hundred roundings.
// In 16 bits each activation is rounded about 12 times per block, each time by at most the unit roundoff: errors of
// random sign add up to sqrt(12 L) roundoffs forward, the same again backward, and the bound is 4 standard deviations
// of that.

static double bound_of(double fp32, size_t layers) {
    if (FLOATX_IS_FLOAT) return fp32;
    return 4 * FLOATX_EPSILON * sqrt(24.0 * (double)(layers + 1));
}

static void* fixture_read(const SafetensorsFile* file, const char* name, size_t* bytes) {
    Error error;
    const SafetensorsTensor* t = safetensors_find(file, name);
    if (t == NULL) need(fail_with(&error, "%s has no tensor %s", file->path, name), &error);
    void* data = memory_allocate(t->bytes);
    need(safetensors_read(file, t, data, t->bytes, NULL, &error), &error);
    if (bytes) *bytes = t->bytes;
    return data;
}

static double relative_error(const float* found, const float* expected, size_t n) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += pow((double)found[i] - (double)expected[i], 2);
        size += pow((double)expected[i], 2);
    }
    return sqrt(difference) / (size > 0 ? sqrt(size) : 1.0);
}

// Copies n elements from the device, as floats.
static void read_floatX(float* out, const floatX* from, size_t n, const Model* model) {
    floatX* copy = (floatX*)memory_allocate(n * sizeof(floatX));
    device_download(copy, from, n * sizeof(floatX), model->stream);
    for (size_t i = 0; i < n; i++) out[i] = float_of(copy[i]);
    free(copy);
}

// Computes the gradients of `micro_batches` consecutive batches (B, T), with a loss scale; returns their loss, and the
// norm of the gradients unless that is NULL.
static double step_gradients(Model* model, double* norm, const int32_t* tokens, const int32_t* targets,
                             double loss_scale, size_t micro_batches, size_t B, size_t T) {
    StepResult result;
    StepFlags flags = {false, false, false, false};
    Error error;
    model_begin_step(model, loss_scale, micro_batches);
    for (size_t i = 0; i < micro_batches; i++) model_gradients(model, tokens + i * B * T, targets + i * B * T, B, T);
    need(model_finish_step(model, &result, flags, &error), &error);
    if (norm) *norm = result.grad_norm;
    return result.loss;
}

static double batch_gradients(Model* model, double* norm, const int32_t* tokens, const int32_t* targets, size_t B,
                              size_t T) {
    return step_gradients(model, norm, tokens, targets, 1.0, 1, B, T);
}

static void randomize(Model* model, uint64_t seed) {
    Error error;
    need(model_randomize(model, seed, &error), &error);
}

static void fixture_parameters(Model* model, const SafetensorsFile* file) {
    Error error;
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        char name[64];
        snprintf(name, sizeof name, "param.%s", t->name);
        float* values = (float*)fixture_read(file, name, NULL);
        need(model_set_params(model, t->offset, values, tensor_elements(t), &error), &error);
        free(values);
    }
}

static Config fixture_config(const int32_t* c) {
    Config config;
    Error error;
    memset(&config, 0, sizeof config);
    config.family = (Family)c[0];
    config.layers = (size_t)c[1];
    config.heads = (size_t)c[2];
    config.kv_heads = (size_t)c[3];
    config.channels = (size_t)c[4];
    config.ffn = (size_t)c[5];
    config.context = (size_t)c[6];
    config.vocab = (size_t)c[7];
    config.tied = c[8] != 0;
    config.head_size = (size_t)c[11];
    config.qkv_bias = c[12] != 0;
    config.qk_norm = c[13] != 0;
    config.rope_scaling = c[14] ? ROPE_SCALING_LLAMA3 : ROPE_SCALING_NONE;
    config.rope_factor = c[14];
    config.rope_original = (size_t)c[15];
    need(config_complete(&config, &error), &error);
    return config;
}

static ModelOptions test_options(size_t B, size_t T) {
    ModelOptions o;
    memset(&o, 0, sizeof o);
    o.B = B;
    o.T = T;
    o.training = o.master_weights = true;
    o.cached_sequences = 3;
    return o;
}

// Loss, logits and every gradient of the first batch.
static void test_fixture_gradients(Model* model, const SafetensorsFile* file, const char* fixture,
                                   const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    char what[160];
    size_t V = model->config.vocab, L = model->config.layers, N = B * T;
    double* expected_loss = (double*)fixture_read(file, "loss", NULL);
    float* expected_logits = (float*)fixture_read(file, "logits", NULL);
    float *logits = (float*)memory_allocate(N * V * sizeof(float)),
          *grads = (float*)memory_allocate(model->parameters.flat_size * sizeof(float));

    model_forward(model, model_upload(model, tokens, NULL, B, T), B, T, false);
    for (size_t row = 0; row < N; row++) {
        model_logits(model, row, 1);
        read_floatX(logits + row * V, model->activations.logits, V, model);
    }
    snprintf(what, sizeof what, "%s logits", fixture);
    check(what, relative_error(logits, expected_logits, N * V), bound_of(1e-5, L));

    double loss = batch_gradients(model, NULL, tokens, targets, B, T);
    device_download(grads, model->flat.grads, model->parameters.flat_size * sizeof(float), model->stream);
    snprintf(what, sizeof what, "%s loss", fixture);
    check(what, fabs(loss - *expected_loss) / *expected_loss, bound_of(1e-5, L));

    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        char name[64];
        snprintf(name, sizeof name, "grad.%s", t->name);
        float* expected = (float*)fixture_read(file, name, NULL);
        snprintf(what, sizeof what, "%s gradient of %s", fixture, t->name);
        check(what, relative_error(grads + t->offset, expected, tensor_elements(t)), bound_of(1e-5, L));
        free(expected);
    }
    free(expected_loss);
    free(expected_logits);
    free(logits);
    free(grads);
}

// With a loss scale, the norm and SGD's update must be those of the unscaled gradients: weights move by lr x factor x
// gradient. Leaves the model with other parameters.
static void test_fixture_loss_scale(Model* model, const SafetensorsFile* file, const char* fixture,
                                    const int32_t* tokens, const int32_t* targets, size_t B, size_t T) {
    const double lr = 64, factor = 0.25;
    char what[160];
    size_t L = model->config.layers, P = model->parameters.flat_size;
    OptimizerOptions o = {OPTIMIZER_SGD, 0, 0, 1e-8, 0, 0, 0};
    double *expected_norms = (double*)fixture_read(file, "grad_norms", NULL), norm, worst = 0;
    float *before = (float*)memory_allocate(P * sizeof(float)), *after = (float*)memory_allocate(P * sizeof(float));
    const void* weights = model->flat.master_weights ? (void*)model->flat.master_weights : (void*)model->flat.params;
    step_gradients(model, &norm, tokens, targets, 1024, 1, B, T);
    snprintf(what, sizeof what, "%s norm with a loss scale of 1024", fixture);
    check(what, fabs(norm / expected_norms[0] - 1), bound_of(1e-5, L));
    device_download(before, weights, P * sizeof(float), model->stream);
    model_update(model, &o, 1, lr, factor);
    device_download(after, weights, P * sizeof(float), model->stream);
    for (size_t i = 0; i < P; i++) after[i] = (float)((double)(before[i] - after[i]) / (lr * factor));
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        char name[64];
        snprintf(name, sizeof name, "grad.%s", t->name);
        float* expected = (float*)fixture_read(file, name, NULL);
        double error = relative_error(after + t->offset, expected, tensor_elements(t));
        worst = error <= worst ? worst : error;
        free(expected);
    }
    snprintf(what, sizeof what, "%s step of SGD with a loss scale of 1024, worst tensor", fixture);
    check(what, worst, bound_of(2e-5, L));
    free(expected_norms);
    free(before);
    free(after);
}

// Twenty steps of AdamW with clipping, one batch each.
static void test_fixture_training(Model* model, const SafetensorsFile* file, const char* fixture, const int32_t* tokens,
                                  const int32_t* targets, size_t B, size_t T) {
    char what[160];
    double* hyper = (double*)fixture_read(file, "hyper", NULL);
    double* expected_losses = (double*)fixture_read(file, "losses", NULL);
    double* expected_norms = (double*)fixture_read(file, "grad_norms", NULL);
    Error error;
    OptimizerOptions o = {OPTIMIZER_ADAMW, hyper[1], hyper[2], hyper[3], hyper[4], 0, 0};
    GuardOptions guard = {hyper[5], 0, 0, 1, 0, 0, false, 1};
    RunState state = run_state_begin(false, 1);
    double loss_error = 0.0, norm_error = 0.0, factor = 0.0;
    for (size_t step = 0; step < 20; step++) {
        const int32_t *x = tokens + step * B * T, *y = targets + step * B * T;
        double norm, loss = batch_gradients(model, &norm, x, y, B, T);
        need(guard_step(&state, &factor, &guard, norm) || fail_with(&error, "the guard skipped a step of %s", fixture),
             &error);
        model_update(model, &o, ++state.updates, hyper[0], factor);
        loss_error = fmax(loss_error, fabs(loss / expected_losses[step] - 1));
        norm_error = fmax(norm_error, fabs(norm / expected_norms[step] - 1));
        if (isnan(loss) || isnan(norm)) loss_error = NAN;
    }
    // The padding between tensors, and the rows of the padded vocabulary.
    size_t unused = 0, place = 0, P = model->parameters.flat_size;
    float* params = (float*)memory_allocate(P * sizeof(float));
    read_floatX(params, model->flat.params, P, model);
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        for (; place < t->offset; place++) unused += params[place] != 0.0f;
        place = t->offset + tensor_elements(t);
    }
    for (; place < P; place++) unused += params[place] != 0.0f;
    free(params);
    snprintf(what, sizeof what, "%s padding that is not 0 after 20 steps", fixture);
    check(what, (double)unused, 0);
    snprintf(what, sizeof what, "%s losses of 20 steps", fixture);
    check(what, loss_error, bound_of(1e-5, model->config.layers));
    snprintf(what, sizeof what, "%s gradient norms of 20 steps", fixture);
    check(what, norm_error, bound_of(1e-5, model->config.layers));
    free(hyper);
    free(expected_losses);
    free(expected_norms);
}

static void test_fixture(const char* fixture) {
    char path[128];
    Error error;
    SafetensorsFile file;
    Model model;
    snprintf(path, sizeof path, "dev/test/fixtures/%s.safetensors", fixture);
    need(safetensors_open(&file, path, &error), &error);
    int32_t* c = (int32_t*)fixture_read(&file, "config", NULL);
    int32_t* tokens = (int32_t*)fixture_read(&file, "tokens", NULL);
    int32_t* targets = (int32_t*)fixture_read(&file, "targets", NULL);
    size_t B = (size_t)c[9], T = (size_t)c[10];
    Config config = fixture_config(c);
    need(model_create(&model, &config, test_options(B, T), &error), &error);
    fixture_parameters(&model, &file);
    test_fixture_gradients(&model, &file, fixture, tokens, targets, B, T);
    test_fixture_loss_scale(&model, &file, fixture, tokens, targets, B, T);
    fixture_parameters(&model, &file);
    test_fixture_training(&model, &file, fixture, tokens, targets, B, T);
    model_free(&model);
    safetensors_close(&file);
    free(c);
    free(tokens);
    free(targets);
}

// ------------------------------------------------------------------------------------------------
// 2. Pieces

static Config test_config(Family family) {
    Config c;
    Error error;
    memset(&c, 0, sizeof c);
    c.family = family;
    c.layers = 2;
    c.heads = 4;
    c.kv_heads = family == FAMILY_LLAMA ? 2 : 4;
    c.channels = 40;
    c.ffn = 72;
    c.context = 24;
    c.vocab = 61;
    c.tied = family == FAMILY_GPT2;
    need(config_complete(&c, &error), &error);
    return c;
}

static void random_tokens(int32_t* tokens, size_t n, size_t V, uint64_t number) {
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(random_bits(99, RANDOM_TEST, number, i) % V);
}

// With dropout, the loss must rise along the gradient as the gradient says: the forward and the backward drop the same
// elements. The difference quotient in floatX is accurate to the square root of its roundoff.
static void test_dropout(Family family) {
    enum { B = 2, T = 11 };
    Config c = test_config(family);
    Model model;
    Error error;
    int32_t tokens[B * T], targets[B * T];
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    need(model_create(&model, &c, test_options(B, T), &error), &error);
    randomize(&model, 5);
    model.dropout.p = 0.2f;
    model.dropout.seed = 7;
    model.dropout.first_token = 1234;
    size_t P = model.parameters.flat_size, bytes = P * sizeof(floatX);
    double norm, loss = batch_gradients(&model, &norm, tokens, targets, B, T);
    float *direction = (float*)memory_allocate(P * sizeof(float));
    floatX *start = (floatX*)memory_allocate(bytes), *moved = (floatX*)memory_allocate(bytes);
    device_download(direction, model.flat.grads, P * sizeof(float), model.stream);
    device_download(start, model.flat.params, bytes, model.stream);
    double h = 0.25 * cbrt(FLOATX_EPSILON) / norm, value[2];
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < P; i++)
            moved[i] = floatX_of(float_of(start[i]) + (float)((side ? h : -h) / norm) * direction[i] * (float)norm);
        device_upload(model.flat.params, moved, bytes, model.stream);
        value[side] = batch_gradients(&model, NULL, tokens, targets, B, T);
    }
    double slope = (value[1] - value[0]) / (2 * h);
    if (FLOATX_IS_FLOAT) {
        check(family == FAMILY_GPT2 ? "gpt2 slope along the gradient, dropout 0.2"
                                    : "llama slope along the gradient, dropout 0.2",
              fabs(slope / (norm * norm) - 1), 1e-3);
    }
    device_upload(model.flat.params, start, bytes, model.stream);
    double again = batch_gradients(&model, NULL, tokens, targets, B, T);
    model.dropout.first_token++;
    double other = batch_gradients(&model, NULL, tokens, targets, B, T);
    check_true("dropout is a function of the token's number", again == loss && other != loss);
    free(direction);
    free(start);
    free(moved);
    model_free(&model);
}

// Each use of dropout has its own mask. With the branches' weights 0 and biases 1, what each adds to the residual
// stream is its scaled mask; with token embeddings of 1, the stream also begins as a mask.
static void test_dropout_masks(void) {
    enum { B = 2, T = 24, MASKS = 5 };
    Config c = test_config(FAMILY_GPT2);
    Model model;
    Error error;
    int32_t tokens[B * T];
    size_t N = B * T, n = N * c.channels;
    float *stream[MASKS + 1], *values = (float*)memory_allocate(c.vocab * c.channels * sizeof(float));
    double worst = 0, spread = sqrt(0.25 * (double)n);
    bool scaled = true;
    random_tokens(tokens, N, c.vocab, 1);
    need(model_create(&model, &c, test_options(B, T), &error), &error);
    for (size_t i = 0; i < c.vocab * c.channels; i++) values[i] = 1;
    need(model_set_params(&model, model.weights.token_embedding, values, c.vocab * c.channels, &error), &error);
    for (size_t l = 0; l < c.layers; l++) {
        const Block* b = &model.weights.blocks[l];
        need(model_set_params(&model, b->attention_out_bias, values, c.channels, &error), &error);
        need(model_set_params(&model, b->ffn_out_bias, values, c.channels, &error), &error);
    }
    model.dropout.p = 0.5f;
    model.dropout.seed = 7;
    model_forward(&model, model_upload(&model, tokens, NULL, B, T), B, T, NULL);
    const BlockActivations* blocks = model.activations.blocks;
    const floatX* sites[MASKS + 1] = {
        NULL, blocks[0].input, blocks[0].middle, blocks[1].input, blocks[1].middle, model.activations.output};
    for (int m = 0; m <= MASKS; m++) {
        stream[m] = (float*)memory_allocate(n * sizeof(float));
        if (m > 0) read_floatX(stream[m], sites[m], n, &model);
    }
    for (int m = MASKS; m > 0; m--) for (size_t i = 0; i < n; i++) stream[m][i] -= stream[m - 1][i];  // stream[0] is 0
    for (int a = 1; a <= MASKS; a++) {
        double kept = 0;
        for (size_t i = 0; i < n; i++) {
            scaled = scaled && (stream[a][i] == 0 || stream[a][i] == 2);
            kept += stream[a][i] != 0;
        }
        worst = fmax(worst, fabs(kept - 0.5 * (double)n) / spread);
        for (int b = a + 1; b <= MASKS; b++) {
            double equal = 0;
            for (size_t i = 0; i < n; i++) equal += stream[a][i] == stream[b][i];
            worst = fmax(worst, fabs(equal - 0.5 * (double)n) / spread);
        }
    }
    check_true("dropout 0.5 keeps an element twice as large or drops it", scaled);
    model.dropout.first_token = T;
    model_forward(&model, model_upload(&model, tokens + T, NULL, 1, T), 1, T, NULL);
    read_floatX(values, blocks[0].input, T * c.channels, &model);
    check_true("dropout drops the same of a batch and of its second half",
               memcmp(values, stream[1] + T * c.channels, T * c.channels * sizeof(float)) == 0);
    check("dropout: elements kept, and equal in two sites, in standard deviations", worst, 5);
    for (int m = 0; m <= MASKS; m++) free(stream[m]);
    free(values);
    model_free(&model);
}

// A batch with attention masked between documents must give the same as each document alone: hidden states, loss and
// gradients. Learned positions are 0, since they count through the row.
static void test_documents(Family family) {
    enum { B = 2, T = 24, N = B * T, END = 60, COUNT = 6 };
    static const size_t ends[COUNT] = {7, 15, T - 1, T, N - 2, N - 1};  // last rows of documents
    Config c = test_config(family);
    Model joined, alone;
    Error error;
    ModelOptions options = test_options(B, T);
    int32_t tokens[N], targets[N];
    size_t C = c.channels, first = 0, counted = 0;
    random_tokens(tokens, N, END, 1);
    random_tokens(targets, N, END, 2);
    for (int i = 0; i < COUNT; i++) if (ends[i] != T - 1) tokens[ends[i]] = END;
    for (size_t i = 0; i < N; i++) if (tokens[i] == END) targets[i] = -1;
    need(model_create(&alone, &c, options, &error), &error);
    options.mask_documents = true;
    options.end_of_text = END;
    need(model_create(&joined, &c, options, &error), &error);
    size_t P = joined.parameters.flat_size;
    float *hidden = (float*)memory_allocate(N * C * sizeof(float)),
          *expected = (float*)memory_allocate(N * C * sizeof(float));
    float *grads = (float*)memory_allocate(P * sizeof(float)), *sum = (float*)memory_allocate(P * sizeof(float));
    float *part = (float*)memory_allocate(P * sizeof(float)),
          *zeros = (float*)memory_allocate(c.context * C * sizeof(float));
    for (Model* m = &joined; m; m = m == &joined ? &alone : NULL) {
        randomize(m, 5);
        if (family == FAMILY_GPT2)
            need(model_set_params(m, m->weights.position_embedding, zeros, c.context * C, &error), &error);
    }
    double loss = batch_gradients(&joined, NULL, tokens, targets, B, T), losses = 0;
    read_floatX(hidden, joined.activations.hidden, N * C, &joined);
    device_download(grads, joined.flat.grads, P * sizeof(float), joined.stream);
    for (int i = 0; i < COUNT; first = ends[i++] + 1) {
        size_t length = ends[i] + 1 - first, count = targets_count(targets + first, length);
        double mean = batch_gradients(&alone, NULL, tokens + first, targets + first, 1, length);
        read_floatX(expected + first * C, alone.activations.hidden, length * C, &alone);
        device_download(part, alone.flat.grads, P * sizeof(float), alone.stream);
        for (size_t e = 0; e < P; e++) sum[e] += (float)count * part[e];
        losses += mean * (double)count;
        counted += count;
    }
    for (size_t e = 0; e < P; e++) sum[e] /= (float)counted;
    const char* name = family == FAMILY_GPT2 ? "gpt2" : "llama";
    char what[96];
    snprintf(what, sizeof what, "%s hidden states of documents in one batch", name);
    check(what, relative_error(hidden, expected, N * C), bound_of(1e-5, c.layers));
    snprintf(what, sizeof what, "%s loss of documents in one batch", name);
    check(what, fabs(loss / (losses / (double)counted) - 1), bound_of(1e-5, c.layers));
    for (size_t i = 0; i < joined.parameters.count; i++) {
        const Tensor* t = &joined.parameters.tensors[i];
        if (t->offset == joined.weights.position_embedding) continue;
        snprintf(what, sizeof what, "%s gradient over documents of %s", name, t->name);
        check(what, relative_error(grads + t->offset, sum + t->offset, tensor_elements(t)), bound_of(1e-5, c.layers));
    }
    tokens[0] = (tokens[0] + 1) % END;  // in the first document
    batch_gradients(&joined, NULL, tokens, targets, B, T);
    read_floatX(expected, joined.activations.hidden, N * C, &joined);
    snprintf(what, sizeof what, "%s: a document sees nothing of those before it", name);
    size_t others = (ends[0] + 1) * C;
    check_true(what, memcmp(hidden, expected, C * sizeof(float)) != 0 &&
                   memcmp(hidden + others, expected + others, (N * C - others) * sizeof(float)) == 0);
    float* all[] = {hidden, expected, grads, sum, part, zeros};
    for (int i = 0; i < 6; i++) free(all[i]);
    model_free(&joined);
    model_free(&alone);
}

static uint64_t recompute_steps(void) { return device_is_host() ? 20 : 3; }  // an emulated GPU is slow

// Trains `steps` steps of two micro-batches, the second shorter, with dropout and masked documents. Returns a hash of
// all weights, master weights and optimizer state; bytes: memory of the model. budget: 0, or a memory budget that sets
// what is recomputed. offload: the bits of --offload.
static uint64_t recompute_run(double* bytes, const Config* c, RecomputeLevel level, int offload, double budget) {
    enum { B = 2, T = 12, N = B * T, END = 60 };
    Model model;
    Error error;
    ModelOptions options = test_options(B, T);
    OptimizerOptions adamw = {OPTIMIZER_ADAMW, 0.9, 0.95, 1e-8, 0.1, 1, 0};
    StepFlags flags = {false, false, false, false};
    StepResult result;
    int32_t tokens[N], targets[N];
    double missing = 0;
    options.mask_documents = true;
    options.end_of_text = END;
    options.recompute = level;
    options.offload = offload;
    options.offload_dir = device_is_host() || level % 2 ? work : NULL;
    need(model_plan(&model, c, options, &error), &error);
    if (budget > 0) missing = model_recompute_within(&model, budget);
    *bytes = missing > 0 ? INFINITY : (double)model.memory.total;
    need(model_allocate(&model, &error) && model_connect(&model, &error), &error);
    randomize(&model, 5);
    model.dropout.p = 0.1f;
    for (uint64_t step = 1; step <= recompute_steps(); step++) {
        model_begin_step(&model, 1.0, 2);
        for (uint64_t i = 0; i < 2; i++) {
            random_tokens(tokens, N, c->vocab, 4 * step + 2 * i);
            random_tokens(targets, N, c->vocab, 4 * step + 2 * i + 1);
            tokens[7] = END;
            model.dropout.first_token = N * (2 * step + i);
            model_gradients(&model, tokens, targets, B, T - i);
            if (step % 8 == 2) model_losses(&model, tokens, targets, B, T);
        }
        need(model_finish_step(&model, &result, flags, &error), &error);
        model_update(&model, &adamw, step, 0.01, 1.0);
    }
    Hash hash = hash_begin(0);
    size_t size = model.parameters.flat_size;
    const void* arrays[] = {model.flat.params, model.flat.master_weights, model.flat.states[0], model.flat.states[1]};
    float* copy = (float*)memory_allocate(size * sizeof(float));
    for (int i = 0; i < 4; i++) {
        size_t array_bytes = size * (i ? sizeof(float) : sizeof(floatX));
        if (arrays[i] == NULL) continue;
        device_download(copy, arrays[i], array_bytes, model.stream);
        hash_add(&hash, copy, array_bytes);
    }
    free(copy);
    model_free(&model);
    return hash_end(&hash);
}

// Whatever the backward recomputes, training has the same bits, and each level takes less memory than the one before
// it; a budget between two levels is kept, and used except for less than an array of a block.
static void test_recompute(Family family, bool relatives) {
    static const char* const names[] = {"none", "norms", "gelu", "attention", "block"};
    Config c = test_config(family);
    char what[96];
    double bytes[RECOMPUTE_AUTO], fitted;
    uint64_t hashes[RECOMPUTE_AUTO];
    const char* name = family == FAMILY_GPT2 ? "gpt2" : relatives ? "qwen" : "llama";
    c.layers = 5;
    c.qk_norm = c.qkv_bias = relatives;
    for (int level = 0; level < RECOMPUTE_AUTO; level++) {
        hashes[level] = recompute_run(&bytes[level], &c, (RecomputeLevel)level, 0, 0);
        snprintf(what, sizeof what, "%s, --recompute %s: less memory, the same bits after %d steps", name,
                 names[level], (int)recompute_steps());
        if (level) check_true(what, hashes[level] == hashes[0] && bytes[level] < bytes[level - 1]);
        double moved;
        uint64_t hash = recompute_run(&moved, &c, (RecomputeLevel)level, OFFLOAD_ACTIVATIONS, 0);
        snprintf(what, sizeof what, "%s, --recompute %s --offload activations: less memory, the same bits", name,
                 names[level]);
        check_true(what, hash == hashes[0] && (level > RECOMPUTE_NONE || moved < bytes[level]));
    }
    double largest = 2.0 * 24 * 72 * (family == FAMILY_LLAMA ? 2 : 1) * sizeof(floatX);
    for (int part = 0; part <= 4; part++) {
        double budget = bytes[RECOMPUTE_BLOCK] + part * 0.25 * (bytes[0] - bytes[RECOMPUTE_BLOCK]);
        uint64_t hash = recompute_run(&fitted, &c, RECOMPUTE_NONE, 0, budget);
        snprintf(what, sizeof what, "%s, --recompute auto, %d%% of what can be saved is kept: the same", name,
                 25 * part);
        check_true(what, hash == hashes[0] && fitted <= budget && fitted > budget - largest);
    }
    Model model;
    Error error;
    need(model_plan(&model, &c, test_options(2, 12), &error), &error);
    check_true("a budget below the last level: what is missing is said",
               model_recompute_within(&model, 0.5 * bytes[RECOMPUTE_BLOCK]) > 0);
    model_free(&model);
}

// A gradient that is not finite gives the norm NaN, whether gradients are summed as floats or in fixed point.
static void test_overflow(void) {
    enum { B = 2, T = 11 };
    static const struct { ReduceKind reduce; const char* what; } cases[] = {
        {REDUCE_FLOAT, "an overflow, summed as floats"}, {REDUCE_EXACT, "an overflow, summed in fixed point"}};
    Config c = test_config(FAMILY_GPT2);
    Error error;
    int32_t tokens[B * T], targets[B * T];
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Model model;
        ModelOptions options = test_options(B, T);
        double norm;
        char what[80];
        options.ranks.reduce = cases[i].reduce;
        need(model_create(&model, &c, options, &error), &error);
        randomize(&model, 5);
        step_gradients(&model, &norm, tokens, targets, 1, 1, B, T);
        bool finite = isfinite(norm);
        step_gradients(&model, &norm, tokens, targets, 1e60, 1, B, T);
        snprintf(what, sizeof what, "the norm is NaN only after %s", cases[i].what);
        check_true(what, finite && isnan(norm));
        model_free(&model);
    }
}

static void test_schedules(void) {
    Schedule s = {SCHEDULE_CONSTANT, 1.0, 0.1, 10, 110, 0.2, 20, 0.5};
    check("schedule: warm-up starts at lr / warmup", fabs(schedule_lr(&s, 0) - 0.1), 1e-12);
    check("schedule: warm-up ends at lr", fabs(schedule_lr(&s, 9) - 1.0), 1e-12);
    check("schedule: constant", fabs(schedule_lr(&s, 109) - 1.0), 1e-12);
    for (int kind = SCHEDULE_LINEAR; kind <= SCHEDULE_EXPONENTIAL; kind++) {
        char name[32], what[80];
        s.kind = (ScheduleKind)kind;
        choice_name(SCHEDULE_NAMES, kind, name, sizeof name);
        bool falls = true;
        for (uint64_t step = 10; step < 130; step++)
            falls = falls && schedule_lr(&s, step + 1) <= schedule_lr(&s, step);
        snprintf(what, sizeof what, "schedule: %s begins at lr and never rises", name);
        check_true(what, falls && schedule_lr(&s, 10) == 1.0);
        snprintf(what, sizeof what, "schedule: %s at the last step", name);
        check(what, fabs(schedule_lr(&s, 109) - (kind == SCHEDULE_STEP ? 0.0625 : 0.1)), 1e-12);
    }
    s.kind = SCHEDULE_COSINE;
    s.steps = 111;
    check("schedule: cosine half way", fabs(schedule_lr(&s, 60) - 0.55), 1e-12);
    s.kind = SCHEDULE_WSD;
    check("schedule: wsd is flat until its fall", fabs(schedule_lr(&s, 89) - 1.0), 1e-12);
}

static void test_guard(void) {
    GuardOptions o = {1.0, 4, 20, 20, 0, 0, false, 3};
    RunState s = run_state_begin(false, 1);
    double factor = 0;
    bool all = true;
    for (int i = 0; i < 40; i++) all = all && guard_step(&s, &factor, &o, i % 2 ? 0.5 : 0.7);
    check_true("guard: usual norms pass whole", all && factor == 1.0);
    check("guard: mean of the norms", fabs(s.norms.mean - 0.6), 0.01);
    check("guard: deviation of the norms", fabs(sqrt(s.norms.variance) - 0.1), 0.01);
    check_true("guard: a norm over 20 means is skipped", !guard_step(&s, &factor, &o, 1000.0));
    check("guard: a skipped norm is remembered only up to the bound", s.norms.mean, 0.61);
    RunState first = run_state_begin(false, 1);
    for (int i = 0; i < 20; i++) guard_step(&first, &factor, &o, 0.5);
    check_true("guard: the first norm after --spike-warmup is judged", !guard_step(&first, &factor, &o, 1000.0));
    double mean = s.norms.mean;
    for (int i = 0; i < 200; i++) guard_step(&s, &factor, &o, i % 2 ? 0.5 : 0.7);
    RunState late = s;
    mean = late.norms.mean;
    guard_step(&late, &factor, &o, 0.9);
    check("guard: in the long run a norm weighs 1/100", fabs(late.norms.mean - (mean + (0.9 - mean) / 100)), 1e-12);
    check_true("guard: NaN and infinity are skipped",
               !guard_step(&s, &factor, &o, NAN) && !guard_step(&s, &factor, &o, INFINITY));
    double bound = fmax(1.0, s.norms.mean + 4 * sqrt(s.norms.variance));
    guard_step(&s, &factor, &o, 3.0);
    check("guard: a large norm is clipped to the bound", fabs(factor - bound / 3.0), 1e-12);
    RunState shifted = s;
    int skipped = 0;
    while (skipped < 1000 && !guard_step(&shifted, &factor, &o, 1000.0)) skipped++;
    check("guard: norms that stay high are taken in the end, after so many steps", skipped, 999);
    GuardOptions plain = {1.0, 0, 0, 1, 0, 0, false, 3};
    check_true("guard: with both rules off only --clip holds", guard_step(&s, &factor, &plain, 1000) && factor == 1e-3);
    GuardOptions unclipped = {0, 4, 20, 20, 0, 0, false, 3};
    RunState calm = run_state_begin(false, 1);
    for (int i = 0; i < 40; i++) guard_step(&calm, &factor, &unclipped, i % 2 ? 0.5 : 0.7);
    check_true("guard: with --clip 0 nothing is clipped", guard_step(&calm, &factor, &unclipped, 6.0) && factor == 1.0);
    mean = calm.norms.mean;
    check_true("guard: with --clip 0 a spike is skipped", !guard_step(&calm, &factor, &unclipped, 1e6));
    check("guard: and moves the mean as 20 means would", fabs(calm.norms.mean - (mean + 19 * mean / 42)), 1e-9);
    RunState young = run_state_begin(false, 1);
    check_true("guard: nothing is skipped before it has seen enough",
               guard_step(&young, &factor, &o, 1.0) && guard_step(&young, &factor, &o, 100.0) && factor == 0.01);
    o.dynamic_scale = true;
    RunState f = run_state_begin(true, 1024);
    guard_step(&f, &factor, &o, INFINITY);
    check_true("loss scale: halves on overflow", f.loss_scale == 512);
    for (int i = 0; i < 3; i++) guard_step(&f, &factor, &o, 1.0);
    check_true("loss scale: doubles after enough good steps", f.loss_scale == 1024 && f.scale_good == 0);
    for (int i = 0; i < 10; i++) guard_step(&f, &factor, &o, i % 3 == 2 ? NAN : 1.0);
    check_true("loss scale: only consecutive good steps count", f.loss_scale == 128);
    for (int i = 0; i < 100; i++) guard_step(&f, &factor, &o, 1.0);
    check_true("loss scale: grows to 2^24", f.loss_scale == 0x1p24);
    for (int i = 0; i < 100; i++) guard_step(&f, &factor, &o, INFINITY);
    check_true("loss scale: falls to 1", f.loss_scale == 1);
    check_true("loss scale: only FP16 builds have one",
               run_state_begin(false, 1024).loss_scale == 1 && run_state_begin(true, 1024).loss_scale == 1024);
}

// Minimum, median and maximum over three ranks; NaN is the largest, and the median of two ranks the lower.
static void test_statistics(void) {
    FlatVector flat;
    double stats[3] = {3, NAN, 1}, sorted[3], min, median, max;
    memset(&flat, 0, sizeof flat);
    flat.options.world = 3;
    flat.stats = stats;
    flat.sorted = sorted;
    size_t rank = flat_min_median_max(&min, &median, &max, &flat, 0, 1);
    check_true("statistics of ranks: NaN is the largest", rank == 1 && min == 1 && median == 3 && isnan(max));
    flat.options.world = 2;
    stats[1] = 4;
    rank = flat_min_median_max(&min, &median, &max, &flat, 0, 1);
    check_true("statistics of ranks: the lower of two medians", rank == 1 && min == 3 && median == 3 && max == 4);
}

// The most steps lost by a crash at any point: an asynchronous save is complete when the next one begins.
static uint64_t cadence_most_lost(const Cadence* c) {
    uint64_t durable = 0, last = 0, most = 0;
    for (uint64_t step = 1; step <= 200; step++) {
        if (step - durable > most) most = step - durable;
        if (!cadence_due(c, step)) continue;
        durable = c->async ? last : step;
        last = step;
    }
    return most;
}

static void test_cadence(void) {
    Cadence c;
    Error error;
    bool promise = true, whole = true;
    char text[32];
    for (uint64_t every = 1; every <= 20; every++) {
        for (int async = 0; async < 2; async++) {
            snprintf(text, sizeof text, "%llu", (unsigned long long)every);
            need(cadence_parse(&c, text, 24, async, &error), &error);
            promise = promise && cadence_most_lost(&c) == (c.async ? 2 : 1) * every && c.async == (async && every > 1);
            for (uint64_t step = 1; step <= 100; step++) whole = whole && (step % every != 0 || cadence_due(&c, step));
        }
    }
    check_true("cadence: a crash loses --ckpt-every steps at most, and those of the write in flight", promise);
    check_true("cadence: there is a checkpoint of every multiple", whole);
    need(cadence_parse(&c, "10min", 24, false, &error), &error);
    cadence_start(&c, 5e3);
    check_true("cadence: minutes", !cadence_due_now(&c, 604e3) && cadence_due_now(&c, 606e3) && !cadence_due(&c, 10));

    // Steps of 100 ms; a save stalls training for 300 ms, and makes 5 steps 40 ms longer.
    need(cadence_parse(&c, "auto", 1, true, &error), &error);
    cadence_start(&c, 0);
    for (int i = 0; i < 7; i++) cadence_count_step(&c, 100, false);
    cadence_count_save(&c, 60e3, false);
    c.cost_ms = 300;
    for (int i = 0; i < 5; i++) cadence_count_step(&c, 140, true);
    check_true("cadence: auto chooses nothing before a checkpoint is there", !cadence_choose(&c));
    c.took_ms = 1000;
    check_true("cadence: auto chooses once", cadence_choose(&c) && !cadence_choose(&c));
    check("cadence: auto takes sqrt(2 x 500 ms x 1 h), a minute", fabs(c.every_ms - 60e3), 1e-9);
    check_true("cadence: from the beginning of the last save",
               !cadence_due_now(&c, 119e3) && cadence_due_now(&c, 121e3));
    cadence_count_save(&c, 100e3, true);
    check_true("cadence: a copy in memory does not delay the next checkpoint", cadence_due_now(&c, 121e3));
    cadence_count_save(&c, 121e3, false);
    check("cadence: and adds up what saves have cost", fabs(c.costs_ms - 500), 1e-9);
    c.took_ms = 90e3;
    check_true("cadence: a save has time to end", cadence_choose(&c) && c.every_ms == 90e3);
}

// Applies the rule to the checkpoints of the steps in `from`, newest first; returns those that it keeps. Multiples of
// 100 were saved by --ckpt-every, the others by signals.
static const char* kept(const KeepRule* rule, const uint64_t* from) {
    static char text[256];
    uint64_t counted = 0;
    size_t used = 0;
    for (size_t i = 0; from[i] > 0; i++) {
        SaveKind kind = from[i] % 100 == 0 ? SAVE_ASKED : SAVE_END;
        if (i > 0 && !keep_rule_keeps(rule, from[i], from[i + 1], counted)) continue;
        counted += keep_rule_counts(rule, kind);
        used += (size_t)snprintf(text + used, sizeof text - used, "%llu ", (unsigned long long)from[i]);
    }
    return text;
}

static void test_keeping(void) {
    const uint64_t from[] = {630, 600, 530, 500, 400, 300, 250, 200, 100, 0};
    const KeepRule all = {0, 0, false}, two = {2, 0, false}, and_some = {2, 240, false}, rewinds = {2, 0, true};
    check_true("keeping: all", strcmp(kept(&all, from), "630 600 530 500 400 300 250 200 100 ") == 0);
    check_true("keeping: the newest", strcmp(kept(&two, from), "630 600 ") == 0);
    check_true("keeping: and the first from each multiple on", strcmp(kept(&and_some, from), "630 600 500 250 ") == 0);
    check_true("keeping: and enough to go back to", strcmp(kept(&rewinds, from), "630 600 530 500 ") == 0);
}

// A struct read from files that lack a member: accepted if the member's row gives a default.
static void test_missing_fields(void) {
    typedef struct { uint64_t layers; double scale; bool tied; int family; } Sizes;
    static const Field fields[] = {
        {"layers", "layers", KIND_COUNT, offsetof(Sizes, layers), "N", 0, 0, NULL, NULL},
        {"scale", "scale", KIND_REAL, offsetof(Sizes, scale), "X", 0, 0, NULL, "2.5"},
        {"tied", "tied", KIND_SWITCH, offsetof(Sizes, tied), "on|off", 0, 0, NULL, "on"},
        {"family", "family", KIND_CHOICE, offsetof(Sizes, family), FAMILY_NAMES, 0, 0, NULL, "llama"}};
    static const struct { const char* text; bool reads; double scale; bool tied; int family; } files[] = {
        {"{\"layers\": 3, \"scale\": 0.5, \"tied\": false, \"family\": \"gpt2\"}", true, 0.5, false, FAMILY_GPT2},
        {"{\"layers\": 3}", true, 2.5, true, FAMILY_LLAMA},
        {"{\"layers\": 3, \"tied\": false}", true, 2.5, false, FAMILY_LLAMA},
        {"{\"scale\": 0.5, \"tied\": false, \"family\": \"gpt2\"}", false, 0, false, 0},
        {"{\"layers\": 3, \"scale\": null}", false, 0, false, 0},
        {"{\"layers\": 3, \"family\": \"bert\"}", false, 0, false, 0}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        Json json;
        Error error;
        Sizes s;
        memset(&s, 0, sizeof s);
        need(json_parse(&json, files[i].text, strlen(files[i].text), "file", &error), &error);
        bool reads = fields_read(&s, fields, sizeof fields / sizeof fields[0], &json, 0);
        bool right = s.layers == 3 && s.scale == files[i].scale && s.tied == files[i].tied &&
            s.family == files[i].family;
        char what[160];
        snprintf(what, sizeof what, "members of %s: %s", files[i].text, files[i].reads ? "read" : "refused");
        check_true(what, reads == files[i].reads && (!reads || right));
        json_free(&json);
    }
}

// Whether a name matches one of the comma-separated patterns.
static bool is_named(const char* list, const char* name) {
    char copy[160];
    bool named = false;
    snprintf(copy, sizeof copy, "%s", list);
    for (char* pattern = strtok(copy, ","); pattern; pattern = strtok(NULL, ","))
        named |= fnmatch(pattern, name, 0) == 0;
    return named;
}

// Frozen weights have no gradient, no state and no update; trained ones have the same gradient as when everything
// trains, to the bit. A checkpoint has the frozen weights too, written once, and a run that loads it continues with the
// same bits. The same with everything offloaded that can be.
static void test_frozen(Family family, const char* train) {
    enum { B = 2, T = 16 };
    Config c = test_config(family);
    Model all, model[2];
    Error error;
    OptimizerOptions adamw = {OPTIMIZER_ADAMW, 0.9, 0.95, 1e-8, 0.1, 1, 0};
    ModelOptions options = test_options(B, T);
    int32_t tokens[B * T], targets[B * T];
    char what[160], out[300], hot[300], path[400];
    c.layers = 5;
    snprintf(out, sizeof out, "%s/frozen", work);
    snprintf(hot, sizeof hot, SYSTEM_MEMORY_FOLDER "/llmtrain-frozen-%ld", (long)getpid());
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    need(model_create(&all, &c, options, &error), &error);
    randomize(&all, 1);
    batch_gradients(&all, NULL, tokens, targets, B, T);
    options.train = train;
    for (int i = 0; i < 2; i++) {
        options.offload = i == 1 ? OFFLOAD_BOTH : OFFLOAD_NOTHING;
        options.offload_dir = i == 1 ? "." : NULL;
        need(model_create(&model[i], &c, options, &error), &error);
        randomize(&model[i], 1);
    }
    double norm, squares = 0;
    batch_gradients(&model[0], &norm, tokens, targets, B, T);
    size_t n = all.parameters.flat_size, elements = 0, wrong = 0, started = 0;
    float *whole = (float*)memory_allocate(n * sizeof(float)), *part = (float*)memory_allocate(n * sizeof(float));
    floatX *first = (floatX*)memory_allocate(n * sizeof(floatX)), *last = (floatX*)memory_allocate(n * sizeof(floatX));
    device_download(whole, all.flat.grads, n * sizeof(float), all.stream);
    device_download(part, model[0].flat.grads, model[0].flat.sums_size * sizeof(float), model[0].stream);
    device_download(first, all.flat.params, n * sizeof(floatX), all.stream);
    device_download(last, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    for (size_t i = 0; i < all.parameters.count; i++) {
        const Tensor *t = &all.parameters.tensors[i], *u = &model[0].parameters.tensors[i];
        float* gradient = model_grad(&model[0], u->offset);
        started += memcmp(first + t->offset, last + u->offset, t->size * sizeof(floatX)) != 0;
        wrong += u->trains != is_named(train, u->name) || u->trains != (gradient != NULL);
        if (!u->trains) continue;
        elements += round_up(u->size, 64);
        const float* mine = part + (gradient - model[0].flat.grads);
        wrong += memcmp(mine, whole + t->offset, t->size * sizeof(float)) != 0;
        for (size_t e = 0; e < t->size; e++) squares += (double)mine[e] * (double)mine[e];
    }
    snprintf(what, sizeof what, "--train %s: the same initial weights", train);
    check_true(what, started == 0);
    snprintf(what, sizeof what, "--train %s: the same gradients", train);
    check_true(what, wrong == 0);
    snprintf(what, sizeof what, "--train %s: no gradients and no state for the rest", train);
    check_true(what, model[0].flat.sums_size == elements && model[0].flat.state_sizes[0] == elements);
    snprintf(what, sizeof what, "--train %s: the norm is that of what trains", train);
    check(what, fabs(norm / sqrt(squares) - 1), 1e-5);

    device_download(first, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    RunRecord record, saved;
    memset(&record, 0, sizeof record);
    record.config = model[0].config;
    record.state = run_state_begin(false, 1);
    Saver saver;
    need(saver_open(&saver, &model[0].flat, false, 0, &error), &error);
    for (uint64_t step = 1; step <= 4; step++) {
        for (int i = 0; i < 2 && step <= 2; i++) {
            batch_gradients(&model[i], NULL, tokens, targets, B, T);
            model_update(&model[i], &adamw, step, 1e-2, 1.0);
        }
        JsonWriter manifest;
        record.state.step = step;
        record_write(&manifest, &record, &model[0].flat);
        saver_begin(&saver, step, step % 2 ? hot : out, &manifest, NULL);
        need(saver_end(&saver, &error), &error);
    }
    saver_close(&saver);
    device_download(last, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    wrong = 0;
    for (size_t i = 0; i < model[0].parameters.count; i++) {
        const Tensor* t = &model[0].parameters.tensors[i];
        bool same = memcmp(first + t->offset, last + t->offset, t->size * sizeof(floatX)) == 0;
        wrong += same == t->trains;
    }
    device_download(first, model[1].flat.params, n * sizeof(floatX), model[1].stream);
    snprintf(what, sizeof what, "--train %s: the same bits with --offload", train);
    check_true(what, memcmp(first, last, n * sizeof(floatX)) == 0);
    snprintf(what, sizeof what, "--train %s: what trains changes, and nothing else", train);
    check_true(what, wrong == 0);
    struct stat status[4];
    bool links = true;
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/step_%08d/" CHECKPOINT_FROZEN, i % 2 ? out : hot, i + 1);
        links = links && stat(path, &status[i]) == 0 && (i < 2 || status[i].st_ino == status[i - 2].st_ino);
    }
    snprintf(what, sizeof what, "--train %s: the frozen weights are written once to each of two file systems", train);
    check_true(what, links);
    snprintf(path, sizeof path, "%s/step_00000002", out);
    need(model_load(&model[1], &saved, path, false, &error), &error);
    for (int i = 0; i < 2; i++) {
        batch_gradients(&model[i], NULL, tokens, targets, B, T);
        model_update(&model[i], &adamw, 3, 1e-2, 1.0);
    }
    device_download(first, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    device_download(last, model[1].flat.params, n * sizeof(floatX), model[1].stream);
    snprintf(what, sizeof what, "--train %s: a run that is resumed continues with the same bits", train);
    check_true(what, memcmp(first, last, n * sizeof(floatX)) == 0);
    need(model_load(&all, &saved, path, true, &error), &error);  // here all of it trains
    free(first);
    free(last);
    free(whole);
    free(part);
    checkpoint_discard(out);
    checkpoint_discard(hot);
    model_free(&all);
    for (int i = 0; i < 2; i++) model_free(&model[i]);
}

// A checkpoint of another build, whose frozen weights are BF16 where this one's are FP16, or 16 bits where these are
// floats: values that both types have are loaded, also into weights that train here; for a value that this type lacks,
// the tensor is refused by name.
static void test_frozen_converted(void) {
    const Dtype other = FLOATX_DTYPE == DTYPE_BF16 ? DTYPE_F16 : DTYPE_BF16;
    const float odd = other == DTYPE_F16 ? 1 + 0x1p-10f : 0x1p-100f;
    Config c = test_config(FAMILY_GPT2);
    ModelOptions options = test_options(1, 8);
    Error error;
    char what[160], out[300], path[400];
    snprintf(out, sizeof out, "%s/converted", work);
    for (int i = 0; i < 3; i++) {  // frozen there and here; trains here; a value that is not exact
        Model model, loaded;
        Saver saver;
        JsonWriter manifest;
        RunRecord record, saved;
        float values[1000];
        uint16_t half[1000];
        options.train = "block.0.*,*weight,*embedding";
        need(model_create(&model, &c, options, &error), &error);
        if (i == 1) options.train = NULL;
        need(model_create(&loaded, &c, options, &error), &error);
        memset(&record, 0, sizeof record);
        record.config = model.config;
        record.state = run_state_begin(false, 1);
        record_write(&manifest, &record, &model.flat);
        need(saver_open(&saver, &model.flat, false, 0, &error), &error);
        saver_begin(&saver, 1, out, &manifest, NULL);
        safetensors_writer_free(&saver.frozen);
        snprintf(path, sizeof path, "%s/step_00000001.tmp/" CHECKPOINT_FROZEN, out);
        need(safetensors_create(&saver.frozen, path, &error), &error);
        size_t frozen = 0, wrong = 0;
        for (size_t n = 0; n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            size_t shape[1] = {tensor_elements(t)};
            snprintf(what, sizeof what, "weight.%s", t->name);
            if (!t->trains) need(safetensors_declare(&saver.frozen, what, other, shape, 1, &error), &error);
        }
        need(safetensors_begin(&saver.frozen, &error), &error);
        for (size_t k = 0; k < 1000; k++) values[k] = (float)((int)(k * 7 % 129) - 64) / 32;
        if (i == 2) values[5] = odd;
        for (size_t k = 0; k < 1000; k++)
            half[k] = other == DTYPE_F16 ? f16_from_float(values[k]) : bf16_from_float(values[k]);
        for (size_t n = 0; n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            if (t->trains) continue;
            need(tensor_elements(t) <= 1000 && ++frozen > 0, &error);
            need(safetensors_write(&saver.frozen, half, tensor_elements(t) * sizeof half[0], &error), &error);
        }
        need(safetensors_end(&saver.frozen, &error) && saver_end(&saver, &error), &error);
        snprintf(path, sizeof path, "%s/step_00000001", out);
        error.text[0] = 0;
        bool good = model_load(&loaded, &saved, path, i == 1, &error);  // frozen weights have no state
        for (size_t n = 0; good && n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            floatX here[1000];
            if (t->trains) continue;
            size_t offset = loaded.parameters.tensors[n].offset;
            device_download(here, loaded.flat.params + offset, tensor_elements(t) * sizeof(floatX), loaded.stream);
            for (size_t k = 0; k < tensor_elements(t); k++) wrong += float_of(here[k]) != values[k];
        }
        bool refuses = i == 2 && !FLOATX_IS_FLOAT;
        bool named = strstr(error.text, "build the program with the checkpoint's precision") != NULL;
        snprintf(what, sizeof what, "frozen weights in %s, %s: %s", DTYPES[other].safetensors,
                 i == 0 ? "frozen here" : i == 1 ? "trained here" : "one that is not exact",
                 refuses ? "refused by name" : "the same values");
        check_true(what, frozen > 0 && (refuses ? !good && named && strstr(error.text, "element 5;") : good && !wrong));
        saver_close(&saver);
        checkpoint_discard(out);
        model_free(&loaded);
        model_free(&model);
    }
}

static void test_frozen_patterns(void) {
    static const char* const bad[] = {"", "blok.*", "block.0.*,head"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        Model model;
        Error error;
        Config c = test_config(FAMILY_GPT2);
        ModelOptions options = test_options(1, 4);
        options.train = bad[i];
        error.text[0] = 0;
        bool planned = model_plan(&model, &c, options, &error);
        check_true("--train of a pattern that matches nothing is refused", !planned && strstr(error.text, "--train"));
    }
    static const char* const patterns[] = {"block.1.*,final_norm_weight", "block.3.*norm?_weight",
                                           "*.qkv_weight"};
    for (size_t i = 0; i < 3; i++) {
        test_frozen(FAMILY_GPT2, patterns[i]);
        test_frozen(FAMILY_LLAMA, patterns[i]);
    }
    test_frozen(FAMILY_GPT2, "*_bias");
    test_frozen(FAMILY_GPT2, "position_embedding,final_norm_*");
}

// Computes hidden states (B, T, C) of tokens (B, T) through the cache, `step` positions at a time.
static void cache_forward(float* hidden, Model* model, const int32_t* tokens, size_t B, size_t T, size_t step) {
    size_t C = model->config.channels;
    int32_t* part = (int32_t*)memory_allocate(B * step * sizeof(int32_t));
    float* rows = (float*)memory_allocate(B * step * C * sizeof(float));
    model->cache.length = 0;
    for (size_t t = 0, count; t < T; t += count) {
        count = min_size(step, T - t);
        for (size_t b = 0; b < B; b++) memcpy(part + b * count, tokens + b * T + t, count * sizeof(int32_t));
        model_forward(model, model_upload(model, part, NULL, B, count), B, count, true);
        read_floatX(rows, model->activations.hidden, B * count * C, model);
        for (size_t b = 0; b < B; b++)
            memcpy(hidden + (b * T + t) * C, rows + b * count * C, count * C * sizeof(float));
    }
    free(part);
    free(rows);
}

// With the cache, for one token or several at a time, one sequence or several, the results must equal those of the
// whole sequence without it: on a CPU to the bit, except in BF16 with AMX or BFMMLA, which add few rows in a different
// order from many.
static void test_cache(Family family) {
    enum { B = 3, T_MOST = 150, WAYS = 4 };
    const size_t T = device_is_host() ? T_MOST : T_MOST / 2;  // time is quadratic in it
    static const struct {
        const char* name;
        size_t B, step;
    } ways[WAYS] = {{"token by token", B, 1}, {"70 tokens at a time", B, 70}, {"at once", B, T_MOST},
                    {"one sequence alone", 1, 17}};
    Config c = test_config(family);
    Model model;
    Error error;
    int32_t tokens[B * T_MOST];
    char what[96];
    c.context = T;
    size_t C = c.channels, n = B * T * C;
    bool host = device_is_host() && !(FLOATX_DTYPE == DTYPE_BF16 && gemm_state.for_bf16->a_by_lane);
    random_tokens(tokens, B * T, c.vocab, 3);
    float *whole = (float*)memory_allocate(n * sizeof(float)), *cached = (float*)memory_allocate(n * sizeof(float));
    for (int q8 = 0; q8 < 2; q8++) {
        ModelOptions options = test_options(B, T);
        options.kv_q8 = q8;
        need(model_create(&model, &c, options, &error), &error);
        randomize(&model, 11);
        model_forward(&model, model_upload(&model, tokens, NULL, B, T), B, T, false);
        read_floatX(whole, model.activations.hidden, n, &model);
        for (int w = 0; w < WAYS; w++) {
            size_t count = ways[w].B * T * C;
            cache_forward(cached, &model, tokens, ways[w].B, T, ways[w].step);
            double worst = relative_error(cached, whole, count);
            snprintf(what, sizeof what, "%s, cache%s, %s", family == FAMILY_GPT2 ? "gpt2" : "llama",
                     q8 ? " of 8 bits" : "", ways[w].name);
            // 8 bits: an element of a key or value is rounded to multiples of 1/127 of its vector's largest element,
            // about sqrt(2 ln 2D) standard deviations: this is the error of one attention, and layers add independent
            // errors. (The operation alone is compared exactly in operations.h.)
            double rounding = sqrt(2 * log(2.0 * (double)config_head_size(&c)) / 12) / 127;
            if (q8) check(what, worst, rounding * sqrt((double)c.layers) + bound_of(1e-5, c.layers));
            else check(what, worst, bound_of(1e-5, c.layers));
            if (q8) continue;
            snprintf(what + strlen(what), sizeof what - strlen(what), ": the same bits");
            if (host) check_true(what, memcmp(cached, whole, count * sizeof(float)) == 0);
        }
        model_free(&model);
    }
    free(whole);
    free(cached);
}

static void test_sampling(void) {
    enum { V = 5, DRAWS = 20000 };
    const float logit[V] = {0.0f, 2.0f, 1.0f, -1.0f, 2.0f};
    floatX logits[V];
    Candidate candidates[V];
    SamplingOptions o = {0, 0, 1, 3, 0, 0};
    for (int v = 0; v < V; v++) logits[v] = floatX_of(logit[v]);
    check_true("sampling: temperature 0 takes the likeliest, the first among equals",
               sample_token(candidates, logits, NULL, 0, &o, 0.99f, V) == 1);
    o.temperature = 0.5;
    int seen[V] = {0};
    double sum = 0.0, worst = 0.0;
    for (int v = 0; v < V; v++) sum += exp(2 * (double)logit[v]);
    for (int i = 0; i < DRAWS; i++)
        seen[sample_token(candidates, logits, NULL, 0, &o, random_uniform(1, RANDOM_TEST, 4, (uint64_t)i), V)]++;
    for (int v = 0; v < V; v++) {
        double p = exp(2 * (double)logit[v]) / sum;
        worst = fmax(worst, fabs(seen[v] - DRAWS * p) / sqrt(DRAWS * p * (1 - p)));
    }
    check("sampling: frequencies at temperature 0.5, in deviations", worst, 4);
    o.top_k = 2;
    bool inside = true;
    for (int i = 0; i < 1000; i++)
        inside = inside && logit[sample_token(candidates, logits, NULL, 0, &o, (float)i / 1000, V)] == 2.0f;
    check_true("sampling: top-k keeps the k likeliest", inside);
    o.top_k = 0;
    o.top_p = 0.4;
    inside = true;
    for (int i = 0; i < 1000; i++)
        inside = inside && sample_token(candidates, logits, NULL, 0, &o, (float)i / 1000, V) == 1;
    check_true("sampling: top-p keeps the smallest set that reaches p", inside);
    // At temperature 1 the probabilities relative to the largest are 1, e^-1, e^-2, e^-3.
    o.top_p = o.temperature = 1;
    bool kept[2][V] = {{false}};
    for (int i = 0; i < 2000; i++) {
        o.min_p = i % 2 ? 0.3 : 0.1;
        kept[i % 2][sample_token(candidates, logits, NULL, 0, &o, (float)i / 2000, V)] = true;
    }
    check_true("sampling: min-p leaves out what is below its share of the largest",
               kept[1][2] && !kept[1][0] && kept[0][0] && !kept[0][3]);
    // Of the 4 likeliest tokens the first has 0.40 and the second as much: after min-p the first would have a half.
    SamplingOptions three = {1, 4, 0.45, 3, 0.5, 0};
    bool of_k[V] = {false};
    for (int i = 0; i < 1000; i++)
        of_k[sample_token(candidates, logits, NULL, 0, &three, (float)i / 1000, V)] = true;
    check_true("sampling: top-k, then top-p of what it left, then min-p", of_k[1] && of_k[4] && !of_k[2] && !of_k[0]);
    const int32_t text[3] = {1, 4, 1};
    o.min_p = o.temperature = 0;
    o.repetition_penalty = 4;  // 2 / 4 is below 1
    check_true("sampling: the repetition penalty divides positive logits once",
               sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 2 &&
                   sample_token(candidates, logits, text, 1, &o, 0.5f, V) == 4);
    o.repetition_penalty = 1.5;
    check_true("sampling: and so little that the likeliest stays",
               sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 1);
    const float low[V] = {-2.0f, -1.0f, -1.25f, -3.0f, -4.0f};
    for (int v = 0; v < V; v++) logits[v] = floatX_of(low[v]);
    check_true("sampling: the repetition penalty multiplies negative logits",
               sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 2);
}

static int compare_candidates(const void* a, const void* b) {
    return candidate_before(*(const Candidate*)a, *(const Candidate*)b) ? -1 : 1;
}

// sample_token sorts only as much as it needs. It must draw the first candidate of the sorted list at which the
// cumulative probability reaches the random number: for numbers up to 1 - 2^-24, probabilities down to e^-30.
static void test_sampling_order(void) {
    enum { V = 3000 };
    static floatX logits[V];
    static Candidate sorted[V], candidates[V];
    SamplingOptions o = {1, 0, 1, 0, 0, 1};
    for (size_t v = 0; v < V; v++) logits[v] = floatX_of(30 * random_uniform(3, RANDOM_TEST, 0, v));
    candidates_read(sorted, logits, NULL, 0, 1, V);
    float sum = candidates_softmax(sorted, 1, V);
    qsort(sorted, V, sizeof(Candidate), compare_candidates);
    size_t different = 0, last = 0;
    for (int i = 1; i <= 24; i++) {
        float uniform = 1 - ldexpf(1, -i), all = sum, reached;
        for (int round = 0; round < 2; round++, all = reached) {  // the sorted sum may stay below the softmax's
            reached = 0;
            for (last = 0; last < V; last++) {
                reached += sorted[last].probability;
                if (uniform * all < reached) break;
            }
            if (last < V) break;
        }
        different += sample_token(candidates, logits, NULL, 0, &o, uniform, V) != sorted[last].token;
        o.top_k = i * i;  // the last of them, for numbers near 1
        different += sample_token(candidates, logits, NULL, 0, &o, 1 - 0x1p-24f, V) != sorted[i * i - 1].token;
        o.top_k = 0;
    }
    check_true("sampling: the token that all candidates in order give", different == 0 && last > 1000);
}

// Generates `samples` texts that begin with `known` tokens, up to `total`: tokens (samples, total).
static void generate_all(int32_t* tokens, Model* model, const SamplingOptions* o, size_t samples, size_t known,
                         size_t total) {
    Generator g;
    Error error;
    need(generator_open(&g, model, o, samples, total, &error), &error);
    generator_append(&g, tokens, known);
    while (g.known < total) generator_step(&g);
    memcpy(tokens, g.tokens, samples * total * sizeof(int32_t));
    generator_close(&g);
}

// Generation past the context restarts from the later half; the cache never overflows and the text is a function of the
// seed.
static void test_generation(void) {
    enum { TOTAL_MOST = 100, SAMPLES = 3 };
    const size_t total = device_is_host() ? TOTAL_MOST : TOTAL_MOST / 2, bytes = total * sizeof(int32_t);
    Config c = test_config(FAMILY_LLAMA);
    Model model;
    Error error;
    ModelOptions options = test_options(SAMPLES, 4);
    options.training = false;
    int32_t first[TOTAL_MOST] = {1, 2, 3}, second[TOTAL_MOST] = {1, 2, 3}, longer[TOTAL_MOST];
    int32_t many[SAMPLES * TOTAL_MOST] = {1, 2, 3};
    SamplingOptions o = {1, 0, 1, 3, 0, 1};
    need(model_create(&model, &c, options, &error), &error);
    randomize(&model, 2);
    generate_all(first, &model, &o, 1, 3, total);
    generate_all(second, &model, &o, 1, 3, total);
    check_true("generation: the same seed gives the same text", memcmp(first, second, bytes) == 0);
    check_true("generation: the cache stays within the context", model.cache.length <= c.context);
    generate_all(many, &model, &o, SAMPLES, 3, total);
    check_true("generation: the first of several samples is the one alone", memcmp(first, many, bytes) == 0);
    check_true("generation: the samples differ", memcmp(many, many + total, bytes) != 0 &&
                                                     memcmp(many + total, many + 2 * total, bytes) != 0);
    bool same = true;
    o.temperature = 0;
    generate_all(first, &model, &o, 1, 3, total);
    generate_all(many, &model, &o, SAMPLES, 3, total);
    for (size_t s = 0; s < SAMPLES; s++) same = same && memcmp(many + s * total, first, bytes) == 0;
    check_true("generation: at temperature 0 every sample continues the prompt as one alone", same);
    o.temperature = 1;
    random_tokens(longer, total, c.vocab, 6);
    generate_all(longer, &model, &o, 1, total - 10, total);
    // The context of 24 is full: the next token depends on its later half alone.
    int32_t half[13];
    memcpy(half, longer + total - 22, 12 * sizeof(int32_t));
    o.temperature = 0;
    generate_all(longer, &model, &o, 1, total - 10, total - 9);
    generate_all(half, &model, &o, 1, 12, 13);
    check_true("generation: a prompt longer than the context is cut to half of it", longer[total - 10] == half[12]);

    // A text cut back to the prefix that it shares with another continues as if written after it.
    Generator g;
    need(generator_open(&g, &model, &o, 1, total, &error), &error);
    generator_append(&g, longer, 15);
    generator_step(&g);
    generator_cut(&g, 9);
    generator_append(&g, longer + 20, 5);
    generator_step(&g);
    memcpy(second, longer, 9 * sizeof(int32_t));
    memcpy(second + 9, longer + 20, 5 * sizeof(int32_t));
    generate_all(second, &model, &o, 1, 14, 15);
    check_true("generation: after a cut the text is what it would be without", second[14] == g.tokens[14]);
    generator_close(&g);
    need(!generator_open(&g, &model, &o, SAMPLES + 1, total, &error), &error);
    o.temperature = 1;
    generate_all(many, &model, &o, SAMPLES, 3, 20);
    model_free(&model);

    // A cache with room for just the text works like one for the whole context.
    options.kv_context = 20;
    need(model_create(&model, &c, options, &error), &error);
    randomize(&model, 2);
    int32_t again[SAMPLES * 20];
    memcpy(again, many, 3 * sizeof(int32_t));
    generate_all(again, &model, &o, SAMPLES, 3, 20);
    check_true("generation: a cache of the text alone gives the same text", memcmp(many, again, sizeof again) == 0);
    check_true("generation: it has as many positions", model.cache.context == 20);
    model_free(&model);
    options.kv_context = 0;

    // A model of zeros finds all tokens equally likely: only the random number of a position decides its token.
    need(model_create(&model, &c, options, &error), &error);
    o.temperature = 1;
    generate_all(many, &model, &o, SAMPLES, 3, total);
    size_t wrong = 0;
    for (size_t s = 0; s < SAMPLES; s++)
        for (size_t i = 3; i < total; i++) {
            float uniform = random_uniform(o.seed, RANDOM_SAMPLING, s, i);
            wrong += many[s * total + i] != (int32_t)(uniform * (float)c.vocab);
        }
    check("generation: tokens that do not follow their positions' random numbers", (double)wrong, 0);
    model_free(&model);
}

// Two models trained in turn in one process end with the bits of each trained alone.
static void test_two_models(void) {
    enum { B = 2, T = 9, STEPS = 5 };
    Error error;
    OptimizerOptions o = {OPTIMIZER_ADAMW, 0.9, 0.95, 1e-8, 0.1, 1, 0};
    uint64_t hash[2][2];
    for (int together = 0; together < 2; together++) {
        Model model[2];
        int32_t tokens[B * T], targets[B * T];
        for (int i = 0; i < 2; i++) {
            Config c = test_config(i ? FAMILY_LLAMA : FAMILY_GPT2);
            need(model_create(&model[i], &c, test_options(B, T), &error), &error);
            randomize(&model[i], 1);
        }
        for (int k = 0; k < 2 * STEPS; k++) {
            int i = together ? k % 2 : k / STEPS;
            uint64_t step = (uint64_t)(together ? k / 2 : k % STEPS);
            random_tokens(tokens, B * T, 61, 2 * step);
            random_tokens(targets, B * T, 61, 2 * step + 1);
            batch_gradients(&model[i], NULL, tokens, targets, B, T);
            model_update(&model[i], &o, step + 1, 1e-3, 1.0);
        }
        for (int i = 0; i < 2; i++) {
            size_t bytes = model[i].parameters.flat_size * sizeof(floatX);
            void* params = memory_allocate(bytes);
            device_download(params, model[i].flat.params, bytes, model[i].stream);
            hash[together][i] = hash_bytes(params, bytes);
            free(params);
            model_free(&model[i]);
        }
    }
    check_true("two models in one process do not disturb each other", memcmp(hash[0], hash[1], sizeof hash[0]) == 0);
}

// The mean over validation windows does not depend on how they are batched.
static void test_validation(void) {
    enum { T = 8, TOKENS = 100 };
    Config c = test_config(FAMILY_GPT2);
    Model model;
    Dataset data;
    Error error;
    int32_t batch[2][5 * T];
    uint16_t text[TOKENS];
    double loss[2] = {0, 0}, part = 0, part_by_one = 0, overlapped = 0, expected = 0;
    for (size_t i = 0; i < TOKENS; i++) text[i] = (uint16_t)(random_bits(3, RANDOM_TEST, 8, i) % 61);
    need(dataset_from_memory(&data, text, sizeof text[0], TOKENS, &error), &error);
    need(model_create(&model, &c, test_options(5, T), &error), &error);
    randomize(&model, 4);
    need(model_validate(&model, &loss[0], &data, 0, 0, batch[0], batch[1], 5, T, &error), &error);
    need(model_validate(&model, &loss[1], &data, 0, 0, batch[0], batch[1], 1, T, &error), &error);
    need(model_validate(&model, &part, &data, 3, 0, batch[0], batch[1], 2, T, &error), &error);
    check("validation does not depend on the batch", fabs(loss[0] / loss[1] - 1), FLOATX_EPSILON * 100);
    check_true("validation on some windows differs from all", part != loss[0] && part > 0);
    need(model_validate(&model, &part_by_one, &data, 3, 0, batch[0], batch[1], 1, T, &error), &error);
    check("validation on three windows does not depend on the batch", fabs(part / part_by_one - 1),
          FLOATX_EPSILON * 100);
    model.dropout.p = 0.5f;
    need(model_validate(&model, &part, &data, 0, 0, batch[0], batch[1], 5, T, &error), &error);
    check_true("validation runs without dropout, and leaves it as it was", part == loss[0] && model.dropout.p == 0.5f);
    model.dropout.p = 0;

    // With an overlap of T - 1 all tokens after the first T are scored one by one, each after T - 1 others.
    need(model_validate(&model, &overlapped, &data, 0, T - 1, batch[0], batch[1], 5, T, &error), &error);
    for (size_t start = 0; start + T < TOKENS; start++) {
        for (size_t t = 0; t < T; t++) {
            batch[0][t] = text[start + t];
            batch[1][t] = start == 0 || t == T - 1 ? text[start + t + 1] : -1;
        }
        const int32_t* on_device = model_upload(&model, batch[0], batch[1], 1, T);
        float losses[T];
        model_forward(&model, on_device, 1, T, false);
        model_head(&model, on_device + T, 0.0f, T);
        device_download(losses, model.activations.losses, sizeof losses, model.stream);
        for (size_t t = 0; t < T; t++) expected += (double)losses[t] / (TOKENS - 1);
    }
    check("validation with overlap scores each token once", fabs(overlapped / expected - 1), FLOATX_EPSILON * 100);
    dataset_close(&data);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 3. Sizes
//
// What small models do not cover: presets, and loops over pieces that run more than once.

// The presets' parameters as their authors count them, and training's operations per token. Exact numbers are counts of
// the weights on Hugging Face; llm.c states its own sizes to two digits.
static void test_presets(void) {
    static const struct {
        const char* name;
        double parameters, bound;  // relative
        size_t head, context;
        double theta;
    } presets[] = {
        {"gpt2:124M", 124439808, 0, 64, 1024, 0}, {"gpt2:350M", 354823168, 0, 64, 1024, 0},
        {"gpt2:774M", 774030080, 0, 64, 1024, 0}, {"gpt2:1558M", 1557611200, 0, 64, 1024, 0},
        {"gpt2:d6", 30e6, 0.03, 64, 1024, 0}, {"gpt2:d12", 124439808, 0, 64, 1024, 0},
        {"gpt2:d24", 354823168, 0, 64, 1024, 0}, {"gpt2:d36", 774030080, 0, 64, 1024, 0},
        {"gpt2:d48", 1557611200, 0, 64, 1024, 0}, {"gpt2:d60", 2.7e9, 0.03, 64, 1024, 0},
        {"gpt2:d72", 7.3e9, 0.03, 96, 1024, 0}, {"gpt2:d84", 12.2e9, 0.03, 96, 1024, 0},
        {"llama:15M", 15191712, 0, 48, 256, 1e4}, {"llama:42M", 41689600, 0, 64, 1024, 1e4},
        {"llama:110M", 109529856, 0, 64, 1024, 1e4}, {"llama:1B", 1235814400, 0, 64, 8192, 5e5},
        {"llama:3B", 3212749824, 0, 128, 8192, 5e5}, {"llama:8B", 8030261248, 0, 128, 8192, 5e5}};
    // 6 for each weight that multiplies a token ("Scaling Laws for Neural Language Models"), and 6 x layers x context x
    // channels for causal attention: half of what "PaLM", appendix B, counts for attention without a mask.
    static const struct { const char* name; size_t T; double flops; } operations[] = {
        {"gpt2:124M", 1024, 798543360}, {"llama:8B", 8192, 51471998976}};
    char what[160];
    Config c;
    Error error;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        Parameters p;
        Weights w;
        need(config_preset(&c, presets[i].name, &error) && config_complete(&c, &error), &error);
        memset(&p, 0, sizeof p);
        need(weights_create(&w, &p, &c, NULL, &error), &error);
        snprintf(what, sizeof what, "%s has %.4g parameters", presets[i].name, presets[i].parameters);
        check(what, fabs((double)p.true_size / presets[i].parameters - 1), presets[i].bound);
        parameters_free(&p);
        free(w.blocks);
        bool same = config_head_size(&c) == presets[i].head && c.context == presets[i].context;
        same = same && (c.rope_theta == presets[i].theta || c.family == FAMILY_GPT2) && c.norm_epsilon == 1e-5;
        size_t ffn = c.ffn;
        c.ffn = 0;
        // If the feed-forward width is not given, GPT-2's and llama2.c's follow from the channels; Llama 3's does not.
        same = same && config_complete(&c, &error) && (c.ffn == ffn || presets[i].theta == 5e5);
        snprintf(what, sizeof what, "%s: head size, context, ffn, epsilon and rotary angles", presets[i].name);
        check_true(what, same);
    }
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        Model model;
        need(config_preset(&c, operations[i].name, &error), &error);
        need(model_plan(&model, &c, test_options(1, operations[i].T), &error), &error);
        snprintf(what, sizeof what, "%s takes %.11g operations a token", operations[i].name, operations[i].flops);
        check(what, fabs(model_flops_per_token(&model, operations[i].T) - operations[i].flops), 0);
        model_free(&model);
    }
}

// Initial weights: each tensor has the mean and std of its kind, and its pieces differ. The bounds are 5 standard
// deviations of the estimates.
static void test_initial_weights(Family family) {
    Config c = test_config(family);
    Model model;
    Error error;
    ModelOptions options = test_options(1, 1);
    c.heads = 8;
    c.channels = 192;
    c.ffn = 1000;
    c.vocab = 1001;
    options.training = false;
    need(model_create(&model, &c, options, &error), &error);
    randomize(&model, 3);
    double worst = 0, usual = sqrt(2.0 / (5.0 * 192)), residual = usual / sqrt(2.0 * 2);
    bool constant = true, repeats = false;
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        size_t n = tensor_elements(t);
        double sum = 0, squares = 0, std = strstr(t->name, "_out_weight") ? residual : usual;
        float* values = (float*)memory_allocate(n * sizeof(float));
        read_floatX(values, model.flat.params + t->offset, n, &model);
        for (size_t e = 0; e < n; e++) {
            sum += (double)values[e];
            squares += (double)values[e] * (double)values[e];
            if (t->cols == 0) constant = constant && values[e] == (strstr(t->name, "bias") ? 0 : 1);
        }
        if (t->cols > 0) {
            worst = fmax(worst, fabs(sum / (double)n) / (std / sqrt((double)n)));
            worst = fmax(worst, fabs(sqrt(squares / (double)n) / std - 1) * sqrt(2.0 * (double)n));
            if (n > 2 * INIT_PIECE) repeats = repeats || memcmp(values, values + INIT_PIECE, 64 * sizeof(float)) == 0;
        }
        free(values);
    }
    const char* name = family == FAMILY_GPT2 ? "gpt2" : "llama";
    char what[160];
    snprintf(what, sizeof what, "%s initial matrices: mean 0, std sqrt(2/5C), or / sqrt(2L): errors in sigmas", name);
    check(what, worst, 5);
    snprintf(what, sizeof what, "%s initial norms are 1 and biases 0", name);
    check_true(what, constant);
    snprintf(what, sizeof what, "%s initial weights do not repeat", name);
    check_true(what, !repeats);
    model_free(&model);
}

// With GPT-2's vocabulary logits are computed for a part of the rows at a time. One batch of 32 must give the gradients
// of 4 micro-batches of 8, each with one part of logits.
static void test_head_in_parts(void) {
    enum { B = 32, T = 32 };
    Config c = test_config(FAMILY_LLAMA);
    Model model;
    Error error;
    int32_t tokens[B * T], targets[B * T];
    c.layers = 1;
    c.context = T;
    c.vocab = 50257;
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    need(model_create(&model, &c, test_options(B, T), &error), &error);
    randomize(&model, 5);
    size_t P = model.parameters.flat_size;
    float *whole = (float*)memory_allocate(P * sizeof(float)), *parts = (float*)memory_allocate(P * sizeof(float));
    double norm, loss = step_gradients(&model, &norm, tokens, targets, 1, 1, B, T);
    device_download(whole, model.flat.grads, P * sizeof(float), model.stream);
    double loss_of_parts = step_gradients(&model, &norm, tokens, targets, 1, 4, B / 4, T), worst = 0;
    device_download(parts, model.flat.grads, P * sizeof(float), model.stream);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        double error_of_tensor = relative_error(whole + t->offset, parts + t->offset, tensor_elements(t));
        worst = error_of_tensor <= worst ? worst : error_of_tensor;
    }
    check_true("logits of 32 x 32 tokens of 50257 come in parts, of 8 x 32 in one",
               model.logits_rows < B * T && model.logits_rows >= B / 4 * T);
    check("batch 32 and 4 micro-batches of 8 at V=50257: loss", fabs(loss / loss_of_parts - 1), 1e-6);
    check("batch 32 and 4 micro-batches of 8 at V=50257: worst tensor of the gradients", worst, 1e-5);
    free(whole);
    free(parts);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 4. Runs


// Calls the program with the words of `line`, its output in a file; returns its exit code. Words have no spaces.
static int train(const char* line) {
    char copy[2048], path[512];
    char* words[64];
    int count = 1;
    snprintf(copy, sizeof copy, "%s", line);
    words[0] = (char*)"train";
    for (char* word = strtok(copy, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
    snprintf(path, sizeof path, "%s/output", work);
    fflush(stdout);
    fflush(stderr);
    int saved[2] = {dup(1), dup(2)}, file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(file, 1);
    dup2(file, 2);
    int code = train_main(count, words);
    fflush(stdout);
    fflush(stderr);
    dup2(saved[0], 1);
    dup2(saved[1], 2);
    close(saved[0]);
    close(saved[1]);
    close(file);
    return code;
}

static bool output_contains(const char* text) {
    char path[512], *data = NULL;
    size_t bytes;
    Error error;
    snprintf(path, sizeof path, "%s/output", work);
    bool found = file_read(path, 1 << 24, &data, &bytes, &error) && strstr(data, text) != NULL;
    free(data);
    return found;
}

// Hash of a file of the run; 0 if it cannot be read. For the log: without the members for time and memory.
static uint64_t run_hash(const char* run, const char* name) {
    char path[768], *data = NULL;
    size_t bytes = 0;
    Error error;
    snprintf(path, sizeof path, "%s/%s/%s", work, run, name);
    if (!file_read(path, 1 << 28, &data, &bytes, &error)) return 0;
    Hash hash = hash_begin(0);
    if (strcmp(name, "metrics.jsonl") == 0) {
        for (char* line = strtok(data, "\n"); line; line = strtok(NULL, "\n")) {
            char* timing = strstr(line, "\"ms\"");
            hash_add(&hash, line, timing ? (size_t)(timing - line) : strlen(line));
        }
    } else {
        hash_add(&hash, data, bytes);
    }
    free(data);
    return hash_end(&hash);
}

// Two runs have the same checkpoint at `step`, manifest included, and the same log.
static bool runs_equal(const char* a, const char* b, const char* step) {
    char name[2][128];
    snprintf(name[0], sizeof name[0], "step_%s/rank_00000.safetensors", step);
    snprintf(name[1], sizeof name[1], "step_%s/manifest.json", step);
    for (int i = 0; i < 2; i++)
        if (run_hash(a, name[i]) == 0 || run_hash(a, name[i]) != run_hash(b, name[i])) return false;
    return run_hash(a, "metrics.jsonl") != 0 && run_hash(a, "metrics.jsonl") == run_hash(b, "metrics.jsonl");
}

static void command(const char* format, const char* a, const char* b) {
    char line[1024];
    snprintf(line, sizeof line, format, work, a, work, b);
    Error error;
    need(system(line) == 0 || fail_with(&error, "the command failed: %s", line), &error);
}

static void write_shards(void) {
    Error error;
    ShardWriter writer;
    int32_t tokens[3000];
    char path[512];
    for (int kind = 0; kind < 2; kind++) {
        random_tokens(tokens, 3000, 61, 20 + (uint64_t)kind);
        for (int i = 0; i < 3000; i++) if (i % 3) tokens[i] = (tokens[i - 1] * 7 + 1) % 61;  // something to learn
        snprintf(path, sizeof path, "%s/%s.bin", work, kind ? "val" : "train");
        need(shard_writer_open(&writer, path, 61, 0, &error) && shard_writer_add(&writer, tokens, 3000, &error) &&
             shard_writer_finish(&writer, &error) && shard_publish(path, &error), &error);
    }
}

// The flags of a small run into work/name.
static const char* small_run(const char* name, const char* more) {
    static char line[1536];
    snprintf(line, sizeof line,
             "--data %s/train.bin --val %s/val.bin --out %s/%s --layers 2 --heads 4 --channels 40 --ffn 72 "
             "--seq 16 --batch 3 --steps 20 --val-every 7 --val-windows 20 --ckpt-every 10 --warmup 5 --lr 0.01 %s",
             work, work, work, name, more);
    return line;
}

// One kind of run: twice, with different numbers of threads, and resumed in the middle.
static void test_run_kind(const char* what, const char* flags) {
    char text[160], more[512];
    command("rm -rf %s/%s %s/%s", "a", "b");
    bool ok = train(small_run("a", flags)) == 0 && train(small_run("b", flags)) == 0;
    snprintf(text, sizeof text, "%s: two runs are the same, weights, moments, state and log", what);
    check_true(text, ok && runs_equal("a", "b", "00000020"));
    for (int threads = 1; threads <= 3; threads++) {
        command("rm -rf %s/%s %s/%s", "b", "nothing");
        snprintf(more, sizeof more, "%s --threads %d", flags, threads);
        ok = train(small_run("b", more)) == 0;
        snprintf(text, sizeof text, "%s: %d thread%s: the same", what, threads, threads > 1 ? "s" : "");
        check_true(text, ok && runs_equal("a", "b", "00000020"));
    }
    // Simulates the loss of the second half: resuming from step 10 must write it again.
    command("rm -rf %s/%s/step_00000020 %s/%s", "b", "nothing");
    snprintf(more, sizeof more, "%s --resume", flags);
    ok = train(small_run("b", more)) == 0 && output_contains("resumed from");
    snprintf(text, sizeof text, "%s: 10 steps, resumed for 10: the same", what);
    check_true(text, ok && runs_equal("a", "b", "00000020"));
}

// Starts the program with a fault (fault.h) in a child and returns its process; OpenMP's threads do not survive a fork.
static pid_t train_start(const char* fault, const char* name, const char* more) {
    char flags[512];
    snprintf(flags, sizeof flags, "--threads 1 %s", more);
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return child;
    setenv("LLMTRAIN_TEST_FAULT", fault, 1);
    fault_state()->read = false;
    _exit(train(small_run(name, flags)));
}

static int train_wait(pid_t child) {
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void overwrite(const char* path, const char* data, size_t bytes) {
    FILE* file = fopen(path, "wb");
    size_t written = file ? fwrite(data, 1, bytes, file) : 0;
    Error error;
    need((file && fclose(file) == 0 && written == bytes) || fail_with(&error, "cannot write %s", path), &error);
}

// The numbers of a member of the log, a line each; NAN for null. Returns how many lines there are.
static size_t log_numbers(double* numbers, size_t most, const char* run, const char* member) {
    char path[512], key[64], *data = NULL;
    size_t bytes = 0, count = 0;
    Error error;
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", work, run);
    snprintf(key, sizeof key, "\"%s\": ", member);
    need(file_read(path, 1 << 24, &data, &bytes, &error), &error);
    for (char* line = strtok(data, "\n"); line && count < most; line = strtok(NULL, "\n")) {
        const char* at = strstr(line, key);
        numbers[count++] = at && strncmp(at + strlen(key), "null", 4) != 0 ? strtod(at + strlen(key), NULL) : NAN;
    }
    free(data);
    return count;
}

// Checks the log of a run with known flags.
static void test_log(void) {
    enum { STEPS = 20 };
    static const char* const names[] = {"step", "val_loss", "tokens", "lr", "mfu", "ms", "skipped", "tok_per_s"};
    double n[8][STEPS + 1], *steps = n[0], *val = n[1], *tokens = n[2], *lr = n[3], *mfu = n[4], *ms = n[5], error = 0;
    bool counts = true, validates = true;
    size_t lines = 0;
    command("rm -rf %s/%s", "a", "");
    int code = train(small_run("a", "--peak-tflops 0.001"));
    for (int i = 0; i < 8; i++) lines = log_numbers(n[i], STEPS + 1, "a", names[i]);
    for (size_t i = 0; i < lines && i < STEPS; i++) {
        // A warm-up of 5 steps to 0.01, then a cosine to a tenth of it at step 20.
        double x = i < 5 ? 0 : (double)(i - 5) / 14;
        double cosine = 0.01 * (0.1 + 0.9 * 0.5 * (1 + cos(3.14159265358979 * x)));
        counts = counts && steps[i] == (double)(i + 1) && tokens[i] == (double)(i + 1) * 3 * 16 && n[6][i] == 0;
        validates = validates && isfinite(val[i]) == (i + 1 == 7 || i + 1 == 14 || i + 1 == 20);
        error = fmax(error, fabs(lr[i] / (i < 5 ? 0.01 * (double)(i + 1) / 5 : cosine) - 1));
        // 6 operations for each of 27704 weights, and 6 x 2 x 16 x 40 of attention; 48 tokens, 1e9 operations a second.
        double flops = 6 * 27704 + 6 * 2 * 16 * 40;
        error = fmax(error, fabs(mfu[i] / (flops * 48 / (ms[i] * 1e-3 * 1e9)) - 1));
        error = fmax(error, fabs(n[7][i] / (48 / (ms[i] * 1e-3)) - 1));
    }
    check_true("log: a line for each step, with its number and the tokens so far",
               code == 0 && lines == STEPS && counts);
    check_true("log: --val-every 7 validates after steps 7, 14 and the last", validates);
    check("log: learning rate, tokens per second and mfu", error, 1e-6);

    // A manifest has the flags that change the result, and a resume reports those that differ.
    static const struct { const char* member; bool there;
    } flags[] = {{"\"lr\": \"0.01\"", true},
                 {"\"warmup\": \"5\"", true},
                 {"\"batch\": \"3\"", true},
                 {"\"steps\": \"20\"", true},
                 {"\"weight-decay\": \"0.1\"", true},
                 {"\"beta2\": \"0.95\"", true},
                 {"\"clip\": \"1\"", true},
                 {"\"out\": ", false},
                 {"\"threads\": ", false},
                 {"\"val-every\": ", false},
                 {"\"ckpt-every\": ", false}};
    char path[512], *manifest;
    size_t bytes;
    Error reason;
    snprintf(path, sizeof path, "%s/a/step_00000020/manifest.json", work);
    need(file_read(path, 1 << 24, &manifest, &bytes, &reason), &reason);
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        counts = counts && flags[i].there == (strstr(manifest, flags[i].member) != NULL);
    free(manifest);
    check_true("manifest: the flags that change what a run computes, and no others", counts);
    command("rm -rf %s/%s %s/%s", "a/step_00000020", "b");
    code = train(small_run("a", "--weight-decay 0.2 --resume"));
    check_true("a resume reports the flags that differ, and no others",
               code == 0 && output_contains("note: --weight-decay was '0.1' in that run and is '0.2' now") &&
               !output_contains("note: --lr"));

    code = train(small_run("b", "--log-every 3"));
    lines = log_numbers(steps, STEPS + 1, "b", "step");
    const double logged[] = {3, 6, 7, 9, 12, 14, 15, 18, 20};
    check_true("log: --log-every 3 has every third step, validations and the last",
               code == 0 && lines == 9 && memcmp(steps, logged, sizeof logged) == 0);

    char line[1024];
    command("rm -rf %s/%s", "b", "");
    snprintf(line, sizeof line, "--data %s/train.bin --out %s/b --layers 1 --heads 1 --channels 8 --seq 16 --batch 1 "
             "--steps 5 --log-every 3", work, work);
    code = train(line);
    lines = log_numbers(steps, STEPS + 1, "b", "step");
    check_true("log: --log-every 3 of 5 steps without validation has the third and the last",
               code == 0 && lines == 2 && steps[0] == 3 && steps[1] == 5);
}

// A run has diverged when --diverged-after consecutive steps were skipped, however many were skipped in all.
static void test_divergence(void) {
    enum { STEPS = 20 };
    const char* skipping = "--clip 0 --spike-skip 1.02 --spike-warmup 2 --total-batch 144";
    double skipped[STEPS + 1];
    char more[512];
    command("rm -rf %s/%s %s/%s", "a", "b");
    bool ok = train(small_run("a", skipping)) == 0 && log_numbers(skipped, STEPS + 1, "a", "skipped") == STEPS;
    size_t most = 0, consecutive = 0;
    for (size_t i = 0; ok && i < STEPS; i++) {
        consecutive = skipped[i] > (i ? skipped[i - 1] : 0) ? consecutive + 1 : 0;
        most = max_size(most, consecutive);
    }
    check_true("some steps are skipped, not all of them consecutive", ok && most > 0 && skipped[STEPS - 1] > most);
    snprintf(more, sizeof more, "%s --diverged-after %zu", skipping, most + 1);
    check_true("skipped steps that are not consecutive are no divergence",
               train(small_run("b", more)) == 0 && run_hash("a", "metrics.jsonl") == run_hash("b", "metrics.jsonl"));
    command("rm -rf %s/%s", "b", "");
    snprintf(more, sizeof more, "%s --diverged-after %zu", skipping, most);
    check_true("as many consecutive ones as --diverged-after are", train(small_run("b", more)) == 1 &&
               output_contains("steps were skipped"));
}

// A line torn by a power cut is removed from the log when the run is resumed, and so is one with a wrong step; the user
// is told.
static void test_torn_log(void) {
    enum { STEPS = 20 };
    double steps[STEPS + 1];
    char path[512], *text = NULL;
    size_t bytes, lines;
    bool right = true;
    Error error;
    command("rm -rf %s/%s", "a", "");
    need(train(small_run("a", "")) == 0 || fail_with(&error, "the run whose log is to be torn failed"), &error);
    snprintf(path, sizeof path, "%s/a/metrics.jsonl", work);
    need(file_read(path, 1 << 24, &text, &bytes, &error), &error);
    memcpy(strstr(text, "\"step\": 8,"), "\"step\":88,", 10);
    memset(strstr(text, "\"step\": 5,") + 20, 0, 40);
    overwrite(path, text, bytes);
    free(text);
    command("rm -rf %s/%s", "a/step_00000020", "");
    bool ok = train(small_run("a", "--resume")) == 0 && output_contains("removed 2 damaged lines");
    lines = log_numbers(steps, STEPS + 1, "a", "step");
    for (size_t i = 0; i < lines; i++) right = right && steps[i] == (double)(i < 4 ? i + 1 : i < 6 ? i + 2 : i + 3);
    check_true("a torn line of the log is removed, and one of a wrong step, and reported",
               ok && lines == STEPS - 2 && right);
}

// The log of two ranks: the losses of both, and the tokens of both.
static void test_log_of_ranks(void) {
    enum { STEPS = 20 };
    static const char* const names[] = {
        "loss", "loss_ranks_min", "loss_ranks_median", "loss_ranks_max", "ms", "tok_per_s", "tokens"};
    double n[7][STEPS], error = 0;
    bool sorted = true;
    command("rm -rf %s/%s", "a", "");
    bool ok = train_wait(train_start("", "a", "--ranks 2")) == 0;
    for (int i = 0; i < 7; i++) ok = ok && log_numbers(n[i], STEPS, "a", names[i]) == STEPS;
    for (size_t i = 0; ok && i < STEPS; i++) {
        sorted = sorted && n[1][i] < n[3][i] && n[2][i] == n[1][i] && n[6][i] == (double)(i + 1) * 2 * 3 * 16;
        error = fmax(error, fabs(n[0][i] / (0.5 * (n[1][i] + n[3][i])) - 1));
        error = fmax(error, fabs(n[5][i] / (2 * 48 / (n[4][i] * 1e-3)) - 1));
    }
    check_true("log of two ranks: smallest and largest loss, and the tokens of both", ok && sorted);
    check("log of two ranks: mean loss and tokens per second", ok ? error : NAN, 1e-9);
}

// --ckpt-bandwidth 1 makes the save of this 332 kB checkpoint take a third of a second, during 50 ms steps.
static void test_bandwidth(void) {
    char path[512], *text = NULL;
    size_t bytes;
    Error error;
    double ms = 0;
    command("rm -rf %s/%s", "a", "");
    bool ok = train_wait(train_start("rank 0 step 1 at load do delay 50", "a", "--ckpt-bandwidth 1")) == 0;
    snprintf(path, sizeof path, "%s/output", work);
    need(file_read(path, 1 << 24, &text, &bytes, &error), &error);
    const char* saved = strstr(text, "a/step_00000010 in ");
    if (saved) sscanf(saved, "a/step_00000010 in %lf ms", &ms);
    free(text);
    check_true("--ckpt-bandwidth 1: 332 kB take a third of a second, at most two", ok && ms > 330 && ms < 2000);
}

// The dependent sizes of a preset follow from the sizes that flags give: 32000 x 144 for the embedding, 6 blocks of 4 x
// 144 x 144 + 3 x 144 x 384 + 2 x 144, and a norm.
static void test_resized_preset(void) {
    check_true("--model llama:15M --channels 144: 6 heads of 24, ffn 384",
               train("--plan --model llama:15M --channels 144") == 0 && output_contains("6102864 parameters"));
}

// A resumed run must end as the run did: for a model with tensors of several checkpoint chunks, not multiples of the
// pieces in which memory is copied; and for one whose vocabulary is padded within a block of 8-bit states, since a
// checkpoint does not hold the padding.
static void test_odd_sizes(void) {
    static const struct { const char *what, *flags, *without, *resumed, *last; } MODELS[] = {
        {"a wide model", "--heads 9 --channels 576 --steps 4 --ckpt-every 2 --optimizer momentum",
         "rm -rf %s/%s/step_00000004 %s/%s/nothing", "b/step_00000002 in", "00000004"},
        {"padding within a block of 8-bit states", "--heads 2 --channels 36 --steps 40 --ckpt-every 4 "
         "--optimizer adamw-8bit --lr 3e-3 --warmup 0 --schedule constant",
         "rm -rf %s/%s/step_000000[1-4]? %s/%s/step_00000008", "b/step_00000004 in", "00000040"},
    };
    char line[1024], what[96];
    for (size_t i = 0; i < sizeof MODELS / sizeof MODELS[0]; i++) {
        bool ok = true;
        command("rm -rf %s/%s %s/%s", "a", "b");
        for (int resumes = 0; resumes < 2; resumes++) {
            snprintf(line, sizeof line, "--data %s/train.bin --out %s/%s --layers 1 --seq 16 --batch 1 %s%s", work,
                     work, resumes ? "b" : "a", MODELS[i].flags, resumes ? " --resume" : "");
            if (resumes) command("cp -R %s/%s %s/%s", "a", "b");
            if (resumes) command(MODELS[i].without, "b", "b");
            ok = ok && train(line) == 0 && (!resumes || output_contains(MODELS[i].resumed));
        }
        snprintf(what, sizeof what, "%s, resumed: the same", MODELS[i].what);
        check_true(what, ok && runs_equal("a", "b", MODELS[i].last));
    }
    command("rm -rf %s/%s %s/%s", "a", "b");
}

// A checkpoint whose snapshot takes longer than the next step must still hold a single step.
static void test_slow_snapshot(void) {
    command("rm -rf %s/%s %s/%s", "a", "b");
    double began = now_ms();
    int slow = train_wait(train_start("rank 0 step 1 at copy do delay 100", "a", ""));
    double ms = now_ms() - began;
    check_true("a slow snapshot: the checkpoint is of one step",
               slow == 0 && ms > 200 && train(small_run("b", "")) == 0 && runs_equal("a", "b", "00000010") &&
               runs_equal("a", "b", "00000020"));
}

// Two ranks with slow collectives must compute what one rank does: the same samples, dropout masks, averages and
// validation; no parameter is used before it has been gathered. They send what --plan predicts.
static void test_two_ranks(void) {
    enum { STEPS = 20 };
    static const char* const names[] = {"loss", "grad_norm", "val_loss", "tokens", "comm_bytes"};
    const char* flags = "--total-batch 192 --dropout 0.1 --reduce exact";
    double n[2][5][STEPS], worst = 0, planned = 0, sent = 0;
    char more[512], path[512], *text = NULL;
    size_t bytes;
    Error error;
    command("rm -rf %s/%s %s/%s", "a", "b");
    snprintf(more, sizeof more, "%s --ranks 2 --zero 1", flags);
    bool ok = train_wait(train_start("rank 1 step 1 at collective do delay 2", "a", more)) == 0;
    ok = ok && train(small_run("b", flags)) == 0;
    for (int i = 0; ok && i < 10; i++)
        ok = log_numbers(n[i / 5][i % 5], STEPS, i / 5 ? "b" : "a", names[i % 5]) == STEPS;
    for (size_t i = 0; ok && i < STEPS; i++) {
        for (int k = 0; k < 4; k++) {
            double of_one = n[1][k][i], error_of_two = fabs(n[0][k][i] / of_one - 1);
            if (!isnan(of_one)) worst = error_of_two <= worst ? worst : error_of_two;
            ok = ok && isnan(of_one) == isnan(error_of_two);
        }
        sent += n[0][4][i] / STEPS;
    }
    check("two ranks: loss, norm, validation and tokens of one rank", ok ? worst : NAN, 1e-9);

    ok = train(small_run("nothing", "--plan --ranks 2 --zero 1 --total-batch 192 --memory 1")) == 0;
    snprintf(path, sizeof path, "%s/output", work);
    need(file_read(path, 1 << 24, &text, &bytes, &error), &error);
    const char* row = strstr(text, "\n  sent per step ");
    if (row) sscanf(row, " sent per step %lf", &planned);
    // Rounded to 0.01; of the twenty steps' gathers one or two end outside the steps.
    check("--plan: MB sent per step of two ranks", fabs(planned - 1e-6 * sent), 0.012);
    ok = train(small_run("nothing", "--recompute auto --memory 0.001")) == 2;
    check_true("--recompute auto: a budget that nothing fits is refused, with what the run needs",
               ok && output_contains("the run needs 0.") && output_contains("--memory larger"));
    check_true("--plan --memory: whether it fits", ok && strstr(text, "GB in all, within --memory 1\n") != NULL);
    free(text);
}

// Runs the program in a child, with a fault or without (""); returns its exit code.
static int train_apart(const char* fault, const char* line) {
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return train_wait(child);
    setenv("LLMTRAIN_TEST_FAULT", fault, 1);
    fault_state()->read = false;
    _exit(train(line));
}

// Offloading changes no bit, for any optimizer, ZeRO stage and number of ranks; a run that offloads can resume one that
// does not, and vice versa.
static void test_offload(void) {
    static const char* const kinds[] = {"optimizer", "optimizer,activations", "activations"};
    char line[1536], away[400], what[160];
    for (int kind = 0; kind < OPTIMIZER_COUNT + 3; kind++) {
        int ranks = 1 + kind % 3, zero = kind % 3;
        const char *optimizer = OPTIMIZERS[kind % OPTIMIZER_COUNT].name;
        const char *offload = kinds[kind < OPTIMIZER_COUNT ? kind % 2 : 2];
        const char* family = kind % 2 ? "--family llama --kv-heads 2 --tied off" : "";
        bool same = true, resumed = true;
        for (size_t i = 0; i < (device_is_host() ? 2 : 3); i++) {  // nothing; to a file; to host memory
            for (int part = 0; part < (i == 0 ? 1 : 2); part++) {  // all steps; again the last ones, offloaded or not
                const char* run = i == 0 ? "a" : "b";
                snprintf(away, sizeof away, "--offload %s%s%s", offload, i == 1 ? " --offload-dir " : "",
                         i == 1 ? work : "");
                if (i == 0 || (part && kind % 2)) away[0] = 0;
                snprintf(line, sizeof line,
                         "--data %s/train.bin --out %s/%s --layers 4 --heads 4 --channels 48 --seq 8 --batch 1 "
                         "--total-batch 48 --steps 4 --ckpt-every 2 --lr 0.01 --optimizer %s --reduce exact "
                         "--threads 1 --masters %s --ranks %d --zero %d %s %s %s", work, work, run, optimizer,
                         kind % 4 == 3 ? "off" : "on", ranks, zero, family, away, part ? "--resume" : "");
                command(part ? "rm -rf %s/%s/step_00000004 %s/%s" : "rm -rf %s/%s %s/%s", run, "nothing");
                bool good = train_apart("", line) == 0;
                if (part) resumed = resumed && good;
                else same = same && good;
                if (i > 0 && part) resumed = resumed && runs_equal("a", "b", "00000004");
                else if (i > 0) same = same && runs_equal("a", "b", "00000004");
            }
        }
        snprintf(what, sizeof what, "--offload %s, %s, %d rank%s, --zero %d: the same bits", offload, optimizer, ranks,
                 ranks > 1 ? "s" : "", zero);
        check_true(what, same);
        snprintf(what, sizeof what, "--offload %s, %s, %d rank%s, --zero %d: resumed to the same bits", offload,
                 optimizer, ranks, ranks > 1 ? "s" : "", zero);
        check_true(what, resumed);
    }
}

// A disk that fails under --offload, or returns other bytes than were written, ends the run with a message; the last
// checkpoint is there, and can be resumed.
static void test_offload_fails(void) {
    static const char* const kinds[][2] = {{"optimizer", "optimizer state"}, {"activations", "activations"}};
    static const char* const actions[] = {"write", "read", "damage"};
    char line[2][700], away[1200], resume[800], fault[64], said[400], what[500];
    for (int i = 0; i < 2; i++)
        snprintf(line[i], sizeof line[i], "--data %s/train.bin --out %s/%s --layers 4 --heads 2 --channels 16 --seq 8 "
                 "--batch 2 --steps 6 --ckpt-every 3 --lr 0.01 --threads 1", work, work, i ? "b" : "a");
    command("rm -rf %s/%s %s/%s", "b", "nothing");
    bool whole = train_apart("", line[1]) == 0;
    for (int i = 0; i < 6; i++) {
        const char *const *kind = kinds[i % 2], *action = actions[i / 2];
        snprintf(away, sizeof away, "%s --offload %s --offload-dir %s", line[0], kind[0], work);
        snprintf(resume, sizeof resume, "%s --resume", line[0]);
        snprintf(fault, sizeof fault, "rank 0 step 5 at offload_%s do flip", action);
        if (i < 4) snprintf(said, sizeof said, "cannot %s the %s (--offload) in", action, kind[1]);
        else snprintf(said, sizeof said, "the %s (--offload) in %s does not match its checksum", kind[1], work);
        command("rm -rf %s/%s %s/%s", "a", "nothing");
        bool ok = whole && train_apart(fault, away) == 1 && output_contains(said);
        ok = ok && train_apart("", resume) == 0 && output_contains("step_00000003") && runs_equal("a", "b", "00000006");
        snprintf(what, sizeof what, "%s: said, and resumed from the checkpoint before", said);
        check_true(what, ok);
    }
}

// FP16 gradients that overflow on two ranks: the same steps are skipped as on one, with the same loss scales.
static void test_overflow_of_ranks(void) {
    enum { STEPS = 20 };
    const char* flags = "--loss-scale 16777216 --scale-growth 3 --total-batch 96";
    double skipped[2][STEPS], losses[2][STEPS], worst = 0;
    char more[512];
    command("rm -rf %s/%s %s/%s", "a", "b");
    snprintf(more, sizeof more, "%s --ranks 2", flags);
    bool ok = train_wait(train_start("", "a", more)) == 0 && train(small_run("b", flags)) == 0;
    for (int run = 0; run < 2; run++) {
        ok = ok && log_numbers(skipped[run], STEPS, run ? "b" : "a", "skipped") == STEPS;
        ok = ok && log_numbers(losses[run], STEPS, run ? "b" : "a", "loss") == STEPS;
    }
    for (size_t i = 0; ok && i < STEPS; i++) worst = fmax(worst, fabs(losses[0][i] / losses[1][i] - 1));
    check_true("overflows on two ranks: the steps of one rank are skipped",
               ok && skipped[0][0] == 1 && memcmp(skipped[0], skipped[1], sizeof skipped[0]) == 0);
    check("overflows on two ranks: the losses of one rank", ok ? worst : NAN, bound_of(1e-5, 2));
}

// FP16: a resumed run takes the checkpoint's loss scale, even if that has fallen to 1.
static void test_resumed_loss_scale(void) {
    const char* weights = "step_00000020/rank_00000.safetensors";
    command("rm -rf %s/%s", "a", "");
    bool ok = train(small_run("a", "--loss-scale 1 --scale-growth 1000")) == 0;
    uint64_t hash = run_hash("a", weights);
    command("rm -rf %s/%s", "a/step_00000020", "");
    ok = ok && train(small_run("a", "--loss-scale 65536 --scale-growth 1000 --resume")) == 0;
    check_true("a loss scale of 1 is resumed", ok && hash != 0 && hash == run_hash("a", weights));
}

// Copies in memory belong to one run: a resume takes the newest, also without --ckpt-hot, and a new run in the
// directory of another removes that run's copies.
static void test_hot(void) {
    char hot[512], more[560];
    Error error;
    snprintf(hot, sizeof hot, "--ckpt-async off --ckpt-hot 5 --ckpt-hot-dir %s", work);
    command("rm -rf %s/%s %s/%s", "a", "b");
    need(train(small_run("b", "")) == 0 || fail_with(&error, "the run to compare with failed"), &error);
    bool killed = train_wait(train_start("rank 0 step 18 at load do kill", "a", hot)) != 0;
    snprintf(more, sizeof more, "--resume --ckpt-hot-dir %s", work);
    check_true("a copy in memory is resumed without --ckpt-hot", killed && train(small_run("a", more)) == 0 &&
               output_contains("step_00000015 in") && runs_equal("a", "b", "00000020"));

    command("rm -rf %s/%s", "a", "");
    snprintf(more, sizeof more, "%s --clip 0.1", hot);
    killed = train_wait(train_start("rank 0 step 18 at load do kill", "a", more)) != 0;
    command("rm -rf %s/%s", "a", "");
    snprintf(more, sizeof more, "--ckpt-async off --ckpt-hot-dir %s", work);
    killed = train_wait(train_start("rank 0 step 13 at load do kill", "a", more)) != 0 && killed;
    snprintf(more, sizeof more, "--resume %s", hot);
    check_true("a copy of an earlier run in the same directory is not", killed && train(small_run("a", more)) == 0 &&
               output_contains("step_00000010 in") && runs_equal("a", "b", "00000020"));
}

// Runs a slow run in a child and sends it a signal, or two, once it has logged a step; returns its exit code.
static int train_and_signal(int first, int second) {
    char path[512];
    struct stat status;
    snprintf(path, sizeof path, "%s/a/metrics.jsonl", work);
    command("rm -rf %s/%s %s/%s.out", "a", "a");
    pid_t child = train_start("rank 0 step 2 at load do delay 50", "a", "");
    for (int wait = 0; wait < 5000 && !(stat(path, &status) == 0 && status.st_size > 0); wait++) usleep(1000);
    kill(child, first);
    if (second) usleep(10000);
    if (second) kill(child, second);
    return train_wait(child);
}

// A run that gets a stop signal saves a checkpoint, leaves no other process in its directory, and can be resumed.
static void test_signal(void) {
    static const struct { const char* name; int first, second, code; } cases[] = {
        {"SIGTERM", SIGTERM, 0, EXIT_SAVED}, {"SIGINT", SIGINT, 0, 1}, {"SIGUSR1", SIGUSR1, 0, EXIT_SAVED},
        {"SIGTERM, then SIGINT", SIGTERM, SIGINT, EXIT_SAVED}};
    char path[512], what[128], *events;
    Error error;
    size_t bytes;
    command("rm -rf %s/%s", "b", "");
    need(train(small_run("b", "")) == 0 || fail_with(&error, "the run to compare with failed"), &error);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int code = train_and_signal(cases[i].first, cases[i].second);
        snprintf(what, sizeof what, "%s: the run says that it stopped and how to continue", cases[i].name);
        check_true(what, code == cases[i].code && output_contains("stopped by a signal after step"));
        snprintf(path, sizeof path, "%s/a/events.jsonl", work);
        need(file_read(path, 1 << 20, &events, &bytes, &error), &error);
        snprintf(what, sizeof what, "%s: events.jsonl says so too", cases[i].name);
        check_true(what, strstr(events, "\"stopped\"") != NULL && strstr(events, "\"failed\"") == NULL);
        free(events);
        snprintf(what, sizeof what, "%s: resumed to the same end", cases[i].name);
        check_true(what, train(small_run("a", "--resume")) == 0 && runs_equal("a", "b", "00000020"));
    }

    snprintf(path, sizeof path, "%s/a/metrics.jsonl", work);
    FILE* other = fopen(path, "ab");
    need((other != NULL && flock(fileno(other), LOCK_EX) == 0) || fail_with(&error, "cannot lock %s", path), &error);
    check_true("two processes on one directory: the second is refused",
               train(small_run("a", "--resume")) == 1 && output_contains("another process"));
    fclose(other);
}

static void test_runs(void) {
    char* metrics = NULL;
    size_t bytes = 0;
    char path[512];
    Error error;
    test_run_kind("gpt2", "");
    test_run_kind("llama, grouped queries, untied, dropout", "--family llama --kv-heads 2 --tied off --dropout 0.1");
    test_run_kind("accumulation and skipped steps",
                  "--total-batch 144 --spike-skip 1.02 --spike-warmup 2 --spike-sigma 1");
    snprintf(path, sizeof path, "%s/a/metrics.jsonl", work);
    need(file_read(path, 1 << 24, &metrics, &bytes, &error), &error);
    check_true("that run did skip steps",
               strstr(metrics, "\"skipped\": 1,") != NULL && strstr(metrics, "\"skipped\": 2,") != NULL);
    free(metrics);
    test_run_kind("lion, wsd", "--optimizer lion --schedule wsd");
    test_run_kind("momentum", "--optimizer momentum");
    test_run_kind("sgd, no masters", "--optimizer sgd --masters off");
    if (FLOATX_DTYPE == DTYPE_F16) {
        test_run_kind("a loss scale that overflows at first", "--loss-scale 16777216 --scale-growth 3");
        need(file_read(path, 1 << 24, &metrics, &bytes, &error), &error);
        check_true("that run did overflow, and went on",
                   strstr(metrics, "\"skipped\": 1,") != NULL && strstr(metrics, "\"skipped\": 15,") == NULL);
        free(metrics);
        test_overflow_of_ranks();
        test_resumed_loss_scale();
    }
}

static void test_files(void) {
    test_slow_snapshot();
    test_log();
    test_divergence();
    test_torn_log();
    test_log_of_ranks();
    test_hot();
    test_two_ranks();
    test_offload();
    test_offload_fails();
    test_bandwidth();
    test_resized_preset();
    test_odd_sizes();
    command("rm -rf %s/%s %s/%s", "a", "b");
    check_true("--resume without a checkpoint starts from the beginning",
               train(small_run("a", "--resume")) == 0 && output_contains("starting from the beginning") &&
               train(small_run("b", "")) == 0 && runs_equal("a", "b", "00000020"));
    check_true("a run in --out is not overwritten without --resume",
               train(small_run("a", "")) == 1 && output_contains("--resume") && runs_equal("a", "b", "00000020"));
    check_true("--resume of a finished run does nothing and says nothing wrong",
               train(small_run("a", "--resume")) == 0 && runs_equal("a", "b", "00000020"));
}

// ------------------------------------------------------------------------------------------------
// 5. Damage

// Tries to load one checkpoint as the program does; true if that succeeds, or fails without a word.
static bool loads(Model* model, const char* directory) {
    Json manifest;
    RunRecord record;
    Error error;
    error.text[0] = 0;
    bool ok = record_open(&manifest, &record, directory, &error);
    if (ok) {
        ok = checkpoint_load(&model->flat, &manifest, directory, false, &error);
        json_free(&manifest);
    }
    return ok || error.text[0] == 0;
}

// After a whole checkpoint is loaded: whether its weights, loaded again without optimizer state, are the same.
static bool loads_weights_alone(Model* model, const char* directory) {
    FlatVector* flat = &model->flat;
    Json manifest;
    Error error;
    size_t P = model->parameters.flat_size, used = 0;
    floatX *all = (floatX*)memory_allocate(P * sizeof(floatX)), *alone = (floatX*)memory_allocate(P * sizeof(floatX));
    float* state = (float*)memory_allocate(P * sizeof(float));
    device_download(all, flat->params, P * sizeof(floatX), model->stream);
    need(flat_reset_optimizer(flat, &error), &error);
    need(manifest_open(&manifest, directory, &error), &error);
    need(checkpoint_load(flat, &manifest, directory, true, &error), &error);
    device_download(alone, flat->params, P * sizeof(floatX), model->stream);
    for (size_t s = 0; s < OPTIMIZER_STATES && flat->states[s]; s++) {
        device_download(state, flat->states[s], P * sizeof(float), model->stream);
        for (size_t i = 0; i < P; i++) used += state[i] != 0;
    }
    bool same = memcmp(all, alone, P * sizeof(floatX)) == 0;
    json_free(&manifest);
    free(all);
    free(alone);
    free(state);
    return same && used == 0;
}

static void test_damage(void) {
    char directory[512], path[2][600];
    char* data[2];
    size_t bytes[2];
    int accepted_cut = 0, accepted_flip = 0;
    Error error;
    Model model;
    Config c = test_config(FAMILY_GPT2);
    command("rm -rf %s/%s %s/%s", "a", "b");
    need(train(small_run("a", "")) == 0 || fail_with(&error, "the run that is to be damaged failed"), &error);
    snprintf(directory, sizeof directory, "%s/a/step_00000020", work);
    snprintf(path[0], sizeof path[0], "%s/rank_00000.safetensors", directory);
    snprintf(path[1], sizeof path[1], "%s/manifest.json", directory);
    c.context = 16;
    need(model_create(&model, &c, test_options(1, 1), &error), &error);
    for (int i = 0; i < 2; i++) need(file_read(path[i], 1 << 28, &data[i], &bytes[i], &error), &error);
    check_true("the checkpoint loads while it is whole", loads(&model, directory));
    check_true("a checkpoint's weights alone leave the optimizer as it is", loads_weights_alone(&model, directory));
    for (uint64_t n = 0; n < 100; n++) {
        int i = (int)(n % 2);
        overwrite(path[i], data[i], random_bits(1, RANDOM_TEST, 30, n) % bytes[i]);
        accepted_cut += loads(&model, directory);
        overwrite(path[i], data[i], bytes[i]);
    }
    check("checkpoints cut at 100 random lengths that still load", accepted_cut, 0);
    for (uint64_t n = 0; n < 1000; n++) {
        int i = (int)(n % 2);
        size_t at = random_bits(1, RANDOM_TEST, 31, 2 * n) % bytes[i];
        char flip = (char)(1 + random_bits(1, RANDOM_TEST, 31, 2 * n + 1) % 255);
        data[i][at] ^= flip;
        overwrite(path[i], data[i], bytes[i]);
        accepted_flip += loads(&model, directory);
        data[i][at] ^= flip;
        overwrite(path[i], data[i], bytes[i]);
    }
    check("checkpoints with one of 1000 random bytes changed that still load", accepted_flip, 0);
    model_free(&model);

    // The whole program: the newest is damaged, the previous one is used, and the end is as if nothing had happened.
    char flip = data[0][bytes[0] / 2];
    need(train(small_run("b", "")) == 0 || fail_with(&error, "the run to compare with failed"), &error);
    data[0][bytes[0] / 2] = (char)(flip + 1);
    overwrite(path[0], data[0], bytes[0]);
    check_true("a damaged newest checkpoint: named, the one before used, the same end",
               train(small_run("a", "--resume")) == 0 && output_contains("step_00000020/rank_00000.safetensors") &&
               output_contains("resumed from") && runs_equal("a", "b", "00000020"));
    command("truncate -s 100 %s/%s/step_00000010/manifest.json %s/%s/step_00000020/manifest.json", "a", "a");
    check_true("all checkpoints damaged: refused",
               train(small_run("a", "--resume")) == 1 && output_contains("no checkpoint in"));
    free(data[0]);
    free(data[1]);

    // A damaged checkpoint does not cause the removal of others.
    const KeepRule one = {1, 0, false};
    char pruned_run[1024];
    snprintf(pruned_run, sizeof pruned_run, "--data %s/train.bin --out %s/a --layers 1 --heads 1 --channels 8 --seq 16 "
             "--batch 1 --steps 20 --ckpt-every 5", work, work);
    size_t there[2] = {0, 0};
    command("rm -rf %s/%s %s/%s", "a", "b");
    need(train(pruned_run) == 0 || fail_with(&error, "the run to prune failed"), &error);
    snprintf(directory, sizeof directory, "%s/a", work);
    for (int whole = 0; whole < 2; whole++) {
        if (!whole) command("cp %s/%s %s/%s", "a/step_00000020/manifest.json", "manifest");
        if (!whole) command("truncate -s 100 %s/%s %s/%s", "a/step_00000020/manifest.json", "nothing");
        else command("cp %s/%s %s/%s", "manifest", "a/step_00000020/manifest.json");
        checkpoint_prune(directory, 20, &one);
        for (uint64_t step = 5; step <= 20; step += 5) {
            snprintf(path[0], sizeof path[0], "%s/step_%08llu", directory, (unsigned long long)step);
            there[whole] += directory_exists(path[0]);
        }
    }
    check_true("pruning removes nothing while the newest checkpoint is damaged, and then what is older",
               there[0] == 4 && there[1] == 1);
}

static size_t checkpoints_there(const char* directory) {
    uint64_t step = UINT64_MAX;
    size_t count = 0;
    while (checkpoint_before(&step, directory, step)) count++;
    return count;
}

// Which checkpoints a run that may rewind keeps, and which it drops once it has rewound from step 20 to step 10.
static void test_going_back(void) {
    const KeepRule one = {1, 0, true};
    char out[512], hot[512];
    Config c = test_config(FAMILY_GPT2);
    Model model;
    RunRecord record;
    RunOptions options;
    Run run;
    Error error;
    snprintf(out, sizeof out, "%s/back", work);
    snprintf(hot, sizeof hot, "%s/back_hot", work);
    need(model_create(&model, &c, test_options(1, 1), &error), &error);
    randomize(&model, 1);
    memset(&record, 0, sizeof record);
    record.config = c;
    record.state = run_state_begin(false, 1);
    need(directory_make(out, &error) && directory_make(hot, &error), &error);
    for (record.state.step = 5; record.state.step <= 20; record.state.step += 5) {
        record.state.skipped_consecutive = record.state.step == 20 ? 3 : 0;
        need(model_save(&model, &record, out, &error) && model_save(&model, &record, hot, &error), &error);
    }
    checkpoint_prune(out, 20, &one);
    check_true("a run that may rewind keeps all checkpoints while steps are skipped", checkpoints_there(out) == 4);

    memset(&run, 0, sizeof run);
    memset(&options, 0, sizeof options);
    options.out = out;
    run.options = &options;
    run.record.state.step = 10;
    snprintf(run.hot, sizeof run.hot, "%s", hot);
    need(log_open(&run.log, out, &error) && run_set_aside(&run, &error), &error);
    log_close(&run.log);
    uint64_t newest = 0, newest_hot = 0;
    checkpoint_before(&newest, out, UINT64_MAX);
    checkpoint_before(&newest_hot, hot, UINT64_MAX);
    check_true("after a rewind to step 10 no resume uses later checkpoints",
               newest == 10 && checkpoints_there(out) == 2 && newest_hot == 10 && checkpoints_there(hot) == 2);
    checkpoint_prune(out, 10, &one);
    check_true("and once no steps are skipped, older ones are removed", checkpoints_there(out) == 1);
    model_free(&model);
}

// A first save that fails before it opens a file must not close another one.
static void test_failed_save(void) {
    char out[512];
    Config c = test_config(FAMILY_GPT2);
    Model model;
    RunRecord record;
    Error error;
    snprintf(out, sizeof out, "%s/taken", work);
    files_open_standard();
    need(model_create(&model, &c, test_options(1, 1), &error) && file_write_atomic(out, "a file", 6, &error), &error);
    randomize(&model, 1);
    memset(&record, 0, sizeof record);
    record.config = c;
    record.state = run_state_begin(false, 1);
    check_true("a save into what is no directory fails", !model_save(&model, &record, out, &error));
    check_true("and leaves standard input open", fcntl(STDIN_FILENO, F_GETFD) != -1);
    model_free(&model);
}

static void test_model(void) {
    const char* fixtures[] = {"gpt2", "gpt2_long", "llama_gqa", "llama_tied", "llama_relatives"};
    for (int i = 0; i < 5; i++) test_fixture(fixtures[i]);
    for (int family = 0; family < 2; family++) {
        test_dropout((Family)family);
        test_cache((Family)family);
    }
    test_dropout_masks();
    test_documents(FAMILY_GPT2);
    test_documents(FAMILY_LLAMA);
    if (device_is_host() || FLOATX_DTYPE == DTYPE_BF16) {  // an emulated GPU is too slow for more than one type
        test_recompute(FAMILY_GPT2, false);
        test_recompute(FAMILY_LLAMA, false);
        test_recompute(FAMILY_LLAMA, true);
        test_frozen_patterns();
        test_frozen_converted();
    }
    test_overflow();
    test_schedules();
    test_guard();
    test_statistics();
    test_cadence();
    test_keeping();
    test_failed_save();
    test_missing_fields();
    test_sampling();
    test_sampling_order();
    test_generation();
    test_two_models();
    test_validation();
}

static void test_sizes(void) {
    test_presets();
    for (int family = 0; family < 2; family++) test_initial_weights((Family)family);
    test_head_in_parts();
}

// test_train [--PART]: all parts, or one of them; on an emulated GPU, only --model is fast enough.
int main(int argc, char** argv) {
    static const struct { const char* flag; void (*run)(void); } parts[] = {
        {"--model", test_model}, {"--sizes", test_sizes}, {"--runs", test_runs}, {"--files", test_files},
        {"--signals", test_signal}, {"--damage", test_damage}, {"--damage", test_going_back}};
    const char *base = getenv("TMPDIR"), *name = strrchr(argv[0], '/');
    if (strncmp(name ? name + 1 : argv[0], "train", 5) == 0) return train_main(argc, argv);  // a link with that name
    snprintf(work, sizeof work, "%.200s/llmtrain_test_XXXXXX", base ? base : "/tmp");
    Error error;
    need(mkdtemp(work) != NULL || fail_with(&error, "cannot make a directory under %s", base ? base : "/tmp"), &error);
    printf("test_train (%s)\n", FLOATX_NAME);
    write_shards();
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (argc == 1 || strcmp(argv[1], parts[i].flag) == 0) parts[i].run();
    char line[512];
    snprintf(line, sizeof line, "rm -rf '%s'", work);
    if (system(line) != 0) printf("could not remove %s\n", work);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
