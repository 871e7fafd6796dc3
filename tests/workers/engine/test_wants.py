"""Extra fields of a verdict: none unless asked for, then the target's own token after every node of the block."""

from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.records import Refused, Sampling, Verification, Want
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, TokenTree
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
TREE = TokenTree((7, 9, 11, 7, 2), (ROOT, 0, ROOT, 2, 1))
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, repetition_penalty=1.3, frequency_penalty=0.2),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    checkpoint = str(write("llama", tmp_path_factory.mktemp("llama")))
    return TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512), EPOCH, lambda _: None)


def ask(engine, session, block, sampling, wants=(Want.SAMPLES,), verification=Verification.COUPLED):
    """The verdict of a session whose prompt is all that it has."""
    driver = Driver(engine, PROMPT, sampling, verification, session=session)
    return answer(engine, replace(driver.verify_request(block), wants=wants))


def paths(tree):
    """The tokens that lead to the root and to each node."""
    found = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
def test_a_sample_is_what_plain_decoding_says_after_the_same_tokens(engine, number):
    """After a node of depth d that is with the noise of d tokens further: that of the place in the text."""
    sampling = SAMPLINGS[number]
    verdict = ask(engine, f"asks {number}", TREE, sampling)
    for index, path in enumerate(paths(TREE)):
        driver = Driver(engine, [*PROMPT, *path], sampling, session=f"plain {number} {index}")
        driver.spec = replace(driver.spec, prompt_len=len(PROMPT))
        assert verdict.samples[index] == driver.verify(EMPTY_BLOCK).next_token


def test_what_nobody_asks_for_is_not_said_and_asking_changes_no_verdict(engine):
    asked, unasked = (ask(engine, f"{wants}", TREE, SAMPLINGS[1], wants) for wants in ((Want.SAMPLES,), ()))
    assert (asked.path, asked.next_token, asked.held) == (unasked.path, unasked.next_token, unasked.held)
    assert len(asked.samples) == 1 + len(TREE)
    assert unasked.samples == ()


def test_a_sample_of_an_empty_block_is_the_next_token(engine):
    verdict = ask(engine, "empty", EMPTY_BLOCK, SAMPLINGS[0])
    assert verdict.samples == (verdict.next_token,)


@pytest.mark.parametrize("verification", [Verification.LENIENT_COUPLED, Verification.TYPICAL])
def test_relaxed_rules_say_what_was_drawn_and_not_what_stood(engine, verification):
    relaxed = ask(engine, f"relaxed {verification}", TREE, SAMPLINGS[1], verification=verification)
    assert relaxed.samples == ask(engine, f"exact {verification}", TREE, SAMPLINGS[1]).samples


def test_a_rule_that_does_not_draw_after_each_guess_leaves_them_out(engine):
    assert ask(engine, "rejection", EMPTY_BLOCK, SAMPLINGS[1], verification=Verification.REJECTION).samples == ()


def test_what_is_wanted_twice_is_refused(engine):
    refused = ask(engine, "twice", TREE, SAMPLINGS[0], (Want.SAMPLES,) * 2)
    assert isinstance(refused, Refused)
    assert "twice" in refused.reason
