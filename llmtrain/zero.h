// zero.h: the flat vector over the ranks of a run.
//
//   1. flat vector   what a rank holds of parameters, gradients, master weights and optimizer state
//   2. gradients     summed bucket by bucket, under the backward
//   3. parameters    updated by who owns them, gathered under the next forward
//   4. agreement     what the ranks tell each other once a step; whether their parameters are the same
//
// The stages are those of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". With N ranks:
//
//   stage   gradients   master_weights, optimizer state   a step sends, per element of the vector
//     0     whole       whole              2 (N-1)/N sums                             (all-reduce)
//     1     whole       1/N                (N-1)/N sums, once a step, and parameters  (reduce-scatter, all-gather)
//     2     1/N         1/N                (N-1)/N sums, every micro-batch, and parameters
//
// Every rank has all parameters. In stage 2 the backward adds to staging memory of a bucket's size, three of them: one for
// the embeddings (with a tied head they gather gradients from the first to the last of the backward, and with two they
// would have to travel twice), two for the blocks in turn. See flat_layout_staging for the other stages.
//
// Sums over micro-batches and ranks are made in one of three ways:
//   float     as they come: first over micro-batches and then over ranks, in stage 2 the other way round
//   storage   the same, but gradients travel in floatX
//   exact     in fixed point, 64 bits: no order and no grouping changes a bit, so that the weights depend neither on the
//             stage nor on how NCCL adds
// With one rank the code is the same, and the collectives do nothing.

#ifndef LLMTRAIN_ZERO_H
#define LLMTRAIN_ZERO_H

#include "fault.h"
#include "parameters.h"
#if defined(LLMTRAIN_CUDA) && defined(LLMTRAIN_NCCL)
#include "nccl.cuh"
#else
#include "collectives.h"
#endif

// ------------------------------------------------------------------------------------------------
// 1. The flat vector

typedef enum { REDUCE_FLOAT, REDUCE_STORAGE, REDUCE_EXACT } ReduceKind;

typedef struct {
    Comm* comm;         // NULL: one rank, or only a plan is wanted
    size_t rank, world; // 0 of 0 means 0 of 1
    size_t local_rank;  // among those of this machine: chooses the device
    size_t stage;       // of ZeRO: 0 to 2
    ReduceKind reduce;
} RankOptions;

typedef struct {
    size_t first, end;        // in the flat vector, as all slices here
    CommSlice own;            // this rank's
    CommSlice sums;           // whose summed gradients are here: all of it in stages 0 and 1, own in stage 2
    CommSlice state;          // whose master weights and optimizer state are here: all of it in stage 0, else own
    size_t sums_place, state_place;  // where these begin in grads or exact; in master_weights, m and v
    size_t staging;           // which one it uses
    bool reducing, gathering; // a collective is under way
} Bucket;

typedef struct {
    float* adds;              // the backward of a bucket adds here; NULL: to grads
    void* travel;             // what the collective reduces, which may be `adds`; NULL: the sums themselves
    Bucket* user;             // whose gradients are in `travel`; NULL: nobody's
} Staging;

enum { STAGING_ENDS, STAGING_EVEN, STAGING_ODD, STAGINGS };

typedef struct {
    RankOptions options;
    Bucket* buckets;          // (count): the embeddings, the blocks, the final norm and the head
    size_t count;
    size_t sums_size, state_size;  // elements: whose summed gradients, and whose master weights and optimizer state, are here
    floatX* params;           // (flat_size)
    float* master_weights;           // (state_size); NULL where params are float themselves, or not wanted
    float* states[OPTIMIZER_STATES];  // (state_size) of the optimizer, named by its row of OPTIMIZERS; NULL: it has fewer
    float* grads;             // (sums_size); NULL with REDUCE_EXACT
    int64_t* exact;           // (sums_size) in fixed point; NULL without it
    Staging staging[STAGINGS];
    double* scalars;          // (SUM_SQUARES + count) on the device: what the host reads once per step
    uint64_t* checksums;      // (count) on the device
    double* scalars_host;     // (SUM_SQUARES + count): the same after flat_finish_step
    double* stats;             // (world, STATS_MAX) on the host: what the ranks told each other last
    double* sorted;           // (world) on the host, to find the middle of such numbers
    double step_began_ms, waited_ms;  // the last model_read: when it was, and what the host had waited until then
    uint64_t* compared;       // (world, count) on the host: checksums of all ranks
    Collectives collectives;
    double loss_scale;        // of the step in progress
    size_t micro_batches, micro;  // of this rank in the step: all, and begun
    Stream stream;
} FlatVector;

