"""Pipelined rounds against sequential ones by real processes on this machine, one thread for each model.

A grown target and a grown draft are served by Ray and gRPC. Each prompt is completed in several ways, one after the
other, so that other load of the machine affects all ways alike: pipelined, sequentially, sequentially with a static
draft length, and plainly. Pipelining is compared with the faster of the two sequential ways: the adaptive one, or the
static one at its best length, found by a sweep beforehand. All ways share one service's estimates of costs and
acceptance. On this machine a pass is slower while the draft works, so each way plans with a mean of both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from bench.harness.anatomy import Round
from bench.harness.traffic import connected
from bench.models.calibrate import draft_of_cost
from bench.models.grow import DEFAULT_CACHE, cached
from bench.models.prompts import held_out_prompts
from bench.models.sizes import Size, parse_size, read_shape, shape_of_size
from bench.results import Result, at_least, at_most, say
from bench.rounds.ways import (
    PIPELINED,
    PLAIN,
    STATIC,
    Plan,
    Runs,
    all_repeats,
    best_in_turn,
    hidden_on_hits,
    hits,
    ratio,
    rounds_by_way,
    unlike_plain,
    waits,
)
from core.config import DraftConfig, Dtype, EngineConfig, ServiceConfig, TargetConfig
from deploy.launch import served
from deploy.settings import DEMO_DIRECTORY
from protos.outrider.v1 import generation_pb2 as pb

COST_RATIO = 0.1
TEMPERATURES = (0.0, 1.0)
SPEED_UP_GOAL = 1.25
HIDDEN_GOAL = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-size", type=parse_size, default="123M", metavar="SIZE")
    parser.add_argument("--cost-ratio", type=float, default=COST_RATIO, help="of a draft step to a target step")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of target and draft")
    parser.add_argument("--prompts", type=int, default=8, help="completed in each way in each repeat")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Grow the pair, serve it, and compare the ways."""
    plan = Plan(held_out_prompts(args.prompts), args.tokens, args.repeats)
    target, draft, settings = grown_pair(args.target_size, args.cost_ratio, args.dtype, args.cache)
    with served(_config(target, draft, args.dtype), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", plan, settings))


def grown_pair(size: Size, cost_ratio: float, dtype: Dtype, cache: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Directories of target and draft, and their settings for the results."""
    say("growing the target, and a draft to the cost ratio")
    source = DEMO_DIRECTORY / "target"
    shape = shape_of_size(read_shape(source), size)
    target = cached(source, shape, dtype, cache)
    draft = draft_of_cost(DEMO_DIRECTORY / "draft", target, cost_ratio, dtype, cache)
    settings = {"target": _outline(target), "draft": _outline(draft.model), "dtype": dtype, "threads": 1}
    say(f"target {settings['target']}, draft {settings['draft']}, cost ratio unserved {draft.cost_ratio:.3f}")
    return target, draft.model, settings


def _outline(model: Path) -> str:
    shape = read_shape(model)
    return f"{shape.num_parameters / 1e6:.1f}M ({shape.num_hidden_layers} x {shape.hidden_size})"


def _config(target: Path, draft: Path, dtype: Dtype) -> ServiceConfig:
    """Settings of the pair. The target is deterministic, so that bfloat16 gives one output in every way."""
    engine = EngineConfig(str(target), dtype=dtype, num_threads=1, deterministic=True, compile=True)
    return ServiceConfig(
        target=TargetConfig(engine),
        draft=DraftConfig(replace(engine, model=str(draft), deterministic=False)),
    )


async def _measure(address: str, plan: Plan, settings: Mapping[str, Any]) -> list[Result]:
    async with connected(address) as stub:
        results = []
        for temperature in TEMPERATURES:
            gamma, repeats = await all_repeats(stub, plan, temperature)
            results += _results(f"T = {temperature:g}", repeats, {**settings, "static gamma": gamma})
    return results


def _results(title: str, repeats: Sequence[Runs], settings: Mapping[str, Any]) -> list[Result]:
    rounds, best = rounds_by_way(repeats), best_in_turn(repeats)
    return [
        at_least(SPEED_UP_GOAL, ratio(f"{title}: pipelined over sequential", repeats, best, PIPELINED, settings)),
        ratio(f"{title}: pipelined over plain", repeats, PLAIN, PIPELINED, {}),
        ratio(f"{title}: sequential over plain", repeats, PLAIN, best, {}),
        at_least(HIDDEN_GOAL, hidden_on_hits(title, rounds[PIPELINED])),
        *hits(title, rounds[PIPELINED]),
        *waits(title, rounds[PIPELINED]),
        *_overhead_results(title, rounds, best),
        Result(f"{title}: cost ratio c, served", _cost_ratio(rounds), "x"),
        at_most(0, unlike_plain(title, repeats)),
    ]


def _overhead_results(title: str, rounds: Mapping[str, Sequence[Round]], sequential: str) -> list[Result]:
    """Time of a round outside the engines. On a hit, a round is one call."""
    of_pipelined = [round_.not_model_s * 1e3 for round_ in rounds[PIPELINED]]
    of_hits = [round_.not_model_s * 1e3 for round_ in rounds[PIPELINED] if round_.is_hit]
    of_sequential = [round_.not_model_s * 1e3 for round_ in rounds[sequential]]
    return [
        _median(f"{title}: not model time a round, pipelined", of_pipelined),
        _median(f"{title}: the same on hits", of_hits),
        _median(f"{title}: the same, sequential (two calls)", of_sequential),
    ]


def _median(name: str, times_ms: Sequence[float]) -> Result:
    return Result(name, round(statistics.median(times_ms), 3) if times_ms else float("nan"), "ms")


def _cost_ratio(rounds: Mapping[str, Sequence[Round]]) -> float:
    """Time of a draft's pass over one row, over a plain step of the target, as reported by the engines."""
    draft_s = [
        call.timing.computed_s / call.timing.passes
        for round_ in rounds[STATIC]
        for call in round_.drafts
        if call.call == pb.CALL_BLOCK and call.timing.passes
    ]
    target_s = [round_.verify.timing.computed_s for round_ in rounds[PLAIN]]
    return round(statistics.median(draft_s) / statistics.median(target_s), 3)
