"""Speed of the engines on a GPU: a decoding step against its memory's roofline, and text against transformers.

No Ray and no gRPC: engines are driven directly in this process. Each ratio comes from one run in which all sides take
turns on the same prompts, and covers the tokens after the first. The draft is the demo's, and the target is grown from
the demo's. A 7B in bfloat16 takes 14 GB on disk and four minutes to grow. On the GPU it takes twice as much memory and
a few GB more, since transformers loads its own copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.engine.devices import device_name, memory_loop, open_device, timed, token_s, waits_per_token
from bench.engine.divergence import explain
from bench.engine.driver import GREEDY
from bench.engine.pair import EnginePair
from bench.engine.peer import Peer
from bench.models.grow import DEFAULT_CACHE, cached
from bench.models.prompts import held_out_prompts
from bench.models.sizes import Shape, parse_size, read_shape, shape_of_size
from bench.results import Result, at_most, say, spread
from core import noise
from core.config import Dtype, EngineConfig
from deploy.settings import DEMO_DIRECTORY
from workers.engine import TargetEngine
from workers.noise import find_noise_kernel, gumbel
from workers.step import upload

NUM_GUESSES = 7
"""Number of guesses verified together with the last token: eight rows."""
KV_TOKENS = 8192
BLOCK_TOKENS = 64
"""The usual setting on a GPU."""

NOISE_ROWS, NOISE_VOCAB = 16, 151_936
"""A step of 16 sampling streams with the vocabulary of Qwen's models."""

PLAIN, SAMPLED, VERIFYING, SPECULATIVE, DRAFT = "plain", "plain at T=1", "verifying", "speculative", "draft"
GENERATE, ASSISTED, GENERATE_DRAFT = "generate", "assisted generate", "generate by the draft"
MEMORY = "memory"

