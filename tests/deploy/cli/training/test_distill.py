"""`outrider distill`: a draft from a checkpoint or a size, a training that goes on, and clear refusals."""

from __future__ import annotations

import json
from typing import get_args, get_type_hints

import pytest

from deploy.cli import main
from deploy.cli.training.distill import DistillOptions
from tests import checkpoints
from workers.training import OBJECTIVES

FAST = ("--steps", "2", "--batch", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(f"text number {number}, and so on") + "\n" for number in range(24)))
    return path


def argv(target, data, draft, out, *more):
    given = ("--target", target, "--draft", draft, "--data", data, "--out", out, *FAST, *more)
    return ["distill", *map(str, given)]


def test_a_new_draft_is_distilled_and_goes_on(target, data, tmp_path, capsys):
    work = ("--work", tmp_path / "work")
    assert main.main(argv(target, data, "1x64", tmp_path / "a", *work)) == 0
    out, err = capsys.readouterr()
    assert "text, temperature 0: greedy (T = 0) " in out
    assert f"outrider serve --target {target} --draft {tmp_path / 'a'}" in out
    assert "step 2 of 2: loss " in err
    assert main.main(argv(target, data, "1x64", tmp_path / "b", *work, "--steps", 4, "--temperature", 1)) == 0
    assert "step 4 of 4: loss " in capsys.readouterr().err
    card = (tmp_path / "b/README.md").read_text()
    assert f"outrider distill --target {target.name} --data data.jsonl" in card
    assert "--draft 1x64" in card
    assert card.count("--out b`") == card.count("--out") == 1, "the command can be run as it stands"
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("nowhere", "--draft: there is no directory nowhere"),
        ("2x100", "--draft: the width of a new draft must be a multiple of 64, got 2x100"),
    ],
)
def test_a_draft_that_is_neither_a_checkpoint_nor_a_size_is_refused(target, data, tmp_path, capsys, draft, problem):
    assert main.main(argv(target, data, draft, tmp_path / "out")) == main.EXIT_NO_START
    assert problem in capsys.readouterr().err


def test_all_objectives_can_be_named():
    assert list(get_args(get_type_hints(DistillOptions)["objective"])) == list(OBJECTIVES)


def test_the_cheaper_objective_is_the_default():
    assert DistillOptions.objective == "kl"
