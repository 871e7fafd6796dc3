from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.errors import CheckpointError, InvalidRequest
from orchestrator.text import Tokenizer
from tests.vocabularies import BEGIN, END, as_product, byte_fallback, byte_level, write

MESSAGES = [{"role": "user", "content": "Hi <there>"}, {"role": "assistant", "content": "안녕"}]
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "system" %}{{ raise_exception("no system messages, please") }}{% endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {{- bos_token + message["role"] + ": " }}{% generation %}{{ message.content | tojson }}{% endgeneration %}
    {{- eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
assistant:
{%- endif %}
"""


@pytest.fixture
def directory(tmp_path):
    return write(tmp_path, byte_level(), chat_template=TEMPLATE)


def test_special_tokens_stand_where_the_post_processor_puts_them(directory):
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("ab") == (0, *tokenizer.encode("ab", add_special_tokens=False))
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode("ab"), skip_special_tokens=False) == f"{BEGIN}ab"
    assert [tokenizer.is_special(token_id) for token_id in (0, 1, 2)] == [True, True, False]


def test_ids_and_vocabulary_size_are_those_of_transformers(directory):
    ours, theirs = Tokenizer.from_directory(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    text = "def main():\n  return '안녕 🙂'"
    assert list(ours.encode(text)) == theirs.encode(text)
    assert ours.vocab_size == len(theirs)


def test_a_chat_prompt_is_what_transformers_makes_of_it(directory):
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(ours.chat_prompt(MESSAGES)) == expected
    assert ours.decode(ours.chat_prompt(MESSAGES)).endswith('assistant: "안녕"\nassistant:')


def test_a_template_file_goes_before_the_setting(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.chat_prompt(MESSAGES)) == "Hi <there>"


def test_of_several_templates_the_default_is_taken(tmp_path):
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(), chat_template=templates))
    assert tokenizer.decode(tokenizer.chat_prompt(MESSAGES)) == "yes"


def test_a_chat_without_a_template_is_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.chat_prompt(MESSAGES)
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE, "no system messages, please"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_callers_error(template, reason):
    with pytest.raises(InvalidRequest, match=reason):
        as_product(byte_level(), template).chat_prompt([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_broken_file_is_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(CheckpointError, match=str(directory)):
        Tokenizer.from_directory(directory)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = byte_level()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_directory(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("longer than two tokens")) == "longer than two tokens"
    assert len(tokenizer.encode("a")) == 2


def test_byte_level_vocabularies_are_told_from_others():
    assert as_product(byte_level()).is_byte_level
    assert not as_product(byte_fallback()).is_byte_level


@given(st.integers(0, 450))
def test_the_bytes_of_a_token_are_what_it_decodes_to(token_id):
    tokenizer = as_product(byte_level())
    decoded = tokenizer.decode([token_id], skip_special_tokens=False)
    assert tokenizer.token_bytes(token_id).decode(errors="replace") == decoded


def test_settings_may_give_a_special_token_as_an_object(tmp_path):
    directory = write(tmp_path, byte_level(), chat_template="{{ eos_token }}")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": END}, "chat_template": "{{ eos_token }}"})
    )
    assert Tokenizer.from_directory(directory).chat_prompt(MESSAGES) == (1,)
