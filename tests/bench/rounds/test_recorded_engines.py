"""Simulated engines on a real clock: they answer as they do on a virtual one, and take their time for it."""

from __future__ import annotations

import queue
import time

from bench.rounds.recorded_engines import RecordedLoop
from core.costs.pass_law import PassLaw
from core.records import (
    DraftRequest,
    DraftUpdate,
    Sampling,
    SequenceSpec,
    Stamp,
    Verdict,
    Verification,
    VerifyRequest,
)
from core.speculation.growth import TreeSpec
from core.text.token_log import TokenLog
from simulation.engines.draft import SimDraft
from simulation.engines.hardware import EngineLaw
from simulation.engines.target import SimTarget
from simulation.engines.texts import SteadyLaw, Text
from simulation.rig import model_info

TEXT = Text(SteadyLaw((1.0,), (1.0,), alpha=1.0))
PROMPT = (3, 1, 4)
SPEC = SequenceSpec(len(PROMPT), Sampling(temperature=0.0), Verification.COUPLED)
PASS_S = 0.02


class FakeReceiver:
    def __init__(self):
        self.said = queue.Queue()

    def take(self, replies):
        for reply in replies:
            self.said.put(reply)

    def working(self, stamps):
        """It waits for as long as it takes."""

    def lose(self, end):
        self.said.put(end)

    def next(self):
        return self.said.get(timeout=10.0)


def served(kind):
    return RecordedLoop(kind("e", 1, TEXT, EngineLaw(PassLaw.flat(PASS_S))), model_info(TEXT))


def test_a_target_says_its_own_text_after_as_long_as_the_law_says():
    loop, receiver = served(SimTarget), FakeReceiver()
    began_s = time.monotonic()
    loop.post([VerifyRequest(Stamp("s", 1, 1), TokenLog().base(0), PROMPT, spec=SPEC)], receiver)
    verdict = receiver.next()
    assert isinstance(verdict, Verdict)
    assert verdict.next_token == TEXT.plain(PROMPT, 0, 1)[0]
    assert time.monotonic() - began_s >= PASS_S
    assert (loop.stats().num_steps, loop.stats().num_sessions) == (1, 1)


def test_a_draft_tells_pass_by_pass_what_will_come():
    loop, receiver = served(SimDraft), FakeReceiver()
    request = DraftRequest(Stamp("s", 1, 1), TokenLog().base(0), PROMPT, TreeSpec(4, 3, tail=(0.2,)), spec=SPEC)
    loop.post([request], receiver)
    updates = []
    while not (updates and updates[-1].is_over):
        update = receiver.next()
        assert isinstance(update, DraftUpdate)
        updates.append(update)
    tokens = [update.new_nodes.tokens.tolist() for update in updates if len(update.new_nodes)]
    assert [each[0] for each in tokens[:3]] == TEXT.plain(PROMPT, 0, 3)
    assert all(update.timing.computed_s >= PASS_S for update in updates if update.timing is not None)


def test_what_the_engine_does_not_take_is_lost_to_whoever_asked():
    loop, receiver = served(SimTarget), FakeReceiver()
    loop._engine.is_dead = True
    loop.post([VerifyRequest(Stamp("s", 1, 1), TokenLog().base(0), PROMPT, spec=SPEC)], receiver)
    assert "is gone" in str(receiver.next())
