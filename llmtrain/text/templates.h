// templates.h: chat templates: turn messages into a text of the form that a model was trained on.
//
//   ChatMessage messages[] = {{"system", "Be brief.", 0}, {"user", "Who wrote Emma?", 0}};
//   char* text;
//   if (template_render(&text, &bytes, tokenizer.chat_template, messages, 2, "<s>", "</s>", true, &error)) ...
//   free(text);
//
// A template is a program in Jinja. This runs the part of it that published templates use, as Hugging Face's
// apply_chat_template does (trim_blocks and lstrip_blocks on):
//
//   statements   if elif else endif, set, set ... endset, macro, comments, generation (template_render_spans says where
//                its text is),
//                for x in list [if ...] with break, continue and loop.first, last, index, index0, revindex, revindex0,
//                length, previtem, nextitem
//   values       strings, whole numbers, true, false, none, lists ([...], (...), split), messages, namespace(...)
//   operators    + - * // % ~  == != < > <= >=  in, not in, and or not, a if b else c, x.y, x['y'], x[1], x[1:],
//                x[::-1]
//   filters      trim, length, count, upper, lower, title, capitalize, string, replace, first, last, list, reverse,
//                join(text), default(value[, true]), map(filter or attribute=name), select, reject, selectattr,
//                rejectattr, tojson
//   methods      strip, lstrip, rstrip, split, startswith, endswith, upper, lower, title, capitalize, replace, join,
//                get
//   tests        defined, undefined, none, string, true, false, boolean, number, integer, mapping, iterable, sequence,
//                even, odd, divisibleby, eq, equalto, ne, in; not
//   functions    raise_exception(text), namespace(name=value), strftime_now(format), range(...)
//
// What is missing (dictionaries, call, include, a macro within a loop, macro or block, ...) is refused by name when it
// is reached, so that a template with a branch for tools works in a chat without tools; an unknown statement is refused
// at once. As in Jinja, what map, select, reject, selectattr, rejectattr and reverse give is always true and has no
// length or index until |list makes a list of it; going through it twice is refused. Memory, steps and depth are
// bounded.
//
//   1. values     and the memory that they live in
//   2. nodes      a template cut into text and tags
//   3. terms      literals, names, members, methods, filters, tests
//   4. operators
//   5. running

#ifndef LLMTRAIN_TEMPLATES_H
#define LLMTRAIN_TEMPLATES_H

#include "unicode.h"

#include <time.h>

typedef struct {
    const char *role, *content;
    size_t bytes;                       // of the content, which may have zero bytes; 0: up to the first of them
} ChatMessage;

// Where the texts between {% generation %} and {% endgeneration %} are in the text of a conversation. {0}: none.
typedef struct {
    struct { size_t first, end; } *list;  // (count), owned; bytes
    size_t count, capacity;
} TemplateSpans;

// ------------------------------------------------------------------------------------------------
// 1. Values

typedef enum {
    VALUE_UNDEFINED, VALUE_NONE, VALUE_BOOL, VALUE_NUMBER, VALUE_STRING, VALUE_LIST, VALUE_MESSAGE, VALUE_LOOP,
    VALUE_NAMESPACE, VALUE_FUNCTION, VALUE_MACRO
} ValueKind;

typedef struct TemplateValue {
    ValueKind kind;
    int64_t number;                     // of a bool 0 or 1; of a loop its index from 0; of a namespace its number; of
                                        // a macro its node
    const char* text;                   // of a string, (count) bytes
    const struct TemplateValue* items;  // of a list, and of the one of a loop, (count)
    const ChatMessage* message;
    size_t count;                       // of a loop: its length
    bool* taken;                        // of a list that can be gone through once: whether it has been; else NULL
} TemplateValue;

typedef struct {
    TemplateValue name;                 // a string in the source
    int64_t owner;                      // the namespace that it is a member of; -1: a variable
    TemplateValue value;
} TemplateVariable;

typedef struct TemplateBlock {
    struct TemplateBlock* next;
} TemplateBlock;

typedef enum {
    NODE_TEXT, NODE_OUTPUT, NODE_IF, NODE_ELIF, NODE_ELSE, NODE_ENDIF, NODE_FOR, NODE_ENDFOR, NODE_MACRO, NODE_ENDMACRO,
    NODE_GENERATION, NODE_ENDGENERATION, NODE_BREAK, NODE_CONTINUE, NODE_ENDSET, NODE_SET, NODE_SET_BLOCK
} NodeKind;

typedef struct {
    NodeKind kind;
    const char *start, *end;            // its text, or its code without the keyword
    size_t next;                        // of IF, ELIF, ELSE: the next branch or ENDIF; of what has an end: the end
} TemplateNode;

enum {
    TEMPLATE_NODES = 4096, TEMPLATE_VARIABLES = 256, TEMPLATE_DEPTH = 48, TEMPLATE_STEPS = 1 << 20,
    TEMPLATE_MEMORY = 64 << 20
};

typedef struct {
    TemplateNode nodes[TEMPLATE_NODES];
    size_t node_count;
    TemplateVariable variables[TEMPLATE_VARIABLES];
    size_t variable_count, scope;       // scope: the first variable of the innermost loop, macro or block
    size_t top, hidden;                 // variables `top` to hidden - 1 are those around the call of a macro
    NodeKind leaving;                   // NODE_BREAK, NODE_CONTINUE: the rest of the loop's body is left out
    int64_t namespaces;
    TemplateBlock* blocks;              // memory of values
    size_t memory, steps, depth;
    char* out;                          // (out_bytes) what has been written
    size_t out_bytes, out_capacity;
    TemplateSpans* spans;               // NULL: they are not asked for
    const char *at, *end;               // the code being evaluated
    bool skipping;                      // it is parsed, but its value is not needed
    bool failed;
    Error* error;
} Template;

// The first failure is the one that is reported.
__attribute__((format(printf, 2, 3))) static inline bool template_fail(Template* t, const char* format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!t->failed) fail_with(t->error, "the chat template %s", text);
    t->failed = true;
    return false;
}

static inline void* template_allocate(Template* t, size_t bytes) {
    t->memory += bytes + sizeof(TemplateBlock);
    TemplateBlock* block = bytes < TEMPLATE_MEMORY && t->memory < TEMPLATE_MEMORY
                               ? (TemplateBlock*)memory_allocate(sizeof(TemplateBlock) + bytes) : NULL;
    if (!block) {
        template_fail(t, "needs more than %d MB of memory; shorten the conversation", TEMPLATE_MEMORY >> 20);
        return NULL;
    }
    block->next = t->blocks;
    t->blocks = block;
    return block + 1;
}

static inline TemplateValue value_of(ValueKind kind, int64_t number) {
    TemplateValue v = {.kind = kind, .number = number};
    return v;
}
static inline TemplateValue value_bool(bool b) { return value_of(VALUE_BOOL, b); }

static inline TemplateValue value_text(const char* text, size_t bytes) {
    TemplateValue v = {.kind = VALUE_STRING, .text = text, .count = bytes};
    return v;
}
static inline TemplateValue value_word(const char* text) { return value_text(text, strlen(text)); }

// A list with room for count values, at *items; empty after a failure.
static inline TemplateValue value_list(Template* t, TemplateValue** items, size_t count) {
    *items = (TemplateValue*)template_allocate(t, max_size(count, 1) * sizeof(TemplateValue));
    TemplateValue v = {.kind = VALUE_LIST, .items = *items, .count = *items ? count : 0};
    return v;
}

static inline bool text_equal(TemplateValue a, TemplateValue b) {
    return a.count == b.count && memcmp(a.text, b.text, a.count) == 0;
}

static inline bool value_is(TemplateValue v, const char* text) {
    return v.kind == VALUE_STRING && text_equal(v, value_word(text));
}

static inline bool value_numeric(TemplateValue v) { return v.kind == VALUE_BOOL || v.kind == VALUE_NUMBER; }

static inline bool value_true(TemplateValue v) {
    if (value_numeric(v)) return v.number != 0;
    if (v.kind == VALUE_STRING || v.kind == VALUE_LIST) return v.count > 0 || v.taken;
    return v.kind != VALUE_UNDEFINED && v.kind != VALUE_NONE;
}

static inline bool template_step(Template* t) {
    return ++t->steps <= TEMPLATE_STEPS || template_fail(t, "takes too many steps");
}

// Enters a list in a list; t->depth is to be decremented afterwards.
static inline bool template_deeper(Template* t) {
    return ++t->depth <= TEMPLATE_DEPTH || template_fail(t, "nests more than %d lists", TEMPLATE_DEPTH);
}

static inline bool value_equal(Template* t, TemplateValue a, TemplateValue b) {
    if (!template_step(t)) return false;
    if (value_numeric(a) && value_numeric(b)) return a.number == b.number;
    if (a.kind != b.kind) return false;
    if (a.kind == VALUE_STRING) return text_equal(a, b);
    if (a.kind != VALUE_LIST) return a.number == b.number && a.message == b.message;
    if (a.taken || b.taken) return a.taken == b.taken;
    bool equal = template_deeper(t) && a.count == b.count;
    for (size_t i = 0; equal && i < a.count; i++) equal = value_equal(t, a.items[i], b.items[i]);
    t->depth--;
    return equal;
}

