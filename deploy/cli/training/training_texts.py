"""Reads texts to train on, as token ids of the target.

Knows files and a tokenizer; must not know what is trained. A line of a .jsonl file is a JSON string, or an object with
one of

    messages            a conversation; the assistant's messages are to be guessed
    prompt, answer      the answer is to be guessed
    text, or prompt     all of it is to be guessed
    token_ids, spans    spans [first, one after the last] are to be guessed

and, where the target drew the answers, with its `temperature`, and a `kind` that figures are told apart by. Another
file is one text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from orchestrator.text import Tokenizer
    from workers.training import TrainingText

TEXT_TOKENS = 512
"""Length of the pieces that plain texts are cut into, in tokens."""


def read_texts(paths: Iterable[Path], tokenizer: Tokenizer, vocab_size: int) -> list[TrainingText]:
    """`vocab_size`: of the target, which has no row for other ids. Raises: ConfigError, which names file and line."""
    return [text for path in paths for text in _of_file(path, tokenizer, vocab_size)]


def _of_file(path: Path, tokenizer: Tokenizer, vocab_size: int) -> Iterator[TrainingText]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: {path} cannot be read: {error}") from error
    is_jsonl = path.suffix == ".jsonl"
    parts = [(f"{path}, line {n}", line) for n, line in enumerate(text.splitlines(), 1)] if is_jsonl else [(path, text)]
    for where, part in parts:
        if part.strip():
            try:
                yield from _checked(_of_value(json.loads(part) if is_jsonl else part, tokenizer), vocab_size)
            except (ValueError, TypeError, KeyError, InvalidRequest) as error:
                problem = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"--data: {where}: {problem}") from error


def _checked(texts: Iterable[TrainingText], vocab_size: int) -> Iterator[TrainingText]:
    """Raises: ValueError for a token id that the target has no row for."""
    for text in texts:
        wrong = next((each for each in text.token_ids if not 0 <= each < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the target's vocabulary of {vocab_size}")
        yield text


def _of_value(value: Any, tokenizer: Tokenizer) -> Iterator[TrainingText]:
    given = {"text": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise TypeError("must be a JSON string or an object")
    if "messages" in given:
        yield _text(*_conversation(_listed(given, "messages"), tokenizer), {"kind": "chat", **given})
    elif "token_ids" in given:
        spans = _listed(given, "spans")
        if not all(isinstance(each, list) and len(each) == 2 and _are_ints(each) for each in spans):
            raise TypeError(f"spans must be a list of [first, one after the last], got {spans!r}")
        yield _text(_ids(given), [(first, end) for first, end in spans], given)
    elif "answer" in given:
        prompt = tokenizer.encode(_string(given, "prompt"))
        answer = tokenizer.encode(_string(given, "answer"), add_special_tokens=False)
        yield _text([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))], given)
    else:
        yield from _pieces(tokenizer.encode(_string(given, "text" if "text" in given else "prompt")), given)


def _string(given: Mapping[str, Any], name: str) -> str:
    """Raises: TypeError, KeyError."""
    if not isinstance(value := given[name], str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    return value


def _listed(given: Mapping[str, Any], name: str) -> list[Any]:
    """Raises: TypeError, KeyError."""
    if not isinstance(value := given[name], list):
        raise TypeError(f"{name} must be a list, got {value!r}")
    return value


def _ids(given: Mapping[str, Any]) -> list[int]:
    ids = _listed(given, "token_ids")
    if not _are_ints(ids):
        raise TypeError("token_ids must be a list of integers")
    return ids


def _are_ints(values: Iterable[object]) -> bool:
    return all(type(each) is int for each in values)


def _pieces(token_ids: Sequence[int], given: Mapping[str, Any]) -> Iterator[TrainingText]:
    for start in range(0, len(token_ids), TEXT_TOKENS):
        piece = list(token_ids[start : start + TEXT_TOKENS])
        yield _text(piece, [(0, len(piece))], given)


def _text(token_ids: list[int], spans: list[tuple[int, int]], given: Mapping[str, Any]) -> TrainingText:
    from workers.training import TrainingText  # imports torch

    if any(not 0 <= first <= end <= len(token_ids) for first, end in spans):
        raise ValueError(f"spans must lie in its {len(token_ids)} tokens")
    temperature = given.get("temperature", 0.0)
    if type(temperature) not in (int, float):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    return TrainingText(token_ids, spans, str(given.get("kind", "text")), float(temperature))


def _conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and where the assistant's messages stand, each with the token that ends it."""
    if tokenizer.template is None:
        raise ValueError("messages: the target has no chat template; give prompt and answer, or text")
    if not all(isinstance(each, dict) for each in messages):
        raise TypeError("messages must be a list of objects")
    done, token_ids, spans = "", list[int](), list[tuple[int, int]]()
    for number in (number for number, each in enumerate(messages) if each["role"] == "assistant"):
        _string(messages[number], "content")
        before = tokenizer.chat_text(messages[:number])
        answered = tokenizer.chat_text(messages[: number + 1], continues=True)
        finished = tokenizer.chat_text(messages[: number + 1])
        if not finished.startswith(answered):
            answered = answered.rstrip()  # as templates do that strip messages
        if not (before.startswith(done) and answered.startswith(before) and finished.startswith(answered)):
            raise ValueError("the chat template changes earlier messages; give one line for each answer")
        token_ids += tokenizer.encode(before[len(done) :], add_special_tokens=False)
        first = len(token_ids)
        token_ids += tokenizer.encode(answered[len(before) :], add_special_tokens=False)
        end = tokenizer.encode(finished[len(answered) :], add_special_tokens=False)[:1]
        token_ids += end
        spans.append((first, len(token_ids)))
        done = answered + tokenizer.decode(end, skip_special_tokens=False)
    if not spans:
        raise ValueError("messages: none is the assistant's")
    return token_ids, spans
