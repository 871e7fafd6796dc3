"""Acceptance worked out by hand, at the edges, and for corrupt blocks. Laws are tested in test_distribution.py."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.reference import verify
from core.rules import Outcome
from core.rules import chains as acceptance
from core.rules.chains import valid_prefix, verify_block, verify_rejection
from core.rules.coupled import verify_coupled
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree
from tests.core.rules.decoding import VOCAB_SIZE, Decoder, NoiseTable, dirichlet
from tests.core.toys import nodes_of, tree_of

CHAIN_RULES = [verify_rejection, verify_block]
EVEN = SparseDistribution((0, 1, 2, 3), (0.25,) * 4)
P = np.full((4, 4), 0.25)
CORRUPT = {
    "token outside the vocabulary": (9, SparseDistribution((9,), (1.0,))),
    "negative token": (-1, SparseDistribution((-1, 1), (0.5, 0.5))),
    "token that q does not list": (3, SparseDistribution((0, 1), (0.5, 0.5))),
    "token of probability zero": (3, SparseDistribution((0, 3), (1.0, 0.0))),
    "another id outside the vocabulary": (1, SparseDistribution((1, 4), (0.5, 0.5))),
    "an id twice": (1, SparseDistribution((1, 1), (0.5, 0.5))),
    "unequal lengths": (1, SparseDistribution((0, 1), (1.0,))),
    "mass above one": (1, SparseDistribution((0, 1), (1.0, 1.0))),
    "negative mass": (1, SparseDistribution((0, 1), (-0.5, 1.5))),
    "NaN": (1, SparseDistribution((0, 1), (math.nan, 0.5))),
    "infinite": (1, SparseDistribution((0, 1), (math.inf, 0.5))),
    "nothing": (1, SparseDistribution((), ())),
}


def set_uniforms(monkeypatch, *values):
    monkeypatch.setattr(acceptance.noise, "uniform", lambda seed, position, row, purpose: values[row])


def test_coupled_follows_matching_children_and_stops_at_the_correction():
    #        root -> 0: 5, 1: 7;  1 -> 2: 5, 3: 8;  3 -> 4: 1
    tree = TokenTree((5, 7, 5, 8, 1), (ROOT, ROOT, 1, 1, 3))
    assert verify_coupled(tree, [7, 0, 8, 0, 2, 0])[:2] == ((1, 3), 2)
    assert verify_coupled(tree, [7, 0, 8, 0, 1, 6])[:2] == ((1, 3, 4), 6)
    assert verify_coupled(tree, [9, 0, 0, 0, 0, 0])[:2] == ((), 9)
    assert verify_coupled(TokenTree(), [4])[:2] == ((), 4)


@st.composite
def trees(draw):
    """Random blocks over few tokens, so that siblings repeat and deep matches occur; ids may be corrupt."""
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 12))))
    return TokenTree(tuple(draw(st.sampled_from([0, 1, 2, -5, 10**9])) for _ in parents), parents)


@settings(deadline=None)
@given(tree=trees(), key=st.integers(0, 10**6))
def test_coupled_emits_the_targets_own_sequence_whatever_the_tree(tree, key):
    """The target's sample is a function of its context; the block only decides how much of it is emitted at once."""

    def target(context):
        return hash((key, context)) % 3

    contexts = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        contexts.append((*contexts[parent + 1], token))
    accepted, token = verify(target, (), tree_of(tree))
    assert verify_coupled(tree, [target(context) for context in contexts])[:2] == (nodes_of(tree, accepted), token)


def test_rejection_stops_at_the_first_guess_that_fails(monkeypatch):
    q = SparseDistribution((0, 1), (0.5, 0.5))
    p = np.array([[0.2, 0.8], [0.2, 0.8], [0.5, 0.5]])
    block = TokenTree.chain([0, 0], [q, q])
    set_uniforms(monkeypatch, 0.39, 0.39)  # p / q = 0.4
    assert verify_rejection(block, p, 0, 3)[0] == (0, 1)
    set_uniforms(monkeypatch, 0.41, 0.39)
    assert verify_rejection(block, p, 0, 3) == Outcome((), 1)  # the residual is all on token 1


