#!/usr/bin/env python3
"""Renders chat templates with Python's jinja2, set up as Hugging Face transformers does, and writes
chat_golden.json, which chat_template_test.cc compares with.

    LACUNA_DATA_DIR=... make_chat_golden.py      needs jinja2 (3.1.6 was used)

A case is {name, source or file, variables, expected}; expected null means that rendering fails.
`file` names a template: of this repository, or (data/...) of the data folder.
"""
import json
import os
import sys
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


class Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: the body, as when no mask is asked for."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception

CITY = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather <now> of a city & its \"state\"",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "e.g. Zürich, 東京"},
        "days": {"type": "integer", "minimum": 1, "default": 3},
        "exact": {"type": "boolean"}, "limit": {"type": "number", "default": 0.5}}}}}
TIME = {"type": "function", "function": {"name": "now", "parameters": {"type": "object",
                                                                       "properties": {}}}}
USER = {"role": "user", "content": "Hello, wörld! 日本\n  two lines "}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Hi."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4", "reasoning_content": None}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {
        "city": "Zürich", "days": 2, "exact": True, "list": [1, 2.5, None, "x"], "o": {"k": "v"}}}},
    {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}}]}
CALL_TEXT = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "get_weather",
                                                 "arguments": "{\"city\": \"Bern\"}"}}]}
RESULT = {"role": "tool", "content": "{\"t\": 21}", "tool_call_id": "a"}
RESULT2 = {"role": "tool", "content": "noon", "tool_call_id": "b"}

CHATS = {
    "user": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, ANSWER, USER, THOUGHT, USER], None),
    "ends with the answer": ([USER, ANSWER], None),
    "tools": ([SYSTEM, USER], [CITY, TIME]),
    "calls": ([USER, CALL, RESULT, RESULT2], [CITY, TIME]),
    "calls, answered": ([USER, CALL, RESULT, RESULT2, THOUGHT, USER], [CITY]),
    "two systems": ([SYSTEM, SYSTEM, USER], None),
    "unknown role": ([{"role": "judge", "content": "x"}], None),
}
CHATS_TEXT = dict(CHATS)
CHATS_TEXT["calls"] = ([USER, CALL_TEXT, RESULT], None)
CHATS_TEXT["calls, answered"] = ([USER, CALL_TEXT, RESULT, ANSWER, USER], None)

DATA = {"s": "Hello, wörld", "e": "", "n": 7, "f": 2.5, "t": True, "z": None, "neg": -7,
        "l": [3, 1, 2], "w": ["b", "A", "c"], "o": {"b": 1, "a": [1, {"x": None}], "items": "mine"},
        "m": [{"role": "user", "n": 2, "in": {"k": "x"}}, {"role": "tool", "n": 1, "in": {"k": "y"}},
              {"role": "user", "n": 3, "in": {"k": "z"}}], "text": "a\n\nb\n  c\n"}

