// fuzz.c: runs the file readers on arbitrary bytes. For any input, a reader either refuses the file with an error
// message or returns contents that keep its promises; anything else ends the program.
//
// Targets, one per compilation: -DFUZZ_JSON, -DFUZZ_SAFETENSORS, -DFUZZ_SHARD, -DFUZZ_CONVERT, -DFUZZ_TOKENIZER,
// -DFUZZ_CHOICES, -DFUZZ_SCORES, -DFUZZ_TEMPLATE, -DFUZZ_TEXT, -DFUZZ_LOG. With libFuzzer (make fuzz):
//
//   clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_JSON -DFUZZ_LIBFUZZER
//         -I. dev/test/fuzz.c -o build/fuzz_json -lm -pthread
//   build/fuzz_json -max_total_time=600 build/seeds/json
//
// Files on its command line are replayed. Without -DFUZZ_LIBFUZZER, the shard target is a program that writes seeds to
// the directory given as its argument.
//
// The input is the file, which exists only in memory (memfd), so the targets run on Linux alone.

#include "llmtrain/text/shard_check.h"
#include "whole_tensors.h"
#include "llmtrain/text/templates.h"
#include "llmtrain/text/tokenizer.h"
#ifdef FUZZ_CONVERT
#include "llmtrain/checkpoint/source.h"
#endif
#if defined(FUZZ_CHOICES) || defined(FUZZ_SCORES)
#include "tools/evaluate.h"
#endif
#ifdef FUZZ_LOG
#include "llmtrain/run/validation.h"
#endif
#ifdef FUZZ_TEXT
#include "data/bpe.h"
#include "data/duplicates.h"
#include "data/input.h"
#endif

#include <sys/mman.h>

static void promise(bool kept, const char* what) {
    if (kept) return;
    fprintf(stderr, "fuzz: broken promise: %s\n", what);
    abort();
}

static void promise_sentence(const Error* error) {
    size_t length = strnlen(error->text, sizeof error->text);
    promise(length > 10 && length < sizeof error->text, "a refusal has a sentence");
}

static inline int memory_file(char path[64], const uint8_t* data, size_t bytes) {
    int file = memfd_create("fuzz", MFD_CLOEXEC);
    promise(file >= 0 && write(file, data, bytes) == (ssize_t)bytes, "a file in memory");
    snprintf(path, 64, "/proc/self/fd/%d", file);
    return file;
}

#if defined(FUZZ_CONVERT) || defined(FUZZ_TOKENIZER)
// Writes a file to the directory; removes it if it would be empty.
static void put_file(const char* directory, const char* name, const uint8_t* data, size_t bytes) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    unlink(path);
    int file = bytes ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    promise(bytes == 0 || (file >= 0 && write(file, data, bytes) == (ssize_t)bytes), "a file");
    if (file >= 0) close(file);
}

#endif

#if defined(FUZZ_JSON)

// Writes a node as it was read; numbers as double, so that a second pass reproduces the text.
static void write_node(JsonWriter* w, const Json* json, uint32_t node) {
    double number = 0;
    bool truth = false;
    uint64_t u = 0;
    char text[64];
    const JsonNode* n = &json->nodes[node];
    switch (n->type) {
        case JSON_NULL: json_write_raw(w, "null"); break;
        case JSON_FALSE: case JSON_TRUE:
            promise(json_bool(json, node, &truth) && truth == (n->type == JSON_TRUE), "a truth value is read");
            json_write_bool(w, truth);
            break;
        case JSON_NUMBER:
            promise(json_number(json, node, &number) && isfinite(number), "a number is read, and finite");
            if (json_u64(json, node, &u)) promise((double)u == number, "the unsigned integer is the number");
            json_write_number(w, number);
            break;
        case JSON_STRING:
            promise(json->text[n->start + n->bytes] == 0, "a string ends in zero");
            if (json_string(json, node, text, sizeof text)) promise(strlen(text) == n->bytes, "a string is whole");
            json_write_string(w, json->text + n->start);
            break;
        case JSON_ARRAY: case JSON_OBJECT: {
            bool object = n->type == JSON_OBJECT;
            uint32_t count = 0;
            json_write_begin(w, object ? '{' : '[');
            for (uint32_t child = json_first(json, node); child != JSON_NONE; child = json_next(json, child)) {
                promise(child > node && child < json->count, "the elements follow their container");
                promise(json->nodes[child].parent == node, "an element knows its container");
                const char* key = json_key(json, child);
                bool whole = strlen(key) == json->nodes[child].key_bytes;  // it contains no zero byte
                if (object && whole) promise(json_get(json, node, key) == child, "a member is found by its name");
                count++;
                if (object && !whole) continue;  // cut at its zero byte the key might equal another one
                if (object) json_write_key(w, key);
                write_node(w, json, child);
            }
            promise(count == n->count, "the number of elements");
            json_write_end(w, object ? '}' : ']');
            break;
        }
    }
}

