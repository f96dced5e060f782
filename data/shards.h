// shards.h: writes token shards, for the programs that make them. data.h describes the format and reads it.
//
//   ShardWriter writer;
//   bool ok = shard_writer_open(&writer, "data/x_train_000000.bin", 256, 0, &error) &&
//             shard_writer_add(&writer, tokens, count, &error) &&          any number of times
//             shard_writer_finish(&writer, &error) && shard_publish("data/x_train_000000.bin", &error);
//   shard_writer_abandon(&writer);                                         after a failure: removes the file
//
//   1. writer  a shard
//   2. series  shards of a given length, PREFIX_train_000000.bin and so on; for conversations each with its .spans
//   3. set     the series of a prefix, train and val, and their tokenizer: PREFIX_tokenizer/
//
// The writer writes PATH.tmp, and shard_writer_finish flushes it to the disk; shard_publish then renames it to PATH.
// The two are separate, so that a set of shards can appear together after the last of them is on the disk. A shard
// that has its name is complete. A token outside the vocabulary is refused.

#ifndef LLMTRAIN_SHARDS_H
#define LLMTRAIN_SHARDS_H

#include "../llmtrain/text/data.h"  // ShardHeader, its magic numbers and versions
#include "../llmtrain/text/spans.h"
#include "../llmtrain/text/tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Writer

typedef struct {
    FILE* file;      // NULL: nothing to finish or abandon
    ShardHeader header;
    uint64_t count;  // tokens written
    Hash hash;       // of their bytes
    char path[FILE_PATH_MAX];
    char temporary[FILE_PATH_MAX + 8];
} ShardWriter;

// Removes the unfinished file; does nothing after shard_writer_finish.
static inline void shard_writer_abandon(ShardWriter* writer) {
    if (!writer->file) return;
    fclose(writer->file);
    writer->file = NULL;
    remove(writer->temporary);
}

// The vocabulary determines the width of a token: 2 bytes up to 65,536, then 4. entropy_floor: nats per token, or 0.
static inline bool shard_writer_open(ShardWriter* writer, const char* path, int32_t vocabulary, double entropy_floor,
                                     Error* error) {
    memset(writer, 0, sizeof *writer);
    if (vocabulary <= 0 || !entropy_is_possible(entropy_floor))
        return fail_with(error, "%s cannot have a vocabulary of %d and an entropy of %g nats per token", path,
                         vocabulary, entropy_floor);
    if (!path_copy(writer->path, path, error)) return false;
    if (directory_exists(path))
        return fail_with(error, "%s is a directory; move it away, or choose another name", path);
    snprintf(writer->temporary, sizeof writer->temporary, "%s.tmp", writer->path);
    writer->header.magic = vocabulary <= 65536 ? SHARD_MAGIC_16 : SHARD_MAGIC_32;
    writer->header.version = vocabulary <= 65536 ? SHARD_VERSION_16 : SHARD_VERSION_32;
    writer->header.vocabulary = vocabulary;
    writer->header.entropy_floor = entropy_floor;
    writer->hash = hash_begin(0);
    writer->file = fopen(writer->temporary, "wbe");
    // shard_writer_finish writes the header.
    if (writer->file && fseek(writer->file, sizeof writer->header, SEEK_SET) == 0) return true;
    fail_file(error, "create", writer->path);
    shard_writer_abandon(writer);
    return false;
}

// After a failure the caller abandons the writer.
static inline bool shard_writer_add(ShardWriter* writer, const int32_t* tokens, size_t count, Error* error) {
    enum { PIECE = LLMTRAIN_PIECE(4096, 7) };
    uint16_t narrow[PIECE];
    for (size_t done = 0; done < count;) {
        size_t some = min_size(count - done, PIECE);
        for (size_t i = 0; i < some; i++) {
            int32_t token = tokens[done + i];
            if (token < 0 || token >= writer->header.vocabulary)
                return fail_with(error, "token %d does not belong in %s, whose vocabulary is %d", token, writer->path,
                                 writer->header.vocabulary);
            narrow[i] = (uint16_t)token;
        }
        bool is_16 = writer->header.magic == SHARD_MAGIC_16;
        const void* bytes = is_16 ? (const void*)narrow : tokens + done;
        hash_add(&writer->hash, bytes, some * (is_16 ? 2 : 4));
        if (fwrite(bytes, is_16 ? 2 : 4, some, writer->file) != some) return fail_file(error, "write", writer->path);
        done += some;
    }
    writer->count += count;
    return true;
}

