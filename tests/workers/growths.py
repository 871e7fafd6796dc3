"""Random trees, growths and tables, and what a draft that remembers nothing says to the same request."""

from __future__ import annotations

from dataclasses import replace

from driving import EPOCH, answer
from hypothesis import strategies as st

from core.records import Drafted, DraftRequest, Stamp
from core.token_log import TokenLog
from core.trees import ROOT, Growth, TokenTree
from tests.checkpoints import VOCAB_SIZE

TOKENS = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def trees(draw, max_size=6):
    """Any tree in which no node has the same guess below it twice."""
    tokens, parents = [], []
    for node in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(ROOT, node - 1)), draw(TOKENS)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
        else:
            tokens.append(token)
            parents.append(node - 1)
    return TokenTree(tuple(tokens), tuple(parents))


@st.composite
def growths(draw, num_block=0, max_size=10, max_rank=3):
    """Any growth below a block of so many nodes; the ranks below a node begin anywhere."""
    parents, ranks, used = [], [], {}
    for index in range(draw(st.integers(1, max_size))):
        parent = draw(st.integers(ROOT, num_block + index - 1))
        used[parent] = used.get(parent, -1) + draw(st.integers(1, max_rank))
        parents.append(parent)
        ranks.append(used[parent])
    return Growth(tuple(parents), tuple(ranks))


def below(growth, num_block, top):
    """What of a growth is below its node `top` (in the request's numbers), as a block of its own; and its nodes."""
    kept, nodes = {top: ROOT}, []
    for index, parent in enumerate(growth.parents):
        if parent in kept:
            kept[num_block + index] = len(nodes)
            nodes.append(index)
    parents = tuple(kept[growth.parents[index]] for index in nodes)
    return Growth(parents, tuple(growth.ranks[index] for index in nodes)), nodes


def fresh_reply(engine, spec, committed, request):
    """What a session that begins with this very request is answered."""
    log = TokenLog(committed)
    asked = DraftRequest(
        Stamp("fresh", EPOCH, 1), log.base(0), tuple(committed), request.growth, request.block, request.is_table,
        spec=spec,
    )  # fmt: skip
    reply = answer(engine, asked, ticket=10**6)
    engine._store.drop("fresh")
    return reply


def assert_same_reply(got, want):
    """Equal in all but stamp and timing."""
    assert isinstance(got, Drafted)
    assert isinstance(want, Drafted)
    assert replace(got, stamp=want.stamp, timing=None) == replace(want, timing=None)