static void fuzz_one(const uint8_t* data, size_t bytes) {
    Error error;
    Json json, again;
    JsonWriter first, second;
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    error.text[0] = 0;
    if (!json_parse(&json, (const char*)data, bytes, "input", &error)) {
        promise_sentence(&error);
        promise(json.text == NULL && json.nodes == NULL && json.slots == NULL, "a refusal leaves nothing to free");
        return;
    }
    write_node(&first, &json, 0);
    promise(json_write_done(&first, &error), "what was read can be written");
    promise(json_parse(&again, first.text, first.bytes, "second", &error), "what was written can be read");
    write_node(&second, &again, 0);
    promise(second.bytes == first.bytes && memcmp(first.text, second.text, first.bytes) == 0, "and is the same");
    json_writer_free(&first);
    json_writer_free(&second);
    json_free(&json);
    json_free(&again);
}

#elif defined(FUZZ_SAFETENSORS)

static void fuzz_one(const uint8_t* data, size_t bytes) {
    Error error;
    SafetensorsFile f;
    char path[64];
    int memory = memory_file(path, data, bytes);
    error.text[0] = 0;
    if (!safetensors_open(&f, path, &error)) {
        promise_sentence(&error);
        promise(f.file == -1 && f.header.tensors == NULL, "a refusal leaves nothing to close");
        close(memory);
        return;
    }
    size_t total = 0;
    for (size_t i = 0; i < f.header.count; i++) {
        const SafetensorsTensor* tensor = &f.header.tensors[i];
        promise(safetensors_find(&f, tensor->name) == tensor, "a tensor is found by its name");
        promise(tensor->offset == total, "the data lie one after the other");
        promise(total + tensor->bytes + f.data_start <= bytes, "the data lie in the file");
        char* buffer = (char*)malloc(tensor->bytes + 1);
        uint64_t hash = 0;
        promise(safetensors_read(&f, tensor, buffer, tensor->bytes, &hash, &error), "a tensor is read");
        promise(tensor->bytes == 0 || memcmp(buffer, data + f.data_start + total, tensor->bytes) == 0, "and is right");
        promise(hash == hash_bytes(buffer, tensor->bytes), "and its checksum");
        promise(!safetensors_read_range(&f, tensor, tensor->bytes, 1, buffer, &error), "nothing lies past its end");
        free(buffer);
        total += tensor->bytes;
    }
    promise(f.data_start + total == bytes, "the data cover the file");
    safetensors_close(&f);
    close(memory);
}

#elif defined(FUZZ_SHARD)

// Three bytes of the header that the reader ignores steer the test: at 512 the sequence length; at 513, if odd, the
// count is made to match the size, so that most inputs get past that check; at 514, if a multiple of 16, the loader
// runs too.
enum { STEER_T = 512, STEER_COUNT = 513, STEER_LOADER = 514 };

static void promise_batch(const int32_t* tokens, const int32_t* targets, int32_t vocabulary, size_t count) {
    for (size_t i = 0; i < count; i++) {
        promise(tokens[i] >= 0 && tokens[i] < vocabulary, "a token outside the vocabulary");
        promise(targets[i] >= -1 && targets[i] < vocabulary, "a target outside the vocabulary");
    }
}

