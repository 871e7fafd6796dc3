"""Draws the draft tree of one real stream at three consecutive verdicts: demo pair, real orchestrator, one process.

The engines' passes last as long as a 70B's on four big GPUs and a 1B's on a small one, so that the draft makes as many
passes during a verification as it would there. The tokens are the demo pair's.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.results import Result
from bench.rounds.tree_picture import draw
from bench.rounds.tree_trace import SeenRound, TreeWatch, WatchedController, read, written
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.records import GenerationRequest, Sampling
from deploy.clock import MonotonicClock
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from outrider.in_process import ThreadLeases
from workers.engine import DraftEngine, TargetEngine

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPT = 'def find(name, path):\n    """Return the'
TEMPERATURE = 0.7
"""Sampling with shared noise; with greedy decoding the demo target soon repeats itself."""
TOKENS = 120
ROUNDS = 3
BLOCK_TOKENS = 6
"""Small, so that the picture of a block is legible."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the picture there")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write what was seen there, as JSON")
    parser.add_argument("--from-trace", type=Path, metavar="FILE", help="draw this instead of running the models")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=7)


def measure(args: argparse.Namespace) -> list[Result]:
    """Run one stream, draw three of its rounds, and report the sizes of their trees."""
    is_recorded = args.from_trace is not None
    rounds = read(args.from_trace.read_text()) if is_recorded else telling(asyncio.run(watched(args.prompt, args.seed)))
    if args.trace is not None:
        args.trace.write_text(written(rounds))
    if args.svg is not None:
        draw(rounds, args.svg)
    return [_result(number, seen) for number, seen in enumerate(rounds, start=1)]


def _result(number: int, seen: SeenRound) -> Result:
    settings = {"accepted": len(seen.path), "next": repr(seen.next_text), "kept": seen.num_kept}
    return Result(f"round {number}: nodes of the tree at its verdict", seen.num_nodes, "nodes", settings=settings)


def telling(rounds: list[SeenRound]) -> list[SeenRound]:
    """The consecutive rounds that show most."""
    starts = range(max(len(rounds) - ROUNDS + 1, 1))
    return max((rounds[start : start + ROUNDS] for start in starts), key=_worth)


def _worth(rounds: Sequence[SeenRound]) -> int:
    """Prefer whole blocks, accepted and rejected guesses, and both hits and a miss."""
    outcomes = {seen.num_kept > 0 for seen in rounds}
    num_whole = sum(seen.num_in_block >= BLOCK_TOKENS for seen in rounds)
    num_mixed = sum(0 < len(seen.path) < seen.num_in_block for seen in rounds)
    return 4 * len(outcomes) + 3 * num_whole + num_mixed + sum(len(seen.path) for seen in rounds)


async def watched(prompt: str, seed: int) -> list[SeenRound]:
    """The rounds of one stream, except for the first."""
    torch.set_num_threads(1)
    speculation = SpeculationConfig(max_block_tokens=BLOCK_TOKENS)
    target_config, draft_config = (EngineConfig(str(DEMO / role), paced_as=size) for role, size in _PACES)
    target, draft = TargetEngine.load(target_config, 1, _ignore), DraftEngine.load(draft_config, 2, 64, _ignore)
    config = ServiceConfig(TargetConfig(target_config), DraftConfig(draft_config), speculation=speculation)
    tokenizer, leases, watch = Tokenizer.from_directory(DEMO / "target"), ThreadLeases(target, draft), TreeWatch()
    policies = WatchedController(speculation, watch)
    service = Service(config, target.info, draft.info, tokenizer, leases, MonotonicClock(), policies)
    sampling = Sampling(temperature=TEMPERATURE, seed=seed)
    request = GenerationRequest("tree", tokenizer.encode(prompt), sampling, max_tokens=TOKENS, ignore_eos=True)
    try:
        output = [token async for chunk in service.generate(request) for token in chunk.token_ids]
        await service.close()
    finally:
        await leases.close()
    return watch.rounds(output, lambda token: tokenizer.decode([token]))


_PACES = (("target", "70b"), ("draft", "1b"))


def _ignore(_reason: object) -> None:
    """Lost engines end their sessions without help."""
