// heads.h: cuts rows of heads into parts, and repeats heads, in plain C: the specification of heads.cuh, and the CPU
// backend.
//
// "DeepSpeed Ulysses": an all-to-all of such parts trades some positions of all heads for all positions of some heads.

#ifndef LLMTRAIN_HEADS_H
#define LLMTRAIN_HEADS_H

#include "base.h"

LLMTRAIN_CPU_BEGIN

static inline void heads_move(floatX* out, const floatX* in, bool join, size_t parts, size_t N, size_t H, size_t K,
                              size_t D, Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t i = 0; i < parts * N; i++) {
        size_t part = i / N, cut = i * ((H + 2 * K) / parts * D), whole = i % N * ((H + 2 * K) * D);
        for (int kind = 0; kind < 3; kind++) {  // queries, keys, values
            size_t n = (kind == 0 ? H : K) / parts * D, at = whole + part * n;
            memcpy(out + (join ? at : cut), in + (join ? cut : at), n * sizeof(floatX));
            cut += n, whole += parts * n;
        }
    }
}

// out (parts, N, (H + 2K) D / parts) = in (N, (H + 2K) D): part p has the p-th of `parts` equal ranges of the query
// heads, then of the key heads, then of the value heads. parts divides H and K, which may be 0; out does not overlap
// in. heads_join is the inverse, from parts to rows. The gradient of each is the other.
static inline void heads_split(floatX* out, const floatX* in, size_t parts, size_t N, size_t H, size_t K, size_t D,
                               Stream stream) {
    heads_move(out, in, false, parts, N, H, K, D, stream);
}
static inline void heads_join(floatX* out, const floatX* in, size_t parts, size_t N, size_t H, size_t K, size_t D,
                              Stream stream) {
    heads_move(out, in, true, parts, N, H, K, D, stream);
}

// out (N, (H + 2K copies) D) = in (N, (H + 2K) D) with each key and value head `copies` times, one after the other.
static inline void heads_repeat(floatX* out, const floatX* in, size_t copies, size_t N, size_t H, size_t K, size_t D,
                                Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        const floatX* from = in + row * (H + 2 * K) * D;
        floatX* to = out + row * (H + 2 * K * copies) * D;
        memcpy(to, from, H * D * sizeof(floatX));
        for (size_t i = 0; i < 2 * K * copies; i++)
            memcpy(to + (H + i) * D, from + (H + i / copies) * D, D * sizeof(floatX));
    }
}

// The gradient of heads_repeat: out (N, (H + 2K) D) has the sums of the copies in in (N, (H + 2K copies) D).
static inline void heads_sum(floatX* out, const floatX* in, size_t copies, size_t N, size_t H, size_t K, size_t D,
                             Stream stream) {
    (void)stream;
    #pragma omp parallel for
    for (size_t row = 0; row < N; row++) {
        const floatX* from = in + row * (H + 2 * K * copies) * D;
        floatX* to = out + row * (H + 2 * K) * D;
        memcpy(to, from, H * D * sizeof(floatX));
        for (size_t head = 0; head < 2 * K; head++)
            for (size_t d = 0; d < D; d++) {
                float sum = 0.0f;
                for (size_t c = 0; c < copies; c++) sum += float_of(from[(H + head * copies + c) * D + d]);
                to[(H + head) * D + d] = floatX_of(sum);
            }
    }
}

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_HEADS_H
