"""A policy's decisions: how the draft tree grows, which nodes to verify, and whether to wait. Also learns from
outcomes.

Knows shapes, probabilities, costs and times; must not know tokens. The policies are in `adaptive` and `named`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation import (
    DRAFT,
    DRAWN_TAIL,
    PRIOR,
    ROOT,
    USUAL_TAIL,
    WITH_REPLACEMENT_TAIL,
    Measure,
    Part,
    SourceWorth,
    TreeSpec,
    logit,
    num_branches,
)
from orchestrator.policy.policy import Found, RoundOutcome
from orchestrator.policy.shared_estimates import SharedEstimates

TIMEOUT_PASSES = 2.0
"""The timeout is at least this multiple of a draft's usual time."""
PLAIN_STEPS, PAUSED_STEPS = 8, 2
"""Number of plain decoding steps offered ahead, so that the target waits for no message: if the session never drafts,
and while drafting pauses. More would be wasted when a stop string ends the output."""
CATCH_UP = TreeSpec.chain(1)
"""Growth of one pass: a draft that drafts in turn processes the text and reports the candidates after it."""


def kind_of(request: GenerationRequest) -> str:
    """Return the key for this request's learned estimates, since acceptance depends on the verification rule."""
    rule = request.rule
    return "rejection" if rule.needs_q and rule.is_lossless and not rule.takes_trees else rule.name


class TreeView(Protocol):
    """The shape of a draft tree, without tokens; implemented by `core.speculation.SpeculationTree`."""

    @property
    def has_drafted(self) -> bool: ...

    def best(self, num_nodes: int, max_depth: int) -> Part: ...

    def first_chain(self, max_depth: int) -> Part: ...


