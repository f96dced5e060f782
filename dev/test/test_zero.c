// test_zero.c: the flat vector over ranks (llmtrain/ranks/zero.h), without a model: known sums, the limit of exact
// ones, and wrong bits in each bucket.
//
//   cc -std=c11 -O2 -I. dev/test/test_zero.c -o build/test_zero -lm -pthread && build/test_zero
//
//   slices     of a bucket: whole, in order, aligned, and of equal length for 2, 4 and 8 ranks
//   owners     of the tensors of whole models, for each optimizer: each rank updates about as much as the others
//   sums       1 to 6 ranks, each ZeRO stage, each way to add, 1 and 3 micro-batches, one and several copies of the
//              shards: gradients that are small integers have the computed sums, squares and sent bytes
//   gathers    stage 3: each bucket has its parameters when it is used, forward and backward, before and after they
//              change; and no more is sent than is predicted
//   limit      --reduce exact: a sum just below the limit is right, on any number of ranks; one just above it is found
//   corruption one bit, in the first and the last parameter of each tensor, trained or frozen, on each rank:
//              ranks_compare reports that rank and that bucket
//
// Each case is a process that forks its ranks; rank 0 prints what all of them agree on.

#include "llmtrain/ranks/agreement.h"
#include "llmtrain/ranks/mesh.h"
#include "llmtrain/run/presets.h"
#include "harness.h"

#define TIMEOUT_MS 30e3
#define LIMIT_MS 60e3

enum { BUCKETS = 5 };  // embeddings, three blocks, the head
static const size_t ROWS[BUCKETS] = {37, 9, 8, 24, 31}, COLS = 24;

// A rank of a case, with a flat vector of its own.
typedef struct {
    Launch launch;
    Comm comm;
    Mesh mesh;
    Parameters parameters;
    Arena plan;
    FlatVector flat;
    RankStats stats;
    OptimizerOptions optimizer;
    Stream stream;
} Rank;

typedef struct {
    size_t world, stage, micro_batches;
    ReduceKind reduce;
    const char* train;  // which tensors; NULL: all
    size_t shard;       // ranks that share a copy; 0: all
} Case;

static void rank_open(Rank* r, const Case* c) {
    const char* train = c->train;
    FlatOptions holds = {.training = true, .optimizer = &r->optimizer};
    Error error;
    memset(r, 0, sizeof *r);
    r->optimizer = optimizer_defaults(OPTIMIZER_ADAMW);
    need(launch_fork(&r->launch, c->world, &error), "%s", error.text);
    const Layout layout = {.shard = c->shard, .pp = 1, .chunks = 1};
    need(comm_open(&r->comm, &r->launch, TIMEOUT_MS, &error) &&
             mesh_open(&r->mesh, &r->comm, &layout, false, &error), "%s", error.text);
    RankOptions options = {.transport = &r->comm.transport, .rank = r->comm.rank, .world = c->world,
                           .local_rank = r->comm.rank, .stage = c->stage, .reduce = c->reduce, .shard = c->shard,
                           .groups = MESH_TRANSPORTS(r->mesh)};
    for (size_t b = 0; b < BUCKETS; b++) {
        parameters_add(&r->parameters, text_of("tensor %zu", b), ROWS[b], ROWS[b], COLS, b, INIT_ZERO, 0);
        if (train) parameters_add(&r->parameters, text_of("vector %zu", b), ROWS[b], ROWS[b], 0, b, INIT_ZERO, 0);
    }
    need(parameters_finish(&r->parameters, train, &error), "%s", error.text);
    need(stats_open(&r->stats, &options, BUCKETS, &error), "%s", error.text);
    need(flat_create(&r->flat, &r->parameters, &options, &holds, NULL, &error), "%s", error.text);
    need(device_open(&r->stream, false, &error), "%s", error.text);
    flat_layout(&r->flat, &r->plan);
    need(arena_allocate(&r->plan, 1, r->stream, &error), "%s", error.text);
    flat_layout(&r->flat, &r->plan);
    need(flat_prepare(&r->flat, r->stream, &error) && flat_connect(&r->flat, &error), "%s", error.text);
}

