from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from core.config import (
    DraftScaling,
    EngineConfig,
    FleetConfig,
    OrchestratorConfig,
    OrchestratorScaling,
    ServiceConfig,
    TargetConfig,
    TargetScaling,
)
from core.errors import ConfigError
from core.records import Verification
from core.rules import lossless
from deploy.settings import (
    DEMO_DIRECTORY,
    Setting,
    as_explained_yaml,
    demo_config,
    environment_settings,
    override,
    parse_config,
    parse_fleet,
    read_config,
    read_fleet,
    service_config,
)
from deploy.sources import Sources

MINIMAL = {"target": {"engine": {"model": "/models/target"}}}


def test_what_is_not_set_has_the_defaults_of_core():
    assert parse_config(MINIMAL) == ServiceConfig(TargetConfig(EngineConfig("/models/target")))


def test_every_level_can_be_set():
    config = parse_config(
        {
            "model_name": "pair",
            "target": {"engine": {"model": "/t", "dtype": "bfloat16"}, "num_gpus": 1, "resources": {"large_gpu": 1}},
            "draft": {"engine": {"model": "/d", "num_threads": 2}, "num_replicas": 3},
            "speculation": {"verification": "block", "max_draft_tokens": 7},
            "limits": {"max_sessions": 5},
        }
    )
    assert config.target.engine.dtype == "bfloat16"
    assert config.target.resources == {"large_gpu": 1.0}
    assert config.draft is not None
    assert (config.draft.engine.num_threads, config.draft.num_replicas) == (2, 3)
    assert config.speculation.verification is Verification.BLOCK
    assert config.limits.max_sessions == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**MINIMAL, "modle_name": "x"}, "modle_name: there is no such setting"),
        ({"target": {"engine": {"model": "/t", "dtyp": "float32"}}}, "target.engine.dtyp: there is no such setting"),
        ({**MINIMAL, "limits": {"max_session": 1}}, "limits.max_session: there is no such setting"),
        ({}, "target: must be set"),
        ({"target": {"engine": {}}}, "target.engine.model: must be set"),
        ({"target": {"engine": {"model": "/t", "dtype": "int3"}}}, "target.engine.dtype must be bfloat16 or float32"),
        ({**MINIMAL, "orchestrator": {"num_replicas": "two"}}, "orchestrator.num_replicas: "),
        ({**MINIMAL, "draft": [1]}, "draft: "),
        ({"target": {"engine": {"model": "/t"}, "num_replicas": 0}}, "target.num_replicas must be at least 1, got 0"),
        (
            {"target": {"engine": {"model": "/t", "paced_as": "h100"}}},
            "target.engine.paced_as must be one of 70b, 32b, 8b, 1b, 0.6b, 0.5b, 123m, 13m, got 'h100'",
        ),
        (
            {"target": {"engine": {"model": "/t", "num_threads": 0}}},
            "target.engine.num_threads must be at least 1, got 0",
        ),
        ({**MINIMAL, "model_name": ""}, "model_name must be not empty"),
        (
            {**MINIMAL, "speculation": {"verification": "typical", "allow_relaxed": True}},
            f"speculation.verification must be one of {', '.join(lossless(is_greedy=False))}, got 'typical'",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(settings, message):
    with pytest.raises(ConfigError) as caught:
        parse_config(settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError, match=r"colour: there is no such setting.*|target: must be set.*") as caught:
        parse_config({"colour": "red"})
    assert "target: must be set" in str(caught.value)


def write(path: Path, settings: object) -> Path:
    path.write_text(yaml.safe_dump(settings))
    return path


def test_relative_models_start_at_the_file(tmp_path):
    target = {"model": "big", "learning_buffer": "places"}
    settings = {"target": {"engine": target}, "draft": {"engine": {"model": "../small"}}}
    config = read_config(write(tmp_path / "pair.yaml", settings))
    assert config.target.engine.model == str(tmp_path / "big")
    assert config.target.engine.learning_buffer == str(tmp_path / "places")
    assert config.draft is not None
    assert Path(config.draft.engine.model).resolve() == tmp_path.parent / "small"


def test_absolute_models_stay(tmp_path):
    assert read_config(write(tmp_path / "pair.yaml", MINIMAL)).target.engine.model == "/models/target"


@pytest.mark.parametrize("text", ["- a list", "target: [", "", "\udcff"])
def test_a_file_that_holds_no_settings_is_refused_by_name(tmp_path, text):
    path = tmp_path / "pair.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"pair\.yaml"):
        read_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_config(tmp_path / "none.yaml")


def test_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path / "pair.yaml", {**MINIMAL, "draft": {"engine": {"model": "/d"}}})
    config = read_config(path, ["target.num_replicas=2", "target.engine.num_threads=4", "draft=null"])
    assert (config.target.num_replicas, config.target.engine.num_threads) == (2, 4)
    assert config.draft is None


