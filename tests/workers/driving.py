"""Drives engines by hand: one session's requests in a row, and the plain output to compare with."""

from __future__ import annotations

from core.records import (
    Drafted,
    DraftRequest,
    Missing,
    Sampling,
    SequenceSpec,
    Stamp,
    Verification,
    VerifyRequest,
)
from core.token_log import TokenLog
from core.trees import EMPTY_BLOCK, NO_GROWTH, Growth, TokenTree, grown

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
        base = min(self.held, len(self.log) - 1)
        spec = None if base else self.spec
        return Stamp(self.session, EPOCH, self.round), self.log.base(base), self.log.since(base), spec

    def verify_request(self, block=EMPTY_BLOCK):
        stamp, base, suffix, spec = self._message()
        return VerifyRequest(stamp, base, suffix, block, spec)

    def draft_request(self, growth=NO_GROWTH, block=EMPTY_BLOCK, *, is_table=False):
        """Of a growth, or of a chain of so many tokens."""
        stamp, base, suffix, spec = self._message()
        growth = Growth.chain(growth) if isinstance(growth, int) else growth
        return DraftRequest(stamp, base, suffix, growth, block, is_table, spec)

    def verify(self, block=EMPTY_BLOCK):
        """Verify, commit, and return the verdict."""
        verdict = answer(self.engine, self.verify_request(block))
        self.engine.check_integrity()
        self.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        self.held = verdict.held
        return verdict

    def ask(self, *args, **kwargs):
        """The reply to a draft request, and the request again when the engine misses what comes before it."""
        reply = answer(self.engine, self.draft_request(*args, **kwargs))
        while isinstance(reply, Missing):
            self.held = reply.held
            reply = answer(self.engine, self.draft_request(*args, **kwargs))
        self.engine.check_integrity()
        if isinstance(reply, Drafted):
            self.held = reply.held
        return reply

    def draft(self, growth, **kwargs):
        """The block that the draft grows, all of which has to be there."""
        growth = Growth.chain(growth) if isinstance(growth, int) else growth
        drafted = self.ask(growth, **kwargs)
        return TokenTree(drafted.tokens, growth.parents, drafted.q)

    def table(self, growth, block=EMPTY_BLOCK, **kwargs):
        """The reply to a table below `block`, and the tree that it makes."""
        drafted = self.ask(growth, block, is_table=True, **kwargs)
        return drafted, grown(block, growth, drafted.tokens, drafted.q)[0]

    def run(self, num_tokens):
        """Plain decoding: the next `num_tokens` tokens."""
        return [self.verify().next_token for _ in range(num_tokens)]


def wrong(token):
    return (token + 1) % 250


def chain(*tokens):
    return TokenTree.chain(tokens)
