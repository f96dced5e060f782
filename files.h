// files.h: the formats and the disk.
//
//   1. JSON         a strict reader into a flat array of nodes, and a writer
//   2. files        whole files, written so that a reader finds the old one or the new one and nothing between
//   3. directories  made, renamed and removed with the same care
//   4. safetensors  tensors with names: a streaming writer and a checked reader
//
// Every reader here accepts any bytes at all: what is not right is refused with a sentence, and the memory that a
// file can make us take is bounded by its size. Nothing here is global; an object is used by one thread at
// a time.

#ifndef LLMTRAIN_FILES_H
#define LLMTRAIN_FILES_H

#include "base.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

// ------------------------------------------------------------------------------------------------
// 1. JSON
//
// The reader follows RFC 8259 to the letter, and refuses what that leaves open: a name twice in one object, more than
// JSON_DEPTH_MAX levels, bytes that are not UTF-8, half a surrogate pair, a number beyond the range of double. It works
// on a copy of the text, in which strings are decoded where they stand: decoding never makes them longer. The copy ends
// in a zero byte, which no rule of the grammar accepts, so that no step needs to compare with the end.
//
// Nodes lie in the order of the text: the first element of a container is the node after it. A hash table over
// (container, name) finds members and duplicates without a search.

#define JSON_NONE 0xFFFFFFFFu            // no such node; every function accepts it as input
#define JSON_DEPTH_MAX 32
#define JSON_NODES_MAX ((size_t)1 << 22)
#define JSON_BYTES_MAX ((size_t)1 << 30)

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct {
    JsonType type;
    uint32_t start, bytes;      // string: its decoded bytes in Json.text, then a zero byte; number: as written
    uint32_t key, key_bytes;    // member of an object: its decoded name in Json.text, then a zero byte
    uint32_t parent, next;      // container, and next element in it, or JSON_NONE
    uint32_t count;             // container: number of elements
} JsonNode;

typedef struct {
    char* text;         // owned
    JsonNode* nodes;    // owned; node 0 is the whole
    uint32_t* slots;    // owned; the hash table: node + 1, or 0 where empty
    uint32_t count;     // nodes
    size_t slot_count;  // a power of two, at least twice the nodes
} Json;

typedef struct {
    Json* json;
    char* at;             // the next byte to read, in the copy
    const char* problem;  // what is wrong there
} JsonReader;

static inline bool json_problem(JsonReader* r, const char* problem) {
    r->problem = problem;
    return false;
}

static inline void json_skip_space(JsonReader* r) {
    while (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r') r->at++;
}

// Length of the UTF-8 character that a zero-terminated text begins with, 0 if it is none (RFC 3629, section 4).
static inline size_t utf8_bytes(const char* text) {
    const unsigned char* p = (const unsigned char*)text;
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xC2 || p[0] > 0xF4) return 0;
    size_t n = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    for (size_t i = 1; i < n; i++) if ((p[i] & 0xC0) != 0x80) return 0;
    bool too_long = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xED && p[1] > 0x9F, too_large = p[0] == 0xF4 && p[1] > 0x8F;
    return too_long || surrogate || too_large ? 0 : n;
}

static inline bool json_hex4(uint32_t* value, const char* p) {
    *value = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))) return false;
        *value = *value * 16 + (uint32_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return true;
}

// Decodes the escape at r->at, a backslash, to *out and moves both on.
static inline bool json_read_escape(JsonReader* r, char** out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char* found = r->at[1] ? strchr(names, r->at[1]) : NULL;
    if (found) {
        *(*out)++ = values[found - names];
        r->at += 2;
        return true;
    }
    uint32_t u, low;
    if (r->at[1] != 'u' || !json_hex4(&u, r->at + 2)) return json_problem(r, "unknown escape in a string");
    if (u >= 0xD800 && u <= 0xDFFF) {
        bool pair = u <= 0xDBFF && r->at[6] == '\\' && r->at[7] == 'u' && json_hex4(&low, r->at + 8);
        if (!pair || low < 0xDC00 || low > 0xDFFF) return json_problem(r, "half of a surrogate pair");
        u = 0x10000 + ((u - 0xD800) << 10) + (low - 0xDC00);
        r->at += 6;
    }
    r->at += 6;
    int more = u < 0x80 ? 0 : u < 0x800 ? 1 : u < 0x10000 ? 2 : 3;  // bytes after the first
    static const unsigned char first[4] = {0, 0xC0, 0xE0, 0xF0};
    *(*out)++ = (char)(first[more] | (u >> (6 * more)));
    while (more-- > 0) *(*out)++ = (char)(0x80 | ((u >> (6 * more)) & 0x3F));
    return true;
}

// Decodes the string at r->at, a quotation mark, in place.
static inline bool json_read_string(JsonReader* r, uint32_t* start, uint32_t* bytes) {
    char* out = ++r->at;
    *start = (uint32_t)(out - r->json->text);
    while (*r->at != '"') {
        if ((unsigned char)*r->at < 0x20) return json_problem(r, "control character in a string, or no end of it");
        if (*r->at == '\\') {
            if (!json_read_escape(r, &out)) return false;
            continue;
        }
        size_t n = utf8_bytes(r->at);
        if (n == 0) return json_problem(r, "bytes that are not UTF-8");
        for (; n > 0; n--) *out++ = *r->at++;
    }
    *bytes = (uint32_t)(out - (r->json->text + *start));
    *out = 0;
    r->at++;
    return true;
}

static inline const char* json_skip_digits(const char* p) {
    while (*p >= '0' && *p <= '9') p++;
    return p;
}

