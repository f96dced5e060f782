// chat.h: conversations, answers and preferences of a line of JSON as documents of tokens, with those that are trained.
//
//   ChatRules rules;
//   ChatOutput output = {0};
//   ChatResult result;
//   if (!chat_rules_set(&rules, &tokenizer, path, &error)) ...           rules.turns and others may be set then
//   if (!chat_line(&output, &result, &rules, encoder, line, bytes, "x.jsonl, line 7", &error)) ...  it cannot be read
//   output.documents (document_count), output.spans, output.tokens, result.dropped
//   chat_output_free(&output);
//
//   1. records    the forms of lines, told apart by their keys
//   2. borders    where answers are in the tokens of a conversation
//   3. documents  the tokens and spans of a record
//
// A conversation becomes a text by the chat template of the tokenizer. Where an answer begins and ends in the text is
// said by the template, if it has {% generation %}; otherwise an answer begins where the template lets the model begin
// to answer (add_generation_prompt), and ends after the token that ends the turn. So the tokens before an answer are
// those that generate --chat gives to the model. This holds only if the tokens of the text up to a border are the first
// tokens of the whole text: where they are not, the sample is dropped, and the summary says why.
//
// What is not supported (calls of tools, images, separate reasoning) is refused by name, with file and line.

#ifndef LLMTRAIN_CHAT_H
#define LLMTRAIN_CHAT_H

#include "../llmtrain/base/files.h"
#include "../llmtrain/base/json.h"
#include "../llmtrain/text/spans.h"
#include "../llmtrain/text/templates.h"
#include "../llmtrain/text/tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Records

#define CHAT_TURNS "all|last|each"
enum { TURNS_ALL, TURNS_LAST, TURNS_EACH };
enum { CHAT_TEMPLATE_MAX = 1 << 20 };

typedef struct {
    Tokenizer* tokenizer;        // its generation.ends are read by chat_rules_set
    const char* chat_template;   // NULL: there is none
    char begin[TOKEN_BYTES_MAX + 1], end[TOKEN_BYTES_MAX + 1];  // what a template calls bos_token and eos_token
    const char* system;          // first message of conversations that have no system message; NULL: none
    int turns;                   // TURNS_ALL ...
    bool alpaca_text;            // instructions are written as Stanford's Alpaca does, without the chat template
} ChatRules;

typedef enum {
    FORM_MESSAGES, FORM_SHAREGPT, FORM_ALPACA, FORM_COMPLETION, FORM_PREFERENCE, FORM_UNPAIRED, FORM_SEGMENTS,
    FORM_TEXT, CHAT_FORMS
} ChatForm;
static const char* const CHAT_FORM_NAMES[CHAT_FORMS] = {
    "messages", "ShareGPT", "Alpaca", "prompt and completion", "preference", "unpaired preference", "segments", "text"};

// What becomes a document, or with --turns each several: messages for the template, or texts that follow each other.
typedef struct {
    ChatMessage* messages;       // (count), owned; a text has no role
    bool* trains;                // (count), owned
    size_t count, message_places, train_places;
    bool of_turns;               // they are messages
    bool alone;                  // texts that an end-of-text token follows, and begin-of-text precedes where it is used
    SpanKind kind;
} ChatSample;

typedef struct {
    const char* what;            // file and line, for messages
    const ChatRules* rules;
    Json json;                   // texts point into it
    ChatForm form;
    ChatSample samples[2];       // (count): one, or those of a pair
    size_t count;
    char** owned;                // (owned_count), owned: texts that were put together
    size_t owned_count, owned_places;
    Error* error;
} ChatRecord;

static inline void chat_record_close(ChatRecord* r) {
    for (int i = 0; i < 2; i++) free(r->samples[i].messages), free(r->samples[i].trains);
    for (size_t i = 0; i < r->owned_count; i++) free(r->owned[i]);
    free(r->owned);
    json_free(&r->json);
}

__attribute__((format(printf, 2, 3))) static inline bool chat_fail(const ChatRecord* r, const char* format, ...) {
    char text[900];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return fail_with(r->error, "%.600s: %s", r->what, text);
}

static inline bool chat_memory(const ChatRecord* r) { return chat_fail(r, "out of memory; close other programs"); }

static inline bool chat_push(ChatRecord* r, ChatSample* s, const char* role, const char* text, size_t bytes,
                             bool trains) {
    if (!memory_grow(&s->messages, &s->message_places, s->count + 1, sizeof *s->messages) ||
        !memory_grow(&s->trains, &s->train_places, s->count + 1, sizeof *s->trains)) return chat_memory(r);
    ChatMessage message = {role, text, bytes};
    s->messages[s->count] = message;
    s->trains[s->count++] = trains;
    return true;
}

// Whether a member says nothing: it is not there, null, or empty.
static inline bool chat_absent(const Json* json, uint32_t node) {
    if (node == JSON_NONE || json_is(json, node, JSON_NULL) || json_is(json, node, JSON_FALSE)) return true;
    bool list = json_is(json, node, JSON_ARRAY) || json_is(json, node, JSON_OBJECT);
    return (list && json_count(json, node) == 0) || (json_is(json, node, JSON_STRING) && json->nodes[node].bytes == 0);
}

static inline bool chat_is_text(const ChatRecord* r, uint32_t node) { return json_is(&r->json, node, JSON_STRING); }

