"""Pipelined rounds against sequential ones by real processes on this machine, one thread for each model.

A grown target and a grown draft are served by Ray and gRPC. Each prompt is completed in several ways, one after the
other, as its request says: pipelined, sequentially, sequentially with a static draft length, and plainly; so that
whatever else the machine does disturbs them alike. What pipelining is compared with is the faster of the two sequential
ones: the adaptive, or the static at its best length, found by a sweep before. What adaptive sessions learn of costs and
acceptance is one service's, and so all ways': a pass beside drafting is dearer here, and each way plans with the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from bench.anatomy import Round, hidden_share, rounds_of
from bench.calibrate import draft_of_cost
from bench.grow import DEFAULT_CACHE, cached
from bench.hops import round_trips_ms
from bench.prompts import held_out_prompts
from bench.results import Result, at_least, at_most, spread
from bench.sizes import Size, parse_size, read_shape, shape_of_size
from bench.traffic import AS_SERVED, IN_TURN, PLAINLY, Run, Way, connected, request, run
from core.config import DraftConfig, Dtype, EngineConfig, ServiceConfig, TargetConfig
from deploy.local import served
from deploy.settings import DEMO_DIRECTORY
from protos.outrider.v1 import generation_pb2 as pb

COST_RATIO = 0.1
TEMPERATURES = (0.0, 1.0)
PIPELINED, SEQUENTIAL, STATIC, PLAIN = "pipelined", "sequential", "static", "plain"
GAMMAS = (1, 2, 3, 4, 5, 6, 8)
NUM_SWEEP_PROMPTS = 3
NUM_WARM_UP_PROMPTS = 2
"""Not counted: the adaptive policies learn from them."""
NUM_ROUND_TRIPS = 100
SPEED_UP_GOAL = 1.25
HIDDEN_GOAL = 0.95
OVERHEAD_GOAL = 1.5

Runs = Mapping[str, Sequence[Run]]
"""By way, one of each prompt."""


def _static(gamma: int) -> Way:
    return Way(gamma, policy="static", pipelining=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    prompts: Sequence[str]
    max_tokens: int
    num_repeats: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served, and how much is measured."""
    parser.add_argument("--target-size", type=parse_size, default="123M", metavar="SIZE")
    parser.add_argument("--cost-ratio", type=float, default=COST_RATIO, help="of a draft step to a target step")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of target and draft")
    parser.add_argument("--prompts", type=int, default=8, help="completed in each way in each repeat")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Grow the pair, serve it, and compare."""
    plan = Plan(held_out_prompts(args.prompts), args.tokens, args.repeats)
    target, draft, settings = grown_pair(args.target_size, args.cost_ratio, args.dtype, args.cache)
    with served(_config(target, draft, args.dtype), _say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", plan, settings))


def grown_pair(size: Size, cost_ratio: float, dtype: Dtype, cache: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Target and draft, and what they are."""
    _say("growing the target, and a draft to the cost ratio")
    source = DEMO_DIRECTORY / "target"
    shape = shape_of_size(read_shape(source), size)
    target = cached(source, shape, dtype, cache)
    draft = draft_of_cost(DEMO_DIRECTORY / "draft", target, cost_ratio, dtype, cache)
    settings = {"target": _outline(target), "draft": _outline(draft.model), "dtype": dtype, "threads": 1}
    _say(f"target {settings['target']}, draft {settings['draft']}, cost ratio unserved {draft.cost_ratio:.3f}")
    return target, draft.model, settings


def _outline(model: Path) -> str:
    shape = read_shape(model)
    return f"{shape.num_parameters / 1e6:.1f}M ({shape.num_hidden_layers} x {shape.hidden_size})"


def _config(target: Path, draft: Path, dtype: Dtype) -> ServiceConfig:
    """Deterministic, so that bfloat16 gives one output whatever is verified together."""
    engine = EngineConfig(str(target), dtype=dtype, num_threads=1, deterministic=True, compile=True)
    return ServiceConfig(
        target=TargetConfig(engine),
        draft=DraftConfig(replace(engine, model=str(draft), deterministic=False)),
    )


