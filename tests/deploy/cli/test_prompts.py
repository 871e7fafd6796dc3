"""Prompts are read as they are; what cannot be read is said with its line."""

import pytest

from core.errors import ConfigError
from deploy.cli.options import read_prompts


def file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    assert read_prompts(file(tmp_path, "prompts.txt", "def f():\n\n    return \n")) == ["def f():", "    return "]


def test_a_json_lines_file_has_strings_or_objects(tmp_path):
    path = file(tmp_path, "prompts.jsonl", '"a\\nb"\n{"prompt": "c", "id": 7}\n')
    assert read_prompts(path) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("prompts.txt", "\n \n", "has no prompt"),
        ("prompts.jsonl", '"a"\n{"text": "b"}\n', "line 2 must be"),
        ("prompts.jsonl", "[1]\n", "line 1 must be"),
        ("prompts.jsonl", '""\n', "line 1 must be"),
        ("prompts.jsonl", "def f():\n", "line 1 is not JSON"),
    ],
)
def test_what_is_no_prompt_is_said_with_its_place(tmp_path, name, text, problem):
    with pytest.raises(ConfigError, match=f"^--prompts: .*{problem}"):
        read_prompts(file(tmp_path, name, text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"^--prompts: .*cannot be read"):
        read_prompts(tmp_path / "none.txt")
