"""The texts of `bench workloads`, and how the demo pair agrees about each token of them, for the simulator to replay.

Code, prose and high-entropy samples are what the demo target writes after prompts of its held-out files. It is too
small to copy or to keep a form: edits and JSON are given texts, as a target that can would have written them greedily,
and the draft says what it says along them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from core import noise
from core.config import EngineConfig
from core.noise import Purpose
from core.records import Sampling
from deploy.measure import MeasuredModel, Recording
from models.train.corpus import load_split
from orchestrator.text import Tokenizer
from simulation.engines import Agreement, Text
from simulation.engines.texts import Place

PROMPT_CHARS = 400
EDIT_CHARS = 700
HIGH_TEMPERATURE = 1.5
NUM_SHARES = 64
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind, and how they go on."""

    name: str
    temperature: float
    prompts: Sequence[str]
    outputs: Sequence[str] = ()
    """Where they are given; else the target writes them."""


def workloads(num_texts: int) -> Iterator[Workload]:
    """Given texts are greedy: a text has no probability under a target that cannot write it."""
    code, prose = list(_pieces(num_texts)), list(_docstrings(num_texts))
    for temperature in (0.0, 1.0):
        yield Workload("code completion", temperature, code)
        yield Workload("docstring prose", temperature, prose)
    yield Workload("copy-heavy editing", 0.0, *zip(*_edits(num_texts), strict=True))
    yield Workload("JSON", 0.0, *zip(*_json_texts(num_texts), strict=True))
    yield Workload("high-entropy sampling", HIGH_TEMPERATURE, code)


# Texts


@cache
def _held_out() -> Sequence[str]:
    """Files that neither model of the demo pair has seen."""
    return [document.text for document in load_split().held_out if len(document.text) > 2 * EDIT_CHARS]


def _pieces(num_texts: int, num_chars: int = PROMPT_CHARS) -> Iterator[str]:
    """Of files, each beginning with a line."""
    dice = Random(1)
    for _ in range(num_texts):
        text = dice.choice(_held_out())
        start = text.rfind("\n", 0, dice.randrange(len(text) - num_chars)) + 1
        yield text[start : start + num_chars]


def _docstrings(num_texts: int) -> Iterator[str]:
    """The first halves of long ones."""
    found = [
        doc
        for text in _held_out()
        for doc in re.findall(r'"""(.+?)"""', text, flags=re.DOTALL)
        if len(doc) > 2 * PROMPT_CHARS
    ]
    for doc in Random(2).sample(found, num_texts):
        yield f'    """{doc[:PROMPT_CHARS]}'


def _edits(num_texts: int) -> Iterator[tuple[str, str]]:
    """A piece of code, and the same with its most frequent name changed: what an editor is asked for."""
    for piece in _pieces(num_texts, EDIT_CHARS):
        names = re.findall(r"\b[a-z_]{4,}\b", piece)
        name = max(sorted(set(names)), key=names.count)
        yield f"# {name} renamed to new_{name}\n{piece}\n\n# new:\n", re.sub(rf"\b{name}\b", f"new_{name}", piece)


def _json_texts(num_texts: int) -> Iterator[tuple[str, str]]:
    """Rows under a schema that stands in the prompt as text, of which two are there."""
    schema = {"type": "array", "items": {"required": ["id", "user", "status", "seconds", "tags"]}}
    for seed in range(num_texts):
        rows = [json.dumps(row) for row in _rows(Random(seed), 14)]
        yield json.dumps(schema) + "\n[\n  " + ",\n  ".join(rows[:2]) + ",\n", "  " + ",\n  ".join(rows[2:]) + "\n]"


def _rows(dice: Random, num_rows: int) -> Iterator[Mapping[str, object]]:
    for number in range(num_rows):
        yield {
            "id": 1000 + number,
            "user": dice.choice(("alice", "bob", "carol", "dave")),
            "status": dice.choice(("done", "done", "failed")),
            "seconds": round(dice.uniform(0, 90), 1),
            "tags": dice.sample(("new", "batch", "paid", "eu", "retry"), 2),
        }


