"""Recorded agreement is found where the package is, read as it was meant, and replayed text by text."""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.speculation.candidates import MAX_RANKS
from simulation.engines.recorded import (
    COLUMNS,
    DEMO_TRACES,
    MAX_GAMMA,
    MAX_RANK,
    RECORDED_TEMPERATURES,
    SHARE_RANKS,
    Column,
    TraceLaw,
)
from simulation.engines.texts import NEVER_RANKED


def written(tmp_path: Path, **arrays: Any) -> Path:
    """A recording of two texts of two tokens; columns that are not given are 0."""
    path = tmp_path / "traces.npz"
    columns = {f"{column}@0.5": np.array(arrays.get(column, [[0, 0], [0, 0]]), np.uint8) for column in COLUMNS}
    shares = np.array(arrays.get("shares", np.zeros((2, 2, len(SHARE_RANKS)))), np.uint8)
    blocks = {"blocks@0.5": np.array(arrays["blocks"], np.uint8)} if "blocks" in arrays else {}
    np.savez(path, **columns, **blocks, **{"shares@0.5": shares})
    return path


def test_bytes_are_read_as_what_they_stand_for(tmp_path):
    path = written(tmp_path, rank=[[0, MAX_RANK], [3, 1]], alpha=[[255, 0], [51, 0]], entropy=[[64, 0], [0, 0]])
    law = TraceLaw.load(0.5, path)
    assert (law.at(0, 0).rank, law.at(0, 1).rank, law.at(1, 0).rank) == (0, NEVER_RANKED, 3)
    assert (law.at(0, 0).alpha, law.at(1, 0).alpha, law.at(0, 0).entropy) == (1.0, 0.2, 2.0)
    assert law.num_accepted_of_block(0, 0, 2) is None, "no chain was judged"
    with pytest.raises(KeyError):
        TraceLaw.load(0.7, path)


def test_shares_are_parts_of_the_confidence(tmp_path):
    steps = np.full((2, 2, len(SHARE_RANKS)), 255)
    steps[0, 0] = [0, 16, 32, 32, 32, 32, 32, 32, 48, 48, 48, 64]
    law = TraceLaw.load(0.5, written(tmp_path, confidence=[[255, 0], [51, 0]], shares=steps))
    shares = law.at(0, 0).shares
    assert len(shares) == MAX_RANKS
    assert [-math.log(share) for share in shares[:8]] == pytest.approx([0, 1, 2, 2, 2, 2, 2, 2])
    assert [-math.log(shares[rank]) for rank in (11, 15, 23, 31)] == pytest.approx([3, 3, 3, 4])
    between = math.log(10 / 8) / math.log(12 / 8)
    assert -math.log(shares[9]) == pytest.approx(2 + between), "on the line between its neighbours"
    assert law.at(1, 0).shares[0] == pytest.approx(0.2 * math.exp(-255 / 16))


def test_a_text_goes_on_with_the_next_one(tmp_path):
    law = TraceLaw.load(0.5, written(tmp_path, rank=[[1, 2], [3, 4]]))
    assert [law.at(0, index).rank for index in range(6)] == [1, 2, 3, 4, 1, 2]
    assert [law.at(5, index).rank for index in range(2)] == [3, 4]


def test_of_a_block_as_much_is_accepted_as_was_of_one_of_its_length(tmp_path):
    blocks = np.arange(4 * MAX_GAMMA).reshape(2, 2, MAX_GAMMA)
    law = TraceLaw.load(0.5, written(tmp_path, blocks=blocks))
    for index, recorded in enumerate((blocks[0, 0], blocks[0, 1], blocks[1, 0], blocks[1, 1])):
        assert [law.num_accepted_of_block(0, index, length) for length in range(1, MAX_GAMMA + 1)] == list(recorded)
        assert law.num_accepted_of_block(0, index, MAX_GAMMA + 1) is None, "no longer one was judged"


def test_the_demo_traces_belong_to_the_package_and_are_small():
    package = resources.files("simulation")
    assert package.joinpath("traces", "demo.npz").is_file()
    assert DEMO_TRACES.stat().st_size < 400_000
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert "traces/*.npz" in pyproject["tool"]["setuptools"]["package-data"]["simulation"]


@pytest.mark.parametrize("temperature", RECORDED_TEMPERATURES)
def test_the_demo_traces_are_what_two_models_can_have_said(temperature):
    """Coupled acceptance lies where theory wants it; more guesses are not accepted less; a chain has its length."""
    law = TraceLaw.load(temperature)
    assert len(law.columns[Column.RANK]) == 40
    assert all(law.at(0, index).shares[0] == law.at(0, index).confidence for index in range(160))
    ranks, alpha = law.columns[Column.RANK], law.columns[Column.ALPHA].mean() / 255
    coupled = (ranks == 0).mean()
    assert 0.5 < coupled < 0.95
    if temperature == 0:
        assert alpha == pytest.approx(coupled)
        assert law.blocks is None
        return
    assert alpha / (2 - alpha) < coupled < alpha + 0.01
    assert law.blocks is not None
    assert law.blocks.shape == (*ranks.shape, MAX_GAMMA)
    assert (law.blocks <= np.arange(1, MAX_GAMMA + 1)).all()
    means = law.blocks.mean(axis=(0, 1))
    assert (np.diff(means) > 0).all()
    assert means[0] == pytest.approx(alpha, abs=0.02), "of one guess, block verification is rejection"
    assert means[3] > sum(alpha**depth for depth in range(1, 5)), "of more it accepts more than independent coins"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_shared_noise_is_why_corrections_can_be_ranked(temperature):
    law = TraceLaw.load(temperature)
    ranks, plain_ranks = law.columns[Column.RANK], law.columns[Column.PLAIN_RANK]
    corrected = ranks > 0
    assert (ranks[corrected] <= 4).mean() > 0.75
    assert (plain_ranks < 4).mean() < (ranks < 4).mean() - 0.1
