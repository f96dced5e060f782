// fuzz_files.c: the readers of files.h against any bytes at all.
//
// Two targets, one per compilation: -DFUZZ_JSON or -DFUZZ_SAFETENSORS. With libFuzzer:
//
//   clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_JSON -DFUZZ_LIBFUZZER
//         -I. dev/test/fuzz_files.c -o build/fuzz_json -lm
//   build/fuzz_json -max_total_time=600 build/fuzz_json_corpus
//
// Without -DFUZZ_LIBFUZZER it is a program that replays the files on its command line, with any compiler:
//
//   cc -g -fsanitize=address,undefined -DFUZZ_JSON -I. dev/test/fuzz_files.c -o build/replay_json -lm
//   build/replay_json crash-1234
//
// Beyond not crashing, each target states what must hold of whatever is accepted; a broken promise aborts. The file
// exists only in memory (memfd), so the target runs on Linux alone.

#include "llmtrain/safetensors.h"

#include <sys/mman.h>

static void promise(bool kept, const char* what) {
    if (kept) return;
    fprintf(stderr, "fuzz_files: broken promise: %s\n", what);
    abort();
}

#if defined(FUZZ_JSON)

// Writes a node as it was read; numbers as double, so that the second text is the first one's canonical form.
static void write_node(JsonWriter* w, const Json* json, uint32_t node) {
    double number = 0;
    bool truth = false;
    uint64_t u = 0;
    int64_t i = 0;
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
            if (json_i64(json, node, &i)) promise((double)i == number, "the integer is the number");
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
                bool whole = strlen(key) == json->nodes[child].key_bytes;  // no zero byte in it
                if (object && whole) promise(json_get(json, node, key) == child, "a member is found by its name");
                count++;
                if (object && !whole) continue;  // cut at its zero byte the name might be another's
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
        promise(error.text[0] != 0, "a refusal has a reason");
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
    int memory = memfd_create("fuzz", MFD_CLOEXEC);
    promise(memory >= 0 && write(memory, data, bytes) == (ssize_t)bytes, "a file in memory");
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    error.text[0] = 0;
    if (!safetensors_open(&f, path, &error)) {
        promise(error.text[0] != 0, "a refusal has a reason");
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

#else
#error "compile with -DFUZZ_JSON or -DFUZZ_SAFETENSORS"
#endif

#if defined(FUZZ_LIBFUZZER)

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    fuzz_one(data, bytes);
    return 0;
}

#else

int main(int count, char** paths) {
    Error error;
    for (int i = 1; i < count; i++) {
        char* data;
        size_t bytes;
        if (!file_read(paths[i], (size_t)1 << 30, &data, &bytes, &error)) {
            fprintf(stderr, "fuzz_files: %s\n", error.text);
            return 1;
        }
        fuzz_one((const uint8_t*)data, bytes);
        free(data);
        printf("%s: no promise broken\n", paths[i]);
    }
    return 0;
}

#endif
