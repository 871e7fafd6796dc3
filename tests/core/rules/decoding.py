"""A target and a draft over eight tokens, decoded round by round by the real acceptance code for many seeds.

Both are Markov chains: the law of the next token depends on the last one, so that a token emitted from the wrong row,
or a guess redrafted with stale noise, shows in the joint law of the tokens after it. Noise is computed for all seeds at
once and looked up, which changes no number and makes a hundred thousand decodings a matter of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from scipy import stats

from core import noise
from core.exact.sampling import truncate
from core.noise import Purpose
from core.records import Verification
from core.rules import chains as acceptance
from core.rules.coupled import verify_coupled
from core.speculation.token_tree import TokenTree

VOCAB_SIZE = 8
FIRST_TOKEN = 0
SIGNIFICANCE = 1e-6

VERIFY = {Verification.REJECTION: acceptance.verify_rejection, Verification.BLOCK: acceptance.verify_block}
RemapNoise = Callable[[int, int, Purpose], tuple[int, int, Purpose]]


@dataclass
class NoiseTable:
    """Stands in for `core.noise` inside the rules; `remap` lets a test reuse noise that must not be reused."""

    num_seeds: int
    remap: RemapNoise = lambda position, row, purpose: (position, row, purpose)
    _gumbel: dict = field(default_factory=dict)
    _uniform: dict = field(default_factory=dict)

    row_of = staticmethod(noise.row_of)

    def gumbel(self, seed, position, row, purpose, vocab_size):
        return self.gumbel_of_all(*self.remap(position, row, purpose))[seed]

    def uniform(self, seed, position, row, purpose):
        place = self.remap(position, row, purpose)
        if place not in self._uniform:
            high, low, _, _ = noise.words(0, np.arange(self.num_seeds), *place)
            self._uniform[place] = noise.uniform_of(high, low).tolist()
        return self._uniform[place][seed]

    def gumbel_of_all(self, position, row, purpose):
        place = (position, row, purpose)
        if place not in self._gumbel:
            keys = np.zeros((self.num_seeds, 4), dtype=np.int64)
            keys[:, 0], keys[:, 1:] = np.arange(self.num_seeds), place
            self._gumbel[place] = noise.gumbel_rows(keys, VOCAB_SIZE)
        return self._gumbel[place]

    def draws(self, log_law, position, row, purpose):
        """For each seed and each last token: the token drawn from that row of `log_law`."""
        gumbel = self.gumbel_of_all(*self.remap(position, row, purpose))
        return np.stack([(gumbel + log_row.astype(np.float32)).argmax(axis=1) for log_row in log_law], axis=1).tolist()


def log(law):
    with np.errstate(divide="ignore"):
        return np.log(law)


@dataclass
class Decoder:
    """Decodes with target `p` and draft `q` [V, V]; the row is the last token's."""

    p: np.ndarray
    q: np.ndarray
    gamma: int
    noise: NoiseTable
    sent_q: np.ndarray | None = None
    """The law that the draft claims to have sampled from, if that is not `q`."""
    keep: Callable[[int, int], bool] = lambda last, token: True
    """Whether the draft keeps a guess; it stops before the first that it does not keep."""
    _guesses: dict = field(default_factory=dict)
    _samples: dict = field(default_factory=dict)
    _chains: dict = field(default_factory=dict)

    def __post_init__(self):
        self.q_records = [
            truncate(row, VOCAB_SIZE, math.inf) for row in log(self.q if self.sent_q is None else self.sent_q)
        ]

    def guess(self, seed, position, row, purpose, last):
        place = (position, row, purpose)
        if place not in self._guesses:
            self._guesses[place] = self.noise.draws(log(self.q), *place)
        return self._guesses[place][seed][last]

    def chain(self, seed, position, last, purpose=Purpose.DRAFT):
        lasts, tokens = [last], []
        for row in range(self.gamma):
            token = self.guess(seed, position + row, 0 if purpose is Purpose.SHARED else row, purpose, last)
            if not self.keep(last, token):
                break
            tokens.append(token)
            last = token
            lasts.append(last)
        place = tuple(lasts)
        if place not in self._chains:
            self._chains[place] = TokenTree.chain(tokens, [self.q_records[last] for last in place[:-1]])
        return self._chains[place]

    def target_sample(self, seed, position, last):
        if position not in self._samples:
            self._samples[position] = self.noise.draws(log(self.p), position, 0, Purpose.SHARED)
        return self._samples[position][seed][last]

    def coupled_round(self, seed, position, last):
        block = self.chain(seed, position, last, Purpose.SHARED)
        lasts = (last, *block.tokens)
        samples = [self.target_sample(seed, position + depth, token) for depth, token in enumerate(lasts)]
        return block, verify_coupled(block, samples)

    def decode(self, seed, num_tokens, verify=None):
        """The first `num_tokens` tokens after the prompt; coupled when no `verify` is given."""
        tokens = [FIRST_TOKEN]
        while len(tokens) <= num_tokens:
            if verify is None:
                block, (path, next_token, *_) = self.coupled_round(seed, len(tokens), tokens[-1])
            else:
                block = self.chain(seed, len(tokens), tokens[-1])
                path, next_token, *_ = verify(block, self.p[[tokens[-1], *block.tokens]], seed, len(tokens))
            tokens += [block.tokens[node] for node in path]
            tokens.append(next_token)
        return tuple(tokens[1 : num_tokens + 1])


def count(decoder, num_tokens, monkeypatch, verify=None):
    """How often each output occurs, over all seeds of the decoder's noise: [V] * num_tokens."""
    monkeypatch.setattr(acceptance, "noise", decoder.noise)
    monkeypatch.setattr("core.rules.rule.noise", decoder.noise)
    monkeypatch.setattr("core.rules.drawn_trees.noise", decoder.noise)
    counts = np.zeros((VOCAB_SIZE,) * num_tokens)
    for seed in range(decoder.noise.num_seeds):
        counts[decoder.decode(seed, num_tokens, verify)] += 1
    return counts


def p_value(counts, p):
    """p-value of the hypothesis that the tokens follow the target."""
    law = np.zeros_like(counts)
    for tokens in product(range(VOCAB_SIZE), repeat=counts.ndim):
        lasts = (FIRST_TOKEN, *tokens)
        law[tokens] = np.prod([p[last, token] for last, token in zip(lasts, tokens, strict=False)])
    return p_value_of(counts, law)


def p_value_of(counts, law):
    """p-value of the hypothesis that they follow this law: Pearson's chi-squared, cells that expect under 10 pooled."""
    expected = counts.sum() * law
    if counts[expected == 0].any():
        return 0.0  # what never comes
    is_rare = expected < 10
    observed = [*counts[~is_rare], counts[is_rare].sum()]
    expected = [*expected[~is_rare], expected[is_rare].sum()]
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue) if len(expected) > 1 else 1.0


def dirichlet(seed, concentration=0.6):
    """A random Markov chain over the vocabulary."""
    return np.random.default_rng(seed).dirichlet([concentration] * VOCAB_SIZE, size=VOCAB_SIZE)
