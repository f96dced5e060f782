// pipeline.h: a model over the stages of a pipeline: which blocks each has, and the messages between neighbors.
//
//   1. options    the flags
//   2. cut        which blocks are in which piece of the model
//   3. channels   messages in one direction between two stages
//   4. pipeline   all of it, of one rank
//
// A model of `pp` stages with V chunks each is cut into pp V pieces of consecutive blocks; piece i is chunk i / pp of
// stage i mod pp. The first piece has the embeddings too, the last the final norm and the head. Pieces have as many
// blocks as make the most expensive of them cheapest. A stage sends the residual stream after its last block, and the
// gradient of the one that it has received: (N, C) each, in floatX. schedule.h has the order, run/stages.h computes.
//
// Messages of a direction arrive in the order in which they are sent. A sender goes on at once, unless its buffers are
// full; a receiver has buffers too, which are filled while it computes. Together they hold as many messages as there
// are stages, and at least four, so that no schedule can get stuck.

#ifndef LLMTRAIN_PIPELINE_H
#define LLMTRAIN_PIPELINE_H

#include "schedule.h"
#include "zero.h"
#include "../model/config.h"

// ------------------------------------------------------------------------------------------------
// 1. Options

typedef struct {
    PipelineKind kind;
    size_t chunks;         // of each stage; 0 means 1
    size_t micro_batches;  // of a step
} PipelineOptions;

// ------------------------------------------------------------------------------------------------
// 2. Cut

// What the head costs, in blocks: the operations of their matmuls, and of attention over T/2 positions on average.
static inline double pipeline_head_cost(const Config* c, size_t T) {
    double C = (double)c->channels, HD = (double)(c->heads * config_head_size(c));
    double block = C * (double)config_qkv(c) + C * HD + C * (double)(config_ffn_in(c) + c->ffn) + (double)T * HD;
    return C * (double)config_padded_vocab(c) / block;
}

// The blocks of the last of several pieces of L blocks: the most of those with which the most expensive piece is
// cheapest. The others share the rest as evenly as possible.
static inline size_t pipeline_last_piece(size_t L, size_t pieces, double head) {
    size_t best = 1;
    double least = INFINITY;
    for (size_t n = 1; n + pieces - 1 <= L; n++) {
        double most = fmax((double)n + head, (double)divide_up(L - n, pieces - 1));
        if (most <= least) best = n;
        least = fmin(least, most);
    }
    return best;
}

// ------------------------------------------------------------------------------------------------
// 3. Channels

typedef struct {
    Collectives* ranks;    // of this rank and its neighbor; NULL: there is none in this direction
    bool sends;
    size_t sender;         // its number among the two
    size_t elements;       // of the largest message
    size_t room;           // messages that the buffers hold
    floatX* buffers;       // (room, elements)
    size_t n;              // elements of the messages that are expected
    uint64_t expected;     // messages until the end of the step, since the beginning; of a receiver
    uint64_t started, finished;  // messages sent or received: begun, and waited for
} Channel;

static inline floatX* channel_buffer(const Channel* c, uint64_t message) {
    return c->buffers + message % c->room * c->elements;
}

// Starts to move the next message: an all-gather in which only the sender has something.
static inline void channel_start(Channel* c, size_t n, Stream stream) {
    const size_t cuts[3] = {0, c->sender == 0 ? n : 0, n};
    collective_start(c->ranks, c->started % c->room, COMM_ALL_GATHER, channel_buffer(c, c->started), cuts, FLOATX_DTYPE,
                     stream);
    c->started++;
}

// Where the next message is to be written, when there is room for it.
static inline floatX* channel_message(Channel* c, Stream stream) {
    if (c->started - c->finished == c->room) collective_wait(c->ranks, c->finished++ % c->room, stream);
    return channel_buffer(c, c->started);
}

static inline void channel_send(Channel* c, size_t n, Stream stream) {
    channel_start(c, n, stream);
    fault_point("send");
}

// Begins to receive as many of the expected messages as there is room for.
static inline void channel_listen(Channel* c, Stream stream) {
    while (c->started < c->expected && c->started - c->finished < c->room) channel_start(c, c->n, stream);
}

// Says that `count` more messages of n elements will come.
static inline void channel_expect(Channel* c, size_t count, size_t n, Stream stream) {
    if (c->ranks == NULL) return;
    c->expected += count;
    c->n = n;
    channel_listen(c, stream);
}

