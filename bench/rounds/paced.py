"""Pipelined rounds against sequential ones by real processes, with engines as slow as large models on GPUs.

The service is real: Serve, links, orchestrator, gRPC, one process for each part. Its engines have no models: they
replay recorded agreement, and their passes last as long as a preset says (bench/rounds/recorded_engines.py), if a
processor is free. Compared with `bench rounds --only simulated`, a round therefore takes the time that the real service
adds. That time is reported by engine, link and orchestrator, and as processor time by process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.anatomy import Parts, Round, medians_ms
from bench.harness.processor import PROCESSOR_GOAL_MS, cpu_s, processor_time, round_ms
from bench.harness.traffic import Way, connected
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_least, at_most, say, spread
from bench.rounds.recorded_engines import RECORDED
from bench.rounds.simulated import CHAINS, TREES
from bench.rounds.together import WAYS, together
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
    repeat,
    rounds_by_way,
    unlike_plain,
)
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.costs import PASS_LAWS, PassLaw
from deploy.launch import served
from deploy.settings import DEMO_DIRECTORY
from protos.outrider.v1 import generation_pb2 as pb

SHARE_OF_SIMULATED = 0.95
SIMULATED_CHAINS = {0.0: 1.90, 1.0: 1.49}
SIMULATED_TREES = {0.0: 2.13, 1.0: 1.71}
"""Speed over the best fixed draft length in turn (README.md), by temperature, if a round trip to each engine takes 1
ms."""


@dataclass(frozen=True, slots=True)
class PacedPair:
    """A pair, its pace, and its goals by temperature."""

    target_pace: str
    draft_pace: str
    speculation: SpeculationConfig
    over_static: Mapping[float, float] = field(default_factory=dict)
    """Goals for the speed over the best fixed draft length in turn, as in the simulated figures."""
    over_in_turn: Mapping[float, float] = field(default_factory=dict)
    """Goals for the speed over the best sequential way, fixed or adaptive."""
    over_plain: Mapping[float, float] = field(default_factory=dict)
    """Goals for the speed over plain decoding."""
    plain_share: Mapping[float, float] = field(default_factory=dict)
    """Goals for the rate of plain decoding, as a share of 1/t_v."""

    @property
    def target_law(self) -> PassLaw:
        return PASS_LAWS[self.target_pace]

    @property
    def config(self) -> ServiceConfig:
        """Settings of the pair, with the demo pair's tokenizer and vocabulary."""
        target, draft = (
            EngineConfig(str(DEMO_DIRECTORY / role), paced_as=pace)
            for role, pace in (("target", self.target_pace), ("draft", self.draft_pace))
        )
        return ServiceConfig(TargetConfig(target), DraftConfig(draft), speculation=self.speculation)


def _most_of(figures: Mapping[float, float]) -> Mapping[float, float]:
    return {temperature: round(SHARE_OF_SIMULATED * value, 3) for temperature, value in figures.items()}


