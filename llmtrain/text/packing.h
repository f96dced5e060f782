// packing.h: conversations in rows of one length, so that no row is mostly padding.
//
//   Packing packing;
//   if (!packing_make(&packing, files, shards, T + 1, true, TOO_LONG_DROP, &error)) ...
//   for (size_t i = packing.first[row]; i < packing.first[row + 1]; i++) ... packing.groups[i]   what a row has
//   packing_free(&packing);
//
// A group, a conversation or a pair of answers, is never divided between rows. Each, beginning with the longest, goes
// to the row in which it leaves least room: best-fit decreasing, which needs at most 11/9 of the fewest possible rows
// ("Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms", Johnson et al., 1974), as in "Fewer
// Truncations Improve Language Modeling", Ding et al., 2024. Every rank makes the same table: a function of the .spans
// files and the length. It takes 12 bytes for a group and 8 for a row.

#ifndef LLMTRAIN_PACKING_H
#define LLMTRAIN_PACKING_H

#include "spans.h"

// What becomes of a conversation that is longer than a row: it is left out, or ends with the last answer that fits.
typedef enum { TOO_LONG_DROP, TOO_LONG_CUT } TooLong;
#define TOO_LONG_NAMES "drop|cut"

typedef struct {
    uint32_t shard, document;  // the first of its documents
    uint32_t tokens;           // of all of them, or of what fits
} PackedGroup;

typedef struct {
    PackedGroup* groups;       // (group_count), owned: row after row
    size_t* first;             // (rows + 1), owned: the first group of each row
    size_t group_count, rows;
    size_t dropped, cut;       // groups that are longer than a row
    uint32_t shortest, longest;  // the tokens of these groups, dropped or not
    uint64_t tokens;           // of the groups in rows
} Packing;

static inline void packing_free(Packing* p) {
    free(p->groups);
    free(p->first);
    memset(p, 0, sizeof *p);
}

// The document after those of the group that begins with this one.
static inline size_t group_end(const SpanFile* f, size_t document) {
    size_t end = document + 1;
    while (end < f->document_count && f->documents[end].group == f->documents[document].group) end++;
    return end;
}

// The tokens of a document up to the end of its last span that ends within `room`.
static inline uint32_t document_cut(const SpanFile* f, size_t document, size_t room) {
    uint64_t fits = 0, first = f->documents[document].first;
    for (size_t s = f->documents[document].span; s < span_file_end(f, document); s++) {
        uint64_t end = f->spans[s].first + f->spans[s].tokens - first;
        if (end <= room) fits = end;
    }
    return (uint32_t)fits;
}

// A tree over sizes: tree[P + n] rows have room for n tokens, and tree[i] = tree[2i] + tree[2i + 1]. Returns the
// smallest size from n on that a row has; P: none.
static inline size_t packing_find(const uint32_t* tree, size_t P, size_t n) {
    size_t i = P + n;
    while (tree[i] == 0) {
        while (i % 2 == 1) i /= 2;  // the last on its level of what is below its parent
        if (i == 0) return P;
        i++;
    }
    while (i < P) i = tree[2 * i] ? 2 * i : 2 * i + 1;
    return i - P;
}

static inline void packing_count(uint32_t* tree, size_t P, size_t n, uint32_t change) {
    for (size_t i = P + n; i > 0; i /= 2) tree[i] += change;
}

// Puts each group, which come in falling order of length, into a row of `room` tokens: row_of (group_count). Returns
// the number of rows. tree (2 P), all zero; last (P): of the rows with so much room, the last; before (group_count): of
// each row, the one with as much room before it.
static inline size_t packing_fit(uint32_t* row_of, const PackedGroup* groups, size_t group_count, size_t room,
                                 uint32_t* tree, uint32_t* last, uint32_t* before, size_t P) {
    uint32_t rows = 0;
    for (size_t i = 0; i < group_count; i++) {
        size_t n = groups[i].tokens, from = packing_find(tree, P, n);
        uint32_t row = from == P ? rows++ : last[from];
        if (from == P) from = room;
        else {
            last[from] = before[row];
            packing_count(tree, P, from, (uint32_t)-1);
        }
        row_of[i] = row;
        before[row] = last[from - n];
        last[from - n] = row;
        packing_count(tree, P, from - n, 1);
    }
    return rows;
}

