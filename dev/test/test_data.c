// test_data: tests of data.h and of the program tokenize.
//
//   cc -std=c11 -O2 -I. dev/test/test_data.c -o build/test_data -lm -pthread && build/test_data
//
// References: the definition of the order, computed by counting; files written byte by byte, not by the writer under
// test; the text itself. Every error must name the file and the remedy. The program tokenize is the one in the same
// directory as this, or the one given.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

// The last file flushed to disk, as it was then: its length, and its first word.
static struct { long long bytes; int32_t word; } flushed;

static int flush_seen(int file) {
    struct stat status;
    char path[32];
    flushed.bytes = fstat(file, &status) == 0 && S_ISREG(status.st_mode) ? (long long)status.st_size : -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);  // the writer's own descriptor cannot read
    int again = open(path, O_RDONLY | O_CLOEXEC);
    if (read(again, &flushed.word, sizeof flushed.word) != sizeof flushed.word) flushed.word = 0;
    if (again >= 0) close(again);
    return fsync(file);
}
#define fsync(file) flush_seen(file)

#include "data/shards.h"
#include "harness.h"
#include "llmtrain/model/documents.h"

static Error error;  // of the last call that failed

static void refused(bool accepted, const char* words, const char* what) {
    expect_refusal(accepted, &error, words, what);
}

// The start of a header as llm.c writes it, with our fields.
typedef struct {
    int32_t magic, version, count_low, vocabulary, count_high, zero;
    double entropy_floor;
    int32_t zeros[248];
} Head;

static Head head_of(uint64_t count, size_t token_bytes, int32_t vocabulary) {
    bool narrow = token_bytes == 2;
    return (Head){narrow ? 20240520 : 20240801, narrow ? 1 : 7, (int32_t)(uint32_t)count, vocabulary,
                  (int32_t)(count >> 32), 0, 0, {0}};
}

// A shard in llm.c's format, written word by word.
static void write_plain_shard(const char* path, const int32_t* tokens, size_t count, size_t token_bytes) {
    unsigned char* bytes = (unsigned char*)memory_allocate(1024 + count * token_bytes);
    Head head = head_of(count, token_bytes, 0);
    memcpy(bytes, &head, sizeof head);
    for (size_t i = 0; i < count; i++) memcpy(bytes + 1024 + i * token_bytes, &tokens[i], token_bytes);
    put_bytes(path, bytes, 1024 + count * token_bytes);
    free(bytes);
}

// Writes with the writer under test.
static void write_shard(const char* path, const int32_t* tokens, size_t count, int32_t vocabulary, double floor) {
    ShardWriter writer;
    bool ok = shard_writer_open(&writer, path, vocabulary, floor, &error) &&
              shard_writer_add(&writer, tokens, count / 3, &error) &&
              shard_writer_add(&writer, tokens + count / 3, count - count / 3, &error) &&
              shard_writer_finish(&writer, &error) && shard_publish(path, &error);
    expect(ok, "writing a shard: %s", error.text);
}

// The i-th token of the texts used here: it tells where it is from.
static int32_t* make_tokens(size_t count, int32_t vocabulary, uint64_t seed) {
    int32_t* tokens = (int32_t*)memory_allocate((count + 1) * sizeof(int32_t));
    for (size_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(random_bits(seed, RANDOM_TEST, 1, i) % (uint32_t)vocabulary);
    return tokens;
}

// ------------------------------------------------------------------------------------------------
// Order

static void test_permutation(void) {
    const uint64_t sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257,
                              1000, 1021, 4095, 4096, 4097, 65535, 65536, 65537, 99991, 262145, 1000003};
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        uint64_t size = sizes[s];
        unsigned char* seen = (unsigned char*)memory_allocate(size);
        for (uint64_t epoch = 0; epoch < (size < 10000 ? 6u : 2u); epoch++) {
            uint64_t in_range = 0, distinct = 0;
            memset(seen, 0, size);
            for (uint64_t i = 0; i < size; i++) {
                uint64_t place = order_permute(i, 7 + (epoch << 33), epoch * 3, size);
                if (place >= size) continue;
                in_range++;
                distinct += !seen[place];
                seen[place] = 1;
            }
            expect(in_range == size && distinct == size, "the order is not a permutation");
        }
        free(seen);
    }
    verdict("order_permute is a permutation: sizes 1 .. 1000003");
}

static void test_permutation_large(void) {
    const uint64_t sizes[] = {(uint64_t)1 << 32, ((uint64_t)1 << 32) + 1, ((uint64_t)1 << 40) - 1, (uint64_t)1 << 40};
    enum { COUNT = 4096 };
    uint64_t* places = (uint64_t*)memory_allocate(COUNT * sizeof(uint64_t));
    for (size_t s = 0; s < 4; s++) {
        double mean = 0;
        for (size_t i = 0; i < COUNT; i++) {
            places[i] = order_permute(i < COUNT / 2 ? i : sizes[s] - 1 - (i - COUNT / 2), 5, 9, sizes[s]);
            expect(places[i] < sizes[s], "outside the range");
            mean += (double)places[i] / (double)sizes[s] / COUNT;
            for (size_t j = 0; j < i; j++)
                if (places[j] == places[i]) expect(false, "two samples at one place");
        }
        double bound = 6 / sqrt(12.0 * COUNT);  // six standard deviations of the mean of uniform numbers
        expect(fabs(mean - 0.5) <= bound, "the ends of the range are not spread evenly");
    }
    free(places);
    verdict("order_permute at sizes 2^32 .. 2^40: in range, distinct, spread");
}

// All permutations of a small set are equally frequent over the epochs: chi-square, bound at six standard deviations.
static void test_permutation_uniform(void) {
    for (uint64_t size = 2; size <= 5; size++) {
        size_t kinds = 1, counts[3125];
        for (uint64_t i = 2; i <= size; i++) kinds *= i;
        memset(counts, 0, sizeof counts);
        size_t epochs = 400 * kinds, seen = 0;
        for (uint64_t epoch = 0; epoch < epochs; epoch++) {
            size_t code = 0;
            for (uint64_t i = 0; i < size; i++) code = code * size + order_permute(i, 42, epoch, size);
            counts[code]++;
        }
        double chi2 = 0;
        for (size_t code = 0; code < 3125; code++) {
            if (counts[code] == 0) continue;
            seen++;
            chi2 += ((double)counts[code] - 400.0) * ((double)counts[code] - 400.0) / 400.0;
        }
        double freedom = (double)kinds - 1, bound = freedom + 6 * sqrt(2 * freedom);
        printf("  size %llu: %3zu of %3zu permutations, chi-square %6.1f <= %6.1f\n", (unsigned long long)size, seen,
               kinds, chi2, bound);
        expect(seen == kinds, "a permutation never comes");
        expect(chi2 <= bound, "permutations are not equally frequent");
    }
    verdict("order_permute: all permutations of 2 .. 5 equally frequent");
}

