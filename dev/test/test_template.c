// test_template.c: chat templates against jinja2's results (dev/peers/templates.py wrote the fixture), and wrong
// templates.
//
//   build/test_template [FILE]                   the fixture is dev/test/fixtures/templates.json

#include "harness.h"
#include "llmtrain/base/files.h"
#include "llmtrain/base/json.h"
#include "llmtrain/text/templates.h"

enum { TEMPLATES_MAX = 1000, CONVERSATIONS_MAX = 16, MESSAGES_MAX = 16 };
static ChatMessage conversations[CONVERSATIONS_MAX][MESSAGES_MAX];
static size_t conversation_counts[CONVERSATIONS_MAX];

static const char* json_text(const Json* json, uint32_t node) { return json->text + json->nodes[node].start; }

static void read_conversations(const Json* json) {
    size_t c = 0;
    for (uint32_t node = json_first(json, json_get(json, 0, "conversations")); node != JSON_NONE;
         node = json_next(json, node), c++) {
        for (uint32_t m = json_first(json, node); m != JSON_NONE; m = json_next(json, m)) {
            uint32_t role = json_first(json, m);
            need(c < CONVERSATIONS_MAX && conversation_counts[c] < MESSAGES_MAX, "room for the conversations");
            ChatMessage message = {json_text(json, role), json_text(json, json_next(json, role)), 0};
            conversations[c][conversation_counts[c]++] = message;
        }
    }
}

// Templates that both refuse are right; those that only this refuses, naming the feature, are counted, not failed.
static void test_fixture(const char* path) {
    Error error;
    Json json;
    size_t texts = 0, refused = 0, missing = 0;
    char* content;
    size_t bytes = 0;
    need(file_read(path, (size_t)1 << 24, &content, &bytes, &error), "%s", error.text);
    need(json_parse(&json, content, bytes, path, &error), "%s", error.text);
    free(content);
    read_conversations(&json);
    const char* templates[TEMPLATES_MAX];
    size_t template_count = 0;
    for (uint32_t node = json_first(&json, json_get(&json, 0, "templates")); node != JSON_NONE;
         node = json_next(&json, node)) {
        need(template_count < TEMPLATES_MAX, "room for the templates");
        templates[template_count++] = json_text(&json, node);
    }
    for (uint32_t node = json_first(&json, json_get(&json, 0, "cases")); node != JSON_NONE;
         node = json_next(&json, node)) {
        uint32_t number = json_first(&json, node), which = json_next(&json, number);
        uint32_t answers = json_next(&json, which), expected = json_next(&json, answers);
        uint64_t c = 0, t = 0;
        bool add = false, fails = json.nodes[expected].type == JSON_NULL;
        need(json_u64(&json, which, &c) && json_bool(&json, answers, &add) && c < CONVERSATIONS_MAX &&
                 json_u64(&json, number, &t) && t < template_count, "a case");
        char* text;
        bool ok = template_render(&text, &bytes, templates[t], conversations[c], conversation_counts[c],
                                  "<s>", "</s>", add, &error);
        if (ok) {
            expect(!fails && strcmp(text, json_text(&json, expected)) == 0, "%s\n  gives    '%s'\n  and not  '%s'",
                   templates[t], text, fails ? "an error" : json_text(&json, expected));
            texts++;
        } else if (fails) {
            refused++;
        } else {
            expect(strstr(error.text, "not supported") != NULL, "%s\n  %s", templates[t], error.text);
            missing++;
        }
        if (ok) free(text);
    }
    json_free(&json);
    printf("%zu texts, %zu refused as jinja2 does, %zu refused by name\n", texts, refused, missing);
    expect(texts > 150 && missing * 20 < texts, "most are rendered");
    verdict("templates give what jinja2 gives");
}

static void renders(const char* source, const char* content, const char* expected) {
    Error error;
    char* text;
    size_t bytes;
    ChatMessage message = {"user", content, 0};
    bool ok = template_render(&text, &bytes, source, &message, 1, "", "", true, &error);
    check(ok && strcmp(text, expected) == 0, "%.60s (%.60s)", source, ok ? "" : error.text);
    if (ok) free(text);
}

// White space is what Python strips, and replacing text by many occurrences takes one pass.
static void test_texts(void) {
    renders("{{ messages[0].content | trim }}",
            "\xC2\xA0\xE3\x80\x80 a \xC3\xA9\xE2\x80\xA8\xC2\x85\x1F", "a \xC3\xA9");
    renders("{{ messages[0].content.rstrip() }}", " \xE2\x80\x8B\xE2\x80\x83", " \xE2\x80\x8B");
    renders("{{ messages[0].content.strip() }}", "\xE3\x80\x80", "");
    enum { PARTS = 100000 };
    char *many = (char*)malloc(PARTS + 1), *twice = (char*)malloc(2 * PARTS + 1);
    memset(many, 'a', PARTS);
    memset(twice, 'b', 2 * PARTS);
    many[PARTS] = twice[2 * PARTS] = 0;
    renders("{{ messages[0].content.replace('a', 'bb') }}", many, twice);
    free(many);
    free(twice);
}

