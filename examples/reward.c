// reward.c: a reward model. From pairs of answers of which somebody preferred one, a GPT with a head of one number
// learns a score of answers ("Deep Reinforcement Learning from Human Preferences", Christiano et al., 2017; "Training
// language models to follow instructions with human feedback", Ouyang et al., 2022). Then it picks the best of 16.
//
//   mkdir -p build && cc -O3 -ffp-contract=off -I. examples/reward.c -o build/reward -lm -pthread && build/reward
//
// Who prefers is known: a table has a number for each two tokens, the true reward r of an answer is the mean over its
// neighbors, and answer a is preferred to b with probability sigmoid(r(a) - r(b)) (Bradley and Terry, 1952). So it is
// known how often the reward itself agrees with the labels, and the loss that no model can beat: their entropy.
//
// The program fails if the model agrees with 4% fewer of the labels than the reward does, if the answers that it picks
// have less than 90% of the reward of the best ones, or if its gradient is not that of differences of the loss.

#include "llmtrain.h"            // Model
#include "llmtrain/run/score.h"  // model_hidden, model_backward_hidden

// Answers have T / 2 to T tokens. In a batch the sequences 2 i and 2 i + 1 are a pair, the preferred one first.
enum { V = 8, T = 16, PAIRS = 32, B = 2 * PAIRS, C = 32, STEPS = 1500, HELD_OUT = 64, BEST_OF = 16 };

typedef struct {
    int32_t tokens[B * T], targets[B * T];  // targets: none
    size_t last[B];                         // the last token of each answer
    double reward[B];                       // the true one
    double entropy;                         // of the labels, the mean over the pairs, in nats
    float hidden[B * T * C], dhidden[B * T * C];
} Batch;

static struct { float weight[C], gradient[C], m[C], v[C]; } head;  // score: weight . hidden state of the last token

