#!/usr/bin/env python3
"""templates.py: chat templates as jinja2 renders them, for dev/test/test_template.c.

    pip install jinja2
    python3 dev/peers/templates.py --write      # rewrites dev/test/fixtures/templates.json
    python3 dev/peers/templates.py              # checks the file against this jinja2's output

The templates resemble published ones: ChatML, Llama 2 and 3, Mistral, Gemma, Qwen 3, Phi. They are
rendered as by transformers' apply_chat_template: trim_blocks and lstrip_blocks on, break and continue, generation,
raise_exception as a function, its tojson, `tools` and `documents` none. Random templates from a grammar are added: expressions of every operator, method,
filter and test that llmtrain/text/templates.h knows, ifs, loops and white space control. A case is the numbers of a
template and of a conversation, add_generation_prompt, and the text, or null where jinja2 fails.
"""

import argparse
import json
import os
import random
import sys

try:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    print("skipped: there is no jinja2; pip install jinja2")
    sys.exit(0)

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helper.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}\
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}\
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA_3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message comes first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + \
'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

QWEN_3 = """{%- if tools %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
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
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

PHI = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ODD = ["{{ 1 if false }}", "{{ missing }}|{{ missing == none }}|{{ none }}", "a\n  {% if true %}\n  b\n  {% endif %}\nc\n\n",
       "a  {%- if true -%}  b  {%- endif +%}\n  c", "  {%+ if true %} x {% endif %}", "{{ 'it''s' }}", "{{ \"a\\tb\\\\\" }}",
       "{# a {{ b }} #}x{# y #}\nz", "{{ '}}' }}{{ '%}' }}", "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
       "{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
       "{% for c in 'a-b-c'.split('-') %}{{ c }}{% if not loop.last %}, {% endif %}{% endfor %}",
       "{{ messages[-1].role }}{{ messages[9] }}{{ messages[9].role }}", "{{ messages[1:-1]|length }}{{ messages[:1][0].role }}",
       "{{ not true == false }}", "{{ 1 + 2 * 3 - 4 // 3 % 2 ~ 'x' }}", "{{ -7 // 2 }} {{ -7 % 3 }}", "{{ 'x' in messages[0] }}",
       "{{ 'a' < 'b' and 2 >= 2 }}", "{{ missing | default('d') }}", "{{ (messages | last).content }}", "{% for x in missing %}{% endfor %}e",
       "{{ 'a' if messages|length > 1 else 'b' if true else 'c' }}", "{{ true or missing.x }}", "{{ missing.x }}", "{{ 1 2 }}", "{% if %}{% endif %}",
       "{% endif %}", "{% if true %}", "{{ 'é€😀'|length }}", "{{ messages.0 }}", "{{ 'ab' * 2 }}", "{{ 1 + 'a' }}",
       # Training templates: what the model answers, in a scope of its own.
       "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}\n  {%- generation %}\n{{ m.content }}{% set x = 1 %}{{ x }}\n"
       "  {%- endgeneration %}\n{% else %}{{ m.content }}{{ x }}{% endif %}|{% endfor %}",
       "{% generation %}", "{% endgeneration %}", "{% generation %}{% endif %}", "{% break %}", "{% if true %}{% continue %}{% endif %}",
       # Loops.
       "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }} {% endfor %}{{ loop }}.",
       "{% for m in messages %}{{ loop.index }}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }} {% endfor %}.",
       "{% for m in messages %}{% for c in 'a-b'.split('-') %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}{{ loop.index is even }}{% endfor %}",
       "{% for m in messages %}{{ loop.previtem.role if not loop.first }}<{{ m.role }}>{{ loop.nextitem.role if loop.nextitem is defined }} "
       "{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}",
       "{% for i in range(messages|length - 1, -1, -1) %}{{ messages[i].role }}{{ i }}{% endfor %}{% for i in range(2) %}{{ i }}{% endfor %}"
       "{{ range(3, 1)|list|length }}{{ range(1, 8, 3)|join(',') }}",
       "{{ range(0, 9, 0)|list }}",
       # Lists.
       "{% for m in messages %}{{ m.role in ['user', 'tool'] }} {{ m.role not in ('user', 'tool',) }} {{ m.role in ('user') }} {{ m.role in ('user',) }};{% endfor %}",
       "{% set l = [] %}{{ l|length }}{% set l = l + ['a'] + [1, 2] %}{{ l|join('-') }}{{ l[1:]|join }}{{ [l, 1][0][0] }}{{ ([1] + ['x'])|last }}{{ 1 in [] }}",
       "{% for x in [1, 'a', none,] %}{{ x }};{% endfor %}{{ ['b', 'c'] | reverse | join('') }}{{ (1, 2) == (1, 2) }}",
       "{{ [1, 2] + 'a' }}", "{{ ', '.join(['a', 'b']) }}{{ '-'.join('a,b,c'.split(',', 1)) }}{{ 'a,b'.split(',', 0)|length }}{{ 'a,b,c'.split(',', -1)|length }}",
       # Filters.
       "{{ messages|map(attribute='role')|join(', ') }} {{ ['a', 'B']|map('upper')|join }} {{ [' a', 'ba ']|map('trim')|map('replace', 'a', 'x')|join }}",
       "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ (messages|selectattr('role', 'eq', 'system')|list)[0].content }}"
       "{{ messages|rejectattr('role', 'in', ['user', 'system'])|map(attribute='content')|list|last }}",
       "{{ messages|selectattr('tool_calls')|list|length }}{{ messages|selectattr('tool_calls', 'defined')|list|length }}"
       "{{ messages|rejectattr('content')|list|length }}{{ messages|selectattr('role', '==', 'user')|list|count }}{{ messages|selectattr('role', 'ne', 'user')|list|count }}",
       "{{ [1, 2, 3, 4]|select('even')|join }}{{ [1, 2, 3, 4]|reject('even')|join }}{{ [0, 1, '', 'a']|select|join(',') }}{{ [3, 6]|select('divisibleby', 3)|join }}",
       "{{ missing|map(attribute='x')|list|length }}{{ missing|join(',') }}|{{ missing|list|length }}", "{{ none|list }}",
       "{{ 'it''s a-b (cd) [ef e'|title }} {{ \"it's A-b c1D\".title() }} {{ \"it's A-b c1D\"|title }} {{ 'hELLO wORLD'|capitalize }} {{ 'hELLO'.capitalize() }}",
       "{{ 'banana'|replace('a', 'o') }}{{ 12|replace('1', 'x') }}{{ 1|capitalize }}", "{{ ''|default('d', true) }}{{ ''|default('d') }}{{ none|default('e', boolean=true) }}{{ 0|d('f', false) }}",
       "{{ messages[2]|tojson }}{{ 'a\"\\\\b\\n\\té<&>' | tojson }}{{ [1, true, none, 'x', []]|tojson }}{{ messages[1].content|tojson }}", "{{ missing|tojson }}",
       # Methods and tests.
       "{{ messages[0].get('role') }}{{ messages[0].get('x') }}{{ messages[0].get('x', 'y') }}{{ messages[0].get('tool_calls') is none }}",
       "{{ 2 is even }}{{ 2 is odd }}{{ true is odd }}{{ 6 is divisibleby(3) }}{{ 7 is divisibleby 3 }}{{ 7 is not even }}{{ 1 is integer }}{{ true is integer }}{{ 'a' is integer }}",
       "{{ 'a' is eq 'a' }}{{ 'a' is equalto('b') }}{{ 1 is ne 2 }}{{ 'a' is in ['a', 'b'] }}{{ 'a' is not in 'bc' }}{{ 'a' is eq 'a' and 1 is even or false }}",
       "{{ 'a' is even }}", "{{ missing is odd }}", "{{ 1 is divisibleby(0) }}", "{{ true is true }}{{ 1 is true }}{{ false is false }}{{ none is false }}",
       # Macros and blocks.
       "{% macro turn(m, end='.') %}<{{ m.role }}>{{ m.content | trim }}{{ end }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{{ turn(m, '!') }}{{ turn(end='?', m=m)|upper if m.role == 'system' }}{% endfor %}",
       "{% set a = 1 %}{% macro f(x, y=x ~ 'd') %}{% set a = a ~ x %}{{ a }}{{ y }}{{ z }}{{ m }}{{ loop }}{% endmacro %}{% set z = 'z' %}{% for m in messages %}{% set z = 2 %}{{ f(3) }} {% endfor %}{{ a }}{{ f() }}{{ f is none }}",
       "{% macro f(n) %}{% for i in range(n) %}{{ i }}{{ f(n - 1) }}{% endfor %}{% endmacro %}{{ f(3) }} {{ f(2)|length }} {{ f(1) is string }} {{ f is defined }}",
       "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, b=2) }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}",
       "{% macro f(ns) %}{% set ns.x = ns.x + 1 %}{% set ns.y = 'y' %}-{% endmacro %}{% set ns = namespace(x=1) %}{{ f(ns) }}{% for m in messages %}{{ f(ns) }}{% endfor %}{{ ns.x }}{{ ns.y }}",
       "{% macro f() %}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}{% endmacro %}{{ f() ~ f() }}{{ '' if false else f() }}{{ f() and 'x' }}",
       "{% macro f(a) %}", "{% endmacro %}", "{% macro unused(a, b) %}{{ b.unknown() }}{% endmacro %}a",
       "{% set x %}a{{ 1 }}\n{% set y = 2 %}{{ y }}{% endset %}[{{ x }}]{{ y }}{% set ns = namespace() %}{% set ns.t %}{{ x }}{% endset %}{{ ns.t|upper }}{% set e %}{% endset %}{{ e == '' }}",
       # Macros in an if, and breaks in macros and blocks.
       "{% if true %}{% set a = 1 %}{% macro f() %}{{ a }}{% endmacro %}{% set a = 2 %}{% endif %}{{ f() }}{% set a = 3 %}{{ f() }}",
       "{% for m in messages %}{% macro f() %}{% if true %}{% break %}{% endif %}{% endmacro %}{{ f() }}{% endfor %}",
       "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
       "{% set ns = namespace(x='-') %}{% for m in messages %}{{ m.role }}{% set ns.x %}a{{ m.role }}{% if loop.index == 3 %}{% break %}{% endif %}"
       "{% endset %}{% endfor %}{{ ns.x }}",
       "{% set ns = namespace(x='-') %}{% for m in messages %}{% set ns.x %}a{{ m.role }}{% if loop.last %}{% continue %}{% endif %}{% endset %}"
       "{{ ns.x }}{% endfor %}{{ ns.x }}",
       # What filters give: true, without length or index, and gone through once.
       "{% if messages|selectattr('role', 'equalto', 'x') %}a{% endif %}{% if messages|selectattr('role', 'equalto', 'x')|list %}b{% endif %}"
       "{{ 'c' if []|map('upper') }}{{ 'd' if []|select }}{{ 'e' if []|reject }}{{ 'f' if []|rejectattr('x') }}{{ 'g' if []|reverse }}"
       "{{ 'h' if not []|reverse|list }}",
       "{{ []|map('upper') and 1 }}{{ []|reverse or 2 if false }}{{ missing|map('upper')|default('i', true) == [] }}",
       "{{ messages|map(attribute='role')|length }}", "{{ messages|reverse|count }}", "{{ messages|reverse|last }}", "{{ messages|select|last }}",
       "{{ (messages|map(attribute='role'))[0] }}|{{ (messages|reverse)[-1] }}|{{ (messages|reverse).x }}", "{{ (messages|reverse)[:1] }}",
       "{{ (messages|map(attribute='role'))[1:] }}", "{{ [1]|reverse|tojson }}", "{{ ([1]|reverse) + [2] }}", "{{ [2] + ([1]|select) }}",
       "{% set x = [1]|select %}{{ x == x }}{{ x != x }}{{ x == [1] }}{{ [1] == x }}{{ x == ([1]|select) }}{{ x|list == [1] }}",
       "{% set x = [1, 2]|reverse %}{{ x is iterable }}{{ x is sequence }}{{ x is mapping }}{{ x is defined }}{{ x is string }}{{ 1 in x }}",
       "{% for m in messages|reverse %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ loop.last }}{{ loop.nextitem.role }} {% endfor %}"
       "{% for r in messages|map(attribute='role') if r != 'user' %}{{ r }}{{ loop.revindex }} {% endfor %}",
       "{{ messages|map(attribute='role')|first }}{{ (messages|reverse|first).role }}{{ [1, 2]|select|reverse|length }}{{ [1, 2]|reverse|reverse|last }}"
       "{{ []|map('upper')|first }}{{ '-'.join(messages|map(attribute='role')) }}{{ [1, 2, 3]|reverse|select('odd')|map('string')|join(',') }}"
       "{{ messages|map(attribute='role')|list|length }}{{ (messages|reverse|list)[0].role }}{{ (messages|reverse|list)[:1]|length }}",
       "{{ [1]|select([1])|list }}", "{{ messages|map(messages)|list }}", "{{ messages|selectattr('role', [1, 2])|list }}",
       "{% set x %}", "{% endset %}", "{% for m in messages %}{% set c %}{{ m.content }}{{ c }}{% endset %}{{ c|trim|length }} {% endfor %}{{ c }}"]

CONVERSATIONS = [
    [["user", "Hi"]],
    [["system", " Be brief.\n"], ["user", "Who wrote Emma?  "], ["assistant", "<think>\nhm\n</think>\n\nJane Austen."],
     ["user", "And é😀?"]],
    [["user", "a"], ["assistant", "b"], ["user", "<tool_response>c</tool_response>"], ["assistant", "<think>x</think>d"]],
    [["system", "s"], ["assistant", "b"]],
]


# As transformers has it, without keeping where the text of the model is.
class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("support"), [], [], body).set_lineno(line)

    def support(self, caller):
        return caller()


# A random template that jinja2 cannot parse tests nothing: ours may stop before the error, or accept more syntax.
SYNTAX = object()


def text(r):
    return r.choice(["''", "'a'", "' b\\n'", "'A-b-C'", "'user'", "bos_token", "messages[0].content", "messages[-1]['role']"])


def number(r):
    return r.choice(["0", "1", "2", "7", "messages|length", "messages[0].content|length"])


def expression(r, depth):
    if depth == 0:
        return r.choice([text(r), number(r), "true", "false", "none", "missing", "messages[0]"])
    sub = lambda: expression(r, depth - 1)
    one = lambda: "(" + sub() + ")"
    return r.choice([
        lambda: f"{one()} + {one()}", lambda: f"{one()} ~ {one()}", lambda: f"{one()} - {one()}", lambda: f"{one()} % 3",
        lambda: f"{one()} // 2", lambda: f"{number(r)} * {number(r)} + {number(r)}", lambda: f"{sub()} == {sub()}",
        lambda: f"{sub()} != {sub()}", lambda: f"{number(r)} <= {number(r)}", lambda: f"{text(r)} > {text(r)}",
        lambda: f"{text(r)} in {one()}", lambda: f"{text(r)} not in {text(r)}", lambda: f"not {sub()}",
        lambda: f"{sub()} and {sub()}", lambda: f"{sub()} or {sub()}", lambda: f"{sub()} if {sub()} else {sub()}",
        lambda: f"{one()}|trim", lambda: f"{one()}|length", lambda: f"{text(r)}|upper", lambda: f"{one()} is defined",
        lambda: f"{one()} is not none", lambda: f"{one()} is string", lambda: f"{one()}|default('d')",
        lambda: f"{text(r)}.strip()", lambda: f"{text(r)}.split('-')[0]", lambda: f"{text(r)}.split('-')|length",
        lambda: f"{text(r)}.rstrip('nb\\n')", lambda: f"{text(r)}.startswith({text(r)})",
        lambda: f"{text(r)}.replace('a', {text(r)})", lambda: f"{one()} is mapping", lambda: f"{one()} is true",
        lambda: f"[{sub()}, {sub()}]|last", lambda: f"{text(r)} in [{text(r)}, {sub()}]", lambda: f"({sub()}, {sub()})[{number(r)}]",
        lambda: f"{number(r)} is {r.choice(['even', 'odd', 'divisibleby 3', 'integer', 'eq 2'])}", lambda: f"{one()}|default('d', true)",
        lambda: f"{text(r)}|{r.choice(['title', 'capitalize', 'tojson'])}", lambda: f"{text(r)}.{r.choice(['title', 'capitalize'])}()",
        lambda: f"messages|map(attribute={r.choice([chr(39) + 'role' + chr(39), text(r)])})|join({text(r)})",
        lambda: f"messages|{r.choice(['select', 'reject'])}attr('role', 'eq', {text(r)})|list|length",
        lambda: f"messages[0].get({text(r)})", lambda: f"range({number(r)}, {number(r)})|join('-')",
    ])()


def random_template(r, depth):
    space = lambda: r.choice(["", " ", "\n", "  \n", "\n  ", "x", "y\n"])
    dash = lambda: r.choice(["", "", "-"])
    out = lambda: space() + "{{" + dash() + " " + expression(r, 1) + " " + dash() + "}}" + space()
    block = lambda: random_template(r, depth - 1) if depth else "z"
    parts = []
    for _ in range(r.randint(1, 3)):
        kind = r.randrange(8)
        if kind <= 1:
            parts.append("{{" + dash() + " " + expression(r, r.randint(0, 2)) + " " + dash() + "}}")
        elif kind == 2:
            parts.append("{%" + dash() + " if " + expression(r, 1) + " " + dash() + "%}" + block() + "{%" + dash() +
                         " elif " + expression(r, 1) + " %}" + block() + "{% else " + dash() + "%}" + block() +
                         "{%" + dash() + " endif " + dash() + "%}")
        elif kind == 3:
            parts.append("{% for m in messages " + dash() + "%}" + block() + "{{ m.role }}{{ loop.index0 }}" +
                         "{%" + dash() + " endfor %}")
        elif kind == 4:
            parts.append("{%" + dash() + " set v = " + expression(r, 1) + " " + dash() + "%}{{ v }}")
        elif kind == 5:
            parts.append("{%" + dash() + " generation " + dash() + "%}" + out() + "{% endgeneration " + dash() + "%}")
        elif kind == 6 and depth == 2:  # within a loop or a macro it is refused
            parts.append("{% macro f(a, b=1) " + dash() + "%}" + out() + "{{ a }}{{ b }}{% endmacro " + dash() +
                         "%}{{ f(" + expression(r, 1) + ") }}")
        else:
            parts.append("{% for m in messages %}{% if " + expression(r, 1) + " %}" + out() +
                         r.choice(["{% break %}", "{%- continue -%}"]) + "{% endif %}" + out() +
                         "{{ loop.revindex }}{% endfor %}{% set w %}" + out() + "{% endset %}{{ w }}")
        parts.append(space())
    return space() + "".join(parts)


def render(environment, template, conversation, answers):
    messages = [{"role": role, "content": content} for role, content in conversation]
    try:
        return environment.from_string(template).render(messages=messages, bos_token="<s>", eos_token="</s>", tools=None,
                                                         documents=None, add_generation_prompt=answers)
    except (jinja2.exceptions.TemplateSyntaxError, SyntaxError):
        return SYNTAX
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the file")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="random templates")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--file", default=os.path.join(os.path.dirname(__file__), "../test/fixtures/templates.json"))
    arguments = parser.parse_args()

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[jinja2.ext.loopcontrols, Generation])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    r = random.Random(arguments.seed)
    cases = []
    for template in [CHATML, LLAMA_2, LLAMA_3, GEMMA, QWEN_3, PHI] + ODD:
        for conversation in range(len(CONVERSATIONS)):
            for answers in (True, False):
                if template not in ODD or (conversation == 1 and answers):
                    cases.append([template, conversation, answers])
    cases += [[random_template(r, 2), r.randrange(len(CONVERSATIONS)), True] for _ in range(arguments.random)]
    # How jinja2 prints a whole message, as Python would, does not matter for chat templates.
    cases = [case + [render(environment, case[0], CONVERSATIONS[case[1]], case[2])] for case in cases]
    cases = [case[:3] + [None if case[3] is SYNTAX else case[3]] for case in cases
             if case[3] is not SYNTAX or case[0] in ODD]
    cases = [case for case in cases if case[3] is None or ("{'" not in case[3] and "['" not in case[3])]
    templates = list(dict.fromkeys(case[0] for case in cases))
    lines = ",\n".join(json.dumps([templates.index(case[0])] + case[1:], ensure_ascii=False) for case in cases)
    content = ('{"conversations": ' + json.dumps(CONVERSATIONS, ensure_ascii=False) + ',\n"templates": ' +
               json.dumps(templates, ensure_ascii=False) + ',\n"cases": [\n' + lines + "\n]}\n")
    if arguments.write:
        with open(arguments.file, "w", encoding="utf-8") as file:
            file.write(content)
    else:
        with open(arguments.file, encoding="utf-8") as file:
            if file.read() != content:
                sys.exit("the file differs from what jinja2 " + jinja2.__version__ + " makes")
    failures = sum(case[3] is None for case in cases)
    print(f"{len(cases)} cases by jinja2 {jinja2.__version__}, of which {failures} are refused")


main()
