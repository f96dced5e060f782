// data.h: token shards as a dataset, and the batches that training and validation take from it.
//
//   1. shards   the file format of tokens: opening and checking it; data/shards.h writes it
//   2. dataset  a set of shards, or tokens in memory
//   3. order    which tokens sample number i is: a pure function, no shuffle arrays
//   4. loader   the batches of one rank, prefetched by a thread
//
//   Dataset dataset;
//   Loader loader;
//   bool ok = dataset_open(&dataset, "data/x_train_*.bin", &error) &&
//             loader_open(&loader, &dataset, vocabulary, seed, rank, world, B, T, &error) &&
//             loader_start(&loader, samples_consumed, &error);
//   while (ok && ...) ok = loader_next(&loader, tokens, targets, &error);
//
// The state of the data in a run is one number, the samples consumed: a loader that starts with it continues the run.
// The order of samples is the same for any batch size and number of ranks. Every token is checked against the
// vocabulary before it leaves this file.

#ifndef LLMTRAIN_DATA_H
#define LLMTRAIN_DATA_H

#include "../base/files.h"  // opening and reading; and from base.h Error, random4, hashes
#include "../model/documents.h"
#include "packing.h"

#include <assert.h>
#include <glob.h>
#include <pthread.h>
#include <sys/mman.h>

// ------------------------------------------------------------------------------------------------
// 1. Shards
//
// A shard is a header of 1,024 bytes and then tokens of 2 or 4 bytes each: the format of llm.c, so its shards work here
// and ours work there. Some of the fields that llm.c leaves zero are ours; zero means unknown. The shards that were
// made together, PREFIX_train_*.bin and PREFIX_val_*.bin, are a set: a program that was killed while it gave them their
// names leaves some of an earlier set, or too few, and is found out; so is a shard that was copied over another.
//
// A shard is mapped, not read: opening takes no time, the ranks of a machine share the pages, and no file stays open.
// But a mapped file must not shrink: access to a page that is gone kills the process (SIGBUS). So the size is checked
// before every window, and a changed file is an error. Two cases remain: a failing disk, and a file that is truncated
// in the microseconds between check and copy.

#define SHARD_MAGIC_16 20240520  // tokens are uint16
#define SHARD_VERSION_16 1
#define SHARD_MAGIC_32 20240801  // tokens are uint32, for vocabularies above 65,536
#define SHARD_VERSION_32 7

typedef struct {
    int32_t magic;
    int32_t version;
    uint32_t count_low;    // tokens in the file: lower 32 bits
    int32_t vocabulary;    // ours: every token is below it; 0 = unknown
    uint32_t count_high;   // ours: upper 32 bits
    int32_t unused;
    double entropy_floor;  // ours: the loss of the text's true source, in nats per token; 0 = unknown
    uint64_t checksum;     // ours: of the tokens' bytes: hash_bytes, its lowest bit set
    uint64_t set;          // ours: identifies the set
    uint32_t set_shards;   // ours: how many shards of this kind, train or val, the set has
    int32_t number;        // ours: which of them it is: 1, 2, ... of train, -1, -2, ... of val
    uint64_t spans;        // ours: of the .spans file next to it: its hash; 0 = it has none (spans.h)
    int32_t unused_too[240];
} ShardHeader;
static_assert(sizeof(ShardHeader) == 1024, "the header of a shard is int32[256]");

// The data, or what was asked of them, are wrong; nothing that a restart would mend.
#define fail_usage(error, ...) (fail_with(error, __VA_ARGS__) || fail_as(error, ERROR_USAGE))

typedef struct {
    char* path;            // owned
    const void* tokens;    // (count), uint16 or uint32
    size_t count;
    size_t token_bytes;    // 2 or 4
    int32_t vocabulary;    // 0 = unknown
    double entropy_floor;  // nats per token; 0 = unknown
    uint64_t checksum, set;  // 0 = unknown
    size_t set_shards;
    int32_t number;
    uint64_t spans;        // hash of its .spans file; 0: it has none
    void* mapping;         // the whole file, owned; NULL when the tokens are the caller's
    size_t mapping_bytes;
} Shard;

static inline uint32_t shard_token(const Shard* shard, size_t position) {
    if (shard->token_bytes == 2) return ((const uint16_t*)shard->tokens)[position];
    return ((const uint32_t*)shard->tokens)[position];
}

// False for NaN. The bound is far above the logarithm of any vocabulary.
static inline bool entropy_is_possible(double nats) { return nats >= 0 && nats <= 100; }

// Fills in the shard from its header, and refuses a header that the writer (data/shards.h) would not write.
static inline bool shard_read_header(Shard* shard, const ShardHeader* header, uint64_t file_bytes, Error* error) {
    const char* path = shard->path;
    bool is_16 = header->magic == SHARD_MAGIC_16;
    if (!is_16 && header->magic != SHARD_MAGIC_32)
        return fail_usage(error, "%s is not a token shard: it begins with %d, not %d or %d; make shards with tokenize",
                          path, header->magic, SHARD_MAGIC_16, SHARD_MAGIC_32);
    int32_t version = is_16 ? SHARD_VERSION_16 : SHARD_VERSION_32;
    if (header->version != version)
        return fail_usage(error, "%s is a token shard of version %d, but only %d can be read; tokenize the text again",
                          path, header->version, version);
    shard->token_bytes = is_16 ? 2 : 4;
    shard->vocabulary = header->vocabulary;
    shard->entropy_floor = header->entropy_floor;
    shard->checksum = header->checksum;
    shard->set = header->set;
    shard->set_shards = header->set_shards;
    shard->number = header->number;
    shard->spans = header->spans;
    shard->count = (size_t)((uint64_t)header->count_high << 32 | header->count_low);
    uint64_t payload = file_bytes - sizeof *header;
    if (payload % shard->token_bytes != 0 || payload / shard->token_bytes != shard->count)
        return fail_usage(error, "%s is damaged or half copied: its header promises %zu tokens of %zu bytes, but %llu "
                          "bytes follow; copy or make it again", path, shard->count, shard->token_bytes,
                          (unsigned long long)payload);
    if (shard->vocabulary < 0 || (is_16 && shard->vocabulary > 65536))
        return fail_usage(error, "%s is damaged: its header gives a vocabulary of %d to tokens of %zu bytes; copy or "
                          "make it again", path, shard->vocabulary, shard->token_bytes);
    if (!entropy_is_possible(shard->entropy_floor))
        return fail_usage(error, "%s is damaged: its header gives an entropy of %g nats per token; copy or make it "
                          "again", path, shard->entropy_floor);
    return true;
}

