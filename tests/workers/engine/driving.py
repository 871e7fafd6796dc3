"""Drives engines by hand: one session's requests in a row, and the plain output to compare with."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from core.records import (
    DraftRequest,
    DraftUpdate,
    Missing,
    Sampling,
    SequenceSpec,
    Stamp,
    Verification,
    VerifyRequest,
)
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, TokenTree
from core.text.token_log import TokenLog

EPOCH = 7


def answer(engine, request):
    """The first reply to one request."""
    engine.add(request)
    while True:
        for reply in engine.step():
            if reply.stamp == request.stamp:
                return reply


def step(engine):
    """The last reply of one step to each session, by its name."""
    return {reply.stamp.lease: reply for reply in engine.step()}


def run(engine):
    """The last reply to each session, by its name, in the order in which they come."""
    replies = {}
    while engine.has_work:
        replies.update(step(engine))
        engine.check_integrity()
    return replies


def answer_all(engine, requests):
    """The replies to requests of different sessions that share their first step."""
    for request in requests:
        engine.add(request)
    replies = run(engine)
    return [replies[request.stamp.lease] for request in requests]


def has_grown(reply):
    """Whether growth has come to its end, and was not refused or missing something."""
    return isinstance(reply, DraftUpdate) and reply.is_over


@contextmanager
def poisoned(engine, row):
    """Meanwhile, this row of every step is NaN."""
    forward = engine._runtime.forward

    def broken(batch):
        logits = forward(batch).clone()
        logits[row] = torch.nan
        return logits

    with patch.object(engine._runtime, "forward", broken):
        yield


class Driver:
    """An orchestrator's view of one session on one engine."""

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

    def draft_request(self, growth):
        """A request for continuous growth, or for a chain of this number of tokens."""
        stamp, base, suffix, spec = self._message()
        return DraftRequest(stamp, base, suffix, TreeSpec.chain(growth) if isinstance(growth, int) else growth, spec)

    def verify(self, block=EMPTY_BLOCK):
        """Verify, commit, and return the verdict."""
        verdict = answer(self.engine, self.verify_request(block))
        self.engine.check_integrity()
        self.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        self.held = verdict.held
        return verdict

    def ask(self, growth):
        """The reply to a draft request, and the request again when the engine misses what comes before it."""
        reply = answer(self.engine, self.draft_request(growth))
        while isinstance(reply, Missing):
            self.held = reply.held
            reply = answer(self.engine, self.draft_request(growth))
        self.engine.check_integrity()
        if has_grown(reply):
            self.held = reply.held
        return reply

    def draft(self, growth):
        """All that has grown below the text; or a chain of so many tokens, all of which have to be there."""
        tree_spec = TreeSpec.chain(growth) if isinstance(growth, int) else growth
        tree = tree_of(self.ask(replace(tree_spec, reports_all=True)))
        if not isinstance(growth, int):
            return tree
        assert len(tree) >= growth, "there is room for every guess"
        return tree.prefix(growth)

    def run(self, num_tokens):
        """Plain decoding: the next `num_tokens` tokens."""
        return [self.verify().next_token for _ in range(num_tokens)]


def tree_of(reply):
    """The whole growth of a draft that reports all it has."""
    new_nodes = reply.new_nodes
    assert new_nodes.first == 0
    return TokenTree(tuple(new_nodes.tokens.tolist()), tuple(new_nodes.parents.tolist()), new_nodes.q)


def wrong(token):
    return (token + 1) % 250


def chain(*tokens):
    return TokenTree.chain(tokens)
