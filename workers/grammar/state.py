"""Where one sequence stands in its grammar, and so which tokens may come after each of its rows.

A state is a function of the output's tokens alone: each question brings all of them, and what is kept of the question
before is only where it agrees. So a rejected guess, a rollback, another replica and a first message are one case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import numpy as np
from llguidance import LLMatcher

from core.records import Grammar
from workers.grammar.compiler import CompiledGrammar, GrammarProblem, Mask, mask_of, problem_of


class GrammarState:
    """Of one sequence. Ready as soon as its grammar has been compiled, or has turned out not to compile."""

    def __init__(self, grammar: Grammar, compile_it: Callable[[], Future[CompiledGrammar]], vocab_size: int) -> None:
        self.grammar = grammar
        self.problem: str | None = None
        """Why a row was masked whole, if one was."""
        self._compile = compile_it
        self._compiled = compile_it()
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._nothing: Mask = np.zeros(-(-vocab_size // 8), np.uint8)

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready, at most `timeout_s`."""
        wait([self._compiled], timeout_s)

    def masks(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Mask | None]:
        """The tokens that may come after `output` and each path of guesses below it; the empty path is its end.

        None where none can come, because a guess on the path is one that the grammar forbids, or ends the output: such
        a row is of no account. Where the grammar cannot say, or forbids what the output already has, nothing may come,
        and `problem` says why.
        """
        try:
            return self._masks(list(output), paths)
        except GrammarProblem as problem:
            if not self._is_spent:
                return self._give_up(problem, len(paths))
        self._compiled = self._compile()  # what all sequences of the grammar have in common was full: begin anew
        try:
            return self._masks(list(output), paths)
        except GrammarProblem as problem:
            return self._give_up(problem, len(paths))

    @property
    def _is_spent(self) -> bool:
        return self._compiled.exception() is None and self._compiled.result().is_spent

    def _give_up(self, problem: GrammarProblem, num_paths: int) -> list[Mask | None]:
        self.problem = str(problem)
        return [self._nothing] * num_paths

    def _masks(self, output: list[int], paths: Sequence[Sequence[int]]) -> list[Mask | None]:
        """Raises: GrammarProblem where it is with the output itself, and not with a guess."""
        if not self._go_to(0, output):
            if self._has_ended(output):
                return [None] * len(paths)
            raise GrammarProblem("it forbids what the output already has")
        masks: list[Mask | None] = [None] * len(paths)
        order = sorted(range(len(paths)), key=lambda index: tuple(paths[index]))  # beginnings in common, side by side
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
        """The library's state is of no more use, nor perhaps what it shares with those of other sequences."""
        self._compiled.result().is_spent = True
        self._matcher, self._consumed = None, []

    def _go_to(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether the grammar allows `tokens` behind the first `start` that are consumed; it stands as far as it does.

        What ends the output is never consumed: the library takes no such token back. Raises: GrammarProblem.
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
        """That it is the grammar which refuses this token: where the library runs into a limit of what all sequences
        share it takes the token as little, without an error, which it has for the mask alone. Raises: GrammarProblem.
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
    """How many tokens they begin with alike."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