static inline void shard_close(Shard* shard) {
    if (shard->mapping) munmap(shard->mapping, shard->mapping_bytes);
    free(shard->path);
    memset(shard, 0, sizeof *shard);
}

static inline bool shard_map(Shard* shard, int file, size_t bytes, Error* error) {
    ShardHeader header;
    if (bytes < sizeof header)
        return fail_usage(error, "%s is not a token shard: it has %zu bytes, and the header alone has %zu; make shards "
                          "with tokenize", shard->path, bytes, sizeof header);
    if (!file_read_at(file, &header, sizeof header, 0, shard->path, error)) return false;
    if (!shard_read_header(shard, &header, bytes, error)) return false;
    void* mapping = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) return fail_file(error, "map into memory", shard->path);
    shard->mapping = mapping;
    shard->mapping_bytes = bytes;
    shard->tokens = (const char*)mapping + sizeof header;
    return true;
}

// The caller closes the shard with shard_close; after a failure there is nothing to close.
static inline bool shard_open(Shard* shard, const char* path, Error* error) {
    size_t bytes;
    memset(shard, 0, sizeof *shard);
    int file = file_open(&bytes, path, error);
    if (file < 0) return false;
    shard->path = strdup(path);
    bool ok = shard->path ? shard_map(shard, file, bytes, error) : fail_with(error, "out of memory for %s", path);
    close(file);
    if (!ok) shard_close(shard);
    return ok;
}

// Drops the pages already read; otherwise a pass over the file would count as this process's memory.
static inline void shard_forget(const Shard* shard) {
    if (shard->mapping) memory_forget_file(shard->mapping, shard->mapping_bytes);
}

// False if the file no longer has the size that was mapped. A file that was removed or renamed stays mapped.
static inline bool shard_is_whole(const Shard* shard, Error* error) {
    struct stat status;
    if (!shard->mapping || stat(shard->path, &status) != 0) return true;
    if ((uint64_t)status.st_size == shard->mapping_bytes) return true;
    return fail_with(error, "%s changed while it was in use: it had %zu bytes and now has %lld; put it back and resume",
                     shard->path, shard->mapping_bytes, (long long)status.st_size);
}

static inline bool shard_refuse_token(const Shard* shard, uint32_t token, size_t position, size_t V, Error* error) {
    fail_with(error, "token %u at position %zu of %s is outside the vocabulary of %zu; give the model the tokenizer's "
              "vocabulary, or make the shards again", token, position, shard->path, V);
    return fail_as(error, ERROR_USAGE);  // a restart would not help
}

