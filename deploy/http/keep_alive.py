"""Silence on a stream, made noticeable: load balancers close a connection on which nothing comes for a minute or so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Piece = TypeVar("Piece")

COMMENT = b": keep-alive\n\n"
"""Readers of server-sent events skip it."""


async def with_silences(pieces: AsyncGenerator[Piece, None], after_s: float) -> AsyncGenerator[Piece | None, None]:
    """The pieces as they come, and None each time that nothing has come for `after_s` seconds; with 0 never.

    No piece is None. At most two are taken ahead. The error of `pieces` is raised; closing this generator closes them.
    """
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(1)
    passing = asyncio.create_task(_pass_on(pieces, queue))
    try:
        while True:
            try:
                async with asyncio.timeout(after_s or None):
                    piece = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                return
            yield piece
    finally:
        passing.cancel()
        if not queue.empty():
            queue.get_nowait()  # what closing may raise needs the place
        await asyncio.wait([passing])


async def _pass_on(pieces: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await queue.put(piece)
        await queue.put(None)
    except Exception as error:  # noqa: BLE001  whoever takes the pieces raises it
        await queue.put(error)
