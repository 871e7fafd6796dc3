"""Whether other rows in a step change a token. Each completion runs with and without guesses, alone and in a batch.

With `--deterministic` no token may change. Without it, each change is shown with an explanation: the distance between
the scores of the two tokens, and how much the logits at that position depend on the order of summation.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoTokenizer

from bench.engine.driver import GREEDY, DrivenStream, load_engine, new_stream, play
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_most
from core.config import Dtype, EngineConfig
from core.records import Sampling
from core.speculation import EMPTY_BLOCK, TokenTree
from deploy.settings import DEMO_DIRECTORY
from workers.engine import TargetEngine
from workers.runtime import ModelRuntime
from workers.sampling import Row, perturbed, process
from workers.step import StepRows

MAX_GUESSES = 8
RIGHT = 0.8
"""Share of guesses that are right; the others are wrong tokens."""
NUMBERS = itertools.count()
"""Numbers for unique names of sessions."""
PLAIN, ALONE, AMONG = "plain", "with guesses, alone", "with guesses, among others"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which two completions of one request differ."""

    prompt: int
    temperature: float
    position: int
    """Index of the token in the output."""
    gap: float
    """Difference of the two tokens' scores in float32: logits over temperature, plus noise."""
    drift: float
    """Largest difference of any score between a step with this position alone and one with eight other rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=DEMO_DIRECTORY / "target")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--others", type=int, default=16, help="streams in a batch")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])


def measure(args: argparse.Namespace) -> list[Result]:
    """Complete every prompt in all ways, and explain the differences."""
    config = EngineConfig(str(args.model), dtype=args.dtype, deterministic=args.deterministic, share_prefixes=False)
    engine = load_engine(config)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.encode(prompt) for prompt in held_out_prompts(args.prompts)]
    results, num_tokens = [], args.prompts * args.tokens
    for temperature in args.temperatures:
        jobs = [
            (prompt, Sampling(temperature=temperature, seed=seed) if temperature else GREEDY)
            for seed, prompt in enumerate(prompts)
        ]
        outputs, times_s = _all_ways(engine, jobs, args)
        found = [
            explain(engine, number, jobs[number], plain, other)
            for way in (ALONE, AMONG)
            for number, (plain, other) in enumerate(zip(outputs[PLAIN], outputs[way], strict=True))
            if plain != other
        ]
        settings = {"dtype": args.dtype, "deterministic": args.deterministic, "tokens": 2 * num_tokens}
        settings |= {f"{way}, s": round(seconds, 1) for way, seconds in times_s.items()}
        title = f"T = {temperature:g}"
        results += [_count(title, found, settings, args.deterministic), *_explanations(title, found)]
    return results


Job = tuple[Sequence[int], Sampling]


def _all_ways(
    engine: TargetEngine, jobs: Sequence[Job], args: argparse.Namespace
) -> tuple[Mapping[str, Sequence[tuple[int, ...]]], Mapping[str, float]]:
    """Outputs and seconds, by way."""
    began_s = time.monotonic()
    plain = [_complete(engine, [job], [()], args.tokens)[0] for job in jobs]
    plain_s, began_s = time.monotonic() - began_s, time.monotonic()
    alone = [_complete(engine, [job], [truth], args.tokens)[0] for job, truth in zip(jobs, plain, strict=True)]
    alone_s, began_s = time.monotonic() - began_s, time.monotonic()
    among: list[tuple[int, ...]] = []
    for first in range(0, len(jobs), args.others):
        some = slice(first, first + args.others)
        among += _complete(engine, jobs[some], plain[some], args.tokens)
    among_s = time.monotonic() - began_s
    return {PLAIN: plain, ALONE: alone, AMONG: among}, {PLAIN: plain_s, ALONE: alone_s, AMONG: among_s}


def _complete(
    engine: TargetEngine, jobs: Sequence[Job], truths: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[int, ...]]:
    """Complete the jobs in one batch. Guesses are the tokens of `truths` with errors; without truth there are none."""
    rng = random.Random(len(jobs))
    streams = [new_stream(f"stream {next(NUMBERS)}", *job) for job in jobs]
    while running := [number for number, stream in enumerate(streams) if len(stream.output) < num_tokens]:
        blocks = [_guesses(streams[number], truths[number], rng, num_tokens) for number in running]
        play(engine, [streams[number] for number in running], blocks)
    engine.release([stream.name for stream in streams])
    return [stream.output[:num_tokens] for stream in streams]


def _guesses(stream: DrivenStream, truth: Sequence[int], rng: random.Random, num_tokens: int) -> TokenTree:
    done = len(stream.output)
    right = truth[done : min(done + rng.randint(0, MAX_GUESSES), num_tokens - 1)]
    tokens = [token if rng.random() < RIGHT else (token + 1) % 256 for token in right]
    return TokenTree.chain(tokens) if tokens else EMPTY_BLOCK


def explain(engine: TargetEngine, number: int, job: Job, one: Sequence[int], other: Sequence[int]) -> Divergence:
    """The first difference between two completions of one job, and how close the tokens' scores are there."""
    position = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    prompt, sampling = job
    alone, with_others = _scores(engine._runtime, prompt, one[:position], sampling)
    gap = abs(float(alone[one[position]] - alone[other[position]]))
    return Divergence(number, sampling.temperature, position, gap, float((alone - with_others).abs().max()))


def _scores(
    runtime: ModelRuntime, prompt: Sequence[int], output: Sequence[int], sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the next token, computed in a step of one row and in a step of nine.  # [V] twice"""
    context = [*prompt, *output]
    rows = [Row(sampling, len(context), (), len(prompt))]
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, context[:-1], wants_logits=False)])
    alone = runtime.forward([StepRows(kv, context[-1:])])[:1]
    runtime.cache.truncate(kv, len(context) - 1)
    with_others = runtime.forward([StepRows(kv, context[-1:], TokenTree.chain([0] * MAX_GUESSES))])[:1]
    runtime.cache.free(kv)
    if sampling.is_greedy:
        return alone[0], with_others[0]
    return perturbed(process(alone, rows), rows)[0], perturbed(process(with_others, rows), rows)[0]


def _count(title: str, found: Sequence[Divergence], settings: Mapping[str, object], must_be_none: bool) -> Result:
    result = Result(f"{title}: completions unlike plain decoding", len(found), "streams", settings=dict(settings))
    return at_most(0, result) if must_be_none else result


def _explanations(title: str, found: Sequence[Divergence]) -> list[Result]:
    for each in found:
        print(
            f"... {title}, prompt {each.prompt}, token {each.position}: the two are {each.gap:.2g} apart, "
            f"scores differ by up to {each.drift:.2g}",
            flush=True,
        )
    if not found:
        return []
    ratios = [each.gap / each.drift if each.drift else float("inf") for each in found]
    worst = Result(f"{title}: gap over drift, largest", round(max(ratios), 3), "x")
    return [worst, Result(f"{title}: gap, median", round(statistics.median(each.gap for each in found), 5), "nats")]
