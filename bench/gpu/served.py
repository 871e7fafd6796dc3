"""Draft and target as two processes on one GPU, with whole pipelined rounds; and a head in the process of either.

Ray, gRPC and the orchestrator are those of a service. The target is grown from the demo's, the draft is the demo's, and
the head is fitted to the target on the spot. `--device cpu` runs the same processes on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer

from bench.harness.traffic import AS_SERVED, PLAINLY, connected
from bench.models.grow import cached
from bench.models.prompts import held_out_prompts
from bench.models.sizes import read_shape, shape_of_size
from bench.results import Result, at_least, say
from bench.rounds.ways import (
    PIPELINED,
    PLAIN,
    Plan,
    all_ways,
    best_gamma,
    best_in_turn,
    hits,
    ratio,
    repeat,
    rounds_by_way,
    unlike_plain,
)
from core.config import DraftConfig, EngineConfig, ServiceConfig, TargetConfig
from deploy.launch import served
from deploy.settings import DEMO_DIRECTORY
from workers.heads import fit_heads

DRAFT: Final = "a draft on the same GPU"
AT_TARGET, AT_DRAFT = "a head at the target", "a head in a process of its own"
OVER_IN_TURN: Final = 1.3
"""Goal for pipelined rounds over the best in turn."""
MAX_PROMPTS: Final = 4
NUM_TEXTS: Final = 32
"""Texts that the head is fitted to, none of which is completed."""
NUM_HEADS: Final = 3
KV_TOKENS: Final = 8192
BLOCK_TOKENS: Final = 64


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve the target with each source of guesses. Raises: StartupError."""
    source = DEMO_DIRECTORY / "target"
    target = cached(source, shape_of_size(read_shape(source), args.size), args.dtype, args.cache)
    plan = Plan(held_out_prompts(min(args.prompts, MAX_PROMPTS)), args.tokens, args.repeats)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        say("fitting the head")
        head = _fitted(target, args, Path(folder))
        for name, config in services(target, head, args).items():
            say(f"serving {name}")
            with served(config, say) as endpoints:
                results += asyncio.run(_rounds(name, f"localhost:{endpoints.grpc_port}", plan))
    return results


def services(target: Path, head: Path, args: argparse.Namespace) -> Mapping[str, ServiceConfig]:
    """The target with each source of guesses. All engines of a service share one GPU."""
    is_gpu = torch.device(args.device).type == "cuda"
    engine = EngineConfig(
        str(target), dtype=args.dtype, device=args.device, kv_cache_tokens=KV_TOKENS, block_tokens=BLOCK_TOKENS,
        compile=is_gpu,
    )  # fmt: skip
    tapped, by_head = replace(engine, feature_layers=(-1,)), replace(engine, head=str(head))
    share = 0.5 if is_gpu else 0.0

    def of(target: EngineConfig, draft: EngineConfig | None) -> ServiceConfig:
        drafting = None if draft is None else DraftConfig(draft, num_gpus=share)
        return ServiceConfig(TargetConfig(target, num_gpus=share), drafting)

    return {
        DRAFT: of(engine, replace(engine, model=str(DEMO_DIRECTORY / "draft"))),
        AT_TARGET: of(replace(tapped, head=str(head)), None),
        AT_DRAFT: of(tapped, replace(by_head, compile=False)),
    }


def _fitted(target: Path, args: argparse.Namespace, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [tokenizer.encode(text) for text in held_out_prompts(MAX_PROMPTS + NUM_TEXTS)[MAX_PROMPTS:]]
    config = EngineConfig(str(target), dtype=args.dtype, device=args.device)
    head = fit_heads(config, texts, num_heads=NUM_HEADS).write(folder)
    torch.cuda.empty_cache()  # the engines need it; no effect on other devices
    return head


async def _rounds(name: str, address: str, plan: Plan) -> list[Result]:
    """Compare pipelined rounds with plain decoding, and those of a draft with the best in turn."""
    async with connected(address) as stub:
        gamma = await best_gamma(stub, plan, 0.0) if name == DRAFT else None
        ways = {PIPELINED: AS_SERVED, PLAIN: PLAINLY} if gamma is None else all_ways(gamma)
        await repeat(stub, replace(plan, prompts=plan.prompts[:1]), ways, 0.0, 0)  # the policies learn from it
        repeats = [await repeat(stub, plan, ways, 0.0, number) for number in range(plan.num_repeats)]
    results = [ratio(f"{name}: pipelined over plain", repeats, PLAIN, PIPELINED, {})]
    if gamma is not None:
        best = best_in_turn(repeats)
        over_best = ratio(f"{name}: pipelined over in turn", repeats, best, PIPELINED, {"static gamma": gamma})
        results.append(at_least(OVER_IN_TURN, over_best))
    return [*results, *hits(name, rounds_by_way(repeats)[PIPELINED]), unlike_plain(name, repeats)]
