"""Fakes that can be worked out by hand.

The fake target's next token is a small function of the whole prefix, so that any lost, repeated or reordered token
changes everything after it. The fake draft knows that function and is wrong at every third position.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.records import (
    Drafted,
    DraftReply,
    DraftRequest,
    GenerationRequest,
    Missing,
    ModelInfo,
    Sampling,
    TokenTree,
    Verdict,
    VerifyReply,
    VerifyRequest,
)
from core.token_log import TokenLog

VOCAB_SIZE = 50
EOS = 0


def next_token(prefix: Sequence[int]) -> int:
    """1 to 49: the weighted sum of the prefix. Never the end-of-sequence token."""
    return 1 + sum((index % 7 + 1) * token for index, token in enumerate(prefix)) % (VOCAB_SIZE - 1)


def plain(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any correct completion of `prompt` is."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


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
            self.logs[request.stamp.session] = TokenLog()
        log = self.logs.get(request.stamp.session)
        if log is None or not log.holds(request.base):
            return Missing(request.stamp, 0)
        log.truncate(request.base.num_tokens)
        log.extend(request.suffix)
        return log

    def forget(self, session: str) -> None:
        self.logs.pop(session, None)


class FakeTargetEngine(FakeEngine):
    """Accepts what equals its own next token."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        log = self._extend(request)
        if isinstance(log, Missing):
            return log
        path: list[int] = []
        parent, token = -1, next_token(log.tokens)
        while (node := request.block.child(parent, token)) is not None:
            path.append(node)
            log.extend([token])
            parent, token = node, next_token(log.tokens)
        return Verdict(request.stamp, tuple(path), token, held=len(log))


class FakeDraftEngine(FakeEngine):
    """Guesses a chain, wrong at each position that three divides."""

    def draft(self, request: DraftRequest) -> DraftReply:
        log = self._extend(request)
        if isinstance(log, Missing):
            return log
        tokens = list(log.tokens)
        for _ in range(request.num_tokens):
            right = next_token(tokens)
            tokens.append(right if len(tokens) % 3 else right % (VOCAB_SIZE - 1) + 1)
        return Drafted(request.stamp, TokenTree.chain(tokens[len(log) :]), held=len(log))


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
