"""Records refuse what no part of the system may see, and trees answer as their definition says."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import Adapter, Base, DraftRequest, Sampling, SequenceSpec, SpeculationStats, Stamp, VerifyRequest
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, SparseDistribution, TokenTree


@st.composite
def trees(draw):
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 8)))]
    return TokenTree(tuple(draw(st.integers(0, 3)) for _ in parents), tuple(parents))


def test_what_sampling_says_of_itself():
    assert Sampling(temperature=0).is_greedy
    assert not Sampling().is_greedy
    assert not Sampling().has_penalties
    for name, value in [("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)]:
        assert Sampling(**{name: value}).has_penalties


def test_a_bad_word_is_completed_by_its_last_id_after_its_others_in_the_output():
    sampling = Sampling(bad_words=((7,), (1, 2, 3), (2, 4)))
    assert sampling.bad_after([9, 1, 2], 1) == [7, 3, 4]
    assert sampling.bad_after([9, 1, 2], 2) == [7, 4], "1 belongs to the prompt"
    assert sampling.bad_after([1, 2], 2) == sampling.bad_after([], 5) == [7]
    assert sampling.bad_after([9, 1, 5, 2], 1) == [7, 4]
    assert sampling.reads_tokens
    assert not Sampling(bad_words=((7,),), allowed_token_ids=(1,)).reads_tokens
    assert Sampling(presence_penalty=1.0).reads_tokens


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


def test_a_draft_guesses_for_an_adapter_without_it():
    spec = SequenceSpec(3, Sampling(temperature=0.5), adapter=Adapter("a", "/a", "sha256:1"))
    for temperature in (None, 2.0):
        assert spec.of_draft(temperature).adapter is None
    assert replace(spec, sampling=Sampling(temperature=0.0)).of_draft(2.0).adapter is None


def test_records_survive_the_wire():
    block = TokenTree.chain([1], [SparseDistribution((1, 2), (0.5, 0.5))])
    request = VerifyRequest(Stamp("s", 1, 2), Base(5, 99), (1, 2), block)
    assert pickle.loads(pickle.dumps(request)) == request
