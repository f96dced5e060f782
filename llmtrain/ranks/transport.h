// transport.h: what the flat vector needs of the communication between ranks.
//
// A Transport is how a rank reaches the others: comm_open (comm.h) fills one in. One process alone needs no sockets.

#ifndef LLMTRAIN_TRANSPORT_H
#define LLMTRAIN_TRANSPORT_H

#include "../ops/base.h"
#include "../ops/dtypes.h"

// ------------------------------------------------------------------------------------------------
// 1. Slices
//
// A vector of n elements is cut into one slice per rank, in their order, of any length, perhaps with gaps between them.

// Returns the slice of a rank. NULL in place of a function: comm_even_slice.
typedef Slice (*CommSlices)(size_t rank, const void* context);

// A CommSlices: slices from a table (world + 1) of where each rank's begins, and where the last one ends.
static inline Slice comm_slice_of_table(size_t rank, const void* context) {
    const size_t* begins = (const size_t*)context;
    Slice slice = {begins[rank], begins[rank + 1]};
    return slice;
}

// Slices whose lengths differ by one element at most.
static inline Slice comm_even_slice(size_t rank, size_t world, size_t n) {
    size_t part = n / world, more = n % world;
    Slice slice = {part * rank + min_size(rank, more), part * (rank + 1) + min_size(rank + 1, more)};
    return slice;
}

// Rank's slice of a bucket of n elements in the flat vector, counted from the bucket's beginning. Slices begin on
// multiples of SHARD_UNIT elements, which 16-byte accesses to every array need, and are as even as that allows: of
// equal length for 2, 4 and 8 ranks, since a bucket is a multiple of 64 elements.
enum { SHARD_UNIT = 8 };

static inline Slice shard_slice(size_t n, size_t rank, size_t world) {
    Slice units = comm_even_slice(rank, world, n / SHARD_UNIT);
    Slice slice = {units.first * SHARD_UNIT, units.end * SHARD_UNIT};
    return slice;
}

// ------------------------------------------------------------------------------------------------
// 2. Collectives

typedef enum {
    COMM_BARRIER,         // no rank returns before all have called it
    COMM_ALL_REDUCE,      // out = in (n): on every rank the sum over all ranks
    COMM_REDUCE_SCATTER,  // out (own slice): the sum over all ranks of that slice of in (n); in place or not
    COMM_ALL_GATHER,      // out = in (n): every rank contributes its slice, and receives all others
    COMM_BROADCAST,       // out = in (n): the root's, on every rank; for small vectors, since the root sends it to each
    COMM_ALL_TO_ALL,      // part r of in (world, n / world) goes to rank r; part r of out is from rank r; not in place
    COMM_OPERATIONS
} CommOperation;
static const char* const COMM_OPERATION_NAMES[] = {"barrier", "all_reduce", "reduce_scatter", "all_gather",
                                                   "broadcast", "all_to_all"};

typedef uint64_t CommRequest;  // number of the collective

typedef struct {
    double waited_ms;    // spent in comm_wait
    uint64_t bytes_sent; // by finished collectives; headers and messages are not counted
} CommStatistics;

typedef struct Comm Comm;  // control.h

// Groups of ranks (mesh.h): those that share a copy of the sharded state; those that have the same shard of the copies;
// those that share a copy of a tied embedding, which the first and the last stage of a pipeline have; those that share
// a micro-batch, with context parallelism; those that share layers, with tensor parallelism; and, for messages in one
// direction, this rank and a neighbor in its pipeline: activations that come in and go out, and gradients.
typedef enum {
    GROUP_SHARD, GROUP_COPIES, GROUP_TIED, GROUP_CONTEXT, GROUP_TENSOR, GROUP_FORWARD_IN, GROUP_FORWARD_OUT,
    GROUP_BACKWARD_IN, GROUP_BACKWARD_OUT, GROUPS
} RankGroup;

// The stages of a pipeline are a ring: edge i joins stage i and the next. wraps: the last is joined to the first.
enum { RING_NONE = 1 << 30 };

// The edge of a channel of a stage; RING_NONE: it has no such channel.
static inline size_t ring_edge(size_t group, size_t stage, size_t pp, bool wraps) {
    bool to_next = group == GROUP_FORWARD_OUT || group == GROUP_BACKWARD_IN;
    size_t edge = to_next ? stage : (stage + pp - 1) % pp;
    return pp > 1 && (wraps || edge + 1 < pp) ? edge : (size_t)RING_NONE;
}

// Groups of two are opened in turns, so that each stage is in at most one at a time in each direction.
enum { RING_TURNS = 3 };
static inline size_t ring_turn(size_t edge, size_t pp) { return pp % 2 == 1 && edge + 1 == pp ? 2 : edge % 2; }

typedef struct {
    Comm* comm;            // the first argument of all that follows
    size_t rank, world;
    size_t local_world;    // ranks on this machine
    CommRequest (*start)(Comm* comm, CommOperation operation, Dtype type, void* out, const void* in, size_t n,
                         size_t root, CommSlices slices, const void* context);  // comm_start
    bool (*wait)(Comm* comm, CommRequest request, Error* error);                // comm_wait
    bool (*failed)(Comm* comm, Error* error);                                   // comm_failed
    CommStatistics (*statistics)(Comm* comm);                                   // comm_statistics
} Transport;

// data (n): every rank has filled in its part, all of the same length, and receives all others. False if one is lost.
static inline bool transport_all_gather(const Transport* t, void* data, size_t n, Dtype type, Error* error) {
    return t->wait(t->comm, t->start(t->comm, COMM_ALL_GATHER, type, data, data, n, 0, NULL, NULL), error);
}

#endif  // LLMTRAIN_TRANSPORT_H
