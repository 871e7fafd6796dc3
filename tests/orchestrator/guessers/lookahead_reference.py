"""Lookahead decoding as its authors' program does it, greedily: what ours is compared with.

Written anew after hao-ai-lab/LookaheadDecoding at 0e9f02d (Apache-2.0): `jacobi_greedy_search_multilevel` and
`update_token_map` of lade/decoding.py, `jforward_multilevel` and the mask of lade/models/llama.py, with
ALWAYS_FWD_ONE = 1, one device and no POOL_FROM_PROMPT. Theirs asks a model with a mask; here the model is a function
from tokens to the next one, and what a row may attend to is the list of tokens that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NextToken = Callable[[Sequence[int]], int]


@dataclass
class Reference:
    """One text. W columns, N-grams, at most G of them for each first token."""

    next_token: NextToken
    text: list[int]
    window: int
    ngram: int
    guess_set: int
    levels: list[list[int]]
    """past_tokens: of these, level 0 is given, W + N - 3 tokens; the program draws them from the prompt."""
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """token_map."""
    num_passes: int = 0

    @property
    def is_filled(self) -> bool:
        return len(self.levels) == self.ngram - 1

    def step(self) -> list[int]:
        """One pass; returns the tokens that it adds to the text."""
        root, answers, own = self.text[-1], self._answers(), self.next_token(self.text)
        guesses = self.pool.get(root, []) if self.is_filled else []
        added = self._longest_hit(guesses, own)
        if self.is_filled:
            self._collect(root, answers)
            self.levels = [self.levels[1][1:], *self.levels[2:], answers]
        elif len(self.levels) == 1:
            self.levels = [self.levels[0][1:], answers]
        else:
            self.levels = [*(level[1:] for level in self.levels), answers[1:]]
        self.text += added
        self.num_passes += 1
        return added

    def _answers(self) -> list[int]:
        """The model's tokens after the last level (inp_logits). A token of level k > 0 in column j attends to the
        text, to the first j tokens of level 0, and to levels 1 to k of its own column."""
        trunk, *others = self.levels
        if not others:
            return [self.next_token([*self.text, *trunk[: place + 1]]) for place in range(len(trunk))]
        columns = zip(*others, strict=True)
        return [self.next_token([*self.text, *trunk[:place], *column]) for place, column in enumerate(columns)]

    def _collect(self, root: int, answers: list[int]) -> None:
        trunk, *others = self.levels
        for first, *column, answer in zip([root, *trunk], *others, answers, strict=True):
            found = self.pool.setdefault(first, [])
            rest = (*column, answer)
            if rest in found:
                found.remove(rest)
            elif len(found) == self.guess_set:
                del found[0]
            found.append(rest)

    def _longest_hit(self, guesses: Sequence[tuple[int, ...]], own: int) -> list[int]:
        """The verification branch: the first of the longest guesses that agree, and the model's own token behind it."""
        best = [own]
        for guess in guesses:
            said = [own, *(self.next_token([*self.text, *guess[: size + 1]]) for size in range(len(guess)))]
            num_hit = next((size for size, token in enumerate(guess) if token != said[size]), len(guess))
            best = max(best, said[: num_hit + 1], key=len)
        return best
