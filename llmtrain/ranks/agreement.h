// agreement.h: the numbers and flags that ranks exchange once per step, and whether they hold and compute the same.
//
//   1. clock        the time of a step, and how much of it this rank waited for others
//   2. statistics   a few numbers of every rank, gathered: losses, times, flags
//   3. step         its loss and gradient norm, and the flags exchanged: ranks_finish_step
//   4. comparison   checksums of every rank: ranks_same, ranks_compare

#ifndef LLMTRAIN_AGREEMENT_H
#define LLMTRAIN_AGREEMENT_H

#include "step_result.h"
#include "zero.h"

#include <signal.h>

// ------------------------------------------------------------------------------------------------
// 1. Clock

typedef struct {
    double began_ms;     // when the step began; 0: no step has
    double waited_ms;    // how long this rank had waited in the transport at the last reading
} StepClock;

// Milliseconds that this rank has waited for others since the last call. To be called after a wait for the stream.
static inline double clock_waited_ms(StepClock* c, FlatVector* flat) {
    double before = c->waited_ms;
    const Transport* t = flat->options.transport;
    if (t) c->waited_ms = t->statistics(t->comm).waited_ms;
    double waited_ms = c->waited_ms - before;
    for (size_t g = 0; g < GROUPS; g++) waited_ms += collective_waited_ms(&flat->groups[g]);
    return waited_ms;
}

// Starts a step's clock: set-up, validation and saves are not part of a step.
static inline void clock_start(StepClock* c, FlatVector* flat) {
    clock_waited_ms(c, flat);
    c->began_ms = now_ms();
}

// ------------------------------------------------------------------------------------------------
// 2. Statistics

enum { STATS_MAX = 35 };  // statistics of a rank that are gathered at a time

typedef struct {
    const Transport* transport;  // NULL: one rank
    size_t rank, world;
    RankOptions options;
    size_t count;         // statistics of a rank that were gathered last, at most STATS_MAX
    double* gathered;     // (world, count) these
    double* sorted;       // (world) one of them, sorted
    uint64_t* checksums;  // (world, 2 buckets) of all ranks
} RankStats;

static inline bool stats_open(RankStats* s, const RankOptions* o, size_t buckets, Error* error) {
    s->transport = o->transport;
    s->rank = o->rank;
    s->world = max_size(o->world, 1);
    s->options = *o;
    s->gathered = (double*)memory_allocate(s->world * STATS_MAX * sizeof(double));
    s->sorted = (double*)memory_allocate(s->world * sizeof(double));
    s->checksums = (uint64_t*)memory_allocate(s->world * 2 * buckets * sizeof(uint64_t));
    return (s->gathered && s->sorted && s->checksums) ||
           fail_with(error, "out of memory for the numbers of %zu ranks", s->world);
}

static inline void stats_close(RankStats* s) {
    free(s->gathered);
    free(s->sorted);
    free(s->checksums);
    memset(s, 0, sizeof *s);
}

// Gathers `count` statistics of every rank, at most STATS_MAX. False if a rank is lost.
static inline bool stats_gather(RankStats* s, const double* own, size_t count, Error* error) {
    s->count = count;
    memcpy(s->gathered + s->rank * count, own, count * sizeof(double));
    return s->transport == NULL ||
           transport_all_gather(s->transport, s->gathered, s->world * count * sizeof(double), DTYPE_U8, error);
}

// Statistic `column` of a rank.
static inline double stats_of(const RankStats* s, size_t rank, size_t column) {
    return s->gathered[rank * s->count + column];
}

// A sum takes this many statistics: integers below 2^53, which a double holds.
enum { STATS_OF_SUM = EXACT_WINDOWS * EXACT_LIMBS };

// Writes a sum to `own`.
static inline void stats_put_sum(double* own, ExactSum sum) {
    for (int i = 0; i < STATS_OF_SUM; i++) {
        ExactWindow* w = &sum.windows[i / EXACT_LIMBS];
        if (i % EXACT_LIMBS == 0) exact_carry(w);
        own[i] = w->outside >> EXACT_LAST_BITS ? NAN : (double)(int64_t)w->limbs[i % EXACT_LIMBS];
    }
}

// The sum over all ranks of those that begin at `column`.
static inline ExactSum stats_sum(const RankStats* s, size_t column) {
    ExactSum sum = {{{{0}, 0}}};
    for (size_t r = 0; r < s->world; r++)
        for (size_t i = 0; i < STATS_OF_SUM; i++) {
            double limb = stats_of(s, r, column + i);
            ExactWindow* w = &sum.windows[i / EXACT_LIMBS];
            if (isnan(limb)) w->outside = UINT64_MAX;
            else w->limbs[i % EXACT_LIMBS] += (uint64_t)(int64_t)limb;
        }
    return sum;
}