// Copies the next message to `out`.
static inline void channel_receive(Channel* c, floatX* out, Stream stream) {
    fault_point("receive");
    collective_wait(c->ranks, c->finished % c->room, stream);
    device_copy(out, channel_buffer(c, c->finished), c->n * sizeof(floatX), stream);
    c->finished++;
    channel_listen(c, stream);
}

// ------------------------------------------------------------------------------------------------
// 4. Pipeline

// A micro-batch that later chunks of this stage need again.
typedef struct {
    int32_t *tokens, *targets;  // (N)
    uint64_t first_token;       // index of its first token in the run, for dropout
} PipelineBatch;

typedef struct {
    PipelineOptions options;
    size_t pp, rank;          // stages, and this rank's; with one, nothing below is used
    size_t* begins;           // (pp chunks + 1) the first block of each piece of the model
    size_t* stages;           // (L + 2) the stage of each bucket
    size_t longest;           // blocks of the longest piece of this stage
    PipelineTable table;
    double busy, all_busy;    // how long this stage computes in it; all stages together
    Channel channels[GROUPS]; // from GROUP_FORWARD_IN on
    PipelineBatch* batches;   // (pp) by the number of the micro-batch modulo pp; with several chunks only
} Pipeline;

static inline size_t pipeline_pieces(const Pipeline* p) { return p->pp * p->options.chunks; }
static inline size_t pipeline_piece_of(const Pipeline* p, size_t chunk) { return chunk * p->pp + p->rank; }
static inline bool pipeline_is_last(const Pipeline* p) { return p->rank + 1 == p->pp; }

// Micro-batches whose activations this stage holds at a time.
static inline size_t pipeline_slots(const Pipeline* p) { return p->table.slots[p->rank]; }

// Whether the gradient of a piece's input is sent back: something before it trains. ends: the block at which the
// backward ends.
static inline bool pipeline_sends_back(const Pipeline* p, size_t piece, size_t ends) {
    return piece > 0 && p->begins[piece] > ends;
}

// The share of a step in which this stage waits for others.
static inline double pipeline_idle(const Pipeline* p) { return 1 - p->busy / p->table.end; }

// Messages that this stage sends for a micro-batch.
static inline size_t pipeline_messages(const Pipeline* p, size_t ends) {
    size_t count = 0;
    for (size_t chunk = 0; p->pp > 1 && chunk < p->options.chunks; chunk++) {
        size_t piece = pipeline_piece_of(p, chunk);
        count += (piece + 1 < pipeline_pieces(p)) + pipeline_sends_back(p, piece, ends);
    }
    return count;
}

static inline void pipeline_free(Pipeline* p) {
    for (size_t i = 0; p->batches && i < p->pp; i++) {
        free(p->batches[i].tokens);
        free(p->batches[i].targets);
    }
    free(p->batches);
    free(p->begins);
    free(p->stages);
    pipeline_table_free(&p->table);
    memset(p, 0, sizeof *p);
}

// Makes the table of the schedule, with what the pieces cost: a forward 1 for each block, a backward 1 for the
// gradients of inputs and 1 for those of weights.
static inline bool pipeline_make_table(Pipeline* p, double head, Error* error) {
    double* costs = (double*)memory_allocate(PIPELINE_WORKS * p->pp * sizeof(double));
    if (costs == NULL) return fail_with(error, "out of memory for the costs of %zu stages", p->pp);
    for (size_t i = 0; i < pipeline_pieces(p); i++) {
        double cost = (double)(p->begins[i + 1] - p->begins[i]) + (i + 1 == pipeline_pieces(p) ? head : 0);
        for (size_t w = 0; w < PIPELINE_WORKS; w++)
            costs[w * p->pp + i % p->pp] += floor(1e3 * cost / (double)p->options.chunks);
    }
    bool ok = pipeline_table_make(&p->table, p->options.kind, p->pp, p->options.micro_batches, p->options.chunks, costs,
                                  0, error);
    for (size_t i = 0; i < PIPELINE_WORKS * p->pp; i++) {
        double all = costs[i] * (double)(p->options.micro_batches * p->options.chunks);
        p->all_busy += all;
        if (i % p->pp == p->rank) p->busy += all;
    }
    free(costs);
    return ok;
}