// The directory of the tokenizer of a shard: PREFIX_tokenizer for PREFIX_train_000000.bin; false for other names.
static inline bool shard_tokenizer_directory(char directory[FILE_PATH_MAX], const char* path) {
    static const char* const kinds[2] = {"_train_", "_val_"};
    size_t end = strlen(path);
    if (end < 4 || strcmp(path + end - 4, ".bin") != 0) return false;
    for (end -= 4; end > 0 && path[end - 1] >= '0' && path[end - 1] <= '9';) end--;
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(kinds[i]);
        if (end < length || strncmp(path + end - length, kinds[i], length) != 0) continue;
        int written = snprintf(directory, FILE_PATH_MAX, "%.*s_tokenizer", (int)(end - length), path);
        return written > 0 && (size_t)written < FILE_PATH_MAX;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// 2. Dataset
//
// Shards that agree in token width, and in vocabulary where they state one. A mixture has several parts, in the order
// in which they were given; the shards of a part are in the order of their names.

enum { DATASET_PARTS = 64, MIXTURE_CYCLE = 10000 };

typedef struct {
    size_t first, end;     // its shards
    uint64_t of_cycle;     // samples of it in each MIXTURE_CYCLE of a mixture; at least 1
} DatasetPart;

typedef struct {
    Shard* shards;         // (shard_count), owned
    size_t shard_count;
    DatasetPart parts[DATASET_PARTS];
    size_t part_count;     // at least 1
    SpanFile* spans;       // (shard_count), owned: of shards of conversations, whose other targets do not count;
                           // NULL: there is none
    Packing* packed;       // (part_count), owned: the rows of each part that has conversations; dataset_pack
    int32_t vocabulary;    // 0 = unknown
    double entropy_floor;  // nats per token, over all tokens; 0 = unknown
    bool mask_documents;   // the target that follows an end_of_text, in another document, does not count; set by the
    int32_t end_of_text;   // caller
} Dataset;

static inline size_t dataset_tokens(const Dataset* dataset) {
    size_t tokens = 0;
    for (size_t i = 0; i < dataset->shard_count; i++) tokens += dataset->shards[i].count;
    return tokens;
}

// Identifies a dataset: a hash of the lengths and the first tokens of the shards, and of the parts of a mixture.
static inline uint64_t dataset_fingerprint(const Dataset* dataset) {
    Hash hash = hash_begin(0);
    for (size_t i = 0; i < dataset->shard_count; i++) {
        const Shard* shard = &dataset->shards[i];
        uint64_t count = shard->count;
        hash_add(&hash, &count, sizeof count);
        if (count > 0) hash_add(&hash, shard->tokens, min_size(shard->count, 4096) * shard->token_bytes);
        if (shard->spans != 0) hash_add(&hash, &shard->spans, sizeof shard->spans);
        shard_forget(shard);
    }
    if (dataset->part_count > 1) hash_add(&hash, dataset->parts, dataset->part_count * sizeof(DatasetPart));
    return hash_end(&hash);
}

static inline void dataset_close(Dataset* dataset) {
    for (size_t i = 0; dataset->packed && i < dataset->part_count; i++) packing_free(&dataset->packed[i]);
    for (size_t i = 0; i < dataset->shard_count; i++) {
        if (dataset->spans) span_file_close(&dataset->spans[i]);
        shard_close(&dataset->shards[i]);
    }
    free(dataset->packed);
    free(dataset->spans);
    free(dataset->shards);
    memset(dataset, 0, sizeof *dataset);
}

// The length of a shard's path without its number and .bin; 0 for other names.
static inline size_t shard_series_length(const char* path) {
    size_t end = strlen(path);
    if (end < 10 || strcmp(path + end - 4, ".bin") != 0) return 0;
    for (size_t i = end - 10; i < end - 4; i++) if (path[i] < '0' || path[i] > '9') return 0;
    return end - 10;
}

// Whether the paths of two shards are those of one series.
static inline bool shards_are_neighbors(const Shard* a, const Shard* b) {
    size_t length = shard_series_length(a->path);
    return length > 0 && shard_series_length(b->path) == length && memcmp(a->path, b->path, length) == 0;
}

// Whether a shard's name is that of its place in its set, or either is unknown; its series' name has this length.
static inline bool shard_has_its_name(const Shard* shard, size_t length) {
    const char* end = shard->path + length;
    int64_t place = 1 + strtol(end, NULL, 10), number = shard->number;
    bool other_kind = number > 0 ? length >= 5 && memcmp(end - 5, "_val_", 5) == 0
                                 : length >= 7 && memcmp(end - 7, "_train_", 7) == 0;
    return number == 0 || (!other_kind && (number > 0 ? number : -number) == place);
}

// Whether shards of one name are of one set, each in its place, and none of them is missing in its directory: one that
// is there and was not given is not wanted.
static inline bool dataset_sets_whole(const Dataset* dataset, Error* error) {
    for (size_t i = 0; i < dataset->shard_count; i++) {
        const Shard* shard = &dataset->shards[i];
        size_t length = shard_series_length(shard->path);
        if (length == 0) continue;
        bool same = i > 0 && shards_are_neighbors(shard - 1, shard);
        for (const Shard* before = same ? shard - 1 : dataset->shards; before < shard; before++)
            if (before->set != shard->set && shards_are_neighbors(before, shard))
                return fail_usage(error, "%s and %s are not of one set: tokenize was stopped while it replaced them; "
                                  "run it again", before->path, shard->path);
        if (!shard_has_its_name(shard, length))
            return fail_usage(error, "%s has the tokens of another shard, %s number %06lld of its set; copy it again "
                              "or run tokenize; to use it so on purpose, give it a name not ending in six digits",
                              shard->path, shard->number > 0 ? "train" : "val", llabs((long long)shard->number) - 1);
        for (size_t number = 0; !same && shard->set != 0 && number < shard->set_shards; number++) {
            char path[FILE_PATH_MAX];
            snprintf(path, sizeof path, "%.*s%06zu.bin", (int)min_size(length, 4000), shard->path, number);
            if (access(path, F_OK) != 0)
                return fail_with(error, "%s is missing: it is one of %zu of its set; tokenize was stopped, or not all "
                                 "were copied: run it again, or copy it (a shard whose name does not end in six digits "
                                 "is of no set)", path, shard->set_shards);
        }
    }
    return true;
}

// Whether a part of the data is conversations. They have rows of their own, and are not mixed with text in one part.
static inline bool part_is_packed(const Dataset* dataset, const DatasetPart* part) {
    return dataset->spans && dataset->shards[part->first].spans != 0;
}

static inline bool dataset_parts_agree(const Dataset* dataset, Error* error) {
    for (const DatasetPart* part = dataset->parts; part < dataset->parts + dataset->part_count; part++)
        for (size_t i = part->first + 1; i < part->end; i++)
            if ((dataset->shards[i].spans != 0) != (dataset->shards[part->first].spans != 0))
                return fail_usage(error, "one of %.400s and %.400s has conversations (tokenize --chat), the other "
                                  "text; give one of them, or both with weights, as in 'a_*.bin:0.7,b_*.bin:0.3'",
                                  dataset->shards[part->first].path, dataset->shards[i].path);
    return true;
}

// Puts the conversations into rows for sequences of T tokens, if there are any; before their samples and windows are
// used. pack, too_long: see packing.h.
static inline bool dataset_pack(Dataset* dataset, size_t T, bool pack, TooLong too_long, Error* error) {
    if (dataset->spans == NULL) return true;
    dataset->packed = (Packing*)memory_allocate(dataset->part_count * sizeof(Packing));
    if (dataset->packed == NULL) return fail_with(error, "out of memory for the rows of conversations");
    for (size_t i = 0; i < dataset->part_count; i++) {
        const DatasetPart* part = &dataset->parts[i];
        if (part_is_packed(dataset, part) && !packing_make(&dataset->packed[i], dataset->spans, part->first, part->end,
                                                           T + 1, pack, too_long, error)) return false;
    }
    return true;
}

// Takes the vocabulary and the entropy floor from the shards, which must agree.
static inline bool dataset_summarize(Dataset* dataset, Error* error) {
    double tokens = 0, nats = 0;
    bool entropy_known = true;
    const Shard* stated = NULL;  // the first shard that states a vocabulary
    for (size_t i = 0; i < dataset->shard_count; i++) {
        const Shard* shard = &dataset->shards[i];
        if (shard->token_bytes != dataset->shards[0].token_bytes)
            return fail_usage(error, "%s has tokens of %zu bytes, but %s of %zu; give shards of one tokenizer",
                              dataset->shards[0].path, dataset->shards[0].token_bytes, shard->path, shard->token_bytes);
        if (stated && shard->vocabulary != 0 && shard->vocabulary != stated->vocabulary)
            return fail_usage(error, "%s has a vocabulary of %d, but %s of %d; give shards of one tokenizer",
                              stated->path, stated->vocabulary, shard->path, shard->vocabulary);
        if (!stated && shard->vocabulary != 0) stated = shard;
        entropy_known = entropy_known && (shard->entropy_floor > 0 || shard->count == 0);
        nats += shard->entropy_floor * (double)shard->count;
        tokens += (double)shard->count;
    }
    dataset->vocabulary = stated ? stated->vocabulary : 0;
    dataset->entropy_floor = entropy_known && tokens > 0 ? nats / tokens : 0;
    return true;
}

static inline int dataset_compare_names(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

static inline void dataset_one_part(Dataset* dataset) {
    dataset->parts[0].end = dataset->shard_count;
    dataset->part_count = 1;
}

// Opens the .spans file of each shard that has one.
static inline bool dataset_open_spans(Dataset* dataset, Error* error) {
    for (size_t i = 0; i < dataset->shard_count; i++) {
        const Shard* shard = &dataset->shards[i];
        if (shard->spans == 0) continue;
        if (!dataset->spans) dataset->spans = (SpanFile*)memory_allocate(dataset->shard_count * sizeof(SpanFile));
        if (!dataset->spans) return fail_with(error, "out of memory for %zu .spans files", dataset->shard_count);
        SpanFile* file = &dataset->spans[i];
        if (!span_file_open(file, shard->path, shard->count, shard->checksum, shard->spans, error)) return false;
        for (size_t s = 0; s < file->span_count; s++)
            if (file->spans[s].weight != 1)
                return fail_usage(error, "%s has a span of weight %g, and only 1 is supported; run tokenize --chat "
                                  "again", shard->path, (double)file->spans[s].weight);
    }
    return true;
}

static inline bool dataset_open_paths(Dataset* dataset, char** paths, size_t count, Error* error) {
    dataset->shards = (Shard*)memory_allocate(count * sizeof(Shard));
    if (!dataset->shards) return fail_with(error, "out of memory for %zu token shards", count);
    for (size_t i = 0; i < count; i++) {
        if (!shard_open(&dataset->shards[i], paths[i], error)) return false;
        dataset->shard_count++;
    }
    if (dataset->part_count == 0) dataset_one_part(dataset);
    return dataset_sets_whole(dataset, error) && dataset_open_spans(dataset, error) &&
           dataset_parts_agree(dataset, error) && dataset_summarize(dataset, error);
}

// The files that match one pattern, after those that were found before.
static inline bool dataset_find(glob_t* found, const char* pattern, Error* error) {
    int result = glob(pattern, GLOB_NOSORT | (found->gl_pathc > 0 ? GLOB_APPEND : 0), NULL, found);
    if (result == 0) return true;
    if (result == GLOB_NOMATCH)
        return fail_with(error, "no file matches '%s'; check the name, or make token shards of a text with tokenize%s",
                         pattern, strchr(pattern, '[')   ? " ([...] stands for one of its characters)"
                                  : strchr(pattern, '{') ? " (braces are not expanded)"
                                  : strchr(pattern, ':') ? " (a weight is a number after the last colon)"
                                                         : "");
    return fail_with(error, "out of memory for the files that match '%s'", pattern);
}

// Cuts the weight W off PATTERN:W; returns false if there is none, and where names of files end so.
static inline bool pattern_cut_weight(char* pattern, double* weight) {
    char *colon = strrchr(pattern, ':'), *end = NULL;
    glob_t named = {0};
    Error ignored;
    if (colon) *weight = strtod(colon + 1, &end);
    if (colon == NULL || end == colon + 1 || *end != 0) return false;
    bool found = dataset_find(&named, pattern, &ignored);
    globfree(&named);
    if (!found) *colon = 0;
    return !found;
}

// Makes the files found from `first` on the next part; a file of an earlier part is refused.
static inline bool dataset_add_part(Dataset* dataset, const glob_t* found, size_t first, Error* error) {
    if (dataset->part_count == DATASET_PARTS)
        return fail_usage(error, "a mixture has at most %d parts; let one pattern match more", DATASET_PARTS);
    qsort(found->gl_pathv + first, found->gl_pathc - first, sizeof(char*), dataset_compare_names);
    for (size_t part = 0; part < dataset->part_count; part++)
        for (size_t i = first, begin = dataset->parts[part].first; i < found->gl_pathc; i++)
            if (bsearch(&found->gl_pathv[i], found->gl_pathv + begin, dataset->parts[part].end - begin, sizeof(char*),
                        dataset_compare_names))
                return fail_usage(error, "%s is in two parts of the mixture; give it one weight", found->gl_pathv[i]);
    DatasetPart* part = &dataset->parts[dataset->part_count++];
    part->first = first;
    part->end = found->gl_pathc;
    return true;
}

// Divides the cycle among the parts, so that the sums of the first 1, 2, ... are each off by half a sample at most.
static inline bool dataset_weigh(Dataset* dataset, const double* weights, Error* error) {
    double sum = 0, total = 0;
    uint64_t given = 0;
    for (size_t i = 0; i < dataset->part_count; i++) total += weights[i];
    for (size_t i = 0; i < dataset->part_count; i++) {
        DatasetPart* part = &dataset->parts[i];
        sum += weights[i];
        part->of_cycle = (uint64_t)round((double)MIXTURE_CYCLE * (sum / total)) - given;
        given += part->of_cycle;
        if (part->of_cycle == 0)
            return fail_usage(error, "the weight of %s, %g, is less than 1/%d of the sum, %g; give it more, or leave "
                              "it out", dataset->shards[part->first].path, weights[i], MIXTURE_CYCLE, total);
    }
    return true;
}

// Finds the files of a list of patterns, and the parts of a mixture with their weights (DATASET_PARTS), which may be
// NULL: weights are refused then.
static inline bool dataset_find_all(Dataset* dataset, glob_t* found, double* weights, char* list, Error* error) {
    for (char *pattern = list, *next; pattern; pattern = next) {
        if ((next = strchr(pattern, ',')) != NULL) *next++ = 0;
        size_t first = found->gl_pathc;
        double weight = 0;
        bool weighs = pattern_cut_weight(pattern, &weight);
        if (weighs && weights == NULL)
            return fail_usage(error, "'%s' has the weight %g; weights are for training, here every token is read once; "
                              "leave it out", pattern, weight);
        if (weighs && !(weight >= 1e-100 && weight <= 1e100))
            return fail_usage(error, "the weight of '%s' is %g; give a number above 0", pattern, weight);
        if (first > 0 && weighs != (dataset->part_count > 0))
            return fail_usage(error, "'%s' has %s weight; give one to each pattern or to none, as in 'a_*.bin:0.7,"
                              "b_*.bin:0.3'", pattern, weighs ? "a" : "no");
        if (!dataset_find(found, pattern, error)) return false;
        if (weighs && !dataset_add_part(dataset, found, first, error)) return false;
        if (weighs) weights[dataset->part_count - 1] = weight;
    }
    return true;
}

// Sorts paths, and puts those that came more than once to the end; returns how many there are without them.
static inline size_t paths_sort(char** paths, size_t all) {
    size_t count = 0;
    qsort(paths, all, sizeof(char*), dataset_compare_names);
    for (size_t i = 0; i < all; i++)
        if (count == 0 || strcmp(paths[count - 1], paths[i]) != 0) {
            char* path = paths[i];
            paths[i] = paths[count];
            paths[count++] = path;
        }
    return count;
}

// Opens all files that match shell patterns (*, ?, [...]), separated by commas, sorted by the bytes of their names in
// any locale, since the order of the shards is part of the order of the samples. Patterns with weights, as in
// 'a_*.bin:0.7,b_*.bin:0.3', make a mixture, if that is allowed. A file with a comma or a bracket in its name is given
// alone. After a failure there is nothing to close.
static inline bool dataset_open_as(Dataset* dataset, const char* patterns, bool mixes, Error* error) {
    memset(dataset, 0, sizeof *dataset);
    glob_t found = {0};
    double weights[DATASET_PARTS] = {0};
    char *literal = (char*)patterns, *list = strdup(patterns);
    bool ok = list || fail_with(error, "out of memory for '%s'", patterns);
    if (access(patterns, F_OK) == 0) {
        ok = ok && dataset_open_paths(dataset, &literal, 1, error);
    } else {
        ok = ok && dataset_find_all(dataset, &found, mixes ? weights : NULL, list, error);
        size_t count = found.gl_pathc;
        if (ok && dataset->part_count == 0) count = paths_sort(found.gl_pathv, count);
        ok = ok && dataset_open_paths(dataset, found.gl_pathv, count, error) &&
             (weights[0] == 0 || dataset_weigh(dataset, weights, error));
    }
    globfree(&found);
    free(list);
    if (!ok) dataset_close(dataset);
    return ok;
}

// For training; and without a mixture, where every token is read once.
static inline bool dataset_open(Dataset* dataset, const char* patterns, Error* error) {
    return dataset_open_as(dataset, patterns, true, error);
}
static inline bool dataset_open_unweighted(Dataset* dataset, const char* patterns, Error* error) {
    return dataset_open_as(dataset, patterns, false, error);
}

// A dataset of tokens of 2 or 4 bytes (uint16_t, or int32_t and not negative). The caller keeps them for at least as
// long as the dataset.
static inline bool dataset_from_memory(Dataset* dataset, const void* tokens, size_t token_bytes, size_t count,
                                       Error* error) {
    memset(dataset, 0, sizeof *dataset);
    if (token_bytes != 2 && token_bytes != 4)
        return fail_with(error, "tokens in memory have 2 or 4 bytes each, not %zu", token_bytes);
    dataset->shards = (Shard*)memory_allocate(sizeof(Shard));
    if (dataset->shards) dataset->shards->path = strdup("the text");
    if (!dataset->shards || !dataset->shards->path) {
        free(dataset->shards);
        dataset->shards = NULL;
        return fail_with(error, "out of memory for a dataset");
    }
    dataset->shard_count = 1;
    dataset_one_part(dataset);
    dataset->shards->tokens = tokens;
    dataset->shards->token_bytes = token_bytes;
    dataset->shards->count = count;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Order
//
// A window is T + 1 consecutive tokens of one shard: the inputs, and shifted by one the targets.
//
// Training takes samples 0, 1, 2, ... without end. From a shard of n tokens an epoch takes n/T - 1 adjacent windows
// (one window if T + 1 <= n < 2T). The first begins at the epoch's phase, drawn from all starts that leave room for
// the windows, so every epoch cuts the text at other positions and reaches every token in some epoch. A keyed
// permutation orders the windows of all shards. All of this is a function of (dataset, T, seed, sample number): it
// does not depend on the batch size or the number of ranks, and can begin with any sample.
//
// Conversations are packed into rows instead (packing.h): an epoch takes each row once, in the order of the permutation.
//
// The parts of a mixture have epochs of their own. Each cycle of MIXTURE_CYCLE samples takes the next of_cycle samples
// of each part; a keyed permutation orders them. So the shares are exact after each cycle, and near them in between.
//
// Validation takes every shard from its first token on, in windows that share `overlap` < T tokens with the previous
// one. These are context only, since the previous window scored them, so a token is scored with at least `overlap`
// tokens before it. Tokens that do not fill a last window are left out.

typedef struct {
    size_t shard;
    size_t start;           // position of the window's first token in the shard
    const Packing* packed;  // NULL, or whose row it is
    size_t row;
} Window;

#define ORDER_ROUNDS 8
#define ORDER_PHASE 0xffffffffull  // the random number of an epoch that is its phase

// A permutation of [0, size) for every (seed, epoch); returns the image of `index`. A Feistel network on pairs (left,
// right) of numbers below `side`, side^2 >= size, with Philox as its round function; it is applied again to a result
// outside [0, size) until one is inside ("Ciphers with Arbitrary Finite Domains", Black and Rogaway, 2002). The side
// is even: with an odd one all rounds would be permutations of one parity, and a small set would favor some of its
// orders. Size is at most 2^57: above, the counter of a round could equal that of the phase.
static inline uint64_t order_permute(uint64_t index, uint64_t seed, uint64_t epoch, uint64_t size) {
    uint64_t side = (uint64_t)sqrt((double)size) / 2 * 2;
    while (side * side < size) side += 2;
    do {
        uint64_t left = index / side, right = index % side;
        for (uint64_t round = 0; round < ORDER_ROUNDS; round++) {
            Random4 r = random4(seed, RANDOM_ORDER, epoch, right * ORDER_ROUNDS + round);
            uint64_t sum = left + ((uint64_t)r.bits[0] << 32 | r.bits[1]) % side;
            left = right;
            right = sum % side;
        }
        index = left * side + right;
    } while (index >= size);
    return index;
}

// The part that a sample of a mixture is from. *sample: the sample's number, becomes its number in that part.
static inline size_t mixture_part(const Dataset* dataset, uint64_t seed, uint64_t* sample) {
    uint64_t cycle = *sample / MIXTURE_CYCLE;
    uint64_t place = order_permute(*sample % MIXTURE_CYCLE, seed, cycle, MIXTURE_CYCLE);
    const DatasetPart* part = dataset->parts;
    while (place >= part->of_cycle) place -= part++->of_cycle;
    *sample = cycle * part->of_cycle + place;
    return (size_t)(part - dataset->parts);
}

// How many of samples 0 to `samples` - 1 are from each part of a mixture.
typedef struct {
    uint64_t samples, counts[DATASET_PARTS];
    size_t parts;  // 1: no mixture
} MixtureCounts;

// Goes on to more samples; returns m.
static inline const MixtureCounts* mixture_count(MixtureCounts* m, const Dataset* dataset, uint64_t seed,
                                                 uint64_t samples) {
    m->parts = dataset->part_count;
    if (m->parts == 1) return m;
    if (samples - m->samples >= MIXTURE_CYCLE) {  // whole cycles need no permutation
        m->samples = samples / MIXTURE_CYCLE * MIXTURE_CYCLE;
        for (size_t i = 0; i < m->parts; i++)
            m->counts[i] = samples / MIXTURE_CYCLE * dataset->parts[i].of_cycle;
    }
    for (; m->samples < samples; m->samples++) {
        uint64_t sample = m->samples;
        m->counts[mixture_part(dataset, seed, &sample)]++;
    }
    return m;
}

static inline size_t shard_samples(const Shard* shard, size_t T) {
    if (shard->count < T + 1) return 0;
    return max_size(shard->count / T, 2) - 1;
}

static inline size_t shard_windows(const Shard* shard, size_t T, size_t overlap) {
    return shard->count < T + 1 ? 0 : (shard->count - 1 - T) / (T - overlap) + 1;
}

// Samples of an epoch.
static inline size_t part_samples(const Dataset* dataset, const DatasetPart* part, size_t T) {
    size_t samples = 0;
    if (part_is_packed(dataset, part)) return dataset->packed[part - dataset->parts].rows;
    for (size_t i = part->first; i < part->end; i++) samples += shard_samples(&dataset->shards[i], T);
    return samples;
}

// Windows in one validation.
static inline size_t dataset_windows(const Dataset* dataset, size_t T, size_t overlap) {
    size_t windows = 0;
    if (part_is_packed(dataset, dataset->parts)) return dataset->packed->rows;
    for (size_t i = 0; i < dataset->shard_count; i++) windows += shard_windows(&dataset->shards[i], T, overlap);
    return windows;
}

// False if the dataset, or a part of it, has no window at all. The functions below need one.
static inline bool dataset_suffices(const Dataset* dataset, size_t T, Error* error) {
    if (T == 0 || T >= (size_t)1 << 31) return fail_usage(error, "a sequence of %zu tokens is impossible", T);
    for (const DatasetPart* part = dataset->parts; part < dataset->parts + dataset->part_count; part++) {
        if (part_samples(dataset, part, T) > 0) continue;
        const Shard* longest = &dataset->shards[part->first];
        const SpanFile* spans = part_is_packed(dataset, part) ? &dataset->spans[part->first] : NULL;
        bool pairs = spans && spans->groups < spans->document_count;
        if (spans)
            return fail_usage(error, "no %s of %.600s fits a sequence of %zu tokens; give --seq %u or more%s",
                              pairs ? "pair" : "conversation", longest->path, T,
                              dataset->packed[part - dataset->parts].shortest - 1, pairs ? "" : ", or --too-long cut");
        for (size_t i = part->first + 1; i < part->end; i++)
            if (dataset->shards[i].count > longest->count) longest = &dataset->shards[i];
        return fail_usage(error, "%s%s has %zu tokens, but one sequence of %zu needs %zu; give more text or a shorter "
                          "sequence", part->end - part->first > 1 ? "the longest shard, " : "", longest->path,
                          longest->count, T, T + 1);
    }
    return true;
}

// A row of packed conversations; its place is that of its first document.
static inline Window packed_window(const Dataset* dataset, const Packing* packed, size_t row) {
    const PackedGroup* group = &packed->groups[packed->first[row]];
    Window window = {group->shard, (size_t)dataset->spans[group->shard].documents[group->document].first, packed, row};
    return window;
}

static inline Window dataset_sample(const Dataset* dataset, uint64_t seed, uint64_t sample, size_t T) {
    bool mixes = dataset->part_count > 1;
    size_t p = mixes ? mixture_part(dataset, seed, &sample) : 0;
    const DatasetPart* part = &dataset->parts[p];
    uint64_t samples = part_samples(dataset, part, T);
    uint64_t epoch = sample / samples + (mixes ? (p + 1) << 40 : 0);  // below 2^40: the cycles of the mixture
    uint64_t index = order_permute(sample % samples, seed, epoch, samples);
    if (part_is_packed(dataset, part)) return packed_window(dataset, &dataset->packed[p], (size_t)index);
    uint64_t phase = random4(seed, RANDOM_ORDER, epoch, ORDER_PHASE).bits[0];
    Window window = {part->first, 0, NULL, 0};
    const Shard* shard = &dataset->shards[part->first];
    for (; index >= shard_samples(shard, T); shard++, window.shard++) index -= shard_samples(shard, T);
    uint64_t starts = shard->count - shard_samples(shard, T) * T;  // that leave room for all windows; below 2T
    window.start = (size_t)(index * T + (phase * starts >> 32));
    return window;
}

// Validation window number `index` < dataset_windows. Rows, which were packed from the longest on, come in another
// order, so that the first ones are like all.
static inline Window dataset_window(const Dataset* dataset, size_t index, size_t T, size_t overlap) {
    Window window = {0, 0, NULL, 0};
    if (part_is_packed(dataset, dataset->parts))
        return packed_window(dataset, dataset->packed, (size_t)order_permute(index, 0, 0, dataset->packed->rows));
    for (; index >= shard_windows(&dataset->shards[window.shard], T, overlap); window.shard++)
        index -= shard_windows(&dataset->shards[window.shard], T, overlap);
    window.start = index * (T - overlap);
    return window;
}

// Copies `count` consecutive tokens of a shard: inputs to tokens, and to targets those that follow them; each has `room`
// places. Refuses a token outside the model's vocabulary: it would read outside the embedding. spans: NULL, or outside
// which targets do not count.
static inline bool shard_copy(int32_t* tokens, int32_t* targets, size_t room, const Dataset* dataset,
                              const Shard* shard, size_t start, size_t count, const SpanFile* spans, int32_t vocabulary,
                              Error* error) {
    size_t span = spans ? span_file_find(spans, start + 1) : 0;
    if (!shard_is_whole(shard, error)) return false;
    for (size_t t = 0; t < count; t++) {
        uint32_t token = shard_token(shard, start + t);
        if (token >= (uint32_t)vocabulary)
            return shard_refuse_token(shard, token, start + t, (size_t)vocabulary, error);
        if (t < room) tokens[t] = (int32_t)token;
        bool ended = t > 0 && dataset->mask_documents && tokens[t - 1] == dataset->end_of_text;
        bool prompt = t > 0 && spans && !span_file_trains(spans, &span, start + t);
        if (t > 0) targets[t - 1] = ended || prompt ? TARGET_NONE : (int32_t)token;
    }
    shard_forget(shard);
    return true;
}

// Copies a row of packed conversations: one document after the other, and zeros. The last token of each has no target.
static inline bool packed_read(int32_t* tokens, int32_t* targets, const Dataset* dataset, Window window,
                               int32_t vocabulary, size_t T, Error* error) {
    const Packing* p = window.packed;
    size_t t = 0;
    for (size_t g = p->first[window.row]; g < p->first[window.row + 1]; g++) {
        const SpanFile* spans = &dataset->spans[p->groups[g].shard];
        const Shard* shard = &dataset->shards[p->groups[g].shard];
        size_t end = t + p->groups[g].tokens;
        for (size_t d = p->groups[g].document; t < end; d++) {
            size_t n = min_size(spans->documents[d].tokens, end - t);  // fewer if it is cut
            if (!shard_copy(tokens + t, targets + t, T - t, dataset, shard, (size_t)spans->documents[d].first, n, spans,
                            vocabulary, error)) return false;
            t += n;
            if (t <= T) targets[t - 1] = TARGET_ENDS;
        }
    }
    for (; t < T; t++) {
        tokens[t] = 0;
        targets[t] = TARGET_NONE;
    }
    return true;
}

// Copies a window: tokens (T), targets (T).
static inline bool window_read(int32_t* tokens, int32_t* targets, const Dataset* dataset, Window window,
                               int32_t vocabulary, size_t T, Error* error) {
    if (window.packed) return packed_read(tokens, targets, dataset, window, vocabulary, T, error);
    return shard_copy(tokens, targets, T, dataset, &dataset->shards[window.shard], window.start, T + 1, NULL,
                      vocabulary, error);
}

// Validation windows first .. first + B - 1: tokens (B, T), targets (B, T). Those have no target that the previous
// window has scored, nor has any in rows past the last window, whose tokens are 0. So every token is scored once, for
// any B and number of ranks.
static inline bool dataset_batch(int32_t* tokens, int32_t* targets, const Dataset* dataset, size_t first,
                                 int32_t vocabulary, size_t B, size_t T, size_t overlap, Error* error) {
    size_t windows = dataset_windows(dataset, T, overlap);
    for (size_t b = 0; b < B; b++) {
        int32_t *row_tokens = tokens + b * T, *row_targets = targets + b * T;
        if (first + b < windows) {
            Window window = dataset_window(dataset, first + b, T, overlap);
            if (!window_read(row_tokens, row_targets, dataset, window, vocabulary, T, error)) return false;
            bool follows = window.start > 0 && !window.packed;
            for (size_t t = 0; t < overlap && follows; t++) row_targets[t] = TARGET_NONE;
        } else {
            memset(row_tokens, 0, T * sizeof(int32_t));
            for (size_t t = 0; t < T; t++) row_targets[t] = TARGET_NONE;
        }
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Loader
//
// The micro-batches of one rank. Micro-batch i of rank r is global micro-batch g = i * world + r, of the B samples from
// first_sample + g * B on: together the ranks read what one rank alone would. A thread keeps two batches ready, so
// training does not wait for the disk, page faults or checks. The thread owns slot n % 2 from the moment that batch
// n - 2 has been taken until batch n is made, and the caller of loader_next at all other times.

typedef struct {
    const Dataset* dataset;
    int32_t vocabulary;      // of the model
    uint64_t seed;
    size_t rank, world, B, T;
    uint64_t first_sample;
    int32_t* slots[2];       // each (2, B, T): tokens, then targets

    pthread_t thread;
    bool running;            // there is a thread to join
    pthread_mutex_t mutex;   // guards the members below
    pthread_cond_t changed;  // signals a change of one of them
    uint64_t made, taken;    // batches since loader_start; taken <= made <= taken + 2
    bool stopping;
    bool failed;             // batch number `made` could not be made; `error` says why
    Error error;
} Loader;

// The bytes that loader_open allocates.
static inline size_t loader_bytes(size_t B, size_t T) { return 2 * 2 * B * T * sizeof(int32_t); }

// The first sample of micro-batch `number` of the loader's rank, counted from global sample `first`.
static inline uint64_t loader_sample(const Loader* loader, uint64_t first, uint64_t number) {
    return first + (number * loader->world + loader->rank) * loader->B;
}

static inline bool loader_make(Loader* loader, uint64_t number, Error* error) {
    size_t B = loader->B, T = loader->T;
    int32_t* tokens = loader->slots[number % 2];
    int32_t* targets = tokens + B * T;
    uint64_t first = loader_sample(loader, loader->first_sample, number);
    for (size_t b = 0; b < B; b++) {
        Window window = dataset_sample(loader->dataset, loader->seed, first + b, T);
        if (!window_read(tokens + b * T, targets + b * T, loader->dataset, window, loader->vocabulary, T, error))
            return false;
    }
    return true;
}

static inline void* loader_run(void* argument) {
    Loader* loader = (Loader*)argument;
    pthread_mutex_lock(&loader->mutex);
    while (!loader->failed) {
        while (!loader->stopping && loader->made == loader->taken + 2)
            pthread_cond_wait(&loader->changed, &loader->mutex);
        if (loader->stopping) break;
        pthread_mutex_unlock(&loader->mutex);
        bool ok = loader_make(loader, loader->made, &loader->error);  // only this thread changes `made`
        pthread_mutex_lock(&loader->mutex);
        if (ok) loader->made++;
        else loader->failed = true;
        pthread_cond_signal(&loader->changed);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}

// The dataset must outlive the loader, and the loader must not be moved once it is started.
static inline bool loader_open(Loader* loader, const Dataset* dataset, int32_t vocabulary, uint64_t seed, size_t rank,
                               size_t world, size_t B, size_t T, Error* error) {
    memset(loader, 0, sizeof *loader);
    if (!dataset_suffices(dataset, T, error)) return false;
    if (vocabulary <= 0 || world == 0 || rank >= world || B == 0 || B > SIZE_MAX / 64 / T)
        return fail_with(error, "cannot load batches of %zu sequences of %zu tokens below %d for rank %zu of %zu", B, T,
                         vocabulary, rank, world);
    loader->dataset = dataset;
    loader->vocabulary = vocabulary;
    loader->seed = seed;
    loader->rank = rank;
    loader->world = world;
    loader->B = B;
    loader->T = T;
    loader->slots[0] = (int32_t*)memory_allocate(loader_bytes(B, T));
    if (!loader->slots[0])
        return fail_with(error, "out of memory for batches: %zu bytes; give a smaller batch", loader_bytes(B, T));
    loader->slots[1] = loader->slots[0] + 2 * B * T;
    pthread_mutex_init(&loader->mutex, NULL);
    pthread_cond_init(&loader->changed, NULL);
    return true;
}

// Ends the thread. loader_start can start it again, with another sample.
static inline void loader_stop(Loader* loader) {
    if (!loader->running) return;
    pthread_mutex_lock(&loader->mutex);
    loader->stopping = true;
    pthread_cond_signal(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
    pthread_join(loader->thread, NULL);
    loader->running = false;
}

// Starts with the given sample: 0, or, when a run resumes, the number of samples that all ranks have consumed.
static inline bool loader_start(Loader* loader, uint64_t first_sample, Error* error) {
    loader_stop(loader);
    loader->first_sample = first_sample;
    loader->made = loader->taken = 0;
    loader->stopping = loader->failed = false;
    int result = pthread_create(&loader->thread, NULL, loader_run, loader);
    if (result != 0) return fail_with(error, "cannot start the thread that reads the data: %s", strerror(result));
    loader->running = true;
    return true;
}

// The next micro-batch: tokens (B, T), targets (B, T). An error of the thread is returned with the batch that it
// concerns, after the good batches before it.
static inline bool loader_next(Loader* loader, int32_t* tokens, int32_t* targets, Error* error) {
    if (!loader->running) return fail_with(error, "the loader was asked for a batch before it was started");
    pthread_mutex_lock(&loader->mutex);
    while (loader->made == loader->taken && !loader->failed) pthread_cond_wait(&loader->changed, &loader->mutex);
    bool ready = loader->made > loader->taken;
    pthread_mutex_unlock(&loader->mutex);
    if (!ready) {
        *error = loader->error;
        return false;
    }
    const int32_t* slot = loader->slots[loader->taken % 2];  // only this thread changes `taken`
    size_t count = loader->B * loader->T;
    memcpy(tokens, slot, count * sizeof(int32_t));
    memcpy(targets, slot + count, count * sizeof(int32_t));
    pthread_mutex_lock(&loader->mutex);
    loader->taken++;
    pthread_cond_signal(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
    return true;
}

static inline void loader_close(Loader* loader) {
    if (!loader->slots[0]) return;
    loader_stop(loader);
    pthread_mutex_destroy(&loader->mutex);
    pthread_cond_destroy(&loader->changed);
    free(loader->slots[0]);
    memset(loader, 0, sizeof *loader);
}

#endif  // LLMTRAIN_DATA_H
