"""The leases of a beam search on a draft: whatever becomes of one of them, the search goes on."""

from __future__ import annotations

import pytest

from core.beams import Beam
from core.records import Call, Chunk, DraftRequest, Refused, SequenceSpec, Usage
from orchestrator.session import messages as m
from orchestrator.session.beams.beam_drafts import BeamDrafts
from orchestrator.session.recorder import Recorder
from tests.orchestrator.fakes import VOCAB_SIZE, FakeDraftEngine, request

BEAMS = [Beam((5,), (-0.5,), -0.5), Beam((6,), (-1.0,), -1.0)]


def growing(recorder: Recorder | None = None) -> tuple[BeamDrafts, list[m.Command]]:
    """Two leases that grow, and what was sent."""
    drafts = BeamDrafts("s", (3, 1, 4), SequenceSpec.of(request()), (0, 1), VOCAB_SIZE, recorder or Recorder())
    for number in range(2):
        drafts.handle(m.DraftLeased(f"lease {number}", 1, number))
    return drafts, drafts.grow(BEAMS, 2, 2, 0.5)


def test_a_silent_draft_is_awaited_although_the_lease_that_was_to_say_so_is_gone() -> None:
    """A timeout ends with the lease of the message that it names."""
    drafts, (first, second, awaited) = growing()
    assert isinstance(first, DraftRequest)
    assert isinstance(second, DraftRequest)
    assert awaited == m.Await(second.stamp, 0.5)
    commands = drafts.handle(m.DraftReplied(Refused(second.stamp, "cannot go on")))
    assert commands == [m.ReleaseDraft(1), m.Await(first.stamp, 0.5)]
    assert drafts.handle(m.DraftLost(1, 0)) == [m.ReleaseDraft(0)]
    assert not drafts.is_growing


def test_the_drafts_calls_are_traced_once_each() -> None:
    recorder, engine = Recorder(is_traced=True), FakeDraftEngine()
    recorder.started(100.0)
    drafts, (first, second, _) = growing(recorder)
    assert isinstance(first, DraftRequest)
    assert isinstance(second, DraftRequest)
    reply = m.DraftReplied(engine.draft(first), 100.1, 100.2)
    drafts.handle(reply)
    drafts.handle(reply)
    drafts.handle(m.DraftLate(second.stamp))
    drafts.handle(m.DraftReplied(engine.draft(second), 100.1, 100.3))
    (call,) = recorder.add_to(Chunk("", (), (), Usage(3, 0))).trace
    assert (call.call, call.sent_s, call.received_s) == (Call.BLOCK, pytest.approx(0.1), pytest.approx(0.2))
    assert call.num_guesses > 0
    assert recorder.stats.draft_time_s == 0, "beams grow at once"


def test_guesses_are_those_below_living_beams() -> None:
    drafts, (first, second, _) = growing()
    engine = FakeDraftEngine()
    for sent in (first, second):
        assert isinstance(sent, DraftRequest)
        drafts.handle(m.DraftReplied(engine.draft(sent)))
    assert {tokens[0] for tokens in drafts.guesses(BEAMS, 100)} == {5, 6}
    assert {tokens[0] for tokens in drafts.guesses(BEAMS[1:], 100)} == {6}
    assert len(drafts.guesses(BEAMS, 1)) == 1