async def _measure(address: str, plan: Plan, settings: Mapping[str, Any]) -> list[Result]:
    async with connected(address) as stub:
        results = []
        for temperature in TEMPERATURES:
            gamma = await _best_gamma(stub, plan, temperature)
            ways = {PIPELINED: AS_SERVED, SEQUENTIAL: IN_TURN, STATIC: _static(gamma), PLAIN: PLAINLY}
            await _repeat(stub, replace(plan, prompts=plan.prompts[:NUM_WARM_UP_PROMPTS]), ways, temperature, 0)
            repeats, hops_ms = [], []
            for number in range(plan.num_repeats):
                _say(f"T = {temperature:g}: repeat {number + 1} of {plan.num_repeats}")
                repeats.append(await _repeat(stub, plan, ways, temperature, number))
                hops_ms += await round_trips_ms(NUM_ROUND_TRIPS)
            results += _results(f"T = {temperature:g}", repeats, hops_ms, {**settings, "static gamma": gamma})
    return results


async def _best_gamma(stub: Any, plan: Plan, temperature: float) -> int:
    """The draft length at which static sequential drafting is fastest; each length completes the same prompts."""
    prompts = plan.prompts[:NUM_SWEEP_PROMPTS]
    times = dict.fromkeys(GAMMAS, 0.0)
    for prompt in [prompts[0], *prompts]:  # the first once more: it warms up
        for gamma in GAMMAS:
            took = await _complete(stub, _static(gamma), prompt, plan.max_tokens, temperature, seed=0)
            times[gamma] = took.decode_s if prompt is prompts[0] else times[gamma] + took.decode_s
    best = min(times, key=lambda gamma: times[gamma])
    outline = ", ".join(f"{gamma}: {seconds:.2f}" for gamma, seconds in times.items())
    _say(f"T = {temperature:g}: static draft lengths in seconds: {outline}")
    return best