static void test_permutation_keys(void) {
    const uint64_t size = 1000;
    for (uint64_t k = 0; k < 20; k++) {
        size_t same_epoch = 0, same_seed = 0, same_high = 0;
        for (uint64_t i = 0; i < size; i++) {
            uint64_t place = order_permute(i, k, k, size);
            same_epoch += place == order_permute(i, k, k + 1, size);
            same_seed += place == order_permute(i, k + 1, k, size);
            same_high += place == order_permute(i, k + ((uint64_t)1 << 32), k, size);
        }
        // Two random permutations agree at 1 +- 1 positions.
        expect(same_epoch <= 10, "two epochs have one order");
        expect(same_seed <= 10, "two seeds have one order");
        expect(same_high <= 10, "the upper half of the seed does nothing");
    }
    verdict("order_permute differs by epoch and by seed");
}

// For every small shape: the windows of an epoch lie inside their shard, next to each other, each once; and over many
// epochs every token is an input or a target.
static void test_windows(void) {
    uint16_t nothing[64] = {0};
    for (size_t T = 1; T <= 13; T++)
        for (size_t n = 0; n <= 45; n++) {
            Dataset dataset;
            expect(dataset_from_memory(&dataset, nothing, 2, n, &error), "a dataset in memory");
            size_t samples = part_samples(&dataset, dataset.parts, T);
            expect((samples > 0) == (n >= T + 1), "a window fits, but there is no sample, or the reverse");
            expect(samples + 2 > (n > 0 ? (n - 1) / T : 0), "an epoch leaves out more than one window");
            expect(dataset_suffices(&dataset, T, &error) == (samples > 0), "dataset_suffices is wrong");
            bool reached[64] = {false};
            for (uint64_t epoch = 0; samples > 0 && epoch < 300; epoch++) {
                bool begins[64] = {false};
                size_t first = SIZE_MAX;
                for (size_t i = 0; i < samples; i++) {
                    Window window = dataset_sample(&dataset, 3, epoch * samples + i, T);
                    expect(window.shard == 0 && window.start + T + 1 <= n, "a window leaves its shard");
                    if (window.start + T + 1 > n) continue;
                    expect(!begins[window.start], "a window comes twice in an epoch");
                    begins[window.start] = true;
                    first = min_size(first, window.start);
                    for (size_t t = 0; t <= T; t++) reached[window.start + t] = true;
                }
                for (size_t i = 0; i < samples; i++) expect(begins[first + i * T], "windows are not side by side");
            }
            for (size_t i = 0; samples > 0 && i < n; i++) expect(reached[i], "a token is out of reach");
            dataset_close(&dataset);
        }
    verdict("samples of an epoch: T 1..13, 0..45 tokens: inside, once, all reached");
}

// ------------------------------------------------------------------------------------------------
// Shards

static void test_round_trip(void) {
    const int32_t vocabularies[] = {1, 256, 50257, 65536, 65537, 128256, INT32_MAX};
    const size_t counts[] = {0, 1, 2, 4095, 4096, 4097, 20000};
    for (size_t v = 0; v < 7; v++)
        for (size_t c = 0; c < 7; c++) {
            int32_t vocabulary = vocabularies[v];
            size_t count = counts[c];
            int32_t* tokens = make_tokens(count, vocabulary, 1);
            Shard shard;
                    write_shard("round.bin", tokens, count, vocabulary, 1.25);
            expect(!file_exists("round.bin.tmp"), "the temporary file stays");
            bool ok = shard_open(&shard, "round.bin", &error);
            expect(ok, "a shard of the writer is refused: %s", error.text);
            expect(shard.count == count && shard.vocabulary == vocabulary && shard.entropy_floor == 1.25,
                  "the header is not what was written");
            expect(shard.token_bytes == (vocabulary <= 65536 ? 2u : 4u), "the width is wrong");
            for (size_t i = 0; ok && i < count; i++)
                expect(shard_token(&shard, i) == (uint32_t)tokens[i], "a token is not what was written");
            shard_close(&shard);
            free(tokens);
        }
    verdict("shards written and read: 16 and 32 bits, vocabularies 1 .. 2^31 - 1");
}

static uint64_t head_checksum(const char* file) {
    uint64_t sum;
    memcpy(&sum, file + 32, sizeof sum);
    return sum;
}

// The bytes on the disk are llm.c's, and a shard of llm.c, with zeros in our fields, is read.
static void test_format(void) {
    const int32_t tokens[5] = {1, 2, 50000, 3, 4};
    const uint16_t narrow[5] = {1, 2, 50000, 3, 4};
    Head head = head_of(5, 2, 50257);
    Shard shard;
    write_shard("format.bin", tokens, 5, 50257, 2.5);
    head.entropy_floor = 2.5;
    size_t bytes;
    char* file = text_read("format.bin", &bytes);
    expect(bytes == 1024 + 10, "a header of 1,024 bytes, and five tokens");
    expect(memcmp(file, &head, 12) == 0, "llm.c's fields");
    expect(memcmp(file + 12, &head.vocabulary, 20) == 0, "our fields");
    expect((hash_bytes(narrow, sizeof narrow) | 1) == head_checksum(file), "the checksum of the tokens");
    expect(memcmp(file + 40, head.zeros, sizeof head.zeros - 8) == 0, "the rest of the header is zero");
    expect(memcmp(file + 1024, narrow, 10) == 0, "the tokens do not follow the header");
    free(file);
    for (size_t width = 2; width <= 4; width += 2) {
        write_plain_shard("plain.bin", tokens, 5, width);
        expect(shard_open(&shard, "plain.bin", &error), "a shard of llm.c is refused");
        expect(shard.count == 5 && shard.vocabulary == 0 && shard.entropy_floor == 0 && shard_token(&shard, 2) == 50000,
               "a shard of llm.c is misread");
        shard_close(&shard);
    }
    verdict("the format is llm.c's, byte by byte");
}

// A shard of zeros: a header, and this many bytes after it.
static bool header_opens(const Head* head, size_t bytes) {
    unsigned char file[1024 + 256] = {0};
    Shard shard;
    memcpy(file, head, sizeof *head);
    put_bytes("bad.bin", file, bytes);
    bool ok = shard_open(&shard, "bad.bin", &error);
    if (ok) shard_close(&shard);
    return ok;
}

