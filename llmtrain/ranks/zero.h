// zero.h: the flat vector over the ranks of a run.
//
//   1. flat vector   what a rank holds of parameters, gradients, master weights and optimizer state
//   2. gradients     reduced bucket by bucket, overlapped with the backward
//   3. parameters    updated by their owners, gathered during the next forward; of stage 3 whenever they are used
//
// The stages are those of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". With N ranks:
//
//   stage   gradients   master weights, optimizer state   a rank sends in a step, per element
//     0     whole       whole                             2 (N-1)/N gradients: all-reduce
//     1     whole       1/N                               (N-1)/N gradients and parameters: reduce-scatter, all-gather
//     2     1/N         1/N                               the same, gradients in every micro-batch
//     3     1/N         1/N, and parameters of blocks     the same, and these parameters twice in every micro-batch
//
// A gradient element is sent as 8 bytes if it is reduced exactly, 4 as float, otherwise as a floatX; a parameter as a
// floatX. --plan prints the sum.
//
// From stage 1 on a copy of the state may be sharded over fewer ranks than all ("hybrid shard" in PyTorch): those of a
// machine, whose links are fast. S of N ranks share a copy then: 1/S in place of 1/N in the table, what is sent there
// stays among these S, and the ranks with the same slice of N/S copies add it up once a step, by all-reduce:
//
//     copy 0: ranks 0 .. S-1   copy 1: ranks S .. 2S-1 ...          rank r has slice r mod S of copy r / S
//
// Below stage 3 every rank has all parameters. In stage 3 those of the blocks are gathered shortly before they are
// used, forward and backward, into two buffers in turn. The embeddings, the final norm, the head and what does not
// train stay whole. From stage 2 on the backward adds to staging buffers of a bucket's size, three of them: one
// for the embeddings (with a tied head they accumulate gradients from the start of the backward to its end, and with
// two buffers they would have to be reduced twice), two for the blocks in turn (one, and two of the copies that are
// reduced, unless gradients are reduced as they are, in float). See flat_layout_staging for the other stages.
//
// Sums over micro-batches and ranks are made in one of three ways:
//   float     in float: first over micro-batches and then over ranks, in stage 2 the other way round
//   storage   the same, but gradients are reduced in floatX
//   exact     in fixed point, 64 bits: no order and no grouping changes a bit, so that the weights depend neither on
//             the stage nor on how NCCL adds
// With one rank the code is the same, and the collectives do nothing.
//
// In a pipeline (pipeline.h) a rank has only the buckets of its stage, and N above are the ranks of that stage, one of
// each pipeline. With context parallelism (context.h) several of them have the same micro-batches, and parts of their
// rows. With tensor parallelism (tensor_parallel.h) the vector has a rank's parts of the tensors, and N are the ranks
// with the same parts; the gradients of what is not divided are then added up over the ranks with other parts. The
// bucket of a tied embedding is in the first stage and in the last: its 2 N ranks share it. Its gradients, the
// embedding's and the head's, are converted to fixed point one by one, with one stage too.

#ifndef LLMTRAIN_ZERO_H
#define LLMTRAIN_ZERO_H

#include "../base/fault.h"
#include "../model/offload_states.h"
#include "../model/tensors.h"
#if defined(LLMTRAIN_CUDA) && defined(LLMTRAIN_NCCL)
#include "nccl.cuh"
#else
#include "collectives.h"
#endif

// ------------------------------------------------------------------------------------------------
// 1. The flat vector

typedef enum { REDUCE_FLOAT, REDUCE_STORAGE, REDUCE_EXACT } ReduceKind;

typedef struct {
    const Transport* transport;  // NULL: one rank, or only a plan is wanted
    size_t rank, world;          // 0 of 0 means 0 of 1
    size_t local_rank;           // among those of this machine: chooses the device
    size_t stage;                // of ZeRO: 0 to 3
    ReduceKind reduce;
    size_t shard;                // ranks that share a copy of the state, from stage 1 on; 0: all
    size_t tp, cp, pp;           // ranks that share a layer and a micro-batch, stages; 0 means 1. See mesh.h
    size_t leaves;               // parts of a sum over a layer's inputs that are added as a tree; 0 means tp. 1 with
                                 // several ranks: no tree, their sums are reduced in floatX
    size_t row_leaves;           // parts of a micro-batch's rows that REDUCE_EXACT sums separately; 0 means cp
    size_t kv_copies;            // of each key and value head that attention computes with; 0 means 1
    const Transport* groups[GROUPS];  // those that mesh_open opens for this layout
} RankOptions;

enum { RANKS_TP_MAX = LEAVES_MAX };

static inline size_t ranks_tp(const RankOptions* o) { return max_size(o->tp, 1); }
static inline size_t ranks_cp(const RankOptions* o) { return max_size(o->cp, 1); }
static inline size_t ranks_pp(const RankOptions* o) { return max_size(o->pp, 1); }

// Ranks that share the rows of a micro-batch. They are neighbors.
static inline size_t ranks_of_rows(const RankOptions* o) { return ranks_tp(o) * ranks_cp(o); }

// Which of the ranks that share a micro-batch a rank is, and its stage.
static inline size_t ranks_cp_rank(const RankOptions* o, size_t rank) { return rank / ranks_tp(o) % ranks_cp(o); }
static inline size_t ranks_stage(const RankOptions* o, size_t rank) { return rank / ranks_of_rows(o) % ranks_pp(o); }

// Parts of a sum over a layer's inputs, of all ranks that share it, and those of this rank.
static inline size_t ranks_all_leaves(const RankOptions* o) { return max_size(o->leaves, ranks_tp(o)); }
static inline bool ranks_reduce_sums(const RankOptions* o) { return ranks_tp(o) > 1 && o->leaves == 1; }
static inline size_t ranks_own_leaves(const RankOptions* o) { return ranks_all_leaves(o) / ranks_tp(o); }

// Parts of this rank's rows that are summed separately.
static inline size_t ranks_row_leaves(const RankOptions* o) {
    return o->reduce == REDUCE_EXACT ? max_size(o->row_leaves / ranks_cp(o), 1) : 1;
}

// The same for a tensor that tensor parallelism does not divide.
static inline size_t ranks_leaves(const RankOptions* o) {
    return ranks_row_leaves(o) * (o->reduce == REDUCE_EXACT ? ranks_own_leaves(o) : 1);
}

// What the vector holds besides parameters.
typedef struct {
    bool training;           // gradients and optimizer state
    const OptimizerOptions* optimizer;  // whose state; must outlive the vector
    bool offload;            // master weights and optimizer state are not in memory but in FlatVector.offloaded,
    const char* offload_dir; // in a file in this directory; NULL: in host memory
} FlatOptions;

static inline bool flat_has_masters(const FlatOptions* holds) {
    return holds->training && holds->optimizer->master_weights && !FLOATX_IS_FLOAT;
}

// A bucket of the flat vector on rank 1 of 3, whose slice is `shard`:
//
//     first                                       end                    frozen_end
//     |    rank 0    |    shard    |    rank 2    |    does not train    |
//     [0]            [1]           [2]            [3]  of shard_begins
//
//     stage      sums: gradients         state: master weights and optimizer state
//       0        [first, end)            [first, end)
//       1        [first, end)            shard
//      2, 3      shard                   shard
//
// Ranks that have the same shard, of several copies, divide it among them: `own` is this rank's part. The parts of all
// ranks are the whole bucket.
typedef struct {
    size_t first, end;        // what trains, as offsets in the flat vector, like all slices here
    size_t common_end;        // [first, common_end): what trains and is not divided, of ranks with different parts
    size_t frozen_end;        // what does not train is [end, frozen_end): on all ranks
    bool here;                // this rank's stage has it; otherwise all slices are empty
    bool split;               // two stages have it: a tied embedding
    size_t owners, shard_world;  // ranks that have it; those of them that share a copy
    size_t* own_begins;       // (owners + 1) where the ranks' own parts begin, counted from `first`, in shards' order
    size_t* shard_begins;     // (shard_world + 1) where their shards begin
    size_t* part_begins;      // (copies + 1) where the parts of this rank's shard begin, counted from the shard's first
    Slice own;                // what this rank saves, and whose gradients it squares; see flat_own
    Slice shard;              // this rank's
    Slice sums;               // whose gradients are added up here; in stage 1 only shard is valid once they are reduced
    Slice state;              // whose master weights and optimizer state are here
    size_t sums_offset, master_offset;  // where these begin in grads or exact; in master_weights
    bool sharded;             // stage 3: the parameters that train are gathered when they are needed,
    size_t buffer;            // here,
    bool stale;               // and again, since they have changed
    Slice kept;               // whose parameters are here always: all, or shard
    size_t kept_offset;       // where these begin in params; those that do not train follow
    size_t staging;           // the index of its staging buffer
    bool added;               // it holds a part of the micro-batch's gradients, which is in the sums too
    bool reducing, sharing, gathering;  // a collective is in flight: over the shards, over the copies, of parameters
} Bucket;

