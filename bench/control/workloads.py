"""Who should guess, by kind of text: the draft, each guesser that needs no model, and the automatic choice of all.

The orchestrator is the real one, on a virtual clock with passes of a 70B and a 1B (preset "70b+1b"), one stream at a
time. The texts and the draft's agreement along them are recorded from the demo pair (`bench.control.workload_texts`).
What a proposal takes of the processor is measured apart, and is no part of the virtual time: a target pass is 500 times
as long.
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from random import Random

from bench.control.workload_texts import Recorded, Recorder, ReplayLaw, ReplayText, workloads
from bench.progress import say
from bench.results import Result, at_least
from core.config import SpeculationConfig
from core.records import GenerationRequest, Sampling
from core.speculation import DRAFT, Guesser
from core.theory import optimal_gamma, walltime_factor
from deploy.measure import Recording, guessers, of_guesser
from deploy.settings import DEMO_DIRECTORY
from simulation.clock import new_loop
from simulation.engines import PRESETS, Agreement
from simulation.measure import Report, StreamSeen, sum_up
from simulation.rig import Blueprint, Rig

DEPTH = SpeculationConfig().max_draft_tokens
HARDWARE = PRESETS["70b+1b"]
AUTOMATIC, PLAIN = "automatic", "plain"
COPYING = ("prompt_lookup", "suffix")
AUTOMATIC_GOAL, MIX_GOAL, COPY_GOAL = 0.98, 1.1, 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much is decoded."""
    parser.add_argument("--texts", type=int, default=8, help="of each workload")
    parser.add_argument("--tokens", type=int, default=128, help="of each text at most")
    parser.add_argument("--only", metavar="NAME", help="workloads whose names begin so, without the mix of all")


def measure(args: argparse.Namespace) -> list[Result]:
    """Record, decode each workload in every way, then all of them mixed."""
    recorder = Recorder(DEMO_DIRECTORY, args.tokens)
    recorded = []
    for workload in workloads(args.texts):
        if args.only is not None and not workload.name.startswith(args.only):
            continue
        say(f"recording {workload.name}, T = {workload.temperature:g}")
        recorded.append(recorder.record(workload))
    results = [result for each in recorded for result in _of_workload(each, recorder.vocab_size)]
    return results if args.only is not None else [*results, *_of_mix(recorded, recorder.vocab_size)]


def sources() -> Mapping[str, tuple[str, ...]]:
    """Who guesses, by the name of the way. Nobody decodes plainly."""
    names = (DRAFT, *guessers(DEPTH))
    return {PLAIN: (), **{name: (name,) for name in names}, AUTOMATIC: names}


# Decoding on the virtual clock


@dataclass(frozen=True, slots=True)
class Job:
    """One text to decode."""

    text: Recording
    temperature: float
    agreements: Sequence[Agreement]


@dataclass(frozen=True, slots=True)
class Decoded:
    """All texts, decoded in one way."""

    report: Report
    accepted: Mapping[str, int]
    """Guesses, by their source."""


def jobs_of(recorded: Recorded) -> list[Job]:
    """One for each text."""
    temperature = recorded.workload.temperature
    return [
        Job(text, temperature, agreements) for text, agreements in zip(recorded.texts, recorded.agreements, strict=True)
    ]


def decode(jobs: Sequence[Job], guessing: Sequence[str], vocab_size: int) -> Decoded:
    """One after the other, by one service that learns as it goes. Raises: RuntimeError if a text comes out changed."""
    loop = new_loop()
    rig = Rig(_blueprint(jobs, guessing, vocab_size), loop, Random(0))

    async def run() -> tuple[list[StreamSeen], Report]:
        try:
            seen = [await _stream(rig, job, number, loop.time) for number, job in enumerate(jobs)]
            return seen, sum_up(seen, rig.cluster, rig.service.report())
        finally:
            await rig.service.close()

    try:
        seen, report = loop.run_until_complete(run())
    finally:
        loop.close()
    return Decoded(report, _accepted(seen))


def _blueprint(jobs: Sequence[Job], guessing: Sequence[str], vocab_size: int) -> Blueprint:
    law = ReplayLaw([job.agreements for job in jobs])
    speculation = SpeculationConfig(guessers=tuple(guessing)) if guessing else SpeculationConfig(max_draft_tokens=0)
    return Blueprint(
        target=HARDWARE.target,
        draft=HARDWARE.draft,
        target_hop=HARDWARE.target_hop,
        draft_hop=HARDWARE.draft_hop,
        text=ReplayText(law, vocab_size, outputs=[job.text.output for job in jobs]),
        speculation=speculation,
    )


async def _stream(rig: Rig, job: Job, number: int, now: Callable[[], float]) -> StreamSeen:
    """Its number is its seed, by which the simulated pair knows the text."""
    seen, tokens = StreamSeen(started_s=now()), list[int]()
    request = GenerationRequest(
        f"text-{number}",
        job.text.prompt,
        Sampling(temperature=job.temperature, seed=number),
        max_tokens=len(job.text.output),
        ignore_eos=True,
        wants_trace=True,
    )
    async for chunk in rig.service.generate(request):
        seen.take(chunk, now())
        tokens += chunk.token_ids
    if tuple(tokens) != job.text.output:
        raise RuntimeError(f"text {number} came out changed")
    return seen


