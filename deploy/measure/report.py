"""A survey as tables for people and as results for scripts, with the options of `outrider simulate` for the same pair.

Knows surveys and hardware by name; must not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from core.records import Verification
from core.results import Result
from core.speculation import DRAFT
from core.theory import chain_tokens, optimal_gamma, walltime_factor
from deploy.measure.prediction import STREAMS, Prediction, Timing, pays_up_to, predict
from deploy.measure.recording import TIMED_ROWS
from deploy.measure.survey import Source, Survey

MB, KB = 1e6, 1e3
WAYS = {"in turn": False, "pipelined": True}
"""Ways of decoding, and whether drafting is hidden behind verification. A guesser without a model has only one way."""


def lines(survey: Survey, timings: Sequence[Timing]) -> Iterator[str]:
    """The measured acceptance, then the predicted gain on this machine and on each hardware of `timings`."""
    yield from _acceptance_lines(survey)
    for timing in (survey.timing, *timings):
        yield ""
        yield from _timing_lines(survey, timing)
    yield ""
    yield from _memory_lines(survey)
    yield from ("to simulate: outrider simulate " + arguments for arguments in _simulations(survey).values())


def _acceptance_lines(survey: Survey) -> Iterator[str]:
    """A line for each source: how often it has a guess, and how often that is accepted, by depth."""
    written = ", ".join(f"{num} at T = {temperature:g}" for temperature, num in survey.num_tokens.items())
    yield f"tokens written: {written}"
    depth = len(survey.sources[0].agreement.accepted)
    heading = "".join(f"{level:>6}" for level in range(1, depth + 1))
    yield f"{_title('', '', '')}{'has a guess':>12}{'alpha':>7}   by depth{heading[9:]}"
    for source in survey.sources:
        found = source.agreement
        cells = "".join("     -" if rate != rate else f"{rate:6.2f}" for rate in found.by_depth)
        yield f"{_title_of(source)}{found.coverage:>12.0%}{found.alpha:>7.3f}   {cells}"


def _title(temperature: str, name: str, verification: str) -> str:
    return f"{temperature:8}{name:16}{verification:10}"


def _title_of(source: Source) -> str:
    verification = source.verification.value if source.temperature else "greedy"
    return _title(f"T = {source.temperature:g}", source.name, verification)


def _timing_lines(survey: Survey, timing: Timing) -> Iterator[str]:
    yield _about(timing)
    streams = "".join(f"{num:>9}" for num in STREAMS)
    yield f"{_title('', '', '')}{'':11}{'theory':>8}   streams{streams[7:]}   pays up to"
    for source in survey.sources:
        for way, found in _predictions(source, timing).items():
            cells = "".join(f"{each.factor:6.2f}/{each.gamma:<2}" for each in found)
            yield f"{_title_of(source)}{way:11}{_theory(source, timing):>7.2f}x   {cells}   {pays_up_to(found):>10}"


def _about(timing: Timing) -> str:
    target = f"target pass {1e3 * timing.target(1):.3g} ms, of 8 rows {timing.target(8) / timing.target(1):.2f}x"
    draft = "" if timing.draft is None else f", draft pass {1e3 * timing.draft(1):.3g} ms, c = {timing.c:.3g}"
    return f"{timing.name}: {target}{draft}; factor against plain decoding / best draft length:"


def _predictions(source: Source, timing: Timing) -> dict[str, list[Prediction]]:
    ways = WAYS if source.guess_s is None else {"": False}
    rates, guess_s = source.agreement.rates, source.guess_s
    return {way: predict(rates, timing, guess_s, is_pipelined=hidden) for way, hidden in ways.items()}


def _theory(source: Source, timing: Timing) -> float:
    """Theorem 3.8 with the best gamma within the measured depth: one alpha, verification as fast as decoding."""
    alpha, c = source.agreement.rates[0], timing.c if source.guess_s is None else 0.0
    best = optimal_gamma(lambda gamma: walltime_factor(alpha, gamma, c), len(source.agreement.rates))
    return walltime_factor(alpha, best, c)


def _memory_lines(survey: Survey) -> Iterator[str]:
    for role, memory in survey.memory.items():
        weights = f"{memory.weights_bytes / MB:.1f} MB of weights"
        yield f"memory of the {role}: {weights}, {memory.kv_bytes_a_token / KB:.1f} kB of KV a token"


def _simulations(survey: Survey) -> Mapping[float, str]:
    """The options of `outrider simulate` for the draft on this machine, by temperature."""
    timing, law = survey.timing, survey.timing.draft
    if law is None:
        return {}
    widest = TIMED_ROWS[-1]
    flat_rows = max(1, min(widest, round(widest * law(1) / law(widest))))
    hardware = f"--verify-ms {1e3 * timing.target(1):.4g} --draft-ms {1e3 * law(1):.4g} --draft-rows {flat_rows}"
    return {
        source.temperature: f"--acceptance {source.agreement.alpha:.4f} --temperature {source.temperature:g} {hardware}"
        for source in survey.sources
        if source.name == DRAFT and source.verification is Verification.COUPLED
    }


# For scripts


def results(survey: Survey, timings: Sequence[Timing]) -> list[Result]:
    """All figures of the tables, with more digits."""
    return [
        *(result for source in survey.sources for result in _source_results(source)),
        *(result for timing in (survey.timing, *timings) for result in _timing_results(survey, timing)),
        *(result for role in survey.memory for result in _memory_results(survey, role)),
        *(
            Result("options of outrider simulate", temperature, "T", settings={"options": arguments})
            for temperature, arguments in _simulations(survey).items()
        ),
    ]


def _settings(source: Source) -> dict[str, Any]:
    return {"source": source.name, "temperature": source.temperature, "verification": source.verification.value}


def _source_results(source: Source) -> Iterator[Result]:
    found, settings = source.agreement, _settings(source)
    yield Result("acceptance", round(found.alpha, 6), "", settings=settings)
    yield Result("places with a guess", round(found.coverage, 6), "", settings=settings)
    for depth, (rate, num) in enumerate(zip(found.by_depth, found.guessed, strict=True), 1):
        if num:
            of_depth = {**settings, "depth": depth, "places": round(float(num), 3)}
            yield Result("acceptance by depth", round(rate, 6), "", settings=of_depth)
    for gamma in range(1, len(found.rates) + 1):
        tokens = round(chain_tokens(found.rates[:gamma]), 6)
        yield Result("tokens a round", tokens, "tokens", settings={**settings, "gamma": gamma})
    if source.guess_s is not None:
        yield Result("a proposal", round(1e6 * source.guess_s, 3), "us", settings=settings)


def _timing_results(survey: Survey, timing: Timing) -> Iterator[Result]:
    for role, law in {"target": timing.target, DRAFT: timing.draft}.items():
        if law is not None:
            for rows in TIMED_ROWS:
                settings = {"hardware": timing.name, "role": role, "rows": rows}
                yield Result("a pass", round(1e3 * law(rows), 6), "ms", settings=settings)
    for source in survey.sources:
        settings = {**_settings(source), "hardware": timing.name}
        yield Result("factor by theorem 3.8", round(_theory(source, timing), 6), "x", settings=settings)
        for way, found in _predictions(source, timing).items():
            of_way = {**settings, "way": way} if way else settings
            yield Result("pays up to", pays_up_to(found), "streams", settings=of_way)
            for each in found:
                at = {**of_way, "streams": each.num_streams, "gamma": each.gamma}
                yield Result("factor", round(each.factor, 6), "x", settings=at)


def _memory_results(survey: Survey, role: str) -> Iterator[Result]:
    memory, settings = survey.memory[role], {"role": role}
    yield Result("weights", memory.weights_bytes / MB, "MB", settings=settings)
    yield Result("KV a token", memory.kv_bytes_a_token / KB, "kB", settings=settings)
