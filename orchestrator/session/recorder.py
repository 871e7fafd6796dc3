"""The one observer of a session: it records what happens, and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from core.records import Call, CallTrace, Chunk, Timing
from core.speculation import UNRANKED, Part
from orchestrator.policy import Found
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.statistics import Statistics
from orchestrator.session.verdicts import JudgedBlock

MAX_LINES = 200
"""Maximum number of lines of an explanation. The last one says that no more follow."""
Reason = Callable[[], str]
"""Returns a reason as text. Called only if the client asked for explanations, since it takes time."""


class Recorder:
    """Statistics of one session. If the client asks, also a trace of the calls, and a line of explanation for each
    round."""

    def __init__(
        self, source_failures: Counter[str] | None = None, *, is_traced: bool = False, is_explained: bool = False
    ) -> None:
        """`source_failures`: failures of the guessers by source, which count them themselves."""
        self.stats = Statistics(Counter() if source_failures is None else source_failures)
        self._extra: dict[str, Recorder] = {}
        """Recorders of the extra drafts, by source."""
        self._began_s = 0.0
        """Start, in seconds on the orchestrator's clock. Traces count from here."""
        self._calls: list[CallTrace] | None = [] if is_traced else None
        """Calls to report with the next chunk."""
        self._last_pass: CallTrace | None = None
        """The draft's last pass, kept until the number of its guesses in the next block is known."""
        self._is_explained = is_explained
        self._lines: list[str] = []
        """Lines to report with the next chunk."""
        self._num_lines = self._num_rounds = 0
        self._notes: list[str] = []
        """Notes at the start of the line of the next block that is sent."""
        self._open = ""
        """Line of the round whose verdict is awaited."""

    def for_extra_draft(self, source: str) -> Recorder:
        """Return the recorder of an extra draft. The session reports only its failures."""
        return self._extra.setdefault(source, Recorder())

    def started(self, now_s: float) -> None:
        self._began_s = now_s

    # A round

    def target_leased(self, num_tokens: int) -> None:
        """Record that a newly leased target is sent the whole text, and the block that was being verified, if any."""
        self._open = self._open or f"prefill: a target takes in {num_tokens} tokens, and no guesses"

    def turn_skipped(self, reason: Reason) -> None:
        """Record that the draft, though in turn, does not draft before the next block."""
        self._note(reason)

    def draft_awaited(self, reason: Reason, timeout_s: float) -> None:
        self._note(lambda: f"waited for the draft, at most {1e3 * timeout_s:.0f} ms: {reason()}")

    def block_sent(self, part: Part, reason: Reason) -> None:
        if self._is_explained:
            self._begin_round("; ".join([*self._notes, f"{_text_of(part)}: {reason()}"]))
            self._notes.clear()

    def target_continued(self, part: Part) -> None:
        """Record that the target continued by itself with an offered block."""
        if self._is_explained:
            self._begin_round(f"the target went on by itself, as offered, with {_text_of(part)}")

    def block_judged(self, judged: JudgedBlock) -> None:
        block, verdict, times = judged.block, judged.verdict, (judged.sent_s, judged.received_s)
        drafted, accepted = block.credits(verdict.path)
        num_guesses, num_accepted = len(drafted), len(accepted)
        num_looked_up = block.shape.num_looked_up - (len(block) - num_guesses) - self._num_of_extra_drafts(block)
        self.stats.record_round(judged, drafted, accepted, num_looked_up)
        self.stats.record_verify(*times)
        if self._calls is not None:
            shown = verdict.timing, judged.verified
            self._calls.append(CallTrace(Call.VERIFY, *times, num_guesses, num_accepted, *shown))
        self._explain(f"{self._open}; {num_accepted} accepted" if num_guesses else self._open)
        self._open = ""

    def beams_extended(self, num_steps: int, num_live: int, num_ended: int, call: CallTrace) -> None:
        """Record a pass of a beam search, by which all its beams have become `num_steps` tokens longer."""
        self.stats.record_verify(call.sent_s, call.received_s)
        if self._calls is not None:
            self._calls.append(call)
        num_guesses, num_used = call.num_guesses, call.num_used
        self.stats.num_rounds += 1
        self.stats.num_draft_rounds += num_guesses > 0
        self.stats.num_drafted_tokens += num_guesses
        self.stats.num_accepted_tokens += num_used
        tokens = "1 token" if num_steps == 1 else f"{num_steps} tokens"
        guesses = f" with {num_guesses} guesses" if num_guesses else ""
        self._explain(
            f"pass {self.stats.num_rounds}{guesses}: {tokens} longer; {num_live} beams live, {num_ended} have ended"
        )

    def _num_of_extra_drafts(self, block: SourcedBlock) -> int:
        """Return the number of nodes that only extra drafts proposed."""
        nodes = zip(block.sources, block.shape.ranks, strict=True) if self._extra else ()
        return sum(source in self._extra and rank == UNRANKED for source, rank in nodes)

    def next_block_found(self, found: Found) -> None:
        self.stats.num_hits += found is Found.HIT
        self.stats.num_misses += found is Found.MISS

    # The draft

    def pass_made(self, num_grown: int, timing: Timing, received_s: float) -> None:
        """Record that a pass of the draft grew `num_grown` nodes."""
        began_s = received_s - timing.computed_s
        self.stats.record_draft(began_s, received_s)
        if self._calls is not None:
            self.guesses_used(0)
            self._last_pass = CallTrace(Call.GROWTH, began_s, received_s, num_grown, timing=timing)

    def guesses_used(self, num_guesses: int) -> None:
        """Record the number of the draft's guesses in the next block; 0 also if the draft is left."""
        last, self._last_pass = self._last_pass, None
        if last is not None and self._calls is not None:
            self._calls.append(replace(last, num_used=num_guesses))

    def draft_replied(self, call: CallTrace) -> None:
        """Record that the draft ended a message: a prefill, or growth for one block."""
        if self._calls is not None:
            self._calls.append(call)
        if call.call is Call.BLOCK:
            self.stats.record_draft(call.sent_s, call.received_s)

    def beam_grown(self, call: CallTrace) -> None:
        """Record growth below one beam. All beams grow at once, so the times are not added up as the draft's."""
        if self._calls is not None:
            self._calls.append(call)

    def draft_rested(self, reason: str) -> None:
        self._explain(f"the draft rests ({reason})")

    # Failures

    def reply_was_stale(self) -> None:
        self.stats.num_stale_replies += 1

    def draft_was_late(self, *, is_left: bool) -> None:
        """Record that the round goes on without the draft. `is_left`: the session also leaves the draft, which counts
        as one failure."""
        self.stats.num_draft_failures += not is_left
        self._note(lambda: "the draft did not answer in time")

    def draft_lost(self, reason: str) -> None:
        self.stats.num_draft_failures += 1
        self._explain(f"the draft was left, as {reason}; another is asked")

    def target_lost(self, reason: str, *, is_failure: bool) -> None:
        self.stats.num_target_failures += is_failure
        self._explain(f"the target was left ({reason}), and another is asked")

    # The explanation

    def _begin_round(self, text: str) -> None:
        self._num_rounds += 1
        self._open = f"round {self._num_rounds}: {text}"

    def _note(self, reason: Reason) -> None:
        if self._is_explained and (text := reason()) not in self._notes:
            self._notes.append(text)

    def _explain(self, line: str) -> None:
        """Add a line, up to `MAX_LINES`."""
        self._num_lines += self._is_explained
        if self._is_explained and self._num_lines <= MAX_LINES:
            is_last = self._num_lines == MAX_LINES
            self._lines.append(f"no more: {MAX_LINES} lines are explained of a stream" if is_last else line)

    # Reports

    def add_to(self, chunk: Chunk) -> Chunk:
        """Add the trace, the explanation and, to the last chunk, the statistics."""
        if self._calls is not None:
            chunk = replace(chunk, trace=tuple(map(self._since_begin, self._calls)), began_s=self._began_s)
            self._calls.clear()
        if self._lines:
            chunk = replace(chunk, explanation=tuple(self._lines))
            self._lines.clear()
        if chunk.finish_reason is None:
            return chunk
        num_failures = sum(recorder.stats.num_draft_failures for recorder in (self, *self._extra.values()))
        return replace(chunk, stats=replace(self.stats.snapshot(), num_draft_failures=num_failures))

    def _since_begin(self, call: CallTrace) -> CallTrace:
        return replace(call, sent_s=call.sent_s - self._began_s, received_s=call.received_s - self._began_s)


def _text_of(part: Part) -> str:
    if not len(part):
        return "no guesses"
    by_source = ", ".join(f"{name} {number}" for name, number in sorted(Counter(part.sources).items()))
    return f"{len(part)} {'guess' if len(part) == 1 else 'guesses'}, {part.depth} deep ({by_source})"