// Refuses members that would change the text, and are not supported.
static inline bool chat_refuse(const ChatRecord* r, uint32_t node, const char* const* names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!chat_absent(&r->json, json_get(&r->json, node, names[i])))
            return chat_fail(r, "\"%s\" is not supported; write it into the text, or remove it", names[i]);
    return true;
}

// Makes room for a text that is put together; the record owns it.
static inline char* chat_own(ChatRecord* r, size_t bytes) {
    char* text = (char*)malloc(bytes + 1);
    if (!text || !memory_grow(&r->owned, &r->owned_places, r->owned_count + 1, sizeof *r->owned)) {
        free(text);
        chat_memory(r);
        return NULL;
    }
    return r->owned[r->owned_count++] = text;
}

static inline bool chat_string(const ChatRecord* r, const char** text, size_t* bytes, uint32_t node, const char* name) {
    if (!chat_is_text(r, node)) return chat_fail(r, "\"%s\" is not a string", name);
    *text = r->json.text + r->json.nodes[node].start;
    *bytes = r->json.nodes[node].bytes;
    return true;
}

// The content of a message: a string, or a list of parts that are texts, which are joined.
static inline bool chat_content(ChatRecord* r, const char** text, size_t* bytes, uint32_t node, const char* name) {
    const Json* json = &r->json;
    if (!json_is(json, node, JSON_ARRAY)) return chat_string(r, text, bytes, node, name);
    size_t all = 0;
    for (uint32_t part = json_first(json, node); part != JSON_NONE; part = json_next(json, part)) {
        char type[32] = "";
        json_string(json, json_get(json, part, "type"), type, sizeof type);
        if (!chat_is_text(r, json_get(json, part, "text")) || (type[0] && strcmp(type, "text") != 0))
            return chat_fail(r, "\"%s\" has a part that is not a text (%s), which is not supported; remove it", name,
                             type[0] ? type : "it has no type");
        all += json->nodes[json_get(json, part, "text")].bytes;
    }
    char* joined = chat_own(r, all);
    if (!joined) return false;
    *text = joined;
    *bytes = all;
    for (uint32_t part = json_first(json, node); part != JSON_NONE; part = json_next(json, part)) {
        const JsonNode* piece = &json->nodes[json_get(json, part, "text")];
        memcpy(joined, json->text + piece->start, piece->bytes);
        joined += piece->bytes;
    }
    *joined = 0;
    return true;
}

static const struct { const char *name, *role; } CHAT_ROLES[] = {
    {"system", "system"}, {"developer", "developer"}, {"user", "user"}, {"assistant", "assistant"}, {"tool", "tool"},
    // Of ShareGPT, in any case.
    {"human", "user"}, {"gpt", "assistant"}, {"chatgpt", "assistant"}, {"bot", "assistant"}, {"model", "assistant"},
    {"function", "tool"}, {"observation", "tool"},
};
enum { CHAT_ROLES_EXACT = 5 };

// NULL: no such role. `loose`: also by another name, in any case, with spaces around it.
static inline const char* chat_role(const char* name, bool loose) {
    char lower[32] = "";
    size_t length = strlen(name);
    while (loose && length > 0 && name[length - 1] == ' ') length--;
    for (; loose && length > 0 && *name == ' '; length--) name++;
    if (length >= sizeof lower) return NULL;
    for (size_t i = 0; i < length; i++)
        lower[i] = loose && name[i] >= 'A' && name[i] <= 'Z' ? (char)(name[i] - 'A' + 'a') : name[i];
    size_t known = loose ? sizeof CHAT_ROLES / sizeof CHAT_ROLES[0] : (size_t)CHAT_ROLES_EXACT;
    for (size_t i = 0; i < known; i++) if (strcmp(CHAT_ROLES[i].name, lower) == 0) return CHAT_ROLES[i].role;
    return NULL;
}

// Reads what a message says of its own training: 0 or 1, false or true.
static inline bool chat_mask(const ChatRecord* r, bool* trains, uint32_t node, bool assistant) {
    static const char* const names[] = {"loss_mask", "trainable", "train", "weight"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        uint32_t mask = json_get(&r->json, node, names[i]);
        bool on = false;
        double number = 0;
        if (mask == JSON_NONE || json_is(&r->json, mask, JSON_NULL)) continue;
        bool known = json_bool(&r->json, mask, &on);
        if (!known) known = json_number(&r->json, mask, &number) && (number == 0 || number == 1), on = number == 1;
        if (!known) return chat_fail(r, "\"%s\" of a message is neither 0, 1, false nor true", names[i]);
        if (on && !assistant)
            return chat_fail(r, "\"%s\" is on for a message that is not the assistant's; only answers are trained",
                             names[i]);
        *trains = *trains && on;
    }
    return true;
}

