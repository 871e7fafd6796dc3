"""`outrider check --gpu` and `outrider plan`: what a pair needs, from config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import ConfigError
from deploy.cli import main
from deploy.cli.planning import needs as module
from deploy.cli.planning.check import CheckOptions
from deploy.cli.planning.needs import Needs, needs_of, parse_gpu
from tests.deploy.cli.parsing import parsed
from workers import model

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "bench" / "checkpoints" / "configs"
QUICK = ("--output-tokens", "8", "--prompt-tokens", "64")
COMMIT = "0" * 40


def run(*argv: str) -> int:
    return main.main(argv)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return config(tmp_path_factory.mktemp("large"), "llama-3.3-70b-instruct")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return config(tmp_path_factory.mktemp("small"), "llama-3.2-1b-instruct")


@pytest.fixture(autouse=True, scope="module")
def _each_model_and_load_once() -> Iterator[None]:
    """Most tests ask for the same: to look at 80 layers takes two seconds, to simulate five ways of decoding one."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(model, "outline_of", cache(model.outline_of))
        patches.setattr(module, "compare", cache(module.compare))
        yield


def config(folder: Path, name: str) -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text())["config"]))
    return str(file)


def needs(*argv: str) -> Needs:
    options = parsed(CheckOptions, argv)
    assert options.gpu is not None
    return needs_of(options, options.gpu)


def test_a_config_is_enough_to_say_what_a_pair_needs(large: str, small: str, tmp_path: Path, capsys: Any) -> None:
    pair = ("--target", large, "--draft", small, "--gpu", "h200:4", "--draft-gpu", "h100")
    assert run("check", *pair, *QUICK, "--rate", "50", "--json", str(tmp_path / "needs.json")) == 0
    said = capsys.readouterr().out
    for expected in ("141.1 GB in bfloat16, 35.3 a GPU", "tokens fit", "by roofline", "pipelined", "a million tokens"):
        assert expected in said
    found = {each["name"]: each["value"] for each in json.loads((tmp_path / "needs.json").read_text())}
    assert found["weights of the target"] == pytest.approx(141.1, abs=0.1)
    assert found["one stream, pipelined"] > found["one stream, plain"]


def test_states_of_recurrent_layers_limit_the_streams(tmp_path: Path, capsys: Any) -> None:
    target = config(tmp_path, "qwen3-next-80b-a3b-instruct")
    assert run("check", "--target", target, "--gpu", "b300", *QUICK) == 0
    assert "states    77.9 MB each, 523 fit: 47 streams with 8 guesses each" in capsys.readouterr().out
    found = needs("--target", target, "--gpu", "b300", "--itl-ms", "1000", *QUICK)
    assert found.load.streams == found.target.num_states // 3 < found.target.kv_tokens // 72


def test_a_load_takes_as_many_replicas_as_do_its_requests_with_a_fifth_to_spare(small: str) -> None:
    few, many = (needs("--target", small, "--gpu", "l4", "--rate", rate, *QUICK).load for rate in ("0.001", "900"))
    assert few.num_targets == 1
    assert many.num_targets == pytest.approx(900 / (0.8 * many.requests_per_s), abs=1)
    assert many.dollars == pytest.approx(0.7 * many.num_targets)
    assert many.dollars_a_million == pytest.approx(many.dollars / (900 * 8 * 3600) * 1e6)


def test_fewer_streams_share_a_replica_where_tokens_must_come_sooner(large: str) -> None:
    fast, slow = (needs("--target", large, "--gpu", "h200:4", "--itl-ms", ms, *QUICK).load for ms in ("14", "100"))
    assert fast.streams < slow.streams
    assert fast.requests_per_s < slow.requests_per_s


def test_kv_in_8_bits_has_room_for_twice_as_many_tokens(large: str, small: str, capsys: Any) -> None:
    pair = ("--target", large, "--draft", small, "--gpu", "h100:4", "--draft-gpu", "l4", *QUICK)
    wide = needs(*pair)
    narrow = needs(*pair, "--kv-dtype", "fp8", "--draft-kv-dtype", "fp8")
    assert wide.draft is not None
    assert narrow.draft is not None
    for before, after in ((wide.target, narrow.target), (wide.draft, narrow.draft)):
        assert after.kv_tokens == pytest.approx(2 * before.kv_tokens, abs=1)
        assert after.outline.shape.weight_bytes == before.outline.shape.weight_bytes
    assert run("check", *pair, "--kv-dtype", "fp8") == 0
    assert "kB a token on a GPU, in 8 bits; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--gpu a100:4 --kv-dtype fp8", "--kv-dtype fp8 needs a GPU of compute capability 8.9 or more, unlike a100"),
        ("--gpu h100:4 --draft-gpu a10g --draft {} --draft-kv-dtype fp8", "--draft-kv-dtype fp8 needs"),
        ("--gpu h100:4 --draft-kv-dtype fp8", "--draft-gpu, --acceptance and --draft-kv-dtype need --draft"),
        ("--kv-dtype fp8", "--kv-dtype needs --gpu"),
    ],
)
def test_kv_in_8_bits_is_refused_where_it_cannot_be(
    large: str, small: str, capsys: Any, flags: str, problem: str
) -> None:
    assert run("check", "--target", large, *flags.format(small).split()) == 2
    assert problem in capsys.readouterr().err


