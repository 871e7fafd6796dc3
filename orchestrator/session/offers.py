"""What a target may go on with by itself, after the verdict that is awaited."""

from __future__ import annotations

from core.records import Stamp, Verdict
from core.speculation import ROOT
from orchestrator.session.guess import Guess, Offer


class Offers:
    """Those of one session for one verdict."""

    def __init__(self) -> None:
        self._by_round: dict[int, tuple[Stamp, Offer]] = {}
        self.last: Offer | None = None

    def __repr__(self) -> str:
        return f"<Offers {list(self._by_round)}>"

    def add(self, stamp: Stamp, offer: Offer) -> None:
        """The target is told of it, as of a message with this stamp."""
        self.last = offer
        self._by_round[stamp.round] = stamp, offer

    def has(self, stamp: Stamp) -> bool:
        """Whether this is one of them."""
        return self._by_round.get(stamp.round, (None,))[0] == stamp

    def drop(self, stamp: Stamp) -> None:
        """The target will not go on with this one."""
        del self._by_round[stamp.round]

    def clear(self) -> None:
        """They are of no use from now on."""
        self._by_round.clear()
        self.last = None

    def taken_by(self, verdict: Verdict) -> tuple[Stamp, Guess] | None:
        """What the target says that it has gone on with; None where it was offered nothing like that."""
        stamp, offer = self._by_round.get(verdict.continued, (None, None))
        end = verdict.path[-1] if verdict.path else ROOT
        guess = offer.follow(end, verdict.next_token) if offer is not None else None
        return None if stamp is None or guess is None else (stamp, guess)