static inline bool json_read_number(JsonReader* r, JsonNode* node) {
    const char* whole = r->at + (*r->at == '-');
    const char* p = *whole == '0' ? whole + 1 : json_skip_digits(whole);
    bool good = p > whole;
    if (*p == '.') {
        const char* fraction = p + 1;
        p = json_skip_digits(fraction);
        good = good && p > fraction;
    }
    if (*p == 'e' || *p == 'E') {
        const char* exponent = p + 1 + (p[1] == '+' || p[1] == '-');
        p = json_skip_digits(exponent);
        good = good && p > exponent;
    }
    if (!good) return json_problem(r, "a value is expected");
    char* end;  // other than p after leading zeros, and in a locale with a decimal comma: refused rather than misread
    double value = strtod(r->at, &end);
    if (end != p) return json_problem(r, "a number that is not written as in JSON");
    if (!isfinite(value)) return json_problem(r, "a number beyond the range of double");
    node->start = (uint32_t)(r->at - r->json->text);
    node->bytes = (uint32_t)(p - r->at);
    r->at += node->bytes;
    return true;
}

// The slot of a member of an object: holds it, or is empty.
static inline uint32_t* json_slot(const Json* json, uint32_t object, const char* key, size_t bytes) {
    Hash hash = hash_begin(object);
    hash_add(&hash, key, bytes);
    for (size_t i = hash_end(&hash);; i++) {
        uint32_t* slot = &json->slots[i & (json->slot_count - 1)];
        const JsonNode* node = &json->nodes[*slot ? *slot - 1 : 0];
        bool same = node->parent == object && node->key_bytes == bytes;
        if (*slot == 0 || (same && memcmp(json->text + node->key, key, bytes) == 0)) return slot;
    }
}

static inline bool json_read_value(JsonReader* r, uint32_t parent, uint32_t key, uint32_t key_bytes, int depth);

// Reads the elements of node, an array or object, whose opening bracket is at r->at.
static inline bool json_read_elements(JsonReader* r, uint32_t node, int depth) {
    Json* json = r->json;
    bool object = *r->at == '{';
    char close = object ? '}' : ']';
    if (depth > JSON_DEPTH_MAX) return json_problem(r, "too many levels");
    r->at++;
    json_skip_space(r);
    bool empty = *r->at == close;
    for (uint32_t last = JSON_NONE; !empty;) {
        uint32_t child = json->count, key = 0, key_bytes = 0;
        if (object) {
            if (*r->at != '"') return json_problem(r, "a name in quotation marks is expected");
            if (!json_read_string(r, &key, &key_bytes)) return false;
            uint32_t* slot = json_slot(json, node, json->text + key, key_bytes);
            if (*slot) return json_problem(r, "a name that this object has already");
            *slot = child + 1;
            json_skip_space(r);
            if (*r->at != ':') return json_problem(r, "':' is expected");
            r->at++;
            json_skip_space(r);
        }
        if (!json_read_value(r, node, key, key_bytes, depth)) return false;
        if (last != JSON_NONE) json->nodes[last].next = child;
        last = child;
        json->nodes[node].count++;
        json_skip_space(r);
        if (*r->at == close) break;
        if (*r->at != ',') return json_problem(r, object ? "',' or '}' is expected" : "',' or ']' is expected");
        r->at++;
        json_skip_space(r);
    }
    r->at++;
    return true;
}

static inline bool json_read_value(JsonReader* r, uint32_t parent, uint32_t key, uint32_t key_bytes, int depth) {
    static const char* const words[3] = {"null", "false", "true"};
    uint32_t index = r->json->count++;
    JsonNode* node = &r->json->nodes[index];
    node->parent = parent;
    node->next = JSON_NONE;
    node->key = key;
    node->key_bytes = key_bytes;
    for (int i = 0; i < 3; i++) {
        if (strncmp(r->at, words[i], strlen(words[i])) != 0) continue;
        node->type = (JsonType)(JSON_NULL + i);
        r->at += strlen(words[i]);
        return true;
    }
    char c = *r->at;
    node->type = c == '{' ? JSON_OBJECT : c == '[' ? JSON_ARRAY : c == '"' ? JSON_STRING : JSON_NUMBER;
    if (c == '{' || c == '[') return json_read_elements(r, index, depth + 1);
    if (c == '"') return json_read_string(r, &node->start, &node->bytes);
    return json_read_number(r, node);
}

static inline void json_free(Json* json) {
    free(json->text);
    free(json->nodes);
    free(json->slots);
    memset(json, 0, sizeof *json);
}

// Reads a text; `what` names it in the message (a path). The caller frees with json_free; after a failure there is
// nothing to free.
static inline bool json_parse(Json* json, const char* text, size_t bytes, const char* what, Error* error) {
    memset(json, 0, sizeof *json);
    size_t nodes = 1;  // enough: every value but the first follows one of these, each its own
    for (size_t i = 0; i < bytes; i++) nodes += text[i] == ',' || text[i] == '[' || text[i] == '{';
    if (bytes > JSON_BYTES_MAX || nodes > JSON_NODES_MAX)
        return fail(error, "%.600s: the JSON text is too large (%zu bytes, %zu values); is this the right file?", what,
                    bytes, nodes);
    for (json->slot_count = 4; json->slot_count < 2 * nodes;) json->slot_count *= 2;
    json->text = (char*)allocate(bytes + 1);
    json->nodes = (JsonNode*)allocate(nodes * sizeof *json->nodes);
    json->slots = (uint32_t*)allocate(json->slot_count * sizeof *json->slots);
    if (!json->text || !json->nodes || !json->slots) {
        json_free(json);
        return fail(error, "%.600s: not enough memory to read %zu bytes of JSON; free some memory", what, bytes);
    }
    if (bytes > 0) memcpy(json->text, text, bytes);

    JsonReader r = {json, json->text, NULL};
    json_skip_space(&r);
    bool good = json_read_value(&r, JSON_NONE, 0, 0, 0);
    if (good) json_skip_space(&r);
    size_t at = (size_t)(r.at - json->text);
    if (good && at == bytes) return true;
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        column = text[i] == '\n' ? 1 : column + 1;
        line += text[i] == '\n';
    }
    json_free(json);
    return fail(error, "%.600s is not valid JSON: line %zu, byte %zu: %s; the file is damaged or of another kind", what,
                line, column, good ? "bytes after the end" : r.problem);
}

