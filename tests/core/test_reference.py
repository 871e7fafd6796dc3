"""The reference decodes as the target alone does, and the rules of verification decide as the reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.reference import commit, coupled, decode, draft, ranked, re_root, speculate, verify
from core.rules import Verification
from core.speculation.token_tree import ROOT, TokenTree
from tests.core.toys import Toy, nodes_of, tree_of

SEEDS = st.integers(0, 2**64 - 1)
UNLIKENESS = st.sampled_from([0.0, 0.5, 1e9])
"""How a draft differs from its target: not at all, a little, in everything."""


@st.composite
def toys(draw):
    """A target and a draft."""
    target = Toy(draw(st.integers(0, 2**32)), draw(st.integers(2, 6)))
    return target, target.unlike(draw(UNLIKENESS))


@settings(deadline=None)
@given(toys(), SEEDS, st.integers(0, 2), st.integers(0, 3))
def test_guesses_change_no_token(pair, seed, width, depth):
    target, guesser = pair
    sample = coupled(target, seed)
    expected = decode(sample, (1, 0), 12)
    assert speculate(sample, lambda text: ranked(guesser, seed, text)[:width], (1, 0), 12, depth) == expected


def test_a_draft_that_is_the_target_is_always_right_by_the_same_noise_alone():
    toy, text = Toy(1, 5), (1, 0)
    sample = coupled(toy, 7)
    for seed, num_accepted in ((7, 4), (8, 0)):
        block = draft(lambda text, seed=seed: ranked(toy, seed, text)[:1], text, 4, {})
        accepted, token = verify(sample, text, block)
        assert len(accepted) == num_accepted
        assert commit(text, accepted, token) == (*text, *decode(sample, text, num_accepted + 1))


def test_re_rooting_keeps_what_hangs_below_the_committed_tokens():
    tree = {5: {7: {8: {}}}, 6: {}}
    assert re_root(tree, (5,)) == {7: {8: {}}}
    assert re_root(tree, (5, 7)) == {8: {}}
    assert re_root(tree, (5, 9)) == re_root(tree, (6, 1, 2)) == {}
    assert draft(lambda text: [text[-1] + 1], (5,), 2, {6: {0: {}}}) == {6: {0: {}, 7: {}}}, "what was there stays"


@st.composite
def blocks(draw, num_tokens):
    """Few tokens, so that siblings repeat and deep matches occur."""
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 10))))
    return TokenTree(tuple(draw(st.integers(0, num_tokens - 1)) for _ in parents), parents)


@settings(deadline=None)
@given(st.data(), st.integers(0, 2**32), SEEDS, st.lists(st.integers(0, 2), max_size=5), st.booleans())
def test_coupled_and_greedy_verification_decide_as_the_reference(data, key, seed, text, is_greedy):
    toy, block, text = Toy(key, 3), data.draw(blocks(3)), tuple(text)
    texts = [text]
    for token, parent in zip(block.tokens, block.parents, strict=True):
        texts.append((*texts[parent + 1], token))
    sample = (lambda text: int(toy(text).argmax())) if is_greedy else coupled(toy, seed)
    accepted, token = verify(sample, text, tree_of(block))
    log_p = np.array([toy(text) for text in texts], dtype=np.float64)
    outcome = Verification.COUPLED.at(is_greedy=is_greedy).decide(block, log_p, seed, len(text), 0.0)
    assert outcome[:2] == (nodes_of(block, accepted), token)
