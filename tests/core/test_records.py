"""Records refuse what no part of the system may see, and trees answer as their definition says."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.records import MAX_SEED, Base, DraftRequest, Sampling, SpeculationStats, Stamp, VerifyRequest
from core.trees import EMPTY_BLOCK, ROOT, SparseDistribution, TokenTree

OUT_OF_RANGE = [
    ("temperature", -1.0),
    ("temperature", 1e-4),
    ("temperature", 101.0),
    ("temperature", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", math.inf),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 11.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("min_tokens", -1),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
]
IN_RANGE = [
    ("temperature", 0.0),
    ("temperature", 1e-3),
    ("temperature", 100.0),
    ("top_k", 0),
    ("top_p", 1e-9),
    ("min_p", 1.0),
    ("repetition_penalty", 10.0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("seed", MAX_SEED),
    ("logit_bias", ((7, -100.0), (8, 100.0))),
]


@st.composite
def trees(draw):
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 8)))]
    return TokenTree(tuple(draw(st.integers(0, 3)) for _ in parents), tuple(parents))


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_sampling_refuses_values_out_of_range_and_names_the_field(name, value):
    with pytest.raises(InvalidRequest) as error:
        replace(Sampling(), **{name: value})
    assert error.value.field == name


@pytest.mark.parametrize(("name", "value"), IN_RANGE)
def test_sampling_takes_the_ends_of_its_ranges(name, value):
    assert getattr(replace(Sampling(), **{name: value}), name) == value


@pytest.mark.parametrize("bias", [-100.5, 100.5, math.nan, math.inf])
def test_a_wrong_bias_names_its_token(bias):
    with pytest.raises(InvalidRequest, match=r"logit_bias\[7\]"):
        Sampling(logit_bias=((7, bias),))


def test_what_sampling_says_of_itself():
    assert Sampling(temperature=0).is_greedy
    assert not Sampling().is_greedy
    assert not Sampling().has_penalties
    for name, value in [("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)]:
        assert Sampling(**{name: value}).has_penalties


@settings(deadline=None)
@given(tree=trees(), token=st.integers(0, 3))
def test_trees_answer_as_their_definition_says(tree, token):
    for node, parent in enumerate(tree.parents):
        assert tree.depths[node] == 1 + (0 if parent == ROOT else tree.depths[parent])
    for parent in range(ROOT, len(tree)):
        children = [n for n, p in enumerate(tree.parents) if p == parent and tree.tokens[n] == token]
        assert tree.child(parent, token) == (children[0] if children else None)
    assert tree.is_chain == (tree.depths == tuple(range(1, len(tree) + 1)))
    assert tree.is_chain == (tree == TokenTree.chain(tree.tokens))


@pytest.mark.parametrize(
    ("tokens", "parents", "num_q"),
    [((1,), (0,), 0), ((1, 2), (-1, 1), 0), ((1,), (-2,), 0), ((1, 2), (-1,), 0), ((1, 2), (-1, 0), 1)],
)
def test_ill_formed_trees_are_refused(tokens, parents, num_q):
    with pytest.raises(ValueError, match="token tree"):
        TokenTree(tokens, parents, (SparseDistribution((1,), (1.0,)),) * num_q)


def test_num_committed_counts_base_and_suffix():
    stamp, base = Stamp("s", 1, 2), Base(5, 99)
    assert VerifyRequest(stamp, base, (1, 2)).num_committed == 7
    assert DraftRequest(stamp, base, (1,), 4).num_committed == 6
    assert VerifyRequest(stamp, base, (1,)).block is EMPTY_BLOCK


def test_acceptance_rate_of_nothing_is_zero():
    assert SpeculationStats().acceptance_rate == 0
    assert SpeculationStats(num_drafted_tokens=4, num_accepted_tokens=3).acceptance_rate == 0.75


def test_records_survive_the_wire():
    block = TokenTree.chain([1], [SparseDistribution((1, 2), (0.5, 0.5))])
    request = VerifyRequest(Stamp("s", 1, 2), Base(5, 99), (1, 2), block)
    assert pickle.loads(pickle.dumps(request)) == request
