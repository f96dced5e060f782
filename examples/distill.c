// distill.c: knowledge distillation. A small model that sees 1% of the texts, and for each of their tokens a larger
// model's distribution over all tokens ("soft targets"), is as good as one that sees all texts ("Distilling the
// Knowledge in a Neural Network", Hinton et al., 2015, at a temperature of 1). Without them it learns the few by heart.
//
//   mkdir -p build && cc -O3 -ffp-contract=off -I. examples/distill.c -o build/distill -lm -pthread && build/distill
//
// The source of the texts is known: a token depends on the two before it. The KL divergence of a model from the source,
// how much worse its loss is, is therefore exact. One HeadRule computes losses and gradients for any distributions as
// targets: the teacher's in training, the source's in validation; and it reads the teacher's.
//
// The program fails if the student with soft targets is over 10% worse than the one with all texts, or not twice as
// good as the one without them, or if the rule's gradient is not that of differences of the loss.

#include "llmtrain.h"            // Model
#include "llmtrain/run/score.h"  // HeadRule, model_score, model_copy_weights, model_gradient_read, model_weight_write

// VP: V, padded. Texts have numbers: a model with few of them sees each a hundred times, one with all of them once.
enum { V = 16, VP = 128, T = 32, B = 32, STEPS = 200, ALL = STEPS * B, FEW = ALL / 100, HELD_OUT = ALL };

static void stop_with(const Error* error) {
    fprintf(stderr, "distill: %s\n", error->text);
    exit(1);
}

// Texts, and the distribution of each target: what a model says while it `reads`, otherwise what a rule compares with.
typedef struct { int32_t tokens[B * T], targets[B * T]; float p[B * T][V]; bool reads; } Batch;

// Fills in texts of the source from number `first` on, modulo `texts`, and the source's distributions.
static void batch_fill(Batch* batch, size_t first, size_t texts) {
    for (size_t i = 0, last = 0, token = 0, next = 0; i < B * T; i++, last = token, token = next) {
        uint64_t number = (first + i / T) % texts;
        float *p = batch->p[i], sum = 0, u = random_uniform(3, RANDOM_CORPUS, number, i % T);
        if (i % T == 0) last = 0, token = random_bits(4, RANDOM_CORPUS, number, 0) % V;
        for (size_t v = 0; v < V; v++)
            sum += p[v] = expf(random_normal(1, RANDOM_CORPUS, last, v) +
                               1.5f * random_normal(2, RANDOM_CORPUS, token, v));
        for (size_t v = 0; v < V; v++) p[v] /= sum;
        for (next = 0; next + 1 < V && u >= p[next]; next++) u -= p[next];
        batch->tokens[i] = (int32_t)token;
        batch->targets[i] = (int32_t)next;
    }
}

// The HeadRule: the KL divergence of q = softmax(logits) from p, sum p (log p - log q), whose derivative is q - p.
static void soft_apply(void* context, floatX* logits, float* losses, float dloss, size_t first, size_t rows) {
    Batch* batch = (Batch*)context;
    for (size_t r = 0; r < rows; r++) {
        floatX* x = logits + r * VP;
        float *p = batch->p[first + r], largest = -INFINITY, sum = 0;
        for (size_t v = 0; v < V; v++) largest = fmaxf(largest, float_of(x[v]));
        for (size_t v = 0; v < V; v++) sum += expf(float_of(x[v]) - largest);
        losses[r] = 0;
        for (size_t v = 0; v < V; v++) {
            float logq = float_of(x[v]) - largest - logf(sum), q = expf(logq);
            if (batch->reads) p[v] = q;
            losses[r] += p[v] * (logf(p[v]) - logq);
            if (dloss != 0) x[v] = floatX_of(dloss * (q - p[v]));
        }
        for (size_t v = V; v < VP && dloss != 0; v++) x[v] = floatX_of(0);
    }
}

// The mean of the rule's losses.
static double mean_loss(Model* model, const Batch* batch) {
    float losses[B * T];
    double sum = 0;
    model_score(model, batch->tokens, batch->targets, B, T, losses);
    for (size_t i = 0; i < B * T; i++) sum += (double)losses[i];
    return sum / (B * T);
}

