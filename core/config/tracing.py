"""Settings of OpenTelemetry's spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where the spans of requests go, and of how many there are some."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    endpoint: str | None = None
    """Address that takes spans by OTLP over HTTP, for example "http://collector:4318/v1/traces". With None nothing is
    traced, and nothing of OpenTelemetry is loaded."""
    sample: float = 0.1
    """Share of requests that are traced, in [0, 1], of those whose caller sends no traceparent: one that does decides
    by its sampled flag. Lower it where there are many requests."""
    every_rounds: int = 8
    """One round in this number has spans of its own, with its passes; at least 0, and 0 leaves rounds out. The prefill
    always has some. Raise it where outputs are long: a round makes about five spans."""

    def __post_init__(self) -> None:
        is_address = self.endpoint is None or self.endpoint.startswith(("http://", "https://"))
        check(is_address, "endpoint", "an address that begins with http:// or https://", self.endpoint)
        check(0 <= self.sample <= 1, "sample", "in [0, 1]", self.sample)
        check(self.every_rounds >= 0, "every_rounds", "at least 0", self.every_rounds)
