// qk_norm.h: RMSNorm of every query and key head, in plain C: the specification of qk_norm.cuh, and the CPU backend.
//
//   qk_norm_forward(qkv, saved, rstd, q_weight, k_weight, epsilon, N, H, K, D, stream);
//
// "Query-Key Normalization for Transformers", with the learned RMSNorm over a head that Qwen3 has: x becomes
// x / sqrt(mean of squares + epsilon) * weight for the D elements x of a head; all query heads share one weight, all
// key heads another. Values are unchanged. It works in place, between the matmul that makes queries and keys and RoPE.

#ifndef LLMTRAIN_QK_NORM_H
#define LLMTRAIN_QK_NORM_H

#include "base.h"

LLMTRAIN_CPU_BEGIN

// qkv (N, (H + 2K) D) in place; saved (N, (H + K) D): queries and keys before the norm; rstd (N, H + K), q_weight,
// k_weight (D).
static inline void qk_norm_forward(floatX* qkv, floatX* saved, float* rstd, const floatX* q_weight,
                                   const floatX* k_weight, float epsilon, size_t N, size_t H, size_t K, size_t D,
                                   Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        for (size_t head = 0; head < H + K; head++) {
            floatX* x = qkv + (row * (H + 2 * K) + head) * D;
            const floatX* weight = head < H ? q_weight : k_weight;
            float squares = VECTOR_SUM(i, D, float_of(x[i]) * float_of(x[i]));
            float s = 1.0f / sqrtf(squares / (float)D + epsilon);
            memcpy(saved + (row * (H + K) + head) * D, x, D * sizeof(floatX));
            for (size_t i = 0; i < D; i++) x[i] = floatX_of(float_of(x[i]) * s * float_of(weight[i]));
            rstd[row * (H + K) + head] = s;
        }
    }
}

// dqkv (N, (H + 2K) D) in place: from the gradient of the forward's output to that of its input; adds to dq_weight and
// dk_weight (D). With n = x * rstd and g = dout * weight: dx = rstd * (g - n * average(g * n)).
static inline void qk_norm_backward(floatX* dqkv, float* dq_weight, float* dk_weight, const floatX* saved,
                                    const float* rstd, const floatX* q_weight, const floatX* k_weight, size_t N,
                                    size_t H, size_t K, size_t D, Stream stream) {
    (void)stream;
    const size_t strip = 16, strips = divide_up(D, strip);
    #pragma omp parallel
    {
        #pragma omp for
        for (size_t part = 0; part < 2 * strips; part++) {  // a thread owns a strip of one of the weights' gradients
            bool keys = part >= strips;
            float* dweight = keys ? dk_weight : dq_weight;
            size_t first = part % strips * strip, end = min_size(first + strip, D);
            for (size_t row = 0; row < N; row++) {
                for (size_t head = keys ? H : 0; head < (keys ? H + K : H); head++) {
                    const floatX* d = dqkv + (row * (H + 2 * K) + head) * D;
                    const floatX* x = saved + (row * (H + K) + head) * D;
                    float s = rstd[row * (H + K) + head];
                    for (size_t i = first; i < end; i++)
                        dweight[i] = multiply_add(float_of(d[i]), float_of(x[i]) * s, dweight[i]);
                }
            }
        }
        #pragma omp for
        for (size_t row = 0; row < N; row++) {
            for (size_t head = 0; head < H + K; head++) {
                floatX* d = dqkv + (row * (H + 2 * K) + head) * D;
                const floatX* x = saved + (row * (H + K) + head) * D;
                const floatX* weight = head < H ? q_weight : k_weight;
                float s = rstd[row * (H + K) + head];
                float average_gn =
                    VECTOR_SUM(i, D, float_of(d[i]) * float_of(weight[i]) * (float_of(x[i]) * s)) / (float)D;
                for (size_t i = 0; i < D; i++) {
                    float g = float_of(d[i]) * float_of(weight[i]);
                    d[i] = floatX_of(s * multiply_add(-(float_of(x[i]) * s), average_gn, g));
                }
            }
        }
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_QK_NORM_H
