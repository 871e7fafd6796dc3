"""Calls, pauses and channels, for asyncio (`aio`) and for threads (`blocking`). The clients differ in nothing else."""


class Cut(Exception):
    """The call was cancelled by `close`. The task that waits for it was not."""