// Cuts the model, and makes the table of this run. T: tokens of a sequence.
static inline bool pipeline_plan(Pipeline* p, const PipelineOptions* options, const RankOptions* ranks, const Config* c,
                                 size_t T, Error* error) {
    size_t L = c->layers, pieces, last;
    memset(p, 0, sizeof *p);
    p->options = *options;
    p->options.chunks = max_size(options->chunks, 1);
    p->options.micro_batches = max_size(options->micro_batches, 1);
    p->pp = ranks_pp(ranks);
    p->rank = ranks_stage(ranks, ranks->rank);
    if (p->pp == 1) return true;
    pieces = pipeline_pieces(p);
    if (L < pieces)
        return fail_with(error, "a pipeline of %zu stages with --chunks %zu needs at least %zu blocks, and the model "
                         "has %zu; make --pp or --chunks smaller", p->pp, p->options.chunks, pieces, L);
    double head = pipeline_head_cost(c, T);
    last = pipeline_last_piece(L, pieces, head);
    p->begins = (size_t*)memory_allocate((pieces + 1) * sizeof(size_t));
    p->stages = (size_t*)memory_allocate((L + 2) * sizeof(size_t));
    if (!p->begins || !p->stages) return fail_with(error, "out of memory for the table of %zu stages", p->pp);
    p->begins[pieces] = L;
    for (size_t i = 0; i < pieces; i++)  // the later of the others have the odd blocks: they hold fewer micro-batches
        p->begins[i] = L - last - comm_even_slice(pieces - 1 - i, pieces - 1, L - last).first;
    for (size_t i = 0; i < pieces; i++) {
        for (size_t l = p->begins[i]; l < p->begins[i + 1]; l++) p->stages[l + 1] = i % p->pp;
        if (i % p->pp == p->rank) p->longest = max_size(p->longest, p->begins[i + 1] - p->begins[i]);
    }
    p->stages[L + 1] = p->pp - 1;
    return pipeline_make_table(p, head, error);
}

// Allocates what micro-batches of N tokens need that several chunks read.
static inline bool pipeline_allocate_batches(Pipeline* p, size_t N, Error* error) {
    if (p->pp == 1 || p->options.chunks == 1) return true;
    p->batches = (PipelineBatch*)memory_allocate(p->pp * sizeof(PipelineBatch));
    bool ok = p->batches != NULL;
    for (size_t i = 0; ok && i < p->pp; i++) {
        p->batches[i].tokens = (int32_t*)memory_allocate(N * sizeof(int32_t));
        p->batches[i].targets = (int32_t*)memory_allocate(N * sizeof(int32_t));
        ok = p->batches[i].tokens && p->batches[i].targets;
    }
    return ok || fail_with(error, "out of memory for %zu micro-batches; make --batch smaller", p->pp);
}

// Takes the channels' buffers from the plan, for messages of n elements.
static inline void pipeline_layout(Pipeline* p, size_t n, bool training, Arena* arena) {
    for (size_t g = GROUP_FORWARD_IN; p->pp > 1 && g < GROUPS; g++) {
        Channel* c = &p->channels[g];
        bool backward = g == GROUP_BACKWARD_IN || g == GROUP_BACKWARD_OUT;
        if (ring_edge(g, p->rank, p->pp, p->options.chunks > 1) == RING_NONE || (backward && !training)) continue;
        c->sends = g == GROUP_FORWARD_OUT || g == GROUP_BACKWARD_OUT;
        c->elements = n;
        c->room = max_size(divide_up(p->pp, 2), 2);
        c->buffers = (floatX*)arena_take(arena, "messages between stages", c->room * n * sizeof(floatX));
    }
}

// Opens the channels; all ranks together. Neighbors open theirs at the same turn, so that none waits in a ring. A
// message without meaning is sent through each: NCCL makes connections at the first collective, for which both hosts
// wait, and in a step each would wait in the first receive that it starts.
static inline bool pipeline_connect(Pipeline* p, FlatVector* flat, Error* error) {
    for (size_t turn = 0; p->pp > 1 && turn < RING_TURNS; turn++)
        for (size_t g = GROUP_FORWARD_IN; g < GROUPS; g++) {
            Channel* c = &p->channels[g];
            const Transport* ranks = flat->options.groups[g];
            if (c->room == 0 || ring_turn(ring_edge(g, p->rank, p->pp, true), p->pp) != turn) continue;
            if (!collective_open_channel(&flat->groups[g], ranks, c->room, error)) return false;
            c->ranks = &flat->groups[g];
            c->sender = c->sends ? ranks->rank : 1 - ranks->rank;
            channel_start(c, 1, flat->stream);
            collective_wait(c->ranks, c->finished++ % c->room, flat->stream);
            c->expected += !c->sends;
        }
    return true;
}

#endif  // LLMTRAIN_PIPELINE_H
