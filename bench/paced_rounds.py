"""Pipelined rounds against sequential ones by real processes, with engines that are as slow as large models on GPUs.

The service is the one that serves: Serve, links, orchestrator, gRPC, a process for each part. Its models are small ones
of this repository, whose agreement is real; each forward pass is padded by waiting until it has lasted as long as a
preset says (`paced_as`), and a processor is free meanwhile. So the figures are those of the simulator but for what the
real service adds to a round, which is given with them: by engine, link and orchestrator.

70B/1B timing is compared with what `bench rounds --only simulated` has for the same pair. 5 ms a pass is less than the
demo target takes here, so 8B timing has the demo draft as its target, and as its draft that model with noise on its
weights, which agrees with it about as well as the demo pair does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.anatomy import Round
from bench.perturbed import perturbed
from bench.prompts import held_out_prompts
from bench.results import Result, at_least, at_most, spread
from bench.simulated_rounds import CHAINS, TREES
from bench.traffic import connected
from bench.ways import (
    PIPELINED,
    PLAIN,
    Plan,
    Runs,
    all_ways,
    best_gamma,
    best_in_turn,
    hidden_on_hits,
    hits,
    ratio,
    repeat,
    rounds_by_way,
    say,
    unlike_plain,
)
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.pass_law import PASS_LAWS, PassLaw
from deploy.local import served
from deploy.probe import engine_of
from deploy.settings import DEMO_DIRECTORY
from protos.outrider.v1 import generation_pb2 as pb

NUM_WARM_UP_PROMPTS = 2
"""Not counted: the adaptive policies learn from them."""
SHARE_OF_SIMULATED = 0.95
SIMULATED_CHAINS = {0.0: 1.90, 1.0: 1.49}
SIMULATED_TREES = {0.0: 2.13, 1.0: 1.71}
"""Over the best in turn (README.md), with 1 ms of wire to each engine and back."""
NOISE = 0.098
"""On the demo draft's weights: the two agree in 0.87 of all places (greedy, held-out prompts), as the demo pair does in
0.876. Of the corrections 0.94 are among the next four candidates, where the demo pair has 0.85."""

Parts = Mapping[str, float]
"""Seconds of a round, by who takes them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pair, how slow it is, and what is expected of it. Goals are by temperature."""

    target_pace: str
    draft_pace: str
    models: Callable[[Path], tuple[Path, Path]]
    """Target and draft; what has to be made for them is kept in the folder."""
    speculation: SpeculationConfig
    over_in_turn: Mapping[float, float]
    over_plain: Mapping[float, float] = field(default_factory=dict)
    plain_share: Mapping[float, float] = field(default_factory=dict)
    """Plain decoding, as a share of 1/t_v."""

    @property
    def target_law(self) -> PassLaw:
        return PASS_LAWS[self.target_pace]

    def config(self, cache: Path) -> ServiceConfig:
        """Compiled, so that passes are as short as they can be before they are padded."""
        target, draft = self.models(cache)
        engine = EngineConfig(str(target), deterministic=True, compile=True, paced_as=self.target_pace)
        draft_engine = replace(engine, model=str(draft), deterministic=False, paced_as=self.draft_pace)
        return ServiceConfig(TargetConfig(engine), DraftConfig(draft_engine), speculation=self.speculation)


def _demo_pair(_: Path) -> tuple[Path, Path]:
    return DEMO_DIRECTORY / "target", DEMO_DIRECTORY / "draft"


def _small_pair(cache: Path) -> tuple[Path, Path]:
    model = DEMO_DIRECTORY / "draft"
    return model, perturbed(model, NOISE, cache)


def _most_of(figures: Mapping[float, float]) -> Mapping[float, float]:
    return {temperature: round(SHARE_OF_SIMULATED * value, 3) for temperature, value in figures.items()}


CASES = {
    "70b+1b-chains": Case("70b", "1b", _demo_pair, CHAINS, _most_of(SIMULATED_CHAINS)),
    "70b+1b-trees": Case("70b", "1b", _demo_pair, TREES, _most_of(SIMULATED_TREES)),
    "8b+0.5b": Case("8b", "0.5b", _small_pair, TREES, {0.0: 1.3}, {0.0: 2.2}, {0.0: 0.85}),
}
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Passes:
    """Of one engine, all ways together."""

    num_passes: int
    num_overruns: int
    """Those that took longer by themselves than they should."""
    forward_s: float
    step_s: float
    """With sampling, verification and bookkeeping."""

    def since(self, earlier: Passes) -> Passes:
        """Those in between."""
        return Passes(
            self.num_passes - earlier.num_passes,
            self.num_overruns - earlier.num_overruns,
            self.forward_s - earlier.forward_s,
            self.step_s - earlier.step_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Beside those that real rounds have, too: prompts, tokens, repeats and the cache."""
    parser.add_argument("--paced", choices=CASES, nargs="+", default=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--paced-temperatures", type=float, choices=TEMPERATURES, nargs="+", default=[*TEMPERATURES], metavar="T"
    )


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve each case, and compare."""
    plan = Plan(held_out_prompts(args.prompts), args.tokens, args.repeats)
    results: list[Result] = []
    for name in args.paced:
        say(f"paced rounds, {name}")
        with served(CASES[name].config(args.cache), say) as endpoints:
            address = f"localhost:{endpoints.grpc_port}"
            results += asyncio.run(_measure(name, address, plan, args.paced_temperatures))
    return results


async def _measure(name: str, address: str, plan: Plan, temperatures: Sequence[float]) -> list[Result]:
    case, results = CASES[name], []
    async with connected(address) as stub:
        for temperature in temperatures:
            gamma = await best_gamma(stub, plan, temperature)
            ways = all_ways(gamma)
            await repeat(stub, replace(plan, prompts=plan.prompts[:NUM_WARM_UP_PROMPTS]), ways, temperature, 0)
            before = await _passes()
            repeats = []
            for number in range(plan.num_repeats):
                say(f"T = {temperature:g}: repeat {number + 1} of {plan.num_repeats}")
                repeats.append(await repeat(stub, plan, ways, temperature, number))
            passes = {role: now.since(before[role]) for role, now in (await _passes()).items()}
            title = f"paced {name}, T = {temperature:g}"
            results += _results(title, case, temperature, repeats, passes, {"static gamma": gamma})
    return results


async def _passes() -> dict[str, Passes]:
    """Since the engines' start."""
    stats = {role: await (await engine_of(role)).stats.remote() for role in ("target", "draft")}
    return {
        role: Passes(each.num_steps, each.num_overruns, each.forward_time_s, each.step_time_s)
        for role, each in stats.items()
    }


