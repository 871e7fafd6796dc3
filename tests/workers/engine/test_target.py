"""The target engine: its verdicts are plain decoding, whatever was guessed and whatever was rolled back."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from random import Random
from time import monotonic

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.records import Base, Missing, Refused, Sampling, Verdict, Verification
from core.speculation.token_tree import EMPTY_BLOCK, SparseDistribution, TokenTree
from tests.checkpoints import VOCAB_SIZE, write
from tests.workers.engine.driving import EPOCH, Driver, answer, chain, poisoned, step, wrong
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]


def load(checkpoint, **settings):
    return TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, **settings), EPOCH, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint, kv_cache_tokens=512)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """The first forty tokens after the prompt, for each sampling, from an engine that no test has touched."""
    engine = load(checkpoint, kv_cache_tokens=512)
    return {s: Driver(engine, PROMPT, s, session=f"plain {i}").run(40) for i, s in enumerate(SAMPLINGS)}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_right_guesses_are_accepted_with_the_bonus_token_and_wrong_ones_are_corrected(engine, plain, sampling):
    expected = plain[sampling]
    driver = Driver(engine, PROMPT, sampling)
    driver.verify()
    verdict = driver.verify(chain(*expected[1:5]))
    assert replace(verdict, timing=None) == Verdict(driver_stamp(driver), (0, 1, 2, 3), expected[5], held=11)
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
    for place in range(12):
        for driver in drivers:
            engine.add(driver.verify_request())
        replies = step(engine)
        for driver in drivers:
            reply = replies[driver.session]
            driver.log.extend([reply.next_token])
            driver.held = reply.held
            assert reply.next_token == plain[driver.spec.sampling][place]
    assert engine.stats().num_steps >= 12


def test_an_unknown_base_is_answered_with_what_is_held(engine):
    driver = Driver(engine, PROMPT)
    driver.verify()
    stranger = replace(driver.verify_request(), base=Base(6, 12345))
    assert answer(engine, stranger) == Missing(stranger.stamp, 0)
    unknown = replace(driver.verify_request(), stamp=replace(stranger.stamp, lease="other"))
    assert answer(engine, unknown) == Missing(unknown.stamp, 0)
    driver.log.extend([1, 2, 3])
    driver.held = 9
    ahead = driver.verify_request()
    assert answer(engine, ahead) == Missing(ahead.stamp, 6), "it holds the prompt, and says so"


def test_a_tree_that_is_sent_again_after_missing_is_judged_as_at_first(engine, plain):
    expected = plain[SAMPLINGS[1]]
    driver = Driver(engine, PROMPT, SAMPLINGS[1])
    driver.verify()
    tree = TokenTree((wrong(expected[1]), expected[1], wrong(expected[2]), expected[2]), (-1, -1, 1, 1))
    engine._store.drop("s")
    missing = answer(engine, driver.verify_request(tree))
    assert isinstance(missing, Missing)
    driver.held = missing.held
    verdict = driver.verify(tree)
    assert (verdict.path, verdict.next_token) == ((1, 3), expected[3])
    assert driver.run(3) == expected[4:7]


def test_a_wide_tree_needs_room_in_the_context_for_its_depth_alone(checkpoint, plain):
    small = load(checkpoint, max_context_tokens=len(PROMPT) + 3, kv_cache_tokens=64)
    expected = plain[SAMPLINGS[0]]
    driver = Driver(small, PROMPT)
    driver.verify()
    tree = TokenTree((*(wrong(expected[1]) + n for n in range(9)), expected[1], expected[2]), (*[-1] * 10, 9))
    assert driver.verify(tree).path == (9, 10)
    deeper = Driver(small, [*PROMPT, 1, 2], session="deeper")
    assert "context" in answer(small, deeper.verify_request(chain(1, 2))).reason


def test_a_verdict_says_what_it_cost(engine):
    began_s = monotonic()
    for n in range(2):
        engine.add(Driver(engine, PROMPT, session=f"{n}").verify_request(chain(1, 2, 3)))
    replies = step(engine)
    ended_s = monotonic()
    for n in range(2):
        timing = replies[f"{n}"].timing
        assert (timing.num_passes, timing.num_rows) == (1, 2 * (len(PROMPT) + 3))
        assert 0 < timing.waited_s + timing.computed_s < ended_s - began_s


def test_a_wait_is_counted_from_the_arrival_that_is_given(engine):
    driver = Driver(engine, PROMPT)
    began_s = monotonic()
    engine.add(driver.verify_request(), arrived_s=began_s - 5.0)
    (verdict,) = engine.step()
    assert 5.0 <= verdict.timing.waited_s <= monotonic() - began_s + 5.0 - verdict.timing.computed_s


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
    engine.add(first)
    engine.add(second)
    replies = {reply.stamp: reply for reply in engine.step()}
    assert isinstance(replies[first.stamp], Refused)
    assert replies[second.stamp].next_token == plain[SAMPLINGS[0]][0]


@pytest.mark.parametrize(("num_tokens", "problem"), [(513, "context"), (300, "KV cache")], ids=["context", "kv"])
def test_what_can_never_fit_is_refused(checkpoint, num_tokens, problem):
    small = load(checkpoint, kv_cache_tokens=256)
    reply = answer(small, Driver(small, [3] * num_tokens).verify_request())
    assert isinstance(reply, Refused)
    assert problem in reply.reason


def test_more_than_fits_at_once_is_served_all_the_same(checkpoint, plain):
    """The newest wait for the older to end; each request is answered once, and rightly, and nobody hangs."""
    small = load(checkpoint, kv_cache_tokens=32, share_prefixes=False)
    drivers = [Driver(small, PROMPT, session=str(n)) for n in range(8)]
    for driver in drivers:
        small.add(driver.verify_request())
    replies = []
    while small.has_work:
        found = small.step()
        small.check_integrity()
        small.release([reply.stamp.lease for reply in found])
        replies += found
    assert not small.has_work
    assert sorted(reply.stamp.lease for reply in replies) == [*"01234567"]
    assert {reply.next_token for reply in replies} == {plain[SAMPLINGS[0]][0]}
    small.release([str(n) for n in range(8)])
    assert small.stats().num_free_blocks == small.stats().num_blocks


def test_a_model_that_gives_nan_refuses_that_sequence_and_serves_the_others(engine, plain):
    engine.add(Driver(engine, PROMPT, session="a").verify_request())
    engine.add(Driver(engine, PROMPT, session="b").verify_request())
    with poisoned(engine, 0):
        replies = step(engine)
    assert isinstance(replies["a"], Refused)
    assert replies["b"].next_token == plain[SAMPLINGS[0]][0]
    engine.check_integrity()


def test_a_guess_that_leads_to_nan_is_dropped_and_the_root_still_judged(engine, plain):
    driver = Driver(engine, PROMPT)
    driver.verify()
    with poisoned(engine, 1):
        verdict = driver.verify(chain(*plain[SAMPLINGS[0]][1:4]))
    assert (verdict.path, verdict.next_token) == ((), plain[SAMPLINGS[0]][1])
    assert driver.run(5) == plain[SAMPLINGS[0]][2:7]


@pytest.mark.parametrize("broken", Verification)
def test_a_guess_that_leads_to_nan_spoils_nobody_elses_verdict(checkpoint, broken):
    """Blocks of all kinds in one step, with and without the NaN, and the broken one once with nothing guessed."""

    def verdicts(poison, dropped=None):
        engine = load(checkpoint, kv_cache_tokens=512, share_prefixes=False)
        drivers = {kind: Driver(engine, PROMPT, SAMPLINGS[1], kind, session=kind.value) for kind in Verification}
        for driver in drivers.values():
            driver.verify()
        q = SparseDistribution((7, 8, 9), (0.5, 0.25, 0.25))
        for kind, driver in drivers.items():
            block = EMPTY_BLOCK if kind is dropped else TokenTree.chain((7, 9), (q, q))
            engine.add(driver.verify_request(block))
        row = 3 * list(Verification).index(broken) + 2  # of each block the root comes first
        with poisoned(engine, row) if poison else nullcontext():
            found = {Verification(name): reply for name, reply in step(engine).items()}
        engine.check_integrity()
        return {kind: (verdict.path, verdict.next_token, verdict.held) for kind, verdict in found.items()}

    assert verdicts(poison=True) == verdicts(poison=False) | {broken: verdicts(False, dropped=broken)[broken]}


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_sequence_that_is_nan_throughout_spoils_no_other(tmp_path, settings, is_first):
    """Its KV is NaN too, and so are padding rows that were made of its rows; nobody may read either."""
    poison = 250
    path = write("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    expected = Driver(load(str(path), **settings), PROMPT).run(4)
    shared = load(str(path), **settings)
    bad, good = Driver(shared, [poison] * 3, session="bad"), Driver(shared, PROMPT, session="good")
    for driver in [bad, good] if is_first else [good, bad]:
        shared.add(driver.verify_request())
    replies = step(shared)
    assert isinstance(replies["bad"], Refused)
    verdict = replies["good"]
    good.log.extend([verdict.next_token])
    good.held = verdict.held
    assert [verdict.next_token, *good.run(3)] == expected


@pytest.mark.parametrize(
    ("prompt", "block", "problem"),
    [
        ([5, VOCAB_SIZE], chain(), "vocabulary"),
        ([-1, 5], chain(), "vocabulary"),
        ([5], chain(VOCAB_SIZE), "guess"),
        ([5], TokenTree((1, 2), (-1, -1)), "chains"),
    ],
)
def test_a_malformed_request_is_refused_and_harms_nobody(engine, plain, prompt, block, problem):
    bad = Driver(engine, prompt, SAMPLINGS[1], Verification.REJECTION, session="bad").verify_request(block)
    reply = answer(engine, bad)
    assert isinstance(reply, Refused)
    assert problem in reply.reason
    assert Driver(engine, PROMPT).run(3) == plain[SAMPLINGS[0]][:3]


@pytest.mark.parametrize("verification", list(Verification))
def test_a_greedy_block_may_branch_whatever_the_verification(engine, plain, verification):
    driver = Driver(engine, PROMPT, SAMPLINGS[0], verification, session=f"greedy {verification}")
    first, second = plain[SAMPLINGS[0]][:2]
    verdict = driver.verify(TokenTree((wrong(first), first, wrong(second), second), (-1, -1, 1, 1)))
    assert verdict.path == (1, 3)


def test_penalties_of_a_node_count_the_path_to_it_and_no_sibling(engine):
    """With a penalty that forbids repetition, a node whose sibling has its token must not suffer for that."""
    strict = Sampling(temperature=0.0, repetition_penalty=10.0, presence_penalty=2.0)
    expected = Driver(engine, PROMPT, strict, session="plain").run(8)
    driver = Driver(engine, PROMPT, strict)
    driver.verify()
    right = expected[1:5]
    # Below the root: a wrong guess that says what comes later, then the right one; and so on down.
    tree = TokenTree((right[1], right[0], right[2], right[1], right[3], right[2]), (-1, -1, 1, 1, 3, 3))
    verdict = driver.verify(tree)
    assert verdict.path == (1, 3, 5)
    assert verdict.next_token == right[3]
    assert driver.run(3) == expected[5:8]


def test_a_bad_word_of_several_tokens_is_masked_at_the_nodes_that_its_beginning_leads_to(engine, plain):
    """Siblings are rows of one position, and the word begins above the block, in it, or on another branch of it."""
    greedy = SAMPLINGS[0]
    said = plain[greedy]
    forbidding = replace(greedy, bad_words=(tuple(said[1:4]), tuple(said[5:7])))
    expected = Driver(engine, PROMPT, forbidding, session="plain").run(12)
    assert expected[:3] == said[:3]
    assert expected[3] != said[3], "the word would be complete"
    driver = Driver(engine, PROMPT, forbidding)
    driver.verify()
    # Below the root: what begins the word, then its last token, which is forbidden here, beside what comes instead.
    tree = TokenTree((wrong(said[1]), said[1], said[2], said[3], expected[3]), (-1, -1, 1, 2, 2))
    verdict = driver.verify(tree)
    assert (verdict.path, verdict.next_token) == ((1, 2, 4), expected[4])
    assert driver.run(7) == expected[5:12]


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_verification_lets_a_bad_word_or_a_token_that_is_not_allowed_pass(engine, verification, temperature):
    """Three tokens share the output, and may not follow themselves: guesses that say otherwise are rejected."""
    sampling = Sampling(temperature, seed=3, allowed_token_ids=(7, 8, 9), bad_words=((7, 7), (8, 8), (9, 9), (7, 8, 9)))
    driver = Driver(engine, PROMPT, sampling, verification, session=f"{verification} {temperature}")
    for guess in (7, 8, 9, 10):
        sure = SparseDistribution((guess,), (1.0,))
        driver.verify(TokenTree.chain((guess, guess), [sure] * 2 if driver.spec.needs_q else ()))
    output = list(driver.log.tokens)[len(PROMPT) :]
    assert set(output) <= {7, 8, 9}
    assert all(one != other for one, other in pairwise(output))
    assert (7, 8, 9) not in zip(output, output[1:], output[2:], strict=False)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalties_count_the_guesses_before(engine, temperature):
    """Three tokens share the output, and each is the less likely the oftener it was said, guesses included."""
    taking_turns = Sampling(
        temperature=temperature, seed=3, frequency_penalty=2.0, logit_bias=((7, 60.0), (8, 60.0), (9, 60.0))
    )
    expected = Driver(engine, PROMPT, taking_turns, session="plain").run(31)
    assert set(expected) == {7, 8, 9}
    driver = Driver(engine, PROMPT, taking_turns)
    driver.verify()
    for first in range(1, 31, 6):
        assert driver.verify(chain(*expected[first : first + 5])).path == (0, 1, 2, 3, 4)
    assert list(driver.log.tokens)[len(PROMPT) :] == expected


def test_silent_sessions_expire(checkpoint):
    engine = load(checkpoint, session_timeout_s=1e-6)
    Driver(engine, PROMPT).verify()
    assert engine.expire() == ["s"]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_of_very_many_ended_sessions_the_first_are_forgotten_first(engine, monkeypatch):
    monkeypatch.setattr("core.protocol.MAX_ENDED", 3)
    engine.release([str(n) for n in range(5)])
    late = [answer(engine, Driver(engine, PROMPT, session=str(n)).verify_request()) for n in range(5)]
    assert [isinstance(reply, Refused) for reply in late] == [False, False, True, True, True]


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


def test_logprobs_are_those_of_the_model_itself_whatever_is_sampled(engine):
    """Before temperature, truncation and penalties, which change what is drawn and not what is reported."""
    reported = []
    for index, sampling in enumerate(SAMPLINGS):
        driver = Driver(engine, PROMPT, sampling, session=f"{index}", num_logprobs=VOCAB_SIZE)
        verdict = driver.verify()
        (entry,) = verdict.logprobs
        assert entry.logprob == pytest.approx(dict(entry.top)[verdict.next_token])
        reported.append(dict(entry.top))
    assert sum(map(math.exp, reported[0].values())) == pytest.approx(1.0)
    assert reported[1] == pytest.approx(reported[0])
    assert reported[2] == pytest.approx(reported[0])
