"""The links of one orchestrator process: at most one to each engine, opened with the first lease on it."""

from __future__ import annotations

import asyncio
import contextvars
import logging

from deploy.link.address import LinkAddress, LinkTroubles
from deploy.link.client import Link
from deploy.link.stream import LinkError
from deploy.link.tls import Certificates

logger = logging.getLogger(__name__)


class Links:
    """Invariant: a closed link is never returned; the engine's next grant opens another."""

    def __init__(self, certificates: Certificates | None = None) -> None:
        """`certificates` for links with TLS."""
        self._certificates = certificates
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._unopened: set[str] = set()
        """Engines whose last attempt failed; logged once each."""
        self._num_unopened = self._num_lost = 0

    @property
    def troubles(self) -> LinkTroubles:
        self._forget_closed()
        return LinkTroubles(self._num_unopened, self._num_lost)

    async def to(self, engine_id: str, address: LinkAddress) -> Link:
        """Return the link to this engine, opened if needed. Raises: LinkError, with the reason."""
        self._forget_closed()
        link = self._links.get(engine_id)
        return link if link is not None else await asyncio.shield(self._open(engine_id, address))

    def _open(self, engine_id: str, address: LinkAddress) -> asyncio.Task[Link]:
        """Start or join an attempt to open the link. It outlives the request that started it."""
        task = self._opening.get(engine_id)
        if task is None:
            task = asyncio.create_task(self._try(engine_id, address), context=contextvars.Context())
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its callers may have left
            self._opening[engine_id] = task
        return task

    async def _try(self, engine_id: str, address: LinkAddress) -> Link:
        try:
            link = self._links[engine_id] = await Link.open(address, self._certificates)
        except LinkError as error:
            if engine_id not in self._unopened:
                logger.warning("no link to %s: %s", engine_id, error)
            self._num_unopened += 1
            self._unopened.add(engine_id)
            raise
        else:
            self._unopened.discard(engine_id)
            return link
        finally:
            del self._opening[engine_id]

    def _forget_closed(self) -> None:
        closed = [engine_id for engine_id, link in self._links.items() if link.is_closed]
        for engine_id in closed:
            del self._links[engine_id]
        self._num_lost += len(closed)
