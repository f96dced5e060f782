// test_chat.c: conversations as masked shards: data/chat.h, llmtrain/text/spans.h, tokenize --chat and its --show, and
// what training takes of them.
//
//   make build/test_chat build/tokenize
//   build/test_chat [--tokenize PATH]
//
//   1. forms      every form of a line, as the text that it becomes, with the trained part in brackets
//   2. masks      by generation tags and by prefixes, messages that are switched off, --turns, borders within a token
//   3. published  ids and masks of transformers for published templates (dev/peers/chat_ids.py)
//   4. refusals   what is wrong with a line, with file and line
//   5. files      .spans: every byte changed, every length, another shard's, none; structure; training's targets
//   6. programs   the same shards for any number of threads, groups in one shard, kills, what is printed
//
// The reference for a prompt's tokens is what generate --chat reads: the encoded text of template_render.

#include "harness.h"

#include "data/chat.h"
#include "data/shards.h"
#include "llmtrain/base/flags.h"

static Error error;
static Tokenizer tokenizer;
static ChatRules rules;
static char* tokenize;

#define USER(text) "{\"role\": \"user\", \"content\": \"" text "\"}"
#define ANSWER(text) "{\"role\": \"assistant\", \"content\": \"" text "\"}"
#define ASKED(text) "<|im_start|>user\n" text "<|im_end|>\n<|im_start|>assistant\n"

static const char CHATML[] = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
// The same text, with the answers marked.
static const char MARKED[] = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
                             "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
                             "<|im_end|>{% endif %}\n\n{% endfor %}"
                             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
// Thinking is only in the last turn, as in Qwen 3.
static const char THINKING[] = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}"
                               "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
                               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

// ------------------------------------------------------------------------------------------------
// What a line becomes

static ChatResult result;

static void shown_add(char* text, size_t room, const char* piece, size_t bytes) {
    size_t used = strlen(text);
    need(used + bytes < room, "room for a text");
    memcpy(text + used, piece, bytes);
    text[used + bytes] = 0;
}

// The documents of a line, each with its kind and its text, where [ and ] are around what is trained; or the error.
static const char* shown(const char* line) {
    static char text[1 << 16];
    ChatOutput out = {0};
    text[0] = 0;
    WordEncoder encoder = tokenizer_encoder(&tokenizer);
    if (!chat_line(&out, &result, &rules, &encoder, line, strlen(line), "x.jsonl, line 7", &error)) {
        expect(out.document_count == 0 && out.span_count == 0 && out.tokens.count == 0, "a bad line leaves something");
        snprintf(text, sizeof text, "error: %s", error.text);
    }
    for (size_t d = 0; d < out.document_count; d++) {
        const ChatDocument* document = &out.documents[d];
        size_t span = document->span, end = span + document->spans;
        if (document->kind != SPAN_PLAIN) shown_add(text, sizeof text, "<", 1);
        const char* kind = SPAN_KIND_NAMES[document->kind];
        if (document->kind != SPAN_PLAIN) shown_add(text, sizeof text, kind, strlen(kind));
        if (document->kind != SPAN_PLAIN) shown_add(text, sizeof text, ">", 1);
        for (size_t i = 0; i <= document->tokens; i++) {
            size_t bytes;
            const char* piece = i < document->tokens
                                    ? tokenizer_piece(&bytes, &tokenizer, out.tokens.ids[document->first + i]) : "";
            if (span < end && out.spans[span].first + out.spans[span].tokens == i) {
                shown_add(text, sizeof text, "]", 1);
                span++;
            }
            if (span < end && out.spans[span].first == i) shown_add(text, sizeof text, "[", 1);
            if (i < document->tokens) shown_add(text, sizeof text, piece, bytes);
        }
        shown_add(text, sizeof text, "|", 1);
    }
    word_encoder_close(&encoder);
    chat_output_free(&out);
    return text;
}

static void becomes(const char* line, const char* expected) {
    const char* found = shown(line);
    expect(strcmp(found, expected) == 0, "%s\n  becomes  '%s'\n  and not  '%s'", line, found, expected);
}

// The line is dropped, for this reason.
static void drops(const char* line, ChatDrop why) {
    const char* found = shown(line);
    expect(found[0] == 0 && result.dropped[why] == 1 && result.documents == 0, "%s: %s; dropped %u, %u, %u, %u", line,
           found, result.dropped[1], result.dropped[2], result.dropped[3], result.dropped[4]);
}

static void refuses(const char* line, const char* words) {
    const char* found = shown(line);
    expect(strncmp(found, "error: x.jsonl, line 7", 22) == 0 && strstr(found, words), "%s\n  gives '%s', without '%s'",
           line, found, words);
}

static void use(const char* chat_template, int turns) {
    rules.chat_template = chat_template;
    rules.turns = turns;
    rules.system = NULL;
    rules.alpaca_text = false;
}

// ------------------------------------------------------------------------------------------------
// 1. Forms

