"""The form of an output as a guesser: what its grammar, or its template, forces comes next, whatever the models say.

Source: jump-forward decoding (SGLang, Zheng et al. 2023, arXiv 2312.07104), here as guesses, which are verified. Knows
where the output begins; what a form forces is told by a port, since grammars are compiled elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.ports import Forced
from core.speculation import Guesses

TEMPLATE_CHANCE = 0.9
"""That an output which has kept to its template so far goes on to: nothing holds it to it (docs/adr/0054). What is
learned of templates corrects this."""


class GrammarGuesser:
    """A run of forced tokens, and a few branches where several tokens may begin forced bytes."""

    def __init__(self, forced: Forced, prompt_len: int, max_depth: int, chance: float = 1.0) -> None:
        """`chance`: that the output keeps to the form for another token."""
        self._forced = forced
        self._prompt_len = prompt_len
        self._max_depth = max_depth
        self._chance = chance

    def propose(self, text: Sequence[int]) -> Guesses:
        guesses = self._forced.after(text[self._prompt_len :], self._max_depth)
        return replace(guesses, chances=tuple([self._chance * chance for chance in guesses.chances]))
