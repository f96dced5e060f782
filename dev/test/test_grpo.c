// test_grpo.c: the parts of examples/grpo.c that its rates cannot tell apart from almost right ones.
//
//   make build/test_grpo && build/test_grpo
//
//   1. penalty   the expected gradient of each way to have it, against that of the exact KL divergence
//   2. weights   what a group's weights depend on, and do not
//   3. samples   what may be sampled, and what follows the first stop

#define main grpo_main
#include "../../examples/grpo.c"
#undef main
#include "harness.h"

// ------------------------------------------------------------------------------------------------
// 1. Penalty
//
// Policy and reference are tables of logits for each beginning of a text of 3 tokens out of 4. The expected gradient is
// the sum over all groups of two texts, each with its probability; the exact one comes from differences.

enum { TOKENS = 4, TEXTS = 64, NODES = 1 + 4 + 16 };
typedef double Table[NODES][TOKENS];

static double table_logp(Table logits, size_t node, size_t token) {
    double sum = 0;
    for (size_t v = 0; v < TOKENS; v++) sum += exp(logits[node][v]);
    return logits[node][token] - log(sum);
}

// Token t of a text, and the row of the table for what comes before it.
static size_t text_token(size_t text, size_t t) { return text / (t == 0 ? 16 : t == 1 ? 4 : 1) % TOKENS; }
static size_t text_node(size_t text, size_t t) { return t == 0 ? 0 : t == 1 ? 1 + text / 16 : 5 + text / 4; }

// losses (3) of a text, unless NULL; returns its log-probability.
static double table_score(float* losses, Table logits, size_t text) {
    double sum = 0;
    for (size_t t = 0; t < 3; t++) {
        double logp = table_logp(logits, text_node(text, t), text_token(text, t));
        if (losses) losses[t] = (float)-logp;
        sum += logp;
    }
    return sum;
}

static double table_kl(Table q, Table p) {
    double kl = 0;
    for (size_t i = 0; i < TEXTS; i++) {
        double of_q = table_score(NULL, q, i);
        kl += exp(of_q) * (of_q - table_score(NULL, p, i));
    }
    return kl;
}

static void tables_fill(Table q, Table p) {
    for (size_t i = 0; i < NODES; i++)
        for (size_t v = 0; v < TOKENS; v++) {
            q[i][v] = (double)random_normal(3, RANDOM_TEST, i, v);
            p[i][v] = (double)random_normal(4, RANDOM_TEST, i, v);
        }
}

static void expected_gradient(Table gradient, Table q, Table p, Penalty penalty) {
    static const double equal[2] = {0.7, 0.7};
    for (size_t pair = 0; pair < TEXTS * TEXTS; pair++) {
        const size_t texts[2] = {pair / TEXTS, pair % TEXTS};
        float losses[6], of_p[6], weights[6];
        double chance = 0.5;  // the mean over the two
        for (size_t i = 0; i < 2; i++) {
            chance *= exp(table_score(losses + 3 * i, q, texts[i]));
            table_score(of_p + 3 * i, p, texts[i]);
        }
        group_weigh(weights, equal, losses, of_p, penalty, 2, 3);
        for (size_t i = 0; i < 6; i++) {
            size_t text = texts[i / 3], t = i % 3, node = text_node(text, t);
            for (size_t v = 0; v < TOKENS; v++)
                gradient[node][v] += chance * (double)weights[i] *
                                     (exp(table_logp(q, node, v)) - (v == text_token(text, t)));
        }
    }
}

// The distance of the expected gradient from that of beta KL(q || p), over the length of the latter.
static double gradient_error(Penalty penalty) {
    Table q, p, gradient = {{0}};
    double squares = 0, errors = 0, h = 1e-5;
    tables_fill(q, p);
    expected_gradient(gradient, q, p, penalty);
    for (size_t i = 0; i < NODES; i++)
        for (size_t v = 0; v < TOKENS; v++) {
            double logit = q[i][v], above, exact;
            q[i][v] = logit + h;
            above = table_kl(q, p);
            q[i][v] = logit - h;
            exact = beta * (above - table_kl(q, p)) / (2 * h);
            q[i][v] = logit;
            squares += exact * exact;
            errors += (gradient[i][v] - exact) * (gradient[i][v] - exact);
        }
    return sqrt(errors / squares);
}