// Orders the groups by falling length, those of one length as they are: out (group_count). places: (room + 2).
static inline void packing_sort(PackedGroup* out, const Packing* p, size_t room, size_t* places) {
    memset(places, 0, (room + 2) * sizeof *places);
    for (size_t i = 0; i < p->group_count; i++) places[room - p->groups[i].tokens + 1]++;
    for (size_t n = 1; n < room + 2; n++) places[n] += places[n - 1];
    for (size_t i = 0; i < p->group_count; i++) out[places[room - p->groups[i].tokens]++] = p->groups[i];
}

// Divides the groups, which come sorted if they are packed, among rows.
static inline bool packing_rows(Packing* p, const PackedGroup* sorted, size_t room, bool pack, Error* error) {
    size_t P = 1, n = p->group_count;
    while (P < room + 1) P *= 2;
    uint32_t *row_of = (uint32_t*)memory_allocate(2 * n * sizeof(uint32_t)), *before = row_of + n;
    uint32_t *tree = (uint32_t*)memory_allocate(3 * P * sizeof(uint32_t)), *last = tree + 2 * P;
    bool ok = row_of && tree;
    p->rows = n;
    if (ok && pack) p->rows = packing_fit(row_of, sorted, n, room, tree, last, before, P);
    else for (size_t i = 0; ok && i < n; i++) row_of[i] = (uint32_t)i;
    p->first = ok ? (size_t*)memory_allocate((p->rows + 2) * sizeof(size_t)) : NULL;
    ok = ok && p->first;
    for (size_t i = 0; ok && i < n; i++) p->first[row_of[i] + 2]++;
    for (size_t row = 0; ok && row < p->rows; row++) p->first[row + 2] += p->first[row + 1];
    for (size_t i = 0; ok && i < n; i++) p->groups[p->first[row_of[i] + 1]++] = sorted[i];
    free(row_of);
    free(tree);
    return ok || fail_with(error, "out of memory for the rows of %zu conversations", n);
}

// Appends the groups of a file that fit.
static inline void packing_add(Packing* p, const SpanFile* f, size_t shard, size_t room, TooLong too_long) {
    for (size_t d = 0, end; d < f->document_count; d = end) {
        uint64_t all = 0;
        end = group_end(f, d);
        for (size_t i = d; i < end; i++) all += f->documents[i].tokens;
        bool cuts = too_long == TOO_LONG_CUT && end == d + 1;  // never a pair
        PackedGroup group = {(uint32_t)shard, (uint32_t)d,
                             all <= room ? (uint32_t)all : cuts ? document_cut(f, d, room) : 0};
        p->shortest = (uint32_t)min_size(p->longest ? p->shortest : (size_t)all, (size_t)all);
        p->longest = (uint32_t)max_size(p->longest, (size_t)all);
        p->dropped += group.tokens == 0;
        p->cut += group.tokens > 0 && group.tokens < all;
        p->tokens += group.tokens;
        if (group.tokens > 0) p->groups[p->group_count++] = group;
    }
}

// Packs the conversations of files [first, end) into rows of at most `room` tokens, below 2^31; pack false: each has a
// row of its own. After a failure there is nothing to free.
static inline bool packing_make(Packing* p, const SpanFile* files, size_t first, size_t end, size_t room, bool pack,
                                TooLong too_long, Error* error) {
    size_t groups = 0;
    memset(p, 0, sizeof *p);
    for (size_t i = first; i < end; i++) groups += files[i].groups;
    p->groups = (PackedGroup*)memory_allocate(groups * sizeof(PackedGroup));
    PackedGroup* sorted = (PackedGroup*)memory_allocate(groups * sizeof(PackedGroup));
    size_t* places = (size_t*)memory_allocate((room + 2) * sizeof(size_t));
    bool ok = (p->groups && sorted && places) ||
              fail_with(error, "out of memory for the table of %zu conversations", groups);
    for (size_t i = first; ok && i < end; i++) packing_add(p, &files[i], i, room, too_long);
    if (ok && pack) packing_sort(sorted, p, room, places);
    else if (ok) memcpy(sorted, p->groups, p->group_count * sizeof *sorted);
    ok = ok && packing_rows(p, sorted, room, pack, error);
    free(sorted);
    free(places);
    if (!ok) packing_free(p);
    return ok;
}

#endif  // LLMTRAIN_PACKING_H
