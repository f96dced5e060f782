// schedule.h: the order in which the stages of a pipeline work on the micro-batches of a step.
//
//   PipelineTable table;
//   if (!pipeline_table_make(&table, PIPELINE_1F1B, stages, micro_batches, 1, NULL, 0, &error)) return false;
//   for (size_t i = table.begins[stage]; i < table.begins[stage + 1]; i++) ... table.ops[i] ...
//   pipeline_table_free(&table);
//
// A model of S stages with V chunks each is cut into S V pieces of consecutive blocks; piece i is chunk i / S of stage
// i mod S. A micro-batch goes forward through the pieces in order, and its gradients come back. A stage executes its
// operations in the order of the table, one at a time: it receives what the operation needs, computes, and sends the
// result to a neighbor, of which the last stage and the first are a pair too if V > 1.
//
//   kind          forwards that may be ahead of backwards    activations held     source
//   gpipe         all                                        all                  arxiv.org/abs/1811.06965
//   1f1b          S - s, for stage s                         the same             arxiv.org/abs/2104.04473
//   interleaved   2 (S - s - 1) + (V - 1) S + 1              the same             the same, section 2.2
//   zb-h1         S - s                                      S                    arxiv.org/abs/2401.10241
//   zb-h2         2 (S - s) - 1                              2 S - 1              the same
//
// The last two split the backward of a chunk: PIPELINE_BACKWARD makes the gradients of its inputs, for which the stage
// before waits; PIPELINE_WEIGHTS makes those of its weights, for which nobody waits, so that it fills gaps. Otherwise
// PIPELINE_BACKWARD does both.
//
// One rule makes all tables. All stages are simulated with the costs of their operations; each has one next forward,
// backward and weight gradient, and of those that its limits allow, the one that can start earliest in the whole
// pipeline is next. Of several that can, it is one of the lowest stage: its forward, or else its backward. So the table
// adapts to stages of different costs, and every rank computes the same one. gpipe alone waits for all forwards before
// its first backward. Where all stages have the same costs F, B and W, each of them is idle for (S - 1) (F + B + W)
// until the last one has ended with gpipe and 1f1b, and for this / V with interleaved if S divides the micro-batches;
// if F = B = W, for (S - 1) F with zb-h1 and at least S micro-batches, and with zb-h2 and at least 2 S - 1
// (dev/test/test_schedule.c).
//
// Messages between two stages in one direction, of forwards or of backwards, are sent and received in the same order.
// If a sender waits, there must be room for S messages of each kind in each direction.

#ifndef LLMTRAIN_SCHEDULE_H
#define LLMTRAIN_SCHEDULE_H

#include "../ops/base.h"

typedef enum { PIPELINE_GPIPE, PIPELINE_1F1B, PIPELINE_INTERLEAVED, PIPELINE_ZB_H1, PIPELINE_ZB_H2 } PipelineKind;
#define PIPELINE_NAMES "gpipe|1f1b|interleaved|zb-h1|zb-h2"
typedef enum { PIPELINE_FORWARD, PIPELINE_BACKWARD, PIPELINE_WEIGHTS, PIPELINE_WORKS } PipelineWork;

typedef struct {
    uint8_t work, chunk;
    uint16_t slot;   // which of the stage's sets of activations, 0 to slots - 1: the lowest that is free at the
                     // forward; free again after the backward, if that is split after the weights
    uint32_t micro;  // the micro-batch
} PipelineOp;

typedef struct {
    size_t stages, micro_batches, chunks;
    bool splits;      // backward and weights are separate operations
    PipelineOp* ops;  // stage by stage, each in its order; owned
    size_t* begins;   // (stages + 1) where a stage's begin in ops; owned
    size_t* slots;    // (stages) the most activations that it holds; owned
    double* ends;     // (stages) when it has ended its last operation; owned
    double end;       // the latest of these
} PipelineTable;

static inline bool pipeline_splits(PipelineKind kind) { return kind >= PIPELINE_ZB_H1; }

static inline void pipeline_table_free(PipelineTable* t) {
    free(t->ops);
    free(t->begins);
    free(t->slots);
    free(t->ends);
    memset(t, 0, sizeof *t);
}

// A stage while its table is made.
typedef struct {
    PipelineOp next;              // what it does next
    double start;                 // and when; INFINITY: it waits for another stage, or has finished
    double now;                   // when its last operation has ended
    size_t done[PIPELINE_WORKS];  // operations
    size_t lowest;                // of the slots that may be free
} PipelineStage;

// All that making a table needs. Arrays of all stages are owned; those by piece and micro-batch are indexed with
// pipeline_piece.
typedef struct {
    PipelineTable* table;
    PipelineKind kind;
    const double* costs;     // (PIPELINE_WORKS, stages); NULL: 1
    double hop;
    PipelineStage* stages;   // (stages)
    double* ended;           // (2, pieces * micro-batches) when forwards and backwards have; INFINITY: not yet
    uint16_t* slots;         // (pieces * micro-batches)
    uint8_t* taken;          // (stages, room) whether slots are
    size_t room;
    size_t* earliest;        // (2 leaves) a tree with its root at 1: which of the stages below a node starts first
    size_t leaves;
} PipelineMaker;

