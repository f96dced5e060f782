// spans.h: which tokens of a shard are trained: the file .spans next to a shard of conversations.
//
//   SpanFile spans;
//   if (!span_file_open(&spans, "x_train_000000.bin", tokens, checksum, hash, &error)) ...   of the shard's header
//   for (size_t i = 0; i < spans.document_count; i++)
//       for (size_t s = spans.documents[i].span; s < span_file_end(&spans, i); s++) ... spans.spans[s]
//   span_file_close(&spans);
//
//   SpanWriter writer = {0};
//   bool ok = span_writer_document(&writer, 120, SPAN_PLAIN, true, &error) &&     tokens of the next document
//             span_writer_span(&writer, 40, 20, 1, &error) &&                     of which tokens 40 to 59 are trained
//             span_writer_write(&writer, &hash, "x_train_000000.spans", checksum, &error);
//   span_writer_free(&writer);
//
//   1. file    its layout, and where it is
//   2. reader
//   3. writer
//
// A shard stays as llm.c reads it; the second file has the documents in it, which of them belong together, and the
// spans of tokens that are trained: those a model learns to predict. The two name each other by hashes: the header of
// the shard has the hash of the file, and the file the checksum of the shard's tokens. So a shard whose .spans is
// missing, damaged, or of another shard is refused, and no prompt is trained because a file was lost. Memory: 24 bytes
// for a document and 16 for a span.

#ifndef LLMTRAIN_SPANS_H
#define LLMTRAIN_SPANS_H

#include "../base/files.h"  // and from base.h Error, hashes

#include <assert.h>

// ------------------------------------------------------------------------------------------------
// 1. File
//
// The header, then the documents, which together are all tokens of the shard, then the spans. A group is what must be
// in the same batch: a pair of documents, chosen and rejected, in this order; or one other document. A span does not
// have the first token of its document, which nothing predicts.

#define SPANS_MAGIC "LLMSPANS"
#define SPANS_VERSION 1
#define SPANS_BYTES_MAX ((size_t)1 << 36)

typedef struct {
    char magic[8];
    uint32_t version, zero;
    uint64_t tokens;     // of the shard
    uint64_t documents, spans;
    uint64_t checksum;   // of the shard's tokens, as in its header
    uint64_t groups;
    uint64_t hash;       // of the file without this number: XXH64, its lowest bit set
} SpanHeader;
static_assert(sizeof(SpanHeader) == 64, "the header of a .spans file has 64 bytes");

typedef enum { SPAN_PLAIN, SPAN_CHOSEN, SPAN_REJECTED, SPAN_DESIRABLE, SPAN_UNDESIRABLE, SPAN_KINDS } SpanKind;
static const char* const SPAN_KIND_NAMES[SPAN_KINDS] = {"plain", "chosen", "rejected", "desirable", "undesirable"};

typedef struct {
    uint64_t first;      // position of its first token in the shard
    uint32_t tokens;
    uint32_t group;      // 0, 1, ...
    uint32_t span;       // its first one; the next document's first one ends them
    uint32_t kind;       // SpanKind
} SpanDocument;
static_assert(sizeof(SpanDocument) == 24, "a document in a .spans file has 24 bytes");

typedef struct {
    uint64_t first;      // position of its first token in the shard
    uint32_t tokens;
    float weight;        // of each token's loss, above 0
} TrainedSpan;
static_assert(sizeof(TrainedSpan) == 16, "a span in a .spans file has 16 bytes");

enum { SPANS_PATH_MAX = FILE_PATH_MAX + 8 };

// x_train_000000.spans for x_train_000000.bin.
static inline void span_file_path(char path[SPANS_PATH_MAX], const char* shard) {
    size_t length = strlen(shard);
    if (length >= 4 && strcmp(shard + length - 4, ".bin") == 0) length -= 4;
    snprintf(path, SPANS_PATH_MAX, "%.*s.spans", (int)min_size(length, FILE_PATH_MAX - 1), shard);
}

static inline uint64_t span_file_hash(const SpanHeader* header, const void* documents, const void* spans) {
    Hash hash = hash_begin(0);
    hash_add(&hash, header, offsetof(SpanHeader, hash));
    if (header->documents > 0) hash_add(&hash, documents, header->documents * sizeof(SpanDocument));
    if (header->spans > 0) hash_add(&hash, spans, header->spans * sizeof(TrainedSpan));
    return hash_end(&hash) | 1;
}

