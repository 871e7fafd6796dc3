"""What a policy decides: how a draft's tree is to grow, what of it to verify, whether to wait; and what it learns.

Knows shapes, chances, costs and times; must not know tokens. The policies are in `adaptive` and `named`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation import ROOT, USUAL_TAIL, Average, Measure, Part, TreeSpec, num_branches
from orchestrator.policy.policy import Found, RoundSeen
from orchestrator.policy.shared_estimates import SharedEstimates

PATIENCE = 2.0
"""Times the time it usually takes that a draft is waited for, where that is longer than the configured one."""
CATCH_UP = TreeSpec.chain(1)
"""Take in the text, and tell what may follow it: what a draft does out of its turn, where it drafts in turn."""


def kind_of(request: GenerationRequest) -> str:
    """Under which name what is seen of this request is learned: its acceptance follows another law than others'."""
    rule = request.rule
    return "rejection" if rule.needs_q else rule.name


class TreeView(Protocol):
    """What has grown below the last committed token, as `core.speculation.SpeculationTree` has it: no tokens."""

    @property
    def has_drafted(self) -> bool: ...

    def best(self, num_nodes: int, max_depth: int) -> Part: ...

    def first_chain(self, max_depth: int) -> Part: ...


class TreePolicy(ABC):
    """One session's; a policy adds what to verify and when to wait. Every method returns at once."""

    measure = Measure.MARGIN
    """Of how sure the draft is, as it tells it."""
    why = ""
    """Said in reports, for people: what the policy goes by."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, known: SharedEstimates) -> None:
        asked = request.max_draft_tokens
        self.kind = kind_of(request)
        self.max_depth = config.max_draft_tokens if asked is None else min(asked, config.max_draft_tokens)
        """Guesses in a row."""
        self.max_nodes = config.max_block_tokens
        """Of a block."""
        self._is_sampled = request.rule.needs_q
        self.is_in_turn = self._is_sampled or not config.pipelining
        """What is drawn is of use for one block, whose root has to be known."""
        self._timeout_s = config.draft_timeout_s
        self._known = known
        self._learned = known.kinds[self.kind]
        self._num_rows, self._num_passes = 1, 0
        """Of the draft, as it was told last."""
        self._is_open = True
        known.num_sessions += 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}, gamma {self.gamma}>"

    @property
    def gamma(self) -> int:
        """Guesses in a row at present."""
        return self.max_depth

    @property
    def lookups(self) -> Average:
        """What looked-up tokens have been worth."""
        return self._known.lookups

    # Growing

    def tree_spec(self, room: int, turn: int) -> TreeSpec | None:
        """How the draft is to grow, in a context that has `room` tokens left; None: not at all.

        `turn`: where it drafts in turn, the guesses in a row that the next block may have; 0 while the target works.
        """
        if min(room, self.max_depth) < 1:
            return None
        if not self.is_in_turn:  # below any outcome of a block as deep as may be lies another
            return self._going_on(min(room, 2 * self.max_depth + 1))
        if not turn:
            return CATCH_UP
        depth = min(room, turn, self.max_depth)
        return self._chain(depth) if self._is_sampled else self._in_turn(depth)

    def wants_turn(self) -> bool:
        """Whether to draft before the next block, where that is done in turn."""
        return True

    def _going_on(self, depth: int) -> TreeSpec:
        """Until the next verdict: as wide as a pass yields most for its time, over all sessions that share it."""
        costs = self._known.costs
        self._num_rows, self._num_passes = costs.rows_worth, 1
        rows = round(costs.num_drafting * self._num_rows)
        return TreeSpec(rows, depth, calibration=self._calibration, tail=USUAL_TAIL, measure=self.measure)

    @abstractmethod
    def _in_turn(self, depth: int) -> TreeSpec:
        """For one block, whose growth ends by itself."""

    def _chain(self, depth: int) -> TreeSpec:
        """Draws for one block. How long that takes must not depend on them: a block that is late is not used."""
        self._num_rows, self._num_passes = 1, depth
        return TreeSpec.chain(depth, self.measure)

    @property
    def _calibration(self) -> tuple[float, float]:
        """As `TreeSpec` has it."""
        return self._learned.calibration.shift, 1.0

    # Verifying

    @abstractmethod
    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """The nodes to verify next, parents first. Not where the draft samples: there each draw is asked about."""

    def keeps(self, confidences: Sequence[float]) -> bool:
        """Whether to verify the last of these draws, a chain of which those before it are verified.

        What follows a draw depends on it: to drop it for that would bias the output (docs/exactness.md, section 4). So
        nothing of what follows is shown.
        """
        return len(confidences) <= self.max_nodes

    @abstractmethod
    def is_worth_waiting(self, num_passes: int, *, has_drafted: bool) -> bool:
        """Whether to wait for the draft's next pass instead of verifying what was chosen just now.

        It has made `num_passes` since it was told of the last verdict. `has_drafted`: whether it has told of anything
        that may be verified. Asked only where drafting goes on meanwhile.
        """

    @property
    def num_outcomes(self) -> int:
        """Of the block in flight, for which the target is offered what to go on with: a policy's blocks are its own."""
        return 0

    def is_worth_going_on(self, gained: float, num_nodes: int, num_now: int) -> bool:  # noqa: ARG002
        """Whether the target should go on by itself with a block of `num_nodes` nodes, instead of waiting for what will
        have grown by then. `gained` of them are expected to be accepted; the block in flight has `num_now`.
        """
        return self.max_depth == 0

    # Waiting

    @property
    def pass_s(self) -> float:
        """Of the draft, as wide as it was told."""
        costs = self._known.costs
        return costs.draft_pass_s(costs.num_drafting * self._num_rows)

    @property
    def first_pass_s(self) -> float:
        """Until something grows below a token that the draft did not foresee: a pass is under way when it hears."""
        return 1.5 * self.pass_s + self._known.costs.draft_wire_s

    @property
    def patience_s(self) -> float:
        """How long the draft may take to answer before the round goes on without it."""
        return max(self._timeout_s, PATIENCE * self._known.costs.draft_s(self._num_rows, self._num_passes))

    # Resting

    @property
    def wants_rest(self) -> bool:
        """Whether the draft has grown for long enough what was not worth verifying."""
        return False

    def begin_drafting(self) -> None:  # noqa: B027  nothing to do unless a policy counts rounds
        """There is a draft from now on."""

    def rest(self) -> None:  # noqa: B027  others than adaptive never do
        """There is no draft for a while."""

    # Seeing

    def saw_round(self, seen: RoundSeen) -> None:
        known, shape, timing = self._known, seen.shape, seen.timing
        known.saw_verdict()
        if seen.found is not Found.NOT_ASKED:
            known.hits.see(seen.found is Found.HIT)
        if timing is not None:
            is_alone = (timing.num_rows, timing.num_passes) == (1 + len(shape), 1)
            branches = num_branches(shape.parents) if is_alone else 0
            known.verify.see(timing, seen.elapsed_s, branches, is_call=not seen.is_continued)
        first = {shape.parents[node]: node for node, rank in enumerate(shape.ranks) if rank == 0}
        judged = [node for place in (ROOT, *seen.path) if (node := first.get(place)) is not None]
        for node in judged:
            self._learn(shape.confidence[node], node in seen.path)
        if seen.unverified is not None:
            self._learn(*seen.unverified)

    def _learn(self, confidence: float, is_accepted: bool) -> None:
        """From a place of the text where the draft has told of a first candidate."""
        self._learned.accepted.see(is_accepted)
        if self.measure is Measure.MARGIN:
            self._learned.calibration.see(confidence, is_accepted)

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:  # noqa: B027  to rules that is all the same
        """A round, from verdict to verdict."""

    def saw_pass(self, timing: Timing) -> None:
        """One of the draft's."""
        self._known.draft.passes.see(timing.num_rows, timing.computed_s)

    def saw_draft(self, elapsed_s: float, timing: Timing | None) -> None:
        """An answer of the draft that had something to grow. How much may depend on what it drew: not told."""
        if timing is not None:
            self._known.draft.see(timing, elapsed_s)

    def close(self) -> None:
        """The session has ended."""
        self._known.num_sessions -= self._is_open
        self._is_open = False
