"""Requests that a simulated engine takes into a pass: a pass takes a second, whatever its rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.config import DECODE_TOKENS
from core.records import (
    DraftRequest,
    Missing,
    Refused,
    Sampling,
    SequenceSpec,
    Stamp,
    Verdict,
    Verification,
    VerifyRequest,
)
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, TokenTree
from core.text.token_log import TokenLog
from simulation.clock import run
from simulation.engines.draft import SimDraft
from simulation.engines.hardware import EngineLaw, PassLaw
from simulation.engines.target import SimTarget
from simulation.engines.texts import SteadyLaw, Text
from tests.exchange import replies_of

EPOCH = 1
BLOCK = TokenTree.chain((1, 2, 3))
"""With its root, 4 rows."""


def target(max_step_tokens: int, prefill_chunk_tokens: int = 256) -> SimTarget:
    law = EngineLaw(PassLaw.flat(1.0, 10_000), max_step_tokens, prefill_chunk_tokens)
    return SimTarget("target", EPOCH, Text(SteadyLaw()), law)


def request(session: str, num_tokens: int = 1, block: TokenTree = EMPTY_BLOCK) -> VerifyRequest:
    stamp, spec = Stamp(session, EPOCH, 1), SequenceSpec(num_tokens, Sampling())
    return VerifyRequest(stamp, TokenLog().base(0), (5,) * num_tokens, block, spec)


def answered(engine: SimTarget, *requests: VerifyRequest) -> list[tuple[int, int]]:
    """When each is answered that has come at time 0, and the rows of the passes that it took part in."""

    async def answer(request: VerifyRequest) -> tuple[int, int]:
        (reply,) = await replies_of(engine, [request])
        return round(asyncio.get_running_loop().time()), reply.timing.num_rows

    async def all_of_them() -> list[tuple[int, int]]:
        async with asyncio.timeout(100.0):
            return await asyncio.gather(*map(answer, requests))

    return run(all_of_them())


def test_guesses_count_among_the_rows_of_a_pass():
    engine = target(max_step_tokens=8)
    assert answered(engine, *(request(session, block=BLOCK) for session in "abc")) == [(1, 8), (1, 8), (2, 4)]
    assert (engine.num_passes, engine.num_rows, engine.busy_s) == (2, 12, 2.0)


def test_a_block_that_is_larger_than_a_pass_has_one_to_itself():
    engine = target(max_step_tokens=3)
    assert answered(engine, request("a", block=BLOCK), request("b", block=BLOCK)) == [(1, 4), (2, 4)]


def test_decoding_goes_before_prefill_that_came_earlier_and_bounds_its_chunks():
    engine = target(max_step_tokens=64, prefill_chunk_tokens=40)
    assert answered(engine, request("long", 100), request("short", block=BLOCK)) == [(2, 44 + 60), (1, 44)]


@pytest.mark.parametrize(("num_tokens", "answered_s"), [(DECODE_TOKENS, 1), (DECODE_TOKENS + 1, 2)])
def test_more_than_a_few_tokens_to_catch_up_with_are_prefill(num_tokens, answered_s):
    engine = target(max_step_tokens=64, prefill_chunk_tokens=16)
    assert answered(engine, request("first"), request("second", num_tokens))[1][0] == answered_s


def test_the_last_token_of_a_prompt_goes_with_the_guesses_after_it():
    engine = target(max_step_tokens=101)
    assert answered(engine, request("a", 100, BLOCK)) == [(2, 99 + 4)]


def test_the_end_of_a_prompt_goes_in_chunks_as_its_beginning_did():
    """Though it is short enough to count as decoding, had it come alone."""
    engine = target(max_step_tokens=32, prefill_chunk_tokens=10)
    decoding = TokenTree.chain(tuple(range(1, 20)))
    requests = (request("a", block=decoding), request("b", block=decoding), request("long", 40))
    assert answered(engine, *requests) == [(1, 30), (2, 30), (3, 30 + 30 + 20)]


def overtaken_prefill(later: VerifyRequest) -> tuple[object, object, int]:
    """Replies, with their times, to a prompt of 100 tokens, 32 a pass, and to what overtakes it in the first pass."""
    engine = target(max_step_tokens=32)

    async def both() -> tuple[object, object, int]:
        first = asyncio.create_task(replies_of(engine, [request("s", 100)]))
        await asyncio.sleep(0.5)
        (second,) = await replies_of(engine, [later])
        answered_s = round(asyncio.get_running_loop().time())
        return (await first)[0], second, answered_s

    return run(both())


def test_of_a_prefill_that_was_overtaken_what_was_computed_is_held_and_no_more():
    prompt = request("s", 100)
    first, second, answered_s = overtaken_prefill(replace(prompt, stamp=Stamp("s", EPOCH, 2)))
    assert isinstance(first, Refused)
    assert isinstance(second, Verdict)
    assert answered_s == 4, "32 in the pass that it came in, then 32, 32 and 4"


def test_who_counts_on_a_prefill_that_is_under_way_is_told_how_far_it_is():
    stamp, log = Stamp("s", EPOCH, 2), TokenLog((5,) * 100)
    _, second, _ = overtaken_prefill(VerifyRequest(stamp, log.base(50), (5,) * 50))
    assert second == Missing(stamp, 32)


def test_a_call_that_is_broken_off_is_told_of_none_of_its_requests():
    """Nor of requests that wait behind the first."""
    engine, taken = target(max_step_tokens=8), list[object]()

    async def break_off() -> None:
        call = asyncio.create_task(engine.exchange([request("a"), request("b")], taken.append))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.sleep(5.0)

    run(break_off())
    assert engine.num_passes == 1
    assert taken == []


def asked_of_draft(*requests: DraftRequest) -> tuple[list[object], SimDraft]:
    """The answers in turn, and the engine."""
    engine = SimDraft("draft", EPOCH, Text(SteadyLaw()), EngineLaw(PassLaw.flat(1.0, 10_000), 64, 64))

    async def ask() -> list[object]:
        return [(await replies_of(engine, [request]))[0] for request in requests]

    return run(ask()), engine


def draft_request(round_: int, verification: Verification, growth: TreeSpec) -> DraftRequest:
    spec = SequenceSpec(1, Sampling(temperature=1.0, seed=1), verification)
    return DraftRequest(Stamp("s", EPOCH, round_), TokenLog().base(0), (5,), growth, spec=spec)


def test_a_draft_refuses_what_a_real_one_does():
    (reply,), _ = asked_of_draft(draft_request(1, Verification.REJECTION, TreeSpec(4, 4)))
    assert isinstance(reply, Refused)
    assert "fixed beforehand" in reply.reason


@pytest.mark.parametrize(
    ("verification", "num_passes"),
    [(Verification.COUPLED, 5), (Verification.REJECTION, 6)],
)
def test_a_block_that_is_asked_for_again_is_drawn_anew_where_samples_count(verification, num_passes):
    """A chain of three is three passes: its last node is not fed. Else none of them need be made again."""
    requests = [draft_request(round_, verification, TreeSpec.chain(3)) for round_ in (1, 2)]
    _, engine = asked_of_draft(*requests)
    assert engine.num_passes == num_passes


def test_other_sampling_parameters_have_other_guesses():
    requests = [draft_request(n, v, TreeSpec.chain(1)) for n, v in enumerate(Verification)]
    _, engine = asked_of_draft(*requests)
    assert engine.num_passes == len(requests)


def test_work_after_a_pass_is_a_part_of_the_next_one(monkeypatch):
    """On a real clock the simulation itself takes time: 0.4 s after each pass here."""
    engine = target(max_step_tokens=DECODE_TOKENS)
    ends_s, end_pass = [], SimTarget._end_pass

    def slowly(self, jobs, now_s):
        ends_s.append(now_s)
        end_pass(self, jobs, now_s)
        asyncio.get_running_loop()._now_s += 0.4

    monkeypatch.setattr(SimTarget, "_end_pass", slowly)
    answered(engine, request("a", num_tokens=4 * DECODE_TOKENS))
    assert len(ends_s) > 2
    assert ends_s == pytest.approx([1.0 + number for number in range(len(ends_s))])
