"""A session between toy models writes what `core.reference` says, whatever becomes of its messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import reference
from core.records import Sampling
from core.rules import Verification
from core.speculation.candidates import Candidates
from core.speculation.token_tree import ROOT
from tests.core.toys import Toy
from tests.orchestrator.fakes import VOCAB_SIZE, FakeDraftEngine, FakeTargetEngine, FakeTokenizer, request
from tests.orchestrator.world import FaultyWorld, unlimited

PROMPT, NUM_TOKENS = (3, 1, 4), 12


class Model(Toy):
    """Never ends an output: token 0 would."""

    def __call__(self, text):
        log_p = super().__call__(text)
        log_p[0] = -np.inf
        return log_p


def engines(target, draft, seed, is_greedy):
    """Classes of a target that decides by the rule that engines use, and of a draft that samples with its noise."""
    rule = Verification.COUPLED.at(is_greedy=is_greedy)

    class Target(FakeTargetEngine):
        def decide(self, text, block):
            texts = [text]
            for token, parent in zip(block.tokens, block.parents, strict=True):
                texts.append((*texts[parent - ROOT], token))
            log_p = np.array([target(each) for each in texts], dtype=np.float64)
            return rule.decide(block, log_p, seed, len(text), 0.0)[:2]

    class Draft(FakeDraftEngine):
        def says_after(self, tokens, *, is_sampled):
            assert not is_sampled
            return Candidates(tuple(reference.ranked(draft, seed, tuple(tokens))[:4]), 0.9)

    return Target, Draft


@pytest.mark.parametrize("is_greedy", [False, True], ids=["coupled", "greedy"])
@settings(deadline=None, max_examples=settings.default.max_examples * 2 // 5)
@given(st.integers(0, 2**32), st.integers(0, 2**64 - 1), st.sampled_from([0.0, 0.3, 1e9]), st.integers(0, 2**32))
def test_a_session_writes_what_the_reference_says(is_greedy, key, seed, unlikeness, fault_seed):
    target = Model(key, VOCAB_SIZE)
    sample = (lambda text: int(target(text).argmax())) if is_greedy else reference.coupled(target, seed)
    asked = request(PROMPT, NUM_TOKENS, sampling=Sampling(temperature=0.0 if is_greedy else 1.0, seed=seed))
    world = FaultyWorld(fault_seed, asked, FakeTokenizer(), limits=unlimited())
    for name, kind in zip(
        ("target", "draft"), engines(target, target.unlike(unlikeness), seed, is_greedy), strict=True
    ):
        setattr(world, name, kind())
    world.start().run()
    assert tuple(world.tokens) == reference.decode(sample, PROMPT, NUM_TOKENS)
