"""Sends this project's logs to files, in processes that Ray has started: else only warnings are kept, without a time.

Knows loggers, and the name of Serve's.
"""

from __future__ import annotations

import logging

from ray.serve._private.constants import SERVE_LOGGER_NAME

PACKAGES = ("core", "deploy", "orchestrator", "workers")
FORMAT = "%(levelname)s %(asctime)s %(message)s"


def log_with_serve() -> None:
    """In a replica: to Serve's log of it (logs/serve/replica_*.log in Ray's session), in Serve's format."""
    serves = logging.getLogger(SERVE_LOGGER_NAME)
    for logger in _ours():
        logger.handlers = serves.handlers  # the very list: Serve may change it
        logger.setLevel(serves.level)
        logger.propagate = False


def log_to_stderr() -> None:
    """In an engine's process: to the file that Ray keeps of it (logs/worker-*.err)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    for logger in _ours():
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _ours() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in PACKAGES]
