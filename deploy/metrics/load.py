"""`GET /metrics`: the load of one orchestrator at this moment, under the names that endpoint pickers read by default.

Pickers of an inference gateway (llm-d, Gateway API Inference Extension, KServe) ask each pod several times a second, at
its serving port, and know vLLM's names. Metrics for operators are exported at another port, every ten seconds
(`deploy.metrics.instruments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from core.records import EngineStats
from deploy.metrics.instruments import MODEL_LABEL

TEXT = (("content-type", CONTENT_TYPE_PLAIN_0_0_4), ("cache-control", "no-store"))
PREFIX = "vllm:"


@dataclass(frozen=True, slots=True)
class Load:
    model_name: str
    num_running: int
    num_waiting: int
    kv_share: float
    """Share of its targets' KV blocks that sessions hold, including the sessions of other orchestrators."""
    block_tokens: int
    num_blocks: int
    """Number of KV blocks of all its targets."""


def kv_share(targets: Sequence[EngineStats]) -> float:
    """Share of the targets' KV blocks in use; 0 before this orchestrator has had a session on one of them."""
    num_blocks = sum(each.num_blocks for each in targets)
    return sum(each.kv_use * each.num_blocks for each in targets) / num_blocks if num_blocks else 0.0


def exposition(loads: Sequence[Load]) -> bytes:
    """The loads in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(loads))
    return generate_latest(registry)


class _Collector:
    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield self._gauge(
            "num_requests_running", "Requests that were admitted and have not ended.", lambda load: load.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests that wait in the queue.", lambda load: load.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the targets' KV in use; 1 is all.", lambda load: load.kv_share
        )
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "KV of the targets.", labels=(MODEL_LABEL, "block_size", "num_gpu_blocks")
        )
        for load in self._loads:
            info.add_metric((load.model_name, str(load.block_tokens), str(load.num_blocks)), 1)
        yield info

    def _gauge(self, name: str, meaning: str, value: Callable[[Load], float]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=(MODEL_LABEL,))
        for load in self._loads:
            gauge.add_metric((load.model_name,), value(load))
        return gauge