static inline size_t pipeline_piece(const PipelineTable* t, size_t stage, const PipelineOp* op) {
    return (op->chunk * t->stages + stage) * t->micro_batches + op->micro;
}

static inline double pipeline_cost(const PipelineMaker* m, size_t work, size_t stage) {
    return m->costs ? m->costs[work * m->table->stages + stage] : 1;
}

// The most forwards of a stage that may be ahead of its backwards, and the most activations that it holds.
static inline void pipeline_limits(const PipelineTable* t, PipelineKind kind, size_t stage, size_t* ahead,
                                   size_t* held) {
    size_t all = t->micro_batches * t->chunks, left = t->stages - stage;
    *ahead = kind == PIPELINE_GPIPE ? all : kind == PIPELINE_ZB_H2 ? 2 * left - 1 : left;
    if (kind == PIPELINE_INTERLEAVED) *ahead = 2 * (left - 1) + (t->chunks - 1) * t->stages + 1;
    *held = kind == PIPELINE_ZB_H1 ? t->stages : kind == PIPELINE_ZB_H2 ? 2 * t->stages - 1 : *ahead;
    *held = min_size(*held, all);
}

// The n-th forward or backward of every stage: micro-batches in groups of as many as there are stages, each through one
// chunk after the other, backward from the last chunk to the first.
static inline PipelineOp pipeline_nth(const PipelineTable* t, size_t work, size_t n) {
    size_t group = n / (t->stages * t->chunks) * t->stages, members = min_size(t->micro_batches - group, t->stages);
    size_t i = n - group * t->chunks, chunk = i / members;
    if (work != PIPELINE_FORWARD) chunk = t->chunks - 1 - chunk;
    PipelineOp op = {(uint8_t)work, (uint8_t)chunk, 0, (uint32_t)(group + i % members)};
    return op;
}

// When the inputs of an operation have arrived at a stage; INFINITY: not known yet.
static inline double pipeline_arrival(const PipelineMaker* m, size_t stage, const PipelineOp* op) {
    const PipelineTable* t = m->table;
    size_t at = pipeline_piece(t, stage, op), pieces = t->stages * t->chunks, piece = op->chunk * t->stages + stage;
    const double *forwards = m->ended, *backwards = m->ended + pieces * t->micro_batches;
    double hop = t->stages > 1 ? m->hop : 0;
    if (op->work == PIPELINE_WEIGHTS) return backwards[at];
    if (op->work == PIPELINE_FORWARD) return piece == 0 ? 0 : forwards[at - t->micro_batches] + hop;
    if (piece == pieces - 1 || forwards[at] == (double)INFINITY) return forwards[at];
    return fmax(forwards[at], backwards[at + t->micro_batches] + hop);
}

// Chooses what a stage does next, and its place in the tree.
static inline void pipeline_choose(PipelineMaker* m, size_t stage) {
    const PipelineTable* t = m->table;
    PipelineStage* s = &m->stages[stage];
    size_t all = t->micro_batches * t->chunks, ahead, held;
    pipeline_limits(t, m->kind, stage, &ahead, &held);
    s->start = (double)INFINITY;
    for (size_t work = 0; work < (t->splits ? PIPELINE_WORKS : PIPELINE_WEIGHTS); work++) {
        size_t n = s->done[work], behind = s->done[t->splits ? PIPELINE_WEIGHTS : PIPELINE_BACKWARD];
        bool allowed = work == PIPELINE_FORWARD ? n < s->done[PIPELINE_BACKWARD] + ahead && n < behind + held :
            work == PIPELINE_WEIGHTS ? n < s->done[PIPELINE_BACKWARD] :
            m->kind != PIPELINE_GPIPE || s->done[PIPELINE_FORWARD] == all;
        if (n == all || !allowed) continue;
        PipelineOp op = pipeline_nth(t, work, n);
        double start = fmax(s->now, pipeline_arrival(m, stage, &op));
        if (start < s->start) s->start = start, s->next = op;
    }
    for (size_t i = (m->leaves + stage) / 2; i > 0; i /= 2) {
        size_t left = m->earliest[2 * i], right = m->earliest[2 * i + 1];
        m->earliest[i] = right < t->stages && m->stages[right].start < m->stages[left].start ? right : left;
    }
}