// Reads all windows, in the order of validation and of training.
static void walk(const Dataset* dataset, size_t T, bool with_loader) {
    enum { B = 2, MOST = 64 };
    int32_t tokens[B * MOST], targets[B * MOST];
    Error error;
    int32_t vocabulary = dataset->vocabulary > 0 ? dataset->vocabulary : 50257;
    size_t count = dataset->shards->count;
    if (!dataset_suffices(dataset, T, &error)) {
        promise(count < T + 1, "a text that is long enough is refused");
        promise_sentence(&error);
        return;
    }
    for (size_t i = 0; i < dataset_windows(dataset, T, T / 2); i += B) {
        if (dataset_batch(tokens, targets, dataset, i, vocabulary, B, T, T / 2, &error))
            promise_batch(tokens, targets, vocabulary, B * T);
        else promise_sentence(&error);
    }
    for (uint64_t sample = 0; sample < 2 * part_samples(dataset, dataset->parts, T); sample++) {
        Window window = dataset_sample(dataset, 1, sample, T);
        promise(window.shard == 0 && window.start < count && T < count - window.start, "a window leaves its shard");
        if (window_read(tokens, targets, dataset, window, vocabulary, T, &error))
            promise_batch(tokens, targets, vocabulary, T);
        else promise_sentence(&error);
    }
    if (!with_loader) return;
    Loader loader;
    promise(loader_open(&loader, dataset, vocabulary, 1, 0, 1, B, T, &error), "no loader");
    promise(loader_start(&loader, 0, &error), "no thread");
    for (int i = 0; i < 4; i++) {
        if (loader_next(&loader, tokens, targets, &error)) promise_batch(tokens, targets, vocabulary, B * T);
        else promise_sentence(&error);
    }
    loader_close(&loader);
}

static void fuzz_one(const uint8_t* data, size_t bytes) {
    char path[64];
    Dataset dataset;
    Error error;
    int file = memory_file(path, data, bytes);
    size_t T = bytes > STEER_T ? data[STEER_T] % 64 + 1 : 1;
    if (bytes >= sizeof(ShardHeader) && data[STEER_COUNT] % 2 == 1) {
        ShardHeader header;
        memcpy(&header, data, sizeof header);
        header.count_low = (uint32_t)((bytes - sizeof header) / (header.magic == SHARD_MAGIC_32 ? 4 : 2));
        header.count_high = 0;
        promise(pwrite(file, &header, sizeof header, 0) == (ssize_t)sizeof header, "no file in memory");
    }
    if (dataset_open(&dataset, path, &error)) {
        const Shard* shard = dataset.shards;
        promise(shard->count * shard->token_bytes + sizeof(ShardHeader) == bytes, "a wrong size is accepted");
        promise(shard->vocabulary >= 0 && shard->entropy_floor >= 0, "a wrong header is accepted");
        walk(&dataset, T, data[STEER_LOADER] % 16 == 0);
        const bool canceled = false;
        if (!shard_check(shard, data[STEER_LOADER], &canceled, &error)) promise_sentence(&error);
        dataset_close(&dataset);
    } else {
        promise_sentence(&error);
    }
    close(file);
}

#ifndef FUZZ_LIBFUZZER

enum { SEEDS = 8, SEED_BYTES = 1600 };

// Writes good shards: both token widths, with and without vocabulary and entropy. Returns the size in bytes.
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

int main(int count, char** words) {
    uint8_t data[SEED_BYTES];
    Error error;
    for (size_t i = 0; count == 2 && i < SEEDS; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%.4000s/seed_%zu.bin", words[1], i);
        if (file_write_atomic(path, data, make_seed(data, i), &error)) continue;
        fprintf(stderr, "fuzz: %s\n", error.text);
        return 1;
    }
    return 0;
}

#endif

#elif defined(FUZZ_CONVERT)

