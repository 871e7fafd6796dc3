"""Batches through `outrider.LLM`: plain decoding, guesses from the text alone, and the adaptive policy, in turn.

Everything runs in one process, so the draft and the target compete for its time, and the adaptive policy has to find
out when drafting does not pay. Estimates are kept from run to run, as in a long batch, so the first run of each kind is
the slowest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.control.workload_texts import workloads
from bench.results import Result, at_least, spread
from outrider import LLM

WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"max_draft_tokens": 0},
    "lookup": {"guessers": ("prompt_lookup",)},
    "adaptive": {},
}

Tokens = tuple[tuple[int, ...], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, nargs="+", default=(1, 6, 24), help="in a batch")
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way (default: 5)")


def measure(args: argparse.Namespace) -> list[Result]:
    """Measure each batch size, greedy and sampled."""
    (kind, *_) = workloads(max(args.prompts))
    return [
        result
        for num in args.prompts
        for temperature in (0.0, 1.0)
        for result in _measured(args, [*kind.prompts][:num], temperature)
    ]


def _measured(args: argparse.Namespace, prompts: Sequence[str], temperature: float) -> Iterator[Result]:
    """Measure one batch. Raises: RuntimeError if a way changes a token."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    fields: dict[str, Any] = {"max_tokens": args.tokens, "temperature": temperature, "seed": 1, "ignore_eos": True}
    with LLM(progress=False) as llm:
        for _ in range(args.repeats):
            tokens = {way: _run(llm, prompts, {**fields, **WAYS[way]}, rates[way]) for way in WAYS}
            if len(set(tokens.values())) > 1:
                raise RuntimeError("the ways have made different tokens")
    name = f"batches/{len(prompts)} prompts, T = {temperature:g}"
    yield spread(f"{name}: plain", rates["plain"], "tokens/s")
    for way in ("lookup", "adaptive"):
        ratios = [mine / plain for mine, plain in zip(rates[way], rates["plain"], strict=True)]
        yield spread(f"{name}: {way} over plain", ratios, "x")
    last = rates["adaptive"][-1] / max(rates[way][-1] for way in WAYS)
    yield at_least(0.9, Result(f"{name}: adaptive over the best, last run", round(last, 3), "x"))


def _run(llm: LLM, prompts: Sequence[str], fields: Mapping[str, Any], rates: list[float]) -> Tokens:
    began_s = time.monotonic()
    outputs = llm.generate(prompts, **fields)
    tokens = tuple(each.token_ids for each in outputs)
    rates.append(sum(map(len, tokens)) / (time.monotonic() - began_s))
    return tokens
