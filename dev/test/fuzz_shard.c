// fuzz_shard: throws damaged files at the reader of shards. Whatever the bytes, a file is refused with a sentence or is
// read within its bounds; anything else ends the program.
//
//   clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz_shard.c -o build/fuzz_shard -lm -pthread
//   mkdir -p build/fuzz_shard_seeds && build/replay_shard --seeds build/fuzz_shard_seeds
//   build/fuzz_shard -max_len=4096 -max_total_time=600 build/fuzz_shard_seeds
//
// Without libFuzzer, the same checks on files given by name, or else on 20,000 damaged copies of good shards:
//
//   cc -std=c11 -O2 -DREPLAY dev/test/fuzz_shard.c -o build/replay_shard -lm -pthread && build/replay_shard
//
// The input is the file. Three bytes of the header that the reader ignores steer the test: at 512 the sequence length;
// at 513, when odd, the count is made to match the size, so that most inputs get past that check; at 514, when it is a
// multiple of 16, the loader is run too.

#include "llmtrain/data.h"

enum { STEER_T = 512, STEER_COUNT = 513, STEER_LOADER = 514 };

static void require(bool ok, const char* what) {
    if (ok) return;
    fprintf(stderr, "fuzz_shard: %s\n", what);
    abort();
}

static void require_sentence(const Error* error) {
    size_t length = strnlen(error->text, sizeof error->text);
    require(length > 10 && length < sizeof error->text, "a refusal without a sentence");
}

static void require_batch(const int32_t* tokens, const int32_t* targets, int32_t vocabulary, size_t count) {
    for (size_t i = 0; i < count; i++) {
        require(tokens[i] >= 0 && tokens[i] < vocabulary, "a token outside the vocabulary");
        require(targets[i] >= -1 && targets[i] < vocabulary, "a target outside the vocabulary");
    }
}

// Reads all windows, as validation and training do.
static void walk(const Dataset* dataset, size_t T, bool with_loader) {
    enum { B = 2, MOST = 64 };
    int32_t tokens[B * MOST], targets[B * MOST];
    Error error;
    int32_t vocabulary = dataset->vocabulary > 0 ? dataset->vocabulary : 50257;
    size_t count = dataset->shards->count;
    if (!dataset_suffices(dataset, T, &error)) {
        require(count < T + 1, "a text that is long enough is refused");
        require_sentence(&error);
        return;
    }
    for (size_t i = 0; i < dataset_windows(dataset, T, T / 2); i += B) {
        if (dataset_batch(tokens, targets, dataset, i, vocabulary, B, T, T / 2, &error))
            require_batch(tokens, targets, vocabulary, B * T);
        else require_sentence(&error);
    }
    for (uint64_t sample = 0; sample < 2 * dataset_samples(dataset, T); sample++) {
        Window window = dataset_sample(dataset, 1, sample, T);
        require(window.shard == 0 && window.start < count && T < count - window.start, "a window leaves its shard");
        if (window_read(tokens, targets, dataset, window, vocabulary, T, &error))
            require_batch(tokens, targets, vocabulary, T);
        else require_sentence(&error);
    }
    if (!with_loader) return;
    Loader loader;
    require(loader_open(&loader, dataset, vocabulary, 1, 0, 1, B, T, &error), "no loader");
    require(loader_start(&loader, 0, &error), "no thread");
    for (int i = 0; i < 4; i++) {
        if (loader_next(&loader, tokens, targets, &error)) require_batch(tokens, targets, vocabulary, B * T);
        else require_sentence(&error);
    }
    loader_close(&loader);
}

// Below what the compiler calls by this name; returns 0.
#ifdef __cplusplus
extern "C"
#endif
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    char path[64];
    Dataset dataset;
    Error error;
    int file = memfd_create("shard", MFD_CLOEXEC);
    require(file >= 0 && write(file, data, bytes) == (ssize_t)bytes, "no file in memory");
    size_t T = bytes > STEER_T ? data[STEER_T] % 64 + 1 : 1;
    if (bytes >= sizeof(ShardHeader) && data[STEER_COUNT] % 2 == 1) {
        ShardHeader header;
        memcpy(&header, data, sizeof header);
        header.count_low = (uint32_t)((bytes - sizeof header) / (header.magic == SHARD_MAGIC_32 ? 4 : 2));
        header.count_high = 0;
        require(pwrite(file, &header, sizeof header, 0) == (ssize_t)sizeof header, "no file in memory");
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (dataset_open(&dataset, path, &error)) {
        const Shard* shard = dataset.shards;
        require(shard->count * shard->token_bytes + sizeof(ShardHeader) == bytes, "a wrong size is accepted");
        require(shard->vocabulary >= 0 && shard->entropy_floor >= 0, "a wrong header is accepted");
        walk(&dataset, T, data[STEER_LOADER] % 16 == 0);
        dataset_close(&dataset);
    } else {
        require_sentence(&error);
    }
    close(file);
    return 0;
}

