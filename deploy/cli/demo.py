"""`make demo`: serve the first pair, stream completions, repeat them without drafting, and compare.

The exit status is 0 only if every repetition gives the same tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import StartupError
from deploy.cli import terminal
from deploy.cli.jobs import Job
from deploy.launch import served
from deploy.launch.first_pair import first_pair
from deploy.settings import service_config
from outrider_client import Client, GenerateFields, OutriderError

SEED = 20_260_101
PAIRS_OF_RUNS = 3
"""Runs with drafting, and as many without. They alternate, so that a busy machine affects both; the fastest counts."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its sampling parameters."""

    title: str
    prompt: str
    sampling: GenerateFields


GREEDY: GenerateFields = {"temperature": 0.0}
SAMPLED: GenerateFields = {"temperature": 0.8, "seed": SEED}
EXAMPLES = (
    Example(
        "greedy",
        "    for name in names:\n        if not isinstance(name, str):\n            raise TypeError(",
        GREEDY,
    ),
    Example(
        f"sampled, temperature 0.8, seed {SEED}",
        "    def __repr__(self):\n        return ",
        SAMPLED,
    ),
)
CHAT = "Explain in a few sentences why the sky is blue."
CODE = "Write a Python function that counts the words of a text, and show how to call it."
FIRST_EXAMPLES = tuple(
    Example(f"{kind}, {how}", prompt, {**sampling, "messages": [{"role": "user", "content": prompt}]})
    for kind, prompt in (("chat", CHAT), ("code", CODE))
    for how, sampling in (("greedy", GREEDY), (f"temperature 0.8, seed {SEED}", SAMPLED))
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.cli.demo", description=__doc__)
    parser.add_argument("--pair", choices=["demo", "first"], default="first", help="demo: without the wheel's model")
    args = parser.parse_args(argv)
    try:
        settings = first_pair(_report) if args.pair == "first" else ()
        examples, max_tokens = (FIRST_EXAMPLES, 160) if settings else (EXAMPLES, 96)
        with (
            served(service_config(None, settings), _report) as endpoints,
            Client(f"localhost:{endpoints.grpc_port}") as client,
        ):
            verdicts = [_show(client, example, max_tokens) for example in examples]
    except (StartupError, OutriderError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    _say("\nsame tokens with and without drafting" if all(verdicts) else "\nFAILED: drafting changed the output")
    return 0 if all(verdicts) else 1


def _show(client: Client, example: Example, max_tokens: int) -> bool:
    """Complete with and without drafting and print both; returns whether all runs gave the same tokens."""
    is_colored = terminal.use_color("auto", sys.stdout, bool(os.environ.get("NO_COLOR")))
    _say(f"\n--- {example.title}\n\n{example.prompt}", end="\n\n" if "messages" in example.sampling else "")
    shown = _job(example, max_tokens).run(
        client, terminal.Writer(sys.stdout, terminal.token_text(client) if is_colored else None)
    )
    _say(f"\n\n{terminal.LEGEND}\n" if is_colored else "\n")
    drafting, plain = _measure(client, example, max_tokens)
    is_same = len({run.token_ids for run in (shown, *drafting, *plain)}) == 1
    fastest_drafting, fastest_plain = _fastest(drafting), _fastest(plain)
    _say(
        f"drafting: {terminal.summary(fastest_drafting)}\n"
        f"plain:    {terminal.summary(fastest_plain)}\n"
        f"tokens:   {'identical' if is_same else 'DIFFERENT'} in all {1 + len(drafting) + len(plain)} runs\n"
        f"time:     plain / drafting = {fastest_plain.duration_s / fastest_drafting.duration_s:.2f}"
        f" (through gRPC, fastest of {PAIRS_OF_RUNS} runs each, in turn, after a warm-up)"
    )
    return is_same


def _measure(client: Client, example: Example, max_tokens: int) -> tuple[list[Job], list[Job]]:
    """Runs with and without drafting, alternating, after one warm-up of each."""
    runs = [
        (_job(example, max_tokens).run(client), _job(example, max_tokens, 0).run(client))
        for _ in range(1 + PAIRS_OF_RUNS)
    ]
    return [pair[0] for pair in runs[1:]], [pair[1] for pair in runs[1:]]


def _fastest(runs: Sequence[Job]) -> Job:
    return min(runs, key=lambda run: run.duration_s)


def _job(example: Example, max_tokens: int, max_draft_tokens: int | None = None) -> Job:
    fields: GenerateFields = {"max_tokens": max_tokens, "max_draft_tokens": max_draft_tokens, **example.sampling}
    return Job("" if "messages" in fields else example.prompt, fields)


def _report(stage: str) -> None:
    _say(f"... {stage}")


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