// Of FlatVector.scalars: the sum of the micro-batches' mean losses; 1 if a gradient did not fit fixed point; and from
// SUM_SQUARES on the squares of the gradients of every bucket's own slice.
enum { SUM_LOSS, SUM_BAD, SUM_SQUARES };

// Fixed point: elements are multiples of 2^-50 after the loss scale is taken off, about 1e-15, and sums stay below 2^12, so
// that 63 bits hold them. A step with a larger one, or with a NaN, has the norm NaN and is skipped.
#define EXACT_SCALE 0x1p50
#define EXACT_LIMIT 0x1p12

static inline size_t slice_length(CommSlice s) { return s.end - s.first; }

static inline CommType reduce_type(ReduceKind reduce) {
    return reduce == REDUCE_EXACT ? COMM_INT64 : reduce == REDUCE_STORAGE ? FLOATX_DTYPE : COMM_FLOAT;
}

// The table of buckets; allocates nothing on the device.
static inline bool flat_create(FlatVector* flat, const Parameters* p, const RankOptions* options, Error* error) {
    size_t count = p->tensors[p->count - 1].bucket + 1;
    bool tied = p->head_weight == p->token_embedding;
    memset(flat, 0, sizeof *flat);
    flat->options = *options;
    flat->options.world = max_size(options->world, 1);
    flat->count = count;
    flat->buckets = (Bucket*)allocate(count * sizeof(Bucket));
    if (flat->buckets == NULL) return fail(error, "out of memory for the table of buckets");
    for (size_t i = p->count; i-- > 0;) flat->buckets[p->tensors[i].bucket].first = p->tensors[i].offset;
    for (size_t b = 0; b < count; b++) {
        Bucket* k = &flat->buckets[b];
        k->end = b + 1 < count ? flat->buckets[b + 1].first : p->flat_size;
        CommSlice whole = {k->first, k->end}, slice = shard_slice(k->end - k->first, options->rank, flat->options.world);
        k->own.first = k->first + slice.first;
        k->own.end = k->first + slice.end;
        k->sums = options->stage < 2 ? whole : k->own;
        k->state = options->stage < 1 ? whole : k->own;
        k->sums_place = flat->sums_size;
        k->state_place = flat->state_size;
        flat->sums_size += slice_length(k->sums);
        flat->state_size += slice_length(k->state);
        bool end = b == 0 || (b + 1 == count && !tied);
        k->staging = end ? STAGING_ENDS : b % 2 == 0 ? STAGING_EVEN : STAGING_ODD;
    }
    return true;
}

static inline void flat_free(FlatVector* flat) {
    collective_close(&flat->collectives);
    free(flat->buckets);
    free(flat->scalars_host);
    free(flat->stats);
    free(flat->sorted);
    free(flat->compared);
    memset(flat, 0, sizeof *flat);
}

// What staging memory there is, by stage and kind of sum:
//
//   stage 0, 1   float     none: the backward adds to grads, which travel themselves
//                storage   travel, in floatX
//                exact     adds; the sums in fixed point travel themselves
//   stage 2      float     adds, which travel themselves
//                storage   adds and travel
//                exact     adds and travel
static inline void flat_layout_staging(FlatVector* flat, MemoryPlan* plan) {
    const RankOptions* o = &flat->options;
    const char* name = "staging of gradients";
    bool adds = o->stage == 2 || o->reduce == REDUCE_EXACT, same = o->stage == 2 && o->reduce == REDUCE_FLOAT;
    bool travels = o->stage == 2 || o->reduce == REDUCE_STORAGE;
    size_t most[STAGINGS] = {0, 0, 0};
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        most[k->staging] = max_size(most[k->staging], k->end - k->first);
    }
    most[STAGING_EVEN] = most[STAGING_ODD] = max_size(most[STAGING_EVEN], most[STAGING_ODD]);
    for (int s = 0; s < STAGINGS; s++) {
        Staging* staging = &flat->staging[s];
        // What does not travel itself is free again at the end of its bucket, so that the blocks need one only.
        if (adds && s == STAGING_ODD && !same) staging->adds = flat->staging[STAGING_EVEN].adds;
        else if (adds) staging->adds = (float*)plan_take(plan, name, most[s] * sizeof(float));
        if (same) staging->travel = staging->adds;
        else if (travels) staging->travel = plan_take(plan, name, most[s] * comm_type_size(reduce_type(o->reduce)));
    }
}

