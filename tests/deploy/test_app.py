from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from ray.serve import Application

from core.config import DraftConfig, EngineConfig, OrchestratorConfig, ServiceConfig, TargetConfig
from core.errors import ConfigError
from deploy import app
from deploy.engines import REPLICA_CPUS, bundles
from deploy.launch import application
from deploy.settings import demo_config, parse_config

GPU_WORKER = TargetConfig(EngineConfig("/t"), num_replicas=2, num_cpus=4, num_gpus=1, resources={"large_gpu": 1})


def test_serve_takes_the_builder_that_manifests_name():
    """Serve refuses builders with any other number of parameters, those with defaults included."""
    assert len(inspect.signature(app.build).parameters) == 1


def test_a_replica_reserves_little_for_itself_and_all_for_its_engine():
    assert bundles(GPU_WORKER) == [{"CPU": REPLICA_CPUS}, {"CPU": 4, "GPU": 1, "large_gpu": 1}]


def test_what_an_engine_does_not_ask_for_is_not_reserved():
    assert bundles(replace(GPU_WORKER, num_gpus=0, resources={}))[1] == {"CPU": 4}


def test_the_application_needs_what_its_parts_need():
    draft = DraftConfig(EngineConfig("/d"), num_cpus=1, resources={"small_gpu": 0.5})
    config = ServiceConfig(GPU_WORKER, draft, orchestrator=OrchestratorConfig(num_replicas=3))
    expected = {
        "CPU": 3 * OrchestratorConfig().num_cpus + 2 * 4 + 1 + 3 * REPLICA_CPUS,
        "GPU": 2,
        "large_gpu": 2,
        "small_gpu": 0.5,
    }
    assert app.resources(config) == pytest.approx(expected)


def test_each_part_runs_where_its_labels_say():
    at = {"target": "large", "draft": "small", "orchestrator": "front"}
    labels = {role: {"labels": {"zone": zone}} for role, zone in at.items()}
    engines = {role: {"engine": {"model": f"/{role}"}} for role in ("target", "draft")}
    ingress = app.build({role: engines.get(role, {}) | labels[role] for role in at})
    assert ingress._bound_deployment.ray_actor_options["label_selector"] == {"zone": "front"}
    (member,) = bound(ingress)[0]
    for part, zone in ((member.target, "large"), (member.draft, "small")):
        selectors = part._bound_deployment._replica_config.placement_group_bundle_label_selector
        assert selectors == [{"zone": zone}] * 2


def test_further_drafts_are_deployments_of_their_own():
    engines = {role: {"engine": {"model": f"/{role}"}} for role in ("target", "draft")}
    extra = [{"engine": {"model": "/c"}, "num_cpus": 2}, {"engine": {"model": "/d"}, "num_replicas": 3}]
    ingress = app.build({**engines, "extra_drafts": extra})
    (member,) = bound(ingress)[0]
    drafts = (member.draft, *member.extra_drafts)
    assert [each._bound_deployment.name for each in drafts] == ["draft", "draft2", "draft3"]
    assert [bound(each)[0].engine.model for each in drafts] == ["/draft", "/c", "/d"]
    alone = app.resources(parse_config(engines))["CPU"]
    assert app.resources(parse_config({**engines, "extra_drafts": extra}))["CPU"] == alone + 2 + 3 + 4 * REPLICA_CPUS


def test_an_application_is_built_from_the_settings_of_a_serve_yaml():
    assert isinstance(app.build({"target": {"engine": {"model": "/t"}}}), Application)
    with pytest.raises(ConfigError, match="darft: there is no such setting"):
        app.build({"target": {"engine": {"model": "/t"}}, "darft": None})


def test_the_demo_pair_passes_the_check():
    application.check_pair(demo_config())


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_missing_directory_is_named_by_its_setting(name):
    config = demo_config([f"{name}.engine.model=/no/such/model"])
    with pytest.raises(ConfigError, match=rf"{name}\.engine\.model: .*/no/such/model"):
        application.check_pair(config)


def test_a_learning_buffer_that_cannot_be_written_is_named():
    with pytest.raises(ConfigError, match=r"^target\.engine\.learning_buffer: /proc cannot be written"):
        application.check_pair(demo_config(["target.engine.learning_buffer=/proc"]))


def test_engines_are_told_what_requests_call_their_model_and_a_shared_draft_its_own_name():
    models = [
        {"model_name": "large", "target": {"engine": {"model": "/l"}}, "shared_draft": "small"},
        {"model_name": "coder", "target": {"engine": {"model": "/c"}}, "draft": {"engine": {"model": "/d"}}},
    ]
    ingress = app.build({"models": models, "drafts": {"small": {"engine": {"model": "/s"}}}})
    members = bound(ingress)[0]
    assert [bound(member.target)[1] for member in members] == ["large", "coder"]
    assert [bound(member.draft)[1] for member in members] == ["small", "coder"]


def bound(application: Application) -> tuple:
    """The arguments of its deployment's replicas."""
    return application._bound_deployment.init_args