static inline bool json_is(const Json* json, uint32_t node, JsonType type) {
    return node != JSON_NONE && json->nodes[node].type == type;
}

// The member of an object, or JSON_NONE.
static inline uint32_t json_get(const Json* json, uint32_t node, const char* key) {
    if (!json_is(json, node, JSON_OBJECT)) return JSON_NONE;
    uint32_t found = *json_slot(json, node, key, strlen(key));
    return found ? found - 1 : JSON_NONE;
}

// Elements: for (uint32_t i = json_first(json, node); i != JSON_NONE; i = json_next(json, i)) ...
static inline uint32_t json_count(const Json* json, uint32_t node) {
    return node == JSON_NONE ? 0 : json->nodes[node].count;
}
static inline uint32_t json_first(const Json* json, uint32_t node) {
    return json_count(json, node) == 0 ? JSON_NONE : node + 1;
}
static inline uint32_t json_next(const Json* json, uint32_t node) {
    return node == JSON_NONE ? JSON_NONE : json->nodes[node].next;
}
// The name of a member; "" for anything else. It may hold zero bytes (written \u0000) and then is cut there.
static inline const char* json_key(const Json* json, uint32_t node) {
    return node == JSON_NONE || json->nodes[node].key_bytes == 0 ? "" : json->text + json->nodes[node].key;
}

// The values: false, and the output untouched, if the node is absent, of another type, or does not fit.
static inline bool json_bool(const Json* json, uint32_t node, bool* value) {
    if (!json_is(json, node, JSON_TRUE) && !json_is(json, node, JSON_FALSE)) return false;
    *value = json->nodes[node].type == JSON_TRUE;
    return true;
}

static inline bool json_number(const Json* json, uint32_t node, double* value) {
    if (!json_is(json, node, JSON_NUMBER)) return false;
    *value = strtod(json->text + json->nodes[node].start, NULL);
    return true;
}

// Adds up decimal digits; false if there is something else, or more than `largest`.
static inline bool json_digits(uint64_t* value, const char* text, size_t bytes, uint64_t largest) {
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (digit > largest || sum > (largest - digit) / 10) return false;
        sum = sum * 10 + digit;
    }
    *value = sum;
    return true;
}

// Integers: exact, and only if written as such, without point or exponent.
static inline bool json_u64(const Json* json, uint32_t node, uint64_t* value) {
    if (!json_is(json, node, JSON_NUMBER)) return false;
    return json_digits(value, json->text + json->nodes[node].start, json->nodes[node].bytes, UINT64_MAX);
}
static inline bool json_i64(const Json* json, uint32_t node, int64_t* value) {
    if (!json_is(json, node, JSON_NUMBER)) return false;
    const char* text = json->text + json->nodes[node].start;
    bool minus = *text == '-';
    uint64_t size;
    if (!json_digits(&size, text + minus, json->nodes[node].bytes - minus, (uint64_t)INT64_MAX + minus)) return false;
    *value = !minus || size == 0 ? (int64_t)size : -(int64_t)(size - 1) - 1;
    return true;
}

// Copies a string and its zero byte; false also if it is longer than size - 1 or holds a zero byte itself.
static inline bool json_string(const Json* json, uint32_t node, char* out, size_t size) {
    if (!json_is(json, node, JSON_STRING)) return false;
    const char* text = json->text + json->nodes[node].start;
    size_t bytes = json->nodes[node].bytes;
    if (bytes >= size || strlen(text) != bytes) return false;
    memcpy(out, text, bytes + 1);
    return true;
}

// The writer. Zero it to begin; set line_depth to N to start a line for each element of the N outer levels. Memory that
// runs out is remembered and reported once, by json_write_done. The caller calls json_writer_free.
typedef struct {
    char* text;              // owned, zero-terminated
    size_t bytes, capacity;
    int depth, line_depth;
    bool comma;              // the next element is not the first of its container
    bool after_key;          // the next element is the value of a member
    bool failed;
} JsonWriter;

static inline void json_writer_free(JsonWriter* w) {
    free(w->text);
    memset(w, 0, sizeof *w);
}

static inline void json_put(JsonWriter* w, const char* text, size_t bytes) {
    if (w->failed) return;
    if (w->capacity - w->bytes < bytes + 1) {
        size_t capacity = 2 * (w->bytes + bytes) + 256;
        char* grown = (char*)realloc(w->text, capacity);
        w->failed = grown == NULL;
        if (w->failed) return;
        w->text = grown;
        w->capacity = capacity;
    }
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
    w->text[w->bytes] = 0;
}

static inline void json_put_line(JsonWriter* w) {
    json_put(w, "\n", 1);
    for (int i = 0; i < w->depth; i++) json_put(w, "  ", 2);
}

// What comes before a value or a member.
static inline void json_put_separator(JsonWriter* w) {
    if (!w->after_key && w->comma) json_put(w, ",", 1);
    if (!w->after_key && w->depth > 0 && w->depth <= w->line_depth) json_put_line(w);
    w->after_key = false;
    w->comma = true;
}

static inline void json_write_raw(JsonWriter* w, const char* text) {
    json_put_separator(w);
    json_put(w, text, strlen(text));
}