// What ends the work of a rank: a signal, SIGINT before others, or -1; 0: nothing. Column: each rank's own.
static inline int stats_end(const RankStats* s, size_t column) {
    int ends = 0;
    for (size_t r = 0; r < s->world; r++) {
        int own = (int)stats_of(s, r, column);
        if (ends == 0 || own == SIGINT) ends = own;
    }
    return ends;
}

// Minimum, median (of an even number the lower of the two) and maximum of a statistic of the ranks of a stage of the
// pipeline. Returns the rank of the maximum.
static inline size_t stats_min_median_max(double* min, double* median, double* max, const RankStats* s, size_t column,
                                          size_t stage) {
    size_t count = 0, most = 0;
    *max = NAN;
    for (size_t r = 0; r < s->world; r++) {
        double own = stats_of(s, r, column);
        if (ranks_stage(&s->options, r) != stage) continue;
        if (count == 0 || compare_doubles(&own, max) > 0) {
            *max = own;
            most = r;
        }
        s->sorted[count++] = own;
    }
    qsort(s->sorted, count, sizeof(double), compare_doubles);
    *min = s->sorted[0];
    *median = s->sorted[(count - 1) / 2];
    return most;
}

// Sets the slowest rank: the one whose time is the largest multiple of the median of its stage; and the times there.
static inline void stats_find_slowest(StepResult* result, const RankStats* s, size_t column) {
    for (size_t stage = 0; stage < ranks_pp(&s->options); stage++) {
        double min, median, max;
        size_t rank = stats_min_median_max(&min, &median, &max, s, column, stage);
        if (stage > 0 && !(max * result->busy_median > result->busy_max * median)) continue;
        result->slowest = rank;
        result->busy_min = min;
        result->busy_median = median;
        result->busy_max = max;
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Step

// After flat_finish_step: fills in the result, from all ranks' losses, squares, times and flags. False if one is lost.
static inline bool ranks_finish_step(StepResult* result, RankStats* stats, StepClock* clock, FlatVector* flat,
                                     StepFlags flags, Error* error) {
    enum { LOSS, BUSY, WAIT, STOP, SAVE, SAVED, FAILED, BROKEN, TARGETS, COUNTED, LOSSES = COUNTED + OBJECTIVE_SUMS,
           SQUARES = LOSSES + STATS_OF_SUM, COUNT = SQUARES + STATS_OF_SUM };  // the first three: run/log.h RANK_LOSS
    static_assert((int)COUNT <= (int)STATS_MAX, "make STATS_MAX larger");
    size_t world = stats->world, saved = 0, last = flat->pp - 1;  // the stage that has the losses
    StepSums* sums = &flat->sums_host;
    double tokens = (double)flat->tokens, targets = flat->pp_rank == last ? (double)flat->targets : 0, of_all = 0;
    double waited = clock_waited_ms(clock, flat), busy = now_ms() - clock->began_ms - waited;
    double own[COUNT] = {exact_value(sums->losses) / fmax(targets, 1), busy, waited, (double)flags.stop,
                         (double)flags.save, (double)flags.saved, (double)flags.failed, (double)flags.broken, targets};
    if (sums->bad != 0) sums->squares.windows[0].outside = UINT64_MAX;
    memcpy(own + COUNTED, flags.counted, sizeof flags.counted);
    stats_put_sum(own + LOSSES, sums->losses);
    stats_put_sum(own + SQUARES, sums->squares);
    if (!stats_gather(stats, own, COUNT, error)) return false;
    waited += clock_waited_ms(clock, flat);
    memset(result, 0, sizeof *result);
    for (size_t r = 0; r < world; r++) of_all += stats_of(stats, r, TARGETS);
    flat->mean_factor = tokens * (double)(flat->stage_world * flat->tp) / fmax(of_all, 1);
    for (size_t r = 0; r < world; r++) {
        result->flags.failed |= stats_of(stats, r, FAILED) != 0;
        int broken = (int)stats_of(stats, r, BROKEN);
        if (broken > result->flags.broken) result->flags.broken = broken;
        saved += stats_of(stats, r, SAVED) != 0;
        for (size_t i = 0; i < OBJECTIVE_SUMS; i++) result->flags.counted[i] += stats_of(stats, r, COUNTED + i);
    }
    result->flags.stop = stats_end(stats, STOP);
    result->loss = exact_value(stats_sum(stats, LOSSES)) / fmax(of_all, 1);
    result->flags.save = stats_of(stats, 0, SAVE) != 0;
    result->flags.saved = saved == world;
    result->grad_norm = sqrt(exact_value(stats_sum(stats, SQUARES))) * flat_scale(flat);
    stats_min_median_max(&result->loss_min, &result->loss_median, &result->loss_max, stats, LOSS, last);
    stats_find_slowest(result, stats, BUSY);
    result->wait_share = waited / (busy + waited);
    clock->began_ms = now_ms();
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Comparison

static inline void describe_bucket(char* text, size_t size, size_t buckets, size_t bucket) {
    char name[40] = "the embeddings";
    if (bucket > 0) snprintf(name, sizeof name, "block %zu", bucket - 1);
    if (bucket + 1 == buckets) snprintf(name, sizeof name, "the final norm and head");
    snprintf(text, size, "the parameters of %s (bucket %zu)", name, bucket);
}

// Whether all ranks have the same `count` checksums, at most two for each bucket; this rank's are in s->checksums +
// rank * count. Otherwise the error reports the rank that differs from most ranks in the first checksum that is not the
// same everywhere. names (count): what they are checksums of, which in a pipeline the last stage has, and with context
// or tensor parallelism each rank of its rows; NULL: of the parameters of all buckets, on the ranks that have them, and
// then of those parameters that tensor parallelism leaves whole.
static inline bool ranks_same(RankStats* s, const FlatVector* flat, size_t count, const char* const* names,
                              Error* error) {
    size_t world = s->world, most_parts = flat->tp * (names ? flat->cp : 1);
    uint64_t* sums = s->checksums;
    if (!transport_all_gather(s->transport, sums, world * count, DTYPE_I64, error)) return false;
    for (size_t n = 0; n < count * most_parts; n++) {
        size_t i = n / most_parts, part = n % most_parts, usual = 0, most = 0, have = 0;
        size_t bucket = names ? flat->count - 1 : i % flat->count;
        size_t parts = names || i < flat->count ? most_parts : 1;  // ranks with the same part are compared
        for (size_t r = part; r < world && part < parts; r += parts) {
            size_t same = 0;
            if (!flat_rank_has(flat, r, bucket)) continue;
            for (size_t q = part; q < world; q += parts)
                same += flat_rank_has(flat, q, bucket) && sums[r * count + i] == sums[q * count + i];
            if (same > most) usual = r;
            most = max_size(most, same);
            have++;
        }
        for (size_t r = part; r < world && most < have; r += parts) {
            char what[96];
            if (!flat_rank_has(flat, r, bucket) || sums[r * count + i] == sums[usual * count + i]) continue;
            if (names) snprintf(what, sizeof what, "%s", names[i]);
            else describe_bucket(what, sizeof what, flat->count, bucket);
            fail_with(error, "rank %zu differs from %s in %s: memory or arithmetic of a machine is faulty%s; --resume "
                      "from a checkpoint before it, without that machine", r,
                      have == 2 ? "the other rank" : "most ranks", what,
                      2 * most > have ? "" : ", and it is unknown whose, since no more than half of the ranks agree");
            return fail_on_all_ranks(error);
        }
    }
    return true;
}

// Whether all ranks have the same parameters: their checksums, bucket by bucket.
static inline bool ranks_compare(RankStats* s, FlatVector* flat, Error* error) {
    size_t count = flat->tp > 1 ? 2 * flat->count : flat->count;
    uint64_t* own = s->checksums + s->rank * count;
    if (s->world == 1) return true;
    if (!flat_await_all(flat, error)) return false;
    flat_forget(flat);  // what is sharded is gathered now: each copy has one of it, which is compared
    memset(own, 0, count * sizeof(uint64_t));
    for (size_t b = 0; b < flat->count; b++) {
        flat_await(flat, b);
        for (size_t i = 0; flat->buckets[b].here && i < flat->parameters->count; i++) {
            const Tensor* t = &flat->parameters->tensors[i];
            if (t->bucket != b) continue;
            uint64_t sum;
            vector_checksum(flat->checksums, flat_param(flat, t), t->offset, tensor_place(t), flat->stream);
            device_download(&sum, flat->checksums, sizeof sum, flat->stream);
            own[b] += sum;
            if (flat->tp > 1 && !tensor_is_divided(t)) own[flat->count + b] += sum;
        }
    }
    return ranks_same(s, flat, count, NULL, error);
}

#endif  // LLMTRAIN_AGREEMENT_H