// Takes what the rank holds from the plan.
static inline void flat_layout(FlatVector* flat, const Parameters* p, MemoryPlan* plan, bool training, bool master_weights,
                               OptimizerKind optimizer) {
    size_t sums = flat->sums_size, state = flat->state_size;
    bool exact = flat->options.reduce == REDUCE_EXACT;
    flat->params = (floatX*)plan_take(plan, "parameters (" FLOATX_NAME ")", p->flat_size * sizeof(floatX));
    flat->scalars = (double*)plan_take(plan, "sums", (SUM_SQUARES + flat->count) * sizeof(double));
    if (!training) return;
    if (master_weights && !FLOATX_IS_FLOAT)
        flat->master_weights = (float*)plan_take(plan, "master weights (fp32)", state * sizeof(float));
    for (size_t s = 0; s < optimizer_states(optimizer); s++)
        flat->states[s] = (float*)plan_take(plan, "optimizer state (fp32)", state * sizeof(float));
    if (exact) flat->exact = (int64_t*)plan_take(plan, "gradients (64-bit fixed point)", sums * sizeof(int64_t));
    else flat->grads = (float*)plan_take(plan, "gradients (fp32)", sums * sizeof(float));
    flat->checksums = (uint64_t*)plan_take(plan, "sums", flat->count * sizeof(uint64_t));
    flat_layout_staging(flat, plan);
}

enum { STATS_MAX = 7 };  // numbers that a rank tells the others at a time, at most

// After flat_layout has been called over memory.
static inline bool flat_prepare(FlatVector* flat, Stream stream, Error* error) {
    flat->stream = stream;
    flat->scalars_host = (double*)allocate((SUM_SQUARES + flat->count) * sizeof(double));
    flat->stats = (double*)allocate(flat->options.world * STATS_MAX * sizeof(double));
    flat->sorted = (double*)allocate(flat->options.world * sizeof(double));
    flat->compared = (uint64_t*)allocate(flat->options.world * flat->count * sizeof(uint64_t));
    if (flat->scalars_host == NULL || flat->stats == NULL || flat->sorted == NULL || flat->compared == NULL)
        return fail(error, "out of memory for the numbers of %zu ranks", flat->options.world);
    return true;
}

// Forgets what the optimizer has seen.
static inline void flat_forget(FlatVector* flat) {
    for (size_t s = 0; s < OPTIMIZER_STATES && flat->states[s]; s++)
        fill_zero(flat->states[s], flat->state_size * sizeof(float), flat->stream);
}

// All ranks together.
static inline bool flat_connect(FlatVector* flat, Error* error) {
    return collective_open(&flat->collectives, flat->options.comm, 2 * flat->count, flat->stream, error);
}

// The slot of a bucket's reduction; that of its gathering follows all of those.
static inline size_t flat_slot(const FlatVector* flat, const Bucket* bucket) { return (size_t)(bucket - flat->buckets); }

// The bucket that holds an element.
static inline Bucket* flat_bucket(const FlatVector* flat, size_t offset) {
    size_t low = 0, high = flat->count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (flat->buckets[middle].first <= offset) low = middle;
        else high = middle;
    }
    return &flat->buckets[low];
}

// The part of [first, end), a piece of one bucket, whose master weights and optimizer state are here, and where it begins among them.
static inline CommSlice flat_state(size_t* place, const FlatVector* flat, size_t first, size_t end) {
    const Bucket* k = flat_bucket(flat, first);
    CommSlice part = {max_size(first, k->state.first), min_size(end, k->state.end)};
    if (part.first >= part.end) part.first = part.end = k->state.first;  // nothing
    *place = k->state_place + (part.first - k->state.first);
    return part;
}

// ------------------------------------------------------------------------------------------------
// 2. Gradients
//
// flat_begin_step; then for each micro-batch and each bucket, in the order in which all ranks come to them,
// flat_begin_bucket, the operations that add to flat_gradient, flat_end_bucket; after the last flat_finish_step. A bucket's
// sum travels while the backward of the buckets before it goes on.

// Milliseconds that this rank has waited for others since it was last asked; to be asked after the host has waited for the
// stream.
static inline double flat_waited_ms(FlatVector* flat) {
    double before = flat->waited_ms;
    if (flat->options.comm) flat->waited_ms = comm_statistics(flat->options.comm).waited_ms;
    return flat->waited_ms - before + collective_waited_ms(&flat->collectives);
}

