"""Offers: whether and when to offer the target blocks with which it may continue by itself after the awaited verdict.

Knows costs and times; must not know tokens.
"""

from __future__ import annotations

from orchestrator.policy.choice import Choice, TreeView

PLAIN_STEPS = 8
"""Number of plain decoding steps offered ahead, so that the target need not wait for messages, if the session does not
guess. More would be wasted when a stop string ends the output."""
REST_ROUNDS = 32
"""Rounds in a row without a node worth verifying, after which the draft rests. Resting earns no tokens, but frees the
draft for other sessions."""
QUIET_ROUNDS = 4
"""The same for guessers that guess without a draft and do not share passes. What they find then comes a round late."""
OFFERED_OUTCOMES = 16
"""Number of outcomes of a block for which the target is offered a next block. Simulated, with the target 10 ms away
each way: worth 1.03 to 1.07 compared with four outcomes, if its pass takes 25 or 60 ms (adr/offers)."""
OFFER_PASSES = 2.0
"""Half-width, in draft passes, of the window around the expected verdict in which offers are made. Paced 70B and 1B, 10
ms away each way: worth 1.13 compared with an offer after each pass (adr/offers)."""
MIN_OFFER_WAY_S = 0.0025
"""Minimum round trip to the target, in seconds, for which guesses are offered: an offer takes the orchestrator 1 ms.
Without this limit a recorded 8B and 0.5B on one machine reach 0.6 to 0.99 of the tokens per second."""


class Offers(Choice):
    """Offers plain steps while there are no guesses to wait for, and guesses if they pay."""

    _goes_plainly: bool | None = None
    """Whether this round goes on without guesses; None until computed."""

    @property
    def may_offer(self) -> bool:
        """Whether the target should get an offer now. Checked at each message of a draft."""
        return self.num_outcomes > 0 or self._has_nothing or self._is_idle

    @property
    def num_outcomes(self) -> int:
        """Number of outcomes of the block in flight for which the target is offered a next block; 0 if none pays.

        Offers do not pay if passes are shared, because one session that waits for a block delays all. Unless every
        draft is silent, they do not pay either if drafting is in turn, or if the round trip to the target is shorter
        than a draft pass (nodes of the pass in progress would arrive too late) or than the time to make a round's
        offers. During a rest, offers always pay.
        """
        if not self._is_adaptive or self.is_plain:
            return 0
        costs = self._known.costs
        is_far = costs.verify_wire_s > max(self.pass_s, MIN_OFFER_WAY_S) and not self.is_in_turn
        is_better = (is_far or self.is_without_draft) and not costs.is_shared
        return OFFERED_OUTCOMES if self._is_resting or is_better else 0

    def is_offer_due(self, elapsed_s: float, num_now: int, *, is_continued: bool, is_more_to_come: bool) -> bool:
        """Whether an offer made `elapsed_s` seconds after the last verdict would arrive about when the next is given.

        The block in flight has `num_now` nodes. `is_continued`: the target continued with it by itself.
        `is_more_to_come`: whether the draft is still growing, so that another offer will follow. The last offer before
        the verdict counts.

        A message and an offer take equally long to the target, so an offer is due one pass after the message was sent.
        A target that continues by itself began before its verdict arrived, so the round trip is subtracted.
        """
        if not self._is_adaptive:
            return True
        costs = self._known.costs
        if costs.is_shared or self.is_without_draft or self.is_paused or not self._is_drafting:
            return True
        num_ways = 2.0 if is_continued else 1.0
        late_s = elapsed_s - (costs.verify_s(num_now) - num_ways * costs.verify_wire_s)
        tolerated_s = OFFER_PASSES * self.pass_s
        return late_s <= tolerated_s and (late_s >= -tolerated_s or not is_more_to_come)

    # Plain steps

    @property
    def plain_steps(self) -> int:
        """Number of steps without guesses that the target may make without a message in between.

        While the draft is only silent, one step, so that it can report again after it.
        """
        is_for_long = self.max_depth == 0 or (self.is_paused and self._has_nothing)
        return PLAIN_STEPS if is_for_long else 1

    def is_worth_a_plain_step(self, num_now: int) -> bool:
        """Whether the target should continue without guesses after an outcome without an offer, instead of waiting.

        With a draft: if that yields more tokens per second than a usual round with its round trip to the target.
        """
        if self._has_nothing or not self.num_outcomes:
            return self._has_nothing
        costs = self._known.costs
        as_usual = self._learned.tokens.value - self.rate * costs.verify_s(num_now)
        return 1.0 - self.rate * (costs.verify_s(0) - costs.verify_wire_s) >= min(as_usual, 0.0)

    def goes_on_plainly(self, tree: TreeView) -> bool:
        """Whether no guess was worth its row for some rounds, and none of this tree is. Computed once per verdict."""
        if self._goes_plainly is None:
            is_idle = self._is_idle
            self._goes_plainly = is_idle and not len(self.choose(tree, self.max_nodes, self.max_depth))
            if is_idle and not self._goes_plainly:
                self._learned.idle_rounds = 0
        return self._goes_plainly

    @property
    def _has_nothing(self) -> bool:
        """Whether there are no guesses to wait for."""
        has_guessers = self._has_guessers or (self._has_head and self.uses_head)
        is_without_guessers = (self.is_without_draft or self.is_paused) and not has_guessers
        return self.max_depth == 0 or self.is_plain or is_without_guessers

    @property
    def _is_idle(self) -> bool:
        """Whether no session had a guess worth its row for some rounds, and a message each round costs more than it
        brings: it delays all sessions that share passes, or guessers alone may find something."""
        if not self._is_adaptive:
            return False
        if self._known.costs.is_shared:
            return self._learned.idle_rounds >= REST_ROUNDS
        return (not self._is_drafting or self.is_paused) and self._learned.idle_rounds >= QUIET_ROUNDS