// Every field of the header, corrupted in turn, and every wrong size.
static void test_refusals(void) {
    static const double floors[] = {NAN, -NAN, INFINITY, -INFINITY, -1, -1e-300, 1e300};
    static const int32_t wrong[][2] = {  // a word of the header, and a wrong value
        {0, 0}, {0, 20240521}, {0, 20240326}, {0, 20240522}, {0, 20240801}, {1, 0}, {1, 2}, {1, 7}, {1, -1}, {2, 0},
        {2, 99}, {2, 101}, {2, -100}, {2, INT32_MIN}, {3, -1}, {3, 65537}, {3, INT32_MIN}, {4, 1}, {4, -1},
        {4, INT32_MIN}, {4, 0x40000000},
    };
    const Head good = head_of(100, 2, 256), wide = head_of(50, 4, 100000);
    Shard shard;
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        Head bad = good;
        memcpy((char*)&bad + 4 * wrong[i][0], &wrong[i][1], 4);
        refused(header_opens(&bad, 1024 + 200), "bad.bin", "a wrong header is accepted");
        expect(strchr(error.text, ';') != NULL, "no advice");
    }
    for (size_t i = 0; i < COUNT_OF(floors); i++) {
        Head bad = good;
        bad.entropy_floor = floors[i];
        refused(header_opens(&bad, 1024 + 200), "entropy", "an impossible entropy is accepted");
    }
    for (size_t bytes = 0; bytes <= 1024 + 204; bytes++) {
        error.text[0] = 0;
        expect(header_opens(&good, bytes) == (bytes == 1024 + 200), "16 bits, %zu bytes", bytes);
        expect(bytes == 1024 + 200 || strstr(error.text, "bad.bin"), "16 bits, %zu bytes: %s", bytes, error.text);
    }
    for (size_t bytes = 1024 + 196; bytes <= 1024 + 204; bytes++)
        expect(header_opens(&wide, bytes) == (bytes == 1024 + 200), "32 bits, %zu bytes", bytes);
    refused(shard_open(&shard, "none.bin", &error), "none.bin", "a missing file is accepted");
    refused(shard_open(&shard, root, &error), root, "a directory is accepted");
    expect(mkfifo("pipe.bin", 0600) == 0, "making a pipe");
    refused(shard_open(&shard, "pipe.bin", &error), "pipe.bin", "a pipe is accepted");
    verdict("damaged shards are refused: every field, every size");
}

// A file that is a hole except for the header and the last token.
static void test_sparse_one(uint64_t count, size_t token_bytes) {
    const char* path = "sparse.bin";
    Head head = head_of(count, token_bytes, 0);
    put_bytes(path, &head, sizeof head);
    uint64_t bytes = 1024 + count * token_bytes;
    bool made = truncate(path, (off_t)bytes) == 0;
    if (!made) skip("a sparse file", text_of("%llu bytes: %s", (unsigned long long)bytes, strerror(errno)));
    if (!made) return;
    patch(path, bytes - token_bytes, "M", 1);
    Dataset dataset;
    if (expect(dataset_open(&dataset, path, &error), "%s", error.text)) {
        expect(dataset_tokens(&dataset) == count, "the count is wrong");
        const size_t T = 1000;
        int32_t tokens[1000], targets[1000];
        size_t windows = (size_t)((count - 1) / T), last_start = (windows - 1) * T;
        Window window = dataset_window(&dataset, windows - 1, T, 0);
        expect(dataset_windows(&dataset, T, 0) == windows && window.start == last_start, "the last window");
        window.start = count - T - 1;
        expect(window_read(tokens, targets, &dataset, window, 256, T, &error), "reading the end");
        expect(tokens[999] == 0 && targets[999] == 'M', "the last token");
        for (uint64_t sample = 0; sample < 100; sample++) {
            window = dataset_sample(&dataset, 1, sample, T);
            expect(window.start + T + 1 <= count, "a window leaves its shard");
        }
        dataset_close(&dataset);
    }
    expect(truncate(path, (off_t)(bytes - 1)) == 0, "cutting the file");
    refused(dataset_open(&dataset, path, &error), path, "a byte too few is accepted");
    remove(path);
}

static void test_sparse(void) {
    test_sparse_one(1500000001, 2);
    test_sparse_one(((uint64_t)1 << 32) + 5, 2);
    test_sparse_one(((uint64_t)1 << 32) + 5, 4);
    verdict("sparse shards of 3, 8 and 16 GB");
}

// Whether pages that were read can be given back, and what remains is no sanitizer's own memory.
#if defined(SYSTEM_LINUX) && !defined(__SANITIZE_THREAD__)
#define MAPPED_MEMORY 1
#endif

#ifdef MAPPED_MEMORY
// A run reads all of its shards in time, which are larger than its memory.
static void test_memory(void) {
    enum { T = 4000, WINDOWS = 8000 };
    int32_t tokens[T], targets[T];
    uint64_t count = (uint64_t)WINDOWS * T + 1;
    Head head = head_of(count, 2, 0);
    Dataset dataset;
    put_bytes("large.bin", &head, sizeof head);
    expect(truncate("large.bin", (off_t)(1024 + 2 * count)) == 0, "making a large file");
    if (expect(dataset_open(&dataset, "large.bin", &error), "%s", error.text)) {
        size_t before = memory_peak();
        for (size_t i = 0; i < WINDOWS; i++)
            expect(window_read(tokens, targets, &dataset, dataset_window(&dataset, i, T, 0), 256, T, &error), "%s",
                   error.text);
        size_t grown = memory_peak() - before;
        // A page fault maps what the file cache has around it: up to some megabytes at once.
        expect(grown < 16 << 20, "reading a shard of %d MB took %zu KB of memory", WINDOWS * T / 500000, grown >> 10);
        dataset_close(&dataset);
    }
    remove("large.bin");
    verdict("a shard that is read does not stay in the memory of the process");
}
#endif

static void test_writer_failures(void) {
    ShardWriter writer;
    int32_t* tokens = make_tokens(100000, 256, 3);
    const char* path = "limited.bin";
    refused(shard_writer_open(&writer, "no/such/x.bin", 256, 0, &error), "no/such/x.bin",
                  "a missing folder is accepted");
    refused(shard_writer_open(&writer, path, 0, 0, &error), path, "a vocabulary of 0 is accepted");
    refused(shard_writer_open(&writer, path, 256, NAN, &error), path, "an entropy of NaN is accepted");
    expect(shard_writer_open(&writer, path, 256, 0, &error), "opening a writer");
    int32_t large = 256, negative = -1;
    refused(shard_writer_add(&writer, &large, 1, &error), "256", "a token of 256 is accepted");
    refused(shard_writer_add(&writer, &negative, 1, &error), "-1", "a token of -1 is accepted");
    shard_writer_abandon(&writer);
    shard_writer_abandon(&writer);
    expect(!file_exists(path) && !file_exists("limited.bin.tmp"), "something stays on the disk");

    // A disk that becomes full at each possible point: a file size limit makes the writes fail there.
    for (rlim_t bytes = 0; bytes < 1024 + 200000; bytes += 4000) {
        file_size_limit(bytes);
        bool opens = shard_writer_open(&writer, path, 256, 0, &error);
        bool adds = opens && shard_writer_add(&writer, tokens, 100000, &error);
        bool ok = adds && shard_writer_finish(&writer, &error);
        if (opens && !adds) shard_writer_abandon(&writer);
        file_size_limit(RLIM_INFINITY);
        refused(ok, path, "a full disk goes unnoticed");
        expect(strstr(error.text, strerror(EFBIG)) != NULL, "the reason is not said");
        expect(!file_exists(path) && !file_exists("limited.bin.tmp"), "something stays on the disk");
    }
    free(tokens);
    verdict("the writer's failures: folder, tokens, full disk; nothing stays");
}

