// grpo.c: reinforcement learning whose optimum is known. A model learns sentences of a small grammar, then to please a
// reward without moving far from what it was, by group-relative policy optimization (GRPO). The probability of each
// sentence is compared with the formula of the optimum.
//
//   mkdir -p build && cc -O3 -ffp-contract=off -I. examples/grpo.c -o build/grpo -lm -pthread && build/grpo
//
// Maximizing E[r] - beta KL(q || p) over all distributions q gives q = p e^(r / beta) / Z. The gradient of it is that
// of log q, times r - beta log(q / p) less its mean over a group of samples: the penalty is in the reward ("k1"). GRPO
// ("DeepSeekMath", Shao et al., 2024) has the penalty in the loss instead, as p/q - log(p/q) - 1 of each token, an
// estimate of the same KL divergence ("k3"). The gradient of the estimate is another one: with it the rates end at
// q = beta p / (beta + mean(r) - r), which is checked too. It is right again with the derivative of what was sampled,
// as if k3 were multiplied by the ratio of q to what it was; dev/test/test_grpo.c compares the three with the exact
// gradient. None divides by the standard deviation of the rewards or by the length, which "Understanding R1-Zero-Like
// Training", Liu et al., 2025, has shown to bias: sentences here have different lengths.
//
// The policy is softmax(logits / temperature), in samples, gradients and formulas. A group of equal rewards has no
// gradient but that of the penalty; without one it is left out before the backward. The loss tells nothing: the mean
// reward, the KL divergence and the entropy are printed.
// The program fails if a rate is over 4 points off its formula (the two differ by 20 points), if the mean reward
// stays under 0.95 without a penalty, or if a ratio of new to old probabilities is not 1 at an update.

#include "llmtrain.h"                 // Model
#include "llmtrain/run/score.h"       // model_score, model_backward_weighted, model_copy_weights, HeadRule
#include "llmtrain/text/generate.h"   // Generator

// Sentences are "the ox sat." and the like; the model continues "the ", up to the first stop. First letters tell the
// animals: k3, of tokens, has the formula above for a choice of one token. A batch is G groups of SIZE samples.
enum { ANIMALS = 4, VERBS = 2, SENTENCES = ANIMALS * VERBS, PROMPT = 4, LENGTH = 14, T = LENGTH - 1, STOP = '.',
       G = 8, SIZE = 8, B = G * SIZE };
static const char* const animals[ANIMALS] = {"ox", "cat", "goat", "horse"};
static const char* const verbs[VERBS] = {"sat", "ran"};
static const double animal_rates[ANIMALS] = {0.4, 0.3, 0.2, 0.1}, verb_rates[VERBS] = {0.7, 0.3};
static const double rewards[ANIMALS] = {0, 0.2, 0.5, 1};  // of the animal; that of other texts is 0
static const double beta = 0.5, temperature = 0.6;

static void stop_with(const Error* error) {
    fprintf(stderr, "grpo: %s\n", error->text);
    exit(1);
}

static void sentence_write(char text[LENGTH + 1], size_t sentence) {
    snprintf(text, LENGTH + 1, "the %s %s.", animals[sentence / VERBS], verbs[sentence % VERBS]);
}

// Which sentence a text of LENGTH tokens is, up to the first stop; SENTENCES: none.
static size_t sentence_find(const int32_t* tokens) {
    char text[LENGTH + 1], own[LENGTH + 1] = "";
    for (size_t n = 0; n < LENGTH && (n == 0 || own[n - 1] != STOP); n++) own[n] = (char)tokens[n];
    for (size_t sentence = 0; sentence < SENTENCES; sentence++) {
        sentence_write(text, sentence);
        if (strcmp(text, own) == 0) return sentence;
    }
    return SENTENCES;
}

// A row of a batch from a text of LENGTH tokens. The prompt is not trained, nor is what comes after the first stop.
static void row_fill(int32_t* tokens, int32_t* targets, const int32_t* text) {
    bool ended = false;
    for (size_t t = 0; t < T; t++) {
        ended = ended || text[t] == STOP;
        tokens[t] = ended ? STOP : text[t];
        targets[t] = t + 1 < PROMPT || ended ? -1 : text[t + 1];
    }
}

