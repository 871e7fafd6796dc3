"""Control at the margin: what a node, a wait and a row of the draft are worth, at one price.

The price is `rate`, the tokens a second that a session makes at the moment. Knows chances, costs and times; must not
know tokens. There is no plan and no search.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from core.config import SpeculationConfig
from core.costs import Economy
from core.records import GenerationRequest
from core.speculation import EMPTY_PART, Floats, Ints, Measure, Part, Steady, best_reach
from orchestrator.policy.learning import USUAL_TAIL
from orchestrator.policy.policy import Found, RoundSeen
from orchestrator.policy.shared_estimates import Doing, Knowledge
from orchestrator.policy.tree_policy import TreePilot, TreeView

REST_ROUNDS = 32
"""In which nothing was worth verifying: then the draft rests."""
TRIAL_ROUNDS = 8
"""In which something has to be, after that."""
MIN_WAIT = 0.25
"""Of a pass: what is overdue is not there yet."""
OFFERED_OUTCOMES = 4
"""Of a block, with which the target may go on by itself."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Of a rest; each trial in vain doubles it."""


class MarginalPilot(TreePilot):
    """Verifies, waits for and drafts what is worth more than its time."""

    measure = Measure.LEAD

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._fitting = EMPTY_PART
        """What the last block could have had, the likeliest first."""
        self._num_idle = 0
        """Rounds in a row in which something had grown, and nothing of it was worth verifying."""
        self._pause_s = FIRST_PAUSE_S
        self._is_resting = False
        self._is_trial = False
        """Since a rest nothing has been worth verifying."""
        if self._max_depth:
            knowledge.begin(self.doing, f"{self.kind}: gamma {self._max_depth} at most, while guesses are worth it")

    @property
    def rate(self) -> float:
        """Tokens that a second is worth: what sessions make in one, and not less than plain decoding would."""
        tokens, seconds = self._known.usual_round(self.kind)
        return max(tokens / seconds, 1.0 / self._known.lately.verify_s(0.0))

    def steady(self, room: int, turn: int) -> Steady | None:
        if self._is_resting:
            self._is_resting, self._is_trial = False, True
            self._known.change(self.doing, f"{self.kind}: gamma 0 -> {self._max_depth}, a trial after rest")
        return super().steady(room, turn)

    def wants_turn(self) -> bool:
        """Whether drafting promises more than plain decoding, or is to be tried: by one session at a time."""
        return self._planned > 0 or (self._is_trial and self._known.may_try(self))

    @property
    def _planned(self) -> int:
        """Passes that promise most, 0 where plain decoding does."""
        economy = self._known.lately
        heads = tuple(round(chance, 2) for chance in self._accepted.chances(self._max_depth))
        return passes_worth(heads, economy, self.max_nodes, 1 if self._is_sampled else economy.rows_worth())

    def _num_planned(self, depth: int) -> int:
        return max(1, min(depth, self._planned))

    def _chain(self, depth: int) -> Steady:
        return super()._chain(self._num_planned(depth))

    def _in_turn(self, depth: int) -> Steady:
        """As many passes as are forecast to yield most."""
        rows, num_passes = self._known.lately.rows_worth(), self._num_planned(depth)
        self._asked_rows = (rows,) * num_passes
        return Steady(rows, depth, sureness=self._sureness, tail=USUAL_TAIL, num_passes=num_passes)

    @property
    def minds_branches(self) -> bool:
        """Whether a branch of a block costs more than its rows."""
        return self._known.lately.branch_s > 0.0

    def net(self, reach: Floats, branches: Ints | None = None) -> Floats:
        """For each n from 0 on: tokens that the first n nodes gain, less what the time to verify them would yield.

        `reach` [N]: their chances, falling; `branches` [N]: of the nodes up to each, None for none.  # [N + 1]
        """
        seconds = self._seconds(len(reach), branches)
        gained: Floats = self.rate * (seconds[0] - seconds)
        gained[1:] += reach.cumsum()
        return gained

    def _seconds(self, num_nodes: int, branches: Ints | None) -> Floats:
        """Of a round with a block of 0 to `num_nodes` nodes, but for what is the same for all blocks."""
        economy = self._known.lately
        if not self.is_in_turn and branches is None:
            return economy.verify_times(num_nodes)
        more = [0, *branches.tolist()] if branches is not None else [0] * (num_nodes + 1)
        if self.is_in_turn:
            return np.array([economy.in_turn_s(float(n), self._asked_rows, float(m)) for n, m in enumerate(more)])
        return np.array([economy.verify_s(float(n), float(m)) for n, m in enumerate(more)])

    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """The likeliest nodes that are worth their rows."""
        fitting = tree.best(min(max_nodes, self.max_nodes), min(max_depth, self._max_depth))
        gained = self.net(fitting.reach, fitting.branches() if self.minds_branches else None)
        if self.minds_branches:
            straight = fitting.straight()
            if (chain := self.net(straight.reach)).max() >= gained.max():
                fitting, gained = straight, chain
        self._fitting = fitting
        return fitting.head(int(np.argmax(gained)))

    def is_worth_waiting(self, tree: TreeView, max_depth: int, next_s: float, num_passes: int) -> bool:  # noqa: ARG002
        if self._known.lately.is_shared:
            return False  # who waits misses the others' pass of the target, and has to wait for the next
        reach = self._fitting.reach
        least = float(reach[-1]) if len(reach) >= self.max_nodes else 0.0  # else it has no place in the block
        open_reach = tree.open_reach(min(max_depth, self._max_depth), least)
        if self.minds_branches:
            open_reach = open_reach[:1]  # a chain goes on at its end
        return self.adds_enough(reach, open_reach, next_s)

    def adds_enough(self, reach: Floats, open_reach: Floats, next_s: float) -> bool:
        """Whether the draft's next pass, in `next_s`, adds more to the best block than the time would yield.

        `reach`: of the nodes that a block could have now; `open_reach`: of the places where it goes on next, each of
        which gets one more node, as likely as first candidates are on the whole.
        """
        price = self.rate * max(next_s, MIN_WAIT * self.pass_s)
        if price >= 1.0:
            return False  # the places exclude each other: a pass adds one token at most
        following = self._accepted.chances(1)[0] * open_reach[: self._num_rows]
        grown = np.sort(np.concatenate([reach, following]))[::-1][: self.max_nodes]
        return bool(self.net(grown).max() - self.net(reach).max() > price)

    @property
    def num_outcomes(self) -> int:
        """None where the target is nearer than two passes of the draft take: the one that is under way when the offer
        is made, and the one before it, of which the offer does not know yet, come too late. And none where passes are
        shared: who of the others waits for a block holds up all. Who has no draft for a while always goes on.
        """
        known = self._known
        is_far = known.verify.wire_s > 2.0 * self.pass_s and not self.is_in_turn
        return OFFERED_OUTCOMES if self._is_resting or (is_far and not known.lately.is_shared) else 0

    def is_worth_going_on(self, gained: float, num_nodes: int, num_now: int) -> bool:
        """Whether it makes more of its time than a round as usual, with the way to the target and back."""
        if not self.num_outcomes:
            return super().is_worth_going_on(gained, num_nodes, num_now)
        economy = self._known.lately
        as_usual = self._known.usual_round(self.kind)[0] - self.rate * economy.verify_s(num_now)
        seconds = economy.verify_s(num_nodes) - economy.verify_wire_s
        return 1.0 + gained - self.rate * seconds >= min(as_usual, 0.0)

    @property
    def wants_rest(self) -> bool:
        """Whether the draft has grown for long enough what was not worth verifying."""
        return self._num_idle >= REST_ROUNDS

    def rest(self) -> float:
        """Seconds to go without a draft. What it grows after that has to be of use sooner, or it rests for longer."""
        pause_s, self._pause_s = self._pause_s, min(2.0 * self._pause_s, MAX_PAUSE_S)
        self._known.tried(self)
        self._num_idle, self._is_resting = REST_ROUNDS - TRIAL_ROUNDS, True
        economy = self._known.lately
        plain_ms, more_ms = (1e3 * economy.verify_s(num) for num in (0.0, 1.0))
        why = (
            f"no guess was worth its row for {REST_ROUNDS} rounds: {economy.num_verifying:.1f} sessions, a verification"
        )
        self._known.change(
            Doing(),
            f"{self.kind}: gamma {self._max_depth} -> 0, {why} {more_ms:.1f} ms with one each, "
            f"{plain_ms:.1f} ms without",
        )
        return pause_s

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        if seen.shape.num_looked_up < len(seen.shape):
            self._num_idle, self._pause_s, self._is_trial = 0, FIRST_PAUSE_S, False
        elif self.is_in_turn or seen.found is not Found.NOT_ASKED:
            self._num_idle += 1

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """A round, from verdict to verdict."""
        self._known.saw_interval(self.kind, num_tokens, elapsed_s)

    def close(self) -> None:
        super().close()
        self._known.tried(self)


@lru_cache(maxsize=256)
def passes_worth(heads: tuple[float, ...], economy: Economy, max_nodes: int, wide: int) -> int:
    """Passes of the draft, of `wide` rows but for the first, after which a round in turn makes most tokens a second; 0
    where plain decoding does. `heads`: chances of first candidates by depth; `max_nodes`: of a block.
    """
    best, best_rate = 0, 1.0 / economy.verify_s(0.0)
    for num_passes in range(1, len(heads) + 1):
        tail = USUAL_TAIL if wide > 1 else ()
        reach = best_reach(heads[:num_passes], tail, max_nodes)
        tokens = 1.0 + np.append(0.0, np.cumsum(reach))
        rows = (1, *(wide,) * (num_passes - 1))
        seconds = np.array([economy.in_turn_s(float(num), rows) for num in range(len(tokens))])
        if (rate := (tokens / seconds).max()) > best_rate:
            best, best_rate = num_passes, rate
    return best