// A condition that must hold on all ranks; rank 0 prints it.
HARNESS_FORMAT(3, 4) static void rank_check(Rank* r, bool good, const char* format, ...) {
    Error error;
    fail_with(&error, "differs here");
    bool all = comm_agree_all(&r->comm, good, &error);
    va_list arguments;
    va_start(arguments, format);
    if (r->comm.rank == 0) harness_line(all, "", format, arguments);
    va_end(arguments);
}

static void rank_close(Rank* r) {
    Error error;
    size_t bytes = arena_bytes(&r->plan);
    flat_free(&r->flat);
    stats_close(&r->stats);
    device_free(r->plan.base, bytes);
    device_close(r->stream);
    parameters_free(&r->parameters);
    mesh_close(&r->mesh);
    comm_close(&r->comm);
    if (r->launch.rank > 0) exit(0);
    need(launch_reap(&r->launch, "test_zero", 0, LIMIT_MS, &error) == 0, "%s", error.text);
}

static void case_run(void (*body)(const void*), const Case* c) {
    Program p;
    program_start(&p, NULL, body, c);
    programs_wait(&p, 1, LIMIT_MS);
    fputs(p.text[0], stdout);
    if (!program_good(&p)) {
        check(false, "%zu ranks at stage %zu come to the end", c->world, c->stage);
        program_print(&p, "it");
    }
    program_free(&p);
}

// ------------------------------------------------------------------------------------------------
// Slices

static void test_slices(void) {
    for (size_t world = 1; world <= 9; world++)
        for (size_t n = 0; n <= 64 * 9; n += 64) {
            size_t end = 0, shortest = SIZE_MAX, longest = 0;
            bool aligned = true;
            for (size_t rank = 0; rank < world; rank++) {
                Slice s = shard_slice(n, rank, world);
                aligned = aligned && s.first == end && s.end >= s.first && s.first % SHARD_UNIT == 0;
                end = s.end;
                shortest = min_size(shortest, slice_length(s));
                longest = max_size(longest, slice_length(s));
            }
            bool equal = longest - shortest <= (8 % world == 0 ? 0 : SHARD_UNIT);
            expect(aligned && end == n && equal, "%zu elements over %zu ranks", n, world);
        }
    verdict("slices of buckets are in order, whole, aligned, and as even as that allows");
}

// ------------------------------------------------------------------------------------------------
// Owners

