"""Alerts tell the truth: promtool runs the cases in alerts/, and an install that nobody uses yet, against the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.metrics.instruments import ENGINE_CATALOGUE, MODEL_LABEL, ORCHESTRATOR_CATALOGUE, zeros
from tests.k8s.changes import rule
from tests.k8s.compositions import Composition, objects
from tests.k8s.faults import Fault
from tests.k8s.manifests import Manifest
from tests.k8s.monitoring_policies import EXPORTED_PREFIX, rules, wrong_names
from tests.k8s.promtool import RULES, complaints

CASES = {path.stem: path for path in (Path(__file__).parent / "alerts").glob("*.yaml")}
SUM = "sum by (model_name) "
QUANTILE = "histogram_quantile({}, sum by (model_name, le) (rate(ray_outrider_{}_seconds_bucket[5m]))) > {}"
FIRST_HOURS_MIN = (10, 60, 180)


@pytest.mark.parametrize("name", sorted(CASES))
def test_alerts_fire_when_they_should_and_then_only(name: str) -> None:
    assert not (said := complaints(monitoring(), [CASES[name]])), said


def test_an_install_that_nobody_uses_yet_alerts_nobody(tmp_path: Path) -> None:
    assert not (said := complaints(monitoring(), [idle(tmp_path)])), said


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("requests", "all requests fail, from the first on"),
        ("requests", "streams lose their targets, for the first time since the start"),
        ("drafting", "no verdict ever finds its next block ready, and a third of them does"),
    ],
)
def test_it_would_not_fire_if_counters_were_not_there_from_the_start(file: str, name: str, tmp_path: Path) -> None:
    """The same case without the zeros before the first increment: why deploy.metrics.instruments exports them."""
    content = yaml.safe_load(CASES[file].read_text())
    (case,) = (each for each in content["tests"] if each["name"] == name)
    for series in case["input_series"]:
        series["values"] = re.sub(r"^0x", "_x", series["values"])
    (path := tmp_path / "late.yaml").write_text(yaml.safe_dump(content | {"tests": [case]}))
    assert "exp:" in complaints(monitoring(), [path])


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for tried in (each for case in parsed() for each in case["alert_rule_test"]):
        fires[bool(tried.get("exp_alerts"))].add(tried["alertname"])
    assert fires[True] == fires[False] == {each["alert"] for each in rules(monitoring())}


def test_cases_are_made_of_what_is_exported() -> None:
    known = {f"{EXPORTED_PREFIX}{metric.name}": metric.label_values for metric in ORCHESTRATOR_CATALOGUE}
    for series in (each["series"] for case in parsed() for each in case["input_series"]):
        assert not list(wrong_names(series, series))
        for value in re.findall(r'(?:code|finished_reason)="(\w+)"', series):
            assert value in known[series.partition("{")[0]], series


def monitoring() -> list[Manifest]:
    return objects(Composition("cpu-demo", ("monitoring",)))


def parsed() -> list[Manifest]:
    return [case for path in CASES.values() for case in yaml.safe_load(path.read_text())["tests"]]


def idle(directory: Path) -> Path:
    """Three hours of what an orchestrator and its engines export that have started and were asked for nothing."""
    names = [each["alert"] for each in rules(monitoring())]
    tries = [{"eval_time": f"{minutes}m", "alertname": name} for minutes in FIRST_HOURS_MIN for name in names]
    series = [{"series": each, "values": f"{value}x{FIRST_HOURS_MIN[-1]}"} for each, value in exported_when_idle()]
    case = {"name": "idle", "interval": "1m", "input_series": series, "alert_rule_test": tries}
    path = directory / "idle.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [RULES], "evaluation_interval": "1m", "tests": [case]}))
    return path


def exported_when_idle() -> Iterator[tuple[str, int]]:
    """Metrics that tests/deploy/metrics/test_metrics.py finds at an idle server: zeros, and a draft that rests."""
    for metric, label in (*zeros(ORCHESTRATOR_CATALOGUE, 8), *zeros(ENGINE_CATALOGUE)):
        own = f', {metric.label}="{label}"' if label is not None else ""
        yield f'{EXPORTED_PREFIX}{metric.name}{{{MODEL_LABEL}="m"{own}}}', 0
    for metric in (*ORCHESTRATOR_CATALOGUE, *ENGINE_CATALOGUE):
        if metric.kind == "gauge" and metric.label is None:
            value = int(metric.name in ("draft_ready", "draft_resting"))
            yield f'{EXPORTED_PREFIX}{metric.name}{{{MODEL_LABEL}="m"}}', value


def rate(name: str, minutes: int) -> str:
    return f"{SUM}(rate(ray_outrider_{name}_total[{minutes}m]))"


FAULTS = (
    Fault("absence of all who are asked for nothing", "idle",
          rule("OutriderAbsent", "expr", to="absent(ray_outrider_num_requests_running > 0)")),
    Fault("absence for a moment", "requests", rule("OutriderAbsent", "for", to="0m")),
    Fault("failures over successes", "requests",
          rule("OutriderRequestsFail", "expr",
               to=f"{rate('request_failure', 5)} / {rate('request_success', 5)} > 0.01 < Inf")),
    Fault("failures by one's own fault", "requests",
          rule("OutriderRequestsFail", "expr", to=f"{rate('request_failure', 5)} > 0")),
    Fault("full for a moment", "requests", rule("OutriderFull", "for", to="0m")),
    Fault("few targets died", "requests",
          rule("OutriderTargetsDie", "expr", to=f"{SUM}(increase(ray_outrider_target_failures_total[15m])) > 3")),
    Fault("many targets died", "requests",
          rule("OutriderTargetsDie", "expr", to=f"{SUM}(increase(ray_outrider_target_failures_total[15m])) > 50")),
    Fault("a draft that never came, by what it does not answer", "drafting",
          rule("OutriderDraftNeverCame", "expr",
               to=f"{rate('draft_failures', 10)} / {rate('target_passes', 10)} > 0.05")),
    Fault("a draft that no orchestrator has found", "drafting",
          rule("OutriderDraftNeverCame", "expr", to="max by (model_name) (ray_outrider_draft_ready) == 0")),
    Fault("no time for a draft to come", "drafting", rule("OutriderDraftNeverCame", "for", to="10m")),
    Fault("a draft that nobody asks for", "drafting",
          rule("OutriderDraftGone", "expr", to="max by (model_name) (ray_outrider_num_requests_drafted) == 0")),
    Fault("a draft that is gone at every look", "drafting",
          rule("OutriderDraftGone", "expr",
               to="max by (model_name) (ray_outrider_num_requests_drafted) == 0"
               " and max by (model_name) (ray_outrider_num_requests_running) > 0")),
    Fault("late drafts of all models together", "drafting",
          rule("OutriderDraftLate", "expr",
               to="sum(rate(ray_outrider_draft_failures_total[10m]))"
               " / sum(rate(ray_outrider_target_passes_total[10m])) > 0.05")),
    Fault("a draft that rests because nobody asks", "idle",
          rule("OutriderDraftRests", "expr", to="min by (model_name) (ray_outrider_draft_resting) == 1")),
    Fault("a draft that is not there to rest", "drafting",
          rule("OutriderDraftRests", "expr",
               to=f"min by (model_name) (ray_outrider_draft_resting) == 1 and {rate('target_passes', 15)} > 0")),
    Fault("hits where there are some", "drafting",
          rule("OutriderFewHits", "expr",
               to=f"{rate('draft_hits', 15)} / (({rate('draft_hits', 15)} > 0) + {rate('draft_misses', 15)}) < 0.5")),
    Fault("hits since the start", "drafting",
          rule("OutriderFewHits", "expr",
               to=f"{SUM}(ray_outrider_draft_hits_total) / ({SUM}(ray_outrider_draft_hits_total)"
               f" + {SUM}(ray_outrider_draft_misses_total)) < 0.5")),
    Fault("first tokens at the median", "latency",
          rule("OutriderFirstTokenSlow", "expr", to=QUANTILE.format(0.5, "time_to_first_token", 5))),
    Fault("the slowest first tokens", "latency",
          rule("OutriderFirstTokenSlow", "expr", to=QUANTILE.format(0.999, "time_to_first_token", 5))),
    Fault("installs that are not told apart", "cluster",
          rule("OutriderFull", "expr",
               to=f"{rate('request_failure', 5)} > 0".replace("_total[", '_total{code="RESOURCE_EXHAUSTED"}['))),
    Fault("absence of all installs alone", "cluster",
          rule("OutriderAbsent", "expr", to="absent(ray_outrider_num_requests_running)")),
    Fault("no head anywhere", "cluster", rule("OutriderHeadGone", "expr", to='absent(up{role="head"} == 1)')),
    Fault("a head that is replaced", "cluster", rule("OutriderHeadGone", "for", to="0m")),
    Fault("an autoscaler that starts again", "cluster", rule("OutriderAutoscalerGone", "for", to="0m")),
    Fault("an autoscaler beside a head that is gone", "cluster",
          rule("OutriderAutoscalerGone", "expr",
               to='group by (namespace, ray_cluster) (up{endpoint="as-metrics"} == 0)')),
    Fault("pods that come one after the other", "cluster",
          rule("OutriderPodsPending", "expr",
               to="max by (namespace, ray_cluster, NodeType) (max_over_time(autoscaler_pending_nodes[5m])) > 0")),
    Fault("one engine that died twice", "cluster",
          rule("OutriderEnginesDie", "expr",
               to="sum by (namespace, ray_cluster, model_name, deployment)"
               " (increase(ray_outrider_engine_deaths_total[30m])) > 1")),
    Fault("links that failed once", "cluster",
          rule("OutriderLinksClosed", "expr",
               to="sum by (namespace, ray_cluster, model_name) (ray_outrider_links_unopened_total) > 1")),
    Fault("one full target", "cluster",
          rule("OutriderKvFull", "expr",
               to="max by (namespace, ray_cluster, model_name) (ray_outrider_kv_cache_usage_perc) > 0.95"
               " and sum by (namespace, ray_cluster, model_name) (ray_outrider_engine_sessions_waiting) > 0")),
    Fault("volumes of others", "cluster",
          rule("OutriderVolumeFull", "expr",
               to="min by (namespace, persistentvolumeclaim) (kubelet_volume_stats_available_bytes"
               " / kubelet_volume_stats_capacity_bytes) < 0.1")),
    Fault("stalls of 5 s", "latency",
          rule("OutriderStreamsStall", "expr", to=QUANTILE.format(0.99, "inter_token_latency", 5))),
    Fault("the longest stalls", "latency",
          rule("OutriderStreamsStall", "expr", to=QUANTILE.format(0.9999, "inter_token_latency", 1))),
)  # fmt: skip
"""In rules; `check` is the file of cases that must come out otherwise."""


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    changed = monitoring()
    fault.change(changed)
    assert "exp:" in complaints(changed, [idle(tmp_path) if fault.check == "idle" else CASES[fault.check]])


def test_an_expression_that_is_none_is_found() -> None:
    changed = monitoring()
    rule("OutriderFull", "expr", to="sum by model_name (rate(")(changed)
    assert "could not parse expression" in complaints(changed, [])
