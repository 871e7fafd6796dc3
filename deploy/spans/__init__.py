"""OpenTelemetry spans of requests. `open_tracing` imports OpenTelemetry, if tracing is configured.

Only this file knows OpenTelemetry's SDK and its exporter.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from core.config import TracingConfig
from core.errors import ConfigError

if TYPE_CHECKING:
    from deploy.spans.tracing import Tracing

SERVICE = "outrider"


def open_tracing(config: TracingConfig, now: Callable[[], float]) -> Tracing | None:
    """Set up tracing; None if no endpoint is set. `now` is the service's clock, in seconds.

    The tracer provider is separate from any that Ray or others have set up in the process.
    Raises: ConfigError if the packages are missing.
    """
    if config.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        problem = f"needs the packages of outrider[tracing] on every orchestrator's node: {error}"
        raise ConfigError(f"orchestrator.tracing.endpoint: {problem}") from error
    from deploy.spans.tracing import Tracing

    resource = Resource.create({"service.name": SERVICE, "host.name": socket.gethostname()})
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(config.sample), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(config.endpoint)))
    return Tracing(provider, config.every_rounds, now)
