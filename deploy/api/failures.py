"""Error messages for callers, by gRPC and HTTP: one readable line, and never a stack trace."""

from __future__ import annotations

import logging
import secrets

from core.errors import OutriderError

logger = logging.getLogger(__name__)

MAX_DETAILS_CHARS = 500
"""gRPC's trailers must fit in 8 KiB, where a character may take twelve bytes."""


def told(error: Exception) -> str:
    """The line; an error that is not an OutriderError is logged, and the caller gets its id alone."""
    if isinstance(error, OutriderError):
        return shortened(str(error))
    error_id = secrets.token_hex(8)
    logger.error("internal error %s", error_id, exc_info=error)
    return f"an internal error happened; the server's log has it as {error_id}"


def shortened(text: str) -> str:
    """The line, cut to the length that callers get."""
    return text if len(text) <= MAX_DETAILS_CHARS else text[: MAX_DETAILS_CHARS - 3] + "..."
