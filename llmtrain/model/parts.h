// parts.h: what of a tensor one rank has, with tensor parallelism.
//
//   PartRun run = part_run(&tensor.part, e);        where element e of the part, and what follows it, is in the tensor
//   size_t before = part_before(&tensor.part, g);   elements of the part that come before element g of the tensor
//
// A tensor is divided into equal parts by rows, where it is a stack of matrices each of them by its own rows, or by
// columns. In memory a part is as dense as a whole tensor, and its elements are in the same order.
//
//     queries  |0|1|      part 0 of 2 by rows: |0|0|0|             by columns    |0 1|      part 0: |0|
//     keys     |0|1|      queries, keys and values of half the                   |0 1|              |0|
//     values   |0|1|      heads                                                  |0 1|              |0|

#ifndef LLMTRAIN_PARTS_H
#define LLMTRAIN_PARTS_H

#include "backend.h"

// How a tensor is divided: not at all, by rows (of each stacked matrix), or by columns.
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS } TensorSplit;

typedef struct {
    TensorSplit by;
    size_t number, count;            // which part, of how many: 0 of 1 is the whole tensor
    size_t rows, cols;               // of the whole tensor, padded rows included; cols 0: a vector
    size_t true_rows;                // without the padding
    size_t stacked[SHAPE_MATRICES];  // rows of the matrices that it is a stack of; {0}: it is one
} TensorPart;

// Elements that are consecutive in the part, from `first` on, and in the whole tensor, from `whole` on.
typedef struct { size_t first, whole, count; } PartRun;

static inline size_t part_width(const TensorPart* p) { return max_size(p->cols, 1); }

// Rows of matrix m of the stack; 0: there is none.
static inline size_t part_matrix(const TensorPart* p, size_t m) {
    if (p->stacked[0] == 0) return m == 0 ? p->rows : 0;
    return m < SHAPE_MATRICES ? p->stacked[m] : 0;
}

// The run of the part that begins at its element e; it has none after the last.
static inline PartRun part_run(const TensorPart* p, size_t e) {
    size_t width = part_width(p), begin = 0, above = 0;
    if (p->by == SPLIT_COLUMNS && p->count > 1) {
        size_t own = width / p->count, row = e / own;
        PartRun run = {e, row * width + p->number * own + e % own, row < p->rows ? own - e % own : 0};
        return run;
    }
    for (size_t m = 0, rows; (rows = part_matrix(p, m)) > 0; m++) {
        size_t own = rows / p->count * width;
        PartRun run = {e, above + p->number * own + (e - begin), begin + own - e};
        if (e < begin + own) return run;
        begin += own;
        above += rows * width;
    }
    PartRun none = {e, above, 0};
    return none;
}

// The number of the part's elements that are before element `whole` of the whole tensor.
static inline size_t part_before(const TensorPart* p, size_t whole) {
    size_t width = part_width(p), before = 0, above = 0;
    if (p->by == SPLIT_COLUMNS && p->count > 1) {
        size_t own = width / p->count, column = whole % width, first = p->number * own;
        return whole / width * own + (column > first ? min_size(column - first, own) : 0);
    }
    for (size_t m = 0, rows; (rows = part_matrix(p, m)) > 0; m++) {
        size_t own = rows / p->count * width, first = above + p->number * own;
        before += whole > first ? min_size(whole - first, own) : 0;
        above += rows * width;
    }
    return before;
}

// Elements of the part, and of all parts, without the rows of padding, which are the last.
static inline size_t part_whole_elements(const TensorPart* p) { return p->true_rows * part_width(p); }
static inline size_t part_elements(const TensorPart* p) { return part_before(p, part_whole_elements(p)); }

#endif  // LLMTRAIN_PARTS_H
