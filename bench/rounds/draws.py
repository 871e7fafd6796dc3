"""Trees of draws against chains of draws and coupled trees: tokens a round at equal rows, by the demo pair.

Real engines and the real orchestrator run in this process, in turn, so that every block has as many guesses as allowed.
Each rule completes the same prompts with the same seeds. The counts do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from bench.harness.in_process import in_process
from bench.models.prompts import held_out_prompts
from bench.results import Result
from core.config import SpeculationConfig
from core.records import GenerationRequest, Sampling, SpeculationStats, Verification
from orchestrator.service import Service
from orchestrator.text import Tokenizer

DEPTH: Final = 8
TOKENS: Final = 96
PROMPTS: Final = 16
ROWS: Final = (4, 8, 16, 32)
TREES: Final = (Verification.COUPLED, Verification.RECURSIVE_REJECTION, Verification.SEQUENTIAL_SELECTION)
CHAINS: Final = (Verification.COUPLED, Verification.REJECTION, Verification.BLOCK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--q-top-tokens", type=int, nargs="+", default=[64, 1024], help="tokens that q is cut to")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="guesses of a block")


def measure(args: argparse.Namespace) -> list[Result]:
    """Measure each rule with chains or trees of each size, and with each cut of q."""
    torch.set_num_threads(1)
    return [result for top_tokens in args.q_top_tokens for result in _of_cut(args, top_tokens)]


def _of_cut(args: argparse.Namespace, top_tokens: int) -> Iterator[Result]:
    for rows in args.rows:
        depth = min(rows, DEPTH)
        chain = replace(COMMON, policy="static", max_draft_tokens=min(rows, 2 * DEPTH))
        tree = replace(COMMON, policy="static_tree", max_draft_tokens=depth, max_block_tokens=rows)
        ways = [(rule, "chain", chain) for rule in CHAINS] + [(rule, "tree", tree) for rule in TREES]
        for rule, shape, speculation in ways:
            stats = asyncio.run(complete(args, rule, speculation, top_tokens))
            yield _result(f"q of {top_tokens}, {rows} rows: {rule.value}, {shape}", stats)


COMMON: Final = SpeculationConfig(pipelining=False, guessers=("draft",), draft_timeout_s=60.0)


def _result(name: str, stats: Sequence[SpeculationStats]) -> Result:
    rounds = sum(each.num_draft_rounds for each in stats)
    accepted = sum(each.num_accepted_tokens for each in stats)
    guesses = sum(each.num_drafted_tokens for each in stats)
    settings = {"rounds": rounds, "guesses_a_round": round(guesses / rounds, 2)}
    return Result(f"{name}, tokens a round", round(1.0 + accepted / rounds, 3), "tokens", settings=settings)


async def complete(
    args: argparse.Namespace, rule: Verification, speculation: SpeculationConfig, top_tokens: int
) -> list[SpeculationStats]:
    async with in_process(replace(speculation, q_top_tokens=top_tokens)) as pair:
        return await asyncio.gather(
            *(stats_of(pair.service, request) for request in requests_of(args, rule, pair.tokenizer))
        )


def requests_of(args: argparse.Namespace, rule: Verification, tokenizer: Tokenizer) -> Iterator[GenerationRequest]:
    for seed, prompt in enumerate(held_out_prompts(args.prompts)):
        sampling = Sampling(temperature=args.temperature, seed=seed)
        tokens = tokenizer.encode(prompt)
        yield GenerationRequest(f"{seed}", tokens, sampling, args.tokens, verification=rule, ignore_eos=True)


async def stats_of(service: Service, request: GenerationRequest) -> SpeculationStats:
    chunks = [chunk async for chunk in service.generate(request)]
    stats = chunks[-1].stats
    assert stats is not None, "the last chunk has them"
    return stats
