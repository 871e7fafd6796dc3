"""Settings of OpenTelemetry's spans."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import SHARE, Settings, at_least, check


@dataclass(frozen=True, slots=True)
class TracingConfig(Settings):
    """Destination of the spans of requests, and which requests and rounds have spans."""

    endpoint: str | None = None
    """URL that receives spans by OTLP over HTTP, for example "http://collector:4318/v1/traces". With None tracing is
    off and OpenTelemetry is not imported. Set it where a collector runs."""
    sample: float = 0.1
    """Share of the requests without a traceparent header that are traced, in [0, 1]; for others the header's sampled
    flag decides. Lower it where there are many requests."""
    every_rounds: int = 8
    """Every how many rounds one gets spans of its own and of its passes, about five in all; at least 0, and 0 traces no
    rounds. The prefill is always traced. Raise it where outputs are long."""

    def __post_init__(self) -> None:
        is_address = self.endpoint is None or self.endpoint.startswith(("http://", "https://"))
        check(is_address, "endpoint", "an address that begins with http:// or https://", self.endpoint)
        self._check(SHARE, "sample")
        self._check(at_least(0), "every_rounds")
