"""Speed of the engine on one machine, against transformers and against the limits of memory and arithmetic.

No Ray and no gRPC: engines are driven directly in this process. Each ratio comes from one run in which both sides take
turns; each side uses the faster of its dtypes. Plain decoding is the target engine with empty blocks, including
sampling. Our side runs compiled code, which is built in the first run and takes a minute per model.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from bench.engine.devices import timed, token_s
from bench.engine.driver import DrivenStream, load_engine, new_stream, play
from bench.engine.peer import Peer
from bench.models.grow import DEFAULT_CACHE, cached
from bench.models.sizes import parse_size, read_shape, shape_of_size
from bench.results import Result, at_least, at_most, say, spread
from core.config import Dtype, EngineConfig
from core.records import Verdict
from core.speculation import EMPTY_BLOCK, TokenTree
from deploy.settings import DEMO_DIRECTORY
from workers.engine import TargetEngine
from workers.step import StepRows

NUM_PROMPT_TOKENS = 64
NUM_TOKENS = 24
"""Length of each timed completion."""
NUM_GUESSES = 7
"""Number of guesses verified together with the last token: eight rows."""
NUM_STREAMS = 16
SHARED_TOKENS, OWN_TOKENS = 1024, 16
LONG_TOKENS = 1500
READ_BYTES = 1 << 29

CPU = torch.device("cpu")

Seconds = Callable[[], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=parse_size, default="123M", metavar="SIZE", help="of the target")
    parser.add_argument("--dtypes", nargs="+", choices=get_args(Dtype), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Load every side, then measure them in turn."""
    torch.set_num_threads(args.threads)
    source = DEMO_DIRECTORY / "target"
    shape = shape_of_size(read_shape(source), args.size)
    models = {dtype: cached(source, shape, dtype, args.cache) for dtype in args.dtypes}
    sides: dict[str, Seconds] = {}
    for dtype, model in models.items():
        sides |= _sides_of(model, dtype, args.threads)
    sides |= _draft_sides(args.threads)
    sides["read"] = _read_loop()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.repeats):
        say(f"repeat {number + 1} of {args.repeats}")
        for name, seconds in sides.items():
            times[name].append(seconds())
    settings = {"parameters": f"{shape.num_parameters / 1e6:.0f}M", "threads": args.threads}
    return _results(times, shape.num_parameters, settings)


# The sides: each is a function that makes one measurement and returns seconds


def _sides_of(model: Path, dtype: Dtype, num_threads: int) -> Mapping[str, Seconds]:
    say(f"loading the target in {dtype}")
    config = EngineConfig(str(model), dtype=dtype, num_threads=num_threads, kv_cache_tokens=16_384, compile=True)
    engine = load_engine(config)
    eager = load_engine(replace(config, compile=False))
    tiled = load_engine(replace(config, deterministic=True))
    names = itertools.count()
    return {
        f"plain {dtype}": lambda: _decode(engine, f"plain {next(names)}", 1),
        f"eager {dtype}": lambda: _decode(eager, f"plain {next(names)}", 1),
        f"transformers {dtype}": _generate(model, dtype),
        f"verify {dtype}": lambda: _decode(engine, f"verify {next(names)}", 1, NUM_GUESSES),
        f"streams {dtype}": lambda: _decode(engine, f"streams {next(names)}", NUM_STREAMS),
        f"deterministic {dtype}": lambda: _decode(tiled, f"plain {next(names)}", 1),
        f"prefix {dtype}": _first_token(engine, names, is_shared=False),
        f"shared prefix {dtype}": _first_token(engine, names, is_shared=True),
        f"company {dtype}": lambda: _stall(engine, names),
    }


def _tokens(count: int) -> list[int]:
    return [random.randrange(1000) for _ in range(count)]


def _round(engine: TargetEngine, streams: Sequence[DrivenStream], num_guesses: int = 0) -> None:
    """Get one verdict for each stream, on guesses that are almost never right."""
    play(engine, streams, [TokenTree.chain(_tokens(num_guesses)) if num_guesses else EMPTY_BLOCK for _ in streams])


def _decode(engine: TargetEngine, name: str, num_streams: int, num_guesses: int = 0) -> float:
    """Seconds of a round after prefill."""
    streams = [new_stream(f"{name}/{n}", _tokens(NUM_PROMPT_TOKENS)) for n in range(num_streams)]
    _round(engine, streams)
    began_s = time.perf_counter()
    for _ in range(NUM_TOKENS):
        _round(engine, streams, num_guesses)
    took_s = time.perf_counter() - began_s
    engine.release([stream.name for stream in streams])
    return took_s / NUM_TOKENS


def _first_token(engine: TargetEngine, names: Any, *, is_shared: bool) -> Seconds:
    """A function that measures the prefill of a prompt; its first `SHARED_TOKENS` tokens are cached if `is_shared`."""
    shared = _tokens(SHARED_TOKENS)
    _round(engine, [new_stream(f"first {next(names)}", shared)])

    def seconds() -> float:
        prompt = [*(shared if is_shared else _tokens(SHARED_TOKENS)), *_tokens(OWN_TOKENS)]
        stream = new_stream(f"first {next(names)}", prompt)
        began_s = time.perf_counter()
        _round(engine, [stream])
        took_s = time.perf_counter() - began_s
        engine.release([stream.name])
        return took_s

    return seconds


