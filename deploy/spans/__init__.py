"""OpenTelemetry's spans of a request. Importing this loads nothing of OpenTelemetry; `open_tracing` does, where set."""

from deploy.spans.opening import open_tracing

__all__ = ["open_tracing"]