// A power cut must not leave a shard under its name without its bytes: the file is complete when it is flushed to disk,
// before the rename, and the directory is flushed after that.
static void test_writer_order(void) {
    ShardWriter writer;
    int32_t* tokens = make_tokens(1000, 256, 4);
    expect(shard_writer_open(&writer, "ordered.bin", 256, 0, &error), "opening a writer");
    expect(shard_writer_add(&writer, tokens, 1000, &error) && shard_writer_finish(&writer, &error), "writing a shard");
    expect(flushed.bytes == 1024 + 2000, "%lld bytes are in the file when it is flushed, of 3024", flushed.bytes);
    expect(flushed.word == 20240520, "the header is not in the file when it is flushed");
    expect(file_exists("ordered.bin.tmp") && !file_exists("ordered.bin"), "it has its name before that is asked for");
    expect(shard_publish("ordered.bin", &error) && file_exists("ordered.bin"), "publishing a shard");
    expect(flushed.bytes == -1, "the directory is not flushed after the shard has its name");
    free(tokens);
    verdict("the writer: all bytes, then the flush, then the name, then the directory's flush");
}

// ------------------------------------------------------------------------------------------------
// Dataset

static void test_dataset(void) {
    Dataset dataset;
    int32_t tokens[300];
    for (int i = 0; i < 300; i++) tokens[i] = i % 256;
    write_shard("set_b.bin", tokens, 200, 256, 2.0);
    write_shard("set_a.bin", tokens, 100, 256, 1.0);
    write_shard("set_B.bin", tokens, 300, 256, 4.0);
    expect(dataset_open(&dataset, "set_?.bin", &error), "opening three shards");
    expect(dataset.shard_count == 3 && dataset_tokens(&dataset) == 600 && dataset.vocabulary == 256, "the sums");
    expect(strcmp(dataset.shards[0].path, "set_B.bin") == 0, "the order of names");
    expect(strcmp(dataset.shards[2].path, "set_b.bin") == 0, "the order of names");
    double mean = (300 * 4.0 + 100 * 1.0 + 200 * 2.0) / 600;
    expect(fabs(dataset.entropy_floor - mean) <= 4 * 0x1p-53 * mean, "the mean floor");
    dataset_close(&dataset);
    dataset_close(&dataset);
    static const char* const sorted[] = {"set_B.bin", "set_a.bin", "set_b.bin"};
    expect(dataset_open(&dataset, "set_[ab].bin,set_B.bin,set_a.bin", &error), "several patterns");
    expect(dataset.shard_count == 3, "a file that several match counts once: %zu", dataset.shard_count);
    for (size_t i = 0; i < dataset.shard_count && i < 3; i++)
        expect(strcmp(dataset.shards[i].path, sorted[i]) == 0, "%s is not %s", dataset.shards[i].path, sorted[i]);
    dataset_close(&dataset);
    refused(dataset_open(&dataset, "set_?.bin,none*", &error), "'none*'", "one pattern matches nothing");
    refused(dataset_open(&dataset, "set [v1]/*", &error), "stands for one of its characters", "a bracket");
    write_shard("set,[1].bin", tokens, 100, 256, 1.0);
    expect(dataset_open(&dataset, "set,[1].bin", &error) && dataset.shard_count == 1, "a name with a comma");
    dataset_close(&dataset);
    remove("set,[1].bin");

    write_plain_shard("set_c.bin", tokens, 50, 2);
    expect(dataset_open(&dataset, "set_?.bin", &error), "a shard that states nothing goes with others");
    expect(dataset.vocabulary == 256 && dataset.entropy_floor == 0, "floor unknown in one is unknown in all");
    dataset_close(&dataset);
    write_shard("set_d.bin", tokens, 300, 300, 0);
    refused(dataset_open(&dataset, "set_?.bin", &error), "set_d.bin", "two vocabularies");
    remove("set_d.bin");
    write_plain_shard("set_d.bin", tokens, 50, 4);
    refused(dataset_open(&dataset, "set_?.bin", &error), "set_d.bin", "two widths");
    put_bytes("set_d.bin", tokens, 1000);
    refused(dataset_open(&dataset, "set_?.bin", &error), "set_d.bin", "one bad shard");
    expect(dataset.shards == NULL, "a failure leaves something open");
    refused(dataset_open(&dataset, "unset_*.bin", &error), "unset_*.bin", "no match");
    refused(dataset_from_memory(&dataset, tokens, 8, 10, &error), "8", "tokens of 8 bytes");
    expect(dataset_from_memory(&dataset, tokens, 4, 10, &error), "tokens in memory");
    refused(dataset_suffices(&dataset, 10, &error), "10", "a text that is too short");
    refused(dataset_suffices(&dataset, 0, &error), "0", "T = 0");
    expect(dataset_suffices(&dataset, 9, &error), "a text that is just long enough");
    dataset_close(&dataset);
    verdict("datasets: sorted, summed up, refused when shards disagree");
}

static int compare_windows(const void* a, const void* b) {
    const Window *x = (const Window*)a, *y = (const Window*)b;
    int order = (x->shard > y->shard) - (x->shard < y->shard);
    return order ? order : (x->start > y->start) - (x->start < y->start);
}

