"""What every pilot does, whatever its policy: learn from what it sees, be patient, look guesses up.

Knows shapes, ranks and times; must not know tokens.
"""

from __future__ import annotations

from core.config import SpeculationConfig
from core.records import GenerationRequest, Verification
from core.speculation import ROOT, ConfidenceFit, DepthRates, Measure, miss_curve, num_branches
from orchestrator.policy.policy import DraftSeen, Found, RoundSeen
from orchestrator.policy.shared_estimates import Doing, Knowledge

PATIENCE = 4.0
"""Times its usual pace that a draft is waited for."""
MAX_PATIENCE_S = 0.4
"""Not longer than this, unless the draft is usually that slow: a stream must not stall for a draft that has died."""
TOLD_RANKS = 8
"""Candidates of a place of which the draft is told how likely they are."""
USUAL_TAIL = tuple(miss_curve(rank - 1) - miss_curve(rank) for rank in range(1, TOLD_RANKS + 1))
"""Chances of the second candidate, the third, and so on, if it is not the first: the demo pair's, never learned."""
UNKNOWN_LOOKUP_TOKENS = 3
LEARNING_LOOKUPS = 8
"""Lookups that are verified before they are known well enough to be given up."""


def kind_of(request: GenerationRequest) -> str:
    """Under which name what is seen of this request is learned: its acceptance follows another law than others'."""
    if request.sampling.is_greedy:
        return "greedy"
    return "coupled" if request.verification is Verification.COUPLED else "rejection"


class WatchingPilot:
    """What the policies have in common; a policy adds what follows from it."""

    measure = Measure.CONFIDENCE
    """Of how sure the draft is, as it tells it."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        asked = request.max_draft_tokens
        self.kind = kind_of(request)
        self._is_sampled = self.kind == "rejection"
        self._max_depth = config.max_draft_tokens if asked is None else min(asked, config.max_draft_tokens)
        self._config = config
        self._known = knowledge
        self._accepted: DepthRates = knowledge.accepted(self.kind)
        self._fit: ConfidenceFit = knowledge.fit((self.kind, self.measure))
        self._asked_rows: tuple[int, ...] = ()
        self._num_rounds = 0
        self._is_open = True
        knowledge.num_sessions += 1
        if self._max_depth == 0 and not knowledge.reason:
            knowledge.begin(Doing(), f"{self.kind}: gamma 0, as the request or the settings say")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}, {self._num_rounds} rounds>"

    @property
    def wants_draft(self) -> bool:
        return self._max_depth > 0

    @property
    def patience_s(self) -> float:
        expected = self._known.lately.draft_s(self._asked_rows)
        return max(min(max(self._config.draft_timeout_s, PATIENCE * expected), MAX_PATIENCE_S), 1.5 * expected)

    def num_to_look_up(self, max_depth: int) -> int:
        """The chain of guesses that yields the most tokens for the time of its verification; none, if none does."""
        most = min(max_depth, self._max_depth)
        if not self._config.lookup or most < 1:
            return 0
        economy, survival = self._known.lately, self._known.lookups.survival(most)
        tokens, best, best_rate = 1.0, 0, 1.0 / economy.verify_s(0.0)
        for num_tokens, chance in enumerate(survival, start=1):
            tokens += chance
            rate = tokens / economy.verify_s(num_tokens)
            if rate > best_rate:
                best, best_rate = num_tokens, rate
        is_unknown = self._known.lookups.rates[0].seen < LEARNING_LOOKUPS
        return min(best or 1, UNKNOWN_LOOKUP_TOKENS, most) if is_unknown else best

    def saw_round(self, seen: RoundSeen) -> None:
        self._num_rounds += 1
        self._known.saw_verdict()
        self._learn(seen)
        if seen.found in (Found.HIT, Found.MISS):
            self._known.hits.see(seen.found is Found.HIT)
        if seen.timing is not None:
            is_alone = (seen.timing.num_rows, seen.timing.num_passes) == (1 + len(seen.shape), 1)
            branches = num_branches(seen.shape.parents) if is_alone else None
            self._known.verify.see(seen.timing, seen.elapsed_s, branches, is_call=not seen.is_continued)

    def saw_draft(self, seen: DraftSeen) -> None:
        if seen.timing is not None:
            self._known.draft.see(seen.timing, seen.elapsed_s)

    def saw_late_draft(self) -> None:
        rows = self._asked_rows
        mean = self._known.num_sharing * sum(rows) / max(len(rows), 1)
        self._known.draft.see_late(mean, len(rows), self.patience_s)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._known.num_sessions -= 1

    def _learn(self, seen: RoundSeen) -> None:
        """From each place of the path where the draft has told of a first candidate."""
        shape = seen.shape
        first = {shape.parents[node]: node for node, rank in enumerate(shape.ranks) if rank == 0}
        for depth, place in enumerate((ROOT, *seen.path), start=1):
            if (node := first.get(place)) is not None:
                is_accepted = node in seen.path
                self._accepted.see(depth, is_accepted)
                self._fit.see(shape.confidence[node], is_accepted)
        if seen.unverified is not None:
            sureness, is_right = seen.unverified
            self._accepted.see(len(seen.path) + 1, is_right)
            self._fit.see(sureness, is_right)
