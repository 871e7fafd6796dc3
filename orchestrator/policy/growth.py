"""Growth: how far and wide the draft guesses, and how long that takes.

Knows limits, costs and times; must not know tokens.
"""

from __future__ import annotations

import math

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation import (
    DRAFT,
    DRAWN_TAIL,
    PRIOR,
    USUAL_TAIL,
    WITH_REPLACEMENT_TAIL,
    Measure,
    SourcePrecision,
    TreeSpec,
    logit,
)
from orchestrator.policy.mode_choice import Mode
from orchestrator.policy.shared_estimates import SharedEstimates

TIMEOUT_PASSES = 2.0
"""The timeout is at least this multiple of a draft's usual time."""
CATCH_UP = TreeSpec.chain(1)
"""Growth of one pass: a draft that drafts in turn processes the text and reports the candidates after it."""


def kind_of(request: GenerationRequest) -> str:
    """Return the key for this request's learned estimates, since acceptance depends on the verification rule."""
    rule = request.rule
    return "rejection" if rule.needs_q and rule.is_lossless and not rule.takes_trees else rule.name


class Growth:
    """The limits and the draft of one session."""

    measure = Measure.MARGIN
    """Confidence measure that the draft reports."""
    _takes_trees = True
    """Whether the policy may have trees verified."""
    _is_adaptive = False
    """Whether measured speed may pause drafting, and decide on offers of guesses to the target."""

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
        self._choice, self._follows = self._learned.choice, False
        self._num_rows, self._num_passes = 1, 0
        """Rows and passes of the draft's last `TreeSpec`."""
        self.is_without_draft = False
        """Whether every draft is lost, silent or resting, so no report is expected soon. False before the first
        lease."""
        guesses = {
            DRAFT: False,
            "head": False,
            "grammar": request.grammar is not None,
            "template": request.template is not None,
        }
        sources = (*(request.guessers or config.guessers), "template")  # a template guesses even if it is not named
        self._has_guessers = any(guesses.get(source, True) for source in sources)
        self._has_head = False
        """Whether a head in the target's engine guesses for this session."""
        self._is_open, self._is_drafting, self._is_resting = True, False, False
        self._has_reported = False
        """Whether the draft has grown something under its lease."""
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
    def sources(self) -> SourcePrecision:
        """Measured worth of the guessers in requests of this kind."""
        return self._learned.sources

    @property
    def num_sharing(self) -> float:
        """Number of sessions that share the target's engine."""
        return self._known.num_sharing

    @property
    def is_paused(self) -> bool:
        """Whether drafting is paused for all sessions of this kind, including those that hold a lease."""
        return self._is_adaptive and self._choice.limit < Mode.DRAFT

    def expect_head(self, *, is_there: bool) -> None:
        """Record whether a head in the target's engine guesses for this session."""
        self._has_head = is_there

    @property
    def uses_head(self) -> bool:
        """Whether the head in the target's engine, if any, guesses for sessions of this kind."""
        return not self._is_adaptive or self._choice.limit >= Mode.HEAD

    @property
    def is_plain(self) -> bool:
        """Whether sessions of this kind decode without guesses, because that is faster or being tried."""
        return self._is_adaptive and self._choice.limit is Mode.PLAIN

    # Specifications of trees

    def tree_spec(self, context_left: int, turn: int) -> TreeSpec | None:
        """Return how the draft should grow, with `context_left` tokens left in its context; None for no growth.

        `turn`: if drafting is in turn, maximum depth of the next block; 0 while the target works.
        """
        if min(context_left, self.max_depth) < 1:
            return None
        if not self.is_in_turn:
            return self._going_on(min(context_left, self.max_grown_depth))
        if not turn:
            return CATCH_UP
        depth = min(context_left, turn, self.max_depth)
        if not self._is_sampled:
            tree_spec = self._in_turn(depth)
        else:
            tree_spec = self._drawn_tree(depth) if self.draws_trees else self._chain(depth)
        self._num_rows, self._num_passes = tree_spec.rows_per_pass, tree_spec.num_passes
        return tree_spec

    def wants_turn(self) -> bool:
        """Whether to draft before the next block, if drafting is in turn."""
        return True

    def why_no_turn(self) -> str:
        """Return why the draft is not used before the next block, if drafting is in turn."""
        return "the policy does not draft in turn"

    def _going_on(self, depth: int) -> TreeSpec:
        """Grow until the next verdict, with the width of a pass, over all its sessions, that yields most."""
        costs = self._known.costs
        self._num_rows, self._num_passes = costs.rows_worth, 1
        rows = round(costs.num_drafting * self._num_rows)
        return TreeSpec(rows, depth, calibration=self._calibration, tail=USUAL_TAIL, measure=self.measure)

    def _in_turn(self, depth: int) -> TreeSpec:
        """Grow for one block; ends by itself. Each pass has the average width of the largest block."""
        return self._tree(math.ceil(self.max_nodes / depth), depth, depth)

    def _tree(self, num_rows: int, depth: int, num_passes: int) -> TreeSpec:
        return TreeSpec(num_rows, depth, calibration=self._calibration, tail=USUAL_TAIL, num_passes=num_passes)

    def _chain(self, depth: int) -> TreeSpec:
        """Draw a chain for one block. The duration must not depend on the draws, since a late block is not used."""
        return TreeSpec.chain(depth, self.measure)

    def _drawn_tree(self, depth: int) -> TreeSpec:
        """Draw a tree for one block, each pass with the average width of the largest block."""
        return self._tree_of_draws(math.ceil(self.max_nodes / depth), depth)

    def _tree_of_draws(self, num_rows: int, depth: int) -> TreeSpec:
        """Draw a tree whose shape is fixed before the draws: each rank has the same probability everywhere."""
        return TreeSpec(
            num_rows,
            depth,
            calibration=(logit(self._first_chance), 0.0),
            tail=self._tail,
            num_passes=depth,
            fanout=1 + len(self._tail),
            measure=self.measure,
        )

    @property
    def _first_chance(self) -> float:
        """Chance that the first draw below a node is accepted."""
        return PRIOR

    @property
    def _calibration(self) -> tuple[float, float]:
        return self._learned.calibration.shift, 1.0

    # Durations

    @property
    def pass_s(self) -> float:
        """Estimated seconds of a draft pass of the current width."""
        costs = self._known.costs
        return costs.draft_pass_s(costs.num_drafting * self._num_rows)

    @property
    def first_pass_s(self) -> float:
        """Estimated seconds until nodes grow below a token that the draft did not predict. A pass is in progress
        then."""
        return 1.5 * self.pass_s + self._known.costs.draft_wire_s

    @property
    def timeout_s(self) -> float:
        """Seconds that the draft may take to answer before the round continues without it."""
        return max(self._timeout_s, TIMEOUT_PASSES * self._known.costs.draft_s(self._num_rows, self._num_passes))

    def follow(self, first: Growth) -> None:
        """Pause whenever the policy of the session's first draft does."""
        self._choice, self._follows = first._choice, True

    def observe_pass(self, timing: Timing) -> None:
        self._has_reported = True
        self._known.observe_growth(timing)
        self._known.draft.passes.observe(timing.num_rows, timing.computed_s)

    def observe_draft(self, elapsed_s: float, timing: Timing | None) -> None:
        """Record a draft's reply with growth. Its size is not passed, since it may depend on the draws."""
        self._has_reported = True
        if timing is not None:
            self._known.observe_growth(timing)
            self._known.draft.observe(timing, elapsed_s)

    # The draft's lease

    def begin_drafting(self) -> None:
        """Record that the session has a lease on a draft."""
        self._known.num_with_draft += not self._is_drafting
        self._is_drafting = True

    def end_drafting(self) -> None:
        """Record that the session has no draft any more, for whatever reason."""
        self._known.num_with_draft -= self._is_drafting
        self._is_drafting = self._has_reported = False

    def observe_silence(self, *, is_silent: bool) -> None:
        """Record whether every draft of the session is lost, silent or resting."""
        self.is_without_draft = is_silent

    @property
    def wants_rest(self) -> bool:
        """Whether the draft should rest after a number of rounds without a node worth verifying."""
        return False

    def rest(self) -> str:
        """Record that the session rests its draft for a while. Return why."""
        self._is_resting = True
        return "the policy rests it"

    def close(self) -> None:
        self.end_drafting()
        self._known.num_sessions -= self._is_open
        self._is_open = False
