#!/usr/bin/env python3
"""chat_ids.py: token ids and assistant masks of transformers for published chat templates, for dev/test/test_chat.c.

    pip install transformers jinja2
    python3 dev/peers/chat_ids.py --write      # rewrites dev/test/fixtures/chat_ids.jsonl
    python3 dev/peers/chat_ids.py              # checks the file against what this transformers makes

The templates are those that the models publish, with their special tokens added to the small tokenizer of their kind in
dev/test/fixtures/tokenizers. Each has a second text with the answers between {% generation %} and {% endgeneration %},
as in TRL's templates for training, which renders the same. A line of the file is a conversation, a template, or a case:
a conversation with the template before it, up to its last answer, since what follows is not in a document. It has

    ids      of apply_chat_template; null: the template refuses the conversation
    marked   for each answer its run of 1, [first, count], in the assistant mask of apply_chat_template with the marked
             template. null: a token reaches across a border of the answer; transformers has it in the mask, and
             tokenize --chat drops the conversation. null for all: transformers finds no token where an answer begins,
             since the special token before it takes its white space, and leaves out this answer and those after it.
             Where it finds this special token there, the run here begins after it: it is given, not predicted
    prefix   the same without marks: an answer begins after the ids of the messages before it with
             add_generation_prompt, and ends with its end-of-turn token in the ids of the messages up to it: the last
             one there, or the first of several that follow each other. null: these are not the first ids of the
             conversation, as where a template writes earlier turns in another way; tokenize --chat drops it
"""

import argparse
import json
import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]  # this folder has files named like packages
try:
    import jinja2
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template
except ImportError as missing:
    print(f"skipped: {missing}; pip install transformers jinja2")
    sys.exit(0)

FIXTURES = os.path.join(HERE, "../test/fixtures")
ALTERNATE = "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"


def marks(before, text):
    """A replacement of `text`, printed for each message, by one that marks it in those of the assistant."""
    return (before + "{% if message['role'] == 'assistant' %}{% generation %}{{ " + text + " }}{% endgeneration %}"
            "{% else %}{{ " + text + " }}{% endif %}")


def marked(text):
    return "{% generation %}{{ " + text + " }}{% endgeneration %}"


def chatml(system):
    turn = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\n" + system + "<|im_end|>\\n' }}{% endif %}" + turn + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    return template, [(turn, marks("{{'<|im_start|>' + message['role'] + '\\n'}}", "message['content'] + '<|im_end|>'")
                       + "{{ '\\n' }}")]


QWEN_2 = chatml("You are a helpful assistant.")
SMOLLM_2 = chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face")

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}" + ALTERNATE + "{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    [("{{ ' '  + content.strip() + ' ' + eos_token }}", marked("' '  + content.strip() + ' ' + eos_token"))])

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    [("'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>'", "'<|end_header_id|>\\n\\n'"),
     ("{{ content }}", marks("{{ content }}", "message['content'] | trim + '<|eot_id|>'"))])

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    + ALTERNATE + "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    [("{{ message['content'] + eos_token + ' ' }}", marked("message['content'] + eos_token") + "{{ ' ' }}")])

ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    [("{{ '<|assistant|>\\n'  + message['content'] + eos_token }}",
      "{{ '<|assistant|>\\n' }}" + marked("message['content'] + eos_token").replace("n %}", "n +%}"))])

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    + ALTERNATE + "{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}",
    [("{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
      marks("{{ '<start_of_turn>' + role + '\\n' }}", "message['content'] | trim + '<end_of_turn>'") + "{{ '\\n' }}")])

PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    [("{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}",
      "{{'<|assistant|>\\n'}}" + marked("message['content'] + '<|end|>'") + "{{'\\n'}}")])

DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    [("{{ 'Assistant: ' + message['content'] + eos_token }}",
      "{{ 'Assistant:' }}" + marked("' ' + message['content'] + eos_token"))])

