// pieces.h: makes the input of a training run and reads its output, for tests.
//
// put_shard writes tokens to train on. log_numbers reads a log. weights_hash gives one number for the tensors of a
// directory OUT/step_N: names, types and bytes, with the pieces of each tensor joined, whichever ranks wrote them. Two
// checkpoints with the same number hold the same tensors.

#ifndef LLMTRAIN_PIECES_H
#define LLMTRAIN_PIECES_H

#include "llmtrain/ops/base.h"
#include "data/shards.h"
#include "llmtrain/base/files.h"
#include "llmtrain/base/json.h"
#include "whole_tensors.h"

typedef struct {
    char name[96];       // without the range
    size_t first;        // element of the tensor
    size_t file;         // number of the rank
    SafetensorsTensor* tensor;
} Piece;

// Tokens of which some, and some successors, are likelier than others, so that there is something to learn.
static inline void put_shard(const char* path, int32_t vocabulary, size_t count, uint64_t seed) {
    static ShardWriter writer;
    Error error;
    int32_t token = 0;
    bool good = shard_writer_open(&writer, path, vocabulary, 0, &error);
    for (size_t i = 0; good && i < count; i++) {
        Random4 r = random4(seed, RANDOM_TEST, 0, i);
        double u = (double)r.bits[0] * 0x1p-32;
        token = r.bits[1] % 2 ? (token * 5 + 7) % vocabulary : (int32_t)(u * u * (double)vocabulary);
        good = shard_writer_add(&writer, &token, 1, &error);
    }
    if (good && shard_writer_finish(&writer, &error) && shard_publish(path, &error)) return;
    printf("cannot make a shard: %s\n0 passed, 1 failed\n", error.text);
    exit(3);
}

// The values of a key in a run's log, one per line, at most `max`; returns how many. NAN: the line lacks the key.
static inline size_t log_numbers(double* values, size_t max, const char* run, const char* key) {
    char path[FILE_PATH_MAX], *text = NULL;
    size_t bytes, count = 0;
    Error error;
    snprintf(path, sizeof path, "%.4000s/metrics.jsonl", run);
    if (!file_read(path, (size_t)1 << 24, &text, &bytes, &error)) return 0;
    char* rest = text;
    for (char* line; count < max && (line = strsep(&rest, "\n")) != NULL && *line;) {
        Json json;
        values[count++] = NAN;
        if (!json_parse(&json, line, strlen(line), path, &error)) continue;
        json_number(&json, json_get(&json, 0, key), &values[count - 1]);
        json_free(&json);
    }
    free(text);
    return count;
}

static inline int piece_compare(const void* a, const void* b) {
    const Piece *x = (const Piece*)a, *y = (const Piece*)b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->first > y->first) - (x->first < y->first);
}

// Returns 0 on failure, with the reason in *error.
static inline uint64_t weights_hash(const char* directory, Error* error) {
    enum { RANKS = 64 };
    SafetensorsFile* files = (SafetensorsFile*)memory_allocate(RANKS * sizeof *files);
    size_t ranks = 0, count = 0, place = 0;
    bool good = files != NULL || fail_with(error, "out of memory");
    for (; good && ranks < RANKS; ranks++) {
        char path[FILE_PATH_MAX];
        snprintf(path, sizeof path, "%.4000s/rank_%05zu.safetensors", directory, ranks);
        if (ranks > 0 && access(path, F_OK) != 0) break;
        good = safetensors_open(&files[ranks], path, error);
        if (!good) break;
        count += files[ranks].header.count;
    }
    Piece* pieces = good ? (Piece*)memory_allocate(count * sizeof(Piece)) : NULL;
    for (size_t r = 0; pieces && r < ranks; r++) {
        for (size_t i = 0; i < files[r].header.count; i++) {
            Piece* p = &pieces[place++];
            p->tensor = &files[r].header.tensors[i];
            p->file = r;
            size_t length = strcspn(p->tensor->name, "[");
            snprintf(p->name, sizeof p->name, "%.*s", (int)length, p->tensor->name);
            if (p->tensor->name[length]) sscanf(p->tensor->name + length, "[%zu:", &p->first);
        }
    }
    if (pieces) qsort(pieces, count, sizeof(Piece), piece_compare);
    Hash hash = hash_begin(0);
    for (size_t i = 0; pieces && good && i < count; i++) {
        SafetensorsTensor* t = pieces[i].tensor;
        const char* type = DTYPES[t->type].safetensors;
        void* data = memory_allocate(t->bytes);
        good = data && safetensors_read(&files[pieces[i].file], t, data, t->bytes, NULL, error);
        if (good && pieces[i].first == 0) hash_add(&hash, pieces[i].name, strlen(pieces[i].name));
        if (good && pieces[i].first == 0) hash_add(&hash, type, strlen(type));
        if (good) hash_add(&hash, data, t->bytes);
        free(data);
    }
    for (size_t r = 0; files && r < ranks; r++) safetensors_close(&files[r]);
    free(files);
    free(pieces);
    return good && pieces ? hash_end(&hash) : 0;
}

#endif  // LLMTRAIN_PIECES_H
