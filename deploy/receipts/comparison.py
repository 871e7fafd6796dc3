"""Compares a recomputed output with the receipt of the first; if they differ, names the possible causes.

Pure functions over receipts as JSON objects. Some fields define the computation (weights, tokenizer, prompt,
parameters), some change its guesses, some change the last bits of its results, and the others do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Fields = Mapping[str, Any]

DECISIVE = (
    "target.digest",
    "target.dtype",
    "adapter_digest",
    "tokenizer_digest",
    "prompt_digest",
    "sampling",
    "stopping",
    "verification",
    "lenience",
    "structured_output_digest",
)
"""If one of these differs, a different output is correct."""
GUESSING = ("draft.digest", "draft.layers", "draft.dtype")
"""If one of these differs, guesses differ: with a rule whose output depends on guesses, the output may differ."""
ARITHMETIC = ("target.device", "target.arithmetic", "target.deterministic", "version")
"""If one of these differs, the last bits of a sum may differ, and so the choice between two nearly equal tokens."""
MAX_SHOWN_CHARS = 120


class Outcome(IntEnum):
    """Outcome of a comparison, and exit status of `outrider replay`."""

    SAME = 0
    DIFFERS = 1
    NOT_COMPARABLE = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str


def compare(before: Fields, now: Fields, tokens_before: Sequence[int] | None, tokens_now: Sequence[int]) -> Verdict:
    """`before` is the receipt, `now` that of the repetition; `tokens_before` is None if the tokens were not saved."""
    is_same = (before["output_digest"], before["output_tokens"]) == (now["output_digest"], now["output_tokens"])
    output = f"all {now['output_tokens']} tokens are the same" if is_same else _difference(tokens_before, tokens_now)
    if decisive := list(_differences(DECISIVE, before, now)):
        return Verdict(Outcome.NOT_COMPARABLE, f"{'; '.join(decisive)}; {output}")
    if is_same:
        return Verdict(Outcome.SAME, output)
    if before.get("depends_on_guesses"):
        why = f"the output of {before['verification']} verification depends on the guesses that it saw"
        return Verdict(Outcome.NOT_COMPARABLE, "; ".join([why, *_differences(GUESSING, before, now), output]))
    causes = list(_differences(ARITHMETIC, before, now))
    if not before["target"]["deterministic"]:
        causes.append("the target is not deterministic, so that other requests in a pass may change last bits")
    why = f" (what may explain it: {'; '.join(causes)})" if causes else " (nothing in the receipt explains it)"
    return Verdict(Outcome.DIFFERS, output + why)


def _difference(before: Sequence[int] | None, now: Sequence[int]) -> str:
    if before is None:
        return "the output differs (nobody has kept the tokens: from which one on is not known)"
    pairs = zip(before, now, strict=False)
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(now)))
    return f"the output differs from token {first} on (of {len(before)}, counted from 0)"


def _differences(paths: Sequence[str], before: Fields, now: Fields) -> Iterator[str]:
    for path in paths:
        one, other = _at(before, path), _at(now, path)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
            yield from _differences([f"{path}.{name}" for name in names], before, now)
        elif one != other and (one or other):  # receipts of earlier releases lack fields that are unset in this one
            yield f"{path} differs ({_shown(one)}, now {_shown(other)})"


def _at(fields: Fields, path: str) -> Any:
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
