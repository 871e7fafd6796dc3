"""An engine on another host, some milliseconds away: the slowdown in turn, and how much of it pipelining hides.

Head and orchestrator are on one host together with one engine's node; the other engine's node is on another host
(bench/harness/hosts.py). Each prompt is completed pipelined and in turn, with and without delay, in direct succession,
since a machine's speed changes by the minute.

Two pairs are served: a grown pair, and the demo pair paced like it. The grown pair runs two models on two processors,
which all other work of a round shares. The paced pair shows the effect of the distance alone; the difference between
the pairs shows the effect of too few processors.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.harness.anatomy import Round, hidden_share, rounds_of
from bench.harness.hosts import Wire, missing, two_hosts
from bench.harness.nodes import ROLE, ROLES, nodes
from bench.harness.traffic import AS_SERVED, IN_TURN, PLAINLY, Run, connected
from bench.models.grow import DEFAULT_CACHE
from bench.models.prompts import held_out_prompts
from bench.models.sizes import parse_size
from bench.results import Result, at_least, at_most, say, spread
from bench.rounds.real import grown_pair
from bench.rounds.ways import PIPELINED, SEQUENTIAL, complete
from core.config import DraftConfig, EngineConfig, TargetConfig
from core.errors import StartupError
from deploy.settings import DEMO_DIRECTORY
from protos.outrider.v1 import generation_pb2 as pb

COST_RATIO = 0.1
ENGINES = ("draft", "target")
DRAFT_GOAL = 0.98
"""Goal for tokens per second, relative to a near draft."""
TARGET_GOAL = 0.9
"""Goal for tokens per second on hits, relative to a near target."""
WAYS = {PIPELINED: AS_SERVED, SEQUENTIAL: IN_TURN}
GROWN = "grown"
PACED = {"paced": ("123m", "13m"), "70b+1b": ("70b", "1b")}
"""Target and draft of each pair whose passes take their duration from a law."""
WITHOUT_GOAL = "70b+1b"
"""A pair whose passes are as short as the delay; the goals were set for longer passes."""
TEMPERATURE = 0.8
KV_TOKENS = 4096

Runs = dict[tuple[str, float], list[Run]]
"""Runs by way and delay, one per prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--far", choices=ENGINES, nargs="+", default=[*ENGINES], metavar="ENGINE", help="on another host"
    )
    pairs = (GROWN, *PACED)
    parser.add_argument(
        "--pairs", choices=pairs, nargs="+", default=[GROWN, "paced"], metavar="PAIR", help=", ".join(pairs)
    )
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of a packet, each way")
    parser.add_argument("--target-size", type=parse_size, default="123M", metavar="SIZE")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of each completion")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Place the nodes on their hosts, serve, and measure both ways in turn. Raises: StartupError."""
    if (lack := missing()) is not None:
        raise StartupError(f"two hosts cannot be had here: {lack}")
    return [result for pair in args.pairs for result in _measure_pair(pair, args)]


def _measure_pair(pair: str, args: argparse.Namespace) -> list[Result]:
    settings = _settings(*_engines(pair, args))
    results = [result for far in args.far for result in _measure_far(far, settings, args)]
    if pair == WITHOUT_GOAL:
        results = [result if result.goal == 0 else replace(result, goal=None, met=None) for result in results]
    return [replace(result, name=f"{pair}, {result.name}") for result in results]


def _engines(pair: str, args: argparse.Namespace) -> tuple[EngineConfig, EngineConfig]:
    """Settings of target and draft."""
    if pair == GROWN:
        grown = grown_pair(args.target_size, COST_RATIO, "float32", args.cache)[:2]
        target, draft = (EngineConfig(str(model), kv_cache_tokens=KV_TOKENS) for model in grown)
        return replace(target, deterministic=True), draft
    target, draft = (
        EngineConfig(str(DEMO_DIRECTORY / role), kv_cache_tokens=KV_TOKENS, paced_as=pace)
        for role, pace in zip(("target", "draft"), PACED[pair], strict=True)
    )
    return target, draft


def _measure_far(far: str, settings: Mapping[str, Any], args: argparse.Namespace) -> list[Result]:
    with two_hosts() as (near, other, wire), nodes([role for role in ROLES if role != far], near.address) as up:
        other.enter()
        up.add(far, node_ip_address=other.address)
        near.enter()
        up.deploy(settings)
        return asyncio.run(_measure(far, up.address, wire, args))


def _settings(target: EngineConfig, draft: EngineConfig) -> dict[str, Any]:
    placed = {role: {ROLE: role} for role in ROLES}
    return {
        "orchestrator": {"num_cpus": 0.5, "labels": placed["orchestrator"]},
        "target": asdict(TargetConfig(target, num_cpus=0.5, labels=placed["target"])),
        "draft": asdict(DraftConfig(draft, num_cpus=0.5, labels=placed["draft"])),
    }


async def _measure(far: str, address: str, wire: Wire, args: argparse.Namespace) -> list[Result]:
    prompts, delays_s = held_out_prompts(args.prompts), (0.0, args.delay_ms / 1e3)
    async with connected(address) as stub:
        plain = [
            await complete(stub, PLAINLY, prompt, args.tokens, TEMPERATURE, index)
            for index, prompt in enumerate(prompts)
        ]
        repeats = [await _repeat(stub, wire, prompts, delays_s, args.tokens, number) for number in range(args.repeats)]
    results = _results(far, repeats, plain, delays_s[1])
    return results if far == "draft" else [*results, _on_hits(repeats, delays_s[1])]


