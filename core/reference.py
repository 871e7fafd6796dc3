"""Speculative decoding in plain Python, to be read before everything else; tests compare the rest with it.

A language model gives each token that may come next a probability. A large model, the target, takes about as long for
one token as for ten that it is shown at once. So a small model, the draft, guesses what follows, and the target checks
all guesses in one pass. The output is what the target alone would have written, in fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.noise import Purpose, gumbel

Text: TypeAlias = tuple[int, ...]
"""Tokens, as numbers."""
Model: TypeAlias = Callable[[Text], NDArray[np.float32]]
"""text -> log probability of each token that may follow."""
Sampler: TypeAlias = Callable[[Text], int]
"""text -> the token that follows; the same whenever it is asked."""
Tree: TypeAlias = dict[int, "Tree"]
"""Guesses: the tokens that may come next, and below each the tokens that may come after it."""


def ranked(model: Model, seed: int, text: Text) -> list[int]:
    """All tokens by log p + Gumbel noise, the largest first: the first is x with probability p(x)."""
    log_p = model(text)
    noise = gumbel(seed, len(text), 0, Purpose.SHARED, len(log_p))
    return [*map(int, np.argsort(-(log_p + noise), kind="stable"))]


def coupled(model: Model, seed: int) -> Sampler:
    """Sample by noise that depends on seed and position alone.

    Two models with similar probabilities and the same noise mostly choose the same token: so the draft guesses well
    even at high temperatures. And the target's choice does not depend on what was guessed.
    """
    return lambda text: ranked(model, seed, text)[0]


def decode(target: Sampler, prompt: Text, num_tokens: int) -> Text:
    """Decode without guesses, one pass of the target for each token. `speculate` returns the same."""
    text = prompt
    for _ in range(num_tokens):
        text = (*text, target(text))
    return text[len(prompt) :]


def draft(guess: Callable[[Text], list[int]], text: Text, depth: int, tree: Tree) -> Tree:
    """`tree` and more: what the draft guesses after `text` and after each of its own guesses, `depth` tokens ahead."""
    if depth == 0:
        return tree
    tokens = dict.fromkeys([*tree, *guess(text)])
    return {token: draft(guess, (*text, token), depth - 1, tree.get(token, {})) for token in tokens}


def verify(target: Sampler, text: Text, block: Tree) -> tuple[Text, int]:
    """The guesses that the target would have sampled itself, and the token that it samples after them.

    A real target computes what follows every guess of the block in one pass, and takes this walk afterwards.
    """
    accepted: Text = ()
    while (token := target((*text, *accepted))) in block:
        accepted, block = (*accepted, token), block[token]
    return accepted, token


def commit(text: Text, accepted: Text, token: int) -> Text:
    """The text after a round: at least one token longer, even where no guess was right."""
    return (*text, *accepted, token)


def re_root(tree: Tree, tokens: Text) -> Tree:
    """The guesses below the tokens that were committed: they still hold, those elsewhere in the tree do not."""
    for token in tokens:
        tree = tree.get(token, {})
    return tree


def speculate(target: Sampler, guess: Callable[[Text], list[int]], prompt: Text, num_tokens: int, depth: int) -> Text:
    """Decode by rounds. Each verifies what was drafted before it; for the next one, the draft goes on meanwhile."""
    text, tree = prompt, dict[int, Tree]()
    while len(text) < len(prompt) + num_tokens:
        block = tree
        tree = draft(guess, text, 2 * depth, tree)  # on another machine, while the next line runs
        accepted, token = verify(target, text, block)
        text = commit(text, accepted, token)
        tree = re_root(tree, (*accepted, token))
    return text[len(prompt) :][:num_tokens]