typedef struct {
    float* grads;             // the backward of a bucket adds here; NULL: to FlatVector.grads
    void* comm_buffer;        // what the collective reduces, which may be `grads`; NULL: the sums themselves
    Bucket* pending;          // whose gradients are in comm_buffer; NULL: none
} Staging;

// The part of an optimizer state of a tensor that a rank holds, in elements of the state.
typedef struct {
    size_t first, count;      // which, of those for the whole tensor
    size_t offset;            // where they begin in FlatVector.states
} StatePart;

enum { STAGING_EMBEDDING, STAGING_EVEN, STAGING_ODD, STAGINGS };

typedef struct {
    ExactSum losses;          // of the micro-batches' targets
    ExactSum squares;         // of the gradients of this rank's slices
    double bad;               // 1: a gradient did not fit fixed point
} StepSums;

typedef struct {
    RankOptions options;
    FlatOptions holds;
    const Parameters* parameters;
    Bucket* buckets;          // (count): the embeddings, the blocks, the final norm and the head
    size_t count;
    size_t tp, tp_rank;       // ranks that share layers, and which of them this is
    size_t cp, pp, pp_rank;   // ranks that share a micro-batch; stages of the pipeline, and this rank's
    const size_t* stages;     // (count) that of each bucket; NULL: there is one
    size_t dp_rank, dp_world; // which micro-batches this rank has, of those that are computed at a time
    size_t stage_rank, stage_world;  // among the ranks of this stage that have the same parts, cp dp_world in all
    size_t shard_world, copies;  // of these: ranks that share a copy of the state; copies
    size_t* begins;           // of the buckets
    size_t sharded;           // buckets that are
    size_t params_size;       // parameters that are here always,
    size_t sums_size;         // elements of summed gradients that are here,
    size_t master_size;       // of master weights,
    size_t state_sizes[OPTIMIZER_STATES];  // and of each state of the optimizer
    StatePart (*state_parts)[OPTIMIZER_STATES];  // (tensors)
    OptimizerSlice* slices;   // (tensors) what the next call of optimizer_update_list updates
    floatX* params;           // (params_size): of all buckets, or what is kept of them, see flat_param
    floatX* gathered[2];      // (the longest of the sharded buckets) what is gathered, and whose it is
    Bucket* gathered_of[2];
    size_t awaited;           // the sharded bucket that was used last
    bool backward;            // the one before it is used next
    float* master_weights;    // (master_size); NULL where params are float themselves, or not wanted, or offloaded
    void* states[OPTIMIZER_STATES];   // (state_sizes) of the optimizer, in the types of its row of OPTIMIZERS
    float* optimizer_scratch; // (scratch_floats): what the update of any tensor here takes
    size_t scratch_floats;
    float* grads;             // (sums_size); NULL with REDUCE_EXACT
    int64_t* exact;           // (sums_size) in fixed point; NULL without it
    Staging staging[STAGINGS];
    OffloadStates offloaded;  // master weights and states where they are not in memory
    StepSums* sums;           // on the device: what the host reads once per step
    uint64_t* checksums;      // (count) on the device
    StepSums sums_host;       // the same after flat_finish_step
    Collectives groups[GROUPS];
    size_t exchanges;         // that context.h and tensor_parallel.h have started
    double loss_scale;        // of the step in progress
    size_t tokens, targets;   // of this rank in the step so far; targets that are not masked
    double mean_factor;       // tokens of the step per such target: gradients are divided by tokens
    size_t micro_batches, micro;  // of this rank in the step: in all, and begun so far
    bool discards;            // gradients are squared and thrown away, neither summed nor reduced (run/trace.h)
    Stream stream;
} FlatVector;

// Fixed point: elements are multiples of 2^-50 after the loss scale is taken off, about 1e-15, and sums stay below
// 2^12, so that 63 bits hold them. A step with a larger one, or with a NaN, has the norm NaN and is skipped.
#define EXACT_SCALE 0x1p50
#define EXACT_LIMIT 0x1p12

static inline Dtype reduce_type(ReduceKind reduce) {
    return reduce == REDUCE_EXACT ? DTYPE_I64 : reduce == REDUCE_STORAGE ? FLOATX_DTYPE : DTYPE_F32;
}

// The part of a tensor in a slice of the flat vector, in elements from the tensor's first; empty: first == end.
static inline Slice tensor_part(const Tensor* t, Slice slice) {
    size_t first = max_size(t->offset, slice.first), end = min_size(t->offset + t->size, slice.end);
    Slice part = {first - t->offset, end - t->offset};
    if (first >= end) part.first = part.end = 0;
    return part;
}

// The part of a tensor's state s that belongs to a slice of the flat vector: its first element, and their number.
static inline size_t flat_state_part(size_t* first, const FlatVector* flat, size_t s, const Tensor* t, Slice slice) {
    Slice part = tensor_part(t, slice);
    const FlatOptions* holds = &flat->holds;
    *first = 0;
    if (!holds->training || !t->trains) return 0;
    return optimizer_state_part(first, OPTIMIZERS[holds->optimizer->kind].states[s].shape, &t->shape,
                                holds->optimizer->rank, part.first, part.end);
}

// Places the states of tensor i. Each begins at a multiple of 64 elements, as tensors do.
static inline void flat_place_states(FlatVector* flat, size_t i) {
    const Tensor* t = &flat->parameters->tensors[i];
    Slice slice = flat->buckets[t->bucket].state;
    const OptimizerOptions* o = flat->holds.optimizer;
    for (size_t s = 0; s < optimizer_states(o->kind); s++) {
        StatePart* part = &flat->state_parts[i][s];
        part->count = flat_state_part(&part->first, flat, s, t, slice);
        part->offset = flat->state_sizes[s];
        flat->state_sizes[s] += round_up(part->count, 64);
    }
    Slice held = tensor_part(t, slice);
    if (flat->holds.training && t->trains && held.first < held.end)
        flat->scratch_floats =
            max_size(flat->scratch_floats, optimizer_scratch_floats(o->kind, &t->shape, o->rank));
}

// The tensor of bucket b that contains element `at` of the flat vector, or the last one before it.
static inline const Tensor* flat_tensor(const FlatVector* flat, size_t b, size_t at) {
    const Parameters* p = flat->parameters;
    const Tensor* found = NULL;
    for (size_t i = 0; i < p->count; i++)
        if (p->tensors[i].bucket == b && p->tensors[i].trains && (found == NULL || p->tensors[i].offset <= at))
            found = &p->tensors[i];
    return found;
}

