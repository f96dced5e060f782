// sampling.h: draws one token from logits: temperature, top-k, top-p, min-p, repetition penalty.
//
//   SamplingOptions o = {.temperature = 0.8, .top_p = 1, .seed = 1};
//   float uniform = random_uniform(o.seed, RANDOM_SAMPLING, sample, position);
//   int32_t token = sample_token(candidates, logits, text, count, &o, uniform, V);
//
// The token is a function of its arguments: the caller supplies the random number. Logits are on the host. The work is
// O(V), and O(log V) for each candidate that comes before the drawn one, the most likely first.

#ifndef LLMTRAIN_SAMPLING_H
#define LLMTRAIN_SAMPLING_H

#include "base.h"

typedef struct {
    double temperature;         // of the softmax; 0: always the most likely token
    uint64_t top_k;             // sample from the k most likely tokens; 0: from all
    double top_p;               // sample from the smallest set of most likely tokens with total probability p; 1: all
    uint64_t seed;              // of the caller's random numbers
    double min_p;               // leave out tokens with less than this share of the largest probability; 0: none
    double repetition_penalty;  // makes tokens of the text less likely; 0 or 1: does not
} SamplingOptions;

typedef struct {
    float probability;          // not normalised
    int32_t token;
} Candidate;

// The most likely first; among equals the smaller token.
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

// Takes the first off a heap of n, and leaves it behind the others.
static inline Candidate candidates_pop(Candidate* heap, size_t n) {
    Candidate first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    candidates_sink(heap, 0, n - 1);
    return first;
}

// candidates (V) = softmax(logits / temperature), the largest of which is 1, after the penalty for tokens of text
// (count): their logits are divided by it if positive, otherwise multiplied ("CTRL: A Conditional Transformer Language
// Model for Controllable Generation"). Returns the sum.
static inline float candidates_fill(Candidate* candidates, const floatX* logits, const int32_t* text, size_t count,
                                    const SamplingOptions* o, size_t V) {
    float maximum = -INFINITY, sum = 0.0f, penalty = (float)o->repetition_penalty;
    for (size_t v = 0; v < V; v++) {
        candidates[v].token = (int32_t)v;
        candidates[v].probability = float_of(logits[v]);
    }
    for (size_t i = 0; penalty > 0 && penalty != 1 && i < count; i++) {
        float logit = float_of(logits[text[i]]);
        candidates[text[i]].probability = logit > 0 ? logit / penalty : logit * penalty;
    }
    for (size_t v = 0; v < V; v++) maximum = fmaxf(maximum, candidates[v].probability);
    for (size_t v = 0; v < V; v++) {
        float logit = candidates[v].probability - maximum;
        float p = o->temperature > 0 ? exp_fast((float)((double)logit / o->temperature)) : (float)(logit == 0.0f);
        candidates[v].probability = p >= 0 ? p : 0;  // 0 for NaN: the model has diverged
        sum += candidates[v].probability;
    }
    return sum;
}

// Draws from softmax(logits / temperature), cut to the top k, to the top p ("The Curious Case of Neural Text
// Degeneration") and to those above min p ("Turning Up the Heat: Min-p Sampling"). logits (V); candidates (V) is
// scratch; text (count): what the penalty is for; `uniform` in [0, 1) is the random number.
static inline int32_t sample_token(Candidate* candidates, const floatX* logits, const int32_t* text, size_t count,
                                   const SamplingOptions* o, float uniform, size_t V) {
    float sum = candidates_fill(candidates, logits, text, count, o, V);
    size_t most = o->temperature == 0 ? 1 : o->top_k > 0 ? min_size(o->top_k, V) : V, taken = 0;
    bool cut = most < V || o->top_p < 1 || o->min_p > 0;
    for (size_t i = V / 2; i-- > 0;) candidates_sink(candidates, i, V);
    float largest = candidates[0].probability, reached = 0.0f;
    while (taken < most) {
        float p = candidates[0].probability;
        if (taken > 0 && (p == 0 || (double)p < o->min_p * (double)largest)) break;
        Candidate next = candidates_pop(candidates, V - taken++);
        reached += p;
        if (!cut && uniform * sum < reached) return next.token;
        if (o->top_p < 1 && o->top_k == 0 && reached >= (float)o->top_p * sum) break;
    }
    // With a top k the top p is of what it has left.
    float all = reached;
    for (size_t i = taken; o->top_p < 1 && o->top_k > 0 && i > 1; i--) {
        float without = reached - candidates[V - i].probability;
        if (without < (float)o->top_p * all) break;
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

#endif  // LLMTRAIN_SAMPLING_H
