"""Fakes that can be worked out by hand.

The fake target's next token is a small function of the whole prefix, so that any lost, repeated or reordered token
changes everything after it. The fake draft knows that function, is wrong at every third position, where the right token
is its second choice, and at every ninth has no idea of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.config import SpeculationConfig
from core.protocol import HeldTokens, missing_of
from core.records import (
    DraftReply,
    DraftRequest,
    DraftUpdate,
    GenerationRequest,
    Missing,
    ModelInfo,
    Sampling,
    Timing,
    Verdict,
    VerifyReply,
    VerifyRequest,
)
from core.reference import decode, verify
from core.speculation.candidates import Candidates
from core.speculation.token_tree import SparseDistribution, TokenTree
from core.text.token_log import TokenLog
from orchestrator.policy.named import ChainPolicy
from orchestrator.policy.policy import ControlReport, RoundOutcome
from orchestrator.policy.shared_estimates import SharedEstimates
from tests.core.toys import nodes_of, tree_of

VOCAB_SIZE = 50
EOS = 0


def next_token(prefix: Sequence[int]) -> int:
    """1 to 49: the weighted sum of the prefix. Never the end-of-sequence token."""
    return 1 + sum((index % 7 + 1) * token for index, token in enumerate(prefix)) % (VOCAB_SIZE - 1)


def plain(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The only correct completion of `prompt`."""
    return [*decode(next_token, tuple(prompt), num_tokens)]


def model_info(name: str = "fake", max_context_tokens: int = 1000) -> ModelInfo:
    return ModelInfo(name, "Fake", "float32", "cpu", 0, VOCAB_SIZE, max_context_tokens, 10_000, (EOS,))


def request(prompt: Sequence[int] = (3, 1, 4), max_tokens: int = 12, **changes: object) -> GenerationRequest:
    fields = {"request_id": "r", "sampling": Sampling(temperature=0.0), **changes}
    return GenerationRequest(prompt=tuple(prompt), max_tokens=max_tokens, **fields)


class FakeEngine:
    """Holds a token log for each session, by the rule that real engines follow."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.logs: dict[str, TokenLog] = {}

    def _extend(self, request: VerifyRequest | DraftRequest) -> TokenLog | Missing:
        assert request.stamp.epoch == self.epoch, "a message for another incarnation"
        assert request.suffix, "a message brings a token at least: the root"
        if request.base.num_tokens == 0:
            assert request.spec is not None, "a first message carries the spec"
            self.logs[request.stamp.lease] = TokenLog()
        log = self.logs.get(request.stamp.lease)
        if log is None or not log.holds(request.base):
            return Missing(request.stamp, 0)
        log.truncate(request.base.num_tokens)
        log.extend(request.suffix)
        return log

    def forget(self, session: str) -> None:
        self.logs.pop(session, None)


class FakeTargetEngine(FakeEngine):
    """Accepts what equals its own next token."""

    num_cached = 0
    """Number of cached tokens that each verdict reports."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        log = self._extend(request)
        if isinstance(log, Missing):
            return log
        path, token = self.decide(tuple(log.tokens), request.block)
        log.extend([request.block.tokens[node] for node in path])
        return Verdict(request.stamp, path, token, held=len(log), num_cached=self.num_cached)

    def decide(self, text: tuple[int, ...], block: TokenTree) -> tuple[tuple[int, ...], int]:
        accepted, token = verify(next_token, text, tree_of(block))
        return nodes_of(block, accepted), token


NUM_RANKS = 6


def candidates(prefix: Sequence[int]) -> tuple[int, ...]:
    """The fake draft's candidates after `prefix`, likeliest first."""
    right = next_token(prefix) - 1
    first = 1 if len(prefix) % 3 == 0 else 0
    order = [right + first, right + 1 - first, *range(right + 2, right + NUM_RANKS)]
    if len(prefix) % 9 == 0:
        order = list(range(right + 1, right + 1 + NUM_RANKS))
    return tuple(1 + token % (VOCAB_SIZE - 1) for token in order)


def said_after(tokens: Sequence[int], *, is_sampled: bool) -> Candidates:
    """Where it samples, what it draws is its first candidate, of two that it thought as likely."""
    ranked = candidates(tokens)
    if not is_sampled:
        return Candidates(ranked, 0.9)
    return Candidates(ranked, 0.5, sampled=ranked[0], q=SparseDistribution(ranked[:2], (0.5, 0.5)))


class FakeDraftEngine:
    """Grows what it is asked for from `candidates`, by the rule that real drafts follow."""

    says_after = staticmethod(said_after)

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.held: dict[str, HeldTokens] = {}

    @property
    def logs(self) -> dict[str, TokenLog]:
        """The text of each of its sessions."""
        return {session: held.log for session, held in self.held.items()}

    def draft(self, request: DraftRequest) -> DraftReply:
        """Growth that continues until it ends, each guess nearly certain."""
        assert request.stamp.epoch == self.epoch, "a message for another incarnation"
        session = request.stamp.lease
        if request.spec is not None:
            self.held[session] = HeldTokens(request.spec)
        if (missing := missing_of(request, self.held.get(session))) is not None:
            return missing
        held = self.held[session]
        held.log.extend(held.rebase_to_grow(request, request.growth).pending)
        builder = held.builder
        while builder.being_fed:
            texts = [[*held.log.tokens, *builder.path(node)] for node in builder.being_fed]
            builder.take([self.says_after(tokens, is_sampled=held.spec.needs_q) for tokens in texts])
            builder.count_pass()
            builder.feed_pass(request.growth.rows_per_pass)
        return DraftUpdate(request.stamp, builder.report(), request.num_committed, is_over=True)

    def forget(self, session: str) -> None:
        self.held.pop(session, None)


class FakePolicy(ChainPolicy):
    """Always the same: in turn, chains of `gamma`. It learns nothing, and offers nothing."""

    may_offer = False
    timeout_s = 2.0

    def __init__(self, gamma: int = 4) -> None:
        config = SpeculationConfig(policy="static", pipelining=False, max_draft_tokens=gamma)
        super().__init__(request(), config, SharedEstimates())
        self.seen: list[object] = []
        self.is_closed = False

    def observe_round(self, seen: RoundOutcome) -> None:
        self.seen.append(seen)

    def observe_draft(self, elapsed_s: float, timing: Timing | None) -> None:
        self.seen.append((elapsed_s, timing))

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakePolicies:
    """Gives every session a FakePolicy of its own."""

    gamma: int = 4
    made: list[FakePolicy] = field(default_factory=list)

    def policy(self, request: GenerationRequest) -> FakePolicy:
        asked = request.max_draft_tokens
        self.made.append(FakePolicy(self.gamma if asked is None else min(asked, self.gamma)))
        return self.made[-1]

    def report(self) -> ControlReport:
        return ControlReport("fake", 0, self.gamma, self.gamma, "it never changes", (), 0.0)


class FakeTokenizer:
    """Token n is the character at n of a fixed alphabet; token 0 is special and has no text."""

    ALPHABET = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
    is_byte_level = True

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_bytes(self, token_id: int) -> bytes:
        return self.ALPHABET[token_id].encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.ALPHABET[token_id] for token_id in token_ids if token_id != EOS)