// may_train: an answer of this part of the record is trained unless its message says otherwise.
static inline bool chat_message(ChatRecord* r, ChatSample* s, uint32_t node, bool may_train) {
    static const char* const refused[] = {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"};
    const Json* json = &r->json;
    char name[64] = "";
    if (!json_is(json, node, JSON_OBJECT)) return chat_fail(r, "message %zu is not an object", s->count + 1);
    bool loose = json_get(json, node, "role") == JSON_NONE;  // ShareGPT
    uint32_t who = json_get(json, node, loose ? "from" : "role"), content = json_get(json, node, "content");
    if (content == JSON_NONE) content = json_get(json, node, "value");
    if (!chat_is_text(r, who))
        return chat_fail(r, "message %zu has no \"role\" (or \"from\") that is a string", s->count + 1);
    const char *role = json_string(json, who, name, sizeof name) ? chat_role(name, loose) : NULL;
    const char* text = NULL;
    size_t bytes = 0;
    if (!role)
        return chat_fail(r, "message %zu has the unknown role '%.40s'; rename it to system, user, assistant or tool",
                         s->count + 1, json->text + json->nodes[who].start);
    if (!chat_refuse(r, node, refused, sizeof refused / sizeof refused[0])) return false;
    if (content == JSON_NONE || json_is(json, content, JSON_NULL))
        return chat_fail(r, "message %zu has no \"content\" (or \"value\")", s->count + 1);
    bool assistant = strcmp(role, "assistant") == 0, trains = assistant && may_train;
    return chat_content(r, &text, &bytes, content, "content") && chat_mask(r, &trains, node, assistant) &&
           chat_push(r, s, role, text, bytes, trains);
}

// Messages: a list, or one. `name` of the member.
static inline bool chat_messages(ChatRecord* r, ChatSample* s, uint32_t node, const char* name, bool may_train) {
    const Json* json = &r->json;
    s->of_turns = true;
    if (json_is(json, node, JSON_OBJECT)) return chat_message(r, s, node, may_train);
    if (!json_is(json, node, JSON_ARRAY)) return chat_fail(r, "\"%s\" is not a list of messages", name);
    if (json_count(json, node) == 0) return chat_fail(r, "\"%s\" is an empty conversation", name);
    for (uint32_t i = json_first(json, node); i != JSON_NONE; i = json_next(json, i))
        if (!chat_message(r, s, i, may_train)) return false;
    return true;
}

// A prompt and what is trained after it: two strings, or messages, where an answer may be a string, too.
static inline bool chat_exchange(ChatRecord* r, ChatSample* s, uint32_t prompt, uint32_t answer,
                                 const char* prompt_name, const char* name) {
    const char* text = NULL;
    size_t bytes = 0;
    bool said = chat_is_text(r, answer);
    if (chat_is_text(r, prompt)) {
        if (!said) return chat_fail(r, "\"%s\" is a string, and \"%s\" is not; give both as strings, or as messages",
                                    prompt_name, name);
        s->alone = true;
        return chat_string(r, &text, &bytes, prompt, prompt_name) && chat_push(r, s, NULL, text, bytes, false) &&
               chat_string(r, &text, &bytes, answer, name) && chat_push(r, s, NULL, text, bytes, true);
    }
    if (!chat_messages(r, s, prompt, prompt_name, false)) return false;
    if (!said) return chat_messages(r, s, answer, name, true);
    return chat_string(r, &text, &bytes, answer, name) && chat_push(r, s, "assistant", text, bytes, true);
}

static inline bool chat_same_message(const ChatSample* a, const ChatSample* b, size_t i) {
    const ChatMessage *x = &a->messages[i], *y = &b->messages[i];
    bool role = x->role && y->role ? strcmp(x->role, y->role) == 0 : x->role == y->role;
    return role && x->bytes == y->bytes && memcmp(x->content, y->content, x->bytes) == 0;
}

static inline size_t chat_common(const ChatSample* a, const ChatSample* b) {
    size_t common = 0;
    while (common < min_size(a->count, b->count) && chat_same_message(a, b, common)) common++;
    return common;
}

// A pair of answers to a prompt. Two whole conversations have as their prompt the messages with which both begin.
static inline bool chat_read_pair(ChatRecord* r) {
    static const char* const names[2] = {"chosen", "rejected"};
    const Json* json = &r->json;
    uint32_t prompt = json_get(json, 0, "prompt"), answers[2];
    const char* prompt_name = "prompt";
    r->count = 2;
    for (int i = 0; i < 2; i++) {
        answers[i] = json_get(json, 0, names[i]);
        if (answers[i] == JSON_NONE || json_is(json, answers[i], JSON_NULL))
            return chat_fail(r, "a pair has no \"%s\" answer", names[i]);
    }
    bool whole = json_is(json, answers[0], JSON_ARRAY) && json_is(json, answers[1], JSON_ARRAY) &&
                 (chat_absent(json, prompt) || chat_is_text(r, prompt));
    static const char* const others[2] = {"messages", "conversations"};
    for (int i = 0; i < 2 && !whole && prompt == JSON_NONE; i++) prompt = json_get(json, 0, prompt_name = others[i]);
    if (!whole && prompt == JSON_NONE) return chat_fail(r, "a pair has no \"prompt\"");
    for (int i = 0; i < 2; i++) {
        ChatSample* s = &r->samples[i];
        s->kind = i == 0 ? SPAN_CHOSEN : SPAN_REJECTED;
        if (whole ? !chat_messages(r, s, answers[i], names[i], true)
                  : !chat_exchange(r, s, prompt, answers[i], prompt_name, names[i])) return false;
    }
    size_t common = chat_common(&r->samples[0], &r->samples[1]);
    if (whole && common == 0)
        return chat_fail(r, "\"chosen\" and \"rejected\" do not begin with the same message; give their \"prompt\"");
    for (int i = 0; whole && i < 2; i++)
        for (size_t m = 0; m < common; m++) r->samples[i].trains[m] = false;
    return true;
}

// Stanford's published text of an instruction.
static inline bool chat_alpaca_text(ChatRecord* r, ChatSample* s, const char* instruction, size_t bytes,
                                    const char* input, size_t input_bytes) {
    static const char alone[] = "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n";
    static const char with_input[] = "Below is an instruction that describes a task, paired with an input that "
        "provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\n";
    static const char before_input[] = "\n\n### Input:\n", before_answer[] = "\n\n### Response:";
    bool more = input_bytes > 0;
    s->alone = true;
    return chat_push(r, s, NULL, more ? with_input : alone, strlen(more ? with_input : alone), false) &&
           chat_push(r, s, NULL, instruction, bytes, false) &&
           (!more || (chat_push(r, s, NULL, before_input, strlen(before_input), false) &&
                      chat_push(r, s, NULL, input, input_bytes, false))) &&
           chat_push(r, s, NULL, before_answer, strlen(before_answer), false);
}

static inline bool chat_read_alpaca(ChatRecord* r, ChatSample* s) {
    static const char* const refused[] = {"history"};
    const Json* json = &r->json;
    uint32_t input = json_get(json, 0, "input"), output = json_get(json, 0, "output");
    uint32_t system = json_get(json, 0, "system");
    const char *text = NULL, *more = "", *answer = NULL, *first = NULL;
    size_t bytes = 0, more_bytes = 0, answer_bytes = 0, first_bytes = 0;
    const char* name = output == JSON_NONE ? "response" : "output";
    if (output == JSON_NONE) output = json_get(json, 0, name);
    if (output == JSON_NONE) return chat_fail(r, "an instruction has no \"output\" or \"response\"");
    if (!chat_refuse(r, 0, refused, 1) ||
        !chat_string(r, &text, &bytes, json_get(json, 0, "instruction"), "instruction") ||
        (!chat_absent(json, input) && !chat_string(r, &more, &more_bytes, input, "input")) ||
        !chat_string(r, &answer, &answer_bytes, output, name)) return false;
    if (r->rules->alpaca_text) {
        if (!chat_absent(json, system)) return chat_fail(r, "\"system\" has no place in the text of --alpaca-text");
        return chat_alpaca_text(r, s, text, bytes, more, more_bytes) &&
               chat_push(r, s, NULL, answer, answer_bytes, true);
    }
    s->of_turns = true;
    if (!chat_absent(json, system) && (!chat_string(r, &first, &first_bytes, system, "system") ||
                                       !chat_push(r, s, "system", first, first_bytes, false))) return false;
    if (more_bytes > 0) {
        char* both = chat_own(r, bytes + 2 + more_bytes);
        if (!both) return false;
        memcpy(both, text, bytes);
        memcpy(both + bytes, "\n\n", 2);
        memcpy(both + bytes + 2, more, more_bytes + 1);
        text = both;
        bytes += 2 + more_bytes;
    }
    return chat_push(r, s, "user", text, bytes, false) && chat_push(r, s, "assistant", answer, answer_bytes, true);
}

static inline bool chat_read_segments(ChatRecord* r, ChatSample* s, uint32_t list) {
    const Json* json = &r->json;
    if (!json_is(json, list, JSON_ARRAY) || json_count(json, list) == 0)
        return chat_fail(r, "\"segments\" is not a list of texts, or is empty");
    for (uint32_t i = json_first(json, list); i != JSON_NONE; i = json_next(json, i)) {
        const char* text = NULL;
        size_t bytes = 0;
        bool trains = false;
        if (!json_bool(json, json_get(json, i, "label"), &trains))
            return chat_fail(r, "a segment has no \"label\" that is true or false");
        if (!chat_string(r, &text, &bytes, json_get(json, i, "text"), "text") ||
            !chat_push(r, s, NULL, text, bytes, trains)) return false;
    }
    return true;
}

static inline bool chat_read_unpaired(ChatRecord* r, ChatSample* s, uint32_t completion, uint32_t label) {
    bool good = false;
    double number = 0;
    if (!json_bool(&r->json, label, &good)) {
        if (!json_number(&r->json, label, &number) || (number != 0 && number != 1))
            return chat_fail(r, "\"label\" of a completion is neither true nor false");
        good = number == 1;
    }
    s->kind = good ? SPAN_DESIRABLE : SPAN_UNDESIRABLE;
    return chat_exchange(r, s, json_get(&r->json, 0, "prompt"), completion, "prompt", "completion");
}

// The names of the members of the line, for a message.
static inline const char* chat_names(char names[200], const Json* json) {
    size_t used = 0;
    names[0] = 0;
    for (uint32_t i = json_first(json, 0); i != JSON_NONE && used < 150; i = json_next(json, i))
        used += (size_t)snprintf(names + used, 200 - used, "%s\"%.40s\"", used ? ", " : "", json_key(json, i));
    return names;
}

static inline bool chat_read_form(ChatRecord* r) {
    static const char* const refused[] = {"tools", "functions", "documents", "images", "chat_template_kwargs"};
    const Json* json = &r->json;
    ChatSample* s = &r->samples[0];
    char names[200];
    if (!json_is(json, 0, JSON_OBJECT)) return chat_fail(r, "it is not a JSON object");
    if (!chat_refuse(r, 0, refused, sizeof refused / sizeof refused[0])) return false;
    uint32_t segments = json_get(json, 0, "segments"), completion = json_get(json, 0, "completion");
    uint32_t label = json_get(json, 0, "label"), messages = json_get(json, 0, "messages"), prompt;
    uint32_t conversations = json_get(json, 0, "conversations"), text = json_get(json, 0, "text");
    r->count = 1;
    if (json_get(json, 0, "chosen") != JSON_NONE || json_get(json, 0, "rejected") != JSON_NONE)
        return r->form = FORM_PREFERENCE, chat_read_pair(r);
    if (segments != JSON_NONE) return r->form = FORM_SEGMENTS, chat_read_segments(r, s, segments);
    if (completion != JSON_NONE) {
        prompt = json_get(json, 0, "prompt");
        if (prompt == JSON_NONE) return chat_fail(r, "a completion has no \"prompt\"");
        if (label != JSON_NONE) return r->form = FORM_UNPAIRED, chat_read_unpaired(r, s, completion, label);
        return r->form = FORM_COMPLETION, chat_exchange(r, s, prompt, completion, "prompt", "completion");
    }
    if (messages != JSON_NONE) return r->form = FORM_MESSAGES, chat_messages(r, s, messages, "messages", true);
    if (conversations != JSON_NONE)
        return r->form = FORM_SHAREGPT, chat_messages(r, s, conversations, "conversations", true);
    if (json_get(json, 0, "instruction") != JSON_NONE) return r->form = FORM_ALPACA, chat_read_alpaca(r, s);
    if (text != JSON_NONE) {
        const char* all = NULL;
        size_t bytes = 0;
        r->form = FORM_TEXT;
        s->alone = true;
        return chat_string(r, &all, &bytes, text, "text") && chat_push(r, s, NULL, all, bytes, true);
    }
    return chat_fail(r, "none of the known forms has its members (%s); give messages, conversations, instruction and "
                     "output, prompt and completion, prompt, chosen and rejected, segments, or text",
                     chat_names(names, json));
}

// Reads a line; the caller closes the record, also after a failure.
static inline bool chat_record_read(ChatRecord* r, const ChatRules* rules, const char* line, size_t bytes,
                                    const char* what, Error* error) {
    memset(r, 0, sizeof *r);
    r->what = what;
    r->rules = rules;
    r->error = error;
    for (; bytes > 0 && strchr(" \t", *line) && *line; bytes--) line++;
    if (bytes > 0 && *line == '[')
        return chat_fail(r, "it begins a JSON array, but --chat wants an object on each line; write the array's "
                         "elements on lines of their own (jq -c '.[]')");
    if (!json_parse_as_python(&r->json, line, bytes, what, error) || !chat_read_form(r)) return false;
    for (size_t i = 0; i < r->count && rules->system; i++) {
        ChatSample* s = &r->samples[i];
        if (!s->of_turns || strcmp(s->messages[0].role, "system") == 0 ||
            strcmp(s->messages[0].role, "developer") == 0) continue;
        if (!chat_push(r, s, NULL, "", 0, false)) return false;
        memmove(s->messages + 1, s->messages, (s->count - 1) * sizeof *s->messages);
        memmove(s->trains + 1, s->trains, (s->count - 1) * sizeof *s->trains);
        ChatMessage first = {"system", rules->system, strlen(rules->system)};
        s->messages[0] = first;
        s->trains[0] = false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Borders

typedef enum { DROP_NONE, DROP_NOTHING, DROP_EQUAL, DROP_REWRITTEN, DROP_MERGED, DROP_KINDS } ChatDrop;
static const char* const CHAT_DROPS[DROP_KINDS] = {
    "", "no answer to train: there is none, or it is empty or masked", "the same answer chosen and rejected",
    "the template changes earlier turns when others follow (as without their thinking): try --turns last or each",
    "a token that reaches across the border of an answer: end the prompt where a word ends"};

typedef struct {
    size_t first, tokens;        // in the output's tokens
    size_t span, spans;          // in the output's spans, whose `first` is a position in the document
    SpanKind kind;
    bool begins;                 // it is the first of its group
    bool of_turns;
    int32_t last;                // the last token that is trained
} ChatDocument;

// Of many lines.
typedef struct {
    Tokens tokens;
    ChatDocument* documents;     // (document_count), owned
    size_t document_count, document_places;
    TrainedSpan* spans;          // (span_count), owned
    size_t span_count, span_places;
    Tokens whole, part;          // of a text, and of its beginning
    TemplateSpans ranges;        // of its answers, in bytes
} ChatOutput;

static inline void chat_output_free(ChatOutput* out) {
    tokens_free(&out->tokens);
    tokens_free(&out->whole);
    tokens_free(&out->part);
    free(out->documents);
    free(out->spans);
    free(out->ranges.list);
    memset(out, 0, sizeof *out);
}

typedef struct {
    ChatForm form;
    size_t documents;            // that it has added to the output
    uint32_t dropped[DROP_KINDS];
} ChatResult;

static inline bool chat_range(const ChatRecord* r, TemplateSpans* ranges, size_t first, size_t end) {
    if (!memory_grow(&ranges->list, &ranges->capacity, ranges->count + 1, sizeof *ranges->list)) return chat_memory(r);
    ranges->list[ranges->count].first = first;
    ranges->list[ranges->count++].end = end;
    return true;
}

// The text of the first `count` messages; the caller frees it.
static inline bool chat_render(const ChatRecord* r, char** text, size_t* bytes, TemplateSpans* spans,
                               const ChatSample* s, size_t count, bool answers) {
    const ChatRules* rules = r->rules;
    Error why;
    if (!rules->chat_template)
        return chat_fail(r, "the tokenizer has no chat template for a conversation; give --template FILE") ||
               fail_as(r->error, ERROR_USAGE);  // the line is not bad
    return template_render_spans(text, bytes, spans, rules->chat_template, s->messages, count, rules->begin, rules->end,
                                 answers, &why) || chat_fail(r, "%s", why.text);
}

static inline bool chat_wants(const ChatSample* s, size_t message, size_t only) {
    return s->trains[message] && (only == SIZE_MAX || message == only);
}

// Keeps of the ranges that the template marks those of the messages that are wanted.
static inline bool chat_select_ranges(const ChatRecord* r, TemplateSpans* ranges, const ChatSample* s, size_t count,
                                      size_t only) {
    size_t answers = 0, wanted = 0, kept = 0, k = 0;
    for (size_t i = 0; i < count; i++) {
        bool assistant = strcmp(s->messages[i].role, "assistant") == 0;
        answers += assistant;
        wanted += assistant && chat_wants(s, i, only);
    }
    if (ranges->count != answers) {
        if (wanted == answers || (only != SIZE_MAX && ranges->count == 1)) return true;
        return chat_fail(r, "the chat template marks %zu answers with generation, but there are %zu, so single ones "
                         "cannot be left out; mark each of them in the template", ranges->count, answers);
    }
    for (size_t i = 0; i < count; i++) {
        if (strcmp(s->messages[i].role, "assistant") != 0) continue;
        if (chat_wants(s, i, only)) ranges->list[kept++] = ranges->list[k];
        k++;
    }
    ranges->count = kept;
    return true;
}

static inline bool chat_begins_with(const char* text, size_t bytes, const char* begin, size_t begin_bytes) {
    return begin_bytes == 0 || (begin_bytes <= bytes && memcmp(text, begin, begin_bytes) == 0);
}

// Finds the answers by the texts of shorter conversations. *drop: they are not the beginning of the text.
static inline bool chat_find_ranges(const ChatRecord* r, ChatDrop* drop, TemplateSpans* ranges, const char* text,
                                    size_t bytes, const ChatSample* s, size_t count, size_t only) {
    for (size_t i = 0; i < count && *drop == DROP_NONE; i++) {
        char *before, *until = NULL;
        size_t first, end = bytes;
        if (!chat_wants(s, i, only)) continue;
        if (!chat_render(r, &before, &first, NULL, s, i, true)) return false;
        bool same = chat_begins_with(text, bytes, before, first), ok = true;
        free(before);
        if (same && i + 1 < count) {
            ok = chat_render(r, &until, &end, NULL, s, i + 1, false);
            // Phi 3 has the end-of-text token after the last turn alone.
            const char* last = r->rules->end;
            size_t tail = strlen(last);
            if (ok && !chat_begins_with(text, bytes, until, end) && end >= tail &&
                memcmp(until + end - tail, last, tail) == 0) end -= tail;
            same = ok && chat_begins_with(text, bytes, until, end) && end >= first;
            free(until);
        }
        if (!ok || (same && !chat_range(r, ranges, first, end))) return false;
        if (!same) *drop = DROP_REWRITTEN;
    }
    return true;
}

// How many of the tokens of a text are those of its first `bytes` bytes. *drop: the tokens of these are others.
static inline bool chat_position(ChatOutput* out, size_t* position, ChatDrop* drop, const ChatRules* rules,
                                 WordEncoder* encoder, const char* text, size_t all, size_t bytes, Error* error) {
    *position = out->whole.count;
    if (bytes == all) return true;
    out->part.count = 0;
    if (!tokenizer_encode_by(&out->part, rules->tokenizer, encoder, text, bytes, error)) return false;
    size_t count = *position = out->part.count;
    bool same = count == 0 || (count <= out->whole.count &&
                               memcmp(out->part.ids, out->whole.ids, count * sizeof(int32_t)) == 0);
    if (!same) *drop = DROP_MERGED;
    return true;
}

static inline bool chat_is_space(const Tokenizer* tokenizer, int32_t token) {
    size_t bytes, n;
    const char* text = tokenizer_piece(&bytes, tokenizer, token);
    for (; bytes > 0 && (n = utf8_space(text, bytes)) > 0; bytes -= n) text += n;
    return bytes == 0;
}

// Where an answer of tokens first to end - 1 ends: after the first token of those at its end, beside white space, that
// is no text; one that ends texts comes first.
static inline size_t chat_answer_end(const Tokens* tokens, const Tokenizer* tokenizer, size_t first, size_t end) {
    size_t tail = end, found = end;
    while (tail > first && (tokenizer_kind(tokenizer, tokens->ids[tail - 1]) == TOKEN_SPECIAL ||
                            chat_is_space(tokenizer, tokens->ids[tail - 1]))) tail--;
    for (size_t i = end; i-- > tail;)
        if (tokenizer_kind(tokenizer, tokens->ids[i]) == TOKEN_SPECIAL) found = i + 1;
    for (size_t i = end; i-- > tail;) if (tokenizer_ends(tokenizer, tokens->ids[i])) found = i + 1;
    return found;
}

// ------------------------------------------------------------------------------------------------
// 3. Documents

// Adds tokens first to end - 1 of the document to its spans; its first token cannot be trained.
static inline bool chat_add_span(ChatOutput* out, const ChatRecord* r, ChatDocument* d, size_t first, size_t end) {
    first = max_size(first, 1);
    if (first >= end) return true;
    TrainedSpan* last = d->spans > 0 ? &out->spans[out->span_count - 1] : NULL;
    if (last && last->first + last->tokens >= first) {
        last->tokens = (uint32_t)(end - last->first);
        return true;
    }
    if (!memory_grow(&out->spans, &out->span_places, out->span_count + 1, sizeof *out->spans)) return chat_memory(r);
    TrainedSpan span = {first, (uint32_t)(end - first), 1};
    out->spans[out->span_count++] = span;
    d->spans++;
    return true;
}

// Adds a document of the tokens of a text, out->whole, with those trained that are of its ranges. `cuts`: what follows
// the end of an answer is not trained.
static inline bool chat_add_document(ChatOutput* out, ChatDrop* drop, const ChatRecord* r, const ChatSample* s,
                                     WordEncoder* encoder, const char* text, size_t bytes, bool cuts) {
    const Tokenizer* tokenizer = r->rules->tokenizer;
    ChatDocument d = {.first = out->tokens.count, .span = out->span_count, .kind = s->kind,
                      .begins = s->kind != SPAN_REJECTED, .of_turns = s->of_turns};
    size_t begin = s->alone && tokenizer->begin_of_text >= 0, end = 0, trained = 0;
    out->whole.count = 0;
    if (!tokenizer_encode_by(&out->whole, tokenizer, encoder, text, bytes, r->error)) return false;
    for (size_t i = 0; i < out->ranges.count && *drop == DROP_NONE; i++) {
        size_t first, after;
        if (!chat_position(out, &first, drop, r->rules, encoder, text, bytes, out->ranges.list[i].first, r->error) ||
            !chat_position(out, &after, drop, r->rules, encoder, text, bytes, out->ranges.list[i].end, r->error))
            return false;
        if (*drop == DROP_NONE && cuts) after = chat_answer_end(&out->whole, tokenizer, first, after);
        if (*drop == DROP_NONE && !chat_add_span(out, r, &d, begin + first, begin + after)) return false;
        end = max_size(end, after);
    }
    if (*drop == DROP_NONE && s->alone) {  // the end-of-text token, which the text may have already
        if (tokenizer->end_of_text < 0)
            return chat_fail(r, "the tokenizer names no end-of-text token to end a text; name it as \"eos_token\" in "
                             "tokenizer_config.json next to it");
        bool ended = out->whole.count > 0 && out->whole.ids[out->whole.count - 1] == tokenizer->end_of_text;
        if (!ended && !tokens_append(&out->whole, &tokenizer->end_of_text, 1, r->error)) return false;
        if (d.spans > 0 && !chat_add_span(out, r, &d, begin + end, begin + out->whole.count)) return false;
    }
    if (*drop == DROP_NONE && d.spans == 0) *drop = DROP_NOTHING;
    if (*drop != DROP_NONE) return true;
    const TrainedSpan* last = &out->spans[out->span_count - 1];
    trained = (size_t)last->first + last->tokens;  // nothing after it is of use
    if ((begin && !tokens_append(&out->tokens, &tokenizer->begin_of_text, 1, r->error)) ||
        !tokens_append(&out->tokens, out->whole.ids, trained - begin, r->error)) return false;
    d.tokens = trained;
    const int32_t* ids = out->tokens.ids + d.first;
    d.last = ids[trained - 1];
    if (trained > 1 && ids[0] == ids[1] && ids[0] == tokenizer->begin_token)
        return chat_fail(r, "the text begins with two begin-of-text tokens; one is put there anyway: remove it from "
                         "the text, or from the template");
    if (!memory_grow(&out->documents, &out->document_places, out->document_count + 1, sizeof *out->documents))
        return chat_memory(r);
    out->documents[out->document_count++] = d;
    return true;
}

// The document of the first `count` messages, in which one answer is trained, or all that may be: only SIZE_MAX.
static inline bool chat_add_turns(ChatOutput* out, ChatDrop* drop, const ChatRecord* r, const ChatSample* s,
                                  WordEncoder* encoder, size_t count, size_t only) {
    char* text;
    size_t bytes;
    out->ranges.count = 0;
    if (!chat_render(r, &text, &bytes, &out->ranges, s, count, false)) return false;
    bool marked = out->ranges.count > 0;
    bool ok = marked ? chat_select_ranges(r, &out->ranges, s, count, only)
                     : chat_find_ranges(r, drop, &out->ranges, text, bytes, s, count, only);
    ok = ok && (*drop != DROP_NONE || chat_add_document(out, drop, r, s, encoder, text, bytes, !marked));
    free(text);
    return ok;
}

// The document of texts that follow each other.
static inline bool chat_add_texts(ChatOutput* out, ChatDrop* drop, const ChatRecord* r, const ChatSample* s,
                                  WordEncoder* encoder) {
    Text text = {NULL, 0, 0};
    bool ok = true;
    out->ranges.count = 0;
    for (size_t i = 0; ok && i < s->count; i++) {
        size_t bytes = s->messages[i].bytes;
        ok = text_reserve(&text, bytes + 1, r->error);
        if (ok && bytes > 0) memcpy(text.bytes + text.count, s->messages[i].content, bytes);
        if (ok && s->trains[i] && bytes > 0) ok = chat_range(r, &out->ranges, text.count, text.count + bytes);
        text.count += bytes;
    }
    ok = ok && chat_add_document(out, drop, r, s, encoder, text.bytes, text.count, false);
    text_free(&text);
    return ok;
}

// Removes what was added since the output had these counts.
static inline void chat_output_cut(ChatOutput* out, size_t documents, size_t spans, size_t tokens) {
    out->document_count = documents;
    out->span_count = spans;
    out->tokens.count = tokens;
}

// Adds the documents of a sample: one, or with --turns each one for each answer.
static inline bool chat_add_sample(ChatOutput* out, ChatResult* result, const ChatRecord* r, const ChatSample* s,
                                   WordEncoder* encoder) {
    int turns = s->kind == SPAN_PLAIN && s->of_turns ? r->rules->turns : TURNS_ALL;
    size_t last = SIZE_MAX;  // the last answer that is trained
    for (size_t i = 0; i < s->count; i++) if (s->trains[i]) last = i;
    if (last == SIZE_MAX) {
        result->dropped[DROP_NOTHING]++;
        return true;
    }
    for (size_t i = turns == TURNS_EACH ? 0 : last; i <= last; i++) {
        ChatDrop drop = DROP_NONE;
        size_t spans = out->span_count, tokens = out->tokens.count;
        if (turns == TURNS_EACH && !s->trains[i]) continue;
        bool ok = s->of_turns ? chat_add_turns(out, &drop, r, s, encoder, i + 1, turns == TURNS_ALL ? SIZE_MAX : i)
                              : chat_add_texts(out, &drop, r, s, encoder);
        if (!ok) return false;
        if (drop != DROP_NONE) {
            result->dropped[drop]++;
            chat_output_cut(out, out->document_count, spans, tokens);
        }
    }
    return true;
}

// Adds the documents of a line to the output. A failure says what is wrong with the line, and adds none.
static inline bool chat_line(ChatOutput* out, ChatResult* result, const ChatRules* rules, WordEncoder* encoder,
                             const char* line, size_t bytes, const char* what, Error* error) {
    ChatRecord r;
    size_t documents = out->document_count, spans = out->span_count, tokens = out->tokens.count;
    memset(result, 0, sizeof *result);
    bool ok = chat_record_read(&r, rules, line, bytes, what, error);
    result->form = r.form;
    bool pair = ok && r.count == 2;
    if (pair && r.samples[0].count == r.samples[1].count &&
        chat_common(&r.samples[0], &r.samples[1]) == r.samples[0].count) {
        result->dropped[DROP_EQUAL]++;
    } else {
        for (size_t i = 0; ok && i < r.count; i++) ok = chat_add_sample(out, result, &r, &r.samples[i], encoder);
    }
    // A pair is dropped whole, and counted once.
    bool halved = pair && out->document_count - documents < 2;
    for (int i = 1, seen = 0; halved && i < DROP_KINDS; i++) {
        result->dropped[i] = !seen && result->dropped[i] > 0;
        seen |= result->dropped[i] > 0;
    }
    if (!ok || halved) chat_output_cut(out, documents, spans, tokens);
    result->documents = out->document_count - documents;
    chat_record_close(&r);
    return ok;
}

// ------------------------------------------------------------------------------------------------

// Reads the ids that end a generated text, as generate does: eos_token_id of generation_config.json in the tokenizer's
// directory, or else of config.json.
static inline bool chat_read_ends(TokenIds* ids, const char* directory, Error* error) {
    static const char* const names[2] = {"generation_config.json", "config.json"};
    ids->count = 0;
    for (int file = 0; file < 2 && ids->count == 0; file++) {
        char path[FILE_PATH_MAX], *text;
        size_t bytes;
        Json json;
        bool there;
        snprintf(path, sizeof path, "%.3900s/%s", directory, names[file]);
        if (!path_look(&there, path, error)) return false;
        if (!there) continue;
        if (!file_read(path, CHAT_TEMPLATE_MAX, &text, &bytes, error)) return false;
        bool ok = json_parse(&json, text, bytes, path, error);
        free(text);
        if (!ok) return false;
        uint32_t node = json_get(&json, 0, "eos_token_id");
        bool list = json_is(&json, node, JSON_ARRAY);
        for (uint32_t i = list ? json_first(&json, node) : node, next; i != JSON_NONE; i = next) {
            uint64_t id;
            next = list ? json_next(&json, i) : JSON_NONE;
            if (json_u64(&json, i, &id) && id < INT32_MAX && ids->count < END_TOKENS_MAX)
                ids->ends[ids->count++] = (int32_t)id;
        }
        json_free(&json);
    }
    return true;
}

static inline char* chat_token_text(char text[TOKEN_BYTES_MAX + 1], const Tokenizer* tokenizer, int32_t token) {
    size_t bytes = 0;
    const char* piece = token < 0 ? "" : tokenizer_piece(&bytes, tokenizer, token);
    memcpy(text, piece, bytes);
    text[bytes] = 0;
    return text;
}

// path: of the tokenizer, which must outlive the rules.
static inline bool chat_rules_set(ChatRules* rules, Tokenizer* tokenizer, const char* path, Error* error) {
    memset(rules, 0, sizeof *rules);
    rules->tokenizer = tokenizer;
    rules->chat_template = tokenizer->chat_template;
    chat_token_text(rules->begin, tokenizer, tokenizer->begin_token);
    chat_token_text(rules->end, tokenizer, tokenizer->end_of_text);
    return !directory_exists(path) || chat_read_ends(&tokenizer->generation, path, error);
}

#endif  // LLMTRAIN_CHAT_H