def _accepted(seen: Sequence[StreamSeen]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for stream in seen:
        for source in stream.stats.sources if stream.stats is not None else ():
            counts[source.name] += source.num_accepted_tokens
    return counts


# Results


def _of_workload(recorded: Recorded, vocab_size: int) -> Iterator[Result]:
    title = f"{recorded.workload.name}, T = {recorded.workload.temperature:g}"
    say(f"decoding {title}")
    decoded = {way: decode(jobs_of(recorded), guessing, vocab_size) for way, guessing in sources().items()}
    for way in [*decoded][1:]:
        yield from _of_way(f"{title}: {way}", decoded[way], decoded[PLAIN])
    ranks = [agreement.rank for agreements in recorded.agreements for agreement in agreements]
    yield _promised(f"{title}: {DRAFT}", ranks.count(0) / len(ranks), HARDWARE.draft.pass_s(1))
    for name in guessers(DEPTH):
        yield from _alone(f"{title}: {name}", name, recorded)
    yield _against_best(title, decoded, AUTOMATIC_GOAL)
    if recorded.workload.name.startswith("copy"):
        copying = max((decoded[way] for way in COPYING), key=_rate)
        yield at_least(
            COPY_GOAL, _ratio(f"{title}: the best of {', '.join(COPYING)} over draft", copying, decoded[DRAFT])
        )


def _of_mix(recorded: Sequence[Recorded], vocab_size: int) -> Iterator[Result]:
    """One service for texts of all kinds in turn, as they come to a server."""
    say("decoding all of them mixed")
    in_turn = zip_longest(*map(jobs_of, recorded))
    jobs = [job for job in chain.from_iterable(in_turn) if job is not None]
    decoded = {way: decode(jobs, guessing, vocab_size) for way, guessing in sources().items()}
    for way in [*decoded][1:]:
        yield from _of_way(f"mix: {way}", decoded[way], decoded[PLAIN])
    yield _against_best("mix", decoded, MIX_GOAL)


def _rate(found: Decoded) -> float:
    return found.report.tokens_per_s_a_stream


def _ratio(name: str, fast: Decoded, slow: Decoded, **settings: object) -> Result:
    return Result(name, round(_rate(fast) / _rate(slow), 3), "x", settings=settings)


def _of_way(name: str, found: Decoded, plain: Decoded) -> Iterator[Result]:
    report, accepted = found.report, dict(found.accepted)
    acceptance = round(report.acceptance_rate, 3)
    yield _ratio(f"{name}, over plain", found, plain, acceptance=acceptance, accepted_by_source=accepted)
    times_ms = {"verify_ms": round(1e3 * report.verify_s, 2), "wait_ms": round(1e3 * report.block_s, 2)}
    settings = {**times_ms, "share_of_hits": round(report.share_of_hits, 3)}
    yield Result(f"{name}, tokens a pass", round(report.tokens_per_round, 3), "tokens", settings=settings)


def _against_best(title: str, decoded: Mapping[str, Decoded], goal: float) -> Result:
    best = max((way for way in decoded if way not in (PLAIN, AUTOMATIC)), key=lambda way: _rate(decoded[way]))
    name = f"{title}: {AUTOMATIC} over the best single source"
    return at_least(goal, _ratio(name, decoded[AUTOMATIC], decoded[best], best=best))


def _promised(name: str, alpha: float, guess_s: float) -> Result:
    """Theorem 3.8 with the best draft length, for one alpha: a place without a guess counts as a wrong one."""
    c = guess_s / HARDWARE.target.pass_s(1)
    gamma = optimal_gamma(lambda gamma: walltime_factor(alpha, gamma, c), DEPTH)
    factor = round(walltime_factor(alpha, gamma, c), 3)
    return Result(f"{name}, by theorem 3.8", factor, "x", settings={"alpha": round(alpha, 3), "gamma": gamma})


def _alone(name: str, source: str, recorded: Recorded) -> Iterator[Result]:
    """Of a guesser asked at each place of each text, without a service: what theory promises, its time and memory."""
    new, texts = guessers(DEPTH)[source], recorded.texts
    first, *others = (of_guesser(new(), text.prompt, text.output, text.log_p, DEPTH) for text in texts)
    found = sum(others, first)
    yield _promised(name, found.coupled.rates[0], 0.0)
    coverage = round(found.coupled.coverage, 3)
    yield Result(f"{name}, acceptance", round(found.coupled.alpha, 3), "share", settings={"has_a_guess": coverage})
    yield Result(f"{name}, a proposal", round(1e6 * found.guess_s, 1), "us")
    yield Result(f"{name}, memory of a session", round(_memory_bytes(new, texts[0]) / 1e3, 1), "kB")


def _memory_bytes(new: Callable[[], Guesser], text: Recording) -> int:
    """What a guesser keeps of a whole text."""
    tokens = [*text.prompt, *text.output]
    tracemalloc.start()
    guesser = new()
    for end in range(len(text.prompt), len(tokens) + 1):
        guesser.propose(tokens[:end])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held
