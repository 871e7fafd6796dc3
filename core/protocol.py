"""How an engine judges a message before it computes: it refuses it, misses its base, or takes it.

The real engines and the simulated ones run these rules: `refusal_of`, then `missing_of`, then `HeldTokens.rebase_to_…`.
Knows records, tokens and trees; must not know models, KV, time, or the callers that wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.records import (
    Base,
    DraftRequest,
    Missing,
    Refused,
    SequenceSpec,
    VerifyRequest,
)
from core.speculation import Candidates, HeldTree, TreeBuilder, TreeSpec
from core.text import TokenLog

ENDED = "the session has ended"
OVERTAKEN = "the message was overtaken by a later one"

MAX_ENDED = 4096
"""Number of ended sessions that are remembered; no message is under way while this number of sessions ends."""


class EndedSessions:
    """The sessions that ended last: a late message of an ended session must not open it again."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, session: str) -> bool:
        return session in self._names

    def add(self, session: str) -> None:
        self._names[session] = None
        if len(self._names) > MAX_ENDED:
            self._names.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Rebased:
    """The rows that an engine keeps after a message, which KV follows, and the tokens still to be computed."""

    num_tokens: int
    """Number of rows of committed tokens that stay where they are."""
    guesses: Sequence[int]
    """Former indices of the rows of guesses that move right behind them; the other rows are dropped."""
    pending: list[int]
    """Number of committed tokens that are still to be computed."""


@dataclass(eq=False, slots=True)
class HeldTokens:
    """The computed state of one session: committed tokens, and a tree of guesses below them."""

    spec: SequenceSpec
    log: TokenLog = field(default_factory=TokenLog)
    tree: HeldTree = field(default_factory=HeldTree)
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    """The growing draft tree of a draft that grows continuously; the nodes in `tree` are the fed ones."""
    last_round: int = -1

    def take_spec(self, spec: SequenceSpec) -> None:
        """Sample by `spec` from now on; guesses under another one are dropped."""
        if self.spec != spec:
            self.tree.clear()
            self.spec = spec

    def rebase_to_verify(self, request: VerifyRequest) -> Rebased:
        """Agree with the request's tokens. At least the last one stays pending, since the scores behind it are
        needed."""
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=False)
        return rebased if rebased.pending else self._without_last(rebased)

    def rebase_to_grow(self, request: DraftRequest, tree_spec: TreeSpec) -> Rebased:
        """Agree with the request's tokens and keep the nodes below them; grow by `tree_spec` from now on."""
        self.builder.go_on(tree_spec)
        if self.spec.needs_q:
            return self._rebase_to_draw(request)
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=self._reroot(request))
        if self.tree.root is None:
            self.builder.begin()
            rebased = rebased if rebased.pending else self._without_last(rebased)
        elif not self.builder.has_root:
            self.builder.take([self.tree.root])
        if tree_spec.reports_all:
            self.builder.report_all_again()
        return rebased

    def _rebase_to_draw(self, request: DraftRequest) -> Rebased:
        """Agree with the request's tokens, without the earlier draws.

        The draw at the root goes too: draws are numbered from the root (docs/exactness.md, section 4).
        """
        self.builder.begin()
        self.builder.report_all_again()
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=False)
        return rebased if rebased.pending else self._without_last(rebased)

    def hold(self, said: Sequence[Candidates]) -> None:
        """Note that the chosen nodes were fed; the tree builder still needs the model's candidates there."""
        builder = self.builder
        if not builder.has_root:
            self.tree.root = said[0]
            return
        for node, candidates in zip(builder.feeding, said, strict=True):
            self.tree.add(builder.held_parent(node), builder.tokens[node], candidates)

    def step_back(self) -> list[int]:
        """Drop the last token, whose scores are to be computed again, and return it."""
        last = self.log.tokens[-1]
        self.truncate(len(self.log) - 1)
        return [last]

    def truncate(self, num_tokens: int) -> None:
        """Drop all but the first `num_tokens` tokens."""
        self.tree.clear()
        self.log.truncate(num_tokens)

    def _rebase(self, base: Base, suffix: Sequence[int], *, keeps_guesses: bool) -> Rebased:
        """Keep the tokens that agree with base and suffix and, if wanted, the guesses below them.

        Accepted guesses agree, so they are kept.
        """
        num_agreeing = base.num_tokens + self.log.common_prefix_len(base.num_tokens, suffix)
        rest = list(suffix[num_agreeing - base.num_tokens :])
        if num_agreeing < len(self.log):
            self.truncate(num_agreeing)
            return Rebased(num_agreeing, (), rest)
        if not self.tree.tokens:  # as always on a target
            if rest:
                self.tree.root = None
            return Rebased(num_agreeing, (), rest)
        path = self.tree.walk(rest)
        ends_in_tree = len(path) == len(rest)
        kept = self.tree.rebase(path, keeps_below=keeps_guesses and ends_in_tree)
        if not ends_in_tree:
            self.tree.clear()
        self.log.extend(rest[: len(path)])
        return Rebased(num_agreeing, kept, rest[len(path) :])

    def _without_last(self, rebased: Rebased) -> Rebased:
        pending = self.step_back()
        num_tokens = min(rebased.num_tokens, len(self.log))
        return Rebased(num_tokens, rebased.guesses[: len(self.log) - num_tokens], pending)

    def _reroot(self, request: DraftRequest) -> bool:
        """Re-root the draft tree at the end of the request's text, if the tree leads there; returns whether nodes below
        the root may be fed.
        """
        known = self.log.tokens[request.base.num_tokens :]  # where tokens are pending, nothing has grown below them yet
        if request.base.num_tokens == 0 or list(request.suffix[: len(known)]) != list(known):
            self.builder.begin()
            return False
        return self.builder.reroot(request.suffix[len(known) :]) and self.builder.has_root