// A list as one that can be gone through once.
static inline TemplateValue value_once(Template* t, TemplateValue list) {
    list.taken = (bool*)template_allocate(t, sizeof(bool));
    return list;
}

// A list that is about to be gone through.
static inline TemplateValue value_taken(Template* t, TemplateValue list) {
    if (list.taken && *list.taken)
        template_fail(t, "goes twice through what a filter gives, which is not supported; |list should follow it");
    if (list.taken) *list.taken = true;
    list.taken = NULL;
    return list;
}

// As Python prints it.
static inline TemplateValue value_string(Template* t, TemplateValue v) {
    if (v.kind == VALUE_STRING) return v;
    if (v.kind == VALUE_UNDEFINED) return value_text("", 0);
    if (v.kind == VALUE_NONE) return value_word("None");
    if (v.kind == VALUE_BOOL) return value_word(v.number ? "True" : "False");
    if (v.kind != VALUE_NUMBER) {
        template_fail(t, "prints a list or a message, which is not supported");
        return value_text("", 0);
    }
    char* text = (char*)template_allocate(t, 24);
    return text ? value_text(text, (size_t)snprintf(text, 24, "%lld", (long long)v.number)) : value_text("", 0);
}

static inline TemplateValue value_joined(Template* t, TemplateValue a, TemplateValue b) {
    char* text = (char*)template_allocate(t, a.count + b.count + 1);
    if (!text) return a;
    memcpy(text, a.text, a.count);
    memcpy(text + a.count, b.text, b.count);
    return value_text(text, a.count + b.count);
}

// Where `part` first occurs in `text` from byte `from` on, SIZE_MAX if it does not.
static inline size_t text_find(TemplateValue text, TemplateValue part, size_t from) {
    for (size_t i = from; i + part.count <= text.count; i++)
        if (memcmp(text.text + i, part.text, part.count) == 0) return i;
    return SIZE_MAX;
}

// The bytes of the first character of a text, or of the last, if it is one of `marks`, or white space where that is
// NULL; 0 if it is not.
static inline size_t template_mark(TemplateValue v, bool at_end, const TemplateValue* marks) {
    if (marks) return v.count > 0 && memchr(marks->text, v.text[at_end ? v.count - 1 : 0], marks->count);
    return at_end ? utf8_space_before(v.text + v.count, v.count) : utf8_space(v.text, v.count);
}

static inline TemplateValue template_strip(Template* t, TemplateValue v, bool left, bool right,
                                           const TemplateValue* marks) {
    size_t n;
    for (size_t i = 0; marks && i < marks->count; i++)
        if ((unsigned char)marks->text[i] >= 0x80)
            template_fail(t, "strips letters outside ASCII, which is not supported");
    for (; left && (n = template_mark(v, false, marks)) > 0; v.count -= n) v.text += n;
    while (right && (n = template_mark(v, true, marks)) > 0) v.count -= n;
    return v;
}

// ------------------------------------------------------------------------------------------------
// 2. Nodes

