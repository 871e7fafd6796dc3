"""One sequence's position in its grammar, and the tokens that the grammar allows after each of its rows.

The state is a function of the output's tokens alone. Each call passes all of them, and reuses the state of the previous
call as far as the tokens agree. A rejected guess, a rollback, another replica and a first message are handled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import numpy as np
from llguidance import LLMatcher

from core.records import Grammar
from workers.grammar.compiler import CompiledGrammar, GrammarProblem, Mask, mask_of, problem_of


class GrammarState:
    """Grammar state of one sequence. Ready once its grammar has been compiled, or has failed to compile."""

    def __init__(self, grammar: Grammar, compile_it: Callable[[], Future[CompiledGrammar]], vocab_size: int) -> None:
        self.grammar = grammar
        self.problem: str | None = None
        """Why a row's mask allows nothing; None if there was no such row."""
        self._compile = compile_it
        self._compiled = compile_it()
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._nothing: Mask = np.zeros(-(-vocab_size // 8), np.uint8)

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until it is ready."""
        wait([self._compiled], timeout_s)

    def masks(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Mask | None]:
        """Masks of the tokens allowed after `output` and each path of guesses; the empty path is the output itself.

        None for a path with a guess that the grammar forbids or that ends the output: its row does not matter. If the
        grammar fails or forbids the output itself, the mask allows nothing, and `problem` says why.
        """
        try:
            return self._masks(list(output), paths)
        except GrammarProblem as problem:
            if not self._is_exhausted:
                return self._give_up(problem, len(paths))
        self._compiled = self._compile()  # the state shared by all sequences of the grammar was full: compile again
        try:
            return self._masks(list(output), paths)
        except GrammarProblem as problem:
            return self._give_up(problem, len(paths))

    @property
    def _is_exhausted(self) -> bool:
        return self._compiled.exception() is None and self._compiled.result().is_exhausted

    def _give_up(self, problem: GrammarProblem, num_paths: int) -> list[Mask | None]:
        self.problem = str(problem)
        return [self._nothing] * num_paths

    def _masks(self, output: list[int], paths: Sequence[Sequence[int]]) -> list[Mask | None]:
        """Raises: GrammarProblem if the problem is with the output itself, not with a guess."""
        if not self._go_to(0, output):
            if self._has_ended(output):
                return [None] * len(paths)
            raise GrammarProblem("it forbids what the output already has")
        masks: list[Mask | None] = [None] * len(paths)
        order = sorted(range(len(paths)), key=lambda index: tuple(paths[index]))  # common prefixes side by side
        for done, index in enumerate(order):
            try:
                masks[index] = self._mask() if self._go_to(len(output), paths[index]) else None
            except GrammarProblem as problem:
                if not paths[index]:
                    raise
                for left in order[done:]:
                    masks[left] = self._nothing
                self.problem = str(problem)
                return masks
        self._go_to(len(output), ())
        return masks

    def _has_ended(self, output: Sequence[int]) -> bool:
        token_id, mask = output[len(self._consumed)], self._mask()
        is_end = token_id in self._compiled.result().eos_token_ids
        return is_end and bool(mask[token_id >> 3] >> (token_id & 7) & 1)

    def _mask(self) -> Mask:
        """Raises: GrammarProblem."""
        assert self._matcher is not None
        try:
            return mask_of(self._matcher, self._compiled.result())
        except GrammarProblem:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop the library's state after an error. State shared with other sequences may be unusable, too."""
        self._compiled.result().is_exhausted = True
        self._matcher, self._consumed = None, []

    def _go_to(self, start: int, tokens: Sequence[int]) -> bool:
        """Consume `tokens` after the first `start` consumed ones, as far as allowed. Returns whether all are allowed.

        A token that ends the output is never consumed, because the library cannot roll it back. Raises: GrammarProblem.
        """
        if self._matcher is None:
            self._matcher = self._compiled.result().start.deep_copy()
        num_kept = start + _num_common(self._consumed[start:], tokens)
        if len(self._consumed) > num_kept:
            self._matcher.rollback(len(self._consumed) - num_kept)
            del self._consumed[num_kept:]
        rest = self._before_end(tokens[num_kept - start :])
        num_taken = self._matcher.try_consume_tokens(rest)
        self._consumed += rest[:num_taken]
        if self._matcher.is_error():
            problem = problem_of(self._matcher)
            self._forget()
            raise problem
        if num_taken < len(rest):
            self._check_refusal(rest[num_taken])
        return num_kept + num_taken == start + len(tokens)

    def _check_refusal(self, token_id: int) -> None:
        """Raises: GrammarProblem if a limit of the library, not the grammar, has refused this token.

        At a limit of the state that sequences share, the library refuses a token without an error. The mask tells the
        two cases apart: it still allows the token.
        """
        mask = self._mask()
        if token_id >> 3 < len(mask) and mask[token_id >> 3] >> (token_id & 7) & 1:
            self._forget()
            raise GrammarProblem("a limit of what outputs of the grammar share has been reached")

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        ends = self._compiled.result().eos_token_ids
        num_before = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
        return list(tokens[:num_before])


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
