// flag_table.h: command-line flags as a table: name, kind, where the value goes, bounds, and a line of help.
//
//   Flag rows[] = {FLAG_COUNT("steps", &steps, 1000, 0, 1e12, 0, "steps to train for")};
//   flags_append(&flags, rows, 1);
//
// flags.h reads the command line by such a table; a checkpoint records the values as text (flag_text).

#ifndef LLMTRAIN_FLAG_TABLE_H
#define LLMTRAIN_FLAG_TABLE_H

#include "../ops/base.h"

#include <assert.h>

typedef enum {
    KIND_TEXT,    // const char*
    KIND_COUNT,   // uint64_t
    KIND_REAL,    // double
    KIND_SWITCH,  // bool
    KIND_CHOICE,  // an enum, or int: position in `choices`, which are separated by |
    KIND_SET,     // int: a bit for each of `choices` that is given, separated by commas; all: 0
    KIND_TEXTS    // TextList: the flag may be given several times
} FlagKind;

enum { TEXT_LIST_MAX = 16 };
typedef struct {
    const char* texts[TEXT_LIST_MAX];
    size_t count;
} TextList;

// How a flag affects a run that is resumed, and whether it was given. 0: the flag changes the results of the run, so a
// checkpoint records it and a resume reports a difference.
enum {
    FLAG_GIVEN = 1,            // set by the parser
    FLAG_FREE = 2,             // a resume does not compare it: it changes no result, or a hash is compared (--data)
    FLAG_LOCAL = 4 | FLAG_FREE,// and the ranks of a run may differ in it
    FLAG_FIXED = 8             // a run that is resumed with another value is refused: it would be another run
};

typedef struct Flag {
    const char* name;     // without the dashes; NULL: a heading of the help, whose text is in `help`
    FlagKind kind;
    void* value;          // holds the default before parsing
    const char* choices;  // KIND_CHOICE, KIND_SET: "cosine|linear"; other kinds: the name of the value in the help
    double low, high;     // KIND_COUNT, KIND_REAL: bounds, both allowed
    const char* help;
    unsigned marks;       // FLAG_FREE, FLAG_LOCAL, FLAG_FIXED or none; FLAG_GIVEN
} Flag;

// The flags of a program, put together from the tables of its parts.
enum { FLAGS_MAX = 160 };
typedef struct {
    Flag rows[FLAGS_MAX];
    size_t count; char** arguments;  // of the program, if they were parsed: its name first, NULL last
} Flags;

// Rows of a table that is built at run time: each sets the default and says where the value goes.
#define FLAG_ROW(name, kind, value, initial, what, low, high, marks, help) \
    {name, kind, (*(value) = (initial), (value)), what, low, high, help, marks}
#define FLAG_HEADING(text) {NULL, KIND_TEXT, NULL, NULL, 0, 0, text, 0}
#define FLAG_TEXT(name, value, initial, what, marks, help) \
    FLAG_ROW(name, KIND_TEXT, value, initial, what, 0, 0, marks, help)
#define FLAG_COUNT(name, value, initial, low, high, marks, help) \
    FLAG_ROW(name, KIND_COUNT, value, initial, "N", low, high, marks, help)
#define FLAG_REAL(name, value, initial, low, high, marks, help) \
    FLAG_ROW(name, KIND_REAL, value, initial, "X", low, high, marks, help)
#define FLAG_SWITCH(name, value, initial, marks, help) \
    FLAG_ROW(name, KIND_SWITCH, value, initial, "on|off", 0, 0, marks, help)
#define FLAG_CHOICE(name, value, initial, choices, marks, help) \
    FLAG_ROW(name, KIND_CHOICE, value, initial, choices, 0, 0, marks, help)

static inline void flags_append(Flags* flags, const Flag* rows, size_t count) {
    assert(flags->count + count <= FLAGS_MAX);
    memcpy(flags->rows + flags->count, rows, count * sizeof(Flag));
    flags->count += count;
}

static inline Flag* flag_find(Flags* flags, const char* name) {
    for (size_t i = 0; i < flags->count; i++)
        if (flags->rows[i].name != NULL && strcmp(flags->rows[i].name, name) == 0) return &flags->rows[i];
    return NULL;
}

static inline bool flag_was_given(Flags* flags, const char* name) {
    Flag* flag = flag_find(flags, name);
    return flag != NULL && (flag->marks & FLAG_GIVEN);
}

// The position of the word in `choices`, -1 if it is not there.
static inline int choice_find(const char* choices, const char* word) {
    size_t length = strlen(word);
    for (int position = 0;; position++) {
        size_t end = strcspn(choices, "|");
        if (length == end && strncmp(choices, word, length) == 0) return position;
        if (choices[end] == 0) return -1;
        choices += end + 1;
    }
}

// Copies the word at `position` of choices into text.
static inline void choice_name(const char* choices, int position, char* text, size_t size) {
    for (; position > 0; position--) choices += strcspn(choices, "|") + 1;
    snprintf(text, size, "%.*s", (int)strcspn(choices, "|"), choices);
}

// The words of a set, separated by commas.
static inline void set_text(char* text, size_t size, const char* choices, int set) {
    size_t used = 0;
    snprintf(text, size, "all");
    for (int i = 0; set >> i != 0; i++) {
        char word[32];
        if (!(set >> i & 1)) continue;
        choice_name(choices, i, word, sizeof word);
        if (used < size) used += (size_t)snprintf(text + used, size - used, "%s%s", used ? "," : "", word);
    }
}

// False: a word is not one of `choices`.
static inline bool set_parse(int* set, const char* choices, const char* text) {
    for (*set = 0; strcmp(text, "all") != 0; text++) {
        char word[32];
        size_t length = strcspn(text, ",");
        snprintf(word, sizeof word, "%.*s", (int)length, text);
        int position = choice_find(choices, word);
        if (position < 0 || length >= sizeof word) return false;
        *set |= 1 << position;
        text += length;
        if (*text == 0) break;
    }
    return true;
}

static inline uint64_t flag_value_count(const Flag* flag) {
    uint64_t count;
    memcpy(&count, flag->value, sizeof count);
    return count;
}

static inline void text_list_join(char* text, size_t size, const TextList* list) {
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < list->count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? " " : "", list->texts[i]);
}

// The value of a flag, as it is written on the command line.
static inline void flag_text(char* text, size_t size, const Flag* flag) {
    const char* words = flag->kind == KIND_TEXT ? *(const char**)flag->value : NULL;
    if (flag->kind == KIND_TEXT) snprintf(text, size, "%s", words ? words : "");
    else if (flag->kind == KIND_TEXTS) text_list_join(text, size, (const TextList*)flag->value);
    else if (flag->kind == KIND_COUNT) snprintf(text, size, "%llu", (unsigned long long)flag_value_count(flag));
    else if (flag->kind == KIND_REAL) real_text(text, size, *(double*)flag->value, 6);
    else if (flag->kind == KIND_SWITCH) snprintf(text, size, "%s", *(bool*)flag->value ? "on" : "off");
    else {
        int position;
        memcpy(&position, flag->value, sizeof position);
        if (flag->kind == KIND_SET) set_text(text, size, flag->choices, position);
        else choice_name(flag->choices, position, text, size);
    }
}

#endif  // LLMTRAIN_FLAG_TABLE_H
