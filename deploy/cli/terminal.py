"""Shows streams in a terminal: which tokens were guessed, and the speed of the stream.

Knows chunks, jobs and terminals; must not know how a job is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TextIO

from deploy.cli.jobs import Job
from outrider_client import Chunk, Client, Speculation

GUESSED = "\x1b[32m"
CORRECTED = "\x1b[1;33m"
RESET = "\x1b[0m"
LEGEND = f"{GUESSED}guessed by the draft, accepted by the target{RESET}   {CORRECTED}the target's own{RESET}"


def say(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def working(on: str) -> AbstractContextManager[object]:
    """Show a spinner on standard error, if that is a terminal, within the `with` block."""
    from rich.console import Console  # not needed by most commands

    return Console(stderr=True).status(on)


@contextmanager
def progress(on: str, num_steps: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error, if that is a terminal; call the yielded function after each step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(on, total=num_steps)
        yield lambda: bar.advance(task)


def use_color(choice: str, out: TextIO, is_refused: bool) -> bool:
    """Whether to colour the output. `choice` is always, never or auto; auto colours a terminal unless `is_refused`."""
    return choice == "always" or (choice == "auto" and out.isatty() and not is_refused)


def token_text(client: Client, model: str | None = None) -> Callable[[int], str]:
    """A function from a token id to its text, which is empty for a special token."""
    return lambda token_id: client.detokenize([token_id], skip_special_tokens=True, model=model)


class Writer:
    """Writes chunks as they arrive; in colour if `text_of`, which returns the text of a token, is given."""

    def __init__(self, out: TextIO, text_of: Callable[[int], str] | None) -> None:
        self._out = out
        self._text_of = cache(text_of) if text_of is not None else None

    def __call__(self, chunk: Chunk) -> None:
        if self._text_of is None:
            self._out.write(chunk.text)
        else:
            self._out.writelines(paint(text, is_guess) for text, is_guess in spans(chunk, self._text_of))
        self._out.flush()

    def whole(self, chunks: Iterable[Chunk]) -> None:
        """Write all chunks of a stream, and a newline."""
        for chunk in chunks:
            self(chunk)
        self._out.write("\n")


def spans(chunk: Chunk, text_of: Callable[[int], str]) -> Iterator[tuple[str, bool]]:
    """The parts of a chunk's text, each with True if it was guessed.

    A chunk consists of accepted guesses and then at most one token of the target's own. If their texts cannot be
    separated, because one character spans both, the whole text counts as the target's own.
    """
    if all(chunk.guessed) or not any(chunk.guessed):
        yield chunk.text, bool(chunk.token_ids) and all(chunk.guessed)
        return
    own = text_of(chunk.token_ids[-1])
    num_guessed = len(chunk.text) - len(own) if chunk.text.endswith(own) else 0
    yield chunk.text[:num_guessed], True
    yield chunk.text[num_guessed:], False


def paint(text: str, is_guess: bool) -> str:
    """The text in its colour. Each line is coloured separately, because pagers reset colours at line ends."""
    color = GUESSED if is_guess else CORRECTED
    return "\n".join(f"{color}{line}{RESET}" if line else "" for line in text.split("\n"))


def summary(job: Job) -> str:
    """One line with tokens, passes, acceptance and time of a stream that has ended."""
    tokens, stats = job.chunks[-1].usage.completion_tokens, job.finish.speculation
    parts = list(_speculation(stats, tokens)) if stats is not None else [f"{tokens} tokens"]
    return "; ".join([*parts, f"{job.duration_s:.2f} s, {tokens / job.duration_s:.1f} tokens/s"])


def _speculation(stats: Speculation, tokens: int) -> Iterator[str]:
    yield f"{tokens} tokens in {stats.target_passes} target passes"
    if stats.target_passes:
        yield f"{tokens / stats.target_passes:.2f} tokens a pass"
    if stats.drafted_tokens:
        yield f"{stats.accepted_tokens / stats.drafted_tokens:.0%} of {stats.drafted_tokens} guesses accepted"
    else:
        yield "no drafting"
    if num_asked := stats.hits + stats.misses:
        yield f"{stats.hits / num_asked:.0%} of {num_asked} next blocks were ready"
    if stats.draft_time_s > 0:
        hidden = stats.hidden_draft_time_s / stats.draft_time_s
        yield f"{hidden:.0%} of {stats.draft_time_s:.2f} s of drafting hidden"
