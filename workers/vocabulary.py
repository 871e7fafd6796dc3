"""Checks that draft and target share a vocabulary: each token id means the same string.

Compares only the ids that both models have embedding rows for; other ids never occur in a text. Reads tokenizers
without torch, as the orchestrator does (docs/adr/edge).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from core.errors import CheckpointError, VocabularyMismatch, cause


def check_same_vocabulary(target_dir: Path, draft_dir: Path) -> None:
    """Raises: VocabularyMismatch with the first token id that differs between the two."""
    target, draft = read_vocabulary(target_dir), read_vocabulary(draft_dir)
    rows = min(num_rows(target_dir), num_rows(draft_dir))
    differing = (token_id for token_id in target.keys() | draft.keys() if target.get(token_id) != draft.get(token_id))
    first = min(differing, default=rows)
    if first >= rows:
        return
    raise VocabularyMismatch(
        f"draft and target do not share a vocabulary: token id {first} is {_describe(target, first)} in {target_dir} "
        f"but {_describe(draft, first)} in {draft_dir}"
    )


def read_vocabulary(directory: Path) -> dict[int, str]:
    """Map each token id to its string, added tokens included. Raises: CheckpointError without a readable tokenizer."""
    return {token_id: token for token, token_id in read_tokenizer(directory).get_vocab().items()}


def read_tokenizer(directory: Path) -> Any:
    """Load a `PreTrainedTokenizerFast` of transformers. Raises: CheckpointError."""
    from transformers import PreTrainedTokenizerFast  # takes half a second to import

    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json")
    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception; bad files cause other types
        raise CheckpointError(f"the tokenizer of {directory} cannot be read: {cause(error)}") from error


def num_rows(directory: Path) -> int:
    """`vocab_size` of config.json or its text tower; no limit if absent. The loader checks it against the weights."""
    try:
        config = json.loads((directory / "config.json").read_text())
        return int((config if "vocab_size" in config else config["text_config"])["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError):
        return sys.maxsize


def _describe(vocabulary: dict[int, str], token_id: int) -> str:
    return repr(vocabulary[token_id]) if token_id in vocabulary else "no token"
