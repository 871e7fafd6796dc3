"""Guesses the tokens that a grammar forces next in one output; needs no model.

If the grammar forces the next bytes, masks allow only their usual tokenization (docs/adr/grammars), so these tokens
have a chance of 1, whatever the target's distribution. If several tokens may begin the forced bytes, they share that
chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import thread_time

import numpy as np
from llguidance import LLMatcher

from core.speculation import NO_GUESSES, ROOT, Guesses
from workers.grammar.compiler import CompiledGrammar, GrammarProblem, mask_of, problem_of

MAX_NODES = 32
"""Limit on the nodes of one call: more than a block has room for with the default settings."""
MAX_ALTERNATIVES = 4
"""If more tokens may begin the forced bytes, none is guessed. On JSON, a limit of 2 gives 3% fewer tokens a pass, and a
limit of 8 no more."""
MAX_NEW_TOKENS = 1024
"""Limit on the output tokens consumed in one call; a token takes 1 to 2 microseconds."""
TAKEN_TOGETHER = 16
"""Number of tokens consumed between two checks of the clock."""
FREE_S, FREE_TOKEN_S = 0.03, 3e-4
"""Budget in seconds of the caller's thread for all calls of an output: a fixed part, and a part for each of its tokens.
JSON takes a quarter of it. With an ambiguous grammar the cost grows with the output, to seconds for one token."""


class ForcedTokens:
    """Forced tokens of one output, which only grows. Not thread-safe."""

    def __init__(self, compiled: Future[CompiledGrammar], *, is_binding: bool = True) -> None:
        """`is_binding`: whether the output must match the grammar; otherwise it may leave the grammar for good."""
        self._compiled = compiled
        self._is_binding = is_binding
        self._has_left = False
        self._matcher: LLMatcher | None = None
        self._num_taken = 0
        self._run: list[int] = []
        """Tokens known to be forced after the consumed ones, so that a long run is computed only once."""
        self._spent_s = self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<ForcedTokens after {self._num_taken}>"

    def after(self, output: Sequence[int], max_depth: int) -> Guesses:
        """Guess what follows `output`, at most `max_depth` tokens deep.

        No guesses before the grammar has been compiled, after the time budget is spent, or once the output has left the
        grammar. Raises: GrammarProblem if it does not compile or cannot be followed, or if it is binding and forbids
        the output.
        """
        if self._has_left or not self._compiled.done():
            return NO_GUESSES
        began_s = thread_time()
        self._until_s = began_s + FREE_S + FREE_TOKEN_S * self._num_taken - self._spent_s
        try:
            return self._answer(output, max_depth)
        finally:
            self._spent_s += thread_time() - began_s

    @property
    def _is_over(self) -> bool:
        return self._has_left or self._is_over_budget

    @property
    def _is_over_budget(self) -> bool:
        """Whether the time budget is spent. It then stays so, because no more of the output is consumed."""
        return thread_time() >= self._until_s

    def _answer(self, output: Sequence[int], max_depth: int) -> Guesses:
        if self._matcher is None:
            self._matcher = self._compiled.result().start.deep_copy()
        most = min(len(output), self._num_taken + MAX_NEW_TOKENS)
        while self._num_taken < most and not self._is_over:
            self._take(self._matcher, output[self._num_taken : min(most, self._num_taken + TAKEN_TOGETHER)])
        if self._num_taken < len(output) or self._is_over_budget:
            return NO_GUESSES
        if not self._run:
            self._run = self._forced(self._matcher)
        return self._guesses(self._matcher, max_depth)

    def _take(self, matcher: LLMatcher, tokens: Sequence[int]) -> None:
        if matcher.try_consume_tokens(list(tokens)) < len(tokens):
            self._leave(matcher)
            return
        self._num_taken += len(tokens)
        is_as_forced = list(tokens) == self._run[: len(tokens)]
        self._run = self._run[len(tokens) :] if is_as_forced else []

    def _leave(self, matcher: LLMatcher) -> None:
        """Raises: GrammarProblem."""
        if matcher.is_error():
            raise self._problem(matcher)
        if self._is_binding:
            self._compiled.result().is_exhausted = True  # the output matches the grammar, so a limit has refused it
            raise GrammarProblem("it forbids what the output has")
        self._has_left = True

    def _forced(self, matcher: LLMatcher) -> list[int]:
        """Raises: GrammarProblem."""
        tokens = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        if matcher.is_error():
            raise self._problem(matcher)
        return tokens

    def _problem(self, matcher: LLMatcher) -> GrammarProblem:
        self._compiled.result().is_exhausted = True  # the state shared by all outputs of the grammar may be full
        return problem_of(matcher)

    def _guesses(self, matcher: LLMatcher, max_depth: int) -> Guesses:
        nodes = _Nodes()
        end = nodes.add_run(ROOT, self._run[:max_depth])
        if len(self._run) < max_depth:
            below = matcher.deep_copy()
            below.try_consume_tokens(self._run)
            self._branch(nodes, end, below, max_depth - len(self._run))
        return nodes.guesses()

    def _branch(self, nodes: _Nodes, end: int, matcher: LLMatcher, depth: int) -> None:
        """Add the tokens that may begin forced bytes below `end`, with what follows each of them.

        `matcher` is at `end`, where no token is forced. Without forced bytes no mask is computed: it may take long.
        """
        if self._is_over_budget or matcher.is_stopped() or not matcher.compute_ff_bytes():
            return
        tokens = np.flatnonzero(np.unpackbits(mask_of(matcher, self._compiled.result()), bitorder="little")).tolist()
        if len(tokens) > MAX_ALTERNATIVES:
            return
        for token in tokens:
            child = nodes.add(end, token, 1.0 / len(tokens))
            if depth > 1 and nodes.has_room and not self._is_over_budget:
                below = matcher.deep_copy()
                below.try_consume_tokens([token])
                run = self._forced(below)[: depth - 1]
                last = nodes.add_run(child, run)
                if len(run) < depth - 1:
                    below.try_consume_tokens(run)
                    self._branch(nodes, last, below, depth - 1 - len(run))


class _Nodes:
    """Builder of `Guesses`, with at most a few nodes more than `MAX_NODES`."""

    def __init__(self) -> None:
        self._parents, self._tokens = list[int](), list[int]()
        self._chances = list[float]()

    @property
    def has_room(self) -> bool:
        return len(self._tokens) < MAX_NODES

    def add(self, parent: int, token: int, chance: float) -> int:
        self._parents.append(parent)
        self._tokens.append(token)
        self._chances.append(chance)
        return len(self._tokens) - 1

    def add_run(self, parent: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            parent = self.add(parent, token, 1.0)
        return parent

    def guesses(self) -> Guesses:
        return Guesses(tuple(self._parents), tuple(self._tokens), tuple(self._chances))
