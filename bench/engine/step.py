"""The cost that an engine adds to its model: a step's time outside the forward pass, and a draft's pass compared with
transformers' step.

No Ray and no gRPC: engines are driven directly in this process, on one thread, with the demo pair. All sides take
turns. Goals are for wall time. The results' settings have the processor time, which shows how much of the wall time
other processes took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.engine.driver import GREEDY, DrivenStream, load_engine, new_stream, play
from bench.results import Result, at_most, say, spread
from core.config import EngineConfig
from core.records import Sampling, Verdict
from core.speculation import MAX_REPORTED, ROOT, TokenTree
from deploy.settings import DEMO_DIRECTORY
from workers.engine import TargetEngine
from workers.noise import gumbel
from workers.runtime import ModelRuntime
from workers.runtime.backends.program_cpu import ProgramBackend
from workers.runtime.backends.traced_cpu import TracedBackend
from workers.sampling import DraftRow, Kind, Row, propose
from workers.sampling.sampler import distribution, drawn
from workers.step import Readback, StepRows

NUM_PROMPT_TOKENS = 64
NUM_STEPS = 12
"""Number of steps in each turn."""
CHAIN_NODES, TREE_NODES = 8, 32
NUM_STREAMS = 16
DRAFT_ROWS = (1, 8, 64)
MAX_STEP_MS = {1: 0.3, NUM_STREAMS: 1.0}
"""Largest time of a step outside the model in milliseconds, by the number of streams."""
MAX_PASS = {"uncompiled": 1.2, "compiled": 0.5}
"""Largest time of a draft's pass including its candidates, relative to transformers' eager step."""
SAMPLED = Sampling(temperature=1.0)
LARGE_VOCAB = 151_936
"""Vocabulary of Qwen2.5. The demo pair's, of 4,096, is too small to show the cost per token of the vocabulary."""
DRAWS = {
    "T = 1": SAMPLED,
    "T = 1, top-p 0.95": Sampling(temperature=1.0, top_p=0.95),
    "T = 0.6, top-k 20, top-p 0.95": Sampling(temperature=0.6, top_k=20, top_p=0.95),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Duration in milliseconds."""

    wall_ms: float
    cpu_ms: float

    @classmethod
    def now(cls) -> Cost:
        return cls(1e3 * time.perf_counter(), 1e3 * time.thread_time())

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_ms - other.wall_ms, self.cpu_ms - other.cpu_ms)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_ms + other.wall_ms, self.cpu_ms + other.cpu_ms)

    @classmethod
    def median(cls, costs: Sequence[Cost]) -> Cost:
        return cls(statistics.median(c.wall_ms for c in costs), statistics.median(c.cpu_ms for c in costs))


NOTHING = Cost(0.0, 0.0)


@dataclass(slots=True)
class Meter:
    """Sums the cost of all calls of a function."""

    function: Callable[..., Any]
    total: Cost = NOTHING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = Cost.now()
        result = self.function(*args, **kwargs)
        self.total += Cost.now() - began
        return result


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of a target engine in each step of a turn."""

    name: str
    num_streams: int
    sampling: Sampling = GREEDY
    parents: tuple[int, ...] = ()
    """Parents of the block's nodes."""
    right: tuple[int, ...] = ()
    """Nodes with the target's own tokens: a path from the root."""


@dataclass(slots=True)
class Times:
    """Median step of each turn of one side."""

    whole: list[Cost] = field(default_factory=list)
    outside: list[Cost] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what takes a minute")


def measure(args: argparse.Namespace) -> list[Result]:
    """Load every side, then measure them in turn."""
    torch.set_num_threads(1)
    gumbel._NOISE = gumbel.NoiseCache(max_bytes=0)  # otherwise a turn would reuse the noise of the turn before
    steps = [side for is_deterministic in (False, True) for side in _step_sides(is_deterministic)]
    passes = _pass_sides(args.compile)
    times: dict[str, Times] = {name: Times() for name in (*(side.name for side in steps), *passes)}
    for number in range(args.repeats):
        say(f"repeat {number + 1} of {args.repeats}")
        for side in steps:
            _note(times[side.name], side.turn())
        for name, turn in passes.items():
            _note(times[name], [(cost, cost) for cost in turn()])
    draws = [_draw_result(name, sampling) for name, sampling in DRAWS.items()]
    return [*(_step_result(side, times[side.name]) for side in steps), *_pass_results(times), *draws]


def _note(times: Times, costs: Sequence[tuple[Cost, Cost]]) -> None:
    whole, outside = zip(*costs, strict=True)
    times.whole.append(Cost.median(whole))
    times.outside.append(Cost.median(outside))


# Steps of a target


def _loads() -> Iterator[StepLoad]:
    tree = (*[ROOT] * 4, *((node - 4) // 2 for node in range(4, TREE_NODES)))
    for num_streams in (1, NUM_STREAMS):
        yield StepLoad("plain step", num_streams)
        yield StepLoad("plain step at T = 1", num_streams, SAMPLED)
        yield StepLoad("block of 8", num_streams, GREEDY, tuple(range(ROOT, CHAIN_NODES - 1)), (0, 1, 2, 3))
    yield StepLoad("tree of 32", 1, GREEDY, tree, (3, 11, 27))
    yield StepLoad("tree of 32 at T = 1", 1, SAMPLED, tree, (3, 11, 27))


def _step_sides(is_deterministic: bool) -> list[StepSide]:
    engine = load_engine(EngineConfig(str(DEMO_DIRECTORY / "target"), deterministic=is_deterministic))
    meter = _metered(engine._runtime)
    return [StepSide(engine, meter, load, ", deterministic" if is_deterministic else "") for load in _loads()]


def _metered(runtime: ModelRuntime) -> Meter:
    """Measure this runtime's forward passes: of the model's code, of its recorded trace, or of its program."""
    owner: Any = runtime.context.model
    name = "forward"
    for backend in runtime.backends._built:
        if isinstance(backend, ProgramBackend):
            owner, name = backend.team, "run"
        elif isinstance(backend, TracedBackend):
            owner, name = backend, "recorded"
    meter = Meter(getattr(owner, name))
    setattr(owner, name, meter)
    return meter


class StepSide:
    """Steps of one engine under one load."""

    def __init__(self, engine: TargetEngine, meter: Meter, load: StepLoad, mode: str) -> None:
        self.load = load
        self.name = f"{load.name}, {load.num_streams} stream{'s'[: load.num_streams > 1]}{mode}"
        self._engine = engine
        self._meter = meter
        self._num_turns = 0
        streams = self._prefilled()
        for _ in range(NUM_STEPS * (1 + len(load.right)) if load.right else 0):
            play(engine, streams)
        self._known = [stream.output for stream in streams]
        engine.release([stream.name for stream in streams])

    def turn(self) -> list[tuple[Cost, Cost]]:
        """Cost of each step, whole and without the model's forward pass."""
        streams = self._prefilled()
        costs = [self._step(streams) for _ in range(NUM_STEPS)]
        self._engine.release([stream.name for stream in streams])
        return costs

    def _step(self, streams: Sequence[DrivenStream]) -> tuple[Cost, Cost]:
        blocks = [self._block(known, stream) for known, stream in zip(self._known, streams, strict=True)]
        requests = [stream.request(block) for stream, block in zip(streams, blocks, strict=True)]
        self._meter.total, began = NOTHING, Cost.now()
        for request in requests:
            self._engine.add(request)
        replies = self._engine.step()
        whole = Cost.now() - began
        verdicts = {reply.stamp.lease: reply for reply in replies}
        for stream, block in zip(streams, blocks, strict=True):
            verdict = verdicts[stream.name]
            assert isinstance(verdict, Verdict), verdict
            stream.take(block, verdict)
        return whole, whole - self._meter.total

    def _prefilled(self) -> list[DrivenStream]:
        self._num_turns += 1
        random_tokens = random.Random(0)
        prompts = [random_tokens.choices(range(1000), k=NUM_PROMPT_TOKENS) for _ in range(self.load.num_streams)]
        streams = [
            new_stream(f"{self.name} {self._num_turns} {number}", prompt, replace(self.load.sampling, seed=number))
            for number, prompt in enumerate(prompts)
        ]
        play(self._engine, streams)
        return streams

    def _block(self, known: Sequence[int], stream: DrivenStream) -> TokenTree:
        tokens = [random.randrange(1000) for _ in self.load.parents]
        for node, token in zip(self.load.right, known[len(stream.output) :], strict=False):
            tokens[node] = token
        return TokenTree(tuple(tokens), self.load.parents)


def _step_result(side: StepSide, times: Times) -> Result:
    whole, outside = Cost.median(times.whole), Cost.median(times.outside)
    parts = {"cpu_ms": outside.cpu_ms, "step_ms": whole.wall_ms, "step_cpu_ms": whole.cpu_ms}
    settings = {name: round(value, 3) for name, value in parts.items()}
    values = [cost.wall_ms for cost in times.outside]
    return at_most(
        MAX_STEP_MS[side.load.num_streams], spread(f"{side.name}: outside the model", values, "ms", **settings)
    )


# Passes of a draft


def _pass_sides(is_compiled: bool) -> dict[str, Callable[[], list[Cost]]]:
    """Functions that measure passes, by name: ours with the candidates after each row, transformers' step alone."""
    path = str(DEMO_DIRECTORY / "draft")
    runtimes = {"uncompiled": load_engine(EngineConfig(path))._runtime}
    if is_compiled:
        runtimes["compiled"] = load_engine(EngineConfig(path, compile=True))._runtime
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sides: dict[str, Callable[[], list[Cost]]] = {}
    for num_rows in DRAFT_ROWS:
        for mode, runtime in runtimes.items():
            sides[_pass_name(mode, num_rows)] = _our_pass(runtime, num_rows)
        sides[_pass_name("transformers", num_rows)] = _their_pass(theirs, num_rows)
    return sides


def _pass_name(mode: str, num_rows: int) -> str:
    return f"{mode} pass, {num_rows} row{'s'[: num_rows > 1]}"


def _our_pass(runtime: ModelRuntime, num_rows: int) -> Callable[[], list[Cost]]:
    block = TokenTree((1,) * (num_rows - 1), (ROOT,) * (num_rows - 1))

    def passes() -> list[Cost]:
        kv = runtime.cache.new_sequence()
        runtime.forward([StepRows(kv, [0] * NUM_PROMPT_TOKENS)])
        costs = []
        for _ in range(NUM_STEPS):
            began = Cost.now()
            logits = runtime.forward([StepRows(kv, [1], block)])
            readback = Readback()
            row = Row(GREEDY, kv.num_tokens, (), NUM_PROMPT_TOKENS)
            place = DraftRow(row, Kind.GREEDY, num_ranks=MAX_REPORTED + 1)  # as in an engine
            places = [place] * num_rows
            found = propose(logits, places, 0, readback)
            readback.wait()
            found()
            costs.append(Cost.now() - began)
            runtime.cache.truncate(kv, kv.num_tokens - num_rows + 1)
        runtime.cache.free(kv)
        return costs

    return passes


def _their_pass(model: Any, num_rows: int) -> Callable[[], list[Cost]]:
    @torch.inference_mode()
    def passes() -> list[Cost]:
        cache = model(torch.zeros(1, NUM_PROMPT_TOKENS, dtype=torch.long), use_cache=True).past_key_values
        rows = torch.ones(1, num_rows, dtype=torch.long)
        costs = []
        for _ in range(NUM_STEPS):
            began = Cost.now()
            model(rows, past_key_values=cache, use_cache=True)
            costs.append(Cost.now() - began)
            if num_rows > 1:
                cache.crop(1 - num_rows)
        return costs

    return passes


def _pass_results(times: Mapping[str, Times]) -> Iterator[Result]:
    for num_rows in DRAFT_ROWS:
        theirs = times[_pass_name("transformers", num_rows)].whole
        for mode, limit in MAX_PASS.items():
            if (ours := times.get(_pass_name(mode, num_rows))) is not None:
                yield at_most(limit, _ratio(f"draft's {_pass_name(mode, num_rows)}", ours.whole, theirs))


def _ratio(name: str, ours: Sequence[Cost], theirs: Sequence[Cost]) -> Result:
    values = [a.wall_ms / b.wall_ms for a, b in zip(ours, theirs, strict=True)]
    sides = {"ours": Cost.median(ours), "transformers": Cost.median(theirs)}
    settings = {f"{side}_ms": round(cost.wall_ms, 3) for side, cost in sides.items()}
    settings |= {f"{side}_cpu_ms": round(cost.cpu_ms, 3) for side, cost in sides.items()}
    return spread(f"{name} over transformers' step", values, "x", **settings)


# Draws from large vocabularies


def _draw_result(name: str, sampling: Sampling) -> Result:
    """Cost of drawing a token for each row of a block, without the model: distribution, noise and argmax."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(1 + CHAIN_NODES, LARGE_VOCAB, generator=generator)
    logits[:, :2000] += 4.0 * torch.randn(len(logits), 2000, generator=generator)
    rows = [Row(sampling, position, (), 0) for position in range(len(logits))]
    costs = []
    for _ in range(NUM_STEPS):
        began = Cost.now()
        drawn(distribution(logits, rows), rows, Readback())()
        costs.append(Cost.now() - began)
    per_row = [cost.wall_ms / len(rows) for cost in costs]
    return spread(f"a draw from {LARGE_VOCAB:,} tokens, {name}", per_row, "ms", rows=len(rows))
