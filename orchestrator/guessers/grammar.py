"""The grammar of an output as a guesser: what it forces comes next, whatever the models say.

Source: jump-forward decoding (SGLang, Zheng et al. 2023, arXiv 2312.07104), here as guesses, which are verified. Knows
where the output begins; what a grammar forces is told by a port, since grammars are compiled elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.ports import Forced
from core.speculation import Guesses


class GrammarGuesser:
    """A run of forced tokens, and a few branches where several tokens may begin forced bytes."""

    def __init__(self, forced: Forced, prompt_len: int, max_depth: int) -> None:
        self._forced = forced
        self._prompt_len = prompt_len
        self._max_depth = max_depth

    def __repr__(self) -> str:
        return f"<GrammarGuesser {self._forced}>"

    def propose(self, text: Sequence[int]) -> Guesses:
        return self._forced.after(text[self._prompt_len :], self._max_depth)