QWEN_3_TURN = """        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + \
'\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
"""
QWEN_3_END = """            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
"""
QWEN_3 = ("""{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with \
function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n\
</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = \
content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
""" + QWEN_3_TURN + """        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
""" + QWEN_3_END + """    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    [(QWEN_3_TURN, "        {{- '<|im_start|>' + message.role + '\\n' }}\n        {%- generation %}\n"
      + QWEN_3_TURN.replace("'<|im_start|>' + message.role + '\\n<think>", "'<think>")
                   .replace("'<|im_start|>' + message.role + '\\n' + ", "")),
     (QWEN_3_END, QWEN_3_END.replace("\\n' }}\n", "' }}\n        {%- endgeneration %}\n        {{- '\\n' }}\n"))])

IM = ["<|endoftext|>", "<|im_end|>"]
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# name, template and its marks, tokenizer, added tokens ("+": not special, "_": takes the white space after it), bos,
# eos, the tokens of generation_config.json, of which the last ends a turn
TEMPLATES = [
    ("Qwen 2", QWEN_2, "qwen2", [], None, "<|im_end|>", IM),
    ("Qwen 3", QWEN_3, "qwen2", ["+<tool_call>", "+</tool_call>", "+<think>", "+</think>"], None, "<|im_end|>", IM),
    ("SmolLM 2", SMOLLM_2, "smollm2", [], "<|im_start|>", "<|im_end|>", ["<|im_end|>"]),
    ("Llama 2", LLAMA_2, "llama2", [], "<s>", "</s>", ["</s>"]),
    ("Llama 3", LLAMA_3, "llama3",
     ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
     "<|begin_of_text|>", "<|eot_id|>", ["<|end_of_text|>", "<|eot_id|>"]),
    ("Mistral 7B", MISTRAL, "mistral", [], "<s>", "</s>", ["</s>"]),
    ("Zephyr", ZEPHYR, "llama2", [], "<s>", "</s>", ["</s>"]),
    ("Gemma", GEMMA, "gemma", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>",
     ["<eos>", "<end_of_turn>"]),
    ("Phi 3", PHI_3, "llama2", ["<|endoftext|>", "_<|assistant|>", "_<|system|>", "_<|end|>", "_<|user|>"], "<s>",
     "<|endoftext|>", ["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    ("DeepSeek", DEEPSEEK, "gpt2", ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", EOS],
     "<\uff5cbegin\u2581of\u2581sentence\uff5c>", EOS, [EOS]),
]

ROLES = {"s": "system", "u": "user", "a": "assistant"}
CONVERSATIONS = [
    ["u", "Who wrote Emma?", "a", "Jane Austen wrote it."],
    ["s", "Be brief.", "u", "Is it late?", "a", "Yes."],
    ["u", "Hi", "a", "Hello! How are you?", "u", "Fine.", "a", "Good."],
    ["s", "You count.", "u", "one", "a", "two", "u", "three", "a", "four", "u", "five", "a", "six"],
    ["s", "", "u", "a", "a", "b", "u", "c", "a", "d", "u", "e", "a", "f", "u", "g", "a", "h"],
    ["u", "", "a", ""],
    ["s", " ", "u", "\n", "a", "  ", "u", " \n ", "a", "\n\n"],
    ["u", "  before and after \n", "a", " An answer, padded \t\n", "u", "\t- more", "a", "\n It  is. "],
    ["s", "Lists\nand code.\n", "u", "line one\nline two\r\n\nfour", "a",
     "- a\n- b\n\n```c\nint x = 1;\n\n    x++;\n```\n"],
    ["u", "O\u00f9 est le caf\u00e9? \u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469", "a",
     "La\u0300-bas, nai\u0308ve \ufb01n\u3000\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u00a0", "u",
     "\u3000\u0645\u0631\u062d\u0628\u0627", "a", "\u00a0\u041f\u0440\u0438\u0432\u0435\u0442\u2028"],
    ["u", "What are <|im_end|>, </s> and <|endoftext|>?", "a",
     "<|im_start|>Tokens</s><|im_end|>: <|eot_id|>, <end_of_turn>, <|end|> and [INST] more.", "u", "<s>So?", "a",
     "Yes<|im_end|>"],
    ["u", "2 + 2?", "a", "<think>\nTwo and two.\n</think>\n\nIt is 4."],
    ["u", "2 + 2?", "a", "<think>\nTwo.\n</think>\n\n4", "u", "And 3?", "a", "<think>\n4 + 3\n</think>\n\n7"],
    ["s", "Think.", "u", "Odd", "a", "no beginning</think> x", "u", "marks", "a", "<think>without an end"],
    ["u", "One?", "a", "<think></think>Two.", "u", "and one without an answer"],
    ["s", "It begins.", "a", "Without a question."],
    ["u", "first", "u", "second", "a", "Both."],
    ["u", "go", "a", "part one,", "a", " part two"],
    ["u", "hi", "a", "Hello.", "s", "Be rude.", "u", "hi", "a", "What?"],
    ["u", "It's 1,234.56, isn't it? x==y&&z", "a", "We'll see: 1234567 * 2 = 2469134;  {\"a\": [1, 2]}", "u",
     "'S <<SYS>> [/INST]", "a", "<|user|>\nno"],
]


def directory(path, tokenizer, added, bos, eos):
    """Writes a tokenizer; returns what goes before '],"normalizer"' in its file, and its tokenizer_config.json."""
    with open(os.path.join(FIXTURES, "tokenizers", tokenizer + ".json"), encoding="utf-8") as file:
        text = file.read()
    whole = json.loads(text)
    first = 1 + max(max(whole["model"]["vocab"].values()), max(t["id"] for t in whole["added_tokens"]))
    more = "".join("," + json.dumps({"id": first + i, "content": t.lstrip("+_"), "single_word": False, "lstrip": False,
                                     "rstrip": t[0] == "_", "normalized": False, "special": t[0] != "+"})
                   for i, t in enumerate(added))
    assert text.count('],"normalizer"') == 1
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": bos})
    with open(os.path.join(path, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write(text.replace('],"normalizer"', more + '],"normalizer"'))
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        file.write(config)
    return more, config


def runs(mask):
    found = []
    for i, bit in enumerate(mask):
        if bit and i > 0 and mask[i - 1]:
            found[-1][1] += 1
        elif bit:
            found.append([i, 1])
    return found


def ids_of(tokenizer, messages, answers=False):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=answers, return_dict=True)["input_ids"]


def first_ids(tokenizer, text, ids):
    """Whether the ids of a part at the beginning are the first of those of the whole."""
    part = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:len(part)] == part


def by_prefix(tokenizer, messages, ids, end):
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, until = ids_of(tokenizer, messages[:i], True), ids_of(tokenizer, messages[:i + 1])
        stop = len(until) - until[::-1].index(end)
        while until[stop - 2] == end:
            stop -= 1
        good = ids[:len(prompt)] == prompt and ids[:stop] == until[:stop] and stop > len(prompt)
        spans.append([len(prompt), stop - len(prompt)] if good else None)
    return spans


def by_marks(tokenizer, messages, ids):
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (text,), (borders,) = render_jinja_template([messages], chat_template=tokenizer.chat_template,
                                                return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
    spans = runs(made["assistant_masks"])
    assert made["input_ids"] == ids
    if len(spans) != len(borders):
        return None
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    for span, (border, _) in zip(spans, borders):
        if text[border].isspace() and ids[span[0]] in special:
            span[:] = [span[0] + 1, span[1] - 1]
    return [span if all(first_ids(tokenizer, text[:border], ids) for border in pair) else None
            for span, pair in zip(spans, borders)]


def case(tokenizer, messages, template, with_marks, end):
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    messages = messages[:last + 1]
    tokenizer.chat_template = template
    try:
        ids = ids_of(tokenizer, messages)
    except jinja2.exceptions.TemplateError:
        return {"ids": None}
    prefix = by_prefix(tokenizer, messages, ids, end)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokenizer.chat_template = with_marks
    if tokenizer.apply_chat_template(messages, tokenize=False) != text:
        sys.exit("the marked template gives another text:\n" + with_marks)
    return {"ids": ids, "marked": by_marks(tokenizer, messages, ids), "prefix": prefix}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the file")
    parser.add_argument("--file", default=os.path.join(FIXTURES, "chat_ids.jsonl"))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    conversations = [[{"role": ROLES[role], "content": text} for role, text in zip(c[::2], c[1::2])]
                     for c in CONVERSATIONS]
    lines, refused, dropped, across = [{"messages": messages} for messages in conversations], 0, 0, 0
    for name, (template, replacements), tokenizer, added, bos, eos, ends in TEMPLATES:
        with_marks = template
        for old, new in replacements:
            assert with_marks.count(old) == 1, (name, old)
            with_marks = with_marks.replace(old, new)
        with tempfile.TemporaryDirectory() as path:
            more, config = directory(path, tokenizer, added, bos, eos)
            own = transformers.AutoTokenizer.from_pretrained(path)
        ids = [own.convert_tokens_to_ids(token) for token in ends]
        lines.append({"name": name, "tokenizer": tokenizer, "added": more, "config": config,
                      "generation": json.dumps({"eos_token_id": ids}), "template": template, "marks": with_marks})
        for messages in conversations:
            lines.append(case(own, messages, template, with_marks, ids[-1]))
            refused += lines[-1]["ids"] is None
            dropped += None in lines[-1].get("prefix", [])
            across += None in (lines[-1].get("marked") or [])
    content = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    if arguments.write:
        with open(arguments.file, "w", encoding="utf-8") as file:
            file.write(content)
    else:
        with open(arguments.file, encoding="utf-8") as file:
            if file.read() != content:
                sys.exit("the file differs from what transformers " + transformers.__version__ + " makes")
    print(f"{len(TEMPLATES)} templates and {len(conversations)} conversations by transformers "
          f"{transformers.__version__}; {refused} are refused, and {dropped} without marks and "
          f"{across} with marks cannot be trained")


main()
