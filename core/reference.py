"""Speculative decoding in plain Python. Read this file first; tests use it as the oracle.

A language model gives each possible next token a probability. A large model, the target, needs about as long to score
ten given tokens in one pass as to score one. A small model, the draft, therefore guesses the next tokens, and the
target checks all guesses in one pass. The output is the same as that of the target alone, in fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.noise import Purpose, gumbel

Text: TypeAlias = tuple[int, ...]
"""Token ids."""
Model: TypeAlias = Callable[[Text], NDArray[np.float32]]
"""text -> log probability of each possible next token."""
Sampler: TypeAlias = Callable[[Text], int]
"""text -> next token. Deterministic: the same text always gives the same token."""
Tree: TypeAlias = dict[int, "Tree"]
"""Guesses: each possible next token, mapped to the tree of tokens that may follow it."""


def ranked(model: Model, seed: int, text: Text) -> list[int]:
    """Rank all tokens by log p + Gumbel noise, largest first. The first is x with probability p(x)."""
    log_p = model(text)
    noise = gumbel(seed, len(text), 0, Purpose.SHARED, len(log_p))
    return [*map(int, np.argsort(-(log_p + noise), kind="stable"))]


def coupled(model: Model, seed: int) -> Sampler:
    """Sample with noise that depends only on seed and position.

    Two models with similar probabilities and the same noise mostly choose the same token, so the draft guesses well
    even at high temperatures. The target's choice does not depend on the guesses.
    """
    return lambda text: ranked(model, seed, text)[0]


def decode(target: Sampler, prompt: Text, num_tokens: int) -> Text:
    """Decode without guesses, one target pass per token. `speculate` returns the same tokens."""
    text = prompt
    for _ in range(num_tokens):
        text = (*text, target(text))
    return text[len(prompt) :]


def draft(guess: Callable[[Text], list[int]], text: Text, depth: int, tree: Tree) -> Tree:
    """Extend `tree` with the draft's guesses after `text` and after each of its own guesses, `depth` tokens ahead."""
    if depth == 0:
        return tree
    tokens = dict.fromkeys([*tree, *guess(text)])
    return {token: draft(guess, (*text, token), depth - 1, tree.get(token, {})) for token in tokens}


def verify(target: Sampler, text: Text, block: Tree) -> tuple[Text, int]:
    """Return the guesses that the target would have sampled itself, and the token that it samples after them.

    A real target computes the successors of all guesses in one pass, then does this walk.
    """
    accepted: Text = ()
    while (token := target((*text, *accepted))) in block:
        accepted, block = (*accepted, token), block[token]
    return accepted, token


def commit(text: Text, accepted: Text, token: int) -> Text:
    """Return the text after a round: at least one token longer, even if no guess was right."""
    return (*text, *accepted, token)


def re_root(tree: Tree, tokens: Text) -> Tree:
    """Return the guesses below the committed tokens. They are still valid; all other branches are not."""
    for token in tokens:
        tree = tree.get(token, {})
    return tree


def speculate(target: Sampler, guess: Callable[[Text], list[int]], prompt: Text, num_tokens: int, depth: int) -> Text:
    """Decode in rounds. Each round verifies the guesses drafted before it, while the draft works on the next ones."""
    text, tree = prompt, dict[int, Tree]()
    while len(text) < len(prompt) + num_tokens:
        block = tree
        tree = draft(guess, text, 2 * depth, tree)  # on another machine, while the next line runs
        accepted, token = verify(target, text, block)
        text = commit(text, accepted, token)
        tree = re_root(tree, (*accepted, token))
    return text[len(prompt) :][:num_tokens]
