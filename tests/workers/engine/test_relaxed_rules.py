"""Relaxed rules in a real engine: what stands, what it is told as, and that nothing else of the sequence is bent."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from core.config import EngineConfig
from core.records import Sampling, Verification
from core.speculation.token_tree import SparseDistribution
from tests.checkpoints import VOCAB_SIZE, write
from tests.workers.engine.driving import EPOCH, Driver, answer_all, chain
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)
NUMBERS = count()
"""An engine does not take up a session again that has ended."""
ALWAYS = 1e-30
"""A lenience by which every token stands that p allows."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    checkpoint = str(write("llama", tmp_path_factory.mktemp("llama")))
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512)
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.fixture
def drive(engine):
    """Makes sessions, and ends them."""
    names = []

    def begin(sampling, verification=Verification.COUPLED, lenience=1.0, prompt=PROMPT, num_logprobs=None):
        names.append(f"s{next(NUMBERS)}")
        driver = Driver(engine, prompt, sampling, verification, names[-1], num_logprobs)
        driver.spec = replace(driver.spec, lenience=lenience)
        return driver

    yield begin
    engine.release(names)


def test_greedily_p_is_that_of_temperature_1_and_not_one_hot(drive):
    """The second best stands if it is likelier than lenience times the best; of a one-hot p it never would."""
    verdict = drive(GREEDY, num_logprobs=2).verify()
    (best, most), (second, less) = verdict.logprobs[0].top
    ratio = 2.718281828 ** (less - most)
    for lenience, is_accepted in ((0.9 * ratio, True), (min(1.0, 1.1 * ratio), False)):
        verdict = drive(GREEDY, Verification.LENIENT_COUPLED, lenience).verify(chain(second))
        assert (verdict.path, verdict.num_relaxed) == (((0,), 1) if is_accepted else ((), 0))
        assert is_accepted or verdict.next_token == best


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_after_a_relaxed_guess_the_text_goes_on_as_after_any_other(drive, sampling):
    """The KV of a guess that only leniency let stand is as good as a committed token's."""
    own = drive(sampling).verify().next_token
    other = (own + 1) % VOCAB_SIZE
    driver = drive(sampling, Verification.LENIENT_COUPLED, ALWAYS)
    verdict = driver.verify(chain(other, (other + 7) % VOCAB_SIZE))
    assert (verdict.path, verdict.num_relaxed > 0) == ((0, 1), True)
    following = [verdict.next_token, *driver.run(5)]
    again = drive(sampling, prompt=[*PROMPT, other, (other + 7) % VOCAB_SIZE])
    again.spec = replace(again.spec, prompt_len=len(PROMPT))
    assert following == again.run(6)


@pytest.mark.parametrize("verification", [each for each in Verification if not each.rule.is_lossless])
def test_without_guesses_every_rule_is_plain_decoding(drive, verification):
    for sampling in (GREEDY, SAMPLED):
        expected = drive(sampling).run(8)
        lenience = ALWAYS if verification.rule.takes_lenience else 1.0
        if not verification.rule.needs_q or sampling is GREEDY:  # else what follows no guess has noise of its own
            assert drive(sampling, verification, lenience).run(8) == expected


def test_sessions_of_all_rules_share_a_step(engine, drive):
    """Each verdict is what it would be alone."""

    def blocks():
        q = SparseDistribution((7, 8), (0.5, 0.5))
        for each in Verification:
            lenience = 0.01 if each.rule.takes_lenience else 1.0
            for sampling in (GREEDY, SAMPLED):
                driver = drive(sampling, each, lenience)
                guesses = chain(7, 8)
                yield driver, replace(guesses, q=(q, q)) if driver.spec.needs_q else guesses

    alone = [said(driver.verify(block)) for driver, block in blocks()]
    together = list(blocks())
    verdicts = answer_all(engine, [driver.verify_request(block) for driver, block in together])
    assert [said(verdict) for verdict in verdicts] == alone


def said(verdict):
    return verdict.path, verdict.next_token, verdict.num_relaxed
