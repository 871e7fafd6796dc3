"""A template of the output as a guesser: a regular expression that says what outputs usually look like.

Source: as of the grammar guesser, for an expression that holds the target to nothing (docs/adr/0054). Knows where the
output begins; what an expression forces is told by a port, since it is compiled elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.ports import Forced
from core.speculation import Guesses

CHANCE = 0.9
"""That an output which has kept to its template so far goes on to: what is learned of templates corrects it."""


class TemplateGuesser:
    """What the template forces behind the output, as long as the output is one that it can go on from."""

    def __init__(self, expected: Forced, prompt_len: int, max_depth: int) -> None:
        self._expected = expected
        self._prompt_len = prompt_len
        self._max_depth = max_depth

    def __repr__(self) -> str:
        return f"<TemplateGuesser {self._expected}>"

    def propose(self, text: Sequence[int]) -> Guesses:
        guesses = self._expected.after(text[self._prompt_len :], self._max_depth)
        return replace(guesses, chances=tuple([CHANCE * chance for chance in guesses.chances]))