# How the pair agrees about them


@dataclass(frozen=True, eq=False, slots=True)
class ReplayLaw:
    """Text `seed` is recording `seed`; beyond its end it begins anew, which only places off the text see."""

    texts: Sequence[Sequence[Agreement]]

    def at(self, seed: int, index: int) -> Agreement:
        places = self.texts[seed]
        return places[index % len(places)]

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class ReplayText(Text):
    """The recorded tokens themselves, so that guessers have something to find."""

    outputs: Sequence[Sequence[int]] = ()

    def _place(self, prefix_hash: int, index: int, seed: int, is_true: bool) -> Place:
        place, output = Text._place(self, prefix_hash, index, seed, is_true), self.outputs[seed]
        return replace(place, next_token=output[index]) if is_true and index < len(output) else place


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload as the pair sees it."""

    workload: Workload
    texts: Sequence[Recording]
    agreements: Sequence[Sequence[Agreement]]


class Recorder:
    """The demo pair, asked about texts."""

    def __init__(self, directory: Path, num_tokens: int) -> None:
        config = EngineConfig(str(directory / "target"), kv_cache_tokens=4096)
        self._target = MeasuredModel(config)
        self._draft = MeasuredModel(replace(config, model=str(directory / "draft")))
        self._tokenizer = Tokenizer.from_directory(directory / "target")
        self._num_tokens = num_tokens
        self.vocab_size = self._target.info.vocab_size

    def record(self, workload: Workload) -> Recorded:
        """Each text has its number as its seed."""
        texts = [self._text(workload, number) for number in range(len(workload.prompts))]
        agreements = [self._agreements(text, workload.temperature, number) for number, text in enumerate(texts)]
        return Recorded(workload, texts, agreements)

    def _text(self, workload: Workload, number: int) -> Recording:
        prompt = self._tokenizer.encode(workload.prompts[number])
        if workload.outputs:
            output = self._tokenizer.encode(workload.outputs[number])[: self._num_tokens]
            return Recording(prompt, output, np.broadcast_to(np.float32(0.0), (len(output), self.vocab_size)))
        sampling = Sampling(temperature=workload.temperature, seed=number)
        text = self._target.write(prompt, sampling, self._num_tokens)
        is_ended = text.output[-1] in self._target.info.eos_token_ids
        return replace(text, output=text.output[:-1]) if is_ended else text

    def _agreements(self, text: Recording, temperature: float, seed: int) -> list[Agreement]:
        """At temperature 0 candidates are ranked by q at 1, as a draft ranks them."""
        said = self._draft.follow(text, Sampling(temperature=temperature or 1.0, seed=seed))
        assert said.log_q is not None
        log_q = said.log_q.astype(np.float64)
        scores = log_q + _gumbel(len(text.prompt), seed, log_q.shape) if temperature else log_q
        p = np.exp(text.log_p[: len(log_q)].astype(np.float64)) if temperature else None
        return [
            _agreement(scores[place], log_q[place], token, None if p is None else p[place])
            for place, token in enumerate(text.output)
        ]


def _gumbel(first: int, seed: int, shape: tuple[int, ...]) -> Float64:
    keys = [noise.key(seed, first + place, 0, Purpose.SHARED) for place in range(shape[0])]
    return noise.gumbel_rows(keys, shape[1]).astype(np.float64)


def _agreement(scores: Float64, log_q: Float64, token: int, p: Float64 | None) -> Agreement:
    rank, plain_rank = (int((each > each[token]).sum()) for each in (scores, log_q))
    q, weights = np.exp(log_q), np.exp(scores - scores.max())
    shares = np.sort(weights / weights.sum())[::-1][:NUM_SHARES]
    return Agreement(
        rank=rank,
        plain_rank=plain_rank,
        alpha=float(rank == 0) if p is None else float(np.minimum(p, q).sum()),
        confidence=float(shares[0]),
        entropy=float(-(q * log_q).sum()),
        plain_confidence=float(q.max()),
        shares=tuple(shares.tolist()),
    )