// Assigns whole tensors to the ranks, in order and greedily: each to the least loaded rank at or after the previous
// owner. Over many buckets all ranks get about the same work.
static inline void flat_shard_tensors(FlatVector* flat, size_t b, double* loads) {
    const Parameters* p = flat->parameters;
    Bucket* k = &flat->buckets[b];
    size_t world = k->owners, owner = 0, left = 0;
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        left += t->bucket == b && t->trains && t->cols > 0;
    }
    for (size_t r = 0; r <= world; r++) k->own_begins[r] = r == 0 ? 0 : k->end - k->first;
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        if (t->bucket != b || !t->trains) continue;
        if (t->cols > 0) {
            // Leave one rank for each remaining matrix, as long as there are enough.
            size_t after = min_size(--left, world - 1), last = max_size(owner, world - 1 - after);
            size_t best = owner;
            for (size_t r = owner + 1; r <= last; r++)
                if (loads[r] < loads[best]) best = r;
            for (size_t r = owner + 1; r <= best; r++) k->own_begins[r] = t->offset - k->first;
            owner = best;
        }
        loads[owner] += optimizer_work(flat->holds.optimizer->kind, &t->shape);
    }
}

// Sets where the ranks' slices of a bucket begin, as evenly as the optimizer allows. loads (owners): the work of each
// rank from the previous buckets, to which that from this one is added.
static inline void flat_shard(FlatVector* flat, size_t b, double* loads) {
    Bucket* k = &flat->buckets[b];
    size_t world = k->owners, n = k->end - k->first;
    ShardRule rule = flat->holds.training ? OPTIMIZERS[flat->holds.optimizer->kind].rule : SHARD_ANYWHERE;
    bool whole = rule == SHARD_TENSORS;
    for (size_t i = 0; i < flat->parameters->count; i++) {
        const Tensor* t = &flat->parameters->tensors[i];
        whole |= rule == SHARD_MATRICES && t->bucket == b && t->trains && t->shape.hidden;
    }
    if (whole) {
        flat_shard_tensors(flat, b, loads);
        return;
    }
    for (size_t r = 0; r <= world; r++) {
        k->own_begins[r] = r < world ? shard_slice(n, r, world).first : n;
        if (rule != SHARD_BLOCKS || r == 0 || r == world || n == 0) continue;
        const Tensor* t = flat_tensor(flat, b, k->first + k->own_begins[r]);
        size_t into = min_size(k->first + k->own_begins[r] - t->offset, t->size);
        k->own_begins[r] = t->offset + into / OPTIMIZER_BLOCK * OPTIMIZER_BLOCK - k->first;
    }
}

// Whether master weights and states are in flat->offloaded.
static inline bool flat_offloads(const FlatVector* flat) { return flat->holds.training && flat->holds.offload; }

// Makes the table of what is offloaded.
static inline bool flat_plan_offload(FlatVector* flat, Error* error) {
    const Parameters* p = flat->parameters;
    const FlatOptions* holds = &flat->holds;
    Slice* held = (Slice*)memory_allocate(p->count * sizeof(Slice));
    if (held == NULL) return fail_with(error, "out of memory for the table of what is offloaded");
    for (size_t i = 0; i < p->count; i++)
        held[i] = tensor_part(&p->tensors[i], flat->buckets[p->tensors[i].bucket].state);
    bool ok = offload_states_plan(&flat->offloaded, p, held, holds->optimizer->kind, holds->optimizer->rank,
                                  flat_has_masters(holds), error);
    free(held);
    return ok;
}

// Ranks that share a micro-batch and a copy of the state. They are neighbors, and before those of the next stage.
static inline size_t flat_neighbors(const FlatVector* flat) { return min_size(flat->cp, flat->shard_world); }

// The ranks in the order of what they own: own parts of each bucket follow each other, for one part of tensors after
// the other.
static inline size_t flat_owner(const FlatVector* flat, size_t index) {
    size_t world = flat->options.world / flat->tp, i = index % world;
    size_t n = flat_neighbors(flat), copy = i % flat->copies, at = i / flat->copies;
    size_t stage = at / n % flat->pp, shard = at / (n * flat->pp) * n + at % n;
    size_t among = copy * flat->shard_world + shard;  // the ranks of the stage
    return ((among / flat->cp * flat->pp + stage) * flat->cp + among % flat->cp) * flat->tp + index / world;
}

// The collectives of the ranks that share a copy of a bucket.
static inline Collectives* flat_sharing(FlatVector* flat, const Bucket* k) {
    return &flat->groups[k->split ? GROUP_TIED : GROUP_SHARD];
}

// A rank's slice of a bucket.
static inline Slice bucket_slice(const Bucket* k, const size_t* begins, size_t rank) {
    Slice slice = {k->first + begins[rank], k->first + begins[rank + 1]};
    return slice;
}

// Whether a rank has a bucket.
static inline bool flat_rank_has(const FlatVector* flat, size_t rank, size_t b) {
    size_t stage = ranks_stage(&flat->options, rank);
    return flat->stages == NULL || flat->stages[b] == stage || (flat->buckets[b].split && stage + 1 == flat->pp);
}

// Sets where the slices of a bucket begin, and this rank's. begins: memory for the tables; loads: see flat_shard.
static inline void flat_slice_bucket(FlatVector* flat, size_t b, size_t* begins, double* loads) {
    Bucket* k = &flat->buckets[b];
    const RankOptions* o = &flat->options;
    size_t stages = k->split ? 2 : 1, copies = flat->copies, S = k->shard_world = stages * flat->shard_world;
    size_t shard = flat->stage_rank % flat->shard_world, n = flat_neighbors(flat);
    size_t s = (shard / n * stages + (k->split && flat->pp_rank > 0)) * n + shard % n;  // in the order of the ranks
    Slice whole = {k->first, k->here ? k->end : k->first};
    k->owners = copies * S;
    k->own_begins = begins;
    k->shard_begins = k->own_begins + k->owners + 1;
    k->part_begins = k->shard_begins + S + 1;
    k->shard = k->own = k->sums = k->state = k->kept = whole;
    if (!k->here) return;
    flat_shard(flat, b, loads);
    const size_t* parts = k->own_begins + s * copies;
    for (size_t r = 0; r <= S; r++) k->shard_begins[r] = k->own_begins[r * copies];
    for (size_t c = 0; c <= copies; c++) k->part_begins[c] = parts[c] - parts[0];
    k->shard = bucket_slice(k, k->shard_begins, s);
    k->own = bucket_slice(k, parts, flat->stage_rank / flat->shard_world);
    if (o->stage >= 2) k->sums = k->shard;
    if (o->stage >= 1) k->state = k->shard;
    k->sharded = o->stage >= 3 && S > 1 && b > 0 && b + 1 < flat->count && k->end > k->first;
    if (k->sharded) k->kept = k->shard;
}

