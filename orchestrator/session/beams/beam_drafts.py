"""The draft's side of a beam search: one lease for each beam, and the guesses below all beams.

Each lease holds the text of one beam; after a step it follows the beam that shares most of its text. Drafting is in
turn: the draft grows a tree below each beam, then the target scores the likeliest nodes of all. Must not know the
target: nothing here can change the output.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from core.beams import Beam
from core.records import Call, CallTrace, DraftReply, DraftRequest, DraftUpdate, Missing, SequenceSpec, Stamp
from core.speculation import ROOT, USUAL_TAIL, TreeSpec
from core.text import TokenLog
from orchestrator.session import messages as m
from orchestrator.session.drafts.growth_check import CORRUPT, check_growth
from orchestrator.session.engine_view import EngineView, SessionText
from orchestrator.session.recorder import Recorder

logger = logging.getLogger(__name__)

FANOUT = 4
"""Children of a node that a draft's tree has at most."""
Guess = tuple[float, tuple[int, ...]]
"""Chance of an output, and its tokens."""
DEPTH_OF_ALL = 8
"""Sum of the depths of the beams' trees, unless the request has a depth. A step needs right guesses for all beams, and
deep guesses below one take the rows of the first ones below another. Worth 1.18x with 2 beams and 1.69x with 4 over
trees of this depth below each (`bench papers --only beams`)."""
LEAST_DEPTH = 2


