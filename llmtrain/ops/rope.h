// rope.h: the angles of rotary position embeddings, which both backends read from a table computed on the host.
//
//   RopeOptions rope = {.theta = 10000};
//   rope_table(table, &rope, T, D);
//
// "RoFormer: Enhanced Transformer with Rotary Position Embedding"; the scalings stretch the angles of a trained model
// to a longer context: "Extending Context Window of Large Language Models via Positional Interpolation" (linear), and
// the scaling of "The Llama 3 Herd of Models", as in its published code (llama3).

#ifndef LLMTRAIN_ROPE_H
#define LLMTRAIN_ROPE_H

#include "arithmetic.h"

typedef enum { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3 } RopeScaling;
#define ROPE_SCALING_NAMES "none|linear|llama3"

typedef struct {
    double theta;
    RopeScaling scaling;
    double factor;               // for both scalings: how many times longer the context becomes
    double low_freq, high_freq;  // llama3: wavelengths above original / low_freq are stretched by factor, those below
    size_t original;             // original / high_freq are unchanged, others are mixed; original: context, in tokens
} RopeOptions;

// Radians per position of pair i, of D/2.
static inline double rope_frequency(const RopeOptions* o, size_t i, size_t D) {
    double frequency = pow_double(o->theta, -2.0 * (double)i / (double)D);
    if (o->scaling == ROPE_SCALING_NONE) return frequency;
    double stretched = frequency / o->factor;
    if (o->scaling == ROPE_SCALING_LINEAR) return stretched;
    const double PI = 3.14159265358979323846;
    double turns = (double)o->original * frequency / (2 * PI);  // over the original context
    if (turns <= o->low_freq) return stretched;
    if (turns >= o->high_freq) return frequency;
    double kept = (turns - o->low_freq) / (o->high_freq - o->low_freq);
    return (1 - kept) * stretched + kept * frequency;
}

// table (T, D/2, 2): cosine and sine of position * frequency, for positions 0 to T - 1.
static inline void rope_table(float* table, const RopeOptions* o, size_t T, size_t D) {
    for (size_t i = 0; i < D / 2; i++) {
        double frequency = rope_frequency(o, i, D);
        for (size_t t = 0; t < T; t++) {
            table[(t * (D / 2) + i) * 2] = (float)cos_double((double)t * frequency);
            table[(t * (D / 2) + i) * 2 + 1] = (float)sin_double((double)t * frequency);
        }
    }
}

#endif  // LLMTRAIN_ROPE_H
