// shard_check.h: reads all token shards once, in a thread, while training goes on: a shard that was damaged, swapped,
// or made for another vocabulary is named as soon as it was read, not when a sample comes to it.
//
//   shard_check_begin(&check, &train, &val, V, rank, world);   each rank of a machine reads its share of the shards
//   if (!shard_check_good(&check, &error)) ...                 from time to time: whether nothing was found so far
//   shard_check_end(&check);
//
// It reads files, not their mappings, so that it adds nothing to the memory of the process.

#ifndef LLMTRAIN_SHARD_CHECK_H
#define LLMTRAIN_SHARD_CHECK_H

#include "data.h"

enum { SHARD_CHECK_PIECE = LLMTRAIN_PIECE(1 << 16, 508) };  // bytes read at a time, whole tokens

typedef struct {
    const Dataset* datasets[2];
    size_t rank, world, vocabulary;
    pthread_t thread;
    bool running, canceled, failed;  // the last two are written atomically
    Error error;                     // once `failed` is set
} ShardCheck;

// A shard that was moved away or has another size is none of ours: the loader says so if it matters.
static inline bool shard_check(const Shard* shard, size_t V, const bool* canceled, Error* error) {
    size_t bytes, left = shard->count * shard->token_bytes;
    Hash hash = hash_begin(0);
    Error ignored;
    int file = file_open(&bytes, shard->path, &ignored);
    char* piece = (char*)memory_allocate(SHARD_CHECK_PIECE);
    bool good = true, reads = file >= 0 && piece && bytes == shard->mapping_bytes;
    while (reads && good && left > 0 && !__atomic_load_n(canceled, __ATOMIC_RELAXED)) {
        size_t n = min_size(left, SHARD_CHECK_PIECE), tokens = n / shard->token_bytes;
        good = file_read_at(file, piece, n, bytes - left, shard->path, error);
        Shard part = *shard;
        part.tokens = piece;
        uint32_t largest = 0;
        for (size_t i = 0; good && i < tokens; i++)
            if (shard_token(&part, i) > largest) largest = shard_token(&part, i);
        for (size_t i = 0; good && largest >= V && i < tokens; i++)
            if (shard_token(&part, i) >= V)
                good = shard_refuse_token(shard, shard_token(&part, i), shard->count - left / shard->token_bytes + i, V,
                                          error);
        hash_add(&hash, piece, n);
        left -= n;
    }
    if (reads && good && left == 0 && shard->checksum != 0 && (hash_end(&hash) | 1) != shard->checksum)
        good = fail_with(error, "the tokens of %s do not match its checksum: they were damaged or changed; copy it, or "
                         "make the shards, again", shard->path) || fail_as(error, ERROR_USAGE);
    if (file >= 0) close(file);
    free(piece);
    return good;
}

static inline void* shard_check_run(void* argument) {
    ShardCheck* c = (ShardCheck*)argument;
    for (size_t d = 0, number = 0; d < 2; d++)
        for (size_t i = 0; c->datasets[d] && i < c->datasets[d]->shard_count; i++)
            if (number++ % c->world == c->rank &&
                !shard_check(&c->datasets[d]->shards[i], c->vocabulary, &c->canceled, &c->error)) {
                __atomic_store_n(&c->failed, true, __ATOMIC_RELEASE);
                return NULL;
            }
    return NULL;
}

// Starts the thread. The datasets stay open until shard_check_end; NULL: none.
static inline void shard_check_begin(ShardCheck* c, const Dataset* train, const Dataset* val, size_t V, size_t rank,
                                     size_t world) {
    c->datasets[0] = train;
    c->datasets[1] = val;
    c->vocabulary = V;
    c->world = max_size(world, 1);
    c->rank = rank % c->world;  // a launcher may number the ranks of a machine, and hide that they share it
    c->running = pthread_create(&c->thread, NULL, shard_check_run, c) == 0;  // or else the loader finds what it reads
}

static inline bool shard_check_good(const ShardCheck* c, Error* error) {
    if (!__atomic_load_n(&c->failed, __ATOMIC_ACQUIRE)) return true;
    *error = c->error;
    return false;
}

static inline void shard_check_end(ShardCheck* c) {
    __atomic_store_n(&c->canceled, true, __ATOMIC_RELAXED);
    if (c->running) pthread_join(c->thread, NULL);
    c->running = false;
}

#endif  // LLMTRAIN_SHARD_CHECK_H
