"""Drives engines by hand: one session's requests in a row, and the plain output to compare with."""

from __future__ import annotations

from core.records import (
    EMPTY_BLOCK,
    DraftRequest,
    Sampling,
    SequenceSpec,
    Stamp,
    TokenTree,
    Verification,
    VerifyRequest,
)
from core.token_log import TokenLog

EPOCH = 7


def answer(engine, request, ticket=1):
    """The reply to one request on an engine that has nothing else to do."""
    engine.add(ticket, request)
    while True:
        for found, reply in engine.step():
            if found == ticket:
                return reply


class Driver:
    """What an orchestrator knows of one session on one engine."""

    def __init__(
        self, engine, prompt, sampling=None, verification=Verification.COUPLED, session="s", num_logprobs=None
    ):
        self.engine = engine
        self.session = session
        self.log = TokenLog(prompt)
        self.spec = SequenceSpec(len(prompt), sampling or Sampling(temperature=0.0), verification, num_logprobs)
        self.held = 0
        self.round = 0

    def _message(self):
        self.round += 1
        spec = None if self.held else self.spec
        return Stamp(self.session, EPOCH, self.round), self.log.base(self.held), self.log.since(self.held), spec

    def verify_request(self, block=EMPTY_BLOCK):
        stamp, base, suffix, spec = self._message()
        return VerifyRequest(stamp, base, suffix, block, spec)

    def draft_request(self, num_tokens):
        stamp, base, suffix, spec = self._message()
        return DraftRequest(stamp, base, suffix, num_tokens, spec)

    def verify(self, block=EMPTY_BLOCK):
        """Verify, commit, and return the verdict."""
        verdict = answer(self.engine, self.verify_request(block))
        self.engine.check_integrity()
        self.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        self.held = verdict.held
        return verdict

    def draft(self, num_tokens):
        drafted = answer(self.engine, self.draft_request(num_tokens))
        self.engine.check_integrity()
        self.held = drafted.held
        return drafted.block

    def run(self, num_tokens):
        """Plain decoding: the next `num_tokens` tokens."""
        return [self.verify().next_token for _ in range(num_tokens)]


def wrong(token):
    return (token + 1) % 250


def chain(*tokens):
    return TokenTree.chain(tokens)
