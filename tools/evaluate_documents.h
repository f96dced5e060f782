// evaluate_documents.h: conversations as a source of evaluate.h: the loss of what is trained of each (its spans).
//
//   if (!dataset_pack(&dataset, T, false, TOO_LONG_DROP, &error)) ...
//   Documents documents = {&dataset, &tokenizer, vocabulary, T};
//   if (documents_open(&source, &documents, &error) && evaluate(&scores, &model, &source, NULL, &error)) ...
//   free(source.rows);
//
// An item is a conversation, a row one of its documents: the conversation itself, or the two answers of a preference.
// Each is evaluated alone, at the positions that it also has when it is packed with others.

#ifndef LLMTRAIN_EVALUATE_DOCUMENTS_H
#define LLMTRAIN_EVALUATE_DOCUMENTS_H

#include "evaluate.h"

typedef struct {
    const Dataset* dataset;      // packed, each group in a row of its own
    const Tokenizer* tokenizer;
    int32_t vocabulary;          // of the model
    size_t T;
} Documents;

static inline bool documents_append(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row,
                                    Error* error) {
    const Documents* d = (const Documents*)context;
    const PackedGroup* group = &d->dataset->packed->groups[item];
    const SpanFile* spans = &d->dataset->spans[group->shard];
    const Shard* shard = &d->dataset->shards[group->shard];
    const SpanDocument* document = &spans->documents[group->document + row];
    size_t n = document->tokens;
    if (!tokens_reserve(out, n, error)) return false;
    int32_t* ids = out->ids + out->count;
    size_t span = document->span;
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

// The conversations of a dataset as a source; free(source->rows) frees it. Both *d and the dataset must outlive it.
static inline bool documents_open(Source* source, const Documents* d, Error* error) {
    const Packing* packed = d->dataset->packed;
    if (packed->rows == 0)
        return fail_with(error, "no conversation of --data has at most %zu tokens; give a longer --seq", d->T + 1);
    if (!source_allocate(source, packed->group_count, error)) return false;
    for (size_t i = 0; i < source->items; i++) {
        const PackedGroup* group = &packed->groups[i];
        source->rows[i + 1] = source->rows[i] + group_end(&d->dataset->spans[group->shard], group->document) -
                              group->document;
    }
    const uint64_t numbers[2] = {dataset_fingerprint(d->dataset), packed->group_count};
    source->hash = hash_bytes(numbers, sizeof numbers);
    source->append = documents_append;
    source->context = (void*)(uintptr_t)d;
    return true;
}

#endif  // LLMTRAIN_EVALUATE_DOCUMENTS_H