def usual_depth(width: int) -> int:
    return max(LEAST_DEPTH, DEPTH_OF_ALL // width)


class BeamDraft:
    """One lease on the draft, and the beam that it follows."""

    def __init__(self, number: int, session_id: str, prompt: Sequence[int], spec: SequenceSpec) -> None:
        """`number`: of the lease, as in `LeaseDraft`."""
        self.number = number
        self.guesses: list[Guess] = []
        """Outputs below the beam, with their chances given the beam. Parents come first."""
        self.is_leased = False
        self._num_prompt = len(prompt)
        self._log = TokenLog(prompt)
        self._view = EngineView(SessionText(session_id, self._log, spec))
        self._growth = TreeSpec(1, 1)

    @property
    def awaited(self) -> Stamp | None:
        """The message that it has not answered yet."""
        return self._view.awaiting

    def leased(self, name: str, epoch: int) -> None:
        self.is_leased = True
        self._view.begin_lease(name, epoch)

    def left(self) -> None:
        self.is_leased, self._view.awaiting = False, None
        self.guesses = []

    def is_from(self, name: str, epoch: int) -> bool:
        return self.is_leased and (self._view.name, self._view.epoch) == (name, epoch)

    def num_shared(self, beam: Beam) -> int:
        """Number of the beam's tokens that its text has, too."""
        return self._log.common_prefix_len(self._num_prompt, beam.tokens)

    def grow(self, beam: Beam, growth: TreeSpec) -> DraftRequest:
        """Follow this beam, and grow a tree below it."""
        shared = self._num_prompt + self.num_shared(beam)
        self._log.truncate(shared)
        self._log.extend(beam.tokens[shared - self._num_prompt :])
        self._view.num_tokens = min(self._view.num_tokens, shared, len(self._log) - 1)
        self.guesses, self._growth = [], growth
        return self._request()

    def _request(self) -> DraftRequest:
        stamp, base, spec = self._view.next_header()
        return DraftRequest(stamp, base, self._log.since(base.num_tokens), self._growth, spec)

    def replied(self, reply: DraftReply, vocab_size: int) -> DraftRequest | None:
        """Take the guesses of the awaited reply; return a message that is sent again. Raises: one of `CORRUPT`."""
        if isinstance(reply, Missing) and self._view.must_resend(reply.held):
            return self._request()
        if not isinstance(reply, DraftUpdate):
            raise TypeError("it cannot go on")
        check_growth(reply, vocab_size, len(self._log), is_sampled=False)
        self._view.take(reply.held)
        self.guesses = self._guesses_of(reply)
        return None

    def late(self) -> None:
        """Go on without the awaited reply."""
        self._view.awaiting = None

    def _guesses_of(self, update: DraftUpdate) -> list[Guess]:
        nodes, beam = update.new_nodes, tuple(self._log.tokens[self._num_prompt :])
        found = {ROOT: (1.0, beam)}
        columns = zip(nodes.parents.tolist(), nodes.tokens.tolist(), nodes.chances.tolist(), strict=True)
        for number, (parent, token, chance) in enumerate(columns, nodes.first):
            above, tokens = found[parent]
            found[number] = above * chance, (*tokens, token)
        return list(found.values())[1:]


class BeamDrafts:
    """The draft's leases of one beam search."""

    def __init__(
        self,
        session_id: str,
        prompt: Sequence[int],
        spec: SequenceSpec,
        numbers: Sequence[int],
        vocab_size: int,
        recorder: Recorder,
    ) -> None:
        """`numbers`: those of the leases; none without a draft."""
        self._recorder = recorder
        self._all = [BeamDraft(number, session_id, prompt, spec.of_draft(None)) for number in numbers]
        self._vocab_size = vocab_size
        self._timeout_s = 0.0

    @property
    def has_lease(self) -> bool:
        return any(draft.is_leased for draft in self._all)

    @property
    def is_growing(self) -> bool:
        return any(draft.awaited is not None for draft in self._all)

    def begin(self) -> list[m.Command]:
        return [m.LeaseDraft(draft=draft.number) for draft in self._all]

    def close(self) -> list[m.Command]:
        return [m.ReleaseDraft(draft.number) for draft in self._all]

    def grow(self, beams: Sequence[Beam], depth: int, num_rows: int, timeout_s: float) -> list[m.Command]:
        """Grow a tree of this depth below each beam for which there is a lease, the best beams first."""
        growth = TreeSpec(num_rows, depth, num_passes=depth, fanout=FANOUT, tail=USUAL_TAIL, reports_all=True)
        free = [draft for draft in self._all if draft.is_leased and draft.awaited is None]
        commands: list[m.Command] = []
        for beam in beams[: len(free)]:
            draft = max(free, key=lambda each: each.num_shared(beam))
            free.remove(draft)
            commands.append(draft.grow(beam, growth))
        self._timeout_s = timeout_s
        return [*commands, *self._await()] if commands else []

    def _await(self) -> list[m.Command]:
        """Wait for the drafts that grow. The wait is for all, and ends with the lease of the message that it names."""
        growing = [draft.awaited for draft in self._all if draft.awaited is not None]
        return [m.Await(growing[-1], self._timeout_s)] if growing else []

    def handle(self, event: m.DraftEvent) -> list[m.Command]:
        match event:
            case m.DraftLeased():
                self._numbered(event.draft).leased(event.name, event.epoch)
            case m.DraftNotLeased():
                self._numbered(event.draft).left()
            case m.DraftLost():
                return self._leave(self._numbered(event.draft))
            case m.DraftReplied():
                return self._on_reply(event)
            case m.DraftLate():
                for draft in self._all:
                    draft.late()
        return []

    def _on_reply(self, event: m.DraftReplied) -> list[m.Command]:
        reply = event.reply
        draft = next((each for each in self._all if each.is_from(reply.stamp.lease, reply.stamp.epoch)), None)
        if draft is None or draft.awaited != reply.stamp:
            return []
        try:
            again = draft.replied(reply, self._vocab_size)
        except (*CORRUPT, KeyError) as error:
            logger.warning("a draft's growth is corrupt: %r", error)
            return self._leave(draft)
        if isinstance(reply, DraftUpdate):
            call = CallTrace(Call.BLOCK, event.sent_s, event.received_s, len(reply.new_nodes), timing=reply.timing)
            self._recorder.beam_grown(call)
        return [] if again is None else [again]

    def _leave(self, draft: BeamDraft) -> list[m.Command]:
        """Go on without this lease. The search is short: no other is asked for."""
        draft.left()
        return [m.ReleaseDraft(draft.number), *self._await()]

    def _numbered(self, number: int) -> BeamDraft:
        return next(draft for draft in self._all if draft.number == number)

    def guesses(self, beams: Sequence[Beam], max_nodes: int) -> list[tuple[int, ...]]:
        """The likeliest outputs below these beams: by the chance of a beam among all, times the draft's chances."""
        best, size = max(beam.score for beam in beams), len(beams[0].tokens)
        weight = {beam.tokens: math.exp(beam.score - best) for beam in beams}
        found = [
            (weight[above] * chance, tokens)
            for draft in self._all
            for chance, tokens in draft.guesses
            if (above := tokens[:size]) in weight
        ]
        found.sort(key=lambda each: -each[0])  # stable: of equals the parent comes first
        return [tokens for _, tokens in found[:max_nodes]]
