"""Calls, thoughts and answers are found in texts of each format, however a text is cut into pieces."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from core.config import HttpConfig, Limits
from core.errors import ConfigError
from deploy.http.openai.chat_body import ChatBody
from deploy.http.output import (
    Kind,
    Reading,
    Splitter,
    calls_format,
    calls_of,
    grammar_of_calls,
    has_begun,
    has_marks,
    joined,
    reasoning_format,
)
from deploy.http.translate import reading_of
from tests.vocabularies import as_product, byte_level
from workers.grammar import GrammarCompiler, Structure, grammar_of

F, G = ("f", '{"a": 1}'), ("g", "{}")
HERMES = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (
        'Well.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        "Well.",
        [F, G],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"}</tool_call>', "", [F]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> done', "done", [F]),
    ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [G]),
    (
        '<tool_call>{"name": "f", "arguments": {"b": "}]\\"{</tool_call>"}}</tool_call>',
        "",
        [("f", '{"b": "}]\\"{</tool_call>"}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>ok', "ok", [F]),
    ('<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    ("a <tool_call> is nothing", "a <tool_call> is nothing", []),
    ("a < b <tool", "a < b <tool", []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("  plain\n\n text \n", "  plain\n\n text \n", []),
]
LLAMA = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ('\n\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
    ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ("[1, 2]", "[1, 2]", []),
    ("  hi", "  hi", []),
]
MISTRAL = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
    ('ok [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "ok", [F, G]),
    ('[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [F]),
    ("[TOOL_CALLS] what is it", "[TOOL_CALLS] what is it", []),
    ("[1, 2] [TOOL", "[1, 2] [TOOL", []),
]
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
CASES = [(form, *case) for form, cases in FORMATS.items() for case in cases]
NAMES = frozenset({"f", "g"})


def cuts(text, seed):
    places = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def read(reading, parts, *, is_cut=False):
    splitter = Splitter(reading)
    pieces = [piece for part in parts for piece in splitter.feed(part)] + splitter.end(is_cut=is_cut)
    return joined(pieces, Kind.REASONING), joined(pieces, Kind.TEXT), calls_of(pieces)


@pytest.mark.parametrize(("form", "text", "answer", "calls"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_calls_are_found_however_the_text_comes(form, text, answer, calls):
    reading = Reading(form, NAMES)
    assert read(reading, [text]) == read(reading, list(text)) == ("", answer, calls)
    for seed in range(30):
        assert read(reading, cuts(text, seed)) == ("", answer, calls)


@pytest.mark.parametrize("form", FORMATS)
def test_a_name_nested_without_end_is_no_call(form):
    begin = {"hermes": "<tool_call>", "llama3_json": "", "mistral": "[TOOL_CALLS]"}[form]
    text = f'{begin}{{"name": {"[" * 100_000}{"]" * 100_000}'
    assert read(Reading(form, NAMES), [text]) == ("", text, [])


def test_a_long_gap_after_a_calls_id_is_looked_through_once():
    """An output that comes whole: in time that grows with the square of its length nothing else would run."""
    text = f"[TOOL_CALLS]f[CALL_ID]{' ' * 300_000}."
    assert read(Reading("mistral", NAMES), [text]) == ("", text, [])


def test_a_name_comes_first_and_arguments_as_they_are_written():
    splitter = Splitter(Reading("hermes", NAMES))
    assert splitter.feed('<tool_call>{"name": "f", "argum') == []
    (begin,) = splitter.feed('ents": {"a')
    (more,) = splitter.feed('": [1')
    assert (begin.name, begin.text, more.name, more.text) == ("f", '{"a', None, '": [1')


def test_text_is_held_back_only_where_a_mark_may_begin():
    splitter = Splitter(Reading("hermes", NAMES))
    assert [piece.text for piece in splitter.feed("one <two <")] == ["one <two"]
    assert [piece.text for piece in splitter.feed("three ")] == [" <three"]


CUT = [
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', "", [F]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n', "", [F]),
    ('Well. <tool_call>{"name": "f"', "Well.", []),
    ("Well. <tool_call>", "Well.", []),
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call> is", "<tool_call> is", []),
]
CUT_OTHERS = [
    ("mistral", "[TOOL_CALLS]", "", []),
    ("mistral", "ok[TOOL_CALLS]weath", "ok", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"na', "", [F]),
    ("llama3_json", '{"name": "f", "para', "", []),
    ("llama3_json", '{"name": "Bob", "para', '{"name": "Bob", "para', []),
]


@pytest.mark.parametrize(("form", "text", "answer", "calls"), [*(("hermes", *each) for each in CUT), *CUT_OTHERS])
def test_of_an_output_that_was_cut_no_part_of_a_call_is_text(form, text, answer, calls):
    reading = Reading(form, NAMES)
    for parts in ([text], list(text), *(cuts(text, seed) for seed in range(30))):
        assert read(reading, parts, is_cut=True) == ("", answer, calls)


def test_a_closing_mark_that_has_only_begun_is_no_text_whatever_ended_the_output():
    assert read(Reading("hermes", NAMES), list(CUT[0][0])) == ("", "", [F])


@pytest.mark.parametrize("size", range(1, len(HERMES[0][0])))
def test_a_forced_output_has_no_text_wherever_it_ends(size):
    """A stop string may end it, too."""
    thoughts, answer, calls = read(Reading("hermes", NAMES, is_forced=True), list(HERMES[0][0][:size]))
    assert (thoughts, answer) == ("", "")
    assert [name for name, _ in calls] in ([], ["f"])


@pytest.mark.parametrize(("text", "thoughts"), [("<thi", ""), ("<think>hm\n</thi", "hm"), ("<think>hm <", "hm")])
def test_of_an_output_that_was_cut_no_part_of_a_mark_is_a_thought(text, thoughts):
    assert read(Reading(reasoning="think"), list(text), is_cut=True) == (thoughts, "", [])


def test_calls_beyond_the_most_are_left_out():
    text = HERMES[1][0]
    assert read(Reading("hermes", NAMES, most_calls=1), list(text)) == ("", "Well.", [F])


THOUGHTS = [
    ("think", False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    ("think", True, "hm\n</think>\n\nyes", "hm", "yes"),
    ("think", True, "hm", "hm", ""),
    ("think", False, "<think>", "", ""),
    ("think", False, "\n<think></think> yes", "", "yes"),
    ("think", False, " yes <think>no</think>", "", " yes <think>no</think>"),
    ("think", False, "<thi", "", "<thi"),
    ("think", False, "<think>a </thin b", "a </thin b", ""),
    ("mistral", False, "[THINK]hm[/THINK]yes", "hm", "yes"),
]


@pytest.mark.parametrize(("form", "begun", "text", "thoughts", "answer"), THOUGHTS)
def test_thoughts_are_found_however_the_text_comes(form, begun, text, thoughts, answer):
    reading = Reading(reasoning=form, has_begun=begun)
    assert read(reading, [text]) == read(reading, list(text)) == (thoughts, answer, [])
    for seed in range(20):
        assert read(reading, cuts(text, seed)) == (thoughts, answer, [])


def test_calls_in_thoughts_are_thoughts():
    call = HERMES[0][0]
    reading = Reading("hermes", NAMES, reasoning="think")
    assert read(reading, list(f"<think>{call}</think>\n{call}")) == (call, "", [F])


# Which formats a model has


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        ("{{ tools }}<tool_call>{{ call }}</tool_call>", "hermes", None),
        ("{{ tools }}<tool_call>{{ call }}</tool_call><think>", "hermes", "think"),
        ("{{ tools }}<tool_call><function=name>", None, None),
        ("{{ tools }}[TOOL_CALLS]{{ call }}[THINK]", "mistral", "mistral"),
        ('{{ tools }}{"name": {{ name }}, "parameters": {{ parameters }}}', "llama3_json", None),
    ],
)
def test_a_template_shows_the_formats(template, calls, reasoning):
    config, tokenizer = HttpConfig(), as_product(byte_level(), template)
    assert (calls_format(config, tokenizer), reasoning_format(config, tokenizer)) == (calls, reasoning)


def test_the_settings_go_before_the_template():
    tokenizer = as_product(byte_level(), "<tool_call><think>")
    config = HttpConfig("mistral", "none")
    assert (calls_format(config, tokenizer), reasoning_format(config, tokenizer)) == ("mistral", None)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_a_format_that_nobody_knows_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be one of auto, none"):
        HttpConfig(**{name: "xml"})


def test_a_prompt_may_open_thoughts():
    tokenizer = as_product(byte_level())
    assert has_begun("think", tokenizer.encode("a long question. assistant:<think>\n"), tokenizer)
    assert not has_begun("think", tokenizer.encode("<think></think> assistant:"), tokenizer)


# Grammars of calls

REFERRING = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": 1}}, "required": ["a"]}
TOOLS = {"f": {**REFERRING, "additionalProperties": False}, "g-h.i": {}}


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("is_one", [False, True])
def test_a_grammar_of_calls_lets_through_what_the_reader_of_its_format_finds(form, is_one):
    answer = (
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]} if has_marks(form) else None
    )
    grammar = grammar_of(Structure("grammar", grammar_of_calls(form, TOOLS, is_one=is_one, answer=answer)), Limits())
    compiled = GrammarCompiler.of_bytes().compile(grammar)
    key = "parameters" if form == "llama3_json" else "arguments"
    first, second = f'{{"name": "f", "{key}": {{"a": 1}}}}', f'{{"name": "g-h.i", "{key}": {{}}}}'
    one, two = {
        "hermes": (f"<tool_call>\n{first}\n</tool_call>", f"\n<tool_call>\n{second}\n</tool_call>"),
        "llama3_json": (first, f"; {second}"),
        "mistral": (f"[TOOL_CALLS][{first}", f", {second}]"),
    }[form]
    assert compiled.allows(list(one.encode()))
    assert compiled.allows(list((one + two).encode())) is not is_one
    assert not compiled.allows(list(one.replace("1", "2").encode()))
    assert compiled.allows(b'{"x": 5}') is has_marks(form)
    found = read(Reading(form, frozenset({"f", "g-h.i"})), list(one + two))
    assert found == ("", "", [F, ("g-h.i", "{}")])


def test_what_is_looked_for_is_known_without_the_chat(monkeypatch):
    """It is asked on the event loop, and to build a long chat takes a tenth of a second and more."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    monkeypatch.setattr(ChatBody, "chat", property(lambda _: pytest.fail("the chat was built once more")))
    request = SimpleNamespace(grammar=None, prompt=())
    served = SimpleNamespace(tokenizer=SimpleNamespace(template=""), config=SimpleNamespace(http=HttpConfig()))
    assert reading_of(body, request, served).is_plain
