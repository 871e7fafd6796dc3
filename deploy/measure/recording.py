"""Records a target's output after a prompt, with the distributions of target and draft at each position.

Knows runtimes, sampling and noise: it runs the models itself, in this process. Must not know guessers or figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.config import EngineConfig
from core.costs import PassCost, PassLaw
from core.records import Sampling, SequenceSpec
from core.speculation import TokenTree
from workers.grammar import GrammarState, Mask
from workers.model import load
from workers.runtime import ModelRuntime
from workers.sampling import Row, perturbed, process
from workers.step import SequenceKV, StepRows

Float32 = NDArray[np.float32]

TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of rows whose passes are timed; the time of a wider pass is taken to be proportional to its rows."""
NUM_TIMED = 7
"""The number of timed passes of each width; their median counts."""
CONTEXT_TOKENS = 64
"""The length of the context of timed passes, in tokens."""


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """One output of the target, and the distributions that its tokens were drawn from."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    log_p: Float32  # [output, V]
    log_q: Float32 | None = None  # [output, V], the draft's, if there is one
    guesses: tuple[int, ...] = ()
    """The draft's guess at each position, drawn with the noise that it shares with the target."""


class MeasuredModel:
    """A loaded and warm model, its memory and its pass times."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and warm it up. Raises: StartupError."""
        loaded = load(config, _quiet)
        self.weights_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
        self._runtime = ModelRuntime(loaded, config)
        self._runtime.warm_up(_quiet)
        self.info = self._runtime.info
        self.num_layers = len(loaded.layers)
        self._chunk_tokens = config.max_step_tokens
        cache = self._runtime.cache
        self.kv_bytes_a_token = sum(tensor[0].nbytes for tensor in (*cache.keys, *cache.values))

    @torch.inference_mode()
    def write(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, grammar: GrammarState | None = None
    ) -> Recording:
        """Generate up to `max_tokens` tokens by plain decoding, with the noise of `sampling.seed`."""
        tokens, laws = list(prompt), list[Float32]()
        with self._sequence() as kv:
            logits = self._prefill(kv, prompt)
            while True:
                row = Row(sampling, len(tokens), tokens, len(prompt), _mask(grammar, tokens[len(prompt) :]))
                log_p = process(logits, [row])
                laws.append(log_p[0].cpu().numpy())
                tokens.append(int(perturbed(log_p, [row]).argmax()))
                if len(laws) == max_tokens or tokens[-1] in self.info.eos_token_ids:
                    break
                logits = self._runtime.forward([StepRows(kv, tokens[-1:])])
        return Recording(tuple(prompt), tuple(tokens[len(prompt) :]), np.stack(laws))

    @torch.inference_mode()
    def follow(self, text: Recording, sampling: Sampling, grammar: GrammarState | None = None) -> Recording:
        """The recording with the distributions and guesses of this model, the draft, for the same text."""
        tokens, start = (*text.prompt, *text.output), len(text.prompt)
        with self._sequence() as kv:
            logits = torch.cat([self._prefill(kv, text.prompt), *self._read(kv, text.output[:-1])])
        rows = [
            Row(sampling, position, tokens[:position], start, _mask(grammar, tokens[start:position]))
            for position in range(start, len(tokens))
        ]
        log_q = process(logits, rows)
        guesses = perturbed(log_q, rows).argmax(dim=-1).tolist()
        return Recording(text.prompt, text.output, text.log_p, log_q.cpu().numpy(), tuple(guesses))

    @torch.inference_mode()
    def pass_law(self) -> PassLaw:
        """Measure the seconds of a pass by its number of rows.

        The widths take turns, so that a change of load affects all; times never fall with more rows.
        """
        cost = PassCost(prior_s=0.0)
        with self._sequence() as kv:
            self._prefill(kv, [0] * CONTEXT_TOKENS)
            for _ in range(NUM_TIMED):
                for rows in TIMED_ROWS:
                    cost.observe(rows, self._pass_s(kv, rows))
        curve = cost.curve()
        return PassLaw(tuple((rows, curve(rows)) for rows in TIMED_ROWS))

    def _pass_s(self, kv: SequenceKV, num_rows: int) -> float:
        began_s = time.perf_counter()
        logits = self._runtime.forward([_chain(kv, [0] * num_rows)])
        float(logits[-1, 0])  # this waits for the device
        took_s = time.perf_counter() - began_s
        self._runtime.cache.truncate(kv, CONTEXT_TOKENS)
        return took_s

    def _prefill(self, kv: SequenceKV, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after the last of the tokens.  # [1, V]"""
        *others, last = self._chunks(tokens)
        for chunk in others:
            self._runtime.forward([StepRows(kv, chunk, wants_logits=False)])
        return self._runtime.forward([StepRows(kv, last)])

    def _read(self, kv: SequenceKV, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """Logits after each of the tokens.  # [chunk, V] each"""
        return (self._runtime.forward([_chain(kv, chunk)]) for chunk in self._chunks(tokens))

    def _chunks(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens[first : first + self._chunk_tokens] for first in range(0, len(tokens), self._chunk_tokens)]

    @contextmanager
    def _sequence(self) -> Iterator[SequenceKV]:
        kv = self._runtime.cache.new_sequence()
        try:
            yield kv
        finally:
            self._runtime.cache.free(kv)


def _mask(grammar: GrammarState | None, output: Sequence[int]) -> Mask | None:
    """Mask of the tokens that may follow `output`; None without a grammar."""
    return grammar.masks(output, [()])[0] if grammar is not None else None


def record(
    target: MeasuredModel,
    draft: MeasuredModel | None,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    draft_temperature: float | None = None,
) -> Recording:
    """The target's output after `prompt`, and the distributions of both models; the draft has `draft_temperature`, if
    given."""
    text = target.write(prompt, sampling, max_tokens)
    if draft is None:
        return text
    spec = SequenceSpec(len(prompt), sampling).of_draft(draft_temperature)
    return draft.follow(text, spec.sampling)


def _chain(kv: SequenceKV, tokens: Sequence[int]) -> StepRows:
    """Rows that all have logits: the first token, and the others as a chain of guesses below it."""
    return StepRows(kv, tokens[:1], TokenTree.chain(tuple(tokens[1:])))


def _quiet(_: str) -> None:
    """Drop the progress of one model; the survey reports its own."""
