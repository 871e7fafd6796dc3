from __future__ import annotations

import json
import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.errors import CheckpointError, InvalidRequest
from orchestrator.text.tokenizer import Tokenizer
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
    assert list(ours.encode(ours.chat_text(MESSAGES), add_special_tokens=False)) == expected
    assert ours.chat_text(MESSAGES).endswith(f'assistant: "안녕"{END}\nassistant:')


def test_a_template_file_goes_before_the_setting(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.chat_text(MESSAGES) == "Hi <there>"


def test_a_template_beside_a_processor_is_read(tmp_path):
    write(tmp_path, byte_level())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert Tokenizer.from_directory(tmp_path).chat_text(MESSAGES) == "Hi <there>"


def test_of_several_templates_the_default_is_taken(tmp_path):
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level(), chat_template=templates))
    assert tokenizer.chat_text(MESSAGES) == "yes"


def test_a_chat_without_a_template_is_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.chat_text(MESSAGES)
    assert caught.value.field == "chat"


USER = {"role": "user", "content": "hi"}
ENDING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_prompt_may_end_with_the_last_message():
    """Whatever a template adds behind it; white space at its end stays, although templates trim."""
    tokenizer = as_product(byte_level(), ENDING)
    assert tokenizer.chat_text([USER, {"role": "assistant", "content": "The "}], continues=True) == (
        "user: hi</s>assistant: The "
    )
    assert tokenizer.chat_text([USER], continues=True) == "user: hi"


def test_a_last_message_that_a_template_leaves_out_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="leaves it out"):
        as_product(byte_level(), "{{ messages[0].content }}").chat_text([USER, USER], continues=True)


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
        as_product(byte_level(), template).chat_text([{"role": "system", "content": "x"}])


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
        json.dumps({"eos_token": {"__type": "AddedToken", "content": END}, "chat_template": "{{ eos_token }}"})
    )
    assert Tokenizer.from_directory(directory).chat_text(MESSAGES) == END


# How long a text may be


NFC_GROWN = "\u1fbe\u0308\u0341"  # seven bytes, which NFC makes two


def normalized(form):
    backend = byte_level()
    backend.normalizer = form
    return as_product(backend)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_no_text_is_longer_than_the_bound_of_its_tokens(text):
    for tokenizer in (as_product(byte_level()), normalized(normalizers.NFC())):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert len(text.encode()) <= tokenizer.max_text_bytes(num_tokens)


def test_the_bound_is_the_longest_token_and_leaves_room_for_what_nfc_composes():
    plain, composed = as_product(byte_level()), normalized(normalizers.NFC())
    longest = max(len(plain.token_bytes(token_id)) for token_id in range(plain.vocab_size))
    assert plain.max_text_bytes(10) == 10 * longest
    assert len(NFC_GROWN.encode()) == 3.5 * len("\u0390".encode())
    assert composed.encode(NFC_GROWN) == composed.encode("\u0390")
    assert composed.max_text_bytes(10) == 4 * plain.max_text_bytes(10)


def without_a_byte():
    backend = byte_level()
    parts = json.loads(backend.to_str())
    parts["model"]["vocab"].pop("Ā")  # byte 0
    parts["model"]["vocab"]["(free)"] = len(parts["model"]["vocab"]) + 1000
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def swallowing_spaces():
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def dropping_spaces():
    backend = byte_level()
    splitters = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    return backend


@pytest.mark.parametrize("make", [byte_fallback, without_a_byte, swallowing_spaces, dropping_spaces])
def test_where_a_token_may_stand_for_any_length_there_is_no_bound(make):
    assert as_product(make()).max_text_bytes(10) is None


def test_a_long_text_is_tokenized_as_a_short_one_is_and_others_run_meanwhile():
    tokenizer = as_product(byte_level())
    text = "def main(argv): return 안녕 " * 20_000
    gaps, is_over = [], threading.Event()

    def watch():
        before = time.perf_counter()
        while not is_over.wait(0.001):
            gaps.append(time.perf_counter() - before)
            before = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    ids = tokenizer.encode(text, add_special_tokens=False)
    took = time.perf_counter() - began
    is_over.set()
    watcher.join()
    assert ids == tuple(tokenizer._backend.encode(text, add_special_tokens=False).ids)
    assert max(gaps) < took / 2, "the interpreter was held up while it was tokenized"


def test_tools_and_arguments_go_to_the_template_and_do_not_replace_what_is_its_own():
    template = "{{ tools | tojson }} {{ thinks }} {{ messages[0].content }}"
    tools, arguments = [{"type": "function"}], {"thinks": False, "messages": [], "tools": []}
    text = as_product(byte_level(), template).chat_text(MESSAGES, tools, arguments)
    assert text == '[{"type": "function"}] False Hi <there>'


def test_marks_of_calls_are_text_even_where_a_tokenizer_calls_them_special():
    backend = byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]", "[/INST]"])
    ours = as_product(backend)
    ids = ours.encode("[/INST]a[TOOL_CALLS]b", add_special_tokens=False)
    assert ours.decode(ids) == "a[TOOL_CALLS]b"
    assert [ours.is_special(token_id) for token_id in ids] == [True, False, False, False]