Prompt = Sequence[int]
Complete = Callable[[Prompt, int], object]
"""(prompt, number of tokens) -> a completion of this length."""
Times = Mapping[str, Sequence[float]]
"""One value per repeat, by side, in seconds per token; for the side "memory" in seconds per byte."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--size", type=parse_size, default="500M", metavar="SIZE", help="of the target")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--gamma", type=int, default=NUM_GUESSES, help="draft length")
    parser.add_argument("--prompts", type=int, default=20, help="whose completions are compared")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where grown checkpoints are kept")


def measure(args: argparse.Namespace) -> list[Result]:
    """Load every side, measure them in turn, and compare their texts. Raises: StartupError."""
    device = open_device(args.device)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source, draft = DEMO_DIRECTORY / "target", DEMO_DIRECTORY / "draft"
    shape = shape_of_size(read_shape(source), args.size)
    size = f"{shape.num_parameters / 1e6:.0f}M"
    say(f"growing the target to {size}, unless that has been done")
    target = cached(source, shape, args.dtype, args.cache)
    say("loading")
    pair = EnginePair.load(_config(target, args), _config(draft, args))
    peer, assistant = Peer(target, args.dtype, device), Peer(draft, args.dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.encode(text) for text in held_out_prompts(args.prompts)]
    sides = _sides(pair, peer, assistant, args.gamma)
    times = take_turns(sides, device, prompts, args.tokens, args.repeats)
    results = ratios(times, bytes_read(shape, args.dtype))
    results += noise_times(device, args.repeats)
    if device.type == "cuda":
        results += [_waits(name, sides[name], device, prompts[0], args.tokens) for name in (PLAIN, VERIFYING, DRAFT)]
    say("comparing completions")
    results += _texts(pair, peer, prompts, args.tokens, args.gamma)
    settings = {"card": device_name(device), "dtype": args.dtype, "parameters": size, "tokens": args.tokens}
    return [replace(result, settings={**result.settings, **settings}) for result in results]


def _config(model: Path, args: argparse.Namespace) -> EngineConfig:
    """Settings of an engine. Prefixes are not shared, so each side computes the whole prompt."""
    return EngineConfig(
        str(model),
        dtype=args.dtype,
        device=args.device,
        kv_cache_tokens=KV_TOKENS,
        block_tokens=BLOCK_TOKENS,
        share_prefixes=False,
        compile=torch.device(args.device).type == "cuda",
    )


# Sides


def _sides(pair: EnginePair, peer: Peer, assistant: Peer, gamma: int) -> Mapping[str, Complete]:
    return {
        PLAIN: pair.plain,
        SAMPLED: pair.sampled,
        VERIFYING: partial(pair.rejected, num_guesses=NUM_GUESSES),
        SPECULATIVE: partial(pair.speculative, gamma=gamma),
        GENERATE: peer.complete,
        ASSISTED: partial(peer.complete, assistant=assistant),
        DRAFT: pair.drafted,
        GENERATE_DRAFT: assistant.complete,
    }


def take_turns(
    sides: Mapping[str, Complete], device: torch.device, prompts: Sequence[Prompt], num_tokens: int, num_repeats: int
) -> Times:
    """Measure all sides, one prompt per repeat. The first turns load and tune kernels and are not counted."""
    memory = memory_loop(device)
    times: dict[str, list[float]] = {name: [] for name in (MEMORY, *sides)}
    for number in range(1 + num_repeats):
        say(f"repeat {number} of {num_repeats}" if number else "warming up")
        times[MEMORY].append(memory())
        for name, complete in sides.items():
            prompt = prompts[number % len(prompts)]
            times[name].append(token_s(device, partial(complete, prompt), num_tokens))
    return {name: values[1:] for name, values in times.items()}


# Ratios


def bytes_read(shape: Shape, dtype: Dtype) -> int:
    """Bytes of weights read in a step: all except the embedding, of which only some rows are read."""
    num_weights = shape.num_parameters - shape.vocab_size * shape.hidden_size
    return num_weights * torch.finfo(getattr(torch, dtype)).bits // 8


def ratios(times: Times, num_bytes: int) -> list[Result]:
    """Cost of a step, speed of text, and cost of the draft."""

    def cost(name: str, side: str, other: str) -> Result:
        values = [a / b for a, b in zip(times[side], times[other], strict=True)]
        return spread(name, values, "x", **{f"{each}, ms": _median_ms(times[each]) for each in (side, other)})

    def speed(name: str, side: str, other: str) -> Result:
        values = [b / a for a, b in zip(times[side], times[other], strict=True)]
        speeds = {f"{each}, tokens/s": round(1 / statistics.median(times[each]), 1) for each in (side, other)}
        return spread(name, values, "x", **speeds)

    roofline = [step / (num_bytes * byte) for step, byte in zip(times[PLAIN], times[MEMORY], strict=True)]
    found = {"plain, ms": _median_ms(times[PLAIN]), "GB/s": round(1e-9 / statistics.median(times[MEMORY]), 1)}
    return [
        at_most(1.25, spread("a decoding step: time over the memory's roofline", roofline, "x", **found)),
        at_most(1.1, cost(f"verifying {NUM_GUESSES + 1} rows: time over decoding 1", VERIFYING, PLAIN)),
        cost("a decoding step at T=1: time over a greedy one", SAMPLED, PLAIN),
        speed("plain decoding: speed over transformers' generate", PLAIN, GENERATE),
        speed("speculative decoding: speed over plain", SPECULATIVE, PLAIN),
        speed("speculative decoding: speed over transformers' assisted generation", SPECULATIVE, ASSISTED),
        speed("transformers' assisted generation: speed over its generate", ASSISTED, GENERATE),
        spread("a draft step", [1e3 * step_s for step_s in times[DRAFT]], "ms"),
        cost("a draft step: time over a target step (c)", DRAFT, PLAIN),
        speed("a draft step: speed over transformers' generate", DRAFT, GENERATE_DRAFT),
    ]


def noise_times(device: torch.device, num_repeats: int) -> list[Result]:
    """Time of noise without a cache, by operators and by one kernel if there is one. The first run is not counted."""
    keys = upload([noise.key(seed, 0, 0, noise.Purpose.SHARED) for seed in range(NOISE_ROWS)], device)
    ways = {"operators": gumbel._gumbel_in_parts, "one kernel": find_noise_kernel(keys.device)}
    times = {
        name: [1e3 * timed(device, partial(way, keys, NOISE_VOCAB)) for _ in range(1 + num_repeats)]
        for name, way in ways.items()
        if way is not None
    }
    return [spread(f"noise of {NOISE_ROWS} rows, by {name}", values[1:], "ms") for name, values in times.items()]


def _waits(name: str, complete: Complete, device: torch.device, prompt: Prompt, num_tokens: int) -> Result:
    """Number of times that Python waits for the device per round or pass. Only the wait for the result is needed."""
    found = waits_per_token(device, partial(complete, prompt), num_tokens)
    return at_most(1.0, Result(f"{name}: waits for the device in a step", round(found, 2), "waits"))


def _median_ms(times_s: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times_s), 3)


# Texts


def _texts(pair: EnginePair, peer: Peer, prompts: Sequence[Prompt], num_tokens: int, gamma: int) -> list[Result]:
    """Complete every prompt plainly, by transformers and with guesses, and compare the outputs."""
    plain = [pair.plain(prompt, num_tokens).tokens for prompt in prompts]
    generated = [peer.complete(prompt, num_tokens) for prompt in prompts]
    speculative = [pair.speculative(prompt, num_tokens, gamma) for prompt in prompts]
    num_rounds = sum(completion.num_rounds for completion in speculative)
    per_round = (num_tokens - 1) * len(prompts) / max(1, num_rounds)
    return [
        equality("transformers' generate", pair.target, prompts, plain, generated),
        equality("speculative decoding", pair.target, prompts, plain, [each.tokens for each in speculative]),
        Result("speculative decoding: tokens a round", round(per_round, 3), "tokens", settings={"gamma": gamma}),
    ]


def equality(
    title: str,
    engine: TargetEngine,
    prompts: Sequence[Prompt],
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> Result:
    """Share of completions equal to plain decoding; the settings have the gap between the tokens of each difference."""
    found = [
        explain(engine, number, (prompt, GREEDY), one, other)
        for number, (prompt, one, other) in enumerate(zip(prompts, plain, others, strict=True))
        if one != other
    ]
    for each in found:
        say(f"{title}: prompt {each.prompt} differs from token {each.position} on; the two are {each.gap:.2g} apart")
    share = round(1 - len(found) / len(prompts), 3)
    settings = {"prompts": len(prompts), "gaps, nats": [round(each.gap, 5) for each in found]}
    return Result(f"{title}: equal to plain", share, "share", settings=settings)
