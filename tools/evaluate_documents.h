// evaluate_documents.h: conversations as a source of evaluate.h: the loss of what is trained of each (its spans).
//
//   Documents documents = {&dataset, &tokenizer, vocabulary, T};
//   if (documents_open(&source, &documents, &error) && evaluate(&scores, &model, &source, NULL, &error)) ...
//   free(source.rows);
//
// An item is a document: a conversation, or one of the two answers of a preference. Each is evaluated alone, at the
// positions that it also has when it is packed with others; one of more than T + 1 tokens has no row, and no score.

#ifndef LLMTRAIN_EVALUATE_DOCUMENTS_H
#define LLMTRAIN_EVALUATE_DOCUMENTS_H

#include "evaluate.h"
#include "../llmtrain/text/logps.h"

typedef struct {
    const Dataset* dataset;
    const Tokenizer* tokenizer;
    int32_t vocabulary;          // of the model
    size_t T;
} Documents;

// The shard that has document number *item of all, which becomes its number there.
static inline size_t documents_find_shard(const Dataset* dataset, size_t* item) {
    size_t shard = 0;
    for (; *item >= dataset->spans[shard].document_count; shard++) *item -= dataset->spans[shard].document_count;
    return shard;
}

static inline bool documents_append(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row,
                                    Error* error) {
    const Documents* d = (const Documents*)context;
    size_t number = documents_find_shard(d->dataset, &item);
    const Shard* shard = &d->dataset->shards[number];
    const SpanFile* spans = &d->dataset->spans[number];
    const SpanDocument* document = &spans->documents[item];
    size_t n = document->tokens, span = document->span;
    (void)row;
    if (!tokens_reserve(out, n, error) || !shard_is_whole(shard, error)) return false;
    int32_t* ids = out->ids + out->count;
    for (size_t i = 0; i < n; i++) {
        uint32_t token = shard_token(shard, (size_t)document->first + i);
        if (token >= (uint32_t)d->vocabulary)
            return shard_refuse_token(shard, token, (size_t)document->first + i, (size_t)d->vocabulary, error);
        bool scored = span_file_trains(spans, &span, document->first + i);
        ids[i] = scored ? (int32_t)token : token_unscored((int32_t)token);
        if (scored) *bytes += tokens_bytes(d->tokenizer, &ids[i], 1);
    }
    shard_forget(shard);
    out->count += n;
    *first = (size_t)(spans->spans[document->span].first - document->first);
    return true;
}

// The documents of a dataset as a source; free(source->rows) frees it. Both *d and the dataset must outlive it.
static inline bool documents_open(Source* source, const Documents* d, Error* error) {
    const Dataset* data = d->dataset;
    size_t item = 0;
    for (size_t i = 0; i < data->shard_count; i++)
        if (data->shards[i].spans == 0)
            return fail_with(error, "%s has text, and other shards of --data conversations; give one kind",
                             data->shards[i].path);
    if (!source_allocate(source, dataset_documents(data), error)) return false;
    for (size_t i = 0; i < data->shard_count; i++)
        for (size_t k = 0; k < data->spans[i].document_count; k++, item++)
            source->rows[item + 1] = source->rows[item] + (data->spans[i].documents[k].tokens <= d->T + 1);
    if (source->rows[item] == 0)
        return fail_with(error, "no conversation of --data has at most %zu tokens; give a longer --seq", d->T + 1);
    const uint64_t numbers[2] = {dataset_fingerprint(data), d->T};
    source->hash = hash_bytes(numbers, sizeof numbers);
    source->append = documents_append;
    source->context = (void*)(uintptr_t)d;
    return true;
}

// Writes the log-probability of each document for --reference of ./train (text/logps.h).
static inline bool documents_write_logps(const char* path, const Documents* d, const Source* source,
                                         const Score* scores, Model* model, Error* error) {
    const Source nothing = {0};
    uint64_t hash = 0;
    if (!evaluate_key(&hash, model, &nothing, error)) return false;
    double* values = (double*)memory_allocate(source->items * sizeof(double));
    if (values == NULL) return fail_with(error, "out of memory for %zu log-probabilities", source->items);
    for (size_t i = 0; i < source->items; i++)
        values[i] = source->rows[i + 1] > source->rows[i] ? -scores[source->rows[i]].nats : NAN;
    bool ok = logps_write(path, d->dataset, hash, values, error);
    free(values);
    return ok;
}

#endif  // LLMTRAIN_EVALUATE_DOCUMENTS_H
