"""The metrics by name: as they are documented, and as Prometheus finds them at a system that has served."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from deploy.client import CallFailed, Client
from deploy.cluster import Endpoints
from deploy.local import served
from deploy.metrics import CATALOGUE, ENGINE_CATALOGUE, Kind
from protos.outrider.v1 import generation_pb2 as pb
from tests import checkpoints

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ENGINE_NAMES = {metric.name for metric in ENGINE_CATALOGUE}
SCRAPE_TIMEOUT_S = 60.0
"""Ray passes metrics on every ten seconds."""


def test_names_follow_the_conventions_of_prometheus():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_document_lists_what_there_is():
    rows = re.findall(r"^\| `(\w+)`(?: \((\w+)\))? \| (\w+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(metric.name, metric.label or "", metric.kind.value, metric.description) for metric in CATALOGUE]


@pytest.mark.ray
@pytest.mark.slow  # Ray exports every ten seconds or so
def test_prometheus_finds_what_the_clients_saw(tmp_path):
    target, draft = (checkpoints.write("llama", tmp_path / name, seed) for name, seed in (("target", 0), ("draft", 1)))
    config = ServiceConfig(
        TargetConfig(EngineConfig(str(target))),
        DraftConfig(EngineConfig(str(draft))),
        model_name="tiny",
        speculation=SpeculationConfig(policy="static", draft_timeout_s=30.0),  # though a random draft is not worth it
    )
    with served(config, lambda _: None) as endpoints, Client(f"localhost:{endpoints.grpc_port}") as client:
        expected = used(client)
        exported = until_exported(endpoints, expected)
    assert {name: exported.get(name, 0.0) for name in expected} == expected
    assert expected["spec_decode_num_draft_tokens_total"] > 0
    assert exported["draft_seconds_total"] >= exported["draft_hidden_seconds_total"]
    assert {"num_requests_running", "gamma", "table_tokens", "draft_resting"} <= set(exported)
    assert {metric.name for metric in ENGINE_CATALOGUE} - set(exported) <= {"num_preemptions_total"}  # there were none
    assert exported["engine_rows_total"] >= exported["engine_steps_total"] > 0


def used(client: Client) -> dict[str, float]:
    """Make some requests, and add up what the server says of each."""
    completions = [client.complete(request(seed)) for seed in (1, 2, 3)]
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        client.complete(pb.GenerateRequest())
    stats = [completion.finish.speculation for completion in completions]
    return {
        "prompt_tokens_total": sum(completion.usage.prompt_tokens for completion in completions),
        "generation_tokens_total": sum(len(completion.token_ids) for completion in completions),
        "request_success_total": 3,
        "request_failure_total": 1,
        "e2e_request_latency_seconds_count": 3,
        "time_to_first_token_seconds_count": 3,
        "target_passes_total": sum(entry.target_passes for entry in stats),
        "spec_decode_num_draft_tokens_total": sum(entry.drafted_tokens for entry in stats),
        "spec_decode_num_accepted_tokens_total": sum(entry.accepted_tokens for entry in stats),
        "spec_decode_num_accepted_tokens_per_pos_total": sum(sum(entry.accepted_per_position) for entry in stats),
        "draft_hits_total": sum(entry.hits for entry in stats),
        "draft_misses_total": sum(entry.misses for entry in stats),
    }


def request(seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="the rain in spain",
        sampling=pb.SamplingParams(temperature=1.0, seed=seed),
        stopping=pb.StoppingParams(max_tokens=24, ignore_eos=True),
    )


def until_exported(endpoints: Endpoints, expected: dict[str, float]) -> dict[str, float]:
    """What is exported as soon as it is as expected, or when time has run out."""
    end = time.monotonic() + SCRAPE_TIMEOUT_S
    exported = scraped(endpoints)
    while any(exported.get(name, 0.0) != value for name, value in expected.items()) and time.monotonic() < end:
        time.sleep(0.5)
        exported = scraped(endpoints)
    return exported


def scraped(endpoints: Endpoints) -> dict[str, float]:
    """The exported values by name, summed over labels."""
    with urllib.request.urlopen(f"http://{endpoints.host}:{endpoints.metrics_port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    values: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if line.startswith("ray_outrider_") and "_bucket{" not in line:
            name = line.partition("{")[0].removeprefix("ray_outrider_")
            label = re.search(r'deployment="(\w+)"', line)
            assert label is not None
            assert f'model_name="{"tiny" if label[1] == "orchestrator" else label[1]}"' in line
            assert (name in ENGINE_NAMES) == (label[1] != "orchestrator")
            values[name] += float(line.rpartition(" ")[2])
    return values