// Samples of a mixture: each cycle has the shares to the sample, and takes of each part what follows; an epoch of a
// part has each window once. Counting them one by one and in jumps comes to the same.
static void test_mixtures(void) {
    enum { T = 8, SETS = 3, END = 5 * MIXTURE_CYCLE / 2 };
    static const char patterns[] = "mix_[ab].bin:0.5,mix_d.bin:3e-1,mix_c.bin:0.2";
    static const size_t counts[SETS + 1] = {4000, 1003, 60001, 777}, of_cycle[SETS] = {5000, 3000, 2000};
    static const int part_of[SETS + 1] = {0, 0, 1, 2};  // of a, b, d, c
    Dataset dataset, other;
    for (int i = 0; i <= SETS; i++) {
        int32_t* tokens = make_tokens(counts[i], 256, 1);
        write_shard(text_of("mix_%c.bin", "abdc"[i]), tokens, counts[i], 256, 0);
        free(tokens);
    }
    if (!expect(dataset_open(&dataset, patterns, &error), "a mixture: %s", error.text)) return;
    expect(dataset_suffices(&dataset, T, &error) && dataset.shard_count == SETS + 1 && dataset.part_count == SETS,
           "%zu shards in %zu parts", dataset.shard_count, dataset.part_count);
    for (uint64_t seed = 1; seed <= 2; seed++) {
        uint64_t found[SETS] = {0}, alike = 0;
        size_t before = SETS, changes = 0;
        MixtureCounts m = {0};
        for (uint64_t sample = 0; sample < END; sample++) {
            Window window = dataset_sample(&dataset, seed, sample, T), again = dataset_sample(&dataset, 3, sample, T);
            need(window.shard <= SETS && window.start + T + 1 <= counts[window.shard], "a window in its shard");
            size_t part = (size_t)part_of[window.shard];
            found[part]++;
            alike += part == (size_t)part_of[again.shard];
            changes += part != before;
            before = part;
            if ((sample + 1) % MIXTURE_CYCLE == 0)
                for (size_t i = 0; i < SETS; i++)
                    expect(found[i] == (sample + 1) / MIXTURE_CYCLE * of_cycle[i], "part %zu: %llu after %llu", i,
                           (unsigned long long)found[i], (unsigned long long)sample + 1);
            if (sample % 997 == 5 || sample + 1 == END) {
                MixtureCounts jump = {0};
                mixture_count(&m, &dataset, seed, sample + 1);
                mixture_count(&jump, &dataset, seed, sample + 1);
                expect(memcmp(m.counts, found, sizeof found) == 0 && memcmp(jump.counts, found, sizeof found) == 0 &&
                       m.parts == SETS && jump.samples == sample + 1, "the counts after %llu samples",
                       (unsigned long long)sample + 1);
            }
        }
        // Two samples in a row are of one part with probability 0.38, as two seeds' samples of one number are.
        expect(fabs((double)changes / END - 0.62) < 0.02, "the part changes %zu times", changes);
        expect(fabs((double)alike / END - 0.38) < 0.02, "%llu parts are those of another seed",
               (unsigned long long)alike);
    }
    // The samples of a part are its first ones, each once. Those of each epoch are side by side in their shards.
    static Window taken[SETS][3 * MIXTURE_CYCLE];
    for (uint64_t sample = 0; sample < 3 * MIXTURE_CYCLE; sample++) {
        uint64_t number = sample;
        size_t part = mixture_part(&dataset, 1, &number);
        if (!expect(number < 3 * of_cycle[part] && taken[part][number].shard == 0, "sample %llu of part %zu",
                    (unsigned long long)number, part)) break;
        taken[part][number] = dataset_sample(&dataset, 1, sample, T);
        taken[part][number].shard++;
    }
    for (size_t part = 0; part < SETS; part++) {
        size_t samples = part_samples(&dataset, &dataset.parts[part], T), epochs = 0;
        for (Window* w = taken[part]; w + samples <= taken[part] + 3 * of_cycle[part]; w += samples, epochs++) {
            qsort(w, samples, sizeof *w, compare_windows);
            for (size_t i = 1; i < samples; i++)
                expect(w[i].shard == w[i - 1].shard ? w[i].start == w[i - 1].start + T : w[i].shard > w[i - 1].shard,
                       "epoch %zu of part %zu", epochs, part);
        }
        expect(epochs == 3 * of_cycle[part] / samples && epochs > 0, "%zu epochs of part %zu", epochs, part);
    }
    uint64_t fingerprint = dataset_fingerprint(&dataset);
    dataset_close(&dataset);
    expect(dataset_open(&other, "mix_[ab].bin:0.5,mix_d.bin:0.2,mix_c.bin:0.3", &error) &&
           dataset_fingerprint(&other) != fingerprint, "other weights are another dataset");
    dataset_close(&other);
    expect(dataset_open(&other, "mix_a.bin:2e-4,mix_b.bin:2", &error) && other.parts[0].of_cycle == 1 &&
           other.parts[1].of_cycle == MIXTURE_CYCLE - 1, "a small weight");
    refused(dataset_suffices(&other, 1500, &error), "mix_b.bin has 1003 tokens", "a part without a sequence");
    dataset_close(&other);
    expect(dataset_open(&other, "mix_[ab].bin", &error), "%s", error.text);
    size_t longest = max_size(other.shards[0].count, other.shards[1].count);
    refused(dataset_suffices(&other, longest, &error), text_of("the longest shard, %s has %zu tokens",
            other.shards[other.shards[1].count == longest].path, longest), "two shards without a sequence");
    dataset_close(&other);
    write_shard("mix:3", (int32_t[100]){0}, 100, 256, 0);
    expect(dataset_open(&other, "mix_a.bin,mix:3", &error) && other.part_count == 1 && other.shard_count == 2,
           "a name that ends in a number");
    dataset_close(&other);
    expect(dataset_open(&other, "mix*:3", &error) && strcmp(other.shards[0].path, "mix:3") == 0,
           "a pattern of names that end in a number");
    dataset_close(&other);
    static const struct { const char *patterns, *says; } wrong[] = {
        {"mix_a.bin:0", "weight of 'mix_a.bin' is 0; give a number above"}, {"mix_a.bin:-2,mix_b.bin:3", "is -2"},
        {"mix_a.bin:nan", "is nan"}, {"mix_a.bin:inf", "is inf"}, {"mix_a.bin:x", "(a weight is a number after"},
        {"mix_a.bin:1,mix_b.bin", "'mix_b.bin' has no weight"}, {"mix_a.bin,mix_b.bin:1", "'mix_b.bin' has a weight"},
        {"mix_a.bin:1,mix_[ad].bin:1", "mix_a.bin is in two parts"},
        {"mix_a.bin:1e-9,mix_b.bin:1", "is less than 1/10000 of the sum, 1;"},
        {"mix_a.bin:1,none:1", "no file matches 'none'"}, {"{mix_a,mix_b}.bin", "braces are not expanded"},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        refused(dataset_open(&other, wrong[i].patterns, &error), wrong[i].says, wrong[i].patterns);
    refused(dataset_open_unweighted(&other, "mix_a.bin:1", &error), "every token is read once", "no weight");
    expect(other.shards == NULL, "a failure leaves something open");
    char many[16 * (DATASET_PARTS + 1)] = "";
    for (size_t i = 0, n = 0; i <= DATASET_PARTS; i++) {
        write_shard(text_of("mix%03zu", i), (int32_t[100]){0}, 100, 256, 0);
        n += (size_t)snprintf(many + n, sizeof many - n, "%smix%03zu:1", i ? "," : "", i);
    }
    refused(dataset_open(&other, many, &error), "at most 64 parts", "too many parts");
    *strrchr(many, ',') = 0;
    expect(dataset_open(&other, many, &error) && other.part_count == DATASET_PARTS, "64 parts");
    dataset_close(&other);
    verdict("mixtures: shares exact, parts in their own order, from any sample; what is refused");
}

// ------------------------------------------------------------------------------------------------
// Loader

// Three shards of different lengths, one too short; the loader's source, and a plain copy to compare with.
enum { SHARDS = 3, VOCABULARY = 50000 };
static const size_t text_lengths[SHARDS] = {1003, 12, 777};
static int32_t* texts[SHARDS];

static bool open_texts(Dataset* dataset, const char* patterns) {
    for (int i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "text_%d.bin", i);
        if (!texts[i]) texts[i] = make_tokens(text_lengths[i], VOCABULARY, (uint64_t)i);
        write_shard(name, texts[i], text_lengths[i], VOCABULARY, 0);
    }
    bool ok = dataset_open(dataset, patterns, &error);
    expect(ok, "opening the texts");
    return ok;
}

static void open_loader(Loader* loader, const Dataset* dataset, uint64_t seed, size_t rank, size_t world, size_t B,
                        size_t T) {
    expect(loader_open(loader, dataset, VOCABULARY, seed, rank, world, B, T, &error), "a loader: %s", error.text);
}

