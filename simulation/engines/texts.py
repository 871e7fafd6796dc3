"""Both models as functions of the prefix: the target's text, and the draft's ranking of its tokens.

Knows tokens and laws of agreement; must not know engines, messages or time. The target's token is a hash of the whole
prefix and the seed, so any token that is lost, repeated or changed changes all tokens after it. A separate law gives
the draft's acceptance: by rank (`SteadyLaw`), or from a recording of two real models (`simulation.engines.recorded`).
After a prefix that is not the target's own text the draft's candidates are arbitrary, since none is ever accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from core.records import SequenceSpec
from core.speculation import Candidates, SparseDistribution, TokenTree
from core.text import TokenLog, extended

EOS = 0
TYPICAL_SHARE = 0.3
"""Share of wrong guesses that typical acceptance accepts."""
_WORD = 2**64 - 1


def mix(first: int, second: int = 0, third: int = 0) -> int:
    """Mix three integers into 64 bits. Source: the finalizer of Steele et al. 2014 (SplitMix64)."""
    state = (first * 0x9E3779B97F4A7C15 + second * 0xD1B54A32D192ED03 + third * 0x8CB92BA72F3D8DD7 + 1) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


def fraction(bits: int) -> float:
    """A number in [0, 1) from 64 bits."""
    return (bits >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of draft and target about one token of the target's text. Ranks count from 0, the likeliest."""

    rank: int
    """Rank of the target's token among the draft's candidates, both with the shared noise."""
    plain_rank: int
    """The same rank if the draft does not use the noise."""
    alpha: float
    """Chance that rejection accepts the draft's sample: the sum of min(p, q)."""
    confidence: float
    """Share of the draft's first candidate, with the shared noise."""
    entropy: float = 0.0
    """Entropy of the draft's distribution, in nats."""
    plain_confidence: float = 0.5
    """Largest probability of the draft's distribution."""
    shares: tuple[float, ...] = ()
    """Shares of the draft's candidates, with the shared noise; empty if unknown."""


class Law(Protocol):
    """Agreement at every token of a text."""

    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:
        """Agreement about output token `index` of text `seed`. `depth`: guesses since the last token of the text that
        the draft was sent."""
        ...

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:
        """Number of `num_guesses` guesses that block verification accepts; None to derive it from `alpha`."""
        ...


@dataclass(frozen=True, slots=True)
class SteadyLaw:
    """All tokens agree alike and independently: rank r has probability `shares[r]`, unlisted ranks the rest."""

    shares: tuple[float, ...] = (0.75, 0.12, 0.05, 0.03)
    plain_shares: tuple[float, ...] = (0.6, 0.1, 0.05)
    alpha: float = 0.78

    @lru_cache(maxsize=1 << 14)  # noqa: B019  the cache keeps each law, but they are few and needed to the end
    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:  # noqa: ARG002
        draws = [mix(seed, index, column) for column in range(4)]
        return Agreement(
            rank=_draw_rank(self.shares, fraction(draws[0])),
            plain_rank=_draw_rank(self.plain_shares, fraction(draws[1])),
            alpha=self.alpha,
            confidence=(1.0 + fraction(draws[3])) / 2.0,
            entropy=2.0 * (1.0 - fraction(draws[3])),
            plain_confidence=(1.0 + fraction(draws[3])) / 2.0,
        )

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:  # noqa: ARG002
        return None


NEVER_RANKED = 1 << 20
"""Rank of a token that the draft does not list."""


def _draw_rank(shares: Sequence[float], u: float) -> int:
    for rank, share in enumerate(shares):
        u -= share
        if u < 0:
            return rank
    return NEVER_RANKED


@dataclass(frozen=True, slots=True)
class TextPosition:
    """The part of a prefix that later tokens depend on."""

    prefix_hash: int
    index: int
    """Index of the next token in the output."""
    seed: int
    is_true: bool
    """Whether the prefix is the target's own text."""
    next_token: int
    """The target's token after the prefix."""
    depth: int = 0
    """Number of guesses at the end of the prefix."""