def refusal_of(
    request: VerifyRequest | DraftRequest, held: HeldTokens | None, *, epoch: int, has_ended: bool, vocab_size: int
) -> Refused | None:
    """Why this message is refused: it is stale or malformed."""
    reason = _why_stale(request, held, epoch, has_ended) or _why_malformed(request, held, vocab_size)
    return None if reason is None else Refused(request.stamp, reason)


def missing_of(request: VerifyRequest | DraftRequest, held: HeldTokens | None) -> Missing | None:
    """The answer to a message whose base is not held: the length of the prefix that may agree. None if it can be taken.

    If the hash differs, no prefix is known to agree.
    """
    base = request.base
    if base.num_tokens == 0 or (held is not None and held.log.holds(base)):
        return None
    is_behind = held is not None and len(held.log) < base.num_tokens
    return Missing(request.stamp, len(held.log) if held is not None and is_behind else 0)


def _why_stale(
    request: VerifyRequest | DraftRequest, held: HeldTokens | None, epoch: int, has_ended: bool
) -> str | None:
    if request.stamp.epoch != epoch:
        return "the message is for another incarnation of this engine"
    if has_ended:
        return ENDED
    if held is not None and request.stamp.round <= held.last_round:
        return OVERTAKEN
    return None


def _why_malformed(request: VerifyRequest | DraftRequest, held: HeldTokens | None, vocab_size: int) -> str | None:
    if not request.suffix or (request.base.num_tokens == 0 and request.spec is None):
        return "the message lacks a suffix, or a first one its sampling parameters"
    if min(request.suffix) < 0 or max(request.suffix) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    # only a first message sets the sampling
    spec = request.spec if held is None or request.base.num_tokens == 0 else held.spec
    if isinstance(request, DraftRequest):
        return _why_chosen(request.growth, spec) if spec is not None and spec.needs_q else None
    if len(set(request.wants)) < len(request.wants):
        return "the message names twice what it wants"
    block = request.block.tokens
    if not block:
        return None
    if min(block) < 0 or max(block) >= vocab_size:
        return f"a guess is outside the vocabulary of {vocab_size}"
    if spec is not None and not spec.takes_trees and not request.block.is_chain:
        return f"{spec.rule.name} verification takes chains only"
    return None


def _why_chosen(growth: TreeSpec, spec: SequenceSpec) -> str | None:
    """Why draws would be selected by what they are (docs/exactness.md, section 4)."""
    if growth.is_chain or (growth.is_blind and spec.takes_trees):
        return None
    what = "a tree of a shape" if spec.takes_trees else "a chain of a length"
    return f"a draft that samples grows {what} that is fixed beforehand"