static void test_forms(void) {
    use(CHATML, TURNS_ALL);
    becomes("{\"messages\": [" USER("hi") ", " ANSWER("Hello!") ", " USER("more") ", " ANSWER("Yes.") ", "
            USER("unanswered") "]}",
            ASKED("hi") "[Hello!<|im_end|>]\n" ASKED("more") "[Yes.<|im_end|>]|");
    becomes("{\"messages\": [{\"role\": \"system\", \"content\": [{\"type\": \"text\", \"text\": \"Be \"}, "
            "{\"type\": \"text\", \"text\": \"brief.\"}]}, " USER("a\\nb") ", " ANSWER("") "], "
            "\"id\": 3, \"tools\": []}",
            "<|im_start|>system\nBe brief.<|im_end|>\n" ASKED("a\nb") "[<|im_end|>]|");
    becomes("{\"conversations\": [{\"from\": \" System \", \"value\": \"s\"}, {\"from\": \"Human\", "
            "\"value\": \"q\"}, {\"from\": \"GPT\", \"value\": \"r\"}, {\"from\": \"observation\", \"value\": \"o\"}, "
            "{\"from\": \"chatgpt\", \"value\": \"t\"}]}",
            "<|im_start|>system\ns<|im_end|>\n" ASKED("q") "[r<|im_end|>]\n<|im_start|>tool\no<|im_end|>\n"
            "<|im_start|>assistant\n[t<|im_end|>]|");
    verdict("forms: messages, ShareGPT");
    becomes("{\"instruction\": \"Add\", \"input\": \"1 2\", \"output\": \"3\"}",
            ASKED("Add\n\n1 2") "[3<|im_end|>]|");
    becomes("{\"instruction\": \"Go\", \"input\": \"\", \"response\": \"ok\", \"system\": \"S\"}",
            "<|im_start|>system\nS<|im_end|>\n" ASKED("Go") "[ok<|im_end|>]|");
    rules.system = "Own.";
    becomes("{\"instruction\": \"Go\", \"input\": null, \"output\": \"ok\"}",
            "<|im_start|>system\nOwn.<|im_end|>\n" ASKED("Go") "[ok<|im_end|>]|");
    becomes("{\"messages\": [{\"role\": \"developer\", \"content\": \"d\"}, " USER("q") ", " ANSWER("a") "]}",
            "<|im_start|>developer\nd<|im_end|>\n" ASKED("q") "[a<|im_end|>]|");
    use(CHATML, TURNS_ALL);
    rules.alpaca_text = true;
    becomes("{\"instruction\": \"Add\", \"input\": \"1 2\", \"output\": \" 3\"}",
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd\n\n### Input:\n1 2\n\n"
            "### Response:[ 3<|im_end|>]|");
    becomes("{\"instruction\": \"Go\", \"output\": \" ok\"}",
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nGo\n\n### Response:[ ok<|im_end|>]|");
    use(CHATML, TURNS_ALL);
    verdict("forms: Alpaca, with the template and as Stanford wrote it; --system");
    becomes("{\"prompt\": \"Once upon\", \"completion\": \" a time\"}", "Once upon[ a time<|im_end|>]|");
    becomes("{\"prompt\": [" USER("q") ", " ANSWER("old") ", " USER("r") "], \"completion\": [" ANSWER("new") "]}",
            ASKED("q") "old<|im_end|>\n" ASKED("r") "[new<|im_end|>]|");
    becomes("{\"prompt\": [" USER("q") "], \"completion\": \"a\"}", ASKED("q") "[a<|im_end|>]|");
    becomes("{\"prompt\": [" USER("q") "], \"completion\": " ANSWER("a") ", \"label\": true}",
            "<desirable>" ASKED("q") "[a<|im_end|>]|");
    becomes("{\"prompt\": \"Once upon\", \"completion\": \" a time\", \"label\": 0}",
            "<undesirable>Once upon[ a time<|im_end|>]|");
    becomes("{\"segments\": [{\"text\": \"Q: x\", \"label\": false}, {\"text\": \" A: y<|im_end|>\", \"label\": true}, "
            "{\"text\": \" Q: z\", \"label\": false}, {\"text\": \" B\", \"label\": true}, "
            "{\"text\": \" C\", \"label\": true}, {\"text\": \" tail\", \"label\": false}]}",
            "Q: x[ A: y<|im_end|>] Q: z[ B C]|");
    becomes("{\"text\": \"A text.\"}", "A[ text.<|im_end|>]|");
    becomes("{\"text\": \"Ended.<|im_end|>\"}", "E[nded.<|im_end|>]|");
    verdict("forms: prompt and completion, unpaired, segments, text");
    becomes("{\"prompt\": \"It is\", \"chosen\": \" good\", \"rejected\": \" bad\"}",
            "<chosen>It is[ good<|im_end|>]|<rejected>It is[ bad<|im_end|>]|");
    becomes("{\"prompt\": [" USER("q") "], \"chosen\": [" ANSWER("a") "], \"rejected\": [" ANSWER("b") "]}",
            "<chosen>" ASKED("q") "[a<|im_end|>]|<rejected>" ASKED("q") "[b<|im_end|>]|");
    becomes("{\"prompt\": \"q\", \"messages\": [], \"chosen\": [" USER("q") ", " ANSWER("o") ", " USER("r") ", "
            ANSWER("a") "], \"rejected\": [" USER("q") ", " ANSWER("o") ", " USER("r") ", " ANSWER("b") "]}",
            "<chosen>" ASKED("q") "o<|im_end|>\n" ASKED("r") "[a<|im_end|>]|"
            "<rejected>" ASKED("q") "o<|im_end|>\n" ASKED("r") "[b<|im_end|>]|");
    becomes("{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}], \"chosen\": {\"from\": \"gpt\", "
            "\"value\": \"a\"}, \"rejected\": {\"from\": \"gpt\", \"value\": \"b\"}}",
            "<chosen>" ASKED("q") "[a<|im_end|>]|<rejected>" ASKED("q") "[b<|im_end|>]|");
    drops("{\"prompt\": \"It is\", \"chosen\": \" so\", \"rejected\": \" so\"}", DROP_EQUAL);
    drops("{\"prompt\": \"in the mornin\", \"chosen\": \" x\", \"rejected\": \"g\"}", DROP_MERGED);
    verdict("forms: pairs, whole or by their common beginning; both documents, or none");
}

// ------------------------------------------------------------------------------------------------
// 2. Masks

#define TWO_TURNS "{\"messages\": [" USER("q") ", " ANSWER("a b") ", " USER("r") ", " ANSWER("c d") "]}"

static void test_masks(void) {
    static const char two[] = ASKED("q") "[a b<|im_end|>]\n" ASKED("r") "[c d<|im_end|>]|";
    static const char last[] = ASKED("q") "a b<|im_end|>\n" ASKED("r") "[c d<|im_end|>]|";
    static const char each[] = ASKED("q") "[a b<|im_end|>]|" ASKED("q") "a b<|im_end|>\n" ASKED("r")
                               "[c d<|im_end|>]|";
    for (int marked = 0; marked < 2; marked++) {
        const char* text = marked ? MARKED : CHATML;
        use(text, TURNS_ALL);
        becomes(TWO_TURNS, two);
        use(text, TURNS_LAST);
        becomes(TWO_TURNS, last);
        use(text, TURNS_EACH);
        becomes(TWO_TURNS, each);
        use(text, TURNS_ALL);
        static const char* const off[] = {"\"loss_mask\": 0", "\"loss_mask\": false", "\"trainable\": false",
                                          "\"weight\": 0", "\"train\": false"};
        for (size_t i = 0; i < COUNT_OF(off); i++)
            becomes(text_of("{\"messages\": [" USER("q") ", {\"role\": \"assistant\", \"content\": \"a b\", %s}, "
                            "{\"role\": \"user\", \"content\": \"r\", %s}, {\"role\": \"assistant\", \"content\": "
                            "\"c d\", \"weight\": 1}]}", off[i], off[i]), last);
        drops("{\"messages\": [" USER("q") "]}", DROP_NOTHING);
        drops("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"loss_mask\": 0}]}", DROP_NOTHING);
        // The token that ends a turn may be in a text.
        becomes("{\"messages\": [" USER("a<|im_end|>b") ", " ANSWER("c<|im_end|>d") "]}",
                ASKED("a<|im_end|>b") "[c<|im_end|>d<|im_end|>]|");
    }
    verdict("masks: generation tags and prefixes agree, with --turns all, last, each, and with answers switched off");
    use(THINKING, TURNS_ALL);
    static const char thinks[] = "{\"messages\": [" USER("q") ", " ANSWER("<think>x</think>a") ", " USER("r") ", "
                                 ANSWER("<think>y</think>b") "]}";
    drops(thinks, DROP_REWRITTEN);
    use(THINKING, TURNS_LAST);
    becomes(thinks, ASKED("q") "a<|im_end|>\n" ASKED("r") "[<think>y</think>b<|im_end|>]|");
    use(THINKING, TURNS_EACH);
    becomes(thinks, ASKED("q") "[<think>x</think>a<|im_end|>]|" ASKED("q") "a<|im_end|>\n" ASKED("r")
            "[<think>y</think>b<|im_end|>]|");
    verdict("masks: a template that drops the thinking of earlier turns needs --turns last or each");
    use(CHATML, TURNS_ALL);
    drops("{\"prompt\": \"in the mornin\", \"completion\": \"g\"}", DROP_MERGED);
    drops("{\"prompt\": \"in \", \"completion\": \"the\"}", DROP_MERGED);
    drops("{\"prompt\": \"in the\", \"completion\": \"\"}", DROP_NOTHING);
    drops("{\"segments\": [{\"text\": \"a\", \"label\": false}]}", DROP_NOTHING);
    use("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}", TURNS_ALL);
    drops("{\"messages\": [" USER("q") ", " ANSWER("the") "]}", DROP_MERGED);
    use("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}", TURNS_ALL);
    becomes("{\"messages\": [" USER("q") ", " ANSWER("the") "]}", "user: q\nassistant:[ the\n]|");
    verdict("masks: a token across a border drops the sample");
    use("{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %} a{% endgeneration %} b"
        "{% generation %} c{% endgeneration %}{% endif %}{% endfor %}", TURNS_ALL);
    becomes("{\"messages\": [" USER("q") ", " ANSWER("x") "]}", "userassistant[ a] b[ c]|");
    rules.turns = TURNS_EACH;
    refuses(TWO_TURNS, "marks 4 answers with generation, but there are 2");
    verdict("masks: a template may mark parts of an answer, unless single answers are chosen");
}

// The tokens before an answer are those that generate --chat would read.
static void test_inference(void) {
    use(CHATML, TURNS_ALL);
    static const char* const contents[][2] = {{"user", "Who? <|im_start|>"}, {"assistant", "  It is 1,000. "},
                                              {"user", ""}, {"assistant", "\xE4\xB8\xAD\n\n"}, {"user", "'s"},
                                              {"assistant", "a  b"}};
    ChatMessage messages[COUNT_OF(contents)];
    JsonWriter w = {0};
    json_write_begin(&w, '{');
    json_member_begin(&w, "messages", '[');
    for (size_t i = 0; i < COUNT_OF(contents); i++) {
        ChatMessage message = {contents[i][0], contents[i][1], 0};
        messages[i] = message;
        json_write_begin(&w, '{');
        json_member_string(&w, "role", contents[i][0]);
        json_member_string(&w, "content", contents[i][1]);
        json_write_end(&w, '}');
    }
    json_write_end(&w, ']');
    json_write_end(&w, '}');
    ChatOutput out = {0};
    need(json_write_done(&w, &error) && chat_line(&out, &result, &rules, NULL, w.text, w.bytes, "x", &error) &&
             out.document_count == 1 && out.span_count == 3, "a conversation: %s", error.text);
    for (size_t k = 0; k < 3; k++) {
        char* text;
        size_t bytes;
        Tokens prompt = {0};
        need(template_render(&text, &bytes, CHATML, messages, 2 * k + 1, "", "", true, &error) &&
                 tokenizer_encode(&prompt, &tokenizer, text, bytes, &error), "%s", error.text);
        expect(prompt.count == out.spans[k].first &&
                   memcmp(prompt.ids, out.tokens.ids, prompt.count * sizeof(int32_t)) == 0,
               "the prompt of answer %zu", k);
        size_t end = out.spans[k].first + out.spans[k].tokens;
        expect(out.tokens.ids[end - 1] == tokenizer.end_of_text, "answer %zu ends with its stop token", k);
        tokens_free(&prompt);
        free(text);
    }
    expect(out.documents[0].tokens == out.tokens.count &&
               out.spans[2].first + out.spans[2].tokens == out.tokens.count, "nothing follows the last answer");
    chat_output_free(&out);
    json_writer_free(&w);
    verdict("masks: before an answer are the tokens that generate --chat reads, and it ends with a stop token");
}

// A tokenizer that puts <s> before a text.
static void test_begin(const char* path) {
    Tokenizer other, outer = tokenizer;
    ChatRules before = rules;
    need(mkdir("mistral", 0755) == 0, "a directory");
    copy_tree(path, "mistral/tokenizer.json");
    put_text("mistral/tokenizer_config.json", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}");
    put_text("mistral/generation_config.json", "{\"eos_token_id\": [2, 5]}");
    need(tokenizer_open(&other, "mistral", NULL, &error), "%s", error.text);
    need(chat_rules_set(&rules, &other, "mistral", &error), "%s", error.text);
    expect(other.generation.count == 2 && other.generation.ends[1] == 5 && tokenizer_ends(&other, 5) &&
               strcmp(rules.begin, "<s>") == 0 && strcmp(rules.end, "</s>") == 0, "its tokens");
    tokenizer = other;
    rules.tokenizer = &tokenizer;
    becomes("{\"text\": \"ab\"}", "<s>[ ab</s>]|");
    becomes("{\"prompt\": \"a\", \"completion\": \" b\"}", "<s> a[ b</s>]|");
    refuses("{\"text\": \"<s>ab\"}", "two begin-of-text tokens");
    rules.chat_template = "{{ bos_token }}{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}"
                          "{% endfor %}";
    refuses("{\"messages\": [" USER("q") ", " ANSWER("a") "]}", "two begin-of-text tokens");
    refuses("{\"messages\": [" USER("q") ", {\"role\": \"assistant\", \"content\": \"a\", \"weight\": 0.5}]}",
            "neither 0");
    rules.chat_template = NULL;
    refuses("{\"messages\": [" USER("q") ", " ANSWER("a") "]}", "no chat template for a conversation");
    put_text("mistral/generation_config.json", "{");
    expect(!chat_rules_set(&rules, &other, "mistral", &error), "a damaged generation_config.json");
    tokenizer_close(&tokenizer);
    tokenizer = outer;
    rules = before;
    verdict("masks: one begin-of-text token, from the tokenizer or from the template; what ends a text");
}

// ------------------------------------------------------------------------------------------------
// 3. Published templates

static const char* string_of(const Json* json, const char* name) {
    uint32_t node = json_get(json, 0, name);
    need(json_is(json, node, JSON_STRING), "%s", name);
    return json->text + json->nodes[node].start;
}

// Puts the tokenizer of a line with its added tokens into the directory "published", and opens it.
static void open_published(const Json* line, const char* tokenizers) {
    char* text = text_read(text_of("%s/%s.json", tokenizers, string_of(line, "tokenizer")), NULL);
    const char* end = strstr(text, "],\"normalizer\"");  // of the added tokens
    FILE* file = fopen("published/tokenizer.json", "wbe");
    need(end && file && fprintf(file, "%.*s%s%s", (int)(end - text), text, string_of(line, "added"), end) > 0 &&
             fclose(file) == 0, "a tokenizer");
    put_text("published/tokenizer_config.json", string_of(line, "config"));
    put_text("published/generation_config.json", string_of(line, "generation"));
    put_text("published/chat_template.jinja", string_of(line, "template"));
    put_text("published/marks.jinja", string_of(line, "marks"));
    need(tokenizer_open(&tokenizer, "published", NULL, &error), "%s", error.text);
    free(text);
}

// The document of a conversation against the ids of a case and its list of answers, of which all are wanted or the
// last; it ends with the last trained token. An answer that is null drops it: an earlier turn is rewritten, or a token
// reaches across a border.
static void compare_case(const Json* json, const char* list, bool last, const char* line, const char* name) {
    enum { ANSWERS = 8 };
    uint32_t ids = json_get(json, 0, "ids");
    if (json_is(json, json_get(json, 0, list), JSON_NULL)) return;
    uint64_t first[ANSWERS], count[ANSWERS];
    size_t answers = 0, dropped = 0;
    for (uint32_t node = json_first(json, json_get(json, 0, list)); node != JSON_NONE; node = json_next(json, node)) {
        if (last) answers = dropped = 0;
        uint32_t number = json_first(json, node);
        if (json_is(json, node, JSON_NULL)) dropped++;
        else need(answers < ANSWERS && json_u64(json, number, &first[answers]) &&
                  json_u64(json, json_next(json, number), &count[answers]), "an answer"), answers++;
    }
    ChatOutput out = {0};
    WordEncoder encoder = tokenizer_encoder(&tokenizer);
    bool ok = chat_line(&out, &result, &rules, &encoder, line, strlen(line), "x.jsonl, line 7", &error);
    const char* what = text_of("%s, %s%s: %.3000s", name, list, last ? ", the last" : "", line);
    word_encoder_close(&encoder);
    if (json_is(json, ids, JSON_NULL)) {
        expect_refusal(ok, &error, "the chat template refuses the conversation", what);
    } else if (!ok || dropped > 0) {
        expect(ok && out.document_count == 0 && result.dropped[DROP_REWRITTEN] + result.dropped[DROP_MERGED] == 1,
               "%s\n  is not dropped: %s", what, ok ? "" : error.text);
    } else if (expect(out.document_count == 1 && out.span_count == answers && answers > 0,
                      "%s\n  has %zu answers, and not %zu; dropped: %u, %u, %u, %u", what, out.span_count, answers,
                      result.dropped[1], result.dropped[2], result.dropped[3], result.dropped[4])) {
        for (size_t i = 0; i < answers; i++)
            expect(out.spans[i].first == first[i] && out.spans[i].tokens == count[i],
                   "%s\n  has trained from %llu %u tokens, and not from %llu %llu", what,
                   (unsigned long long)out.spans[i].first, out.spans[i].tokens, (unsigned long long)first[i],
                   (unsigned long long)count[i]);
        uint32_t node = json_first(json, ids);
        uint64_t id = 0;
        for (size_t i = 0; i < out.tokens.count; i++, node = json_next(json, node))
            if (!expect(json_u64(json, node, &id) && out.tokens.ids[i] == (int32_t)id,
                        "%s\n  has token %zu %d, and not %d", what, i, out.tokens.ids[i], (int)id)) break;
        expect(out.tokens.count == first[answers - 1] + count[answers - 1], "%s\n  has %zu tokens", what,
               out.tokens.count);
    }
    chat_output_free(&out);
}

// Ids and masks that transformers gives; dev/peers/chat_ids.py, which wrote the fixture, says what its lines are.
static void test_published(const char* fixture, const char* tokenizers) {
    enum { CONVERSATIONS = 20 };
    const char* conversations[CONVERSATIONS];
    char *text = text_read(fixture, NULL), *rest = text, *marks = NULL, name[40] = "";
    Tokenizer outer = tokenizer;
    ChatRules before = rules;
    size_t count = 0, templates = 0, cases = 0;
    need(mkdir("published", 0755) == 0, "a directory");
    for (char* line; (line = strsep(&rest, "\n")) != NULL && line[0];) {
        Json json;
        need(json_parse(&json, line, strlen(line), fixture, &error), "%s", error.text);
        if (json_get(&json, 0, "messages") != JSON_NONE) {
            need(count < CONVERSATIONS, "room for the conversations");
            conversations[count++] = line;
        } else if (json_get(&json, 0, "template") != JSON_NONE) {
            if (templates++ > 0) tokenizer_close(&tokenizer);
            open_published(&json, tokenizers);
            free(marks);
            marks = text_read("published/marks.jinja", NULL);
            snprintf(name, sizeof name, "%s", string_of(&json, "name"));
        } else {
            for (int last = 0; last < 2; last++)
                for (int marked = 0; marked < 2; marked++) {
                    need(chat_rules_set(&rules, &tokenizer, "published", &error), "%s", error.text);
                    if (marked) rules.chat_template = marks;
                    rules.turns = last ? TURNS_LAST : TURNS_ALL;
                    compare_case(&json, marked ? "marked" : "prefix", last, conversations[cases % CONVERSATIONS],
                                 name);
                }
            cases++;
        }
        json_free(&json);
    }
    expect(count == CONVERSATIONS && templates >= 8 && cases == templates * count, "%zu cases", cases);
    if (templates > 0) tokenizer_close(&tokenizer);
    tokenizer = outer;
    rules = before;
    free(text);
    free(marks);
    verdict("masks: %zu published templates, %d conversations: the ids and masks of transformers, with marks and by "
            "prefixes", templates, CONVERSATIONS);
}

// ------------------------------------------------------------------------------------------------
// 4. Refusals

static void test_refusals(void) {
    use(CHATML, TURNS_ALL);
    refuses("{\"messages\": []}", "\"messages\" is an empty conversation");
    refuses("{\"conversations\": []}", "\"conversations\" is an empty conversation");
    refuses("{\"messages\": \"a\"}", "\"messages\" is not a list of messages");
    refuses("{\"messages\": [3]}", "message 1 is not an object");
    refuses("{\"messages\": [" USER("q") ", {\"content\": \"a\"}]}", "message 2 has no \"role\" (or \"from\")");
    refuses("{\"messages\": [{\"role\": \"bot\", \"content\": \"a\"}]}", "message 1 has the unknown role 'bot'");
    refuses("{\"messages\": [{\"role\": \"Assistant\", \"content\": \"a\"}]}", "unknown role 'Assistant'");
    refuses("{\"conversations\": [{\"from\": \"narrator\", \"value\": \"a\"}]}", "unknown role 'narrator'");
    refuses("{\"messages\": [{\"role\": \"user\"}]}", "message 1 has no \"content\"");
    refuses("{\"messages\": [{\"role\": \"assistant\", \"content\": null}]}", "message 1 has no \"content\"");
    refuses("{\"messages\": [{\"role\": \"user\", \"content\": 3}]}", "\"content\" is not a string");
    refuses("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {}}]}]}",
            "a part that is not a text (image_url)");
    refuses("{\"messages\": [{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}]}",
            "\"tool_calls\" is not supported");
    refuses("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"reasoning_content\": \"r\"}]}",
            "\"reasoning_content\" is not supported");
    refuses("{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"trainable\": true}]}",
            "only answers are trained");
    refuses("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"loss_mask\": \"no\"}]}",
            "\"loss_mask\" of");
    refuses("{\"messages\": [" USER("q") "], \"tools\": [{}]}", "\"tools\" is not supported");
    verdict("refusals: conversations");
    refuses("{\"prompt\": \"q\", \"chosen\": \"a\"}", "a pair has no \"rejected\" answer");
    refuses("{\"prompt\": \"q\", \"chosen\": null, \"rejected\": \"b\"}", "a pair has no \"chosen\" answer");
    refuses("{\"chosen\": \"a\", \"rejected\": \"b\"}", "a pair has no \"prompt\"");
    refuses("{\"chosen\": [" USER("q") "], \"rejected\": [" USER("r") "]}", "do not begin with the same message");
    refuses("{\"prompt\": \"q\", \"chosen\": \"a\", \"rejected\": [" ANSWER("b") "]}", "give both as strings");
    refuses("{\"prompt\": \"q\", \"completion\": [" ANSWER("b") "]}", "give both as strings, or as messages");
    refuses("{\"completion\": \"a\"}", "a completion has no \"prompt\"");
    refuses("{\"prompt\": \"q\", \"completion\": \" a\", \"label\": \"good\"}", "\"label\" of a completion");
    refuses("{\"instruction\": \"a\"}", "no \"output\" or \"response\"");
    refuses("{\"instruction\": 3, \"output\": \"b\"}", "\"instruction\" is not a string");
    refuses("{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[\"c\", \"d\"]]}",
            "\"history\" is not supported");
    rules.alpaca_text = true;
    refuses("{\"instruction\": \"a\", \"output\": \"b\", \"system\": \"c\"}", "has no place");
    use(CHATML, TURNS_ALL);
    refuses("{\"segments\": []}", "\"segments\" is not a list of texts, or is empty");
    refuses("{\"segments\": [{\"text\": \"a\"}]}", "a segment has no \"label\"");
    refuses("{\"text\": 3}", "\"text\" is not a string");
    refuses("{\"question\": \"a\", \"answer\": \"b\"}",
            "none of the known forms has its members (\"question\", \"answer\")");
    refuses("{}", "none of the known forms has its members ()");
    refuses("\"a\"", "it is not a JSON object");
    refuses(" [{\"text\": \"a\"}]", "begins a JSON array");
    refuses("{\"text\": \"a\"", "is not valid JSON");
    refuses("{\"text\": \"a\xFF\"}", "bytes that are not UTF-8");
    verdict("refusals: pairs, completions, instructions, segments, lines of no form");
    use("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}"
        "{% endfor %}", TURNS_ALL);
    refuses("{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, " ANSWER("a") "]}",
            "the chat template refuses the conversation: no system");
    use("{% macro f() %}{% generation %}a{% endgeneration %}{% endmacro %}{{ f() }}", TURNS_ALL);
    refuses("{\"messages\": [" ANSWER("a") "]}", "within a macro, block or filter the statement 'generation'");
    use("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", TURNS_ALL);
    refuses("{\"messages\": [" ANSWER("a") "]}", "within another the statement 'generation'");
    use("{% if %}", TURNS_ALL);
    refuses("{\"messages\": [" ANSWER("a") "]}", "the chat template");
    use(CHATML, TURNS_ALL);
    verdict("refusals: templates that fail");
}

// ------------------------------------------------------------------------------------------------
// 5. Files

enum { V = 420 };

// A set of shards with these documents, of 10 tokens each: 3 plain ones, a pair, another.
static void write_set(const char* prefix, int32_t first, size_t trained, bool pairs) {
    static const SpanKind kinds[] = {SPAN_PLAIN, SPAN_PLAIN, SPAN_PLAIN, SPAN_CHOSEN, SPAN_REJECTED, SPAN_DESIRABLE};
    ShardSet set;
    shard_set_begin(&set, prefix, &tokenizer, 1000, 0);
    for (size_t d = 0; d < (pairs ? COUNT_OF(kinds) : 3); d++) {
        int32_t tokens[10];
        for (int32_t i = 0; i < 10; i++) tokens[i] = (first + 10 * (int32_t)d + i) % V;
        TrainedSpan spans[2] = {{2, 3, 1}, {6, (uint32_t)trained, 1}};
        bool begins = kinds[d] != SPAN_REJECTED;
        need((!begins || series_begin_group(&set.series[0], 10, &error)) &&
                 series_add_document(&set.series[0], tokens, 10, spans, 2, kinds[d], begins, &error), "%s", error.text);
    }
    need(shard_set_publish(&set, &error), "%s", error.text);
}

static bool opens(const char* path) {
    Dataset dataset;
    bool ok = dataset_open(&dataset, path, &error);
    if (ok) dataset_close(&dataset);
    return ok;
}

static bool opens_spans(const char* path, SpanFile* file) {
    Shard shard;
    need(shard_open(&shard, path, &error), "%s", error.text);
    bool ok = span_file_open(file, path, shard.count, shard.checksum, shard.spans, &error);
    shard_close(&shard);
    return ok;
}

static void test_spans(void) {
    static const char bin[] = "s_train_000000.bin", name[] = "s_train_000000.spans";
    SpanFile file;
    write_set("s", 5, 3, true);
    need(opens_spans(bin, &file), "%s", error.text);
    expect(file.document_count == 6 && file.span_count == 12 && file.groups == 5, "%zu documents, %zu spans",
           file.document_count, file.span_count);
    for (size_t d = 0; d < file.document_count; d++) {
        const SpanDocument* document = &file.documents[d];
        expect(document->first == 10 * d && document->tokens == 10 && document->group == (d > 3 ? d - 1 : d) &&
               span_file_end(&file, d) == 2 * d + 2, "document %zu", d);
        for (uint64_t i = 0, from = 2 * d; i < 10; i++) {
            size_t span = span_file_find(&file, 10 * d + i), other = (size_t)from;
            bool trains = (i >= 2 && i < 5) || (i >= 6 && i < 9);
            expect(span_file_trains(&file, &span, 10 * d + i) == trains &&
                   span_file_trains(&file, &other, 10 * d + i) == trains, "token %d of document %zu", (int)i, d);
        }
    }
    span_file_close(&file);
    verdict("files: documents, groups and spans come back, and which token is trained");

    size_t bytes;
    char* whole = text_read(name, &bytes);
    expect(bytes == 64 + 6 * 24 + 12 * 16, "%zu bytes", bytes);
    for (size_t i = 0; i < bytes; i++) {
        flip_byte(name, i);
        expect(!opens_spans(bin, &file) && strstr(error.text, name), "byte %zu: %s", i, error.text);
        flip_byte(name, i);
    }
    for (size_t length = 0; length < bytes; length++) {
        put_bytes(name, whole, length);
        expect(!opens_spans(bin, &file) && strstr(error.text, name), "%zu bytes: %s", length, error.text);
    }
    char* longer = (char*)calloc(bytes + 16, 1);
    memcpy(longer, whole, bytes);
    for (size_t more = 1; more <= 16; more++) {
        put_bytes(name, longer, bytes + more);
        expect(!opens_spans(bin, &file), "%zu bytes more", more);
    }
    remove(name);
    expect(!opens_spans(bin, &file) && strstr(error.text, "s_train_000000.spans is missing: it says which tokens"),
           "%s", error.text);
    put_bytes(name, whole, bytes);
    expect(opens_spans(bin, &file), "the file again: %s", error.text);
    span_file_close(&file);
    verdict("files: each byte changed, each length and a missing .spans are refused with its name");

    // The same tokens with other spans, other tokens with the same spans, and a plain shard over them.
    write_set("other", 5, 2, true);
    char* other = text_read("other_train_000000.spans", &bytes);
    put_bytes(name, other, bytes);
    expect_refusal(opens_spans(bin, &file), &error, "does not belong to", "other spans");
    write_set("foreign", 6, 3, true);
    char* foreign = text_read("foreign_train_000000.spans", &bytes);
    put_bytes(name, foreign, bytes);
    expect_refusal(opens_spans(bin, &file), &error, "does not belong to", "spans of another shard");
    put_bytes(name, whole, strlen("LLMSPANS") + 56);
    patch(name, 8, "\2", 1);
    expect_refusal(opens_spans(bin, &file), &error, "has version 2", "another version");
    verdict("files: the .spans of another shard, or of another conversion of it, is refused");
    free(whole);
    free(longer);
    free(other);
    free(foreign);
}

// Each rule of the structure, broken in a file whose hash is right.
static void test_structure(void) {
    static const struct { const char* what; int document, span; size_t offset; uint64_t value; size_t bytes; }
    breaks[] = {
        {"a document begins late", 1, -1, offsetof(SpanDocument, first), 11, 8},
        {"a document is longer", 1, -1, offsetof(SpanDocument, tokens), 11, 4},
        {"the last document is longer", 5, -1, offsetof(SpanDocument, tokens), 11, 4},
        {"a document is empty", 1, -1, offsetof(SpanDocument, tokens), 0, 4},
        {"a group is left out", 1, -1, offsetof(SpanDocument, group), 2, 4},
        {"two documents in a group", 1, -1, offsetof(SpanDocument, group), 0, 4},
        {"a pair in two groups", 4, -1, offsetof(SpanDocument, group), 4, 4},
        {"a kind that there is not", 0, -1, offsetof(SpanDocument, kind), 5, 4},
        {"chosen without rejected", 4, -1, offsetof(SpanDocument, kind), 0, 4},
        {"rejected without chosen", 3, -1, offsetof(SpanDocument, kind), 0, 4},
        {"chosen at the end", 5, -1, offsetof(SpanDocument, kind), 1, 4},
        {"the first span is not the first", 0, -1, offsetof(SpanDocument, span), 1, 4},
        {"a document without spans", 1, -1, offsetof(SpanDocument, span), 4, 4},
        {"more spans than there are", 5, -1, offsetof(SpanDocument, span), 13, 4},
        {"a span of the first token", -1, 0, offsetof(TrainedSpan, first), 0, 8},
        {"a span before another", -1, 1, offsetof(TrainedSpan, first), 4, 8},
        {"a span of another document", -1, 0, offsetof(TrainedSpan, first), 12, 8},
        {"a span that ends later", -1, 1, offsetof(TrainedSpan, tokens), 5, 4},
        {"a span of no tokens", -1, 1, offsetof(TrainedSpan, tokens), 0, 4},
        {"a span of weight 0", -1, 1, offsetof(TrainedSpan, weight), 0, 4},
        {"a span of weight NaN", -1, 1, offsetof(TrainedSpan, weight), 0x7fc00000, 4},
    };
    write_set("s", 5, 3, true);
    size_t bytes;
    char* whole = text_read("s_train_000000.spans", &bytes);
    for (size_t k = 0; k < COUNT_OF(breaks); k++) {
        char data[64 + 6 * 24 + 12 * 16];
        need(bytes == sizeof data, "the size");
        memcpy(data, whole, bytes);
        int document = breaks[k].document;
        char* at = data + 64 + (document >= 0 ? 24 * document : 6 * 24 + 16 * breaks[k].span);
        memcpy(at + breaks[k].offset, &breaks[k].value, breaks[k].bytes);
        SpanHeader header;
        memcpy(&header, data, sizeof header);
        header.hash = span_file_hash(&header, data + 64, data + 64 + 6 * 24);
        memcpy(data, &header, sizeof header);
        put_bytes("s_train_000000.spans", data, sizeof data);
        SpanFile file;
        bool accepted = span_file_open(&file, "s_train_000000.bin", 60, header.checksum, header.hash, &error);
        expect_refusal(accepted, &error, "do not fit together", breaks[k].what);
    }
    free(whole);
    verdict("files: documents and spans that do not fit together are refused");
}

// Training and validation count the targets in spans alone; a row has whole documents.
static void test_targets(void) {
    enum { T = 22, B = 2 };
    int32_t tokens[B * T], targets[B * T];
    Dataset dataset;
    write_set("t", 5, 3, false);
    need(dataset_open(&dataset, "t_train_*.bin", &error) && dataset_pack(&dataset, T, true, TOO_LONG_DROP, &error), "%s",
         error.text);
    need(dataset_windows(&dataset, T, 0) == 2 && dataset_batch(tokens, targets, &dataset, 0, V, B, T, 0, &error), "%s",
         error.text);
    for (size_t b = 0; b < B; b++) {
        size_t documents = tokens[b * T + 10] > 0 ? 2 : 1, first = (size_t)tokens[b * T] - 5;
        for (size_t t = 0; t < T; t++) {
            size_t i = t % 10 + 1, at = first + t + 1;
            bool inside = t < 10 * documents, trains = inside && ((i >= 2 && i < 5) || (i >= 6 && i < 9));
            int32_t target = trains ? (int32_t)(5 + at) % V : inside && i == 10 ? TARGET_ENDS : TARGET_NONE;
            expect(targets[b * T + t] == target, "row %zu, target %zu is %d, not %d", b, t, targets[b * T + t], target);
            expect(tokens[b * T + t] == (inside ? (int32_t)(5 + first + t) % V : 0), "row %zu, token %zu", b, t);
        }
    }
    uint64_t print = dataset_fingerprint(&dataset);
    dataset_close(&dataset);
    write_set("u", 5, 2, false);
    need(dataset_open(&dataset, "u_train_*.bin", &error), "%s", error.text);
    expect(dataset_fingerprint(&dataset) != print, "other spans have the same fingerprint");
    dataset_close(&dataset);
    remove("t_train_000000.spans");
    expect_refusal(opens("t_train_*.bin"), &error, "t_train_000000.spans is missing", "no .spans");
    // A set over another: what is left of the old one goes, and plain shards have no .spans.
    Tokenizer plain = tokenizer;
    ShardSet set;
    const int32_t text[40] = {1};
    put_text("u_train_000000.spans.tmp.tmp-1-0", "left by a killed tokenize");
    shard_set_begin(&set, "u", &plain, 1000, 0);
    need(series_add(&set.series[0], text, 40, &error) && shard_set_publish(&set, &error), "%s", error.text);
    expect(!file_exists("u_train_000000.spans") && !file_exists("u_train_000000.spans.tmp.tmp-1-0") &&
           opens("u_train_*.bin"), "a plain shard over one with spans: %s", error.text);
    verdict("training: targets outside spans do not count, a lost .spans is refused");
}

// ------------------------------------------------------------------------------------------------
// 6. Programs

static Program job;

// Runs tokenize; its exit code. Words are separated by blanks.
static int run(const char* arguments) {
    return program_execute(&job, tokenize, arguments, NULL, NULL);
}

static void expect_run(int code, const char* says, const char* arguments) {
    int found = run(arguments);
    const char* text = job.text[code != 0] ? job.text[code != 0] : "";
    expect(found == code && strstr(text, says), "%s: exit code %d: '%s' is not in '%s' %s", arguments, found, says,
           text,
           job.text[1] ? job.text[1] : "");
}

static bool same_files(const char* a, const char* b) {
    size_t a_bytes, b_bytes;
    char *x = text_read(a, &a_bytes), *y = text_read(b, &b_bytes);
    bool same = file_exists(a) && file_exists(b) && a_bytes == b_bytes && memcmp(x, y, a_bytes) == 0;
    free(x);
    free(y);
    return same;
}

// Conversations and pairs of some length, with a few that are dropped.
static void write_lines(const char* path, size_t count) {
    FILE* file = fopen(path, "wbe");
    need(file != NULL, "%s", path);
    for (size_t i = 0; i < count; i++) {
        if (i % 5 == 4)
            fprintf(file, "{\"prompt\": \"Number %zu\", \"chosen\": \" is good\", \"rejected\": \" is bad\"}\n", i);
        else if (i % 17 == 3)
            fprintf(file, "{\"prompt\": \"Number %zu mornin\", \"completion\": \"g\"}\n", i);
        else
            fprintf(file, "{\"messages\": [{\"role\": \"user\", \"content\": \"Say %zu\"}, {\"role\": \"assistant\", "
                    "\"content\": \"It is %zu, %.*s.\"}]}\n", i, i, (int)(i % 40),
                    "and so on and so on and so on and so on and so on");
    }
    fclose(file);
}

// All shards of a prefix, with their .spans: whole groups, in shards of at most `most` tokens. Documents in all.
static size_t check_shards(const char* prefix, size_t most) {
    size_t documents = 0;
    for (int number = 0; number < 1000; number++) {
        Shard shard;
        SpanFile file;
        const char* path = text_of("%s_%06d.bin", prefix, number);
        if (!file_exists(path)) break;
        bool ok = shard_open(&shard, path, &error);
        if (!expect(ok, "%s", error.text)) break;
        expect(shard.count <= most && shard.spans != 0, "%s has %zu tokens", path, shard.count);
        ok = span_file_open(&file, path, shard.count, shard.checksum, shard.spans, &error);
        if (expect(ok, "%s", error.text)) documents += file.document_count;
        span_file_close(&file);
        shard_close(&shard);
    }
    return documents;
}

static void test_conversion(void) {
    write_lines("many.jsonl", 3000);
    need(mkdir("one", 0755) == 0 && mkdir("two", 0755) == 0, "directories");
#define MANY "--tokenizer qwen --chat many.jsonl --val 0.1 --shard-tokens 20000 "
    expect_run(0, "documents", MANY "--out one/x --threads 1");
    char* summary = strdup(job.text[0]);
    expect_run(0, "documents", MANY "--out two/x --threads 3");
    expect(directory_count("one", "x_") == directory_count("two", "x_") && directory_count("one", ".tmp") == 0,
           "files");
    size_t shards = 0;
    for (int val = 0; val < 2; val++)
        for (int number = 0; number < 1000; number++) {
            const char* name = text_of("x_%s_%06d", val ? "val" : "train", number);
            if (!file_exists(text_of("one/%s.bin", name))) break;
            for (int spans = 0; spans < 2; spans++) {
                const char* end = spans ? "spans" : "bin";
                expect(same_files(text_of("one/%s.%s", name, end), text_of("two/%s.%s", name, end)),
                       "%s.%s", name, end);
            }
            shards++;
        }
    size_t train = check_shards("one/x_train", 20000), val = check_shards("one/x_val", 20000);
    expect(shards > 3 && val > 300 && val < 400, "%zu shards, %zu documents for validation", shards, val);
    expect(strstr(summary, text_of("%zu documents", train + val)), "%zu documents: %s", train + val, summary);
    size_t dropped = 0;
    for (size_t i = 0; i < 3000; i++) dropped += i % 5 != 4 && i % 17 == 3;
    expect(strstr(summary, text_of("%zu samples were dropped because of a token that reaches across", dropped)) &&
           strstr(summary, "the first: many.jsonl, line 4\n"), "%zu dropped: %s", dropped, summary);
    expect(train + val == 3000 - dropped + 600, "documents");
    expect(strstr(summary, "600 lines in the form preference") && strstr(summary, "tokens are trained ("),
           "%s", summary);
    free(summary);
    FILE* pairs = fopen("pairs.jsonl", "wbe");
    need(pairs != NULL, "a file");
    for (int i = 0; i < 100; i++)
        fprintf(pairs, "{\"prompt\": \"Number\", \"chosen\": \" is good\", \"rejected\": \" is bad%.*s\"}\n", i % 9,
                " and so on");
    fclose(pairs);
    for (size_t most = 30; most < 60; most += 7) {
        expect_run(0, "200 documents", text_of("--tokenizer qwen --chat pairs.jsonl --val 0 --shard-tokens %zu --out "
                                               "pairs", most));
        expect(check_shards("pairs_train", most) == 200 && file_exists("pairs_train_000030.bin"), "pairs in shards of "
               "%zu tokens", most);
    }
    verdict("program: the same shards for any number of threads; groups whole, a tenth for validation, a summary");

    put_text("few.jsonl", "\xEF\xBB\xBF{\"messages\": [" USER("hi") ", " ANSWER("Hello!") "]}\r\n\n"
             "{\"messages\": [" USER("hi") ", " ANSWER("again") "]}");
#define FEW "--tokenizer qwen --chat few.jsonl --val 0 "
    expect_run(0, "2 documents, the longest of", FEW "--out f");
    expect_run(0, "--- document 0, plain, group 0: tokens 0 to 20", "--show f_train_000000.bin --tokens 1000");
    expect(strstr(job.text[0], "assistant\n\xE2\x9F\xA6Hello!<|im_end|>\xE2\x9F\xA7\n--- document 1, plain, group 1"),
           "%s", job.text[0]);
    expect(strstr(job.text[0], "\xE2\x9F\xA6" "again<|im_end|>\xE2\x9F\xA7\n"), "%s", job.text[0]);
    SpanFile file;
    need(opens_spans("f_train_000000.bin", &file) && file.span_count == 2, "%s", error.text);
    expect_run(0, "\xE2\x9F\xA6", text_of("--show f_train_000000.bin --at %llu --tokens 1",
                                          (unsigned long long)file.spans[1].first + 1));
    expect(count_in(job.text[0], "\xE2\x9F\xA7") == 1 && strstr(job.text[0], "document 1"), "%s", job.text[0]);
    expect_run(0, "--- document 0", text_of("--show f_train_000000.bin --at 1 --tokens 2"));
    expect(count_in(job.text[0], "\xE2\x9F\xA6") == 0, "%s", job.text[0]);
    span_file_close(&file);
    remove("f_train_000000.spans");
    expect_run(1, "f_train_000000.spans is missing", "--show f_train_000000.bin");
    verdict("program: --show marks what is trained, from any token on; a byte order mark and blank lines");
}

static void test_flags(void) {
    put_text("few.jsonl", "{\"messages\": [" USER("hi") ", " ANSWER("Hello!") "]}\n{\"text\": \"More.\"}\n");
    put_text("bad.jsonl", "{\"text\": \"a good line\"}\n{\"messages\": []}\n{\"messages\": [{\"role\": \"x\"}]}\n");
#define BAD "--tokenizer qwen --chat bad.jsonl --val 0 --out b "
    expect_run(1, "bad.jsonl, line 2: \"messages\" is an empty conversation; --bad-lines skip leaves out lines", BAD);
    expect(directory_count(".", "b_") == 0, "something was written");
    expect_run(0, "2 bad lines were skipped", BAD "--bad-lines skip");
    expect(strstr(job.text[0], "bad.jsonl, line 3: message 1 has the unknown role 'x'"), "%s", job.text[0]);
    put_text("bad.jsonl", "{\"text\": \"a good line\"}\n{\"messages\": []}\n");
    expect_run(0, "1 bad line was skipped", BAD "--bad-lines skip");
    need(mkdir("bare", 0755) == 0, "a directory");
    copy_tree("qwen/tokenizer.json", "bare/tokenizer.json");
    copy_tree("qwen/tokenizer_config.json", "bare/tokenizer_config.json");
    expect_run(1, "tokenize: few.jsonl, line 1: the tokenizer has no chat template for a conversation; give --template",
               "--tokenizer bare --chat few.jsonl --val 0 --out b --bad-lines skip");
    put_text("none.jsonl", "{\"prompt\": \"in \", \"completion\": \"the\"}\n");
    expect_run(1, "all 1 samples of 'none.jsonl' were dropped; the first because of a token that reaches across",
               "--tokenizer qwen --chat none.jsonl --val 0 --out n");
    expect_run(1, "few.jsonl, line 1 is a conversation; give --chat instead",
               "--tokenizer qwen --jsonl few.jsonl --out n");
    expect_run(1, "has no text in it", "--tokenizer qwen --chat /dev/null --val 0 --out n");
    put_text("endless.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
             "{% if add_generation_prompt %}assistant:{% endif %}");
    expect_run(1, "no answer ends with a token that ends a generated text (<|im_end|>): the last one trained is '",
               FEW "--out e --template endless.jinja");
    put_text("mixed.jsonl", "{\"segments\": [{\"text\": \"a\", \"label\": false}, "
             "{\"text\": \" b\", \"label\": true}]}\n"
             "{\"text\": \"an end\"}\n");
    expect_run(0, "warning: 1 documents end without a stop token (<|im_end|>); the first of them ends with ' b'",
               "--tokenizer qwen --chat mixed.jsonl --val 0 --out m");
    expect_run(0, "2 documents", FEW "--out e --template qwen/marked.jinja --system Short. --turns each");
    char* kept = text_read("e_tokenizer/chat_template.jinja", NULL);
    expect(strcmp(kept, MARKED) == 0, "the template is not kept");
    free(kept);
    expect_run(0, "system\nShort.<|im_end|>", "--show e_train_000000.bin --tokens 100");
    put_text("long.jsonl", "{\"text\": \"A text of some more tokens than that.\"}\n");
    expect_run(1, "long.jsonl, line 1: 19 tokens that must be in one shard are more than --shard-tokens 5",
               "--tokenizer qwen --chat long.jsonl --val 0 --out l --shard-tokens 5");
    verdict("program: bad lines, none left, no stop token, another template, a shard that is too small");
    static const char* const wrong[][2] = {
        {"--turns last --text few.jsonl --tokenizer qwen --out w", "--turns is for --chat"},
        {"--system S --show f_train_000000.bin", "--system is for --chat"},
        {"--template T --jsonl few.jsonl --tokenizer qwen --out w", "--template is for --chat"},
        {"--alpaca-text on --bytes few.jsonl --out w", "--alpaca-text is for --chat"},
        {FEW "--out w --special off", "--special is for"}, {FEW "--out w --dedup exact", "--dedup leaves out"},
        {FEW "--out w --entropy 1", "--entropy is that of texts"}, {FEW "--out w --train-bpe 300", "--train-bpe takes"},
        {FEW "--out w --text few.jsonl", "given together"}, {FEW "--out w --encode on", "--encode reads"},
        {FEW "--show few.jsonl", "--show prints"}, {"--chat few.jsonl --out w", "--tokenizer PATH is missing"},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) expect_run(2, wrong[i][1], wrong[i][0]);
    verdict("program: flags that do not go together");
}

// Files of a set in the order in which they get their names.
static const char* set_file(size_t i) {
    return text_of("x_train_%06d.%s", (int)(i / 2), i % 2 ? "bin" : "spans");
}

// A set that replaces one of the same tokens with other spans, stopped after each of its renames: some of the files are
// new, and the others old.
static void test_stopped(void) {
    FILE* file = fopen("turns.jsonl", "wbe");
    need(file != NULL && mkdir("old", 0755) == 0 && mkdir("new", 0755) == 0, "directories");
    for (int i = 0; i < 200; i++) fprintf(file, "%s\n", TWO_TURNS);
    fclose(file);
#define TURNS "--tokenizer qwen --chat turns.jsonl --val 0 --shard-tokens 2500 "
    expect_run(0, "200 documents", TURNS "--out old/x");
    expect_run(0, "200 documents", TURNS "--turns last --out new/x");
    size_t files = 0;
    while (file_exists(text_of("old/%s", set_file(files)))) files++;
    expect(files >= 6 && same_files("old/x_tokenizer/tokenizer.json", "new/x_tokenizer/tokenizer.json"), "%zu files",
           files);
    for (size_t renamed = 0; renamed <= files; renamed++) {
        remove_tree("mix");
        need(mkdir("mix", 0755) == 0, "a directory");
        for (size_t i = 0; i < files; i++)
            copy_tree(text_of("%s/%s", i < renamed ? "new" : "old", set_file(i)), text_of("mix/%s", set_file(i)));
        bool whole = renamed == 0 || renamed == files;
        bool opened = opens("mix/x_train_*.bin");
        expect(opened == whole, "%zu of %zu files are new: %s", renamed, files, opened ? "accepted" : error.text);
        expect(whole || strstr(error.text, "tokenize was stopped"), "%zu files are new: %s", renamed, error.text);
    }
    verdict("program: a set with the same tokens and other spans, stopped after any of its renames, is refused");
}

// A conversion that is killed leaves the files as they were, or a part of a set, which is refused.
static void test_kills(void) {
    enum { KILLS = 12 };
    size_t old = 0, refused = 0, ended = 0;
    need(mkdir("kill", 0755) == 0, "a directory");
    double began = now_ms();
    expect_run(0, "200 documents", TURNS "--out kill/x");
    double whole = now_ms() - began;
    for (size_t i = 0; i < KILLS; i++) {
        Words* words = (Words*)calloc(1, sizeof *words);
        need(words != NULL, "memory");
        words_put(words, 0, tokenize, strlen(tokenize));
        words_add(words, text_of(TURNS "--out kill/x --turns %s", i % 2 ? "all" : "last"));
        program_free(&job);
        program_start(&job, words->words, NULL, NULL);
        free(words);
        sleep_ms(whole * (0.5 + 0.05 * (double)i));
        bool asked = i % 3 == 0;
        kill(job.pid, asked ? SIGTERM : SIGKILL);
        programs_wait(&job, 1, PROGRAM_MS);
        bool opened = opens("kill/x_train_*.bin");
        expect(opened || strstr(error.text, "tokenize was stopped") || strstr(error.text, "no file matches"),
               "killed: %s", error.text);
        ended += program_good(&job);
        old += opened && !program_good(&job);
        refused += !opened;
        if (opened) check_shards("kill/x_train", 2500);
    }
    printf("        %zu had ended, %zu left what was there, %zu a part, which is refused\n", ended, old, refused);
    expect_run(0, "200 documents", TURNS "--out kill/x");
    expect(directory_count("kill", ".tmp") == 0 && opens("kill/x_train_*.bin"), "files that kills have left");
    verdict("program: kills leave the old shards or refused ones, and the next conversion removes what is left");
}

int main(int argc, char** argv) {
    const char* program = "build/tokenize";
    const Flag rows[] = {{"tokenize", KIND_TEXT, &program, "PATH", 0, 0, "the program", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_chat", NULL, &flags, argc, argv)) return code;
    tests_begin("test_chat");
    tokenize = realpath(program, NULL);
    char* qwen = realpath("dev/test/fixtures/tokenizers/qwen2.json", NULL);
    char* mistral = realpath("dev/test/fixtures/tokenizers/mistral.json", NULL);
    char* tokenizers = realpath("dev/test/fixtures/tokenizers", NULL);
    char* published = realpath("dev/test/fixtures/chat_ids.jsonl", NULL);
    need(qwen && mistral && tokenizers && published, "run it in the root of the checkout");
    root_enter();
    need(mkdir("qwen", 0755) == 0, "a directory");
    copy_tree(qwen, "qwen/tokenizer.json");
    put_text("qwen/tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}");
    put_text("qwen/chat_template.jinja", CHATML);
    put_text("qwen/marked.jinja", MARKED);
    expect(!tokenizer_open_with(&tokenizer, "qwen", NULL, "none.jinja", &error), "a template that is not there");
    need(tokenizer_open_with(&tokenizer, "qwen", NULL, "qwen/marked.jinja", &error) &&
             chat_rules_set(&rules, &tokenizer, "qwen", &error), "%s", error.text);
    expect(strcmp(rules.chat_template, MARKED) == 0 && strcmp(rules.end, "<|im_end|>") == 0, "the template of a file");
    test_forms();
    test_masks();
    test_inference();
    test_begin(mistral);
    test_published(published, tokenizers);
    test_refusals();
    test_spans();
    test_structure();
    test_targets();
    if (tokenize) test_conversion(), test_flags(), test_stopped(), test_kills();
    else skip("the program tokenize", text_of("there is none at %s", program));
    program_free(&job);
    tokenizer_close(&tokenizer);
    free(tokenize);
    free(qwen);
    free(mistral);
    free(tokenizers);
    free(published);
    return tests_end();
}
