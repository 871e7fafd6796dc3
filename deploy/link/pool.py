"""The links of one orchestrator process: at most one to each engine, opened with the first lease on it.

A link that cannot be opened is logged and counted, and tried again later. Meanwhile calls go through Ray.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time

from deploy.link.address import LinkAddress, LinkTroubles
from deploy.link.client import Link
from deploy.link.stream import LinkError
from deploy.link.tls import Certificates

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds between attempts to open a link."""


class Links:
    """Invariant: a closed link is never returned; the engine's next grant opens another."""

    def __init__(self, certificates: Certificates | None = None) -> None:
        """`certificates` for links with TLS."""
        self._certificates = certificates
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link | None]] = {}
        self._unopened_s: dict[str, float] = {}
        """Monotonic time of the last failed attempt, by engine."""
        self._num_unopened = self._num_lost = 0

    @property
    def troubles(self) -> LinkTroubles:
        self._forget_closed()
        return LinkTroubles(self._num_unopened, self._num_lost)

    async def to(self, engine_id: str, address: LinkAddress | None) -> Link | None:
        """The link to this engine, opened if needed; None if there is none.

        Waits for the first attempt; later attempts run in the background, while calls go through Ray.
        """
        self._forget_closed()
        if address is None or engine_id in self._links:
            return self._links.get(engine_id)
        failed_s = self._unopened_s.get(engine_id)
        if failed_s is not None:
            if time.monotonic() - failed_s >= RETRY_S:
                self._open(engine_id, address)
            return None
        return await asyncio.shield(self._open(engine_id, address))

    def _open(self, engine_id: str, address: LinkAddress) -> asyncio.Task[Link | None]:
        """Start or join an attempt to open the link. It outlives the request that started it."""
        task = self._opening.get(engine_id)
        if task is None:
            task = asyncio.create_task(self._try(engine_id, address), context=contextvars.Context())
            self._opening[engine_id] = task
        return task

    async def _try(self, engine_id: str, address: LinkAddress) -> Link | None:
        try:
            link = self._links[engine_id] = await Link.open(address, self._certificates)
        except LinkError as error:
            if engine_id not in self._unopened_s:
                logger.warning("no link to %s; calls go through Ray instead: %s", engine_id, error)
            self._num_unopened += 1
            self._unopened_s[engine_id] = time.monotonic()
            return None
        else:
            self._unopened_s.pop(engine_id, None)
            return link
        finally:
            del self._opening[engine_id]

    def _forget_closed(self) -> None:
        closed = [engine_id for engine_id, link in self._links.items() if link.is_closed]
        for engine_id in closed:
            del self._links[engine_id]
        self._num_lost += len(closed)
