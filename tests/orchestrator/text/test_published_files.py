"""Files beside tokenizer.json in published checkpoints are read, wherever they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import CheckpointError
from deploy.settings import DEMO_DIRECTORY
from orchestrator.text import Tokenizer
from tests.vocabularies import BEGIN, END, byte_level

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "안녕", "a": 1}}]
TOKEN = {"content": "<|tool|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
WITHOUT_TORCH = """
import sys
from orchestrator.text import Tokenizer
tokenizer = Tokenizer.from_directory({directory!r})
assert tokenizer.encode("def f():")
assert "torch" not in sys.modules
"""


def tokenizer(directory: Path, **files: Any) -> Tokenizer:
    """A checkpoint with these files, each a .json by its name; a string is a Jinja template."""
    byte_level().save(str(directory / "tokenizer.json"))
    for name, content in {"tokenizer_config": {}, **files}.items():
        file = directory / (f"{name}.jinja" if isinstance(content, str) else f"{name}.json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer.from_directory(directory)


def ids_of(tokenizer: Tokenizer, token: str) -> tuple[int, ...]:
    return tokenizer.encode(token, add_special_tokens=False)


def test_special_tokens_that_stand_in_special_tokens_map_alone_reach_the_template(tmp_path: Path) -> None:
    special = {"bos_token": BEGIN, "eos_token": {**TOKEN, "content": END}}
    found = tokenizer(tmp_path, special_tokens_map=special, chat_template="{{ bos_token }}x{{ eos_token }}")
    assert found.chat_text(MESSAGES) == f"{BEGIN}x{END}"


def test_tokens_of_added_tokens_are_one_id_each(tmp_path: Path) -> None:
    new_id = byte_level().get_vocab_size()
    found = tokenizer(tmp_path, added_tokens={"<|tool|>": new_id})
    assert ids_of(found, "<|tool|>") == (new_id,)
    assert found.vocab_size == new_id + 1


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_added_tokens_decoder_are_one_id_each(special: bool, tmp_path: Path) -> None:
    new_id = byte_level().get_vocab_size()
    settings = {"added_tokens_decoder": {str(new_id): {**TOKEN, "special": special}}}
    found = tokenizer(tmp_path, tokenizer_config=settings)
    assert ids_of(found, "<|tool|>") == (new_id,)
    assert found.is_special(new_id) == special


LISTED = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "no"}


@pytest.mark.parametrize("in_folder", [False, True])
def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools(in_folder: bool, tmp_path: Path) -> None:
    if in_folder:
        files = {f"additional_chat_templates/{name}": LISTED[name] for name in ("tool_use", "rag")}
        found = tokenizer(tmp_path, chat_template="plain", **files)
    else:
        templates = [{"name": name, "template": template} for name, template in LISTED.items()]
        found = tokenizer(tmp_path, tokenizer_config={"chat_template": templates})
    assert found.chat_text(MESSAGES) == "plain"
    assert found.chat_text(MESSAGES, TOOLS) == "1 tools"
    assert found.template is not None
    assert "tools" in found.template
    assert "no" not in found.template
    assert found.template_variables == {"tools"}


def test_tojson_takes_what_it_takes_in_transformers(tmp_path: Path) -> None:
    """GLM, MiniMax and Kimi write their tools so."""
    given = "tools[0].function | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True)"
    found = tokenizer(tmp_path, chat_template=f"{{{{ {given} }}}} {{{{ 'é' | tojson(ensure_ascii=True, indent=1) }}}}")
    assert found.chat_text(MESSAGES, TOOLS) == '{"a":1,"name":"안녕"} "\\u00e9"'


def test_fields_of_messages_without_a_value_are_left_out(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, chat_template="{{ 'tool_calls' in messages[0] }}")
    assert found.chat_text([{**MESSAGES[0], "tool_calls": None}]) == "False"


def test_a_request_cannot_replace_the_template(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, chat_template="{{ style }}")
    arguments = {"style": "short", "chat_template": "other", "tokenize": True, "continue_final_message": True}
    assert found.chat_text(MESSAGES, arguments=arguments) == "short"


def test_a_template_that_is_none_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        tokenizer(tmp_path, chat_template="{% if %}")


def test_torch_is_not_imported_for_it() -> None:
    code = WITHOUT_TORCH.format(directory=str(DEMO_DIRECTORY / "target"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
