"""A draft that samples grows a chain of its draws for one block, and tells of each what it was drawn from."""

from __future__ import annotations

import pytest
from driving import EPOCH, Driver, answer

from core.config import EngineConfig
from core.records import Drafted, GrownTree, Sampling, Verification
from core.trees import Growth, Steady
from tests.checkpoints import write
from workers.draft import DraftEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
CHAIN = Steady(1, 5, num_passes=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def engine(checkpoint):
    return DraftEngine.load(EngineConfig(checkpoint, block_tokens=4, deterministic=True), EPOCH, 16, lambda _: None)


def drawn(engine, sampling, verification, growth, prompt=PROMPT, session="s"):
    driver = Driver(engine, prompt, sampling, verification, session=session)
    return answer(engine, driver.draft_request(growth))


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED])
def test_a_chain_of_draws_is_what_a_block_was(engine, sampling, verification):
    grown = drawn(engine, sampling, verification, CHAIN, session="a")
    asked = drawn(engine, sampling, verification, Growth.chain(5), session="b")
    assert isinstance(grown, GrownTree)
    assert isinstance(asked, Drafted)
    assert tuple(grown.told.tokens.tolist()) == asked.tokens
    assert grown.told.parents.tolist() == [-1, 0, 1, 2, 3]
    assert grown.told.q == asked.q