CASES = {
    "70b+1b-chains": PacedPair("70b", "1b", CHAINS, _most_of(SIMULATED_CHAINS)),
    "70b+1b-trees": PacedPair("70b", "1b", TREES, _most_of(SIMULATED_TREES)),
    "8b+0.5b": PacedPair("8b", "0.5b", TREES, {}, {0.0: 1.3}, {0.0: 2.2}, {0.0: 0.85}),
}
TEMPERATURES = tuple(RECORDED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add settings. Prompts, tokens, repeats and the cache are shared with `real`."""
    parser.add_argument("--paced", choices=CASES, nargs="+", default=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--paced-temperatures", type=float, choices=TEMPERATURES, nargs="+", default=[*TEMPERATURES], metavar="T"
    )


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve each case at each temperature, and compare the ways."""
    plan = Plan(held_out_prompts(args.prompts), args.tokens, args.repeats)
    results: list[Result] = []
    for name in args.paced:
        for temperature in args.paced_temperatures:
            say(f"paced rounds, {name}, T = {temperature:g}")
            with served(CASES[name].config, say, engines=RECORDED[temperature]) as endpoints:
                results += asyncio.run(_measure(name, f"localhost:{endpoints.grpc_port}", plan, temperature))
    return results


async def _measure(name: str, address: str, plan: Plan, temperature: float) -> list[Result]:
    async with connected(address) as stub:
        gamma, repeats = await all_repeats(stub, plan, temperature)
        title = f"paced {name}, T = {temperature:g}"
        spent = [await _processor_time(title, stub, plan, *way, temperature) for way in WAYS.items()]
        of_many = await together(title, stub, plan, CASES[name].target_law, temperature)
    return [*_results(title, CASES[name], temperature, repeats, {"static gamma": gamma}), *spent, *of_many]


async def _processor_time(title: str, stub: Any, plan: Plan, name: str, way: Way, temperature: float) -> Result:
    """Processor time of a round, over all processes. It includes the simulated draft's guesses, but no models."""
    before = cpu_s()
    runs = (await repeat(stub, plan, {name: way}, temperature, 0))[name]
    spent_ms = round_ms(before, cpu_s(), sum(each.stats.target_passes for each in runs))
    return at_most(PROCESSOR_GOAL_MS, processor_time(f"{title}: processor time of a round, {name}", [spent_ms]))


def _results(
    title: str,
    case: PacedPair,
    temperature: float,
    repeats: Sequence[Runs],
    settings: Mapping[str, Any],
) -> list[Result]:
    best, rounds = best_in_turn(repeats), rounds_by_way(repeats)
    paced = {"recorded agreement": f"target as {case.target_pace}, draft as {case.draft_pace}"}
    goals = (case.over_static, case.over_in_turn, case.over_plain, case.plain_share)
    compared = (
        ratio(f"{title}: pipelined over the best static in turn", repeats, STATIC, PIPELINED, {**paced, **settings}),
        ratio(f"{title}: pipelined over the best in turn", repeats, best, PIPELINED, {**paced, **settings}),
        ratio(f"{title}: pipelined over plain", repeats, PLAIN, PIPELINED, {}),
        _plain_share(f"{title}: plain over 1/t_v", case.target_law, repeats),
    )
    return [
        *(_judged(goal.get(temperature), result) for goal, result in zip(goals, compared, strict=True)),
        ratio(f"{title}: sequential over plain", repeats, PLAIN, best, {}),
        hidden_on_hits(title, rounds[PIPELINED]),
        *hits(title, rounds[PIPELINED]),
        *_anatomy(title, case.target_law, rounds, best),
        _after_rounds(f"{title}: a stream's time outside its rounds", repeats),
        at_most(0, unlike_plain(title, repeats)),
    ]


def _judged(goal: float | None, result: Result) -> Result:
    return result if goal is None else at_least(goal, result)


def _plain_share(name: str, law: PassLaw, repeats: Sequence[Runs]) -> Result:
    """The rate of plain decoding as a share of 1/t_v(1), the rate if the service itself took no time."""
    shares = []
    for runs in repeats:
        num_later = sum(len(arrival.token_ids) for each in runs[PLAIN] for arrival in each.arrivals[1:])
        shares.append(num_later * law(1) / sum(each.decode_s for each in runs[PLAIN]))
    return spread(name, shares, "share")


# Parts of the time of a round


def _anatomy(title: str, law: PassLaw, rounds: Mapping[str, Sequence[Round]], best: str) -> Iterator[Result]:
    pipelined = rounds[PIPELINED]
    kinds = {
        "plain": rounds[PLAIN],
        "pipelined, hits": [round_ for round_ in pipelined if round_.is_hit],
        "pipelined, others": [round_ for round_ in pipelined if not round_.is_hit],
        f"sequential ({best})": rounds[best],
    }
    for kind, of_kind in kinds.items():
        if of_kind:
            yield _beside_passes(f"{title}: a round beside its target pass, {kind}", [parts(r, law) for r in of_kind])


def parts(round_: Round, law: PassLaw) -> Parts:
    """Seconds of a round by part, from sending its block to sending the next one."""
    timing = round_.verify.timing
    pass_s = timing.passes * law(round(timing.rows / max(1, timing.passes)))
    awaited_s = _awaited_s(round_)
    return {
        "target pass": pass_s,
        "target beside its pass": timing.computed_s - pass_s,
        "target's queue": timing.waited_s,
        "link": round_.link_s,
        "awaited draft": awaited_s,
        "orchestrator": round_.waited_s - awaited_s,
    }


def _awaited_s(round_: Round) -> float:
    """Seconds from the verdict to the draft's last answer before the next block was sent."""
    answered = [call.received_s for call in round_.drafts if call.received_s <= round_.end_s]
    return max([0.0, *(received_s - round_.verify.received_s for received_s in answered)])


def _beside_passes(name: str, rounds: Sequence[Parts]) -> Result:
    """The median over rounds of all parts except the target's pass; the settings have the median of each part."""
    beside_ms = [1e3 * (sum(each.values()) - each["target pass"]) for each in rounds]
    mean = round(statistics.mean(beside_ms), 3)
    settings = {"mean_ms": mean, "rounds": len(rounds), **medians_ms(rounds)}
    return Result(name, round(statistics.median(beside_ms), 3), "ms", settings=settings)


def _after_rounds(name: str, repeats: Sequence[Runs]) -> Result:
    """A stream's time at the client, from first chunk to last, minus its rounds and last verification.

    The rest is the difference between the delays of the last and the first chunk on their way to the client.
    """
    outside_ms = [
        1e3 * (each.decode_s - (verified[-1].received_s - verified[0].received_s))
        for runs in repeats
        for each in runs[PIPELINED]
        if (verified := sorted(_verifications(each.calls), key=lambda call: call.sent_s))
    ]
    return spread(name, outside_ms, "ms")


def _verifications(calls: Sequence[Any]) -> list[Any]:
    return [call for call in calls if call.call == pb.CALL_VERIFY]
