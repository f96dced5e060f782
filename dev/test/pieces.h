// pieces.h: makes the input of a training run and reads its output, for tests.
//
// put_shard writes tokens to train on. log_numbers reads a log. weights_hash gives one number for the tensors of a
// directory OUT/step_N: names, types and bytes, with the pieces of each tensor joined, whichever ranks wrote them, and
// its parts put together. Two checkpoints with the same number hold the same tensors.

#ifndef LLMTRAIN_PIECES_H
#define LLMTRAIN_PIECES_H

#include "llmtrain/ops/base.h"
#include "data/shards.h"
#include "llmtrain/base/files.h"
#include "llmtrain/base/json.h"
#include "whole_tensors.h"

typedef struct {
    char name[96];       // without the part and the range
    size_t number, count; // which part of the tensor, of how many
    size_t first;        // element of the part
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

// What a model's tensors are stacks of, from a manifest.
typedef struct { size_t heads, kv_heads, channels; bool gated; } PiecesModel;

static inline PiecesModel pieces_model(const char* directory) {
    char path[FILE_PATH_MAX], *text = NULL;
    size_t bytes;
    Json json;
    Error error;
    PiecesModel m = {0, 0, 0, false};
    snprintf(path, sizeof path, "%.4000s/manifest.json", directory);
    if (!file_read(path, (size_t)1 << 24, &text, &bytes, &error)) return m;
    if (json_parse(&json, text, bytes, path, &error)) {
        static const char* const keys[] = {"heads", "kv_heads", "channels"};
        size_t* const members[] = {&m.heads, &m.kv_heads, &m.channels};
        uint32_t config = json_get(&json, 0, "config");
        char family[16] = "";
        for (size_t i = 0; i < 3; i++) {
            double value = 0;
            json_number(&json, json_get(&json, config, keys[i]), &value);
            *members[i] = (size_t)value;
        }
        json_string(&json, json_get(&json, config, "family"), family, sizeof family);
        m.gated = strcmp(family, "gpt2") != 0;
        json_free(&json);
    }
    free(text);
    return m;
}

// Puts the parts of a tensor together, which have `sizes` bytes each. A tensor is divided by columns, or each of the
// matrices that it is a stack of by rows.
static inline void pieces_join(char* whole, const char* const* parts, const size_t* sizes, size_t count,
                               const char* name, const PiecesModel* m) {
    size_t shares[3] = {1, 0, 0}, rows = strstr(name, "_out_weight") ? m->channels : 1, sum;
    if (strstr(name, "qkv_")) shares[0] = m->heads, shares[1] = shares[2] = m->kv_heads;
    if (strstr(name, "ffn_in_") && m->gated) shares[1] = 1;
    sum = max_size(shares[0] + shares[1] + shares[2], 1) * max_size(rows, 1);
    for (size_t row = 0; row < rows; row++)
        for (size_t matrix = 0, before = row * (sum / rows); matrix < 3; before += shares[matrix++])
            for (size_t p = 0; p < count; p++) {
                size_t n = sizes[p] / sum * shares[matrix];
                memcpy(whole, parts[p] + sizes[p] / sum * before, n);
                whole += n;
            }
}

static inline int piece_compare(const void* a, const void* b) {
    const Piece *x = (const Piece*)a, *y = (const Piece*)b;
    int order = strcmp(x->name, y->name);
    if (order == 0) order = (x->number > y->number) - (x->number < y->number);
    return order ? order : (x->first > y->first) - (x->first < y->first);
}

// Adds a tensor, which has `count` pieces, to a hash.
static inline bool pieces_hash(Hash* hash, const Piece* pieces, size_t count, const SafetensorsFile* files,
                               const PiecesModel* model, Error* error) {
    enum { PARTS = 64 };
    const char *type = DTYPES[pieces[0].tensor->type].safetensors, *parts[PARTS] = {NULL};
    size_t bytes = 0, sizes[PARTS] = {0}, divided = max_size(pieces[0].count, 1);
    for (size_t i = 0; i < count; i++) bytes += pieces[i].tensor->bytes;
    char *data = (char*)memory_allocate(2 * bytes), *whole = data ? data + bytes : NULL, *to = data;
    bool good = (data && divided <= PARTS) || fail_with(error, "out of memory, or too many parts");
    for (size_t i = 0; good && i < count; i++) {
        const Piece* p = &pieces[i];
        good = p->number < divided || fail_with(error, "%s has a part %zu of %zu", p->name, p->number, divided);
        if (good) good = safetensors_read(&files[p->file], p->tensor, to, p->tensor->bytes, NULL, error);
        if (good && parts[p->number] == NULL) parts[p->number] = to;
        if (good) sizes[p->number] += p->tensor->bytes;
        to += good ? p->tensor->bytes : 0;
    }
    for (size_t i = 0; good && i < divided; i++) good = parts[i] || fail_with(error, "%s lacks a part", pieces[0].name);
    if (good && divided > 1) pieces_join(whole, parts, sizes, divided, pieces[0].name, model);
    if (good) hash_add(hash, pieces[0].name, strlen(pieces[0].name));
    if (good) hash_add(hash, type, strlen(type));
    if (good) hash_add(hash, divided > 1 ? whole : data, bytes);
    free(data);
    return good;
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
            const char* name = p->tensor->name;
            size_t length = strcspn(name, "{[");
            snprintf(p->name, sizeof p->name, "%.*s", (int)length, name);
            if (name[length] == '{') sscanf(name + length, "{%zu/%zu}", &p->number, &p->count);
            length += strcspn(name + length, "[");
            if (name[length]) sscanf(name + length, "[%zu:", &p->first);
        }
    }
    if (pieces) qsort(pieces, count, sizeof(Piece), piece_compare);
    Hash hash = hash_begin(0);
    PiecesModel model = pieces_model(directory);
    for (size_t i = 0, end; pieces && good && i < count; i = end) {
        for (end = i + 1; end < count && strcmp(pieces[end].name, pieces[i].name) == 0;) end++;
        good = pieces_hash(&hash, &pieces[i], end - i, files, &model, error);
    }
    for (size_t r = 0; files && r < ranks; r++) safetensors_close(&files[r]);
    free(files);
    free(pieces);
    return good && pieces ? hash_end(&hash) : 0;
}

#endif  // LLMTRAIN_PIECES_H
