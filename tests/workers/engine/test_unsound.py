"""A row without a distribution ends its own request, and no other: never is a token made up for it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest

from core.config import EngineConfig
from core.records import Refused, Sampling, Verification
from core.speculation.token_tree import ROOT, TokenTree
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, tree_of, wrong
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=0.9, seed=3, repetition_penalty=0.1)
GREEDY = Sampling(temperature=0.0, repetition_penalty=0.1)
SUPPRESSED = Sampling(seed=3, min_tokens=30, suppressed_ids=(7,))


def one_nan(row):
    row[9] = math.nan


def one_infinite(row):
    row[9] = math.inf


def none_possible(row):
    row[:] = -math.inf


def too_large_for_the_penalty(row):
    """Finite, and so is its quotient by 1; ten times as much is not."""
    row[PROMPT[0]] = 3e38


def all_but_suppressed(row):
    row[:] = -math.inf
    row[7] = 0.0


EACH_WAY = [
    (one_nan, SAMPLED),
    (none_possible, GREEDY),
    (too_large_for_the_penalty, PENALISED),
    (all_but_suppressed, SUPPRESSED),
]
OTHERS = [
    (one_nan, GREEDY),
    (one_infinite, SAMPLED),
    (one_infinite, GREEDY),
    (none_possible, SAMPLED),
    (too_large_for_the_penalty, GREEDY),
]
CASES = pytest.mark.parametrize(
    ("spoil", "sampling"),
    [*EACH_WAY, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)],
    ids=lambda value: getattr(value, "__name__", "") or f"T={value.temperature}",
)

OF_EACH_KIND = (Verification.COUPLED, Verification.REJECTION, Verification.RECURSIVE_REJECTION)
"""With shared noise, by draws for a chain, by draws for a tree."""
RULES = [each if each in OF_EACH_KIND else pytest.param(each, marks=pytest.mark.thorough) for each in Verification]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One of each for all tests, since loading takes longer than any. Neighbours with one prompt share their steps."""
    path = str(write("llama", tmp_path_factory.mktemp("llama")))
    config = EngineConfig(path, block_tokens=4, kv_cache_tokens=1024, share_prefixes=False)
    return TargetEngine.load(config, EPOCH, lambda _: None), DraftEngine.load(config, EPOCH, 16, lambda _: None)


@pytest.fixture
def target(engines):
    yield engines[0]
    free(engines[0])


@pytest.fixture
def draft(engines):
    yield engines[1]
    free(engines[1])


def free(engine):
    engine.release([held.session for held in engine._store])
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


_NUMBERS = count()


def session(engine, prompt, *spec, **kwargs):
    """Under a name that no other has had: an engine takes nothing more of one that was released."""
    return Driver(engine, prompt, *spec, session=f"{next(_NUMBERS)}", **kwargs)


def poison(engine, spoil, row):
    """In the next step alone, this row is spoilt."""
    forward = engine._runtime.forward

    def poisoned(batch):
        engine._runtime.forward = forward
        logits = forward(batch).clone()
        spoil(logits[row])
        return logits

    engine._runtime.forward = poisoned


def sessions(engine, *spec, **kwargs):
    """Three alike: one to be spoilt, its neighbour, and one that says what the neighbour should get."""
    return [session(engine, PROMPT, *spec, **kwargs) for _ in range(3)]


def judged(verdict):
    return verdict.path, verdict.next_token, [[token for token, _ in entry.top] for entry in verdict.logprobs]


@CASES
@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("has_begun", [False, True], ids=["prefill", "step"])
def test_a_target_row_without_a_law_is_refused_and_its_neighbour_served(
    target, spoil, sampling, verification, has_begun
):
    bad, good, alone = sessions(target, sampling, verification, num_logprobs=2)
    for driver in (bad, good, alone) if has_begun else ():
        driver.verify()
    want = answer(target, alone.verify_request())
    poison(target, spoil, 0)
    refused, verdict = answer_all(target, [bad.verify_request(), good.verify_request()])
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert judged(verdict) == judged(want)


