"""Settings of drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from core.config.checks import check, forbid_unknown
from core.ranges import DRAFT_TEMPERATURE
from core.records import Policy, Verification

Continuation = Literal["latest", "most_frequent"]
MAX_LOOKUP_MATCH = 16
MAX_LOOKUP_BRANCHES = 4
MAX_LOOKAHEAD_WINDOW, MAX_LOOKAHEAD_NGRAM = 32, 8
"""A window of this size has 223 rows, and no block has more than 256."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How far to draft, and how guesses are checked unless a request says otherwise."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    policy: Policy = "adaptive"
    """How far to draft: "adaptive" by observed costs and acceptance; "static" always `max_draft_tokens`; "static_tree"
    always the `max_block_tokens` likeliest nodes of the draft tree; "heuristic" two tokens more after a block that was
    accepted whole and one less otherwise; "confidence", "path_probability" and "entropy" up to `max_draft_tokens` while
    the draft is sure enough. Change it to compare policies, or where load is so steady that a fixed length is known to
    be best."""
    pipelining: bool = True
    """Draft on while the last block is verified. False drafts and verifies in turn, as drafts that sample always do
    (all verifications but "coupled", above temperature 0). Unset it where draft and target share one device."""
    max_draft_tokens: int = 8
    """Longest draft gamma in tokens, from the root down, in [0, 64]: the most that the policy may choose. Raise it
    where the target accepts whole blocks; 0 decodes plainly."""
    max_block_tokens: int = 32
    """Most nodes of a block, over all branches of its tree, in [1, 256]: the policy "adaptive" chooses up to this
    number, "static_tree" always this number. Lower it where many sessions share the target or each row costs time.
    Chains alone are verified by "rejection" and "block"."""
    min_path_probability: float = 0.03
    """Least path probability of a guess under the policy "path_probability", in [0, 1]: a chain ends before the first
    guess for which the product of the draft's probabilities from the root down is below it; 0 ends none early. Raise it
    where each row of the target costs time, lower it where short drafts are accepted whole."""
    min_confidence: float = 0.4
    """Least confidence under the policy "confidence", in [0, 1]: a chain ends where the draft's confidence in its first
    candidate is below it; 0 ends none early. Raise it where each row of the target costs time."""
    max_entropy: float = 2.0
    """Largest entropy of q in nats under the policy "entropy", at least 0: a chain ends where the entropy is above it.
    Lower it where each row of the target costs time."""
    guessers: tuple[str, ...] = ("draft", "prompt_lookup", "grammar")
    """Who guesses, unless a request says otherwise: "draft" for the draft engine, and names of guessers that need no
    model (docs/guessers.md); "grammar" guesses only where an output is held to one. Without "draft" requests take no
    place at a draft. The policy "adaptive" has all of them guess side by side in greedy and coupled mode; else the
    others guess where the draft has nothing."""
    lookup_min_match: int = 2
    """Prompt lookup: the shortest ending of the text that is looked up, in tokens, in [1, 16]. Raise it where chance
    matches cost rows."""
    lookup_max_match: int = 4
    """Prompt lookup: the longest ending that is looked up, and the first, in tokens; in [lookup_min_match, 16]. Each
    length costs about a microsecond a token."""
    lookup_continuation: Continuation = "latest"
    """Prompt lookup: of several continuations of the same ending, the "latest" goes first, or the "most_frequent"."""
    lookup_branches: int = 1
    """Prompt lookup: continuations that are guessed side by side where they differ, in [1, 4]. Raise it where rows of
    the target are free and its texts repeat themselves with changes."""
    retrieval_index: str | None = None
    """File made by `outrider index`, from which the guesser "retrieval" guesses; None, and there is no such guesser. It
    must be at this path wherever an orchestrator runs, and is refused if it was made with another tokenizer."""
    lookahead_window: int = 10
    """Lookahead: places of the text that the target is asked about in each pass, in [2, 32]. Its window has
    `lookahead_window` times (`lookahead_ngram` - 1) rows, less one. Raise it where rows of the target are free, lower
    it where each costs time."""
    lookahead_ngram: int = 5
    """Lookahead: length of the n-grams that its answers make, in tokens, in [3, 8]; guesses are one token shorter."""
    verification: Verification = Verification.COUPLED
    """Method of verification for requests that name none: "coupled"; "rejection" or "block", by chains;
    "recursive_rejection" or "sequential_selection", by trees (docs/exactness.md). Change it where acceptance matters
    more than output that depends on prompt, parameters and seed alone."""
    allow_relaxed: bool = False
    """Whether requests may name a relaxed rule ("lenient_coupled", "lenient_rejection" or "typical"), whose output does
    not have the target's own law (docs/exactness.md, section 6). Set it where callers may trade the law for speed."""
    q_top_tokens: int = 64
    """Tokens to which q is cut before the draft samples, in all modes but coupled, in [1, 4096]; q of these alone is
    sent. Raise it where acceptance suffers at high temperature; each token adds bytes to every draft."""
    draft_temperature: float | None = None
    """Temperature of the draft's law q where the target samples, in [0.001, 100]; None takes the target's own. It
    changes how often guesses are accepted, and no output's law. Set it where the draft is known to be too sure or too
    unsure of itself, and `outrider check --measure --draft-temperature` shows a gain."""
    draft_timeout_s: float = 0.25
    """Seconds, above 0, after which a block that has not come counts as lost for its round, unless its usual pace is
    slower. Raise it where the draft is far away."""
    draft_retry_s: float = 1.0
    """Seconds, above 0, before a lost draft is leased again; the pause doubles with each failure up to a minute, with
    jitter."""
    breaker_rounds: int = 3
    """Late rounds in a row, at least 1, after which a draft is given back and, after `draft_retry_s`, leased again."""

    def __post_init__(self) -> None:
        check(self.policy in get_args(Policy), "policy", f"one of {', '.join(get_args(Policy))}", self.policy)
        lossless = [each for each in Verification if each.rule.is_lossless]
        check(self.verification in lossless, "verification", f"one of {', '.join(lossless)}", self.verification)
        check(0 <= self.max_draft_tokens <= 64, "max_draft_tokens", "in [0, 64]", self.max_draft_tokens)
        check(1 <= self.max_block_tokens <= 256, "max_block_tokens", "in [1, 256]", self.max_block_tokens)
        check(0 <= self.min_confidence <= 1, "min_confidence", "in [0, 1]", self.min_confidence)
        is_chance = 0 <= self.min_path_probability <= 1
        check(is_chance, "min_path_probability", "in [0, 1]", self.min_path_probability)
        check(self.max_entropy >= 0, "max_entropy", "at least 0", self.max_entropy)
        check(bool(self.guessers), "guessers", "at least one name", self.guessers)
        check(len(set(self.guessers)) == len(self.guessers), "guessers", "different names", self.guessers)
        self._check_lookup()
        self._check_lookahead()
        check(1 <= self.q_top_tokens <= 4096, "q_top_tokens", "in [1, 4096]", self.q_top_tokens)
        is_warm = self.draft_temperature is None or self.draft_temperature in DRAFT_TEMPERATURE
        check(is_warm, "draft_temperature", str(DRAFT_TEMPERATURE), self.draft_temperature)
        check(self.draft_timeout_s > 0, "draft_timeout_s", "positive", self.draft_timeout_s)
        check(self.draft_retry_s > 0, "draft_retry_s", "positive", self.draft_retry_s)
        check(self.breaker_rounds >= 1, "breaker_rounds", "at least 1", self.breaker_rounds)

    def _check_lookup(self) -> None:
        least, most, choice = self.lookup_min_match, self.lookup_max_match, self.lookup_continuation
        check(1 <= least <= MAX_LOOKUP_MATCH, "lookup_min_match", f"in [1, {MAX_LOOKUP_MATCH}]", least)
        allowed = f"in [lookup_min_match, {MAX_LOOKUP_MATCH}]"
        check(least <= most <= MAX_LOOKUP_MATCH, "lookup_max_match", allowed, most)
        check(choice in get_args(Continuation), "lookup_continuation", "latest or most_frequent", choice)
        is_few = 1 <= self.lookup_branches <= MAX_LOOKUP_BRANCHES
        check(is_few, "lookup_branches", f"in [1, {MAX_LOOKUP_BRANCHES}]", self.lookup_branches)

    def _check_lookahead(self) -> None:
        window, ngram = self.lookahead_window, self.lookahead_ngram
        is_wide = 2 <= window <= MAX_LOOKAHEAD_WINDOW
        check(is_wide, "lookahead_window", f"in [2, {MAX_LOOKAHEAD_WINDOW}]", window)
        check(3 <= ngram <= MAX_LOOKAHEAD_NGRAM, "lookahead_ngram", f"in [3, {MAX_LOOKAHEAD_NGRAM}]", ngram)
