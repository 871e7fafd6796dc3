"""The cost of a head's seam: features in a pass, on the link, and the guesses of a Blockwise head at either place.

The head is fitted on the spot, in closed form (`outrider train-head`). Engines run in this process; the draft's
engine is reached by a real link. The sides of a comparison take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.engine.driver import EPOCH, DrivenStream, load_engine, new_stream
from bench.models.prompts import held_out_prompts
from bench.results import Result, say, spread
from core.config import EngineConfig
from core.records import DraftRequest, DraftUpdate, Features, Verdict, Want
from core.speculation import EMPTY_BLOCK, TreeSpec
from deploy.link.client import Link
from deploy.link.replies import decode_replies, encode_replies
from deploy.link.requests import decode_requests, encode_requests
from deploy.link.server import LinkServer
from deploy.settings import DEMO_DIRECTORY
from models.train.corpus import load_split
from orchestrator.text import Tokenizer
from workers.engine import DraftEngine, TargetEngine
from workers.engine.thread import EngineLoop
from workers.heads import fit_heads

NUM_TEXTS, TEXT_TOKENS = 48, 512
NUM_STEPS = 24
EAGLE_8B = 3 * 4096
"""Numbers a token that an EAGLE-3 head of an 8B model reads: three hidden states."""
GROWTH = TreeSpec(8, 1, tail=(0.3, 0.2, 0.1), num_passes=1, reports_all=True)
SIDES: dict[str, tuple[Want, ...]] = {"plain": (), "features": (Want.FEATURES,), "head": (Want.GUESSES,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--target", type=Path, default=DEMO_DIRECTORY / "target")


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_directory(args.target)
    prompts = [tokenizer.encode(text)[:64] for text in held_out_prompts(4)]
    with tempfile.TemporaryDirectory() as folder:
        say("fitting the head")
        head = fit_heads(EngineConfig(str(args.target)), _texts(tokenizer), num_heads=3).write(Path(folder))
        plain = EngineConfig(str(args.target), kv_cache_tokens=8192)
        tapped = replace(plain, feature_layers=(-1,))
        configs = {"plain": plain, "features": tapped, "head": replace(tapped, head=str(head))}
        engines = {name: load_engine(config) for name, config in configs.items()}
        draft = DraftEngine.load(replace(plain, head=str(head)), EPOCH, 64, lambda _: None)
        draft.warm_up(lambda _: None)
        return [
            *_passes(engines, prompts, args.repeats),
            *_agreement(engines["head"], prompts),
            *asyncio.run(_rounds_over_a_link(draft, engines["features"], prompts[0], args.repeats)),
            *_frames(engines["features"].info.feature_width),
        ]


def _texts(tokenizer: Tokenizer) -> list[list[int]]:
    documents = [each.text for each in load_split().training if len(each.text) > 8 * TEXT_TOKENS]
    return [list(tokenizer.encode(text)[:TEXT_TOKENS]) for text in documents[:: len(documents) // NUM_TEXTS]]


def _passes(engines: dict[str, TargetEngine], prompts: Sequence[Sequence[int]], repeats: int) -> list[Result]:
    """A plain step with each extra, beside one without."""
    ratios: dict[str, list[float]] = {name: [] for name in SIDES if name != "plain"}
    plain_ms = []
    for repeat in range(repeats):
        times = {name: _step_ms(engine, SIDES[name], prompts[0], repeat) for name, engine in engines.items()}
        plain_ms.append(times["plain"])
        for name, found in ratios.items():
            found.append(times[name] / times["plain"])
    named = {"features": "a step that returns features", "head": "a step with a head's guesses"}
    return [
        spread("a plain step", plain_ms, "ms"),
        *(spread(f"{named[name]}, of a plain one", found, "x") for name, found in ratios.items()),
    ]


def _step_ms(engine: TargetEngine, wants: tuple[Want, ...], prompt: Sequence[int], repeat: int) -> float:
    stream = new_stream(f"step {repeat}", prompt)
    _verdict(engine, stream, wants)
    times = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        _verdict(engine, stream, wants)
        times.append(1e3 * (time.perf_counter() - began))
    engine.release([stream.name])
    return statistics.median(times)


def _verdict(engine: TargetEngine, stream: DrivenStream, wants: tuple[Want, ...]) -> Verdict:
    engine.add(replace(stream.request(), wants=wants))
    replies = engine.step()
    while not replies:
        replies = engine.step()
    (verdict,) = replies
    assert isinstance(verdict, Verdict), verdict
    stream.take(EMPTY_BLOCK, verdict)
    return verdict


def _agreement(engine: TargetEngine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    """How often the head's first guess is the target's greedy token."""
    num_right = num_guessed = 0
    for number, prompt in enumerate(prompts):
        stream, guessed = new_stream(f"agrees {number}", prompt), None
        for _ in range(64):
            verdict = _verdict(engine, stream, (Want.GUESSES,))
            num_guessed += guessed is not None
            num_right += guessed == verdict.next_token
            guessed = verdict.guesses.tokens[0]
        engine.release([stream.name])
    return [Result("first guesses of the head that are right", round(num_right / num_guessed, 3), "share")]


async def _rounds_over_a_link(
    draft: DraftEngine, target: TargetEngine, prompt: Sequence[int], repeats: int
) -> list[Result]:
    """From a verdict's features to the guesses of a head behind a link."""
    loop = EngineLoop(draft)
    loop.start()
    server = LinkServer(EPOCH, (DraftRequest,))
    server.bind("127.0.0.1", (0, 0))
    link = await Link.open(server.start(loop.post))
    times: list[float] = []
    for repeat in range(repeats):
        stream, held = new_stream(f"link {repeat}", prompt), 0
        for _ in range(NUM_STEPS):
            verdict = _verdict(target, stream, (Want.FEATURES,))
            message = replace(stream, held=held).request()
            request = DraftRequest(message.stamp, message.base, message.suffix, GROWTH, message.spec, verdict.features)
            found: list[DraftUpdate] = []
            began = time.perf_counter()
            await link.exchange([request], found.append)
            times.append(1e6 * (time.perf_counter() - began))
            held = found[-1].held
        target.release([stream.name])
    link.close("measured")
    server.close()
    await loop.close()
    return [spread("a head's guesses over a link, from verdict to update", times, "us")]


def _frames(width: int) -> list[Result]:
    """Bytes and processor time of features in the frames of a verdict and of a draft's request."""
    stream = new_stream("frame", [1, 2, 3])
    verdict = Verdict(stream.request().stamp, (0, 1), 5, 5)
    results = []
    for name, numbers in (("this target", width), ("EAGLE-3 of an 8B", EAGLE_8B)):
        features = Features(2, numbers, bytes(3 * 2 * numbers))
        size = len(encode_replies([replace(verdict, features=features)])) - len(encode_replies([verdict]))
        results.append(Result(f"features of 3 tokens in a verdict, {name}", size / 3, "bytes/token"))
        results.append(_codec_us(f"both frames of 3 tokens encoded and decoded, {name}", verdict, features))
    return results


def _codec_us(name: str, verdict: Verdict, features: Features) -> Result:
    message = new_stream("frame", [1, 2, 3]).request()
    request = DraftRequest(message.stamp, message.base, message.suffix, GROWTH, message.spec, features)
    carrying = replace(verdict, features=features)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        decode_replies(encode_replies([carrying]))
        decode_requests(encode_requests([request]))
        times.append(1e6 * (time.perf_counter() - began))
    return spread(name, times, "us")