@dataclass(frozen=True, slots=True)
class Text:
    """Target and draft of one pair. Token ids are 1 to `vocab_size` - 1, and `EOS` at the end of a text."""

    law: Law
    vocab_size: int = 1000
    eos_share: float = 0.0
    """Chance that a token ends the text."""

    def position(self, log: TokenLog, spec: SequenceSpec) -> TextPosition:
        """The position after `log`, which must be the target's text."""
        return self._position(log.base(len(log)).prefix_hash, len(log) - spec.prompt_len, spec.sampling.seed, True)

    def after(self, position: TextPosition, token: int) -> TextPosition:
        """The position after one more token."""
        is_true = position.is_true and token == position.next_token
        prefix_hash, index = extended(position.prefix_hash, token), position.index + 1
        return replace(self._position(prefix_hash, index, position.seed, is_true), depth=position.depth + 1)

    def samples(self, block: TokenTree, root: TextPosition) -> tuple[int, ...]:
        """The target's token after the root and after each node."""
        positions = [root]
        for token, parent in zip(block.tokens, block.parents, strict=True):
            positions.append(self.after(positions[parent + 1], token))
        return tuple([position.next_token for position in positions])

    def plain(self, prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
        """The beginning of every correct completion of `prompt`."""
        log = TokenLog(prompt)
        for index in range(num_tokens):
            log.extend([self._position(log.base(len(log)).prefix_hash, index, seed, True).next_token])
        return list(log.since(len(prompt)))

    def coupled(self, position: TextPosition, num_ranks: int, *, has_noise: bool = True) -> Candidates:
        """The draft's candidates in coupled and greedy decoding."""
        agreement = self._agreement(position)
        ranked = self._ranked(position, agreement.rank if has_noise else agreement.plain_rank, num_ranks)
        if not has_noise:
            return Candidates(ranked, agreement.plain_confidence, agreement.entropy)
        return Candidates(ranked, agreement.confidence, agreement.entropy, shares=agreement.shares[:num_ranks])

    def sampled(self, position: TextPosition, *, is_right: bool) -> Candidates:
        """The draft's candidates if it samples. The caller decides whether its sample is right."""
        agreement = self._agreement(position)
        sample = position.next_token if is_right and position.is_true else self._filler(position, self.vocab_size - 3)
        q = SparseDistribution.certain(sample)
        return Candidates((sample,), agreement.plain_confidence, agreement.entropy, sample, q)

    def accepted(self, position: TextPosition, token: int) -> TextPosition:
        """The position after an accepted token, whether or not it is the target's own."""
        return self._position(extended(position.prefix_hash, token), position.index + 1, position.seed, True)

    def tolerates(self, position: TextPosition, token: int, spec: SequenceSpec) -> bool:
        """Whether a relaxed rule accepts a guess that is not the target's own token."""
        share = 1.0 - spec.lenience if spec.rule.takes_lenience else TYPICAL_SHARE
        return not spec.rule.is_lossless and fraction(mix(position.prefix_hash, position.seed, token)) < share

    def is_accepted(self, position: TextPosition) -> bool:
        """Whether rejection accepts the draft's sample at a position of the target's text. Pseudo-random, with chance
        `alpha`."""
        return fraction(mix(position.prefix_hash, position.seed, 1)) < self.law.at(position.seed, position.index).alpha

    def _agreement(self, position: TextPosition) -> Agreement:
        """Agreement at a position. Outside the target's text only confidence and entropy matter; they are taken from
        another position."""
        index = position.index if position.is_true else position.index + 1 + position.prefix_hash % 97
        return self.law.at(position.seed, index, position.depth)

    def _position(self, prefix_hash: int, index: int, seed: int, is_true: bool) -> TextPosition:
        bits = mix(prefix_hash, seed)
        is_end = self.eos_share > 0 and fraction(mix(bits)) < self.eos_share
        return TextPosition(prefix_hash, index, seed, is_true, EOS if is_end else 1 + bits % (self.vocab_size - 1))

    def _ranked(self, position: TextPosition, rank: int, num_ranks: int) -> tuple[int, ...]:
        num_ranks = min(num_ranks, self.vocab_size - 4)
        if not position.is_true or rank >= num_ranks:
            return self._fillers(position, num_ranks)
        fillers = self._fillers(position, num_ranks - 1)
        return (*fillers[:rank], position.next_token, *fillers[rank:])

    def _fillers(self, position: TextPosition, num: int) -> tuple[int, ...]:
        """The draft's first `num` candidates other than the target's token."""
        first, num_words = position.next_token, self.vocab_size - 1
        if first + num <= num_words:
            return tuple(range(1 + first, 1 + first + num))
        return tuple(self._filler(position, number) for number in range(num))

    def _filler(self, position: TextPosition, number: int) -> int:
        """The draft's candidate `number` other than the target's token. Different numbers give different tokens."""
        return 1 + (position.next_token + number) % (self.vocab_size - 1)
