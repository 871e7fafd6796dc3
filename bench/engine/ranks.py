"""A target on two ranks with a core each, against one process with one core: plain steps, and verification of 8 rows.

The sides take turns, and a repeat's ratio is that of its medians. While one process computes alone, the other rank
waits for commands. Needs two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import torch

from bench.engine.driver import EPOCH, load_engine, new_stream, play
from bench.models.grow import DEFAULT_CACHE, cached
from bench.models.sizes import parse_size, read_shape, shape_of_size
from bench.results import Result, at_least, say, spread
from core.config import Dtype, EngineConfig
from core.speculation import EMPTY_BLOCK, TokenTree
from deploy.settings import DEMO_DIRECTORY
from workers.engine import TargetEngine
from workers.parallel import Rank, run_follower

SIZE: Final = 2
ADDRESS: Final = "127.0.0.1"
BLOCKS: Final = {"a plain step": EMPTY_BLOCK, "verifying 8 rows": TokenTree.chain(range(7))}
NUM_STEPS: Final = 12
"""Steps of each side in a repeat."""
NUM_PROMPT: Final = 64
GOAL: Final = 1.4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=parse_size, default="123M", metavar="SIZE", help="of the target")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises: StartupError."""
    torch.set_num_threads(1)
    source = DEMO_DIRECTORY / "target"
    model = cached(source, shape_of_size(read_shape(source), args.size), args.dtype, args.cache)
    say(f"loading {model.name}, alone and on {SIZE} ranks")
    config = EngineConfig(str(model), dtype=args.dtype, kv_cache_tokens=2048)
    alone = load_engine(config)
    with on_ranks(replace(config, tensor_parallel=SIZE)) as shared:
        results = [_compared(name, alone, shared, args.repeats) for name in BLOCKS]
    backends = {"alone": alone.info.arithmetic, "on ranks": shared.info.arithmetic}
    return [replace(result, settings={**result.settings, "model": model.name, **backends}) for result in results]


@contextmanager
def on_ranks(config: EngineConfig) -> Iterator[TargetEngine]:
    """Rank 0 in this process, the others in processes of their own."""
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    ranks = [Rank(index, config.tensor_parallel, ADDRESS, port) for index in range(config.tensor_parallel)]
    spawn = multiprocessing.get_context("spawn")
    followers = [spawn.Process(target=_follow, args=(config, rank), daemon=True) for rank in ranks[1:]]
    for follower in followers:
        follower.start()
    engine = TargetEngine.load(config, EPOCH, lambda _: None, ranks[0])
    try:
        engine.warm_up(lambda _: None)
        yield engine
    finally:
        engine.close()
        for follower in followers:
            follower.join()


def _follow(config: EngineConfig, rank: Rank) -> None:
    torch.set_num_threads(1)
    run_follower(config, rank, lambda _: None)


def _compared(name: str, alone: TargetEngine, shared: TargetEngine, repeats: int) -> Result:
    times = [(_step_ms(alone, name, repeat), _step_ms(shared, name, repeat)) for repeat in range(-1, repeats)][1:]
    medians = {f"{number}, ms": statistics.median(pair[number == "two"] for pair in times) for number in ("one", "two")}
    ratios, found = [one / two for one, two in times], {side: round(value, 3) for side, value in medians.items()}
    return at_least(GOAL, spread(f"{name} on one core, of that on two ranks", ratios, "x", **found))


def _step_ms(engine: TargetEngine, name: str, repeat: int) -> float:
    """Median time of a step."""
    stream, times = new_stream(f"{name} {repeat}", range(1, NUM_PROMPT)), []
    play(engine, [stream])
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        play(engine, [stream], [BLOCKS[name]])
        times.append(1e3 * (time.perf_counter() - began_s))
    engine.release([stream.name])
    return statistics.median(times)