// Bytes that are not UTF-8 (a path may hold some) become U+FFFD, so that what we write can always be read.
static inline void json_write_string(JsonWriter* w, const char* text) {
    json_put_separator(w);
    json_put(w, "\"", 1);
    while (*text) {
        char escaped[8];
        size_t n = utf8_bytes(text);
        if (n == 0) json_put(w, "\xEF\xBF\xBD", 3);
        else if (*text == '"' || *text == '\\') { json_put(w, "\\", 1); json_put(w, text, 1); }
        else if ((unsigned char)*text >= 0x20) json_put(w, text, n);
        else json_put(w, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)*text));
        text += max_size(n, 1);
    }
    json_put(w, "\"", 1);
}

static inline void json_write_key(JsonWriter* w, const char* key) {
    json_write_string(w, key);
    json_put(w, ": ", 2);
    w->after_key = true;
}

// bracket is '{' or '[', and at the end '}' or ']'.
static inline void json_write_begin(JsonWriter* w, char bracket) {
    json_put_separator(w);
    json_put(w, &bracket, 1);
    w->depth++;
    w->comma = false;
}
static inline void json_write_end(JsonWriter* w, char bracket) {
    w->depth--;
    if (w->comma && w->depth < w->line_depth) json_put_line(w);
    json_put(w, &bracket, 1);
    w->comma = true;
}

static inline void json_write_bool(JsonWriter* w, bool value) { json_write_raw(w, value ? "true" : "false"); }
static inline void json_write_u64(JsonWriter* w, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    json_write_raw(w, text);
}
static inline void json_write_i64(JsonWriter* w, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    json_write_raw(w, text);
}

