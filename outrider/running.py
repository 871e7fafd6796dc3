"""One service in this process: engines on their own threads, and sessions on an event loop in another thread.

Knows how to start and stop them; must not know prompts. The event loop of the caller, which may be a notebook, is not
used.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from core.config import EngineConfig, ServiceConfig
from core.errors import ConfigError, OutriderError
from core.records import Chunk, GenerationRequest
from deploy.api import Served, receipt_maker, sampling_defaults
from deploy.checkpoints import check_models
from deploy.clock import MonotonicClock
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from outrider.in_process import ThreadLeases
from workers.engine import DraftEngine, Engine, TargetEngine
from workers.grammar import Grammars
from workers.runtime import this_machine

Result = TypeVar("Result")
TARGET_EPOCH, DRAFT_EPOCH = 1, 2


class Running:
    """A loaded pair of models and the service that uses it."""

    def __init__(self, config: ServiceConfig, report: Callable[[str], None]) -> None:
        """Load and warm up the models. Raises: StartupError."""
        target, draft = _engines(config, report)
        tokenizer = Tokenizer.from_directory(config.target.engine.model)
        self.clock = MonotonicClock()
        draft_info = draft.info if draft is not None else None
        defaults = sampling_defaults(config.target.engine.model)
        self.served = Served(target.info, draft_info, tokenizer, defaults, config)
        self._leases = ThreadLeases(target, draft)
        self._grammars = Grammars.of_service(config, target.info)
        self._service = Service(
            config, target.info, draft_info, tokenizer, self._leases, self.clock, grammars=self._grammars
        )
        self._places = asyncio.Semaphore(config.limits.max_sessions)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider", daemon=True)
        self._thread.start()

    def complete(self, requests: Sequence[GenerationRequest], done: Callable[[int], None]) -> list[list[Chunk]]:
        """Return the chunks of each request, in order; `done` receives the number of tokens of each completed request.

        The first failure or an interrupt cancels all requests. Raises: OutriderError.
        """
        return self._run(self._complete(requests, done))

    def stats(self) -> Any:
        """Statistics of each engine, by role."""
        return self._run(self._leases.stats())

    def close(self) -> None:
        """Cancel running requests, stop the engines and the event loop; may be called twice."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # mainly KeyboardInterrupt: do not continue in the background
            future.cancel()
            raise

    async def _complete(self, requests: Sequence[GenerationRequest], done: Callable[[int], None]) -> list[list[Chunk]]:
        tasks = [asyncio.create_task(self._one(request, done)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, request: GenerationRequest, done: Callable[[int], None]) -> list[Chunk]:
        receipt = receipt_maker(request, replace(self.served, adapter=request.adapter))
        async with self._places, aclosing(self._service.generate(request)) as stream:
            try:
                chunks = [chunk if receipt is None else receipt.observe(chunk) async for chunk in stream]
            except OutriderError as error:
                error.add_note(f"while going on from {request.request_id}")
                raise
        done(sum(len(chunk.token_ids) for chunk in chunks))
        return chunks

    async def _stop(self) -> None:
        await self._service.close()
        await self._leases.close()
        if self._grammars is not None:
            self._grammars.close()


def _engines(config: ServiceConfig, report: Callable[[str], None]) -> tuple[TargetEngine, DraftEngine | None]:
    """Raises: StartupError."""
    if config.extra_drafts:
        raise ConfigError("extra_drafts must be empty in one process: serve the models instead")
    for role, worker in (("target", config.target), ("draft", config.draft)):
        if worker is not None and worker.engine.num_ranks > 1:
            name = "tensor_parallel" if worker.engine.tensor_parallel > 1 else "pipeline_parallel"
            raise ConfigError(f"{role}.engine.{name} must be 1 in one process: serve the model instead")
    drafts = {} if config.draft is None else {"draft.engine.model": config.draft.engine}
    check_models(config.target.engine, drafts, "target.engine.model")
    torch.set_num_threads(max(each.engine.num_threads for each in (config.target, config.draft) if each is not None))
    target_config = config.target.engine
    target = TargetEngine.load(target_config, TARGET_EPOCH, report)
    _warm(target, target_config, report)
    if config.draft is None:
        return target, None
    draft_config = config.draft.engine
    draft = DraftEngine.load(draft_config, DRAFT_EPOCH, config.speculation.q_top_tokens, report)
    _warm(draft, draft_config, report)
    return target, draft


def _warm(engine: Engine[Any, Any], config: EngineConfig, report: Callable[[str], None]) -> None:
    engine.warm_up(lambda stage: report(f"{config.model}: {stage}"), this_machine())