@pytest.mark.parametrize("spoil", [one_nan, one_infinite])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_mask_hides_no_row_without_a_law(target, spoil, temperature):
    """The token that is no number may not come; but the others were computed beside it."""
    bad, good, alone = sessions(target, Sampling(temperature, seed=3, allowed_token_ids=(5, 7, 11)), num_logprobs=2)
    want = answer(target, alone.verify_request())
    poison(target, spoil, 0)
    refused, verdict = answer_all(target, [bad.verify_request(), good.verify_request()])
    assert isinstance(refused, Refused)
    assert judged(verdict) == judged(want)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("is_broken", [False, True])
def test_bad_words_that_forbid_every_token_are_named_unless_the_model_is_broken(target, sampling, is_broken):
    words = tuple((7, token) for token in range(target.info.vocab_size))
    driver = session(target, [*PROMPT, 7], replace(sampling, bad_words=words))
    driver.log.extend([7])
    if is_broken:
        poison(target, one_nan, 0)
    refused = answer(target, driver.verify_request())
    assert isinstance(refused, Refused)
    if is_broken:
        assert refused.field is None
        assert "NaN" in refused.reason
    else:
        assert (refused.field, refused.reason) == ("sampling.bad_words", "forbid every token that may come next")


def block_after(draft, sampling, verification, first):
    """A chain that the draft drew, with its q where that counts."""
    return session(draft, [*PROMPT, first], sampling, verification).draft(2)


def tree_after(target, sampling):
    """The right path, and a wrong guess beside each of its tokens."""
    _, second, third = session(target, PROMPT, sampling).run(3)
    return TokenTree((wrong(second), second, wrong(third), third), (ROOT, ROOT, 1, 1))


@CASES
@pytest.mark.parametrize("shape", ["tree", *RULES])
@pytest.mark.parametrize("row", [0, 2], ids=["root", "guess"])
def test_a_root_without_a_law_is_refused_and_a_guess_without_one_is_dropped(
    request, target, draft, spoil, sampling, shape, row
):
    verification = Verification.COUPLED if shape == "tree" else shape
    bad, good, alone = sessions(target, sampling, verification, num_logprobs=2)
    plain = session(target, PROMPT, sampling, verification, num_logprobs=2)
    for driver in (bad, good, alone, plain):
        first = driver.verify().next_token
    block = tree_after(target, sampling) if shape == "tree" else block_after(draft, sampling, verification, first)
    without, want = answer(target, plain.verify_request()), answer(target, alone.verify_request(block))
    poison(target, spoil, row)
    spoilt, verdict = answer_all(target, [bad.verify_request(block), good.verify_request(block)])
    assert judged(verdict) == judged(want)
    assert [target._store.find(driver.session).kv.may_hold_nan for driver in (bad, good)] == [True, False]
    if row == 0:
        assert isinstance(spoilt, Refused)
    elif shape != "tree" and not sampling.is_greedy and "all_but_suppressed" in request.node.callspec.id:
        assert not isinstance(spoilt, Refused), "masks leave nothing after the guess, which is judged all the same"
    else:
        assert judged(spoilt) == judged(without)


@CASES
@pytest.mark.parametrize("verification", RULES)
def test_a_draft_row_without_a_law_gives_no_guesses_and_its_neighbour_gets_them(draft, spoil, sampling, verification):
    bad, good, alone = sessions(draft, sampling, verification)
    want = alone.draft(3)
    poison(draft, spoil, 0)
    refused, drafted = answer_all(draft, [bad.draft_request(3), good.draft_request(3)])
    assert isinstance(refused, Refused)
    assert tree_of(drafted).tokens == want.tokens
    bad.held = 0
    assert bad.draft(3).tokens == want.tokens, "nothing of the spoilt row is left behind"