// Of the tokens so far.
static inline uint64_t shard_writer_checksum(const ShardWriter* writer) {
    return hash_end(&writer->hash) | 1;  // 0 means unknown
}

// Abandons the writer itself after a failure.
static inline bool shard_writer_finish(ShardWriter* writer, Error* error) {
    FILE* file = writer->file;
    writer->header.count_low = (uint32_t)writer->count;
    writer->header.count_high = (uint32_t)(writer->count >> 32);
    writer->header.checksum = shard_writer_checksum(writer);
    if (fseek(file, 0, SEEK_SET) != 0 || fwrite(&writer->header, sizeof writer->header, 1, file) != 1 ||
        fflush(file) != 0 || !file_sync(fileno(file))) {
        fail_file(error, "write", writer->path);
        shard_writer_abandon(writer);
        return false;
    }
    fclose(file);  // it can lose nothing: all is on the disk
    writer->file = NULL;
    return true;
}

// Gives the finished shard PATH.tmp the name PATH, in place of an older one.
static inline bool shard_publish(const char* path, Error* error) {
    char temporary[FILE_PATH_MAX + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (rename(temporary, path) != 0) return fail_file(error, "rename the finished file to", path);
    return directory_sync_parent(path, error);
}

// ------------------------------------------------------------------------------------------------
// 2. Series
//
// A series is written shard by shard under temporary names, and then all of it is renamed or removed.

typedef struct {
    const char* prefix;
    const char* kind;      // "train" or "val"
    uint64_t shard_tokens; // maximum per shard
    const Tokenizer* tokenizer;
    double entropy;        // floor, nats per byte of text; 0: unknown
    size_t shards;         // begun so far; the last may still be open
    uint64_t tokens;
    uint64_t bytes;        // of the text in the open shard, counted where the entropy is known
    ShardWriter writer;
    SpanWriter spans;      // of the open shard
    bool has_spans;        // series_add_document was called: each shard has a .spans file
} Series;

static inline void series_path(char path[FILE_PATH_MAX], const Series* series, size_t number) {
    snprintf(path, FILE_PATH_MAX, "%.4000s_%s_%06zu.bin", series->prefix, series->kind, number);
}

// The name of the .spans file of a shard until it is published.
static inline void spans_temporary(char path[SPANS_PATH_MAX + 8], const char* shard) {
    char name[SPANS_PATH_MAX];
    span_file_path(name, shard);
    snprintf(path, SPANS_PATH_MAX + 8, "%s.tmp", name);
}

// Completes the open shard, if there is one. Its header has the floor per token of the text in it.
static inline bool series_finish(Series* series, Error* error) {
    ShardWriter* writer = &series->writer;
    if (!writer->file) return true;
    if (series->has_spans) {
        char path[SPANS_PATH_MAX + 8];
        spans_temporary(path, writer->path);
        if (!span_writer_write(&series->spans, &writer->header.spans, path, shard_writer_checksum(writer), error))
            return false;
        span_writer_free(&series->spans);
    }
    if (series->entropy > 0 && writer->count > 0)
        writer->header.entropy_floor = series->entropy * ((double)series->bytes / (double)writer->count);
    series->bytes = 0;
    return shard_writer_finish(writer, error);
}

static inline bool series_add(Series* series, const int32_t* tokens, size_t count, Error* error) {
    const Tokenizer* tokenizer = series->tokenizer;
    while (count > 0) {
        if (series->writer.file && series->writer.count == series->shard_tokens && !series_finish(series, error))
            return false;
        if (!series->writer.file) {
            char path[FILE_PATH_MAX];
            if (series->shards == 1000000)
                return fail_with(error, "over a million shards; give a larger --shard-tokens");
            series_path(path, series, series->shards);
            if (!shard_writer_open(&series->writer, path, tokenizer->vocabulary, 0, error)) return false;
            series->shards++;
        }
        size_t some = min_size(count, series->shard_tokens - series->writer.count);
        if (!shard_writer_add(&series->writer, tokens, some, error)) return false;
        for (size_t i = 0; series->entropy > 0 && i < some; i++) {
            size_t bytes;
            tokenizer_piece(&bytes, tokenizer, tokens[i]);
            if (tokens[i] != tokenizer->end_of_text) series->bytes += bytes;
        }
        series->tokens += some;
        tokens += some;
        count -= some;
    }
    return true;
}

// Makes the next documents of a group, of this many tokens together, all go to one shard.
static inline bool series_begin_group(Series* series, size_t tokens, Error* error) {
    if (tokens > series->shard_tokens)
        return fail_with(error, "%zu tokens that must be in one shard are more than --shard-tokens %llu; give more",
                         tokens, (unsigned long long)series->shard_tokens);
    return !series->writer.file || tokens <= series->shard_tokens - series->writer.count ||
           series_finish(series, error);
}

// Adds a document of a group; `begins`: it is the group's first. spans: (span_count) by position in the document.
static inline bool series_add_document(Series* series, const int32_t* tokens, size_t count, const TrainedSpan* spans,
                                       size_t span_count, SpanKind kind, bool begins, Error* error) {
    series->has_spans = true;
    bool ok = series_add(series, tokens, count, error) &&
              span_writer_document(&series->spans, count, kind, begins, error);
    for (size_t i = 0; ok && i < span_count; i++)
        ok = span_writer_span(&series->spans, (size_t)spans[i].first, spans[i].tokens, spans[i].weight, error);
    return ok;
}

// Removes the .spans file of a shard, if there is one.
static inline bool spans_remove(const char* shard, Error* error) {
    char path[SPANS_PATH_MAX];
    span_file_path(path, shard);
    return remove(path) == 0 || errno == ENOENT || fail_file(error, "remove", path);
}

static inline bool series_remove(const Series* series, size_t first, Error* error) {
    char path[FILE_PATH_MAX];
    for (size_t i = first;; i++) {
        series_path(path, series, i);
        if (!spans_remove(path, error)) return false;
        if (remove(path) != 0) return errno == ENOENT || fail_file(error, "remove", path);
    }
}

// Without an id, adds the checksums of the finished shards to a hash; with one, writes it, the number
// of shards and the place of each into their headers.
static inline bool series_seal(const Series* series, Hash* hashes, uint64_t id, Error* error) {
    bool ok = true;
    for (size_t i = 0; ok && i < series->shards; i++) {
        char path[FILE_PATH_MAX], temporary[FILE_PATH_MAX + 8];
        ShardHeader header;
        series_path(path, series, i);
        snprintf(temporary, sizeof temporary, "%s.tmp", path);
        int file = open(temporary, O_RDWR | O_CLOEXEC);
        if (file < 0) return fail_file(error, "open", temporary);
        ok = file_read_at(file, &header, sizeof header, 0, temporary, error);
        if (ok && id == 0) hash_add(hashes, &header.checksum, sizeof header.checksum);
        if (ok && id == 0 && header.spans != 0) hash_add(hashes, &header.spans, sizeof header.spans);
        header.set = id;
        header.set_shards = (uint32_t)series->shards;
        header.number = (strcmp(series->kind, "val") == 0 ? -1 : 1) * (int32_t)(i + 1);
        if (ok && id != 0)
            ok = (pwrite(file, &header, sizeof header, 0) == (ssize_t)sizeof header && file_sync(file)) ||
                 fail_file(error, "write", temporary);
        close(file);
    }
    return ok;
}

// Removes what killed programs have left under temporary names.
static inline void series_clean(const Series* series) {
    char pattern[FILE_PATH_MAX];
    glob_t found;
    int length = snprintf(pattern, sizeof pattern, "%.3900s_%s_", series->prefix, series->kind);
    int result = GLOB_NOMATCH;
    for (int spans = 0; spans < 2; spans++) {
        snprintf(pattern + length, sizeof pattern - (size_t)length, "[0-9][0-9][0-9][0-9][0-9][0-9]%s",
                 spans ? ".spans.tmp*" : ".bin.tmp");
        int more = glob(pattern, GLOB_NOSORT | (result == 0 ? GLOB_APPEND : 0), NULL, &found);
        if (more == 0) result = 0;
    }
    for (size_t i = 0; result == 0 && i < found.gl_pathc; i++)  // the prefix may be a pattern, too
        if (strncmp(found.gl_pathv[i], pattern, (size_t)length) == 0) remove(found.gl_pathv[i]);
    if (result == 0) globfree(&found);
}

// Renames the finished shards, each after its .spans, and removes those that an earlier, longer series has left: a
// pattern would match both.
static inline bool series_publish(const Series* series, Error* error) {
    char path[FILE_PATH_MAX];
    if (series->shards == 0) return true;
    for (size_t i = 0; i < series->shards; i++) {
        char spans[SPANS_PATH_MAX], temporary[SPANS_PATH_MAX + 8];
        series_path(path, series, i);
        span_file_path(spans, path);
        spans_temporary(temporary, path);
        if (series->has_spans && rename(temporary, spans) != 0)
            return fail_file(error, "rename the finished file to", spans);
        if (!shard_publish(path, error) || (!series->has_spans && !spans_remove(path, error))) return false;
    }
    series_clean(series);
    return series_remove(series, series->shards, error);
}

static inline void series_abandon(Series* series) {
    char path[FILE_PATH_MAX], temporary[SPANS_PATH_MAX + 8];
    shard_writer_abandon(&series->writer);
    for (size_t i = 0; i < series->shards; i++) {
        series_path(path, series, i);
        snprintf(temporary, sizeof temporary, "%s.tmp", path);
        remove(temporary);
        spans_temporary(temporary, path);
        if (series->has_spans) remove(temporary);
    }
    span_writer_free(&series->spans);
}

// ------------------------------------------------------------------------------------------------
// 3. Set

typedef struct {
    const Tokenizer* tokenizer;
    bool of_bytes;     // the tokenizer is bytes and has no files
    char path[FILE_PATH_MAX], temporary[FILE_PATH_MAX + 8];  // of the tokenizer's directory
    Series series[2];  // train, val
} ShardSet;

static inline void shard_set_begin(ShardSet* set, const char* prefix, const Tokenizer* tokenizer,
                                   uint64_t shard_tokens, double entropy) {
    static const char* const kinds[2] = {"train", "val"};
    memset(set, 0, sizeof *set);
    set->tokenizer = tokenizer;
    set->of_bytes = tokenizer->hash == tokenizer_of_bytes().hash;
    snprintf(set->path, sizeof set->path, "%.4000s_tokenizer", prefix);
    snprintf(set->temporary, sizeof set->temporary, "%s.tmp", set->path);
    for (int i = 0; i < 2; i++) {
        Series series = {.prefix = prefix, .kind = kinds[i], .shard_tokens = shard_tokens, .tokenizer = tokenizer,
                         .entropy = entropy};
        set->series[i] = series;
    }
}

// Refuses to write only shards of one kind (0: train, 1: val) if the existing ones of the other kind have another
// tokenizer.
static inline bool shard_set_agrees(const ShardSet* set, int kind, Error* error) {
    char shard[FILE_PATH_MAX];
    Tokenizer other = tokenizer_of_bytes();
    series_path(shard, &set->series[1 - kind], 0);
    bool there;
    if (!path_look(&there, shard, error)) return false;
    if (!there) return true;
    if (directory_exists(set->path) && !tokenizer_open(&other, set->path, NULL, error)) return false;
    bool same = other.hash == set->tokenizer->hash;
    if (!same)
        fail_with(error, "%.600s was made with the tokenizer %s (%016llx), but these shards would be made with %s "
                  "(%016llx); give another --out, or remove it", shard, other.name, (unsigned long long)other.hash,
                  set->tokenizer->name, (unsigned long long)set->tokenizer->hash);
    tokenizer_close(&other);
    return same;
}

static inline bool shard_set_has_tokenizer(const ShardSet* set) {
    Tokenizer there;
    Error ignored;
    if (!directory_exists(set->path)) return set->of_bytes && access(set->path, F_OK) != 0;
    if (!tokenizer_open(&there, set->path, NULL, &ignored)) return false;
    bool same = there.hash == set->tokenizer->hash;
    tokenizer_close(&there);
    return same;
}

// Refuses a PREFIX_tokenizer that would be replaced but has no shards: it is not from an earlier set.
static inline bool shard_set_may_replace(const ShardSet* set, Error* error) {
    char shard[FILE_PATH_MAX];
    bool there;
    if (!path_look(&there, set->path, error)) return false;
    if (!there || shard_set_has_tokenizer(set)) return true;
    for (int i = 0; i < 2; i++) {
        series_path(shard, &set->series[i], 0);
        if (access(shard, F_OK) == 0) return true;
    }
    return fail_with(error, "%.600s exists without shards, and these would replace it; move it away, or give another "
                     "--out", set->path);
}

// Renames all shards and the tokenizer's files to their final names, in place of an earlier set. The caller has asked
// shard_set_may_replace. If an earlier call failed, or this one does, call shard_set_abandon.
static inline bool shard_set_publish(ShardSet* set, Error* error) {
    const char *path = set->path, *temporary = set->temporary;
    Hash hashes = hash_begin(0);
    bool ok = series_finish(&set->series[0], error) && series_finish(&set->series[1], error);
    for (int i = 0; i < 2; i++) ok = ok && series_seal(&set->series[i], &hashes, 0, error);
    uint64_t id = hash_end(&hashes) | 1;
    for (int i = 0; i < 2; i++) ok = ok && series_seal(&set->series[i], &hashes, id, error);
    if (ok && !shard_set_has_tokenizer(set)) {
        if (!set->of_bytes) ok = directory_remove(temporary, error) && tokenizer_save(set->tokenizer, temporary, error);
        // The old shards go first and the new ones come last, so that shards never have another set's tokenizer. Those
        // of a kind that is not written stay: shard_set_agrees has compared their tokenizer.
        for (int i = 0; i < 2; i++) ok = ok && (set->series[i].shards == 0 || series_remove(&set->series[i], 0, error));
        ok = ok && directory_sync_parent(path, error) && directory_remove(path, error);
        if (ok && !set->of_bytes) ok = directory_rename_sync(temporary, path, error);
    }
    // Old validation shards must not stand beside new training shards.
    if (set->series[0].shards > 0 && set->series[1].shards > 0)
        ok = ok && series_remove(&set->series[1], 0, error) && directory_sync_parent(path, error);
    return ok && series_publish(&set->series[0], error) && series_publish(&set->series[1], error);
}

static inline void shard_set_abandon(ShardSet* set) {
    Error ignored;
    directory_remove(set->temporary, &ignored);
    for (int i = 0; i < 2; i++) series_abandon(&set->series[i]);
}

static inline void shard_set_print(const ShardSet* set) {
    for (int i = 0; i < 2; i++) {
        const Series* series = &set->series[i];
        if (series->shards > 0)
            say(stdout, "%s_%s_*.bin: %llu tokens in %zu shard%s", series->prefix, series->kind,
                (unsigned long long)series->tokens, series->shards, series->shards == 1 ? "" : "s");
    }
}

#endif  // LLMTRAIN_SHARDS_H
