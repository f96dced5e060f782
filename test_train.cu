// test_train.cu: the whole model against float64. For each fixture, a small model of one family with three numbers from
// a program in another language (dev/test/fixture.py):
//
//   1. gradients    logits, loss and every gradient of one batch
//   2. training     losses and gradient norms of twenty steps of AdamW with clipping
//   3. resume       the last ten steps again, from a checkpoint of step 10: the same bits
//
//   cc -std=c11 -O2 -ffp-contract=off -fopenmp -I. -x c test_train.cu -o test_train -lm -pthread && ./test_train
//
// Run it in the root of the checkout. Tests of the model's parts are in dev/test/test_model.c, of whole runs in
// dev/test/test_runs.c. The file includes train.cu, with its main renamed, and acts as the trainer if it is started
// under a name that begins with train: emulated builds compile it once for both.

#define main train_main
#include "train.cu"
#undef main

#include "dev/test/small_model.h"
#include "dev/test/whole_tensors.h"

static char fixtures[PATH_MAX];  // the directory of the fixtures, absolute

typedef struct {
    const char* name;
    SafetensorsFile file;
    Config config;
    size_t B, T;
    int32_t *tokens, *targets;  // (20, B, T) a batch for each step
} Fixture;

static void* fixture_read(const Fixture* f, const char* kind, const char* name) {
    Error error;
    const SafetensorsTensor* t = safetensors_find(&f->file, text_of("%s%s", kind, name));
    need(t != NULL, "%s has no tensor %s%s", f->file.path, kind, name);
    void* data = memory_allocate(t->bytes);
    need(safetensors_read(&f->file, t, data, t->bytes, NULL, &error), "%s", error.text);
    return data;
}

static void fixture_open(Fixture* f, const char* name) {
    Error error;
    f->name = name;
    need(safetensors_open(&f->file, text_of("%s/%s.safetensors", fixtures, name), &error), "%s", error.text);
    int32_t* c = (int32_t*)fixture_read(f, "", "config");
    Config config = {.family = (Family)c[0], .layers = (size_t)c[1], .heads = (size_t)c[2], .kv_heads = (size_t)c[3],
                     .channels = (size_t)c[4], .ffn = (size_t)c[5], .context = (size_t)c[6], .vocab = (size_t)c[7],
                     .tied = c[8] != 0};
    f->B = (size_t)c[9];
    f->T = (size_t)c[10];
    config.head_size = (size_t)c[11];
    config.qkv_bias = c[12] != 0;
    config.qk_norm = c[13] != 0;
    config.rope_scaling = c[14] ? ROPE_SCALING_LLAMA3 : ROPE_SCALING_NONE;
    config.rope_factor = c[14];
    config.rope_original = (size_t)c[15];
    need(config_complete(&config, &error), "%s", error.text);
    f->config = config;
    f->tokens = (int32_t*)fixture_read(f, "", "tokens");
    f->targets = (int32_t*)fixture_read(f, "", "targets");
    free(c);
}

static void fixture_close(Fixture* f) {
    free(f->tokens);
    free(f->targets);
    safetensors_close(&f->file);
}

// The fixture's model: with its initial parameters.
static void fixture_model(Model* model, const Fixture* f, OptimizerOptions optimizer) {
    ModelOptions options = small_options(f->B, f->T);
    Error error;
    options.optimizer = optimizer;
    need(model_create(model, &f->config, options, &error), "%s", error.text);
    for (uint32_t i = 0; i < model->parameters.count; i++) {
        const TensorId id = {i};
        const Tensor* t = model_tensor(model, id);
        float* values = (float*)fixture_read(f, "param.", t->name);
        need(flat_set_params(&model->flat, id, 0, values, tensor_elements(t), &error), "%s", error.text);
        free(values);
    }
}

// ------------------------------------------------------------------------------------------------
// 1. Gradients

static void test_gradients(const Fixture* f) {
    size_t V = f->config.vocab, N = f->B * f->T;
    double bound = bound_of(1e-5, f->config.layers);
    Model model;
    fixture_model(&model, f, optimizer_defaults(OPTIMIZER_ADAMW));
    double* expected_loss = (double*)fixture_read(f, "", "loss");
    float *expected_logits = (float*)fixture_read(f, "", "logits"),
          *logits = (float*)memory_allocate(N * V * sizeof(float)),
          *grads = (float*)memory_allocate(model.parameters.flat_size * sizeof(float));

    model_upload(&model, f->tokens, NULL, f->B, f->T, false);
    model_forward(&model);
    for (size_t row = 0; row < N; row++) {
        model_logits(&model, row, 1);
        floats_download(logits + row * V, model.activations->logits, V, &model);
    }
    check_bound(relative_error(logits, expected_logits, N * V), bound, "%s logits", f->name);

    double loss = batch_gradients(&model, NULL, f->tokens, f->targets, f->B, f->T);
    check_bound(fabs(loss - *expected_loss) / *expected_loss, bound, "%s loss", f->name);

    device_download(grads, model.flat.grads, model.parameters.flat_size * sizeof(float), model.stream);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        float* expected = (float*)fixture_read(f, "grad.", t->name);
        for (size_t e = 0; e < tensor_elements(t); e++) grads[t->offset + e] *= (float)flat_scale(&model.flat);
        double error = relative_error(grads + t->offset, expected, tensor_elements(t));
        check_bound(error, bound, "%s gradient of %s", f->name, t->name);
        free(expected);
    }
    free(expected_loss);
    free(expected_logits);
    free(logits);
    free(grads);
    model_free(&model);
}

