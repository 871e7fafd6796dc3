"""OpenTelemetry's spans of a request. Importing this loads nothing of OpenTelemetry; `open_tracing` does, where set.

This file alone knows OpenTelemetry's SDK and its exporter.
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
    """None where no endpoint is set. `now` is the service's clock, in seconds.

    The provider is this service's own: what Ray or others have set up in the process is not touched.
    Raises: ConfigError where the packages are missing.
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
