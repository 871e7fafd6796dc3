"""Makes a timeline from the traced calls of streams: slices on tracks, and arrows between them.

Knows the client's records; must not know how a timeline is written (`export`) or drawn (`picture`).

Each stream has three tracks: the orchestrator's rounds, the target's calls, and the draft's calls. A call is a round
trip, split by the engine's timing into waiting, computing and the rest, which is attributed to the wire, half of it
each way. Computing is split again, by rows and not by time, into kept and wasted rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from outrider_client import CallTrace, Chunk


class Party(StrEnum):
    ORCHESTRATOR = "orchestrator"
    TARGET = "target"
    DRAFT = "draft"


class SliceKind(StrEnum):
    """The kind of a slice; each has its colour."""

    ROUND = "round"
    IDLE = "idle"
    """Time in which the target has nothing to do for this stream."""
    CALL = "call"
    WIRE = "wire"
    QUEUE = "queue"
    COMPUTE = "compute"
    KEPT = "kept"
    WASTED = "wasted"


@dataclass(frozen=True, slots=True)
class Stream:
    """One traced stream, as its client received it."""

    name: str
    began_s: float
    """Seconds on a clock that all streams of a timeline share."""
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """One line of the timeline. Calls to a party that overlap in time have lanes of their own."""

    stream: int
    party: Party
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """A period on a track. Slices of a track are nested or disjoint."""

    track: Track
    kind: SliceKind
    name: str
    start_ns: int
    end_ns: int
    depth: int = 0
    """Number of slices around it."""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A block on its way from the draft call that made it to the verification that used it."""

    made: Slice
    used: Slice


@dataclass(frozen=True, slots=True)
class Timeline:
    """All slices and arrows. The first stream begins at 0."""

    streams: tuple[str, ...]
    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...]


def timeline(streams: Sequence[Stream]) -> Timeline:
    """The timeline of all calls that the streams' chunks report."""
    zero_s = min((stream.began_s for stream in streams), default=0.0)
    slices: list[Slice] = []
    arrows: list[Arrow] = []
    for index, stream in enumerate(streams):
        one = _StreamTimeline(index, stream, round((stream.began_s - zero_s) * 1e9))
        slices += one.slices()
        arrows += one.arrows()
    return Timeline(tuple(stream.name for stream in streams), tuple(slices), tuple(arrows))


