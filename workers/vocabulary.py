"""Whether two tokenizers agree about every token id, which draft and target must.

Knows tokenizer.json and nothing of models: rows of an embedding may be padding, so their count says nothing.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from core.errors import CheckpointError, VocabularyMismatch


def check_same_vocabulary(target_dir: Path, draft_dir: Path) -> None:
    """Raises: VocabularyMismatch with the first token id that does not mean the same string on both sides."""
    target, draft = read_vocabulary(target_dir), read_vocabulary(draft_dir)
    if target == draft:
        return
    first = min(token_id for token_id in target.keys() | draft.keys() if target.get(token_id) != draft.get(token_id))
    raise VocabularyMismatch(
        f"draft and target do not share a vocabulary: token id {first} is {_describe(target, first)} in {target_dir} "
        f"but {_describe(draft, first)} in {draft_dir}"
    )


def read_vocabulary(directory: Path) -> dict[int, str]:
    """The string of each token id, added tokens included. Raises: CheckpointError without a readable tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _describe(vocabulary: dict[int, str], token_id: int) -> str:
    return repr(vocabulary[token_id]) if token_id in vocabulary else "no token"
