// json_fields.h: members of a struct, by their table (fields.h): in JSON, fields_write and fields_read; compared with
// those of a file, fields_agree.

#ifndef LLMTRAIN_JSON_FIELDS_H
#define LLMTRAIN_JSON_FIELDS_H

#include "fields.h"
#include "flags.h"
#include "json.h"

// Writes the members into the JSON object that is open.
static inline void fields_write(JsonWriter* w, const Field* fields, size_t count, const void* base) {
    for (size_t i = 0; i < count; i++) {
        char text[64];
        Flag flag = field_flag(&fields[i], (void*)(uintptr_t)base);
        flag_text(text, sizeof text, &flag);
        if (flag.kind == KIND_COUNT) json_member_u64(w, fields[i].name, flag_value_count(&flag));
        else if (flag.kind == KIND_REAL) json_member_number(w, fields[i].name, *(double*)flag.value);
        else if (flag.kind == KIND_SWITCH) json_member_bool(w, fields[i].name, *(bool*)flag.value);
        else json_member_string(w, fields[i].name, text);
    }
}

// Keys that had another name in files of earlier versions.
static const struct {
    const char *name, *before;
} FIELDS_RENAMED[] = {{"master_weights", "masters"}, {"skipped_consecutive", "skipped_row"}};

// The value of a key, under the name that it has or had.
static inline uint32_t field_node(const Json* json, uint32_t object, const char* name) {
    uint32_t node = json_get(json, object, name);
    for (size_t i = 0; node == JSON_NONE && i < sizeof FIELDS_RENAMED / sizeof *FIELDS_RENAMED; i++)
        if (strcmp(FIELDS_RENAMED[i].name, name) == 0) node = json_get(json, object, FIELDS_RENAMED[i].before);
    return node;
}

// Reads the members from a JSON object; false if one is missing and has no value for that, or is of another kind.
static inline bool fields_read(void* base, const Field* fields, size_t count, const Json* json, uint32_t object) {
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        Flag flag = field_flag(&fields[i], base);
        uint32_t node = field_node(json, object, fields[i].name);
        uint64_t number = 0;
        char word[64];
        Error ignored;
        if (node == JSON_NONE && fields[i].missing) {
            flag.low = -INFINITY;
            flag.high = INFINITY;
            ok = flag_set(&flag, fields[i].missing, &ignored);
        } else if (flag.kind == KIND_COUNT) {
            ok = json_u64(json, node, &number);
            memcpy(flag.value, &number, sizeof number);
        } else if (flag.kind == KIND_REAL) {
            ok = json_number(json, node, (double*)flag.value);
        } else if (flag.kind == KIND_SWITCH) {
            ok = json_bool(json, node, (bool*)flag.value);
        } else {
            ok = json_string(json, node, word, sizeof word) && flag_set(&flag, word, &ignored);
        }
    }
    return ok;
}

// Whether two structs have the same members; if not, the error names the first that differs. `saved` is from the file
// at `path`, which --`flag` names.
static inline bool fields_agree(const Field* fields, size_t count, const void* saved, const void* asked,
                                const char* flag, const char* path, Error* error) {
    for (size_t i = 0; i < count; i++) {
        char there[64], here[64];
        size_t offset = fields[i].offset, bytes = field_bytes(fields[i].kind);
        if (memcmp((const char*)saved + offset, (const char*)asked + offset, bytes) == 0) continue;
        field_text(there, sizeof there, &fields[i], saved);
        field_text(here, sizeof here, &fields[i], asked);
        bool model = strcmp(flag, "init-from") == 0;  // perhaps of another program
        return fail_with(error, "%s %s: there --%s is %s, here it is %s; give the same flags, or another --%s", path,
                         model ? "holds another model" : "belongs to another run", fields[i].flag, there, here, flag);
    }
    return true;
}

#endif  // LLMTRAIN_JSON_FIELDS_H
