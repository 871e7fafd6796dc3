"""Random growth that ends by itself, and what a draft that remembers nothing says to the same request."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from core.records import DraftRequest, Stamp
from core.speculation.growth import Measure, TreeSpec
from core.speculation.token_tree import ROOT
from core.text.token_log import TokenLog
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, answer, has_grown

TOKENS = st.integers(0, VOCAB_SIZE - 1)
CHANCES = {"calibration": (0.0, 0.0), "tail": (0.12,) * 7}

growths = st.builds(
    TreeSpec,
    rows_per_pass=st.integers(1, 4),
    max_depth=st.integers(1, 5),
    min_path_prob=st.sampled_from([0.0, 0.05, 0.5]),
    calibration=st.sampled_from([(0.5, 1.0), (3.0, 0.0)]),
    tail=st.sampled_from([(0.4, 0.2, 0.1), ()]),
    num_passes=st.integers(1, 4),
    fanout=st.integers(1, 4),
    measure=st.sampled_from(Measure),
    min_confidence=st.sampled_from([0.0, 0.02]),
    reports_all=st.just(True),
)
"""Any growth of which all is told."""


def allowed(growth, spec):
    """The same growth, where the draft may choose; a chain of as many draws where it must not."""
    return replace(TreeSpec.chain(growth.num_passes, growth.measure), reports_all=True) if spec.needs_q else growth


def wide(num_rows=8, num_passes=3):
    """So many nodes a pass, wherever they hang."""
    return TreeSpec(num_rows, num_passes, calibration=(0.0, 0.0), tail=(0.05,) * 7, num_passes=num_passes)


def fresh_reply(engine, spec, committed, growth):
    """The reply to a session that begins with this very request."""
    log = TokenLog(committed)
    asked = DraftRequest(Stamp("fresh", EPOCH, 1), log.base(0), tuple(committed), growth, spec)
    reply = answer(engine, asked)
    assert has_grown(reply)
    engine._store.drop("fresh")
    return reply


def fresh_candidates(engine, spec, committed, growth):
    """After this text: the tokens that the draft says, likeliest first, and how sure it is there."""
    alone = replace(growth, rows_per_pass=1, max_depth=1, num_passes=1, fanout=8, min_confidence=0.0, **CHANCES)
    new_nodes = fresh_reply(engine, spec, committed, alone).new_nodes
    return new_nodes.tokens.tolist(), float(new_nodes.confidences[0])


def places_of(new_nodes, text=()):
    """Newly reported nodes of a tree: after each text the tokens by their ranks, and the draft's confidence there."""
    texts, found = [], {}
    columns = (new_nodes.parents, new_nodes.tokens, new_nodes.ranks, new_nodes.confidences)
    for parent, token, rank, margin in zip(*(column.tolist() for column in columns), strict=True):
        above = tuple(text) if parent == ROOT else texts[parent]
        texts.append((*above, token))
        found.setdefault(above, ({}, margin))[0][rank] = token
    return found
