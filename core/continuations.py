"""Continuations: blocks that a target may verify directly after a verdict, without waiting for the next message.

Real and simulated engines apply the same rules. Knows records, tokens and trees; must not know models, KV, time or
waiting callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.protocol import ENDED, OVERTAKEN, HeldTokens
from core.records import Continuation, Refused, Stamp, VerifyRequest
from core.rules import Outcome
from core.speculation import EMPTY_BLOCK, ROOT, subtree
from core.text import TokenLog

UNUSED = "this offer does not match the verdict"

Verified = tuple[VerifyRequest, TokenLog, Outcome]
"""A message, the engine's tokens after its verdict, and the outcome that the verdict will report."""


class Continuations:
    """The offers of each session.

    A session may have one offer for each verdict to come: the next one, and those of the steps that offers start.
    """

    def __init__(self) -> None:
        self._offers: dict[str, dict[int, Continuation]] = {}
        """Keyed by session, then by the round that is continued."""

    def offer(self, continuation: Continuation) -> list[Refused]:
        """Store this offer. Return refusals for an earlier offer for the same verdict and for all offers after it."""
        session, after = continuation.stamp.lease, continuation.after
        refused = self._drop(session, lambda kept: kept >= after)
        self._offers.setdefault(session, {})[after] = continuation
        return refused

    def drop(self, session: str, before: int | None = None) -> list[Refused]:
        """Drop the session's offers for rounds before `before` (None: all). Return their refusals."""
        return self._drop(session, lambda after: before is None or after < before)

    def _drop(self, session: str, is_over: Callable[[int], bool]) -> list[Refused]:
        offers = self._offers.get(session, {})
        dropped = [offers.pop(after) for after in [*offers] if is_over(after)]
        if not offers:
            self._offers.pop(session, None)
        return [Refused(continuation.stamp, UNUSED) for continuation in dropped]

    def _take(self, stamp: Stamp) -> Continuation | None:
        """Remove and return the offer for the verdict on this message."""
        offers = self._offers.get(stamp.lease, {})
        offer = offers.pop(stamp.round, None)
        if not offers:
            self._offers.pop(stamp.lease, None)
        return offer

    def after_pass(
        self, verified: Sequence[Verified], can_take: Callable[[Sequence[int], VerifyRequest], bool]
    ) -> tuple[list[int], list[VerifyRequest], list[Refused]]:
        """Return each verdict's `continued`, the messages of sessions that continue, and the refusals of other offers.

        `can_take(committed, message)` says whether the engine can verify the message after a verdict that commits these
        tokens. Either all sessions of a pass continue or none does; otherwise the pass would split in two. If a session
        does not continue, its later offers are refused too, because no verdict can reach them.
        """
        following: list[VerifyRequest] = []
        refused: list[Refused] = []
        for request, log, outcome in verified:
            refused += self.drop(request.stamp.lease, before=request.stamp.round)
            offer = self._take(request.stamp)
            if offer is None:
                continue
            message = next_message(offer, request, log, outcome)
            committed = [*(request.block.tokens[node] for node in outcome.path), outcome.next_token]
            if message is not None and can_take(committed, message):
                following.append(message)
            else:
                refused.append(Refused(offer.stamp, UNUSED))
        if len(following) < len(verified):
            refused += [Refused(message.stamp, UNUSED) for message in following]
            for request, _, _ in verified:
                refused += self.drop(request.stamp.lease)
            return [0] * len(verified), [], refused
        return [message.stamp.round for message in following], following, refused

    @property
    def sessions(self) -> Sequence[str]:
        """Sessions with at least one offer."""
        return tuple(self._offers)


def refusal_of_offer(
    offer: Continuation,
    held: HeldTokens | None,
    *,
    epoch: int,
    has_ended: bool,
    is_verifying: bool,
    vocab_size: int,
) -> Refused | None:
    """Return a refusal if the continuation cannot be used, else None.

    `is_verifying` says whether the session waits for a verdict.
    """
    if offer.stamp.epoch != epoch:
        return Refused(offer.stamp, "the message is for another incarnation of this engine")
    if has_ended:
        return Refused(offer.stamp, ENDED)
    if held is None:
        return Refused(offer.stamp, "the session is not known, or not any more")
    is_judged = offer.after < held.last_round or (offer.after == held.last_round and not is_verifying)
    if is_judged or offer.stamp.round <= offer.after:
        return Refused(offer.stamp, OVERTAKEN)
    tokens = offer.tree.tokens
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        return Refused(offer.stamp, f"a guess is outside the vocabulary of {vocab_size}")
    return Refused(offer.stamp, "where the draft samples, each block is sent") if held.spec.needs_q else None


def next_message(offer: Continuation, request: VerifyRequest, log: TokenLog, outcome: Outcome) -> VerifyRequest | None:
    """Build the message that `offer` gives for this outcome of `request`; None if the offer does not cover it.

    `log` holds the engine's tokens after the verdict.
    """
    block, tree, path, next_token = request.block, offer.tree, outcome.path, outcome.next_token
    if tree.prefix(len(block)) != block:
        return None
    node = tree.child(path[-1] if path else ROOT, next_token)
    if node is None and not offer.is_open:
        return None
    following = subtree(tree, node)[0] if node is not None else EMPTY_BLOCK
    wants = tuple([want for want in request.wants if want.is_standing])
    return VerifyRequest(offer.stamp, log.base(len(log)), (next_token,), following, wants=wants)