// The ranks' shares of a model's updates with an optimizer: slices in order, without gaps; no matrix that an update
// needs whole is cut; and the rank with the most work has at most 1.3 times the mean, if whole matrices go to two ranks
// 1.6 times, if the large embeddings are among them twice, or one tensor that is larger. Work, counted here again: the
// elements, and for orthogonal and low-rank optimizers those of a matrix inside a block times its shorter side.
static void owners_compare(const Parameters* p, const char* model, OptimizerKind kind, size_t world) {
    OptimizerOptions optimizer = optimizer_defaults(kind);
    FlatOptions holds = {.training = true, .optimizer = &optimizer};
    RankOptions options = {.world = world, .stage = 1, .reduce = REDUCE_EXACT};
    FlatVector flat;
    Error error;
    double loads[16] = {0}, sum = 0, most = 0, largest = 0;
    bool by_matrix = kind == OPTIMIZER_MUON || kind == OPTIMIZER_GALORE || kind == OPTIMIZER_LDADAM;
    bool by_tensor = kind == OPTIMIZER_ADAFACTOR || kind == OPTIMIZER_CAME || kind == OPTIMIZER_ADAM_MINI ||
                     kind == OPTIMIZER_SM3;
    need(flat_create(&flat, p, &options, &holds, NULL, &error), "%s", error.text);
    for (size_t b = 0; b < flat.count; b++) {
        const Bucket* k = &flat.buckets[b];
        bool ordered = k->shard_begins[0] == 0 && k->shard_begins[world] == k->end - k->first;
        for (size_t r = 0; r < world; r++) ordered = ordered && k->shard_begins[r] <= k->shard_begins[r + 1];
        expect(ordered, "%s, %s, %zu ranks: bucket %zu", model, OPTIMIZERS[kind].name, world, b);
    }
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        const Bucket* k = &flat.buckets[t->bucket];
        bool matrix = t->cols > 0, whole = matrix && (by_tensor || (by_matrix && strncmp(t->name, "block", 5) == 0));
        double each = by_matrix && whole ? (double)min_size(t->size / t->cols, t->cols) : 1;
        size_t owners = 0;
        for (size_t r = 0; r < world; r++) {
            size_t first = max_size(t->offset, k->first + k->shard_begins[r]);
            size_t end = min_size(t->offset + t->size, k->first + k->shard_begins[r + 1]);
            if (first >= end) continue;
            loads[r] += each * (double)(end - first);
            owners++;
        }
        if (whole) expect(owners == 1, "%s, %s, %zu ranks: %s is cut", model, OPTIMIZERS[kind].name, world, t->name);
        if (whole) largest = fmax(largest, each * (double)t->size);
    }
    for (size_t r = 0; r < world; r++) {
        sum += loads[r];
        most = fmax(most, loads[r]);
    }
    double limit = by_tensor ? 2 : by_matrix && world == 2 ? 1.6 : 1.3;
    expect(most <= fmax(limit * sum / (double)world, 1.01 * largest),
           "%s, %s, %zu ranks: the most is %.2f times the mean", model, OPTIMIZERS[kind].name, world,
           most / (sum / (double)world));
    flat_free(&flat);
}

static void test_owners(void) {
    static const char* const models[] = {"gpt2:124M", "llama:110M"};
    for (size_t m = 0; m < COUNT_OF(models); m++) {
        Config c;
        Parameters p;
        Weights w;
        Error error;
        memset(&p, 0, sizeof p);
        memset(&w, 0, sizeof w);
        need(config_preset(&c, models[m], &error) && config_complete(&c, &error) &&
                 weights_create(&w, &p, &c, NULL, 0, 1, &error), "%s", error.text);
        for (int kind = 0; kind < OPTIMIZER_COUNT; kind++)
            for (size_t world = 1; world <= 8; world++) owners_compare(&p, models[m], (OptimizerKind)kind, world);
        parameters_free(&p);
        free(w.blocks);
    }
    verdict("owners: with each optimizer every rank updates about as much as the others");
}

// ------------------------------------------------------------------------------------------------
// Sums

// The gradient of an element, for one micro-batch of a rank: small integers, which every way to add keeps exact.
typedef double (*Gradient)(size_t rank, size_t micro, size_t element);
static double gradient(size_t rank, size_t micro, size_t element) {
    return (double)((element * 7 + rank * 3 + micro * 5) % 17) - 8;
}

// A step in which each element has the function's gradient, times `scale`.
static void rank_step(Rank* r, size_t micro_batches, Gradient of, double scale) {
    FlatVector* flat = &r->flat;
    flat_begin_step(flat, 1.0, micro_batches);
    for (size_t m = 0; m < micro_batches; m++) {
        flat->micro++;
        for (size_t b = flat->count; b-- > 0;) {
            const Bucket* k = &flat->buckets[b];
            flat_begin_bucket(flat, b);
            float* grads = flat_bucket_gradient(flat, k);
            for (size_t i = k->first; i < k->end; i++) grads[i - k->first] += (float)(scale * of(r->comm.rank, m, i));
            flat_end_bucket(flat, b);
        }
    }
    flat_finish_step(flat);
}

