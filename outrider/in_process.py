"""A target and perhaps a draft in this process, each on a thread of its own, without Ray and gRPC.

Knows engines and the orchestrator's ports; must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import Unavailable
from core.records import DraftUpdate, EngineStats
from workers.engine import DraftEngine, EngineLoop, TargetEngine


class ThreadPort:
    """Both ports of `core.ports`, straight to an engine's thread."""

    def __init__(self, loop: EngineLoop[Any, Any]) -> None:
        self._loop = loop

    async def verify(self, batch: Sequence[Any], take: Callable[[Any], None] | None = None) -> Sequence[Any]:
        """One reply for each request, when all have come; `take` gets each after its step."""
        replies: Sequence[Any] = await self._loop.submit(batch, take)
        return replies

    draft = verify

    async def grow(self, request: Any, take: Callable[[DraftUpdate], None]) -> Any:
        """The last reply; those before it go to `take`."""
        async for each in self._loop.replies(request):
            if not isinstance(each, DraftUpdate):
                return each
            take(each)
        raise AssertionError("the last reply is no growth")

    async def release(self, sessions: Sequence[str]) -> None:
        """Free the memory of these sessions."""
        await self._loop.release(sessions)


@dataclass(frozen=True, slots=True)
class ThreadLease:
    """A lease without competitors."""

    name: str
    engine_id: str
    epoch: int
    port: ThreadPort

    def release(self) -> None:
        """Nobody else waits for it; the pool frees the session on the engine."""


class ThreadLeases:
    """Grants leases on one target and, if there is one, on one draft; implements `core.ports.Leases`."""

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

    async def take_target(self, session: str, tokens: Sequence[int] = ()) -> ThreadLease:  # noqa: ARG002
        """At once."""
        return self._lease("target")

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> ThreadLease:  # noqa: ARG002
        """At once. Raises: Unavailable where there is no draft."""
        if "draft" not in self._engines:
            raise Unavailable("there is no draft")
        return self._lease("draft")

    def _lease(self, role: str) -> ThreadLease:
        self._num_leases += 1
        return ThreadLease(f"{self._num_leases}", role, self._engines[role].epoch, ThreadPort(self._loops[role]))

    async def stats(self) -> dict[str, EngineStats]:
        """The state of each engine, by role."""
        return {role: await loop.ask(lambda engine: engine.stats()) for role, loop in self._loops.items()}

    async def close(self) -> None:
        """Stop the engines and free what they hold."""
        for loop in self._loops.values():
            await loop.close()
        for engine in self._engines.values():
            engine.close()
