"""What `outrider check` says of models, with and without their weights."""

from __future__ import annotations

from deploy.cli import main
from tests import checkpoints


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