// Whether the sums of that step are right within a relative error, and the sums of squares to the bit if that is 0.
static bool rank_is_right(Rank* r, const Case* c, Gradient of, double scale, double bound) {
    bool right = r->flat.sums_host.bad == 0;
    double squares = 0;
    for (size_t b = 0; b < r->flat.count; b++) {
        const Bucket* k = &r->flat.buckets[b];
        const float* sums = flat_summed(&r->flat, k, k->state);  // all elements that this rank updates
        for (size_t i = k->state.first; i < k->state.end; i++) {
            double expected = 0;
            for (size_t q = 0; q < c->world; q++)
                for (size_t m = 0; m < c->micro_batches; m++) expected += scale * of(q, m, i);
            right = right && fabs(sums[i - k->state.first] - expected) <= bound * fabs(expected);
            if (i >= k->own.first && i < k->own.end) squares += expected * expected;
        }
    }
    return right && (bound > 0 || exact_value(r->flat.sums_host.squares) == squares);
}

static void sums_body(const void* context) {
    static const char* const ways[] = {"float", "storage", "exact"};
    const Case* c = (const Case*)context;
    Rank rank, *r = &rank;
    const char* copies = c->shard ? text_of(", copies of %zu", c->shard) : "";
    rank_open(r, c);
    uint64_t sent = flat_bytes_so_far(&r->flat);
    rank_step(r, c->micro_batches, gradient, 1.0);
    sent = flat_bytes_so_far(&r->flat) - sent + flat_bytes_gathered(&r->flat, c->micro_batches);
    rank_check(r, rank_is_right(r, c, gradient, 1.0, 0),
               "%zu ranks%s, stage %zu, %s, %zu micro-batches: sums and squares", c->world, copies, c->stage,
               ways[c->reduce], c->micro_batches);
    rank_check(r, sent == flat_bytes_sent(&r->flat, c->micro_batches),
               "%zu ranks%s, stage %zu, %s, %zu micro-batches: bytes sent", c->world, copies, c->stage,
               ways[c->reduce], c->micro_batches);
    rank_close(r);
}

static void test_sums(void) {
    for (size_t world = 1; world <= 4; world++)
        for (size_t stage = 0; stage < 4; stage++)
            for (int reduce = REDUCE_FLOAT; reduce <= REDUCE_EXACT; reduce++)
                for (size_t micro = 1; micro <= 3; micro += 2) {
                    Case c = {world, stage, micro, (ReduceKind)reduce, NULL, 0};
                    case_run(sums_body, &c);
                }
    static const size_t copies[][2] = {{4, 1}, {4, 2}, {6, 2}, {6, 3}};  // ranks, and ranks that share a copy
    for (size_t i = 0; i < COUNT_OF(copies); i++)
        for (size_t stage = 1; stage < 4; stage++)
            for (int reduce = REDUCE_FLOAT; reduce <= REDUCE_EXACT; reduce++) {
                Case c = {copies[i][0], stage, i % 2 ? 3 : 1, (ReduceKind)reduce, NULL, copies[i][1]};
                case_run(sums_body, &c);
            }
}

// ------------------------------------------------------------------------------------------------
// Gathers

// Element i of a tensor after `turn` changes.
static float parameter(const Tensor* t, size_t turn, size_t i) { return (float)((t->offset + i) % 251 + 1000 * turn); }

// Whether the parameters of a bucket are those, once it is waited for.
static bool bucket_is_there(Rank* r, size_t b, size_t turn) {
    bool same = true;
    flat_await(&r->flat, b);
    device_wait(r->stream);
    for (const Tensor* t = r->parameters.tensors; t < r->parameters.tensors + r->parameters.count; t++)
        for (size_t i = 0; t->bucket == b && i < tensor_elements(t); i++)
            same = same && float_of(flat_param(&r->flat, t)[i]) == parameter(t, turn, i);
    return same;
}

