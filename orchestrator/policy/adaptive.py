"""Marginal control: a node, a wait or a row of the draft must gain more tokens than its time would yield otherwise.

The price of a second is `rate`, the current tokens per second of a session. Knows probabilities, costs and times; must
not know tokens. There is no plan and no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from core.config import SpeculationConfig
from core.records import GenerationRequest
from core.speculation import EMPTY_PART, Floats, Ints, Part, TreeSpec, fixed_shape
from orchestrator.policy.choice import TreeView
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.mode_choice import MeasuredRound, Mode
from orchestrator.policy.offers import REST_ROUNDS
from orchestrator.policy.policy import Found, RoundOutcome
from orchestrator.policy.shared_estimates import TRIAL_SHARE, SharedEstimates
from orchestrator.policy.tree_policy import TreePolicy

TRIAL_ROUNDS = 8
"""Number of trial rounds, drafted in turn, after a rest."""


class AdaptivePolicy(TreePolicy):
    """Verifies, waits and drafts if the gain is worth more than the time."""

    why = "at most, while guesses are worth it"
    _is_adaptive = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, known: SharedEstimates) -> None:
        super().__init__(request, config, known)
        self._num_idle = 0
        """Number of rounds in a row in which no grown node was worth verifying."""
        self._num_trials = 0
        """Remaining trial rounds: they draft in turn to learn, although plain decoding is forecast to be faster."""

    # Growing

    def tree_spec(self, context_left: int, turn: int) -> TreeSpec | None:
        if self.is_paused and min(context_left, self.max_depth) >= 1:
            return CATCH_UP  # ends the growth in progress
        if self._is_resting:
            self._is_resting = False
            is_tried = not self.is_in_turn or self._num_trials > 0
            why = "a trial after rest" if is_tried else "after rest, where it is forecast to pay"
            self._known.note(f"{self.kind}: gamma 0 -> {self.max_depth}, {why}", self.max_depth, self.max_nodes)
        return super().tree_spec(context_left, turn)

    def wants_turn(self) -> bool:
        """Whether drafting is forecast to be faster than plain decoding, or should be tried."""
        if self.is_paused:
            return False
        if self._forecast() == 0:
            self._num_trials -= 1
            if self._num_trials < 0:
                return False
        self._learned.idle_rounds = 0  # a session that stops drafting would be one pass ahead of the others
        return True

    def _forecast(self) -> int:
        """Return the number of draft passes with the most tokens per second if drafting and verification alternate; 0
        if plain decoding is faster."""
        return int(np.argmax(self._rates_in_turn()))

    def _rates_in_turn(self) -> list[float]:
        """Return the tokens per second by the number of draft passes, from 0.

        Source: Theorem 3.8 of Leviathan et al. 2023 (arXiv 2211.17192), with a probability for each depth and current
        costs.
        """
        costs, depth = self._known.costs, min(self.max_depth, self.max_nodes)
        rows = 1 if self._is_sampled and not self.draws_trees else costs.rows_worth
        tokens = 1.0 + np.cumsum(self._learned.depth_acceptance.path_prob(depth, self._first_chance))
        drafted = [tokens[num - 1] / costs.turn_s(num, rows, num) for num in range(1, depth + 1)]
        return [costs.plain_rate, *drafted]

    def _chain(self, depth: int) -> TreeSpec:
        return super()._chain(max(1, min(depth, self._forecast())))

    def _in_turn(self, depth: int) -> TreeSpec:
        """Grow for the number of passes that is forecast to yield most."""
        return self._tree(self._known.costs.rows_worth, depth, max(1, min(depth, self._forecast())))

    def _drawn_tree(self, depth: int) -> TreeSpec:
        """Draw a tree of the best forecast depth, with as many nodes as are worth their rows; or a chain."""
        depth = max(1, min(depth, self._forecast()))
        tree_spec = self._tree_of_draws(self._known.costs.rows_worth, depth)
        shape = fixed_shape(tree_spec, self.max_nodes)
        chain = self._first_chance ** np.arange(1.0, 1.0 + depth)
        gained = self.net(shape.path_prob, shape.branches() if self.branches_cost_time else None)
        if self.net(chain).max() >= gained.max():
            self._num_drawn = depth
            return self._chain(depth)
        self._num_drawn = max(1, int(np.argmax(gained)))
        return tree_spec

    @property
    def _first_chance(self) -> float:
        return self._learned.accepted.value

    # Verifying

    @property
    def branches_cost_time(self) -> bool:
        """Whether a branch of a block costs more than its rows."""
        return self._known.costs.branch_s > 0.0

    def net(self, path_prob: Floats, branches: Ints | None = None) -> Floats:
        """Return, for each n from 0, the tokens gained by the first n nodes minus the worth of the time to verify them.

        `path_prob` [N]: falling path probabilities. `branches` [N]: number of branches among the nodes up to each, None
        for none.  # [N + 1]
        """
        costs = self._known.costs
        seconds = costs.verify_times(len(path_prob))
        more_s = seconds - seconds[0]
        if branches is not None:
            more_s[1:] += costs.num_verifying * costs.branch_s * branches
        gained: Floats = np.append(0.0, np.cumsum(path_prob)) - self.rate * more_s
        return gained

    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """Return the likeliest nodes that are worth their rows."""
        if self.is_plain:
            return EMPTY_PART
        fitting = tree.best(min(max_nodes, self.max_nodes), min(max_depth, self.max_depth))
        gained = self.net(fitting.path_prob, fitting.branches() if self.branches_cost_time else None)
        if self.branches_cost_time:
            straight = fitting.straight()
            if (chain := self.net(straight.path_prob)).max() >= gained.max():
                fitting, gained = straight, chain
        return fitting.head(int(np.argmax(gained)))

    def is_worth_drawing(self, path_prob: Sequence[float]) -> bool:
        """Whether some number of further guesses gains, if each is as likely as this one. The cost of a pass rises in
        steps, so one more guess may lose where several gain."""
        num, max_num = len(path_prob), min(self.max_depth, self.max_nodes)
        before = path_prob[-2] if num > 1 else 1.0
        if num > max_num or before <= 0.0 or self.is_plain:
            return False
        ahead = path_prob[-1] * (path_prob[-1] / before) ** np.arange(max_num - num + 1.0)
        gained = self.net(np.append(path_prob[:-1], ahead))
        return bool(gained[num:].max() > gained[num - 1])

    def is_worth_asking(self, num_nodes: int, num_with: int) -> bool:
        """Whether the guesses that the answers yield gain more tokens than the time of the rows is worth."""
        costs = self._known.costs
        return self._learned.answers.are_worth_asking(
            self.rate * (costs.verify_s(num_with) - costs.verify_s(num_nodes))
        )

    # Waiting

    def is_worth_waiting(self, _num_passes: int, has_drafted: bool) -> bool:
        """Whether the draft's first guesses are worth more than the time until they arrive.

        Waiting for more nodes never pays: nodes that grow during the next verification are not lost, and a session that
        shares the target's passes would miss the pass of the others.
        """
        if has_drafted or self._known.costs.is_shared or self.is_paused:
            return False
        return self._late_chance > self.rate * self.first_pass_s

    @property
    def _late_chance(self) -> float:
        """Chance that a late draft guess is accepted and no guesser had it."""
        return self._learned.late_hits.value

    # Explanation

    def why_block(self, path_prob: Sequence[float], branches: int, tree: TreeView) -> str:
        shown = path_prob or tuple(tree.best(1, 1).path_prob)
        if self.is_plain:
            return "plain decoding makes more tokens a second, or is tried"
        if not shown and self.is_paused:
            return "drafting pauses, since rounds without it make more tokens a second, or are tried"
        if not shown:
            return "nothing is known of what may follow"
        costs, rate = self._known.costs, self.rate
        more_s = costs.verify_s(len(shown)) - costs.verify_s(0) + costs.num_verifying * costs.branch_s * branches
        price = f"{1e3 * more_s:.2f} ms more of the pass at {rate:.0f} tokens/s cost {rate * more_s:.2f}"
        subject = "" if path_prob else "the likeliest guess is "
        return f"{subject}worth {sum(shown):.2f} tokens, and {price}"

    def why_no_turn(self) -> str:
        plain, *drafted = self._rates_in_turn()
        return f"plain decoding is forecast to make {plain:.0f} tokens/s, drafting in turn {max(drafted):.0f}"

    def why_wait(self) -> str:
        if self.is_in_turn:
            return f"{self._num_passes} passes in turn are forecast to yield the most tokens a second"
        wait_ms, chance = 1e3 * self.first_pass_s, self._late_chance
        return (
            f"first guesses come in {wait_ms:.1f} ms, one stands with {chance:.2f}, a second is {self.rate:.0f} tokens"
        )

    # Rests

    @property
    def wants_rest(self) -> bool:
        return self._num_idle >= REST_ROUNDS

    def rest(self) -> str:
        super().rest()
        self._num_idle = 0
        self._num_trials = TRIAL_ROUNDS if self.is_in_turn and self._may_try() else 0
        costs = self._known.costs
        plain_ms, more_ms = (1e3 * costs.verify_s(num) for num in (0, 1))
        reason = (
            f"{self.kind}: gamma {self.max_depth} -> 0, no guess was worth its row for {REST_ROUNDS} rounds: "
            f"{costs.num_verifying:.1f} sessions, a verification {more_ms:.1f} ms with one each, "
            f"{plain_ms:.1f} ms without"
        )
        self._known.note(reason, 0, 0)
        return reason

    def _may_try(self) -> bool:
        """Whether a trial of rounds in turn is allowed, though a loss is forecast. Trials cost at most `TRIAL_SHARE`
        over all sessions."""
        plain, *drafted = self._rates_in_turn()
        lost_rounds = TRIAL_ROUNDS * max(0.0, 1.0 - max(drafted, default=0.0) / plain)
        if self._learned.untried_rounds * TRIAL_SHARE < lost_rounds:
            return False
        self._learned.untried_rounds = 0
        return True

    # Observations

    def begin_drafting(self) -> None:
        super().begin_drafting()
        self._num_idle = 0

    def observe_round(self, outcome: RoundOutcome) -> None:
        super().observe_round(outcome)
        self._learned.untried_rounds += 1
        if self.max_depth:  # sessions that never draft carry no information about guesses
            self._learned.idle_rounds = 0 if len(outcome.shape) else self._learned.idle_rounds + 1
        if self.is_in_turn and len(outcome.shape) > outcome.shape.num_looked_up:
            self._learned.depth_acceptance.observe(len(outcome.path), self._num_passes, self._first_chance)
        if outcome.late_hit is not None:
            self._learned.late_hits.observe(outcome.late_hit)
        if outcome.gained is not None:
            self._learned.answers.observe(outcome.gained)
        if outcome.shape.num_looked_up < len(outcome.shape) or self.is_paused:
            self._num_idle = 0
        elif self.is_in_turn or outcome.found is not Found.NOT_ASKED:
            self._num_idle += 1

    def observe_interval(self, round_: MeasuredRound) -> None:
        if not self.max_depth:
            return
        known = self._known
        known.observe_interval(self.kind, round_.num_tokens, round_.elapsed_s)
        if self._follows:
            return
        reason = self._choice.observe_round(round_, known.num_sessions, self._modes, known.max_plain_rate)
        if reason:
            depth, nodes = (0, 0) if self.is_paused else (self.max_depth, self.max_nodes)
            known.note(f"{self.kind}: drafting {'pauses' if self.is_paused else 'continues'}, {reason}", depth, nodes)

    @property
    def _modes(self) -> AbstractSet[Mode]:
        """Modes that this session has now. A draft counts once it has reported under its lease."""
        has_draft = self._has_reported and not self.is_without_draft
        found = {
            Mode.PLAIN: True,
            Mode.GUESSERS: self._has_guessers,
            Mode.HEAD: self._has_head,
            Mode.DRAFT: has_draft,
        }
        return frozenset(mode for mode, is_there in found.items() if is_there)
