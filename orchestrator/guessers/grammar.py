"""Grammar guesser: proposes the tokens that the output's grammar or template forces.

Source: jump-forward decoding (SGLang, Zheng et al. 2023, arXiv 2312.07104), here as guesses, which are verified. Knows
where the output begins. A port reports the forced tokens, since grammars are compiled elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.ports import ForcedTokens
from core.speculation import Guesses

TEMPLATE_CHANCE = 0.9
"""Prior probability that an output which has matched its template so far continues to, since a template is not enforced
(docs/adr/grammars). Calibration corrects it."""


class GrammarGuesser:
    """A run of forced tokens, with a few branches where several tokens can begin the forced bytes."""

    def __init__(self, forced: ForcedTokens, prompt_len: int, max_depth: int, chance: float = 1.0) -> None:
        """`chance`: probability that the output matches the form for another token."""
        self._forced = forced
        self._prompt_len = prompt_len
        self._max_depth = max_depth
        self._chance = chance

    def propose(self, text: Sequence[int]) -> Guesses:
        guesses = self._forced.after(text[self._prompt_len :], self._max_depth)
        return replace(guesses, chances=tuple([self._chance * chance for chance in guesses.chances]))