// Makes the table of buckets; allocates nothing on the device. `p` must outlive it. stages (buckets): the stage of the
// pipeline that has each bucket, must outlive it too; NULL: there is one stage.
static inline bool flat_create(FlatVector* flat, const Parameters* p, const RankOptions* options,
                               const FlatOptions* holds, const size_t* stages, Error* error) {
    size_t count = p->tensors[p->count - 1].bucket + 1;
    const FlatVector empty = {.options = *options, .holds = *holds, .parameters = p, .count = count, .stages = stages};
    *flat = empty;
    flat->options.world = max_size(options->world, 1);
    flat->tp = ranks_tp(options);
    flat->tp_rank = options->rank % flat->tp;
    flat->cp = ranks_cp(options);
    flat->pp = ranks_pp(options);
    flat->pp_rank = ranks_stage(options, options->rank);
    flat->dp_rank = options->rank / (ranks_of_rows(options) * flat->pp);
    flat->dp_world = flat->options.world / (ranks_of_rows(options) * flat->pp);
    flat->stage_rank = flat->dp_rank * flat->cp + ranks_cp_rank(options, options->rank);
    size_t world = flat->stage_world = flat->cp * flat->dp_world, of_bucket = 5 * world + 3;
    flat->shard_world = options->shard && options->stage > 0 ? options->shard : world;
    flat->copies = world / flat->shard_world;
    flat->buckets = (Bucket*)memory_allocate(count * sizeof(Bucket));
    flat->state_parts = (StatePart(*)[OPTIMIZER_STATES])memory_allocate(p->count * sizeof *flat->state_parts);
    flat->slices = (OptimizerSlice*)memory_allocate(p->count * sizeof *flat->slices);
    flat->begins = (size_t*)memory_allocate(count * of_bucket * sizeof(size_t));
    double* loads = (double*)memory_allocate(3 * world * sizeof(double));
    if (!flat->buckets || !flat->state_parts || !flat->slices || !flat->begins || !loads) {
        free(loads);
        return fail_with(error, "out of memory for the table of buckets");
    }
    for (size_t b = 0; b < count; b++) flat->buckets[b].first = SIZE_MAX;
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        Bucket* k = &flat->buckets[t->bucket];
        k->first = min_size(k->first, t->offset);
        size_t end = round_up(t->offset + tensor_place(t), 64);
        if (t->trains) k->end = max_size(k->end, end);
        if (t->trains && p->parts > 1 && !tensor_is_divided(t)) k->common_end = max_size(k->common_end, end);
    }
    for (size_t b = 0; b < count; b++) {
        Bucket* k = &flat->buckets[b];
        k->frozen_end = b + 1 < count ? flat->buckets[b + 1].first : p->flat_size;
        k->end = max_size(k->end, k->first);
        k->common_end = max_size(k->common_end, k->first);
        k->split = p->tied && b == 0 && flat->pp > 1;
        k->here = flat_rank_has(flat, flat->options.rank, b);
        flat_slice_bucket(flat, b, flat->begins + b * of_bucket, k->split ? loads + world : loads);
        k->buffer = flat->sharded % 2;
        k->kept_offset = flat->params_size;
        flat->sharded += k->sharded;
        flat->params_size += round_up(slice_length(k->kept), 64) + (k->frozen_end - k->end);
        k->sums_offset = flat->sums_size;
        k->master_offset = flat->master_size;
        flat->sums_size += slice_length(k->sums);
        flat->master_size += slice_length(k->state);
        bool end = b == 0 || (b + 1 == count && !p->tied);
        k->staging = end ? STAGING_EMBEDDING : b % 2 == 0 ? STAGING_EVEN : STAGING_ODD;
    }
    free(loads);
    for (size_t i = 0; i < p->count; i++) flat_place_states(flat, i);
    return !flat_offloads(flat) || flat_plan_offload(flat, error);
}

// The collectives of all groups, before the ranks' connections. Neighbors close theirs at the same turn, as they have
// opened them (pipeline_connect).
static inline void flat_disconnect(FlatVector* flat) {
    size_t pp = max_size(flat->pp, 1);  // 0: it was never made
    for (size_t turn = RING_TURNS; turn-- > 0;)
        for (size_t g = GROUPS; g-- > GROUP_FORWARD_IN;)
            if (ring_turn(ring_edge(g, flat->pp_rank, pp, true), pp) == turn) collective_close(&flat->groups[g]);
    for (size_t g = GROUP_FORWARD_IN; g-- > 0;) collective_close(&flat->groups[g]);
}

static inline void flat_free(FlatVector* flat) {
    flat_disconnect(flat);
    offload_states_free(&flat->offloaded);
    free(flat->buckets);
    free(flat->state_parts);
    free(flat->slices);
    free(flat->begins);
    memset(flat, 0, sizeof *flat);
}

// Whether the backward writes gradients to staging buffers, from which they are added to the sums.
static inline bool flat_stages(const FlatVector* flat) {
    return flat->options.stage >= 2 || flat->options.reduce == REDUCE_EXACT;
}

// Staging buffers, by stage and kind of sum:
//
//   stage 0, 1   float     none: the backward adds to flat->grads, which are reduced in place
//                storage   comm_buffer, in floatX
//                exact     grads; the sums in fixed point are reduced in place
//   stage 2, 3   float     grads, reduced in place
//                storage   grads and comm_buffer
//                exact     grads and comm_buffer
static inline void flat_layout_staging(FlatVector* flat, Arena* arena) {
    const RankOptions* o = &flat->options;
    const char* name = "staging of gradients";
    bool has_grads = flat_stages(flat), in_place = o->stage >= 2 && o->reduce == REDUCE_FLOAT;
    bool has_comm_buffer = o->stage >= 2 || o->reduce == REDUCE_STORAGE;
    size_t longest[STAGINGS] = {0, 0, 0};
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        if (k->here) longest[k->staging] = max_size(longest[k->staging], k->end - k->first);
    }
    longest[STAGING_EVEN] = longest[STAGING_ODD] = max_size(longest[STAGING_EVEN], longest[STAGING_ODD]);
    for (int s = 0; s < STAGINGS; s++) {
        Staging* staging = &flat->staging[s];
        // Gradients that are copied to be reduced are free at the end of their bucket: the blocks need one buffer.
        if (has_grads && s == STAGING_ODD && !in_place) staging->grads = flat->staging[STAGING_EVEN].grads;
        else if (has_grads) staging->grads = (float*)arena_take(arena, name, longest[s] * sizeof(float));
        if (in_place) staging->comm_buffer = staging->grads;
        else if (has_comm_buffer)
            staging->comm_buffer = arena_take(arena, name, longest[s] * dtype_bytes(reduce_type(o->reduce)));
    }
}

static inline size_t flat_state_bytes(const FlatVector* flat, size_t s) {
    return flat->state_sizes[s] * dtype_bytes(OPTIMIZERS[flat->holds.optimizer->kind].states[s].dtype);
}

// Elements of the longest bucket whose parameters are gathered.
static inline size_t flat_longest(const FlatVector* flat) {
    size_t longest = 0;
    for (size_t b = 0; b < flat->count; b++)
        if (flat->buckets[b].sharded) longest = max_size(longest, flat->buckets[b].end - flat->buckets[b].first);
    return longest;
}

// Takes the rank's arrays from the plan.
static inline void flat_layout(FlatVector* flat, Arena* arena) {
    const FlatOptions* holds = &flat->holds;
    size_t sums = flat->sums_size, state = flat->master_size;
    bool exact = flat->options.reduce == REDUCE_EXACT;
    flat->params = (floatX*)arena_take(arena, "parameters (" FLOATX_NAME ")", flat->params_size * sizeof(floatX));
    for (size_t i = 0; i < 2 && flat->sharded > 0; i++)
        flat->gathered[i] = (floatX*)arena_take(arena, "gathered parameters", flat_longest(flat) * sizeof(floatX));
    flat->sums = (StepSums*)arena_take(arena, "sums", sizeof *flat->sums);
    if (!holds->training) return;
    if (flat_offloads(flat))
        flat->offloaded.store.slots = (char*)arena_take(arena, "buffers of the offloaded state",
                                                        offload_memory(&flat->offloaded.store));
    if (flat_has_masters(holds) && !holds->offload)
        flat->master_weights = (float*)arena_take(arena, "master weights (fp32)", state * sizeof(float));
    for (size_t s = 0; s < optimizer_states(holds->optimizer->kind) && !holds->offload; s++)
        flat->states[s] = arena_take(arena, "optimizer state", flat_state_bytes(flat, s));
    if (flat->scratch_floats > 0)
        flat->optimizer_scratch =
            (float*)arena_take(arena, "scratch of the optimizer", flat->scratch_floats * sizeof(float));
    if (exact) flat->exact = (int64_t*)arena_take(arena, "gradients (64-bit fixed point)", sums * sizeof(int64_t));
    else flat->grads = (float*)arena_take(arena, "gradients (fp32)", sums * sizeof(float));
    flat->checksums = (uint64_t*)arena_take(arena, "sums", flat->count * sizeof(uint64_t));
    flat_layout_staging(flat, arena);
}

// Called after flat_layout has been called over memory.
static inline bool flat_prepare(FlatVector* flat, Stream stream, Error* error) {
    flat->stream = stream;
    return !flat_offloads(flat) || offload_open(&flat->offloaded.store, flat->holds.offload_dir, flat->options.rank,
                                                flat->options.local_rank, stream, error);
}

