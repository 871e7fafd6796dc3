"""The demo pair in this process: real engines on threads and the real orchestrator, without Ray and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from deploy.clock import MonotonicClock
from deploy.settings import DEMO_DIRECTORY
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from outrider.in_process import ThreadLeases
from workers.engine import DraftEngine, TargetEngine

TARGET, DRAFT = (EngineConfig(str(DEMO_DIRECTORY / role)) for role in ("target", "draft"))


@dataclass(frozen=True, slots=True)
class InProcess:
    """A running pair."""

    service: Service
    draft: DraftEngine
    tokenizer: Tokenizer


@asynccontextmanager
async def in_process(
    speculation: SpeculationConfig, target: EngineConfig = TARGET, draft: EngineConfig = DRAFT
) -> AsyncIterator[InProcess]:
    """Load the pair; close it at the end."""
    engine = TargetEngine.load(target, 1, _ignore)
    drafting = DraftEngine.load(draft, 2, speculation.q_top_tokens, _ignore)
    config = ServiceConfig(TargetConfig(target), DraftConfig(draft), speculation=speculation)
    tokenizer, leases = Tokenizer.from_directory(target.model), ThreadLeases(engine, drafting)
    service = Service(config, engine.info, drafting.info, tokenizer, leases, MonotonicClock())
    try:
        yield InProcess(service, drafting, tokenizer)
        await service.close()
    finally:
        await leases.close()


def _ignore(_message: object) -> None:
    """Drop a progress message of loading."""