#ifdef REPLAY

enum { SEEDS = 8, SEED_BYTES = 1600, REPLAYS = 20000 };

// Good shards: both widths, with and without vocabulary and entropy. Returns the bytes.
static size_t make_seed(uint8_t* data, size_t number) {
    ShardHeader header;
    bool wide = number % 2 == 1;
    size_t bytes = SEED_BYTES - 64 * number;
    memset(&header, 0, sizeof header);
    header.magic = wide ? SHARD_MAGIC_32 : SHARD_MAGIC_16;
    header.version = wide ? SHARD_VERSION_32 : SHARD_VERSION_16;
    header.count_low = (uint32_t)((bytes - sizeof header) / (wide ? 4 : 2));
    header.vocabulary = number % 4 < 2 ? 0 : 256;
    header.entropy_floor = number % 8 < 4 ? 0 : 1.5;
    memcpy(data, &header, sizeof header);
    for (size_t i = sizeof header; i < bytes; i++) data[i] = i % (wide ? 4 : 2) == 0 ? (uint8_t)(7 * i) : 0;
    data[STEER_T] = (uint8_t)(3 + 9 * number);
    data[STEER_LOADER] = (uint8_t)number;
    return bytes;
}

static int write_seeds(const char* folder) {
    uint8_t data[SEED_BYTES];
    for (size_t i = 0; i < SEEDS; i++) {
        char path[4096];
        size_t bytes = make_seed(data, i);
        snprintf(path, sizeof path, "%s/seed_%zu.bin", folder, i);
        FILE* file = fopen(path, "wb");
        bool ok = file && fwrite(data, 1, bytes, file) == bytes;
        if (file && fclose(file) != 0) ok = false;
        if (!ok) {
            fprintf(stderr, "replay_shard: cannot write %s: %s\n", path, strerror(errno));
            return 1;
        }
    }
    return 0;
}

static int replay_file(const char* path) {
    static uint8_t data[1 << 20];
    FILE* file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "replay_shard: cannot open %s: %s\n", path, strerror(errno));
        return 1;
    }
    size_t bytes = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, bytes);
    return 0;
}

// Copies of the seeds with up to four changes: a byte, a bit or a word of the header, or a cut.
static void replay_damaged(size_t count) {
    uint8_t data[SEED_BYTES];
    const uint32_t words[8] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0x7ff80000, 0x7ff00000, 65537};
    for (size_t i = 0; i < count; i++) {
        size_t bytes = make_seed(data, i % SEEDS);
        for (size_t change = 0; change < i / SEEDS % 5; change++) {
            Random4 r = random4(1, RANDOM_TEST, i, change);
            size_t place = r.bits[1] % (r.bits[0] & 8 ? sizeof(ShardHeader) : bytes);
            if (r.bits[0] % 4 == 0) data[place] = (uint8_t)r.bits[2];
            if (r.bits[0] % 4 == 1) data[place] ^= (uint8_t)(1 << r.bits[2] % 8);
            if (r.bits[0] % 4 == 2) memcpy(data + r.bits[1] % 8 * 4, &words[r.bits[2] % 8], 4);
            if (r.bits[0] % 4 == 3 && r.bits[2] % 4 == 0 && change + 1 == i / SEEDS % 5) bytes = place;
        }
        LLVMFuzzerTestOneInput(data, bytes);
    }
}

int main(int argc, char** argv) {
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) return write_seeds(argv[2]);
    for (int i = 1; i < argc; i++)
        if (replay_file(argv[i]) != 0) return 1;
    if (argc == 1) replay_damaged(REPLAYS);
    printf("%d shards read or refused\n1 passed, 0 failed\n", argc > 1 ? argc - 1 : REPLAYS);
    return 0;
}

#endif