static void sentence_fill(int32_t* tokens, int32_t* targets, size_t sentence) {
    char text[LENGTH + 1] = "";
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
        rates[s] = 0;
        for (size_t t = 0; t < T; t++) rates[s] -= (double)losses[s * T + t];
        rates[s] = exp(rates[s]);
        rates[SENTENCES] -= rates[s];
    }
}

// A learning rate that falls to 0, so that the noise of the samples averages out.
static void step_finish(Model* model, uint64_t step, uint64_t steps, double lr) {
    StepFlags flags = {0};
    StepResult result;
    Error error;
    if (!model_finish_step(model, &result, flags, &error)) stop_with(&error);
    model_update(model, step, lr * (1 - (double)step / (double)(steps + 1)), 1 / fmax(1, result.grad_norm));
}

// Learns the grammar from sentences of it.
static void learn_grammar(Model* model, uint64_t steps) {
    int32_t tokens[B * T], targets[B * T];
    for (uint64_t step = 1; step <= steps; step++) {
        for (size_t b = 0; b < B; b++) {
            double u = (double)random_uniform(1, RANDOM_SAMPLING, step, b);
            size_t s = 0;
            while (s + 1 < SENTENCES && (u -= animal_rates[s / VERBS] * verb_rates[s % VERBS]) >= 0) s++;
            sentence_fill(tokens + b * T, targets + b * T, s);
        }
        model_begin_step(model, 1, 1);
        model_gradients(model, tokens, targets, B, T);
        step_finish(model, step, steps, 3e-3);
    }
}

// A HeadRule: losses and gradients at the temperature. It multiplies logits less the largest, as the generator does, so
// that the log-probabilities have the bits of those that samples were drawn with.
static void tempered_apply(void* context, floatX* logits, float* losses, float dloss, size_t first, size_t rows) {
    const Model* model = (const Model*)context;
    size_t V = model->config.vocab, Vp = config_padded_vocab(&model->config);
    float inverse = (float)(1 / temperature);
    for (size_t r = 0; r < rows; r++) {
        floatX* x = logits + r * Vp;
        float largest = -INFINITY;
        for (size_t v = 0; v < V; v++) largest = fmaxf(largest, float_of(x[v]));
        for (size_t v = 0; v < V; v++) x[v] = floatX_of((float_of(x[v]) - largest) * inverse);
    }
    classifier(logits, losses, model->activations->targets + first, dloss * inverse, model->objective.weights + first,
               rows, V, Vp, model->stream);
}

// Ratios of new to old probabilities, and the gradient itself, are of the distribution that samples are drawn from.
static bool sampling_check(const SamplingOptions* o, Error* error) {
    return (o->temperature == temperature && o->top_p == 1 && !o->top_k && o->min_p == 0 && !o->repetition_penalty) ||
           fail_with(error, "samples must be of softmax(logits / %g): no top k, top p, min p, penalty", temperature);
}

// The ways to have the penalty, and what the first two lead to, from the rates of the reference.
typedef enum { PENALTY_IN_REWARD, PENALTY_IN_LOSS, PENALTY_NONE, PENALTY_TIMES_RATIO } Penalty;
static const char* const penalties[] = {"penalty in the reward (k1)", "penalty in the loss (k3)", "no penalty"};

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
        *(sum > 1 ? &low : &high) = mean;
    }
}

