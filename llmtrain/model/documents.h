// documents.h: where documents end within the sequences of a batch, for attention that does not cross their borders.
//
//   size_t count = documents_find(spans, tokens, end_of_text, B, T);
//   for (size_t i = 0; i < count; i++) attention over rows [spans[i].first, + spans[i].B * spans[i].T) by themselves
//
// Shards hold one document after the other, each followed by the tokenizer's end-of-text token, and a sequence of a
// batch is cut out of them at any position. Masked attention ("The Llama 3 Herd of Models", 3.2) then treats what lies
// between two such tokens as a sequence of its own. It needs no mask: attention is called once for each. Positions
// still count through the whole row.

#ifndef LLMTRAIN_DOCUMENTS_H
#define LLMTRAIN_DOCUMENTS_H

#include "../ops/types.h"

// B sequences of T tokens, rows [first, first + B T) of a batch.
typedef struct {
    size_t first, B, T;
} DocumentSpan;

// Cuts tokens (B, T) after each `end_of_text`; spans (B T) is always large enough. Returns their number.
static inline size_t documents_find(DocumentSpan* spans, const int32_t* tokens, int32_t end_of_text, size_t B,
                                    size_t T) {
    size_t count = 0, first = 0;
    for (size_t row = 0; row < B * T; row++) {
        bool ends = tokens[row] == end_of_text || (row + 1) % T == 0;
        if (!ends) continue;
        DocumentSpan span = {first, 1, row + 1 - first};
        spans[count++] = span;
        first = row + 1;
    }
    return count;
}

// How many of N targets count for the loss: those that are not -1.
static inline size_t targets_count(const int32_t* targets, size_t N) {
    size_t count = 0;
    for (size_t i = 0; i < N; i++) count += targets[i] >= 0;
    return count;
}

#endif  // LLMTRAIN_DOCUMENTS_H
