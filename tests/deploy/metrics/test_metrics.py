"""The metrics by name: as they are documented, and as Prometheus finds them at a system that has served."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
import ray

from bench.harness.probe import engine_of
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import (
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from deploy.launch.cluster import Endpoints
from deploy.metrics import instruments
from deploy.metrics.instruments import (
    CATALOGUE,
    ENGINE_CATALOGUE,
    ORCHESTRATOR_CATALOGUE,
    ServeRecorder,
    zeros,
)
from deploy.metrics.meters import EngineMeter, Meters, RequestMeter, code_of
from outrider_client import Client, GenerateFields, OutriderError
from tests import checkpoints
from tests.system.served import EXPORT_PERIOD_S, MAX_TRIES, deployed_for

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
ENGINE_NAMES = {metric.name for metric in ENGINE_CATALOGUE}
SCRAPE_TIMEOUT_S = 60.0
GAMMA = 5
MODEL = "tiny"
PROMPT = "the rain in spain"
SAMPLED: GenerateFields = {"temperature": 1.0, "ignore_eos": True}


def test_names_follow_the_conventions_of_prometheus():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize(
    ("kind", "name", "buckets", "problem"),
    [
        ("counter", "chunks", (), "counter 'chunks': the names of counters end in _total"),
        ("gauge", "chunks_total", (), "gauge 'chunks_total': the names of counters end in _total"),
        ("histogram", "chunks_total", (1.0,), "histogram 'chunks_total': the names of counters end in _total"),
        ("histogram", "chunks", (), "histogram 'chunks': histograms have buckets"),
        ("gauge", "chunks", (1.0,), "gauge 'chunks': histograms have buckets"),
    ],
)
def test_a_kind_that_name_or_buckets_deny_is_refused_where_it_is_declared(kind, name, buckets, problem):
    with pytest.raises(ValueError, match=f"^{problem}, and no others do$"):
        instruments.Metric(kind, name, "Chunks sent.", buckets=buckets)


def test_the_document_lists_what_there_is():
    rows = re.findall(r"^\| `(\w+)`(?: \((\w+)\))? \| (\w+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(metric.name, metric.label or "", metric.kind, metric.description) for metric in CATALOGUE]


@pytest.mark.parametrize(
    ("meters", "catalogue"),
    [((Meters, RequestMeter), ORCHESTRATOR_CATALOGUE), ((EngineMeter,), ENGINE_CATALOGUE)],
    ids=["orchestrator", "engine"],
)
def test_each_is_recorded_by_a_meter_of_its_own_process(meters, catalogue):
    """A recorder has the instruments of its catalogue alone."""
    code = "".join(map(inspect.getsource, meters))
    recorded = {getattr(instruments, name) for name in re.findall(r"\bm\.([A-Z_]+)\b", code)}
    assert recorded == set(catalogue)


class Instrument:
    """Ray's metric, as far as it is used; refuses what Ray refuses."""

    def __init__(self, metric: instruments.Metric, model_name: str) -> None:
        self.values: dict[str | None, float] = {}
        self._label = metric.label

    def inc(self, value: float, tags: dict[str, str] | None) -> None:
        assert value > 0
        self._record(value, tags)

    def set(self, value: float, tags: dict[str, str] | None) -> None:
        self.values[tags[self._label] if tags else None] = value

    def _record(self, value: float, tags: dict[str, str] | None) -> None:
        label = tags[self._label] if tags else None
        self.values[label] = self.values.get(label, 0.0) + value


@pytest.fixture
def made_instruments(monkeypatch):
    made: dict[str, Instrument] = {}
    monkeypatch.setattr(
        instruments, "_instrument", lambda metric, name: made.setdefault(metric.name, Instrument(metric, name))
    )
    return made


