"""`check`, `serve` and `LLM` say the same of the same path, and say it before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError
from deploy.checkpoints import OFFLINE_VARIABLE, check_directory, check_models
from deploy.cli import main
from outrider import LLM
from tests import checkpoints, eagle
from tests.workers.model.test_loader import edit_json, split_into_shards

Change = Callable[[Path], object]


def gguf_alone(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    (path / "model-q4.gguf").write_bytes(b"GGUF")


def no_weight_map(path: Path) -> None:
    split_into_shards(path)
    (path / "model.safetensors.index.json").write_text('{"metadata": {}}')


def no_metadata(path: Path) -> None:
    split_into_shards(path)
    edit_json(path / "model.safetensors.index.json", metadata=None)


def su(path: Path) -> None:
    edit_json(path / "config.json", rope_scaling={"type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4})


def unknown_rope(path: Path) -> None:
    edit_json(path / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 10_000.0})


def left_over(path: Path) -> None:
    split_into_shards(path)
    shard = path / "model-00003.safetensors"
    save_file({"score.weight": torch.zeros(1)}, shard)
    index = path / "model.safetensors.index.json"
    edit_json(index, weight_map={**json.loads(index.read_text())["weight_map"], "score.weight": shard.name})


REFUSALS: dict[str, tuple[Change, str]] = {
    "a GGUF alone": (gguf_alone, "has no model.safetensors (found model-q4.gguf); only safetensors weights are served"),
    "an index of nothing": (no_weight_map, "model.safetensors.index.json is not an index of shards"),
    "a rope that there is none of": (unknown_rope, "'spiral'"),
    "a rope by an old name": (su, "KeyError: 'su'"),
    "ends that are no ids": (lambda path: edit_json(path / "generation_config.json", eos_token_id="x"), "got 'x'"),
    "a temperature below 0": (
        lambda path: edit_json(path / "generation_config.json", temperature=-1.0),
        "generation_config.json",
    ),
    "a top_p above 1": (lambda path: edit_json(path / "generation_config.json", top_p=1.5), "generation_config.json"),
    "a template that is none": (lambda path: (path / "chat_template.jinja").write_text("{% if %}"), "Jinja template"),
    "quantized": (lambda path: edit_json(path / "config.json", quantization_config={"bits": 4}), "quant_method None"),
    "a tensor too many": (left_over, "have 1 tensor, score.weight"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
}


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main.main(argv) in (1, 2)
    captured = capsys.readouterr()
    return (captured.out + captured.err).strip().splitlines()[-1].partition(": ")[2]


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.launch.local.local_cluster", lambda *_, **__: pytest.fail("Ray has been started"))


@pytest.mark.usefixtures("never_started")
@pytest.mark.parametrize(("change", "problem"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_is_refused_by_all_in_the_same_words(change: Change, problem: str, tmp_path, capsys) -> None:
    path = checkpoints.write("llama", tmp_path / "model")
    change(path)
    of_check = said_by(capsys, "check", "--target", str(path))
    assert problem in of_check
    assert said_by(capsys, "check", "--no-weights", "--target", str(path)) == of_check
    assert said_by(capsys, "serve", "--target", str(path)) == of_check
    with pytest.raises(Exception) as caught:
        LLM(path)
    assert str(caught.value) == of_check


@pytest.mark.usefixtures("never_started")
@pytest.mark.parametrize("path", ["some/model", "/nowhere/model.gguf", "{}/model.gguf"])
def test_a_path_that_is_no_directory_is_refused_by_all_in_the_same_words(path: str, tmp_path, capsys) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    path = path.format(tmp_path)
    of_check = said_by(capsys, "check", "--target", path)
    assert said_by(capsys, "serve", "--target", path) == of_check
    of_draft = said_by(capsys, "check", "--target", str(checkpoints.write("llama", tmp_path / "m")), "--draft", path)
    assert of_draft == of_check.replace("--target", "--draft")


@pytest.mark.parametrize("change", [no_metadata, lambda path: edit_json(path / "generation_config.json", top_k=0)])
def test_what_is_called_servable_is_served(change: Change, tmp_path, capsys) -> None:
    path = checkpoints.write("llama", tmp_path / "model")
    change(path)
    assert main.main(("check", "--target", str(path))) == 0
    with LLM(path, settings={"target.engine.kv_cache_tokens": 256, "target.engine.num_threads": 1}) as llm:
        assert llm.generate([1, 2], max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("path", "is_offline", "problem"),
    [
        ("/nowhere", "0", "^--target: there is no directory /nowhere$"),
        ("some/model", "1", "HF_HUB_OFFLINE is set, so the hub must not be reached"),
        ("some/model", "0", "hf download some/model --local-dir model, and give it"),
    ],
)
def test_an_id_of_the_hub_is_no_directory(path, is_offline, problem, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(OFFLINE_VARIABLE, is_offline)
    with pytest.raises(ConfigError, match=problem):
        check_directory("--target", Path(path))
    check_directory("--target", tmp_path)


@pytest.mark.parametrize("place", ["target", "draft"])
def test_a_head_of_another_target_is_refused_before_start(tmp_path, place):
    target = checkpoints.write("llama", tmp_path / "target")
    tensors = eagle.tensors_of({**eagle.CONFIG, "vocab_size": 500})
    head = eagle.write(tmp_path / "head", {**eagle.CONFIG, "vocab_size": 500}, tensors)
    plain, with_head = EngineConfig(str(target), feature_layers=(0, 1, 2)), EngineConfig(str(target), head=head)
    engines = (with_head, {}) if place == "target" else (plain, {"draft": with_head})
    with pytest.raises(CheckpointError, match="is of another target: its vocab_size is 500, not 304"):
        check_models(*engines, "target")


def test_a_head_whose_target_sends_no_features_is_refused_before_start(tmp_path):
    target = str(checkpoints.write("llama", tmp_path / "target"))
    head, _ = eagle.head_at(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"reads the target's layers \[0, 1, 2\]: set feature_layers"):
        check_models(EngineConfig(target), {"draft": EngineConfig(target, head=head)}, "target")