def _stall(engine: TargetEngine, names: Any) -> float:
    """Duration of a stream's slowest rounds during a long prefill (p95), over its usual duration."""
    stream, guest = (new_stream(f"stall {next(names)}", _tokens(count)) for count in (NUM_PROMPT_TOKENS, LONG_TOKENS))
    _round(engine, [stream])
    usual_s = [timed(CPU, lambda: _round(engine, [stream])) for _ in range(NUM_TOKENS)]
    engine.add(guest.request())
    times_s: list[float] = []
    is_served = False
    while not is_served:
        began_s = time.perf_counter()
        engine.add(stream.request())
        is_answered = False
        while not is_answered:
            for verdict in engine.step():
                assert isinstance(verdict, Verdict), verdict
                is_served |= verdict.stamp.lease == guest.name
                if verdict.stamp.lease == stream.name:
                    is_answered = True
                    stream.take(EMPTY_BLOCK, verdict)
        times_s.append(time.perf_counter() - began_s)
    engine.release([stream.name, guest.name])
    return statistics.quantiles(times_s, n=20)[-1] / statistics.median(usual_s)


def _generate(model: Path, dtype: Dtype) -> Seconds:
    """A function that measures transformers' own generation, per token after the first."""
    peer = Peer(model, dtype, CPU)
    return lambda: token_s(CPU, partial(peer.complete, _tokens(NUM_PROMPT_TOKENS)), NUM_TOKENS)


def _draft_sides(num_threads: int) -> Mapping[str, Seconds]:
    """A step of the demo's draft, by our runtime and by transformers."""
    from transformers import AutoModelForCausalLM

    path = DEMO_DIRECTORY / "draft"
    runtime = load_engine(EngineConfig(str(path), num_threads=num_threads, compile=True))._runtime
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def ours() -> float:
        kv = runtime.cache.new_sequence()
        runtime.forward([StepRows(kv, _tokens(NUM_PROMPT_TOKENS))])
        began_s = time.perf_counter()
        for _ in range(NUM_TOKENS):
            runtime.forward([StepRows(kv, [1])])
        took_s = time.perf_counter() - began_s
        runtime.cache.free(kv)
        return took_s / NUM_TOKENS

    @torch.inference_mode()
    def theirs() -> float:
        cache = eager(torch.tensor([_tokens(NUM_PROMPT_TOKENS)]), use_cache=True).past_key_values
        one = torch.tensor([[1]])
        began_s = time.perf_counter()
        for _ in range(NUM_TOKENS):
            eager(one, past_key_values=cache, use_cache=True)
        return (time.perf_counter() - began_s) / NUM_TOKENS

    return {"draft": ours, "draft of transformers": theirs}


def _read_loop() -> Seconds:
    """A function that measures seconds per byte of reading memory, the fastest of three reads."""
    memory = torch.ones(READ_BYTES // 4)
    return lambda: min(timed(CPU, memory.sum) for _ in range(3)) / READ_BYTES


# Ratios


def _results(times: Mapping[str, Sequence[float]], num_parameters: int, settings: Mapping[str, Any]) -> list[Result]:
    def best(name: str) -> str:
        """The side with its faster dtype."""
        named = [side for side in times if side.startswith(f"{name} ")]
        return min(named, key=lambda side: statistics.median(times[side]))

    def ratio(name: str, slow: str, fast: str, factor: float = 1.0) -> Result:
        values = [factor * a / b for a, b in zip(times[slow], times[fast], strict=True)]
        median_ms = {side: round(1e3 * statistics.median(times[side]), 3) for side in (slow, fast)}
        return spread(name, values, "x", **median_ms, **settings)

    plain = best("plain")
    dtype = plain.removeprefix("plain ")
    plains = [(side, side.removeprefix("plain ")) for side in times if side.startswith("plain ")]
    return [
        at_least(2.2, ratio("plain decoding over transformers' generate", best("transformers"), plain)),
        ratio("plain decoding over the same without compiled code", f"eager {dtype}", plain),
        at_least(0.8, _bandwidth(times["read"], times[plain], num_parameters, dtype)),
        *(
            at_most(1.2, ratio(f"verifying {NUM_GUESSES + 1} rows over decoding 1, {each}", f"verify {each}", own))
            for own, each in plains
        ),
        at_least(4.0, ratio(f"{NUM_STREAMS} streams over 1", plain, f"streams {dtype}", NUM_STREAMS)),
        at_least(2.0, ratio("a draft step over transformers' forward", "draft of transformers", "draft")),
        *(
            at_most(1.15, ratio(f"deterministic over default, {each}", f"deterministic {each}", own))
            for own, each in plains
        ),
        ratio(f"a prompt with {SHARED_TOKENS} new tokens over known ones", f"prefix {dtype}", f"shared prefix {dtype}"),
        at_most(
            2.0, spread("a round beside a long prompt, p95 over usual", times[f"company {dtype}"], "x", dtype=dtype)
        ),
    ]


def _bandwidth(reads: Sequence[float], steps: Sequence[float], num_parameters: int, dtype: str) -> Result:
    num_bytes = num_parameters * torch.finfo(getattr(torch, dtype)).bits // 8
    share = [num_bytes * read / step for read, step in zip(reads, steps, strict=True)]
    return spread("weights read, of a plain read loop's bandwidth", share, "share", dtype=dtype)