class _StreamTimeline:
    """The calls of one stream, and the slice of each."""

    def __init__(self, index: int, stream: Stream, offset_ns: int) -> None:
        self._index = index
        self._offset_ns = offset_ns
        self._chunks = stream.chunks
        calls = [call for chunk in stream.chunks for call in chunk.trace]
        self._verified = [call for call in calls if call.call == "verify"]
        self._drafted = [call for call in calls if call.call != "verify"]
        self._outer = [*self._calls(Party.TARGET, self._verified), *self._calls(Party.DRAFT, self._drafted)]

    def slices(self) -> Iterator[Slice]:
        """Slices in an order in which parents come before their children."""
        yield from self._rounds()
        for call, outer in self._outer:
            yield outer
            yield from self._parts(call, outer)

    def arrows(self) -> Iterator[Arrow]:
        of = {id(call): outer for call, outer in self._outer}
        for call in self._drafted:
            if (user := self._user(call)) is not None:
                yield Arrow(of[id(call)], of[id(user)])

    def _ns(self, time_s: float) -> int:
        return self._offset_ns + round(time_s * 1e9)

    def _calls(self, party: Party, calls: Sequence[CallTrace]) -> Iterator[tuple[CallTrace, Slice]]:
        """Each call with its slice, in the first lane that is free."""
        free_from_ns: list[int] = []
        for call in sorted(calls, key=lambda call: (call.sent_s, call.received_s)):
            start_ns, end_ns = self._ns(call.sent_s), self._ns(call.received_s)
            lane = next((lane for lane, ns in enumerate(free_from_ns) if ns <= start_ns), len(free_from_ns))
            free_from_ns[lane : lane + 1] = [end_ns]
            track = Track(self._index, party, lane)
            yield call, Slice(track, SliceKind.CALL, self._name(call), start_ns, end_ns, facts=_facts(call))

    def _name(self, call: CallTrace) -> str:
        match call.call:
            case "verify" if call.guesses:
                return f"verify: {call.used} of {call.guesses} accepted"
            case "verify":
                return "prefill" if call is self._verified[0] else "plain step"
            case "growth" if call.used:
                return f"grew {call.guesses}: hit"
            case "growth":
                return f"grew {call.guesses}"
            case "block":
                return f"block of {call.guesses}" + ("" if self._user(call) is not None else ": late")
            case _:
                return "catch up"

    def _user(self, call: CallTrace) -> CallTrace | None:
        """The verification that used the block of a draft call, if one did.

        A call of kind growth reports itself whether it was used. A block is used unless it came too late, because the
        target was sent a message while the block was being drafted.
        """
        was_busy = any(call.sent_s <= verify.sent_s < call.received_s for verify in self._verified)
        is_of_use = call.used > 0 if call.call == "growth" else call.call == "block" and not was_busy
        later = [verify for verify in self._verified if verify.sent_s >= call.received_s]
        if not is_of_use or not call.guesses or not later:
            return None
        user = min(later, key=lambda verify: verify.sent_s)
        return user if user.guesses else None

    def _rounds(self) -> Iterator[Slice]:
        """Rounds from verdict to verdict, the first from the stream's start, and the target's idle time in each."""
        track, start_ns = Track(self._index, Party.ORCHESTRATOR), self._offset_ns
        for number, (verify, chunk) in enumerate(_verdicts(self._chunks)):
            sent_ns, end_ns = self._ns(verify.sent_s), self._ns(verify.received_s)
            num_tokens = len(chunk.token_ids)
            facts: dict[str, str | int | float] = {"text": chunk.text, "tokens": num_tokens, "accepted": verify.used}
            yield Slice(track, SliceKind.ROUND, f"round {number}: {num_tokens} tokens", start_ns, end_ns, 0, facts)
            if sent_ns > start_ns:
                yield Slice(track, SliceKind.IDLE, "target idle", start_ns, min(sent_ns, end_ns), 1)
            start_ns = end_ns

    def _parts(self, call: CallTrace, outer: Slice) -> Iterator[Slice]:
        """Wire, queue, computing, wire; nothing if the engine reported no timing."""
        timing = call.timing
        if timing is None:
            return
        wire_s = max(0.0, call.received_s - call.sent_s - timing.waited_s - timing.computed_s)
        start_ns = outer.start_ns
        for kind, duration_s in (
            (SliceKind.WIRE, wire_s / 2),
            (SliceKind.QUEUE, timing.waited_s),
            (SliceKind.COMPUTE, timing.computed_s),
            (SliceKind.WIRE, outer.end_ns),  # to the end, however the others were rounded
        ):
            end_ns = min(start_ns + round(duration_s * 1e9), outer.end_ns)
            if end_ns > start_ns:
                part = Slice(outer.track, kind, kind.value, start_ns, end_ns, 1)
                yield part
                if kind is SliceKind.COMPUTE:
                    yield from self._shares(call, part)
            start_ns = end_ns

    def _shares(self, call: CallTrace, computed: Slice) -> Iterator[Slice]:
        """Rows that were kept, then rows that were wasted, each as wide as its share of the rows."""
        num_kept, num_rows, unit = self._kept(call)
        if not num_rows:
            return
        border_ns = computed.start_ns + (computed.end_ns - computed.start_ns) * num_kept // num_rows
        if border_ns > computed.start_ns:
            name = f"kept {num_kept} of {num_rows} {unit}"
            yield Slice(computed.track, SliceKind.KEPT, name, computed.start_ns, border_ns, 2)
        if computed.end_ns > border_ns:
            name = f"wasted {num_rows - num_kept} of {num_rows} {unit}"
            yield Slice(computed.track, SliceKind.WASTED, name, border_ns, computed.end_ns, 2)

    def _kept(self, call: CallTrace) -> tuple[int, int, str]:
        """Rows kept, all rows, and their kind. Prefill and plain steps guess nothing, so they waste nothing."""
        if call.call == "verify":
            return call.used + 1, call.guesses + 1, "rows"  # the root's row gives the target's own token
        if call.call == "growth":
            return min(call.used, call.guesses), call.guesses, "nodes"
        return (call.guesses if self._user(call) is not None else 0), call.guesses, "nodes"


def _verdicts(chunks: Iterable[Chunk]) -> Iterator[tuple[CallTrace, Chunk]]:
    """Each verification with the chunk that reports it. Of several in one chunk, only the last keeps the tokens."""
    for chunk in chunks:
        verified = [call for call in chunk.trace if call.call == "verify"]
        for verify in verified[:-1]:
            yield verify, replace(chunk, text="", token_ids=(), guessed=(), logprobs=())
        for verify in verified[-1:]:
            yield verify, chunk


def _facts(call: CallTrace) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {"guesses": call.guesses, "used": call.used}
    if call.timing is not None:
        facts |= {
            "waited_ms": round(call.timing.waited_s * 1e3, 3),
            "computed_ms": round(call.timing.computed_s * 1e3, 3),
            "passes": call.timing.passes,
            "rows with company": call.timing.rows,
        }
    return facts