// As few digits as read back to the same bits; JSON has no NaN and no infinity: they become null.
static inline void json_write_number(JsonWriter* w, double value) {
    char text[40] = "null";
    for (int digits = 15; digits <= 17 && isfinite(value); digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    for (char* p = text; *p; p++) if (*p == ',') *p = '.';  // a locale's decimal comma
    json_write_raw(w, text);
}

// A member of an object: key and value.
static inline void json_member_number(JsonWriter* w, const char* key, double value) {
    json_write_key(w, key);
    json_write_number(w, value);
}
static inline void json_member_u64(JsonWriter* w, const char* key, uint64_t value) {
    json_write_key(w, key);
    json_write_u64(w, value);
}
static inline void json_member_string(JsonWriter* w, const char* key, const char* value) {
    json_write_key(w, key);
    json_write_string(w, value);
}

static inline bool json_write_done(const JsonWriter* w, Error* error) {
    if (w->failed) return fail(error, "not enough memory to write %zu bytes of JSON; free some memory", w->bytes);
    if (w->depth != 0) return fail(error, "a JSON text of %zu bytes has open brackets; report this mistake", w->bytes);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Files
//
// A file is written under a temporary name in its directory, flushed to the disk, and then takes its name; the
// directory is flushed too. Whoever opens the name finds the old file or the new one, whole, also after the power was
// cut. When a step fails the temporary file is removed and the old one stays.

#define FILE_PATH_MAX ((size_t)4096)
#define FILE_CHUNK ((size_t)4 << 20)  // bytes per read or write: few calls, and the checksum finds them in the cache

// Says what failed, where, why (errno), and what to do about it.
static inline bool fail_file(Error* error, const char* action, const char* path) {
    const char* remedy = "check the path and the disk";
    switch (errno) {
        case ENOSPC: case EDQUOT: remedy = "free some space there, or choose another disk"; break;
        case EFBIG: remedy = "raise the limit on file sizes (ulimit -f), or choose another disk"; break;
        case EACCES: case EPERM: case EROFS: remedy = "choose a place that this user may use"; break;
        case ENOENT: case ENOTDIR: remedy = "check the path"; break;
        case EISDIR: remedy = "name a file, not a directory"; break;
        case EEXIST: case ENOTEMPTY: remedy = "something has that name already: move it away"; break;
        case EMFILE: case ENFILE: remedy = "raise the limit on open files (ulimit -n)"; break;
        case EIO: remedy = "the disk may be failing: see the system's log"; break;
    }
    return fail(error, "cannot %s %.600s: %s; %s", action, path, strerror(errno), remedy);
}

static inline bool path_copy(char copy[FILE_PATH_MAX], const char* path, Error* error) {
    size_t bytes = strlen(path);
    if (bytes == 0) return fail(error, "a path is empty; name a file or directory");
    if (bytes >= FILE_PATH_MAX) return fail(error, "the path %.200s... is too long; choose a shorter one", path);
    memcpy(copy, path, bytes + 1);
    return true;
}

// Flushes a file descriptor to the disk.
static inline bool file_sync(int file) {
    int result;
    do result = fsync(file); while (result != 0 && errno == EINTR);
    return result == 0;
}

// Flushes a directory: the names in it, not the files.
static inline bool directory_sync(const char* path, Error* error) {
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return fail_file(error, "open the directory", path);
    bool good = file_sync(directory) || errno == EINVAL || errno == ENOTSUP;  // some file systems have no such call
    if (!good) fail_file(error, "flush the directory", path);
    close(directory);
    return good;
}

// Flushes the directory that holds the path.
static inline bool directory_sync_parent(const char* path, Error* error) {
    char parent[FILE_PATH_MAX];
    if (!path_copy(parent, path, error)) return false;
    size_t end = strlen(parent);
    while (end > 1 && parent[end - 1] == '/') end--;
    while (end > 0 && parent[end - 1] != '/') end--;
    while (end > 1 && parent[end - 1] == '/') end--;
    parent[end] = 0;
    return directory_sync(end > 0 ? parent : ".", error);
}

// A file being written: file_begin, file_append any number of times, then file_end or file_abort. A call that fails
// has aborted; to abort again does nothing.
typedef struct {
    int file;  // open descriptor, or -1
    char path[FILE_PATH_MAX];
    char temporary[FILE_PATH_MAX + 64];
} FileWriter;

static inline void file_abort(FileWriter* w) {
    if (w->file < 0) return;
    close(w->file);
    unlink(w->temporary);
    w->file = -1;
}

// fail_file for a writer, which it aborts.
static inline bool file_abort_because(FileWriter* w, const char* action, Error* error) {
    fail_file(error, action, w->path);
    file_abort(w);
    return false;
}

static inline bool file_begin(FileWriter* w, const char* path, Error* error) {
    w->file = -1;
    if (!path_copy(w->path, path, error)) return false;
    for (int attempt = 0; w->file < 0; attempt++) {  // the name may be left over from a process that was killed
        snprintf(w->temporary, sizeof w->temporary, "%s.tmp-%ld-%d", path, (long)getpid(), attempt);
        w->file = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->file < 0 && (errno != EEXIST || attempt == 1000)) return fail_file(error, "create", path);
    }
    return true;
}

static inline bool file_append(FileWriter* w, const void* data, size_t bytes, Error* error) {
    if (w->file < 0) return fail(error, "%.600s is not being written; an earlier step failed", w->path);
    const char* p = (const char*)data;
    while (bytes > 0) {
        ssize_t n = write(w->file, p, min_size(bytes, FILE_CHUNK));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO;
        if (n <= 0) return file_abort_because(w, "write", error);
        p += n;
        bytes -= (size_t)n;
    }
    return true;
}

// False after the file took its name means only that a power cut may still undo it.
static inline bool file_end(FileWriter* w, Error* error) {
    if (w->file < 0) return fail(error, "%.600s is not being written; an earlier step failed", w->path);
    if (!file_sync(w->file)) return file_abort_because(w, "flush", error);
    if (rename(w->temporary, w->path) != 0) return file_abort_because(w, "write", error);
    close(w->file);  // after the flush there is nothing left that it could lose
    w->file = -1;
    return directory_sync_parent(w->path, error);
}

static inline bool file_write_atomic(const char* path, const void* data, size_t bytes, Error* error) {
    FileWriter w;
    return file_begin(&w, path, error) && file_append(&w, data, bytes, error) && file_end(&w, error);
}

// Opens a regular file for reading; -1 after a failure.
static inline int file_open(size_t* bytes, const char* path, Error* error) {
    struct stat status;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // not to wait for the other end if it is a pipe
    bool good = file >= 0 && fstat(file, &status) == 0;
    if (!good) fail_file(error, "open", path);
    if (good && !S_ISREG(status.st_mode)) good = fail(error, "%.600s is not a file; check the path", path);
    if (!good) {
        if (file >= 0) close(file);
        return -1;
    }
    *bytes = (size_t)status.st_size;
    return file;
}

// Reads bytes at an offset; the file must have them.
static inline bool file_read_at(int file, void* data, size_t bytes, size_t offset, const char* path, Error* error) {
    char* p = (char*)data;
    while (bytes > 0) {
        ssize_t n = pread(file, p, min_size(bytes, FILE_CHUNK), (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_file(error, "read", path);
        if (n == 0) return fail(error, "%.600s ends %zu bytes early; it was cut, use another copy", path, bytes);
        p += n;
        offset += (size_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

// Reads a whole file of at most max_bytes; a zero byte follows the last. The caller frees *data with free().
static inline bool file_read(const char* path, size_t max_bytes, char** data, size_t* bytes, Error* error) {
    *data = NULL;
    int file = file_open(bytes, path, error);
    if (file < 0) return false;
    bool good = true;
    if (*bytes > max_bytes)
        good = fail(error, "%.600s has %zu bytes, more than the %zu expected; check the path", path, *bytes, max_bytes);
    if (good && (*data = (char*)allocate(*bytes + 1)) == NULL)
        good = fail(error, "%.600s: not enough memory for its %zu bytes; free some memory", path, *bytes);
    good = good && file_read_at(file, *data, *bytes, 0, path, error);
    if (!good) {
        free(*data);
        *data = NULL;
    }
    close(file);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 3. Directories

static inline bool directory_exists(const char* path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

// Makes a directory, and the ones above it, where they do not exist; several processes may do so at once.
static inline bool directory_make(const char* path, Error* error) {
    char part[FILE_PATH_MAX];
    if (!path_copy(part, path, error)) return false;
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        part[i] = 0;
        if (!directory_exists(part)) {
            if (mkdir(part, 0777) != 0 && !(errno == EEXIST && directory_exists(part)))
                return fail_file(error, "make the directory", part);
            if (!directory_sync_parent(part, error)) return false;
        }
        part[i] = path[i];
    }
    return true;
}

// Removes a directory and the files in it; one that does not exist is no error, one that holds directories is.
static inline bool directory_remove(const char* path, Error* error) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return true;
    DIR* directory = file < 0 ? NULL : fdopendir(file);
    if (directory == NULL) {
        fail_file(error, "open the directory", path);
        if (file >= 0) close(file);
        return false;
    }
    bool good = true;
    for (struct dirent* entry; good && (errno = 0, entry = readdir(directory)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        good = unlinkat(file, entry->d_name, 0) == 0 || errno == ENOENT;
    }
    good = good && errno == 0;
    if (!good) fail_file(error, "empty the directory", path);
    closedir(directory);
    if (good && rmdir(path) != 0) return fail_file(error, "remove the directory", path);
    return good && directory_sync_parent(path, error);
}

// Gives a directory its final name: flushes it, renames it, flushes the directory above. The files in it must have
// been flushed. `to` must not exist, or be an empty directory.
static inline bool directory_rename_sync(const char* from, const char* to, Error* error) {
    if (!directory_sync(from, error)) return false;
    if (rename(from, to) != 0) return fail_file(error, "give the final name to the directory", to);
    return directory_sync_parent(to, error);
}

// ------------------------------------------------------------------------------------------------
// 4. Safetensors
//
// The public format: the length of the header in 8 bytes, the header as JSON,
//   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}},
// spaces up to a multiple of 8 bytes, then the data of the tensors without gaps; offsets count from its start.
// The header is the whole truth: its tensors must cover the file from the first byte of data to the last.
// Checksums are XXH64 with seed 0: of the header with its length, and of the data of each tensor.

#define SAFETENSORS_NAME_MAX 256                    // with the zero byte
#define SAFETENSORS_DIMS_MAX 8
#define SAFETENSORS_HEADER_MAX ((size_t)100000000)  // the format's own limit
#define SAFETENSORS_TENSORS_MAX ((size_t)1 << 16)   // in one file

typedef enum {
    SAFETENSORS_BOOL, SAFETENSORS_U8, SAFETENSORS_I8,                    // 1 byte
    SAFETENSORS_U16, SAFETENSORS_I16, SAFETENSORS_F16, SAFETENSORS_BF16, // 2
    SAFETENSORS_U32, SAFETENSORS_I32, SAFETENSORS_F32,                   // 4
    SAFETENSORS_U64, SAFETENSORS_I64, SAFETENSORS_F64,                   // 8
    SAFETENSORS_TYPES                                                    // how many there are
} SafetensorsType;

static inline const char* safetensors_type_name(SafetensorsType type) {
    static const char* const names[SAFETENSORS_TYPES] = {"BOOL", "U8", "I8", "U16", "I16", "F16", "BF16",
                                                         "U32", "I32", "F32", "U64", "I64", "F64"};
    return names[type];
}
static inline size_t safetensors_type_bytes(SafetensorsType type) {
    return type <= SAFETENSORS_I8 ? 1 : type <= SAFETENSORS_BF16 ? 2 : type <= SAFETENSORS_F32 ? 4 : 8;
}

typedef struct {
    char name[SAFETENSORS_NAME_MAX];
    SafetensorsType type;
    int dims;                            // 0: one element
    size_t shape[SAFETENSORS_DIMS_MAX];
    size_t offset, bytes;                // of the data, in the data section
    size_t place;                        // in the header
    uint64_t hash;                       // of the data; the writer knows it when the last byte is written
} SafetensorsTensor;

typedef struct {
    Json json;                   // owned; the metadata are in it
    SafetensorsTensor* tensors;  // owned; in the order of their data
    size_t count;
    size_t data_bytes;
    uint64_t hash;
} SafetensorsHeader;

static inline void safetensors_header_free(SafetensorsHeader* header) {
    json_free(&header->json);
    free(header->tensors);
    memset(header, 0, sizeof *header);
}

// Multiplies the shape and the type out; false if it overflows.
static inline bool safetensors_shape_bytes(size_t* bytes, SafetensorsType type, const size_t* shape, int dims) {
    *bytes = safetensors_type_bytes(type);
    for (int i = 0; i < dims; i++) {
        if (shape[i] != 0 && *bytes > SIZE_MAX / shape[i]) return false;
        *bytes *= shape[i];
    }
    return true;
}

// Reads the member `node` of the header; NULL, or what is wrong with it.
static inline const char* safetensors_tensor_parse(SafetensorsTensor* tensor, const Json* json, uint32_t node) {
    char dtype[8];
    uint64_t n, offsets[2];
    uint32_t shape = json_get(json, node, "shape"), range = json_get(json, node, "data_offsets");
    if (json_count(json, node) != 3 || !json_is(json, shape, JSON_ARRAY) || !json_is(json, range, JSON_ARRAY))
        return "it does not consist of dtype, shape and data_offsets";

    tensor->type = SAFETENSORS_TYPES;
    if (!json_string(json, json_get(json, node, "dtype"), dtype, sizeof dtype)) return "its dtype is not known";
    for (int t = 0; t < SAFETENSORS_TYPES; t++)
        if (strcmp(dtype, safetensors_type_name((SafetensorsType)t)) == 0) tensor->type = (SafetensorsType)t;
    if (tensor->type == SAFETENSORS_TYPES) return "its dtype is not known";

    if (json_count(json, shape) > SAFETENSORS_DIMS_MAX) return "it has too many dimensions";
    for (uint32_t i = json_first(json, shape); i != JSON_NONE; i = json_next(json, i)) {
        if (!json_u64(json, i, &n) || n > SIZE_MAX) return "its shape is not made of sizes";
        tensor->shape[tensor->dims++] = (size_t)n;
    }
    uint32_t first = json_first(json, range), second = json_next(json, first);
    if (json_count(json, range) != 2 || !json_u64(json, first, &offsets[0]) || !json_u64(json, second, &offsets[1]))
        return "its data_offsets are not two sizes";
    if (offsets[0] > offsets[1] || offsets[1] > SIZE_MAX) return "its data_offsets are in the wrong order";
    tensor->offset = (size_t)offsets[0];
    size_t bytes = (size_t)(offsets[1] - offsets[0]);
    if (!safetensors_shape_bytes(&tensor->bytes, tensor->type, tensor->shape, tensor->dims) || bytes != tensor->bytes)
        return "its data_offsets do not agree with its shape";

    size_t length = json->nodes[node].key_bytes;
    if (length == 0 || length >= SAFETENSORS_NAME_MAX) return "its name is empty or too long";
    memcpy(tensor->name, json_key(json, node), length);
    for (size_t i = 0; i < length; i++) if ((unsigned char)tensor->name[i] < 0x20) return "its name is not printable";
    return NULL;
}

static inline int safetensors_compare(const void* left, const void* right) {
    const SafetensorsTensor* a = (const SafetensorsTensor*)left;
    const SafetensorsTensor* b = (const SafetensorsTensor*)right;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

// Reads and checks a header that stands before data_bytes of data.
static inline bool safetensors_header_parse(SafetensorsHeader* header, const char* text, size_t bytes,
                                            size_t data_bytes, const char* path, Error* error) {
    memset(header, 0, sizeof *header);
    if (bytes == 0 || text[0] != '{') return fail(error, "%.600s is not a safetensors file; check the path", path);
    if (!json_parse(&header->json, text, bytes, path, error)) return false;
    const Json* json = &header->json;
    uint64_t length = bytes;
    Hash hash = hash_begin(0);
    hash_add(&hash, &length, sizeof length);
    hash_add(&hash, text, bytes);
    header->hash = hash_end(&hash);
    header->data_bytes = data_bytes;
    size_t members = json_count(json, 0);
    if (members <= SAFETENSORS_TENSORS_MAX)
        header->tensors = (SafetensorsTensor*)allocate(members * sizeof *header->tensors);
    if (header->tensors == NULL) {
        safetensors_header_free(header);
        return fail(error, "%.600s: too many tensors (%zu) for the memory; is this the right file?", path, members);
    }

    const char *problem = NULL, *name = "the header";
    for (uint32_t i = json_first(json, 0); i != JSON_NONE && !problem; i = json_next(json, i)) {
        name = json_key(json, i);
        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is(json, i, JSON_OBJECT)) problem = "it is not an object";
            for (uint32_t m = json_first(json, i); m != JSON_NONE; m = json_next(json, m))
                if (!json_is(json, m, JSON_STRING)) problem = "its values are not strings";
            continue;
        }
        SafetensorsTensor* tensor = &header->tensors[header->count];
        tensor->place = header->count++;
        problem = safetensors_tensor_parse(tensor, json, i);
    }
    if (!problem) qsort(header->tensors, header->count, sizeof *header->tensors, safetensors_compare);
    size_t end = 0;
    for (size_t i = 0; i < header->count && !problem; i++) {
        name = header->tensors[i].name;
        if (header->tensors[i].offset != end) problem = "its data overlap with others or leave a hole before them";
        end = header->tensors[i].offset + header->tensors[i].bytes;
    }
    if (!problem && end != data_bytes) {
        name = "the header";
        problem = "its tensors do not end where the file ends";
    }
    if (!problem) return true;
    fail(error, "%.600s is not a sound safetensors file: %.100s: %s; use another copy", path, name, problem);
    safetensors_header_free(header);
    return false;
}

// The writer: safetensors_create; safetensors_metadata as wanted, then safetensors_declare for every tensor;
// safetensors_begin; safetensors_write for the data in the order of declaration, in pieces of any size;
// safetensors_end; and safetensors_writer_free, after which nothing is left of a file that did not reach its end.
// A call that fails has removed the file already.
typedef struct {
    FileWriter file;
    JsonWriter text;           // the header, as it grows
    SafetensorsHeader header;  // from safetensors_begin on: the header as a reader will see it, and the checksums
    size_t declared;           // tensors
    size_t data_bytes;         // of them
    size_t current, done;      // the tensor being written, and the bytes of it that are
    Hash hash;                 // of those bytes
} SafetensorsWriter;

static inline void safetensors_writer_free(SafetensorsWriter* w) {
    file_abort(&w->file);
    json_writer_free(&w->text);
    safetensors_header_free(&w->header);
}

static inline bool safetensors_create(SafetensorsWriter* w, const char* path, Error* error) {
    memset(w, 0, sizeof *w);
    json_write_begin(&w->text, '{');
    return file_begin(&w->file, path, error);
}

static inline bool safetensors_fail(SafetensorsWriter* w, Error* error, const char* problem, const char* name) {
    file_abort(&w->file);
    return fail(error, "cannot write %.600s: %s %.100s", w->file.path, problem, name);
}

// Strings about the file as a whole; before the first tensor.
static inline bool safetensors_metadata(SafetensorsWriter* w, const char* key, const char* value, Error* error) {
    if (w->declared > 0) return safetensors_fail(w, error, "metadata must come before the first tensor:", key);
    if (w->text.depth == 1) {
        json_write_key(&w->text, "__metadata__");
        json_write_begin(&w->text, '{');
    }
    json_write_key(&w->text, key);
    json_write_string(&w->text, value);
    return true;
}

static inline bool safetensors_declare(SafetensorsWriter* w, const char* name, SafetensorsType type,
                                       const size_t* shape, int dims, Error* error) {
    size_t bytes;
    if (dims < 0 || dims > SAFETENSORS_DIMS_MAX) return safetensors_fail(w, error, "too many dimensions in", name);
    if (!safetensors_shape_bytes(&bytes, type, shape, dims) || bytes > INT64_MAX - w->data_bytes)
        return safetensors_fail(w, error, "too many elements in", name);
    if (w->text.depth == 2) json_write_end(&w->text, '}');
    json_write_key(&w->text, name);
    json_write_begin(&w->text, '{');
    json_write_key(&w->text, "dtype");
    json_write_string(&w->text, safetensors_type_name(type));
    json_write_key(&w->text, "shape");
    json_write_begin(&w->text, '[');
    for (int i = 0; i < dims; i++) json_write_u64(&w->text, shape[i]);
    json_write_end(&w->text, ']');
    json_write_key(&w->text, "data_offsets");
    json_write_begin(&w->text, '[');
    json_write_u64(&w->text, w->data_bytes);
    json_write_u64(&w->text, w->data_bytes + bytes);
    json_write_end(&w->text, ']');
    json_write_end(&w->text, '}');
    w->data_bytes += bytes;
    w->declared++;
    return true;
}

// Ends every tensor that has all its bytes; those of no bytes at once.
static inline void safetensors_advance(SafetensorsWriter* w) {
    while (w->current < w->header.count && w->done == w->header.tensors[w->current].bytes) {
        w->header.tensors[w->current++].hash = hash_end(&w->hash);
        w->hash = hash_begin(0);
        w->done = 0;
    }
}

// Writes the header, after reading it back as any reader will: what is wrong with a name or a shape is found here.
static inline bool safetensors_begin(SafetensorsWriter* w, Error* error) {
    while (w->text.depth > 0) json_write_end(&w->text, '}');
    while (!w->text.failed && w->text.bytes % 8 != 0) json_put(&w->text, " ", 1);
    uint64_t length = w->text.bytes;
    bool good = json_write_done(&w->text, error);
    if (good && length > SAFETENSORS_HEADER_MAX)
        good = fail(error, "cannot write %.600s: too many tensors for one file", w->file.path);
    good = good && safetensors_header_parse(&w->header, w->text.text, length, w->data_bytes, w->file.path, error);
    good = good && file_append(&w->file, &length, sizeof length, error);
    good = good && file_append(&w->file, w->text.text, length, error);
    if (!good) file_abort(&w->file);
    w->hash = hash_begin(0);
    safetensors_advance(w);
    return good;
}

// The bytes go to the disk from where they lie.
static inline bool safetensors_write(SafetensorsWriter* w, const void* data, size_t bytes, Error* error) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        if (w->current >= w->header.count) return safetensors_fail(w, error, "there are more data than declared", "");
        size_t n = min_size(min_size(bytes, FILE_CHUNK), w->header.tensors[w->current].bytes - w->done);
        if (!file_append(&w->file, p, n, error)) return false;
        hash_add(&w->hash, p, n);
        p += n;
        bytes -= n;
        w->done += n;
        safetensors_advance(w);
    }
    return true;
}

static inline bool safetensors_end(SafetensorsWriter* w, Error* error) {
    if (w->header.tensors == NULL) return safetensors_fail(w, error, "the header was not written", "");
    if (w->current < w->header.count)
        return safetensors_fail(w, error, "there are not enough data for", w->header.tensors[w->current].name);
    return file_end(&w->file, error);
}

// The reader. It uses read calls and no mapped memory, so that a file which is cut while we read it is an error and
// not a signal.
typedef struct {
    int file;                  // open descriptor
    size_t data_start;         // in the file
    SafetensorsHeader header;
    char path[FILE_PATH_MAX];
} SafetensorsFile;

static inline void safetensors_close(SafetensorsFile* f) {
    if (f->file >= 0) close(f->file);
    f->file = -1;
    safetensors_header_free(&f->header);
}

// Opens a file and checks its header against its size. After a failure there is nothing to close.
static inline bool safetensors_open(SafetensorsFile* f, const char* path, Error* error) {
    memset(f, 0, sizeof *f);
    f->file = -1;
    size_t bytes;
    uint64_t length = 0;
    if (!path_copy(f->path, path, error) || (f->file = file_open(&bytes, path, error)) < 0) return false;
    bool good = true;
    if (bytes < sizeof length) good = fail(error, "%.600s is too short for a safetensors file; it was cut", path);
    good = good && file_read_at(f->file, &length, sizeof length, 0, path, error);
    if (good && (length > bytes - sizeof length || length > SAFETENSORS_HEADER_MAX))
        good = fail(error, "%.600s is cut, or is not a safetensors file: it announces a header of %llu bytes", path,
                    (unsigned long long)length);
    char* text = good ? (char*)allocate(length) : NULL;
    if (good && !text) good = fail(error, "%.600s: not enough memory for its header; free some memory", path);
    good = good && file_read_at(f->file, text, length, sizeof length, path, error);
    f->data_start = sizeof length + length;
    good = good && safetensors_header_parse(&f->header, text, length, bytes - f->data_start, path, error);
    free(text);
    if (!good) safetensors_close(f);
    return good;
}

// NULL if there is none.
static inline const SafetensorsTensor* safetensors_find(const SafetensorsFile* f, const char* name) {
    for (size_t i = 0; i < f->header.count; i++)
        if (strcmp(f->header.tensors[i].name, name) == 0) return &f->header.tensors[i];
    return NULL;
}

// Reads a part of a tensor: bytes from first_byte on.
static inline bool safetensors_read_range(const SafetensorsFile* f, const SafetensorsTensor* tensor, size_t first_byte,
                                          size_t bytes, void* buffer, Error* error) {
    if (first_byte > tensor->bytes || bytes > tensor->bytes - first_byte)
        return fail(error, "%.600s: bytes %zu to %zu were asked of %.100s, which has %zu; the shapes differ", f->path,
                    first_byte, first_byte + bytes, tensor->name, tensor->bytes);
    return file_read_at(f->file, buffer, bytes, f->data_start + tensor->offset + first_byte, f->path, error);
}

// Reads a tensor whole, and gives its checksum where hash is not NULL.
static inline bool safetensors_read(const SafetensorsFile* f, const SafetensorsTensor* tensor, void* buffer,
                                    size_t bytes, uint64_t* hash, Error* error) {
    if (bytes != tensor->bytes)
        return fail(error, "%.600s: %.100s has %zu bytes where %zu are expected; the shapes differ", f->path,
                    tensor->name, tensor->bytes, bytes);
    Hash sum = hash_begin(0);
    for (size_t done = 0; done < bytes;) {
        char* part = (char*)buffer + done;
        size_t n = min_size(bytes - done, FILE_CHUNK);
        if (!safetensors_read_range(f, tensor, done, n, part, error)) return false;
        if (hash) hash_add(&sum, part, n);
        done += n;
    }
    if (hash) *hash = hash_end(&sum);
    return true;
}

#endif  // LLMTRAIN_FILES_H
