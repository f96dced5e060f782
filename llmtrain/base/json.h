// json.h: JSON: a strict reader into a flat array of nodes, and a writer.
//
//   Json json;
//   if (!json_parse(&json, text, bytes, "config.json", &error)) ...             nothing to free after a failure
//   bool ok = json_u64(&json, json_get(&json, 0, "vocab_size"), &vocabulary);   node 0 is the whole text
//   json_free(&json);
//
//   JsonWriter w = {0};
//   json_write_begin(&w, '{'); json_member_u64(&w, "step", 20); json_write_end(&w, '}');
//   if (!json_write_done(&w, &error)) ...                                       w.text, w.bytes
//   json_writer_free(&w);
//
// The reader accepts any bytes. It refuses an invalid text with an error that names line and byte, and takes memory in
// proportion to the text. It changes no value: a number that does not fit the requested type is not read at all. The
// reader can read everything that the writer writes. There is no global state; one thread at a time may use an
// object.

#ifndef LLMTRAIN_JSON_H
#define LLMTRAIN_JSON_H

#include "../ops/base.h"  // Error, memory_allocate, hashes

// ------------------------------------------------------------------------------------------------
// Reader
//
// The reader follows RFC 8259, and refuses the cases that the RFC leaves open: the same name twice in an object, more
// than JSON_DEPTH_MAX levels, bytes that are not UTF-8, half a surrogate pair, a number beyond the range of double;
// json_parse_as_python accepts what Python's json does. It works on a copy of the text and decodes strings in place,
// since decoding never makes them longer. The copy ends in a zero byte, which no rule of the grammar accepts, so no
// step needs to compare with the end.
//
// Nodes are stored in the order of the text: the first element of a container is the node after it. A hash table over
// (container, name) finds members and duplicates without a search.

#define JSON_NONE 0xFFFFFFFFu            // no such node; every function accepts it as input
#define JSON_DEPTH_MAX 32
#define JSON_DEPTH_PYTHON 900            // Python's json has about 1,000
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
    uint32_t* slots;    // owned; the hash table: node + 1, or 0 in an empty slot
    uint32_t count;     // nodes
    size_t slot_count;  // a power of two, at least twice the nodes
} Json;

typedef struct {
    Json* json;
    char* at;             // the next byte to read, in the copy
    const char* problem;  // the error there
    bool as_python;       // json_parse_as_python
} JsonReader;

static inline bool json_problem(JsonReader* r, const char* problem) {
    r->problem = problem;
    return false;
}

static inline void json_skip_space(JsonReader* r) {
    while (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r') r->at++;
}

// Bytes of the UTF-8 character that a zero-terminated text begins with; 0 if it begins with none (RFC 3629, section 4).
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

// Decodes the escape at r->at, a backslash, to *out and advances both.
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
        pair = pair && low >= 0xDC00 && low <= 0xDFFF;
        if (!pair && !r->as_python) return json_problem(r, "half of a surrogate pair");
        u = pair ? 0x10000 + ((u - 0xD800) << 10) + (low - 0xDC00) : 0xFFFD;
        r->at += 6 * pair;
    }
    r->at += 6;
    *out += utf8_write(*out, u);
    return true;
}