async def _repeat(
    stub: Any, plan: Plan, ways: Mapping[str, Way], temperature: float, number: int
) -> dict[str, list[Run]]:
    """Every prompt in every way, in turn; which is first changes from prompt to prompt."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for index, prompt in enumerate(plan.prompts):
        first = (index + number) % len(names)
        for name in [*names[first:], *names[:first]]:
            runs[name].append(await _complete(stub, ways[name], prompt, plan.max_tokens, temperature, seed=index))
    return runs


async def _complete(stub: Any, way: Way, prompt: str, max_tokens: int, temperature: float, seed: int) -> Run:
    return await run(stub, request(prompt, max_tokens, temperature=temperature, way=way, seed=seed, trace=True))


def _results(
    title: str, repeats: Sequence[Runs], hops_ms: Sequence[float], settings: Mapping[str, Any]
) -> list[Result]:
    rounds = {
        name: [round_ for runs in repeats for each in runs[name] for round_ in rounds_of(each.calls)]
        for name in repeats[0]
    }
    best = min((SEQUENTIAL, STATIC), key=lambda name: statistics.median(_decode_s(runs[name]) for runs in repeats))
    hop_ms = statistics.median(hops_ms)
    return [
        at_least(SPEED_UP_GOAL, _ratio(f"{title}: pipelined over sequential", repeats, best, PIPELINED, settings)),
        _ratio(f"{title}: pipelined over plain", repeats, PLAIN, PIPELINED, {}),
        _ratio(f"{title}: sequential over plain", repeats, PLAIN, best, {}),
        *_pipelined_results(title, rounds[PIPELINED]),
        *_overhead_results(title, rounds, best, hop_ms),
        spread(f"{title}: bare actor round trip", hops_ms, "ms"),
        Result(f"{title}: cost ratio c, served", _cost_ratio(rounds), "x"),
        at_most(0, _unlike_plain(title, repeats)),
    ]


def _ratio(name: str, repeats: Sequence[Runs], slow: str, fast: str, settings: Mapping[str, Any]) -> Result:
    """Time of `slow` over time of `fast`, repeat by repeat; both made the same tokens."""
    values = [_decode_s(runs[slow]) / _decode_s(runs[fast]) for runs in repeats]
    num_tokens = sum(len(each.tokens) for each in repeats[0][fast])
    rate = num_tokens / statistics.median(_decode_s(runs[fast]) for runs in repeats)
    return spread(name, values, "x", against=slow, tokens_per_s=round(rate, 1), **settings)


def _decode_s(runs: Sequence[Run]) -> float:
    return sum(each.decode_s for each in runs)


def _pipelined_results(title: str, rounds: Sequence[Round]) -> list[Result]:
    asked = [round_ for round_ in rounds if round_.was_asked]
    hits = [round_ for round_ in asked if round_.is_hit]
    return [
        at_least(HIDDEN_GOAL, Result(f"{title}: draft time hidden on hits", round(hidden_share(hits), 3), "share")),
        Result(
            f"{title}: hit rate",
            round(len(hits) / max(1, len(asked)), 3),
            "share",
            settings={"rounds": len(rounds), "asked": len(asked)},
        ),
        Result(f"{title}: tokens a round, pipelined", round(_mean([r.num_tokens for r in rounds]), 2), "tokens"),
    ]


def _overhead_results(
    title: str, rounds: Mapping[str, Sequence[Round]], sequential: str, hop_ms: float
) -> list[Result]:
    """What a round takes beyond the engines' own time, over a bare call: on a hit a round is one call."""
    of_pipelined = [round_.not_model_s * 1e3 for round_ in rounds[PIPELINED]]
    of_hits = [round_.not_model_s * 1e3 for round_ in rounds[PIPELINED] if round_.is_hit]
    of_sequential = [round_.not_model_s * 1e3 for round_ in rounds[sequential]]
    return [
        at_most(
            OVERHEAD_GOAL, _over(f"{title}: not model time a round, pipelined, over a bare call", of_pipelined, hop_ms)
        ),
        _over(f"{title}: the same on hits", of_hits, hop_ms),
        _over(f"{title}: the same, sequential (two calls)", of_sequential, hop_ms),
    ]


def _over(name: str, times_ms: Sequence[float], hop_ms: float) -> Result:
    median_ms = statistics.median(times_ms) if times_ms else float("nan")
    return Result(name, round(median_ms / hop_ms, 3), "x", settings={"median_ms": round(median_ms, 3)})


def _cost_ratio(rounds: Mapping[str, Sequence[Round]]) -> float:
    """A pass of the draft over one row, over a plain step of the target, by what the engines say of themselves."""
    draft_s = [
        call.timing.computed_s / call.timing.passes
        for round_ in rounds[STATIC]
        for call in round_.drafts
        if call.call == pb.CALL_BLOCK and call.timing.passes
    ]
    target_s = [round_.verify.timing.computed_s for round_ in rounds[PLAIN]]
    return round(statistics.median(draft_s) / statistics.median(target_s), 3)


def _unlike_plain(title: str, repeats: Sequence[Runs]) -> Result:
    """Completions, plain ones of later repeats included, that differ from the first plain one of the same prompt."""
    pairs = [
        (each.tokens, plain.tokens)
        for runs in repeats
        for name in runs
        for each, plain in zip(runs[name], repeats[0][PLAIN], strict=True)
    ]
    num_unlike = sum(tokens != expected for tokens, expected in pairs)
    settings = {"num_completions": len(pairs)}
    return Result(f"{title}: completions unlike plain decoding", num_unlike, "streams", settings=settings)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("nan")


def _say(line: str) -> None:
    print(f"... {line}", flush=True)