// What has come before is no part of a step's time: set-up, a validation, a save.
static inline void flat_start_clock(FlatVector* flat) {
    flat_waited_ms(flat);
    flat->step_began_ms = now_ms();
}

static inline void flat_begin_step(FlatVector* flat, double loss_scale, size_t micro_batches) {
    if (flat->step_began_ms == 0) flat_start_clock(flat);
    flat->loss_scale = loss_scale;
    flat->micro_batches = micro_batches;
    flat->micro = 0;
    if (flat->exact) fill_zero(flat->exact, flat->sums_size * sizeof(int64_t), flat->stream);
    else fill_zero(flat->grads, flat->sums_size * sizeof(float), flat->stream);
    fill_zero(flat->scalars, (SUM_SQUARES + flat->count) * sizeof(double), flat->stream);
}

// Where the backward adds the gradient of a tensor that begins at `offset`, between flat_begin_bucket and flat_end_bucket.
static inline float* flat_gradient(const FlatVector* flat, size_t offset) {
    const Bucket* k = flat_bucket(flat, offset);
    float* adds = flat->staging[k->staging].adds;
    return adds ? adds + (offset - k->first) : flat->grads + offset;
}

// Waits for the sum of a bucket, and adds what has travelled to the rank's sums.
static inline void flat_collect(FlatVector* flat, Bucket* k) {
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    if (!k->reducing) return;
    collective_wait(&flat->collectives, flat_slot(flat, k), flat->stream);
    k->reducing = false;
    if (staging->travel == NULL) return;
    staging->user = NULL;
    CommSlice came = o->stage == 0 ? k->sums : k->own;
    size_t place = k->sums_place + (came.first - k->sums.first), from = came.first - k->first, n = slice_length(came);
    if (o->reduce == REDUCE_EXACT)
        exact_merge(flat->exact + place, (const int64_t*)staging->travel + from, n, flat->stream);
    else if (o->reduce == REDUCE_FLOAT) add(flat->grads + place, (const float*)staging->travel + from, n, flat->stream);
    else if (o->stage == 2) add_stored(flat->grads + place, (const floatX*)staging->travel + from, n, flat->stream);
    else cast_to_float(flat->grads + place, (const floatX*)staging->travel + from, n, flat->stream);
}

static inline void flat_begin_bucket(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    Staging* staging = &flat->staging[k->staging];
    if (staging->adds == NULL) return;
    if (staging->adds == staging->travel && staging->user) flat_collect(flat, staging->user);
    fill_zero(staging->adds, (k->end - k->first) * sizeof(float), flat->stream);
}

// The backward of the bucket is done: its gradients go into the sums, or on their way.
static inline void flat_end_bucket(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    Staging* staging = &flat->staging[k->staging];
    const RankOptions* o = &flat->options;
    size_t n = k->end - k->first;
    bool leaves = o->stage == 2 || flat->micro == flat->micro_batches;
    if (leaves && staging->travel && staging->user) flat_collect(flat, staging->user);
    if (o->reduce == REDUCE_EXACT) {
        int64_t* fixed = staging->travel ? (int64_t*)staging->travel : flat->exact + k->sums_place;
        double limit = EXACT_LIMIT * flat->loss_scale / (double)(flat->micro_batches * o->world);
        if (staging->travel) fill_zero(fixed, n * sizeof(int64_t), flat->stream);
        exact_add(fixed, flat->scalars + SUM_BAD, staging->adds, EXACT_SCALE / flat->loss_scale, limit, n, flat->stream);
    } else if (leaves && o->reduce == REDUCE_STORAGE) {
        cast_from_float((floatX*)staging->travel, staging->adds ? staging->adds : flat->grads + k->sums_place, n,
                        flat->stream);
    }
    if (!leaves) return;
    void* summed = flat->exact ? (void*)(flat->exact + k->sums_place) : (void*)(flat->grads + k->sums_place);
    void* data = staging->travel ? staging->travel : summed;
    CommType type = reduce_type(o->reduce);
    if (o->stage == 0) collective_all_reduce(&flat->collectives, flat_slot(flat, k), data, n, type, flat->stream);
    else collective_reduce_scatter(&flat->collectives, flat_slot(flat, k), data, n, type, flat->stream);
    k->reducing = true;
    if (staging->travel) staging->user = k;
    fault_point("reduce");
}