// Another program's model. If the input begins with a brace, it is config.json up to a zero byte; then comes
// generation_config.json and model.safetensors.index.json, each up to the next zero byte, or nothing; then the weights,
// which an index calls "a".
// Anything else is a file of llm.c.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    static char directory[64];
    char path[128];
    ModelSource source;
    Error error;
    if (directory[0] == 0) {
        snprintf(directory, sizeof directory, "/dev/shm/fuzz_convert_XXXXXX");
        promise(mkdtemp(directory) != NULL, "a directory");
    }
    bool foreign = bytes > 0 && data[0] == '{';
    size_t config = foreign ? strnlen((const char*)data, bytes) : 0, after = min_size(config + 1, bytes);
    size_t generation = foreign ? strnlen((const char*)data + after, bytes - after) : 0, settings = after;
    if (foreign) after = min_size(after + generation + 1, bytes);
    size_t index = foreign ? strnlen((const char*)data + after, bytes - after) : 0;
    size_t weights = foreign ? min_size(after + index + 1, bytes) : 0;
    put_file(directory, "config.json", data, config);
    put_file(directory, "generation_config.json", data + settings, generation);
    put_file(directory, "model.safetensors.index.json", data + after, index);
    put_file(directory, "model.safetensors", data + weights, index > 0 ? 0 : bytes - weights);
    put_file(directory, "a", data + weights, bytes - weights);
    TokenIds ids;
    if (foreign && !source_read_ids(&ids, directory, true, &error)) promise_sentence(&error);
    snprintf(path, sizeof path, foreign ? "%s" : "%s/a", directory);
    if (!source_open(&source, path, &error)) {
        promise_sentence(&error);
        promise(source.files == NULL && source.pieces == NULL, "a refusal leaves nothing to free");
        return;
    }
    promise(source.parameters.true_size <= 2 * bytes, "no more weights than halves of bytes");
    const float* values;
    for (size_t i = 0; i < source.parameters.count; i++)
        promise(source_read(&values, &source, i, &error) || strstr(error.text, "is not finite") != NULL,
                "what was opened can be read, unless a weight is not finite");
    source_close(&source);
}

#elif defined(FUZZ_TEMPLATE)

// The first byte sets the number of messages.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    ChatMessage messages[4] = {{"system", " Be brief.", 0}, {"user", "a-b", 0}, {"assistant", "<think>c</think>d\n", 0},
                               {"user", "\xc3\xa9", 0}};
    Error error;
    char *text, *source = (char*)memory_allocate(bytes + 1);
    size_t length;
    promise(source != NULL, "memory for the input");
    memcpy(source, data, bytes);
    source[bytes] = 0;
    error.text[0] = 0;
    size_t count = bytes > 0 ? data[0] % 5 : 4;
    if (template_render(&text, &length, source + (bytes > 0), messages, count, "<s>", "</s>", bytes % 2, &error)) {
        promise(text != NULL && text[length] == 0, "a text ends in zero");
        free(text);
    } else {
        promise_sentence(&error);
        promise(text == NULL, "a refusal leaves nothing to free");
    }
    free(source);
}

#elif defined(FUZZ_TOKENIZER)

// Encodes a text, also with an encoder that caches: the results must be valid tokens, and decodable.
static void encode_text(const Tokenizer* tokenizer, const char* text, size_t bytes) {
    static TokenDecoder decoder;
    Tokens tokens = {NULL, 0, 0, 0}, again = {NULL, 0, 0, 0};
    Error error;
    WordEncoder encoder = tokenizer_encoder(tokenizer);
    promise(tokenizer_encode(&tokens, tokenizer, text, bytes, &error), "a text is encoded");
    for (int round = 0; round < 2; round++) {
        again.count = 0;
        promise(tokenizer_encode_by(&again, tokenizer, &encoder, text, bytes, &error), "by an encoder too");
        promise(again.count == tokens.count, "to as many tokens");
        promise(tokens.count == 0 || memcmp(again.ids, tokens.ids, tokens.count * sizeof(int32_t)) == 0, "the same");
    }
    decoder_begin(&decoder, tokenizer);
    for (size_t i = 0; i < tokens.count; i++) {
        size_t written;
        promise(tokenizer_kind(tokenizer, tokens.ids[i]) != TOKEN_ABSENT, "a token that is there");
        decoder_add(&written, &decoder, tokens.ids[i]);
        promise(written < TOKEN_BYTES_MAX + 4, "a piece that is not too long");
    }
    word_encoder_close(&encoder);
    tokens_free(&tokens);
    tokens_free(&again);
}