def test_an_override_may_open_a_group_that_the_file_leaves_out():
    assert override({}, ["limits.max_sessions=3"]) == {"limits": {"max_sessions": 3}}


def test_overrides_leave_their_base_alone():
    base = {"limits": {"max_sessions": 1}}
    override(base, ["limits.max_sessions=3"])
    assert base == {"limits": {"max_sessions": 1}}


@pytest.mark.parametrize("item", ["target", "=1", "target..x=1", "model_name.x=1", "limits=[", "target.engine.x.y=1"])
def test_a_malformed_override_is_refused(item):
    with pytest.raises(ConfigError):
        parse_config(override({**MINIMAL, "model_name": "pair"}, [item]))


# The environment, and who is named for a mistake


def test_variables_with_a_double_underscore_or_the_name_of_a_setting_are_settings():
    environment = {
        "OUTRIDER_TARGET__ENGINE__DTYPE": "bfloat16",
        "OUTRIDER_TARGET__RESOURCES": "{big: 1}",
        "OUTRIDER_DRAFT": "null",
        "OUTRIDER_TOKEN": "secret",
        "OUTRIDER_TOKENS_FILE": "/tokens",
        "OUTRIDER_SERVICE_HOST": "10.0.0.1",  # as Kubernetes tells of a service called outrider
        "TARGET__ENGINE__DTYPE": "float32",
    }
    found = {setting.name: setting.value for setting in environment_settings(environment)}
    assert found == {"target.engine.dtype": "bfloat16", "target.resources": {"big": 1}, "draft": None}


def test_a_group_comes_before_its_parts():
    environment = {"OUTRIDER_LIMITS__MAX_SESSIONS": "5", "OUTRIDER_LIMITS": "{max_sessions: 4, retry_after_s: 2}"}
    limits = service_config(None, list(environment_settings(environment))).limits
    assert (limits.max_sessions, limits.retry_after_s) == (5, 2.0)


def test_what_is_given_last_decides():
    given = [Setting("limits.max_sessions", 2, "one"), Setting("limits.max_sessions", 3, "other")]
    assert service_config(None, given).limits.max_sessions == 3


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "OUTRIDER_TARGET__ENGINE__DTYPE",
            "int3",
            "target.engine.dtype must be bfloat16 or float32, to which weights in float16 are converted, got 'int3'",
        ),
        ("OUTRIDER_TARGET__NUM_REPLICAS", "0", "target.num_replicas must be at least 1, got 0"),
        ("OUTRIDER_TARGT__NUM_REPLICAS", "1", "targt: there is no such setting"),
        ("OUTRIDER_MODEL_NAME__X", "1", "model_name is a value and has no settings of its own"),
        ("OUTRIDER_DRAFT", "[1]", "draft: "),
    ],
)
def test_a_mistake_in_the_environment_names_setting_variable_and_what_is_allowed(variable, text, message):
    with pytest.raises(ConfigError) as caught:
        service_config(None, list(environment_settings({variable: text})))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"({variable} in the environment)")


def test_a_variable_that_is_no_yaml_is_named():
    with pytest.raises(ConfigError, match="OUTRIDER_LIMITS="):
        list(environment_settings({"OUTRIDER_LIMITS": "["}))


def test_a_mistake_is_blamed_on_the_last_to_have_given_the_setting_else_on_the_file(tmp_path):
    file = write(tmp_path / "pair.yaml", {**MINIMAL, "limits": {"max_sessions": 0}})
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert str(caught.value) == f"limits.max_sessions must be at least 1, got 0 ({file}:2)"
    with pytest.raises(ConfigError, match=r"got -1 \(--set limits.max_sessions=-1\)$"):
        read_config(file, ["limits.max_sessions=-1"])


def test_a_configuration_survives_being_written(tmp_path):
    config = parse_config(
        {
            "target": {"engine": {"model": "/t", "link_ports": [1, 9]}, "autoscaling": {"max_replicas": 2}},
            "draft": {"engine": {"model": "/d"}, "resources": {"small": 1}},
            "speculation": {"verification": "block"},
        }
    )
    (tmp_path / "again.yaml").write_text(as_explained_yaml(config, Sources()))
    assert read_config(tmp_path / "again.yaml") == config