// Sets the optimizer state to zero. False if the offloaded state cannot be accessed.
static inline bool flat_reset_optimizer(FlatVector* flat, Error* error) {
    if (flat_offloads(flat)) return offload_reset(&flat->offloaded, flat->stream, error);
    for (size_t s = 0; s < OPTIMIZER_STATES && flat->states[s]; s++)
        fill_zero(flat->states[s], flat_state_bytes(flat, s), flat->stream);
    return true;
}

// Called by all ranks together.
static inline bool flat_connect(FlatVector* flat, Error* error) {
    const RankOptions* o = &flat->options;
    bool divided = flat->dp_world < o->world || flat->copies > 1;  // then mesh_open has opened all groups
    const Collectives* with = NULL;  // the first: one stream for all of them
    for (size_t g = 0; g < GROUP_FORWARD_IN; g++) {
        const Transport* ranks = divided ? o->groups[g] : g == GROUP_SHARD ? o->transport : NULL;
        if (!collective_open(&flat->groups[g], ranks, 2 * flat->count, with, error)) return false;
        if (with == NULL && ranks && ranks->world > 1) with = &flat->groups[g];
    }
    return true;
}

// The collective slot of a bucket's reduction; the slots of the all-gathers follow.
static inline size_t flat_slot(const FlatVector* flat, const Bucket* bucket) {
    return (size_t)(bucket - flat->buckets);
}

// What of a bucket this rank saves, and whose gradients it squares: of what several have, one does.
static inline Slice flat_own(const FlatVector* flat, const Bucket* k) {
    Slice own = k->own;
    if (flat->tp_rank > 0) own.first = min_size(max_size(own.first, k->common_end), own.end);
    return own;
}

// Whether something of a bucket trains, on this rank.
static inline bool flat_has(const Bucket* k) { return k->here && k->first < k->end; }

// Where parameter `at` of the flat vector is kept, which must be here.
static inline floatX* flat_kept(const FlatVector* flat, const Bucket* k, size_t at) {
    size_t index = at < k->end ? at - k->kept.first : round_up(slice_length(k->kept), 64) + (at - k->end);
    return flat->params + k->kept_offset + index;
}

// The parameters of a tensor. Of a sharded bucket they are there from flat_await for it to flat_await for another.
static inline floatX* flat_param(const FlatVector* flat, const Tensor* t) {
    const Bucket* k = &flat->buckets[t->bucket];
    return k->sharded && t->trains ? flat->gathered[k->buffer] + (t->offset - k->first) : flat_kept(flat, k, t->offset);
}

// The part of elements [first, end) of a tensor, of its dtype, whose parameters are kept here, and where.
static inline Slice flat_kept_part(char** at, const FlatVector* flat, const Tensor* t, size_t first, size_t end) {
    const Bucket* k = &flat->buckets[t->bucket];
    Slice all = {0, tensor_stored(t)}, kept = t->trains ? tensor_part(t, k->kept) : all;
    Slice part = {max_size(first, kept.first), min_size(end, kept.end)};
    if (part.first >= part.end) part.first = part.end = first;
    *at = slice_length(part) == 0 ? NULL : t->trains ? (char*)flat_kept(flat, k, t->offset + part.first) :
        (char*)flat_kept(flat, k, t->offset) + part.first * dtype_bytes(t->dtype);
    return part;
}

// To be called when parameters have changed: what was gathered is old.
static inline void flat_forget(FlatVector* flat) {
    for (int i = 0; i < 2; i++)
        if (flat->gathered_of[i]) flat->gathered_of[i]->stale = true;
}

// Sets elements [first, first + n) of a tensor, from values on the host, as far as they are kept here.
static inline void flat_put(FlatVector* flat, const Tensor* t, size_t first, const floatX* values, size_t n) {
    char* at;
    Slice part = flat_kept_part(&at, flat, t, first, first + n);
    if (at) device_upload(at, values + (part.first - first), slice_length(part) * sizeof(floatX), flat->stream);
    flat_forget(flat);
}

// The part of elements [first, end) of a tensor whose master weights and state are here; its index in master_weights.
static inline Slice flat_master_part(size_t* index, const FlatVector* flat, const Tensor* t, size_t first, size_t end) {
    const Bucket* k = &flat->buckets[t->bucket];
    Slice part = {max_size(first, k->state.first), min_size(end, k->state.end)};
    if (part.first >= part.end) part.first = part.end = k->state.first;  // nothing
    *index = k->master_offset + (part.first - k->state.first);
    return part;
}

// Sets the master weights of elements [first, first + n) of a tensor that this rank holds, from values on the host.
static inline bool flat_set_masters(FlatVector* flat, TensorId id, size_t first, const float* values, size_t n,
                                    Error* error) {
    const Tensor* t = &flat->parameters->tensors[id.row];
    size_t index, at = t->offset + first;
    Slice part = flat_master_part(&index, flat, t, at, at + n);
    if (flat->master_weights && slice_length(part) > 0)
        device_upload(flat->master_weights + index, values + (part.first - at), slice_length(part) * sizeof(float),
                      flat->stream);
    return !flat_offloads(flat) ||
           offload_put(&flat->offloaded, values, OFFLOAD_MASTERS, id.row, first, first + n, flat->stream, error);
}

enum { INIT_PIECE = LLMTRAIN_PIECE(1 << 18, 61) };  // elements that are generated and uploaded at a time

// Sets elements [first, first + n) of a tensor, and their master weights, from values on the host. False if memory for
// a piece of them cannot be allocated, or an offloaded piece cannot be read or written.
static inline bool flat_set_params(FlatVector* flat, TensorId id, size_t first, const float* values, size_t n,
                                   Error* error) {
    floatX* rounded = (floatX*)memory_allocate(INIT_PIECE * sizeof(floatX));
    if (rounded == NULL) return fail_with(error, "out of memory for a piece of the weights");
    bool ok = true;
    for (size_t done = 0; ok && done < n; done += INIT_PIECE) {
        size_t count = min_size(INIT_PIECE, n - done), at = first + done;
        #pragma omp parallel for simd
        for (size_t i = 0; i < count; i++) rounded[i] = floatX_of(values[done + i]);
        flat_put(flat, &flat->parameters->tensors[id.row], at, rounded, count);
        ok = flat_set_masters(flat, id, at, values + done, count, error);
    }
    free(rounded);
    return ok;
}