class TreePolicy(ABC):
    """One session's policy. Subclasses choose the nodes to verify and when to wait. No method blocks."""

    measure = Measure.MARGIN
    """Confidence measure that the draft reports."""
    why = ""
    """The policy's reason, shown in reports."""
    _takes_trees = True
    """Whether the policy may have trees verified."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, known: SharedEstimates) -> None:
        asked = request.max_draft_tokens
        self.kind = kind_of(request)
        self.max_depth = config.max_draft_tokens if asked is None else min(asked, config.max_draft_tokens)
        """Maximum depth of a block."""
        self.max_nodes = config.max_block_tokens
        """Maximum number of nodes in a block."""
        self._is_sampled = request.rule.needs_q
        self.is_in_turn = self._is_sampled or not config.pipelining
        """Whether drafting and verification alternate. Draws are usable for one block only, and its root must be known.
        """
        self.draws_trees = self._is_sampled and request.rule.takes_trees and self._takes_trees
        """Whether the draft draws trees. The number of nodes to verify is then fixed before the draws."""
        self._tail = WITH_REPLACEMENT_TAIL if request.rule.with_replacement else DRAWN_TAIL
        self._num_drawn = self.max_nodes
        self._timeout_s = config.draft_timeout_s
        self._known = known
        self._learned = known.kinds[self.kind]
        self._num_rows, self._num_passes = 1, 0
        """Rows and passes of the draft's last `TreeSpec`."""
        self.lacks_draft = False
        """Whether no draft is expected to report soon: each is lost, silent or resting. False at the start, before the
        first lease."""
        guesses = {DRAFT: False, "grammar": request.grammar is not None, "template": request.template is not None}
        sources = (
            *(request.guessers or config.guessers),
            "template",
        )  # "template" guesses whatever guessers the request names
        self._has_guessers = any(guesses.get(source, True) for source in sources)
        self._is_open, self._is_with_draft = True, False
        known.num_sessions += 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}, gamma {self.gamma}>"

    @property
    def gamma(self) -> int:
        """Current maximum depth of the draft's guesses."""
        return self.max_depth

    @property
    def max_grown_depth(self) -> int:
        """Maximum depth of the draft's tree: deep enough for a block below any outcome of the deepest block."""
        return 2 * self.max_depth + 1

    @property
    def sources(self) -> SourceWorth:
        """Measured worth of the guessers in requests of this kind."""
        return self._learned.sources

    # Growing

    def tree_spec(self, room: int, turn: int) -> TreeSpec | None:
        """Return how the draft should grow, with `room` tokens left in its context; None for no growth.

        `turn`: if it drafts in turn, the maximum depth of the next block; 0 while the target works.
        """
        if min(room, self.max_depth) < 1:
            return None
        if not self.is_in_turn:
            return self._going_on(min(room, self.max_grown_depth))
        if not turn:
            return CATCH_UP
        depth = min(room, turn, self.max_depth)
        if not self._is_sampled:
            return self._in_turn(depth)
        return self._drawn_tree(depth) if self.draws_trees else self._chain(depth)

    @property
    def is_paused(self) -> bool:
        """Whether drafting is paused for all sessions, including those that hold a lease."""
        return False

    def wants_turn(self) -> bool:
        """Whether to draft before the next block, if drafting is in turn."""
        return True

    def _going_on(self, depth: int) -> TreeSpec:
        """Grow until the next verdict, with the most productive width of a pass over all its sessions."""
        costs = self._known.costs
        self._num_rows, self._num_passes = costs.rows_worth, 1
        rows = round(costs.num_drafting * self._num_rows)
        return TreeSpec(rows, depth, calibration=self._calibration, tail=USUAL_TAIL, measure=self.measure)

    @abstractmethod
    def _in_turn(self, depth: int) -> TreeSpec:
        """Grow for one block; ends by itself."""

    def _chain(self, depth: int) -> TreeSpec:
        """Draw a chain for one block. The duration must not depend on the draws, since a late block is not used."""
        self._num_rows, self._num_passes = 1, depth
        return TreeSpec.chain(depth, self.measure)

    def _drawn_tree(self, depth: int) -> TreeSpec:
        """Draw a tree whose shape is fixed before the draws: each rank has the same probability everywhere."""
        self._num_rows, self._num_passes = self._drawn_rows(depth), depth
        return TreeSpec(
            self._num_rows,
            depth,
            calibration=(logit(self._first_chance), 0.0),
            tail=self._tail,
            num_passes=depth,
            fanout=1 + len(self._tail),
            measure=self.measure,
        )

    def _drawn_rows(self, depth: int) -> int:
        """Return the number of nodes fed per pass for a tree of draws: its average width."""
        return math.ceil(self.max_nodes / depth)

    @property
    def _first_chance(self) -> float:
        """Chance that the first draw below a node is accepted."""
        return PRIOR

    @property
    def _calibration(self) -> tuple[float, float]:
        """`TreeSpec.calibration`."""
        return self._learned.calibration.shift, 1.0

    # Verifying

    @abstractmethod
    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """Return the nodes to verify next, parents first. If the draft samples, `keeps` is used instead."""

    def choose_draws(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """Return the nodes to verify in a tree of draws. Their probabilities depend on position alone, so no draw
        affects the choice."""
        return tree.best(min(max_nodes, self._num_drawn), min(max_depth, self.max_depth))

    def keeps(self, confidences: Sequence[float]) -> bool:
        """Whether to verify the last of these draws, a chain whose earlier draws are verified.

        Later tokens depend on the draw, and dropping it because of them would bias the output (docs/exactness.md,
        section 4). Therefore no later values are passed.
        """
        return len(confidences) <= self.max_nodes

    def is_worth_drawing(self, path_prob: Sequence[float]) -> bool:
        """Whether a guesser should draw one more guess for the next block, the last in `path_prob`.

        Each value is a path probability, estimated before that guess was drawn. Nothing is cut later.
        """
        return len(path_prob) <= min(self.gamma, self.max_nodes)

    @abstractmethod
    def is_worth_waiting(self, num_passes: int, *, has_drafted: bool) -> bool:
        """Whether to wait for the draft's next pass instead of verifying the block just chosen.

        The draft has made `num_passes` since it got the last verdict. `has_drafted`: whether it has reported a node
        that may be verified. Called only in continuous drafting.
        """

    def is_worth_asking(self, num_nodes: int, num_with: int) -> bool:  # noqa: ARG002  a named policy always asks
        """Whether a guesser's questions are worth their rows: `num_with` nodes instead of `num_nodes`."""
        return True

    @property
    def may_offer(self) -> bool:
        """Whether the target should get an offer now. Checked at each message of a draft."""
        return self.num_outcomes > 0 or self._is_plain

    @property
    def plain_steps(self) -> int:
        """Number of steps without guesses that the target may make without a message in between.

        One while the draft is only silent, so that it can report again after the next step.
        """
        if self.max_depth == 0:
            return PLAIN_STEPS
        return PAUSED_STEPS if self.is_paused and self._is_plain else 1

    @property
    def _is_plain(self) -> bool:
        """Whether there are no guesses to wait for."""
        return self.max_depth == 0 or ((self.lacks_draft or self.is_paused) and not self._has_guessers)

    @property
    def num_outcomes(self) -> int:
        """Number of outcomes of the block in flight for which the target is offered a next block."""
        return 0

    def goes_on_plainly(self, tree: TreeView) -> bool:  # noqa: ARG002
        """Whether the target should continue by itself without guesses although there is a draft."""
        return False

    def is_offer_due(self, elapsed_s: float, num_now: int, *, is_continued: bool, is_more_to_come: bool) -> bool:  # noqa: ARG002
        """Whether an offer is useful `elapsed_s` seconds after the last verdict.

        The block in flight has `num_now` nodes. `is_continued`: the target continued with it by itself.
        `is_more_to_come`: whether the draft is still growing, so that another offer will follow.
        """
        return True

    def is_worth_a_plain_step(self, num_now: int) -> bool:  # noqa: ARG002
        """Whether the target should continue without guesses after an outcome without an offer, instead of waiting."""
        return self._is_plain

    # Explanation, if the client asked for one

    def why_block(self, path_prob: Sequence[float], branches: int, tree: TreeView) -> str:  # noqa: ARG002
        """Return why these nodes are verified, with the figures that decided it. `branches`: number of branches."""
        return f"policy {self.why}" if self.why else "as the policy has it"

    def why_no_turn(self) -> str:
        """Return why the draft is not used before the next block, if drafting is in turn."""
        return "the policy does not draft in turn"

    def why_wait(self) -> str:
        return "the block is to be drafted first" if self.is_in_turn else "the policy wants a longer block"

    @property
    def last_reason(self) -> str:
        """Reason of the last recorded change, in this session or another."""
        return self._known.reason

    # Waiting

    @property
    def pass_s(self) -> float:
        """Estimated seconds of a draft pass of the current width."""
        costs = self._known.costs
        return costs.draft_pass_s(costs.num_drafting * self._num_rows)

    @property
    def first_pass_s(self) -> float:
        """Estimated seconds until nodes grow below a token that the draft did not predict, given that a pass is in
        progress."""
        return 1.5 * self.pass_s + self._known.costs.draft_wire_s

    @property
    def timeout_s(self) -> float:
        """Seconds that the draft may take to answer before the round continues without it."""
        return max(self._timeout_s, TIMEOUT_PASSES * self._known.costs.draft_s(self._num_rows, self._num_passes))

    # Rests

    @property
    def wants_rest(self) -> bool:
        """Whether the draft should rest after a number of rounds without a node worth verifying."""
        return False

    def begin_drafting(self) -> None:
        """Record that the session has a lease on a draft."""
        self._known.num_with_draft += not self._is_with_draft
        self._is_with_draft = True

    def end_drafting(self) -> None:
        """Record that the session has no draft any more, for whatever reason."""
        self._known.num_with_draft -= self._is_with_draft
        self._is_with_draft = False

    def rest(self) -> None:  # noqa: B027  others than adaptive never do
        """Record that the session rests its draft for a while."""

    # Observations

    def observe_round(self, seen: RoundOutcome) -> None:
        known, shape, timing = self._known, seen.shape, seen.timing
        known.observe_verdict(timing)
        if seen.found is not Found.NOT_ASKED:
            known.hits.observe(seen.found is Found.HIT)
        if timing is not None:
            is_alone = (timing.num_rows, timing.num_passes) == (1 + len(shape), 1)
            branches = num_branches(shape.parents) if is_alone else 0
            known.verify.observe(timing, seen.elapsed_s, branches, is_call=not seen.is_continued)
        first = {shape.parents[node]: node for node, rank in enumerate(shape.ranks) if rank == 0}
        judged = [node for place in (ROOT, *seen.path) if (node := first.get(place)) is not None]
        for node in judged:
            self.observe_guess(shape.confidence[node], node in seen.path)
        if seen.unverified is not None:
            self.observe_guess(*seen.unverified)

    def observe_guess(self, confidence: float, is_accepted: bool) -> None:
        """Record whether the draft's first candidate at one position was the committed token."""
        self._learned.accepted.observe(is_accepted)
        if self.measure is Measure.MARGIN:
            self._learned.calibration.observe(confidence, is_accepted)

    def observe_interval(self, num_tokens: int, elapsed_s: float) -> None:  # noqa: B027  to rules that is all the same
        """Record one round, from verdict to verdict. `elapsed_s` in seconds."""

    def observe_pass(self, timing: Timing) -> None:
        """Record one pass of the draft."""
        self._known.observe_growth(timing)
        self._known.draft.passes.observe(timing.num_rows, timing.computed_s)

    def observe_draft(self, elapsed_s: float, timing: Timing | None) -> None:
        """Record a draft's reply with growth. Its size is not passed, since it may depend on the draws."""
        if timing is not None:
            self._known.observe_growth(timing)
            self._known.draft.observe(timing, elapsed_s)

    def close(self) -> None:
        self.end_drafting()
        self._known.num_sessions -= self._is_open
        self._is_open = False