SNIPPETS = r"""
{{ s }}|{{ e }}|{{ n }}|{{ f }}|{{ t }}|{{ z }}|{{ l }}|{{ o }}|{{ missing }}
{{ n + 1 }} {{ n - 10 }} {{ n * 2 }} {{ n / 2 }} {{ n // 2 }} {{ n % 4 }} {{ n ** 2 }} {{ neg // 2 }} {{ neg % 4 }} {{ -n }} {{ +n }} {{ 2 ** -1 }}
{{ f + 1 }} {{ f * 2 }} {{ f // 2 }} {{ -f % 2 }} {{ 1e20 }} {{ 1e-5 }} {{ 0.1 + 0.2 }} {{ 1e16 }} {{ 123456789012345.0 }} {{ 7.0 }} {{ 1_000 }}
{{ s ~ n ~ t ~ z }} {{ 'a' + "b" }} {{ 'ab' * 3 }} {{ 'a' 'b' }} {{ [1] + [2] }} {{ [0] * 3 }} {{ (1, 2) }} {{ (1,) }} {{ () }}
{{ 1 < 2 <= 2 }} {{ 1 < 2 > 3 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ t == 1 }} {{ 'a' != 'b' }} {{ [1, 2] < [1, 3] }} {{ z == none }} {{ missing == other }}
{{ not n }} {{ n and s }} {{ e or s }} {{ e and n }} {{ not e and not z }} {{ n if e else s }} {{ n if e }}| {{ (1 if t else 2) + 1 }}
{{ 'ell' in s }} {{ 3 in l }} {{ 9 not in l }} {{ 'a' in o }} {{ 'zz' in o }} {{ 'x' in missing }} {{ not 3 in l }}
{{ s[0] }}{{ s[-1] }}{{ s[8] }} {{ s[1:4] }} {{ s[:-2] }} {{ s[::-1] }} {{ s[::3] }} {{ l[1:] }} {{ l[::-1] }} {{ l[-1] }} {{ l[9] }}| {{ s[5:2] }}| {{ l[-2:] }} {{ l[10:] }} {{ s[-100:2] }}
{{ o.b }} {{ o['a'][1].x }} {{ o.a[0] }} {{ o['items'] }} {{ o.get('b') }} {{ o.get('q') }} {{ o.get('q', 'd') }} {{ o.zz is defined }} {{ m[0].role }} {{ l.0 }}
{% for k, v in o.items() %}{{ k }}={{ v }};{% endfor %} {{ o.keys() | list }} {{ o.values() | list }} {{ o | list }} {{ o | length }}
{{ s.upper() }} {{ s.lower() }} {{ '  x '.strip() }}| {{ ' x '.lstrip() }}| {{ ' x '.rstrip() }}| {{ 'xxaxx'.strip('x') }} {{ 'a,b,,c'.split(',') }} {{ ' a  b c '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a b c'.rsplit(' ', 1) }} {{ ' a b  c '.split(none, 1) }}
{{ s.startswith('Hell') }} {{ s.endswith(('x', 'ld')) }} {{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 1) }} {{ 'ab'.replace('', '-') }} {{ "they're bill's friends".title() }} {{ 'hELLO wORLD'.capitalize() }} {{ s.find('w') }} {{ s.find('q') }} {{ s.count('l') }} {{ ', '.join(['a', 'b']) }} {{ '12'.isdigit() }} {{ 'a1'.isalpha() }} {{ 'pre-x'.removeprefix('pre-') }} {{ 'x.py'.removesuffix('.py') }} {{ 'a\nb\r\nc'.splitlines() }}
{{ l | join('-') }} {{ w | join }} {{ m | join(', ', attribute='role') }} {{ l | first }} {{ l | last }} {{ [] | first }}| {{ l | length }} {{ s | length }} {{ s | upper }} {{ s | lower }} {{ 'a b-c (d' | title }} {{ 'abC' | capitalize }} {{ '  a ' | trim }}| {{ 'xax' | trim('x') }}
{{ missing | default('d') }} {{ e | default('d') }}| {{ e | default('d', true) }} {{ z | default('d') }} {{ missing | d }}| {{ n | string + 'x' }} {{ '12' | int + 1 }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ '3.9' | int }} {{ '2.5' | float }} {{ -3 | abs }} {{ s | safe }} {{ t | int }}
{{ s | replace('l', 'L') }} {{ s | replace('l', 'L', 1) }} {{ l | sort }} {{ l | sort(reverse=true) }} {{ w | sort }} {{ m | sort(attribute='n') | map(attribute='n') | list }} {{ l | reverse | list }} {{ 'abc' | reverse }} {{ [1, 2, 1] | unique | list }} {{ l | sum }} {{ l | min }} {{ l | max }} {{ o | dictsort }}
{{ m | map(attribute='role') | list }} {{ m | map(attribute='in.k') | join }} {{ m | map(attribute='zz', default='-') | list }} {{ w | map('upper') | list }} {{ l | map('string') | join('+') }}
{{ m | selectattr('role', 'equalto', 'user') | map(attribute='n') | list }} {{ m | rejectattr('role', '==', 'user') | map(attribute='n') | list }} {{ m | selectattr('zz', 'defined') | list }} {{ m | selectattr('n') | list | length }} {{ l | select('odd') | list }} {{ l | reject('gt', 1) | list }} {{ m | selectattr('role', 'in', ['tool']) | list | length }}
{{ o | items | list }} {% for k, v in o | items %}{{ loop.index }}{{ k }}{% endfor %} {{ missing | items | list }}
{{ o | tojson }} {{ o | tojson(indent=2) }} {{ s | tojson }} {{ s | tojson(ensure_ascii=true) }} {{ '\u2028\U0001F600"\\\n\t\x01/' | tojson }} {{ '\U0001F600' | tojson(ensure_ascii=true) }} {{ [] | tojson(indent=1) }} {{ {} | tojson(indent=4) }} {{ [1.0, 1e100, true, none] | tojson }} {{ o | tojson(separators=(',', ':')) }} {{ o | tojson(sort_keys=true, indent='--') }}
{{ n is defined }} {{ q is defined }} {{ q is undefined }} {{ z is none }} {{ s is string }} {{ o is mapping }} {{ l is iterable }} {{ s is iterable }} {{ n is iterable }} {{ l is sequence }} {{ n is number }} {{ t is number }} {{ t is boolean }} {{ n is boolean }} {{ t is true }} {{ t is false }} {{ n is integer }} {{ f is float }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is equalto 7 }} {{ n is eq(8) }} {{ 3 is in l }} {{ n is not none }} {{ s is not string }} {{ n is not in [1] }}
{{ s is string and n is number }} {{ s is not mapping or z }} {{ (s is string) | string }} {{ n is sameas 7 }} {{ 'a' is string ~ 'b' }}
{% if n > 5 %}big{% elif n > 3 %}mid{% else %}small{% endif %}{% if e %}x{% elif z %}y{% else %}none{% endif %}{% if missing %}x{% endif %}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ x }},{% endfor %}
{% for x in [] %}x{% else %}empty{% endfor %}{% for x in l if x > 1 %}{{ x }}{{ loop.length }}{% else %}-{% endfor %}{% for x in l if x > 9 %}x{% else %}no{% endfor %}{% for x in missing %}x{% endfor %}
{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% for (a, b) in [[5, 6]] %}{{ a + b }}{% endfor %}
{% for x in l %}{% for y in l %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }};{% endfor %}{% for c in 'añb' %}[{{ c }}]{% endfor %}{% for x in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}{{ range(5, 0, -2) | list }}
{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}{% set ns = namespace(v=0, w='a') %}{% for i in l %}{% set ns.v = ns.v + i %}{% endfor %}{{ ns.v }}{{ ns.w }}{{ ns.q is defined }}{% if true %}{% set x = 5 %}{% endif %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set y %}block {{ n }}{% endset %}{{ y }}{% set u | upper %}up{{ s }}{% endset %}{{ u }}{% set t2 = 1, 2 %}{{ t2 }}{% with q = 5, r = n %}{{ q + r }}{% endwith %}{{ q }}
{% macro f(a, b=2, c='x') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(1, c='z') }}{{ f() }}{{ f(b=1, a=2) }}{% macro g(x) %}{{ f(x) }}{{ n }}{% if x > 0 %}{{ g(x - 1) }}{% endif %}{% endmacro %}{{ g(2) }}{{ g(1) | upper | length }}
{% raw %}{{ not }} {% this %}{% endraw %}{# a comment {{ x }} #}{{ '{{' }}{{ '%}' }}{{ "}}" }}{{ {'a': {'b': 1}}['a']['b'] }}{{ {'k': [1, 2]} }}
{% generation %}{{ s }}{% endgeneration %}{% if s is string %}{% generation %}y{% endgeneration %}{% endif %}
{{ text | indent }}|{{ text | indent(2, true) }}|{{ text | indent(2, blank=true) }}|{{ text | indent('> ') }}
{{ 'it\'s' }} {{ ["it's", 'say "x"', 'b\\'] }} {{ 'tab\there' }} {{ ['\n'] }} {{ "\x41\u00e9" }}
{{ dict(a=1, b='x') }} {{ dict({'a': 1}, c=3) }} {{ namespace({'q': 1}).q }} {{ [l, w] | map('length') | list }} {{ l | string | length }} {{ [[1, [2]], none] | tojson }}
{{ 1 if n == 7 else 2 if n == 8 else 3 }} {{ (n == 7 and 'y') or 'n' }} {{ not (n == 7) }} {{ n == 7 and not e }} {{ s | length > 3 and n }} {{ l | length - 1 }} {{ - n + 3 }} {{ 2 * 3 + 4 * 5 }} {{ 2 ** 3 ** 2 }}
"""

