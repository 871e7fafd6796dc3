"""Tables: where a verdict leads, what is cut, and what is too corrupt to be used."""

from __future__ import annotations

import pytest

from core.records import Base, Drafted, DraftRequest, Sampling, SequenceSpec, Stamp
from core.trees import NO_Q, NO_TOKEN, ROOT, Growth, SparseDistribution, TokenTree
from orchestrator.guess import NO_GUESS, looked_up, read_block, read_table

STAMP = Stamp("s", 1, 1)
BLOCK = TokenTree.chain([10, 11])
#  root - 10 - 11;  outcomes: 20 at the root, 21 and 22 after 10, 23 after 11; below 20: 30, 31; below 21: 32
TABLE = Growth(parents=(ROOT, 0, 0, 1, 2, 6, 3), ranks=(0, 0, 1, 0, 0, 0, 0))
TOKENS = (20, 21, 22, 23, 30, 31, 32)


def ask(growth=TABLE, block=BLOCK):
    spec = SequenceSpec(3, Sampling())
    return DraftRequest(STAMP, Base(0, 0), (1, 2, 3), growth, block, is_table=bool(len(block)), spec=spec)


def table(tokens=TOKENS, **changes):
    return read_table(ask(), Drafted(STAMP, tokens, 3, **{"q": (NO_Q,) * 7, **changes}), 50)


@pytest.mark.parametrize(
    ("end", "token", "block", "rank", "num_listed"),
    [
        (ROOT, 20, (30, 31), 0, 1),
        (0, 21, (32,), 0, 2),
        (0, 22, (), 1, 2),
        (1, 23, (), 0, 1),
        (0, 20, (), None, 2),
        (ROOT, 10, (), None, 1),
        (1, 49, (), None, 1),
    ],
)
def test_a_verdict_is_a_walk_down_the_table(end, token, block, rank, num_listed):
    followed = table().follow(end, token)
    assert followed.guess.block.tokens == block
    assert (followed.rank, followed.num_listed) == (rank, num_listed)


def test_what_is_found_is_a_block_of_its_own_with_its_shape():
    followed = table(confidence=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), entropy=(1.0,) * 7).follow(ROOT, 20)
    assert followed.guess.block.parents == followed.guess.shape.parents == (ROOT, 0)
    assert followed.guess.shape.confidence == (0.5, 0.6)


def test_outcomes_carry_no_q_and_what_is_below_them_does():
    q = SparseDistribution((30, 31, 32), (0.5, 0.25, 0.25))
    found = table(q=(NO_Q, NO_Q, NO_Q, NO_Q, q, q, q)).follow(ROOT, 20)
    assert found.guess.block.q == (q, q)


def test_nodes_that_were_not_grown_are_not_there():
    read = table((20, NO_TOKEN, 22, 23, NO_TOKEN, NO_TOKEN, NO_TOKEN))
    assert read.follow(0, 22).rank == 0
    assert read.follow(0, 21).guess == NO_GUESS
    assert len(read.follow(ROOT, 20).guess) == 0
    assert len(read) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": TOKENS[:-1]},
        {"tokens": (*TOKENS, 1)},
        {"q": ()},
        {"tokens": (50, *TOKENS[1:])},
        {"tokens": (3.5, *TOKENS[1:])},
        {"tokens": (-2, *TOKENS[1:])},
        {"tokens": (NO_TOKEN, *TOKENS[1:])},
        {"tokens": (10, *TOKENS[1:])},
        {"tokens": (20, 21, 21, *TOKENS[3:])},
        {"confidence": (0.5,)},
        {"confidence": (float("nan"),) * 7},
        {"entropy": (-0.1,) * 7},
    ],
)
def test_a_corrupt_answer_is_refused(changes):
    with pytest.raises(ValueError, match=r"draft|tree"):
        table(**{"tokens": TOKENS, **changes})


def unchecked(parents, ranks):
    """A growth as it may come over a wire: unpickling checks nothing."""
    growth = object.__new__(Growth)
    object.__setattr__(growth, "parents", parents)
    object.__setattr__(growth, "ranks", ranks)
    return growth


def test_a_q_that_is_no_law_is_refused():
    for q in (SparseDistribution((1, 2), (0.5,)), SparseDistribution((1,), (float("nan"),))):
        with pytest.raises(ValueError, match="no law"):
            read_block(ask(Growth.chain(1), TokenTree()), Drafted(STAMP, (1,), 3, q=(q,)), 50)


def test_a_block_is_cut_by_count():
    guess = looked_up([4, 5, 6])
    assert guess.prefix(2) == looked_up([4, 5])
    assert guess.prefix(9) is guess


def test_a_looked_up_chain_is_sure_of_itself():
    guess = looked_up([4, 5])
    assert guess.block.is_chain
    assert guess.block.q == (SparseDistribution((4,), (1.0,)), SparseDistribution((5,), (1.0,)))
    assert looked_up([]).block == TokenTree()
