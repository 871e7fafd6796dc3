"""A gateway's picker reads `GET /metrics` at the serving port beside running streams, current to the second."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config import EngineConfig, Limits, ServiceConfig, TargetConfig
from deploy.launch.cluster import Endpoints
from outrider_client import Client
from tests import checkpoints
from tests.system.served import deployed_for

pytestmark = pytest.mark.ray

PERIOD_S, NUM_LOOKS = 0.05, 30
"""These are a second and a half on a machine that is not busy; on one that is, each look takes longer."""
BLOCK_TOKENS, KV_TOKENS = 16, 4096


def test_queue_load_and_kv_are_those_of_this_second(tmp_path, cluster):
    model = str(checkpoints.write("llama", tmp_path / "target", 0))
    engine = EngineConfig(model, block_tokens=BLOCK_TOKENS, kv_cache_tokens=KV_TOKENS, paced_as="70b")
    config = ServiceConfig(TargetConfig(engine), model_name="now", limits=Limits(max_sessions=1, max_queued=2))
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        assert scraped(cluster) == {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
        with client.stream("the rain", max_tokens=400, ignore_eos=True) as stream, ThreadPoolExecutor() as beside:
            next(stream)
            waiting = beside.submit(client.generate, "in spain", max_tokens=1)
            within_a_second(lambda now: now["num_requests_running"] == now["num_requests_waiting"] == 1, cluster)
            within_a_second(lambda now: 0 < now["kv_cache_usage_perc"] < 0.5, cluster)
            stream.close()
            waiting.result()
        within_a_second(lambda now: not any(now.values()), cluster)


def within_a_second(condition: Callable[[dict[str, float]], bool], endpoints: Endpoints) -> None:
    for _ in range(NUM_LOOKS):
        if condition(now := scraped(endpoints)):
            return
        time.sleep(PERIOD_S)
    pytest.fail(f"not what is so now: {now}")


def scraped(endpoints: Endpoints) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{endpoints.host}:{endpoints.http_port}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (info,) = (sample for family in families for sample in family.samples if sample.name.endswith("cache_config_info"))
    num_blocks = KV_TOKENS // BLOCK_TOKENS
    assert info.labels == {"model_name": "now", "block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(num_blocks)}
    samples = [sample for family in families for sample in family.samples if sample is not info]
    return {sample.name.removeprefix("vllm:"): sample.value for sample in samples}