// Five texts, each up to a zero byte: a file, a second one, added_tokens.json, special_tokens_map.json, and a text to
// encode. If the first begins with a brace the two are tokenizer.json and tokenizer_config.json; with # (which is
// dropped), encoder.json and vocab.bpe; otherwise the first is a rank file.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    static char directory[64];
    Tokenizer tokenizer;
    Error error;
    if (directory[0] == 0) {
        snprintf(directory, sizeof directory, "/dev/shm/fuzz_tokenizer_XXXXXX");
        promise(mkdtemp(directory) != NULL, "a directory");
    }
    size_t first = strnlen((const char*)data, bytes), at = min_size(first + 1, bytes);
    size_t second = strnlen((const char*)data + at, bytes - at), text = min_size(at + second + 1, bytes);
    static const char* const named[] = {"added_tokens.json", "special_tokens_map.json"};
    for (int i = 0; i < 2; i++) {
        size_t length = strnlen((const char*)data + text, bytes - text);
        put_file(directory, named[i], data + text, length);
        text = min_size(text + length + 1, bytes);
    }
    bool gpt2 = bytes > 0 && data[0] == '#', ranks = bytes > 0 && data[0] != '#' && data[0] != '{';
    put_file(directory, "tokenizer.json", data, gpt2 || ranks ? 0 : first);
    put_file(directory, "tokenizer_config.json", data + at, gpt2 || ranks ? 0 : second);
    put_file(directory, "encoder.json", data + gpt2, gpt2 ? first - 1 : 0);
    put_file(directory, "vocab.bpe", data + at, gpt2 ? second : 0);
    put_file(directory, "o200k.tiktoken", data, ranks ? first : 0);
    if (!tokenizer_open(&tokenizer, directory, NULL, &error)) {
        promise_sentence(&error);
        promise(tokenizer.rules == NULL && tokenizer.chat_template == NULL, "a refusal leaves nothing to close");
        return;
    }
    promise(tokenizer.begin_of_text < tokenizer.vocabulary && tokenizer.end_of_text < tokenizer.vocabulary, "its ids");
    encode_text(&tokenizer, (const char*)data + text, bytes - text);
    tokenizer_close(&tokenizer);
}

#elif defined(FUZZ_CHOICES)

// A file of questions, with the byte tokenizer.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    enum { T = 24 };
    char path[64];
    Choices choices;
    Source source;
    Tokens tokens;
    Error error;
    Tokenizer tokenizer = tokenizer_of_bytes();
    int file = memory_file(path, data, bytes);
    memset(&tokens, 0, sizeof tokens);
    if (!choices_open(&choices, &source, path, &tokenizer, T, T, &error)) {
        promise_sentence(&error);
        promise(choices.text == NULL && source.rows == NULL, "a refusal leaves nothing to free");
        close(file);
        return;
    }
    for (size_t i = 0; i < source.items; i++) {
        size_t rows = source.rows[i + 1] - source.rows[i], first, text;
        promise(rows >= 2 && choices.labels[i] < rows, "a question has endings, and a label among them");
        for (size_t r = 0; r < rows; r++) {
            tokens.count = 0;
            if (!source.append(&tokens, &first, &text, source.context, i, r, &error)) {
                promise_sentence(&error);
                continue;
            }
            promise(tokens.count <= T + 1 && first >= 1 && first < tokens.count && text > 0, "a row can be scored");
        }
    }
    tokens_free(&tokens);
    choices_close(&choices, &source);
    close(file);
}

#elif defined(FUZZ_SCORES)

// A score log. Lines that do not begin with a dot get their checksum, which a fuzzer would never guess.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    enum { ITEMS = 4, KEY = 1 };
    size_t rows[ITEMS + 1] = {0, 1, 3, 6, 7};
    Score scores[7];
    bool done[ITEMS] = {false};
    Source source;
    ScoreLog log, lines;
    char path[64];
    Error error;
    int file = memory_file(path, data, 0);
    memset(&source, 0, sizeof source);
    memset(&log, 0, sizeof log);
    memset(&lines, 0, sizeof lines);
    source.items = ITEMS;
    source.rows = rows;
    lines.file = file;
    lines.path = path;
    for (size_t at = 0, length; at < bytes; at += length + 1) {
        const char* line = (const char*)data + at;
        const char* end = (const char*)memchr(line, '\n', bytes - at);
        length = end ? (size_t)(end - line) : bytes - at;
        json_put(&lines.line, line, length);
        if (line[0] != '.') promise(score_log_end(&lines, &error), "a line in memory");
        else promise(write(file, line, length + (end != NULL)) >= 0, "a line in memory");
        lines.line.bytes = 0;
    }
    for (int i = 0; i < 2; i++) {  // the second time it contains what the first pass added
        if (!score_log_open(&log, scores, done, &source, path, KEY, true, &error)) promise_sentence(&error);
        else promise(score_log_add(&log, 0, scores, 1, &error), "a line can be added");
        score_log_close(&log);
    }
    json_writer_free(&lines.line);
    close(file);
}