static void stop_unless(bool good, const Error* error) {
    if (good) return;
    fprintf(stderr, "reward: %s\n", error->text);
    exit(1);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// Fills in the answers with numbers from B number on, and who of each pair was preferred.
static void batch_fill(Batch* batch, size_t number) {
    batch->entropy = 0;
    memset(batch->tokens, 0, sizeof batch->tokens);
    for (size_t i = 0; i < B * T; i++) batch->targets[i] = -1;
    for (size_t b = 0; b < B; b++) {
        uint64_t answer = number * B + b;
        int32_t* tokens = batch->tokens + b * T;
        batch->last[b] = T / 2 - 1 + random_bits(1, RANDOM_CORPUS, answer, T) % (T / 2 + 1);
        batch->reward[b] = 0;
        for (size_t t = 0; t <= batch->last[b]; t++) {
            tokens[t] = (int32_t)(random_bits(1, RANDOM_CORPUS, answer, t) % V);
            if (t > 0)
                batch->reward[b] += 6 * (double)random_normal(2, RANDOM_CORPUS, (uint64_t)tokens[t - 1],
                                                              (uint64_t)tokens[t]) / (double)batch->last[b];
        }
    }
    for (size_t b = 0; b < B; b += 2) {
        double p = sigmoid(batch->reward[b] - batch->reward[b + 1]);
        batch->entropy -= (p * log(p) + (1 - p) * log(1 - p)) / PAIRS;
        if ((double)random_uniform(3, RANDOM_CORPUS, number, b) < p) continue;
        for (size_t t = 0; t < T; t++) {
            int32_t token = batch->tokens[b * T + t];
            batch->tokens[b * T + t] = batch->tokens[(b + 1) * T + t];
            batch->tokens[(b + 1) * T + t] = token;
        }
        size_t last = batch->last[b];
        double reward = batch->reward[b];
        batch->last[b] = batch->last[b + 1], batch->last[b + 1] = last;
        batch->reward[b] = batch->reward[b + 1], batch->reward[b + 1] = reward;
    }
}

// The scores of the answers: scores (B).
static void score(Model* model, Batch* batch, double* scores) {
    Error error;
    model_score(model, batch->tokens, batch->targets, B, T, NULL);
    stop_unless(model_hidden(model, batch->hidden, &error), &error);
    for (size_t b = 0; b < B; b++) {
        const float* h = batch->hidden + (b * T + batch->last[b]) * C;
        scores[b] = 0;
        for (size_t c = 0; c < C; c++) scores[b] += (double)head.weight[c] * (double)h[c];
    }
}

// The mean over the pairs of -log sigmoid(score of the preferred - score of the other). Its derivatives go into
// `dhidden`, of the sum over the pairs, and into the head's gradient.
static double pairs_loss(Model* model, Batch* batch) {
    double scores[B], loss = 0;
    score(model, batch, scores);
    memset(batch->dhidden, 0, sizeof batch->dhidden);
    memset(head.gradient, 0, sizeof head.gradient);
    for (size_t b = 0; b < B; b += 2) {
        double p = sigmoid(scores[b] - scores[b + 1]);
        loss -= log(p) / PAIRS;
        for (size_t k = 0; k < 2; k++) {
            size_t at = ((b + k) * T + batch->last[b + k]) * C;
            double dscore = k == 0 ? p - 1 : 1 - p;
            for (size_t c = 0; c < C; c++) {
                batch->dhidden[at + c] = (float)dscore * head.weight[c];
                head.gradient[c] += (float)(dscore / PAIRS) * batch->hidden[at + c];
            }
        }
    }
    return loss;
}

// One step's gradients; returns the loss.
static double gradients(Model* model, Batch* batch, double* norm) {
    StepFlags flags = {0};
    StepResult result;
    Error error;
    model_begin_step(model, 1, 1);
    double loss = pairs_loss(model, batch);
    stop_unless(model_backward_hidden(model, batch->dhidden, PAIRS, &error), &error);
    stop_unless(model_finish_step(model, &result, flags, &error), &error);
    *norm = result.grad_norm;
    return loss;
}

// Adam for the head, which the model does not know.
static void head_update(uint64_t step, double lr) {
    for (size_t c = 0; c < C; c++) {
        head.m[c] = 0.9f * head.m[c] + 0.1f * head.gradient[c];
        head.v[c] = 0.95f * head.v[c] + 0.05f * head.gradient[c] * head.gradient[c];
        double m = (double)head.m[c] / (1 - pow(0.9, (double)step));
        double v = (double)head.v[c] / (1 - pow(0.95, (double)step));
        head.weight[c] -= (float)(lr * m / (sqrt(v) + 1e-8));
    }
}

// The norm of a tensor's gradient over the slope of the loss along it, by differences: 1 if the gradient is right.
static double gradient_ratio(Model* model, Batch* batch, const char* name, size_t n) {
    static float weights[1 << 12], gradient[1 << 12], moved[1 << 12];
    Error error;
    double norm = 0, slope = 0, h = 0.02;
    gradients(model, batch, &norm);
    stop_unless(model_gradient_read(model, name, gradient, &error), &error);
    stop_unless(model_weight_read(model, name, weights, &error), &error);
    norm = 0;
    for (size_t i = 0; i < n; i++) norm += (double)gradient[i] * (double)gradient[i];
    norm = sqrt(norm);
    for (int sign = 1; sign >= -1; sign -= 2) {
        for (size_t i = 0; i < n; i++) moved[i] = weights[i] + (float)(sign * h / norm) * gradient[i];
        stop_unless(model_weight_write(model, name, moved, &error), &error);
        slope += sign * pairs_loss(model, batch) / (2 * h);
    }
    stop_unless(model_weight_write(model, name, weights, &error), &error);
    return norm / slope;
}

int main(void) {
    Config config = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .channels = C, .ffn = 2 * C, .context = T,
                     .vocab = V};
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .weighs = true};
    static Batch batch;
    double norm, scores[B], loss = 0, entropy = 0, agrees = 0, true_agrees = 0, picked = 0, best = 0;
    Model model;
    Error error;
    stop_unless(model_create(&model, &config, options, &error) && model_randomize(&model, 1, &error), &error);
    for (size_t c = 0; c < C; c++) head.weight[c] = 0.1f * random_normal(4, RANDOM_CORPUS, c, 0);
    batch_fill(&batch, 0);
    double ratio = gradient_ratio(&model, &batch, "block.0.ffn_out_weight", C * 2 * C);
    printf("the gradient of a weight is %.4f times that of differences\n", ratio);

    for (uint64_t step = 1; step <= STEPS; step++) {
        double lr = 5e-3 * (1 - (double)step / (STEPS + 1));
        batch_fill(&batch, step);
        loss = gradients(&model, &batch, &norm);
        model_update(&model, step, lr, 1 / fmax(1, norm));
        head_update(step, lr);
        if (step % 300 == 0)
            printf("step %4d: loss %.3f, of labels with an entropy of %.3f\n", (int)step, loss, batch.entropy);
    }

    // Pairs that it has not seen; and of each 16 answers the one with the highest score.
    loss = 0;
    for (size_t i = 0; i < HELD_OUT; i++) {
        batch_fill(&batch, STEPS + 1 + i);
        loss += pairs_loss(&model, &batch) / HELD_OUT;
        entropy += batch.entropy / HELD_OUT;
        score(&model, &batch, scores);
        for (size_t b = 0; b < B; b += 2) {
            agrees += (scores[b] > scores[b + 1]) / (double)(HELD_OUT * PAIRS);
            true_agrees += (batch.reward[b] > batch.reward[b + 1]) / (double)(HELD_OUT * PAIRS);
        }
        for (size_t first = 0; first < B; first += BEST_OF) {
            size_t highest = first, truly = first;
            for (size_t b = first; b < first + BEST_OF; b++) {
                if (scores[b] > scores[highest]) highest = b;
                if (batch.reward[b] > batch.reward[truly]) truly = b;
            }
            picked += batch.reward[highest] * BEST_OF / (HELD_OUT * B);
            best += batch.reward[truly] * BEST_OF / (HELD_OUT * B);
        }
    }
    printf("%d pairs not seen: loss %.4f, entropy of the labels %.4f\n", HELD_OUT * PAIRS, loss, entropy);
    printf("it agrees with %.1f%% of the labels, the true reward with %.1f%%\n", 100 * agrees, 100 * true_agrees);
    printf("the best of %d answers by its score have a reward of %.2f, by the reward itself %.2f\n", BEST_OF, picked,
           best);
    model_free(&model);
    return agrees > true_agrees - 0.04 && picked > 0.9 * best && fabs(ratio - 1) < 0.01 ? 0 : 1;
}
