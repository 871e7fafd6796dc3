"""The same prompts completed in several ways, one after the other, so that other load affects all ways alike.

The ways are: pipelined, in turn by the adaptive policy, in turn at the best static draft length, and plain. Each
request sets its way. Knows requests and their runs; must not know what is served.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness.anatomy import Round, hidden_share, rounds_of, waiting_share
from bench.harness.traffic import AS_SERVED, IN_TURN, PLAINLY, Run, Way, request, run
from bench.results import Result, say, spread

PIPELINED, SEQUENTIAL, STATIC, PLAIN = "pipelined", "sequential", "static", "plain"
GAMMAS = (1, 2, 3, 4, 5, 6, 8)
NUM_SWEEP_PROMPTS = 3
NUM_WARM_UP_PROMPTS = 2
"""Prompts that are not counted: the adaptive policies learn from them."""

Runs = Mapping[str, Sequence[Run]]
"""Runs by way, one per prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts, length of outputs, and number of repeats."""

    prompts: Sequence[str]
    max_tokens: int
    num_repeats: int


def static(gamma: int) -> Way:
    """A fixed number of guesses, drafted after the previous verdict."""
    return Way(gamma, policy="static", pipelining=False)


def all_ways(gamma: int) -> Mapping[str, Way]:
    """The four ways; `gamma` is the static way's draft length."""
    return {PIPELINED: AS_SERVED, SEQUENTIAL: IN_TURN, STATIC: static(gamma), PLAIN: PLAINLY}


async def all_repeats(stub: Any, plan: Plan, temperature: float) -> tuple[int, list[Runs]]:
    """Find the best static draft length, warm up, and complete all prompts in all ways in each repeat."""
    gamma = await best_gamma(stub, plan, temperature)
    ways = all_ways(gamma)
    await repeat(stub, replace(plan, prompts=plan.prompts[:NUM_WARM_UP_PROMPTS]), ways, temperature, 0)
    repeats: list[Runs] = []
    for number in range(plan.num_repeats):
        say(f"T = {temperature:g}: repeat {number + 1} of {plan.num_repeats}")
        repeats.append(await repeat(stub, plan, ways, temperature, number))
    return gamma, repeats


async def best_gamma(stub: Any, plan: Plan, temperature: float) -> int:
    """The fastest draft length of static sequential drafting. Each length completes the same prompts."""
    prompts = plan.prompts[:NUM_SWEEP_PROMPTS]
    times = dict.fromkeys(GAMMAS, 0.0)
    for prompt in [prompts[0], *prompts]:  # the first prompt runs twice, for warm-up
        for gamma in GAMMAS:
            took = await complete(stub, static(gamma), prompt, plan.max_tokens, temperature, seed=0)
            times[gamma] = took.decode_s if prompt is prompts[0] else times[gamma] + took.decode_s
    best = min(times, key=lambda gamma: times[gamma])
    outline = ", ".join(f"{gamma}: {seconds:.2f}" for gamma, seconds in times.items())
    say(f"T = {temperature:g}: static draft lengths in seconds: {outline}")
    return best


async def repeat(
    stub: Any, plan: Plan, ways: Mapping[str, Way], temperature: float, number: int
) -> dict[str, list[Run]]:
    """Complete every prompt in every way. The order of the ways changes from prompt to prompt."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for index, prompt in enumerate(plan.prompts):
        first = (index + number) % len(names)
        for name in [*names[first:], *names[:first]]:
            runs[name].append(await complete(stub, ways[name], prompt, plan.max_tokens, temperature, seed=index))
    return runs


async def complete(stub: Any, way: Way, prompt: str, max_tokens: int, temperature: float, seed: int) -> Run:
    """Complete one prompt in one way, with a trace."""
    return await run(stub, request(prompt, max_tokens, temperature=temperature, way=way, seed=seed, trace=True))


# Results


def decode_s(runs: Sequence[Run]) -> float:
    """Seconds of all runs together, without prefill."""
    return sum(each.decode_s for each in runs)


def best_in_turn(repeats: Sequence[Runs]) -> str:
    """Name of the faster of the two sequential ways."""
    return min((SEQUENTIAL, STATIC), key=lambda name: statistics.median(decode_s(runs[name]) for runs in repeats))


def ratio(name: str, repeats: Sequence[Runs], slow: str, fast: str, settings: Mapping[str, Any]) -> Result:
    """Time of `slow` over time of `fast` in each repeat, for the same tokens."""
    values = [decode_s(runs[slow]) / decode_s(runs[fast]) for runs in repeats]
    num_tokens = sum(len(each.tokens) for each in repeats[0][fast])
    rate = num_tokens / statistics.median(decode_s(runs[fast]) for runs in repeats)
    return spread(name, values, "x", against=slow, tokens_per_s=round(rate, 1), **settings)


def rounds_by_way(repeats: Sequence[Runs]) -> Mapping[str, Sequence[Round]]:
    """All rounds of all repeats, by way."""
    return {
        name: [round_ for runs in repeats for each in runs[name] for round_ in rounds_of(each.calls)]
        for name in repeats[0]
    }


def hidden_on_hits(title: str, rounds: Sequence[Round]) -> Result:
    """Share of draft time hidden, for rounds whose next block was ready at the verdict."""
    share = hidden_share(round_ for round_ in rounds if round_.was_asked and round_.is_hit)
    return Result(f"{title}: draft time hidden on hits", round(share, 3), "share")


def waits(title: str, rounds: Sequence[Round]) -> list[Result]:
    """Draft time that is not hidden, over all rounds, including those that waited for a pass after the verdict."""
    waited = [round_ for round_ in rounds if round_.picked is not None and not round_.is_hit]
    share_waited = len(waited) / len(rounds) if rounds else 0.0
    return [
        Result(
            f"{title}: draft time hidden, passes that were waited for included", round(hidden_share(rounds), 3), "share"
        ),
        Result(f"{title}: rounds that waited for a pass", round(share_waited, 3), "share"),
        Result(f"{title}: time in which the target waited", round(waiting_share(rounds), 3), "share"),
    ]


def hits(title: str, rounds: Sequence[Round]) -> list[Result]:
    """Share of rounds whose next block was ready at the verdict, and tokens per round."""
    asked = [round_ for round_ in rounds if round_.was_asked]
    num_hits = sum(round_.is_hit for round_ in asked)
    counts = {"rounds": len(rounds), "asked": len(asked)}
    num_tokens = statistics.mean(r.num_tokens for r in rounds) if rounds else float("nan")
    return [
        Result(f"{title}: hit rate", round(num_hits / max(1, len(asked)), 3), "share", settings=counts),
        Result(f"{title}: tokens a round, pipelined", round(num_tokens, 2), "tokens"),
    ]


def unlike_plain(title: str, repeats: Sequence[Runs]) -> Result:
    """Number of completions that differ from the first plain one of the same prompt, including later plain ones."""
    pairs = [
        (each.tokens, plain.tokens)
        for runs in repeats
        for name in runs
        for each, plain in zip(runs[name], repeats[0][PLAIN], strict=True)
    ]
    num_unlike = sum(tokens != expected for tokens, expected in pairs)
    settings = {"num_completions": len(pairs)}
    return Result(f"{title}: completions unlike plain decoding", num_unlike, "streams", settings=settings)
