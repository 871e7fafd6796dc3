"""Checks shared by several fields. Each refusal names the field and the allowed values.

Knows tokenizers and models; must not know requests. The limits are `core.config.Limits`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from core.config import Limits
from core.errors import ContextExceeded, InvalidRequest
from core.ranges import Range, shown
from core.records import ModelInfo, Sampling
from deploy.api.given import GivenTool
from orchestrator.text import Tokenizer

Number = TypeVar("Number", int, float)
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def token_ids(ids: Iterable[int], field: str, info: ModelInfo) -> tuple[int, ...]:
    """The ids, checked against the vocabulary. Raises: InvalidRequest, which names the first invalid id."""
    checked = tuple(ids)
    if max(checked, default=0) >= info.vocab_size or min(checked, default=0) < 0:
        index, wrong = next((i, token) for i, token in enumerate(checked) if not 0 <= token < info.vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"must be in [0, {info.vocab_size - 1}], got {shown(wrong)}")
    return checked


def context_exceeded(
    field: str, problem: str, context: int, num_prompt: int | None = None, num_output: int = 0
) -> ContextExceeded:
    """The error of a request that does not fit into a context of `context` tokens.

    Gateways and clients recognize it by OpenAI's wording, and parse the numbers.
    """
    message = f"{problem}. This model's maximum context length is {context} tokens."
    if num_prompt is not None:
        total = num_prompt + num_output
        message += (
            f" However, you requested {total} tokens ({num_prompt} in the messages, {num_output} in the completion)."
        )
    return ContextExceeded(field, message)


def text_ids(ids: tuple[int, ...], field: str, tokenizer: Tokenizer, info: ModelInfo) -> tuple[int, ...]:
    """The ids of a text, checked against the vocabulary. Raises: InvalidRequest, which names the token.

    A tokenizer may have tokens, mostly added ones, for which the model has no rows.
    """
    if max(ids, default=0) >= info.vocab_size:
        wrong = next(token_id for token_id in ids if token_id >= info.vocab_size)
        token = shown(tokenizer.decode([wrong], skip_special_tokens=False))
        problem = f"is token {wrong}, but the model has only the ids 0 to {info.vocab_size - 1}"
        raise InvalidRequest(field, f"must not hold {token}, which {problem}")
    return ids


def require(condition: bool, field: str, allowed: str, value: object) -> None:
    """Raises: InvalidRequest, which names the allowed values, unless `condition` holds."""
    if not condition:
        raise InvalidRequest(field, f"must be {allowed}, got {shown(value)}")


def within(given: Number | None, allowed: Range, field: str) -> Number | None:
    """The value, if given, checked against a range. Raises: InvalidRequest."""
    require(given is None or given in allowed, field, str(allowed), given)
    return given


def require_eos(field: str, info: ModelInfo) -> None:
    """Raises: InvalidRequest if the model has no end-of-sequence token: a constrained output could not end."""
    if not info.eos_token_ids:
        raise InvalidRequest(
            field, "cannot be given: the model has no end-of-sequence token, which has to end the output"
        )


def check_tools(given: Sequence[GivenTool]) -> None:
    """Raises: InvalidRequest for an invalid or repeated name."""
    for index, tool in enumerate(given):
        is_fit = TOOL_NAME.fullmatch(tool.name) is not None
        require(is_fit, f"{tool.field}.name", "1 to 128 letters, digits, '_', '-' or '.'", tool.name)
        is_new = tool.name not in {other.name for other in given[:index]}
        require(is_new, f"{tool.field}.name", "another name than those before", tool.name)


def json_object(text: str, field: str) -> dict[str, Any]:
    """Parse a JSON object; empty text is an empty object. Raises: InvalidRequest."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object, written as a string")
    return value


def check_length(text: str, field: str, tokenizer: Tokenizer, context: int) -> None:
    """Raises: ContextExceeded if no tokenization of `text` fits into a context of `context` tokens."""
    if (problem := _problem_of_length(text, tokenizer, context - 1)) is not None:
        raise context_exceeded(field, problem, context)


def _problem_of_length(text: str, tokenizer: Tokenizer, most_tokens: int) -> str | None:
    most, size = tokenizer.max_text_bytes(most_tokens + 1), len(text.encode())
    if most is None or size <= most:
        return None
    return f"must be at most {most_tokens} tokens long; {size} bytes are always more"


def allowed_token_ids(given: Sequence[int] | None, info: ModelInfo, limits: Limits) -> tuple[int, ...]:
    """The only ids that may be sampled, sorted. Raises: InvalidRequest."""
    if given is None:
        return ()
    field, most = "allowed_token_ids", limits.max_allowed_token_ids
    require(1 <= len(given) <= most, field, f"1 to {most} ids", len(given))
    return tuple(sorted(set(token_ids(given, field, info))))


def bad_words(
    texts: Sequence[str], sequences: Sequence[Sequence[int]], tokenizer: Tokenizer, info: ModelInfo, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """The sequences of ids that must not be generated. Raises: InvalidRequest."""
    most, longest = limits.max_bad_words, limits.max_bad_word_tokens
    for field, given in (("bad_words", texts), ("bad_word_ids", sequences)):
        num_words = len(texts) + len(sequences)
        require(num_words <= most or not given, field, f"at most {most} words, bad_word_ids included", num_words)
    words: list[tuple[int, ...]] = []
    for index, text in enumerate(texts):
        field = f"bad_words[{index}]"
        require(bool(text), field, "at least one character long", text)
        if (problem := _problem_of_length(text, tokenizer, longest)) is not None:
            raise InvalidRequest(field, problem)
        words += (text_ids(ids, field, tokenizer, info) for ids in _ids_of_word(text, tokenizer))
        require(1 <= len(words[-1]) <= longest, field, f"1 to {longest} tokens long", len(words[-1]))
    for index, ids in enumerate(sequences):
        field = f"bad_word_ids[{index}].ids"
        require(1 <= len(ids) <= longest, field, f"1 to {longest} ids", len(ids))
        words.append(token_ids(ids, field, info))
    return tuple(words)


def check_masks(sampling: Sampling) -> None:
    """Check that some token can be sampled.

    An output that can only continue with bad words fails later (`UnsoundScores`). Raises: InvalidRequest.
    """
    masked = {word[0] for word in sampling.bad_words if len(word) == 1}
    masked |= set(sampling.suppressed_ids) if sampling.min_tokens else set()
    if sampling.allowed_token_ids and masked.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "sampling.allowed_token_ids", "must leave a token that bad words and min_tokens do not mask"
        )


def logit_bias(given: Mapping[int, float], info: ModelInfo, limits: Limits) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and added bias, sorted by id. Raises: InvalidRequest."""
    most = limits.max_logit_bias
    require(len(given) <= most, "logit_bias", f"at most {most} entries", len(given))
    wrong = next((token_id for token_id in given if not 0 <= token_id < info.vocab_size), None)
    require(wrong is None, "logit_bias", f"of token ids in [0, {info.vocab_size - 1}]", wrong)
    return tuple(sorted(given.items()))


def _ids_of_word(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Ids of the word at the start of a text, and of the word after a space. Same two forms as in vLLM."""
    word = text.lstrip() or text
    bare = tokenizer.encode(word, add_special_tokens=False)
    spaced = tokenizer.encode(f" {word}", add_special_tokens=False)
    return [bare, spaced] if len(spaced) == len(bare) and spaced[:1] != bare[:1] else [bare]