static double gradients(Model* model, const Batch* batch) {
    StepFlags flags = {0};
    StepResult result;
    Error error;
    model_begin_step(model, 1, 1);
    model_gradients(model, batch->tokens, batch->targets, B, T);
    if (!model_finish_step(model, &result, flags, &error)) stop_with(&error);
    return result.grad_norm;
}

// Trains on the first `texts` of the source, again and again; teacher: whose distributions are the targets, or NULL.
// Returns the mean KL divergence from the source, of texts that no model has seen.
static double train(Model* model, Model* teacher, size_t texts) {
    static Batch batch;
    double sum = 0;
    model->rule = (HeadRule){teacher ? soft_apply : NULL, &batch};
    for (uint64_t step = 1; step <= STEPS; step++) {
        batch_fill(&batch, (step - 1) * B, texts);
        if (teacher) {
            teacher->rule = (HeadRule){soft_apply, &batch};
            batch.reads = true;
            model_score(teacher, batch.tokens, batch.targets, B, T, NULL);
            batch.reads = false;
        }
        double norm = gradients(model, &batch);
        model_update(model, step, 4e-3 * (1 - (double)step / (STEPS + 1)), 1 / fmax(1, norm));
    }
    model->rule = (HeadRule){soft_apply, &batch};
    for (size_t i = 0; i < 4; i++) {
        batch_fill(&batch, HELD_OUT + i * B, SIZE_MAX);
        sum += mean_loss(model, &batch) / 4;
    }
    return sum;
}

// The norm of a tensor's gradient over the slope of the loss along it, by differences: 1 if the rule is right.
static double gradient_ratio(Model* model, const char* name, size_t n) {
    static Batch batch;
    static float weights[1 << 12], gradient[1 << 12], moved[1 << 12];
    Error error;
    double norm = 0, slope = 0, h = 0.05;
    model->rule = (HeadRule){soft_apply, &batch};
    batch_fill(&batch, 0, SIZE_MAX);
    gradients(model, &batch);
    if (!model_gradient_read(model, name, gradient, &error) || !model_weight_read(model, name, weights, &error))
        stop_with(&error);
    for (size_t i = 0; i < n; i++) norm += (double)gradient[i] * (double)gradient[i];
    norm = sqrt(norm);
    for (int sign = 1; sign >= -1; sign -= 2) {
        for (size_t i = 0; i < n; i++) moved[i] = weights[i] + (float)(sign * h / norm) * gradient[i];
        if (!model_weight_write(model, name, moved, &error)) stop_with(&error);
        slope += sign * mean_loss(model, &batch) / (2 * h);
    }
    return norm / slope;
}

int main(void) {
    enum { TEACHER, ON_ALL, ON_FEW, SOFT, MODELS };
    static const char* const names[MODELS] = {"teacher, all texts", "student, all texts", "student, 1% of the texts",
                                              "student, 1%, soft targets"};
    Config config = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .channels = 64, .ffn = 128, .context = T,
                     .vocab = V};
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .weighs = true};
    Model models[MODELS], *student = &models[SOFT];
    double off[MODELS];
    Error error;
    for (int i = 0; i < MODELS; i++) {
        if (i == ON_ALL) config.layers = 1, config.channels = 32, config.ffn = 64;
        if (!model_create(&models[i], &config, options, &error) || !model_randomize(&models[i], 1, &error))
            stop_with(&error);
    }
    // All students begin with the same weights.
    if (!model_copy_weights(&models[ON_FEW], student, &error) || !model_copy_weights(&models[ON_ALL], student, &error))
        stop_with(&error);
    double ratio = gradient_ratio(student, "block.0.ffn_out_weight", 32 * 64);
    if (!model_copy_weights(student, &models[ON_ALL], &error)) stop_with(&error);
    printf("the gradient of soft targets is %.4f times that of differences\n", ratio);
    printf("%zu parameters teach %zu\n", models[TEACHER].parameters.true_size, student->parameters.true_size);
    for (int i = 0; i < MODELS; i++) {
        off[i] = train(&models[i], i == SOFT ? &models[TEACHER] : NULL, i >= ON_FEW ? FEW : ALL);
        printf("  %-26s %.4f nats over the entropy of the source\n", names[i], off[i]);
    }
    for (int i = 0; i < MODELS; i++) model_free(&models[i]);
    return off[SOFT] < 1.1 * off[ON_ALL] && 2 * off[SOFT] < off[ON_FEW] && fabs(ratio - 1) < 0.01 ? 0 : 1;
}