// Appends the next operation of the whole pipeline to its stage's.
static inline void pipeline_advance(PipelineMaker* m) {
    PipelineTable* t = m->table;
    size_t stage = m->earliest[1], last = t->splits ? PIPELINE_WEIGHTS : PIPELINE_BACKWARD;
    PipelineStage* s = &m->stages[stage];
    PipelineOp op = s->next;
    size_t at = pipeline_piece(t, stage, &op), n = t->stages * t->chunks * t->micro_batches;
    uint8_t* taken = m->taken + stage * m->room;
    if (op.work == PIPELINE_FORWARD) {
        while (taken[s->lowest]) s->lowest++;
        m->slots[at] = (uint16_t)s->lowest;
        t->slots[stage] = max_size(t->slots[stage], s->lowest + 1);
    }
    op.slot = m->slots[at];
    taken[op.slot] = op.work != last;
    if (op.work == last) s->lowest = min_size(s->lowest, op.slot);
    t->ops[t->begins[stage] + s->done[0] + s->done[1] + s->done[2]] = op;
    s->done[op.work]++;
    s->now = s->start + pipeline_cost(m, op.work, stage);
    if (op.work == PIPELINE_BACKWARD && !t->splits) s->now += pipeline_cost(m, PIPELINE_WEIGHTS, stage);
    if (op.work != PIPELINE_WEIGHTS) m->ended[op.work * n + at] = s->now;
    t->ends[stage] = s->now;
    t->end = fmax(t->end, s->now);
    pipeline_choose(m, (stage + t->stages - 1) % t->stages);  // to which it may have sent
    pipeline_choose(m, (stage + 1) % t->stages);
    pipeline_choose(m, stage);
}

// Allocates the table and what making it needs; false without memory.
static inline bool pipeline_allocate(PipelineMaker* m) {
    PipelineTable* t = m->table;
    size_t S = t->stages, n = S * t->chunks * t->micro_batches;
    while (m->leaves < S) m->leaves = m->leaves ? 2 * m->leaves : 1;
    for (size_t s = 0, ahead, held; s < S; s++) {
        pipeline_limits(t, m->kind, s, &ahead, &held);
        m->room = max_size(m->room, held);
    }
    t->ops = (PipelineOp*)memory_allocate(n * PIPELINE_WORKS * sizeof *t->ops);
    t->begins = (size_t*)memory_allocate((S + 1) * sizeof *t->begins);
    t->slots = (size_t*)memory_allocate(S * sizeof *t->slots);
    t->ends = (double*)memory_allocate(S * sizeof *t->ends);
    m->stages = (PipelineStage*)memory_allocate(S * sizeof *m->stages);
    m->ended = (double*)memory_allocate(2 * n * sizeof *m->ended);
    m->slots = (uint16_t*)memory_allocate(n * sizeof *m->slots);
    m->taken = (uint8_t*)memory_allocate(S * m->room);
    m->earliest = (size_t*)memory_allocate(2 * m->leaves * sizeof *m->earliest);
    return t->ops && t->begins && t->slots && t->ends && m->stages && m->ended && m->slots && m->taken && m->earliest;
}

static inline void pipeline_maker_free(PipelineMaker* m) {
    free(m->stages);
    free(m->ended);
    free(m->slots);
    free(m->taken);
    free(m->earliest);
}

// Makes the table of a pipeline, which the caller frees. costs (PIPELINE_WORKS, stages): of one chunk of each stage,
// not negative, in any unit; NULL: all 1. hop: of a message, in the same unit. They should be exact, such as whole
// nanoseconds, if they are computed on several machines. Only interleaved has more than one chunk.
static inline bool pipeline_table_make(PipelineTable* t, PipelineKind kind, size_t stages, size_t micro_batches,
                                       size_t chunks, const double* costs, double hop, Error* error) {
    PipelineMaker m;
    memset(t, 0, sizeof *t);
    memset(&m, 0, sizeof m);
    bool sized = stages > 0 && stages <= 65535 && chunks > 0 && chunks <= 255 && micro_batches > 0 &&
        micro_batches <= 65535 && (chunks == 1 || kind == PIPELINE_INTERLEAVED);
    if (!sized || (kind == PIPELINE_INTERLEAVED && (chunks + 1) * stages > 65535))
        return fail_with(error, "a pipeline of %zu stages with %zu chunks and %zu micro-batches is too large, or has "
                         "chunks and is not interleaved; make --pp, --chunks or --total-batch smaller", stages, chunks,
                         micro_batches);
    t->stages = stages, t->micro_batches = micro_batches, t->chunks = chunks, t->splits = pipeline_splits(kind);
    m.table = t, m.kind = kind, m.costs = costs, m.hop = hop;
    bool made = pipeline_allocate(&m);
    size_t all = micro_batches * chunks * (t->splits ? 3 : 2);
    if (made) {
        for (size_t i = 0; i < 2 * stages * chunks * micro_batches; i++) m.ended[i] = (double)INFINITY;
        for (size_t s = 0; s <= stages; s++) t->begins[s] = s * all;
        for (size_t i = 0; i < 2 * m.leaves; i++) m.earliest[i] = i < m.leaves ? stages : i - m.leaves;
        for (size_t s = 0; s < stages; s++) pipeline_choose(&m, s);
        for (size_t i = 0; i < stages * all; i++) pipeline_advance(&m);
    } else {
        fail_with(error, "not enough memory for the table of a pipeline of %zu stages and %zu micro-batches; free some "
                  "memory", stages, micro_batches);
        fail_as(error, ERROR_PROCESS);
        pipeline_table_free(t);
    }
    pipeline_maker_free(&m);
    return made;
}

#endif  // LLMTRAIN_SCHEDULE_H
