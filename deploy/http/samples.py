"""Several streams as one, each piece with the index of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Piece = TypeVar("Piece")


async def merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all streams as they come, and none before the last one has been taken.

    The first error of a stream ends all of them and is raised; so does closing the generator. All are closed then.
    """
    pieces: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pass_on(index, stream, pieces)) for index, stream in enumerate(streams)]
    num_left = len(tasks)
    try:
        while num_left:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                num_left -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pass_on(
    index: int, stream: AsyncGenerator[Piece, None], pieces: asyncio.Queue[tuple[int, Piece] | Exception | None]
) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await pieces.put((index, piece))
        await pieces.put(None)
    except Exception as error:  # noqa: BLE001  whoever takes the pieces raises it
        await pieces.put(error)