def test_the_demo_is_the_pair_in_the_repository():
    config = demo_config(["orchestrator.num_replicas=2"])
    assert config.draft is not None
    assert Path(config.target.engine.model) == DEMO_DIRECTORY / "target"
    assert Path(config.draft.engine.model) == DEMO_DIRECTORY / "draft"
    assert config.orchestrator.num_replicas == 2


def test_labels_and_autoscaling_belong_to_each_deployment():
    config = parse_config(
        {
            "orchestrator": {"labels": {"role": "front"}, "autoscaling": {"max_replicas": 3, "sessions": 8}},
            "target": {"engine": {"model": "/t"}, "autoscaling": {"max_replicas": 2, "kv_use": 0.5}},
            "draft": {"engine": {"model": "/d"}, "autoscaling": {"max_replicas": 2, "min_replicas": 0, "wait": 0.2}},
        }
    )
    assert config.orchestrator == OrchestratorConfig(
        labels={"role": "front"}, autoscaling=OrchestratorScaling(max_replicas=3, sessions=8.0)
    )
    assert config.target.autoscaling == TargetScaling(max_replicas=2, kv_use=0.5)
    assert config.draft is not None
    assert config.draft.autoscaling == DraftScaling(max_replicas=2, min_replicas=0, wait=0.2)


def test_a_target_does_not_scale_by_what_drafts_scale_by():
    with pytest.raises(ConfigError, match=r"target\.autoscaling\.busy: there is no such setting"):
        parse_config({"target": {"engine": {"model": "/t"}, "autoscaling": {"max_replicas": 2, "busy": 0.5}}})


FLEET = {
    "models": [
        {"model_name": "a", "target": {"engine": {"model": "/a"}}, "shared_draft": "small"},
        {"model_name": "b", "target": {"engine": {"model": "b"}}, "draft": {"engine": {"model": "own"}}},
    ],
    "drafts": {"small": {"engine": {"model": "small"}}},
}
OTHER_CUT = {"model_name": "b", "speculation": {"q_top_tokens": 8}}


def test_a_fleet_has_several_models_that_may_share_drafts():
    fleet = parse_fleet(FLEET, Path("/models"))
    first, second = fleet.models
    assert (fleet.draft_of(first), fleet.draft_of(second)) == (fleet.drafts["small"], second.draft)
    assert fleet.drafts["small"].engine.model == "/models/small"
    assert second.target.engine.model == "/models/b"


def test_the_settings_of_one_model_are_a_fleet_of_one():
    fleet = parse_fleet({**MINIMAL, "orchestrator": {"num_replicas": 3}})
    assert fleet == FleetConfig(
        (parse_config({**MINIMAL, "orchestrator": {"num_replicas": 3}}),), {}, fleet.orchestrator
    )
    assert fleet.orchestrator.num_replicas == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": []}, "models must be at least one"),
        ({"models": [FLEET["models"][0], FLEET["models"][0]]}, "models must be of different model_name"),
        ({"drafts": {}}, "shared_draft must be one of drafts (there are none), got 'small'"),
        ({"drafts": {**FLEET["drafts"], "idle": FLEET["drafts"]["small"]}}, "named by a model's shared_draft"),
        (
            {"models": [{**FLEET["models"][0], "draft": FLEET["drafts"]["small"]}]},
            "draft must be absent beside shared_draft",
        ),
        (
            {
                "models": [
                    FLEET["models"][0],
                    {**FLEET["models"][0], "model_name": "b", "speculation": {"q_top_tokens": 8}},
                ]
            },
            "speculation.q_top_tokens must be the same for all models that share a draft, got [8, 1024]",
        ),
        ({"modles": []}, "modles: there is no such setting"),
    ],
)
def test_a_fleet_that_does_not_fit_together_is_refused(change, message):
    with pytest.raises(ConfigError) as caught:
        parse_fleet({**FLEET, **change})
    assert message in str(caught.value)


EXTRA = {"engine": {"model": "other"}}


