// sampling.h: draws one token from logits: temperature, top-k, top-p, min-p, repetition penalty; and its log p.
//
//   SamplingOptions o = {.temperature = 0.8, .top_p = 1, .seed = 1};
//   float uniform = random_uniform(o.seed, RANDOM_SAMPLING, sample, position);
//   int32_t token = sample_token(candidates, logits, text, count, &o, uniform, V);
//
// The token is a function of its arguments: the caller supplies the random number. Logits are on the host. The work is
// O(V), plus O(log V) for each candidate that is more likely than the drawn one. Candidates are sorted only as far as
// needed: first those with at least 1/64 of the largest probability, then those with 1/4096, and so on.

#ifndef LLMTRAIN_SAMPLING_H
#define LLMTRAIN_SAMPLING_H

#include "../ops/base.h"

typedef struct {
    double temperature;         // of the softmax; 0: always the most likely token
    uint64_t top_k;             // sample from the k most likely tokens; 0: from all
    double top_p;               // sample from the smallest set of most likely tokens with total probability p; 1: all
    uint64_t seed;              // of the caller's random numbers
    double min_p;               // leave out tokens with less than this share of the largest probability; 0: none
    double repetition_penalty;  // makes tokens of the text less likely; 0 or 1: off
} SamplingOptions;

typedef struct {
    float probability;          // not normalized; a logit before the softmax
    int32_t token;
} Candidate;

// Orders by probability, the most likely first; among equals, the smaller token first.
static inline bool candidate_before(Candidate a, Candidate b) {
    return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

// In a heap of n candidates, each before its children 2i + 1 and 2i + 2, moves number i to where it belongs.
static inline void candidates_sink(Candidate* heap, size_t i, size_t n) {
    Candidate moved = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && candidate_before(heap[child + 1], heap[child])) child++;
        if (!candidate_before(heap[child], moved)) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

// Removes the first from a heap of n, and leaves it after the others.
static inline Candidate candidates_pop(Candidate* heap, size_t n) {
    Candidate first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    candidates_sink(heap, 0, n - 1);
    return first;
}

// candidates (V) = logits, after the penalty for tokens of text (count): their logits are divided by it if positive,
// otherwise multiplied ("CTRL: A Conditional Transformer Language Model for Controllable Generation").
static inline void candidates_read(Candidate* candidates, const floatX* logits, const int32_t* text, size_t count,
                                   float penalty, size_t V) {
    for (size_t v = 0; v < V; v++) {
        candidates[v].token = (int32_t)v;
        candidates[v].probability = float_of(logits[v]);
    }
    for (size_t i = 0; penalty > 0 && penalty != 1 && i < count; i++) {
        float logit = float_of(logits[text[i]]);
        candidates[text[i]].probability = logit > 0 ? logit / penalty : logit * penalty;
    }
}

// The largest of them, ignoring NaN.
static inline float candidates_maximum(const Candidate* candidates, size_t V) {
    float maximum = -INFINITY;
    #pragma omp simd reduction(max:maximum)
    for (size_t v = 0; v < V; v++)
        maximum = candidates[v].probability > maximum ? candidates[v].probability : maximum;
    return maximum;
}

// candidates (V) = softmax(candidates / temperature), not normalized: the largest is 1. Returns the sum.
static inline float candidates_softmax(Candidate* candidates, double temperature, size_t V) {
    float maximum = candidates_maximum(candidates, V), sum = 0.0f;
    for (size_t v = 0; v < V; v++) {
        float p = exp_fast((float)((double)(candidates[v].probability - maximum) / temperature));
        candidates[v].probability = p >= 0 ? p : 0;  // 0 for NaN: the model has diverged
    }
    for (size_t v = 0; v < V; v++) sum += candidates[v].probability;
    return sum;
}

// Moves those of n candidates with a probability of at least `least` behind the others, as a heap; returns the number
// of the others.
static inline size_t candidates_part(Candidate* candidates, size_t n, float least) {
    size_t others = n;
    for (size_t i = 0; i < others;) {
        Candidate c = candidates[i];
        if (!(c.probability >= least)) {
            i++;
            continue;
        }
        candidates[i] = candidates[--others];
        candidates[others] = c;
    }
    for (size_t i = (n - others) / 2; i-- > 0;) candidates_sink(candidates + others, i, n - others);
    return others;
}

// Draws from softmax(logits / temperature), cut to the top k, to the top p ("The Curious Case of Neural Text
// Degeneration") and to those above min p ("Turning Up the Heat: Min-p Sampling"). logits (V); candidates (V) is
// scratch; text (count): the tokens that are penalized; `uniform` in [0, 1) is the random number.
static inline int32_t sample_token(Candidate* candidates, const floatX* logits, const int32_t* text, size_t count,
                                   const SamplingOptions* o, float uniform, size_t V) {
    candidates_read(candidates, logits, text, count, (float)o->repetition_penalty, V);
    if (o->temperature == 0) {
        float maximum = candidates_maximum(candidates, V);
        for (size_t v = 0; v < V; v++)
            if (candidates[v].probability == maximum) return (int32_t)v;
        return 0;  // all are NaN
    }
    float sum = candidates_softmax(candidates, o->temperature, V);
    size_t most = o->top_k > 0 ? min_size(o->top_k, V) : V, taken = 0, others = V;
    bool cut = most < V || o->top_p < 1 || o->min_p > 0, top_p_of_k = o->top_p < 1 && o->top_k > 0;
    float largest = 1.0f, least = 1.0f, reached = 0.0f;
    while (taken < most) {
        while (taken + others == V) {  // the only candidates left are below `least`
            least = least > 1e-6f ? least / 64 : 0.0f;
            others = candidates_part(candidates, others, least);
        }
        Candidate* heap = candidates + others;
        float p = heap[0].probability;
        if (taken == 0) largest = p;
        else if (p == 0 || (!top_p_of_k && (double)p < o->min_p * (double)largest)) break;
        Candidate next = candidates_pop(heap, V - others - taken++);
        reached += p;
        if (!cut && uniform * sum < reached) return next.token;
        if (o->top_p < 1 && !top_p_of_k && reached >= (float)o->top_p * sum) break;
    }
    // With top k, top p and min p apply to the candidates that top k has left.
    float all = reached;
    for (size_t i = taken; top_p_of_k && i > 1; i--) {
        float p = candidates[V - i].probability, without = reached - p;
        if (without < (float)o->top_p * all && (double)p >= o->min_p * (double)largest) break;
        reached = without;
        taken = i - 1;
    }
    // Those taken lie at the end, the first of them last.
    float target = uniform * reached, passed = 0.0f;
    for (size_t i = 1; i < taken; i++) {
        passed += candidates[V - i].probability;
        if (target < passed) return candidates[V - i].token;
    }
    return candidates[V - taken].token;
}

// The logarithm of softmax(logits / temperature)[token], over all tokens: before the penalty, top k, top p and min p.
// 0 at temperature 0, where nothing is drawn. In floats, as `classifier` computes losses.
static inline float sample_logp(const floatX* logits, int32_t token, double temperature, size_t V) {
    float maximum = -INFINITY, inverse = (float)(1 / temperature);
    if (temperature == 0) return 0.0f;
    for (size_t v = 0; v < V; v++) maximum = float_of(logits[v]) > maximum ? float_of(logits[v]) : maximum;
    float sum = VECTOR_SUM(v, V, exp_fast((float_of(logits[v]) - maximum) * inverse));
    return (float_of(logits[token]) - maximum) * inverse - (float)log_double((double)sum);
}

#endif  // LLMTRAIN_SAMPLING_H