#elif defined(FUZZ_TEXT)

// The file is a text or, by its last bit, lines of JSON, and either may be compressed. Its documents are read twice,
// checked for duplicates, and trained on.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    char path[64];
    Error error;
    Documents documents;
    Batch batch = {0};
    WordTable words = {0};
    Duplicates duplicates;
    Bpe bpe;
    Sketch sketch;
    FoundDuplicate found;
    Json json;
    JsonWriter w = {0};
    uint64_t document = 0, line;
    size_t read[2] = {0, 0};
    static Unicode* unicode;
    if (!unicode) unicode = unicode_open(&error);
    int file = memory_file(path, data, bytes);
    error.text[0] = 0;
    promise(documents_open(&documents, path, bytes > 0 && data[bytes - 1] % 2 ? "text" : NULL, &error), "a file");
    promise(duplicates_open(&duplicates, true, 0.8, &error), "memory");
    bool ok = true;
    for (int pass = 0; ok && pass < 2; pass++) {
        documents_rewind(&documents);
        while ((ok = documents_next(&documents, &batch, &error)) && batch.count > 0)
            for (size_t i = 0; i < batch.count; i++) {
                const Piece* piece = &batch.pieces[i];
                const char* text = batch.text + piece->start;
                promise(piece->start + piece->bytes <= batch.bytes, "a piece is a part of its batch");
                promise(pass == 1 || piece->document >= document, "documents come in their order");
                promise(documents_locate(&documents, piece->document, &line) && line == piece->line, "a place");
                document = piece->document;
                read[pass] += piece->bytes;
                if (pass == 1) continue;
                sketch_make(&sketch, true, text, piece->bytes);
                promise(duplicates_add(&duplicates, &found, &sketch, document, &error), "a document is added");
                promise(!found.any || found.of <= document, "a document repeats one before it");
                promise(word_table_add_text(&words, unicode, text, piece->bytes, &error), "words are counted");
            }
    }
    if (!ok) promise_sentence(&error);
    promise(!ok || read[0] == read[1], "documents are the same when they are read again");
    promise(bpe_train(&bpe, &words, 300, &error), "words can be trained on");
    bpe_write(&w, &bpe);
    promise(json_write_done(&w, &error) && json_parse(&json, w.text, w.bytes, "bpe", &error), "what it gives is JSON");
    json_free(&json);
    json_writer_free(&w);
    bpe_free(&bpe);
    word_table_close(&words);
    duplicates_close(&duplicates);
    batch_free(&batch);
    documents_close(&documents);
    close(file);
}

#elif defined(FUZZ_LOG)

// metrics.jsonl, as a run that continues at step 20 reads it.
static void fuzz_one(const uint8_t* data, size_t bytes) {
    static Run run;
    static RunOptions options;
    ValidationOptions validating;
    Error error;
    bool left_out;
    size_t damaged, again, length = bytes;
    memset(&validating, 0, sizeof validating);
    validating.every = 10;
    options.out = "/proc/none";
    run.options = &options;
    run.record.state.step = 20;
    run.val.shard_count = 1;
    run.log.file = stderr;
    int file = memory_file(run.log.path, data, bytes);
    if (!run_read_validations(&run, &validating, 30, &left_out, &error)) promise_sentence(&error);
    promise(!isnan(run.validations.best), "the best loss is a number");
    char* text = (char*)malloc(bytes + 1);
    promise(text != NULL, "memory");
    memcpy(text, data, bytes);
    text[bytes] = 0;
    length = log_keep_until(text, bytes, 20, &damaged, NULL);
    promise(length <= bytes && log_keep_until(text, length, 20, &again, NULL) == length, "what is kept is kept again");
    promise(again <= damaged, "and no more of it is damaged");
    free(text);
    close(file);
}

#else
#error "compile with one of the targets that the first lines name, as -DFUZZ_JSON"
#endif

#ifdef FUZZ_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    fuzz_one(data, bytes);
    return 0;
}
#endif
