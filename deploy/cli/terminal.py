"""A stream as a person sees it: which words the draft had guessed, and what that saved.

Knows chunks and terminals; must not know how they were fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TextIO

from deploy.client import Completion
from protos.outrider.v1 import generation_pb2 as pb

GUESSED = "\x1b[32m"
CORRECTED = "\x1b[1;33m"
RESET = "\x1b[0m"
LEGEND = f"{GUESSED}guessed by the draft, accepted by the target{RESET}   {CORRECTED}the target's own{RESET}"


def say(line: str) -> None:
    """A line beside the output: to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def use_color(choice: str, out: TextIO, is_refused: bool) -> bool:
    """Whether to colour: `choice` is always, never or auto; auto colours a terminal whose user has not refused it."""
    return choice == "always" or (choice == "auto" and out.isatty() and not is_refused)


class Writer:
    """Writes chunks as they come; in colour if it can ask for the text of a token."""

    def __init__(self, out: TextIO, text_of: Callable[[int], str] | None) -> None:
        self._out = out
        self._text_of = cache(text_of) if text_of is not None else None

    def __call__(self, chunk: pb.GenerateChunk) -> None:
        if self._text_of is None:
            self._out.write(chunk.text)
        else:
            self._out.writelines(paint(text, is_guess) for text, is_guess in spans(chunk, self._text_of))
        self._out.flush()

    def whole(self, chunks: Iterable[pb.GenerateChunk]) -> None:
        """All of a stream at once, and the end of its line."""
        for chunk in chunks:
            self(chunk)
        self._out.write("\n")


def spans(chunk: pb.GenerateChunk, text_of: Callable[[int], str]) -> Iterator[tuple[str, bool]]:
    """The text of a chunk in parts, each with whether it was guessed.

    A chunk is accepted guesses and then, at most, one token of the target's own. Where its text cannot be told apart,
    because a character is spread over both, all of it counts as the target's own.
    """
    if all(chunk.guessed) or not any(chunk.guessed):
        yield chunk.text, bool(chunk.token_ids) and all(chunk.guessed)
        return
    own = text_of(chunk.token_ids[-1])
    num_guessed = len(chunk.text) - len(own) if chunk.text.endswith(own) else 0
    yield chunk.text[:num_guessed], True
    yield chunk.text[num_guessed:], False


def paint(text: str, is_guess: bool) -> str:
    """The text in its colour; each line on its own, so that a pager or a wrapped line keeps it."""
    color = GUESSED if is_guess else CORRECTED
    return "\n".join(f"{color}{line}{RESET}" if line else "" for line in text.split("\n"))


def summary(completion: Completion) -> str:
    """One line on what a completion cost."""
    stats, tokens, duration_s = completion.finish.speculation, completion.usage.completion_tokens, completion.duration_s
    parts = [f"{tokens} tokens in {stats.target_passes} target passes"]
    if stats.target_passes:
        parts.append(f"{tokens / stats.target_passes:.2f} tokens a pass")
    if stats.drafted_tokens:
        acceptance = stats.accepted_tokens / stats.drafted_tokens
        parts.append(f"{acceptance:.0%} of {stats.drafted_tokens} guesses accepted")
    else:
        parts.append("no drafting")
    parts += _pipelining(stats)
    parts.append(f"{duration_s:.2f} s, {tokens / duration_s:.1f} tokens/s")
    return "; ".join(parts)


def _pipelining(stats: pb.SpeculationStats) -> Iterator[str]:
    """How often the next block was ready, and how much of the drafting nobody waited for."""
    if num_asked := stats.hits + stats.misses:
        yield f"{stats.hits / num_asked:.0%} of {num_asked} next blocks were ready"
    if stats.draft_time_s > 0:
        hidden = stats.hidden_draft_time_s / stats.draft_time_s
        yield f"{hidden:.0%} of {stats.draft_time_s:.2f} s of drafting hidden"