static inline bool code_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static inline bool code_letter(char c) {
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static inline void code_skip(Template* t) {
    while (t->at < t->end && code_space(*t->at)) t->at++;
}

// Consumes the word that comes next; empty if there is none.
static inline TemplateValue code_word(Template* t) {
    code_skip(t);
    const char* start = t->at;
    while (t->at < t->end && code_letter(*t->at)) t->at++;
    return value_text(start, (size_t)(t->at - start));
}

// The index of a word in a list of names separated by |; -1: it is not in it.
static inline int word_among(TemplateValue word, const char* names) {
    for (size_t length, i = 0; names[0]; names += length + (names[length] == '|'), i++) {
        length = strcspn(names, "|");
        if (length == word.count && memcmp(names, word.text, length) == 0) return (int)i;
    }
    return -1;
}

static inline TemplateValue template_undefined(Template* t, const char* what, TemplateValue name) {
    if (!t->skipping)
        template_fail(t, "uses %s '%.*s', which is not supported", what, (int)min_size(name.count, 40), name.text);
    return value_of(VALUE_UNDEFINED, 0);
}

static inline TemplateValue node_text(const TemplateNode* node) {
    return value_text(node->start, (size_t)(node->end - node->start));
}

static inline bool template_node(Template* t, NodeKind kind, const char* start, const char* end) {
    if (kind == NODE_TEXT && start >= end) return true;
    if (t->node_count == TEMPLATE_NODES) return template_fail(t, "has more than %d tags", TEMPLATE_NODES);
    TemplateNode* node = &t->nodes[t->node_count++];
    node->kind = kind;
    node->start = start;
    node->end = end;
    return true;
}

static inline bool template_statement(Template* t, const char* start, const char* end) {
    t->at = start;
    t->end = end;
    TemplateValue word = code_word(t);
    int kind = word_among(word, "if|elif|else|endif|for|endfor|macro|endmacro|generation|endgeneration|break|continue|"
                                "endset|set");
    if (kind + NODE_IF == NODE_SET && !memchr(t->at, '=', (size_t)(end - t->at))) kind = NODE_SET_BLOCK - NODE_IF;
    if (kind >= 0) return template_node(t, (NodeKind)(NODE_IF + kind), t->at, end);
    template_undefined(t, "the statement", word);
    return false;
}

// Where the tag that begins at p ends (the position of its closing mark), skipping strings; NULL: it does not end.
static inline const char* template_tag_end(const char* p, const char* end, char kind) {
    char quote = 0;
    for (p += 2; p + 1 < end; p++) {
        if (quote) {
            if (*p == '\\') p++;
            else if (*p == quote) quote = 0;
        } else if (kind != '#' && (*p == '\'' || *p == '"')) quote = *p;
        else if (p[0] == (kind == '{' ? '}' : kind) && p[1] == '}') return p;
    }
    return NULL;
}

// Cuts the source into nodes. White space around a tag is removed as in Jinja: with -, all of it; before a statement,
// back to the beginning of the line; after a statement, one line break.
static inline bool template_cut(Template* t, const char* source, size_t bytes) {
    const char *p = source, *end = source + bytes, *text = source;
    if (bytes > 0 && end[-1] == '\n') end--;
    while (p < end) {
        bool tag = p + 1 < end && p[0] == '{' && (p[1] == '{' || p[1] == '%' || p[1] == '#');
        if (!tag) {
            p++;
            continue;
        }
        char kind = p[1];
        const char *close = template_tag_end(p, end, kind), *until = p, *inner = p + 2;
        if (!close) return template_fail(t, "has a tag that does not end: %.40s", p);
        const char* inner_end = close;
        bool plus = *inner == '+' && inner < close, minus = *inner == '-' && inner < close;
        bool cuts = inner_end > inner + minus && inner_end[-1] == '-';
        bool keeps = inner_end > inner + plus && inner_end[-1] == '+';
        if (minus) {
            until = text + template_strip(t, value_text(text, (size_t)(until - text)), false, true, NULL).count;
        } else if (kind != '{' && !plus) {
            const char* line = until;
            while (line > text && line[-1] != '\n') line--;
            TemplateValue rest = template_strip(t, value_text(line, (size_t)(until - line)), false, true, NULL);
            if (rest.count == 0 && (line == source || line[-1] == '\n')) until = line;
        }
        if (!template_node(t, NODE_TEXT, text, until)) return false;
        if (minus || plus) inner++;
        if (inner_end > inner && (cuts || keeps)) inner_end--;
        if (kind == '{' && !template_node(t, NODE_OUTPUT, inner, inner_end)) return false;
        if (kind == '%' && !template_statement(t, inner, inner_end)) return false;
        p = close + 2;
        if (cuts) p = template_strip(t, value_text(p, (size_t)(end - p)), true, false, NULL).text;
        else if (kind != '{' && !keeps && p < end && *p == '\n') p++;
        text = p;
    }
    return template_node(t, NODE_TEXT, text, end);
}

// Finds the branches of each if, and the end of each for, macro, generation and set.
static inline bool template_match(Template* t) {
    size_t open[TEMPLATE_DEPTH], depth = 0;
    for (size_t i = 0; i < t->node_count; i++) {
        NodeKind kind = t->nodes[i].kind;
        bool branch = kind == NODE_ELIF || kind == NODE_ELSE || kind == NODE_ENDIF, inside = false;
        NodeKind begins = kind == NODE_ENDFOR ? NODE_FOR : kind == NODE_ENDMACRO ? NODE_MACRO
                        : kind == NODE_ENDGENERATION ? NODE_GENERATION
                        : kind == NODE_ENDSET ? NODE_SET_BLOCK : NODE_TEXT;
        if (begins != NODE_TEXT || branch) {
            NodeKind begun = depth ? t->nodes[open[depth - 1]].kind : NODE_TEXT;
            if (begun == NODE_FOR && kind == NODE_ELSE)
                return template_fail(t, "uses 'else' of a for, which is not supported");
            if (!branch ? begun != begins : begun != NODE_IF && begun != NODE_ELIF &&
                                                !(begun == NODE_ELSE && kind == NODE_ENDIF))
                return template_fail(t, "has an elif, else or end without its beginning");
            t->nodes[open[--depth]].next = i;
        }
        for (size_t d = 0; d < depth; d++) {
            NodeKind around = t->nodes[open[d]].kind;
            inside = around == NODE_FOR || (inside && around != NODE_MACRO && around != NODE_GENERATION);
        }
        if ((kind == NODE_BREAK || kind == NODE_CONTINUE) && !inside)
            return template_fail(t, "has a break or continue outside a for");
        if (kind == NODE_IF || kind == NODE_FOR || kind == NODE_ELIF || kind == NODE_ELSE || kind == NODE_MACRO ||
            kind == NODE_GENERATION || kind == NODE_SET_BLOCK) {
            if (depth == TEMPLATE_DEPTH) return template_fail(t, "nests more than %d statements", TEMPLATE_DEPTH);
            open[depth++] = i;
        }
    }
    return depth == 0 || template_fail(t, "has an if, for, macro, generation or set that does not end");
}

// ------------------------------------------------------------------------------------------------
// 3. Terms
//
// Expressions are evaluated as they are parsed, from t->at on. Where `skipping` is set, their values are ignored, and
// unknown names in them are not failures.

static inline TemplateValue template_expression(Template* t);
static inline TemplateValue template_unary(Template* t);
static inline TemplateValue template_postfix(Template* t);
static inline TemplateValue template_macro(Template* t, int64_t node, TemplateValue name);
static inline bool template_contains(Template* t, TemplateValue in, TemplateValue what);

static inline bool code_take(Template* t, const char* mark) {
    size_t length = strlen(mark);
    code_skip(t);
    if ((size_t)(t->end - t->at) < length || memcmp(t->at, mark, length) != 0) return false;
    t->at += length;
    return true;
}

static inline bool code_take_word(Template* t, const char* word) {
    const char* start = t->at;
    bool taken = value_is(code_word(t), word);
    if (!taken) t->at = start;
    return taken;
}

static inline void code_need(Template* t, const char* mark) {
    if (!code_take(t, mark))
        template_fail(t, "lacks '%s' before '%.*s'", mark, (int)min_size((size_t)(t->end - t->at), 40), t->at);
}

static inline TemplateValue template_string(Template* t) {
    char quote = *t->at++;
    const char* start = t->at;
    size_t bytes = 0;
    while (t->at < t->end && *t->at != quote) t->at += *t->at == '\\' && t->at + 1 < t->end ? 2 : 1;
    if (t->at >= t->end) {
        template_fail(t, "has a string that does not end: %.*s", (int)min_size((size_t)(t->end - start), 40), start);
        return value_text("", 0);
    }
    char* text = (char*)template_allocate(t, (size_t)(t->at - start) + 1);
    if (!text) return value_text("", 0);
    for (const char* p = start; p < t->at; p++) {
        char c = *p;
        if (c == '\\') {
            static const char from[] = "ntr\\'\"", to[] = "\n\t\r\\'\"";
            const char* known = strchr(from, *++p);
            if (!known || *p == 0) {
                template_undefined(t, "the escape", value_text(p - 1, 2));
                break;
            }
            c = to[known - from];
        }
        text[bytes++] = c;
    }
    t->at++;
    return value_text(text, bytes);
}

// A variable, or a member of a namespace.
static inline TemplateVariable* template_find(Template* t, TemplateValue name, int64_t owner) {
    for (size_t i = t->variable_count; i-- > 0;)
        if (t->variables[i].owner == owner && (owner >= 0 || i < t->top || i >= t->hidden) &&
            text_equal(t->variables[i].name, name)) return &t->variables[i];
    return NULL;
}

// Sets a variable of the current scope, or a member of a namespace.
static inline void template_set(Template* t, TemplateValue name, int64_t owner, TemplateValue value) {
    TemplateVariable *v = template_find(t, name, owner), fresh = {name, owner, value};
    if (v && (owner >= 0 || v >= t->variables + t->scope)) v->value = value;
    else if (t->variable_count < TEMPLATE_VARIABLES) t->variables[t->variable_count++] = fresh;
    else template_fail(t, "sets more than %d variables", TEMPLATE_VARIABLES);
}

static inline TemplateValue template_member(Template* t, TemplateValue of, TemplateValue name) {
    TemplateValue none = value_of(VALUE_UNDEFINED, 0);
    if (t->skipping) return none;
    if (of.kind == VALUE_MESSAGE && value_is(name, "role")) return value_word(of.message->role);
    if (of.kind == VALUE_MESSAGE && value_is(name, "content"))
        return of.message->bytes ? value_text(of.message->content, of.message->bytes) : value_word(of.message->content);
    if (of.kind == VALUE_NAMESPACE) {
        TemplateVariable* v = template_find(t, name, of.number);
        return v ? v->value : none;
    }
    if (of.kind == VALUE_LOOP) {
        if (value_is(name, "first")) return value_bool(of.number == 0);
        if (value_is(name, "last")) return value_bool((size_t)of.number + 1 == of.count);
        if (value_is(name, "index0")) return value_of(VALUE_NUMBER, of.number);
        if (value_is(name, "index")) return value_of(VALUE_NUMBER, of.number + 1);
        if (value_is(name, "length")) return value_of(VALUE_NUMBER, (int64_t)of.count);
        if (value_is(name, "revindex0")) return value_of(VALUE_NUMBER, (int64_t)of.count - of.number - 1);
        if (value_is(name, "revindex")) return value_of(VALUE_NUMBER, (int64_t)of.count - of.number);
        if (value_is(name, "previtem")) return of.number > 0 ? of.items[of.number - 1] : none;
        if (value_is(name, "nextitem")) return (size_t)of.number + 1 < of.count ? of.items[of.number + 1] : none;
        return template_undefined(t, "the member of loop", name);
    }
    if (of.kind == VALUE_UNDEFINED || of.kind == VALUE_NONE)
        template_fail(t, "asks for '%.*s' of something undefined", (int)min_size(name.count, 40), name.text);
    return none;
}

// The parts of a text between the first `most` marks.
static inline TemplateValue template_split(Template* t, TemplateValue text, TemplateValue mark, size_t most) {
    size_t count = 1, from = 0;
    for (size_t at; count <= most && (at = text_find(text, mark, from)) != SIZE_MAX; from = at + mark.count) count++;
    TemplateValue* items;
    TemplateValue list = value_list(t, &items, count);
    from = 0;
    for (size_t i = 0; i < list.count; i++) {
        size_t at = i < most ? text_find(text, mark, from) : SIZE_MAX, end = at == SIZE_MAX ? text.count : at;
        items[i] = value_text(text.text + from, end - from);
        from = end + mark.count;
    }
    return list;
}

// The values of a list as strings, with a text between them.
static inline TemplateValue template_join(Template* t, TemplateValue list, TemplateValue between) {
    TemplateValue* parts;
    size_t bytes = 0, count = value_list(t, &parts, list.count).count;
    for (size_t i = 0; i < count; i++) {
        parts[i] = value_string(t, list.items[i]);
        bytes += parts[i].count + (i ? between.count : 0);
    }
    char *all = (char*)template_allocate(t, bytes + 1), *end = all;
    if (!all) return value_text("", 0);
    for (size_t i = 0; i < count; i++) {
        if (i) memcpy(end, between.text, between.count), end += between.count;
        memcpy(end, parts[i].text, parts[i].count);
        end += parts[i].count;
    }
    return value_text(all, bytes);
}

// WORDS: the first letter after anything that is no letter, as Python's title; TITLE: after a space, - or a bracket, as
// Jinja's filter title.
typedef enum { CASE_LOWER, CASE_UPPER, CASE_FIRST, CASE_WORDS, CASE_TITLE } TemplateCase;

static inline TemplateValue template_case(Template* t, TemplateValue text, TemplateCase how) {
    static const char breaks[] = "-({[< \t\n\v\f\r\x1C\x1D\x1E\x1F";
    char* copy = (char*)template_allocate(t, text.count + 1);
    for (size_t i = 0; copy && i < text.count; i++) {
        char before = i ? text.text[i - 1] : ' ', folded = (char)(before | 32);
        bool upper = how == CASE_UPPER || (how != CASE_LOWER && i == 0) ||
                     (how == CASE_WORDS && (folded < 'a' || folded > 'z')) ||
                     (how == CASE_TITLE && memchr(breaks, before, sizeof breaks - 1));
        char c = text.text[i];
        if ((unsigned char)c >= 0x80) {
            template_fail(t, "changes the case of letters outside ASCII, which is not supported");
            break;
        }
        copy[i] = upper && c >= 'a' && c <= 'z' ? (char)(c - 32) : !upper && c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
    }
    return copy ? value_text(copy, text.count) : text;
}

enum { TEMPLATE_ARGUMENTS = 16 };

// The values between brackets, the first of which has been consumed already, up to the bracket `close`. names: receives
// their names, which may be given, and are empty where they are not; NULL: they may not.
static inline size_t template_arguments(Template* t, const char* close, TemplateValue* arguments,
                                        TemplateValue* names) {
    size_t count = 0;
    while (!t->failed && !code_take(t, close)) {
        const char* start = t->at;
        TemplateValue name = code_word(t);
        bool named = name.count > 0 && code_take(t, "=") && t->at < t->end && *t->at != '=';
        if (!named) t->at = start, name.count = 0;
        if (named && !names) template_undefined(t, "here the name", name);
        if (count == TEMPLATE_ARGUMENTS) template_fail(t, "has more than %d values in brackets", TEMPLATE_ARGUMENTS);
        if (t->failed) break;
        if (names) names[count] = name;
        arguments[count++] = template_expression(t);
        if (!code_take(t, ",")) {
            code_need(t, close);
            break;
        }
    }
    return count;
}

// A list of the values between brackets.
static inline TemplateValue template_literal(Template* t, const char* close) {
    TemplateValue a[TEMPLATE_ARGUMENTS], *items;
    size_t count = template_arguments(t, close, a, NULL);
    TemplateValue list = value_list(t, &items, count);
    for (size_t i = 0; i < list.count; i++) items[i] = a[i];
    return list;
}

// What filters and methods have in common: functions of a text and of the texts after it. False: there is none.
static inline bool template_text(TemplateValue* result, Template* t, TemplateValue of, TemplateValue name,
                                 const TemplateValue* a, size_t count) {
    static const char cases[] = "lower|upper|capitalize";
    bool texts = true;
    for (size_t i = 0; i < count; i++) texts = texts && a[i].kind == VALUE_STRING;
    int how = word_among(name, cases);
    if (count == 0 && how >= 0) *result = template_case(t, of, (TemplateCase)how);
    else if (texts && count == 2 && a[0].count > 0 && value_is(name, "replace"))
        *result = template_join(t, template_split(t, of, a[0], SIZE_MAX), a[1]);
    else return false;
    return true;
}

static inline TemplateValue template_method(Template* t, TemplateValue of, TemplateValue name) {
    TemplateValue a[TEMPLATE_ARGUMENTS], result;
    size_t count = template_arguments(t, ")", a, NULL);
    if (t->skipping || t->failed) return value_of(VALUE_UNDEFINED, 0);
    bool texts = of.kind == VALUE_STRING;
    if (texts && template_text(&result, t, of, name, a, count)) return result;
    if (texts && count == 0 && value_is(name, "title")) return template_case(t, of, CASE_WORDS);
    if (texts && count == 1 && a[0].kind == VALUE_LIST && value_is(name, "join"))
        return template_join(t, value_taken(t, a[0]), of);
    if (texts && count == 2 && a[0].kind == VALUE_STRING && a[0].count > 0 && a[1].kind == VALUE_NUMBER &&
        value_is(name, "split"))
        return template_split(t, of, a[0], a[1].number < 0 ? SIZE_MAX : (size_t)a[1].number);
    if (of.kind == VALUE_MESSAGE && (count == 1 || count == 2) && value_is(name, "get")) {
        result = template_member(t, of, a[0]);
        return result.kind != VALUE_UNDEFINED ? result : count == 2 ? a[1] : value_of(VALUE_NONE, 0);
    }
    for (size_t i = 0; i < count; i++) texts = texts && a[i].kind == VALUE_STRING;
    if (texts && count <= 1) {
        const TemplateValue* marks = count ? &a[0] : NULL;
        if (value_is(name, "strip")) return template_strip(t, of, true, true, marks);
        if (value_is(name, "lstrip")) return template_strip(t, of, true, false, marks);
        if (value_is(name, "rstrip")) return template_strip(t, of, false, true, marks);
    }
    bool fits = texts && count == 1 && a[0].count <= of.count;
    if (texts && count == 1 && value_is(name, "startswith"))
        return value_bool(fits && memcmp(of.text, a[0].text, a[0].count) == 0);
    if (texts && count == 1 && value_is(name, "endswith"))
        return value_bool(fits && memcmp(of.text + of.count - a[0].count, a[0].text, a[0].count) == 0);
    if (texts && count == 1 && a[0].count > 0 && value_is(name, "split"))
        return template_split(t, of, a[0], SIZE_MAX);
    return template_undefined(t, "the method", name);
}

// x[...], whose [ has been consumed: a member, an element, or a slice with any of first, end, step (1 or -1).
static inline TemplateValue template_subscript(Template* t, TemplateValue of) {
    TemplateValue part[3], undefined = value_of(VALUE_UNDEFINED, 0);
    bool given[3] = {false, false, false}, slice = false;
    int n = 0;
    while (!t->failed && !code_take(t, "]")) {
        if (code_take(t, ":")) {
            slice = true;
            if (++n == 3) template_fail(t, "has a slice of more than three parts");
        } else {
            if (given[n]) code_need(t, "]");
            given[n] = true;
            part[n] = template_expression(t);
        }
    }
    if (t->skipping || t->failed) return value_of(VALUE_UNDEFINED, 0);
    for (int i = 0; i < 3; i++)
        if (given[i] && part[i].kind != VALUE_NUMBER && (slice || of.kind == VALUE_LIST))
            return template_fail(t, "has a subscript that is not a number"), value_of(VALUE_UNDEFINED, 0);
    if (!slice && given[0] && part[0].kind == VALUE_STRING) return template_member(t, of, part[0]);
    if (of.kind != VALUE_LIST || (!slice && !given[0]))
        return template_undefined(t, "the subscript of", value_word("[ ]"));
    if (of.taken) return slice ? template_undefined(t, "without |list the slice", value_word("[a:b]")) : undefined;
    int64_t count = (int64_t)of.count, step = given[2] ? part[2].number : 1;
    if (!slice) {
        int64_t i = part[0].number < 0 ? part[0].number + count : part[0].number;
        return i >= 0 && i < count ? of.items[i] : undefined;
    }
    if (step != 1 && (step != -1 || given[0] || given[1]))
        return template_undefined(t, "the slice", value_word("[a:b:c]"));
    int64_t first = given[0] ? part[0].number : 0, end = given[1] ? part[1].number : count;
    first = first < 0 ? first + count : first;
    end = end < 0 ? end + count : end > count ? count : end;
    first = first < 0 ? 0 : first;
    TemplateValue* items;
    TemplateValue list = value_list(t, &items, end > first ? (size_t)(end - first) : 0);
    for (size_t i = 0; i < list.count; i++) items[i] = of.items[step > 0 ? (size_t)first + i : list.count - 1 - i];
    return list;
}

// The local time as strftime of C and of Python writes it; %f is Python's alone.
static inline TemplateValue template_now(Template* t, TemplateValue format) {
    enum { NOW_BYTES = 1024 };
    char *copy = (char*)template_allocate(t, format.count + 1), *text = (char*)template_allocate(t, NOW_BYTES);
    time_t now = time(NULL);
    struct tm parts;
    if (!copy || !text || !localtime_r(&now, &parts)) return value_text("", 0);
    memcpy(copy, format.text, format.count);
    copy[format.count] = 0;
    size_t bytes = strstr(copy, "%f") ? 0 : strftime(text, NOW_BYTES, copy, &parts);
    return bytes > 0 || copy[0] == 0 ? value_text(text, bytes) : template_undefined(t, "the format of time", format);
}

// The whole numbers from 0 or a[0] up to, without it, the last or the second, in steps of a[2].
static inline TemplateValue template_range(Template* t, const TemplateValue* a, size_t count) {
    int64_t first = count > 1 ? a[0].number : 0, end = a[count > 1].number, step = count > 2 ? a[2].number : 1;
    for (size_t i = 0; i < count; i++)
        if (!value_numeric(a[i]) || llabs(a[i].number) > TEMPLATE_STEPS || step == 0)
            return template_undefined(t, "with these values the function", value_word("range"));
    int64_t all = step > 0 ? (end - first + step - 1) / step : (first - end - step - 1) / -step;
    TemplateValue *items, list = value_list(t, &items, all > 0 ? (size_t)all : 0);
    for (size_t i = 0; i < list.count; i++) items[i] = value_of(VALUE_NUMBER, first + (int64_t)i * step);
    return list;
}

// Calls a function of TEMPLATE_FUNCTIONS, whose ( has been consumed. All are defined, but not all can be called.
static inline TemplateValue template_call(Template* t, TemplateValue name) {
    TemplateValue a[TEMPLATE_ARGUMENTS], names[TEMPLATE_ARGUMENTS], made = value_of(VALUE_NAMESPACE, 0);
    bool is_namespace = value_is(name, "namespace");
    size_t count = template_arguments(t, ")", a, is_namespace ? names : NULL);
    if (is_namespace) {
        made.number = t->namespaces++;
        for (size_t i = 0; i < count && !t->skipping && !t->failed; i++) {
            if (names[i].count == 0) return template_undefined(t, "without a name the value of", name);
            template_set(t, names[i], made.number, a[i]);
        }
        return made;
    }
    if (!t->skipping && !t->failed && value_is(name, "raise_exception")) {
        TemplateValue text = count ? value_string(t, a[0]) : value_text("", 0);
        template_fail(t, "refuses the conversation: %.*s", (int)min_size(text.count, 200), text.text);
    }
    if (count == 1 && a[0].kind == VALUE_STRING && !t->skipping && !t->failed && value_is(name, "strftime_now"))
        return template_now(t, a[0]);
    if (count >= 1 && count <= 3 && !t->skipping && !t->failed && value_is(name, "range"))
        return template_range(t, a, count);
    return template_undefined(t, "the function", name);
}

// Names that apply_chat_template defines besides those of template_render.
#define TEMPLATE_FUNCTIONS "raise_exception|namespace|strftime_now|range|dict|lipsum|cycler|joiner"
#define TEMPLATE_TOKENS "unk_token|sep_token|pad_token|cls_token|mask_token"

static inline TemplateValue template_primary(Template* t) {
    code_skip(t);
    if (t->at >= t->end) return template_fail(t, "has an expression that ends early"), value_of(VALUE_UNDEFINED, 0);
    if (*t->at == '\'' || *t->at == '"') {
        TemplateValue text = template_string(t);
        for (code_skip(t); !t->failed && t->at < t->end && (*t->at == '\'' || *t->at == '"'); code_skip(t))
            text = value_joined(t, text, template_string(t));
        return text;
    }
    if (code_take(t, "[")) return template_literal(t, "]");
    if (code_take(t, "(")) {
        const char* start = t->at;
        TemplateValue value = template_expression(t);
        if (t->failed || code_take(t, ")")) return value;
        if (!code_take(t, ",")) code_need(t, ")");
        t->at = start;
        return t->failed ? value : template_literal(t, ")");
    }
    if (code_take(t, "{")) template_fail(t, "has a dictionary, which is not supported");
    TemplateValue word = code_word(t);
    if (word.count == 0) {
        template_fail(t, "has '%.*s' where a value should be", (int)min_size((size_t)(t->end - t->at), 40), t->at);
        return value_of(VALUE_UNDEFINED, 0);
    }
    if (*word.text >= '0' && *word.text <= '9') {
        int64_t number = 0;
        bool digits = word.count <= 9 && !(t->at < t->end && *t->at == '.');
        for (size_t i = 0; digits && i < word.count; i++) {
            digits = word.text[i] >= '0' && word.text[i] <= '9';
            number = 10 * number + (word.text[i] - '0');
        }
        return digits ? value_of(VALUE_NUMBER, number) : template_undefined(t, "the number", word);
    }
    if (word_among(word, "true|True") >= 0) return value_bool(true);
    if (word_among(word, "false|False") >= 0) return value_bool(false);
    if (word_among(word, "none|None") >= 0) return value_of(VALUE_NONE, 0);
    TemplateVariable* v = template_find(t, word, -1);
    if (code_take(t, "("))
        return v && v->value.kind == VALUE_MACRO ? template_macro(t, v->value.number, word) : template_call(t, word);
    if (v && !t->skipping) return v->value;
    if (!v && word_among(word, TEMPLATE_TOKENS) >= 0) return template_undefined(t, "the token", word);
    int function = v ? -1 : word_among(word, TEMPLATE_FUNCTIONS);
    return function >= 0 ? value_of(VALUE_FUNCTION, function) : value_of(VALUE_UNDEFINED, 0);
}

static inline void template_write(Template* t, const char* text, size_t bytes);

// What has been written since there were `from` bytes, as a string that has not been written.
static inline TemplateValue template_captured(Template* t, size_t from) {
    size_t bytes = t->out_bytes - from;
    if (t->spans && t->spans->count > 0 && t->spans->list[t->spans->count - 1].end > from)
        template_undefined(t, "within a macro, block or filter the statement", value_word("generation"));
    t->out_bytes = from;
    return bytes ? value_joined(t, value_text(t->out + from, bytes), value_text("", 0)) : value_text("", 0);
}

// Writes a value as json.dumps(value, ensure_ascii=False) does.
static inline void template_json(Template* t, TemplateValue v) {
    static const char* const words[] = {"null", "false", "true"};
    if (v.kind == VALUE_NONE || v.kind == VALUE_BOOL) {
        v = value_word(words[v.kind == VALUE_BOOL ? 1 + v.number : 0]);
        template_write(t, v.text, v.count);
    } else if (v.kind == VALUE_NUMBER) {
        v = value_string(t, v);
        template_write(t, v.text, v.count);
    } else if (v.kind == VALUE_STRING) {
        template_write(t, "\"", 1);
        for (const char* p = v.text; p < v.text + v.count; p++) {
            static const char marks[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
            const char* mark = (const char*)memchr(marks, *p, sizeof marks - 1);
            char text[8] = {*p, 0};
            if (mark) snprintf(text, sizeof text, "\\%c", letters[mark - marks]);
            else if ((unsigned char)*p < 0x20) snprintf(text, sizeof text, "\\u%04x", (unsigned)*p);
            template_write(t, text, strlen(text));
        }
        template_write(t, "\"", 1);
    } else if (v.kind == VALUE_MESSAGE) {
        template_write(t, "{\"role\": ", 9);
        template_json(t, template_member(t, v, value_word("role")));
        template_write(t, ", \"content\": ", 13);
        template_json(t, template_member(t, v, value_word("content")));
        template_write(t, "}", 1);
    } else if (v.kind == VALUE_LIST && !v.taken) {
        template_deeper(t);
        for (size_t i = 0; i < v.count && !t->failed; i++) {
            template_write(t, i ? ", " : "[", i ? 2 : 1);
            template_json(t, v.items[i]);
        }
        t->depth--;
        template_write(t, v.count ? "]" : "[]", v.count ? 1 : 2);
    } else template_undefined(t, "with such a value the filter", value_word("tojson"));
}

#define KIND(name) (1u << VALUE_##name)
// Those from divisibleby on have a value, `with`.
#define TEMPLATE_TESTS "defined|undefined|none|string|boolean|true|false|number|integer|mapping|sequence|iterable|" \
                       "even|odd|divisibleby|eq|equalto|==|ne|!=|in"
enum { TEST_EVEN = 12, TEST_ODD, TEST_DIVISIBLE, TEST_NE = 18, TEST_IN = 20 };

static inline bool template_holds(Template* t, TemplateValue v, TemplateValue name, TemplateValue with) {
    enum { SEQUENCE = KIND(STRING) | KIND(LIST) | KIND(MESSAGE) | KIND(UNDEFINED) };
    static const unsigned kinds[] = {~KIND(UNDEFINED), KIND(UNDEFINED), KIND(NONE), KIND(STRING), KIND(BOOL),
                                     KIND(BOOL), KIND(BOOL), KIND(NUMBER) | KIND(BOOL), KIND(NUMBER), KIND(MESSAGE),
                                     SEQUENCE, SEQUENCE | KIND(LOOP)};
    int test = word_among(name, TEMPLATE_TESTS);
    if (t->skipping || t->failed) return false;
    if (test < 0) return template_undefined(t, "the test", name), false;
    if (value_is(name, "true") || value_is(name, "false")) return v.kind == VALUE_BOOL && v.number == (test == 5);
    if (test < TEST_EVEN) return (kinds[test] >> v.kind & 1) && !(v.taken && value_is(name, "sequence"));
    if (test == TEST_IN) return template_contains(t, with, v);
    if (test > TEST_DIVISIBLE) return value_equal(t, v, with) != (test >= TEST_NE);
    if (test < TEST_DIVISIBLE) with = value_of(VALUE_NUMBER, 2);
    if (!value_numeric(v) || !value_numeric(with) || with.number == 0)
        return template_fail(t, "divides by 0, or something that is not a number");
    return (v.number % with.number == 0) != (test == TEST_ODD);
}
#undef KIND

// x is [not] test, after the "is".
static inline TemplateValue template_test(Template* t, TemplateValue v) {
    bool negated = code_take_word(t, "not");
    TemplateValue name = code_word(t), a[TEMPLATE_ARGUMENTS] = {v};
    if (code_take(t, "(")) template_arguments(t, ")", a, NULL);
    else if (word_among(name, TEMPLATE_TESTS) >= TEST_DIVISIBLE) a[0] = template_postfix(t);
    return value_bool(template_holds(t, v, name, a[0]) != negated);
}

static inline TemplateValue template_filter_with(Template* t, TemplateValue v, TemplateValue name,
                                                 const TemplateValue* a, size_t count);

// map(filter, ...), map(attribute=name), select, reject, selectattr, rejectattr: each value of a list changed, or those
// for which a test holds.
static inline TemplateValue template_each(Template* t, TemplateValue list, TemplateValue name, const TemplateValue* a,
                                          size_t count, bool named) {
    bool attribute = named || name.count > 6, maps = value_is(name, "map"), rejects = name.text[0] == 'r';
    TemplateValue *items, made = value_list(t, &items, list.count), undefined = value_of(VALUE_UNDEFINED, 0);
    size_t kept = 0;
    if (attribute && (a[0].kind != VALUE_STRING || text_find(a[0], value_word("."), 0) != SIZE_MAX))
        return template_undefined(t, "in a filter the attribute", value_string(t, a[0]));
    if (count > attribute && a[attribute].kind != VALUE_STRING)
        return template_fail(t, "gives '%.*s' a name that is not a string", (int)name.count, name.text), undefined;
    for (size_t i = 0; i < made.count && template_step(t) && !t->failed; i++) {
        TemplateValue x = attribute ? template_member(t, list.items[i], a[0]) : list.items[i];
        bool tests = count > attribute;
        if (maps) items[kept++] = named ? x : template_filter_with(t, x, a[0], a + 1, count - 1);
        else if ((tests ? template_holds(t, x, a[attribute], count > attribute + 1u ? a[attribute + 1] : undefined)
                        : value_true(x)) != rejects) items[kept++] = list.items[i];
    }
    made.count = kept;
    return value_once(t, made);
}

static inline TemplateValue template_filter_with(Template* t, TemplateValue v, TemplateValue name,
                                                 const TemplateValue* a, size_t count) {
    TemplateValue result, undefined = value_of(VALUE_UNDEFINED, 0);
    if (value_is(name, "tojson") && count == 0) {
        size_t from = t->out_bytes;
        template_json(t, v);
        return template_captured(t, from);
    }
    if (word_among(name, "lower|upper|capitalize|replace") >= 0 &&
        template_text(&result, t, value_string(t, v), name, a, count)) return result;
    if (count == 0 && value_is(name, "title")) return template_case(t, value_string(t, v), CASE_TITLE);
    if (count == 0 && value_is(name, "trim")) return template_strip(t, value_string(t, v), true, true, NULL);
    if (count == 0 && value_is(name, "string")) return value_string(t, v);
    if ((count == 1 || count == 2) && word_among(name, "default|d") >= 0)
        return v.kind == VALUE_UNDEFINED || (count == 2 && value_true(a[1]) && !value_true(v)) ? a[0] : v;
    bool counts = count == 0 && word_among(name, "length|count") >= 0;
    if (v.kind == VALUE_UNDEFINED && word_among(name, "join|list|map|select|reject|selectattr|rejectattr") >= 0)
        v = value_of(VALUE_LIST, 0);
    if (v.taken && (counts || value_is(name, "last"))) return template_undefined(t, "without |list the filter", name);
    if (v.kind == VALUE_LIST) {
        bool once = v.taken;
        v = value_taken(t, v);
        if (counts) return value_of(VALUE_NUMBER, (int64_t)v.count);
        if (count == 0 && value_is(name, "list")) return v;
        if (count == 0 && value_is(name, "first")) return v.count ? v.items[0] : undefined;
        if (count == 0 && value_is(name, "last")) return v.count ? v.items[v.count - 1] : undefined;
        if (count == 0 && value_is(name, "join")) return template_join(t, v, value_text("", 0));
        if (count == 1 && value_is(name, "join")) return template_join(t, v, value_string(t, a[0]));
        if (word_among(name, "select|reject") >= 0 || (count > 0 && word_among(name, "map|selectattr|rejectattr") >= 0))
            return template_each(t, v, name, a, count, false);
        if (count == 0 && value_is(name, "reverse")) {
            TemplateValue *items, list = value_list(t, &items, v.count);
            for (size_t i = 0; i < list.count; i++) items[i] = v.items[list.count - 1 - i];
            return once ? list : value_once(t, list);
        }
    }
    if (counts && v.kind == VALUE_STRING) {
        int64_t characters = 0;
        for (size_t i = 0; i < v.count; i++) characters += ((unsigned char)v.text[i] & 0xC0) != 0x80;
        return value_of(VALUE_NUMBER, characters);
    }
    return template_undefined(t, "the filter", name);
}

// Names of values: map(attribute=name) and default(value, boolean=true) alone.
static inline TemplateValue template_filter(Template* t, TemplateValue v, TemplateValue name) {
    TemplateValue a[TEMPLATE_ARGUMENTS], names[TEMPLATE_ARGUMENTS];
    size_t count = code_take(t, "(") ? template_arguments(t, ")", a, names) : 0;
    if (t->skipping || t->failed) return value_of(VALUE_UNDEFINED, 0);
    bool maps = count == 1 && value_is(name, "map") && value_is(names[0], "attribute");
    for (size_t i = 0; i < count && !maps; i++)
        if (names[i].count > 0 && !(i == 1 && value_is(name, "default") && value_is(names[i], "boolean")))
            return template_undefined(t, "in a filter the name", names[i]);
    if (maps && (v.kind == VALUE_LIST || v.kind == VALUE_UNDEFINED))
        return template_each(t, value_taken(t, v), name, a, count, true);
    return template_filter_with(t, v, name, a, count);
}

// A value with its members, subscripts and calls of methods.
static inline TemplateValue template_postfix(Template* t) {
    TemplateValue v = template_primary(t);
    while (!t->failed) {
        if (code_take(t, "[")) {
            v = template_subscript(t, v);
        } else if (code_take(t, ".")) {
            TemplateValue name = code_word(t);
            v = code_take(t, "(") ? template_method(t, v, name) : template_member(t, v, name);
        } else break;
    }
    return v;
}

// A value after the filters and tests that follow it.
static inline TemplateValue template_filtered(Template* t, TemplateValue v) {
    while (!t->failed) {
        if (code_take(t, "|")) v = template_filter(t, v, code_word(t));
        else if (code_take_word(t, "is")) v = template_test(t, v);
        else break;
    }
    return v;
}

// ------------------------------------------------------------------------------------------------
// 4. Operators

// operation: + - ~ * % or, for //, /.
static inline TemplateValue template_number(Template* t, TemplateValue a, TemplateValue b, char operation) {
    if (t->skipping || t->failed) return value_of(VALUE_UNDEFINED, 0);
    if (operation == '~') return value_joined(t, value_string(t, a), value_string(t, b));
    if (operation == '+' && a.kind == VALUE_STRING && b.kind == VALUE_STRING) return value_joined(t, a, b);
    if (operation == '+' && a.kind == VALUE_LIST && b.kind == VALUE_LIST && !a.taken && !b.taken) {
        TemplateValue *items, list = value_list(t, &items, a.count + b.count);
        for (size_t i = 0; i < list.count; i++) items[i] = i < a.count ? a.items[i] : b.items[i - a.count];
        return list;
    }
    bool divides = operation == '/' || operation == '%', fits = value_numeric(a) && value_numeric(b) &&
                                                             llabs(a.number) < 1000000000000 &&
                                                             llabs(b.number) < 1000000;
    if (!fits || (divides && b.number <= 0))
        return template_undefined(t, "with these values the operator", value_text(&operation, 1));
    int64_t rest = divides ? (a.number % b.number + b.number) % b.number : 0;
    return value_of(VALUE_NUMBER, operation == '+' ? a.number + b.number : operation == '-' ? a.number - b.number
                                : operation == '*' ? a.number * b.number : operation == '%' ? rest
                                                   : (a.number - rest) / b.number);
}

static inline TemplateValue template_unary(Template* t) {
    if (++t->depth > TEMPLATE_DEPTH) template_fail(t, "nests more than %d expressions", TEMPLATE_DEPTH);
    TemplateValue v = value_of(VALUE_UNDEFINED, 0);
    size_t signs = 0;
    while (code_take(t, "-")) signs++;
    if (!t->failed) v = template_postfix(t);
    for (; signs > 0 && !t->failed; signs--) v = template_number(t, value_of(VALUE_NUMBER, 0), v, '-');
    v = template_filtered(t, v);
    t->depth--;
    return v;
}

// The operators between two values, by level: those of a later level bind more.
static inline TemplateValue template_arithmetic(Template* t, int level) {
    static const char* const marks[3][3] = {{"+", "-", NULL}, {"~", NULL, NULL}, {"//", "*", "%"}};
    if (level == 3) return template_unary(t);
    TemplateValue v = template_arithmetic(t, level + 1);
    for (int i = 0; !t->failed && i < 3 && marks[level][i];) {
        bool taken = code_take(t, marks[level][i]);
        if (taken) v = template_number(t, v, template_arithmetic(t, level + 1), marks[level][i][0]);
        i = taken ? 0 : i + 1;
    }
    return v;
}

static inline bool template_contains(Template* t, TemplateValue in, TemplateValue what) {
    if (t->skipping || t->failed) return false;
    if (in.kind == VALUE_STRING && what.kind == VALUE_STRING) return text_find(in, what, 0) != SIZE_MAX;
    if (in.kind == VALUE_MESSAGE) return value_is(what, "role") || value_is(what, "content");
    if (in.kind == VALUE_LIST) {
        in = value_taken(t, in);
        for (size_t i = 0; i < in.count && !t->failed; i++)
            if (value_equal(t, in.items[i], what)) return true;
        return false;
    }
    if (in.kind == VALUE_UNDEFINED) return false;
    return template_fail(t, "uses 'in' on something that is not a container");
}

static inline int value_compare(Template* t, TemplateValue a, TemplateValue b) {
    if (t->skipping || t->failed) return 0;
    if (a.kind == VALUE_STRING && b.kind == VALUE_STRING) {
        int order = memcmp(a.text, b.text, min_size(a.count, b.count));
        return order ? order : (a.count > b.count) - (a.count < b.count);
    }
    if (a.kind == VALUE_NUMBER && b.kind == VALUE_NUMBER) return (a.number > b.number) - (a.number < b.number);
    template_fail(t, "compares values that have no order");
    return 0;
}

// Consumes the comparison operator that comes next, and returns which it is; -1: none.
enum { COMPARE_EQUAL, COMPARE_DIFFERENT, COMPARE_UP_TO, COMPARE_FROM, COMPARE_BELOW, COMPARE_ABOVE, COMPARE_IN };

static inline int template_comparator(Template* t, bool* negated) {
    static const char* const marks[] = {"==", "!=", "<=", ">=", "<", ">"};
    *negated = false;
    for (int i = 0; i < 6; i++)
        if (code_take(t, marks[i])) return i;
    if (code_take_word(t, "in")) return COMPARE_IN;
    if (!code_take_word(t, "not")) return -1;
    *negated = true;
    if (!code_take_word(t, "in")) template_fail(t, "has 'not' where 'not in' should be");
    return COMPARE_IN;
}

// a < b < c is a < b and b < c.
static inline TemplateValue template_comparison(Template* t) {
    TemplateValue left = template_arithmetic(t, 0);
    bool negated, holds = true, any = false;
    for (int which; !t->failed && (which = template_comparator(t, &negated)) >= 0; any = true) {
        TemplateValue right = template_arithmetic(t, 0);
        bool now = which == COMPARE_EQUAL ? value_equal(t, left, right)
                 : which == COMPARE_DIFFERENT ? !value_equal(t, left, right)
                 : which == COMPARE_UP_TO ? value_compare(t, left, right) <= 0
                 : which == COMPARE_FROM ? value_compare(t, left, right) >= 0
                 : which == COMPARE_BELOW ? value_compare(t, left, right) < 0
                 : which == COMPARE_ABOVE ? value_compare(t, left, right) > 0
                 : template_contains(t, right, left) != negated;
        holds = holds && now;
        left = right;
    }
    return any ? value_bool(holds) : left;
}

static inline TemplateValue template_negation(Template* t) {
    bool negated = false, any = false;
    while (code_take_word(t, "not")) negated = !negated, any = true;
    TemplateValue v = template_comparison(t);
    return any ? value_bool(value_true(v) != negated) : v;
}

// a and b, a or b (any): the value that decides, as in Python; what follows it is skipped.
static inline TemplateValue template_logic(Template* t, bool any) {
    TemplateValue v = any ? template_logic(t, false) : template_negation(t);
    while (!t->failed && code_take_word(t, any ? "or" : "and")) {
        bool outer = t->skipping, decided = value_true(v) == any;
        t->skipping = outer || decided;
        TemplateValue more = any ? template_logic(t, false) : template_negation(t);
        t->skipping = outer;
        if (!decided) v = more;
    }
    return v;
}

// a if condition else b. The condition comes after a, which is first skipped, and evaluated afterwards if it holds.
static inline TemplateValue template_expression(Template* t) {
    if (++t->depth > TEMPLATE_DEPTH) template_fail(t, "takes too many steps");
    template_step(t);
    TemplateValue v = value_of(VALUE_UNDEFINED, 0);
    bool outer = t->skipping;
    const char* start = t->at;
    if (outer && !t->failed) {
        template_logic(t, true);
        if (code_take_word(t, "if")) template_logic(t, true);
        if (code_take_word(t, "else")) template_expression(t);
        t->depth--;
        return v;
    }
    t->skipping = true;
    if (!t->failed) template_logic(t, true);
    t->skipping = false;
    bool conditional = !t->failed && code_take_word(t, "if"), holds = true;
    if (conditional) holds = value_true(template_logic(t, true));
    const char* after = t->at;
    t->at = start;
    t->skipping = !holds;
    if (!t->failed) v = template_logic(t, true);
    if (!holds) v = value_of(VALUE_UNDEFINED, 0);
    if (conditional) t->at = after;
    t->skipping = conditional && holds;
    if (conditional && !t->failed && code_take_word(t, "else")) {
        TemplateValue other = template_expression(t);
        if (!holds) v = other;
    }
    t->skipping = false;
    t->depth--;
    return v;
}

// ------------------------------------------------------------------------------------------------
// 5. Running

static inline void code_end(Template* t) {
    code_skip(t);
    if (!t->failed && t->at < t->end)
        template_fail(t, "has '%.*s' after an expression", (int)min_size((size_t)(t->end - t->at), 40), t->at);
}

static inline TemplateValue template_evaluate(Template* t, const char* start, const char* end) {
    t->at = start;
    t->end = end;
    t->skipping = false;
    TemplateValue v = template_expression(t);
    code_end(t);
    return v;
}

static inline void template_write(Template* t, const char* text, size_t bytes) {
    size_t all = t->out_bytes + bytes;
    if (all >= TEMPLATE_MEMORY || !memory_grow(&t->out, &t->out_capacity, all, 1)) {
        template_fail(t, "writes more than %d MB; shorten the conversation", TEMPLATE_MEMORY >> 20);
        return;
    }
    if (bytes > 0) memcpy(t->out + t->out_bytes, text, bytes);
    t->out_bytes = all;
}

// name = value, or name.member = value; of a set with a text until endset, the text is the value.
static inline void template_assign(Template* t, const TemplateNode* node, const TemplateValue* text) {
    t->at = node->start;
    t->end = node->end;
    TemplateValue name = code_word(t), member = value_text("", 0);
    bool of_namespace = code_take(t, ".");
    if (of_namespace) member = code_word(t);
    if (name.count == 0 || (text ? (code_skip(t), t->at < t->end) : !code_take(t, "="))) {
        template_undefined(t, "the statement set", node_text(node));
        return;
    }
    TemplateValue value = text ? *text : template_evaluate(t, t->at, node->end);
    if (t->failed) return;
    TemplateVariable* owner = of_namespace ? template_find(t, name, -1) : NULL;
    if (!of_namespace) template_set(t, name, -1, value);
    else if (owner && owner->value.kind == VALUE_NAMESPACE) template_set(t, member, owner->value.number, value);
    else template_undefined(t, "without namespace the assignment to", name);
}

static inline void template_run(Template* t, size_t first, size_t end);

// Begins a scope; the caller has set aside t->scope, and sets it again after the last template_leave.
static inline void template_enter(Template* t) {
    if (t->scope == 0) t->top = t->variable_count;
    t->scope = t->variable_count;
}

// Forgets the variables from `count` on, except members of namespaces from outside, those below `namespaces`.
static inline void template_leave(Template* t, size_t count, int64_t namespaces) {
    size_t kept = count;
    for (size_t v = count; v < t->variable_count; v++)
        if (t->variables[v].owner >= 0 && t->variables[v].owner < namespaces)
            t->variables[kept++] = t->variables[v];
    t->variable_count = kept;
}

// Runs the body of node i in a scope of its own.
static inline void template_scoped(Template* t, size_t i) {
    size_t scope = t->scope, count = t->variable_count;
    int64_t namespaces = t->namespaces;
    template_enter(t);
    template_run(t, i + 1, t->nodes[i].next);
    template_leave(t, count, namespaces);
    t->scope = scope;
}

// Calls a macro, whose ( has been consumed: its text. It sees its parameters and the variables outside all loops.
static inline TemplateValue template_macro(Template* t, int64_t macro, TemplateValue name) {
    TemplateValue a[TEMPLATE_ARGUMENTS], names[TEMPLATE_ARGUMENTS];
    size_t count = template_arguments(t, ")", a, names), taken = 0;
    if (t->skipping || t->failed) return value_of(VALUE_UNDEFINED, 0);
    const TemplateNode* node = &t->nodes[macro];
    const char *at = t->at, *end = t->end;
    size_t scope = t->scope, hidden = t->hidden, variables = t->variable_count, from = t->out_bytes;
    int64_t namespaces = t->namespaces;
    template_enter(t);
    t->hidden = variables;
    t->at = node->start;
    t->end = node->end;
    code_word(t);
    code_need(t, "(");
    for (size_t i = 0; !t->failed && !code_take(t, ")"); i++) {
        TemplateValue parameter = code_word(t), value = value_of(VALUE_UNDEFINED, 0);
        size_t k = 0;
        while (k < count && (names[k].count ? !text_equal(names[k], parameter) : k != i)) k++;
        if (k < count) value = a[k], taken++;
        if (parameter.count == 0) template_undefined(t, "the parameters of the macro", name);
        if (code_take(t, "=")) {
            t->skipping = k < count;
            TemplateValue other = template_expression(t);
            t->skipping = false;
            if (k == count) value = other;
        }
        if (!t->failed) template_set(t, parameter, -1, value);
        if (!code_take(t, ",")) {
            code_need(t, ")");
            break;
        }
    }
    if (taken < count) template_fail(t, "calls a macro with values that it does not take");
    if (!t->failed) template_run(t, (size_t)macro + 1, node->next);
    template_leave(t, variables, namespaces);
    t->scope = scope;
    t->hidden = hidden;
    t->at = at;
    t->end = end;
    t->skipping = false;
    return template_captured(t, from);
}

// The elements for which the condition holds in "for name in list if condition", from the list on, where t->at is.
static inline TemplateValue template_elements(Template* t, TemplateValue name) {
    const char* end = t->end;
    TemplateValue list = value_taken(t, template_logic(t, true)), *items;
    bool filters = !t->failed && code_take_word(t, "if");
    const char* condition = t->at;
    if (!filters && !t->failed) code_end(t);
    if (!filters || t->failed || list.kind != VALUE_LIST) return list;
    TemplateValue kept = value_list(t, &items, list.count);
    size_t count = 0, outer = t->scope;
    template_enter(t);
    for (size_t i = 0; i < kept.count && !t->failed; i++) {
        template_set(t, name, -1, list.items[i]);
        if (value_true(template_evaluate(t, condition, end))) items[count++] = list.items[i];
    }
    t->variable_count = t->scope;
    t->scope = outer;
    kept.count = count;
    return kept;
}

// for name in list; what is set in the loop is forgotten after each iteration, except members of namespaces.
static inline void template_loop(Template* t, size_t i) {
    const TemplateNode* node = &t->nodes[i];
    t->at = node->start;
    t->end = node->end;
    size_t scope = t->scope;
    TemplateValue name = code_word(t);
    if (name.count == 0 || !code_take_word(t, "in")) {
        template_undefined(t, "the statement for", node_text(node));
        return;
    }
    t->skipping = false;
    TemplateValue list = template_elements(t, name), loop = value_of(VALUE_LOOP, 0);
    if (t->failed || list.kind == VALUE_UNDEFINED) return;
    if (list.kind != VALUE_LIST) {
        template_fail(t, "has a for over something that is not a list");
        return;
    }
    loop.count = list.count;
    loop.items = list.items;
    bool done = false;
    for (size_t turn = 0; turn < list.count && !t->failed && !done; turn++) {
        size_t count = t->variable_count;
        int64_t namespaces = t->namespaces;
        if (turn == 0) template_enter(t);
        t->scope = count;
        loop.number = (int64_t)turn;
        template_set(t, value_word("loop"), -1, loop);
        template_set(t, name, -1, list.items[turn]);
        template_run(t, i + 1, node->next);
        template_leave(t, count, namespaces);
        done = t->leaving == NODE_BREAK;
        t->leaving = NODE_TEXT;
    }
    t->scope = scope;
}

// The text of node i, a generation, and where it is. One within another is refused, and an empty one is none.
static inline void template_generation(Template* t, size_t i) {
    size_t first = t->out_bytes, spans = t->spans ? t->spans->count : 0;
    template_scoped(t, i);
    if (!t->spans || t->failed || t->out_bytes == first) return;
    if (t->spans->count > spans) {
        template_undefined(t, "within another the statement", value_word("generation"));
    } else if (!memory_grow(&t->spans->list, &t->spans->capacity, spans + 1, sizeof *t->spans->list)) {
        template_fail(t, "needs more memory; close other programs");
    } else {
        t->spans->list[spans].first = first;
        t->spans->list[spans].end = t->out_bytes;
        t->spans->count++;
    }
}

// Runs nodes first to end - 1.
static inline void template_run(Template* t, size_t first, size_t end) {
    for (size_t i = first; i < end && !t->failed && t->leaving == NODE_TEXT; i++) {
        const TemplateNode* node = &t->nodes[i];
        template_step(t);
        if (node->kind == NODE_TEXT || node->kind == NODE_OUTPUT) {
            TemplateValue text = node_text(node);
            if (node->kind == NODE_OUTPUT) text = value_string(t, template_evaluate(t, node->start, node->end));
            if (!t->failed) template_write(t, text.text, text.count);
        } else if (node->kind == NODE_SET) {
            template_assign(t, node, NULL);
        } else if (node->kind == NODE_SET_BLOCK) {
            size_t from = t->out_bytes;
            template_scoped(t, i);
            TemplateValue text = template_captured(t, from);
            if (!t->failed && t->leaving == NODE_TEXT) template_assign(t, node, &text);
            i = node->next;
        } else if (node->kind == NODE_MACRO) {
            t->at = node->start;
            t->end = node->end;
            TemplateValue name = code_word(t);
            if (t->scope > 0) template_undefined(t, "within a loop, macro or block the macro", name);
            template_set(t, name, -1, value_of(VALUE_MACRO, (int64_t)i));
            i = node->next;
        } else if (node->kind == NODE_FOR || node->kind == NODE_GENERATION) {
            (node->kind == NODE_FOR ? template_loop : template_generation)(t, i);
            i = node->next;
        } else if (node->kind == NODE_BREAK || node->kind == NODE_CONTINUE) {
            t->leaving = node->kind;
        } else {  // an if: its first branch that holds
            bool done = false;
            for (; !t->failed && t->nodes[i].kind != NODE_ENDIF; i = t->nodes[i].next) {
                node = &t->nodes[i];
                if (done || !(node->kind == NODE_ELSE || value_true(template_evaluate(t, node->start, node->end))))
                    continue;
                template_run(t, i + 1, node->next);
                done = true;
            }
        }
    }
}

// The template with \n for every line break, as Jinja reads it; NULL after a failure.
static inline const char* template_lines(Template* t, const char* source) {
    if (strchr(source, '\r') == NULL) return source;
    char *copy = (char*)template_allocate(t, strlen(source) + 1), *out = copy;
    for (const char* p = source; copy && *p; p++)
        if (*p != '\r') *out++ = *p;
        else if (p[1] != '\n') *out++ = '\n';
    if (copy) *out = 0;
    return copy;
}

// The text of a conversation, which ends where the model's answer begins if `answers` is set; *text is the caller's to
// free. bos and eos: the text of the begin-of-text and end-of-text tokens, empty where there is none. spans: where the
// generations are, their list the caller's to free, also after a failure; NULL: they are not wanted.
static inline bool template_render_spans(char** text, size_t* bytes, TemplateSpans* spans, const char* source,
                                         const ChatMessage* messages, size_t count, const char* bos, const char* eos,
                                         bool answers, Error* error) {
    Template* t = (Template*)memory_allocate(sizeof(Template));
    *text = NULL;
    *bytes = 0;
    if (spans) spans->count = 0;
    if (!t) return fail_with(error, "out of memory for the chat template; close other programs");
    t->error = error;
    t->spans = spans;
    TemplateValue *items, undefined = value_of(VALUE_UNDEFINED, 0), list = value_list(t, &items, count);
    for (size_t i = 0; i < list.count; i++) {
        items[i] = value_of(VALUE_MESSAGE, 0);
        items[i].message = &messages[i];
    }
    template_set(t, value_word("messages"), -1, list);
    template_set(t, value_word("bos_token"), -1, bos[0] ? value_word(bos) : undefined);
    template_set(t, value_word("eos_token"), -1, eos[0] ? value_word(eos) : undefined);
    template_set(t, value_word("add_generation_prompt"), -1, value_bool(answers));
    template_set(t, value_word("tools"), -1, value_of(VALUE_NONE, 0));
    template_set(t, value_word("documents"), -1, value_of(VALUE_NONE, 0));
    source = template_lines(t, source);
    if (!t->failed && template_cut(t, source, strlen(source)) && template_match(t)) template_run(t, 0, t->node_count);
    if (!t->failed) template_write(t, "", 1);  // so that there is memory, and a zero byte at the end
    bool ok = !t->failed;
    if (ok) {
        *text = t->out;
        *bytes = t->out_bytes - 1;
    } else {
        free(t->out);
    }
    for (TemplateBlock* next; t->blocks; t->blocks = next) {
        next = t->blocks->next;
        free(t->blocks);
    }
    free(t);
    return ok;
}

static inline bool template_render(char** text, size_t* bytes, const char* source, const ChatMessage* messages,
                                   size_t count, const char* bos, const char* eos, bool answers, Error* error) {
    return template_render_spans(text, bytes, NULL, source, messages, count, bos, eos, answers, error);
}

#endif  // LLMTRAIN_TEMPLATES_H
