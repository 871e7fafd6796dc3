"""`outrider check` of models, with and without their weights."""

from __future__ import annotations

import pytest

from deploy.cli import main
from tests import checkpoints, eagle


def run(*argv: str) -> int:
    return main.main(argv)


def test_check_says_whether_a_pair_can_be_served_and_why_not(tmp_path, capsys):
    target = checkpoints.write("llama", tmp_path / "target")
    assert run("check", "--target", str(target)) == 0
    assert "servable" in capsys.readouterr().out
    assert run("check", "--target", str(target), "--draft", str(tmp_path)) == 1
    assert "not servable" in capsys.readouterr().out


def test_check_without_weights_says_the_same_of_a_model_and_how_far_it_has_looked(tmp_path, capsys):
    target, draft = (checkpoints.write("llama", tmp_path / name) for name in ("target", "draft"))
    pair = ("check", "--target", str(target), "--draft", str(draft))
    assert run(*pair) == run(*pair, "--no-weights") == 0
    *loaded, verdict, once_more, and_more, less = capsys.readouterr().out.splitlines()
    assert loaded == [once_more, and_more]
    assert verdict == "servable: draft and target share their vocabulary"
    assert less.startswith("servable, as far as can be told without the weights: ")
    weights = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(weights[:-1])
    assert run(*pair, "--no-weights") == 1
    assert "not servable: " in (said := capsys.readouterr().out)
    assert "damaged or incomplete" in said


@pytest.fixture(scope="module")
def target_and_head(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    return str(checkpoints.write("llama", path / "target")), eagle.head_at(path / "head")[0]


def test_check_says_what_a_head_is_and_which_layers_it_reads(target_and_head, capsys):
    target, head = target_and_head
    asked = ("check", "--target", target, "--head", head)
    assert run(*asked) == run(*asked, "--no-weights") == 0
    _, loaded, _, _, described, _ = capsys.readouterr().out.splitlines()
    assert loaded.startswith(f"{head}: EagleHead, ")
    assert loaded.endswith(f"a head that reads the target's layers {eagle.LAYER_IDS}")
    assert described == f"{head}: a head that reads the target's layers {eagle.LAYER_IDS}"


@pytest.mark.slow
def test_check_measures_the_passes_of_a_head(target_and_head, tmp_path, capsys):
    target, head = target_and_head
    (tmp_path / "prompts").write_text("a b c\n")
    measured = ("--measure", "--prompts", str(tmp_path / "prompts"), "--tokens", "4")
    assert run("check", "--target", target, "--head", head, *measured) == 0
    assert "a pass of the head takes " in capsys.readouterr().out


def test_check_says_why_a_head_does_not_fit(target_and_head, tmp_path, capsys):
    target, _ = target_and_head
    other, _ = eagle.head_at(tmp_path / "other", target_hidden_size=2 * eagle.HIDDEN)
    assert run("check", "--target", target, "--head", other) == 1
    assert "not servable: " in capsys.readouterr().out
    assert run("check", "--target", target, "--head", str(tmp_path)) == 1
    assert "describes no head" in capsys.readouterr().out