def test_a_counter_is_there_before_it_counts_with_every_label_that_is_known(made_instruments):
    ServeRecorder("m", ORCHESTRATOR_CATALOGUE, num_positions=3)
    counters = {metric.name for metric in ORCHESTRATOR_CATALOGUE if metric.kind == "counter"}
    unknown = {"control_changes_total", "adapter_draft_tokens_total", "adapter_accepted_tokens_total"}
    assert counters - {name for name, made in made_instruments.items() if made.values} == unknown
    assert {value for made in made_instruments.values() for value in made.values.values()} == {0.0}
    assert set(made_instruments["request_success_total"].values) == {"stop", "length"}
    assert {"UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED"} <= set(made_instruments["request_failure_total"].values)
    assert set(made_instruments["spec_decode_num_accepted_tokens_per_pos_total"].values) == {"0", "1", "2"}


def test_what_is_added_to_a_counter_is_all_that_it_counts(made_instruments):
    record = ServeRecorder("m", ENGINE_CATALOGUE)
    for value in (0, 2, 0, 3):
        record(instruments.ENGINE_STEPS, value)
    assert made_instruments["engine_steps_total"].values == {None: 5}


def test_no_request_fails_with_a_code_that_is_not_there_from_the_start():
    errors = [InvalidRequest("f", "p"), UnknownModel("m"), Unauthenticated("t"), Overloaded("full", 1.0)]
    errors += [RequestCancelled("gone"), DeadlinePassed("late"), Unavailable("none"), WorkerLost("dead"), KeyError()]
    assert {code_of(error) for error in errors} == set(instruments.CODES)


@pytest.mark.ray
def test_prometheus_finds_what_the_clients_saw(tmp_path, cluster):
    target, draft = (checkpoints.write("llama", tmp_path / name, seed) for name, seed in (("target", 0), ("draft", 1)))
    config = ServiceConfig(
        TargetConfig(EngineConfig(str(target))),
        DraftConfig(EngineConfig(str(draft))),
        model_name=MODEL,
        # though a random draft is not worth it
        speculation=SpeculationConfig(policy="static", draft_timeout_s=30.0, max_draft_tokens=GAMMA),
    )
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        check_an_idle_server(cluster)
        expected = used(client)
        exported = until_exported(cluster, expected, counting={"engine_steps_total", "engine_rows_total"})
        of_a_death = {"engine_deaths_total": 1, "target_failures_total": 1}
        assert {exported[name] for name in (*of_a_death, "sessions_moved_total")} == {0}
        outlive_the_target(client)
        after = until_exported(cluster, of_a_death, counting={"sessions_moved_total"})
    assert {name: after[name] for name in of_a_death} == of_a_death
    assert after["sessions_moved_total"] in (1, 2)  # the lease by which the engine was found may be given back late
    assert {name: exported.get(name, 0.0) for name in expected} == expected
    assert expected["spec_decode_num_draft_tokens_total"] > 0
    assert exported["draft_seconds_total"] >= exported["draft_hidden_seconds_total"]
    assert exported["engine_rows_total"] >= exported["engine_steps_total"] > 0


def check_an_idle_server(endpoints: Endpoints) -> None:
    """All that alerts and boards ask for is there before the first request, and stays."""
    counters = {(metric.name, label) for metric, label in zeros(ORCHESTRATOR_CATALOGUE, GAMMA)}
    engines = {(metric.name, None) for metric in ENGINE_CATALOGUE}
    names = ("num_requests_running", "num_requests_drafted", "gamma", "draft_resting", "draft_ready")
    gauges: set[tuple[str, str | None]] = {(name, None) for name in names}
    found = until_there(endpoints, counters | engines | gauges)
    assert {found[key] for key in counters} == {0.0}
    time.sleep(3 * EXPORT_PERIOD_S)  # a gauge is dropped when it has not been set for two periods
    assert until_there(endpoints, gauges)["draft_ready", None] == 1


def until_there(endpoints: Endpoints, wanted: set[tuple[str, str | None]]) -> dict[tuple[str, str | None], float]:
    """The exported values, by name and label, once all that are wanted are there; fails when time has run out."""
    end = time.monotonic() + SCRAPE_TIMEOUT_S
    found: dict[tuple[str, str | None], float] = {}
    while not wanted <= set(found):
        assert time.monotonic() < end, f"not exported: {wanted - set(found)}"
        time.sleep(0.5)
        found = {(name, label): value for name, label, value in series(endpoints)}
    return found


