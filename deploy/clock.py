"""Real time, as a `core.ports.Clock`."""

from __future__ import annotations

import asyncio
import time


class MonotonicClock:
    """The machine's monotonic clock; implements core.ports.Clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Sleep; return at once for 0 or less."""
        await asyncio.sleep(duration_s)
