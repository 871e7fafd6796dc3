"""A session's text, what one engine is believed to hold of it, and the message it has not answered yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.records import Base, SequenceSpec, Stamp
from core.text import TokenLog

MAX_RESENDS = 3
"""Number of times an engine may answer Missing to the same message before it counts as lost."""

Header = tuple[Stamp, Base, SequenceSpec | None]
"""Start of a message. The committed tokens after the base go with it, and the spec if the base is empty."""


@dataclass(frozen=True, slots=True)
class SessionText:
    """The text of one session, and how its tokens are sampled."""

    session_id: str
    log: TokenLog
    spec: SequenceSpec


class EngineView:
    """The number of committed tokens that one engine holds.

    Invariant: at most one message is unanswered.
    """

    def __init__(self, text: SessionText) -> None:
        self._log = text.log
        self._spec = text.spec
        self._num_messages = 0
        self._num_resends = 0
        self.name = ""
        self.epoch = 0
        self.num_tokens = 0
        self.awaiting: Stamp | None = None

    def __repr__(self) -> str:
        return f"<EngineView {self.num_tokens} of {self._log} at {self.name!r}, awaiting {self.awaiting}>"

    @property
    def num_behind(self) -> int:
        """Number of committed tokens that the engine has not been sent."""
        return len(self._log) - self.num_tokens

    def begin_lease(self, name: str, epoch: int) -> None:
        """Begin a lease on another engine, which holds no tokens."""
        self.name, self.epoch = name, epoch
        self.num_tokens, self.awaiting, self._num_resends = 0, None, 0

    def next_header(self) -> Header:
        """Return the header of a message that brings the engine up to date. It is awaited from now on."""
        self.awaiting = self.next_stamp()
        spec = self._spec if self.num_tokens == 0 else None
        return self.awaiting, self._log.base(self.num_tokens), spec

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next verdict should include prompt logprobs."""
        return self._spec.num_prompt_logprobs is not None

    def has_prompt_logprobs(self) -> None:
        """Stop requesting prompt logprobs, so that another prefill does not compute them again."""
        if self.wants_prompt_logprobs:
            self._spec = replace(self._spec, num_prompt_logprobs=None)

    def next_stamp(self) -> Stamp:
        """Return a stamp for a message that is not awaited yet, and may never be."""
        self._num_messages += 1
        return Stamp(self.name, self.epoch, self._num_messages)

    def answers(self, stamp: Stamp) -> bool:
        """Whether this stamp is the awaited one. Any other reply is stale and must change nothing."""
        return self.awaiting is not None and stamp == self.awaiting

    def take(self, num_tokens: int) -> None:
        """Record the awaited reply, with the number of committed tokens that the engine holds now."""
        self.keeps(num_tokens)
        self.awaiting = None

    def keeps(self, num_tokens: int) -> None:
        """Record the number of committed tokens that the engine reports to hold, and reset the resend count."""
        self.num_tokens = min(num_tokens, len(self._log) - 1)  # the last token is sent again, for its logits
        self._num_resends = 0

    def must_resend(self, num_tokens: int) -> bool:
        """Record that the engine holds only `num_tokens`. Return whether to send the rest again."""
        self._num_resends += 1
        self.num_tokens, self.awaiting = max(0, min(num_tokens, len(self._log) - 1)), None
        return self._num_resends <= MAX_RESENDS and 0 <= num_tokens <= len(self._log)
