"""Drives target engines in this process, without Ray, by sending an orchestrator's messages.

Knows engines and their messages; must not know what is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.config import EngineConfig
from core.records import Sampling, SequenceSpec, Stamp, Verdict, VerifyRequest
from core.speculation import EMPTY_BLOCK, TokenTree
from core.text import TokenLog
from workers.engine import TargetEngine

EPOCH = 1
GREEDY = Sampling(temperature=0.0)


@dataclass(eq=False)
class DrivenStream:
    """One session."""

    name: str
    log: TokenLog
    num_prompt: int
    sampling: Sampling
    held: int = 0
    num_rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.log.tokens[self.num_prompt :])

    def request(self, block: TokenTree = EMPTY_BLOCK) -> VerifyRequest:
        base = min(self.held, len(self.log) - 1)
        spec = None if base else SequenceSpec(self.num_prompt, self.sampling)
        stamp = Stamp(self.name, EPOCH, next(self.num_rounds))
        return VerifyRequest(stamp, self.log.base(base), self.log.since(base), block, spec)

    def take(self, block: TokenTree, verdict: Verdict) -> None:
        """Commit the accepted tokens of the block and the next token."""
        self.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        self.held = verdict.held


def new_stream(name: str, prompt: Sequence[int], sampling: Sampling = GREEDY) -> DrivenStream:
    """Return a session without output."""
    return DrivenStream(name, TokenLog(prompt), len(prompt), sampling)


def load_engine(config: EngineConfig) -> TargetEngine:
    """Load and warm up an engine. Raises: StartupError."""
    engine = TargetEngine.load(config, EPOCH, lambda _: None)
    engine.warm_up(lambda _: None)
    return engine


def play(engine: TargetEngine, streams: Sequence[DrivenStream], blocks: Sequence[TokenTree] | None = None) -> None:
    """Get a verdict for each stream on its block. Without `blocks` all are empty, which is plain decoding."""
    blocks = blocks or [EMPTY_BLOCK] * len(streams)
    asked = {stream.name: (stream, block) for stream, block in zip(streams, blocks, strict=True)}
    for stream, block in asked.values():
        engine.add(stream.request(block))
    while engine.has_work:
        for verdict in engine.step():
            assert isinstance(verdict, Verdict), verdict
            stream, block = asked[verdict.stamp.lease]
            stream.take(block, verdict)
