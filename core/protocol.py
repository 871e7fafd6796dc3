"""Checks of a message before an engine computes: the message is refused, its base is missing, or it is accepted.

Real and simulated engines apply the same rules: `refusal_of`, then `missing_of`, then `HeldTokens.rebase_to_…`. Depends
on records, tokens and trees; must not depend on models, KV, time or waiting callers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
"""Number of ended sessions to remember. No message stays in transit while this many sessions end."""


class EndedSessions:
    """The most recently ended sessions. A late message must not reopen an ended session."""

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
    """Rows that an engine keeps after a message, and the tokens still to compute. The KV cache is moved accordingly."""

    num_tokens: int
    """Number of rows of committed tokens that stay in place."""
    guesses: Sequence[int]
    """Old indices of the guess rows that move directly behind the committed rows; all other rows are dropped."""
    pending: list[int]
    """Committed tokens that are still to be computed."""


@dataclass(eq=False, slots=True)
class HeldTokens:
    """Computed state of one session: committed tokens and a tree of guesses below them."""

    spec: SequenceSpec
    log: TokenLog = field(default_factory=TokenLog)
    tree: HeldTree[Any] = field(default_factory=HeldTree)
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    """The draft tree that a draft grows. `tree` holds the nodes of it that were fed to the model."""
    last_round: int = -1

    def take_spec(self, spec: SequenceSpec) -> None:
        """Sample with `spec` from now on. Drops guesses made under another spec."""
        if self.spec != spec:
            self.tree.clear()
            self.spec = spec

    def rebase_to_verify(self, request: VerifyRequest) -> Rebased:
        """Adopt the request's tokens. At least the last one stays pending, because the scores after it are needed."""
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=False)
        return rebased if rebased.pending else self._without_last(rebased)

    def rebase_to_score(self, request: VerifyRequest) -> Rebased:
        """Adopt the request's tokens, and keep those nodes of its block that are held: beams that go on.

        The last token stays pending unless what follows it is known and the block has new nodes.
        """
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=True)
        found = self.tree.find(request.block)
        if not rebased.pending and (self.tree.root is None or None not in found):
            return self._without_last(rebased)
        kept = sorted(node for node in found if node is not None)
        num_path = len(rebased.guesses) - len(self.tree)
        self.tree.keep(kept)
        guesses = [*rebased.guesses[:num_path], *(rebased.guesses[num_path + node] for node in kept)]
        return Rebased(rebased.num_tokens, guesses, rebased.pending)

    def rebase_to_grow(self, request: DraftRequest, tree_spec: TreeSpec) -> Rebased:
        """Adopt the request's tokens, keep the nodes below them, and grow by `tree_spec` from now on."""
        self.builder.set_spec(tree_spec)
        if self.spec.needs_q or request.features is not None:
            return self._rebase_anew(request)
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=self._reroot(request))
        if self.tree.root is None:
            self.builder.begin()
            rebased = rebased if rebased.pending else self._without_last(rebased)
        elif not self.builder.has_root:
            self.builder.take([self.tree.root])
        if tree_spec.reports_all:
            self.builder.report_all_again()
        return rebased

    def _rebase_anew(self, request: DraftRequest) -> Rebased:
        """Adopt the request's tokens and drop all earlier guesses.

        Draws are numbered from the root, so the draw at the root is dropped too (docs/exactness.md, section 4). A head
        guesses best from the newest features: even an accepted guess is computed again, because it was from its own.
        """
        if request.features is not None:
            self.tree.clear()
        self.builder.begin()
        self.builder.report_all_again()
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=False)
        return rebased if rebased.pending else self._without_last(rebased)

    def hold(self, candidates: Sequence[Candidates]) -> None:
        """Store the model's candidates for the nodes that were just fed. The tree builder receives them separately."""
        builder = self.builder
        if not builder.has_root:
            self.tree.root = candidates[0]
            return
        for node, each in zip(builder.feeding, candidates, strict=True):
            self.tree.add(builder.held_parent(node), builder.tokens[node], each)

    def step_back(self) -> list[int]:
        """Drop the last token and return it, so that the scores after it are computed again."""
        last = self.log.tokens[-1]
        self.truncate(len(self.log) - 1)
        return [last]

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        self.tree.clear()
        self.log.truncate(num_tokens)

    def _rebase(self, base: Base, suffix: Sequence[int], *, keeps_guesses: bool) -> Rebased:
        """Keep the tokens that agree with base and suffix and, with `keeps_guesses`, the guesses below them.

        Accepted guesses agree with the suffix, so they are kept.
        """
        num_agreeing = base.num_tokens + self.log.common_prefix_len(base.num_tokens, suffix)
        rest = list(suffix[num_agreeing - base.num_tokens :])
        if num_agreeing < len(self.log):
            self.truncate(num_agreeing)
            return Rebased(num_agreeing, (), rest)
        if not self.tree.tokens:  # always so on a target, except in a beam search
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
        """Re-root the draft tree at the end of the request's text, if the tree contains it. Return whether nodes below
        the root may be fed.
        """
        known = self.log.tokens[request.base.num_tokens :]  # nothing has grown below pending tokens yet
        if request.base.num_tokens == 0 or list(request.suffix[: len(known)]) != list(known):
            self.builder.begin()
            return False
        return self.builder.reroot(request.suffix[len(known) :]) and self.builder.has_root


def refusal_of(
    request: VerifyRequest | DraftRequest,
    held: HeldTokens | None,
    *,
    epoch: int,
    has_ended: bool,
    vocab_size: int,
    feature_width: int = 0,
) -> Refused | None:
    """Return a refusal if the message is stale or malformed, else None.

    `feature_width`: numbers per token of the features that a head reads, for an engine that runs one.
    """
    reason = _why_stale(request, held, epoch, has_ended) or _why_malformed(request, held, vocab_size)
    if reason is None and isinstance(request, DraftRequest):
        reason = _why_unreadable(request, feature_width)
    return None if reason is None else Refused(request.stamp, reason)


def missing_of(request: VerifyRequest | DraftRequest, held: HeldTokens | None) -> Missing | None:
    """Return `Missing`, with the length of the prefix that may agree, if the base is not held; else None.

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
    if request.base.num_tokens == 0 and request.spec is not None and request.spec.num_source >= len(request.suffix):
        return "nothing follows the source"
    if min(request.suffix) < 0 or max(request.suffix) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    # only a first message sets the sampling
    spec = request.spec if held is None or request.base.num_tokens == 0 else held.spec
    if isinstance(request, DraftRequest):
        return _why_biased(request.growth, spec) if spec is not None and spec.needs_q else None
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


def _why_unreadable(request: DraftRequest, feature_width: int) -> str | None:
    """Return why the message's features are not those that this engine reads, or None."""
    if request.features is None:
        return f"it has no features; this engine reads {feature_width} numbers a token" if feature_width else None
    return request.features.problem(feature_width, request.num_committed - 1)


def _why_biased(growth: TreeSpec, spec: SequenceSpec) -> str | None:
    """Return why draws would be selected by their value (docs/exactness.md, section 4), or None."""
    if growth.is_chain or (growth.is_blind and spec.takes_trees):
        return None
    what = "a tree of a shape" if spec.takes_trees else "a chain of a length"
    return f"a draft that samples grows {what} that is fixed beforehand"
