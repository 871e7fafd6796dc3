"""Settings of drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from core.config.checks import check, forbid_unknown
from core.records import Policy, Verification


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How far to draft, and how guesses are checked unless a request says otherwise."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    policy: Policy = "adaptive"
    """How to decide how far to draft: "adaptive" by costs and acceptance as they are observed, "static" always
    `max_draft_tokens`, "static_tree" always the `max_block_tokens` likeliest nodes of the draft's tree, "heuristic" two
    more after a block that was accepted whole and one less otherwise, "confidence", "path_probability" and "entropy" up
    to `max_draft_tokens` while the draft is sure enough."""
    pipelining: bool = True
    """Draft on while the last block is verified. False drafts and verifies in turn, as drafts that sample always do
    (rejection and block verification above temperature 0)."""
    max_draft_tokens: int = 8
    """Draft length gamma, in tokens from the root down: the most that the policy may choose."""
    max_block_tokens: int = 32
    """Nodes of a block, over all branches of its tree, in [1, 256]: the most that the policy "adaptive" may choose, and
    the number that "static_tree" always verifies. Lower it where many sessions share the target or a row is dear.
    Trees are verified in greedy and coupled mode only."""
    min_path_probability: float = 0.03
    """Of the policy "path_probability": a chain ends before the first guess whose path probability, the product of the
    draft's own chances from the root down to it, is below this; in [0, 1], and 0 ends none early. Raise it where rows
    of the target are dear, lower it where drafts are short although the target accepts them whole."""
    min_confidence: float = 0.4
    """Of the policy "confidence": a chain ends where the draft's confidence in its first candidate is below this; in
    [0, 1], and 0 ends none early. Raise it where rows of the target are dear."""
    max_entropy: float = 2.0
    """Of the policy "entropy": a chain ends where the entropy of q, in nats, is above this; at least 0. Lower it where
    rows of the target are dear."""
    lookup: bool = True
    """Guess from the text so far when the draft has nothing; the policy "adaptive" does so beside the draft's guesses,
    in greedy and coupled mode."""
    verification: Verification = Verification.COUPLED
    q_top_tokens: int = 64
    """In rejection and block mode the draft samples from its q cut to this many tokens, and sends just those."""
    draft_timeout_s: float = 0.25
    """A block that comes later than this, and than a few times its usual pace, counts as lost for its round."""
    draft_retry_s: float = 1.0
    """First pause before a lost draft is leased again; doubles up to a minute, with jitter."""
    breaker_rounds: int = 3
    """A draft that is late this often in a row is given back, and leased again after the pause."""

    def __post_init__(self) -> None:
        check(self.policy in get_args(Policy), "policy", f"one of {', '.join(get_args(Policy))}", self.policy)
        check(0 <= self.max_draft_tokens <= 64, "max_draft_tokens", "in [0, 64]", self.max_draft_tokens)
        check(1 <= self.max_block_tokens <= 256, "max_block_tokens", "in [1, 256]", self.max_block_tokens)
        check(0 <= self.min_confidence <= 1, "min_confidence", "in [0, 1]", self.min_confidence)
        is_chance = 0 <= self.min_path_probability <= 1
        check(is_chance, "min_path_probability", "in [0, 1]", self.min_path_probability)
        check(self.max_entropy >= 0, "max_entropy", "at least 0", self.max_entropy)
        check(1 <= self.q_top_tokens <= 4096, "q_top_tokens", "in [1, 4096]", self.q_top_tokens)
        check(self.draft_timeout_s > 0, "draft_timeout_s", "positive", self.draft_timeout_s)
        check(self.draft_retry_s > 0, "draft_retry_s", "positive", self.draft_retry_s)
        check(self.breaker_rounds >= 1, "breaker_rounds", "at least 1", self.breaker_rounds)