// ------------------------------------------------------------------------------------------------
// 2. Reader

typedef struct {
    char* data;                     // the file, owned
    const SpanDocument* documents;  // (document_count)
    size_t document_count;
    const TrainedSpan* spans;       // (span_count)
    size_t span_count, groups;
} SpanFile;

static inline void span_file_close(SpanFile* f) {
    free(f->data);
    memset(f, 0, sizeof *f);
}

// Where the spans of a document end.
static inline size_t span_file_end(const SpanFile* f, size_t document) {
    return document + 1 < f->document_count ? f->documents[document + 1].span : f->span_count;
}

// The first span that does not end before a position.
static inline size_t span_file_find(const SpanFile* f, uint64_t position) {
    size_t low = 0, high = f->span_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (f->spans[middle].first + f->spans[middle].tokens <= position) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Whether the token at a position is trained. *span: what span_file_find gave for it, or for an earlier position.
static inline bool span_file_trains(const SpanFile* f, size_t* span, uint64_t position) {
    while (*span < f->span_count && f->spans[*span].first + f->spans[*span].tokens <= position) ++*span;
    return *span < f->span_count && position >= f->spans[*span].first;
}

// Whether document i is what the writer would have written there.
static inline bool span_document_good(const SpanFile* f, size_t i, uint64_t tokens) {
    const SpanDocument *d = &f->documents[i], *before = i > 0 ? d - 1 : NULL;
    bool paired = d->kind == SPAN_REJECTED, chosen = before && before->kind == SPAN_CHOSEN;
    if (d->kind >= SPAN_KINDS || paired != chosen || (d->kind == SPAN_CHOSEN && i + 1 == f->document_count))
        return false;
    if (d->first != (before ? before->first + before->tokens : 0) || d->tokens > tokens - d->first) return false;
    if (d->group != (before ? before->group + !paired : 0)) return false;
    size_t end = span_file_end(f, i);
    if ((i == 0 && d->span != 0) || d->span >= end || end > f->span_count) return false;
    uint64_t from = d->first + 1, document_end = d->first + d->tokens;
    for (size_t s = d->span; s < end; s++) {
        const TrainedSpan* span = &f->spans[s];
        if (span->first < from || span->first >= document_end || span->tokens == 0 ||
            span->tokens > document_end - span->first || !(span->weight > 0 && isfinite(span->weight))) return false;
        from = span->first + span->tokens;
    }
    return true;
}

static inline bool span_file_check(SpanFile* f, size_t bytes, const char* path, const char* shard, uint64_t tokens,
                                   uint64_t checksum, uint64_t hash, Error* error) {
    SpanHeader header;
    if (bytes < sizeof header || memcmp(f->data, SPANS_MAGIC, 8) != 0)
        return fail_with(error, "%.600s is not the .spans file of a shard: it does not begin with " SPANS_MAGIC
                         "; run tokenize --chat again", path);
    memcpy(&header, f->data, sizeof header);
    if (header.version != SPANS_VERSION)
        return fail_with(error, "%.600s has version %u, but only %d can be read; run tokenize --chat again", path,
                         header.version, SPANS_VERSION);
    uint64_t room = bytes - sizeof header, documents = header.documents;
    bool sized = documents <= room / sizeof(SpanDocument) &&
                 header.spans == (room - documents * sizeof(SpanDocument)) / sizeof(TrainedSpan) &&
                 (room - documents * sizeof(SpanDocument)) % sizeof(TrainedSpan) == 0;
    f->documents = (const SpanDocument*)(f->data + sizeof header);
    f->spans = sized ? (const TrainedSpan*)(f->documents + documents) : NULL;
    if (!sized || span_file_hash(&header, f->documents, f->spans) != header.hash)
        return fail_with(error, "%.600s is damaged or half copied: it does not match its own hash; copy it, or run "
                         "tokenize --chat, again", path);
    if (header.hash != hash || header.checksum != checksum || header.tokens != tokens)
        return fail_with(error, "%.450s does not belong to %.450s: one of them was replaced, or tokenize was stopped; "
                         "copy both, or run tokenize --chat, again", path, shard);
    f->document_count = (size_t)documents;
    f->span_count = (size_t)header.spans;
    f->groups = (size_t)header.groups;
    const SpanDocument* last = documents > 0 ? &f->documents[documents - 1] : NULL;
    bool good = last ? last->first + last->tokens == tokens && last->group + (uint64_t)1 == header.groups
                     : tokens == 0 && header.spans == 0 && header.groups == 0;
    for (size_t i = 0; good && i < f->document_count; i++) good = span_document_good(f, i, tokens);
    return good || fail_with(error, "%.600s is damaged: its documents and spans do not fit together; run tokenize "
                             "--chat again", path);
}

// Opens the .spans file of a shard. tokens, checksum, hash: what the shard's header says of its tokens and of the file.
// After a failure there is nothing to close.
static inline bool span_file_open(SpanFile* f, const char* shard, uint64_t tokens, uint64_t checksum, uint64_t hash,
                                  Error* error) {
    char path[SPANS_PATH_MAX];
    bool there;
    size_t bytes = 0;
    memset(f, 0, sizeof *f);
    span_file_path(path, shard);
    if (!path_look(&there, path, error)) return false;
    if (!there)
        return fail_with(error, "%.450s is missing: it says which tokens of %.450s are trained; copy it next to the "
                         "shard, or run tokenize --chat again", path, shard);
    bool ok = file_read(path, SPANS_BYTES_MAX, &f->data, &bytes, error) &&
              span_file_check(f, bytes, path, shard, tokens, checksum, hash, error);
    if (!ok) span_file_close(f);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Writer

typedef struct {
    SpanDocument* documents;  // (document_count), owned
    size_t document_count, document_places;
    TrainedSpan* spans;       // (span_count), owned
    size_t span_count, span_places;
    uint64_t tokens, groups;
} SpanWriter;

static inline void span_writer_free(SpanWriter* w) {
    free(w->documents);
    free(w->spans);
    memset(w, 0, sizeof *w);
}

// Adds a document; `begins`: it is the first of its group.
static inline bool span_writer_document(SpanWriter* w, size_t tokens, SpanKind kind, bool begins, Error* error) {
    if (w->span_count >= UINT32_MAX || w->groups >= UINT32_MAX || tokens > UINT32_MAX)
        return fail_with(error, "a shard has over 4 billion spans, or a document tokens; give fewer --shard-tokens");
    if (!memory_grow(&w->documents, &w->document_places, w->document_count + 1, sizeof *w->documents))
        return fail_with(error, "out of memory for %zu documents; give a smaller --shard-tokens",
                         w->document_count + 1);
    w->groups += begins;
    SpanDocument document = {w->tokens, (uint32_t)tokens, (uint32_t)(w->groups - 1), (uint32_t)w->span_count,
                             (uint32_t)kind};
    w->documents[w->document_count++] = document;
    w->tokens += tokens;
    return true;
}

// Adds a span to the last document; first: position in the document. Spans come in their order.
static inline bool span_writer_span(SpanWriter* w, size_t first, size_t tokens, float weight, Error* error) {
    if (!memory_grow(&w->spans, &w->span_places, w->span_count + 1, sizeof *w->spans))
        return fail_with(error, "out of memory for %zu spans; give a smaller --shard-tokens", w->span_count + 1);
    TrainedSpan span = {w->documents[w->document_count - 1].first + first, (uint32_t)tokens, weight};
    w->spans[w->span_count++] = span;
    return true;
}

// Writes the file to the disk, complete or not at all. *hash: for the header of the shard, whose tokens have this
// checksum.
static inline bool span_writer_write(const SpanWriter* w, uint64_t* hash, const char* path, uint64_t checksum,
                                     Error* error) {
    FileWriter file;
    SpanHeader header = {.version = SPANS_VERSION, .tokens = w->tokens, .documents = w->document_count,
                         .spans = w->span_count, .checksum = checksum, .groups = w->groups};
    memcpy(header.magic, SPANS_MAGIC, sizeof header.magic);
    *hash = header.hash = span_file_hash(&header, w->documents, w->spans);
    return file_begin(&file, path, error) && file_append(&file, &header, sizeof header, error) &&
           file_append(&file, w->documents, w->document_count * sizeof *w->documents, error) &&
           file_append(&file, w->spans, w->span_count * sizeof *w->spans, error) && file_end(&file, error);
}

#endif  // LLMTRAIN_SPANS_H