// Decodes the string at r->at, a quotation mark, in place.
static inline bool json_read_string(JsonReader* r, uint32_t* start, uint32_t* bytes) {
    char* out = ++r->at;
    *start = (uint32_t)(out - r->json->text);
    while (*r->at != '"') {
        if ((unsigned char)*r->at < 0x20) return json_problem(r, "control character in a string, or no closing quote");
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
    char* end;  // differs from p after leading zeros, and in a locale with a decimal comma: then refuse, not misread
    double value = strtod(r->at, &end);
    if (end != p) return json_problem(r, "a malformed number");
    if (!isfinite(value) && !r->as_python) return json_problem(r, "a number beyond the range of double");
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
    if (depth > (r->as_python ? JSON_DEPTH_PYTHON : JSON_DEPTH_MAX)) return json_problem(r, "too many levels");
    r->at++;
    json_skip_space(r);
    bool empty = *r->at == close;
    for (uint32_t last = JSON_NONE; !empty;) {
        uint32_t child = json->count, key = 0, key_bytes = 0;
        if (object) {
            if (*r->at != '"') return json_problem(r, "a name in quotation marks is expected");
            if (!json_read_string(r, &key, &key_bytes)) return false;
            uint32_t* slot = json_slot(json, node, json->text + key, key_bytes);
            if (*slot && !r->as_python) return json_problem(r, "a duplicate name in an object");
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
    static const char* const numbers[3] = {"NaN", "Infinity", "-Infinity"};
    for (int i = 0; r->as_python && i < 3; i++) {
        if (strncmp(r->at, numbers[i], strlen(numbers[i])) != 0) continue;
        node->type = JSON_NUMBER;
        node->start = (uint32_t)(r->at - r->json->text);
        node->bytes = (uint32_t)strlen(numbers[i]);
        r->at += node->bytes;
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

// What a file is that was downloaded in place of the one wanted; NULL: it does not look like one.
static inline const char* json_substitute(const char* text, size_t bytes) {
    static const char pointer[] = "version https://git-lfs";
    if (bytes > sizeof pointer && memcmp(text, pointer, sizeof pointer - 1) == 0)
        return "is a pointer of Git LFS, not the file itself; run git lfs pull in its repository";
    return bytes > 0 && text[0] == '<' ? "begins with '<', as a web page does; download the file itself" : NULL;
}

static inline bool json_parse_kind(Json* json, const char* text, size_t bytes, bool as_python, const char* what,
                                   Error* error) {
    memset(json, 0, sizeof *json);
    size_t nodes = 1;  // enough: every value but the first follows one of these characters, outside strings
    bool inside = false;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '"') inside = !inside;
        else if (inside) i += text[i] == '\\';
        else nodes += text[i] == ',' || text[i] == '[' || text[i] == '{';
    }
    if (bytes > JSON_BYTES_MAX || nodes > JSON_NODES_MAX)
        return fail_with(error, "%.600s: the JSON text is too large (%zu bytes, %zu values); is this the right file?",
                         what, bytes, nodes);
    for (json->slot_count = 4; json->slot_count < 2 * nodes;) json->slot_count *= 2;
    json->text = (char*)memory_allocate(bytes + 1);
    json->nodes = (JsonNode*)memory_allocate(nodes * sizeof *json->nodes);
    json->slots = (uint32_t*)memory_allocate(json->slot_count * sizeof *json->slots);
    if (!json->text || !json->nodes || !json->slots) {
        json_free(json);
        return fail_memory(error, what, bytes);
    }
    if (bytes > 0) memcpy(json->text, text, bytes);

    JsonReader r = {json, json->text, NULL, as_python};
    json_skip_space(&r);
    bool good = json_read_value(&r, JSON_NONE, 0, 0, 0);
    if (good) json_skip_space(&r);
    size_t at = (size_t)(r.at - json->text);
    if (good && at == bytes) return true;
    size_t line = 1, column = 1;
    char where[32] = "";  // empty for line 1: the text itself may be a line of a file
    for (size_t i = 0; i < at; i++) {
        bool ends = text[i] == '\n' && i + 1 < bytes;  // nothing follows the newline at the end
        column = ends ? 1 : column + 1;
        line += ends;
    }
    if (line > 1) snprintf(where, sizeof where, "line %zu, ", line);
    json_free(json);
    const char* instead = json_substitute(text, bytes);
    if (instead) return fail_with(error, "%.600s %s", what, instead);
    return fail_with(error, "%.600s is not valid JSON: %sbyte %zu: %s; the file is damaged or of another kind", what,
                     where, column, good ? "bytes after the end" : r.problem);
}

// Reads a text; `what` names it in messages (a path). The caller frees it with json_free; after a failure there is
// nothing to free.
static inline bool json_parse(Json* json, const char* text, size_t bytes, const char* what, Error* error) {
    return json_parse_kind(json, text, bytes, false, what, error);
}

// The same for what others have written: also takes what Python's json takes. Of members of one name the last counts,
// half a surrogate pair is U+FFFD, and NaN and Infinity are numbers.
static inline bool json_parse_as_python(Json* json, const char* text, size_t bytes, const char* what, Error* error) {
    return json_parse_kind(json, text, bytes, true, what, error);
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
// The name of a member; "" for anything else. A name with a zero byte in it (written \u0000) ends there.
static inline const char* json_key(const Json* json, uint32_t node) {
    return node == JSON_NONE || json->nodes[node].key_bytes == 0 ? "" : json->text + json->nodes[node].key;
}

// Values. If the node is absent, has another type or does not fit, they return false and leave the output as it was.
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

// An integer: exact, and only if it is written as such, without sign, point or exponent.
static inline bool json_u64(const Json* json, uint32_t node, uint64_t* value) {
    if (!json_is(json, node, JSON_NUMBER)) return false;
    const char* text = json->text + json->nodes[node].start;
    uint64_t sum = 0;
    for (size_t i = 0; i < json->nodes[node].bytes; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (sum > (UINT64_MAX - digit) / 10) return false;
        sum = sum * 10 + digit;
    }
    *value = sum;
    return true;
}

// Copies a string and a zero byte; also false if the string is longer than size - 1 or has a zero byte in it.
static inline bool json_string(const Json* json, uint32_t node, char* out, size_t size) {
    if (!json_is(json, node, JSON_STRING)) return false;
    const char* text = json->text + json->nodes[node].start;
    size_t bytes = json->nodes[node].bytes;
    if (bytes >= size || strlen(text) != bytes) return false;
    memcpy(out, text, bytes + 1);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Writer
//
// Begin with a writer that is all zero; set line_depth to N to start a line for each element of the N outer levels. A
// failed allocation is reported once, by json_write_done. The caller frees with json_writer_free.

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

// Writes the comma and line break before a value or a member.
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

// A text of `bytes` bytes, and a zero byte after it. Bytes that are not UTF-8 (a path may have some) become U+FFFD, so
// that the reader can read every text of the writer.
static inline void json_write_text(JsonWriter* w, const char* text, size_t bytes) {
    json_put_separator(w);
    json_put(w, "\"", 1);
    for (const char* end = text + bytes; text < end;) {
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

static inline void json_write_string(JsonWriter* w, const char* text) { json_write_text(w, text, strlen(text)); }

static inline void json_write_key(JsonWriter* w, const char* key) {
    json_write_string(w, key);
    json_put(w, ": ", 2);
    w->after_key = true;
}

// bracket: '{' or '[' at the beginning, '}' or ']' at the end.
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

// JSON has no NaN and no infinity: they become null.
static inline void json_write_number(JsonWriter* w, double value) {
    char text[40] = "null";
    if (isfinite(value)) real_text(text, sizeof text, value, 15);
    for (char* p = text; *p; p++) if (*p == ',') *p = '.';  // a locale's decimal comma
    json_write_raw(w, text);
}

// A member of an object: key and value.
static inline void json_member_begin(JsonWriter* w, const char* key, char bracket) {
    json_write_key(w, key);
    json_write_begin(w, bracket);
}
static inline void json_member_number(JsonWriter* w, const char* key, double value) {
    json_write_key(w, key);
    json_write_number(w, value);
}
static inline void json_member_u64(JsonWriter* w, const char* key, uint64_t value) {
    json_write_key(w, key);
    json_write_u64(w, value);
}
static inline void json_member_bool(JsonWriter* w, const char* key, bool value) {
    json_write_key(w, key);
    json_write_bool(w, value);
}
static inline void json_member_string(JsonWriter* w, const char* key, const char* value) {
    json_write_key(w, key);
    json_write_string(w, value);
}
static inline void json_member_hash(JsonWriter* w, const char* key, uint64_t hash) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    json_member_string(w, key, text);
}

// Whether a member that json_member_hash wrote equals a hash.
static inline bool json_hash_is(const Json* json, uint32_t node, uint64_t hash) {
    char expected[24] = "", found[24];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)hash);
    return json_string(json, node, expected, sizeof expected) && strcmp(found, expected) == 0;
}

static inline bool json_write_done(const JsonWriter* w, Error* error) {
    if (w->failed) return fail_with(error, "not enough memory to write %zu bytes of JSON; free some memory", w->bytes);
    if (w->depth != 0) return fail_with(error, "a JSON text of %zu bytes has open brackets; report this bug", w->bytes);
    return true;
}

#endif  // LLMTRAIN_JSON_H