static void test_penalty(void) {
    check_bound(gradient_error(PENALTY_IN_REWARD), 1e-6, "k1 in the reward: the gradient of the exact KL divergence");
    check_bound(gradient_error(PENALTY_TIMES_RATIO), 1e-6, "k3 x ratio: the gradient of the exact KL divergence");
    double off = gradient_error(PENALTY_IN_LOSS);
    check(off > 0.1 && off < 10, "k3 in the loss: another gradient, %.0f%% off", 100 * off);
    check(fabs(gradient_error(PENALTY_NONE) - 1) < 1e-6, "without a penalty there is no gradient of it");
}

// ------------------------------------------------------------------------------------------------
// 2. Weights

// Texts of different lengths with the probabilities of the reference; rows end with losses of 0, as of targets of -1.
static void test_weights(void) {
    enum { N = 6, L = 9 };
    static const size_t lengths[N] = {1, 9, 2, 7, 4, 3};
    for (Penalty penalty = PENALTY_IN_REWARD; penalty <= PENALTY_TIMES_RATIO; penalty++) {
        double rewarded[N], equal[N];
        float losses[N * L] = {0}, weights[N * L], none[N * L];
        for (size_t b = 0; b < N; b++) {
            rewarded[b] = b < N / 2 ? 1 : 0;
            equal[b] = 0.2;
            for (size_t t = 0; t < lengths[b]; t++) losses[b * L + t] = 0.1f * (float)(1 + (b + t) % 7);
        }
        group_weigh(weights, rewarded, losses, losses, penalty, N, L);
        group_weigh(none, equal, losses, losses, penalty, N, L);
        // The reward less the mean of the others' is 0.6 or -0.6.
        for (size_t i = 0; i < N * L; i++) {
            double gain = i / L < N / 2 ? 0.6 : -0.6;
            expect(fabs((double)weights[i] - gain) < 1e-6, "penalty %d, token %zu of text %zu: weight %g, not %g",
                   (int)penalty, i % L, i / L, (double)weights[i], gain);
            expect(fabs((double)none[i]) < 1e-12, "penalty %d, equal rewards: %g", (int)penalty, (double)none[i]);
        }
    }
    verdict("weights of tokens: the reward less the mean of the others', whatever the lengths; 0 if all are equal");
}

// ------------------------------------------------------------------------------------------------
// 3. Samples

static void test_samples(void) {
    const SamplingOptions whole = {.temperature = temperature, .top_p = 1};
    SamplingOptions cut[5] = {whole, whole, whole, whole, whole};
    Error error;
    cut[0].top_p = 0.99;
    cut[1].top_k = 50;
    cut[2].min_p = 0.01;
    cut[3].repetition_penalty = 1.1;
    cut[4].temperature = 1;
    expect(sampling_check(&whole, &error), "all of the distribution is refused: %s", error.text);
    for (size_t i = 0; i < COUNT_OF(cut); i++) expect(!sampling_check(&cut[i], &error), "cut %zu is accepted", i);
    verdict("samples of a cut distribution, or of another temperature, are refused");

    // What follows the first stop changes neither the row nor the reward.
    const char* const texts[] = {"the ox ran....", "the ox ran.xyz", "the ox ran. ox", "the ox ran.\0\1\2"};
    int32_t tokens[COUNT_OF(texts)][T], targets[COUNT_OF(texts)][T], ids[LENGTH];
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        for (size_t t = 0; t < LENGTH; t++) ids[t] = texts[i][t];
        row_fill(tokens[i], targets[i], ids);
        bool same = memcmp(tokens[i], tokens[0], sizeof tokens[0]) == 0;
        expect(same && memcmp(targets[i], targets[0], sizeof targets[0]) == 0, "\"%s\" has another row", texts[i]);
        expect(sentence_find(ids) == 1, "\"%s\" is sentence %zu", texts[i], sentence_find(ids));
    }
    for (size_t t = 0; t < T; t++)
        expect((targets[0][t] >= 0) == (t + 1 >= PROMPT && t < 10), "target %zu is %d", t, (int)targets[0][t]);
    verdict("targets end with the first stop: what follows has neither reward nor loss");
}

int main(void) {
    tests_begin("test_grpo");
    test_penalty();
    test_weights();
    test_samples();
    return tests_end();
}
