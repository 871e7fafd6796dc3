"""Draft and target agree about every token id, or the first disagreement is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import CheckpointError, VocabularyMismatch
from tests.checkpoints import EOS, tokenizer_json
from workers.vocabulary import check_same_vocabulary, read_vocabulary


def write_tokenizer(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(text)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "target", tokenizer_json())


def test_equal_vocabularies_pass(target: Path, tmp_path: Path) -> None:
    check_same_vocabulary(target, write_tokenizer(tmp_path / "draft", tokenizer_json()))


def test_the_first_difference_is_named_with_both_strings(target: Path, tmp_path: Path) -> None:
    spec = json.loads(tokenizer_json())
    vocab = spec["model"]["vocab"]
    a, b = (next(token for token, token_id in vocab.items() if token_id == wanted) for wanted in (70, 75))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    draft = write_tokenizer(tmp_path / "draft", json.dumps(spec))
    with pytest.raises(VocabularyMismatch, match=f"token id 70 is {a!r} in .*target but {b!r} in .*draft"):
        check_same_vocabulary(target, draft)


def test_an_added_token_on_one_side_is_a_difference(target: Path, tmp_path: Path) -> None:
    spec = json.loads(tokenizer_json())
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": EOS + 1, "content": "<|pad|>"})
    draft = write_tokenizer(tmp_path / "draft", json.dumps(spec))
    with pytest.raises(VocabularyMismatch, match=rf"token id {EOS + 1} is no token in .* but '<\|pad\|>' in"):
        check_same_vocabulary(target, draft)


def test_added_tokens_are_part_of_the_vocabulary(target: Path) -> None:
    assert read_vocabulary(target)[EOS] == "<|end|>"


def test_a_missing_or_broken_tokenizer_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        check_same_vocabulary(target, tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_same_vocabulary(target, write_tokenizer(tmp_path / "draft", "{}"))


def test_ids_that_no_model_has_rows_for_may_differ(target: Path, tmp_path: Path) -> None:
    """One of the two may have been given a padding token."""
    draft = write_tokenizer(tmp_path / "draft", tokenizer_json())
    (draft / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    with pytest.raises(VocabularyMismatch, match=r"token id 300 is no token .* but '\[PAD\]'"):
        check_same_vocabulary(target, draft)
    (draft / "config.json").write_text(json.dumps({"vocab_size": 300}))
    check_same_vocabulary(target, draft)
    (draft / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 300}}))
    check_same_vocabulary(target, draft)
