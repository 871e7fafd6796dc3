"""The target engine: its verdicts are plain decoding, whatever was guessed and whatever was rolled back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from driving import EPOCH, Driver, answer, chain, wrong

from core.config import EngineConfig
from core.records import Base, Missing, Refused, Sampling, TokenTree, Verdict
from tests.checkpoints import write
from workers.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write("llama", tmp_path_factory.mktemp("llama")))


def load(checkpoint, **settings):
    return TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, **settings), EPOCH, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint, kv_cache_tokens=512)


@pytest.fixture
def plain(engine):
    """The first forty tokens after the prompt, for each sampling."""
    tokens = {s: Driver(engine, PROMPT, s, session=f"plain {i}").run(40) for i, s in enumerate(SAMPLINGS)}
    engine.release([f"plain {i}" for i in range(len(SAMPLINGS))])
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_right_guesses_are_accepted_with_the_bonus_token_and_wrong_ones_are_corrected(engine, plain, sampling):
    expected = plain[sampling]
    driver = Driver(engine, PROMPT, sampling)
    driver.verify()
    assert driver.verify(chain(*expected[1:5])) == Verdict(driver_stamp(driver), (0, 1, 2, 3), expected[5], held=11)
    verdict = driver.verify(chain(expected[6], wrong(expected[7]), expected[8]))
    assert (verdict.path, verdict.next_token) == ((0,), expected[7])
    assert driver.run(6) == expected[8:14], "nothing of the rejected guesses is left in the KV"


def driver_stamp(driver):
    return replace(driver.verify_request().stamp, round=2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_any_tree_of_guesses_leaves_plain_decoding(engine, plain, sampling):
    """Random trees with the right path somewhere inside: paths are found, KV is compacted, tokens are plain."""
    random, expected = Random(1), plain[sampling]
    driver = Driver(engine, PROMPT, sampling)
    driver.verify()
    num_accepted = 0
    while len(driver.log) < len(PROMPT) + 36:
        done = len(driver.log) - len(PROMPT)
        tree = random_tree(random, expected[done : done + 4])
        verdict = driver.verify(tree)
        num_accepted += len(verdict.path)
        got = list(driver.log.tokens)[len(PROMPT) :]
        assert got == expected[: len(got)]
    assert num_accepted > 10


def random_tree(random, right):
    """Wrong nodes around a branch that is right for a while."""
    tokens, parents, tip = [], [], -1
    for token in right[: random.randrange(len(right) + 1)]:
        for _ in range(random.randrange(3)):
            tokens.append(wrong(token))
            parents.append(random.choice([tip, len(tokens) - 2]) if len(tokens) > 1 else -1)
        tokens.append(token)
        parents.append(tip)
        tip = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def test_the_check_above_would_see_stale_kv(engine, plain):
    """Without the roll-back the very same rounds go wrong: so it is the roll-back that makes them right."""
    expected = plain[SAMPLINGS[0]]
    engine._roll_back = lambda job, path: job.held.log.extend(job.block.tokens)
    driver = Driver(engine, PROMPT, SAMPLINGS[0])
    driver.verify()
    verdict = answer(engine, driver.verify_request(chain(wrong(expected[1]), wrong(expected[2]))))
    assert verdict.next_token == expected[1]
    assert verdict.held != len(PROMPT) + 1


def test_sequences_of_one_batch_do_not_see_each_other(engine, plain):
    drivers = [Driver(engine, PROMPT, s, session=str(n)) for n, s in enumerate(SAMPLINGS * 3)]
    for step in range(12):
        for ticket, driver in enumerate(drivers):
            engine.add(ticket, driver.verify_request())
        replies = dict(engine.step())
        for ticket, driver in enumerate(drivers):
            driver.log.extend([replies[ticket].next_token])
            driver.held = replies[ticket].held
            assert replies[ticket].next_token == plain[driver.spec.sampling][step]
    assert engine.stats().num_steps >= 12


def test_an_unknown_base_is_answered_with_what_is_held(engine):
    driver = Driver(engine, PROMPT)
    driver.verify()
    stranger = replace(driver.verify_request(), base=Base(6, 12345))
    assert answer(engine, stranger) == Missing(stranger.stamp, 0)
    unknown = replace(driver.verify_request(), stamp=replace(stranger.stamp, session="other"))
    assert answer(engine, unknown) == Missing(unknown.stamp, 0)
    driver.log.extend([1, 2, 3])
    driver.held = 9
    ahead = driver.verify_request()
    assert answer(engine, ahead) == Missing(ahead.stamp, 6), "it holds the prompt, and says so"


def test_a_prefix_that_is_sent_again_is_not_computed_again(engine, plain):
    driver = Driver(engine, PROMPT)
    driver.run(10)
    rows_before = engine.stats().num_rows
    driver.held = 0
    assert driver.verify().next_token == plain[SAMPLINGS[0]][10]
    assert engine.stats().num_rows == rows_before + 1


@pytest.mark.parametrize("stale", ["epoch", "round", "released"])
def test_a_stale_message_is_refused_and_changes_nothing(engine, plain, stale):
    driver = Driver(engine, PROMPT)
    driver.run(3)
    request = driver.verify_request()
    if stale == "released":
        engine.release(["s"])
        request = replace(request, base=Base(0, 0), suffix=tuple(PROMPT), spec=driver.spec)
    else:
        changes = {"epoch": {"epoch": EPOCH + 1}, "round": {"round": 1}}[stale]
        request = replace(request, stamp=replace(request.stamp, **changes))
    assert isinstance(answer(engine, request), Refused)
    engine.check_integrity()
    if stale == "released":
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    else:
        assert driver.run(3) == plain[SAMPLINGS[0]][3:6]


def test_a_later_message_replaces_the_one_in_progress(engine, plain):
    driver = Driver(engine, PROMPT)
    first, second = driver.verify_request(), driver.verify_request()
    engine.add(1, first)
    engine.add(2, second)
    replies = dict(engine.step())
    assert isinstance(replies[1], Refused)
    assert replies[2].next_token == plain[SAMPLINGS[0]][0]


@pytest.mark.parametrize(("num_tokens", "problem"), [(513, "context"), (300, "KV cache")], ids=["context", "kv"])
def test_what_can_never_fit_is_refused(checkpoint, num_tokens, problem):
    small = load(checkpoint, kv_cache_tokens=256)
    reply = answer(small, Driver(small, [3] * num_tokens).verify_request())
    assert isinstance(reply, Refused)
    assert problem in reply.reason


def test_when_kv_is_full_the_newest_idle_session_is_dropped_and_comes_back(checkpoint, plain):
    small = load(checkpoint, kv_cache_tokens=48)
    drivers = [Driver(small, PROMPT, session=str(n)) for n in range(6)]
    outputs = [[] for _ in drivers]
    for _ in range(12):
        for driver, output in zip(drivers, outputs, strict=True):
            reply = answer(small, driver.verify_request())
            while isinstance(reply, Missing):
                driver.held = reply.held
                reply = answer(small, driver.verify_request())
            driver.log.extend([reply.next_token])
            driver.held = reply.held
            output.append(reply.next_token)
            small.check_integrity()
    assert small.stats().num_preemptions > 0
    assert all(output == plain[SAMPLINGS[0]][:12] for output in outputs)


def test_a_step_that_does_not_fit_preempts_by_age_and_finishes(checkpoint, plain):
    """All at once, more than fits: the youngest are told Missing, the others get their verdict, and nobody hangs."""
    small = load(checkpoint, kv_cache_tokens=32)
    drivers = [Driver(small, PROMPT, session=str(n)) for n in range(8)]
    for ticket, driver in enumerate(drivers):
        small.add(ticket, driver.verify_request())
    replies = {}
    while small.has_work:
        replies.update(small.step())
    assert len(replies) == 8
    verdicts = [reply for reply in replies.values() if isinstance(reply, Verdict)]
    assert verdicts
    assert {verdict.next_token for verdict in verdicts} == {plain[SAMPLINGS[0]][0]}
    small.release([str(n) for n in range(8)])
    assert small.stats().num_free_blocks == small.stats().num_blocks


def test_a_model_that_gives_nan_refuses_that_sequence_and_serves_the_others(engine, plain):
    forward = engine._runtime.forward

    def poisoned(batch):
        logits = forward(batch).clone()
        logits[0] = torch.nan
        return logits

    engine._runtime.forward = poisoned
    engine.add(1, Driver(engine, PROMPT, session="a").verify_request())
    engine.add(2, Driver(engine, PROMPT, session="b").verify_request())
    replies = dict(engine.step())
    assert isinstance(replies[1], Refused)
    assert replies[2].next_token == plain[SAMPLINGS[0]][0]
    engine.check_integrity()


def test_silent_sessions_expire(checkpoint):
    engine = load(checkpoint, session_timeout_s=1e-6)
    Driver(engine, PROMPT).verify()
    assert engine.expire() == ["s"]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_logprobs_are_those_of_the_row_that_drew_each_token(engine, plain):
    expected = plain[SAMPLINGS[0]]
    one_by_one = Driver(engine, PROMPT, session="a", num_logprobs=2)
    singles = [one_by_one.verify().logprobs[0] for _ in range(5)]
    at_once = Driver(engine, PROMPT, session="b", num_logprobs=2)
    at_once.verify()
    tree = TokenTree((wrong(expected[1]), expected[1], wrong(expected[2]), expected[2]), (-1, -1, 1, 1))
    together = at_once.verify(tree).logprobs
    assert [entry.logprob for entry in together] == pytest.approx([entry.logprob for entry in singles[1:4]], abs=1e-4)
    assert [[i for i, _ in entry.top] for entry in together] == [[i for i, _ in entry.top] for entry in singles[1:4]]
