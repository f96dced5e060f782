// shards.h: writes token shards, for the programs that make them. data.h describes the format and reads it.
//
//   ShardWriter writer;
//   bool ok = shard_writer_open(&writer, "data/x_train_000000.bin", 256, 0, &error) &&
//             shard_writer_add(&writer, tokens, count, &error) &&          any number of times
//             shard_writer_finish(&writer, &error) && shard_publish("data/x_train_000000.bin", &error);
//   shard_writer_abandon(&writer);                                         after a failure: removes what was written
//
// The writer writes PATH.tmp, and shard_writer_finish flushes it to the disk; shard_publish then renames it to PATH.
// The two are separate, so that a set of shards can appear together after the last of them is on the disk. A shard
// that has its name is complete. A token outside the vocabulary is refused.

#ifndef LLMTRAIN_SHARDS_H
#define LLMTRAIN_SHARDS_H

#include "../llmtrain/data.h"  // ShardHeader, its magic numbers and versions

typedef struct {
    FILE* file;      // NULL: nothing to finish or abandon
    ShardHeader header;
    uint64_t count;  // tokens written
    char path[FILE_PATH_MAX];
    char temporary[FILE_PATH_MAX + 8];
} ShardWriter;

// Removes what was written; does nothing after shard_writer_finish.
static inline void shard_writer_abandon(ShardWriter* writer) {
    if (!writer->file) return;
    fclose(writer->file);
    writer->file = NULL;
    remove(writer->temporary);
}

// Vocabulary chooses the width: 2 bytes up to 65,536. Entropy in nats per token, or 0.
static inline bool shard_writer_open(ShardWriter* writer, const char* path, int32_t vocabulary, double entropy_floor,
                                     Error* error) {
    memset(writer, 0, sizeof *writer);
    if (vocabulary <= 0 || !entropy_is_possible(entropy_floor))
        return fail(error, "%s cannot have a vocabulary of %d and an entropy of %g nats per token", path, vocabulary,
                    entropy_floor);
    if (!path_copy(writer->path, path, error)) return false;
    if (directory_exists(path)) return fail(error, "%s is a directory; move it away, or choose another name", path);
    snprintf(writer->temporary, sizeof writer->temporary, "%s.tmp", writer->path);
    writer->header.magic = vocabulary <= 65536 ? SHARD_MAGIC_16 : SHARD_MAGIC_32;
    writer->header.version = vocabulary <= 65536 ? SHARD_VERSION_16 : SHARD_VERSION_32;
    writer->header.vocabulary = vocabulary;
    writer->header.entropy_floor = entropy_floor;
    writer->file = fopen(writer->temporary, "wbe");
    if (!writer->file) return fail_file(error, "create", writer->path);
    fseek(writer->file, sizeof writer->header, SEEK_SET);  // shard_writer_finish writes the header
    return true;
}

// After a failure the caller abandons the writer.
static inline bool shard_writer_add(ShardWriter* writer, const int32_t* tokens, size_t count, Error* error) {
    uint16_t narrow[4096];
    for (size_t done = 0; done < count;) {
        size_t some = min_size(count - done, 4096);
        for (size_t i = 0; i < some; i++) {
            int32_t token = tokens[done + i];
            if (token < 0 || token >= writer->header.vocabulary)
                return fail(error, "token %d does not belong in %s, whose vocabulary is %d", token, writer->path,
                            writer->header.vocabulary);
            narrow[i] = (uint16_t)token;
        }
        size_t written = writer->header.magic == SHARD_MAGIC_16 ? fwrite(narrow, 2, some, writer->file)
                                                                : fwrite(tokens + done, 4, some, writer->file);
        if (written != some) return fail_file(error, "write", writer->path);
        done += some;
    }
    writer->count += count;
    return true;
}

// After a failure the writer is abandoned.
static inline bool shard_writer_finish(ShardWriter* writer, Error* error) {
    FILE* file = writer->file;
    writer->header.count_low = (uint32_t)writer->count;
    writer->header.count_high = (uint32_t)(writer->count >> 32);
    if (fseek(file, 0, SEEK_SET) != 0 || fwrite(&writer->header, sizeof writer->header, 1, file) != 1 ||
        fflush(file) != 0 || !file_sync(fileno(file))) {
        fail_file(error, "write", writer->path);
        shard_writer_abandon(writer);
        return false;
    }
    fclose(file);  // after the flush there is nothing left that it could lose
    writer->file = NULL;
    return true;
}

// Gives the finished shard PATH.tmp the name PATH, in place of an older one.
static inline bool shard_publish(const char* path, Error* error) {
    char temporary[FILE_PATH_MAX + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (rename(temporary, path) != 0) return fail_file(error, "give its name to", path);
    return directory_sync_parent(path, error);
}

#endif  // LLMTRAIN_SHARDS_H
