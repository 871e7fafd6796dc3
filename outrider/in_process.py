"""A target and an optional draft in this process, each on its own thread, without Ray or gRPC.

Knows engines and the orchestrator's ports; must not know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import Unavailable
from core.records import Adapter, EngineStats
from workers.engine import DraftEngine, EngineLoop, TargetEngine


@dataclass(frozen=True, slots=True)
class ThreadLease:
    """A lease on an engine that no one else uses."""

    name: str
    engine_id: str
    epoch: int
    port: EngineLoop[Any, Any]

    def release(self) -> None:
        """Does nothing: no one waits for the lease. The pool frees the session on the engine."""


class ThreadLeases:
    """Grants leases on one target and an optional draft; implements `core.ports.Leases`."""

    def __init__(self, target: TargetEngine, draft: DraftEngine | None = None) -> None:
        self._num_leases = 0
        self._engines: dict[str, TargetEngine | DraftEngine] = {"target": target}
        if draft is not None:
            self._engines["draft"] = draft
        self._loops: dict[str, EngineLoop[Any, Any]] = {
            name: EngineLoop[Any, Any](engine) for name, engine in self._engines.items()
        }
        for loop in self._loops.values():
            loop.start()

    async def take_target(
        self,
        session: str,  # noqa: ARG002
        tokens: Sequence[int] = (),  # noqa: ARG002
        adapter: Adapter | None = None,  # noqa: ARG002
    ) -> ThreadLease:
        """The target has all adapters of the settings, and no others."""
        return self._lease("target")

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> ThreadLease:  # noqa: ARG002
        """Raises: Unavailable if there is no draft."""
        if "draft" not in self._engines:
            raise Unavailable("there is no draft")
        return self._lease("draft")

    def _lease(self, role: str) -> ThreadLease:
        self._num_leases += 1
        return ThreadLease(f"{self._num_leases}", role, self._engines[role].epoch, self._loops[role])

    async def stats(self) -> dict[str, EngineStats]:
        """Statistics of each engine, by role."""
        return {role: await loop.ask(lambda engine: engine.stats()) for role, loop in self._loops.items()}

    async def close(self) -> None:
        """Stop the engines and free their memory."""
        for loop in self._loops.values():
            await loop.close()
        for engine in self._engines.values():
            engine.close()