// Initial weights, which depend only on the seed and an element's index (Tensor.init_index); with `adapters` of LoRA's
// pairs alone. False: out of memory.
static inline bool flat_randomize(FlatVector* flat, uint64_t seed, bool adapters, Error* error) {
    float* values = (float*)memory_allocate(INIT_PIECE * sizeof(float));
    if (values == NULL) return fail_with(error, "out of memory for a piece of the weights");
    bool ok = true;
    for (uint32_t i = 0; i < flat->parameters->count; i++) {
        const TensorId id = {i};
        const Tensor* t = &flat->parameters->tensors[i];
        size_t n = t->quantized || (adapters && !t->adapter) ? 0 : tensor_elements(t);
        for (size_t first = 0; ok && first < n; first += INIT_PIECE) {
            size_t count = min_size(INIT_PIECE, n - first);
            #pragma omp parallel for
            for (size_t e = 0; e < count; e++) {
                values[e] = t->init == INIT_ONE ? 1.0f : 0.0f;
                size_t whole = part_run(&t->part, first + e).whole;
                if (t->init == INIT_NORMAL)
                    values[e] = t->init_std * random_normal(seed, RANDOM_INIT, 0, t->init_index + whole);
                if (t->init == INIT_UNIFORM)
                    values[e] = t->init_std * (2 * random_uniform(seed, RANDOM_INIT, 0, t->init_index + whole) - 1);
            }
            ok = flat_set_params(flat, id, first, values, count, error);
        }
    }
    free(values);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 2. Gradients
//
// flat_begin_step; then for each micro-batch and each bucket, in an order that is the same on all ranks of a stage,
// flat_begin_bucket, the operations that add to flat_gradient, flat_end_bucket; after the last flat_finish_step. A
// bucket is reduced while the backward of the buckets before it runs; one that two stages have at the end, since the
// last stage would have to wait for the first.

// Zeroes the gradients of a bucket that the backward only adds to, and what lies between tensors.
static inline void flat_clear(FlatVector* flat, size_t bucket, float* grads) {
    const Bucket* k = &flat->buckets[bucket];
    size_t first = k->first, end = k->first;  // neighbors are cleared together
    bool adds = k->added || (k->split && flat->pp_rank == 0);  // the tied head's matmul is done, or another stage's
    if (!k->here) return;
    for (size_t i = 0; i < flat->parameters->count; i++) {
        const Tensor* t = &flat->parameters->tensors[i];
        if (t->bucket != bucket || !t->trains) continue;
        size_t begins = t->offset + (t->overwritten && !adds ? t->size : 0);
        if (begins != end) {
            if (end > first) fill_zero(grads + (first - k->first), (end - first) * sizeof(float), flat->stream);
            first = begins;
        }
        end = round_up(t->offset + t->size, 64);
    }
    if (end > first) fill_zero(grads + (first - k->first), (end - first) * sizeof(float), flat->stream);
}

static inline void flat_begin_step(FlatVector* flat, double loss_scale, size_t micro_batches) {
    flat->loss_scale = loss_scale;
    flat->micro_batches = micro_batches;
    flat->micro = 0;
    flat->tokens = flat->targets = 0;
    flat->mean_factor = 1;
    if (flat->exact) fill_zero(flat->exact, flat->sums_size * sizeof(int64_t), flat->stream);
    else if (flat_stages(flat)) fill_zero(flat->grads, flat->sums_size * sizeof(float), flat->stream);
    else for (size_t b = 0; b < flat->count; b++) flat_clear(flat, b, flat->grads + flat->buckets[b].sums_offset);
    fill_zero(flat->sums, sizeof *flat->sums, flat->stream);
}

// Each of the micro-batches: of so many tokens, of which `targets` count.
static inline void flat_begin_micro_batch(FlatVector* flat, size_t tokens, size_t targets) {
    flat->micro++;
    flat->tokens += tokens;
    flat->targets += targets;
}

// What the gradients of the step are to be multiplied by: its loss scale is taken off, and its mean is over targets.
static inline double flat_scale(const FlatVector* flat) { return flat->mean_factor / flat->loss_scale; }

// Whether the gradient of an overwritten tensor already holds a part of this step's sum.
static inline bool flat_adds(const FlatVector* flat, const Tensor* t) {
    return flat->staging[flat->buckets[t->bucket].staging].grads == NULL && flat->micro > 1;
}

// Where the backward adds the gradients of a bucket, between flat_begin_bucket and flat_end_bucket.
static inline float* flat_bucket_gradient(const FlatVector* flat, const Bucket* k) {
    float* staged = flat->staging[k->staging].grads;
    return staged ? staged : flat->grads + k->sums_offset;
}

// Where it adds those of a tensor; NULL if it does not train.
static inline float* flat_gradient(const FlatVector* flat, const Tensor* t) {
    const Bucket* k = &flat->buckets[t->bucket];
    return t->trains ? flat_bucket_gradient(flat, k) + (t->offset - k->first) : NULL;
}

// Waits for the reduction of a bucket, and adds the result in comm_buffer to this rank's gradients.
static inline void flat_collect(FlatVector* flat, Bucket* k) {
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    if (!k->reducing) return;
    collective_wait(flat_sharing(flat, k), flat_slot(flat, k), flat->stream);
    k->reducing = false;
    if (staging->comm_buffer == NULL) return;
    staging->pending = NULL;
    Slice reduced = o->stage == 0 ? k->sums : k->shard;
    size_t at = k->sums_offset + (reduced.first - k->sums.first), from = reduced.first - k->first;
    size_t n = slice_length(reduced);
    if (o->reduce == REDUCE_EXACT)
        exact_merge(flat->exact + at, (const int64_t*)staging->comm_buffer + from, n, flat->stream);
    else if (o->reduce == REDUCE_FLOAT)
        vector_add(flat->grads + at, (const float*)staging->comm_buffer + from, n, flat->stream);
    else if (o->stage >= 2)
        vector_add_stored(flat->grads + at, (const floatX*)staging->comm_buffer + from, n, flat->stream);
    else cast_to_float(flat->grads + at, (const floatX*)staging->comm_buffer + from, n, flat->stream);
}

// The summed gradients of a part of the rank's sums of a bucket, as floats, times the loss scale.
static inline const float* flat_summed(FlatVector* flat, const Bucket* k, Slice part) {
    size_t at = k->sums_offset + (part.first - k->sums.first);
    if (!flat->exact) return flat->grads + at;
    float* floats = flat->staging[k->staging].grads;
    exact_read(floats, flat->exact + at, flat->loss_scale / EXACT_SCALE, slice_length(part), flat->stream);
    return floats;
}

// After the last micro-batch: the summed gradients of this rank's shard of a bucket are added up over the copies, in
// place, as soon as they are here. Started when the backward of the next bucket is done, it runs during the rest of it.
static inline void flat_share(FlatVector* flat, Bucket* k) {
    if (flat->copies == 1 || !flat_has(k) || k->sharing) return;
    flat_collect(flat, k);
    size_t at = k->sums_offset + (k->shard.first - k->sums.first);
    void* sums = flat->exact ? (void*)(flat->exact + at) : (void*)(flat->grads + at);
    collective_start(&flat->groups[GROUP_COPIES], flat_slot(flat, k), COMM_ALL_REDUCE, sums, k->part_begins,
                     flat->exact ? DTYPE_I64 : DTYPE_F32, flat->stream);
    k->sharing = true;
}

// Start an exchange between the ranks of a group: all_to_all of n elements, and a collective in place (collectives.h).
// Return its slot, for collective_wait. The slots take turns: on a GPU the host waits for one that was used a few times.
static inline size_t flat_start_all_to_all(FlatVector* flat, RankGroup group, void* out, const void* in, size_t n,
                                           Dtype type, Stream stream) {
    size_t slot = flat->exchanges++ % (2 * flat->count);
    collective_all_to_all(&flat->groups[group], slot, out, in, n, type, stream);
    return slot;
}
static inline size_t flat_start_exchange(FlatVector* flat, RankGroup group, CommOperation operation, void* data,
                                         const size_t* cuts, Dtype type, Stream stream) {
    size_t slot = flat->exchanges++ % (2 * flat->count);
    collective_start(&flat->groups[group], slot, operation, data, cuts, type, stream);
    return slot;
}

static inline void flat_wait(FlatVector* flat, RankGroup group, size_t slot, Stream stream) {
    collective_wait(&flat->groups[group], slot, stream);
}

// What of a bucket's summed gradients is here of what ranks with other parts have too.
static inline Slice flat_common(const FlatVector* flat, const Bucket* k) {
    Slice reduced = flat->options.stage == 0 ? k->sums : k->shard;
    reduced.end = max_size(reduced.first, min_size(reduced.end, k->common_end));
    return reduced;
}

// Adds that up, in place: each of these ranks has the gradients of its rows. It comes last, so that all of them have
// the same bits, in whatever order the reductions before it add floats.
static inline void flat_reduce_common(FlatVector* flat, const Bucket* k) {
    Slice common = flat_common(flat, k);
    size_t n = slice_length(common), at = k->sums_offset + (common.first - k->sums.first), cuts[RANKS_TP_MAX + 1];
    void* sums = flat->exact ? (void*)(flat->exact + at) : (void*)(flat->grads + at);
    if (n == 0) return;
    for (size_t r = 0; r <= flat->tp; r++) cuts[r] = r < flat->tp ? shard_slice(n, r, flat->tp).first : n;
    size_t slot = flat_start_exchange(flat, GROUP_TENSOR, COMM_ALL_REDUCE, sums, cuts,
                                      flat->exact ? DTYPE_I64 : DTYPE_F32, flat->stream);
    flat_wait(flat, GROUP_TENSOR, slot, flat->stream);
}

// After the last micro-batch: waits for the reduction of a bucket, and sums the squares of its own slice's gradients.
static inline void flat_square(FlatVector* flat, Bucket* k) {
    if (!flat_has(k)) return;
    flat_collect(flat, k);
    if (k->sharing) collective_wait(&flat->groups[GROUP_COPIES], flat_slot(flat, k), flat->stream);
    k->sharing = false;
    flat_reduce_common(flat, k);
    Slice own = flat_own(flat, k);
    exact_sum_squares(&flat->sums->squares, flat_summed(flat, k, own), slice_length(own), flat->stream);
}

static inline void flat_begin_bucket(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    Staging* staging = &flat->staging[k->staging];
    if (staging->grads == NULL || !flat_has(k)) return;
    if (staging->grads == staging->comm_buffer && staging->pending) flat_collect(flat, staging->pending);
    flat_clear(flat, bucket, staging->grads);
}

// Adds the gradients in a bucket's staging buffer to sums in fixed point: its own, or those in comm_buffer. part: of
// the bucket, in the flat vector; more: others of this micro-batch will follow.
static inline void flat_add_exact(FlatVector* flat, Bucket* k, Slice part, bool more) {
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    size_t at = part.first - k->first, parts = ranks_row_leaves(o) * ranks_all_leaves(o);  // the most that a tensor has
    if (k == flat->buckets && flat->parameters->tied) parts *= 2;
    int64_t* fixed = staging->comm_buffer ? (int64_t*)staging->comm_buffer : flat->exact + k->sums_offset;
    double limit = EXACT_LIMIT * flat->loss_scale / (double)(parts * flat->micro_batches * flat->stage_world);
    if (staging->comm_buffer && !k->added) {
        if (staging->pending) flat_collect(flat, staging->pending);
        fill_zero(fixed, (k->end - k->first) * sizeof(int64_t), flat->stream);
    }
    exact_add(fixed + at, &flat->sums->bad, staging->grads + at, EXACT_SCALE / flat->loss_scale, limit,
              slice_length(part), flat->stream);
    k->added = more;
}

// Parts of this rank's rows whose gradients of a tensor are converted to fixed point one by one: flat_end_leaf after
// each but the last, which flat_end_bucket converts with all else. What tensor parallelism does not divide has the
// gradients of fewer rows on each rank.
static inline size_t flat_leaves(const FlatVector* flat, const Tensor* t) {
    const RankOptions* o = &flat->options;
    return flat->discards ? 1 : t->part.by == SPLIT_NONE ? ranks_leaves(o) : ranks_row_leaves(o);
}

static inline void flat_end_leaf(FlatVector* flat, const Tensor* t) {
    Bucket* k = &flat->buckets[t->bucket];
    Slice part = {t->offset, t->offset + round_up(t->size, 64)};
    if (!t->trains) return;
    flat_add_exact(flat, k, part, true);
    fill_zero(flat_gradient(flat, t), slice_length(part) * sizeof(float), flat->stream);
}

// Called when the head's gradients are done, if the head is tied: the embedding's are added separately, as in a
// pipeline, whose first and last stage have one of the two each.
static inline void flat_end_head(FlatVector* flat) {
    Bucket* k = &flat->buckets[0];
    Slice whole = {k->first, k->end};
    if (flat->options.reduce != REDUCE_EXACT || flat->discards || !flat_has(k)) return;
    flat_add_exact(flat, k, whole, true);
    flat_clear(flat, 0, flat->staging[k->staging].grads);
}

// Starts the reduction of a bucket over the ranks that share a copy of it.
static inline void flat_reduce(FlatVector* flat, Bucket* k) {
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    void* summed = flat->exact ? (void*)(flat->exact + k->sums_offset) : (void*)(flat->grads + k->sums_offset);
    collective_start(flat_sharing(flat, k), flat_slot(flat, k), o->stage == 0 ? COMM_ALL_REDUCE : COMM_REDUCE_SCATTER,
                     staging->comm_buffer ? staging->comm_buffer : summed, k->shard_begins, reduce_type(o->reduce),
                     flat->stream);
    k->reducing = true;
    if (staging->comm_buffer) staging->pending = k;
    fault_point("reduce");
}

// Called when the backward of the bucket is done: adds its gradients to the rank's sums, and starts a due reduction.
static inline void flat_end_bucket(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    size_t n = k->end - k->first;
    Slice whole = {k->first, k->end};
    if (!flat_has(k)) return;
    if (flat->discards) {
        exact_sum_squares(&flat->sums->squares, flat_bucket_gradient(flat, k), n, flat->stream);
        return;
    }
    bool reduces = o->stage >= 2 || flat->micro == flat->micro_batches;
    if (o->reduce == REDUCE_EXACT) flat_add_exact(flat, k, whole, false);
    else if (reduces && staging->comm_buffer && staging->pending) flat_collect(flat, staging->pending);
    if (reduces && o->reduce == REDUCE_STORAGE) {
        cast_from_float((floatX*)staging->comm_buffer, staging->grads ? staging->grads : flat->grads + k->sums_offset,
                        n, flat->stream);
    }
    if (!reduces || k->split) return;
    flat_reduce(flat, k);
    // One rank does not wait for others: it squares while caches still hold a part of what the backward wrote.
    if (k->owners == 1 && flat->micro == flat->micro_batches) flat_square(flat, k);
    bool next = bucket + 1 < flat->count && flat->micro == flat->micro_batches;
    if (next && k[1].reducing) flat_share(flat, k + 1);  // otherwise its weights' gradients are computed later
}

// After the last micro-batch: squares the gradients of the buckets where that is not done yet, and reads flat->sums.
// Only here does the host wait for the device in a step; device_upload_batch keeps it at most two micro-batches ahead.
static inline void flat_finish_step(FlatVector* flat) {
    if (flat->buckets[0].split && flat_has(&flat->buckets[0])) flat_reduce(flat, &flat->buckets[0]);
    for (size_t b = flat->count; b-- > 0;) flat_share(flat, &flat->buckets[b]);
    for (size_t b = flat->count; b-- > 0;)
        if (flat->buckets[b].owners > 1) flat_square(flat, &flat->buckets[b]);
    device_download(&flat->sums_host, flat->sums, sizeof flat->sums_host, flat->stream);
}

// ------------------------------------------------------------------------------------------------
// 3. Parameters

// A part of tensor i to be updated, which may be empty: n is 0 then. grads: of the bucket's state slice. It has no
// master weights and states where these are offloaded.
static inline OptimizerSlice flat_optimizer_slice(const FlatVector* flat, size_t i, Slice part, const float* grads) {
    const Tensor* t = &flat->parameters->tensors[i];
    Slice state = flat->buckets[t->bucket].state;
    OptimizerSlice slice;
    memset(&slice, 0, sizeof slice);
    // The padding of the vocabulary stays 0. Its states are in no checkpoint, and must not affect the scale of a block.
    part.end = min_size(part.end, tensor_elements(t));
    if (!t->trains || part.first >= part.end) return slice;
    size_t index;
    slice.first = t->offset + part.first;
    slice.n = slice_length(part);  // all of it where optimizer_whole says so
    slice.shape = t->shape;
    slice.no_decay = !t->decays;
    slice.lr_factor = t->adapter == 'b' ? (float)flat->holds.optimizer->lora_plus : 0;
    slice.params = flat_kept(flat, &flat->buckets[t->bucket], slice.first);
    flat_master_part(&index, flat, t, slice.first, t->offset + part.end);
    if (flat->master_weights) slice.master_weights = flat->master_weights + index;
    slice.grads = grads + (slice.first - state.first);
    slice.scratch = flat->optimizer_scratch;
    for (size_t s = 0; s < optimizer_states(flat->holds.optimizer->kind); s++) {
        const StatePart* held = &flat->state_parts[i][s];
        size_t size = dtype_bytes(OPTIMIZERS[flat->holds.optimizer->kind].states[s].dtype);
        if (held->count > 0 && flat->states[s]) slice.states[s] = (char*)flat->states[s] + held->offset * size;
    }
    return slice;
}

// Updates what this rank holds of tensor i, part by part, as its offloaded states are read.
static inline void flat_update_offloaded(FlatVector* flat, size_t i, const float* grads, const OptimizerStep* step) {
    OffloadStates* away = &flat->offloaded;
    for (size_t k = away->first[i]; k < away->first[i + 1]; k++) {
        OptimizerSlice slice = flat_optimizer_slice(flat, i, away->parts[k].elements, grads);
        if (!offload_update(away, &away->parts[k], &slice)) return;
        if (slice.n > 0) optimizer_update(&slice, step, flat->stream);
    }
}

static inline void flat_await_gathering(FlatVector* flat, Bucket* k) {
    if (k->gathering) collective_wait(flat_sharing(flat, k), flat->count + flat_slot(flat, k), flat->stream);
    k->gathering = false;
}

// Starts to gather the parameters of a sharded bucket, in place of another's in its buffer, unless they are there.
static inline void flat_gather(FlatVector* flat, Bucket* k) {
    Bucket** there = &flat->gathered_of[k->buffer];
    floatX* all = flat->gathered[k->buffer];
    if (*there == k && !k->stale) return;
    if (*there) flat_await_gathering(flat, *there);
    device_copy(all + (k->shard.first - k->first), flat_kept(flat, k, k->shard.first),
                slice_length(k->shard) * sizeof(floatX), flat->stream);
    collective_start(flat_sharing(flat, k), flat->count + flat_slot(flat, k), COMM_ALL_GATHER, all, k->shard_begins,
                     FLOATX_DTYPE, flat->stream);
    k->gathering = true;
    k->stale = false;
    *there = k;
    fault_point("gather");
}

// The same for the sharded bucket that is used after this one.
static inline void flat_gather_next(FlatVector* flat, size_t bucket) {
    size_t step = flat->backward ? SIZE_MAX : 1;  // -1
    for (size_t b = bucket + step; b < flat->count; b += step) {
        if (!flat->buckets[b].sharded) continue;
        flat_gather(flat, &flat->buckets[b]);
        return;
    }
}

static inline void flat_gather_first(FlatVector* flat) {
    flat->awaited = 0;
    flat->backward = false;
    flat_gather_next(flat, 0);
}

// One optimizer step over the slices whose state this rank holds. The other ranks' slices are gathered meanwhile:
// flat_await waits for them. If the offloaded state cannot be accessed, the step is incomplete; flat_check reports it.
//
// All tensors are updated together where nothing has to happen in between: a bucket that is to be gathered is updated
// before the next one, and so is one whose summed gradients lie in a staging buffer.
static inline void flat_update(FlatVector* flat, const OptimizerStep* step) {
    const Parameters* p = flat->parameters;
    bool together = flat->options.stage == 0 && !flat->exact;
    size_t i = 0, count = 0;
    for (size_t b = 0; b < flat->count; b++) {
        Bucket* k = &flat->buckets[b];
        const float* grads = flat_has(k) ? flat_summed(flat, k, k->state) : NULL;
        for (; i < p->count && p->tensors[i].bucket == b; i++) {
            if (flat_offloads(flat)) {
                flat_update_offloaded(flat, i, grads, step);
                continue;
            }
            OptimizerSlice slice = flat_optimizer_slice(flat, i, tensor_part(&p->tensors[i], k->state), grads);
            if (slice.n > 0) flat->slices[count++] = slice;
        }
        if (together && b + 1 < flat->count) continue;
        optimizer_update_list(flat->slices, count, step, flat->stream);
        count = 0;
        if (flat->options.stage == 0 || !flat_has(k) || k->sharded) continue;
        collective_start(flat_sharing(flat, k), flat->count + flat_slot(flat, k), COMM_ALL_GATHER,
                         flat_kept(flat, k, k->first), k->shard_begins, FLOATX_DTYPE, flat->stream);
        k->gathering = true;
        fault_point("gather");
    }
    flat_forget(flat);
    flat_gather_first(flat);
    if (!flat_offloads(flat)) return;
    offload_release(&flat->offloaded);
    offload_ahead(&flat->offloaded.store, 0, OFFLOAD_AHEAD);  // of the next step
}

// Makes the parameters of a bucket ready to be used: the stream waits for their all-gather. What is used next, if it is
// sharded, is gathered meanwhile.
static inline void flat_await(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    if (bucket == 0) flat_gather_first(flat);  // a forward begins
    if (k->sharded) {
        if (bucket != flat->awaited) flat->backward = bucket < flat->awaited;
        flat->awaited = bucket;
        flat_gather(flat, k);
    }
    flat_await_gathering(flat, k);
    if (k->sharded) flat_gather_next(flat, bucket);
}

// For a rank that has nothing to compute while others go forward: takes part in the gathering of parameters.
static inline void flat_accompany(FlatVector* flat) {
    for (size_t b = 0; b < flat->count; b++) flat_await(flat, b);
}

// Whether the updates so far are complete: what is offloaded could be read and written.
static inline bool flat_check(FlatVector* flat, Error* error) {
    return !flat_offloads(flat) || offload_check(&flat->offloaded.store, error);
}

// Waits for all parameters; false if a fault has kept some from arriving.
static inline bool flat_await_all(FlatVector* flat, Error* error) {
    for (size_t b = 0; b < flat->count; b++) flat_await_gathering(flat, &flat->buckets[b]);
    device_wait(flat->stream);
    for (size_t g = 0; g < GROUPS; g++)
        if (!collective_check(&flat->groups[g], error)) return false;
    return flat_check(flat, error);
}

// Waits until all ranks have come here; see collective_barrier.
static inline void flat_barrier(FlatVector* flat) {
    for (size_t g = 0; g < GROUPS && !collective_barrier(&flat->groups[g]); g++) {}
}

// What this rank has sent so far, in bytes.
static inline uint64_t flat_bytes_so_far(const FlatVector* flat) {
    uint64_t bytes = 0;
    for (size_t g = 0; g < GROUPS; g++) bytes += collective_bytes_sent(&flat->groups[g]);
    return bytes;
}

// Bytes that this rank sends in a step of `micro_batches` to gather parameters. Of sharded buckets the first two that a
// forward or backward uses are still there from the one before it.
static inline size_t flat_bytes_gathered(const FlatVector* flat, size_t micro_batches) {
    size_t elements = 0, i = 0, n = flat->sharded;
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        size_t times = 1;
        if (k->sharded) {
            times = 2 * micro_batches - (i < 2 ? micro_batches - 1 : 0) - (i + 2 >= n ? micro_batches : 0);
            i++;
        }
        elements += times * slice_length(k->shard) * (k->shard_world - 1);
    }
    return flat->options.stage == 0 ? 0 : elements * sizeof(floatX);
}

// Bytes that it sends in a step of `micro_batches`.
static inline size_t flat_bytes_sent(const FlatVector* flat, size_t micro_batches) {
    const RankOptions* o = &flat->options;
    size_t elements = 0, copied = 0, common = 0, size = dtype_bytes(reduce_type(o->reduce));
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        size_t own = slice_length(k->own), shard = slice_length(k->shard);
        if (!k->here) continue;
        elements += k->end - k->first - shard + (o->stage == 0 ? own * (k->owners - 1) : 0);
        size_t n = slice_length(flat_common(flat, k)), mine = slice_length(shard_slice(n, flat->tp_rank, flat->tp));
        common += n - mine + mine * (flat->tp - 1);
        copied += shard - own + own * (flat->copies - 1);
    }
    return size * elements * (o->stage >= 2 ? micro_batches : 1) + flat_bytes_gathered(flat, micro_batches) +
           (copied + common) * (o->reduce == REDUCE_EXACT ? sizeof(int64_t) : sizeof(float));
}

#endif  // LLMTRAIN_ZERO_H
