// documents.h: where documents end within the sequences of a batch, for attention that does not cross their borders.
//
//   size_t count = documents_find(spans, positions, tokens, targets, end_of_text, B, T);
//   for (size_t i = 0; i < count; i++) attention over rows [spans[i].first, + spans[i].B * spans[i].T) by themselves
//
// Shards of text hold one document after the other, each followed by the tokenizer's end-of-text token, and a sequence
// of a batch is cut out of them at any position. Masked attention ("The Llama 3 Herd of Models", 3.2) then treats what
// lies between two such tokens as a sequence of its own. It needs no mask: attention is called once for each. Positions
// still count through the whole row.
//
// Conversations are packed as a whole (packing.h): where one ends, at a target of TARGET_ENDS, the next begins as if it
// were alone, at position 0.

#ifndef LLMTRAIN_DOCUMENTS_H
#define LLMTRAIN_DOCUMENTS_H

#include "../ops/types.h"

// Targets that do not count: of a token that nothing follows, or that is followed by what is not trained; and of the
// last one of a document that is packed with others.
enum { TARGET_NONE = -1, TARGET_ENDS = -2 };

// B sequences of T tokens, rows [first, first + B T) of a batch.
typedef struct {
    size_t first, B, T;
} DocumentSpan;

// Cuts tokens (B, T) after each `end_of_text`, and where targets (B, T), which may be NULL, say TARGET_ENDS. Returns
// the number of spans; B T always have room. positions (B, T): begin at 0 in each row, and after TARGET_ENDS.
static inline size_t documents_find(DocumentSpan* spans, int32_t* positions, const int32_t* tokens,
                                    const int32_t* targets, int32_t end_of_text, size_t B, size_t T) {
    size_t count = 0, first = 0, zero = 0;
    for (size_t row = 0; row < B * T; row++) {
        bool restarts = (targets && targets[row] == TARGET_ENDS) || (row + 1) % T == 0;
        positions[row] = (int32_t)(row - zero);
        if (restarts) zero = row + 1;
        if (!restarts && tokens[row] != end_of_text) continue;
        DocumentSpan span = {first, 1, row + 1 - first};
        spans[count++] = span;
        first = row + 1;
    }
    return count;
}

// How many of N targets count for the loss.
static inline size_t targets_count(const int32_t* targets, size_t N) {
    size_t count = 0;
    for (size_t i = 0; i < N; i++) count += targets[i] >= 0;
    return count;
}

#endif  // LLMTRAIN_DOCUMENTS_H