static void refuses(const char* source, const char* says) {
    Error error;
    char* text;
    size_t bytes;
    ChatMessage messages[2] = {{"user", "a", 0}, {"assistant", "b", 0}};
    error.text[0] = 0;
    bool ok = template_render(&text, &bytes, source, messages, 2, "", "", true, &error);
    check(!ok && strstr(error.text, says) != NULL, "refused: %.60s (%s)", source, ok ? "it is not" : error.text);
    if (ok) free(text);
}

// What apply_chat_template gives a template besides messages: defined functions, the date, and bos_token only if there
// is one. The date may change between two readings of the clock.
static void test_names(void) {
    char today[2][64];
    Error error;
    ChatMessage message = {"user", "a", 0};
    const char* source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}never{% endif %}";
    bool same = false;
    for (int i = 0; i < 2; i++) {
        time_t now = time(NULL);
        strftime(today[i], sizeof today[i], "%d %b %Y", localtime(&now));
        char* text;
        size_t bytes;
        bool ok = template_render(&text, &bytes, source, &message, 1, "", "", true, &error);
        same = same || (ok && strcmp(text, today[i]) == 0);
        if (ok) free(text);
    }
    check(same, "strftime_now gives today's date, %s", today[1]);
    renders("{{ raise_exception is defined }} {{ namespace is none }} {{ other is defined }}", "", "True False False");
    renders("{{ namespace == range }} {{ range == range }}", "", "False True");
    renders("{{ bos_token is defined }}[{{ bos_token }}]", "", "False[]");
    refuses("{{ bos_token + 'a' }}", "the operator '+'");
}

static void test_syntax(void) {
    renders("{% for c in 'a--b-c'.split('-') if c %}{{ loop.index }}{{ c }}/{{ loop.length }} {% endfor %}", "",
            "1a/3 2b/3 3c/3 ");
    renders("{% set c = 'z' %}{% for c in 'a-b'.split('-') if c != 'a' %}{{ c }}{% endfor %}{{ c }}", "", "bz");
    renders("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "x", "x");
    renders("{% for c in missing if c %}{{ c }}{% endfor %}.", "", ".");
    renders("{{ -1 is number }} {{ -1|string }} {{ - -1 }} {{ missing is iterable }} {{ none is sequence }}", "",
            "True -1 1 True False");
    // Line breaks of any system, and any white space at the beginning of a line.
    renders("a\r\n  {% if true %}\r\nb\rc\r\n{% endif %}\r\nd\r\n", "", "a\nb\nc\nd");
    renders("\xC2\xA0\v{% if true %}a\xE3\x80\x80{%- endif -%}\xE2\x80\x83\x1C b", "", "ab");
}

// Where the texts of generation tags are: in their order, without empty ones, and with white space as Jinja leaves it.
static void test_generations(void) {
    static const char source[] = "{% for m in messages %}{{ m.role }}:{% generation %}\n{{ m.content }}.\n"
                                 "{% endgeneration %}{% generation %}{% endgeneration %}{% endfor %}!";
    ChatMessage messages[2] = {{"user", "a", 0}, {"assistant", "bcd", 0}};
    TemplateSpans spans = {NULL, 0, 0};
    Error error;
    char* text;
    size_t bytes;
    for (int again = 0; again < 2; again++) {
        bool ok = template_render_spans(&text, &bytes, &spans, source, messages, 2, "", "", false, &error);
        expect(ok && strcmp(text, "user:a.\nassistant:bcd.\n!") == 0, "%s", ok ? text : error.text);
        expect(spans.count == 2 && spans.list[0].first == 5 && spans.list[0].end == 8 && spans.list[1].first == 18 &&
               spans.list[1].end == 23, "%zu generations", spans.count);
        if (ok) free(text);
    }
    bool ok = template_render_spans(&text, &bytes, &spans, "{{ messages }}{#", messages, 2, "", "", false, &error);
    expect(!ok && spans.count == 0, "%zu generations of a template that fails", spans.count);
    ok = template_render_spans(&text, &bytes, &spans, "{{ bos_token }}", messages, 2, "", "", false, &error);
    expect(ok && spans.count == 0, "%zu generations", spans.count);
    if (ok) free(text);
    static const char* const refused[][2] = {
        {"{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x }}", "within a macro, block or filter"},
        {"{% macro f() %}{% generation %}a{% endgeneration %}{% endmacro %}b{{ f() }}",
         "within a macro, block or filter"},
        {"{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", "within another the statement"}};
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        ok = template_render_spans(&text, &bytes, &spans, refused[i][0], messages, 2, "", "", false, &error);
        expect_refusal(ok, &error, refused[i][1], refused[i][0]);
        ok = template_render(&text, &bytes, refused[i][0], messages, 2, "", "", false, &error);
        expect(ok, "%s: without spans: %s", refused[i][0], error.text);
        if (ok) free(text);
    }
    free(spans.list);
    verdict("generations: where they are in the text; in a macro, a block or another they are refused");
}