// The summed gradients of a part of the rank's sums of a bucket, as floats, times the loss scale.
static inline const float* flat_summed(FlatVector* flat, const Bucket* k, CommSlice part) {
    size_t place = k->sums_place + (part.first - k->sums.first);
    if (!flat->exact) return flat->grads + place;
    float* floats = flat->staging[k->staging].adds;
    exact_read(floats, flat->exact + place, flat->loss_scale / EXACT_SCALE, slice_length(part), flat->stream);
    return floats;
}

// After the last micro-batch: waits for all gradients, in the order in which they left, squares those of the own slices,
// and reads flat->scalars. The one place of a step where the host waits for what the device has to compute; beside it
// upload_batch keeps the host at most two micro-batches ahead.
static inline void flat_finish_step(FlatVector* flat) {
    for (size_t b = flat->count; b-- > 0;) {
        Bucket* k = &flat->buckets[b];
        flat_collect(flat, k);
        sum_of_squares(flat->scalars + SUM_SQUARES + b, flat_summed(flat, k, k->own), slice_length(k->own), flat->stream);
    }
    download(flat->scalars_host, flat->scalars, (SUM_SQUARES + flat->count) * sizeof(double), flat->stream);
}

// ------------------------------------------------------------------------------------------------
// 3. Parameters

// One optimizer step over what this rank keeps the state of; its weight decay is for the tensors that decay. The others'
// parameters are on their way then, until flat_await.
static inline void flat_update(FlatVector* flat, const Parameters* p, const OptimizerStep* step) {
    size_t i = 0;
    for (size_t b = 0; b < flat->count; b++) {
        Bucket* k = &flat->buckets[b];
        const float* grads = flat_summed(flat, k, k->state);
        float *m = flat->states[0], *v = flat->states[1];
        for (; i < p->count && p->tensors[i].bucket == b; i++) {
            const Tensor* t = &p->tensors[i];
            size_t place;
            CommSlice part = flat_state(&place, flat, t->offset, t->offset + t->size);
            if (slice_length(part) == 0) continue;
            OptimizerStep own = *step;
            if (!t->decays) own.weight_decay = 0;
            optimizer_update(flat->params + part.first, flat->master_weights ? flat->master_weights + place : NULL,
                             m ? m + place : NULL, v ? v + place : NULL,
                             grads + (part.first - k->state.first), &own, part.first, slice_length(part), flat->stream);
        }
        if (flat->options.stage == 0) continue;
        collective_all_gather(&flat->collectives, flat->count + flat_slot(flat, k), flat->params + k->first, k->end - k->first,
                        FLOATX_DTYPE, flat->stream);
        k->gathering = true;
        fault_point("gather");
    }
}

// Before a bucket's parameters are used.
static inline void flat_await(FlatVector* flat, size_t bucket) {
    Bucket* k = &flat->buckets[bucket];
    if (!k->gathering) return;
    collective_wait(&flat->collectives, flat->count + bucket, flat->stream);
    k->gathering = false;
}

// All parameters, whole and right; false if a fault has kept some from coming.
static inline bool flat_await_all(FlatVector* flat, Error* error) {
    for (size_t b = 0; b < flat->count; b++) flat_await(flat, b);
    device_wait(flat->stream);
    return collective_check(&flat->collectives, error);
}

// What this rank sends, in bytes: to sum the gradients of buckets [from, to) once; to gather all parameters; in a step of
// so many micro-batches.
static inline size_t flat_bytes_summed(const FlatVector* flat, size_t from, size_t to) {
    size_t bytes = 0, size = comm_type_size(reduce_type(flat->options.reduce)), world = flat->options.world;
    for (size_t b = from; b < to; b++) {
        const Bucket* k = &flat->buckets[b];
        size_t n = k->end - k->first, own = slice_length(k->own);
        bytes += size * (n - own + (flat->options.stage == 0 ? own * (world - 1) : 0));
    }
    return bytes;
}

static inline size_t flat_bytes_gathered(const FlatVector* flat) {
    size_t elements = 0;
    for (size_t b = 0; b < flat->count; b++) elements += slice_length(flat->buckets[b].own) * (flat->options.world - 1);
    return flat->options.stage == 0 ? 0 : elements * sizeof(floatX);
}

