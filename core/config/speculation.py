"""Settings of drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from core.config.checks import ABOVE_0, SHARE, Settings, at_least, check, whole
from core.ranges import Range, ranges_of
from core.records import GenerationRequest, Policy, Verification

Continuation = Literal["latest", "most_frequent"]
MAX_LOOKUP_MATCH = 16
MAX_LOOKUP_BRANCHES = 4
MAX_HISTORY_TOKENS, MAX_HISTORY_CALLERS = 2**20, 4096
MAX_LOOKAHEAD_WINDOW, MAX_LOOKAHEAD_NGRAM = 32, 8
"""A window of this size has 223 rows, and no block has more than 256."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig(Settings):
    """How far to draft, and how guesses are verified unless a request chooses another way."""

    policy: Policy = "adaptive"
    """How the draft length is chosen: "adaptive" maximises tokens a second by measured costs and acceptance; "static"
    always drafts `max_draft_tokens`; "static_tree" always takes the `max_block_tokens` likeliest nodes of the draft
    tree; "heuristic" drafts two tokens more after a block that was fully accepted, else one less; "confidence",
    "path_probability" and "entropy" draft up to `max_draft_tokens` while the draft is confident enough. Change it to
    compare policies, or where one fixed length is known to be best."""
    pipelining: bool = True
    """Whether the draft continues while the target verifies the last block. Without it drafting and verification
    alternate, as they always do where the draft samples (above temperature 0, with any verification but "coupled").
    Unset it where draft and target share one device."""
    max_draft_tokens: int = 8
    """Largest draft length gamma (depth of the draft tree) that the policy may choose, in tokens, in [0, 64]; 0 decodes
    without drafting. Raise it where the target often accepts whole blocks."""
    max_block_tokens: int = 32
    """Largest number of nodes of a block, over all branches of its tree, in [1, 256]: the policy "adaptive" chooses up
    to this number, "static_tree" always this number. "rejection" and "block" verification use chains, whose length
    `max_draft_tokens` limits. Lower it where many sessions share the target."""
    min_path_probability: float = 0.03
    """Threshold of the policy "path_probability", in [0, 1]: a chain ends before the first guess whose path probability
    (the product of the draft's probabilities from the root down) is below it; 0 ends none early. Raise it where each
    row of the target costs time, lower it where short drafts are fully accepted."""
    min_confidence: float = 0.4
    """Threshold of the policy "confidence", in [0, 1]: a chain ends where the draft's probability of its first
    candidate is below it; 0 ends none early. Raise it where each row of the target costs time."""
    max_entropy: float = 2.0
    """Threshold of the policy "entropy", in nats, at least 0: a chain ends where the entropy of q is above it. Lower it
    where each row of the target costs time."""
    guessers: tuple[str, ...] = ("draft", "prompt_lookup", "grammar", "head")
    """Sources of guesses for requests that name none: "draft" for the draft engine, and guessers that need no model
    (docs/guessers.md); "grammar" only guesses in structured output, "head" where the target's engine has a head, and
    "template", which needs no name here, for requests that give a template. Without "draft" no lease on a draft is
    taken. With the policy "adaptive", in greedy and coupled mode, all sources guess side by side; otherwise the others
    guess only where the draft has nothing. Add "retrieval" or "lookahead" where more rows cost the target little."""
    lookup_min_match: int = 2
    """Prompt lookup: length of the shortest suffix of the text that is looked up, in tokens, in [1, 16]. Raise it where
    accidental matches waste rows."""
    lookup_max_match: int = 4
    """Prompt lookup: length of the longest suffix of the text that is looked up, in tokens, in [lookup_min_match, 16];
    longer ones are tried first. Each length costs about a microsecond a token. Raise it where texts repeat long
    passages."""
    lookup_continuation: Continuation = "latest"
    """Prompt lookup: which continuation is tried first where a suffix occurs several times, the "latest" or the
    "most_frequent". Set the latter where one phrase recurs with rare variations."""
    lookup_branches: int = 1
    """Prompt lookup: number of different continuations that are guessed side by side, in [1, 4]. Raise it where more
    rows cost the target little and texts repeat themselves with changes."""
    suffix_history_tokens: int = 16_384
    """Suffix: largest number of tokens of recent outputs that are remembered for each caller, or for each tenant to
    which keys belong, in [0, 1048576]; each takes up to 250 bytes of an orchestrator. They are used to guess later
    outputs of the same caller or tenant only. Callers without a key have no history, and only outputs of requests that
    use this guesser are remembered. Set 0 where several people share a key and response times must not reveal one's
    outputs to the others; raise it where outputs resemble much earlier ones."""
    suffix_history_callers: int = 64
    """Suffix: largest number of callers and tenants whose recent outputs an orchestrator remembers, in [1, 4096]; the
    least recently active ones are dropped first. With `suffix_history_tokens` it bounds the memory. Raise it where more
    callers are active at a time."""
    retrieval_index: str | None = None
    """Path of an index made by `outrider index`, which the guessers "retrieval", "unigram" and "bigram" need; with None
    they are not available. The file must exist on each node of an orchestrator and come from the same tokenizer. Set it
    where outputs resemble a corpus that you have."""
    lookahead_window: int = 10
    """Lookahead: width of the window in tokens, in [2, 32]. Each pass of the target gets `lookahead_window` *
    (`lookahead_ngram` - 1) - 1 rows for it. Raise it where more rows cost the target little, lower it where each costs
    time."""
    lookahead_ngram: int = 5
    """Lookahead: length of the collected n-grams in tokens, in [3, 8]; guesses are one token shorter. Raise it where
    guesses are accepted to their end."""
    verification: Verification = Verification.COUPLED
    """Verification for requests that name none: "coupled" (shared noise, trees), "rejection" or "block" (chains),
    "recursive_rejection" or "sequential_selection" (trees); see docs/exactness.md. With "coupled" the output depends on
    prompt, parameters and seed alone. Change it where another rule accepts more guesses."""
    allow_relaxed: bool = False
    """Whether requests may use a relaxed rule ("lenient_coupled", "lenient_rejection" or "typical"), whose output does
    not follow the target's distribution (docs/exactness.md, section 6). Set it where callers may trade exactness for
    speed."""
    q_top_tokens: int = 1024
    """Largest number of tokens to which q is cut before the draft samples, in [1, 4096]; fewer where fewer hold 0.995
    of the draft's probability. Used by all verifications but "coupled". Raise it for temperatures above 1; lower it
    where orchestrators are short of processor time: a block of eight guesses takes 1.6 ms with 1,024 tokens each, and
    0.2 ms with 64."""
    draft_temperature: float | None = None
    """Temperature of the draft's distribution q where the target samples, in [0.001, 100]; None uses the request's. It
    changes the acceptance rate and never the output's distribution. Set it where `outrider check --measure
    --draft-temperature` shows a gain, because the draft is over- or underconfident."""
    draft_timeout_s: float = 0.25
    """Seconds, above 0, that a round waits for the draft before it goes on without; longer if the draft is usually
    slower. Raise it where the network to the draft is slow."""
    draft_retry_s: float = 1.0
    """Seconds, above 0, before a session that lost its draft tries to lease one again; the pause doubles with each
    failure up to a minute, with jitter. Raise it where drafts take long to be replaced."""
    breaker_rounds: int = 3
    """Number of consecutive rounds with a late draft, at least 1, after which its lease is given up and, after
    `draft_retry_s`, taken again. Raise it where drafts are late only in bursts."""

    def __post_init__(self) -> None:
        check(self.policy in get_args(Policy), "policy", f"one of {', '.join(get_args(Policy))}", self.policy)
        lossless = [each for each in Verification if each.rule.is_lossless]
        check(self.verification in lossless, "verification", f"one of {', '.join(lossless)}", str(self.verification))
        self._check(ranges_of(GenerationRequest)["max_draft_tokens"], "max_draft_tokens")
        self._check(Range(1, 256), "max_block_tokens")
        self._check(SHARE, "min_confidence", "min_path_probability")
        self._check(at_least(0), "max_entropy")
        check(bool(self.guessers), "guessers", "at least one name", self.guessers)
        check(len(set(self.guessers)) == len(self.guessers), "guessers", "different names", self.guessers)
        self._check_guessers()
        self._check(whole(1, 4096), "q_top_tokens")
        self._check(ranges_of(GenerationRequest)["draft_temperature"], "draft_temperature")
        self._check(ABOVE_0, "draft_timeout_s", "draft_retry_s")
        self._check(at_least(1), "breaker_rounds")

    def _check_guessers(self) -> None:
        """Check the settings of single guessers."""
        self._check(Range(1, MAX_LOOKUP_MATCH), "lookup_min_match")
        least, most, choice = self.lookup_min_match, self.lookup_max_match, self.lookup_continuation
        allowed = f"in [lookup_min_match, {MAX_LOOKUP_MATCH}]"
        check(least <= most <= MAX_LOOKUP_MATCH, "lookup_max_match", allowed, most)
        check(choice in get_args(Continuation), "lookup_continuation", "latest or most_frequent", choice)
        self._check(Range(1, MAX_LOOKUP_BRANCHES), "lookup_branches")
        self._check(Range(2, MAX_LOOKAHEAD_WINDOW), "lookahead_window")
        self._check(Range(3, MAX_LOOKAHEAD_NGRAM), "lookahead_ngram")
        self._check(whole(0, MAX_HISTORY_TOKENS), "suffix_history_tokens")
        self._check(whole(1, MAX_HISTORY_CALLERS), "suffix_history_callers")