// The next batch of a loader has the samples from `first` on, in the defined order and with the texts' tokens.
static void expect_samples(Loader* loader, const Dataset* dataset, uint64_t seed, uint64_t first, size_t B, size_t T) {
    int32_t tokens[256], targets[256];
    need(B * T <= COUNT_OF(tokens), "room for a batch");
    expect(loader_next(loader, tokens, targets, &error), "a batch: %s", error.text);
    for (size_t b = 0; b < B; b++) {
        Window window = dataset_sample(dataset, seed, first + b, T);
        const int32_t* text = texts[window.shard] + window.start;
        expect(window.start + T + 1 <= text_lengths[window.shard], "a window leaves its shard");
        expect(memcmp(tokens + b * T, text, T * 4) == 0, "the inputs are not those of the text");
        expect(memcmp(targets + b * T, text + 1, T * 4) == 0, "the targets are not shifted by one");
    }
}

static void test_loader(void) {
    enum { B = 3, T = 16, BATCHES = 120 };
    int32_t tokens[B * T], targets[B * T];
    Dataset dataset;
    Loader loader;
    if (!open_texts(&dataset, "text_*.bin")) return;
    open_loader(&loader, &dataset, 11, 0, 1, B, T);
    expect(loader_bytes(B, T) == 4 * sizeof tokens, "the bytes of a loader");
    refused(loader_next(&loader, tokens, targets, &error), "started", "a batch before the start");
    expect(loader_start(&loader, 0, &error), "starting");
    for (uint64_t i = 0; i < BATCHES; i++) expect_samples(&loader, &dataset, 11, i * B, B, T);
    size_t from_shard[SHARDS] = {0};
    for (uint64_t i = 0; i < part_samples(&dataset, dataset.parts, T); i++)
        from_shard[dataset_sample(&dataset, 11, i, T).shard]++;
    expect(from_shard[0] == 61 && from_shard[1] == 0 && from_shard[2] == 47, "shards do not come in proportion");
    loader_close(&loader);
    loader_close(&loader);
    dataset_close(&dataset);
    verdict("loader: batches are what the order says, from files");
}

static void test_ranks(const char* patterns) {
    enum { T = 8, ROWS = 12, STEPS = 40 };  // global micro-batch: 12 samples for every number of ranks
    Dataset dataset;
    if (!open_texts(&dataset, patterns)) return;
    for (size_t world = 1; world <= 4; world++) {
        Loader ranks[4];
        size_t B = ROWS / world;
        for (size_t r = 0; r < world; r++) {
            open_loader(&ranks[r], &dataset, 5, r, world, B, T);
            expect(loader_start(&ranks[r], 0, &error), "starting");
        }
        for (size_t step = 0; step < STEPS; step++)
            for (size_t r = 0; r < world; r++) expect_samples(&ranks[r], &dataset, 5, step * ROWS + r * B, B, T);
        for (size_t r = 0; r < world; r++) loader_close(&ranks[r]);
    }
    dataset_close(&dataset);
    verdict("loader: 1 to 4 ranks together read what one rank reads");
}

static void test_resume(void) {
    enum { T = 8, SAMPLES = 300 };
    int32_t tokens[7 * T], targets[7 * T];
    Dataset dataset;
    Loader loader;
    if (!open_texts(&dataset, "text_*.bin")) return;
    for (size_t B = 1; B <= 7; B += 3) {
        open_loader(&loader, &dataset, 5, 0, 1, B, T);
        for (size_t first = 0; first + 2 * B <= SAMPLES; first++) {  // restarting without stopping is allowed
            expect(loader_start(&loader, first, &error), "starting");
            for (size_t i = 0; i < 2; i++) expect_samples(&loader, &dataset, 5, first + i * B, B, T);
            if (first % 2) loader_stop(&loader);
        }
        loader_close(&loader);
    }
    open_loader(&loader, &dataset, 5, 0, 1, 2, T);
    for (int i = 0; i < 500; i++) {  // stopped at any moment of the thread's work
        expect(loader_start(&loader, ((uint64_t)1 << 50) + (uint64_t)i, &error), "starting");
        if (i % 3 == 0) expect(loader_next(&loader, tokens, targets, &error), "a batch");
    }
    loader_close(&loader);
    dataset_close(&dataset);
    verdict("loader: resumes at any sample with the same batches");
}

static void test_loader_errors(void) {
    enum { T = 10 };
    int32_t tokens[T], targets[T], text[2005], rows[1000 * T];
    Dataset dataset;
    Loader loader;
    Error again;
    for (int i = 0; i < 2005; i++) text[i] = i % 256;
    text[1234] = 300;
    const char* path = "outside.bin";
    write_plain_shard(path, text, 2005, 2);
    expect(dataset_open(&dataset, path, &error), "opening");
    expect(loader_open(&loader, &dataset, 256, 1, 0, 1, 1, T, &error) && loader_start(&loader, 0, &error), "starting");
    size_t good = 0, expected = 0;
    for (;; expected++) {
        Window window = dataset_sample(&dataset, 1, expected, T);
        if (window.start <= 1234 && 1234 <= window.start + T) break;
    }
    usleep(20000);  // lets the thread meet an early error before the good batches are taken
    while (good <= expected && loader_next(&loader, tokens, targets, &error)) {
        good++;
        usleep(1000);
    }
    expect(expected > 0 && good == expected, "the error comes with another batch than the one it concerns");
    char words[300];
    snprintf(words, sizeof words, "token 300 at position 1234 of %s is outside the vocabulary of 256;", path);
    refused(false, words, "the sentence");
    expect(!loader_next(&loader, tokens, targets, &again) && strcmp(error.text, again.text) == 0, "an error goes away");
    loader_close(&loader);
    expect(!dataset_batch(rows, rows, &dataset, 0, 300, 200, T, 0, &error), "token 300 in a vocabulary of 300");
    expect(dataset_batch(rows, rows, &dataset, 0, 301, 200, T, 0, &error), "token 300 in a vocabulary of 301");
    dataset_close(&dataset);

    const int32_t negative[20] = {1, 2, 3, -5, 1, 1, 1, 1, 1, 1, 1, 1};
    expect(dataset_from_memory(&dataset, negative, 4, 20, &error), "tokens in memory");
    refused(dataset_batch(tokens, targets, &dataset, 0, INT32_MAX, 1, T, 0, &error), "position 3", "-5");
    dataset_close(&dataset);

    write_plain_shard(path, text, 1200, 2);
    expect(dataset_open(&dataset, path, &error), "opening");
    expect(truncate(path, 1024 + 100) == 0, "cutting the file");
    expect(loader_open(&loader, &dataset, 256, 1, 0, 1, 1, T, &error) && loader_start(&loader, 0, &error), "starting");
    refused(loader_next(&loader, tokens, targets, &error), path, "a cut file goes unnoticed");
    loader_stop(&loader);
    write_plain_shard(path, text, 1200, 2);
    expect(loader_start(&loader, 0, &error) && loader_next(&loader, tokens, targets, &error), "after mending");
    remove(path);
    expect(dataset_batch(rows, rows, &dataset, 0, 256, 100, T, 0, &error), "a removed file stays readable");
    loader_close(&loader);
    refused(loader_open(&loader, &dataset, 256, 1, 0, 1, 1, 1200, &error), path, "too short for T");
    refused(loader_open(&loader, &dataset, 256, 1, 2, 2, 1, T, &error), "rank", "rank 2 of 2");
    refused(loader_open(&loader, &dataset, 256, 1, 0, 1, 0, T, &error), "0", "B = 0");
    refused(loader_open(&loader, &dataset, 0, 1, 0, 1, 1, T, &error), "0", "V = 0");
    refused(loader_open(&loader, &dataset, 256, 1, 0, 1, SIZE_MAX / 4, T, &error), "batches", "B");
    loader_close(&loader);
    dataset_close(&dataset);
    verdict("loader: bad tokens, cut files and impossible sizes are errors");
}

