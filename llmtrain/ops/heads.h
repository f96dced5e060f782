// heads.h: cuts rows of heads into parts, in plain C: the specification of heads.cuh, and the CPU backend.
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

LLMTRAIN_CPU_END

#endif  // LLMTRAIN_HEADS_H
