// fields.h: the members of a struct, as a table.
//
// A struct that a checkpoint saves (the configuration, the state of a run) has a table with a row per member. Writing,
// reading, comparing, printing and the command line use that table: a new member takes only its row:
//
//   static const Field FIELDS[] = {
//       {"layers", "layers", KIND_COUNT, offsetof(Config, layers), "N", 1, 1000, "blocks", NULL},
//   };
//   fields_write(&json_writer, FIELDS, 1, &config);
//   if (!fields_read(&config, FIELDS, 1, &json, node)) ...
//
// Members have the types of flags (flags.h): uint64_t or size_t, double, bool, an enum. A member that is added later is
// not in older files: `missing` in its row is the value that they imply, so that they can still be read.

#ifndef LLMTRAIN_FIELDS_H
#define LLMTRAIN_FIELDS_H

#include "flags.h"
#include "json.h"

#include <assert.h>

static_assert(sizeof(size_t) == sizeof(uint64_t), "a member that counts is 64 bits wide");

typedef struct {
    const char* name;     // in files
    const char* flag;     // on the command line and in messages
    FlagKind kind;        // all but KIND_TEXT
    size_t offset;        // of the member in its struct
    const char* choices;  // of KIND_CHOICE; other kinds: what the help calls the value
    double low, high;     // of the flag
    const char* help;     // NULL: there is no such flag
    const char* missing;  // the value that a file without the member implies, as text; NULL: it cannot be read
} Field;

#define FIELD_COUNT(Struct, member, flag, low, high, missing, help) \
    {#member, flag, KIND_COUNT, offsetof(Struct, member), "N", low, high, help, missing}
#define FIELD_REAL(Struct, member, flag, low, high, missing, help) \
    {#member, flag, KIND_REAL, offsetof(Struct, member), "X", low, high, help, missing}
#define FIELD_SWITCH(Struct, member, flag, missing, help) \
    {#member, flag, KIND_SWITCH, offsetof(Struct, member), "on|off", 0, 0, help, missing}
#define FIELD_CHOICE(Struct, member, flag, choices, missing, help) \
    {#member, flag, KIND_CHOICE, offsetof(Struct, member), choices, 0, 0, help, missing}

// The flag of a member of the struct at `base`, which it reads and writes.
static inline Flag field_flag(const Field* field, void* base) {
    Flag flag = {field->flag, field->kind, (char*)base + field->offset, field->choices, field->low, field->high,
                 field->help, 0};
    return flag;
}

static inline size_t field_bytes(FlagKind kind) {
    return kind == KIND_COUNT    ? sizeof(uint64_t)
           : kind == KIND_REAL   ? sizeof(double)
           : kind == KIND_SWITCH ? sizeof(bool)
                                 : sizeof(int);
}

// A member's value as one would write it after its flag.
static inline void field_text(char* text, size_t size, const Field* field, const void* base) {
    Flag flag = field_flag(field, (void*)(uintptr_t)base);
    flag_text(text, size, &flag);
}

// Appends the flags of the members that have one; returns the new number of flags.
static inline size_t fields_flags(Flag* flags, size_t count, const Field* fields, size_t field_count, void* base) {
    for (size_t i = 0; i < field_count; i++)
        if (fields[i].help) flags[count++] = field_flag(&fields[i], base);
    return count;
}

// Writes the members into the JSON object that is open.
static inline void fields_write(JsonWriter* w, const Field* fields, size_t count, const void* base) {
    for (size_t i = 0; i < count; i++) {
        char text[64];
        Flag flag = field_flag(&fields[i], (void*)(uintptr_t)base);
        field_text(text, sizeof text, &fields[i], base);
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
        char word[32];
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
        return fail_with(
            error, "%s belongs to another run: there --%s is %s, here it is %s; give the same flags, or another --%s",
            path, fields[i].flag, there, here, flag);
    }
    return true;
}

#endif  // LLMTRAIN_FIELDS_H