WHITESPACE = [
    "a\n{% if t %}\nb\n{% endif %}\nc\n", "  {% if t %}  x  {% endif %}  \n  y", "a {%- if t -%} b {%- endif -%} c",
    "x\n  {{ n }}\n  y\n", "x\n  {{- n -}}\n  y", "{# c #}\nx {# d #}\n y", "  {#- c -#}  x",
    "a\n   {%+ if t %}b{% endif +%}\n c", "{% if t %}\n\n\nx{% endif %}\n\n", "\n{% set x = 1 %}\n\n{{ x }}",
    "{% for i in l %}\n  {{ i }}\n{% endfor %}\nend\n\n", "a{% if t %}\n  b\n  {% endif %}  \nc",
    "\r\nx\r\n{% if t %}\r\ny{% endif %}", "{% for i in l -%}\n   {{ i }},\n{%- endfor %}", "\t{% if t %}x{% endif %}\t{% if t %}y{% endif %}",
    "a\u00a0{%- if t -%}\u3000b{% endif %}", "{% raw -%}\n  x {{ y }}\n  {%- endraw %}\nz", "text only\n", "", "\n", "{{ n }}\n", "{% set a = 1 -%}\n\n  x",
    "{%- for i in l %}\n{{- i }}\n{% endfor -%}\n\n z", "  {{ n }}  {% set q = 2 %}\n  {{ q }}",
]