// With a loss scale, the norm and SGD's update must be those of the unscaled gradients: weights move by lr x factor x
// gradient.
static void test_loss_scale(const Fixture* f) {
    const double lr = 64, factor = 0.25;
    const OptimizerOptions sgd = {.kind = OPTIMIZER_SGD, .master_weights = true};
    Model model;
    fixture_model(&model, f, sgd);
    size_t P = model.parameters.flat_size;
    double *expected_norms = (double*)fixture_read(f, "", "grad_norms"), norm, worst = 0;
    float *before = (float*)memory_allocate(P * sizeof(float)), *after = (float*)memory_allocate(P * sizeof(float));
    const void* weights = model.flat.master_weights ? (void*)model.flat.master_weights : (void*)model.flat.params;
    step_gradients(&model, &norm, f->tokens, f->targets, 1024, 1, f->B, f->T);
    check_bound(fabs(norm / expected_norms[0] - 1), bound_of(1e-5, f->config.layers),
                "%s norm with a loss scale of 1024", f->name);
    device_download(before, weights, P * sizeof(float), model.stream);
    model_update(&model, 1, lr, factor);
    device_download(after, weights, P * sizeof(float), model.stream);
    for (size_t i = 0; i < P; i++) after[i] = (float)((double)(before[i] - after[i]) / (lr * factor));
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        float* expected = (float*)fixture_read(f, "grad.", t->name);
        double error = relative_error(after + t->offset, expected, tensor_elements(t));
        worst = error <= worst ? worst : error;
        free(expected);
    }
    check_bound(worst, bound_of(2e-5, f->config.layers), "%s step of SGD with a loss scale of 1024, worst tensor",
                f->name);
    free(expected_norms);
    free(before);
    free(after);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 2. Training, 3. Resume

enum { STEPS = 20, SAVED_STEP = 10 };

// One step on its own batch: gradients, clipping, AdamW. Counts it in the state, and returns the loss.
static double fixture_step(Model* model, RunState* state, double* norm, const Fixture* f, const double* hyper) {
    GuardOptions guard = {.clip = hyper[5], .spike_warmup = 1, .scale_growth = 1};
    size_t batch = (size_t)state->step * f->B * f->T;
    double factor, loss = batch_gradients(model, norm, f->tokens + batch, f->targets + batch, f->B, f->T);
    need(guard_step(state, &factor, &guard, *norm), "the guard skipped a step of %s", f->name);
    model_update(model, ++state->updates, hyper[0], factor);
    state->step++;
    return loss;
}

// Parameters that belong to no tensor and are not 0: padding between tensors, and the rows of the padded vocabulary.
static size_t padding_used(const Model* model) {
    size_t used = 0, place = 0, P = model->parameters.flat_size;
    float* params = (float*)memory_allocate(P * sizeof(float));
    floats_download(params, model->flat.params, P, model);
    for (size_t i = 0; i < model->parameters.count; i++) {
        const Tensor* t = &model->parameters.tensors[i];
        for (; place < t->offset; place++) used += params[place] != 0.0f;
        place = t->offset + tensor_elements(t);
    }
    for (; place < P; place++) used += params[place] != 0.0f;
    free(params);
    return used;
}

static void test_training(const Fixture* f) {
    double bound = bound_of(1e-5, f->config.layers), loss_error = 0, norm_error = 0, norm;
    double *hyper = (double*)fixture_read(f, "", "hyper"), *losses = (double*)fixture_read(f, "", "losses"),
           *norms = (double*)fixture_read(f, "", "grad_norms");
    OptimizerOptions adamw = {.kind = OPTIMIZER_ADAMW, .beta1 = hyper[1], .beta2 = hyper[2], .epsilon = hyper[3],
                              .weight_decay = hyper[4], .master_weights = true};
    RunRecord record = {.config = f->config, .optimizer = adamw, .state = run_state_begin(false, 1)};
    RunState* state = &record.state;
    Model model, resumed;
    Error error;
    fixture_model(&model, f, adamw);
    while (state->step < STEPS) {
        size_t step = (size_t)state->step;
        if (step == SAVED_STEP) need(model_save(&model, &record, f->name, &error), "%s", error.text);
        double loss = fixture_step(&model, state, &norm, f, hyper);
        loss_error = fmax(loss_error, fabs(loss / losses[step] - 1));
        norm_error = fmax(norm_error, fabs(norm / norms[step] - 1));
        if (isnan(loss) || isnan(norm)) loss_error = NAN;
    }
    check_bound((double)padding_used(&model), 0, "%s padding that is not 0 after 20 steps", f->name);
    check_bound(loss_error, bound, "%s losses of 20 steps", f->name);
    check_bound(norm_error, bound, "%s gradient norms of 20 steps", f->name);

    fixture_model(&resumed, f, adamw);
    need(model_load(&resumed, &record, text_of("%s/step_%08d", f->name, SAVED_STEP), false, &error), "%s", error.text);
    while (state->step < STEPS) fixture_step(&resumed, state, &norm, f, hyper);
    check(model_hash(&resumed) == model_hash(&model), "%s resumed at step 10: the same bits after 20", f->name);
    free(hyper);
    free(losses);
    free(norms);
    model_free(&model);
    model_free(&resumed);
}

int main(int argc, char** argv) {
    static const char* const names[] = {"gpt2", "gpt2_long", "llama_gqa", "llama_tied", "llama_relatives"};
    const char* slash = strrchr(argv[0], '/');
    if (strncmp(slash ? slash + 1 : argv[0], "train", 5) == 0) return train_main(argc, argv);
    tests_begin("test_train");
    printf("test_train (%s)\n", FLOATX_NAME);
    need(realpath("dev/test/fixtures", fixtures) != NULL, "run it in the root of the checkout");
    root_enter();
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        Fixture f;
        fixture_open(&f, names[i]);
        test_gradients(&f);
        test_loss_scale(&f);
        test_training(&f);
        fixture_close(&f);
    }
    return tests_end();
}