async def _repeat(
    stub: Any, wire: Wire, prompts: Sequence[str], delays_s: Sequence[float], max_tokens: int, number: int
) -> Runs:
    """Complete every prompt in each way with each delay, in an order that changes from prompt to prompt.

    With each delay, one uncounted completion of each way comes first, so that policies learn the delay.
    """
    runs: Runs = {}
    for index, prompt in enumerate(prompts):
        say(f"repeat {number + 1}, prompt {index + 1}")
        is_even = (index + number) % 2 == 0
        for delay_s in delays_s if is_even else reversed(delays_s):
            wire.delay(delay_s)
            for way in WAYS.values():
                await complete(stub, way, prompt, max_tokens, TEMPERATURE, index)
            for name in reversed(WAYS) if is_even else WAYS:
                took = await complete(stub, WAYS[name], prompt, max_tokens, TEMPERATURE, index)
                runs.setdefault((name, delay_s), []).append(took)
    return runs


def _results(far: str, repeats: Sequence[Runs], plain: Sequence[Run], delay_s: float) -> list[Result]:
    away = f"{far} {1e3 * delay_s:g} ms away"
    hits = [round_ for round_ in _rounds(repeats, delay_s) if round_.is_hit]
    unlike = sum(
        each.tokens != expected.tokens
        for runs in repeats
        for completions in runs.values()
        for each, expected in zip(completions, plain, strict=True)
    )
    ahead, in_turn = (
        _ratio(f"{name}: {away} over one at hand", repeats, (name, delay_s), (name, 0.0)) for name in WAYS
    )
    return [
        at_least(DRAFT_GOAL, ahead) if far == "draft" else ahead,
        in_turn,
        _ratio(f"pipelined over sequential, {far} at hand", repeats, (PIPELINED, 0.0), (SEQUENTIAL, 0.0)),
        _ratio(f"pipelined over sequential, {away}", repeats, (PIPELINED, delay_s), (SEQUENTIAL, delay_s)),
        *(_hit_rate(where, _rounds(repeats, at_s)) for where, at_s in ((f"{far} at hand", 0.0), (away, delay_s))),
        Result(f"{away}: the draft's time hidden on hits, the way included", round(hidden_share(hits), 3), "share"),
        at_most(0, Result(f"{away}: completions unlike plain decoding", unlike, "streams")),
    ]


def _rounds(repeats: Sequence[Runs], delay_s: float) -> list[Round]:
    return [round_ for runs in repeats for each in runs[PIPELINED, delay_s] for round_ in rounds_of(each.calls)]


def _on_hits(repeats: Sequence[Runs], delay_s: float) -> Result:
    """Tokens per second on hits, relative to a near target."""
    values = [_tokens_per_s(runs[PIPELINED, delay_s]) / _tokens_per_s(runs[PIPELINED, 0.0]) for runs in repeats]
    continued = sum(each.stats.continued_passes for runs in repeats for each in runs[PIPELINED, delay_s])
    name = f"pipelined: target {1e3 * delay_s:g} ms away over one at hand, on hits"
    return at_least(TARGET_GOAL, spread(name, values, "x", continued_passes=continued))


def _tokens_per_s(runs: Sequence[Run]) -> float:
    hits = [round_ for each in runs for round_ in rounds_of(each.calls) if round_.is_hit]
    return sum(round_.num_tokens for round_ in hits) / sum(round_.end_s - round_.verify.sent_s for round_ in hits)


def _ratio(name: str, repeats: Sequence[Runs], way: tuple[str, float], over: tuple[str, float]) -> Result:
    """Tokens per second of `way` relative to `over`, by prompt and repeat. The outputs are the same."""
    pairs = [pair for runs in repeats for pair in zip(runs[way], runs[over], strict=True)]
    return spread(name, [other.decode_s / each.decode_s for each, other in pairs], "x")


def _hit_rate(where: str, rounds: Sequence[Round]) -> Result:
    """Share of hits among rounds with drafting; the settings have the means of a round's parts."""
    hits = sum(round_.is_hit for round_ in rounds) / max(1, sum(round_.was_asked for round_ in rounds))
    return Result(f"{where}: hit rate", round(hits, 3), "share", settings=_means(rounds))


def _means(rounds: Sequence[Round]) -> Mapping[str, float]:
    if not rounds:
        return {}
    each: dict[str, list[float]] = {
        "tokens": [round_.num_tokens for round_ in rounds],
        "guesses": [round_.verify.guesses for round_ in rounds],
        "draft_passes": [sum(call.call == pb.CALL_GROWTH for call in round_.drafts) for round_ in rounds],
        "target_ms": [1e3 * round_.verify.timing.computed_s for round_ in rounds],
        "way_ms": [1e3 * round_.link_s for round_ in rounds],
        "then_ms": [1e3 * round_.waited_s for round_ in rounds],
    }
    return {"rounds": len(rounds), **{name: round(statistics.mean(values), 2) for name, values in each.items()}}
