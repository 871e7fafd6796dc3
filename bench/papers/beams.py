"""Beam search with drafts over plain beam search, where the target's pass is slow beside its draft's.

Real engines and sessions count passes and their rows; the time of each is that of a preset's engines. Rounds are in
turn, so that a search takes the sum of its passes and messages. No figure depends on the speed of the machine.
Source: Leviathan et al. 2023, appendix A.4.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from bench.harness.in_process import InProcess, in_process
from bench.models.prompts import held_out_prompts
from bench.results import Result, say
from core.config import SpeculationConfig
from core.records import BeamSearch, CallTrace, GenerationRequest, Sampling
from simulation.engines import PRESETS, Hardware

WIDTHS = (2, 4)
DEPTHS = (0, 2, 4, 8, None)
"""Depths of the draft's trees; 0 is plain, None as a request without a depth."""
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Searched:
    """One search: its calls to the target, and what the draft did for it."""

    calls: Sequence[CallTrace]
    num_draft_rounds: int
    num_draft_passes: int
    tokens: Sequence[tuple[int, ...]]

    def seconds_on(self, hardware: Hardware) -> float:
        rows = [call.timing.num_rows for call in self.calls if call.timing is not None]
        target_s = sum(map(hardware.target.pass_s, rows)) + len(rows) * hardware.target_hop.round_trip_s
        draft_s = self.num_draft_passes * hardware.draft.pass_s(1)
        return target_s + draft_s + self.num_draft_rounds * hardware.draft_hop.round_trip_s


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    return asyncio.run(_measure(max(2, args.prompts // 8)))


async def _measure(num_prompts: int) -> list[Result]:
    results: list[Result] = []
    async with in_process(SpeculationConfig(draft_timeout_s=60.0)) as pair:
        prompts = [pair.tokenizer.encode(text) for text in held_out_prompts(num_prompts)]
        for width in WIDTHS:
            say(f"{width} beams")
            found = {depth: [await _search(pair, each, width, depth) for each in prompts] for depth in DEPTHS}
            results += _results(f"{width} beams", found)
    return results


async def _search(pair: InProcess, prompt: tuple[int, ...], width: int, depth: int | None) -> Searched:
    before = pair.draft.stats().num_steps
    request = GenerationRequest(
        "b",
        prompt,
        Sampling(temperature=0.0),
        NUM_TOKENS,
        max_draft_tokens=depth,
        policy="static_tree",
        ignore_eos=True,
        wants_trace=True,
        beams=BeamSearch(width, width),
    )
    chunks = [chunk async for chunk in pair.service.generate(request)]
    stats = chunks[0].stats
    assert stats is not None, "the first output has them"
    num_passes = pair.draft.stats().num_steps - before
    return Searched(chunks[0].trace, stats.num_draft_rounds, num_passes, [chunk.token_ids for chunk in chunks])


def _results(title: str, found: Mapping[int | None, Sequence[Searched]]) -> Iterator[Result]:
    plain = found[0]
    for depth, searches in [each for each in found.items() if each[0] != 0]:
        settings = {
            "passes": mean(len(each.calls) for each in searches),
            "draft_passes": mean(each.num_draft_passes for each in searches),
            "plain_passes": mean(len(each.calls) for each in plain),
            "unlike_plain": sum(each.tokens != other.tokens for each, other in zip(searches, plain, strict=True)),
        }
        for preset in ("70b+1b", "8b+0.5b"):
            times = [sum(each.seconds_on(PRESETS[preset]) for each in of) for of in (plain, searches)]
            drafts = "usual drafts" if depth is None else f"drafts {depth} deep"
            name = f"{title}, {drafts}, {preset}: over plain"
            yield Result(name, round(times[0] / times[1], 3), "x", settings=settings)