def _results(
    title: str,
    case: Case,
    temperature: float,
    repeats: Sequence[Runs],
    passes: Mapping[str, Passes],
    settings: Mapping[str, Any],
) -> list[Result]:
    best, rounds = best_in_turn(repeats), rounds_by_way(repeats)
    padded = {"padded by waiting": f"target as {case.target_pace}, draft as {case.draft_pace}"}
    goals = (case.over_in_turn, case.over_plain, case.plain_share)
    compared = (
        ratio(f"{title}: pipelined over sequential", repeats, best, PIPELINED, {**padded, **settings}),
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
        *_of_engines(title, passes),
        at_most(0, unlike_plain(title, repeats)),
    ]


def _judged(goal: float | None, result: Result) -> Result:
    return result if goal is None else at_least(goal, result)


def _plain_share(name: str, law: PassLaw, repeats: Sequence[Runs]) -> Result:
    """Of a service that costs nothing beside the target's passes of one row."""
    shares = []
    for runs in repeats:
        num_later = sum(len(arrival.token_ids) for each in runs[PLAIN] for arrival in each.arrivals[1:])
        shares.append(num_later * law(1) / sum(each.decode_s for each in runs[PLAIN]))
    return spread(name, shares, "share")


# Where the time of a round goes


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
    """Who takes the time of a round, from sending its block to sending the next one."""
    call = round_.verify
    timing, took_s = call.timing, call.received_s - call.sent_s
    pass_s = timing.passes * law(round(timing.rows / max(1, timing.passes)))
    awaited_s = _awaited_s(round_)
    return {
        "target pass": pass_s,
        "target beside its pass": timing.computed_s - pass_s,
        "target's queue": timing.waited_s,
        "link": took_s - timing.waited_s - timing.computed_s,
        "awaited draft": awaited_s,
        "orchestrator": round_.end_s - call.received_s - awaited_s,
    }


def _awaited_s(round_: Round) -> float:
    """From the verdict to the last answer of the draft that came before the next block was sent."""
    answered = [call.received_s for call in round_.drafts if call.received_s <= round_.end_s]
    return max([0.0, *(received_s - round_.verify.received_s for received_s in answered)])


def _beside_passes(name: str, rounds: Sequence[Parts]) -> Result:
    """All parts but the target's pass, at the median of all rounds; the parts' own medians are in the settings."""
    beside_ms = [1e3 * (sum(each.values()) - each["target pass"]) for each in rounds]
    medians = {f"{part}, ms": round(1e3 * statistics.median(each[part] for each in rounds), 3) for part in rounds[0]}
    mean = round(statistics.mean(beside_ms), 3)
    settings = {"mean_ms": mean, "rounds": len(rounds), **medians}
    return Result(name, round(statistics.median(beside_ms), 3), "ms", settings=settings)


def _after_rounds(name: str, repeats: Sequence[Runs]) -> Result:
    """From first chunk to last as the client sees it, but for the rounds and the last verification: what the first
    chunk's way takes less than the last one's."""
    outside_ms = [
        1e3 * (each.decode_s - (verified[-1].received_s - verified[0].received_s))
        for runs in repeats
        for each in runs[PIPELINED]
        if (verified := sorted(_verifications(each.calls), key=lambda call: call.sent_s))
    ]
    return spread(name, outside_ms, "ms")


def _verifications(calls: Sequence[Any]) -> list[Any]:
    return [call for call in calls if call.call == pb.CALL_VERIFY]


def _of_engines(title: str, passes: Mapping[str, Passes]) -> Iterator[Result]:
    for role, seen in passes.items():
        share = round(seen.num_overruns / max(1, seen.num_passes), 3)
        mean_ms = {"mean_ms": round(1e3 * seen.forward_s / max(1, seen.num_passes), 3)}
        counts = {"passes": seen.num_passes, **mean_ms}
        yield Result(f"{title}: passes of the {role} longer than its pace", share, "share", settings=counts)
        beside_ms = round(1e3 * (seen.step_s - seen.forward_s) / max(1, seen.num_passes), 3)
        yield Result(f"{title}: a step of the {role} beside its pass, mean", beside_ms, "ms")