def test_paths_of_further_drafts_begin_where_those_of_the_first_do(tmp_path):
    config = parse_config({**MINIMAL, "draft": EXTRA, "extra_drafts": [EXTRA]}, tmp_path)
    assert config.extra_drafts[0].engine.model == config.draft.engine.model == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_drafts": [EXTRA], "draft": None}, "extra_drafts must be empty without a draft or a shared_draft"),
        ({"draft": EXTRA, "extra_drafts": [EXTRA] * 4}, "extra_drafts must be at most 3"),
        (
            {"draft": EXTRA, "extra_drafts": [{**EXTRA, "autoscaling": {"max_replicas": 2}}]},
            "extra_drafts must be without autoscaling",
        ),
        ({"target": {"engine": {"model": "t", "cascade_tokens": 4}}}, "target.engine.cascade_tokens must be 0"),
        (
            {"draft": {"engine": {"model": "d", "learning_buffer": "/b"}}},
            "draft.engine.learning_buffer must be absent: a target collects, got '/b'",
        ),
        ({"target": {"engine": {"model": "t", "learning_buffer": ""}}}, "learning_buffer must be the path of"),
        (
            {"target": {"engine": {"model": "t", "learning_buffer_tokens": 9999}}},
            "learning_buffer_tokens must be at least 10000",
        ),
    ],
)
def test_drafts_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **settings})
    assert message in str(caught.value)


def test_a_service_of_one_model_has_no_draft_to_share():
    with pytest.raises(ConfigError, match="shared_draft: only models of a fleet share drafts; set draft instead"):
        parse_fleet({**MINIMAL, "shared_draft": "small"})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[draft, oracle]", "speculation.guessers[1] must be one of draft, prompt_lookup"),
        ("[]", "speculation.guessers must be at least one name"),
        ("[draft, draft]", "speculation.guessers must be different names"),
    ],
)
def test_guessers_are_named_by_names_that_there_are(value, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        demo_config([f"speculation.guessers={value}"])
    assert demo_config(["speculation.guessers=[prompt_lookup]"]).speculation.guessers == ("prompt_lookup",)


def test_an_unknown_guesser_is_refused_with_where_it_was_given(tmp_path):
    file = write(tmp_path / "pair.yaml", {**MINIMAL, "speculation": {"guessers": ["draft", "oracle"]}})
    variable = "OUTRIDER_SPECULATION__GUESSERS"
    name = r"^speculation\.guessers\[0\] must be one of draft, .*, got 'oracle' "
    with pytest.raises(ConfigError, match=rf"speculation\.guessers\[1\] .*'oracle' \({file}:\d\)$"):
        read_config(file)
    with pytest.raises(ConfigError, match=rf"{name}\(--set speculation\.guessers=\[oracle\]\)$"):
        read_config(file, ["speculation.guessers=[oracle]"])
    with pytest.raises(ConfigError, match=rf"{name}\({variable} in the environment\)$"):
        service_config(file, list(environment_settings({variable: "[oracle]"})))
    with pytest.raises(ConfigError, match=r"needs speculation\.retrieval_index"):
        read_config(file, ["speculation.guessers=[retrieval]"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lookup_min_match", 0),
        ("lookup_max_match", 1),
        ("lookup_max_match", 17),
        ("lookup_branches", 5),
        ("lookup_continuation", "oldest"),
        ("draft_temperature", 0),
        ("draft_temperature", 101),
    ],
)
def test_settings_of_guesses_have_their_ranges(name, value):
    with pytest.raises(ConfigError, match=f"speculation.{name}"):
        demo_config([f"speculation.{name}={value}"])


def test_an_unknown_guesser_of_one_model_of_several_is_named_with_its_model_and_line(tmp_path):
    file = tmp_path / "models.yaml"
    engine = "target: {engine: {model: /a}}"
    file.write_text(
        f"models:\n  - {{model_name: a, {engine}}}\n"
        f"  - model_name: b\n    {engine}\n    speculation:\n      guessers: [draft, nope]\n"
    )
    place = re.escape(f"{file}:6")
    with pytest.raises(ConfigError, match=rf"^models\.1\.speculation\.guessers\[1\] must be .*'nope' \({place}\)$"):
        read_fleet(file)


def test_adapters_have_names_of_their_own_and_belong_to_targets():
    adapted = {"engine": {"model": "/m", "adapters": {"a": "/a"}}}
    assert parse_config({"target": adapted, "model_name": "m"}).target.engine.adapters == {"a": "/a"}
    with pytest.raises(ConfigError, match=r"target.engine.adapters must be of other names than model_name, got 'a'"):
        parse_config({"target": adapted, "model_name": "a"})
    with pytest.raises(ConfigError, match=r"engine.adapters must be empty: only targets have adapters"):
        parse_config({"target": {"engine": {"model": "/m"}}, "draft": adapted})
    models = [{"target": adapted, "model_name": name} for name in ("m", "n")]
    with pytest.raises(ConfigError, match=r"of different names, those of target.engine.adapters too"):
        parse_fleet({"models": models})
