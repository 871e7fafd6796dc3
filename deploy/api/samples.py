"""Several outputs of one or more prompts: their requests, and their chunks as one stream.

Knows seeds and streams; must not know how a reply is written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from core.config import ServiceConfig
from core.errors import InvalidRequest
from core.ranges import ranges_of
from core.records import BeamSearch, Chunk, GenerationRequest, ModelInfo, Usage
from deploy.api.checks import require, within
from deploy.api.given import JSON_SEEDS, Given, GivenBeams
from deploy.api.hosted import Hosted, Served, Watch
from deploy.api.request import resume_tokens, to_generation_request
from deploy.api.speculation import not_repeatable
from deploy.metrics import RequestMeter
from deploy.receipts import ReceiptMaker

if TYPE_CHECKING:
    from deploy.spans.tracing import SampleSpans

WIDTH = "beams.beam_width"
MAX_SAMPLES = 128
"""OpenAI's limit; a service may allow fewer."""

Piece = TypeVar("Piece")
Samples = AsyncGenerator[tuple[int, Chunk], None]
"""Chunks of all samples, each with the index of its sample."""


def to_requests(given: Given, served: Served, now: float) -> list[GenerationRequest]:
    """One request for each sample, complete and within all limits. `now` is the service's clock, for the deadline.

    Raises: InvalidRequest.
    """
    num_samples = _num_samples(given, served.config)
    request = _with_beams(to_generation_request(given, served, now), given, served)
    if request.beams is not None:
        return [request] * num_samples  # one search, whose outputs are numbered like samples
    _check_share(num_samples, request, served.config)
    return samples_of(request, num_samples, _resumed(given, num_samples, request, served.target))


def _with_beams(request: GenerationRequest, given: Given, served: Served) -> GenerationRequest:
    """The request with its beam search, if it asks for one. Raises: InvalidRequest."""
    if given.beams is None:
        return request
    search = _search(given.beams, 1 if given.n is None else given.n)
    if served.target.num_states:
        raise InvalidRequest("beams", f"must not be given: {served.name} has recurrent layers, which keep no branches")
    refused = {
        "sampling.temperature": ("0 or unset", given.sampling.get("temperature") or None),
        "stopping.stop": ("empty", request.stop),
        "resume_token_ids": ("empty", request.resume_tokens),
        "resume_samples": ("empty", given.resume_samples),
        "prompt_logprobs": ("unset", given.prompt_logprobs is not None),
        "receipt": ("false", request.wants_receipt),
    }
    for field, (allowed, is_given) in refused.items():
        if is_given:
            raise InvalidRequest(field, f"must be {allowed} beside beams")
    return replace(request, beams=search, sampling=replace(request.sampling, temperature=0.0))


def _search(given: GivenBeams, num_outputs: int) -> BeamSearch:
    ranges = ranges_of(BeamSearch)
    width = within(given.beam_width, ranges["width"], WIDTH)
    penalty = within(given.length_penalty, ranges["length_penalty"], "beams.length_penalty")
    if width is None and penalty is not None:
        raise InvalidRequest("beams.length_penalty", f"must not be given without {WIDTH}")
    if width is None:
        raise InvalidRequest(WIDTH, "must be given")
    require(1 <= num_outputs <= width, "n", f"in [1, {width}] (the number of beams)", num_outputs)
    return BeamSearch(width, num_outputs, 1.0 if penalty is None else penalty, given.early_stopping or False)


def _num_samples(given: Given, config: ServiceConfig) -> int:
    most = MAX_SAMPLES if given.beams is not None else min(MAX_SAMPLES, config.limits.max_sessions)
    asked = 1 if given.n is None else given.n
    require(1 <= asked <= most, "n", f"in [1, {most}]", asked)
    return asked


def _check_share(num_samples: int, request: GenerationRequest, config: ServiceConfig) -> None:
    """Check the number of samples against the caller's session limit: all samples start together."""
    most = max_places(request, config)
    allowed = f"at most {most}: this caller's session limit"
    require(num_samples <= most, "n", allowed, num_samples)


def max_places(request: GenerationRequest, config: ServiceConfig) -> int:
    """This caller's session limit."""
    own, of_all = request.quota.max_sessions, config.limits.max_sessions_per_caller
    share = of_all if own is None else own
    return min(share or config.limits.max_sessions, config.limits.max_sessions)


