"""Scaled weights of experts and of latents are read in parts as the floats that they stand for."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.config import EngineConfig
from tests.quantized import write
from workers.model import ModelShard, load

KINDS = ("DeepSeek", "FP8 rows", "FP8 weights", "W8A8", "W4A16", "GPTQ", "AWQ")
RANKS = [
    pytest.param(index, by_expert, marks=() if index else pytest.mark.slow)
    for by_expert in (False, True)
    for index in (0, 1)
]
"""The first rank would not notice where a part begins."""


def tensors(path: Path, index: int, *, by_expert: bool) -> dict[str, Tensor]:
    config = EngineConfig(str(path), tensor_parallel=2, expert_parallel=by_expert)
    model = load(config, lambda _: None, ModelShard(index, 2, by_expert)).model
    return dict(chain(model.named_parameters(), model.named_buffers()))


@pytest.mark.parametrize(("index", "by_expert"), RANKS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", KINDS)
def test_a_rank_has_the_floats_of_its_part(name: str, family: str, index: int, by_expert: bool, tmp_path: Path) -> None:
    scaled, plain = write(name, tmp_path, family)
    found, expected = (tensors(path, index, by_expert=by_expert) for path in (scaled, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