// The weights of the sampled tokens' -log q, of a group of n samples. losses: those of the policy and of the reference,
// (n, length) each.
static void group_weigh(float* weights, const double* group, const float* losses, const float* of_reference,
                        Penalty penalty, size_t n, size_t length) {
    const double unbiased = (double)n / ((double)n - 1);  // as if the mean were that of the other samples
    double gains[B], mean = 0;
    for (size_t b = 0; b < n; b++) {
        gains[b] = group[b];
        for (size_t t = b * length; t < (b + 1) * length && penalty == PENALTY_IN_REWARD; t++)
            gains[b] -= beta * ((double)of_reference[t] - (double)losses[t]);  // log(q / p) of the token
        mean += gains[b] / (double)n;
    }
    for (size_t b = 0; b < n; b++) {
        double later = 0, pull = 0;  // the sum of k3 from this token on
        for (size_t t = (b + 1) * length; t-- > b * length;) {
            double x = (double)losses[t] - (double)of_reference[t];  // log(p / q) of the token
            later += exp(x) - x - 1;
            if (penalty == PENALTY_IN_LOSS) pull = beta * (1 - exp(x));
            if (penalty == PENALTY_TIMES_RATIO) pull = beta * (1 - exp(x) + later);
            weights[t] = (float)(unbiased * (gains[b] - mean) - pull);
        }
    }
}

// A batch: samples of the prompt, group by group, with the log-probabilities that they were drawn with.
typedef struct {
    int32_t tokens[B * T], targets[B * T];
    float logps[B * T], losses[B * T], of_reference[B * T], weights[B * T];
    double rewards[B];
} Samples;

static void samples_draw(Samples* s, Model* model, uint64_t step) {
    static const int32_t prompt[PROMPT] = {'t', 'h', 'e', ' '};
    SamplingOptions o = {.temperature = temperature, .top_p = 1, .seed = step};
    Generator g;
    Error error;
    if (!sampling_check(&o, &error) || !generator_open(&g, model, &o, B, LENGTH, &error)) stop_with(&error);
    memset(s->logps, 0, sizeof s->logps);
    g.scores = true;
    generator_append(&g, prompt, PROMPT);
    for (size_t i = PROMPT; i < LENGTH; i++) {  // also of samples that have ended, whose other tokens are not used
        generator_step(&g);
        for (size_t b = 0; b < B; b++) s->logps[b * T + i - 1] = g.sampled_logps[b];
    }
    for (size_t b = 0; b < B; b++) {
        row_fill(s->tokens + b * T, s->targets + b * T, g.tokens + b * LENGTH);
        s->rewards[b] = reward_of(sentence_find(g.tokens + b * LENGTH));
    }
    for (size_t i = 0; i < B * T; i++) if (s->targets[i] < 0) s->logps[i] = 0;
    generator_close(&g);
}

// Makes group `from` group `to`, for the backward.
static void group_move(Samples* s, size_t to, size_t from) {
    const size_t n = SIZE * T;
    memmove(s->tokens + to * n, s->tokens + from * n, n * sizeof s->tokens[0]);
    memmove(s->targets + to * n, s->targets + from * n, n * sizeof s->targets[0]);
    memmove(s->logps + to * n, s->logps + from * n, n * sizeof s->logps[0]);
    memmove(s->of_reference + to * n, s->of_reference + from * n, n * sizeof s->of_reference[0]);
    memmove(s->rewards + to * SIZE, s->rewards + from * SIZE, SIZE * sizeof s->rewards[0]);
}

typedef struct { double reward, kl, entropy, equal; } Means;  // of a text, in nats; the share of equal groups