def _resumed(given: Given, num_samples: int, request: GenerationRequest, info: ModelInfo) -> list[tuple[int, ...]]:
    outputs = given.resume_samples
    if num_samples > 1 and given.resume_token_ids:
        raise InvalidRequest("resume_token_ids", "must be empty where n is above 1: send resume_samples")
    if not outputs:
        return []
    if any(outputs) and not request.is_repeatable:
        raise InvalidRequest("resume_samples", not_repeatable(request))
    require(len(outputs) == num_samples, "resume_samples", f"empty or {num_samples} outputs (n)", len(outputs))
    if given.resume_token_ids:
        raise InvalidRequest("resume_samples", "must be empty beside resume_token_ids")
    fields = (f"resume_samples[{index}].ids" for index in range(num_samples))
    return [
        resume_tokens(given, field, ids, request.sampling, request.max_tokens, info)
        for field, ids in zip(fields, outputs, strict=True)
    ]


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index`. It depends only on the request's seed and the index.

    Sample 0 has the request's own seed, so it equals the output of a request for one sample.
    """
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little") % JSON_SEEDS


def samples_of(
    request: GenerationRequest, num_samples: int, resumed: Sequence[tuple[int, ...]] = ()
) -> list[GenerationRequest]:
    """One request for each output of a prompt; `resumed` is the output that the client already has of each."""
    seeds = [sample_seed(request.sampling.seed, index) for index in range(num_samples)]
    outputs = resumed or [request.resume_tokens] * num_samples
    first, *others = [
        replace(request, sampling=replace(request.sampling, seed=seed), resume_tokens=output)
        for seed, output in zip(seeds, outputs, strict=True)
    ]
    return [first, *(replace(other, num_prompt_logprobs=None) for other in others)]  # all samples share the prompt


class SamplesUsage:
    """Token counts of all samples so far. They share one prompt, which counts once.

    The prompt's cached tokens are those of the sample that found the fewest.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._prompt_tokens = len(requests[0].prompt)
        self._completion_tokens = [len(request.resume_tokens) for request in requests]
        self._cached_tokens: dict[int, int] = {}

    def observe(self, index: int, chunk: Chunk) -> Usage:
        """The usage once this chunk of sample `index` is counted."""
        self._prompt_tokens = chunk.usage.prompt_tokens
        self._completion_tokens[index] = chunk.usage.completion_tokens
        self._cached_tokens[index] = chunk.usage.cached_tokens
        return self.total

    @property
    def total(self) -> Usage:
        return Usage(self._prompt_tokens, sum(self._completion_tokens), min(self._cached_tokens.values(), default=0))


def streamed(requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """The requests that have a stream of their own. All outputs of a beam search come by one, and its chunks say which
    they belong to."""
    return requests[:1] if requests[0].beams is not None else requests


async def completed(model: Hosted, requests: Sequence[GenerationRequest], watch: Watch) -> Samples:
    """The chunks of all samples as they come. `watch` measures the first sample; each other one has its own meter.

    The samples start together, as soon as there is room for all of them.
    """
    requests = streamed(requests)
    with ExitStack() as stack:
        meters = [watch.meter, *(stack.enter_context(model.meter()) for _ in requests[1:])]
        spans = [watch.spans.follow(*each) if watch.spans is not None else None for each in enumerate(requests)]
        asked = [each.traced(request) if each else request for each, request in zip(spans, requests, strict=True)]
        async with model.completions.admit(asked) as streams:
            receipts = [receipt_maker(request, model.served) for request in asked]
            watchers = zip(meters, receipts, spans, strict=True)
            seen = [_observed(*each) for each in zip(range(len(asked)), streams, watchers, strict=True)]
            async with aclosing(merged(seen)) as pieces:
                async for piece in pieces:
                    if piece is not None:
                        yield piece


async def completed_prompts(model: Hosted, prompts: Sequence[Sequence[GenerationRequest]], watch: Watch) -> Samples:
    """The chunks of all samples of all prompts as they come, numbered consecutively; `watch` follows the first prompt.

    Each prompt is admitted, measured and traced as a request of its own. The caller's session limit bounds how many run
    at once, so that a long list does not exceed it.
    """
    size, first = len(prompts[0]), prompts[0][0]
    num_places = len(streamed(prompts[0]))
    gate = asyncio.Semaphore(max(1, max_places(first, model.served.config) // num_places))
    streams = [
        _prompt_completed(model, requests, index * size, None if index else watch, gate)
        for index, requests in enumerate(prompts)
    ]
    async with aclosing(merged(streams)) as pieces:
        async for piece in pieces:
            if piece is not None:
                yield piece


async def _prompt_completed(
    model: Hosted, requests: Sequence[GenerationRequest], first: int, watch: Watch | None, gate: asyncio.Semaphore
) -> Samples:
    async with gate:
        with model.request() if watch is None else nullcontext(watch) as each:
            async with aclosing(completed(model, requests, each)) as pieces:
                async for index, chunk in pieces:
                    yield first + index, chunk


async def _observed(
    index: int,
    stream: AsyncGenerator[Chunk, None],
    watchers: Sequence[RequestMeter | ReceiptMaker | SampleSpans | None],
) -> Samples:
    """The chunks of one sample, passed through each watcher in turn."""
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            for watcher in watchers:
                chunk = chunk if watcher is None else watcher.observe(chunk)
            yield index + chunk.output, chunk


def receipt_maker(request: GenerationRequest, served: Served) -> ReceiptMaker | None:
    """The maker of the request's receipt, or None if it wants none."""
    if not request.wants_receipt:
        return None
    return ReceiptMaker(request, served.name, served.target, served.draft, served.tokenizer.digest)


async def merged(
    streams: Sequence[AsyncGenerator[Piece, None]], silence_s: float = 0.0
) -> AsyncGenerator[Piece | None, None]:
    """The items of all streams as they come, and None after each `silence_s` seconds without one (0: never).

    No item may be None. A single stream is read at most two items ahead. The first error of a stream is raised. All
    streams are closed on an error and when the generator is closed.
    """
    pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pass_on(stream, pieces)) for stream in streams]
    num_left = len(tasks)
    try:
        while num_left:
            try:
                async with asyncio.timeout(silence_s or None):
                    piece = await pieces.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                num_left -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pass_on(stream: AsyncGenerator[Piece, None], pieces: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await pieces.put(piece)
        await pieces.put(None)
    except Exception as error:  # noqa: BLE001  the consumer raises it
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # else there is no consumer left
            await pieces.put(error)