def test_block_verification_accepts_past_a_failing_prefix(monkeypatch):
    """Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3)."""
    q = SparseDistribution((0, 1), (2 / 3, 1 / 3))
    p = np.array([[1 / 3, 2 / 3]] * 3)
    # Guesses 0, 1: weights 1, 1/2, min(1/2 * 2, 1) = 1, so the whole block stands whatever the draws are.
    set_uniforms(monkeypatch, 0.999, 0.999)
    assert verify_block(TokenTree.chain([0, 1], [q, q]), p, 0, 3)[0] == (0, 1)
    # Guesses 0, 0: weights 1, 1/2, 1/4; h_1 = m / (m + 1/2), m = (1/6 - 2/3)+ + (1/3 - 1/3)+ = 0.
    set_uniforms(monkeypatch, 0.001, 0.26)
    assert verify_block(TokenTree.chain([0, 0], [q, q]), p, 0, 3) == Outcome((), 1)
    set_uniforms(monkeypatch, 0.999, 0.24)
    assert verify_block(TokenTree.chain([0, 0], [q, q]), p, 0, 3)[0] == (0, 1)


@pytest.mark.parametrize("verify", CHAIN_RULES)
def test_identical_laws_accept_everything(verify):
    for seed in range(200):
        assert verify(TokenTree.chain([1, 3, 0], [EVEN] * 3), P, seed, 9)[0] == (0, 1, 2)


@pytest.mark.parametrize("verify", CHAIN_RULES)
def test_without_guesses_the_token_is_the_targets(verify):
    assert verify(TokenTree(), np.array([[0, 0, 1.0, 0]]), 5, 9) == Outcome((), 2)


@pytest.mark.parametrize("verify", CHAIN_RULES)
def test_trees_are_refused(verify):
    tree = TokenTree((1, 2), (ROOT, ROOT), (EVEN, EVEN))
    with pytest.raises(ValueError, match="chains only"):
        verify(tree, P[:3], 0, 3)


@pytest.mark.parametrize("kind", CORRUPT)
@pytest.mark.parametrize("verify", CHAIN_RULES)
def test_a_corrupt_guess_ends_the_block_before_it(verify, kind):
    token, q = CORRUPT[kind]
    for seed in range(50):
        cut = verify(TokenTree.chain([1], [EVEN]), P[:2], seed, 9)
        assert verify(TokenTree.chain([1, token, 2], [EVEN, q, EVEN]), P, seed, 9) == cut


@pytest.mark.parametrize("verify", CHAIN_RULES)
def test_guesses_without_q_are_not_looked_at(verify):
    assert verify(TokenTree.chain([1, 2]), P[:3], 4, 9) == verify(TokenTree(), P[:1], 4, 9)


def test_honest_drafts_are_never_cut():
    decoder = Decoder(dirichlet(1), dirichlet(2), gamma=3, noise=NoiseTable(2000))
    for seed in range(2000):
        block = decoder.chain(seed, 1, seed % VOCAB_SIZE)
        assert valid_prefix(block, VOCAB_SIZE) is block


@pytest.mark.thorough
@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(data=st.data())
def test_nothing_impossible_is_emitted(data):
    """Every emitted token has p > 0, also where p and q are one-hot, disjoint or equal."""
    weights = st.sampled_from([0.0, 0.0, 1.0, 1e-9, 0.5])
    laws = st.lists(weights, min_size=4, max_size=4).filter(any).map(lambda w: np.array(w) / sum(w))
    length = data.draw(st.integers(0, 3))
    p = np.stack([data.draw(laws) for _ in range(length + 1)])
    q = [SparseDistribution((0, 1, 2, 3), tuple(data.draw(laws).tolist())) for _ in range(length)]
    tokens = [data.draw(st.sampled_from([t for t in range(4) if row.probs[t] > 0])) for row in q]
    verify = data.draw(st.sampled_from(CHAIN_RULES))
    path, next_token, *_ = verify(TokenTree.chain(tokens, q), p, data.draw(st.integers(0, 2**64 - 1)), 7)
    emitted = [*(tokens[node] for node in path), next_token]
    assert path == tuple(range(len(path)))
    assert all(p[row, token] > 0 for row, token in enumerate(emitted))
