"""Records the demo pair's agreement about each token of a text, for the simulator.

Also has a target that answers guessers' questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.control.workload_texts import Workload
from core import noise
from core.config import EngineConfig
from core.noise import Purpose
from core.records import Grammar, Sampling
from core.speculation import ROOT, TokenTree
from deploy.measure import MeasuredModel, Recording
from orchestrator.text import Tokenizer
from simulation.engines import Agreement
from workers.grammar import GrammarCompiler, Grammars, GrammarState
from workers.sampling import Row, perturbed, process
from workers.step import SequenceKV, StepRows

NUM_SHARES = 64
PART = (0, 1, 2, 5)
"""The best four of the target's six layers (`outrider layers`). They agree with the target about as well as the
draft."""
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload with the texts and agreements recorded for it."""

    workload: Workload
    texts: Sequence[Recording]
    agreements: Sequence[tuple[Sequence[Agreement], ...]]
    """For each text: agreement of the draft, and of a second draft made of the target's layers."""

    @property
    def alpha(self) -> float:
        """Share of positions at which the draft's first candidate is right."""
        ranks = [place.rank for of_draft, _ in self.agreements for place in of_draft]
        return ranks.count(0) / len(ranks)

    def without_laws(self) -> Recorded:
        """A copy without the texts' distributions over the vocabulary, which are large."""
        nothing = np.zeros((0, 0), np.float32)
        return replace(self, texts=[replace(text, log_p=nothing) for text in self.texts])


class AskedTarget(MeasuredModel):
    """Returns the target's token after any tree of guesses. Keeps the KV of the last text."""

    _kv: SequenceKV | None = None
    _held: tuple[int, ...] = ()

    @torch.inference_mode()
    def samples(
        self, tokens: Sequence[int], prompt_len: int, block: TokenTree, sampling: Sampling, state: GrammarState | None
    ) -> tuple[int, ...]:
        """The target's token after all of `tokens`, and after each node of `block` below them."""
        kv = self._kv_of(tuple(tokens[:-1]))
        logits = self._runtime.forward([StepRows(kv, tokens[-1:], block)])
        self._runtime.cache.truncate(kv, len(self._held))
        paths = [(), *map(partial(_path, block), range(len(block)))]
        masks = state.masks(tokens[prompt_len:], paths) if state is not None else [None] * len(paths)
        rows = [
            Row(sampling, len(tokens) + len(path), [*tokens, *path], prompt_len, mask)
            for path, mask in zip(paths, masks, strict=True)
        ]
        return tuple(perturbed(process(logits, rows), rows).argmax(dim=-1).tolist())

    def _kv_of(self, tokens: tuple[int, ...]) -> SequenceKV:
        """The KV of exactly these tokens."""
        cache = self._runtime.cache
        if self._kv is None or tokens[: len(self._held)] != self._held:
            if self._kv is not None:
                cache.free(self._kv)
            self._kv, self._held = cache.new_sequence(), ()
        for chunk in self._chunks(tokens[len(self._held) :]):
            self._runtime.forward([StepRows(self._kv, chunk, wants_logits=False)])
        self._held = tokens
        return self._kv


def _path(block: TokenTree, node: int) -> tuple[int, ...]:
    """Tokens from the root down to a node."""
    parent = block.parents[node]
    return (*(() if parent == ROOT else _path(block, parent)), block.tokens[node])


class Recorder:
    """The demo pair and a draft made of the target's layers, run on texts."""

    def __init__(self, directory: Path, num_tokens: int) -> None:
        config = EngineConfig(str(directory / "target"), kv_cache_tokens=4096)
        self.target = AskedTarget(config)
        self._draft = MeasuredModel(replace(config, model=str(directory / "draft")))
        self._part = MeasuredModel(replace(config, layers=PART))
        self._tokenizer = Tokenizer.from_directory(directory / "target")
        self._num_tokens = num_tokens
        self.vocab_size, eos = self.target.info.vocab_size, self.target.info.eos_token_ids
        new_compiler = partial(GrammarCompiler.of_model, config.model, self.vocab_size, eos)
        self.grammars = Grammars(new_compiler, self.vocab_size, max_kept=8)

    def record(self, workload: Workload) -> Recorded:
        """Record a workload. The seed of each text is its index."""
        texts = [self._text(workload, number) for number in range(len(workload.prompts))]
        agreements = [
            tuple(self._agreements(draft, workload, text, number) for draft in (self._draft, self._part))
            for number, text in enumerate(texts)
        ]
        return Recorded(workload, texts, agreements)

    def state(self, grammar: Grammar | None) -> GrammarState | None:
        """The grammar's state at the beginning of an output."""
        if grammar is not None:
            self.grammars.compile(grammar)
        return self.grammars.state(grammar, None)

    def _text(self, workload: Workload, number: int) -> Recording:
        prompt = self._tokenizer.encode(workload.prompts[number])
        if workload.outputs:
            output = self._tokenizer.encode(workload.outputs[number])[: self._num_tokens]
            return Recording(prompt, output, np.broadcast_to(np.float32(0.0), (len(output), self.vocab_size)))
        sampling = Sampling(temperature=workload.temperature, seed=number)
        text = self.target.write(prompt, sampling, self._num_tokens, self.state(workload.grammar))
        is_ended = text.output[-1] in self.target.info.eos_token_ids
        return replace(text, output=text.output[:-1]) if is_ended else text

    def _agreements(self, draft: MeasuredModel, workload: Workload, text: Recording, seed: int) -> list[Agreement]:
        """Agreement of `draft` at each token. At temperature 0 candidates are ranked by q at temperature 1, as a draft
        does."""
        temperature = workload.temperature
        sampling = Sampling(temperature=temperature or 1.0, seed=seed)
        said = draft.follow(text, sampling, self.state(workload.grammar))
        assert said.log_q is not None
        log_q = said.log_q.astype(np.float64)
        scores = log_q + _gumbel(len(text.prompt), seed, log_q.shape) if temperature else log_q
        is_sampled = temperature > 0 and not workload.outputs
        p = np.exp(text.log_p[: len(log_q)].astype(np.float64)) if is_sampled else None
        return [
            _agreement(scores[place], log_q[place], token, None if p is None else p[place])
            for place, token in enumerate(text.output)
        ]


def _gumbel(first: int, seed: int, shape: tuple[int, ...]) -> Float64:
    keys = [noise.key(seed, first + place, 0, Purpose.SHARED) for place in range(shape[0])]
    return noise.gumbel_rows(keys, shape[1]).astype(np.float64)


def _agreement(scores: Float64, log_q: Float64, token: int, p: Float64 | None) -> Agreement:
    """Agreement about one token; without `p` the target's distribution is one-hot."""
    rank, plain_rank = (int((each > each[token]).sum()) for each in (scores, log_q))
    q, weights = np.exp(log_q), np.exp(scores - scores.max())
    shares = np.sort(weights / weights.sum())[::-1][:NUM_SHARES]
    return Agreement(
        rank=rank,
        plain_rank=plain_rank,
        alpha=float(rank == 0) if p is None else float(np.minimum(p, q).sum()),
        confidence=float(shares[0]),
        entropy=float(-(q * np.where(q > 0, log_q, 0.0)).sum()),
        plain_confidence=float(q.max()),
        shares=tuple(shares.tolist()),
    )