// Document masks: a target after an end of text does not count, and rows are cut there.
static void test_documents(void) {
    enum { T = 16, B = 4 };
    int32_t tokens[B * T], targets[B * T], plain[B * T];
    Dataset dataset;
    if (!open_texts(&dataset, "text_*.bin")) return;
    size_t masked = 0;
    dataset.end_of_text = texts[0][5];
    for (int masks = 0; masks < 2; masks++) {
        dataset.mask_documents = masks;
        expect(dataset_batch(tokens, masks ? targets : plain, &dataset, 0, VOCABULARY, B, T, 0, &error), "a batch");
    }
    for (size_t i = 0; i < B * T; i++) {
        masked += targets[i] == -1;
        expect(targets[i] == (tokens[i] == dataset.end_of_text ? -1 : plain[i]), "target %zu", i);
    }
    expect(masked > 0 && masked < B * T, "%zu targets are masked", masked);
    dataset_close(&dataset);
    verdict("documents: the target behind an end of text does not count, if that is asked for");

    DocumentSpan spans[12];
    int32_t positions[12];
    const int32_t text[] = {1, 9, 2, 3, 4, 9, 9, 5, 6, 7, 8, 9};  // in rows of 4; 9 is the end of text
    const DocumentSpan expected[] = {{0, 1, 2}, {2, 1, 2}, {4, 1, 2}, {6, 1, 1}, {7, 1, 1}, {8, 1, 4}};
    expect(documents_find(spans, positions, text, NULL, 9, 3, 4) == 6 && memcmp(spans, expected, sizeof expected) == 0,
           "the spans");
    for (int32_t i = 0; i < 12; i++) expect(positions[i] == i % 4, "position %d is %d", i, positions[i]);
    expect(documents_find(spans, positions, text, NULL, 100, 3, 4) == 3 && spans[2].first == 8 && spans[2].T == 4,
           "whole rows");
    verdict("documents: rows are cut behind each end of text, and positions go on");

    const int32_t packed[] = {5, TARGET_ENDS, TARGET_ENDS, 6, 7, TARGET_NONE, 8, TARGET_ENDS, 1, 2, 3, 4};
    const int32_t starts[] = {0, 1, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3};
    const DocumentSpan alone[] = {{0, 1, 2}, {2, 1, 1}, {3, 1, 1}, {4, 1, 4}, {8, 1, 4}};
    expect(documents_find(spans, positions, text, packed, 100, 3, 4) == 5 && memcmp(spans, alone, sizeof alone) == 0,
           "the spans of packed documents");
    expect(memcmp(positions, starts, sizeof starts) == 0, "their positions");
    verdict("documents: packed ones begin at position 0");
}

static void test_validation(void) {
    enum { T = 16, B = 5 };
    int32_t tokens[B * T], targets[B * T];
    Dataset dataset;
    if (!open_texts(&dataset, "text_*.bin")) return;
    size_t windows = dataset_windows(&dataset, T, 0), seen = 0;
    expect(windows == (1003 - 1) / T + (777 - 1) / T, "the number of windows");
    size_t shard = 0, start = 0;
    for (size_t first = 0; first < windows + 2 * B; first += B) {
        expect(dataset_batch(tokens, targets, &dataset, first, VOCABULARY, B, T, 0, &error), "a batch");
        for (size_t b = 0; b < B; b++) {
            if (first + b >= windows) {
                for (size_t t = 0; t < T; t++)
                    expect(tokens[b * T + t] == 0 && targets[b * T + t] == -1, "past the end");
                continue;
            }
            while (start + T + 1 > text_lengths[shard]) shard++, start = 0;
            expect(memcmp(tokens + b * T, texts[shard] + start, T * 4) == 0, "the inputs");
            expect(memcmp(targets + b * T, texts[shard] + start + 1, T * 4) == 0, "the targets");
            start += T;
            seen++;
        }
    }
    expect(seen == windows, "windows left out");
    dataset_close(&dataset);
    verdict("validation: every window once, in order; -1 past the end");
}

// With overlapping windows, every target up to the end of the last window of its shard is scored exactly once, and
// after at least `overlap` tokens of context, except in a shard's first window. Two shards: n tokens of a text, and the
// rest.
static void test_overlap(void) {
    enum { T = 16, B = 3 };
    int32_t tokens[B * T], targets[B * T];
    uint16_t text[200];
    for (uint16_t i = 0; i < 200; i++) text[i] = i;  // a token is its own position
    for (size_t n = T; n <= 200; n += 23)
        for (size_t overlap = 0; overlap < T; overlap++) {
            Dataset first_shard, dataset;
            Shard shards[2];
            size_t scored[200] = {0}, stride = T - overlap;
            expect(dataset_from_memory(&first_shard, text, 2, n, &error), "a dataset in memory");
            dataset = first_shard;
            dataset.shards = shards;
            dataset.shard_count = 2;
            shards[0] = shards[1] = first_shard.shards[0];
            shards[1].tokens = text + n;
            shards[1].count = 200 - n;
            size_t windows = dataset_windows(&dataset, T, overlap);
            for (size_t first = 0; first < windows; first += B) {
                expect(dataset_batch(tokens, targets, &dataset, first, 200, B, T, overlap, &error), "a batch");
                for (size_t i = 0; i < B * T; i++) {
                    if (targets[i] < 0) continue;
                    expect(targets[i] == tokens[i] + 1, "a target is not the token after its input");
                    int32_t begin = tokens[i / T * T];
                    expect(i % T >= overlap || begin == 0 || begin == (int32_t)n, "a target has too little context");
                    scored[targets[i]]++;
                }
            }
            for (size_t s = 0; s < 2; s++) {
                size_t begin = s * n, count = shards[s].count, of_shard = shard_windows(&shards[s], T, overlap);
                size_t end = of_shard == 0 ? 0 : (of_shard - 1) * stride + T;  // the last target
                expect(count < end + 1 + stride || count < T + 1, "one more window would fit");
                for (size_t i = 0; i < count; i++)
                    expect(scored[begin + i] == (i >= 1 && i <= end), "a token is not scored once");
                windows -= of_shard;
            }
            expect(windows == 0, "windows of no shard");
            dataset_close(&first_shard);
        }
    verdict("validation: overlapping windows score every token once");
}