def used(client: Client) -> dict[str, float]:
    """Make some requests, and add up what the server says of each."""
    completions = []
    while len(completions) < 3 or not any(each.finish.speculation.drafted_tokens for each in completions):
        completions.append(client.generate(PROMPT, max_tokens=24, seed=1 + len(completions), **SAMPLED))
        assert len(completions) < 3 + MAX_TRIES
    with pytest.raises(OutriderError, match="INVALID_ARGUMENT"):
        client.generate(PROMPT, top_p=2.0)
    stats = [completion.finish.speculation for completion in completions]
    return {
        "prompt_tokens_total": sum(completion.usage.prompt_tokens for completion in completions),
        "generation_tokens_total": sum(len(completion.token_ids) for completion in completions),
        "request_success_total": len(completions),
        "request_failure_total": 1,
        "e2e_request_latency_seconds_count": len(completions),
        "time_to_first_token_seconds_count": len(completions),
        "target_passes_total": sum(entry.target_passes for entry in stats),
        "spec_decode_num_draft_tokens_total": sum(entry.drafted_tokens for entry in stats),
        "spec_decode_num_accepted_tokens_total": sum(entry.accepted_tokens for entry in stats),
        "spec_decode_num_accepted_tokens_per_pos_total": sum(sum(entry.accepted_per_position) for entry in stats),
        "draft_hits_total": sum(entry.hits for entry in stats),
        "draft_misses_total": sum(entry.misses for entry in stats),
    }


def outlive_the_target(client: Client) -> None:
    """One stream, in the middle of which its engine is killed."""
    engine = asyncio.run(engine_of("target"))  # which takes a lease, and gives it back before the stream begins
    chunks = client.stream(PROMPT, max_tokens=400, seed=4, **SAMPLED)
    next(chunks)
    ray.kill(engine)
    assert sum(len(chunk.token_ids) for chunk in chunks) > 300


def until_exported(
    endpoints: Endpoints, expected: dict[str, float], counting: Set[str] = frozenset()
) -> dict[str, float]:
    """Exported values once they are as expected and `counting` has begun, or when time has run out.

    Each process exports when its own period ends: an engine's counters may come later than its orchestrator's.
    """
    end = time.monotonic() + SCRAPE_TIMEOUT_S
    exported = scraped(endpoints)
    while not is_there(exported, expected, counting) and time.monotonic() < end:
        time.sleep(0.5)
        exported = scraped(endpoints)
    return exported


def is_there(exported: dict[str, float], expected: dict[str, float], counting: Set[str]) -> bool:
    as_expected = all(exported.get(name, 0.0) == value for name, value in expected.items())
    return as_expected and all(exported.get(name, 0.0) > 0 for name in counting)


def scraped(endpoints: Endpoints) -> dict[str, float]:
    """The exported values by name, summed over labels."""
    values: defaultdict[str, float] = defaultdict(float)
    for name, _, value in series(endpoints):
        values[name] += value
    return values


def series(endpoints: Endpoints) -> Iterator[tuple[str, str | None, float]]:
    """Name, value of its own label if it has one, and value of all that is exported but buckets."""
    with urllib.request.urlopen(f"http://{endpoints.host}:{endpoints.metrics_port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    for line in lines:
        if not line.startswith("ray_outrider_") or "_bucket{" in line:
            continue
        name = line.partition("{")[0].removeprefix("ray_outrider_")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels["model_name"] != MODEL:
            continue  # of what has been served before
        assert labels["deployment"] in (("target", "draft") if name in ENGINE_NAMES else ("orchestrator",))
        own = next((metric.label for metric in CATALOGUE if metric.name == name), None)
        yield name, labels[own] if own is not None else None, float(line.rpartition(" ")[2])