// Steps of GRPO: a batch of samples and one update, on which the policy is what it was when they were drawn: the ratio
// of new to old probabilities is 1, and there is nothing to clip. Returns how far it is from 1; last: means.
static double optimize(Means* last, Model* model, Model* reference, Penalty penalty, uint64_t steps) {
    static Samples s;
    double off = 0, samples = (double)(steps / 4 * B);
    for (uint64_t step = 1; step <= steps; step++) {
        size_t kept = 0;
        if (step % (steps / 4) == 1) memset(last, 0, sizeof *last);
        samples_draw(&s, model, step);
        model_score(reference, s.tokens, s.targets, B, T, s.of_reference);
        for (size_t b = 0; b < B; b++) last->reward += s.rewards[b] / samples;
        for (size_t i = 0; i < B * T; i++) {
            last->entropy -= (double)s.logps[i] / samples;
            last->kl += ((double)s.logps[i] + (double)s.of_reference[i]) / samples;
        }
        for (size_t g = 0; g < G; g++) {
            bool equal = true;
            for (size_t i = g * SIZE + 1; i < (g + 1) * SIZE; i++) equal = equal && s.rewards[i] == s.rewards[i - 1];
            last->equal += equal * SIZE / samples;
            if (!equal || penalty != PENALTY_NONE) group_move(&s, kept++, g);
        }
        if (step % (steps / 4) == 0)
            printf("  step %4d: mean reward %.3f, KL %.3f, entropy %.3f, groups of equal rewards %.0f%%\n", (int)step,
                   last->reward, last->kl, last->entropy, 100 * last->equal);
        if (kept == 0) continue;
        model_begin_step(model, 1, 1);
        model_score(model, s.tokens, s.targets, kept * SIZE, T, s.losses);
        for (size_t i = 0; i < kept * SIZE * T; i++)
            off = fmax(off, fabs(exp(-(double)s.losses[i] - (double)s.logps[i]) - 1));
        for (size_t g = 0; g < kept; g++)
            group_weigh(s.weights + g * SIZE * T, s.rewards + g * SIZE, s.losses + g * SIZE * T,
                        s.of_reference + g * SIZE * T, penalty, SIZE, T);
        model_backward_weighted(model, s.weights, B);  // a mean over all samples: others have weights of 0
        step_finish(model, step, steps, 2e-3);
    }
    return off;
}

// Prints the rates of the reference and of the model beside the optimum; returns the largest difference to it.
static double compare(Model* model, Model* reference, Penalty penalty) {
    double p[SENTENCES + 1], q[SENTENCES + 1], best[SENTENCES + 1], worst = 0;
    char text[LENGTH + 1];
    sentence_rates(p, reference);
    sentence_rates(q, model);
    optimum(best, p, penalty);
    printf("  sentence         before   after  formula\n");
    for (size_t s = 0; s < SENTENCES; s++) {
        sentence_write(text, s);
        printf("  %-14s  %6.1f%%  %5.1f%%   %5.1f%%\n", text, 100 * p[s], 100 * q[s], 100 * best[s]);
        worst = fmax(worst, isnan(q[s]) ? 1 : fabs(q[s] - best[s]));
    }
    printf("  at most %.1f points off\n", 100 * worst);
    return worst;
}

int main(void) {
    Config config = {.family = FAMILY_LLAMA, .layers = 2, .heads = 4, .channels = 32, .ffn = 64, .context = LENGTH,
                     .vocab = 128, .tied = true};
    ModelOptions options = {.B = B, .T = T, .training = true, .optimizer = optimizer_defaults(OPTIMIZER_ADAMW),
                            .cached_sequences = B, .weighs = true};
    Model model, reference;
    Means last = {0};
    Error error;
    double worst = 0, off = 0;
    options.optimizer.weight_decay = 0;
    if (!model_create(&reference, &config, options, &error) || !model_create(&model, &config, options, &error) ||
        !score_check(&model, &error) || !model_randomize(&reference, 1, &error)) stop_with(&error);
    learn_grammar(&reference, 250);
    model.rule = (HeadRule){tempered_apply, &model};
    reference.rule = (HeadRule){tempered_apply, &reference};
    for (Penalty penalty = PENALTY_IN_REWARD; penalty <= PENALTY_NONE; penalty++) {
        printf("%s, beta %g\n", penalties[penalty], penalty == PENALTY_NONE ? 0 : beta);
        if (!model_copy_weights(&model, &reference, &error) || !flat_reset_optimizer(&model.flat, &error))
            stop_with(&error);
        off = fmax(off, optimize(&last, &model, &reference, penalty, penalty == PENALTY_NONE ? 100 : 400));
        if (penalty != PENALTY_NONE) worst = fmax(worst, compare(&model, &reference, penalty));
    }
    printf("at most %.0e off a ratio of 1 at an update\n", off);
    model_free(&reference);
    model_free(&model);
    return worst < 0.04 && off < 1e-5 && last.reward > 0.95 ? 0 : 1;
}