static inline size_t flat_bytes_sent(const FlatVector* flat, size_t micro_batches) {
    return flat_bytes_summed(flat, 0, flat->count) * (flat->options.stage == 2 ? micro_batches : 1) +
        flat_bytes_gathered(flat);
}

// ------------------------------------------------------------------------------------------------
// 4. Agreement

// Every rank tells `count` numbers, at most STATS_MAX; afterwards flat->stats (world, count) holds those of all. False if a rank
// is gone or disagrees.
static inline bool flat_gather_stats(FlatVector* flat, const double* numbers, size_t count, Error* error) {
    memcpy(flat->stats + flat->options.rank * count, numbers, count * sizeof(double));
    if (flat->options.comm == NULL) return true;
    return comm_gather_doubles(flat->options.comm, flat->stats, count, error);
}

// What a rank told as number `column`, of `count`.
static inline double flat_stat(const FlatVector* flat, size_t rank, size_t column, size_t count) {
    return flat->stats[rank * count + column];
}

// NaN is the greatest.
static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    if (isnan(x) || isnan(y)) return (int)(isnan(x) != 0) - (int)(isnan(y) != 0);
    return (x > y) - (x < y);
}

// The least, the middle (of an even number the lower of the two) and the greatest of what the ranks told as number
// `column`, of `count`; returns the rank of the greatest.
static inline size_t flat_extremes(double* least, double* median, double* greatest, const FlatVector* flat, size_t column,
                                   size_t count) {
    size_t world = flat->options.world, rank = 0;
    for (size_t r = 0; r < world; r++) {
        flat->sorted[r] = flat_stat(flat, r, column, count);
        if (compare_doubles(&flat->sorted[r], &flat->sorted[rank]) > 0) rank = r;
    }
    *greatest = flat->sorted[rank];
    qsort(flat->sorted, world, sizeof(double), compare_doubles);
    *least = flat->sorted[0];
    *median = flat->sorted[(world - 1) / 2];
    return rank;
}

// Whether all ranks have the same `count` numbers, at most one for each bucket; those of this rank are in flat->compared
// + rank * count. Otherwise the error names the rank that differs from most in the first that is not the same everywhere;
// `describe` says what that number is of.
static inline bool flat_same(FlatVector* flat, size_t count,
                             void (*describe)(char* text, size_t size, const FlatVector* flat, size_t number),
                             Error* error) {
    size_t world = flat->options.world;
    uint64_t* compared = flat->compared;
    if (!comm_all_gather(flat->options.comm, compared, world * count, COMM_INT64, NULL, NULL, error)) return false;
    for (size_t i = 0; i < count; i++) {
        size_t usual = 0, most = 0;
        for (size_t r = 0; r < world; r++) {
            size_t same = 0;
            for (size_t q = 0; q < world; q++) same += compared[r * count + i] == compared[q * count + i];
            if (same > most) usual = r;
            most = max_size(most, same);
        }
        for (size_t r = 0; r < world && most < world; r++) {
            char what[80];
            if (compared[r * count + i] == compared[usual * count + i]) continue;
            describe(what, sizeof what, flat, i);
            return fail(error,
                        "rank %zu differs from %s in %s: memory or arithmetic of a machine is faulty%s; --resume from a "
                        "checkpoint before it, without that machine", r, world == 2 ? "the other rank" : "most ranks", what,
                        2 * most > world ? "" : ", and it cannot be told whose, since no more than half of the ranks agree");
        }
    }
    return true;
}

static inline void flat_describe_bucket(char* text, size_t size, const FlatVector* flat, size_t bucket) {
    char name[40] = "the embeddings";
    if (bucket > 0) snprintf(name, sizeof name, "block %zu", bucket - 1);
    if (bucket + 1 == flat->count) snprintf(name, sizeof name, "the final norm and head");
    snprintf(text, size, "the parameters of %s (bucket %zu)", name, bucket);
}

// Whether all ranks have the same parameters: their checksums, bucket by bucket.
static inline bool flat_compare(FlatVector* flat, Error* error) {
    if (flat->options.world == 1) return true;
    if (!flat_await_all(flat, error)) return false;
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        checksum(flat->checksums + b, flat->params + k->first, k->first, k->end - k->first, flat->stream);
    }
    download(flat->compared + flat->options.rank * flat->count, flat->checksums, flat->count * sizeof(uint64_t),
             flat->stream);
    return flat_same(flat, flat->count, flat_describe_bucket, error);
}

#endif  // LLMTRAIN_ZERO_H
