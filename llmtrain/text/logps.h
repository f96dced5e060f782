// logps.h: files of log-probabilities: what a model says of each document of a dataset, the reference of a preference
// objective.
//
//   if (!logps_write("x.ref", &dataset, model_hash, values, &error)) ...        build/evaluate --logps
//   if (!logps_read(&values, "x.ref", &dataset, &error)) ...                    ./train --reference
//
// Numbers take the place of a second model in memory: they do not drift, and name the data and the weights that they are
// of. A file has a header of 64 bytes, then a double for each document, the sum of the log-probabilities of its trained
// tokens, in the order of shards and documents; NAN for one that was too long.

#ifndef LLMTRAIN_LOGPS_H
#define LLMTRAIN_LOGPS_H

#include "data.h"

#define LOGPS_MAGIC "LLMLOGPS"
#define LOGPS_BYTES_MAX ((size_t)1 << 36)

typedef struct {
    char magic[8];
    uint32_t version, zero;
    uint64_t documents;
    uint64_t data;       // dataset_fingerprint
    uint64_t model;      // a hash of the weights
    uint64_t zeros[2];
    uint64_t hash;       // of the file without this number: XXH64
} LogpsHeader;
static_assert(sizeof(LogpsHeader) == 64, "the header of log-probabilities has 64 bytes");

// The number of document `document` of a shard among those of all shards; of no shard's: how many there are.
static inline size_t dataset_document(const Dataset* dataset, size_t shard, size_t document) {
    for (size_t i = 0; i < shard; i++) document += dataset->spans[i].document_count;
    return document;
}
static inline size_t dataset_documents(const Dataset* dataset) {
    return dataset->spans ? dataset_document(dataset, dataset->shard_count, 0) : 0;
}

static inline uint64_t logps_hash(const LogpsHeader* header, const double* values) {
    Hash hash = hash_begin(0);
    hash_add(&hash, header, offsetof(LogpsHeader, hash));
    if (header->documents > 0) hash_add(&hash, values, header->documents * sizeof(double));
    return hash_end(&hash);
}

// Writes the file, complete or not at all. values (dataset_documents); model: a hash of its weights.
static inline bool logps_write(const char* path, const Dataset* dataset, uint64_t model, const double* values,
                               Error* error) {
    FileWriter file;
    LogpsHeader header = {.version = 1, .documents = dataset_documents(dataset),
                          .data = dataset_fingerprint(dataset), .model = model};
    memcpy(header.magic, LOGPS_MAGIC, sizeof header.magic);
    header.hash = logps_hash(&header, values);
    return file_begin(&file, path, error) && file_append(&file, &header, sizeof header, error) &&
           file_append(&file, values, header.documents * sizeof(double), error) && file_end(&file, error);
}

// Reads the file of a dataset: *values (dataset_documents), which the caller frees.
static inline bool logps_read(double** values, const char* path, const Dataset* dataset, Error* error) {
    LogpsHeader header;
    char* text = NULL;
    size_t bytes = 0, documents = dataset_documents(dataset);
    *values = NULL;
    if (!file_read(path, LOGPS_BYTES_MAX, &text, &bytes, error)) return false;
    bool ok = bytes >= sizeof header && memcmp(text, LOGPS_MAGIC, 8) == 0;
    if (!ok) fail_with(error, "%.600s is not a file of log-probabilities; make one with build/evaluate --logps", path);
    if (ok) memcpy(&header, text, sizeof header);
    if (ok && (header.version != 1 || header.documents != (bytes - sizeof header) / sizeof(double) ||
               logps_hash(&header, (const double*)(text + sizeof header)) != header.hash))
        ok = fail_with(error, "%.600s is damaged or half copied; copy it, or run build/evaluate --logps, again", path);
    if (ok && (header.data != dataset_fingerprint(dataset) || header.documents != documents))
        ok = fail_with(error, "%.600s is of other data; give build/evaluate --logps the same shards, in the same way",
                       path);
    *values = ok ? (double*)memory_allocate(documents * sizeof(double)) : NULL;
    if (ok && *values == NULL) ok = fail_with(error, "out of memory for the log-probabilities of %zu documents", documents);
    if (ok) memcpy(*values, text + sizeof header, documents * sizeof(double));
    free(text);
    return ok;
}

#endif  // LLMTRAIN_LOGPS_H