FAILING = [
    "{{ missing.x }}", "{{ missing['x'] }}", "{{ z + 's' }}", "{{ s + 1 }}", "{{ s + missing }}", "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}", "{{ l.append(4) }}", "{{ o.update({}) }}", "{{ s() }}", "{{ nofunction() }}",
    "{% set o.x = 1 %}", "{{ 1 < 'a' }}", "{{ f is nosuchtest }}", "{{ s | nosuchfilter }}", "{{ ", "{% if t %}", "{% endif %}",
    "{{ 1 + }}", "{{ (1 }}", "{% for x in 5 %}{% endfor %}", "{% for a, b in l %}{% endfor %}", "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
    "{% macro f(a) %}{% endmacro %}{{ f(b=2) }}", "{{ 'a' % }}", "{% nosuchtag %}", "{{ range(1000000) }}", "{{ {} < {} }}", "{{ 'abc }}", "{# x",
    "{% break %}", "{{ 5 in 5 }}", "{{ z | length }}", "{{ ''.split('') }}", "{{ l | join(1) + 1 }}",
]


def render(source, variables):
    """`variables` may be "DATA", the table above."""
    try:
        return environment.from_string(source).render(**(DATA if variables == "DATA" else variables))
    except Exception:  # noqa: BLE001: whatever it is, the other side must fail too
        return None


def chat_variables(chat, **more):
    messages, tools = chat
    return {"messages": messages, "tools": tools, "documents": None, **more}


def main():
    cases = []

    def add(name, source, variables, file=None):
        case = {"name": name, "variables": variables, "expected": render(source, variables)}
        case.update({"file": file} if file else {"source": source})
        cases.append(case)

    snippets = SNIPPETS.strip("\n").split("\n")
    for i, source in enumerate(snippets):
        add(f"snippet {i + 1}", source, "DATA")
    for i, source in enumerate(WHITESPACE):
        add(f"white space {i + 1}", source, "DATA")
    for i, source in enumerate(FAILING):
        add(f"failing {i + 1}", source, "DATA")
    for name, chat in CHATS.items():
        add(f"nano, {name}", (ROOT / "models/dsa-nano/chat_template.jinja").read_text(),
            chat_variables(chat, add_generation_prompt=True, eos_token="<|endoftext|>"),
            "models/dsa-nano/chat_template.jinja")
        for more in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            add(f"glm, {name}, {more}", (HERE / "glm_like.jinja").read_text(),
                chat_variables(chat, add_generation_prompt=not name.startswith("ends"), **more),
                "tests/model/glm_like.jinja")
    data = Path(os.environ["LACUNA_DATA_DIR"]) / "tokenizers/deepseek_v3/tokenizer_config.json"
    source = json.loads(data.read_text())["chat_template"]
    for name, chat in CHATS_TEXT.items():
        for prompt in (True, False):
            add(f"deepseek_v3, {name}, {prompt}", source,
                chat_variables(chat, add_generation_prompt=prompt,
                               bos_token="<｜begin▁of▁sentence｜>"), "data")
    for case in cases:
        if case["variables"] == "DATA":
            assert (case["expected"] is None) == case["name"].startswith("failing"), case
    out = {"about": "Written by make_chat_golden.py with jinja2 " + jinja2.__version__,
           "data": DATA, "cases": cases}
    (HERE / "chat_golden.json").write_text(
        json.dumps(out, ensure_ascii=False, indent=0) + "\n")
    print(len(cases), "cases,", sum(c["expected"] is None for c in cases), "of them fail",
          file=sys.stderr)


if __name__ == "__main__":
    main()