static void test_refusals(void) {
    refuses("{% call f() %}{% endcall %}", "the statement 'call'");
    refuses("{{ messages | items }}", "the filter 'items'");
    refuses("{{ messages | tojson(indent=4) }}", "in a filter the name 'indent'");
    refuses("{{ messages | map(default='x') }}", "in a filter the name 'default'");
    refuses("{{ messages | map(attribute='content.x') | list }}", "in a filter the attribute 'content.x'");
    refuses("{{ messages[0].get(key='role') }}", "here the name 'key'");
    refuses("{{ namespace(1) }}", "without a name the value of 'namespace'");
    refuses("{{ namespace | tojson }}", "with such a value the filter 'tojson'");
    refuses("{{ {'a': 1} }}", "has a dictionary, which is not supported");
    refuses("{{ range(2000000) }}", "with these values the function 'range'");
    refuses("{{ [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17] }}", "more than 16 values in brackets");
    refuses("{% macro f(*x) %}{% endmacro %}{{ f() }}", "the parameters of the macro 'f'");
    refuses("{% macro f %}{% endmacro %}{{ f() }}", "lacks '('");
    refuses("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too many steps");
    refuses("{% set x | upper %}a{% endset %}", "the statement set ' x | upper '");
    refuses("{% for m in messages %}{% macro f() %}{% endfor %}{% endmacro %}", "without its beginning");
    refuses("{{ '\xC3\xA9' | title }}", "the case of letters outside ASCII");
    refuses("{{ strftime_now() }}", "the function 'strftime_now'");
    refuses("{{ strftime_now('%f') }}", "the format of time '%f'");
    refuses("{{ pad_token }}", "the token 'pad_token'");
    refuses("{% for m in messages if m.role.find('a') %}{% endfor %}", "the method 'find'");
    refuses("{% for m in messages, 1 %}{% endfor %}", "after an expression");
    refuses("{{ messages[0].content.find('a') }}", "the method 'find'");
    refuses("{{ 1 is sameas(2) }}", "the test 'sameas'");
    refuses("{{ raise_exception('no ' + messages[0].role) }}", "refuses the conversation: no user");
    refuses("{{ messages[0] }}", "prints a list or a message");
    refuses("{{ messages[0].content.strip('\xC3\xA9') }}", "strips letters outside ASCII");
    refuses("{{ 1.5 }}", "the number '1'");
    refuses("{{ '\\x41' }}", "the escape '\\x'");
    refuses("{% for a, b in messages %}{% endfor %}", "the statement for");
    refuses("{% if true %}", "does not end");
    refuses("{% endfor %}", "without its beginning");
    refuses("{{ 'a", "a tag that does not end");
    refuses("{{ (1 }}", "lacks ')'");
    refuses("{{ }}", "ends early");
    // Names of filters and tests that are values.
    refuses("{{ messages | select([1, 2]) | list }}", "gives 'select' a name that is not a string");
    refuses("{{ messages | map(messages) | list }}", "gives 'map' a name that is not a string");
    refuses("{{ messages | selectattr('role', [1, 2]) | list }}", "gives 'selectattr' a name that is not a string");
    refuses("{% for m in messages %}{{ messages | map(loop) | list }}{% endfor %}", "gives 'map' a name");
    // Scopes that Jinja has otherwise.
    refuses("{% for m in messages %}{% macro f() %}{{ m }}{% endmacro %}{% endfor %}", "block the macro 'f', which");
    refuses("{% macro f() %}{% macro g() %}{% endmacro %}{% endmacro %}{{ f() }}", "block the macro 'g', which is not");
    refuses("{% set x %}{% macro f() %}{% endmacro %}{% endset %}", "block the macro 'f', which is not");
    refuses("{% generation %}{% macro f() %}{% endmacro %}{% endgeneration %}", "block the macro 'f', which is not");
    refuses("{% for m in messages %}{% macro f() %}{% break %}{% endmacro %}{% endfor %}", "outside a for");
    refuses("{% for m in messages %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}", "outside a for");
    // What filters give is no list.
    refuses("{{ messages | map(attribute='role') | length }}", "without |list the filter 'length'");
    refuses("{{ messages | reverse | last }}", "without |list the filter 'last'");
    refuses("{{ (messages | reverse)[1:] }}", "without |list the slice");
    refuses("{{ messages | reverse | tojson }}", "the filter 'tojson'");
    refuses("{{ ([1] | reverse) + [2] }}", "the operator '+'");
    refuses("{% set x = messages | map(attribute='role') %}{{ x | join }}{{ x | join }}", "goes twice through");
    refuses("{% for m in messages %}a{% else %}b{% endfor %}", "uses 'else' of a for");
    refuses("{% for m in messages %}{{ loop.depth }}{% endfor %}", "the member of loop 'depth'");
    refuses("{% for c in 1 %}{% endfor %}", "a for over something that is not a list");
    refuses("{{ messages['a':1] }}", "a subscript that is not a number");
    refuses("{{ messages[none] }}", "a subscript that is not a number");
    refuses("{{ 'abc'[0] }}", "the subscript of '[ ]'");
    refuses("{{ messages[0:2:2] }}", "the slice '[a:b:c]'");
    refuses("{{ 1 < 'a' }}", "compares values that have no order");
    refuses("{% set m = 1 %}{% set m.x = 2 %}", "without namespace the assignment to 'm'");
    // Bounded: steps, depth, memory, variables, output.
    const char* nested[] = {"{{ ns.x | tojson }}", "{{ ns.x == ns.x }}", "{{ ns.x in [ns.x] }}"};
    for (size_t i = 0; i < COUNT_OF(nested); i++) {
        char lists[400] = "{% set ns = namespace(x=1) %}"
                          "{% for i in range(200000) %}{% set ns.x = [ns.x] %}{% endfor %}";
        refuses(strcat(lists, nested[i]), "nests more than 48 lists");
    }
    refuses("{% set ns = namespace(x=1) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
            "{{ ns.x == ns.x }}", "too many steps");
    refuses("{{ range(300000) | select('in', range(300000)) | list }}", "too many steps");
    char deep[2000] = "{{ ", *at = deep + 3;
    for (int i = 0; i < 900; i++) *at++ = '(';
    strcpy(at, "1 }}");
    refuses(deep, "too many steps");
    char source[5000] = "", *end = source;
    for (int i = 0; i < 24; i++) end += sprintf(end, "{%% for m%d in messages %%}", i);
    end += sprintf(end, "x");
    for (int i = 0; i < 24; i++) end += sprintf(end, "{%% endfor %%}");
    refuses(source, "too many steps");
    end = source + sprintf(source, "{%% set x = 'aaaaaaaa' %%}");
    for (int i = 0; i < 40; i++) end += sprintf(end, "{%% set x = x + x %%}");
    refuses(source, "memory");
    end = source;
    for (int i = 0; i < 257; i++) end += sprintf(end, "{%%set v%d=1%%}", i);
    refuses(source, "sets more than 256 variables");
    end = source + sprintf(source, "{%% set x = 'aaaaaaaa' %%}");
    for (int i = 0; i < 17; i++) end += sprintf(end, "{%% set x = x + x %%}");
    sprintf(end, "{%% for i in range(65) %%}{{ x }}{%% endfor %%}");
    refuses(source, "writes more than 64 MB");
}

// White space as Python's str.isspace has it, before and after a text.
static void test_spaces(void) {
    static const uint32_t spaces[][2] = {{9, 13}, {28, 32}, {0x85, 0x85}, {0xA0, 0xA0}, {0x1680, 0x1680},
                                         {0x2000, 0x200A},
                                         {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
    for (uint32_t code = 1; code < 0x20000; code++) {
        char text[8] = "";
        bool space = false;
        if (code >= 0xD800 && code < 0xE000) continue;
        for (size_t i = 0; i < COUNT_OF(spaces); i++) space |= code >= spaces[i][0] && code <= spaces[i][1];
        size_t bytes = utf8_write(text, code), wanted = space ? bytes : 0;
        expect(utf8_space(text, bytes) == wanted && utf8_space_before(text + bytes, bytes) == wanted, "U+%04X", code);
    }
    verdict("white space: every character");
}

int main(int argc, char** argv) {
    tests_begin("test_template");
    test_fixture(argc > 1 ? argv[1] : "dev/test/fixtures/templates.json");
    test_texts();
    test_names();
    test_syntax();
    test_generations();
    test_refusals();
    test_spaces();
    return tests_end();
}
