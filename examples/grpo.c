// grpo.c: reinforcement learning whose optimum is known. A model learns sentences of a small grammar, then to please a
// reward without moving far from what it was, by group-relative policy optimization (GRPO). The probability of every
// sentence is compared with the formula of the optimum.
//
//   mkdir -p build && cc -O3 -ffp-contract=off -I. examples/grpo.c -o build/grpo -lm -pthread && build/grpo
//
// Maximizing E[r] - beta KL(q || p) over all distributions q gives q = p e^(r / beta) / Z. The gradient of it is that
// of log q, times r - beta log(q / p) less its mean over a group of samples: the penalty is in the reward ("k1"). GRPO
// ("DeepSeekMath", Shao et al., 2024) has the penalty in the loss instead, as p/q - log(p/q) - 1 of each token, an
// estimate of the same KL divergence ("k3"). The gradient of the estimate is another one: with it the rates end at
// q = beta p / (beta + mean(r) - r), which is checked too. Neither divides by the standard deviation of the rewards or
// by the length, which "Understanding R1-Zero-Like Training", Liu et al., 2025, has shown to bias.
//
// The program fails if a rate is over 4 points off its formula (the two differ by up to 10 points), or if a group of
// equal rewards has weights.

#include "llmtrain.h"                 // Model
#include "llmtrain/run/score.h"       // model_score, model_backward_weighted, model_copy_weights
#include "llmtrain/text/generate.h"   // Generator

// Sentences are "the cat sat." and the like; the model continues "the ". T: all but the last byte are inputs.
enum { ANIMALS = 4, VERBS = 2, SENTENCES = ANIMALS * VERBS, PROMPT = 4, LENGTH = 12, T = LENGTH - 1, B = 64 };
static const char* const animals[ANIMALS] = {"cat", "dog", "hen", "owl"};
static const char* const verbs[VERBS] = {"sat", "ran"};
static const double animal_rates[ANIMALS] = {0.4, 0.3, 0.2, 0.1}, verb_rates[VERBS] = {0.7, 0.3};
static const double rewards[ANIMALS] = {0, 0.2, 0.5, 1};  // of the animal; that of other texts is 0
static const double beta = 0.5;

static void stop_with(const Error* error) {
    fprintf(stderr, "grpo: %s\n", error->text);
    exit(1);
}

static void sentence_write(char text[LENGTH + 1], size_t sentence) {
    snprintf(text, LENGTH + 1, "the %s %s.", animals[sentence / VERBS], verbs[sentence % VERBS]);
}

// Which sentence a text is; SENTENCES: none.
static size_t sentence_find(const int32_t* tokens) {
    char text[LENGTH + 1], own[LENGTH + 1] = "";
    size_t sentence = 0;
    for (size_t i = 0; i < LENGTH; i++) own[i] = (char)tokens[i];
    for (; sentence < SENTENCES; sentence++) {
        sentence_write(text, sentence);
        if (strcmp(text, own) == 0) break;
    }
    return sentence;
}

// A row of a batch from a text of LENGTH tokens. The prompt is not trained.
static void row_fill(int32_t* tokens, int32_t* targets, const int32_t* text) {
    for (size_t t = 0; t < T; t++) {
        tokens[t] = text[t];
        targets[t] = t + 1 < PROMPT ? -1 : text[t + 1];
    }
}

static void sentence_fill(int32_t* tokens, int32_t* targets, size_t sentence) {
    char text[LENGTH + 1];
    int32_t ids[LENGTH];
    sentence_write(text, sentence);
    for (size_t i = 0; i < LENGTH; i++) ids[i] = (unsigned char)text[i];
    row_fill(tokens, targets, ids);
}

// The probability that the model gives to each sentence, and to all other texts.
static void sentence_rates(double rates[SENTENCES + 1], Model* model) {
    int32_t tokens[SENTENCES * T], targets[SENTENCES * T];
    float losses[SENTENCES * T];
    for (size_t s = 0; s < SENTENCES; s++) sentence_fill(tokens + s * T, targets + s * T, s);
    model_score(model, tokens, targets, SENTENCES, T, losses);
    rates[SENTENCES] = 1;
    for (size_t s = 0; s < SENTENCES; s++) {
        double logp = 0;
        for (size_t t = 0; t < T; t++) logp -= (double)losses[s * T + t];
        rates[s] = exp(logp);
        rates[SENTENCES] -= rates[s];
    }
}

