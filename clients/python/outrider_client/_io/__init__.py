"""Calls, pauses and channels, for asyncio (`aio`) and for threads (`blocking`): all in which the two clients differ."""


class Cut(Exception):
    """A call was cancelled by `close`, not the task that waits for it."""
