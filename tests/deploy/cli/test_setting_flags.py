"""Every setting is a key of the file, a variable and a flag, with one precedence; each value's source can be told."""

from __future__ import annotations

from dataclasses import fields

import pytest

from core.config import Limits, ServiceConfig
from core.errors import ConfigError
from deploy.cli import main
from deploy.cli.serve import ServeOptions, explained
from deploy.cli.settings import catalogue
from deploy.settings import as_explained_yaml, read_config
from tests.deploy.cli.parsing import parsed

VARIABLE = "OUTRIDER_LIMITS__MAX_SESSIONS"
FILE = """\
target:
  engine: {model: /somewhere}
limits:
  max_queued: 1
  max_sessions: 11
"""


def options(tmp_path, *argv, text=FILE):
    file = tmp_path / "service.yaml"
    file.write_text(text)
    return parsed(ServeOptions, ["--config", str(file), *argv]), file


@pytest.mark.parametrize(
    ("in_file", "variable", "flag", "value", "source"),
    [
        (False, None, None, Limits().max_sessions, "default"),
        (True, None, None, 11, "{file}:5"),
        (False, "12", None, 12, f"{VARIABLE} in the environment"),
        (True, "12", None, 12, f"{VARIABLE} in the environment"),
        (False, None, "13", 13, "--limits.max_sessions"),
        (True, None, "13", 13, "--limits.max_sessions"),
        (False, "12", "13", 13, "--limits.max_sessions"),
        (True, "12", "13", 13, "--limits.max_sessions"),
    ],
)
def test_a_flag_goes_before_the_environment_that_before_the_file_and_that_before_the_default(
    tmp_path, monkeypatch, in_file, variable, flag, value, source
):
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    argv = ("--limits.max-sessions", flag) if flag is not None else ()
    given, file = options(tmp_path, *argv, text=FILE if in_file else FILE.replace("  max_sessions: 11\n", ""))
    config, sources = explained(given)
    assert config.limits.max_sessions == value
    assert sources.of("limits.max_sessions") == source.format(file=file)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (
            "--limits.max_sessions 2 --set limits.max_sessions=3",
            "--limits.max_sessions and --set limits.max_sessions=3",
        ),
        ("--set limits.max_sessions=2 --set limits.max_sessions=3", "--set limits.max_sessions=2 and --set limits"),
        ("--gamma 2 --speculation.max_draft_tokens 3", "--gamma and --speculation.max_draft_tokens"),
        ("--dtype bfloat16 --target.engine.dtype float32", "--target.engine.dtype and --dtype"),
        ("--target . --target.engine.model /b", "--target and --target.engine.model"),
        ("--draft none --draft.engine.num_threads 2", "--draft and --draft.engine.num_threads"),
        ("--draft . --set draft=null", "--draft and --set draft=null"),
        ("--lora a=. --set target.engine.adapters={b:c}", "--lora and --set target.engine.adapters={b: c}"),
        ("--lora a=. --lora a=/", "--lora a: has two directories, "),
        ("--target.autoscaling {max_replicas:4} --target.autoscaling.max_replicas 2", "--target.autoscaling and "),
        ("--target.autoscaling.min_replicas 2 --set target.autoscaling={max_replicas:4}", "min_replicas and --set "),
        ("--pair demo --target .", "--pair demo and --target both name the target: give one of them"),
        ("--pair demo --config {file}", "--pair demo and --config both name the target"),
        ("--pair first --target.engine.model /b", "--pair first and --target.engine.model both name the target"),
        ("--metrics-port 9000", "--metrics-port 9000 is --grpc-port, too"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(tmp_path, monkeypatch, capsys, argv, named):
    monkeypatch.chdir(tmp_path)
    _, file = options(tmp_path)
    assert main.main(["serve", *(word.replace(":", ": ").replace("{file}", str(file)) for word in argv.split())]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_a_type_alone_makes_no_draft_and_may_be_said_twice(tmp_path):
    argv = ("--dtype", "bfloat16", "--target.engine.dtype", "bfloat16")
    config, sources = explained(options(tmp_path, *argv)[0])
    assert (config.target.engine.dtype, sources.of("target.engine.dtype")) == ("bfloat16", "--dtype")
    assert config.draft is None


def test_groups_and_parts_of_them_may_be_given(tmp_path):
    argv = ("--target.autoscaling", "{max_replicas: 4}", "--target.autoscaling.min_replicas", "2")
    config, sources = explained(options(tmp_path, *argv)[0])
    assert config.target.autoscaling is not None
    assert (config.target.autoscaling.min_replicas, config.target.autoscaling.max_replicas) == (2, 4)
    assert sources.of("target.autoscaling.max_replicas") == "--target.autoscaling"
    assert sources.of("target.autoscaling.min_replicas") == "--target.autoscaling.min_replicas"


def test_the_demo_pair_is_a_source():
    config, sources = explained(parsed(ServeOptions, ["--draft", "none"]))
    assert config.draft is None
    assert sources.of("draft") == "--draft"
    assert sources.of("target.engine.deterministic") == "the demo pair"
    assert sources.of("target.engine.dtype") == "default"


def test_what_is_printed_with_sources_is_a_file_of_the_same_settings(tmp_path):
    argv = ("--limits.max_sessions", "2", "--target.resources", "{small: 1}", "--target.labels", "{zone: 'in(a,b)'}")
    config, sources = explained(options(tmp_path, *argv)[0])
    text = as_explained_yaml(config, sources)
    (tmp_path / "again.yaml").write_text(text)
    assert read_config(tmp_path / "again.yaml") == config
    assert "  max_sessions: 2  # --limits.max_sessions\n" in text
    assert f"    model: /somewhere  # {tmp_path}/service.yaml:2\n" in text


@pytest.mark.parametrize(
    ("argv", "text", "problem"),
    [
        (("--limits.max_sessions", "0"), FILE, r"limits.max_sessions must be .* \(--limits.max_sessions\)$"),
        ((), FILE.replace("11", "0"), r"limits.max_sessions must be at least 1, got 0 \(.*service.yaml:5\)$"),
        (
            (),
            FILE.replace("max_queued", "max_qued"),
            r"limits.max_qued: there is no such setting \(.*service.yaml:4\)$",
        ),
        ((), "limits: {}\n", r"target: must be set \(.*service.yaml\)$"),
        (("--limits.max_sessions", "[1"), FILE, "the value in '--limits.max_sessions \\[1' is not YAML"),
    ],
)
def test_errors_name_the_key_and_its_source(tmp_path, argv, text, problem):
    with pytest.raises(ConfigError, match=problem):
        explained(options(tmp_path, *argv, text=text)[0])


def test_every_setting_says_what_it_is():
    names = [info.name for info in catalogue()]
    assert len(names) == len(set(names)) > 100
    assert {f"limits.{field.name}" for field in fields(Limits)} <= set(names)
    assert {field.name for field in fields(ServiceConfig)} <= {name.partition(".")[0] for name in names}
    assert [name for name in names if name.startswith("extra_drafts")] == ["extra_drafts"], "a list has no names inside"
    undocumented = [info.name for info in catalogue() if not info.help]
    assert undocumented == []


def test_the_list_of_settings_can_be_narrowed(capsys):
    assert main.main(["settings", "limits.max_queued"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--limits.max_queued  int, default 128\n    OUTRIDER_LIMITS__MAX_QUEUED\n    Largest number")
    assert main.main(["settings", "nothing"]) == main.EXIT_NO_START
    assert "no setting begins with 'nothing'" in capsys.readouterr().err


def test_adapters_are_named_by_flags_or_in_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    given, _ = options(tmp_path, "--lora", "sql=sql", "--lora", f"law={tmp_path}")
    config, sources = explained(given)
    assert config.target.engine.adapters == {"sql": str(tmp_path / "sql"), "law": str(tmp_path)}
    assert sources.of("target.engine.adapters.sql") == "--lora"
    in_file = "target: {engine: {model: /somewhere, adapters: {sql: sql}}}"
    assert explained(options(tmp_path, text=in_file)[0])[0].target.engine.adapters == {"sql": str(tmp_path / "sql")}


@pytest.mark.parametrize("text", ["sql", "=dir", "sql="])
def test_an_adapter_that_is_no_pair_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=f"--lora must be NAME=DIR, got '{text}'"):
        explained(options(tmp_path, "--lora", text)[0])


def test_an_adapter_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="--lora sql: there is no directory /nowhere/at/all"):
        explained(options(tmp_path, "--lora", "sql=/nowhere/at/all")[0])
