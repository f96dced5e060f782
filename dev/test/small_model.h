// small_model.h: what the tests of whole models share: two small configurations, random tokens, the gradients of a
// step, and how far results may be from exact ones. It needs llmtrain.h, or train.cu, before it.
//
//     Config c = small_config(FAMILY_LLAMA);
//     Model model;
//     small_create(&model, &c, small_options(B, T), 5);      random weights from seed 5
//     double norm, loss = batch_gradients(&model, &norm, tokens, targets, B, T);
//     check_bound(fabs(loss / expected - 1), bound_of(1e-5, c.layers), "the loss");

#ifndef LLMTRAIN_SMALL_MODEL_H
#define LLMTRAIN_SMALL_MODEL_H

#include "harness.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // of structures whose remaining members are zero

// Sizes that divide by little. A Llama model has grouped queries and a head of its own.
static inline Config small_config(Family family) {
    bool llama = family == FAMILY_LLAMA;
    Error error;
    Config c = {.family = family, .layers = 2, .heads = 4, .kv_heads = llama ? 2u : 4u, .channels = 40, .ffn = 72,
                .context = 24, .vocab = 61, .tied = !llama};
    need(config_complete(&c, &error), "%s", error.text);
    return c;
}

static inline ModelOptions small_options(size_t B, size_t T) {
    ModelOptions o = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                      .cached_sequences = 3};
    o.optimizer.seed = 1;
    return o;
}

static inline const char* family_name(Family family) { return family == FAMILY_GPT2 ? "gpt2" : "llama"; }

static inline void small_create(Model* model, const Config* c, ModelOptions options, uint64_t seed) {
    Error error;
    need(model_create(model, c, options, &error) && model_randomize(model, seed, &error), "%s", error.text);
}

static inline void random_tokens(int32_t* tokens, size_t n, size_t V, uint64_t number) {
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(random_bits(99, RANDOM_TEST, number, i) % V);
}

// Computes the gradients of `micro_batches` consecutive batches (B, T), with a loss scale; returns their loss, and the
// norm of the gradients unless that is NULL.
static inline double step_gradients(Model* model, double* norm, const int32_t* tokens, const int32_t* targets,
                                    double loss_scale, size_t micro_batches, size_t B, size_t T) {
    StepFlags flags = {.stop = false};
    StepResult result;
    Error error;
    model_begin_step(model, loss_scale, micro_batches);
    for (size_t i = 0; i < micro_batches; i++) model_gradients(model, tokens + i * B * T, targets + i * B * T, B, T);
    need(model_finish_step(model, &result, flags, &error), "%s", error.text);
    if (norm) *norm = result.grad_norm;
    return result.loss;
}

static inline double batch_gradients(Model* model, double* norm, const int32_t* tokens, const int32_t* targets,
                                     size_t B, size_t T) {
    return step_gradients(model, norm, tokens, targets, 1.0, 1, B, T);
}

// Copies n elements from the device, as floats.
static inline void floats_download(float* out, const floatX* from, size_t n, const Model* model) {
    floatX* copy = (floatX*)memory_allocate(n * sizeof(floatX));
    device_download(copy, from, n * sizeof(floatX), model->stream);
    for (size_t i = 0; i < n; i++) out[i] = float_of(copy[i]);
    free(copy);
}

// A hash of all weights, master weights and optimizer state.
static inline uint64_t model_hash(const Model* model) {
    const FlatVector* flat = &model->flat;
    const void* arrays[] = {flat->params, flat->master_weights, flat->states[0], flat->states[1]};
    size_t n = model->parameters.flat_size;
    void* copy = memory_allocate(n * sizeof(float));
    Hash hash = hash_begin(0);
    for (size_t i = 0; i < COUNT_OF(arrays); i++) {
        if (arrays[i] == NULL) continue;
        size_t bytes = n * (i == 0 ? sizeof(floatX) : sizeof(float));
        device_download(copy, arrays[i], bytes, model->stream);
        hash_add(&hash, copy, bytes);
    }
    free(copy);
    return hash_end(&hash);
}

// In the Euclidean norm of a whole tensor.
static inline double relative_error(const float* found, const float* expected, size_t n) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += pow((double)found[i] - (double)expected[i], 2);
        size += pow((double)expected[i], 2);
    }
    return sqrt(difference) / (size > 0 ? sqrt(size) : 1.0);
}

// A bound for relative errors. In FP32 usually 1e-5, about a hundred roundings. In 16 bits each activation is rounded
// about 12 times per block, each time by at most the unit roundoff: errors of random sign add up to sqrt(12 L)
// roundoffs forward, the same again backward, and the bound is 4 standard deviations of that.
static inline double bound_of(double fp32, size_t layers) {
    if (FLOATX_IS_FLOAT) return fp32;
    return 4 * FLOATX_EPSILON * sqrt(24.0 * (double)(layers + 1));
}

#endif  // LLMTRAIN_SMALL_MODEL_H
