"""Real time, for whatever takes a `core.ports.Clock`."""

from __future__ import annotations

import asyncio
import time


class MonotonicClock:
    """The machine's monotonic clock; implements core.ports.Clock."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Sleep; not at all for 0 or less."""
        await asyncio.sleep(duration_s)
