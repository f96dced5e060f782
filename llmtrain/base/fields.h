// fields.h: the members of a struct, as a table.
//
// A struct that a checkpoint saves (the configuration, the state of a run) has a table with a row per member. Writing,
// reading, comparing, printing and the command line use that table: a new member takes only its row:
//
//   static const Field FIELDS[] = {
//       FIELD_COUNT(Config, layers, "layers", 1, 1000, NULL, "transformer blocks"),
//   };
//   fields_write(&json_writer, FIELDS, 1, &config);                    json_fields.h
//   if (!fields_read(&config, FIELDS, 1, &json, node)) ...
//
// Members have the types of flags (flag_table.h): uint64_t or size_t, double, bool, an enum. A member that is added later is
// not in older files: `missing` in its row is the value that they imply, so that they can still be read.

#ifndef LLMTRAIN_FIELDS_H
#define LLMTRAIN_FIELDS_H

#include "flag_table.h"

#include <assert.h>

static_assert(sizeof(size_t) == sizeof(uint64_t), "a member that counts is 64 bits wide");

typedef struct {
    const char* name;     // in files
    const char* flag;     // on the command line and in messages
    FlagKind kind;        // all but KIND_TEXT
    size_t offset;        // of the member in its struct
    const char* choices;  // of KIND_CHOICE, KIND_SET; other kinds: the name of the value in the help
    double low, high;     // of the flag
    const char* help;     // NULL: there is no such flag
    const char* missing;  // the value that a file without the member implies, as text; NULL: it cannot be read
} Field;

// Rows of members that have a flag, or would if `help` were not NULL; files call them as the struct does.
#define FIELD_COUNT(Struct, member, flag, low, high, missing, help) \
    {#member, flag, KIND_COUNT, offsetof(Struct, member), "N", low, high, help, missing}
#define FIELD_REAL(Struct, member, flag, low, high, missing, help) \
    {#member, flag, KIND_REAL, offsetof(Struct, member), "X", low, high, help, missing}
#define FIELD_SWITCH(Struct, member, flag, missing, help) \
    {#member, flag, KIND_SWITCH, offsetof(Struct, member), "on|off", 0, 0, help, missing}
#define FIELD_CHOICE(Struct, member, flag, choices, missing, help) \
    {#member, flag, KIND_CHOICE, offsetof(Struct, member), choices, 0, 0, help, missing}
#define FIELD_SET(Struct, member, flag, choices, missing, help) \
    {#member, flag, KIND_SET, offsetof(Struct, member), choices, 0, 0, help, missing}
// Rows of members that are only in files, where they have a name of their own. flag: their name in messages.
#define FIELD_NAMED(Struct, member, kind, name, flag, missing) \
    {name, flag, kind, offsetof(Struct, member), NULL, 0, 0, NULL, missing}
#define FIELD_SAVED(Struct, member, kind, name, missing) FIELD_NAMED(Struct, member, kind, name, name, missing)

// The flag of a member of the struct at `base`, which it reads and writes.
static inline Flag field_flag(const Field* field, void* base) {
    Flag flag = {field->flag, field->kind, (char*)base + field->offset, field->choices, field->low, field->high,
                 field->help, 0};
    return flag;
}

static inline size_t field_bytes(FlagKind kind) {
    return kind == KIND_COUNT ? sizeof(uint64_t) : kind == KIND_REAL ? sizeof(double)
         : kind == KIND_SWITCH ? sizeof(bool) : sizeof(int);
}

// A member's value, as it is written after its flag.
static inline void field_text(char* text, size_t size, const Field* field, const void* base) {
    Flag flag = field_flag(field, (void*)(uintptr_t)base);
    flag_text(text, size, &flag);
}

// Appends the flags of the members that have one.
static inline void fields_flags(Flags* flags, const Field* fields, size_t count, void* base) {
    for (size_t i = 0; i < count; i++) {
        Flag flag = field_flag(&fields[i], base);
        if (fields[i].help) flags_append(flags, &flag, 1);
    }
}

#endif  // LLMTRAIN_FIELDS_H
