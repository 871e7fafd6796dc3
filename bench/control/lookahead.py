"""Lookahead decoding alone, without a draft: tokens and rows of a pass, by the size of its window.

Runs a real orchestrator and the demo target in this process; each text is compared with plain decoding. For other kinds
of text, and for lookahead beside other sources, see `bench guessers --only table`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from bench.control.workload_texts import workloads
from bench.results import Result
from core.config import EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.records import GenerationRequest, Sampling
from deploy.clock import MonotonicClock
from deploy.settings import DEMO_DIRECTORY
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from outrider.in_process import ThreadLeases
from workers.engine import TargetEngine

MEASURED = ("code completion", "docstring prose")
WINDOWS = ("5x4", "10x3", "10x5", "15x5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--windows", nargs="+", default=WINDOWS, metavar="WxN", help="columns, length of n-grams")


def measure(args: argparse.Namespace) -> list[Result]:
    """Measure each kind of text with each window. Raises: RuntimeError if a text differs from plain decoding."""
    return asyncio.run(_measure(args))


@dataclass(frozen=True, slots=True)
class Passes:
    """Outputs and costs of all texts of one kind."""

    tokens: Sequence[tuple[int, ...]]
    num_passes: int
    num_rows: int


async def _measure(args: argparse.Namespace) -> list[Result]:
    engine = TargetEngine.load(EngineConfig(str(DEMO_DIRECTORY / "target")), 1, lambda _: None)
    leases = ThreadLeases(engine)
    try:
        return [result async for result in _results(args, engine, leases)]
    finally:
        await leases.close()


async def _results(args: argparse.Namespace, engine: TargetEngine, leases: ThreadLeases) -> AsyncIterator[Result]:
    kinds = [each for each in workloads(args.texts) if each.name in MEASURED]
    for kind in kinds:
        jobs = list(_jobs(kind.prompts, kind.temperature, args.tokens))
        plain = await _decode(engine, leases, SpeculationConfig(max_draft_tokens=0), jobs)
        for window in args.windows:
            columns, ngram = map(int, window.split("x"))
            config = SpeculationConfig(
                policy="static_tree", guessers=("lookahead",), lookahead_window=columns, lookahead_ngram=ngram
            )
            found = await _decode(engine, leases, config, jobs)
            if found.tokens != plain.tokens:
                raise RuntimeError(f"{kind.name} came out changed")
            name = f"{kind.name}, T = {kind.temperature:g}: window {columns}, {ngram}-grams"
            num_tokens, rows = sum(map(len, found.tokens)), round(found.num_rows / found.num_passes, 1)
            yield Result(name, round(num_tokens / found.num_passes, 3), "tokens a pass", settings={"rows": rows})


def _jobs(prompts: Sequence[str], temperature: float, num_tokens: int) -> Iterator[GenerationRequest]:
    tokenizer = Tokenizer.from_directory(DEMO_DIRECTORY / "target")
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=seed)
        yield GenerationRequest(f"{seed}", tokenizer.encode(prompt), sampling, num_tokens, ignore_eos=True)


async def _decode(
    engine: TargetEngine, leases: ThreadLeases, speculation: SpeculationConfig, jobs: Sequence[GenerationRequest]
) -> Passes:
    """Decode the texts one after the other. Rows of prompts count, too; shared prefixes save some of them."""
    config = ServiceConfig(TargetConfig(EngineConfig(str(DEMO_DIRECTORY / "target"))), speculation=speculation)
    tokenizer = Tokenizer.from_directory(DEMO_DIRECTORY / "target")
    service = Service(config, engine.info, None, tokenizer, leases, MonotonicClock())
    texts, num_passes, rows_before = list[tuple[int, ...]](), 0, engine.stats().num_rows
    try:
        for job in jobs:
            chunks = [chunk async for chunk in service.generate(job)]
            texts.append(tuple(token for chunk in chunks for token in chunk.token_ids))
            stats = chunks[-1].stats
            assert stats is not None, "the last chunk has them"
            num_passes += stats.num_rounds
    finally:
        await service.close()
    num_rows = engine.stats().num_rows - rows_before
    return Passes(texts, num_passes, num_rows)
