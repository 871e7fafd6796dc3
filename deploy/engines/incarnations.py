"""One incarnation of an engine: the processes of its ranks, from their start to the first death.

Knows engine actors and how Ray's errors report a death; must not know Serve or leases.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from core.config import EngineConfig
from core.errors import OutriderError, WorkerLost, first_line
from core.records import Findings, ModelInfo
from deploy.engines import actors
from deploy.engines.actors import EngineActor, FollowerActor
from deploy.link.address import LinkAddress

logger = logging.getLogger(__name__)

CRASH = "Worker exit type: SYSTEM_ERROR"
"""Part of Ray's message about a process that ended unexpectedly."""
NO_MEMORY = "out of memory"
"""Part of torch's message about a device without memory."""
KILL_WAIT_S = 2.0
"""Time limit for Ray to report how killed ranks have ended."""
KEPT_SHARE = 0.95
"""Share of `kv_memory_share` that is left after ranks ran out of memory."""


class Incarnation:
    """One life of an engine, with its own epoch. It begins with `load`."""

    findings: Findings | None = None
    """Set once it has loaded. The next incarnation starts with them."""

    def __init__(
        self,
        role: str,
        actor: type[EngineActor[Any, Any]],
        config: EngineConfig,
        place: Callable[[int], dict[str, Any]],
        *arguments: Any,
    ) -> None:
        """`place` returns Ray's placement options of a rank; `arguments` go to the actor after the epoch."""
        self._config, self._ran_out_of_memory = config, False
        self._follower_ends: list[Future[None]] = []
        self.epoch = secrets.randbits(62)
        self.engine_id = f"{role}-{self.epoch:016x}"
        self.engine = actors.start(actor, config, self.epoch, *arguments, **place(0))
        self._followers = [
            actors.start(FollowerActor, config, rank, **place(rank)) for rank in range(1, config.num_ranks)
        ]
        self.link: LinkAddress
        """Address for links, set once the engine has loaded."""
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Incarnation {self.engine_id}{', ended' if self._end.done() else ''}>"

    async def load(self, known: Findings | None = None) -> ModelInfo:
        """Load the engine and return its model's description; `known` are the findings of an earlier incarnation.

        Raises: StartupError, without Ray's trace, also if a follower fails before the ranks have agreed on their model;
        RayError if a process died.
        """
        try:
            meeting = await self.engine.meeting.remote() if self._followers else None
            for rank, follower in enumerate(self._followers, 1):
                self._follower_ends.append(follower.follow.remote(meeting).future())
                self._follower_ends[-1].add_done_callback(partial(self._note_end, rank))
            info: ModelInfo
            info, self.findings = await self.engine.load.remote(meeting, known)
            self.link = await self.engine.open_links.remote()
        except RayTaskError as error:
            if isinstance(error.cause, OutriderError):
                raise error.cause from None
            raise
        self._watch = asyncio.create_task(self._watch_process())
        return info

    async def config_of_next(self) -> EngineConfig:
        """Settings of the next incarnation. Call it after `kill`.

        A single engine that runs out of memory makes smaller steps. Several ranks end, because others are still in the
        step. So that they do not end again, the next ones have half as many rows in a step, and less KV.
        """
        config, ends = self._config, [asyncio.wrap_future(end) for end in self._follower_ends]
        if ends:
            done, _ = await asyncio.wait(ends, timeout=KILL_WAIT_S)
            for end in done:
                end.exception()  # noted where it was raised
        if config.num_ranks == 1 or not self._ran_out_of_memory:
            return config
        return replace(
            config,
            max_step_tokens=max(1, config.max_step_tokens // 2),
            kv_memory_share=config.kv_memory_share * KEPT_SHARE,
        )

    async def end(self) -> str:
        """Wait until this incarnation has ended; returns the reason."""
        return await asyncio.shield(self._end)

    def fail(self, reason: str) -> None:
        """Treat the incarnation as dead from now on."""
        self._ran_out_of_memory |= NO_MEMORY in reason
        if not self._end.done():
            self._end.set_result(reason)

    def kill(self) -> None:
        """End the remaining processes."""
        for process in (self.engine, *self._followers):
            ray.kill(process)

    async def _watch_process(self) -> None:
        try:
            await self.engine.until_death.remote()
        except (RayError, WorkerLost) as error:
            self.fail(cause_of_death(error))

    def _note_end(self, rank: int, end: Future[None]) -> None:
        """Log the error with which a follower ended, if any."""
        if (error := end.exception()) is not None:
            reason = str(error).strip().splitlines()[-1]
            self._ran_out_of_memory |= NO_MEMORY in reason
            logger.warning("rank %d has ended: %s", rank, reason)


def cause_of_death(error: Exception) -> str:
    """The cause in one line, without traces and without Ray's general advice."""
    if isinstance(error, RayTaskError):
        return first_line(error.cause)
    cause = re.search(r"The actor is dead because (.+)", str(error))
    if cause is None:
        return first_line(error)
    return "its process was killed or crashed" if CRASH in cause[1] else cause[1].partition(". ")[0].rstrip(".")
