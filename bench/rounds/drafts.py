"""A head on the draft's device: pipelined over the same head in turn; and its guesses beside a draft's of equal time.

*Simulated*: the real orchestrator, with the recorded agreement of SmolLM2-135M's head (`models/smollm2`) by number of
guesses since the last features, and passes that take as long as those of large models on GPUs.

*Paced*: SmolLM2-135M and this head run for real, by real processes, and each pass waits until it has
taken as long as one of a large model on a GPU. The head is on the draft engine. It drafts on from its own outputs while
the target verifies, or after each verdict. So agreement, features on the link, and the time of messages are real.

*Equal*: an EAGLE-3 head and a separate draft of one such layer are trained for the demo target on the same texts for
about as long. Their passes take about as long, too.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.harness.traffic import connected
from bench.models.prompts import held_out_prompts
from bench.papers import noise
from bench.results import Result, at_least, at_most, say
from bench.rounds.simulated import CHAINS, TREES
from bench.rounds.ways import (
    PIPELINED,
    PLAIN,
    STATIC,
    Plan,
    all_repeats,
    best_in_turn,
    hits,
    ratio,
    rounds_by_way,
    unlike_plain,
)
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import StartupError
from deploy.launch import served
from deploy.launch.first_pair import HEAD, first_pair
from orchestrator.text import Tokenizer
from simulation.engines import HEAD_TEMPERATURES, PRESETS, HeadLaw
from simulation.report import plain, run, sweep
from simulation.scenario import Closed, Scenario

TEMPERATURES = (0.0, 0.8)
TARGET_PACE, HEAD_PACE = "70b", "1b"
"""A head is one layer and an output layer: of a 70B 3 GB in bfloat16, somewhat more than a draft of 1B."""
FEATURE_LAYERS = (2, 15, 27)
SIMULATED = ("70b+1b", "8b+0.5b")
NUM_TEXTS = 24
SIMULATED_GOALS = {0.0: 2.0, 0.8: 1.6}
OVER_IN_TURN_GOAL = 1.25
EQUAL_TIME_GOAL = 1.15
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "How do I keep a sourdough starter alive while I travel?",
    "Tell me about the history of the printing press.",
    "What should I consider before I adopt a dog?",
)
PARTS = ("simulated", "paced", "equal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="one part; all without it")
    parser.add_argument("--prompts", type=int, default=8, help="half of them questions, half code to continue")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion or text")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--texts", type=int, default=32, help="held-out texts of the drafters that are trained")
    parser.add_argument("--steps", type=int, default=200, help="of training the head")
    parser.add_argument("--work", type=Path, help="folder of what is trained, from which a later run goes on")


def measure(args: argparse.Namespace) -> list[Result]:
    """Run the chosen parts. Raises: StartupError if the first pair is not installed."""
    parts = {
        "simulated": lambda: [each for preset in SIMULATED for each in _simulated(preset)],
        "paced": lambda: _paced(args),
        "equal": lambda: _equal(args),
    }
    return [each for name in parts if args.only in (None, name) for each in parts[name]()]


def _simulated(preset: str) -> Iterator[Result]:
    for temperature in HEAD_TEMPERATURES:
        say(f"simulated {preset}, T = {temperature:g}")
        scenario = Scenario(
            PRESETS[preset],
            temperature,
            law=HeadLaw.load(temperature),
            is_head=True,
            load=Closed(num_streams=NUM_TEXTS),
            speculation=TREES,
        )
        in_turn = max(sweep(scenario), key=lambda each: each.rate)
        ways = {
            "trees in turn": replace(scenario, speculation=replace(TREES, pipelining=False)),
            "pipelined chains": replace(scenario, speculation=CHAINS),
            "pipelined trees": scenario,
            "plain": plain(scenario),
        }
        runs = {name: run(name, way) for name, way in ways.items()}
        title = f"simulated {preset}, T = {temperature:g}"
        against = {
            "against": f"{in_turn.verification.value}, gamma {in_turn.gamma}",
            "tokens/s": round(in_turn.rate, 1),
        }
        ratios = {name: round(each.rate / in_turn.rate, 3) for name, each in runs.items()}
        yield at_least(
            SIMULATED_GOALS[temperature],
            Result(
                f"{title}: pipelined trees over the best chain in turn",
                ratios["pipelined trees"],
                "x",
                settings=against,
            ),
        )
        for name in ("pipelined chains", "trees in turn", "plain"):
            yield Result(f"{title}: {name} over the best chain in turn", ratios[name], "x", settings=against)
        report = runs["pipelined trees"].report
        shown = {"hit rate": round(report.hit_rate, 3), "hidden": round(report.time_hidden, 3)}
        yield Result(f"{title}: tokens a round, pipelined", round(report.tokens_per_round, 3), "tokens", settings=shown)


def _paced(args: argparse.Namespace) -> list[Result]:
    target = _target()
    plan = Plan(_prompts(target, args.prompts), args.tokens, args.repeats)
    with served(_config(target), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", plan))


def _target() -> str:
    settings = {each.name: each.value for each in first_pair(say)}
    if not settings:
        raise StartupError("SmolLM2-135M is not installed: make setup installs it")
    return str(settings["target.engine.model"])


def _prompts(target: str, num_prompts: int) -> list[str]:
    tokenizer = Tokenizer.from_directory(Path(target))
    chats = [tokenizer.chat_text([{"role": "user", "content": each}]) for each in QUESTIONS]
    both = zip(chats, held_out_prompts(len(chats)), strict=True)
    return [prompt for pair in both for prompt in pair][:num_prompts]


def _config(target: str) -> ServiceConfig:
    """One thread for each engine. The target is deterministic, so that bfloat16 gives one output in every way."""
    engine = EngineConfig(target, dtype="bfloat16", num_threads=1)
    return ServiceConfig(
        TargetConfig(replace(engine, deterministic=True, feature_layers=FEATURE_LAYERS, paced_as=TARGET_PACE)),
        DraftConfig(replace(engine, head=str(HEAD), paced_as=HEAD_PACE)),
        speculation=SpeculationConfig(guessers=("draft",)),
    )


async def _measure(address: str, plan: Plan) -> list[Result]:
    results: list[Result] = []
    async with connected(address) as stub:
        for temperature in TEMPERATURES:
            gamma, repeats = await all_repeats(stub, plan, temperature)
            title = f"a head on the draft's device, paced as {TARGET_PACE}, T = {temperature:g}"
            rounds, best, settings = rounds_by_way(repeats), best_in_turn(repeats), {"static gamma": gamma}
            over_in_turn = ratio(f"{title}: pipelined over the best in turn", repeats, best, PIPELINED, settings)
            results += [
                at_least(OVER_IN_TURN_GOAL, over_in_turn),
                ratio(f"{title}: pipelined over the best static in turn", repeats, STATIC, PIPELINED, settings),
                ratio(f"{title}: pipelined over plain", repeats, PLAIN, PIPELINED, {}),
                ratio(f"{title}: in turn over plain", repeats, PLAIN, best, {}),
                hits(title, rounds[PIPELINED])[1],
                at_most(0, unlike_plain(title, repeats)),
            ]
    return results


def _equal(args: argparse.Namespace) -> list[Result]:
    chosen = argparse.Namespace(**{**vars(args), "prompts": args.texts, "drafters": [noise.EAGLE, noise.ONE_LAYER]})
    found = noise.measure(chosen)
    return [*found, *over_equal_time({each.name: each for each in found})]


def over_equal_time(found: Mapping[str, Result]) -> Sequence[Result]:
    """Tokens a round of the head over those of the draft, at each temperature."""
    results = []
    for temperature in noise.TEMPERATURES:
        head, draft = (found[noise.title(temperature, name)] for name in (noise.EAGLE, noise.ONE_LAYER))
        spent = {
            f"{name} of {side}": each.settings[name]
            for side, each in (("head", head), ("draft", draft))
            for name in ("training_s", "chain_of_6_costs")
        }
        name = f"T = {temperature:g}: tokens a round, EAGLE-3 over a draft of equal time"
        results.append(at_least(EQUAL_TIME_GOAL, Result(name, round(head.value / draft.value, 3), "x", settings=spent)))
    return results