static void gathers_body(const void* context) {
    const Case* c = (const Case*)context;
    Rank rank, *r = &rank;
    Error error;
    rank_open(r, c);
    size_t whole = 0;  // what is not sharded is gathered by updates
    for (size_t b = 0; b < BUCKETS; b++)
        if (!r->flat.buckets[b].sharded)
            whole += slice_length(r->flat.buckets[b].shard) * (r->flat.shard_world - 1) * sizeof(floatX);
    for (size_t turn = 0; turn < 3; turn++) {
        for (uint32_t i = 0; i < r->parameters.count; i++) {
            const TensorId id = {i};
            const Tensor* t = &r->parameters.tensors[i];
            float values[1000];
            for (size_t k = 0; k < tensor_elements(t); k++) values[k] = parameter(t, turn, k);
            need(flat_set_params(&r->flat, id, 0, values, tensor_elements(t), &error), "%s", error.text);
        }
        uint64_t sent = flat_bytes_so_far(&r->flat);
        bool there = true;
        for (size_t micro = 0; micro < c->micro_batches; micro++) {
            for (size_t b = 0; b < BUCKETS; b++) there = bucket_is_there(r, b, turn) && there;
            for (size_t b = BUCKETS; b-- > 0;) there = bucket_is_there(r, b, turn) && there;
        }
        sent = flat_bytes_so_far(&r->flat) - sent;
        rank_check(r, there, "%zu ranks, copies of %zu, stage %zu, turn %zu: all buckets are there", c->world,
                   r->flat.shard_world, c->stage, turn);
        rank_check(r, sent == flat_bytes_gathered(&r->flat, c->micro_batches) - (c->stage ? whole : 0),
                   "%zu ranks, copies of %zu, stage %zu, turn %zu: bytes gathered", c->world, r->flat.shard_world,
                   c->stage, turn);
        // One that has no batch takes part while the others go forward.
        if (r->comm.rank == 0) flat_accompany(&r->flat);
        else for (size_t b = 0; b < BUCKETS; b++) there = bucket_is_there(r, b, turn) && there;
        rank_check(r, there, "%zu ranks, copies of %zu, stage %zu, turn %zu: there without rank 0's help", c->world,
                   r->flat.shard_world, c->stage, turn);
    }
    rank_close(r);
}

static void test_gathers(void) {
    static const Case cases[] = {
        {1, 3, 2, REDUCE_EXACT, NULL, 0}, {2, 3, 1, REDUCE_EXACT, NULL, 0}, {3, 3, 3, REDUCE_FLOAT, NULL, 0},
        {4, 3, 2, REDUCE_EXACT, NULL, 2}, {4, 3, 1, REDUCE_EXACT, NULL, 1}, {3, 2, 2, REDUCE_EXACT, NULL, 0},
        {3, 3, 2, REDUCE_EXACT, "vector [12],*3", 0}, {2, 3, 2, REDUCE_EXACT, "vector [123],tensor 2", 0}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) case_run(gathers_body, &cases[i]);
}

// ------------------------------------------------------------------------------------------------
// The limit of exact sums
//
// All ranks and micro-batches add the same share of a sum. Below the limit the sum is right; above it each rank finds
// that its share is too large, and the step is skipped. Otherwise sums would wrap around: two shares of 2^12 are 2^63
// units of 2^-50.

static double share(size_t rank, size_t micro, size_t element) { return (void)rank, (void)micro, element % 2 ? 1 : -1; }

static void limit_body(const void* context) {
    const Case* c = (const Case*)context;
    Rank rank, *r = &rank;
    double shares = (double)(c->world * c->micro_batches), below = 0.999 * EXACT_LIMIT / shares;
    double above[] = {1.001 * EXACT_LIMIT / shares, 0.999 * EXACT_LIMIT};
    bool found = true;
    rank_open(r, c);
    rank_step(r, c->micro_batches, share, below);
    rank_check(r, rank_is_right(r, c, share, below, 1e-6),
               "%zu ranks, stage %zu, %zu micro-batches: an exact sum just below the limit", c->world, c->stage,
               c->micro_batches);
    for (size_t i = 0; i < (shares > 1 ? 2 : 1); i++) {
        rank_step(r, c->micro_batches, share, above[i]);
        found = found && r->flat.sums_host.bad != 0;
    }
    rank_check(r, found, "%zu ranks, stage %zu, %zu micro-batches: exact sums above the limit are found", c->world,
               c->stage, c->micro_batches);
    rank_close(r);
}

