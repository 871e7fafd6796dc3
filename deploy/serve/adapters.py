"""LoRA adapters that are loaded while a model is served: which there are, and which of them a replica's engine has.

The list is in Ray's own key-value store, so that all orchestrators and replicas have the same. A replica loads an
adapter when the first lease asks for it, and drops it when it is listed no more and its last lease has ended. Knows Ray
and engine actors. Must not know requests or files.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv

from core.errors import OutriderError, WorkerLost
from core.records import Adapter
from deploy.engines import Incarnation, cause_of_death

logger = logging.getLogger(__name__)

NAMESPACE = "outrider-adapters"


class AdapterList:
    """The adapters of one target deployment that were loaded while it served.

    Ray keeps the list when the deployment is replaced, so it belongs to one base: other weights begin without adapters.
    """

    def __init__(self, application: str, deployment: str, base: str) -> None:
        """`base`: digest of the target's weights."""
        self._prefix = f"{application}/{deployment}/{base}/"

    async def read(self) -> dict[str, Adapter]:
        """All of them, by name."""
        return await asyncio.to_thread(self._read)

    async def add(self, adapter: Adapter) -> None:
        value = json.dumps([adapter.name, adapter.path, adapter.digest])
        await asyncio.to_thread(self._put, adapter.name, value)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(internal_kv._internal_kv_del, self._prefix + name, namespace=NAMESPACE)

    def _put(self, name: str, value: str) -> None:
        internal_kv._internal_kv_put(self._prefix + name, value.encode(), overwrite=True, namespace=NAMESPACE)

    def _read(self) -> dict[str, Adapter]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE)
        values = [internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys]
        adapters = [Adapter(*json.loads(value)) for value in values if value is not None]
        return {adapter.name: adapter for adapter in adapters}


class LoadedAdapters:
    """The adapters that one replica has loaded into its engine."""

    def __init__(self, listed: AdapterList, kept: Collection[str]) -> None:
        """`kept`: digests of the adapters of the settings, which each engine loads at its start and keeps."""
        self._listed = listed
        self._kept = frozenset(kept)
        self._engine_id = ""
        self._digests: set[str] = set()
        """Adapters of the engine with this id; another engine begins without them."""
        self._num_leases: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def leased(self, current: Incarnation, adapter: Adapter | None) -> AsyncIterator[None]:
        """Meanwhile the engine has this adapter. Raises: OutriderError if it cannot be loaded."""
        if adapter is None:
            yield
            return
        self._num_leases[adapter.digest] += 1
        try:
            await self.load(current, adapter)
            yield
        finally:
            self._num_leases[adapter.digest] -= 1

    async def load(self, current: Incarnation, adapter: Adapter) -> Adapter:
        """Returns the adapter, with its digest. Raises: StartupError if it cannot be served; WorkerLost."""
        if self._has(current, adapter):  # no lease of a loaded one waits while another is loaded
            return adapter
        async with self._lock:
            if self._has(current, adapter):
                return adapter
            await self._drop_unlisted(current)  # they may take the last places
            found: Adapter = await _asked(current.engine.load_adapter, adapter)
            self._of(current).update({found.digest} - self._kept)
            return found

    async def drop_unlisted(self, current: Incarnation) -> None:
        """Drop the adapters that are listed no more and that no lease uses."""
        async with self._lock:
            await self._drop_unlisted(current)

    async def _drop_unlisted(self, current: Incarnation) -> None:
        if not self._of(current):
            return
        listed = {adapter.digest for adapter in (await self._listed.read()).values()}
        for digest in self._of(current) - listed:
            if self._num_leases[digest]:
                continue
            self._of(current).discard(digest)  # first: a lease that comes meanwhile has to load it again
            if await _asked(current.engine.drop_adapter, digest):
                logger.info("%s has dropped an adapter that was unloaded", current.engine_id)
            else:
                self._of(current).add(digest)

    def _has(self, current: Incarnation, adapter: Adapter) -> bool:
        return adapter.digest in self._kept or adapter.digest in self._of(current)

    def _of(self, current: Incarnation) -> set[str]:
        """Digests of what this engine has loaded beside the adapters of the settings."""
        if current.engine_id != self._engine_id:
            self._engine_id, self._digests = current.engine_id, set()
        return self._digests


async def _asked(method: Any, *arguments: Any) -> Any:
    """The answer of an engine actor. Raises: OutriderError."""
    try:
        return await method.remote(*arguments)
    except RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise WorkerLost(cause_of_death(error)) from error
    except RayError as error:
        raise WorkerLost(cause_of_death(error)) from error
