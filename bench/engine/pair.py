"""A target and a draft engine in this process, without Ray, that draft and verify in turn.

Knows an orchestrator's messages without pipelining; must not know what is measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.engine.driver import EPOCH, DrivenStream, load_engine, new_stream, play
from core.config import EngineConfig
from core.records import DraftRequest, DraftUpdate, Sampling, SequenceSpec, Stamp
from core.speculation import EMPTY_BLOCK, TokenTree, TreeSpec
from workers.engine import DraftEngine, TargetEngine

Q_TOP_TOKENS = 64
"""The served value. Greedy guesses carry no q."""
NAMES = (f"stream {number}" for number in itertools.count())
"""Unique names of sessions."""
SEEDS = itertools.count()
"""Unique seeds of sampled texts, so that their noise is never cached."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion, and its number of verifications after prefill."""

    tokens: tuple[int, ...]
    num_rounds: int


@dataclass(eq=False, slots=True)
class _Drafting:
    """One session on the draft."""

    engine: DraftEngine
    held: int = 0
    num_rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def block(self, stream: DrivenStream, num_guesses: int) -> TokenTree:
        """The draft's own continuation of the committed tokens."""
        base = min(self.held, len(stream.log) - 1)
        spec = None if base else SequenceSpec(stream.num_prompt, stream.sampling)
        stamp = Stamp(stream.name, EPOCH, next(self.num_rounds))
        growth = TreeSpec.chain(num_guesses)
        self.engine.add(DraftRequest(stamp, stream.log.base(base), stream.log.since(base), growth, spec=spec))
        grown = self._reply()
        assert len(grown.new_nodes) == num_guesses, "there is room for every guess"
        self.held = grown.held
        return TokenTree.chain(grown.new_nodes.tokens.tolist())

    def _reply(self) -> DraftUpdate:
        while True:
            for reply in self.engine.step():
                assert isinstance(reply, DraftUpdate), reply
                return reply


class EnginePair:
    """Completes prompts, mostly greedily. The methods differ in the blocks that are verified."""

    def __init__(self, target: TargetEngine, draft: DraftEngine) -> None:
        self.target = target
        self.draft = draft

    @classmethod
    def load(cls, target: EngineConfig, draft: EngineConfig) -> EnginePair:
        """Load and warm up both engines. Raises: StartupError."""
        drafting = DraftEngine.load(draft, EPOCH, Q_TOP_TOKENS, lambda _: None)
        drafting.warm_up(lambda _: None)
        return cls(load_engine(target), drafting)

    def plain(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        """Complete without guesses."""
        return self._complete(new_stream(next(NAMES), prompt), num_tokens, lambda _: EMPTY_BLOCK)

    def sampled(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        """Complete without guesses at T = 1, with a new seed each time."""
        stream = new_stream(next(NAMES), prompt, Sampling(temperature=1.0, seed=next(SEEDS)))
        return self._complete(stream, num_tokens, lambda _: EMPTY_BLOCK)

    def rejected(self, prompt: Sequence[int], num_tokens: int, num_guesses: int) -> Completion:
        """Complete with random guesses, which are almost never right. Measures the cost of verification."""

        def guesses(_: DrivenStream) -> TokenTree:
            return TokenTree.chain([random.randrange(self.target.info.vocab_size) for _ in range(num_guesses)])

        return self._complete(new_stream(next(NAMES), prompt), num_tokens, guesses)

    def speculative(self, prompt: Sequence[int], num_tokens: int, gamma: int) -> Completion:
        """Complete with `gamma` guesses of the draft in each round, fewer at the end."""
        stream, drafting = new_stream(next(NAMES), prompt), _Drafting(self.draft)

        def guesses(stream: DrivenStream) -> TokenTree:
            num_guesses = min(gamma, num_tokens - len(stream.output) - 1)
            return drafting.block(stream, num_guesses) if num_guesses else EMPTY_BLOCK

        completion = self._complete(stream, num_tokens, guesses)
        self.draft.release([stream.name])
        return completion

    def drafted(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """The draft's own completion, as one long chain of guesses."""
        stream = new_stream(next(NAMES), prompt)
        tokens = _Drafting(self.draft).block(stream, num_tokens).tokens
        self.draft.release([stream.name])
        return tokens

    def _complete(
        self, stream: DrivenStream, num_tokens: int, guesses: Callable[[DrivenStream], TokenTree]
    ) -> Completion:
        play(self.target, [stream])
        num_rounds = 0
        while len(stream.output) < num_tokens:
            play(self.target, [stream], [guesses(stream)])
            num_rounds += 1
        self.target.release([stream.name])
        return Completion(stream.output[:num_tokens], num_rounds)
