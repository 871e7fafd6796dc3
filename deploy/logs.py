"""Log handlers for processes that Ray starts. Without them only warnings are kept, without timestamps.

Knows loggers, and the name of Serve's logger.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from ray.serve._private.constants import SERVE_LOGGER_NAME

from deploy import calls

PACKAGES = ("core", "deploy", "orchestrator", "workers")
FORMAT = "%(levelname)s %(asctime)s %(message)s"
FACTS = ("method", "status", "duration_s")
"""Extra fields of a log line."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the request id and trace id of the call."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (call := calls.current()) is not None:
            line |= {"request_id": call.request_id} | ({"trace_id": call.trace_id} if call.traceparent else {})
        line |= {name: getattr(record, name) for name in FACTS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_with_serve(*, is_json: bool = False) -> None:
    """Log to Serve's file of this replica (logs/serve/replica_*.log in Ray's session), in Serve's format.

    With `is_json`, log to standard output as JSON.
    """
    serves = logging.getLogger(SERVE_LOGGER_NAME)
    for logger in _ours():
        logger.handlers = [_json_handler()] if is_json else serves.handlers  # the same list object: Serve may change it
        logger.setLevel(serves.level)
        logger.propagate = False


def log_to_stderr() -> None:
    """Log to the file that Ray keeps for this engine's process (logs/worker-*.err)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    for logger in _ours():
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _json_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    return handler


def _ours() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in PACKAGES]