static void test_limit(void) {
    static const Case cases[] = {
        {1, 0, 1, REDUCE_EXACT, NULL, 0}, {1, 0, 3, REDUCE_EXACT, NULL, 0}, {4, 0, 1, REDUCE_EXACT, NULL, 0},
        {4, 1, 3, REDUCE_EXACT, NULL, 0}, {4, 2, 1, REDUCE_EXACT, NULL, 0}, {3, 2, 3, REDUCE_EXACT, NULL, 0},
        {4, 2, 3, REDUCE_EXACT, NULL, 2}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) case_run(limit_body, &cases[i]);
}

// ------------------------------------------------------------------------------------------------
// Corruption

// Whether a bit that differs only on the victim is detected, and reported with that rank and bucket.
static bool finds(Rank* r, size_t victim, size_t bucket, size_t element) {
    Error error = {"", ERROR_OUTSIDE, false};
    unsigned char* byte = (unsigned char*)(r->flat.params + element);
    size_t world = r->comm.world, named = world == 2 ? 1 : victim;  // of two ranks it is unknown which is wrong
    const char* part = bucket == 0 ? "embeddings" : bucket + 1 == BUCKETS ? "head" : text_of("block %zu", bucket - 1);
    *byte ^= r->comm.rank == victim;
    bool same = ranks_compare(&r->stats, &r->flat, &error);
    *byte ^= r->comm.rank == victim;
    return !same && strstr(error.text, text_of("rank %zu differs from %s in ", named,
                                               world == 2 ? "the other rank" : "most ranks")) &&
           strstr(error.text, text_of("%s (bucket %zu)", part, bucket)) &&
           (strstr(error.text, "it is unknown whose") != NULL) == (world == 2);
}

static void corruption_body(const void* context) {
    const Case* c = (const Case*)context;
    Rank rank, *r = &rank;
    Error error;
    rank_open(r, c);
    for (size_t i = 0; i < r->parameters.flat_size; i++)
        r->flat.params[i] = floatX_of(random_normal(1, RANDOM_TEST, 0, i));
    rank_check(r, ranks_compare(&r->stats, &r->flat, &error), "%zu ranks: the same parameters are found to be the same",
               c->world);
    for (const Tensor* t = r->parameters.tensors; t < r->parameters.tensors + r->parameters.count; t++)
        for (size_t victim = 0; victim < c->world; victim++) {
            bool first_found = finds(r, victim, t->bucket, t->offset);
            bool last_found = finds(r, victim, t->bucket, t->offset + tensor_elements(t) - 1);
            rank_check(r, first_found && last_found, "%zu ranks: a wrong bit of rank %zu in %s, %s, first and last "
                       "parameter", c->world, victim, t->name, t->trains ? "which trains" : "frozen");
        }
    rank_check(r, ranks_compare(&r->stats, &r->flat, &error), "%zu ranks: without it they are the same again",
               c->world);
    rank_close(r);
}

static void test_corruption(void) {
    // Buckets of which all is frozen, a part, and nothing.
    static const char* const train[] = {NULL, "vector [12],*3"};
    for (size_t i = 0; i < 2 * COUNT_OF(train); i++) {
        Case c = {2 + i / 2, 1, 1, REDUCE_EXACT, train[i % 2], 0};
        case_run(corruption_body, &c);
    }
}

int main(void) {
    tests_begin("test_zero");
    test_slices();
    test_owners();
    test_sums();
    test_gathers();
    test_limit();
    test_corruption();
    return tests_end();
}
