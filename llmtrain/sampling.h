// sampling.h: draws one token from logits, with temperature, top-k and top-p.
//
//   SamplingOptions o = {.temperature = 0.8, .top_p = 1, .seed = 1};
//   int32_t token = sample_token(candidates, logits, &o, random_uniform(o.seed, RANDOM_SAMPLING, 0, position), V);
//
// The token is a function of its arguments: the caller supplies the random number. Logits are on the host. It sorts all
// V candidates; generate.h calls it once per token.

#ifndef LLMTRAIN_SAMPLING_H
#define LLMTRAIN_SAMPLING_H

#include "base.h"

typedef struct {
    double temperature;   // of the softmax; 0: always the most likely token
    uint64_t top_k;       // sample from the k most likely tokens; 0: from all
    double top_p;         // sample from the smallest set of most likely tokens with total probability p; 1: from all
    uint64_t seed;        // of the caller's random numbers
} SamplingOptions;

typedef struct {
    float probability;    // not normalised
    int32_t token;
} Candidate;

// The most likely first; among equals the smaller token.
static inline int candidate_compare(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    if (x->probability != y->probability) return x->probability < y->probability ? 1 : -1;
    return x->token < y->token ? -1 : x->token > y->token;
}

// Draws from softmax(logits / temperature) cut to the top k and to the top p ("The Curious Case of Neural Text
// Degeneration"). logits (V); candidates (V) is scratch; `uniform` in [0, 1) is the random number.
static inline int32_t sample_token(Candidate* candidates, const floatX* logits, const SamplingOptions* o, float uniform,
                                   size_t V) {
    float maximum = -INFINITY, sum = 0.0f;
    for (size_t v = 0; v < V; v++) maximum = fmaxf(maximum, float_of(logits[v]));
    for (size_t v = 0; v < V; v++) {
        float logit = float_of(logits[v]) - maximum;
        float p = o->temperature > 0 ? exp_fast((float)((double)logit / o->temperature)) : (float)(logit == 0.0f);
        candidates[v].token = (int32_t)v;
        candidates[v].probability = p >= 0 ? p : 0;  // 0 for NaN: the model has diverged
        sum += candidates[v].probability;
    }
    qsort(candidates, V, sizeof *candidates, candidate_compare);
    size_t kept = o->top_k > 0 ? min_size(o->top_k, V) : V;
    if (o->temperature == 0) kept = 1;
    float reached = 0.0f;
    for (size_t i = 0; i < kept; i++) {
        reached += candidates[i].probability;
        if (o->top_p < 1 && reached >= (float)o->top_p * sum) kept = i + 1;
    }
    float target = uniform * reached, passed = 0.0f;
    for (size_t i = 0; i + 1 < kept; i++) {
        passed += candidates[i].probability;
        if (target < passed) return candidates[i].token;
    }
    return candidates[kept - 1].token;
}

#endif  // LLMTRAIN_SAMPLING_H
