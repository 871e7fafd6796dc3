"""Validation of verdicts, the outcome that policies observe, and the errors that refusals become."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from core.errors import InvalidRequest, OutriderError, ServiceError, UnsoundScores
from core.records import Refused, Verdict, VerifiedBlock, is_sound
from core.speculation import ROOT, TokenTree
from orchestrator.policy import Found, RoundOutcome
from orchestrator.session.sourced_block import SourcedBlock


@dataclass(frozen=True, slots=True)
class JudgedBlock:
    """A committed verdict, and the block that it judges."""

    block: SourcedBlock
    verdict: Verdict
    sent_s: float
    """Seconds: when the block was sent or, if the target continued by itself, when the previous verdict arrived."""
    received_s: float
    interval_s: float | None
    """Seconds since the previous verdict. None if that interval was not a whole round."""
    is_continued: bool
    """Whether the target verified the block without being asked, from an offer."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed tokens: the accepted guesses, then the target's own token."""
        guesses = self.block.tree.tokens
        return (*(guesses[node] for node in self.verdict.path), self.verdict.next_token)

    @property
    def verified(self) -> VerifiedBlock:
        """The block and its outcome, for a client's trace."""
        tree = self.block.tree
        return VerifiedBlock(tree.tokens, tree.parents, self.block.sources, self.verdict.path, self.verdict.next_token)

    def outcome(
        self, found: Found, unverified: tuple[float, bool] | None = None, late_hit: bool | None = None
    ) -> RoundOutcome:
        """Return the outcome that the policy observes."""
        shape, verdict = self.block.shape, self.verdict
        elapsed_s, continued = self.received_s - self.sent_s, self.is_continued
        return RoundOutcome(
            shape, verdict.path, found, elapsed_s, verdict.timing, continued, unverified, late_hit, self._gained
        )

    @property
    def _gained(self) -> int | None:
        """Number of accepted guesses of the source that asked questions; None if no source did."""
        block = self.block
        if block.questions is None:
            return None
        return sum([block.sources[node] == block.questions.source for node in self.verdict.path])


def problem_of(verdict: Verdict, block: TokenTree, num_committed: int, vocab_size: int) -> str | None:
    """Return why this verdict on `block` is invalid, or None. `num_committed` tokens precede the block."""
    parent = ROOT
    for node in verdict.path:
        if not 0 <= node < len(block) or block.parents[node] != parent:
            return "its accepted path is not a path of the block"
        parent = node
    if not 0 <= verdict.num_relaxed <= len(verdict.path):
        return "it has relaxed more than it has accepted"
    if not 0 <= verdict.next_token < vocab_size:
        return "its next token is outside the vocabulary"
    if not 0 <= verdict.num_cached <= num_committed:
        return "it has taken more from its cache than it was sent"
    samples = verdict.samples
    if samples and not (len(samples) == 1 + len(block) and 0 <= min(samples) <= max(samples) < vocab_size):
        return "its samples are not those of the block"
    if not 0 <= verdict.held <= num_committed + len(verdict.path):
        return "it claims to hold tokens that it was not sent"
    return None


def problem_of_scores(verdict: Verdict, block: TokenTree, num_committed: int, vocab_size: int) -> str | None:
    """Return why the scores of a beam search's block are invalid, or None. `UNSOUND` is valid."""
    if len(verdict.likeliest) != 1 + len(block):
        return "it has not scored the whole block"
    found = [each for likeliest in verdict.likeliest if is_sound(likeliest) for each in likeliest]
    if not all(0 <= token < vocab_size and logprob < inf for token, logprob in found):
        return "a score is of no token, or infinite"
    return None if 0 <= verdict.held <= num_committed else "it claims to hold tokens that it was not sent"


def error_of(refused: Refused) -> OutriderError:
    """Map a refusal to an error for the party that can act: the caller, the model's owner, or a client that retries."""
    if refused.field is not None:
        return InvalidRequest(refused.field, refused.reason)
    return UnsoundScores(refused.reason) if refused.is_final else ServiceError(refused.reason)