static double step_finish(Model* model, uint64_t update, double lr) {
    StepFlags flags = {0};
    StepResult result;
    Error error;
    if (!model_finish_step(model, &result, flags, &error)) stop_with(&error);
    model_update(model, update, lr, 1 / fmax(1, result.grad_norm));
    return result.loss;
}

// A learning rate that falls to 0, so that the noise of the samples averages out.
static double falling(double lr, uint64_t step, uint64_t steps) {
    return lr * (1 - (double)step / (double)(steps + 1));
}

// Learns the grammar from sentences of it.
static void learn_grammar(Model* model, uint64_t steps) {
    int32_t tokens[B * T], targets[B * T];
    for (uint64_t step = 1; step <= steps; step++) {
        for (size_t b = 0; b < B; b++) {
            double u = (double)random_uniform(1, RANDOM_SAMPLING, step, b), sum = 0;
            size_t sentence = 0;
            for (; sentence + 1 < SENTENCES; sentence++) {
                sum += animal_rates[sentence / VERBS] * verb_rates[sentence % VERBS];
                if (u < sum) break;
            }
            sentence_fill(tokens + b * T, targets + b * T, sentence);
        }
        model_begin_step(model, 1, 1);
        model_gradients(model, tokens, targets, B, T);
        step_finish(model, step, falling(3e-3, step, steps));
    }
}

// What the two ways to have the penalty lead to, from the rates of the reference.
typedef enum { PENALTY_IN_REWARD, PENALTY_IN_LOSS } Penalty;

static double reward_of(size_t sentence) { return sentence < SENTENCES ? rewards[sentence / VERBS] : 0; }

static void optimum(double q[SENTENCES + 1], const double p[SENTENCES + 1], Penalty penalty) {
    double z = 0, low = 1 - beta + 1e-9, high = 1;  // of the mean reward: at high the sum below is under 1
    if (penalty == PENALTY_IN_REWARD) {
        for (size_t s = 0; s <= SENTENCES; s++) z += q[s] = p[s] * exp(reward_of(s) / beta);
        for (size_t s = 0; s <= SENTENCES; s++) q[s] /= z;
        return;
    }
    for (int i = 0; i < 100; i++) {
        double mean = (low + high) / 2, sum = 0;
        for (size_t s = 0; s <= SENTENCES; s++) sum += q[s] = beta * p[s] / (beta + mean - reward_of(s));
        if (sum > 1) low = mean;
        else high = mean;
    }
}

// The weight of each sampled token's -log p. losses: those of the policy and of the reference, (B, T) each.
static double group_weigh(float* weights, const double* group, const float* losses, const float* of_reference,
                          Penalty penalty) {
    const double unbiased = B / (B - 1.0);  // as if the mean were that of the other samples
    double gains[B], mean = 0, reward = 0;
    for (size_t b = 0; b < B; b++) {
        double ratio = 0;  // log(q / p) of the sample
        for (size_t t = b * T; t < (b + 1) * T; t++) ratio += (double)of_reference[t] - (double)losses[t];
        gains[b] = group[b] - (penalty == PENALTY_IN_REWARD ? beta * ratio : 0);
        mean += gains[b] / (double)B;
        reward += group[b] / (double)B;
    }
    for (size_t b = 0; b < B; b++)
        for (size_t t = b * T; t < (b + 1) * T; t++) {
            double inverse = exp((double)losses[t] - (double)of_reference[t]);  // p / q of the token
            double pull = penalty == PENALTY_IN_LOSS ? beta * (1 - inverse) : 0;
            weights[t] = (float)(unbiased * (gains[b] - mean) - pull);
        }
    return reward;
}

// The largest weight of a group whose samples all have the same reward and the reference's probabilities: it teaches
// nothing. Since nothing is divided by a standard deviation, there is no 0 / 0 either.
static double equal_group_weight(Penalty penalty) {
    float weights[B * T], losses[B * T];
    double group[B], largest = 0;
    for (size_t i = 0; i < B * T; i++) losses[i] = 0.1f * (float)(i % 7);
    for (size_t b = 0; b < B; b++) group[b] = 0.2;
    group_weigh(weights, group, losses, losses, penalty);
    for (size_t i = 0; i < B * T && !isnan(largest); i++)
        if (!(fabs((double)weights[i]) <= largest)) largest = fabs((double)weights[i]);
    return largest;
}

