"""Continuations: blocks with which a target may go on by itself after a verdict, without waiting for the next message.

The real engines and the simulated ones run these rules. Knows records, tokens and trees; must not know models, KV or
time, nor the callers that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from core.protocol import ENDED, OVERTAKEN, HeldTokens
from core.records import Continuation, Refused, Stamp, VerifyRequest
from core.rules import Outcome
from core.speculation import EMPTY_BLOCK, ROOT, subtree
from core.text import TokenLog

UNUSED = "the verdict was none that this continuation answers"

Caller = TypeVar("Caller")
Verified = tuple[VerifyRequest, TokenLog, Outcome]
"""A message, what is held after its verdict, and the accepted path and next token that the verdict will say."""


class Continuations(Generic[Caller]):
    """What each session has offered, and the tickets of the answers.

    One continuation for each verdict to come: the next one, and those of the steps that the offers themselves lead to.
    """

    def __init__(self) -> None:
        self._offers: dict[str, dict[int, tuple[Caller, Continuation]]] = {}
        """By session and the round that is continued."""

    def offer(self, caller: Caller, continuation: Continuation) -> list[tuple[Caller, Refused]]:
        """Keep this offer; returns the refusals of an earlier one for the same verdict, and of all beyond it."""
        session, after = continuation.stamp.session, continuation.after
        refused = self._drop(session, lambda kept: kept >= after)
        self._offers.setdefault(session, {})[after] = (caller, continuation)
        return refused

    def drop(self, session: str, before: int | None = None) -> list[tuple[Caller, Refused]]:
        """Drop what `session` has offered for rounds before that one; returns the refusals."""
        return self._drop(session, lambda after: before is None or after < before)

    def _drop(self, session: str, is_over: Callable[[int], bool]) -> list[tuple[Caller, Refused]]:
        offers = self._offers.get(session, {})
        dropped = [offers.pop(after) for after in [*offers] if is_over(after)]
        if not offers:
            self._offers.pop(session, None)
        return [(caller, Refused(continuation.stamp, UNUSED)) for caller, continuation in dropped]

    def _take(self, stamp: Stamp) -> tuple[Caller, Continuation] | None:
        """The offer for the verdict on this message."""
        offers = self._offers.get(stamp.session, {})
        offer = offers.pop(stamp.round, None)
        if not offers:
            self._offers.pop(stamp.session, None)
        return offer

    def after_pass(
        self, verified: Sequence[Verified], can_take: Callable[[Sequence[int], VerifyRequest], bool]
    ) -> tuple[list[int], list[tuple[Caller, VerifyRequest]], list[tuple[Caller, Refused]]]:
        """`continued` of each verdict of a pass; the messages of sessions that continue; the refusals of other offers.

        `can_take`: whether the engine can verify this message, after a verdict that commits these tokens. All sessions
        of a pass continue or none does: one that continued alone would take a pass without the others, and they a pass
        without it. What a session has offered beyond a verdict with which it does not continue is refused, too: nothing
        leads there any more.
        """
        following: list[tuple[Caller, VerifyRequest]] = []
        refused: list[tuple[Caller, Refused]] = []
        for request, log, outcome in verified:
            refused += self.drop(request.stamp.session, before=request.stamp.round)
            offer = self._take(request.stamp)
            if offer is None:
                continue
            caller, continuation = offer
            message = next_message(continuation, request, log, outcome)
            committed = [*(request.block.tokens[node] for node in outcome.path), outcome.next_token]
            if message is not None and can_take(committed, message):
                following.append((caller, message))
            else:
                refused.append((caller, Refused(continuation.stamp, UNUSED)))
        if len(following) < len(verified):
            refused += [(caller, Refused(message.stamp, UNUSED)) for caller, message in following]
            for request, _, _ in verified:
                refused += self.drop(request.stamp.session)
            return [0] * len(verified), [], refused
        return [message.stamp.round for _, message in following], following, refused

    def clear(self) -> list[Caller]:
        """Drop all offers; returns the tickets to answer."""
        callers = [caller for offers in self._offers.values() for caller, _ in offers.values()]
        self._offers.clear()
        return callers

    @property
    def sessions(self) -> Sequence[str]:
        """That have offered something."""
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
    """Why a continuation is refused; `is_verifying`: whether the session waits for a verdict."""
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
    """The message of `offer` that follows this outcome of `request`; None if the offer has none for it.

    `log`: the engine's tokens after the verdict.
    """
    block, tree, path, next_token = request.block, offer.tree, outcome.path, outcome.next_token
    if tree.prefix(len(block)) != block:
        return None
    node = tree.child(path[-1] if path else ROOT, next_token)
    if node is None and not offer.is_open:
        return None
    following = subtree(tree, node)[0] if node is not None else EMPTY_BLOCK
    return VerifyRequest(offer.stamp, log.base(len(log)), (next_token,), following)