def test_prices_may_be_given(small: str) -> None:
    assert needs("--target", small, "--gpu", "l4", "--dollars", "7", *QUICK).load.dollars == 7


def test_a_limit_of_the_context_is_said_with_its_reason(tmp_path: Path, capsys: Any) -> None:
    assert run("check", "--target", config(tmp_path, "llama-4-scout-17b-16e-instruct"), "--gpu", "b300", *QUICK) == 0
    assert "context   8,191 tokens: its attention is in chunks" in capsys.readouterr().out


def test_what_does_not_fit_is_said_with_what_would(large: str, capsys: Any) -> None:
    assert run("check", "--target", large, "--gpu", "h200") == 1
    said = capsys.readouterr().out
    assert said.startswith("not servable: the target does not fit on 1 h200: 141.1 GB of weights")
    assert "--gpu h200:2 has room" in said


@pytest.mark.parametrize("text", ["x9", "h200:3", "h200:", "h200:x", ":2", ""])
def test_a_wrong_gpu_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--draft-gpu must be one of l4"):
        parse_gpu("--draft-gpu", text)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("--rate", "4"), "--rate needs --gpu"),
        ((), "--target"),
        (("--gpu", "h200:4", "--draft-gpu", "l4"), "--draft-gpu, --acceptance and --draft-kv-dtype need --draft"),
        (("--gpu", "h200:4", "--measure"), "--gpu reads config.json alone"),
        (("--gpu", "h200:4", "--prompt-tokens", "200000"), "--prompt-tokens and --output-tokens: 200300 tokens"),
        (("--gpu", "h200:4", "--itl-ms", "0"), "--itl-ms"),
        (("--gpu", "h200:4", "--acceptance", "2"), "--acceptance"),
    ],
)
def test_a_wrong_option_is_named(argv: tuple[str, ...], field: str, large: str, capsys: Any) -> None:
    assert run("check", "--target", large, *argv) == 2
    assert field in capsys.readouterr().err


def test_a_draft_without_a_gpu_is_asked_for_one(large: str, small: str, capsys: Any) -> None:
    assert run("check", "--target", large, "--draft", small, "--gpu", "h200:4") == 2
    assert "--draft-gpu is needed" in capsys.readouterr().err


def test_a_plan_sets_what_it_counted_with(large: str, small: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    repositories = ("--target-repo", f"a/b@{COMMIT}", "--draft-repo", f"a/c@{COMMIT}", "--out", str(tmp_path / "out"))
    pair = ("--target", large, "--draft", small, "--gpu", "h200:4", "--draft-gpu", "l4")
    assert run("plan", *QUICK, *pair, *repositories, "--kv-dtype", "fp8") == 0
    args = yaml.safe_load((tmp_path / "out" / "serve.yaml").read_text())["applications"][0]["args"]
    assert args["target"]["engine"]["kv_dtype"] == "fp8"
    assert "kv_dtype" not in args["draft"]["engine"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"--target-repo": "a/b@main"}, "--target-repo must be OWNER/NAME@COMMIT"),
        ({"--draft-repo": "b"}, "--draft-repo must be"),
        ({"--k8s": "deploy"}, "--k8s: "),
        ({"--out": "k8s"}, "--out: "),
        ({"--gpu": "b300:8"}, "--gpu: gke has no nodes with 8 b300"),
        ({"--draft-gpu": "l4:2"}, "--draft-gpu: a draft's pod has one GPU"),
    ],
)
def test_a_plan_names_what_is_wrong(
    changes: dict[str, str], field: str, large: str, small: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(ROOT)
    given = {
        "--target": large,
        "--draft": small,
        "--gpu": "h200:4",
        "--draft-gpu": "l4",
        "--target-repo": f"a/b@{COMMIT}",
        "--draft-repo": f"a/c@{COMMIT}",
        "--out": str(tmp_path / "out"),
    } | changes
    assert run("plan", *QUICK, *(part for pair in given.items() for part in pair)) == 2
    assert field in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