// Steps of GRPO: a group of B samples of the prompt, their rewards, and one update, on which the policy is what it was
// when they were drawn: there is no ratio to clip.
static void optimize(Model* model, Model* reference, Penalty penalty, uint64_t steps) {
    static const int32_t prompt[PROMPT] = {'t', 'h', 'e', ' '};
    int32_t tokens[B * T], targets[B * T];
    float losses[B * T], of_reference[B * T], weights[B * T];
    double group[B], reward = 0;
    Error error;
    for (uint64_t step = 1; step <= steps; step++) {
        SamplingOptions sampling = {.temperature = 1, .top_p = 1, .seed = step};
        Generator g;
        if (!generator_open(&g, model, &sampling, B, LENGTH, &error)) stop_with(&error);
        generator_append(&g, prompt, PROMPT);
        for (size_t i = PROMPT; i < LENGTH; i++) generator_step(&g);
        for (size_t b = 0; b < B; b++) {
            row_fill(tokens + b * T, targets + b * T, g.tokens + b * LENGTH);
            group[b] = reward_of(sentence_find(g.tokens + b * LENGTH));
        }
        generator_close(&g);
        model_score(reference, tokens, targets, B, T, of_reference);
        model_begin_step(model, 1, 1);
        model_score(model, tokens, targets, B, T, losses);
        reward = group_weigh(weights, group, losses, of_reference, penalty);
        model_backward_weighted(model, weights, B);
        step_finish(model, step, falling(2e-3, step, steps));
        if (step % (steps / 4) == 0) printf("  step %4d: mean reward %.3f\n", (int)step, reward);
    }
}

// Prints the rates of the reference and of the model beside the optimum; returns the largest difference to it.
static double compare(Model* model, Model* reference, Penalty penalty) {
    double p[SENTENCES + 1], q[SENTENCES + 1], best[SENTENCES + 1], worst = 0;
    sentence_rates(p, reference);
    sentence_rates(q, model);
    optimum(best, p, penalty);
    printf("  sentence       before   after  formula\n");
    for (size_t s = 0; s < SENTENCES; s++) {
        char text[LENGTH + 1];
        sentence_write(text, s);
        printf("  %s  %6.1f%%  %5.1f%%   %5.1f%%\n", text, 100 * p[s], 100 * q[s], 100 * best[s]);
        worst = fmax(worst, fabs(q[s] - best[s]));
    }
    printf("  at most %.1f points off\n", 100 * worst);
    return worst;
}

int main(void) {
    static const char* const names[] = {"penalty in the reward (k1)", "penalty in the loss (k3)"};
    Config config = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .channels = 32, .ffn = 64, .context = LENGTH,
                     .vocab = 128, .tied = true};
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .cached_sequences = B, .weighs = true};
    Model model, reference;
    Error error;
    double worst = 0;
    options.optimizer.weight_decay = 0;
    if (!model_create(&reference, &config, options, &error) || !model_create(&model, &config, options, &error) ||
        !score_check(&model, &error) || !model_randomize(&reference, 1, &error)) stop_with(&error);
    learn_grammar(&reference, 250);
    for (int i = 0; i < 2; i++) {
        Penalty penalty = i == 0 ? PENALTY_IN_REWARD : PENALTY_IN_LOSS;
        printf("%s, beta %g\n", names[i], beta);
        if (!model_copy_weights(&model, &reference, &error) || !flat_reset_optimizer(&model.flat, &error))
            stop_with(&error);
        optimize(&model, &reference, penalty, 400);
        worst = fmax(worst, compare(&model, &reference, penalty));
        double equal = equal_group_weight(penalty);
        printf("  a group of equal rewards: weights of at most %.0e\n", equal);
        if (!(equal < 1e-12)) worst = 1;
    }
    model_free(&reference);
    model_free(&model);
    return worst < 0.04 ? 0 : 1;
}
