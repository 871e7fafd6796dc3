"""Splits the time of a stream into parts, from the traced calls to its engines.

Knows the messages of a trace, and intervals; must not know how streams are made. A round begins when its block is sent
to the target and ends when the next block is sent. The first verification is prefill, not a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protos.outrider.v1 import generation_pb2 as pb

Interval = tuple[float, float]
Parts = Mapping[str, float]
"""Seconds of a round, by part."""


@dataclass(frozen=True, slots=True)
class Round:
    """One verification, and the calls to the draft that belong to it."""

    verify: pb.CallTrace
    end_s: float
    drafts: tuple[pb.CallTrace, ...]
    before: pb.CallTrace | None = None
    """The previous verification. A pass reported during the current one may have begun during it."""

    @property
    def is_hit(self) -> bool:
        """Whether the next block was complete before the verdict arrived, so that the target did not wait for it."""
        return self.picked is not None and self.picked.received_s <= self.verify.received_s

    @property
    def picked(self) -> pb.CallTrace | None:
        """The pass that completed the next block."""
        return next((call for call in self.drafts if call.call == pb.CALL_GROWTH and call.used), None)

    @property
    def was_asked(self) -> bool:
        return any(call.call == pb.CALL_GROWTH for call in self.drafts)

    @property
    def num_tokens(self) -> int:
        return self.verify.used + 1

    @property
    def waited_s(self) -> float:
        """Seconds after the verdict during which the target had no work from this stream."""
        return self.end_s - self.verify.received_s

    @property
    def link_s(self) -> float:
        """Seconds of the verification's round trip that the engine does not account for."""
        return _wire_s(self.verify)

    @property
    def not_model_s(self) -> float:
        """Seconds of the round spent on the wire and in the orchestrator, not in the engines that it waited for.

        A draft call that ended before the verdict cost the round no time. If a later draft call overlaps with the
        verification, the overlap counts once.
        """
        awaited = [call for call in self.drafts if self.verify.received_s < call.received_s <= self.end_s]
        busy = [_busy(call) for call in (self.verify, *awaited)]
        return self.end_s - self.verify.sent_s - _covered(busy, (self.verify.sent_s, self.end_s))


def rounds_of(calls: Iterable[pb.CallTrace]) -> list[Round]:
    """The rounds of one stream, except for the last, which has no next block."""
    ordered = sorted(calls, key=lambda call: call.sent_s)
    verified = [call for call in ordered if call.call == pb.CALL_VERIFY]
    drafts: list[list[pb.CallTrace]] = [[] for _ in verified]
    for call in ordered:
        if verified and call.call != pb.CALL_VERIFY:
            drafts[_round_of(call, verified)].append(call)
    return [
        Round(verify, following.sent_s, tuple(own), before)
        for before, verify, following, own in zip(verified, verified[1:], verified[2:], drafts[1:], strict=False)
    ]


def medians_ms(rounds: Sequence[Parts]) -> dict[str, float]:
    """The median of each part, in milliseconds."""
    return {f"{part}, ms": round(1e3 * statistics.median(each[part] for each in rounds), 3) for part in rounds[0]}


def _round_of(call: pb.CallTrace, verified: Sequence[pb.CallTrace]) -> int:
    """Index of the verification that the call belongs to: the last one sent before the call. For growth, the last one
    sent before the call's answer."""
    known_s = call.received_s if call.call == pb.CALL_GROWTH else call.sent_s
    return max(sum(verify.sent_s <= known_s for verify in verified) - 1, 0)


def hidden_share(rounds: Iterable[Round]) -> float:
    """Share of the time of draft passes that completed a next block in which the target was verifying."""
    picked = [(round_.picked, round_) for round_ in rounds if round_.picked is not None]
    total_s = sum(grown.received_s - grown.sent_s for grown, _ in picked)
    hidden_s = sum(_covered(_verified(round_), (grown.sent_s, grown.received_s)) for grown, round_ in picked)
    return hidden_s / total_s if total_s else 0.0


def waiting_share(rounds: Iterable[Round]) -> float:
    """Share of the rounds' time in which the target waits for the draft, the wire or the orchestrator."""
    measured = list(rounds)
    total_s = sum(round_.end_s - round_.verify.sent_s for round_ in measured)
    return sum(round_.waited_s for round_ in measured) / total_s if total_s else 0.0


def _verified(round_: Round) -> list[Interval]:
    calls = [round_.verify] if round_.before is None else [round_.before, round_.verify]
    return [(call.sent_s, call.received_s) for call in calls]


def _busy(call: pb.CallTrace) -> Interval:
    """The interval in which the engine worked on the call, assuming equal delays in both directions."""
    start_s = call.sent_s + _wire_s(call) / 2 + call.timing.waited_s
    return start_s, start_s + call.timing.computed_s


def _wire_s(call: pb.CallTrace) -> float:
    return call.received_s - call.sent_s - call.timing.waited_s - call.timing.computed_s


def _covered(parts: Iterable[Interval], whole: Interval) -> float:
    """Length of the part of `whole` that the union of `parts` covers."""
    covered_s, reached_s = 0.0, whole[0]
    for start_s, end_s in sorted(parts):
        start_s, end_s = max(start_s, reached_s), min(end_s, whole[1])
        covered_s += max(0.0, end_s - start_s)
        reached_s = max(reached_s, end_s)
    return covered_s