// ------------------------------------------------------------------------------------------------
// The program

static char* program;
static char output[8192];  // of the last run: standard output and standard error

// Runs `tokenize ARGUMENTS` in the shell, after `before`; returns its exit status.
static int run(const char* before, const char* arguments) {
    FILE* pipe = popen(text_of("%s %s %s 2>&1", before, program, arguments), "r");
    size_t length = pipe ? fread(output, 1, sizeof output - 1, pipe) : 0;
    output[length] = 0;
    int status = pipe ? pclose(pipe) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void expect_run(const char* before, const char* arguments, int status, const char* words) {
    int result = run(before, arguments);
    expect(result == status, "tokenize %s: exit status %d", arguments, result);
    expect(strstr(output, words) != NULL, "tokenize %s: '%s' is not in: %s", arguments, words, output);
    bool one_line = strchr(output, '\n') == output + strlen(output) - 1;
    expect(status == 0 || one_line, "more than one line, or none: %s", output);
}

static void expect_shards(const char* pattern, const char* text, size_t count, size_t shards, const char* what) {
    Dataset dataset;
    if (!expect(dataset_open(&dataset, pattern, &error), "%s: %s", what, error.text)) return;
    bool same = dataset_tokens(&dataset) == count && dataset.shard_count == shards && dataset.vocabulary == 256;
    for (size_t s = 0, i = 0; same && s < dataset.shard_count; s++)
        for (size_t k = 0; k < dataset.shards[s].count; k++, i++)
            same = same && shard_token(&dataset.shards[s], k) == (unsigned char)text[i];
    expect(same, "%s: other tokens", what);
    dataset_close(&dataset);
}

static void test_program(void) {
    enum { BYTES = 200001 };
    static char text[BYTES];
    // Refused with one message. test_errors covers wrong flags, texts and folders.
    static const struct { const char *before, *arguments; int status; const char* words; } refusals[] = {
        {"", "--bytes text --out f --shard-token 5", 2, "did you mean --shard-tokens?"},
        {"", "--bytes text --out f --val 1.5", 2, "--val is '1.5'; give a number from 0 to 1"},
        {"", "--bytes text --out f --val 0.1x", 2, "--val is '0.1x'"},
        {"", "--bytes text --out f --entropy inf", 2, "--entropy is 'inf'"},
        {"", "--bytes none --out f", 1, "cannot open none"},
        {"", "--bytes three --out f --val 0.1", 1, "cannot divide"},
        {"cat text |", "--bytes - --out f --val 0.1", 1, "standard input is not known in advance"},
        {"true |", "--bytes - --out f", 1, "standard input is empty"},
        {"", "--bytes text --out no/f", 1, "cannot create no/f_train_000000.bin"},
        {"", "--bytes text --out g", 1, "g_val_000000.bin is a directory"},
        {"ulimit -f 64;", "--bytes text --out f", 1, "File too large"},
        {"ulimit -f 64;", "--bytes text --out f --val 0.99", 1, "File too large"},  // the second file fails
    };
    for (size_t i = 0; i < BYTES; i++) text[i] = (char)random_bits(9, RANDOM_TEST, 0, i);
    put_bytes("text", text, BYTES);
    expect_run("", "--bytes text --out p", 0, "p_train_*.bin: 180001 tokens in 1 shard");
    expect_shards("p_train_*.bin", text, 180001, 1, "the first nine tenths");
    expect_shards("p_val_*.bin", text + 180001, 20000, 1, "the last tenth");
    expect_run("", "--bytes text --out p --val 0.5 --shard-tokens 7000", 0, "p_val_*.bin: 100001 tokens in 15 shards");
    expect_shards("p_train_*.bin", text, 100000, 15, "the first half");
    expect_shards("p_val_*.bin", text + 100000, 100001, 15, "the second half");
    expect_run("", "--bytes text --out p --val 0 --shard-tokens 100000", 0, "in 3 shards");
    expect_shards("p_train_*.bin", text, BYTES, 3, "a longer, older set is replaced");
    expect_shards("p_val_*.bin", text + 100000, 100001, 15, "--val 0 does not touch the validation set");
    expect_run("", "--bytes text --out q --val 1 --entropy 1.5", 0, "q_val_*.bin: 200001 tokens");
    expect_shards("q_val_*.bin", text, BYTES, 1, "--val 1");
    Dataset dataset;
    expect(dataset_open(&dataset, "q_val_*.bin", &error) && dataset.entropy_floor == 1.5, "--entropy");
    dataset_close(&dataset);
    expect_run("cat text |", "--bytes - --out r", 0, "r_train_*.bin: 200001 tokens");
    expect_shards("r_train_*.bin", text, BYTES, 1, "standard input");
    expect(!file_exists("q_train_000000.bin") && !file_exists("r_val_000000.bin"), "a set of no tokens");
    expect_run("ulimit -f 64;", "--bytes text --out s --shard-tokens 15000", 0, "");  // every file below the limit
    expect_run("", "--help", 0, "--shard-tokens N");
    verdict("tokenize: what it writes");

    put_text("three", "abc");
    expect(mkdir("g_val_000000.bin", 0700) == 0, "making a folder");
    for (size_t i = 0; i < COUNT_OF(refusals); i++)
        expect_run(refusals[i].before, refusals[i].arguments, refusals[i].status, refusals[i].words);
    expect(!file_exists("g_train_000000.bin"), "half of the shards appear");
    expect(directory_count(".", "/f_") == 0, "a failure leaves something on the disk");
    verdict("tokenize: what it refuses; nothing stays on the disk");

    // Interrupted while it waits for more of its input.
    expect_run("(cat text; sleep 5) | timeout -s INT 1", "--bytes - --out f", 124, "interrupted");
    expect(directory_count(".", "/f_") == 0, "an interruption leaves something on the disk");
    verdict("tokenize: interrupted");
}

// ------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    const char* slash = strrchr(argv[0], '/');
    const char* beside = text_of("%.*stokenize", slash ? (int)(slash + 1 - argv[0]) : 0, argv[0]);
    const char* tokenize = argc > 1 ? argv[1] : beside;
    program = realpath(tokenize, NULL);
    tests_begin("test_data");
    root_enter();
    test_permutation();
    test_permutation_large();
    test_permutation_uniform();
    test_permutation_keys();
    test_windows();
    test_round_trip();
    test_format();
    test_refusals();
    test_sparse();
#ifdef MAPPED_MEMORY
    test_memory();
#endif
    test_writer_failures();
    test_writer_order();
    test_dataset();
    test_mixtures();
    test_loader();
    test_ranks("text_*.bin");
    test_ranks("text_0.bin:3,text_[12].bin:1");
    test_resume();
    test_loader_errors();
    test_validation();
    test_documents();
    test_overlap();
    if (program) test_program();
    else skip("the program tokenize", text_of("there is none at %s", tokenize));
    free(program);
    for (int i = 0; i < SHARDS; i++) free(texts[i]);
    return tests_end();
}
