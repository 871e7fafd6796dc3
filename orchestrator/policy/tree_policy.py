"""What a pilot decides where a draft grows one tree for a session: how it is to grow, what to verify, whether to wait.

Knows shapes, chances, costs and times; must not know tokens. `marginal` and `named` are the rules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation import DepthRates, Floats, Part, Steady
from orchestrator.policy.learning import USUAL_TAIL, WatchingPilot
from orchestrator.policy.policy import RoundSeen
from orchestrator.policy.shared_estimates import Doing, Knowledge

CATCH_UP = Steady.chain(1)
"""Take in the text, and tell what may follow it: what a draft does out of its turn, where it drafts in turn."""


class TreeView(Protocol):
    """What has grown below the last committed token, as `core.speculation.SpeculationTree` has it: no tokens."""

    @property
    def has_drafted(self) -> bool: ...

    def best(self, num_nodes: int, max_depth: int) -> Part: ...

    def first_chain(self, max_depth: int) -> Part: ...

    def open_reach(self, max_depth: int, least: float = 0.0) -> Floats: ...


class TreePilot(WatchingPilot):
    """One session's; a policy adds what to verify and when to wait."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self.is_in_turn = self._is_sampled or not config.pipelining
        """What is drawn is of use for one block, whose root has to be known."""
        self._num_rows = 1

    @property
    def max_depth(self) -> int:
        """Guesses in a row."""
        return self._max_depth

    @property
    def max_nodes(self) -> int:
        """Of a block."""
        return self._config.max_block_tokens

    @property
    def lookups(self) -> DepthRates:
        """What looked-up tokens have been worth."""
        return self._known.lookups

    @property
    def doing(self) -> Doing:
        """For people."""
        return Doing(self._max_depth, self.max_nodes)

    # Growing

    def steady(self, room: int, turn: int) -> Steady | None:
        """How the draft is to grow, in a context that has `room` tokens left; None: not at all.

        `turn`: where it drafts in turn, the guesses in a row that the next block may have; 0 while the target works.
        """
        if min(room, self._max_depth) < 1:
            return None
        if not self.is_in_turn:  # below any outcome of a block as deep as may be lies another
            return self._going_on(min(room, 2 * self._max_depth + 1))
        if not turn:
            return CATCH_UP
        depth = min(room, turn, self._max_depth)
        return self._chain(depth) if self._is_sampled else self._in_turn(depth)

    def wants_turn(self) -> bool:
        """Whether to draft before the next block, where that is done in turn."""
        return True

    def _going_on(self, depth: int) -> Steady:
        """Until the next verdict: as wide as a pass yields most for its time, over all sessions that share it."""
        self._num_rows = self._known.lately.rows_worth()
        rows = round(self._known.num_sharing_drafts * self._num_rows)
        self._asked_rows = (rows,)
        return Steady(rows, depth, sureness=self._sureness, tail=USUAL_TAIL, measure=self.measure)

    @abstractmethod
    def _in_turn(self, depth: int) -> Steady:
        """For one block, whose growth ends by itself."""

    def _chain(self, depth: int) -> Steady:
        """Draws for one block. How long that takes must not depend on them: a block that is late is not used."""
        self._asked_rows = (1,) * depth
        return Steady.chain(depth, self.measure)

    @property
    def _sureness(self) -> tuple[float, float]:
        return self._fit.line()

    # Verifying

    @abstractmethod
    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """The nodes to verify next, parents first. Not where the draft samples: there each draw is asked about."""

    def keeps(self, leads: Sequence[float]) -> bool:
        """Whether to verify the last of these draws, a chain of which those before it are verified.

        What follows a draw depends on it: to drop it for that would bias the output (docs/exactness.md, section 4). So
        nothing of what follows is shown.
        """
        return len(leads) <= self.max_nodes

    @abstractmethod
    def is_worth_waiting(self, tree: TreeView, max_depth: int, next_s: float, num_passes: int) -> bool:
        """Whether to wait for the draft's next pass, in `next_s`, instead of verifying what was chosen just now.

        It has made `num_passes` since it was told of the last verdict. Asked only where drafting goes on meanwhile.
        """

    @property
    def num_outcomes(self) -> int:
        """Of the block in flight, for which the target is offered what to go on with: a policy's blocks are its own."""
        return 0

    def is_worth_going_on(self, gained: float, num_nodes: int, num_now: int) -> bool:  # noqa: ARG002
        """Whether the target should go on by itself with a block of `num_nodes` nodes, instead of waiting for what will
        have grown by then. `gained` of them are expected to be accepted; the block in flight has `num_now`.
        """
        return self._max_depth == 0

    @property
    def pass_s(self) -> float:
        """Of the draft, as wide as it was told."""
        return self._known.draft.passes(self._asked_rows[0] if self._asked_rows else 1.0)

    @property
    def first_pass_s(self) -> float:
        """Until something grows below a token that the draft did not foresee: a pass is under way when it hears."""
        return 1.5 * self.pass_s + self._known.draft.wire_s

    # Resting

    @property
    def wants_rest(self) -> bool:
        """Whether the draft has grown for long enough what was not worth verifying."""
        return False

    def rest(self) -> float:
        """Seconds to go without a draft."""
        raise NotImplementedError(f"{type(self).__name__} never rests")

    # Seeing

    def saw_round(self, seen: RoundSeen) -> None:
        """What is learned from it is learned when the next block is on its way."""
        learn = super().saw_round
        self._known.later(lambda: learn(seen))

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """A round, from verdict to verdict."""

    def saw_pass(self, timing: Timing) -> None:
        """One of the draft's."""
        self._known.draft.passes.see(timing.num_rows, timing.computed_s)
